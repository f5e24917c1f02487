/* link: @B/obj/core/comm/environment.o */
/* test_environment.c -- L8: who a process is in its job, under every launcher's variables and under contradictory ones. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comm/environment.h"

static int failed;

static void report(const char *name, int ok, const char *got) {
    if (ok) printf("ok L8 %s\n", name);
    else printf("not ok L8 %s: got \"%s\"\n", name, got);
    failed |= !ok;
}

/* Makes "A=1 B=2" the whole environment. */
static void set_environment(const char *vars) {
    char copy[1024], *save = NULL;
    snprintf(copy, sizeof copy, "%s", vars);
    clearenv();
    for (char *v = strtok_r(copy, " ", &save); v; v = strtok_r(NULL, " ", &save)) {
        char *eq = strchr(v, '=');
        *eq = 0;
        setenv(v, eq + 1, 1);
    }
}

/* What is made of vars: "rank/size local_rank/local_size node/nodes", or the error's text. */
static void is(const char *name, const char *vars, const char *want) {
    char got[512];
    const char *why;
    ddp_environment e;
    set_environment(vars);
    int st = ddp__environment(&e);
    if (st == 0)
        snprintf(got, sizeof got, "%d/%d %d/%d %d/%d", e.rank, e.size, e.local_rank, e.local_size, e.node, e.nodes);
    else snprintf(got, sizeof got, "%s", ddp_error_take(&why) ? why : "no error");
    report(name, st == 0 ? strcmp(got, want) == 0 : st == DDP_EINVAL && strstr(got, want), got);
}

/* Where rank 0 is met: "host port", "host derived" for a port that follows from the job, or the error's text. */
static int meets(const char *name, const char *vars, const char *want) {
    char got[512], host[256];
    const char *why;
    ddp_environment e;
    int port = 0;
    set_environment(vars);
    int st = ddp__environment(&e);
    if (st == 0) st = ddp__environment_master(&e, host, sizeof host, &port);
    if (st < 0) snprintf(got, sizeof got, "%s", ddp_error_take(&why) ? why : "no error");
    else if (getenv("MASTER_PORT")) snprintf(got, sizeof got, "%s %d", host, port);
    else snprintf(got, sizeof got, "%s %s", host, port >= 10000 && port < 30000 ? "derived" : "no port");
    report(name, st == 0 ? strcmp(got, want) == 0 : strstr(got, want) != NULL, got);
    return port;
}

static void families(void) {
    is("nothing set is a world of one", "HOME=/", "0/1 0/1 0/1");
    is("RANK and WORLD_SIZE alone are one host", "RANK=1 WORLD_SIZE=3", "1/3 1/3 0/1");
    is("torchrun's variables", "RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 GROUP_RANK=1 GROUP_WORLD_SIZE=2",
       "5/8 1/4 1/2");
    is("DDP_RANK wins over RANK", "DDP_RANK=0 DDP_WORLD_SIZE=2 RANK=1 WORLD_SIZE=3", "0/2 0/2 0/1");
    is("under ddprun only its own variables count",
       "DDP_STORE=launcher DDP_RANK=7 DDP_WORLD_SIZE=9 RANK=1 WORLD_SIZE=2", "1/2 1/2 0/1");
    is("ddprun for one rank inside a Slurm step is a world of one",
       "DDP_STORE=launcher RANK=0 WORLD_SIZE=1 SLURM_STEP_ID=0 SLURM_PROCID=3 SLURM_NTASKS=4", "0/1 0/1 0/1");
    is("Open MPI's variables",
       "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2",
       "3/4 1/2 1/2");
    is("RANK wins over Open MPI's", "RANK=0 WORLD_SIZE=1 OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2", "0/1 0/1 0/1");
    is("Open MPI inside a Slurm step wins over it",
       "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_NTASKS=2", "3/4 3/4 0/1");
    is("a task of srun",
       "SLURM_STEP_ID=0 SLURM_PROCID=3 SLURM_NTASKS=5 SLURM_LOCALID=1 SLURM_NODEID=1 SLURM_STEP_NUM_NODES=3 "
       "SLURM_STEP_TASKS_PER_NODE=2(x2),1",
       "3/5 1/2 1/3");
    is("a task of srun, of the step's number of tasks, not the job's",
       "SLURM_STEP_ID=1 SLURM_PROCID=1 SLURM_NTASKS=8 SLURM_STEP_NUM_TASKS=2 SLURM_LOCALID=1", "1/2 1/2 0/1");
    is("the last host of uneven ones",
       "SLURM_STEP_ID=0 SLURM_PROCID=4 SLURM_NTASKS=5 SLURM_LOCALID=0 SLURM_NODEID=2 SLURM_STEP_NUM_NODES=3 "
       "SLURM_STEP_TASKS_PER_NODE=2(x2),1",
       "4/5 0/1 2/3");
    is("equal hosts without a list of tasks",
       "SLURM_STEP_ID=0 SLURM_PROCID=3 SLURM_NTASKS=4 SLURM_LOCALID=1 SLURM_NODEID=1 SLURM_STEP_NUM_NODES=2",
       "3/4 1/2 1/2");
    is("a batch script of Slurm is no task", "SLURM_JOB_ID=7 SLURM_PROCID=0 SLURM_NTASKS=4 SLURM_LOCALID=0",
       "0/1 0/1 0/1");
    is("the shell of salloc is no task",
       "SLURM_JOB_ID=7 SLURM_STEP_ID=4294967290 SLURM_PROCID=0 SLURM_NTASKS=4 SLURM_LOCALID=0", "0/1 0/1 0/1");
    is("MPICH's variables", "PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2", "1/2 1/2 0/1");
    is("MPICH whose helpers srun started",
       "PMI_RANK=3 PMI_SIZE=4 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2 SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_NTASKS=2",
       "3/4 1/2 1/2");
    is("ranks dealt to hosts in turn leave the host open", "PMI_RANK=1 PMI_SIZE=4 MPI_LOCALRANKID=0 MPI_LOCALNRANKS=2",
       "1/4 0/2 -1/0");
    is("a pod of a job with WORLD_SIZE", "JOB_COMPLETION_INDEX=1 WORLD_SIZE=3", "1/3 0/1 1/3");
    is("a pod of a job with JOB_COMPLETIONS", "JOB_COMPLETION_INDEX=2 JOB_COMPLETIONS=3", "2/3 0/1 2/3");
    is("an incomplete family is passed over", "RANK=3 PMI_RANK=1 PMI_SIZE=2", "1/2 1/2 0/1");
    is("an empty variable is none", "RANK= WORLD_SIZE= PMI_RANK=1 PMI_SIZE=2", "1/2 1/2 0/1");
    is("hosts of equal size follow from their number", "RANK=3 WORLD_SIZE=4 GROUP_RANK=1 GROUP_WORLD_SIZE=2",
       "3/4 1/2 1/2");
    is("a world of one needs no RANK", "WORLD_SIZE=1", "0/1 0/1 0/1");
}

static void contradictions(void) {
    is("RANK without WORLD_SIZE is named", "RANK=0", "init: RANK is 0 but WORLD_SIZE is not set");
    is("WORLD_SIZE without RANK is named", "WORLD_SIZE=2", "init: WORLD_SIZE is 2 but RANK is not set");
    is("a pod that does not know their number is told what to set", "JOB_COMPLETION_INDEX=1",
       "neither WORLD_SIZE nor JOB_COMPLETIONS is set; set one to the number of pods");
    is("a rank beyond the world", "RANK=2 WORLD_SIZE=2", "init: RANK is 2 in a world of 2 (WORLD_SIZE)");
    is("Open MPI's rank beyond its world", "OMPI_COMM_WORLD_RANK=5 OMPI_COMM_WORLD_SIZE=4",
       "init: OMPI_COMM_WORLD_RANK is 5 in a world of 4 (OMPI_COMM_WORLD_SIZE)");
    is("a rank that is no number", "RANK=one WORLD_SIZE=2", "init: RANK is \"one\", expected a whole number");
    is("a rank below 0", "RANK=-1 WORLD_SIZE=2", "init: RANK is \"-1\", expected a whole number from 0");
    is("a world of none", "RANK=0 WORLD_SIZE=0", "init: WORLD_SIZE is \"0\", expected a whole number from 1");
    is("a number with a tail", "PMI_RANK=1x PMI_SIZE=2", "init: PMI_RANK is \"1x\"");
    is("a number that is too long", "RANK=0 WORLD_SIZE=99999999999999999999",
       "init: WORLD_SIZE is \"99999999999999999999\"");
    is("a local rank beyond its host", "RANK=0 WORLD_SIZE=4 LOCAL_RANK=2 LOCAL_WORLD_SIZE=2",
       "init: LOCAL_RANK is 2, expected less than LOCAL_WORLD_SIZE, which is 2");
    is("a host with more ranks than the world", "RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=4",
       "init: LOCAL_WORLD_SIZE is 4 in a world of 2 (WORLD_SIZE)");
    is("a host beyond the hosts", "RANK=0 WORLD_SIZE=4 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2 GROUP_RANK=2 GROUP_WORLD_SIZE=2",
       "init: GROUP_RANK is 2, expected less than GROUP_WORLD_SIZE, which is 2");
    is("uneven hosts of unknown size", "RANK=0 WORLD_SIZE=3 GROUP_RANK=0 GROUP_WORLD_SIZE=2",
       "WORLD_SIZE is 3 on 2 hosts, and LOCAL_WORLD_SIZE does not say");
    is("Slurm's rank that is no number", "SLURM_STEP_ID=0 SLURM_PROCID=x SLURM_NTASKS=2",
       "init: SLURM_PROCID is \"x\"");
}

#define STEP "SLURM_JOB_ID=77 SLURM_NTASKS=4 SLURM_STEP_NUM_NODES=2 SLURM_STEP_NODELIST=n[03-05,9],m1 "
#define TWO_HOSTS "OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=0 "

static void masters(void) {
    meets("MASTER_ADDR and MASTER_PORT as set", "RANK=0 WORLD_SIZE=2 MASTER_ADDR=10.1.2.3 MASTER_PORT=29500",
          "10.1.2.3 29500");
    meets("one host needs no MASTER_ADDR", "RANK=0 WORLD_SIZE=2 MASTER_PORT=29500", "127.0.0.1 29500");
    meets("ranks known to be on one host meet on its loopback, whatever its name",
          "RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2 MASTER_ADDR=myhost MASTER_PORT=29500",
          "127.0.0.1 29500");
    meets("no port by hand is named", "RANK=0 WORLD_SIZE=2", "init: WORLD_SIZE is 2 but MASTER_PORT is not set");
    meets("a port that is none", "RANK=0 WORLD_SIZE=2 MASTER_PORT=99999", "init: MASTER_PORT is \"99999\"");
    int a = meets("Slurm's first host and a port of the step's own",
                  STEP "SLURM_STEP_ID=0 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0", "n03 derived");
    int b = meets("the same on another host", STEP "SLURM_STEP_ID=0 SLURM_PROCID=3 SLURM_LOCALID=1 SLURM_NODEID=1",
                  "n03 derived");
    int c = meets("another step", STEP "SLURM_STEP_ID=1 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0", "n03 derived");
    report("ranks of a step agree about the port", a == b && a > 0, "another port");
    report("steps have ports of their own", a != c && c > 0, "the same port");
    meets("MASTER_ADDR wins over Slurm's", STEP "SLURM_STEP_ID=0 SLURM_PROCID=0 SLURM_NODEID=0 MASTER_ADDR=h",
          "h derived");
    a = meets("mpirun on one host", "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2 OMPI_MCA_ess_base_jobid=715784193",
              "127.0.0.1 derived");
    b = meets("mpirun's second rank", "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_MCA_ess_base_jobid=715784193",
              "127.0.0.1 derived");
    report("ranks of mpirun agree about the port", a == b && a > 0, "another port");
    meets("a newer mpirun", "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 PMIX_NAMESPACE=prterun-h-12@1",
          "127.0.0.1 derived");
    meets("mpirun on two hosts is told what to set", TWO_HOSTS "OMPI_COMM_WORLD_RANK=0 OMPI_MCA_ess_base_jobid=7",
          "MASTER_ADDR is not set; set it to rank 0's host on all ranks (mpirun -x MASTER_ADDR=HOST)");
    meets("PMI without a job's name is told what to set", "PMI_RANK=0 PMI_SIZE=2", "MASTER_PORT is not set; set it");
    meets("pods are told what to set", "JOB_COMPLETION_INDEX=0 JOB_COMPLETIONS=2 MASTER_PORT=29500",
          "MASTER_ADDR is not set");
}

static void first(const char *list, const char *want) {
    char got[64], name[128];
    ddp__first_host(list, got, sizeof got);
    snprintf(name, sizeof name, "the first host of %s is %s", list, want);
    report(name, strcmp(got, want) == 0, got);
}

int main(void) {
    families();
    contradictions();
    masters();
    first("n1", "n1");
    first("n[03-05,9],m1", "n03");
    first("n[7],m1", "n7");
    first("m1,n[1-2]", "m1");
    first("r[1-2]n[3-4]x,z", "r1n3x");
    first("n[", "n");
    report("tasks on each host of 2(x3),1",
           ddp__tasks_on_node("2(x3),1", 0) == 2 && ddp__tasks_on_node("2(x3),1", 2) == 2 &&
               ddp__tasks_on_node("2(x3),1", 3) == 1 && ddp__tasks_on_node("2(x3),1", 4) == 0,
           "other numbers");
    return failed;
}
