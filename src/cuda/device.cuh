#pragma once
#include "common.cuh"
#include "wait.cuh"
#include "sums.cuh"
#include "gemm_plans.cuh"
#include "group_streams.cuh"


// >>device

/* An empty kernel. Its attributes show, before anything is allocated, whether the
   device can run the code in this file. */
STX__GLOBAL(32) stx__probe_kernel(void) {}

/* Selects the device desc.gpu and checks that it can run this code. Returns 1, or sets
   an error and returns 0. */
static int stx__device_select(stx_ctx *x, stx_gpu *g) {
    const stx_desc *d = stx_ctx_desc(x);
    cudaDeviceProp p;
    cudaFuncAttributes attributes;
    int count = 0;
    cudaError_t e = cudaGetDeviceCount(&count);
    if (e != cudaSuccess || count < 1) {
        (void)cudaGetLastError();
        stx_fail(x, STX_ERR_DEVICE,
                 "stx_create: no CUDA device (%s): use STX_CPU, or check that the driver is loaded "
                 "(nvidia-smi) and that CUDA_VISIBLE_DEVICES does not hide the device",
                 e == cudaSuccess ? "the driver reports none" : cudaGetErrorString(e));
        return 0;
    }
    if (d->gpu < 0 || d->gpu >= count) {
        stx_fail(x, STX_ERR_DEVICE,
                 "stx_create: gpu: expected at least 0 and below %d, the number of GPUs, got %d",
                 count, d->gpu);
        return 0;
    }
    if (!stx__cuda_ok(x, g, cudaSetDevice(d->gpu), "stx_create")) return 0;
    if (!stx__cuda_ok(x, g, cudaGetDeviceProperties(&p, d->gpu), "stx_create")) return 0;
    g->index = d->gpu;
    g->sms = p.multiProcessorCount;
    g->major = p.major;
    g->minor = p.minor;
    g->shared_max = p.sharedMemPerBlockOptin;
    snprintf(g->name, sizeof g->name, "%.80s, sm_%d%d", p.name, p.major, p.minor);
    if (p.major < 8 || cudaFuncGetAttributes(&attributes, stx__probe_kernel) != cudaSuccess) {
        (void)cudaGetLastError();
        stx_fail(x, STX_ERR_DEVICE,
                 "stx_create: this program has no code for GPU %d (%s): compile seqtx_cuda.cu with "
                 "-arch=sm_%d%d (sm_80 or newer is required)",
                 d->gpu, g->name, p.major, p.minor);
        return 0;
    }
    return 1;
}

/* Creates the buffers and events of a ring of transfers. */
static int stx__ring_open(stx_ctx *x, stx_gpu *g, stx__ring *r, size_t bytes) {
    for (int k = 0; k < STX__RING; k++) {
        cudaError_t e = cudaEventCreateWithFlags(&r->done[k], cudaEventDisableTiming);
        if (!stx__cuda_ok(x, g, e, "stx_create")) return 0;
        e = cudaMallocHost((void **)&r->host[k], bytes);
        if (!stx__cuda_ok(x, g, e, "stx_create")) return 0;
    }
    return 1;
}

static void stx__ring_close(stx__ring *r) {
    for (int k = 0; k < STX__RING; k++) {
        if (r->done[k]) (void)cudaEventDestroy(r->done[k]);
        if (r->host[k]) (void)cudaFreeHost(r->host[k]);
    }
}

/* Creates the stream and everything else that exists until the device is closed. */
static int stx__device_open(stx_ctx *x, stx_gpu *g) {
    static const char what[] = "stx_create";
    return stx__cuda_ok(x, g, cudaStreamCreateWithFlags(&g->stream, cudaStreamNonBlocking), what)
           && stx__ring_open(x, g, &g->upload, STX__UPLOAD_BYTES)
           && stx__ring_open(x, g, &g->report, STX__REPORT_BYTES)
           && stx__cuda_ok(x, g, cudaMalloc((void **)&g->shift, 256), what)
           && stx__cuda_ok(x, g, cudaMemsetAsync(g->shift, 0, 256, g->stream), what)
           && stx__gemm_open(x, g);
}

stx_gpu *stx_cuda_open(stx_ctx *x) {
    const stx_desc *d = stx_ctx_desc(x);
    stx_gpu *g = (stx_gpu *)calloc(1, sizeof *g);
    if (g) g->deferred = (struct stx__deferred_sums *)calloc(1, sizeof *g->deferred);
    if (!g || !g->deferred) {
        free(g);
        stx_fail(x, STX_ERR_MEMORY, "stx_create: out of host memory");
        return NULL;
    }
    g->half = d->precision == STX_PREC_BF16;
    g->tf32 = d->tf32;
    g->tune = d->tune != 0;
    if (!stx__device_select(x, g)) { /* nothing to close yet; there may be no current device */
        free(g->deferred);
        free(g);
        return NULL;
    }
    if (!stx__device_open(x, g)) {
        stx_cuda_close(g);
        return NULL;
    }
    (void)cudaGetLastError(); /* clears an earlier error caused by other code in this process */
    return g;
}

void stx_cuda_close(stx_gpu *g) {
    if (!g) return;
    (void)cudaSetDevice(g->index);
    stx__group_free(g);
    if (g->stream) (void)cudaStreamSynchronize(g->stream);
    stx__gemm_close(g);
    while (g->ranges) {
        stx__range *r = g->ranges;
        g->ranges = r->next;
        (void)cudaFree(r->base);
        if (r->twin) (void)cudaFree(r->twin);
        free(r);
    }
    stx__ring_close(&g->upload);
    stx__ring_close(&g->report);
    if (g->shift) (void)cudaFree(g->shift);
    if (g->scratch) (void)cudaFree(g->scratch);
    if (g->deferred->columns_buffer) (void)cudaFree(g->deferred->columns_buffer);
    if (g->deferred->slices_buffer) (void)cudaFree(g->deferred->slices_buffer);
    free(g->deferred);
    if (g->stream) (void)cudaStreamDestroy(g->stream);
    free(g);
}

void stx_cuda_defer_sums(stx_ctx *x, int by) {
    struct stx__deferred_sums *t = stx__gpu(x)->deferred;
    t->depth += by;
    if (by == 0 || t->depth == 0) stx__finish_sums(x);
}

void *stx_cuda_alloc(stx_ctx *x, size_t bytes, int kind) {
    stx_gpu *g = stx__use_gpu(x);
    const int wants_twin = kind == STX_MEM_PARAMS && g->half;
    void *p = NULL, *twin = NULL;
    cudaError_t e;
    if (g->capturing) {
        stx_fail(x, STX_ERR_MEMORY,
                 "stx_step_run: the captured step allocates %zu more bytes of GPU memory than the "
                 "earlier step with the same key: the key must include everything that array "
                 "sizes depend on",
                 bytes);
        return NULL;
    }
    e = cudaMalloc(&p, bytes);
    if (e == cudaSuccess && wants_twin) e = cudaMalloc(&twin, bytes / 2);
    if (e == cudaSuccess && stx__range_add(g, p, bytes, kind, twin)) return p;

    (void)cudaGetLastError();
    if (p) (void)cudaFree(p);
    if (twin) (void)cudaFree(twin);
    /* any other error comes from earlier work, not from this call */
    if (e != cudaSuccess && e != cudaErrorMemoryAllocation)
        stx__cuda_ok(x, g, e, "allocating GPU memory");
    return NULL;
}

void stx_cuda_free(stx_ctx *x, void *p) {
    stx_gpu *g = stx__use_gpu(x);
    stx__range **at = &g->ranges, *r;
    while (*at && (*at)->base != (char *)p) at = &(*at)->next;
    r = *at;
    if (!r) return;
    /* A replay would not free the memory again. Therefore the graph is discarded, and
       the memory is freed when the device is closed. */
    if (g->capturing) {
        g->repeatable = 0;
        return;
    }
    *at = r->next;
    if (g->last_range == r) g->last_range = NULL;
    (void)stx__group_join_streams(g); /* exchanges with other ranks may still use the memory */
    stx__wait(x, g, g->stream, NULL, "waiting for the GPU");
    g->bytes -= r->bytes + (r->twin ? r->bytes / 2 : 0);
    (void)cudaFree(r->base);
    if (r->twin) (void)cudaFree(r->twin);
    free(r);
}

size_t stx_cuda_bytes(const stx_ctx *x) {
    const stx_gpu *g = stx__gpu(x);
    return g ? g->bytes + g->scratch_bytes : 0;
}

int stx_cuda_is_bf16(const stx_ctx *x, const void *p) {
    stx_gpu *g = stx__gpu(x);
    const stx__range *r = stx__range_of(g, p);
    return g->half && r && r->kind == STX_MEM_ACTIVATIONS;
}

void stx_cuda_upload(stx_ctx *x, void *to, const void *host, size_t bytes) {
    static const char what[] = "copying to the GPU";
    stx_gpu *g = stx__use_gpu(x);
    cudaError_t e;
    if (!stx_ok(x) || !bytes || !stx__host_copy_allowed(g)) return;
    while (bytes && stx_ok(x)) {
        unsigned k = g->upload.count++ % STX__RING;
        size_t n = bytes < (size_t)STX__UPLOAD_BYTES ? bytes : (size_t)STX__UPLOAD_BYTES;
        /* wait until the previous copy from this buffer has finished */
        if (!stx__wait(x, g, g->stream, g->upload.done[k], what)) return;
        memcpy(g->upload.host[k], host, n);
        e = cudaMemcpyAsync(to, g->upload.host[k], n, cudaMemcpyHostToDevice, g->stream);
        if (!stx__cuda_ok(x, g, e, what)) return;
        stx__cuda_ok(x, g, cudaEventRecord(g->upload.done[k], g->stream), what);
        to = (char *)to + n;
        host = (const char *)host + n;
        bytes -= n;
    }
}

void stx_cuda_download(stx_ctx *x, void *host, const void *from, size_t bytes) {
    static const char what[] = "copying from the GPU";
    stx_gpu *g = stx__use_gpu(x);
    cudaError_t e;
    if (!stx_ok(x) || !bytes) return;
    if (!stx__host_copy_allowed(g)) {
        memset(host, 0, bytes);
        return;
    }
    /* A copy to pageable memory blocks inside CUDA. In a group, wait here first,
       because this wait detects ranks that have ended. */
    if (g->group && !stx__wait(x, g, g->stream, NULL, what)) return;
    e = cudaMemcpyAsync(host, from, bytes, cudaMemcpyDeviceToHost, g->stream);
    if (stx__cuda_ok(x, g, e, what)) stx__wait(x, g, g->stream, NULL, what);
}

/* Copies n elements and converts them to the element type of `to`. A thread copies one
   element at a time. */
STX__GLOBAL(256) stx__convert_kernel(stx__array to, stx__array from, size_t n) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n;
         i += (size_t)gridDim.x * blockDim.x)
        stx__put(to, i, stx__get(from, i));
}

/* The largest number of elements in one conversion, which uses scratch memory. */
enum { STX__CONVERT_PART = 1 << 22 };

void stx_cuda_upload_activations(stx_ctx *x, stx_real *to, const stx_real *host, size_t n) {
    static const char what[] = "copying to the GPU";
    stx_gpu *g = stx__use_gpu(x);
    stx__array v = stx__array_of(x, to), f = {NULL, NULL, 0};
    if (!v.half && !v.twin) {
        stx_cuda_upload(x, to, host, n * sizeof *host);
        return;
    }
    if (!stx_ok(x) || !stx__host_copy_allowed(g)) return;
    for (size_t at = 0; at < n && stx_ok(x); at += STX__CONVERT_PART) {
        size_t m = STX_MIN(n - at, (size_t)STX__CONVERT_PART);
        f.p = stx__scratch_of(x, m * sizeof *host, what);
        if (!f.p) return;
        v = stx__array_of(x, stx_offset_ptr(x, to, at));
        stx_cuda_upload(x, f.p, host + at, m * sizeof *host);
        STX__RUN_KERNEL(x, what, stx__convert_kernel, stx__blocks(m, 256, 4096), 256, 0, v, f, m);
    }
}

void stx_cuda_download_activations(stx_ctx *x, stx_real *host, const stx_real *from, size_t n) {
    static const char what[] = "copying from the GPU";
    stx_gpu *g = stx__use_gpu(x);
    stx__array v = stx__array_of(x, from), f = {NULL, NULL, 0};
    if (!v.half || g->capturing) {
        stx_cuda_download(x, host, from, n * sizeof *host);
        return;
    }
    for (size_t at = 0; at < n && stx_ok(x); at += STX__CONVERT_PART) {
        size_t m = STX_MIN(n - at, (size_t)STX__CONVERT_PART);
        f.p = stx__scratch_of(x, m * sizeof *host, what);
        if (!f.p) return;
        v = stx__array_of(x, stx_offset_ptr(x, from, at));
        STX__RUN_KERNEL(x, what, stx__convert_kernel, stx__blocks(m, 256, 4096), 256, 0, f, v, m);
        stx_cuda_download(x, host + at, f.p, m * sizeof *host);
    }
}

void stx_cuda_zero(stx_ctx *x, void *p, size_t bytes) {
    static const char what[] = "clearing GPU memory";
    stx_gpu *g = stx__use_gpu(x);
    stx__array v = stx__array_of(x, p);
    if (!stx_ok(x) || !bytes) return;
    stx__cuda_ok(x, g, cudaMemsetAsync(p, 0, bytes, g->stream), what);
    if (v.twin) stx__cuda_ok(x, g, cudaMemsetAsync(v.twin, 0, bytes / 2, g->stream), what);
}

void stx_cuda_copy(stx_ctx *x, void *to, const void *from, size_t bytes) {
    stx_gpu *g = stx__use_gpu(x);
    if (stx_ok(x) && bytes)
        stx__cuda_ok(x, g, cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, g->stream),
                     "copying on the GPU");
}

void stx_cuda_sync(stx_ctx *x) {
    stx_gpu *g = stx__use_gpu(x);
    if (g && !g->capturing) stx__wait(x, g, g->stream, NULL, "waiting for the GPU");
}

void *stx_cuda_stream(const stx_ctx *x) {
    return (void *)stx__gpu(x)->stream;
}

const char *stx_cuda_name(const stx_ctx *x) {
    return stx__gpu(x)->name;
}

/* Sets *p to v, in one thread. The value is a kernel argument, so the host need not
   keep it. */
STX__GLOBAL(32) stx__set_f64_kernel(double *p, double v) {
    *p = v;
}

STX__GLOBAL(32) stx__set_f32_kernel(float *p, float v) {
    *p = v;
}

STX__GLOBAL(32) stx__set_u64_kernel(uint64_t *p, uint64_t v) {
    *p = v;
}

void stx_cuda_set_f64(stx_ctx *x, double *p, double v) {
    if (stx__host_copy_allowed(stx__gpu(x)))
        STX__RUN_KERNEL(x, "copying to the GPU", stx__set_f64_kernel, 1, 1, 0, p, v);
}

void stx_cuda_set_f32(stx_ctx *x, float *p, float v) {
    if (stx__host_copy_allowed(stx__gpu(x)))
        STX__RUN_KERNEL(x, "copying to the GPU", stx__set_f32_kernel, 1, 1, 0, p, v);
}

void stx_cuda_rng_shift(stx_ctx *x, uint64_t shift) {
    STX__RUN_KERNEL(x, "copying to the GPU", stx__set_u64_kernel, 1, 1, 0, stx__gpu(x)->shift,
                    shift);
}

/* Copies the parameters p of all chunks to `to`, without gaps. A block copies one
   chunk, to an offset that is the sum of the preceding chunk sizes. */
STX__GLOBAL(128) stx__gather_kernel(float *to, const stx_optim_chunk *chunk) {
    size_t at = 0, i;
    for (i = 0; i < blockIdx.x; i++) at += chunk[i].n;
    for (i = threadIdx.x; i < chunk[blockIdx.x].n; i += blockDim.x)
        to[at + i] = chunk[blockIdx.x].p[i];
}

void stx_cuda_gather(stx_ctx *x, stx_real *to, const stx_optim_chunk *chunk, size_t count) {
    if (count)
        STX__RUN_KERNEL(x, "stx_param_mirror", stx__gather_kernel, (unsigned)count, 128, 0, to,
                        chunk);
}

void stx_cuda_report(stx_ctx *x, const void *report, size_t bytes) {
    static const char what[] = "copying the report of a step";
    stx_gpu *g = stx__use_gpu(x);
    const unsigned k = ++g->report.count % STX__RING;
    cudaError_t e;
    if (!stx_ok(x)) return;
    if (bytes > STX__REPORT_BYTES) {
        stx_fail(x, STX_ERR_ARG, "the report of a step: expected at most %zu bytes, got %zu bytes",
                 (size_t)STX__REPORT_BYTES, bytes);
        return;
    }
    e = cudaMemcpyAsync(g->report.host[k], report, bytes, cudaMemcpyDeviceToHost, g->stream);
    if (stx__cuda_ok(x, g, e, what))
        stx__cuda_ok(x, g, cudaEventRecord(g->report.done[k], g->stream), what);
}

const void *stx_cuda_report_wait(stx_ctx *x) {
    stx_gpu *g = stx__use_gpu(x);
    const unsigned k = g->report.count % STX__RING;
    if (!stx_ok(x)) return NULL;
    if (!stx__wait(x, g, g->stream, g->report.done[k],
                   "running a step on the GPU (desc.no_graph and CUDA_LAUNCH_BLOCKING=1 show which "
                   "op fails)"))
        return NULL;
    return g->report.host[k];
}
