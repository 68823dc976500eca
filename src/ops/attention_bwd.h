#pragma once
#include "../api/config.h"
#include "../api/context.h"
#include "../api/attention.h"
#include "../core/loops.h"
#include "../core/maths.h"
#include "../core/platform.h"
#include "../gemm/micro.h"
#include "../gemm/blocked.h"
#include "attention.h"
#include "attention_tiles.h"
#include "attention_fwd.h"
#include "attention_work.h"


// >>attention: backward

/* Gradients for one query, derived line by line from the forward pass. For key j, s_j
   is the score, m_j the span mask, and r_j the factor from dropout (see
   stx__attn_weight_factors). w_j = e^(s_j - row_max) inv_sum is recomputed tile by
   tile, and a_j = m_j w_j.

       y = sum_j r_j a_j v_j
           dv_j += r_j a_j dy
           g_j   = r_j dy . v_j                        the gradient of a_j
       a_j = m_j e^s_j / (sum_j m_j e^s_j + eps sum_j e^s_j)
           ds_j  = a_j (g_j - dot) - eps dot w_j       dot = dy . y = sum_j a_j g_j
           dm_j  = w_j (g_j - dot)
       a_j = m_j e^s_j / sum_j e^s_j                   with no_renorm
           ds_j  = a_j g_j - dot w_j
           dm_j  = w_j g_j
       s_j = scale ((q + content_bias) . k_j + (q + position_bias) . pe_p)
           dk_j           += ds_j scale (q + content_bias)
           dpe_p          += ds_j scale (q + position_bias)
           dcontent_bias  += scale sum_j ds_j k_j
           dposition_bias += scale sum_j ds_j pe_p
           dq             += scale sum_j ds_j (k_j + pe_p)
       m_j = clamp((span_fraction max_span + ramp + 1 - delta) / ramp, 0, 1)
           dspan_fraction += max_span / ramp sum_j dm_j over 0 <= m <= 1 before clamping

   dv, dk and dpe are computed in transposed form, (D, keys), so that s and g can be
   right operands of the matmuls in their stored layout. No locks are needed: units
   never share keys, and they share queries only if their head is divided. Gradients to
   which several units contribute (the gradients of pe, the biases, span_fraction, the
   persistent vectors and the queries of a divided head) are first summed per owner or
   per unit in `work`, and then added up in a fixed order. */

/* Parameters of stx__attn_soft_bwd for one row of a tile, which has n keys. */
typedef struct stx__attn_row {
    size_t n, m_count;               /* the first m_count keys have m < 1 */
    size_t begin, end;               /* columns [begin,end) affect dspan_fraction */
    stx_real row_max, inv_sum;
    stx_real dot, eps_dot;           /* dot is dy . y, eps_dot is eps dy . y; with
                                        no_renorm, 0 and dy . y */
} stx__attn_row;

/* Replaces the scores s with r a, and g = dy . v with ds. r is the weight's factor, and
   m is the key's span mask:
       a = m w,  w = e^(s - row_max) inv_sum
           ds = a (r g - dot) - eps_dot w,  dspan += w (r g - dot)

   m_by_distance holds m for the first m_count columns; the others have m = 1. `factors`
   (n) holds r; NULL means r = 1. */
STX_INNER void stx__attn_soft_bwd(int fma, stx_real *STX_RESTRICT s, stx_real *STX_RESTRICT g,
                                  const stx_real *STX_RESTRICT m_by_distance,
                                  const stx_real *STX_RESTRICT factors, const stx__attn_row *row,
                                  stx_real *dspan) {
    const size_t n = row->n, m_count = row->m_count, begin = row->begin;
    const size_t dm_end = row->end;
    const stx_real max = row->row_max, inv = row->inv_sum, dot = row->dot, eps_dot = row->eps_dot;
    size_t c, end = STX_MIN(m_count, n);
    stx_real sum = 0;
    if (factors)
        for (c = 0; c < n; c++) g[c] *= factors[c];
    if (end < dm_end) end = STX_MIN(dm_end, n);

    for (c = 0; c < end; c++) {
        /* m w <= 1, but w could overflow where m is small, so the exponent is limited.
           A NaN stays a NaN. */
        const stx_real over_max = s[c] - max, v = over_max > 80 ? 80 : over_max;
        const stx_real w = stx_fast_exp(fma, v) * inv, m = c < m_count ? m_by_distance[c] : 1;
        const stx_real dm = g[c] - dot;
        if (c >= begin && c < dm_end) sum += w * dm;
        s[c] = m * w;
        g[c] = s[c] * dm - eps_dot * w;
    }
    for (; c < n; c++) {
        const stx_real w = stx_fast_exp(fma, s[c] - max) * inv;
        s[c] = w;
        g[c] = w * (g[c] - dot) - eps_dot * w;
    }
    if (factors)
        for (c = 0; c < n; c++) s[c] *= factors[c];
    *dspan += sum;
}

STX_EACH_ISA(stx__attn_soft_bwd,
             (stx_real * s, stx_real *g, const stx_real *m_by_distance, const stx_real *factors,
              const stx__attn_row *row, stx_real *dspan),
             s, g, m_by_distance, factors, row, dspan)

/* Row r of s holds the scores, and row r of g holds dy . v. Replaces the scores with
   the weights, and dy . v with ds, in the columns that the query sees. */
static void stx__attn_bwd_row(stx_ctx *x, stx__attn_tile *t, size_t r, stx_real row_max,
                              stx_real inv_sum, stx_real *dspan) {
    const stx_attention_args *a = t->plan->a;
    const stx_real *factors = stx__attn_weight_factors(x, t, r), dot = t->buf.state[t->q0 + r];
    const size_t lo = (size_t)t->lo[r], count = t->mask.count;
    const size_t end = t->persistent ? 0 : t->mask.end;
    stx_real *s = t->buf.s + r * STX__LDS, *g = t->buf.g + r * STX__LDS;
    stx__attn_row row;
    size_t at = count; /* index of column lo in m_by_distance, or count + 1 if the column
                          is past mask.end */
    if (!t->persistent) at = STX_MIN((size_t)(t->lo[r] - t->farthest_column[r]), count + 1);
    if (t->holes) (void)stx__attn_holes(t, s, g, t->lo[r], t->hi[r]);
    row.n = (size_t)t->hi[r] - lo;
    row.m_count = at < count ? count - at : 0;
    row.begin = t->mask.begin > at ? t->mask.begin - at : 0;
    row.end = end > at ? end - at : 0;
    row.row_max = row_max;
    row.inv_sum = inv_sum;
    row.dot = a->no_renorm ? 0 : dot;
    row.eps_dot = a->no_renorm ? dot : a->eps * dot;
    STX_CALL(x, stx__attn_soft_bwd,
             (s + lo, g + lo, t->mask.m_by_distance + STX_MIN(at, count), factors, &row, dspan));
}

/* With bf16, stores a bf16 copy of ds in buf.half, and forms pairs of rows r and r+1 of
   s and of g. In the pairs for pe, row r+1 is one column ahead of row r. */
static void stx__attn_bwd_pairs(stx_ctx *x, stx__attn_tile *t, size_t rows) {
    const stx__attn *A = t->plan;
    size_t r;
    for (r = 0; r < rows; r++)
        A->mk->to_bf16((uint16_t *)t->buf.half + r * STX__LDS, t->buf.g + r * STX__LDS, t->bk);
    for (r = 0; r < rows; r += 2) {
        const size_t at = r * STX__LDS, pair = r / 2 * STX__LDS;
        const uint16_t *half = (const uint16_t *)t->buf.half + at;
        A->mk->pair(t->buf.s_pairs + pair, t->buf.s + at, t->buf.s + at + STX__LDS, t->bk);
        STX_CALL(x, stx__zip_rows, (t->buf.g_pairs + pair, half, half + STX__LDS, t->bk));
        if (A->tables && !t->persistent)
            STX_CALL(x, stx__zip_rows,
                     (t->buf.skewed_pairs + pair - 1, half - 1, half + STX__LDS, t->bk + 1));
    }
}

/* Replaces the tile's s with the weights and its g with ds, and sets both to zero where
   a query sees no key. row_max and inv_sum point to the values of the tile's first
   query. */
static void stx__attn_bwd_weights(stx_ctx *x, stx__attn_tile *t, const stx_real *row_max,
                              const stx_real *inv_sum, stx_real *dspan) {
    const size_t rows = stx__round_up(t->nb, t->plan->mk->kr > 1 ? 32 : 1);
    size_t r;
    for (r = 0; r < rows; r++) {
        stx_real *s = t->buf.s + r * STX__LDS, *g = t->buf.g + r * STX__LDS;
        size_t lo = 0, hi = 0;
        if (r < t->nb && t->hi[r] > t->lo[r] && inv_sum[r] != 0) {
            lo = (size_t)t->lo[r];
            hi = (size_t)t->hi[r];
            stx__attn_bwd_row(x, t, r, row_max[r], inv_sum[r], dspan);
        }
        memset(s, 0, lo * sizeof *s);
        memset(g, 0, lo * sizeof *g);
        memset(s + hi, 0, (t->bk - hi) * sizeof *s);
        memset(g + hi, 0, (t->bk - hi) * sizeof *g);
    }
    if (t->plan->per_word == 2) stx__attn_bwd_pairs(x, t, rows);
}

/* Computes to[d][c] += sum_r transposed[d][r] weights[r][c] over the tile's queries r.
   With q_t and ds as factors, `to` is dk_t; with dy_t and r a, it is dv_t. `transposed`
   is an operand (D,ldt), `weights` is (BQ,LDS), `pairs` holds pairs of the rows of
   `weights` for bf16, and `to` is (D,LDK). */
static void stx__attn_sum_queries(const stx__attn_tile *t, const void *transposed,
                                  const stx_real *weights, const uint32_t *pairs, stx_real *to) {
    const stx__attn *A = t->plan;
    const stx__micro *mk = A->mk;
    const size_t u = A->per_word, D = A->a->D;
    size_t c, d, from, end;
    for (c = 0; c < t->bk; c += mk->nr) {
        const void *right;
        /* find the rows that see a key of this strip of columns */
        from = 0;
        while (from < t->nb && t->hi[from] <= (ptrdiff_t)c) from++;
        end = t->nb;
        while (end > from && t->lo[end - 1] >= (ptrdiff_t)(c + mk->nr)) end--;
        if (from == end) continue;
        from = from / mk->kr * mk->kr;
        end = stx__round_up(end, mk->kr);
        right = weights + from * STX__LDS + c;
        if (u == 2) right = pairs + from / 2 * STX__LDS + c;
        for (d = 0; d < D; d += mk->mr)
            mk->run(STX_MIN(mk->mr, D - d), (end - from) / u,
                    stx__operand(A, transposed, (ptrdiff_t)(d * t->ldt + t->q0 + from)), t->ldt, u,
                    right, STX__LDS, to + d * STX__LDK + c, STX__LDK, 1);
    }
}

/* Computes dpe[d][p] += sum_r qv_t[d][r] ds[r][c] with c = p - p0 + r (see
   stx__attn_p0), so each row of ds is read one column further right than the previous
   one. dpe is (D,ldpe). */
static void stx__attn_dpe(const stx__attn_tile *t, stx_real *dpe, size_t ldpe) {
    const stx__attn *A = t->plan;
    const stx__micro *mk = A->mk;
    const size_t u = A->per_word, D = A->a->D;
    const ptrdiff_t nr = (ptrdiff_t)mk->nr, kr = (ptrdiff_t)mk->kr, nb = (ptrdiff_t)t->nb;
    const ptrdiff_t p0 = stx__attn_p0(t), lowest = p0 + t->lo[nb - 1] - (nb - 1);
    const ptrdiff_t pe_end = STX_MIN(p0 + t->hi[0], (ptrdiff_t)A->pe_rows);
    ptrdiff_t p = lowest < 0 ? 0 : lowest / nr * nr, from, end;
    size_t d;
    for (; p < pe_end; p += nr) {
        const void *right;
        /* find the rows that use this strip of pe */
        from = 0;
        while (from < nb && p0 + t->lo[from] - from >= p + nr) from++;
        end = nb;
        while (end > from && p0 + t->hi[end - 1] - (end - 1) <= p) end--;
        if (from == end) continue;
        from = from / kr * kr;
        end = (ptrdiff_t)stx__round_up((size_t)end, mk->kr);
        right = t->buf.g + from * STX__LDS + (p - p0 + from);
        if (u == 2) right = t->buf.skewed_pairs + from / 2 * STX__LDS + (p - p0 + from);
        for (d = 0; d < D; d += mk->mr)
            mk->run(STX_MIN(mk->mr, D - d), (size_t)(end - from) / u,
                    stx__operand(A, t->buf.qv_t, (ptrdiff_t)(d * t->ldt + t->q0) + from), t->ldt, u,
                    right, STX__LDS + u, dpe + d * ldpe + (size_t)p, ldpe, 1);
    }
}

/* Computes out_pe[r] += sum_p ds[r][p - p0 + r] pe_p (see stx__attn_p0), so each row of
   ds is read one column further right than the previous one. */
static void stx__attn_sum_pe(const stx__attn_tile *t) {
    const stx__attn *A = t->plan;
    const stx__micro *mk = A->mk;
    const size_t u = A->per_word, nr = mk->nr;
    const ptrdiff_t p0 = stx__attn_p0(t), kr = (ptrdiff_t)mk->kr;
    const stx_real *pe =
        A->pe_packed_rows + stx__attn_table(A, t->h) * A->Dp * A->pe_rows / u;
    const void *ds = u == 2 ? t->buf.half : (const void *)t->buf.g;
    size_t r0, j;
    for (r0 = 0; r0 < t->nb; r0 += mk->mr) {
        const size_t height = STX_MIN(mk->mr, t->nb - r0), last = r0 + height - 1;
        const ptrdiff_t row = (ptrdiff_t)r0;
        ptrdiff_t from = STX_MAX(p0 + t->lo[last] - (ptrdiff_t)last, 0);
        ptrdiff_t end = STX_MIN(p0 + t->hi[r0] - row, (ptrdiff_t)A->pe_rows);
        if (from >= end) continue;
        from = from / kr * kr;
        end = (ptrdiff_t)stx__round_up((size_t)end, mk->kr);
        for (j = 0; j < A->Dp; j += nr)
            mk->run(height, (size_t)(end - from) / u,
                    stx__operand(A, ds, row * STX__LDS + from - p0 + row), STX__LDS + 1, u,
                    pe + j * (A->pe_rows / u) + (size_t)from / u * nr, nr,
                    t->buf.out_pe + (t->q0 + r0) * A->Dp + j, A->Dp, 1);
    }
}

STX_INNER void stx__row_dot(int fma, stx_real *s, const stx_real *a, const stx_real *b, size_t n) {
    *s = stx_fast_dot(fma, a, b, n);
}

STX_EACH_ISA(stx__row_dot, (stx_real * s, const stx_real *a, const stx_real *b, size_t n), s, a, b,
             n)

/* Adds `from` (n,w), which has a row stride of ldf, to `to`, which has a row stride of
   ldt. */
STX_INNER void stx__attn_add(int fma, stx_real *STX_RESTRICT to, size_t ldt,
                             const stx_real *STX_RESTRICT from, size_t ldf, size_t n, size_t w) {
    size_t r, i;
    (void)fma;
    for (r = 0; r < n; r++, to += ldt, from += ldf)
        for (i = 0; i < w; i++) to[i] += from[i];
}

STX_EACH_ISA(stx__attn_add,
             (stx_real * STX_RESTRICT to, size_t ldt, const stx_real *STX_RESTRICT from, size_t ldf,
              size_t n, size_t w),
             to, ldt, from, ldf, n, w)

typedef struct stx__attn_dq_args {
    stx_real *dq;                    /* (n,D), with a row stride of ldq, or NULL */
    size_t    ldq;
    int       accumulate;            /* nonzero: add to dq; 0: overwrite it */
    stx_real *dcontent_bias, *dposition_bias;    /* (D) */
    const stx_real *out, *out_pe;    /* (n,D), with a row stride of ldo */
    size_t    ldo, n, D;
    stx_real  scale;
} stx__attn_dq_args;

/* Adds scale * (out + out_pe) to dq, or overwrites dq with it. Adds the column sums of
   scale * out to dcontent_bias and the column sums of scale * out_pe to
   dposition_bias. */
STX_INNER void stx__attn_dq(int fma, const stx__attn_dq_args *a) {
    const stx_real *STX_RESTRICT out = a->out, *STX_RESTRICT out_pe = a->out_pe, scale = a->scale;
    stx_real *STX_RESTRICT dcontent = a->dcontent_bias, *STX_RESTRICT dposition = a->dposition_bias;
    const size_t n = a->n, D = a->D;
    const int accumulate = a->accumulate;
    size_t r, d;
    (void)fma;
    for (r = 0; r < n; r++, out += a->ldo, out_pe += a->ldo) {
        stx_real *STX_RESTRICT dq = a->dq ? a->dq + r * a->ldq : NULL;
        for (d = 0; d < D; d++) {
            const stx_real k = scale * out[d], e = scale * out_pe[d];
            dcontent[d] += k;
            dposition[d] += e;
            if (dq) dq[d] = accumulate ? dq[d] + (k + e) : k + e;
        }
    }
}

STX_EACH_ISA(stx__attn_dq, (const stx__attn_dq_args *a), a)

/* Transposes columns c .. c+n-1 of `from` (D,LDK). Stores the result in `to` (n,D),
   which has a row stride of ldt, or adds it to `to` if `accumulate` is set. `work` has
   space for BK rows of NR elements. */
static void stx__attn_transpose_back(const stx__attn *A, stx_real *to, size_t ldt,
                                     const stx_real *from, size_t c, size_t n, stx_real *work,
                                     int accumulate) {
    const size_t nr = A->mk->nr, D = A->a->D;
    size_t d, r;
    for (d = 0; d < D; d += nr) {
        const size_t w = STX_MIN(nr, D - d);
        stx__transpose_for(A->mk, work, from + d * STX__LDK + c, STX__LDK, w, n);
        if (accumulate)
            STX_CALL(A->x, stx__attn_add, (to + d, ldt, work, nr, n, w));
        else
            for (r = 0; r < n; r++) memcpy(to + r * ldt + d, work + r * nr, w * sizeof *to);
    }
}

/* Adds the gradient of n rows to `rows`, or stores it there if `overwrite` is set.
   Columns c .. c+n-1 of t (D,LDK) hold the gradient. With t = NULL, it is zero. */
static void stx__attn_store_rows(const stx__attn *A, stx_real *rows, size_t stride, int overwrite,
                                 const stx_real *t, size_t c, size_t n, stx_real *work) {
    size_t r;
    if (t)
        stx__attn_transpose_back(A, rows, stride, t, c, n, work, !overwrite);
    else if (overwrite)
        for (r = 0; r < n; r++) memset(rows + r * stride, 0, A->a->D * sizeof *rows);
}

/* Adds or stores the gradient of keys or values [from,to), as *r specifies. t (D,LDK)
   holds the gradient, with key j0 in column 0. With t = NULL, it is zero. `work` has
   space for BK rows of NR elements. */
static void stx__attn_store(const stx__attn *A, const stx__kv_rows *r, const stx_real *t,
                            ptrdiff_t j0, ptrdiff_t from, ptrdiff_t to, stx_real *work) {
    const ptrdiff_t cached = STX_MAX(from, r->cached_first);
    const ptrdiff_t cached_end = STX_MIN(to, r->block_first);
    const ptrdiff_t block = STX_MAX(from, r->block_first);
    if (r->block && block < to)
        stx__attn_store_rows(A, stx__kv_row(r, block), r->block_stride, r->overwrite_block, t,
                             (size_t)(block - j0), (size_t)(to - block), work);
    if (r->cached && cached < cached_end)
        stx__attn_store_rows(A, stx__kv_row(r, cached), r->cached_stride, r->overwrite_cached, t,
                             (size_t)(cached - j0), (size_t)(cached_end - cached), work);
}

/* State of the backward pass of one unit. */
typedef struct stx__attn_bwd {
    stx_ctx *x;
    const stx__attn      *plan;
    const stx__attn_work *w;
    const stx__attn_unit *unit;
    stx__attn_tile t;
    stx__kv_rows   k, v, dk, dv;
    size_t         owner;
    stx_real      *dq;               /* (T,D), with a row stride of dq_stride, or NULL */
    size_t         dq_stride;
    int            add_dq;           /* nonzero: add to dq; 0: overwrite it */
    stx_real      *dpe;              /* (D,ldpe): the owner's partial sum of dpe, or NULL */
    stx_real      *dspan;            /* the unit's partial sum of dspan_fraction */
} stx__attn_bwd;

/* Adds the contribution of a packed tile to the gradients of all queries and of pe. The
   tile has keys only in columns below `keys`. Sets dk_t if needs_dk, and dv_t if
   needs_dv, to the gradients of the tile's keys and values. */
static void stx__attn_bwd_tile(stx__attn_bwd *u, ptrdiff_t keys, int needs_dk, int needs_dv) {
    stx__attn_tile *t = &u->t;
    const stx__attn *A = t->plan;
    const stx_attention_args *a = A->a;
    const size_t row = (t->b * a->H + t->h) * a->T;
    size_t d;
    if (t->bk != t->clear_bk) stx__attn_clear(t);
    t->clear_bk = t->bk;
    for (d = 0; d < a->D; d++) {
        memset(t->buf.dk_t + d * STX__LDK, 0, t->bk * sizeof *t->buf.dk_t);
        memset(t->buf.dv_t + d * STX__LDK, 0, t->bk * sizeof *t->buf.dv_t);
    }
    for (t->q0 = 0; t->q0 < a->T; t->q0 += STX__BQ) {
        t->i0 = t->q0;
        t->nb = STX_MIN((size_t)STX__BQ, a->T - t->q0);
        if (!stx__attn_bounds(t, (size_t)keys)) continue;
        stx__attn_scores(t);
        stx__attn_dot_columns(t, t->buf.dy, t->buf.v_columns, t->buf.g);
        stx__attn_bwd_weights(u->x, t, a->row_max + row + t->i0, a->inv_sum + row + t->i0,
                              u->dspan);
        if (needs_dv) stx__attn_sum_queries(t, t->buf.dy_t, t->buf.s, t->buf.s_pairs, t->buf.dv_t);
        if (needs_dk) stx__attn_sum_queries(t, t->buf.q_t, t->buf.g, t->buf.g_pairs, t->buf.dk_t);
        stx__attn_sum_rows(t, A->per_word == 2 ? t->buf.half : (const void *)t->buf.g, t->buf.out);
        if (!A->tables || t->persistent) continue;
        if (u->dpe) stx__attn_dpe(t, u->dpe, u->w->ldpe);
        stx__attn_sum_pe(t);
    }
}

/* Packs the queries and dy of the unit, and computes dy . y. clear_bk is the value of
   t.clear_bk after the thread's previous unit. */
static void stx__attn_bwd_open(stx__attn_bwd *u, size_t thread, size_t clear_bk) {
    const stx__attn *A = u->plan;
    const stx_attention_args *a = A->a;
    const stx__attn_work *w = u->w;
    const stx__attn_unit *unit = u->unit;
    const size_t D = a->D, T = a->T, b = unit->b, h = unit->h, ldy = a->H * D;
    const stx_real *dy = a->dy + b * T * ldy + h * D, *y = a->y + b * T * ldy + h * D;
    stx__attn_tile *t = &u->t;
    size_t r;
    stx__attn_scratch_layout(A, w->scratch + thread * w->scratch_bytes, w->max_queries, 1, &t->buf);
    t->ldt = stx__round_up(T, 32) + STX__STAGGER;
    stx__attn_open(A, t, b, h);
    t->clear_bk = clear_bk;
    memset(t->buf.out, 0, T * A->Dp * sizeof *t->buf.out);
    memset(t->buf.out_pe, 0, T * A->Dp * sizeof *t->buf.out_pe);
    stx__attn_queries(t, t->buf.q, t->buf.q_t, a->content_bias, a->scale, 0, T);
    if (A->separate_qv)
        stx__attn_queries(t, t->buf.qv, t->buf.qv_t, a->position_bias, a->scale, 0, T);
    stx__attn_operand(A, t->buf.dy, A->Dk, dy, ldy, T, D);
    for (r = 0; r < T; r += STX__BQ)
        stx__attn_transpose(A, t->buf.dy_t, t->ldt, r, dy + r * ldy, ldy,
                            STX_MIN((size_t)STX__BQ, T - r), D);
    for (r = 0; r < T; r++)
        STX_CALL(u->x, stx__row_dot, (t->buf.state + r, dy + r * ldy, y + r * ldy, D));

    u->k = stx__key_rows(a, b, h);
    u->v = stx__value_rows(a, b, h);
    u->dk = stx__dkey_rows(a, b, h);
    u->dv = stx__dvalue_rows(a, b, h);
    u->dspan = w->dspan + (unit - w->unit);
    if (w->dpe_size)
        u->dpe = w->dpe + u->owner * w->dpe_size + stx__attn_table(A, h) * D * w->ldpe;
    if (!a->dq) return;
    u->dq = a->dq + b * a->q_batch_stride + h * D;
    u->dq_stride = a->q_row_stride;
    u->add_dq = !stx__overwrites(a, STX_OVERWRITE_DQ);
    if (unit->part >= 0) { /* only the first unit of a head writes to dq itself */
        u->dq = w->part + (size_t)unit->part * T * D;
        u->dq_stride = D;
        u->add_dq = 0;
    }
}

/* Writes zero gradients for the keys that no query reaches: the keys before a head's
   first unit and after its last unit. */
static void stx__attn_bwd_unreached(stx__attn_bwd *u) {
    const stx_attention_args *a = u->plan->a;
    const ptrdiff_t S = (ptrdiff_t)a->S, before = STX_MIN(u->unit->first, S);
    const ptrdiff_t after = STX_MAX(u->unit->end, 0);
    ptrdiff_t first, end;
    if (u->unit->part < 0) {
        stx__attn_store(u->plan, &u->dk, NULL, 0, 0, before, NULL);
        stx__attn_store(u->plan, &u->dv, NULL, 0, 0, before, NULL);
    }
    stx__attn_range(a, u->t.mask.farthest, 0, a->T, &first, &end);
    if (u->unit->end >= end) {
        stx__attn_store(u->plan, &u->dk, NULL, 0, after, S, NULL);
        stx__attn_store(u->plan, &u->dv, NULL, 0, after, S, NULL);
    }
}

/* Computes dk, dv and dpe for all keys of the unit. Then computes dq and the bias
   gradients from the sums of ds_j k_j and ds_j pe_p over the keys j. */
static void stx__attn_bwd_keys(stx__attn_bwd *u) {
    const stx__attn *A = u->plan;
    const stx_attention_args *a = A->a;
    const ptrdiff_t S = (ptrdiff_t)a->S, first = u->unit->first, end = u->unit->end;
    const size_t D = a->D, index = (size_t)(u->unit - u->w->unit);
    const int needs_dk = u->dk.block || u->dk.cached, needs_dv = u->dv.block || u->dv.cached;
    stx__attn_tile *t = &u->t;
    stx__attn_dq_args q;
    for (t->j0 = first; t->j0 < end; t->j0 += STX__BK) {
        const ptrdiff_t from = STX_MAX(t->j0, 0), next = t->j0 + STX__BK;
        ptrdiff_t to;
        int live;
        t->bk = stx__attn_keys(t->j0, end);
        to = STX_MIN(S, t->j0 + (ptrdiff_t)t->bk);
        live = stx__attn_live(t);
        if (live) {
            stx__attn_pack(t, &u->k, S, t->buf.k_columns, t->buf.rows);
            stx__attn_pack(t, &u->v, S, t->buf.v_columns, NULL);
            stx__attn_prefetch(&u->dk, t->j0, to, D);
            stx__attn_prefetch(&u->dv, t->j0, to, D);
            stx__attn_prefetch(&u->k, next, STX_MIN(end, next + STX__BK), D);
            stx__attn_prefetch(&u->v, next, STX_MIN(end, next + STX__BK), D);
            stx__attn_bwd_tile(u, STX_MIN(S, end) - t->j0, needs_dk, needs_dv);
        }
        stx__attn_store(A, &u->dk, live ? t->buf.dk_t : NULL, t->j0, from, to, t->buf.s);
        stx__attn_store(A, &u->dv, live ? t->buf.dv_t : NULL, t->j0, from, to, t->buf.s);
    }

    q.dq = u->dq;
    q.ldq = u->dq_stride;
    q.accumulate = u->add_dq;
    q.dcontent_bias = u->w->dcontent_bias + index * D;
    q.dposition_bias = u->w->dposition_bias + index * D;
    q.out = t->buf.out;
    q.out_pe = t->buf.out_pe;
    q.ldo = A->Dp;
    q.n = a->T;
    q.D = D;
    q.scale = a->scale;
    STX_CALL(u->x, stx__attn_dq, (&q));
}

/* Computes the gradients of the head's persistent vectors and adds their contribution
   to dq. Only the first unit of a head does this. */
static void stx__attn_bwd_persistent(stx__attn_bwd *u) {
    const stx__attn *A = u->plan;
    const stx_attention_args *a = A->a;
    const stx__attn_work *w = u->w;
    const size_t D = a->D, T = a->T, head = u->unit->h * a->N * D;
    const ptrdiff_t N = (ptrdiff_t)a->N;
    const stx_real sqrt_D = (stx_real)sqrt((double)D);
    const int needed = w->dpk_size > 0;
    stx__attn_tile *t = &u->t;
    stx__kv_rows k, v;
    size_t r, c;
    if (!N || u->unit->part >= 0) return;
    k = stx__kv_rows_block(a->persistent_k + head, D);
    v = stx__kv_rows_block(a->persistent_v + head, D);
    t->persistent = 1;
    stx__attn_queries(t, t->buf.q, t->buf.q_t, NULL, a->scale * sqrt_D, 0, T);
    memset(t->buf.out, 0, T * A->Dp * sizeof *t->buf.out);
    for (t->j0 = 0; t->j0 < N; t->j0 += STX__BK) {
        const size_t n = (size_t)STX_MIN((ptrdiff_t)STX__BK, N - t->j0);
        const size_t at = u->owner * w->dpk_size + head + (size_t)t->j0 * D;
        t->bk = stx__attn_keys(t->j0, N);
        (void)stx__attn_live(t);
        stx__attn_pack(t, &k, N, t->buf.k_columns, t->buf.rows);
        stx__attn_pack(t, &v, N, t->buf.v_columns, NULL);
        stx__attn_bwd_tile(u, (ptrdiff_t)n, needed, needed);
        if (!needed) continue;
        stx__attn_transpose_back(A, w->dpk + at, D, t->buf.dk_t, 0, n, t->buf.s, 1);
        stx__attn_transpose_back(A, w->dpv + at, D, t->buf.dv_t, 0, n, t->buf.s, 1);
    }
    if (!u->dq) return;
    for (r = 0; r < T; r++) /* add to dq, which stx__attn_bwd_keys has set */
        for (c = 0; c < D; c++)
            u->dq[r * u->dq_stride + c] += a->scale * sqrt_D * t->buf.out[r * A->Dp + c];
}

/* Computes the gradients of one unit. *clear_bk is carried from one unit to the next;
   see stx__attn_bwd_open. */
static void stx__attn_bwd_unit(stx_ctx *x, const stx__attn *A, const stx__attn_work *w,
                               size_t thread, size_t owner, const stx__attn_unit *unit,
                               size_t *clear_bk) {
    stx__attn_bwd u;
    u.x = x;
    u.plan = A;
    u.w = w;
    u.unit = unit;
    u.owner = owner;
    u.dq = u.dpe = NULL;
    u.dq_stride = 0;
    u.add_dq = 0;
    stx__attn_bwd_open(&u, thread, *clear_bk);
    stx__attn_bwd_unreached(&u);
    stx__attn_bwd_keys(&u);
    stx__attn_bwd_persistent(&u);
    *clear_bk = u.t.clear_bk;
}

/* Processes the units of each owner, the most expensive ones first. */
static void stx__attn_bwd_part(const stx_share *s, const void *job) {
    const stx__attn_job *j = (const stx__attn_job *)job;
    const stx__attn_work *w = j->w;
    size_t i, k, clear_bk = 0;
    if (j->plan->mk->enter) j->plan->mk->enter();
    for (i = s->begin; i < s->end; i++) {
        memset(w->dpe + i * w->dpe_size, 0, w->dpe_size * sizeof(stx_real));
        memset(w->dpk + i * w->dpk_size, 0, w->dpk_size * sizeof(stx_real));
        memset(w->dpv + i * w->dpk_size, 0, w->dpk_size * sizeof(stx_real));
        for (k = 0; k < w->count; k++)
            if (w->unit[k].owner == (int)i)
                stx__attn_bwd_unit(s->x, j->plan, w, s->thread, i, &w->unit[k], &clear_bk);
    }
    if (j->plan->mk->leave) j->plan->mk->leave();
}

/* Arguments of a loop that adds the sum of `copies` arrays of n elements to `to`. */
typedef struct stx__add_copies_args {
    stx_real *to;
    const stx_real *from;            /* (copies,n) */
    size_t n, copies;
} stx__add_copies_args;

STX_INNER void stx__add_copies(int fma, const stx_share *s, const void *job) {
    const stx__add_copies_args *a = (const stx__add_copies_args *)job;
    size_t i, k, e;
    (void)fma;
    for (i = 64 * s->begin; i < STX_MIN(a->n, 64 * s->end); i += 64) {
        const size_t w = STX_MIN((size_t)64, a->n - i);
        stx_real t[64] = {0};
        for (k = 0; k < a->copies; k++)
            for (e = 0; e < w; e++) t[e] += a->from[k * a->n + i + e];
        for (e = 0; e < w; e++) a->to[i + e] += t[e];
    }
}

STX_LOOP(stx__add_copies)

/* Adds the sum of `copies` arrays of n elements to `to`. */
static void stx__attn_add_copies(stx_ctx *x, stx_real *to, const stx_real *from, size_t n,
                                 size_t copies) {
    stx__add_copies_args a;
    if (!n || !copies || !to) return;
    a.to = to;
    a.from = from;
    a.n = n;
    a.copies = copies;
    stx_parallel(x, (n + 63) / 64, n * copies, stx__add_copies_run, &a);
}

/* Adds the sum of the owners' copies, which is in the first one, (tables,D,ldpe), to
   dpe. */
static void stx__attn_add_dpe_part(const stx_share *s, const void *job) {
    const stx__attn_job *j = (const stx__attn_job *)job;
    const stx__attn *A = j->plan;
    const stx__attn_work *w = j->w;
    const size_t D = A->a->D, ldp = A->tables * D;
    size_t p, c;
    for (p = s->begin; p < s->end; p++)
        for (c = 0; c < ldp; c++)
            A->a->dpe[((size_t)A->pe_first + p) * ldp + c] += w->dpe[c * w->ldpe + p];
}

/* Assigns each unit to the owner with the lowest cost so far. */
static void stx__attn_assign(const stx_attention_args *a, stx__attn_work *w) {
    size_t i, k;
    for (k = 0; k < w->owners; k++) w->load[k] = 0;
    for (i = 0; i < w->count; i++) {
        stx__attn_unit *u = &w->unit[i];
        size_t best = 0;
        for (k = 1; k < w->owners; k++)
            if (w->load[k] < w->load[best]) best = k;
        u->owner = (int)best;
        w->load[best] += (double)(u->end - u->first) + (u->part < 0 ? (double)a->N : 0)
                         + (double)STX__BQ;
    }
}

/* Adds up the results of the units: the gradients of the biases and of span_fraction,
   and dq of divided heads. */
static void stx__attn_add_units(const stx_attention_args *a, const stx__attn_work *w) {
    const size_t D = a->D;
    size_t i, c, r;
    for (i = 0; i < w->count; i++) {
        const stx__attn_unit *u = &w->unit[i];
        const size_t o = u->h * D;
        if (a->dcontent_bias)
            for (c = 0; c < D; c++) a->dcontent_bias[o + c] += w->dcontent_bias[i * D + c];
        if (a->dposition_bias)
            for (c = 0; c < D; c++) a->dposition_bias[o + c] += w->dposition_bias[i * D + c];
        if (a->dspan_fraction)
            a->dspan_fraction[a->span_shared ? 0 : u->h] += w->dspan[i] * (a->max_span / a->ramp);
        if (u->part < 0 || !a->dq) continue;
        for (r = 0; r < a->T; r++) {
            const stx_real *part = w->part + ((size_t)u->part * a->T + r) * D;
            stx_real *dq = a->dq + u->b * a->q_batch_stride + r * a->q_row_stride + o;
            for (c = 0; c < D; c++) dq[c] += part[c];
        }
    }
}

STX_DEF void stx_attention_bwd(stx_ctx *x, const stx_attention_args *a) {
    STX__FP_SCOPE;
    stx__attn A;
    stx__attn_work w;
    stx__attn_job j;
    if (!stx__attn_start(x, "stx_attention_bwd", &A, a, 1, &w)) return;
    memset(w.dcontent_bias, 0, w.count * a->D * sizeof(stx_real));
    memset(w.dposition_bias, 0, w.count * a->D * sizeof(stx_real));
    memset(w.dspan, 0, w.count * sizeof(stx_real));
    stx__attn_assign(a, &w);
    j.plan = &A;
    j.w = &w;
    stx_parallel_units(x, w.owners, stx__attn_bwd_part, &j);

    if (w.dpe_size && w.owners) {
        /* the first pass reads and writes in address order, the second transposes */
        stx__attn_add_copies(x, w.dpe, w.dpe + w.dpe_size, w.dpe_size, w.owners - 1);
        stx_parallel(x, a->P - (size_t)A.pe_first, A.tables * A.pe_rows * a->D,
                     stx__attn_add_dpe_part, &j);
    }
    stx__attn_add_copies(x, a->dpersistent_k, w.dpk, w.dpk_size, w.owners);
    stx__attn_add_copies(x, a->dpersistent_v, w.dpv, w.dpk_size, w.owners);
    stx__attn_add_units(a, &w);
}
