#pragma once
#include "../api/config.h"
#include "../api/context.h"
#include "../api/attention.h"
#include "../core/loops.h"
#include "../core/platform.h"
#include "../core/tensors.h"
#include "attention.h"


// >>attention: plain definition

/* The attention formulas for one head of one batch row, that is, for D channels of q,
   k, v and y. They extend the formulas in >>api: attention with dropout and all special
   cases. There are S keys: those in the cached rows, if any, followed by those in the
   block. Query i = 0 .. T-1 is at the position of key S - T + i. Its distance to key j,
   and the row of pe for that distance, are

       delta = S - T + i - j
       p     = P - 1 + delta_min - delta

       s_ij = scale ((q_i + content_bias) . k_j + (q_i + position_bias) . pe_p)
       m_ij = clamp((span_fraction max_span + ramp + 1 - delta) / ramp, 0, 1)
       a_ij = m_ij e^s_ij / (sum_j m_ij e^s_ij + eps sum_j e^s_ij)
       y_i  = sum_j r_ij a_ij v_j

   r is the dropout factor: 0 or 1 / (1 - dropout), where 1 - dropout is rounded to a
   multiple of 2^-16, or always 1 without dropout. Missing biases are 0. Without pe, the
   second term of s is omitted. Without span_fraction, m = 1. With no_renorm,

       a_ij = m_ij e^s_ij / sum_j e^s_ij

   Query i sees the following keys, over which the sums run:

       keys j = 0 .. S-1    if j >= first_key, pad[j] = 0 and delta_min <= delta <= span;
                            with not_causal, at any delta
       keys j = -1, -2, ..  down to first_key, if it is negative, and delta <= span: zero
                            keys, with k_j = v_j = 0. The pe term of s_ij remains
       n = 0 .. N-1         persistent vectors: key sqrt(D) persistent_k_n, value sqrt(N)
                            persistent_v_n, with m = 1, no biases and no position:
                            s_in = scale sqrt(D) q_i . persistent_k_n

   Keys with m = 0 are not seen, except with eps > 0 or no_renorm, when they contribute
   to the denominator. A query that sees no key has y = 0.

   The functions below evaluate these formulas directly, in double precision. The
   kernels compute the same results without ever storing a whole row of scores. */
STX_DEF size_t stx_attention_keys(const stx_attention_args *a) {
    return a->S + a->N + stx__zero_keys(a->first_key);
}

/* Returns (q + bias) . k over D channels. bias may be NULL. */
static double stx__attn_plain_dot(const stx_real *q, const stx_real *bias, const stx_real *k,
                                  size_t D) {
    double s = 0;
    size_t d;
    for (d = 0; d < D; d++) s += ((double)q[d] + (bias ? (double)bias[d] : 0)) * (double)k[d];
    return s;
}

static double stx__attn_plain_clamp(double m) {
    if (m < 0) return 0;
    return m > 1 ? 1 : m;
}

/* Returns s_ij / scale for key j, which may be negative, at distance delta. */
static double stx__attn_plain_score(const stx_attention_args *a, const stx__kv_rows *keys,
                                    const stx_real *q, size_t h, ptrdiff_t j, ptrdiff_t delta) {
    const size_t D = a->D;
    const stx_real *content_bias = a->content_bias ? a->content_bias + h * D : NULL;
    const stx_real *position_bias = a->position_bias ? a->position_bias + h * D : NULL;
    const stx_real *k = j < 0 ? NULL : stx__kv_row(keys, j);
    double s = k ? stx__attn_plain_dot(q, content_bias, k, D) : 0;
    if (a->P) {
        size_t p = (size_t)((ptrdiff_t)a->P - 1 + a->delta_min - delta);
        const stx_real *pe = a->pe + (a->pe_heads > 1 ? p * a->H + h : p) * D;
        s += stx__attn_plain_dot(q, position_bias, pe, D);
    }
    return s;
}

STX_DEF void stx_attention_weights(const stx_attention_args *a, size_t b, size_t h, size_t i,
                                   double *w, double *raw_m) {
    STX__FP_SCOPE;
    const size_t D = a->D, keys = stx_attention_keys(a), zero = stx__zero_keys(a->first_key);
    const size_t persistent = zero + a->S; /* index n of the first persistent vector */
    const stx_real *q = a->q + b * a->q_batch_stride + i * a->q_row_stride + h * D;
    const stx__kv_rows rows = stx__key_rows(a, b, h);
    double span = 0, max = -HUGE_VAL, norm = 0;
    size_t n;
    if (a->span_fraction)
        span = (double)stx__attn_span_fraction(a, h) * (double)a->max_span;

    for (n = 0; n < keys; n++) {
        const ptrdiff_t j = (ptrdiff_t)(n - zero), delta = (ptrdiff_t)(a->S - a->T + i) - j;
        w[n] = -HUGE_VAL;
        raw_m[n] = 2;
        if (n >= persistent) {
            const stx_real *pk = a->persistent_k + (h * a->N + n - persistent) * D;
            w[n] = (double)a->scale * (sqrt((double)D) * stx__attn_plain_dot(q, NULL, pk, D));
        } else {
            if (j < a->first_key) continue;
            if (j >= 0 && a->pad && a->pad[b * a->pad_batch_stride + (size_t)j]) continue;
            if (!a->not_causal && (delta < a->delta_min || delta > (ptrdiff_t)a->span)) continue;
            if (a->span_fraction)
                raw_m[n] = (span + (double)a->ramp + 1 - (double)delta) / (double)a->ramp;
            /* If m < 0 before clamping, the score must not enter the maximum, because
               it can be far larger than the others. A key with raw_m = 0 exactly is
               kept, although it is not seen, because dspan_fraction needs its w. The
               kernels also omit this key from the maximum. */
            if (raw_m[n] < 0 && !(a->eps > 0) && !a->no_renorm) continue;
            w[n] = (double)a->scale * stx__attn_plain_score(a, &rows, q, h, j, delta);
        }
        if (w[n] > max) max = w[n];
    }

    for (n = 0; n < keys; n++) {
        w[n] = w[n] > -HUGE_VAL ? exp(w[n] - max) : 0;
        norm += (a->no_renorm ? 1 : stx__attn_plain_clamp(raw_m[n]) + (double)a->eps) * w[n];
    }
    for (n = 0; n < keys; n++) w[n] = norm > 0 ? w[n] / norm : 0;
}

/* Converts the softmax w and raw_m from stx_attention_weights to the weights r_ij a_ij,
   which replace w. `row` is the index of the query's row in (B,H,T). Each weight uses
   16 random bits; see stx__attn_philox_calls. */
static void stx__attn_plain_mask(const stx_attention_args *a, size_t row, double *w,
                                 const double *raw_m) {
    const size_t keys = stx_attention_keys(a), zero = stx__zero_keys(a->first_key);
    const uint32_t keep = stx__keep16(a->drop);
    const uint64_t first = a->rng_first + row * stx__attn_philox_calls(a);
    uint32_t bits[4];
    size_t n;
    for (n = 0; n < keys; n++) {
        const size_t at = a->span + n - zero;
        w[n] *= stx__attn_plain_clamp(raw_m[n]);
        if (!(a->drop > 0) || !(w[n] > 0)) continue;
        stx_philox(a->seed, a->stream, first + at / 8, bits);
        /* weight `at` uses half at % 2, low or high, of word at % 8 / 2 */
        w[n] *= (bits[at % 8 / 2] >> at % 2 * 16 & 0xffffu) < keep ? 65536.0 / keep : 0;
    }
}

STX_DEF void stx_attention_plain(const stx_attention_args *a, double *work) {
    STX__FP_SCOPE;
    const size_t keys = stx_attention_keys(a), zero = stx__zero_keys(a->first_key), D = a->D;
    const size_t persistent = zero + a->S;
    double *w = work, *raw_m = work + keys;
    size_t row, n, d;
    for (row = 0; row < a->B * a->H * a->T; row++) {
        const size_t b = row / (a->H * a->T), h = row / a->T % a->H, i = row % a->T;
        const stx__kv_rows values = stx__value_rows(a, b, h);
        stx_attention_weights(a, b, h, i, w, raw_m);
        stx__attn_plain_mask(a, row, w, raw_m);
        for (d = 0; d < D; d++) {
            double y = 0; /* the loop starts at key 0, because zero keys have value 0 */
            for (n = zero; n < persistent; n++) {
                /* the value of a key that is padded or before first_key may be NaN */
                const stx_real *v = w[n] > 0 ? stx__kv_row(&values, (ptrdiff_t)(n - zero)) : NULL;
                if (v) y += w[n] * (double)v[d];
            }
            for (; n < keys; n++) {
                const stx_real *pv = a->persistent_v + (h * a->N + n - persistent) * D;
                y += w[n] * sqrt((double)a->N) * (double)pv[d];
            }
            a->y[((b * a->T + i) * a->H + h) * D + d] = (stx_real)y;
        }
    }
}
