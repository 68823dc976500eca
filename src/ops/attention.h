#pragma once
#include "../api/config.h"
#include "../api/context.h"
#include "../api/ops.h"
#include "../api/attention.h"
#include "../core/loops.h"
#include "../core/platform.h"
#include "../core/context.h"
#include "../core/arena.h"
#include "../core/tensors.h"
#include "../core/tape.h"


// >>attention

/* The sections on attention are in this order:
       op                    checks, arguments, node: stx_attention, stx__attention_back
       plain definition      the formulas, and stx_attention_plain, which evaluates them
       maps                  the weights of one row of a batch: stx_attention_map_of
       tiles                 overview of the kernels; buffers, packing
       scores and weights    one tile: bounds, q . k + qv . pe, running softmax
       forward               stx__attn_fwd_unit
       few queries           up to 3 queries without dropout; rows are not packed
       units and work        how a call is divided among the threads
       backward              formulas; stx__attn_bwd_unit
   Names that begin with stx__attention_ belong to the op. Names that begin with
   stx__attn_ belong to the plain definition and the CPU kernels, even the two that are
   defined in the op section. In comments, "the block" means the keys and values in k
   and v of stx_attention_args, as opposed to the older, cached ones. */

enum { STX__MAX_HEADS = 256 }; /* length of stx_attention_args.head_group */

/* For functions that return 1 on success: sets an error and returns 0 if cond is
   false. */
#define STX__CHECK(x, cond, code, ...) \
  do { \
    if (!(cond)) { \
      stx_fail(x, code, __VA_ARGS__); \
      return 0; \
    } \
  } while (0)

/* stx__head_group returns the group of head h, and stx__head_index its index in that
   group. Without groups, all heads are in group 0. */
static size_t stx__head_group(const stx_attention_args *a, size_t h) {
    return a->groups > 1 ? a->head_group[h] : 0;
}

static size_t stx__head_index(const stx_attention_args *a, size_t h) {
    return a->groups > 1 ? a->head_index[h] : h;
}

/* Each bit of stx_attention_args.overwrite selects gradients that the backward kernel
   overwrites. The kernel adds to all other gradients. stx__overwrite_cached returns the
   bit for the cached rows of a group. */
static int stx__overwrite_cached(size_t group) {
    return STX_OVERWRITE_CACHED << group;
}

static int stx__overwrites(const stx_attention_args *a, int bits) {
    return (a->overwrite & bits) != 0;
}

/* Returns the number of zero keys: keys before key 0, whose vectors are zero. */
static size_t stx__zero_keys(ptrdiff_t first_key) {
    /* -first_key, without overflow for PTRDIFF_MIN */
    return first_key < 0 ? (size_t)(-(first_key + 1)) + 1 : 0;
}

/* Keys and values are described at each level, from the API down to the kernels, by:

       stx_attention_in       tensors
       stx__kv_source         tensor, offset and rows
       stx_attention_args     pointers and strides, for all heads
       stx__kv_rows           one head of one batch row
       stx__attn_tile_rows    one tile, in one array
       stx__attn_scratch      one tile, packed */

/* Rows 0 .. S-1 of the keys or values of one head, or of their gradient. Rows
   block_first .. S-1 are in the block. Rows cached_first .. block_first - 1 are in the
   cache of the head's group. Rows below cached_first are not stored, because no query
   of the group sees them. Without cached rows, block_first and cached_first are 0. A
   pointer is NULL if its gradient is not required. */
typedef struct stx__kv_rows {
    stx_real *cached, *block;
    size_t    cached_stride, block_stride;
    ptrdiff_t cached_first, block_first;
    int       overwrite_cached, overwrite_block;    /* for gradients: nonzero to
                                                       overwrite, 0 to add */
} stx__kv_rows;

/* Returns the rows of head h of batch row b. `block` and `cached` are the arrays of the
   block and of the cached rows of the head's group. */
static stx__kv_rows stx__kv_rows_of(const stx_attention_args *a, size_t b, size_t h,
                                    const stx_real *block, const stx_real *cached) {
    const stx_attention_kv *c = &a->cached[stx__head_group(a, h)];
    stx__kv_rows r;
    memset(&r, 0, sizeof r);
    if (block)
        r.block = (stx_real *)(uintptr_t)(block + b * a->kv_batch_stride + h * a->D);
    r.block_stride = a->kv_row_stride;
    r.cached_first = r.block_first = (ptrdiff_t)a->cached_rows;
    if (!a->cached_rows) return r;

    if (cached)
        r.cached = (stx_real *)(uintptr_t)(cached + b * c->batch_stride
                                           + stx__head_index(a, h) * a->D);
    r.cached_stride = c->row_stride;
    r.cached_first -= (ptrdiff_t)c->rows;
    return r;
}

static stx__kv_rows stx__key_rows(const stx_attention_args *a, size_t b, size_t h) {
    return stx__kv_rows_of(a, b, h, a->k, a->cached[stx__head_group(a, h)].k);
}

static stx__kv_rows stx__value_rows(const stx_attention_args *a, size_t b, size_t h) {
    return stx__kv_rows_of(a, b, h, a->v, a->cached[stx__head_group(a, h)].v);
}

static stx__kv_rows stx__dkey_rows(const stx_attention_args *a, size_t b, size_t h) {
    const size_t g = stx__head_group(a, h);
    stx__kv_rows r = stx__kv_rows_of(a, b, h, a->dk, a->cached[g].dk);
    r.overwrite_block = stx__overwrites(a, STX_OVERWRITE_DK);
    r.overwrite_cached = stx__overwrites(a, stx__overwrite_cached(g));
    return r;
}

static stx__kv_rows stx__dvalue_rows(const stx_attention_args *a, size_t b, size_t h) {
    const size_t g = stx__head_group(a, h);
    stx__kv_rows r = stx__kv_rows_of(a, b, h, a->dv, a->cached[g].dv);
    r.overwrite_block = stx__overwrites(a, STX_OVERWRITE_DV);
    r.overwrite_cached = stx__overwrites(a, stx__overwrite_cached(g));
    return r;
}

/* Returns the rows of a single array, all of which are in the block. */
static stx__kv_rows stx__kv_rows_block(const stx_real *rows, size_t stride) {
    stx__kv_rows r;
    memset(&r, 0, sizeof r);
    r.block = (stx_real *)(uintptr_t)rows;
    r.block_stride = stride;
    return r;
}

/* Returns row j >= 0, or NULL if it is not stored. */
static stx_real *stx__kv_row(const stx__kv_rows *r, ptrdiff_t j) {
    if (j >= r->block_first) return r->block + (size_t)(j - r->block_first) * r->block_stride;
    if (j < r->cached_first) return NULL;
    return r->cached + (size_t)(j - r->cached_first) * r->cached_stride;
}

/* Returns the span_fraction of head h. With span_shared, all heads use element 0. */
static stx_real stx__attn_span_fraction(const stx_attention_args *a, size_t h) {
    return a->span_fraction[a->span_shared ? 0 : h];
}

static size_t stx__attention_bytes(stx_ctx *x, const stx_attention_args *a, int backward) {
#ifdef SEQTX_CUDA
    if (stx__on_gpu(x)) return stx_attention_work_cuda(x, a, backward);
#endif
    return stx_attention_work(x, a, backward);
}

/* The work buffer is in the step arena and is released when the kernel is done. */
STX_DEF void stx_attention_run(stx_ctx *x, stx_attention_args *a) {
    STX__FP_SCOPE;
    stx__mark mark;
    if (!stx_ok(x) || !a) return;
    mark = stx__step_mark(x);
    a->work = stx_step_device_bytes(x, stx__attention_bytes(x, a, 0));
    if (a->work) STX_RUN(x, stx_attention_fwd, (x, a));
    stx__step_release(x, mark);
}

/* Indices of the op's inputs on the tape. The input K is NULL if q also contains the
   keys and values (qkv), and V is NULL if k also contains the values (kv). CACHED is
   the first of STX_HEAD_GROUPS inputs. */
enum {
    STX__ATTENTION_Q,
    STX__ATTENTION_K,
    STX__ATTENTION_V,
    STX__ATTENTION_PE,
    STX__ATTENTION_CONTENT_BIAS,
    STX__ATTENTION_POSITION_BIAS,
    STX__ATTENTION_SPAN_FRACTION,
    STX__ATTENTION_PERSISTENT_K,
    STX__ATTENTION_PERSISTENT_V,
    STX__ATTENTION_CACHED
};

/* Returns the gradient buffer of t, or NULL if t requires no gradient. If the buffer is
   new, sets `bits` in a->overwrite, so that the kernel overwrites it. */
static stx_real *stx__attention_grad(stx_ctx *x, stx_attention_args *a, stx_tensor *t, int bits) {
    int fresh;
    stx_real *g = stx__grad_fresh(x, t, &fresh);
    if (fresh) a->overwrite |= bits;
    return g;
}

/* Sets dq, dk and dv of the block. If q is the same tensor as k or v, threads of the
   kernel would add to the same buffer concurrently. In this case, dq is a separate
   buffer, which is returned and which the caller must add to the gradient of q.
   Otherwise, returns NULL. */
static stx_real *stx__attention_block_grads(stx_ctx *x, stx__node *n, stx_attention_args *a) {
    stx_tensor *q = n->in[STX__ATTENTION_Q], *k = n->in[STX__ATTENTION_K];
    stx_tensor *v = n->in[STX__ATTENTION_V];
    const size_t C = a->H * a->D;
    if (!k) {
        a->dq = stx__attention_grad(x, a, q,
                                    STX_OVERWRITE_DQ | STX_OVERWRITE_DK | STX_OVERWRITE_DV);
        a->dk = stx_offset_ptr(x, a->dq, C);
        a->dv = stx_offset_ptr(x, a->dq, 2 * C);
        return NULL;
    }

    if (!v) {
        a->dk = stx__attention_grad(x, a, k, STX_OVERWRITE_DK | STX_OVERWRITE_DV);
        a->dv = stx_offset_ptr(x, a->dk, C);
    } else if (k == v) {
        a->dk = a->dv = stx__grad(x, k); /* dk and dv are added to the same buffer */
    } else {
        a->dk = stx__attention_grad(x, a, k, STX_OVERWRITE_DK);
        a->dv = stx__attention_grad(x, a, v, STX_OVERWRITE_DV);
    }

    a->dq = stx__attention_grad(x, a, q, STX_OVERWRITE_DQ);
    if (!a->dq || (q != k && q != v)) return NULL;
    a->overwrite |= STX_OVERWRITE_DQ;
    a->dq = stx__grad_take(x, q->size, q->is_f32);
    return a->dq;
}

static void stx__attention_back(stx_ctx *x, stx__node *n) {
    stx_attention_args *a = (stx_attention_args *)n->save;
    stx_tensor *q = n->in[STX__ATTENTION_Q];
    stx_real *separate_dq;
    size_t work, g;
    a->dy = n->y->grad;
    a->overwrite = 0;
    separate_dq = stx__attention_block_grads(x, n, a);
    for (g = 0; g < a->groups; g++) {
        stx_attention_kv *c = &a->cached[g];
        c->dk = stx__attention_grad(x, a, n->in[STX__ATTENTION_CACHED + g],
                                    stx__overwrite_cached(g));
        c->dv = stx_offset_ptr(x, c->dk, c->row_stride / 2);
    }
    a->dpe = stx__grad(x, n->in[STX__ATTENTION_PE]);
    a->dcontent_bias = stx__grad(x, n->in[STX__ATTENTION_CONTENT_BIAS]);
    a->dposition_bias = stx__grad(x, n->in[STX__ATTENTION_POSITION_BIAS]);
    a->dspan_fraction = stx__grad(x, n->in[STX__ATTENTION_SPAN_FRACTION]);
    a->dpersistent_k = stx__grad(x, n->in[STX__ATTENTION_PERSISTENT_K]);
    a->dpersistent_v = stx__grad(x, n->in[STX__ATTENTION_PERSISTENT_V]);

    work = (stx__attention_bytes(x, a, 1) + sizeof(stx_real) - 1) / sizeof(stx_real);
    a->work = stx__grad_take(x, work, 1);
    if (!a->work || x->error.code) return;
    STX_RUN(x, stx_attention_bwd, (x, a));
    if (separate_dq) {
        STX_RUN(x, stx_axpy, (x, q->grad, separate_dq, q->size, 1, 1));
        stx__grad_give(x, separate_dq, q->size, q->is_f32);
    }
    stx__grad_give(x, (stx_real *)a->work, work, 1);
}

/* Returns the number of Philox calls per row of attention weights. Each call yields the
   random bits of 8 weights. Within a row, key j has index span + j (zero keys have j >=
   -span), and persistent vector n has index span + S + n. The last one or two calls of
   a row are never used, but omitting them would change the dropout masks. */
static uint64_t stx__attn_philox_calls(const stx_attention_args *a) {
    return ((uint64_t)a->S + a->span + a->N) / 8 + 2;
}

/* A source of keys and values: rows first_row .. first_row + rows - 1 of the tensors k
   and v, which are the same tensor if each row contains both. In a row, the key starts
   at element k_offset and the value at v_offset. Strides are in elements. */
typedef struct stx__kv_source {
    stx_tensor *k, *v;
    size_t first_row, rows, k_offset, v_offset, row_stride, batch_stride;
} stx__kv_source;

/* The queries, keys and values of a call, regardless of which fields of
   stx_attention_in they are in. kv[0] is the block, the newest keys of all heads.
   kv[1 + g] contains the cached rows before the block for the heads of group g. */
typedef struct stx__attention_sources {
    stx_tensor    *q;                    /* the queries are the first C channels */
    size_t         C, S;                 /* channels per query; cached and block keys */
    size_t         groups, cached_rows;  /* both 0 without cached rows; `cached_rows` is
                                            the maximum over the groups */
    stx__kv_source kv[1 + STX_HEAD_GROUPS];
} stx__attention_sources;

static stx__kv_source stx__kv_source_of(stx_tensor *k, stx_tensor *v, size_t k_offset,
                                        size_t v_offset) {
    stx__kv_source s;
    s.k = k;
    s.v = v;
    s.first_row = 0;
    s.rows = k->dim[1];
    s.k_offset = k_offset;
    s.v_offset = v_offset;
    s.row_stride = k->dim[2];
    s.batch_stride = s.rows * s.row_stride;
    return s;
}

/* Maps the four forms of stx_attention_in (q, k and v; q and kv; qkv; qkv and cached)
   to sources. If both qkv and kv are set, only the queries of qkv are used. */
static stx__attention_sources stx__attention_sources_of(const stx_attention_in *in,
                                                        size_t kv_batch_stride) {
    stx__attention_sources s;
    size_t g;
    memset(&s, 0, sizeof s);
    s.q = in->qkv ? in->qkv : in->q;
    s.C = s.q->dim[2] / (in->qkv ? 3 : 1);

    if (in->kv) {
        s.kv[0] = stx__kv_source_of(in->kv, in->kv, 0, s.C);
        if (in->kv_rows) {
            s.kv[0].first_row = in->kv_first;
            s.kv[0].rows = in->kv_rows;
        }
    } else if (in->qkv) {
        s.kv[0] = stx__kv_source_of(in->qkv, in->qkv, s.C, 2 * s.C);
    } else {
        s.kv[0] = stx__kv_source_of(in->k, in->v, 0, 0);
    }
    if (kv_batch_stride) s.kv[0].batch_stride = kv_batch_stride;

    if (in->cached[0]) s.groups = in->groups ? in->groups->count : 1;
    for (g = 0; g < STX_MIN(s.groups, (size_t)STX_HEAD_GROUPS); g++) {
        stx_tensor *t = in->cached[g];
        if (!t) continue;
        s.kv[1 + g] = stx__kv_source_of(t, t, 0, t->dim[2] / 2);
        s.cached_rows = STX_MAX(s.cached_rows, s.kv[1 + g].rows);
    }
    s.S = s.cached_rows + s.kv[0].rows;
    return s;
}

/* Checks which fields are set. `cache` is nonzero for calls by stx_cache_attention,
   which passes the queries in qkv and the keys and values in kv, and which computes no
   gradient. */
static int stx__attention_check_form(stx_ctx *x, const stx_attention_in *in, int cache) {
    STX__CHECK(x, cache || !in->qkv || !in->kv || (!in->qkv->needs_grad && !in->cached[0]),
               STX_ERR_ARG,
               "stx_attention: kv with qkv: expected a qkv that requires no gradient, and no "
               "cached rows; otherwise, pass qkv alone");
    STX__CHECK(x, !in->qkv || (!in->q && !in->k && !in->v), STX_ERR_ARG,
               "stx_attention: q, k or v with qkv: expected qkv alone, since it contains them");
    STX__CHECK(x, !in->kv || (!in->k && !in->v), STX_ERR_ARG,
               "stx_attention: k or v with kv: expected either kv or both k and v");
    STX__CHECK(x, !in->cached[0] || (in->qkv && !in->kv), STX_ERR_ARG,
               "stx_attention: cached: expected qkv without kv; otherwise, pass the cached keys "
               "and values in kv, or in k and v");
    STX__CHECK(x, in->kv_rows ? in->kv != NULL : !in->kv_first, STX_ERR_ARG,
               "stx_attention: kv_first, kv_rows: expected both 0, or kv with kv_rows > 0, got "
               "%zu and %zu%s", in->kv_first, in->kv_rows, in->kv ? "" : " without kv");
    STX__CHECK(x, !in->kv_rows || cache || !in->kv->needs_grad, STX_ERR_ARG,
               "stx_attention: kv_rows: expected a kv that requires no gradient: use "
               "stx_detach, or set kv_rows = 0 to attend to all rows");
    return 1;
}

/* Checks the shape of the queries and the shapes of the keys and values of the block. */
static int stx__attention_check_block(stx_ctx *x, const stx_attention_in *in,
                                      const stx_attention_desc *d,
                                      const stx__attention_sources *s) {
    const stx_tensor *q = s->q, *k = s->kv[0].k, *v = s->kv[0].v;
    const size_t C = s->C, kv_width = in->kv ? 2 * C : C, H = d->heads;
    char of_q[96], of_k[96];
    STX__CHECK(x,
               q->ndim == 3 && k->ndim == 3 && q->dim[0] == k->dim[0]
                   && q->dim[2] == (in->qkv ? 3 : 1) * C
                   && ((in->qkv && !in->kv) || k->dim[2] == kv_width),
               STX_ERR_SHAPE,
               "stx_attention: expected q (B,T,C) with k and v (B,S,C) or with kv (B,S,2C), or "
               "qkv (B,T,3C); got %s %s and keys %s", in->qkv ? "qkv" : "q",
               stx__shape(q, of_q), stx__shape(k, of_k));
    STX__CHECK(x, stx__same(k, v), STX_ERR_SHAPE,
               "stx_attention: v: expected the shape of k, %s, got %s", stx__shape(k, of_k),
               stx__shape(v, of_q));
    STX__CHECK(x,
               s->kv[0].rows <= k->dim[1] && s->kv[0].first_row <= k->dim[1] - s->kv[0].rows,
               STX_ERR_ARG,
               "stx_attention: kv_first, kv_rows: expected a range within the %zu rows of kv, "
               "got %zu rows starting at row %zu", k->dim[1], s->kv[0].rows, s->kv[0].first_row);
    STX__CHECK(x, H >= 1 && H <= STX__MAX_HEADS && C % H == 0, STX_ERR_SHAPE,
               "stx_attention: heads: expected 1 to %d heads that divide the %zu channels, got %zu",
               (int)STX__MAX_HEADS, C, H);
    STX__CHECK(x, d->not_causal || s->S >= q->dim[1], STX_ERR_SHAPE,
               "stx_attention: causal attention requires at least as many keys as queries, got "
               "%zu keys and %zu queries", s->S, q->dim[1]);
    return 1;
}

static int stx__attention_check_cached(stx_ctx *x, const stx_attention_in *in,
                                       const stx_attention_desc *d,
                                       const stx__attention_sources *s) {
    const size_t B = s->q->dim[0], D = s->C / d->heads, groups = s->groups;
    size_t g, h, heads[STX_HEAD_GROUPS] = {0, 0, 0};
    char shape[96];
    if (!in->cached[0]) return 1;
    STX__CHECK(x, !d->not_causal, STX_ERR_ARG,
               "stx_attention: cached: expected causal attention, got not_causal = 1");
    STX__CHECK(x, groups >= 1 && groups <= STX_HEAD_GROUPS, STX_ERR_ARG,
               "stx_attention: groups: expected 1 to %d, got %zu", (int)STX_HEAD_GROUPS, groups);
    STX__CHECK(x,
               groups == 1
                   || (in->span_fraction && !(d->eps > 0) && !d->no_renorm && d->first_key >= 0),
               STX_ERR_ARG,
               "stx_attention: groups: %zu groups require a learned span (span_fraction) "
               "without eps, no_renorm or a negative first_key", groups);
    for (h = 0; h < d->heads; h++) {
        g = in->groups ? in->groups->of[h] : 0;
        STX__CHECK(x, g < groups, STX_ERR_ARG,
                   "stx_attention: groups: head %zu: expected a group below %zu, got %zu", h,
                   groups, g);
        heads[g]++;
    }
    for (g = 0; g < groups; g++) {
        const stx_tensor *t = in->cached[g];
        STX__CHECK(x, heads[g], STX_ERR_SHAPE,
                   "stx_attention: groups: expected at least one head in group %zu, got none", g);
        STX__CHECK(x, t && t->ndim == 3 && t->dim[0] == B && t->dim[2] == 2 * D * heads[g],
                   STX_ERR_SHAPE,
                   "stx_attention: cached[%zu]: expected (%zu,rows,%zu), the keys and values of "
                   "all heads of the group, got %s", g, B, 2 * D * heads[g],
                   t ? stx__shape(t, shape) : "NULL");
    }
    return 1;
}

/* Checks the optional inputs and the fields of the desc that are related to them. */
static int stx__attention_check_options(stx_ctx *x, const stx_attention_in *in,
                                        const stx_attention_desc *d,
                                        const stx__attention_sources *s) {
    const size_t C = s->C, H = d->heads, D = C / H, B = s->q->dim[0];
    const stx_tensor *z = in->span_fraction, *pe = in->pe, *bias[2];
    const stx_tensor *pk = in->persistent_k, *pv = in->persistent_v;
    char shape[96], shape_v[96];
    int i;
    STX__CHECK(x, !z || z->size == H || z->size == 1, STX_ERR_ARG,
               "stx_attention: span_fraction: expected (%zu), one element per head, or (1), "
               "got %s", H, stx__shape(z, shape));
    STX__CHECK(x, !z || (d->ramp > 0 && d->max_span > 0), STX_ERR_ARG,
               "stx_attention: span_fraction requires max_span > 0 and ramp > 0, got %g and %g",
               d->max_span, d->ramp);
    STX__CHECK(x, !d->not_causal || (!z && !pe && !d->span && d->first_key >= 0), STX_ERR_ARG,
               "stx_attention: not_causal cannot be combined with span_fraction, pe, span or a "
               "negative first_key, which depend on distances");
    STX__CHECK(x, !pe || (pe->ndim == 2 && (pe->dim[1] == D || pe->dim[1] == C)), STX_ERR_SHAPE,
               "stx_attention: pe: expected shape (P,%zu) or (P,%zu), got %s", D, C,
               stx__shape(pe, shape));
    bias[0] = in->content_bias;
    bias[1] = in->position_bias;
    for (i = 0; i < 2; i++)
        STX__CHECK(x, !bias[i] || bias[i]->size == C, STX_ERR_SHAPE,
                   "stx_attention: %s: expected (%zu), got %s",
                   i ? "position_bias" : "content_bias", C, stx__shape(bias[i], shape));
    STX__CHECK(x, !in->position_bias || pe, STX_ERR_SHAPE,
               "stx_attention: position_bias requires pe, got pe = NULL");
    STX__CHECK(x, !pk == !pv, STX_ERR_SHAPE,
               "stx_attention: persistent_k, persistent_v: expected both or neither, got only %s",
               pk ? "persistent_k" : "persistent_v");
    STX__CHECK(x,
               !pk || (pk->ndim == 3 && pk->dim[0] == H && pk->dim[2] == D && stx__same(pk, pv)),
               STX_ERR_SHAPE,
               "stx_attention: persistent_k, persistent_v: expected equal shapes "
               "(H,N,D) = (%zu,N,%zu), got %s and %s", H, D, stx__shape(pk, shape),
               stx__shape(pv, shape_v));
    STX__CHECK(x, !in->pad || (in->pad->B == B && in->pad->T == s->S), STX_ERR_SHAPE,
               "stx_attention: pad: expected one flag per key, (B,S) = (%zu,%zu), got (%zu,%zu)",
               B, s->S, in->pad->B, in->pad->T);
    return 1;
}

/* Runs all checks of an attention call. Returns 1, or 0 after an error. */
static int stx__attention_check(stx_ctx *x, const stx_attention_in *in,
                                const stx_attention_desc *d, const stx__attention_sources *s,
                                int cache) {
    if (!stx__attention_check_form(x, in, cache) || !stx__attention_check_block(x, in, d, s)
        || !stx__attention_check_cached(x, in, d, s)
        || !stx__attention_check_options(x, in, d, s))
        return 0;
    if (!(d->dropout >= 0 && d->dropout < 1))
        return stx_bad_value(x, "stx_attention", "dropout", d->dropout, "at least 0 and below 1");
    if (d->delta_min != 0 && d->delta_min != 1)
        return stx_bad_value(x, "stx_attention", "delta_min", d->delta_min, "0 or 1");
    if (!(d->eps >= 0)) return stx_bad_value(x, "stx_attention", "eps", d->eps, "0 or more");
    if (d->no_renorm && d->eps > 0)
        return stx_bad_value(x, "stx_attention", "eps with no_renorm", d->eps,
                             "0, since eps is used only in the renormalisation");
    return 1;
}

/* Sets the pointers and strides of the queries, keys and values. */
static void stx__attention_resolve_sources(stx_ctx *x, const stx_attention_in *in,
                                           const stx__attention_sources *s,
                                           stx_attention_args *a) {
    const stx__kv_source *kv = &s->kv[0];
    size_t g, h, heads[STX_HEAD_GROUPS] = {0, 0, 0};
    a->q = s->q->data;
    a->q_row_stride = s->q->dim[2];
    a->q_batch_stride = a->T * a->q_row_stride;
    a->k = stx_offset_ptr(x, kv->k->data, kv->first_row * kv->row_stride + kv->k_offset);
    a->v = stx_offset_ptr(x, kv->v->data, kv->first_row * kv->row_stride + kv->v_offset);
    a->kv_row_stride = kv->row_stride;
    a->kv_batch_stride = kv->batch_stride;

    a->groups = s->groups;
    a->cached_rows = s->cached_rows;
    for (g = 0; g < s->groups; g++) {
        stx_attention_kv *c = &a->cached[g];
        kv = &s->kv[1 + g];
        c->k = stx_offset_ptr(x, kv->k->data, kv->k_offset);
        c->v = stx_offset_ptr(x, kv->v->data, kv->v_offset);
        c->rows = kv->rows;
        c->row_stride = kv->row_stride;
        c->batch_stride = kv->batch_stride;
    }
    for (h = 0; s->groups && h < a->H; h++) {
        g = in->groups ? in->groups->of[h] : 0;
        a->head_group[h] = (uint8_t)g;
        a->head_index[h] = (uint8_t)heads[g]++;
    }
}

/* Sets first_key, span and pe, which determine the keys that a query sees. */
static void stx__attention_resolve_range(const stx_attention_in *in, const stx_attention_desc *d,
                                         stx_attention_args *a) {
    const size_t zero_keys = stx__zero_keys(d->first_key);
    a->delta_min = d->delta_min;
    a->not_causal = d->not_causal;
    a->first_key = STX_MIN(d->first_key, (ptrdiff_t)a->S); /* S: no key is visible */
    a->span = a->S + zero_keys;                            /* all keys; limited below */
    if (d->span && d->span < a->span) a->span = d->span;
    if (in->pe) {
        a->P = in->pe->dim[0];
        a->pe_heads = in->pe->dim[1] == a->D ? 1 : (int)a->H;
        a->pe = in->pe->data;
        /* keys at distances for which pe has no row are not visible */
        if (a->P) a->span = STX_MIN(a->span, a->P + (size_t)d->delta_min - 1);
    }
    /* zero keys that no query can reach are dropped */
    if (zero_keys > a->span) a->first_key = -(ptrdiff_t)a->span;
}

/* Sets all fields of *a that follow from the arguments of the call. Outputs, dropout
   and gradients remain zero. */
static void stx__attention_resolve(stx_ctx *x, const stx_attention_in *in,
                                   const stx_attention_desc *d, const stx__attention_sources *s,
                                   stx_attention_args *a) {
    memset(a, 0, sizeof *a);
    a->B = s->q->dim[0];
    a->T = s->q->dim[1];
    a->S = s->S;
    a->H = d->heads;
    a->D = s->C / d->heads;
    stx__attention_resolve_sources(x, in, s, a);
    stx__attention_resolve_range(in, d, a);
    a->scale = (stx_real)(d->scale != 0 ? d->scale : 1 / sqrt((double)a->D));
    a->max_span = (stx_real)d->max_span;
    a->ramp = (stx_real)d->ramp;
    a->eps = (stx_real)d->eps;
    if (in->content_bias) a->content_bias = in->content_bias->data;
    if (in->position_bias) a->position_bias = in->position_bias->data;
    if (in->span_fraction) {
        a->span_fraction = in->span_fraction->data;
        a->span_shared = in->span_fraction->size != a->H;
        a->no_renorm = d->no_renorm != 0; /* has no effect without span_fraction */
    }
    if (in->persistent_k) {
        a->N = in->persistent_k->dim[1];
        a->persistent_k = in->persistent_k->data;
        a->persistent_v = in->persistent_v->data;
    }
    if (in->pad) {
        a->pad = in->pad->device;
        a->pad_batch_stride = a->S;
    }
}

static void stx__attention_record(stx_ctx *x, stx_tensor *y, const stx_attention_in *in,
                                  const stx__attention_sources *s, stx_attention_args *a) {
    stx_tensor *ins[STX__INS] = {0};
    stx__node *node;
    size_t g;
    ins[STX__ATTENTION_Q] = s->q;
    /* a nonzero offset means that the tensor is already an input, as q or as k */
    ins[STX__ATTENTION_K] = s->kv[0].k_offset ? NULL : s->kv[0].k;
    ins[STX__ATTENTION_V] = s->kv[0].v_offset ? NULL : s->kv[0].v;
    ins[STX__ATTENTION_PE] = in->pe;
    ins[STX__ATTENTION_CONTENT_BIAS] = in->content_bias;
    ins[STX__ATTENTION_POSITION_BIAS] = in->position_bias;
    ins[STX__ATTENTION_SPAN_FRACTION] = in->span_fraction;
    ins[STX__ATTENTION_PERSISTENT_K] = in->persistent_k;
    ins[STX__ATTENTION_PERSISTENT_V] = in->persistent_v;
    for (g = 0; g < s->groups; g++) ins[STX__ATTENTION_CACHED + g] = s->kv[1 + g].k;
    node = stx__record(x, y, stx__attention_back, ins, STX__INS);
    if (node) node->save = a;
}

/* Fills in the record of a call. The first run of stx_recompute records no nodes. */
static void stx__attention_note(const stx_ctx *x, const stx_attention_args *a,
                                stx_attention_record *r) {
    r->args = a;
    r->step = x->tape.steps_begun;
    r->recomputed = stx_training(x) && (!x->tape.recording || x->tape.recompute_mark);
}

/* kv_batch_stride is the number of elements between the batch rows of k, v or kv if these
   are views of the longer buffers of stx_cache_attention, and 0 in all other calls. */
static stx_tensor *stx__attention(stx_ctx *x, const stx_attention_in *in,
                                  const stx_attention_desc *d, size_t kv_batch_stride) {
    STX__FP_SCOPE;
    stx__attention_sources s;
    stx_attention_args *a;
    stx_tensor *y;
    size_t dim[3], rows;
    if (!stx_ok(x) || !in || !d) return NULL;
    if (!in->qkv && (!in->q || (!in->kv && (!in->k || !in->v)))) return NULL;
    s = stx__attention_sources_of(in, kv_batch_stride);
    if (!stx__attention_check(x, in, d, &s, kv_batch_stride != 0)) return NULL;

    dim[0] = s.q->dim[0];
    dim[1] = s.q->dim[1];
    dim[2] = s.C;
    y = stx__tensor(x, stx__step_kind(s.q->is_f32), 3, dim);
    a = (stx_attention_args *)stx_step_host_bytes(x, sizeof *a);
    if (!y || !a) return NULL;
    stx__attention_resolve(x, in, d, &s, a);
    rows = a->B * a->H * a->T;
    a->y = y->data;
    a->row_max = (stx_real *)stx_step_device_bytes(x, 2 * rows * sizeof(stx_real));
    if (!a->row_max) return NULL;
    a->inv_sum = a->row_max + rows;
    if (stx_training(x) && d->dropout > 0) {
        a->drop = (stx_real)d->dropout;
        a->seed = x->desc.seed;
        a->stream = stx__stream(x);
        a->rng_first = (uint64_t)stx_batch_share(x) * rows * stx__attn_philox_calls(a);
    }
    stx_attention_run(x, a);
    stx__attention_record(x, y, in, &s, a);
    if (!stx_ok(x)) return NULL;
    if (in->args_out) *in->args_out = a;
    if (in->record) stx__attention_note(x, a, in->record);
    return y;
}

STX_DEF stx_tensor *stx_attention(stx_ctx *x, const stx_attention_in *in,
                                  const stx_attention_desc *d) {
    return stx__attention(x, in, d, 0);
}
