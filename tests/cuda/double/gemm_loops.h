/* gemm_loops.h -- included by gemm.c for REAL float and double: NAME(f) makes f_float, f_double. No guard on purpose. */

/* Element i of a matrix of this type. */
static inline REAL NAME(get)(const void *p, int64_t i, cudaDataType_t type) {
    switch (type) {
        case CUDA_R_32F: return (REAL)((const float *)p)[i];
        case CUDA_R_64F: return (REAL)((const double *)p)[i];
        case CUDA_R_16F: return (REAL)float_of_half(((const uint16_t *)p)[i]);
        default: return (REAL)float_of_bf16(((const uint16_t *)p)[i]);
    }
}
static inline void NAME(put)(void *p, int64_t i, cudaDataType_t type, REAL x) {
    switch (type) {
        case CUDA_R_32F: ((float *)p)[i] = (float)x; return;
        case CUDA_R_64F: ((double *)p)[i] = (double)x; return;
        case CUDA_R_16F: ((uint16_t *)p)[i] = half_of_float((float)x); return;
        default: ((uint16_t *)p)[i] = bf16_of_float((float)x);
    }
}

/* to[i + j * pitch] = the element (i, j) of a column-major matrix, or of its transpose; i below rows, j below cols. */
static void NAME(pack)(REAL *to, int64_t pitch, int64_t rows, int64_t cols, const void *from, int64_t ld, int64_t row,
                       int64_t col, bool turn, cudaDataType_t type, bool tf32) {
    for (int64_t j = 0; j < cols; j++)
        for (int64_t i = 0; i < rows; i++) {
            int64_t at = turn ? (row + i) * ld + col + j : (col + j) * ld + row + i;
            REAL x = NAME(get)(from, at, type);
            to[i + j * pitch] = tf32 ? (REAL)tf32_of_float((float)x) : x;
        }
}

/* sum[i + j * m_pitch] += a[i + l * m_pitch] * b[l + j * depth]: ROWS x COLS sums stay in registers. */
static void NAME(add_block)(REAL *sum, const REAL *a, const REAL *b, int64_t m_pitch, int64_t depth, int64_t cols) {
    REAL s[COLS][ROWS] = {{0}};
    for (int64_t l = 0; l < depth; l++)
        for (int j = 0; j < COLS; j++) {
            REAL y = b[l + (j < cols ? j : 0) * depth];
            for (int i = 0; i < ROWS; i++) s[j][i] += a[i + l * m_pitch] * y;
        }
    for (int j = 0; j < cols; j++)
        for (int i = 0; i < ROWS; i++) sum[i + j * m_pitch] += s[j][i];
}

static void NAME(multiply)(const product *p) {
    int64_t pitch = (p->m + ROWS - 1) / ROWS * ROWS, depth_most = p->k < DEPTH ? p->k : DEPTH;
    REAL *a = calloc((size_t)(pitch * depth_most) + 1, sizeof(REAL)),
         *b = malloc((size_t)(p->n * depth_most + 1) * sizeof(REAL));
    REAL *sum = calloc((size_t)(pitch * p->n) + 1, sizeof(REAL));
    for (int64_t l = 0; l < p->k && p->alpha != 0; l += DEPTH) {
        int64_t depth = p->k - l < DEPTH ? p->k - l : DEPTH;
        NAME(pack)(a, pitch, p->m, depth, p->a, p->lda, 0, l, p->turn_a, p->type_a, p->tf32);
        NAME(pack)(b, depth, depth, p->n, p->b, p->ldb, l, 0, p->turn_b, p->type_b, p->tf32);
        for (int64_t j = 0; j < p->n; j += COLS)
            for (int64_t i = 0; i < pitch; i += ROWS) NAME(add_block)
        (sum + i + j * pitch, a + i, b + j * depth, pitch, depth, p->n - j < COLS ? p->n - j : COLS);
    }
    for (int64_t j = 0; j < p->n; j++)
        for (int64_t i = 0; i < p->m; i++) {
            REAL x = (REAL)p->alpha * sum[i + j * pitch];
            if (p->beta != 0)
                x += (REAL)p->beta * NAME(get)(p->c, i + j * p->ldc, p->type_c); /* beta 0: c is not read */
            NAME(put)(p->c, i + j * p->ldc, p->type_c, x);
        }
    free(a);
    free(b);
    free(sum);
}
