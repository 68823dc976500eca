#pragma once
#include "../api/config.h"
#include "../api/context.h"
#include "../api/ops.h"
#include "../api/lm.h"
#include "../core/platform.h"
#include "../core/context.h"
#include "../core/arena.h"
#include "../core/tensors.h"
#include "../core/sums.h"


// >>memory: arena

/* A memory holds rows for every layer. A row is a vector of `width` values for one time
   step of one stream. A stream is one of the B independent sequences of a batch.

   The rows of a layer slide through a buffer (B,capacity,width), its arena. A push writes
   the new rows after the last one and evicts the oldest ones by advancing the offset, so
   no row moves. Only when they reach the end of the buffer are the rows moved back to its
   beginning. This example shows one stream, with 3 rows pushed per step:

       capacity 9, count 6, max_pushed 3
       [. . . a b c d e f]    a step views the rows, but there is no space after f
       [a b c d e f . . .]    the rows move first, then the step reads a to f
       [. . . d e f g h i]    it pushes g h i; a b c are still stored before d

   Ops read rows in place (stx_memory_view), and read them again in the backward pass,
   after the push of the step. Therefore rows move only at the first view in a step, which
   also makes space for max_pushed rows, the number that a step pushes.

   On a CPU, the spare capacity of the buffer is half the number of rows, so rows move
   only once in many steps. On a GPU, it holds the memory and the rows of one step, as
   shown above, and the rows move in every step. Each move reads and writes every row
   once, but all steps then use the same addresses, so one CUDA graph can replay them all.
   For the same reason the rows move even if there is enough space, for example after a
   window has become shorter. If no step views a memory because it is only copied
   (stx_memory_read), its rows move at the push, and its buffer has no spare rows for a
   step.

   A step may also replace rows that it has viewed. If a step reads memory M and writes N,
   and then reads N and writes M, it has already viewed the old rows of M when it pushes
   the new ones. All new rows are then written after the viewed ones, so max_pushed is the
   number of all new rows:

       capacity 12, count 6, max_pushed 6
       [a b c d e f . . . . . .]    a step views the rows
       [a b c d e f g h i j k l]    and replaces them by g to l

   This doubles the size of one of the two buffers, and each further replacement in the
   step adds as much again. A second buffer would take the same memory until the end of
   the step, but its addresses would differ from step to step. (In the first such step,
   the old buffer exists as well.)

   Masks. All streams have the same number of rows. If a row is missing in a stream,
   because the stream was reset or the segment was padded, the row is masked: its entry in
   pad is not 0, and attention ignores it. In this example, stream 1 was reset two rows
   ago:

       stream 0    a b c d      pad  0 0 0 0
       stream 1    0 0 g h      pad  1 1 0 0

   A reset also sets the masked rows to zero, because a NaN in one of them would reach the
   gradients even with a weight of 0. With desc.missing_as_zeros, missing rows are
   ordinary rows of zeros, and no row is masked. */

/* Allocates step memory for n elements of the type in which the rows are stored. */
static stx_real *stx__memory_scratch(const stx_memory *s, size_t n) {
    if (!s->desc.always_f32) return stx_step_activations(s->ctx, n);
    return (stx_real *)stx_step_device_bytes(s->ctx, stx_bytes_of(n, sizeof(stx_real), 1));
}

/* Creates a step tensor (B,n,width) of the type in which the rows are stored. */
static stx_tensor *stx__memory_tensor(const stx_memory *s, size_t n, size_t width) {
    return s->desc.always_f32 ? stx_new_f32(s->ctx, s->B, n, width, 0)
                              : stx_new(s->ctx, s->B, n, width, 0);
}

/* Returns 1 if the current step reads the rows in place. In this case, they must not be
   moved or changed. */
static int stx__memory_in_use(const stx_memory *s, const stx_memory_layer *y) {
    return y->viewed_step && y->viewed_step == s->ctx->tape.steps_begun;
}

static void stx__memory_set_offset(stx_memory *s, stx_memory_layer *y, size_t offset) {
    y->offset = offset;
    y->stride = y->capacity * y->width;
    y->data = y->base ? stx_offset_ptr(s->ctx, y->base, offset * y->width) : NULL;
}

/* Empties the layer. If the current step reads its rows, they remain in the buffer,
   before the new offset. */
static void stx__memory_empty(stx_memory *s, stx_memory_layer *y) {
    stx__memory_set_offset(s, y, stx__memory_in_use(s, y) ? y->offset + y->count : 0);
    y->count = 0;
}

/* Frees the buffer now or, if the current step reads it, at the end of the step. */
static void stx__memory_free_rows(stx_memory *s, stx_memory_layer *y) {
    if (stx__memory_in_use(s, y))
        stx__free_at_step_end(s->ctx, y->base);
    else
        stx_block_device_free(s->ctx, y->base);
    y->base = NULL;
    y->capacity = 0;
    y->viewed_step = 0;
    stx__memory_set_offset(s, y, 0);
}

/* Returns the number of spare rows to add to a new buffer for n rows, for later pushes
   and for the growth of a memory that is not yet full. */
static size_t stx__memory_spare(const stx_memory *s, const stx_memory_layer *y, size_t n) {
    size_t grow = s->desc.max_rows ? STX_MIN(n / 2, STX_MAX(n, s->desc.max_rows) - n) : 0;
    if (!y->viewed) return grow;
    return grow + (stx__on_gpu(s->ctx) ? y->max_pushed : STX_MAX(y->max_pushed, n / 2));
}

/* The period, in steps, of stx_memory_layer.max_pushed: the largest number of rows
   pushed in any step of the current and the previous period. */
enum { STX__PUSH_STEPS = 32 };

/* Overlapping rows are shifted in place if that takes at most this many passes, which a
   GPU runs one after the other. Otherwise they are copied to step memory and back. */
enum { STX__SHIFTS = 32 };

/* Moves the newest `stay` rows of layer l to the beginning of a buffer with capacity
   for n >= stay rows, and evicts the others. The layer's current buffer is used if it
   is large enough and not in use by the step; otherwise, a new one with n + spare rows
   is allocated. Returns 1. After an error, returns 0, and the layer is unchanged, or
   empty if stay is 0. */
static int stx__memory_make_space(stx_memory *s, size_t l, size_t stay, size_t n, size_t spare) {
    stx_ctx *x = s->ctx;
    stx_memory_layer *y = &s->layer[l];
    const size_t d = y->width, cols = stay * d, by = (y->offset + y->count - stay) * d;
    stx_real *from = stay ? stx_offset_ptr(x, y->base, by) : NULL, *to;
    if (n <= y->capacity && !stx__memory_in_use(s, y)) {
        if (stay && by && stay <= STX__SHIFTS * (by / d))
            STX_RUN(x, stx__shift2d, (x, y->base, y->stride, by + cols, NULL, 0, by, s->B));
        else if (stay && by) {
            to = stx__memory_scratch(s, stx_bytes_of(s->B, stay, d));
            if (!to) return 0;
            STX_RUN(x, stx_copy2d, (x, to, cols, from, y->stride, s->B, cols, 0));
            STX_RUN(x, stx_copy2d, (x, y->base, y->stride, to, cols, s->B, cols, 0));
        }
        y->count = stay;
        stx__memory_set_offset(s, y, 0);
        return stx_ok(x);
    }

    if (!stay) {    /* free the old buffer first, so that the two buffers do not exist at
                       the same time */
        y->count = 0;
        stx__memory_free_rows(s, y);
    }
    n += spare;
    to = s->desc.always_f32 ? stx_block_f32(x, stx_bytes_of(s->B, n, d))
                            : stx_block_activations(x, stx_bytes_of(s->B, n, d));
    if (!to) return 0;
    if (stay) {
        STX_RUN(x, stx_copy2d, (x, to, n * d, from, y->stride, s->B, cols, 0));
        stx__memory_free_rows(s, y);
    }
    y->base = to;
    y->capacity = n;
    y->count = stay;
    stx__memory_set_offset(s, y, 0);
    return stx_ok(x);
}

/* If the current step reads the rows of layer l, moves them to a new buffer, so that they
   can be changed. */
static int stx__memory_make_writable(stx_memory *s, size_t l) {
    const stx_memory_layer *y = &s->layer[l];
    return !stx__memory_in_use(s, y) || stx__memory_make_space(s, l, y->count, y->capacity, 0);
}

/* Copies n rows per stream from host memory `in` (B,n,width) to the layer. */
static void stx__memory_upload(stx_memory *s, size_t l, const stx_real *in, size_t n) {
    stx_memory_layer *y = &s->layer[l];
    size_t b;
    for (b = 0; b < s->B; b++)
        stx_upload(s->ctx, stx_offset_ptr(s->ctx, y->data, b * y->stride), in + b * n * y->width,
                   n * y->width);
    y->count = n;
}

/* Copies all rows of the layer to host memory `out` (B,count,width). */
static void stx__memory_download(const stx_memory *s, size_t l, stx_real *out) {
    const stx_memory_layer *y = &s->layer[l];
    size_t b, n = y->count * y->width;
    for (b = 0; b < s->B; b++)
        stx_download(s->ctx, out + b * n, stx_offset_ptr(s->ctx, y->data, b * y->stride), n);
}


// >>memory: one layer

STX_DEF stx_memory *stx_memory_create(stx_ctx *x, const stx_memory_desc *d) {
    stx_memory *s;
    size_t l;
    if (!stx_ok(x) || !d) return NULL;
    STX__NEED(x, d->B && d->layers, STX_ERR_ARG,
              "stx_memory_create: expected at least one stream and one layer, got B = %zu and "
              "layers = %zu", d->B, d->layers);
    STX__NEED(x, !d->is_state || !d->widths, STX_ERR_ARG,
              "stx_memory_create: is_state requires one width for all layers: set width instead "
              "of widths");
    s = (stx_memory *)stx_block(x, sizeof *s);
    if (!s) return NULL;
    s->ctx = x;
    s->desc = *d;
    s->desc.widths = NULL;
    s->B = d->B;
    s->layer = (stx_memory_layer *)stx_block(x, stx_bytes_of(d->layers, sizeof *s->layer, 1));
    if (d->is_state) s->all = stx_block_f32(x, stx_bytes_of(d->layers, d->B, d->width));
    if (!stx_ok(x)) {
        stx_memory_free(s);
        return NULL;
    }
    for (l = 0; l < d->layers; l++) {
        stx_memory_layer *y = &s->layer[l];
        y->width = d->widths ? d->widths[l] : d->width;
        if (!d->is_state) continue;
        y->count = y->logical_count = 1;
        y->stride = d->width;
        y->data = stx_offset_ptr(x, s->all, l * d->B * d->width);
    }
    return s;
}

STX_DEF void stx_memory_free(stx_memory *s) {
    size_t l;
    if (!s) return;
    for (l = 0; s->layer && l < s->desc.layers; l++) {
        if (!s->all) stx__memory_free_rows(s, &s->layer[l]);
        stx_block_free(s->ctx, s->layer[l].pad);
    }
    stx_block_device_free(s->ctx, s->all);
    stx_block_free(s->ctx, s->layer);
    stx_block_free(s->ctx, s);
}

/* Empties all layers. */
static void stx__memory_clear(stx_memory *s) {
    size_t l;
    for (l = 0; l < s->desc.layers && !s->all; l++) {
        stx__memory_empty(s, &s->layer[l]);
        s->layer[l].logical_count = 0;
        s->layer[l].masked = 0;
    }
}

STX_DEF void stx_memory_reset(stx_memory *s) {
    if (!s || !stx_ok(s->ctx)) return;
    stx__memory_clear(s);
    if (s->all)
        STX_RUN(s->ctx, stx_fill, (s->ctx, s->all, s->desc.layers * s->B * s->desc.width, 0));
}

STX_DEF size_t stx_memory_max_rows(const stx_memory *s) {
    size_t l, n = 0;
    for (l = 0; s && l < s->desc.layers; l++)
        if (s->layer[l].width) n = STX_MAX(n, s->layer[l].count);
    return n;
}

STX_DEF int stx_memory_reserve(stx_memory *s, size_t rows) {
    size_t l;
    if (!s || !stx_ok(s->ctx)) return 0;
    for (l = 0; l < s->desc.layers; l++) {
        const stx_memory_layer *y = &s->layer[l];
        if (y->width && !s->all && y->capacity < rows
            && !stx__memory_make_space(s, l, y->count, rows, 0))
            return 0;
    }
    return 1;
}

static int stx__memory_layer_ok(const stx_memory *s, const char *op, size_t l) {
    if (l < s->desc.layers) return 1;
    stx_fail(s->ctx, STX_ERR_ARG, "%s: layer: expected less than %zu, got %zu", op, s->desc.layers,
             l);
    return 0;
}

/* Returns 0 and sets an error if the memory is a recurrent state, which has one row
   and no time axis. */
static int stx__memory_has_time(const stx_memory *s, const char *op) {
    if (!s->all) return 1;
    stx_fail(s->ctx, STX_ERR_ARG,
             "%s: expected a memory without is_state: use stx_memory_read for a recurrent state",
             op);
    return 0;
}

/* Sets the mask of layer l to m (B,n). m is NULL if no row is masked. Otherwise, m is in
   step memory, or it is the current mask y->pad, and n must then be the layer's count. */
static int stx__memory_set_mask(stx_memory *s, size_t l, const int32_t *m, size_t n) {
    stx_memory_layer *y = &s->layer[l];
    size_t i, N = s->B * n;
    y->masked = 0;
    for (i = 0; m && i < N; i++)
        if (m[i]) y->masked = 1;
    if (!y->masked || m == y->pad) return 1;
    if (y->pad_capacity < N) {
        stx_block_free(s->ctx, y->pad);
        y->pad_capacity = 0;
        y->pad = (int32_t *)stx_block(s->ctx, stx_bytes_of(N, 1, sizeof *y->pad));
        if (!y->pad) return 0;
        y->pad_capacity = N;
    }
    memcpy(y->pad, m, N * sizeof *m);
    return 1;
}

/* Builds a mask (B,n0+n1) in step memory: the mask of n0 rows of y, starting at row
   `first`, followed by columns t0 .. t0+n1-1 of pad. If y or pad is NULL, no row in its
   part is masked. */
static int32_t *stx__memory_masks(stx_ctx *x, size_t B, const stx_memory_layer *y, size_t first,
                                  size_t n0, const stx_ids *pad, size_t t0, size_t n1) {
    size_t b, n = n0 + n1;
    int32_t *m = (int32_t *)stx_step_host_bytes(x, stx_bytes_of(B, n, sizeof *m));
    if (!m) return NULL;
    memset(m, 0, B * n * sizeof *m);
    for (b = 0; b < B; b++) {
        if (y && y->masked && n0) memcpy(m + b * n, y->pad + b * y->count + first, n0 * sizeof *m);
        if (pad && n1) memcpy(m + b * n + n0, pad->data + b * pad->T + t0, n1 * sizeof *m);
    }
    return m;
}

/* Returns the mask m as ids (B,n), or NULL if it masks no row. */
static const stx_ids *stx__memory_ids(stx_ctx *x, const int32_t *m, size_t B, size_t n) {
    size_t i;
    for (i = 0; m && i < B * n; i++)
        if (m[i]) return stx_tokens(x, m, B, n);
    return NULL;
}

/* Checks l, and the shapes of new rows h (B,T,width) and of their padding (B,T). */
static int stx__memory_fits(const stx_memory *s, const char *op, size_t l, const stx_tensor *h,
                            const stx_ids *pad) {
    size_t T = h->ndim == 3 ? h->dim[1] : 1, width;
    char shape[96];
    if (!stx__memory_layer_ok(s, op, l)) return 0;
    width = s->layer[l].width;
    if (h->dim[0] != s->B || h->size != s->B * T * width
        || (h->ndim != 3 && (h->ndim != 2 || !s->all)) || (s->all && T != 1))
        stx_fail(s->ctx, STX_ERR_SHAPE, "%s: rows: expected (%zu,%s%zu), got %s", op, s->B,
                 s->all ? "" : "T,", width, stx__shape(h, shape));
    else if (pad && (pad->B != s->B || pad->T != T))
        stx_fail(s->ctx, STX_ERR_SHAPE, "%s: padding: expected (%zu,%zu), got (%zu,%zu)", op, s->B,
                 T, pad->B, pad->T);
    return stx_ok(s->ctx);
}

/* Adds n to the number of rows that this step writes after the existing rows of the
   layer. Updates max_pushed, the maximum of this number over recent steps. */
static void stx__memory_count_pushed(stx_memory *s, stx_memory_layer *y, size_t n) {
    const uint64_t step = s->ctx->tape.steps_begun;
    if (y->pushed_step != step) {
        y->pushed_step = step;
        y->pushed = 0;
        if (++y->recent_steps == STX__PUSH_STEPS) {
            y->max_pushed = y->recent_max_pushed;
            y->recent_max_pushed = y->recent_steps = 0;
        }
    }
    y->pushed += n;
    y->recent_max_pushed = STX_MAX(y->recent_max_pushed, y->pushed);
    y->max_pushed = STX_MAX(y->max_pushed, y->pushed);
}

/* The rows of a layer after stx_memory_push: the newest `old` rows of the input memory,
   followed by `own` new rows. */
typedef struct stx__memory_rows {
    size_t old, own;
    const stx_real *own_rows;   /* (B,own,width), with a stride of ld elements between streams */
    size_t ld;
} stx__memory_rows;

/* Prepares a push from a layer to itself. The old rows are already in the layer, so the
   function only makes space for the new rows after them. Returns 1 if the caller must
   copy the new rows, 2 if they are already in place, and 0 after an error. */
static int stx__memory_append(stx_memory *s, size_t l, const stx__memory_rows *r) {
    stx_ctx *x = s->ctx;
    stx_memory_layer *y = &s->layer[l];
    const size_t n = r->old + r->own, end = y->offset + y->count, d = y->width;

    /* No row moves if the new rows fit after the last one. On a GPU, rows that no step
       views must also be at the beginning of the buffer, so that every step uses the
       same addresses. */
    if (end + r->own <= y->capacity && (y->viewed || !stx__on_gpu(x) || end == r->old)) {
        stx__memory_set_offset(s, y, end - r->old);
        return 1;
    }

    /* if the old rows move down by as many rows as are appended, one pass can both move
       the old rows and append the new ones */
    if (r->own && r->old && !stx__memory_in_use(s, y) && n <= y->capacity
        && end - r->old == r->own && n <= STX__SHIFTS * r->own) {
        STX_RUN(x, stx__shift2d,
                (x, y->base, y->stride, n * d, r->own_rows, r->ld, r->own * d, s->B));
        stx__memory_set_offset(s, y, 0);
        return 2;
    }
    return stx__memory_make_space(s, l, r->old, n, stx__memory_spare(s, y, n));
}

/* Prepares a push whose old rows are in the layer *in of another memory; with in =
   NULL, there are no old rows. Makes space for all rows, after any rows in use, and
   copies the old rows. */
static int stx__memory_replace(stx_memory *s, size_t l, const stx_memory_layer *in,
                               const stx__memory_rows *r) {
    stx_ctx *x = s->ctx;
    stx_memory_layer *y = &s->layer[l];
    const size_t n = r->old + r->own, end = y->offset + y->count, d = y->width;
    if (stx__memory_in_use(s, y) && end + n <= y->capacity)
        stx__memory_set_offset(s, y, end);
    else if (!stx__memory_make_space(s, l, 0, n, stx__memory_spare(s, y, n)))
        return 0;
    if (r->old)
        STX_RUN(x, stx_copy2d,
                (x, y->data, y->stride, stx_offset_ptr(x, in->data, (in->count - r->old) * d),
                 in->stride, s->B, r->old * d, 0));
    return 1;
}

STX_DEF int stx_memory_push(stx_memory *out, const stx_memory *in, size_t l, size_t keep,
                            const stx_tensor *h, const stx_ids *pad) {
    stx_ctx *x = out ? out->ctx : NULL;
    const stx_memory_layer *i;
    stx_memory_layer *o;
    stx__memory_rows r;
    size_t B, T, d, n, logical;
    int32_t *mask = NULL;
    int space;
    if (!stx_ok(x) || !h || !stx__memory_fits(out, "stx_memory_push", l, h, pad)) return 0;
    if (in
        && (in->ctx != x || l >= in->desc.layers || in->B != out->B
            || in->layer[l].width != out->layer[l].width || !in->all != !out->all)) {
        stx_fail(x, STX_ERR_ARG,
                 "stx_memory_push: in: expected a memory that has layer %zu and the same context, "
                 "number of streams, width and is_state as out", l);
        return 0;
    }
    o = &out->layer[l];
    B = out->B;
    d = o->width;
    if (out->all) {
        STX_RUN(x, stx_copy2d, (x, o->data, B * d, h->data, B * d, 1, B * d, 0));
        return stx_ok(x);
    }

    i = in ? &in->layer[l] : NULL;
    T = h->dim[1];
    r.own = STX_MIN(keep, T);
    r.old = i ? STX_MIN(i->count, keep - r.own) : 0;
    r.own_rows = stx_offset_ptr(x, h->data, (T - r.own) * d);
    r.ld = T * d;
    n = logical = r.old + r.own;
    if (out->desc.count_unwritten)
        logical = r.own + (i ? STX_MIN(i->logical_count, keep - r.own) : keep - r.own);
    if ((r.old && i->masked) || pad) {
        mask = stx__memory_masks(x, B, i, i ? i->count - r.old : 0, r.old, pad, T - r.own, r.own);
        if (!mask) return 0;
    }

    if (i == o || stx__memory_in_use(out, o))
        stx__memory_count_pushed(out, o, i == o ? r.own : n);
    space = i == o ? stx__memory_append(out, l, &r) : stx__memory_replace(out, l, i, &r);
    if (!space) return 0;
    o->count = 0;   /* the layer is empty until all rows are in place */
    if (!stx__memory_set_mask(out, l, mask, n)) return 0;
    if (r.own && space == 1)
        STX_RUN(x, stx_copy2d,
                (x, stx_offset_ptr(x, o->data, r.old * d), o->stride, r.own_rows, r.ld, B,
                 r.own * d, 0));
    o->count = n;
    o->logical_count = logical;
    return stx_ok(x);
}

STX_DEF int stx_memory_view(const stx_memory *s, size_t l, size_t n, stx_cached_rows *out) {
    stx_ctx *x = s ? s->ctx : NULL;
    stx_memory_layer *y;
    if (!out) return 0;
    memset(out, 0, sizeof *out);
    if (!s) return 1;
    if (!stx_ok(x) || !stx__memory_layer_ok(s, "stx_memory_view", l)
        || !stx__memory_has_time(s, "stx_memory_view"))
        return 0;
    y = &s->layer[l];
    n = STX_MIN(n, y->count);
    if (!n || !y->width) return 1;
    y->viewed = 1;

    /* Rows move only before the first view in a step, and only if the space after them
       is too small or, on a GPU, if they are not at the beginning of the buffer, so
       that every step uses the same addresses. */
    if (!stx__memory_in_use(s, y)
        && (y->offset + y->count + y->max_pushed > y->capacity || (y->offset && stx__on_gpu(x)))) {
        /* moving rows does not change their values, so s is const for the caller */
        stx_memory *own = (stx_memory *)(uintptr_t)s;
        if (!stx__memory_make_space(own, l, y->count, y->count + y->max_pushed,
                                    stx__memory_spare(s, y, y->count) - y->max_pushed))
            return 0;
    }
    y->viewed_step = x->tape.steps_begun;
    out->data = stx_offset_ptr(x, y->data, (y->count - n) * y->width);
    out->rows = n;
    out->stride = y->stride;
    return stx_ok(x);
}

STX_DEF stx_tensor *stx_memory_read(const stx_memory *s, size_t l, size_t n) {
    stx_ctx *x = s ? s->ctx : NULL;
    const stx_memory_layer *y;
    stx_tensor *t;
    if (!stx_ok(x) || !stx__memory_layer_ok(s, "stx_memory_read", l)) return NULL;
    y = &s->layer[l];
    n = STX_MIN(n, y->count);
    if (!n || !y->width) return NULL;
    t = s->all ? stx_new_f32(x, s->B, y->width, 0, 0) : stx__memory_tensor(s, n, y->width);
    if (t)
        STX_RUN(x, stx_copy2d,
                (x, t->data, n * y->width, stx_offset_ptr(x, y->data, (y->count - n) * y->width),
                 y->stride, s->B, n * y->width, 0));
    return t;
}

STX_DEF stx_tensor *stx_memory_concat(const stx_memory *s, size_t l, size_t n, stx_tensor *h) {
    stx_ctx *x = s ? s->ctx : NULL;
    const stx_memory_layer *y;
    stx_tensor *t;
    size_t d, T;
    if (!s || !h) return h;
    if (!stx_ok(x) || !stx__memory_fits(s, "stx_memory_concat", l, h, NULL)) return NULL;
    y = &s->layer[l];
    n = STX_MIN(n, y->count);
    if (!n) return h;
    if (!stx__memory_has_time(s, "stx_memory_concat")) return NULL;
    d = y->width;
    T = h->dim[1];
    t = stx__memory_tensor(s, n + T, d);
    if (!t) return NULL;
    STX_RUN(x, stx_concat2d,
            (x, t->data, stx_offset_ptr(x, y->data, (y->count - n) * d), y->stride, n * d, h->data,
             T * d, T * d, s->B));
    return t;
}

STX_DEF const stx_ids *stx_memory_mask(const stx_memory *s, size_t l, size_t n, const stx_ids *pad,
                                       size_t T) {
    const stx_memory_layer *y;
    int32_t *m;
    if (!s) return pad;
    if (!stx_ok(s->ctx) || !stx__memory_layer_ok(s, "stx_memory_mask", l)) return NULL;
    STX__NEED(s->ctx, !pad || (pad->B == s->B && pad->T == T), STX_ERR_ARG,
              "stx_memory_mask: padding: expected (%zu,%zu), got (%zu,%zu)", s->B, T, pad->B,
              pad->T);
    y = &s->layer[l];
    n = STX_MIN(n, y->count);
    if (!n || (!y->masked && !pad)) return pad;
    m = stx__memory_masks(s->ctx, s->B, y, y->count - n, n, pad, 0, T);
    return stx__memory_ids(s->ctx, m, s->B, n + T);
}

STX_DEF stx_tensor *stx_memory_evicted(const stx_memory *s, size_t l, size_t keep,
                                       const stx_tensor *h, const stx_ids *pad,
                                       const stx_ids **mask) {
    stx_ctx *x = s ? s->ctx : NULL;
    const stx_memory_layer *y;
    stx_tensor *t;
    size_t T, d, e, old;
    if (mask) *mask = NULL;
    if (!stx_ok(x) || !h || !stx__memory_fits(s, "stx_memory_evicted", l, h, pad)) return NULL;
    if (!stx__memory_has_time(s, "stx_memory_evicted")) return NULL;
    y = &s->layer[l];
    T = h->dim[1];
    d = y->width;
    if (y->count + T <= keep) return NULL;
    e = y->count + T - keep;
    old = STX_MIN(e, y->count);
    t = stx__memory_tensor(s, e, d);
    if (!t) return NULL;
    if (old && e > old)
        STX_RUN(x, stx_concat2d,
                (x, t->data, y->data, y->stride, old * d, h->data, T * d, (e - old) * d, s->B));
    else if (old)
        STX_RUN(x, stx_copy2d, (x, t->data, e * d, y->data, y->stride, s->B, old * d, 0));
    else
        STX_RUN(x, stx_copy2d, (x, t->data, e * d, h->data, T * d, s->B, e * d, 0));
    if (mask && ((old && y->masked) || (pad && e > old)))
        *mask = stx__memory_ids(x, stx__memory_masks(x, s->B, y, 0, old, pad, 0, e - old), s->B, e);
    return t;
}
