#pragma once
#include "../api/config.h"
#include "../api/context.h"
#include "../api/private.h"
#include "../api/train.h"
#include "../api/cuda.h"
#include "../core/loops.h"
#include "../core/platform.h"
#include "../core/context.h"
#include "../core/arena.h"


// >>report

/* Creates the report, a device buffer that the host reads between steps. On a CPU, the
   host reads this buffer directly, and it has no mirrors, because the parameters
   themselves can be read directly. */
static int stx__report_create(stx_ctx *x) {
    size_t bytes = sizeof *x->report.device;
    if (x->report.device) return 1;
    if (stx__on_gpu(x)) {
        x->report.host = (stx__report *)stx_persist(x, sizeof *x->report.host);
        if (!x->report.host) return 0;
    } else {
        bytes = offsetof(stx__report, mirror);
    }
    x->report.device = (stx__report *)stx__zeroed_bytes(x, STX__STATE, bytes);
    if (!stx__on_gpu(x)) x->report.host = x->report.device;
    return x->report.device != NULL;
}

#ifdef SEQTX_CUDA
static size_t stx__report_bytes(const stx_ctx *x) {
    return offsetof(stx__report, mirror) + x->report.mirror_values * sizeof(stx_real);
}

/* On a GPU, enqueues a copy of the report to the host, after all pending work. Does not
   wait. */
static void stx__report_request(stx_ctx *x) {
    if (!stx__on_gpu(x) || !x->report.device || !stx_ok(x)) return;
    if (x->report.mirrors)
        stx_cuda_gather(x, x->report.device->mirror, x->report.mirror_chunk, x->report.mirrors);
    stx_cuda_report(x, x->report.device, stx__report_bytes(x));
    x->report.age = STX__PENDING;
}
#endif

/* Waits until the host's copy of the report is current. During a capture, the GPU runs
   nothing, so the copy cannot change, and the function returns 1 without waiting. On a
   CPU, the copy is always current. */
static int stx__report_sync(stx_ctx *x) {
    if (!stx__report_create(x)) return 0;
#ifdef SEQTX_CUDA
    if (stx__on_gpu(x)) {
        if (stx_cuda_capturing(x)) return 1;
        if (x->report.age == STX__STALE) stx__report_request(x);
        if (x->report.age == STX__PENDING && stx_ok(x)) {
            const void *copy = stx_cuda_report_wait(x);
            if (!copy) return 0;
            memcpy(x->report.host, copy, stx__report_bytes(x));
            x->report.age = STX__CURRENT;
            x->report.mirrors_stale = 0;
        }
    }
#endif
    return stx_ok(x);
}

static void stx__metric_accumulate(stx_ctx *x, double *metric, const stx_real *a, double s,
                                   int accumulate) {
    STX__FP_SCOPE;
    (void)x;
    *metric = (accumulate ? *metric : 0) + s * (double)a[0];
}

STX_DEF void stx_metric_set(stx_ctx *x, int slot, const stx_tensor *t, double s, int add) {
    if (!stx_ok(x) || !t) return;
    if (slot < 0 || slot >= STX_MAX_METRICS) {
        stx_fail(x, STX_ERR_ARG, "stx_metric_set: slot: expected 0 to %d, got %d",
                 STX_MAX_METRICS - 1, slot);
        return;
    }
    if (!stx__report_create(x)) return;
    STX_RUN(x, stx__metric_accumulate, (x, &x->report.device->metric[slot], t->data, s, add));
    x->report.age = STX__STALE;
}

STX_DEF double stx_metric_get(stx_ctx *x, int slot) {
    if (!stx_ok(x) || slot < 0 || slot >= STX_MAX_METRICS) return (double)NAN;
    stx__host_access(x, "the previous step waited for the GPU (stx_metric_get)");
    if (!stx__report_sync(x)) return (double)NAN;
    return x->report.host->metric[slot];
}

/* Allocates the mirror table. */
static int stx__mirrors_create(stx_ctx *x) {
    const size_t n = STX__MIRRORS;
    if (x->report.mirror_chunk) return 1;
    x->report.mirror = (const stx_tensor **)stx_persist(x, n * sizeof *x->report.mirror);
    x->report.mirror_offset = (size_t *)stx_persist(x, n * sizeof *x->report.mirror_offset);
    if (!x->report.mirror || !x->report.mirror_offset) return 0;
    x->report.mirror_chunk =
        (stx_optim_chunk *)stx__zeroed_bytes(x, STX__STATE, n * sizeof *x->report.mirror_chunk);
    return x->report.mirror_chunk != NULL;
}

/* Adds a parameter to the mirrors. */
static int stx__mirror_add(stx_ctx *x, const stx_tensor *t) {
    const size_t i = x->report.mirrors, values = x->report.mirror_values;
    stx_optim_chunk chunk;
    if (!t->is_param) {
        stx_fail(x, STX_ERR_ARG, "stx_param_mirror: t: expected a parameter, got another tensor");
        return 0;
    }
    if (i == STX__MIRRORS || t->size > STX__MIRROR_VALUES - values) {
        stx_fail(x, STX_ERR_ARG,
                 "stx_param_mirror: expected at most %d parameters with %d elements in total, got "
                 "%zu with %zu elements", (int)STX__MIRRORS, (int)STX__MIRROR_VALUES, i + 1,
                 stx_size_add(values, t->size, 1));
        return 0;
    }
    if (!stx__mirrors_create(x)) return 0;

    memset(&chunk, 0, sizeof chunk);
    chunk.p = t->data;
    chunk.n = t->size;
    stx__put_bytes(x, x->report.mirror_chunk + i, &chunk, sizeof chunk);
    x->report.mirror[i] = t;
    x->report.mirror_offset[i] = values;
    x->report.mirror_values += t->size;
    x->report.mirrors++;
    stx__report_stale(x);
    return 1;
}

STX_DEF const stx_real *stx_param_mirror(stx_ctx *x, const stx_tensor *t) {
    size_t i;
    if (!stx_ok(x) || !t) return NULL;
    if (!stx__on_gpu(x)) return t->data;
    if (!stx__report_create(x)) return NULL;
    for (i = 0; i < x->report.mirrors && x->report.mirror[i] != t; i++) {
    }
    if (i == x->report.mirrors && !stx__mirror_add(x, t)) return NULL;
    if (x->report.mirrors_stale && !stx__report_sync(x)) return NULL;
    return x->report.host->mirror + x->report.mirror_offset[i];
}
