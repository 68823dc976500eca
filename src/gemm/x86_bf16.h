#pragma once
#include "../api/config.h"
#include "../api/context.h"
#include "../api/ops.h"
#include "../core/loops.h"
#include "../core/platform.h"
#include "micro.h"
#include "blocked.h"
#include "gemv.h"
#include "x86.h"


// >>gemm: x86, bf16

#if defined(STX__X86) && !defined(SEQTX_DOUBLE)
  /* The AVX512-BF16 kernels need clang 9 or gcc 10. */
  #if defined(__clang__) ? __clang_major__ >= 9 : __GNUC__ >= 10
    #define STX__BF16     1
    #define STX__BF16_ISA "avx512f,avx512bw,avx512vl,avx512bf16"
    #define STX__BF16_FN  __attribute__((target(STX__BF16_ISA)))

/* Loads a unit from an address that may be unaligned. */
STX_INNER int stx__load_unit(const uint16_t *p) {
    int v;
    memcpy(&v, p, 4);
    return v;
}

/* Rounds two rows of 16 floats to 16 units in an __m512i. cvtne2 returns the elements
   of r0 followed by those of r1; the permutation interleaves them. */
STX__INLINE_FOR(STX__BF16_ISA) __m512i stx__zip_bf16(__m512 r0, __m512 r1) {
    const __m512i zip =
        _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22,
                         6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(zip, (__m512i)_mm512_cvtne2ps_pbh(r1, r0));
}

STX__INLINE_FOR(STX__BF16_ISA)
void stx__avx512_bf16_step(size_t i, __m512 (*s)[2], const uint16_t *const *r, size_t rs,
                           __m512bh b0, __m512bh b1) {
    __m512bh a = (__m512bh)_mm512_set1_epi32(stx__load_unit(r[i / 3] + i % 3 * rs));
    s[i][0] = _mm512_dpbf16_ps(s[i][0], a, b0);
    s[i][1] = _mm512_dpbf16_ps(s[i][1], a, b1);
}

/* Computes steps p .. end-1 of a tile. */
STX__INLINE_FOR(STX__BF16_ISA)
void stx__avx512_bf16_steps(size_t n, size_t p, size_t end, __m512 (*s)[2], const uint16_t **r,
                            size_t rs, size_t ks, const uint32_t *b, size_t ldb) {
    for (b += p * ldb; p < end; p++, b += ldb) {
        __m512bh b0 = (__m512bh)_mm512_loadu_si512(b);
        __m512bh b1 = (__m512bh)_mm512_loadu_si512(b + 16);
        STX__UNROLL14(n, stx__avx512_bf16_step, s, r, rs, b0, b1);
        r[0] += ks;
        r[1] += ks;
        r[2] += ks;
        r[3] += ks;
        r[4] += ks;
    }
}

/* The AVX512-BF16 micro-kernel, 14 x 32: like stx__micro_avx512_rows, but a step
   multiplies units of two bf16 elements. */
STX__INLINE_FOR(STX__BF16_ISA)
void stx__micro_avx512_bf16_rows(size_t n, size_t steps, const uint16_t *a, size_t rs, size_t ks,
                                 const uint32_t *b, size_t ldb, float *c, size_t ldc, int add) {
    const uint16_t *r[5];
    __m512 s[14][2];
    size_t p = steps > STX__C_AHEAD ? steps - STX__C_AHEAD : 0, i;
    r[0] = a;
    r[1] = a + 3 * rs;
    r[2] = a + 6 * rs;
    r[3] = a + 9 * rs;
    r[4] = a + 12 * rs;
    STX__UNROLL14(n, stx__avx512_zero, s);
    stx__avx512_bf16_steps(n, 0, p, s, r, rs, ks, b, ldb);
    for (i = 0; i < n && steps >= 2 * n; i++, p += 2) {
        stx__prefetch_c(c + i * ldc);
        stx__avx512_bf16_steps(n, p, p + 2, s, r, rs, ks, b, ldb);
    }
    stx__avx512_bf16_steps(n, p, steps, s, r, rs, ks, b, ldb);
    if (add) STX__UNROLL14(n, stx__avx512_add, s, c, ldc);
    STX__UNROLL14(n, stx__avx512_store, s, c, ldc);
}

STX__MICRO_RUN14(stx__micro_avx512_bf16, STX__BF16_ISA, uint16_t, uint32_t)

/* stx__round_row_bf16 implements stx__micro.to_bf16, and stx__pair_rows_bf16 implements
   stx__micro.pair. The conversion instructions treat denormals as zero. */
STX__BF16_FN static void stx__round_row_bf16(uint16_t *to, const float *from, size_t n) {
    size_t i;
    for (i = 0; i + 32 <= n; i += 32)
        _mm512_storeu_si512(to + i, (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(from + i + 16),
                                                                 _mm512_loadu_ps(from + i)));
    for (; i + 16 <= n; i += 16)
        _mm256_storeu_si256((__m256i *)(void *)(to + i),
                            (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(from + i)));
    if (i < n) {
        const __mmask16 mask = stx__first16(n - i);
        __m512 last = _mm512_maskz_loadu_ps(mask, from + i);
        _mm256_mask_storeu_epi16(to + i, mask, (__m256i)_mm512_cvtneps_pbh(last));
    }
}

STX__BF16_FN static void stx__pair_rows_bf16(uint32_t *to, const float *r0, const float *r1,
                                             size_t n) {
    size_t i;
    for (i = 0; r1 && i + 16 <= n; i += 16)
        _mm512_storeu_si512(to + i, stx__zip_bf16(_mm512_loadu_ps(r0 + i),
                                                  _mm512_loadu_ps(r1 + i)));
    for (; i < n; i += 16) {
        const __mmask16 mask = stx__first16(n - i);
        __m512 lo = _mm512_maskz_loadu_ps(mask, r0 + i), hi = _mm512_setzero_ps();
        if (r1) hi = _mm512_maskz_loadu_ps(mask, r1 + i);
        _mm512_mask_storeu_epi32(to + i, mask, stx__zip_bf16(lo, hi));
    }
}

/* Implements stx__micro.pack_strips, eight pairs of rows at a time. See
   stx__pack_strips_avx512. */
STX__BF16_FN static void stx__pack_strips_bf16(float *to, size_t stride, const float *B,
                                               size_t ldb, size_t k, size_t n) {
    size_t p0, p, j;
    for (p0 = 0; p0 < k; p0 += 16)
        for (j = 0; j < n; j += 32) {
            const size_t w = STX_MIN((size_t)32, n - j), end = STX_MIN(p0 + 16, k);
            const __mmask16 m0 = stx__first16(w), m1 = stx__first16(w > 16 ? w - 16 : 0);
            float *t = to + j / 32 * stride + p0 / 2 * 32;
            for (p = p0; p < end; p += 2, t += 32) {
                const int two = p + 1 < k; /* 0 if the last row has no partner */
                const __mmask16 n0 = two ? m0 : 0, n1 = two ? m1 : 0;
                const float *r0 = B + p * ldb + j, *r1 = r0 + (two ? ldb : 0);
                if (p + 17 < k) {
                    stx_prefetch(r0 + 16 * ldb, w);
                    stx_prefetch(r0 + 17 * ldb, w);
                }
                _mm512_storeu_si512(t, stx__zip_bf16(_mm512_maskz_loadu_ps(m0, r0),
                                                     _mm512_maskz_loadu_ps(n0, r1)));
                _mm512_storeu_si512(t + 16, stx__zip_bf16(_mm512_maskz_loadu_ps(m1, r0 + 16),
                                                          _mm512_maskz_loadu_ps(n1, r1 + 16)));
            }
        }
}

/* The path STX__GEMM_SKINNY in bf16. The rows of W are rounded as they are read. */
STX__INLINE_FOR(STX__BF16_ISA)
void stx__skinny_bf16_step(size_t i, __m512 (*s)[4], const uint16_t *const *r, size_t rs,
                           const __m512i *b, size_t w) {
    __m512i v = _mm512_loadu_si512(r[i / 3] + i % 3 * rs);
    __m512bh a;
    __asm__("" : "+v"(v)); /* prevents reloads, as in stx__skinny_step */
    a = (__m512bh)v;
    s[i][0] = _mm512_dpbf16_ps(s[i][0], a, (__m512bh)b[0]);
    s[i][1] = _mm512_dpbf16_ps(s[i][1], a, (__m512bh)b[1]);
    if (w > 2) {
        s[i][2] = _mm512_dpbf16_ps(s[i][2], a, (__m512bh)b[2]);
        s[i][3] = _mm512_dpbf16_ps(s[i][3], a, (__m512bh)b[3]);
    }
}

/* Rounds n <= 32 floats to bf16 and pads the result with zeros. */
STX__INLINE_FOR(STX__BF16_ISA) __m512i stx__skinny_round(const float *b, size_t n) {
    const __mmask16 m0 = stx__first16(n), m1 = stx__first16(n > 16 ? n - 16 : 0);
    return (__m512i)_mm512_cvtne2ps_pbh(_mm512_maskz_loadu_ps(m1, b + 16),
                                        _mm512_maskz_loadu_ps(m0, b));
}

STX__INLINE_FOR(STX__BF16_ISA) void stx__skinny_bf16_rows(size_t n, size_t w, STX__SKINNY_PARAMS) {
    const uint16_t *a = (const uint16_t *)av, *r[5];
    const float *row[4];
    size_t j;
    stx__row_prefetch next = stx__row_prefetch_of(b, ldb * sizeof *b, k * sizeof *b);
    for (; cols; cols -= STX_MIN(w, cols), b += w * ldb, c += w) {
        size_t p;
        __m512 s[14][4];
        __m512i t[4];
        for (j = 0; j < w; j++) row[j] = b + (j < cols ? j : 0) * ldb;
        r[0] = a;
        r[1] = a + 3 * rs;
        r[2] = a + 6 * rs;
        r[3] = a + 9 * rs;
        r[4] = a + 12 * rs;
        STX__UNROLL14(n, stx__skinny_zero, s, w);
        for (p = 0; p < k; p += 32) {
            stx__row_prefetch_next(&next);
            if (w > 2) stx__row_prefetch_next(&next);
            if (p + 32 <= k)
                for (j = 0; j < w; j++)
                    t[j] = (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(row[j] + p + 16),
                                                        _mm512_loadu_ps(row[j] + p));
            else
                for (j = 0; j < w; j++) t[j] = stx__skinny_round(row[j] + p, k - p);
            STX__UNROLL14(n, stx__skinny_bf16_step, s, r, rs, t, w);
            r[0] += 32;
            r[1] += 32;
            r[2] += 32;
            r[3] += 32;
            r[4] += 32;
        }
        stx__skinny_end(n, s, c, ldc, w, cols, add);
    }
}

    #define STX__SKINNY_BF16(n, w) \
      STX__BF16_FN static void stx__skinny_bf16_##n(STX__SKINNY_PARAMS) { \
        stx__skinny_bf16_rows(n, w, av, rs, b, ldb, k, c, ldc, cols, add); \
      }
STX__SKINNY_BF16(4, 4)
STX__SKINNY_BF16(5, 4)
STX__SKINNY_BF16(6, 4)
STX__SKINNY_BF16(7, 4)
STX__SKINNY_BF16(8, 2)
STX__SKINNY_BF16(9, 2)
STX__SKINNY_BF16(10, 2)
STX__SKINNY_BF16(11, 2)
STX__SKINNY_BF16(12, 2)
STX__SKINNY_BF16(13, 2)
STX__SKINNY_BF16(14, 2)

static void stx__skinny_bf16(const stx_gemm_args *g, stx_real *scratch) {
    static const stx__skinny_tile tile[11] = {
        stx__skinny_bf16_4,  stx__skinny_bf16_5,  stx__skinny_bf16_6,  stx__skinny_bf16_7,
        stx__skinny_bf16_8,  stx__skinny_bf16_9,  stx__skinny_bf16_10, stx__skinny_bf16_11,
        stx__skinny_bf16_12, stx__skinny_bf16_13, stx__skinny_bf16_14};
    const size_t tiles = (g->M + 13) / 14, rows = (g->M + tiles - 1) / tiles;
    const size_t most = STX_MIN((size_t)STX__SKINNY_K_BF16, STX__SKINNY_X_BF16 / rows);
    const size_t kc = stx__equal_blocks(g->K, most, 32), rs = stx__skinny_stride(kc);
    uint16_t *x = (uint16_t *)(void *)scratch;
    size_t i, p;
    for (p = 0; p < g->K; p += kc) {
        const size_t k = STX_MIN(kc, g->K - p), padded = stx__round_up(k, 32);
        for (i = 0; i < g->M; i++) {
            stx__round_row_bf16(x + i * rs, g->A + i * g->lda + p, k);
            memset(x + i * rs + k, 0, (padded - k) * sizeof *x);
        }
        stx__skinny_pass(g, x, rs, sizeof *x, p, k, kc, tiles, tile);
    }
}

static const stx__micro stx__micro_avx512_bf16 = {
    "avx512 bf16", 14, 32, 2, stx__micro_avx512_bf16_run, /* name, MR, NR, KR, run */
    stx__round_row_bf16, stx__pair_rows_bf16,             /* to_bf16, pair */
    NULL, NULL,                                           /* enter, leave */
    stx__transpose_avx512,                                /* transpose */
    NULL,                                                 /* pack_at */
    stx__pack_strips_bf16,                                /* pack_strips */
    stx__skinny_bf16                                      /* skinny */
};
  #endif

  /* The AMX micro-kernel, 32 x 32. A core has eight tile registers, each with 16 rows
     of 64 bytes. One instruction multiplies a 16 x 32 matrix of bf16 values by a 32 x
     16 matrix (stored as 16 rows of 16 units) and adds the result to 16 x 16 sums.
     Tiles 0 to 3 hold C, 4 and 5 hold op(A), and 6 and 7 hold op(B). To test this code
     on processors without AMX, tests/inner/amx.h defines STX__AMX, STX__AMX_EMULATED
     and stx__has_amx. */
  #if !defined(STX__AMX) && defined(__linux__) \
      && (defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11)
    #define STX__AMX __attribute__((target("amx-tile,amx-bf16,avx512f")))

/* Returns 1 if the processor has AMX for bf16 and the operating system permits this
   process to use it: arch_prctl(ARCH_REQ_XCOMP_PERM, XTILEDATA). */
static int stx__has_amx(void) {
    uint32_t a = 7, b, c = 0, d;
    long r = 158;
    if (!__builtin_cpu_supports("avx512bf16")) return 0; /* packing needs AVX512-BF16 */
    __asm__ volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
    if (!(d >> 22 & 1) || !(d >> 24 & 1)) return 0;
    __asm__ volatile("syscall" : "+a"(r) : "D"(0x1023L), "S"(18L) : "rcx", "r11", "memory");
    return r == 0;
}
  #endif
  #ifdef STX__AMX

/* stx__amx_enter implements stx__micro.enter, and stx__amx_leave implements
   stx__micro.leave. */
STX__AMX static void stx__amx_enter(void) {
    uint8_t config[64] = {1}; /* palette 1 */
    int t;
    for (t = 0; t < 8; t++) {
        config[16 + 2 * t] = 64; /* bytes per row */
        config[48 + t] = 16;     /* rows */
    }
    /* gcc's _tile_loadconfig is declared to read only 8 of the 64 bytes. Without this
       statement, gcc would remove the loop above. */
    __asm__ volatile("" : : "r"(config) : "memory");
    _tile_loadconfig(config);
}

STX__AMX static void stx__amx_leave(void) {
    _tile_release();
}

STX__AMX static void stx__micro_amx_run(STX__MICRO_PARAMS) {
    const uint16_t *a = (const uint16_t *)av;
    const uint32_t *b = (const uint32_t *)bv;
    const int two = h > 16, whole = h == 16 || h == 32;
    float t[32 * 32], *to = whole ? c : t;
    size_t ldt = whole ? ldc : 32, k, i, j;

    /* The sums start from C for every height, so that the result does not depend on how
       C is divided among the threads. */
    if (!whole && add)
        for (i = 0; i < 32; i++)
            for (j = 0; j < 32; j++) t[i * 32 + j] = i < h ? c[i * ldc + j] : 0;
    if (add) {
        _tile_loadd(0, to, ldt * 4);
        _tile_loadd(1, to + 16, ldt * 4);
        if (two) {
            _tile_loadd(2, to + 16 * ldt, ldt * 4);
            _tile_loadd(3, to + 16 * ldt + 16, ldt * 4);
        }
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (k = 0; k < steps; k += 16) {
        _tile_loadd(6, b + k * ldb, ldb * 4);
        _tile_loadd(7, b + k * ldb + 16, ldb * 4);
        _tile_loadd(4, a + k * ks, rs * 2);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (two) {
            _tile_loadd(5, a + 16 * rs + k * ks, rs * 2);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, to, ldt * 4);
    _tile_stored(1, to + 16, ldt * 4);
    if (two) {
        _tile_stored(2, to + 16 * ldt, ldt * 4);
        _tile_stored(3, to + 16 * ldt + 16, ldt * 4);
    }
    if (!whole)
        for (i = 0; i < h; i++) memcpy(c + i * ldc, t + i * 32, 32 * sizeof *c);
}

    #ifdef STX__AMX_EMULATED
static const stx__micro stx__micro_amx = {
    "amx bf16, emulated", 32, 32, 32, stx__micro_amx_run, /* name, MR, NR, KR, run */
    stx__round_row_base, stx__pair_rows_base,             /* to_bf16, pair */
    stx__amx_enter, stx__amx_leave,                       /* enter, leave */
    NULL, NULL, NULL, NULL                                /* NULL: portable packing */
};
    #else
/* Implements stx__micro.pack_at for AMX. The result is the same as that of
   stx__pack_at_tiles, but 16 rows of 16 units are transposed at a time. */
STX__BF16_FN static void stx__pack_at_amx(float *to, const float *A, size_t lda, size_t m,
                                          size_t k) {
    const size_t steps = (k + 31) / 32;
    size_t p, i, q;
    for (p = 0; p < steps; p++)
        for (i = 0; i < m; i += 16) {
            const __mmask16 mask = stx__first16(m - i);
            float *tile = to + ((i / 32 * steps + p) * 32 + i % 32) * 16;
            __m512i z[16];
            for (q = 0; q < 16; q++) {
                const size_t row = 32 * p + 2 * q; /* missing rows are zeros */
                const float *r0 = A + STX_MIN(row, k - 1) * lda + i;
                const float *r1 = A + STX_MIN(row + 1, k - 1) * lda + i;
                z[q] = stx__zip_bf16(_mm512_maskz_loadu_ps(row < k ? mask : 0, r0),
                                     _mm512_maskz_loadu_ps(row + 1 < k ? mask : 0, r1));
            }
            stx__transpose16(z);
            for (q = 0; q < 16; q++) _mm512_storeu_si512(tile + q * 16, z[q]);
        }
}

static const stx__micro stx__micro_amx = {
    "amx bf16", 32, 32, 32, stx__micro_amx_run, /* name, MR, NR, KR, run */
    stx__round_row_bf16, stx__pair_rows_bf16,   /* to_bf16, pair */
    stx__amx_enter, stx__amx_leave,             /* enter, leave */
    stx__transpose_avx512,                      /* transpose */
    stx__pack_at_amx,                           /* pack_at */
    stx__pack_strips_bf16,                      /* pack_strips */
    stx__skinny_bf16                            /* skinny */
};
    #endif
  #endif
#endif
