#pragma once
#include "common.cuh"
#include "sums.cuh"
#include "elementwise.cuh"


// >>layernorm

/* Functions for kernels in which a warp keeps a row of C elements in registers. Lane l
   has the Q groups of 4 elements with indices l, l + 32, .. C is a multiple of 4 and at
   most 128 Q. `start` is the index of the row. All of a row's loads are issued before
   its first store, so that they are in flight together. */
template <int Q>
static __device__ __forceinline__ void stx__get_quads(float (&v)[Q][4], const stx__array &a,
                                                      size_t start, size_t C) {
    const size_t lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < Q; k++) {
        size_t c = 4 * (lane + 32 * k);
        for (int e = 0; e < 4; e++) v[k][e] = 0;
        if (c < C) stx__getn<4>(v[k], a, start + c);
    }
}

template <int Q>
static __device__ __forceinline__ void stx__put_quads(const stx__array &a, size_t start,
                                                      const float (&v)[Q][4], size_t C) {
    const size_t lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < Q; k++) {
        size_t c = 4 * (lane + 32 * k);
        if (c < C) stx__putn<4>(a, start + c, v[k]);
    }
}

/* Adds v to the row if `accumulate` is nonzero, and stores it otherwise. */
template <int Q>
static __device__ __forceinline__ void stx__add_quads(const stx__array &a, size_t start,
                                                      float (&v)[Q][4], size_t C, int accumulate) {
    if (accumulate) {
        float was[Q][4];
        stx__get_quads<Q>(was, a, start, C);
#pragma unroll
        for (int k = 0; k < Q; k++)
            for (int e = 0; e < 4; e++) v[k][e] += was[k][e];
    }
    stx__put_quads<Q>(a, start, v, C);
}

/* Returns v as it will be read back from `a`: rounded to bfloat16 if `a` stores bfloat16.
   Statistics are computed from this value, because the backward pass reads it. */
static __device__ __forceinline__ float stx__as_stored(const stx__array &a, float v) {
    return a.half ? __bfloat162float(__float2bfloat16(v)) : v;
}

/* Arrays of the forward kernels: y, s, `in` and f are (N,C); bias, gain and shift are
   (C); mean and rstd are (N) and float. s, f and bias are used only with RESIDUAL; bias.p
   may be NULL. */
struct stx__norm_fwd_nums {
    stx__array y, s, in, f, bias, gain, shift;
    float *mean, *rstd;
};

template <int S>
static __device__ __forceinline__ stx__norm_fwd_nums stx__stored(const stx__norm_fwd_nums &n) {
    return {stx__stored<S>(n.y), stx__stored<S>(n.s), stx__stored<S>(n.in), stx__stored<S>(n.f),
            stx__stored_f32<S>(n.bias), stx__stored_f32<S>(n.gain), stx__stored_f32<S>(n.shift),
            n.mean, n.rstd};
}

/* y (N,C) = layernorm(s), where s = in or, with RESIDUAL, in + dropout(f + bias):

       mean = sum_c s / C
       rstd = 1 / sqrt(sum_c (s - mean)^2 / C + eps)
       y    = (s - mean) rstd gain + shift

   A warp handles a row and keeps it in registers. Each lane adds its groups in order,
   then the warp adds its lanes' sums. */
template <int Q, int RESIDUAL, int S>
STX__GLOBAL(256)
stx__norm_fwd_kernel(stx__norm_fwd_nums nums, size_t N, size_t C, float eps, stx__dropout d) {
    const stx__norm_fwd_nums a = stx__stored<S>(nums);
    const size_t lane = threadIdx.x % 32;
    uint64_t stream = RESIDUAL && d.keep ? stx__dropout_stream(d) : 0;
    for (size_t n = (size_t)blockIdx.x * 8 + threadIdx.x / 32; n < N; n += (size_t)gridDim.x * 8) {
        float v[Q][4], sum = 0, m, r;
        stx__get_quads<Q>(v, a.in, n * C, C);
        if constexpr (RESIDUAL) {
            float u[Q][4];
            stx__get_quads<Q>(u, a.f, n * C, C);
#pragma unroll
            for (int k = 0; k < Q; k++) {
                size_t c = 4 * (lane + 32 * k);
                if (c < C) {
                    float by[4] = {1, 1, 1, 1};
                    if (a.bias.p) {
                        float b[4];
                        stx__getn<4>(b, a.bias, c);
                        for (int e = 0; e < 4; e++) u[k][e] += b[e];
                    }
                    if (d.keep) stx__dropout_mask<4>(by, d, stream, n * C + c);
                    for (int e = 0; e < 4; e++)
                        v[k][e] = stx__as_stored(a.s, u[k][e] * by[e] + v[k][e]);
                }
            }
            stx__put_quads<Q>(a.s, n * C, v, C);
        }

#pragma unroll
        for (int k = 0; k < Q; k++) sum += (v[k][0] + v[k][1]) + (v[k][2] + v[k][3]);
        m = stx__warp_sum(sum) / (float)C;
        sum = 0;
#pragma unroll
        for (int k = 0; k < Q; k++)
            if (4 * (lane + 32 * k) < C)
                for (int e = 0; e < 4; e++) {
                    v[k][e] -= m;
                    sum = fmaf(v[k][e], v[k][e], sum);
                }
        r = 1 / sqrtf(stx__warp_sum(sum) / (float)C + eps);

#pragma unroll
        for (int k = 0; k < Q; k++) {
            size_t c = 4 * (lane + 32 * k);
            if (c < C) {
                float g[4], b[4];
                stx__getn<4>(g, a.gain, c);
                stx__getn<4>(b, a.shift, c);
                for (int e = 0; e < 4; e++) v[k][e] = fmaf(v[k][e] * r, g[e], b[e]);
            }
        }
        stx__put_quads<Q>(a.y, n * C, v, C);
        if (lane == 0) {
            a.mean[n] = m;
            a.rstd[n] = r;
        }
    }
}

/* Like stx__norm_fwd_kernel, for any C. A warp reads its row three times, the second
   and third time from the caches. A lane reads back only what it wrote itself. This is
   a separate kernel because its lanes add single elements instead of groups of 4. */
template <int S, int RESIDUAL>
STX__GLOBAL(256)
stx__norm_fwd_any_kernel(stx__norm_fwd_nums nums, size_t N, size_t C, float eps, stx__dropout d) {
    constexpr int W = stx__width<S>;
    const stx__norm_fwd_nums a = stx__stored<S>(nums);
    const size_t lane = threadIdx.x % 32;
    uint64_t stream = RESIDUAL && d.keep ? stx__dropout_stream(d) : 0;
    for (size_t n = (size_t)blockIdx.x * 8 + threadIdx.x / 32; n < N; n += (size_t)gridDim.x * 8) {
        float sum = 0, m, r, v[W];
        for (size_t c = lane * W; c < C; c += 32 * W) {
            stx__getn<W>(v, a.in, n * C + c);
            if (RESIDUAL) {
                float u[W], by[W];
                stx__getn<W>(u, a.f, n * C + c);
                if (a.bias.p) {
                    float b[W];
                    stx__getn<W>(b, a.bias, c);
                    for (int e = 0; e < W; e++) u[e] += b[e];
                }
                for (int e = 0; e < W; e++) by[e] = 1;
                if (d.keep) stx__dropout_mask<W>(by, d, stream, n * C + c);
                for (int e = 0; e < W; e++) v[e] = stx__as_stored(a.s, u[e] * by[e] + v[e]);
                stx__putn<W>(a.s, n * C + c, v);
            }
            for (int e = 0; e < W; e++) sum += v[e];
        }
        m = stx__warp_sum(sum) / (float)C;
        sum = 0;
        for (size_t c = lane * W; c < C; c += 32 * W) {
            stx__getn<W>(v, RESIDUAL ? a.s : a.in, n * C + c);
            for (int e = 0; e < W; e++) sum = fmaf(v[e] - m, v[e] - m, sum);
        }
        r = 1 / sqrtf(stx__warp_sum(sum) / (float)C + eps);
        for (size_t c = lane * W; c < C; c += 32 * W) {
            float g[W], b[W];
            stx__getn<W>(v, RESIDUAL ? a.s : a.in, n * C + c);
            stx__getn<W>(g, a.gain, c);
            stx__getn<W>(b, a.shift, c);
            for (int e = 0; e < W; e++) v[e] = fmaf((v[e] - m) * r, g[e], b[e]);
            stx__putn<W>(a.y, n * C + c, v);
        }
        if (lane == 0) {
            a.mean[n] = m;
            a.rstd[n] = r;
        }
    }
}

template <int RESIDUAL>
static void stx__norm_fwd(stx_ctx *x, const stx_residual_norm_args *a) {
    const char *name = "stx_residual_norm_fwd";
    const size_t N = a->N, C = a->C;
    const float eps = a->eps;
    const unsigned grid = stx__blocks(N, 8, (size_t)1 << 20);
    stx__dropout d = stx__dropout_of(x, a->drop, a->seed, a->stream, a->rng_first);
    stx__norm_fwd_nums v;
    int access;
    v.y = stx__array_of(x, a->y);
    v.s = stx__array_of(x, a->s);
    v.in = stx__array_of(x, a->h);
    v.f = stx__array_of(x, a->f);
    v.bias = stx__array_of(x, a->bias);
    v.gain = stx__array_of(x, a->gain);
    v.shift = stx__array_of(x, a->shift);
    v.mean = a->mean;
    v.rstd = a->rstd;
    if (!N || !C) return;

    access = stx__access(C, {v.y, v.s, v.in, v.f}, {v.bias, v.gain, v.shift});
    if (access != STX__MIXED && C <= 1024)
        STX__CHOOSE(S, access, (STX__FLOATS, STX__HALVES),
                    STX__CHOOSE(Q, (C + 127) / 128, (1, 2, 4, 8),
                                STX__RUN_KERNEL(x, name, (stx__norm_fwd_kernel<Q, RESIDUAL, S>),
                                                grid, 256, 0, v, N, C, eps, d)));
    else
        STX__CHOOSE(S, access, (STX__FLOATS, STX__HALVES, STX__MIXED),
                    STX__RUN_KERNEL(x, name, (stx__norm_fwd_any_kernel<S, RESIDUAL>), grid, 256, 0,
                                    v, N, C, eps, d));
}

/* s = h + dropout(f + bias) ; y = layernorm(s). If f is NULL, y = layernorm(h). */
void stx_residual_norm_fwd_cuda(stx_ctx *x, const stx_residual_norm_args *a) {
    if (a->f)
        stx__norm_fwd<1>(x, a);
    else
        stx__norm_fwd<0>(x, a);
}

/* Arrays of the backward kernels: din, df, dy and `in` are (N,C), gain is (C), and mean
   and rstd are (N) and float. din and df may be NULL. If add_din or add_df is nonzero,
   the kernels add to din or df instead of overwriting it. */
struct stx__norm_bwd_nums {
    stx__array din, df, dy, in, gain;
    const float *mean, *rstd;
    int add_din, add_df;
};

template <int S>
static __device__ __forceinline__ stx__norm_bwd_nums stx__stored(const stx__norm_bwd_nums &n) {
    return {stx__stored<S>(n.din), stx__stored<S>(n.df), stx__stored<S>(n.dy), stx__stored<S>(n.in),
            stx__stored_f32<S>(n.gain), n.mean, n.rstd, n.add_din, n.add_df};
}

/* Gradients of y = xhat gain + shift, where xhat = (in - mean) rstd. With g = dy gain:

       din    = or += rstd (g - mean_c(g) - xhat mean_c(g xhat))
       dgain  += sum_n dy xhat
       dshift += sum_n dy
   With df, where in = h + dropout(f + bias), din0 is the term added to din, and
   mask / keep is the dropout factor:
       df     = or += din0 mask / keep
       dbias  += sum_n din0 mask / keep                               (BIAS)

   As in the forward pass, a warp keeps a row in registers. It also keeps the sums over
   its rows in registers, so dy and `in` are read only once for all gradients. A block
   of 4 warps handles `rows` consecutive rows, a number that depends on N alone. Unless
   `part` is NULL, the block adds its warps' sums in order and stores them in `part`
   (blocks, 2 + BIAS, C). */
template <int Q, int BIAS, int S>
STX__GLOBAL(128)
stx__norm_bwd_kernel(stx__norm_bwd_nums nums, float *part, size_t N, size_t C, size_t rows,
                     stx__dropout d) {
    const stx__norm_bwd_nums v = stx__stored<S>(nums);
    STX__SHARED(float, sh, 4 * 128 * Q);
    const size_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, lo = blockIdx.x * rows,
                 hi = lo + rows < N ? lo + rows : N;
    uint64_t stream = v.df.p && d.keep ? stx__dropout_stream(d) : 0;
    float sums[2 + BIAS][Q][4];
#pragma unroll
    for (int j = 0; j < 2 + BIAS; j++)
#pragma unroll
        for (int k = 0; k < Q; k++)
            for (int e = 0; e < 4; e++) sums[j][k][e] = 0;
    for (size_t n = lo + warp; n < hi; n += 4) {
        float g[Q][4], a[Q][4], s = 0, q = 0;
        const float m = v.mean[n], r = v.rstd[n];
        stx__get_quads<Q>(g, v.dy, n * C, C);
        stx__get_quads<Q>(a, v.in, n * C, C);
#pragma unroll
        for (int k = 0; k < Q; k++) {
            size_t c = 4 * (lane + 32 * k);
            if (c < C) {
                float w[4];
                stx__getn<4>(w, v.gain, c);
                for (int e = 0; e < 4; e++) {
                    a[k][e] -= m;
                    sums[0][k][e] = fmaf(g[k][e] * r, a[k][e], sums[0][k][e]);
                    sums[1][k][e] += g[k][e];
                    g[k][e] *= w[e];
                    s += g[k][e];
                    q = fmaf(g[k][e], a[k][e], q);
                }
            }
        }
        s = stx__warp_sum(s) / (float)C;
        q = stx__warp_sum(q) * r * r / (float)C;

#pragma unroll
        for (int k = 0; k < Q; k++) {
            size_t c = 4 * (lane + 32 * k);
            for (int e = 0; e < 4; e++) g[k][e] = r * ((g[k][e] - s) - a[k][e] * q);
            if (v.df.p && c < C) { /* `a` becomes the gradient of f */
                float by[4] = {1, 1, 1, 1};
                if (d.keep) stx__dropout_mask<4>(by, d, stream, n * C + c);
                for (int e = 0; e < 4; e++) {
                    a[k][e] = g[k][e] * by[e];
                    if constexpr (BIAS) sums[2][k][e] += a[k][e];
                }
            }
        }
        if (v.df.p) stx__add_quads<Q>(v.df, n * C, a, C, v.add_df);
        if (v.din.p) stx__add_quads<Q>(v.din, n * C, g, C, v.add_din);
    }

    if (part) stx__column_sums_of_warps<2 + BIAS, Q, 1>(part, C, sh, sums);
}

/* Computes din and df for any C. A warp reads its row twice. stx__columns computes
   dgain, dshift and dbias. */
template <int S>
STX__GLOBAL(256)
stx__norm_bwd_any_kernel(stx__norm_bwd_nums nums, size_t N, size_t C, stx__dropout d) {
    constexpr int W = stx__width<S>;
    const stx__norm_bwd_nums v = stx__stored<S>(nums);
    const size_t lane = threadIdx.x % 32;
    uint64_t stream = v.df.p && d.keep ? stx__dropout_stream(d) : 0;
    for (size_t n = (size_t)blockIdx.x * 8 + threadIdx.x / 32; n < N; n += (size_t)gridDim.x * 8) {
        float s = 0, q = 0, g[W], a[W], w[W];
        const float m = v.mean[n], r = v.rstd[n];
        for (size_t c = lane * W; c < C; c += 32 * W) {
            stx__getn<W>(g, v.dy, n * C + c);
            stx__getn<W>(a, v.in, n * C + c);
            stx__getn<W>(w, v.gain, c);
            for (int e = 0; e < W; e++) {
                g[e] *= w[e];
                s += g[e];
                q = fmaf(g[e], a[e] - m, q);
            }
        }
        s = stx__warp_sum(s) / (float)C;
        q = stx__warp_sum(q) * r * r / (float)C;
        for (size_t c = lane * W; c < C; c += 32 * W) {
            size_t i = n * C + c;
            stx__getn<W>(g, v.dy, i);
            stx__getn<W>(a, v.in, i);
            stx__getn<W>(w, v.gain, c);
            for (int e = 0; e < W; e++) g[e] = r * (fmaf(g[e], w[e], -s) - (a[e] - m) * q);
            if (v.df.p) {
                float by[W];
                for (int e = 0; e < W; e++) by[e] = 1;
                if (d.keep) stx__dropout_mask<W>(by, d, stream, i);
                for (int e = 0; e < W; e++) by[e] *= g[e];
                stx__addn<W>(v.df, i, by, v.add_df);
            }
            if (v.din.p) stx__addn<W>(v.din, i, g, v.add_din);
        }
    }
}

/* Computes all gradients in one pass over dy and `in`, for rows that fit in registers. */
static void stx__norm_bwd_rows(stx_ctx *x, const char *name, const stx_residual_norm_args *a,
                               const stx__norm_bwd_nums &v, const stx__dropout &d, int access) {
    const size_t N = a->N, C = a->C, rows = stx__chunk(N, 32, 2048), blocks = (N + rows - 1) / rows;
    const int sums = a->dbias ? 3 : 2;
    stx_real *to[STX__COLUMN_TARGETS] = {a->dgain, a->dshift, a->dbias};
    int deferred = a->deferred;
    float *part = NULL;
    if (a->dgain || a->dshift || a->dbias) {
        part = stx__partial_sums(x, name, blocks * sums * C, &deferred);
        if (!part) return;
    }
    STX__CHOOSE(S, access, (STX__FLOATS, STX__HALVES),
                STX__CHOOSE(BIAS, a->dbias != NULL, (0, 1),
                            STX__CHOOSE(Q, (C + 127) / 128, (1, 2, 4, 8),
                                        STX__RUN_KERNEL(x, name, (stx__norm_bwd_kernel<Q, BIAS, S>),
                                                        (unsigned)blocks, 128, 0, v, part, N, C,
                                                        rows, d))));
    if (part) stx__columns_sum(x, name, to, sums, part, sums * C, blocks, C, deferred);
}

/* Computes the gradients with separate kernels, for rows of any length. */
static void stx__norm_bwd_any(stx_ctx *x, const char *name, const stx_residual_norm_args *a,
                              const stx__norm_bwd_nums &v, const stx__dropout &d, int access) {
    const size_t N = a->N, C = a->C;
    const unsigned grid = stx__blocks(N, 8, (size_t)1 << 20);
    stx__columns_args columns;
    if (a->dgain || a->dshift) {
        columns = stx__columns_init(a->dgain, a->dy, N, C);
        columns.d2 = a->dshift;
        columns.f = a->s;
        columns.mean = a->mean;
        columns.rstd = a->rstd;
        columns.deferred = a->deferred;
        stx__columns(x, name, &columns);
    }
    if (!a->ds && !a->df) return;
    STX__CHOOSE(S, access, (STX__FLOATS, STX__HALVES, STX__MIXED),
                STX__RUN_KERNEL(x, name, stx__norm_bwd_any_kernel<S>, grid, 256, 0, v, N, C, d));
    if (a->dbias) {
        columns = stx__columns_init(a->dbias, a->df, N, C);
        columns.deferred = a->deferred;
        stx__columns(x, name, &columns);
    }
}

/* Forward: s = h + dropout(f + bias), y = layernorm(s). With the gradient g of s and
   the dropout factor mask / keep,
   ds = or += g ; df = or += g mask / keep ; dbias += sum_n g mask / keep */
void stx_residual_norm_bwd_cuda(stx_ctx *x, const stx_residual_norm_args *a) {
    static const char name[] = "stx_residual_norm_bwd";
    const stx__dropout d = stx__dropout_of(x, a->drop, a->seed, a->stream, a->rng_first);
    stx__norm_bwd_nums v;
    int access;
    v.din = stx__array_of(x, a->ds);
    v.df = stx__array_of(x, a->df);
    v.dy = stx__array_of(x, a->dy);
    v.in = stx__array_of(x, a->s);
    v.gain = stx__array_of(x, a->gain);
    v.mean = a->mean;
    v.rstd = a->rstd;
    v.add_din = a->accumulate_ds;
    v.add_df = a->accumulate_df;
    if (!a->N || !a->C) return;

    access = stx__access(a->C, {v.din, v.df, v.dy, v.in}, {v.gain});
    if (access != STX__MIXED && a->C <= 1024)
        stx__norm_bwd_rows(x, name, a, v, d, access);
    else
        stx__norm_bwd_any(x, name, a, v, d, access);
}
