#pragma once
#include "common.cuh"
#include "attention_common.cuh"
#include "attention_fwd_tiles.cuh"
#include "attention_bwd_common.cuh"


// >>attention: query sweep

/* The stx__attn_bwd_load functions start copies of q and dO, of K and V, or of table
   rows. All threads of the block must call these functions. The data is valid after the
   next cp_wait and barrier. */
template <class Sh>
static __device__ __forceinline__ void stx__attn_bwd_load_q(const stx__attn_bwd_params &a,
                                                            const stx__attn_bwd_shared<Sh> &m,
                                                            int i0, int b, int h) {
    const stx__attn_params &p = a.p;
    const char *q = (const char *)p.q + ((size_t)b * p.q_batch_stride + (size_t)h * p.D) * Sh::SIZE;
    const size_t ld = (size_t)p.H * p.D;
    stx__attn_load<Sh::CH, Sh::THREADS>(m.q, Sh::BQ, q, p.q_row_stride * Sh::SIZE, p.D * Sh::SIZE,
                                        i0, 0, p.T);
    stx__attn_load<Sh::CH, Sh::THREADS>(m.dy, Sh::BQ,
                                        (const char *)a.dy
                                            + ((size_t)b * p.T * ld + (size_t)h * p.D) * Sh::SIZE,
                                        ld * Sh::SIZE, p.D * Sh::SIZE, i0, 0, p.T);
}

/* Stores a bias of head h in shared memory, as DP floats. All threads of the block must
   call this function; the data is valid after the next barrier. */
template <class Sh>
static __device__ __forceinline__ void stx__attn_bwd_load_bias(const stx__attn_params &p,
                                                               float *to, const stx__array &bias,
                                                               int h) {
    int c;
    for (c = stx__attn_opaque((int)threadIdx.x); c < Sh::DP; c += Sh::THREADS)
        to[c] = bias.p && c < p.D ? stx__get(bias, (size_t)h * p.D + c) : 0;
}

template <class Sh>
static __device__ __forceinline__ void stx__attn_bwd_load_biases(const stx__attn_params &p,
                                                                 const stx__attn_bwd_shared<Sh> &m,
                                                                 int h) {
    if (!p.u.p && m.qv == m.q) return;
    stx__attn_bwd_load_bias<Sh>(p, m.u, p.u, h);
    stx__attn_bwd_load_bias<Sh>(p, m.vb, p.vb, h);
}

/* Stores the rows of `from` plus a bias in `to`, for the warp's strip of a tile that
   begins at query i0. Rows beyond T stay 0. */
template <class Sh>
static __device__ __forceinline__ void stx__attn_bwd_add_bias(const stx__attn_params &p,
                                                              unsigned char *to,
                                                              const unsigned char *from,
                                                              const float *bias, int i0) {
    enum { PER = 16 / Sh::SIZE, ACROSS = stx__attn_across(Sh::CH) };

    /* hidden, so that no addresses occupy registers throughout the sweep */
    const int thread = stx__attn_opaque((int)threadIdx.x), c = thread % ACROSS,
              first = thread / 32 * 16 + thread % 32 / ACROSS;
    float add[PER];
    int r, e;
    if (c >= Sh::CH) return;
#pragma unroll
    for (e = 0; e < PER; e += 4) {
        const float4 v = *(const float4 *)(bias + c * PER + e);
        add[e] = v.x;
        add[e + 1] = v.y;
        add[e + 2] = v.z;
        add[e + 3] = v.w;
    }
#pragma unroll 1
    for (r = first; r < first + 16; r += 32 / ACROSS) {
        const unsigned at = stx__attn_swizzle<Sh::CH>(r, c);
        const uint4 v = *(const uint4 *)(from + at);
        *(uint4 *)(to + at) = i0 + r < p.T ? stx__attn_add_bias(v, add) : v;
    }
}

/* Adds the biases to the rows of q in shared memory: stores q + vb in a separate tile and
   replaces q with q + u. Each warp processes its own strip. */
template <class Sh>
static __device__ __forceinline__ void stx__attn_bwd_add_biases(const stx__attn_params &p,
                                                                const stx__attn_bwd_shared<Sh> &m,
                                                                int i0) {
    if (!p.u.p && m.qv == m.q) return;
    if (m.qv != m.q) stx__attn_bwd_add_bias<Sh>(p, m.qv, m.q, m.vb, i0);
    if (p.u.p) stx__attn_bwd_add_bias<Sh>(p, m.q, m.q, m.u, i0);
    __syncwarp();
}

template <class Sh>
static __device__ __forceinline__ void stx__attn_bwd_load_kv(const stx__attn_bwd_params &a,
                                                             const stx__attn_bwd_shared<Sh> &m,
                                                             int j0, int b, int h, int persistent) {
    const stx__attn_params &p = a.p;
    if (persistent) {
        size_t o = (size_t)h * p.N * p.D * Sh::SIZE;
        stx__attn_load<Sh::CH, Sh::THREADS>(m.k, Sh::BK, (const char *)p.pk + o,
                                            (size_t)p.D * Sh::SIZE, p.D * Sh::SIZE, j0, 0, p.N);
        stx__attn_load<Sh::CH, Sh::THREADS>(m.v, Sh::BK, (const char *)p.pv + o,
                                            (size_t)p.D * Sh::SIZE, p.D * Sh::SIZE, j0, 0, p.N);
    } else {
        stx__attn_load_kv<Sh::CH, Sh::THREADS, Sh::SIZE>(p, m.k, m.v, Sh::BK, b, h, j0);
    }
}

/* Zeroes missing keys in K and V, which must be in shared memory, and then waits at a
   barrier. Does nothing if all keys exist. */
template <class Sh>
static __device__ __forceinline__ void stx__attn_bwd_zero_missing(const stx__attn_bwd_params &a,
                                                                  const stx__attn_bwd_shared<Sh> &m,
                                                                  int b, int j0) {
    const uint64_t seen = stx__attn_key_mask<Sh::BK>(a.p, b, j0);
    if (stx__attn_all_exist<Sh::BK>(seen)) return;
    stx__attn_zero_missing<Sh::CH, Sh::THREADS, Sh::BK>(m.k, seen);
    stx__attn_zero_missing<Sh::CH, Sh::THREADS, Sh::BK>(m.v, seen);
    __syncthreads();
}

/* Starts copies of rows `from` .. `from`+n-1 of the pe window. Row 0 of the window is
   table row p0 and is stored in chunk `ring`. No copy of BK rows wraps around the
   ring. */
template <class Sh>
static __device__ __forceinline__ void stx__attn_bwd_load_pe(const stx__attn_bwd_params &a,
                                                             const stx__attn_bwd_shared<Sh> &m,
                                                             const stx__attn_bwd_strip &t, int ring,
                                                             int p0, int h, int from, int n) {
    const stx__attn_params &p = a.p;
    const char *pe = (const char *)p.pe + (size_t)h * p.pe_head_stride * Sh::SIZE;
    int r;
    for (r = from; r < from + n; r += Sh::BK)
        stx__attn_load<Sh::CH, Sh::THREADS>(
            m.pe + stx__attn_bwd_wrap(ring + r / 16, t.chunks) * Sh::CHUNK, Sh::BK, pe,
            (size_t)p.pe_row_stride * Sh::SIZE, p.D * Sh::SIZE, p0 + r, 0, p.P);
}

/* Returns the number of table rows in shared memory: the rows of a tile, plus `next`
   rows with prefetching. */
template <class Sh>
static __device__ __forceinline__ int stx__attn_bwd_held(const stx__attn_bwd_params &a, int table,
                                                         int next) {
    if (!table) return 0;
    return Sh::PE_ROWS + (a.prefetch ? next : 0);
}

/* Returns the table row of row 0 of the pe window, for queries from i0 and keys from
   j0. */
template <class Sh>
static __device__ __forceinline__ int stx__attn_bwd_window_row(const stx__attn_params &p, int i0,
                                                               int j0) {
    return p.P - 1 + p.delta_min - p.C + j0 - i0 - Sh::BQ;
}

/* Sets elements i and i+1 to x and y or, with accumulate, adds x and y to them. */
static __device__ __forceinline__ void stx__attn_bwd_add2(const stx__array &to, size_t i, float x,
                                                          float y, int accumulate) {
    if (to.half && (uintptr_t)to.p % 4 == 0 && i % 2 == 0) {
        uint32_t *p = (uint32_t *)((stx__bf16 *)to.p + i);
        *p = stx__attn_add2(accumulate ? *p : 0, x, y);
    } else {
        stx__add(to, i, x, accumulate);
        stx__add(to, i + 1, y, accumulate);
    }
}

/* Processes those of the rows `row` .. `row`+15 that are in [lo,hi), starting at column
   d: sets them to f * c or, with accumulate, adds f * c to them. */
template <int NB>
static __device__ __forceinline__ void stx__attn_bwd_add_rows(const stx__array &to, size_t base,
                                                              size_t ld, int row, int lo, int hi,
                                                              int d, int D, const float (&c)[NB][4],
                                                              float f, int accumulate) {
    int lane = (int)threadIdx.x & 31, n, e;
#pragma unroll
    for (e = 0; e < 2; e++) {
        int i = row + (lane >> 2) + 8 * e;
        if (i < lo || i >= hi) continue;
#pragma unroll
        for (n = 0; n < NB; n++) {
            int at = d + 8 * n + (lane & 3) * 2;
            if (at < D)
                stx__attn_bwd_add2(to, base + (size_t)i * ld + at, f * c[n][2 * e],
                                   f * c[n][2 * e + 1], accumulate);
        }
    }
}

/* These functions return the gradient array of keys (or values), for the current block
   or for the cached rows of group g, and the bit of this array in `overwrite`. */
static __device__ __forceinline__ const stx__array &stx__attn_bwd_kv_grad(
    const stx__attn_bwd_params &a, int value, int is_cached, int g) {
    if (is_cached) return value ? a.cached_dv[g] : a.cached_dk[g];
    return value ? a.dv : a.dk;
}

static __device__ __forceinline__ int stx__attn_bwd_kv_bit(int value, int is_cached, int g) {
    if (is_cached) return STX_OVERWRITE_CACHED << g;
    return value ? STX_OVERWRITE_DV : STX_OVERWRITE_DK;
}

/* Like stx__attn_bwd_add_rows, for the gradients of keys (or values) `key` .. `key`+15
   of a head, current or cached. Keys that do not exist, or whose bit in `rows` is 0,
   have a gradient of 0. This 0 is stored if gradients are overwritten; otherwise the
   stored values are left unchanged. */
template <int NB>
static __device__ __forceinline__ void stx__attn_bwd_store_kv(const stx__attn_bwd_params &a,
                                                              int value, int b, int h, int key,
                                                              int d, const float (&c)[NB][4],
                                                              float f, uint32_t rows) {
    const stx__attn_params &p = a.p;
    const int lane = (int)threadIdx.x & 31, place = stx__attn_head_place(p, h),
              g = p.cached_rows ? place & 3 : 0;
    int n, e;
#pragma unroll
    for (e = 0; e < 2; e++) {
        const int j = key + (lane >> 2) + 8 * e, old = j < p.cached_rows,
                  yes = j >= p.first_key && (rows >> ((lane >> 2) + 8 * e) & 1);
        const stx__array to = stx__attn_bwd_kv_grad(a, value, old, g);
        const int fresh = a.overwrite & stx__attn_bwd_kv_bit(value, old, g);
        const size_t at = old ? (size_t)b * p.cached[g].batch_stride + (size_t)(place >> 2) * p.D
                                    + (size_t)(j - p.cached[g].first) * p.cached[g].row_stride
                              : (size_t)b * p.kv_batch_stride + (size_t)h * p.D
                                    + (size_t)(j - p.cached_rows) * p.kv_row_stride;
        if (j < 0 || j >= p.S || !to.p || (!yes && !fresh) || (old && j < p.cached[g].first))
            continue;
#pragma unroll
        for (n = 0; n < NB; n++) {
            const int i = d + 8 * n + (lane & 3) * 2;
            if (i < p.D)
                stx__attn_bwd_add2(to, at + i, yes ? f * c[n][2 * e] : 0,
                                   yes ? f * c[n][2 * e + 1] : 0, !fresh);
        }
    }
}

/* Like stx__attn_bwd_add_rows, for a partial sum, which is always overwritten. */
template <int NB>
static __device__ __forceinline__ void stx__attn_bwd_store_part(float *to, size_t ld, int row,
                                                                int lo, int hi, int d, int D,
                                                                const float (&c)[NB][4], float f) {
    int lane = (int)threadIdx.x & 31, n, e;
#pragma unroll
    for (e = 0; e < 2; e++) {
        int i = row + (lane >> 2) + 8 * e;
        if (i < lo || i >= hi) continue;
#pragma unroll
        for (n = 0; n < NB; n++) {
            int at = d + 8 * n + (lane & 3) * 2;
            if (at < D)
                *(float2 *)(to + (size_t)i * ld + at) = make_float2(f * c[n][2 * e],
                                                                    f * c[n][2 * e + 1]);
        }
    }
}

/* Prepares the sweeps. Computes dsum (B,H,T), the sum of dy y over D: 8 lanes per row, 32
   queries of a head per block of 256 threads. Each lane sums every 8th piece of 16 bytes,
   and the 8 lanes' sums are added in a fixed tree. The first l.blocks blocks create the
   list of query tiles instead; l.blocks is 0 if no list is required. */
typedef struct stx__attn_bwd_list {
    uint32_t *list;
    int tiles, bq, bk, newest, columns;
    stx__attn_dr_slot *place;
    unsigned blocks;
} stx__attn_bwd_list;

template <class E>
STX__GLOBAL(256)
stx__attn_bwd_prepare(stx__attn_params p, stx__attn_bwd_list l, const void *dy, float *dsum) {
    STX__SHARED(stx__attn_window, head, 256);

    enum { PER = 16 / sizeof(E) };

    const unsigned H = (unsigned)p.H, block = blockIdx.x - l.blocks,
                   tiles = (unsigned)(p.T + 31) / 32, row = block / tiles; /* row: b H + h */
    const int i = (int)(block % tiles * 32 + threadIdx.x / 8), part = (int)threadIdx.x & 7;
    const size_t at = (((size_t)(row / H) * p.T + i) * H + row % H) * p.D;
    float s = 0;
    int c, e;
    if (blockIdx.x < l.blocks) {
        stx__attn_make_list(p, l.list, l.tiles, l.bq, l.bk, l.place, l.newest, l.columns, head);
        return;
    }
    for (c = part * PER; i < p.T && c < p.D; c += 8 * PER) {
        const uint4 v = *(const uint4 *)((const E *)dy + at + c),
                    w = *(const uint4 *)((const E *)p.y + at + c);
        E x[PER], y[PER];
        memcpy(x, &v, 16);
        memcpy(y, &w, 16);
#pragma unroll
        for (e = 0; e < PER; e++) s += stx__attn_to_float(x[e]) * stx__attn_to_float(y[e]);
    }
    for (c = 4; c; c /= 2) s += __shfl_xor_sync(STX__ALL, s, c);
    if (!part && i < p.T) dsum[(size_t)row * p.T + i] = s;
}

/* How the three kernels walk their tiles. Each round has these steps:

       without prefetching   barrier (all warps have finished the previous tile), then
                             start the copies of this tile
       always                wait for the copies, then barrier (all threads' copies are
                             complete)
       with prefetching      start the copies of the next tile
       always                process this tile

   The next tile is prefetched if a.prefetch is set (shared memory suffices for it) and,
   where the pe window moves, if it is adjacent to this tile. Prefetching does not
   change results. */

/* Stores 16 columns of a strip's dR, packed as a left factor, in the strip's rows at
   `to`, starting at column y. Does nothing if column y is outside the head's `width`
   columns. */
static __device__ __forceinline__ void stx__attn_bwd_dr_store(stx__bf16 *to, int width, int y,
                                                              const uint4 &f) {
    const int lane = (int)threadIdx.x & 31;
    if (y < 0 || y >= width) return;
    to += (lane >> 2) * width + y + 4 * (lane & 3);
    *(uint2 *)to = make_uint2(f.x, f.z);
    *(uint2 *)(to + 8 * width) = make_uint2(f.y, f.w);
}

/* Stores chunk u of dR, which is in accumulators. The first chunk of a tile is combined
   with the pending chunk of the previous tile; each is zero where the other is not. The
   last chunk of a tile is not stored, but becomes the pending one (*wait). */
template <class Pr>
static __device__ __forceinline__ void stx__attn_bwd_dr_chunk(stx__bf16 *to, int width, int y,
                                                              const float (*u)[4], uint4 *wait,
                                                              int first, int last) {
    uint32_t f[4];
    stx__attn_bwd_frag_acc(Pr(), f, u, 0);
    uint4 v = make_uint4(f[0], f[1], f[2], f[3]);
    if (first) {
        const uint4 o = *wait;
        v.x |= o.x;
        v.y |= o.y;
        v.z |= o.z;
        v.w |= o.w;
    }
    if (last)
        *wait = v;
    else
        stx__attn_bwd_dr_store(to, width, y, v);
}

/* Starts the copies of a step: K, V, and rows `from` .. `from`+n-1 of the pe window. */
template <class Sh>
static __device__ __forceinline__ void stx__attn_bwd_query_fetch(const stx__attn_bwd_params &a,
                                                                 const stx__attn_bwd_shared<Sh> &m,
                                                                 const stx__attn_bwd_strip &t,
                                                                 int ring, int i0, int j0, int b,
                                                                 int h, int from, int n) {
    stx__attn_bwd_load_kv<Sh>(a, m, j0, b, h, 0);
    if (a.p.P > 0)
        stx__attn_bwd_load_pe<Sh>(a, m, t, ring, stx__attn_bwd_window_row<Sh>(a.p, i0, j0), h, from,
                                  n);
    stx__cp_commit();
}

/* Starts a block of queries. Sets the position and statistics of the strip, the range
   of keys [first,last) and the strip's rows of dR. Starts the first copies and waits
   for them. */
template <class Sh>
static __device__ __forceinline__ void stx__attn_bwd_query_open(
    const stx__attn_bwd_params &a, const stx__attn_window &w, const stx__attn_bwd_shared<Sh> &m,
    stx__attn_bwd_strip &t, int i0, int b, int h, int held, int &first, int &last, stx__bf16 *&rows,
    int &width, uint4 *wait) {
    const stx__attn_params &p = a.p;
    const int strip = (int)threadIdx.x / 32;
    stx__attn_window all = w;

    /* the key at which the ramp has just reached 0 contributes to dz */
    all.visible = w.farthest;
    stx__attn_key_range(p, all, i0, Sh::BQ, &first, &last);
    /* align chunks of 16 columns of dR the same way in all tiles */
    if (Sh::SIZE == 2 && first < last) first -= (first + p.span) & 8;
    if (Sh::MASK && p.key_mask) {
        last = min(last, p.S);
        while (first < last && !stx__attn_key_mask<Sh::BK>(p, b, first)) first += Sh::BK;
    }
    t.i = i0 + strip * 16;
    t.max_delta = w.farthest;
    t.ring = 0;
    t.chunks = held / 16;
    t.persistent = 0;
    if (Sh::SIZE == 2 && a.dr) {
        width = a.slot[h].width;
        if (width)
            rows = a.dr + (size_t)a.slot[h].at * p.B * (a.tiles * Sh::BQ)
                   + ((size_t)b * (a.tiles * Sh::BQ) + t.i) * width;
        *wait = make_uint4(0, 0, 0, 0);
    }
    stx__attn_bwd_load_stats(a, t, b, h);

    stx__attn_bwd_load_q<Sh>(a, m, i0, b, h);
    if (first < last)
        stx__attn_bwd_query_fetch<Sh>(a, m, t, 0, i0, first, b, h, 0, Sh::PE_ROWS);
    else
        stx__cp_commit();
    stx__attn_bwd_load_biases<Sh>(p, m, h);
    stx__cp_wait<0>();
    __syncthreads();
    stx__attn_bwd_add_biases<Sh>(p, m, i0);
}

/* Processes the persistent vectors: adds ds K to dk, the term of dQ that comes from
   keys. dk is in units of the scale of persistent keys. */
template <class Sh>
static __device__ __forceinline__ void stx__attn_bwd_query_vectors(
    const stx__attn_bwd_params &a, const stx__attn_window &w, const stx__attn_bwd_shared<Sh> &m,
    stx__attn_bwd_strip &t, stx__attn_bwd_edge &edge, float (&dk)[Sh::DP / 8][4], float &dz) {
    const stx__attn_params &p = a.p;
    int j0, step = 0, come = 0, n;
    t.persistent = 1;
    for (j0 = -((p.S + p.span) & 7); j0 < p.N; j0 += Sh::BK, step++) {
        const stx__attn_bwd_shared<Sh> now(m, STX__MOVES_K, a.prefetch, step),
            then(m, STX__MOVES_K, a.prefetch, step + 1);
        t.j0 = j0;
        if (!come) {
            __syncthreads();
            stx__attn_bwd_load_kv<Sh>(a, now, j0, t.b, t.h, 1);
            stx__cp_commit();
        }
        stx__cp_wait<0>();
        __syncthreads();
        come = a.prefetch && j0 + Sh::BK < p.N;
        if (come) {
            stx__attn_bwd_load_kv<Sh>(a, then, j0 + Sh::BK, t.b, t.h, 1);
            stx__cp_commit();
        }
        if (stx__attn_bwd_is_interior<Sh>(p, w, t)) {
            float s[Sh::NB][4], g[Sh::NB][4];
            stx__attn_bwd_interior<Sh, 0>(a, now, t, s, g);
            stx__attn_bwd_times<Sh, Sh::NB>(dk, g, now.k);
            continue;
        }
        stx__attn_bwd_edge_begin<Sh>(a, w, now, t, edge);
#pragma unroll 1
        for (n = edge.band.lo; n < edge.band.hi; n++) {
            float x[2][4], y[2][4];
            stx__attn_bwd_edge_group<Sh, 0, Sh::SIZE == 4 || Sh::DP != 64>(a, now, t, edge, n, x, y,
                                                                           dz);
            stx__attn_bwd_times<Sh, 2>(dk, y, now.k + n * Sh::CHUNK, edge.lane);
        }
    }
}

/* Computes the block's partial sums of du, dvb and dz. Sums over the queries of a strip
   by shuffles, then over the strips in order. `red` is scratch memory for (STRIPS,2,DP)
   floats, then for (STRIPS) floats. */
template <class Sh>
static __device__ __forceinline__ void stx__attn_bwd_query_sums(const stx__attn_bwd_params &a,
                                                                float *red, int i0, int b, int h,
                                                                const float (&dk)[Sh::DP / 8][4],
                                                                const float (&dp)[Sh::DP / 8][4],
                                                                float dz) {
    const stx__attn_params &p = a.p;
    const int strip = (int)threadIdx.x / 32, lane = (int)threadIdx.x & 31;
    const size_t part = (size_t)b * a.tiles + (size_t)i0 / Sh::BQ, columns = (size_t)p.H * p.D;
    int n, e, k;
#pragma unroll
    for (n = 0; n < Sh::DP / 8; n++)
#pragma unroll
        for (e = 0; e < 2; e++) {
            float x = dk[n][e] + dk[n][e + 2], y = dp[n][e] + dp[n][e + 2];
            for (k = 4; k < 32; k *= 2) {
                x += __shfl_xor_sync(STX__ALL, x, k);
                y += __shfl_xor_sync(STX__ALL, y, k);
            }
            if (lane < 4) {
                red[2 * strip * Sh::DP + 8 * n + 2 * lane + e] = x;
                red[(2 * strip + 1) * Sh::DP + 8 * n + 2 * lane + e] = y;
            }
        }
    dz = stx__warp_sum(dz);
    if (!lane) red[2 * Sh::STRIPS * Sh::DP + strip] = dz;
    __syncthreads();
    for (k = (int)threadIdx.x; k < p.D; k += Sh::THREADS) {
        float x = 0, y = 0;
        for (n = 0; n < Sh::STRIPS; n++) {
            x += red[2 * n * Sh::DP + k];
            y += red[(2 * n + 1) * Sh::DP + k];
        }
        if (a.du) a.du[part * columns + (size_t)h * p.D + k] = x;
        if (a.dvb) a.dvb[part * columns + (size_t)h * p.D + k] = y;
    }
    if (a.dz && !threadIdx.x) {
        for (dz = 0, n = 0; n < Sh::STRIPS; n++) dz += red[2 * Sh::STRIPS * Sh::DP + n];
        a.dz[part * p.H + h] = dz;
    }
    __syncthreads(); /* the persistent keys are loaded into the same memory */
}

/* The query sweep. A block processes BQ queries of one head and one batch row, 16 per
   warp. It walks the keys in the order of the forward pass; the longest blocks start
   first (stx__attn_make_list). The two terms of dQ, dk = ds K and dp = dR PE, are kept
   in separate registers, because their sums over the queries are du and dvb.

       for each tile:  wait for K, V and the BK new rows of the table
                       compute r a and ds in registers
                       dk += ds K;  dp += dR PE;  store dR if the head has rows
                       (an edge tile does this for each group of 16 keys in the band)

   Warps exchange no data: accumulators of ds become left factors directly, or skewed by
   shuffles. Two blocks fit on a multiprocessor, so one computes while the other waits.
   The persistent vectors follow; they use q without u and have no positions. The launch
   bound is one warp per strip and QUERY_BLOCKS blocks per multiprocessor. */
template <class Sh>
STX__GLOBAL(Sh::THREADS, (int)Sh::QUERY_BLOCKS)
stx__attn_bwd_queries(stx__attn_bwd_params a, const uint32_t *list) {
    STX__DYNAMIC(shared);
    const stx__attn_params &p = a.p;
    const int b = (int)(blockIdx.x % (unsigned)p.B), entry = (int)list[blockIdx.x / (unsigned)p.B],
              h = entry / a.tiles, i0 = entry % a.tiles * Sh::BQ;
    const int strip = (int)threadIdx.x / 32, table = p.P > 0;
    const int held = stx__attn_bwd_held<Sh>(a, table, Sh::BK);
    const stx__attn_bwd_shared<Sh> m(shared, STX__MOVES_K, a.prefetch, table && (p.u.p || p.vb.p),
                                     held);
    const stx__attn_window w = stx__attn_window_of(p, h);
    stx__attn_bwd_strip t;
    stx__attn_bwd_edge edge;
    float dk[Sh::DP / 8][4], dp[Sh::DP / 8][4], s[Sh::NB][4], g[Sh::NB][4], dz = 0;
    int first, last, j0, next, step = 0, come, n, e;
    /* `rows` points to the strip's rows of dR, or is NULL. `waits` is the column of the
       chunk in *wait */
    uint4 *wait = (uint4 *)m.exchange + threadIdx.x;
    stx__bf16 *rows = NULL;
    int width = 0, waits = -1;

    stx__attn_bwd_query_open<Sh>(a, w, m, t, i0, b, h, held, first, last, rows, width, wait);
    stx__attn_bwd_clear(dk);
    stx__attn_bwd_clear(dp);

    for (j0 = first, come = 1; j0 < last; j0 = next, step++) {
        const stx__attn_bwd_shared<Sh> now(m, STX__MOVES_K, a.prefetch, step),
            then(m, STX__MOVES_K, a.prefetch, step + 1);
        /* valid only if the next tile is adjacent */
        const int ring = stx__attn_bwd_wrap(t.ring + Sh::BK / 16, t.chunks);
        t.j0 = j0;
        if (!come) {
            /* after tiles without keys, the whole pe window must be loaded */
            const int gap = Sh::MASK && p.key_mask
                            && !stx__attn_key_mask<Sh::BK>(p, b, j0 - Sh::BK);
            __syncthreads();
            stx__attn_bwd_query_fetch<Sh>(a, now, t, t.ring, i0, j0, b, h, gap ? 0 : Sh::BQ,
                                          gap ? Sh::PE_ROWS : Sh::BK);
        }
        next = j0 + Sh::BK;
        if (Sh::MASK && p.key_mask)
            while (next < last && !stx__attn_key_mask<Sh::BK>(p, b, next)) next += Sh::BK;
        stx__cp_wait<0>();
        __syncthreads();
        if (Sh::MASK && p.key_mask) stx__attn_bwd_zero_missing<Sh>(a, now, b, j0);
        come = a.prefetch && next < last && (next == j0 + Sh::BK || !table);
        if (come) stx__attn_bwd_query_fetch<Sh>(a, then, t, ring, i0, next, b, h, Sh::BQ, Sh::BK);
        if (Sh::BK > 16 && stx__attn_bwd_is_interior<Sh>(p, w, t)) {
            stx__attn_bwd_interior<Sh, Sh::MASK>(a, now, t, s, g);
            stx__attn_bwd_times<Sh, Sh::NB>(dk, g, now.k);
            int at = stx__attn_bwd_pe_chunk<Sh>(t, 0);
#pragma unroll
            for (n = 0; n < (table ? Sh::BK / 16 + 1 : 0); n++) {
                float u[2][4];
                stx__attn_bwd_unskew<Sh::NB>(u[0], g, 2 * n);
                stx__attn_bwd_unskew<Sh::NB>(u[1], g, 2 * n + 1);
                stx__attn_bwd_times<Sh, 2>(dp, u, m.pe + at);
                at = stx__attn_bwd_pe_next<Sh>(t, at);
                if (Sh::SIZE == 2 && rows) {
                    waits = j0 - t.i + 16 * n - 16 - (a.newest - width);
                    stx__attn_bwd_dr_chunk<typename Sh::Pr>(rows, width, waits, u, wait, !n,
                                                            n == Sh::BK / 16);
                }
            }
        } else {
            float two[4][4]; /* ds of the previous group and of this one */
            stx__attn_bwd_edge_begin<Sh>(a, w, now, t, edge);
            stx__attn_bwd_clear(two);
            const int end = edge.band.hi + (table && edge.band.lo < edge.band.hi);
#pragma unroll 1
            for (n = edge.band.lo; n < end; n++) {
                float x[2][4], y[2][4];
                stx__attn_bwd_clear(y);
                if (n < edge.band.hi) {
                    stx__attn_bwd_edge_group<Sh, Sh::MASK, Sh::SIZE == 4 || Sh::DP != 64>(a, now, t,
                                                                                          edge, n,
                                                                                          x, y, dz);
                    stx__attn_bwd_times<Sh, 2>(dk, y, now.k + n * Sh::CHUNK, edge.lane);
                }
                if (!table) continue;
                stx__attn_bwd_copy(two[2], y[0]);
                stx__attn_bwd_copy(two[3], y[1]);
                stx__attn_bwd_unskew<4>(x[0], two, 2, edge.lane);
                stx__attn_bwd_unskew<4>(x[1], two, 3, edge.lane);
                stx__attn_bwd_copy(two[0], y[0]);
                stx__attn_bwd_copy(two[1], y[1]);
                stx__attn_bwd_times<Sh, 2>(dp, x, m.pe + stx__attn_bwd_pe_chunk<Sh>(t, n),
                                           edge.lane);
                if (Sh::SIZE == 2 && rows) {
                    waits = j0 - t.i + 16 * n - 16 - (a.newest - width);
                    stx__attn_bwd_dr_chunk<typename Sh::Pr>(rows, width, waits, x, wait,
                                                            n == edge.band.lo, n == edge.band.hi);
                }
            }
        }
        t.ring = ring;
    }
    if (Sh::SIZE == 2 && rows) stx__attn_bwd_dr_store(rows, width, waits, *wait);
    __syncthreads();
    if (a.du || a.dvb || a.dz) stx__attn_bwd_query_sums<Sh>(a, (float *)m.k, i0, b, h, dk, dp, dz);
#pragma unroll
    for (n = 0; n < Sh::DP / 8; n++)
#pragma unroll
        for (e = 0; e < 4; e++) dk[n][e] += dp[n][e];

    /* so far dk is unscaled; from here on it is in units of the scale of persistent
       keys */
    if (p.N && a.dq.p) {
#pragma unroll
        for (n = 0; n < Sh::DP / 8; n++)
#pragma unroll
            for (e = 0; e < 4; e++) dk[n][e] /= a.root_d;
        /* needs no barrier, because a warp reads only its own rows */
        if (p.u.p) {
            stx__array none = {NULL, NULL, 0};
            stx__attn_load_query<typename Sh::Pr, Sh::CH>(p, m.q, strip * 16, 16, i0, b, h, none);
        }
        stx__attn_bwd_query_vectors<Sh>(a, w, m, t, edge, dk, dz);
    }
    if (a.dq.p)
        stx__attn_bwd_add_rows(a.dq, (size_t)b * p.q_batch_stride + (size_t)h * p.D, p.q_row_stride,
                               t.i, 0, p.T, 0, p.D, dk, p.N ? p.scale * a.root_d : p.scale,
                               !(a.overwrite & STX_OVERWRITE_DQ));
}
