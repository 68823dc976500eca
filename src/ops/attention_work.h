#pragma once
#include "../api/config.h"
#include "../api/context.h"
#include "../api/attention.h"
#include "../core/loops.h"
#include "../core/platform.h"
#include "../core/arena.h"
#include "../gemm/blocked.h"
#include "attention.h"
#include "attention_tiles.h"
#include "attention_fwd.h"
#include "attention_few.h"


// >>attention: units and work

/* A work unit: queries i0 .. i0+n-1 in head h of batch row b. In the backward pass, a
   unit consists of keys first .. end-1 and all queries of the head, and `owner` is the
   owner to which it belongs (see stx__attn_work). `part` is -1 for the first unit of a
   head. The other units of the head have the same queries, so each has a separate dq
   buffer with the index `part`. The forward pass ignores first, end, owner and part. */
typedef struct stx__attn_unit {
    size_t    b, h, i0, n;
    ptrdiff_t first, end;
    int       owner, part;
} stx__attn_unit;

/* The units of a call, and the buffers that the call uses in `work` memory. An owner is
   a list of units that one thread computes in sequence. The units of the backward pass
   and their owners depend only on the shape, so that sums have the same order for any
   number of threads. */
typedef struct stx__attn_work {
    stx__attn_unit *unit;
    size_t    count;                 /* number of units */
    size_t    max_queries;           /* upper bound of unit[].n */
    char     *scratch;               /* per thread: scratch_bytes bytes */
    size_t    scratch_bytes;
    size_t    owners;                /* number of owners; all members from here to `load`
                                        are for the backward pass only */
    stx_real *dpe;                   /* per owner: (tables,D,ldpe), which has dpe_size elements */
    stx_real *dpk, *dpv;             /* per owner: (H,N,D), which has dpk_size elements */
    size_t    dpe_size, dpk_size, ldpe;
    stx_real *dcontent_bias;         /* per unit: (D) */
    stx_real *dposition_bias;        /* per unit: (D) */
    stx_real *dspan;                 /* per unit: one value */
    stx_real *part;                  /* per part index: (T,D), a partial sum of dq */
    double   *load;                  /* per owner: cost of its units so far */
    size_t    bytes;                 /* size of the `work` memory */
} stx__attn_work;

/* Estimates the cost of head order[i] as the number of keys that a tile of BQ queries
   visits. */
static double stx__attn_cost(const stx__attn *A, size_t i) {
    return (double)(A->farthest[i] + STX__BQ + A->a->N);
}

/* Sets [*first,*end) to the range of keys of head order[i] that any query sees. *first
   is rounded down to a multiple of KEY_ALIGN. */
static void stx__attn_unit_range(const stx__attn *A, size_t i, ptrdiff_t *first, ptrdiff_t *end) {
    stx__attn_range(A->a, A->farthest[i], 0, A->a->T, first, end);
    *first = stx__attn_floor(*first, STX__KEY_ALIGN);
    *end = STX_MAX(*end, *first);
}

/* Returns n / size, rounded up. */
static size_t stx__attn_count(size_t n, size_t size) {
    return (n + size - 1) / size;
}

/* Appends the units of head order[i] in one batch row, with `queries` queries per unit
   in the forward pass, or `keys` keys per unit in the backward pass. In the backward
   pass, a head has at least one unit, because its units also write the zero gradients
   of keys that no query reaches. `part` is the next free part index. Returns the next
   free part index after these units. With w->unit = NULL, only counts the units. */
static int stx__attn_units_of(const stx__attn *A, size_t b, size_t i, int backward,
                              size_t queries, size_t keys, int part, stx__attn_work *w) {
    const stx_attention_args *a = A->a;
    ptrdiff_t first, end;
    size_t k, count;
    stx__attn_unit_range(A, i, &first, &end);
    count = stx__attn_count(a->T, queries);
    if (backward) count = STX_MAX(stx__attn_count((size_t)(end - first), keys), 1);
    for (k = 0; w->unit && k < count; k++) {
        stx__attn_unit *u = &w->unit[w->count + k];
        u->b = b;
        u->h = A->order[i];
        u->owner = 0;
        u->part = k ? part++ : -1;
        u->i0 = backward ? 0 : k * queries;
        u->n = backward ? a->T : STX_MIN(queries, a->T - u->i0);
        u->first = first + (ptrdiff_t)(k * keys);
        u->end = STX_MIN(end, u->first + (ptrdiff_t)keys);
    }
    w->count += count;
    return part;
}

/* The backward pass of a call is divided into at least this many units, unless they would
   be too small, and its units belong to this many owners, or to one per eight units if
   that is more. Every owner has a copy of dpe. */
enum { STX__ATTN_OWNERS = 16, STX__ATTN_OWNED = 8 };

/* Divides the call into units, in the order of the heads in A->order. In the forward
   pass, a unit is a group of queries: a multiple of half a tile, at most GROUP. With
   several threads, it costs at most half of a thread's share, or is as small as possible.
   In the backward pass, a unit is all queries of a head and a range of its keys: a
   multiple of BK. The last unit of a head can be smaller. With w->unit = NULL, only
   counts the units. */
static void stx__attn_units(const stx__attn *A, size_t threads, int backward, stx__attn_work *w) {
    const stx_attention_args *a = A->a;
    const size_t half_tile = STX__BQ / 2;
    const size_t half_tiles = STX_MAX(stx__attn_count(a->T, half_tile), 1);
    const size_t most_half_tiles = STX__GROUP / half_tile;
    const double least = backward ? (double)STX__ATTN_OWNERS : 2 * (double)threads;
    double total = 0;
    size_t i, b;
    int part = 0;
    w->count = 0;
    w->max_queries = backward ? a->T : STX_MIN(a->T, (size_t)STX__GROUP);
    for (i = 0; i < a->H; i++) total += (double)a->B * stx__attn_cost(A, i);

    for (i = 0; i < a->H && a->B; i++) {
        size_t pieces = 1, queries, keys;
        ptrdiff_t first, end;
        if (backward || threads > 1)
            pieces = (size_t)ceil(stx__attn_cost(A, i) * least / total);
        if (!backward) {
            pieces = STX_MAX(pieces, stx__attn_count(half_tiles, most_half_tiles));
            pieces = STX_MIN(pieces, half_tiles);
        }
        stx__attn_unit_range(A, i, &first, &end);
        queries = stx__attn_count(half_tiles, pieces) * half_tile;
        keys = stx__round_up(stx__attn_count((size_t)(end - first), pieces), STX__BK);
        keys = STX_MAX(keys, (size_t)STX__BK);
        for (b = 0; b < a->B; b++)
            part = stx__attn_units_of(A, b, i, backward, queries, keys, part, w);
    }
}

/* Divides the `work` memory at `base` into the buffers of *w and of the packed pe in
   *A. With base = NULL, only computes its size. The contents of w->unit are set by a
   second call of stx__attn_units. */
static void stx__attn_layout(stx__attn *A, size_t threads, int backward, char *base,
                             stx__attn_work *w) {
    const stx_attention_args *a = A->a;
    const size_t real = sizeof(stx_real);
    stx__attn_scratch scratch;
    stx__cursor c;
    size_t parts;
    c.base = base;
    c.at = 0;
    memset(w, 0, sizeof *w);
    stx__attn_units(A, threads, backward, w);
    w->unit = (stx__attn_unit *)stx__cut(&c, w->count * sizeof *w->unit);
    A->pe_columns = (stx_real *)stx__cut(&c, A->tables * A->pe_rows * A->Dk / A->per_word * real);
    if (backward) {
        parts = w->count - a->B * a->H; /* units with a dq buffer: all but the first of
                                           each head */
        w->dpk_size = a->N && (a->dpersistent_k || a->dpersistent_v) ? a->H * a->N * a->D : 0;
        w->ldpe = A->pe_rows + STX__STAGGER;
        w->dpe_size = a->dpe ? A->tables * a->D * w->ldpe : 0;
        A->pe_packed_rows =
            (stx_real *)stx__cut(&c, A->tables * A->Dp * A->pe_rows / A->per_word * real);
        w->owners = STX_MAX((size_t)STX__ATTN_OWNERS, w->count / STX__ATTN_OWNED);
        w->owners = STX_MIN(w->owners, w->count);
        w->dpe = (stx_real *)stx__cut(&c, w->owners * w->dpe_size * real);
        w->dpk = (stx_real *)stx__cut(&c, w->owners * w->dpk_size * real);
        w->dpv = (stx_real *)stx__cut(&c, w->owners * w->dpk_size * real);
        w->dcontent_bias = (stx_real *)stx__cut(&c, w->count * a->D * real);
        w->dposition_bias = (stx_real *)stx__cut(&c, w->count * a->D * real);
        w->dspan = (stx_real *)stx__cut(&c, w->count * real);
        w->part = (stx_real *)stx__cut(&c, parts * a->T * a->D * real);
        w->load = (double *)stx__cut(&c, w->owners * sizeof(double));
    }
    w->scratch_bytes = stx__attn_scratch_layout(A, NULL, w->max_queries, backward, &scratch);
    w->scratch = (char *)stx__cut(&c, threads * w->scratch_bytes);
    w->bytes = c.at + 64;
}

STX_DEF size_t stx_attention_work(stx_ctx *x, const stx_attention_args *a, int backward) {
    STX__FP_SCOPE;
    stx__attn A;
    stx__attn_work w;
    if (a->H > STX__MAX_HEADS) return 0; /* the kernels report the error */
    stx__attn_plan(&A, x, a);
    if (!backward && stx__attn_is_few(a))
        return (size_t)stx_threads(x) * stx__attn_few_reals(&A) * sizeof(stx_real);
    stx__attn_layout(&A, (size_t)stx_threads(x), backward, NULL, &w);
    return w.bytes;
}

/* Prepares a forward or backward call: fills in *A and *w, including the division into
   units, and packs pe. For a forward call with few queries, only fills in *A. Returns 0
   and sets an error if there are too many heads. */
static int stx__attn_start(stx_ctx *x, const char *op, stx__attn *A, const stx_attention_args *a,
                           int backward, stx__attn_work *w) {
    const size_t threads = (size_t)stx_threads(x);
    STX__CHECK(x, a->H <= STX__MAX_HEADS, STX_ERR_SHAPE,
               "%s: heads: expected at most %d, got %zu", op, (int)STX__MAX_HEADS, a->H);
    stx__attn_plan(A, x, a);
    if (!backward && stx__attn_is_few(a)) return 1;
    stx__attn_layout(A, threads, backward, stx__align64(a->work), w);
    stx__attn_units(A, threads, backward, w);
    stx__attn_pack_pe(x, A, backward);
    return 1;
}

typedef struct stx__attn_job {
    const stx__attn *plan;
    const stx__attn_work *w;
} stx__attn_job;

static void stx__attn_few_part(const stx_share *s, const void *job) {
    const stx__attn *A = (const stx__attn *)job;
    const stx_attention_args *a = A->a;
    stx_real *scratch = (stx_real *)a->work + s->thread * stx__attn_few_reals(A);
    size_t i;
    for (i = s->begin; i < s->end; i++)
        stx__attn_few_query(s->x, A, scratch, i / (a->H * a->T), i / a->T % a->H, i % a->T);
}

static void stx__attn_fwd_part(const stx_share *s, const void *job) {
    const stx__attn_job *j = (const stx__attn_job *)job;
    const stx__attn *A = j->plan;
    const stx__attn_work *w = j->w;
    stx__attn_scratch scratch;
    size_t i;
    stx__attn_scratch_layout(A, w->scratch + s->thread * w->scratch_bytes, w->max_queries, 0,
                             &scratch);
    if (A->mk->enter) A->mk->enter();
    for (i = s->begin; i < s->end; i++) {
        const stx__attn_unit *u = &w->unit[i];
        stx__attn_fwd_unit(s->x, A, &scratch, u->b, u->h, u->i0, u->n);
    }
    if (A->mk->leave) A->mk->leave();
}

STX_DEF void stx_attention_fwd(stx_ctx *x, const stx_attention_args *a) {
    STX__FP_SCOPE;
    stx__attn A;
    stx__attn_work w;
    stx__attn_job j;
    if (!stx__attn_start(x, "stx_attention_fwd", &A, a, 0, &w)) return;
    if (stx__attn_is_few(a)) {
        stx_parallel(x, a->B * a->H * a->T, 2 * a->B * a->T * A.farthest[0] * a->H * a->D,
                     stx__attn_few_part, &A);
        return;
    }
    j.plan = &A;
    j.w = &w;
    stx_parallel_units(x, w.count, stx__attn_fwd_part, &j);
}
