#pragma once
#include "api/config.h"
#include "api/context.h"
#include "api/cuda.h"
#include "core/platform.h"
#include "core/context.h"
#include "core/arena.h"
#include "core/threads.h"
#include "gemm/choose.h"


// >>creation

STX_DEF const char *stx_version(void) {
    return STX_VERSION;
}

static void stx__name_arenas(stx_ctx *x) {
    x->mem.keep.name = x->mem.dev_keep.name = x->mem.dev_params.name = "persistent arena";
    x->mem.step.name = x->mem.dev_step.name = x->mem.dev_bytes.name = "step arena";
    x->mem.keep.kind = x->mem.step.kind = STX__HOST;
#ifdef SEQTX_CUDA
    x->mem.dev_keep.kind = x->mem.dev_bytes.kind = STX_MEM_BYTES;
    x->mem.dev_params.kind = STX_MEM_PARAMS;
    x->mem.dev_step.kind = STX_MEM_ACTIVATIONS;
#endif
}

static void stx__set_threads(stx_ctx *x) {
    const int threads = x->desc.threads;
#if defined(STX__PTHREADS) || defined(STX__WIN_THREADS)
    x->threads.automatic = threads == 0;
    if (threads == 0) x->desc.threads = stx__processors(NULL);
#else
    if (threads >= 0) x->desc.threads = 1;
#endif
    if (x->desc.threads >= 1 && x->desc.threads <= 4096) return;
    x->desc.threads = 1;
    stx_fail(x, STX_ERR_ARG,
             "stx_create: threads: expected 1 to 4096, or 0 for all processors, got %d", threads);
}

/* Checks desc.device and sets it to STX_CPU until the GPU has been opened. Returns 1 if
   the caller must open a GPU. */
static int stx__set_device(stx_ctx *x) {
    const int device = x->desc.device;
    if (device == STX_CPU) return 0;
    x->desc.device = STX_CPU;
#ifdef SEQTX_CUDA
    if (device != STX_CUDA)
        stx_fail(x, STX_ERR_DEVICE, "stx_create: device: expected STX_CPU or STX_CUDA, got %d",
                 device);
#else
    stx_fail(x, STX_ERR_DEVICE,
             "stx_create: device: this build does not support device %d: use STX_CPU, or define "
             "SEQTX_CUDA and link seqtx_cuda.cu", device);
#endif
    if (x->desc.dry)
        stx_fail(x, STX_ERR_DEVICE,
                 "stx_create: device: a dry run can measure only CPU memory: use STX_CPU");
    return device == STX_CUDA && stx_ok(x);
}

static void stx__set_precision(stx_ctx *x) {
    const int precision = x->desc.precision, has_bf16 = sizeof(stx_real) == sizeof(float);
    if (precision == STX_PREC_F32 || (precision == STX_PREC_BF16 && has_bf16)) return;
    x->desc.precision = STX_PREC_F32;
    stx_fail(x, STX_ERR_DEVICE,
             "stx_create: precision: this build does not support precision %d: use STX_PREC_F32%s",
             precision,
             has_bf16 ? " or STX_PREC_BF16" : " (bf16 requires a build without SEQTX_DOUBLE)");
}

STX_DEF stx_ctx *stx_create(const stx_desc *desc) {
    stx_desc d;
    stx_ctx *x;
    int gpu;
    memset(&d, 0, sizeof d);
    if (desc) d = *desc;
    if (!d.alloc) d.alloc = d.dry ? stx__dry_alloc : stx__sys_alloc;
    if (!d.release) d.release = stx__sys_release;
    if (!d.chunk_bytes) d.chunk_bytes = (size_t)1 << 20;
    x = (stx_ctx *)d.alloc(d.user, sizeof *x);
    if (!x) return NULL;

    memset(x, 0, sizeof *x);
    x->desc = d;
    x->tape.steps_begun = 1;
    x->mem.blocks.prev = x->mem.blocks.next = &x->mem.blocks;
    stx__name_arenas(x);
    x->isa = stx__find_isa();
    stx__set_threads(x);
    gpu = stx__set_device(x);
    stx__set_precision(x);
    x->micro = stx__choose_micro(x->desc.precision, x->isa);
#ifdef SEQTX_CUDA
    if (gpu && stx_ok(x)) {
        x->desc.device = STX_CUDA;
        x->gpu = stx_cuda_open(x);
        if (!x->gpu) x->desc.device = STX_CPU;
    }
#else
    (void)gpu;
#endif
    stx__make_scratch(x);
    return x;
}

static void stx__grads_free(stx_ctx *x) {
    for (; x->lists; x->lists = x->lists->next)
        stx__arena_free(x, x->lists->grads_arena);
}

STX_DEF void stx_destroy(stx_ctx *x) {
    if (!x) return;
    if (x->group.ops && x->group.ops->forget) x->group.ops->forget(x);
    stx__pool_free(x);
#ifdef SEQTX_CUDA
    if (x->gpu) {
        int i;
        stx_cuda_sync(x);
        for (i = 0; i < STX__REPLAYS; i++)
            stx_cuda_graph_free(x, (stx_graph *)x->replay.entry[i].graph);
        while (x->mem.dev_blocks) stx_block_device_free(x, (stx_real *)x->mem.dev_blocks->p);
        stx__grads_free(x);
        stx__arena_free(x, &x->mem.dev_keep);
        stx__arena_free(x, &x->mem.dev_params);
        stx__arena_free(x, &x->mem.dev_step);
        stx__arena_free(x, &x->mem.dev_bytes);
        stx_cuda_close((stx_gpu *)x->gpu);
    }
#endif
    while (x->mem.blocks.next != &x->mem.blocks) stx_block_free(x, (char *)x->mem.blocks.next + 64);
    stx__grads_free(x);
    stx__arena_free(x, &x->mem.keep);
    stx__arena_free(x, &x->mem.step);
    x->desc.release(x->desc.user, x);
}
