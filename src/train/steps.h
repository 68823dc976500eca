#pragma once
#include "../api/config.h"
#include "../api/context.h"
#include "../api/train.h"
#include "../api/cuda.h"
#include "../core/platform.h"
#include "../core/context.h"
#include "../core/arena.h"
#include "report.h"


// >>steps

STX_DEF const char *stx_step_replay_status(const stx_ctx *x) {
    return x ? x->replay.status : "";
}

#ifdef SEQTX_CUDA
/* Returns the entry for a key, or NULL if there is none. */
static stx__replay *stx__replay_find(stx_ctx *x, uint64_t key) {
    int i;
    for (i = 0; i < STX__REPLAYS; i++)
        if (x->replay.entry[i].used && x->replay.entry[i].key == key) return &x->replay.entry[i];
    return NULL;
}

/* Returns a new entry for a key, which replaces the least recently used entry. */
static stx__replay *stx__replay_new(stx_ctx *x, uint64_t key) {
    stx__replay *r = x->replay.entry;
    int i;
    for (i = 1; i < STX__REPLAYS; i++)
        if (x->replay.entry[i].used < r->used) r = &x->replay.entry[i];
    stx_cuda_graph_free(x, (stx_graph *)r->graph);
    memset(r, 0, sizeof *r);
    r->key = key;
    return r;
}

/* Captures fn as a graph and launches it. If that is not possible, runs nothing, sets
   r->error and returns 0. */
static int stx__capture(stx_ctx *x, stx__replay *r, stx_step_fn fn, void *user) {
    const uint64_t step = x->rng.step;
    if (!stx__report_sync(x)) return 0; /* fn cannot wait for the report during the capture */
    if (stx_cuda_capture_begin(x)) {
        fn(user);
        r->graph = stx_cuda_capture_end(x);
        r->step = step;
        r->steps = x->rng.step - step;
    }
    if (r->graph && stx_ok(x)) {
        stx_cuda_graph_launch(x, (stx_graph *)r->graph);
        return 1;
    }
    if (!r->graph) snprintf(r->error, sizeof r->error, "%s", stx_cuda_capture_error(x));
    x->rng.step = step;
    return 0;
}

/* Replays a captured step. Random numbers continue as if fn had run. */
static void stx__replay_launch(stx_ctx *x, const stx__replay *r) {
    stx_cuda_rng_shift(x, (x->rng.step - r->step) << 24);
    stx_cuda_graph_launch(x, (stx_graph *)r->graph);
    stx_cuda_rng_shift(x, 0);
    x->rng.step += r->steps;
    x->tape.last = NULL;
    stx__report_stale(x);
}

/* Returns why a step cannot be captured or replayed, or NULL if it can.

   A step is captured only if its key equals that of the previous step. In that case, the
   previous step left everything that the key describes unchanged. A replay, which neither
   calls fn nor changes the host's state, also leaves it unchanged. If steps with two keys
   alternate, each step may undo what the previous one did. For example, one step moves
   rows to another buffer, and the next moves them back. A replay would not change the
   host's state, and the next key would describe data that the device no longer has. */
static const char *stx__replay_obstacle(const stx_ctx *x, uint64_t key, const stx__replay *r) {
    if (r) return r->graph ? NULL : r->error;
    if (!x->replay.ran || x->replay.last_key != key)
        return "the key differs from that of the previous step";
    return x->replay.last_access;
}

static void stx__run_on_gpu(stx_ctx *x, uint64_t key, stx_step_fn fn, void *user) {
    const int graphs = !x->desc.no_graph;
    stx__replay *r = graphs ? stx__replay_find(x, key) : NULL;
    const char *obstacle = graphs ? stx__replay_obstacle(x, key, r) : NULL;

    if (r && r->graph) {
        stx__replay_launch(x, r);
    } else if (graphs && !obstacle) {
        r = stx__replay_new(x, key);
        if (!stx__capture(x, r, fn, user)) {
            obstacle = r->error;
            if (stx_ok(x)) fn(user);
        }
    } else {
        x->replay.host_access = NULL;
        fn(user);
        x->replay.last_access = x->replay.host_access;
    }

    x->replay.status[0] = 0;
    if (obstacle)
        snprintf(x->replay.status, sizeof x->replay.status, "not captured: %s", obstacle);
    if (r) r->used = ++x->replay.runs;
    x->replay.last_key = key;
    x->replay.ran = 1;
}
#endif

STX_DEF uint64_t stx_step_key(const void *model, const stx_ids *ids, const stx_ids *targets,
                              uint64_t salt) {
    const stx_ids *tokens[2];
    uint64_t key = 14695981039346656037u; /* offset basis of the 64-bit FNV-1a hash */
    int i;
    tokens[0] = ids;
    tokens[1] = targets;
    key = stx_key_add(key, salt);
    key = stx_key_add(key, (uint64_t)(uintptr_t)model);
    for (i = 0; i < 2; i++) {
        const stx_ids *t = tokens[i];
        key = stx_key_add(key, t ? t->B : 0);
        key = stx_key_add(key, t ? t->T : 0);
        key = stx_key_add(key, t ? (uint64_t)(uintptr_t)t->device : 0);
    }
    return key;
}

STX_DEF int stx_step_run(stx_ctx *x, uint64_t key, stx_step_fn fn, void *user) {
    if (!stx_ok(x)) return 0;
    if (!fn) {
        stx_fail(x, STX_ERR_ARG, "stx_step_run: fn: expected a function, got NULL");
        return 0;
    }
#ifdef SEQTX_CUDA
    if (stx__on_gpu(x)) {
        stx__run_on_gpu(x, key, fn, user);
        stx__report_request(x);
        return stx_ok(x);
    }
#endif
    (void)key;
    fn(user);
    return stx_ok(x);
}
