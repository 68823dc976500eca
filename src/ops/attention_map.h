#pragma once
#include "../api/config.h"
#include "../api/context.h"
#include "../api/attention.h"
#include "../api/cuda.h"
#include "../core/loops.h"
#include "../core/platform.h"
#include "../core/context.h"
#include "../core/arena.h"
#include "attention.h"
#include "attention_plain.h"


// >>attention: maps

/* Returns n elements at p in host memory: p itself on a CPU, a copy on a GPU. NULL if p
   is NULL or after an error. */
static const stx_real *stx__host_elements(stx_ctx *x, const stx_real *p, size_t n) {
    stx_real *host;
    if (!p || !stx__on_gpu(x)) return p;
    host = (stx_real *)stx_step_host_bytes(x, stx_bytes_of(n, sizeof *host, 1));
    if (host) stx_download(x, host, p, n);
    return host;
}

/* Returns `rows` rows of `width` elements, `stride` apart, that begin `offset` elements
   after p. */
static const stx_real *stx__host_rows(stx_ctx *x, const stx_real *p, size_t offset, size_t rows,
                                      size_t stride, size_t width) {
    if (!p || !rows) return NULL;
    return stx__host_elements(x, stx_offset_ptr(x, p, offset), (rows - 1) * stride + width);
}

/* Returns n elements of a key mask in host memory. */
static const int32_t *stx__host_pad(stx_ctx *x, const int32_t *p, size_t n) {
#ifdef SEQTX_CUDA
    if (p && stx__on_gpu(x)) {
        int32_t *host = (int32_t *)stx_step_host_bytes(x, stx_bytes_of(n, sizeof *host, 1));
        stx__host_access(x, STX__FROM_GPU);
        if (host) stx_cuda_download(x, host, p, n * sizeof *host);
        return host;
    }
#endif
    (void)x;
    (void)n;
    return p;
}

STX_DEF const stx_attention_args *stx_attention_host(stx_ctx *x, const stx_attention_args *a,
                                                     size_t b) {
    stx_attention_args *r;
    size_t g, C, rows;
    if (!stx_ok(x) || !a) return NULL;
    if (b >= a->B) {
        stx_fail(x, STX_ERR_ARG, "stx_attention_host: expected a row below B = %zu, got %zu", a->B,
                 b);
        return NULL;
    }
    r = (stx_attention_args *)stx_step_host_bytes(x, sizeof *r);
    if (!r) return NULL;
    C = a->H * a->D;
    rows = a->S - a->cached_rows;
    *r = *a;
    r->B = 1;
    r->rng_first += (uint64_t)b * a->H * a->T * stx__attn_philox_calls(a);
    r->q = stx__host_rows(x, a->q, b * a->q_batch_stride, a->T, a->q_row_stride, C);
    r->k = stx__host_rows(x, a->k, b * a->kv_batch_stride, rows, a->kv_row_stride, C);
    r->v = stx__host_rows(x, a->v, b * a->kv_batch_stride, rows, a->kv_row_stride, C);
    r->y = (stx_real *)(uintptr_t)stx__host_rows(x, a->y, b * a->T * C, a->T, C, C);
    for (g = 0; g < a->groups; g++) {
        const stx_attention_kv *from = &a->cached[g];
        const size_t at = b * from->batch_stride, width = from->row_stride / 2;
        stx_attention_kv *to = &r->cached[g];
        to->k = stx__host_rows(x, from->k, at, from->rows, from->row_stride, width);
        to->v = stx__host_rows(x, from->v, at, from->rows, from->row_stride, width);
        to->dk = to->dv = NULL;
    }

    r->pe = stx__host_elements(x, a->pe, a->P * a->D * (a->pe_heads > 1 ? a->H : 1));
    r->content_bias = stx__host_elements(x, a->content_bias, C);
    r->position_bias = stx__host_elements(x, a->position_bias, C);
    r->span_fraction = stx__host_elements(x, a->span_fraction, a->span_shared ? 1 : a->H);
    r->persistent_k = stx__host_elements(x, a->persistent_k, a->N * C);
    r->persistent_v = stx__host_elements(x, a->persistent_v, a->N * C);
    if (a->pad) r->pad = stx__host_pad(x, a->pad + b * a->pad_batch_stride, a->S);
    r->row_max = r->inv_sum = r->dq = r->dk = r->dv = NULL;
    r->dy = NULL;
    r->dpe = r->dcontent_bias = r->dposition_bias = r->dspan_fraction = NULL;
    r->dpersistent_k = r->dpersistent_v = NULL;
    r->work = NULL;
    return stx_ok(x) ? r : NULL;
}

/* Returns the number of zero keys that a query can reach. The first one reaches furthest
   back. */
static size_t stx__map_zero_keys(const stx_attention_args *a) {
    const size_t before = a->S - STX_MIN(a->S, a->T);   /* rows before the segment */
    const size_t reached = a->span > before ? a->span - before : 0;
    return STX_MIN(reached, stx__zero_keys(a->first_key));
}

/* Sets the kinds and positions of the keys. */
static void stx__map_keys(const stx_attention_args *a, stx_attention_map *map,
                          stx_attention_key *key) {
    const size_t zero = map->count[STX_KEY_ZERO];
    const ptrdiff_t before = (ptrdiff_t)(zero + map->count[STX_KEY_MEMORY]);
    size_t n = 0, i;
    int kind;
    memset(key, 0, map->keys * sizeof *key);
    for (kind = 0; kind < STX_KEY_KINDS; kind++)
        for (i = 0; i < map->count[kind]; i++, n++) {
            key[n].kind = kind;
            if (kind == STX_KEY_PERSISTENT) continue;
            key[n].first = (ptrdiff_t)n - before;
            if (kind == STX_KEY_ZERO) continue;
            key[n].tokens = 1;
            key[n].missing = (ptrdiff_t)(n - zero) < a->first_key || (a->pad && a->pad[n - zero]);
        }
    map->key = key;
}

/* Computes weight (H,T,K). stx_attention_weights also lists the zero keys that no query
   reaches, which the map omits. */
static void stx__map_weights(const stx_attention_args *a, const stx_attention_map *map,
                             double *weight, double *work) {
    const size_t keys = stx_attention_keys(a), skip = keys - map->keys;
    size_t h, i;
    for (h = 0; h < a->H; h++)
        for (i = 0; i < a->T; i++, weight += map->keys) {
            stx_attention_weights(a, 0, h, i, work, work + keys);
            stx__attn_plain_mask(a, h * a->T + i, work, work + keys);
            memcpy(weight, work + skip, map->keys * sizeof *weight);
        }
}

static int stx__map_check(stx_ctx *x, const char *op, const stx_attention_record *record,
                          size_t b) {
    if (!record->args || record->step != x->tape.steps_begun)
        stx_fail(x, STX_ERR_ARG,
                 "%s: expected a forward pass with attention since the last stx_begin, got none",
                 op);
    else if (record->recomputed)
        stx_fail(x, STX_ERR_ARG,
                 "%s: expected stored keys, got a layer that is recomputed in the backward pass: "
                 "begin the step with STX_EVAL, or set recompute_layers to 0", op);
    else if (b >= record->args->B)
        stx_fail(x, STX_ERR_ARG, "%s: expected a stream below B = %zu, got %zu", op,
                 record->args->B, b);
    return stx_ok(x);
}

STX_DEF stx_attention_map *stx_attention_map_of(stx_ctx *x, const char *op,
                                                const stx_attention_record *record, size_t b) {
    STX__FP_SCOPE;
    const stx_attention_args *a;
    stx_attention_map *map;
    stx_attention_key *key;
    double *weight, *work, *span;
    size_t n, h;
    if (!stx_ok(x) || !record || !stx__map_check(x, op, record, b)) return NULL;
    a = stx_attention_host(x, record->args, b);
    map = (stx_attention_map *)stx_step_host_bytes(x, sizeof *map);
    if (!a || !map) return NULL;

    memset(map, 0, sizeof *map);
    map->heads = a->H;
    map->queries = a->T;
    map->count[STX_KEY_ZERO] = stx__map_zero_keys(a);
    map->count[STX_KEY_MEMORY] = a->S - STX_MIN(a->S, a->T);
    map->count[STX_KEY_SEGMENT] = STX_MIN(a->S, a->T);
    map->count[STX_KEY_PERSISTENT] = a->N;
    map->keys = map->count[STX_KEY_ZERO] + a->S + a->N;
    n = stx_bytes_of(a->H, a->T, map->keys);
    key = (stx_attention_key *)stx_step_host_bytes(x, map->keys * sizeof *key);
    weight = (double *)stx_step_host_bytes(x, stx_bytes_of(n, sizeof *weight, 1));
    work = (double *)stx_step_host_bytes(x, 2 * stx_attention_keys(a) * sizeof *work);
    span = (double *)stx_step_host_bytes(x, a->H * sizeof *span);
    if (!key || !weight || !work || !span) return NULL;

    stx__map_keys(a, map, key);
    map->weight = weight;
    if (x->desc.dry)
        memset(weight, 0, n * sizeof *weight);
    else
        stx__map_weights(a, map, weight, work);
    if (a->span_fraction) {
        for (h = 0; h < a->H; h++)
            span[h] = x->desc.dry ? 0 : (double)stx__attn_span_fraction(a, h) * (double)a->max_span;
        map->span = span;
        map->ramp = (double)a->ramp;
    }
    return map;
}
