/* chain.c -- a chain of elementwise ops becomes the source of one kernel: scalar functions of elementwise.def (scalar.cuh), 16 bytes
 * of the widest operand at a time where all lie densely, else any strides. */
#include "chain.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "nvrtc.h"
#include "recent.h"

/* ---- ops ---- */

enum { ANY_RESULT, BOOL_RESULT };
typedef struct scalar_op {
    const char *name;
    int operands, result;
    bool floats_only;
} scalar_op;
static const scalar_op ops[] = {
#define DDP_BINARY(op, expr) {#op, 2, ANY_RESULT, false},
#define DDP_BINARY_FLOAT(op, expr) {#op, 2, ANY_RESULT, true},
#define DDP_COMPARE(op, expr) {#op, 2, BOOL_RESULT, false},
#define DDP_UNARY(op, expr) {#op, 1, ANY_RESULT, false},
#define DDP_UNARY_FLOAT(op, expr) {#op, 1, ANY_RESULT, true},
#define DDP_VARIANT(op, expr) {#op, 1, ANY_RESULT, true},
#define DDP_VARIANT_2(op, expr) {#op, 2, ANY_RESULT, true},
#include "../elementwise.def"
};

static const scalar_op *op_of(const char *name) {
    for (size_t i = 0; i < sizeof ops / sizeof *ops; i++)
        if (strcmp(ops[i].name, name) == 0) return &ops[i];
    return NULL;
}

/* ---- dtypes of the values ---- */

static int step_fail(const ddp_chain *ch, int k, const char *why) {
    return ddp__fail(DDP_EINVAL, "chain: step %d, %s: %s", k + 1, ch->step[k].op, why);
}

/* The operands of step k are there and of one dtype, from the first-th on. */
static int check_operands(const ddp_chain *ch, int k, int first, int n, const ddp_dtype *value) {
    const ddp_chain_step *s = &ch->step[k];
    for (int i = 0; i < n; i++)
        if (s->in[i] < 0 || s->in[i] >= ch->n_in + k) return step_fail(ch, k, "an operand that is not there");
    for (int i = first + 1; i < n; i++)
        if (value[s->in[i]] != value[s->in[first]]) return step_fail(ch, k, "operands of different dtypes");
    return 0;
}

static int step_dtype(const ddp_chain *ch, int k, ddp_dtype *value) {
    const ddp_chain_step *s = &ch->step[k];
    ddp_dtype *result = &value[ch->n_in + k];
    int st;
    if (strcmp(s->op, "cast") == 0) {
        if ((st = check_operands(ch, k, 0, 1, value)) < 0) return st;
        if (s->to < 0 || s->to >= DDP_DTYPES) return step_fail(ch, k, "no such dtype");
        *result = (ddp_dtype)s->to;
        return 0;
    }
    if (strcmp(s->op, "where") == 0) {
        if ((st = check_operands(ch, k, 1, 3, value)) < 0) return st;
        if (value[s->in[0]] != DDP_BOOL) return step_fail(ch, k, "a condition that is not bool");
        *result = value[s->in[1]];
        return 0;
    }
    const scalar_op *op = op_of(s->op);
    if (!op) return step_fail(ch, k, "no such op in elementwise.def");
    if ((st = check_operands(ch, k, 0, op->operands, value)) < 0) return st;
    if (op->floats_only && !ddp__is_float(value[s->in[0]])) return step_fail(ch, k, "of floats only");
    *result = op->result == BOOL_RESULT ? DDP_BOOL : value[s->in[0]];
    return 0;
}

/* value[n_in + n_steps]. */
static int dtypes(const ddp_chain *ch, ddp_dtype *value) {
    if (ch->n_in < 1 || ch->n_in > CHAIN_INPUTS || ch->n_steps < 1 || ch->n_steps > CHAIN_STEPS || ch->n_out < 1 ||
        ch->n_out > CHAIN_RESULTS)
        return ddp__fail(DDP_EINVAL, "chain: %d inputs, %d steps, %d results: at most %d, %d, %d", ch->n_in,
                         ch->n_steps, ch->n_out, CHAIN_INPUTS, CHAIN_STEPS, CHAIN_RESULTS);
    for (int i = 0; i < ch->n_in; i++) {
        if (ch->dtype[i] < 0 || ch->dtype[i] >= DDP_DTYPES) return ddp__fail(DDP_EINVAL, "chain: no such dtype");
        value[i] = (ddp_dtype)ch->dtype[i];
    }
    for (int k = 0; k < ch->n_steps; k++) {
        int st = step_dtype(ch, k, value);
        if (st < 0) return st;
    }
    for (int i = 0; i < ch->n_out; i++)
        if (ch->out[i] < 0 || ch->out[i] >= ch->n_in + ch->n_steps)
            return ddp__fail(DDP_EINVAL, "chain: result %d is not there", i + 1);
    return 0;
}

/* ---- source ---- */

static const char *const types[DDP_DTYPES] = {
    [DDP_F32] = "float",     [DDP_F64] = "double", [DDP_F16] = "f16",          [DDP_BF16] = "bf16",
    [DDP_I64] = "long long", [DDP_I32] = "int",    [DDP_U8] = "unsigned char", [DDP_BOOL] = "bool8"};
static const char *const wide[DDP_DTYPES] = {
    [DDP_F32] = "float",     [DDP_F64] = "double", [DDP_F16] = "float",        [DDP_BF16] = "float",
    [DDP_I64] = "long long", [DDP_I32] = "int",    [DDP_U8] = "unsigned char", [DDP_BOOL] = "unsigned char"};

/* One element: v0, v1, ... are the values. Inputs are operands n_out and up. */
static void put_values(FILE *f, const ddp_chain *ch, const ddp_dtype *value) {
    for (int i = 0; i < ch->n_in; i++) {
        if (ch->is_number[i])
            fprintf(f, "        const %s v%d = (%s)a.%s[%d];\n", wide[value[i]], i, wide[value[i]],
                    ddp__is_float(value[i]) ? "number" : "whole", ch->n_out + i);
        else fprintf(f, "        const %s v%d = widen(x%d.v[e]);\n", wide[value[i]], i, i);
    }
    for (int k = 0; k < ch->n_steps; k++) {
        const ddp_chain_step *s = &ch->step[k];
        int v = ch->n_in + k;
        const char *type = types[value[v]];
        if (strcmp(s->op, "cast") == 0) {
            fprintf(f, "        const %s v%d = widen(narrow<%s>(v%d));\n", wide[value[v]], v, type, s->in[0]);
        } else if (strcmp(s->op, "where") == 0) {
            fprintf(f, "        const %s v%d = v%d ? v%d : v%d;\n", wide[value[v]], v, s->in[0], s->in[1], s->in[2]);
        } else {
            fprintf(f, "        const %s o%d[] = {v%d", wide[value[s->in[0]]], v, s->in[0]);
            if (op_of(s->op)->operands == 2) fprintf(f, ", v%d", s->in[1]);
            fprintf(f, "};\n        const %s v%d = widen(narrow<%s>(%s_fn()(o%d)));\n", wide[value[v]], v, type, s->op,
                    v);
        }
    }
    for (int i = 0; i < ch->n_out; i++)
        fprintf(f, "        y%d.v[e] = narrow<%s>(v%d);\n", i, types[value[ch->out[i]]], ch->out[i]);
}

/* steps<PER>: PER elements of each operand, in registers. */
static void put_steps(FILE *f, const ddp_chain *ch, const ddp_dtype *value) {
    fputs("template <int PER> static __device__ __forceinline__ void steps(const chain_args &a", f);
    for (int i = 0; i < ch->n_in; i++)
        if (!ch->is_number[i]) fprintf(f, ", const many<%s, PER> &x%d", types[value[i]], i);
    for (int i = 0; i < ch->n_out; i++) fprintf(f, ", many<%s, PER> &y%d", types[value[ch->out[i]]], i);
    fputs(") {\n#pragma unroll\n    for (int e = 0; e < PER; e++) {\n", f);
    put_values(f, ch, value);
    fputs("    }\n}\n", f);
}

/* The operands at `at` (a format with the operand's number) through steps<per>. */
static void put_call(FILE *f, const ddp_chain *ch, const ddp_dtype *value, const char *per, const char *at) {
    char place[32];
    for (int i = 0; i < ch->n_out; i++) fprintf(f, "        many<%s, %s> y%d;\n", types[value[ch->out[i]]], per, i);
    fprintf(f, "        steps<%s>(a", per);
    for (int i = 0; i < ch->n_in; i++) {
        if (ch->is_number[i]) continue;
        snprintf(place, sizeof place, at, ch->n_out + i);
        fprintf(f, ", *((const many<%s, %s> *)a.p[%d] + %s)", types[value[i]], per, ch->n_out + i, place);
    }
    for (int i = 0; i < ch->n_out; i++) fprintf(f, ", y%d", i);
    fputs(");\n", f);
    for (int i = 0; i < ch->n_out; i++) {
        snprintf(place, sizeof place, at, i);
        fprintf(f, "        *((many<%s, %s> *)a.p[%d] + %s) = y%d;\n", types[value[ch->out[i]]], per, i, place, i);
    }
}

/* strided<I>: indices and divisions in I. */
static void put_strided(FILE *f, const ddp_chain *ch, const ddp_dtype *value) {
    fputs("template <class I> static __device__ __forceinline__ void strided(const chain_args &a) {\n"
          "    for (int64_t i = thread_index(); i < a.n; i += thread_count()) {\n        I rest = (I)i;\n",
          f);
    for (int i = 0; i < ch->n_out + ch->n_in; i++)
        if (i < ch->n_out || !ch->is_number[i - ch->n_out]) fprintf(f, "        int64_t at%d = 0;\n", i);
    fputs("        for (int d = 0; d < a.ndim; d++) {\n            const I q = rest / (I)a.size[d], r = rest - q * "
          "(I)a.size[d];\n"
          "            rest = q;\n",
          f);
    for (int i = 0; i < ch->n_out + ch->n_in; i++)
        if (i < ch->n_out || !ch->is_number[i - ch->n_out])
            fprintf(f, "            at%d += (int64_t)r * a.stride[%d][d];\n", i, i);
    fputs("        }\n", f);
    put_call(f, ch, value, "1", "at%d");
    fputs("    }\n}\n", f);
}

/* Elements at a time of dense operands: 16 bytes of the widest. */
static int per_thread(const ddp_chain *ch, const ddp_dtype *value) {
    int most = 1;
    for (int i = 0; i < ch->n_in; i++)
        if (!ch->is_number[i] && ddp__dtype_bytes[value[i]] > most) most = ddp__dtype_bytes[value[i]];
    for (int i = 0; i < ch->n_out; i++)
        if (ddp__dtype_bytes[value[ch->out[i]]] > most) most = ddp__dtype_bytes[value[ch->out[i]]];
    return 16 / most;
}

int ddp__chain_source(const ddp_chain *ch, char **text) {
    ddp_dtype value[CHAIN_INPUTS + CHAIN_STEPS] = {0};
    size_t bytes;
    char per[8];
    int st = dtypes(ch, value);
    *text = NULL;
    if (st < 0) return st;
    FILE *f = open_memstream(text, &bytes);
    if (!f) return ddp__fail(DDP_ENOMEM, "chain: out of memory");
    snprintf(per, sizeof per, "%d", per_thread(ch, value));
    fputs("#include \"scalar.cuh\"\n"
          "template <class T, int N> struct alignas(N * sizeof(T)) many {\n    T v[N];\n};\n",
          f);
    put_steps(f, ch, value);
    put_strided(f, ch, value);
    fprintf(f,
            "extern \"C\" __global__ void chain(const chain_args a) {\n"
            "    if (a.ndim > 0 && a.n <= 0x7fffffff) return strided<unsigned>(a);\n"
            "    if (a.ndim > 0) return strided<int64_t>(a);\n"
            "    const int64_t whole = a.n / %s;\n"
            "    for (int64_t i = thread_index(); i < whole; i += thread_count()) {\n",
            per);
    put_call(f, ch, value, per, "i");
    fprintf(f, "    }\n    for (int64_t i = whole * %s + thread_index(); i < a.n; i += thread_count()) {\n", per);
    put_call(f, ch, value, "1", "i");
    fputs("    }\n}\n", f);
    return fclose(f) == 0 ? 0 : ddp__fail(DDP_ENOMEM, "chain: out of memory");
}

/* ---- launch ---- */

int ddp__chain_kernel(const ddp_chain *ch, const ddp_gpu *gpu, cudaKernel_t *out) {
    char *source = NULL;
    int st = ddp__chain_source(ch, &source);
    if (st == 0) st = ddp__nvrtc_kernel(gpu, source, "chain", out);
    free(source);
    return st;
}

static bool dense(const ddp_iter *it) {
    if (it->ndim > 1) return false;
    for (int k = 0; k < it->n; k++)
        if ((it->ndim == 1 && it->stride[k][0] != 1) || (uintptr_t)it->ptr[k] % 16 != 0) return false;
    return true;
}

static void set_number(chain_args *a, int k, const ddp_tensor *t) {
    double v = ddp__load(t->m.dtype, ddp__ptr(t), 0);
    a->number[k] = v;
    a->whole[k] = t->m.dtype == DDP_I64        ? *(const int64_t *)(const void *)ddp__ptr(t)
                  : v >= -0x1p63 && v < 0x1p63 ? (int64_t)v
                                               : 0;
}

/* Operands are n_out results, then n_in inputs; those with memory go side by side. */
static int fill_args(chain_args *a, const ddp_chain *ch, ddp_tensor *const *in, ddp_tensor *const *out) {
    ddp_tensor *walked[DDP_ITER_MAX];
    int operand[DDP_ITER_MAX], n = 0;
    ddp_iter it;
    memset(a, 0, sizeof *a);
    for (int i = 0; i < ch->n_out + ch->n_in; i++) {
        ddp_tensor *t = i < ch->n_out ? out[i] : in[i - ch->n_out];
        if (i >= ch->n_out && ch->is_number[i - ch->n_out]) {
            set_number(a, i, t);
            continue;
        }
        if (n == DDP_ITER_MAX) return ddp__fail(DDP_EINVAL, "chain: more than %d tensors", DDP_ITER_MAX);
        operand[n] = i;
        walked[n++] = t;
    }
    ddp__iter_init(&it, n, walked);
    a->n = it.numel;
    bool strided = !dense(&it);
    a->ndim = !strided ? 0 : it.ndim ? it.ndim : 1;
    a->size[0] = 1;
    for (int d = 0; d < it.ndim; d++) a->size[d] = it.size[d];
    for (int k = 0; k < n; k++) {
        a->p[operand[k]] = it.ptr[k];
        for (int d = 0; d < it.ndim && strided; d++) a->stride[operand[k]][d] = it.stride[k][d];
    }
    return 0;
}

int ddp__chain_launch(cudaKernel_t kernel, const ddp_chain *ch, ddp_tensor *const *in, ddp_tensor *const *out) {
    ddp_gpu *gpu = ddp__gpu(out[0]->m.device - 1);
    chain_args a;
    if (!gpu) return ddp__pending();
    if (out[0]->numel == 0) return 0;
    int st = fill_args(&a, ch, in, out);
    if (st < 0) return st;
    ddp_grid g = ddp__grid(a.n, a.ndim ? 1 : 4);
    void *one = &a;
    ddp__recent_add("chain", ch->step[ch->n_steps - 1].op);
    cudaError_t e = ddp__cuda.cudaLaunchKernel((const void *)kernel, (dim3){g.x, 1, 1}, (dim3){g.threads, 1, 1}, &one,
                                               0, gpu->compute);
    return ddp__cuda_launched(gpu, "chain", ch->step[ch->n_steps - 1].op, e);
}

int ddp_cuda_chain(const ddp_chain *ch, ddp_tensor *const *in, ddp_tensor *const *out) {
    const ddp_gpu *gpu = out[0]->m.device == DDP_CPU ? NULL : ddp__gpu(out[0]->m.device - 1);
    cudaKernel_t kernel = NULL;
    if (!gpu) return ddp__fail(DDP_EDEVICE, "chain: the result is not on a GPU");
    int st = ddp__chain_kernel(ch, gpu, &kernel);
    return st < 0 ? st : ddp__chain_launch(kernel, ch, in, out);
}

int ddp_cuda_chain_compile(const ddp_chain *ch, const char *arch, char *log, size_t n) {
    char *source = NULL, *image = NULL, *said = NULL;
    size_t bytes = 0;
    int st = ddp__chain_source(ch, &source);
    if (st == 0) st = ddp__nvrtc_compile(source, arch, &image, &bytes, &said);
    snprintf(log, n, "%s", said ? said : "");
    free(source);
    free(image);
    free(said);
    return st;
}
