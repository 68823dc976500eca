#pragma once
#include "common.cuh"


// >>attention: oracle

/* Version 0 of the attention consists of plain matmuls and, in each direction, a softmax
   kernel that processes whole rows of scores. It accepts every call. It is the reference
   for the fused kernels and handles the calls that they do not support. All arithmetic is
   in float, regardless of the storage type.

   Letters of all attention sections
       B, T     batch rows; queries per row        H, D   heads; elements per head
       S, C     keys per row; C = S - T, so that query i is at the position of key C + i
       P, N     rows of the position table pe; persistent vectors per head
       b, h     batch row, head; a unit is one pair (b,h)
       i, j     query, key; their distance is delta = C + i - j
       p        row of pe for query i and key j: P - 1 + delta_min - delta
       u, vb    content_bias, position_bias (H,D)
       z        span_fraction (H); z_span = z max_span
       s        logit; the backward pass replaces it with w and then with r a
       w        e^(s - row_max) inv_sum, the softmax without the ramp
       m, a     weight of the ramp, in [0,1]; attention weight a = m w
       r        dropout factor: 0 or 1 / keep; 1 without dropout
       g        dO.v in the backward pass, then ds
       Pr       precision of a kernel, a template argument: bf16, tf32 or f32

   Units are processed in chunks, and a chunk in panels of queries, so that the scores of
   a panel stay small. The queries of a panel can see only the keys j0 .. j0+W-1. For each
   unit of the chunk, a panel has the rows

       s (n, W + N)      column c < W: key j0 + c; column W + k: persistent vector k

   The position term needs no separate matrix: row r of (q + vb) PE^T is added to s at a
   column offset that increases by one per row, and the same view of ds gives the
   gradient of pe (see `skew` in stx__mat). dk, dv and the gradients that several units
   share (pe, u, vb, z, pk, pv) are first summed in float per unit, then over the units
   of a chunk in order. They are added to the gradient arrays once, at the end. */

/* One matrix per unit (b,h). If z is the index of the unit in its chunk, the element in
   row r and column c has the index
       at + b batch_stride + h head_stride + z unit_stride + (first + r) row_stride + c
   Rows with first + r outside [0,rows), such as keys before the first one, are zero,
   and so are padded keys, for which pad[b pad_stride + first + r] is not 0. If `bias`
   is set, its element h head_stride + c is added. With `skew`, column c is the stored
   column c + r + skew_offset, or zero if that is outside [0,width). */
typedef struct stx__mat {
    stx__array a, bias;
    size_t at, batch_stride, head_stride, unit_stride, row_stride;
    ptrdiff_t first, rows, skew_offset, width;
    /* `cached` is 1 if the matrix holds keys, 2 if it holds values and 0 otherwise. The
       rows of keys and values before the current block are in an stx__mat_cached */
    int skew, cached;
    const int32_t *pad;
    size_t pad_stride;
} stx__mat;

/* The cached rows of keys, values or their gradients (stx_attention_args.cached). Group g
   contains the rows j with first[g] <= j < cut. cut is 0 if there are no cached rows. */
typedef struct stx__mat_cached {
    stx__array a[STX_HEAD_GROUPS];
    size_t row_stride[STX_HEAD_GROUPS], batch_stride[STX_HEAD_GROUPS];
    ptrdiff_t first[STX_HEAD_GROUPS], cut;
    int groups;
    uint8_t head_group[256], head_index[256];
} stx__mat_cached;

/* The cached rows of one head. Row j is at base + (j - first) * row_stride. */
typedef struct stx__mat_cached_head {
    stx__array a;
    size_t base, row_stride;
    ptrdiff_t first, cut;
    int group;
} stx__mat_cached_head;

static __device__ __forceinline__ stx__mat_cached_head
stx__mat_cached_head_of(const stx__mat &m, const stx__mat_cached &p, size_t b, size_t h, size_t D) {
    stx__mat_cached_head o = {{NULL, NULL, 0}, 0, 0, 0, 0, 0};
    if (!m.cached || !p.cut) return o;
    const int g = p.groups > 1 ? p.head_group[h] : 0;
    const size_t index = p.groups > 1 ? p.head_index[h] : h;
    o.a = p.a[g];
    o.base = b * p.batch_stride[g] + index * D;
    o.row_stride = p.row_stride[g];
    o.first = p.first[g];
    o.cut = p.cut;
    o.group = g;
    return o;
}

static stx__mat stx__mat_of(const stx__array &a, size_t ld, ptrdiff_t first, ptrdiff_t rows) {
    stx__mat m;
    memset(&m, 0, sizeof m);
    m.a = a;
    m.row_stride = ld;
    m.first = first;
    m.rows = rows;
    return m;
}

/* Returns a scratch matrix with n rows and a stride of sz elements per unit. */
static stx__mat stx__mat_scratch(float *p, size_t ld, size_t n, size_t sz) {
    stx__array a = {p, NULL, 0};
    stx__mat m = stx__mat_of(a, ld, 0, (ptrdiff_t)n);
    m.unit_stride = sz;
    return m;
}

static __device__ __forceinline__ size_t stx__mat_base(const stx__mat &m, size_t b, size_t h,
                                                       size_t z) {
    return m.at + b * m.batch_stride + h * m.head_stride + z * m.unit_stride;
}

static __device__ __forceinline__ const int32_t *stx__mat_pad(const stx__mat &m, size_t b) {
    return m.pad ? m.pad + b * m.pad_stride : NULL;
}

static __device__ __forceinline__ float stx__mat_get(const stx__mat &m,
                                                     const stx__mat_cached_head &o, size_t base,
                                                     size_t bias, const int32_t *pad, ptrdiff_t r,
                                                     ptrdiff_t c) {
    ptrdiff_t row = r + m.first;
    if (m.skew) {
        c += r + m.skew_offset;
        if (c < 0 || c >= m.width) return 0;
    }
    if (row < 0 || row >= m.rows || (pad && pad[row])) return 0;
    if (row < o.cut) {
        if (row < o.first) return 0;
        return stx__get(o.a, o.base + (size_t)(row - o.first) * o.row_stride + (size_t)c);
    }
    float v = stx__get(m.a, base + (size_t)row * m.row_stride + (size_t)c);
    return m.bias.p ? v + stx__get(m.bias, bias + (size_t)c) : v;
}

/* C (M,N) = or += alpha op(A) op(B) for each unit, where op transposes if ta or tb is
   set. C is scratch and may be skewed. A block computes 64 x 64 elements of one unit
   (grid: columns, rows, units), and a thread 4 x 4 of them, which needs few registers.
   Operands are loaded into shared memory, 16 columns of op(A) at a time. Each element
   is a sum over k in ascending order. */
enum { STX__PLAIN_TILE = 64, STX__PLAIN_STEP = 16 };

STX__HOST_UNROLLED
STX__GLOBAL(256)
stx__attn_plain_gemm_kernel(stx__mat C, stx__mat A, stx__mat B, stx__mat_cached cached, int ta,
                            int tb, size_t M, size_t N, size_t K, float alpha, int accumulate,
                            size_t u0, size_t H, size_t D) {
    STX__SHARED(float, as, STX__PLAIN_STEP *(STX__PLAIN_TILE + 4));
    STX__SHARED(float, bs, STX__PLAIN_STEP *(STX__PLAIN_TILE + 4));
    const size_t z = blockIdx.z, b = (u0 + z) / H, h = (u0 + z) % H,
                 m0 = (size_t)blockIdx.y * STX__PLAIN_TILE,
                 n0 = (size_t)blockIdx.x * STX__PLAIN_TILE;
    const size_t ab = stx__mat_base(A, b, h, z), bb = stx__mat_base(B, b, h, z),
                 cb = stx__mat_base(C, b, h, z);
    const int32_t *ag = stx__mat_pad(A, b), *bg = stx__mat_pad(B, b);
    const stx__mat_cached_head ao = stx__mat_cached_head_of(A, cached, b, h, D),
                               bo = stx__mat_cached_head_of(B, cached, b, h, D);
    const int tid = (int)threadIdx.x, tx = tid % 16, ty = tid / 16;
    float c[4][4] = {{0}};
    for (size_t k0 = 0; k0 < K; k0 += STX__PLAIN_STEP) {
        /* adjacent threads load elements that are adjacent in memory */
        for (int e = tid; e < STX__PLAIN_TILE * STX__PLAIN_STEP; e += 256) {
            int ka = ta ? e / STX__PLAIN_TILE : e % STX__PLAIN_STEP,
                ma = ta ? e % STX__PLAIN_TILE : e / STX__PLAIN_STEP,
                kb = tb ? e % STX__PLAIN_STEP : e / STX__PLAIN_TILE,
                nb = tb ? e / STX__PLAIN_STEP : e % STX__PLAIN_TILE;
            size_t k = k0 + (size_t)ka, m = m0 + (size_t)ma, l = k0 + (size_t)kb,
                   n = n0 + (size_t)nb;
            float av = 0, bv = 0;
            if (k < K && m < M)
                av = stx__mat_get(A, ao, ab, h * A.head_stride, ag, (ptrdiff_t)(ta ? k : m),
                                  (ptrdiff_t)(ta ? m : k));
            if (l < K && n < N)
                bv = stx__mat_get(B, bo, bb, h * B.head_stride, bg, (ptrdiff_t)(tb ? n : l),
                                  (ptrdiff_t)(tb ? l : n));
            as[ka * (STX__PLAIN_TILE + 4) + ma] = av;
            bs[kb * (STX__PLAIN_TILE + 4) + nb] = bv;
        }
        __syncthreads();
        for (int k = 0; k < STX__PLAIN_STEP; k++) {
            float av[4], bv[4];
            for (int i = 0; i < 4; i++) {
                av[i] = as[k * (STX__PLAIN_TILE + 4) + 4 * ty + i];
                bv[i] = bs[k * (STX__PLAIN_TILE + 4) + 4 * tx + i];
            }
            for (int i = 0; i < 4; i++)
                for (int j = 0; j < 4; j++) c[i][j] += av[i] * bv[j];
        }
        __syncthreads();
    }
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++) {
            size_t m = m0 + (size_t)(4 * ty + i), n = n0 + (size_t)(4 * tx + j);
            ptrdiff_t at = (ptrdiff_t)n;
            if (m >= M || n >= N) continue;
            if (C.skew) {
                at += (ptrdiff_t)m + C.skew_offset;
                if (at < 0 || at >= C.width) continue;
            }
            float *to = (float *)C.a.p + cb + (size_t)((ptrdiff_t)m + C.first) * C.row_stride
                        + (size_t)at;
            *to = accumulate ? *to + alpha * c[i][j] : alpha * c[i][j];
        }
}

/* Arguments of the row kernels. Row z * n + r of s and g belongs to query i0 + r of
   unit u0 + z. */
typedef struct stx__attn_plain_rows {
    float *s, *g;             /* (units,n,ld) */
    float *row_max, *inv_sum; /* (B,H,T) */
    float *dz;                /* (units,n) or NULL */
    size_t T, H, S, N, n, ld, u0, i0, units;
    ptrdiff_t C, j0, W, span, first;
    int delta_min, not_causal, z_shared, no_renorm;
    int norm_all; /* 1: the normaliser includes keys with m = 0 */
    float max_span, ramp, eps;
    float ramp_steps; /* from stx__attn_ramp_steps */
    float root_n;     /* sqrt(N), the factor of a persistent value */
    uint32_t keep;    /* 65536 times the keep probability; 0: no dropout */
    float inv_keep;   /* the factor of a weight that is kept */
    uint64_t seed, stream, rng_first;
    const uint64_t *shift;
    stx__array z;
    const int32_t *pad; /* (B,S) or NULL: see stx_attention_args */
    size_t pad_stride;
} stx__attn_plain_rows;

/* Returns stx_attention_reach plus one. This is the value of stx__attn_farthest in the
   CPU kernels before it is limited to the span. The host precomputes `steps`, the part
   that does not depend on z, because registers are scarce in the calling kernels. */
static __device__ __forceinline__ double stx__attn_span_farthest(float z, float max_span,
                                                                 float steps) {
    double e = ceil((double)z * (double)max_span) + (double)steps + 1;
    if (!(e > 1)) e = 1; /* true for NaN as well */
    return e;
}

/* Clamps a ramp weight to [0,1]. NaN stays NaN. */
static __device__ __forceinline__ float stx__attn_clamp(float ramp) {
    if (ramp <= 0) return 0;
    return ramp >= 1 ? 1 : ramp;
}

static float stx__attn_ramp_steps(const stx_attention_args *a) {
    double r = ceil((double)a->ramp);
    return (float)(r + floor(((double)a->max_span + r) / 4194304));
}

static __device__ float stx__attn_plain_z(const stx__attn_plain_rows &p, size_t h) {
    return stx__get(p.z, p.z_shared ? 0 : h);
}

/* Returns the largest distance that head h attends to, like stx__attn_farthest. */
static __device__ ptrdiff_t stx__attn_plain_farthest(const stx__attn_plain_rows &p, size_t h) {
    double e;
    if (!p.z.p || p.norm_all) return p.span;
    e = stx__attn_span_farthest(stx__attn_plain_z(p, h), p.max_span, p.ramp_steps);
    return e < (double)p.span ? (ptrdiff_t)e : p.span;
}

/* Computes the range [lo,hi) of the panel's key columns that query i0 + r sees. */
static __device__ void stx__attn_plain_bounds(const stx__attn_plain_rows &p, size_t h, size_t r,
                                              ptrdiff_t *lo, ptrdiff_t *hi) {
    ptrdiff_t i = p.C + (ptrdiff_t)(p.i0 + r), from = p.first, to = (ptrdiff_t)p.S;
    if (!p.not_causal) {
        ptrdiff_t farthest = stx__attn_plain_farthest(p, h);
        if (from < i - farthest) from = i - farthest;
        to = i - p.delta_min + 1;
    }
    *lo = from > p.j0 ? from - p.j0 : 0;
    *hi = to - p.j0 < p.W ? to - p.j0 : p.W;
}

/* Returns nonzero if column c of unit u is a persistent vector, or a key in [lo,hi) that
   is not padding. */
static __device__ __forceinline__ int stx__attn_plain_sees(const stx__attn_plain_rows &p, size_t u,
                                                           ptrdiff_t lo, ptrdiff_t hi,
                                                           ptrdiff_t c) {
    if (c >= p.W) return 1;
    return c >= lo && c < hi
           && !(p.pad && p.j0 + c >= 0 && p.pad[u / p.H * p.pad_stride + (size_t)(p.j0 + c)]);
}

/* Returns the ramp weight of column c before clamping: 2 without a ramp, and 2 or -1
   far from the ramp. Performs the same operations as stx__attn_mask_of, in the same
   order and without fusing them. */
static __device__ __forceinline__ float stx__attn_plain_ramp(const stx__attn_plain_rows &p,
                                                             float z_span, size_t r, ptrdiff_t c) {
    float delta;
    if (!p.z.p || c >= p.W) return 2;
    delta = (float)(p.C + (ptrdiff_t)(p.i0 + r) - p.j0 - c);
    delta = __fadd_rn(1.0f - delta, z_span);
    /* well outside the ramp, no division is needed */
    if (delta >= p.ramp || delta <= -2 * p.ramp) return delta > 0 ? 2 : -1;
    return __fadd_rn(delta / p.ramp, 1.0f);
}

/* Returns the factor of the weight in column c after normalisation: dropout, and sqrt(N)
   for persistent vectors. The random numbers are the same as on the CPU. */
static __device__ float stx__attn_plain_factor(const stx__attn_plain_rows &p, size_t u, size_t r,
                                               ptrdiff_t c, uint64_t stream) {
    uint64_t S = (uint64_t)p.S + (uint64_t)p.span, groups = (S + p.N) / 8 + 2,
             row = (uint64_t)u * p.T + p.i0 + r, at;
    float f = c < p.W ? 1.0f : p.root_n;
    if (!p.keep) return f;
    at = c < p.W ? (uint64_t)(p.span + p.j0 + c) : S + (uint64_t)(c - p.W);
    uint4 v = stx__philox(p.seed, stream, p.rng_first + row * groups + at / 8);
    uint32_t word = v.w;
    if (at % 8 < 2)
        word = v.x;
    else if (at % 8 < 4)
        word = v.y;
    else if (at % 8 < 6)
        word = v.z;
    return (at % 2 ? word >> 16 : word & 0xffffu) < p.keep ? __fmul_rn(f, p.inv_keep) : 0.0f;
}

/* Softmax. Replaces the logits in s with the factors of the values. The factors include
   dropout and sqrt(N), and are 0 for keys that the query does not see. For row_max and
   inv_sum, see stx_attention_args. One warp per row makes three passes: maximum, sums,
   weights. Each lane adds every 32nd column in ascending order, then the warp adds its
   lanes' sums in a fixed tree. */
STX__GLOBAL(4 * STX__WARP) stx__attn_plain_softmax_kernel(stx__attn_plain_rows p) {
    const size_t row = (size_t)blockIdx.x * (blockDim.x / STX__WARP) + threadIdx.x / STX__WARP;
    const int lane = (int)(threadIdx.x % STX__WARP);
    if (row >= p.units * p.n) return;
    const size_t u = p.u0 + row / p.n, r = row % p.n, h = u % p.H;
    const ptrdiff_t columns = p.W + (ptrdiff_t)p.N;
    const uint64_t stream = p.keep ? p.stream + *p.shift : 0;
    const float z_span = p.z.p ? __fmul_rn(stx__attn_plain_z(p, h), p.max_span) : 0.0f;
    float *s = p.s + row * p.ld, row_max = -HUGE_VALF, sum = 0, all = 0, norm, inv_sum;
    ptrdiff_t lo, hi, c;
    stx__attn_plain_bounds(p, h, r, &lo, &hi);
    for (c = lane; c < columns; c += STX__WARP)
        if (stx__attn_plain_sees(p, u, lo, hi, c)
            && (c >= p.W || p.norm_all || !(stx__attn_plain_ramp(p, z_span, r, c) <= 0)))
            row_max = fmaxf(row_max, s[c]);
    row_max = stx__warp_max(row_max);
    for (c = lane; c < columns; c += STX__WARP) {
        float m = stx__attn_plain_ramp(p, z_span, r, c), e;
        if (!stx__attn_plain_sees(p, u, lo, hi, c) || (c < p.W && !p.norm_all && m <= 0)) {
            s[c] = 0;
            continue;
        }
        m = stx__attn_clamp(m);
        e = expf(s[c] - row_max);
        s[c] = m * e;
        sum += m * e;
        all += e;
    }
    sum = stx__warp_sum(sum);
    all = stx__warp_sum(all);
    norm = p.no_renorm ? all : sum + p.eps * all;
    inv_sum = norm == 0 ? 0 : 1 / norm; /* y is 0 if the query sees no key */
    for (c = lane; c < columns; c += STX__WARP)
        if (s[c] != 0) s[c] *= inv_sum * stx__attn_plain_factor(p, u, r, c, stream);
    if (lane == 0) {
        p.row_max[u * p.T + p.i0 + r] = row_max;
        p.inv_sum[u * p.T + p.i0 + r] = inv_sum;
    }
}

/* Backward pass of the softmax. Replaces the logits in s with the factors of the
   values, as in the forward pass, and dO.v in g with ds. With the eps of
   stx_attention_args and G = r g, where g is still dO.v:

       D  = sum a G                              dO.y without the rounding error of y
       ds = a (G - D) - eps D w
       dz = sum of w (G - D) over the row's keys with 0 <= ramp <= 1

   With no_renorm, ds = a G - D w and dz is the sum of w G. One warp per row makes two
   passes. */
STX__GLOBAL(4 * STX__WARP) stx__attn_plain_softmax_bwd_kernel(stx__attn_plain_rows p) {
    const size_t row = (size_t)blockIdx.x * (blockDim.x / STX__WARP) + threadIdx.x / STX__WARP;
    const int lane = (int)(threadIdx.x % STX__WARP);
    if (row >= p.units * p.n) return;
    const size_t u = p.u0 + row / p.n, r = row % p.n, h = u % p.H;
    const ptrdiff_t columns = p.W + (ptrdiff_t)p.N;
    const uint64_t stream = p.keep ? p.stream + *p.shift : 0;
    const float z_span = p.z.p ? __fmul_rn(stx__attn_plain_z(p, h), p.max_span) : 0.0f,
                row_max = p.row_max[u * p.T + p.i0 + r], inv_sum = p.inv_sum[u * p.T + p.i0 + r];
    float *s = p.s + row * p.ld, *g = p.g + row * p.ld, D = 0, dz = 0;
    ptrdiff_t lo, hi, c;
    stx__attn_plain_bounds(p, h, r, &lo, &hi);
    for (c = lane; c < columns; c += STX__WARP) {
        float m = stx__attn_plain_ramp(p, z_span, r, c), v = s[c] - row_max;
        if (inv_sum == 0 || !stx__attn_plain_sees(p, u, lo, hi, c)) {
            s[c] = g[c] = 0;
            continue;
        }
        m = stx__attn_clamp(m);
        /* m w <= 1, but w alone may overflow */
        s[c] = expf(v > 80 ? 80 : v) * inv_sum;
        g[c] *= stx__attn_plain_factor(p, u, r, c, stream);
        D += m * s[c] * g[c];
    }
    D = stx__warp_sum(D);
    const float ed = p.no_renorm ? D : p.eps * D;
    if (p.no_renorm) D = 0;
    for (c = lane; c < columns; c += STX__WARP) {
        float raw = stx__attn_plain_ramp(p, z_span, r, c), m = stx__attn_clamp(raw), w = s[c],
              gd = g[c] - D;
        if (inv_sum == 0 || !stx__attn_plain_sees(p, u, lo, hi, c)) continue;
        if (raw >= 0 && raw <= 1) dz += w * gd;
        g[c] = m * w * gd - ed * w;
        s[c] = m * w != 0 ? m * w * stx__attn_plain_factor(p, u, r, c, stream) : m * w;
    }
    dz = stx__warp_sum(dz);
    if (lane == 0 && p.dz) p.dz[row] = dz;
}

/* `to` (rows,D) += p + q for each unit; p and q are scratch with a stride of sz
   elements per unit, and q may be NULL. If bit 0 of `fresh` is set, `to` is overwritten
   instead; if bit 1 + g is set, so are the cached rows of group g. A thread handles an
   element at a time. */
STX__GLOBAL(256)
stx__attn_plain_store_kernel(stx__mat to, stx__mat_cached cached, const float *p, const float *q,
                             size_t sz, size_t rows, size_t D, int fresh, size_t units, size_t u0,
                             size_t H) {
    size_t n = units * rows * D, step = (size_t)gridDim.x * blockDim.x;
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) {
        size_t z = i / (rows * D), e = i % (rows * D), u = u0 + z;
        const ptrdiff_t row = (ptrdiff_t)(e / D) + to.first;
        const stx__mat_cached_head o = stx__mat_cached_head_of(to, cached, u / H, u % H, D);
        const float v = q ? p[z * sz + e] + q[z * sz + e] : p[z * sz + e];
        if (row < o.cut) {
            if (o.a.p && row >= o.first)
                stx__add(o.a, o.base + (size_t)(row - o.first) * o.row_stride + e % D, v,
                         !(fresh >> (1 + o.group) & 1));
        } else if (to.a.p) {
            stx__add(to.a, stx__mat_base(to, u / H, u % H, z) + (size_t)row * to.row_stride + e % D,
                     v, !(fresh & 1));
        }
    }
}

/* `to` (units,D) += the column sums of `from` (units,n,D), which has a stride of sz
   elements per unit. One thread per column adds the rows in ascending order. */
STX__GLOBAL(128)
stx__attn_plain_columns_kernel(float *to, const float *from, size_t sz, size_t n, size_t D,
                               size_t units) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x, r;
    float s = 0;
    if (i >= units * D) return;
    for (r = 0; r < n; r++) s += from[i / D * sz + r * D + i % D];
    to[i] += s;
}

/* `all` (tables,size) += the sums of `parts` (units,size) over the units of the chunk
   that share a table, in ascending order. One thread per element. */
STX__GLOBAL(256)
stx__attn_plain_units_kernel(float *all, const float *parts, size_t size, size_t tables,
                             size_t units, size_t u0) {
    size_t step = (size_t)gridDim.x * blockDim.x;
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < tables * size; i += step) {
        size_t t = i / size, z;
        float s = 0;
        for (z = (t + tables - u0 % tables) % tables; z < units; z += tables)
            s += parts[z * size + i % size];
        all[i] += s;
    }
}

/* grad += f times `all` (tables,rows,D). Element (t,r,d) of `all` is added to element
   `at` + t * st + r * ld + d of grad. One thread per element. */
STX__GLOBAL(256)
stx__attn_plain_add_kernel(stx__array grad, const float *all, float f, size_t tables, size_t rows,
                           size_t D, size_t at, size_t st, size_t ld) {
    size_t step = (size_t)gridDim.x * blockDim.x;
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < tables * rows * D; i += step)
        stx__add(grad, at + i / (rows * D) * st + i / D % rows * ld + i % D, f * all[i], 1);
}
