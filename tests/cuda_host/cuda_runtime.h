/* cuda_runtime.h - the part of CUDA that seqtx_cuda.cu uses, for a host C++17 compiler:
   kernels run on the CPU, one fiber per CUDA thread. Names, values and signatures are
   CUDA's. Uses that CUDA leaves undefined are detected (README.md). The bodies are in
   cuda_host.cpp.

   The .cu uses the following macros with both compilers. The second line of each entry
   is the expansion for nvcc.

     STX__GLOBAL(threads) kernel(..) {..}
         static __global__ void __launch_bounds__(threads) kernel(..) {..}
     stx__kernel_of<P...>
         void (*)(P...), which points to a kernel
     STX__LAUNCH(kernel, grid, block, smem, stream, ...)
         kernel<<<grid, block, smem, stream>>>(...)
     STX__SHARED(type, name, n)
         __shared__ __align__(16) type name[n]
     STX__DYNAMIC(name)
         extern __shared__ __align__(128) unsigned char name[]

   The wrappers of mma, ldmatrix and cp.async call the cuda_host_ functions below instead
   of PTX. */
#ifndef CUDA_HOST_RUNTIME_H
#define CUDA_HOST_RUNTIME_H
#define CUDA_HOST 1
#ifndef __cplusplus
  #error "the host implementation of CUDA is C++17: compile the .cu with -x c++ -std=c++17"
#endif
#include "cuda_host.h"
#include <math.h>
#include <string.h>
#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

// --------------------------------------------------------------------------------------
// qualifiers and vector types

#define __global__
#define __device__
#define __host__
#define __constant__
#define __forceinline__ inline /* always_inline would quadruple the compile time */
/* The standard headers use this name too, so they must be included before this line. */
#define __noinline__    __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(n)   __attribute__((aligned(n)))
#define CUDART_VERSION 13000
#define CUDART_CB

#define CUDA_HOST__VECTOR(T, name, align1, align2, align4) \
  struct name##1 { \
    T x; \
  }; \
  struct alignas(align2) name##2 { \
    T x, y; \
  }; \
  struct name##3 { \
    T x, y, z; \
  }; \
  struct alignas(align4) name##4 { \
    T x, y, z, w; \
  }; \
  inline name##1 make_##name##1(T x) { \
    name##1 v; \
    v.x = x; \
    return v; \
  } \
  inline name##2 make_##name##2(T x, T y) { \
    name##2 v; \
    v.x = x; \
    v.y = y; \
    return v; \
  } \
  inline name##3 make_##name##3(T x, T y, T z) { \
    name##3 v; \
    v.x = x; \
    v.y = y; \
    v.z = z; \
    return v; \
  } \
  inline name##4 make_##name##4(T x, T y, T z, T w) { \
    name##4 v; \
    v.x = x; \
    v.y = y; \
    v.z = z; \
    v.w = w; \
    return v; \
  }
CUDA_HOST__VECTOR(unsigned char, uchar, 1, 2, 4)
CUDA_HOST__VECTOR(short, short, 2, 4, 8)
CUDA_HOST__VECTOR(unsigned short, ushort, 2, 4, 8)
CUDA_HOST__VECTOR(int, int, 4, 8, 16)
CUDA_HOST__VECTOR(unsigned int, uint, 4, 8, 16)
CUDA_HOST__VECTOR(long long, longlong, 8, 16, 16)
CUDA_HOST__VECTOR(unsigned long long, ulonglong, 8, 16, 16)
CUDA_HOST__VECTOR(float, float, 4, 8, 16)
CUDA_HOST__VECTOR(double, double, 8, 16, 16)

struct dim3 {
    unsigned int x, y, z;

    constexpr dim3(unsigned int x_ = 1, unsigned int y_ = 1, unsigned int z_ = 1)
        : x(x_), y(y_), z(z_) {}

    constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
};

// --------------------------------------------------------------------------------------
// the running thread

struct cuda_host_thread {
    uint3 index;
    unsigned lane;
};

struct cuda_host_place {
    uint3 block;
    dim3 block_dim, grid_dim;
};

/* The running fiber, set at every switch, and its block. */
extern const cuda_host_thread *cuda_host_self;
extern const cuda_host_place *cuda_host_where;
#define threadIdx (cuda_host_self->index)
#define blockIdx  (cuda_host_where->block)
#define blockDim  (cuda_host_where->block_dim)
#define gridDim   (cuda_host_where->grid_dim)
constexpr int warpSize = 32;

// --------------------------------------------------------------------------------------
// shared memory

/* Returns the shared object of this call site in the running block. The first thread
   that calls it creates the object, fills it and surrounds it with canaries. */
void *cuda_host_shared(const void *site, size_t bytes, size_t align, const char *name);
void *cuda_host_dynamic(size_t align);
#define STX__SHARED(type, name, n) \
  static const char cuda_host_site_##name = 0; \
  type(&name)[n] = *(type(*)[n])cuda_host_shared(&cuda_host_site_##name, sizeof(type) * (n), \
                                                 alignof(type), #name)
#define STX__DYNAMIC(name) unsigned char *const name = (unsigned char *)cuda_host_dynamic(128)

// --------------------------------------------------------------------------------------
// barriers and warp collectives. The default argument is the line of the caller, which
// appears in reports and distinguishes call sites.

int cuda_host_barrier(int kind, int predicate, int line);
void cuda_host_syncwarp(unsigned mask, int line);
uint64_t cuda_host_shfl(int kind, unsigned mask, uint64_t bits, int param, int width, int line);
unsigned cuda_host_vote(int kind, unsigned mask, int value, int line);
unsigned cuda_host_activemask(void);
void cuda_host_trap_thread(const char *what, int line);

enum { CUDA_HOST_SYNC, CUDA_HOST_SYNC_OR, CUDA_HOST_SYNC_AND, CUDA_HOST_SYNC_COUNT };

enum {
    CUDA_HOST_SHFL,
    CUDA_HOST_SHFL_UP,
    CUDA_HOST_SHFL_DOWN,
    CUDA_HOST_SHFL_XOR,
    CUDA_HOST_BALLOT,
    CUDA_HOST_ANY,
    CUDA_HOST_ALL,
    CUDA_HOST_RADD,
    CUDA_HOST_RMIN,
    CUDA_HOST_RMAX,
    CUDA_HOST_RMIN_U,
    CUDA_HOST_RMAX_U,
    CUDA_HOST_ROR,
    CUDA_HOST_RAND,
    CUDA_HOST_RXOR
};

inline void __syncthreads(int line = __builtin_LINE()) {
    cuda_host_barrier(CUDA_HOST_SYNC, 0, line);
}

inline int __syncthreads_or(int p, int line = __builtin_LINE()) {
    return cuda_host_barrier(CUDA_HOST_SYNC_OR, p, line);
}

inline int __syncthreads_and(int p, int line = __builtin_LINE()) {
    return cuda_host_barrier(CUDA_HOST_SYNC_AND, p, line);
}

inline int __syncthreads_count(int p, int line = __builtin_LINE()) {
    return cuda_host_barrier(CUDA_HOST_SYNC_COUNT, p, line);
}

inline void __syncwarp(unsigned mask = 0xffffffffu, int line = __builtin_LINE()) {
    cuda_host_syncwarp(mask, line);
}

template <class T>
inline T cuda_host_shuffle(int kind, unsigned mask, T v, int param, int width, int line) {
    static_assert(std::is_trivially_copyable<T>::value && (sizeof(T) == 4 || sizeof(T) == 8),
                  "4 or 8 bytes, as in CUDA");
    uint64_t bits = 0;
    memcpy(&bits, &v, sizeof v);
    bits = cuda_host_shfl(kind, mask, bits, param, width, line);
    memcpy(&v, &bits, sizeof v);
    return v;
}

#define CUDA_HOST__SHUFFLE(T) \
  inline T __shfl_sync(unsigned mask, T v, int lane, int width = 32, \
                       int line = __builtin_LINE()) { \
    return cuda_host_shuffle(CUDA_HOST_SHFL, mask, v, lane, width, line); \
  } \
  inline T __shfl_up_sync(unsigned mask, T v, unsigned delta, int width = 32, \
                          int line = __builtin_LINE()) { \
    return cuda_host_shuffle(CUDA_HOST_SHFL_UP, mask, v, (int)delta, width, line); \
  } \
  inline T __shfl_down_sync(unsigned mask, T v, unsigned delta, int width = 32, \
                            int line = __builtin_LINE()) { \
    return cuda_host_shuffle(CUDA_HOST_SHFL_DOWN, mask, v, (int)delta, width, line); \
  } \
  inline T __shfl_xor_sync(unsigned mask, T v, int lanes, int width = 32, \
                           int line = __builtin_LINE()) { \
    return cuda_host_shuffle(CUDA_HOST_SHFL_XOR, mask, v, lanes, width, line); \
  }
CUDA_HOST__SHUFFLE(int)
CUDA_HOST__SHUFFLE(unsigned)
CUDA_HOST__SHUFFLE(long)
CUDA_HOST__SHUFFLE(unsigned long)
CUDA_HOST__SHUFFLE(long long)
CUDA_HOST__SHUFFLE(unsigned long long)
CUDA_HOST__SHUFFLE(float)
CUDA_HOST__SHUFFLE(double)

inline unsigned __ballot_sync(unsigned mask, int p, int line = __builtin_LINE()) {
    return cuda_host_vote(CUDA_HOST_BALLOT, mask, p, line);
}

inline int __any_sync(unsigned mask, int p, int line = __builtin_LINE()) {
    return (int)cuda_host_vote(CUDA_HOST_ANY, mask, p, line);
}

inline int __all_sync(unsigned mask, int p, int line = __builtin_LINE()) {
    return (int)cuda_host_vote(CUDA_HOST_ALL, mask, p, line);
}

#define CUDA_HOST__REDUCE(name, T, kind) \
  inline T name(unsigned mask, T v, int line = __builtin_LINE()) { \
    return (T)cuda_host_vote(kind, mask, (int)v, line); \
  }
CUDA_HOST__REDUCE(__reduce_add_sync, int, CUDA_HOST_RADD)
CUDA_HOST__REDUCE(__reduce_add_sync, unsigned, CUDA_HOST_RADD)
CUDA_HOST__REDUCE(__reduce_min_sync, int, CUDA_HOST_RMIN)
CUDA_HOST__REDUCE(__reduce_min_sync, unsigned, CUDA_HOST_RMIN_U)
CUDA_HOST__REDUCE(__reduce_max_sync, int, CUDA_HOST_RMAX)
CUDA_HOST__REDUCE(__reduce_max_sync, unsigned, CUDA_HOST_RMAX_U)
CUDA_HOST__REDUCE(__reduce_or_sync, unsigned, CUDA_HOST_ROR)
CUDA_HOST__REDUCE(__reduce_and_sync, unsigned, CUDA_HOST_RAND)
CUDA_HOST__REDUCE(__reduce_xor_sync, unsigned, CUDA_HOST_RXOR)

inline unsigned __activemask(void) {
    return cuda_host_activemask();
}

inline void __trap(int line = __builtin_LINE()) {
    cuda_host_trap_thread("__trap", line);
}

inline void __threadfence(void) {}

inline void __threadfence_block(void) {}

// --------------------------------------------------------------------------------------
// instructions that are PTX on the device. All lanes of the warp must call mma and
// ldmatrix.

/* mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32: c += A B, with fragments as in the
   PTX ISA */
void cuda_host_mma_bf16(float c[4], const uint32_t a[4], const uint32_t b[2],
                        int line = __builtin_LINE());
/* mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32: the low 13 bits of a and b are
   ignored */
void cuda_host_mma_tf32(float c[4], const uint32_t a[4], const uint32_t b[2],
                        int line = __builtin_LINE());

/* Computes n products (at most 8) in array order. The results equal those of n separate
   calls, but the lanes of the warp synchronise only once. */
struct cuda_host_product {
    float *c;
    const uint32_t *a, *b;
};

void cuda_host_mma_bf16(const cuda_host_product *p, int n, int line = __builtin_LINE());
void cuda_host_mma_tf32(const cuda_host_product *p, int n, int line = __builtin_LINE());
/* ldmatrix.sync.aligned.m8n8.x{count}{.trans}.shared.b16. Lanes 0-7 pass the rows of
   r[0], lanes 8-15 the rows of r[1], and so on. */
void cuda_host_ldmatrix(uint32_t *r, int count, int trans, const void *row,
                        int line = __builtin_LINE());
/* cp.async.ca.shared.global [smem], [gmem], size, src_bytes. The copy is performed at
   the wait. Until then smem holds the fill pattern. */
void cuda_host_cp_async(void *smem, const void *gmem, int size, int src_bytes,
                        int line = __builtin_LINE());

inline void cuda_host_cp_async(void *smem, const void *gmem, int size) {
    cuda_host_cp_async(smem, gmem, size, size);
}

void cuda_host_cp_commit(void); /* cp.async.commit_group */
/* cp.async.wait_group n: at most n groups remain pending. -1 is cp.async.wait_all. */
void cuda_host_cp_wait(int n);

// --------------------------------------------------------------------------------------
// arithmetic

inline float __uint_as_float(unsigned u) {
    float f;
    memcpy(&f, &u, 4);
    return f;
}

inline unsigned __float_as_uint(float f) {
    unsigned u;
    memcpy(&u, &f, 4);
    return u;
}

inline float __int_as_float(int u) {
    float f;
    memcpy(&f, &u, 4);
    return f;
}

inline int __float_as_int(float f) {
    int u;
    memcpy(&u, &f, 4);
    return u;
}

inline double __longlong_as_double(long long u) {
    double f;
    memcpy(&f, &u, 8);
    return f;
}

inline long long __double_as_longlong(double f) {
    long long u;
    memcpy(&u, &f, 8);
    return u;
}

inline unsigned short cuda_host_to_bf16(float f) {
    unsigned u = __float_as_uint(f);
    if ((u & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
    return (unsigned short)((u + 0x7fffu + (u >> 16 & 1u)) >> 16);
}

inline float cuda_host_from_bf16(unsigned short h) {
    return __uint_as_float((unsigned)h << 16);
}

inline float __expf(float x) {
    return expf(x);
}

inline float __exp10f(float x) {
    return powf(10.0f, x);
}

inline float __logf(float x) {
    return logf(x);
}

inline float __log2f(float x) {
    return log2f(x);
}

inline float __log10f(float x) {
    return log10f(x);
}

inline float __sinf(float x) {
    return sinf(x);
}

inline float __cosf(float x) {
    return cosf(x);
}

inline float __tanhf(float x) {
    return tanhf(x);
}

inline float __powf(float x, float y) {
    return powf(x, y);
}

inline float __fdividef(float x, float y) {
    return x / y;
}

inline float __fdiv_rn(float x, float y) {
    return x / y;
}

inline float __frcp_rn(float x) {
    return 1.0f / x;
}

inline float __fsqrt_rn(float x) {
    return sqrtf(x);
}

inline float __frsqrt_rn(float x) {
    return (float)(1.0 / sqrt((double)x));
}

inline float rsqrtf(float x) {
    return 1.0f / sqrtf(x);
}

inline double rsqrt(double x) {
    return 1.0 / sqrt(x);
}

inline float __fmaf_rn(float a, float b, float c) {
    return fmaf(a, b, c);
}

inline float __fadd_rn(float a, float b) {
    return a + b;
}

inline float __fsub_rn(float a, float b) {
    return a - b;
}

/* the product is never contracted into an fma */
inline float __fmul_rn(float a, float b) {
    volatile float p = a * b;
    return p;
}

inline double __fma_rn(double a, double b, double c) {
    return fma(a, b, c);
}

inline double __dadd_rn(double a, double b) {
    return a + b;
}

inline double __dmul_rn(double a, double b) {
    volatile double p = a * b;
    return p;
}

inline float __saturatef(float x) {
    if (!(x > 0)) return 0.0f;
    return x < 1 ? x : 1.0f;
}

/* As on the device, values out of range saturate, and NaN becomes 0. A plain C cast
   would be undefined. */
inline int cuda_host_to_int(float x) {
    if (x != x) return 0;
    if (x >= 2147483648.0f) return 2147483647;
    return x < -2147483648.0f ? -2147483647 - 1 : (int)x;
}

inline int __float2int_rn(float x) {
    return cuda_host_to_int(nearbyintf(x));
}

inline int __float2int_rz(float x) {
    return cuda_host_to_int(truncf(x));
}

inline int __float2int_rd(float x) {
    return cuda_host_to_int(floorf(x));
}

inline int __float2int_ru(float x) {
    return cuda_host_to_int(ceilf(x));
}

inline unsigned __float2uint_rn(float x) {
    x = nearbyintf(x);
    if (!(x > 0)) return 0u;
    return x >= 4294967296.0f ? 4294967295u : (unsigned)x;
}

inline float __int2float_rn(int x) {
    return (float)x;
}

inline float __uint2float_rn(unsigned x) {
    return (float)x;
}

inline float __ull2float_rn(unsigned long long x) {
    return (float)x;
}

inline float __double2float_rn(double x) {
    return (float)x;
}

inline unsigned __umulhi(unsigned a, unsigned b) {
    return (unsigned)((uint64_t)a * b >> 32);
}

inline int __mulhi(int a, int b) {
    return (int)((int64_t)a * b >> 32);
}

inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    uint64_t al = a & 0xffffffffu, ah = a >> 32, bl = b & 0xffffffffu, bh = b >> 32,
             mid = al * bh + (al * bl >> 32);
    return ah * bh + (mid >> 32) + ((ah * bl + (mid & 0xffffffffu)) >> 32);
}

inline int __popc(unsigned x) {
    return __builtin_popcount(x);
}

inline int __popcll(unsigned long long x) {
    return __builtin_popcountll(x);
}

inline int __ffs(int x) {
    return __builtin_ffs(x);
}

inline int __ffsll(long long x) {
    return __builtin_ffsll(x);
}

inline int __clz(int x) {
    return x ? __builtin_clz((unsigned)x) : 32;
}

inline int __clzll(long long x) {
    return x ? __builtin_clzll((unsigned long long)x) : 64;
}

inline unsigned __brev(unsigned x) {
    unsigned r = 0;
    for (int i = 0; i < 32; i++) r |= (x >> i & 1u) << (31 - i);
    return r;
}

template <class T> inline T __ldg(const T *p) {
    return *p;
}

template <class T> inline T __ldcs(const T *p) {
    return *p;
}

template <class T> inline T __ldcg(const T *p) {
    return *p;
}

template <class T> inline void __stcs(T *p, T v) {
    *p = v;
}

template <class T> inline void __stcg(T *p, T v) {
    *p = v;
}

#define CUDA_HOST__MINMAX(T) \
  inline T min(T a, T b) { \
    return b < a ? b : a; \
  } \
  inline T max(T a, T b) { \
    return a < b ? b : a; \
  }
CUDA_HOST__MINMAX(int)
CUDA_HOST__MINMAX(unsigned)
CUDA_HOST__MINMAX(long)
CUDA_HOST__MINMAX(unsigned long)
CUDA_HOST__MINMAX(long long)
CUDA_HOST__MINMAX(unsigned long long)

inline float min(float a, float b) {
    return fminf(a, b);
}

inline float max(float a, float b) {
    return fmaxf(a, b);
}

inline double min(double a, double b) {
    return fmin(a, b);
}

inline double max(double a, double b) {
    return fmax(a, b);
}

/* Integers only. Float atomics are deliberately missing, because their order would make
   results vary between runs. A fiber is never interrupted, so a plain read and write is
   atomic here. */
#define CUDA_HOST__ATOMIC(T) \
  inline T atomicAdd(T *p, T v) { \
    T old = *p; \
    *p = (T)(old + v); \
    return old; \
  } \
  inline T atomicMax(T *p, T v) { \
    T old = *p; \
    if (old < v) *p = v; \
    return old; \
  } \
  inline T atomicMin(T *p, T v) { \
    T old = *p; \
    if (v < old) *p = v; \
    return old; \
  } \
  inline T atomicOr(T *p, T v) { \
    T old = *p; \
    *p = (T)(old | v); \
    return old; \
  } \
  inline T atomicAnd(T *p, T v) { \
    T old = *p; \
    *p = (T)(old & v); \
    return old; \
  } \
  inline T atomicExch(T *p, T v) { \
    T old = *p; \
    *p = v; \
    return old; \
  } \
  inline T atomicCAS(T *p, T compare, T v) { \
    T old = *p; \
    if (old == compare) *p = v; \
    return old; \
  }
CUDA_HOST__ATOMIC(int)
CUDA_HOST__ATOMIC(unsigned)
CUDA_HOST__ATOMIC(unsigned long long)

// --------------------------------------------------------------------------------------
// runtime API

#define CUDA_HOST__ERRORS(X) \
  X(cudaSuccess, 0, "no error") \
  X(cudaErrorInvalidValue, 1, "invalid argument") \
  X(cudaErrorMemoryAllocation, 2, "out of memory") \
  X(cudaErrorInitializationError, 3, "initialization error") \
  X(cudaErrorInvalidConfiguration, 9, "invalid configuration argument") \
  X(cudaErrorInvalidPitchValue, 12, "invalid pitch argument") \
  X(cudaErrorInvalidHostPointer, 16, "invalid host pointer") \
  X(cudaErrorInvalidDevicePointer, 17, "invalid device pointer") \
  X(cudaErrorInvalidMemcpyDirection, 21, "invalid copy direction for memcpy") \
  X(cudaErrorInsufficientDriver, 35, \
    "CUDA driver version is insufficient for CUDA runtime version") \
  X(cudaErrorInvalidDeviceFunction, 98, "invalid device function") \
  X(cudaErrorNoDevice, 100, "no CUDA-capable device is detected") \
  X(cudaErrorInvalidDevice, 101, "invalid device ordinal") \
  X(cudaErrorNoKernelImageForDevice, 209, \
    "no kernel image is available for execution on the device") \
  X(cudaErrorInvalidResourceHandle, 400, "invalid resource handle") \
  X(cudaErrorIllegalState, 401, "the operation cannot be performed in the present state") \
  X(cudaErrorNotReady, 600, "device not ready") \
  X(cudaErrorIllegalAddress, 700, "an illegal memory access was encountered") \
  X(cudaErrorLaunchOutOfResources, 701, "too many resources requested for launch") \
  X(cudaErrorLaunchTimeout, 702, "the launch timed out and was terminated") \
  X(cudaErrorAssert, 710, "device-side assert triggered") \
  X(cudaErrorMisalignedAddress, 716, "misaligned address") \
  X(cudaErrorLaunchFailure, 719, "unspecified launch failure") \
  X(cudaErrorNotPermitted, 800, "operation not permitted") \
  X(cudaErrorNotSupported, 801, "operation not supported") \
  X(cudaErrorStreamCaptureUnsupported, 900, "operation not permitted when stream is capturing") \
  X(cudaErrorStreamCaptureInvalidated, 901, \
    "operation failed due to a previous error during capture") \
  X(cudaErrorStreamCaptureMerge, 902, \
    "operation would result in a merge of separate capture sequences") \
  X(cudaErrorStreamCaptureUnmatched, 903, "capture was not ended in the same stream as it began") \
  X(cudaErrorStreamCaptureUnjoined, 904, "capturing stream has unjoined work") \
  X(cudaErrorStreamCaptureIsolation, 905, \
    "dependency created on uncaptured work in another stream") \
  X(cudaErrorStreamCaptureImplicit, 906, \
    "operation would make the legacy stream depend on a capturing blocking stream") \
  X(cudaErrorCapturedEvent, 907, \
    "operation not permitted on an event last recorded in a capturing stream") \
  X(cudaErrorStreamCaptureWrongThread, 908, \
    "attempt to terminate a thread-local capture sequence from another thread") \
  X(cudaErrorUnknown, 999, "unknown error")
#define CUDA_HOST__ENUM(name, value, text) name = value,

enum cudaError { CUDA_HOST__ERRORS(CUDA_HOST__ENUM) cudaErrorApiFailureBase = 10000 };

typedef enum cudaError cudaError_t;

enum cudaMemcpyKind {
    cudaMemcpyHostToHost,
    cudaMemcpyHostToDevice,
    cudaMemcpyDeviceToHost,
    cudaMemcpyDeviceToDevice,
    cudaMemcpyDefault
};

enum cudaStreamCaptureMode {
    cudaStreamCaptureModeGlobal,
    cudaStreamCaptureModeThreadLocal,
    cudaStreamCaptureModeRelaxed
};

enum cudaStreamCaptureStatus {
    cudaStreamCaptureStatusNone,
    cudaStreamCaptureStatusActive,
    cudaStreamCaptureStatusInvalidated
};

enum cudaFuncAttribute {
    cudaFuncAttributeMaxDynamicSharedMemorySize = 8,
    cudaFuncAttributePreferredSharedMemoryCarveout = 9
};

enum cudaFuncCache {
    cudaFuncCachePreferNone,
    cudaFuncCachePreferShared,
    cudaFuncCachePreferL1,
    cudaFuncCachePreferEqual
};

enum cudaDeviceAttr {
    cudaDevAttrMaxThreadsPerBlock = 1,
    cudaDevAttrMaxBlockDimX = 2,
    cudaDevAttrMaxBlockDimY = 3,
    cudaDevAttrMaxBlockDimZ = 4,
    cudaDevAttrMaxGridDimX = 5,
    cudaDevAttrMaxGridDimY = 6,
    cudaDevAttrMaxGridDimZ = 7,
    cudaDevAttrMaxSharedMemoryPerBlock = 8,
    cudaDevAttrTotalConstantMemory = 9,
    cudaDevAttrWarpSize = 10,
    cudaDevAttrMaxRegistersPerBlock = 12,
    cudaDevAttrClockRate = 13,
    cudaDevAttrMultiProcessorCount = 16,
    cudaDevAttrIntegrated = 18,
    cudaDevAttrConcurrentKernels = 31,
    cudaDevAttrMemoryClockRate = 36,
    cudaDevAttrGlobalMemoryBusWidth = 37,
    cudaDevAttrL2CacheSize = 38,
    cudaDevAttrMaxThreadsPerMultiProcessor = 39,
    cudaDevAttrAsyncEngineCount = 40,
    cudaDevAttrUnifiedAddressing = 41,
    cudaDevAttrComputeCapabilityMajor = 75,
    cudaDevAttrComputeCapabilityMinor = 76,
    cudaDevAttrMaxSharedMemoryPerMultiprocessor = 81,
    cudaDevAttrMaxRegistersPerMultiprocessor = 82,
    cudaDevAttrCooperativeLaunch = 95,
    cudaDevAttrMaxSharedMemoryPerBlockOptin = 97,
    cudaDevAttrMaxBlocksPerMultiprocessor = 106,
    cudaDevAttrReservedSharedMemoryPerBlock = 111,
    cudaDevAttrMemoryPoolsSupported = 115
};

#define cudaStreamDefault                        0x00
#define cudaStreamNonBlocking                    0x01
#define cudaStreamLegacy                         ((cudaStream_t)0x1)
#define cudaStreamPerThread                      ((cudaStream_t)0x2)
#define cudaEventDefault                         0x00
#define cudaEventBlockingSync                    0x01
#define cudaEventDisableTiming                   0x02
#define cudaEventInterprocess                    0x04
#define cudaEventRecordDefault                   0x00
#define cudaEventWaitDefault                     0x00
#define cudaHostAllocDefault                     0x00
#define cudaHostAllocPortable                    0x01
#define cudaHostAllocMapped                      0x02
#define cudaHostAllocWriteCombined               0x04
#define cudaGraphInstantiateFlagAutoFreeOnLaunch 1

typedef struct CUstream_st *cudaStream_t;
typedef struct CUevent_st *cudaEvent_t;
typedef struct CUgraph_st *cudaGraph_t;
typedef struct CUgraphExec_st *cudaGraphExec_t;
typedef struct CUgraphNode_st *cudaGraphNode_t;
typedef void(CUDART_CB *cudaHostFn_t)(void *userData);

/* The fields that the library uses. The real struct has more fields, in another order. */
struct cudaDeviceProp {
    char name[256];
    size_t totalGlobalMem, sharedMemPerBlock, sharedMemPerBlockOptin, sharedMemPerMultiprocessor,
        reservedSharedMemPerBlock, totalConstMem;
    int regsPerBlock, regsPerMultiprocessor, warpSize, maxThreadsPerBlock,
        maxThreadsPerMultiProcessor, maxThreadsDim[3], maxGridSize[3];
    int major, minor, multiProcessorCount, l2CacheSize, memoryBusWidth, integrated,
        concurrentKernels, asyncEngineCount, unifiedAddressing;
    int ECCEnabled, maxBlocksPerMultiProcessor, cooperativeLaunch, managedMemory, canMapHostMemory;
};

struct cudaFuncAttributes {
    size_t sharedSizeBytes, constSizeBytes, localSizeBytes;
    int maxThreadsPerBlock, numRegs, ptxVersion, binaryVersion, cacheModeCA,
        maxDynamicSharedSizeBytes, preferredShmemCarveout;
};

extern "C" {
cudaError_t cudaGetDeviceCount(int *count);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaGetDevice(int *device);
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *prop, int device);
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attr, int device);
cudaError_t cudaDeviceSynchronize(void);
cudaError_t cudaRuntimeGetVersion(int *version);
cudaError_t cudaDriverGetVersion(int *version);
cudaError_t cudaGetLastError(void);
cudaError_t cudaPeekAtLastError(void);
const char *cudaGetErrorString(cudaError_t error);
const char *cudaGetErrorName(cudaError_t error);
cudaError_t cudaMalloc(void **devPtr, size_t size);
cudaError_t cudaFree(void *devPtr);
cudaError_t cudaMallocHost(void **ptr, size_t size);
cudaError_t cudaHostAlloc(void **pHost, size_t size, unsigned int flags);
cudaError_t cudaFreeHost(void *ptr);
cudaError_t cudaMemGetInfo(size_t *free, size_t *total);
cudaError_t cudaMemcpy(void *dst, const void *src, size_t count, enum cudaMemcpyKind kind);
cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t count, enum cudaMemcpyKind kind,
                            cudaStream_t stream = 0);
cudaError_t cudaMemcpy2D(void *dst, size_t dpitch, const void *src, size_t spitch, size_t width,
                         size_t height, enum cudaMemcpyKind kind);
cudaError_t cudaMemcpy2DAsync(void *dst, size_t dpitch, const void *src, size_t spitch,
                              size_t width, size_t height, enum cudaMemcpyKind kind,
                              cudaStream_t stream = 0);
cudaError_t cudaMemset(void *devPtr, int value, size_t count);
cudaError_t cudaMemsetAsync(void *devPtr, int value, size_t count, cudaStream_t stream = 0);
cudaError_t cudaMemset2DAsync(void *devPtr, size_t pitch, int value, size_t width, size_t height,
                              cudaStream_t stream = 0);
cudaError_t cudaStreamCreate(cudaStream_t *pStream);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *pStream, unsigned int flags);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamQuery(cudaStream_t stream);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int flags = 0);
cudaError_t cudaEventCreate(cudaEvent_t *event);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned int flags);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream = 0);
cudaError_t cudaEventSynchronize(cudaEvent_t event);
cudaError_t cudaEventQuery(cudaEvent_t event);
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t start, cudaEvent_t end);
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t fn, void *userData);
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode);
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *pGraph);
cudaError_t cudaStreamIsCapturing(cudaStream_t stream,
                                  enum cudaStreamCaptureStatus *pCaptureStatus);
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode);
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *pGraphExec, cudaGraph_t graph,
                                 unsigned long long flags = 0);
cudaError_t cudaGraphLaunch(cudaGraphExec_t graphExec, cudaStream_t stream);
cudaError_t cudaGraphUpload(cudaGraphExec_t graphExec, cudaStream_t stream);
cudaError_t cudaGraphDestroy(cudaGraph_t graph);
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graphExec);
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *numNodes);
}

cudaError_t cuda_host_func_set(const void *func, enum cudaFuncAttribute attr, int value);
cudaError_t cuda_host_func_get(struct cudaFuncAttributes *attr, const void *func);
cudaError_t cuda_host_occupancy(int *blocks, int threads, size_t smem);

template <class T> inline cudaError_t cudaMalloc(T **p, size_t size) {
    return cudaMalloc((void **)(void *)p, size);
}

template <class T> inline cudaError_t cudaMallocHost(T **p, size_t size) {
    return cudaMallocHost((void **)(void *)p, size);
}

template <class T> inline cudaError_t cudaHostAlloc(T **p, size_t size, unsigned flags) {
    return cudaHostAlloc((void **)(void *)p, size, flags);
}

inline cudaError_t cudaEventCreate(cudaEvent_t *event, unsigned int flags) {
    return cudaEventCreateWithFlags(event, flags);
}

template <class T>
inline cudaError_t cudaFuncSetAttribute(T *func, enum cudaFuncAttribute attr, int value) {
    return cuda_host_func_set((const void *)func, attr, value);
}

template <class T> inline cudaError_t cudaFuncSetCacheConfig(T *, enum cudaFuncCache) {
    return cudaSuccess;
}

template <class T>
inline cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attr, T *func) {
    return cuda_host_func_get(attr, (const void *)func);
}

template <class T>
inline cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, T, int threads,
                                                                 size_t smem) {
    return cuda_host_occupancy(blocks, threads, smem);
}

// --------------------------------------------------------------------------------------
// launch

/* The launch bound of a kernel is encoded in its return type, where each launch finds
   it. Four void types with different qualifiers stand for the bounds 32, 128, 256 and,
   for plain void, 1024. Other bounds are rounded up. Types other than void would
   require return statements. */
template <int THREADS> struct cuda_host_returns {
    static_assert(THREADS >= 1 && THREADS <= 1024, "a block has 1 to 1024 threads");
    typedef std::conditional_t<THREADS <= 128,
                               std::conditional_t<THREADS <= 32, const void, volatile void>,
                               std::conditional_t<THREADS <= 256, const volatile void, void>>
        type;
};

template <class R> inline unsigned cuda_host_bound_of(void) {
    static_assert(std::is_void<R>::value, "a kernel returns nothing");
    if (std::is_const<R>::value) return std::is_volatile<R>::value ? 256 : 32;
    return std::is_volatile<R>::value ? 128 : 1024;
}

#define CUDA_HOST__FIRST(first, ...) (first)
#define STX__GLOBAL(...) \
  static typename cuda_host_returns<CUDA_HOST__FIRST(__VA_ARGS__, 0)>::type
#pragma GCC diagnostic ignored "-Wignored-qualifiers"

/* A pointer to a kernel, with its launch bound. */
template <class... P> struct stx__kernel_of {
    void (*kernel)(void); /* type-erased; `run` casts it back */
    void (*run)(void (*kernel)(void), const std::decay_t<P> &...);
    unsigned bound;

    stx__kernel_of(std::nullptr_t = nullptr) : kernel(nullptr), run(nullptr), bound(0) {}

    template <class R>
    stx__kernel_of(R (*k)(P...))
        : kernel(reinterpret_cast<void (*)(void)>(k)), run(run_as<R>),
          bound(cuda_host_bound_of<R>()) {}

    template <class R> static void run_as(void (*k)(void), const std::decay_t<P> &...a) {
        reinterpret_cast<R (*)(P...)>(k)(a...);
    }

    explicit operator const void *() const {
        return reinterpret_cast<const void *>(kernel);
    }

    explicit operator bool() const {
        return kernel != nullptr;
    }
};

/* A launch: a kernel with copies of its arguments. */
struct cuda_host_kernel {
    const char *text; /* "kernel, grid, ..": the arguments of STX__LAUNCH, as text */
    const void *function;
    unsigned bound; /* largest number of threads per block */
    dim3 grid, block;
    size_t smem;

    cuda_host_kernel(const char *t, const void *f, unsigned most, dim3 g, dim3 b, size_t s)
        : text(t), function(f), bound(most), grid(g), block(b), smem(s) {}

    virtual ~cuda_host_kernel() {}

    virtual void call() const = 0;               /* runs one thread */
    virtual cuda_host_kernel *clone() const = 0; /* copies the launch into a graph */
    /* Stores a pointer to each argument and its size, at most 64, and returns how many
       there are. */
    virtual size_t arguments(const void **p, size_t *bytes) const = 0;
};

/* Runs kernels in place of the host's code: see tests/ptx_host. */
struct cuda_host_executor {
    /* Runs a launch. Returns 0 if the host's code must run it. The orders are those of
       cuda_host_order. */
    int (*run)(const cuda_host_kernel &k, int block_order, uint64_t seed);
    void (*allocated)(void *p, size_t bytes); /* device and page-locked memory */
    void (*freed)(void *p);
    /* a copy, a memset, a matmul or an exchange has written device memory */
    void (*written)(const void *p, size_t bytes);
};

/* Must be called before the first allocation. The executor is not copied. */
void cuda_host_execute_by(const cuda_host_executor *e);
/* For the executor: counts and prints a violation, as the host's own checks do. */
void cuda_host_report(const char *text);
/* For the executor: adds to the number of mma instructions. */
void cuda_host_add_mmas(long n);

void cuda_host_submit(const cuda_host_kernel &k, cudaStream_t stream);
/* Reports an argument that points to host memory. exact is 1 for a pointer, and 0 for
   the words of a struct passed by value. */
void cuda_host_check_argument(const char *text, int number, const void *data, size_t bytes,
                              int exact);

template <class... P> struct cuda_host_bound : cuda_host_kernel {
    stx__kernel_of<P...> kernel;
    std::tuple<std::decay_t<P>...> args;

    template <class... A>
    cuda_host_bound(const char *t, stx__kernel_of<P...> k, dim3 g, dim3 b, size_t s, A &&...a)
        : cuda_host_kernel(t, (const void *)k, k.bound, g, b, s), kernel(k),
          args(std::forward<A>(a)...) {}

    void call() const override {
        std::apply([this](const auto &...v) { kernel.run(kernel.kernel, v...); }, args);
    }

    cuda_host_kernel *clone() const override {
        return new cuda_host_bound(*this);
    }

    size_t arguments(const void **p, size_t *bytes) const override {
        static_assert(sizeof...(P) <= 64, "too many arguments");
        size_t n = 0;
        std::apply(
            [&](const auto &...v) { ((p[n] = &v, bytes[n] = sizeof v, n++), ...); }, args);
        return n;
    }
};

/* NULL and 0 arrive here as integers and are converted explicitly, because C++ converts
   only literals to pointers. */
template <class P, class A> inline P cuda_host_convert(A &&a) {
    if constexpr (std::is_pointer<P>::value && std::is_integral<std::decay_t<A>>::value)
        return (P)(uintptr_t)a;
    else
        return static_cast<P>(std::forward<A>(a));
}

template <class T> inline void cuda_host_check_one(const char *text, int number, const T &v) {
    if constexpr (std::is_pointer<T>::value)
        cuda_host_check_argument(text, number, &v, sizeof v, 1);
    else if constexpr (std::is_class<T>::value && sizeof(T) >= 8)
        cuda_host_check_argument(text, number, &v, sizeof v, 0);
    else {
        (void)text;
        (void)number;
        (void)v;
    }
}

template <class... P, class... A>
inline void cuda_host_launch(const char *text, stx__kernel_of<P...> kernel, dim3 grid, dim3 block,
                             size_t smem, cudaStream_t stream, A &&...a) {
    static_assert(sizeof...(P) == sizeof...(A), "wrong number of arguments for the kernel");
    cuda_host_bound<P...> k(text, kernel, grid, block, smem,
                            cuda_host_convert<std::decay_t<P>>(std::forward<A>(a))...);
    std::apply(
        [text](const auto &...v) {
            int number = 0;
            (void)number;
            (void)text;
            (cuda_host_check_one(text, ++number, v), ...);
        },
        k.args);
    cuda_host_submit(k, stream);
}

template <class R, class... P, class... A>
inline void cuda_host_launch(const char *text, R (*kernel)(P...), dim3 grid, dim3 block,
                             size_t smem, cudaStream_t stream, A &&...a) {
    cuda_host_launch(text, stx__kernel_of<P...>(kernel), grid, block, smem, stream,
                     std::forward<A>(a)...);
}

#define STX__LAUNCH(...) cuda_host_launch(#__VA_ARGS__, __VA_ARGS__)
#endif
