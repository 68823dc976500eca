#pragma once
#include "common.cuh"
#include "attention_plain.cuh"
#include "attention_common.cuh"
#include "attention_fwd_tiles.cuh"


// >>attention: forward kernel

/* The work of a warp in one step: its rows and a tile */
typedef struct stx__attn_fwd_tile {
    const unsigned char *k, *v, *ring, *qs, *qr;
    float *ramp;
    int lane;
    int window;   /* 1: the tile holds keys of the window; 0: persistent vectors */
    int s, j0, i; /* s: step; j0: first key or vector of the tile; i: the warp's first query */
    float sc;     /* scale of the logits, times log2 e if elements are bfloat16 */
} stx__attn_fwd_tile;

/* x = skew((Q + vb) PE^T) for the strips of the warp, in blocks of 8 columns. Strip m
   requires blocks 0 .. NB-1 and, where its skew starts, two more blocks to their left.
   Block 0 of strip 0 begins at row `at` of the ring, and strip 1 begins 16 columns
   further left. Iteration c therefore computes block c + 2m of strip m, and both strips
   use the same fragment of pe. With EDGE, only blocks in the band of a strip are
   computed, starting two blocks before it unless the strip's skew continues from the
   previous tile (bit m of `started`). The rest of x stays 0. */
template <class X, int EDGE>
static __device__ __forceinline__ void stx__attn_fwd_positions(
    float (&x)[X::STRIPS][X::NB][4], stx__attn_skew (&skew)[X::STRIPS], const stx__attn_fwd_tile &w,
    const uint32_t (&qf)[X::STRIPS][X::QS][4], const stx__attn_band (&band)[X::STRIPS],
    int started) {
    enum { CH = X::CH, KS = X::KS, NB = X::NB, MT = X::STRIPS };

    const int warp = (int)threadIdx.x >> 5, r0 = warp * 16 * MT;
    /* computed so that the compiler knows that `at` is a multiple of 16 */
    const int at = (X::KEYS / 16 * w.s + X::BQ / 16 - MT * warp) % (X::RING / 16) * 16;
    const stx__attn_skew_lanes lanes = stx__attn_skew_lanes_of(w.lane);
    int from[MT], to[MT], c, m, k, e;
#pragma unroll
    for (m = 0; m < MT; m++) {
        from[m] = to[m] = 2 * band[m].hi;
        if (band[m].lo != band[m].hi) from[m] = started >> m & 1 ? 0 : 2 * band[m].lo - 2;
    }
#pragma unroll
    for (c = -2 * MT; c < NB; c++) {
        float r[MT][4];
        int row = at + 8 * c, some = 0;
        /* these columns were carried over from the previous tile */
        if (!EDGE && c < 2 - 2 * MT && started >> (MT - 1)) continue;
        row = stx__attn_ring<X::RING>(row);
#pragma unroll
        for (m = 0; m < MT; m++) {
            some |= c + 2 * m >= from[m] && c + 2 * m < to[m];
            r[m][0] = r[m][1] = r[m][2] = r[m][3] = 0;
        }
        if (EDGE && !some) continue;
#pragma unroll
        for (k = 0; k < KS; k += 2) {
            uint32_t f[4];
            stx__attn_frag_b2<CH>(f, w.ring, row, k, w.lane);
#pragma unroll
            for (m = 0; m < MT; m++) {
                const int col = c + 2 * m;
                if (col < -2 || col >= NB) continue;
                if (EDGE && MT > 1 && (col < from[m] || col >= to[m])) continue;
#pragma unroll
                for (e = 0; e < 2; e++) {
                    if (X::Q_REGS)
                        X::Pr::mma(r[m], qf[m][X::Q_REGS ? k + e : 0], f[2 * e], f[2 * e + 1]);
                    else {
                        uint32_t a[4];
                        stx__attn_frag_a<CH>(a, w.qr, r0 + 16 * m, k + e, w.lane);
                        X::Pr::mma(r[m], a, f[2 * e], f[2 * e + 1]);
                    }
                }
            }
        }
#pragma unroll
        for (m = 0; m < MT; m++) {
            const int col = c + 2 * m;
            float unseen[4];
            if (col < -2 || col >= NB) continue;
            if (EDGE && MT > 1 && (col < from[m] || col >= to[m])) continue;
            if (col < 0)
                stx__attn_skew_block(skew[m], lanes, r[m], unseen);
            else
                stx__attn_skew_block(skew[m], lanes, r[m], x[m][col < 0 ? 0 : col]);
        }
    }
}

/* Sets `a` to the fragment of the query that is multiplied by keys, for strip m and
   step k of the sum over D. */
template <class X>
static __device__ __forceinline__ void stx__attn_fwd_frag_q(
    uint32_t (&a)[4], const stx__attn_fwd_tile &w, const uint32_t (&qf)[X::STRIPS][X::QS][4], int m,
    int k) {
    const int r0 = ((int)threadIdx.x >> 5) * 16 * X::STRIPS;
    if (X::Q_IN_SHARED)
        stx__attn_frag_a<X::CH>(a, w.qs, r0 + 16 * m, k, w.lane);
    else
        for (int e = 0; e < 4; e++) a[e] = qf[m][X::Q_REGS ? k : 0][e];
}

/* Sets the logits of keys that do not exist to -inf. */
template <class X>
static __device__ __forceinline__ void stx__attn_fwd_set_missing(const stx__attn_params &p,
                                                                 const stx__attn_job &job,
                                                                 const stx__attn_fwd_tile &w,
                                                                 float (&x)[X::STRIPS][X::NB][4]) {
    const uint64_t seen = stx__attn_key_mask<X::KEYS>(p, job.b, w.j0);
    if (stx__attn_all_exist<X::KEYS>(seen)) return;
#pragma unroll
    for (int m = 0; m < X::STRIPS; m++) stx__attn_set_missing(x[m], seen, w.lane & 3, -INFINITY);
}

/* Turns the weights of a strip into the factors of V after the weights have been summed:
   applies dropout, and sqrt(N) for persistent vectors. */
template <class X>
static __device__ __forceinline__ void stx__attn_fwd_drop(const stx__attn_params &p, int window,
                                                          uint32_t kept, float (&x)[X::NB][4]) {
    int n, e;
    if (p.keep)
#pragma unroll
        for (n = 0; n < X::NB; n++)
            for (e = 0; e < 4; e++)
                if (!(kept >> (4 * n + e) & 1)) x[n][e] = 0;
    if (!window) {
        float root = sqrtf((float)p.N);
#pragma unroll
        for (n = 0; n < X::NB; n++)
            for (e = 0; e < 4; e++) x[n][e] *= root;
    }
}

/* Computes the dropout masks of the warp's strips in a tile. */
template <class X>
static __device__ __forceinline__ void stx__attn_fwd_keep(const stx__attn_params &p,
                                                          const stx__attn_job &job,
                                                          const stx__attn_fwd_tile &w,
                                                          uint32_t (&kept)[X::STRIPS]) {
#pragma unroll
    for (int m = 0; m < X::STRIPS; m++)
        kept[m] = stx__attn_keep_mask<X::NB>(p, p.stream + *p.shift,
                                             ((uint64_t)job.b * p.H + job.h) * p.T + w.i + 16 * m,
                                             (w.window ? p.span : p.S + p.span) + w.j0);
}

/* Rounds two weights to bfloat16 if the elements are bfloat16, so that the same values
   are summed and multiplied by V. */
template <class X> static __device__ __forceinline__ void stx__attn_fwd_round(float &a, float &b) {
    if (X::Q_REGS) {
        uint32_t u = stx__pair(a, b);
        a = __uint_as_float(u << 16);
        b = __uint_as_float(u & 0xffff0000u);
    }
}

/* The online softmax of a strip in an interior tile. Replaces the logits in x with
   weights and rescales o and sum to the new maximum. */
template <class X>
static __device__ __forceinline__ void stx__attn_fwd_softmax(const stx__attn_fwd_tile &w,
                                                             float (&x)[X::NB][4],
                                                             float (&o)[X::ND][4],
                                                             float (&row_max)[2], float (&sum)[2]) {
    const float unit = X::Q_REGS ? STX__LOG2E : 1;
    int n, e;
#pragma unroll
    for (e = 0; e < 2; e++) {
        float most = -INFINITY, old = row_max[e], from, f, add = 0;
#pragma unroll
        for (n = 0; n < X::NB; n++) most = fmaxf(most, fmaxf(x[n][2 * e], x[n][2 * e + 1]));
        most = fmaxf(most, __shfl_xor_sync(STX__ALL, most, 1));
        most = fmaxf(most, __shfl_xor_sync(STX__ALL, most, 2));
        row_max[e] = fmaxf(old, most * w.sc);
        /* if no key has been seen, use 2^-inf instead of 2^(-inf + inf) */
        from = row_max[e] == -INFINITY ? 0 : row_max[e];
        f = stx__exp2((old - from) * (STX__LOG2E / unit));
#pragma unroll
        for (n = 0; n < X::NB; n++) {
            x[n][2 * e] = stx__exp2(fmaf(x[n][2 * e], w.sc, -from) * (STX__LOG2E / unit));
            x[n][2 * e + 1] = stx__exp2(fmaf(x[n][2 * e + 1], w.sc, -from) * (STX__LOG2E / unit));
        }
#pragma unroll
        for (n = 0; n < X::NB; n++) stx__attn_fwd_round<X>(x[n][2 * e], x[n][2 * e + 1]);
#pragma unroll
        for (n = 0; n < X::NB; n++) add += x[n][2 * e] + x[n][2 * e + 1];
        sum[e] = fmaf(sum[e], f, add);
#pragma unroll
        for (n = 0; n < X::ND; n++) {
            o[n][2 * e] *= f;
            o[n][2 * e + 1] *= f;
        }
    }
}

/* Like stx__attn_fwd_softmax, but for strip m in an edge tile: processes only the
   groups in its band, and applies masks and ramp weights. */
template <class X>
static __device__ __forceinline__ void stx__attn_fwd_edge_softmax(
    const stx__attn_params &p, const stx__attn_job &job, const stx__attn_fwd_tile &w,
    const stx__attn_band &band, int m, int ramped, float (&x)[X::NB][4], float (&o)[X::ND][4],
    float (&row_max)[2], float (&sum)[2]) {
    const float unit = X::Q_REGS ? STX__LOG2E : 1;
    const int g = w.lane >> 2, t = w.lane & 3, window = w.window,
              i = p.C + w.i + 16 * m + g - w.j0 - 2 * t;
    float most[2] = {-INFINITY, -INFINITY}, from[2], f[2], add[2] = {0, 0};
    int n, e;
#pragma unroll
    for (n = 0; n < X::NB; n++) {
        if (n / 2 < band.lo || n / 2 >= band.hi) continue;
#pragma unroll
        for (e = 0; e < 2; e++) {
            const int lo = window ? max(i + 8 * e - job.w.visible, p.first_key - w.j0 - 2 * t)
                                  : -w.j0 - 2 * t,
                      hi = window ? i + 8 * e - p.delta_min + 1 : p.N - w.j0 - 2 * t;
            if (8 * n < lo || 8 * n >= hi) x[n][2 * e] = -INFINITY;
            if (8 * n + 1 < lo || 8 * n + 1 >= hi) x[n][2 * e + 1] = -INFINITY;
            most[e] = fmaxf(most[e], fmaxf(x[n][2 * e], x[n][2 * e + 1]));
        }
    }
#pragma unroll
    for (e = 0; e < 2; e++) {
        const float old = row_max[e];
        most[e] = fmaxf(most[e], __shfl_xor_sync(STX__ALL, most[e], 1));
        most[e] = fmaxf(most[e], __shfl_xor_sync(STX__ALL, most[e], 2));
        row_max[e] = fmaxf(old, most[e] * w.sc);
        from[e] = row_max[e] == -INFINITY ? 0 : row_max[e];
        f[e] = stx__exp2((old - from[e]) * (STX__LOG2E / unit));
    }
#pragma unroll
    for (n = 0; n < X::NB; n++) {
        const float *f0 = w.ramp + X::KEYS - 1 + 16 * m + g - 2 * t - 8 * n;
        if (n / 2 < band.lo || n / 2 >= band.hi) continue;
#pragma unroll
        for (e = 0; e < 2; e++) {
            float a = stx__exp2(fmaf(x[n][2 * e], w.sc, -from[e]) * (STX__LOG2E / unit));
            float b = stx__exp2(fmaf(x[n][2 * e + 1], w.sc, -from[e]) * (STX__LOG2E / unit));
            if (ramped) {
                a *= f0[8 * e];
                b *= f0[8 * e - 1];
            }
            stx__attn_fwd_round<X>(a, b);
            add[e] += a + b;
            x[n][2 * e] = a;
            x[n][2 * e + 1] = b;
        }
    }
#pragma unroll
    for (e = 0; e < 2; e++) {
        sum[e] = fmaf(sum[e], f[e], add[e]);
#pragma unroll
        for (n = 0; n < X::ND; n++) {
            o[n][2 * e] *= f[e];
            o[n][2 * e + 1] *= f[e];
        }
    }
}

/* Processes an edge tile, which contains an end of the window, part of the ramp or the
   end of the persistent vectors. Sums are computed in the same order as in
   stx__attn_fwd_interior, but skip the groups of 16 keys outside the bands of the strips,
   because the weights of these keys would be 0. All conditions are uniform per warp.
   Loops are unrolled because accumulators are in registers, which cannot be indexed. */
template <class X>
static __device__ __forceinline__ void stx__attn_fwd_edge(
    const stx__attn_params &p, const stx__attn_job &job, const stx__attn_fwd_tile &w,
    const uint32_t (&kept)[X::STRIPS], const uint32_t (&qf)[X::STRIPS][X::QS][4],
    float (&o)[X::STRIPS][X::ND][4], float (&row_max)[X::STRIPS][2], float (&sum)[X::STRIPS][2],
    stx__attn_skew (&skew)[X::STRIPS], int &started) {
    enum { KS = X::KS, NB = X::NB, MT = X::STRIPS };

    const int window = w.window, min_delta = p.C + w.i - (w.j0 + X::KEYS - 1),
              ramped = p.z.p && window && min_delta + X::KEYS + 16 * MT - 2 > job.w.full;
    float x[MT][NB][4];
    stx__attn_band band[MT];
    int m, n, k, e;
#pragma unroll
    for (m = 0; m < MT; m++) {
        band[m] = stx__attn_band_of<X::KEYS>(p, !window, job.w.visible, w.i + 16 * m, w.j0);
#pragma unroll
        for (n = 0; n < NB; n++) x[m][n][0] = x[m][n][1] = x[m][n][2] = x[m][n][3] = 0;
    }
    if (ramped) { /* ramp[e] is the weight at distance min_delta + e */
        __syncwarp();
        for (e = w.lane; e < X::KEYS + 16 * MT - 1; e += 32)
            w.ramp[e] = stx__attn_clamp(stx__attn_ramp(p, job.w, min_delta + e));
        __syncwarp();
    }
    if (window && p.pe) {
        stx__attn_fwd_positions<X, 1>(x, skew, w, qf, band, started);
#pragma unroll
        for (m = 0; m < MT; m++)
            if (band[m].lo < band[m].hi) started |= 1 << m;
    }
#pragma unroll
    for (n = 0; n < NB; n += 2) {
        if (!stx__attn_in_bands(band, n / 2)) continue;
#pragma unroll
        for (k = 0; k < KS; k++) {
            uint32_t f[4];
            stx__attn_frag_b<X::CH>(f, w.k, 8 * n, k, w.lane);
#pragma unroll
            for (m = 0; m < MT; m++) {
                uint32_t a[4];
                if (MT > 1 && (n / 2 < band[m].lo || n / 2 >= band[m].hi)) continue;
                stx__attn_fwd_frag_q<X>(a, w, qf, m, k);
                X::Pr::mma2(x[m][n], x[m][n + 1], a, f);
            }
        }
    }
    if (p.key_mask && window) stx__attn_fwd_set_missing<X>(p, job, w, x);
#pragma unroll
    for (m = 0; m < MT; m++) {
        if (band[m].lo == band[m].hi) continue;
        stx__attn_fwd_edge_softmax<X>(p, job, w, band[m], m, ramped, x[m], o[m], row_max[m],
                                      sum[m]);
        stx__attn_fwd_drop<X>(p, window, kept[m], x[m]);
    }
    stx__attn_times_v<typename X::Pr, X::CH, MT, NB, X::ND, 1>::run(o, x, w.v, w.lane, band);
}

/* Processes an interior tile: every row of the warp sees all keys of the tile with ramp
   weight 1. */
template <class X>
static __device__ __forceinline__ void stx__attn_fwd_interior(
    const stx__attn_params &p, const stx__attn_job &job, const stx__attn_fwd_tile &w,
    const uint32_t (&kept)[X::STRIPS], const uint32_t (&qf)[X::STRIPS][X::QS][4],
    float (&o)[X::STRIPS][X::ND][4], float (&row_max)[X::STRIPS][2], float (&sum)[X::STRIPS][2],
    stx__attn_skew (&skew)[X::STRIPS], int &started) {
    enum { NB = X::NB, MT = X::STRIPS };

    const int window = w.window;
    const stx__attn_band whole[MT] = {};
    float x[MT][NB][4];
    int m, n, k;
    if (window && p.pe) {
        stx__attn_fwd_positions<X, 0>(x, skew, w, qf, whole, started);
        started = (1 << MT) - 1;
    } else {
#pragma unroll
        for (m = 0; m < MT; m++)
#pragma unroll
            for (n = 0; n < NB; n++) x[m][n][0] = x[m][n][1] = x[m][n][2] = x[m][n][3] = 0;
    }
#pragma unroll
    for (k = 0; k < X::KS; k++) {
        uint32_t a[MT][4], f[4];
#pragma unroll
        for (m = 0; m < MT; m++) stx__attn_fwd_frag_q<X>(a[m], w, qf, m, k);
#pragma unroll
        for (n = 0; n < NB; n += 2) {
            stx__attn_frag_b<X::CH>(f, w.k, 8 * n, k, w.lane);
#pragma unroll
            for (m = 0; m < MT; m++) X::Pr::mma2(x[m][n], x[m][n + 1], a[m], f);
        }
    }
    if (p.key_mask && window) stx__attn_fwd_set_missing<X>(p, job, w, x);
#pragma unroll
    for (m = 0; m < MT; m++) {
        stx__attn_fwd_softmax<X>(w, x[m], o[m], row_max[m], sum[m]);
        stx__attn_fwd_drop<X>(p, window, kept[m], x[m]);
    }
    stx__attn_times_v<typename X::Pr, X::CH, MT, NB, X::ND, 0>::run(o, x, w.v, w.lane, whole);
}

/* Sets up the block's job from its entry in the work list. Called by thread 0. */
template <class X>
static __device__ __forceinline__ void stx__attn_fwd_job(const stx__attn_params &p,
                                                         stx__attn_job *j, const uint32_t *list,
                                                         int tiles) {
    enum { BK = X::KEYS };

    int entry = (int)list[blockIdx.x / (unsigned)p.B], last;
    j->b = (int)(blockIdx.x % (unsigned)p.B);
    j->h = entry / tiles;
    j->i0 = entry % tiles * X::BQ;
    j->w = stx__attn_window_of(p, j->h);
    stx__attn_key_range(p, j->w, j->i0, X::BQ, &j->first, &last);
    if (p.key_mask) {
        last = min(last, p.S);
        while (j->first < last && !stx__attn_key_mask<BK>(p, j->b, j->first)) j->first += BK;
    }
    j->window_steps = (last - j->first + BK - 1) / BK;
    if (p.key_mask)
        while (j->window_steps
               && !stx__attn_key_mask<BK>(p, j->b, j->first + (j->window_steps - 1) * BK))
            j->window_steps--;
    j->steps = j->window_steps + (p.N ? (p.N + ((p.S + p.span) & 7) + BK - 1) / BK : 0);
}

/* Loads the queries: q + vb, which is multiplied by pe, as fragments in qf or rows in qr;
   and q + u, which is multiplied by keys, in qs if it is different. Clears the sums. */
template <class X>
static __device__ __forceinline__ void stx__attn_fwd_begin(
    const stx__attn_params &p, const stx__attn_job &job, unsigned char *qs, unsigned char *qr,
    uint32_t (&qf)[X::STRIPS][X::QS][4], float (&o)[X::STRIPS][X::ND][4],
    float (&row_max)[X::STRIPS][2], float (&sum)[X::STRIPS][2], stx__attn_skew (&skew)[X::STRIPS]) {
    typedef typename X::Pr Pr;

    enum { CH = X::CH, MT = X::STRIPS, ROWS = 16 * MT };

    const int r0 = ((int)threadIdx.x >> 5) * ROWS;
    int m, n, k, e;
    if (X::Q_REGS) {
        stx__attn_load_query<Pr, CH>(p, qs, r0, ROWS, job.i0, job.b, job.h, p.vb);
#pragma unroll
        for (m = 0; m < MT; m++)
#pragma unroll
            for (k = 0; k < X::KS; k++)
                stx__attn_frag_a<CH>(qf[m][X::Q_REGS ? k : 0], qs, r0 + 16 * m, k);
        __syncwarp();
    } else if (qr != qs) {
        stx__attn_load_query<Pr, CH>(p, qr, r0, ROWS, job.i0, job.b, job.h, p.vb);
    }
    if (X::Q_IN_SHARED) stx__attn_load_query<Pr, CH>(p, qs, r0, ROWS, job.i0, job.b, job.h, p.u);
#pragma unroll
    for (m = 0; m < MT; m++) {
#pragma unroll
        for (n = 0; n < X::ND; n++) o[m][n][0] = o[m][n][1] = o[m][n][2] = o[m][n][3] = 0;
        row_max[m][0] = row_max[m][1] = -INFINITY;
        sum[m][0] = sum[m][1] = 0;
#pragma unroll
        for (e = 0; e < 2; e++) skew[m].lo[e] = skew[m].hi[e] = skew[m].next[e] = 0;
    }
}

/* Sets the rows of missing keys to zeros after K and V of a tile have arrived. Returns
   nonzero if any key of the tile exists. All threads must call this function. */
template <class X>
static __device__ __forceinline__ int stx__attn_fwd_zero_missing(const stx__attn_params &p,
                                                                 const stx__attn_job &job,
                                                                 unsigned char *kv, int j0) {
    const uint64_t seen = stx__attn_key_mask<X::KEYS>(p, job.b, j0);
    if (seen && !stx__attn_all_exist<X::KEYS>(seen)) {
        stx__attn_zero_missing<X::CH, X::THREADS, X::KEYS>(kv, seen);
        stx__attn_zero_missing<X::CH, X::THREADS, X::KEYS>(kv + X::TILE, seen);
        __syncthreads();
    }
    return seen != 0;
}

/* Stores y, row_max and inv_sum of the warp's rows. */
template <class X>
static __device__ __forceinline__ void stx__attn_fwd_store(const stx__attn_params &p,
                                                           const stx__attn_job &job,
                                                           const float (&o)[X::STRIPS][X::ND][4],
                                                           const float (&row_max)[X::STRIPS][2],
                                                           const float (&sum)[X::STRIPS][2]) {
    typedef typename X::Pr Pr;

    enum { MT = X::STRIPS };

    const int r0 = ((int)threadIdx.x >> 5) * 16 * MT;
    int m, n, e;
#pragma unroll
    for (m = 0; m < MT; m++)
#pragma unroll
        for (e = 0; e < 2; e++) {
            const int t = (int)threadIdx.x & 3,
                      i = job.i0 + r0 + 16 * m + ((int)threadIdx.x >> 2 & 7) + 8 * e;
            float norm = sum[m][e], f;
            norm += __shfl_xor_sync(STX__ALL, norm, 1);
            norm += __shfl_xor_sync(STX__ALL, norm, 2);
            f = norm == 0 ? 0 : 1 / norm;
            if (i < p.T) {
                typename Pr::element *y = (typename Pr::element *)p.y
                                          + (((size_t)job.b * p.T + i) * p.H + job.h) * p.D;
                const float of = f * p.inv_keep;
#pragma unroll
                for (n = 0; n < X::ND; n++)
                    if (8 * n < p.D)
                        stx__attn_store2(y + 8 * n + 2 * t, o[m][n][2 * e] * of,
                                         o[m][n][2 * e + 1] * of);
                if (!t) {
                    const size_t row = ((size_t)job.b * p.H + job.h) * p.T + i;
                    p.row_max[row] = X::Q_REGS ? row_max[m][e] * 0.69314718f : row_max[m][e];
                    p.inv_sum[row] = f;
                }
            }
        }
}

/* Sets the fields of w that change from step to step. */
template <class X>
static __device__ __forceinline__ void stx__attn_fwd_set_tile(const stx__attn_params &p,
                                                              const stx__attn_job &job,
                                                              const unsigned char *shared, int s,
                                                              stx__attn_fwd_tile &w) {
    const float unit = X::Q_REGS ? STX__LOG2E : 1;
    w.lane = stx__attn_opaque((int)threadIdx.x & 31);
    w.k = shared + (s & 1) * 2 * X::TILE;
    w.v = w.k + X::TILE;
    w.s = s;
    w.window = s < job.window_steps;
    w.j0 = w.window ? job.first + s * X::KEYS
                    : (s - job.window_steps) * X::KEYS - ((p.S + p.span) & 7);
    w.sc = (w.window ? p.scale : p.scale * sqrtf((float)p.D)) * unit;
}

/* The forward kernel, see "Forward" above. There is one block per entry of the list
   (blockIdx.x / B) and batch row (blockIdx.x % B). */
template <class Pr, int DP, int BK, int MT, int SHARED_Q>
STX__GLOBAL(128, stx__attn_fwd_shape<Pr, DP, BK, MT, SHARED_Q>::BLOCKS)
stx__attn_fwd(stx__attn_params p, const uint32_t *list, int tiles) {
    typedef stx__attn_fwd_shape<Pr, DP, BK, MT, SHARED_Q> X;

    enum { ROWS = 16 * MT };

    STX__DYNAMIC(memory);
    const stx__attn_job &job = *(const stx__attn_job *)memory;
    unsigned char *shared = memory + X::HEADER, *ring = shared + 4 * X::TILE,
                  *after = ring + (p.pe ? X::RING * X::ROW : 0),
                  *qs = X::Q_REGS && !SHARED_Q ? shared + 2 * X::TILE : after,
                  *qr = X::Q_REGS || !(p.u.p || p.vb.p) ? qs : qs + X::BQ * X::ROW;
    const int warp = (int)threadIdx.x >> 5, r0 = warp * ROWS;
    const stx__array none = {NULL, NULL, 0};
    uint32_t kept[MT] = {}, qf[MT][X::QS][4];
    float o[MT][X::ND][4], row_max[MT][2], sum[MT][2];
    stx__attn_skew skew[MT];
    stx__attn_fwd_tile w;
    /* started: one bit per strip, set if its skew continues from the previous tile */
    int s, started = 0;

    if (!threadIdx.x) stx__attn_fwd_job<X>(p, (stx__attn_job *)memory, list, tiles);
    __syncthreads();
    if (job.steps) stx__attn_fwd_load<X>(p, job, shared, 0);
    stx__attn_fwd_begin<X>(p, job, qs, qr, qf, o, row_max, sum, skew);
    w.ring = ring;
    w.qs = qs;
    w.qr = qr;
    w.ramp = (float *)(memory + 64) + warp * X::RAMP;
    w.i = job.i0 + r0;

    for (s = 0; s < job.steps; s++) {
        int some = 1, min_delta, max_delta;
        stx__attn_fwd_set_tile<X>(p, job, shared, s, w);
        stx__cp_wait<0>();
        __syncthreads();
        if (p.key_mask && w.window)
            some = stx__attn_fwd_zero_missing<X>(p, job, shared + (s & 1) * 2 * X::TILE, w.j0);
        if (s + 1 < job.steps) stx__attn_fwd_load<X>(p, job, shared, s + 1);
        /* the logits of persistent keys do not include u */
        if (SHARED_Q && s == job.window_steps && p.u.p) {
            __syncwarp();
            stx__attn_load_query<Pr, X::CH>(p, qs, r0, ROWS, job.i0, job.b, job.h, none);
        }
        /* the skew restarts at the next tile; the ring has all rows that this requires */
        if (!some) {
            started = 0;
            continue;
        }

        /* the largest and the smallest distance between the warp's queries and the
           tile's keys */
        max_delta = p.C + w.i + ROWS - 1 - w.j0;
        min_delta = p.C + w.i - (w.j0 + BK - 1);
        if (w.i >= p.T) continue;
        if (w.window && (min_delta > job.w.visible || max_delta < p.delta_min)) continue;
        if (p.keep) stx__attn_fwd_keep<X>(p, job, w, kept);
        if (w.window ? min_delta < p.delta_min || max_delta > job.w.full || w.j0 < p.first_key
                     : w.j0 < 0 || w.j0 + BK > p.N)
            stx__attn_fwd_edge<X>(p, job, w, kept, qf, o, row_max, sum, skew, started);
        else
            stx__attn_fwd_interior<X>(p, job, w, kept, qf, o, row_max, sum, skew, started);
    }
    stx__attn_fwd_store<X>(p, job, o, row_max, sum);
}

typedef stx__kernel_of<stx__attn_params, const uint32_t *, int> stx__attn_fwd_kernel;

typedef struct stx__attn_fwd_choice {
    stx__attn_fwd_kernel run;
    size_t shared;
    int bq, bk, tiles;
} stx__attn_fwd_choice;

template <class Pr, int DP, int BK, int MT, int SHARED_Q>
static stx__attn_fwd_choice stx__attn_fwd_choice_of(const stx__attn_params *p, int two) {
    typedef stx__attn_fwd_shape<Pr, DP, BK, MT, SHARED_Q> X;
    stx__attn_fwd_choice c = {stx__attn_fwd<Pr, DP, BK, MT, SHARED_Q>,
                              X::shared(p->pe != NULL, two), X::BQ, BK, (p->T + X::BQ - 1) / X::BQ};
    return c;
}

template <class Pr>
static stx__attn_fwd_choice stx__attn_fwd_choose_float(const stx__attn_params *p, int two) {
    return p->D <= 32   ? stx__attn_fwd_choice_of<Pr, 32, 64, 1, 1>(p, two)
           : p->D <= 64 ? stx__attn_fwd_choice_of<Pr, 64, 32, 1, 1>(p, two)
                        : stx__attn_fwd_choice_of<Pr, 128, 16, 1, 1>(p, two);
}

template <int DP, int BK, int MT>
static stx__attn_fwd_choice stx__attn_fwd_choose_bf16(const stx__attn_params *p, int two) {
    return two ? stx__attn_fwd_choice_of<stx__attn_bf16, DP, BK, MT, 1>(p, 1)
               : stx__attn_fwd_choice_of<stx__attn_bf16, DP, BK, MT, 0>(p, 0);
}

/* A warp processes two strips, and thus a block 128 queries, if spans are long and the
   blocks still fill a large GPU: two blocks on each of 132 multiprocessors. The choice
   must not depend on the actual GPU. Where the oldest key cuts the window, tiles of 64
   and of 128 queries begin at different keys and sum in a different order, so results
   would differ between GPUs. */
enum { STX__ATTN_MIN_BLOCKS = 264 };

static stx__attn_fwd_choice stx__attn_fwd_choose(stx_ctx *x, const stx__attn_params *p, int half) {
    const stx_gpu *g = stx__gpu(x);
    int two = p->u.p || p->vb.p,
        many = (size_t)p->B * p->H * ((p->T + 127) / 128) >= STX__ATTN_MIN_BLOCKS;
    int wide = (p->span >= 512 && p->T >= 128 && many) || g->attention == 4;
    if (!half)
        return g->tf32 ? stx__attn_fwd_choose_float<stx__attn_tf32>(p, two)
                       : stx__attn_fwd_choose_float<stx__attn_f32>(p, two);
    if (p->D <= 32)
        return wide ? stx__attn_fwd_choose_bf16<32, 64, 2>(p, two)
                    : stx__attn_fwd_choose_bf16<32, 64, 1>(p, two);
    if (p->D <= 64)
        return wide ? stx__attn_fwd_choose_bf16<64, 64, 2>(p, two)
                    : stx__attn_fwd_choose_bf16<64, 64, 1>(p, two);
    return p->D <= 96 ? stx__attn_fwd_choose_bf16<96, 32, 1>(p, two)
                      : stx__attn_fwd_choose_bf16<128, 32, 1>(p, two);
}

/* Returns whether the fused kernels can run this call. Launches nothing. */
static int stx__attn_fused_can(const stx_ctx *x, const stx_attention_args *a) {
    stx__attn_params p;
    int half;
    return stx__attn_params_of(x, a, &p, &half)
           && stx__attn_fwd_choose((stx_ctx *)x, &p, half).shared <= stx__gpu(x)->shared_max
           && (size_t)p.B * p.H * ((size_t)p.T + 63) / 64 < ((size_t)1 << 31);
}

/* Returns the number of words in the work list for the smallest tiles, 64 queries
   each. */
static size_t stx__attn_fused_fwd_list(const stx_attention_args *a) {
    return a->H * ((a->T + 63) / 64);
}

static size_t stx__attn_fused_fwd_work(const stx_attention_args *a) {
    return (stx__attn_fused_fwd_list(a) + stx__attn_key_words(a) * stx__attn_key_word_rows(a))
           * sizeof(uint32_t);
}

static void stx__attn_fused_fwd(stx_ctx *x, const stx_attention_args *a) {
    stx__attn_params p;
    stx__attn_fwd_choice c;
    int half, n;
    if (!stx_ok(x) || !stx__attn_params_of(x, a, &p, &half)) return;
    c = stx__attn_fwd_choose(x, &p, half);
    n = p.H * c.tiles;
    stx__attn_make_key_mask(x, "stx_attention_fwd", a, &p,
                            (uint32_t *)a->work + stx__attn_fused_fwd_list(a));
    STX__RUN_KERNEL(x, "stx_attention_fwd", stx__attn_list_kernel,
                    stx__blocks((size_t)n, 128, (size_t)1 << 30), 128, 0, p, (uint32_t *)a->work,
                    c.tiles, c.bq, c.bk);
    STX__RUN_KERNEL(x, "stx_attention_fwd", c.run, (unsigned)n * (unsigned)p.B, 128, c.shared, p,
                    (const uint32_t *)a->work, c.tiles);
}
