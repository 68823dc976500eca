#pragma once
#ifndef SEQTX_CUDA
  #define SEQTX_CUDA
#endif
#include "seqtx.h"
#if __has_include("seqtx_sru.h")
  #include "seqtx_sru.h"
#endif
#if __has_include("seqtx_compressive.h")
  #include "seqtx_compressive.h"
#endif
#if __has_include("seqtx_par.h")
  #include "seqtx_par.h"
#endif
#ifdef SEQTX_DOUBLE
  #error "seqtx_cuda.cu supports only float: SEQTX_DOUBLE requires a build without SEQTX_CUDA"
#endif
#include <cuda_runtime.h>
#include <cuda_bf16.h>
#include <cublasLt.h>
#ifdef SEQTX_NCCL
  #include <nccl.h>
  #include <chrono>
  #include <thread>
#endif
#include <float.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <initializer_list>
#include <type_traits>

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
  #error "seqtx_cuda.cu requires -arch=sm_80 or newer (bfloat16 tensor cores, cp.async)"
#endif


// >>common

/* STX__GLOBAL(threads) begins the definition of a kernel and states its launch bound: the
   largest number of threads per block in a launch. STX__GLOBAL(threads, blocks) also
   states how many blocks a multiprocessor should hold. Without a bound, the compiler may
   use so many registers that a launch fails, and the failure appears only on a GPU.
   Therefore tests/build/form.sh requires every kernel to state its bound. tests/cuda_host
   compares each launch with the bound of its kernel, and tests/cuda/cuda_regs.sh compares
   the bound with the registers that the kernel uses. stx__kernel_of<P..> is the type of a
   pointer to a kernel whose parameters have the types P. */
#ifndef CUDA_HOST /* tests/cuda_host defines its own */
  #define STX__GLOBAL(...) static __global__ void __launch_bounds__(__VA_ARGS__)
template <class... P> using stx__kernel_of = void (*)(P...);
  #define STX__LAUNCH(kernel, grid, block, smem, stream, ...) \
    kernel<<<grid, block, smem, stream>>>(__VA_ARGS__)
  #define STX__SHARED(type, name, n) __shared__ __align__(16) type name[n]
  #define STX__DYNAMIC(name)         extern __shared__ __align__(128) unsigned char name[]
#endif

typedef __nv_bfloat16 stx__bf16;

enum { STX__WARP = 32 };

#define STX__ALL 0xffffffffu

/* An array in device memory, as it is passed to kernels. `half` is nonzero if the
   elements are bfloat16, and 0 if they are float. `twin` is the bfloat16 copy of a
   parameter, or NULL; every kernel that writes the parameter also updates the copy. All
   threads take the same branch on `half`, but a load after it waits for the load before
   it. Kernels that depend on many loads in flight know `half` when they are compiled,
   see STX__FLOATS. */
typedef struct stx__array {
    void *p;
    stx__bf16 *twin;
    ptrdiff_t half;
} stx__array;

/* Returns element i as a float. */
static __device__ __forceinline__ float stx__get(const stx__array &a, size_t i) {
    return a.half ? __bfloat162float(((const stx__bf16 *)a.p)[i]) : ((const float *)a.p)[i];
}

static __device__ __forceinline__ void stx__put(const stx__array &a, size_t i, float v) {
    if (a.half) {
        ((stx__bf16 *)a.p)[i] = __float2bfloat16(v);
        return;
    }
    ((float *)a.p)[i] = v;
    if (a.twin) a.twin[i] = __float2bfloat16(v);
}

static __device__ __forceinline__ void stx__add(const stx__array &a, size_t i, float v,
                                                int accumulate) {
    stx__put(a, i, accumulate ? stx__get(a, i) + v : v);
}

/* Loads elements i to i + 3 in one access. i must be a multiple of 4 and the array must
   be aligned, see stx__aligned4. A bfloat16 is the upper half of a float. */
static __device__ __forceinline__ float4 stx__get4(const stx__array &a, size_t i) {
    if (a.half) {
        uint2 u = *(const uint2 *)((const stx__bf16 *)a.p + i);
        return make_float4(__uint_as_float(u.x << 16), __uint_as_float(u.x & 0xffff0000u),
                           __uint_as_float(u.y << 16), __uint_as_float(u.y & 0xffff0000u));
    }
    return *(const float4 *)((const float *)a.p + i);
}

/* How a kernel accesses the arrays of its rows: STX__FLOATS and STX__HALVES are
   instances for four elements per access, with `half` and `twin` as compile-time
   constants. STX__MIXED is the instance for everything else: one element per access, and
   `half` is tested at each. stx__access selects one. */
enum { STX__FLOATS, STX__HALVES, STX__MIXED };

/* elements per access */
template <int S> constexpr int stx__width = S == STX__MIXED ? 1 : 4;

/* Returns `a` with its storage as a constant that the compiler knows. */
template <int S> static __device__ __forceinline__ stx__array stx__stored(stx__array a) {
    if constexpr (S != STX__MIXED) {
        a.half = S == STX__HALVES;
        a.twin = NULL;
    }
    return a;
}

/* Like stx__stored, for a parameter that is only read: float, except in STX__MIXED. */
template <int S> static __device__ __forceinline__ stx__array stx__stored_f32(stx__array a) {
    return stx__stored<S == STX__MIXED ? STX__MIXED : STX__FLOATS>(a);
}

/* Packs two floats as bfloat16s, the first one in the lower half. */
static __device__ __forceinline__ uint32_t stx__pair(float a, float b) {
    __nv_bfloat162 v = __floats2bfloat162_rn(a, b);
    uint32_t u;
    memcpy(&u, &v, 4);
    return u;
}

static __device__ __forceinline__ void stx__put4(const stx__array &a, size_t i, float4 v) {
    if (a.half || a.twin) {
        /* nvcc may store a uint2 in two halves */
        uint64_t u = stx__pair(v.x, v.y) | (uint64_t)stx__pair(v.z, v.w) << 32;
        *(uint64_t *)((a.half ? (stx__bf16 *)a.p : a.twin) + i) = u;
        if (a.half) return;
    }
    *(float4 *)((float *)a.p + i) = v;
}

/* Returns the sum or maximum over the lanes of a warp, in every lane. The butterfly
   adds in the same order in all lanes and in all launches. */
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

/* PTX instructions without an equivalent in CUDA C++, and their replacements on the host
   (tests/cuda_host). The PTX ISA defines the fragments in "Matrix fragments for
   mma.m16n8k16" and ".m16n8k8": with lane = 4 g + t, c[0..3] are in rows g, g, g+8, g+8
   and columns 2t, 2t+1, 2t, 2t+1.

       stx__mma_bf16(c, a, b)              c += a b, bfloat16 inputs
       stx__mma_tf32(c, a, b)              c += a b, tf32 inputs
       stx__mma_bf16_2(c, d, a, b)         c += a b[0..1], d += a b[2..3]
       stx__mma_tf32_3(c, l, h, m, b)      c += l b + h m + h b, in this order: computes
                                           (h + l) (b + m) without the term l m
       stx__ldmatrix_x4(r, row)            loads four 8 x 8 matrices from shared memory;
                                           stx__ldmatrix_x4_trans transposes them
       stx__cp16(smem, gmem, bytes)        copies 16 bytes from global to shared memory;
                                           sets all but the first `bytes` to 0. The data
                                           is visible after stx__cp_wait and a barrier.
                                           gmem must be a valid address even if bytes is
                                           0: nothing is read then, but memory checkers
                                           check the address
       stx__cp_commit, stx__cp_wait<N>     closes a group of copies; waits until at most N
                                           groups are pending
       stx__exp2, stx__rcp                 approximations of 2^v and 1/v

   stx__mma_bf16_2 and stx__mma_tf32_3 exist because one call is faster on the host. */
#ifdef CUDA_HOST
    /* Marks a kernel whose short loops must also be unrolled by the host compiler.
       Otherwise the kernel's arrays are not kept in registers, and the sanitizers check
       every access to these arrays. */
  #if defined(__GNUC__) && !defined(__clang__)
    #define STX__HOST_UNROLLED __attribute__((optimize("O3")))
  #else
    #define STX__HOST_UNROLLED
  #endif
static inline void stx__mma_bf16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    cuda_host_mma_bf16(c, a, b);
}

static inline void stx__mma_tf32(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    cuda_host_mma_tf32(c, a, b);
}

static inline void stx__mma_bf16_2(float (&c)[4], float (&d)[4], const uint32_t (&a)[4],
                                   const uint32_t (&b)[4]) {
    const cuda_host_product p[2] = {{c, a, b}, {d, a, b + 2}};
    cuda_host_mma_bf16(p, 2);
}

static inline void stx__mma_tf32_3(float (&c)[4], const uint32_t (&l)[4], const uint32_t (&h)[4],
                                   const uint32_t (&m)[2], const uint32_t (&b)[2]) {
    const cuda_host_product p[3] = {{c, l, b}, {c, h, m}, {c, h, b}};
    cuda_host_mma_tf32(p, 3);
}

static inline void stx__ldmatrix_x4(uint32_t (&r)[4], const void *row) {
    cuda_host_ldmatrix(r, 4, 0, row);
}

static inline void stx__ldmatrix_x4_trans(uint32_t (&r)[4], const void *row) {
    cuda_host_ldmatrix(r, 4, 1, row);
}

static inline void stx__cp16(void *smem, const void *gmem, int bytes) {
    cuda_host_cp_async(smem, gmem, 16, bytes);
}

static inline void stx__cp_commit(void) {
    cuda_host_cp_commit();
}

template <int N> static inline void stx__cp_wait(void) {
    cuda_host_cp_wait(N);
}

static inline float stx__exp2(float v) {
    return exp2f(v);
}

static inline float stx__rcp(float v) {
    return 1.0f / v;
}
#else
  #define STX__HOST_UNROLLED

static __device__ __forceinline__ uint32_t stx__smem(const void *p) {
    return (uint32_t)__cvta_generic_to_shared(p);
}

static __device__ __forceinline__ void stx__mma_bf16(float (&c)[4], const uint32_t (&a)[4],
                                                     const uint32_t (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

static __device__ __forceinline__ void stx__mma_tf32(float (&c)[4], const uint32_t (&a)[4],
                                                     const uint32_t (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

static __device__ __forceinline__ void stx__mma_bf16_2(float (&c)[4], float (&d)[4],
                                                       const uint32_t (&a)[4],
                                                       const uint32_t (&b)[4]) {
    uint32_t x[2] = {b[0], b[1]}, y[2] = {b[2], b[3]};
    stx__mma_bf16(c, a, x);
    stx__mma_bf16(d, a, y);
}

static __device__ __forceinline__ void stx__mma_tf32_3(float (&c)[4], const uint32_t (&l)[4],
                                                       const uint32_t (&h)[4],
                                                       const uint32_t (&m)[2],
                                                       const uint32_t (&b)[2]) {
    stx__mma_tf32(c, l, b);
    stx__mma_tf32(c, h, m);
    stx__mma_tf32(c, h, b);
}

static __device__ __forceinline__ void stx__ldmatrix_x4(uint32_t (&r)[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(stx__smem(row))
                 : "memory");
}

static __device__ __forceinline__ void stx__ldmatrix_x4_trans(uint32_t (&r)[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(stx__smem(row))
                 : "memory");
}

static __device__ __forceinline__ void stx__cp16(void *smem, const void *gmem, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :
                 : "r"(stx__smem(smem)), "l"(gmem), "r"(bytes)
                 : "memory");
}

static __device__ __forceinline__ void stx__cp_commit(void) {
    asm volatile("cp.async.commit_group;" : : : "memory");
}

template <int N> static __device__ __forceinline__ void stx__cp_wait(void) {
    asm volatile("cp.async.wait_group %0;" : : "n"(N) : "memory");
}

static __device__ __forceinline__ float stx__exp2(float v) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
    return r;
}

static __device__ __forceinline__ float stx__rcp(float v) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
    return r;
}
#endif

/* Philox4x32-10, the same generator as stx_philox in seqtx.h (Salmon et al. 2011).
   Returns four random words for the key `seed` and the counter (hi, lo). */
static __device__ __forceinline__ uint4 stx__philox(uint64_t seed, uint64_t hi, uint64_t lo) {
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    uint32_t c0 = (uint32_t)lo, c1 = (uint32_t)(lo >> 32);
    uint32_t c2 = (uint32_t)hi, c3 = (uint32_t)(hi >> 32);
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

/* An allocation in device memory */
typedef struct stx__range {
    char *base;
    size_t bytes;
    int kind;           /* STX_MEM_.. */
    stx__bf16 *twin;    /* bfloat16 copy, bytes / 2 bytes long, or NULL */
    struct stx__range *next;
} stx__range;

/* Pinned host buffers. Transfers cycle through them, so that a transfer need not wait for
   the previous one. The event done[k] is recorded after each copy from or to host[k]. */
enum { STX__RING = 4, STX__REPORT_BYTES = 1 << 16, STX__UPLOAD_BYTES = 1 << 20 };

typedef struct stx__ring {
    char *host[STX__RING];
    cudaEvent_t done[STX__RING];
    unsigned count;     /* number of transfers so far */
} stx__ring;

/* The state of a context's GPU */
struct stx_gpu {
    int index;          /* CUDA device number */
    char name[96];      /* name and architecture, such as "NVIDIA H200, sm_90" */
    int sms, major, minor;      /* sms: multiprocessors; major, minor: compute capability */
    size_t shared_max;  /* limit on dynamic shared memory per block, in bytes */
    cudaStream_t stream;        /* runs all of the context's work in order */

    /* options */
    int half;           /* 1 with STX_PREC_BF16: activations are bfloat16, parameters have twins */
    int tf32;           /* 1: float GEMMs may use tf32 */
    int tune;           /* how a GEMM plan's algorithm is chosen. 0: the heuristic's first
                           choice; 1: the fastest in a timed run; for tests, -1: seqtx's
                           kernel; -2: like 0, but without epilogues */
    int split_k;        /* for tests: number of K slices of GEMMs that can split K;
                           0: chosen from the sizes */
    int attention;      /* version of the attention, see stx_cuda_attention */

    /* memory */
    stx__range *ranges, *last_range;    /* `ranges` lists all allocations; `last_range` is
                                           the one that the last lookup found */
    char *scratch;      /* scratch memory, shared by all launchers; does not grow during a
                           capture */
    size_t scratch_bytes;
    size_t bytes;       /* memory in use, excluding scratch */
    uint64_t *shift;    /* in device memory; added to the stream number of every Philox
                           call, so that a replayed step draws new random numbers */
    stx__ring upload;   /* copies data to the GPU; callers may reuse their buffers on return */
    stx__ring report;   /* copies step results to the host, see stx_cuda_report */

    /* capture */
    int capturing;
    int repeatable;     /* 1: the captured step can be replayed */
    stx_graph *graphs;  /* list of all graphs */
    char graph_error[128];      /* why the last step was not captured; "" if it was */

    /* state for later sections of this file */
    cublasLtHandle_t lt;
    struct stx__plans *plans;               /* see >>gemm */
    struct stx__deferred_sums *deferred;    /* see >>shares, sums */
    struct stx__group *group;               /* see >>group; NULL outside a group */
};

static stx_gpu *stx__gpu(const stx_ctx *x) {
    return (stx_gpu *)stx_ctx_gpu(x);
}

/* Makes x's GPU the calling thread's current device and returns it. A thread may use
   contexts on several GPUs, and a new thread starts with GPU 0. */
static stx_gpu *stx__use_gpu(const stx_ctx *x) {
    stx_gpu *g = stx__gpu(x);
    if (g) (void)cudaSetDevice(g->index);
    return g;
}

/* Returns the allocation that contains p, or NULL. */
static const stx__range *stx__range_of(stx_gpu *g, const void *p) {
    stx__range *r = g->last_range;
    const char *at = (const char *)p;
    if (r && at >= r->base && at < r->base + r->bytes) return r;
    for (r = g->ranges; r; r = r->next)
        if (at >= r->base && at < r->base + r->bytes) return g->last_range = r;
    return NULL;
}

/* Returns an stx__array for the pointer p, to be passed to kernels. p may be NULL. */
static stx__array stx__array_of(const stx_ctx *x, const void *p) {
    stx__array v = {(void *)p, NULL, 0};
    stx_gpu *g = stx__gpu(x);
    const stx__range *r = p ? stx__range_of(g, p) : NULL;
    if (!r) return v;
    v.half = g->half && r->kind == STX_MEM_ACTIVATIONS;
    if (r->twin) v.twin = r->twin + ((const float *)p - (const float *)(void *)r->base);
    return v;
}

/* Returns nonzero if the array is NULL or aligned for accesses of four elements. The
   caller checks that sizes and strides are multiples of 4. */
static int stx__aligned4(const stx__array &a) {
    return !a.p || ((uintptr_t)a.p % (a.half ? 8 : 16) == 0 && (uintptr_t)a.twin % 8 == 0);
}

/* Returns how a kernel can access rows of C elements in the arrays `rows`, together with
   the parameters and statistics `floats`: STX__FLOATS, STX__HALVES or STX__MIXED. */
static int stx__access(size_t C, std::initializer_list<stx__array> rows,
                       std::initializer_list<stx__array> floats) {
    int halves = 0, all = 0, four = C % 4 == 0;
    for (const stx__array &a : rows) {
        all += a.p != NULL;
        halves += a.half != 0;
        four = four && stx__aligned4(a) && !a.twin;
    }
    for (const stx__array &a : floats) four = four && stx__aligned4(a) && !a.half;
    if (!four || (halves && halves < all)) return STX__MIXED;
    return halves ? STX__HALVES : STX__FLOATS;
}

/* Returns the number of blocks for n work units, with `each` units per block. The
   result is at least 1 and at most `most`. */
static unsigned stx__blocks(size_t n, size_t each, size_t most) {
    size_t b = (n + each - 1) / each;
    if (b < 1) b = 1;
    return (unsigned)(b < most ? b : most);
}

/* Called after an error. Returns nonzero if the error occurred because the capture had
   been invalidated. Every launch into such a capture fails. These failures are not
   reported, because no captured work has run, and the step is launched again without a
   graph. */
static int stx__capture_lost(stx_gpu *g) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    if (!g || !g->capturing || cudaStreamIsCapturing(g->stream, &status) != cudaSuccess) return 0;
    if (status != cudaStreamCaptureStatusInvalidated) return 0;
    (void)cudaGetLastError();
    g->repeatable = 0;
    return 1;
}

/* Checks e, the result of a launch in the function named `what`. If e is an error, sets
   the context's error and returns 1. Returns 0 if the launch failed only because the
   capture was invalidated. */
static int stx__cuda_failed(stx_ctx *x, cudaError_t e, const char *what) {
    if (e == cudaSuccess || stx__capture_lost(stx__gpu(x))) return 0;
    stx_fail(x, STX_ERR_DEVICE,
             "%s: CUDA error \"%s\" (%s) on %s: all results of this step are invalid; destroy the "
             "context and resume from the last checkpoint",
             what, cudaGetErrorString(e), cudaGetErrorName(e), stx__gpu(x)->name);
    return 1;
}

/* Limits of the dynamic shared memory of a block, in bytes. PLAIN is available to every
   kernel. LEAST is available on every GPU since sm_80 to a kernel that requests it
   (sm_86 and sm_89 have the lowest limit). */
enum { STX__SHARED_PLAIN = 48 << 10, STX__SHARED_LEAST = 99 << 10 };

/* Allows the kernel to be launched with `bytes` bytes of dynamic shared memory, on the
   context's GPU. Returns 1, or sets an error and returns 0. */
static int stx__may_share(stx_ctx *x, const void *kernel, size_t bytes, const char *what) {
    cudaError_t e;
    (void)stx__use_gpu(x);
    if (bytes <= STX__SHARED_PLAIN) return 1;
    e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes);
    return !stx__cuda_failed(x, e, what);
}

/* STX__RUN_KERNEL(x, "stx_fill", kernel, grid, block, shared bytes, arguments...)
   launches the kernel on the context's stream and checks the launch. More than
   STX__SHARED_PLAIN bytes of dynamic shared memory are allowed first. */
#define STX__RUN_KERNEL(x, name, kernel, grid, block, smem, ...) \
  do { \
    if (stx_ok(x) && stx__may_share(x, (const void *)(kernel), smem, name)) { \
      STX__LAUNCH(kernel, grid, block, smem, stx__gpu(x)->stream, __VA_ARGS__); \
      stx__cuda_failed(x, cudaGetLastError(), name); \
    } \
  } while (0)

/* STX__CHOOSE(W, least, (1, 4), statement) executes the statement with a compile-time
   constant W: the first of the constants that is at least `least`, or the last one. The
   statement can be another STX__CHOOSE. The macro selects the instance of a kernel:
       STX__CHOOSE(W, four ? 4 : 1, (1, 4), STX__RUN_KERNEL(x, name, kernel<W>, ..)) */
template <int FIRST, int... REST, class F> static void stx__choose(int least, const F &run) {
    if constexpr (sizeof...(REST) > 0)
        if (least > FIRST) return stx__choose<REST...>(least, run);
    run(std::integral_constant<int, FIRST>());
}

#define STX__UNPACK(...) __VA_ARGS__
#define STX__CHOOSE(constant, least, constants, ...) \
  stx__choose<STX__UNPACK constants>((int)(least), [&](auto chosen_##constant) { \
      constexpr int constant = decltype(chosen_##constant)::value; \
      __VA_ARGS__; \
  })
