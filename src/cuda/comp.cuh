#pragma once
#include "common.cuh"
#include "wait.cuh"
#include "sums.cuh"


// >>groups

#ifdef SEQTX_COMPRESSIVE_H
/* Kernels for seqtx_compressive.h, with the letters defined there. They move rows and
   compute gates. Convolutions, and the attention in the losses, use the core's matmul and
   attention kernels.

   Row kernels use one warp per row and W adjacent elements per lane. The source of a
   row is computed once per row, and loads and stores cover whole cache lines. Blocks
   have 256 threads. The size of the grid is limited; STX__WARPS distributes n = 0 .. N-1
   over its warps. */
  #define STX__WARPS(n, N) \
    for (size_t n = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) / 32; n < N; \
         n += (size_t)gridDim.x * blockDim.x / 32)
  #define STX__RUN_WARPS(x, name, four, kernel, N, ...) \
    do { \
      if (four) \
        STX__RUN_KERNEL(x, name, kernel<4>, stx__grid(x, 32 * (N)), 256, 0, __VA_ARGS__); \
      else \
        STX__RUN_KERNEL(x, name, kernel<1>, stx__grid(x, 32 * (N)), 256, 0, __VA_ARGS__); \
    } while (0)

/* The rows and groups of a stream. Tap t of group i is row base + i * step + t, if this
   row is in [first,rows) and not marked in `pad`. `own` is G_b, the stream's number of
   groups. */
typedef struct stx__comp_stream {
    ptrdiff_t base, first;
    size_t own;
    const int32_t *pad;
} stx__comp_stream;

static __device__ __forceinline__ stx__comp_stream stx__comp_stream_of(const stx_comp_groups &g,
                                                                       size_t b) {
    stx__comp_stream s;
    s.base = g.at;
    s.first = 0;
    s.own = g.groups;
    s.pad = g.pad ? g.pad + b * g.rows : NULL;
    if (g.first) {
        s.first = g.first[b];
        s.own = (g.rows - (size_t)s.first + g.step - 1) / g.step;
        s.base += s.first + ((ptrdiff_t)s.own - (ptrdiff_t)g.groups) * (ptrdiff_t)g.step;
    }
    return s;
}

/* Returns the row of a tap, or -1 if it is missing. */
static __device__ __forceinline__ ptrdiff_t stx__comp_row(const stx_comp_groups &g,
                                                          const stx__comp_stream &s, size_t group,
                                                          size_t t) {
    ptrdiff_t row = s.base + (ptrdiff_t)(group * g.step + t);
    return row < s.first || row >= (ptrdiff_t)g.rows || (s.pad && s.pad[row]) ? -1 : row;
}

static int stx__comp_refused(stx_ctx *x, const stx_comp_groups *g, const char *what) {
    if (stx_ok(x) && !g->step)
        stx_fail(x, STX_ERR_SHAPE, "%s: step: expected at least 1 row between groups, got 0", what);
    return !stx_ok(x);
}

/* Returns a copy of *g in which a stride of 0 is replaced by the default, and sets
   *four to 1 if rows can be read four elements at a time, otherwise to 0. */
static stx_comp_groups stx__comp_strided(const stx_comp_groups *g, const stx__array &rows,
                                         int *four) {
    stx_comp_groups s = *g;
    if (!s.stride) s.stride = s.rows * s.D;
    *four = s.D % 4 == 0 && s.stride % 4 == 0 && stx__aligned4(rows);
    return s;
}

/* Sets each tap of y (B,groups,taps,D) to its row of `rows` (B,rows,D), or to 0 if that
   row is missing. With accumulate, adds to y instead. One warp per tap. */
template <int W>
STX__GLOBAL(256)
stx__comp_unfold_kernel(stx__array y, stx__array rows, stx_comp_groups g, int accumulate) {
    const size_t taps = g.groups * g.taps;
    STX__WARPS(n, g.B * taps) {
        size_t b = n / taps, in = n - b * taps, group = in / g.taps;
        ptrdiff_t row = stx__comp_row(g, stx__comp_stream_of(g, b), group, in - group * g.taps);
        if (row < 0 && accumulate) continue;
        for (size_t c = threadIdx.x % 32 * W; c < g.D; c += 32 * W) {
            float v[W] = {0};
            if (row >= 0) stx__getn<W>(v, rows, b * g.stride + (size_t)row * g.D + c);
            stx__addn<W>(y, n * g.D + c, v, accumulate);
        }
    }
}

void stx_comp_unfold_cuda(stx_ctx *x, stx_real *y, const stx_real *rows, const stx_comp_groups *g,
                          int accumulate) {
    stx__array Y = stx__array_of(x, y), R = stx__array_of(x, rows);
    size_t n = g->B * g->groups * g->taps;
    int four;
    const stx_comp_groups s = stx__comp_strided(g, R, &four);
    if (!n || !g->D || stx__comp_refused(x, g, "stx_comp_unfold")) return;
    STX__RUN_WARPS(x, "stx_comp_unfold", four && stx__aligned4(Y), stx__comp_unfold_kernel, n, Y, R,
                   s, accumulate);
}

/* Sets each row of `rows` (B,rows,D) to the sum of the taps of y (B,groups,taps,D) that
   refer to it, in ascending order of groups. Rows without taps and missing rows become 0.
   One warp per row, which first computes the range of groups that contain the row. */
template <int W>
STX__GLOBAL(256)
stx__comp_fold_kernel(stx__array rows, stx__array y, stx_comp_groups g) {
    STX__WARPS(n, g.B * g.rows) {
        size_t b = n / g.rows, row = n - b * g.rows;
        stx__comp_stream s = stx__comp_stream_of(g, b);
        /* in group i, the row is tap t = from - i * step */
        ptrdiff_t from = (ptrdiff_t)row - s.base, step = (ptrdiff_t)g.step,
                  before = from - (ptrdiff_t)g.taps;
        ptrdiff_t lo = before < 0 ? 0 : before / step + 1, hi = from < 0 ? -1 : from / step;
        if (hi >= (ptrdiff_t)g.groups) hi = (ptrdiff_t)g.groups - 1;
        if ((ptrdiff_t)row < s.first || (s.pad && s.pad[row])) hi = -1;
        for (size_t c = threadIdx.x % 32 * W; c < g.D; c += 32 * W) {
            float v[W] = {0}, w[W];
            for (ptrdiff_t i = lo; i <= hi; i++) {
                stx__getn<W>(w, y,
                             ((b * g.groups + (size_t)i) * g.taps + (size_t)(from - i * step)) * g.D
                                 + c);
                for (int e = 0; e < W; e++) v[e] += w[e];
            }
            stx__putn<W>(rows, n * g.D + c, v);
        }
    }
}

void stx_comp_fold_cuda(stx_ctx *x, stx_real *rows, const stx_real *y, const stx_comp_groups *g) {
    stx__array R = stx__array_of(x, rows), Y = stx__array_of(x, y);
    size_t n = g->B * g->rows;
    if (!n || !g->D || stx__comp_refused(x, g, "stx_comp_fold")) return;
    STX__RUN_WARPS(x, "stx_comp_fold", g->D % 4 == 0 && stx__aligned4(Y) && stx__aligned4(R),
                   stx__comp_fold_kernel, n, R, Y, *g);
}

/* Sets y (B,groups,D) to the mean (max = 0) or maximum (max = 1) of the rows of each
   group, per channel, or to 0 if all are missing. One warp per group; a lane processes
   the rows of its channels in chronological order. */
template <int W>
STX__GLOBAL(256)
stx__comp_pool_kernel(stx__array y, stx__array rows, stx_comp_groups g, int max) {
    STX__WARPS(n, g.B * g.groups) {
        size_t b = n / g.groups, group = n - b * g.groups;
        stx__comp_stream s = stx__comp_stream_of(g, b);
        for (size_t c = threadIdx.x % 32 * W; c < g.D; c += 32 * W) {
            float v[W] = {0}, w[W];
            size_t met = 0;
            for (size_t t = 0; t < g.taps; t++) {
                ptrdiff_t row = stx__comp_row(g, s, group, t);
                if (row < 0) continue;
                stx__getn<W>(w, rows, b * g.stride + (size_t)row * g.D + c);
                for (int e = 0; e < W; e++) {
                    if (!met || (max && (w[e] > v[e] || w[e] != w[e])))
                        v[e] = w[e];
                    else if (!max)
                        v[e] += w[e];
                }
                met++;
            }
            if (!max && met > 1)
                for (int e = 0; e < W; e++) v[e] /= (float)met;
            stx__putn<W>(y, n * g.D + c, v);
        }
    }
}

void stx_comp_pool_cuda(stx_ctx *x, stx_real *y, const stx_real *rows, const stx_comp_groups *g,
                        int max) {
    stx__array Y = stx__array_of(x, y), R = stx__array_of(x, rows);
    size_t n = g->B * g->groups;
    int four;
    const stx_comp_groups s = stx__comp_strided(g, R, &four);
    if (!n || !g->D || stx__comp_refused(x, g, "stx_comp_pool")) return;
    STX__RUN_WARPS(x, "stx_comp_pool", four && stx__aligned4(Y), stx__comp_pool_kernel, n, Y, R, s,
                   max);
}

/* Copies the G_b most used rows of stream b, in chronological order, to the last G_b
   rows of y (B,groups,D). The rows of y before them become 0.

   The first kernel sets `kept` (B,rows) to 1 for the most used rows and to 0 for the
   others. The rank of a row is the number of rows that precede it. Existing rows
   precede missing ones; among existing rows, more used rows come first, and newer rows
   precede older ones that are used equally. One thread per row; the usages of the other
   rows pass through shared memory, 256 at a time. */
static __device__ __forceinline__ float stx__comp_usage_of(const stx__array &usage, size_t i) {
    float all = stx__get(usage, i + 1);
    return all > 0 ? stx__get(usage, i) / all : 0;
}

STX__GLOBAL(256)
stx__comp_rank_kernel(int32_t *kept, stx__array usage, size_t usage_batch_stride, stx_comp_groups g,
                      size_t blocks) {
    STX__SHARED(float, used, 256);
    STX__SHARED(int32_t, lost, 256);
    for (size_t n = blockIdx.x; n < g.B * blocks; n += gridDim.x) {
        const size_t b = n / blocks, i = (n - b * blocks) * 256 + threadIdx.x;
        const stx__comp_stream s = stx__comp_stream_of(g, b);
        const float mine =
            i < g.rows ? stx__comp_usage_of(usage, b * usage_batch_stride + 2 * i) : 0;
        const int mine_lost = i < g.rows && s.pad && s.pad[i];
        size_t better = 0;
        for (size_t k0 = (size_t)s.first; k0 < g.rows; k0 += 256) {
            size_t left = g.rows - k0 < 256 ? g.rows - k0 : 256, k = k0 + threadIdx.x;
            if (k < g.rows) {
                used[threadIdx.x] = stx__comp_usage_of(usage, b * usage_batch_stride + 2 * k);
                lost[threadIdx.x] = s.pad && s.pad[k];
            }
            __syncthreads();
            for (size_t e = 0; e < left; e++) {
                float u = used[e];
                if (k0 + e == i) continue;
                if (lost[e] != mine_lost)
                    better += !lost[e];
                else if (mine_lost)
                    better += k0 + e < i;
                else
                    better += u > mine || (!(mine > u) && k0 + e > i);
            }
            __syncthreads();
        }
        if (i < g.rows) kept[b * g.rows + i] = i >= (size_t)s.first && better < s.own;
    }
}

/* The second kernel copies the m-th kept row to the m-th of the last G_b places in y.
   The kernel counts the kept rows 32 at a time. One warp per place. */
template <int W>
STX__GLOBAL(256)
stx__comp_pick_kernel(stx__array y, stx__array rows, const int32_t *kept, stx_comp_groups g) {
    const size_t lane = threadIdx.x % 32;
    STX__WARPS(n, g.B * g.groups) {
        size_t b = n / g.groups, place = n - b * g.groups, row = g.rows, k0, m;
        stx__comp_stream s = stx__comp_stream_of(g, b);
        if (place + s.own >= g.groups) {
            m = place + s.own - g.groups;
            for (k0 = 0; k0 < g.rows; k0 += 32) {
                uint32_t some = __ballot_sync(STX__ALL,
                                              k0 + lane < g.rows && kept[b * g.rows + k0 + lane]);
                size_t here = (size_t)__popc(some);
                if (m < here) {
                    for (; m; m--) some &= some - 1;
                    row = k0 + (size_t)__ffs((int)some) - 1;
                    break;
                }
                m -= here;
            }
        }
        if (row < g.rows && s.pad && s.pad[row]) row = g.rows;
        for (size_t c = lane * W; c < g.D; c += 32 * W) {
            float v[W] = {0};
            if (row < g.rows) stx__getn<W>(v, rows, b * g.stride + row * g.D + c);
            stx__putn<W>(y, n * g.D + c, v);
        }
    }
}

void stx_comp_pick_cuda(stx_ctx *x, stx_real *y, const stx_real *rows, const stx_real *usage,
                        size_t usage_batch_stride, const stx_comp_groups *g) {
    stx__array Y = stx__array_of(x, y), R = stx__array_of(x, rows), U = stx__array_of(x, usage);
    size_t n = g->B * g->groups, blocks = (g->rows + 255) / 256;
    int32_t *kept;
    int four;
    const stx_comp_groups s = stx__comp_strided(g, R, &four);
    if (!n || !g->D || stx__comp_refused(x, g, "stx_comp_pick")) return;
    if (!g->rows) {
        stx_fill_cuda(x, y, n * g->D, 0);
        return;
    }
    kept = (int32_t *)stx__scratch_of(x, g->B * g->rows * sizeof *kept, "stx_comp_pick");
    if (!kept) return;
    STX__RUN_KERNEL(x, "stx_comp_pick", stx__comp_rank_kernel,
                    stx__blocks(g->B * blocks, 1, (size_t)1 << 30), 256, 0, kept, U,
                    usage_batch_stride, *g, blocks);
    STX__RUN_WARPS(x, "stx_comp_pick", four && stx__aligned4(Y), stx__comp_pick_kernel, n, Y, R,
                   kept, s);
}


// >>usage

/* Adds the softmax weights of key `first` + j, summed over queries and averaged over
   heads, to usage[b][j][0], and the number of queries to usage[b][j][1]. Each weight is
   recomputed from its logit and the statistics of the row.

   The first kernel computes `part` (B,H,n), the sums over the queries of one head. A
   block processes 64 keys of a unit (batch row and head) and walks its queries, 64 at a
   time. A thread computes 4 x 4 logits; operands pass through shared memory, 16 channels
   at a time. A tile uses 127 adjacent rows of pe, indexed by (query - key) + 63; the 16
   logits of a thread use 7 of them. Each thread adds its queries in ascending order, then
   the sums of a key's 16 threads are added in order. The launch bound is 256 threads and
   3 blocks per multiprocessor, which allows 80 registers per thread. */
enum { STX__USAGE_TILE = 64, STX__USAGE_STEP = 16, STX__USAGE_POSITIONS = 2 * STX__USAGE_TILE };

typedef struct stx__comp_usage {
    stx__array q, k, pe, u, vb;
    const float *row_max, *inv_sum; /* (B,H,T) */
    const int32_t *pad;
    size_t T, S, H, D, P, q_row_stride, kv_row_stride, q_batch_stride, kv_batch_stride,
        pad_batch_stride, span, first, n, tiles;
    int delta_min, pe_heads;
    float scale;
} stx__comp_usage;

/* Loads channels c0 .. c0+15 of the tile's rows of pe to shared memory, one array per
   channel. d0 is the query-key distance of the first row. */
static __device__ __forceinline__ void stx__comp_usage_load_pe(const stx__comp_usage &p, float *ps,
                                                               size_t h, size_t c0, ptrdiff_t d0) {
    enum { LR = STX__USAGE_POSITIONS + 4 };

    for (int e = (int)threadIdx.x; e < STX__USAGE_POSITIONS * STX__USAGE_STEP; e += 256) {
        int d = e % STX__USAGE_STEP, r = e / STX__USAGE_STEP;
        size_t ch = c0 + (size_t)d;
        ptrdiff_t row = (ptrdiff_t)p.P - 1 + p.delta_min - (d0 + r);
        size_t at = p.pe_heads > 1 ? ((size_t)row * p.H + h) * p.D + ch : (size_t)row * p.D + ch;
        float v = 0;
        if (ch < p.D && row >= 0 && row < (ptrdiff_t)p.P) v = stx__get(p.pe, at);
        ps[d * LR + r] = v;
    }
}

/* Loads channels c0 .. c0+15 of the tile's queries (q + u, and with PE also q + vb),
   keys and, with PE, rows of pe. */
template <int PE>
static __device__ __forceinline__ void stx__comp_usage_load(const stx__comp_usage &p, float *qu,
                                                            float *qv, float *ks, float *ps,
                                                            size_t b, size_t h, size_t i0,
                                                            size_t j0, size_t c0, ptrdiff_t d0) {
    enum { LD = STX__USAGE_TILE + 4 };

    const int tid = (int)threadIdx.x;
    for (int e = tid; e < STX__USAGE_TILE * STX__USAGE_STEP; e += 256) {
        int d = e % STX__USAGE_STEP, r = e / STX__USAGE_STEP;
        size_t ch = c0 + (size_t)d, i = i0 + (size_t)r, j = j0 + (size_t)r;
        float q = 0, k = 0;
        if (ch < p.D && i < p.T)
            q = stx__get(p.q, b * p.q_batch_stride + i * p.q_row_stride + h * p.D + ch);
        if (ch < p.D && j < p.n)
            k = stx__get(p.k,
                         b * p.kv_batch_stride + (p.first + j) * p.kv_row_stride + h * p.D + ch);
        qu[d * LD + r] = p.u.p && ch < p.D ? q + stx__get(p.u, h * p.D + ch) : q;
        if (PE) qv[d * LD + r] = p.vb.p && ch < p.D ? q + stx__get(p.vb, h * p.D + ch) : q;
        ks[d * LD + r] = k;
    }
    if (PE) stx__comp_usage_load_pe(p, ps, h, c0, d0);
}

/* Adds the contribution of the loaded channels to a thread's 4 x 4 logits. */
template <int PE>
static __device__ __forceinline__ void stx__comp_usage_dots(float (&c)[4][4], const float *qu,
                                                            const float *qv, const float *ks,
                                                            const float *ps) {
    enum { LD = STX__USAGE_TILE + 4, LR = STX__USAGE_POSITIONS + 4 };

    const int tx = (int)threadIdx.x % 16, ty = (int)threadIdx.x / 16;
  #pragma unroll 4 /* allows 3 blocks per multiprocessor without spills */
    for (int d = 0; d < STX__USAGE_STEP; d++) {
        float a[4], k[4], v[4], w[7];
        for (int e = 0; e < 4; e++) {
            a[e] = qu[d * LD + 4 * ty + e];
            k[e] = ks[d * LD + 4 * tx + e];
        }
        if (PE) {
            for (int e = 0; e < 4; e++) v[e] = qv[d * LD + 4 * ty + e];
            for (int e = 0; e < 7; e++) w[e] = ps[d * LR + 4 * (ty - tx) + STX__USAGE_TILE - 4 + e];
        }
        for (int i = 0; i < 4; i++)
            for (int j = 0; j < 4; j++) {
                c[i][j] = fmaf(a[i], k[j], c[i][j]);
                if (PE) c[i][j] = fmaf(v[i], w[i - j + 3], c[i][j]);
            }
    }
}

/* Adds the softmax weights of a thread's 4 x 4 logits to sum[j], for queries that see
   the key. */
static __device__ __forceinline__ void stx__comp_usage_weights(const stx__comp_usage &p,
                                                               const float (&c)[4][4],
                                                               double (&sum)[4], size_t unit,
                                                               size_t b, size_t i0, size_t j0) {
    const int tx = (int)threadIdx.x % 16, ty = (int)threadIdx.x / 16;
    const int32_t *pad = p.pad ? p.pad + b * p.pad_batch_stride : NULL;
    for (int i = 0; i < 4; i++) {
        size_t query = i0 + (size_t)(4 * ty + i), here = p.S - p.T + query,
               row = unit * p.T + query;
        if (query >= p.T || (pad && pad[here])) continue;
        float row_max = p.row_max[row], inv_sum = p.inv_sum[row];
        for (int j = 0; j < 4; j++) {
            size_t key = p.first + j0 + (size_t)(4 * tx + j);
            if (key >= p.first + p.n || here - key > p.span || (pad && pad[key])) continue;
            sum[j] += (double)(expf(fmaf(c[i][j], p.scale, -row_max)) * inv_sum);
        }
    }
}

template <int PE>
STX__HOST_UNROLLED STX__GLOBAL(256, 3) stx__comp_usage_kernel(double *part, stx__comp_usage p) {
    enum { LD = STX__USAGE_TILE + 4, LR = STX__USAGE_POSITIONS + 4 };

    STX__SHARED(float, qu, STX__USAGE_STEP *LD);
    STX__SHARED(float, qv, PE ? STX__USAGE_STEP *LD : 4);
    STX__SHARED(float, ks, STX__USAGE_STEP *LD);
    STX__SHARED(float, ps, PE ? STX__USAGE_STEP *LR : 4);
    STX__SHARED(double, sums, 16 * STX__USAGE_TILE);
    const size_t unit = blockIdx.x / p.tiles, j0 = (blockIdx.x - unit * p.tiles) * STX__USAGE_TILE,
                 b = unit / p.H, h = unit - b * p.H;
    const int tid = (int)threadIdx.x, tx = tid % 16, ty = tid / 16;
    double sum[4] = {0};
    for (size_t i0 = 0; i0 < p.T; i0 += STX__USAGE_TILE) {
        /* distance of the tile's first row of pe */
        const ptrdiff_t d0 = (ptrdiff_t)(p.S - p.T + i0) - (ptrdiff_t)(p.first + j0)
                             - (STX__USAGE_TILE - 1);
        float c[4][4] = {{0}};
        for (size_t c0 = 0; c0 < p.D; c0 += STX__USAGE_STEP) {
            stx__comp_usage_load<PE>(p, qu, qv, ks, ps, b, h, i0, j0, c0, d0);
            __syncthreads();
            stx__comp_usage_dots<PE>(c, qu, qv, ks, ps);
            __syncthreads();
        }
        stx__comp_usage_weights(p, c, sum, unit, b, i0, j0);
    }
    for (int j = 0; j < 4; j++) sums[ty * STX__USAGE_TILE + 4 * tx + j] = sum[j];
    __syncthreads();
    if (tid < STX__USAGE_TILE && j0 + (size_t)tid < p.n) {
        double all = 0;
        for (int r = 0; r < 16; r++) all += sums[r * STX__USAGE_TILE + tid];
        part[unit * p.n + j0 + (size_t)tid] = all;
    }
}

/* The second kernel adds the sums over heads, in order, and the number of queries to
   usage. One thread per key; all threads of a block count the queries together. */
STX__GLOBAL(256)
stx__comp_usage_sum_kernel(stx__array usage, size_t usage_batch_stride, const double *part,
                           stx__comp_usage p, size_t B, size_t blocks) {
    STX__SHARED(double, sh, 32);
    for (size_t at = blockIdx.x; at < B * blocks; at += gridDim.x) {
        const size_t b = at / blocks, j = (at - b * blocks) * 256 + threadIdx.x;
        double queries = 0, all = 0;
        for (size_t i = threadIdx.x; i < p.T; i += 256)
            queries += !(p.pad && p.pad[b * p.pad_batch_stride + p.S - p.T + i]);
        queries = stx__row_sum<256>(queries, sh);
        if (j >= p.n) continue;
        for (size_t h = 0; h < p.H; h++) all += part[(b * p.H + h) * p.n + j];
        stx__add(usage, b * usage_batch_stride + 2 * j, (float)(all / (double)p.H), 1);
        stx__add(usage, b * usage_batch_stride + 2 * j + 1, (float)queries, 1);
    }
}

void stx_comp_usage_cuda(stx_ctx *x, stx_real *usage, size_t usage_batch_stride,
                         const stx_attention_args *a, size_t first, size_t n) {
    stx__comp_usage p;
    size_t blocks = (n + 255) / 256;
    double *part;
    if (!stx_ok(x) || !a->B || !a->H || !a->T || !n) return;
    if (a->span_fraction || a->eps > 0 || a->N || a->not_causal || a->S < a->T
        || first > a->S - a->T || n > a->S - a->T - first) {
        stx_fail(x, STX_ERR_ARG,
                 "stx_comp_usage: expected causal attention without learned spans, eps or "
                 "persistent vectors, and only keys before the last T = %zu of S = %zu, got %zu "
                 "keys from key %zu",
                 a->T, a->S, n, first);
        return;
    }
    memset(&p, 0, sizeof p);
    p.q = stx__array_of(x, a->q);
    p.k = stx__array_of(x, a->k);
    p.pe = stx__array_of(x, a->P ? a->pe : NULL);
    p.u = stx__array_of(x, a->content_bias);
    p.vb = stx__array_of(x, a->position_bias);
    p.row_max = (const float *)a->row_max;
    p.inv_sum = (const float *)a->inv_sum;
    p.pad = a->pad;
    p.T = a->T;
    p.S = a->S;
    p.H = a->H;
    p.D = a->D;
    p.P = a->P;
    p.q_row_stride = a->q_row_stride;
    p.kv_row_stride = a->kv_row_stride;
    p.q_batch_stride = a->q_batch_stride;
    p.kv_batch_stride = a->kv_batch_stride;
    p.pad_batch_stride = a->pad_batch_stride;
    p.span = a->span;
    p.first = first;
    p.n = n;
    p.tiles = (n + STX__USAGE_TILE - 1) / STX__USAGE_TILE;
    p.delta_min = a->delta_min;
    p.pe_heads = a->pe_heads;
    p.scale = (float)a->scale;
    part = (double *)stx__scratch_of(x, a->B * a->H * n * sizeof *part, "stx_comp_usage");
    if (!part) return;
    if (p.pe.p)
        STX__RUN_KERNEL(x, "stx_comp_usage", stx__comp_usage_kernel<1>,
                        (unsigned)(a->B * a->H * p.tiles), 256, 0, part, p);
    else
        STX__RUN_KERNEL(x, "stx_comp_usage", stx__comp_usage_kernel<0>,
                        (unsigned)(a->B * a->H * p.tiles), 256, 0, part, p);
    STX__RUN_KERNEL(x, "stx_comp_usage", stx__comp_usage_sum_kernel,
                    stx__blocks(a->B * blocks, 1, (size_t)1 << 30), 256, 0, stx__array_of(x, usage),
                    usage_batch_stride, part, p, a->B, blocks);
}
#endif /* SEQTX_COMPRESSIVE_H */
