/* values.h - random arrays, blocks of tokens, and the largest difference between two
   arrays. Include after seqtx.h. */
#ifndef STX_TEST_VALUES_H
#define STX_TEST_VALUES_H
#include "test.h"

/* Returns an array of n values in (-1,1), with space for one more. The caller frees
   it. */
static inline stx_real *random_values(size_t n) {
    stx_real *a = (stx_real *)malloc((n + 1) * sizeof *a);
    size_t i;
    for (i = 0; i < n; i++) a[i] = (stx_real)test_rand();
    return a;
}

/* Raises *worst to e if e is larger. NaN raises it to infinity, which no later value
   can hide. */
static inline void raise_worst(double *worst, double e) {
    if (e > *worst) *worst = e;
    if (e != e) *worst = HUGE_VAL;
}

/* Returns the largest |a - b|, or infinity if a difference is NaN. */
static inline double max_difference(const stx_real *a, const stx_real *b, size_t n) {
    double worst = 0;
    size_t i;
    for (i = 0; i < n; i++) raise_worst(&worst, fabs((double)a[i] - (double)b[i]));
    return worst;
}

/* Returns tokens [at, at + T) of each row of a text (B,n). */
static inline stx_ids *token_block(stx_ctx *x, const int32_t *text, size_t B, size_t n, size_t at,
                                   size_t T) {
    int32_t *v = (int32_t *)calloc(B * T + 1, sizeof *v);
    stx_ids *ids;
    size_t b;
    for (b = 0; b < B; b++) memcpy(v + b * T, text + b * n + at, T * sizeof *v);
    ids = stx_tokens(x, v, B, T);
    free(v);
    return ids;
}
#endif
