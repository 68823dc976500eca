#pragma once
#include "common.cuh"
#include "sums.cuh"


// >>recurrence

#ifdef SEQTX_SRU_H
/* The recurrence of stx_sru_args, with the letters defined there. In bfloat16 it moves
   10 bytes per column and step for about 40 instructions. Its speed is therefore
   limited by memory or, with few columns, by the latency of the chain c -> f -> c,
   about 60 cycles per step. Loads must start long before they are needed, and columns
   must be distributed over the whole GPU. A warp therefore processes 32 columns of one
   batch row and one direction, one column per lane (64 bytes per plane and step in
   bfloat16). A plane is one of the adjacent arrays in u or V.

   Forward: a block is one warp, which walks all steps. A ring of cp.async stages in
   shared memory loads 40 or more steps ahead.

   Forward without v and V (scan): f does not depend on c, so a tile of 32 steps turns c
   into P c + Q. With few columns, each warp of a block processes a different tile. The
   warps exchange P and Q, and each computes its initial state from them. Inputs are
   read from global memory only once.

       step     0      32      64      96     128
                |--------|-------|-------|-------|
       warp         0        1       2       3       P, Q; exchange; then states and h

   Backward: a warp loads a tile, recomputes its states from the saved one, then walks
   back. For any v, a tile turns the adjoint e after it into P e + Q before it (see J
   below). With few columns, the warps of a block therefore process one tile each here
   too. P and Q are computed together with the states. If there are several warps, their
   number does not affect how e passes from tile to tile.

   A single warp loads the next tile meanwhile if data is in bfloat16. There are three
   slots of half a tile. If A and B contain tile 3:

       computed                      loaded
       ----------------------------  ----------------------------------
       states of tile 3              first half of tile 2, to C
       back to the middle of tile 3
       back to the start of tile 3   second half of tile 2, to B
       states of tile 2              first half of tile 1, to A

   The kernel and the number of warps depend on sizes alone, so results do not depend on
   the GPU. Arithmetic is in float. Parameter gradients are summed over the tiles of a
   warp, then over warps, then over batch rows, each in a fixed order.

   One warp processes all tiles of its columns if there are STX__SRU_ONE_WARP columns or
   more. Otherwise four warps share them, or eight if there are fewer than
   STX__SRU_FOUR_WARPS columns. STX__SRU_SHARED is the largest shared memory of a block
   in bytes, STX__SRU_SLOT the number of elements in one plane of a tile. */
enum {
    STX__SRU_ONE_WARP = 30000,
    STX__SRU_FOUR_WARPS = 8192,
    STX__SRU_SHARED = 96 << 10,
    STX__SRU_SLOT = 32 * STX_SRU_TILE
};

typedef struct stx__sru {
    size_t T, H, O, k, tiles;
    size_t groups; /* groups of 32 columns per direction */
    int D, add_xr;
    float alpha; /* scale of the highway; 1 for k = 4 */
    stx__array u, xr, V, h, last, v, bias, c0, m, dh, dlast, du, dV, dxr, dc0;
    const int32_t *pad;
    float *c;    /* (B,tiles,O): the state before each tile; or NULL */
    float *part; /* (B,4,O): dvf, dvr, dbf, dbr of each batch row; or NULL */
} stx__sru;

/* The column of a lane: column o of batch row b. A lane beyond the last column
   duplicates lane 0 and stores the same values, so no conditions are needed. Step n, in
   the order of the direction, is row stx__sru_row(n) of (B,T). */
typedef struct stx__sru_column {
    size_t b, o, o0; /* o0: column of lane 0 */
    size_t first;    /* row of step 0 */
    int lane, width, back;
    int col;              /* index among the warp's columns */
    float vf, vr, bf, br; /* gate parameters times -log2 e, so that e^-z is a power of 2 */
    float m;
} stx__sru_column;

  #define STX__NLOG2E (-1.44269504088896340736f)

static __device__ __forceinline__ size_t stx__sru_row(const stx__sru_column &q, size_t n) {
    return q.back ? q.first - n : q.first + n;
}

/* Returns a[i], or `none` if the array is NULL. */
static __device__ __forceinline__ float stx__sru_get_or(const stx__array &a, size_t i, float none) {
    return a.p ? stx__get(a, i) : none;
}

static __device__ __forceinline__ stx__sru_column stx__sru_column_of(const stx__sru &p) {
    stx__sru_column q;
    size_t at = blockIdx.x, s, j0;
    q.b = at / (p.groups * p.D);
    at -= q.b * p.groups * p.D;
    s = at / p.groups;
    j0 = (at - s * p.groups) * 32;
    q.lane = threadIdx.x % 32;
    q.width = p.H - j0 < 32 ? (int)(p.H - j0) : 32;
    q.col = q.lane < q.width ? q.lane : 0;
    q.back = s == 1;
    q.o0 = s * p.H + j0;
    q.o = q.o0 + q.col;
    q.first = q.b * p.T + (q.back ? p.T - 1 : 0);
    q.vf = STX__NLOG2E * stx__sru_get_or(p.v, q.o, 0);
    q.vr = STX__NLOG2E * stx__sru_get_or(p.v, p.O + q.o, 0);
    q.bf = STX__NLOG2E * stx__sru_get_or(p.bias, q.o, 0);
    q.br = STX__NLOG2E * stx__sru_get_or(p.bias, p.O + q.o, 0);
    q.m = stx__sru_get_or(p.m, q.b * p.O + q.o, 1);
    return q;
}

/* An array that a warp reads, in planes of 32 columns. p is the first 16-byte piece of
   this lane at step 0. `by` and `plane` are the strides in bytes between steps and
   between planes. `there` is 0 if this lane has nothing to read. */
typedef struct stx__sru_input {
    const char *p;
    ptrdiff_t by, plane;
    int there;
} stx__sru_input;

template <class E>
static __device__ __forceinline__ stx__sru_input stx__sru_input_of(const stx__array &a, size_t ld,
                                                                   size_t plane, const stx__sru &p,
                                                                   const stx__sru_column &q) {
    constexpr int IN = 16 / (int)sizeof(E), PIECES = 32 / IN;
    stx__sru_input f;
    f.by = (q.back ? -(ptrdiff_t)ld : (ptrdiff_t)ld) * (ptrdiff_t)sizeof(E);
    f.p = (const char *)((const E *)a.p + q.first * ld + plane + q.o0 + q.lane % PIECES * IN)
          + q.lane / PIECES * f.by;
    f.plane = (ptrdiff_t)(p.O * sizeof(E));
    f.there = a.p && q.lane % PIECES * IN < q.width;
    return f;
}

/* Starts copying steps n0 .. n0+STEPS-1 to PLANES slots (STEPS,32), 16 bytes at a time.
   Pieces beyond the end of an array are filled with zeros. Their source address is u,
   because the computed address may be outside any array. */
template <class E, int STEPS, int PLANES>
static __device__ __forceinline__ void stx__sru_fetch(E *slot, const stx__sru_input &f,
                                                      const stx__sru &p, const stx__sru_column &q,
                                                      size_t n0) {
    constexpr int IN = 16 / (int)sizeof(E), PIECES = 32 / IN, ROWS = 32 / PIECES;
    const char *from = f.p + (ptrdiff_t)n0 * f.by;
    const int i = q.lane / PIECES;
    int left = 0;
    E *to = slot + q.lane * IN;
    if (f.there && p.T > n0) left = p.T - n0 < (size_t)STEPS ? (int)(p.T - n0) : STEPS;
  #pragma unroll
    for (int j = 0; j < STEPS / ROWS; j++) {
  #pragma unroll
        for (int k = 0; k < PLANES; k++) {
            const int yes = i + j * ROWS < left;
            stx__cp16(to + (k * STEPS + j * ROWS) * 32,
                      yes ? from + k * f.plane : (const char *)p.u.p, yes ? 16 : 0);
        }
        from += ROWS * f.by;
    }
}

/* Copies one plane of an array with any storage and alignment. Each lane copies its own
   column, element by element. */
template <class E, int STEPS>
static __device__ __forceinline__ void stx__sru_fetch_plain(E *slot, const stx__array &a, size_t ld,
                                                            size_t plane, const stx__sru &p,
                                                            const stx__sru_column &q, size_t n0) {
  #pragma unroll 4
    for (int i = 0; i < STEPS; i++)
        slot[i * 32 + q.lane] = a.p && n0 + i < p.T
                                    ? stx__get(a, stx__sru_row(q, n0 + i) * ld + plane + q.o)
                                    : 0.0f;
}

/* The inputs of a tile, in this order of slots: u0, u1, u2, the highway (u3 or xr),
   with HASV the two planes of V, and with BACK dh and, if gradients are added to it,
   dxr. PLAIN supports any storage and alignment. */
template <class E, int PLAIN, int HASV, int STEPS, int BACK> struct stx__sru_source {
    stx__sru_input u, x, V, dh, dxr;

    __device__ __forceinline__ stx__sru_source(const stx__sru &p, const stx__sru_column &q) {
        if (PLAIN) return;
        u = stx__sru_input_of<E>(p.u, p.k * p.O, 0, p, q);
        x = p.k == 4 ? stx__sru_input_of<E>(p.u, 4 * p.O, 3 * p.O, p, q)
                     : stx__sru_input_of<E>(p.xr, p.O, 0, p, q);
        if (HASV) V = stx__sru_input_of<E>(p.V, 2 * p.O, 0, p, q);
        if (BACK) dh = stx__sru_input_of<E>(p.dh, p.O, 0, p, q);
        if (BACK) dxr = stx__sru_input_of<E>(p.dxr, p.O, 0, p, q);
    }

    __device__ __forceinline__ void fetch(E *slot, const stx__sru &p, const stx__sru_column &q,
                                          size_t n0) const {
        constexpr int N = 32 * STEPS, GRAD = HASV ? 6 : 4;
        if constexpr (PLAIN) {
            for (int i = 0; i < 3; i++)
                stx__sru_fetch_plain<E, STEPS>(slot + i * N, p.u, p.k * p.O, i * p.O, p, q, n0);
            stx__sru_fetch_plain<E, STEPS>(slot + 3 * N, p.k == 4 ? p.u : p.xr,
                                           p.k == 4 ? 4 * p.O : p.O, p.k == 4 ? 3 * p.O : 0, p, q,
                                           n0);
            if (HASV)
                for (int i = 0; i < 2; i++)
                    stx__sru_fetch_plain<E, STEPS>(slot + (4 + i) * N, p.V, 2 * p.O, i * p.O, p, q,
                                                   n0);
            if (BACK) stx__sru_fetch_plain<E, STEPS>(slot + GRAD * N, p.dh, p.O, 0, p, q, n0);
            if (BACK && p.add_xr)
                stx__sru_fetch_plain<E, STEPS>(slot + (GRAD + 1) * N, p.dxr, p.O, 0, p, q, n0);
        } else {
            stx__sru_fetch<E, STEPS, 3>(slot, u, p, q, n0);
            stx__sru_fetch<E, STEPS, 1>(slot + 3 * N, x, p, q, n0);
            if (HASV) stx__sru_fetch<E, STEPS, 2>(slot + 4 * N, V, p, q, n0);
            if (BACK) stx__sru_fetch<E, STEPS, 1>(slot + GRAD * N, dh, p, q, n0);
            if (BACK && p.add_xr) stx__sru_fetch<E, STEPS, 1>(slot + (GRAD + 1) * N, dxr, p, q, n0);
        }
        stx__cp_commit();
    }
};

static __device__ __forceinline__ float stx__sru_float(float v) {
    return v;
}

static __device__ __forceinline__ float stx__sru_float(stx__bf16 v) {
    return __bfloat162float(v);
}

static __device__ __forceinline__ void stx__sru_store(float *p, float v) {
    *p = v;
}

static __device__ __forceinline__ void stx__sru_store(stx__bf16 *p, float v) {
    *p = __float2bfloat16(v);
}

/* A pointer into an array that is written step by step. */
template <class E, int PLAIN> struct stx__sru_output {
    E *p;

    __device__ __forceinline__ stx__sru_output(const stx__array &a, size_t i) : p((E *)a.p + i) {}

    __device__ __forceinline__ void put(size_t i, float v) const {
        stx__sru_store(p + i, v);
    }

    __device__ __forceinline__ void step(ptrdiff_t by) {
        p += by;
    }
};

template <class E> struct stx__sru_output<E, 1> {
    stx__array a;
    size_t at;

    __device__ __forceinline__ stx__sru_output(const stx__array &b, size_t i) : a(b), at(i) {}

    __device__ __forceinline__ void put(size_t i, float v) const {
        stx__put(a, at + i, v);
    }

    __device__ __forceinline__ void step(ptrdiff_t by) {
        at += (size_t)by;
    }
};

/* These functions find steps to skip. stx__sru_pad returns nonzero if step n is
   padding. stx__sru_skips returns a bit mask of the steps to skip among the 32 from n0:
   padding and steps beyond the last one. Its argument `pad` is the result of
   stx__sru_pad for step n0 + lane. */
static __device__ __forceinline__ int stx__sru_pad(const stx__sru &p, const stx__sru_column &q,
                                                   size_t n) {
    return p.pad && n < p.T ? p.pad[stx__sru_row(q, n)] != 0 : 0;
}

static __device__ __forceinline__ uint32_t stx__sru_skips(const stx__sru &p,
                                                          const stx__sru_column &q, size_t n0,
                                                          int pad) {
    return __ballot_sync(STX__ALL, pad || n0 + q.lane >= p.T);
}

/* Returns sigmoid(u + v c + b) at index `at` of slots (STEPS,32). Gate 0 is the forget
   gate, gate 1 the reset gate. */
template <class E, int HASV, int STEPS>
static __device__ __forceinline__ float stx__sru_gate(const E *slot, int gate, int at,
                                                      const stx__sru_column &q, float c) {
    float v = gate ? q.vr : q.vf, z = fmaf(stx__sru_float(slot[(1 + gate) * 32 * STEPS + at]),
                                           STX__NLOG2E, gate ? q.br : q.bf);
    if (HASV) v = fmaf(stx__sru_float(slot[(4 + gate) * 32 * STEPS + at]), STX__NLOG2E, v);
    return stx__rcp(1.0f + stx__exp2(fmaf(v, c, z)));
}

/* Returns h = xt + (g(c) - xt) m r, see stx_sru_args. */
template <class E, int TANH, int STEPS>
static __device__ __forceinline__ float stx__sru_out(const E *slot, int at, const stx__sru &p,
                                                     const stx__sru_column &q, float c, float r) {
    float xt = p.alpha * stx__sru_float(slot[3 * 32 * STEPS + at]), g = TANH ? tanhf(c) : c;
    return fmaf(g - xt, q.m * r, xt);
}

/* Runs STEPS steps from n0, with inputs from `slot`, and returns the last state. A set
   bit in `skip` marks a step to skip; with FULL, there are none. With SCAN, v is 0. */
template <class E, int PLAIN, int HASV, int TANH, int STEPS, int FULL, int SCAN>
static __device__ __forceinline__ float stx__sru_steps(const E *slot, const stx__sru &p,
                                                       const stx__sru_column &q, size_t n0,
                                                       uint32_t skip, float c) {
    stx__sru_output<E, PLAIN> to(p.h, stx__sru_row(q, n0) * p.O + q.o);
    const ptrdiff_t by = q.back ? -(ptrdiff_t)p.O : (ptrdiff_t)p.O;
  #pragma unroll(!FULL ? 1 : PLAIN ? 4 : STEPS < 16 ? STEPS : 16)
    for (int i = 0; i < STEPS; i++, to.step(by)) {
        int at = i * 32 + q.col;
        if (!FULL && (skip >> i & 1)) {
            if (n0 + i < p.T) to.put(0, 0);
            continue;
        }
        float u0 = stx__sru_float(slot[at]);
        float f = stx__sru_gate<E, HASV, STEPS>(slot, 0, at, q, SCAN ? 0 : c);
        float r = stx__sru_gate<E, HASV, STEPS>(slot, 1, at, q, SCAN ? 0 : c);
        c = fmaf(c - u0, f, u0);
        to.put(0, stx__sru_out<E, TANH, STEPS>(slot, at, p, q, c, r));
    }
    return c;
}

/* Forward. A block is one warp (launch bound 32). The ring has STAGES stages of STEPS
   steps; all but one are in flight. */
template <class E, int PLAIN, int HASV, int TANH> STX__GLOBAL(32) stx__sru_fwd_kernel(stx__sru p) {
    constexpr int STEPS = sizeof(E) == 2 ? 16 : 8, STAGES = sizeof(E) == 2 ? 4 : 6,
                  STAGE = (HASV ? 6 : 4) * 32 * STEPS;
    STX__SHARED(E, ring, STAGES * STAGE);
    const stx__sru_column q = stx__sru_column_of(p);
    const stx__sru_source<E, PLAIN, HASV, STEPS, 0> from(p, q);
    float c = stx__sru_get_or(p.c0, q.b * p.O + q.o, 0);
    int at = 0, pad = stx__sru_pad(p, q, q.lane);
    for (int s = 0; s + 1 < STAGES; s++) from.fetch(ring + s * STAGE, p, q, (size_t)s * STEPS);
    for (size_t n0 = 0; n0 < p.T; n0 += STEPS) {
        uint32_t skip = stx__sru_skips(p, q, n0, pad) & ((1u << STEPS) - 1);
        pad = stx__sru_pad(p, q, n0 + STEPS + q.lane);
        stx__cp_wait<STAGES - 2>();
        /* all lanes now see this stage, and no lane still reads the previous one */
        __syncwarp();
        from.fetch(ring + (at ? at - 1 : STAGES - 1) * STAGE, p, q, n0 + (STAGES - 1) * STEPS);
        if (p.c && n0 % STX_SRU_TILE == 0) p.c[(q.b * p.tiles + n0 / STX_SRU_TILE) * p.O + q.o] = c;
        if (skip)
            c = stx__sru_steps<E, PLAIN, HASV, TANH, STEPS, 0, 0>(ring + at * STAGE, p, q, n0, skip,
                                                                  c);
        else
            c = stx__sru_steps<E, PLAIN, HASV, TANH, STEPS, 1, 0>(ring + at * STAGE, p, q, n0, 0,
                                                                  c);
        at = at + 1 < STAGES ? at + 1 : 0;
    }
    stx__cp_wait<0>();
    if (p.last.p) stx__put(p.last, q.b * p.O + q.o, c);
}

/* Exchanges P and Q of the warps' tiles. `mine` receives the value before this warp's
   tile, and x the value after all tiles. `buffer` is (2,warps,2,32); rounds alternate
   between its halves, so that one barrier per round suffices. */
static __device__ __forceinline__ void stx__sru_exchange(float *buffer, int round, int warps,
                                                         int warp, int lane, float P, float Q,
                                                         float &mine, float &x) {
    float *to = buffer + (round & 1) * warps * 64;
    to[warp * 64 + lane] = P;
    to[warp * 64 + 32 + lane] = Q;
    __syncthreads();
    for (int w = 0; w < warps; w++) {
        if (w == warp) mine = x;
        x = fmaf(to[w * 64 + lane], x, to[w * 64 + 32 + lane]);
    }
}

/* Forward without v and V. In each round, the warps of a block process adjacent tiles.
   The launch bound is 8 warps and one block per multiprocessor, so that the unrolled
   loops keep their values in registers. */
template <class E, int PLAIN, int TANH> STX__GLOBAL(256, 1) stx__sru_scan_kernel(stx__sru p) {
    STX__DYNAMIC(raw);
    const stx__sru_column q = stx__sru_column_of(p);
    const int warps = blockDim.x / 32, warp = threadIdx.x / 32;
    const stx__sru_source<E, PLAIN, 0, STX_SRU_TILE, 0> from(p, q);
    E *slot = (E *)raw + warp * 4 * STX__SRU_SLOT;
    float *buffer = (float *)((E *)raw + warps * 4 * STX__SRU_SLOT),
          c = stx__sru_get_or(p.c0, q.b * p.O + q.o, 0);
    for (size_t tile = warp, round = 0; tile - warp < p.tiles; tile += warps, round++) {
        size_t n0 = tile * STX_SRU_TILE;
        float P = 1, Q = 0, mine = 0;
        uint32_t skip = 0;
        if (tile < p.tiles) {
            __syncwarp();
            from.fetch(slot, p, q, n0);
            skip = stx__sru_skips(p, q, n0, stx__sru_pad(p, q, n0 + q.lane));
            stx__cp_wait<0>();
            __syncwarp();
  #pragma unroll 8
            for (int i = 0; i < STX_SRU_TILE; i++) {
                int at = i * 32 + q.col;
                float u0 = stx__sru_float(slot[at]),
                      f = stx__sru_gate<E, 0, STX_SRU_TILE>(slot, 0, at, q, 0),
                      next = fmaf(Q - u0, f, u0);
                P = skip >> i & 1 ? P : P * f;
                Q = skip >> i & 1 ? Q : next;
            }
        }
        stx__sru_exchange(buffer, (int)round, warps, warp, q.lane, P, Q, mine, c);
        if (tile >= p.tiles) continue;
        if (p.c) p.c[(q.b * p.tiles + tile) * p.O + q.o] = mine;
        if (skip)
            (void)stx__sru_steps<E, PLAIN, 0, TANH, STX_SRU_TILE, 0, 1>(slot, p, q, n0, skip, mine);
        else
            (void)stx__sru_steps<E, PLAIN, 0, TANH, STX_SRU_TILE, 1, 1>(slot, p, q, n0, 0, mine);
    }
    if (p.last.p && warp == 0) stx__put(p.last, q.b * p.O + q.o, c);
}

/* The derivatives of a step. Forward: c' = u0 + (c - u0) f, h = xt + (g(c') - xt) m r.
   Backward, where e comes from the following step:

       a   = dh m r g' + e                          dL/dc'
       dzf = a (c - u0) f (1 - f)                   dzr = dh (g - xt) m r (1 - r)
       du0 = a (1 - f)   du1 = dzf   du2 = dzr      dxt = dh (1 - m r)
       dvf += dzf c      dvr += dzr c               dbf += dzf   dbr += dzr
       e   = a f + dzf vf + dzr vr = a J + dzr vr   J = f + vf (c - u0) f (1 - f)

   The fields are d = c - u0, s = f (1 - f), kept = m r, gr = dh m r g' and rest = dzr
   vr. The argument cn is c'. */
typedef struct stx__sru_step_grad {
    float d, f, r, s, kept, gr, dzr, J, rest;
} stx__sru_step_grad;

template <class E, int HASV, int TANH, int STEPS>
static __device__ __forceinline__ stx__sru_step_grad stx__sru_step_grads(const E *slot, int at,
                                                                         const stx__sru &p,
                                                                         const stx__sru_column &q,
                                                                         float c, float cn, float f,
                                                                         float r) {
    constexpr int N = 32 * STEPS, GRAD = HASV ? 6 : 4;
    const float unscale = 1.0f / STX__NLOG2E;
    stx__sru_step_grad k;
    float vf = q.vf * unscale, vr = q.vr * unscale, g = TANH ? tanhf(cn) : cn,
          xt = p.alpha * stx__sru_float(slot[3 * N + at]), G = stx__sru_float(slot[GRAD * N + at]);
    if (HASV) {
        vf += stx__sru_float(slot[4 * N + at]);
        vr += stx__sru_float(slot[5 * N + at]);
    }
    k.d = c - stx__sru_float(slot[at]);
    k.f = f;
    k.r = r;
    k.s = f * (1 - f);
    k.kept = q.m * r;
    k.gr = G * k.kept;
    k.dzr = k.gr * (g - xt) * (1 - r);
    if (TANH) k.gr *= fmaf(-g, g, 1.0f);
    k.J = fmaf(vf, k.d * k.s, f);
    k.rest = k.dzr * vr;
    return k;
}

/* Computes the states (STEPS,32) of a part of a tile from c. With PARALLEL, also
   continues P and Q, where (e before the tile) = P (e after these steps) + Q. */
template <class E, int HASV, int TANH, int PARALLEL, int STEPS, int FULL>
static __device__ __forceinline__ float stx__sru_states(float *state, const E *slot,
                                                        const stx__sru &p, const stx__sru_column &q,
                                                        uint32_t skip, float c, float &P,
                                                        float &Q) {
  #pragma unroll(FULL ? 8 : 1)
    for (int i = 0; i < STEPS; i++) {
        int at = i * 32 + q.col;
        state[i * 32 + q.lane] = c;
        if (!FULL && (skip >> i & 1)) continue;
        float u0 = stx__sru_float(slot[at]),
              f = stx__sru_gate<E, HASV, STEPS>(slot, 0, at, q, c), cn = fmaf(c - u0, f, u0);
        if (PARALLEL) {
            stx__sru_step_grad k = stx__sru_step_grads<E, HASV, TANH, STEPS>(
                slot, at, p, q, c, cn, f, stx__sru_gate<E, HASV, STEPS>(slot, 1, at, q, c));
            Q = fmaf(P, fmaf(k.gr, k.J, k.rest), Q);
            P *= k.J;
        }
        c = cn;
    }
    return c;
}

/* Walks back through the STEPS steps from n0 on. Computes all gradients, replaces the
   state cn and the adjoint e after these steps by those before them, and adds dvf, dvr,
   dbf and dbr to `sum`. */
template <class E, int PLAIN, int HASV, int TANH, int STEPS, int FULL>
static __device__ __forceinline__ void stx__sru_steps_back(const float *state, const E *slot,
                                                           const stx__sru &p,
                                                           const stx__sru_column &q, size_t n0,
                                                           uint32_t skip, float &cn, float &e,
                                                           float (&sum)[4]) {
    constexpr int N = 32 * STEPS, GRAD = HASV ? 6 : 4;
    /* may be beyond the last row, but is not used then */
    const size_t row = stx__sru_row(q, n0 + STEPS - 1);
    const ptrdiff_t by = q.back ? (ptrdiff_t)p.O : -(ptrdiff_t)p.O, by_u = by * (ptrdiff_t)p.k,
                    by_x = p.k == 4 ? by_u : by;
    stx__sru_output<E, PLAIN> du(p.du, row * p.k * p.O + q.o),
        dx(p.k == 4 ? p.du : p.dxr, p.k == 4 ? (row * 4 + 3) * p.O + q.o : row * p.O + q.o),
        dV(p.dV, row * 2 * p.O + q.o);
    const int has_x = p.k == 4 || p.dxr.p, has_V = HASV && p.dV.p;
  #pragma unroll(FULL && !PLAIN ? 4 : 1)
    for (int i = STEPS - 1; i >= 0; i--, du.step(by_u), dx.step(by_x), dV.step(2 * by)) {
        int at = i * 32 + q.col;
        float c = state[i * 32 + q.lane], du0 = 0, dzf = 0, dzr = 0, dxt = 0,
              was = p.add_xr ? stx__sru_float(slot[(GRAD + 1) * N + at]) : 0.0f;
        if (FULL || !(skip >> i & 1)) {
            float f = stx__sru_gate<E, HASV, STEPS>(slot, 0, at, q, c),
                  r = stx__sru_gate<E, HASV, STEPS>(slot, 1, at, q, c);
            stx__sru_step_grad k =
                stx__sru_step_grads<E, HASV, TANH, STEPS>(slot, at, p, q, c, cn, f, r);
            float a = k.gr + e;
            du0 = fmaf(-a, f, a);
            dzf = a * (k.d * k.s);
            dzr = k.dzr;
            dxt = stx__sru_float(slot[GRAD * N + at]) * (1 - k.kept);
            e = fmaf(a, k.J, k.rest);
            sum[0] = fmaf(dzf, c, sum[0]);
            sum[1] = fmaf(dzr, c, sum[1]);
            sum[2] += dzf;
            sum[3] += dzr;
        }
        cn = c;
        if (!FULL && n0 + i >= p.T) continue;
        du.put(0, du0);
        du.put(p.O, dzf);
        du.put(2 * p.O, dzr);
        if (has_x) dx.put(0, fmaf(p.alpha, dxt, was));
        if (has_V) {
            dV.put(0, dzf * c);
            dV.put(p.O, dzr * c);
        }
    }
}

/* Returns whether a warp of the backward kernel loads the next tile ahead. In float, the
   copies of the other warps should keep the memory busy, and a third slot would leave
   fewer warps per multiprocessor. */
static constexpr __host__ __device__ int stx__sru_ahead(int parallel, size_t size) {
    return !parallel && size == 2;
}

/* Returns the shared memory of a warp of the backward kernel in bytes, without the buffer
   for the exchange: `inputs` planes of a tile, or of one and a half if the next tile is
   loaded ahead, and the states. `size` is the size of an element. */
static __host__ __device__ __forceinline__ size_t stx__sru_bwd_bytes(int ahead, int inputs,
                                                                     size_t size) {
    const size_t plane = STX__SRU_SLOT * size;
    return inputs * (ahead ? plane + plane / 2 : plane) + STX__SRU_SLOT * sizeof(float);
}

/* Backward. With PARALLEL, a block has up to 8 warps, which process adjacent tiles in
   each round, from the last tile to the first. Otherwise a block is one warp. */
template <class E, int PLAIN, int HASV, int TANH, int PARALLEL>
STX__GLOBAL(PARALLEL ? 256 : 32, 1)
stx__sru_bwd_kernel(stx__sru p) {
    constexpr int AHEAD = stx__sru_ahead(PARALLEL, sizeof(E)),
                  STEPS = AHEAD ? STX_SRU_TILE / 2 : STX_SRU_TILE, N = 32 * STEPS;
    STX__DYNAMIC(raw);
    const stx__sru_column q = stx__sru_column_of(p);
    const int warps = PARALLEL ? blockDim.x / 32 : 1, warp = PARALLEL ? threadIdx.x / 32 : 0,
              inputs = (HASV ? 7 : 5) + p.add_xr;
    const stx__sru_source<E, PLAIN, HASV, STEPS, 1> from(p, q);
    const size_t each = stx__sru_bwd_bytes(AHEAD, inputs, sizeof(E));
    float *state = (float *)(raw + warp * each), *buffer = (float *)(raw + warps * each);
    E *first = (E *)(state + STX__SRU_SLOT), *second = first + inputs * N,
      *other = second + inputs * N; /* without AHEAD, `first` is the only slot */
    float e = stx__sru_get_or(p.dlast, q.b * p.O + q.o, 0), total[4] = {0, 0, 0, 0}, c_next = 0;
    int pad_next = 0;
    for (size_t turn = warp, round = 0; turn - warp < p.tiles; turn += warps, round++) {
        const size_t tile = p.tiles - 1 - turn, n0 = tile * STX_SRU_TILE;
        const int ahead = AHEAD && tile > 0;
        float P = 1, Q = 0, mine = e, c = 0;
        uint32_t skip = 0;
        if (turn < p.tiles) {
            if (!AHEAD || round == 0) {
                __syncwarp();
                from.fetch(first, p, q, n0);
                if (AHEAD) from.fetch(second, p, q, n0 + STEPS);
                c_next = p.c[(q.b * p.tiles + tile) * p.O + q.o];
                pad_next = stx__sru_pad(p, q, n0 + q.lane);
            }
            c = c_next;
            skip = stx__sru_skips(p, q, n0, pad_next);
            stx__cp_wait<0>();
            /* all lanes now see this tile, and no lane still reads the previous one */
            __syncwarp();
            if (ahead) {
                from.fetch(other, p, q, n0 - STX_SRU_TILE);
                c_next = p.c[(q.b * p.tiles + tile - 1) * p.O + q.o];
                pad_next = stx__sru_pad(p, q, n0 - STX_SRU_TILE + q.lane);
            }
            for (int n = 0; n < STX_SRU_TILE; n += STEPS) {
                const E *slot = n ? second : first;
                if (skip)
                    c = stx__sru_states<E, HASV, TANH, PARALLEL, STEPS, 0>(
                        state + n * 32, slot, p, q, skip >> n, c, P, Q);
                else
                    c = stx__sru_states<E, HASV, TANH, PARALLEL, STEPS, 1>(state + n * 32, slot, p,
                                                                           q, 0, c, P, Q);
            }
        }
        if (PARALLEL) stx__sru_exchange(buffer, (int)round, warps, warp, q.lane, P, Q, mine, e);
        if (turn < p.tiles) {
            float sum[4] = {0, 0, 0, 0};
            for (int n = STX_SRU_TILE - STEPS; n >= 0; n -= STEPS) {
                const E *slot = n ? second : first;
                if (skip)
                    stx__sru_steps_back<E, PLAIN, HASV, TANH, STEPS, 0>(
                        state + n * 32, slot, p, q, n0 + n, skip >> n, c, mine, sum);
                else
                    stx__sru_steps_back<E, PLAIN, HASV, TANH, STEPS, 1>(
                        state + n * 32, slot, p, q, n0 + n, 0, c, mine, sum);
                if (!ahead || !n) continue;
                __syncwarp(); /* no lane still reads the second half */
                from.fetch(second, p, q, n0 - STEPS);
            }
            for (int k = 0; k < 4; k++) total[k] += sum[k];
        }
        if (!PARALLEL) e = mine;
        if (!AHEAD) continue;
        E *spare = first;
        first = other;
        other = spare;
    }
    /* add the sums of the warps, in order */
    if (PARALLEL && p.part) {
        __syncthreads();
        for (int k = 0; k < 4; k++) buffer[(warp * 4 + k) * 32 + q.lane] = total[k];
        __syncthreads();
        if (warp == 0)
            for (int k = 0; k < 4; k++)
                for (int w = 1; w < warps; w++) total[k] += buffer[(w * 4 + k) * 32 + q.lane];
    }
    if (warp || q.lane >= q.width) return;
    if (p.part)
        for (int k = 0; k < 4; k++) p.part[(q.b * 4 + k) * p.O + q.o] = total[k];
    if (p.dc0.p) stx__add(p.dc0, q.b * p.O + q.o, e, 1);
}

typedef stx__kernel_of<stx__sru> stx__sru_kernel;

template <class E, int PLAIN> static stx__sru_kernel stx__sru_fwd_of(int hasV, int tanh) {
    if (hasV)
        return tanh ? stx__sru_fwd_kernel<E, PLAIN, 1, 1> : stx__sru_fwd_kernel<E, PLAIN, 1, 0>;
    return tanh ? stx__sru_fwd_kernel<E, PLAIN, 0, 1> : stx__sru_fwd_kernel<E, PLAIN, 0, 0>;
}

template <class E, int PLAIN> static stx__sru_kernel stx__sru_scan_of(int tanh) {
    return tanh ? stx__sru_scan_kernel<E, PLAIN, 1> : stx__sru_scan_kernel<E, PLAIN, 0>;
}

template <class E, int PLAIN, int PARALLEL>
static stx__sru_kernel stx__sru_bwd_of(int hasV, int tanh) {
    if (hasV)
        return tanh ? stx__sru_bwd_kernel<E, PLAIN, 1, 1, PARALLEL>
                    : stx__sru_bwd_kernel<E, PLAIN, 1, 0, PARALLEL>;
    return tanh ? stx__sru_bwd_kernel<E, PLAIN, 0, 1, PARALLEL>
                : stx__sru_bwd_kernel<E, PLAIN, 0, 0, PARALLEL>;
}

/* These functions return the kernel for a call's storage and options. */
static stx__sru_kernel stx__sru_fwd_choose(const stx_sru_args *a, int plain, int half, int warps) {
    const int hasV = a->V != NULL;
    if (warps > 1) {
        if (plain) return stx__sru_scan_of<float, 1>(a->tanh);
        return half ? stx__sru_scan_of<stx__bf16, 0>(a->tanh) : stx__sru_scan_of<float, 0>(a->tanh);
    }
    if (plain) return stx__sru_fwd_of<float, 1>(hasV, a->tanh);
    return half ? stx__sru_fwd_of<stx__bf16, 0>(hasV, a->tanh)
                : stx__sru_fwd_of<float, 0>(hasV, a->tanh);
}

template <int PARALLEL>
static stx__sru_kernel stx__sru_bwd_choose(const stx_sru_args *a, int plain, int half) {
    const int hasV = a->V != NULL;
    if (plain) return stx__sru_bwd_of<float, 1, PARALLEL>(hasV, a->tanh);
    return half ? stx__sru_bwd_of<stx__bf16, 0, PARALLEL>(hasV, a->tanh)
                : stx__sru_bwd_of<float, 0, PARALLEL>(hasV, a->tanh);
}

static stx__sru stx__sru_of(stx_ctx *x, const stx_sru_args *a, int backward) {
    stx__sru p;
    memset(&p, 0, sizeof p);
    p.T = a->T;
    p.H = a->H;
    p.O = a->D * a->H;
    p.k = a->k;
    p.tiles = stx_sru_tiles(a);
    p.groups = (a->H + 31) / 32;
    p.D = (int)a->D;
    p.alpha = a->k == 4 ? 1 : a->alpha;
    p.u = stx__array_of(x, a->u);
    p.xr = stx__array_of(x, a->k == 4 ? NULL : a->xr);
    p.V = stx__array_of(x, a->V);
    p.v = stx__array_of(x, a->v);
    p.bias = stx__array_of(x, a->bias);
    p.c0 = stx__array_of(x, a->c0);
    p.m = stx__array_of(x, a->m);
    p.pad = a->pad;
    p.c = (float *)a->c;
    if (!backward) {
        p.h = stx__array_of(x, a->h);
        p.last = stx__array_of(x, a->last);
        return p;
    }
    p.dh = stx__array_of(x, a->dh);
    p.dlast = stx__array_of(x, a->dlast);
    p.dc0 = stx__array_of(x, a->dc0);
    p.du = stx__array_of(x, a->du);
    p.dV = stx__array_of(x, a->dV);
    p.dxr = stx__array_of(x, p.xr.p ? a->dxr : NULL);
    p.add_xr = p.dxr.p && a->add_xr;
    p.part = a->dv || a->dbias ? (float *)a->work : NULL;
    return p;
}

/* Returns whether all inputs and outputs have the same storage, inputs are aligned to
   16 bytes, and rows are multiples of 16 bytes. Otherwise the plain kernels run. */
static int stx__sru_is_uniform(const stx__sru &p) {
    const stx__array *in[5] = {&p.u, &p.xr, &p.V, &p.dh, p.add_xr ? &p.dxr : NULL},
                   *out[4] = {&p.h, &p.du, &p.dV, &p.dxr};
    int i;
    for (i = 0; i < 5; i++)
        if (in[i] && in[i]->p && (in[i]->half != p.u.half || (uintptr_t)in[i]->p % 16)) return 0;
    for (i = 0; i < 4; i++)
        if (out[i]->p && (out[i]->half != p.u.half || out[i]->twin)) return 0;
    return p.H % (p.u.half ? 8 : 4) == 0;
}

/* Returns the number of warps that share the tiles of a column: 1 if there are enough
   columns to fill a GPU. */
static int stx__sru_warps(const stx_sru_args *a, size_t each) {
    const size_t columns = a->B * a->D * a->H;
    size_t w = 8;
    if (columns >= STX__SRU_FOUR_WARPS) w = 4;
    if (columns >= STX__SRU_ONE_WARP) w = 1;
    w = STX_MIN(w, (size_t)STX__SRU_SHARED / each);
    return (int)STX_MIN(w, stx_sru_tiles(a));
}

static void stx__sru_run(stx_ctx *x, const char *name, stx__sru_kernel kernel,
                         const stx_sru_args *a, const stx__sru &p, int warps, size_t each) {
    size_t blocks = a->B * a->D * p.groups, bytes = (size_t)warps * each;
    static_assert((int)STX__SRU_SHARED <= (int)STX__SHARED_LEAST,
                  "STX__SRU_SHARED exceeds the shared memory of some GPUs");
    STX__RUN_KERNEL(x, name, kernel, (unsigned)blocks, 32 * warps, bytes, p);
}

static int stx__sru_refused(stx_ctx *x, const stx_sru_args *a, const char *what) {
    if (!stx_ok(x) || !a->B || !a->D || !a->H) return 1;
    if ((a->k == 3 || a->k == 4) && a->D <= 2 && (a->H + 31) / 32 * a->D * a->B < (size_t)1 << 31)
        return 0;
    stx_fail(x, STX_ERR_SHAPE,
             "%s: expected k = 3 or 4, D = 1 or 2 and fewer than 2^31 blocks of 32 columns, got "
             "k = %zu, D = %zu and %zu blocks",
             what, a->k, a->D, (a->H + 31) / 32 * a->D * a->B);
    return 1;
}

size_t stx_sru_work_cuda(stx_ctx *x, const stx_sru_args *a, int backward) {
    (void)x;
    return backward ? a->B * 4 * a->D * a->H * sizeof(float) : 0;
}

void stx_sru_fwd_cuda(stx_ctx *x, const stx_sru_args *a) {
    stx__sru p;
    size_t each;
    int warps, plain;
    if (stx__sru_refused(x, a, "stx_sru_fwd")) return;
    p = stx__sru_of(x, a, 0);
    plain = !stx__sru_is_uniform(p);
    each = STX__SRU_SLOT * 4 * (plain || !p.u.half ? sizeof(float) : 2) + 4 * 32 * sizeof(float);
    warps = a->v || a->V ? 1 : stx__sru_warps(a, each);
    stx__sru_run(x, "stx_sru_fwd", stx__sru_fwd_choose(a, plain, p.u.half != 0, warps), a, p,
                 warps > 1 ? warps : 1, warps > 1 ? each : 0);
}

void stx_sru_bwd_cuda(stx_ctx *x, const stx_sru_args *a) {
    stx__sru p;
    stx__sru_kernel kernel;
    size_t each, size, O2 = 2 * a->D * a->H;
    stx_real *to[2];
    int warps, plain, half, inputs;
    if (stx__sru_refused(x, a, "stx_sru_bwd")) return;
    p = stx__sru_of(x, a, 1);
    plain = !stx__sru_is_uniform(p);
    half = p.u.half != 0;
    size = plain || !half ? sizeof(float) : 2;
    inputs = 5 + 2 * (a->V != NULL) + p.add_xr;
    each = stx__sru_bwd_bytes(0, inputs, size) + 4 * 32 * sizeof(float);
    warps = stx__sru_warps(a, each);
    if (warps <= 1) each = stx__sru_bwd_bytes(stx__sru_ahead(0, size), inputs, size);
    kernel = warps > 1 ? stx__sru_bwd_choose<1>(a, plain, half)
                       : stx__sru_bwd_choose<0>(a, plain, half);
    stx__sru_run(x, "stx_sru_bwd", kernel, a, p, warps < 1 ? 1 : warps, each);
    to[0] = a->dv;
    to[1] = a->dbias;
    stx__columns_sum(x, "stx_sru_bwd", to, 2, p.part, 2 * O2, a->B, O2, 0);
}
#endif /* SEQTX_SRU_H */
