#pragma once
#include "../api/config.h"
#include "../api/context.h"
#include "../api/ops.h"
#include "../core/loops.h"
#include "../core/maths.h"
#include "../core/functions.h"
#include "../core/platform.h"
#include "../core/context.h"
#include "../core/tensors.h"
#include "../core/tape.h"
#include "../core/sums.h"
#include "elementwise.h"


// >>softmax

static void stx__softmax_back(stx_ctx *x, stx__node *n) {
    const stx_tensor *y = n->y;
    int fresh;
    stx_real *da = stx__grad_fresh(x, n->in[0], &fresh);
    if (!da) return;
    STX_RUN(x, stx_softmax_bwd, (x, da, y->grad, y->data, stx__rows(y), stx__last(y), !fresh));
}

STX_DEF stx_tensor *stx_softmax(stx_ctx *x, stx_tensor *a) {
    stx_tensor *y = stx__result_like(x, a);
    if (!y) return NULL;
    STX_RUN(x, stx_softmax_fwd, (x, y->data, a->data, stx__rows(a), stx__last(a)));
    stx__record1(x, y, stx__softmax_back, a);
    return y;
}

static void stx__log_softmax_back(stx_ctx *x, stx__node *n) {
    const stx_tensor *y = n->y;
    int fresh;
    stx_real *da = stx__grad_fresh(x, n->in[0], &fresh);
    if (!da) return;
    STX_RUN(x, stx_log_softmax_bwd, (x, da, y->grad, y->data, stx__rows(y), stx__last(y), !fresh));
}

STX_DEF stx_tensor *stx_log_softmax(stx_ctx *x, stx_tensor *a) {
    stx_tensor *y = stx__result_like(x, a);
    if (!y) return NULL;
    STX_RUN(x, stx_log_softmax_fwd, (x, y->data, a->data, stx__rows(a), stx__last(a)));
    stx__record1(x, y, stx__log_softmax_back, a);
    return y;
}

/* Returns the sum of e^(a - max) over n elements. If `store` is 1, also writes the
   terms to y (n). `store` must be a compile-time constant, because a test of y for NULL
   would remain as a branch in the loop. */
STX_INNER stx_real stx__exp_sum(int fma, stx_real *y, int store, const stx_real *a, size_t n,
                                stx_real max) {
    stx_real lane[16] = {0}, sum = 0, v;
    size_t i, e;
    for (i = 0; i + 16 <= n; i += 16)
        for (e = 0; e < 16; e++) {
            v = stx_fast_exp(fma, a[i + e] - max);
            if (store) y[i + e] = v;
            lane[e] += v;
        }
    for (; i < n; i++) {
        v = stx_fast_exp(fma, a[i] - max);
        if (store) y[i] = v;
        sum += v;
    }
    return sum + stx_fast_lanes(lane);
}

typedef struct stx__softmax_job {
    size_t C;
    stx_real *y;            /* (N,C) */
    const stx_real *a;      /* (N,C) */
} stx__softmax_job;

/* The softmax of a row, where max is the largest element of `a`:
   y = e^(a - max) / sum e^(a - max) */
STX_INNER void stx__softmax_row(int fma, stx_real *STX_RESTRICT y, const stx_real *STX_RESTRICT a,
                                size_t C) {
    const stx_real inv_sum = 1 / stx__exp_sum(fma, y, 1, a, C, stx__max(a, C));
    size_t c;
    for (c = 0; c < C; c++) y[c] *= inv_sum;
}

STX_INNER void stx__softmax_loop(int fma, const stx_share *s, const void *job) {
    const stx__softmax_job *j = (const stx__softmax_job *)job;
    size_t n;
    for (n = s->begin; n < s->end; n++)
        stx__softmax_row(fma, j->y + n * j->C, j->a + n * j->C, j->C);
}

STX_LOOP(stx__softmax_loop)

STX_DEF void stx_softmax_fwd(stx_ctx *x, stx_real *y, const stx_real *a, size_t N, size_t C) {
    stx__softmax_job j;
    j.C = C;
    j.y = y;
    j.a = a;
    stx_parallel(x, N, 8 * N * C, stx__softmax_loop_run, &j);
}

typedef struct stx__softmax_bwd_job {
    size_t C;
    stx_real *da;               /* (N,C) */
    const stx_real *dy, *y;     /* (N,C) */
    int accumulate;
} stx__softmax_bwd_job;

/* The gradient of the softmax of a row: da (+)= y (dy - sum y dy) */
STX_INNER void stx__softmax_bwd_row(int fma, stx_real *STX_RESTRICT da,
                                    const stx_real *STX_RESTRICT dy,
                                    const stx_real *STX_RESTRICT y, size_t C, int accumulate) {
    const stx_real dot = stx_fast_dot(fma, dy, y, C);
    size_t c;
    if (accumulate)
        for (c = 0; c < C; c++) da[c] = STX_FMA(fma, y[c], dy[c] - dot, da[c]);
    else
        for (c = 0; c < C; c++) da[c] = y[c] * (dy[c] - dot);
}

STX_INNER void stx__softmax_bwd_loop(int fma, const stx_share *s, const void *job) {
    const stx__softmax_bwd_job *j = (const stx__softmax_bwd_job *)job;
    size_t n, at;
    for (n = s->begin; n < s->end; n++) {
        at = n * j->C;
        stx__softmax_bwd_row(fma, j->da + at, j->dy + at, j->y + at, j->C, j->accumulate);
    }
}

STX_LOOP(stx__softmax_bwd_loop)

STX_DEF void stx_softmax_bwd(stx_ctx *x, stx_real *da, const stx_real *dy, const stx_real *y,
                             size_t N, size_t C, int accumulate) {
    stx__softmax_bwd_job j;
    j.C = C;
    j.da = da;
    j.dy = dy;
    j.y = y;
    j.accumulate = accumulate;
    stx_parallel(x, N, 4 * N * C, stx__softmax_bwd_loop_run, &j);
}

/* The logarithm of the softmax of a row, where max is the largest element of `a`:
   y = a - max - log sum e^(a - max) */
STX_INNER void stx__log_softmax_row(int fma, stx_real *STX_RESTRICT y,
                                    const stx_real *STX_RESTRICT a, size_t C) {
    const stx_real max = stx__max(a, C);
    const stx_real log_sum = (stx_real)stx_math_log((double)stx__exp_sum(fma, NULL, 0, a, C, max));
    size_t c;
    for (c = 0; c < C; c++) y[c] = a[c] - max - log_sum;
}

STX_INNER void stx__log_softmax_loop(int fma, const stx_share *s, const void *job) {
    const stx__softmax_job *j = (const stx__softmax_job *)job;
    size_t n;
    for (n = s->begin; n < s->end; n++)
        stx__log_softmax_row(fma, j->y + n * j->C, j->a + n * j->C, j->C);
}

STX_LOOP(stx__log_softmax_loop)

STX_DEF void stx_log_softmax_fwd(stx_ctx *x, stx_real *y, const stx_real *a, size_t N, size_t C) {
    stx__softmax_job j;
    j.C = C;
    j.y = y;
    j.a = a;
    stx_parallel(x, N, 8 * N * C, stx__log_softmax_loop_run, &j);
}

/* The gradient of the log softmax of a row: da (+)= dy - e^y sum dy */
STX_INNER void stx__log_softmax_bwd_row(int fma, stx_real *STX_RESTRICT da,
                                        const stx_real *STX_RESTRICT dy,
                                        const stx_real *STX_RESTRICT y, size_t C,
                                        int accumulate) {
    const stx_real sum = stx_fast_sum(dy, C);
    size_t c;
    if (accumulate)
        for (c = 0; c < C; c++) da[c] += STX_FMA(fma, -sum, stx_fast_exp(fma, y[c]), dy[c]);
    else
        for (c = 0; c < C; c++) da[c] = STX_FMA(fma, -sum, stx_fast_exp(fma, y[c]), dy[c]);
}

STX_INNER void stx__log_softmax_bwd_loop(int fma, const stx_share *s, const void *job) {
    const stx__softmax_bwd_job *j = (const stx__softmax_bwd_job *)job;
    size_t n, at;
    for (n = s->begin; n < s->end; n++) {
        at = n * j->C;
        stx__log_softmax_bwd_row(fma, j->da + at, j->dy + at, j->y + at, j->C, j->accumulate);
    }
}

STX_LOOP(stx__log_softmax_bwd_loop)

STX_DEF void stx_log_softmax_bwd(stx_ctx *x, stx_real *da, const stx_real *dy, const stx_real *y,
                                 size_t N, size_t C, int accumulate) {
    stx__softmax_bwd_job j;
    j.C = C;
    j.da = da;
    j.dy = dy;
    j.y = y;
    j.accumulate = accumulate;
    stx_parallel(x, N, 8 * N * C, stx__log_softmax_bwd_loop_run, &j);
}
