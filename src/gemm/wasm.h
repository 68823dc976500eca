#pragma once
#include "../api/config.h"
#include "../api/context.h"
#include "../api/ops.h"
#include "../core/loops.h"
#include "micro.h"
#include "blocked.h"
#include "gemv.h"


// >>gemm: wasm

/* WebAssembly's 128-bit SIMD has no fused multiply-add, so these functions exist only
   with SEQTX_UNFUSED. They compute the same bits as the portable ones, and training steps
   of the page's medium models are 1.26 to 1.45 times as fast. The gains noted below are
   parts of that, in training steps of the four families. */
#if defined(__wasm_simd128__) && defined(SEQTX_UNFUSED) && !defined(SEQTX_DOUBLE)
  #define STX__WASM 1
  #include <wasm_simd128.h>

STX_INNER v128_t stx__wasm_fma(v128_t a, v128_t b, v128_t c) {
    return wasm_f32x4_add(wasm_f32x4_mul(a, b), c);
}

/* The micro-kernel, 4 x 8: row i of the tile is s[i], two vectors. A tile of six rows
   does not fit in the 16 registers of x86-64. Gain: 1.15 to 1.18, because clang keeps the
   tile of the portable micro-kernel in memory before and after its loop. */
STX_INNER void stx__wasm_zero(size_t i, v128_t (*s)[2]) {
    s[i][0] = s[i][1] = wasm_f32x4_const(0, 0, 0, 0);
}

STX_INNER void stx__wasm_step(size_t i, v128_t (*s)[2], const float *a, size_t rs, v128_t b0,
                              v128_t b1) {
    const v128_t v = wasm_v128_load32_splat(a + i * rs);
    s[i][0] = stx__wasm_fma(v, b0, s[i][0]);
    s[i][1] = stx__wasm_fma(v, b1, s[i][1]);
}

STX_INNER void stx__wasm_add(size_t i, v128_t (*s)[2], const float *c, size_t ldc) {
    s[i][0] = wasm_f32x4_add(wasm_v128_load(c + i * ldc), s[i][0]);
    s[i][1] = wasm_f32x4_add(wasm_v128_load(c + i * ldc + 4), s[i][1]);
}

STX_INNER void stx__wasm_store(size_t i, v128_t (*s)[2], float *c, size_t ldc) {
    wasm_v128_store(c + i * ldc, s[i][0]);
    wasm_v128_store(c + i * ldc + 4, s[i][1]);
}

STX_INNER void stx__micro_wasm_rows(size_t n, size_t steps, const float *a, size_t rs, size_t ks,
                                    const float *b, size_t ldb, float *c, size_t ldc, int add) {
    v128_t s[6][2];     /* n <= 4; STX__UNROLL6 names six */
    STX__UNROLL6(n, stx__wasm_zero, s);
    for (; steps; steps--, b += ldb, a += ks) {
        const v128_t b0 = wasm_v128_load(b), b1 = wasm_v128_load(b + 4);
        STX__UNROLL6(n, stx__wasm_step, s, a, rs, b0, b1);
    }
    if (add) STX__UNROLL6(n, stx__wasm_add, s, c, ldc);
    STX__UNROLL6(n, stx__wasm_store, s, c, ldc);
}

static void stx__micro_wasm_run(STX__MICRO_PARAMS) {
    const float *a = (const float *)av, *b = (const float *)bv;
    switch (h) {
    case 1: stx__micro_wasm_rows(1, steps, a, rs, ks, b, ldb, c, ldc, add); break;
    case 2: stx__micro_wasm_rows(2, steps, a, rs, ks, b, ldb, c, ldc, add); break;
    case 3: stx__micro_wasm_rows(3, steps, a, rs, ks, b, ldb, c, ldc, add); break;
    default: stx__micro_wasm_rows(4, steps, a, rs, ks, b, ldb, c, ldc, add);
    }
}

/* Implements stx__micro.pack_strips. Gain: 1.05 to 1.14, because the portable function
   calls memcpy for every 32 bytes. */
static void stx__pack_strips_wasm(float *to, size_t stride, const float *B, size_t ldb, size_t k,
                                  size_t n) {
    size_t p, j, e;
    for (p = 0; p < k; p++, B += ldb, to += 8) {
        float *t = to;
        for (j = 0; j + 8 <= n; j += 8, t += stride) {
            wasm_v128_store(t, wasm_v128_load(B + j));
            wasm_v128_store(t + 4, wasm_v128_load(B + j + 4));
        }
        if (j < n)
            for (e = 0; e < 8; e++) t[e] = j + e < n ? B[j + e] : 0;
    }
}

/* Implements stx__micro.pack_at. Gain: 1.03 to 1.05. */
static void stx__pack_at_wasm(float *to, const float *A, size_t lda, size_t m, size_t k) {
    size_t i, e, p;
    for (i = 0; i < m; i += 4)
        for (p = 0; p < k; p++, to += 4) {
            const float *a = A + p * lda + i;
            if (i + 4 <= m)
                wasm_v128_store(to, wasm_v128_load(a));
            else
                for (e = 0; i + e < m; e++) to[e] = a[e];
        }
}

/* The sum of 16 lanes, in the order of stx_fast_lanes. */
STX_INNER float stx__wasm_lanes(const v128_t *s) {
    v128_t v = wasm_f32x4_add(wasm_f32x4_add(s[0], s[2]), wasm_f32x4_add(s[1], s[3]));
    v = wasm_f32x4_add(v, wasm_i32x4_shuffle(v, v, 2, 3, 2, 3));
    return wasm_f32x4_extract_lane(v, 0) + wasm_f32x4_extract_lane(v, 1);
}

/* Adds 16 products of a with b0 to the lanes s0, and with b1 to s1. */
STX_INNER void stx__wasm_dot_step(v128_t *s0, v128_t *s1, const float *a, const float *b0,
                                  const float *b1) {
    size_t e;
    for (e = 0; e < 4; e++) {
        const v128_t v = wasm_v128_load(a + 4 * e);
        s0[e] = stx__wasm_fma(v, wasm_v128_load(b0 + 4 * e), s0[e]);
        s1[e] = stx__wasm_fma(v, wasm_v128_load(b1 + 4 * e), s1[e]);
    }
}

/* sum[0] = a . b0, sum[1] = a . b1 */
static void stx__wasm_dots(float *sum, const float *a, const float *b0, const float *b1,
                           size_t k) {
    v128_t s0[4], s1[4];
    float last[3][16];
    size_t p;
    memset(s0, 0, sizeof s0);
    memset(s1, 0, sizeof s1);
    for (p = 0; p + 16 <= k; p += 16) stx__wasm_dot_step(s0, s1, a + p, b0 + p, b1 + p);
    if (p < k) {
        memset(last, 0, sizeof last);
        memcpy(last[0], a + p, (k - p) * sizeof *a);
        memcpy(last[1], b0 + p, (k - p) * sizeof *a);
        memcpy(last[2], b1 + p, (k - p) * sizeof *a);
        stx__wasm_dot_step(s0, s1, last[0], last[1], last[2]);
    }
    sum[0] = stx__wasm_lanes(s0);
    sum[1] = stx__wasm_lanes(s1);
}

/* Implements stx__micro.skinny, two rows of B at a time. Gain: 1.02 to 1.09, because
   clang uses two lanes for half of the products of stx__dot4. */
static void stx__skinny_wasm(const stx_gemm_args *g, stx_real *scratch) {
    const size_t kc = stx__equal_blocks(g->K, STX__SKINNY_K, 16);
    size_t p, i, j;
    (void)scratch;
    stx__gemm_scale_c(g);
    for (p = 0; p < g->K; p += kc)
        for (j = 0; j < g->N; j += 2) {
            const float *b0 = g->B + j * g->ldb + p, *b1 = j + 1 < g->N ? b0 + g->ldb : b0;
            for (i = 0; i < g->M; i++) {
                float *c = g->C + i * g->ldc + j, sum[2];
                stx__wasm_dots(sum, g->A + i * g->lda + p, b0, b1, STX_MIN(kc, g->K - p));
                c[0] += sum[0];
                if (j + 1 < g->N) c[1] += sum[1];
            }
        }
}

static const stx__micro stx__micro_wasm = {
    "simd128", 4, 8, 1, stx__micro_wasm_run,    /* name, MR, NR, KR, run */
    NULL, NULL,                                 /* to_bf16, pair */
    NULL, NULL,                                 /* enter, leave */
    NULL,                                       /* transpose */
    stx__pack_at_wasm,                          /* pack_at */
    stx__pack_strips_wasm,                      /* pack_strips */
    stx__skinny_wasm                            /* skinny */
};
#endif
