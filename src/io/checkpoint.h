#pragma once
#include "../api/config.h"
#include "../api/context.h"
#include "../api/train.h"
#include "../api/files.h"
#include "../core/loops.h"
#include "../core/platform.h"
#include "../core/context.h"
#include "../core/arena.h"
#include "../core/text.h"
#include "../core/tensors.h"
#include "../train/report.h"
#include "../train/group.h"
#include "reading.h"
#include "writer.h"


// >>checkpoints

STX_DEF int stx_entry_get(const stx_entry *e, stx_real *out, size_t n) {
#ifdef SEQTX_DOUBLE
    return stx_entry_get_f64(e, out, n);
#else
    return stx_entry_get_f32(e, out, n);
#endif
}

/* Returns hash h extended by n bytes of data, which are hashed in words of 8 bytes.
   Hashing data in several calls gives the same result as in one call only if each call
   but the last hashes complete words. */
static uint64_t stx__hash(uint64_t h, const void *data, size_t n) {
    const unsigned char *p = (const unsigned char *)data;
    while (n) {
        uint64_t v = n;
        size_t k = n < 8 ? n : 8;
        memcpy(&v, p, k);
        h = (h ^ v) * 0x9E3779B97F4A7C15u;
        h ^= h >> 32;
        p += k;
        n -= k;
    }
    return h;
}

static uint64_t stx__hash_item(const stx__item *it) {
    uint64_t h = stx__hash((uint64_t)it->dtype * 16 + (uint64_t)it->ndim + 1, it->name,
                           strlen(it->name) + 1);
    size_t k;
    int i;
    for (i = 0; i < it->ndim; i++) {
        uint64_t d = it->dim[i];
        h = stx__hash(h, &d, sizeof d);
    }
    for (k = 0; k < it->runs; k++)
        h = stx__hash(h, (const char *)it->data + k * it->stride, it->bytes / it->runs);
    return h;
}

static uint64_t stx__hash_entry(const stx_entry *e) {
    stx__item it;
    memset(&it, 0, sizeof it);
    it.name = (char *)(uintptr_t)e->name;
    it.dtype = e->dtype;
    it.ndim = e->ndim;
    memcpy(it.dim, e->dim, sizeof it.dim);
    it.data = e->data;
    it.bytes = e->bytes;
    it.runs = 1;
    return stx__hash_item(&it);
}

static uint64_t stx__hash_text(const char *key, const char *value) {
    return stx__hash(stx__hash(7, key, strlen(key) + 1), value, strlen(value) + 1);
}

/* The checksum is the sum of the hashes of all tensors and metadata entries, so it does
   not depend on their order. */
STX_DEF int stx_writer_checksum(stx_writer *w) {
    uint64_t h = 0;
    size_t i;
    if (!w || !stx_ok(w->x)) return 0;
    for (i = 0; i < w->count; i++) h += stx__hash_item(&w->item[i]);
    for (i = 0; i < w->nmeta; i++) h += stx__hash_text(w->meta[i].key, w->meta[i].value);
    return stx_writer_meta_u64(w, "seal", h);
}

STX_DEF int stx_file_verify(const stx_file *f) {
    uint64_t h = 0, expected;
    size_t i;
    if (!f || !stx_file_meta_u64(f->x, f, "seal", &expected)) return 0;
    for (i = 0; i < f->count; i++) h += stx__hash_entry(&f->entry[i]);
    for (i = 0; i < f->nmeta; i++)
        if (strcmp(f->meta[i].key, "seal")) h += stx__hash_text(f->meta[i].key, f->meta[i].value);
    if (h == expected) return 1;
    stx_fail(f->x, STX_ERR_FORMAT,
             "%s is damaged: its contents do not match its checksum; use another copy", f->path);
    return 0;
}

/* Allocates host memory for n elements. The memory is freed with the writer. Returns
   NULL after an error. */
static stx_real *stx__host_copy_new(stx_writer *w, size_t n) {
    stx__host_copy *c = (stx__host_copy *)stx_block(w->x, sizeof *c);
    if (!c) {
        w->failed = 1;
        return NULL;
    }
    c->data = (stx_real *)stx_block(w->x, stx_bytes_of(n, 1, sizeof *c->data));
    c->next = w->copies;
    w->copies = c;
    if (!c->data) w->failed = 1;
    return c->data;
}

STX_DEF int stx_writer_add_copy(stx_writer *w, const char *name, int dtype, int ndim,
                                const size_t *dim, const void *data) {
    size_t bytes;
    stx_real *copy;
    if (!stx_writer_add(w, name, dtype, ndim, dim, data)) return 0;
    bytes = w->item[w->count - 1].bytes;
    if (!bytes) return 1;
    copy = stx__host_copy_new(w, (bytes - 1) / sizeof *copy + 1);
    if (!copy) return 0;
    memcpy(copy, data, bytes);
    w->item[w->count - 1].data = copy;
    return 1;
}

STX_DEF int stx_writer_add_device(stx_writer *w, const char *name, int ndim, const size_t *dim,
                                  const stx_real *data) {
    stx_real *copy;
    size_t n = 1;
    int i;
    if (!w || !stx_ok(w->x)) return 0;
    if (!stx__on_gpu(w->x)) return stx_writer_add(w, name, STX_REAL_DTYPE, ndim, dim, data);
    for (i = 0; i < ndim; i++) n = stx_bytes_of(n, dim[i], 1);
    copy = stx__host_copy_new(w, n);
    if (!copy) return 0;
    stx_download(w->x, copy, data, n);
    return stx_writer_add(w, name, STX_REAL_DTYPE, ndim, dim, copy);
}

/* Adds a tensor (dim[0],dim[1],dim[2]) whose outermost dimension has a stride of
   `stride` elements. The data is copied first if it is on a GPU or if the length of a
   run is not a multiple of 8 bytes (see stx__hash). Otherwise, the writer later reads
   `data` directly. */
static int stx__writer_add_runs(stx_writer *w, const char *name, const size_t *dim,
                                const stx_real *data, size_t stride) {
    size_t n = dim[1] * dim[2], b;
    stx_real *copy;
    if (dim[0] == 1 || stride == n) return stx_writer_add_device(w, name, 3, dim, data);
    if (!w || !stx_ok(w->x)) return 0;
    if (stx__on_gpu(w->x) || n * sizeof *data % 8) {
        copy = stx__host_copy_new(w, stx_bytes_of(dim[0], n, 1));
        if (!copy) return 0;
        for (b = 0; b < dim[0]; b++)
            stx_download(w->x, copy + b * n, stx_offset_ptr(w->x, data, b * stride), n);
        return stx_writer_add(w, name, STX_REAL_DTYPE, 3, dim, copy);
    }
    if (!stx_writer_add(w, name, STX_REAL_DTYPE, 3, dim, data)) return 0;
    w->item[w->count - 1].runs = dim[0];
    w->item[w->count - 1].stride = stride * sizeof *data;
    return 1;
}

STX_DEF int stx_entry_upload(const stx_entry *e, stx_real *to, size_t n) {
    stx_ctx *x = e ? e->file->x : NULL;
    stx_real *host;
    int ok;
    if (!e) return 0;
    stx__param_written(x, to);
    if (!stx__on_gpu(x)) return stx_entry_get(e, to, n);
    host = (stx_real *)stx_block(x, stx_bytes_of(n, 1, sizeof *host));
    ok = host && stx_entry_get(e, host, n);
    if (ok) stx_upload(x, to, host, n);
    stx_block_free(x, host);
    return ok && stx_ok(x);
}

enum { STX__FULL_NAME = 512 }; /* capacity for the name of a tensor with its prefix */

/* Writes the full name of a tensor. Returns NULL and sets an error if it is too long. */
static const char *stx__full_name(stx_ctx *x, char full[STX__FULL_NAME], const char *prefix,
                                  const char *name) {
    if (stx__join(full, STX__FULL_NAME, prefix, name)) return full;
    stx_fail(x, STX_ERR_ARG, "the name \"%.40s%.40s..\" exceeds %d bytes: use a shorter name",
             prefix, name, STX__FULL_NAME - 1);
    return NULL;
}

static int stx__save_tensors(stx_writer *w, stx_tensor *const *t, const char *const *name,
                             size_t count, const char *prefix) {
    char full[STX__FULL_NAME];
    size_t i;
    for (i = 0; i < count; i++)
        if (!w || !stx__full_name(w->x, full, prefix, name[i])
            || !stx_writer_add_device(w, full, t[i]->ndim, t[i]->dim, t[i]->data))
            return 0;
    return 1;
}

/* Returns 1 if t has the shape of e, or that shape with `rows` more rows. */
static int stx__fits_shape(const stx_entry *e, const stx_tensor *t, size_t rows) {
    int k, same = e->ndim == t->ndim;
    for (k = 0; same && k < e->ndim; k++)
        same = e->dim[k] == t->dim[k]
               || (!k && rows <= t->dim[0] && e->dim[0] == t->dim[0] - rows);
    return same;
}

/* Returns 1 if a parameter can have this type in a file. */
static int stx__is_param(int dtype) {
    return dtype == STX_F32 || dtype == STX_F64 || dtype == STX_F16 || dtype == STX_BF16;
}

/* Loads tensors. If `copy` is 0, only checks that the file has all of them, with the
   right shapes and types. A tensor may have `rows` more rows than in the file. */
static int stx__load_tensors(stx_ctx *x, stx_tensor *const *t, const char *const *name,
                             size_t count, const stx_file *f, const char *prefix, size_t rows,
                             int copy) {
    char full[STX__FULL_NAME], expected[96], got[21 * STX_ENTRY_DIM + 3];
    size_t i;
    for (i = 0; i < count; i++) {
        const char *s = stx__join(full, sizeof full, prefix, name[i]);
        const stx_entry *e = s ? stx_file_find(f, s) : NULL;
        if (!e) {
            stx_fail(x, STX_ERR_FORMAT,
                     "the file has no tensor \"%s%s\": it belongs to another model or optimiser; "
                     "use the options of the run that saved it", prefix, name[i]);
            return 0;
        }
        if (!stx__entry_readable(e)) return 0;
        if (!stx__fits_shape(e, t[i], rows) || !stx__is_param(e->dtype)) {
            stx_fail(x, STX_ERR_FORMAT,
                     "tensor \"%s\": the model expects shape %s and dtype F32, F64, F16 or BF16, "
                     "but the file has shape %s and dtype %s: use the options of the run that "
                     "saved it", full, stx__shape(t[i], expected),
                     stx__dims(e->dim, e->ndim, got), e->kind);
            return 0;
        }
        if (copy && !stx_entry_upload(e, t[i]->data, e->count)) return 0;
    }
    return 1;
}

STX_DEF int stx_params_save(stx_writer *w, const stx_params *p, const char *prefix) {
    return p && stx_ok(p->ctx) && stx__save_tensors(w, p->tensor, p->name, p->count, prefix);
}

STX_DEF int stx_params_load_grown(stx_params *p, const stx_file *f, const char *prefix,
                                  size_t rows) {
    return p && f && stx_ok(p->ctx)
           && stx__load_tensors(p->ctx, p->tensor, p->name, p->count, f, prefix, rows, 0)
           && stx__load_tensors(p->ctx, p->tensor, p->name, p->count, f, prefix, rows, 1);
}

STX_DEF int stx_params_load(stx_params *p, const stx_file *f, const char *prefix) {
    return stx_params_load_grown(p, f, prefix, 0);
}

STX_DEF int stx_file_meta_u64(stx_ctx *x, const stx_file *f, const char *key, uint64_t *out) {
    const char *s = stx_file_meta(f, key), *p = s;
    uint64_t v = 0;
    for (; p && *p >= '0' && *p <= '9'; p++) {
        const unsigned digit = (unsigned)(*p - '0');
        if (v > (UINT64_MAX - digit) / 10) break;
        v = 10 * v + digit;
    }
    if (!s || p == s || *p) {
        stx_fail(x, STX_ERR_FORMAT,
                 "metadata \"%s\": expected an unsigned 64-bit integer, got %s%s%s: the file is "
                 "damaged or was not written by this program",
                 key, s ? "\"" : "", s ? s : "nothing", s ? "\"" : "");
        return 0;
    }
    *out = v;
    return 1;
}

STX_DEF int stx_writer_meta_u64(stx_writer *w, const char *key, uint64_t value) {
    char t[24];
    snprintf(t, sizeof t, "%llu", (unsigned long long)value);
    return stx_writer_meta(w, key, t);
}

/* Capacity for a name in a file, such as "arch.optim.0.", where "arch." is the prefix. */
enum { STX__OPTIM_NAME = 96 };

static const char *stx__optim_name(char *out, const char *prefix, const char *name) {
    snprintf(out, STX__OPTIM_NAME, "%.64s%s", prefix, name);
    return out;
}

static const char *stx__optim_state_name(char *out, const char *prefix, int k) {
    return stx__optim_name(out, prefix, k ? "optim.1." : "optim.0.");
}

/* Returns 1 if parameter i has state k, on this rank or another. */
static int stx__optim_has_state(const stx_optim *o, int k, size_t i) {
    return o->state[k] && o->params->tensor[i]->needs_grad
           && !(k == 1 && o->is_matrix && o->is_matrix[i]);
}

/* For sharded state: gathers state k of tensor i on rank 0. On rank 0, `copy` receives
   the whole tensor; on all other ranks, `copy` is NULL. */
static int stx__gather_shards(const stx_optim *o, int k, size_t i, stx_real *copy) {
    stx_ctx *x = o->params->ctx;
    int r, ok = 1;
    for (r = 0; ok && r < x->group.ranks; r++) {
        stx__shard s = stx__shard_of(o, i, (size_t)r, (size_t)x->group.ranks);
        size_t n = s.end - s.begin;
        stx_real *part;
        if (!n || (x->group.rank && x->group.rank != r)) continue;
        part = copy ? copy + s.begin : (stx_real *)stx_block(x, n * sizeof *part);
        if (!part) return 0;
        if (x->group.rank == r) stx_download(x, part, o->state[k][i]->data, n);
        ok = stx_ok(x) && stx_group_send_bytes(x, part, n * sizeof *part, r, 0);
        if (!copy) stx_block_free(x, part);
    }
    return ok;
}

/* For sharded state: gathers state k from all ranks and adds it to the file that rank 0
   writes. All ranks must call this function; w is NULL on all ranks except 0. */
static int stx__save_shards(stx_writer *w, const stx_optim *o, int k, const char *prefix) {
    const stx_params *p = o->params;
    size_t i;
    for (i = 0; i < p->count; i++) {
        const stx_tensor *t = p->tensor[i];
        char full[STX__FULL_NAME];
        stx_real *copy;
        if (!stx__optim_has_state(o, k, i)) continue;
        /* all ranks check the name, so that no rank waits for one that has failed */
        if (!stx__full_name(o->params->ctx, full, prefix, p->name[i])) return 0;
        copy = w ? stx__host_copy_new(w, t->size) : NULL;
        if (w && !copy) return 0;
        if (!stx__gather_shards(o, k, i, copy)) return 0;
        if (copy && !stx_writer_add(w, full, STX_REAL_DTYPE, t->ndim, t->dim, copy)) return 0;
    }
    return 1;
}

STX_DEF int stx_optim_save_as(stx_writer *w, const stx_optim *o, const char *prefix) {
    char name[STX__OPTIM_NAME];
    stx_ctx *x = o ? o->params->ctx : NULL;
    size_t i;
    int k;
    if (!stx_ok(x)) return 0;
    if (!stx__state_complete(x, "stx_optim_save")) return 0;
    stx_optim_sync((stx_optim *)(uintptr_t)o);
    for (k = 0; k < 2; k++) {
        const char *state = stx__optim_state_name(name, prefix, k);
        if (!o->state[k]) continue;
        if (x->group.shard && !stx__save_shards(w, o, k, state)) return 0;
        for (i = 0; i < o->count && !x->group.shard; i++)
            if (stx__optim_has_state(o, k, i)
                && !stx__save_tensors(w, o->state[k] + i, o->params->name + i, 1, state))
                return 0;
    }
    if (x->group.shard && !w && x->group.rank) return 1;
    stx__optim_name(name, prefix, "optim.kind");
    if (!stx_writer_meta_u64(w, name, (uint64_t)o->desc.kind)) return 0;
    stx__optim_name(name, prefix, "optim.step");
    if (!stx_writer_meta_u64(w, name, o->step)) return 0;
    stx__optim_name(name, prefix, "optim.skipped");
    return stx_writer_meta_u64(w, name, o->skipped);
}

STX_DEF int stx_optim_save(stx_writer *w, const stx_optim *o) {
    return stx_optim_save_as(w, o, "");
}

/* For sharded state: loads this rank's shard of state k. */
static int stx__load_shards(stx_optim *o, int k, const stx_file *f, const char *prefix) {
    const stx_params *p = o->params;
    stx_ctx *x = p->ctx;
    size_t i;
    for (i = 0; i < p->count; i++) {
        const stx_tensor *t = p->tensor[i];
        stx__shard s = stx__own_shard(o, i);
        char full[STX__FULL_NAME];
        stx_real *all;
        int ok;
        if (s.begin == s.end || !stx__optim_has_state(o, k, i)) continue;
        all = (stx_real *)stx_block(x, t->size * sizeof *all);
        ok = all && stx__full_name(x, full, prefix, p->name[i])
             && stx_entry_get(stx_file_find(f, full), all, t->size);
        if (ok) stx_upload(x, o->state[k][i]->data, all + s.begin, s.end - s.begin);
        stx_block_free(x, all);
        if (!ok) return 0;
    }
    return stx_ok(x);
}

/* Sets an error and returns 0 if the file lacks a state of the parameter `name`. */
static int stx__state_in_file(stx_ctx *x, const stx_file *f, const char *prefix,
                              const char *name) {
    char full[STX__FULL_NAME];
    if (!stx__full_name(x, full, prefix, name)) return 0;
    if (stx_file_find(f, full)) return 1;
    stx_fail(x, STX_ERR_FORMAT,
             "the file has no optimiser state of \"%.200s\", which was frozen in the run that "
             "saved it, or belongs to another model: freeze the parameter, or load only the "
             "parameters and begin with a new optimiser", name);
    return 0;
}

/* Checks that the file has the state of all parameters, then loads it. In the file,
   each state has the shape of its parameter; a rank with sharded state loads only its
   shard. */
static int stx__optim_load_state(stx_optim *o, const stx_file *f, const char *prefix) {
    const stx_params *p = o->params;
    stx_ctx *x = p->ctx;
    const int shard = x->group.shard;
    char name[STX__OPTIM_NAME];
    size_t i;
    int k, copy;
    for (copy = 0; copy < 2; copy++)
        for (k = 0; k < 2; k++) {
            stx_tensor **t = shard ? p->tensor : o->state[k];
            const char *state = stx__optim_state_name(name, prefix, k);
            if (!o->state[k]) continue;
            for (i = 0; i < o->count; i++) {
                if (!stx__optim_has_state(o, k, i)) continue;
                if (!stx__state_in_file(x, f, state, p->name[i])) return 0;
                if (!stx__load_tensors(x, t + i, p->name + i, 1, f, state, 0, copy && !shard))
                    return 0;
            }
            if (copy && shard && !stx__load_shards(o, k, f, state)) return 0;
        }
    return 1;
}

STX_DEF int stx_optim_load_as(stx_optim *o, const stx_file *f, const char *prefix) {
    STX__FP_SCOPE;
    char name[STX__OPTIM_NAME];
    stx_ctx *x = o ? o->params->ctx : NULL;
    stx_update u;
    uint64_t kind, step, skipped;
    if (!stx_ok(x) || !f) return 0;
    stx__optim_name(name, prefix, "optim.kind");
    if (!stx_file_meta_u64(x, f, name, &kind)) return 0;
    stx__optim_name(name, prefix, "optim.step");
    if (!stx_file_meta_u64(x, f, name, &step)) return 0;
    stx__optim_name(name, prefix, "optim.skipped");
    if (!stx_file_meta_u64(x, f, name, &skipped)) return 0;
    if (kind != (uint64_t)o->desc.kind) {
        stx_fail(x, STX_ERR_FORMAT,
                 "the file has the state of optimiser %d, but this run uses %d (1 sgd, 2 adagrad, "
                 "3 adam, 4 adamw, 5 radam, 6 lamb, 7 muon): use the optimiser of the saved run",
                 (int)kind, o->desc.kind);
        return 0;
    }
    if (!stx__state_complete(x, "stx_optim_load")) return 0;
    if (!stx__optim_load_state(o, f, prefix) || !stx__report_sync(x)) return 0;

    o->step = step;
    o->skipped = skipped;
    u = x->report.host->update[o->slot];
    u.step = step;
    u.skipped = skipped;
    if (o->lr >= 0) u.lr = o->lr;
    if (stx__on_gpu(x)) x->report.host->update[o->slot] = u;
    stx__put_bytes(x, o->update, &u, sizeof u);
    return stx_ok(x);
}

STX_DEF int stx_optim_load(stx_optim *o, const stx_file *f) {
    return stx_optim_load_as(o, f, "");
}
