#pragma once
#include "../api/config.h"
#include "../api/context.h"
#include "../api/attention.h"
#include "../core/loops.h"
#include "../core/maths.h"
#include "../core/platform.h"
#include "../core/tensors.h"
#include "../gemm/micro.h"
#include "../gemm/blocked.h"
#include "dropout.h"
#include "attention.h"
#include "attention_tiles.h"


// >>attention: scores and weights of a tile

/* Sets [*first,*end) to the range of keys that at least one of the queries i0 .. i0+n-1
   sees, in a head that sees keys up to distance `farthest`. */
static void stx__attn_range(const stx_attention_args *a, size_t farthest, size_t i0, size_t n,
                            ptrdiff_t *first, ptrdiff_t *end) {
    const ptrdiff_t i = (ptrdiff_t)a->S - (ptrdiff_t)a->T + (ptrdiff_t)i0; /* position of i0 */
    if (a->not_causal) {
        *first = STX_MAX(a->first_key, 0);
        *end = (ptrdiff_t)a->S;
        return;
    }
    *first = STX_MAX(a->first_key, i - (ptrdiff_t)farthest);
    *end = i + (ptrdiff_t)n - a->delta_min;
}

/* Rounds j, which may be negative, down to a multiple of `multiple`. */
static ptrdiff_t stx__attn_floor(ptrdiff_t j, size_t multiple) {
    const ptrdiff_t m = (ptrdiff_t)multiple, over = j % m;
    return over < 0 ? j - over - m : j - over;
}

/* Returns the number of keys in the tile that begins with key j0 and ends before key
   `end`, rounded up to a multiple of KEY_ALIGN. */
static size_t stx__attn_keys(ptrdiff_t j0, ptrdiff_t end) {
    return stx__round_up((size_t)STX_MIN((ptrdiff_t)STX__BK, end - j0), STX__KEY_ALIGN);
}

/* Sets [lo[r],hi[r]), the columns of the tile that each query sees. Keys exist only in
   columns below `keys`, which can exceed bk. Returns 0 if no query sees a key. From row
   to row, lo and hi never decrease, and lo - r and hi - r never increase. The loops
   over strips rely on this. */
static int stx__attn_bounds(stx__attn_tile *t, size_t keys) {
    const stx_attention_args *a = t->plan->a;
    const ptrdiff_t older = (ptrdiff_t)a->S - (ptrdiff_t)a->T, bk = (ptrdiff_t)t->bk;
    size_t r;
    int any = 0;
    for (r = 0; r < t->nb; r++) {
        ptrdiff_t lo = 0, hi = STX_MIN(bk, (ptrdiff_t)keys), i = older + (ptrdiff_t)(t->i0 + r);
        t->farthest_column[r] = 0;
        if (!t->persistent) {
            if (!a->not_causal) {
                t->farthest_column[r] = i - (ptrdiff_t)t->mask.farthest - t->j0;
                lo = STX_MAX(lo, t->farthest_column[r]);
                hi = STX_MIN(hi, i - a->delta_min + 1 - t->j0);
            }
            lo = STX_MAX(lo, a->first_key - t->j0);
        }
        lo = STX_MAX(lo, t->live0);
        hi = STX_MIN(hi, t->live1);
        t->lo[r] = STX_MIN(lo, bk);
        t->hi[r] = STX_MAX(hi, t->lo[r]);
        any |= t->hi[r] > t->lo[r];
    }
    return any;
}

/* Computes to[r][c] = q_r . (column c of `columns`) for those columns c that any row in
   the strip of row r sees. q is an operand (n,Dk), `columns` is k_columns or v_columns,
   and `to` is (BQ,LDS). */
static void stx__attn_dot_columns(const stx__attn_tile *t, const void *q, const stx_real *columns,
                                  stx_real *to) {
    const stx__attn *A = t->plan;
    const stx__micro *mk = A->mk;
    const size_t Dk = A->Dk, u = A->per_word;
    size_t r0;
    for (r0 = 0; r0 < t->nb; r0 += mk->mr) {
        const size_t height = STX_MIN(mk->mr, t->nb - r0), end = (size_t)t->hi[r0 + height - 1];
        size_t c = (size_t)t->lo[r0] / mk->nr * mk->nr;
        for (; c < end; c += mk->nr)
            mk->run(height, Dk / u, stx__operand(A, q, (ptrdiff_t)((t->q0 + r0) * Dk)), Dk, u,
                    columns + c * Dk / u, mk->nr, to + r0 * STX__LDS + c, STX__LDS, 0);
    }
}

/* Returns p0, the row of pe for query i0 and key j0 of the tile, counted from pe_first.
   Row r and column c of the tile use row p0 + c - r of pe. */
static ptrdiff_t stx__attn_p0(const stx__attn_tile *t) {
    const stx_attention_args *a = t->plan->a;
    return (ptrdiff_t)a->P - 1 + a->delta_min - ((ptrdiff_t)a->S - (ptrdiff_t)a->T) + t->j0
           - (ptrdiff_t)t->i0 - t->plan->pe_first;
}

/* Returns the index of the pe table that head h uses. */
static size_t stx__attn_table(const stx__attn *A, size_t h) {
    return A->tables > 1 ? h : 0;
}

/* Computes s = q . k + qv . pe. The second matmul is skewed. */
static void stx__attn_scores(const stx__attn_tile *t) {
    const stx__attn *A = t->plan;
    const stx__micro *mk = A->mk;
    const size_t Dk = A->Dk, u = A->per_word;
    const ptrdiff_t nr = (ptrdiff_t)mk->nr, p0 = stx__attn_p0(t);
    const stx_real *pe;
    size_t r0;
    stx__attn_dot_columns(t, t->buf.q, t->buf.k_columns, t->buf.s);
    if (!A->tables || t->persistent) return;

    pe = A->pe_columns + stx__attn_table(A, t->h) * A->pe_rows * Dk / u;
    for (r0 = 0; r0 < t->nb; r0 += mk->mr) {
        const size_t height = STX_MIN(mk->mr, t->nb - r0), last = r0 + height - 1;
        const ptrdiff_t row = (ptrdiff_t)r0, from = p0 + t->lo[last] - (ptrdiff_t)last;
        const ptrdiff_t to = STX_MIN(p0 + t->hi[r0] - row, (ptrdiff_t)A->pe_rows);
        ptrdiff_t p = from < 0 ? 0 : from / nr * nr;
        for (; p < to; p += nr)
            mk->run(height, Dk / u, stx__operand(A, t->buf.qv, (ptrdiff_t)((t->q0 + r0) * Dk)), Dk,
                    u, pe + (size_t)p * Dk / u, mk->nr,
                    t->buf.s + row * STX__LDS + (p - p0 + row), STX__LDS + 1, 1);
    }
}

/* Computes to[r] += sum_c weights[r][c] v_c, where v_c is packed row c of the tile.
   `weights` is an operand (BQ,LDS), and `to` is (n,Dp). */
static void stx__attn_sum_rows(const stx__attn_tile *t, const void *weights, stx_real *to) {
    const stx__attn *A = t->plan;
    const stx__micro *mk = A->mk;
    const size_t u = A->per_word;
    size_t r0, j;
    for (r0 = 0; r0 < t->nb; r0 += mk->mr) {
        const size_t height = STX_MIN(mk->mr, t->nb - r0);
        const size_t from = (size_t)t->lo[r0] / mk->kr * mk->kr;
        const size_t end = stx__round_up((size_t)t->hi[r0 + height - 1], mk->kr);
        if (from >= end) continue;
        for (j = 0; j < A->Dp; j += mk->nr)
            mk->run(height, (end - from) / u,
                    stx__operand(A, weights, (ptrdiff_t)(r0 * STX__LDS + from)), STX__LDS, u,
                    t->buf.rows + j * (STX__BK / u) + from / u * mk->nr, mk->nr,
                    to + (t->q0 + r0) * A->Dp + j, A->Dp, 1);
    }
}

/* Sets m to the dropout masks of elements [at,end), times f. Philox call base + g
   yields the masks of elements 8 g .. 8 g + 7. */
STX_INNER void stx__mask_row(int fma, stx_real *STX_RESTRICT m, uint64_t at, uint64_t end,
                             uint64_t seed, uint64_t stream, uint64_t base, uint32_t keep,
                             stx_real f) {
    stx_real t[128];
    uint64_t g;
    (void)fma;
    for (g = at / 8; at < end; g += 16) {
        uint64_t stop = STX_MIN(end, g * 8 + 128);
        stx__mask128(t, seed, stream, base + g, keep, f);
        memcpy(m, t + (at - g * 8), (size_t)(stop - at) * sizeof *m);
        m += stop - at;
        at = stop;
    }
}

STX_EACH_ISA(stx__mask_row,
             (stx_real * STX_RESTRICT m, uint64_t at, uint64_t end, uint64_t seed, uint64_t stream,
              uint64_t base, uint32_t keep, stx_real f),
             m, at, end, seed, stream, base, keep, f)

/* Returns the factors by which the weights of query r in columns [lo,hi) are multiplied
   after they are summed for the normaliser, or NULL if all are 1. They are the dropout
   mask, 0 or 1 / (1 - dropout), and for persistent vectors also sqrt(N), since their
   values are sqrt(N) persistent_v. The random bits depend on the query and the key (see
   stx__attn_philox_calls), not on the tiles. */
static const stx_real *stx__attn_weight_factors(stx_ctx *x, const stx__attn_tile *t, size_t r) {
    const stx_attention_args *a = t->plan->a;
    const uint64_t row = ((uint64_t)t->b * a->H + t->h) * a->T + t->i0 + r;
    const uint64_t first = (uint64_t)a->span + (t->persistent ? (uint64_t)a->S : 0)
                           + (uint64_t)t->j0;
    const size_t n = (size_t)(t->hi[r] - t->lo[r]);
    stx_real *m = t->buf.factors, f = t->persistent ? (stx_real)sqrt((double)a->N) : 1;
    size_t i;
    if (a->drop > 0) {
        const uint32_t keep = stx__keep16(a->drop);
        f *= (stx_real)(65536.0 / keep);
        STX_CALL(x, stx__mask_row,
                 (m, first + (uint64_t)t->lo[r], first + (uint64_t)t->hi[r], a->seed, a->stream,
                  a->rng_first + row * stx__attn_philox_calls(a), keep, f));
        return m;
    }
    if (!t->persistent) return NULL;
    for (i = 0; i < n; i++) m[i] = f;
    return m;
}

/* Applies the running softmax to one row of n scores: s becomes m e^(s - max). `state`
   holds max, sum m e^(s - max) and sum e^(s - max) so far. *f receives the factor by
   which the results so far must be multiplied. m_by_distance (m_count) holds m for the
   first columns; the others have m = 1. Unless `factors` (n) is NULL, s is multiplied
   by the factors after the sums are computed. */
STX_INNER void stx__attn_soft(int fma, stx_real *STX_RESTRICT s, size_t n,
                              const stx_real *STX_RESTRICT m_by_distance, size_t m_count,
                              const stx_real *factors, stx_real *state, stx_real *f) {
    stx_real top[16], lane[16], old = state[0], max, sum, all;
    size_t c, e, n16 = n / 16 * 16;
    for (e = 0; e < 16; e++) top[e] = old;
    for (c = 0; c < n16; c += 16)
        for (e = 0; e < 16; e++) top[e] = s[c + e] > top[e] ? s[c + e] : top[e];
    for (; c < n; c++) top[c - n16] = s[c] > top[c - n16] ? s[c] : top[c - n16];
    for (e = 0; e < 8; e++) top[e] = top[e] > top[e + 8] ? top[e] : top[e + 8];
    for (e = 0; e < 4; e++) top[e] = top[e] > top[e + 4] ? top[e] : top[e + 4];
    for (e = 0; e < 2; e++) top[e] = top[e] > top[e + 2] ? top[e] : top[e + 2];
    max = top[0] > top[1] ? top[0] : top[1];

    for (e = 0; e < 16; e++) lane[e] = 0;
    for (c = 0; c < n16; c += 16)
        for (e = 0; e < 16; e++) {
            stx_real w = stx_fast_exp(fma, s[c + e] - max);
            s[c + e] = w;
            lane[e] += w;
        }
    for (; c < n; c++) {
        s[c] = stx_fast_exp(fma, s[c] - max);
        lane[c - n16] += s[c];
    }
    sum = all = stx_fast_lanes(lane);

    if (m_count) { /* few columns have m < 1: multiply them and sum the row again */
        if (m_count > n) m_count = n;
        for (c = 0; c < m_count; c++) s[c] *= m_by_distance[c];
        sum = stx_fast_sum(s, n);
    }
    *f = max > old ? stx_fast_exp(fma, old - max) : 1; /* in the first tile, e^-inf = 0 */
    state[0] = max;
    state[1] = state[1] * *f + sum;
    state[2] = state[2] * *f + all;
    if (factors)
        for (c = 0; c < n; c++) s[c] *= factors[c];
}

STX_EACH_ISA(stx__attn_soft,
             (stx_real * s, size_t n, const stx_real *m_by_distance, size_t m_count,
              const stx_real *factors, stx_real *state, stx_real *f),
             s, n, m_by_distance, m_count, factors, state, f)

/* Converts row r of s to weights, with zeros in those columns of [begin,end) that the
   query does not see. If the maximum rises, rescales the row of `out`. */
static void stx__attn_soft_row(stx_ctx *x, stx__attn_tile *t, size_t r, ptrdiff_t begin,
                               ptrdiff_t end) {
    const stx__attn *A = t->plan;
    stx_real *s = t->buf.s + r * STX__LDS, *out = t->buf.out + (t->q0 + r) * A->Dp, f;
    ptrdiff_t from = t->lo[r], to = t->hi[r], c;
    size_t at, d; /* at: index of column `from` in m_by_distance */
    if (!stx__attn_norm_has_masked(A->a) && !t->persistent) /* skip keys with m = 0 */
        from = STX_MAX(from, t->farthest_column[r] + (ptrdiff_t)t->mask.zeros);
    from = STX_MIN(from, to);
    if (t->holes && !stx__attn_holes(t, s, NULL, from, to)) from = to;
    if (from < to) {
        const stx_real *factors = stx__attn_weight_factors(x, t, r);
        if (factors) factors += from - t->lo[r];
        at = t->mask.count;
        if (!t->persistent) at = STX_MIN(at, (size_t)(from - t->farthest_column[r]));
        STX_CALL(x, stx__attn_soft,
                 (s + from, (size_t)(to - from), t->mask.m_by_distance + at, t->mask.count - at,
                  factors, t->buf.state + 3 * (t->q0 + r), &f));
        if (f != 1)
            for (d = 0; d < A->Dp; d++) out[d] *= f;
    } else {
        from = to = end;
    }
    for (c = begin; c < from; c++) s[c] = 0;
    for (c = to; c < end; c++) s[c] = 0;
}

/* Applies the running softmax to the scores of the tile, then adds weights times values
   to `out`. */
static void stx__attn_softmax(stx_ctx *x, stx__attn_tile *t) {
    const stx__micro *mk = t->plan->mk;
    const ptrdiff_t kr = (ptrdiff_t)mk->kr;
    uint16_t *half = (uint16_t *)t->buf.half;
    size_t r0, r;
    for (r0 = 0; r0 < t->nb; r0 += mk->mr) {
        /* columns that the matmul reads for this strip */
        const size_t last = STX_MIN(r0 + mk->mr, t->nb) - 1;
        const ptrdiff_t begin = t->lo[r0] / kr * kr;
        const ptrdiff_t end = (ptrdiff_t)stx__round_up((size_t)t->hi[last], mk->kr);
        for (r = r0; r <= last; r++) {
            const ptrdiff_t at = (ptrdiff_t)(r * STX__LDS) + begin;
            stx__attn_soft_row(x, t, r, begin, end);
            if (half && end > begin) mk->to_bf16(half + at, t->buf.s + at, (size_t)(end - begin));
        }
    }
    stx__attn_sum_rows(t, half ? (const void *)half : t->buf.s, t->buf.out);
}


// >>attention: forward

/* Returns 1 / normaliser for a row of `state` (max, sum m e^(s - max), sum
   e^(s - max)), or 0 if the query sees no key, so that y = 0. */
static stx_real stx__attn_inv(const stx_attention_args *a, const stx_real *state) {
    stx_real norm = a->no_renorm ? state[2] : state[1] + a->eps * state[2];
    return norm == 0 ? 0 : 1 / norm;
}

/* Adds the contribution of a packed tile to the results for queries i0 .. i0+n-1 of a
   unit. The tile's keys exist only in columns below `keys`. */
static void stx__attn_fwd_keys(stx_ctx *x, stx__attn_tile *t, size_t i0, size_t n, ptrdiff_t keys) {
    for (t->q0 = 0; t->q0 < n; t->q0 += STX__BQ) {
        t->i0 = i0 + t->q0;
        t->nb = STX_MIN((size_t)STX__BQ, n - t->q0);
        if (!stx__attn_bounds(t, (size_t)keys)) continue;
        stx__attn_scores(t);
        stx__attn_softmax(x, t);
    }
}

/* Processes the persistent vectors. Their keys are sqrt(D) persistent_k. The factor
   sqrt(D) is applied to q instead, and content_bias is not added. Overwrites buf.q, so
   it must run after the other keys. */
static void stx__attn_fwd_persistent(stx_ctx *x, stx__attn_tile *t, size_t i0, size_t n) {
    const stx_attention_args *a = t->plan->a;
    const ptrdiff_t N = (ptrdiff_t)a->N;
    stx__kv_rows k, v;
    if (!N) return;
    k = stx__kv_rows_block(a->persistent_k + t->h * a->N * a->D, a->D);
    v = stx__kv_rows_block(a->persistent_v + t->h * a->N * a->D, a->D);
    t->persistent = 1;
    stx__attn_queries(t, t->buf.q, NULL, NULL, a->scale * (stx_real)sqrt((double)a->D), i0, n);
    for (t->j0 = 0; t->j0 < N; t->j0 += STX__BK) {
        t->bk = stx__attn_keys(t->j0, N);
        (void)stx__attn_live(t);
        stx__attn_pack(t, &k, N, t->buf.k_columns, NULL);
        stx__attn_pack(t, &v, N, NULL, t->buf.rows);
        stx__attn_fwd_keys(x, t, i0, n, N - t->j0);
    }
}

/* Computes y, row_max and inv_sum of queries i0 .. i0+n-1 of head h of batch row b. */
static void stx__attn_fwd_unit(stx_ctx *x, const stx__attn *A, const stx__attn_scratch *scratch,
                               size_t b, size_t h, size_t i0, size_t n) {
    const stx_attention_args *a = A->a;
    const stx__kv_rows k = stx__key_rows(a, b, h), v = stx__value_rows(a, b, h);
    const ptrdiff_t S = (ptrdiff_t)a->S;
    const size_t D = a->D;
    stx__attn_tile t;
    ptrdiff_t first, end, ahead;
    size_t r, c;
    t.buf = *scratch;
    t.ldt = 0;
    stx__attn_open(A, &t, b, h);
    for (r = 0; r < n; r++) {
        t.buf.state[3 * r] = -(stx_real)HUGE_VAL;
        t.buf.state[3 * r + 1] = t.buf.state[3 * r + 2] = 0;
    }
    memset(t.buf.out, 0, n * A->Dp * sizeof *t.buf.out);
    stx__attn_queries(&t, t.buf.q, NULL, a->content_bias, a->scale, i0, n);
    if (A->separate_qv) stx__attn_queries(&t, t.buf.qv, NULL, a->position_bias, a->scale, i0, n);

    stx__attn_range(a, t.mask.farthest, i0, n, &first, &end);
    for (t.j0 = stx__attn_floor(first, STX__KEY_ALIGN); t.j0 < end; t.j0 += STX__BK) {
        t.bk = stx__attn_keys(t.j0, end);
        if (!stx__attn_live(&t)) continue;
        stx__attn_pack(&t, &k, S, t.buf.k_columns, NULL);
        stx__attn_pack(&t, &v, S, NULL, t.buf.rows);
        ahead = STX_MIN(end, t.j0 + 2 * STX__BK);
        stx__attn_prefetch(&k, t.j0 + STX__BK, ahead, D);
        stx__attn_prefetch(&v, t.j0 + STX__BK, ahead, D);
        stx__attn_fwd_keys(x, &t, i0, n, S - t.j0);
    }
    stx__attn_fwd_persistent(x, &t, i0, n);

    for (r = 0; r < n; r++) {
        const stx_real *state = t.buf.state + 3 * r, *out = t.buf.out + r * A->Dp;
        const size_t i = i0 + r, row = (b * a->H + h) * a->T + i;
        const stx_real inv = stx__attn_inv(a, state);
        stx_real *y = a->y + ((b * a->T + i) * a->H + h) * D;
        for (c = 0; c < D; c++) y[c] = out[c] * inv;
        a->row_max[row] = state[0];
        a->inv_sum[row] = inv;
    }
}
