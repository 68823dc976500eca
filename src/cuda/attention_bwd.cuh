#pragma once
#include "common.cuh"
#include "wait.cuh"
#include "sums.cuh"
#include "attention_plain_calls.cuh"
#include "attention_common.cuh"
#include "attention_fwd_tiles.cuh"
#include "attention_bwd_common.cuh"
#include "attention_bwd_queries.cuh"
#include "attention_bwd_keys.cuh"
#include "attention_bwd_diagonals.cuh"


// >>attention: backward plan

/* Adds the partial sums of all gradients in one launch. A block of 8 warps sums 32
   elements: warp s adds partial sums s, s + 8, .., then the results of the eight warps
   are added in order.

       job    to[i] += f times the sum over k of part[k n + i], i < n
       dpe    the first dr_blocks blocks add the results of stx__attn_bwd_table. Columns
              are counted from the newest: the first `extra` belong to no table row, the
              next one belongs to row P - 1 */
enum { STX__ATTN_BWD_FOLDS = 5 }; /* du, dvb, dz, dpk, dpv */

typedef struct stx__attn_bwd_fold_job {
    stx__array to;
    const float *part;
    size_t n, parts;
    float f;
    unsigned blocks;
} stx__attn_bwd_fold_job;

typedef struct stx__attn_bwd_folds {
    stx__attn_bwd_fold_job one[STX__ATTN_BWD_FOLDS];
    int count;
    unsigned dr_blocks; /* number of blocks that compute dpe; may be 0 */
    stx__array dpe;
    const float *part;
    const int *used;
    int P, tables, D, columns, extra, blocks, splits;
} stx__attn_bwd_folds;

/* Adds the sums of the eight warps. The result is valid in the first warp. */
static __device__ __forceinline__ float stx__attn_bwd_fold_slices(float *sum, float x) {
    const int lane = (int)threadIdx.x & 31, slice = (int)threadIdx.x / 32;
    sum[threadIdx.x] = x;
    __syncthreads();
    if (!slice)
        for (int s = 1; s < 8; s++) x += sum[s * 32 + lane];
    return x;
}

STX__GLOBAL(256) stx__attn_bwd_fold(stx__attn_bwd_folds a) {
    STX__SHARED(float, sum, 256);
    const int lane = (int)threadIdx.x & 31, slice = (int)threadIdx.x / 32;
    unsigned block = blockIdx.x;
    size_t i, k;
    float x = 0;
    if (block < a.dr_blocks) {
        const size_t row = (size_t)a.tables * a.D;
        i = (size_t)block * 32 + lane;
        const int v = a.P - 1 - (int)(i / row) + a.extra, n = v / a.columns,
                  column = a.columns - 1 - v % a.columns;
        const int some = i < (size_t)a.P * row && n < a.blocks;
        if (some)
            for (int s = slice; s < a.splits; s += 8) {
                k = ((size_t)n * a.tables + i / a.D % a.tables) * a.splits + s;
                if (a.used[k]) x += a.part[(k * a.columns + column) * a.D + i % a.D];
            }
        x = stx__attn_bwd_fold_slices(sum, x);
        if (!slice && some && x != 0) stx__add(a.dpe, i, x, 1);
        return;
    }
    block -= a.dr_blocks;
    for (int j = 0; j < a.count; block -= a.one[j++].blocks) {
        const stx__attn_bwd_fold_job &o = a.one[j];
        if (block >= o.blocks) continue;
        i = (size_t)block * 32 + lane;
        if (i < o.n)
            for (k = slice; k < o.parts; k += 8) x += o.part[k * o.n + i];
        x = stx__attn_bwd_fold_slices(sum, x);
        if (!slice && i < o.n) stx__add(o.to, i, o.f * x, 1);
        return;
    }
}

typedef stx__kernel_of<stx__attn_bwd_params> stx__attn_bwd_kernel;
typedef stx__kernel_of<stx__attn_bwd_params, const uint32_t *> stx__attn_bwd_kernel_list;

typedef stx__kernel_of<stx__attn_params, stx__attn_bwd_list, const void *, float *>
    stx__attn_bwd_kernel_prepare;

typedef struct stx__attn_bwd_choice {
    stx__attn_bwd_kernel_prepare prepare;
    stx__attn_bwd_kernel_list queries;
    stx__attn_bwd_kernel keys, diagonals;
    size_t shared_queries, shared_keys, shared_diagonals; /* shared memory, in bytes */
    size_t more_queries, more_keys, more_diagonals;       /* additional bytes for prefetching */
    int bq, bk, threads;
    stx__attn_bwd_kernel table; /* computes dPE from rows of dR; NULL for floats */
    size_t shared_table;
    int columns; /* columns per block of `table` */
    int rows;    /* memory for rows of dR. 0: none; 1: STX__ATTN_BWD_DR_BYTES; 2: half of
                    what the rows require (for tests) */
} stx__attn_bwd_choice;

template <class Sh> static void stx__attn_bwd_choose_table(stx__attn_bwd_choice *, ...) {}

template <class Sh>
static void stx__attn_bwd_choose_table(stx__attn_bwd_choice *c, const stx__attn_bf16 *) {
    c->table = stx__attn_bwd_table<Sh>;
    c->shared_table = stx__attn_bwd_table_shape<Sh>::SHARED;
    c->columns = stx__attn_bwd_table_shape<Sh>::COLUMNS;
}

template <class Pr, int DP, int BQ, int BK>
static stx__attn_bwd_choice stx__attn_bwd_choice_of(const stx_attention_args *a) {
    typedef stx__attn_bwd_shape<Pr, DP, BQ, BK> Sh;
    typedef stx__attn_bwd_variants<Sh, Pr::MASKED_SIZES & DP> Q;
    stx__attn_bwd_choice c = {};
    c.prepare = stx__attn_bwd_prepare<typename Pr::element>;
    c.queries = stx__attn_bwd_queries<typename Q::unmasked>;
    if (stx__attn_key_words(a)) c.queries = stx__attn_bwd_queries<typename Q::masked>;
    c.keys = stx__attn_bwd_keys<Sh>;
    c.diagonals = stx__attn_bwd_diagonals<Sh>;
    c.bq = BQ;
    c.bk = BK;
    c.threads = Sh::THREADS;
    stx__attn_bwd_choose_table<Sh>(&c, (const Pr *)NULL);
    c.shared_queries = (size_t)Sh::RAMPS + 2 * Sh::BIAS
                       + (size_t)Sh::TILE_Q
                             * (a->P && (a->content_bias || a->position_bias) ? 3 : 2)
                       + 2 * (size_t)Sh::TILE_K + (a->P ? (size_t)Sh::TILE_PE : 0);
    c.shared_keys = c.shared_queries + 2 * (size_t)Sh::BQ * Sh::CH_DS * 16;
    c.shared_diagonals = c.shared_queries + (size_t)Sh::BQ * Sh::CH_DR * 16;
    c.more_queries = stx__attn_bwd_shared<Sh>::moving_bytes(STX__MOVES_K)
                     + (a->P ? (size_t)Sh::TILE_K : 0);
    c.more_keys = stx__attn_bwd_shared<Sh>::moving_bytes(STX__MOVES_Q)
                  + (a->P ? (size_t)Sh::TILE_Q : 0);
    c.more_diagonals = stx__attn_bwd_shared<Sh>::moving_bytes(STX__MOVES_K | STX__MOVES_Q);
    return c;
}

template <class Pr>
static stx__attn_bwd_choice stx__attn_bwd_choose_float(const stx_attention_args *a) {
    if (a->D <= 32) return stx__attn_bwd_choice_of<Pr, 32, 64, 32>(a);
    if (a->D <= 64) return stx__attn_bwd_choice_of<Pr, 64, 64, 32>(a);
    return stx__attn_bwd_choice_of<Pr, 128, 32, 16>(a);
}

static stx__attn_bwd_choice stx__attn_bwd_choose(const stx_ctx *x, const stx_attention_args *a,
                                                 int half) {
    const int version = stx__gpu(x)->attention;
    stx__attn_bwd_choice c;
    if (!half && stx__gpu(x)->tf32) return stx__attn_bwd_choose_float<stx__attn_tf32>(a);
    if (!half) return stx__attn_bwd_choose_float<stx__attn_f32>(a);
    if (a->D <= 32)
        c = stx__attn_bwd_choice_of<stx__attn_bf16, 32, 64, 64>(a);
    else if (a->D <= 64)
        c = stx__attn_bwd_choice_of<stx__attn_bf16, 64, 64, 64>(a);
    else if (a->D <= 96)
        c = stx__attn_bwd_choice_of<stx__attn_bf16, 96, 64, 32>(a);
    else
        c = stx__attn_bwd_choice_of<stx__attn_bf16, 128, 64, 32>(a);
    c.rows = 1;
    if (version == 5) c.rows = 0;
    if (version == 6) c.rows = 2;
    return c;
}

/* How the work is divided, and the offsets in scratch memory. Depends on sizes alone. */
typedef struct stx__attn_bwd_plan {
    int queries, keys, vectors, table;  /* 1 if the sweep is required; vectors: key sweep over
                                           persistent vectors; table: diagonal sweep */
    int tiles;                          /* number of query tiles */
    int first, key_tiles;               /* first: first key of the key sweep; key_tiles:
                                           number of key tiles */
    int vector_tiles, vector_splits;    /* tiles and splits for persistent vectors */
    int diagonal_first, diagonal_extra; /* `first` and `extra` of the diagonal sweep */
    int diagonals, tables, units, table_splits;
    int pe_rows;
    int rows;                       /* sum of the dR columns of all heads, or 0 */
    int newest, blocks, row_splits; /* parameters of stx__attn_bwd_table */
    size_t list, bits, dsum, du, dvb, dz, dpk, dpv, dpe, used, place; /* offsets in bytes */
    size_t bytes;                                                     /* size of scratch memory */
    size_t dr;                                                        /* bytes for rows of dR */
} stx__attn_bwd_plan;

/* Limits in bytes: for the partial sums of dpe, unless a single split requires more,
   and for the rows of dR of a context. At B = 64, T = 512 and 8 heads, the second limit
   allows 512 distances per head on average. This suffices for learned spans, except for
   one or two long heads per layer. */
enum { STX__ATTN_BWD_PART_BYTES = 128 << 20, STX__ATTN_BWD_DR_BYTES = 256 << 20 };

/* Plans the tiles of keys and of persistent vectors. */
static void stx__attn_bwd_plan_keys(const stx_attention_args *a, const stx__attn_bwd_choice *c,
                                    stx__attn_bwd_plan *s) {
    const int S = (int)a->S, C = S - (int)a->T, span = (int)a->span, B = (int)a->B, H = (int)a->H;
    /* the first key that a query may see, rounded down to a group of 8 dropout random
       numbers */
    int lo = STX_MAX(STX_MIN((int)STX_MAX(a->first_key, 0), S), C - span);
    lo = STX_MAX(lo, 0);
    s->first = ((lo + span) & ~7) - span;
    /* if gradients are overwritten, include keys that no query sees: their gradients
       are 0 */
    if (a->overwrite & ~STX_OVERWRITE_DQ && s->first > 0)
        s->first -= (s->first + c->bk - 1) / c->bk * c->bk;
    s->key_tiles = (S - s->first + c->bk - 1) / c->bk;
    s->vector_tiles = ((int)a->N + ((S + span) & 7) + c->bk - 1) / c->bk;
    if (s->vectors)
        s->vector_splits = STX_MAX(1, STX_MIN(B, 512 / STX_MAX(1, H * s->vector_tiles)));
}

/* Returns the number of splits that the units are divided into for partial sums of dpe:
   at most `most`, and no more than fit in STX__ATTN_BWD_PART_BYTES if each split takes
   `one` bytes. */
static int stx__attn_bwd_splits(size_t one, int units, int most) {
    return (int)STX_MIN(STX_MAX((size_t)1, STX__ATTN_BWD_PART_BYTES / one),
                        (size_t)STX_MIN(units, most));
}

/* Plans the columns of dR and the partial sums of dpe that are computed from them.
   Leaves s->rows at 0 if no head can have columns. */
static void stx__attn_bwd_plan_dr(const stx_attention_args *a, const stx__attn_bwd_choice *c,
                                  stx__attn_bwd_plan *s, size_t *parts, size_t *flags) {
    const int C = (int)a->S - (int)a->T, span = (int)a->span;
    const size_t rows = a->B * s->tiles * c->bq; /* rows of one head */
    size_t one, all, most;
    s->newest = C - a->delta_min + 1;
    s->newest += -(s->newest + span) & 15;
    /* columns of a head that sees the whole window */
    one = (size_t)(span + s->newest - C + 15) / 16 * 16;
    all = one * a->H;
    most = c->rows == 2 ? all / 2 : STX__ATTN_BWD_DR_BYTES / (rows * 2);
    if (most > all) most = all;
    /* with fewer columns, no head would get any */
    if (most < all && most < (size_t)(c->rows == 2 ? 16 : 64)) return;
    s->rows = (int)(most / 16 * 16);
    /* if every head has columns, the diagonal sweep is not required */
    s->table = most < all;
    s->dr = STX_MIN((size_t)STX__ATTN_BWD_DR_BYTES,
                    (STX_MAX(a->span, a->P) + 31) / 16 * 16 * a->H * rows * 2);
    /* run the query sweep even if no other gradient requires it: dPE must not depend on
       which other gradients are requested */
    s->queries = 1;
    /* columns of the widest head that may have rows */
    one = STX_MIN(one, most);
    s->blocks = (int)((one + c->columns - 1) / c->columns);
    one = (size_t)s->blocks * s->tables * c->columns * a->D * sizeof(float);
    s->row_splits = stx__attn_bwd_splits(one, s->units, STX_MAX(1, 256 / s->tables));
    *parts = s->row_splits * one;
    *flags = (size_t)s->blocks * s->tables * s->row_splits * sizeof(int);
}

/* Plans the diagonal sweep and its partial sums of dpe. */
static void stx__attn_bwd_plan_diagonals(const stx_attention_args *a, const stx__attn_bwd_choice *c,
                                         stx__attn_bwd_plan *s, size_t *parts, size_t *flags) {
    const int C = (int)a->S - (int)a->T, span = (int)a->span;
    size_t one;
    /* diagonal 0 ends with the newest key that a tile's last query sees, or up to 7
       keys later */
    s->diagonal_first = C - a->delta_min + c->bq - c->bk;
    s->diagonal_extra = -(s->diagonal_first + span) & 7;
    s->diagonal_first += s->diagonal_extra;
    s->diagonals = (span - a->delta_min + c->bq - 1 + s->diagonal_extra) / c->bk + 1;
    one = (size_t)s->diagonals * s->tables * s->pe_rows * a->D * sizeof(float);
    s->table_splits = stx__attn_bwd_splits(one, s->units, STX_MAX(1, 64 / s->tables));
    /* both kinds of partial sums use the same memory, one after the other */
    *parts = STX_MAX(*parts, s->table_splits * one);
    *flags = STX_MAX(*flags, (size_t)s->diagonals * s->tables * s->table_splits * sizeof(int));
}

static stx__attn_bwd_plan stx__attn_bwd_plan_of(const stx_attention_args *a,
                                                const stx__attn_bwd_choice *c) {
    const int H = (int)a->H;
    stx__attn_bwd_plan s;
    size_t at = 0, parts = 0, flags = 0, tiles, vectors;
    memset(&s, 0, sizeof s);
    s.queries = a->dq || a->dcontent_bias || a->dposition_bias || a->dspan_fraction;
    s.keys = stx__attn_needs_grad(a, 0) || stx__attn_needs_grad(a, 1);
    s.vectors = a->N && (a->dpersistent_k || a->dpersistent_v);
    s.table = a->P && a->dpe;
    s.tiles = ((int)a->T + c->bq - 1) / c->bq;
    s.pe_rows = c->bq + c->bk;
    s.tables = a->pe_heads > 1 ? H : 1;
    s.units = (int)a->B;
    if (s.tables == 1) s.units *= H;
    stx__attn_bwd_plan_keys(a, c, &s);
    if (s.table && c->rows && !stx__attn_key_words(a))
        stx__attn_bwd_plan_dr(a, c, &s, &parts, &flags);
    if (s.table) stx__attn_bwd_plan_diagonals(a, c, &s, &parts, &flags);

    tiles = a->B * s.tiles;
    vectors = s.vectors ? s.vector_splits * a->H * a->N * a->D : 0;
    s.list = stx__carve(&at, s.queries ? (size_t)H * s.tiles * sizeof(uint32_t) : 0);
    s.bits = stx__carve(&at,
                        stx__attn_key_words(a) * stx__attn_key_word_rows(a) * sizeof(uint32_t));
    s.dsum = stx__carve(&at, a->B * a->H * a->T * sizeof(float));
    s.du = stx__carve(&at, a->dcontent_bias ? tiles * a->H * a->D * sizeof(float) : 0);
    s.dvb = stx__carve(&at, a->dposition_bias ? tiles * a->H * a->D * sizeof(float) : 0);
    s.dz = stx__carve(&at, a->dspan_fraction ? tiles * a->H * sizeof(float) : 0);
    s.dpk = stx__carve(&at, a->dpersistent_k ? vectors * sizeof(float) : 0);
    s.dpv = stx__carve(&at, a->dpersistent_v ? vectors * sizeof(float) : 0);
    s.dpe = stx__carve(&at, parts);
    s.used = stx__carve(&at, flags);
    s.place = stx__carve(&at, s.rows ? H * sizeof(stx__attn_dr_slot) : 0);
    s.bytes = at;
    return s;
}

/* Sets the parameters and kernels of a call. Returns 0 if the fused kernels cannot run
   it. */
static int stx__attn_bwd_params_of(stx_ctx *x, const stx_attention_args *a, stx__attn_bwd_params *p,
                                   stx__attn_bwd_choice *c) {
    int half, ok = 1;
    memset(p, 0, sizeof *p);
    if (!stx__attn_params_of(x, a, &p->p, &half)) return 0;
    *c = stx__attn_bwd_choose(x, a, half);
    p->dy = stx__attn_operand(x, a->dy, half, a->D, &ok);
    /* the number of blocks must be less than 2^31 */
    if ((size_t)p->p.B * p->p.H * (((size_t)p->p.T + c->bq - 1) / c->bq) >= (size_t)1 << 31)
        return 0;
    return ok && p->p.B < 65536 && c->shared_keys <= stx__gpu(x)->shared_max
           && c->shared_diagonals <= stx__gpu(x)->shared_max;
}

/* Performs the checks that stx__attn_fused_can omits: that dy has the same storage as y
   and that there is enough shared memory. */
static int stx__attn_fused_bwd_can(stx_ctx *x, const stx_attention_args *a) {
    stx__attn_bwd_params p;
    stx__attn_bwd_choice c;
    return stx__attn_bwd_params_of(x, a, &p, &c);
}

static size_t stx__attn_fused_bwd_work(stx_ctx *x, const stx_attention_args *a) {
    stx__attn_bwd_params p;
    stx__attn_bwd_choice c;
    return stx__attn_bwd_params_of(x, a, &p, &c) ? stx__attn_bwd_plan_of(a, &c).bytes : 0;
}

/* Called before the launch of a kernel. Sets *prefetch and adds `more` bytes of shared
   memory to *bytes, unless fewer blocks would then fit on a multiprocessor. The decision
   may depend on the GPU, because it does not change results. Returns 0 after an error. */
static int stx__attn_bwd_set_shared(stx_ctx *x, const void *kernel, int threads, size_t *bytes,
                                    size_t more, int *prefetch) {
    size_t all = *bytes + more;
    int few = 0, many = 0, can = all <= stx__gpu(x)->shared_max;
    *prefetch = 0;
    if (!stx__may_share(x, kernel, can ? all : *bytes, "stx_attention_bwd")) return 0;
    if (!can) return 1;
    if (stx__cuda_failed(x,
                         cudaOccupancyMaxActiveBlocksPerMultiprocessor(&many, kernel, threads,
                                                                       *bytes),
                         "stx_attention_bwd")
        || stx__cuda_failed(x,
                            cudaOccupancyMaxActiveBlocksPerMultiprocessor(&few, kernel, threads,
                                                                          all),
                            "stx_attention_bwd"))
        return 0;
    if (few < many) return 1;
    *prefetch = 1;
    *bytes = all;
    return 1;
}

static void stx__attn_bwd_fold_now(stx_ctx *x, stx__attn_bwd_folds *all) {
    unsigned blocks = all->dr_blocks;
    for (int k = 0; k < all->count; k++) blocks += all->one[k].blocks;
    if (blocks) STX__RUN_KERNEL(x, "stx_attention_bwd", stx__attn_bwd_fold, blocks, 256, 0, *all);
    all->count = 0;
    all->dr_blocks = 0;
}

/* Queues a sum of partial sums for one common launch. If a queued sum adds to the same
   gradient (u and vb may be one parameter), launches the queue first, because one
   launch computes its sums in no particular order. */
static void stx__attn_bwd_add_parts(stx_ctx *x, stx__attn_bwd_folds *all, const stx_real *to,
                                    const float *part, size_t n, size_t parts, float f) {
    stx__attn_bwd_fold_job *o;
    for (int k = 0; k < all->count; k++)
        if (stx__overlap(to, n, all->one[k].to.p, all->one[k].n)) {
            stx__attn_bwd_fold_now(x, all);
            break;
        }
    o = &all->one[all->count++];
    o->to = stx__array_of(x, to);
    o->part = part;
    o->n = n;
    o->parts = parts;
    o->f = f;
    o->blocks = stx__blocks(n, 32, (size_t)1 << 28);
}

/* Sets the gradient arrays and the scratch pointers of a call. Returns 0 after an
   error. */
static int stx__attn_bwd_buffers(stx_ctx *x, const stx_attention_args *a,
                                 const stx__attn_bwd_plan *s, stx__attn_bwd_params *p) {
    char *work = (char *)a->work;
    p->tiles = s->tiles;
    p->units = s->units;
    p->root_d = (float)sqrt((double)a->D);
    p->root_n = (float)sqrt((double)a->N);
    p->dq = stx__array_of(x, a->dq);
    p->dk = stx__array_of(x, a->dk);
    p->dv = stx__array_of(x, a->dv);
    for (size_t g = 0; g < a->groups; g++) {
        p->cached_dk[g] = stx__array_of(x, a->cached[g].dk);
        p->cached_dv[g] = stx__array_of(x, a->cached[g].dv);
    }
    p->overwrite = a->overwrite;
    p->dsum = (float *)(work + s->dsum);
    if (a->dcontent_bias) p->du = (float *)(work + s->du);
    if (a->dposition_bias) p->dvb = (float *)(work + s->dvb);
    if (a->dspan_fraction) p->dz = (float *)(work + s->dz);
    if (a->dpersistent_k) p->dpk = (float *)(work + s->dpk);
    if (a->dpersistent_v) p->dpv = (float *)(work + s->dpv);
    p->dpe = (float *)(work + s->dpe);
    p->used = (int *)(work + s->used);
    if (!s->rows) return 1;
    /* Scratch memory is shared by all layers. In the step's memory, layers with
       different windows would each need a separate buffer. The size suffices for the
       full table, so that the memory does not grow with the spans. */
    p->dr = (stx__bf16 *)stx__scratch_of(x, s->dr, "stx_attention_bwd");
    p->slot = (const stx__attn_dr_slot *)(work + s->place);
    p->newest = s->newest;
    return p->dr != NULL;
}

/* Launches the kernel that computes dsum and the list of query tiles. */
static void stx__attn_bwd_run_prepare(stx_ctx *x, const stx_attention_args *a,
                                      const stx__attn_bwd_choice *c, const stx__attn_bwd_plan *s,
                                      const stx__attn_bwd_params *p) {
    char *work = (char *)a->work;
    stx__attn_bwd_list list;
    memset(&list, 0, sizeof list);
    if (s->queries) {
        list.list = (uint32_t *)(work + s->list);
        list.tiles = s->tiles;
        list.bq = c->bq;
        list.bk = c->bk;
        list.newest = s->newest;
        list.columns = s->rows;
        list.place = s->rows ? (stx__attn_dr_slot *)(work + s->place) : (stx__attn_dr_slot *)NULL;
        list.blocks = stx__blocks((size_t)p->p.H * s->tiles, 256, (size_t)1 << 30);
    }
    STX__RUN_KERNEL(x, "stx_attention_bwd", c->prepare,
                    list.blocks + stx__blocks(a->B * a->H * ((a->T + 31) / 32), 1, (size_t)1 << 30),
                    256, 0, p->p, list, p->dy, p->dsum);
}

/* Runs the query sweep. */
static void stx__attn_bwd_run_queries(stx_ctx *x, const stx_attention_args *a,
                                      stx__attn_bwd_choice *c, const stx__attn_bwd_plan *s,
                                      stx__attn_bwd_params *p, stx__attn_bwd_folds *folds) {
    const size_t columns = a->H * a->D, tiles = a->B * s->tiles;
    if (!stx__attn_bwd_set_shared(x, (const void *)c->queries, c->threads, &c->shared_queries,
                                  c->more_queries, &p->prefetch))
        return;
    STX__RUN_KERNEL(x, "stx_attention_bwd", c->queries, (unsigned)(p->p.H * s->tiles * p->p.B),
                    c->threads, c->shared_queries, *p,
                    (const uint32_t *)((char *)a->work + s->list));
    if (a->dcontent_bias)
        stx__attn_bwd_add_parts(x, folds, a->dcontent_bias, p->du, columns, tiles, a->scale);
    if (a->dposition_bias && a->P)
        stx__attn_bwd_add_parts(x, folds, a->dposition_bias, p->dvb, columns, tiles, a->scale);
    if (a->dspan_fraction && a->span_fraction)
        stx__attn_bwd_add_parts(x, folds, a->dspan_fraction, p->dz, a->H, tiles,
                                a->max_span / a->ramp);
}

/* Runs the key sweep, over the window and over persistent vectors. Returns 0 after an
   error. */
static int stx__attn_bwd_run_keys(stx_ctx *x, const stx_attention_args *a, stx__attn_bwd_choice *c,
                                  const stx__attn_bwd_plan *s, stx__attn_bwd_params *p,
                                  stx__attn_bwd_folds *folds) {
    const size_t n = a->N * a->H * a->D, splits = (size_t)s->vector_splits;
    if (!stx__attn_bwd_set_shared(x, (const void *)c->keys, c->threads, &c->shared_keys,
                                  c->more_keys, &p->prefetch))
        return 0;
    if (s->keys) {
        p->first = s->first;
        if (s->key_tiles > 0)
            STX__RUN_KERNEL(x, "stx_attention_bwd", c->keys,
                            dim3((unsigned)s->key_tiles, (unsigned)a->H, (unsigned)a->B),
                            c->threads, c->shared_keys, *p);
    }
    if (s->vectors) {
        p->persistent = 1;
        p->first = -(int)((a->S + a->span) & 7);
        p->splits = s->vector_splits;
        STX__RUN_KERNEL(x, "stx_attention_bwd", c->keys,
                        dim3((unsigned)s->vector_tiles, (unsigned)a->H, (unsigned)splits),
                        c->threads, c->shared_keys, *p);
        if (a->dpersistent_k)
            stx__attn_bwd_add_parts(x, folds, a->dpersistent_k, p->dpk, n, splits, 1);
        if (a->dpersistent_v)
            stx__attn_bwd_add_parts(x, folds, a->dpersistent_v, p->dpv, n, splits, 1);
        p->persistent = 0;
    }
    return 1;
}

/* Runs the diagonal sweep and adds its partial sums. */
static void stx__attn_bwd_run_diagonals(stx_ctx *x, const stx_attention_args *a,
                                        stx__attn_bwd_choice *c, const stx__attn_bwd_plan *s,
                                        stx__attn_bwd_params *p) {
    if (!stx__attn_bwd_set_shared(x, (const void *)c->diagonals, c->threads, &c->shared_diagonals,
                                  c->more_diagonals, &p->prefetch))
        return;
    p->first = s->diagonal_first;
    p->splits = s->table_splits;
    STX__RUN_KERNEL(x, "stx_attention_bwd", c->diagonals,
                    dim3((unsigned)s->diagonals, (unsigned)s->tables, (unsigned)s->table_splits),
                    c->threads, c->shared_diagonals, *p);
    STX__RUN_KERNEL(x, "stx_attention_bwd", stx__attn_bwd_fold_diagonals,
                    stx__blocks(a->P * s->tables * a->D, 256, (size_t)1 << 30), 256, 0,
                    stx__array_of(x, a->dpe), (const float *)p->dpe, (const int *)p->used, p->p.P,
                    s->tables, p->p.D, s->pe_rows, c->bk, s->diagonal_extra, s->diagonals,
                    s->table_splits);
}

/* Computes partial sums of dPE from rows of dR; stx__attn_bwd_fold_now adds them. */
static void stx__attn_bwd_run_table(stx_ctx *x, const stx_attention_args *a,
                                    const stx__attn_bwd_choice *c, const stx__attn_bwd_plan *s,
                                    stx__attn_bwd_params *p, stx__attn_bwd_folds *folds) {
    p->splits = s->row_splits;
    STX__RUN_KERNEL(x, "stx_attention_bwd", c->table,
                    dim3((unsigned)s->blocks, (unsigned)s->tables, (unsigned)s->row_splits),
                    c->threads, c->shared_table, *p);
    folds->dr_blocks = stx__blocks(a->P * s->tables * a->D, 32, (size_t)1 << 29);
    folds->dpe = stx__array_of(x, a->dpe);
    folds->part = p->dpe;
    folds->used = p->used;
    folds->P = p->p.P;
    folds->tables = s->tables;
    folds->D = p->p.D;
    folds->columns = c->columns;
    folds->extra = s->newest - 1 + a->delta_min - (int)(a->S - a->T);
    folds->blocks = s->blocks;
    folds->splits = s->row_splits;
}

static void stx__attn_fused_bwd(stx_ctx *x, const stx_attention_args *a) {
    stx__attn_bwd_params p;
    stx__attn_bwd_choice c;
    stx__attn_bwd_plan s;
    stx__attn_bwd_folds folds;
    if (!stx_ok(x) || !stx__attn_bwd_params_of(x, a, &p, &c)) return;
    s = stx__attn_bwd_plan_of(a, &c);
    memset(&folds, 0, sizeof folds);
    if (!stx__attn_bwd_buffers(x, a, &s, &p)) return;
    if (s.rows) c.shared_queries += (size_t)c.threads * sizeof(uint4);
    stx__attn_make_key_mask(x, "stx_attention_bwd", a, &p.p, (char *)a->work + s.bits);
    stx__attn_bwd_run_prepare(x, a, &c, &s, &p);
    if (s.queries) stx__attn_bwd_run_queries(x, a, &c, &s, &p, &folds);
    if ((s.keys || s.vectors) && !stx__attn_bwd_run_keys(x, a, &c, &s, &p, &folds)) return;
    if (s.table) stx__attn_bwd_run_diagonals(x, a, &c, &s, &p);
    if (s.rows) stx__attn_bwd_run_table(x, a, &c, &s, &p, &folds);
    stx__attn_bwd_fold_now(x, &folds);
}
