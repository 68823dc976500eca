#pragma once
#include "common.cuh"
#include "attention_plain.cuh"


// >>attention: shared definitions

/* Definitions shared by the fused forward and backward kernels. The letters are the
   same as in the oracle's section, plus

       BQ, BK   queries per block; keys per tile
       DP       D padded with zeros to 32, 64, 96 or 128
       strip    16 consecutive queries, the rows of one mma; MT strips per warp in the
                forward kernel
       group    16 consecutive keys of a tile; a block of columns is 8 keys
       CH       pieces of 16 bytes per row of a tile
       NB, ND   blocks of 8 columns in BK and in DP
       KS       steps of the sum over D, of 32 bytes each
       g, t     lane = 4 g + t; a lane holds rows g and g + 8 of an accumulator, and
                columns 2t and 2t + 1 of each block (PTX ISA, "Matrix fragments for mma")

   The window. Query i is at the position of key C + i; its distance to key j is delta =
   C + i - j. Head h sees the keys with

       delta_min <= delta <= visible     visible <= farthest <= span
       first_key <= j < S, not padded    see "Which keys exist" below, also for calls
                                         without causality

   farthest equals stx__attn_farthest of the CPU kernels, computed from z in device
   memory. visible is the largest distance whose ramp weight is not 0. Keys beyond it
   must not enter the running maximum, because far keys may have the largest logits. Up
   to the distance `full`, the weight is exactly 1. Between full and visible it is

       m(delta) = min(1, ((1 - delta) + z_span) / ramp + 1)

   in float and in this order of operations, as on the CPU. With d = j - i, delta = C - d,
   and the row of the position table is p = (P - 1 + delta_min - C) + d, which depends
   only on j - i. Rows outside [0,P) are zeros.

   Dropout. In the random numbers of row (b,h,i), key j has position span + j, and
   persistent vector n has position S + span + n. Philox call row rng_calls + position / 8
   returns 16 bits for each of 8 neighbours; a weight is kept if its bits are below
   `keep`. Tiles of keys therefore begin where span + j is a multiple of 8, so each block
   of 8 columns takes one call. */

/* The cached rows of one group, see stx_attention_kv. Row 0 is key `first`. */
typedef struct stx__attn_cached {
    const void *k, *v;
    size_t row_stride, batch_stride;
    int first;
} stx__attn_cached;

typedef struct stx__attn_params {
    const void *q;            /* (B,T,H D); operands are bfloat16 or float */
    const void *k, *v;        /* (B,S,H D), starting at key cached_rows */
    const void *pe;           /* (P,D) or (P,H D) */
    const void *pk, *pv;      /* (H,N,D) */
    void *y;                  /* (B,T,H D) */
    float *row_max, *inv_sum; /* (B,H,T) */
    stx__array u, vb, z;        /* u and vb are (H D), z is (H) */
    size_t q_row_stride, kv_row_stride, q_batch_stride, kv_batch_stride; /* in elements */
    uint64_t rng_calls; /* Philox calls per row, for dropout */
    uint64_t seed, stream, rng_first;
    const uint64_t *shift;
    int B, T, S, H, D, P, N, C;
    int pe_row_stride, pe_head_stride; /* in elements; head stride 0: shared table */
    int span, delta_min;
    int first_key; /* the first key that exists */
    uint32_t keep; /* 65536 times the keep probability; 0: no dropout */
    float scale, max_span, ramp;
    float ramp_steps;               /* from stx__attn_ramp_steps */
    float inv_keep;                 /* 65536 / keep, or 1 */
    const uint32_t *key_mask;       /* see "Which keys exist"; NULL if all keys of the
                                       window exist */
    int key_mask_stride;            /* stride between batch rows, in words */
    int cached_rows, cached_groups; /* see "Where keys are stored" */
    stx__attn_cached cached[STX_HEAD_GROUPS];
    uint16_t head_place[256];       /* 4 times the index of a head in its group, plus the group;
                                       packed because registers are scarce */
} stx__attn_params;

/* Returns the address from which the kernels read an operand: bfloat16 activations, the
   bfloat16 copy of a parameter, or floats. Clears *ok if the operand is stored in
   another form, or if its rows are not aligned to 16 bytes. */
static const void *stx__attn_operand(const stx_ctx *x, const void *p, int half, size_t ld,
                                     int *ok) {
    stx__array v;
    const void *r = p;
    if (!p) return NULL;
    v = stx__array_of(x, p);
    if (half && !v.half) r = v.twin;
    if (!r || (!half && v.half) || (uintptr_t)r % 16 || ld % (half ? 8 : 4)) *ok = 0;
    return r;
}

/* Returns nonzero if the fused kernels support the options and sizes of the call. */
static int stx__attn_sizes_fit(const stx_attention_args *a) {
    const size_t big = (size_t)1 << 30;
    if (a->eps > 0 || (a->span_fraction && (a->no_renorm || a->span_shared))) return 0;
    if (a->first_key < 0 || !(a->scale > 0)) return 0;
    if (a->D < 8 || a->D > 128 || a->D % 8 || !a->B || !a->T || !a->H || a->H > 256) return 0;
    if (a->B >= big || a->T >= big || a->S >= big || a->P >= big || a->N >= big) return 0;
    if (a->span >= big || a->S + a->span + a->N >= big) return 0;
    if (a->not_causal) return !a->span_fraction && !a->P && a->S && a->span >= a->S;
    return a->T <= a->S;
}

/* Sets the operands of a call. Returns 1, or 0 if the kernels cannot read one of the
   operands. */
static int stx__attn_operands(const stx_ctx *x, const stx_attention_args *a, stx__attn_params *p,
                              int half) {
    int ok = 1;
    p->q = stx__attn_operand(x, a->q, half, a->q_row_stride, &ok);
    p->k = stx__attn_operand(x, a->k, half, a->kv_row_stride, &ok);
    p->v = stx__attn_operand(x, a->v, half, a->kv_row_stride, &ok);
    p->y = (void *)(uintptr_t)stx__attn_operand(x, a->y, half, a->D, &ok);
    if (a->P) p->pe = stx__attn_operand(x, a->pe, half, a->D, &ok);
    if (a->N) {
        p->pk = stx__attn_operand(x, a->persistent_k, half, a->D, &ok);
        p->pv = stx__attn_operand(x, a->persistent_v, half, a->D, &ok);
    }
    for (size_t i = 0; i < a->groups; i++) {
        const stx_attention_kv *o = &a->cached[i];
        p->cached[i].k = stx__attn_operand(x, o->k, half, o->row_stride, &ok);
        p->cached[i].v = stx__attn_operand(x, o->v, half, o->row_stride, &ok);
        p->cached[i].row_stride = o->row_stride;
        p->cached[i].batch_stride = o->batch_stride;
        p->cached[i].first = (int)(a->cached_rows - o->rows);
        if (o->batch_stride % 8) return 0;
    }
    if (a->q_batch_stride % 8 || a->kv_batch_stride % 8) return 0;
    return ok && (!half || stx__array_of(x, a->y).half);
}

static void stx__attn_set_dropout(const stx_ctx *x, const stx_attention_args *a,
                                  stx__attn_params *p) {
    double k = floor((1.0 - (double)a->drop) * 65536.0 + 0.5); /* same as stx__keep16 */
    p->inv_keep = 1;
    if (!(a->drop > 0)) return;
    p->keep = (uint32_t)(k < 1 ? 1 : k);
    p->inv_keep = (float)(65536.0 / p->keep);
    p->rng_calls = ((uint64_t)a->S + a->span + a->N) / 8 + 2;
    p->seed = a->seed;
    p->stream = a->stream;
    p->rng_first = a->rng_first;
    p->shift = stx__gpu(x)->shift;
}

/* Sets the kernel parameters of a call. Returns 1, or 0 if the fused kernels do not
   support the call. */
static int stx__attn_params_of(const stx_ctx *x, const stx_attention_args *a, stx__attn_params *p,
                               int *half) {
    memset(p, 0, sizeof *p);
    *half = stx__gpu(x)->half && stx__array_of(x, a->q).half;
    if (!stx__attn_sizes_fit(a) || !stx__attn_operands(x, a, p, *half)) return 0;
    p->cached_rows = (int)a->cached_rows;
    p->cached_groups = (int)a->groups;
    for (size_t h = 0; h < a->H; h++)
        p->head_place[h] = (uint16_t)(4 * a->head_index[h] + a->head_group[h]);
    p->row_max = (float *)a->row_max;
    p->inv_sum = (float *)a->inv_sum;
    p->u = stx__array_of(x, a->content_bias);
    p->vb = stx__array_of(x, a->P ? a->position_bias : NULL);
    p->z = stx__array_of(x, a->span_fraction);
    p->q_row_stride = a->q_row_stride;
    p->kv_row_stride = a->kv_row_stride;
    p->q_batch_stride = a->q_batch_stride;
    p->kv_batch_stride = a->kv_batch_stride;
    p->B = (int)a->B;
    p->T = (int)a->T;
    p->S = (int)a->S;
    p->H = (int)a->H;
    p->D = (int)a->D;
    p->P = (int)a->P;
    p->N = (int)a->N;
    p->C = p->S - p->T;
    p->pe_row_stride = a->P ? (int)((size_t)a->pe_heads * a->D) : 0;
    p->pe_head_stride = a->P && a->pe_heads > 1 ? (int)a->D : 0;
    p->span = (int)a->span;
    p->delta_min = a->not_causal ? 1 - p->T : a->delta_min;
    p->first_key = a->first_key > (ptrdiff_t)a->S ? p->S : (int)a->first_key;
    p->scale = a->scale;
    p->max_span = a->max_span;
    p->ramp = a->ramp;
    p->ramp_steps = stx__attn_ramp_steps(a);
    stx__attn_set_dropout(x, a, p);
    return 1;
}

#define STX__LOG2E 1.44269504f

/* The largest distances of a head, see "The window". z_span = z max_span. */
typedef struct stx__attn_window {
    int farthest, visible, full;
    float z_span;
} stx__attn_window;

/* Returns the ramp weight at the distance delta, before clamping. */
static __device__ __forceinline__ float stx__attn_ramp(const stx__attn_params &p,
                                                       const stx__attn_window &w, int delta) {
    return __fadd_rn(__fdiv_rn(__fadd_rn((float)(1 - delta), w.z_span), p.ramp), 1.0f);
}

/* Returns the largest distance with weight 1, or -1 if there is none or f is NaN. For
   delta <= f = floor(z_span) + 1, (1 - delta) + z_span >= 0, so the weight is 1. */
static __device__ __forceinline__ int stx__attn_full_weight(float f, int visible) {
    if (f >= (float)visible) return visible;
    return f >= 0 ? (int)f : -1;
}

/* Computes the window of head h from z in device memory. */
static __device__ __forceinline__ stx__attn_window stx__attn_window_of(const stx__attn_params &p,
                                                                       int h) {
    stx__attn_window w;
    w.farthest = w.visible = w.full = p.span;
    w.z_span = 0;
    if (p.z.p) {
        float z = stx__get(p.z, (size_t)h);
        double e;
        w.z_span = __fmul_rn(z, p.max_span);
        e = stx__attn_span_farthest(z, p.max_span, p.ramp_steps);
        w.farthest = w.visible = e < (double)p.span ? (int)e : p.span;
        /* takes one or two iterations, because farthest is only slightly larger than
           the result */
        while (w.visible >= p.delta_min && stx__attn_ramp(p, w, w.visible) <= 0) w.visible--;
        w.full = stx__attn_full_weight(floorf(w.z_span) + 1, w.visible);
    }
    return w;
}

/* Computes the range of keys [first,last) that queries i0 .. i0+n-1 may see. The range
   is empty if last <= first. `first` is aligned to a block of 8 random numbers, so it
   may be up to 7 less than first_key, and negative. */
static __device__ __forceinline__ void stx__attn_key_range(const stx__attn_params &p,
                                                           const stx__attn_window &w, int i0, int n,
                                                           int *first, int *last) {
    int f = max(p.first_key, p.C + i0 - w.visible);
    *last = p.C + min(i0 + n, p.T) - p.delta_min;
    *first = *last > f ? ((f + p.span) & ~7) - p.span : *last;
}

/* How spans skip keys. A block processes only the tiles of stx__attn_key_range. If an
   end of the window, first_key or the end of the persistent vectors is inside a tile, a
   strip of 16 queries i .. i+15 processes only its band. The band is the range lo ..
   hi-1 of groups of 16 keys. It covers all keys that some query of the strip, including
   queries beyond T, sees at a distance of at most max_delta. The weights in all other
   groups would be 0. A warp skips a tile if none of its rows sees a key of the tile. */
typedef struct stx__attn_band {
    int lo, hi;
} stx__attn_band;

template <int BK>
static __device__ __forceinline__ stx__attn_band stx__attn_band_of(const stx__attn_params &p,
                                                                   int persistent, int max_delta,
                                                                   int i, int j0) {
    stx__attn_band b = {0, 0};
    if (i >= p.T) return b;
    if (persistent) {
        b.hi = (min(BK, p.N - j0) + 15) >> 4;
        return b;
    }
    b.lo = max(max(p.C + i - max_delta, p.first_key) - j0, 0) >> 4;
    b.hi = (min(min(p.C + i + 16 - p.delta_min, p.S) - j0, BK) + 15) >> 4;
    if (b.hi < b.lo) b.hi = b.lo;
    return b;
}

/* Returns the random bits for the 8 keys at positions `at` .. `at`+7 of row (b * H + h) *
   T + i. Component t holds the bits for columns 2t (low half) and 2t + 1 (high half). */
static __device__ __forceinline__ uint4 stx__attn_random8(const stx__attn_params &p,
                                                          uint64_t stream, uint64_t row, int at) {
    return stx__philox(p.seed, stream, p.rng_first + row * p.rng_calls + (uint64_t)(at >> 3));
}

/* The work list contains all pairs (head, query tile), sorted by decreasing number of
   key tiles, then by head and tile. The GPU starts blocks in order, so the longest ones
   start first and short ones fill the gaps at the end. The lengths depend on z, so a
   kernel creates the list in every step.

   Within a head, a later tile never has fewer key tiles, because only the windows of
   early tiles can begin before the first key. One thread per entry can therefore
   compute its rank: in each head, a binary search counts the entries that precede it.
   This needs no sort and no atomics. The list has no entries per batch row, because
   batch rows differ only in padded keys, which the list ignores. */
static __device__ __forceinline__ int stx__attn_key_tiles(const stx__attn_params &p,
                                                          const stx__attn_window &w, int tile,
                                                          int bq, int bk) {
    /* counts a partial last tile as a whole one, so that it never has fewer key tiles
       than the tile before it */
    int last = p.C + (tile + 1) * bq - p.delta_min;
    return (max(last - max(p.first_key, p.C + tile * bq - w.visible), 0) + bk - 1) / bk;
}

/* The columns of a head's rows of dR (see "Rows of dR" in the backward section). `at`
   is the position of the first one among the columns of all heads. `width` is the
   number of columns, or 0 if the rows are not stored. The kernel that creates the list
   assigns columns to the narrowest heads first, while there is capacity. */
typedef struct stx__attn_dr_slot {
    int at, width;
} stx__attn_dr_slot;

/* Returns the number of columns of dR that a head requires, a multiple of 16. */
static __device__ __forceinline__ int stx__attn_dr_width(const stx__attn_params &p,
                                                         const stx__attn_window &w, int newest) {
    return w.visible < p.delta_min ? 0 : (w.visible - (p.C - newest) + 15) & ~15;
}

/* Writes the work list, with `tiles` tiles per head. Unless `place` is NULL, also
   assigns `columns` columns of dR to the heads. `head` is shared memory for the
   windows of all heads. */
static __device__ __forceinline__ void stx__attn_make_list(const stx__attn_params &p,
                                                           uint32_t *list, int tiles, int bq,
                                                           int bk, stx__attn_dr_slot *place,
                                                           int newest, int columns,
                                                           stx__attn_window *head) {
    int h, e;
    for (h = (int)threadIdx.x; h < p.H; h += (int)blockDim.x) head[h] = stx__attn_window_of(p, h);
    __syncthreads();
    for (h = (int)threadIdx.x; place && !blockIdx.x && h < p.H; h += (int)blockDim.x) {
        const int width = stx__attn_dr_width(p, head[h], newest);
        int64_t at = 0;
        for (e = 0; e < p.H; e++) {
            const int other = stx__attn_dr_width(p, head[e], newest);
            if (other < width || (other == width && e < h)) at += other;
        }
        place[h].at = at + width <= columns ? (int)at : 0;
        place[h].width = at + width <= columns ? width : 0;
    }
    e = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (e < p.H * tiles) {
        int mine = e / tiles, tile = e % tiles,
            n = stx__attn_key_tiles(p, head[mine], tile, bq, bk), rank = 0;
        for (h = 0; h < p.H; h++) {
            /* binary search for the first tile of head h that precedes this entry */
            int a = 0, b = tiles;
            while (a < b) {
                int m = (a + b) / 2, len = stx__attn_key_tiles(p, head[h], m, bq, bk);
                if (len > n || (len == n && (h < mine || (h == mine && m > tile))))
                    b = m;
                else
                    a = m + 1;
            }
            rank += tiles - a;
        }
        list[rank] = (uint32_t)e;
    }
}

/* Creates the work list, with one thread per entry. Blocks are small, so that even a
   short list is distributed over the GPU. */
STX__GLOBAL(128)
stx__attn_list_kernel(stx__attn_params p, uint32_t *list, int tiles, int bq, int bk) {
    STX__SHARED(stx__attn_window, head, 256);
    stx__attn_make_list(p, list, tiles, bq, bk, (stx__attn_dr_slot *)NULL, 0, 0, head);
}

/* Tiles in shared memory. Rows are padded with zeros to DP = 32, 64, 96 or 128 elements
   and consist of CH pieces of 16 bytes. Piece c of row r is stored at position c ^ r
   (modulo 8):

       row 0   0 1 2 3 4 5 6 7
       row 1   1 0 3 2 5 4 7 6        stored order of pieces, CH = 8
       row 2   2 3 0 1 6 7 4 5

   ldmatrix reads piece c of 8 rows. In this order they are in 8 different groups of 4
   banks, and so are the 4 x 8 floats of a transposed fragment. Rows of 64 bytes share a
   line of 128 bytes in pairs, and every second row of 192 bytes begins in the middle of a
   line. For both sizes, r / 2 is used instead of r, which has the same effect. */
template <int CH> static __device__ __forceinline__ unsigned stx__attn_swizzle(int r, int c) {
    return (unsigned)(r * CH + (CH % 8 ? c ^ ((r >> 1) & 3) : c ^ (r & 7))) * 16;
}

/* Returns the number of threads that a row of `pieces` pieces is distributed over. A row
   of 12 pieces has 16 threads, 4 of which are idle. */
static constexpr __host__ __device__ int stx__attn_across(int pieces) {
    return pieces & (pieces - 1) ? 16 : pieces;
}

/* Starts copies of rows r0 .. r0+n-1 of the array whose row 0 is at `from`, into a
   tile. Rows outside [lo,hi) are set to zeros. All threads of the block must call this
   function; the data is visible after the next stx__cp_wait and barrier. `ld` is the
   row stride in bytes, and `bytes` is the row size, a multiple of 16 bytes. */
template <int CH, int THREADS>
static __device__ __forceinline__ void stx__attn_load(unsigned char *tile, int n, const void *from,
                                                      size_t ld, int bytes, int r0, int lo,
                                                      int hi) {
    enum { ACROSS = stx__attn_across(CH), ROWS = THREADS / ACROSS };

    int r = (int)threadIdx.x / ACROSS, c = (int)threadIdx.x % ACROSS, k;
    /* the row stride is multiplied only once; the loop adds to the address */
    const char *p = (const char *)from + (ptrdiff_t)(r0 + r) * (ptrdiff_t)ld + c * 16;
#pragma unroll
    for (k = 0; k < n; k += ROWS) {
        int yes = r0 + r + k >= lo && r0 + r + k < hi && c * 16 < bytes;
        if ((n % ROWS == 0 || r + k < n) && (ACROSS == CH || c < CH))
            stx__cp16(tile + stx__attn_swizzle<CH>(r + k, c), yes ? p : (const char *)from,
                      yes ? 16 : 0);
        p += ROWS * ld;
    }
}

/* Where keys are stored. Key cached_rows and later keys belong to the current block and
   are in k and v. Earlier keys are in the memory of the head's group, (B,rows,..). This
   memory holds only keys `first` and later, because the heads of the group see no older
   ones. A tile may contain keys from both places.

   Returns 4 times the index of head h in its group, plus the group. */
static __device__ __forceinline__ int stx__attn_head_place(const stx__attn_params &p, int h) {
    return p.cached_groups > 1 ? p.head_place[h] : 4 * h;
}

/* Returns the address of a row of keys or values, in the current block or in the cached
   rows. If the row does not exist, returns a valid address that will not be read. */
static __device__ __forceinline__ const char *stx__attn_kv_row(const char *block,
                                                               const char *cached, size_t from,
                                                               int exists, int is_cached) {
    if (!exists) return block;
    return (is_cached ? cached : block) + from;
}

/* Starts copies of keys j0 .. j0+n-1 of head h and batch row b, and of their values, like
   stx__attn_load. */
template <int CH, int THREADS, int SIZE>
static __device__ __forceinline__ void stx__attn_load_kv(const stx__attn_params &p,
                                                         unsigned char *kt, unsigned char *vt,
                                                         int n, int b, int h, int j0) {
    const int bytes = p.D * SIZE;
    const size_t at = ((size_t)b * p.kv_batch_stride + (size_t)h * p.D) * SIZE,
                 ld = p.kv_row_stride * SIZE;
    const char *k = (const char *)p.k + at, *v = (const char *)p.v + at;
    if (j0 >= p.cached_rows || !p.cached_rows) {
        stx__attn_load<CH, THREADS>(kt, n, k, ld, bytes, j0 - p.cached_rows,
                                    p.first_key - p.cached_rows, p.S - p.cached_rows);
        stx__attn_load<CH, THREADS>(vt, n, v, ld, bytes, j0 - p.cached_rows,
                                    p.first_key - p.cached_rows, p.S - p.cached_rows);
        return;
    }
    const int place = stx__attn_head_place(p, h);
    const stx__attn_cached &o = p.cached[place & 3];
    const size_t ato = ((size_t)b * o.batch_stride + (size_t)(place >> 2) * p.D) * SIZE,
                 ldo = o.row_stride * SIZE;
    const char *ko = (const char *)o.k + ato, *vo = (const char *)o.v + ato;
    if (j0 + n <= p.cached_rows) {
        stx__attn_load<CH, THREADS>(kt, n, ko, ldo, bytes, j0 - o.first,
                                    max(p.first_key - o.first, 0), p.cached_rows - o.first);
        stx__attn_load<CH, THREADS>(vt, n, vo, ldo, bytes, j0 - o.first,
                                    max(p.first_key - o.first, 0), p.cached_rows - o.first);
        return;
    }
#pragma unroll 1
    for (int e = (int)threadIdx.x; e < n * CH; e += THREADS) {
        const int r = e / CH, c = e % CH, j = j0 + r, old = j < p.cached_rows,
                  row = j - (old ? o.first : p.cached_rows),
                  yes = j >= p.first_key && j < p.S && row >= 0 && c * 16 < bytes;
        const size_t from = (size_t)(yes ? row : 0) * (old ? ldo : ld) + (size_t)c * 16;
        stx__cp16(kt + stx__attn_swizzle<CH>(r, c), stx__attn_kv_row(k, ko, from, yes, old),
                  yes ? 16 : 0);
        stx__cp16(vt + stx__attn_swizzle<CH>(r, c), stx__attn_kv_row(v, vo, from, yes, old),
                  yes ? 16 : 0);
    }
}

/* Overwrites the rows of keys that do not exist with zeros. Must be called after the
   copies have arrived and before a barrier. */
template <int CH, int THREADS, int BK>
static __device__ __forceinline__ void stx__attn_zero_missing(unsigned char *tile, uint64_t seen) {
#pragma unroll 1
    for (int e = (int)threadIdx.x; e < BK * CH; e += THREADS)
        if (!(seen >> (e / CH) & 1))
            *(uint4 *)(tile + stx__attn_swizzle<CH>(e / CH, e % CH)) = make_uint4(0, 0, 0, 0);
}

/* Sets the accumulator elements of keys that do not exist to v. Element e of block n is
   column 8n + 2t + (e & 1). */
template <int NB>
static __device__ __forceinline__ void stx__attn_set_missing(float (&x)[NB][4], uint64_t seen,
                                                             int t, float v) {
    uint32_t lo = (uint32_t)(seen >> 2 * t), hi = (uint32_t)(seen >> 2 * t >> 32);
    int n;
#pragma unroll
    for (n = 0; n < NB; n++) {
        const uint32_t w = n < 4 ? lo : hi;
        if (!(w >> 8 * (n & 3) & 1)) x[n][0] = x[n][2] = v;
        if (!(w >> (8 * (n & 3) + 1) & 1)) x[n][1] = x[n][3] = v;
    }
}

/* Fragments. In either precision, one step of the sum covers 32 bytes of a row: 16
   bfloat16 or 8 tf32 elements. ldmatrix moves units of 4 bytes, so it can load either
   precision.

       frag_a    rows r0 .. r0+15 (r0 % 8 == 0) as the left factor, step k
       frag_b    the same rows, transposed, as two right factors of 8 columns each:
                 b[0..1] for rows r0 .. r0+7, b[2..3] for the next 8 rows
       frag_b2   rows r0 .. r0+7 as a right factor, steps k (b[0..1]) and k + 1 (b[2..3])
       frag_v    rows r0 .. r0+15 as the index of the sum, 16 columns from 8c as two right
                 factors of 8 columns each; bfloat16 only, because ldmatrix transposes
                 units of 2 bytes */
template <int CH>
static __device__ __forceinline__ void stx__attn_frag_a(uint32_t (&a)[4], const unsigned char *tile,
                                                        int r0, int k,
                                                        int lane = (int)threadIdx.x & 31) {
    stx__ldmatrix_x4(a, tile + stx__attn_swizzle<CH>(r0 + (lane & 15), 2 * k + (lane >> 4)));
}

template <int CH>
static __device__ __forceinline__ void stx__attn_frag_b(uint32_t (&b)[4], const unsigned char *tile,
                                                        int r0, int k,
                                                        int lane = (int)threadIdx.x & 31) {
    stx__ldmatrix_x4(b, tile
                            + stx__attn_swizzle<CH>(r0 + (lane & 7) + (lane >> 4) * 8,
                                                    2 * k + ((lane >> 3) & 1)));
}

template <int CH>
static __device__ __forceinline__ void stx__attn_frag_b2(uint32_t (&b)[4],
                                                         const unsigned char *tile, int r0, int k,
                                                         int lane = (int)threadIdx.x & 31) {
    stx__ldmatrix_x4(b, tile + stx__attn_swizzle<CH>(r0 + (lane & 7), 2 * k + (lane >> 3)));
}

template <int CH>
static __device__ __forceinline__ void stx__attn_frag_v(uint32_t (&b)[4], const unsigned char *tile,
                                                        int r0, int c,
                                                        int lane = (int)threadIdx.x & 31) {
    stx__ldmatrix_x4_trans(b, tile + stx__attn_swizzle<CH>(r0 + (lane & 15), c + (lane >> 4)));
}

/* Precisions. Each is a struct that is a template argument of the kernels.

       element   type of the operands in memory, SIZE bytes long
       mma       c (16,8) += a (16,32 bytes) b
       mma2      c += a b[0..1], d += a b[2..3]
       add       like mma, but accurate for sums over thousands of keys or queries
       K         elements per step of the sum
       masked, MASKED_SIZES
                 Support for a mask makes the query sweep spill more registers. For the
                 padded head sizes in MASKED_SIZES (one bit each) the kernel is compiled
                 a second time for masks, in precision `masked`.
       QUERY_BLOCKS_32, KEY_BLOCKS_32
                 number of blocks of the query and key sweeps that must fit on a
                 multiprocessor if D <= 32; 0: nvcc chooses the number of registers

   bf16: operands are bfloat16, sums are float. f32: each operand is split into two tf32
   parts, x = hi + lo with an error below 2^-22 x. Three products (hi hi, hi lo, lo hi)
   give nearly float accuracy. tf32: uses only the high parts. */
struct stx__attn_bf16 {
    typedef stx__bf16 element;
    typedef stx__attn_bf16 masked;

    enum { SIZE = 2, K = 16, MASKED_SIZES = 0, QUERY_BLOCKS_32 = 3, KEY_BLOCKS_32 = 2 };

    static __device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                               uint32_t b1) {
        uint32_t b[2] = {b0, b1};
        stx__mma_bf16(c, a, b);
    }

    static __device__ __forceinline__ void mma2(float (&c)[4], float (&d)[4],
                                                const uint32_t (&a)[4], const uint32_t (&b)[4]) {
        stx__mma_bf16_2(c, d, a, b);
    }

    static __device__ __forceinline__ void add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                               uint32_t b1) {
        mma(c, a, b0, b1);
    }
};

/* Rounds to the nearest tf32. A NaN must stay a NaN: CUDA's NaN is 0x7fffffff, which
   would otherwise be rounded up to -0. */
#ifdef CUDA_HOST
static inline uint32_t stx__attn_tf32_hi(uint32_t v) {
    return ((v & 0x7fffffffu) < 0x7f800000u ? v + 0x1000u : v) & 0xffffe000u;
}
#else
static __device__ __forceinline__ uint32_t stx__attn_tf32_hi(uint32_t v) {
    uint32_t r;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r) : "f"(__uint_as_float(v)));
    return r;
}
#endif
static __device__ __forceinline__ uint32_t stx__attn_tf32_lo(uint32_t v, uint32_t hi) {
    return stx__attn_tf32_hi(__float_as_uint(__uint_as_float(v) - __uint_as_float(hi)));
}

struct stx__attn_f32;

struct stx__attn_tf32 {
    typedef float element;
    /* masked calls use f32, which is slower but more accurate and is compiled anyway */
    typedef stx__attn_f32 masked;

    enum { SIZE = 4, K = 8, MASKED_SIZES = 128 + 32, QUERY_BLOCKS_32 = 4, KEY_BLOCKS_32 = 3 };

    static __device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                               uint32_t b1) {
        uint32_t h[4] = {stx__attn_tf32_hi(a[0]), stx__attn_tf32_hi(a[1]), stx__attn_tf32_hi(a[2]),
                         stx__attn_tf32_hi(a[3])},
                 b[2] = {stx__attn_tf32_hi(b0), stx__attn_tf32_hi(b1)};
        stx__mma_tf32(c, h, b);
    }

    static __device__ __forceinline__ void mma2(float (&c)[4], float (&d)[4],
                                                const uint32_t (&a)[4], const uint32_t (&b)[4]) {
        mma(c, a, b[0], b[1]);
        mma(d, a, b[2], b[3]);
    }

    static __device__ __forceinline__ void add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                               uint32_t b1) {
        mma(c, a, b0, b1);
    }
};

struct stx__attn_f32 {
    typedef float element;
    typedef stx__attn_f32 masked;

    enum { SIZE = 4, K = 8, MASKED_SIZES = 0, QUERY_BLOCKS_32 = 0, KEY_BLOCKS_32 = 3 };

    static __device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                               uint32_t b1) {
        uint32_t h[4] = {stx__attn_tf32_hi(a[0]), stx__attn_tf32_hi(a[1]), stx__attn_tf32_hi(a[2]),
                         stx__attn_tf32_hi(a[3])},
                 b[2] = {stx__attn_tf32_hi(b0), stx__attn_tf32_hi(b1)};
        uint32_t l[4] = {stx__attn_tf32_lo(a[0], h[0]), stx__attn_tf32_lo(a[1], h[1]),
                         stx__attn_tf32_lo(a[2], h[2]), stx__attn_tf32_lo(a[3], h[3])};
        uint32_t m[2] = {stx__attn_tf32_lo(b0, b[0]), stx__attn_tf32_lo(b1, b[1])};
        stx__mma_tf32_3(c, l, h, m, b);
    }

    static __device__ __forceinline__ void mma2(float (&c)[4], float (&d)[4],
                                                const uint32_t (&a)[4], const uint32_t (&b)[4]) {
        mma(c, a, b[0], b[1]);
        mma(d, a, b[2], b[3]);
    }

    /* Tensor cores truncate when they add to c. In a long sum of terms with the same
       sign, the error reaches one part in 10^4. Therefore each product is computed
       separately and added as a float. */
    static __device__ __forceinline__ void add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                               uint32_t b1) {
        float d[4] = {0, 0, 0, 0};
        mma(d, a, b0, b1);
        c[0] += d[0];
        c[1] += d[1];
        c[2] += d[2];
        c[3] += d[3];
    }
};

/* Conversions between stored elements and floats; store2 stores two adjacent elements. */
static __device__ __forceinline__ float stx__attn_to_float(stx__bf16 v) {
    return __bfloat162float(v);
}

static __device__ __forceinline__ float stx__attn_to_float(float v) {
    return v;
}

static __device__ __forceinline__ void stx__attn_store2(stx__bf16 *p, float a, float b) {
    *(uint32_t *)p = stx__pair(a, b);
}

static __device__ __forceinline__ void stx__attn_store2(float *p, float a, float b) {
    *(float2 *)p = make_float2(a, b);
}

/* Returns two bfloat16 plus a and b. */
static __device__ __forceinline__ uint32_t stx__attn_add2(uint32_t v, float a, float b) {
    return stx__pair(__uint_as_float(v << 16) + a, __uint_as_float(v & 0xffff0000u) + b);
}

/* These functions return a piece of 16 bytes, 8 bfloat16 or 4 floats, plus a bias. */
static __device__ __forceinline__ uint4 stx__attn_add_bias(const uint4 &v, const float (&b)[8]) {
    return make_uint4(stx__attn_add2(v.x, b[0], b[1]), stx__attn_add2(v.y, b[2], b[3]),
                      stx__attn_add2(v.z, b[4], b[5]), stx__attn_add2(v.w, b[6], b[7]));
}

static __device__ __forceinline__ uint4 stx__attn_add_bias(const uint4 &v, const float (&b)[4]) {
    return make_uint4(__float_as_uint(__uint_as_float(v.x) + b[0]),
                      __float_as_uint(__uint_as_float(v.y) + b[1]),
                      __float_as_uint(__uint_as_float(v.z) + b[2]),
                      __float_as_uint(__uint_as_float(v.w) + b[3]));
}

/* The skew, in registers. R = Q PE^T contains the score of query row r with table row c.
   In S this score belongs to the key in column c + r, for rows r = 0 .. 15 of a strip:

       R  c:  0 1 2 3 4 ..           S  column:  0 1 2 3 4 ..
       r = 0  a b c d e              r = 0       a b c d e
       r = 1  f g h i j              r = 1         f g h i
       r = 2  k l m n o              r = 2           k l m

   A lane (g,t) of a fragment holds columns 8n + 2t and 8n + 2t + 1 of rows g and g + 8.
   For its elements e = 0, 1 of S it requires these columns of R:

       row g:      8n + 2t + e - g, which is in block n or n - 1 of the same row, and
                   hence in one of the 4 lanes with the same g
       row g + 8:  8(n - 1) + 2t + e - g, which is the column above for n - 1

   The source is lane (t - k) mod 4 with k = floor((g + 1 - e) / 2), because
   2t + e - g = 2(t - k) + e' with e' = e ^ (g & 1). The lane needs element e' of block
   n if t >= k, and of block n - 1 otherwise. For each e, each lane is the source of
   exactly one lane, so the source can select the right block. The skew thus takes one
   shuffle per element and no shared memory, rounding or barrier. Two blocks of 8
   columns are carried from one key tile to the next.

   stx__attn_skew_block takes block n of R and returns block n of S in s. */
struct stx__attn_skew {
    /* `lo` and `hi` hold the previous block of rows g and g + 8, in the order of e.
       `next` is the part of row g + 8 that belongs to the next block of S */
    float lo[2], hi[2], next[2];
};

struct stx__attn_skew_lanes {
    int from[2], odd, now[2];
};

static __device__ __forceinline__ stx__attn_skew_lanes
stx__attn_skew_lanes_of(int lane = (int)threadIdx.x & 31) {
    stx__attn_skew_lanes l;
    int g = lane >> 2, t = lane & 3, e;
    l.odd = g & 1;
    for (e = 0; e < 2; e++) {
        int k = (g + 1 - e) >> 1;
        l.from[e] = (t - k) & 3;
        /* lane t + k reads the current block of this lane. If there is no such lane,
           lane t + k - 4 reads the previous block instead */
        l.now[e] = t + k < 4;
    }
    return l;
}

static __device__ __forceinline__ void stx__attn_skew_block(stx__attn_skew &w,
                                                            const stx__attn_skew_lanes &l,
                                                            const float (&r)[4], float (&s)[4]) {
    int e;
    for (e = 0; e < 2; e++) {
        float lo = l.odd ? r[1 - e] : r[e], hi = l.odd ? r[3 - e] : r[2 + e];
        s[e] = __shfl_sync(STX__ALL, l.now[e] ? lo : w.lo[e], l.from[e], 4);
        s[2 + e] = w.next[e];
        w.next[e] = __shfl_sync(STX__ALL, l.now[e] ? hi : w.hi[e], l.from[e], 4);
        w.lo[e] = lo;
        w.hi[e] = hi;
    }
}
