#pragma once
#include "common.cuh"
#include "sums.cuh"
#include "elementwise.cuh"


// >>layernorm

/* Launches a kernel that keeps rows of C <= 1024 elements in registers. `kernel` is an
   expression in Q, the number of groups of 4 elements per lane: C <= 128 Q. */
#define STX__RUN_QUADS(x, name, C, kernel, grid, block, ...) \
  do { \
    if ((C) <= 128) { \
      constexpr int Q = 1; \
      STX__RUN_KERNEL(x, name, kernel, grid, block, 0, __VA_ARGS__); \
    } else if ((C) <= 256) { \
      constexpr int Q = 2; \
      STX__RUN_KERNEL(x, name, kernel, grid, block, 0, __VA_ARGS__); \
    } else if ((C) <= 512) { \
      constexpr int Q = 4; \
      STX__RUN_KERNEL(x, name, kernel, grid, block, 0, __VA_ARGS__); \
    } else { \
      constexpr int Q = 8; \
      STX__RUN_KERNEL(x, name, kernel, grid, block, 0, __VA_ARGS__); \
    } \
  } while (0)

/* Returns v as it will be read back from `a`: rounded to bfloat16 if `a` stores bfloat16.
   Statistics are computed from this value, because the backward pass reads it. */
static __device__ __forceinline__ float stx__as_stored(const stx__array &a, float v) {
    return a.half ? __bfloat162float(__float2bfloat16(v)) : v;
}

/* Arrays of the forward kernels: y, s, `in` and f are (N,C); bias, gain and shift are
   (C); mean and rstd are (N). s, f and bias are used only with RESIDUAL; bias.p may be
   NULL. */
struct stx__norm_fwd_nums {
    stx__array y, s, mean, rstd, in, f, bias, gain, shift;
};

/* y (N,C) = layernorm(s), where s = in or, with RESIDUAL, in + dropout(f + bias):

       mean = sum_c s / C
       rstd = 1 / sqrt(sum_c (s - mean)^2 / C + eps)
       y    = (s - mean) rstd gain + shift

   A warp handles a row and keeps it in registers: lane l holds the Q groups of 4
   elements with indices l, l + 32, .. C is a multiple of 4 and at most 128 Q. Each lane
   adds its groups in order, then the warp adds its lanes' sums. */
template <int Q, int RESIDUAL>
STX__GLOBAL(256)
stx__norm_fwd_kernel(stx__norm_fwd_nums nums, size_t N, size_t C, float eps, stx__dropout d) {
    const stx__array y = nums.y, s = nums.s, mean = nums.mean, rstd = nums.rstd, in = nums.in,
                   f = nums.f, bias = nums.bias, gain = nums.gain, shift = nums.shift;
    const size_t lane = threadIdx.x % 32;
    uint64_t stream = RESIDUAL && d.keep ? stx__dropout_stream(d) : 0;
    for (size_t n = (size_t)blockIdx.x * 8 + threadIdx.x / 32; n < N; n += (size_t)gridDim.x * 8) {
        float v[Q][4], sum = 0, m, r;
#pragma unroll
        for (int k = 0; k < Q; k++) {
            size_t c = 4 * (lane + 32 * k), i = n * C + c;
            for (int e = 0; e < 4; e++) v[k][e] = 0;
            if (c < C) {
                stx__getn<4>(v[k], in, i);
                if (RESIDUAL) {
                    float u[4], by[4] = {1, 1, 1, 1};
                    stx__getn<4>(u, f, i);
                    if (bias.p) {
                        float b[4];
                        stx__getn<4>(b, bias, c);
                        for (int e = 0; e < 4; e++) u[e] += b[e];
                    }
                    if (d.keep) stx__dropout_mask<4>(by, d, stream, i);
                    for (int e = 0; e < 4; e++) v[k][e] = stx__as_stored(s, u[e] * by[e] + v[k][e]);
                    stx__putn<4>(s, i, v[k]);
                }
            }
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
                stx__getn<4>(g, gain, c);
                stx__getn<4>(b, shift, c);
                for (int e = 0; e < 4; e++) v[k][e] = fmaf(v[k][e] * r, g[e], b[e]);
                stx__putn<4>(y, n * C + c, v[k]);
            }
        }
        if (lane == 0) {
            stx__put(mean, n, m);
            stx__put(rstd, n, r);
        }
    }
}

/* Like stx__norm_fwd_kernel, for any C. A warp reads its row three times, the second
   and third time from the caches. A lane reads back only what it wrote itself. This is
   a separate kernel because its lanes add single elements instead of groups of 4. */
template <int W, int RESIDUAL>
STX__GLOBAL(256)
stx__norm_fwd_any_kernel(stx__norm_fwd_nums nums, size_t N, size_t C, float eps, stx__dropout d) {
    const stx__array y = nums.y, s = nums.s, mean = nums.mean, rstd = nums.rstd, in = nums.in,
                   f = nums.f, bias = nums.bias, gain = nums.gain, shift = nums.shift;
    const size_t lane = threadIdx.x % 32;
    uint64_t stream = RESIDUAL && d.keep ? stx__dropout_stream(d) : 0;
    for (size_t n = (size_t)blockIdx.x * 8 + threadIdx.x / 32; n < N; n += (size_t)gridDim.x * 8) {
        float sum = 0, m, r, v[W];
        for (size_t c = lane * W; c < C; c += 32 * W) {
            stx__getn<W>(v, in, n * C + c);
            if (RESIDUAL) {
                float u[W], by[W];
                stx__getn<W>(u, f, n * C + c);
                if (bias.p) {
                    float b[W];
                    stx__getn<W>(b, bias, c);
                    for (int e = 0; e < W; e++) u[e] += b[e];
                }
                for (int e = 0; e < W; e++) by[e] = 1;
                if (d.keep) stx__dropout_mask<W>(by, d, stream, n * C + c);
                for (int e = 0; e < W; e++) v[e] = stx__as_stored(s, u[e] * by[e] + v[e]);
                stx__putn<W>(s, n * C + c, v);
            }
            for (int e = 0; e < W; e++) sum += v[e];
        }
        m = stx__warp_sum(sum) / (float)C;
        sum = 0;
        for (size_t c = lane * W; c < C; c += 32 * W) {
            stx__getn<W>(v, RESIDUAL ? s : in, n * C + c);
            for (int e = 0; e < W; e++) sum = fmaf(v[e] - m, v[e] - m, sum);
        }
        r = 1 / sqrtf(stx__warp_sum(sum) / (float)C + eps);
        for (size_t c = lane * W; c < C; c += 32 * W) {
            float g[W], b[W];
            stx__getn<W>(v, RESIDUAL ? s : in, n * C + c);
            stx__getn<W>(g, gain, c);
            stx__getn<W>(b, shift, c);
            for (int e = 0; e < W; e++) v[e] = fmaf((v[e] - m) * r, g[e], b[e]);
            stx__putn<W>(y, n * C + c, v);
        }
        if (lane == 0) {
            stx__put(mean, n, m);
            stx__put(rstd, n, r);
        }
    }
}

template <int RESIDUAL>
static void stx__norm_fwd(stx_ctx *x, const stx_residual_norm_args *a) {
    static const char name[] = "stx_residual_norm_fwd";
    const size_t N = a->N, C = a->C;
    const float eps = a->eps;
    const unsigned grid = stx__blocks(N, 8, (size_t)1 << 20);
    stx__dropout d = stx__dropout_of(x, a->drop, a->seed, a->stream, a->rng_first);
    stx__norm_fwd_nums v;
    int four;
    v.y = stx__array_of(x, a->y);
    v.s = stx__array_of(x, a->s);
    v.mean = stx__array_of(x, a->mean);
    v.rstd = stx__array_of(x, a->rstd);
    v.in = stx__array_of(x, a->h);
    v.f = stx__array_of(x, a->f);
    v.bias = stx__array_of(x, a->bias);
    v.gain = stx__array_of(x, a->gain);
    v.shift = stx__array_of(x, a->shift);
    if (!N || !C) return;

    four = C % 4 == 0 && stx__aligned4(v.y) && stx__aligned4(v.s) && stx__aligned4(v.in)
           && stx__aligned4(v.f) && stx__aligned4(v.bias) && stx__aligned4(v.gain)
           && stx__aligned4(v.shift);
    if (four && C <= 1024)
        STX__RUN_QUADS(x, name, C, (stx__norm_fwd_kernel<Q, RESIDUAL>), grid, 256, v, N, C, eps, d);
    else
        STX__CHOOSE(W, four, 4, 1,
                    STX__RUN_KERNEL(x, name, (stx__norm_fwd_any_kernel<W, RESIDUAL>), grid, 256, 0,
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
   and rstd are (N). din and df may be NULL. If add_din or add_df is nonzero, the
   kernels add to din or df instead of overwriting it. */
struct stx__norm_bwd_nums {
    stx__array din, df, dy, in, gain, mean, rstd;
    int add_din, add_df;
};

/* Adds the sums of the 4 warps of a block in order and stores them in `part`
   (blocks,S,C). `sums` holds S sums for each of the 4 Q columns of a lane; `sh` holds
   4 * 128 Q floats. */
template <int Q, int S>
static __device__ __forceinline__ void stx__norm_bwd_store(float *part, float *sh,
                                                           const float (&sums)[S][Q][4], size_t C) {
    const size_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int j = 0; j < S; j++) {
#pragma unroll
        for (int k = 0; k < Q; k++)
            for (int e = 0; e < 4; e++) sh[(warp * Q + k) * 128 + 4 * lane + e] = sums[j][k][e];
        __syncthreads();
        for (size_t c = threadIdx.x; c < C; c += 128)
            part[(S * (size_t)blockIdx.x + j) * C + c] =
                ((sh[c] + sh[128 * Q + c]) + sh[2 * 128 * Q + c]) + sh[3 * 128 * Q + c];
        __syncthreads();
    }
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
template <int Q, int BIAS>
STX__GLOBAL(128)
stx__norm_bwd_kernel(stx__norm_bwd_nums v, float *part, size_t N, size_t C, size_t rows,
                     stx__dropout d) {
    const stx__array din = v.din, df = v.df, dy = v.dy, in = v.in, gain = v.gain, mean = v.mean,
                   rstd = v.rstd;
    STX__SHARED(float, sh, 4 * 128 * Q);
    const size_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, lo = blockIdx.x * rows,
                 hi = lo + rows < N ? lo + rows : N;
    uint64_t stream = df.p && d.keep ? stx__dropout_stream(d) : 0;
    float sums[2 + BIAS][Q][4];
#pragma unroll
    for (int j = 0; j < 2 + BIAS; j++)
#pragma unroll
        for (int k = 0; k < Q; k++)
            for (int e = 0; e < 4; e++) sums[j][k][e] = 0;
    for (size_t n = lo + warp; n < hi; n += 4) {
        float g[Q][4], a[Q][4], s = 0, q = 0;
        const float m = stx__get(mean, n), r = stx__get(rstd, n);
#pragma unroll
        for (int k = 0; k < Q; k++) {
            size_t c = 4 * (lane + 32 * k);
            for (int e = 0; e < 4; e++) g[k][e] = a[k][e] = 0;
            if (c < C) {
                stx__getn<4>(g[k], dy, n * C + c);
                stx__getn<4>(a[k], in, n * C + c);
                for (int e = 0; e < 4; e++) a[k][e] -= m;
            }
        }

#pragma unroll
        for (int k = 0; k < Q; k++) {
            size_t c = 4 * (lane + 32 * k);
            if (c < C) {
                float w[4];
                stx__getn<4>(w, gain, c);
                for (int e = 0; e < 4; e++) {
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
            size_t c = 4 * (lane + 32 * k), i = n * C + c;
            if (c < C) {
                for (int e = 0; e < 4; e++) g[k][e] = r * ((g[k][e] - s) - a[k][e] * q);
                if (df.p) {
                    float u[4], by[4] = {1, 1, 1, 1};
                    if (d.keep) stx__dropout_mask<4>(by, d, stream, i);
                    for (int e = 0; e < 4; e++) {
                        u[e] = g[k][e] * by[e];
                        if (BIAS) sums[1 + BIAS][k][e] += u[e];
                    }
                    stx__addn<4>(df, i, u, v.add_df);
                }
                if (din.p) stx__addn<4>(din, i, g[k], v.add_din);
            }
        }
    }

    if (part) stx__norm_bwd_store<Q, 2 + BIAS>(part, sh, sums, C);
}

/* Computes din and df for any C. A warp reads its row twice. stx__columns computes
   dgain, dshift and dbias. */
template <int W>
STX__GLOBAL(256)
stx__norm_bwd_any_kernel(stx__norm_bwd_nums v, size_t N, size_t C, stx__dropout d) {
    const stx__array din = v.din, df = v.df, dy = v.dy, in = v.in, gain = v.gain, mean = v.mean,
                   rstd = v.rstd;
    const size_t lane = threadIdx.x % 32;
    uint64_t stream = df.p && d.keep ? stx__dropout_stream(d) : 0;
    for (size_t n = (size_t)blockIdx.x * 8 + threadIdx.x / 32; n < N; n += (size_t)gridDim.x * 8) {
        float s = 0, q = 0, g[W], a[W], w[W];
        const float m = stx__get(mean, n), r = stx__get(rstd, n);
        for (size_t c = lane * W; c < C; c += 32 * W) {
            stx__getn<W>(g, dy, n * C + c);
            stx__getn<W>(a, in, n * C + c);
            stx__getn<W>(w, gain, c);
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
            stx__getn<W>(g, dy, i);
            stx__getn<W>(a, in, i);
            stx__getn<W>(w, gain, c);
            for (int e = 0; e < W; e++) g[e] = r * (fmaf(g[e], w[e], -s) - (a[e] - m) * q);
            if (df.p) {
                float by[W];
                for (int e = 0; e < W; e++) by[e] = 1;
                if (d.keep) stx__dropout_mask<W>(by, d, stream, i);
                for (int e = 0; e < W; e++) by[e] *= g[e];
                stx__addn<W>(df, i, by, v.add_df);
            }
            if (din.p) stx__addn<W>(din, i, g, v.add_din);
        }
    }
}

/* Computes all gradients in one pass over dy and `in`, for rows that fit in registers. */
static void stx__norm_bwd_rows(stx_ctx *x, const char *name, const stx_residual_norm_args *a,
                               const stx__norm_bwd_nums &v, const stx__dropout &d) {
    const size_t N = a->N, C = a->C, rows = stx__chunk(N, 32, 2048), blocks = (N + rows - 1) / rows;
    const int sums = a->dbias ? 3 : 2;
    stx_real *to[STX__COLUMN_TARGETS] = {a->dgain, a->dshift, a->dbias};
    int deferred = a->deferred;
    float *part = NULL;
    if (a->dgain || a->dshift || a->dbias) {
        part = stx__partial_sums(x, name, blocks * sums * C, &deferred);
        if (!part) return;
    }
    STX__CHOOSE(BIAS, a->dbias, 1, 0,
                STX__RUN_QUADS(x, name, C, (stx__norm_bwd_kernel<Q, BIAS>), (unsigned)blocks, 128,
                               v, part, N, C, rows, d));
    if (part) stx__columns_sum(x, name, to, sums, part, sums * C, blocks, C, deferred);
}

/* Computes the gradients with separate kernels, for rows of any length. */
static void stx__norm_bwd_any(stx_ctx *x, const char *name, const stx_residual_norm_args *a,
                              const stx__norm_bwd_nums &v, const stx__dropout &d, int four) {
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
    STX__CHOOSE(W, four, 4, 1,
                STX__RUN_KERNEL(x, name, stx__norm_bwd_any_kernel<W>, grid, 256, 0, v, N, C, d));
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
    int four;
    v.din = stx__array_of(x, a->ds);
    v.df = stx__array_of(x, a->df);
    v.dy = stx__array_of(x, a->dy);
    v.in = stx__array_of(x, a->s);
    v.gain = stx__array_of(x, a->gain);
    v.mean = stx__array_of(x, a->mean);
    v.rstd = stx__array_of(x, a->rstd);
    v.add_din = a->accumulate_ds;
    v.add_df = a->accumulate_df;
    if (!a->N || !a->C) return;

    four = a->C % 4 == 0 && stx__aligned4(v.din) && stx__aligned4(v.df) && stx__aligned4(v.dy)
           && stx__aligned4(v.in) && stx__aligned4(v.gain);
    if (four && a->C <= 1024)
        stx__norm_bwd_rows(x, name, a, v, d);
    else
        stx__norm_bwd_any(x, name, a, v, d, four);
}
