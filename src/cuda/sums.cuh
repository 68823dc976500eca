#pragma once
#include "common.cuh"
#include "wait.cuh"


// >>shares, sums, fill, axpy, copy

/* These functions load, store or add W = 4 or 1 adjacent elements. W = 4 requires that
   all rows begin at aligned addresses and have lengths that are multiples of 4;
   otherwise the same code runs with W = 1. */
template <int W>
static __device__ __forceinline__ void stx__getn(float (&v)[W], const stx__array &a, size_t i) {
    if constexpr (W == 4) {
        float4 q = stx__get4(a, i);
        v[0] = q.x;
        v[1] = q.y;
        v[2] = q.z;
        v[3] = q.w;
    } else {
        v[0] = stx__get(a, i);
    }
}

template <int W>
static __device__ __forceinline__ void stx__putn(const stx__array &a, size_t i,
                                                 const float (&v)[W]) {
    if constexpr (W == 4)
        stx__put4(a, i, make_float4(v[0], v[1], v[2], v[3]));
    else
        stx__put(a, i, v[0]);
}

template <int W>
static __device__ __forceinline__ void stx__addn(const stx__array &a, size_t i, float (&v)[W],
                                                 int accumulate) {
    if (accumulate) {
        float was[W];
        stx__getn<W>(was, a, i);
        for (int e = 0; e < W; e++) v[e] += was[e];
    }
    stx__putn<W>(a, i, v);
}

/* A loop over i = 0, W, 2 W, .. below n, distributed over all threads of the grid. The
   grid may have fewer threads than the loop has iterations. */
#define STX__STEP(i, n, W) \
  for (size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * W; i < n; \
       i += (size_t)gridDim.x * blockDim.x * W)

/* Returns the number of blocks of 256 threads for a loop with this many iterations: at
   most two full waves on this GPU. Results do not depend on this number. */
static unsigned stx__grid(stx_ctx *x, size_t iterations) {
    return stx__blocks(iterations, 256, (size_t)stx__gpu(x)->sms * 16);
}

/* Launches a kernel<W> whose STX__STEP loop covers n elements, with W = 4 if `four` is
   nonzero and W = 1 otherwise. */
#define STX__RUN_BY(x, name, four, kernel, n, ...) \
  STX__CHOOSE(W, (four) ? 4 : 1, (1, 4), \
              STX__RUN_KERNEL(x, name, kernel<W>, stx__grid(x, (n) / W), 256, 0, __VA_ARGS__))

/* Column sums, first stage. The N rows are divided into at most 1024 chunks of `rows`
   rows. The number of chunks depends on N alone, so the result is the same on every GPU.
   The second stage adds the sums of the chunks.

   All threads of block (chunk, columns) call this function. It stores the chunk's sums
   of P terms per element in row `chunk` of `part` (chunks,ld), C sums per term. A block
   has 8 rows of 32 lanes; a lane sums W columns over every 8th row of the chunk, in
   order. The 8 sums of a column are then added in order. load(n, c) returns what is
   needed of row n and columns c to c + W - 1, and add(s, t, n, c) adds its terms to
   s[P][W]. A lane loads U rows before it adds the first one; near the end of the chunk,
   it loads row n instead of rows beyond the end. `sh` holds 8 * 32 * W floats. */
template <int P, int W, int U, class LOAD, class ADD>
static __device__ __forceinline__ void stx__column_sums(float *part, size_t ld, size_t N, size_t C,
                                                        size_t rows, float *sh, const LOAD &load,
                                                        const ADD &add) {
    const size_t lane = threadIdx.x % 32, row = threadIdx.x / 32, lo = blockIdx.x * rows,
                 hi = lo + rows < N ? lo + rows : N;
    for (size_t c0 = (size_t)blockIdx.y * 32 * W; c0 < C; c0 += (size_t)gridDim.y * 32 * W) {
        const size_t c = c0 + lane * W;
        float s[P][W] = {};
        for (size_t n = lo + row; c < C && n < hi; n += 8 * U) {
            decltype(load(n, c)) t[U];
#pragma unroll
            for (int j = 0; j < U; j++) t[j] = load(n + 8 * j < hi ? n + 8 * j : n, c);
#pragma unroll
            for (int j = 0; j < U; j++)
                if (n + 8 * j < hi) add(s, t[j], n + 8 * j, c);
        }
#pragma unroll
        for (int k = 0; k < P; k++) {
            for (int e = 0; e < W; e++) sh[(row * W + e) * 32 + lane] = s[k][e];
            __syncthreads();
            if (row < W && c < C) { /* thread row `row` finishes column c + row */
                float t = 0;
                for (int r = 0; r < 8; r++) t += sh[(r * W + row) * 32 + lane];
                part[blockIdx.x * ld + k * C + c + row] = t;
            }
            __syncthreads();
        }
    }
}

/* The same for kernels that keep rows in registers, with sums of a warp over its rows.
   G of the 4 warps of a block share a row, and lane l of the first one has the groups of
   4 columns l, l + 32, .. below 128 Q. Adds the sums of the warps in order, and stores
   them in row blockIdx.x of `part` (blocks,P C). `sh` holds 4 * 128 * Q floats. */
template <int P, int Q, int G>
static __device__ __forceinline__ void stx__column_sums_of_warps(float *part, size_t C, float *sh,
                                                                 const float (&s)[P][Q][4]) {
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int i = 0; i < P; i++) {
#pragma unroll
        for (int k = 0; k < Q; k++)
            for (int e = 0; e < 4; e++) sh[(warp * Q + k) * 128 + 4 * lane + e] = s[i][k][e];
        __syncthreads();
        for (size_t c = threadIdx.x; c < C; c += 128) {
            float v = 0;
            for (size_t j = c / (128 * Q); j < 4; j += G) v += sh[j * 128 * Q + c % (128 * Q)];
            part[(P * (size_t)blockIdx.x + i) * C + c] = v;
        }
        __syncthreads();
    }
}

/* Sums over the rows n of dy, f (N,C), mean and rstd (N), which are float:

       STX__COLUMNS_SUM      dy
       STX__COLUMNS_DOT      dy f
       STX__COLUMNS_NORM     dy (f - mean) rstd, and dy */
enum { STX__COLUMNS_SUM, STX__COLUMNS_DOT, STX__COLUMNS_NORM };

template <int S, int MODE>
STX__GLOBAL(256)
stx__columns_kernel(float *part, stx__array dy, stx__array f, const float *mean, const float *rstd,
                    size_t N, size_t C, size_t rows) {
    constexpr int W = stx__width<S>, P = MODE == STX__COLUMNS_NORM ? 2 : 1;
    STX__SHARED(float, sh, 8 * 32 * W);
    struct terms {
        float v[W], w[W], m, r;
    };
    dy = stx__stored<S>(dy);
    f = stx__stored<S>(f);
    stx__column_sums<P, W, 4>(
        part, P * C, N, C, rows, sh,
        [&](size_t n, size_t c) {
            terms t;
            stx__getn<W>(t.v, dy, n * C + c);
            if (MODE != STX__COLUMNS_SUM) stx__getn<W>(t.w, f, n * C + c);
            if (MODE == STX__COLUMNS_NORM) {
                t.m = mean[n];
                t.r = rstd[n];
            }
            return t;
        },
        [&](float (&s)[P][W], const terms &t, size_t, size_t) {
            for (int e = 0; e < W; e++) {
                if (MODE == STX__COLUMNS_SUM) s[0][e] += t.v[e];
                if (MODE == STX__COLUMNS_DOT) s[0][e] = fmaf(t.v[e], t.w[e], s[0][e]);
                if constexpr (MODE == STX__COLUMNS_NORM) {
                    s[0][e] = fmaf(t.v[e] * t.r, t.w[e] - t.m, s[0][e]);
                    s[1][e] += t.v[e];
                }
            }
        });
}

/* Deferred sums. The second stage does little work, but costs one launch per sum. The
   backward pass adds to the gradient of a parameter and does not read it, so the second
   stage of such a sum can wait until one launch finishes many sums. This happens when a
   table or a buffer of partial sums is full, before gradients are sent to other ranks,
   and when the tape has been traversed. An array's deferred sums are added in the same
   order as without deferral, but other kernels may add to the array before them. The
   order of all additions is fixed in either case.

   There are two tables: column sums, and the K slices of GEMMs (see >>gemm). */
enum { STX__DEFERRED_MAX = 24, STX__COLUMN_TARGETS = 3 };   /* sums per launch, and per
                                                               deferred call */
#ifndef CUDA_HOST
  #define STX__COLUMNS_BYTES ((size_t)32 << 20)
  #define STX__SLICES_BYTES  ((size_t)64 << 20)
#else
  #define STX__COLUMNS_BYTES ((size_t)1 << 17)
  #define STX__SLICES_BYTES  ((size_t)1 << 19)
#endif

/* d (C) += `part` (chunks,ld), summed over the chunks */
struct stx__column_sum {
    stx__array d;
    const float *part;
    size_t ld, chunks, C;
};

struct stx__column_sum_table {
    stx__column_sum s[STX__DEFERRED_MAX];
};

/* d (n) += the sum of the slices in `part`; slice k begins at part + k * stride */
struct stx__slice_sum {
    stx__array d;
    const float *part;
    size_t n, stride, slices;
};

struct stx__slice_sum_table {
    stx__slice_sum s[STX__DEFERRED_MAX];
};

struct stx__deferred_sums {
    int depth;              /* nesting depth of stx_cuda_defer_sums; 0: no deferral */
    int columns, slices;    /* numbers of pending sums in the tables */
    char *columns_buffer, *slices_buffer;   /* partial sums; allocated on first use */
    size_t columns_used, slices_used;       /* bytes used in each buffer */
    stx__column_sum_table column;
    stx__slice_sum_table slice;
};

/* Column sums, second stage: row y of the grid adds the chunks of sum y. A block of
   32 x 32 threads handles 32 columns. Each thread adds every 32nd chunk in order, then a
   warp adds the 32 sums of a column. */
STX__GLOBAL(1024) stx__columns_sum_kernel(stx__column_sum_table all) {
    STX__SHARED(float, sh, 32 * 33);
    const stx__column_sum &a = all.s[blockIdx.y];
    const size_t lane = threadIdx.x % 32, row = threadIdx.x / 32, C = a.C;
    for (size_t c0 = (size_t)blockIdx.x * 32; c0 < C; c0 += (size_t)gridDim.x * 32) {
        float s = 0;
        if (c0 + lane < C) {
#pragma unroll 8
            for (size_t k = row; k < a.chunks; k += 32) s += a.part[k * a.ld + c0 + lane];
        }
        sh[row * 33 + lane] = s;
        __syncthreads();
        s = stx__warp_sum(sh[lane * 33 + row]);
        if (lane == 0 && c0 + row < C) stx__add(a.d, c0 + row, s, 1);
        __syncthreads();
    }
}

static void stx__run_column_sums(stx_ctx *x, const char *name, const stx__column_sum_table *t,
                                 int count) {
    size_t most = 1;
    for (int k = 0; k < count; k++) most = STX_MAX(most, t->s[k].C);
    if (count)
        STX__RUN_KERNEL(x, name, stx__columns_sum_kernel,
                        dim3(stx__blocks(most, 32, 65535), (unsigned)count), 1024, 0, *t);
}

/* Finishes all deferred slice sums. Row y of the grid handles sum y and adds its slices
   in order. A thread handles W adjacent elements at a time. */
template <int W> STX__GLOBAL(256) stx__slice_sums_kernel(stx__slice_sum_table all) {
    const stx__slice_sum &s = all.s[blockIdx.y];
    const stx__array part = {(void *)s.part, NULL, 0};
    STX__STEP(i, s.n, W) {
        float v[W], w[W];
        stx__getn<W>(v, part, i);
#pragma unroll 4
        for (size_t k = 1; k < s.slices; k++) {
            stx__getn<W>(w, part, k * s.stride + i);
            for (int e = 0; e < W; e++) v[e] += w[e];
        }
        stx__addn<W>(s.d, i, v, 1);
    }
}

static void stx__finish_slices(stx_ctx *x) {
    struct stx__deferred_sums *t = stx__gpu(x)->deferred;
    size_t most = 1;
    int k, four = 1;
    if (!t || !t->slices) return;
    for (k = 0; k < t->slices; k++) {
        const stx__slice_sum *s = &t->slice.s[k];
        if (s->n > most) most = s->n;
        four = four && (s->n | s->stride) % 4 == 0 && stx__aligned4(s->d);
    }
    STX__CHOOSE(W, four ? 4 : 1, (1, 4),
                STX__RUN_KERNEL(x, "stx_backward, sums of slices", stx__slice_sums_kernel<W>,
                                dim3(stx__grid(x, most / W), (unsigned)t->slices), 256, 0,
                                t->slice));
    memset(&t->slice, 0, sizeof t->slice);
    t->slices = 0;
    t->slices_used = 0;
}

/* Finishes all deferred sums. */
static void stx__finish_sums(stx_ctx *x) {
    struct stx__deferred_sums *t = stx__gpu(x)->deferred;
    stx__finish_slices(x);
    if (!t || !t->columns) return;
    stx__run_column_sums(x, "stx_backward, sums of columns", &t->column, t->columns);
    memset(&t->column, 0, sizeof t->column);
    t->columns = 0;
    t->columns_used = 0;
}

/* Returns a buffer for partial sums. The buffer is allocated on first use, but never
   during a capture. If there is no buffer, returns NULL without setting an error. */
static char *stx__deferred_buffer(stx_gpu *g, char **buffer, size_t bytes) {
    if (*buffer || g->capturing) return *buffer;
    if (cudaMalloc((void **)buffer, bytes) == cudaSuccess) {
        g->bytes += bytes;
    } else {
        (void)cudaGetLastError();
        *buffer = NULL;
    }
    return *buffer;
}

/* Returns memory for n partial sums of the first stage, or sets an error and returns
   NULL. On entry, *deferred is nonzero if the second stage may be deferred; on return,
   it is nonzero if the second stage will be deferred. Pass the new value of *deferred
   to stx__columns_sum. If it is 0, the returned memory is scratch memory. */
static float *stx__partial_sums(stx_ctx *x, const char *name, size_t n, int *deferred) {
    stx_gpu *g = stx__use_gpu(x);
    struct stx__deferred_sums *t = g->deferred;
    const size_t bytes = (n * sizeof(float) + 255) / 256 * 256;
    *deferred = *deferred && stx_ok(x) && t && t->depth && bytes <= STX__COLUMNS_BYTES
            && stx__deferred_buffer(g, &t->columns_buffer, STX__COLUMNS_BYTES);
    if (!*deferred) return (float *)stx__scratch_of(x, n * sizeof(float), name);
    if (t->columns_used + bytes > STX__COLUMNS_BYTES
        || t->columns + STX__COLUMN_TARGETS > STX__DEFERRED_MAX)
        stx__finish_sums(x);
    t->columns_used += bytes;
    return (float *)(void *)(t->columns_buffer + t->columns_used - bytes);
}

/* Returns nonzero if the gradients a (n) and b (m) overlap, as two views of the same
   parameter may. */
static int stx__overlap(const stx_real *a, size_t n, const void *b, size_t m) {
    const uintptr_t p = (uintptr_t)a, q = (uintptr_t)b;
    return p && q && p < q + m * sizeof *a && q < p + n * sizeof *a;
}

/* Returns nonzero if any two of the gradients d[k] (C), k < count, overlap. */
static int stx__targets_overlap(stx_real *const *d, int count, size_t C) {
    for (int k = 0; k < count; k++)
        for (int j = 0; j < k; j++)
            if (stx__overlap(d[k], C, d[j], C)) return 1;
    return 0;
}

/* Returns nonzero if one of the targets d[k] (C), k < count, is the target of a pending
   sum. */
static int stx__targets_pending(const struct stx__deferred_sums *t, stx_real *const *d, int count,
                                size_t C) {
    for (int k = 0; k < count; k++)
        for (int j = 0; j < t->columns; j++)
            if (stx__overlap(d[k], C, t->column.s[j].d.p, t->column.s[j].C)) return 1;
    return 0;
}

/* For k < count, d[k] (C) += columns [k C, k C + C) of `part` (chunks,ld), summed over
   the chunks. d[k] may be NULL. `deferred` is the value that stx__partial_sums returned
   in *deferred. Targets that overlap are added to in order, and not deferred. */
static void stx__columns_sum(stx_ctx *x, const char *name, stx_real *const *d, int count,
                             const float *part, size_t ld, size_t chunks, size_t C, int deferred) {
    struct stx__deferred_sums *t = stx__gpu(x)->deferred;
    const int overlap = stx__targets_overlap(d, count, C),
              defer = deferred && !overlap && !stx__targets_pending(t, d, count, C);
    stx__column_sum_table now;
    int sums = 0;
    if (deferred && !defer) stx__finish_sums(x); /* pending sums must be added first */

    memset(&now, 0, sizeof now);
    for (int k = 0; k < count; k++) {
        if (!d[k]) continue;
        stx__column_sum *s = defer ? &t->column.s[t->columns++] : &now.s[sums++];
        s->d = stx__array_of(x, d[k]);
        s->part = part + k * C;
        s->ld = ld;
        s->chunks = chunks;
        s->C = C;
        if (overlap) {
            stx__run_column_sums(x, name, &now, 1);
            sums = 0;
        }
    }
    stx__run_column_sums(x, name, &now, sums);
}

/* Returns the number of rows per chunk: `least`, or a larger multiple of 8 if `least`
   would divide N rows into more than `most` chunks. */
static size_t stx__chunk(size_t N, size_t least, size_t most) {
    size_t rows = ((N + most - 1) / most + 7) / 8 * 8;
    return rows < least ? least : rows;
}

/* The launch of a kernel that calls stx__column_sums, for P terms of C columns */
typedef struct stx__column_launch {
    const char *name;
    size_t rows, chunks, ld;    /* rows per chunk; ld is P C */
    dim3 grid;
    int deferred;
    float *part;        /* (chunks,ld); NULL after an error */
} stx__column_launch;

static stx__column_launch stx__column_launch_of(stx_ctx *x, const char *name, size_t N, size_t C,
                                                size_t P, int access, int deferred) {
    stx__column_launch l;
    l.name = name;
    l.rows = stx__chunk(N, 64, 1024);
    l.chunks = (N + l.rows - 1) / l.rows;
    l.ld = P * C;
    l.grid = dim3((unsigned)l.chunks, stx__blocks(C, access == STX__MIXED ? 32 : 128, 65535));
    l.deferred = deferred;
    l.part = stx__partial_sums(x, name, l.chunks * l.ld, &l.deferred);
    return l;
}

/* The second stage, see stx__columns_sum */
static void stx__column_launch_end(stx_ctx *x, const stx__column_launch *l, stx_real *const *d,
                                   int count, size_t C) {
    stx__columns_sum(x, l->name, d, count, l->part, l->ld, l->chunks, C, l->deferred);
}

/* Column sums over N rows:
       d (C) += sum of dy                       with f and mean NULL
       d (C) += sum of dy f                     with mean NULL
       d (C) += sum of dy (f - mean) rstd, and d2 (C) += sum of dy, otherwise */
typedef struct stx__columns_args {
    stx_real *d, *d2;               /* d2 may be NULL; d may be NULL only if mean is not NULL */
    const stx_real *dy, *f;         /* (N,C) */
    const stx_real *mean, *rstd;    /* (N), float */
    size_t N, C;
    size_t padding;     /* number of trailing columns not added to d; if nonzero, mean must
                           be NULL */
    int deferred;       /* 1: d and d2 are parameter gradients, so the sums may be deferred */
} stx__columns_args;

/* Returns the arguments for d (C) += sum of dy (N,C); the other fields are 0. */
static stx__columns_args stx__columns_init(stx_real *d, const stx_real *dy, size_t N, size_t C) {
    stx__columns_args a;
    memset(&a, 0, sizeof a);
    a.d = d;
    a.dy = dy;
    a.N = N;
    a.C = C;
    return a;
}

static void stx__columns(stx_ctx *x, const char *name, const stx__columns_args *a) {
    const stx__array G = stx__array_of(x, a->dy), F = stx__array_of(x, a->f);
    const size_t N = a->N, C = a->C;
    const int access = stx__access(C, {G, F}, {}), P = a->mean ? 2 : 1;
    const int with_f = a->f ? STX__COLUMNS_DOT : STX__COLUMNS_SUM,
              mode = a->mean ? STX__COLUMNS_NORM : with_f;
    stx_real *to[2] = {a->d, a->d2};
    stx__column_launch l;
    if (!N || !C) return;
    l = stx__column_launch_of(x, name, N, C, P, access, a->deferred);
    if (!l.part) return;
    STX__CHOOSE(S, access, (STX__FLOATS, STX__HALVES, STX__MIXED),
                STX__CHOOSE(MODE, mode, (STX__COLUMNS_SUM, STX__COLUMNS_DOT, STX__COLUMNS_NORM),
                            STX__RUN_KERNEL(x, name, (stx__columns_kernel<S, MODE>), l.grid, 256, 0,
                                            l.part, G, F, a->mean, a->rstd, N, C, l.rows)));
    stx__column_launch_end(x, &l, to, P, C - a->padding);
}

/* db (C) += dy (N,C) summed over the rows, in two stages, see stx__columns */
void stx_sum_rows_cuda(stx_ctx *x, stx_real *db, const stx_real *dy, size_t N, size_t C) {
    stx__columns_args a = stx__columns_init(db, dy, N, C);
    stx__columns(x, "stx_sum_rows", &a);
}

/* A row of data is handled by T = 32, 256 or 1024 threads. With T = 32, each warp
   handles a row and a block has 8 warps; otherwise a block handles a row. In these
   kernels, STX__EACH_ROW is the loop over the rows n < N. */
#define STX__ROW_BLOCK(T) ((T) == 32 ? 256 : (T))
#define STX__EACH_ROW(n, N, T) \
  for (size_t n = (size_t)blockIdx.x * (STX__ROW_BLOCK(T) / T) + threadIdx.x / T; n < N; \
       n += (size_t)gridDim.x * (STX__ROW_BLOCK(T) / T))

/* Returns the sum or maximum over the T threads of a row, in all of these threads.
   Values are combined in a fixed tree: first the lanes of each warp, then the warps.
   `sh` is shared memory for 32 elements. */
template <int T, class F> static __device__ __forceinline__ F stx__row_sum(F v, F *sh) {
    if constexpr (sizeof v == 8)
        v = stx__warp_sum_f64(v);
    else
        v = stx__warp_sum(v);
    if constexpr (T > 32) {
        __syncthreads();
        if (threadIdx.x % 32 == 0) sh[threadIdx.x / 32] = v;
        __syncthreads();
        v = threadIdx.x % 32 < T / 32 ? sh[threadIdx.x % 32] : 0;
        if constexpr (sizeof v == 8)
            v = stx__warp_sum_f64(v);
        else
            v = stx__warp_sum(v);
    }
    return v;
}

template <int T> static __device__ __forceinline__ float stx__row_max(float v, float *sh) {
    v = stx__warp_max(v);
    if constexpr (T > 32) {
        __syncthreads();
        if (threadIdx.x % 32 == 0) sh[threadIdx.x / 32] = v;
        __syncthreads();
        v = stx__warp_max(sh[threadIdx.x % (T / 32)]);
    }
    return v;
}

/* y (1) = or += the sum of `part` (n), divided by the divisor. There is one block. Each
   thread adds every 1024th element in order, then the threads' sums are added in a
   fixed tree. */
STX__GLOBAL(1024)
stx__total_kernel(stx__array y, const double *part, size_t n, double divisor, int accumulate) {
    STX__SHARED(double, sh, 32);
    double s = 0;
#pragma unroll 8
    for (size_t i = threadIdx.x; i < n; i += 1024) s += part[i];
    s = stx__row_sum<1024>(s, sh);
    if (threadIdx.x == 0) stx__add(y, 0, (float)(s / divisor), accumulate);
}

/* The terms that stx__sum_kernel adds: `a`, (a - b)^2 or the product a b */
enum { STX__SUM, STX__SUM_SQUARES, STX__SUM_PRODUCTS };

template <int MODE> static __device__ __forceinline__ double stx__term(float a, float b) {
    if constexpr (MODE == STX__SUM) {
        return (double)a;
    } else if constexpr (MODE == STX__SUM_SQUARES) {
        double d = (double)a - (double)b;
        return d * d;
    } else {
        return (double)a * (double)b;
    }
}

/* `part` (chunks) = sums of the terms of `a` and b (n) over chunks of `each` elements,
   a multiple of 4. There is one block per chunk. Each thread adds every 256th group of
   4 elements (every 256th element if `four` is 0) in double, then the threads' sums are
   added in a fixed tree. */
template <int MODE>
STX__GLOBAL(256)
stx__sum_kernel(double *part, stx__array a, stx__array b, size_t n, size_t each, int four) {
    STX__SHARED(double, sh, 32);
    const size_t lo = blockIdx.x * each, hi = lo + each < n ? lo + each : n,
                 fours = four ? (hi - lo) / 4 : 0;
    double s = 0;
#pragma unroll 4
    for (size_t q = threadIdx.x; q < fours; q += 256) {
        float v[4], w[4] = {0};
        stx__getn<4>(v, a, lo + 4 * q);
        if (MODE) stx__getn<4>(w, b, lo + 4 * q);
        for (int e = 0; e < 4; e++) s += stx__term<MODE>(v[e], w[e]);
    }
    for (size_t i = lo + 4 * fours + threadIdx.x; i < hi; i += 256)
        s += stx__term<MODE>(stx__get(a, i), MODE ? stx__get(b, i) : 0);
    s = stx__row_sum<256>(s, sh);
    if (threadIdx.x == 0) part[blockIdx.x] = s;
}

/* y (1) = or += the sum of n terms, divided by the divisor. The sum is computed in two
   stages. The number of chunks, at most 2048, depends on n alone. b is NULL for
   STX__SUM. */
static void stx__sum_cuda(stx_ctx *x, const char *name, int mode, stx_real *y, const stx_real *a,
                          const stx_real *b, size_t n, double divisor, int accumulate) {
    stx__array Y = stx__array_of(x, y), A = stx__array_of(x, a), B = stx__array_of(x, b);
    const size_t each = stx__chunk(n, 4096, 2048), chunks = (n + each - 1) / each;
    const int four = stx__aligned4(A) && stx__aligned4(B);
    double *part;
    if (!n || !(part = (double *)stx__scratch_of(x, chunks * sizeof *part, name))) return;

    STX__CHOOSE(MODE, mode, (STX__SUM, STX__SUM_SQUARES, STX__SUM_PRODUCTS),
                STX__RUN_KERNEL(x, name, stx__sum_kernel<MODE>, (unsigned)chunks, 256, 0, part, A,
                                B, n, each, four));
    STX__RUN_KERNEL(x, name, stx__total_kernel, 1, 1024, 0, Y, part, chunks, divisor, accumulate);
}

/* y (n) = value. A thread writes W adjacent elements at a time. */
template <int W> STX__GLOBAL(256) stx__fill_kernel(stx__array y, size_t n, float value) {
    float v[W];
    for (int e = 0; e < W; e++) v[e] = value;
    STX__STEP(i, n, W) stx__putn<W>(y, i, v);
}

void stx_fill_cuda(stx_ctx *x, stx_real *y, size_t n, stx_real value) {
    stx__array Y = stx__array_of(x, y);
    if (n)
        STX__RUN_BY(x, "stx_fill", n % 4 == 0 && stx__aligned4(Y), stx__fill_kernel, n, Y, n,
                    value);
}

/* y (n) = s a (n), or y += s a. A thread computes W adjacent elements at a time. */
template <int W>
STX__GLOBAL(256)
stx__axpy_kernel(stx__array y, stx__array a, size_t n, float s, int accumulate) {
    STX__STEP(i, n, W) {
        float v[W];
        stx__getn<W>(v, a, i);
        if (accumulate) {
            float was[W];
            stx__getn<W>(was, y, i);
            for (int e = 0; e < W; e++) v[e] = fmaf(s, v[e], was[e]);
        } else {
            for (int e = 0; e < W; e++) v[e] *= s;
        }
        stx__putn<W>(y, i, v);
    }
}

void stx_axpy_cuda(stx_ctx *x, stx_real *y, const stx_real *a, size_t n, stx_real s,
                   int accumulate) {
    stx__array Y = stx__array_of(x, y), A = stx__array_of(x, a);
    const int four = n % 4 == 0 && stx__aligned4(Y) && stx__aligned4(A);
    if (n) STX__RUN_BY(x, "stx_axpy", four, stx__axpy_kernel, n, Y, A, n, s, accumulate);
}

/* y (rows,cols) = or += a (rows,cols), with row strides ldy and lda; n = rows * cols. A
   thread copies W adjacent elements of a row at a time. */
template <int W>
STX__GLOBAL(256)
stx__copy2d_kernel(stx__array y, size_t ldy, stx__array a, size_t lda, size_t n, size_t cols,
                   int accumulate) {
    STX__STEP(i, n, W) {
        size_t r = i / cols, c = i - r * cols;
        float v[W];
        stx__getn<W>(v, a, r * lda + c);
        stx__addn<W>(y, r * ldy + c, v, accumulate);
    }
}

void stx_copy2d_cuda(stx_ctx *x, stx_real *y, size_t ldy, const stx_real *a, size_t lda,
                     size_t rows, size_t cols, int accumulate) {
    stx__array Y = stx__array_of(x, y), A = stx__array_of(x, a);
    const size_t n = rows * cols, strides = rows > 1 ? ldy | lda : 0;
    const int four = (cols | strides) % 4 == 0 && stx__aligned4(Y) && stx__aligned4(A);
    if (n)
        STX__RUN_BY(x, "stx_copy2d", four, stx__copy2d_kernel, n, Y, ldy, A, lda, n, cols,
                    accumulate);
}

/* y (rows, wa + wb) = the rows of `a` (rows,wa) and of b (rows,wb), concatenated row by
   row; n = rows * (wa + wb). A thread copies W adjacent elements of a row at a time. */
template <int W>
STX__GLOBAL(256)
stx__concat2d_kernel(stx__array y, stx__array a, size_t lda, size_t wa, stx__array b, size_t ldb,
                     size_t wb, size_t n) {
    STX__STEP(i, n, W) {
        size_t r = i / (wa + wb), c = i - r * (wa + wb);
        float v[W];
        if (c < wa)
            stx__getn<W>(v, a, r * lda + c);
        else
            stx__getn<W>(v, b, r * ldb + (c - wa));
        stx__putn<W>(y, i, v);
    }
}

void stx_concat2d_cuda(stx_ctx *x, stx_real *y, const stx_real *a, size_t lda, size_t wa,
                       const stx_real *b, size_t ldb, size_t wb, size_t rows) {
    stx__array Y = stx__array_of(x, y), A = stx__array_of(x, a), B = stx__array_of(x, b);
    const size_t n = rows * (wa + wb), strides = rows > 1 ? lda | ldb : 0;
    const int four =
        (wa | wb | strides) % 4 == 0 && stx__aligned4(Y) && stx__aligned4(A) && stx__aligned4(B);
    if (n)
        STX__RUN_BY(x, "stx_concat2d", four, stx__concat2d_kernel, n, Y, A, lda, wa, B, ldb, wb, n);
}

/* Shifts each row of y (rows,n), with row stride ldy, left by w elements. Unless a.p is
   NULL, copies the row of `a` (rows,w) into the last w elements. A thread owns the
   elements c, c + w, c + 2 w, .. of a row, for W adjacent columns c. No other thread
   reads or writes them, so rows are shifted in place, in n / w sequential steps. `all`
   is rows * w. */
template <int W>
STX__GLOBAL(256)
stx__shift2d_kernel(stx__array y, size_t ldy, size_t n, stx__array a, size_t lda, size_t w,
                    size_t all) {
    STX__STEP(i, all, W) {
        /* elements at index `last` and later are copied from `a` */
        size_t r = i / w, at = r * ldy + (i - r * w), last = r * ldy + (n - w);
        float v[W], next[W];
        if (at < last) {
            stx__getn<W>(v, y, at + w);
            for (; at + w < last; at += w) {
                stx__getn<W>(next, y, at + 2 * w);
                stx__putn<W>(y, at, v);
                for (int e = 0; e < W; e++) v[e] = next[e];
            }
            stx__putn<W>(y, at, v);
            at += w;
        }
        if (!a.p) continue;
        stx__getn<W>(v, a, r * lda + (at - last));
        stx__putn<W>(y, at, v);
    }
}

void stx__shift2d_cuda(stx_ctx *x, stx_real *y, size_t ldy, size_t n, const stx_real *a,
                       size_t lda, size_t w, size_t rows) {
    stx__array Y = stx__array_of(x, y), A = stx__array_of(x, a);
    const size_t all = rows * w, stride_a = a ? lda : 0;
    const size_t strides = rows > 1 ? stride_a | ldy : 0;
    const int four = (w | strides | n) % 4 == 0 && stx__aligned4(Y) && stx__aligned4(A);
    if (all)
        STX__RUN_BY(x, "stx__shift2d", four, stx__shift2d_kernel, all, Y, ldy, n, A, lda, w, all);
}
