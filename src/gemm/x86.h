#pragma once
#include "../api/config.h"
#include "../api/context.h"
#include "../api/ops.h"
#include "../core/loops.h"
#include "../core/platform.h"
#include "micro.h"
#include "blocked.h"
#include "gemv.h"


// >>gemm: x86

#if (defined(STX__X86) || defined(STX__NEON)) && !defined(SEQTX_DOUBLE)

  /* Macros for this section and the next one. STX__INLINE_FOR("avx2") begins the
     definition of a function that is inlined into functions for that instruction set. */
  #define STX__INLINE_FOR(isa) __attribute__((STX__TARGET(isa), always_inline)) static inline
  #if defined(STX__X86) || defined(__clang__)
    #define STX__TARGET(isa) target(isa)
  #else
    #define STX__TARGET(isa) target("+" isa)
  #endif

  /* These macros define one micro-kernel per height, so that no row is computed
     needlessly, and the function for stx__micro.run, which calls the micro-kernel for
     height h. Each micro-kernel inlines fn_rows with a constant height n. A and B are
     the element types of its inputs av and bv. STX__MICRO_HEIGHT(3, ..) expands to

         static void fn_3(STX__MICRO_PARAMS) { fn_rows(3, steps, (const A *)av, ..); } */
  #define STX__MICRO_HEIGHT(n, fn, isa, A, B) \
    __attribute__((STX__TARGET(isa))) static void fn##_##n(STX__MICRO_PARAMS) { \
      (void)h; \
      fn##_rows(n, steps, (const A *)av, rs, ks, (const B *)bv, ldb, c, ldc, add); \
    }
  #define STX__MICRO_HEIGHTS6(fn, isa, A, B) \
    STX__MICRO_HEIGHT(1, fn, isa, A, B) \
    STX__MICRO_HEIGHT(2, fn, isa, A, B) \
    STX__MICRO_HEIGHT(3, fn, isa, A, B) \
    STX__MICRO_HEIGHT(4, fn, isa, A, B) \
    STX__MICRO_HEIGHT(5, fn, isa, A, B) \
    STX__MICRO_HEIGHT(6, fn, isa, A, B)
  #define STX__MICRO_RUN6(fn, isa, A, B) \
    STX__MICRO_HEIGHTS6(fn, isa, A, B) \
    static void fn##_run(STX__MICRO_PARAMS) { \
      static void (*const height[6])(STX__MICRO_PARAMS) = {fn##_1, fn##_2, fn##_3, \
                                                           fn##_4, fn##_5, fn##_6}; \
      height[h - 1](h, steps, av, rs, ks, bv, ldb, c, ldc, add); \
    }
#endif

#if defined(STX__X86) && defined(SEQTX_DOUBLE)

/* In double, the portable micro-kernel, compiled for AVX2 and AVX-512. */
static const stx__micro stx__micro_avx2 =
    STX__MICRO("avx2", 4, 8, 1, stx__micro_plain_avx2, NULL, NULL);
static const stx__micro stx__micro_avx512 =
    STX__MICRO("avx512", 4, 8, 1, stx__micro_plain_avx512, NULL, NULL);

#elif defined(STX__X86)

/* The portable bf16 micro-kernel, compiled for AVX2 and AVX-512 processors without bf16
   instructions. */
static const stx__micro stx__micro_generic_bf16_avx2 =
    STX__MICRO("avx2, bf16 by float", 4, 16, 2, stx__micro_pairs_avx2, stx__round_row_avx2,
               stx__pair_rows_avx2);
static const stx__micro stx__micro_generic_bf16_avx512 =
    STX__MICRO("avx512, bf16 by float", 4, 16, 2, stx__micro_pairs_avx512, stx__round_row_avx512,
               stx__pair_rows_avx512);

/* The AVX2 micro-kernel, 6 x 16: row i of the tile is s[i], two vectors of 8 elements.
   r[q] points at row 3 q of op(A). With rs and 2 rs as index registers, each pointer
   reaches three rows, so two pointers reach all six. */
STX__INLINE_FOR("avx2,fma") void stx__avx2_zero(size_t i, __m256 (*s)[2]) {
    s[i][0] = s[i][1] = _mm256_setzero_ps();
}

STX__INLINE_FOR("avx2,fma")
void stx__avx2_step(size_t i, __m256 (*s)[2], const float *const *r, size_t rs, __m256 b0,
                    __m256 b1) {
    __m256 a = _mm256_set1_ps(r[i / 3][i % 3 * rs]);
    s[i][0] = _mm256_fmadd_ps(a, b0, s[i][0]);
    s[i][1] = _mm256_fmadd_ps(a, b1, s[i][1]);
}

STX__INLINE_FOR("avx2,fma")
void stx__avx2_add(size_t i, __m256 (*s)[2], const float *c, size_t ldc) {
    s[i][0] = _mm256_add_ps(_mm256_loadu_ps(c + i * ldc), s[i][0]);
    s[i][1] = _mm256_add_ps(_mm256_loadu_ps(c + i * ldc + 8), s[i][1]);
}

STX__INLINE_FOR("avx2,fma") void stx__avx2_store(size_t i, __m256 (*s)[2], float *c, size_t ldc) {
    _mm256_storeu_ps(c + i * ldc, s[i][0]);
    _mm256_storeu_ps(c + i * ldc + 8, s[i][1]);
}

STX__INLINE_FOR("avx2,fma")
void stx__micro_avx2_rows(size_t n, size_t steps, const float *a, size_t rs, size_t ks,
                          const float *b, size_t ldb, float *c, size_t ldc, int add) {
    const float *r[2];
    __m256 s[6][2];
    r[0] = a;
    r[1] = a + 3 * rs;
    STX__UNROLL6(n, stx__avx2_zero, s);
    for (; steps; steps--, b += ldb, r[0] += ks, r[1] += ks) {
        __m256 b0 = _mm256_loadu_ps(b), b1 = _mm256_loadu_ps(b + 8);
        STX__UNROLL6(n, stx__avx2_step, s, r, rs, b0, b1);
    }
    if (add) STX__UNROLL6(n, stx__avx2_add, s, c, ldc);
    STX__UNROLL6(n, stx__avx2_store, s, c, ldc);
}

STX__MICRO_RUN6(stx__micro_avx2, "avx2,fma", float, float)

static const stx__micro stx__micro_avx2 =
    STX__MICRO("avx2", 6, 16, 1, stx__micro_avx2_run, NULL, NULL);

  #define STX__MICRO_RUN14(fn, isa, A, B) \
    STX__MICRO_HEIGHTS6(fn, isa, A, B) \
    STX__MICRO_HEIGHT(7, fn, isa, A, B) \
    STX__MICRO_HEIGHT(8, fn, isa, A, B) \
    STX__MICRO_HEIGHT(9, fn, isa, A, B) \
    STX__MICRO_HEIGHT(10, fn, isa, A, B) \
    STX__MICRO_HEIGHT(11, fn, isa, A, B) \
    STX__MICRO_HEIGHT(12, fn, isa, A, B) \
    STX__MICRO_HEIGHT(13, fn, isa, A, B) \
    STX__MICRO_HEIGHT(14, fn, isa, A, B) \
    static void fn##_run(STX__MICRO_PARAMS) { \
      static void (*const height[14])(STX__MICRO_PARAMS) = { \
          fn##_1, fn##_2, fn##_3,  fn##_4,  fn##_5,  fn##_6,  fn##_7, \
          fn##_8, fn##_9, fn##_10, fn##_11, fn##_12, fn##_13, fn##_14}; \
      height[h - 1](h, steps, av, rs, ks, bv, ldb, c, ldc, add); \
    }

/* The AVX-512 micro-kernel, 14 x 32: row i of the tile is s[i], two vectors of 16
   elements. As in the AVX2 kernel, each pointer reaches three rows of op(A), so five
   pointers reach all fourteen. This kernel is for f32; the one for bf16 is below. */
STX__INLINE_FOR("avx512f") void stx__avx512_zero(size_t i, __m512 (*s)[2]) {
    s[i][0] = s[i][1] = _mm512_setzero_ps();
}

STX__INLINE_FOR("avx512f")
void stx__avx512_step(size_t i, __m512 (*s)[2], const float *const *r, size_t rs, __m512 b0,
                      __m512 b1) {
    __m512 a = _mm512_set1_ps(r[i / 3][i % 3 * rs]);
    s[i][0] = _mm512_fmadd_ps(a, b0, s[i][0]);
    s[i][1] = _mm512_fmadd_ps(a, b1, s[i][1]);
}

STX__INLINE_FOR("avx512f")
void stx__avx512_add(size_t i, __m512 (*s)[2], const float *c, size_t ldc) {
    s[i][0] = _mm512_add_ps(_mm512_loadu_ps(c + i * ldc), s[i][0]);
    s[i][1] = _mm512_add_ps(_mm512_loadu_ps(c + i * ldc + 16), s[i][1]);
}

STX__INLINE_FOR("avx512f") void stx__avx512_store(size_t i, __m512 (*s)[2], float *c, size_t ldc) {
    _mm512_storeu_ps(c + i * ldc, s[i][0]);
    _mm512_storeu_ps(c + i * ldc + 16, s[i][1]);
}

/* The rows of C are prefetched into L1 from this many steps before the end of a tile,
   one row every two steps. Prefetching all rows together would delay the loads of
   op(B), and rows prefetched at the beginning of the tile would be evicted before its
   end. This prefetch saves 5 % of the matmul time of a training step, more than any
   other. */
enum { STX__C_AHEAD = 80 };

STX__INLINE_FOR("avx512f") void stx__prefetch_c(const float *c) {
    _mm_prefetch((const char *)c, _MM_HINT_T0);
    _mm_prefetch((const char *)(c + 16), _MM_HINT_T0);
    _mm_prefetch((const char *)(c + 31), _MM_HINT_T0);
}

/* Computes steps p .. end-1 of a tile. */
STX__INLINE_FOR("avx512f")
void stx__avx512_steps(size_t n, size_t p, size_t end, __m512 (*s)[2], const float **r, size_t rs,
                       size_t ks, const float *b, size_t ldb) {
    for (b += p * ldb; p < end; p++, b += ldb) {
        __m512 b0 = _mm512_loadu_ps(b), b1 = _mm512_loadu_ps(b + 16);
        STX__UNROLL14(n, stx__avx512_step, s, r, rs, b0, b1);
        r[0] += ks;
        r[1] += ks;
        r[2] += ks;
        r[3] += ks;
        r[4] += ks;
    }
}

STX__INLINE_FOR("avx512f")
void stx__micro_avx512_rows(size_t n, size_t steps, const float *a, size_t rs, size_t ks,
                            const float *b, size_t ldb, float *c, size_t ldc, int add) {
    const float *r[5];
    __m512 s[14][2];
    size_t p = steps > STX__C_AHEAD ? steps - STX__C_AHEAD : 0, i;
    r[0] = a;
    r[1] = a + 3 * rs;
    r[2] = a + 6 * rs;
    r[3] = a + 9 * rs;
    r[4] = a + 12 * rs;
    STX__UNROLL14(n, stx__avx512_zero, s);
    stx__avx512_steps(n, 0, p, s, r, rs, ks, b, ldb);
    for (i = 0; i < n && steps >= 2 * n; i++, p += 2) {
        stx__prefetch_c(c + i * ldc);
        stx__avx512_steps(n, p, p + 2, s, r, rs, ks, b, ldb);
    }
    stx__avx512_steps(n, p, steps, s, r, rs, ks, b, ldb);
    if (add) STX__UNROLL14(n, stx__avx512_add, s, c, ldc);
    STX__UNROLL14(n, stx__avx512_store, s, c, ldc);
}

STX__MICRO_RUN14(stx__micro_avx512, "avx512f", float, float)

/* Transposes 16 rows of 16 units. (The all-ones masks here and below avoid a warning:
   gcc implements its unmasked shuffles with an undefined vector.) */
STX__INLINE_FOR("avx512f") void stx__transpose16(__m512i *z) {
    __m512i t[16];
    size_t q, c;
    for (q = 0; q < 16; q += 2) {
        t[q] = _mm512_maskz_unpacklo_epi32(0xffff, z[q], z[q + 1]);
        t[q + 1] = _mm512_maskz_unpackhi_epi32(0xffff, z[q], z[q + 1]);
    }
    for (q = 0; q < 16; q += 4) /* 128-bit lane L of z[q + c] is column 4 L + c of four rows */
        for (c = 0; c < 2; c++) {
            z[q + 2 * c] = _mm512_maskz_unpacklo_epi64(0xff, t[q + c], t[q + 2 + c]);
            z[q + 2 * c + 1] = _mm512_maskz_unpackhi_epi64(0xff, t[q + c], t[q + 2 + c]);
        }
    for (c = 0; c < 4; c++) { /* t[4 L + c] is column 4 L + c */
        __m512i even0 = _mm512_maskz_shuffle_i32x4(0xffff, z[c], z[4 + c], 0x88);
        __m512i odd0 = _mm512_maskz_shuffle_i32x4(0xffff, z[c], z[4 + c], 0xdd);
        __m512i even1 = _mm512_maskz_shuffle_i32x4(0xffff, z[8 + c], z[12 + c], 0x88);
        __m512i odd1 = _mm512_maskz_shuffle_i32x4(0xffff, z[8 + c], z[12 + c], 0xdd);
        t[c] = _mm512_maskz_shuffle_i32x4(0xffff, even0, even1, 0x88);
        t[4 + c] = _mm512_maskz_shuffle_i32x4(0xffff, odd0, odd1, 0x88);
        t[8 + c] = _mm512_maskz_shuffle_i32x4(0xffff, even0, even1, 0xdd);
        t[12 + c] = _mm512_maskz_shuffle_i32x4(0xffff, odd0, odd1, 0xdd);
    }
    for (q = 0; q < 16; q++) z[q] = t[q];
}

/* Transposes 16 rows of 4 floats to 4 rows of 16 floats with a stride of 32 floats.
   This takes fewer shuffles per element than stx__transpose16. */
STX__INLINE_FOR("avx512f,avx512dq")
void stx__transpose16x4(float *to, const float *b, size_t ldb) {
    __m512 z[4], lo0, lo1, hi0, hi1;
    size_t i;
    for (i = 0; i < 4; i++) { /* place rows i, i+4, i+8 and i+12 side by side */
        __m256 lo = _mm256_castps128_ps256(_mm_loadu_ps(b + i * ldb));
        __m256 hi = _mm256_castps128_ps256(_mm_loadu_ps(b + (i + 8) * ldb));
        lo = _mm256_insertf128_ps(lo, _mm_loadu_ps(b + (i + 4) * ldb), 1);
        hi = _mm256_insertf128_ps(hi, _mm_loadu_ps(b + (i + 12) * ldb), 1);
        z[i] = _mm512_insertf32x8(_mm512_castps256_ps512(lo), hi, 1);
    }
    lo0 = _mm512_maskz_unpacklo_ps(0xffff, z[0], z[1]);
    hi0 = _mm512_maskz_unpackhi_ps(0xffff, z[0], z[1]);
    lo1 = _mm512_maskz_unpacklo_ps(0xffff, z[2], z[3]);
    hi1 = _mm512_maskz_unpackhi_ps(0xffff, z[2], z[3]);
    _mm512_storeu_pd(to, _mm512_maskz_unpacklo_pd(0xff, _mm512_castps_pd(lo0),
                                                  _mm512_castps_pd(lo1)));
    _mm512_storeu_pd(to + 32, _mm512_maskz_unpackhi_pd(0xff, _mm512_castps_pd(lo0),
                                                       _mm512_castps_pd(lo1)));
    _mm512_storeu_pd(to + 64, _mm512_maskz_unpacklo_pd(0xff, _mm512_castps_pd(hi0),
                                                       _mm512_castps_pd(hi1)));
    _mm512_storeu_pd(to + 96, _mm512_maskz_unpackhi_pd(0xff, _mm512_castps_pd(hi0),
                                                       _mm512_castps_pd(hi1)));
}

/* Implements stx__micro.transpose. */
STX__AVX512 static void stx__transpose_avx512(float *to, const float *B, size_t ldb, size_t n,
                                              size_t k) {
    size_t half, p, i;
    for (half = 0; half < 32; half += 16) {
        const size_t rows = n > half ? STX_MIN((size_t)16, n - half) : 0;
        const float *b = B + half * ldb;
        for (p = 0; rows == 16 && p + 4 <= k; p += 4)
            stx__transpose16x4(to + p * 32 + half, b + p, ldb);
        for (; p < k; p += 16) {
            const size_t cols = STX_MIN((size_t)16, k - p);
            const __mmask16 mask = (__mmask16)((1u << cols) - 1);
            __m512i z[16];
            for (i = 0; i < 16; i++)
                z[i] = i < rows ? _mm512_maskz_loadu_epi32(mask, b + i * ldb + p)
                                : _mm512_setzero_si512();
            stx__transpose16(z);
            for (i = 0; i < cols; i++) _mm512_storeu_si512(to + (p + i) * 32 + half, z[i]);
        }
    }
}

/* Returns a mask that selects the first n of 16 elements. */
STX__INLINE_FOR("avx512f") __mmask16 stx__first16(size_t n) {
    return (__mmask16)(n < 16 ? (1u << n) - 1 : 0xffff);
}

/* Implements stx__micro.pack_at. */
STX__AVX512 static void stx__pack_at_avx512(float *to, const float *A, size_t lda, size_t m,
                                            size_t k) {
    size_t i, p;
    for (p = 0; p < k; p++) {
        if (p + STX__PACK_AHEAD < k) stx_prefetch(A + (p + STX__PACK_AHEAD) * lda, m);
        for (i = 0; i < m; i += 14) {
            const __mmask16 mask = stx__first16(STX_MIN((size_t)14, m - i));
            _mm512_mask_storeu_ps(to + i * k + p * 14, mask,
                                  _mm512_maskz_loadu_ps(mask, A + p * lda + i));
        }
    }
}

/* Implements stx__micro.pack_strips, eight rows at a time. Each row is spread over all
   strips, so packing whole rows one by one would write to so many distant cache lines
   that they may not fit in L1. */
STX__AVX512 static void stx__pack_strips_avx512(float *to, size_t stride, const float *B,
                                                size_t ldb, size_t k, size_t n) {
    size_t p0, p, j;
    for (p0 = 0; p0 < k; p0 += 8)
        for (j = 0; j < n; j += 32) {
            const size_t w = STX_MIN((size_t)32, n - j), end = STX_MIN(p0 + 8, k);
            const __mmask16 m0 = stx__first16(w), m1 = stx__first16(w > 16 ? w - 16 : 0);
            float *t = to + j / 32 * stride;
            for (p = p0; p < end; p++) {
                const float *b = B + p * ldb + j;
                if (p + 8 < k) stx_prefetch(b + 8 * ldb, w);
                _mm512_storeu_ps(t + p * 32, _mm512_maskz_loadu_ps(m0, b));
                _mm512_storeu_ps(t + p * 32 + 16, _mm512_maskz_loadu_ps(m1, b + 16));
            }
        }
}

/* The path STX__GEMM_SKINNY computes C = A B^T, where A is x and B is W. Each of the 16
   lanes of a register adds up every 16th product along k (in bf16, the products of every
   16th unit). A tile combines n rows of x with w rows of W: in f32, n is 4 to 7
   and w is 4; in bf16, n is 4 to 7 and w is 4, or n is 8 to 14 and w is 2. The lanes
   are added up at the end of the tile.

   x is copied (and, in bf16, rounded), so that its rows do not compete for the same L1
   cache sets. K is split so that L1 holds the rows of a tile, and W is processed in
   blocks that stay in L2 for all tiles. */
  #define STX__SKINNY_PARAMS \
    const void *av, size_t rs, const float *b, size_t ldb, size_t k, float *c, size_t ldc, \
        size_t cols, int add

STX__INLINE_FOR("avx512f") void stx__skinny_zero(size_t i, __m512 (*s)[4], size_t w) {
    s[i][0] = s[i][1] = _mm512_setzero_ps();
    if (w > 2) s[i][2] = s[i][3] = _mm512_setzero_ps();
}

STX__INLINE_FOR("avx512f")
void stx__skinny_step(size_t i, __m512 (*s)[4], const float *const *r, size_t rs, const __m512 *b,
                      __mmask16 mask) {
    __m512 a = _mm512_maskz_loadu_ps(mask, r[i / 3] + i % 3 * rs);
    /* without this statement, gcc reloads `a` for each multiplication, which is slower */
    __asm__("" : "+v"(a));
    s[i][0] = _mm512_fmadd_ps(a, b[0], s[i][0]);
    s[i][1] = _mm512_fmadd_ps(a, b[1], s[i][1]);
    s[i][2] = _mm512_fmadd_ps(a, b[2], s[i][2]);
    s[i][3] = _mm512_fmadd_ps(a, b[3], s[i][3]);
}

/* Returns, in each 128-bit lane, the sums of the lane's four elements of a, b, c and
   d. */
STX__INLINE_FOR("avx512f") __m512 stx__skinny_add4(__m512 a, __m512 b, __m512 c, __m512 d) {
    __m512d t = _mm512_castps_pd(_mm512_add_ps(_mm512_maskz_unpacklo_ps(0xffff, a, b),
                                               _mm512_maskz_unpackhi_ps(0xffff, a, b)));
    __m512d u = _mm512_castps_pd(_mm512_add_ps(_mm512_maskz_unpacklo_ps(0xffff, c, d),
                                               _mm512_maskz_unpackhi_ps(0xffff, c, d)));
    return _mm512_add_ps(_mm512_castpd_ps(_mm512_maskz_unpacklo_pd(0xff, t, u)),
                         _mm512_castpd_ps(_mm512_maskz_unpackhi_pd(0xff, t, u)));
}

/* Returns, in four 128-bit lanes, the sums of the four 128-bit lanes of a, b, c and d. */
STX__INLINE_FOR("avx512f") __m512 stx__skinny_halve2(__m512 a, __m512 b, __m512 c, __m512 d) {
    __m512 t = _mm512_add_ps(_mm512_maskz_shuffle_f32x4(0xffff, a, b, 0x44),
                             _mm512_maskz_shuffle_f32x4(0xffff, a, b, 0xee));
    __m512 u = _mm512_add_ps(_mm512_maskz_shuffle_f32x4(0xffff, c, d, 0x44),
                             _mm512_maskz_shuffle_f32x4(0xffff, c, d, 0xee));
    return _mm512_add_ps(_mm512_maskz_shuffle_f32x4(0xffff, t, u, 0x88),
                         _mm512_maskz_shuffle_f32x4(0xffff, t, u, 0xdd));
}

/* Register r of a tile of n rows with w registers each; zeros after the last one. */
STX__INLINE_FOR("avx512f")
__m512 stx__skinny_register(size_t r, size_t n, __m512 (*s)[4], size_t w) {
    return r < n * w ? s[r / w][r % w] : _mm512_setzero_ps();
}

/* Returns the sums of registers r, r + 4, r + 8 and r + 12, as in stx__skinny_halve2. */
STX__INLINE_FOR("avx512f")
__m512 stx__skinny_every4(size_t r, size_t n, __m512 (*s)[4], size_t w) {
    return stx__skinny_halve2(
        stx__skinny_register(r, n, s, w), stx__skinny_register(r + 4, n, s, w),
        stx__skinny_register(r + 8, n, s, w), stx__skinny_register(r + 12, n, s, w));
}

/* Adds up the 16 elements of each of the registers r .. r + 15 of a tile, in the order of
   stx_fast_lanes. */
STX__INLINE_FOR("avx512f")
__m512 stx__skinny_sums(size_t r, size_t n, __m512 (*s)[4], size_t w) {
    return stx__skinny_add4(stx__skinny_every4(r, n, s, w), stx__skinny_every4(r + 1, n, s, w),
                            stx__skinny_every4(r + 2, n, s, w), stx__skinny_every4(r + 3, n, s, w));
}

/* Stores row i of the tile. */
STX__INLINE_FOR("avx512f")
void stx__skinny_store(size_t i, const float *sum, float *c, size_t ldc, size_t w, size_t cols,
                       int add) {
    size_t j;
    sum += i * w;
    c += i * ldc;
    if (cols < w) {
        for (j = 0; j < cols; j++) c[j] = add ? c[j] + sum[j] : sum[j];
    } else if (w > 2) {
        __m128 t = _mm_loadu_ps(sum);
        if (add) t = _mm_add_ps(_mm_loadu_ps(c), t);
        _mm_storeu_ps(c, t);
    } else {
        __m128 t = _mm_castsi128_ps(_mm_loadl_epi64((const __m128i *)(const void *)sum));
        if (add)
            t = _mm_add_ps(_mm_castsi128_ps(_mm_loadl_epi64((const __m128i *)(const void *)c)), t);
        _mm_storel_epi64((__m128i *)(void *)c, _mm_castps_si128(t));
    }
}

STX__INLINE_FOR("avx512f")
void stx__skinny_end(size_t n, __m512 (*s)[4], float *c, size_t ldc, size_t w, size_t cols,
                     int add) {
    float sum[32];
    _mm512_storeu_ps(sum, stx__skinny_sums(0, n, s, w));
    if (n * w > 16) _mm512_storeu_ps(sum + 16, stx__skinny_sums(16, n, s, w));
    STX__UNROLL14(n, stx__skinny_store, sum, c, ldc, w, cols, add);
}

/* Computes the tiles for n rows of x and all `cols` rows of W. */
STX__INLINE_FOR("avx512f") void stx__skinny_avx512_rows(size_t n, STX__SKINNY_PARAMS) {
    enum { W = 4 };

    const float *a = (const float *)av, *r[5], *row[W];
    size_t j;
    stx__row_prefetch next = stx__row_prefetch_of(b, ldb * sizeof *b, k * sizeof *b);
    for (; cols; cols -= STX_MIN((size_t)W, cols), b += W * ldb, c += W) {
        size_t p;
        __m512 s[14][4], t[W];
        for (j = 0; j < W; j++) row[j] = b + (j < cols ? j : 0) * ldb;
        r[0] = a;
        r[1] = a + 3 * rs;
        r[2] = a + 6 * rs;
        r[3] = a + 9 * rs;
        r[4] = a + 12 * rs;
        STX__UNROLL14(n, stx__skinny_zero, s, W);
        for (p = 0; p + 16 <= k; p += 16) {
            stx__row_prefetch_next(&next);
            t[0] = _mm512_loadu_ps(row[0] + p);
            t[1] = _mm512_loadu_ps(row[1] + p);
            t[2] = _mm512_loadu_ps(row[2] + p);
            t[3] = _mm512_loadu_ps(row[3] + p);
            STX__UNROLL14(n, stx__skinny_step, s, r, rs, t, 0xffff);
            r[0] += 16;
            r[1] += 16;
            r[2] += 16;
            r[3] += 16;
            r[4] += 16;
        }
        if (p < k) {
            const __mmask16 mask = stx__first16(k - p);
            for (j = 0; j < W; j++) t[j] = _mm512_maskz_loadu_ps(mask, row[j] + p);
            STX__UNROLL14(n, stx__skinny_step, s, r, rs, t, mask);
        }
        stx__skinny_end(n, s, c, ldc, W, cols, add);
    }
}

/* A function that computes tiles of n rows, for a constant n. Tables of these functions
   start with n = 4. */
typedef void (*stx__skinny_tile)(STX__SKINNY_PARAMS);
  #define STX__SKINNY_F32(n) \
    STX__AVX512 static void stx__skinny_avx512_##n(STX__SKINNY_PARAMS) { \
      stx__skinny_avx512_rows(n, av, rs, b, ldb, k, c, ldc, cols, add); \
    }
STX__SKINNY_F32(4)
STX__SKINNY_F32(5)
STX__SKINNY_F32(6)
STX__SKINNY_F32(7)

/* STX__SKINNY_K_BF16 is the largest k per pass in bf16. STX__SKINNY_X_BF16 is the maximum
   number of elements of x in a bf16 tile. Its 20 KB leave space in L1 for the rows of W,
   which are read as floats. STX__SKINNY_W is the number of floats in a block of W. */
enum { STX__SKINNY_K_BF16 = 1024, STX__SKINNY_X_BF16 = 10240 };

enum { STX__SKINNY_W = (1 << 18) / 4 };

/* Returns the row stride of the copy of x. The stride includes 32 additional elements,
   so that it is not a power of two for the longest rows. */
static size_t stx__skinny_stride(size_t k) {
    return stx__round_up(k, 32) + 32;
}

/* Computes all tiles for the range [p,p + k) of the summation index. x is the copy of
   A, with a row stride of rs and elements of `size` bytes. kc is the largest k of any
   pass. */
static void stx__skinny_pass(const stx_gemm_args *g, const void *x, size_t rs, size_t size,
                             size_t p, size_t k, size_t kc, size_t tiles,
                             const stx__skinny_tile *tile) {
    const size_t block = tiles == 1 ? g->N : STX__SKINNY_W / kc / 4 * 4;
    size_t j, q;
    for (j = 0; j < g->N; j += block)
        for (q = 0; q < tiles; q++) {
            const size_t row = g->M * q / tiles, rows = g->M * (q + 1) / tiles - row;
            tile[rows - 4]((const char *)x + row * rs * size, rs, g->B + j * g->ldb + p, g->ldb,
                           k, g->C + row * g->ldc + j, g->ldc, STX_MIN(block, g->N - j),
                           p || g->beta != 0);
        }
}

/* Implements stx__micro.skinny. */
static void stx__skinny_avx512(const stx_gemm_args *g, stx_real *scratch) {
    static const stx__skinny_tile tile[4] = {stx__skinny_avx512_4, stx__skinny_avx512_5,
                                             stx__skinny_avx512_6, stx__skinny_avx512_7};
    const size_t kc = stx__equal_blocks(g->K, STX__SKINNY_K, 16), rs = stx__skinny_stride(kc);
    size_t i, p;
    for (p = 0; p < g->K; p += kc) {
        const size_t k = STX_MIN(kc, g->K - p);
        for (i = 0; i < g->M; i++)
            memcpy(scratch + i * rs, g->A + i * g->lda + p, k * sizeof *scratch);
        stx__skinny_pass(g, scratch, rs, sizeof *scratch, p, k, kc, (g->M + 6) / 7, tile);
    }
}

static const stx__micro stx__micro_avx512 = {
    "avx512", 14, 32, 1, stx__micro_avx512_run, /* name, MR, NR, KR, run */
    NULL, NULL,                                 /* to_bf16, pair */
    NULL, NULL,                                 /* enter, leave */
    stx__transpose_avx512,                      /* transpose */
    stx__pack_at_avx512,                        /* pack_at */
    stx__pack_strips_avx512,                    /* pack_strips */
    stx__skinny_avx512                          /* skinny */
};
#endif
