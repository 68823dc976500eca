#pragma once
#include "../api/config.h"
#include "../api/context.h"
#include "../api/train.h"
#include "../api/files.h"
#include "../api/lm.h"
#include "../core/platform.h"
#include "../io/checkpoint.h"
#include "memory.h"


// >>memory: streams

/* Clears n rows of stream b of layer l, starting at row `first`. Masks them in `mask`
   (B,count) unless missing_as_zeros is set. */
static void stx__memory_remove(stx_memory *s, size_t l, int32_t *mask, size_t b, size_t first,
                               size_t n) {
    stx_memory_layer *y = &s->layer[l];
    size_t i;
    if (n)
        STX_RUN(s->ctx, stx_fill,
                (s->ctx, stx_offset_ptr(s->ctx, y->data, b * y->stride + first * y->width),
                 n * y->width, 0));
    for (i = 0; !s->desc.missing_as_zeros && i < n; i++) mask[b * y->count + first + i] = 1;
}

STX_DEF void stx_memory_reset_stream(stx_memory *s, size_t b) {
    stx_ctx *x = s ? s->ctx : NULL;
    size_t l;
    if (!stx_ok(x)) return;
    if (b >= s->B) {
        stx_fail(x, STX_ERR_ARG, "stx_memory_reset_stream: stream: expected less than %zu, got %zu",
                 s->B, b);
        return;
    }
    for (l = 0; l < s->desc.layers; l++) {
        stx_memory_layer *y = &s->layer[l];
        int32_t *mask;
        if (s->all)
            STX_RUN(x, stx_fill, (x, stx_offset_ptr(x, y->data, b * y->width), y->width, 0));
        if (s->all || !y->count || !y->width) continue;
        if (!stx__memory_make_writable(s, l)) return;
        mask = stx__memory_masks(x, s->B, y, 0, y->count, NULL, 0, 0);
        if (!mask) return;
        stx__memory_remove(s, l, mask, b, 0, y->count);
        if (!stx__memory_set_mask(s, l, mask, y->count)) return;
    }
}

/* Gives layer l capacity for `rows` rows, which must be at least the layer's count, and
   moves its rows to the last of these positions. */
static int stx__memory_move_to_end(stx_memory *s, size_t l, size_t rows) {
    stx_ctx *x = s->ctx;
    const stx_memory_layer *y = &s->layer[l];
    const size_t count = y->count, d = y->width;
    stx_real *old;
    if (rows == count) return stx__memory_make_writable(s, l);
    old = stx__memory_scratch(s, stx_bytes_of(s->B, count, d));
    if (!old) return 0;
    STX_RUN(x, stx_copy2d, (x, old, count * d, y->data, y->stride, s->B, count * d, 0));
    if (!stx__memory_make_space(s, l, 0, rows, 0)) return 0;
    STX_RUN(x, stx_copy2d,
            (x, stx_offset_ptr(x, y->data, (rows - count) * d), y->stride, old, count * d, s->B,
             count * d, 0));
    return 1;
}

/* Implements stx_memory_copy for layer l of a memory without is_state. If some streams
   are not overwritten, the layer receives the larger row count of the two memories.
   Streams that have fewer rows are filled up with missing rows at the oldest
   positions. */
static int stx__memory_copy_layer(stx_memory *to, size_t b, const stx_memory *from, size_t c,
                                  size_t n, size_t l) {
    stx_ctx *x = to->ctx;
    const stx_memory_layer *f = &from->layer[l];
    stx_memory_layer *t = &to->layer[l];
    const int others = n < to->B;
    const size_t d = t->width, rows = f->count, had = t->count;
    const size_t most = others ? STX_MAX(rows, had) : rows;
    int32_t *mask, *m;
    size_t k;
    mask = (int32_t *)stx_step_host_bytes(x, stx_bytes_of(to->B, STX_MAX(most, 1), sizeof *mask));
    m = stx__memory_masks(x, from->B, f, 0, rows, NULL, 0, 0);
    if (!mask || !m) return 0;
    memset(mask, 0, to->B * most * sizeof *mask);
    if (!(others && had ? stx__memory_move_to_end(to, l, most)
                        : stx__memory_make_space(to, l, 0, most, 0)))
        return 0;

    /* keep the streams that are not overwritten: copy their masks and mask their
       missing rows */
    for (k = 0; k < to->B && t->masked && had <= most; k++)
        memcpy(mask + k * most + (most - had), t->pad + k * had, had * sizeof *mask);
    t->count = most;
    for (k = 0; k < to->B && others; k++) stx__memory_remove(to, l, mask, k, 0, most - had);

    /* set the masks and rows of the copied streams */
    for (k = 0; k < n; k++) {
        memset(mask + (b + k) * most, 0, most * sizeof *mask);
        stx__memory_remove(to, l, mask, b + k, 0, most - rows);
        if (rows)
            memcpy(mask + (b + k) * most + (most - rows), m + (c + k) * rows, rows * sizeof *mask);
    }
    if (rows)
        STX_RUN(x, stx_copy2d,
                (x, stx_offset_ptr(x, t->data, b * t->stride + (most - rows) * d), t->stride,
                 stx_offset_ptr(x, f->data, c * f->stride), f->stride, n, rows * d, 0));
    t->logical_count = others ? STX_MAX(t->logical_count, f->logical_count) : f->logical_count;
    return stx__memory_set_mask(to, l, mask, most);
}

STX_DEF int stx_memory_copy(stx_memory *to, size_t b, const stx_memory *from, size_t c, size_t n) {
    stx_ctx *x = to ? to->ctx : NULL;
    size_t l;
    if (!stx_ok(x)) return 0;
    if (!from) {
        stx_fail(x, STX_ERR_ARG, "stx_memory_copy: from: expected a memory, got NULL");
        return 0;
    }
    if (from->ctx != x || from->desc.layers != to->desc.layers || !from->all != !to->all
        || n > to->B || b > to->B - n || n > from->B || c > from->B - n
        || (to == from && b < c + n && c < b + n)) {
        stx_fail(x, STX_ERR_ARG,
                 "stx_memory_copy: expected memories with the same context, layers and is_state, "
                 "and valid stream ranges that do not overlap, got n = %zu, source stream %zu (of "
                 "%zu) and destination stream %zu (of %zu)", n, c, from->B, b, to->B);
        return 0;
    }
    for (l = 0; l < to->desc.layers && n; l++) {
        const stx_memory_layer *f = &from->layer[l];
        const stx_memory_layer *t = &to->layer[l];
        const size_t d = t->width;
        if (f->width != d) {
            stx_fail(x, STX_ERR_ARG,
                     "stx_memory_copy: expected equal widths, got %zu and %zu in layer %zu",
                     f->width, d, l);
            return 0;
        }
        if (!d) continue;
        if (to->all)
            STX_RUN(x, stx_copy2d,
                    (x, stx_offset_ptr(x, t->data, b * d), n * d, stx_offset_ptr(x, f->data, c * d),
                     n * d, 1, n * d, 0));
        else if (!stx__memory_copy_layer(to, b, from, c, n, l))
            return 0;
    }
    return stx_ok(x);
}

STX_DEF int stx_memory_get(const stx_memory *s, size_t l, stx_real *out) {
    stx_ctx *x = s ? s->ctx : NULL;
    if (!stx_ok(x) || !stx__memory_layer_ok(s, "stx_memory_get", l)) return 0;
    if (!s->layer[l].count || !s->layer[l].width) return 1;
    if (!out) {
        stx_fail(x, STX_ERR_ARG, "stx_memory_get: out: expected a buffer of %zu elements, got NULL",
                 s->B * s->layer[l].count * s->layer[l].width);
        return 0;
    }
    stx__memory_download(s, l, out);
    return stx_ok(x);
}

/* Returns the largest `rows` that stx_memory_set accepts for a given n. */
static size_t stx__memory_most(const stx_memory *s, size_t n) {
    if (s->all) return 1;
    return s->desc.max_rows ? s->desc.max_rows : n;
}

STX_DEF int stx_memory_set(stx_memory *s, size_t l, size_t rows, const stx_real *in, size_t n) {
    stx_ctx *x = s ? s->ctx : NULL;
    stx_memory_layer *y;
    if (!stx_ok(x) || !stx__memory_layer_ok(s, "stx_memory_set", l)) return 0;
    y = &s->layer[l];
    if (n > rows || (s->desc.max_rows && rows > s->desc.max_rows)
        || (rows != n && !s->desc.count_unwritten) || (s->all && n != 1)) {
        stx_fail(x, STX_ERR_ARG,
                 "stx_memory_set: expected n <= rows <= %zu%s, got n = %zu and rows = %zu",
                 stx__memory_most(s, n), s->desc.count_unwritten ? "" : ", and n = rows", n, rows);
        return 0;
    }
    if (n && !in) {
        stx_fail(x, STX_ERR_ARG, "stx_memory_set: in: expected n = %zu rows, got NULL", n);
        return 0;
    }
    if (s->all) {
        stx_upload(x, y->data, in, s->B * y->width);
        return stx_ok(x);
    }
    y->logical_count = rows;
    y->masked = 0;
    if (!n) {
        stx__memory_empty(s, y);
        return 1;
    }
    if (!y->width) {
        y->count = n;
        return 1;
    }
    y->count = 0;
    if (!stx__memory_make_space(s, l, 0, n, stx__memory_spare(s, y, n))) return 0;
    stx__memory_upload(s, l, in, n);
    if (!stx_ok(x)) y->count = 0;
    return stx_ok(x);
}


// >>memory: files

/* Names of the tensors and metadata of a memory in a file (see stx_memory_save):

                  for each layer l   with desc.shared_layout
       ---------  -----------------  ------------------------------
       rows       <prefix><l>        <prefix>memory.<l>
       mask       <prefix>pad.<l>    <prefix>pad
       counts     <prefix>rows.<l>   <prefix>rows
                  <prefix>real.<l>

   rows.<l> stores logical_count, and real.<l> stores count. */
enum { STX__MEMORY_NAME = 128 };

/* Writes <prefix><what> to name, followed by l unless l is SIZE_MAX. */
static const char *stx__memory_name(char *name, const char *prefix, const char *what, size_t l) {
    if (l == SIZE_MAX)
        snprintf(name, STX__MEMORY_NAME, "%s%s", prefix, what);
    else
        snprintf(name, STX__MEMORY_NAME, "%s%s%zu", prefix, what, l);
    return name;
}

static const char *stx__memory_rows_name(char *name, const stx_memory *s, const char *prefix,
                                         size_t l) {
    return stx__memory_name(name, prefix, s->desc.shared_layout ? "memory." : "", l);
}

static const char *stx__memory_pad_name(char *name, const stx_memory *s, const char *prefix,
                                        size_t l) {
    if (s->desc.shared_layout) return stx__memory_name(name, prefix, "pad", SIZE_MAX);
    return stx__memory_name(name, prefix, "pad.", l);
}

static const char *stx__memory_count_name(char *name, const stx_memory *s, const char *prefix,
                                          size_t l) {
    if (s->desc.shared_layout) return stx__memory_name(name, prefix, "rows", SIZE_MAX);
    return stx__memory_name(name, prefix, "rows.", l);
}

static int stx__memory_prefix_ok(stx_ctx *x, const char *op, const char *prefix) {
    if (prefix && strlen(prefix) <= 80) return 1;
    if (prefix)
        stx_fail(x, STX_ERR_ARG, "%s: prefix: expected at most 80 bytes, got %zu", op,
                 strlen(prefix));
    else
        stx_fail(x, STX_ERR_ARG, "%s: prefix: expected a string, got NULL", op);
    return 0;
}

static int stx__memory_save_layer(stx_writer *w, const stx_memory *s, const char *prefix, size_t l,
                                  int with_mask) {
    const stx_memory_layer *y = &s->layer[l];
    char name[STX__MEMORY_NAME];
    size_t dim[3];
    if (!s->desc.shared_layout) {
        stx__memory_count_name(name, s, prefix, l);
        if (!stx_writer_meta_u64(w, name, y->logical_count)) return 0;
        stx__memory_name(name, prefix, "real.", l);
        if (!stx_writer_meta_u64(w, name, y->count)) return 0;
    }
    if (!y->count || !y->width) return 1;
    dim[0] = s->B;
    dim[1] = y->count;
    dim[2] = y->width;
    if (y->masked && with_mask) {
        stx__memory_pad_name(name, s, prefix, l);
        if (!stx_writer_add(w, name, STX_I32, 2, dim, y->pad)) return 0;
    }
    stx__memory_rows_name(name, s, prefix, l);
    return stx__writer_add_runs(w, name, dim, y->data, y->stride);
}

STX_DEF int stx_memory_save(stx_writer *w, const stx_memory *s, const char *prefix) {
    const int shared = s && s->desc.shared_layout;
    size_t l, dim[3], first = 0;
    char name[STX__MEMORY_NAME];
    if (!s || !stx_ok(s->ctx) || !stx__memory_prefix_ok(s->ctx, "stx_memory_save", prefix))
        return 0;
    if (s->all) {
        dim[0] = s->desc.layers;
        dim[1] = s->B;
        dim[2] = s->desc.width;
        return stx_writer_add_device(w, prefix, 3, dim, s->all);
    }
    stx__memory_count_name(name, s, prefix, 0);
    if (shared && !stx_writer_meta_u64(w, name, stx_memory_max_rows(s))) return 0;

    /* with a shared layout, all layers have the same mask, so it is saved only once */
    while (first < s->desc.layers && !s->layer[first].width) first++;
    for (l = 0; l < s->desc.layers; l++)
        if (!stx__memory_save_layer(w, s, prefix, l, !shared || l == first)) return 0;
    return 1;
}

/* Finds an entry of shape (d0,d1,d2). Sets an error and returns NULL if it is missing or
   has another shape. */
static const stx_entry *stx__memory_entry(stx_ctx *x, const stx_file *f, const char *name,
                                          size_t d0, size_t d1, size_t d2) {
    const stx_entry *e = stx_file_find(f, name);
    if (e && e->ndim == 3 && e->dim[0] == d0 && e->dim[1] == d1 && e->dim[2] == d2) return e;
    stx_fail(x, STX_ERR_FORMAT,
             "tensor \"%s\" %s: expected (%zu,%zu,%zu); use the batch size (number of "
             "streams) and the model of the run that saved the file", name,
             e ? "has another shape" : "is missing", d0, d1, d2);
    return NULL;
}

/* Reads the logical and the actual row count of layer l into *logical and *count, and
   checks that the file has these rows with the right shape. */
static int stx__memory_check_layer(const stx_memory *s, const stx_file *f, const char *prefix,
                                   size_t l, uint64_t *logical, uint64_t *count) {
    stx_ctx *x = s->ctx;
    const size_t width = s->layer[l].width;
    const size_t most = s->desc.max_rows ? s->desc.max_rows : (size_t)1 << 31;
    char name[STX__MEMORY_NAME];
    const stx_entry *pad;
    if (!stx_file_meta_u64(x, f, stx__memory_count_name(name, s, prefix, l), logical)) return 0;
    if (*logical > most) {
        stx_fail(x, STX_ERR_FORMAT,
                 "metadata \"%s\": expected at most %zu, got %llu: the file is damaged", name, most,
                 (unsigned long long)*logical);
        return 0;
    }
    *count = *logical;
    if (!s->desc.shared_layout
        && !stx_file_meta_u64(x, f, stx__memory_name(name, prefix, "real.", l), count))
        return 0;
    if (!*count || !width) return 1;
    if (*count > *logical) {
        stx_fail(x, STX_ERR_FORMAT,
                 "metadata \"%s\": expected at most %llu, got %llu: the file is damaged", name,
                 (unsigned long long)*logical, (unsigned long long)*count);
        return 0;
    }
    stx__memory_rows_name(name, s, prefix, l);
    if (!stx__memory_entry(x, f, name, s->B, (size_t)*count, width)) return 0;
    pad = stx_file_find(f, stx__memory_pad_name(name, s, prefix, l));
    if (!pad || (pad->ndim == 2 && pad->dim[0] == s->B && pad->dim[1] == *count)) return 1;
    stx_fail(x, STX_ERR_FORMAT,
             "tensor \"%s\": expected (%zu,%zu), got another shape: the file is damaged", name,
             s->B, (size_t)*count);
    return 0;
}

static int stx__memory_load_mask(stx_memory *s, const stx_entry *e, size_t l) {
    stx_ctx *x = s->ctx;
    const size_t count = s->layer[l].count, N = s->B * count;
    int64_t *v = (int64_t *)stx_block(x, stx_bytes_of(N, 1, sizeof *v));
    int32_t *m = (int32_t *)stx_block(x, stx_bytes_of(N, 1, sizeof *m));
    int ok = v && m && stx_entry_get_i64(e, v, N);
    size_t i;
    for (i = 0; ok && i < N; i++) m[i] = v[i] != 0;
    ok = ok && stx__memory_set_mask(s, l, m, count);
    stx_block_free(x, v);
    stx_block_free(x, m);
    return ok;
}

static int stx__memory_load_layer(stx_memory *s, const stx_file *f, const char *prefix, size_t l) {
    stx_ctx *x = s->ctx;
    stx_memory_layer *y = &s->layer[l];
    char name[STX__MEMORY_NAME];
    uint64_t logical, count;
    size_t b, n;
    const stx_entry *e;
    if (!stx__memory_check_layer(s, f, prefix, l, &logical, &count)) return 0;
    if (!y->width) return 1;
    n = (size_t)count;
    if (n && !stx__memory_make_space(s, l, 0, n, stx__memory_spare(s, y, n))) return 0;
    e = stx_file_find(f, stx__memory_rows_name(name, s, prefix, l));
    for (b = 0; n && b < s->B; b++) {
        stx_entry stream = *e;  /* the rows of stream b */
        stream.count = e->count / s->B;
        stream.bytes = e->bytes / s->B;
        stream.data = (const char *)e->data + b * stream.bytes;
        if (!stx_entry_upload(&stream, stx_offset_ptr(x, y->data, b * y->stride), stream.count))
            return 0;
    }
    y->logical_count = (size_t)logical;
    y->count = n;
    e = stx_file_find(f, stx__memory_pad_name(name, s, prefix, l));
    return !n || !e || stx__memory_load_mask(s, e, l);
}

STX_DEF int stx_memory_load(stx_memory *s, const stx_file *f, const char *prefix) {
    stx_ctx *x = s ? s->ctx : NULL;
    size_t l, widths = 0;
    uint64_t logical, count = 0;
    int ok = 1;
    if (!stx_ok(x) || !f || !stx__memory_prefix_ok(x, "stx_memory_load", prefix)) return 0;
    if (s->all) {
        const stx_entry *e = stx__memory_entry(x, f, prefix, s->desc.layers, s->B, s->desc.width);
        return e && stx_entry_upload(e, s->all, e->count);
    }
    stx__memory_clear(s);
    for (l = 0; ok && l < s->desc.layers; l++) {
        ok = stx__memory_check_layer(s, f, prefix, l, &logical, &count);
        widths += s->layer[l].width;
    }
    if (ok && s->desc.shared_layout && count && !widths) {
        stx_fail(x, STX_ERR_FORMAT,
                 "metadata \"%srows\" is %llu, but no layer of this model has a memory: the file "
                 "is damaged or belongs to another model", prefix,
                 (unsigned long long)count);
        ok = 0;
    }
    for (l = 0; ok && l < s->desc.layers; l++) ok = stx__memory_load_layer(s, f, prefix, l);
    if (!ok) stx__memory_clear(s);
    return ok;
}

STX_DEF uint64_t stx_memory_key(const stx_memory *s, uint64_t key) {
    size_t l;
    if (!s) return key;
    key = stx_key_add(key, (uint64_t)(uintptr_t)s->all);
    for (l = 0; l < s->desc.layers && !s->all; l++) {
        const stx_memory_layer *y = &s->layer[l];
        key = stx_key_add(key, y->logical_count);
        key = stx_key_add(key, y->count);
        key = stx_key_add(key, (uint64_t)(uintptr_t)y->data);
        key = stx_key_add(key, (uint64_t)y->masked);
        key = stx_key_add(key, y->stride);
        key = stx_key_add(key, y->capacity);
        key = stx_key_add(key, y->max_pushed);
    }
    return key;
}
