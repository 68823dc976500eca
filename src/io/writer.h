#pragma once
#include "../api/config.h"
#include "../api/context.h"
#include "../api/files.h"
#include "../core/platform.h"
#include "../core/text.h"
#include "map.h"
#include "header.h"
#include "replace.h"


// >>files: writing

/* A tensor to be written. Its data consists of `runs` contiguous runs of equal length
   with a stride of `stride` bytes. */
typedef struct stx__item {
    char *name;
    int dtype, ndim;
    size_t dim[STX_ENTRY_DIM];
    size_t bytes;       /* size of the tensor */
    size_t begin;       /* offset of the tensor within the file's data */
    size_t runs, stride;
    const void *data;
} stx__item;

/* Tensor data that the writer owns. It was copied from a GPU or gathered from several
   pieces. */
typedef struct stx__host_copy {
    struct stx__host_copy *next;
    stx_real *data;
} stx__host_copy;

struct stx_writer {
    stx_ctx *x;
    stx__item *item;
    stx__pair *meta;
    size_t count, cap, nmeta, capmeta;
    int failed;         /* 1: an addition failed, so nothing will be written */
    stx__host_copy *copies;
};

STX_DEF stx_writer *stx_writer_create(stx_ctx *x) {
    stx_writer *w;
    if (!stx_ok(x)) return NULL;
    w = (stx_writer *)stx_block(x, sizeof *w);
    if (w) w->x = x;
    return w;
}

STX_DEF void stx_writer_free(stx_writer *w) {
    stx_ctx *x;
    size_t i;
    if (!w) return;
    x = w->x;
    for (i = 0; i < w->count; i++) stx_block_free(x, w->item[i].name);
    for (i = 0; i < w->nmeta; i++) {
        stx_block_free(x, (void *)(uintptr_t)w->meta[i].key);
        stx_block_free(x, (void *)(uintptr_t)w->meta[i].value);
    }
    while (w->copies) {
        stx__host_copy *c = w->copies;
        w->copies = c->next;
        stx_block_free(x, c->data);
        stx_block_free(x, c);
    }
    stx_block_free(x, w->item);
    stx_block_free(x, w->meta);
    stx_block_free(x, w);
}

/* Checks the name of a new tensor and writes its printable form to q (STX_QUOTE). */
static int stx__writer_name(stx_writer *w, const char *name, char *q) {
    size_t i;
    strcpy(q, "NULL");
    if (name) stx_quote(q, name, strlen(name));
    if (!name || !*name || !strcmp(name, "__metadata__") || !stx__utf8_valid(name)) {
        stx_fail(w->x, STX_ERR_ARG,
                 "stx_writer_add: \"%s\" is not a valid tensor name: use non-empty UTF-8 text "
                 "other than __metadata__", q);
        return 0;
    }
    for (i = 0; i < w->count; i++)
        if (!strcmp(w->item[i].name, name)) {
            stx_fail(w->x, STX_ERR_ARG,
                     "stx_writer_add: \"%s\" was added twice: give each tensor a unique name", q);
            return 0;
        }
    return 1;
}

STX_DEF int stx_writer_add(stx_writer *w, const char *name, int dtype, int ndim, const size_t *dim,
                           const void *data) {
    char q[STX_QUOTE];
    stx__item it, *p;
    int k, before;
    if (!w) return 0;
    before = w->failed;
    w->failed = 1;  /* until this tensor has been added */
    if (!stx_ok(w->x) || !stx__writer_name(w, name, q)) return 0;
    if (!stx_dtype_size(dtype) || ndim < 0 || ndim > STX_ENTRY_DIM || (ndim && !dim)) {
        stx_fail(w->x, STX_ERR_ARG,
                 "stx_writer_add: \"%s\": expected a dtype from STX_F32 to STX_F8_E5M2 and 0 to "
                 "%d dimensions, got dtype %d and %d dimensions%s", q, STX_ENTRY_DIM, dtype, ndim,
                 ndim > 0 && !dim ? ", but dim = NULL" : "");
        return 0;
    }
    memset(&it, 0, sizeof it);
    it.dtype = dtype;
    it.ndim = ndim;
    it.data = data;
    it.runs = 1;
    it.bytes = stx_dtype_size(dtype);
    for (k = 0; k < ndim; k++) {
        it.dim[k] = dim[k];
        if (dim[k] && it.bytes > SIZE_MAX / dim[k]) {
            stx_fail(w->x, STX_ERR_ARG,
                     "stx_writer_add: the size of \"%s\" overflows size_t", q);
            return 0;
        }
        it.bytes *= dim[k];
    }
    if (it.bytes && !data) {
        stx_fail(w->x, STX_ERR_ARG, "stx_writer_add: \"%s\": expected %zu bytes of data, got NULL",
                 q, it.bytes);
        return 0;
    }
    p = (stx__item *)stx__grow(w->x, w->item, w->count, &w->cap, sizeof *p);
    if (!p) return 0;
    w->item = p;
    it.name = stx__copy(w->x, name);
    if (!it.name) return 0;
    w->item[w->count++] = it;
    w->failed = before;
    return 1;
}

STX_DEF int stx_writer_meta(stx_writer *w, const char *key, const char *value) {
    char q[STX_QUOTE] = "NULL";
    char *k, *v;
    stx__pair *p;
    size_t i;
    int before;
    if (!w) return 0;
    before = w->failed;
    w->failed = 1;  /* until this text has been added */
    if (!stx_ok(w->x)) return 0;
    if (key) stx_quote(q, key, strlen(key));
    if (!key || !value || !stx__utf8_valid(key) || !stx__utf8_valid(value)) {
        stx_fail(w->x, STX_ERR_ARG,
                 "stx_writer_meta: the key \"%s\" or its value is NULL or not UTF-8: store binary "
                 "data as a U8 tensor", q);
        return 0;
    }
    for (i = 0; i < w->nmeta; i++)
        if (!strcmp(w->meta[i].key, key)) {
            stx_fail(w->x, STX_ERR_ARG, "stx_writer_meta: the key \"%s\" was added twice", q);
            return 0;
        }
    p = (stx__pair *)stx__grow(w->x, w->meta, w->nmeta, &w->capmeta, sizeof *p);
    if (!p) return 0;
    w->meta = p;
    k = stx__copy(w->x, key);
    v = k ? stx__copy(w->x, value) : NULL;
    if (!v) {
        stx_block_free(w->x, k);
        return 0;
    }
    w->meta[w->nmeta].key = k;
    w->meta[w->nmeta++].value = v;
    w->failed = before;
    return 1;
}

/* Assigns the tensors their places in the file, largest element size first, and lists
   their runs in that order in part[1..]. */
static int stx__writer_place(stx_writer *w, stx__file_part *part) {
    size_t i, k, size, at = 0, n = 1;
    for (size = 8; size; size /= 2)
        for (i = 0; i < w->count; i++) {
            stx__item *it = &w->item[i];
            if (stx_dtype_size(it->dtype) != size) continue;
            if (it->bytes > SIZE_MAX / 2 - at) {
                stx_fail(w->x, STX_ERR_ARG,
                         "stx_writer_finish: the tensors have more bytes than a file can hold: "
                         "write them to several files");
                return 0;
            }
            it->begin = at;
            at += it->bytes;
            for (k = 0; k < it->runs; k++) {
                part[n].data = (const char *)it->data + k * it->stride;
                part[n++].bytes = it->bytes / it->runs;
            }
        }
    return 1;
}

/* Appends the JSON text of the header to t, and pads it with spaces. */
static void stx__writer_json(const stx_writer *w, stx__text *t) {
    size_t i;
    int k;
    stx__text_add_str(t, "{");
    if (w->nmeta) {
        stx__text_add_str(t, "\"__metadata__\":{");
        for (i = 0; i < w->nmeta; i++) {
            if (i) stx__text_add_str(t, ",");
            stx__text_add_json(t, w->meta[i].key);
            stx__text_add_str(t, ":");
            stx__text_add_json(t, w->meta[i].value);
        }
        stx__text_add_str(t, w->count ? "}," : "}");
    }
    for (i = 0; i < w->count; i++) {
        const stx__item *it = &w->item[i];
        if (i) stx__text_add_str(t, ",");
        stx__text_add_json(t, it->name);
        stx__text_add_str(t, ":{\"dtype\":\"");
        stx__text_add_str(t, stx__dtype[it->dtype].name);
        stx__text_add_str(t, "\",\"shape\":[");
        for (k = 0; k < it->ndim; k++) {
            if (k) stx__text_add_str(t, ",");
            stx__text_add_size(t, it->dim[k]);
        }
        stx__text_add_str(t, "],\"data_offsets\":[");
        stx__text_add_size(t, it->begin);
        stx__text_add_str(t, ",");
        stx__text_add_size(t, it->begin + it->bytes);
        stx__text_add_str(t, "]}");
    }
    stx__text_add_str(t, "}");
    while (!t->bad && t->n % STX__HEADER_PAD) stx__text_add_str(t, " ");
}

/* Writes the header, preceded by its length, to t. Lists the parts of the file in order:
   the header as part[0], then the tensors' data. */
static int stx__writer_header(stx_writer *w, stx__text *t, stx__file_part *part) {
    size_t len;
    int k;
    if (!stx__writer_place(w, part)) return 0;
    stx__text_add(t, "\0\0\0\0\0\0\0\0", 8);
    stx__writer_json(w, t);
    if (t->bad) {
        stx_fail(w->x, STX_ERR_MEMORY, "out of memory: cannot build a header of over %zu bytes",
                 t->n);
        return 0;
    }
    len = t->n - 8;
    if (len > STX__HEADER_MAX) {
        stx_fail(w->x, STX_ERR_ARG,
                 "stx_writer_finish: expected a header of at most %u bytes, but the names and "
                 "metadata need %zu: store long texts as U8 tensors", STX__HEADER_MAX, len);
        return 0;
    }
    for (k = 0; k < 8; k++) t->s[k] = (char)(unsigned char)((uint64_t)len >> (8 * k) & 0xFF);
    part[0].data = t->s;
    part[0].bytes = t->n;
    return 1;
}

/* Copies all parts into one block of *n bytes. Returns NULL after an error. */
static unsigned char *stx__writer_gather(stx_ctx *x, const stx__file_part *part, size_t parts,
                                         size_t *n) {
    unsigned char *bytes;
    size_t i, at = 0;
    *n = 0;
    for (i = 0; i < parts; i++) *n = stx_size_add(*n, part[i].bytes, 1);
    bytes = (unsigned char *)stx_block(x, *n);
    for (i = 0; bytes && i < parts; at += part[i++].bytes)
        if (part[i].bytes) memcpy(bytes + at, part[i].data, part[i].bytes);
    return bytes;
}

/* Writes the file to path or, if path is NULL, to a new block; *bytes and *n receive
   its address and size. Frees the writer. Returns 1, or sets an error and returns 0. */
static int stx__writer_end(stx_writer *w, const char *path, unsigned char **bytes, size_t *n) {
    static const uint16_t one = 1;
    stx__text t;
    stx__file_part *part;
    stx_ctx *x = w->x;
    size_t i, parts = 1;
    int done = 0;
    if (stx_ok(x) && w->failed)
        stx_fail(x, STX_ERR_ARG,
                 "stx_writer_finish: adding a tensor or metadata failed, so nothing is written");
    else if (stx_ok(x) && *(const unsigned char *)&one != 1)
        stx_fail(x, STX_ERR_IO,
                 "cannot write %s: safetensors files are little-endian, but this machine is not",
                 path ? path : "to memory");
    if (stx_ok(x)) {
        memset(&t, 0, sizeof t);
        t.x = x;
        for (i = 0; i < w->count; i++) parts += w->item[i].runs;
        part = (stx__file_part *)stx_block(x, parts * sizeof *part);
        done = part && stx__writer_header(w, &t, part);
        if (done && path)
            done = stx__replace(x, path, part, parts);
        else if (done) {
            *bytes = stx__writer_gather(x, part, parts, n);
            done = *bytes != NULL;
        }
        stx_block_free(x, t.s);
        stx_block_free(x, part);
    }
    stx_writer_free(w);
    return done;
}

STX_DEF int stx_writer_finish(stx_writer *w, const char *path) {
    if (!w) return 0;
    if (path) return stx__writer_end(w, path, NULL, NULL);
    stx_fail(w->x, STX_ERR_ARG, "stx_writer_finish: expected a path, got NULL");
    stx_writer_free(w);
    return 0;
}

STX_DEF void *stx_writer_bytes(stx_writer *w, size_t *n) {
    unsigned char *bytes = NULL;
    size_t count = 0;
    if (n) *n = 0;
    if (!w || !stx__writer_end(w, NULL, &bytes, &count)) return NULL;
    if (n) *n = count;
    return bytes;
}
