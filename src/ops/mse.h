#pragma once
#include "../api/config.h"
#include "../api/context.h"
#include "../api/ops.h"
#include "../core/loops.h"
#include "../core/context.h"
#include "../core/tensors.h"
#include "../core/tape.h"
#include "../core/sums.h"
#include "mean.h"


// >>mse

static void stx__mse_back(stx_ctx *x, stx__node *n) {
    const stx_tensor *a = n->in[0], *b = n->in[1];
    stx_real *da = stx__grad(x, n->in[0]), *db = stx__grad(x, n->in[1]);
    STX_RUN(x, stx_mse_bwd, (x, da, db, n->y->grad, a->data, b->data, a->size));
}

STX_DEF stx_tensor *stx_mse(stx_ctx *x, stx_tensor *a, stx_tensor *b) {
    stx_tensor *y;
    char s[96], t[96];
    if (!stx_ok(x) || !a || !b) return NULL;
    STX__NEED(x, stx__same(a, b), STX_ERR_SHAPE, "stx_mse: expected equal shapes, got %s and %s",
              stx__shape(a, s), stx__shape(b, t));
    y = stx__scalar_new(x);
    if (!y) return NULL;
    STX_RUN(x, stx_mse_fwd, (x, y->data, a->data, b->data, a->size));
    stx__record2(x, y, stx__mse_back, a, b);
    return y;
}

/* Returns sum (a - b)^2, added up in double. */
STX_INNER double stx__square_n(const stx_real *a, const stx_real *b, size_t n) {
    double lane[16] = {0}, sum = 0, d;
    size_t i, e;
    for (i = 0; i + 16 <= n; i += 16)
        for (e = 0; e < 16; e++) {
            d = (double)a[i + e] - (double)b[i + e];
            lane[e] += d * d;
        }
    for (; i < n; i++) {
        d = (double)a[i] - (double)b[i];
        sum += d * d;
    }
    for (e = 0; e < 16; e++) sum += lane[e];
    return sum;
}

STX_INNER void stx__square_loop(int fma, const stx_share *s, const void *job) {
    const stx__sum_job *j = (const stx__sum_job *)job;
    size_t k, first, n;
    (void)fma;
    for (k = s->begin; k < s->end; k++) {
        n = stx__sum_block(j->n, k, &first);
        j->sums[k] = stx__square_n(j->a + first, j->b + first, n);
    }
}

STX_LOOP(stx__square_loop)

/* loss = sum (a - b)^2 / n */
STX_DEF void stx_mse_fwd(stx_ctx *x, stx_real *loss, const stx_real *a, const stx_real *b,
                         size_t n) {
    STX__FP_SCOPE;
    *loss = (stx_real)(stx__sum_arrays(x, stx__square_loop_run, a, b, n) / (double)n);
}

typedef struct stx__mse_bwd_job {
    size_t n;
    stx_real *d, g;
    const stx_real *a, *b;
} stx__mse_bwd_job;

/* d += g (a - b) */
STX_INNER void stx__mse_bwd_n(int fma, stx_real *STX_RESTRICT d, const stx_real *STX_RESTRICT a,
                              const stx_real *STX_RESTRICT b, size_t n, stx_real g) {
    size_t i;
    for (i = 0; i < n; i++) d[i] = STX_FMA(fma, g, a[i] - b[i], d[i]);
}

STX_INNER void stx__mse_bwd_loop(int fma, const stx_share *s, const void *job) {
    const stx__mse_bwd_job *j = (const stx__mse_bwd_job *)job;
    size_t first, n = stx__share_of(s, j->n, &first);
    stx__mse_bwd_n(fma, j->d + first, j->a + first, j->b + first, n, j->g);
}

STX_LOOP(stx__mse_bwd_loop)

/* With g = 2 dloss / n, da += g (a - b) ; db -= g (a - b) */
STX_DEF void stx_mse_bwd(stx_ctx *x, stx_real *da, stx_real *db, const stx_real *dloss,
                         const stx_real *a, const stx_real *b, size_t n) {
    STX__FP_SCOPE;
    const stx_real g = 2 * dloss[0] / (stx_real)n;
    stx__mse_bwd_job j;
    j.n = n;
    j.a = a;
    j.b = b;
    j.d = da;
    j.g = g;
    if (da) stx__for_elements(x, n, n, stx__mse_bwd_loop_run, &j);
    j.d = db;
    j.g = -g;
    if (db) stx__for_elements(x, n, n, stx__mse_bwd_loop_run, &j);
}
