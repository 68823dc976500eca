#pragma once
#include "../api/config.h"
#include "../api/context.h"
#include "../api/ops.h"
#include "../core/loops.h"
#include "../core/maths.h"
#include "../core/platform.h"
#include "../core/context.h"
#include "../core/arena.h"
#include "../core/tensors.h"
#include "../core/tape.h"
#include "dropout.h"


// >>layernorm

/* stx_layernorm runs the kernels of stx_residual_norm with f = NULL. */

/* Returns the eps of a layer norm. An eps that is not positive, such as 0, selects the
   default. */
static stx_real stx__norm_eps(double eps) {
    return (stx_real)(eps > 0 ? eps : 1e-5);
}

static int stx__norm_fits(stx_ctx *x, const char *op, const stx_tensor *in, const stx_tensor *gain,
                          const stx_tensor *shift, const stx_tensor *bias) {
    const size_t C = stx__last(in);
    char s[96];
    if (gain->size != C || shift->size != C) {
        stx_fail(x, STX_ERR_SHAPE,
                 "%s: expected one gain and one shift per channel of the input %s, got %zu gains "
                 "and %zu shifts", op, stx__shape(in, s), gain->size, shift->size);
        return 0;
    }
    if (bias && bias->size != C) {
        stx_fail(x, STX_ERR_SHAPE,
                 "%s: bias: expected one element per channel of the input %s, got %zu", op,
                 stx__shape(in, s), bias->size);
        return 0;
    }
    return 1;
}

/* The kernel of stx_residual_norm with f = NULL computes the backward pass of
   stx_layernorm. The norm's input s is h itself in this case, and ds is the gradient of
   h. */
static void stx__layernorm_back(stx_ctx *x, stx__node *n) {
    stx_residual_norm_args a = *(const stx_residual_norm_args *)n->save;
    int fresh;
    a.ds = stx__grad_fresh(x, n->in[0], &fresh);
    a.dgain = stx__grad(x, n->in[1]);
    a.dshift = stx__grad(x, n->in[2]);
    if (x->error.code) return;
    a.s = n->in[0]->data;
    a.dy = n->y->grad;
    a.accumulate_ds = a.ds && !fresh;
    a.deferred = stx__has_param_grad(n->in[1]) && stx__has_param_grad(n->in[2]);
    STX_RUN(x, stx_residual_norm_bwd, (x, &a));
}

STX_DEF stx_tensor *stx_layernorm(stx_ctx *x, stx_tensor *in, stx_tensor *gain, stx_tensor *shift,
                                  double eps) {
    STX__FP_SCOPE;
    stx_residual_norm_args a;
    stx_tensor *y, *ins[3];
    stx__node *node;
    if (!stx_ok(x) || !in || !gain || !shift) return NULL;
    if (!stx__norm_fits(x, "stx_layernorm", in, gain, shift, NULL)) return NULL;
    y = stx__like(x, in);
    if (!y) return NULL;

    memset(&a, 0, sizeof a);
    a.N = stx__rows(in);
    a.C = stx__last(in);
    a.eps = stx__norm_eps(eps);
    a.h = in->data;
    a.gain = gain->data;
    a.shift = shift->data;
    a.y = y->data;
    a.mean = (stx_real *)stx_step_device_bytes(x, 2 * a.N * sizeof(stx_real));
    if (!a.mean) return NULL;
    a.rstd = a.mean + a.N;
    STX_RUN(x, stx_residual_norm_fwd, (x, &a));

    ins[0] = in;
    ins[1] = gain;
    ins[2] = shift;
    node = stx__record(x, y, stx__layernorm_back, ins, 3);
    return stx__save(x, node, &a, sizeof a) ? y : NULL;
}

/* The kernel computes the gradient of s in ds or df and derives the other array from it.
   It can accumulate into one of the two arrays, but not into both. A gradient into which
   the kernel cannot accumulate is written to a separate buffer, separate_f or separate_s,
   and added afterwards.

       df            dh              a.df     a.ds
       ------------  --------------  -------  ----------------------------------------
       fresh, NULL   fresh, NULL     df       dh
       fresh, NULL   to add          df       dh, +=
       fresh         same as df      df       separate_s: h and f are the same tensor
       to add        fresh           df, +=   dh
       to add        to add, NULL    df, +=   separate_s

   If dbias is computed, a.df must contain only the new gradient, because dbias is the sum
   of the rows of df. If df is not fresh, a.df is then separate_f, and a.ds is as in the
   first two rows. */
static void stx__residual_norm_back(stx_ctx *x, stx__node *n) {
    stx_residual_norm_args a = *(const stx_residual_norm_args *)n->save;
    stx_tensor *h = n->in[0], *f = n->in[1], *bias = n->in[4];
    const size_t size = n->y->size;
    stx_real *dh, *df, *separate_f = NULL, *separate_s = NULL;
    int fresh_f, fresh_h;

    /* df is requested before dh: if h and f are the same tensor, only the gradient that
       is requested first is fresh */
    df = stx__grad_fresh(x, f, &fresh_f);
    a.dgain = stx__grad(x, n->in[2]);
    a.dshift = stx__grad(x, n->in[3]);
    a.dbias = stx__grad(x, bias);
    dh = stx__grad_fresh(x, h, &fresh_h);

    if (a.dbias && !fresh_f) separate_f = stx__grad_take(x, size, f->is_f32);
    a.df = separate_f ? separate_f : df;
    a.accumulate_df = df && !fresh_f && !separate_f;
    a.accumulate_ds = dh && !fresh_h && !a.accumulate_df && dh != a.df;
    a.ds = fresh_h || a.accumulate_ds ? dh : NULL;
    if (!a.ds && (dh || a.accumulate_df))
        a.ds = separate_s = stx__grad_take(x, size, n->y->is_f32);
    if (x->error.code) return;

    a.dy = n->y->grad;
    a.deferred = stx__has_param_grad(n->in[2]) && stx__has_param_grad(n->in[3])
                 && (!bias || stx__has_param_grad(bias));
    STX_RUN(x, stx_residual_norm_bwd, (x, &a));

    if (separate_f && df) STX_RUN(x, stx_axpy, (x, df, separate_f, size, 1, 1));
    if (separate_s && dh) STX_RUN(x, stx_axpy, (x, dh, separate_s, size, 1, 1));
    stx__grad_give(x, separate_f, size, f->is_f32);
    stx__grad_give(x, separate_s, size, n->y->is_f32);
}

STX_DEF stx_tensor *stx_residual_norm(stx_ctx *x, stx_tensor *h, stx_tensor *f, double p,
                                      stx_tensor *gain, stx_tensor *shift, double eps) {
    return stx_residual_norm_bias(x, h, f, NULL, p, gain, shift, eps);
}

STX_DEF stx_tensor *stx_residual_norm_bias(stx_ctx *x, stx_tensor *h, stx_tensor *f, stx_tensor *b,
                                           double p, stx_tensor *gain, stx_tensor *shift,
                                           double eps) {
    STX__FP_SCOPE;
    const char *op = b ? "stx_residual_norm_bias" : "stx_residual_norm";
    stx_residual_norm_args a;
    stx_tensor *y, *ins[5];
    stx__node *node;
    char t[96], u[96];
    if (!stx_ok(x) || !h || !f || !gain || !shift) return NULL;
    STX__NEED(x, stx__same(h, f), STX_ERR_SHAPE,
              "%s: h and f must have the same shape, but h is %s and f is %s", op, stx__shape(h, t),
              stx__shape(f, u));
    if (!stx__norm_fits(x, op, h, gain, shift, b) || !stx__dropout_ok(x, op, p)) return NULL;
    y = stx__like(x, h);
    if (!y) return NULL;

    memset(&a, 0, sizeof a);
    a.N = stx__rows(h);
    a.C = stx__last(h);
    a.eps = stx__norm_eps(eps);
    a.drop = (stx_real)(stx_training(x) ? p : 0);
    a.seed = x->desc.seed;
    a.stream = a.drop > 0 ? stx__stream(x) : 0;
    if (a.drop > 0 && !stx__first_call(x, op, h->size, &a.rng_first)) return NULL;
    a.h = h->data;
    a.f = f->data;
    a.gain = gain->data;
    a.shift = shift->data;
    a.bias = b ? b->data : NULL;
    a.y = y->data;
    a.s = stx__alloc_elements(x, stx__step_kind(h->is_f32), h->size);
    a.mean = (stx_real *)stx_step_device_bytes(x, 2 * a.N * sizeof(stx_real));
    if (!a.s || !a.mean) return NULL;
    a.rstd = a.mean + a.N;
    STX_RUN(x, stx_residual_norm_fwd, (x, &a));

    ins[0] = h;
    ins[1] = f;
    ins[2] = gain;
    ins[3] = shift;
    ins[4] = b;
    node = stx__record(x, y, stx__residual_norm_back, ins, 5);
    return stx__save(x, node, &a, sizeof a) ? y : NULL;
}

/* mean = sum a / C ; rstd = 1 / sqrt(sum (a - mean)^2 / C + eps)
   y = (a - mean) rstd gain + shift */
STX_INNER void stx__layernorm_row(int fma, stx_real *STX_RESTRICT y, stx_real *mean,
                                  stx_real *rstd, const stx_real *STX_RESTRICT a,
                                  const stx_real *STX_RESTRICT gain,
                                  const stx_real *STX_RESTRICT shift, size_t C, stx_real eps) {
    const stx_real m = stx_fast_sum(a, C) / (stx_real)C;
    stx_real variance, r;
    size_t c;
    for (c = 0; c < C; c++) y[c] = a[c] - m;
    variance = stx_fast_dot(fma, y, y, C) / (stx_real)C;
    r = (stx_real)(1 / sqrt((double)(variance + eps)));
    for (c = 0; c < C; c++) y[c] = STX_FMA(fma, y[c] * r, gain[c], shift[c]);
    *mean = m;
    *rstd = r;
}

/* s = h + (f + bias) */
STX_INNER void stx__residual_row(stx_real *STX_RESTRICT s, const stx_real *STX_RESTRICT h,
                                 const stx_real *STX_RESTRICT f, const stx_real *STX_RESTRICT bias,
                                 size_t C) {
    size_t c;
    if (bias)
        for (c = 0; c < C; c++) s[c] = h[c] + (f[c] + bias[c]);
    else
        for (c = 0; c < C; c++) s[c] = h[c] + f[c];
}

/* Computes each row of s and normalises it while it is in the L1 cache. With dropout, s
   has already been computed. */
STX_INNER void stx__residual_norm_loop(int fma, const stx_share *s, const void *job) {
    const stx_residual_norm_args *a = (const stx_residual_norm_args *)job;
    size_t n, at;
    for (n = s->begin; n < s->end; n++) {
        at = n * a->C;
        if (a->f && !(a->drop > 0))
            stx__residual_row(a->s + at, a->h + at, a->f + at, a->bias, a->C);
        stx__layernorm_row(fma, a->y + at, a->mean + n, a->rstd + n,
                           a->f ? a->s + at : a->h + at, a->gain, a->shift, a->C, a->eps);
    }
}

STX_LOOP(stx__residual_norm_loop) /* defines stx__residual_norm_loop_run, see >>loops */

/* Computes y = `from` mask / keep or, if accumulate is set, adds this value to y. The
   fields of `a` determine the dropout mask. */
static void stx__residual_dropout(stx_ctx *x, const stx_residual_norm_args *a, stx_real *y,
                                  const stx_real *from, int accumulate) {
    stx_dropout_args d;
    d.n = a->N * a->C;
    d.p = a->drop;
    d.seed = a->seed;
    d.stream = a->stream;
    d.first = a->rng_first;
    d.a = from;
    d.y = y;
    d.accumulate = accumulate;
    stx_dropout_fwd(x, &d);
}

/* s = h + dropout(f + bias) ; y = layernorm(s). Without f: y = layernorm(h) */
STX_DEF void stx_residual_norm_fwd(stx_ctx *x, const stx_residual_norm_args *a) {
    STX__FP_SCOPE;
    const size_t n = a->N * a->C;
    if (a->f && a->drop > 0) {
        if (a->bias) stx_add_fwd(x, a->s, a->f, a->bias, n, a->C);
        stx__residual_dropout(x, a, a->s, a->bias ? a->s : a->f, 0);
        stx_axpy(x, a->s, a->h, n, 1, 1);
    }
    stx_parallel(x, a->N, 5 * n, stx__residual_norm_loop_run, a);
}

/* The backward pass of y = xhat gain + shift, where xhat = (s - mean) rstd. With g = dy
   gain, and with mean_c denoting the mean over the channels,
       ds (+)= rstd (g - mean_c(g) - xhat mean_c(g xhat)) */
STX_INNER void stx__layernorm_bwd_row(int fma, stx_real *STX_RESTRICT ds,
                                      const stx_real *STX_RESTRICT dy,
                                      const stx_real *STX_RESTRICT s,
                                      const stx_real *STX_RESTRICT gain, size_t C, stx_real mean,
                                      stx_real rstd, int accumulate) {
    stx_real lane_g[16] = {0}, lane_gs[16] = {0};   /* sums of g and of g (s - mean) */
    stx_real sum_g = 0, sum_gs = 0, mean_g, k;
    size_t c, e;
    for (c = 0; c + 16 <= C; c += 16)
        for (e = 0; e < 16; e++) {
            const stx_real g = dy[c + e] * gain[c + e];
            lane_g[e] += g;
            lane_gs[e] = STX_FMA(fma, g, s[c + e] - mean, lane_gs[e]);
        }
    for (; c < C; c++) {
        const stx_real g = dy[c] * gain[c];
        sum_g += g;
        sum_gs = STX_FMA(fma, g, s[c] - mean, sum_gs);
    }
    mean_g = (sum_g + stx_fast_lanes(lane_g)) / (stx_real)C;
    k = (sum_gs + stx_fast_lanes(lane_gs)) * rstd * rstd / (stx_real)C; /* rstd mean_c(g xhat) */

    if (accumulate)
        for (c = 0; c < C; c++)
            ds[c] = STX_FMA(fma, rstd, STX_FMA(fma, dy[c], gain[c], -mean_g) - (s[c] - mean) * k,
                            ds[c]);
    else
        for (c = 0; c < C; c++)
            ds[c] = rstd * (STX_FMA(fma, dy[c], gain[c], -mean_g) - (s[c] - mean) * k);
}

/* The arguments of the loop that sets g (N,C) to the gradient of s or, if accumulate is
   set, adds the gradient to g. */
typedef struct stx__norm_bwd_job {
    const stx_residual_norm_args *a;
    stx_real *g;
    int accumulate;
} stx__norm_bwd_job;

STX_INNER void stx__norm_bwd_rows_loop(int fma, const stx_share *s, const void *job) {
    const stx__norm_bwd_job *j = (const stx__norm_bwd_job *)job;
    const stx_residual_norm_args *a = j->a;
    size_t n, at;
    for (n = s->begin; n < s->end; n++) {
        at = n * a->C;
        stx__layernorm_bwd_row(fma, j->g + at, a->dy + at, a->s + at, a->gain, a->C, a->mean[n],
                               a->rstd[n], j->accumulate);
    }
}

STX_LOOP(stx__norm_bwd_rows_loop)

/* dgain += sum_n dy xhat ; dshift += sum_n dy, for w <= 64 adjacent columns. The rows are
   summed in blocks, as in stx__sum_rows_n. dgain and dshift are NULL if not required. */
STX_INNER void stx__norm_bwd_columns(int fma, stx_real *STX_RESTRICT dgain,
                                     stx_real *STX_RESTRICT dshift,
                                     const stx_real *STX_RESTRICT dy,
                                     const stx_real *STX_RESTRICT s,
                                     const stx_real *STX_RESTRICT mean,
                                     const stx_real *STX_RESTRICT rstd, size_t N, size_t C,
                                     size_t w) {
    size_t first, n, c;
    for (first = 0; first < N; first += 64) {
        stx_real sum_gain[64] = {0}, sum_shift[64] = {0};
        for (n = first; n < STX_MIN(N, first + 64); n++) {
            const stx_real *g = dy + n * C, *a = s + n * C;
            const stx_real m = mean[n], r = rstd[n];
            for (c = 0; c < w; c++) {
                sum_gain[c] = STX_FMA(fma, g[c] * r, a[c] - m, sum_gain[c]);
                sum_shift[c] += g[c];
            }
        }
        if (dgain)
            for (c = 0; c < w; c++) dgain[c] += sum_gain[c];
        if (dshift)
            for (c = 0; c < w; c++) dshift[c] += sum_shift[c];
    }
}

STX_INNER void stx__norm_bwd_columns_loop(int fma, const stx_share *s, const void *job) {
    const stx_residual_norm_args *a = (const stx_residual_norm_args *)job;
    size_t k;
    for (k = s->begin; k < s->end; k++) {
        const size_t c = 64 * k, w = STX_MIN((size_t)64, a->C - c);
        stx__norm_bwd_columns(fma, a->dgain ? a->dgain + c : NULL,
                              a->dshift ? a->dshift + c : NULL, a->dy + c, a->s + c, a->mean,
                              a->rstd, a->N, a->C, w);
    }
}

STX_LOOP(stx__norm_bwd_columns_loop)

/* g = the gradient of s ; ds (+)= g ; df (+)= g mask / keep ; dbias += sum_n df

   g is computed in ds, or in df if ds is not required or if g is added to ds. */
STX_DEF void stx_residual_norm_bwd(stx_ctx *x, const stx_residual_norm_args *a) {
    STX__FP_SCOPE;
    const size_t n = a->N * a->C;
    const int in_df = a->df && (a->accumulate_ds || !a->ds);
    stx__norm_bwd_job j;
    j.a = a;
    j.g = in_df ? a->df : a->ds;
    j.accumulate = a->accumulate_ds && !in_df;
    if (j.g) stx_parallel(x, a->N, 6 * n, stx__norm_bwd_rows_loop_run, &j);
    if (a->dgain || a->dshift)
        stx_parallel(x, (a->C + 63) / 64, 4 * n, stx__norm_bwd_columns_loop_run, a);

    if (in_df && a->ds) stx_axpy(x, a->ds, j.g, n, 1, 1);
    if (a->df && a->drop > 0)
        stx__residual_dropout(x, a, a->df, j.g, a->accumulate_df);
    else if (a->df && !in_df)
        stx_axpy(x, a->df, j.g, n, 1, a->accumulate_df);
    if (a->dbias) stx_sum_rows(x, a->dbias, a->df, a->N, a->C);
}
