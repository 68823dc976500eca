#pragma once
#include "../api/config.h"
#include "../api/context.h"
#include "../api/ops.h"
#include "../api/cuda.h"
#include "loops.h"
#include "functions.h"
#include "platform.h"
#include "context.h"
#include "arena.h"


// >>random

STX_DEF void stx_philox(uint64_t seed, uint64_t hi, uint64_t lo, uint32_t out[4]) {
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    uint32_t c0 = (uint32_t)lo, c1 = (uint32_t)(lo >> 32);
    uint32_t c2 = (uint32_t)hi, c3 = (uint32_t)(hi >> 32);
    int r;
    for (r = 0; r < 10; r++) {
        uint64_t p0 = (uint64_t)0xD2511F53u * c0, p1 = (uint64_t)0xCD9E8D57u * c2;
        c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)p1;
        c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)p0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    out[0] = c0;
    out[1] = c1;
    out[2] = c2;
    out[3] = c3;
}

/* Returns the random stream of the next op of this step. The bits allow for 2^24 ops per
   step and 2^39 steps; parameter streams have the top bit set. */
static uint64_t stx__stream(stx_ctx *x) {
    return (x->rng.step << 24) | (x->rng.op++ & 0xffffffu);
}

#define STX__PARAM_STREAM ((uint64_t)1 << 63)

STX_DEF size_t stx_batch_share(const stx_ctx *x) {
    return x ? x->rng.part * (size_t)STX_MAX(1, x->group.ranks) + (size_t)x->group.rank : 0;
}

/* *first receives the index of the first Philox call of this share of the batch if each
   share draws n values. Returns 1; or sets an error and returns 0 if the values of a rank
   would begin in the middle of a call. */
static int stx__first_call(stx_ctx *x, const char *op, size_t n, uint64_t *first) {
    *first = (uint64_t)stx_batch_share(x) * ((n + 7) / 8);
    if (x->group.ranks < 2 || n % 8 == 0) return 1;
    stx_fail(x, STX_ERR_SHAPE,
             "%s: expected a multiple of 8 elements per rank, got %zu: in a group, random values "
             "are drawn 8 at a time, so use a width that is a multiple of 8", op, n);
    return 0;
}

/* Dropout uses 16 bits of a Philox call for each of 8 adjacent elements. An element is
   kept if its bits are below the threshold that this function returns. */
static uint32_t stx__keep16(stx_real p) {
    double k = floor((1.0 - (double)p) * 65536.0 + 0.5);
    return (uint32_t)(k < 1 ? 1 : k);
}


// >>tensors

/* Creates a tensor followed by `padding` extra elements. `where` is the kind of device
   memory, such as STX__STEP_ACTIVATIONS. */
static stx_tensor *stx__tensor_padded(stx_ctx *x, int where, int ndim, const size_t *dim,
                                      size_t padding) {
    stx_tensor *t;
    size_t n = 1;
    int i;
    for (i = 0; i < ndim; i++) {
        if (dim[i] && n > (SIZE_MAX - padding) / sizeof(stx_real) / dim[i]) {
            stx_fail(x, STX_ERR_MEMORY,
                     "a tensor (ndim %d, first dimension %zu) exceeds the address space: use "
                     "smaller dimensions", ndim, dim[0]);
            return NULL;
        }
        n *= dim[i];
    }

    t = (stx_tensor *)stx__arena_alloc(x, stx__is_of_step(where) ? &x->mem.step : &x->mem.keep,
                                       sizeof *t);
    if (!t) return NULL;
    memset(t, 0, sizeof *t);
    t->is_f32 = where != STX__STEP_ACTIVATIONS;
    t->ndim = ndim;
    for (i = 0; i < ndim; i++) t->dim[i] = dim[i];
    t->size = n;
    t->padding = padding;
    t->data = stx__alloc_elements(x, where, n + padding);
    return t->data ? t : NULL;
}

static stx_tensor *stx__tensor(stx_ctx *x, int where, int ndim, const size_t *dim) {
    return stx__tensor_padded(x, where, ndim, dim, 0);
}

/* Creates a tensor with the shape and type of `a`. */
static stx_tensor *stx__like(stx_ctx *x, const stx_tensor *a) {
    return stx__tensor(x, stx__step_kind(a->is_f32), a->ndim, a->dim);
}

static size_t stx__last(const stx_tensor *t) {
    return t->dim[t->ndim - 1];
}

/* Returns the number of rows, which is the product of all dimensions except the last. */
static size_t stx__rows(const stx_tensor *t) {
    return stx__last(t) ? t->size / stx__last(t) : 0;
}

/* Counts the dimensions in d, which end at the first 0. */
static int stx__count_dims(const size_t *d) {
    int n = 0;
    while (n < STX_MAX_DIM && d[n]) n++;
    return n;
}

static int stx__same(const stx_tensor *a, const stx_tensor *b) {
    int i;
    if (a->ndim != b->ndim) return 0;
    for (i = 0; i < a->ndim; i++)
        if (a->dim[i] != b->dim[i]) return 0;
    return 1;
}

/* Writes a shape such as "(2,3)" to buf, which has at least 21 ndim + 3 bytes, and
   returns buf. */
static const char *stx__dims(const size_t *dim, int ndim, char *buf) {
    int i, n = snprintf(buf, 2, "(");
    for (i = 0; i < ndim; i++) n += snprintf(buf + n, 22, "%s%zu", i ? "," : "", dim[i]);
    snprintf(buf + n, 2, ")");
    return buf;
}

/* The same for a tensor; buf has 96 bytes. */
static const char *stx__shape(const stx_tensor *t, char *buf) {
    return stx__dims(t->dim, t->ndim, buf);
}

/* Unless cond holds, sets an error and returns NULL from the calling function. */
#define STX__NEED(x, cond, code, ...) \
  do { \
    if (!(cond)) { \
      stx_fail(x, code, __VA_ARGS__); \
      return NULL; \
    } \
  } while (0)

/* Copies n elements within the device. is_f32: the elements are f32 even if activations
   are stored as bf16. The ranges may overlap on a CPU, but not on a GPU. */
static void stx__move(stx_ctx *x, stx_real *to, const stx_real *from, size_t n, int is_f32) {
    size_t bytes = n * stx__element_size(x, stx__step_kind(is_f32));
#ifdef SEQTX_CUDA
    if (stx__on_gpu(x)) {
        stx_cuda_copy(x, to, from, bytes);
        return;
    }
#endif
    if (!x->desc.dry) memmove(to, from, bytes);
}

STX_DEF void stx_get(stx_ctx *x, const stx_tensor *t, stx_real *out) {
    if (stx_ok(x) && t) stx_download(x, out, t->data, t->size);
}

STX_DEF void stx_set(stx_ctx *x, stx_tensor *t, const stx_real *in) {
    if (stx_ok(x) && t) stx_upload(x, t->data, in, t->size);
}

STX_DEF double stx_item(stx_ctx *x, const stx_tensor *t) {
    stx_real v = 0;
    if (!stx_ok(x) || !t) return (double)NAN;
    stx_download(x, &v, t->data, 1);
    return stx_ok(x) ? (double)v : (double)NAN;
}

STX_DEF int stx_get_grad(stx_ctx *x, const stx_tensor *t, stx_real *out) {
    if (!stx_ok(x) || !t || !out) return 0;
    memset(out, 0, t->size * sizeof *out);
    if (!t->grad) return 0;
    stx_download(x, out, t->grad, t->size);
    return stx_ok(x);
}

static stx_tensor *stx__new(stx_ctx *x, const char *op, int where, size_t d0, size_t d1,
                            size_t d2, size_t d3) {
    size_t d[STX_MAX_DIM];
    if (!stx_ok(x)) return NULL;
    STX__NEED(x, d0, STX_ERR_ARG, "%s: d0: expected at least 1, got 0", op);
    d[0] = d0;
    d[1] = d1;
    d[2] = d2;
    d[3] = d3;
    return stx__tensor(x, where, stx__count_dims(d), d);
}

STX_DEF stx_tensor *stx_new(stx_ctx *x, size_t d0, size_t d1, size_t d2, size_t d3) {
    return stx__new(x, "stx_new", STX__STEP_ACTIVATIONS, d0, d1, d2, d3);
}

STX_DEF stx_tensor *stx_new_f32(stx_ctx *x, size_t d0, size_t d1, size_t d2, size_t d3) {
    return stx__new(x, "stx_new_f32", STX__STEP_F32, d0, d1, d2, d3);
}

STX_DEF stx_tensor *stx_input(stx_ctx *x, const stx_real *data, size_t d0, size_t d1, size_t d2,
                              size_t d3) {
    stx_tensor *t;
    if (!stx_ok(x)) return NULL;
    STX__NEED(x, data, STX_ERR_ARG, "stx_input: data: expected the tensor's elements, got NULL");
    t = stx__new(x, "stx_input", STX__STEP_ACTIVATIONS, d0, d1, d2, d3);
    if (t) stx_set(x, t, data);
    return t;
}

STX_DEF stx_tensor *stx_variable(stx_ctx *x, const stx_real *data, size_t d0, size_t d1, size_t d2,
                                 size_t d3) {
    stx_tensor *t = stx_input(x, data, d0, d1, d2, d3);
    if (t) t->needs_grad = t->is_leaf = 1;
    return t;
}

STX_DEF stx_tensor *stx_constant_create(stx_ctx *x, const stx_real *data, size_t d0, size_t d1,
                                        size_t d2, size_t d3) {
    stx_tensor *t;
    int i;
    if (!stx_ok(x)) return NULL;
    STX__NEED(x, data, STX_ERR_ARG,
              "stx_constant_create: data: expected the tensor's elements, got NULL");
    STX__NEED(x, d0, STX_ERR_ARG, "stx_constant_create: d0: expected at least 1, got 0");
    t = (stx_tensor *)stx_persist(x, sizeof *t);
    if (!t) return NULL;

    t->dim[0] = d0;
    t->dim[1] = d1;
    t->dim[2] = d2;
    t->dim[3] = d3;
    t->ndim = stx__count_dims(t->dim);
    for (i = t->ndim; i < STX_MAX_DIM; i++) t->dim[i] = 0;
    t->size = 1;
    for (i = 0; i < t->ndim; i++) t->size = stx_bytes_of(t->size, t->dim[i], 1);
    t->data = stx_block_activations(x, t->size);
    if (!t->data) return NULL;
    stx_upload(x, t->data, data, t->size);
    return stx_ok(x) ? t : NULL;
}

/* On a GPU, returns a copy of n ids in the step arena, for the kernels. On a CPU,
   returns `ids`. */
static int32_t *stx__ids_device(stx_ctx *x, int32_t *ids, size_t n) {
    int32_t *p = ids;
    if (!stx__on_gpu(x)) return p;
    p = (int32_t *)stx_step_device_bytes(x, n * sizeof *p);
    if (p) stx__put_bytes(x, p, ids, n * sizeof *p);
    return p;
}

static int stx__check_token_count(stx_ctx *x, const char *op, size_t B, size_t T) {
    const size_t most = SIZE_MAX / sizeof(int32_t);
    if (!B || !T) {
        stx_fail(x, STX_ERR_ARG, "%s: B x T: expected at least 1 x 1, got %zu x %zu", op, B, T);
    } else if (T > most / B) {
        stx_fail(x, STX_ERR_ARG, "%s: B x T: expected at most %zu tokens, got %zu x %zu", op, most,
                 B, T);
    }
    return stx_ok(x);
}

STX_DEF stx_ids *stx_tokens(stx_ctx *x, const int32_t *data, size_t B, size_t T) {
    stx_ids *t;
    if (!stx_ok(x)) return NULL;
    STX__NEED(x, data, STX_ERR_ARG, "stx_tokens: data: expected B x T ids, got NULL");
    if (!stx__check_token_count(x, "stx_tokens", B, T)) return NULL;
    t = (stx_ids *)stx__arena_alloc(x, &x->mem.step, sizeof *t);
    if (!t) return NULL;
    t->data = (int32_t *)stx__arena_alloc(x, &x->mem.step, B * T * sizeof *data);
    if (!t->data) return NULL;

    memcpy(t->data, data, B * T * sizeof *data);
    t->device = stx__ids_device(x, t->data, B * T);
    t->id_limit = 0;
    t->ignores = 0;
    t->B = B;
    t->T = T;
    return t->device ? t : NULL;
}

STX_DEF stx_ids *stx_tokens_create(stx_ctx *x, size_t B, size_t T) {
    stx_ids *t;
    if (!stx_ok(x)) return NULL;
    if (!stx__check_token_count(x, "stx_tokens_create", B, T)) return NULL;
    t = (stx_ids *)stx_persist(x, sizeof *t);
    if (!t) return NULL;
    t->data = (int32_t *)stx_persist(x, B * T * sizeof *t->data);
    t->device = t->data;
    if (stx__on_gpu(x) && t->data)
        t->device = (int32_t *)stx__zeroed_bytes(x, STX__STATE, B * T * sizeof *t->data);
    t->B = B;
    t->T = T;
    return t->device ? t : NULL;
}

/* Records that an op uses the ids as indices below n, so that stx_tokens_set can check
   them. `how`, which may be NULL, can name an id that the op ignores. The check skips
   this id only if all ops ignore it. */
static void stx__ids_used(const stx_ids *ids, size_t n, const stx_token_loss *how) {
    stx_ids *t = (stx_ids *)(uintptr_t)ids;
    if (!t->id_limit || n < t->id_limit) t->id_limit = n;
    if (!how || !how->ignore || (t->ignores == 1 && t->ignored_id != how->ignored_id))
        t->ignores = -1;
    if (t->ignores < 0) return;
    t->ignores = 1;
    t->ignored_id = how->ignored_id;
}

static void stx__ids_below(const stx_ids *ids, size_t n) {
    stx__ids_used(ids, n, NULL);
}

static int stx__is_ignored(const stx_token_loss *how, int32_t id) {
    return how && how->ignore && id == how->ignored_id;
}

/* Checks the ids here because a replayed step runs no checks. */
STX_DEF void stx_tokens_set(stx_ctx *x, stx_ids *ids, const int32_t *data) {
    size_t i;
    if (!stx_ok(x) || !ids || !data) return;
    for (i = 0; ids->id_limit && i < ids->B * ids->T; i++) {
        const int ignored = ids->ignores == 1 && data[i] == ids->ignored_id;
        if (ignored || (data[i] >= 0 && (size_t)data[i] < ids->id_limit)) continue;
        stx_fail(x, STX_ERR_ARG,
                 "stx_tokens_set: id at position %zu: expected 0 to %zu, got %ld: check the "
                 "vocabulary size", i, ids->id_limit - 1, (long)data[i]);
        return;
    }
    memcpy(ids->data, data, ids->B * ids->T * sizeof *data);
    stx__put_bytes(x, ids->device, ids->data, ids->B * ids->T * sizeof *data);
}

/* Discards all captured steps. Called when a parameter or an optimiser has been created
   or gradients have moved, because captured steps contain the old addresses or lack the
   new object. */
static void stx__forget_steps(stx_ctx *x) {
    int i;
    for (i = 0; i < STX__REPLAYS; i++) x->replay.entry[i].used = 0;
    x->replay.ran = 0;
    x->replay.status[0] = 0;
}

static void stx__grads_arena_init(stx_ctx *x, stx__arena *a) {
    memset(a, 0, sizeof *a);
    a->name = "persistent arena";
    a->kind = stx__arena_of(x, STX__STATE)->kind;
}

STX_DEF stx_params *stx_params_create(stx_ctx *x) {
    stx_params *p = (stx_params *)stx_persist(x, sizeof *p);
    stx__arena *a = (stx__arena *)stx_persist(x, sizeof *a);
    if (!p || !a) return NULL;
    stx__grads_arena_init(x, a);
    p->ctx = x;
    p->grads_arena = a;
    p->next = x->lists;
    x->lists = p;
    return p;
}

/* Returns the number of elements that t's gradient occupies in the buffer of
   stx_params_grads: t's size, rounded up to a multiple of 64. */
static size_t stx__grad_padded(const stx_tensor *t) {
    return (t->size + 63) & ~(size_t)63;
}

static stx_real *stx__grads_alloc(stx_ctx *x, stx__arena *a, size_t n) {
    const size_t bytes = stx_bytes_of(n, sizeof(stx_real), 1);
    stx_real *g = (stx_real *)stx__arena_alloc(x, a, bytes);
    if (g && !x->desc.dry) stx__zero(x, g, bytes);
    return g;
}

/* Moves all gradients of a parameter list to one contiguous buffer. Frees the gradients
   of frozen parameters. */
static int stx__grads_join(stx_params *p) {
    stx_ctx *x = p->ctx;
    stx__arena joined, *a = p->grads_arena;
    stx_real *g;
    size_t i, total = 0;
    stx__grads_arena_init(x, &joined);
    for (i = 0; i < p->count; i++)
        if (p->tensor[i]->needs_grad) total += stx__grad_padded(p->tensor[i]);
    g = stx__grads_alloc(x, &joined, total);
    if (!g) return 0;

    p->grads = g;
    for (i = 0; i < p->count; i++) {
        stx_tensor *t = p->tensor[i];
        if (!t->needs_grad) {
            t->grad = NULL;
            continue;
        }
        stx__move(x, g, t->grad, t->size, 1);
        t->grad = g;
        g += stx__grad_padded(t);
    }
    stx__arena_free(x, a);
    *a = joined;
    p->grads_size = total;
    p->grads_count = p->count;
    p->earlier = NULL;  /* was in the old arena */
    p->reserve_left = 0; /* the reserve's gradients were in the old arena */
    stx__forget_steps(x);
    return 1;
}

/* What is known about the gradients of a list; see stx__put_grads_aside. */
enum { STX__GRADS_UNKNOWN, STX__GRADS_ZERO, STX__GRADS_ADDED };

STX_DEF size_t stx_params_size(const stx_params *p) {
    size_t i, n = 0;
    for (i = 0; p && i < p->count; i++) n += p->tensor[i]->size;
    return n;
}

STX_DEF size_t stx_params_trained_size(const stx_params *p) {
    size_t i, n = 0;
    for (i = 0; p && i < p->count; i++)
        if (p->tensor[i]->needs_grad) n += p->tensor[i]->size;
    return n;
}

STX_DEF stx_real *stx_params_grads(stx_params *p, size_t *n) {
    stx_ctx *x = p ? p->ctx : NULL;
    if (n) *n = 0;
    if (!stx_ok(x)) return NULL;
    STX__NEED(x, p->count, STX_ERR_ARG,
              "stx_params_grads: expected at least one parameter, got an empty list: call "
              "stx_params_grads after the last stx_param");
    STX__NEED(x, stx_params_trained_size(p), STX_ERR_ARG,
              "expected at least one parameter that is trained, but all %zu are frozen: call "
              "stx_params_set_rule with fewer patterns", p->count);
    if (!p->grads || p->grads_count != p->count) {
        STX__NEED(x, !p->in_use, STX_ERR_ARG,
                  "stx_params_grads: the gradients cannot be moved, because an optimiser already "
                  "uses their addresses: call stx_params_grads after the last stx_param and before "
                  "stx_optim_create");
        if (!stx__grads_join(p)) return NULL;
    }
    if (n) *n = p->grads_size;
    return p->grads;
}

STX_DEF stx_tensor *stx_params_find(const stx_params *p, const char *name) {
    size_t i;
    for (i = 0; p && name && i < p->count; i++)
        if (!strcmp(p->name[i], name)) return p->tensor[i];
    return NULL;
}

/* Returns 1 if no gradients are being sent to other ranks. Otherwise, sets an error and
   returns 0, because the gradients must not change until the transfer ends. */
static int stx__grads_at_rest(stx_ctx *x, const char *op) {
    if (!x->group.in_flight) return 1;
    stx_fail(x, STX_ERR_ARG,
             "%s: gradients are being sent to the other ranks: call stx_group_overlap only before "
             "the last stx_backward of an update, and stx_optim_step right after it", op);
    return 0;
}

STX_DEF void stx_params_zero_grad(stx_params *p) {
    size_t i;
    if (p && !stx__grads_at_rest(p->ctx, "stx_params_zero_grad")) return;
    if (p) p->grads_state = STX__GRADS_ZERO;
    for (i = 0; p && stx_ok(p->ctx) && i < p->count; i++)
        if (p->tensor[i]->needs_grad)
            STX_RUN(p->ctx, stx_fill, (p->ctx, p->tensor[i]->grad, p->tensor[i]->size, 0));
}

/* Draws the initial value of element i of a parameter: uniform in [-a,a], or normal
   with standard deviation a (Box and Muller 1958). Each Philox call yields two
   elements. With STX_TRUNCATED, values beyond +-2 a are redrawn with new counters. */
static double stx__draw(stx_ctx *x, uint64_t stream, size_t i, int init, double a) {
    uint64_t attempt = 0;
    double u, v, radius, direction;
    do {
        uint32_t r[4];
        stx_philox(x->desc.seed, stream, (uint64_t)i / 2 + (attempt << 44), r);
        /* u and v are in (0,1) */
        u = ((double)r[0] + ((double)r[1] + 0.5) / 4294967296.0) / 4294967296.0;
        v = ((double)r[2] + ((double)r[3] + 0.5) / 4294967296.0) / 4294967296.0;
        if (init == STX_UNIFORM) return a * (2 * (i & 1 ? v : u) - 1);
        radius = sqrt(-2 * stx_math_log(u));
        direction = 6.283185307179586 * v;
        direction = i & 1 ? stx_math_sin(direction) : stx_math_cos(direction);
        attempt++;
    } while (init == STX_TRUNCATED && fabs(radius * direction) > 2);
    return a * radius * direction;
}

STX_DEF int stx_params_make_contiguous(stx_params *p, size_t n) {
    stx_ctx *x = p ? p->ctx : NULL;
    if (!stx_ok(x)) return 0;
    p->reserve_left = 0;
    p->reserve_next = n;
    return 1;
}

STX_DEF void stx_params_rng_offset(stx_params *p, ptrdiff_t ahead) {
    if (p) p->rng_offset = ahead;
}

/* Creates a parameter of n elements in the memory that stx_params_make_contiguous
   reserved. The values take the next n elements of p->reserve, and the gradient takes
   the next n of p->reserve_grads. */
static stx_tensor *stx__param_of_reserve(stx_params *p, int ndim, const size_t *d, size_t n) {
    stx_ctx *x = p->ctx;
    stx_tensor *t = (stx_tensor *)stx__arena_alloc(x, &x->mem.keep, sizeof *t);
    int i;
    if (!t) return NULL;
    memset(t, 0, sizeof *t);
    t->is_f32 = 1;
    t->ndim = ndim;
    for (i = 0; i < ndim; i++) t->dim[i] = d[i];
    t->size = n;
    t->data = p->reserve;
    t->grad = p->reserve_grads;
    p->reserve += n;
    p->reserve_grads += n;
    p->reserve_left -= n;
    return t;
}

/* Creates the tensor of a parameter and allocates its elements, padding and gradient.
   The memory is taken from the reserve if enough is left there. */
static stx_tensor *stx__param_tensor(stx_params *p, int ndim, const size_t *d, size_t padding) {
    stx_ctx *x = p->ctx;
    stx__arena *grads = p->grads_arena;
    stx_tensor *t;
    size_t n = 1;
    int i;
    for (i = 0; i < ndim; i++) n = stx_bytes_of(n, d[i], 1);

    /* allocate a new reserve unless this parameter alone would fill it */
    if (!padding && p->reserve_next > n && n % 64 == 0) {
        p->reserve = stx__alloc_elements(x, STX__PARAM, p->reserve_next);
        p->reserve_grads = p->reserve ? stx__grads_alloc(x, grads, p->reserve_next) : NULL;
        if (!p->reserve_grads) return NULL;
        p->reserve_left = p->reserve_next;
    }
    p->reserve_next = 0;
    if (!padding && n <= p->reserve_left && n % 64 == 0)
        return stx__param_of_reserve(p, ndim, d, n);

    p->reserve_left = 0;
    t = stx__tensor_padded(x, STX__PARAM, ndim, d, padding);
    if (t) t->grad = stx__grads_alloc(x, grads, t->size);
    return t && t->grad ? t : NULL;
}

/* Doubles the capacity of the parameter tables if they are full. The old tables, a few
   kilobytes, stay in the arena until stx_destroy. */
static int stx__params_grow(stx_params *p) {
    stx_ctx *x = p->ctx;
    const size_t capacity = p->capacity ? 2 * p->capacity : 64;
    stx_tensor **tensor;
    const char **name;
    stx_param_rule *rule;
    if (p->count < p->capacity) return 1;
    tensor = (stx_tensor **)stx_persist(x, capacity * sizeof *tensor);
    name = (const char **)stx_persist(x, capacity * sizeof *name);
    rule = (stx_param_rule *)stx_persist(x, capacity * sizeof *rule);
    if (!tensor || !name || !rule) return 0;
    if (p->count) {
        memcpy(tensor, p->tensor, p->count * sizeof *tensor);
        memcpy(name, p->name, p->count * sizeof *name);
        memcpy(rule, p->rule, p->count * sizeof *rule);
    }
    p->tensor = tensor;
    p->name = name;
    p->rule = rule;
    p->capacity = capacity;
    return 1;
}

/* Writes the initial values of a parameter and zeroes its padding. A dry run writes
   only constant initial values, because some of them, such as the initial spans,
   determine sizes. */
static int stx__param_init(stx_params *p, stx_tensor *t, int init, double a) {
    stx_ctx *x = p->ctx;
    const uint64_t stream = STX__PARAM_STREAM | (x->params_made + (uint64_t)p->rng_offset);
    const size_t all = t->size + t->padding;
    const int on_gpu = stx__on_gpu(x), random = init > STX_CONSTANT;
    stx_real *host = on_gpu ? (stx_real *)stx_block(x, all * sizeof *host) : t->data;
    size_t i;
    if (!host) return 0;

    for (i = 0; i < t->size && (!random || !x->desc.dry); i++) {
        double v = init == STX_ZEROS ? 0 : a;
        if (random) v = stx__draw(x, stream, i, init, a);
        host[i] = (stx_real)v;
    }
    if (!x->desc.dry) memset(host + t->size, 0, t->padding * sizeof *host);
    if (on_gpu) {
        stx_upload(x, t->data, host, all);
        stx_block_free(x, host);
    }
    return 1;
}

/* Implements stx_param. Appends `padding` elements, which are always zero. */
static stx_tensor *stx__param_padded(stx_params *p, int init, double a, const char *name,
                                     const size_t *d, size_t padding) {
    STX__FP_SCOPE;
    stx_ctx *x = p ? p->ctx : NULL;
    stx_tensor *t;
    char *copy;
    if (!stx_ok(x)) return NULL;
    STX__NEED(x, name && name[0], STX_ERR_ARG,
              "stx_param: name: expected a nonempty string, got %s", name ? "\"\"" : "NULL");
    STX__NEED(x, d[0], STX_ERR_ARG, "stx_param: \"%s\": d0: expected at least 1, got 0", name);
    STX__NEED(x, init >= STX_ZEROS && init <= STX_TRUNCATED, STX_ERR_ARG,
              "stx_param: \"%s\": init: expected STX_ZEROS, STX_CONSTANT, STX_NORMAL, STX_UNIFORM "
              "or STX_TRUNCATED, got %d", name, init);
    STX__NEED(x, !stx_params_find(p, name), STX_ERR_ARG,
              "stx_param: name: expected a unique name, but parameter \"%s\" already exists", name);

    t = stx__param_tensor(p, stx__count_dims(d), d, padding);
    if (!t || !stx__params_grow(p)) return NULL;
    t->needs_grad = t->is_param = t->is_leaf = 1;
    copy = (char *)stx_persist(x, strlen(name) + 1);
    if (!copy) return NULL;
    strcpy(copy, name);
    if (!stx__param_init(p, t, init, a)) return NULL;

    x->params_made++;
    p->rng_offset = 0;
    stx__forget_steps(x);
    p->name[p->count] = copy;
    p->tensor[p->count++] = t;
    return t;
}

STX_DEF stx_tensor *stx_param(stx_params *p, int init, double a, const char *name, size_t d0,
                              size_t d1, size_t d2, size_t d3) {
    size_t d[STX_MAX_DIM];
    d[0] = d0;
    d[1] = d1;
    d[2] = d2;
    d[3] = d3;
    return stx__param_padded(p, init, a, name, d, 0);
}

/* Replaces each element v of rows [r0,r1) of a parameter with fn(user, i, v), where i
   is the element's index. */
static void stx__param_edit(stx_ctx *x, const char *op, stx_tensor *t, size_t r0, size_t r1,
                            stx_init_fn fn, void *user) {
    STX__FP_SCOPE;
    size_t i, C;
    stx_real *host;
    char s[96];
    if (!stx_ok(x) || !t) return;
    if (!t->is_param) {
        stx_fail(x, STX_ERR_ARG,
                 "%s: expected a parameter, got a tensor of shape %s that is not one", op,
                 stx__shape(t, s));
        return;
    }
    if (!fn) {
        stx_fail(x, STX_ERR_ARG, "%s: fn: expected a function, got NULL", op);
        return;
    }
    if (r0 > r1 || r1 > t->dim[0]) {
        stx_fail(x, STX_ERR_ARG,
                 "%s: rows: expected a range within [0,%zu) for a parameter of shape %s, got "
                 "[%zu,%zu)", op, t->dim[0], stx__shape(t, s), r0, r1);
        return;
    }
    if (x->desc.dry) return;

    C = t->size / t->dim[0];
    host = t->data;
    if (stx__on_gpu(x)) {
        host = (stx_real *)stx_block(x, stx_bytes_of(t->size, 1, sizeof *host));
        if (!host) return;
        stx_get(x, t, host);
    }
    stx__param_written(x, t->data);
    for (i = r0 * C; i < r1 * C; i++) host[i] = (stx_real)fn(user, i, (double)host[i]);
    if (host != t->data) {
        stx_set(x, t, host);
        stx_block_free(x, host);
    }
}

static double stx__scale_value(void *user, size_t i, double v) {
    (void)i;
    return v * *(double *)user;
}

static double stx__fill_value(void *user, size_t i, double v) {
    (void)i;
    (void)v;
    return *(double *)user;
}

STX_DEF void stx_param_scale(stx_ctx *x, stx_tensor *param, size_t r0, size_t r1, double s) {
    stx__param_edit(x, "stx_param_scale", param, r0, r1, stx__scale_value, &s);
}

STX_DEF void stx_param_fill(stx_ctx *x, stx_tensor *param, size_t r0, size_t r1, double v) {
    stx__param_edit(x, "stx_param_fill", param, r0, r1, stx__fill_value, &v);
}

STX_DEF void stx_param_apply(stx_ctx *x, stx_tensor *param, stx_init_fn fn, void *user) {
    stx__param_edit(x, "stx_param_apply", param, 0, param ? param->dim[0] : 0, fn, user);
}

STX_DEF stx_tensor *stx_param_elementwise(stx_tensor *param) {
    if (param) param->elementwise = 1;
    return param;
}

STX_DEF int stx_weights_check(stx_ctx *x, const char *op, const stx_weight *w, size_t n) {
    size_t i, k;
    if (n > STX_MAX_WEIGHTS) {
        stx_fail(x, STX_ERR_ARG, "%s: weights: expected at most %d, got %zu", op,
                 (int)STX_MAX_WEIGHTS, n);
        return 0;
    }
    for (i = 0; i < n; i++) {
        const size_t length = w[i].name ? strlen(w[i].name) : 0;
        if (!length || length > 48) {
            stx_fail(x, STX_ERR_ARG, "%s: weight %zu: name: expected 1 to 48 bytes, got %zu%s", op,
                     i, length, w[i].name ? "" : " (NULL)");
            return 0;
        }
        for (k = 0; k < i && strcmp(w[k].name, w[i].name) != 0; k++) {}
        if (k < i) {
            stx_fail(x, STX_ERR_ARG,
                     "%s: weight %zu: name: expected a unique name, got \"%s\" twice", op, i,
                     w[i].name);
            return 0;
        }
        if (!w[i].rows) {
            stx_fail(x, STX_ERR_ARG, "%s: weight \"%s\": rows: expected at least 1, got 0", op,
                     w[i].name);
            return 0;
        }
        if (w[i].init < STX_ZEROS || w[i].init > STX_TRUNCATED) {
            stx_fail(x, STX_ERR_ARG,
                     "%s: weight \"%s\": init: expected STX_ZEROS, STX_CONSTANT, STX_NORMAL, "
                     "STX_UNIFORM or STX_TRUNCATED, got %d", op, w[i].name, w[i].init);
            return 0;
        }
    }
    return 1;
}

STX_DEF size_t stx_weights_size(const stx_weight *w, size_t n) {
    size_t i, size = 0;
    for (i = 0; i < n; i++) size = stx_size_add(size, w[i].rows, STX_MAX(w[i].columns, 1));
    return size;
}

STX_DEF int stx_weights_create(stx_params *p, const char *prefix, const stx_weight *w, size_t n,
                               stx_tensor **t) {
    char full[128];
    size_t i;
    for (i = 0; i < n; i++) {
        snprintf(full, sizeof full, "%.64s%s", prefix, w[i].name);
        t[i] = stx_param(p, w[i].init, w[i].a, full, w[i].rows, w[i].columns, 0, 0);
        if (!t[i]) return 0;
        if (w[i].elementwise) stx_param_elementwise(t[i]);
    }
    return 1;
}
