#pragma once
#include "../api/config.h"
#include "../api/context.h"
#include "../api/ops.h"
#include "../api/attention.h"
#include "../api/lm.h"
#include "../core/platform.h"
#include "../core/tensors.h"
#include "../ops/shape.h"
#include "../ops/attention.h"


// >>cache: rows and attention

/* The keys and values of a layer are stored in buffers (B,capacity,width) that can hold
   two windows and a chunk. New rows are appended. When a buffer is full, its last
   `window` rows are first moved to the beginning. This happens at most once per `window`
   tokens, so it costs at most one row copy per token. */

STX_DEF stx_cache *stx_cache_create(stx_ctx *x, size_t layers, size_t B, size_t V) {
    stx_cache *c;
    if (!stx_ok(x)) return NULL;
    STX__NEED(x, layers && B && V, STX_ERR_ARG,
              "stx_cache_create: expected layers, B and V of at least 1, got layers = %zu, "
              "B = %zu and V = %zu", layers, B, V);
    c = (stx_cache *)stx_block(x, sizeof *c);
    if (!c) return NULL;
    c->ctx = x;
    c->B = B;
    c->V = V;
    c->layers = layers;
    c->chunk = 64;
    c->layer = (stx_cache_layer *)stx_block(x, stx_bytes_of(layers, sizeof *c->layer, 1));
    c->out = (stx_real *)stx_block(x, stx_bytes_of(B, V, sizeof *c->out));
    if (stx_ok(x)) return c;
    stx_cache_free(c);
    return NULL;
}

STX_DEF void stx_cache_free(stx_cache *c) {
    size_t l;
    if (!c) return;
    for (l = 0; c->layer && l < c->layers; l++) {
        stx_block_device_free(c->ctx, c->layer[l].k);
        stx_block_device_free(c->ctx, c->layer[l].v);
    }
    stx_block_free(c->ctx, c->layer);
    stx_block_free(c->ctx, c->out);
    stx_block_free(c->ctx, c);
}

STX_DEF void stx_cache_reset(stx_cache *c) {
    size_t l;
    for (l = 0; c && l < c->layers; l++) c->layer[l].len = 0;
}

STX_DEF int stx_cache_window(stx_cache *c, size_t l, size_t window, size_t C, int both) {
    stx_ctx *x = c ? c->ctx : NULL;
    stx_cache_layer *y;
    size_t rows, width = both ? 2 * C : C;
    if (!stx_ok(x)) return 0;
    if (l >= c->layers || !window || !C || window > SIZE_MAX / 4 || C > SIZE_MAX / 4) {
        stx_fail(x, STX_ERR_ARG,
                 "stx_cache_window: expected a layer below %zu, and window and C from 1 to "
                 "SIZE_MAX / 4, got layer %zu, window %zu, C %zu", c->layers, l, window, C);
        return 0;
    }
    y = &c->layer[l];
    rows = 2 * window + c->chunk;
    y->window = window;
    y->len = 0;
    both = both != 0;
    if (rows <= y->capacity && width == y->width && both == y->both) return 1;

    stx_block_device_free(x, y->k);
    stx_block_device_free(x, y->v);
    y->k = y->v = NULL;
    y->capacity = 0;
    y->width = width;
    y->both = both;
    y->k = stx_block_activations(x, stx_bytes_of(c->B, rows, width));
    if (!both) y->v = stx_block_activations(x, stx_bytes_of(c->B, rows, width));
    if (!stx_ok(x)) return 0;
    y->capacity = rows;
    return 1;
}

/* Appends rows (B,t,width), with a row stride of ld elements, to a buffer. The last
   `have` rows of the buffer are still needed; if it is full, they are first moved to
   its beginning. Source and destination do not overlap, because the buffer has a
   capacity of at least 2 have + t rows. */
static void stx__cache_append(stx_ctx *x, stx_real *buf, const stx_cache_layer *y, size_t have,
                              size_t B, size_t t, const stx_real *rows, size_t ld) {
    size_t w = y->width, len = y->len, all = y->capacity * w, b;
    if (len + t > y->capacity) {
        STX_RUN(x, stx_copy2d,
                (x, buf, all, stx_offset_ptr(x, buf, (len - have) * w), all, B, have * w, 0));
        len = have;
    }
    if (ld == w || t == 1)
        STX_RUN(x, stx_copy2d,
                (x, stx_offset_ptr(x, buf, len * w), all, rows, t * ld, B, t * w, 0));
    else
        for (b = 0; b < B; b++)
            STX_RUN(x, stx_copy2d,
                    (x, stx_offset_ptr(x, buf, b * all + len * w), w,
                     stx_offset_ptr(x, rows, b * t * ld), ld, t, w, 0));
}

/* Returns S rows of a buffer, starting at row `first`, as a tensor (B,S,width). The
   stride between streams is that of the buffer, capacity * width. */
static stx_tensor *stx__cache_view(stx_ctx *x, const stx_tensor *like, const stx_real *buf,
                                   size_t first, size_t S, size_t width) {
    stx_tensor *t = stx__view(x, (stx_tensor *)(uintptr_t)like);
    if (!t) return NULL;
    t->data = stx_offset_ptr(x, buf, first * width);
    t->dim[1] = S;
    t->dim[2] = width;
    t->size = like->dim[0] * S * width;
    return t;
}

/* Returns the tensor that contains the new keys: qkv, kv or k. */
static const stx_tensor *stx__cache_keys(const stx_attention_in *in) {
    if (in->qkv) return in->qkv;
    return in->kv ? in->kv : in->k;
}

/* Returns the row length of the tensor that contains the new keys. Its rows are
   [q k v], [k v] or k. */
static size_t stx__cache_row(const stx_cache_layer *y, const stx_attention_in *in) {
    return in->qkv ? y->width / 2 * 3 : y->width;
}

/* Checks the arguments of stx_cache_attention. Returns the number of new tokens, or 0
   after an error. */
static size_t stx__cache_tokens(const stx_cache *c, size_t l, const stx_attention_in *in,
                                const stx_attention_desc *d) {
    stx_ctx *x = c->ctx;
    const stx_cache_layer *y = &c->layer[l];
    const stx_tensor *k = stx__cache_keys(in), *q = in->qkv ? in->qkv : in->q;
    const size_t t = q->ndim == 3 ? q->dim[1] : 0;
    const char *name = in->kv ? "kv" : "k";
    char shape[96];
    if (stx_training(x)) {
        stx_fail(x, STX_ERR_ARG,
                 "stx_cache_attention: cached keys have no gradient: call stx_begin(x, STX_EVAL)");
        return 0;
    }
    if (d->not_causal || d->first_key > 0) {
        stx_fail(x, STX_ERR_ARG,
                 "stx_cache_attention: expected causal attention with first_key at most 0, got "
                 "not_causal = %d and first_key = %ld", d->not_causal, (long)d->first_key);
        return 0;
    }
    if (in->cached[0] || (in->qkv && (in->q || in->k || in->v || in->kv))) {
        stx_fail(x, STX_ERR_ARG,
                 "stx_cache_attention: expected qkv alone, q with kv, or q with k and v, for the "
                 "new tokens only: the cache has the earlier keys and values");
        return 0;
    }
    if ((in->kv || in->qkv) == y->both && t && t <= c->chunk && k->ndim == 3
        && k->dim[0] == c->B && k->dim[1] == t && k->dim[2] == stx__cache_row(y, in)
        && (y->both || stx__same(in->k, in->v)))
        return t;
    if (in->qkv) name = "qkv";
    stx_fail(x, STX_ERR_SHAPE,
             "stx_cache_attention: %s: expected shape (%zu,T,%zu) for T queries with T from 1 to "
             "%zu, got %s for T = %zu", name, c->B, stx__cache_row(y, in), c->chunk,
             stx__shape(k, shape), t);
    return 0;
}

STX_DEF stx_tensor *stx_cache_attention(stx_cache *c, size_t l, const stx_attention_in *in,
                                        const stx_attention_desc *desc) {
    stx_ctx *x = c ? c->ctx : NULL;
    stx_cache_layer *y;
    stx_attention_in a;
    stx_attention_desc d;
    const stx_tensor *k;
    size_t have, t, row, first;
    if (!stx_ok(x) || !in || !desc || (!in->qkv && (!in->q || (!in->kv && (!in->k || !in->v)))))
        return NULL;
    STX__NEED(x, l < c->layers && c->layer[l].capacity, STX_ERR_ARG,
              "stx_cache_attention: layer %zu has no window: call stx_cache_window", l);
    t = stx__cache_tokens(c, l, in, desc);
    if (!t) return NULL;

    /* append the new rows; in qkv, keys and values follow the queries */
    y = &c->layer[l];
    k = stx__cache_keys(in);
    row = stx__cache_row(y, in);
    have = STX_MIN(y->len, y->window);
    stx__cache_append(x, y->k, y, have, c->B, t, stx_offset_ptr(x, k->data, row - y->width), row);
    if (!y->both) stx__cache_append(x, y->v, y, have, c->B, t, in->v->data, row);
    if (y->len + t > y->capacity) y->len = have;
    y->len += t;

    a = *in;
    d = *desc;
    if (!d.span || d.span > y->window) d.span = y->window;
    first = y->len - t - have;
    if (y->both)
        a.kv = stx__cache_view(x, k, y->k, first, have + t, y->width);
    else {
        a.k = stx__cache_view(x, k, y->k, first, have + t, y->width);
        a.v = stx__cache_view(x, k, y->v, first, have + t, y->width);
    }
    return stx__attention(x, &a, &d, y->capacity * y->width);
}

STX_DEF const stx_real *stx_cache_feed(stx_cache *c, const stx_vocab_io *w, const int32_t *ids,
                                       size_t n, int scores, stx_feed_fn fn, void *user) {
    stx_ctx *x = c ? c->ctx : NULL;
    stx_tensor *h = NULL, *y;
    size_t at, b, t = 0;
    if (!stx_ok(x) || !w || !fn) return NULL;
    STX__NEED(x, ids && n, STX_ERR_ARG,
              "stx_cache_feed: expected at least one token per stream, got none");
    STX__NEED(x, w->desc.vocab == c->V, STX_ERR_ARG,
              "stx_cache_feed: expected a vocabulary of %zu words, as in stx_cache_create, got %zu",
              c->V, w->desc.vocab);
    for (at = 0; at < n; at += t) {
        stx_ids *part;
        int32_t *copy;
        t = STX_MIN(c->chunk, n - at);
        stx_begin(x, STX_EVAL);
        copy = (int32_t *)stx_step_host_bytes(x, c->B * t * sizeof *copy);
        if (!copy) return NULL;
        for (b = 0; b < c->B; b++) memcpy(copy + b * t, ids + b * n + at, t * sizeof *copy);
        part = stx_tokens(x, copy, c->B, t);
        h = part ? fn(user, part) : NULL;
        if (!h) return NULL;
    }

    /* keep only the last token of the last chunk */
    if (t > 1) h = stx_slice(x, h, t - 1, t);
    y = scores ? stx_vocab_io_scores(w, h) : stx_vocab_io_log_probs(w, h);
    if (!y) return NULL;
    stx_get(x, y, c->out);
    return stx_ok(x) ? c->out : NULL;
}
