#pragma once
#include "common.cuh"
#include "attention_common.cuh"
#include "attention_fwd_tiles.cuh"
#include "attention_bwd_common.cuh"
#include "attention_bwd_queries.cuh"


// >>attention: key sweep

/* Stores r a or ds of a strip in shared memory, starting at key c of the tile. */
template <class Sh, int NB>
static __device__ __forceinline__ void stx__attn_bwd_put_scores(unsigned char *tile,
                                                                const float (&x)[NB][4], int c,
                                                                int lane = (int)threadIdx.x & 31) {
    typedef typename Sh::Pr Pr;
    const int r = (int)threadIdx.x / 32 * 16 + (lane >> 2), c2 = c + (lane & 3) * 2;
    int n;
#pragma unroll
    for (n = 0; n < NB; n++) {
        stx__attn_bwd_put2<Pr, Sh::CH_DS>(tile, r, 8 * n + c2, x[n][0], x[n][1]);
        stx__attn_bwd_put2<Pr, Sh::CH_DS>(tile, r + 8, 8 * n + c2, x[n][2], x[n][3]);
    }
}

/* Adds (r a)^T dO to dV and ds^T (q + u) to dK, for queries k .. k+Pr::K-1 of the
   tile. */
template <class Sh>
static __device__ __forceinline__ void stx__attn_bwd_key_sums(
    float (&dk)[Sh::KEY_NB][4], float (&dv)[Sh::KEY_NB][4], const unsigned char *wa,
    const unsigned char *wg, const stx__attn_bwd_shared<Sh> &m, int k, int group, int column,
    int lane = (int)threadIdx.x & 31) {
    typedef typename Sh::Pr Pr;
    uint32_t fa[4], fg[4], x[4];
    int n;
    stx__attn_bwd_frag_cols<Sh::CH_DS>(Pr(), fa, wa, k, 2 * group, lane);
    stx__attn_bwd_frag_cols<Sh::CH_DS>(Pr(), fg, wg, k, 2 * group, lane);
#pragma unroll
    for (n = 0; n < Sh::KEY_NB; n += 2) {
        stx__attn_bwd_frag_rows<Sh::CH>(Pr(), x, m.dy, k, column + n, lane);
        Pr::add(dv[n], fa, x[0], x[1]);
        Pr::add(dv[n + 1], fa, x[2], x[3]);
        stx__attn_bwd_frag_rows<Sh::CH>(Pr(), x, m.q, k, column + n, lane);
        Pr::add(dk[n], fg, x[0], x[1]);
        Pr::add(dk[n + 1], fg, x[2], x[3]);
    }
}

/* Starts copies of the query tile that begins at i0, and of the BQ new table rows. */
template <class Sh>
static __device__ __forceinline__ void stx__attn_bwd_load_q_pe(const stx__attn_bwd_params &a,
                                                               const stx__attn_bwd_shared<Sh> &m,
                                                               const stx__attn_bwd_strip &t,
                                                               int ring, int i0, int b, int h,
                                                               int table) {
    stx__attn_bwd_load_q<Sh>(a, m, i0, b, h);
    if (table)
        stx__attn_bwd_load_pe<Sh>(a, m, t, ring, stx__attn_bwd_window_row<Sh>(a.p, i0, t.j0), h, 0,
                                  Sh::BQ);
    stx__cp_commit();
}

/* Phase 1 of a tile in the key sweep: a warp stores r a and ds of its strip in shared
   memory. Returns whether the strip's band covers the whole tile. */
template <class Sh>
static __device__ __forceinline__ int stx__attn_bwd_key_scores(
    const stx__attn_bwd_params &a, const stx__attn_window &w, const stx__attn_bwd_shared<Sh> &m,
    const stx__attn_bwd_strip &t, stx__attn_bwd_edge &edge, unsigned char *wa, unsigned char *wg) {
    float dz = 0;
    int all, n;
    if (stx__attn_bwd_is_interior<Sh>(a.p, w, t)) {
        float s[Sh::NB][4], g[Sh::NB][4];
        stx__attn_bwd_interior<Sh, 0>(a, m, t, s, g);
        stx__attn_bwd_put_scores<Sh, Sh::NB>(wa, s, 0);
        stx__attn_bwd_put_scores<Sh, Sh::NB>(wg, g, 0);
        return 1;
    }
    all = stx__attn_bwd_edge_begin<Sh>(a, w, m, t, edge);
#pragma unroll 1
    for (n = edge.band.lo; n < edge.band.hi; n++) {
        float x[2][4], y[2][4];
        stx__attn_bwd_edge_group<Sh, 0, Sh::SIZE == 4>(a, m, t, edge, n, x, y, dz);
        stx__attn_bwd_put_scores<Sh, 2>(wa, x, 16 * n, edge.lane);
        stx__attn_bwd_put_scores<Sh, 2>(wg, y, 16 * n, edge.lane);
    }
    return all;
}

/* Phase 2: adds (r a)^T dO to dV and ds^T (q + u) to dK, for the warp's keys and
   columns. `all` is 1 if the band of every strip covers the whole tile. */
template <class Sh>
static __device__ __forceinline__ void stx__attn_bwd_key_tile_sums(
    const stx__attn_bwd_params &a, const stx__attn_bwd_shared<Sh> &m, const stx__attn_bwd_strip &t,
    int i0, float (&dk)[Sh::KEY_NB][4], float (&dv)[Sh::KEY_NB][4], const unsigned char *wa,
    const unsigned char *wg, int group, int column, int all) {
    typedef typename Sh::Pr Pr;
    int n, k;
    /* float elements use the loop below: the sums take so long that the overhead of the
       loop does not matter */
    if (all && Sh::SIZE == 2) {
#pragma unroll
        for (k = 0; k < Sh::BQ; k += Pr::K)
            stx__attn_bwd_key_sums<Sh>(dk, dv, wa, wg, m, k, group, column);
        return;
    }
    /* skip strips whose bands do not include the warp's keys, because these strips have
       stored nothing for these keys */
#pragma unroll 1
    for (n = 0; n < Sh::BQ; n += 16) {
        const stx__attn_band band = stx__attn_band_of<Sh::BK>(a.p, t.persistent, t.max_delta,
                                                              i0 + n, t.j0);
        const int again = stx__attn_opaque((int)threadIdx.x & 31);
        if (!all && (group < band.lo || group >= band.hi)) continue;
#pragma unroll
        for (k = 0; k < 16; k += Pr::K)
            stx__attn_bwd_key_sums<Sh>(dk, dv, wa, wg, m, n + k, group, column, again);
    }
}

/* Adds the results of a block to the gradients, or stores them as partial sums of dpk
   and dpv. `group` is the index of the warp's 16 keys, and `column` is the warp's first
   column of D. */
template <class Sh>
static __device__ __forceinline__ void stx__attn_bwd_key_store(const stx__attn_bwd_params &a, int z,
                                                               int h, int j0, int group, int column,
                                                               const float (&dk)[Sh::KEY_NB][4],
                                                               const float (&dv)[Sh::KEY_NB][4]) {
    const stx__attn_params &p = a.p;
    const int row = j0 + group * 16;
    uint32_t rows = ~0u;
    if (a.persistent) {
        size_t o = ((size_t)z * p.H + h) * p.N * p.D;
        if (a.dpk)
            stx__attn_bwd_store_part(a.dpk + o, p.D, row, 0, p.N, column, p.D, dk,
                                     p.scale * a.root_d);
        if (a.dpv) stx__attn_bwd_store_part(a.dpv + o, p.D, row, 0, p.N, column, p.D, dv, 1.0f);
        return;
    }
    /* the sums of missing keys are not gradients and are discarded */
    if (Sh::MASK && p.key_mask)
        rows = (uint32_t)(stx__attn_key_mask<Sh::BK>(p, z, j0) >> group * 16);
    stx__attn_bwd_store_kv(a, 0, z, h, row, column, dk, p.scale, rows);
    stx__attn_bwd_store_kv(a, 1, z, h, row, column, dv, 1.0f, rows);
}

/* Walks the queries lo .. hi-1 of batch rows b0 .. b1-1 and adds their contributions to
   dk and dv. */
template <class Sh>
static __device__ __forceinline__ void stx__attn_bwd_key_walk(
    const stx__attn_bwd_params &a, const stx__attn_window &w, const stx__attn_bwd_shared<Sh> &m,
    stx__attn_bwd_strip &t, int h, int b0, int b1, int lo, int hi, float (&dk)[Sh::KEY_NB][4],
    float (&dv)[Sh::KEY_NB][4], int group, int column) {
    const int table = a.p.P > 0 && !a.persistent;
    unsigned char *wa = m.exchange, *wg = wa + Sh::BQ * Sh::CH_DS * 16;
    stx__attn_bwd_edge edge;
    int b, i0, step, come, all;
    for (b = b0, i0 = lo, step = come = 0; b < b1; step++) {
        const stx__attn_bwd_shared<Sh> now(m, STX__MOVES_Q, a.prefetch, step),
            then(m, STX__MOVES_Q, a.prefetch, step + 1);
        const int ring = stx__attn_bwd_wrap(t.ring + t.chunks - Sh::BQ / 16, t.chunks),
                  end = i0 + Sh::BQ >= hi, next = end ? lo : i0 + Sh::BQ;
        if (!come) {
            __syncthreads();
            stx__attn_bwd_load_q_pe<Sh>(a, now, t, t.ring, i0, b, h, table);
        }
        t.i = i0 + (int)threadIdx.x / 32 * 16;
        stx__attn_bwd_load_stats(a, t, b, h);
        stx__cp_wait<0>();
        __syncthreads();
        if (!a.persistent) stx__attn_bwd_add_biases<Sh>(a.p, now, i0);
        come = a.prefetch && b + end < b1;
        if (come) stx__attn_bwd_load_q_pe<Sh>(a, then, t, ring, next, b + end, h, table);
        all = stx__attn_bwd_key_scores<Sh>(a, w, now, t, edge, wa, wg);
        all = __syncthreads_and(all);
        stx__attn_bwd_key_tile_sums<Sh>(a, now, t, i0, dk, dv, wa, wg, group, column, all);
        t.ring = ring;
        i0 = next;
        b += end;
    }
}

/* Stores zeros as the gradients of a block's keys if gradients are overwritten. */
template <class Sh>
static __device__ __forceinline__ void stx__attn_bwd_key_zeros(const stx__attn_bwd_params &a, int z,
                                                               int h, int j0, int group,
                                                               int column) {
    float none[Sh::KEY_NB][4];
    stx__attn_bwd_clear(none);
    stx__attn_bwd_store_kv(a, 0, z, h, j0 + group * 16, column, none, 0.0f, 0);
    stx__attn_bwd_store_kv(a, 1, z, h, j0 + group * 16, column, none, 0.0f, 0);
}

/* The key sweep. A block processes BK keys of one head and one batch row, and walks the
   query tiles that see any of them. In phase 1, each warp computes the scores of a
   strip of queries. dK and dV are sums over queries, so r a and ds pass through shared
   memory. In phase 2, each warp reads them as transposed left factors for 16 keys, and
   for part of the columns if there are more warps.

       for each tile:  wait for q, dO and the BQ new rows of the table
                       store r a and ds in shared memory                        phase 1
                       barrier, which also tests whether all bands cover the tile
                       dV += (r a)^T dO;  dK += ds^T (q + u)                    phase 2
                       (using only strips whose bands include the warp's keys)

   The pe window moves down by BQ rows per tile. For persistent vectors, a block also
   walks its split of the batch, and its results are partial sums of dpk and dpv. The
   launch bound is one warp per strip and KEY_BLOCKS blocks per multiprocessor. */
template <class Sh>
STX__GLOBAL(Sh::THREADS, (int)Sh::KEY_BLOCKS)
stx__attn_bwd_keys(stx__attn_bwd_params a) {
    STX__DYNAMIC(shared);
    const stx__attn_params &p = a.p;
    const int strip = (int)threadIdx.x / 32;
    const int h = (int)blockIdx.y, z = (int)blockIdx.z, j0 = a.first + (int)blockIdx.x * Sh::BK,
              table = p.P > 0 && !a.persistent;
    const int b0 = a.persistent ? (int)((int64_t)p.B * z / a.splits) : z,
              b1 = a.persistent ? (int)((int64_t)p.B * (z + 1) / a.splits) : z + 1;
    /* index of the warp's 16 keys, and its first column in units of 8 */
    const int group = strip % (Sh::BK / 16),
              column = Sh::KEY_SPLIT == 1 ? 0 : strip / (Sh::BK / 16) * Sh::KEY_NB;
    const int held = stx__attn_bwd_held<Sh>(a, table, Sh::BQ);
    const stx__attn_bwd_shared<Sh> m(shared, STX__MOVES_Q, a.prefetch, table && (p.u.p || p.vb.p),
                                     held);
    const stx__attn_window w = stx__attn_window_of(p, h);
    stx__attn_bwd_strip t;
    float dk[Sh::KEY_NB][4], dv[Sh::KEY_NB][4];
    int lo = 0, hi = p.T;

    stx__attn_bwd_clear(dk);
    stx__attn_bwd_clear(dv);
    if (!a.persistent) {
        lo = max(0, j0 + p.delta_min - p.C);
        hi = min(p.T, j0 + Sh::BK + w.visible - p.C);
        /* no query sees these keys, so their gradients are 0 */
        if (lo >= hi || (Sh::MASK && p.key_mask && !stx__attn_key_mask<Sh::BK>(p, z, j0))) {
            stx__attn_bwd_key_zeros<Sh>(a, z, h, j0, group, column * 8);
            return;
        }
    }
    t.j0 = j0;
    t.max_delta = w.visible;
    t.ring = 0;
    t.chunks = held / 16;
    t.persistent = a.persistent;
    stx__attn_bwd_load_biases<Sh>(p, m, h);
    stx__attn_bwd_load_kv<Sh>(a, m, j0, b0, h, a.persistent);
    if (table)
        stx__attn_bwd_load_pe<Sh>(a, m, t, 0, stx__attn_bwd_window_row<Sh>(p, lo, j0), h, Sh::BQ,
                                  Sh::BK);

    stx__attn_bwd_key_walk<Sh>(a, w, m, t, h, b0, b1, lo, hi, dk, dv, group, column);
    stx__attn_bwd_key_store<Sh>(a, z, h, j0, group, column * 8, dk, dv);
}
