#pragma once
#include "../api/config.h"
#include "../api/context.h"
#include "../api/ops.h"
#include "../api/private.h"
#include "../core/loops.h"
#include "../core/platform.h"
#include "../core/context.h"
#include "../core/arena.h"
#include "../core/tensors.h"
#include "../core/tape.h"
#include "../gemm/blocked.h"
#include "../gemm/run.h"
#include "elementwise.h"
#include "shape.h"


// >>linear

typedef struct stx__linear_save {
    stx_real *pre;      /* `in` W^T + b, the input of GELU; NULL for other activations */
    int act;
} stx__linear_save;

/* Returns the flags for stx_linear_bwd_args.deferred: the gradient sums of W and b can
   be deferred if these tensors are parameters or views of parameters. */
static int stx__linear_deferred(const stx_tensor *W, const stx_tensor *b) {
    return (b && stx__has_param_grad(b) ? STX_DEFER_DB : 0)
           | (stx__has_param_grad(W) ? STX_DEFER_DW : 0);
}

static void stx__linear_back(stx_ctx *x, stx__node *n) {
    const stx__linear_save *s = (const stx__linear_save *)n->save;
    stx_tensor *in = n->in[0], *W = n->in[1], *b = n->in[2];
    stx_linear_bwd_args a;
    int fresh;
    memset(&a, 0, sizeof a);
    a.N = stx__rows(in);
    a.Ci = stx__last(in);
    a.O = stx__last(n->y);
    a.padding = a.O - W->dim[0];
    a.act = s->act;
    a.dx = stx__grad_fresh(x, in, &fresh);
    a.accumulate = !fresh;
    a.dW = stx__grad(x, W);
    a.db = stx__grad(x, b);
    a.da = n->y->grad;                  /* da overwrites dy, which is not read again */
    a.y = n->y->data;
    a.pre = s->pre;
    a.in = in->data;
    a.W = W->data;
    a.deferred = stx__linear_deferred(W, b);
    STX_RUN(x, stx_linear_bwd, (x, &a));
}

/* stx_linear with `padding` additional outputs (see "Padded logits" in >>adaptive input
   and output). For these outputs, W and b are followed by zeros (tensor.padding), and
   the gradients of these zeros must be zero. */
static stx_tensor *stx__linear_padded(stx_ctx *x, stx_tensor *in, stx_tensor *W, stx_tensor *b,
                                      int act, size_t padding) {
    stx_linear_args a;
    stx__linear_save s;
    stx_tensor *y, *ins[3];
    stx__node *node;
    char t[96], u[96];
    if (!stx_ok(x) || !in || !W) return NULL;
    STX__NEED(x, W->ndim == 2 && stx__last(in) == W->dim[1], STX_ERR_SHAPE,
              "stx_linear: expected an input (..,Ci) and a weight (O,Ci), got input %s and weight "
              "%s", stx__shape(in, t), stx__shape(W, u));
    STX__NEED(x, !b || b->size == W->dim[0], STX_ERR_SHAPE,
              "stx_linear: bias: expected one element per output of the weight %s, got %zu",
              stx__shape(W, t), b->size);
    STX__NEED(x, act >= STX_ACT_NONE && act <= STX_ACT_SIGMOID, STX_ERR_ARG,
              "stx_linear: act: expected one of STX_ACT_*, got %d", act);

    memset(&a, 0, sizeof a);
    a.N = stx__rows(in);
    a.Ci = W->dim[1];
    a.O = W->dim[0] + padding;
    a.act = act;
    a.in = in->data;
    a.W = W->data;
    a.b = b ? b->data : NULL;
    y = stx__new_channels(x, in, a.O);
    if (!y) return NULL;
    a.y = y->data;

    ins[0] = in;
    ins[1] = W;
    ins[2] = b;
    node = stx__record(x, y, stx__linear_back, ins, 3);
    if (node && act == STX_ACT_GELU) {
        a.pre = stx_step_activations(x, y->size);
        if (!a.pre) return NULL;
    }
    s.pre = a.pre;
    s.act = act;
    if (!stx__save(x, node, &s, sizeof s)) return NULL;
    STX_RUN(x, stx_linear_fwd, (x, &a));
    return y;
}

STX_DEF stx_tensor *stx_linear(stx_ctx *x, stx_tensor *in, stx_tensor *W, stx_tensor *b, int act) {
    return stx__linear_padded(x, in, W, b, act, 0);
}

/* Backward of Y (B,S,O) = X W^T + b, where the last T rows of X are h:
       dh += (the last T rows of dY) W ; dW += dY^T X ; db += sum of the rows of dY */
static void stx__linear_memory_back(stx_ctx *x, stx__node *n) {
    const stx_tensor *X = *(stx_tensor *const *)n->save;
    stx_tensor *h = n->in[0], *W = n->in[1], *b = n->in[2];
    const size_t B = X->dim[0], S = X->dim[1], T = h->dim[1], Ci = W->dim[1], O = W->dim[0];
    stx_real *dh, *dy = n->y->grad;
    stx_linear_bwd_args a;
    int fresh;
    dh = stx__grad_fresh(x, h, &fresh);
    if (dh) {
        stx_gemm_args g;
        g = stx_gemm_init(0, 0, T, Ci, O, stx_offset_ptr(x, dy, (S - T) * O), W->data, dh);
        g.batch = B;
        g.sa = S * O;
        g.sb = 0;
        g.beta = (stx_real)!fresh;
        STX_RUN(x, stx_gemm, (x, &g));
    }

    memset(&a, 0, sizeof a);
    a.N = B * S;
    a.Ci = Ci;
    a.O = O;
    a.da = dy;
    a.in = X->data;
    a.W = W->data;
    a.dW = stx__grad(x, W);
    a.db = stx__grad(x, b);
    a.deferred = stx__linear_deferred(W, b);
    if (a.dW || a.db) STX_RUN(x, stx_linear_bwd, (x, &a));
}

STX_DEF stx_tensor *stx_linear_memory(stx_ctx *x, stx_tensor *X, stx_tensor *h, stx_tensor *W,
                                      stx_tensor *b) {
    stx_linear_args a;
    stx_tensor *y, *ins[3];
    stx__node *node;
    char s[96], t[96], u[96];
    if (!stx_ok(x) || !X || !h || !W) return NULL;
    STX__NEED(x,
              W->ndim == 2 && X->ndim == 3 && h->ndim == 3 && X->dim[2] == W->dim[1]
                  && h->dim[2] == W->dim[1] && X->dim[0] == h->dim[0] && X->dim[1] >= h->dim[1],
              STX_ERR_SHAPE,
              "stx_linear_memory: expected X (B,S,Ci), h (B,T,Ci) with T <= S and W (O,Ci), got X "
              "%s, h %s and W %s", stx__shape(X, s), stx__shape(h, t), stx__shape(W, u));
    STX__NEED(x, !b || b->size == W->dim[0], STX_ERR_SHAPE,
              "stx_linear_memory: bias: expected one element per output of the weight %s, got %zu",
              stx__shape(W, s), b->size);
    y = stx_new(x, X->dim[0], X->dim[1], W->dim[0], 0);
    if (!y) return NULL;

    memset(&a, 0, sizeof a);
    a.N = X->dim[0] * X->dim[1];
    a.Ci = W->dim[1];
    a.O = W->dim[0];
    a.in = X->data;
    a.W = W->data;
    a.b = b ? b->data : NULL;
    a.y = y->data;
    STX_RUN(x, stx_linear_fwd, (x, &a));
    ins[0] = h;
    ins[1] = W;
    ins[2] = b;
    node = stx__record(x, y, stx__linear_memory_back, ins, 3);
    return stx__save(x, node, &X, sizeof X) ? y : NULL;
}

/* If `count` parameters of equal width are adjacent in memory, and so are their
   gradients unless they are frozen, returns a view of all of them as one tensor.
   Otherwise, returns NULL. */
static stx_tensor *stx__adjacent(stx_ctx *x, stx_tensor *const *t, int count) {
    stx_tensor *y;
    size_t n = t[0]->size, rows = t[0]->dim[0];
    int i;
    if (count == 1) return t[0];
    for (i = 0; i < count; i++) {
        if (!stx__has_param_grad(t[i]) || t[i]->needs_grad != t[0]->needs_grad
            || stx__packed_at(x, t[i]->data))
            return NULL;
        if (!i) continue;
        if (t[i]->data != stx_offset_ptr(x, t[0]->data, n)) return NULL;
        if (t[0]->needs_grad
            && stx__param_grad(x, t[i]) != stx_offset_ptr(x, stx__param_grad(x, t[0]), n))
            return NULL;
        n += t[i]->size;
        rows += t[i]->dim[0];
    }
    y = stx__view(x, t[0]);
    if (!y) return NULL;
    y->dim[0] = rows;
    y->size = n;
    (void)stx__view_of_param(x, y, t[0], 0);
    return y;
}

/* If all weights are adjacent in memory, and so are all biases, returns the weights as
   one tensor and sets *bias to the biases as one tensor, or to NULL if there are none.
   Otherwise, returns NULL. */
static stx_tensor *stx__adjacent_linears(stx_ctx *x, stx_tensor *const *W, stx_tensor *const *b,
                                         int count, stx_tensor **bias) {
    stx_tensor *w = stx__adjacent(x, W, count);
    *bias = NULL;
    if (!b || !b[0]) return w;
    *bias = stx__adjacent(x, b, count);
    return *bias ? w : NULL;
}

/* Checks that all W are matrices (O,Ci) and that either all or none of them have a bias
   in b. If Ci is 0, any common width is accepted. */
static int stx__linears_fit(stx_ctx *x, const char *op, stx_tensor *const *W, stx_tensor *const *b,
                            int count, size_t Ci) {
    char s[96];
    int i;
    if (count < 1) {
        stx_fail(x, STX_ERR_ARG, "%s: expected at least one weight, got %d", op, count);
        return 0;
    }
    for (i = 0; i < count; i++)
        if (!W[i]) return 0;
    if (!Ci && W[0]->ndim != 2) {
        stx_fail(x, STX_ERR_SHAPE, "%s: weight 0: expected shape (O,Ci), got %s", op,
                 stx__shape(W[0], s));
        return 0;
    }
    if (!Ci) Ci = W[0]->dim[1];
    for (i = 0; i < count; i++) {
        if (W[i]->ndim != 2 || W[i]->dim[1] != Ci) {
            stx_fail(x, STX_ERR_SHAPE, "%s: weight %d: expected shape (O,%zu), got %s", op, i, Ci,
                     stx__shape(W[i], s));
            return 0;
        }
        if (!b) continue;
        if (!b[0] != !b[i]) {
            stx_fail(x, STX_ERR_SHAPE,
                     "%s: bias %d: expected a bias for each weight or for none, got %s", op, i,
                     b[i] ? "a tensor, but bias 0 is NULL" : "NULL, but bias 0 is a tensor");
            return 0;
        }
        if (b[i] && b[i]->size != W[i]->dim[0]) {
            stx_fail(x, STX_ERR_SHAPE,
                     "%s: bias %d: expected one element per output of the weight %s, got %zu", op,
                     i, stx__shape(W[i], s), b[i]->size);
            return 0;
        }
    }
    return 1;
}

STX_DEF stx_tensor *stx_linear_concat(stx_ctx *x, stx_tensor *in, stx_tensor *const *W,
                                      stx_tensor *const *b, int count) {
    stx_tensor *y, *w, *bias;
    int i;
    if (!stx_ok(x) || !in || !W) return NULL;
    if (!stx__linears_fit(x, "stx_linear_concat", W, b, count, stx__last(in))) return NULL;
    w = stx__adjacent_linears(x, W, b, count, &bias);
    if (w) return stx_linear(x, in, w, bias, STX_ACT_NONE);
    y = stx_linear(x, in, W[0], b ? b[0] : NULL, STX_ACT_NONE);
    for (i = 1; i < count; i++)
        y = stx_concat_channels(x, y, stx_linear(x, in, W[i], b ? b[i] : NULL, STX_ACT_NONE));
    return y;
}

/* The cached rows that a linear layer reads, in the order part[0], part[1] and so
   on. */
typedef struct stx__linear_cached_save {
    stx_cached_rows part[STX_MAX_CACHED];   /* parts without rows are omitted */
    int parts;
    size_t B, m;                            /* number of streams; rows per stream */
} stx__linear_cached_save;

/* Returns nonzero if a single GEMM computes all rows. This must not depend on where the
   rows are stored: loading a checkpoint can make previously scattered rows contiguous,
   and the result of the step must still be bit-identical. */
static int stx__cached_in_one(const stx__linear_cached_save *s) {
    return s->parts == 1 && s->B == 1;
}

/* Backward of y = X W^T + b: dW += dy^T X, with one batched GEMM per part ; db += sum
   of the rows of dy */
static void stx__linear_cached_back(stx_ctx *x, stx__node *n) {
    const stx__linear_cached_save *s = (const stx__linear_cached_save *)n->save;
    const int in_one = stx__cached_in_one(s);
    stx_tensor *W = n->in[0], *b = n->in[1];
    stx_linear_bwd_args a;
    size_t at = 0;
    int i;
    memset(&a, 0, sizeof a);
    a.N = s->B * s->m;
    a.Ci = W->dim[1];
    a.O = W->dim[0];
    a.da = n->y->grad;
    a.in = s->part[0].data;
    a.W = W->data;
    a.dW = stx__grad(x, W);
    a.db = stx__grad(x, b);
    a.deferred = stx__linear_deferred(W, b);

    for (i = 0; !in_one && a.dW && i < s->parts; i++) {
        stx_linear_bwd_args part = a;
        part.N = s->part[i].rows;
        part.batch = s->B;
        part.sda = s->m * a.O;
        part.sin = s->part[i].stride;
        part.da = stx_offset_ptr(x, a.da, at * a.O);
        part.in = s->part[i].data;
        part.db = NULL;
        STX_RUN(x, stx_linear_bwd, (x, &part));
        at += s->part[i].rows;
    }
    if (!in_one) a.dW = NULL;
    if (a.dW || a.db) STX_RUN(x, stx_linear_bwd, (x, &a));
}

static stx_tensor *stx__linear_cached(stx_ctx *x, const stx__linear_cached_save *s, stx_tensor *W,
                                      stx_tensor *b) {
    const size_t Ci = W->dim[1], O = W->dim[0], N = s->B * s->m;
    stx_tensor *y = stx_new(x, s->B, s->m, O, 0);
    stx__node *node;
    size_t at = 0;
    int i;
    if (!y) return NULL;
    node = stx__record2(x, y, stx__linear_cached_back, W, b);
    if (!stx__save(x, node, s, sizeof *s)) return NULL;

    if (stx__cached_in_one(s)) {
        stx_linear_args a;
        memset(&a, 0, sizeof a);
        a.N = N;
        a.Ci = Ci;
        a.O = O;
        a.in = s->part[0].data;
        a.W = W->data;
        a.b = b ? b->data : NULL;
        a.y = y->data;
        STX_RUN(x, stx_linear_fwd, (x, &a));
        return y;
    }

    for (i = 0; i < s->parts; i++) {
        const stx_cached_rows *p = &s->part[i];
        stx_real *to = stx_offset_ptr(x, y->data, at * O);
        stx_gemm_args g = stx_gemm_init(0, 1, p->rows, O, Ci, p->data, W->data, to);
        g.batch = s->B;
        g.sa = p->stride;
        g.sb = 0;
        g.sc = s->m * O;
        STX_RUN(x, stx_gemm, (x, &g));
        at += p->rows;
    }
    if (b) STX_RUN(x, stx_bias_act_fwd, (x, y->data, NULL, b->data, N, O, STX_ACT_NONE));
    return y;
}

/* Checks that cached rows of width Ci have data and, for B > 1 streams, a sufficient
   stride. */
static int stx__cached_rows_ok(stx_ctx *x, const char *op, int part, const stx_cached_rows *rows,
                               size_t B, size_t Ci) {
    if (!rows->data) {
        stx_fail(x, STX_ERR_ARG, "%s: cached rows %d: expected data for %zu rows, got NULL", op,
                 part, rows->rows);
        return 0;
    }
    if (B > 1 && rows->stride < rows->rows * Ci) {
        stx_fail(x, STX_ERR_ARG,
                 "%s: cached rows %d: expected a stride of at least %zu elements (%zu rows of "
                 "width %zu), got %zu", op, part, rows->rows * Ci, rows->rows, Ci, rows->stride);
        return 0;
    }
    return 1;
}

STX_DEF stx_tensor *stx_linear_cached(stx_ctx *x, const stx_cached_rows *past, int parts, size_t B,
                                      stx_tensor *const *W, stx_tensor *const *b, int count) {
    const char *op = "stx_linear_cached";
    stx__linear_cached_save s;
    stx_tensor *y = NULL, *w, *bias;
    int i;
    if (!stx_ok(x) || !W || (parts && !past)) return NULL;
    STX__NEED(x, B && parts >= 0 && parts <= STX_MAX_CACHED, STX_ERR_ARG,
              "%s: expected 0 to %d arrays of cached rows and at least one stream, got parts = %d "
              "and B = %zu", op, (int)STX_MAX_CACHED, parts, B);
    if (!stx__linears_fit(x, op, W, b, count, 0)) return NULL;

    memset(&s, 0, sizeof s);
    s.B = B;
    for (i = 0; i < parts; i++) {
        if (!past[i].rows) continue;
        if (!stx__cached_rows_ok(x, op, i, &past[i], B, W[0]->dim[1])) return NULL;
        s.part[s.parts++] = past[i];
        s.m += past[i].rows;
    }
    if (!s.m) return NULL;

    w = stx__adjacent_linears(x, W, b, count, &bias);
    if (w) return stx__linear_cached(x, &s, w, bias);
    for (i = 0; i < count; i++) {
        stx_tensor *part = stx__linear_cached(x, &s, W[i], b ? b[i] : NULL);
        y = y ? stx_concat_channels(x, y, part) : part;
    }
    return y;
}

/* The distinct windows of the heads, in descending order, and the number of heads with
   each window. */
typedef struct stx__windows {
    size_t count, rows[256], heads[256];
} stx__windows;

static void stx__windows_of(stx__windows *w, const size_t *need, size_t heads, size_t m) {
    size_t h, i, k;
    w->count = 0;
    for (h = 0; h < heads; h++) {
        const size_t rows = STX_MIN(m, (STX_MAX(need[h], 1) + 63) / 64 * 64);
        for (i = 0; i < w->count && w->rows[i] > rows; i++) {
        }
        if (i == w->count || w->rows[i] != rows) {
            for (k = w->count++; k > i; k--) {
                w->rows[k] = w->rows[k - 1];
                w->heads[k] = w->heads[k - 1];
            }
            w->rows[i] = rows;
            w->heads[i] = 0;
        }
        w->heads[i]++;
    }
}

STX_DEF void stx_head_groups_choose(const size_t *need, size_t heads, size_t m,
                                    stx_head_groups *g) {
    stx__windows w;
    size_t second, third, best, cost, h, i, j, k;
    memset(g, 0, sizeof *g);
    g->count = 1;
    g->rows[0] = m;
    if (!m || heads > 256) return;

    /* the groups consist of the windows [0,second), [second,third) and [third,count) */
    stx__windows_of(&w, need, heads, m);
    second = third = w.count;
    best = m * heads;
    for (i = 1; i < w.count; i++)
        for (j = i + 1; j <= w.count; j++) {
            cost = 64 * heads * (j < w.count ? 2 : 1);
            for (k = 0; k < i; k++) cost += w.heads[k] * m;
            for (k = i; k < j; k++) cost += w.heads[k] * w.rows[i];
            for (k = j; k < w.count; k++) cost += w.heads[k] * w.rows[j];
            if (cost >= best) continue;
            best = cost;
            second = i;
            third = j;
        }
    if (second < w.count) g->rows[g->count++] = w.rows[second];
    if (third < w.count) g->rows[g->count++] = w.rows[third];

    /* a head belongs to the last group whose window is long enough */
    for (h = 0; h < heads; h++)
        for (i = 0; i < g->count; i++)
            if (i == 0 || STX_MIN(m, need[h]) <= g->rows[i]) g->of[h] = (uint8_t)i;
}

/* In the forward pass (dy is NULL), copies blocks of a and b to blocks [begin,end) of
   y. In the backward pass, adds blocks [begin,end) of dy to da and db. */
static void stx__heads_part(const stx_share *s, const void *job) {
    const stx__heads_args *h = (const stx__heads_args *)job;
    size_t i, c;
    for (i = s->begin; i < s->end; i++) {
        const int second = h->of[i] >= h->half;
        const size_t at = (h->of[i] - (second ? h->half : 0)) * h->n;
        stx_real *d = second ? h->db : h->da;
        if (!h->dy)
            memcpy(h->y + i * h->n, (second ? h->b : h->a) + at, h->n * sizeof *h->y);
        else
            for (c = 0; d && c < h->n; c++) d[at + c] += h->dy[i * h->n + c];
    }
}

static void stx__heads_fwd(stx_ctx *x, const stx__heads_args *h) {
    stx__heads_args job = *h;
    size_t k;
    job.dy = NULL;
    stx_parallel(x, h->count, h->count * h->n, stx__heads_part, &job);
    for (k = 0; k < STX_HEAD_GROUPS; k++)
        if (h->len[k])
            stx_copy2d(x, h->to[k], h->len[k], h->from[k], h->stride, h->B, h->len[k], 0);
}

static void stx__heads_bwd(stx_ctx *x, const stx__heads_args *h) {
    stx_parallel(x, h->count, h->count * h->n, stx__heads_part, h);
}

/* Data for the backward pass of the linear layer that computes the keys and values of
   each group g of heads. Its output is y_g = X_g W_g^T, where W_g consists of the rows
   of wk and wv for the group's heads, keys first. The backward pass computes dW_g =
   dy_g^T X_g and adds its rows to the gradients of wk and wv. */
typedef struct stx__linear_heads_save {
    stx__heads_args h;                  /* the order of the heads, and the copied rows */
    size_t B, Ci, count;
    size_t rows[STX_HEAD_GROUPS];       /* cached rows per stream that the group reads */
    size_t O[STX_HEAD_GROUPS];          /* number of channels of y */
    stx_tensor *y[STX_HEAD_GROUPS];     /* (B,rows,O) */
    stx_cached_rows X[STX_HEAD_GROUPS]; /* (B,rows,Ci) */
} stx__linear_heads_save;

/* Runs the GEMM of group g: y = X W^T or, if dW is not NULL, dW = dy^T X. If the rows
   were copied (h.len is not 0), the rows of all streams form one matrix. */
static void stx__linear_heads_gemm(stx_ctx *x, const stx__linear_heads_save *s, size_t g,
                                   const stx_real *W, stx_real *dW) {
    const size_t rows = s->rows[g], O = s->O[g], Ci = s->Ci, at_once = s->h.len[g] ? s->B : 1;
    stx_gemm_args a;
    if (dW) {
        a = stx_gemm_init(1, 0, O, Ci, at_once * rows, s->y[g]->grad, s->X[g].data, dW);
        a.sa = rows * O;
        a.sb = s->X[g].stride;
        a.sc = 0;
    } else {
        a = stx_gemm_init(0, 1, at_once * rows, O, Ci, s->X[g].data, W, s->y[g]->data);
        a.sa = s->X[g].stride;
        a.sb = 0;
    }
    a.batch = s->B / at_once;
    STX_RUN(x, stx_gemm, (x, &a));
}

static void stx__linear_heads_back(stx_ctx *x, stx__node *n) {
    stx__linear_heads_save *s = (stx__linear_heads_save *)n->save;
    const size_t size = s->h.n * s->h.count;
    size_t g, at = 0;
    stx_real *dW;
    s->h.da = stx__grad(x, n->in[0]);
    s->h.db = stx__grad(x, n->in[1]);
    dW = stx__grad_take(x, size, 1);
    if (!dW || x->error.code || (!s->h.da && !s->h.db)) return;
    for (g = 0; g < s->count; at += s->O[g++] * s->Ci) {
        if (s->y[g]->grad)
            stx__linear_heads_gemm(x, s, g, NULL, dW + at);
        else
            STX_RUN(x, stx_fill, (x, dW + at, s->O[g] * s->Ci, 0));
    }
    s->h.dy = dW;
    STX_RUN(x, stx__heads_bwd, (x, &s->h));
    stx__grad_give(x, dW, size, 1);
}

static int stx__linear_heads_ok(stx_ctx *x, const stx_cached_rows *past, size_t B, stx_tensor *wk,
                                stx_tensor *wv, size_t heads, const stx_head_groups *g) {
    const char *op = "stx_linear_heads";
    stx_tensor *w[2];
    char s[96], t[96];
    w[0] = wk;
    w[1] = wv;
    if (!stx__linears_fit(x, op, w, NULL, 2, 0)) return 0;
    if (!B || !heads || heads > 256 || wk->dim[0] % heads || !stx__same(wk, wv)) {
        stx_fail(x, STX_ERR_SHAPE,
                 "%s: expected at least one stream, and wk and wv of equal shape whose rows divide "
                 "equally into 1 to 256 heads, got B = %zu, heads = %zu, wk %s and wv %s", op, B,
                 heads, stx__shape(wk, s), stx__shape(wv, t));
        return 0;
    }
    if (g->count < 1 || g->count > STX_HEAD_GROUPS) {
        stx_fail(x, STX_ERR_SHAPE, "%s: expected 1 to %d groups, got %zu", op,
                 (int)STX_HEAD_GROUPS, g->count);
        return 0;
    }
    if (!stx__cached_rows_ok(x, op, 0, past, B, wk->dim[1])) return 0;
    if ((uintptr_t)wk->data < (uintptr_t)stx_offset_ptr(x, wv->data, wv->size)
        && (uintptr_t)wv->data < (uintptr_t)stx_offset_ptr(x, wk->data, wk->size)) {
        stx_fail(x, STX_ERR_ARG,
                 "%s: expected separate wk and wv, but their memory overlaps: use "
                 "stx_linear_cached", op);
        return 0;
    }
    return 1;
}

/* Fills in s for group i of g and creates the group's output. Returns 0 after an
   error. */
static int stx__linear_heads_group(stx_ctx *x, stx__linear_heads_save *s, const stx_head_groups *g,
                                   size_t i, const stx_cached_rows *past) {
    const size_t heads = s->h.half, before = s->h.count;
    size_t h, k;
    for (k = 0; k < 2; k++)
        for (h = 0; h < heads; h++)
            if (g->of[h] == i) s->h.of[s->h.count++] = (uint16_t)(k * heads + h);
    s->O[i] = (s->h.count - before) * (s->h.n / s->Ci);
    s->rows[i] = g->rows[i];
    if (!s->O[i] || !s->rows[i] || s->rows[i] > past->rows) {
        stx_fail(x, STX_ERR_SHAPE,
                 "stx_linear_heads: group %zu: expected at least one head and 1 to %zu rows, got "
                 "%zu heads and %zu rows", i, past->rows, (s->h.count - before) / 2, s->rows[i]);
        return 0;
    }
    s->y[i] = stx_new(x, s->B, s->rows[i], s->O[i], 0);
    if (!s->y[i]) return 0;
    s->X[i].rows = s->rows[i];
    s->X[i].data = stx_offset_ptr(x, past->data, (past->rows - s->rows[i]) * s->Ci);
    s->X[i].stride = past->stride;

    /* Copies the newest rows of all streams into one matrix if the copy takes less
       memory than the group saves by computing fewer rows of y. */
    if (!i || s->B == 1 || s->rows[i] * s->Ci > (s->rows[0] - s->rows[i]) * s->O[i]) return 1;
    s->h.len[i] = s->X[i].stride = s->rows[i] * s->Ci;
    s->h.from[i] = s->X[i].data;
    s->X[i].data = s->h.to[i] = stx_step_activations(x, s->B * s->h.len[i]);
    return s->h.to[i] != NULL;
}

STX_DEF int stx_linear_heads(stx_ctx *x, const stx_cached_rows *past, size_t B, stx_tensor *wk,
                             stx_tensor *wv, size_t heads, const stx_head_groups *g,
                             stx_tensor **out) {
    stx__linear_heads_save *s;
    stx__node *node;
    stx__mark mark;
    size_t i, at;
    if (!stx_ok(x) || !past || !g || !out || !wk || !wv) return 0;
    if (!stx__linear_heads_ok(x, past, B, wk, wv, heads, g)) return 0;
    s = (stx__linear_heads_save *)stx_step_host_bytes(x, sizeof *s);
    if (!s) return 0;

    memset(s, 0, sizeof *s);
    s->B = B;
    s->Ci = wk->dim[1];
    s->count = g->count;
    s->h.B = B;
    s->h.stride = past->stride;
    s->h.n = wk->dim[0] / heads * s->Ci;
    s->h.half = heads;
    s->h.a = wk->data;
    s->h.b = wv->data;
    for (i = 0; i < g->count; i++) {
        if (!stx__linear_heads_group(x, s, g, i, past)) return 0;
        out[i] = s->y[i];
    }
    if (s->h.count != 2 * heads) {
        stx_fail(x, STX_ERR_ARG, "stx_linear_heads: groups: expected a group index below %zu for "
                 "each head, but the index of at least one head is too large", g->count);
        return 0;
    }

    node = stx__record2(x, out[0], stx__linear_heads_back, wk, wv);
    for (i = 1; node && i < g->count; i++) {
        node->more[i - 1] = out[i];
        out[i]->needs_grad = 1;
    }
    if (node) node->save = s;

    mark = stx__step_mark(x);
    s->h.y = stx_step_activations(x, s->h.n * s->h.count);  /* released below */
    if (s->h.y) {
        STX_RUN(x, stx__heads_fwd, (x, &s->h));
        for (i = at = 0; i < g->count; at += s->O[i++] * s->Ci)
            stx__linear_heads_gemm(x, s, i, stx_offset_ptr(x, s->h.y, at), NULL);
    }
    stx__step_release(x, mark);
    return stx_ok(x);
}

/* Computes y = act(y + b) in place for a row of y (N,C). If pre is not NULL, stores
   y + b in it. */
STX_INNER void stx__bias_act_row(int fma, stx_real *STX_RESTRICT y, stx_real *STX_RESTRICT pre,
                                 const stx_real *STX_RESTRICT b, size_t C, int act) {
    size_t c;
    if (b)
        for (c = 0; c < C; c++) y[c] += b[c];
    if (pre) memcpy(pre, y, C * sizeof *y);
    if (act) stx__act_n(fma, y, y, C, act);
}

STX_EACH_ISA(stx__bias_act_row,
             (stx_real * STX_RESTRICT y, stx_real *STX_RESTRICT pre, const stx_real *STX_RESTRICT b,
              size_t C, int act),
             y, pre, b, C, act)

/* The argument of the epilogue of stx_linear_fwd. pre has the layout of C. */
typedef struct stx__bias_act {
    const stx_real *b;  /* the bias, or NULL */
    stx_real *pre;      /* receives the input of the activation, or NULL */
    int act;
} stx__bias_act;

static void stx__bias_act_block(stx_ctx *x, const void *arg, const stx__c_block *block) {
    const stx__bias_act *e = (const stx__bias_act *)arg;
    stx_real *pre = e->pre ? e->pre + block->offset : NULL;
    size_t i;
    for (i = 0; i < block->rows; i++)
        STX_CALL(x, stx__bias_act_row,
                 (block->C + i * block->ldc, pre ? pre + i * block->ldc : NULL,
                  e->b ? e->b + block->col : NULL, block->cols, e->act));
}

/* y = act(in W^T + b) */
STX_DEF void stx_linear_fwd(stx_ctx *x, const stx_linear_args *a) {
    stx_gemm_args g = stx_gemm_init(0, 1, a->N, a->O, a->Ci, a->in, a->W, a->y);
    stx__bias_act bias_act;
    stx__epilogue epilogue;
    bias_act.b = a->b;
    bias_act.pre = a->pre;
    bias_act.act = a->act;
    epilogue.run = stx__bias_act_block;
    epilogue.arg = &bias_act;
    stx__gemm_fused(x, &g, a->b || a->pre || a->act ? &epilogue : NULL);
}

/* Backward of y = act(in W^T + b): da = dy act' ; dx (+)= da W ; dW += da^T in ; db +=
   sum_n da */
STX_DEF void stx_linear_bwd(stx_ctx *x, const stx_linear_bwd_args *a) {
    const size_t O = a->O - a->padding;
    stx_gemm_args g;
    if (a->act) {
        stx_act_bwd_args act;
        act.n = a->N * a->O;
        act.act = a->act;
        act.accumulate = 0;
        act.da = a->da;
        act.dy = a->da;
        act.y = a->y;
        act.a = a->pre;
        stx_act_bwd(x, &act);
    }
    if (a->dx) {
        g = stx_gemm_init(0, 0, a->N, a->Ci, O, a->da, a->W, a->dx);
        g.lda = a->O;
        g.beta = (stx_real)(a->accumulate ? 1 : 0);
        stx_gemm(x, &g);
    }
    if (a->dW) {
        g = stx_gemm_init(1, 0, O, a->Ci, a->N, a->da, a->in, a->dW);
        g.lda = a->O;
        g.beta = 1;
        if (a->batch > 1) {
            g.batch = a->batch;
            g.sa = a->sda;
            g.sb = a->sin;
            g.sc = 0;
        }
        stx_gemm(x, &g);
    }
    if (a->db && !a->padding) {
        stx_sum_rows(x, a->db, a->da, a->N, O);
    } else if (a->db) {     /* on a CPU, only the tests use padding */
        size_t n;
        for (n = 0; n < a->N; n++) stx_axpy(x, a->db, a->da + n * a->O, O, 1, 1);
    }
}

typedef struct stx__bias_act_job {
    size_t C;
    stx_real *y, *pre;      /* (N,C) */
    const stx_real *b;      /* (C) */
    int act;
} stx__bias_act_job;

STX_INNER void stx__bias_act_loop(int fma, const stx_share *s, const void *job) {
    const stx__bias_act_job *j = (const stx__bias_act_job *)job;
    size_t n, at;
    for (n = s->begin; n < s->end; n++) {
        at = n * j->C;
        stx__bias_act_row(fma, j->y + at, j->pre ? j->pre + at : NULL, j->b, j->C, j->act);
    }
}

STX_LOOP(stx__bias_act_loop)

STX_DEF void stx_bias_act_fwd(stx_ctx *x, stx_real *y, stx_real *pre, const stx_real *b, size_t N,
                              size_t C, int act) {
    stx__bias_act_job j;
    j.C = C;
    j.y = y;
    j.pre = pre;
    j.b = b;
    j.act = act;
    stx_parallel(x, N, N * C, stx__bias_act_loop_run, &j);
}
