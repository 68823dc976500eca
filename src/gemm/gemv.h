#pragma once
#include "../api/config.h"
#include "../api/context.h"
#include "../api/ops.h"
#include "../core/loops.h"
#include "../core/maths.h"
#include "../core/context.h"
#include "blocked.h"


// >>gemm: few rows

/* Matmuls of at most this many rows use GEMV (see stx__gemm_path). */
enum { STX__GEMV_ROWS = 3 };

/* Matmuls with few rows, as in generation, are limited by the memory bandwidth for B, so
   the kernels below read B in place. They use four rows of B for all rows of A in turn,
   so B is loaded from memory only once.

   Memory is fastest in address order: reading four rows interleaved loses up to two
   thirds of the bandwidth. The kernels therefore process four rows at a time, but
   prefetch in address order. Each call of stx__row_prefetch_next prefetches 256 bytes,
   and the kernels call it once per 256 bytes that they read: 64 bytes of each of four
   rows, that is, 16 elements in f32, 32 in bf16 or 64 in int8. (With SEQTX_DOUBLE, 16
   elements are 128 bytes, and half of them are prefetched.) */
typedef struct stx__row_prefetch {
    uintptr_t p, end;       /* next address to prefetch, and the end of its row */
    size_t stride, bytes;   /* row stride and row size, in bytes */
} stx__row_prefetch;

/* Starts prefetching rows of `bytes` bytes with a stride of `stride` bytes. Begins 4 to
   32 whole rows ahead: 8 to 16 KB for rows of 256 to 4096 bytes, and 4 rows for longer
   ones. Prefetches past the last row are harmless. */
STX_INNER stx__row_prefetch stx__row_prefetch_of(const void *rows, size_t stride, size_t bytes) {
    stx__row_prefetch a;
    size_t ahead = 32;      /* number of rows to prefetch ahead */
    if (bytes >= 512) ahead = 16;
    if (bytes >= 1024) ahead = 8;
    if (bytes >= 2048) ahead = 4;
    a.p = (uintptr_t)rows + ahead * stride;
    a.end = a.p + bytes;
    a.stride = stride;
    a.bytes = bytes;
    return a;
}

STX_INNER void stx__row_prefetch_next(stx__row_prefetch *a) {
#ifdef STX__PREFETCHES
    __builtin_prefetch((const void *)a->p);
    __builtin_prefetch((const void *)(a->p + 64));
    __builtin_prefetch((const void *)(a->p + 128));
    __builtin_prefetch((const void *)(a->p + 192));
#endif
    a->p += 256;
    if (a->p < a->end) return;
    /* continues with the next row; contiguous rows are prefetched as one */
    if (a->stride != a->bytes) a->p = a->end - a->bytes + a->stride;
    a->end += a->stride;
}

/* Finishes a dot product in 16 lanes s: adds the last n < 16 products, as if a and b
   continued with zeros, and returns the sum of the lanes. */
STX_INNER stx_real stx__dot_end(int fma, stx_real *s, const stx_real *a, const stx_real *b,
                                size_t n) {
    stx_real u[16] = {0}, v[16] = {0};
    size_t e;
    if (!n) return stx_fast_lanes(s);
    for (e = 0; e < n; e++) u[e] = a[e];
    for (e = 0; e < n; e++) v[e] = b[e];
    for (e = 0; e < 16; e++) s[e] = STX_FMA(fma, u[e], v[e], s[e]);
    return stx_fast_lanes(s);
}

/* Computes out[r] = a . (row r of b) for four rows. If `next` is not NULL, also
   prefetches the rows that it describes. */
STX_INNER void stx__dot4_ahead(int fma, stx_real *out, const stx_real *a, const stx_real *b,
                               size_t ldb, size_t k, stx__row_prefetch *next) {
    stx_real s0[16] = {0}, s1[16] = {0}, s2[16] = {0}, s3[16] = {0};
    const stx_real *b1 = b + ldb, *b2 = b + 2 * ldb, *b3 = b + 3 * ldb;
    size_t p, e;
    for (p = 0; p + 16 <= k; p += 16) {
        if (next) stx__row_prefetch_next(next);
        for (e = 0; e < 16; e++) s0[e] = STX_FMA(fma, a[p + e], b[p + e], s0[e]);
        for (e = 0; e < 16; e++) s1[e] = STX_FMA(fma, a[p + e], b1[p + e], s1[e]);
        for (e = 0; e < 16; e++) s2[e] = STX_FMA(fma, a[p + e], b2[p + e], s2[e]);
        for (e = 0; e < 16; e++) s3[e] = STX_FMA(fma, a[p + e], b3[p + e], s3[e]);
    }
    out[0] = stx__dot_end(fma, s0, a + p, b + p, k - p);
    out[1] = stx__dot_end(fma, s1, a + p, b1 + p, k - p);
    out[2] = stx__dot_end(fma, s2, a + p, b2 + p, k - p);
    out[3] = stx__dot_end(fma, s3, a + p, b3 + p, k - p);
}

/* Like stx__dot4_ahead, with a new prefetch per call. It starts where the prefetch of the
   previous four rows ended. */
STX_INNER void stx__dot4(int fma, stx_real *out, const stx_real *a, const stx_real *b, size_t ldb,
                         size_t k) {
    stx__row_prefetch next = stx__row_prefetch_of(b, ldb * sizeof *b, k * sizeof *b);
    stx__dot4_ahead(fma, out, a, b, ldb, k, &next);
}

/* Returns c + a0 b0 + a1 b1 + a2 b2 + a3 b3, added in this order. */
STX_INNER stx_real stx__add4(int fma, stx_real c, stx_real a0, stx_real b0, stx_real a1,
                             stx_real b1, stx_real a2, stx_real b2, stx_real a3, stx_real b3) {
    c = STX_FMA(fma, a0, b0, c);
    c = STX_FMA(fma, a1, b1, c);
    c = STX_FMA(fma, a2, b2, c);
    return STX_FMA(fma, a3, b3, c);
}

/* Adds a[r] times row r of b to c, for r = 0 .. 3. */
STX_INNER void stx__axpy4(int fma, stx_real *STX_RESTRICT c, const stx_real *a,
                          const stx_real *STX_RESTRICT b, size_t ldb, size_t n) {
    const stx_real a0 = a[0], a1 = a[1], a2 = a[2], a3 = a[3];
    const stx_real *STX_RESTRICT b1 = b + ldb;
    const stx_real *STX_RESTRICT b2 = b + 2 * ldb;
    const stx_real *STX_RESTRICT b3 = b + 3 * ldb;
    stx__row_prefetch next = stx__row_prefetch_of(b, ldb * sizeof *b, n * sizeof *b);
    size_t j, e;
    for (j = 0; j + 16 <= n; j += 16) {
        stx__row_prefetch_next(&next);
        for (e = j; e < j + 16; e++)
            c[e] = stx__add4(fma, c[e], a0, b[e], a1, b1[e], a2, b2[e], a3, b3[e]);
    }
    for (; j < n; j++) c[j] = stx__add4(fma, c[j], a0, b[j], a1, b1[j], a2, b2[j], a3, b3[j]);
}

/* Computes C += alpha A B^T as dot products with four rows of B at a time. */
STX_INNER void stx__gemv_dots(int fma, const stx_gemm_args *g) {
    size_t i, j, e;
    for (j = 0; j < g->N; j += 4) {
        const stx_real *b = g->B + j * g->ldb;
        const size_t n = STX_MIN((size_t)4, g->N - j);
        for (i = 0; i < g->M; i++) {
            const stx_real *a = g->A + i * g->lda;
            stx_real *c = g->C + i * g->ldc + j, t[8];
            if (n == 4)
                stx__dot4(fma, t, a, b, g->ldb, g->K);
            else /* stride 0: all four results are equal, and only the first is used */
                for (e = 0; e < n; e++) stx__dot4(fma, t + e, a, b + e * g->ldb, 0, g->K);
            for (e = 0; e < n; e++) c[e] += g->alpha * t[e];
        }
    }
}

/* The largest k per pass of the path SKINNY in f32. */
enum { STX__SKINNY_K = 512 };

/* The path SKINNY in f32, for processors without AVX-512, with the same order of sums as
   in stx__skinny_avx512. */
STX_INNER void stx__skinny_dots(int fma, const stx_gemm_args *g) {
    const size_t kc = stx__equal_blocks(g->K, STX__SKINNY_K, 16);
    stx_gemm_args pass = *g;
    size_t p, i, j;
    if (g->beta == 0)
        for (i = 0; i < g->M; i++)
            for (j = 0; j < g->N; j++) g->C[i * g->ldc + j] = 0;
    for (p = 0; p < g->K; p += kc) {
        pass.K = STX_MIN(kc, g->K - p);
        pass.A = g->A + p;
        pass.B = g->B + p;
        stx__gemv_dots(fma, &pass);
    }
}

STX_EACH_ISA(stx__skinny_dots, (const stx_gemm_args *g), g)

/* Computes C += alpha A^T B^T. No caller in the library needs this case to be fast. */
STX_INNER void stx__gemv_both(const stx_gemm_args *g) {
    size_t i, j, k;
    for (j = 0; j < g->N; j++)
        for (i = 0; i < g->M; i++) {
            stx_real s = 0;
            for (k = 0; k < g->K; k++) s += g->A[k * g->lda + i] * g->B[j * g->ldb + k];
            g->C[i * g->ldc + j] += g->alpha * s;
        }
}

/* Computes C += alpha op(A) B by adding four rows of B at a time. */
STX_INNER void stx__gemv_axpys(int fma, const stx_gemm_args *g) {
    size_t i, j, k, e;
    for (k = 0; k < g->K; k += 4) {
        const stx_real *b = g->B + k * g->ldb;
        const size_t n = STX_MIN((size_t)4, g->K - k);
        for (i = 0; i < g->M; i++) {
            stx_real *c = g->C + i * g->ldc, a[4] = {0};
            for (e = 0; e < n; e++)
                a[e] = g->alpha
                       * (g->ta ? g->A[(k + e) * g->lda + i] : g->A[i * g->lda + k + e]);
            if (n == 4) {
                stx__axpy4(fma, c, a, b, g->ldb, g->N);
                continue;
            }
            for (e = 0; e < n; e++)
                for (j = 0; j < g->N; j++) c[j] = STX_FMA(fma, a[e], b[e * g->ldb + j], c[j]);
        }
    }
}

/* Computes C = alpha op(A) op(B) + beta C for a C with few rows. If alpha is 0, A and B
   are not read. */
STX_INNER void stx__gemv(int fma, const stx_gemm_args *g) {
    stx__gemm_scale_c(g);
    if (g->alpha == 0) return;
    if (!g->tb)
        stx__gemv_axpys(fma, g);
    else if (!g->ta)
        stx__gemv_dots(fma, g);
    else
        stx__gemv_both(g);
}

STX_EACH_ISA(stx__gemv, (const stx_gemm_args *g), g)

/* Computes a C with few columns as the transpose of op(B)^T op(A)^T. Without the
   transposition, most of each strip would be padding. Each block of the transpose holds
   `rows` rows of C and is transposed back into C. The scratch memory holds the packed
   op(B)^T, strips of op(A)^T with KC units per row of C, and the block of the
   transpose. */
static void stx__gemm_transposed(const stx__gemm_part *p) {
    const stx_gemm_args *g = &p->g;
    const size_t space = (size_t)STX__SCRATCH - STX__MC * STX__KC;
    const size_t rows = stx__equal_blocks(g->M, space / (STX__KC + g->N), p->mk->nr);
    stx_real *t = p->scratch + STX__MC * STX__KC + stx__round_up(rows, p->mk->nr) * STX__KC;
    stx__gemm_part q = *p;
    size_t i, j, at;
    q.epilogue = NULL;
    q.g.ta = !g->tb;
    q.g.A = g->B;
    q.g.lda = g->ldb;
    q.g.tb = !g->ta;
    q.g.ldb = g->lda;
    q.g.M = g->N;
    q.g.C = t;
    q.g.beta = 0;
    for (at = 0; at < g->M; at += rows) {
        stx_real *c = g->C + at * g->ldc;
        q.g.B = g->A + (g->ta ? at : at * g->lda);
        q.g.N = q.g.ldc = STX_MIN(rows, g->M - at);
        /* GEMV reads op(A) in place, in f32. Without tb, q.g.ta is set, which GEMV
           computes slowly if q.g.tb is also set */
        if (g->N <= STX__GEMV_ROWS && p->mk->kr == 1 && g->tb)
            STX_CALL(p->x, stx__gemv, (&q.g));
        else
            stx__gemm_blocked(&q);
        for (i = 0; i < q.g.N; i++, c += g->ldc)
            for (j = 0; j < g->N; j++)
                c[j] = g->beta == 0 ? t[j * q.g.ldc + i] : g->beta * c[j] + t[j * q.g.ldc + i];
    }
    stx__part_epilogue(p, 0, 0, g->M, g->N);
}
