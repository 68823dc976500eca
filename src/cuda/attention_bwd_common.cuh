#pragma once
#include "common.cuh"
#include "attention_common.cuh"
#include "attention_fwd_tiles.cuh"


// >>attention: backward

/* Backward pass. For each query i and key j, the forward pass computed

       s = scale ((q + u).K_j + (q + vb).PE_p)      w = e^(s - row_max) inv_sum
       a = m w                                      y_i = O_i = sum over j of r a V_j

   where p is the table row for the distance from i to j, m the ramp weight of the span
   and r the dropout factor. The gradients are

       gamma = r dO.V_j        Dsum = dO.O        ds = a (gamma - Dsum)
       dV_j  += r a dO         dK_j  += scale ds (q + u)
       dQ_i  += scale ds (K_j + PE_p)             dPE_p += scale ds (q + vb)
       dz    += max_span / ramp  times the sum of w (gamma - Dsum) over all keys with
                0 <= m' <= 1, where m' is m before it is clamped

   ds is a matrix of queries by keys. Each gradient sums it in a different direction:

                 keys j                 dQ       along rows
               +---------------+        dK, dV   along columns
       queries | \   \   \      |        dPE      along diagonals, where j - i and
          i    |   \   \   \    |                 thus the table row are constant
               |     \   \   \  |
               +---------------+

   There are three sweeps. Each accumulates its sums in registers, so the order of every
   sum is fixed and no atomics are needed:

       queries     One block per query tile walks the key tiles. It computes dQ
                   and partial sums of du, dvb and dz.
       keys        One block per key tile walks the query tiles. It computes dK
                   and dV, or for persistent vectors partial sums of dpk and dpv.
       diagonals   One block per diagonal walks batch rows, heads and tiles. It computes
                   a partial sum of dPE for the heads that have no rows of dR.

   The partial sums are then added in a fixed order (stx__attn_bwd_fold,
   stx__attn_bwd_fold_diagonals). All sweeps recompute the logits, probabilities and ds of
   a tile in the same way (stx__attn_bwd_interior, stx__attn_bwd_edge_group). Their costs
   in units of one matmul per tile (2 BQ BK D flops), at BQ = BK = 64:

       queries     R 1.25   S 1   dP 1   ds K 1    dR PE 1.25      5.5
       keys        R 1.25   S 1   dP 1   dV 1      dK 1            5.25
       diagonals   R 1.25   S 1   dP 1   dPE 1.25                  4.5
       table       dPE 1                                           1

   Rows of dR. In bfloat16, most heads do not need the third sweep. The query sweep has
   dR in registers anyway. It stores dR, and multiplying the transpose of dR by q + vb
   gives dPE (stx__attn_bwd_table). This costs 1 unit instead of 4.5, plus 4 bytes of
   memory traffic per score. A row of dR has one column per distance that its head sees,
   rounded up to 16 columns. A head with a short span therefore uses little memory and
   multiplies few zeros, whereas its tiles in the third sweep would be half empty. At
   B = 64, T = 512 and span 8192, the rows of 8 heads would take 4 GB. Therefore
   STX__ATTN_BWD_DR_BYTES are distributed over the heads, the narrowest first
   (stx__attn_make_list), and heads without columns are processed by the third sweep.
   The third sweep is always launched, unless the memory suffices for all heads at full
   span. Calls with padded keys and calls in float always use the third sweep. Both
   methods round dR to bfloat16, so their results differ only by the order of the sums.

   - Column y of a row of dR is for the key with j - i = newest - width + y. newest is
     C - delta_min + 1, one more than j - i of the youngest key, plus up to 15, so that 16
     columns are one chunk of a strip.
   - A strip stores 16 rows by 16 columns at a time. Each thread stores four adjacent
     elements of a row, which permutes the columns: position 4t + k in memory is column
     2t + (k & 1) + 8 (k >> 1).
   - A tile yields BK + 16 columns. The last 16 are incomplete until the next tile has
     contributed to them; meanwhile they wait in shared memory.
   - Columns of keys before the first one and strips beyond T are neither stored nor read.

   The partial sums of dPE have the shape (diagonals or blocks of columns, tables, splits
   of the batch, rows, D). The number of splits is limited so that they take at most
   STX__ATTN_BWD_PART_BYTES.

   The skew. A warp owns a strip of 16 queries and uses BK + 16 table rows per tile: query
   r of the strip and key c of the tile use row c - r + 16 of these. Shuffles move the
   elements of R = (q + vb) PE^T to their keys in S (stx__attn_skew_block), and the
   reverse shuffles turn ds into dR (stx__attn_bwd_unskew). A tile uses PE_ROWS = BQ + BK
   table rows, its pe window; the rows of strip n begin at row BQ - 16 - 16 n of the
   window. The window is a ring of chunks of 16 rows, so that a step of a sweep loads only
   the BK or BQ rows that are new:

       pe window    0                    BQ                   BQ + BK
                    |--------------------|--------------------|
       strip 3      |=========================|                    BQ = BK = 64
       strip 2           |=========================|
       strip 1                |=========================|
       strip 0                     |=========================|

   The registers of a warp hold S and gamma, later r a and ds, (16,BK) each. The query
   sweep also keeps ds K and dR PE, (16,DP) each; the key sweep keeps dK and dV, 16 keys
   by DP / KEY_SPLIT columns each; the diagonal sweep keeps the gradient of
   PE_ROWS / PE_GROUPS table rows by DP / PE_SPLIT columns.

   The loads of one tile, all from L2, and the shared memory of a block (with prefetching
   of the next tile), at D = 64 in bfloat16:

       sweep       loads                                            MFLOP   shared memory
       ---------   ----------------------------------------------   -----   -------------
       queries     24 KiB: K, V, 64 table rows                      2.88    49 (73) KiB
       keys        24 KiB: q (twice with biases), dO, 64 rows       2.75    65 (89) KiB
       diagonals   32 KiB: q, dO, K, V                              2.36    65 (97) KiB

   Rows of dR add 2 KiB in the query sweep; u or vb adds 8 KiB in all sweeps. Registers
   allow two blocks on a multiprocessor with 64 Ki registers. With 228 KiB of shared
   memory, two blocks fit with prefetching in all three sweeps; with 164 KiB (sm_80),
   only in the query sweep, without u and vb.

   Order of sums. One thread sums each element of dQ over the tiles from old to young, and
   each element of dK and dV over the queries in ascending order. dPE, du, dvb, dz, dpk
   and dpv are sums of partial sums. The number of partial sums depends on sizes alone,
   and they are added in a fixed order. Prefetching does not change the order of any sum.
   Runs repeat bit-exactly. */

/* The parameters of the three sweeps, including those of the forward pass (p). */
typedef struct stx__attn_bwd_params {
    stx__attn_params p;
    const void *dy; /* (B,T,H D), same storage as y */
    stx__array dq, dk, dv;
    stx__array cached_dk[STX_HEAD_GROUPS], cached_dv[STX_HEAD_GROUPS]; /* gradients of
                                                                          cached rows */
    int overwrite;                                                   /* as in stx_attention_args */
    float *dsum;                                                     /* (B,H,T): dO.O */
    float *du, *dvb;               /* partial sums of the query sweep: (B * tiles,H D) */
    float *dz;                     /* partial sums of the query sweep: (B * tiles,H) */
    float *dpk, *dpv;              /* partial sums of the key sweep: (splits,H,N,D) */
    float *dpe;                    /* partial sums: (diagonals,tables,splits,PE_ROWS,D),
                                      or, if computed from rows of dR, (blocks,
                                      tables,splits,columns,D) */
    int *used;                     /* (diagonals or blocks,tables,splits): 1 if the partial
                                      sum was written */
    stx__bf16 *dr;                 /* rows of dR, or NULL. The rows of head h,
                                      (B,tiles * BQ,width), begin at element
                                      B * tiles * BQ * slot[h].at */
    const stx__attn_dr_slot *slot; /* (H), if there are rows of dR */
    int newest;                    /* j - i + 1 for the last column of a row of dR */
    int tiles;                     /* number of query tiles */
    int first;                     /* key sweep: first key of tile 0; diagonal sweep: first
                                      key minus first query in diagonal 0 */
    int splits;                    /* number of splits that the units are divided into; one
                                      partial sum per split */
    int units;                     /* number of units: batch rows, or (batch row, head)
                                      pairs if all heads share a table */
    int persistent;                /* 1 if the key sweep processes persistent vectors */
    int prefetch;                  /* 1 if shared memory has space for the next tile */
    float root_d, root_n;          /* sqrt(D), sqrt(N) */
} stx__attn_bwd_params;

/* Returns the unroll factor of a loop over `steps` steps of D. Longer loops are
   unrolled less, because the addresses of each step occupy registers. */
static constexpr __host__ __device__ int stx__attn_bwd_unroll(int steps) {
    if (steps > 8) return 1;
    return steps == 8 ? 4 : steps;
}

/* Returns the number of 16-byte pieces in a row of `bytes` bytes, rounded up to 8, 16
   or 32. */
static constexpr __host__ __device__ int stx__attn_bwd_dr_pieces(int bytes) {
    if (bytes > 256) return 32;
    return bytes > 128 ? 16 : 8;
}

/* The shape of a tile: BQ queries (one warp per strip of 16) by BK keys. Rows have DP
   elements. */
template <class Pr_, int DP_, int BQ_, int BK_> struct stx__attn_bwd_shape {
    typedef Pr_ Pr;

    enum {
        DP = DP_,
        BQ = BQ_,
        BK = BK_,
        STRIPS = BQ / 16,
        THREADS = 32 * STRIPS,
        PE_ROWS = BQ + BK, /* table rows that a tile uses */
        CHUNKS = PE_ROWS / 16,
        NB = BK / 8,
        SIZE = Pr_::SIZE,
        CH = DP * SIZE / 16,
        STEPS = DP / Pr_::K,
        UNROLL = stx__attn_bwd_unroll(STEPS),

        /* 16-byte pieces per row of r a or ds, and per row of dR */
        CH_DS = BK * SIZE / 16,
        CH_DR = stx__attn_bwd_dr_pieces((BK + 16) * SIZE),

        /* key sweep: a warp computes the sums for 16 keys and DP / KEY_SPLIT columns */
        KEY_SPLIT = STRIPS / (BK / 16),
        KEY_NB = DP / KEY_SPLIT / 8,

        /* diagonal sweep: a warp computes the sums for every PE_GROUPS-th chunk and DP
           / PE_SPLIT columns, which must be a multiple of 16 */
        PE_SPLIT = DP % (16 * STRIPS) ? 2 : STRIPS,
        PE_GROUPS = STRIPS / PE_SPLIT,
        PE_NB = DP / PE_SPLIT / 8,

        /* bytes of shared memory */
        TILE_Q = BQ * CH * 16,
        TILE_K = BK * CH * 16,
        TILE_PE = PE_ROWS * CH * 16,
        CHUNK = 16 * CH * 16,
        DISTANCES = BK + 16, /* a strip and a tile have BK + 15 distances */
        RAMPS = STRIPS * DISTANCES * 4,
        BIAS = DP * 4,

        /* Minimum numbers of blocks per multiprocessor, or 0 for none. In the query
           sweep, a minimum of 2 would make nvcc spill registers for wide heads. */
        QUERY_BLOCKS = DP == 32 ? (int)Pr::QUERY_BLOCKS_32 : 0,
        KEY_BLOCKS = DP == 32 ? (int)Pr::KEY_BLOCKS_32 : 2 * (THREADS == 128),
        DIAGONAL_BLOCKS = 3 * (DP == 32 && SIZE == 2),
        MASK = 1 /* 1 if missing keys are supported */
    };
};

/* Kernel shapes. Each kernel is compiled twice if MASKED_SIZES is not 0: once with
   support for missing keys, once for calls whose keys all exist. */
template <class Sh, int MASKED_SIZES> struct stx__attn_bwd_variants {
    typedef stx__attn_bwd_shape<typename Sh::Pr::masked, Sh::DP, Sh::BQ, Sh::BK> masked;

    struct unmasked : Sh {
        enum { MASK = 0 };
    };
};

template <class Sh> struct stx__attn_bwd_variants<Sh, 0> { typedef Sh masked, unmasked; };

/* The shared memory of a block. With prefetching, arrays that change from tile to tile
   have two buffers, so that the next tile is copied while the current one is processed.

       ramps | u vb | K V q dO | second buffers | q+vb | pe window (+ next) | exchange

   `ramps` holds the ramp weights of each warp, see "Edges". u and vb are the biases of
   the head, as floats. q becomes q + u in place; q + vb is stored separately if the
   positions use a different query than the keys. K and V change in the query sweep, q
   and dO in the key sweep, and all four in the diagonal sweep. For the next tile, the
   window has BK or BQ more rows; the window of a diagonal never changes. `exchange`
   holds data that warps pass to each other. */
enum { STX__MOVES_K = 1, STX__MOVES_Q = 2 };

template <class Sh> struct stx__attn_bwd_shared {
    unsigned char *q, *qv, *dy, *k, *v, *pe, *exchange;
    float *ramp; /* ramp weights of this warp */
    float *u, *vb;

    __device__ __forceinline__ stx__attn_bwd_shared(unsigned char *base, int moves, int prefetch,
                                                    int two, int rows) {
        ramp = (float *)base + (int)threadIdx.x / 32 * Sh::DISTANCES;
        u = (float *)(base + Sh::RAMPS);
        vb = u + Sh::DP;
        k = base + Sh::RAMPS + 2 * Sh::BIAS;
        v = k + Sh::TILE_K;
        q = v + Sh::TILE_K;
        dy = q + Sh::TILE_Q;
        qv = dy + Sh::TILE_Q + (prefetch ? moving_bytes(moves) : 0);
        pe = qv + (two ? Sh::TILE_Q : 0);
        if (!two) qv = q;
        exchange = pe + rows * Sh::CH * 16;
    }

    /* Returns the arrays of tile n. Arrays with two buffers alternate between them. */
    __device__ __forceinline__ stx__attn_bwd_shared(const stx__attn_bwd_shared &m, int moves,
                                                    int prefetch, int n) {
        int by = 0;
        if (prefetch && n & 1)
            by = moves == STX__MOVES_Q ? 2 * Sh::TILE_Q : 2 * (Sh::TILE_K + Sh::TILE_Q);
        *this = m;
        if (moves & STX__MOVES_K) {
            k += by;
            v += by;
        }
        if (moves & STX__MOVES_Q) {
            q += by;
            dy += by;
            if (m.qv == m.q) qv = q;
        }
    }

    static constexpr __host__ __device__ int moving_bytes(int moves) {
        return (moves & STX__MOVES_K ? 2 * Sh::TILE_K : 0)
               + (moves & STX__MOVES_Q ? 2 * Sh::TILE_Q : 0);
    }
};

/* Additional loaders of matmul operands. A step of k is Pr::K rows here.

       frag_acc    16 rows by Pr::K columns of an accumulator as a left factor. With
                   floats, k has the order 0 2 4 6 1 3 5 7, so that elements stay in
                   their lanes
       frag_rows   Pr::K rows from r0 by 16 columns from 8c as two right factors, with
                   the same order of k
       frag_cols   the same rows and columns, transposed, as a left factor */
static __device__ __forceinline__ void stx__attn_bwd_frag_acc(stx__attn_bf16, uint32_t (&a)[4],
                                                              const float (*c)[4], int step) {
    a[0] = stx__pair(c[2 * step][0], c[2 * step][1]);
    a[1] = stx__pair(c[2 * step][2], c[2 * step][3]);
    a[2] = stx__pair(c[2 * step + 1][0], c[2 * step + 1][1]);
    a[3] = stx__pair(c[2 * step + 1][2], c[2 * step + 1][3]);
}

template <class Pr>
static __device__ __forceinline__ void stx__attn_bwd_frag_acc(Pr, uint32_t (&a)[4],
                                                              const float (*c)[4], int step) {
    a[0] = __float_as_uint(c[step][0]);
    a[1] = __float_as_uint(c[step][2]);
    a[2] = __float_as_uint(c[step][1]);
    a[3] = __float_as_uint(c[step][3]);
}

template <int CH>
static __device__ __forceinline__ void stx__attn_bwd_frag_rows(stx__attn_bf16, uint32_t (&b)[4],
                                                               const unsigned char *tile, int r0,
                                                               int c,
                                                               int lane = (int)threadIdx.x & 31) {
    stx__attn_frag_v<CH>(b, tile, r0, c, lane);
}

template <int CH, class Pr>
static __device__ __forceinline__ void stx__attn_bwd_frag_rows(Pr, uint32_t (&b)[4],
                                                               const unsigned char *tile, int r0,
                                                               int c,
                                                               int lane = (int)threadIdx.x & 31) {
    int g = lane >> 2, t = lane & 3, e;
#pragma unroll
    for (e = 0; e < 4; e++)
        b[e] = *(const uint32_t *)(tile
                                   + stx__attn_swizzle<CH>(r0 + 2 * t + (e & 1),
                                                           2 * c + (e & 2) + (g >> 2))
                                   + (g & 3) * 4);
}

template <int CH>
static __device__ __forceinline__ void stx__attn_bwd_frag_cols(stx__attn_bf16, uint32_t (&a)[4],
                                                               const unsigned char *tile, int r0,
                                                               int c,
                                                               int lane = (int)threadIdx.x & 31) {
    stx__ldmatrix_x4_trans(a, tile
                                  + stx__attn_swizzle<CH>(r0 + (lane & 7) + (lane >> 4) * 8,
                                                          c + ((lane >> 3) & 1)));
}

template <int CH, class Pr>
static __device__ __forceinline__ void stx__attn_bwd_frag_cols(Pr, uint32_t (&a)[4],
                                                               const unsigned char *tile, int r0,
                                                               int c,
                                                               int lane = (int)threadIdx.x & 31) {
    int g = lane >> 2, t = lane & 3, e;
#pragma unroll
    for (e = 0; e < 4; e++)
        a[e] = *(const uint32_t *)(tile
                                   + stx__attn_swizzle<CH>(r0 + 2 * t + (e >> 1),
                                                           2 * c + (e & 1) * 2 + (g >> 2))
                                   + (g & 3) * 4);
}

/* Stores two adjacent elements in row r of a tile, in columns c and c + 1. c must be
   even. */
template <class Pr, int CH>
static __device__ __forceinline__ void stx__attn_bwd_put2(unsigned char *tile, int r, int c,
                                                          float x, float y) {
    int at = c * Pr::SIZE;
    stx__attn_store2((typename Pr::element *)(tile + stx__attn_swizzle<CH>(r, at / 16) + at % 16),
                     x, y);
}

template <int N> static __device__ __forceinline__ void stx__attn_bwd_clear(float (&c)[N][4]) {
    int n, e;
#pragma unroll
    for (n = 0; n < N; n++)
#pragma unroll
        for (e = 0; e < 4; e++) c[n][e] = 0;
}

static __device__ __forceinline__ void stx__attn_bwd_copy(float (&to)[4], const float (&from)[4]) {
    int e;
#pragma unroll
    for (e = 0; e < 4; e++) to[e] = from[e];
}

/* Adds `a` b^T to c (16,8 NB), where `a` consists of rows r0 .. r0+15 of the first
   tile, and b of the first 8 NB rows of the second. */
template <class Sh, int NB>
static __device__ __forceinline__ void stx__attn_bwd_dot(float (&c)[NB][4], const unsigned char *a,
                                                         int r0, const unsigned char *b,
                                                         int lane = (int)threadIdx.x & 31) {
    int k, n;
#pragma unroll(Sh::UNROLL)
    for (k = 0; k < Sh::STEPS; k++) {
        uint32_t f[4], h[4];
        stx__attn_frag_a<Sh::CH>(f, a, r0, k, lane);
#pragma unroll
        for (n = 0; n < NB; n += 2) {
            stx__attn_frag_b<Sh::CH>(h, b, n * 8, k, lane);
            Sh::Pr::mma2(c[n], c[n + 1], f, h);
        }
    }
}

/* Adds x (16,8 NB) times the first 8 NB rows of the tile to c (16,DP). x is an
   accumulator. Pr::add would be more accurate but takes too many registers. Here
   truncation does little harm: a row of ds sums to 0, so the errors have both signs. */
template <class Sh, int NB>
static __device__ __forceinline__ void stx__attn_bwd_times(float (&c)[Sh::DP / 8][4],
                                                           const float (&x)[NB][4],
                                                           const unsigned char *tile,
                                                           int lane = (int)threadIdx.x & 31) {
    typedef typename Sh::Pr Pr;
    int k, n;
#pragma unroll
    for (k = 0; k < NB * 8 / Pr::K; k++) {
        uint32_t f[4], h[4];
        stx__attn_bwd_frag_acc(Pr(), f, x, k);
#pragma unroll
        for (n = 0; n < Sh::DP / 8; n += 2) {
            stx__attn_bwd_frag_rows<Sh::CH>(Pr(), h, tile, k * Pr::K, n, lane);
            Pr::mma2(c[n], c[n + 1], f, h);
        }
    }
}

/* A strip of queries, and the key tile that it processes. */
typedef struct stx__attn_bwd_strip {
    int i, j0; /* i: first query of the strip; j0: first key or vector of the tile */
    int b, h;
    int max_delta;                         /* largest distance that contributes */
    int ring, chunks;                      /* `ring` is the ring chunk of the window's first row,
                                              `chunks` the number of chunks in the ring */
    int persistent;                        /* 1 if the tile holds persistent vectors */
    float row_max[2], inv_sum[2], dsum[2]; /* values for rows g and g + 8 (g = lane / 4); 0
                                              for rows beyond T */
} stx__attn_bwd_strip;

static __device__ __forceinline__ int stx__attn_bwd_wrap(int c, int chunks) {
    return c >= chunks ? c - chunks : c;
}

/* These functions return the byte offset, in the pe window, of the n-th chunk that a
   strip uses, and of the chunk after the one at offset `at`. */
template <class Sh>
static __device__ __forceinline__ int stx__attn_bwd_pe_chunk(const stx__attn_bwd_strip &t, int n) {
    return stx__attn_bwd_wrap(t.ring + Sh::STRIPS - 1 - (int)threadIdx.x / 32 + n, t.chunks)
           * Sh::CHUNK;
}

template <class Sh>
static __device__ __forceinline__ int stx__attn_bwd_pe_next(const stx__attn_bwd_strip &t, int at) {
    return stx__attn_bwd_wrap(at + Sh::CHUNK, t.chunks * Sh::CHUNK);
}

/* Sets the batch row and the head of a strip and loads the statistics of its rows. */
static __device__ __forceinline__ void stx__attn_bwd_load_stats(const stx__attn_bwd_params &a,
                                                                stx__attn_bwd_strip &t, int b,
                                                                int h) {
    int g = ((int)threadIdx.x & 31) >> 2, e;
    size_t row = ((size_t)b * a.p.H + h) * a.p.T;
    t.b = b;
    t.h = h;
#pragma unroll
    for (e = 0; e < 2; e++) {
        int i = t.i + g + 8 * e, yes = i < a.p.T;
        t.inv_sum[e] = yes ? a.p.inv_sum[row + i] : 0;
        t.row_max[e] = yes ? a.p.row_max[row + i] : 0;
        t.dsum[e] = yes ? a.dsum[row + i] : 0;
    }
}

/* Returns whether all queries of the strip see all keys of the tile with weight 1. */
template <class Sh>
static __device__ __forceinline__ int stx__attn_bwd_is_interior(const stx__attn_params &p,
                                                                const stx__attn_window &w,
                                                                const stx__attn_bwd_strip &t) {
    /* smallest and largest distance between the strip and the tile */
    const int min_delta = p.C + t.i - (t.j0 + Sh::BK - 1), max_delta = p.C + t.i + 15 - t.j0;
    return t.i < p.T
           && (t.persistent ? t.j0 >= 0 && t.j0 + Sh::BK <= p.N
                            : t.j0 >= p.first_key && min_delta >= p.delta_min
                                  && max_delta <= t.max_delta && max_delta < w.full);
}

/* A strip processes a tile in three steps: logits, probabilities, ds. The pe window, K,
   V and the strip's own rows of q, q + vb and dO must be in shared memory. Warps need
   not synchronise, because each one writes only its own ramp weights to shared memory.
   An interior tile is processed as a whole (stx__attn_bwd_interior), an edge tile in
   groups of 16 keys (stx__attn_bwd_edge_group). Both functions sum in the same order.

   stx__attn_bwd_positions computes 16 columns of (q + vb) PE^T, one chunk, and skews
   them into s0 and s1. The first chunk of a tile only prepares `turn` for the next one:
   its s0 and s1 are not used. */
template <class Sh>
static __device__ __forceinline__ void stx__attn_bwd_positions(
    const stx__attn_bwd_shared<Sh> &m, const unsigned char *pe, const stx__attn_skew_lanes &l,
    stx__attn_skew &turn, float (&s0)[4], float (&s1)[4], int lane = (int)threadIdx.x & 31) {
    float u[2][4];
    int k;
    stx__attn_bwd_clear(u);
#pragma unroll(Sh::UNROLL)
    for (k = 0; k < Sh::STEPS; k++) {
        uint32_t f[4], h[4];
        stx__attn_frag_a<Sh::CH>(f, m.qv, (int)threadIdx.x / 32 * 16, k, lane);
        stx__attn_frag_b<Sh::CH>(h, pe, 0, k, lane);
        Sh::Pr::mma2(u[0], u[1], f, h);
    }
    stx__attn_skew_block(turn, l, u[0], s0);
    stx__attn_skew_block(turn, l, u[1], s1);
}

static __device__ __forceinline__ void stx__attn_bwd_skew_clear(stx__attn_skew &turn) {
    int e;
#pragma unroll
    for (e = 0; e < 2; e++) turn.lo[e] = turn.hi[e] = turn.next[e] = 0;
}

/* Sets s to the logits of an interior tile before scaling. Skews the position logits
   into s, then accumulates (q + u) K^T, in the same order as the forward pass. With
   MASK_KEYS, the logits of missing keys become -inf. */
template <class Sh, int MASK_KEYS>
static __device__ __forceinline__ void stx__attn_bwd_logits(const stx__attn_bwd_params &a,
                                                            const stx__attn_bwd_shared<Sh> &m,
                                                            const stx__attn_bwd_strip &t,
                                                            float (&s)[Sh::NB][4]) {
    int n;
    if (a.p.P && !t.persistent) {
        const stx__attn_skew_lanes l = stx__attn_skew_lanes_of();
        stx__attn_skew turn;
        float none[2][4];
        int at = stx__attn_bwd_pe_chunk<Sh>(t, 0);
        stx__attn_bwd_skew_clear(turn);
        stx__attn_bwd_positions<Sh>(m, m.pe + at, l, turn, none[0], none[1]);
#pragma unroll
        for (n = 0; n < Sh::BK / 16; n++) {
            at = stx__attn_bwd_pe_next<Sh>(t, at);
            stx__attn_bwd_positions<Sh>(m, m.pe + at, l, turn, s[2 * n], s[2 * n + 1]);
        }
    } else {
        stx__attn_bwd_clear(s);
    }
    stx__attn_bwd_dot<Sh, Sh::NB>(s, m.q, (int)threadIdx.x / 32 * 16, m.k);
    if (MASK_KEYS && a.p.key_mask && !t.persistent) {
        const uint64_t seen = stx__attn_key_mask<Sh::BK>(a.p, t.b, t.j0);
        if (!stx__attn_all_exist<Sh::BK>(seen))
            stx__attn_set_missing(s, seen, (int)threadIdx.x & 3, -INFINITY);
    }
}

/* Replaces s with w = e^(s - row_max) inv_sum; stx__attn_bwd_ds applies the ramp
   weight. The logit of a key that a query does not see may be far above row_max, so the
   exponent is limited in edge tiles. */
template <class Sh, int EDGE, int NB>
static __device__ __forceinline__ void stx__attn_bwd_probabilities(const stx__attn_bwd_params &a,
                                                                   const stx__attn_bwd_strip &t,
                                                                   float (&s)[NB][4]) {
    /* scale logits for exponentials to base 2 (bfloat16) or e (float), bit-identically
       to the forward pass */
    const float unit = Sh::Pr::SIZE == 2 ? STX__LOG2E : 1;
    const float sc = (t.persistent ? a.p.scale * a.root_d : a.p.scale) * unit;
    int n, e;
#pragma unroll
    for (n = 0; n < NB; n++)
#pragma unroll
        for (e = 0; e < 4; e++) {
            /* a row without keys has row_max = -inf and inv_sum = 0 */
            float row_max = t.inv_sum[e >> 1] != 0 ? t.row_max[e >> 1] : 0,
                  x = fmaf(s[n][e], sc, -row_max * unit) * (STX__LOG2E / unit);
            s[n][e] = stx__exp2(EDGE ? fminf(x, 115.0f) : x) * t.inv_sum[e >> 1];
        }
}

/* Edges. The weight of a key depends on its distance from the query and on whether it
   exists. A strip and a tile have only BK + 15 distances, so a warp computes the weight
   of each distance in its band once, one to three per lane. Entry k of the table is for
   distance d + k, where d is the distance from the strip's first query to the tile's
   last key. The entry is m, or 0 if no query sees a key at that distance. Where the
   ramp is active, the sign bit is set (even of 0), and the key contributes to dz. */
template <class Sh>
static __device__ __forceinline__ void stx__attn_bwd_ramp_table(const stx__attn_bwd_params &a,
                                                                const stx__attn_window &w,
                                                                const stx__attn_bwd_strip &t,
                                                                const stx__attn_band &band,
                                                                float *ramp) {
    const int min_delta = a.p.C + t.i - (t.j0 + Sh::BK - 1), end = Sh::BK + 15 - 16 * band.lo;
    int k;
    __syncwarp();
    for (k = Sh::BK - 16 * band.hi + ((int)threadIdx.x & 31); k < end; k += 32) {
        const int delta = min_delta + k;
        float m = 1;
        if (!t.persistent && (delta < a.p.delta_min || delta > t.max_delta))
            m = 0;
        else if (!t.persistent && a.p.z.p && delta >= w.full) {
            float raw = stx__attn_ramp(a.p, w, delta);
            m = raw <= 0 ? 0 : fabsf(raw); /* NaN stays NaN */
            if (raw >= 1) m = 1;
            if (raw >= 0 && raw <= 1) m = -m;
        }
        ramp[k] = m;
    }
    __syncwarp();
}

/* On entry, g holds dO V^T and s holds w. On return, g holds ds and s holds r a, the
   weight of V in the forward pass. c0 is the column in the tile of the first key in s.
   With EDGE, keys on the ramp add their share of the span's gradient to dz. */
template <class Sh, int EDGE, int DROP, int NB>
static __device__ __forceinline__ void stx__attn_bwd_ds(const stx__attn_bwd_params &a,
                                                        const stx__attn_bwd_strip &t,
                                                        const float *ramp, int c0, uint32_t kept,
                                                        float (&s)[NB][4], float (&g)[NB][4],
                                                        float &dz,
                                                        int lane = (int)threadIdx.x & 31) {
    const int c2 = (lane & 3) * 2, j = t.j0 + c0 + c2;
    const int lo = (t.persistent ? 0 : a.p.first_key) - j,
              hi = (t.persistent ? a.p.N : INT_MAX / 2) - j;
    const float vf = t.persistent ? a.root_n * a.p.inv_keep : a.p.inv_keep;
    int n, e;
    ramp += Sh::BK - 1 + (lane >> 2) - c2 - c0;
#pragma unroll
    for (n = 0; n < NB; n++)
#pragma unroll
        for (e = 0; e < 4; e++) {
            const int c = 8 * n + (e & 1);
            const int yes = !DROP || (kept >> (4 * n + e) & 1);
            float d = fmaf(vf, yes ? g[n][e] : 0, -t.dsum[e >> 1]), x = s[n][e];
            if (EDGE) {
                float m = c >= lo && c < hi ? ramp[8 * (e >> 1) - c] : 0;
                if (__float_as_int(m) < 0) dz += x * d;
                /* m w <= 1, but w alone may overflow where m is 0 */
                x = m == 0 ? 0 : fabsf(m) * x;
            }
            s[n][e] = yes ? x * vf : 0;
            g[n][e] = x * d;
        }
}

template <class Sh>
static __device__ __forceinline__ uint32_t stx__attn_bwd_keep_mask(const stx__attn_bwd_params &a,
                                                                   const stx__attn_bwd_strip &t) {
    const stx__attn_params &p = a.p;
    if (!p.keep) return 0xffffffffu;
    return stx__attn_keep_mask<Sh::NB>(p, p.stream + *p.shift,
                                       ((uint64_t)t.b * p.H + t.h) * p.T + t.i,
                                       (t.persistent ? p.S : 0) + p.span + t.j0);
}

/* Processes an interior tile: sets s to r a and g to ds. */
template <class Sh, int MASK_KEYS>
static __device__ __forceinline__ void stx__attn_bwd_interior(const stx__attn_bwd_params &a,
                                                              const stx__attn_bwd_shared<Sh> &m,
                                                              const stx__attn_bwd_strip &t,
                                                              float (&s)[Sh::NB][4],
                                                              float (&g)[Sh::NB][4]) {
    uint32_t kept;
    float none = 0;
    int n, e;
    stx__attn_bwd_logits<Sh, MASK_KEYS>(a, m, t, s);
    stx__attn_bwd_clear(g);
    stx__attn_bwd_dot<Sh, Sh::NB>(g, m.dy, (int)threadIdx.x / 32 * 16, m.v);
    kept = stx__attn_bwd_keep_mask<Sh>(a, t);
    stx__attn_bwd_probabilities<Sh, 0, Sh::NB>(a, t, s);
    if (a.p.keep) {
        /* complete s before computing ds; otherwise nvcc interleaves so many elements
           that registers spill */
        if (Sh::DP == 32 && Sh::SIZE == 2)
#pragma unroll
            for (n = 0; n < Sh::NB; n++)
#pragma unroll
                for (e = 0; e < 4; e++)
                    s[n][e] = __uint_as_float(
                        (uint32_t)stx__attn_opaque((int)__float_as_uint(s[n][e])));
        stx__attn_bwd_ds<Sh, 0, 1, Sh::NB>(a, t, m.ramp, 0, kept, s, g, none);
    } else
        stx__attn_bwd_ds<Sh, 0, 0, Sh::NB>(a, t, m.ramp, 0, kept, s, g, none);
}

/* State that is passed from group to group of an edge tile. `lane` is the lane of the
   thread, hidden from the optimiser by stx__attn_opaque. */
typedef struct stx__attn_bwd_edge {
    stx__attn_band band;
    int lane;
    uint32_t kept;
    stx__attn_skew turn;
} stx__attn_bwd_edge;

/* Starts an edge tile. Returns whether the band of the strip covers the whole tile. */
template <class Sh>
static __device__ __forceinline__ int stx__attn_bwd_edge_begin(const stx__attn_bwd_params &a,
                                                               const stx__attn_window &w,
                                                               const stx__attn_bwd_shared<Sh> &m,
                                                               const stx__attn_bwd_strip &t,
                                                               stx__attn_bwd_edge &edge) {
    float none[2][4];
    edge.band = stx__attn_band_of<Sh::BK>(a.p, t.persistent, t.max_delta, t.i, t.j0);
    edge.lane = stx__attn_opaque((int)threadIdx.x & 31);
    if (edge.band.lo == edge.band.hi) return 0;
    stx__attn_bwd_ramp_table<Sh>(a, w, t, edge.band, m.ramp);
    edge.kept = stx__attn_bwd_keep_mask<Sh>(a, t);
    stx__attn_bwd_skew_clear(edge.turn);
    if (a.p.P && !t.persistent)
        stx__attn_bwd_positions<Sh>(m, m.pe + stx__attn_bwd_pe_chunk<Sh>(t, edge.band.lo),
                                    stx__attn_skew_lanes_of(edge.lane), edge.turn, none[0], none[1],
                                    edge.lane);
    return !edge.band.lo && edge.band.hi == Sh::BK / 16;
}

/* Processes group n of an edge tile: sets s to r a and g to ds, both 0 where a query
   does not see a key. With READDRESS, each group recomputes its addresses (a quarter
   more instructions), for shapes in which the addresses do not fit in registers. */
template <class Sh, int MASK_KEYS, int READDRESS>
static __device__ __forceinline__ void stx__attn_bwd_edge_group(
    const stx__attn_bwd_params &a, const stx__attn_bwd_shared<Sh> &m, const stx__attn_bwd_strip &t,
    stx__attn_bwd_edge &edge, int n, float (&s)[2][4], float (&g)[2][4], float &dz) {
    const int rows = (int)threadIdx.x / 32 * 16, at = n * Sh::CHUNK;
    if (READDRESS) edge.lane = stx__attn_opaque((int)threadIdx.x & 31);
    if (a.p.P && !t.persistent)
        stx__attn_bwd_positions<Sh>(m, m.pe + stx__attn_bwd_pe_chunk<Sh>(t, n + 1),
                                    stx__attn_skew_lanes_of(edge.lane), edge.turn, s[0], s[1],
                                    edge.lane);
    else
        stx__attn_bwd_clear(s);
    stx__attn_bwd_dot<Sh, 2>(s, m.q, rows, m.k + at, edge.lane);
    if (MASK_KEYS && a.p.key_mask && !t.persistent)
        stx__attn_set_missing(s, stx__attn_key_mask<Sh::BK>(a.p, t.b, t.j0) >> 16 * n,
                              edge.lane & 3, -INFINITY);
    stx__attn_bwd_clear(g);
    stx__attn_bwd_dot<Sh, 2>(g, m.dy, rows, m.v + at, edge.lane);
    stx__attn_bwd_probabilities<Sh, 1, 2>(a, t, s);
    stx__attn_bwd_ds<Sh, 1, 1, 2>(a, t, m.ramp, 16 * n, edge.kept >> 8 * n, s, g, dz, edge.lane);
}

/* Returns element e (in lanes with odd g, element 1 - e) of row g + 8 * half in a block
   of ds, or 0 outside the tile. */
template <int NB>
static __device__ __forceinline__ float stx__attn_bwd_unskew_cell(const float (&ds)[NB][4],
                                                                  int block, int half, int e,
                                                                  int odd) {
    const int n = block >= 0 && block < NB ? block : 0;
    if (block < 0 || block >= NB) return 0;
    return odd ? ds[n][2 * half + 1 - e] : ds[n][2 * half + e];
}

/* Computes block m of dR, 8 columns, from ds. This is the inverse of the skew:

       u[g][8m + 2t + e] = ds[g][8m + 2t + e + g - 16]

   With k = floor((g + e) / 2) and e' = e ^ (g & 1), the right-hand side is element e'
   of lane (t + k) mod 4 with the same g, in block m - 2, or in block m - 1 if t + k
   exceeds 3. For row g + 8, the block number is one higher. As in stx__attn_skew_block,
   each lane is the source of exactly one other lane and offers the element of the block
   that the other lane needs. Blocks outside the tile are 0: these corners of dR belong
   to no key. */
template <int NB>
static __device__ __forceinline__ void stx__attn_bwd_unskew(float (&u)[4], const float (&ds)[NB][4],
                                                            int m,
                                                            int lane = (int)threadIdx.x & 31) {
    int g = lane >> 2, t = lane & 3, odd = g & 1, e, half;
#pragma unroll
    for (e = 0; e < 2; e++) {
        int k = (g + e) >> 1;
#pragma unroll
        for (half = 0; half < 2; half++) {
            const float a = stx__attn_bwd_unskew_cell<NB>(ds, m - 2 + half, half, e, odd),
                        b = stx__attn_bwd_unskew_cell<NB>(ds, m - 1 + half, half, e, odd);
            u[2 * half + e] = __shfl_sync(STX__ALL, t >= k ? a : b, (t + k) & 3, 4);
        }
    }
}
