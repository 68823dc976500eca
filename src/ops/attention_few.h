#pragma once
#include "../api/config.h"
#include "../api/context.h"
#include "../api/attention.h"
#include "../core/loops.h"
#include "../core/platform.h"
#include "../gemm/blocked.h"
#include "../gemm/gemv.h"
#include "attention.h"
#include "attention_tiles.h"
#include "attention_fwd.h"


// >>attention: few queries

/* With up to FEW_QUERIES queries, as in generation, each key is used so rarely that
   packing it would cost as much as the matmuls, so rows are read in place. They are
   prefetched explicitly, because their stride is too large for the hardware
   prefetcher. */
enum {
    STX__FEW_QUERIES = 3,
    STX__ROWS_AHEAD  = 16            /* prefetch distance in rows */
};

static int stx__attn_is_few(const stx_attention_args *a) {
    return a->T <= STX__FEW_QUERIES && !(a->drop > 0); /* this path has no dropout */
}

/* Prefetches up to four rows, starting STX__ROWS_AHEAD rows ahead. Rows past the `left`
   remaining rows are not prefetched. */
STX_INNER void stx__attn_prefetch_rows(const stx_real *rows, size_t ld, size_t left, size_t D) {
    size_t e;
    for (e = STX__ROWS_AHEAD; e < STX_MIN(left, (size_t)STX__ROWS_AHEAD + 4); e++)
        stx_prefetch(rows + e * ld, D);
}

/* Computes s (n) = q . k_j + qv . pe_j for n rows of k and n rows of pe. If k or pe is
   NULL, its term is 0. The last n % 4 rows are computed one by one by the same four-row
   function, with a row stride of 0, so that the score of a key does not depend on n. */
STX_INNER void stx__attn_few_score(int fma, stx_real *STX_RESTRICT s, const stx_real *q,
                                   const stx_real *qv, const stx_real *k, size_t ldk,
                                   const stx_real *pe, size_t ldp, size_t n, size_t D) {
    stx_real t[4] = {0}, u[4] = {0};
    size_t j, e;
    for (j = 0; j + 4 <= n; j += 4) {
        if (k) {
            stx__attn_prefetch_rows(k, ldk, n - j, D);
            stx__dot4_ahead(fma, t, q, k, ldk, D, NULL);
            k += 4 * ldk;
        }
        if (pe) {
            stx__attn_prefetch_rows(pe, ldp, n - j, D);
            stx__dot4_ahead(fma, u, qv, pe, ldp, D, NULL);
            pe += 4 * ldp;
        }
        for (e = 0; e < 4; e++) s[j + e] = t[e] + u[e];
    }

    for (e = 0; j + e < n; e++) {
        if (k) stx__dot4_ahead(fma, t, q, k + e * ldk, 0, D, NULL);
        if (pe) stx__dot4_ahead(fma, u, qv, pe + e * ldp, 0, D, NULL);
        s[j + e] = t[0] + u[0];
    }
}

STX_EACH_ISA(stx__attn_few_score,
             (stx_real * STX_RESTRICT s, const stx_real *q, const stx_real *qv, const stx_real *k,
              size_t ldk, const stx_real *pe, size_t ldp, size_t n, size_t D),
             s, q, qv, k, ldk, pe, ldp, n, D)

/* out (D) += f sum_j w_j v_j over n rows of v, four at a time */
STX_INNER void stx__attn_few_sum(int fma, stx_real *STX_RESTRICT out, const stx_real *w,
                                 const stx_real *v, size_t ldv, size_t n, size_t D, stx_real f) {
    size_t j, d;
    for (j = 0; j + 4 <= n; j += 4, v += 4 * ldv) {
        const stx_real w0 = f * w[j], w1 = f * w[j + 1], w2 = f * w[j + 2], w3 = f * w[j + 3];
        const stx_real *v1 = v + ldv, *v2 = v + 2 * ldv, *v3 = v + 3 * ldv;
        stx__attn_prefetch_rows(v, ldv, n - j, D);
        for (d = 0; d < D; d++) {
            const stx_real t = STX_FMA(fma, w1, v1[d], STX_FMA(fma, w0, v[d], out[d]));
            out[d] = STX_FMA(fma, w3, v3[d], STX_FMA(fma, w2, v2[d], t));
        }
    }
    for (; j < n; j++, v += ldv)
        for (d = 0; d < D; d++) out[d] = STX_FMA(fma, f * w[j], v[d], out[d]);
}

STX_EACH_ISA(stx__attn_few_sum,
             (stx_real * STX_RESTRICT out, const stx_real *w, const stx_real *v, size_t ldv,
              size_t n, size_t D, stx_real f),
             out, w, v, ldv, n, D, f)

/* State of the computation for one query in one head. The buffers are parts of the
   thread's scratch memory. */
typedef struct stx__attn_few {
    stx_ctx         *x;
    const stx__attn *plan;
    size_t           h;
    stx__attn_mask   mask;
    stx__kv_rows     k, v;
    const int32_t   *pad;            /* (S): nonzero for padded keys; NULL without padding */
    const stx_real  *query;          /* (D): the query vector */
    ptrdiff_t        i;              /* position of the query */
    ptrdiff_t        edge[4];        /* bounds of the visited keys: [edge[0],edge[1]) are
                                        zero vectors, [edge[1],edge[2]) are cached keys,
                                        and [edge[2],edge[3]) are keys of the block */
    stx_real        *q, *qv, *out;   /* (D) each: q = scale (query + content_bias), qv =
                                        scale (query + position_bias), and the output */
    stx_real        *s;              /* scores, later weights, of keys edge[0] .. edge[3]-1 */
    stx_real         state[3];       /* max of the scores s, sum of m e^(s - max), sum of
                                        e^(s - max) */
} stx__attn_few;

/* Returns the number of elements of scratch memory for q, qv, out, s and
   m_by_distance. */
static size_t stx__attn_few_reals(const stx__attn *A) {
    const stx_attention_args *a = A->a;
    return stx__round_up(3 * a->D + (a->S + a->span + a->N) + (a->span + 1), 16);
}

static void stx__attn_few_open(stx_ctx *x, const stx__attn *A, stx_real *scratch, size_t b,
                               size_t h, size_t i0, stx__attn_few *f) {
    const stx_attention_args *a = A->a;
    const size_t D = a->D;
    size_t d;
    memset(f, 0, sizeof *f);
    f->x = x;
    f->plan = A;
    f->h = h;
    f->k = stx__key_rows(a, b, h);
    f->v = stx__value_rows(a, b, h);
    f->query = a->q + b * a->q_batch_stride + i0 * a->q_row_stride + h * D;
    f->i = (ptrdiff_t)a->S - (ptrdiff_t)a->T + (ptrdiff_t)i0;
    f->q = scratch;
    f->qv = f->q + D;
    f->out = f->qv + D;
    f->s = f->out + D;
    f->mask = stx__attn_mask_of(a, h, f->s + a->S + a->span + a->N);
    f->pad = stx__attn_pad(a, b);
    f->state[0] = -(stx_real)HUGE_VAL;
    for (d = 0; d < D; d++) {
        const stx_real content_bias = a->content_bias ? a->content_bias[h * D + d] : 0;
        const stx_real position_bias = a->position_bias ? a->position_bias[h * D + d] : 0;
        f->q[d] = a->scale * (f->query[d] + content_bias);
        f->qv[d] = a->scale * (f->query[d] + position_bias);
        f->out[d] = 0;
    }
}

/* Sets f->edge for the keys to visit. These exclude keys whose span mask m is 0, and
   padded keys at either end. Returns the number of keys to visit. */
static size_t stx__attn_few_range(stx__attn_few *f, size_t i0) {
    const stx_attention_args *a = f->plan->a;
    ptrdiff_t from, to;
    stx__attn_range(a, f->mask.farthest, i0, 1, &from, &to);
    if (a->span_fraction && !stx__attn_norm_has_masked(a))
        from = STX_MAX(from, f->i - (ptrdiff_t)f->mask.farthest + (ptrdiff_t)f->mask.zeros);
    while (f->pad && from < to && from >= 0 && f->pad[from]) from++;
    while (f->pad && from < to && to > 0 && f->pad[to - 1]) to--;
    if (from >= to) return 0;
    f->edge[0] = from;
    f->edge[1] = STX_MIN(to, STX_MAX(from, STX_MAX(f->k.cached_first, 0)));
    f->edge[2] = STX_MIN(to, STX_MAX(f->edge[1], f->k.block_first));
    f->edge[3] = to;
    return (size_t)(to - from);
}

/* Computes the scores of keys [from,to). k points to the first of these keys, or is
   NULL if they are zero vectors. */
static void stx__attn_few_scores(stx__attn_few *f, ptrdiff_t from, ptrdiff_t to, const stx_real *k,
                                 size_t ldk) {
    const stx_attention_args *a = f->plan->a;
    const size_t D = a->D, ldp = f->plan->tables * D, n = (size_t)(to - from);
    const stx_real *pe = a->pe ? a->pe + stx__attn_table(f->plan, f->h) * D : NULL;
    /* row of pe for key `from`; negative if there is none */
    const ptrdiff_t p = (ptrdiff_t)a->P - 1 + a->delta_min - (f->i - from);
    stx_real *s = f->s + (from - f->edge[0]);
    size_t none = pe ? 0 : n; /* number of leading keys without a row of pe */
    if (pe && p < 0) none = STX_MIN((size_t)-p, n);
    STX_CALL(f->x, stx__attn_few_score, (s, f->q, f->qv, k, ldk, NULL, 0, none, D));
    if (none == n) return;
    pe += (size_t)(p + (ptrdiff_t)none) * ldp;
    STX_CALL(f->x, stx__attn_few_score,
             (s + none, f->q, f->qv, k ? k + none * ldk : NULL, ldk, pe, ldp, n - none, D));
}

/* Adds the weighted values of keys [from,to) to f->out, one run of unpadded keys at a
   time. */
static void stx__attn_few_values(stx__attn_few *f, ptrdiff_t from, ptrdiff_t to, size_t ldv) {
    const size_t D = f->plan->a->D;
    ptrdiff_t j = from;
    while (j < to) {
        const ptrdiff_t begin = j;
        const stx_real *v = stx__kv_row(&f->v, begin);
        if (!f->pad) j = to;
        while (j < to && !f->pad[j]) j++;
        if (j > begin)
            STX_CALL(f->x, stx__attn_few_sum,
                     (f->out, f->s + (begin - f->edge[0]), v, ldv, (size_t)(j - begin), D, 1));
        while (j < to && f->pad[j]) j++;
    }
}

/* Processes all keys except the persistent vectors. */
static void stx__attn_few_keys(stx__attn_few *f, size_t i0) {
    const size_t n = stx__attn_few_range(f, i0);
    size_t at = 0; /* index of the first visited key in m_by_distance */
    stx_real rescale;
    ptrdiff_t j;
    int e;
    if (!n) return;
    for (e = 0; e < 3; e++) {
        const ptrdiff_t from = f->edge[e], to = f->edge[e + 1];
        const stx_real *k = e && to > from ? stx__kv_row(&f->k, from) : NULL;
        stx__attn_few_scores(f, from, to, k, e < 2 ? f->k.cached_stride : f->k.block_stride);
    }
    for (j = f->edge[1]; f->pad && j < f->edge[3]; j++)
        if (f->pad[j]) f->s[j - f->edge[0]] = -(stx_real)HUGE_VAL; /* its weight is e^-inf = 0 */

    if (!f->plan->a->not_causal) at = (size_t)(f->edge[0] - (f->i - (ptrdiff_t)f->mask.farthest));
    at = STX_MIN(at, f->mask.count);
    STX_CALL(f->x, stx__attn_soft,
             (f->s, n, f->mask.m_by_distance + at, f->mask.count - at, NULL, f->state, &rescale));
    stx__attn_few_values(f, f->edge[1], f->edge[2], f->v.cached_stride);
    stx__attn_few_values(f, f->edge[2], f->edge[3], f->v.block_stride);
}

static void stx__attn_few_persistent(stx__attn_few *f) {
    const stx_attention_args *a = f->plan->a;
    const size_t D = a->D, N = a->N, at = f->h * N * D;
    stx_real rescale;
    size_t d;
    if (!N) return;
    for (d = 0; d < D; d++) f->q[d] = a->scale * (stx_real)sqrt((double)D) * f->query[d];
    STX_CALL(f->x, stx__attn_few_score,
             (f->s, f->q, f->q, a->persistent_k + at, D, NULL, 0, N, D));
    STX_CALL(f->x, stx__attn_soft, (f->s, N, f->mask.m_by_distance, 0, NULL, f->state, &rescale));
    for (d = 0; d < D; d++) f->out[d] *= rescale;
    STX_CALL(f->x, stx__attn_few_sum,
             (f->out, f->s, a->persistent_v + at, D, N, D, (stx_real)sqrt((double)N)));
}

/* Computes y, row_max and inv_sum for query i0 in head h of batch row b. */
static void stx__attn_few_query(stx_ctx *x, const stx__attn *A, stx_real *scratch, size_t b,
                                size_t h, size_t i0) {
    const stx_attention_args *a = A->a;
    const size_t D = a->D, row = (b * a->H + h) * a->T + i0;
    stx_real *y = a->y + ((b * a->T + i0) * a->H + h) * D, inv;
    stx__attn_few f;
    size_t d;
    stx__attn_few_open(x, A, scratch, b, h, i0, &f);
    stx__attn_few_keys(&f, i0);
    stx__attn_few_persistent(&f);
    inv = stx__attn_inv(a, f.state);
    for (d = 0; d < D; d++) y[d] = f.out[d] * inv;
    a->row_max[row] = f.state[0];
    a->inv_sum[row] = inv;
}
