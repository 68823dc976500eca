#pragma once
#include "../api/config.h"
#include "../api/context.h"
#include "../api/cuda.h"
#include "platform.h"
#include "context.h"


// >>context: memory

/* Like malloc, but advises the kernel on the page size of large allocations. */
static void *stx__pages_alloc(size_t n, int advice) {
    char *p = (char *)malloc(n);
    (void)advice;
#ifdef STX__HUGE
    if (p && n >= 2 * (size_t)STX__HUGE) {
        size_t skip = (STX__HUGE - (uintptr_t)p % STX__HUGE) % STX__HUGE;
        (void)madvise(p + skip, (n - skip) / STX__HUGE * STX__HUGE, advice);
    }
#endif
    return p;
}

/* The default allocator requests huge pages: consecutive rows of a head are about one
   small page apart, so small pages would cause many TLB misses. */
static void *stx__sys_alloc(void *user, size_t n) {
    (void)user;
    return stx__pages_alloc(n, 14 /* MADV_HUGEPAGE */);
}

/* A dry run writes only the tensor structs, which are far apart. It requests small
   pages, because each page that is written to occupies physical memory. */
static void *stx__dry_alloc(void *user, size_t n) {
    (void)user;
    return stx__pages_alloc(n, 15 /* MADV_NOHUGEPAGE */);
}

static void stx__sys_release(void *user, void *p) {
    (void)user;
    free(p);
}

STX_DEF void stx_fail(stx_ctx *x, int code, const char *fmt, ...) {
    va_list ap;
    if (!x || x->error.code) return;
    x->error.code = code;
    va_start(ap, fmt);
    vsnprintf(x->error.text, sizeof x->error.text, fmt, ap);
    va_end(ap);
}

STX_DEF int stx_ok(const stx_ctx *x) {
    return x && x->error.code == STX_OK;
}

STX_DEF int stx_error_code(const stx_ctx *x) {
    return x ? x->error.code : STX_ERR_MEMORY;
}

STX_DEF const char *stx_error(const stx_ctx *x) {
    return x ? x->error.text : "the context is NULL: stx_create ran out of memory";
}

STX_DEF void stx_clear_error(stx_ctx *x) {
    if (!x) return;
    x->error.code = STX_OK;
    x->error.text[0] = 0;
}

static int stx__on_gpu(const stx_ctx *x) {
    return x->desc.device == STX_CUDA;
}

/* Returns whether activations are stored as bf16. */
static int stx__stores_bf16(const stx_ctx *x) {
    return stx__on_gpu(x) && x->desc.precision == STX_PREC_BF16;
}

#define STX__FROM_GPU "the previous step copied data from the GPU (stx_get, stx_item)"
#define STX__TO_GPU   "the previous step copied data to the GPU (stx_tokens, stx_input, stx_set)"

/* Must be called where the host reads or writes device data, waits for the device or
   allocates: a step that does so is not captured as a CUDA graph. `what` is a string
   constant for stx_step_replay_status. */
static void stx__host_access(stx_ctx *x, const char *what) {
    if (!x->replay.host_access) x->replay.host_access = what;
}

/* Marks the host's copies of the report and of mirrored parameters as out of date. */
static void stx__report_stale(stx_ctx *x) {
    x->report.age = STX__STALE;
    x->report.mirrors_stale = 1;
}

/* Returns the packed copy (>>gemm: packed weights) of the matrix that p points into, or
   NULL. x->packed.matrix is sorted by address. */
static stx__packed *stx__packed_at(const stx_ctx *x, const stx_real *p) {
    size_t lo = 0, hi = x->packed.count;
    const stx__packed *w;
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        if (x->packed.matrix[mid].from <= p)
            lo = mid + 1;
        else
            hi = mid;
    }
    if (!lo) return NULL;
    w = x->packed.matrix + lo - 1;
    return p < w->from + w->size ? x->packed.matrix + lo - 1 : NULL;
}

/* Returns the block that contains a packed copy. It begins at h (bfloat16) or f
   (int8). */
static void *stx__packed_block(const stx__packed *w) {
    return (void *)(uintptr_t)(w->h ? (const void *)w->h : (const void *)w->f);
}

/* Frees the packed copy of the matrix that p points into, if there is one. */
static void stx__unpack(stx_ctx *x, const stx_real *p) {
    stx__packed *w = stx__packed_at(x, p);
    if (!w) return;
    stx_block_free(x, stx__packed_block(w));
    x->packed.count--;
    memmove(w, w + 1, (size_t)(x->packed.matrix + x->packed.count - w) * sizeof *w);
}

/* Must be called before a tensor that may be a parameter is written. Frees the packed
   copy of the old values and marks the host's mirrors as stale. */
static void stx__param_written(stx_ctx *x, const stx_real *p) {
    stx__unpack(x, p);
    stx__report_stale(x);
}

/* In a group, replaces p (n) in device memory with its mean over the ranks. */
static void stx__group_mean(stx_ctx *x, stx_real *p, size_t n) {
    x->group.ops->start_mean(x, p, n, -1);
    x->group.ops->wait(x, p, n);
}

/* Returns the number of bytes that the gradient arenas of all parameter lists use or,
   with reserved = 1, have reserved. */
static size_t stx__grads_bytes(const stx_ctx *x, int reserved) {
    const stx_params *p;
    size_t n = 0;
    for (p = x->lists; p; p = p->next) {
        const stx__arena *a = p->grads_arena;
        n += reserved ? a->reserved : a->used;
    }
    return n;
}

/* Returns the bytes reserved on the device. On a GPU, the few kilobytes of host memory
   for headers and shapes are not counted. */
static size_t stx__reserved(const stx_ctx *x) {
#ifdef SEQTX_CUDA
    if (stx__on_gpu(x)) return stx_cuda_bytes(x);
#endif
    return x->mem.keep.reserved + x->mem.step.reserved + x->mem.block_bytes
           + stx__grads_bytes(x, 1);
}

#ifdef SEQTX_CUDA
static size_t stx__arena_unused(const stx__arena *a) {
    return a->reserved - a->used;
}
#endif

static void stx__update_peak(stx_ctx *x) {
    size_t now = x->mem.keep.used + x->mem.step.used + x->mem.block_bytes + stx__grads_bytes(x, 0);
#ifdef SEQTX_CUDA
    if (stx__on_gpu(x))
        now = stx_cuda_bytes(x) - stx__arena_unused(&x->mem.dev_keep)
              - stx__arena_unused(&x->mem.dev_params) - stx__arena_unused(&x->mem.dev_step)
              - stx__arena_unused(&x->mem.dev_bytes)
              - (stx__grads_bytes(x, 1) - stx__grads_bytes(x, 0));
#endif
    if (now > x->mem.peak) x->mem.peak = now;
}

/* Allocates n bytes, plus space to align them, if desc.max_bytes permits: from the user's
   allocator if kind is STX__HOST, otherwise on the GPU. On failure, returns NULL and sets
   an error that begins with `what`. If `what` is NULL (GPU only), no error is set, so
   that the caller can retry with a smaller n. */
static void *stx__raw_alloc(stx_ctx *x, size_t n, const char *what, int kind) {
    void *p = NULL;
    const size_t used = stx__reserved(x), limit = x->desc.max_bytes;
    const int limited = limit && (kind != STX__HOST || !stx__on_gpu(x));
    if (limited && (n > limit || used > limit - n)) {
        if (what)
            stx_fail(x, STX_ERR_MEMORY,
                     "%s: %zu more bytes would exceed the limit of %zu bytes (%zu in use): "
                     "raise desc.max_bytes, or use a smaller batch, block or model",
                     what, n, limit, used);
        return NULL;
    }
#ifdef SEQTX_CUDA
    if (kind != STX__HOST) {
        p = n ? stx_cuda_alloc(x, n, kind) : NULL;
        if (!p && what)
            stx_fail(x, STX_ERR_MEMORY,
                     "%s: out of GPU memory: cannot allocate %zu more bytes (%zu in use by this "
                     "context): use a smaller batch, block or model, or enable recomputation "
                     "or STX_PREC_BF16",
                     what, n, used);
        return p;
    }
#endif
    if (n < SIZE_MAX - 64) p = x->desc.alloc(x->desc.user, n + 64);
    if (!p)
        stx_fail(x, STX_ERR_MEMORY,
                 "%s: out of memory: cannot allocate %zu more bytes (%zu in use): use a smaller "
                 "batch, block or model, or enable recomputation", what, n, used);
    return p;
}

static char *stx__align64(void *p) {
    return (char *)(((uintptr_t)p + 63) & ~(uintptr_t)63);
}

static void stx__gpu_release(stx_ctx *x, void *p) {
#ifdef SEQTX_CUDA
    if (p) stx_cuda_free(x, p);
#else
    (void)x;
    (void)p;
#endif
}

/* Granularity of allocations in an arena, in bytes: a power of two. */
static size_t stx__arena_unit(const stx__arena *a) {
    return a->kind == STX__HOST ? 64 : 256;
}

/* Appends a chunk of at least `need` bytes. Unless too little memory is left, the chunk
   is at least half as large as the arena, so that there are few chunks. */
static int stx__arena_grow(stx_ctx *x, stx__arena *a, size_t need) {
    const size_t unit = stx__arena_unit(a);
    size_t size = STX_MAX(need, STX_MAX(x->desc.chunk_bytes, a->reserved / 2));
    void *raw, *base = NULL;
    stx__chunk *c;

    size = (size + unit - 1) & ~(unit - 1);
    if (x->desc.max_bytes) { /* leave half of the remaining memory for other allocations */
        size_t left = x->desc.max_bytes - STX_MIN(stx__reserved(x), x->desc.max_bytes);
        size = STX_MAX(need, STX_MIN(size, (left / 2) & ~(unit - 1)));
    }

    if (a->kind != STX__HOST) {
        stx__host_access(x, "the previous step allocated GPU memory");
        base = stx__raw_alloc(x, size, size > need ? NULL : a->name, a->kind);
        if (!base && stx_ok(x)) {
            size = need;
            base = stx__raw_alloc(x, size, a->name, a->kind);
        }
        if (!base) return 0;
    }
    raw = stx__raw_alloc(x, (base ? 0 : size) + sizeof(stx__chunk), a->name, STX__HOST);
    if (!raw) {
        stx__gpu_release(x, base);
        return 0;
    }

    c = (stx__chunk *)raw;
    c->base = base ? (char *)base : stx__align64((char *)raw + sizeof(stx__chunk));
    c->size = size;
    c->used = 0;
    c->next = NULL;
    if (stx__guarded(a)) STX__POISON(c->base, size);
    if (a->cur)
        a->cur->next = c;
    else
        a->first = c;
    a->cur = c;
    a->reserved += size + (base ? 0 : sizeof(stx__chunk));
    return 1;
}

static void *stx__arena_alloc(stx_ctx *x, stx__arena *a, size_t n) {
    const size_t unit = stx__arena_unit(a);
    size_t need;
    char *p;
    if (x->error.code) return NULL;
    if (n > SIZE_MAX - STX__OVERHEAD) {
        stx_fail(x, STX_ERR_MEMORY, "%s: an allocation exceeds the address space: use smaller "
                 "dimensions", a->name);
        return NULL;
    }
    need = ((n + unit - 1) & ~(unit - 1)) + (STX__RED_ZONE ? unit : 0);
    if (!need) need = unit;

    while (a->cur && a->cur->size - a->cur->used < need && a->cur->next) {
        a->cur = a->cur->next;
        a->cur->used = 0;
    }
    if (!a->cur || a->cur->size - a->cur->used < need)
        if (!stx__arena_grow(x, a, need)) return NULL;

    p = a->cur->base + a->cur->used;
    a->cur->used += need;
    a->used += need;
    stx__update_peak(x);
    if (stx__guarded(a)) STX__UNPOISON(p, n);
    return p;
}

static void stx__arena_rewind(stx__arena *a) {
    stx__chunk *c;
    for (c = a->first; c; c = c->next) {
        if (stx__guarded(a)) STX__POISON(c->base, c->used);
        c->used = 0;
    }
    a->cur = a->first;
    a->used = 0;
}

static void stx__arena_free(stx_ctx *x, stx__arena *a) {
    stx__chunk *c = a->first, *next;
    for (; c; c = next) {
        next = c->next;
        if (stx__guarded(a)) STX__UNPOISON(c->base, c->size);
        if (a->kind != STX__HOST) stx__gpu_release(x, c->base);
        x->desc.release(x->desc.user, c);
    }
    a->first = a->cur = NULL;
}

STX_DEF void *stx_persist(stx_ctx *x, size_t n) {
    void *p = x ? stx__arena_alloc(x, &x->mem.keep, n) : NULL;
    if (p) memset(p, 0, n);
    return p;
}

STX_DEF void *stx_step_host_bytes(stx_ctx *x, size_t n) {
    return x ? stx__arena_alloc(x, &x->mem.step, n) : NULL;
}

/* Like stx_block, but without zeroing. */
static void *stx__block_raw(stx_ctx *x, size_t n) {
    stx__block_head *h;
    void *raw;
    if (!x || x->error.code) return NULL;
    if (n > SIZE_MAX - STX__OVERHEAD) {
        stx_fail(x, STX_ERR_MEMORY, "block: an allocation exceeds the address space: use smaller "
                 "dimensions");
        return NULL;
    }
    raw = stx__raw_alloc(x, STX__BLOCK_HEAD + n, "block", STX__HOST);
    if (!raw) return NULL;

    h = (stx__block_head *)(void *)stx__align64(raw);
    h->raw = raw;
    h->size = n;
    h->next = &x->mem.blocks;
    h->prev = x->mem.blocks.prev;
    x->mem.blocks.prev->next = h;
    x->mem.blocks.prev = h;
    x->mem.block_bytes += n;
    stx__update_peak(x);
    return (char *)h + STX__BLOCK_HEAD;
}

STX_DEF void *stx_block(stx_ctx *x, size_t n) {
    void *p = stx__block_raw(x, n);
    if (p) memset(p, 0, n);
    return p;
}

STX_DEF void stx_block_free(stx_ctx *x, void *p) {
    stx__block_head *h;
    if (!x || !p) return;
    h = (stx__block_head *)(void *)((char *)p - STX__BLOCK_HEAD);
    h->prev->next = h->next;
    h->next->prev = h->prev;
    x->mem.block_bytes -= h->size;
    x->desc.release(x->desc.user, h->raw);
}

/* An entry of the list of GPU memory blocks. These blocks cannot begin with a header,
   because the host could not read it. */
typedef struct stx__dev_block {
    struct stx__dev_block *next;
    void *p;
} stx__dev_block;

static void stx__zero(stx_ctx *x, void *p, size_t bytes) {
#ifdef SEQTX_CUDA
    if (stx__on_gpu(x)) {
        stx_cuda_zero(x, p, bytes);
        return;
    }
#endif
    (void)x;
    memset(p, 0, bytes);
}

/* The kinds of device memory: activations and f32 values of a step, parameters, and
   state that is valid as long as the context. On a CPU, two arenas contain all of
   these. */
enum { STX__STEP_ACTIVATIONS, STX__STEP_F32, STX__PARAM, STX__STATE };

static int stx__step_kind(int is_f32) {
    return is_f32 ? STX__STEP_F32 : STX__STEP_ACTIVATIONS;
}

static int stx__is_of_step(int where) {
    return where == STX__STEP_ACTIVATIONS || where == STX__STEP_F32;
}

static stx__arena *stx__arena_of(stx_ctx *x, int where) {
    if (!stx__on_gpu(x))
        return stx__is_of_step(where) ? &x->mem.step : &x->mem.keep;
    switch (where) {
    case STX__STEP_ACTIVATIONS: return &x->mem.dev_step;
    case STX__STEP_F32: return &x->mem.dev_bytes;
    case STX__PARAM: return &x->mem.dev_params;
    default: return &x->mem.dev_keep;
    }
}

static size_t stx__element_size(const stx_ctx *x, int where) {
    return where == STX__STEP_ACTIVATIONS && stx__stores_bf16(x) ? 2 : sizeof(stx_real);
}

/* Allocates a zeroed device block of n elements, as f32 or in the activation type. */
static stx_real *stx__block_of(stx_ctx *x, size_t n, int is_f32) {
    stx__dev_block *b;
    size_t bytes;
    if (!x || x->error.code) return NULL;
    bytes = stx_bytes_of(n, stx__element_size(x, stx__step_kind(is_f32)), 1);
    if (!stx__on_gpu(x)) {
        stx_real *p = (stx_real *)stx__block_raw(x, bytes);
        if (p && !x->desc.dry) memset(p, 0, bytes);
        return p;
    }

    b = (stx__dev_block *)stx_block(x, sizeof *b);
    if (!b) return NULL;
    b->p = stx__raw_alloc(x, bytes ? bytes : 256, "block",
                          is_f32 ? STX_MEM_BYTES : STX_MEM_ACTIVATIONS);
    if (!b->p) {
        stx_block_free(x, b);
        return NULL;
    }
    b->next = x->mem.dev_blocks;
    x->mem.dev_blocks = b;
    stx__update_peak(x);
    stx__zero(x, b->p, bytes);
    return (stx_real *)b->p;
}

STX_DEF stx_real *stx_block_activations(stx_ctx *x, size_t n) {
    return stx__block_of(x, n, 0);
}

STX_DEF stx_real *stx_block_f32(stx_ctx *x, size_t n) {
    return stx__block_of(x, n, 1);
}

STX_DEF void stx_block_device_free(stx_ctx *x, stx_real *p) {
    stx__dev_block **link, *b;
    if (!x || !p) return;
    if (!stx__on_gpu(x)) {
        stx_block_free(x, p);
        return;
    }
    for (link = &x->mem.dev_blocks; *link && (*link)->p != (void *)p; link = &(*link)->next) {
    }
    b = *link;
    if (!b) return;
    *link = b->next;
    stx__gpu_release(x, b->p);
    stx_block_free(x, b);
}

/* A block of elements that is freed when the next step begins, because the current
   step's backward pass may still read it. */
typedef struct stx__freed_at_step_end {
    struct stx__freed_at_step_end *next;
    stx_real *p;
} stx__freed_at_step_end;

static void stx__free_at_step_end(stx_ctx *x, stx_real *p) {
    stx__freed_at_step_end *entry;
    if (!p) return;
    entry = (stx__freed_at_step_end *)stx_block(x, sizeof *entry);
    if (!entry) return; /* out of memory: stx_destroy frees p */
    entry->p = p;
    entry->next = x->mem.freed_at_step_end;
    x->mem.freed_at_step_end = entry;
}

/* Frees the blocks that were passed to stx__free_at_step_end in the previous step. */
static void stx__free_from_last_step(stx_ctx *x) {
    while (x->mem.freed_at_step_end) {
        stx__freed_at_step_end *entry = x->mem.freed_at_step_end;
        x->mem.freed_at_step_end = entry->next;
        stx_block_device_free(x, entry->p);
        stx_block_free(x, entry);
    }
}

/* Allocates n elements in the arena for `where` without zeroing them. */
static stx_real *stx__alloc_elements(stx_ctx *x, int where, size_t n) {
    return (stx_real *)stx__arena_alloc(x, stx__arena_of(x, where),
                                        stx_bytes_of(n, stx__element_size(x, where), 1));
}

/* Allocates zeroed bytes of kind STX__PARAM or STX__STATE. */
static void *stx__zeroed_bytes(stx_ctx *x, int where, size_t bytes) {
    void *p = stx__arena_alloc(x, stx__arena_of(x, where), bytes);
    if (p) stx__zero(x, p, bytes);
    return p;
}

STX_DEF stx_real *stx_step_activations(stx_ctx *x, size_t n) {
    return x ? stx__alloc_elements(x, STX__STEP_ACTIVATIONS, n) : NULL;
}

STX_DEF void *stx_step_device_bytes(stx_ctx *x, size_t n) {
    return x ? stx__arena_alloc(x, stx__arena_of(x, STX__STEP_F32), n) : NULL;
}

STX_DEF stx_real *stx_offset_ptr(const stx_ctx *x, const stx_real *p, size_t i) {
#ifdef SEQTX_CUDA
    if (p && stx__stores_bf16(x) && stx_cuda_is_bf16(x, p))
        return (stx_real *)(uintptr_t)((uintptr_t)p + 2 * i);
#endif
    (void)x;
    return p ? (stx_real *)(uintptr_t)(p + i) : NULL;
}

STX_DEF void stx_upload(stx_ctx *x, stx_real *to, const stx_real *host, size_t n) {
    if (!stx_ok(x) || !n) return;
    stx__param_written(x, to);
#ifdef SEQTX_CUDA
    if (stx__on_gpu(x)) {
        stx__host_access(x, STX__TO_GPU);
        stx_cuda_upload_activations(x, to, host, n);
        return;
    }
#endif
    memcpy(to, host, n * sizeof *to);
}

STX_DEF void stx_download(stx_ctx *x, stx_real *host, const stx_real *from, size_t n) {
    if (!stx_ok(x) || !n) return;
#ifdef SEQTX_CUDA
    if (stx__on_gpu(x)) {
        stx__host_access(x, STX__FROM_GPU);
        stx_cuda_download_activations(x, host, from, n);
        return;
    }
#endif
    memcpy(host, from, n * sizeof *host);
}

/* Copies bytes, such as ids and tables, from the host to the device. */
static void stx__put_bytes(stx_ctx *x, void *to, const void *host, size_t bytes) {
#ifdef SEQTX_CUDA
    if (stx__on_gpu(x)) {
        stx__host_access(x, STX__TO_GPU);
        stx_cuda_upload(x, to, host, bytes);
        return;
    }
#endif
    (void)x;
    if (to != host) memcpy(to, host, bytes);
}

STX_DEF size_t stx_bytes_of(size_t a, size_t b, size_t c) {
    if (!a || !b || !c) return 0;
    if (a > SIZE_MAX / b || a * b > SIZE_MAX / c) return SIZE_MAX;
    return a * b * c;
}

STX_DEF size_t stx_size_add(size_t n, size_t a, size_t b) {
    a = stx_bytes_of(a, b, 1);
    return n > SIZE_MAX - a ? SIZE_MAX : n + a;
}

STX_DEF void *stx_ctx_gpu(const stx_ctx *x) {
    return x ? x->gpu : NULL;
}

STX_DEF int stx_threads(const stx_ctx *x) {
    return x ? x->desc.threads : 1;
}

STX_DEF const stx_desc *stx_ctx_desc(const stx_ctx *x) {
    return x ? &x->desc : NULL;
}

STX_DEF int stx_training(const stx_ctx *x) {
    return x && x->tape.mode == STX_TRAIN;
}

STX_DEF uint64_t stx_step_index(const stx_ctx *x) {
    return x ? x->rng.step : 0;
}

STX_DEF void stx_set_step_index(stx_ctx *x, uint64_t index) {
    if (x) x->rng.step = index;
}

STX_DEF size_t stx_bytes(const stx_ctx *x) {
    return x ? stx__reserved(x) : 0;
}

STX_DEF size_t stx_peak_bytes(const stx_ctx *x) {
    return x ? x->mem.peak : 0;
}
