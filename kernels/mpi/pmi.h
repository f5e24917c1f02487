/* pmi.h -- what MPICH asks of a launcher (PMI-1), answered in the process itself from the job's store. */
#ifndef DDP_PMI_H
#define DDP_PMI_H

#include "../../core/comm/wire.h"

/* Sets PMI_FD, PMI_RANK and PMI_SIZE for the MPI_Init that follows, and starts the thread that answers. It lives as long
 * as the process: MPI_Finalize asks too. A status with the error set. */
DDP_LOCAL int pmi_begin(const ddp_boot *b);
/* After MPI_Init: takes them out of the environment, so that no child believes them. */
DDP_LOCAL void pmi_end(void);

#endif
