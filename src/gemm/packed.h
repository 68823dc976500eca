#pragma once
#include "../api/config.h"
#include "../api/context.h"
#include "../api/ops.h"
#include "../core/loops.h"
#include "../core/platform.h"
#include "../core/context.h"
#include "../core/arena.h"
#include "micro.h"
#include "blocked.h"
#include "gemv.h"
#include "run.h"
#include "x86.h"


// >>gemm: packed weights

/* GEMV with weights from stx_params_pack: C = alpha A op(B) + beta C, where B is a part
   of a packed weight matrix. These kernels read 2 (bf16) or 1.125 (int8) bytes per
   weight. Sums are added in the same order as in stx__gemv, so the result is
   bit-identical to that of stx__gemv with the rounded weights. */

static size_t stx__int8_groups(size_t C) {
    return (C + STX__INT8_GROUP - 1) / STX__INT8_GROUP;
}

/* Like stx__dot4, but b has bf16 elements. */
STX_INNER void stx__dot4_bf16(int fma, stx_real *out, const stx_real *a, const uint16_t *b,
                              size_t ldb, size_t k) {
    stx_real s0[16] = {0}, s1[16] = {0}, s2[16] = {0}, s3[16] = {0}, last[4][16];
    const uint16_t *b1 = b + ldb, *b2 = b + 2 * ldb, *b3 = b + 3 * ldb;
    stx__row_prefetch next = stx__row_prefetch_of(b, ldb * sizeof *b, k * sizeof *b);
    size_t p, e;
    for (p = 0; p + 16 <= k; p += 16) {
        if (p % 32 == 0) stx__row_prefetch_next(&next);
        for (e = 0; e < 16; e++) s0[e] = STX_FMA(fma, a[p + e], stx__from_bf16(b[p + e]), s0[e]);
        for (e = 0; e < 16; e++) s1[e] = STX_FMA(fma, a[p + e], stx__from_bf16(b1[p + e]), s1[e]);
        for (e = 0; e < 16; e++) s2[e] = STX_FMA(fma, a[p + e], stx__from_bf16(b2[p + e]), s2[e]);
        for (e = 0; e < 16; e++) s3[e] = STX_FMA(fma, a[p + e], stx__from_bf16(b3[p + e]), s3[e]);
    }
    for (e = 0; p + e < k; e++) {
        last[0][e] = stx__from_bf16(b[p + e]);
        last[1][e] = stx__from_bf16(b1[p + e]);
        last[2][e] = stx__from_bf16(b2[p + e]);
        last[3][e] = stx__from_bf16(b3[p + e]);
    }
    out[0] = stx__dot_end(fma, s0, a + p, last[0], k - p);
    out[1] = stx__dot_end(fma, s1, a + p, last[1], k - p);
    out[2] = stx__dot_end(fma, s2, a + p, last[2], k - p);
    out[3] = stx__dot_end(fma, s3, a + p, last[3], k - p);
}

/* The parameters of stx__dot4_int8, which computes the same dot products as stx__dot4,
   but with four int8 rows b. f contains the scale factors of the rows' groups, with a
   row stride of ldf. b and f begin at the start of a group. */
#define STX__DOT4_INT8_PARAMS \
  stx_real *out, const stx_real *a, const int8_t *b, size_t ldb, const float *f, size_t ldf, \
      size_t k

/* Finishes stx__dot4_int8: for each of the four rows, adds up the 16 lanes of s and the
   last k % 16 products. */
STX_INNER void stx__dot4_int8_end(int fma, stx_real (*s)[16], STX__DOT4_INT8_PARAMS) {
    const size_t p = k / 16 * 16;
    stx_real last[16];
    size_t j, e;
    for (j = 0; j < 4; j++) {
        for (e = 0; p + e < k; e++)
            last[e] = (stx_real)f[j * ldf + p / STX__INT8_GROUP] * (stx_real)b[j * ldb + p + e];
        out[j] = stx__dot_end(fma, s[j], a + p, last, k - p);
    }
}

STX_INNER void stx__dot4_int8(int fma, STX__DOT4_INT8_PARAMS) {
    stx_real s[4][16] = {{0}};
    stx__row_prefetch next = stx__row_prefetch_of(b, ldb, k);
    size_t p, e, j;
    for (p = 0; p + 16 <= k; p += 16) {
        if (p % 64 == 0) stx__row_prefetch_next(&next);
        for (j = 0; j < 4; j++) {
            const stx_real v = (stx_real)f[j * ldf + p / STX__INT8_GROUP];
            for (e = 0; e < 16; e++)
                s[j][e] = STX_FMA(fma, a[p + e], v * (stx_real)b[j * ldb + p + e], s[j][e]);
        }
    }
    stx__dot4_int8_end(fma, s, out, a, b, ldb, f, ldf, k);
}

#if !defined(STX__X86) || defined(SEQTX_DOUBLE)
STX_EACH_ISA(stx__dot4_int8, (STX__DOT4_INT8_PARAMS), out, a, b, ldb, f, ldf, k)
#else

/* The versions below use intrinsics, because compilers convert int8 to float in several
   steps. */
static void stx__dot4_int8_base(STX__DOT4_INT8_PARAMS) {
    stx__dot4_int8(0, out, a, b, ldb, f, ldf, k);
}

/* stx__int8_x16 and stx__int8_x8 return 16 and 8 elements of q, multiplied by f. */
STX__INLINE_FOR("avx512f") __m512 stx__int8_x16(const int8_t *q, float f) {
    __m128i bytes = _mm_loadu_si128((const __m128i *)(const void *)q);
    return _mm512_mul_ps(_mm512_set1_ps(f), _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)));
}

STX__INLINE_FOR("avx2,fma") __m256 stx__int8_x8(const int8_t *q, float f) {
    __m128i bytes = _mm_loadl_epi64((const __m128i *)(const void *)q);
    return _mm256_mul_ps(_mm256_set1_ps(f), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)));
}

STX__AVX512 static void stx__dot4_int8_avx512(STX__DOT4_INT8_PARAMS) {
    __m512 s0 = _mm512_setzero_ps(), s1 = s0, s2 = s0, s3 = s0;
    stx_real s[4][16];
    stx__row_prefetch next = stx__row_prefetch_of(b, ldb, k);
    stx__row_prefetch factors = stx__row_prefetch_of(f, ldf * sizeof *f, ldf * sizeof *f);
    size_t p;
    for (p = 0; p + 16 <= k; p += 16) {
        const __m512 v = _mm512_loadu_ps(a + p);
        const float *fp = f + p / STX__INT8_GROUP;
        if (p % 64 == 0) stx__row_prefetch_next(&next);
        /* the 16 factors of 512 weights take 64 bytes, one cache line */
        if (p % 512 == 0) stx__row_prefetch_next(&factors);
        s0 = _mm512_fmadd_ps(v, stx__int8_x16(b + p, fp[0]), s0);
        s1 = _mm512_fmadd_ps(v, stx__int8_x16(b + ldb + p, fp[ldf]), s1);
        s2 = _mm512_fmadd_ps(v, stx__int8_x16(b + 2 * ldb + p, fp[2 * ldf]), s2);
        s3 = _mm512_fmadd_ps(v, stx__int8_x16(b + 3 * ldb + p, fp[3 * ldf]), s3);
    }
    _mm512_storeu_ps(s[0], s0);
    _mm512_storeu_ps(s[1], s1);
    _mm512_storeu_ps(s[2], s2);
    _mm512_storeu_ps(s[3], s3);
    stx__dot4_int8_end(1, s, out, a, b, ldb, f, ldf, k);
}

STX__AVX2 static void stx__dot4_int8_avx2(STX__DOT4_INT8_PARAMS) {
    __m256 s0 = _mm256_setzero_ps(), s1 = s0, s2 = s0, s3 = s0; /* lanes 0 to 7 */
    __m256 t0 = s0, t1 = s0, t2 = s0, t3 = s0;                  /* lanes 8 to 15 */
    stx_real s[4][16];
    stx__row_prefetch next = stx__row_prefetch_of(b, ldb, k);
    stx__row_prefetch factors = stx__row_prefetch_of(f, ldf * sizeof *f, ldf * sizeof *f);
    size_t p;
    for (p = 0; p + 16 <= k; p += 16) {
        const __m256 v = _mm256_loadu_ps(a + p), w = _mm256_loadu_ps(a + p + 8);
        const int8_t *b0 = b + p, *b1 = b0 + ldb, *b2 = b1 + ldb, *b3 = b2 + ldb;
        const float *fp = f + p / STX__INT8_GROUP;
        if (p % 64 == 0) stx__row_prefetch_next(&next);
        /* the 16 factors of 512 weights take 64 bytes, one cache line */
        if (p % 512 == 0) stx__row_prefetch_next(&factors);
        s0 = _mm256_fmadd_ps(v, stx__int8_x8(b0, fp[0]), s0);
        s1 = _mm256_fmadd_ps(v, stx__int8_x8(b1, fp[ldf]), s1);
        s2 = _mm256_fmadd_ps(v, stx__int8_x8(b2, fp[2 * ldf]), s2);
        s3 = _mm256_fmadd_ps(v, stx__int8_x8(b3, fp[3 * ldf]), s3);
        t0 = _mm256_fmadd_ps(w, stx__int8_x8(b0 + 8, fp[0]), t0);
        t1 = _mm256_fmadd_ps(w, stx__int8_x8(b1 + 8, fp[ldf]), t1);
        t2 = _mm256_fmadd_ps(w, stx__int8_x8(b2 + 8, fp[2 * ldf]), t2);
        t3 = _mm256_fmadd_ps(w, stx__int8_x8(b3 + 8, fp[3 * ldf]), t3);
    }
    _mm256_storeu_ps(s[0], s0);
    _mm256_storeu_ps(s[1], s1);
    _mm256_storeu_ps(s[2], s2);
    _mm256_storeu_ps(s[3], s3);
    _mm256_storeu_ps(s[0] + 8, t0);
    _mm256_storeu_ps(s[1] + 8, t1);
    _mm256_storeu_ps(s[2] + 8, t2);
    _mm256_storeu_ps(s[3] + 8, t3);
    stx__dot4_int8_end(1, s, out, a, b, ldb, f, ldf, k);
}
#endif

/* The parameters of the packed versions of stx__axpy4, which add multiples of rows
   row[0] .. row[3] of the packed weights w to c. The first column, col, must be the
   start of a group. */
#define STX__AXPY4_PACKED_PARAMS \
  stx_real *STX_RESTRICT c, const stx_real *a, const stx__packed *w, const size_t *row, \
      size_t col, size_t n

STX_INNER void stx__axpy4_bf16(int fma, STX__AXPY4_PACKED_PARAMS) {
    const stx_real a0 = a[0], a1 = a[1], a2 = a[2], a3 = a[3];
    const uint16_t *STX_RESTRICT h0 = w->h + row[0] * w->C + col;
    const uint16_t *STX_RESTRICT h1 = w->h + row[1] * w->C + col;
    const uint16_t *STX_RESTRICT h2 = w->h + row[2] * w->C + col;
    const uint16_t *STX_RESTRICT h3 = w->h + row[3] * w->C + col;
    stx__row_prefetch next = stx__row_prefetch_of(h0, w->C * sizeof *h0, n * sizeof *h0);
    size_t j, e;
    for (j = 0; j + 32 <= n; j += 32) {
        stx__row_prefetch_next(&next);
        for (e = j; e < j + 32; e++)
            c[e] = stx__add4(fma, c[e], a0, stx__from_bf16(h0[e]), a1, stx__from_bf16(h1[e]), a2,
                             stx__from_bf16(h2[e]), a3, stx__from_bf16(h3[e]));
    }
    for (; j < n; j++)
        c[j] = stx__add4(fma, c[j], a0, stx__from_bf16(h0[j]), a1, stx__from_bf16(h1[j]), a2,
                         stx__from_bf16(h2[j]), a3, stx__from_bf16(h3[j]));
}

STX_INNER void stx__axpy4_int8(int fma, STX__AXPY4_PACKED_PARAMS) {
    const size_t C = w->C, G = stx__int8_groups(C);
    const stx_real a0 = a[0], a1 = a[1], a2 = a[2], a3 = a[3];
    stx__row_prefetch next = stx__row_prefetch_of(w->q + row[0] * C + col, C, n);
    size_t j, e;
    for (j = 0; j < n; j += STX__INT8_GROUP) {
        const int8_t *STX_RESTRICT q0 = w->q + row[0] * C + col + j;
        const int8_t *STX_RESTRICT q1 = w->q + row[1] * C + col + j;
        const int8_t *STX_RESTRICT q2 = w->q + row[2] * C + col + j;
        const int8_t *STX_RESTRICT q3 = w->q + row[3] * C + col + j;
        const float *f = w->f + (col + j) / STX__INT8_GROUP;
        const stx_real f0 = (stx_real)f[row[0] * G], f1 = (stx_real)f[row[1] * G];
        const stx_real f2 = (stx_real)f[row[2] * G], f3 = (stx_real)f[row[3] * G];
        if (j % (2 * STX__INT8_GROUP) == 0) stx__row_prefetch_next(&next);
        if (j + STX__INT8_GROUP <= n) /* a loop of constant length vectorises better */
            for (e = 0; e < STX__INT8_GROUP; e++)
                c[j + e] = stx__add4(fma, c[j + e], a0, f0 * (stx_real)q0[e], a1,
                                     f1 * (stx_real)q1[e], a2, f2 * (stx_real)q2[e], a3,
                                     f3 * (stx_real)q3[e]);
        else
            for (e = 0; e < n - j; e++)
                c[j + e] = stx__add4(fma, c[j + e], a0, f0 * (stx_real)q0[e], a1,
                                     f1 * (stx_real)q1[e], a2, f2 * (stx_real)q2[e], a3,
                                     f3 * (stx_real)q3[e]);
    }
}

STX_EACH_ISA(stx__axpy4_int8, (STX__AXPY4_PACKED_PARAMS), c, a, w, row, col, n)

#if defined(STX__X86) && !defined(SEQTX_DOUBLE)

/* Uses intrinsics, because compilers convert int8 to float in several steps. */
STX__AVX512 static void stx__axpy4_int8_intrinsics(STX__AXPY4_PACKED_PARAMS) {
    const size_t C = w->C, G = stx__int8_groups(C), whole = n / STX__INT8_GROUP * STX__INT8_GROUP;
    const __m512 a0 = _mm512_set1_ps(a[0]), a1 = _mm512_set1_ps(a[1]);
    const __m512 a2 = _mm512_set1_ps(a[2]), a3 = _mm512_set1_ps(a[3]);
    const int8_t *q0 = w->q + row[0] * C + col, *q1 = w->q + row[1] * C + col;
    const int8_t *q2 = w->q + row[2] * C + col, *q3 = w->q + row[3] * C + col;
    stx__row_prefetch next = stx__row_prefetch_of(q0, C, n);
    size_t j, e;
    for (j = 0; j < whole; j += STX__INT8_GROUP) {
        const float *f = w->f + (col + j) / STX__INT8_GROUP;
        const float f0 = f[row[0] * G], f1 = f[row[1] * G];
        const float f2 = f[row[2] * G], f3 = f[row[3] * G];
        if (j % (2 * STX__INT8_GROUP) == 0) stx__row_prefetch_next(&next);
        for (e = j; e < j + STX__INT8_GROUP; e += 16) {
            __m512 t = _mm512_loadu_ps(c + e);
            t = _mm512_fmadd_ps(a0, stx__int8_x16(q0 + e, f0), t);
            t = _mm512_fmadd_ps(a1, stx__int8_x16(q1 + e, f1), t);
            t = _mm512_fmadd_ps(a2, stx__int8_x16(q2 + e, f2), t);
            t = _mm512_fmadd_ps(a3, stx__int8_x16(q3 + e, f3), t);
            _mm512_storeu_ps(c + e, t);
        }
    }
    if (whole < n) stx__axpy4_int8_avx512(c + whole, a, w, row, col + whole, n - whole);
}
#endif

/* The int8 kernels for one instruction set. */
typedef struct stx__int8_kernels {
    void (*dot4)(STX__DOT4_INT8_PARAMS);
    void (*axpy4)(STX__AXPY4_PACKED_PARAMS);
} stx__int8_kernels;

static stx__int8_kernels stx__int8_kernels_for(int isa) {
    stx__int8_kernels k;
    k.dot4 = stx__dot4_int8_base;
    k.axpy4 = stx__axpy4_int8_base;
#ifdef STX__X86
    if (isa == STX__ISA_AVX2) {
        k.dot4 = stx__dot4_int8_avx2;
        k.axpy4 = stx__axpy4_int8_avx2;
    }
    if (isa == STX__ISA_AVX512) {
        k.dot4 = stx__dot4_int8_avx512;
  #ifdef SEQTX_DOUBLE
        k.axpy4 = stx__axpy4_int8_avx512;
  #else
        k.axpy4 = stx__axpy4_int8_intrinsics;
  #endif
    }
#endif
    (void)isa;
    return k;
}

/* Computes C += alpha A B^T, where B is the part of w that begins at element `at`. */
STX_INNER void stx__gemv_packed_dots(int fma, const stx_gemm_args *g, const stx__packed *w,
                                     size_t at, stx__int8_kernels int8) {
    const size_t C = w->C, G = stx__int8_groups(C), row = at / C, col = at % C;
    size_t i, j, e;
    for (j = 0; j < g->N; j += 4) {
        const size_t n = STX_MIN((size_t)4, g->N - j);
        /* if fewer than four rows are left, each is computed four times, and t has
           space for the copies */
        const size_t step = n == 4 ? 4 : 1, ldb = n == 4 ? C : 0, ldf = n == 4 ? G : 0;
        const size_t b = (row + j) * C + col;
        const size_t f = (row + j) * G + col / STX__INT8_GROUP;
        for (i = 0; i < g->M; i++) {
            const stx_real *a = g->A + i * g->lda;
            stx_real *c = g->C + i * g->ldc + j, t[8];
            for (e = 0; e < n; e += step)
                if (w->h)
                    stx__dot4_bf16(fma, t + e, a, w->h + b + e * C, ldb, g->K);
                else
                    int8.dot4(t + e, a, w->q + b + e * C, ldb, w->f + f + e * G, ldf, g->K);
            for (e = 0; e < n; e++) c[e] += g->alpha * t[e];
        }
    }
}

/* Computes C += alpha A B, where B is the part of w that begins at element `at`. */
STX_INNER void stx__gemv_packed_axpys(int fma, const stx_gemm_args *g, const stx__packed *w,
                                      size_t at, stx__int8_kernels int8) {
    enum { COLUMNS = 1024 }; /* columns of C per pass, which stay in L1 */

    const size_t row = at / w->C, col = at % w->C;
    size_t i, j, k, e;
    for (j = 0; j < g->N; j += COLUMNS)
        for (k = 0; k < g->K; k += 4) {
            const size_t n = STX_MIN((size_t)4, g->K - k);
            const size_t columns = STX_MIN((size_t)COLUMNS, g->N - j);
            size_t r[4];
            /* missing rows are replaced by the first row, multiplied by 0 */
            for (e = 0; e < 4; e++) r[e] = row + k + (e < n ? e : 0);
            for (i = 0; i < g->M; i++) {
                stx_real *c = g->C + i * g->ldc + j, a[4] = {0};
                for (e = 0; e < n; e++) a[e] = g->alpha * g->A[i * g->lda + k + e];
                if (w->h)
                    stx__axpy4_bf16(fma, c, a, w, r, col + j, columns);
                else
                    int8.axpy4(c, a, w, r, col + j, columns);
            }
        }
}

STX_INNER void stx__gemv_packed(int fma, const stx_gemm_args *g, const stx__packed *w, size_t at,
                                stx__int8_kernels int8) {
    stx__gemm_scale_c(g);
    if (g->tb)
        stx__gemv_packed_dots(fma, g, w, at, int8);
    else
        stx__gemv_packed_axpys(fma, g, w, at, int8);
}

STX_EACH_ISA(stx__gemv_packed,
             (const stx_gemm_args *g, const stx__packed *w, size_t at, stx__int8_kernels int8), g,
             w, at, int8)

/* Implements stx__packed.gemv. */
static void stx__gemv_packed_run(stx_ctx *x, const stx_gemm_args *g, const stx__packed *w,
                                 size_t at) {
    STX_CALL(x, stx__gemv_packed, (g, w, at, stx__int8_kernels_for(stx_isa(x))));
}

static int stx__is_packable(const stx_tensor *t) {
    return t->ndim == 2 && t->dim[0] >= STX_PACK_MIN && t->dim[1] >= STX_PACK_MIN;
}

/* Rounds a row of C weights in place and stores it as bf16 in h. */
static void stx__pack_row_bf16(stx_real *w, size_t C, uint16_t *h) {
    size_t i;
    for (i = 0; i < C; i++) {
        h[i] = (uint16_t)stx__bf16(w[i]);
        w[i] = stx__from_bf16(h[i]);
    }
}

/* Rounds a row of C weights in place and stores it as int8 in q. Stores one factor per
   group in f: 1/127 of the largest absolute value in the group. */
static void stx__pack_row_int8(stx_real *w, size_t C, int8_t *q, float *f) {
    size_t i, g;
    for (g = 0; g < C; g += STX__INT8_GROUP, f++) {
        const size_t end = STX_MIN(C, g + STX__INT8_GROUP);
        stx_real largest = 0;
        for (i = g; i < end; i++)
            if (fabs((double)w[i]) > (double)largest) largest = (stx_real)fabs((double)w[i]);
        *f = (float)(largest / 127);
        for (i = g; i < end; i++) {
            double v = *f > 0 ? floor((double)w[i] / (double)*f + 0.5) : 0;
            q[i] = (int8_t)STX_MIN(STX_MAX(v, -127), 127);
            w[i] = (stx_real)((stx_real)*f * (stx_real)q[i]);
        }
    }
}

/* Rounds rows [begin,end) of a parameter in place and packs them into w. w->from points
   to the data of the parameter. */
static void stx__pack_matrix_part(const stx_share *s, const void *job) {
    const stx__packed *w = (const stx__packed *)job;
    stx_real *data = (stx_real *)(uintptr_t)w->from;
    size_t r;
    for (r = s->begin; r < s->end; r++)
        if (w->h)
            stx__pack_row_bf16(data + r * w->C, w->C, (uint16_t *)(uintptr_t)w->h + r * w->C);
        else
            stx__pack_row_int8(data + r * w->C, w->C, (int8_t *)(uintptr_t)w->q + r * w->C,
                               (float *)(uintptr_t)w->f + r * stx__int8_groups(w->C));
}

/* Fills in *w for tensor t and allocates its memory. Returns 0 on failure. */
static int stx__packed_init(stx_ctx *x, stx__packed *w, const stx_tensor *t, int kind) {
    size_t factors = 0;
    char *block;
    if (kind == STX_WEIGHTS_INT8)
        factors = t->dim[0] * stx__int8_groups(t->dim[1]) * sizeof(float);
    memset(w, 0, sizeof *w);
    w->from = t->data;
    w->size = t->size;
    w->C = t->dim[1];
    w->bytes = factors + t->size * (kind == STX_WEIGHTS_BF16 ? 2 : 1);
    w->gemv = stx__gemv_packed_run;
    block = (char *)stx_block(x, w->bytes);
    if (!block) return 0;
    if (kind == STX_WEIGHTS_BF16) {
        w->h = (const uint16_t *)(const void *)block;
    } else {
        w->f = (const float *)(const void *)block;
        w->q = (const int8_t *)block + factors;
    }
    return 1;
}

/* Checks that all weights are finite and do not overflow when rounded to bf16. */
static int stx__params_packable(stx_ctx *x, const stx_params *p) {
    size_t i, j;
    for (i = 0; i < p->count; i++)
        for (j = 0; stx__is_packable(p->tensor[i]) && j < p->tensor[i]->size; j++) {
            double v = (double)p->tensor[i]->data[j];
            if (stx__finite(v) && fabs(v) <= 3.3e38) continue;
            stx_fail(x, STX_ERR_ARG,
                     "stx_params_pack: element %zu of \"%s\": expected a finite value of "
                     "magnitude 3.3e38 or less, got %g: the model has diverged or its file is "
                     "damaged",
                     j, p->name[i], v);
            return 0;
        }
    return 1;
}

static void stx__sort_packed(stx__packed *list, size_t n) {
    size_t i, j;
    for (i = 1; i < n; i++) {
        const stx__packed w = list[i];
        for (j = i; j > 0 && list[j - 1].from > w.from; j--) list[j] = list[j - 1];
        list[j] = w;
    }
}

STX_DEF size_t stx_params_pack(stx_params *p, int kind) {
    STX__FP_SCOPE;
    stx_ctx *x = p ? p->ctx : NULL;
    stx__packed *list;
    size_t i, n, old, total = 0;
    if (!stx_ok(x)) return 0;
    if (stx__on_gpu(x)) {
        stx_fail(x, STX_ERR_ARG,
                 "stx_params_pack: not available on a GPU: use STX_PREC_BF16 instead");
        return 0;
    }
    if (kind < STX_WEIGHTS_F32 || kind > STX_WEIGHTS_INT8) {
        stx_bad_value(x, "stx_params_pack", "kind", kind, "one of STX_WEIGHTS_*");
        return 0;
    }
    if (kind && !stx__params_packable(x, p)) return 0;

    /* the new list holds the packed matrices of p and of the other parameter lists. All
       memory is allocated before the first weight changes */
    for (i = 0; i < p->count; i++) stx__param_written(x, p->tensor[i]->data);
    n = old = x->packed.count;
    list = (stx__packed *)stx_block(x, (n + p->count + 1) * sizeof *list);
    if (!list) return 0;
    if (n) memcpy(list, x->packed.matrix, n * sizeof *list);
    for (i = 0; kind && i < p->count; i++) {
        if (!stx__is_packable(p->tensor[i])) continue;
        if (!stx__packed_init(x, list + n, p->tensor[i], kind)) break;
        n++;
    }
    if (!stx_ok(x)) {
        while (n > old) stx_block_free(x, stx__packed_block(list + --n));
        stx_block_free(x, list);
        return 0;
    }

    for (i = old; i < n; i++)
        stx_parallel(x, list[i].size / list[i].C, list[i].size, stx__pack_matrix_part, list + i);
    stx__sort_packed(list, n);
    stx_block_free(x, x->packed.matrix);
    x->packed.matrix = list;
    x->packed.count = n;
    for (i = 0; i < n; i++) total += list[i].bytes;
    return total;
}
