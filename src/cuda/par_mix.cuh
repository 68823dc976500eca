#pragma once
#include "common.cuh"
#include "wait.cuh"
#include "sums.cuh"
#include "layernorm.cuh"


// >>mix

#ifdef SEQTX_PAR_H
/* y = w0 Y0 + w1 Y1 + w2 h, where Yi = layernorm(h + branch_i), or Yi = h + branch_i if
   there are no gains (NORM = 0). See stx_par_mix_args. The forward pass sets y, mean
   and rstd, the backward pass the gradients. */
typedef struct stx__par_mix {
    size_t N, C, period, rows_per_draw, draws_per_period;
    float eps;
    int add_h, add[2];
    stx__array h, branch[2], gain[2], shift[2], y, dy, dh, dbranch[2];
    const float *w;
    float *mean[2], *rstd[2];
    double *work;
} stx__par_mix;

template <int S>
static __device__ __forceinline__ stx__par_mix stx__stored(const stx__par_mix &m) {
    stx__par_mix a = m;
    a.h = stx__stored<S>(a.h);
    a.y = stx__stored<S>(a.y);
    a.dy = stx__stored<S>(a.dy);
    a.dh = stx__stored<S>(a.dh);
  #pragma unroll
    for (int i = 0; i < 2; i++) {
        a.branch[i] = stx__stored<S>(a.branch[i]);
        a.dbranch[i] = stx__stored<S>(a.dbranch[i]);
        a.gain[i] = stx__stored_f32<S>(a.gain[i]);
        a.shift[i] = stx__stored_f32<S>(a.shift[i]);
    }
    return a;
}

static stx__par_mix stx__par_mix_of(stx_ctx *x, const stx_par_mix_args *a, int backward) {
    stx__par_mix m;
    int i;
    memset(&m, 0, sizeof m);
    m.N = a->N;
    m.C = a->C;
    m.period = a->period;
    m.rows_per_draw = a->rows_per_draw;
    m.draws_per_period = (a->period + a->rows_per_draw - 1) / a->rows_per_draw;
    m.eps = a->eps;
    m.h = stx__array_of(x, a->h);
    m.w = a->w;
    m.y = stx__array_of(x, backward ? NULL : a->y);
    m.dy = stx__array_of(x, backward ? a->dy : NULL);
    m.dh = stx__array_of(x, backward ? a->dh : NULL);
    m.add_h = a->add_h;
    m.work = backward && a->dw ? a->work : NULL;
    for (i = 0; i < 2; i++) {
        m.branch[i] = stx__array_of(x, a->branch[i]);
        m.gain[i] = stx__array_of(x, a->gain[i]);
        m.shift[i] = stx__array_of(x, a->shift[i]);
        m.mean[i] = a->mean[i];
        m.rstd[i] = a->rstd[i];
        m.dbranch[i] = stx__array_of(x, backward ? a->dbranch[i] : NULL);
        m.add[i] = a->add[i];
    }
    return m;
}

static int stx__par_mix_access(const stx__par_mix &m) {
    return stx__access(
        m.C, {m.h, m.y, m.dy, m.dh, m.branch[0], m.branch[1], m.dbranch[0], m.dbranch[1]},
        {m.gain[0], m.gain[1], m.shift[0], m.shift[1]});
}

static int stx__par_mix_refused(stx_ctx *x, const stx_par_mix_args *a, const char *what) {
    if (stx_ok(x) && (!a->period || !a->rows_per_draw))
        stx_fail(x, STX_ERR_SHAPE,
                 "%s: expected period and rows_per_draw to be at least 1, got %zu and %zu", what,
                 a->period, a->rows_per_draw);
    return !stx_ok(x);
}

/* Loads the weights of row n. */
static __device__ __forceinline__ void stx__par_weights(float (&w)[3], const stx__par_mix &a,
                                                        size_t n) {
    size_t k = n / a.period;
    size_t r = k * a.draws_per_period + (n - k * a.period) / a.rows_per_draw;
  #pragma unroll
    for (int i = 0; i < 3; i++) w[i] = a.w[3 * r + (size_t)i];
}

/* Adds w t to o if w is not 0. If w is 0, the branch was not selected, and its values
   must be ignored, because they may be NaN. Sums start from -0, because -0 + t is t bit
   for bit, even if t is -0. */
template <int W>
static __device__ __forceinline__ void stx__par_term(float (&o)[W], float w, const float (&t)[W]) {
    if (w != 0)
        for (int e = 0; e < W; e++) o[e] = fmaf(w, t[e], o[e]);
}

/* Loads W elements, starting at index i, of h and of the two sums h + branch_0 and
   h + branch_1. */
template <int W>
static __device__ __forceinline__ void stx__par_load_sums(float (&h)[W], float (&s)[2][W],
                                                          const stx__par_mix &a, size_t i) {
    stx__getn<W>(h, a.h, i);
    stx__getn<W>(s[0], a.branch[0], i);
    stx__getn<W>(s[1], a.branch[1], i);
    for (int e = 0; e < W; e++) {
        s[0][e] += h[e];
        s[1][e] += h[e];
    }
}

/* Computes the means and reciprocal standard deviations of a row of h + branch_i in
   registers, and subtracts the means from the row. */
template <int Q>
static __device__ __forceinline__ void stx__par_moments(float (&s)[Q][2][4], float (&m)[2],
                                                        float (&r)[2], size_t C, float eps) {
    const size_t lane = threadIdx.x % 32;
    float sum[2] = {0, 0};
  #pragma unroll
    for (int k = 0; k < Q; k++)
        for (int i = 0; i < 2; i++) sum[i] += (s[k][i][0] + s[k][i][1]) + (s[k][i][2] + s[k][i][3]);
  #pragma unroll
    for (int i = 0; i < 2; i++) {
        m[i] = stx__warp_sum(sum[i]) / (float)C;
        sum[i] = 0;
    }
  #pragma unroll
    for (int k = 0; k < Q; k++)
        if (4 * (lane + 32 * k) < C)
            for (int i = 0; i < 2; i++)
                for (int e = 0; e < 4; e++) {
                    s[k][i][e] -= m[i];
                    sum[i] = fmaf(s[k][i][e], s[k][i][e], sum[i]);
                }
  #pragma unroll
    for (int i = 0; i < 2; i++) r[i] = 1 / sqrtf(stx__warp_sum(sum[i]) / (float)C + eps);
}

/* Forward with layer norms, for C up to 128 Q. One warp per row; the row stays in
   registers, 4 Q elements per lane. The sums are bit-identical to those of
   stx__norm_fwd_kernel. A block has 256 threads and processes 8 rows. The bound on
   blocks per multiprocessor limits the longest rows to 128 registers. */
template <int Q, int S>
STX__GLOBAL(256, Q == 8 ? 2 : 0)
stx__par_mix_fwd_kernel(stx__par_mix mix) {
    const stx__par_mix a = stx__stored<S>(mix);
    const size_t lane = threadIdx.x % 32, C = a.C;
    STX__EACH_ROW(n, a.N, 32) {
        float h[Q][4], s[Q][2][4], w[3], m[2], r[2];
        stx__par_weights(w, a, n);
  #pragma unroll
        for (int k = 0; k < Q; k++) {
            size_t c = 4 * (lane + 32 * k);
            for (int e = 0; e < 4; e++) h[k][e] = s[k][0][e] = s[k][1][e] = 0;
            if (c < C) stx__par_load_sums<4>(h[k], s[k], a, n * C + c);
        }
        stx__par_moments<Q>(s, m, r, C, a.eps);
  #pragma unroll
        for (int k = 0; k < Q; k++) {
            size_t c = 4 * (lane + 32 * k);
            if (c < C) {
                float o[4] = {-0.0f, -0.0f, -0.0f, -0.0f};
  #pragma unroll
                for (int i = 0; i < 2; i++) {
                    float g[4], b[4];
                    stx__getn<4>(g, a.gain[i], c);
                    stx__getn<4>(b, a.shift[i], c);
                    for (int e = 0; e < 4; e++) s[k][i][e] = fmaf(s[k][i][e] * r[i], g[e], b[e]);
                    stx__par_term<4>(o, w[i], s[k][i]);
                }
                stx__par_term<4>(o, w[2], h[k]);
                for (int e = 0; e < 4; e++) h[k][e] = o[e];
            }
        }
        stx__put_quads<Q>(a.y, n * C, h, C);
        if (lane == 0)
            for (int i = 0; i < 2; i++) {
                a.mean[i][n] = m[i];
                a.rstd[i][n] = r[i];
            }
    }
}

/* Like stx__par_mix_fwd_kernel, for any C. A warp reads its row three times, mostly
   from the caches, or only once if there are no layer norms. */
template <int S, int NORM> STX__GLOBAL(256) stx__par_mix_fwd_any_kernel(stx__par_mix mix) {
    constexpr int W = stx__width<S>;
    const stx__par_mix a = stx__stored<S>(mix);
    const size_t lane = threadIdx.x % 32, C = a.C;
    STX__EACH_ROW(n, a.N, 32) {
        float h[W], s[2][W], w[3], sum[2] = {0, 0}, m[2] = {0, 0}, r[2] = {1, 1};
        stx__par_weights(w, a, n);
        if (NORM) {
            for (size_t c = lane * W; c < C; c += 32 * W) {
                stx__par_load_sums<W>(h, s, a, n * C + c);
                for (int i = 0; i < 2; i++)
                    for (int e = 0; e < W; e++) sum[i] += s[i][e];
            }
            for (int i = 0; i < 2; i++) {
                m[i] = stx__warp_sum(sum[i]) / (float)C;
                sum[i] = 0;
            }
            for (size_t c = lane * W; c < C; c += 32 * W) {
                stx__par_load_sums<W>(h, s, a, n * C + c);
                for (int i = 0; i < 2; i++)
                    for (int e = 0; e < W; e++)
                        sum[i] = fmaf(s[i][e] - m[i], s[i][e] - m[i], sum[i]);
            }
            for (int i = 0; i < 2; i++) r[i] = 1 / sqrtf(stx__warp_sum(sum[i]) / (float)C + a.eps);
        }
        for (size_t c = lane * W; c < C; c += 32 * W) {
            float o[W];
            for (int e = 0; e < W; e++) o[e] = -0.0f;
            stx__par_load_sums<W>(h, s, a, n * C + c);
  #pragma unroll
            for (int i = 0; i < 2; i++) {
                if (NORM) {
                    float g[W], b[W];
                    stx__getn<W>(g, a.gain[i], c);
                    stx__getn<W>(b, a.shift[i], c);
                    for (int e = 0; e < W; e++) s[i][e] = fmaf((s[i][e] - m[i]) * r[i], g[e], b[e]);
                }
                stx__par_term<W>(o, w[i], s[i]);
            }
            stx__par_term<W>(o, w[2], h);
            stx__putn<W>(a.y, n * C + c, o);
        }
        if (NORM && lane == 0)
            for (int i = 0; i < 2; i++) {
                a.mean[i][n] = m[i];
                a.rstd[i][n] = r[i];
            }
    }
}

template <int NORM> static void stx__par_mix_fwd(stx_ctx *x, const stx__par_mix &m) {
    const char *name = "stx_par_mix_fwd";
    const int access = stx__par_mix_access(m);
    unsigned grid = stx__blocks(m.N, 8, (size_t)1 << 20);
    if (NORM && access != STX__MIXED && m.C <= 1024)
        STX__CHOOSE(S, access, (STX__FLOATS, STX__HALVES),
                    STX__CHOOSE(Q, (m.C + 127) / 128, (1, 2, 4, 8),
                                STX__RUN_KERNEL(x, name, (stx__par_mix_fwd_kernel<Q, S>), grid, 256,
                                                0, m)));
    else
        STX__CHOOSE(S, access, (STX__FLOATS, STX__HALVES, STX__MIXED),
                    STX__RUN_KERNEL(x, name, (stx__par_mix_fwd_any_kernel<S, NORM>), grid, 256, 0,
                                    m));
}

void stx_par_mix_fwd_cuda(stx_ctx *x, const stx_par_mix_args *a) {
    if (!a->N || !a->C || stx__par_mix_refused(x, a, "stx_par_mix_fwd")) return;
    if (a->gain[0])
        stx__par_mix_fwd<1>(x, stx__par_mix_of(x, a, 0));
    else
        stx__par_mix_fwd<0>(x, stx__par_mix_of(x, a, 0));
}

/* The sums over a row that the backward pass requires. With d = dy gain_i and
   xi = h + branch_i - mean_i:

       [i]       sum d xi, so that sum dy Yi = rstd_i [i] + [5 + i]; without layer
                 norms, sum dy (h + branch_i)
       [2]       sum dy h
       [3 + i]   sum d
       [5 + i]   sum dy shift_i

   With k0 = mean d and k1 = rstd_i^2 mean (d xi), the gradients of a row are

       dsi = wi rstd_i (d - k0 - xi k1)       dh = w2 dy + ds0 + ds1 */
enum { STX__PAR_DOTS = 7 };

typedef struct stx__par_row {
    float w[3], m[2], r[2], k0[2], k1[2];
} stx__par_row;

template <int NORM>
static __device__ __forceinline__ stx__par_row stx__par_row_of(const stx__par_mix &a, size_t n) {
    stx__par_row q = {{0, 0, 0}, {0, 0}, {1, 1}, {0, 0}, {0, 0}};
    stx__par_weights(q.w, a, n);
  #pragma unroll
    for (int i = 0; i < 2 && NORM; i++) {
        q.m[i] = a.mean[i][n];
        q.r[i] = a.rstd[i][n];
    }
    return q;
}

/* Adds W elements of a row to its sums and, with NORM, replaces s by xi. */
template <int W, int NORM>
static __device__ __forceinline__ void stx__par_dots(float (&t)[STX__PAR_DOTS], float (&dy)[W],
                                                     float (&s)[2][W], const stx__par_mix &a,
                                                     const stx__par_row &q, size_t n, size_t c) {
    float h[W];
    stx__getn<W>(dy, a.dy, n * a.C + c);
    stx__par_load_sums<W>(h, s, a, n * a.C + c);
    for (int e = 0; e < W; e++) t[2] = fmaf(dy[e], h[e], t[2]);
  #pragma unroll
    for (int i = 0; i < 2; i++) {
        float g[W], b[W];
        if (!NORM) {
            for (int e = 0; e < W; e++) t[i] = fmaf(dy[e], s[i][e], t[i]);
            continue;
        }
        stx__getn<W>(g, a.gain[i], c);
        stx__getn<W>(b, a.shift[i], c);
        for (int e = 0; e < W; e++) {
            float d = dy[e] * g[e];
            s[i][e] -= q.m[i];
            t[i] = fmaf(d, s[i][e], t[i]);
            t[3 + i] += d;
            t[5 + i] = fmaf(dy[e], b[e], t[5 + i]);
        }
    }
}

/* Computes k0 and k1 from the complete sums, which all lanes hold. The thread whose
   `first` is nonzero stores the dot products of the row (dy with Y0, Y1 and h) in
   `work`. */
template <int NORM>
static __device__ __forceinline__ void stx__par_dots_end(stx__par_row &q,
                                                         const float (&t)[STX__PAR_DOTS],
                                                         const stx__par_mix &a, size_t n,
                                                         int first) {
  #pragma unroll
    for (int i = 0; i < 2; i++) {
        if (NORM) {
            q.k0[i] = t[3 + i] / (float)a.C;
            q.k1[i] = t[i] * q.r[i] * q.r[i] / (float)a.C;
        }
        if (a.work && first)
            a.work[3 * n + (size_t)i] = NORM ? (double)(t[i] * q.r[i]) + (double)t[5 + i]
                                             : (double)t[i];
    }
    if (a.work && first) a.work[3 * n + 2] = (double)t[2];
}

template <int W, int NORM>
static __device__ __forceinline__ void stx__par_grads(const float (&dy)[W], const float (&s)[2][W],
                                                      const stx__par_mix &a, const stx__par_row &q,
                                                      size_t n, size_t c) {
    float dh[W];
    for (int e = 0; e < W; e++) dh[e] = q.w[2] * dy[e];
  #pragma unroll
    for (int i = 0; i < 2; i++) {
        float d[W];
        if (NORM) {
            const float wr = q.w[i] * q.r[i];
            stx__getn<W>(d, a.gain[i], c);
            for (int e = 0; e < W; e++)
                d[e] = wr * (fmaf(dy[e], d[e], -q.k0[i]) - s[i][e] * q.k1[i]);
        } else {
            for (int e = 0; e < W; e++) d[e] = q.w[i] * dy[e];
        }
        for (int e = 0; e < W; e++) dh[e] += d[e];
        if (a.dbranch[i].p) stx__addn<W>(a.dbranch[i], n * a.C + c, d, a.add[i]);
    }
    if (a.dh.p) stx__addn<W>(a.dh, n * a.C + c, dh, a.add_h);
}

/* Adds the sums t of a row over the G warps that share it, and returns them in all
   lanes. Two sets of `dots` alternate, so that one barrier per row suffices. */
template <int G>
static __device__ __forceinline__ void stx__par_dots_share(float (&t)[STX__PAR_DOTS], float *dots,
                                                           int turn) {
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  #pragma unroll
    for (int i = 0; i < STX__PAR_DOTS; i++) {
        t[i] = stx__warp_sum(t[i]);
        if (G > 1 && lane == 0) dots[(turn * 4 + warp) * 8 + i] = t[i];
    }
    if (G > 1) {
        __syncthreads();
  #pragma unroll
        for (int i = 0; i < STX__PAR_DOTS; i++) {
            t[i] = 0;
            for (unsigned j = 0; j < G; j++) t[i] += dots[(turn * 4 + warp / G * G + j) * 8 + i];
        }
    }
}

/* Backward with layer norms. G warps share a row, which is read once and stays in
   registers. The sums over rows (dgain_0, dshift_0, dgain_1, dshift_1) are kept in
   registers too. A block of 4 warps processes `rows` rows, a number that depends on N
   alone, and stores their sums in `part` (blocks,4,C). C must be a multiple of 4 and at
   most 128 Q G. The launch bound of 2 blocks per multiprocessor allows 255 registers
   per thread. */
template <int Q, int G, int S>
STX__GLOBAL(128, 2)
stx__par_mix_bwd_kernel(stx__par_mix mix, float *part, size_t rows) {
    const stx__par_mix a = stx__stored<S>(mix);
    STX__SHARED(float, sh, 4 * 128 * Q);
    STX__SHARED(float, dots, 2 * 4 * 8);
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32,
                   c0 = warp % G * 128 * Q + 4 * lane;
    const size_t lo = blockIdx.x * rows, hi = lo + rows < a.N ? lo + rows : a.N;
    float sum[4][Q][4];
    int turn = 0;
  #pragma unroll
    for (int k = 0; k < Q; k++)
        for (int i = 0; i < 4; i++)
            for (int e = 0; e < 4; e++) sum[i][k][e] = 0;
    /* all warps run the same number of iterations, because they synchronise if G > 1 */
    for (size_t n0 = lo; n0 < hi; n0 += 4 / G) {
        const size_t n = n0 + warp / G;
        const unsigned C = n < hi ? (unsigned)a.C : 0;
        float dy[Q][4], s[Q][2][4], t[STX__PAR_DOTS] = {0};
        stx__par_row q = stx__par_row_of<1>(a, n < hi ? n : lo);
  #pragma unroll
        for (int k = 0; k < Q; k++) {
            unsigned c = c0 + 128 * (unsigned)k;
            if (c < C)
                stx__par_dots<4, 1>(t, dy[k], s[k], a, q, n, c);
            else
                for (int e = 0; e < 4; e++) dy[k][e] = s[k][0][e] = s[k][1][e] = 0;
        }
        stx__par_dots_share<G>(t, dots, turn);
        if (G > 1) turn ^= 1;
        if (n < hi) stx__par_dots_end<1>(q, t, a, n, lane == 0 && warp % G == 0);
  #pragma unroll
        for (int k = 0; k < Q; k++) {
            unsigned c = c0 + 128 * (unsigned)k;
            if (c < C) stx__par_grads<4, 1>(dy[k], s[k], a, q, n, c);
            for (int i = 0; i < 2; i++)
                for (int e = 0; e < 4; e++) {
                    float d = dy[k][e] * q.w[i];
                    sum[2 * i][k][e] = fmaf(d * q.r[i], s[k][i][e], sum[2 * i][k][e]);
                    sum[2 * i + 1][k][e] += d;
                }
        }
    }
    if (part) stx__column_sums_of_warps<4, Q, G>(part, a.C, sh, sum);
}

/* Backward for any C. A warp reads its row twice or, without layer norms, only dy
   twice. */
template <int S, int NORM> STX__GLOBAL(256) stx__par_mix_bwd_any_kernel(stx__par_mix mix) {
    constexpr int W = stx__width<S>;
    const stx__par_mix a = stx__stored<S>(mix);
    const size_t lane = threadIdx.x % 32;
    STX__EACH_ROW(n, a.N, 32) {
        stx__par_row q = stx__par_row_of<NORM>(a, n);
        float dy[W], s[2][W], t[STX__PAR_DOTS] = {0}, none[STX__PAR_DOTS] = {0};
        for (size_t c = lane * W; c < a.C; c += 32 * W)
            stx__par_dots<W, NORM>(t, dy, s, a, q, n, c);
  #pragma unroll
        for (int i = 0; i < (NORM ? STX__PAR_DOTS : 3); i++) t[i] = stx__warp_sum(t[i]);
        stx__par_dots_end<NORM>(q, t, a, n, lane == 0);
        for (size_t c = lane * W; c < a.C; c += 32 * W) {
            stx__par_dots<W, NORM>(none, dy, s, a, q, n, c);
            stx__par_grads<W, NORM>(dy, s, a, q, n, c);
        }
    }
}

/* Computes the sums over rows that stx__par_mix_bwd_any_kernel omits, for branch
   blockIdx.z, and stores them in `part` (chunks,4,C). */
template <int S>
STX__GLOBAL(256)
stx__par_mix_columns_kernel(stx__par_mix mix, float *part, size_t rows) {
    constexpr int W = stx__width<S>;
    STX__SHARED(float, sh, 8 * 32 * W);
    struct terms {
        float dy[W], h[W], v[W], m, r, w;
    };
    const stx__par_mix a = stx__stored<S>(mix);
    const size_t i = blockIdx.z, C = a.C;
    const stx__array branch = i ? a.branch[1] : a.branch[0];
    const float *mean = i ? a.mean[1] : a.mean[0], *rstd = i ? a.rstd[1] : a.rstd[0];
    stx__column_sums<2, W, 2>(
        part + 2 * i * C, 4 * C, a.N, C, rows, sh,
        [&](size_t n, size_t c) {
            terms t;
            float w[3];
            stx__par_weights(w, a, n);
            t.w = i ? w[1] : w[0];
            t.m = mean[n];
            t.r = rstd[n];
            stx__getn<W>(t.dy, a.dy, n * C + c);
            stx__getn<W>(t.h, a.h, n * C + c);
            stx__getn<W>(t.v, branch, n * C + c);
            return t;
        },
        [&](float (&s)[2][W], const terms &t, size_t, size_t) {
            for (int e = 0; e < W; e++) {
                float d = t.dy[e] * t.w;
                s[0][e] = fmaf(d * t.r, t.h[e] + t.v[e] - t.m, s[0][e]);
                s[1][e] += d;
            }
        });
}

/* Adds the dot products of each draw's rows to dw (draws,3). T threads per draw: each
   adds every T-th row, then a fixed tree adds the threads' sums. */
template <int T>
STX__GLOBAL(256)
stx__par_mix_dw_kernel(stx__array dw, const double *work, size_t draws, size_t N, size_t period,
                       size_t rows_per_draw, size_t draws_per_period) {
    STX__SHARED(double, sh, 32);
    STX__EACH_ROW(r, draws, T) {
        const size_t k = r / draws_per_period, next = (k + 1) * period, end = next < N ? next : N;
        const size_t lo = k * period + (r - k * draws_per_period) * rows_per_draw,
                     hi = end - lo > rows_per_draw ? lo + rows_per_draw : end;
        double s[3] = {0, 0, 0};
        for (size_t n = lo + threadIdx.x % T; n < hi; n += T)
            for (int i = 0; i < 3; i++) s[i] += work[3 * n + (size_t)i];
        for (int i = 0; i < 3; i++) {
            s[i] = stx__row_sum<T>(s[i], sh);
            if (threadIdx.x % T == 0) stx__add(dw, 3 * r + (size_t)i, (float)s[i], 1);
        }
    }
}

template <int NORM>
static void stx__par_mix_bwd(stx_ctx *x, const stx_par_mix_args *a, const stx__par_mix &m) {
    const char *name = "stx_par_mix_bwd";
    const size_t N = m.N, C = m.C, last = (N - 1) % m.period;
    const size_t draws = (N - 1) / m.period * m.draws_per_period + last / m.rows_per_draw + 1;
    const int access = stx__par_mix_access(m),
              fast = NORM && access != STX__MIXED && C <= 2048;
    const size_t rows = fast ? stx__chunk(N, 8, 512) : stx__chunk(N, 64, 1024),
                 blocks = (N + rows - 1) / rows;
    stx_real *to[4] = {a->dgain[0], a->dshift[0], a->dgain[1], a->dshift[1]};
    float *part = NULL;
    if (NORM && (to[0] || to[1] || to[2] || to[3])
        && !(part = (float *)stx__scratch_of(x, 4 * blocks * C * sizeof *part, name)))
        return;
    if (fast) {
        STX__CHOOSE(S, access, (STX__FLOATS, STX__HALVES),
                    STX__CHOOSE(QG, (C + 127) / 128, (1, 2, 4, 8, 16),
                                STX__RUN_KERNEL(x, name,
                                                (stx__par_mix_bwd_kernel<STX_MIN(QG, 4),
                                                                         (QG + 3) / 4, S>),
                                                (unsigned)blocks, 128, 0, m, part, rows)));
    } else {
        const dim3 grid((unsigned)blocks, stx__blocks(C, access == STX__MIXED ? 32 : 128, 65535),
                        2);
        const unsigned each = stx__blocks(N, 8, (size_t)1 << 20);
        STX__CHOOSE(S, access, (STX__FLOATS, STX__HALVES, STX__MIXED),
                    STX__RUN_KERNEL(x, name, (stx__par_mix_bwd_any_kernel<S, NORM>), each, 256, 0,
                                    m);
                    if (part) STX__RUN_KERNEL(x, name, stx__par_mix_columns_kernel<S>, grid, 256, 0,
                                              m, part, rows));
    }
    if (part) stx__columns_sum(x, name, to, 4, part, 4 * C, blocks, C, 0);
    if (a->dw)
        STX__CHOOSE(T, STX_MIN(m.rows_per_draw, m.period) <= 64 ? 32 : 256, (32, 256),
                    STX__RUN_KERNEL(x, name, stx__par_mix_dw_kernel<T>,
                                    stx__blocks(draws, 256 / T, (size_t)1 << 30), 256, 0,
                                    stx__array_of(x, a->dw), m.work, draws, N, m.period,
                                    m.rows_per_draw, m.draws_per_period));
}

void stx_par_mix_bwd_cuda(stx_ctx *x, const stx_par_mix_args *a) {
    if (!a->N || !a->C || stx__par_mix_refused(x, a, "stx_par_mix_bwd")) return;
    if (a->gain[0])
        stx__par_mix_bwd<1>(x, a, stx__par_mix_of(x, a, 1));
    else
        stx__par_mix_bwd<0>(x, a, stx__par_mix_of(x, a, 1));
}


// >>latency

/* Arguments of the loss with latency (see stx_par_latency_args). One thread computes this
   loss, so that the step does not wait for the host. The struct has no padding bytes. */
typedef struct stx__par_latency {
    double weight, target, power;
    size_t kind;
} stx__par_latency;

static stx__par_latency stx__par_latency_of(const stx_par_latency_args *a) {
    stx__par_latency p = {a->weight, a->target, a->power, (size_t)a->kind};
    return p;
}

STX__GLOBAL(32)
stx__par_latency_fwd_kernel(stx__array loss, stx__array nll, stx__array lat, stx__par_latency a) {
    const double v = (double)stx__get(lat, 0), n = (double)stx__get(nll, 0);
    if (a.kind == STX_PAR_LATENCY_FBNET) {
        double factor = v; /* NaN stays NaN */
        if (v > 1) factor = pow(log(v), a.power);
        if (v <= 1) factor = 0;
        stx__put(loss, 0, (float)(n * a.weight * factor));
    } else {
        double term = v;
        if (a.kind == STX_PAR_LATENCY_HINGE) {
            term = v / a.target - 1;
            if (term < 0) term = 0;
        }
        stx__put(loss, 0, (float)(n + a.weight * term));
    }
}

void stx_par_latency_fwd_cuda(stx_ctx *x, stx_real *loss, const stx_real *nll, const stx_real *lat,
                              const stx_par_latency_args *a) {
    if (!stx_ok(x)) return;
    STX__RUN_KERNEL(x, "stx_par_latency_fwd", stx__par_latency_fwd_kernel, 1, 1, 0,
                    stx__array_of(x, loss), stx__array_of(x, nll), stx__array_of(x, lat),
                    stx__par_latency_of(a));
}

STX__GLOBAL(32)
stx__par_latency_bwd_kernel(stx__array dnll, stx__array dlat, stx__array dloss, stx__array nll,
                            stx__array lat, stx__par_latency a) {
    double v = (double)stx__get(lat, 0), d = (double)stx__get(dloss, 0), by_nll = 1,
           by_lat = a.weight;
    if (a.kind == STX_PAR_LATENCY_HINGE) by_lat = v > a.target ? a.weight / a.target : 0;
    if (a.kind == STX_PAR_LATENCY_FBNET) {
        by_nll = v > 1 ? a.weight * pow(log(v), a.power) : 0;
        by_lat = v > 1
                     ? (double)stx__get(nll, 0) * a.weight * a.power * pow(log(v), a.power - 1) / v
                     : 0;
    }
    if (dnll.p) stx__add(dnll, 0, (float)(d * by_nll), 1);
    if (dlat.p) stx__add(dlat, 0, (float)(d * by_lat), 1);
}

void stx_par_latency_bwd_cuda(stx_ctx *x, stx_real *dnll, stx_real *dlat, const stx_real *dloss,
                              const stx_real *nll, const stx_real *lat,
                              const stx_par_latency_args *a) {
    if (!stx_ok(x)) return;
    STX__RUN_KERNEL(x, "stx_par_latency_bwd", stx__par_latency_bwd_kernel, 1, 1, 0,
                    stx__array_of(x, dnll), stx__array_of(x, dlat), stx__array_of(x, dloss),
                    stx__array_of(x, nll), stx__array_of(x, lat), stx__par_latency_of(a));
}
#endif /* SEQTX_PAR_H */
