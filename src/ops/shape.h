#pragma once
#include "../api/config.h"
#include "../api/context.h"
#include "../api/ops.h"
#include "../core/platform.h"
#include "../core/context.h"
#include "../core/arena.h"
#include "../core/tensors.h"
#include "../core/tape.h"


// >>shape

/* Creates a tensor with the shape of `a`, except that it has C channels. */
static stx_tensor *stx__new_channels(stx_ctx *x, const stx_tensor *a, size_t C) {
    size_t dim[STX_MAX_DIM];
    memcpy(dim, a->dim, sizeof dim);
    dim[a->ndim - 1] = C;
    return stx__tensor(x, STX__STEP_ACTIVATIONS, a->ndim, dim);
}

/* Concatenation over time (rows = B, wa = Ta C, wb = Tb C) and concatenation over
   channels (rows = N, wa = Ca, wb = Cb) are the same copy operation: row r of y (rows,
   wa + wb) is row r of a (rows, wa), followed by row r of b (rows, wb). */
typedef struct stx__concat_save {
    size_t rows, wa, wb;
} stx__concat_save;

static void stx__concat_back(stx_ctx *x, stx__node *n) {
    const stx__concat_save *s = (const stx__concat_save *)n->save;
    const size_t w = s->wa + s->wb;
    stx_real *dy = n->y->grad, *d;
    int fresh;
    d = stx__grad_fresh(x, n->in[0], &fresh);
    if (d) STX_RUN(x, stx_copy2d, (x, d, s->wa, dy, w, s->rows, s->wa, !fresh));
    dy = stx_offset_ptr(x, dy, s->wa);
    d = stx__grad_fresh(x, n->in[1], &fresh);
    if (d) STX_RUN(x, stx_copy2d, (x, d, s->wb, dy, w, s->rows, s->wb, !fresh));
}

/* Fills the result y with the concatenation of `a` and b, which are treated as matrices
   with `rows` rows. */
static stx_tensor *stx__concat(stx_ctx *x, stx_tensor *y, stx_tensor *a, stx_tensor *b,
                               size_t rows) {
    stx__concat_save s;
    stx__node *node;
    if (!y) return NULL;
    s.rows = rows;
    s.wa = a->size / rows;
    s.wb = b->size / rows;
    STX_RUN(x, stx_concat2d, (x, y->data, a->data, s.wa, s.wa, b->data, s.wb, s.wb, rows));
    node = stx__record2(x, y, stx__concat_back, a, b);
    return stx__save(x, node, &s, sizeof s) ? y : NULL;
}

STX_DEF stx_tensor *stx_concat(stx_ctx *x, stx_tensor *a, stx_tensor *b) {
    stx_tensor *y;
    char s[96], t[96];
    if (!stx_ok(x) || !a || !b) return NULL;
    STX__NEED(x, a->ndim == 3 && b->ndim == 3 && a->dim[0] == b->dim[0] && a->dim[2] == b->dim[2],
              STX_ERR_SHAPE, "stx_concat: expected shapes (B,Ta,C) and (B,Tb,C), got %s and %s",
              stx__shape(a, s), stx__shape(b, t));
    y = stx_new(x, a->dim[0], a->dim[1] + b->dim[1], a->dim[2], 0);
    return stx__concat(x, y, a, b, a->dim[0]);
}

STX_DEF stx_tensor *stx_concat_channels(stx_ctx *x, stx_tensor *a, stx_tensor *b) {
    stx_tensor *y;
    char s[96], t[96];
    int i, same;
    if (!stx_ok(x) || !a || !b) return NULL;
    same = a->ndim == b->ndim;
    for (i = 0; same && i < a->ndim - 1; i++) same = a->dim[i] == b->dim[i];
    STX__NEED(x, same, STX_ERR_SHAPE,
              "stx_concat_channels: expected shapes that differ only in the last dimension, "
              "got %s and %s", stx__shape(a, s), stx__shape(b, t));
    y = stx__new_channels(x, a, stx__last(a) + stx__last(b));
    return stx__concat(x, y, a, b, stx__rows(a));
}

/* Logits can have padding columns (see "Padded logits" in >>adaptive input and output).
   This op removes them: y (rows, w[0] + w[1]) consists of the first w[0] columns of
   `a`, followed by the first w[1] columns of b unless b is NULL. The gradient of the
   removed columns is 0. */
typedef struct stx__join_columns_save {
    size_t w[2];
    stx_real *zeros;    /* one zero per column of the widest padding; NULL without padding */
} stx__join_columns_save;

static void stx__join_columns_back(stx_ctx *x, stx__node *n) {
    const stx__join_columns_save *s = (const stx__join_columns_save *)n->save;
    const size_t rows = stx__rows(n->y), w = stx__last(n->y);
    size_t at = 0, ld;
    int i, fresh;
    for (i = 0; i < 2; at += s->w[i++]) {
        stx_real *dy = stx_offset_ptr(x, n->y->grad, at);
        stx_real *d = stx__grad_fresh(x, n->in[i], &fresh);
        if (!d) continue;
        ld = stx__last(n->in[i]);
        if (fresh && ld > s->w[i])
            STX_RUN(x, stx_concat2d, (x, d, dy, w, s->w[i], s->zeros, 0, ld - s->w[i], rows));
        else
            STX_RUN(x, stx_copy2d, (x, d, ld, dy, w, rows, s->w[i], !fresh));
    }
}

static stx_tensor *stx__join_columns(stx_ctx *x, stx_tensor *a, size_t wa, stx_tensor *b,
                                     size_t wb) {
    stx__join_columns_save s;
    stx__node *node;
    stx_tensor *y;
    size_t rows, lda, ldb, padding;
    if (!a || (wb && !b)) return NULL;
    rows = stx__rows(a);
    lda = stx__last(a);
    ldb = b ? stx__last(b) : 0;
    if (!b && wa == lda) return a;
    y = stx__new_channels(x, a, wa + wb);
    if (!y) return NULL;

    if (b)
        STX_RUN(x, stx_concat2d, (x, y->data, a->data, lda, wa, b->data, ldb, wb, rows));
    else
        STX_RUN(x, stx_copy2d, (x, y->data, wa, a->data, lda, rows, wa, 0));

    node = stx__record2(x, y, stx__join_columns_back, a, b);
    if (!node) return stx_ok(x) ? y : NULL;
    s.w[0] = wa;
    s.w[1] = wb;
    s.zeros = NULL;
    padding = STX_MAX(lda - wa, ldb - wb);
    if (padding) {
        s.zeros = stx_step_activations(x, padding);
        if (!s.zeros) return NULL;
        STX_RUN(x, stx_fill, (x, s.zeros, padding, 0));
    }
    return stx__save(x, node, &s, sizeof s) ? y : NULL;
}

/* Slicing over time (rows = B, ld and w are multiples of C) and slicing over channels
   (rows = N) are the same copy operation: y (rows,w) = columns [at, at + w) of a
   (rows,ld). */
typedef struct stx__slice_save {
    size_t rows, ld, at, w;
} stx__slice_save;

static void stx__slice_back(stx_ctx *x, stx__node *n) {
    const stx__slice_save *s = (const stx__slice_save *)n->save;
    stx_real *d = stx__grad(x, n->in[0]);
    if (!d) return;
    d = stx_offset_ptr(x, d, s->at);
    STX_RUN(x, stx_copy2d, (x, d, s->ld, n->y->grad, s->w, s->rows, s->w, 1));
}

/* Fills the result y with columns of `a`, starting at column `at`. y and `a` are
   treated as matrices with `rows` rows. */
static stx_tensor *stx__slice(stx_ctx *x, stx_tensor *y, stx_tensor *a, size_t rows, size_t at) {
    stx__slice_save s;
    stx__node *node;
    if (!y) return NULL;
    s.rows = rows;
    s.ld = a->size / rows;
    s.at = at;
    s.w = y->size / rows;
    STX_RUN(x, stx_copy2d,
            (x, y->data, s.w, stx_offset_ptr(x, a->data, at), s.ld, rows, s.w, 0));
    node = stx__record1(x, y, stx__slice_back, a);
    return stx__save(x, node, &s, sizeof s) ? y : NULL;
}

STX_DEF stx_tensor *stx_slice(stx_ctx *x, stx_tensor *a, size_t t0, size_t t1) {
    stx_tensor *y;
    char s[96];
    if (!stx_ok(x) || !a) return NULL;
    STX__NEED(x, a->ndim == 3 && t0 < t1 && t1 <= a->dim[1], STX_ERR_SHAPE,
              "stx_slice: expected 0 <= t0 < t1 <= T and a tensor of shape (B,T,C), got [%zu,%zu) "
              "for shape %s", t0, t1, stx__shape(a, s));
    y = stx_new(x, a->dim[0], t1 - t0, a->dim[2], 0);
    return stx__slice(x, y, a, a->dim[0], t0 * a->dim[2]);
}

STX_DEF stx_tensor *stx_slice_channels(stx_ctx *x, stx_tensor *a, size_t c0, size_t c1) {
    char s[96];
    if (!stx_ok(x) || !a) return NULL;
    STX__NEED(x, c0 < c1 && c1 <= stx__last(a), STX_ERR_SHAPE,
              "stx_slice_channels: expected 0 <= c0 < c1 <= C, got [%zu,%zu) for shape %s", c0,
              c1, stx__shape(a, s));
    return stx__slice(x, stx__new_channels(x, a, c1 - c0), a, stx__rows(a), c0);
}

/* Creates a tensor that shares the memory of `a` and has no gradient. */
static stx_tensor *stx__view(stx_ctx *x, stx_tensor *a) {
    stx_tensor *y = (stx_tensor *)stx__arena_alloc(x, &x->mem.step, sizeof *y);
    if (!y) return NULL;
    *y = *a;
    y->grad = NULL;
    y->needs_grad = y->is_param = y->is_leaf = 0;
    y->view_of = NULL;
    y->padding = 0;
    return y;
}

/* Called for y, a view of `a` that starts at element `at`. If `a` is a parameter or a
   view of one and has a gradient, makes y's gradient a view of the corresponding part
   of the gradient of `a` and returns 1. Ops then add to this part directly, and y needs
   no node. Otherwise, returns 0. */
static int stx__view_of_param(const stx_ctx *x, stx_tensor *y, const stx_tensor *a, size_t at) {
    if (!x->tape.recording || !stx__has_param_grad(a) || !a->needs_grad || !a->grad) return 0;
    y->view_of = a->view_of ? a->view_of : a;
    y->view_offset = a->view_of ? a->view_offset + at : at;
    y->grad = stx_offset_ptr(x, y->view_of->grad, y->view_offset);
    y->needs_grad = y->is_leaf = 1;
    return 1;
}

static void stx__reshape_back(stx_ctx *x, stx__node *n) {
    stx__grad_dy(x, n, n->in[0], 1);
}

STX_DEF stx_tensor *stx_reshape(stx_ctx *x, stx_tensor *a, size_t d0, size_t d1, size_t d2,
                                size_t d3) {
    size_t dim[STX_MAX_DIM], n = 1;
    stx_tensor *y;
    char s[96];
    int i;
    if (!stx_ok(x) || !a) return NULL;
    dim[0] = d0;
    dim[1] = d1;
    dim[2] = d2;
    dim[3] = d3;
    for (i = 0; i < stx__count_dims(dim); i++) n = stx_bytes_of(n, dim[i], 1);
    STX__NEED(x, d0 && n == a->size, STX_ERR_SHAPE,
              "stx_reshape: expected a shape with %zu elements, like %s, got (%zu,%zu,%zu,%zu)",
              a->size, stx__shape(a, s), d0, d1, d2, d3);
    y = stx__view(x, a);
    if (!y) return NULL;
    y->ndim = stx__count_dims(dim);
    memcpy(y->dim, dim, sizeof dim);
    if (!stx__view_of_param(x, y, a, 0)) stx__record1(x, y, stx__reshape_back, a);
    return y;
}

/* n->save points to the index of the view's first element in the viewed tensor. */
static void stx__view_rows_back(stx_ctx *x, stx__node *n) {
    const size_t at = *(const size_t *)n->save;
    stx_real *d = stx__grad(x, n->in[0]);
    if (d) STX_RUN(x, stx_axpy, (x, stx_offset_ptr(x, d, at), n->y->grad, n->y->size, 1, 1));
}

STX_DEF stx_tensor *stx_view_rows(stx_ctx *x, stx_tensor *a, size_t r0, size_t r1) {
    stx_tensor *y;
    stx__node *node;
    size_t at;
    char s[96];
    if (!stx_ok(x) || !a) return NULL;
    STX__NEED(x, a->ndim == 2 && r0 < r1 && r1 <= a->dim[0], STX_ERR_SHAPE,
              "stx_view_rows: expected 0 <= r0 < r1 <= N and a tensor of shape (N,C), got "
              "[%zu,%zu) for shape %s", r0, r1, stx__shape(a, s));
    y = stx__view(x, a);
    if (!y) return NULL;
    at = r0 * a->dim[1];
    y->dim[0] = r1 - r0;
    y->size = (r1 - r0) * a->dim[1];
    y->data = stx_offset_ptr(x, a->data, at);
    if (stx__view_of_param(x, y, a, at)) return y;
    node = stx__record1(x, y, stx__view_rows_back, a);
    return stx__save(x, node, &at, sizeof at) ? y : NULL;
}

STX_DEF stx_tensor *stx_detach(stx_ctx *x, stx_tensor *a) {
    return stx_ok(x) && a ? stx__view(x, a) : NULL;
}
