#pragma once
#include "common.cuh"
#include "attention_common.cuh"
#include "attention_fwd_tiles.cuh"
#include "attention_bwd_common.cuh"
#include "attention_bwd_queries.cuh"


// >>attention: diagonal sweep

/* Advances b and i0, the batch row and the first query of a tile, to the diagonal's next
   tile that has keys, among queries lo .. hi-1. Sets b to `end` if there is none. */
template <class Sh>
static __device__ __forceinline__ void stx__attn_bwd_next_tile(const stx__attn_params &p, int &b,
                                                               int &i0, int end, int lo, int hi,
                                                               int off) {
    do {
        i0 += Sh::BQ;
        if (i0 >= hi) {
            i0 = lo;
            b++;
        }
    } while (Sh::MASK && p.key_mask && b < end && !stx__attn_key_mask<Sh::BK>(p, b, i0 + off));
}

/* Adds dR^T (q + vb) of a strip to dPE. Chunks `first` to `last` of the strip's dR must
   be in shared memory. */
template <class Sh, int XS>
static __device__ __forceinline__ void stx__attn_bwd_pe_sums(float (&acc)[XS][Sh::PE_NB][4],
                                                             const unsigned char *dr,
                                                             const unsigned char *q, int strip,
                                                             int group, int column, int first,
                                                             int last) {
    typedef typename Sh::Pr Pr;
    int k, n, x;
#pragma unroll
    for (k = 0; k < 16; k += Pr::K) {
        uint32_t f[4], y[(Sh::PE_NB + 1) / 2][4];
#pragma unroll
        for (n = 0; n < Sh::PE_NB; n += 2)
            stx__attn_bwd_frag_rows<Sh::CH>(Pr(), y[n / 2], q, strip * 16 + k, column + n);
#pragma unroll
        for (x = 0; x < XS; x++) {
            /* index among the (BK + 16) / 16 chunks of the strip */
            const int chunk = x * Sh::PE_GROUPS + group - (Sh::STRIPS - 1 - strip);
            if ((unsigned)(chunk - first) > (unsigned)(last - first)) continue;
            stx__attn_bwd_frag_cols<Sh::CH_DR>(Pr(), f, dr, strip * 16 + k, 2 * chunk);
#pragma unroll
            for (n = 0; n < Sh::PE_NB; n += 2) {
                Pr::add(acc[x][n], f, y[n / 2][0], y[n / 2][1]);
                Pr::add(acc[x][n + 1], f, y[n / 2][2], y[n / 2][3]);
            }
        }
    }
}

/* Stores 8 columns of the strip's dR in shared memory, starting at column c. */
template <class Sh>
static __device__ __forceinline__ void stx__attn_bwd_put_dr(unsigned char *dr, int c,
                                                            const float (&u)[4]) {
    typedef typename Sh::Pr Pr;
    const int strip = (int)threadIdx.x / 32, lane = (int)threadIdx.x & 31,
              r = strip * 16 + (lane >> 2), c2 = c + (lane & 3) * 2;
    stx__attn_bwd_put2<Pr, Sh::CH_DR>(dr, r, c2, u[0], u[1]);
    stx__attn_bwd_put2<Pr, Sh::CH_DR>(dr, r + 8, c2, u[2], u[3]);
}

/* Phase 1 of a tile in the diagonal sweep: a warp stores dR of its strip in shared
   memory. Returns whether the strip's band covers the whole tile. */
template <class Sh>
static __device__ __forceinline__ int stx__attn_bwd_diagonal_dr(const stx__attn_bwd_params &a,
                                                                const stx__attn_window &w,
                                                                const stx__attn_bwd_shared<Sh> &m,
                                                                const stx__attn_bwd_strip &t,
                                                                stx__attn_bwd_edge &edge) {
    const stx__attn_params &p = a.p;
    const int lane = (int)threadIdx.x & 31;
    float dz = 0;
    int all, n, k;
    if (stx__attn_bwd_is_interior<Sh>(p, w, t)) {
        float s[Sh::NB][4], g[Sh::NB][4];
        stx__attn_bwd_interior<Sh, 0>(a, m, t, s, g);
        if (Sh::MASK && p.key_mask) {
            const uint64_t seen = stx__attn_key_mask<Sh::BK>(p, t.b, t.j0);
            if (!stx__attn_all_exist<Sh::BK>(seen)) stx__attn_set_missing(g, seen, lane & 3, 0);
        }
#pragma unroll
        for (n = 0; n < Sh::NB + 2; n++) {
            float u[4];
            stx__attn_bwd_unskew<Sh::NB>(u, g, n);
            stx__attn_bwd_put_dr<Sh>(m.exchange, 8 * n, u);
        }
        return 1;
    }
    float two[4][4];
    all = stx__attn_bwd_edge_begin<Sh>(a, w, m, t, edge);
    stx__attn_bwd_clear(two);
    const int last = edge.band.hi + (edge.band.lo < edge.band.hi);
#pragma unroll 1
    for (n = edge.band.lo; n < last; n++) {
        float u[2][4], v[2][4];
        stx__attn_bwd_clear(v);
        if (n < edge.band.hi) {
            stx__attn_bwd_edge_group<Sh, 0, 1>(a, m, t, edge, n, u, v, dz);
            if (Sh::MASK && p.key_mask)
                stx__attn_set_missing(v, stx__attn_key_mask<Sh::BK>(p, t.b, t.j0) >> 16 * n,
                                      lane & 3, 0);
        }
        stx__attn_bwd_copy(two[2], v[0]);
        stx__attn_bwd_copy(two[3], v[1]);
#pragma unroll
        for (k = 0; k < 2; k++) {
            stx__attn_bwd_unskew<4>(u[k], two, 2 + k, edge.lane);
            stx__attn_bwd_put_dr<Sh>(m.exchange, 16 * n + 8 * k, u[k]);
        }
        stx__attn_bwd_copy(two[0], v[0]);
        stx__attn_bwd_copy(two[1], v[1]);
    }
    return all;
}

/* Phase 2: adds dR^T (q + vb) to dPE. `all` is 1 if the band of every strip covers the
   whole tile. */
template <class Sh, int XS>
static __device__ __forceinline__ void stx__attn_bwd_diagonal_sums(
    const stx__attn_bwd_params &a, const stx__attn_bwd_shared<Sh> &m, const stx__attn_bwd_strip &t,
    int i0, float (&acc)[XS][Sh::PE_NB][4], int group, int column, int all) {
    int i;
    if (all) {
#pragma unroll(Sh::DP > 64 || Sh::SIZE == 4 ? 1 : (int)Sh::STRIPS)
        for (i = 0; i < Sh::STRIPS; i++)
            stx__attn_bwd_pe_sums<Sh, XS>(acc, m.exchange, m.qv, i, group, column, 0, Sh::BK / 16);
        return;
    }
#pragma unroll 1
    for (i = 0; i < Sh::STRIPS; i++) {
        const stx__attn_band band = stx__attn_band_of<Sh::BK>(a.p, 0, t.max_delta, i0 + 16 * i,
                                                              t.j0);
        if (band.lo < band.hi)
            stx__attn_bwd_pe_sums<Sh, XS>(acc, m.exchange, m.qv, i, group, column, band.lo,
                                          band.hi);
    }
}

/* Processes the tiles of a diagonal for head h, batch rows b .. stop-1 and queries lo
   .. hi-1. `off` is the first key of a tile minus its first query. `used` is set to 1
   at the block's first tile, for which the pe window is loaded. */
template <class Sh, int XS>
static __device__ __forceinline__ void stx__attn_bwd_diagonal_head(
    const stx__attn_bwd_params &a, const stx__attn_window &w, const stx__attn_bwd_shared<Sh> &m,
    stx__attn_bwd_strip &t, stx__attn_bwd_edge &edge, int h, int b, int stop, int lo, int hi,
    int off, float (&acc)[XS][Sh::PE_NB][4], int group, int column, int &step, int &come,
    int &used) {
    enum { MOVES = STX__MOVES_K | STX__MOVES_Q };

    const stx__attn_params &p = a.p;
    int i0 = lo, all;
    if (Sh::MASK && p.key_mask && !stx__attn_key_mask<Sh::BK>(p, b, i0 + off))
        stx__attn_bwd_next_tile<Sh>(p, b, i0, stop, lo, hi, off);
    while (b < stop) {
        const stx__attn_bwd_shared<Sh> now(m, MOVES, a.prefetch, step),
            then(m, MOVES, a.prefetch, step + 1);
        const int i1 = i0, b1 = b, j0 = i0 + off;
        stx__attn_bwd_next_tile<Sh>(p, b, i0, stop, lo, hi, off);
        if (!come) {
            __syncthreads();
            if (!used)
                stx__attn_bwd_load_pe<Sh>(a, m, t, 0, stx__attn_bwd_window_row<Sh>(p, i1, j0), h, 0,
                                          Sh::PE_ROWS);
            stx__attn_bwd_load_kv<Sh>(a, now, j0, b1, h, 0);
            stx__attn_bwd_load_q<Sh>(a, now, i1, b1, h);
            stx__cp_commit();
        }
        used = 1;
        t.i = i1 + (int)threadIdx.x / 32 * 16;
        t.j0 = j0;
        stx__attn_bwd_load_stats(a, t, b1, h);
        /* in every tile: loading them once per head takes more registers. The barrier
           after phase 1 of the previous tile follows the last use of the old ones */
        stx__attn_bwd_load_biases<Sh>(p, m, h);
        stx__cp_wait<0>();
        __syncthreads();
        stx__attn_bwd_add_biases<Sh>(p, now, i1);
        come = a.prefetch && b < stop;
        if (come) {
            stx__attn_bwd_load_kv<Sh>(a, then, i0 + off, b, h, 0);
            stx__attn_bwd_load_q<Sh>(a, then, i0, b, h);
            stx__cp_commit();
        }
        step++;
        all = stx__attn_bwd_diagonal_dr<Sh>(a, w, now, t, edge);
        all = __syncthreads_and(all);
        stx__attn_bwd_diagonal_sums<Sh, XS>(a, now, t, i1, acc, group, column, all);
    }
}

/* The diagonal sweep. Diagonal n has the tiles (i0, j0 = i0 + first - BK n) for all i0;
   together the diagonals contain every element once. All tiles of a diagonal use the
   same pe window, which stays in shared memory, and the gradient of its PE_ROWS rows
   stays in registers. Row u of the window is table row P - 1 + extra - BK (n + 1) + u,
   where extra = first + delta_min - C - BQ + BK is the amount by which `first` was
   rounded up for dropout.

       for each tile:  wait for K, V, q and dO
                       store dR of each strip, BK + 16 columns, in shared memory  phase 1
                       barrier, which also tests whether all bands cover the tile
                       dPE += dR^T (q + vb): each warp sums its columns of D      phase 2
                       for every PE_GROUPS-th chunk of the window

   A block walks its split of the batch or, if all heads share a table, of heads and
   batch. It stores a partial sum, (PE_ROWS,D) floats, for stx__attn_bwd_fold_diagonals.
   A block without tiles only stores used = 0. The launch bound is one warp per strip and
   DIAGONAL_BLOCKS blocks per multiprocessor. */
template <class Sh>
STX__GLOBAL(Sh::THREADS, (int)Sh::DIAGONAL_BLOCKS)
stx__attn_bwd_diagonals(stx__attn_bwd_params a) {
    STX__DYNAMIC(shared);
    const stx__attn_params &p = a.p;

    enum { XS = Sh::CHUNKS / Sh::PE_GROUPS, MOVES = STX__MOVES_K | STX__MOVES_Q };

    const int strip = (int)threadIdx.x / 32, diagonal = (int)blockIdx.x, own = p.pe_head_stride > 0,
              split = (int)blockIdx.z, off = a.first - Sh::BK * diagonal;
    const int c0 = (int)((int64_t)a.units * split / a.splits),
              c1 = (int)((int64_t)a.units * (split + 1) / a.splits);
    const int group = Sh::PE_GROUPS == 1 ? 0 : strip / Sh::PE_SPLIT,
              column = strip % Sh::PE_SPLIT * Sh::PE_NB;
    /* smallest distance in a tile: from query 0 to key BK - 1 */
    const int nearest = p.C - off - (Sh::BK - 1);
    /* queries whose tiles have a key */
    const int lo = max(0, p.first_key - off - Sh::BK + Sh::BQ) / Sh::BQ * Sh::BQ,
              hi = min(p.T, p.S - off);
    const size_t part = ((size_t)diagonal * gridDim.y + blockIdx.y) * a.splits + split;
    const stx__attn_bwd_shared<Sh> m(shared, MOVES, a.prefetch, p.u.p || p.vb.p, Sh::PE_ROWS);
    stx__attn_bwd_strip t;
    stx__attn_bwd_edge edge;
    float acc[XS][Sh::PE_NB][4];
    int c, end, x, step = 0, come = 0, used = 0;

    t.ring = 0;
    t.chunks = Sh::CHUNKS;
    t.persistent = 0;
#pragma unroll
    for (x = 0; x < XS; x++) stx__attn_bwd_clear(acc[x]);
    /* one head per iteration, with its batch rows in this split */
    for (c = c0; c < c1 && lo < hi; c = end) {
        const int h = own ? (int)blockIdx.y : c / p.B, b = own ? c : c % p.B;
        const stx__attn_window w = stx__attn_window_of(p, h);
        end = own ? c1 : min(c1, (h + 1) * p.B);
        if (nearest > w.visible || (Sh::SIZE == 2 && a.dr && a.slot[h].width)) continue;
        t.max_delta = w.visible;
        stx__attn_bwd_diagonal_head<Sh, XS>(a, w, m, t, edge, h, b, b + end - c, lo, hi, off, acc,
                                            group, column, step, come, used);
    }
    if (!threadIdx.x) a.used[part] = used;
    if (used)
#pragma unroll
        for (x = 0; x < XS; x++)
            stx__attn_bwd_store_part(a.dpe + part * Sh::PE_ROWS * p.D, p.D,
                                     (x * Sh::PE_GROUPS + group) * 16, 0, Sh::PE_ROWS, column * 8,
                                     p.D, acc[x], p.scale);
}

/* Computes dPE from rows of dR: dPE += dR^T (q + vb). A block sums COLUMNS columns,
   counted from the newest; a warp sums 16 XS of them over all of D. The block walks its
   split of heads and batch rows, BQ queries per step, and copies the data of the next
   step while it processes the current one. Elements of dR that were not stored are
   loaded as 0. Heads without columns in the block are skipped. The partial sums are
   stored like those of the diagonal sweep, with one row per column of dR. */
template <class Sh> struct stx__attn_bwd_table_shape {
    enum {
        COLUMNS = Sh::DP > 64 ? 64 : 128,
        CH = COLUMNS / 8,
        XS = COLUMNS / 16 / Sh::STRIPS,
        TILE = Sh::BQ * CH * 16,
        HALF = TILE + Sh::TILE_Q, /* the data of one step */
        SHARED = 2 * HALF + Sh::BIAS
    };

    static_assert((int)SHARED <= (int)STX__SHARED_LEAST,
                  "SHARED exceeds the shared memory of some GPUs");
};

/* Starts the copies of a step: rows of q, and COLUMNS columns of dR that end `back`
   columns before the newest. */
template <class Sh>
static __device__ __forceinline__ void stx__attn_bwd_table_load(const stx__attn_bwd_params &a,
                                                                unsigned char *tile,
                                                                const stx__attn_dr_slot &f, int b,
                                                                int h, int i0, int back) {
    typedef stx__attn_bwd_table_shape<Sh> X;
    const stx__attn_params &p = a.p;
    const int c = (int)threadIdx.x % X::CH, y = f.width - back - X::COLUMNS + 8 * c,
              max_delta = (y & ~15) + a.newest - f.width,
              /* the first key at which the query sweep can begin */
        lo = ((p.first_key + p.span) & ~15) - p.span;
    const size_t T = (size_t)a.tiles * Sh::BQ;
    const stx__bf16 *from = a.dr + (size_t)f.at * p.B * T + ((size_t)b * T + i0) * f.width + y;
    const int some = y >= 0 && p.C + min(i0 + Sh::BQ, p.T) - p.delta_min > p.first_key;
    int k;
#pragma unroll
    /* each iteration loads 8 or 16 rows of one strip */
    for (k = 0; k < Sh::BQ; k += Sh::THREADS / X::CH) {
        const int r = (int)threadIdx.x / X::CH + k, i = i0 + (k & ~15),
                  yes = some && i < p.T && max_delta + i + 16 >= lo
                        && p.C + i + 15 - lo >= p.delta_min;
        stx__cp16(tile + stx__attn_swizzle<X::CH>(r, c), yes ? from + (size_t)r * f.width : a.dr,
                  yes ? 16 : 0);
    }
    stx__attn_load<Sh::CH, Sh::THREADS>(tile + X::TILE, Sh::BQ,
                                        (const char *)p.q
                                            + ((size_t)b * p.q_batch_stride + (size_t)h * p.D)
                                                  * Sh::SIZE,
                                        p.q_row_stride * Sh::SIZE, p.D * Sh::SIZE, i0, 0, p.T);
    stx__cp_commit();
}

/* Adds dR^T (q + vb) of one step to dPE, for the warp's 16 XS columns. */
template <class Sh, int XS>
static __device__ __forceinline__ void stx__attn_bwd_table_sums(float (&acc)[XS][Sh::DP / 8][4],
                                                                const unsigned char *dr,
                                                                const unsigned char *q) {
    typedef typename Sh::Pr Pr;
    const int warp = (int)threadIdx.x / 32;
    int k, n, x;
#pragma unroll
    for (k = 0; k < Sh::BQ; k += Pr::K) {
        uint32_t l[XS][4], y[4];
#pragma unroll
        for (x = 0; x < XS; x++)
            stx__attn_bwd_frag_cols<stx__attn_bwd_table_shape<Sh>::CH>(Pr(), l[x], dr, k,
                                                                       2 * (warp * XS + x));
#pragma unroll
        for (n = 0; n < Sh::DP / 8; n += 2) {
            stx__attn_bwd_frag_rows<Sh::CH>(Pr(), y, q, k, n);
#pragma unroll
            for (x = 0; x < XS; x++) Pr::mma2(acc[x][n], acc[x][n + 1], l[x], y);
        }
    }
}

template <class Sh> STX__GLOBAL(Sh::THREADS) stx__attn_bwd_table(stx__attn_bwd_params a) {
    typedef stx__attn_bwd_table_shape<Sh> X;
    STX__DYNAMIC(shared);
    const stx__attn_params &p = a.p;
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x & 31,
              own = p.pe_head_stride > 0, split = (int)blockIdx.z,
              back = (int)blockIdx.x * X::COLUMNS;
    const int c0 = (int)((int64_t)a.units * split / a.splits),
              c1 = (int)((int64_t)a.units * (split + 1) / a.splits);
    const int lo = max(0, p.first_key - (a.newest - 1 - back)) / Sh::BQ * Sh::BQ,
              steps = max(0, p.T - lo + Sh::BQ - 1) / Sh::BQ;
    const size_t part = ((size_t)blockIdx.x * gridDim.y + blockIdx.y) * a.splits + split;
    float *vb = (float *)(shared + 2 * X::HALF);
    float acc[X::XS][Sh::DP / 8][4];
    int c, end, used = 0, s, n, x, e;

#pragma unroll
    for (x = 0; x < X::XS; x++) stx__attn_bwd_clear(acc[x]);
    /* one head per iteration, with its batch rows in this split */
    for (c = c0; c < c1; c = end) {
        const int h = own ? (int)blockIdx.y : c / p.B, b = own ? c : c % p.B;
        const stx__attn_dr_slot f = a.slot[h];
        end = own ? c1 : min(c1, (h + 1) * p.B);
        if (back >= f.width || !steps) continue;
        __syncthreads();
        if (p.vb.p) stx__attn_bwd_load_bias<Sh>(p, vb, p.vb, h);
        stx__attn_bwd_table_load<Sh>(a, shared, f, b, h, lo, back);
        for (s = 0; s < (end - c) * steps; s++) {
            unsigned char *dr = shared + (s & 1) * X::HALF, *q = dr + X::TILE;
            stx__cp_wait<0>();
            __syncthreads();
            if (s + 1 < (end - c) * steps)
                stx__attn_bwd_table_load<Sh>(a, shared + ((s + 1) & 1) * X::HALF, f,
                                             b + (s + 1) / steps, h, lo + (s + 1) % steps * Sh::BQ,
                                             back);
            if (p.vb.p) {
                stx__attn_bwd_add_bias<Sh>(p, q, q, vb, lo + s % steps * Sh::BQ);
                __syncthreads();
            }
            stx__attn_bwd_table_sums<Sh, X::XS>(acc, dr, q);
        }
        used = 1;
    }
    if (!threadIdx.x) a.used[part] = used;
    if (!used) return;
#pragma unroll
    for (x = 0; x < X::XS; x++)
#pragma unroll
        for (e = 0; e < 2; e++) { /* converts positions in memory to columns */
            const int at = (lane >> 2) + 8 * e,
                      column = (warp * X::XS + x) * 16 + (at >> 2) * 2 + (at & 1) + (at & 2) * 4;
            float *to = a.dpe + (part * X::COLUMNS + column) * p.D + (lane & 3) * 2;
#pragma unroll
            for (n = 0; n < Sh::DP / 8; n++)
                if (8 * n < p.D)
                    *(float2 *)(to + 8 * n) = make_float2(p.scale * acc[x][n][2 * e],
                                                          p.scale * acc[x][n][2 * e + 1]);
        }
}

/* Adds to each row of dpe (P,tables D) the partial sums of the diagonals whose windows
   include the row. Sums in ascending order of diagonals and, for each diagonal, of
   splits. One thread per element. */
STX__GLOBAL(256)
stx__attn_bwd_fold_diagonals(stx__array dpe, const float *part, const int *used, int P, int tables,
                             int D, int pe_rows, int BK, int extra, int diagonals, int splits) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x, columns = (size_t)tables * D;
    /* the row is row u of the window of diagonal n: u = BK * (n + 1) - from */
    int row = (int)(i / columns), d = (int)(i % D), own = (int)(i / D % tables),
        from = P - 1 - row + extra, n, s;
    float sum = 0;
    if (i >= (size_t)P * columns) return;
    for (n = from / BK; n < diagonals && BK * (n + 1) - from < pe_rows; n++)
        for (s = 0; s < splits; s++) {
            size_t k = ((size_t)n * tables + own) * splits + s;
            if (used[k]) sum += part[(k * pe_rows + (size_t)(BK * (n + 1) - from)) * D + d];
        }
    if (sum != 0) stx__add(dpe, i, sum, 1);
}
