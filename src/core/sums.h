#pragma once
#include "../api/config.h"
#include "../api/context.h"
#include "../api/private.h"
#include "loops.h"
#include "maths.h"
#include "platform.h"


// >>shares, sums, fill, axpy, copy

/* Conventions for the loops of the simple kernels. The job of a loop is the kernel's args
   struct or another struct with the kernel's parameters. For an operation op, stx__op_n
   computes the formula in a plain loop over n elements or over one row.
   stx__sum_rows_n is an exception: it covers all rows of a few columns. stx__op_loop
   applies the formula to the elements or rows of a share. STX_LOOP compiles stx__op_loop
   for each instruction set and defines stx__op_loop_run, which calls the version for the
   processor. >>loops explains this and the argument `fma`. Arrays that do not overlap
   are STX_RESTRICT parameters of stx__op_n, because gcc honours restrict on parameters
   of inlined functions but not on local pointers. Loops that only move data are not
   compiled for each instruction set; they are plain functions stx__op_part. */

/* Loops over elements are divided into blocks of this many elements, and one block is an
   iteration for stx_parallel. A share consists of whole blocks; the last block of the
   array may be shorter. With one operation per element, the smallest chunk (16384
   operations) is four blocks. */
enum { STX__BLOCK_ELEMENTS = 4096 };

/* Returns the number of elements of an n-element array that belong to a share. *first
   receives the index of the first one. */
static size_t stx__share_of(const stx_share *s, size_t n, size_t *first) {
    *first = s->begin * STX__BLOCK_ELEMENTS;
    return STX_MIN(n, s->end * STX__BLOCK_ELEMENTS) - *first;
}

/* Runs a parallel loop over n elements. `part` must call stx__share_of. */
static void stx__for_elements(stx_ctx *x, size_t n, size_t work, stx_part part, const void *job) {
    stx_parallel(x, (n + STX__BLOCK_ELEMENTS - 1) / STX__BLOCK_ELEMENTS, work, part, job);
}

/* A sum over an array is divided into this many blocks, regardless of the number of
   threads. One thread sums each block, and then the block sums are added in order. The
   result therefore does not depend on the number of threads. 64 blocks are four chunks
   per thread for 16 threads. */
enum { STX__SUM_BLOCKS = 64 };

/* Returns the number of elements in block k of an array of n elements. *first receives
   the index of the first one. */
static size_t stx__sum_block(size_t n, size_t k, size_t *first) {
    const size_t each = (n + STX__SUM_BLOCKS - 1) / STX__SUM_BLOCKS;
    *first = STX_MIN(n, k * each);
    return STX_MIN(each, n - *first);
}

/* Runs `part`, which stores the sum of block k in sums[k], for all blocks. `part` gets
   `sums` from the job. Returns the total. */
static double stx__sum_blocks(stx_ctx *x, size_t work, stx_part part, const void *job,
                              double *sums) {
    STX__FP_SCOPE;
    double total = 0;
    int k;
    stx_parallel(x, STX__SUM_BLOCKS, work, part, job);
    for (k = 0; k < STX__SUM_BLOCKS; k++) total += sums[k];
    STX__FP_PIN(total);
    return total;
}

/* The arguments of a sum over one or two arrays of n elements. */
typedef struct stx__sum_job {
    size_t n;
    const stx_real *a, *b;      /* (n); b is NULL if there is only one array */
    double *sums;               /* (STX__SUM_BLOCKS): the sum of each block */
} stx__sum_job;

static double stx__sum_arrays(stx_ctx *x, stx_part part, const stx_real *a, const stx_real *b,
                              size_t n) {
    double sums[STX__SUM_BLOCKS];
    stx__sum_job j;
    j.n = n;
    j.a = a;
    j.b = b;
    j.sums = sums;
    return stx__sum_blocks(x, n, part, &j, sums);
}

/* Returns the sum of a[i] b[i], accumulated in float within runs of 256 elements and in
   double across runs. */
STX_INNER double stx__dot_n(int fma, const stx_real *a, const stx_real *b, size_t n) {
    double sum = 0;
    size_t i;
    for (i = 0; i < n; i += 256)
        sum += (double)stx_fast_dot(fma, a + i, b + i, STX_MIN((size_t)256, n - i));
    return sum;
}

STX_INNER void stx__dot_loop(int fma, const stx_share *s, const void *job) {
    const stx__sum_job *j = (const stx__sum_job *)job;
    size_t k, first, n;
    for (k = s->begin; k < s->end; k++) {
        n = stx__sum_block(j->n, k, &first);
        j->sums[k] = stx__dot_n(fma, j->a + first, j->b + first, n);
    }
}

STX_LOOP(stx__dot_loop)

/* Returns the sum of a[i], accumulated in double. */
STX_INNER double stx__sum_n(const stx_real *a, size_t n) {
    double lane[16] = {0}, sum = 0;
    size_t i, e;
    for (i = 0; i + 16 <= n; i += 16)
        for (e = 0; e < 16; e++) lane[e] += (double)a[i + e];
    for (; i < n; i++) sum += (double)a[i];
    for (e = 0; e < 16; e++) sum += lane[e];
    return sum;
}

STX_INNER void stx__sum_loop(int fma, const stx_share *s, const void *job) {
    const stx__sum_job *j = (const stx__sum_job *)job;
    size_t k, first, n;
    (void)fma;
    for (k = s->begin; k < s->end; k++) {
        n = stx__sum_block(j->n, k, &first);
        j->sums[k] = stx__sum_n(j->a + first, n);
    }
}

STX_LOOP(stx__sum_loop)

/* Returns the largest of n >= 1 elements. The result is unspecified if an element is NaN;
   callers that must propagate NaN do so through the exponentials. */
STX_INNER stx_real stx__max(const stx_real *a, size_t n) {
    stx_real lane[16], max = a[0];
    size_t i, e;
    for (e = 0; e < 16; e++) lane[e] = max;
    for (i = 0; i + 16 <= n; i += 16)
        for (e = 0; e < 16; e++) lane[e] = a[i + e] > lane[e] ? a[i + e] : lane[e];
    for (; i < n; i++) max = a[i] > max ? a[i] : max;
    for (e = 0; e < 16; e++) max = lane[e] > max ? lane[e] : max;
    return max;
}

/* The arguments of d (C) += the sum of the rows of dy (N,C). If f (N,C) is not NULL,
   the rows of the elementwise product dy f are summed instead. */
typedef struct stx__sum_rows_job {
    size_t N, C;
    stx_real *d;
    const stx_real *dy, *f;     /* f: NULL to sum the rows of dy */
} stx__sum_rows_job;

/* Adds the sums of w <= 64 adjacent columns to d (w). C is the row stride. Blocks of 64
   rows are summed separately, because this gives a smaller rounding error than one long
   sum. */
STX_INNER void stx__sum_rows_n(int fma, stx_real *STX_RESTRICT d, const stx_real *STX_RESTRICT dy,
                               const stx_real *STX_RESTRICT f, size_t N, size_t C, size_t w) {
    size_t first, n, c;
    for (first = 0; first < N; first += 64) {
        stx_real sum[64] = {0};
        for (n = first; n < STX_MIN(N, first + 64); n++) {
            const stx_real *a = dy + n * C, *b = f ? f + n * C : a;
            if (f)
                for (c = 0; c < w; c++) sum[c] = STX_FMA(fma, a[c], b[c], sum[c]);
            else
                for (c = 0; c < w; c++) sum[c] += a[c];
        }
        for (c = 0; c < w; c++) d[c] += sum[c];
    }
}

STX_INNER void stx__sum_rows_loop(int fma, const stx_share *s, const void *job) {
    const stx__sum_rows_job *j = (const stx__sum_rows_job *)job;
    size_t k;
    for (k = s->begin; k < s->end; k++) {
        const size_t c = 64 * k, w = STX_MIN((size_t)64, j->C - c);
        stx__sum_rows_n(fma, j->d + c, j->dy + c, j->f ? j->f + c : NULL, j->N, j->C, w);
    }
}

STX_LOOP(stx__sum_rows_loop)

/* One thread sums all rows of 64 columns, so that the result does not depend on the
   number of threads. With C <= 64, only one thread has work. */
static void stx__sum_rows(stx_ctx *x, stx_real *d, const stx_real *dy, const stx_real *f, size_t N,
                          size_t C) {
    stx__sum_rows_job j;
    j.N = N;
    j.C = C;
    j.d = d;
    j.dy = dy;
    j.f = f;
    stx_parallel(x, (C + 63) / 64, N * C, stx__sum_rows_loop_run, &j);
}

STX_DEF void stx_sum_rows(stx_ctx *x, stx_real *db, const stx_real *dy, size_t N, size_t C) {
    stx__sum_rows(x, db, dy, NULL, N, C);
}

typedef struct stx__fill_job {
    size_t n;
    stx_real *y, value;
} stx__fill_job;

STX_INNER void stx__fill_n(stx_real *y, size_t n, stx_real value) {
    size_t i;
    for (i = 0; i < n; i++) y[i] = value;
}

STX_INNER void stx__fill_loop(int fma, const stx_share *s, const void *job) {
    const stx__fill_job *j = (const stx__fill_job *)job;
    size_t first, n = stx__share_of(s, j->n, &first);
    (void)fma;
    stx__fill_n(j->y + first, n, j->value);
}

STX_LOOP(stx__fill_loop)

STX_DEF void stx_fill(stx_ctx *x, stx_real *y, size_t n, stx_real value) {
    stx__fill_job j;
    j.n = n;
    j.y = y;
    j.value = value;
    stx__for_elements(x, n, n, stx__fill_loop_run, &j);
}

typedef struct stx__axpy_job {
    size_t n;
    stx_real *y, s;
    const stx_real *a;
    int accumulate;
} stx__axpy_job;

/* y = s a, or y += s a */
STX_INNER void stx__axpy_n(int fma, stx_real *STX_RESTRICT y, const stx_real *STX_RESTRICT a,
                           size_t n, stx_real s, int accumulate) {
    size_t i;
    if (accumulate)
        for (i = 0; i < n; i++) y[i] = STX_FMA(fma, s, a[i], y[i]);
    else
        for (i = 0; i < n; i++) y[i] = s * a[i];
}

STX_INNER void stx__axpy_loop(int fma, const stx_share *s, const void *job) {
    const stx__axpy_job *j = (const stx__axpy_job *)job;
    size_t first, n = stx__share_of(s, j->n, &first);
    stx__axpy_n(fma, j->y + first, j->a + first, n, j->s, j->accumulate);
}

STX_LOOP(stx__axpy_loop)

STX_DEF void stx_axpy(stx_ctx *x, stx_real *y, const stx_real *a, size_t n, stx_real s,
                      int accumulate) {
    stx__axpy_job j;
    j.n = n;
    j.y = y;
    j.s = s;
    j.a = a;
    j.accumulate = accumulate;
    stx__for_elements(x, n, n, stx__axpy_loop_run, &j);
}

typedef struct stx__copy2d_job {
    stx_real *y;
    const stx_real *a;
    size_t ldy, lda, cols;
    int accumulate;
} stx__copy2d_job;

STX_INNER void stx__copy2d_loop(int fma, const stx_share *s, const void *job) {
    const stx__copy2d_job *j = (const stx__copy2d_job *)job;
    size_t r;
    for (r = s->begin; r < s->end; r++) {
        stx_real *to = j->y + r * j->ldy;
        const stx_real *from = j->a + r * j->lda;
        if (j->accumulate)
            stx__axpy_n(fma, to, from, j->cols, 1, 1);
        else
            memcpy(to, from, j->cols * sizeof *to);
    }
}

STX_LOOP(stx__copy2d_loop)

STX_DEF void stx_copy2d(stx_ctx *x, stx_real *y, size_t ldy, const stx_real *a, size_t lda,
                        size_t rows, size_t cols, int accumulate) {
    stx__copy2d_job j;
    j.y = y;
    j.ldy = ldy;
    j.a = a;
    j.lda = lda;
    j.cols = cols;
    j.accumulate = accumulate;
    stx_parallel(x, rows, rows * cols, stx__copy2d_loop_run, &j);
}

typedef struct stx__concat2d_job {
    stx_real *y;
    const stx_real *a, *b;
    size_t lda, wa, ldb, wb;
} stx__concat2d_job;

static void stx__concat2d_part(const stx_share *s, const void *job) {
    const stx__concat2d_job *j = (const stx__concat2d_job *)job;
    size_t r;
    for (r = s->begin; r < s->end; r++) {
        stx_real *to = j->y + r * (j->wa + j->wb);
        memcpy(to, j->a + r * j->lda, j->wa * sizeof *to);
        memcpy(to + j->wa, j->b + r * j->ldb, j->wb * sizeof *to);
    }
}

STX_DEF void stx_concat2d(stx_ctx *x, stx_real *y, const stx_real *a, size_t lda, size_t wa,
                          const stx_real *b, size_t ldb, size_t wb, size_t rows) {
    stx__concat2d_job j;
    j.y = y;
    j.a = a;
    j.b = b;
    j.lda = lda;
    j.wa = wa;
    j.ldb = ldb;
    j.wb = wb;
    stx_parallel(x, rows, rows * (wa + wb), stx__concat2d_part, &j);
}

typedef struct stx__shift2d_job {
    stx_real *y;
    const stx_real *a;
    size_t ldy, n, lda, w;
} stx__shift2d_job;

static void stx__shift2d_part(const stx_share *s, const void *job) {
    const stx__shift2d_job *j = (const stx__shift2d_job *)job;
    size_t r;
    for (r = s->begin; r < s->end; r++) {
        stx_real *row = j->y + r * j->ldy, *end = row + j->n - j->w;
        memmove(row, row + j->w, (j->n - j->w) * sizeof *row);
        if (j->a) memcpy(end, j->a + r * j->lda, j->w * sizeof *row);
    }
}

static void stx__shift2d(stx_ctx *x, stx_real *y, size_t ldy, size_t n, const stx_real *a,
                         size_t lda, size_t w, size_t rows) {
    stx__shift2d_job j;
    j.y = y;
    j.a = a;
    j.ldy = ldy;
    j.n = n;
    j.lda = lda;
    j.w = w;
    stx_parallel(x, rows, rows * n, stx__shift2d_part, &j);
}
