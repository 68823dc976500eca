#pragma once
#include "../api/config.h"
#include "../api/context.h"
#include "../api/ops.h"
#include "../core/loops.h"
#include "../core/platform.h"
#include "../core/context.h"
#include "../core/tensors.h"
#include "../core/tape.h"
#include "../core/sums.h"


// >>rezero

static void stx__rezero_back(stx_ctx *x, stx__node *n) {
    stx_rezero_bwd_args r;
    int fresh;
    memset(&r, 0, sizeof r);
    r.n = n->y->size;
    r.f = n->in[1]->data;
    r.alpha = n->in[2]->data;
    r.dy = n->y->grad;
    r.dalpha = stx__grad(x, n->in[2]); /* requested before df, which must accumulate if
                                          f is alpha */
    r.df = stx__grad_fresh(x, n->in[1], &fresh);
    r.accumulate = !fresh;
    STX_RUN(x, stx_rezero_bwd, (x, &r));
    stx__grad_dy(x, n, n->in[0], 1);
}

STX_DEF stx_tensor *stx_rezero(stx_ctx *x, stx_tensor *h, stx_tensor *f, stx_tensor *alpha) {
    stx_tensor *y, *in[3];
    char s[96], t[96];
    if (!stx_ok(x) || !h || !f || !alpha) return NULL;
    STX__NEED(x, stx__same(h, f), STX_ERR_SHAPE,
              "stx_rezero: h and f must have the same shape, but h is %s and f is %s",
              stx__shape(h, s), stx__shape(f, t));
    STX__NEED(x, alpha->size == 1, STX_ERR_SHAPE,
              "stx_rezero: alpha: expected one element, got shape %s", stx__shape(alpha, s));
    y = stx__like(x, h);
    if (!y) return NULL;
    STX_RUN(x, stx_rezero_fwd, (x, y->data, h->data, f->data, alpha->data, y->size));
    in[0] = h;
    in[1] = f;
    in[2] = alpha;
    stx__record(x, y, stx__rezero_back, in, 3);
    return y;
}

typedef struct stx__rezero_job {
    size_t n;
    stx_real *y, alpha;
    const stx_real *h, *f;
} stx__rezero_job;

/* y = h + alpha f */
STX_INNER void stx__rezero_n(int fma, stx_real *STX_RESTRICT y, const stx_real *STX_RESTRICT h,
                             const stx_real *STX_RESTRICT f, stx_real alpha, size_t n) {
    size_t i;
    for (i = 0; i < n; i++) y[i] = STX_FMA(fma, alpha, f[i], h[i]);
}

STX_INNER void stx__rezero_loop(int fma, const stx_share *s, const void *job) {
    const stx__rezero_job *j = (const stx__rezero_job *)job;
    size_t first, n = stx__share_of(s, j->n, &first);
    stx__rezero_n(fma, j->y + first, j->h + first, j->f + first, j->alpha, n);
}

STX_LOOP(stx__rezero_loop)

STX_DEF void stx_rezero_fwd(stx_ctx *x, stx_real *y, const stx_real *h, const stx_real *f,
                            const stx_real *alpha, size_t n) {
    stx__rezero_job j;
    if (!h) {
        stx_axpy(x, y, f, n, alpha[0], 0);
        return;
    }
    j.n = n;
    j.y = y;
    j.alpha = alpha[0];
    j.h = h;
    j.f = f;
    stx__for_elements(x, n, n, stx__rezero_loop_run, &j);
}

/* y = h + alpha f:   df (+)= alpha dy ; dalpha += sum dy f */
STX_DEF void stx_rezero_bwd(stx_ctx *x, const stx_rezero_bwd_args *r) {
    STX__FP_SCOPE;
    if (r->dalpha)
        r->dalpha[0] += (stx_real)stx__sum_arrays(x, stx__dot_loop_run, r->dy, r->f, r->n);
    if (r->df) stx_axpy(x, r->df, r->dy, r->n, r->alpha[0], r->accumulate);
}
