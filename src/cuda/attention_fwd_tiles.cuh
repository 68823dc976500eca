#pragma once
#include "common.cuh"
#include "attention_common.cuh"


// >>attention: forward

/* Forward. A block handles BQ = 64 MT queries of one head of one batch row; each of its 4
   warps handles MT strips of 16 rows. It processes the keys in tiles of BK, from the
   oldest to the newest key that its queries may see, and then the persistent vectors,
   with one online softmax over all of them.

       for each tile:   S  = skew((Q + vb) PE^T)      BK new columns per tile; 0 for
                                                      persistent vectors
                        S += (Q + u) K^T              accumulated by the tensor cores
                        x  = S scale log2 e
                        row_max' = max(row_max, max x)
                        w  = m 2^(x - row_max')
                        f  = 2^(row_max - row_max')
                        sum = f sum + sum w
                        O   = f O + (r w) V
       at the end:      y = O / (sum keep), inv_sum = 1 / sum

   A tile of persistent vectors differs only in its scales (keys sqrt(D) pk, applied to x;
   values sqrt(N) pv, applied to w) and in using q without u.

       keys   oldest        tiles of BK          newest      persistent vectors
              |------|------|------|------|------|------|    |------|------|
       warp 0    edge  . interior tiles .   edge              interior, edge
       warp 1      edge  . interior tiles .   edge            (16 MT queries later)

       shared memory        HEADER: job, ramp weights of each warp
                            4 tiles: K and V of this step, K and V of the next step
                            ring of pe: BQ + 2 BK rows
                            q (+u), q (+vb) if they are not in registers
       registers of a warp  O (16 MT, DP), row_max, sum, S (16 MT, BK), carry of the skew,
                            fragments of q if the elements are bfloat16

   The ring holds the BQ + BK rows of the position table that the skewed bands of the 4
   warps use, and the next BK rows. While tile s is processed, the copies of tile s + 1
   are in flight (cp.async). One barrier per tile suffices. Each thread waits for its
   own copies before the barrier, so after it all copies of tile s have arrived. All
   warps have also finished tile s - 1, whose memory the next copies overwrite. If the
   elements are bfloat16, q is kept in registers as fragments. A second query (if u or
   vb is given) and float queries are kept in shared memory. Each warp reads only
   queries that it wrote, so a warp barrier is enough.

   A warp skips tiles that none of its rows sees. Its first tile starts the skew with 16
   columns to the left of the tile. Masks are applied only in edge tiles, which contain an
   end of the window of some row, or part of the ramp. The condition is uniform per warp.

   Order of sums. A row belongs to 4 lanes of one warp. Each lane adds its columns of a
   tile in ascending order, tiles are added from the oldest to the newest, and at the end
   the sums of the 4 lanes are added in a fixed tree. The order does not depend on when
   blocks run, so a run repeats bit-exactly.

   A row without keys has row_max = -inf, inv_sum = 0 and y = 0, as on the CPU. Dropout is
   applied after the weights are summed, and the factor 1 / keep at the end. row_max is
   the largest logit of a key with m > 0, in natural units. In bfloat16, w is rounded
   before it is summed, so that rounding errors in the numerator and the normaliser
   cancel if one key has most of the weight: a row with one key returns exactly its
   value. Otherwise y, and thus dO.y, would have a relative error of up to 2^-9. The
   backward pass subtracts dO.y from nearly the same value, so this error would dominate
   gradients that should be 0.

   Cost of a tile of 64 queries, 64 keys and D = 64 in bfloat16: 3 x 2 x 64^3 = 1.57 MFLOP
   for 3 x 8 KiB from L2. With one strip per warp, each of the 4 warps reads K, V and 64
   rows of the table once from shared memory. That is 96 KiB or 768 clocks, more than the
   tensor cores require (about 620). With MT = 2, two strips use the same fragments: twice
   the work for 104 KiB. Long spans therefore use 128 queries per block. BK is chosen so
   that a tile has at most 8 KiB for all D and precisions.

   Launch bounds: 128 threads, and BLOCKS blocks that should fit on a multiprocessor. This
   is 3 for narrow heads in bfloat16, which limits a thread to 168 registers, and 2 (255
   registers) otherwise. */

/* Loads rows r0 .. r0+n-1 of a warp's queries, plus a bias, into a tile. Rows beyond T
   are set to zeros. */
template <class Pr, int CH>
static __device__ __forceinline__ void stx__attn_load_query(const stx__attn_params &p,
                                                            unsigned char *tile, int r0, int n,
                                                            int i0, int b, int h,
                                                            const stx__array &bias) {
    enum { PER = 16 / Pr::SIZE, ACROSS = stx__attn_across(CH) };

    const int lane = (int)threadIdx.x & 31, c = lane % ACROSS;
    const typename Pr::element *q = (const typename Pr::element *)p.q + (size_t)b * p.q_batch_stride
                                    + (size_t)h * p.D + c * PER;
    float add[PER];
    int k, e;
#pragma unroll
    for (e = 0; e < PER; e++)
        add[e] = bias.p && c * PER < p.D ? stx__get(bias, (size_t)h * p.D + c * PER + e) : 0;
#pragma unroll 4
    for (k = 0; k < n; k += 32 / ACROSS) {
        const int r = r0 + k + lane / ACROSS, row = i0 + r;
        uint4 v = make_uint4(0, 0, 0, 0);
        if (row < p.T && c * PER < p.D) {
            v = *(const uint4 *)(q + (size_t)row * p.q_row_stride);
            if (bias.p) v = stx__attn_add_bias(v, add);
        }
        if (c < CH) *(uint4 *)(tile + stx__attn_swizzle<CH>(r, c)) = v;
    }
    __syncwarp();
}

/* Transposes 4 x 4 words across the 4 lanes of a quad: x[l] of lane t receives the
   previous value of x[t] of lane l. */
static __device__ __forceinline__ void stx__attn_transpose4(uint32_t (&x)[4]) {
    int t = (int)threadIdx.x & 3, e;
    for (e = 0; e < 4; e += 2) {
        uint32_t v = __shfl_xor_sync(STX__ALL, t & 1 ? x[e] : x[e + 1], 1);
        if (t & 1)
            x[e] = v;
        else
            x[e + 1] = v;
    }
    for (e = 0; e < 2; e++) {
        uint32_t v = __shfl_xor_sync(STX__ALL, t & 2 ? x[e] : x[e + 2], 2);
        if (t & 2)
            x[e] = v;
        else
            x[e + 2] = v;
    }
}

/* Returns a bit mask of the elements that dropout keeps in a strip of 16 rows and NB
   blocks of columns: bit 4 n + e is for element e of block n of an accumulator. The 4
   lanes of a quad share the Philox calls of their two rows. `row` is the row of g = 0,
   `at` the position of the first column, a multiple of 8. All lanes must call this
   function. */
template <int NB>
static __device__ __forceinline__ uint32_t stx__attn_keep_mask(const stx__attn_params &p,
                                                               uint64_t stream, uint64_t row,
                                                               int at) {
    int lane = (int)threadIdx.x & 31, t = lane & 3, q, l;
    uint32_t kept = 0;
    row += (uint64_t)(lane >> 2);
#pragma unroll 1
    for (q = 0; q < NB / 2; q++) {
        int c = 4 * q + t;
        uint4 w = stx__attn_random8(p, stream, row + (c >= NB ? 8 : 0),
                                    at + (c >= NB ? c - NB : c) * 8);
        uint32_t x[4] = {w.x, w.y, w.z, w.w};
        stx__attn_transpose4(x);
#pragma unroll
        for (l = 0; l < 4; l++) {
            uint32_t two = ((x[l] & 0xffffu) < p.keep) | ((x[l] >> 16) < p.keep) << 1;
            c = 4 * q + l;
            kept |= two << (c >= NB ? (c - NB) * 4 + 2 : c * 4);
        }
    }
    return kept;
}

/* Returns nonzero if a group of keys is in the band of one of the warp's strips. */
template <int MT>
static __device__ __forceinline__ int stx__attn_in_bands(const stx__attn_band (&band)[MT],
                                                         int group) {
    return (group >= band[0].lo && group < band[0].hi)
           || (group >= band[MT - 1].lo && group < band[MT - 1].hi);
}

/* o += w V, summed over the rows of the tile. The accumulators of S are used as
   fragments of the left factor: packed for bfloat16, and for tf32 with key 2t as k = t
   and key 2t + 1 as k = t + 4 in both factors. With EDGE, only the groups in the bands
   of the strips are used. */
template <class Pr, int CH, int MT, int NB, int ND, int EDGE> struct stx__attn_times_v {
    static __device__ __forceinline__ void run(float (&o)[MT][ND][4], const float (&w)[MT][NB][4],
                                               const unsigned char *tile, int lane,
                                               const stx__attn_band (&band)[MT]) {
        int g = lane >> 2, t = lane & 3, k, n, m;
#pragma unroll
        for (k = 0; k < NB; k++) {
            if (EDGE && !stx__attn_in_bands(band, k / 2)) continue;
#pragma unroll
            for (n = 0; n < ND; n++) {
                uint32_t b0 = *(
                    const uint32_t *)(tile + stx__attn_swizzle<CH>(8 * k + 2 * t, 2 * n + (g >> 2))
                                      + (g & 3) * 4);
                uint32_t b1 = *(
                    const uint32_t *)(tile
                                      + stx__attn_swizzle<CH>(8 * k + 2 * t + 1, 2 * n + (g >> 2))
                                      + (g & 3) * 4);
#pragma unroll
                for (m = 0; m < MT; m++) {
                    uint32_t a[4] = {__float_as_uint(w[m][k][0]), __float_as_uint(w[m][k][2]),
                                     __float_as_uint(w[m][k][1]), __float_as_uint(w[m][k][3])};
                    Pr::add(o[m][n], a, b0, b1);
                }
            }
        }
    }
};

template <int CH, int MT, int NB, int ND, int EDGE>
struct stx__attn_times_v<stx__attn_bf16, CH, MT, NB, ND, EDGE> {
    static __device__ __forceinline__ void run(float (&o)[MT][ND][4], const float (&w)[MT][NB][4],
                                               const unsigned char *tile, int lane,
                                               const stx__attn_band (&band)[MT]) {
        int k, n, m;
#pragma unroll
        for (k = 0; k < NB / 2; k++) {
            uint32_t a[MT][4];
            if (EDGE && !stx__attn_in_bands(band, k)) continue;
#pragma unroll
            for (m = 0; m < MT; m++) {
                a[m][0] = stx__pair(w[m][2 * k][0], w[m][2 * k][1]);
                a[m][1] = stx__pair(w[m][2 * k][2], w[m][2 * k][3]);
                a[m][2] = stx__pair(w[m][2 * k + 1][0], w[m][2 * k + 1][1]);
                a[m][3] = stx__pair(w[m][2 * k + 1][2], w[m][2 * k + 1][3]);
            }
#pragma unroll
            for (n = 0; n < ND; n += 2) {
                uint32_t b[4];
                stx__attn_frag_v<CH>(b, tile, 16 * k, n, lane);
#pragma unroll
                for (m = 0; m < MT; m++) {
                    if (EDGE && MT > 1 && (k < band[m].lo || k >= band[m].hi)) continue;
                    stx__attn_bf16::mma2(o[m][n], o[m][n + 1], a[m], b);
                }
            }
        }
    }
};

/* Returns v and hides its origin from the compiler. Values computed from it inside a loop
   are recomputed there and do not occupy registers throughout the loop. */
static __device__ __forceinline__ int stx__attn_opaque(int v) {
    asm volatile("" : "+r"(v));
    return v;
}

/* Which keys exist. With padded keys or without causality, a mask supplements the window:
   bit STX__KEYS_BEFORE + j of a batch row's words is 1 if key j exists, that is, if
   first_key <= j < S and j is not padded. Each call recomputes the mask, which is a few
   bytes that stay in L1. Without a mask, key_mask is NULL and kernels only test this,
   with one uniform branch per tile. A tile in which no key exists costs no copies of K
   and V and no matmuls. In a tile with missing keys:

       forward, queries   rows of missing keys are set to zeros after they have arrived,
                          because they may contain NaN, and 0 times NaN is NaN; their
                          logits are set to -inf before the softmax, or before a and ds
       diagonals          their ds is set to 0
       keys               no change: the column of a missing key affects only its own dK
                          and dV, which are not stored

   Without causality the window is a rectangle: delta_min = 1 - T and span >= S let every
   query see every key, and the mask ends it at S. */

/* Number of zero bits before key 0, where a tile may begin. Zero bits also follow the
   last key. */
enum { STX__KEYS_BEFORE = 64 };

/* Returns the number of mask words per batch row, or 0 if no mask is required. */
static size_t stx__attn_key_words(const stx_attention_args *a) {
    return a->pad || a->not_causal ? (a->S + STX__KEYS_BEFORE - 1) / 32 + 3 : 0;
}

static size_t stx__attn_key_word_rows(const stx_attention_args *a) {
    return a->pad ? a->B : 1;
}

/* Returns the mask of keys j0 .. j0+BK-1 of batch row b, where -BK < j0 < S. */
template <int BK>
static __device__ __forceinline__ uint64_t stx__attn_key_mask(const stx__attn_params &p, int b,
                                                              int j0) {
    const unsigned at = (unsigned)(stx__attn_opaque(j0) + STX__KEYS_BEFORE), shift = at & 31;
    const uint32_t *w = p.key_mask + (size_t)b * p.key_mask_stride + (at >> 5);
    uint64_t v = (w[0] | (uint64_t)w[1] << 32) >> shift;
    if (BK == 64) return shift ? v | (uint64_t)w[2] << (64 - shift) : v;
    return v & (((uint64_t)1 << (BK & 63)) - 1);
}

/* Returns nonzero if all keys of a tile exist. */
template <int BK> static __device__ __forceinline__ int stx__attn_all_exist(uint64_t seen) {
    return seen == ~(uint64_t)0 >> (64 - BK);
}

/* Writes the mask. Each warp computes one word, one lane per key; a block computes 8. */
STX__GLOBAL(256)
stx__attn_key_mask_kernel(uint32_t *bits, const int32_t *pad, size_t stpad, int S, int lo,
                          size_t words, size_t n) {
    size_t k = (size_t)blockIdx.x * (blockDim.x / STX__WARP) + threadIdx.x / STX__WARP;
    if (k >= n) return;
    ptrdiff_t j = (ptrdiff_t)(k % words * 32 + threadIdx.x % STX__WARP) - STX__KEYS_BEFORE;
    uint32_t v = __ballot_sync(STX__ALL,
                               j >= lo && j < S && !(pad && pad[k / words * stpad + (size_t)j]));
    if (!(threadIdx.x % STX__WARP)) bits[k] = v;
}

static void stx__attn_make_key_mask(stx_ctx *x, const char *name, const stx_attention_args *a,
                                    stx__attn_params *p, void *bits) {
    size_t words = stx__attn_key_words(a), n = words * stx__attn_key_word_rows(a);
    if (!n) return;
    p->key_mask = (const uint32_t *)bits;
    p->key_mask_stride = a->pad ? (int)words : 0;
    STX__RUN_KERNEL(x, name, stx__attn_key_mask_kernel, stx__blocks(n, 8, (size_t)1 << 30), 256, 0,
                    (uint32_t *)bits, a->pad, a->pad_batch_stride, p->S, p->first_key, words, n);
}

/* The work of a block. It is kept in shared memory because registers are scarce. */
typedef struct stx__attn_job {
    stx__attn_window w;
    int b, h, i0, first, window_steps, steps;
} stx__attn_job;

/* The shape of a forward kernel. With SHARED_Q, the query that is multiplied by keys is
   kept in shared memory instead of registers. This is required if there are two
   different queries, or if the elements are floats. */
template <class Pr_, int DP, int BK, int MT, int SHARED_Q> struct stx__attn_fwd_shape {
    typedef Pr_ Pr;

    enum {
        SIZE = Pr::SIZE,
        STRIPS = MT,
        KEYS = BK,
        Q_IN_SHARED = SHARED_Q,
        Q_REGS = SIZE == 2, /* fragments of q stay in registers */
        BQ = 64 * MT,
        CH = DP * SIZE / 16,
        KS = CH / 2,
        NB = BK / 8,
        ND = DP / 8,
        QS = Q_REGS ? KS : 1, /* fragments of q per strip */
        ROW = CH * 16,        /* bytes per row of a tile */
        TILE = BK * ROW,      /* bytes per tile */
        RING = BQ + 2 * BK,   /* number of rows of pe in the ring */
        THREADS = 128,
        RAMP = BK + 16 * MT,                        /* query-key distances per warp and tile */
        HEADER = (64 + 16 * RAMP + 127) / 128 * 128 /* the job, and the ramp weights of 4 warps */
    };

    /* Returns the size of shared memory in bytes. `two` is nonzero if u or vb is given.
       If q is kept in registers, it is first loaded into the second pair of K and V
       tiles. */
    static size_t shared(int pe, int two) {
        size_t rows = 4 * BK + (pe ? RING : 0);
        if (!Q_REGS)
            rows += two ? 2 * BQ : BQ;
        else if (SHARED_Q)
            rows += BQ;
        return HEADER + ROW * rows;
    }

    /* The number of blocks that should fit on a multiprocessor. It limits the registers
       per thread. */
    enum { BLOCKS = MT > 1 || DP > 64 || !Q_REGS ? 2 : 3 };
};

/* Starts the copies of step s into the tiles that step s - 2 used. */
template <class X>
static __device__ __forceinline__ void stx__attn_fwd_load(const stx__attn_params &p,
                                                          const stx__attn_job &job,
                                                          unsigned char *shared, int s) {
    const int window = s < job.window_steps,
              j0 = window ? job.first + s * X::KEYS
                          : (s - job.window_steps) * X::KEYS - ((p.S + p.span) & 7),
              bytes = p.D * X::SIZE;
    unsigned char *to = shared + (s & 1) * 2 * X::TILE, *ring = shared + 4 * X::TILE;
    if (window) {
        if (!p.key_mask || stx__attn_key_mask<X::KEYS>(p, job.b, j0))
            stx__attn_load_kv<X::CH, X::THREADS, X::SIZE>(p, to, to + X::TILE, X::KEYS, job.b,
                                                          job.h, j0);
    } else {
        const size_t o = (size_t)job.h * p.N * p.D * X::SIZE;
        stx__attn_load<X::CH, X::THREADS>(to, X::KEYS, (const char *)p.pk + o, (size_t)bytes, bytes,
                                          j0, 0, p.N);
        stx__attn_load<X::CH, X::THREADS>(to + X::TILE, X::KEYS, (const char *)p.pv + o,
                                          (size_t)bytes, bytes, j0, 0, p.N);
    }
    if (window && p.pe) {
        const char *pe = (const char *)p.pe + (size_t)job.h * p.pe_head_stride * X::SIZE;
        int row = p.P - 1 + p.delta_min - p.C + j0 - job.i0, at = (X::BQ + X::KEYS * s) % X::RING;
        if (!s)
            stx__attn_load<X::CH, X::THREADS>(ring, X::BQ, pe, (size_t)p.pe_row_stride * X::SIZE,
                                              bytes, row - X::BQ, 0, p.P);
        stx__attn_load<X::CH, X::THREADS>(ring + at * X::ROW, X::KEYS, pe,
                                          (size_t)p.pe_row_stride * X::SIZE, bytes, row, 0, p.P);
    }
    stx__cp_commit();
}

/* Wraps `row`, which is out of range by at most N, into a ring of N rows. */
template <int N> static __device__ __forceinline__ int stx__attn_ring(int row) {
    int by = row >= N ? -N : 0;
    if (row < 0) by = N;
    return row + by;
}
