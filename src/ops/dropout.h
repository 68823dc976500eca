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


// >>dropout

static int stx__dropout_ok(stx_ctx *x, const char *op, double p) {
    if (p >= 0 && p < 1) return 1;
    return stx_bad_value(x, op, "p", p, "at least 0 and below 1");
}

/* dx = dy mask / (1 - p), computed by the forward kernel with the same mask */
static void stx__dropout_back(stx_ctx *x, stx__node *n) {
    stx_dropout_args d = *(const stx_dropout_args *)n->save;
    int fresh;
    d.a = n->y->grad;
    d.y = stx__grad_fresh(x, n->in[0], &fresh);
    d.accumulate = !fresh;
    if (d.y) STX_RUN(x, stx_dropout_fwd, (x, &d));
}

static stx_tensor *stx__dropout(stx_ctx *x, stx_tensor *a, double p, int replicated) {
    STX__FP_SCOPE;
    stx_dropout_args d;
    stx_tensor *y;
    stx__node *node;
    if (!stx_ok(x) || !a || !stx__dropout_ok(x, "stx_dropout", p)) return NULL;
    if (!stx_training(x) || p == 0) return a;

    memset(&d, 0, sizeof d);
    if (!replicated && !stx__first_call(x, "stx_dropout", a->size, &d.first)) return a;
    d.n = a->size;
    d.p = (stx_real)p;
    d.seed = x->desc.seed;
    d.stream = stx__stream(x);
    y = stx__like(x, a);
    if (!y) return NULL;

    d.a = a->data;
    d.y = y->data;
    STX_RUN(x, stx_dropout_fwd, (x, &d));
    node = stx__record1(x, y, stx__dropout_back, a);
    return stx__save(x, node, &d, sizeof d) ? y : NULL;
}

STX_DEF stx_tensor *stx_dropout(stx_ctx *x, stx_tensor *a, double p) {
    return stx__dropout(x, a, p, 0);
}

STX_DEF stx_tensor *stx_dropout_replicated(stx_ctx *x, stx_tensor *a, double p) {
    return stx__dropout(x, a, p, 1);
}

/* Data for the backward pass of y (B,T,C) = a (B,T,C) times mask (B,C). For each
   stream, this is stx_mul with the stream's row of the mask, which repeats over time. */
typedef struct stx__variational_save {
    stx_real *mask;     /* (B,C) */
    size_t B, n, C;     /* n = T C elements per stream */
} stx__variational_save;

static void stx__dropout_variational_back(stx_ctx *x, stx__node *n) {
    const stx__variational_save *s = (const stx__variational_save *)n->save;
    stx_mul_bwd_args m;
    size_t b;
    int fresh;
    stx_real *d = stx__grad_fresh(x, n->in[0], &fresh);
    memset(&m, 0, sizeof m);
    m.n = s->n;
    m.nb = s->C;
    m.accumulate = !fresh;
    for (b = 0; d && b < s->B; b++) {
        m.a = stx_offset_ptr(x, n->in[0]->data, b * s->n);
        m.b = s->mask + b * s->C;
        m.dy = stx_offset_ptr(x, n->y->grad, b * s->n);
        m.da = stx_offset_ptr(x, d, b * s->n);
        STX_RUN(x, stx_mul_bwd, (x, &m));
    }
}

STX_DEF stx_tensor *stx_dropout_variational(stx_ctx *x, stx_tensor *a, double p) {
    STX__FP_SCOPE;
    stx_tensor *y, *ones;
    stx__variational_save s;
    stx__node *node;
    char t[96];
    size_t b;
    if (!stx_ok(x) || !a || !stx__dropout_ok(x, "stx_dropout_variational", p)) return NULL;
    STX__NEED(x, a->ndim == 3, STX_ERR_SHAPE,
              "stx_dropout_variational: expected shape (B,T,C), got %s", stx__shape(a, t));
    if (!stx_training(x) || p == 0) return a;

    ones = stx_new_f32(x, a->dim[0], a->dim[2], 0, 0);
    y = stx__like(x, a);
    if (!ones || !y) return NULL;
    STX_RUN(x, stx_fill, (x, ones->data, ones->size, 1));
    ones = stx_dropout(x, ones, p);
    if (!ones) return NULL;

    s.mask = ones->data;
    s.B = a->dim[0];
    s.C = a->dim[2];
    s.n = a->dim[1] * s.C;
    for (b = 0; b < s.B; b++)
        STX_RUN(x, stx_mul_fwd,
                (x, stx_offset_ptr(x, y->data, b * s.n), stx_offset_ptr(x, a->data, b * s.n),
                 s.mask + b * s.C, s.n, s.C));
    node = stx__record1(x, y, stx__dropout_variational_back, a);
    return stx__save(x, node, &s, sizeof s) ? y : NULL;
}

/* Computes the dropout mask of 16 groups of 8 elements, starting at `group`. The mask
   of an element is `inv` if the element's 16 random bits are below keep16, and 0
   otherwise. One stx_philox call yields the random bits of a group. The 16 calls are
   computed in 16 lanes. */
STX_INNER void stx__mask128(stx_real *m, uint64_t seed, uint64_t stream, uint64_t group,
                            uint32_t keep16, stx_real inv) {
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32), c[4][16], bits[64], r, e;
    for (e = 0; e < 16; e++) {
        c[0][e] = (uint32_t)(group + e);
        c[1][e] = (uint32_t)((group + e) >> 32);
        c[2][e] = (uint32_t)stream;
        c[3][e] = (uint32_t)(stream >> 32);
    }

    for (r = 0; r < 10; r++) {
        for (e = 0; e < 16; e++) {
            const uint64_t p0 = (uint64_t)0xD2511F53u * c[0][e];
            const uint64_t p1 = (uint64_t)0xCD9E8D57u * c[2][e];
            c[0][e] = (uint32_t)(p1 >> 32) ^ c[1][e] ^ k0;
            c[1][e] = (uint32_t)p1;
            c[2][e] = (uint32_t)(p0 >> 32) ^ c[3][e] ^ k1;
            c[3][e] = (uint32_t)p0;
        }
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }

    for (e = 0; e < 16; e++) {
        bits[4 * e] = c[0][e];
        bits[4 * e + 1] = c[1][e];
        bits[4 * e + 2] = c[2][e];
        bits[4 * e + 3] = c[3][e];
    }
    for (e = 0; e < 64; e++) {
        m[2 * e] = (bits[e] & 0xffffu) < keep16 ? inv : 0;
        m[2 * e + 1] = (bits[e] >> 16) < keep16 ? inv : 0;
    }
}

/* The parameters of stx__mask128 that are the same for all groups. */
typedef struct stx__mask {
    uint64_t seed, stream;
    uint32_t keep16;
    stx_real inv;
} stx__mask;

/* y (+)= a mask. Without accumulate, y and `a` may be the same array. */
STX_INNER void stx__dropout_n(int fma, stx_real *y, const stx_real *a, size_t n, stx__mask k,
                              uint64_t group, int accumulate) {
    stx_real m[128];
    size_t i;
    for (; n; n -= i, y += i, a += i, group += 16) {
        const size_t w = STX_MIN((size_t)128, n);
        stx__mask128(m, k.seed, k.stream, group, k.keep16, k.inv);
        if (accumulate)
            for (i = 0; i < w; i++) y[i] = STX_FMA(fma, a[i], m[i], y[i]);
        else
            for (i = 0; i < w; i++) y[i] = a[i] * m[i];
    }
}

STX_INNER void stx__dropout_apart(int fma, stx_real *STX_RESTRICT y,
                                  const stx_real *STX_RESTRICT a, size_t n, stx__mask k,
                                  uint64_t group, int accumulate) {
    stx__dropout_n(fma, y, a, n, k, group, accumulate);
}

STX_INNER void stx__dropout_loop(int fma, const stx_share *s, const void *job) {
    const stx_dropout_args *d = (const stx_dropout_args *)job;
    size_t first, n = stx__share_of(s, d->n, &first);
    const uint64_t group = d->first + first / 8;
    stx_real *y = d->y + first;
    stx__mask k;
    k.seed = d->seed;
    k.stream = d->stream;
    k.keep16 = stx__keep16(d->p);
    k.inv = (stx_real)(65536.0 / k.keep16);
    if (d->y == d->a)
        stx__dropout_n(fma, y, y, n, k, group, 0);
    else
        stx__dropout_apart(fma, y, d->a + first, n, k, group, d->accumulate);
}

STX_LOOP(stx__dropout_loop)

STX_DEF void stx_dropout_fwd(stx_ctx *x, const stx_dropout_args *d) {
    stx__for_elements(x, d->n, 8 * d->n, stx__dropout_loop_run, d);
}
