/* seqtx_cuda.cu - every CUDA kernel of seqtx, behind the C interface that seqtx.h declares
   no warranty implied; MIT or public domain, your choice (end of seqtx.h)

       nvcc -O3 -arch=sm_90 -c seqtx_cuda.cu
       cc -DSEQTX_CUDA ... your files ... seqtx_cuda.o -lcublasLt -lcudart -lstdc++ -lm

   The only CUDA translation unit. A function stem_cuda here is the twin of stem in seqtx.h: the same contract, on device memory, put on
   the context's stream and not waited for. `grep stx_layernorm_bwd` finds both.

   READING ORDER: >>common (how numbers are stored, how kernels are launched), >>elementwise, >>layernorm (a warp a row, sums in two
   stages), >>gemm (cublasLt), >>attention (the reason for this library), >>optimisers, >>device, >>graph.

   Rules that hold for every kernel
   - No atomics on numbers: every sum has a fixed order, so a run repeats bit for bit on the same GPU.
   - Nothing is allocated and nothing waits inside a step, so that a whole step can be captured as a CUDA graph.
   - Sums are float or double, whatever is stored.
   - tests/cuda_host compiles this file with the host's compiler: every kernel runs, and is compared with its twin, on machines without
     a GPU. What has no meaning in C++ (launches, shared memory, tensor core and asynchronous copy instructions) is therefore behind the
     few names of >>common. */
#ifndef SEQTX_CUDA
  #define SEQTX_CUDA
#endif
#include "seqtx.h"
#ifdef SEQTX_DOUBLE
  #error "seqtx_cuda.cu has no double: build the CPU part with SEQTX_DOUBLE for gradient checks, and without SEQTX_CUDA"
#endif
#include <cuda_runtime.h>
#include <cuda_bf16.h>
#include <cublasLt.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
  #error "seqtx_cuda.cu needs sm_80 or newer (bfloat16 tensor cores, cp.async)"
#endif

// >>common ------------------------------------------------------------------------------------------------------------

#ifndef CUDA_HOST               /* else tests/cuda_host has its own */
  #define STX__LAUNCH(kernel, grid, block, smem, stream, ...) kernel<<<grid, block, smem, stream>>>(__VA_ARGS__)
  #define STX__SHARED(type, name, n) __shared__ __align__(16) type name[n]
  #define STX__DYNAMIC(name) extern __shared__ __align__(128) unsigned char name[]
#endif

typedef __nv_bfloat16 stx__bf16;
enum { STX__WARP = 32 };
#define STX__ALL 0xffffffffu

/* A row of numbers in device memory, as a kernel sees it: floats or bfloat16s, decided by the allocation that it lies in. twin: the
   bfloat16 copy of a parameter, which writers keep current and matrix products read. The branch is the same for all threads, and what
   these kernels do is wait for memory. */
typedef struct stx__num { void *p; stx__bf16 *twin; int half; } stx__num;
static __device__ __forceinline__ float stx__get(const stx__num &a, size_t i) {
    return a.half ? __bfloat162float(((const stx__bf16 *)a.p)[i]) : ((const float *)a.p)[i];
}
static __device__ __forceinline__ void stx__put(const stx__num &a, size_t i, float v) {
    if (a.half) { ((stx__bf16 *)a.p)[i] = __float2bfloat16(v); return; }
    ((float *)a.p)[i] = v;
    if (a.twin) a.twin[i] = __float2bfloat16(v);
}
static __device__ __forceinline__ void stx__add(const stx__num &a, size_t i, float v, int accumulate) { stx__put(a, i, accumulate ? stx__get(a, i) + v : v); }
/* Four neighbours at once, i a multiple of 4; the row must be aligned (stx__by4). */
static __device__ __forceinline__ float4 stx__get4(const stx__num &a, size_t i) {
    if (a.half) {
        uint2 u = *(const uint2 *)((const stx__bf16 *)a.p + i);
        return make_float4(__uint_as_float(u.x << 16), __uint_as_float(u.x & 0xffff0000u), __uint_as_float(u.y << 16), __uint_as_float(u.y & 0xffff0000u));
    }
    return *(const float4 *)((const float *)a.p + i);
}
static __device__ __forceinline__ uint32_t stx__pair(float a, float b) {
    __nv_bfloat162 v = __floats2bfloat162_rn(a, b);
    uint32_t u;
    memcpy(&u, &v, 4);
    return u;
}
static __device__ __forceinline__ void stx__put4(const stx__num &a, size_t i, float4 v) {
    if (a.half || a.twin) {
        uint2 u;
        u.x = stx__pair(v.x, v.y);
        u.y = stx__pair(v.z, v.w);
        *(uint2 *)((a.half ? (stx__bf16 *)a.p : a.twin) + i) = u;
        if (a.half) return;
    }
    *(float4 *)((float *)a.p + i) = v;
}

/* Sums and maxima of a warp, the same in every lane, in an order that does not depend on anything. */
static __device__ __forceinline__ float stx__warp_sum(float v) {
    for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(STX__ALL, v, o);
    return v;
}
static __device__ __forceinline__ double stx__warp_sum_f64(double v) {
    for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(STX__ALL, v, o);
    return v;
}
static __device__ __forceinline__ float stx__warp_max(float v) {
    for (int o = 16; o; o >>= 1) v = fmaxf(v, __shfl_xor_sync(STX__ALL, v, o));
    return v;
}

/* Instructions without a name in CUDA C++, and their meaning on the host (tests/cuda_host). Fragments: PTX ISA, "Matrix fragments for
   mma.m16n8k16" and ".m16n8k8": lane = 4 g + t; c holds rows g, g, g+8, g+8 and columns 2t, 2t+1, 2t, 2t+1. */
#ifdef CUDA_HOST
static inline void stx__mma_bf16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) { cuda_host_mma_bf16(c, a, b); }
static inline void stx__mma_tf32(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) { cuda_host_mma_tf32(c, a, b); }
static inline void stx__ldmatrix_x4(uint32_t (&r)[4], const void *row) { cuda_host_ldmatrix(r, 4, 0, row); }
static inline void stx__ldmatrix_x2(uint32_t (&r)[2], const void *row) { cuda_host_ldmatrix(r, 2, 0, row); }
static inline void stx__ldmatrix_x4_trans(uint32_t (&r)[4], const void *row) { cuda_host_ldmatrix(r, 4, 1, row); }
static inline void stx__ldmatrix_x2_trans(uint32_t (&r)[2], const void *row) { cuda_host_ldmatrix(r, 2, 1, row); }
static inline void stx__cp16(void *smem, const void *gmem, int bytes) { cuda_host_cp_async(smem, gmem, 16, bytes); }
static inline void stx__cp_commit(void) { cuda_host_cp_commit(); }
template<int N> static inline void stx__cp_wait(void) { cuda_host_cp_wait(N); }
static inline float stx__exp2(float v) { return exp2f(v); }
#else
static __device__ __forceinline__ uint32_t stx__smem(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }
static __device__ __forceinline__ void stx__mma_bf16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
static __device__ __forceinline__ void stx__mma_tf32(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
static __device__ __forceinline__ void stx__ldmatrix_x4(uint32_t (&r)[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(stx__smem(row)) : "memory");
}
static __device__ __forceinline__ void stx__ldmatrix_x2(uint32_t (&r)[2], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(stx__smem(row)) : "memory");
}
static __device__ __forceinline__ void stx__ldmatrix_x4_trans(uint32_t (&r)[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(stx__smem(row)) : "memory");
}
static __device__ __forceinline__ void stx__ldmatrix_x2_trans(uint32_t (&r)[2], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(stx__smem(row)) : "memory");
}
/* 16 bytes from global to shared memory, of which the first `bytes` are read and the rest is zero; there only after cp_wait and a barrier */
static __device__ __forceinline__ void stx__cp16(void *smem, const void *gmem, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" : : "r"(stx__smem(smem)), "l"(gmem), "r"(bytes) : "memory");
}
static __device__ __forceinline__ void stx__cp_commit(void) { asm volatile("cp.async.commit_group;" : : : "memory"); }
template<int N> static __device__ __forceinline__ void stx__cp_wait(void) { asm volatile("cp.async.wait_group %0;" : : "n"(N) : "memory"); }
static __device__ __forceinline__ float stx__exp2(float v) { float r; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v)); return r; }
#endif

/* Philox4x32-10, as stx_philox. */
static __device__ __forceinline__ uint4 stx__philox(uint64_t seed, uint64_t hi, uint64_t lo) {
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    uint32_t c0 = (uint32_t)lo, c1 = (uint32_t)(lo >> 32), c2 = (uint32_t)hi, c3 = (uint32_t)(hi >> 32);
    for (int r = 0; r < 10; r++) {
        uint64_t p0 = (uint64_t)0xD2511F53u * c0, p1 = (uint64_t)0xCD9E8D57u * c2;
        c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)p1;
        c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)p0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return make_uint4(c0, c1, c2, c3);
}

/* The GPU of a context */
typedef struct stx__range { char *base; size_t bytes; int kind; stx__bf16 *twin; struct stx__range *next; } stx__range;
struct stx_gpu {
    int index, sms, major, minor, half, capturing, repeatable, failed, tf32;
    size_t shared_max;                  /* shared memory that a block may ask for, bytes */
    cudaStream_t stream;
    cublasLtHandle_t lt;
    stx__range *ranges, *last;          /* allocations, and the one that was asked for last */
    uint64_t *shift;                    /* on the device: added to the stream of every random number (a replayed step draws new ones) */
    char *scratch;                      /* for the inside of one kernel's launcher, on the device; grows, never in a capture */
    size_t scratch_bytes;
    void *plans;                        /* >>gemm's */
    void *report[4];                    /* pinned host memory, in turn */
    cudaEvent_t reported[4];
    unsigned reports;
    char name[96];
};
static stx_gpu *stx__gpu(const stx_ctx *x) { return (stx_gpu *)stx_ctx_gpu(x); }

/* How numbers are stored at p */
static const stx__range *stx__range_of(stx_gpu *g, const void *p) {
    stx__range *r = g->last;
    if (r && (const char *)p >= r->base && (const char *)p < r->base + r->bytes) return r;
    for (r = g->ranges; r; r = r->next)
        if ((const char *)p >= r->base && (const char *)p < r->base + r->bytes) return g->last = r;
    return NULL;
}
static stx__num stx__num_of(const stx_ctx *x, const void *p) {
    stx__num v = {(void *)p, NULL, 0};
    stx_gpu *g = stx__gpu(x);
    const stx__range *r = p ? stx__range_of(g, p) : NULL;
    if (!r) return v;
    v.half = g->half && r->kind == STX_MEM_NUMBERS;
    if (r->twin) v.twin = r->twin + ((const float *)p - (const float *)(void *)r->base);
    return v;
}
/* May these be taken four at a time? n and the strides must be multiples of 4 as well: the caller's part. */
static int stx__by4(const stx__num &a) { return !a.p || ((uintptr_t)a.p % (a.half ? 8 : 16) == 0 && (uintptr_t)a.twin % 8 == 0); }
static unsigned stx__blocks(size_t n, size_t each, size_t most) {
    size_t b = (n + each - 1) / each;
    return (unsigned)(b < 1 ? 1 : b > most ? most : b);
}

/* After a launch: an error becomes the context's, once, with the kernel's name. */
static int stx__cuda_failed(stx_ctx *x, cudaError_t e, const char *what) {
    if (e == cudaSuccess) return 0;
    stx__gpu(x)->failed = 1;
    stx_fail(x, STX_ERR_DEVICE, "%s: CUDA says \"%s\" (%s) on %s: nothing that this step made can be used; free the context and go on from the last checkpoint",
             what, cudaGetErrorString(e), cudaGetErrorName(e), stx__gpu(x)->name);
    return 1;
}
#define STX__CHECK(x, name) stx__cuda_failed(x, cudaGetLastError(), name)
/* STX__RUN_KERNEL(x, "stx_fill", kernel, grid, block, shared bytes, arguments...): launches on the context's stream and checks */
#define STX__RUN_KERNEL(x, name, kernel, grid, block, smem, ...) \
    do { if (stx_ok(x)) { STX__LAUNCH(kernel, grid, block, smem, stx__gpu(x)->stream, __VA_ARGS__); STX__CHECK(x, name); } } while (0)

/* bytes of device scratch for the inside of one launcher: the next launcher may use the same, in stream order. NULL and an error when
   there is no memory. */
static void *stx__scratch_of(stx_ctx *x, size_t bytes, const char *what);
enum { STX__REPORT_BYTES = 1 << 16 };

/* >>gemm's part of opening and closing a device: 1, or 0 and an error */
static int stx__gemm_open(stx_ctx *x, stx_gpu *g);
static void stx__gemm_close(stx_gpu *g);

// >>elementwise -------------------------------------------------------------------------------------------------------

// >>embedding ---------------------------------------------------------------------------------------------------------

// >>layernorm ---------------------------------------------------------------------------------------------------------

// >>softmax, losses ---------------------------------------------------------------------------------------------------

// >>optimisers --------------------------------------------------------------------------------------------------------

// >>gemm --------------------------------------------------------------------------------------------------------------

// >>attention: oracle -------------------------------------------------------------------------------------------------

// >>attention: forward ------------------------------------------------------------------------------------------------

// >>attention: backward -----------------------------------------------------------------------------------------------

// >>attention: launchers ----------------------------------------------------------------------------------------------

// >>device ------------------------------------------------------------------------------------------------------------

static int stx__ok_or(stx_ctx *x, stx_gpu *g, cudaError_t e, const char *what) {
    if (e == cudaSuccess) return 1;
    (void)cudaGetLastError();               /* not sticky: it is told here */
    stx_fail(x, e == cudaErrorMemoryAllocation ? STX_ERR_MEMORY : STX_ERR_DEVICE, "%s: CUDA says \"%s\" (%s)%s%s", what, cudaGetErrorString(e), cudaGetErrorName(e),
             g && g->name[0] ? " on " : "", g && g->name[0] ? g->name : "");
    return 0;
}
/* One kernel in this file that does nothing: whether the device can run the code is asked of it, before anything is allocated. */
static __global__ void stx__probe_kernel(void) {}

stx_gpu *stx_cuda_open(stx_ctx *x) {
    const stx_desc *d = stx_ctx_desc(x);
    cudaDeviceProp p;
    cudaFuncAttributes attributes;
    stx_gpu *g;
    cudaError_t e;
    int count = 0, i;
    e = cudaGetDeviceCount(&count);
    if (e != cudaSuccess || count < 1) {
        (void)cudaGetLastError();
        stx_fail(x, STX_ERR_DEVICE, "stx_create: no CUDA device (%s): use STX_CPU, or look whether the driver is loaded (nvidia-smi) and CUDA_VISIBLE_DEVICES hides it",
                 e == cudaSuccess ? "none found" : cudaGetErrorString(e));
        return NULL;
    }
    if (d->gpu < 0 || d->gpu >= count) {
        stx_fail(x, STX_ERR_DEVICE, "stx_create: desc.gpu is %d, there are %d: want 0 to %d", d->gpu, count, count - 1);
        return NULL;
    }
    g = (stx_gpu *)calloc(1, sizeof *g);
    if (!g) { stx_fail(x, STX_ERR_MEMORY, "stx_create: no memory"); return NULL; }
    g->index = d->gpu;
    g->half = d->precision == STX_PREC_BF16;
    g->tf32 = d->tf32;
    if (!stx__ok_or(x, g, cudaSetDevice(d->gpu), "stx_create") || !stx__ok_or(x, g, cudaGetDeviceProperties(&p, d->gpu), "stx_create")) { stx_cuda_close(g); return NULL; }
    g->sms = p.multiProcessorCount;
    g->major = p.major;
    g->minor = p.minor;
    g->shared_max = p.sharedMemPerBlockOptin;
    snprintf(g->name, sizeof g->name, "%.80s, sm_%d%d", p.name, p.major, p.minor);
    if (p.major < 8 || cudaFuncGetAttributes(&attributes, stx__probe_kernel) != cudaSuccess) {
        (void)cudaGetLastError();
        stx_fail(x, STX_ERR_DEVICE, "stx_create: this program has no code for GPU %d (%s): build seqtx_cuda.cu with -arch=sm_%d%d (sm_80 or newer is needed)", d->gpu, g->name, p.major, p.minor);
        stx_cuda_close(g);
        return NULL;
    }
    if (!stx__ok_or(x, g, cudaStreamCreateWithFlags(&g->stream, cudaStreamNonBlocking), "stx_create")) { stx_cuda_close(g); return NULL; }
    for (i = 0; i < 4; i++)
        if (!stx__ok_or(x, g, cudaEventCreateWithFlags(&g->reported[i], cudaEventDisableTiming), "stx_create") ||
            !stx__ok_or(x, g, cudaMallocHost(&g->report[i], STX__REPORT_BYTES), "stx_create")) { stx_cuda_close(g); return NULL; }
    if (!stx__ok_or(x, g, cudaMalloc((void **)&g->shift, 256), "stx_create") || !stx__ok_or(x, g, cudaMemsetAsync(g->shift, 0, 256, g->stream), "stx_create") ||
        !stx__gemm_open(x, g)) { stx_cuda_close(g); return NULL; }
    return g;
}
void stx_cuda_close(stx_gpu *g) {
    int i;
    if (!g) return;
    (void)cudaSetDevice(g->index);
    if (g->stream) (void)cudaStreamSynchronize(g->stream);
    stx__gemm_close(g);
    while (g->ranges) {
        stx__range *r = g->ranges;
        g->ranges = r->next;
        (void)cudaFree(r->base);
        if (r->twin) (void)cudaFree(r->twin);
        free(r);
    }
    for (i = 0; i < 4; i++) {
        if (g->reported[i]) (void)cudaEventDestroy(g->reported[i]);
        if (g->report[i]) (void)cudaFreeHost(g->report[i]);
    }
    if (g->shift) (void)cudaFree(g->shift);
    if (g->scratch) (void)cudaFree(g->scratch);
    if (g->stream) (void)cudaStreamDestroy(g->stream);
    free(g);
}
void *stx_cuda_alloc(stx_ctx *x, size_t bytes, int kind) {
    stx_gpu *g = stx__gpu(x);
    stx__range *r = (stx__range *)calloc(1, sizeof *r);
    void *p = NULL, *twin = NULL;
    if (!r || g->capturing) {
        if (r) stx_fail(x, STX_ERR_MEMORY, "%zu more bytes of GPU memory are wanted while a step is captured: its key does not tell it from one that wants less", bytes);
        free(r);
        return NULL;
    }
    if (cudaMalloc(&p, bytes) != cudaSuccess || (kind == STX_MEM_PARAMS && g->half && cudaMalloc(&twin, bytes / 2) != cudaSuccess)) {
        (void)cudaGetLastError();
        if (p) (void)cudaFree(p);
        free(r);
        return NULL;
    }
    r->base = (char *)p;
    r->bytes = bytes;
    r->kind = kind;
    r->twin = (stx__bf16 *)twin;
    r->next = g->ranges;
    g->ranges = r;
    return p;
}
void stx_cuda_free(stx_ctx *x, void *p) {
    stx_gpu *g = stx__gpu(x);
    stx__range **at, *r;
    for (at = &g->ranges; *at && (*at)->base != (char *)p; at = &(*at)->next) {}
    r = *at;
    if (!r) return;
    *at = r->next;
    if (g->last == r) g->last = NULL;
    (void)cudaStreamSynchronize(g->stream);
    (void)cudaFree(r->base);
    if (r->twin) (void)cudaFree(r->twin);
    free(r);
}
int stx_cuda_half(const stx_ctx *x, const void *p) {
    stx_gpu *g = stx__gpu(x);
    const stx__range *r = stx__range_of(g, p);
    return g->half && r && r->kind == STX_MEM_NUMBERS;
}
static void *stx__scratch_of(stx_ctx *x, size_t bytes, const char *what) {
    stx_gpu *g = stx__gpu(x);
    if (!stx_ok(x)) return NULL;
    if (bytes > g->scratch_bytes) {
        void *p = NULL;
        size_t want = bytes < ((size_t)1 << 20) ? (size_t)1 << 20 : bytes + bytes / 4;
        if (g->capturing) { stx_fail(x, STX_ERR_MEMORY, "%s: %zu bytes of scratch are wanted while a step is captured: its key does not tell it from one that wants less", what, bytes); return NULL; }
        if (cudaMalloc(&p, want) != cudaSuccess && ((void)cudaGetLastError(), want = bytes, cudaMalloc(&p, want)) != cudaSuccess) {
            (void)cudaGetLastError();
            stx_fail(x, STX_ERR_MEMORY, "%s: the GPU has no memory for %zu bytes of scratch: use a smaller batch, block or model", what, bytes);
            return NULL;
        }
        if (g->scratch) {                            /* the old one stays: a captured step may know its address */
            stx__range *r = (stx__range *)calloc(1, sizeof *r);
            if (!r) { (void)cudaFree(p); stx_fail(x, STX_ERR_MEMORY, "%s: no memory", what); return NULL; }
            r->base = g->scratch;
            r->bytes = g->scratch_bytes;
            r->next = g->ranges;
            g->ranges = r;
        }
        g->scratch = (char *)p;
        g->scratch_bytes = want;
    }
    return g->scratch;
}

/* What comes from the host while a step is captured would be the same in every replay: such a step cannot be repeated. */
static int stx__not_captured(stx_gpu *g) {
    if (g->capturing) g->repeatable = 0;
    return !g->capturing;
}
void stx_cuda_put(stx_ctx *x, void *to, const void *host, size_t bytes) {
    stx_gpu *g = stx__gpu(x);
    if (!stx_ok(x) || !bytes || !stx__not_captured(g)) return;
    stx__ok_or(x, g, cudaMemcpyAsync(to, host, bytes, cudaMemcpyHostToDevice, g->stream), "a copy to the GPU");
}
void stx_cuda_get(stx_ctx *x, void *host, const void *from, size_t bytes) {
    stx_gpu *g = stx__gpu(x);
    if (!stx_ok(x) || !bytes) return;
    if (!stx__not_captured(g)) { memset(host, 0, bytes); return; }
    if (stx__ok_or(x, g, cudaMemcpyAsync(host, from, bytes, cudaMemcpyDeviceToHost, g->stream), "a copy from the GPU"))
        stx__ok_or(x, g, cudaStreamSynchronize(g->stream), "a copy from the GPU");
}
/* to (n) = from (n), whatever is stored in either; a thread a number. */
static __global__ void stx__convert_kernel(stx__num to, stx__num from, size_t n) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) stx__put(to, i, stx__get(from, i));
}
void stx_cuda_put_numbers(stx_ctx *x, stx_real *to, const stx_real *host, size_t n) {
    stx_gpu *g = stx__gpu(x);
    stx__num v = stx__num_of(x, to), f = {NULL, NULL, 0};
    size_t at, part = (size_t)1 << 22;
    if (!v.half && !v.twin) { stx_cuda_put(x, to, host, n * sizeof *host); return; }
    if (!stx_ok(x) || !stx__not_captured(g)) return;
    for (at = 0; at < n && stx_ok(x); at += part) {
        size_t w = n - at < part ? n - at : part;
        f.p = stx__scratch_of(x, w * sizeof *host, "a copy to the GPU");
        v = stx__num_of(x, stx_at(x, to, at));
        if (!f.p) return;
        stx_cuda_put(x, f.p, host + at, w * sizeof *host);
        STX__RUN_KERNEL(x, "a copy to the GPU", stx__convert_kernel, stx__blocks(w, 256, 4096), 256, 0, v, f, w);
    }
}
void stx_cuda_get_numbers(stx_ctx *x, stx_real *host, const stx_real *from, size_t n) {
    stx_gpu *g = stx__gpu(x);
    stx__num v = stx__num_of(x, from), t = {NULL, NULL, 0};
    size_t at, part = (size_t)1 << 22;
    if (!v.half || g->capturing) { stx_cuda_get(x, host, from, n * sizeof *host); return; }
    for (at = 0; at < n && stx_ok(x); at += part) {
        size_t w = n - at < part ? n - at : part;
        t.p = stx__scratch_of(x, w * sizeof *host, "a copy from the GPU");
        v = stx__num_of(x, stx_at(x, from, at));
        if (!t.p) return;
        STX__RUN_KERNEL(x, "a copy from the GPU", stx__convert_kernel, stx__blocks(w, 256, 4096), 256, 0, t, v, w);
        stx_cuda_get(x, host + at, t.p, w * sizeof *host);
    }
}
void stx_cuda_zero(stx_ctx *x, void *p, size_t bytes) {
    stx_gpu *g = stx__gpu(x);
    stx__num v = stx__num_of(x, p);
    if (!stx_ok(x) || !bytes) return;
    stx__ok_or(x, g, cudaMemsetAsync(p, 0, bytes, g->stream), "clearing GPU memory");
    if (v.twin) stx__ok_or(x, g, cudaMemsetAsync(v.twin, 0, bytes / 2, g->stream), "clearing GPU memory");
}
void stx_cuda_move(stx_ctx *x, void *to, const void *from, size_t bytes) {
    stx_gpu *g = stx__gpu(x);
    if (stx_ok(x) && bytes) stx__ok_or(x, g, cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, g->stream), "a copy on the GPU");
}
void stx_cuda_sync(stx_ctx *x) {
    stx_gpu *g = stx__gpu(x);
    if (g && !g->capturing) stx__ok_or(x, g, cudaStreamSynchronize(g->stream), "waiting for the GPU");
}
void *stx_cuda_stream(const stx_ctx *x) { return (void *)stx__gpu(x)->stream; }
const char *stx_cuda_name(const stx_ctx *x) { return stx__gpu(x)->name; }

static __global__ void stx__set_f64_kernel(double *p, double v) { *p = v; }
static __global__ void stx__set_u64_kernel(uint64_t *p, uint64_t v) { *p = v; }
void stx_cuda_set_f64(stx_ctx *x, double *p, double v) {
    if (stx__not_captured(stx__gpu(x))) STX__RUN_KERNEL(x, "a copy to the GPU", stx__set_f64_kernel, 1, 1, 0, p, v);
}
void stx_cuda_shift(stx_ctx *x, uint64_t shift) { STX__RUN_KERNEL(x, "a copy to the GPU", stx__set_u64_kernel, 1, 1, 0, stx__gpu(x)->shift, shift); }

/* to = the pieces' p, one after the other; a block a piece, whose place is the sum of the sizes before it. */
static __global__ void stx__gather_kernel(float *to, const stx_piece *piece) {
    size_t at = 0, i;
    for (i = 0; i < blockIdx.x; i++) at += piece[i].n;
    for (i = threadIdx.x; i < piece[blockIdx.x].n; i += blockDim.x) to[at + i] = piece[blockIdx.x].p[i];
}
void stx_cuda_gather(stx_ctx *x, stx_real *to, const stx_piece *piece, size_t count) {
    if (count) STX__RUN_KERNEL(x, "stx_watch", stx__gather_kernel, (unsigned)count, 128, 0, to, piece);
}
void stx_cuda_report(stx_ctx *x, const void *report, size_t bytes) {
    stx_gpu *g = stx__gpu(x);
    unsigned k = ++g->reports % 4;
    if (!stx_ok(x)) return;
    if (bytes > STX__REPORT_BYTES) { stx_fail(x, STX_ERR_ARG, "the report of a step has %zu bytes, want at most %zu", bytes, (size_t)STX__REPORT_BYTES); return; }
    if (stx__ok_or(x, g, cudaMemcpyAsync(g->report[k], report, bytes, cudaMemcpyDeviceToHost, g->stream), "the report of a step"))
        stx__ok_or(x, g, cudaEventRecord(g->reported[k], g->stream), "the report of a step");
}
const void *stx_cuda_report_wait(stx_ctx *x) {
    stx_gpu *g = stx__gpu(x);
    unsigned k = g->reports % 4;
    return stx_ok(x) && stx__ok_or(x, g, cudaEventSynchronize(g->reported[k]), "a step on the GPU") ? g->report[k] : NULL;
}

// >>graph -------------------------------------------------------------------------------------------------------------

struct stx_graph { cudaGraphExec_t exec; };

int stx_cuda_capturing(const stx_ctx *x) { return stx__gpu(x) && stx__gpu(x)->capturing; }
int stx_cuda_capture_begin(stx_ctx *x) {
    stx_gpu *g = stx__gpu(x);
    if (!stx_ok(x) || g->capturing) return 0;
    if (!stx__ok_or(x, g, cudaStreamBeginCapture(g->stream, cudaStreamCaptureModeThreadLocal), "capturing a step")) return 0;
    g->capturing = g->repeatable = 1;
    return 1;
}
stx_graph *stx_cuda_capture_end(stx_ctx *x) {
    stx_gpu *g = stx__gpu(x);
    cudaGraph_t graph = NULL;
    stx_graph *r = NULL;
    cudaError_t e = cudaStreamEndCapture(g->stream, &graph);
    g->capturing = 0;
    if (e != cudaSuccess) { (void)cudaGetLastError(); g->repeatable = 0; }
    if (graph && g->repeatable && stx_ok(x)) {
        r = (stx_graph *)calloc(1, sizeof *r);
        if (r && cudaGraphInstantiate(&r->exec, graph, 0) != cudaSuccess) {
            (void)cudaGetLastError();
            free(r);
            r = NULL;
        }
    }
    if (graph) (void)cudaGraphDestroy(graph);
    return r;
}
void stx_cuda_graph_launch(stx_ctx *x, stx_graph *r) {
    stx_gpu *g = stx__gpu(x);
    if (stx_ok(x) && r) stx__ok_or(x, g, cudaGraphLaunch(r->exec, g->stream), "replaying a step");
}
void stx_cuda_graph_free(stx_ctx *x, stx_graph *r) {
    if (!r) return;
    stx_cuda_sync(x);
    (void)cudaGraphExecDestroy(r->exec);
    free(r);
}
