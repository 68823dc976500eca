/* seqtx_cuda.cu - v0.2 - CUDA kernels of seqtx, and its device layer
   Generated from src/cuda/seqtx_cuda.cu and its parts. Edit those, then run make single.
   no warranty implied; MIT or public domain, your choice (see the end of seqtx.h)

   Compile this file with nvcc. Define SEQTX_CUDA when you compile the program:

       nvcc -O3 -arch=sm_90 -c seqtx_cuda.cu
       cc -DSEQTX_CUDA .. program.c .. seqtx_cuda.o -lcublasLt -lcudart -lstdc++ -lm

   Needs seqtx.h in the same directory, CUDA 12 or newer, and sm_80 or newer. For groups
   of GPUs, add -DSEQTX_NCCL to both commands and -lnccl (NCCL 2.14 or newer). There is no
   double precision: SEQTX_DOUBLE is for the CPU.

   Contents. A function `stem_cuda` is the CUDA twin of the kernel `stem` in seqtx.h. It
   takes the same arguments, with device pointers, enqueues its work on the context's
   stream and returns without waiting. `grep stx_mse_bwd seqtx*` finds the declaration,
   the CPU body and the CUDA body. The kernels of a model family are compiled if its
   header is in this directory and are omitted otherwise.

   Arrangement. Sections have the same names as in seqtx.h, and nearly the same order, so
   `grep '>>softmax' seqtx*` finds an op, its CPU kernels and its CUDA kernels. Sections
   that only a GPU needs come before and after these.

       section                       contents
       ----------------------------  ----------------------------------------------------
       >>common                      device arrays, warp sums, PTX, the device, launches
       >>waiting                     runtime errors, waits, scratch memory
       >>shares, sums, fill, ..      row and column sums, deferred sums, copies
       >>gemm                        cublasLt and its plans, split K
       >>add, .. >>rezero            elementwise kernels
       >>softmax                     one warp or one block per row
       >>layernorm                   rows in registers, two-stage column sums
       >>embedding                   tokens sorted by id: sums without atomics
       >>linear                      epilogues
       >>mean, >>cross_entropy,      losses; tokens sorted by cluster
       >>mse
       >>attention: ..               the fused attention, see docs/cuda.md, and its oracle
       >>adaptive input and output   cluster log probabilities
       >>report                      metrics
       >>optimisers                  norms, clipping and updates, all on the device
       >>group: streams              parts of >>group that the device layer needs
       >>device, >>graph             memory, transfers, reports; captured steps
       >>group                       exchanges between ranks, with NCCL
       >>recurrence                  seqtx_sru.h
       >>groups .. >>gates           seqtx_compressive.h
       >>gate .. >>latency           seqtx_par.h

   Reading order: >>common, >>add, >>layernorm (rows in registers, two-stage sums),
   >>embedding (ordered sums of repeated rows), >>gemm, >>attention, then the rest.

   Letters. A section that uses other letters declares them.
       N  rows of a matrix       C  columns of a row        V  vocabulary
       B  streams                H  heads                   D  head dimension
       As template parameters: W elements per memory access (4 or 1), Q groups of 4
          elements per lane, T threads per row (32, 256 or 1024)
       M, N, K in >>gemm: C (M,N) = op(A) (M,K) op(B) (K,N)
       O  outputs of a linear layer, Ci its inputs (I if the layer has only one input)
   n is a number of elements; ldx is the distance between rows of x in elements. In a
   launcher, the capital letter of an argument (Y for y) is the stx__array that is passed
   to the kernel.

   How a kernel is written

       // y (n) = s a (n). A thread computes W adjacent elements at a time.
       template <int W>
       STX__GLOBAL(256)
       stx__example_kernel(stx__array y, stx__array a, size_t n, float s) {
           STX__STEP(i, n, W) {
               float v[W];
               stx__getn<W>(v, a, i);
               for (int e = 0; e < W; e++) v[e] *= s;
               stx__putn<W>(y, i, v);
           }
       }

       void stx_example_cuda(stx_ctx *x, stx_real *y, const stx_real *a, size_t n,
                             stx_real s) {
           stx__array Y = stx__array_of(x, y), A = stx__array_of(x, a);
           const int four = n % 4 == 0 && stx__aligned4(Y) && stx__aligned4(A);
           if (n) STX__RUN_BY(x, "stx_example", four, stx__example_kernel, n, Y, A, n, s);
       }

   STX__GLOBAL(threads) begins a kernel and states the largest block that it may be
   launched with. STX__RUN_KERNEL, or a macro that uses it, launches the kernel and checks
   the launch. STX__SHARED declares an array in shared memory. tests/cuda_host defines
   these names for the host compiler, runs every kernel on the CPU and compares it with
   the CPU kernel.

   Memory kinds. The element type of an array follows from its address: stx_cuda_alloc
   takes a memory kind, and stx__array_of looks up the allocation that contains the
   pointer.

       kind                   STX_PREC_F32    STX_PREC_BF16
       ---------------------  --------------  ----------------------------------------
       STX_MEM_ACTIVATIONS    float           bfloat16
       STX_MEM_PARAMS         float           float, plus a bfloat16 copy, the twin
       STX_MEM_BYTES          float or bytes  float or bytes

   Kernels that write a parameter also write its twin (stx__put does both); GEMMs and the
   attention read the twin. Thus the same kernel works in all precisions, and a call can
   mix bfloat16 activations with float statistics. Kernels that need many loads in flight
   have instances for one storage type (stx__access).

   Deferred sums. The gradients of biases, gains and weights are sums over thousands of
   rows. They are computed in two stages: one kernel computes a partial sum for each chunk
   of rows, and a second kernel adds the partial sums in a fixed order. During
   stx_backward the second stage is deferred (stx_cuda_defer_sums), and one launch
   finishes up to 24 sums. It runs when the table or the buffer is full, before gradients
   are sent to other ranks, and at the end of the backward pass. See >>shares, sums.

   Capture. A step can be captured as a CUDA graph and replayed (stx_step_run). A
   captured step must not allocate, wait, or transfer data between host and device: such
   a step is marked as not repeatable and its graph is discarded. Values that change
   between replays are read from device memory: tokens, learning rate, scalars, and
   g->shift, which is added to the stream number of every Philox call. Steps run once
   before they are captured, so scratch memory, GEMM plans and kernel modules exist by
   then.

   Rules for all kernels
   - No atomics. Every sum has a fixed order, which depends on sizes alone, so a run
     repeats bit-exactly on the same GPU.
   - A step never waits, and allocates memory only when it first runs.
   - Sums are computed in float or double, regardless of the storage type.
   - A grid may have fewer threads than there are elements, because kernels loop over
     their elements. Results do not depend on the grid size. */


/* ---- src/cuda/common.cuh ---- */
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


/* ---- src/cuda/wait.cuh ---- */
// >>waiting

/* Returns 1 if e is not an error. Otherwise sets the context's error and returns 0. An
   error inside a running kernel is reported by the next call that waits. */
static int stx__cuda_ok(stx_ctx *x, stx_gpu *g, cudaError_t e, const char *what) {
    const int named = g && g->name[0];
    if (e == cudaSuccess || stx__capture_lost(g)) return 1;
    (void)cudaGetLastError(); /* clears the error, so that the next launch does not report it */
    stx_fail(x, e == cudaErrorMemoryAllocation ? STX_ERR_MEMORY : STX_ERR_DEVICE,
             "%s: CUDA error \"%s\" (%s)%s%s", what, cudaGetErrorString(e), cudaGetErrorName(e),
             named ? " on " : "", named ? g->name : "");
    return 0;
}

struct stx_graph {
    cudaGraphExec_t exec;   /* NULL once the group in which it was captured has ended */
    stx_graph *next;
};

#ifdef SEQTX_NCCL
  #if NCCL_VERSION_CODE < NCCL_VERSION(2, 14, 0)
    #error "SEQTX_NCCL requires NCCL 2.14 or newer (ncclCommInitRankConfig, ncclCommFinalize)"
  #endif

/* A group of ranks, see >>group: one process and one GPU per rank. The struct is
   declared here because every wait depends on it: if another rank has exited, work that
   needs data from that rank never finishes. */
typedef struct stx__group {
    ncclComm_t comm;        /* NULL before the rank has joined and after the group has ended */
    int rank, ranks;
    double timeout;         /* seconds that this rank waits for the others */
    cudaStream_t stream;    /* runs gradient exchanges */
    cudaEvent_t ready, done;
    int forked;             /* nonzero if the context's stream does not yet wait for all
                               enqueued exchanges */
    int given_up;           /* 1: comm must be aborted when the current capture ends */
    int captured;           /* 1: a capture with exchanges has succeeded */
    char no_capture[112];   /* why NCCL exchanges cannot be captured; "" while no capture
                               has failed */
    ncclUniqueId spare;     /* id for a second communicator, in case this one fails in
                               the first capture */
    char *pinned, *device;  /* buffers of STX__GROUP_BYTES each, for exchanges of host memory */
} stx__group;

enum { STX__GROUP_BYTES = 1 << 20 };

/* Destroys all graphs, because NCCL cannot end a communicator while a graph contains its
   kernels. A graph that is running finishes first. */
static void stx__graphs_end(stx_gpu *g) {
    for (stx_graph *r = g->graphs; r; r = r->next) {
        if (r->exec) (void)cudaGraphExecDestroy(r->exec);
        r->exec = NULL;
    }
}

/* Ends this rank's group. During a capture, stx__group_after_capture does this later,
   because the graph being captured also contains kernels of `comm`. */
static void stx__group_give_up(stx_gpu *g) {
    stx__group *c = g->group;
    if (!c || !c->comm) return;
    if (g->capturing) {
        c->given_up = 1;
        return;
    }
    stx__graphs_end(g);
    (void)ncclCommAbort(c->comm);
    c->comm = NULL;
}

static int stx__group_is_alive(const stx_gpu *g) {
    return g->group && g->group->comm && !g->group->given_up;
}

/* Returns a hint about the probable cause of an NCCL error, or "" if there is none. */
static const char *stx__nccl_advice(ncclResult_t r) {
    if (r == ncclInvalidUsage)
        return ": each rank requires a separate GPU: set desc.gpu = stx_get_launch_info().local";
    if (r == ncclRemoteError || r == ncclSystemError)
        return ": another rank may have exited; set NCCL_DEBUG=WARN to print details";
    return "";
}

/* Sets the context's error after an NCCL error, and ends the group. During a capture,
   the error may only mean that NCCL calls cannot be captured. In that case no error is
   set, and the step is launched without a graph. Returns 0. */
static int stx__nccl_failed(stx_ctx *x, stx_gpu *g, ncclResult_t r, const char *what) {
    stx__group *c = g->group;
    if (g->capturing && r != ncclRemoteError && r != ncclSystemError) {
        snprintf(c->no_capture, sizeof c->no_capture, "NCCL cannot capture an exchange: %s (%.40s)",
                 ncclGetErrorString(r), ncclGetLastError(c->comm));
        g->repeatable = 0;
        return 0;
    }
    stx_fail(x, STX_ERR_DEVICE, "%s: rank %d of %d: NCCL error \"%s\" (%.200s)%s", what, c->rank,
             c->ranks, ncclGetErrorString(r), ncclGetLastError(c->comm), stx__nccl_advice(r));
    stx__group_give_up(g);
    return 0;
}

/* Waits for the event, for the stream if event is NULL, or for the last NCCL call if both
   are NULL. Returns 1 after the wait. Sets an error and returns 0 if NCCL reports an
   error or the other ranks do not answer in time. NCCL can only be polled. After 10 ms
   the thread sleeps between polls, for a small fraction of the time waited so far. */
static int stx__group_wait_for(stx_ctx *x, stx_gpu *g, cudaStream_t stream, cudaEvent_t event,
                               const char *what) {
    typedef std::chrono::steady_clock watch;
    typedef std::chrono::duration<double> duration;
    const watch::time_point begin = watch::now();
    const stx__group *c = g->group;
    for (;;) {
        ncclResult_t state = ncclSuccess, r;
        double seconds;
        if (event || stream) {
            cudaError_t e = event ? cudaEventQuery(event) : cudaStreamQuery(stream);
            if (e != cudaErrorNotReady) return stx__cuda_ok(x, g, e, what);
            (void)cudaGetLastError(); /* "not ready" is not an error */
        }

        r = ncclCommGetAsyncError(c->comm, &state);
        if (r != ncclSuccess || (state != ncclSuccess && state != ncclInProgress))
            return stx__nccl_failed(x, g, r != ncclSuccess ? r : state, what);
        if (!event && !stream && state == ncclSuccess) return 1;

        seconds = duration(watch::now() - begin).count();
        if (seconds > c->timeout) break;
        if (seconds < 0.01)
            std::this_thread::yield();
        else
            std::this_thread::sleep_for(duration(seconds < 1 ? seconds / 200 : 0.005));
    }
    stx_fail(x, STX_ERR_DEVICE,
             "%s: rank %d of %d: the other ranks did not answer within %g s: one of them may have "
             "exited (SEQTX_GROUP_TIMEOUT sets the limit, in seconds)",
             what, c->rank, c->ranks, c->timeout);
    stx__group_give_up(g);
    return 0;
}
#endif /* SEQTX_NCCL */

/* Waits for the event, or for the stream if event is NULL. Returns 1, or sets an error
   and returns 0. Every wait for the GPU goes through this function, because in a group
   the GPU itself may be waiting for ranks that have ended. */
static int stx__wait(stx_ctx *x, stx_gpu *g, cudaStream_t stream, cudaEvent_t event,
                     const char *what) {
    cudaError_t e;
#ifdef SEQTX_NCCL
    if (stx__group_is_alive(g)) return stx__group_wait_for(x, g, stream, event, what);
#endif
    e = event ? cudaEventSynchronize(event) : cudaStreamSynchronize(stream);
    return stx__cuda_ok(x, g, e, what);
}

/* Adds an allocation to the list. Returns 0 if the host is out of memory. */
static int stx__range_add(stx_gpu *g, void *base, size_t bytes, int kind, void *twin) {
    stx__range *r = (stx__range *)calloc(1, sizeof *r);
    if (!r) return 0;
    r->base = (char *)base;
    r->bytes = bytes;
    r->kind = kind;
    r->twin = (stx__bf16 *)twin;
    r->next = g->ranges;
    g->ranges = r;
    g->bytes += bytes + (twin ? bytes / 2 : 0);
    return 1;
}

/* Replaces the scratch buffer with a larger one. The old buffer is kept until the
   device is closed, because a captured step may use its address. */
static int stx__scratch_grow(stx_ctx *x, stx_gpu *g, size_t bytes, const char *what) {
    const size_t least = (size_t)1 << 20;
    size_t size = bytes < least ? least : bytes + bytes / 4;
    void *p = NULL;
    if (g->capturing) {
        stx_fail(x, STX_ERR_MEMORY,
                 "%s: the captured step needs %zu bytes of scratch memory, more than the earlier "
                 "step with the same key: the key must include everything that array sizes "
                 "depend on",
                 what, bytes);
        return 0;
    }

    if (cudaMalloc(&p, size) != cudaSuccess) {
        (void)cudaGetLastError();
        size = bytes;
        if (cudaMalloc(&p, size) != cudaSuccess) {
            (void)cudaGetLastError();
            stx_fail(x, STX_ERR_MEMORY,
                     "%s: out of GPU memory: cannot allocate %zu bytes of scratch memory: use a "
                     "smaller batch, block or model",
                     what, bytes);
            return 0;
        }
    }
    if (g->scratch && !stx__range_add(g, g->scratch, g->scratch_bytes, STX_MEM_BYTES, NULL)) {
        (void)cudaFree(p);
        stx_fail(x, STX_ERR_MEMORY, "%s: out of host memory", what);
        return 0;
    }
    g->scratch = (char *)p;
    g->scratch_bytes = size;
    return 1;
}

/* Returns `bytes` bytes of device scratch memory for the kernels of one launcher, or
   sets an error and returns NULL. The next launcher may use the same memory, because
   its kernels run later in the stream. */
static void *stx__scratch_of(stx_ctx *x, size_t bytes, const char *what) {
    stx_gpu *g = stx__use_gpu(x);
    if (!stx_ok(x)) return NULL;
    if (bytes > g->scratch_bytes && !stx__scratch_grow(x, g, bytes, what)) return NULL;
    return g->scratch;
}

/* Returns 1 if host and device may exchange data now. Transfers are not allowed during
   a capture, because every replay would transfer the same data. In that case, marks the
   step as not repeatable and returns 0. */
static int stx__host_copy_allowed(stx_gpu *g) {
    if (g->capturing) g->repeatable = 0;
    return !g->capturing;
}


/* ---- src/cuda/sums.cuh ---- */
// >>shares, sums, fill, axpy, copy

/* These functions load, store or add W = 4 or 1 adjacent elements. W = 4 requires that
   all rows begin at aligned addresses and have lengths that are multiples of 4;
   otherwise the same code runs with W = 1. */
template <int W>
static __device__ __forceinline__ void stx__getn(float (&v)[W], const stx__array &a, size_t i) {
    if constexpr (W == 4) {
        float4 q = stx__get4(a, i);
        v[0] = q.x;
        v[1] = q.y;
        v[2] = q.z;
        v[3] = q.w;
    } else {
        v[0] = stx__get(a, i);
    }
}

template <int W>
static __device__ __forceinline__ void stx__putn(const stx__array &a, size_t i,
                                                 const float (&v)[W]) {
    if constexpr (W == 4)
        stx__put4(a, i, make_float4(v[0], v[1], v[2], v[3]));
    else
        stx__put(a, i, v[0]);
}

template <int W>
static __device__ __forceinline__ void stx__addn(const stx__array &a, size_t i, float (&v)[W],
                                                 int accumulate) {
    if (accumulate) {
        float was[W];
        stx__getn<W>(was, a, i);
        for (int e = 0; e < W; e++) v[e] += was[e];
    }
    stx__putn<W>(a, i, v);
}

/* A loop over i = 0, W, 2 W, .. below n, distributed over all threads of the grid. The
   grid may have fewer threads than the loop has iterations. */
#define STX__STEP(i, n, W) \
  for (size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * W; i < n; \
       i += (size_t)gridDim.x * blockDim.x * W)

/* Returns the number of blocks of 256 threads for a loop with this many iterations: at
   most two full waves on this GPU. Results do not depend on this number. */
static unsigned stx__grid(stx_ctx *x, size_t iterations) {
    return stx__blocks(iterations, 256, (size_t)stx__gpu(x)->sms * 16);
}

/* Launches a kernel<W> whose STX__STEP loop covers n elements, with W = 4 if `four` is
   nonzero and W = 1 otherwise. */
#define STX__RUN_BY(x, name, four, kernel, n, ...) \
  STX__CHOOSE(W, (four) ? 4 : 1, (1, 4), \
              STX__RUN_KERNEL(x, name, kernel<W>, stx__grid(x, (n) / W), 256, 0, __VA_ARGS__))

/* Column sums, first stage. The N rows are divided into at most 1024 chunks of `rows`
   rows. The number of chunks depends on N alone, so the result is the same on every GPU.
   The second stage adds the sums of the chunks.

   All threads of block (chunk, columns) call this function. It stores the chunk's sums
   of P terms per element in row `chunk` of `part` (chunks,ld), C sums per term. A block
   has 8 rows of 32 lanes; a lane sums W columns over every 8th row of the chunk, in
   order. The 8 sums of a column are then added in order. load(n, c) returns what is
   needed of row n and columns c to c + W - 1, and add(s, t, n, c) adds its terms to
   s[P][W]. A lane loads U rows before it adds the first one; near the end of the chunk,
   it loads row n instead of rows beyond the end. `sh` holds 8 * 32 * W floats. */
template <int P, int W, int U, class LOAD, class ADD>
static __device__ __forceinline__ void stx__column_sums(float *part, size_t ld, size_t N, size_t C,
                                                        size_t rows, float *sh, const LOAD &load,
                                                        const ADD &add) {
    const size_t lane = threadIdx.x % 32, row = threadIdx.x / 32, lo = blockIdx.x * rows,
                 hi = lo + rows < N ? lo + rows : N;
    for (size_t c0 = (size_t)blockIdx.y * 32 * W; c0 < C; c0 += (size_t)gridDim.y * 32 * W) {
        const size_t c = c0 + lane * W;
        float s[P][W] = {};
        for (size_t n = lo + row; c < C && n < hi; n += 8 * U) {
            decltype(load(n, c)) t[U];
#pragma unroll
            for (int j = 0; j < U; j++) t[j] = load(n + 8 * j < hi ? n + 8 * j : n, c);
#pragma unroll
            for (int j = 0; j < U; j++)
                if (n + 8 * j < hi) add(s, t[j], n + 8 * j, c);
        }
#pragma unroll
        for (int k = 0; k < P; k++) {
            for (int e = 0; e < W; e++) sh[(row * W + e) * 32 + lane] = s[k][e];
            __syncthreads();
            if (row < W && c < C) { /* thread row `row` finishes column c + row */
                float t = 0;
                for (int r = 0; r < 8; r++) t += sh[(r * W + row) * 32 + lane];
                part[blockIdx.x * ld + k * C + c + row] = t;
            }
            __syncthreads();
        }
    }
}

/* The same for kernels that keep rows in registers, with sums of a warp over its rows.
   G of the 4 warps of a block share a row, and lane l of the first one has the groups of
   4 columns l, l + 32, .. below 128 Q. Adds the sums of the warps in order, and stores
   them in row blockIdx.x of `part` (blocks,P C). `sh` holds 4 * 128 * Q floats. */
template <int P, int Q, int G>
static __device__ __forceinline__ void stx__column_sums_of_warps(float *part, size_t C, float *sh,
                                                                 const float (&s)[P][Q][4]) {
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int i = 0; i < P; i++) {
#pragma unroll
        for (int k = 0; k < Q; k++)
            for (int e = 0; e < 4; e++) sh[(warp * Q + k) * 128 + 4 * lane + e] = s[i][k][e];
        __syncthreads();
        for (size_t c = threadIdx.x; c < C; c += 128) {
            float v = 0;
            for (size_t j = c / (128 * Q); j < 4; j += G) v += sh[j * 128 * Q + c % (128 * Q)];
            part[(P * (size_t)blockIdx.x + i) * C + c] = v;
        }
        __syncthreads();
    }
}

/* Sums over the rows n of dy, f (N,C), mean and rstd (N), which are float:

       STX__COLUMNS_SUM      dy
       STX__COLUMNS_DOT      dy f
       STX__COLUMNS_NORM     dy (f - mean) rstd, and dy */
enum { STX__COLUMNS_SUM, STX__COLUMNS_DOT, STX__COLUMNS_NORM };

template <int S, int MODE>
STX__GLOBAL(256)
stx__columns_kernel(float *part, stx__array dy, stx__array f, const float *mean, const float *rstd,
                    size_t N, size_t C, size_t rows) {
    constexpr int W = stx__width<S>, P = MODE == STX__COLUMNS_NORM ? 2 : 1;
    STX__SHARED(float, sh, 8 * 32 * W);
    struct terms {
        float v[W], w[W], m, r;
    };
    dy = stx__stored<S>(dy);
    f = stx__stored<S>(f);
    stx__column_sums<P, W, 4>(
        part, P * C, N, C, rows, sh,
        [&](size_t n, size_t c) {
            terms t;
            stx__getn<W>(t.v, dy, n * C + c);
            if (MODE != STX__COLUMNS_SUM) stx__getn<W>(t.w, f, n * C + c);
            if (MODE == STX__COLUMNS_NORM) {
                t.m = mean[n];
                t.r = rstd[n];
            }
            return t;
        },
        [&](float (&s)[P][W], const terms &t, size_t, size_t) {
            for (int e = 0; e < W; e++) {
                if (MODE == STX__COLUMNS_SUM) s[0][e] += t.v[e];
                if (MODE == STX__COLUMNS_DOT) s[0][e] = fmaf(t.v[e], t.w[e], s[0][e]);
                if constexpr (MODE == STX__COLUMNS_NORM) {
                    s[0][e] = fmaf(t.v[e] * t.r, t.w[e] - t.m, s[0][e]);
                    s[1][e] += t.v[e];
                }
            }
        });
}

/* Deferred sums. The second stage does little work, but costs one launch per sum. The
   backward pass adds to the gradient of a parameter and does not read it, so the second
   stage of such a sum can wait until one launch finishes many sums. This happens when a
   table or a buffer of partial sums is full, before gradients are sent to other ranks,
   and when the tape has been traversed. An array's deferred sums are added in the same
   order as without deferral, but other kernels may add to the array before them. The
   order of all additions is fixed in either case.

   There are two tables: column sums, and the K slices of GEMMs (see >>gemm). */
enum { STX__DEFERRED_MAX = 24, STX__COLUMN_TARGETS = 3 };   /* sums per launch, and per
                                                               deferred call */
#ifndef CUDA_HOST
  #define STX__COLUMNS_BYTES ((size_t)32 << 20)
  #define STX__SLICES_BYTES  ((size_t)64 << 20)
#else
  #define STX__COLUMNS_BYTES ((size_t)1 << 17)
  #define STX__SLICES_BYTES  ((size_t)1 << 19)
#endif

/* d (C) += `part` (chunks,ld), summed over the chunks */
struct stx__column_sum {
    stx__array d;
    const float *part;
    size_t ld, chunks, C;
};

struct stx__column_sum_table {
    stx__column_sum s[STX__DEFERRED_MAX];
};

/* d (n) += the sum of the slices in `part`; slice k begins at part + k * stride */
struct stx__slice_sum {
    stx__array d;
    const float *part;
    size_t n, stride, slices;
};

struct stx__slice_sum_table {
    stx__slice_sum s[STX__DEFERRED_MAX];
};

struct stx__deferred_sums {
    int depth;              /* nesting depth of stx_cuda_defer_sums; 0: no deferral */
    int columns, slices;    /* numbers of pending sums in the tables */
    char *columns_buffer, *slices_buffer;   /* partial sums; allocated on first use */
    size_t columns_used, slices_used;       /* bytes used in each buffer */
    stx__column_sum_table column;
    stx__slice_sum_table slice;
};

/* Column sums, second stage: row y of the grid adds the chunks of sum y. A block of
   32 x 32 threads handles 32 columns. Each thread adds every 32nd chunk in order, then a
   warp adds the 32 sums of a column. */
STX__GLOBAL(1024) stx__columns_sum_kernel(stx__column_sum_table all) {
    STX__SHARED(float, sh, 32 * 33);
    const stx__column_sum &a = all.s[blockIdx.y];
    const size_t lane = threadIdx.x % 32, row = threadIdx.x / 32, C = a.C;
    for (size_t c0 = (size_t)blockIdx.x * 32; c0 < C; c0 += (size_t)gridDim.x * 32) {
        float s = 0;
        if (c0 + lane < C) {
#pragma unroll 8
            for (size_t k = row; k < a.chunks; k += 32) s += a.part[k * a.ld + c0 + lane];
        }
        sh[row * 33 + lane] = s;
        __syncthreads();
        s = stx__warp_sum(sh[lane * 33 + row]);
        if (lane == 0 && c0 + row < C) stx__add(a.d, c0 + row, s, 1);
        __syncthreads();
    }
}

static void stx__run_column_sums(stx_ctx *x, const char *name, const stx__column_sum_table *t,
                                 int count) {
    size_t most = 1;
    for (int k = 0; k < count; k++) most = STX_MAX(most, t->s[k].C);
    if (count)
        STX__RUN_KERNEL(x, name, stx__columns_sum_kernel,
                        dim3(stx__blocks(most, 32, 65535), (unsigned)count), 1024, 0, *t);
}

/* Finishes all deferred slice sums. Row y of the grid handles sum y and adds its slices
   in order. A thread handles W adjacent elements at a time. */
template <int W> STX__GLOBAL(256) stx__slice_sums_kernel(stx__slice_sum_table all) {
    const stx__slice_sum &s = all.s[blockIdx.y];
    const stx__array part = {(void *)s.part, NULL, 0};
    STX__STEP(i, s.n, W) {
        float v[W], w[W];
        stx__getn<W>(v, part, i);
#pragma unroll 4
        for (size_t k = 1; k < s.slices; k++) {
            stx__getn<W>(w, part, k * s.stride + i);
            for (int e = 0; e < W; e++) v[e] += w[e];
        }
        stx__addn<W>(s.d, i, v, 1);
    }
}

static void stx__finish_slices(stx_ctx *x) {
    struct stx__deferred_sums *t = stx__gpu(x)->deferred;
    size_t most = 1;
    int k, four = 1;
    if (!t || !t->slices) return;
    for (k = 0; k < t->slices; k++) {
        const stx__slice_sum *s = &t->slice.s[k];
        if (s->n > most) most = s->n;
        four = four && (s->n | s->stride) % 4 == 0 && stx__aligned4(s->d);
    }
    STX__CHOOSE(W, four ? 4 : 1, (1, 4),
                STX__RUN_KERNEL(x, "stx_backward, sums of slices", stx__slice_sums_kernel<W>,
                                dim3(stx__grid(x, most / W), (unsigned)t->slices), 256, 0,
                                t->slice));
    memset(&t->slice, 0, sizeof t->slice);
    t->slices = 0;
    t->slices_used = 0;
}

/* Finishes all deferred sums. */
static void stx__finish_sums(stx_ctx *x) {
    struct stx__deferred_sums *t = stx__gpu(x)->deferred;
    stx__finish_slices(x);
    if (!t || !t->columns) return;
    stx__run_column_sums(x, "stx_backward, sums of columns", &t->column, t->columns);
    memset(&t->column, 0, sizeof t->column);
    t->columns = 0;
    t->columns_used = 0;
}

/* Returns a buffer for partial sums. The buffer is allocated on first use, but never
   during a capture. If there is no buffer, returns NULL without setting an error. */
static char *stx__deferred_buffer(stx_gpu *g, char **buffer, size_t bytes) {
    if (*buffer || g->capturing) return *buffer;
    if (cudaMalloc((void **)buffer, bytes) == cudaSuccess) {
        g->bytes += bytes;
    } else {
        (void)cudaGetLastError();
        *buffer = NULL;
    }
    return *buffer;
}

/* Returns memory for n partial sums of the first stage, or sets an error and returns
   NULL. On entry, *deferred is nonzero if the second stage may be deferred; on return,
   it is nonzero if the second stage will be deferred. Pass the new value of *deferred
   to stx__columns_sum. If it is 0, the returned memory is scratch memory. */
static float *stx__partial_sums(stx_ctx *x, const char *name, size_t n, int *deferred) {
    stx_gpu *g = stx__use_gpu(x);
    struct stx__deferred_sums *t = g->deferred;
    const size_t bytes = (n * sizeof(float) + 255) / 256 * 256;
    *deferred = *deferred && stx_ok(x) && t && t->depth && bytes <= STX__COLUMNS_BYTES
            && stx__deferred_buffer(g, &t->columns_buffer, STX__COLUMNS_BYTES);
    if (!*deferred) return (float *)stx__scratch_of(x, n * sizeof(float), name);
    if (t->columns_used + bytes > STX__COLUMNS_BYTES
        || t->columns + STX__COLUMN_TARGETS > STX__DEFERRED_MAX)
        stx__finish_sums(x);
    t->columns_used += bytes;
    return (float *)(void *)(t->columns_buffer + t->columns_used - bytes);
}

/* Returns nonzero if the gradients a (n) and b (m) overlap, as two views of the same
   parameter may. */
static int stx__overlap(const stx_real *a, size_t n, const void *b, size_t m) {
    const uintptr_t p = (uintptr_t)a, q = (uintptr_t)b;
    return p && q && p < q + m * sizeof *a && q < p + n * sizeof *a;
}

/* Returns nonzero if any two of the gradients d[k] (C), k < count, overlap. */
static int stx__targets_overlap(stx_real *const *d, int count, size_t C) {
    for (int k = 0; k < count; k++)
        for (int j = 0; j < k; j++)
            if (stx__overlap(d[k], C, d[j], C)) return 1;
    return 0;
}

/* Returns nonzero if one of the targets d[k] (C), k < count, is the target of a pending
   sum. */
static int stx__targets_pending(const struct stx__deferred_sums *t, stx_real *const *d, int count,
                                size_t C) {
    for (int k = 0; k < count; k++)
        for (int j = 0; j < t->columns; j++)
            if (stx__overlap(d[k], C, t->column.s[j].d.p, t->column.s[j].C)) return 1;
    return 0;
}

/* For k < count, d[k] (C) += columns [k C, k C + C) of `part` (chunks,ld), summed over
   the chunks. d[k] may be NULL. `deferred` is the value that stx__partial_sums returned
   in *deferred. Targets that overlap are added to in order, and not deferred. */
static void stx__columns_sum(stx_ctx *x, const char *name, stx_real *const *d, int count,
                             const float *part, size_t ld, size_t chunks, size_t C, int deferred) {
    struct stx__deferred_sums *t = stx__gpu(x)->deferred;
    const int overlap = stx__targets_overlap(d, count, C),
              defer = deferred && !overlap && !stx__targets_pending(t, d, count, C);
    stx__column_sum_table now;
    int sums = 0;
    if (deferred && !defer) stx__finish_sums(x); /* pending sums must be added first */

    memset(&now, 0, sizeof now);
    for (int k = 0; k < count; k++) {
        if (!d[k]) continue;
        stx__column_sum *s = defer ? &t->column.s[t->columns++] : &now.s[sums++];
        s->d = stx__array_of(x, d[k]);
        s->part = part + k * C;
        s->ld = ld;
        s->chunks = chunks;
        s->C = C;
        if (overlap) {
            stx__run_column_sums(x, name, &now, 1);
            sums = 0;
        }
    }
    stx__run_column_sums(x, name, &now, sums);
}

/* Returns the number of rows per chunk: `least`, or a larger multiple of 8 if `least`
   would divide N rows into more than `most` chunks. */
static size_t stx__chunk(size_t N, size_t least, size_t most) {
    size_t rows = ((N + most - 1) / most + 7) / 8 * 8;
    return rows < least ? least : rows;
}

/* The launch of a kernel that calls stx__column_sums, for P terms of C columns */
typedef struct stx__column_launch {
    const char *name;
    size_t rows, chunks, ld;    /* rows per chunk; ld is P C */
    dim3 grid;
    int deferred;
    float *part;        /* (chunks,ld); NULL after an error */
} stx__column_launch;

static stx__column_launch stx__column_launch_of(stx_ctx *x, const char *name, size_t N, size_t C,
                                                size_t P, int access, int deferred) {
    stx__column_launch l;
    l.name = name;
    l.rows = stx__chunk(N, 64, 1024);
    l.chunks = (N + l.rows - 1) / l.rows;
    l.ld = P * C;
    l.grid = dim3((unsigned)l.chunks, stx__blocks(C, access == STX__MIXED ? 32 : 128, 65535));
    l.deferred = deferred;
    l.part = stx__partial_sums(x, name, l.chunks * l.ld, &l.deferred);
    return l;
}

/* The second stage, see stx__columns_sum */
static void stx__column_launch_end(stx_ctx *x, const stx__column_launch *l, stx_real *const *d,
                                   int count, size_t C) {
    stx__columns_sum(x, l->name, d, count, l->part, l->ld, l->chunks, C, l->deferred);
}

/* Column sums over N rows:
       d (C) += sum of dy                       with f and mean NULL
       d (C) += sum of dy f                     with mean NULL
       d (C) += sum of dy (f - mean) rstd, and d2 (C) += sum of dy, otherwise */
typedef struct stx__columns_args {
    stx_real *d, *d2;               /* d2 may be NULL; d may be NULL only if mean is not NULL */
    const stx_real *dy, *f;         /* (N,C) */
    const stx_real *mean, *rstd;    /* (N), float */
    size_t N, C;
    size_t padding;     /* number of trailing columns not added to d; if nonzero, mean must
                           be NULL */
    int deferred;       /* 1: d and d2 are parameter gradients, so the sums may be deferred */
} stx__columns_args;

/* Returns the arguments for d (C) += sum of dy (N,C); the other fields are 0. */
static stx__columns_args stx__columns_init(stx_real *d, const stx_real *dy, size_t N, size_t C) {
    stx__columns_args a;
    memset(&a, 0, sizeof a);
    a.d = d;
    a.dy = dy;
    a.N = N;
    a.C = C;
    return a;
}

static void stx__columns(stx_ctx *x, const char *name, const stx__columns_args *a) {
    const stx__array G = stx__array_of(x, a->dy), F = stx__array_of(x, a->f);
    const size_t N = a->N, C = a->C;
    const int access = stx__access(C, {G, F}, {}), P = a->mean ? 2 : 1;
    const int with_f = a->f ? STX__COLUMNS_DOT : STX__COLUMNS_SUM,
              mode = a->mean ? STX__COLUMNS_NORM : with_f;
    stx_real *to[2] = {a->d, a->d2};
    stx__column_launch l;
    if (!N || !C) return;
    l = stx__column_launch_of(x, name, N, C, P, access, a->deferred);
    if (!l.part) return;
    STX__CHOOSE(S, access, (STX__FLOATS, STX__HALVES, STX__MIXED),
                STX__CHOOSE(MODE, mode, (STX__COLUMNS_SUM, STX__COLUMNS_DOT, STX__COLUMNS_NORM),
                            STX__RUN_KERNEL(x, name, (stx__columns_kernel<S, MODE>), l.grid, 256, 0,
                                            l.part, G, F, a->mean, a->rstd, N, C, l.rows)));
    stx__column_launch_end(x, &l, to, P, C - a->padding);
}

/* db (C) += dy (N,C) summed over the rows, in two stages, see stx__columns */
void stx_sum_rows_cuda(stx_ctx *x, stx_real *db, const stx_real *dy, size_t N, size_t C) {
    stx__columns_args a = stx__columns_init(db, dy, N, C);
    stx__columns(x, "stx_sum_rows", &a);
}

/* A row of data is handled by T = 32, 256 or 1024 threads. With T = 32, each warp
   handles a row and a block has 8 warps; otherwise a block handles a row. In these
   kernels, STX__EACH_ROW is the loop over the rows n < N. */
#define STX__ROW_BLOCK(T) ((T) == 32 ? 256 : (T))
#define STX__EACH_ROW(n, N, T) \
  for (size_t n = (size_t)blockIdx.x * (STX__ROW_BLOCK(T) / T) + threadIdx.x / T; n < N; \
       n += (size_t)gridDim.x * (STX__ROW_BLOCK(T) / T))

/* Returns the sum or maximum over the T threads of a row, in all of these threads.
   Values are combined in a fixed tree: first the lanes of each warp, then the warps.
   `sh` is shared memory for 32 elements. */
template <int T, class F> static __device__ __forceinline__ F stx__row_sum(F v, F *sh) {
    if constexpr (sizeof v == 8)
        v = stx__warp_sum_f64(v);
    else
        v = stx__warp_sum(v);
    if constexpr (T > 32) {
        __syncthreads();
        if (threadIdx.x % 32 == 0) sh[threadIdx.x / 32] = v;
        __syncthreads();
        v = threadIdx.x % 32 < T / 32 ? sh[threadIdx.x % 32] : 0;
        if constexpr (sizeof v == 8)
            v = stx__warp_sum_f64(v);
        else
            v = stx__warp_sum(v);
    }
    return v;
}

template <int T> static __device__ __forceinline__ float stx__row_max(float v, float *sh) {
    v = stx__warp_max(v);
    if constexpr (T > 32) {
        __syncthreads();
        if (threadIdx.x % 32 == 0) sh[threadIdx.x / 32] = v;
        __syncthreads();
        v = stx__warp_max(sh[threadIdx.x % (T / 32)]);
    }
    return v;
}

/* y (1) = or += the sum of `part` (n), divided by the divisor. There is one block. Each
   thread adds every 1024th element in order, then the threads' sums are added in a
   fixed tree. */
STX__GLOBAL(1024)
stx__total_kernel(stx__array y, const double *part, size_t n, double divisor, int accumulate) {
    STX__SHARED(double, sh, 32);
    double s = 0;
#pragma unroll 8
    for (size_t i = threadIdx.x; i < n; i += 1024) s += part[i];
    s = stx__row_sum<1024>(s, sh);
    if (threadIdx.x == 0) stx__add(y, 0, (float)(s / divisor), accumulate);
}

/* The terms that stx__sum_kernel adds: `a`, (a - b)^2 or the product a b */
enum { STX__SUM, STX__SUM_SQUARES, STX__SUM_PRODUCTS };

template <int MODE> static __device__ __forceinline__ double stx__term(float a, float b) {
    if constexpr (MODE == STX__SUM) {
        return (double)a;
    } else if constexpr (MODE == STX__SUM_SQUARES) {
        double d = (double)a - (double)b;
        return d * d;
    } else {
        return (double)a * (double)b;
    }
}

/* `part` (chunks) = sums of the terms of `a` and b (n) over chunks of `each` elements,
   a multiple of 4. There is one block per chunk. Each thread adds every 256th group of
   4 elements (every 256th element if `four` is 0) in double, then the threads' sums are
   added in a fixed tree. */
template <int MODE>
STX__GLOBAL(256)
stx__sum_kernel(double *part, stx__array a, stx__array b, size_t n, size_t each, int four) {
    STX__SHARED(double, sh, 32);
    const size_t lo = blockIdx.x * each, hi = lo + each < n ? lo + each : n,
                 fours = four ? (hi - lo) / 4 : 0;
    double s = 0;
#pragma unroll 4
    for (size_t q = threadIdx.x; q < fours; q += 256) {
        float v[4], w[4] = {0};
        stx__getn<4>(v, a, lo + 4 * q);
        if (MODE) stx__getn<4>(w, b, lo + 4 * q);
        for (int e = 0; e < 4; e++) s += stx__term<MODE>(v[e], w[e]);
    }
    for (size_t i = lo + 4 * fours + threadIdx.x; i < hi; i += 256)
        s += stx__term<MODE>(stx__get(a, i), MODE ? stx__get(b, i) : 0);
    s = stx__row_sum<256>(s, sh);
    if (threadIdx.x == 0) part[blockIdx.x] = s;
}

/* y (1) = or += the sum of n terms, divided by the divisor. The sum is computed in two
   stages. The number of chunks, at most 2048, depends on n alone. b is NULL for
   STX__SUM. */
static void stx__sum_cuda(stx_ctx *x, const char *name, int mode, stx_real *y, const stx_real *a,
                          const stx_real *b, size_t n, double divisor, int accumulate) {
    stx__array Y = stx__array_of(x, y), A = stx__array_of(x, a), B = stx__array_of(x, b);
    const size_t each = stx__chunk(n, 4096, 2048), chunks = (n + each - 1) / each;
    const int four = stx__aligned4(A) && stx__aligned4(B);
    double *part;
    if (!n || !(part = (double *)stx__scratch_of(x, chunks * sizeof *part, name))) return;

    STX__CHOOSE(MODE, mode, (STX__SUM, STX__SUM_SQUARES, STX__SUM_PRODUCTS),
                STX__RUN_KERNEL(x, name, stx__sum_kernel<MODE>, (unsigned)chunks, 256, 0, part, A,
                                B, n, each, four));
    STX__RUN_KERNEL(x, name, stx__total_kernel, 1, 1024, 0, Y, part, chunks, divisor, accumulate);
}

/* y (n) = value. A thread writes W adjacent elements at a time. */
template <int W> STX__GLOBAL(256) stx__fill_kernel(stx__array y, size_t n, float value) {
    float v[W];
    for (int e = 0; e < W; e++) v[e] = value;
    STX__STEP(i, n, W) stx__putn<W>(y, i, v);
}

void stx_fill_cuda(stx_ctx *x, stx_real *y, size_t n, stx_real value) {
    stx__array Y = stx__array_of(x, y);
    if (n)
        STX__RUN_BY(x, "stx_fill", n % 4 == 0 && stx__aligned4(Y), stx__fill_kernel, n, Y, n,
                    value);
}

/* y (n) = s a (n), or y += s a. A thread computes W adjacent elements at a time. */
template <int W>
STX__GLOBAL(256)
stx__axpy_kernel(stx__array y, stx__array a, size_t n, float s, int accumulate) {
    STX__STEP(i, n, W) {
        float v[W];
        stx__getn<W>(v, a, i);
        if (accumulate) {
            float was[W];
            stx__getn<W>(was, y, i);
            for (int e = 0; e < W; e++) v[e] = fmaf(s, v[e], was[e]);
        } else {
            for (int e = 0; e < W; e++) v[e] *= s;
        }
        stx__putn<W>(y, i, v);
    }
}

void stx_axpy_cuda(stx_ctx *x, stx_real *y, const stx_real *a, size_t n, stx_real s,
                   int accumulate) {
    stx__array Y = stx__array_of(x, y), A = stx__array_of(x, a);
    const int four = n % 4 == 0 && stx__aligned4(Y) && stx__aligned4(A);
    if (n) STX__RUN_BY(x, "stx_axpy", four, stx__axpy_kernel, n, Y, A, n, s, accumulate);
}

/* y (rows,cols) = or += a (rows,cols), with row strides ldy and lda; n = rows * cols. A
   thread copies W adjacent elements of a row at a time. */
template <int W>
STX__GLOBAL(256)
stx__copy2d_kernel(stx__array y, size_t ldy, stx__array a, size_t lda, size_t n, size_t cols,
                   int accumulate) {
    STX__STEP(i, n, W) {
        size_t r = i / cols, c = i - r * cols;
        float v[W];
        stx__getn<W>(v, a, r * lda + c);
        stx__addn<W>(y, r * ldy + c, v, accumulate);
    }
}

void stx_copy2d_cuda(stx_ctx *x, stx_real *y, size_t ldy, const stx_real *a, size_t lda,
                     size_t rows, size_t cols, int accumulate) {
    stx__array Y = stx__array_of(x, y), A = stx__array_of(x, a);
    const size_t n = rows * cols, strides = rows > 1 ? ldy | lda : 0;
    const int four = (cols | strides) % 4 == 0 && stx__aligned4(Y) && stx__aligned4(A);
    if (n)
        STX__RUN_BY(x, "stx_copy2d", four, stx__copy2d_kernel, n, Y, ldy, A, lda, n, cols,
                    accumulate);
}

/* y (rows, wa + wb) = the rows of `a` (rows,wa) and of b (rows,wb), concatenated row by
   row; n = rows * (wa + wb). A thread copies W adjacent elements of a row at a time. */
template <int W>
STX__GLOBAL(256)
stx__concat2d_kernel(stx__array y, stx__array a, size_t lda, size_t wa, stx__array b, size_t ldb,
                     size_t wb, size_t n) {
    STX__STEP(i, n, W) {
        size_t r = i / (wa + wb), c = i - r * (wa + wb);
        float v[W];
        if (c < wa)
            stx__getn<W>(v, a, r * lda + c);
        else
            stx__getn<W>(v, b, r * ldb + (c - wa));
        stx__putn<W>(y, i, v);
    }
}

void stx_concat2d_cuda(stx_ctx *x, stx_real *y, const stx_real *a, size_t lda, size_t wa,
                       const stx_real *b, size_t ldb, size_t wb, size_t rows) {
    stx__array Y = stx__array_of(x, y), A = stx__array_of(x, a), B = stx__array_of(x, b);
    const size_t n = rows * (wa + wb), strides = rows > 1 ? lda | ldb : 0;
    const int four =
        (wa | wb | strides) % 4 == 0 && stx__aligned4(Y) && stx__aligned4(A) && stx__aligned4(B);
    if (n)
        STX__RUN_BY(x, "stx_concat2d", four, stx__concat2d_kernel, n, Y, A, lda, wa, B, ldb, wb, n);
}

/* Shifts each row of y (rows,n), with row stride ldy, left by w elements. Unless a.p is
   NULL, copies the row of `a` (rows,w) into the last w elements. A thread owns the
   elements c, c + w, c + 2 w, .. of a row, for W adjacent columns c. No other thread
   reads or writes them, so rows are shifted in place, in n / w sequential steps. `all`
   is rows * w. */
template <int W>
STX__GLOBAL(256)
stx__shift2d_kernel(stx__array y, size_t ldy, size_t n, stx__array a, size_t lda, size_t w,
                    size_t all) {
    STX__STEP(i, all, W) {
        /* elements at index `last` and later are copied from `a` */
        size_t r = i / w, at = r * ldy + (i - r * w), last = r * ldy + (n - w);
        float v[W], next[W];
        if (at < last) {
            stx__getn<W>(v, y, at + w);
            for (; at + w < last; at += w) {
                stx__getn<W>(next, y, at + 2 * w);
                stx__putn<W>(y, at, v);
                for (int e = 0; e < W; e++) v[e] = next[e];
            }
            stx__putn<W>(y, at, v);
            at += w;
        }
        if (!a.p) continue;
        stx__getn<W>(v, a, r * lda + (at - last));
        stx__putn<W>(y, at, v);
    }
}

void stx__shift2d_cuda(stx_ctx *x, stx_real *y, size_t ldy, size_t n, const stx_real *a,
                       size_t lda, size_t w, size_t rows) {
    stx__array Y = stx__array_of(x, y), A = stx__array_of(x, a);
    const size_t all = rows * w, stride_a = a ? lda : 0;
    const size_t strides = rows > 1 ? stride_a | ldy : 0;
    const int four = (w | strides | n) % 4 == 0 && stx__aligned4(Y) && stx__aligned4(A);
    if (all)
        STX__RUN_BY(x, "stx__shift2d", four, stx__shift2d_kernel, all, Y, ldy, n, A, lda, w, all);
}


/* ---- src/cuda/gemm_plans.cuh ---- */
// >>gemm

/* Every GEMM goes through one wrapper of cublasLt, stx__lt_gemm. The matrices of cublasLt
   are column-major, so a row-major C (M,N) = op(A) op(B) is passed as its transpose,
   C^T (N,M) = op(B)^T op(A)^T: the operands are swapped and no data is copied. (The
   row-major order of cublasLt would exclude epilogues: "not supported when D matrix
   memory order is defined as CUBLASLT_ORDER_ROW", cublasLtMatmul.)

   Types, according to the documentation of cublasLtMatmul: A and B have the same type;
   bfloat16 inputs give bfloat16 or float outputs, float inputs give float outputs; the
   bias has the type of the output. Therefore, in a bf16 context:
   - Activations are read as they are, and parameters through their bfloat16 twin. A float
     array without a twin is first rounded to bfloat16 in scratch memory.
   - If both operands are float, the GEMM is computed in float.
   - A weight gradient is computed from bfloat16 inputs, summed in float and added to
     the float gradient.

   Plans. A plan describes one kind of GEMM to cublasLt: descriptors, layouts and the
   chosen algorithm. It is created when the kind first occurs, and is then kept. The
   algorithm determines the order of sums and thus the last bits of the result. By
   default it is the first choice of the heuristic, which depends only on the kind of
   GEMM, the GPU and the version of cublasLt. With g->tune = 1, the first eight choices
   are timed and the fastest is used. That can be faster, but another process may choose
   another algorithm.

   Repeatability. "All cuBLAS API routines from a given toolkit version, generate the
   same bit-wise results at every run when executed on GPUs with the same architecture
   and the same number of SMs" (Results Reproducibility), given a separate workspace per
   stream. When cublasLt splits K, only the reduction scheme COMPUTE_TYPE is allowed
   ("intermediate results are stored in compute type in the workspace and reduced in a
   separate step"). INPLACE does not fix the order of additions, and OUTPUT_TYPE would
   round partial sums to bfloat16. For weight gradients, seqtx splits K itself before it
   calls cublasLt; see "Split K" below. */

/* Identifies a kind of GEMM. Keys are compared as bytes, so zero the struct first. */
typedef struct stx__plan_key {
    size_t batch, M, N, K, lda, ldb, ldc, sa, sb, sc;
    int ta, tb, half_in, half_out, epilogue, tf32, beta0;
    int align_a, align_b, align_c;
} stx__plan_key;

typedef struct stx__plan {
    stx__plan_key key;
    cublasLtMatmulDesc_t op;
    cublasLtMatrixLayout_t a, b, c; /* layouts of A, B and C; cublasLt's A is our B */
    cublasLtMatmulAlgo_t algo;
    size_t workspace;               /* bytes of workspace that the algorithm uses */
    int plain;                      /* 1: cublasLt has no algorithm or refused the call;
                                       use stx__gemm_plain */
    struct stx__plan *next;
} stx__plan;

/* STX__PLAN_SLOTS is the size of the plan hash table. STX__CANDIDATES is the number of
   algorithms requested from the heuristic. */
enum { STX__PLAN_SLOTS = 512, STX__CANDIDATES = 8 };

typedef struct stx__plans {
    stx__plan *slot[STX__PLAN_SLOTS];
    size_t count;
    void *workspace;
} stx__plans;

/* Workspace size. The documentation of cublasSetWorkspace recommends 32 MiB on Hopper.
   tests/cuda_host uses a small workspace, because each of its pages adds to the time of
   every launch there. */
#ifndef CUDA_HOST
  #define STX__WORKSPACE ((size_t)32 << 20)
#else
  #define STX__WORKSPACE ((size_t)1 << 18)
#endif

/* The arguments of one call that are not part of its plan key */
typedef struct stx__operands {
    const void *A, *B, *bias;
    void *C;
    float alpha, beta;
} stx__operands;

static void stx__plan_free(stx__plan *p) {
    if (p->a) cublasLtMatrixLayoutDestroy(p->a);
    if (p->b) cublasLtMatrixLayoutDestroy(p->b);
    if (p->c) cublasLtMatrixLayoutDestroy(p->c);
    if (p->op) cublasLtMatmulDescDestroy(p->op);
    free(p);
}

/* Called by stx_cuda_open. Creates the cublasLt handle and the workspace. Returns 1, or
   sets an error and returns 0. */
static int stx__gemm_open(stx_ctx *x, stx_gpu *g) {
    stx__plans *p = (stx__plans *)calloc(1, sizeof *p);
    cublasStatus_t s;
    if (!p) {
        stx_fail(x, STX_ERR_MEMORY, "stx_create: out of host memory");
        return 0;
    }
    g->plans = p;
    s = cublasLtCreate(&g->lt);
    if (s != CUBLAS_STATUS_SUCCESS) {
        g->lt = NULL;
        stx_fail(x, STX_ERR_DEVICE,
                 "stx_create: cublasLt error %s on %s: check that libcublasLt matches the driver "
                 "(nvidia-smi)",
                 cublasLtGetStatusName(s), g->name);
        return 0;
    }
    if (cudaMalloc(&p->workspace, STX__WORKSPACE) != cudaSuccess) {
        (void)cudaGetLastError();
        p->workspace = NULL;
        stx_fail(x, STX_ERR_MEMORY,
                 "stx_create: cannot allocate %zu KiB on %s for the cublasLt workspace: another "
                 "program may be using the GPU",
                 STX__WORKSPACE >> 10, g->name);
        return 0;
    }
    g->bytes += STX__WORKSPACE;
    return 1;
}

/* Called by stx_cuda_close. Frees the plans, the workspace and the handle. The device
   must be idle. */
static void stx__gemm_close(stx_gpu *g) {
    stx__plans *p = g->plans;
    if (!p) return;
    for (size_t i = 0; i < STX__PLAN_SLOTS; i++)
        while (p->slot[i]) {
            stx__plan *next = p->slot[i]->next;
            stx__plan_free(p->slot[i]);
            p->slot[i] = next;
        }
    if (p->workspace) (void)cudaFree(p->workspace);
    if (g->lt) (void)cublasLtDestroy(g->lt);
    free(p);
    g->plans = NULL;
    g->lt = NULL;
}

static void stx__lt_fail(stx_ctx *x, const char *what, cublasStatus_t s, const stx__plan_key *k) {
    stx_fail(x, STX_ERR_DEVICE,
             "%s: cublasLt error %s for a GEMM (%zu,%zu) x (%zu,%zu) with batch size %zu, %s "
             "inputs and %s output, on %s: all results of this step are invalid; destroy the "
             "context and resume from the last checkpoint",
             what, cublasLtGetStatusName(s), k->M, k->K, k->K, k->N, k->batch,
             k->half_in ? "bf16" : "f32", k->half_out ? "bf16" : "f32", stx__gpu(x)->name);
}

/* Makes the call unless an earlier call of the sequence has failed. `s` holds the
   status of the sequence. */
#define STX__LT(s, call) \
  do { \
    if ((s) == CUBLAS_STATUS_SUCCESS) (s) = (call); \
  } while (0)

/* Like STX__LT, for calls that set an attribute of a GEMM descriptor, a layout or a
   preference */
#define STX__LT_SET_OP(s, op, attribute, value) \
  STX__LT(s, cublasLtMatmulDescSetAttribute(op, CUBLASLT_MATMUL_DESC_##attribute, &(value), \
                                            sizeof(value)))
#define STX__LT_SET_LAYOUT(s, layout, attribute, value) \
  STX__LT(s, cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_##attribute, \
                                              &(value), sizeof(value)))
#define STX__LT_SET_PREF(s, pref, attribute, value) \
  STX__LT(s, cublasLtMatmulPreferenceSetAttribute(pref, CUBLASLT_MATMUL_PREF_##attribute, \
                                                  &(value), sizeof(value)))

/* Creates the layout of a row-major matrix (rows,cols), described as a column-major
   matrix (cols,rows). */
static cublasStatus_t stx__layout(cublasLtMatrixLayout_t *l, int half, size_t rows, size_t cols,
                                  size_t ld, size_t batch, size_t stride) {
    cublasStatus_t s = cublasLtMatrixLayoutCreate(l, half ? CUDA_R_16BF : CUDA_R_32F, cols, rows,
                                                  (int64_t)ld);
    int32_t count = (int32_t)batch;
    int64_t step = (int64_t)stride;
    if (batch > 1) {
        STX__LT_SET_LAYOUT(s, *l, BATCH_COUNT, count);
        STX__LT_SET_LAYOUT(s, *l, STRIDED_BATCH_OFFSET, step);
    }
    return s;
}

/* Runs a plan with the given algorithm: D = alpha op(A) op(B) + beta C. */
static cublasStatus_t stx__lt_run(stx_gpu *g, const stx__plan *p, const stx__operands *o,
                                  const cublasLtMatmulAlgo_t *algo, size_t workspace, void *D) {
    void *memory = workspace ? g->plans->workspace : NULL;
    cublasStatus_t s = CUBLAS_STATUS_SUCCESS;
    if (o->bias) STX__LT_SET_OP(s, p->op, BIAS_POINTER, o->bias);
    (void)cudaSetDevice(g->index);
    STX__LT(s, cublasLtMatmul(g->lt, p->op, &o->alpha, o->B, p->b, o->A, p->a, &o->beta, o->C, p->c,
                              D, p->c, algo, memory, workspace, g->stream));
    return s;
}

/* Returns the best time in ms of up to three runs after a warm-up run, or -1 if none
   could be timed. */
static float stx__plan_time(stx_gpu *g, const stx__plan *p, const stx__operands *o,
                            const cublasLtMatmulHeuristicResult_t *r, cudaEvent_t from,
                            cudaEvent_t to, void *D) {
    float best = -1, ms;
    if (r->state != CUBLAS_STATUS_SUCCESS || r->workspaceSize > STX__WORKSPACE) return -1;
    for (int run = 0; run < 4; run++) {
        if (cudaEventRecord(from, g->stream) != cudaSuccess) break;
        if (stx__lt_run(g, p, o, &r->algo, r->workspaceSize, D) != CUBLAS_STATUS_SUCCESS) break;
        if (cudaEventRecord(to, g->stream) != cudaSuccess || cudaEventSynchronize(to) != cudaSuccess
            || cudaEventElapsedTime(&ms, from, to) != cudaSuccess)
            break;
        if (run && (best < 0 || ms < best)) best = ms;
    }
    return best;
}

/* Returns the index of the fastest of n candidates, or -1 if none could be timed. Timed
   runs write to separate memory, because the result must be added to C only once. */
static int stx__plan_fastest(stx_gpu *g, const stx__plan *p, const stx__operands *o,
                             const cublasLtMatmulHeuristicResult_t *r, int n) {
    const stx__plan_key *k = &p->key;
    size_t bytes = ((k->batch - 1) * k->sc + (k->M - 1) * k->ldc + k->N) * (k->half_out ? 2 : 4);
    cudaEvent_t from = NULL, to = NULL;
    void *D = NULL;
    float best = -1;
    int choice = -1;
    if (cudaMalloc(&D, bytes) != cudaSuccess || cudaEventCreate(&from) != cudaSuccess
        || cudaEventCreate(&to) != cudaSuccess)
        n = 0;
    for (int i = 0; i < n; i++) {
        float ms = stx__plan_time(g, p, o, &r[i], from, to, D);
        if (ms < 0 || (choice >= 0 && ms >= best)) continue;
        best = ms;
        choice = i;
    }
    if (from) cudaEventDestroy(from);
    if (to) cudaEventDestroy(to);
    (void)cudaStreamSynchronize(g->stream);
    if (D) (void)cudaFree(D);
    (void)cudaGetLastError(); /* clear the error of a candidate that failed */
    return choice;
}

/* Creates the descriptor of the GEMM and the layouts of its matrices. */
static cublasStatus_t stx__plan_describe(stx__plan *p, const stx__operands *o) {
    const stx__plan_key *k = &p->key;
    cublasOperation_t op_a = k->ta ? CUBLAS_OP_T : CUBLAS_OP_N,
                      op_b = k->tb ? CUBLAS_OP_T : CUBLAS_OP_N;
    cublasLtEpilogue_t epilogue = (cublasLtEpilogue_t)k->epilogue;
    cudaDataType_t bias = k->half_out ? CUDA_R_16BF : CUDA_R_32F;
    cublasComputeType_t compute = k->tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
    cublasStatus_t s = cublasLtMatmulDescCreate(&p->op, compute, CUDA_R_32F);
    STX__LT_SET_OP(s, p->op, TRANSA, op_b);
    STX__LT_SET_OP(s, p->op, TRANSB, op_a);
    STX__LT_SET_OP(s, p->op, EPILOGUE, epilogue);
    if (o->bias) {
        STX__LT_SET_OP(s, p->op, BIAS_DATA_TYPE, bias);
        STX__LT_SET_OP(s, p->op, BIAS_POINTER, o->bias);
    }
    STX__LT(s, stx__layout(&p->a, k->half_in, k->ta ? k->K : k->M, k->ta ? k->M : k->K, k->lda,
                           k->batch, k->sa));
    STX__LT(s, stx__layout(&p->b, k->half_in, k->tb ? k->N : k->K, k->tb ? k->K : k->N, k->ldb,
                           k->batch, k->sb));
    STX__LT(s, stx__layout(&p->c, k->half_out, k->M, k->N, k->ldc, k->batch, k->sc));
    return s;
}

/* Requests up to STX__CANDIDATES algorithms from the heuristic and stores them in r, best
   first. *n receives their number, which is 0 if cublasLt does not support this GEMM. */
static cublasStatus_t stx__plan_candidates(stx_gpu *g, const stx__plan *p,
                                           cublasLtMatmulHeuristicResult_t *r, int *n) {
    const stx__plan_key *k = &p->key;
    cublasLtMatmulPreference_t pref = NULL;
    uint32_t schemes = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    uint32_t align_a = (uint32_t)k->align_a, align_b = (uint32_t)k->align_b,
             align_c = (uint32_t)k->align_c;
    uint64_t workspace = STX__WORKSPACE;
    cublasStatus_t s = cublasLtMatmulPreferenceCreate(&pref);
    *n = 0;
    STX__LT_SET_PREF(s, pref, MAX_WORKSPACE_BYTES, workspace);
    STX__LT_SET_PREF(s, pref, REDUCTION_SCHEME_MASK, schemes);
    STX__LT_SET_PREF(s, pref, MIN_ALIGNMENT_A_BYTES, align_b);
    STX__LT_SET_PREF(s, pref, MIN_ALIGNMENT_B_BYTES, align_a);
    STX__LT_SET_PREF(s, pref, MIN_ALIGNMENT_C_BYTES, align_c);
    STX__LT_SET_PREF(s, pref, MIN_ALIGNMENT_D_BYTES, align_c);
    if (s == CUBLAS_STATUS_SUCCESS) {
        s = cublasLtMatmulAlgoGetHeuristic(g->lt, p->op, p->b, p->a, p->c, p->c, pref,
                                           STX__CANDIDATES, r, n);
        if (s == CUBLAS_STATUS_NOT_SUPPORTED) {
            s = CUBLAS_STATUS_SUCCESS;
            *n = 0;
        }
    }
    if (pref) cublasLtMatmulPreferenceDestroy(pref);
    return s;
}

/* Fills in a plan whose key has been set. */
static cublasStatus_t stx__plan_make(stx_gpu *g, stx__plan *p, const stx__operands *o) {
    cublasLtMatmulHeuristicResult_t r[STX__CANDIDATES];
    int i, n = 0, choice = -1;
    cublasStatus_t s;
    if (g->tune == -1 || (g->tune == -2 && p->key.epilogue != CUBLASLT_EPILOGUE_DEFAULT)) {
        p->plain = 1;
        return CUBLAS_STATUS_SUCCESS;
    }
    s = stx__plan_describe(p, o);
    STX__LT(s, stx__plan_candidates(g, p, r, &n));
    if (s != CUBLAS_STATUS_SUCCESS) return s;

    if (n > 1 && g->tune > 0 && !g->capturing) choice = stx__plan_fastest(g, p, o, r, n);
    for (i = 0; i < n && choice < 0; i++)
        if (r[i].state == CUBLAS_STATUS_SUCCESS && r[i].workspaceSize <= STX__WORKSPACE) choice = i;
    p->plain = choice < 0;
    if (!p->plain) {
        p->algo = r[choice].algo;
        p->workspace = r[choice].workspaceSize;
    }
    return s;
}

/* Returns nonzero if cublasLt rejected the request itself before anything ran. It
   rejects the same request every time, so the plan is marked plain and runs still
   repeat bit-exactly. Any other error may mean that memory is exhausted or the device
   has failed. */
static int stx__lt_refused(cublasStatus_t s) {
    if (s != CUBLAS_STATUS_NOT_SUPPORTED && s != CUBLAS_STATUS_INVALID_VALUE
        && s != CUBLAS_STATUS_ARCH_MISMATCH)
        return 0;
    (void)cudaGetLastError(); /* clear any error that the next launch would report */
    return 1;
}

/* Returns the plan for this key and creates it if necessary. If this fails, sets an
   error and returns NULL. */
static stx__plan *stx__plan_of(stx_ctx *x, const char *what, const stx__plan_key *key,
                               const stx__operands *o) {
    stx_gpu *g = stx__gpu(x);
    stx__plans *all = g->plans;
    const unsigned char *bytes = (const unsigned char *)key;
    uint64_t h = 14695981039346656037u;
    stx__plan *p;
    cublasStatus_t s;
    for (size_t i = 0; i < sizeof *key; i++) h = (h ^ bytes[i]) * 1099511628211u;
    h = (h ^ h >> 32) % STX__PLAN_SLOTS;
    for (p = all->slot[h]; p; p = p->next)
        if (!memcmp(&p->key, key, sizeof *key)) return p;

    p = (stx__plan *)calloc(1, sizeof *p);
    if (!p) {
        stx_fail(x, STX_ERR_MEMORY, "%s: out of host memory for a GEMM plan", what);
        return NULL;
    }
    memcpy(&p->key, key, sizeof *key); /* copies padding too, unlike an assignment */
    /* timing waits for earlier work, which may itself be waiting for other ranks */
    if (g->group && g->tune == 1 && !g->capturing && !stx__wait(x, g, g->stream, NULL, what)) {
        stx__plan_free(p);
        return NULL;
    }
    s = stx__plan_make(g, p, o);
    if (stx__lt_refused(s)) {
        p->plain = 1;
    } else if (s != CUBLAS_STATUS_SUCCESS) {
        stx__plan_free(p);
        stx__lt_fail(x, what, s, key);
        return NULL;
    }
    p->next = all->slot[h];
    all->slot[h] = p;
    all->count++;
    return p;
}

/* Runs the GEMM with its plan, unless the plan is plain or becomes plain because cublasLt
   refuses the call. Returns the plan. If the GEMM failed, sets an error and returns
   NULL. */
static stx__plan *stx__lt_try(stx_ctx *x, const char *what, const stx__plan_key *key,
                              const stx__operands *o) {
    stx_gpu *g = stx__gpu(x);
    stx__plan *p = stx__plan_of(x, what, key, o);
    cublasStatus_t s;
    if (!p || p->plain) return stx_ok(x) ? p : NULL;
    s = stx__lt_run(g, p, o, &p->algo, p->workspace, o->C);
    if (s == CUBLAS_STATUS_SUCCESS || stx__capture_lost(g)) return p;
    if (stx__lt_refused(s)) {
        p->plain = 1;
        return p;
    }
    stx__lt_fail(x, what, s, key);
    return NULL;
}


/* ---- src/cuda/gemm.cuh ---- */
// >>gemm: kernels and calls

/* C (batch,M,N) = beta C, with row stride ldc and matrix stride sc; rows = batch * M.
   beta = 0 writes 0 even if C contains NaN. beta = 1 updates the twin of a parameter that
   cublasLt has written. A block handles a row at a time, a thread every 256th column. */
STX__GLOBAL(256)
stx__scale_kernel(stx__array C, size_t ldc, size_t sc, size_t M, size_t N, size_t rows,
                  float beta) {
    for (size_t row = blockIdx.x; row < rows; row += gridDim.x) {
        size_t at = row / M * sc + row % M * ldc;
        for (size_t j = threadIdx.x; j < N; j += blockDim.x)
            stx__put(C, at + j, beta == 0 ? 0 : beta * stx__get(C, at + j));
    }
}

/* `to` (rows,cols) = `a` (batch,each,cols), converted to the type of `to`;
   rows = batch * each. ldt and lda are row strides, sa is the matrix stride of `a`. A
   block handles a row at a time, a thread every 256th column. */
STX__GLOBAL(256)
stx__pack_kernel(stx__array to, size_t ldt, stx__array a, size_t lda, size_t sa, size_t each,
                 size_t cols, size_t rows) {
    for (size_t row = blockIdx.x; row < rows; row += gridDim.x) {
        size_t at = row / each * sa + row % each * lda;
        for (size_t j = threadIdx.x; j < cols; j += blockDim.x)
            stx__put(to, row * ldt + j, stx__get(a, at + j));
    }
}

/* C (M,N) = alpha op(A) op(B) + beta C for each matrix of a batch, then adds bias (N)
   and applies ReLU if they are requested. Supports all types, strides and alignments;
   used if cublasLt has no algorithm. A block of 256 threads computes a tile of 64 x 64,
   4 x 4 elements per thread, and loads slabs of 16 along K into shared memory. Each
   element is one sum over K in order. */
enum { STX__GEMM_TILE = 64, STX__GEMM_SLAB = 16, STX__GEMM_LD = STX__GEMM_TILE + 1 };

struct stx__gemm_nums {
    stx__array A, B, C, bias; /* as in stx_gemm_args; bias.p may be NULL */
    size_t batch, M, N, K, lda, ldb, ldc, sa, sb, sc;
    int ta, tb, relu, zero; /* `zero` fills the padding, so that every byte is initialised */
    float alpha, beta;
};

/* Copies element q of a slab (16,64) of op(A) or op(B) to `tile`. The slab begins at k0
   along K and at m0 along the other dimension M. Elements outside [0,K) x [0,M) become
   0. k_last is nonzero if K is the last dimension of the matrix, which has row stride
   ld. In either case, threads with adjacent q read adjacent elements. */
static __device__ __forceinline__ void stx__gemm_load(float *tile, const stx__array &A,
                                                      size_t start, size_t ld, int k_last,
                                                      size_t k0, size_t K, size_t m0, size_t M,
                                                      int q) {
    const int k = k_last ? q % STX__GEMM_SLAB : q / STX__GEMM_TILE,
              m = k_last ? q / STX__GEMM_SLAB : q % STX__GEMM_TILE;
    const size_t kk = k0 + (size_t)k, mm = m0 + (size_t)m;
    const size_t at = start + (k_last ? mm * ld + kk : kk * ld + mm);
    tile[k * STX__GEMM_LD + m] = kk < K && mm < M ? stx__get(A, at) : 0;
}

STX__HOST_UNROLLED STX__GLOBAL(256) stx__gemm_plain_kernel(stx__gemm_nums g) {
    const stx__array A = g.A, B = g.B, C = g.C, bias = g.bias;
    const size_t batch = g.batch, M = g.M, N = g.N, K = g.K, lda = g.lda, ldb = g.ldb, ldc = g.ldc,
                 sa = g.sa, sb = g.sb, sc = g.sc;
    const int ta = g.ta, tb = g.tb, relu = g.relu;
    const float alpha = g.alpha, beta = g.beta;
    STX__SHARED(float, as, STX__GEMM_SLAB *STX__GEMM_LD);
    STX__SHARED(float, bs, STX__GEMM_SLAB *STX__GEMM_LD);
    const size_t across = (N + STX__GEMM_TILE - 1) / STX__GEMM_TILE,
                 tiles = (M + STX__GEMM_TILE - 1) / STX__GEMM_TILE * across;
    const int t = (int)threadIdx.x, tx = t % 16, ty = t / 16;
    for (size_t job = blockIdx.x; job < tiles * batch; job += gridDim.x) {
        const size_t e = job / tiles, m0 = job % tiles / across * STX__GEMM_TILE,
                     n0 = job % tiles % across * STX__GEMM_TILE;
        const bool inside = m0 + (size_t)ty < M && n0 + (size_t)tx < N;
        float s[4][4] = {{0}};
        for (size_t k0 = 0; k0 < K; k0 += STX__GEMM_SLAB) {
            for (int q = t; q < STX__GEMM_TILE * STX__GEMM_SLAB; q += 256) {
                stx__gemm_load(as, A, e * sa, lda, !ta, k0, K, m0, M, q);
                stx__gemm_load(bs, B, e * sb, ldb, tb, k0, K, n0, N, q);
            }
            __syncthreads();
            for (int k = 0; k < STX__GEMM_SLAB && inside; k++) {
                float a[4], b[4];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    a[i] = as[k * STX__GEMM_LD + ty + 16 * i];
                    b[i] = bs[k * STX__GEMM_LD + tx + 16 * i];
                }
#pragma unroll
                for (int i = 0; i < 4; i++)
#pragma unroll
                    for (int j = 0; j < 4; j++) s[i][j] = fmaf(a[i], b[j], s[i][j]);
            }
            __syncthreads();
        }

#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int j = 0; j < 4; j++) {
                size_t m = m0 + (size_t)(ty + 16 * i), n = n0 + (size_t)(tx + 16 * j),
                       at = e * sc + m * ldc + n;
                if (m < M && n < N) {
                    float v = beta == 0 ? alpha * s[i][j]
                                        : fmaf(alpha, s[i][j], beta * stx__get(C, at));
                    if (bias.p) v += stx__get(bias, n);
                    stx__put(C, at, relu && v < 0 ? 0 : v);
                }
            }
    }
}

static void stx__gemm_plain(stx_ctx *x, const char *what, const stx__gemm_nums *g) {
    size_t tiles = (g->M + STX__GEMM_TILE - 1) / STX__GEMM_TILE
                   * ((g->N + STX__GEMM_TILE - 1) / STX__GEMM_TILE) * g->batch;
    STX__RUN_KERNEL(x, what, stx__gemm_plain_kernel, stx__blocks(tiles, 1, 1u << 30), 256, 0, *g);
}

/* An operand, and the form in which the GEMM reads it */
typedef struct stx__operand {
    stx__array v;
    size_t rows, cols, ld, stride;
    size_t count;       /* number of matrices in the batch; 1 if the batch shares one matrix */
    int pack;           /* 1: the operand is first copied to scratch memory */
    int half;           /* 1: the GEMM reads the operand as bfloat16; 0: as float */
} stx__operand;

static stx__operand stx__operand_of(const stx_ctx *x, const stx_real *p, size_t rows, size_t cols,
                                    size_t ld, size_t stride, size_t batch) {
    stx__operand o;
    o.v = stx__array_of(x, p);
    o.rows = rows;
    o.cols = cols;
    o.ld = rows > 1 ? ld : cols; /* cublasLt requires ld >= cols even for a single row */
    o.stride = batch > 1 ? stride : 0;
    o.count = o.stride ? batch : 1;
    o.pack = o.half = 0;
    return o;
}

/* Decides whether the GEMM reads the operand itself, its twin or a copy. The GEMM
   requires elements in bfloat16 (if `half` is nonzero) or float, aligned to `align`
   bytes. */
static void stx__operand_as(stx__operand *o, int half, size_t align) {
    if (half && o->v.twin) {
        o->v.p = o->v.twin;
        o->v.half = 1;
    }
    o->v.twin = NULL;
    o->half = half;
    o->pack = o->v.p && (o->v.half != half || (uintptr_t)o->v.p % align);
}

/* Returns the row stride of a copy: a multiple of 16 bytes, as tensor cores require. */
static size_t stx__packed_ld(const stx__operand *o) {
    return (o->cols + 7) / 8 * 8;
}

/* Returns the size of the copy in bytes, rounded up to the alignment of the next copy, or
   0 if the operand is not copied. */
static size_t stx__packed_bytes(const stx__operand *o) {
    const size_t bytes = o->count * o->rows * stx__packed_ld(o) * (o->half ? 2 : 4);
    return o->pack ? (bytes + 255) / 256 * 256 : 0;
}

static void stx__pack(stx_ctx *x, const char *what, stx__operand *o, char *to) {
    const size_t rows = o->count * o->rows, ld = stx__packed_ld(o);
    stx__array t = {to, NULL, o->half};
    if (!o->pack) return;
    STX__RUN_KERNEL(x, what, stx__pack_kernel, stx__blocks(rows, 1, 4096), 256, 0, t, ld, o->v,
                    o->ld, o->stride, o->rows, o->cols, rows);
    o->v = t;
    o->ld = ld;
    if (o->stride) o->stride = o->rows * ld;
}

/* Returns the alignment that is reported to cublasLt for an operand: the largest power
   of two, up to 16 bytes (the widest access of a thread), that divides the address of
   every row. Because of the limit, a tensor that moves within its arena keeps its plan,
   and thus its exact results. */
static int stx__alignment(const void *p, int half, size_t rows, size_t ld, size_t stride) {
    const size_t size = half ? 2 : 4;
    const uintptr_t a = (uintptr_t)p | (rows > 1 ? ld * size : 0) | stride * size | 16;
    return (int)(a & (0 - a));
}

/* A GEMM prepared for cublasLt: its operands and sizes. The batch may have been merged
   into M or K. */
typedef struct stx__lt_job {
    const stx_gemm_args *g;
    size_t batch, M, N, K;
    stx__operand a, b, bias;
    stx__array c;
    int half;           /* 1: A and B are read as bfloat16 */
} stx__lt_job;

/* Decides how the operands are read and copies those that cannot be read in place. If all
   matrices of the batch are summed into one C, the batch becomes part of K, so all rows
   must have the same stride. Returns 1, or sets an error and returns 0. */
static int stx__lt_operands(stx_ctx *x, const char *what, stx__lt_job *j, const stx_real *bias) {
    const stx_gemm_args *g = j->g;
    const int one_c = j->batch > 1 && !g->sc;
    const size_t M = j->M, N = j->N, K = j->K;
    size_t bytes_a, bytes_b, bytes_bias;
    char *copies;
    j->a = stx__operand_of(x, g->A, g->ta ? K : M, g->ta ? M : K, g->lda, g->sa, j->batch);
    j->b = stx__operand_of(x, g->B, g->tb ? N : K, g->tb ? K : N, g->ldb, g->sb, j->batch);
    j->bias = stx__operand_of(x, bias, 1, N, N, 0, 1);
    j->half = j->a.v.half || j->a.v.twin || j->b.v.half || j->b.v.twin || j->c.half;
    stx__operand_as(&j->a, j->half, 1);
    stx__operand_as(&j->b, j->half, 1);
    stx__operand_as(&j->bias, j->c.half, 16);
    if (one_c) {
        j->a.pack |= j->a.stride != j->a.rows * j->a.ld;
        j->b.pack |= j->b.stride != j->b.rows * j->b.ld;
    }

    bytes_a = stx__packed_bytes(&j->a);
    bytes_b = stx__packed_bytes(&j->b);
    bytes_bias = stx__packed_bytes(&j->bias);
    if (bytes_a + bytes_b + bytes_bias) {
        copies = (char *)stx__scratch_of(x, bytes_a + bytes_b + bytes_bias, what);
        if (!copies) return 0;
        stx__pack(x, what, &j->a, copies);
        stx__pack(x, what, &j->b, copies + bytes_a);
        stx__pack(x, what, &j->bias, copies + bytes_a + bytes_b);
    }
    if (one_c) {
        j->K *= j->batch;
        j->batch = 1;
        j->a.stride = j->b.stride = 0;
    }
    return 1;
}

/* Returns the stride in elements between the results of the K slices, see "Split K". */
static size_t stx__slice_stride(const stx_gemm_args *g) {
    return (g->M * g->N + 63) / 64 * 64;
}

static cublasLtEpilogue_t stx__epilogue(int bias, int relu) {
    if (relu) return bias ? CUBLASLT_EPILOGUE_RELU_BIAS : CUBLASLT_EPILOGUE_RELU;
    return bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
}

static stx__plan_key stx__plan_key_of(const stx_ctx *x, const stx__lt_job *j, size_t slices) {
    const stx_gemm_args *g = j->g;
    stx__plan_key key;
    memset(&key, 0, sizeof key);
    key.batch = j->batch;
    key.M = j->M;
    key.N = j->N;
    key.K = j->K;
    key.lda = j->a.ld;
    key.ldb = j->b.ld;
    key.ldc = j->M > 1 ? g->ldc : j->N;
    key.sa = j->a.stride;
    key.sb = j->b.stride;
    key.sc = j->batch > 1 ? g->sc : 0;
    if (slices > 1) {
        key.batch = slices;
        key.K = j->K / slices;
        key.sa = key.K * j->a.ld;
        key.sb = key.K * j->b.ld;
        key.sc = stx__slice_stride(g);
    }
    key.ta = !!g->ta;
    key.tb = !!g->tb;
    key.half_in = j->half;
    key.half_out = j->c.half;
    key.tf32 = stx__gpu(x)->tf32 && !j->half;
    key.beta0 = g->beta == 0;
    key.align_a = stx__alignment(j->a.v.p, j->half, j->a.rows, key.lda, key.sa);
    key.align_b = stx__alignment(j->b.v.p, j->half, j->b.rows, key.ldb, key.sb);
    key.align_c = stx__alignment(j->c.p, j->c.half, j->M, key.ldc, key.sc);
    return key;
}

/* Runs the GEMM with seqtx's kernel. */
static void stx__lt_plain(stx_ctx *x, const char *what, const stx__lt_job *j,
                          const stx__plan_key *key, int relu) {
    stx__gemm_nums p;
    p.A = j->a.v;
    p.B = j->b.v;
    p.C = j->c;
    p.bias = j->bias.v;
    p.batch = j->batch;
    p.M = j->M;
    p.N = j->N;
    p.K = j->K;
    p.lda = key->lda;
    p.ldb = key->ldb;
    p.ldc = key->ldc;
    p.sa = key->sa;
    p.sb = key->sb;
    p.sc = key->sc;
    p.ta = j->g->ta;
    p.tb = j->g->tb;
    p.relu = relu;
    p.zero = 0;
    p.alpha = j->g->alpha;
    p.beta = j->g->beta;
    stx__gemm_plain(x, what, &p);
}

/* The return values of stx__lt_gemm, which state what it has computed. After an error,
   the value is unspecified. */
enum {
    STX__LT_UNSPLIT = -1,   /* nothing: cublasLt cannot compute the slices; not an error */
    STX__LT_PRODUCT = 0,    /* all but bias and ReLU, which no algorithm can apply */
    STX__LT_DONE = 1        /* everything */
};

/* Runs the GEMM j with cublasLt, or with seqtx's kernel if cublasLt has no algorithm. */
static int stx__lt_run_job(stx_ctx *x, const char *what, stx__lt_job *j, const stx_real *bias,
                           int relu, size_t slices) {
    const int fuse = bias || relu;
    stx__plan_key key;
    stx__operands o;
    stx__plan *plan;
    if (!stx__lt_operands(x, what, j, bias)) return STX__LT_DONE;
    key = stx__plan_key_of(x, j, slices);
    key.epilogue = stx__epilogue(bias != NULL, relu);
    o.A = j->a.v.p;
    o.B = j->b.v.p;
    o.C = j->c.p;
    o.alpha = j->g->alpha;
    o.beta = j->g->beta;
    o.bias = j->bias.v.p;
    plan = stx__lt_try(x, what, &key, &o);
    if (plan && plan->plain && fuse) { /* try to find an algorithm without the epilogue */
        o.bias = NULL;
        key.epilogue = CUBLASLT_EPILOGUE_DEFAULT;
        plan = stx__lt_try(x, what, &key, &o);
    }
    if (!plan) return STX__LT_DONE;
    if (plan->plain && slices) return STX__LT_UNSPLIT;
    if (plan->plain) {
        stx__lt_plain(x, what, j, &key, relu);
        return STX__LT_DONE;
    }
    if (j->c.twin)
        STX__RUN_KERNEL(x, what, stx__scale_kernel, stx__blocks(j->batch * j->M, 1, 4096), 256, 0,
                        j->c, key.ldc, key.sc, j->M, j->N, j->batch * j->M, 1.0f);
    return key.epilogue != CUBLASLT_EPILOGUE_DEFAULT || !fuse ? STX__LT_DONE : STX__LT_PRODUCT;
}

/* Runs the GEMM g. With bias (N) or relu, also computes C = relu(C + bias) in the same
   pass. If the bias does not have C's type and an alignment of 16 bytes, it is copied:
   "cuBLASLt's alignment preferences cover A, B, C, D but not the epilogue bias pointer,
   so the heuristic can pick a kernel that assumes 16-byte bias alignment"
   (pytorch/pytorch 194497).

   If slices > 0, g is one GEMM A^T B, or a batch of such GEMMs whose results are summed
   into one C. In the second case, K includes the batch. K is split into `slices` equal
   parts, one GEMM each. The results of these GEMMs are stored at a stride of
   stx__slice_stride elements. */
static int stx__lt_gemm(stx_ctx *x, const char *what, const stx_gemm_args *g, const stx_real *bias,
                        int relu, size_t slices) {
    const int fuse = bias || relu, one_c = g->batch > 1 && !g->sc;
    stx__lt_job j;
    if (!stx_ok(x) || !g->batch || !g->M || !g->N) return STX__LT_DONE;
    j.g = g;
    j.batch = g->batch;
    j.M = g->M;
    j.N = g->N;
    j.K = g->K;
    j.c = stx__array_of(x, g->C);

    if (!g->K || g->alpha == 0) { /* the result is C = beta C */
        const size_t rows = one_c ? g->M : g->batch * g->M;
        STX__RUN_KERNEL(x, what, stx__scale_kernel, stx__blocks(rows, 1, 4096), 256, 0, j.c, g->ldc,
                        g->sc, g->M, g->N, rows, (float)g->beta);
        return fuse ? STX__LT_PRODUCT : STX__LT_DONE;
    }
    if (one_c && (!g->ta || g->tb || !g->sa || !g->sb)) { /* runs one GEMM per matrix */
        stx_gemm_args one = *g;
        one.batch = 1;
        for (size_t e = 1; e < g->batch; e++) {
            stx__lt_gemm(x, what, &one, NULL, 0, 0);
            one.A = stx_offset_ptr(x, one.A, g->sa);
            one.B = stx_offset_ptr(x, one.B, g->sb);
            one.beta = 1;
        }
        return stx__lt_gemm(x, what, &one, bias, relu, 0);
    }
    if (g->batch > 1 && !g->ta && !g->sb && g->sa == g->M * g->lda && g->sc == g->M * g->ldc) {
        j.M *= g->batch; /* B is shared, so the batch is one GEMM with more rows */
        j.batch = 1;
    }
    if (j.M > INT32_MAX || j.N > INT32_MAX || j.K > INT32_MAX || j.batch > INT32_MAX
        || (one_c && j.batch > INT32_MAX / j.K)) {
        stx_fail(x, STX_ERR_ARG,
                 "%s: expected GEMM sizes of at most 2147483647 on a GPU, "
                 "got (%zu,%zu) x (%zu,%zu) with batch size %zu: use smaller batches",
                 what, j.M, j.K, j.K, j.N, j.batch);
        return STX__LT_DONE;
    }
    return stx__lt_run_job(x, what, &j, bias, relu, slices);
}

/* Split K. A weight gradient, dW (O,Ci) += dy^T (O,N) in (N,Ci), is a small matrix
   whose elements are long sums. A 512 x 512 matrix is 16 tiles of 128 x 128, which
   occupy an eighth of the multiprocessors of a GPU, while N is tens of thousands.
   Therefore K = N is split into slices: a batch of GEMMs of N / slices rows each writes
   to separate float buffers, and the slices are then added to dW in order
   (stx__slice_sums_kernel). The addition is deferred where possible, so that one launch
   finishes many sums. cublasLt can split K too (CUBLASLT_ALGO_CONFIG_SPLITK_NUM), but
   only if its heuristic chooses to, and with a separate launch per sum. Here the terms
   and their order depend on sizes alone, and a GEMM remains one node of the graph.

   stx__split_k_of returns the number of slices with the least estimated time. The unit is
   the time of a tile for one row of K (5.5 ns at 790 TFLOP/s on 132 multiprocessors):
   - Each wave of STX__SPLIT_TILES tiles takes one unit per row of a slice. (Large GPUs
     have 108 to 144 multiprocessors. A constant makes results independent of the number.)
   - The elements of all slices are written and read back, 3072 per unit (8 bytes each, at
     4.3 TB/s).
   - A launch takes 256 units, or 32 if it is shared by deferred sums.
   Slices have equal numbers of rows, at least STX__SPLIT_ROWS. Their results occupy at
   most STX__SPLIT_BYTES, half of the buffer for deferred slices. stx__split_k_of
   returns 1 if splitting would not be faster. */
enum {
    STX__SPLIT_TILES = 128,
    STX__SPLIT_ROWS = 256,
    STX__SPLIT_MOST = 64,
    STX__SPLIT_BYTES = 32 << 20
};

static size_t stx__split_k_of(size_t M, size_t N, size_t K, int deferred) {
    const size_t tiles = (M + 127) / 128 * ((N + 127) / 128), launch = deferred ? 32 : 256;
    size_t least = (tiles + STX__SPLIT_TILES - 1) / STX__SPLIT_TILES * K, best = 1, p;
    for (p = 2; p <= STX__SPLIT_MOST; p++) {
        size_t waves, cost;
        if (K / p < STX__SPLIT_ROWS || p * M * N * sizeof(float) > STX__SPLIT_BYTES) break;
        if (K % p) continue;
        waves = (tiles * p + STX__SPLIT_TILES - 1) / STX__SPLIT_TILES;
        cost = waves * (K / p) + p * M * N / 3072 + launch;
        if (cost < least) {
            least = cost;
            best = p;
        }
    }
    return best;
}

/* Computes the GEMM g in slices of K and adds the first `rows` rows of the result to C.
   If deferred is nonzero, the sum may be deferred. Returns 0 without setting an error if
   K cannot be split; the caller must then run a single GEMM. */
static int stx__lt_split_k(stx_ctx *x, const char *what, const stx_gemm_args *g, size_t rows,
                           size_t slices, int deferred) {
    stx_gpu *gpu = stx__use_gpu(x);
    struct stx__deferred_sums *t = gpu->deferred;
    const size_t stride = stx__slice_stride(g), bytes = slices * stride * sizeof(float),
                 n = rows * g->N;
    stx_gemm_args slice = *g;
    stx__slice_sum *s;
    int full;
    deferred = deferred && t->depth;
    if (bytes > STX__SLICES_BYTES) return 0;
    if (!stx__deferred_buffer(gpu, &t->slices_buffer, STX__SLICES_BYTES)) return 0;

    /* finish pending sums into the same array first, because sums must be added in call
       order */
    full = t->slices == STX__DEFERRED_MAX || t->slices_used + bytes > STX__SLICES_BYTES;
    for (int k = 0; k < t->slices; k++)
        full |= stx__overlap(g->C, n, t->slice.s[k].d.p, t->slice.s[k].n);
    if (full) stx__finish_slices(x);

    slice.C = (stx_real *)(void *)(t->slices_buffer + t->slices_used);
    slice.ldc = g->N;
    slice.beta = 0;
    if (stx__lt_gemm(x, what, &slice, NULL, 0, slices) == STX__LT_UNSPLIT) return 0;
    s = &t->slice.s[t->slices++];
    s->d = stx__array_of(x, g->C);
    s->part = (const float *)(const void *)slice.C;
    s->n = n;
    s->stride = stride;
    s->slices = slices;
    t->slices_used += bytes;
    if (!deferred) stx__finish_slices(x);
    return 1;
}

/* C += the first `rows` rows of the result of the GEMM g. If deferred is nonzero, C is
   a parameter gradient and the sum may be deferred. The remaining rows belong to padded
   logits. They are computed to keep the operands aligned, but are not added to C.
   Therefore the GEMM writes to the slice buffer even if there is only one slice. If C
   is too large for the buffer, only its last rows are computed this way. */
static void stx__lt_add(stx_ctx *x, const char *what, const stx_gemm_args *g, size_t rows,
                        int deferred) {
    stx_gpu *gpu = stx__use_gpu(x);
    stx_gemm_args part = *g;
    const stx__array c = stx__array_of(x, g->C);
    const size_t aligned = rows / 64 * 64, K = g->batch * g->K;
    const int one_c = g->batch == 1 || (!g->sc && g->sa && g->sb);
    size_t slices;
    if (stx_ok(x) && one_c && g->ta && !g->tb && g->beta == 1 && g->ldc == g->N && g->M && g->N && K
        && !c.half && !c.twin) {
        if (rows < g->M && aligned && g->M * g->N * sizeof(float) > STX__SLICES_BYTES) {
            part.M = aligned;
            stx__lt_add(x, what, &part, aligned, deferred);
            part.M = g->M - aligned;
            part.A = stx_offset_ptr(x, g->A, aligned);
            part.C = g->C + aligned * g->N;
            stx__lt_add(x, what, &part, rows - aligned, deferred);
            return;
        }
        slices = stx__split_k_of(g->M, g->N, K, deferred);
        if (gpu->split_k && K % (size_t)gpu->split_k == 0) slices = (size_t)gpu->split_k;
        if ((slices > 1 || rows < g->M) && stx__lt_split_k(x, what, g, rows, slices, deferred))
            return;
    }
    part.M = rows;
    stx__lt_gemm(x, what, &part, NULL, 0, 0);
}

void stx_gemm_cuda(stx_ctx *x, const stx_gemm_args *g) {
    stx__lt_add(x, "stx_gemm", g, g->M, 0);
}


/* ---- src/cuda/elementwise.cuh ---- */
// >>add, mul, scale

/* y (n) = a (n) + b (nb); b repeats n / nb times. A thread computes W adjacent
   elements at a time. */
template <int W>
STX__GLOBAL(256)
stx__add_kernel(stx__array y, stx__array a, stx__array b, size_t n, size_t nb) {
    STX__STEP(i, n, W) {
        float v[W], w[W];
        stx__getn<W>(v, a, i);
        stx__getn<W>(w, b, n == nb ? i : i % nb);
        for (int e = 0; e < W; e++) v[e] += w[e];
        stx__putn<W>(y, i, v);
    }
}

void stx_add_fwd_cuda(stx_ctx *x, stx_real *y, const stx_real *a, const stx_real *b, size_t n,
                      size_t nb) {
    stx__array Y = stx__array_of(x, y), A = stx__array_of(x, a), B = stx__array_of(x, b);
    const int four = nb % 4 == 0 && stx__aligned4(Y) && stx__aligned4(A) && stx__aligned4(B);
    if (n) STX__RUN_BY(x, "stx_add_fwd", four, stx__add_kernel, n, Y, A, B, n, nb);
}

/* y (n) = or += a (n) b (nb); b repeats n / nb times. In the backward pass, the kernel
   computes da = dy b and db = dy a. A thread computes W adjacent elements at a time. */
template <int W>
STX__GLOBAL(256)
stx__mul_kernel(stx__array y, stx__array a, stx__array b, size_t n, size_t nb, int accumulate) {
    STX__STEP(i, n, W) {
        float v[W], w[W];
        stx__getn<W>(v, a, i);
        stx__getn<W>(w, b, n == nb ? i : i % nb);
        for (int e = 0; e < W; e++) v[e] *= w[e];
        stx__addn<W>(y, i, v, accumulate);
    }
}

static void stx__mul_cuda(stx_ctx *x, const char *name, stx_real *y, const stx_real *a,
                          const stx_real *b, size_t n, size_t nb, int accumulate) {
    stx__array Y = stx__array_of(x, y), A = stx__array_of(x, a), B = stx__array_of(x, b);
    const int four = nb % 4 == 0 && stx__aligned4(Y) && stx__aligned4(A) && stx__aligned4(B);
    if (n) STX__RUN_BY(x, name, four, stx__mul_kernel, n, Y, A, B, n, nb, accumulate);
}

void stx_mul_fwd_cuda(stx_ctx *x, stx_real *y, const stx_real *a, const stx_real *b, size_t n,
                      size_t nb) {
    stx__mul_cuda(x, "stx_mul_fwd", y, a, b, n, nb, 0);
}

/* Gradients of y = a b:
       da = or += dy b
       db += dy a, summed over the repetitions of b (a column sum) */
void stx_mul_bwd_cuda(stx_ctx *x, const stx_mul_bwd_args *m) {
    static const char name[] = "stx_mul_bwd";
    const size_t n = m->n, nb = m->nb;
    if (m->da) stx__mul_cuda(x, name, m->da, m->dy, m->b, n, nb, m->accumulate);
    if (m->db && n == nb) {
        stx__mul_cuda(x, name, m->db, m->dy, m->a, n, n, 1);
    } else if (m->db && n) {
        stx__columns_args columns = stx__columns_init(m->db, m->dy, n / nb, nb);
        columns.f = m->a;
        stx__columns(x, name, &columns);
    }
}


// >>activations

/* expf, tanhf and normcdff are CUDA's accurate functions (1 to 5 ulp). NaN stays NaN.
   stx__phi is the CDF of the standard normal distribution. */
#ifdef CUDA_HOST
static inline float stx__phi(float v) {
    return (float)(0.5 * erfc(v * -0.70710678118654752440));
}
#else
static __device__ __forceinline__ float stx__phi(float v) {
    return normcdff(v);
}
#endif

static __device__ __forceinline__ float stx__act(float v, int act) {
    switch (act) {
    case STX_ACT_RELU: return v < 0 ? 0 : v;
    case STX_ACT_GELU: return v * stx__phi(v);
    case STX_ACT_TANH: return tanhf(v);
    case STX_ACT_SIGMOID: return 1 / (1 + expf(-v));
    default: return v;
    }
}

/* Returns g times act'(a), the slope at `a`. GELU reads `a`, and the other activations
   read y = act(a). */
static __device__ __forceinline__ float stx__act_slope(float g, float y, float a, int act) {
    switch (act) {
    case STX_ACT_RELU: return y > 0 ? g : 0;
    case STX_ACT_GELU:
        return g * fmaf(a, 0.39894228040143267794f * expf(-0.5f * a * a), stx__phi(a));
    case STX_ACT_TANH: return g * fmaf(-y, y, 1.0f);
    case STX_ACT_SIGMOID: return g * (y * (1 - y));
    default: return g;
    }
}

/* y (n) = act(a (n)); y may be `a`. A thread computes W adjacent elements at a time. */
template <int W>
STX__GLOBAL(256)
stx__act_fwd_kernel(stx__array y, stx__array a, size_t n, int act) {
    STX__STEP(i, n, W) {
        float v[W];
        stx__getn<W>(v, a, i);
        for (int e = 0; e < W; e++) v[e] = stx__act(v[e], act);
        stx__putn<W>(y, i, v);
    }
}

void stx_act_fwd_cuda(stx_ctx *x, stx_real *y, const stx_real *a, size_t n, int act) {
    stx__array Y = stx__array_of(x, y), A = stx__array_of(x, a);
    const int four = n % 4 == 0 && stx__aligned4(Y) && stx__aligned4(A);
    if (n) STX__RUN_BY(x, "stx_act_fwd", four, stx__act_fwd_kernel, n, Y, A, n, act);
}

/* Gradient of y = act(a): da (n) = or += dy act'(a). GELU reads `a`; the other
   activations read y. da may be dy. A thread computes W adjacent elements at a time. */
template <int W>
STX__GLOBAL(256)
stx__act_bwd_kernel(stx__array da, stx__array dy, stx__array y, stx__array a, size_t n, int act,
                    int accumulate) {
    STX__STEP(i, n, W) {
        float g[W], v[W] = {0}, u[W] = {0};
        stx__getn<W>(g, dy, i);
        if (act == STX_ACT_GELU)
            stx__getn<W>(u, a, i);
        else if (act)
            stx__getn<W>(v, y, i);
        for (int e = 0; e < W; e++) g[e] = stx__act_slope(g[e], v[e], u[e], act);
        stx__addn<W>(da, i, g, accumulate);
    }
}

void stx_act_bwd_cuda(stx_ctx *x, const stx_act_bwd_args *a) {
    const size_t n = a->n;
    stx__array D = stx__array_of(x, a->da), G = stx__array_of(x, a->dy), Y = stx__array_of(x, a->y),
               A = stx__array_of(x, a->act == STX_ACT_GELU ? a->a : NULL);
    const int four =
        n % 4 == 0 && stx__aligned4(D) && stx__aligned4(G) && stx__aligned4(Y) && stx__aligned4(A);
    if (n)
        STX__RUN_BY(x, "stx_act_bwd", four, stx__act_bwd_kernel, n, D, G, Y, A, n, a->act,
                    a->accumulate && a->da != a->dy);
}


// >>dropout

/* A dropout mask, bit-identical to the mask on the CPU. One Philox call returns 16 bits
   for each of 8 adjacent elements; an element is kept if its bits are below `keep`. */
typedef struct stx__dropout {
    uint64_t seed, stream;
    uint64_t first;         /* index of the Philox call for element 0 */
    const uint64_t *shift;  /* added to `stream`, see stx_gpu */
    uint32_t keep;          /* 65536 times the keep probability; 0: no dropout */
    float inv;              /* factor for kept elements, 65536 / keep */
} stx__dropout;

static stx__dropout stx__dropout_of(stx_ctx *x, stx_real p, uint64_t seed, uint64_t stream,
                                    uint64_t first) {
    stx__dropout d = {seed, stream, first, stx__gpu(x)->shift, 0, 1};
    if (p > 0) {
        double k = floor((1.0 - (double)p) * 65536.0 + 0.5);
        d.keep = (uint32_t)(k < 1 ? 1 : k);
        d.inv = (float)(65536.0 / d.keep);
    }
    return d;
}

static __device__ __forceinline__ uint64_t stx__dropout_stream(const stx__dropout &d) {
    return d.stream + *d.shift;
}

/* Returns the lower or upper half of a random word. */
static __device__ __forceinline__ uint32_t stx__half_word(uint32_t word, int upper) {
    return upper ? word >> 16 : word & 0xffffu;
}

/* Sets by[e] to the dropout factor of element i + e: 0 or d.inv. i is a multiple of W. */
template <int W>
static __device__ __forceinline__ void stx__dropout_mask(float (&by)[W], const stx__dropout &d,
                                                         uint64_t stream, size_t i) {
    uint4 r = stx__philox(d.seed, stream, d.first + (uint64_t)i / 8);
    uint32_t lo = i & 4 ? r.z : r.x, hi = i & 4 ? r.w : r.y;
    if constexpr (W == 4) {
        by[0] = (lo & 0xffffu) < d.keep ? d.inv : 0;
        by[1] = (lo >> 16) < d.keep ? d.inv : 0;
        by[2] = (hi & 0xffffu) < d.keep ? d.inv : 0;
        by[3] = (hi >> 16) < d.keep ? d.inv : 0;
    } else {
        uint32_t word = i & 2 ? hi : lo;
        by[0] = stx__half_word(word, i & 1) < d.keep ? d.inv : 0;
    }
}

/* y (n) = or += a (n) times the dropout factors, 0 or d.inv. A thread handles the 8
   elements of one Philox call, with W elements per memory access. */
template <int W>
STX__GLOBAL(256)
stx__dropout_kernel(stx__array y, stx__array a, size_t n, stx__dropout d, int accumulate) {
    uint64_t stream = stx__dropout_stream(d);
    STX__STEP(i, n, 8) {
        uint4 r = stx__philox(d.seed, stream, d.first + (uint64_t)i / 8);
        uint32_t bits[4] = {r.x, r.y, r.z, r.w};
#pragma unroll
        for (int e = 0; e < 8; e += W) {
            if (i + e < n) {
                float v[W];
                stx__getn<W>(v, a, i + e);
#pragma unroll
                for (int k = 0; k < W; k++) {
                    uint32_t word = stx__half_word(bits[(e + k) / 2], (e + k) & 1);
                    v[k] *= word < d.keep ? d.inv : 0;
                }
                stx__addn<W>(y, i + e, v, accumulate);
            }
        }
    }
}

void stx_dropout_fwd_cuda(stx_ctx *x, const stx_dropout_args *a) {
    const size_t n = a->n;
    stx__array Y = stx__array_of(x, a->y), A = stx__array_of(x, a->a);
    stx__dropout d = stx__dropout_of(x, a->p, a->seed, a->stream, a->first);
    const int four = n % 4 == 0 && stx__aligned4(Y) && stx__aligned4(A);
    if (!d.keep) d.keep = 65536; /* p = 0 keeps every element, as on the CPU */
    if (n)
        STX__CHOOSE(W, four ? 4 : 1, (1, 4),
                    STX__RUN_KERNEL(x, "stx_dropout_fwd", stx__dropout_kernel<W>,
                                    stx__grid(x, (n + 7) / 8), 256, 0, Y, A, n, d,
                                    a->accumulate));
}


// >>rezero

/* y (n) = h (n) + alpha (1) f (n), or alpha f if h.p is NULL. A thread computes W
   adjacent elements at a time. */
template <int W>
STX__GLOBAL(256)
stx__rezero_fwd_kernel(stx__array y, stx__array h, stx__array f, stx__array alpha, size_t n) {
    float s = stx__get(alpha, 0);
    STX__STEP(i, n, W) {
        float v[W] = {0}, w[W];
        if (h.p) stx__getn<W>(v, h, i);
        stx__getn<W>(w, f, i);
        for (int e = 0; e < W; e++) v[e] = fmaf(s, w[e], v[e]);
        stx__putn<W>(y, i, v);
    }
}

void stx_rezero_fwd_cuda(stx_ctx *x, stx_real *y, const stx_real *h, const stx_real *f,
                         const stx_real *alpha, size_t n) {
    stx__array Y = stx__array_of(x, y), H = stx__array_of(x, h), F = stx__array_of(x, f),
               A = stx__array_of(x, alpha);
    const int four = n % 4 == 0 && stx__aligned4(Y) && stx__aligned4(H) && stx__aligned4(F);
    if (n) STX__RUN_BY(x, "stx_rezero_fwd", four, stx__rezero_fwd_kernel, n, Y, H, F, A, n);
}

/* Gradient of y = h + alpha f: df (n) = or += alpha dy. stx__sum_cuda computes
   dalpha += sum of dy f. A thread computes W adjacent elements at a time. */
template <int W>
STX__GLOBAL(256)
stx__rezero_bwd_kernel(stx__array df, stx__array dy, stx__array alpha, size_t n, int accumulate) {
    float s = stx__get(alpha, 0);
    STX__STEP(i, n, W) {
        float v[W];
        stx__getn<W>(v, dy, i);
        for (int e = 0; e < W; e++) v[e] *= s;
        stx__addn<W>(df, i, v, accumulate);
    }
}

void stx_rezero_bwd_cuda(stx_ctx *x, const stx_rezero_bwd_args *r) {
    static const char name[] = "stx_rezero_bwd";
    const size_t n = r->n;
    stx__array D = stx__array_of(x, r->df), G = stx__array_of(x, r->dy),
               A = stx__array_of(x, r->alpha);
    const int four = n % 4 == 0 && stx__aligned4(D) && stx__aligned4(G);
    if (r->dalpha) stx__sum_cuda(x, name, STX__SUM_PRODUCTS, r->dalpha, r->dy, r->f, n, 1, 1);
    if (r->df && n)
        STX__RUN_BY(x, name, four, stx__rezero_bwd_kernel, n, D, G, A, n, r->accumulate);
}


/* ---- src/cuda/softmax.cuh ---- */
// >>softmax

/* Launches a kernel for N rows of C elements. `kernel` is an expression in T, the
   number of threads per row: 32, 256 or 1024, depending on C. */
#define STX__RUN_ROWS(x, name, N, C, kernel, ...) \
  STX__CHOOSE(T, stx__row_threads(C), (32, 256, 1024), \
              STX__RUN_KERNEL(x, name, kernel, \
                              stx__blocks(N, STX__ROW_BLOCK(T) / T, (size_t)1 << 30), \
                              STX__ROW_BLOCK(T), 0, __VA_ARGS__))

static int stx__row_threads(size_t C) {
    if (C <= 512) return 32;
    return C <= 32768 ? 256 : 1024;
}

/* The length of a row, such as a vocabulary size, need not be a multiple of 4. The
   elements [0, head) precede the first aligned group of 4; the elements after the last
   group are the tail. Returns `head` for the row of n elements at a[start]. */
static __device__ __forceinline__ size_t stx__row_head(const stx__array &a, size_t start,
                                                       size_t n) {
    size_t h = (size_t)(0 - ((uintptr_t)a.p / (a.half ? 2 : 4) + start)) & 3;
    return h < n ? h : n;
}

/* Returns nonzero if the rows of `a` and b have the same head, so that groups of 4 can
   be accessed in both. If not, kernels treat the whole row as the head. */
static __device__ __forceinline__ int stx__same_head(const stx__array &a, const stx__array &b) {
    return (((uintptr_t)a.p / (a.half ? 2 : 4)) & 3) == (((uintptr_t)b.p / (b.half ? 2 : 4)) & 3);
}

/* Elements of the head and the tail are numbered consecutively. Returns the position of
   element number i in the row. The row has `fours` groups of 4 between head and tail. */
static __device__ __forceinline__ size_t stx__row_edge(size_t i, size_t head, size_t fours) {
    return i < head ? i : i + 4 * fours;
}

/* Running maximum of the elements v seen so far, and the sum of e^(v - max) over them. A
   NaN does not become the maximum, but makes the sum NaN. */
typedef struct stx__lse {
    float max, sum;
} stx__lse;

template <int K>
static __device__ __forceinline__ void stx__lse_add(stx__lse &l, const float (&v)[K]) {
    float max = v[0];
#pragma unroll
    for (int e = 1; e < K; e++) max = fmaxf(max, v[e]);
    if (max > l.max) {
        l.sum *= expf(l.max - max);
        l.max = max;
    }
#pragma unroll
    for (int e = 0; e < K; e++) l.sum += v[e] == -HUGE_VALF ? 0 : expf(v[e] - l.max);
}

/* Computes the maximum and the sum of e^(v - max) of the n elements at a[start] in one
   pass. Returns the result in all T threads of the row. A thread loads four groups of 4
   before it uses the first. The threads' sums are rescaled to the common maximum and
   added in a fixed tree. If all elements are -infinity, the sum is NaN, because
   e^(v - max) is NaN. */
template <int T>
static __device__ __forceinline__ stx__lse stx__row_lse(const stx__array &a, size_t start, size_t n,
                                                        float *sh) {
    const size_t t = threadIdx.x % T, head = stx__row_head(a, start, n), fours = (n - head) / 4,
                 body = start + head;
    stx__lse l = {-HUGE_VALF, 0};
    float v[16], one[1], max;
    size_t i, q;
    if (t < head) {
        one[0] = stx__get(a, start + t);
        stx__lse_add(l, one);
    }

    for (q = t; q + 3 * T < fours; q += 4 * T) {
        float4 u[4];
#pragma unroll
        for (int e = 0; e < 4; e++) u[e] = stx__get4(a, body + 4 * (q + e * T));
#pragma unroll
        for (int e = 0; e < 4; e++) {
            v[4 * e] = u[e].x;
            v[4 * e + 1] = u[e].y;
            v[4 * e + 2] = u[e].z;
            v[4 * e + 3] = u[e].w;
        }
        stx__lse_add(l, v);
    }
    for (; q < fours; q += T) {
        float w[4];
        stx__getn<4>(w, a, body + 4 * q);
        stx__lse_add(l, w);
    }
    i = head + 4 * fours + t;
    if (i < n) {
        one[0] = stx__get(a, start + i);
        stx__lse_add(l, one);
    }

    max = stx__row_max<T>(l.max, sh);
    l.sum = stx__row_sum<T>(l.max == max ? l.sum : l.sum * expf(l.max - max), sh);
    if (max == -HUGE_VALF) l.sum = max - max;
    l.max = max;
    return l;
}

/* Returns one element of the result: e^(v - max) z, where z = 1 / sum. With LOG,
   returns v - max - z, where z = log(sum). */
template <int LOG>
static __device__ __forceinline__ float stx__softmax_of(float v, float max, float z) {
    return LOG ? v - max - z : expf(v - max) * z;
}

/* y (N,C) = softmax over the C elements of each row of a (N,C), or with LOG, its
   logarithm. y may be `a`. T threads handle a row in two passes: the first computes the
   maximum and the sum, the second the result. */
template <int T, int LOG>
STX__GLOBAL(STX__ROW_BLOCK(T))
stx__softmax_fwd_kernel(stx__array y, stx__array a, size_t N, size_t C) {
    STX__SHARED(float, sh, 32);
    STX__EACH_ROW(n, N, T) {
        const size_t start = n * C, t = threadIdx.x % T;
        stx__lse l = stx__row_lse<T>(a, start, C, sh);
        const size_t head = stx__same_head(y, a) ? stx__row_head(a, start, C) : C,
                     fours = (C - head) / 4;
        const float z = LOG ? logf(l.sum) : 1 / l.sum;
        for (size_t i = t; i < C - 4 * fours; i += T) {
            size_t j = start + stx__row_edge(i, head, fours);
            stx__put(y, j, stx__softmax_of<LOG>(stx__get(a, j), l.max, z));
        }
        for (size_t q = t; q < fours; q += T) {
            float v[4];
            stx__getn<4>(v, a, start + head + 4 * q);
            for (int e = 0; e < 4; e++) v[e] = stx__softmax_of<LOG>(v[e], l.max, z);
            stx__putn<4>(y, start + head + 4 * q, v);
        }
    }
}

void stx_softmax_fwd_cuda(stx_ctx *x, stx_real *y, const stx_real *a, size_t N, size_t C) {
    stx__array Y = stx__array_of(x, y), A = stx__array_of(x, a);
    if (N && C)
        STX__RUN_ROWS(x, "stx_softmax_fwd", N, C, (stx__softmax_fwd_kernel<T, 0>), Y, A, N, C);
}

void stx_log_softmax_fwd_cuda(stx_ctx *x, stx_real *y, const stx_real *a, size_t N, size_t C) {
    stx__array Y = stx__array_of(x, y), A = stx__array_of(x, a);
    if (N && C)
        STX__RUN_ROWS(x, "stx_log_softmax_fwd", N, C, (stx__softmax_fwd_kernel<T, 1>), Y, A, N, C);
}

/* Gradients of softmax and log_softmax:
   y = softmax(a):       da (N,C) = or += y (dy - sum_c y dy)
   y = log_softmax(a):   da (N,C) = or += dy - e^y sum_c dy                        (LOG)
   T threads handle a row in two passes: the first computes the sum, the second the
   result. Each thread adds in a fixed order, then the threads' sums are added in a
   fixed tree. With LOG and small blocks, the bound on blocks per multiprocessor keeps
   the compiler from spilling registers. */
template <int T, int LOG>
STX__GLOBAL(STX__ROW_BLOCK(T), LOG && T <= 256 ? 5 : 0)
stx__softmax_bwd_kernel(stx__array da, stx__array dy, stx__array y, size_t N, size_t C,
                        int accumulate) {
    STX__SHARED(float, sh, 32);
    STX__EACH_ROW(n, N, T) {
        const size_t start = n * C, t = threadIdx.x % T;
        const size_t head = stx__same_head(da, dy) && stx__same_head(da, y)
                                ? stx__row_head(y, start, C)
                                : C;
        const size_t fours = (C - head) / 4;
        float s = 0;
        for (size_t i = t; i < C - 4 * fours; i += T) {
            size_t j = start + stx__row_edge(i, head, fours);
            if constexpr (LOG)
                s += stx__get(dy, j);
            else
                s = fmaf(stx__get(dy, j), stx__get(y, j), s);
        }
        for (size_t q = t; q < fours; q += T) {
            float v[4], w[4];
            stx__getn<4>(v, dy, start + head + 4 * q);
            if constexpr (LOG) {
                s += (v[0] + v[1]) + (v[2] + v[3]);
            } else {
                stx__getn<4>(w, y, start + head + 4 * q);
                for (int e = 0; e < 4; e++) s = fmaf(v[e], w[e], s);
            }
        }
        s = stx__row_sum<T>(s, sh);

        for (size_t i = t; i < C - 4 * fours; i += T) {
            size_t j = start + stx__row_edge(i, head, fours);
            if constexpr (LOG)
                stx__add(da, j, fmaf(-s, expf(stx__get(y, j)), stx__get(dy, j)), accumulate);
            else
                stx__add(da, j, stx__get(y, j) * (stx__get(dy, j) - s), accumulate);
        }
        for (size_t q = t; q < fours; q += T) {
            float v[4], w[4];
            stx__getn<4>(v, dy, start + head + 4 * q);
            stx__getn<4>(w, y, start + head + 4 * q);
            for (int e = 0; e < 4; e++)
                v[e] = LOG ? fmaf(-s, expf(w[e]), v[e]) : w[e] * (v[e] - s);
            stx__addn<4>(da, start + head + 4 * q, v, accumulate);
        }
    }
}

void stx_softmax_bwd_cuda(stx_ctx *x, stx_real *da, const stx_real *dy, const stx_real *y, size_t N,
                          size_t C, int accumulate) {
    stx__array D = stx__array_of(x, da), G = stx__array_of(x, dy), Y = stx__array_of(x, y);
    if (N && C)
        STX__RUN_ROWS(x, "stx_softmax_bwd", N, C, (stx__softmax_bwd_kernel<T, 0>), D, G, Y, N, C,
                      accumulate);
}

void stx_log_softmax_bwd_cuda(stx_ctx *x, stx_real *da, const stx_real *dy, const stx_real *y,
                              size_t N, size_t C, int accumulate) {
    stx__array D = stx__array_of(x, da), G = stx__array_of(x, dy), Y = stx__array_of(x, y);
    if (N && C)
        STX__RUN_ROWS(x, "stx_log_softmax_bwd", N, C, (stx__softmax_bwd_kernel<T, 1>), D, G, Y, N,
                      C, accumulate);
}


/* ---- src/cuda/layernorm.cuh ---- */
// >>layernorm

/* Functions for kernels in which a warp keeps a row of C elements in registers. Lane l
   has the Q groups of 4 elements with indices l, l + 32, .. C is a multiple of 4 and at
   most 128 Q. `start` is the index of the row. All of a row's loads are issued before
   its first store, so that they are in flight together. */
template <int Q>
static __device__ __forceinline__ void stx__get_quads(float (&v)[Q][4], const stx__array &a,
                                                      size_t start, size_t C) {
    const size_t lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < Q; k++) {
        size_t c = 4 * (lane + 32 * k);
        for (int e = 0; e < 4; e++) v[k][e] = 0;
        if (c < C) stx__getn<4>(v[k], a, start + c);
    }
}

template <int Q>
static __device__ __forceinline__ void stx__put_quads(const stx__array &a, size_t start,
                                                      const float (&v)[Q][4], size_t C) {
    const size_t lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < Q; k++) {
        size_t c = 4 * (lane + 32 * k);
        if (c < C) stx__putn<4>(a, start + c, v[k]);
    }
}

/* Adds v to the row if `accumulate` is nonzero, and stores it otherwise. */
template <int Q>
static __device__ __forceinline__ void stx__add_quads(const stx__array &a, size_t start,
                                                      float (&v)[Q][4], size_t C, int accumulate) {
    if (accumulate) {
        float was[Q][4];
        stx__get_quads<Q>(was, a, start, C);
#pragma unroll
        for (int k = 0; k < Q; k++)
            for (int e = 0; e < 4; e++) v[k][e] += was[k][e];
    }
    stx__put_quads<Q>(a, start, v, C);
}

/* Returns v as it will be read back from `a`: rounded to bfloat16 if `a` stores bfloat16.
   Statistics are computed from this value, because the backward pass reads it. */
static __device__ __forceinline__ float stx__as_stored(const stx__array &a, float v) {
    return a.half ? __bfloat162float(__float2bfloat16(v)) : v;
}

/* Arrays of the forward kernels: y, s, `in` and f are (N,C); bias, gain and shift are
   (C); mean and rstd are (N) and float. s, f and bias are used only with RESIDUAL; bias.p
   may be NULL. */
struct stx__norm_fwd_nums {
    stx__array y, s, in, f, bias, gain, shift;
    float *mean, *rstd;
};

template <int S>
static __device__ __forceinline__ stx__norm_fwd_nums stx__stored(const stx__norm_fwd_nums &n) {
    return {stx__stored<S>(n.y), stx__stored<S>(n.s), stx__stored<S>(n.in), stx__stored<S>(n.f),
            stx__stored_f32<S>(n.bias), stx__stored_f32<S>(n.gain), stx__stored_f32<S>(n.shift),
            n.mean, n.rstd};
}

/* y (N,C) = layernorm(s), where s = in or, with RESIDUAL, in + dropout(f + bias):

       mean = sum_c s / C
       rstd = 1 / sqrt(sum_c (s - mean)^2 / C + eps)
       y    = (s - mean) rstd gain + shift

   A warp handles a row and keeps it in registers. Each lane adds its groups in order,
   then the warp adds its lanes' sums. */
template <int Q, int RESIDUAL, int S>
STX__GLOBAL(256)
stx__norm_fwd_kernel(stx__norm_fwd_nums nums, size_t N, size_t C, float eps, stx__dropout d) {
    const stx__norm_fwd_nums a = stx__stored<S>(nums);
    const size_t lane = threadIdx.x % 32;
    uint64_t stream = RESIDUAL && d.keep ? stx__dropout_stream(d) : 0;
    for (size_t n = (size_t)blockIdx.x * 8 + threadIdx.x / 32; n < N; n += (size_t)gridDim.x * 8) {
        float v[Q][4], sum = 0, m, r;
        stx__get_quads<Q>(v, a.in, n * C, C);
        if constexpr (RESIDUAL) {
            float u[Q][4];
            stx__get_quads<Q>(u, a.f, n * C, C);
#pragma unroll
            for (int k = 0; k < Q; k++) {
                size_t c = 4 * (lane + 32 * k);
                if (c < C) {
                    float by[4] = {1, 1, 1, 1};
                    if (a.bias.p) {
                        float b[4];
                        stx__getn<4>(b, a.bias, c);
                        for (int e = 0; e < 4; e++) u[k][e] += b[e];
                    }
                    if (d.keep) stx__dropout_mask<4>(by, d, stream, n * C + c);
                    for (int e = 0; e < 4; e++)
                        v[k][e] = stx__as_stored(a.s, u[k][e] * by[e] + v[k][e]);
                }
            }
            stx__put_quads<Q>(a.s, n * C, v, C);
        }

#pragma unroll
        for (int k = 0; k < Q; k++) sum += (v[k][0] + v[k][1]) + (v[k][2] + v[k][3]);
        m = stx__warp_sum(sum) / (float)C;
        sum = 0;
#pragma unroll
        for (int k = 0; k < Q; k++)
            if (4 * (lane + 32 * k) < C)
                for (int e = 0; e < 4; e++) {
                    v[k][e] -= m;
                    sum = fmaf(v[k][e], v[k][e], sum);
                }
        r = 1 / sqrtf(stx__warp_sum(sum) / (float)C + eps);

#pragma unroll
        for (int k = 0; k < Q; k++) {
            size_t c = 4 * (lane + 32 * k);
            if (c < C) {
                float g[4], b[4];
                stx__getn<4>(g, a.gain, c);
                stx__getn<4>(b, a.shift, c);
                for (int e = 0; e < 4; e++) v[k][e] = fmaf(v[k][e] * r, g[e], b[e]);
            }
        }
        stx__put_quads<Q>(a.y, n * C, v, C);
        if (lane == 0) {
            a.mean[n] = m;
            a.rstd[n] = r;
        }
    }
}

/* Like stx__norm_fwd_kernel, for any C. A warp reads its row three times, the second
   and third time from the caches. A lane reads back only what it wrote itself. This is
   a separate kernel because its lanes add single elements instead of groups of 4. */
template <int S, int RESIDUAL>
STX__GLOBAL(256)
stx__norm_fwd_any_kernel(stx__norm_fwd_nums nums, size_t N, size_t C, float eps, stx__dropout d) {
    constexpr int W = stx__width<S>;
    const stx__norm_fwd_nums a = stx__stored<S>(nums);
    const size_t lane = threadIdx.x % 32;
    uint64_t stream = RESIDUAL && d.keep ? stx__dropout_stream(d) : 0;
    for (size_t n = (size_t)blockIdx.x * 8 + threadIdx.x / 32; n < N; n += (size_t)gridDim.x * 8) {
        float sum = 0, m, r, v[W];
        for (size_t c = lane * W; c < C; c += 32 * W) {
            stx__getn<W>(v, a.in, n * C + c);
            if (RESIDUAL) {
                float u[W], by[W];
                stx__getn<W>(u, a.f, n * C + c);
                if (a.bias.p) {
                    float b[W];
                    stx__getn<W>(b, a.bias, c);
                    for (int e = 0; e < W; e++) u[e] += b[e];
                }
                for (int e = 0; e < W; e++) by[e] = 1;
                if (d.keep) stx__dropout_mask<W>(by, d, stream, n * C + c);
                for (int e = 0; e < W; e++) v[e] = stx__as_stored(a.s, u[e] * by[e] + v[e]);
                stx__putn<W>(a.s, n * C + c, v);
            }
            for (int e = 0; e < W; e++) sum += v[e];
        }
        m = stx__warp_sum(sum) / (float)C;
        sum = 0;
        for (size_t c = lane * W; c < C; c += 32 * W) {
            stx__getn<W>(v, RESIDUAL ? a.s : a.in, n * C + c);
            for (int e = 0; e < W; e++) sum = fmaf(v[e] - m, v[e] - m, sum);
        }
        r = 1 / sqrtf(stx__warp_sum(sum) / (float)C + eps);
        for (size_t c = lane * W; c < C; c += 32 * W) {
            float g[W], b[W];
            stx__getn<W>(v, RESIDUAL ? a.s : a.in, n * C + c);
            stx__getn<W>(g, a.gain, c);
            stx__getn<W>(b, a.shift, c);
            for (int e = 0; e < W; e++) v[e] = fmaf((v[e] - m) * r, g[e], b[e]);
            stx__putn<W>(a.y, n * C + c, v);
        }
        if (lane == 0) {
            a.mean[n] = m;
            a.rstd[n] = r;
        }
    }
}

template <int RESIDUAL>
static void stx__norm_fwd(stx_ctx *x, const stx_residual_norm_args *a) {
    const char *name = "stx_residual_norm_fwd";
    const size_t N = a->N, C = a->C;
    const float eps = a->eps;
    const unsigned grid = stx__blocks(N, 8, (size_t)1 << 20);
    stx__dropout d = stx__dropout_of(x, a->drop, a->seed, a->stream, a->rng_first);
    stx__norm_fwd_nums v;
    int access;
    v.y = stx__array_of(x, a->y);
    v.s = stx__array_of(x, a->s);
    v.in = stx__array_of(x, a->h);
    v.f = stx__array_of(x, a->f);
    v.bias = stx__array_of(x, a->bias);
    v.gain = stx__array_of(x, a->gain);
    v.shift = stx__array_of(x, a->shift);
    v.mean = a->mean;
    v.rstd = a->rstd;
    if (!N || !C) return;

    access = stx__access(C, {v.y, v.s, v.in, v.f}, {v.bias, v.gain, v.shift});
    if (access != STX__MIXED && C <= 1024)
        STX__CHOOSE(S, access, (STX__FLOATS, STX__HALVES),
                    STX__CHOOSE(Q, (C + 127) / 128, (1, 2, 4, 8),
                                STX__RUN_KERNEL(x, name, (stx__norm_fwd_kernel<Q, RESIDUAL, S>),
                                                grid, 256, 0, v, N, C, eps, d)));
    else
        STX__CHOOSE(S, access, (STX__FLOATS, STX__HALVES, STX__MIXED),
                    STX__RUN_KERNEL(x, name, (stx__norm_fwd_any_kernel<S, RESIDUAL>), grid, 256, 0,
                                    v, N, C, eps, d));
}

/* s = h + dropout(f + bias) ; y = layernorm(s). If f is NULL, y = layernorm(h). */
void stx_residual_norm_fwd_cuda(stx_ctx *x, const stx_residual_norm_args *a) {
    if (a->f)
        stx__norm_fwd<1>(x, a);
    else
        stx__norm_fwd<0>(x, a);
}

/* Arrays of the backward kernels: din, df, dy and `in` are (N,C), gain is (C), and mean
   and rstd are (N) and float. din and df may be NULL. If add_din or add_df is nonzero,
   the kernels add to din or df instead of overwriting it. */
struct stx__norm_bwd_nums {
    stx__array din, df, dy, in, gain;
    const float *mean, *rstd;
    int add_din, add_df;
};

template <int S>
static __device__ __forceinline__ stx__norm_bwd_nums stx__stored(const stx__norm_bwd_nums &n) {
    return {stx__stored<S>(n.din), stx__stored<S>(n.df), stx__stored<S>(n.dy), stx__stored<S>(n.in),
            stx__stored_f32<S>(n.gain), n.mean, n.rstd, n.add_din, n.add_df};
}

/* Gradients of y = xhat gain + shift, where xhat = (in - mean) rstd. With g = dy gain:

       din    = or += rstd (g - mean_c(g) - xhat mean_c(g xhat))
       dgain  += sum_n dy xhat
       dshift += sum_n dy
   With df, where in = h + dropout(f + bias), din0 is the term added to din, and
   mask / keep is the dropout factor:
       df     = or += din0 mask / keep
       dbias  += sum_n din0 mask / keep                               (BIAS)

   As in the forward pass, a warp keeps a row in registers. It also keeps the sums over
   its rows in registers, so dy and `in` are read only once for all gradients. A block
   of 4 warps handles `rows` consecutive rows, a number that depends on N alone. Unless
   `part` is NULL, the block adds its warps' sums in order and stores them in `part`
   (blocks, 2 + BIAS, C). */
template <int Q, int BIAS, int S>
STX__GLOBAL(128)
stx__norm_bwd_kernel(stx__norm_bwd_nums nums, float *part, size_t N, size_t C, size_t rows,
                     stx__dropout d) {
    const stx__norm_bwd_nums v = stx__stored<S>(nums);
    STX__SHARED(float, sh, 4 * 128 * Q);
    const size_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, lo = blockIdx.x * rows,
                 hi = lo + rows < N ? lo + rows : N;
    uint64_t stream = v.df.p && d.keep ? stx__dropout_stream(d) : 0;
    float sums[2 + BIAS][Q][4];
#pragma unroll
    for (int j = 0; j < 2 + BIAS; j++)
#pragma unroll
        for (int k = 0; k < Q; k++)
            for (int e = 0; e < 4; e++) sums[j][k][e] = 0;
    for (size_t n = lo + warp; n < hi; n += 4) {
        float g[Q][4], a[Q][4], s = 0, q = 0;
        const float m = v.mean[n], r = v.rstd[n];
        stx__get_quads<Q>(g, v.dy, n * C, C);
        stx__get_quads<Q>(a, v.in, n * C, C);
#pragma unroll
        for (int k = 0; k < Q; k++) {
            size_t c = 4 * (lane + 32 * k);
            if (c < C) {
                float w[4];
                stx__getn<4>(w, v.gain, c);
                for (int e = 0; e < 4; e++) {
                    a[k][e] -= m;
                    sums[0][k][e] = fmaf(g[k][e] * r, a[k][e], sums[0][k][e]);
                    sums[1][k][e] += g[k][e];
                    g[k][e] *= w[e];
                    s += g[k][e];
                    q = fmaf(g[k][e], a[k][e], q);
                }
            }
        }
        s = stx__warp_sum(s) / (float)C;
        q = stx__warp_sum(q) * r * r / (float)C;

#pragma unroll
        for (int k = 0; k < Q; k++) {
            size_t c = 4 * (lane + 32 * k);
            for (int e = 0; e < 4; e++) g[k][e] = r * ((g[k][e] - s) - a[k][e] * q);
            if (v.df.p && c < C) { /* `a` becomes the gradient of f */
                float by[4] = {1, 1, 1, 1};
                if (d.keep) stx__dropout_mask<4>(by, d, stream, n * C + c);
                for (int e = 0; e < 4; e++) {
                    a[k][e] = g[k][e] * by[e];
                    if constexpr (BIAS) sums[2][k][e] += a[k][e];
                }
            }
        }
        if (v.df.p) stx__add_quads<Q>(v.df, n * C, a, C, v.add_df);
        if (v.din.p) stx__add_quads<Q>(v.din, n * C, g, C, v.add_din);
    }

    if (part) stx__column_sums_of_warps<2 + BIAS, Q, 1>(part, C, sh, sums);
}

/* Computes din and df for any C. A warp reads its row twice. stx__columns computes
   dgain, dshift and dbias. */
template <int S>
STX__GLOBAL(256)
stx__norm_bwd_any_kernel(stx__norm_bwd_nums nums, size_t N, size_t C, stx__dropout d) {
    constexpr int W = stx__width<S>;
    const stx__norm_bwd_nums v = stx__stored<S>(nums);
    const size_t lane = threadIdx.x % 32;
    uint64_t stream = v.df.p && d.keep ? stx__dropout_stream(d) : 0;
    for (size_t n = (size_t)blockIdx.x * 8 + threadIdx.x / 32; n < N; n += (size_t)gridDim.x * 8) {
        float s = 0, q = 0, g[W], a[W], w[W];
        const float m = v.mean[n], r = v.rstd[n];
        for (size_t c = lane * W; c < C; c += 32 * W) {
            stx__getn<W>(g, v.dy, n * C + c);
            stx__getn<W>(a, v.in, n * C + c);
            stx__getn<W>(w, v.gain, c);
            for (int e = 0; e < W; e++) {
                g[e] *= w[e];
                s += g[e];
                q = fmaf(g[e], a[e] - m, q);
            }
        }
        s = stx__warp_sum(s) / (float)C;
        q = stx__warp_sum(q) * r * r / (float)C;
        for (size_t c = lane * W; c < C; c += 32 * W) {
            size_t i = n * C + c;
            stx__getn<W>(g, v.dy, i);
            stx__getn<W>(a, v.in, i);
            stx__getn<W>(w, v.gain, c);
            for (int e = 0; e < W; e++) g[e] = r * (fmaf(g[e], w[e], -s) - (a[e] - m) * q);
            if (v.df.p) {
                float by[W];
                for (int e = 0; e < W; e++) by[e] = 1;
                if (d.keep) stx__dropout_mask<W>(by, d, stream, i);
                for (int e = 0; e < W; e++) by[e] *= g[e];
                stx__addn<W>(v.df, i, by, v.add_df);
            }
            if (v.din.p) stx__addn<W>(v.din, i, g, v.add_din);
        }
    }
}

/* Computes all gradients in one pass over dy and `in`, for rows that fit in registers. */
static void stx__norm_bwd_rows(stx_ctx *x, const char *name, const stx_residual_norm_args *a,
                               const stx__norm_bwd_nums &v, const stx__dropout &d, int access) {
    const size_t N = a->N, C = a->C, rows = stx__chunk(N, 32, 2048), blocks = (N + rows - 1) / rows;
    const int sums = a->dbias ? 3 : 2;
    stx_real *to[STX__COLUMN_TARGETS] = {a->dgain, a->dshift, a->dbias};
    int deferred = a->deferred;
    float *part = NULL;
    if (a->dgain || a->dshift || a->dbias) {
        part = stx__partial_sums(x, name, blocks * sums * C, &deferred);
        if (!part) return;
    }
    STX__CHOOSE(S, access, (STX__FLOATS, STX__HALVES),
                STX__CHOOSE(BIAS, a->dbias != NULL, (0, 1),
                            STX__CHOOSE(Q, (C + 127) / 128, (1, 2, 4, 8),
                                        STX__RUN_KERNEL(x, name, (stx__norm_bwd_kernel<Q, BIAS, S>),
                                                        (unsigned)blocks, 128, 0, v, part, N, C,
                                                        rows, d))));
    if (part) stx__columns_sum(x, name, to, sums, part, sums * C, blocks, C, deferred);
}

/* Computes the gradients with separate kernels, for rows of any length. */
static void stx__norm_bwd_any(stx_ctx *x, const char *name, const stx_residual_norm_args *a,
                              const stx__norm_bwd_nums &v, const stx__dropout &d, int access) {
    const size_t N = a->N, C = a->C;
    const unsigned grid = stx__blocks(N, 8, (size_t)1 << 20);
    stx__columns_args columns;
    if (a->dgain || a->dshift) {
        columns = stx__columns_init(a->dgain, a->dy, N, C);
        columns.d2 = a->dshift;
        columns.f = a->s;
        columns.mean = a->mean;
        columns.rstd = a->rstd;
        columns.deferred = a->deferred;
        stx__columns(x, name, &columns);
    }
    if (!a->ds && !a->df) return;
    STX__CHOOSE(S, access, (STX__FLOATS, STX__HALVES, STX__MIXED),
                STX__RUN_KERNEL(x, name, stx__norm_bwd_any_kernel<S>, grid, 256, 0, v, N, C, d));
    if (a->dbias) {
        columns = stx__columns_init(a->dbias, a->df, N, C);
        columns.deferred = a->deferred;
        stx__columns(x, name, &columns);
    }
}

/* Forward: s = h + dropout(f + bias), y = layernorm(s). With the gradient g of s and
   the dropout factor mask / keep,
   ds = or += g ; df = or += g mask / keep ; dbias += sum_n g mask / keep */
void stx_residual_norm_bwd_cuda(stx_ctx *x, const stx_residual_norm_args *a) {
    static const char name[] = "stx_residual_norm_bwd";
    const stx__dropout d = stx__dropout_of(x, a->drop, a->seed, a->stream, a->rng_first);
    stx__norm_bwd_nums v;
    int access;
    v.din = stx__array_of(x, a->ds);
    v.df = stx__array_of(x, a->df);
    v.dy = stx__array_of(x, a->dy);
    v.in = stx__array_of(x, a->s);
    v.gain = stx__array_of(x, a->gain);
    v.mean = a->mean;
    v.rstd = a->rstd;
    v.add_din = a->accumulate_ds;
    v.add_df = a->accumulate_df;
    if (!a->N || !a->C) return;

    access = stx__access(a->C, {v.din, v.df, v.dy, v.in}, {v.gain});
    if (access != STX__MIXED && a->C <= 1024)
        stx__norm_bwd_rows(x, name, a, v, d, access);
    else
        stx__norm_bwd_any(x, name, a, v, d, access);
}


/* ---- src/cuda/embedding.cuh ---- */
// >>embedding

/* y (N,C) = table[ids], with table (V,C) and ids (N); n = N C. A thread copies W
   adjacent elements of a row at a time. */
template <int W>
STX__GLOBAL(256)
stx__embedding_fwd_kernel(stx__array y, stx__array table, const int32_t *ids, size_t n, size_t C) {
    STX__STEP(i, n, W) {
        size_t r = i / C;
        float v[W];
        stx__getn<W>(v, table, (size_t)ids[r] * C + (i - r * C));
        stx__putn<W>(y, i, v);
    }
}

void stx_embedding_fwd_cuda(stx_ctx *x, stx_real *y, const stx_real *table, const int32_t *ids,
                            size_t N, size_t C) {
    stx__array Y = stx__array_of(x, y), T = stx__array_of(x, table);
    const size_t n = N * C;
    const int four = C % 4 == 0 && stx__aligned4(Y) && stx__aligned4(T);
    if (n)
        STX__RUN_BY(x, "stx_embedding_fwd", four, stx__embedding_fwd_kernel, n, Y, T, ids, n, C);
}

/* Gradient of y[n] = table[ids[n]]: dtable[ids[n]] += dy[n]

   Ids can repeat, and two blocks must not add to the same row of dtable. Therefore the
   GPU first sorts the positions n by (id, position). Then each run, which is a sequence
   of equal ids, is summed in tiles of 32 sorted positions. If a run extends over
   several tiles, its partial sums are added in order. The order of additions depends on
   the ids alone. One id that occurs N times occupies as many blocks as N different ids.

   Sort, first stage: a block of 1024 threads sorts a chunk of 2048 keys with a bitonic
   network in shared memory. key = id 2^11 + index in the chunk. The last chunk is padded
   with the largest 64-bit integer. Writes the id and the index of each key; the id of
   padding is STX__NO_ID. */
enum { STX__SORT = 2048, STX__RANKED = 8, STX__ID_TILE = 32 };
  #define STX__NO_ID ((uint32_t)-1)

STX__GLOBAL(1024)
stx__embedding_sort_kernel(uint32_t *sorted, uint32_t *index, const int32_t *ids, size_t N) {
    STX__SHARED(uint64_t, k, STX__SORT);
    size_t base = (size_t)blockIdx.x * STX__SORT;
    for (unsigned i = threadIdx.x; i < STX__SORT; i += 1024)
        k[i] = base + i < N ? (uint64_t)(uint32_t)ids[base + i] * STX__SORT + i : ~(uint64_t)0;
    for (unsigned size = 2; size <= STX__SORT; size *= 2)
        for (unsigned gap = size / 2; gap; gap /= 2) {
            unsigned i = 2 * threadIdx.x - (threadIdx.x & (gap - 1)), j = i + gap;
            __syncthreads();
            uint64_t a = k[i], b = k[j];
            if ((a > b) == !(i & size)) {
                k[i] = b;
                k[j] = a;
            }
        }
    __syncthreads();
    for (unsigned i = threadIdx.x; i < STX__SORT; i += 1024) {
        sorted[base + i] = (uint32_t)(k[i] / STX__SORT);
        index[base + i] = (uint32_t)(k[i] % STX__SORT);
    }
}

/* Sort, second stage: merges the chunks. The rank of an id is the number of ids before
   it, determined by a binary search in each chunk. Equal ids in earlier chunks precede
   the id, and equal ids in later chunks follow it. Writes the id and the position of
   each rank. A thread handles one id at a time. It searches STX__RANKED chunks at the
   same time, because each search is a chain of 12 dependent loads. The launch bound of
   one block per multiprocessor keeps all of these loads in flight: otherwise nvcc would
   save registers by waiting for each. */
STX__GLOBAL(256, 1)
stx__embedding_rank_kernel(int32_t *id, size_t *position, const uint32_t *sorted,
                           const uint32_t *index, size_t chunks) {
    STX__STEP(i, chunks * STX__SORT, 1) {
        const size_t mine = i / STX__SORT;
        const uint32_t me = sorted[i];
        const uint32_t *from = sorted;
        size_t rank = i % STX__SORT;
        if (me == STX__NO_ID) continue;
        for (size_t c = 0; chunks > 1 && c < chunks; c += STX__RANKED) {
            const int some = chunks - c < STX__RANKED ? (int)(chunks - c) : STX__RANKED;
            uint32_t v[STX__RANKED], limit[STX__RANKED]; /* ids below the limit are counted */
            uint32_t before[STX__RANKED];                /* index before the first id to test */
            int own = mine < c ? -1 : STX__RANKED; /* chunk `mine` is c + own */
            if (mine - c < STX__RANKED) own = (int)(mine - c);
#pragma unroll
            for (int j = 0; j < STX__RANKED; j++) {
                limit[j] = j < some && j != own ? me + (j < own) : 0;
                before[j] = j < some ? (uint32_t)j * STX__SORT - 1 : ~(uint32_t)0;
            }
#pragma unroll 1
            for (uint32_t step = STX__SORT / 2; step; step /= 2) {
#pragma unroll
                for (int j = 0; j < STX__RANKED; j++) v[j] = from[before[j] + step];
#pragma unroll
                for (int j = 0; j < STX__RANKED; j++) before[j] += v[j] < limit[j] ? step : 0;
            }
#pragma unroll
            for (int j = 0; j < STX__RANKED; j++) v[j] = from[++before[j]];
#pragma unroll
            for (int j = 0; j < STX__RANKED; j++)
                rank += before[j] % STX__SORT + (v[j] < limit[j]);
            from += STX__RANKED * STX__SORT;
        }
        id[rank] = (int32_t)me;
        position[rank] = mine * STX__SORT + index[i];
    }
}

/* Sums, first stage: block (tile, columns) adds the rows of each run in its tile in
   order. The sum of a run that is entirely inside the tile is added to dtable.
   Otherwise it is a partial sum and is stored in `part` (tiles,2,C): in part[tile][0]
   if the run is the first of the tile, else in part[tile][1]. A thread handles W
   adjacent columns and loads eight rows before it adds the first. */
template <int W>
STX__GLOBAL(128)
stx__embedding_tile_kernel(stx__array dtable, float *part, stx__array dy, const int32_t *id,
                           const size_t *position, size_t N, size_t C) {
    STX__SHARED(int32_t, ids, STX__ID_TILE + 2); /* including a neighbour on each side */
    STX__SHARED(size_t, rows, STX__ID_TILE);
    const size_t lo = (size_t)blockIdx.x * STX__ID_TILE;
    const int n = (int)(N - lo < (size_t)STX__ID_TILE ? N - lo : (size_t)STX__ID_TILE);
    for (int i = threadIdx.x; i < n + 2; i += blockDim.x) {
        ids[i] = lo + i >= 1 && lo + i - 1 < N ? id[lo + i - 1] : -1;
        if (i < n) rows[i] = position[lo + i];
    }
    __syncthreads();
    for (size_t c = ((size_t)blockIdx.y * blockDim.x + threadIdx.x) * W; c < C;
         c += (size_t)gridDim.y * blockDim.x * W) {
        for (int i = 0, end; i < n; i = end) { /* the run [i, end) */
            int32_t me = ids[i + 1];
            int begun = (i == 0 && lo && ids[0] == me), continues;
            float sum[W] = {0};
            for (end = i + 1; end < n && ids[end + 1] == me;) end++;
            continues = end == n && lo + n < N && ids[n + 1] == me;
            for (int k = i; k < end; k += 8) {
                float v[8][W];
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    if (k + j < end)
                        stx__getn<W>(v[j], dy, rows[k + j] * C + c);
                    else
                        for (int e = 0; e < W; e++) v[j][e] = 0;
                }
#pragma unroll
                for (int j = 0; j < 8; j++)
                    for (int e = 0; e < W; e++) sum[e] += v[j][e];
            }

            if (begun || continues) {
                for (int e = 0; e < W; e++)
                    part[(2 * (size_t)blockIdx.x + (i != 0)) * C + c + e] = sum[e];
            } else {
                stx__addn<W>(dtable, (size_t)me * C + c, sum, 1);
            }
        }
    }
}

/* Sums, second stage: if a run extends over several tiles, the block of its first tile
   adds all partial sums of the run to dtable, tile by tile. */
template <int W>
STX__GLOBAL(128)
stx__embedding_run_kernel(stx__array dtable, const float *part, const int32_t *id, size_t N,
                          size_t C) {
    const size_t tile = blockIdx.x, last = (tile + 1) * STX__ID_TILE - 1,
                 tiles = (N + STX__ID_TILE - 1) / STX__ID_TILE;
    const int32_t me = last + 1 < N ? id[last] : -1;
    const int whole = last < N && id[tile * STX__ID_TILE] == me;
    size_t end = tile + 1;
    if (last + 1 >= N || id[last + 1] != me) return;                /* the last run ends here */
    if (whole && tile && id[tile * STX__ID_TILE - 1] == me) return; /* the run began earlier */
    while (end < tiles && id[end * STX__ID_TILE] == me) end++;
    for (size_t c = ((size_t)blockIdx.y * blockDim.x + threadIdx.x) * W; c < C;
         c += (size_t)gridDim.y * blockDim.x * W) {
        float sum[W];
        for (int e = 0; e < W; e++) sum[e] = part[(2 * tile + !whole) * C + c + e];
        for (size_t k = tile + 1; k < end; k += 16) {
            float v[16][W];
#pragma unroll
            for (int j = 0; j < 16; j++)
                for (int e = 0; e < W; e++)
                    v[j][e] = k + j < end ? part[2 * (k + j) * C + c + e] : 0;
#pragma unroll
            for (int j = 0; j < 16; j++)
                for (int e = 0; e < W; e++) sum[e] += v[j][e];
        }
        stx__addn<W>(dtable, (size_t)me * C + c, sum, 1);
    }
}

void stx_embedding_bwd_cuda(stx_ctx *x, stx_real *dtable, const stx_real *dy, const int32_t *ids,
                            size_t N, size_t C) {
    const char *name = "stx_embedding_bwd";
    stx__array D = stx__array_of(x, dtable), G = stx__array_of(x, dy);
    const size_t chunks = (N + STX__SORT - 1) / STX__SORT,
                 tiles = (N + STX__ID_TILE - 1) / STX__ID_TILE;
    const int four = C % 4 == 0 && stx__aligned4(D) && stx__aligned4(G);
    const dim3 grid((unsigned)tiles, stx__blocks(C, four ? 512 : 128, 65535));
    uint32_t *sorted, *index; /* (chunks,2048) */
    size_t *position;         /* (N), sorted by id */
    float *part;              /* (tiles,2,C) */
    int32_t *id;              /* (N), sorted */
    size_t bytes = 2 * chunks * STX__SORT * sizeof *sorted + N * sizeof *position
                   + 2 * tiles * C * sizeof *part + N * sizeof *id;
    if (!N || !C) return;
    sorted = (uint32_t *)stx__scratch_of(x, bytes, name);
    if (!sorted) return;
    index = sorted + chunks * STX__SORT;
    position = (size_t *)(void *)(index + chunks * STX__SORT);
    part = (float *)(void *)(position + N);
    id = (int32_t *)(void *)(part + 2 * tiles * C);

    STX__RUN_KERNEL(x, name, stx__embedding_sort_kernel, (unsigned)chunks, 1024, 0, sorted, index,
                    ids, N);
    STX__RUN_KERNEL(x, name, stx__embedding_rank_kernel, stx__grid(x, chunks * STX__SORT), 256, 0,
                    id, position, sorted, index, chunks);
    STX__CHOOSE(W, four ? 4 : 1, (1, 4),
                STX__RUN_KERNEL(x, name, stx__embedding_tile_kernel<W>, grid, 128, 0, D, part, G,
                                id, position, N, C);
                STX__RUN_KERNEL(x, name, stx__embedding_run_kernel<W>, grid, 128, 0, D, part, id, N,
                                C));
}


/* ---- src/cuda/linear.cuh ---- */
// >>linear

/* y (N,O) = act(`in` W^T + b), with `in` (N,Ci) and W (O,Ci). GEMM, bias and ReLU take
   one pass. GELU, tanh and sigmoid take another pass over the output of the GEMM,
   because cublasLt only has the tanh approximation of GELU, and seqtx uses the exact
   one. The GEMM writes to pre (N,O) if it is not NULL, else to y. */
void stx_linear_fwd_cuda(stx_ctx *x, const stx_linear_args *a) {
    const size_t N = a->N, O = a->O;
    const int act = a->act, relu = act == STX_ACT_RELU && !a->pre;
    stx_real *to = a->pre ? a->pre : a->y;
    stx_gemm_args g = stx_gemm_init(0, 1, N, O, a->Ci, a->in, a->W, to);
    if (!stx_ok(x) || !N || !O) return;
    if (stx__lt_gemm(x, "stx_linear_fwd", &g, a->b, relu, 0) == STX__LT_PRODUCT) {
        stx_bias_act_fwd_cuda(x, to, NULL, a->b, N, O, a->pre ? STX_ACT_NONE : act);
        if (!a->pre) return;
    }
    if (a->pre || (act && !relu)) stx_act_fwd_cuda(x, a->y, to, N * O, act);
}

/* da (N,O) = da act'(a), and `part` (chunks,O) = the column sums of the new da over
   chunks of `rows` rows, in one pass over da. `from` is what the slope is computed from:
   `a` for GELU, otherwise act(a). */
template <int S>
STX__GLOBAL(256)
stx__slope_columns_kernel(float *part, stx__array da, stx__array from, size_t N, size_t O,
                          size_t rows, int act) {
    constexpr int W = stx__width<S>;
    STX__SHARED(float, sh, 8 * 32 * W);
    struct terms {
        float g[W], v[W];
    };
    da = stx__stored<S>(da);
    from = stx__stored<S>(from);
    stx__column_sums<1, W, 2>(
        part, O, N, O, rows, sh,
        [&](size_t n, size_t c) {
            terms t;
            stx__getn<W>(t.g, da, n * O + c);
            stx__getn<W>(t.v, from, n * O + c);
            return t;
        },
        [&](float (&s)[1][W], terms &t, size_t n, size_t c) {
            for (int e = 0; e < W; e++) {
                t.g[e] = stx__act_slope(t.g[e], t.v[e], t.v[e], act);
                s[0][e] += t.g[e];
            }
            stx__putn<W>(da, n * O + c, t.g);
        });
}

/* da = da act'(a), and db += the column sums of da, except for the last `padding`
   columns. The chunks depend on N alone, so the sums are the same on every GPU. */
static void stx__slope_columns(stx_ctx *x, const char *what, const stx_linear_bwd_args *a) {
    const size_t N = a->N, O = a->O;
    const stx__array D = stx__array_of(x, a->da),
                     F = stx__array_of(x, a->act == STX_ACT_GELU ? a->pre : a->y);
    const int access = stx__access(O, {D, F}, {});
    const stx__column_launch l =
        stx__column_launch_of(x, what, N, O, 1, access, (a->deferred & STX_DEFER_DB) != 0);
    if (!l.part) return;
    STX__CHOOSE(S, access, (STX__FLOATS, STX__HALVES, STX__MIXED),
                STX__RUN_KERNEL(x, what, stx__slope_columns_kernel<S>, l.grid, 256, 0, l.part, D, F,
                                N, O, l.rows, a->act));
    stx__column_launch_end(x, &l, &a->db, 1, O - a->padding);
}

/* Gradients of y = act(a), a = `in` W^T + b:
       da = dy act'(a)
       dx (N,Ci) = or += da W
       dW (O,Ci) += da^T in
       db (O) += sum_n da

   The epilogue BGRADB of cublasLt could compute db in the GEMM for dW. This epilogue is
   not used, because it overwrites db instead of adding to it, requires db to have the
   type of dW, and narrows the choice of algorithms. With an activation, da must be read
   and written anyway, so summing it costs nothing more. */
void stx_linear_bwd_cuda(stx_ctx *x, const stx_linear_bwd_args *a) {
    const size_t N = a->N, I = a->Ci, O = a->O;
    const int db = a->db && N && O;
    stx_gemm_args g;
    if (!stx_ok(x)) return;
    if (a->act && db) {
        stx__slope_columns(x, "stx_linear_bwd, db", a);
    } else if (a->act) {
        stx_act_bwd_args slope = {N * O, a->act, 0, a->y, a->pre, a->da, a->da};
        stx_act_bwd_cuda(x, &slope);
    } else if (db) {
        stx__columns_args columns = stx__columns_init(a->db, a->da, N, O);
        columns.padding = a->padding;
        columns.deferred = (a->deferred & STX_DEFER_DB) != 0;
        stx__columns(x, "stx_linear_bwd, db", &columns);
    }

    if (a->dx) {
        g = stx_gemm_init(0, 0, N, I, O, a->da, a->W, a->dx);
        g.beta = a->accumulate ? 1.0f : 0.0f;
        stx__lt_gemm(x, "stx_linear_bwd, dx", &g, NULL, 0, 0);
    }
    if (a->dW) {
        g = stx_gemm_init(1, 0, O, I, N, a->da, a->in, a->dW);
        g.beta = 1;
        if (a->batch > 1) {
            g.batch = a->batch;
            g.sa = a->sda;
            g.sb = a->sin;
            g.sc = 0;
        }
        stx__lt_add(x, "stx_linear_bwd, dW", &g, O - a->padding, (a->deferred & STX_DEFER_DW) != 0);
    }
}

/* Reorders blocks of n elements, see stx__heads_args: block i of y is block `of[i]` of
   `a` if `of[i]` < `half`, else block `of[i]` - `half` of b. The same launch then
   copies the memory rows of each group of heads, from `from` to `to`. The backward pass
   adds the blocks of dy to da and db. */
typedef struct stx__heads {
    stx__array a, b, y, from[STX_HEAD_GROUPS], to[STX_HEAD_GROUPS];
    size_t n;           /* elements per block */
    size_t blocks;      /* elements in all blocks; the memory rows follow */
    size_t end[STX_HEAD_GROUPS];    /* index of the first element after the memory rows of
                                       each group */
    size_t stride, len[STX_HEAD_GROUPS];
    int half, backward;
    uint16_t of[512];
} stx__heads;

/* A thread handles W adjacent elements of the output at a time. */
template <int W> STX__GLOBAL(256) stx__heads_kernel(stx__heads h, size_t n) {
    STX__STEP(i, n, W) {
        if (i >= h.blocks) {
            /* element i is in group k of the memory rows. This group begins at element
               `begin` */
            const int later = i < h.end[1] ? 1 : 2, k = i < h.end[0] ? 0 : later;
            const size_t later_begin = k == 1 ? h.end[0] : h.end[1],
                         begin = k == 0 ? h.blocks : later_begin;
            const size_t at = i - begin, len = h.len[k];
            float v[W];
            stx__getn<W>(v, h.from[k], at / len * h.stride + at % len);
            stx__putn<W>(h.to[k], at, v);
            continue;
        }
        const int of = h.of[i / h.n], second = of >= h.half;
        const size_t at = (size_t)(second ? of - h.half : of) * h.n + i % h.n;
        const stx__array w = second ? h.b : h.a;
        float v[W], s[W];
        if (!h.backward) {
            stx__getn<W>(v, w, at);
            stx__putn<W>(h.y, i, v);
        } else if (w.p) {
            stx__getn<W>(v, h.y, i);
            stx__getn<W>(s, w, at);
            for (int e = 0; e < W; e++) s[e] += v[e];
            stx__putn<W>(w, at, s);
        }
    }
}

static void stx__heads_run(stx_ctx *x, const char *what, const stx__heads_args *a, int backward) {
    stx__heads h;
    size_t n = a->n * a->count;
    int four;
    memset(&h, 0, sizeof h);
    h.a = stx__array_of(x, backward ? a->da : a->a);
    h.b = stx__array_of(x, backward ? a->db : a->b);
    h.y = stx__array_of(x, backward ? a->dy : a->y);
    h.n = a->n;
    h.blocks = n;
    h.half = (int)a->half;
    h.backward = backward;
    h.stride = a->stride;
    memcpy(h.of, a->of, sizeof h.of);
    four = a->n % 4 == 0 && a->stride % 4 == 0 && stx__aligned4(h.a) && stx__aligned4(h.b)
           && stx__aligned4(h.y);
    for (int k = 0; k < STX_HEAD_GROUPS; k++) {
        h.from[k] = stx__array_of(x, a->from[k]);
        h.to[k] = stx__array_of(x, a->to[k]);
        h.len[k] = a->len[k];
        if (!backward) n += a->B * a->len[k];
        h.end[k] = n;
        four = four && a->len[k] % 4 == 0 && stx__aligned4(h.from[k]) && stx__aligned4(h.to[k]);
    }
    if (n) STX__RUN_BY(x, what, four, stx__heads_kernel, n, h, n);
}

void stx__heads_fwd_cuda(stx_ctx *x, const stx__heads_args *h) {
    stx__heads_run(x, "stx_linear_heads", h, 0);
}

void stx__heads_bwd_cuda(stx_ctx *x, const stx__heads_args *h) {
    stx__heads_run(x, "stx_linear_heads, backward", h, 1);
}

/* With a = y (N,C) + b (C), sets pre (N,C) = a and y = act(a). b and pre may be NULL;
   n = N C. A thread handles W adjacent elements of a row at a time. */
template <int W>
STX__GLOBAL(256)
stx__bias_act_kernel(stx__array y, stx__array pre, stx__array b, size_t n, size_t C, int act) {
    STX__STEP(i, n, W) {
        float v[W], w[W];
        stx__getn<W>(v, y, i);
        if (b.p) {
            stx__getn<W>(w, b, i % C);
            for (int e = 0; e < W; e++) v[e] += w[e];
        }
        if (pre.p) stx__putn<W>(pre, i, v);
        for (int e = 0; e < W; e++) v[e] = stx__act(v[e], act);
        stx__putn<W>(y, i, v);
    }
}

void stx_bias_act_fwd_cuda(stx_ctx *x, stx_real *y, stx_real *pre, const stx_real *b, size_t N,
                           size_t C, int act) {
    stx__array Y = stx__array_of(x, y), P = stx__array_of(x, pre), B = stx__array_of(x, b);
    const size_t n = N * C;
    const int four = C % 4 == 0 && stx__aligned4(Y) && stx__aligned4(P) && stx__aligned4(B);
    if (n && (b || pre || act))
        STX__RUN_BY(x, "stx_bias_act_fwd", four, stx__bias_act_kernel, n, Y, P, B, n, C, act);
}


/* ---- src/cuda/loss.cuh ---- */
// >>mean

void stx_mean_fwd_cuda(stx_ctx *x, stx_real *y, const stx_real *a, size_t n) {
    stx__sum_cuda(x, "stx_mean_fwd", STX__SUM, y, a, NULL, n, (double)n, 0);
}

void stx_sum_fwd_cuda(stx_ctx *x, stx_real *y, const stx_real *a, size_t n) {
    stx__sum_cuda(x, "stx_sum_fwd", STX__SUM, y, a, NULL, n, 1, 0);
}

/* da (n) += dy (1) / divisor. A thread handles W adjacent elements at a time. */
template <int W>
STX__GLOBAL(256)
stx__mean_bwd_kernel(stx__array da, stx__array dy, size_t n, float divisor) {
    float g = stx__get(dy, 0) / divisor;
    STX__STEP(i, n, W) {
        float v[W];
        for (int e = 0; e < W; e++) v[e] = g;
        stx__addn<W>(da, i, v, 1);
    }
}

static void stx__mean_bwd(stx_ctx *x, const char *name, stx_real *da, const stx_real *dy, size_t n,
                          float divisor) {
    stx__array D = stx__array_of(x, da), G = stx__array_of(x, dy);
    const int four = n % 4 == 0 && stx__aligned4(D);
    if (n) STX__RUN_BY(x, name, four, stx__mean_bwd_kernel, n, D, G, n, divisor);
}

void stx_mean_bwd_cuda(stx_ctx *x, stx_real *da, const stx_real *dy, size_t n) {
    stx__mean_bwd(x, "stx_mean_bwd", da, dy, n, (float)n);
}

void stx_sum_bwd_cuda(stx_ctx *x, stx_real *da, const stx_real *dy, size_t n) {
    stx__mean_bwd(x, "stx_sum_bwd", da, dy, n, 1.0f);
}

/* Kernel arguments derived from stx_means_args. In the backward pass, a[k] is da[k].
   Bit k of `overwrite` is set if da[k] is to be overwritten instead of incremented. */
struct stx__means_nums {
    stx__array a[STX_MEANS], y0, y, dy;
    size_t n[STX_MEANS];
    int count, overwrite;
    float s;
};

/* y (1) = y0 + s sum_k mean(a[k]), a[k] (n[k]). The arrays are small, so there is one
   block. Each thread adds every 256th element of each array in order, in double, then
   the threads' sums are added in a fixed tree. */
STX__GLOBAL(256) stx__add_means_fwd_kernel(stx__means_nums m) {
    STX__SHARED(double, sh, 32);
    double mean = 0;
    for (int k = 0; k < m.count; k++) {
        double sum = 0;
        for (size_t i = threadIdx.x; i < m.n[k]; i += 256) sum += stx__get(m.a[k], i);
        mean += sum / (double)m.n[k];
    }
    mean = stx__row_sum<256>(mean, sh);
    if (threadIdx.x == 0) stx__put(m.y, 0, (float)((double)stx__get(m.y0, 0) + (double)m.s * mean));
}

/* da[k] (n[k]) = or += s dy / n[k]. One block handles the arrays one after the other,
   because they may overlap. */
STX__GLOBAL(256) stx__add_means_bwd_kernel(stx__means_nums m) {
    const float g = m.s * stx__get(m.dy, 0);
    for (int k = 0; k < m.count; k++) {
        if (!m.a[k].p) continue;
        __syncthreads();
        for (size_t i = threadIdx.x; i < m.n[k]; i += 256)
            stx__add(m.a[k], i, g / (float)m.n[k], !(m.overwrite >> k & 1));
    }
}

static stx__means_nums stx__means_of(const stx_ctx *x, const stx_means_args *a, int backward) {
    stx__means_nums m;
    memset(&m, 0, sizeof m);
    m.count = (int)a->count;
    m.overwrite = a->overwrite;
    m.s = a->s;
    for (int k = 0; k < m.count; k++) {
        m.a[k] = stx__array_of(x, backward ? a->da[k] : a->a[k]);
        m.n[k] = a->n[k];
    }
    m.y0 = stx__array_of(x, a->y0);
    m.y = stx__array_of(x, a->y);
    m.dy = stx__array_of(x, a->dy);
    return m;
}

void stx_add_means_fwd_cuda(stx_ctx *x, const stx_means_args *a) {
    STX__RUN_KERNEL(x, "stx_add_means_fwd", stx__add_means_fwd_kernel, 1, 256, 0,
                    stx__means_of(x, a, 0));
}

void stx_add_means_bwd_cuda(stx_ctx *x, const stx_means_args *a) {
    STX__RUN_KERNEL(x, "stx_add_means_bwd", stx__add_means_bwd_kernel, 1, 256, 0,
                    stx__means_of(x, a, 1));
}


// >>cross_entropy

/* The weights of a loss over tokens, see stx__loss_weights_args. Sets w (N) to weights
   / divisor and `known` (N) to targets. In ignored rows, w is set to 0 and `known` to
   -1. If weights.p is NULL, all weights are 1. If divisor is 0, the divisor is N
   mean[0] or, if mean.p is NULL, the sum of the weights of the rows that are not
   ignored. One block computes that sum: each thread adds every 1024th row in order,
   then the threads' sums are added in a fixed tree. */
STX__GLOBAL(1024)
stx__loss_weights_kernel(stx__array w, int32_t *known, const int32_t *targets, stx__array weights,
                         size_t N, int ignore, int32_t ignored, double divisor, stx__array mean) {
    STX__SHARED(double, sh, 32);
    double s = 0;
    if (divisor == 0 && mean.p) {
        divisor = (double)stx__get(mean, 0) * (double)N;
    } else if (divisor == 0) {
        for (size_t n = threadIdx.x; n < N; n += 1024)
            if (!(ignore && targets[n] == ignored) && targets[n] >= 0)
                s += weights.p ? (double)stx__get(weights, n) : 1;
        divisor = stx__row_sum<1024>(s, sh);
    }
    for (size_t n = threadIdx.x; n < N; n += 1024) {
        int32_t id = ignore && targets[n] == ignored ? -1 : targets[n];
        float v = 0;
        if (id >= 0 && divisor != 0)
            v = (float)((weights.p ? (double)stx__get(weights, n) : 1) / divisor);
        known[n] = id;
        stx__put(w, n, v);
    }
}

void stx__loss_weights_cuda(stx_ctx *x, const stx__loss_weights_args *a) {
    stx__array W = stx__array_of(x, a->w), A = stx__array_of(x, a->weights),
               M = stx__array_of(x, a->mean);
    if (a->N)
        STX__RUN_KERNEL(x, "stx_cross_entropy_tokens", stx__loss_weights_kernel, 1, 1024, 0, W,
                        a->known, a->targets, A, a->N, a->ignore, a->ignored_id, a->divisor, M);
}

/* For each row n of logits (N,V), with row stride ld and target = targets[n]:

       row_max[n] = max_v logits[n,v]
       inv_sum[n] = 1 / sum_v e^(logits[n,v] - row_max[n])
       nll[n]     = row_max[n] - log inv_sum[n] - logits[n,target]
       loss[n]    = w[n] nll[n], in double

   nll.p and w.p may be NULL; without w, weights are 1. All four are 0 for rows with a
   negative target. T threads handle a row in one pass. stx__total_kernel then adds the
   losses in a fixed tree. */
template <int T>
STX__GLOBAL(STX__ROW_BLOCK(T))
stx__token_loss_fwd_kernel(double *loss, stx__array nll, stx__array row_max, stx__array inv_sum,
                           stx__array logits, const int32_t *targets, stx__array w, size_t N,
                           size_t V, size_t ld) {
    STX__SHARED(float, sh, 32);
    STX__EACH_ROW(n, N, T) {
        const int32_t target = targets[n];
        stx__lse l = {0, 0};
        if (target >= 0) l = stx__row_lse<T>(logits, n * ld, V, sh);
        if (threadIdx.x % T == 0) {
            double v = target < 0 ? 0
                                  : (double)l.max + log((double)l.sum)
                                        - (double)stx__get(logits, n * ld + (size_t)target);
            stx__put(row_max, n, l.max);
            stx__put(inv_sum, n, target < 0 ? 0 : 1 / l.sum);
            if (nll.p) stx__put(nll, n, (float)v);
            loss[n] = w.p && target >= 0 ? (double)stx__get(w, n) * v : v;
        }
    }
}

void stx_token_loss_fwd_cuda(stx_ctx *x, const stx_token_loss_args *a) {
    static const char name[] = "stx_token_loss_fwd";
    const size_t N = a->N, V = a->V;
    stx__array L = stx__array_of(x, a->loss), P = stx__array_of(x, a->nll),
               M = stx__array_of(x, a->row_max), I = stx__array_of(x, a->inv_sum),
               A = stx__array_of(x, a->logits), W = stx__array_of(x, a->weights);
    double *part;
    if (!N || !V || !(part = (double *)stx__scratch_of(x, N * sizeof *part, name))) return;
    STX__RUN_ROWS(x, name, N, V, stx__token_loss_fwd_kernel<T>, part, P, M, I, A, a->targets, W, N,
                  V, a->ld);
    STX__RUN_KERNEL(x, name, stx__total_kernel, 1, 1024, 0, L, part, N, a->divisor, 0);
}

/* T threads compute row n of dlogits (N,V):

       dlogits[n,v] = or += g (e^(logits[n,v] - row_max[n]) inv_sum[n] - [v = target])

   Without accumulate, dlogits may be logits, because each element is read and written
   by the same thread. The elements from V to ld are then set to 0. If `known` is 0, the
   row has no target: the caller passes target >= V and g = 0, and dlogits is 0 even if
   logits contains a NaN. */
template <int T>
static __device__ void stx__token_loss_row(stx__array dlogits, stx__array row_max,
                                           stx__array inv_sum, stx__array logits, size_t n,
                                           size_t V, size_t ld, size_t target, int known, float g,
                                           int accumulate) {
    const size_t start = n * ld, t = threadIdx.x % T;
    const size_t head = stx__same_head(dlogits, logits) ? stx__row_head(logits, start, V) : V,
                 fours = (V - head) / 4;
    const float m = stx__get(row_max, n), f = g * stx__get(inv_sum, n);
    for (size_t i = t; i < V - 4 * fours; i += T) {
        size_t v = stx__row_edge(i, head, fours);
        float d = known ? f * expf(stx__get(logits, start + v) - m) : 0,
              was = accumulate ? stx__get(dlogits, start + v) : 0;
        stx__put(dlogits, start + v, d + was - (v == target ? g : 0));
    }
#pragma unroll 2
    for (size_t q = t; q < fours; q += T) {
        size_t v = head + 4 * q;
        float d[4], was[4] = {0, 0, 0, 0};
        stx__getn<4>(d, logits, start + v);
        if (accumulate) stx__getn<4>(was, dlogits, start + v);
        for (int e = 0; e < 4; e++)
            d[e] = (known ? f * expf(d[e] - m) : 0) + was[e] - (v + e == target ? g : 0);
        stx__putn<4>(dlogits, start + v, d);
    }
    for (size_t v = V + t; v < ld && !accumulate; v += T) stx__put(dlogits, start + v, 0);
}

/* dlogits (N,V) = or += dloss w[n] / divisor times the gradient of the row's nll. If w.p
   is NULL, all weights are 1. A row with a negative target is set to 0, or with
   accumulate is left unchanged. T threads handle a row. The bound on blocks per
   multiprocessor keeps the compiler from spilling registers. */
template <int T>
STX__GLOBAL(STX__ROW_BLOCK(T), T > 256 ? 0 : 6)
stx__token_loss_bwd_kernel(stx__array dlogits, stx__array dloss, stx__array row_max,
                           stx__array inv_sum, stx__array logits, const int32_t *targets,
                           stx__array w, size_t N, size_t V, size_t ld, double divisor,
                           int accumulate) {
    const float scale = (float)((double)stx__get(dloss, 0) / divisor);
    STX__EACH_ROW(n, N, T) {
        const int known = targets[n] >= 0;
        const float g = w.p ? scale * stx__get(w, n) : scale;
        if (!known && accumulate) continue;
        stx__token_loss_row<T>(dlogits, row_max, inv_sum, logits, n, V, ld,
                               known ? (size_t)targets[n] : V, known, known ? g : 0, accumulate);
    }
}

void stx_token_loss_bwd_cuda(stx_ctx *x, const stx_token_loss_args *a) {
    const size_t N = a->N, V = a->V;
    stx__array D = stx__array_of(x, a->dlogits), G = stx__array_of(x, a->dloss),
               M = stx__array_of(x, a->row_max), I = stx__array_of(x, a->inv_sum),
               A = stx__array_of(x, a->logits), W = stx__array_of(x, a->weights);
    const int accumulate = a->accumulate && a->dlogits != a->logits;
    if (N && V)
        STX__RUN_ROWS(x, "stx_token_loss_bwd", N, V, stx__token_loss_bwd_kernel<T>, D, G, M, I, A,
                      a->targets, W, N, V, a->ld, a->divisor, accumulate);
}

/* Returns the column of the head's logits that the loss reads for an id in cluster c:
   the id itself in cluster 0, otherwise the column of its cluster. Without a head,
   returns the row r of the id in its cluster, or 0 if the id does not fit there. */
static __device__ __forceinline__ int32_t stx__cluster_at(const stx__cluster_sort_args &k, int K,
                                                          int c, int32_t id, size_t r, int fits) {
    if (!k.head) return fits ? (int32_t)r : 0;
    if (c == 0) return id;
    return (int32_t)(k.end[0] + (size_t)(k.forward_columns ? c - 1 : K - 1 - c));
}

/* Sorts the ids (n) by cluster with a stable sort, see stx__cluster_sort_args. A block
   handles STX__CLUSTER_IDS ids. The rank of an id in its cluster is the number of earlier
   ids in the same cluster: in earlier blocks (`earlier`), in earlier warps (`count`) and
   in earlier lanes (`before`). If there are several blocks, a first kernel counts the
   ids of each block.

   stx__cluster_votes returns the cluster of an id, or k.count if it has none. Each warp
   counts its ids per cluster with a ballot. */
enum { STX__CLUSTER_IDS = 256, STX__CLUSTER_WARPS = STX__CLUSTER_IDS / 32 };

static __device__ __forceinline__ int stx__cluster_votes(unsigned *count, unsigned &before,
                                                         int32_t id,
                                                         const stx__cluster_sort_args &k) {
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int K = (int)k.count;
    int c = id < 0 ? K : 0;
    before = 0;
    while (c < K && (size_t)id >= k.end[c]) c++;
    for (int e = 0; e < K; e++) {
        unsigned votes = __ballot_sync(STX__ALL, c == e);
        if (lane == 0) count[e * STX__CLUSTER_WARPS + warp] = (unsigned)__popc(votes);
        if (c == e) before = (unsigned)__popc(votes & ((1u << lane) - 1));
    }
    return c;
}

/* Returns the number of ids of cluster c in the first `warps` warps. */
static __device__ __forceinline__ unsigned stx__cluster_count(const unsigned *count, int c,
                                                              unsigned warps) {
    unsigned sum = 0;
    for (unsigned w = 0; w < STX__CLUSTER_WARPS; w++)
        sum += w < warps ? count[c * STX__CLUSTER_WARPS + w] : 0;
    return sum;
}

/* counts (K,blocks) = the number of ids of each cluster in each block. */
STX__GLOBAL(STX__CLUSTER_IDS)
stx__cluster_count_kernel(unsigned *counts, const int32_t *ids, size_t n,
                          const stx__cluster_sort_args k) {
    STX__SHARED(unsigned, count, STX_MAX_CLUSTERS *STX__CLUSTER_WARPS);
    const size_t i = (size_t)blockIdx.x * STX__CLUSTER_IDS + threadIdx.x;
    unsigned before;
    (void)stx__cluster_votes(count, before, i < n ? ids[i] : -1, k);
    __syncthreads();
    if (threadIdx.x < k.count)
        counts[threadIdx.x * gridDim.x + blockIdx.x] =
            stx__cluster_count(count, (int)threadIdx.x, STX__CLUSTER_WARPS);
}

/* Writes the results. Warp c adds the counts of cluster c: those of earlier blocks and
   those of all blocks. */
STX__GLOBAL(STX__CLUSTER_IDS)
stx__cluster_sort_kernel(int32_t *local, int32_t *place, int32_t *at, int32_t *over,
                         const unsigned *counts, const int32_t *ids, size_t n,
                         const stx__cluster_sort_args k) {
    STX__SHARED(unsigned, count, STX_MAX_CLUSTERS *STX__CLUSTER_WARPS);
    STX__SHARED(unsigned, earlier, STX_MAX_CLUSTERS);
    STX__SHARED(unsigned, total, STX_MAX_CLUSTERS);
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const size_t i = (size_t)blockIdx.x * STX__CLUSTER_IDS + threadIdx.x;
    const int32_t id = i < n ? ids[i] : -1;
    const int K = (int)k.count;
    unsigned before;
    const int c = stx__cluster_votes(count, before, id, k);
    static_assert((int)STX_MAX_CLUSTERS <= (int)STX__CLUSTER_WARPS, "a warp per cluster");
    __syncthreads();
    if ((int)warp < K) {
        unsigned some = 0, all = 0;
        for (unsigned b = lane; b < gridDim.x; b += 32) {
            unsigned m = gridDim.x > 1 ? counts[warp * gridDim.x + b]
                                       : stx__cluster_count(count, (int)warp, STX__CLUSTER_WARPS);
            all += m;
            if (b < blockIdx.x) some += m;
        }
        earlier[warp] = __reduce_add_sync(STX__ALL, some);
        total[warp] = __reduce_add_sync(STX__ALL, all);
    }
    __syncthreads();

    if (i < n && c == K) at[i] = -1;
    if (c < K) {
        size_t r = k.first[c] + earlier[c] + stx__cluster_count(count, c, warp) + before;
        int fits = r < k.first[c + 1];
        at[i] = stx__cluster_at(k, K, c, id, r, fits);
        if (fits) {
            local[r] = id - (c ? (int32_t)k.end[c - 1] : 0);
            place[r] = (int32_t)i;
        }
    }

    for (int e = 0; e < K; e++) /* unused slots */
        for (size_t r = k.first[e] + total[e] + i; r < k.first[e + 1];
             r += (size_t)gridDim.x * STX__CLUSTER_IDS) {
            local[r] = k.leftover;
            place[r] = 0;
        }
    if (i == 0) {
        int more = 0;
        for (int e = k.head ? 1 : 0; e < K; e++) more |= total[e] > k.first[e + 1] - k.first[e];
        *over = more;
    }
}

void stx__cluster_sort_cuda(stx_ctx *x, const stx__cluster_sort_args *k) {
    const char *name = "stx_adaptive_softmax, sort";
    const unsigned blocks = stx__blocks(k->n, STX__CLUSTER_IDS, (size_t)1 << 30);
    unsigned *counts = NULL; /* (K,blocks) */
    if (blocks > 1) {
        counts = (unsigned *)stx__scratch_of(x, k->count * blocks * sizeof *counts, name);
        if (!counts) return;
        STX__RUN_KERNEL(x, name, stx__cluster_count_kernel, blocks, STX__CLUSTER_IDS, 0, counts,
                        k->ids, k->n, *k);
    }
    STX__RUN_KERNEL(x, name, stx__cluster_sort_kernel, blocks, STX__CLUSTER_IDS, 0, k->local,
                    k->place, k->at, k->over, counts, k->ids, k->n, *k);
}

/* y (n) = NaN if flag[0] is not 0. A thread writes an element at a time. */
STX__GLOBAL(256) stx__nan_if_kernel(stx__array y, size_t n, const int32_t *flag) {
    if (*flag) STX__STEP(i, n, 1) stx__put(y, i, nanf(""));
}

void stx__nan_if_cuda(stx_ctx *x, stx_real *y, size_t n, const int32_t *flag) {
    stx__array Y = stx__array_of(x, y);
    if (n)
        STX__RUN_KERNEL(x, "stx__nan_if", stx__nan_if_kernel, stx__grid(x, n), 256, 0, Y, n, flag);
}


// >>mse

/* loss (1) = mean (a - b)^2, where a and b are (n) */
void stx_mse_fwd_cuda(stx_ctx *x, stx_real *loss, const stx_real *a, const stx_real *b, size_t n) {
    stx__sum_cuda(x, "stx_mse_fwd", STX__SUM_SQUARES, loss, a, b, n, (double)n, 0);
}

/* Gradients of loss = mean (a - b)^2:
       da (n) += 2 (a - b) dloss / n
       db (n) -= 2 (a - b) dloss / n
   da.p and db.p may be NULL. A thread handles W adjacent elements at a time. */
template <int W>
STX__GLOBAL(256)
stx__mse_bwd_kernel(stx__array da, stx__array db, stx__array dloss, stx__array a, stx__array b,
                    size_t n) {
    float g = 2 * stx__get(dloss, 0) / (float)n;
    STX__STEP(i, n, W) {
        float v[W], w[W];
        stx__getn<W>(v, a, i);
        stx__getn<W>(w, b, i);
        for (int e = 0; e < W; e++) {
            v[e] = g * (v[e] - w[e]);
            w[e] = -v[e];
        }
        if (da.p) stx__addn<W>(da, i, v, 1);
        if (db.p) stx__addn<W>(db, i, w, 1);
    }
}

void stx_mse_bwd_cuda(stx_ctx *x, stx_real *da, stx_real *db, const stx_real *dloss,
                      const stx_real *a, const stx_real *b, size_t n) {
    stx__array D = stx__array_of(x, da), E = stx__array_of(x, db), G = stx__array_of(x, dloss),
               A = stx__array_of(x, a), B = stx__array_of(x, b);
    const int four =
        n % 4 == 0 && stx__aligned4(D) && stx__aligned4(E) && stx__aligned4(A) && stx__aligned4(B);
    if (n) STX__RUN_BY(x, "stx_mse_bwd", four, stx__mse_bwd_kernel, n, D, E, G, A, B, n);
}


/* ---- src/cuda/attention_plain.cuh ---- */
// >>attention: oracle

/* Version 0 of the attention consists of plain matmuls and, in each direction, a softmax
   kernel that processes whole rows of scores. It accepts every call. It is the reference
   for the fused kernels and handles the calls that they do not support. All arithmetic is
   in float, regardless of the storage type.

   Letters of all attention sections
       B, T     batch rows; queries per row        H, D   heads; elements per head
       S, C     keys per row; C = S - T, so that query i is at the position of key C + i
       P, N     rows of the position table pe; persistent vectors per head
       b, h     batch row, head; a unit is one pair (b,h)
       i, j     query, key; their distance is delta = C + i - j
       p        row of pe for query i and key j: P - 1 + delta_min - delta
       u, vb    content_bias, position_bias (H,D)
       z        span_fraction (H); z_span = z max_span
       s        logit; the backward pass replaces it with w and then with r a
       w        e^(s - row_max) inv_sum, the softmax without the ramp
       m, a     weight of the ramp, in [0,1]; attention weight a = m w
       r        dropout factor: 0 or 1 / keep; 1 without dropout
       g        dO.v in the backward pass, then ds
       Pr       precision of a kernel, a template argument: bf16, tf32 or f32

   Units are processed in chunks, and a chunk in panels of queries, so that the scores of
   a panel stay small. The queries of a panel can see only the keys j0 .. j0+W-1. For each
   unit of the chunk, a panel has the rows

       s (n, W + N)      column c < W: key j0 + c; column W + k: persistent vector k

   The position term needs no separate matrix: row r of (q + vb) PE^T is added to s at a
   column offset that increases by one per row, and the same view of ds gives the
   gradient of pe (see `skew` in stx__mat). dk, dv and the gradients that several units
   share (pe, u, vb, z, pk, pv) are first summed in float per unit, then over the units
   of a chunk in order. They are added to the gradient arrays once, at the end. */

/* One matrix per unit (b,h). If z is the index of the unit in its chunk, the element in
   row r and column c has the index
       at + b batch_stride + h head_stride + z unit_stride + (first + r) row_stride + c
   Rows with first + r outside [0,rows), such as keys before the first one, are zero,
   and so are padded keys, for which pad[b pad_stride + first + r] is not 0. If `bias`
   is set, its element h head_stride + c is added. With `skew`, column c is the stored
   column c + r + skew_offset, or zero if that is outside [0,width). */
typedef struct stx__mat {
    stx__array a, bias;
    size_t at, batch_stride, head_stride, unit_stride, row_stride;
    ptrdiff_t first, rows, skew_offset, width;
    /* `cached` is 1 if the matrix holds keys, 2 if it holds values and 0 otherwise. The
       rows of keys and values before the current block are in an stx__mat_cached */
    int skew, cached;
    const int32_t *pad;
    size_t pad_stride;
} stx__mat;

/* The cached rows of keys, values or their gradients (stx_attention_args.cached). Group g
   contains the rows j with first[g] <= j < cut. cut is 0 if there are no cached rows. */
typedef struct stx__mat_cached {
    stx__array a[STX_HEAD_GROUPS];
    size_t row_stride[STX_HEAD_GROUPS], batch_stride[STX_HEAD_GROUPS];
    ptrdiff_t first[STX_HEAD_GROUPS], cut;
    int groups;
    uint8_t head_group[256], head_index[256];
} stx__mat_cached;

/* The cached rows of one head. Row j is at base + (j - first) * row_stride. */
typedef struct stx__mat_cached_head {
    stx__array a;
    size_t base, row_stride;
    ptrdiff_t first, cut;
    int group;
} stx__mat_cached_head;

static __device__ __forceinline__ stx__mat_cached_head
stx__mat_cached_head_of(const stx__mat &m, const stx__mat_cached &p, size_t b, size_t h, size_t D) {
    stx__mat_cached_head o = {{NULL, NULL, 0}, 0, 0, 0, 0, 0};
    if (!m.cached || !p.cut) return o;
    const int g = p.groups > 1 ? p.head_group[h] : 0;
    const size_t index = p.groups > 1 ? p.head_index[h] : h;
    o.a = p.a[g];
    o.base = b * p.batch_stride[g] + index * D;
    o.row_stride = p.row_stride[g];
    o.first = p.first[g];
    o.cut = p.cut;
    o.group = g;
    return o;
}

static stx__mat stx__mat_of(const stx__array &a, size_t ld, ptrdiff_t first, ptrdiff_t rows) {
    stx__mat m;
    memset(&m, 0, sizeof m);
    m.a = a;
    m.row_stride = ld;
    m.first = first;
    m.rows = rows;
    return m;
}

/* Returns a scratch matrix with n rows and a stride of sz elements per unit. */
static stx__mat stx__mat_scratch(float *p, size_t ld, size_t n, size_t sz) {
    stx__array a = {p, NULL, 0};
    stx__mat m = stx__mat_of(a, ld, 0, (ptrdiff_t)n);
    m.unit_stride = sz;
    return m;
}

static __device__ __forceinline__ size_t stx__mat_base(const stx__mat &m, size_t b, size_t h,
                                                       size_t z) {
    return m.at + b * m.batch_stride + h * m.head_stride + z * m.unit_stride;
}

static __device__ __forceinline__ const int32_t *stx__mat_pad(const stx__mat &m, size_t b) {
    return m.pad ? m.pad + b * m.pad_stride : NULL;
}

static __device__ __forceinline__ float stx__mat_get(const stx__mat &m,
                                                     const stx__mat_cached_head &o, size_t base,
                                                     size_t bias, const int32_t *pad, ptrdiff_t r,
                                                     ptrdiff_t c) {
    ptrdiff_t row = r + m.first;
    if (m.skew) {
        c += r + m.skew_offset;
        if (c < 0 || c >= m.width) return 0;
    }
    if (row < 0 || row >= m.rows || (pad && pad[row])) return 0;
    if (row < o.cut) {
        if (row < o.first) return 0;
        return stx__get(o.a, o.base + (size_t)(row - o.first) * o.row_stride + (size_t)c);
    }
    float v = stx__get(m.a, base + (size_t)row * m.row_stride + (size_t)c);
    return m.bias.p ? v + stx__get(m.bias, bias + (size_t)c) : v;
}

/* C (M,N) = or += alpha op(A) op(B) for each unit, where op transposes if ta or tb is
   set. C is scratch and may be skewed. A block computes 64 x 64 elements of one unit
   (grid: columns, rows, units), and a thread 4 x 4 of them, which needs few registers.
   Operands are loaded into shared memory, 16 columns of op(A) at a time. Each element
   is a sum over k in ascending order. */
enum { STX__PLAIN_TILE = 64, STX__PLAIN_STEP = 16 };

STX__HOST_UNROLLED
STX__GLOBAL(256)
stx__attn_plain_gemm_kernel(stx__mat C, stx__mat A, stx__mat B, stx__mat_cached cached, int ta,
                            int tb, size_t M, size_t N, size_t K, float alpha, int accumulate,
                            size_t u0, size_t H, size_t D) {
    STX__SHARED(float, as, STX__PLAIN_STEP *(STX__PLAIN_TILE + 4));
    STX__SHARED(float, bs, STX__PLAIN_STEP *(STX__PLAIN_TILE + 4));
    const size_t z = blockIdx.z, b = (u0 + z) / H, h = (u0 + z) % H,
                 m0 = (size_t)blockIdx.y * STX__PLAIN_TILE,
                 n0 = (size_t)blockIdx.x * STX__PLAIN_TILE;
    const size_t ab = stx__mat_base(A, b, h, z), bb = stx__mat_base(B, b, h, z),
                 cb = stx__mat_base(C, b, h, z);
    const int32_t *ag = stx__mat_pad(A, b), *bg = stx__mat_pad(B, b);
    const stx__mat_cached_head ao = stx__mat_cached_head_of(A, cached, b, h, D),
                               bo = stx__mat_cached_head_of(B, cached, b, h, D);
    const int tid = (int)threadIdx.x, tx = tid % 16, ty = tid / 16;
    float c[4][4] = {{0}};
    for (size_t k0 = 0; k0 < K; k0 += STX__PLAIN_STEP) {
        /* adjacent threads load elements that are adjacent in memory */
        for (int e = tid; e < STX__PLAIN_TILE * STX__PLAIN_STEP; e += 256) {
            int ka = ta ? e / STX__PLAIN_TILE : e % STX__PLAIN_STEP,
                ma = ta ? e % STX__PLAIN_TILE : e / STX__PLAIN_STEP,
                kb = tb ? e % STX__PLAIN_STEP : e / STX__PLAIN_TILE,
                nb = tb ? e / STX__PLAIN_STEP : e % STX__PLAIN_TILE;
            size_t k = k0 + (size_t)ka, m = m0 + (size_t)ma, l = k0 + (size_t)kb,
                   n = n0 + (size_t)nb;
            float av = 0, bv = 0;
            if (k < K && m < M)
                av = stx__mat_get(A, ao, ab, h * A.head_stride, ag, (ptrdiff_t)(ta ? k : m),
                                  (ptrdiff_t)(ta ? m : k));
            if (l < K && n < N)
                bv = stx__mat_get(B, bo, bb, h * B.head_stride, bg, (ptrdiff_t)(tb ? n : l),
                                  (ptrdiff_t)(tb ? l : n));
            as[ka * (STX__PLAIN_TILE + 4) + ma] = av;
            bs[kb * (STX__PLAIN_TILE + 4) + nb] = bv;
        }
        __syncthreads();
        for (int k = 0; k < STX__PLAIN_STEP; k++) {
            float av[4], bv[4];
            for (int i = 0; i < 4; i++) {
                av[i] = as[k * (STX__PLAIN_TILE + 4) + 4 * ty + i];
                bv[i] = bs[k * (STX__PLAIN_TILE + 4) + 4 * tx + i];
            }
            for (int i = 0; i < 4; i++)
                for (int j = 0; j < 4; j++) c[i][j] += av[i] * bv[j];
        }
        __syncthreads();
    }
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++) {
            size_t m = m0 + (size_t)(4 * ty + i), n = n0 + (size_t)(4 * tx + j);
            ptrdiff_t at = (ptrdiff_t)n;
            if (m >= M || n >= N) continue;
            if (C.skew) {
                at += (ptrdiff_t)m + C.skew_offset;
                if (at < 0 || at >= C.width) continue;
            }
            float *to = (float *)C.a.p + cb + (size_t)((ptrdiff_t)m + C.first) * C.row_stride
                        + (size_t)at;
            *to = accumulate ? *to + alpha * c[i][j] : alpha * c[i][j];
        }
}

/* Arguments of the row kernels. Row z * n + r of s and g belongs to query i0 + r of
   unit u0 + z. */
typedef struct stx__attn_plain_rows {
    float *s, *g;             /* (units,n,ld) */
    float *row_max, *inv_sum; /* (B,H,T) */
    float *dz;                /* (units,n) or NULL */
    size_t T, H, S, N, n, ld, u0, i0, units;
    ptrdiff_t C, j0, W, span, first;
    int delta_min, not_causal, z_shared, no_renorm;
    int norm_all; /* 1: the normaliser includes keys with m = 0 */
    float max_span, ramp, eps;
    float ramp_steps; /* from stx__attn_ramp_steps */
    float root_n;     /* sqrt(N), the factor of a persistent value */
    uint32_t keep;    /* 65536 times the keep probability; 0: no dropout */
    float inv_keep;   /* the factor of a weight that is kept */
    uint64_t seed, stream, rng_first;
    const uint64_t *shift;
    stx__array z;
    const int32_t *pad; /* (B,S) or NULL: see stx_attention_args */
    size_t pad_stride;
} stx__attn_plain_rows;

/* Returns stx_attention_reach plus one. This is the value of stx__attn_farthest in the
   CPU kernels before it is limited to the span. The host precomputes `steps`, the part
   that does not depend on z, because registers are scarce in the calling kernels. */
static __device__ __forceinline__ double stx__attn_span_farthest(float z, float max_span,
                                                                 float steps) {
    double e = ceil((double)z * (double)max_span) + (double)steps + 1;
    if (!(e > 1)) e = 1; /* true for NaN as well */
    return e;
}

/* Clamps a ramp weight to [0,1]. NaN stays NaN. */
static __device__ __forceinline__ float stx__attn_clamp(float ramp) {
    if (ramp <= 0) return 0;
    return ramp >= 1 ? 1 : ramp;
}

static float stx__attn_ramp_steps(const stx_attention_args *a) {
    double r = ceil((double)a->ramp);
    return (float)(r + floor(((double)a->max_span + r) / 4194304));
}

static __device__ float stx__attn_plain_z(const stx__attn_plain_rows &p, size_t h) {
    return stx__get(p.z, p.z_shared ? 0 : h);
}

/* Returns the largest distance that head h attends to, like stx__attn_farthest. */
static __device__ ptrdiff_t stx__attn_plain_farthest(const stx__attn_plain_rows &p, size_t h) {
    double e;
    if (!p.z.p || p.norm_all) return p.span;
    e = stx__attn_span_farthest(stx__attn_plain_z(p, h), p.max_span, p.ramp_steps);
    return e < (double)p.span ? (ptrdiff_t)e : p.span;
}

/* Computes the range [lo,hi) of the panel's key columns that query i0 + r sees. */
static __device__ void stx__attn_plain_bounds(const stx__attn_plain_rows &p, size_t h, size_t r,
                                              ptrdiff_t *lo, ptrdiff_t *hi) {
    ptrdiff_t i = p.C + (ptrdiff_t)(p.i0 + r), from = p.first, to = (ptrdiff_t)p.S;
    if (!p.not_causal) {
        ptrdiff_t farthest = stx__attn_plain_farthest(p, h);
        if (from < i - farthest) from = i - farthest;
        to = i - p.delta_min + 1;
    }
    *lo = from > p.j0 ? from - p.j0 : 0;
    *hi = to - p.j0 < p.W ? to - p.j0 : p.W;
}

/* Returns nonzero if column c of unit u is a persistent vector, or a key in [lo,hi) that
   is not padding. */
static __device__ __forceinline__ int stx__attn_plain_sees(const stx__attn_plain_rows &p, size_t u,
                                                           ptrdiff_t lo, ptrdiff_t hi,
                                                           ptrdiff_t c) {
    if (c >= p.W) return 1;
    return c >= lo && c < hi
           && !(p.pad && p.j0 + c >= 0 && p.pad[u / p.H * p.pad_stride + (size_t)(p.j0 + c)]);
}

/* Returns the ramp weight of column c before clamping: 2 without a ramp, and 2 or -1
   far from the ramp. Performs the same operations as stx__attn_mask_of, in the same
   order and without fusing them. */
static __device__ __forceinline__ float stx__attn_plain_ramp(const stx__attn_plain_rows &p,
                                                             float z_span, size_t r, ptrdiff_t c) {
    float delta;
    if (!p.z.p || c >= p.W) return 2;
    delta = (float)(p.C + (ptrdiff_t)(p.i0 + r) - p.j0 - c);
    delta = __fadd_rn(1.0f - delta, z_span);
    /* well outside the ramp, no division is needed */
    if (delta >= p.ramp || delta <= -2 * p.ramp) return delta > 0 ? 2 : -1;
    return __fadd_rn(delta / p.ramp, 1.0f);
}

/* Returns the factor of the weight in column c after normalisation: dropout, and sqrt(N)
   for persistent vectors. The random numbers are the same as on the CPU. */
static __device__ float stx__attn_plain_factor(const stx__attn_plain_rows &p, size_t u, size_t r,
                                               ptrdiff_t c, uint64_t stream) {
    uint64_t S = (uint64_t)p.S + (uint64_t)p.span, groups = (S + p.N) / 8 + 2,
             row = (uint64_t)u * p.T + p.i0 + r, at;
    float f = c < p.W ? 1.0f : p.root_n;
    if (!p.keep) return f;
    at = c < p.W ? (uint64_t)(p.span + p.j0 + c) : S + (uint64_t)(c - p.W);
    uint4 v = stx__philox(p.seed, stream, p.rng_first + row * groups + at / 8);
    uint32_t word = v.w;
    if (at % 8 < 2)
        word = v.x;
    else if (at % 8 < 4)
        word = v.y;
    else if (at % 8 < 6)
        word = v.z;
    return (at % 2 ? word >> 16 : word & 0xffffu) < p.keep ? __fmul_rn(f, p.inv_keep) : 0.0f;
}

/* Softmax. Replaces the logits in s with the factors of the values. The factors include
   dropout and sqrt(N), and are 0 for keys that the query does not see. For row_max and
   inv_sum, see stx_attention_args. One warp per row makes three passes: maximum, sums,
   weights. Each lane adds every 32nd column in ascending order, then the warp adds its
   lanes' sums in a fixed tree. */
STX__GLOBAL(4 * STX__WARP) stx__attn_plain_softmax_kernel(stx__attn_plain_rows p) {
    const size_t row = (size_t)blockIdx.x * (blockDim.x / STX__WARP) + threadIdx.x / STX__WARP;
    const int lane = (int)(threadIdx.x % STX__WARP);
    if (row >= p.units * p.n) return;
    const size_t u = p.u0 + row / p.n, r = row % p.n, h = u % p.H;
    const ptrdiff_t columns = p.W + (ptrdiff_t)p.N;
    const uint64_t stream = p.keep ? p.stream + *p.shift : 0;
    const float z_span = p.z.p ? __fmul_rn(stx__attn_plain_z(p, h), p.max_span) : 0.0f;
    float *s = p.s + row * p.ld, row_max = -HUGE_VALF, sum = 0, all = 0, norm, inv_sum;
    ptrdiff_t lo, hi, c;
    stx__attn_plain_bounds(p, h, r, &lo, &hi);
    for (c = lane; c < columns; c += STX__WARP)
        if (stx__attn_plain_sees(p, u, lo, hi, c)
            && (c >= p.W || p.norm_all || !(stx__attn_plain_ramp(p, z_span, r, c) <= 0)))
            row_max = fmaxf(row_max, s[c]);
    row_max = stx__warp_max(row_max);
    for (c = lane; c < columns; c += STX__WARP) {
        float m = stx__attn_plain_ramp(p, z_span, r, c), e;
        if (!stx__attn_plain_sees(p, u, lo, hi, c) || (c < p.W && !p.norm_all && m <= 0)) {
            s[c] = 0;
            continue;
        }
        m = stx__attn_clamp(m);
        e = expf(s[c] - row_max);
        s[c] = m * e;
        sum += m * e;
        all += e;
    }
    sum = stx__warp_sum(sum);
    all = stx__warp_sum(all);
    norm = p.no_renorm ? all : sum + p.eps * all;
    inv_sum = norm == 0 ? 0 : 1 / norm; /* y is 0 if the query sees no key */
    for (c = lane; c < columns; c += STX__WARP)
        if (s[c] != 0) s[c] *= inv_sum * stx__attn_plain_factor(p, u, r, c, stream);
    if (lane == 0) {
        p.row_max[u * p.T + p.i0 + r] = row_max;
        p.inv_sum[u * p.T + p.i0 + r] = inv_sum;
    }
}

/* Backward pass of the softmax. Replaces the logits in s with the factors of the
   values, as in the forward pass, and dO.v in g with ds. With the eps of
   stx_attention_args and G = r g, where g is still dO.v:

       D  = sum a G                              dO.y without the rounding error of y
       ds = a (G - D) - eps D w
       dz = sum of w (G - D) over the row's keys with 0 <= ramp <= 1

   With no_renorm, ds = a G - D w and dz is the sum of w G. One warp per row makes two
   passes. */
STX__GLOBAL(4 * STX__WARP) stx__attn_plain_softmax_bwd_kernel(stx__attn_plain_rows p) {
    const size_t row = (size_t)blockIdx.x * (blockDim.x / STX__WARP) + threadIdx.x / STX__WARP;
    const int lane = (int)(threadIdx.x % STX__WARP);
    if (row >= p.units * p.n) return;
    const size_t u = p.u0 + row / p.n, r = row % p.n, h = u % p.H;
    const ptrdiff_t columns = p.W + (ptrdiff_t)p.N;
    const uint64_t stream = p.keep ? p.stream + *p.shift : 0;
    const float z_span = p.z.p ? __fmul_rn(stx__attn_plain_z(p, h), p.max_span) : 0.0f,
                row_max = p.row_max[u * p.T + p.i0 + r], inv_sum = p.inv_sum[u * p.T + p.i0 + r];
    float *s = p.s + row * p.ld, *g = p.g + row * p.ld, D = 0, dz = 0;
    ptrdiff_t lo, hi, c;
    stx__attn_plain_bounds(p, h, r, &lo, &hi);
    for (c = lane; c < columns; c += STX__WARP) {
        float m = stx__attn_plain_ramp(p, z_span, r, c), v = s[c] - row_max;
        if (inv_sum == 0 || !stx__attn_plain_sees(p, u, lo, hi, c)) {
            s[c] = g[c] = 0;
            continue;
        }
        m = stx__attn_clamp(m);
        /* m w <= 1, but w alone may overflow */
        s[c] = expf(v > 80 ? 80 : v) * inv_sum;
        g[c] *= stx__attn_plain_factor(p, u, r, c, stream);
        D += m * s[c] * g[c];
    }
    D = stx__warp_sum(D);
    const float ed = p.no_renorm ? D : p.eps * D;
    if (p.no_renorm) D = 0;
    for (c = lane; c < columns; c += STX__WARP) {
        float raw = stx__attn_plain_ramp(p, z_span, r, c), m = stx__attn_clamp(raw), w = s[c],
              gd = g[c] - D;
        if (inv_sum == 0 || !stx__attn_plain_sees(p, u, lo, hi, c)) continue;
        if (raw >= 0 && raw <= 1) dz += w * gd;
        g[c] = m * w * gd - ed * w;
        s[c] = m * w != 0 ? m * w * stx__attn_plain_factor(p, u, r, c, stream) : m * w;
    }
    dz = stx__warp_sum(dz);
    if (lane == 0 && p.dz) p.dz[row] = dz;
}

/* `to` (rows,D) += p + q for each unit; p and q are scratch with a stride of sz
   elements per unit, and q may be NULL. If bit 0 of `fresh` is set, `to` is overwritten
   instead; if bit 1 + g is set, so are the cached rows of group g. A thread handles an
   element at a time. */
STX__GLOBAL(256)
stx__attn_plain_store_kernel(stx__mat to, stx__mat_cached cached, const float *p, const float *q,
                             size_t sz, size_t rows, size_t D, int fresh, size_t units, size_t u0,
                             size_t H) {
    size_t n = units * rows * D, step = (size_t)gridDim.x * blockDim.x;
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) {
        size_t z = i / (rows * D), e = i % (rows * D), u = u0 + z;
        const ptrdiff_t row = (ptrdiff_t)(e / D) + to.first;
        const stx__mat_cached_head o = stx__mat_cached_head_of(to, cached, u / H, u % H, D);
        const float v = q ? p[z * sz + e] + q[z * sz + e] : p[z * sz + e];
        if (row < o.cut) {
            if (o.a.p && row >= o.first)
                stx__add(o.a, o.base + (size_t)(row - o.first) * o.row_stride + e % D, v,
                         !(fresh >> (1 + o.group) & 1));
        } else if (to.a.p) {
            stx__add(to.a, stx__mat_base(to, u / H, u % H, z) + (size_t)row * to.row_stride + e % D,
                     v, !(fresh & 1));
        }
    }
}

/* `to` (units,D) += the column sums of `from` (units,n,D), which has a stride of sz
   elements per unit. One thread per column adds the rows in ascending order. */
STX__GLOBAL(128)
stx__attn_plain_columns_kernel(float *to, const float *from, size_t sz, size_t n, size_t D,
                               size_t units) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x, r;
    float s = 0;
    if (i >= units * D) return;
    for (r = 0; r < n; r++) s += from[i / D * sz + r * D + i % D];
    to[i] += s;
}

/* `all` (tables,size) += the sums of `parts` (units,size) over the units of the chunk
   that share a table, in ascending order. One thread per element. */
STX__GLOBAL(256)
stx__attn_plain_units_kernel(float *all, const float *parts, size_t size, size_t tables,
                             size_t units, size_t u0) {
    size_t step = (size_t)gridDim.x * blockDim.x;
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < tables * size; i += step) {
        size_t t = i / size, z;
        float s = 0;
        for (z = (t + tables - u0 % tables) % tables; z < units; z += tables)
            s += parts[z * size + i % size];
        all[i] += s;
    }
}

/* grad += f times `all` (tables,rows,D). Element (t,r,d) of `all` is added to element
   `at` + t * st + r * ld + d of grad. One thread per element. */
STX__GLOBAL(256)
stx__attn_plain_add_kernel(stx__array grad, const float *all, float f, size_t tables, size_t rows,
                           size_t D, size_t at, size_t st, size_t ld) {
    size_t step = (size_t)gridDim.x * blockDim.x;
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < tables * rows * D; i += step)
        stx__add(grad, at + i / (rows * D) * st + i / D % rows * ld + i % D, f * all[i], 1);
}


/* ---- src/cuda/attention_plain_calls.cuh ---- */
// >>attention: oracle calls

/* Sums shared by several units. Each has one copy per unit of a chunk (`part`) and one
   copy per table or head (`all`). */
enum { STX__SUM_PE, STX__SUM_U, STX__SUM_VB, STX__SUM_Z, STX__SUM_PK, STX__SUM_PV, STX__SUMS };

/* The division of a call into chunks and panels, and its scratch memory */
typedef struct stx__attn_plain {
    stx_ctx *x;
    const stx_attention_args *a;
    size_t n, units, ld;      /* n: queries per panel; units: units per chunk; ld: row
                                 stride of s and g */
    size_t tables, p0, np;    /* `tables` is the number of tables in pe. The call uses rows
                                 p0 .. p0+np-1 of each table */
    size_t size[STX__SUMS];   /* elements of one copy of a sum; 0: the sum is not required */
    size_t copies[STX__SUMS]; /* number of copies of the sum in the gradient */
    float *s, *g;             /* (units,n,ld) */
    float *o, *o_pe;          /* o: output or dq; o_pe: contribution of pe to dq */
    float *rows;              /* (units,n): dz of each row */
    float *parts;             /* one memory block that contains dk, dv and part[] */
    float *dk, *dv;           /* (units,S,D) */
    float *part[STX__SUMS];   /* (units,size) */
    float *all[STX__SUMS];    /* (copies,size) */
    size_t parts_bytes, all_bytes, bytes;
    size_t u0, nu;   /* the current chunk: first unit, number of units */
    size_t i0, nb;   /* the current panel: first query, number of queries */
    ptrdiff_t j0, W; /* keys of the panel: j0 .. j0+W-1 */
    stx__array q, k, v, pe, u, vb, pk, pv, y, dy;
    stx__mat_cached cached_k, cached_v;
} stx__attn_plain;

/* Returns nonzero if the key gradient (or with `value`, the value gradient) is
   required, for the current block or for the cached rows of any group. */
static int stx__attn_needs_grad(const stx_attention_args *a, int value) {
    int any = (value ? a->dv : a->dk) != NULL;
    for (size_t g = 0; g < a->groups; g++)
        any |= (value ? a->cached[g].dv : a->cached[g].dk) != NULL;
    return any;
}

/* Returns the cached rows of keys (what = 0), values (1), key gradients (2) or value
   gradients (3). */
static stx__mat_cached stx__attn_plain_cached(const stx_ctx *x, const stx_attention_args *a,
                                              int what) {
    stx__mat_cached p;
    memset(&p, 0, sizeof p);
    p.cut = (ptrdiff_t)a->cached_rows;
    p.groups = (int)a->groups;
    memcpy(p.head_group, a->head_group, sizeof p.head_group);
    memcpy(p.head_index, a->head_index, sizeof p.head_index);
    for (size_t g = 0; g < a->groups; g++) {
        const stx_attention_kv *o = &a->cached[g];
        const stx_real *rows[4];
        rows[0] = o->k;
        rows[1] = o->v;
        rows[2] = o->dk;
        rows[3] = o->dv;
        p.a[g] = stx__array_of(x, rows[what]);
        p.row_stride[g] = o->row_stride;
        p.batch_stride[g] = o->batch_stride;
        p.first[g] = (ptrdiff_t)(a->cached_rows - o->rows);
    }
    return p;
}

/* Reserves the next `bytes` bytes of a scratch buffer and returns their offset. Offsets
   are multiples of 256. */
static size_t stx__carve(size_t *at, size_t bytes) {
    size_t from = *at;
    *at += (bytes + 255) / 256 * 256;
    return from;
}

/* Reserves `count` floats and returns a pointer to them. If base is NULL, only computes
   the size and returns NULL. */
static float *stx__carve_floats(char *base, size_t *at, size_t count) {
    size_t from = stx__carve(at, count * sizeof(float));
    return base ? (float *)(void *)(base + from) : NULL;
}

/* Sets the sizes of the shared sums and the number of copies of each sum in its
   gradient. */
static void stx__attn_plain_sum_sizes(stx__attn_plain *A, int backward) {
    const stx_attention_args *a = A->a;
    size_t i;
    memset(A->size, 0, sizeof A->size);
    for (i = 0; i < STX__SUMS; i++) A->copies[i] = a->H;
    if (a->span_shared) A->copies[STX__SUM_Z] = 1;
    if (!backward) return;
    if (a->dpe) {
        A->size[STX__SUM_PE] = A->np * a->D;
        A->copies[STX__SUM_PE] = A->tables;
    }
    if (a->dcontent_bias) A->size[STX__SUM_U] = a->D;
    if (a->dposition_bias) A->size[STX__SUM_VB] = a->D;
    if (a->dspan_fraction) A->size[STX__SUM_Z] = 1;
    if (a->dpersistent_k) A->size[STX__SUM_PK] = a->N * a->D;
    if (a->dpersistent_v) A->size[STX__SUM_PV] = a->N * a->D;
}

/* Chooses the queries per panel and the units per chunk so that about 200 MiB of scratch
   is used. Version 3, for tests, uses small numbers so that even short calls have several
   panels and chunks. */
static void stx__attn_plain_panels(stx__attn_plain *A, int backward) {
    const stx_attention_args *a = A->a;
    const size_t budget = (size_t)200 << 20, few = stx__gpu(A->x)->attention == 3;
    size_t window = (size_t)((ptrdiff_t)a->S - STX_MIN(a->first_key, (ptrdiff_t)a->S)), unit, i;
    if (a->not_causal && a->first_key < 0) window = a->S;
    for (A->n = STX_MIN(a->T, (size_t)(few ? 32 : 256));; A->n = (A->n + 1) / 2) {
        A->ld = (a->not_causal ? window : STX_MIN(window, a->span + A->n)) + a->N;
        unit = A->n * (A->ld * (backward ? 2 : 1) + 2 * a->D + 1);
        if (A->n <= 32 || unit * sizeof(float) <= budget / 2) break;
    }
    if (backward) {
        if (stx__attn_needs_grad(a, 0)) unit += a->S * a->D;
        if (stx__attn_needs_grad(a, 1)) unit += a->S * a->D;
    }
    for (i = 0; i < STX__SUMS; i++) unit += A->size[i];
    A->units = few ? 3 : budget / (unit * sizeof(float));
    A->units = STX_MAX((size_t)1, STX_MIN(STX_MIN(A->units, a->B * a->H), (size_t)65535));
}

/* Divides args.work among the scratch arrays and returns the required size in bytes. */
static size_t stx__attn_plain_layout(stx__attn_plain *A, int backward) {
    const stx_attention_args *a = A->a;
    char *base = a->work ? (char *)(((uintptr_t)a->work + 255) / 256 * 256) : NULL;
    const size_t met = a->span + 1; /* rows of pe for distances up to the span */
    size_t at = 0, i;
    A->tables = a->P ? (size_t)a->pe_heads : 0;
    A->p0 = 0;
    if (a->P + (size_t)a->delta_min > met) A->p0 = a->P + (size_t)a->delta_min - met;
    if (A->p0 > a->P) A->p0 = a->P;
    A->np = a->P - A->p0;
    stx__attn_plain_sum_sizes(A, backward);
    stx__attn_plain_panels(A, backward);

    A->s = stx__carve_floats(base, &at, A->units * A->n * A->ld);
    A->o = stx__carve_floats(base, &at, A->units * A->n * a->D);
    if (backward) {
        const size_t keys = A->units * a->S * a->D;
        A->g = stx__carve_floats(base, &at, A->units * A->n * A->ld);
        A->o_pe = stx__carve_floats(base, &at, A->units * A->n * a->D);
        A->rows = stx__carve_floats(base, &at, A->units * A->n);
        A->parts_bytes = at;
        A->dk = stx__carve_floats(base, &at, stx__attn_needs_grad(a, 0) ? keys : 0);
        A->dv = stx__carve_floats(base, &at, stx__attn_needs_grad(a, 1) ? keys : 0);
        A->parts = A->dk;
        for (i = 0; i < STX__SUMS; i++)
            A->part[i] = stx__carve_floats(base, &at, A->units * A->size[i]);
        A->parts_bytes = at - A->parts_bytes;
        A->all_bytes = at;
        for (i = 0; i < STX__SUMS; i++)
            A->all[i] = stx__carve_floats(base, &at, A->copies[i] * A->size[i]);
        A->all_bytes = at - A->all_bytes;
    }
    return A->bytes = at + 256;
}

static void stx__attn_plain_open(stx__attn_plain *A, stx_ctx *x, const stx_attention_args *a,
                                 int backward) {
    memset(A, 0, sizeof *A);
    A->x = x;
    A->a = a;
    stx__attn_plain_layout(A, backward);
    A->q = stx__array_of(x, a->q);
    A->k = stx__array_of(x, a->k);
    A->v = stx__array_of(x, a->v);
    A->pe = stx__array_of(x, a->pe);
    A->u = stx__array_of(x, a->content_bias);
    A->vb = stx__array_of(x, a->position_bias);
    A->pk = stx__array_of(x, a->persistent_k);
    A->pv = stx__array_of(x, a->persistent_v);
    A->y = stx__array_of(x, a->y);
    A->dy = stx__array_of(x, a->dy);
    A->cached_k = stx__attn_plain_cached(x, a, 0);
    A->cached_v = stx__attn_plain_cached(x, a, 1);
}

/* Runs a matmul for all units of the chunk. If an operand has cached = 1 (keys) or 2
   (values), the kernel reads the cached rows of that kind. */
static void stx__attn_plain_gemm(const stx__attn_plain *A, const stx__mat &C, const stx__mat &L,
                                 int ta, const stx__mat &R, int tb, size_t M, size_t N, size_t K,
                                 float alpha, int accumulate) {
    dim3 grid((unsigned)((N + STX__PLAIN_TILE - 1) / STX__PLAIN_TILE),
              (unsigned)((M + STX__PLAIN_TILE - 1) / STX__PLAIN_TILE), (unsigned)A->nu);
    if (!M || !N || (!K && accumulate)) return;
    STX__RUN_KERNEL(A->x, "stx_attention", stx__attn_plain_gemm_kernel, grid, 256, 0, C, L, R,
                    L.cached + R.cached > 1 ? A->cached_v : A->cached_k, ta, tb, M, N, K, alpha,
                    accumulate, A->u0, A->a->H, A->a->D);
}

static void stx__attn_plain_store(const stx__attn_plain *A, const stx__mat &to,
                                  const stx__mat_cached &cached, const float *p, const float *q,
                                  size_t sz, size_t rows, int fresh) {
    if (!rows) return;
    STX__RUN_KERNEL(A->x, "stx_attention", stx__attn_plain_store_kernel,
                    stx__blocks(A->nu * rows * A->a->D, 256, 65535), 256, 0, to, cached, p, q, sz,
                    rows, A->a->D, fresh, A->nu, A->u0, A->a->H);
}

static void stx__attn_plain_columns(const stx__attn_plain *A, float *to, const float *from,
                                    size_t sz, size_t D) {
    STX__RUN_KERNEL(A->x, "stx_attention_bwd", stx__attn_plain_columns_kernel,
                    stx__blocks(A->nu * D, 128, (size_t)1 << 30), 128, 0, to, from, sz, A->nb, D,
                    A->nu);
}

/* These functions return the matrices of the current panel. */
static stx__mat stx__attn_plain_mat_q(const stx__attn_plain *A, const stx__array &q,
                                      const stx__array *bias) {
    stx__mat m = stx__mat_of(q, A->a->q_row_stride, (ptrdiff_t)A->i0, (ptrdiff_t)A->a->T);
    m.batch_stride = A->a->q_batch_stride;
    m.head_stride = A->a->D;
    if (bias) m.bias = *bias;
    return m;
}

static stx__mat stx__attn_plain_mat_y(const stx__attn_plain *A, const stx__array &y) {
    stx__mat m = stx__mat_of(y, A->a->H * A->a->D, (ptrdiff_t)A->i0, (ptrdiff_t)A->a->T);
    m.batch_stride = A->a->T * m.row_stride;
    m.head_stride = A->a->D;
    return m;
}

static stx__mat stx__attn_plain_mat_kv(const stx__attn_plain *A, const stx__array &k,
                                       ptrdiff_t first, int cached) {
    stx__mat m = stx__mat_of(k, A->a->kv_row_stride, first, (ptrdiff_t)A->a->S);
    /* k begins at key cached_rows; this is the offset that key 0 would have */
    m.at = 0 - A->a->cached_rows * A->a->kv_row_stride;
    m.batch_stride = A->a->kv_batch_stride;
    m.head_stride = A->a->D;
    m.cached = cached;
    m.pad = A->a->pad;
    m.pad_stride = A->a->pad_batch_stride;
    return m;
}

static stx__mat stx__attn_plain_mat_pe(const stx__attn_plain *A) {
    stx__mat m = stx__mat_of(A->pe, A->tables * A->a->D, (ptrdiff_t)A->p0, (ptrdiff_t)A->a->P);
    m.head_stride = A->tables > 1 ? A->a->D : 0;
    return m;
}

static stx__mat stx__attn_plain_mat_persistent(const stx__attn_plain *A, const stx__array &p) {
    stx__mat m = stx__mat_of(p, A->a->D, 0, (ptrdiff_t)A->a->N);
    m.head_stride = A->a->N * A->a->D;
    return m;
}

/* Returns the matrix s or g, starting at column `column`. With skew, column c holds the
   scores of row p0 + c of pe. */
static stx__mat stx__attn_plain_mat_scores(const stx__attn_plain *A, float *s, size_t column,
                                           int skew) {
    const stx_attention_args *a = A->a;
    stx__mat m = stx__mat_scratch(s + column, A->ld, A->nb, A->nb * A->ld);
    m.skew = skew;
    m.skew_offset = (ptrdiff_t)A->p0 - ((ptrdiff_t)a->P - 1 + a->delta_min) + (ptrdiff_t)a->S
                    - (ptrdiff_t)a->T + (ptrdiff_t)A->i0 - A->j0;
    m.width = A->W;
    return m;
}

static stx__mat stx__attn_plain_mat_out(const stx__attn_plain *A, float *o) {
    return stx__mat_scratch(o, A->a->D, A->nb, A->nb * A->a->D);
}

/* Starts the panel whose first query is i0: determines the keys that its queries may see
   and computes their logits in s. */
static void stx__attn_plain_logits(stx__attn_plain *A, size_t i0) {
    const stx_attention_args *a = A->a;
    ptrdiff_t C = (ptrdiff_t)a->S - (ptrdiff_t)a->T, last = (ptrdiff_t)a->S;
    A->i0 = i0;
    A->nb = STX_MIN(A->n, a->T - i0);
    A->j0 = a->not_causal ? STX_MAX(a->first_key, 0)
                          : STX_MAX(a->first_key, C + (ptrdiff_t)i0 - (ptrdiff_t)a->span);
    if (!a->not_causal) last = C + (ptrdiff_t)(i0 + A->nb) - a->delta_min;
    A->W = STX_MAX(last - A->j0, (ptrdiff_t)0);
    stx__attn_plain_gemm(A, stx__attn_plain_mat_scores(A, A->s, 0, 0),
                         stx__attn_plain_mat_q(A, A->q, &A->u), 0,
                         stx__attn_plain_mat_kv(A, A->k, A->j0, 1), 1, A->nb, (size_t)A->W, a->D,
                         a->scale, 0);
    if (a->P)
        stx__attn_plain_gemm(A, stx__attn_plain_mat_scores(A, A->s, 0, 1),
                             stx__attn_plain_mat_q(A, A->q, &A->vb), 0, stx__attn_plain_mat_pe(A),
                             1, A->nb, A->np, a->D, a->scale, 1);
    stx__attn_plain_gemm(A, stx__attn_plain_mat_scores(A, A->s, (size_t)A->W, 0),
                         stx__attn_plain_mat_q(A, A->q, NULL), 0,
                         stx__attn_plain_mat_persistent(A, A->pk), 1, A->nb, a->N, a->D,
                         a->scale * (float)sqrt((double)a->D), 0);
}

static stx__attn_plain_rows stx__attn_plain_rows_of(const stx__attn_plain *A) {
    const stx_attention_args *a = A->a;
    stx__attn_plain_rows p;
    memset(&p, 0, sizeof p);
    p.s = A->s;
    p.g = A->g;
    p.row_max = a->row_max;
    p.inv_sum = a->inv_sum;
    p.T = a->T;
    p.H = a->H;
    p.S = a->S;
    p.N = a->N;
    p.n = A->nb;
    p.ld = A->ld;
    p.u0 = A->u0;
    p.i0 = A->i0;
    p.units = A->nu;
    p.C = (ptrdiff_t)a->S - (ptrdiff_t)a->T;
    p.j0 = A->j0;
    p.W = A->W;
    p.span = (ptrdiff_t)a->span;
    p.first = a->first_key;
    p.delta_min = a->delta_min;
    p.not_causal = a->not_causal;
    p.z_shared = a->span_shared;
    p.no_renorm = a->no_renorm;
    p.norm_all = a->eps > 0 || a->no_renorm;
    p.max_span = a->max_span;
    p.ramp = a->ramp;
    p.ramp_steps = stx__attn_ramp_steps(a);
    p.eps = a->eps;
    p.root_n = (float)sqrt((double)a->N);
    if (a->drop > 0) {
        double k = floor((1.0 - (double)a->drop) * 65536.0 + 0.5); /* same as stx__keep16 */
        p.keep = (uint32_t)(k < 1 ? 1 : k);
        p.inv_keep = (float)(65536.0 / p.keep);
        p.seed = a->seed;
        p.stream = a->stream;
        p.rng_first = a->rng_first;
        p.shift = stx__gpu(A->x)->shift;
    }
    p.z = stx__array_of(A->x, a->span_fraction);
    p.pad = a->pad;
    p.pad_stride = a->pad_batch_stride;
    return p;
}

static void stx__attn_plain_fwd(stx_ctx *x, const stx_attention_args *a) {
    stx__attn_plain A;
    size_t i0;
    stx__attn_plain_open(&A, x, a, 0);
    for (A.u0 = 0; A.u0 < a->B * a->H; A.u0 += A.nu) {
        A.nu = STX_MIN(A.units, a->B * a->H - A.u0);
        for (i0 = 0; i0 < a->T; i0 += A.nb) {
            stx__attn_plain_logits(&A, i0);
            STX__RUN_KERNEL(x, "stx_attention_fwd", stx__attn_plain_softmax_kernel,
                            stx__blocks(A.nu * A.nb, 4, (size_t)1 << 30), 4 * STX__WARP, 0,
                            stx__attn_plain_rows_of(&A));
            stx__attn_plain_gemm(&A, stx__attn_plain_mat_out(&A, A.o),
                                 stx__attn_plain_mat_scores(&A, A.s, 0, 0), 0,
                                 stx__attn_plain_mat_kv(&A, A.v, A.j0, 2), 0, A.nb, a->D,
                                 (size_t)A.W, 1, 0);
            stx__attn_plain_gemm(&A, stx__attn_plain_mat_out(&A, A.o),
                                 stx__attn_plain_mat_scores(&A, A.s, (size_t)A.W, 0), 0,
                                 stx__attn_plain_mat_persistent(&A, A.pv), 0, A.nb, a->D, a->N, 1,
                                 1);
            stx__attn_plain_store(&A, stx__attn_plain_mat_y(&A, A.y), A.cached_k, A.o, NULL,
                                  A.nb * a->D, A.nb, 1);
        }
    }
}

/* Adds the sums over the queries of a panel: dV += (r a)^T dO, dK += ds^T (q + u), and
   the shared sums. */
static void stx__attn_plain_bwd_queries(stx__attn_plain *A, const stx__mat &dy, int has_dz) {
    const stx_attention_args *a = A->a;
    const size_t D = a->D, W = (size_t)A->W,
                 zeros = (size_t)STX_MIN(STX_MAX(-A->j0, (ptrdiff_t)0), A->W),
                 real = (size_t)STX_MAX(A->j0, (ptrdiff_t)0);
    const float persistent = a->scale * (float)sqrt((double)D);
    if (stx__attn_needs_grad(a, 1))
        stx__attn_plain_gemm(A, stx__mat_scratch(A->dv + real * D, D, a->S, a->S * D),
                             stx__attn_plain_mat_scores(A, A->s, zeros, 0), 1, dy, 0, W - zeros, D,
                             A->nb, 1, 1);
    if (stx__attn_needs_grad(a, 0))
        stx__attn_plain_gemm(A, stx__mat_scratch(A->dk + real * D, D, a->S, a->S * D),
                             stx__attn_plain_mat_scores(A, A->g, zeros, 0), 1,
                             stx__attn_plain_mat_q(A, A->q, &A->u), 0, W - zeros, D, A->nb,
                             a->scale, 1);
    if (has_dz) stx__attn_plain_columns(A, A->part[STX__SUM_Z], A->rows, A->nb, 1);
    if (A->size[STX__SUM_PV])
        stx__attn_plain_gemm(A, stx__mat_scratch(A->part[STX__SUM_PV], D, a->N, a->N * D),
                             stx__attn_plain_mat_scores(A, A->s, W, 0), 1, dy, 0, a->N, D, A->nb, 1,
                             1);
    if (A->size[STX__SUM_PK])
        stx__attn_plain_gemm(A, stx__mat_scratch(A->part[STX__SUM_PK], D, a->N, a->N * D),
                             stx__attn_plain_mat_scores(A, A->g, W, 0), 1,
                             stx__attn_plain_mat_q(A, A->q, NULL), 0, a->N, D, A->nb, persistent,
                             1);
    if (A->size[STX__SUM_PE])
        stx__attn_plain_gemm(A, stx__mat_scratch(A->part[STX__SUM_PE], D, A->np, A->np * D),
                             stx__attn_plain_mat_scores(A, A->g, 0, 1), 1,
                             stx__attn_plain_mat_q(A, A->q, &A->vb), 0, A->np, D, A->nb, a->scale,
                             1);
}

/* Runs the backward pass of one panel, whose logits must be in s. The forward pass is
   s = (q + u) K^T + (q + vb) PE^T, y = a V. */
static void stx__attn_plain_bwd_panel(stx__attn_plain *A) {
    const stx_attention_args *a = A->a;
    const size_t D = a->D, W = (size_t)A->W;
    const float persistent = a->scale * (float)sqrt((double)D);
    stx__mat dy = stx__attn_plain_mat_y(A, A->dy), o = stx__attn_plain_mat_out(A, A->o),
             o_pe = stx__attn_plain_mat_out(A, A->o_pe);
    stx__attn_plain_rows p = stx__attn_plain_rows_of(A);
    if (a->dspan_fraction && p.z.p) p.dz = A->rows;

    /* g = dO V^T, then ds */
    stx__attn_plain_gemm(A, stx__attn_plain_mat_scores(A, A->g, 0, 0), dy, 0,
                         stx__attn_plain_mat_kv(A, A->v, A->j0, 2), 1, A->nb, W, D, 1, 0);
    stx__attn_plain_gemm(A, stx__attn_plain_mat_scores(A, A->g, W, 0), dy, 0,
                         stx__attn_plain_mat_persistent(A, A->pv), 1, A->nb, a->N, D, 1, 0);
    STX__RUN_KERNEL(A->x, "stx_attention_bwd", stx__attn_plain_softmax_bwd_kernel,
                    stx__blocks(A->nu * A->nb, 4, (size_t)1 << 30), 4 * STX__WARP, 0, p);

    stx__attn_plain_bwd_queries(A, dy, p.dz != NULL);

    /* sums over the keys: dq = ds K + dR PE + ds PK */
    if (a->dq || a->dcontent_bias)
        stx__attn_plain_gemm(A, o, stx__attn_plain_mat_scores(A, A->g, 0, 0), 0,
                             stx__attn_plain_mat_kv(A, A->k, A->j0, 1), 0, A->nb, D, W, a->scale,
                             0);
    if (a->P && (a->dq || a->dposition_bias))
        stx__attn_plain_gemm(A, o_pe, stx__attn_plain_mat_scores(A, A->g, 0, 1), 0,
                             stx__attn_plain_mat_pe(A), 0, A->nb, D, A->np, a->scale, 0);
    if (a->dcontent_bias) stx__attn_plain_columns(A, A->part[STX__SUM_U], A->o, A->nb * D, D);
    if (a->dposition_bias && a->P)
        stx__attn_plain_columns(A, A->part[STX__SUM_VB], A->o_pe, A->nb * D, D);
    if (a->dq) {
        stx__attn_plain_gemm(A, o, stx__attn_plain_mat_scores(A, A->g, W, 0), 0,
                             stx__attn_plain_mat_persistent(A, A->pk), 0, A->nb, D, a->N,
                             persistent, 1);
        stx__attn_plain_store(A, stx__attn_plain_mat_q(A, stx__array_of(A->x, a->dq), NULL),
                              A->cached_k, A->o, a->P ? A->o_pe : NULL, A->nb * D, A->nb,
                              a->overwrite & STX_OVERWRITE_DQ);
    }
}

/* Adds shared sum i to its gradient. */
static void stx__attn_plain_add(const stx__attn_plain *A, size_t i, stx_real *grad) {
    const stx_attention_args *a = A->a;
    const size_t rows = A->size[i] >= a->D && i != STX__SUM_Z ? A->size[i] / a->D : 1,
                 cols = A->size[i] / rows, n = A->copies[i] * A->size[i];
    size_t ld = cols, table = A->size[i], at = 0;
    if (!n) return;
    if (i == STX__SUM_PE) {
        ld = A->tables * a->D;
        table = a->D;
        at = A->p0 * ld;
    }
    STX__RUN_KERNEL(A->x, "stx_attention_bwd", stx__attn_plain_add_kernel,
                    stx__blocks(n, 256, 65535), 256, 0, stx__array_of(A->x, grad), A->all[i],
                    i == STX__SUM_Z ? a->max_span / a->ramp : 1.0f, A->copies[i], rows, cols, at,
                    table, ld);
}

static void stx__attn_plain_bwd(stx_ctx *x, const stx_attention_args *a) {
    stx_real *const grads[STX__SUMS] = {
        a->dpe,           a->dcontent_bias, a->dposition_bias, a->dspan_fraction,
        a->dpersistent_k, a->dpersistent_v};
    const int cached = (a->overwrite / STX_OVERWRITE_CACHED) << 1;
    stx__attn_plain A;
    size_t i0, i;
    stx__attn_plain_open(&A, x, a, 1);
    if (A.all_bytes && stx_ok(x))
        stx__cuda_failed(x, cudaMemsetAsync(A.all[0], 0, A.all_bytes, stx__gpu(x)->stream),
                         "stx_attention_bwd");
    for (A.u0 = 0; A.u0 < a->B * a->H; A.u0 += A.nu) {
        A.nu = STX_MIN(A.units, a->B * a->H - A.u0);
        if (A.parts_bytes && stx_ok(x))
            stx__cuda_failed(x, cudaMemsetAsync(A.parts, 0, A.parts_bytes, stx__gpu(x)->stream),
                             "stx_attention_bwd");
        for (i0 = 0; i0 < a->T; i0 += A.nb) {
            stx__attn_plain_logits(&A, i0);
            stx__attn_plain_bwd_panel(&A);
        }
        if (stx__attn_needs_grad(a, 0))
            stx__attn_plain_store(&A, stx__attn_plain_mat_kv(&A, stx__array_of(x, a->dk), 0, 1),
                                  stx__attn_plain_cached(x, a, 2), A.dk, NULL, a->S * a->D, a->S,
                                  cached | !!(a->overwrite & STX_OVERWRITE_DK));
        if (stx__attn_needs_grad(a, 1))
            stx__attn_plain_store(&A, stx__attn_plain_mat_kv(&A, stx__array_of(x, a->dv), 0, 1),
                                  stx__attn_plain_cached(x, a, 3), A.dv, NULL, a->S * a->D, a->S,
                                  cached | !!(a->overwrite & STX_OVERWRITE_DV));
        for (i = 0; i < STX__SUMS; i++)
            if (A.size[i])
                STX__RUN_KERNEL(x, "stx_attention_bwd", stx__attn_plain_units_kernel,
                                stx__blocks(A.copies[i] * A.size[i], 256, 65535), 256, 0, A.all[i],
                                A.part[i], A.size[i], A.copies[i], A.nu, A.u0);
    }
    for (i = 0; i < STX__SUMS; i++) stx__attn_plain_add(&A, i, grads[i]);
}


/* ---- src/cuda/attention_common.cuh ---- */
// >>attention: shared definitions

/* Definitions shared by the fused forward and backward kernels. The letters are the
   same as in the oracle's section, plus

       BQ, BK   queries per block; keys per tile
       DP       D padded with zeros to 32, 64, 96 or 128
       strip    16 consecutive queries, the rows of one mma; MT strips per warp in the
                forward kernel
       group    16 consecutive keys of a tile; a block of columns is 8 keys
       CH       pieces of 16 bytes per row of a tile
       NB, ND   blocks of 8 columns in BK and in DP
       KS       steps of the sum over D, of 32 bytes each
       g, t     lane = 4 g + t; a lane holds rows g and g + 8 of an accumulator, and
                columns 2t and 2t + 1 of each block (PTX ISA, "Matrix fragments for mma")

   The window. Query i is at the position of key C + i; its distance to key j is delta =
   C + i - j. Head h sees the keys with

       delta_min <= delta <= visible     visible <= farthest <= span
       first_key <= j < S, not padded    see "Which keys exist" below, also for calls
                                         without causality

   farthest equals stx__attn_farthest of the CPU kernels, computed from z in device
   memory. visible is the largest distance whose ramp weight is not 0. Keys beyond it
   must not enter the running maximum, because far keys may have the largest logits. Up
   to the distance `full`, the weight is exactly 1. Between full and visible it is

       m(delta) = min(1, ((1 - delta) + z_span) / ramp + 1)

   in float and in this order of operations, as on the CPU. With d = j - i, delta = C - d,
   and the row of the position table is p = (P - 1 + delta_min - C) + d, which depends
   only on j - i. Rows outside [0,P) are zeros.

   Dropout. In the random numbers of row (b,h,i), key j has position span + j, and
   persistent vector n has position S + span + n. Philox call row rng_calls + position / 8
   returns 16 bits for each of 8 neighbours; a weight is kept if its bits are below
   `keep`. Tiles of keys therefore begin where span + j is a multiple of 8, so each block
   of 8 columns takes one call. */

/* The cached rows of one group, see stx_attention_kv. Row 0 is key `first`. */
typedef struct stx__attn_cached {
    const void *k, *v;
    size_t row_stride, batch_stride;
    int first;
} stx__attn_cached;

typedef struct stx__attn_params {
    const void *q;            /* (B,T,H D); operands are bfloat16 or float */
    const void *k, *v;        /* (B,S,H D), starting at key cached_rows */
    const void *pe;           /* (P,D) or (P,H D) */
    const void *pk, *pv;      /* (H,N,D) */
    void *y;                  /* (B,T,H D) */
    float *row_max, *inv_sum; /* (B,H,T) */
    stx__array u, vb, z;        /* u and vb are (H D), z is (H) */
    size_t q_row_stride, kv_row_stride, q_batch_stride, kv_batch_stride; /* in elements */
    uint64_t rng_calls; /* Philox calls per row, for dropout */
    uint64_t seed, stream, rng_first;
    const uint64_t *shift;
    int B, T, S, H, D, P, N, C;
    int pe_row_stride, pe_head_stride; /* in elements; head stride 0: shared table */
    int span, delta_min;
    int first_key; /* the first key that exists */
    uint32_t keep; /* 65536 times the keep probability; 0: no dropout */
    float scale, max_span, ramp;
    float ramp_steps;               /* from stx__attn_ramp_steps */
    float inv_keep;                 /* 65536 / keep, or 1 */
    const uint32_t *key_mask;       /* see "Which keys exist"; NULL if all keys of the
                                       window exist */
    int key_mask_stride;            /* stride between batch rows, in words */
    int cached_rows, cached_groups; /* see "Where keys are stored" */
    stx__attn_cached cached[STX_HEAD_GROUPS];
    uint16_t head_place[256];       /* 4 times the index of a head in its group, plus the group;
                                       packed because registers are scarce */
} stx__attn_params;

/* Returns the address from which the kernels read an operand: bfloat16 activations, the
   bfloat16 copy of a parameter, or floats. Clears *ok if the operand is stored in
   another form, or if its rows are not aligned to 16 bytes. */
static const void *stx__attn_operand(const stx_ctx *x, const void *p, int half, size_t ld,
                                     int *ok) {
    stx__array v;
    const void *r = p;
    if (!p) return NULL;
    v = stx__array_of(x, p);
    if (half && !v.half) r = v.twin;
    if (!r || (!half && v.half) || (uintptr_t)r % 16 || ld % (half ? 8 : 4)) *ok = 0;
    return r;
}

/* Returns nonzero if the fused kernels support the options and sizes of the call. */
static int stx__attn_sizes_fit(const stx_attention_args *a) {
    const size_t big = (size_t)1 << 30;
    if (a->eps > 0 || (a->span_fraction && (a->no_renorm || a->span_shared))) return 0;
    if (a->first_key < 0 || !(a->scale > 0)) return 0;
    if (a->D < 8 || a->D > 128 || a->D % 8 || !a->B || !a->T || !a->H || a->H > 256) return 0;
    if (a->B >= big || a->T >= big || a->S >= big || a->P >= big || a->N >= big) return 0;
    if (a->span >= big || a->S + a->span + a->N >= big) return 0;
    if (a->not_causal) return !a->span_fraction && !a->P && a->S && a->span >= a->S;
    return a->T <= a->S;
}

/* Sets the operands of a call. Returns 1, or 0 if the kernels cannot read one of the
   operands. */
static int stx__attn_operands(const stx_ctx *x, const stx_attention_args *a, stx__attn_params *p,
                              int half) {
    int ok = 1;
    p->q = stx__attn_operand(x, a->q, half, a->q_row_stride, &ok);
    p->k = stx__attn_operand(x, a->k, half, a->kv_row_stride, &ok);
    p->v = stx__attn_operand(x, a->v, half, a->kv_row_stride, &ok);
    p->y = (void *)(uintptr_t)stx__attn_operand(x, a->y, half, a->D, &ok);
    if (a->P) p->pe = stx__attn_operand(x, a->pe, half, a->D, &ok);
    if (a->N) {
        p->pk = stx__attn_operand(x, a->persistent_k, half, a->D, &ok);
        p->pv = stx__attn_operand(x, a->persistent_v, half, a->D, &ok);
    }
    for (size_t i = 0; i < a->groups; i++) {
        const stx_attention_kv *o = &a->cached[i];
        p->cached[i].k = stx__attn_operand(x, o->k, half, o->row_stride, &ok);
        p->cached[i].v = stx__attn_operand(x, o->v, half, o->row_stride, &ok);
        p->cached[i].row_stride = o->row_stride;
        p->cached[i].batch_stride = o->batch_stride;
        p->cached[i].first = (int)(a->cached_rows - o->rows);
        if (o->batch_stride % 8) return 0;
    }
    if (a->q_batch_stride % 8 || a->kv_batch_stride % 8) return 0;
    return ok && (!half || stx__array_of(x, a->y).half);
}

static void stx__attn_set_dropout(const stx_ctx *x, const stx_attention_args *a,
                                  stx__attn_params *p) {
    double k = floor((1.0 - (double)a->drop) * 65536.0 + 0.5); /* same as stx__keep16 */
    p->inv_keep = 1;
    if (!(a->drop > 0)) return;
    p->keep = (uint32_t)(k < 1 ? 1 : k);
    p->inv_keep = (float)(65536.0 / p->keep);
    p->rng_calls = ((uint64_t)a->S + a->span + a->N) / 8 + 2;
    p->seed = a->seed;
    p->stream = a->stream;
    p->rng_first = a->rng_first;
    p->shift = stx__gpu(x)->shift;
}

/* Sets the kernel parameters of a call. Returns 1, or 0 if the fused kernels do not
   support the call. */
static int stx__attn_params_of(const stx_ctx *x, const stx_attention_args *a, stx__attn_params *p,
                               int *half) {
    memset(p, 0, sizeof *p);
    *half = stx__gpu(x)->half && stx__array_of(x, a->q).half;
    if (!stx__attn_sizes_fit(a) || !stx__attn_operands(x, a, p, *half)) return 0;
    p->cached_rows = (int)a->cached_rows;
    p->cached_groups = (int)a->groups;
    for (size_t h = 0; h < a->H; h++)
        p->head_place[h] = (uint16_t)(4 * a->head_index[h] + a->head_group[h]);
    p->row_max = (float *)a->row_max;
    p->inv_sum = (float *)a->inv_sum;
    p->u = stx__array_of(x, a->content_bias);
    p->vb = stx__array_of(x, a->P ? a->position_bias : NULL);
    p->z = stx__array_of(x, a->span_fraction);
    p->q_row_stride = a->q_row_stride;
    p->kv_row_stride = a->kv_row_stride;
    p->q_batch_stride = a->q_batch_stride;
    p->kv_batch_stride = a->kv_batch_stride;
    p->B = (int)a->B;
    p->T = (int)a->T;
    p->S = (int)a->S;
    p->H = (int)a->H;
    p->D = (int)a->D;
    p->P = (int)a->P;
    p->N = (int)a->N;
    p->C = p->S - p->T;
    p->pe_row_stride = a->P ? (int)((size_t)a->pe_heads * a->D) : 0;
    p->pe_head_stride = a->P && a->pe_heads > 1 ? (int)a->D : 0;
    p->span = (int)a->span;
    p->delta_min = a->not_causal ? 1 - p->T : a->delta_min;
    p->first_key = a->first_key > (ptrdiff_t)a->S ? p->S : (int)a->first_key;
    p->scale = a->scale;
    p->max_span = a->max_span;
    p->ramp = a->ramp;
    p->ramp_steps = stx__attn_ramp_steps(a);
    stx__attn_set_dropout(x, a, p);
    return 1;
}

#define STX__LOG2E 1.44269504f

/* The largest distances of a head, see "The window". z_span = z max_span. */
typedef struct stx__attn_window {
    int farthest, visible, full;
    float z_span;
} stx__attn_window;

/* Returns the ramp weight at the distance delta, before clamping. */
static __device__ __forceinline__ float stx__attn_ramp(const stx__attn_params &p,
                                                       const stx__attn_window &w, int delta) {
    return __fadd_rn(__fdiv_rn(__fadd_rn((float)(1 - delta), w.z_span), p.ramp), 1.0f);
}

/* Returns the largest distance with weight 1, or -1 if there is none or f is NaN. For
   delta <= f = floor(z_span) + 1, (1 - delta) + z_span >= 0, so the weight is 1. */
static __device__ __forceinline__ int stx__attn_full_weight(float f, int visible) {
    if (f >= (float)visible) return visible;
    return f >= 0 ? (int)f : -1;
}

/* Computes the window of head h from z in device memory. */
static __device__ __forceinline__ stx__attn_window stx__attn_window_of(const stx__attn_params &p,
                                                                       int h) {
    stx__attn_window w;
    w.farthest = w.visible = w.full = p.span;
    w.z_span = 0;
    if (p.z.p) {
        float z = stx__get(p.z, (size_t)h);
        double e;
        w.z_span = __fmul_rn(z, p.max_span);
        e = stx__attn_span_farthest(z, p.max_span, p.ramp_steps);
        w.farthest = w.visible = e < (double)p.span ? (int)e : p.span;
        /* takes one or two iterations, because farthest is only slightly larger than
           the result */
        while (w.visible >= p.delta_min && stx__attn_ramp(p, w, w.visible) <= 0) w.visible--;
        w.full = stx__attn_full_weight(floorf(w.z_span) + 1, w.visible);
    }
    return w;
}

/* Computes the range of keys [first,last) that queries i0 .. i0+n-1 may see. The range
   is empty if last <= first. `first` is aligned to a block of 8 random numbers, so it
   may be up to 7 less than first_key, and negative. */
static __device__ __forceinline__ void stx__attn_key_range(const stx__attn_params &p,
                                                           const stx__attn_window &w, int i0, int n,
                                                           int *first, int *last) {
    int f = max(p.first_key, p.C + i0 - w.visible);
    *last = p.C + min(i0 + n, p.T) - p.delta_min;
    *first = *last > f ? ((f + p.span) & ~7) - p.span : *last;
}

/* How spans skip keys. A block processes only the tiles of stx__attn_key_range. If an
   end of the window, first_key or the end of the persistent vectors is inside a tile, a
   strip of 16 queries i .. i+15 processes only its band. The band is the range lo ..
   hi-1 of groups of 16 keys. It covers all keys that some query of the strip, including
   queries beyond T, sees at a distance of at most max_delta. The weights in all other
   groups would be 0. A warp skips a tile if none of its rows sees a key of the tile. */
typedef struct stx__attn_band {
    int lo, hi;
} stx__attn_band;

template <int BK>
static __device__ __forceinline__ stx__attn_band stx__attn_band_of(const stx__attn_params &p,
                                                                   int persistent, int max_delta,
                                                                   int i, int j0) {
    stx__attn_band b = {0, 0};
    if (i >= p.T) return b;
    if (persistent) {
        b.hi = (min(BK, p.N - j0) + 15) >> 4;
        return b;
    }
    b.lo = max(max(p.C + i - max_delta, p.first_key) - j0, 0) >> 4;
    b.hi = (min(min(p.C + i + 16 - p.delta_min, p.S) - j0, BK) + 15) >> 4;
    if (b.hi < b.lo) b.hi = b.lo;
    return b;
}

/* Returns the random bits for the 8 keys at positions `at` .. `at`+7 of row (b * H + h) *
   T + i. Component t holds the bits for columns 2t (low half) and 2t + 1 (high half). */
static __device__ __forceinline__ uint4 stx__attn_random8(const stx__attn_params &p,
                                                          uint64_t stream, uint64_t row, int at) {
    return stx__philox(p.seed, stream, p.rng_first + row * p.rng_calls + (uint64_t)(at >> 3));
}

/* The work list contains all pairs (head, query tile), sorted by decreasing number of
   key tiles, then by head and tile. The GPU starts blocks in order, so the longest ones
   start first and short ones fill the gaps at the end. The lengths depend on z, so a
   kernel creates the list in every step.

   Within a head, a later tile never has fewer key tiles, because only the windows of
   early tiles can begin before the first key. One thread per entry can therefore
   compute its rank: in each head, a binary search counts the entries that precede it.
   This needs no sort and no atomics. The list has no entries per batch row, because
   batch rows differ only in padded keys, which the list ignores. */
static __device__ __forceinline__ int stx__attn_key_tiles(const stx__attn_params &p,
                                                          const stx__attn_window &w, int tile,
                                                          int bq, int bk) {
    /* counts a partial last tile as a whole one, so that it never has fewer key tiles
       than the tile before it */
    int last = p.C + (tile + 1) * bq - p.delta_min;
    return (max(last - max(p.first_key, p.C + tile * bq - w.visible), 0) + bk - 1) / bk;
}

/* The columns of a head's rows of dR (see "Rows of dR" in the backward section). `at`
   is the position of the first one among the columns of all heads. `width` is the
   number of columns, or 0 if the rows are not stored. The kernel that creates the list
   assigns columns to the narrowest heads first, while there is capacity. */
typedef struct stx__attn_dr_slot {
    int at, width;
} stx__attn_dr_slot;

/* Returns the number of columns of dR that a head requires, a multiple of 16. */
static __device__ __forceinline__ int stx__attn_dr_width(const stx__attn_params &p,
                                                         const stx__attn_window &w, int newest) {
    return w.visible < p.delta_min ? 0 : (w.visible - (p.C - newest) + 15) & ~15;
}

/* Writes the work list, with `tiles` tiles per head. Unless `place` is NULL, also
   assigns `columns` columns of dR to the heads. `head` is shared memory for the
   windows of all heads. */
static __device__ __forceinline__ void stx__attn_make_list(const stx__attn_params &p,
                                                           uint32_t *list, int tiles, int bq,
                                                           int bk, stx__attn_dr_slot *place,
                                                           int newest, int columns,
                                                           stx__attn_window *head) {
    int h, e;
    for (h = (int)threadIdx.x; h < p.H; h += (int)blockDim.x) head[h] = stx__attn_window_of(p, h);
    __syncthreads();
    for (h = (int)threadIdx.x; place && !blockIdx.x && h < p.H; h += (int)blockDim.x) {
        const int width = stx__attn_dr_width(p, head[h], newest);
        int64_t at = 0;
        for (e = 0; e < p.H; e++) {
            const int other = stx__attn_dr_width(p, head[e], newest);
            if (other < width || (other == width && e < h)) at += other;
        }
        place[h].at = at + width <= columns ? (int)at : 0;
        place[h].width = at + width <= columns ? width : 0;
    }
    e = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (e < p.H * tiles) {
        int mine = e / tiles, tile = e % tiles,
            n = stx__attn_key_tiles(p, head[mine], tile, bq, bk), rank = 0;
        for (h = 0; h < p.H; h++) {
            /* binary search for the first tile of head h that precedes this entry */
            int a = 0, b = tiles;
            while (a < b) {
                int m = (a + b) / 2, len = stx__attn_key_tiles(p, head[h], m, bq, bk);
                if (len > n || (len == n && (h < mine || (h == mine && m > tile))))
                    b = m;
                else
                    a = m + 1;
            }
            rank += tiles - a;
        }
        list[rank] = (uint32_t)e;
    }
}

/* Creates the work list, with one thread per entry. Blocks are small, so that even a
   short list is distributed over the GPU. */
STX__GLOBAL(128)
stx__attn_list_kernel(stx__attn_params p, uint32_t *list, int tiles, int bq, int bk) {
    STX__SHARED(stx__attn_window, head, 256);
    stx__attn_make_list(p, list, tiles, bq, bk, (stx__attn_dr_slot *)NULL, 0, 0, head);
}

/* Tiles in shared memory. Rows are padded with zeros to DP = 32, 64, 96 or 128 elements
   and consist of CH pieces of 16 bytes. Piece c of row r is stored at position c ^ r
   (modulo 8):

       row 0   0 1 2 3 4 5 6 7
       row 1   1 0 3 2 5 4 7 6        stored order of pieces, CH = 8
       row 2   2 3 0 1 6 7 4 5

   ldmatrix reads piece c of 8 rows. In this order they are in 8 different groups of 4
   banks, and so are the 4 x 8 floats of a transposed fragment. Rows of 64 bytes share a
   line of 128 bytes in pairs, and every second row of 192 bytes begins in the middle of a
   line. For both sizes, r / 2 is used instead of r, which has the same effect. */
template <int CH> static __device__ __forceinline__ unsigned stx__attn_swizzle(int r, int c) {
    return (unsigned)(r * CH + (CH % 8 ? c ^ ((r >> 1) & 3) : c ^ (r & 7))) * 16;
}

/* Returns the number of threads that a row of `pieces` pieces is distributed over. A row
   of 12 pieces has 16 threads, 4 of which are idle. */
static constexpr __host__ __device__ int stx__attn_across(int pieces) {
    return pieces & (pieces - 1) ? 16 : pieces;
}

/* Starts copies of rows r0 .. r0+n-1 of the array whose row 0 is at `from`, into a
   tile. Rows outside [lo,hi) are set to zeros. All threads of the block must call this
   function; the data is visible after the next stx__cp_wait and barrier. `ld` is the
   row stride in bytes, and `bytes` is the row size, a multiple of 16 bytes. */
template <int CH, int THREADS>
static __device__ __forceinline__ void stx__attn_load(unsigned char *tile, int n, const void *from,
                                                      size_t ld, int bytes, int r0, int lo,
                                                      int hi) {
    enum { ACROSS = stx__attn_across(CH), ROWS = THREADS / ACROSS };

    int r = (int)threadIdx.x / ACROSS, c = (int)threadIdx.x % ACROSS, k;
    /* the row stride is multiplied only once; the loop adds to the address */
    const char *p = (const char *)from + (ptrdiff_t)(r0 + r) * (ptrdiff_t)ld + c * 16;
#pragma unroll
    for (k = 0; k < n; k += ROWS) {
        int yes = r0 + r + k >= lo && r0 + r + k < hi && c * 16 < bytes;
        if ((n % ROWS == 0 || r + k < n) && (ACROSS == CH || c < CH))
            stx__cp16(tile + stx__attn_swizzle<CH>(r + k, c), yes ? p : (const char *)from,
                      yes ? 16 : 0);
        p += ROWS * ld;
    }
}

/* Where keys are stored. Key cached_rows and later keys belong to the current block and
   are in k and v. Earlier keys are in the memory of the head's group, (B,rows,..). This
   memory holds only keys `first` and later, because the heads of the group see no older
   ones. A tile may contain keys from both places.

   Returns 4 times the index of head h in its group, plus the group. */
static __device__ __forceinline__ int stx__attn_head_place(const stx__attn_params &p, int h) {
    return p.cached_groups > 1 ? p.head_place[h] : 4 * h;
}

/* Returns the address of a row of keys or values, in the current block or in the cached
   rows. If the row does not exist, returns a valid address that will not be read. */
static __device__ __forceinline__ const char *stx__attn_kv_row(const char *block,
                                                               const char *cached, size_t from,
                                                               int exists, int is_cached) {
    if (!exists) return block;
    return (is_cached ? cached : block) + from;
}

/* Starts copies of keys j0 .. j0+n-1 of head h and batch row b, and of their values, like
   stx__attn_load. */
template <int CH, int THREADS, int SIZE>
static __device__ __forceinline__ void stx__attn_load_kv(const stx__attn_params &p,
                                                         unsigned char *kt, unsigned char *vt,
                                                         int n, int b, int h, int j0) {
    const int bytes = p.D * SIZE;
    const size_t at = ((size_t)b * p.kv_batch_stride + (size_t)h * p.D) * SIZE,
                 ld = p.kv_row_stride * SIZE;
    const char *k = (const char *)p.k + at, *v = (const char *)p.v + at;
    if (j0 >= p.cached_rows || !p.cached_rows) {
        stx__attn_load<CH, THREADS>(kt, n, k, ld, bytes, j0 - p.cached_rows,
                                    p.first_key - p.cached_rows, p.S - p.cached_rows);
        stx__attn_load<CH, THREADS>(vt, n, v, ld, bytes, j0 - p.cached_rows,
                                    p.first_key - p.cached_rows, p.S - p.cached_rows);
        return;
    }
    const int place = stx__attn_head_place(p, h);
    const stx__attn_cached &o = p.cached[place & 3];
    const size_t ato = ((size_t)b * o.batch_stride + (size_t)(place >> 2) * p.D) * SIZE,
                 ldo = o.row_stride * SIZE;
    const char *ko = (const char *)o.k + ato, *vo = (const char *)o.v + ato;
    if (j0 + n <= p.cached_rows) {
        stx__attn_load<CH, THREADS>(kt, n, ko, ldo, bytes, j0 - o.first,
                                    max(p.first_key - o.first, 0), p.cached_rows - o.first);
        stx__attn_load<CH, THREADS>(vt, n, vo, ldo, bytes, j0 - o.first,
                                    max(p.first_key - o.first, 0), p.cached_rows - o.first);
        return;
    }
#pragma unroll 1
    for (int e = (int)threadIdx.x; e < n * CH; e += THREADS) {
        const int r = e / CH, c = e % CH, j = j0 + r, old = j < p.cached_rows,
                  row = j - (old ? o.first : p.cached_rows),
                  yes = j >= p.first_key && j < p.S && row >= 0 && c * 16 < bytes;
        const size_t from = (size_t)(yes ? row : 0) * (old ? ldo : ld) + (size_t)c * 16;
        stx__cp16(kt + stx__attn_swizzle<CH>(r, c), stx__attn_kv_row(k, ko, from, yes, old),
                  yes ? 16 : 0);
        stx__cp16(vt + stx__attn_swizzle<CH>(r, c), stx__attn_kv_row(v, vo, from, yes, old),
                  yes ? 16 : 0);
    }
}

/* Overwrites the rows of keys that do not exist with zeros. Must be called after the
   copies have arrived and before a barrier. */
template <int CH, int THREADS, int BK>
static __device__ __forceinline__ void stx__attn_zero_missing(unsigned char *tile, uint64_t seen) {
#pragma unroll 1
    for (int e = (int)threadIdx.x; e < BK * CH; e += THREADS)
        if (!(seen >> (e / CH) & 1))
            *(uint4 *)(tile + stx__attn_swizzle<CH>(e / CH, e % CH)) = make_uint4(0, 0, 0, 0);
}

/* Sets the accumulator elements of keys that do not exist to v. Element e of block n is
   column 8n + 2t + (e & 1). */
template <int NB>
static __device__ __forceinline__ void stx__attn_set_missing(float (&x)[NB][4], uint64_t seen,
                                                             int t, float v) {
    uint32_t lo = (uint32_t)(seen >> 2 * t), hi = (uint32_t)(seen >> 2 * t >> 32);
    int n;
#pragma unroll
    for (n = 0; n < NB; n++) {
        const uint32_t w = n < 4 ? lo : hi;
        if (!(w >> 8 * (n & 3) & 1)) x[n][0] = x[n][2] = v;
        if (!(w >> (8 * (n & 3) + 1) & 1)) x[n][1] = x[n][3] = v;
    }
}

/* Fragments. In either precision, one step of the sum covers 32 bytes of a row: 16
   bfloat16 or 8 tf32 elements. ldmatrix moves units of 4 bytes, so it can load either
   precision.

       frag_a    rows r0 .. r0+15 (r0 % 8 == 0) as the left factor, step k
       frag_b    the same rows, transposed, as two right factors of 8 columns each:
                 b[0..1] for rows r0 .. r0+7, b[2..3] for the next 8 rows
       frag_b2   rows r0 .. r0+7 as a right factor, steps k (b[0..1]) and k + 1 (b[2..3])
       frag_v    rows r0 .. r0+15 as the index of the sum, 16 columns from 8c as two right
                 factors of 8 columns each; bfloat16 only, because ldmatrix transposes
                 units of 2 bytes */
template <int CH>
static __device__ __forceinline__ void stx__attn_frag_a(uint32_t (&a)[4], const unsigned char *tile,
                                                        int r0, int k,
                                                        int lane = (int)threadIdx.x & 31) {
    stx__ldmatrix_x4(a, tile + stx__attn_swizzle<CH>(r0 + (lane & 15), 2 * k + (lane >> 4)));
}

template <int CH>
static __device__ __forceinline__ void stx__attn_frag_b(uint32_t (&b)[4], const unsigned char *tile,
                                                        int r0, int k,
                                                        int lane = (int)threadIdx.x & 31) {
    stx__ldmatrix_x4(b, tile
                            + stx__attn_swizzle<CH>(r0 + (lane & 7) + (lane >> 4) * 8,
                                                    2 * k + ((lane >> 3) & 1)));
}

template <int CH>
static __device__ __forceinline__ void stx__attn_frag_b2(uint32_t (&b)[4],
                                                         const unsigned char *tile, int r0, int k,
                                                         int lane = (int)threadIdx.x & 31) {
    stx__ldmatrix_x4(b, tile + stx__attn_swizzle<CH>(r0 + (lane & 7), 2 * k + (lane >> 3)));
}

template <int CH>
static __device__ __forceinline__ void stx__attn_frag_v(uint32_t (&b)[4], const unsigned char *tile,
                                                        int r0, int c,
                                                        int lane = (int)threadIdx.x & 31) {
    stx__ldmatrix_x4_trans(b, tile + stx__attn_swizzle<CH>(r0 + (lane & 15), c + (lane >> 4)));
}

/* Precisions. Each is a struct that is a template argument of the kernels.

       element   type of the operands in memory, SIZE bytes long
       mma       c (16,8) += a (16,32 bytes) b
       mma2      c += a b[0..1], d += a b[2..3]
       add       like mma, but accurate for sums over thousands of keys or queries
       K         elements per step of the sum
       masked, MASKED_SIZES
                 Support for a mask makes the query sweep spill more registers. For the
                 padded head sizes in MASKED_SIZES (one bit each) the kernel is compiled
                 a second time for masks, in precision `masked`.
       QUERY_BLOCKS_32, KEY_BLOCKS_32
                 number of blocks of the query and key sweeps that must fit on a
                 multiprocessor if D <= 32; 0: nvcc chooses the number of registers

   bf16: operands are bfloat16, sums are float. f32: each operand is split into two tf32
   parts, x = hi + lo with an error below 2^-22 x. Three products (hi hi, hi lo, lo hi)
   give nearly float accuracy. tf32: uses only the high parts. */
struct stx__attn_bf16 {
    typedef stx__bf16 element;
    typedef stx__attn_bf16 masked;

    enum { SIZE = 2, K = 16, MASKED_SIZES = 0, QUERY_BLOCKS_32 = 3, KEY_BLOCKS_32 = 2 };

    static __device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                               uint32_t b1) {
        uint32_t b[2] = {b0, b1};
        stx__mma_bf16(c, a, b);
    }

    static __device__ __forceinline__ void mma2(float (&c)[4], float (&d)[4],
                                                const uint32_t (&a)[4], const uint32_t (&b)[4]) {
        stx__mma_bf16_2(c, d, a, b);
    }

    static __device__ __forceinline__ void add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                               uint32_t b1) {
        mma(c, a, b0, b1);
    }
};

/* Rounds to the nearest tf32. A NaN must stay a NaN: CUDA's NaN is 0x7fffffff, which
   would otherwise be rounded up to -0. */
#ifdef CUDA_HOST
static inline uint32_t stx__attn_tf32_hi(uint32_t v) {
    return ((v & 0x7fffffffu) < 0x7f800000u ? v + 0x1000u : v) & 0xffffe000u;
}
#else
static __device__ __forceinline__ uint32_t stx__attn_tf32_hi(uint32_t v) {
    uint32_t r;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r) : "f"(__uint_as_float(v)));
    return r;
}
#endif
static __device__ __forceinline__ uint32_t stx__attn_tf32_lo(uint32_t v, uint32_t hi) {
    return stx__attn_tf32_hi(__float_as_uint(__uint_as_float(v) - __uint_as_float(hi)));
}

struct stx__attn_f32;

struct stx__attn_tf32 {
    typedef float element;
    /* masked calls use f32, which is slower but more accurate and is compiled anyway */
    typedef stx__attn_f32 masked;

    enum { SIZE = 4, K = 8, MASKED_SIZES = 128 + 32, QUERY_BLOCKS_32 = 4, KEY_BLOCKS_32 = 3 };

    static __device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                               uint32_t b1) {
        uint32_t h[4] = {stx__attn_tf32_hi(a[0]), stx__attn_tf32_hi(a[1]), stx__attn_tf32_hi(a[2]),
                         stx__attn_tf32_hi(a[3])},
                 b[2] = {stx__attn_tf32_hi(b0), stx__attn_tf32_hi(b1)};
        stx__mma_tf32(c, h, b);
    }

    static __device__ __forceinline__ void mma2(float (&c)[4], float (&d)[4],
                                                const uint32_t (&a)[4], const uint32_t (&b)[4]) {
        mma(c, a, b[0], b[1]);
        mma(d, a, b[2], b[3]);
    }

    static __device__ __forceinline__ void add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                               uint32_t b1) {
        mma(c, a, b0, b1);
    }
};

struct stx__attn_f32 {
    typedef float element;
    typedef stx__attn_f32 masked;

    enum { SIZE = 4, K = 8, MASKED_SIZES = 0, QUERY_BLOCKS_32 = 0, KEY_BLOCKS_32 = 3 };

    static __device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                               uint32_t b1) {
        uint32_t h[4] = {stx__attn_tf32_hi(a[0]), stx__attn_tf32_hi(a[1]), stx__attn_tf32_hi(a[2]),
                         stx__attn_tf32_hi(a[3])},
                 b[2] = {stx__attn_tf32_hi(b0), stx__attn_tf32_hi(b1)};
        uint32_t l[4] = {stx__attn_tf32_lo(a[0], h[0]), stx__attn_tf32_lo(a[1], h[1]),
                         stx__attn_tf32_lo(a[2], h[2]), stx__attn_tf32_lo(a[3], h[3])};
        uint32_t m[2] = {stx__attn_tf32_lo(b0, b[0]), stx__attn_tf32_lo(b1, b[1])};
        stx__mma_tf32_3(c, l, h, m, b);
    }

    static __device__ __forceinline__ void mma2(float (&c)[4], float (&d)[4],
                                                const uint32_t (&a)[4], const uint32_t (&b)[4]) {
        mma(c, a, b[0], b[1]);
        mma(d, a, b[2], b[3]);
    }

    /* Tensor cores truncate when they add to c. In a long sum of terms with the same
       sign, the error reaches one part in 10^4. Therefore each product is computed
       separately and added as a float. */
    static __device__ __forceinline__ void add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                               uint32_t b1) {
        float d[4] = {0, 0, 0, 0};
        mma(d, a, b0, b1);
        c[0] += d[0];
        c[1] += d[1];
        c[2] += d[2];
        c[3] += d[3];
    }
};

/* Conversions between stored elements and floats; store2 stores two adjacent elements. */
static __device__ __forceinline__ float stx__attn_to_float(stx__bf16 v) {
    return __bfloat162float(v);
}

static __device__ __forceinline__ float stx__attn_to_float(float v) {
    return v;
}

static __device__ __forceinline__ void stx__attn_store2(stx__bf16 *p, float a, float b) {
    *(uint32_t *)p = stx__pair(a, b);
}

static __device__ __forceinline__ void stx__attn_store2(float *p, float a, float b) {
    *(float2 *)p = make_float2(a, b);
}

/* Returns two bfloat16 plus a and b. */
static __device__ __forceinline__ uint32_t stx__attn_add2(uint32_t v, float a, float b) {
    return stx__pair(__uint_as_float(v << 16) + a, __uint_as_float(v & 0xffff0000u) + b);
}

/* These functions return a piece of 16 bytes, 8 bfloat16 or 4 floats, plus a bias. */
static __device__ __forceinline__ uint4 stx__attn_add_bias(const uint4 &v, const float (&b)[8]) {
    return make_uint4(stx__attn_add2(v.x, b[0], b[1]), stx__attn_add2(v.y, b[2], b[3]),
                      stx__attn_add2(v.z, b[4], b[5]), stx__attn_add2(v.w, b[6], b[7]));
}

static __device__ __forceinline__ uint4 stx__attn_add_bias(const uint4 &v, const float (&b)[4]) {
    return make_uint4(__float_as_uint(__uint_as_float(v.x) + b[0]),
                      __float_as_uint(__uint_as_float(v.y) + b[1]),
                      __float_as_uint(__uint_as_float(v.z) + b[2]),
                      __float_as_uint(__uint_as_float(v.w) + b[3]));
}

/* The skew, in registers. R = Q PE^T contains the score of query row r with table row c.
   In S this score belongs to the key in column c + r, for rows r = 0 .. 15 of a strip:

       R  c:  0 1 2 3 4 ..           S  column:  0 1 2 3 4 ..
       r = 0  a b c d e              r = 0       a b c d e
       r = 1  f g h i j              r = 1         f g h i
       r = 2  k l m n o              r = 2           k l m

   A lane (g,t) of a fragment holds columns 8n + 2t and 8n + 2t + 1 of rows g and g + 8.
   For its elements e = 0, 1 of S it requires these columns of R:

       row g:      8n + 2t + e - g, which is in block n or n - 1 of the same row, and
                   hence in one of the 4 lanes with the same g
       row g + 8:  8(n - 1) + 2t + e - g, which is the column above for n - 1

   The source is lane (t - k) mod 4 with k = floor((g + 1 - e) / 2), because
   2t + e - g = 2(t - k) + e' with e' = e ^ (g & 1). The lane needs element e' of block
   n if t >= k, and of block n - 1 otherwise. For each e, each lane is the source of
   exactly one lane, so the source can select the right block. The skew thus takes one
   shuffle per element and no shared memory, rounding or barrier. Two blocks of 8
   columns are carried from one key tile to the next.

   stx__attn_skew_block takes block n of R and returns block n of S in s. */
struct stx__attn_skew {
    /* `lo` and `hi` hold the previous block of rows g and g + 8, in the order of e.
       `next` is the part of row g + 8 that belongs to the next block of S */
    float lo[2], hi[2], next[2];
};

struct stx__attn_skew_lanes {
    int from[2], odd, now[2];
};

static __device__ __forceinline__ stx__attn_skew_lanes
stx__attn_skew_lanes_of(int lane = (int)threadIdx.x & 31) {
    stx__attn_skew_lanes l;
    int g = lane >> 2, t = lane & 3, e;
    l.odd = g & 1;
    for (e = 0; e < 2; e++) {
        int k = (g + 1 - e) >> 1;
        l.from[e] = (t - k) & 3;
        /* lane t + k reads the current block of this lane. If there is no such lane,
           lane t + k - 4 reads the previous block instead */
        l.now[e] = t + k < 4;
    }
    return l;
}

static __device__ __forceinline__ void stx__attn_skew_block(stx__attn_skew &w,
                                                            const stx__attn_skew_lanes &l,
                                                            const float (&r)[4], float (&s)[4]) {
    int e;
    for (e = 0; e < 2; e++) {
        float lo = l.odd ? r[1 - e] : r[e], hi = l.odd ? r[3 - e] : r[2 + e];
        s[e] = __shfl_sync(STX__ALL, l.now[e] ? lo : w.lo[e], l.from[e], 4);
        s[2 + e] = w.next[e];
        w.next[e] = __shfl_sync(STX__ALL, l.now[e] ? hi : w.hi[e], l.from[e], 4);
        w.lo[e] = lo;
        w.hi[e] = hi;
    }
}


/* ---- src/cuda/attention_fwd_tiles.cuh ---- */
// >>attention: forward

/* Forward. A block handles BQ = 64 MT queries of one head of one batch row; each of its 4
   warps handles MT strips of 16 rows. It processes the keys in tiles of BK, from the
   oldest to the newest key that its queries may see, and then the persistent vectors,
   with one online softmax over all of them.

       for each tile:   S  = skew((Q + vb) PE^T)      BK new columns per tile; 0 for
                                                      persistent vectors
                        S += (Q + u) K^T              accumulated by the tensor cores
                        x  = S scale log2 e
                        row_max' = max(row_max, max x)
                        w  = m 2^(x - row_max')
                        f  = 2^(row_max - row_max')
                        sum = f sum + sum w
                        O   = f O + (r w) V
       at the end:      y = O / (sum keep), inv_sum = 1 / sum

   A tile of persistent vectors differs only in its scales (keys sqrt(D) pk, applied to x;
   values sqrt(N) pv, applied to w) and in using q without u.

       keys   oldest        tiles of BK          newest      persistent vectors
              |------|------|------|------|------|------|    |------|------|
       warp 0    edge  . interior tiles .   edge              interior, edge
       warp 1      edge  . interior tiles .   edge            (16 MT queries later)

       shared memory        HEADER: job, ramp weights of each warp
                            4 tiles: K and V of this step, K and V of the next step
                            ring of pe: BQ + 2 BK rows
                            q (+u), q (+vb) if they are not in registers
       registers of a warp  O (16 MT, DP), row_max, sum, S (16 MT, BK), carry of the skew,
                            fragments of q if the elements are bfloat16

   The ring holds the BQ + BK rows of the position table that the skewed bands of the 4
   warps use, and the next BK rows. While tile s is processed, the copies of tile s + 1
   are in flight (cp.async). One barrier per tile suffices. Each thread waits for its
   own copies before the barrier, so after it all copies of tile s have arrived. All
   warps have also finished tile s - 1, whose memory the next copies overwrite. If the
   elements are bfloat16, q is kept in registers as fragments. A second query (if u or
   vb is given) and float queries are kept in shared memory. Each warp reads only
   queries that it wrote, so a warp barrier is enough.

   A warp skips tiles that none of its rows sees. Its first tile starts the skew with 16
   columns to the left of the tile. Masks are applied only in edge tiles, which contain an
   end of the window of some row, or part of the ramp. The condition is uniform per warp.

   Order of sums. A row belongs to 4 lanes of one warp. Each lane adds its columns of a
   tile in ascending order, tiles are added from the oldest to the newest, and at the end
   the sums of the 4 lanes are added in a fixed tree. The order does not depend on when
   blocks run, so a run repeats bit-exactly.

   A row without keys has row_max = -inf, inv_sum = 0 and y = 0, as on the CPU. Dropout is
   applied after the weights are summed, and the factor 1 / keep at the end. row_max is
   the largest logit of a key with m > 0, in natural units. In bfloat16, w is rounded
   before it is summed, so that rounding errors in the numerator and the normaliser
   cancel if one key has most of the weight: a row with one key returns exactly its
   value. Otherwise y, and thus dO.y, would have a relative error of up to 2^-9. The
   backward pass subtracts dO.y from nearly the same value, so this error would dominate
   gradients that should be 0.

   Cost of a tile of 64 queries, 64 keys and D = 64 in bfloat16: 3 x 2 x 64^3 = 1.57 MFLOP
   for 3 x 8 KiB from L2. With one strip per warp, each of the 4 warps reads K, V and 64
   rows of the table once from shared memory. That is 96 KiB or 768 clocks, more than the
   tensor cores require (about 620). With MT = 2, two strips use the same fragments: twice
   the work for 104 KiB. Long spans therefore use 128 queries per block. BK is chosen so
   that a tile has at most 8 KiB for all D and precisions.

   Launch bounds: 128 threads, and BLOCKS blocks that should fit on a multiprocessor. This
   is 3 for narrow heads in bfloat16, which limits a thread to 168 registers, and 2 (255
   registers) otherwise. */

/* Loads rows r0 .. r0+n-1 of a warp's queries, plus a bias, into a tile. Rows beyond T
   are set to zeros. */
template <class Pr, int CH>
static __device__ __forceinline__ void stx__attn_load_query(const stx__attn_params &p,
                                                            unsigned char *tile, int r0, int n,
                                                            int i0, int b, int h,
                                                            const stx__array &bias) {
    enum { PER = 16 / Pr::SIZE, ACROSS = stx__attn_across(CH) };

    const int lane = (int)threadIdx.x & 31, c = lane % ACROSS;
    const typename Pr::element *q = (const typename Pr::element *)p.q + (size_t)b * p.q_batch_stride
                                    + (size_t)h * p.D + c * PER;
    float add[PER];
    int k, e;
#pragma unroll
    for (e = 0; e < PER; e++)
        add[e] = bias.p && c * PER < p.D ? stx__get(bias, (size_t)h * p.D + c * PER + e) : 0;
#pragma unroll 4
    for (k = 0; k < n; k += 32 / ACROSS) {
        const int r = r0 + k + lane / ACROSS, row = i0 + r;
        uint4 v = make_uint4(0, 0, 0, 0);
        if (row < p.T && c * PER < p.D) {
            v = *(const uint4 *)(q + (size_t)row * p.q_row_stride);
            if (bias.p) v = stx__attn_add_bias(v, add);
        }
        if (c < CH) *(uint4 *)(tile + stx__attn_swizzle<CH>(r, c)) = v;
    }
    __syncwarp();
}

/* Transposes 4 x 4 words across the 4 lanes of a quad: x[l] of lane t receives the
   previous value of x[t] of lane l. */
static __device__ __forceinline__ void stx__attn_transpose4(uint32_t (&x)[4]) {
    int t = (int)threadIdx.x & 3, e;
    for (e = 0; e < 4; e += 2) {
        uint32_t v = __shfl_xor_sync(STX__ALL, t & 1 ? x[e] : x[e + 1], 1);
        if (t & 1)
            x[e] = v;
        else
            x[e + 1] = v;
    }
    for (e = 0; e < 2; e++) {
        uint32_t v = __shfl_xor_sync(STX__ALL, t & 2 ? x[e] : x[e + 2], 2);
        if (t & 2)
            x[e] = v;
        else
            x[e + 2] = v;
    }
}

/* Returns a bit mask of the elements that dropout keeps in a strip of 16 rows and NB
   blocks of columns: bit 4 n + e is for element e of block n of an accumulator. The 4
   lanes of a quad share the Philox calls of their two rows. `row` is the row of g = 0,
   `at` the position of the first column, a multiple of 8. All lanes must call this
   function. */
template <int NB>
static __device__ __forceinline__ uint32_t stx__attn_keep_mask(const stx__attn_params &p,
                                                               uint64_t stream, uint64_t row,
                                                               int at) {
    int lane = (int)threadIdx.x & 31, t = lane & 3, q, l;
    uint32_t kept = 0;
    row += (uint64_t)(lane >> 2);
#pragma unroll 1
    for (q = 0; q < NB / 2; q++) {
        int c = 4 * q + t;
        uint4 w = stx__attn_random8(p, stream, row + (c >= NB ? 8 : 0),
                                    at + (c >= NB ? c - NB : c) * 8);
        uint32_t x[4] = {w.x, w.y, w.z, w.w};
        stx__attn_transpose4(x);
#pragma unroll
        for (l = 0; l < 4; l++) {
            uint32_t two = ((x[l] & 0xffffu) < p.keep) | ((x[l] >> 16) < p.keep) << 1;
            c = 4 * q + l;
            kept |= two << (c >= NB ? (c - NB) * 4 + 2 : c * 4);
        }
    }
    return kept;
}

/* Returns nonzero if a group of keys is in the band of one of the warp's strips. */
template <int MT>
static __device__ __forceinline__ int stx__attn_in_bands(const stx__attn_band (&band)[MT],
                                                         int group) {
    return (group >= band[0].lo && group < band[0].hi)
           || (group >= band[MT - 1].lo && group < band[MT - 1].hi);
}

/* o += w V, summed over the rows of the tile. The accumulators of S are used as
   fragments of the left factor: packed for bfloat16, and for tf32 with key 2t as k = t
   and key 2t + 1 as k = t + 4 in both factors. With EDGE, only the groups in the bands
   of the strips are used. */
template <class Pr, int CH, int MT, int NB, int ND, int EDGE> struct stx__attn_times_v {
    static __device__ __forceinline__ void run(float (&o)[MT][ND][4], const float (&w)[MT][NB][4],
                                               const unsigned char *tile, int lane,
                                               const stx__attn_band (&band)[MT]) {
        int g = lane >> 2, t = lane & 3, k, n, m;
#pragma unroll
        for (k = 0; k < NB; k++) {
            if (EDGE && !stx__attn_in_bands(band, k / 2)) continue;
#pragma unroll
            for (n = 0; n < ND; n++) {
                uint32_t b0 = *(
                    const uint32_t *)(tile + stx__attn_swizzle<CH>(8 * k + 2 * t, 2 * n + (g >> 2))
                                      + (g & 3) * 4);
                uint32_t b1 = *(
                    const uint32_t *)(tile
                                      + stx__attn_swizzle<CH>(8 * k + 2 * t + 1, 2 * n + (g >> 2))
                                      + (g & 3) * 4);
#pragma unroll
                for (m = 0; m < MT; m++) {
                    uint32_t a[4] = {__float_as_uint(w[m][k][0]), __float_as_uint(w[m][k][2]),
                                     __float_as_uint(w[m][k][1]), __float_as_uint(w[m][k][3])};
                    Pr::add(o[m][n], a, b0, b1);
                }
            }
        }
    }
};

template <int CH, int MT, int NB, int ND, int EDGE>
struct stx__attn_times_v<stx__attn_bf16, CH, MT, NB, ND, EDGE> {
    static __device__ __forceinline__ void run(float (&o)[MT][ND][4], const float (&w)[MT][NB][4],
                                               const unsigned char *tile, int lane,
                                               const stx__attn_band (&band)[MT]) {
        int k, n, m;
#pragma unroll
        for (k = 0; k < NB / 2; k++) {
            uint32_t a[MT][4];
            if (EDGE && !stx__attn_in_bands(band, k)) continue;
#pragma unroll
            for (m = 0; m < MT; m++) {
                a[m][0] = stx__pair(w[m][2 * k][0], w[m][2 * k][1]);
                a[m][1] = stx__pair(w[m][2 * k][2], w[m][2 * k][3]);
                a[m][2] = stx__pair(w[m][2 * k + 1][0], w[m][2 * k + 1][1]);
                a[m][3] = stx__pair(w[m][2 * k + 1][2], w[m][2 * k + 1][3]);
            }
#pragma unroll
            for (n = 0; n < ND; n += 2) {
                uint32_t b[4];
                stx__attn_frag_v<CH>(b, tile, 16 * k, n, lane);
#pragma unroll
                for (m = 0; m < MT; m++) {
                    if (EDGE && MT > 1 && (k < band[m].lo || k >= band[m].hi)) continue;
                    stx__attn_bf16::mma2(o[m][n], o[m][n + 1], a[m], b);
                }
            }
        }
    }
};

/* Returns v and hides its origin from the compiler. Values computed from it inside a loop
   are recomputed there and do not occupy registers throughout the loop. */
static __device__ __forceinline__ int stx__attn_opaque(int v) {
    asm volatile("" : "+r"(v));
    return v;
}

/* Which keys exist. With padded keys or without causality, a mask supplements the window:
   bit STX__KEYS_BEFORE + j of a batch row's words is 1 if key j exists, that is, if
   first_key <= j < S and j is not padded. Each call recomputes the mask, which is a few
   bytes that stay in L1. Without a mask, key_mask is NULL and kernels only test this,
   with one uniform branch per tile. A tile in which no key exists costs no copies of K
   and V and no matmuls. In a tile with missing keys:

       forward, queries   rows of missing keys are set to zeros after they have arrived,
                          because they may contain NaN, and 0 times NaN is NaN; their
                          logits are set to -inf before the softmax, or before a and ds
       diagonals          their ds is set to 0
       keys               no change: the column of a missing key affects only its own dK
                          and dV, which are not stored

   Without causality the window is a rectangle: delta_min = 1 - T and span >= S let every
   query see every key, and the mask ends it at S. */

/* Number of zero bits before key 0, where a tile may begin. Zero bits also follow the
   last key. */
enum { STX__KEYS_BEFORE = 64 };

/* Returns the number of mask words per batch row, or 0 if no mask is required. */
static size_t stx__attn_key_words(const stx_attention_args *a) {
    return a->pad || a->not_causal ? (a->S + STX__KEYS_BEFORE - 1) / 32 + 3 : 0;
}

static size_t stx__attn_key_word_rows(const stx_attention_args *a) {
    return a->pad ? a->B : 1;
}

/* Returns the mask of keys j0 .. j0+BK-1 of batch row b, where -BK < j0 < S. */
template <int BK>
static __device__ __forceinline__ uint64_t stx__attn_key_mask(const stx__attn_params &p, int b,
                                                              int j0) {
    const unsigned at = (unsigned)(stx__attn_opaque(j0) + STX__KEYS_BEFORE), shift = at & 31;
    const uint32_t *w = p.key_mask + (size_t)b * p.key_mask_stride + (at >> 5);
    uint64_t v = (w[0] | (uint64_t)w[1] << 32) >> shift;
    if (BK == 64) return shift ? v | (uint64_t)w[2] << (64 - shift) : v;
    return v & (((uint64_t)1 << (BK & 63)) - 1);
}

/* Returns nonzero if all keys of a tile exist. */
template <int BK> static __device__ __forceinline__ int stx__attn_all_exist(uint64_t seen) {
    return seen == ~(uint64_t)0 >> (64 - BK);
}

/* Writes the mask. Each warp computes one word, one lane per key; a block computes 8. */
STX__GLOBAL(256)
stx__attn_key_mask_kernel(uint32_t *bits, const int32_t *pad, size_t stpad, int S, int lo,
                          size_t words, size_t n) {
    size_t k = (size_t)blockIdx.x * (blockDim.x / STX__WARP) + threadIdx.x / STX__WARP;
    if (k >= n) return;
    ptrdiff_t j = (ptrdiff_t)(k % words * 32 + threadIdx.x % STX__WARP) - STX__KEYS_BEFORE;
    uint32_t v = __ballot_sync(STX__ALL,
                               j >= lo && j < S && !(pad && pad[k / words * stpad + (size_t)j]));
    if (!(threadIdx.x % STX__WARP)) bits[k] = v;
}

static void stx__attn_make_key_mask(stx_ctx *x, const char *name, const stx_attention_args *a,
                                    stx__attn_params *p, void *bits) {
    size_t words = stx__attn_key_words(a), n = words * stx__attn_key_word_rows(a);
    if (!n) return;
    p->key_mask = (const uint32_t *)bits;
    p->key_mask_stride = a->pad ? (int)words : 0;
    STX__RUN_KERNEL(x, name, stx__attn_key_mask_kernel, stx__blocks(n, 8, (size_t)1 << 30), 256, 0,
                    (uint32_t *)bits, a->pad, a->pad_batch_stride, p->S, p->first_key, words, n);
}

/* The work of a block. It is kept in shared memory because registers are scarce. */
typedef struct stx__attn_job {
    stx__attn_window w;
    int b, h, i0, first, window_steps, steps;
} stx__attn_job;

/* The shape of a forward kernel. With SHARED_Q, the query that is multiplied by keys is
   kept in shared memory instead of registers. This is required if there are two
   different queries, or if the elements are floats. */
template <class Pr_, int DP, int BK, int MT, int SHARED_Q> struct stx__attn_fwd_shape {
    typedef Pr_ Pr;

    enum {
        SIZE = Pr::SIZE,
        STRIPS = MT,
        KEYS = BK,
        Q_IN_SHARED = SHARED_Q,
        Q_REGS = SIZE == 2, /* fragments of q stay in registers */
        BQ = 64 * MT,
        CH = DP * SIZE / 16,
        KS = CH / 2,
        NB = BK / 8,
        ND = DP / 8,
        QS = Q_REGS ? KS : 1, /* fragments of q per strip */
        ROW = CH * 16,        /* bytes per row of a tile */
        TILE = BK * ROW,      /* bytes per tile */
        RING = BQ + 2 * BK,   /* number of rows of pe in the ring */
        THREADS = 128,
        RAMP = BK + 16 * MT,                        /* query-key distances per warp and tile */
        HEADER = (64 + 16 * RAMP + 127) / 128 * 128 /* the job, and the ramp weights of 4 warps */
    };

    /* Returns the size of shared memory in bytes. `two` is nonzero if u or vb is given.
       If q is kept in registers, it is first loaded into the second pair of K and V
       tiles. */
    static size_t shared(int pe, int two) {
        size_t rows = 4 * BK + (pe ? RING : 0);
        if (!Q_REGS)
            rows += two ? 2 * BQ : BQ;
        else if (SHARED_Q)
            rows += BQ;
        return HEADER + ROW * rows;
    }

    /* The number of blocks that should fit on a multiprocessor. It limits the registers
       per thread. */
    enum { BLOCKS = MT > 1 || DP > 64 || !Q_REGS ? 2 : 3 };
};

/* Starts the copies of step s into the tiles that step s - 2 used. */
template <class X>
static __device__ __forceinline__ void stx__attn_fwd_load(const stx__attn_params &p,
                                                          const stx__attn_job &job,
                                                          unsigned char *shared, int s) {
    const int window = s < job.window_steps,
              j0 = window ? job.first + s * X::KEYS
                          : (s - job.window_steps) * X::KEYS - ((p.S + p.span) & 7),
              bytes = p.D * X::SIZE;
    unsigned char *to = shared + (s & 1) * 2 * X::TILE, *ring = shared + 4 * X::TILE;
    if (window) {
        if (!p.key_mask || stx__attn_key_mask<X::KEYS>(p, job.b, j0))
            stx__attn_load_kv<X::CH, X::THREADS, X::SIZE>(p, to, to + X::TILE, X::KEYS, job.b,
                                                          job.h, j0);
    } else {
        const size_t o = (size_t)job.h * p.N * p.D * X::SIZE;
        stx__attn_load<X::CH, X::THREADS>(to, X::KEYS, (const char *)p.pk + o, (size_t)bytes, bytes,
                                          j0, 0, p.N);
        stx__attn_load<X::CH, X::THREADS>(to + X::TILE, X::KEYS, (const char *)p.pv + o,
                                          (size_t)bytes, bytes, j0, 0, p.N);
    }
    if (window && p.pe) {
        const char *pe = (const char *)p.pe + (size_t)job.h * p.pe_head_stride * X::SIZE;
        int row = p.P - 1 + p.delta_min - p.C + j0 - job.i0, at = (X::BQ + X::KEYS * s) % X::RING;
        if (!s)
            stx__attn_load<X::CH, X::THREADS>(ring, X::BQ, pe, (size_t)p.pe_row_stride * X::SIZE,
                                              bytes, row - X::BQ, 0, p.P);
        stx__attn_load<X::CH, X::THREADS>(ring + at * X::ROW, X::KEYS, pe,
                                          (size_t)p.pe_row_stride * X::SIZE, bytes, row, 0, p.P);
    }
    stx__cp_commit();
}

/* Wraps `row`, which is out of range by at most N, into a ring of N rows. */
template <int N> static __device__ __forceinline__ int stx__attn_ring(int row) {
    int by = row >= N ? -N : 0;
    if (row < 0) by = N;
    return row + by;
}


/* ---- src/cuda/attention_fwd.cuh ---- */
// >>attention: forward kernel

/* The work of a warp in one step: its rows and a tile */
typedef struct stx__attn_fwd_tile {
    const unsigned char *k, *v, *ring, *qs, *qr;
    float *ramp;
    int lane;
    int window;   /* 1: the tile holds keys of the window; 0: persistent vectors */
    int s, j0, i; /* s: step; j0: first key or vector of the tile; i: the warp's first query */
    float sc;     /* scale of the logits, times log2 e if elements are bfloat16 */
} stx__attn_fwd_tile;

/* x = skew((Q + vb) PE^T) for the strips of the warp, in blocks of 8 columns. Strip m
   requires blocks 0 .. NB-1 and, where its skew starts, two more blocks to their left.
   Block 0 of strip 0 begins at row `at` of the ring, and strip 1 begins 16 columns
   further left. Iteration c therefore computes block c + 2m of strip m, and both strips
   use the same fragment of pe. With EDGE, only blocks in the band of a strip are
   computed, starting two blocks before it unless the strip's skew continues from the
   previous tile (bit m of `started`). The rest of x stays 0. */
template <class X, int EDGE>
static __device__ __forceinline__ void stx__attn_fwd_positions(
    float (&x)[X::STRIPS][X::NB][4], stx__attn_skew (&skew)[X::STRIPS], const stx__attn_fwd_tile &w,
    const uint32_t (&qf)[X::STRIPS][X::QS][4], const stx__attn_band (&band)[X::STRIPS],
    int started) {
    enum { CH = X::CH, KS = X::KS, NB = X::NB, MT = X::STRIPS };

    const int warp = (int)threadIdx.x >> 5, r0 = warp * 16 * MT;
    /* computed so that the compiler knows that `at` is a multiple of 16 */
    const int at = (X::KEYS / 16 * w.s + X::BQ / 16 - MT * warp) % (X::RING / 16) * 16;
    const stx__attn_skew_lanes lanes = stx__attn_skew_lanes_of(w.lane);
    int from[MT], to[MT], c, m, k, e;
#pragma unroll
    for (m = 0; m < MT; m++) {
        from[m] = to[m] = 2 * band[m].hi;
        if (band[m].lo != band[m].hi) from[m] = started >> m & 1 ? 0 : 2 * band[m].lo - 2;
    }
#pragma unroll
    for (c = -2 * MT; c < NB; c++) {
        float r[MT][4];
        int row = at + 8 * c, some = 0;
        /* these columns were carried over from the previous tile */
        if (!EDGE && c < 2 - 2 * MT && started >> (MT - 1)) continue;
        row = stx__attn_ring<X::RING>(row);
#pragma unroll
        for (m = 0; m < MT; m++) {
            some |= c + 2 * m >= from[m] && c + 2 * m < to[m];
            r[m][0] = r[m][1] = r[m][2] = r[m][3] = 0;
        }
        if (EDGE && !some) continue;
#pragma unroll
        for (k = 0; k < KS; k += 2) {
            uint32_t f[4];
            stx__attn_frag_b2<CH>(f, w.ring, row, k, w.lane);
#pragma unroll
            for (m = 0; m < MT; m++) {
                const int col = c + 2 * m;
                if (col < -2 || col >= NB) continue;
                if (EDGE && MT > 1 && (col < from[m] || col >= to[m])) continue;
#pragma unroll
                for (e = 0; e < 2; e++) {
                    if (X::Q_REGS)
                        X::Pr::mma(r[m], qf[m][X::Q_REGS ? k + e : 0], f[2 * e], f[2 * e + 1]);
                    else {
                        uint32_t a[4];
                        stx__attn_frag_a<CH>(a, w.qr, r0 + 16 * m, k + e, w.lane);
                        X::Pr::mma(r[m], a, f[2 * e], f[2 * e + 1]);
                    }
                }
            }
        }
#pragma unroll
        for (m = 0; m < MT; m++) {
            const int col = c + 2 * m;
            float unseen[4];
            if (col < -2 || col >= NB) continue;
            if (EDGE && MT > 1 && (col < from[m] || col >= to[m])) continue;
            if (col < 0)
                stx__attn_skew_block(skew[m], lanes, r[m], unseen);
            else
                stx__attn_skew_block(skew[m], lanes, r[m], x[m][col < 0 ? 0 : col]);
        }
    }
}

/* Sets `a` to the fragment of the query that is multiplied by keys, for strip m and
   step k of the sum over D. */
template <class X>
static __device__ __forceinline__ void stx__attn_fwd_frag_q(
    uint32_t (&a)[4], const stx__attn_fwd_tile &w, const uint32_t (&qf)[X::STRIPS][X::QS][4], int m,
    int k) {
    const int r0 = ((int)threadIdx.x >> 5) * 16 * X::STRIPS;
    if (X::Q_IN_SHARED)
        stx__attn_frag_a<X::CH>(a, w.qs, r0 + 16 * m, k, w.lane);
    else
        for (int e = 0; e < 4; e++) a[e] = qf[m][X::Q_REGS ? k : 0][e];
}

/* Sets the logits of keys that do not exist to -inf. */
template <class X>
static __device__ __forceinline__ void stx__attn_fwd_set_missing(const stx__attn_params &p,
                                                                 const stx__attn_job &job,
                                                                 const stx__attn_fwd_tile &w,
                                                                 float (&x)[X::STRIPS][X::NB][4]) {
    const uint64_t seen = stx__attn_key_mask<X::KEYS>(p, job.b, w.j0);
    if (stx__attn_all_exist<X::KEYS>(seen)) return;
#pragma unroll
    for (int m = 0; m < X::STRIPS; m++) stx__attn_set_missing(x[m], seen, w.lane & 3, -INFINITY);
}

/* Turns the weights of a strip into the factors of V after the weights have been summed:
   applies dropout, and sqrt(N) for persistent vectors. */
template <class X>
static __device__ __forceinline__ void stx__attn_fwd_drop(const stx__attn_params &p, int window,
                                                          uint32_t kept, float (&x)[X::NB][4]) {
    int n, e;
    if (p.keep)
#pragma unroll
        for (n = 0; n < X::NB; n++)
            for (e = 0; e < 4; e++)
                if (!(kept >> (4 * n + e) & 1)) x[n][e] = 0;
    if (!window) {
        float root = sqrtf((float)p.N);
#pragma unroll
        for (n = 0; n < X::NB; n++)
            for (e = 0; e < 4; e++) x[n][e] *= root;
    }
}

/* Computes the dropout masks of the warp's strips in a tile. */
template <class X>
static __device__ __forceinline__ void stx__attn_fwd_keep(const stx__attn_params &p,
                                                          const stx__attn_job &job,
                                                          const stx__attn_fwd_tile &w,
                                                          uint32_t (&kept)[X::STRIPS]) {
#pragma unroll
    for (int m = 0; m < X::STRIPS; m++)
        kept[m] = stx__attn_keep_mask<X::NB>(p, p.stream + *p.shift,
                                             ((uint64_t)job.b * p.H + job.h) * p.T + w.i + 16 * m,
                                             (w.window ? p.span : p.S + p.span) + w.j0);
}

/* Rounds two weights to bfloat16 if the elements are bfloat16, so that the same values
   are summed and multiplied by V. */
template <class X> static __device__ __forceinline__ void stx__attn_fwd_round(float &a, float &b) {
    if (X::Q_REGS) {
        uint32_t u = stx__pair(a, b);
        a = __uint_as_float(u << 16);
        b = __uint_as_float(u & 0xffff0000u);
    }
}

/* The online softmax of a strip in an interior tile. Replaces the logits in x with
   weights and rescales o and sum to the new maximum. */
template <class X>
static __device__ __forceinline__ void stx__attn_fwd_softmax(const stx__attn_fwd_tile &w,
                                                             float (&x)[X::NB][4],
                                                             float (&o)[X::ND][4],
                                                             float (&row_max)[2], float (&sum)[2]) {
    const float unit = X::Q_REGS ? STX__LOG2E : 1;
    int n, e;
#pragma unroll
    for (e = 0; e < 2; e++) {
        float most = -INFINITY, old = row_max[e], from, f, add = 0;
#pragma unroll
        for (n = 0; n < X::NB; n++) most = fmaxf(most, fmaxf(x[n][2 * e], x[n][2 * e + 1]));
        most = fmaxf(most, __shfl_xor_sync(STX__ALL, most, 1));
        most = fmaxf(most, __shfl_xor_sync(STX__ALL, most, 2));
        row_max[e] = fmaxf(old, most * w.sc);
        /* if no key has been seen, use 2^-inf instead of 2^(-inf + inf) */
        from = row_max[e] == -INFINITY ? 0 : row_max[e];
        f = stx__exp2((old - from) * (STX__LOG2E / unit));
#pragma unroll
        for (n = 0; n < X::NB; n++) {
            x[n][2 * e] = stx__exp2(fmaf(x[n][2 * e], w.sc, -from) * (STX__LOG2E / unit));
            x[n][2 * e + 1] = stx__exp2(fmaf(x[n][2 * e + 1], w.sc, -from) * (STX__LOG2E / unit));
        }
#pragma unroll
        for (n = 0; n < X::NB; n++) stx__attn_fwd_round<X>(x[n][2 * e], x[n][2 * e + 1]);
#pragma unroll
        for (n = 0; n < X::NB; n++) add += x[n][2 * e] + x[n][2 * e + 1];
        sum[e] = fmaf(sum[e], f, add);
#pragma unroll
        for (n = 0; n < X::ND; n++) {
            o[n][2 * e] *= f;
            o[n][2 * e + 1] *= f;
        }
    }
}

/* Like stx__attn_fwd_softmax, but for strip m in an edge tile: processes only the
   groups in its band, and applies masks and ramp weights. */
template <class X>
static __device__ __forceinline__ void stx__attn_fwd_edge_softmax(
    const stx__attn_params &p, const stx__attn_job &job, const stx__attn_fwd_tile &w,
    const stx__attn_band &band, int m, int ramped, float (&x)[X::NB][4], float (&o)[X::ND][4],
    float (&row_max)[2], float (&sum)[2]) {
    const float unit = X::Q_REGS ? STX__LOG2E : 1;
    const int g = w.lane >> 2, t = w.lane & 3, window = w.window,
              i = p.C + w.i + 16 * m + g - w.j0 - 2 * t;
    float most[2] = {-INFINITY, -INFINITY}, from[2], f[2], add[2] = {0, 0};
    int n, e;
#pragma unroll
    for (n = 0; n < X::NB; n++) {
        if (n / 2 < band.lo || n / 2 >= band.hi) continue;
#pragma unroll
        for (e = 0; e < 2; e++) {
            const int lo = window ? max(i + 8 * e - job.w.visible, p.first_key - w.j0 - 2 * t)
                                  : -w.j0 - 2 * t,
                      hi = window ? i + 8 * e - p.delta_min + 1 : p.N - w.j0 - 2 * t;
            if (8 * n < lo || 8 * n >= hi) x[n][2 * e] = -INFINITY;
            if (8 * n + 1 < lo || 8 * n + 1 >= hi) x[n][2 * e + 1] = -INFINITY;
            most[e] = fmaxf(most[e], fmaxf(x[n][2 * e], x[n][2 * e + 1]));
        }
    }
#pragma unroll
    for (e = 0; e < 2; e++) {
        const float old = row_max[e];
        most[e] = fmaxf(most[e], __shfl_xor_sync(STX__ALL, most[e], 1));
        most[e] = fmaxf(most[e], __shfl_xor_sync(STX__ALL, most[e], 2));
        row_max[e] = fmaxf(old, most[e] * w.sc);
        from[e] = row_max[e] == -INFINITY ? 0 : row_max[e];
        f[e] = stx__exp2((old - from[e]) * (STX__LOG2E / unit));
    }
#pragma unroll
    for (n = 0; n < X::NB; n++) {
        const float *f0 = w.ramp + X::KEYS - 1 + 16 * m + g - 2 * t - 8 * n;
        if (n / 2 < band.lo || n / 2 >= band.hi) continue;
#pragma unroll
        for (e = 0; e < 2; e++) {
            float a = stx__exp2(fmaf(x[n][2 * e], w.sc, -from[e]) * (STX__LOG2E / unit));
            float b = stx__exp2(fmaf(x[n][2 * e + 1], w.sc, -from[e]) * (STX__LOG2E / unit));
            if (ramped) {
                a *= f0[8 * e];
                b *= f0[8 * e - 1];
            }
            stx__attn_fwd_round<X>(a, b);
            add[e] += a + b;
            x[n][2 * e] = a;
            x[n][2 * e + 1] = b;
        }
    }
#pragma unroll
    for (e = 0; e < 2; e++) {
        sum[e] = fmaf(sum[e], f[e], add[e]);
#pragma unroll
        for (n = 0; n < X::ND; n++) {
            o[n][2 * e] *= f[e];
            o[n][2 * e + 1] *= f[e];
        }
    }
}

/* Processes an edge tile, which contains an end of the window, part of the ramp or the
   end of the persistent vectors. Sums are computed in the same order as in
   stx__attn_fwd_interior, but skip the groups of 16 keys outside the bands of the strips,
   because the weights of these keys would be 0. All conditions are uniform per warp.
   Loops are unrolled because accumulators are in registers, which cannot be indexed. */
template <class X>
static __device__ __forceinline__ void stx__attn_fwd_edge(
    const stx__attn_params &p, const stx__attn_job &job, const stx__attn_fwd_tile &w,
    const uint32_t (&kept)[X::STRIPS], const uint32_t (&qf)[X::STRIPS][X::QS][4],
    float (&o)[X::STRIPS][X::ND][4], float (&row_max)[X::STRIPS][2], float (&sum)[X::STRIPS][2],
    stx__attn_skew (&skew)[X::STRIPS], int &started) {
    enum { KS = X::KS, NB = X::NB, MT = X::STRIPS };

    const int window = w.window, min_delta = p.C + w.i - (w.j0 + X::KEYS - 1),
              ramped = p.z.p && window && min_delta + X::KEYS + 16 * MT - 2 > job.w.full;
    float x[MT][NB][4];
    stx__attn_band band[MT];
    int m, n, k, e;
#pragma unroll
    for (m = 0; m < MT; m++) {
        band[m] = stx__attn_band_of<X::KEYS>(p, !window, job.w.visible, w.i + 16 * m, w.j0);
#pragma unroll
        for (n = 0; n < NB; n++) x[m][n][0] = x[m][n][1] = x[m][n][2] = x[m][n][3] = 0;
    }
    if (ramped) { /* ramp[e] is the weight at distance min_delta + e */
        __syncwarp();
        for (e = w.lane; e < X::KEYS + 16 * MT - 1; e += 32)
            w.ramp[e] = stx__attn_clamp(stx__attn_ramp(p, job.w, min_delta + e));
        __syncwarp();
    }
    if (window && p.pe) {
        stx__attn_fwd_positions<X, 1>(x, skew, w, qf, band, started);
#pragma unroll
        for (m = 0; m < MT; m++)
            if (band[m].lo < band[m].hi) started |= 1 << m;
    }
#pragma unroll
    for (n = 0; n < NB; n += 2) {
        if (!stx__attn_in_bands(band, n / 2)) continue;
#pragma unroll
        for (k = 0; k < KS; k++) {
            uint32_t f[4];
            stx__attn_frag_b<X::CH>(f, w.k, 8 * n, k, w.lane);
#pragma unroll
            for (m = 0; m < MT; m++) {
                uint32_t a[4];
                if (MT > 1 && (n / 2 < band[m].lo || n / 2 >= band[m].hi)) continue;
                stx__attn_fwd_frag_q<X>(a, w, qf, m, k);
                X::Pr::mma2(x[m][n], x[m][n + 1], a, f);
            }
        }
    }
    if (p.key_mask && window) stx__attn_fwd_set_missing<X>(p, job, w, x);
#pragma unroll
    for (m = 0; m < MT; m++) {
        if (band[m].lo == band[m].hi) continue;
        stx__attn_fwd_edge_softmax<X>(p, job, w, band[m], m, ramped, x[m], o[m], row_max[m],
                                      sum[m]);
        stx__attn_fwd_drop<X>(p, window, kept[m], x[m]);
    }
    stx__attn_times_v<typename X::Pr, X::CH, MT, NB, X::ND, 1>::run(o, x, w.v, w.lane, band);
}

/* Processes an interior tile: every row of the warp sees all keys of the tile with ramp
   weight 1. */
template <class X>
static __device__ __forceinline__ void stx__attn_fwd_interior(
    const stx__attn_params &p, const stx__attn_job &job, const stx__attn_fwd_tile &w,
    const uint32_t (&kept)[X::STRIPS], const uint32_t (&qf)[X::STRIPS][X::QS][4],
    float (&o)[X::STRIPS][X::ND][4], float (&row_max)[X::STRIPS][2], float (&sum)[X::STRIPS][2],
    stx__attn_skew (&skew)[X::STRIPS], int &started) {
    enum { NB = X::NB, MT = X::STRIPS };

    const int window = w.window;
    const stx__attn_band whole[MT] = {};
    float x[MT][NB][4];
    int m, n, k;
    if (window && p.pe) {
        stx__attn_fwd_positions<X, 0>(x, skew, w, qf, whole, started);
        started = (1 << MT) - 1;
    } else {
#pragma unroll
        for (m = 0; m < MT; m++)
#pragma unroll
            for (n = 0; n < NB; n++) x[m][n][0] = x[m][n][1] = x[m][n][2] = x[m][n][3] = 0;
    }
#pragma unroll
    for (k = 0; k < X::KS; k++) {
        uint32_t a[MT][4], f[4];
#pragma unroll
        for (m = 0; m < MT; m++) stx__attn_fwd_frag_q<X>(a[m], w, qf, m, k);
#pragma unroll
        for (n = 0; n < NB; n += 2) {
            stx__attn_frag_b<X::CH>(f, w.k, 8 * n, k, w.lane);
#pragma unroll
            for (m = 0; m < MT; m++) X::Pr::mma2(x[m][n], x[m][n + 1], a[m], f);
        }
    }
    if (p.key_mask && window) stx__attn_fwd_set_missing<X>(p, job, w, x);
#pragma unroll
    for (m = 0; m < MT; m++) {
        stx__attn_fwd_softmax<X>(w, x[m], o[m], row_max[m], sum[m]);
        stx__attn_fwd_drop<X>(p, window, kept[m], x[m]);
    }
    stx__attn_times_v<typename X::Pr, X::CH, MT, NB, X::ND, 0>::run(o, x, w.v, w.lane, whole);
}

/* Sets up the block's job from its entry in the work list. Called by thread 0. */
template <class X>
static __device__ __forceinline__ void stx__attn_fwd_job(const stx__attn_params &p,
                                                         stx__attn_job *j, const uint32_t *list,
                                                         int tiles) {
    enum { BK = X::KEYS };

    int entry = (int)list[blockIdx.x / (unsigned)p.B], last;
    j->b = (int)(blockIdx.x % (unsigned)p.B);
    j->h = entry / tiles;
    j->i0 = entry % tiles * X::BQ;
    j->w = stx__attn_window_of(p, j->h);
    stx__attn_key_range(p, j->w, j->i0, X::BQ, &j->first, &last);
    if (p.key_mask) {
        last = min(last, p.S);
        while (j->first < last && !stx__attn_key_mask<BK>(p, j->b, j->first)) j->first += BK;
    }
    j->window_steps = (last - j->first + BK - 1) / BK;
    if (p.key_mask)
        while (j->window_steps
               && !stx__attn_key_mask<BK>(p, j->b, j->first + (j->window_steps - 1) * BK))
            j->window_steps--;
    j->steps = j->window_steps + (p.N ? (p.N + ((p.S + p.span) & 7) + BK - 1) / BK : 0);
}

/* Loads the queries: q + vb, which is multiplied by pe, as fragments in qf or rows in qr;
   and q + u, which is multiplied by keys, in qs if it is different. Clears the sums. */
template <class X>
static __device__ __forceinline__ void stx__attn_fwd_begin(
    const stx__attn_params &p, const stx__attn_job &job, unsigned char *qs, unsigned char *qr,
    uint32_t (&qf)[X::STRIPS][X::QS][4], float (&o)[X::STRIPS][X::ND][4],
    float (&row_max)[X::STRIPS][2], float (&sum)[X::STRIPS][2], stx__attn_skew (&skew)[X::STRIPS]) {
    typedef typename X::Pr Pr;

    enum { CH = X::CH, MT = X::STRIPS, ROWS = 16 * MT };

    const int r0 = ((int)threadIdx.x >> 5) * ROWS;
    int m, n, k, e;
    if (X::Q_REGS) {
        stx__attn_load_query<Pr, CH>(p, qs, r0, ROWS, job.i0, job.b, job.h, p.vb);
#pragma unroll
        for (m = 0; m < MT; m++)
#pragma unroll
            for (k = 0; k < X::KS; k++)
                stx__attn_frag_a<CH>(qf[m][X::Q_REGS ? k : 0], qs, r0 + 16 * m, k);
        __syncwarp();
    } else if (qr != qs) {
        stx__attn_load_query<Pr, CH>(p, qr, r0, ROWS, job.i0, job.b, job.h, p.vb);
    }
    if (X::Q_IN_SHARED) stx__attn_load_query<Pr, CH>(p, qs, r0, ROWS, job.i0, job.b, job.h, p.u);
#pragma unroll
    for (m = 0; m < MT; m++) {
#pragma unroll
        for (n = 0; n < X::ND; n++) o[m][n][0] = o[m][n][1] = o[m][n][2] = o[m][n][3] = 0;
        row_max[m][0] = row_max[m][1] = -INFINITY;
        sum[m][0] = sum[m][1] = 0;
#pragma unroll
        for (e = 0; e < 2; e++) skew[m].lo[e] = skew[m].hi[e] = skew[m].next[e] = 0;
    }
}

/* Sets the rows of missing keys to zeros after K and V of a tile have arrived. Returns
   nonzero if any key of the tile exists. All threads must call this function. */
template <class X>
static __device__ __forceinline__ int stx__attn_fwd_zero_missing(const stx__attn_params &p,
                                                                 const stx__attn_job &job,
                                                                 unsigned char *kv, int j0) {
    const uint64_t seen = stx__attn_key_mask<X::KEYS>(p, job.b, j0);
    if (seen && !stx__attn_all_exist<X::KEYS>(seen)) {
        stx__attn_zero_missing<X::CH, X::THREADS, X::KEYS>(kv, seen);
        stx__attn_zero_missing<X::CH, X::THREADS, X::KEYS>(kv + X::TILE, seen);
        __syncthreads();
    }
    return seen != 0;
}

/* Stores y, row_max and inv_sum of the warp's rows. */
template <class X>
static __device__ __forceinline__ void stx__attn_fwd_store(const stx__attn_params &p,
                                                           const stx__attn_job &job,
                                                           const float (&o)[X::STRIPS][X::ND][4],
                                                           const float (&row_max)[X::STRIPS][2],
                                                           const float (&sum)[X::STRIPS][2]) {
    typedef typename X::Pr Pr;

    enum { MT = X::STRIPS };

    const int r0 = ((int)threadIdx.x >> 5) * 16 * MT;
    int m, n, e;
#pragma unroll
    for (m = 0; m < MT; m++)
#pragma unroll
        for (e = 0; e < 2; e++) {
            const int t = (int)threadIdx.x & 3,
                      i = job.i0 + r0 + 16 * m + ((int)threadIdx.x >> 2 & 7) + 8 * e;
            float norm = sum[m][e], f;
            norm += __shfl_xor_sync(STX__ALL, norm, 1);
            norm += __shfl_xor_sync(STX__ALL, norm, 2);
            f = norm == 0 ? 0 : 1 / norm;
            if (i < p.T) {
                typename Pr::element *y = (typename Pr::element *)p.y
                                          + (((size_t)job.b * p.T + i) * p.H + job.h) * p.D;
                const float of = f * p.inv_keep;
#pragma unroll
                for (n = 0; n < X::ND; n++)
                    if (8 * n < p.D)
                        stx__attn_store2(y + 8 * n + 2 * t, o[m][n][2 * e] * of,
                                         o[m][n][2 * e + 1] * of);
                if (!t) {
                    const size_t row = ((size_t)job.b * p.H + job.h) * p.T + i;
                    p.row_max[row] = X::Q_REGS ? row_max[m][e] * 0.69314718f : row_max[m][e];
                    p.inv_sum[row] = f;
                }
            }
        }
}

/* Sets the fields of w that change from step to step. */
template <class X>
static __device__ __forceinline__ void stx__attn_fwd_set_tile(const stx__attn_params &p,
                                                              const stx__attn_job &job,
                                                              const unsigned char *shared, int s,
                                                              stx__attn_fwd_tile &w) {
    const float unit = X::Q_REGS ? STX__LOG2E : 1;
    w.lane = stx__attn_opaque((int)threadIdx.x & 31);
    w.k = shared + (s & 1) * 2 * X::TILE;
    w.v = w.k + X::TILE;
    w.s = s;
    w.window = s < job.window_steps;
    w.j0 = w.window ? job.first + s * X::KEYS
                    : (s - job.window_steps) * X::KEYS - ((p.S + p.span) & 7);
    w.sc = (w.window ? p.scale : p.scale * sqrtf((float)p.D)) * unit;
}

/* The forward kernel, see "Forward" above. There is one block per entry of the list
   (blockIdx.x / B) and batch row (blockIdx.x % B). */
template <class Pr, int DP, int BK, int MT, int SHARED_Q>
STX__GLOBAL(128, stx__attn_fwd_shape<Pr, DP, BK, MT, SHARED_Q>::BLOCKS)
stx__attn_fwd(stx__attn_params p, const uint32_t *list, int tiles) {
    typedef stx__attn_fwd_shape<Pr, DP, BK, MT, SHARED_Q> X;

    enum { ROWS = 16 * MT };

    STX__DYNAMIC(memory);
    const stx__attn_job &job = *(const stx__attn_job *)memory;
    unsigned char *shared = memory + X::HEADER, *ring = shared + 4 * X::TILE,
                  *after = ring + (p.pe ? X::RING * X::ROW : 0),
                  *qs = X::Q_REGS && !SHARED_Q ? shared + 2 * X::TILE : after,
                  *qr = X::Q_REGS || !(p.u.p || p.vb.p) ? qs : qs + X::BQ * X::ROW;
    const int warp = (int)threadIdx.x >> 5, r0 = warp * ROWS;
    const stx__array none = {NULL, NULL, 0};
    uint32_t kept[MT] = {}, qf[MT][X::QS][4];
    float o[MT][X::ND][4], row_max[MT][2], sum[MT][2];
    stx__attn_skew skew[MT];
    stx__attn_fwd_tile w;
    /* started: one bit per strip, set if its skew continues from the previous tile */
    int s, started = 0;

    if (!threadIdx.x) stx__attn_fwd_job<X>(p, (stx__attn_job *)memory, list, tiles);
    __syncthreads();
    if (job.steps) stx__attn_fwd_load<X>(p, job, shared, 0);
    stx__attn_fwd_begin<X>(p, job, qs, qr, qf, o, row_max, sum, skew);
    w.ring = ring;
    w.qs = qs;
    w.qr = qr;
    w.ramp = (float *)(memory + 64) + warp * X::RAMP;
    w.i = job.i0 + r0;

    for (s = 0; s < job.steps; s++) {
        int some = 1, min_delta, max_delta;
        stx__attn_fwd_set_tile<X>(p, job, shared, s, w);
        stx__cp_wait<0>();
        __syncthreads();
        if (p.key_mask && w.window)
            some = stx__attn_fwd_zero_missing<X>(p, job, shared + (s & 1) * 2 * X::TILE, w.j0);
        if (s + 1 < job.steps) stx__attn_fwd_load<X>(p, job, shared, s + 1);
        /* the logits of persistent keys do not include u */
        if (SHARED_Q && s == job.window_steps && p.u.p) {
            __syncwarp();
            stx__attn_load_query<Pr, X::CH>(p, qs, r0, ROWS, job.i0, job.b, job.h, none);
        }
        /* the skew restarts at the next tile; the ring has all rows that this requires */
        if (!some) {
            started = 0;
            continue;
        }

        /* the largest and the smallest distance between the warp's queries and the
           tile's keys */
        max_delta = p.C + w.i + ROWS - 1 - w.j0;
        min_delta = p.C + w.i - (w.j0 + BK - 1);
        if (w.i >= p.T) continue;
        if (w.window && (min_delta > job.w.visible || max_delta < p.delta_min)) continue;
        if (p.keep) stx__attn_fwd_keep<X>(p, job, w, kept);
        if (w.window ? min_delta < p.delta_min || max_delta > job.w.full || w.j0 < p.first_key
                     : w.j0 < 0 || w.j0 + BK > p.N)
            stx__attn_fwd_edge<X>(p, job, w, kept, qf, o, row_max, sum, skew, started);
        else
            stx__attn_fwd_interior<X>(p, job, w, kept, qf, o, row_max, sum, skew, started);
    }
    stx__attn_fwd_store<X>(p, job, o, row_max, sum);
}

typedef stx__kernel_of<stx__attn_params, const uint32_t *, int> stx__attn_fwd_kernel;

typedef struct stx__attn_fwd_choice {
    stx__attn_fwd_kernel run;
    size_t shared;
    int bq, bk, tiles;
} stx__attn_fwd_choice;

template <class Pr, int DP, int BK, int MT, int SHARED_Q>
static stx__attn_fwd_choice stx__attn_fwd_choice_of(const stx__attn_params *p, int two) {
    typedef stx__attn_fwd_shape<Pr, DP, BK, MT, SHARED_Q> X;
    stx__attn_fwd_choice c = {stx__attn_fwd<Pr, DP, BK, MT, SHARED_Q>,
                              X::shared(p->pe != NULL, two), X::BQ, BK, (p->T + X::BQ - 1) / X::BQ};
    return c;
}

template <class Pr>
static stx__attn_fwd_choice stx__attn_fwd_choose_float(const stx__attn_params *p, int two) {
    return p->D <= 32   ? stx__attn_fwd_choice_of<Pr, 32, 64, 1, 1>(p, two)
           : p->D <= 64 ? stx__attn_fwd_choice_of<Pr, 64, 32, 1, 1>(p, two)
                        : stx__attn_fwd_choice_of<Pr, 128, 16, 1, 1>(p, two);
}

template <int DP, int BK, int MT>
static stx__attn_fwd_choice stx__attn_fwd_choose_bf16(const stx__attn_params *p, int two) {
    return two ? stx__attn_fwd_choice_of<stx__attn_bf16, DP, BK, MT, 1>(p, 1)
               : stx__attn_fwd_choice_of<stx__attn_bf16, DP, BK, MT, 0>(p, 0);
}

/* A warp processes two strips, and thus a block 128 queries, if spans are long and the
   blocks still fill a large GPU: two blocks on each of 132 multiprocessors. The choice
   must not depend on the actual GPU. Where the oldest key cuts the window, tiles of 64
   and of 128 queries begin at different keys and sum in a different order, so results
   would differ between GPUs. */
enum { STX__ATTN_MIN_BLOCKS = 264 };

static stx__attn_fwd_choice stx__attn_fwd_choose(stx_ctx *x, const stx__attn_params *p, int half) {
    const stx_gpu *g = stx__gpu(x);
    int two = p->u.p || p->vb.p,
        many = (size_t)p->B * p->H * ((p->T + 127) / 128) >= STX__ATTN_MIN_BLOCKS;
    int wide = (p->span >= 512 && p->T >= 128 && many) || g->attention == 4;
    if (!half)
        return g->tf32 ? stx__attn_fwd_choose_float<stx__attn_tf32>(p, two)
                       : stx__attn_fwd_choose_float<stx__attn_f32>(p, two);
    if (p->D <= 32)
        return wide ? stx__attn_fwd_choose_bf16<32, 64, 2>(p, two)
                    : stx__attn_fwd_choose_bf16<32, 64, 1>(p, two);
    if (p->D <= 64)
        return wide ? stx__attn_fwd_choose_bf16<64, 64, 2>(p, two)
                    : stx__attn_fwd_choose_bf16<64, 64, 1>(p, two);
    return p->D <= 96 ? stx__attn_fwd_choose_bf16<96, 32, 1>(p, two)
                      : stx__attn_fwd_choose_bf16<128, 32, 1>(p, two);
}

/* Returns whether the fused kernels can run this call. Launches nothing. */
static int stx__attn_fused_can(const stx_ctx *x, const stx_attention_args *a) {
    stx__attn_params p;
    int half;
    return stx__attn_params_of(x, a, &p, &half)
           && stx__attn_fwd_choose((stx_ctx *)x, &p, half).shared <= stx__gpu(x)->shared_max
           && (size_t)p.B * p.H * ((size_t)p.T + 63) / 64 < ((size_t)1 << 31);
}

/* Returns the number of words in the work list for the smallest tiles, 64 queries
   each. */
static size_t stx__attn_fused_fwd_list(const stx_attention_args *a) {
    return a->H * ((a->T + 63) / 64);
}

static size_t stx__attn_fused_fwd_work(const stx_attention_args *a) {
    return (stx__attn_fused_fwd_list(a) + stx__attn_key_words(a) * stx__attn_key_word_rows(a))
           * sizeof(uint32_t);
}

static void stx__attn_fused_fwd(stx_ctx *x, const stx_attention_args *a) {
    stx__attn_params p;
    stx__attn_fwd_choice c;
    int half, n;
    if (!stx_ok(x) || !stx__attn_params_of(x, a, &p, &half)) return;
    c = stx__attn_fwd_choose(x, &p, half);
    n = p.H * c.tiles;
    stx__attn_make_key_mask(x, "stx_attention_fwd", a, &p,
                            (uint32_t *)a->work + stx__attn_fused_fwd_list(a));
    STX__RUN_KERNEL(x, "stx_attention_fwd", stx__attn_list_kernel,
                    stx__blocks((size_t)n, 128, (size_t)1 << 30), 128, 0, p, (uint32_t *)a->work,
                    c.tiles, c.bq, c.bk);
    STX__RUN_KERNEL(x, "stx_attention_fwd", c.run, (unsigned)n * (unsigned)p.B, 128, c.shared, p,
                    (const uint32_t *)a->work, c.tiles);
}


/* ---- src/cuda/attention_bwd_common.cuh ---- */
// >>attention: backward

/* Backward pass. For each query i and key j, the forward pass computed

       s = scale ((q + u).K_j + (q + vb).PE_p)      w = e^(s - row_max) inv_sum
       a = m w                                      y_i = O_i = sum over j of r a V_j

   where p is the table row for the distance from i to j, m the ramp weight of the span
   and r the dropout factor. The gradients are

       gamma = r dO.V_j        Dsum = dO.O        ds = a (gamma - Dsum)
       dV_j  += r a dO         dK_j  += scale ds (q + u)
       dQ_i  += scale ds (K_j + PE_p)             dPE_p += scale ds (q + vb)
       dz    += max_span / ramp  times the sum of w (gamma - Dsum) over all keys with
                0 <= m' <= 1, where m' is m before it is clamped

   ds is a matrix of queries by keys. Each gradient sums it in a different direction:

                 keys j                 dQ       along rows
               +---------------+        dK, dV   along columns
       queries | \   \   \      |        dPE      along diagonals, where j - i and
          i    |   \   \   \    |                 thus the table row are constant
               |     \   \   \  |
               +---------------+

   There are three sweeps. Each accumulates its sums in registers, so the order of every
   sum is fixed and no atomics are needed:

       queries     One block per query tile walks the key tiles. It computes dQ
                   and partial sums of du, dvb and dz.
       keys        One block per key tile walks the query tiles. It computes dK
                   and dV, or for persistent vectors partial sums of dpk and dpv.
       diagonals   One block per diagonal walks batch rows, heads and tiles. It computes
                   a partial sum of dPE for the heads that have no rows of dR.

   The partial sums are then added in a fixed order (stx__attn_bwd_fold,
   stx__attn_bwd_fold_diagonals). All sweeps recompute the logits, probabilities and ds of
   a tile in the same way (stx__attn_bwd_interior, stx__attn_bwd_edge_group). Their costs
   in units of one matmul per tile (2 BQ BK D flops), at BQ = BK = 64:

       queries     R 1.25   S 1   dP 1   ds K 1    dR PE 1.25      5.5
       keys        R 1.25   S 1   dP 1   dV 1      dK 1            5.25
       diagonals   R 1.25   S 1   dP 1   dPE 1.25                  4.5
       table       dPE 1                                           1

   Rows of dR. In bfloat16, most heads do not need the third sweep. The query sweep has
   dR in registers anyway. It stores dR, and multiplying the transpose of dR by q + vb
   gives dPE (stx__attn_bwd_table). This costs 1 unit instead of 4.5, plus 4 bytes of
   memory traffic per score. A row of dR has one column per distance that its head sees,
   rounded up to 16 columns. A head with a short span therefore uses little memory and
   multiplies few zeros, whereas its tiles in the third sweep would be half empty. At
   B = 64, T = 512 and span 8192, the rows of 8 heads would take 4 GB. Therefore
   STX__ATTN_BWD_DR_BYTES are distributed over the heads, the narrowest first
   (stx__attn_make_list), and heads without columns are processed by the third sweep.
   The third sweep is always launched, unless the memory suffices for all heads at full
   span. Calls with padded keys and calls in float always use the third sweep. Both
   methods round dR to bfloat16, so their results differ only by the order of the sums.

   - Column y of a row of dR is for the key with j - i = newest - width + y. newest is
     C - delta_min + 1, one more than j - i of the youngest key, plus up to 15, so that 16
     columns are one chunk of a strip.
   - A strip stores 16 rows by 16 columns at a time. Each thread stores four adjacent
     elements of a row, which permutes the columns: position 4t + k in memory is column
     2t + (k & 1) + 8 (k >> 1).
   - A tile yields BK + 16 columns. The last 16 are incomplete until the next tile has
     contributed to them; meanwhile they wait in shared memory.
   - Columns of keys before the first one and strips beyond T are neither stored nor read.

   The partial sums of dPE have the shape (diagonals or blocks of columns, tables, splits
   of the batch, rows, D). The number of splits is limited so that they take at most
   STX__ATTN_BWD_PART_BYTES.

   The skew. A warp owns a strip of 16 queries and uses BK + 16 table rows per tile: query
   r of the strip and key c of the tile use row c - r + 16 of these. Shuffles move the
   elements of R = (q + vb) PE^T to their keys in S (stx__attn_skew_block), and the
   reverse shuffles turn ds into dR (stx__attn_bwd_unskew). A tile uses PE_ROWS = BQ + BK
   table rows, its pe window; the rows of strip n begin at row BQ - 16 - 16 n of the
   window. The window is a ring of chunks of 16 rows, so that a step of a sweep loads only
   the BK or BQ rows that are new:

       pe window    0                    BQ                   BQ + BK
                    |--------------------|--------------------|
       strip 3      |=========================|                    BQ = BK = 64
       strip 2           |=========================|
       strip 1                |=========================|
       strip 0                     |=========================|

   The registers of a warp hold S and gamma, later r a and ds, (16,BK) each. The query
   sweep also keeps ds K and dR PE, (16,DP) each; the key sweep keeps dK and dV, 16 keys
   by DP / KEY_SPLIT columns each; the diagonal sweep keeps the gradient of
   PE_ROWS / PE_GROUPS table rows by DP / PE_SPLIT columns.

   The loads of one tile, all from L2, and the shared memory of a block (with prefetching
   of the next tile), at D = 64 in bfloat16:

       sweep       loads                                            MFLOP   shared memory
       ---------   ----------------------------------------------   -----   -------------
       queries     24 KiB: K, V, 64 table rows                      2.88    49 (73) KiB
       keys        24 KiB: q (twice with biases), dO, 64 rows       2.75    65 (89) KiB
       diagonals   32 KiB: q, dO, K, V                              2.36    65 (97) KiB

   Rows of dR add 2 KiB in the query sweep; u or vb adds 8 KiB in all sweeps. Registers
   allow two blocks on a multiprocessor with 64 Ki registers. With 228 KiB of shared
   memory, two blocks fit with prefetching in all three sweeps; with 164 KiB (sm_80),
   only in the query sweep, without u and vb.

   Order of sums. One thread sums each element of dQ over the tiles from old to young, and
   each element of dK and dV over the queries in ascending order. dPE, du, dvb, dz, dpk
   and dpv are sums of partial sums. The number of partial sums depends on sizes alone,
   and they are added in a fixed order. Prefetching does not change the order of any sum.
   Runs repeat bit-exactly. */

/* The parameters of the three sweeps, including those of the forward pass (p). */
typedef struct stx__attn_bwd_params {
    stx__attn_params p;
    const void *dy; /* (B,T,H D), same storage as y */
    stx__array dq, dk, dv;
    stx__array cached_dk[STX_HEAD_GROUPS], cached_dv[STX_HEAD_GROUPS]; /* gradients of
                                                                          cached rows */
    int overwrite;                                                   /* as in stx_attention_args */
    float *dsum;                                                     /* (B,H,T): dO.O */
    float *du, *dvb;               /* partial sums of the query sweep: (B * tiles,H D) */
    float *dz;                     /* partial sums of the query sweep: (B * tiles,H) */
    float *dpk, *dpv;              /* partial sums of the key sweep: (splits,H,N,D) */
    float *dpe;                    /* partial sums: (diagonals,tables,splits,PE_ROWS,D),
                                      or, if computed from rows of dR, (blocks,
                                      tables,splits,columns,D) */
    int *used;                     /* (diagonals or blocks,tables,splits): 1 if the partial
                                      sum was written */
    stx__bf16 *dr;                 /* rows of dR, or NULL. The rows of head h,
                                      (B,tiles * BQ,width), begin at element
                                      B * tiles * BQ * slot[h].at */
    const stx__attn_dr_slot *slot; /* (H), if there are rows of dR */
    int newest;                    /* j - i + 1 for the last column of a row of dR */
    int tiles;                     /* number of query tiles */
    int first;                     /* key sweep: first key of tile 0; diagonal sweep: first
                                      key minus first query in diagonal 0 */
    int splits;                    /* number of splits that the units are divided into; one
                                      partial sum per split */
    int units;                     /* number of units: batch rows, or (batch row, head)
                                      pairs if all heads share a table */
    int persistent;                /* 1 if the key sweep processes persistent vectors */
    int prefetch;                  /* 1 if shared memory has space for the next tile */
    float root_d, root_n;          /* sqrt(D), sqrt(N) */
} stx__attn_bwd_params;

/* Returns the unroll factor of a loop over `steps` steps of D. Longer loops are
   unrolled less, because the addresses of each step occupy registers. */
static constexpr __host__ __device__ int stx__attn_bwd_unroll(int steps) {
    if (steps > 8) return 1;
    return steps == 8 ? 4 : steps;
}

/* Returns the number of 16-byte pieces in a row of `bytes` bytes, rounded up to 8, 16
   or 32. */
static constexpr __host__ __device__ int stx__attn_bwd_dr_pieces(int bytes) {
    if (bytes > 256) return 32;
    return bytes > 128 ? 16 : 8;
}

/* The shape of a tile: BQ queries (one warp per strip of 16) by BK keys. Rows have DP
   elements. */
template <class Pr_, int DP_, int BQ_, int BK_> struct stx__attn_bwd_shape {
    typedef Pr_ Pr;

    enum {
        DP = DP_,
        BQ = BQ_,
        BK = BK_,
        STRIPS = BQ / 16,
        THREADS = 32 * STRIPS,
        PE_ROWS = BQ + BK, /* table rows that a tile uses */
        CHUNKS = PE_ROWS / 16,
        NB = BK / 8,
        SIZE = Pr_::SIZE,
        CH = DP * SIZE / 16,
        STEPS = DP / Pr_::K,
        UNROLL = stx__attn_bwd_unroll(STEPS),

        /* 16-byte pieces per row of r a or ds, and per row of dR */
        CH_DS = BK * SIZE / 16,
        CH_DR = stx__attn_bwd_dr_pieces((BK + 16) * SIZE),

        /* key sweep: a warp computes the sums for 16 keys and DP / KEY_SPLIT columns */
        KEY_SPLIT = STRIPS / (BK / 16),
        KEY_NB = DP / KEY_SPLIT / 8,

        /* diagonal sweep: a warp computes the sums for every PE_GROUPS-th chunk and DP
           / PE_SPLIT columns, which must be a multiple of 16 */
        PE_SPLIT = DP % (16 * STRIPS) ? 2 : STRIPS,
        PE_GROUPS = STRIPS / PE_SPLIT,
        PE_NB = DP / PE_SPLIT / 8,

        /* bytes of shared memory */
        TILE_Q = BQ * CH * 16,
        TILE_K = BK * CH * 16,
        TILE_PE = PE_ROWS * CH * 16,
        CHUNK = 16 * CH * 16,
        DISTANCES = BK + 16, /* a strip and a tile have BK + 15 distances */
        RAMPS = STRIPS * DISTANCES * 4,
        BIAS = DP * 4,

        /* Minimum numbers of blocks per multiprocessor, or 0 for none. In the query
           sweep, a minimum of 2 would make nvcc spill registers for wide heads. */
        QUERY_BLOCKS = DP == 32 ? (int)Pr::QUERY_BLOCKS_32 : 0,
        KEY_BLOCKS = DP == 32 ? (int)Pr::KEY_BLOCKS_32 : 2 * (THREADS == 128),
        DIAGONAL_BLOCKS = 3 * (DP == 32 && SIZE == 2),
        MASK = 1 /* 1 if missing keys are supported */
    };
};

/* Kernel shapes. Each kernel is compiled twice if MASKED_SIZES is not 0: once with
   support for missing keys, once for calls whose keys all exist. */
template <class Sh, int MASKED_SIZES> struct stx__attn_bwd_variants {
    typedef stx__attn_bwd_shape<typename Sh::Pr::masked, Sh::DP, Sh::BQ, Sh::BK> masked;

    struct unmasked : Sh {
        enum { MASK = 0 };
    };
};

template <class Sh> struct stx__attn_bwd_variants<Sh, 0> { typedef Sh masked, unmasked; };

/* The shared memory of a block. With prefetching, arrays that change from tile to tile
   have two buffers, so that the next tile is copied while the current one is processed.

       ramps | u vb | K V q dO | second buffers | q+vb | pe window (+ next) | exchange

   `ramps` holds the ramp weights of each warp, see "Edges". u and vb are the biases of
   the head, as floats. q becomes q + u in place; q + vb is stored separately if the
   positions use a different query than the keys. K and V change in the query sweep, q
   and dO in the key sweep, and all four in the diagonal sweep. For the next tile, the
   window has BK or BQ more rows; the window of a diagonal never changes. `exchange`
   holds data that warps pass to each other. */
enum { STX__MOVES_K = 1, STX__MOVES_Q = 2 };

template <class Sh> struct stx__attn_bwd_shared {
    unsigned char *q, *qv, *dy, *k, *v, *pe, *exchange;
    float *ramp; /* ramp weights of this warp */
    float *u, *vb;

    __device__ __forceinline__ stx__attn_bwd_shared(unsigned char *base, int moves, int prefetch,
                                                    int two, int rows) {
        ramp = (float *)base + (int)threadIdx.x / 32 * Sh::DISTANCES;
        u = (float *)(base + Sh::RAMPS);
        vb = u + Sh::DP;
        k = base + Sh::RAMPS + 2 * Sh::BIAS;
        v = k + Sh::TILE_K;
        q = v + Sh::TILE_K;
        dy = q + Sh::TILE_Q;
        qv = dy + Sh::TILE_Q + (prefetch ? moving_bytes(moves) : 0);
        pe = qv + (two ? Sh::TILE_Q : 0);
        if (!two) qv = q;
        exchange = pe + rows * Sh::CH * 16;
    }

    /* Returns the arrays of tile n. Arrays with two buffers alternate between them. */
    __device__ __forceinline__ stx__attn_bwd_shared(const stx__attn_bwd_shared &m, int moves,
                                                    int prefetch, int n) {
        int by = 0;
        if (prefetch && n & 1)
            by = moves == STX__MOVES_Q ? 2 * Sh::TILE_Q : 2 * (Sh::TILE_K + Sh::TILE_Q);
        *this = m;
        if (moves & STX__MOVES_K) {
            k += by;
            v += by;
        }
        if (moves & STX__MOVES_Q) {
            q += by;
            dy += by;
            if (m.qv == m.q) qv = q;
        }
    }

    static constexpr __host__ __device__ int moving_bytes(int moves) {
        return (moves & STX__MOVES_K ? 2 * Sh::TILE_K : 0)
               + (moves & STX__MOVES_Q ? 2 * Sh::TILE_Q : 0);
    }
};

/* Additional loaders of matmul operands. A step of k is Pr::K rows here.

       frag_acc    16 rows by Pr::K columns of an accumulator as a left factor. With
                   floats, k has the order 0 2 4 6 1 3 5 7, so that elements stay in
                   their lanes
       frag_rows   Pr::K rows from r0 by 16 columns from 8c as two right factors, with
                   the same order of k
       frag_cols   the same rows and columns, transposed, as a left factor */
static __device__ __forceinline__ void stx__attn_bwd_frag_acc(stx__attn_bf16, uint32_t (&a)[4],
                                                              const float (*c)[4], int step) {
    a[0] = stx__pair(c[2 * step][0], c[2 * step][1]);
    a[1] = stx__pair(c[2 * step][2], c[2 * step][3]);
    a[2] = stx__pair(c[2 * step + 1][0], c[2 * step + 1][1]);
    a[3] = stx__pair(c[2 * step + 1][2], c[2 * step + 1][3]);
}

template <class Pr>
static __device__ __forceinline__ void stx__attn_bwd_frag_acc(Pr, uint32_t (&a)[4],
                                                              const float (*c)[4], int step) {
    a[0] = __float_as_uint(c[step][0]);
    a[1] = __float_as_uint(c[step][2]);
    a[2] = __float_as_uint(c[step][1]);
    a[3] = __float_as_uint(c[step][3]);
}

template <int CH>
static __device__ __forceinline__ void stx__attn_bwd_frag_rows(stx__attn_bf16, uint32_t (&b)[4],
                                                               const unsigned char *tile, int r0,
                                                               int c,
                                                               int lane = (int)threadIdx.x & 31) {
    stx__attn_frag_v<CH>(b, tile, r0, c, lane);
}

template <int CH, class Pr>
static __device__ __forceinline__ void stx__attn_bwd_frag_rows(Pr, uint32_t (&b)[4],
                                                               const unsigned char *tile, int r0,
                                                               int c,
                                                               int lane = (int)threadIdx.x & 31) {
    int g = lane >> 2, t = lane & 3, e;
#pragma unroll
    for (e = 0; e < 4; e++)
        b[e] = *(const uint32_t *)(tile
                                   + stx__attn_swizzle<CH>(r0 + 2 * t + (e & 1),
                                                           2 * c + (e & 2) + (g >> 2))
                                   + (g & 3) * 4);
}

template <int CH>
static __device__ __forceinline__ void stx__attn_bwd_frag_cols(stx__attn_bf16, uint32_t (&a)[4],
                                                               const unsigned char *tile, int r0,
                                                               int c,
                                                               int lane = (int)threadIdx.x & 31) {
    stx__ldmatrix_x4_trans(a, tile
                                  + stx__attn_swizzle<CH>(r0 + (lane & 7) + (lane >> 4) * 8,
                                                          c + ((lane >> 3) & 1)));
}

template <int CH, class Pr>
static __device__ __forceinline__ void stx__attn_bwd_frag_cols(Pr, uint32_t (&a)[4],
                                                               const unsigned char *tile, int r0,
                                                               int c,
                                                               int lane = (int)threadIdx.x & 31) {
    int g = lane >> 2, t = lane & 3, e;
#pragma unroll
    for (e = 0; e < 4; e++)
        a[e] = *(const uint32_t *)(tile
                                   + stx__attn_swizzle<CH>(r0 + 2 * t + (e >> 1),
                                                           2 * c + (e & 1) * 2 + (g >> 2))
                                   + (g & 3) * 4);
}

/* Stores two adjacent elements in row r of a tile, in columns c and c + 1. c must be
   even. */
template <class Pr, int CH>
static __device__ __forceinline__ void stx__attn_bwd_put2(unsigned char *tile, int r, int c,
                                                          float x, float y) {
    int at = c * Pr::SIZE;
    stx__attn_store2((typename Pr::element *)(tile + stx__attn_swizzle<CH>(r, at / 16) + at % 16),
                     x, y);
}

template <int N> static __device__ __forceinline__ void stx__attn_bwd_clear(float (&c)[N][4]) {
    int n, e;
#pragma unroll
    for (n = 0; n < N; n++)
#pragma unroll
        for (e = 0; e < 4; e++) c[n][e] = 0;
}

static __device__ __forceinline__ void stx__attn_bwd_copy(float (&to)[4], const float (&from)[4]) {
    int e;
#pragma unroll
    for (e = 0; e < 4; e++) to[e] = from[e];
}

/* Adds `a` b^T to c (16,8 NB), where `a` consists of rows r0 .. r0+15 of the first
   tile, and b of the first 8 NB rows of the second. */
template <class Sh, int NB>
static __device__ __forceinline__ void stx__attn_bwd_dot(float (&c)[NB][4], const unsigned char *a,
                                                         int r0, const unsigned char *b,
                                                         int lane = (int)threadIdx.x & 31) {
    int k, n;
#pragma unroll(Sh::UNROLL)
    for (k = 0; k < Sh::STEPS; k++) {
        uint32_t f[4], h[4];
        stx__attn_frag_a<Sh::CH>(f, a, r0, k, lane);
#pragma unroll
        for (n = 0; n < NB; n += 2) {
            stx__attn_frag_b<Sh::CH>(h, b, n * 8, k, lane);
            Sh::Pr::mma2(c[n], c[n + 1], f, h);
        }
    }
}

/* Adds x (16,8 NB) times the first 8 NB rows of the tile to c (16,DP). x is an
   accumulator. Pr::add would be more accurate but takes too many registers. Here
   truncation does little harm: a row of ds sums to 0, so the errors have both signs. */
template <class Sh, int NB>
static __device__ __forceinline__ void stx__attn_bwd_times(float (&c)[Sh::DP / 8][4],
                                                           const float (&x)[NB][4],
                                                           const unsigned char *tile,
                                                           int lane = (int)threadIdx.x & 31) {
    typedef typename Sh::Pr Pr;
    int k, n;
#pragma unroll
    for (k = 0; k < NB * 8 / Pr::K; k++) {
        uint32_t f[4], h[4];
        stx__attn_bwd_frag_acc(Pr(), f, x, k);
#pragma unroll
        for (n = 0; n < Sh::DP / 8; n += 2) {
            stx__attn_bwd_frag_rows<Sh::CH>(Pr(), h, tile, k * Pr::K, n, lane);
            Pr::mma2(c[n], c[n + 1], f, h);
        }
    }
}

/* A strip of queries, and the key tile that it processes. */
typedef struct stx__attn_bwd_strip {
    int i, j0; /* i: first query of the strip; j0: first key or vector of the tile */
    int b, h;
    int max_delta;                         /* largest distance that contributes */
    int ring, chunks;                      /* `ring` is the ring chunk of the window's first row,
                                              `chunks` the number of chunks in the ring */
    int persistent;                        /* 1 if the tile holds persistent vectors */
    float row_max[2], inv_sum[2], dsum[2]; /* values for rows g and g + 8 (g = lane / 4); 0
                                              for rows beyond T */
} stx__attn_bwd_strip;

static __device__ __forceinline__ int stx__attn_bwd_wrap(int c, int chunks) {
    return c >= chunks ? c - chunks : c;
}

/* These functions return the byte offset, in the pe window, of the n-th chunk that a
   strip uses, and of the chunk after the one at offset `at`. */
template <class Sh>
static __device__ __forceinline__ int stx__attn_bwd_pe_chunk(const stx__attn_bwd_strip &t, int n) {
    return stx__attn_bwd_wrap(t.ring + Sh::STRIPS - 1 - (int)threadIdx.x / 32 + n, t.chunks)
           * Sh::CHUNK;
}

template <class Sh>
static __device__ __forceinline__ int stx__attn_bwd_pe_next(const stx__attn_bwd_strip &t, int at) {
    return stx__attn_bwd_wrap(at + Sh::CHUNK, t.chunks * Sh::CHUNK);
}

/* Sets the batch row and the head of a strip and loads the statistics of its rows. */
static __device__ __forceinline__ void stx__attn_bwd_load_stats(const stx__attn_bwd_params &a,
                                                                stx__attn_bwd_strip &t, int b,
                                                                int h) {
    int g = ((int)threadIdx.x & 31) >> 2, e;
    size_t row = ((size_t)b * a.p.H + h) * a.p.T;
    t.b = b;
    t.h = h;
#pragma unroll
    for (e = 0; e < 2; e++) {
        int i = t.i + g + 8 * e, yes = i < a.p.T;
        t.inv_sum[e] = yes ? a.p.inv_sum[row + i] : 0;
        t.row_max[e] = yes ? a.p.row_max[row + i] : 0;
        t.dsum[e] = yes ? a.dsum[row + i] : 0;
    }
}

/* Returns whether all queries of the strip see all keys of the tile with weight 1. */
template <class Sh>
static __device__ __forceinline__ int stx__attn_bwd_is_interior(const stx__attn_params &p,
                                                                const stx__attn_window &w,
                                                                const stx__attn_bwd_strip &t) {
    /* smallest and largest distance between the strip and the tile */
    const int min_delta = p.C + t.i - (t.j0 + Sh::BK - 1), max_delta = p.C + t.i + 15 - t.j0;
    return t.i < p.T
           && (t.persistent ? t.j0 >= 0 && t.j0 + Sh::BK <= p.N
                            : t.j0 >= p.first_key && min_delta >= p.delta_min
                                  && max_delta <= t.max_delta && max_delta < w.full);
}

/* A strip processes a tile in three steps: logits, probabilities, ds. The pe window, K,
   V and the strip's own rows of q, q + vb and dO must be in shared memory. Warps need
   not synchronise, because each one writes only its own ramp weights to shared memory.
   An interior tile is processed as a whole (stx__attn_bwd_interior), an edge tile in
   groups of 16 keys (stx__attn_bwd_edge_group). Both functions sum in the same order.

   stx__attn_bwd_positions computes 16 columns of (q + vb) PE^T, one chunk, and skews
   them into s0 and s1. The first chunk of a tile only prepares `turn` for the next one:
   its s0 and s1 are not used. */
template <class Sh>
static __device__ __forceinline__ void stx__attn_bwd_positions(
    const stx__attn_bwd_shared<Sh> &m, const unsigned char *pe, const stx__attn_skew_lanes &l,
    stx__attn_skew &turn, float (&s0)[4], float (&s1)[4], int lane = (int)threadIdx.x & 31) {
    float u[2][4];
    int k;
    stx__attn_bwd_clear(u);
#pragma unroll(Sh::UNROLL)
    for (k = 0; k < Sh::STEPS; k++) {
        uint32_t f[4], h[4];
        stx__attn_frag_a<Sh::CH>(f, m.qv, (int)threadIdx.x / 32 * 16, k, lane);
        stx__attn_frag_b<Sh::CH>(h, pe, 0, k, lane);
        Sh::Pr::mma2(u[0], u[1], f, h);
    }
    stx__attn_skew_block(turn, l, u[0], s0);
    stx__attn_skew_block(turn, l, u[1], s1);
}

static __device__ __forceinline__ void stx__attn_bwd_skew_clear(stx__attn_skew &turn) {
    int e;
#pragma unroll
    for (e = 0; e < 2; e++) turn.lo[e] = turn.hi[e] = turn.next[e] = 0;
}

/* Sets s to the logits of an interior tile before scaling. Skews the position logits
   into s, then accumulates (q + u) K^T, in the same order as the forward pass. With
   MASK_KEYS, the logits of missing keys become -inf. */
template <class Sh, int MASK_KEYS>
static __device__ __forceinline__ void stx__attn_bwd_logits(const stx__attn_bwd_params &a,
                                                            const stx__attn_bwd_shared<Sh> &m,
                                                            const stx__attn_bwd_strip &t,
                                                            float (&s)[Sh::NB][4]) {
    int n;
    if (a.p.P && !t.persistent) {
        const stx__attn_skew_lanes l = stx__attn_skew_lanes_of();
        stx__attn_skew turn;
        float none[2][4];
        int at = stx__attn_bwd_pe_chunk<Sh>(t, 0);
        stx__attn_bwd_skew_clear(turn);
        stx__attn_bwd_positions<Sh>(m, m.pe + at, l, turn, none[0], none[1]);
#pragma unroll
        for (n = 0; n < Sh::BK / 16; n++) {
            at = stx__attn_bwd_pe_next<Sh>(t, at);
            stx__attn_bwd_positions<Sh>(m, m.pe + at, l, turn, s[2 * n], s[2 * n + 1]);
        }
    } else {
        stx__attn_bwd_clear(s);
    }
    stx__attn_bwd_dot<Sh, Sh::NB>(s, m.q, (int)threadIdx.x / 32 * 16, m.k);
    if (MASK_KEYS && a.p.key_mask && !t.persistent) {
        const uint64_t seen = stx__attn_key_mask<Sh::BK>(a.p, t.b, t.j0);
        if (!stx__attn_all_exist<Sh::BK>(seen))
            stx__attn_set_missing(s, seen, (int)threadIdx.x & 3, -INFINITY);
    }
}

/* Replaces s with w = e^(s - row_max) inv_sum; stx__attn_bwd_ds applies the ramp
   weight. The logit of a key that a query does not see may be far above row_max, so the
   exponent is limited in edge tiles. */
template <class Sh, int EDGE, int NB>
static __device__ __forceinline__ void stx__attn_bwd_probabilities(const stx__attn_bwd_params &a,
                                                                   const stx__attn_bwd_strip &t,
                                                                   float (&s)[NB][4]) {
    /* scale logits for exponentials to base 2 (bfloat16) or e (float), bit-identically
       to the forward pass */
    const float unit = Sh::Pr::SIZE == 2 ? STX__LOG2E : 1;
    const float sc = (t.persistent ? a.p.scale * a.root_d : a.p.scale) * unit;
    int n, e;
#pragma unroll
    for (n = 0; n < NB; n++)
#pragma unroll
        for (e = 0; e < 4; e++) {
            /* a row without keys has row_max = -inf and inv_sum = 0 */
            float row_max = t.inv_sum[e >> 1] != 0 ? t.row_max[e >> 1] : 0,
                  x = fmaf(s[n][e], sc, -row_max * unit) * (STX__LOG2E / unit);
            s[n][e] = stx__exp2(EDGE ? fminf(x, 115.0f) : x) * t.inv_sum[e >> 1];
        }
}

/* Edges. The weight of a key depends on its distance from the query and on whether it
   exists. A strip and a tile have only BK + 15 distances, so a warp computes the weight
   of each distance in its band once, one to three per lane. Entry k of the table is for
   distance d + k, where d is the distance from the strip's first query to the tile's
   last key. The entry is m, or 0 if no query sees a key at that distance. Where the
   ramp is active, the sign bit is set (even of 0), and the key contributes to dz. */
template <class Sh>
static __device__ __forceinline__ void stx__attn_bwd_ramp_table(const stx__attn_bwd_params &a,
                                                                const stx__attn_window &w,
                                                                const stx__attn_bwd_strip &t,
                                                                const stx__attn_band &band,
                                                                float *ramp) {
    const int min_delta = a.p.C + t.i - (t.j0 + Sh::BK - 1), end = Sh::BK + 15 - 16 * band.lo;
    int k;
    __syncwarp();
    for (k = Sh::BK - 16 * band.hi + ((int)threadIdx.x & 31); k < end; k += 32) {
        const int delta = min_delta + k;
        float m = 1;
        if (!t.persistent && (delta < a.p.delta_min || delta > t.max_delta))
            m = 0;
        else if (!t.persistent && a.p.z.p && delta >= w.full) {
            float raw = stx__attn_ramp(a.p, w, delta);
            m = raw <= 0 ? 0 : fabsf(raw); /* NaN stays NaN */
            if (raw >= 1) m = 1;
            if (raw >= 0 && raw <= 1) m = -m;
        }
        ramp[k] = m;
    }
    __syncwarp();
}

/* On entry, g holds dO V^T and s holds w. On return, g holds ds and s holds r a, the
   weight of V in the forward pass. c0 is the column in the tile of the first key in s.
   With EDGE, keys on the ramp add their share of the span's gradient to dz. */
template <class Sh, int EDGE, int DROP, int NB>
static __device__ __forceinline__ void stx__attn_bwd_ds(const stx__attn_bwd_params &a,
                                                        const stx__attn_bwd_strip &t,
                                                        const float *ramp, int c0, uint32_t kept,
                                                        float (&s)[NB][4], float (&g)[NB][4],
                                                        float &dz,
                                                        int lane = (int)threadIdx.x & 31) {
    const int c2 = (lane & 3) * 2, j = t.j0 + c0 + c2;
    const int lo = (t.persistent ? 0 : a.p.first_key) - j,
              hi = (t.persistent ? a.p.N : INT_MAX / 2) - j;
    const float vf = t.persistent ? a.root_n * a.p.inv_keep : a.p.inv_keep;
    int n, e;
    ramp += Sh::BK - 1 + (lane >> 2) - c2 - c0;
#pragma unroll
    for (n = 0; n < NB; n++)
#pragma unroll
        for (e = 0; e < 4; e++) {
            const int c = 8 * n + (e & 1);
            const int yes = !DROP || (kept >> (4 * n + e) & 1);
            float d = fmaf(vf, yes ? g[n][e] : 0, -t.dsum[e >> 1]), x = s[n][e];
            if (EDGE) {
                float m = c >= lo && c < hi ? ramp[8 * (e >> 1) - c] : 0;
                if (__float_as_int(m) < 0) dz += x * d;
                /* m w <= 1, but w alone may overflow where m is 0 */
                x = m == 0 ? 0 : fabsf(m) * x;
            }
            s[n][e] = yes ? x * vf : 0;
            g[n][e] = x * d;
        }
}

template <class Sh>
static __device__ __forceinline__ uint32_t stx__attn_bwd_keep_mask(const stx__attn_bwd_params &a,
                                                                   const stx__attn_bwd_strip &t) {
    const stx__attn_params &p = a.p;
    if (!p.keep) return 0xffffffffu;
    return stx__attn_keep_mask<Sh::NB>(p, p.stream + *p.shift,
                                       ((uint64_t)t.b * p.H + t.h) * p.T + t.i,
                                       (t.persistent ? p.S : 0) + p.span + t.j0);
}

/* Processes an interior tile: sets s to r a and g to ds. */
template <class Sh, int MASK_KEYS>
static __device__ __forceinline__ void stx__attn_bwd_interior(const stx__attn_bwd_params &a,
                                                              const stx__attn_bwd_shared<Sh> &m,
                                                              const stx__attn_bwd_strip &t,
                                                              float (&s)[Sh::NB][4],
                                                              float (&g)[Sh::NB][4]) {
    uint32_t kept;
    float none = 0;
    int n, e;
    stx__attn_bwd_logits<Sh, MASK_KEYS>(a, m, t, s);
    stx__attn_bwd_clear(g);
    stx__attn_bwd_dot<Sh, Sh::NB>(g, m.dy, (int)threadIdx.x / 32 * 16, m.v);
    kept = stx__attn_bwd_keep_mask<Sh>(a, t);
    stx__attn_bwd_probabilities<Sh, 0, Sh::NB>(a, t, s);
    if (a.p.keep) {
        /* complete s before computing ds; otherwise nvcc interleaves so many elements
           that registers spill */
        if (Sh::DP == 32 && Sh::SIZE == 2)
#pragma unroll
            for (n = 0; n < Sh::NB; n++)
#pragma unroll
                for (e = 0; e < 4; e++)
                    s[n][e] = __uint_as_float(
                        (uint32_t)stx__attn_opaque((int)__float_as_uint(s[n][e])));
        stx__attn_bwd_ds<Sh, 0, 1, Sh::NB>(a, t, m.ramp, 0, kept, s, g, none);
    } else
        stx__attn_bwd_ds<Sh, 0, 0, Sh::NB>(a, t, m.ramp, 0, kept, s, g, none);
}

/* State that is passed from group to group of an edge tile. `lane` is the lane of the
   thread, hidden from the optimiser by stx__attn_opaque. */
typedef struct stx__attn_bwd_edge {
    stx__attn_band band;
    int lane;
    uint32_t kept;
    stx__attn_skew turn;
} stx__attn_bwd_edge;

/* Starts an edge tile. Returns whether the band of the strip covers the whole tile. */
template <class Sh>
static __device__ __forceinline__ int stx__attn_bwd_edge_begin(const stx__attn_bwd_params &a,
                                                               const stx__attn_window &w,
                                                               const stx__attn_bwd_shared<Sh> &m,
                                                               const stx__attn_bwd_strip &t,
                                                               stx__attn_bwd_edge &edge) {
    float none[2][4];
    edge.band = stx__attn_band_of<Sh::BK>(a.p, t.persistent, t.max_delta, t.i, t.j0);
    edge.lane = stx__attn_opaque((int)threadIdx.x & 31);
    if (edge.band.lo == edge.band.hi) return 0;
    stx__attn_bwd_ramp_table<Sh>(a, w, t, edge.band, m.ramp);
    edge.kept = stx__attn_bwd_keep_mask<Sh>(a, t);
    stx__attn_bwd_skew_clear(edge.turn);
    if (a.p.P && !t.persistent)
        stx__attn_bwd_positions<Sh>(m, m.pe + stx__attn_bwd_pe_chunk<Sh>(t, edge.band.lo),
                                    stx__attn_skew_lanes_of(edge.lane), edge.turn, none[0], none[1],
                                    edge.lane);
    return !edge.band.lo && edge.band.hi == Sh::BK / 16;
}

/* Processes group n of an edge tile: sets s to r a and g to ds, both 0 where a query
   does not see a key. With READDRESS, each group recomputes its addresses (a quarter
   more instructions), for shapes in which the addresses do not fit in registers. */
template <class Sh, int MASK_KEYS, int READDRESS>
static __device__ __forceinline__ void stx__attn_bwd_edge_group(
    const stx__attn_bwd_params &a, const stx__attn_bwd_shared<Sh> &m, const stx__attn_bwd_strip &t,
    stx__attn_bwd_edge &edge, int n, float (&s)[2][4], float (&g)[2][4], float &dz) {
    const int rows = (int)threadIdx.x / 32 * 16, at = n * Sh::CHUNK;
    if (READDRESS) edge.lane = stx__attn_opaque((int)threadIdx.x & 31);
    if (a.p.P && !t.persistent)
        stx__attn_bwd_positions<Sh>(m, m.pe + stx__attn_bwd_pe_chunk<Sh>(t, n + 1),
                                    stx__attn_skew_lanes_of(edge.lane), edge.turn, s[0], s[1],
                                    edge.lane);
    else
        stx__attn_bwd_clear(s);
    stx__attn_bwd_dot<Sh, 2>(s, m.q, rows, m.k + at, edge.lane);
    if (MASK_KEYS && a.p.key_mask && !t.persistent)
        stx__attn_set_missing(s, stx__attn_key_mask<Sh::BK>(a.p, t.b, t.j0) >> 16 * n,
                              edge.lane & 3, -INFINITY);
    stx__attn_bwd_clear(g);
    stx__attn_bwd_dot<Sh, 2>(g, m.dy, rows, m.v + at, edge.lane);
    stx__attn_bwd_probabilities<Sh, 1, 2>(a, t, s);
    stx__attn_bwd_ds<Sh, 1, 1, 2>(a, t, m.ramp, 16 * n, edge.kept >> 8 * n, s, g, dz, edge.lane);
}

/* Returns element e (in lanes with odd g, element 1 - e) of row g + 8 * half in a block
   of ds, or 0 outside the tile. */
template <int NB>
static __device__ __forceinline__ float stx__attn_bwd_unskew_cell(const float (&ds)[NB][4],
                                                                  int block, int half, int e,
                                                                  int odd) {
    const int n = block >= 0 && block < NB ? block : 0;
    if (block < 0 || block >= NB) return 0;
    return odd ? ds[n][2 * half + 1 - e] : ds[n][2 * half + e];
}

/* Computes block m of dR, 8 columns, from ds. This is the inverse of the skew:

       u[g][8m + 2t + e] = ds[g][8m + 2t + e + g - 16]

   With k = floor((g + e) / 2) and e' = e ^ (g & 1), the right-hand side is element e'
   of lane (t + k) mod 4 with the same g, in block m - 2, or in block m - 1 if t + k
   exceeds 3. For row g + 8, the block number is one higher. As in stx__attn_skew_block,
   each lane is the source of exactly one other lane and offers the element of the block
   that the other lane needs. Blocks outside the tile are 0: these corners of dR belong
   to no key. */
template <int NB>
static __device__ __forceinline__ void stx__attn_bwd_unskew(float (&u)[4], const float (&ds)[NB][4],
                                                            int m,
                                                            int lane = (int)threadIdx.x & 31) {
    int g = lane >> 2, t = lane & 3, odd = g & 1, e, half;
#pragma unroll
    for (e = 0; e < 2; e++) {
        int k = (g + e) >> 1;
#pragma unroll
        for (half = 0; half < 2; half++) {
            const float a = stx__attn_bwd_unskew_cell<NB>(ds, m - 2 + half, half, e, odd),
                        b = stx__attn_bwd_unskew_cell<NB>(ds, m - 1 + half, half, e, odd);
            u[2 * half + e] = __shfl_sync(STX__ALL, t >= k ? a : b, (t + k) & 3, 4);
        }
    }
}


/* ---- src/cuda/attention_bwd_queries.cuh ---- */
// >>attention: query sweep

/* The stx__attn_bwd_load functions start copies of q and dO, of K and V, or of table
   rows. All threads of the block must call these functions. The data is valid after the
   next cp_wait and barrier. */
template <class Sh>
static __device__ __forceinline__ void stx__attn_bwd_load_q(const stx__attn_bwd_params &a,
                                                            const stx__attn_bwd_shared<Sh> &m,
                                                            int i0, int b, int h) {
    const stx__attn_params &p = a.p;
    const char *q = (const char *)p.q + ((size_t)b * p.q_batch_stride + (size_t)h * p.D) * Sh::SIZE;
    const size_t ld = (size_t)p.H * p.D;
    stx__attn_load<Sh::CH, Sh::THREADS>(m.q, Sh::BQ, q, p.q_row_stride * Sh::SIZE, p.D * Sh::SIZE,
                                        i0, 0, p.T);
    stx__attn_load<Sh::CH, Sh::THREADS>(m.dy, Sh::BQ,
                                        (const char *)a.dy
                                            + ((size_t)b * p.T * ld + (size_t)h * p.D) * Sh::SIZE,
                                        ld * Sh::SIZE, p.D * Sh::SIZE, i0, 0, p.T);
}

/* Stores a bias of head h in shared memory, as DP floats. All threads of the block must
   call this function; the data is valid after the next barrier. */
template <class Sh>
static __device__ __forceinline__ void stx__attn_bwd_load_bias(const stx__attn_params &p,
                                                               float *to, const stx__array &bias,
                                                               int h) {
    int c;
    for (c = stx__attn_opaque((int)threadIdx.x); c < Sh::DP; c += Sh::THREADS)
        to[c] = bias.p && c < p.D ? stx__get(bias, (size_t)h * p.D + c) : 0;
}

template <class Sh>
static __device__ __forceinline__ void stx__attn_bwd_load_biases(const stx__attn_params &p,
                                                                 const stx__attn_bwd_shared<Sh> &m,
                                                                 int h) {
    if (!p.u.p && m.qv == m.q) return;
    stx__attn_bwd_load_bias<Sh>(p, m.u, p.u, h);
    stx__attn_bwd_load_bias<Sh>(p, m.vb, p.vb, h);
}

/* Stores the rows of `from` plus a bias in `to`, for the warp's strip of a tile that
   begins at query i0. Rows beyond T stay 0. */
template <class Sh>
static __device__ __forceinline__ void stx__attn_bwd_add_bias(const stx__attn_params &p,
                                                              unsigned char *to,
                                                              const unsigned char *from,
                                                              const float *bias, int i0) {
    enum { PER = 16 / Sh::SIZE, ACROSS = stx__attn_across(Sh::CH) };

    /* hidden, so that no addresses occupy registers throughout the sweep */
    const int thread = stx__attn_opaque((int)threadIdx.x), c = thread % ACROSS,
              first = thread / 32 * 16 + thread % 32 / ACROSS;
    float add[PER];
    int r, e;
    if (c >= Sh::CH) return;
#pragma unroll
    for (e = 0; e < PER; e += 4) {
        const float4 v = *(const float4 *)(bias + c * PER + e);
        add[e] = v.x;
        add[e + 1] = v.y;
        add[e + 2] = v.z;
        add[e + 3] = v.w;
    }
#pragma unroll 1
    for (r = first; r < first + 16; r += 32 / ACROSS) {
        const unsigned at = stx__attn_swizzle<Sh::CH>(r, c);
        const uint4 v = *(const uint4 *)(from + at);
        *(uint4 *)(to + at) = i0 + r < p.T ? stx__attn_add_bias(v, add) : v;
    }
}

/* Adds the biases to the rows of q in shared memory: stores q + vb in a separate tile and
   replaces q with q + u. Each warp processes its own strip. */
template <class Sh>
static __device__ __forceinline__ void stx__attn_bwd_add_biases(const stx__attn_params &p,
                                                                const stx__attn_bwd_shared<Sh> &m,
                                                                int i0) {
    if (!p.u.p && m.qv == m.q) return;
    if (m.qv != m.q) stx__attn_bwd_add_bias<Sh>(p, m.qv, m.q, m.vb, i0);
    if (p.u.p) stx__attn_bwd_add_bias<Sh>(p, m.q, m.q, m.u, i0);
    __syncwarp();
}

template <class Sh>
static __device__ __forceinline__ void stx__attn_bwd_load_kv(const stx__attn_bwd_params &a,
                                                             const stx__attn_bwd_shared<Sh> &m,
                                                             int j0, int b, int h, int persistent) {
    const stx__attn_params &p = a.p;
    if (persistent) {
        size_t o = (size_t)h * p.N * p.D * Sh::SIZE;
        stx__attn_load<Sh::CH, Sh::THREADS>(m.k, Sh::BK, (const char *)p.pk + o,
                                            (size_t)p.D * Sh::SIZE, p.D * Sh::SIZE, j0, 0, p.N);
        stx__attn_load<Sh::CH, Sh::THREADS>(m.v, Sh::BK, (const char *)p.pv + o,
                                            (size_t)p.D * Sh::SIZE, p.D * Sh::SIZE, j0, 0, p.N);
    } else {
        stx__attn_load_kv<Sh::CH, Sh::THREADS, Sh::SIZE>(p, m.k, m.v, Sh::BK, b, h, j0);
    }
}

/* Zeroes missing keys in K and V, which must be in shared memory, and then waits at a
   barrier. Does nothing if all keys exist. */
template <class Sh>
static __device__ __forceinline__ void stx__attn_bwd_zero_missing(const stx__attn_bwd_params &a,
                                                                  const stx__attn_bwd_shared<Sh> &m,
                                                                  int b, int j0) {
    const uint64_t seen = stx__attn_key_mask<Sh::BK>(a.p, b, j0);
    if (stx__attn_all_exist<Sh::BK>(seen)) return;
    stx__attn_zero_missing<Sh::CH, Sh::THREADS, Sh::BK>(m.k, seen);
    stx__attn_zero_missing<Sh::CH, Sh::THREADS, Sh::BK>(m.v, seen);
    __syncthreads();
}

/* Starts copies of rows `from` .. `from`+n-1 of the pe window. Row 0 of the window is
   table row p0 and is stored in chunk `ring`. No copy of BK rows wraps around the
   ring. */
template <class Sh>
static __device__ __forceinline__ void stx__attn_bwd_load_pe(const stx__attn_bwd_params &a,
                                                             const stx__attn_bwd_shared<Sh> &m,
                                                             const stx__attn_bwd_strip &t, int ring,
                                                             int p0, int h, int from, int n) {
    const stx__attn_params &p = a.p;
    const char *pe = (const char *)p.pe + (size_t)h * p.pe_head_stride * Sh::SIZE;
    int r;
    for (r = from; r < from + n; r += Sh::BK)
        stx__attn_load<Sh::CH, Sh::THREADS>(
            m.pe + stx__attn_bwd_wrap(ring + r / 16, t.chunks) * Sh::CHUNK, Sh::BK, pe,
            (size_t)p.pe_row_stride * Sh::SIZE, p.D * Sh::SIZE, p0 + r, 0, p.P);
}

/* Returns the number of table rows in shared memory: the rows of a tile, plus `next`
   rows with prefetching. */
template <class Sh>
static __device__ __forceinline__ int stx__attn_bwd_held(const stx__attn_bwd_params &a, int table,
                                                         int next) {
    if (!table) return 0;
    return Sh::PE_ROWS + (a.prefetch ? next : 0);
}

/* Returns the table row of row 0 of the pe window, for queries from i0 and keys from
   j0. */
template <class Sh>
static __device__ __forceinline__ int stx__attn_bwd_window_row(const stx__attn_params &p, int i0,
                                                               int j0) {
    return p.P - 1 + p.delta_min - p.C + j0 - i0 - Sh::BQ;
}

/* Sets elements i and i+1 to x and y or, with accumulate, adds x and y to them. */
static __device__ __forceinline__ void stx__attn_bwd_add2(const stx__array &to, size_t i, float x,
                                                          float y, int accumulate) {
    if (to.half && (uintptr_t)to.p % 4 == 0 && i % 2 == 0) {
        uint32_t *p = (uint32_t *)((stx__bf16 *)to.p + i);
        *p = stx__attn_add2(accumulate ? *p : 0, x, y);
    } else {
        stx__add(to, i, x, accumulate);
        stx__add(to, i + 1, y, accumulate);
    }
}

/* Processes those of the rows `row` .. `row`+15 that are in [lo,hi), starting at column
   d: sets them to f * c or, with accumulate, adds f * c to them. */
template <int NB>
static __device__ __forceinline__ void stx__attn_bwd_add_rows(const stx__array &to, size_t base,
                                                              size_t ld, int row, int lo, int hi,
                                                              int d, int D, const float (&c)[NB][4],
                                                              float f, int accumulate) {
    int lane = (int)threadIdx.x & 31, n, e;
#pragma unroll
    for (e = 0; e < 2; e++) {
        int i = row + (lane >> 2) + 8 * e;
        if (i < lo || i >= hi) continue;
#pragma unroll
        for (n = 0; n < NB; n++) {
            int at = d + 8 * n + (lane & 3) * 2;
            if (at < D)
                stx__attn_bwd_add2(to, base + (size_t)i * ld + at, f * c[n][2 * e],
                                   f * c[n][2 * e + 1], accumulate);
        }
    }
}

/* These functions return the gradient array of keys (or values), for the current block
   or for the cached rows of group g, and the bit of this array in `overwrite`. */
static __device__ __forceinline__ const stx__array &stx__attn_bwd_kv_grad(
    const stx__attn_bwd_params &a, int value, int is_cached, int g) {
    if (is_cached) return value ? a.cached_dv[g] : a.cached_dk[g];
    return value ? a.dv : a.dk;
}

static __device__ __forceinline__ int stx__attn_bwd_kv_bit(int value, int is_cached, int g) {
    if (is_cached) return STX_OVERWRITE_CACHED << g;
    return value ? STX_OVERWRITE_DV : STX_OVERWRITE_DK;
}

/* Like stx__attn_bwd_add_rows, for the gradients of keys (or values) `key` .. `key`+15
   of a head, current or cached. Keys that do not exist, or whose bit in `rows` is 0,
   have a gradient of 0. This 0 is stored if gradients are overwritten; otherwise the
   stored values are left unchanged. */
template <int NB>
static __device__ __forceinline__ void stx__attn_bwd_store_kv(const stx__attn_bwd_params &a,
                                                              int value, int b, int h, int key,
                                                              int d, const float (&c)[NB][4],
                                                              float f, uint32_t rows) {
    const stx__attn_params &p = a.p;
    const int lane = (int)threadIdx.x & 31, place = stx__attn_head_place(p, h),
              g = p.cached_rows ? place & 3 : 0;
    int n, e;
#pragma unroll
    for (e = 0; e < 2; e++) {
        const int j = key + (lane >> 2) + 8 * e, old = j < p.cached_rows,
                  yes = j >= p.first_key && (rows >> ((lane >> 2) + 8 * e) & 1);
        const stx__array to = stx__attn_bwd_kv_grad(a, value, old, g);
        const int fresh = a.overwrite & stx__attn_bwd_kv_bit(value, old, g);
        const size_t at = old ? (size_t)b * p.cached[g].batch_stride + (size_t)(place >> 2) * p.D
                                    + (size_t)(j - p.cached[g].first) * p.cached[g].row_stride
                              : (size_t)b * p.kv_batch_stride + (size_t)h * p.D
                                    + (size_t)(j - p.cached_rows) * p.kv_row_stride;
        if (j < 0 || j >= p.S || !to.p || (!yes && !fresh) || (old && j < p.cached[g].first))
            continue;
#pragma unroll
        for (n = 0; n < NB; n++) {
            const int i = d + 8 * n + (lane & 3) * 2;
            if (i < p.D)
                stx__attn_bwd_add2(to, at + i, yes ? f * c[n][2 * e] : 0,
                                   yes ? f * c[n][2 * e + 1] : 0, !fresh);
        }
    }
}

/* Like stx__attn_bwd_add_rows, for a partial sum, which is always overwritten. */
template <int NB>
static __device__ __forceinline__ void stx__attn_bwd_store_part(float *to, size_t ld, int row,
                                                                int lo, int hi, int d, int D,
                                                                const float (&c)[NB][4], float f) {
    int lane = (int)threadIdx.x & 31, n, e;
#pragma unroll
    for (e = 0; e < 2; e++) {
        int i = row + (lane >> 2) + 8 * e;
        if (i < lo || i >= hi) continue;
#pragma unroll
        for (n = 0; n < NB; n++) {
            int at = d + 8 * n + (lane & 3) * 2;
            if (at < D)
                *(float2 *)(to + (size_t)i * ld + at) = make_float2(f * c[n][2 * e],
                                                                    f * c[n][2 * e + 1]);
        }
    }
}

/* Prepares the sweeps. Computes dsum (B,H,T), the sum of dy y over D: 8 lanes per row, 32
   queries of a head per block of 256 threads. Each lane sums every 8th piece of 16 bytes,
   and the 8 lanes' sums are added in a fixed tree. The first l.blocks blocks create the
   list of query tiles instead; l.blocks is 0 if no list is required. */
typedef struct stx__attn_bwd_list {
    uint32_t *list;
    int tiles, bq, bk, newest, columns;
    stx__attn_dr_slot *place;
    unsigned blocks;
} stx__attn_bwd_list;

template <class E>
STX__GLOBAL(256)
stx__attn_bwd_prepare(stx__attn_params p, stx__attn_bwd_list l, const void *dy, float *dsum) {
    STX__SHARED(stx__attn_window, head, 256);

    enum { PER = 16 / sizeof(E) };

    const unsigned H = (unsigned)p.H, block = blockIdx.x - l.blocks,
                   tiles = (unsigned)(p.T + 31) / 32, row = block / tiles; /* row: b H + h */
    const int i = (int)(block % tiles * 32 + threadIdx.x / 8), part = (int)threadIdx.x & 7;
    const size_t at = (((size_t)(row / H) * p.T + i) * H + row % H) * p.D;
    float s = 0;
    int c, e;
    if (blockIdx.x < l.blocks) {
        stx__attn_make_list(p, l.list, l.tiles, l.bq, l.bk, l.place, l.newest, l.columns, head);
        return;
    }
    for (c = part * PER; i < p.T && c < p.D; c += 8 * PER) {
        const uint4 v = *(const uint4 *)((const E *)dy + at + c),
                    w = *(const uint4 *)((const E *)p.y + at + c);
        E x[PER], y[PER];
        memcpy(x, &v, 16);
        memcpy(y, &w, 16);
#pragma unroll
        for (e = 0; e < PER; e++) s += stx__attn_to_float(x[e]) * stx__attn_to_float(y[e]);
    }
    for (c = 4; c; c /= 2) s += __shfl_xor_sync(STX__ALL, s, c);
    if (!part && i < p.T) dsum[(size_t)row * p.T + i] = s;
}

/* How the three kernels walk their tiles. Each round has these steps:

       without prefetching   barrier (all warps have finished the previous tile), then
                             start the copies of this tile
       always                wait for the copies, then barrier (all threads' copies are
                             complete)
       with prefetching      start the copies of the next tile
       always                process this tile

   The next tile is prefetched if a.prefetch is set (shared memory suffices for it) and,
   where the pe window moves, if it is adjacent to this tile. Prefetching does not
   change results. */

/* Stores 16 columns of a strip's dR, packed as a left factor, in the strip's rows at
   `to`, starting at column y. Does nothing if column y is outside the head's `width`
   columns. */
static __device__ __forceinline__ void stx__attn_bwd_dr_store(stx__bf16 *to, int width, int y,
                                                              const uint4 &f) {
    const int lane = (int)threadIdx.x & 31;
    if (y < 0 || y >= width) return;
    to += (lane >> 2) * width + y + 4 * (lane & 3);
    *(uint2 *)to = make_uint2(f.x, f.z);
    *(uint2 *)(to + 8 * width) = make_uint2(f.y, f.w);
}

/* Stores chunk u of dR, which is in accumulators. The first chunk of a tile is combined
   with the pending chunk of the previous tile; each is zero where the other is not. The
   last chunk of a tile is not stored, but becomes the pending one (*wait). */
template <class Pr>
static __device__ __forceinline__ void stx__attn_bwd_dr_chunk(stx__bf16 *to, int width, int y,
                                                              const float (*u)[4], uint4 *wait,
                                                              int first, int last) {
    uint32_t f[4];
    stx__attn_bwd_frag_acc(Pr(), f, u, 0);
    uint4 v = make_uint4(f[0], f[1], f[2], f[3]);
    if (first) {
        const uint4 o = *wait;
        v.x |= o.x;
        v.y |= o.y;
        v.z |= o.z;
        v.w |= o.w;
    }
    if (last)
        *wait = v;
    else
        stx__attn_bwd_dr_store(to, width, y, v);
}

/* Starts the copies of a step: K, V, and rows `from` .. `from`+n-1 of the pe window. */
template <class Sh>
static __device__ __forceinline__ void stx__attn_bwd_query_fetch(const stx__attn_bwd_params &a,
                                                                 const stx__attn_bwd_shared<Sh> &m,
                                                                 const stx__attn_bwd_strip &t,
                                                                 int ring, int i0, int j0, int b,
                                                                 int h, int from, int n) {
    stx__attn_bwd_load_kv<Sh>(a, m, j0, b, h, 0);
    if (a.p.P > 0)
        stx__attn_bwd_load_pe<Sh>(a, m, t, ring, stx__attn_bwd_window_row<Sh>(a.p, i0, j0), h, from,
                                  n);
    stx__cp_commit();
}

/* Starts a block of queries. Sets the position and statistics of the strip, the range
   of keys [first,last) and the strip's rows of dR. Starts the first copies and waits
   for them. */
template <class Sh>
static __device__ __forceinline__ void stx__attn_bwd_query_open(
    const stx__attn_bwd_params &a, const stx__attn_window &w, const stx__attn_bwd_shared<Sh> &m,
    stx__attn_bwd_strip &t, int i0, int b, int h, int held, int &first, int &last, stx__bf16 *&rows,
    int &width, uint4 *wait) {
    const stx__attn_params &p = a.p;
    const int strip = (int)threadIdx.x / 32;
    stx__attn_window all = w;

    /* the key at which the ramp has just reached 0 contributes to dz */
    all.visible = w.farthest;
    stx__attn_key_range(p, all, i0, Sh::BQ, &first, &last);
    /* align chunks of 16 columns of dR the same way in all tiles */
    if (Sh::SIZE == 2 && first < last) first -= (first + p.span) & 8;
    if (Sh::MASK && p.key_mask) {
        last = min(last, p.S);
        while (first < last && !stx__attn_key_mask<Sh::BK>(p, b, first)) first += Sh::BK;
    }
    t.i = i0 + strip * 16;
    t.max_delta = w.farthest;
    t.ring = 0;
    t.chunks = held / 16;
    t.persistent = 0;
    if (Sh::SIZE == 2 && a.dr) {
        width = a.slot[h].width;
        if (width)
            rows = a.dr + (size_t)a.slot[h].at * p.B * (a.tiles * Sh::BQ)
                   + ((size_t)b * (a.tiles * Sh::BQ) + t.i) * width;
        *wait = make_uint4(0, 0, 0, 0);
    }
    stx__attn_bwd_load_stats(a, t, b, h);

    stx__attn_bwd_load_q<Sh>(a, m, i0, b, h);
    if (first < last)
        stx__attn_bwd_query_fetch<Sh>(a, m, t, 0, i0, first, b, h, 0, Sh::PE_ROWS);
    else
        stx__cp_commit();
    stx__attn_bwd_load_biases<Sh>(p, m, h);
    stx__cp_wait<0>();
    __syncthreads();
    stx__attn_bwd_add_biases<Sh>(p, m, i0);
}

/* Processes the persistent vectors: adds ds K to dk, the term of dQ that comes from
   keys. dk is in units of the scale of persistent keys. */
template <class Sh>
static __device__ __forceinline__ void stx__attn_bwd_query_vectors(
    const stx__attn_bwd_params &a, const stx__attn_window &w, const stx__attn_bwd_shared<Sh> &m,
    stx__attn_bwd_strip &t, stx__attn_bwd_edge &edge, float (&dk)[Sh::DP / 8][4], float &dz) {
    const stx__attn_params &p = a.p;
    int j0, step = 0, come = 0, n;
    t.persistent = 1;
    for (j0 = -((p.S + p.span) & 7); j0 < p.N; j0 += Sh::BK, step++) {
        const stx__attn_bwd_shared<Sh> now(m, STX__MOVES_K, a.prefetch, step),
            then(m, STX__MOVES_K, a.prefetch, step + 1);
        t.j0 = j0;
        if (!come) {
            __syncthreads();
            stx__attn_bwd_load_kv<Sh>(a, now, j0, t.b, t.h, 1);
            stx__cp_commit();
        }
        stx__cp_wait<0>();
        __syncthreads();
        come = a.prefetch && j0 + Sh::BK < p.N;
        if (come) {
            stx__attn_bwd_load_kv<Sh>(a, then, j0 + Sh::BK, t.b, t.h, 1);
            stx__cp_commit();
        }
        if (stx__attn_bwd_is_interior<Sh>(p, w, t)) {
            float s[Sh::NB][4], g[Sh::NB][4];
            stx__attn_bwd_interior<Sh, 0>(a, now, t, s, g);
            stx__attn_bwd_times<Sh, Sh::NB>(dk, g, now.k);
            continue;
        }
        stx__attn_bwd_edge_begin<Sh>(a, w, now, t, edge);
#pragma unroll 1
        for (n = edge.band.lo; n < edge.band.hi; n++) {
            float x[2][4], y[2][4];
            stx__attn_bwd_edge_group<Sh, 0, Sh::SIZE == 4 || Sh::DP != 64>(a, now, t, edge, n, x, y,
                                                                           dz);
            stx__attn_bwd_times<Sh, 2>(dk, y, now.k + n * Sh::CHUNK, edge.lane);
        }
    }
}

/* Computes the block's partial sums of du, dvb and dz. Sums over the queries of a strip
   by shuffles, then over the strips in order. `red` is scratch memory for (STRIPS,2,DP)
   floats, then for (STRIPS) floats. */
template <class Sh>
static __device__ __forceinline__ void stx__attn_bwd_query_sums(const stx__attn_bwd_params &a,
                                                                float *red, int i0, int b, int h,
                                                                const float (&dk)[Sh::DP / 8][4],
                                                                const float (&dp)[Sh::DP / 8][4],
                                                                float dz) {
    const stx__attn_params &p = a.p;
    const int strip = (int)threadIdx.x / 32, lane = (int)threadIdx.x & 31;
    const size_t part = (size_t)b * a.tiles + (size_t)i0 / Sh::BQ, columns = (size_t)p.H * p.D;
    int n, e, k;
#pragma unroll
    for (n = 0; n < Sh::DP / 8; n++)
#pragma unroll
        for (e = 0; e < 2; e++) {
            float x = dk[n][e] + dk[n][e + 2], y = dp[n][e] + dp[n][e + 2];
            for (k = 4; k < 32; k *= 2) {
                x += __shfl_xor_sync(STX__ALL, x, k);
                y += __shfl_xor_sync(STX__ALL, y, k);
            }
            if (lane < 4) {
                red[2 * strip * Sh::DP + 8 * n + 2 * lane + e] = x;
                red[(2 * strip + 1) * Sh::DP + 8 * n + 2 * lane + e] = y;
            }
        }
    dz = stx__warp_sum(dz);
    if (!lane) red[2 * Sh::STRIPS * Sh::DP + strip] = dz;
    __syncthreads();
    for (k = (int)threadIdx.x; k < p.D; k += Sh::THREADS) {
        float x = 0, y = 0;
        for (n = 0; n < Sh::STRIPS; n++) {
            x += red[2 * n * Sh::DP + k];
            y += red[(2 * n + 1) * Sh::DP + k];
        }
        if (a.du) a.du[part * columns + (size_t)h * p.D + k] = x;
        if (a.dvb) a.dvb[part * columns + (size_t)h * p.D + k] = y;
    }
    if (a.dz && !threadIdx.x) {
        for (dz = 0, n = 0; n < Sh::STRIPS; n++) dz += red[2 * Sh::STRIPS * Sh::DP + n];
        a.dz[part * p.H + h] = dz;
    }
    __syncthreads(); /* the persistent keys are loaded into the same memory */
}

/* The query sweep. A block processes BQ queries of one head and one batch row, 16 per
   warp. It walks the keys in the order of the forward pass; the longest blocks start
   first (stx__attn_make_list). The two terms of dQ, dk = ds K and dp = dR PE, are kept
   in separate registers, because their sums over the queries are du and dvb.

       for each tile:  wait for K, V and the BK new rows of the table
                       compute r a and ds in registers
                       dk += ds K;  dp += dR PE;  store dR if the head has rows
                       (an edge tile does this for each group of 16 keys in the band)

   Warps exchange no data: accumulators of ds become left factors directly, or skewed by
   shuffles. Two blocks fit on a multiprocessor, so one computes while the other waits.
   The persistent vectors follow; they use q without u and have no positions. The launch
   bound is one warp per strip and QUERY_BLOCKS blocks per multiprocessor. */
template <class Sh>
STX__GLOBAL(Sh::THREADS, (int)Sh::QUERY_BLOCKS)
stx__attn_bwd_queries(stx__attn_bwd_params a, const uint32_t *list) {
    STX__DYNAMIC(shared);
    const stx__attn_params &p = a.p;
    const int b = (int)(blockIdx.x % (unsigned)p.B), entry = (int)list[blockIdx.x / (unsigned)p.B],
              h = entry / a.tiles, i0 = entry % a.tiles * Sh::BQ;
    const int strip = (int)threadIdx.x / 32, table = p.P > 0;
    const int held = stx__attn_bwd_held<Sh>(a, table, Sh::BK);
    const stx__attn_bwd_shared<Sh> m(shared, STX__MOVES_K, a.prefetch, table && (p.u.p || p.vb.p),
                                     held);
    const stx__attn_window w = stx__attn_window_of(p, h);
    stx__attn_bwd_strip t;
    stx__attn_bwd_edge edge;
    float dk[Sh::DP / 8][4], dp[Sh::DP / 8][4], s[Sh::NB][4], g[Sh::NB][4], dz = 0;
    int first, last, j0, next, step = 0, come, n, e;
    /* `rows` points to the strip's rows of dR, or is NULL. `waits` is the column of the
       chunk in *wait */
    uint4 *wait = (uint4 *)m.exchange + threadIdx.x;
    stx__bf16 *rows = NULL;
    int width = 0, waits = -1;

    stx__attn_bwd_query_open<Sh>(a, w, m, t, i0, b, h, held, first, last, rows, width, wait);
    stx__attn_bwd_clear(dk);
    stx__attn_bwd_clear(dp);

    for (j0 = first, come = 1; j0 < last; j0 = next, step++) {
        const stx__attn_bwd_shared<Sh> now(m, STX__MOVES_K, a.prefetch, step),
            then(m, STX__MOVES_K, a.prefetch, step + 1);
        /* valid only if the next tile is adjacent */
        const int ring = stx__attn_bwd_wrap(t.ring + Sh::BK / 16, t.chunks);
        t.j0 = j0;
        if (!come) {
            /* after tiles without keys, the whole pe window must be loaded */
            const int gap = Sh::MASK && p.key_mask
                            && !stx__attn_key_mask<Sh::BK>(p, b, j0 - Sh::BK);
            __syncthreads();
            stx__attn_bwd_query_fetch<Sh>(a, now, t, t.ring, i0, j0, b, h, gap ? 0 : Sh::BQ,
                                          gap ? Sh::PE_ROWS : Sh::BK);
        }
        next = j0 + Sh::BK;
        if (Sh::MASK && p.key_mask)
            while (next < last && !stx__attn_key_mask<Sh::BK>(p, b, next)) next += Sh::BK;
        stx__cp_wait<0>();
        __syncthreads();
        if (Sh::MASK && p.key_mask) stx__attn_bwd_zero_missing<Sh>(a, now, b, j0);
        come = a.prefetch && next < last && (next == j0 + Sh::BK || !table);
        if (come) stx__attn_bwd_query_fetch<Sh>(a, then, t, ring, i0, next, b, h, Sh::BQ, Sh::BK);
        if (Sh::BK > 16 && stx__attn_bwd_is_interior<Sh>(p, w, t)) {
            stx__attn_bwd_interior<Sh, Sh::MASK>(a, now, t, s, g);
            stx__attn_bwd_times<Sh, Sh::NB>(dk, g, now.k);
            int at = stx__attn_bwd_pe_chunk<Sh>(t, 0);
#pragma unroll
            for (n = 0; n < (table ? Sh::BK / 16 + 1 : 0); n++) {
                float u[2][4];
                stx__attn_bwd_unskew<Sh::NB>(u[0], g, 2 * n);
                stx__attn_bwd_unskew<Sh::NB>(u[1], g, 2 * n + 1);
                stx__attn_bwd_times<Sh, 2>(dp, u, m.pe + at);
                at = stx__attn_bwd_pe_next<Sh>(t, at);
                if (Sh::SIZE == 2 && rows) {
                    waits = j0 - t.i + 16 * n - 16 - (a.newest - width);
                    stx__attn_bwd_dr_chunk<typename Sh::Pr>(rows, width, waits, u, wait, !n,
                                                            n == Sh::BK / 16);
                }
            }
        } else {
            float two[4][4]; /* ds of the previous group and of this one */
            stx__attn_bwd_edge_begin<Sh>(a, w, now, t, edge);
            stx__attn_bwd_clear(two);
            const int end = edge.band.hi + (table && edge.band.lo < edge.band.hi);
#pragma unroll 1
            for (n = edge.band.lo; n < end; n++) {
                float x[2][4], y[2][4];
                stx__attn_bwd_clear(y);
                if (n < edge.band.hi) {
                    stx__attn_bwd_edge_group<Sh, Sh::MASK, Sh::SIZE == 4 || Sh::DP != 64>(a, now, t,
                                                                                          edge, n,
                                                                                          x, y, dz);
                    stx__attn_bwd_times<Sh, 2>(dk, y, now.k + n * Sh::CHUNK, edge.lane);
                }
                if (!table) continue;
                stx__attn_bwd_copy(two[2], y[0]);
                stx__attn_bwd_copy(two[3], y[1]);
                stx__attn_bwd_unskew<4>(x[0], two, 2, edge.lane);
                stx__attn_bwd_unskew<4>(x[1], two, 3, edge.lane);
                stx__attn_bwd_copy(two[0], y[0]);
                stx__attn_bwd_copy(two[1], y[1]);
                stx__attn_bwd_times<Sh, 2>(dp, x, m.pe + stx__attn_bwd_pe_chunk<Sh>(t, n),
                                           edge.lane);
                if (Sh::SIZE == 2 && rows) {
                    waits = j0 - t.i + 16 * n - 16 - (a.newest - width);
                    stx__attn_bwd_dr_chunk<typename Sh::Pr>(rows, width, waits, x, wait,
                                                            n == edge.band.lo, n == edge.band.hi);
                }
            }
        }
        t.ring = ring;
    }
    if (Sh::SIZE == 2 && rows) stx__attn_bwd_dr_store(rows, width, waits, *wait);
    __syncthreads();
    if (a.du || a.dvb || a.dz) stx__attn_bwd_query_sums<Sh>(a, (float *)m.k, i0, b, h, dk, dp, dz);
#pragma unroll
    for (n = 0; n < Sh::DP / 8; n++)
#pragma unroll
        for (e = 0; e < 4; e++) dk[n][e] += dp[n][e];

    /* so far dk is unscaled; from here on it is in units of the scale of persistent
       keys */
    if (p.N && a.dq.p) {
#pragma unroll
        for (n = 0; n < Sh::DP / 8; n++)
#pragma unroll
            for (e = 0; e < 4; e++) dk[n][e] /= a.root_d;
        /* needs no barrier, because a warp reads only its own rows */
        if (p.u.p) {
            stx__array none = {NULL, NULL, 0};
            stx__attn_load_query<typename Sh::Pr, Sh::CH>(p, m.q, strip * 16, 16, i0, b, h, none);
        }
        stx__attn_bwd_query_vectors<Sh>(a, w, m, t, edge, dk, dz);
    }
    if (a.dq.p)
        stx__attn_bwd_add_rows(a.dq, (size_t)b * p.q_batch_stride + (size_t)h * p.D, p.q_row_stride,
                               t.i, 0, p.T, 0, p.D, dk, p.N ? p.scale * a.root_d : p.scale,
                               !(a.overwrite & STX_OVERWRITE_DQ));
}


/* ---- src/cuda/attention_bwd_keys.cuh ---- */
// >>attention: key sweep

/* Stores r a or ds of a strip in shared memory, starting at key c of the tile. */
template <class Sh, int NB>
static __device__ __forceinline__ void stx__attn_bwd_put_scores(unsigned char *tile,
                                                                const float (&x)[NB][4], int c,
                                                                int lane = (int)threadIdx.x & 31) {
    typedef typename Sh::Pr Pr;
    const int r = (int)threadIdx.x / 32 * 16 + (lane >> 2), c2 = c + (lane & 3) * 2;
    int n;
#pragma unroll
    for (n = 0; n < NB; n++) {
        stx__attn_bwd_put2<Pr, Sh::CH_DS>(tile, r, 8 * n + c2, x[n][0], x[n][1]);
        stx__attn_bwd_put2<Pr, Sh::CH_DS>(tile, r + 8, 8 * n + c2, x[n][2], x[n][3]);
    }
}

/* Adds (r a)^T dO to dV and ds^T (q + u) to dK, for queries k .. k+Pr::K-1 of the
   tile. */
template <class Sh>
static __device__ __forceinline__ void stx__attn_bwd_key_sums(
    float (&dk)[Sh::KEY_NB][4], float (&dv)[Sh::KEY_NB][4], const unsigned char *wa,
    const unsigned char *wg, const stx__attn_bwd_shared<Sh> &m, int k, int group, int column,
    int lane = (int)threadIdx.x & 31) {
    typedef typename Sh::Pr Pr;
    uint32_t fa[4], fg[4], x[4];
    int n;
    stx__attn_bwd_frag_cols<Sh::CH_DS>(Pr(), fa, wa, k, 2 * group, lane);
    stx__attn_bwd_frag_cols<Sh::CH_DS>(Pr(), fg, wg, k, 2 * group, lane);
#pragma unroll
    for (n = 0; n < Sh::KEY_NB; n += 2) {
        stx__attn_bwd_frag_rows<Sh::CH>(Pr(), x, m.dy, k, column + n, lane);
        Pr::add(dv[n], fa, x[0], x[1]);
        Pr::add(dv[n + 1], fa, x[2], x[3]);
        stx__attn_bwd_frag_rows<Sh::CH>(Pr(), x, m.q, k, column + n, lane);
        Pr::add(dk[n], fg, x[0], x[1]);
        Pr::add(dk[n + 1], fg, x[2], x[3]);
    }
}

/* Starts copies of the query tile that begins at i0, and of the BQ new table rows. */
template <class Sh>
static __device__ __forceinline__ void stx__attn_bwd_load_q_pe(const stx__attn_bwd_params &a,
                                                               const stx__attn_bwd_shared<Sh> &m,
                                                               const stx__attn_bwd_strip &t,
                                                               int ring, int i0, int b, int h,
                                                               int table) {
    stx__attn_bwd_load_q<Sh>(a, m, i0, b, h);
    if (table)
        stx__attn_bwd_load_pe<Sh>(a, m, t, ring, stx__attn_bwd_window_row<Sh>(a.p, i0, t.j0), h, 0,
                                  Sh::BQ);
    stx__cp_commit();
}

/* Phase 1 of a tile in the key sweep: a warp stores r a and ds of its strip in shared
   memory. Returns whether the strip's band covers the whole tile. */
template <class Sh>
static __device__ __forceinline__ int stx__attn_bwd_key_scores(
    const stx__attn_bwd_params &a, const stx__attn_window &w, const stx__attn_bwd_shared<Sh> &m,
    const stx__attn_bwd_strip &t, stx__attn_bwd_edge &edge, unsigned char *wa, unsigned char *wg) {
    float dz = 0;
    int all, n;
    if (stx__attn_bwd_is_interior<Sh>(a.p, w, t)) {
        float s[Sh::NB][4], g[Sh::NB][4];
        stx__attn_bwd_interior<Sh, 0>(a, m, t, s, g);
        stx__attn_bwd_put_scores<Sh, Sh::NB>(wa, s, 0);
        stx__attn_bwd_put_scores<Sh, Sh::NB>(wg, g, 0);
        return 1;
    }
    all = stx__attn_bwd_edge_begin<Sh>(a, w, m, t, edge);
#pragma unroll 1
    for (n = edge.band.lo; n < edge.band.hi; n++) {
        float x[2][4], y[2][4];
        stx__attn_bwd_edge_group<Sh, 0, Sh::SIZE == 4>(a, m, t, edge, n, x, y, dz);
        stx__attn_bwd_put_scores<Sh, 2>(wa, x, 16 * n, edge.lane);
        stx__attn_bwd_put_scores<Sh, 2>(wg, y, 16 * n, edge.lane);
    }
    return all;
}

/* Phase 2: adds (r a)^T dO to dV and ds^T (q + u) to dK, for the warp's keys and
   columns. `all` is 1 if the band of every strip covers the whole tile. */
template <class Sh>
static __device__ __forceinline__ void stx__attn_bwd_key_tile_sums(
    const stx__attn_bwd_params &a, const stx__attn_bwd_shared<Sh> &m, const stx__attn_bwd_strip &t,
    int i0, float (&dk)[Sh::KEY_NB][4], float (&dv)[Sh::KEY_NB][4], const unsigned char *wa,
    const unsigned char *wg, int group, int column, int all) {
    typedef typename Sh::Pr Pr;
    int n, k;
    /* float elements use the loop below: the sums take so long that the overhead of the
       loop does not matter */
    if (all && Sh::SIZE == 2) {
#pragma unroll
        for (k = 0; k < Sh::BQ; k += Pr::K)
            stx__attn_bwd_key_sums<Sh>(dk, dv, wa, wg, m, k, group, column);
        return;
    }
    /* skip strips whose bands do not include the warp's keys, because these strips have
       stored nothing for these keys */
#pragma unroll 1
    for (n = 0; n < Sh::BQ; n += 16) {
        const stx__attn_band band = stx__attn_band_of<Sh::BK>(a.p, t.persistent, t.max_delta,
                                                              i0 + n, t.j0);
        const int again = stx__attn_opaque((int)threadIdx.x & 31);
        if (!all && (group < band.lo || group >= band.hi)) continue;
#pragma unroll
        for (k = 0; k < 16; k += Pr::K)
            stx__attn_bwd_key_sums<Sh>(dk, dv, wa, wg, m, n + k, group, column, again);
    }
}

/* Adds the results of a block to the gradients, or stores them as partial sums of dpk
   and dpv. `group` is the index of the warp's 16 keys, and `column` is the warp's first
   column of D. */
template <class Sh>
static __device__ __forceinline__ void stx__attn_bwd_key_store(const stx__attn_bwd_params &a, int z,
                                                               int h, int j0, int group, int column,
                                                               const float (&dk)[Sh::KEY_NB][4],
                                                               const float (&dv)[Sh::KEY_NB][4]) {
    const stx__attn_params &p = a.p;
    const int row = j0 + group * 16;
    uint32_t rows = ~0u;
    if (a.persistent) {
        size_t o = ((size_t)z * p.H + h) * p.N * p.D;
        if (a.dpk)
            stx__attn_bwd_store_part(a.dpk + o, p.D, row, 0, p.N, column, p.D, dk,
                                     p.scale * a.root_d);
        if (a.dpv) stx__attn_bwd_store_part(a.dpv + o, p.D, row, 0, p.N, column, p.D, dv, 1.0f);
        return;
    }
    /* the sums of missing keys are not gradients and are discarded */
    if (Sh::MASK && p.key_mask)
        rows = (uint32_t)(stx__attn_key_mask<Sh::BK>(p, z, j0) >> group * 16);
    stx__attn_bwd_store_kv(a, 0, z, h, row, column, dk, p.scale, rows);
    stx__attn_bwd_store_kv(a, 1, z, h, row, column, dv, 1.0f, rows);
}

/* Walks the queries lo .. hi-1 of batch rows b0 .. b1-1 and adds their contributions to
   dk and dv. */
template <class Sh>
static __device__ __forceinline__ void stx__attn_bwd_key_walk(
    const stx__attn_bwd_params &a, const stx__attn_window &w, const stx__attn_bwd_shared<Sh> &m,
    stx__attn_bwd_strip &t, int h, int b0, int b1, int lo, int hi, float (&dk)[Sh::KEY_NB][4],
    float (&dv)[Sh::KEY_NB][4], int group, int column) {
    const int table = a.p.P > 0 && !a.persistent;
    unsigned char *wa = m.exchange, *wg = wa + Sh::BQ * Sh::CH_DS * 16;
    stx__attn_bwd_edge edge;
    int b, i0, step, come, all;
    for (b = b0, i0 = lo, step = come = 0; b < b1; step++) {
        const stx__attn_bwd_shared<Sh> now(m, STX__MOVES_Q, a.prefetch, step),
            then(m, STX__MOVES_Q, a.prefetch, step + 1);
        const int ring = stx__attn_bwd_wrap(t.ring + t.chunks - Sh::BQ / 16, t.chunks),
                  end = i0 + Sh::BQ >= hi, next = end ? lo : i0 + Sh::BQ;
        if (!come) {
            __syncthreads();
            stx__attn_bwd_load_q_pe<Sh>(a, now, t, t.ring, i0, b, h, table);
        }
        t.i = i0 + (int)threadIdx.x / 32 * 16;
        stx__attn_bwd_load_stats(a, t, b, h);
        stx__cp_wait<0>();
        __syncthreads();
        if (!a.persistent) stx__attn_bwd_add_biases<Sh>(a.p, now, i0);
        come = a.prefetch && b + end < b1;
        if (come) stx__attn_bwd_load_q_pe<Sh>(a, then, t, ring, next, b + end, h, table);
        all = stx__attn_bwd_key_scores<Sh>(a, w, now, t, edge, wa, wg);
        all = __syncthreads_and(all);
        stx__attn_bwd_key_tile_sums<Sh>(a, now, t, i0, dk, dv, wa, wg, group, column, all);
        t.ring = ring;
        i0 = next;
        b += end;
    }
}

/* Stores zeros as the gradients of a block's keys if gradients are overwritten. */
template <class Sh>
static __device__ __forceinline__ void stx__attn_bwd_key_zeros(const stx__attn_bwd_params &a, int z,
                                                               int h, int j0, int group,
                                                               int column) {
    float none[Sh::KEY_NB][4];
    stx__attn_bwd_clear(none);
    stx__attn_bwd_store_kv(a, 0, z, h, j0 + group * 16, column, none, 0.0f, 0);
    stx__attn_bwd_store_kv(a, 1, z, h, j0 + group * 16, column, none, 0.0f, 0);
}

/* The key sweep. A block processes BK keys of one head and one batch row, and walks the
   query tiles that see any of them. In phase 1, each warp computes the scores of a
   strip of queries. dK and dV are sums over queries, so r a and ds pass through shared
   memory. In phase 2, each warp reads them as transposed left factors for 16 keys, and
   for part of the columns if there are more warps.

       for each tile:  wait for q, dO and the BQ new rows of the table
                       store r a and ds in shared memory                        phase 1
                       barrier, which also tests whether all bands cover the tile
                       dV += (r a)^T dO;  dK += ds^T (q + u)                    phase 2
                       (using only strips whose bands include the warp's keys)

   The pe window moves down by BQ rows per tile. For persistent vectors, a block also
   walks its split of the batch, and its results are partial sums of dpk and dpv. The
   launch bound is one warp per strip and KEY_BLOCKS blocks per multiprocessor. */
template <class Sh>
STX__GLOBAL(Sh::THREADS, (int)Sh::KEY_BLOCKS)
stx__attn_bwd_keys(stx__attn_bwd_params a) {
    STX__DYNAMIC(shared);
    const stx__attn_params &p = a.p;
    const int strip = (int)threadIdx.x / 32;
    const int h = (int)blockIdx.y, z = (int)blockIdx.z, j0 = a.first + (int)blockIdx.x * Sh::BK,
              table = p.P > 0 && !a.persistent;
    const int b0 = a.persistent ? (int)((int64_t)p.B * z / a.splits) : z,
              b1 = a.persistent ? (int)((int64_t)p.B * (z + 1) / a.splits) : z + 1;
    /* index of the warp's 16 keys, and its first column in units of 8 */
    const int group = strip % (Sh::BK / 16),
              column = Sh::KEY_SPLIT == 1 ? 0 : strip / (Sh::BK / 16) * Sh::KEY_NB;
    const int held = stx__attn_bwd_held<Sh>(a, table, Sh::BQ);
    const stx__attn_bwd_shared<Sh> m(shared, STX__MOVES_Q, a.prefetch, table && (p.u.p || p.vb.p),
                                     held);
    const stx__attn_window w = stx__attn_window_of(p, h);
    stx__attn_bwd_strip t;
    float dk[Sh::KEY_NB][4], dv[Sh::KEY_NB][4];
    int lo = 0, hi = p.T;

    stx__attn_bwd_clear(dk);
    stx__attn_bwd_clear(dv);
    if (!a.persistent) {
        lo = max(0, j0 + p.delta_min - p.C);
        hi = min(p.T, j0 + Sh::BK + w.visible - p.C);
        /* no query sees these keys, so their gradients are 0 */
        if (lo >= hi || (Sh::MASK && p.key_mask && !stx__attn_key_mask<Sh::BK>(p, z, j0))) {
            stx__attn_bwd_key_zeros<Sh>(a, z, h, j0, group, column * 8);
            return;
        }
    }
    t.j0 = j0;
    t.max_delta = w.visible;
    t.ring = 0;
    t.chunks = held / 16;
    t.persistent = a.persistent;
    stx__attn_bwd_load_biases<Sh>(p, m, h);
    stx__attn_bwd_load_kv<Sh>(a, m, j0, b0, h, a.persistent);
    if (table)
        stx__attn_bwd_load_pe<Sh>(a, m, t, 0, stx__attn_bwd_window_row<Sh>(p, lo, j0), h, Sh::BQ,
                                  Sh::BK);

    stx__attn_bwd_key_walk<Sh>(a, w, m, t, h, b0, b1, lo, hi, dk, dv, group, column);
    stx__attn_bwd_key_store<Sh>(a, z, h, j0, group, column * 8, dk, dv);
}


/* ---- src/cuda/attention_bwd_diagonals.cuh ---- */
// >>attention: diagonal sweep

/* Advances b and i0, the batch row and the first query of a tile, to the diagonal's next
   tile that has keys, among queries lo .. hi-1. Sets b to `end` if there is none. */
template <class Sh>
static __device__ __forceinline__ void stx__attn_bwd_next_tile(const stx__attn_params &p, int &b,
                                                               int &i0, int end, int lo, int hi,
                                                               int off) {
    do {
        i0 += Sh::BQ;
        if (i0 >= hi) {
            i0 = lo;
            b++;
        }
    } while (Sh::MASK && p.key_mask && b < end && !stx__attn_key_mask<Sh::BK>(p, b, i0 + off));
}

/* Adds dR^T (q + vb) of a strip to dPE. Chunks `first` to `last` of the strip's dR must
   be in shared memory. */
template <class Sh, int XS>
static __device__ __forceinline__ void stx__attn_bwd_pe_sums(float (&acc)[XS][Sh::PE_NB][4],
                                                             const unsigned char *dr,
                                                             const unsigned char *q, int strip,
                                                             int group, int column, int first,
                                                             int last) {
    typedef typename Sh::Pr Pr;
    int k, n, x;
#pragma unroll
    for (k = 0; k < 16; k += Pr::K) {
        uint32_t f[4], y[(Sh::PE_NB + 1) / 2][4];
#pragma unroll
        for (n = 0; n < Sh::PE_NB; n += 2)
            stx__attn_bwd_frag_rows<Sh::CH>(Pr(), y[n / 2], q, strip * 16 + k, column + n);
#pragma unroll
        for (x = 0; x < XS; x++) {
            /* index among the (BK + 16) / 16 chunks of the strip */
            const int chunk = x * Sh::PE_GROUPS + group - (Sh::STRIPS - 1 - strip);
            if ((unsigned)(chunk - first) > (unsigned)(last - first)) continue;
            stx__attn_bwd_frag_cols<Sh::CH_DR>(Pr(), f, dr, strip * 16 + k, 2 * chunk);
#pragma unroll
            for (n = 0; n < Sh::PE_NB; n += 2) {
                Pr::add(acc[x][n], f, y[n / 2][0], y[n / 2][1]);
                Pr::add(acc[x][n + 1], f, y[n / 2][2], y[n / 2][3]);
            }
        }
    }
}

/* Stores 8 columns of the strip's dR in shared memory, starting at column c. */
template <class Sh>
static __device__ __forceinline__ void stx__attn_bwd_put_dr(unsigned char *dr, int c,
                                                            const float (&u)[4]) {
    typedef typename Sh::Pr Pr;
    const int strip = (int)threadIdx.x / 32, lane = (int)threadIdx.x & 31,
              r = strip * 16 + (lane >> 2), c2 = c + (lane & 3) * 2;
    stx__attn_bwd_put2<Pr, Sh::CH_DR>(dr, r, c2, u[0], u[1]);
    stx__attn_bwd_put2<Pr, Sh::CH_DR>(dr, r + 8, c2, u[2], u[3]);
}

/* Phase 1 of a tile in the diagonal sweep: a warp stores dR of its strip in shared
   memory. Returns whether the strip's band covers the whole tile. */
template <class Sh>
static __device__ __forceinline__ int stx__attn_bwd_diagonal_dr(const stx__attn_bwd_params &a,
                                                                const stx__attn_window &w,
                                                                const stx__attn_bwd_shared<Sh> &m,
                                                                const stx__attn_bwd_strip &t,
                                                                stx__attn_bwd_edge &edge) {
    const stx__attn_params &p = a.p;
    const int lane = (int)threadIdx.x & 31;
    float dz = 0;
    int all, n, k;
    if (stx__attn_bwd_is_interior<Sh>(p, w, t)) {
        float s[Sh::NB][4], g[Sh::NB][4];
        stx__attn_bwd_interior<Sh, 0>(a, m, t, s, g);
        if (Sh::MASK && p.key_mask) {
            const uint64_t seen = stx__attn_key_mask<Sh::BK>(p, t.b, t.j0);
            if (!stx__attn_all_exist<Sh::BK>(seen)) stx__attn_set_missing(g, seen, lane & 3, 0);
        }
#pragma unroll
        for (n = 0; n < Sh::NB + 2; n++) {
            float u[4];
            stx__attn_bwd_unskew<Sh::NB>(u, g, n);
            stx__attn_bwd_put_dr<Sh>(m.exchange, 8 * n, u);
        }
        return 1;
    }
    float two[4][4];
    all = stx__attn_bwd_edge_begin<Sh>(a, w, m, t, edge);
    stx__attn_bwd_clear(two);
    const int last = edge.band.hi + (edge.band.lo < edge.band.hi);
#pragma unroll 1
    for (n = edge.band.lo; n < last; n++) {
        float u[2][4], v[2][4];
        stx__attn_bwd_clear(v);
        if (n < edge.band.hi) {
            stx__attn_bwd_edge_group<Sh, 0, 1>(a, m, t, edge, n, u, v, dz);
            if (Sh::MASK && p.key_mask)
                stx__attn_set_missing(v, stx__attn_key_mask<Sh::BK>(p, t.b, t.j0) >> 16 * n,
                                      lane & 3, 0);
        }
        stx__attn_bwd_copy(two[2], v[0]);
        stx__attn_bwd_copy(two[3], v[1]);
#pragma unroll
        for (k = 0; k < 2; k++) {
            stx__attn_bwd_unskew<4>(u[k], two, 2 + k, edge.lane);
            stx__attn_bwd_put_dr<Sh>(m.exchange, 16 * n + 8 * k, u[k]);
        }
        stx__attn_bwd_copy(two[0], v[0]);
        stx__attn_bwd_copy(two[1], v[1]);
    }
    return all;
}

/* Phase 2: adds dR^T (q + vb) to dPE. `all` is 1 if the band of every strip covers the
   whole tile. */
template <class Sh, int XS>
static __device__ __forceinline__ void stx__attn_bwd_diagonal_sums(
    const stx__attn_bwd_params &a, const stx__attn_bwd_shared<Sh> &m, const stx__attn_bwd_strip &t,
    int i0, float (&acc)[XS][Sh::PE_NB][4], int group, int column, int all) {
    int i;
    if (all) {
#pragma unroll(Sh::DP > 64 || Sh::SIZE == 4 ? 1 : (int)Sh::STRIPS)
        for (i = 0; i < Sh::STRIPS; i++)
            stx__attn_bwd_pe_sums<Sh, XS>(acc, m.exchange, m.qv, i, group, column, 0, Sh::BK / 16);
        return;
    }
#pragma unroll 1
    for (i = 0; i < Sh::STRIPS; i++) {
        const stx__attn_band band = stx__attn_band_of<Sh::BK>(a.p, 0, t.max_delta, i0 + 16 * i,
                                                              t.j0);
        if (band.lo < band.hi)
            stx__attn_bwd_pe_sums<Sh, XS>(acc, m.exchange, m.qv, i, group, column, band.lo,
                                          band.hi);
    }
}

/* Processes the tiles of a diagonal for head h, batch rows b .. stop-1 and queries lo
   .. hi-1. `off` is the first key of a tile minus its first query. `used` is set to 1
   at the block's first tile, for which the pe window is loaded. */
template <class Sh, int XS>
static __device__ __forceinline__ void stx__attn_bwd_diagonal_head(
    const stx__attn_bwd_params &a, const stx__attn_window &w, const stx__attn_bwd_shared<Sh> &m,
    stx__attn_bwd_strip &t, stx__attn_bwd_edge &edge, int h, int b, int stop, int lo, int hi,
    int off, float (&acc)[XS][Sh::PE_NB][4], int group, int column, int &step, int &come,
    int &used) {
    enum { MOVES = STX__MOVES_K | STX__MOVES_Q };

    const stx__attn_params &p = a.p;
    int i0 = lo, all;
    if (Sh::MASK && p.key_mask && !stx__attn_key_mask<Sh::BK>(p, b, i0 + off))
        stx__attn_bwd_next_tile<Sh>(p, b, i0, stop, lo, hi, off);
    while (b < stop) {
        const stx__attn_bwd_shared<Sh> now(m, MOVES, a.prefetch, step),
            then(m, MOVES, a.prefetch, step + 1);
        const int i1 = i0, b1 = b, j0 = i0 + off;
        stx__attn_bwd_next_tile<Sh>(p, b, i0, stop, lo, hi, off);
        if (!come) {
            __syncthreads();
            if (!used)
                stx__attn_bwd_load_pe<Sh>(a, m, t, 0, stx__attn_bwd_window_row<Sh>(p, i1, j0), h, 0,
                                          Sh::PE_ROWS);
            stx__attn_bwd_load_kv<Sh>(a, now, j0, b1, h, 0);
            stx__attn_bwd_load_q<Sh>(a, now, i1, b1, h);
            stx__cp_commit();
        }
        used = 1;
        t.i = i1 + (int)threadIdx.x / 32 * 16;
        t.j0 = j0;
        stx__attn_bwd_load_stats(a, t, b1, h);
        /* in every tile: loading them once per head takes more registers. The barrier
           after phase 1 of the previous tile follows the last use of the old ones */
        stx__attn_bwd_load_biases<Sh>(p, m, h);
        stx__cp_wait<0>();
        __syncthreads();
        stx__attn_bwd_add_biases<Sh>(p, now, i1);
        come = a.prefetch && b < stop;
        if (come) {
            stx__attn_bwd_load_kv<Sh>(a, then, i0 + off, b, h, 0);
            stx__attn_bwd_load_q<Sh>(a, then, i0, b, h);
            stx__cp_commit();
        }
        step++;
        all = stx__attn_bwd_diagonal_dr<Sh>(a, w, now, t, edge);
        all = __syncthreads_and(all);
        stx__attn_bwd_diagonal_sums<Sh, XS>(a, now, t, i1, acc, group, column, all);
    }
}

/* The diagonal sweep. Diagonal n has the tiles (i0, j0 = i0 + first - BK n) for all i0;
   together the diagonals contain every element once. All tiles of a diagonal use the
   same pe window, which stays in shared memory, and the gradient of its PE_ROWS rows
   stays in registers. Row u of the window is table row P - 1 + extra - BK (n + 1) + u,
   where extra = first + delta_min - C - BQ + BK is the amount by which `first` was
   rounded up for dropout.

       for each tile:  wait for K, V, q and dO
                       store dR of each strip, BK + 16 columns, in shared memory  phase 1
                       barrier, which also tests whether all bands cover the tile
                       dPE += dR^T (q + vb): each warp sums its columns of D      phase 2
                       for every PE_GROUPS-th chunk of the window

   A block walks its split of the batch or, if all heads share a table, of heads and
   batch. It stores a partial sum, (PE_ROWS,D) floats, for stx__attn_bwd_fold_diagonals.
   A block without tiles only stores used = 0. The launch bound is one warp per strip and
   DIAGONAL_BLOCKS blocks per multiprocessor. */
template <class Sh>
STX__GLOBAL(Sh::THREADS, (int)Sh::DIAGONAL_BLOCKS)
stx__attn_bwd_diagonals(stx__attn_bwd_params a) {
    STX__DYNAMIC(shared);
    const stx__attn_params &p = a.p;

    enum { XS = Sh::CHUNKS / Sh::PE_GROUPS, MOVES = STX__MOVES_K | STX__MOVES_Q };

    const int strip = (int)threadIdx.x / 32, diagonal = (int)blockIdx.x, own = p.pe_head_stride > 0,
              split = (int)blockIdx.z, off = a.first - Sh::BK * diagonal;
    const int c0 = (int)((int64_t)a.units * split / a.splits),
              c1 = (int)((int64_t)a.units * (split + 1) / a.splits);
    const int group = Sh::PE_GROUPS == 1 ? 0 : strip / Sh::PE_SPLIT,
              column = strip % Sh::PE_SPLIT * Sh::PE_NB;
    /* smallest distance in a tile: from query 0 to key BK - 1 */
    const int nearest = p.C - off - (Sh::BK - 1);
    /* queries whose tiles have a key */
    const int lo = max(0, p.first_key - off - Sh::BK + Sh::BQ) / Sh::BQ * Sh::BQ,
              hi = min(p.T, p.S - off);
    const size_t part = ((size_t)diagonal * gridDim.y + blockIdx.y) * a.splits + split;
    const stx__attn_bwd_shared<Sh> m(shared, MOVES, a.prefetch, p.u.p || p.vb.p, Sh::PE_ROWS);
    stx__attn_bwd_strip t;
    stx__attn_bwd_edge edge;
    float acc[XS][Sh::PE_NB][4];
    int c, end, x, step = 0, come = 0, used = 0;

    t.ring = 0;
    t.chunks = Sh::CHUNKS;
    t.persistent = 0;
#pragma unroll
    for (x = 0; x < XS; x++) stx__attn_bwd_clear(acc[x]);
    /* one head per iteration, with its batch rows in this split */
    for (c = c0; c < c1 && lo < hi; c = end) {
        const int h = own ? (int)blockIdx.y : c / p.B, b = own ? c : c % p.B;
        const stx__attn_window w = stx__attn_window_of(p, h);
        end = own ? c1 : min(c1, (h + 1) * p.B);
        if (nearest > w.visible || (Sh::SIZE == 2 && a.dr && a.slot[h].width)) continue;
        t.max_delta = w.visible;
        stx__attn_bwd_diagonal_head<Sh, XS>(a, w, m, t, edge, h, b, b + end - c, lo, hi, off, acc,
                                            group, column, step, come, used);
    }
    if (!threadIdx.x) a.used[part] = used;
    if (used)
#pragma unroll
        for (x = 0; x < XS; x++)
            stx__attn_bwd_store_part(a.dpe + part * Sh::PE_ROWS * p.D, p.D,
                                     (x * Sh::PE_GROUPS + group) * 16, 0, Sh::PE_ROWS, column * 8,
                                     p.D, acc[x], p.scale);
}

/* Computes dPE from rows of dR: dPE += dR^T (q + vb). A block sums COLUMNS columns,
   counted from the newest; a warp sums 16 XS of them over all of D. The block walks its
   split of heads and batch rows, BQ queries per step, and copies the data of the next
   step while it processes the current one. Elements of dR that were not stored are
   loaded as 0. Heads without columns in the block are skipped. The partial sums are
   stored like those of the diagonal sweep, with one row per column of dR. */
template <class Sh> struct stx__attn_bwd_table_shape {
    enum {
        COLUMNS = Sh::DP > 64 ? 64 : 128,
        CH = COLUMNS / 8,
        XS = COLUMNS / 16 / Sh::STRIPS,
        TILE = Sh::BQ * CH * 16,
        HALF = TILE + Sh::TILE_Q, /* the data of one step */
        SHARED = 2 * HALF + Sh::BIAS
    };

    static_assert((int)SHARED <= (int)STX__SHARED_LEAST,
                  "SHARED exceeds the shared memory of some GPUs");
};

/* Starts the copies of a step: rows of q, and COLUMNS columns of dR that end `back`
   columns before the newest. */
template <class Sh>
static __device__ __forceinline__ void stx__attn_bwd_table_load(const stx__attn_bwd_params &a,
                                                                unsigned char *tile,
                                                                const stx__attn_dr_slot &f, int b,
                                                                int h, int i0, int back) {
    typedef stx__attn_bwd_table_shape<Sh> X;
    const stx__attn_params &p = a.p;
    const int c = (int)threadIdx.x % X::CH, y = f.width - back - X::COLUMNS + 8 * c,
              max_delta = (y & ~15) + a.newest - f.width,
              /* the first key at which the query sweep can begin */
        lo = ((p.first_key + p.span) & ~15) - p.span;
    const size_t T = (size_t)a.tiles * Sh::BQ;
    const stx__bf16 *from = a.dr + (size_t)f.at * p.B * T + ((size_t)b * T + i0) * f.width + y;
    const int some = y >= 0 && p.C + min(i0 + Sh::BQ, p.T) - p.delta_min > p.first_key;
    int k;
#pragma unroll
    /* each iteration loads 8 or 16 rows of one strip */
    for (k = 0; k < Sh::BQ; k += Sh::THREADS / X::CH) {
        const int r = (int)threadIdx.x / X::CH + k, i = i0 + (k & ~15),
                  yes = some && i < p.T && max_delta + i + 16 >= lo
                        && p.C + i + 15 - lo >= p.delta_min;
        stx__cp16(tile + stx__attn_swizzle<X::CH>(r, c), yes ? from + (size_t)r * f.width : a.dr,
                  yes ? 16 : 0);
    }
    stx__attn_load<Sh::CH, Sh::THREADS>(tile + X::TILE, Sh::BQ,
                                        (const char *)p.q
                                            + ((size_t)b * p.q_batch_stride + (size_t)h * p.D)
                                                  * Sh::SIZE,
                                        p.q_row_stride * Sh::SIZE, p.D * Sh::SIZE, i0, 0, p.T);
    stx__cp_commit();
}

/* Adds dR^T (q + vb) of one step to dPE, for the warp's 16 XS columns. */
template <class Sh, int XS>
static __device__ __forceinline__ void stx__attn_bwd_table_sums(float (&acc)[XS][Sh::DP / 8][4],
                                                                const unsigned char *dr,
                                                                const unsigned char *q) {
    typedef typename Sh::Pr Pr;
    const int warp = (int)threadIdx.x / 32;
    int k, n, x;
#pragma unroll
    for (k = 0; k < Sh::BQ; k += Pr::K) {
        uint32_t l[XS][4], y[4];
#pragma unroll
        for (x = 0; x < XS; x++)
            stx__attn_bwd_frag_cols<stx__attn_bwd_table_shape<Sh>::CH>(Pr(), l[x], dr, k,
                                                                       2 * (warp * XS + x));
#pragma unroll
        for (n = 0; n < Sh::DP / 8; n += 2) {
            stx__attn_bwd_frag_rows<Sh::CH>(Pr(), y, q, k, n);
#pragma unroll
            for (x = 0; x < XS; x++) Pr::mma2(acc[x][n], acc[x][n + 1], l[x], y);
        }
    }
}

template <class Sh> STX__GLOBAL(Sh::THREADS) stx__attn_bwd_table(stx__attn_bwd_params a) {
    typedef stx__attn_bwd_table_shape<Sh> X;
    STX__DYNAMIC(shared);
    const stx__attn_params &p = a.p;
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x & 31,
              own = p.pe_head_stride > 0, split = (int)blockIdx.z,
              back = (int)blockIdx.x * X::COLUMNS;
    const int c0 = (int)((int64_t)a.units * split / a.splits),
              c1 = (int)((int64_t)a.units * (split + 1) / a.splits);
    const int lo = max(0, p.first_key - (a.newest - 1 - back)) / Sh::BQ * Sh::BQ,
              steps = max(0, p.T - lo + Sh::BQ - 1) / Sh::BQ;
    const size_t part = ((size_t)blockIdx.x * gridDim.y + blockIdx.y) * a.splits + split;
    float *vb = (float *)(shared + 2 * X::HALF);
    float acc[X::XS][Sh::DP / 8][4];
    int c, end, used = 0, s, n, x, e;

#pragma unroll
    for (x = 0; x < X::XS; x++) stx__attn_bwd_clear(acc[x]);
    /* one head per iteration, with its batch rows in this split */
    for (c = c0; c < c1; c = end) {
        const int h = own ? (int)blockIdx.y : c / p.B, b = own ? c : c % p.B;
        const stx__attn_dr_slot f = a.slot[h];
        end = own ? c1 : min(c1, (h + 1) * p.B);
        if (back >= f.width || !steps) continue;
        __syncthreads();
        if (p.vb.p) stx__attn_bwd_load_bias<Sh>(p, vb, p.vb, h);
        stx__attn_bwd_table_load<Sh>(a, shared, f, b, h, lo, back);
        for (s = 0; s < (end - c) * steps; s++) {
            unsigned char *dr = shared + (s & 1) * X::HALF, *q = dr + X::TILE;
            stx__cp_wait<0>();
            __syncthreads();
            if (s + 1 < (end - c) * steps)
                stx__attn_bwd_table_load<Sh>(a, shared + ((s + 1) & 1) * X::HALF, f,
                                             b + (s + 1) / steps, h, lo + (s + 1) % steps * Sh::BQ,
                                             back);
            if (p.vb.p) {
                stx__attn_bwd_add_bias<Sh>(p, q, q, vb, lo + s % steps * Sh::BQ);
                __syncthreads();
            }
            stx__attn_bwd_table_sums<Sh, X::XS>(acc, dr, q);
        }
        used = 1;
    }
    if (!threadIdx.x) a.used[part] = used;
    if (!used) return;
#pragma unroll
    for (x = 0; x < X::XS; x++)
#pragma unroll
        for (e = 0; e < 2; e++) { /* converts positions in memory to columns */
            const int at = (lane >> 2) + 8 * e,
                      column = (warp * X::XS + x) * 16 + (at >> 2) * 2 + (at & 1) + (at & 2) * 4;
            float *to = a.dpe + (part * X::COLUMNS + column) * p.D + (lane & 3) * 2;
#pragma unroll
            for (n = 0; n < Sh::DP / 8; n++)
                if (8 * n < p.D)
                    *(float2 *)(to + 8 * n) = make_float2(p.scale * acc[x][n][2 * e],
                                                          p.scale * acc[x][n][2 * e + 1]);
        }
}

/* Adds to each row of dpe (P,tables D) the partial sums of the diagonals whose windows
   include the row. Sums in ascending order of diagonals and, for each diagonal, of
   splits. One thread per element. */
STX__GLOBAL(256)
stx__attn_bwd_fold_diagonals(stx__array dpe, const float *part, const int *used, int P, int tables,
                             int D, int pe_rows, int BK, int extra, int diagonals, int splits) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x, columns = (size_t)tables * D;
    /* the row is row u of the window of diagonal n: u = BK * (n + 1) - from */
    int row = (int)(i / columns), d = (int)(i % D), own = (int)(i / D % tables),
        from = P - 1 - row + extra, n, s;
    float sum = 0;
    if (i >= (size_t)P * columns) return;
    for (n = from / BK; n < diagonals && BK * (n + 1) - from < pe_rows; n++)
        for (s = 0; s < splits; s++) {
            size_t k = ((size_t)n * tables + own) * splits + s;
            if (used[k]) sum += part[(k * pe_rows + (size_t)(BK * (n + 1) - from)) * D + d];
        }
    if (sum != 0) stx__add(dpe, i, sum, 1);
}


/* ---- src/cuda/attention_bwd.cuh ---- */
// >>attention: backward plan

/* Adds the partial sums of all gradients in one launch. A block of 8 warps sums 32
   elements: warp s adds partial sums s, s + 8, .., then the results of the eight warps
   are added in order.

       job    to[i] += f times the sum over k of part[k n + i], i < n
       dpe    the first dr_blocks blocks add the results of stx__attn_bwd_table. Columns
              are counted from the newest: the first `extra` belong to no table row, the
              next one belongs to row P - 1 */
enum { STX__ATTN_BWD_FOLDS = 5 }; /* du, dvb, dz, dpk, dpv */

typedef struct stx__attn_bwd_fold_job {
    stx__array to;
    const float *part;
    size_t n, parts;
    float f;
    unsigned blocks;
} stx__attn_bwd_fold_job;

typedef struct stx__attn_bwd_folds {
    stx__attn_bwd_fold_job one[STX__ATTN_BWD_FOLDS];
    int count;
    unsigned dr_blocks; /* number of blocks that compute dpe; may be 0 */
    stx__array dpe;
    const float *part;
    const int *used;
    int P, tables, D, columns, extra, blocks, splits;
} stx__attn_bwd_folds;

/* Adds the sums of the eight warps. The result is valid in the first warp. */
static __device__ __forceinline__ float stx__attn_bwd_fold_slices(float *sum, float x) {
    const int lane = (int)threadIdx.x & 31, slice = (int)threadIdx.x / 32;
    sum[threadIdx.x] = x;
    __syncthreads();
    if (!slice)
        for (int s = 1; s < 8; s++) x += sum[s * 32 + lane];
    return x;
}

STX__GLOBAL(256) stx__attn_bwd_fold(stx__attn_bwd_folds a) {
    STX__SHARED(float, sum, 256);
    const int lane = (int)threadIdx.x & 31, slice = (int)threadIdx.x / 32;
    unsigned block = blockIdx.x;
    size_t i, k;
    float x = 0;
    if (block < a.dr_blocks) {
        const size_t row = (size_t)a.tables * a.D;
        i = (size_t)block * 32 + lane;
        const int v = a.P - 1 - (int)(i / row) + a.extra, n = v / a.columns,
                  column = a.columns - 1 - v % a.columns;
        const int some = i < (size_t)a.P * row && n < a.blocks;
        if (some)
            for (int s = slice; s < a.splits; s += 8) {
                k = ((size_t)n * a.tables + i / a.D % a.tables) * a.splits + s;
                if (a.used[k]) x += a.part[(k * a.columns + column) * a.D + i % a.D];
            }
        x = stx__attn_bwd_fold_slices(sum, x);
        if (!slice && some && x != 0) stx__add(a.dpe, i, x, 1);
        return;
    }
    block -= a.dr_blocks;
    for (int j = 0; j < a.count; block -= a.one[j++].blocks) {
        const stx__attn_bwd_fold_job &o = a.one[j];
        if (block >= o.blocks) continue;
        i = (size_t)block * 32 + lane;
        if (i < o.n)
            for (k = slice; k < o.parts; k += 8) x += o.part[k * o.n + i];
        x = stx__attn_bwd_fold_slices(sum, x);
        if (!slice && i < o.n) stx__add(o.to, i, o.f * x, 1);
        return;
    }
}

typedef stx__kernel_of<stx__attn_bwd_params> stx__attn_bwd_kernel;
typedef stx__kernel_of<stx__attn_bwd_params, const uint32_t *> stx__attn_bwd_kernel_list;

typedef stx__kernel_of<stx__attn_params, stx__attn_bwd_list, const void *, float *>
    stx__attn_bwd_kernel_prepare;

typedef struct stx__attn_bwd_choice {
    stx__attn_bwd_kernel_prepare prepare;
    stx__attn_bwd_kernel_list queries;
    stx__attn_bwd_kernel keys, diagonals;
    size_t shared_queries, shared_keys, shared_diagonals; /* shared memory, in bytes */
    size_t more_queries, more_keys, more_diagonals;       /* additional bytes for prefetching */
    int bq, bk, threads;
    stx__attn_bwd_kernel table; /* computes dPE from rows of dR; NULL for floats */
    size_t shared_table;
    int columns; /* columns per block of `table` */
    int rows;    /* memory for rows of dR. 0: none; 1: STX__ATTN_BWD_DR_BYTES; 2: half of
                    what the rows require (for tests) */
} stx__attn_bwd_choice;

template <class Sh> static void stx__attn_bwd_choose_table(stx__attn_bwd_choice *, ...) {}

template <class Sh>
static void stx__attn_bwd_choose_table(stx__attn_bwd_choice *c, const stx__attn_bf16 *) {
    c->table = stx__attn_bwd_table<Sh>;
    c->shared_table = stx__attn_bwd_table_shape<Sh>::SHARED;
    c->columns = stx__attn_bwd_table_shape<Sh>::COLUMNS;
}

template <class Pr, int DP, int BQ, int BK>
static stx__attn_bwd_choice stx__attn_bwd_choice_of(const stx_attention_args *a) {
    typedef stx__attn_bwd_shape<Pr, DP, BQ, BK> Sh;
    typedef stx__attn_bwd_variants<Sh, Pr::MASKED_SIZES & DP> Q;
    stx__attn_bwd_choice c = {};
    c.prepare = stx__attn_bwd_prepare<typename Pr::element>;
    c.queries = stx__attn_bwd_queries<typename Q::unmasked>;
    if (stx__attn_key_words(a)) c.queries = stx__attn_bwd_queries<typename Q::masked>;
    c.keys = stx__attn_bwd_keys<Sh>;
    c.diagonals = stx__attn_bwd_diagonals<Sh>;
    c.bq = BQ;
    c.bk = BK;
    c.threads = Sh::THREADS;
    stx__attn_bwd_choose_table<Sh>(&c, (const Pr *)NULL);
    c.shared_queries = (size_t)Sh::RAMPS + 2 * Sh::BIAS
                       + (size_t)Sh::TILE_Q
                             * (a->P && (a->content_bias || a->position_bias) ? 3 : 2)
                       + 2 * (size_t)Sh::TILE_K + (a->P ? (size_t)Sh::TILE_PE : 0);
    c.shared_keys = c.shared_queries + 2 * (size_t)Sh::BQ * Sh::CH_DS * 16;
    c.shared_diagonals = c.shared_queries + (size_t)Sh::BQ * Sh::CH_DR * 16;
    c.more_queries = stx__attn_bwd_shared<Sh>::moving_bytes(STX__MOVES_K)
                     + (a->P ? (size_t)Sh::TILE_K : 0);
    c.more_keys = stx__attn_bwd_shared<Sh>::moving_bytes(STX__MOVES_Q)
                  + (a->P ? (size_t)Sh::TILE_Q : 0);
    c.more_diagonals = stx__attn_bwd_shared<Sh>::moving_bytes(STX__MOVES_K | STX__MOVES_Q);
    return c;
}

template <class Pr>
static stx__attn_bwd_choice stx__attn_bwd_choose_float(const stx_attention_args *a) {
    if (a->D <= 32) return stx__attn_bwd_choice_of<Pr, 32, 64, 32>(a);
    if (a->D <= 64) return stx__attn_bwd_choice_of<Pr, 64, 64, 32>(a);
    return stx__attn_bwd_choice_of<Pr, 128, 32, 16>(a);
}

static stx__attn_bwd_choice stx__attn_bwd_choose(const stx_ctx *x, const stx_attention_args *a,
                                                 int half) {
    const int version = stx__gpu(x)->attention;
    stx__attn_bwd_choice c;
    if (!half && stx__gpu(x)->tf32) return stx__attn_bwd_choose_float<stx__attn_tf32>(a);
    if (!half) return stx__attn_bwd_choose_float<stx__attn_f32>(a);
    if (a->D <= 32)
        c = stx__attn_bwd_choice_of<stx__attn_bf16, 32, 64, 64>(a);
    else if (a->D <= 64)
        c = stx__attn_bwd_choice_of<stx__attn_bf16, 64, 64, 64>(a);
    else if (a->D <= 96)
        c = stx__attn_bwd_choice_of<stx__attn_bf16, 96, 64, 32>(a);
    else
        c = stx__attn_bwd_choice_of<stx__attn_bf16, 128, 64, 32>(a);
    c.rows = 1;
    if (version == 5) c.rows = 0;
    if (version == 6) c.rows = 2;
    return c;
}

/* How the work is divided, and the offsets in scratch memory. Depends on sizes alone. */
typedef struct stx__attn_bwd_plan {
    int queries, keys, vectors, table;  /* 1 if the sweep is required; vectors: key sweep over
                                           persistent vectors; table: diagonal sweep */
    int tiles;                          /* number of query tiles */
    int first, key_tiles;               /* first: first key of the key sweep; key_tiles:
                                           number of key tiles */
    int vector_tiles, vector_splits;    /* tiles and splits for persistent vectors */
    int diagonal_first, diagonal_extra; /* `first` and `extra` of the diagonal sweep */
    int diagonals, tables, units, table_splits;
    int pe_rows;
    int rows;                       /* sum of the dR columns of all heads, or 0 */
    int newest, blocks, row_splits; /* parameters of stx__attn_bwd_table */
    size_t list, bits, dsum, du, dvb, dz, dpk, dpv, dpe, used, place; /* offsets in bytes */
    size_t bytes;                                                     /* size of scratch memory */
    size_t dr;                                                        /* bytes for rows of dR */
} stx__attn_bwd_plan;

/* Limits in bytes: for the partial sums of dpe, unless a single split requires more,
   and for the rows of dR of a context. At B = 64, T = 512 and 8 heads, the second limit
   allows 512 distances per head on average. This suffices for learned spans, except for
   one or two long heads per layer. */
enum { STX__ATTN_BWD_PART_BYTES = 128 << 20, STX__ATTN_BWD_DR_BYTES = 256 << 20 };

/* Plans the tiles of keys and of persistent vectors. */
static void stx__attn_bwd_plan_keys(const stx_attention_args *a, const stx__attn_bwd_choice *c,
                                    stx__attn_bwd_plan *s) {
    const int S = (int)a->S, C = S - (int)a->T, span = (int)a->span, B = (int)a->B, H = (int)a->H;
    /* the first key that a query may see, rounded down to a group of 8 dropout random
       numbers */
    int lo = STX_MAX(STX_MIN((int)STX_MAX(a->first_key, 0), S), C - span);
    lo = STX_MAX(lo, 0);
    s->first = ((lo + span) & ~7) - span;
    /* if gradients are overwritten, include keys that no query sees: their gradients
       are 0 */
    if (a->overwrite & ~STX_OVERWRITE_DQ && s->first > 0)
        s->first -= (s->first + c->bk - 1) / c->bk * c->bk;
    s->key_tiles = (S - s->first + c->bk - 1) / c->bk;
    s->vector_tiles = ((int)a->N + ((S + span) & 7) + c->bk - 1) / c->bk;
    if (s->vectors)
        s->vector_splits = STX_MAX(1, STX_MIN(B, 512 / STX_MAX(1, H * s->vector_tiles)));
}

/* Returns the number of splits that the units are divided into for partial sums of dpe:
   at most `most`, and no more than fit in STX__ATTN_BWD_PART_BYTES if each split takes
   `one` bytes. */
static int stx__attn_bwd_splits(size_t one, int units, int most) {
    return (int)STX_MIN(STX_MAX((size_t)1, STX__ATTN_BWD_PART_BYTES / one),
                        (size_t)STX_MIN(units, most));
}

/* Plans the columns of dR and the partial sums of dpe that are computed from them.
   Leaves s->rows at 0 if no head can have columns. */
static void stx__attn_bwd_plan_dr(const stx_attention_args *a, const stx__attn_bwd_choice *c,
                                  stx__attn_bwd_plan *s, size_t *parts, size_t *flags) {
    const int C = (int)a->S - (int)a->T, span = (int)a->span;
    const size_t rows = a->B * s->tiles * c->bq; /* rows of one head */
    size_t one, all, most;
    s->newest = C - a->delta_min + 1;
    s->newest += -(s->newest + span) & 15;
    /* columns of a head that sees the whole window */
    one = (size_t)(span + s->newest - C + 15) / 16 * 16;
    all = one * a->H;
    most = c->rows == 2 ? all / 2 : STX__ATTN_BWD_DR_BYTES / (rows * 2);
    if (most > all) most = all;
    /* with fewer columns, no head would get any */
    if (most < all && most < (size_t)(c->rows == 2 ? 16 : 64)) return;
    s->rows = (int)(most / 16 * 16);
    /* if every head has columns, the diagonal sweep is not required */
    s->table = most < all;
    s->dr = STX_MIN((size_t)STX__ATTN_BWD_DR_BYTES,
                    (STX_MAX(a->span, a->P) + 31) / 16 * 16 * a->H * rows * 2);
    /* run the query sweep even if no other gradient requires it: dPE must not depend on
       which other gradients are requested */
    s->queries = 1;
    /* columns of the widest head that may have rows */
    one = STX_MIN(one, most);
    s->blocks = (int)((one + c->columns - 1) / c->columns);
    one = (size_t)s->blocks * s->tables * c->columns * a->D * sizeof(float);
    s->row_splits = stx__attn_bwd_splits(one, s->units, STX_MAX(1, 256 / s->tables));
    *parts = s->row_splits * one;
    *flags = (size_t)s->blocks * s->tables * s->row_splits * sizeof(int);
}

/* Plans the diagonal sweep and its partial sums of dpe. */
static void stx__attn_bwd_plan_diagonals(const stx_attention_args *a, const stx__attn_bwd_choice *c,
                                         stx__attn_bwd_plan *s, size_t *parts, size_t *flags) {
    const int C = (int)a->S - (int)a->T, span = (int)a->span;
    size_t one;
    /* diagonal 0 ends with the newest key that a tile's last query sees, or up to 7
       keys later */
    s->diagonal_first = C - a->delta_min + c->bq - c->bk;
    s->diagonal_extra = -(s->diagonal_first + span) & 7;
    s->diagonal_first += s->diagonal_extra;
    s->diagonals = (span - a->delta_min + c->bq - 1 + s->diagonal_extra) / c->bk + 1;
    one = (size_t)s->diagonals * s->tables * s->pe_rows * a->D * sizeof(float);
    s->table_splits = stx__attn_bwd_splits(one, s->units, STX_MAX(1, 64 / s->tables));
    /* both kinds of partial sums use the same memory, one after the other */
    *parts = STX_MAX(*parts, s->table_splits * one);
    *flags = STX_MAX(*flags, (size_t)s->diagonals * s->tables * s->table_splits * sizeof(int));
}

static stx__attn_bwd_plan stx__attn_bwd_plan_of(const stx_attention_args *a,
                                                const stx__attn_bwd_choice *c) {
    const int H = (int)a->H;
    stx__attn_bwd_plan s;
    size_t at = 0, parts = 0, flags = 0, tiles, vectors;
    memset(&s, 0, sizeof s);
    s.queries = a->dq || a->dcontent_bias || a->dposition_bias || a->dspan_fraction;
    s.keys = stx__attn_needs_grad(a, 0) || stx__attn_needs_grad(a, 1);
    s.vectors = a->N && (a->dpersistent_k || a->dpersistent_v);
    s.table = a->P && a->dpe;
    s.tiles = ((int)a->T + c->bq - 1) / c->bq;
    s.pe_rows = c->bq + c->bk;
    s.tables = a->pe_heads > 1 ? H : 1;
    s.units = (int)a->B;
    if (s.tables == 1) s.units *= H;
    stx__attn_bwd_plan_keys(a, c, &s);
    if (s.table && c->rows && !stx__attn_key_words(a))
        stx__attn_bwd_plan_dr(a, c, &s, &parts, &flags);
    if (s.table) stx__attn_bwd_plan_diagonals(a, c, &s, &parts, &flags);

    tiles = a->B * s.tiles;
    vectors = s.vectors ? s.vector_splits * a->H * a->N * a->D : 0;
    s.list = stx__carve(&at, s.queries ? (size_t)H * s.tiles * sizeof(uint32_t) : 0);
    s.bits = stx__carve(&at,
                        stx__attn_key_words(a) * stx__attn_key_word_rows(a) * sizeof(uint32_t));
    s.dsum = stx__carve(&at, a->B * a->H * a->T * sizeof(float));
    s.du = stx__carve(&at, a->dcontent_bias ? tiles * a->H * a->D * sizeof(float) : 0);
    s.dvb = stx__carve(&at, a->dposition_bias ? tiles * a->H * a->D * sizeof(float) : 0);
    s.dz = stx__carve(&at, a->dspan_fraction ? tiles * a->H * sizeof(float) : 0);
    s.dpk = stx__carve(&at, a->dpersistent_k ? vectors * sizeof(float) : 0);
    s.dpv = stx__carve(&at, a->dpersistent_v ? vectors * sizeof(float) : 0);
    s.dpe = stx__carve(&at, parts);
    s.used = stx__carve(&at, flags);
    s.place = stx__carve(&at, s.rows ? H * sizeof(stx__attn_dr_slot) : 0);
    s.bytes = at;
    return s;
}

/* Sets the parameters and kernels of a call. Returns 0 if the fused kernels cannot run
   it. */
static int stx__attn_bwd_params_of(stx_ctx *x, const stx_attention_args *a, stx__attn_bwd_params *p,
                                   stx__attn_bwd_choice *c) {
    int half, ok = 1;
    memset(p, 0, sizeof *p);
    if (!stx__attn_params_of(x, a, &p->p, &half)) return 0;
    *c = stx__attn_bwd_choose(x, a, half);
    p->dy = stx__attn_operand(x, a->dy, half, a->D, &ok);
    /* the number of blocks must be less than 2^31 */
    if ((size_t)p->p.B * p->p.H * (((size_t)p->p.T + c->bq - 1) / c->bq) >= (size_t)1 << 31)
        return 0;
    return ok && p->p.B < 65536 && c->shared_keys <= stx__gpu(x)->shared_max
           && c->shared_diagonals <= stx__gpu(x)->shared_max;
}

/* Performs the checks that stx__attn_fused_can omits: that dy has the same storage as y
   and that there is enough shared memory. */
static int stx__attn_fused_bwd_can(stx_ctx *x, const stx_attention_args *a) {
    stx__attn_bwd_params p;
    stx__attn_bwd_choice c;
    return stx__attn_bwd_params_of(x, a, &p, &c);
}

static size_t stx__attn_fused_bwd_work(stx_ctx *x, const stx_attention_args *a) {
    stx__attn_bwd_params p;
    stx__attn_bwd_choice c;
    return stx__attn_bwd_params_of(x, a, &p, &c) ? stx__attn_bwd_plan_of(a, &c).bytes : 0;
}

/* Called before the launch of a kernel. Sets *prefetch and adds `more` bytes of shared
   memory to *bytes, unless fewer blocks would then fit on a multiprocessor. The decision
   may depend on the GPU, because it does not change results. Returns 0 after an error. */
static int stx__attn_bwd_set_shared(stx_ctx *x, const void *kernel, int threads, size_t *bytes,
                                    size_t more, int *prefetch) {
    size_t all = *bytes + more;
    int few = 0, many = 0, can = all <= stx__gpu(x)->shared_max;
    *prefetch = 0;
    if (!stx__may_share(x, kernel, can ? all : *bytes, "stx_attention_bwd")) return 0;
    if (!can) return 1;
    if (stx__cuda_failed(x,
                         cudaOccupancyMaxActiveBlocksPerMultiprocessor(&many, kernel, threads,
                                                                       *bytes),
                         "stx_attention_bwd")
        || stx__cuda_failed(x,
                            cudaOccupancyMaxActiveBlocksPerMultiprocessor(&few, kernel, threads,
                                                                          all),
                            "stx_attention_bwd"))
        return 0;
    if (few < many) return 1;
    *prefetch = 1;
    *bytes = all;
    return 1;
}

static void stx__attn_bwd_fold_now(stx_ctx *x, stx__attn_bwd_folds *all) {
    unsigned blocks = all->dr_blocks;
    for (int k = 0; k < all->count; k++) blocks += all->one[k].blocks;
    if (blocks) STX__RUN_KERNEL(x, "stx_attention_bwd", stx__attn_bwd_fold, blocks, 256, 0, *all);
    all->count = 0;
    all->dr_blocks = 0;
}

/* Queues a sum of partial sums for one common launch. If a queued sum adds to the same
   gradient (u and vb may be one parameter), launches the queue first, because one
   launch computes its sums in no particular order. */
static void stx__attn_bwd_add_parts(stx_ctx *x, stx__attn_bwd_folds *all, const stx_real *to,
                                    const float *part, size_t n, size_t parts, float f) {
    stx__attn_bwd_fold_job *o;
    for (int k = 0; k < all->count; k++)
        if (stx__overlap(to, n, all->one[k].to.p, all->one[k].n)) {
            stx__attn_bwd_fold_now(x, all);
            break;
        }
    o = &all->one[all->count++];
    o->to = stx__array_of(x, to);
    o->part = part;
    o->n = n;
    o->parts = parts;
    o->f = f;
    o->blocks = stx__blocks(n, 32, (size_t)1 << 28);
}

/* Sets the gradient arrays and the scratch pointers of a call. Returns 0 after an
   error. */
static int stx__attn_bwd_buffers(stx_ctx *x, const stx_attention_args *a,
                                 const stx__attn_bwd_plan *s, stx__attn_bwd_params *p) {
    char *work = (char *)a->work;
    p->tiles = s->tiles;
    p->units = s->units;
    p->root_d = (float)sqrt((double)a->D);
    p->root_n = (float)sqrt((double)a->N);
    p->dq = stx__array_of(x, a->dq);
    p->dk = stx__array_of(x, a->dk);
    p->dv = stx__array_of(x, a->dv);
    for (size_t g = 0; g < a->groups; g++) {
        p->cached_dk[g] = stx__array_of(x, a->cached[g].dk);
        p->cached_dv[g] = stx__array_of(x, a->cached[g].dv);
    }
    p->overwrite = a->overwrite;
    p->dsum = (float *)(work + s->dsum);
    if (a->dcontent_bias) p->du = (float *)(work + s->du);
    if (a->dposition_bias) p->dvb = (float *)(work + s->dvb);
    if (a->dspan_fraction) p->dz = (float *)(work + s->dz);
    if (a->dpersistent_k) p->dpk = (float *)(work + s->dpk);
    if (a->dpersistent_v) p->dpv = (float *)(work + s->dpv);
    p->dpe = (float *)(work + s->dpe);
    p->used = (int *)(work + s->used);
    if (!s->rows) return 1;
    /* Scratch memory is shared by all layers. In the step's memory, layers with
       different windows would each need a separate buffer. The size suffices for the
       full table, so that the memory does not grow with the spans. */
    p->dr = (stx__bf16 *)stx__scratch_of(x, s->dr, "stx_attention_bwd");
    p->slot = (const stx__attn_dr_slot *)(work + s->place);
    p->newest = s->newest;
    return p->dr != NULL;
}

/* Launches the kernel that computes dsum and the list of query tiles. */
static void stx__attn_bwd_run_prepare(stx_ctx *x, const stx_attention_args *a,
                                      const stx__attn_bwd_choice *c, const stx__attn_bwd_plan *s,
                                      const stx__attn_bwd_params *p) {
    char *work = (char *)a->work;
    stx__attn_bwd_list list;
    memset(&list, 0, sizeof list);
    if (s->queries) {
        list.list = (uint32_t *)(work + s->list);
        list.tiles = s->tiles;
        list.bq = c->bq;
        list.bk = c->bk;
        list.newest = s->newest;
        list.columns = s->rows;
        list.place = s->rows ? (stx__attn_dr_slot *)(work + s->place) : (stx__attn_dr_slot *)NULL;
        list.blocks = stx__blocks((size_t)p->p.H * s->tiles, 256, (size_t)1 << 30);
    }
    STX__RUN_KERNEL(x, "stx_attention_bwd", c->prepare,
                    list.blocks + stx__blocks(a->B * a->H * ((a->T + 31) / 32), 1, (size_t)1 << 30),
                    256, 0, p->p, list, p->dy, p->dsum);
}

/* Runs the query sweep. */
static void stx__attn_bwd_run_queries(stx_ctx *x, const stx_attention_args *a,
                                      stx__attn_bwd_choice *c, const stx__attn_bwd_plan *s,
                                      stx__attn_bwd_params *p, stx__attn_bwd_folds *folds) {
    const size_t columns = a->H * a->D, tiles = a->B * s->tiles;
    if (!stx__attn_bwd_set_shared(x, (const void *)c->queries, c->threads, &c->shared_queries,
                                  c->more_queries, &p->prefetch))
        return;
    STX__RUN_KERNEL(x, "stx_attention_bwd", c->queries, (unsigned)(p->p.H * s->tiles * p->p.B),
                    c->threads, c->shared_queries, *p,
                    (const uint32_t *)((char *)a->work + s->list));
    if (a->dcontent_bias)
        stx__attn_bwd_add_parts(x, folds, a->dcontent_bias, p->du, columns, tiles, a->scale);
    if (a->dposition_bias && a->P)
        stx__attn_bwd_add_parts(x, folds, a->dposition_bias, p->dvb, columns, tiles, a->scale);
    if (a->dspan_fraction && a->span_fraction)
        stx__attn_bwd_add_parts(x, folds, a->dspan_fraction, p->dz, a->H, tiles,
                                a->max_span / a->ramp);
}

/* Runs the key sweep, over the window and over persistent vectors. Returns 0 after an
   error. */
static int stx__attn_bwd_run_keys(stx_ctx *x, const stx_attention_args *a, stx__attn_bwd_choice *c,
                                  const stx__attn_bwd_plan *s, stx__attn_bwd_params *p,
                                  stx__attn_bwd_folds *folds) {
    const size_t n = a->N * a->H * a->D, splits = (size_t)s->vector_splits;
    if (!stx__attn_bwd_set_shared(x, (const void *)c->keys, c->threads, &c->shared_keys,
                                  c->more_keys, &p->prefetch))
        return 0;
    if (s->keys) {
        p->first = s->first;
        if (s->key_tiles > 0)
            STX__RUN_KERNEL(x, "stx_attention_bwd", c->keys,
                            dim3((unsigned)s->key_tiles, (unsigned)a->H, (unsigned)a->B),
                            c->threads, c->shared_keys, *p);
    }
    if (s->vectors) {
        p->persistent = 1;
        p->first = -(int)((a->S + a->span) & 7);
        p->splits = s->vector_splits;
        STX__RUN_KERNEL(x, "stx_attention_bwd", c->keys,
                        dim3((unsigned)s->vector_tiles, (unsigned)a->H, (unsigned)splits),
                        c->threads, c->shared_keys, *p);
        if (a->dpersistent_k)
            stx__attn_bwd_add_parts(x, folds, a->dpersistent_k, p->dpk, n, splits, 1);
        if (a->dpersistent_v)
            stx__attn_bwd_add_parts(x, folds, a->dpersistent_v, p->dpv, n, splits, 1);
        p->persistent = 0;
    }
    return 1;
}

/* Runs the diagonal sweep and adds its partial sums. */
static void stx__attn_bwd_run_diagonals(stx_ctx *x, const stx_attention_args *a,
                                        stx__attn_bwd_choice *c, const stx__attn_bwd_plan *s,
                                        stx__attn_bwd_params *p) {
    if (!stx__attn_bwd_set_shared(x, (const void *)c->diagonals, c->threads, &c->shared_diagonals,
                                  c->more_diagonals, &p->prefetch))
        return;
    p->first = s->diagonal_first;
    p->splits = s->table_splits;
    STX__RUN_KERNEL(x, "stx_attention_bwd", c->diagonals,
                    dim3((unsigned)s->diagonals, (unsigned)s->tables, (unsigned)s->table_splits),
                    c->threads, c->shared_diagonals, *p);
    STX__RUN_KERNEL(x, "stx_attention_bwd", stx__attn_bwd_fold_diagonals,
                    stx__blocks(a->P * s->tables * a->D, 256, (size_t)1 << 30), 256, 0,
                    stx__array_of(x, a->dpe), (const float *)p->dpe, (const int *)p->used, p->p.P,
                    s->tables, p->p.D, s->pe_rows, c->bk, s->diagonal_extra, s->diagonals,
                    s->table_splits);
}

/* Computes partial sums of dPE from rows of dR; stx__attn_bwd_fold_now adds them. */
static void stx__attn_bwd_run_table(stx_ctx *x, const stx_attention_args *a,
                                    const stx__attn_bwd_choice *c, const stx__attn_bwd_plan *s,
                                    stx__attn_bwd_params *p, stx__attn_bwd_folds *folds) {
    p->splits = s->row_splits;
    STX__RUN_KERNEL(x, "stx_attention_bwd", c->table,
                    dim3((unsigned)s->blocks, (unsigned)s->tables, (unsigned)s->row_splits),
                    c->threads, c->shared_table, *p);
    folds->dr_blocks = stx__blocks(a->P * s->tables * a->D, 32, (size_t)1 << 29);
    folds->dpe = stx__array_of(x, a->dpe);
    folds->part = p->dpe;
    folds->used = p->used;
    folds->P = p->p.P;
    folds->tables = s->tables;
    folds->D = p->p.D;
    folds->columns = c->columns;
    folds->extra = s->newest - 1 + a->delta_min - (int)(a->S - a->T);
    folds->blocks = s->blocks;
    folds->splits = s->row_splits;
}

static void stx__attn_fused_bwd(stx_ctx *x, const stx_attention_args *a) {
    stx__attn_bwd_params p;
    stx__attn_bwd_choice c;
    stx__attn_bwd_plan s;
    stx__attn_bwd_folds folds;
    if (!stx_ok(x) || !stx__attn_bwd_params_of(x, a, &p, &c)) return;
    s = stx__attn_bwd_plan_of(a, &c);
    memset(&folds, 0, sizeof folds);
    if (!stx__attn_bwd_buffers(x, a, &s, &p)) return;
    if (s.rows) c.shared_queries += (size_t)c.threads * sizeof(uint4);
    stx__attn_make_key_mask(x, "stx_attention_bwd", a, &p.p, (char *)a->work + s.bits);
    stx__attn_bwd_run_prepare(x, a, &c, &s, &p);
    if (s.queries) stx__attn_bwd_run_queries(x, a, &c, &s, &p, &folds);
    if ((s.keys || s.vectors) && !stx__attn_bwd_run_keys(x, a, &c, &s, &p, &folds)) return;
    if (s.table) stx__attn_bwd_run_diagonals(x, a, &c, &s, &p);
    if (s.rows) stx__attn_bwd_run_table(x, a, &c, &s, &p, &folds);
    stx__attn_bwd_fold_now(x, &folds);
}


/* ---- src/cuda/attention.cuh ---- */
// >>attention

enum { STX__ATTN_MAX_HEADS = 256 };

/* Returns whether to use the fused kernels: they must support the call, and g->attention
   must not select the plain kernels (see stx_cuda_attention). row_max and inv_sum are
   always floats, because the forward and the backward pass may use different versions. */
static int stx__attn_use_fused(stx_ctx *x, const stx_attention_args *a) {
    int version = stx__gpu(x)->attention;
    return version != 1 && version != 3 && stx__attn_fused_can(x, a);
}

/* Returns 1 if there is nothing to do. If the call has too many heads, sets an error
   and returns 1. */
static int stx__attn_refused(stx_ctx *x, const stx_attention_args *a, const char *what) {
    if (a->H <= STX__ATTN_MAX_HEADS) return !stx_ok(x) || !a->B || !a->T || !a->H || !a->D;
    stx_fail(x, STX_ERR_SHAPE, "%s: heads: expected at most %d, got %zu", what,
             (int)STX__ATTN_MAX_HEADS, a->H);
    return 1;
}

extern "C" size_t stx_attention_work_cuda(stx_ctx *x, const stx_attention_args *a, int backward) {
    stx__attn_plain A;
    if (a->H > STX__ATTN_MAX_HEADS || !a->B || !a->T || !a->H || !a->D) return 0;
    if (stx__attn_use_fused(x, a) && (!backward || stx__attn_fused_bwd_can(x, a)))
        return backward ? stx__attn_fused_bwd_work(x, a) : stx__attn_fused_fwd_work(a);
    memset(&A, 0, sizeof A);
    A.x = x;
    A.a = a;
    return stx__attn_plain_layout(&A, backward);
}

extern "C" void stx_attention_fwd_cuda(stx_ctx *x, const stx_attention_args *a) {
    if (stx__attn_refused(x, a, "stx_attention_fwd")) return;
    if (stx__attn_use_fused(x, a))
        stx__attn_fused_fwd(x, a);
    else
        stx__attn_plain_fwd(x, a);
}

extern "C" void stx_attention_bwd_cuda(stx_ctx *x, const stx_attention_args *a) {
    if (stx__attn_refused(x, a, "stx_attention_bwd")) return;
    if (stx__attn_use_fused(x, a) && stx__attn_fused_bwd_can(x, a))
        stx__attn_fused_bwd(x, a);
    else
        stx__attn_plain_bwd(x, a);
}

extern "C" void stx_cuda_attention(stx_ctx *x, int version) {
    if (stx__gpu(x)) stx__gpu(x)->attention = version;
}


/* ---- src/cuda/adaptive.cuh ---- */
// >>adaptive input and output

/* Computes the log probabilities of the words of cluster c for stx__cluster_log_probs,
   from the logits (N,w) of the cluster. With z = log sum_j e^logits[n,j] over row n:

       c = 0:  out[n,start+j] = logits[n,j] - z     j < size
               gate[n,j] = (logit of cluster j) - z j = 1 .. K - 1; columns from `size`
                                                    have these logits, in ascending
                                                    order (forward) or in descending
                                                    order
       c > 0:  out[n,start+j] = logits[n,j] - z + gate[n,c]

   out is (N,V), gate (N,K). A block processes a row, with sums in double; only
   evaluation and generation use this kernel. Each thread adds every 256th column in
   order, then a fixed tree adds the threads' sums. */
STX__GLOBAL(256)
stx__cluster_kernel(stx__array out, stx__array gate, stx__array logits, size_t N, size_t V,
                    size_t start, size_t size, size_t w, size_t K, size_t c, int forward) {
    STX__SHARED(float, sh, 32);
    STX__SHARED(double, sums, 32);
    for (size_t n = blockIdx.x; n < N; n += gridDim.x) {
        float m = -HUGE_VALF;
        double z = 0, add = c ? (double)stx__get(gate, n * K + c) : 0;
        for (size_t j = threadIdx.x; j < w; j += 256) m = fmaxf(m, stx__get(logits, n * w + j));
        m = stx__row_max<256>(m, sh);
        for (size_t j = threadIdx.x; j < w; j += 256)
            z += exp((double)(stx__get(logits, n * w + j) - m));
        z = (double)m + log(stx__row_sum<256>(z, sums));

        if (!c)
            for (size_t j = 1 + threadIdx.x; j < K; j += 256) {
                const size_t column = forward ? size + j - 1 : size + K - 1 - j;
                stx__put(gate, n * K + j, (float)((double)stx__get(logits, n * w + column) - z));
            }
        for (size_t j = threadIdx.x; j < size; j += 256)
            stx__put(out, n * V + start + j,
                     (float)((double)stx__get(logits, n * w + j) - z + add));
    }
}

void stx__cluster_log_probs_cuda(stx_ctx *x, const stx__cluster_log_probs_args *a) {
    stx__array O = stx__array_of(x, a->out), G = stx__array_of(x, a->gate),
               A = stx__array_of(x, a->logits);
    if (a->N && a->w)
        STX__RUN_KERNEL(x, "stx_adaptive_log_probs", stx__cluster_kernel,
                        stx__blocks(a->N, 1, (size_t)1 << 30), 256, 0, O, G, A, a->N, a->V,
                        a->start, a->size, a->w, a->K, a->c, a->forward);
}


/* ---- src/cuda/optim.cuh ---- */
// >>report

/* Sets *metric to s a[0] or, with accumulate, adds s a[0] to it, in double. One
   thread. */
STX__GLOBAL(32) stx__metric_kernel(double *metric, stx__array a, double s, int accumulate) {
    *metric = (accumulate ? *metric : 0) + s * (double)stx__get(a, 0);
}

void stx__metric_accumulate_cuda(stx_ctx *x, double *metric, const stx_real *a, double s,
                                 int accumulate) {
    STX__RUN_KERNEL(x, "stx_metric_set", stx__metric_kernel, 1, 1, 0, metric, stx__array_of(x, a),
                    s, accumulate);
}


// >>optimisers

/* A table of parameter twins. Kernels look up the twin of a chunk by the chunk's
   address. If there are more allocations than the table holds, stx__twin_kernel sets
   the other twins after the parameter update, one table at a time. */
enum { STX__TWINS = 64 };

typedef struct stx__twins {
    const char *base[STX__TWINS];
    size_t bytes[STX__TWINS];
    stx__bf16 *twin[STX__TWINS];
    int n;
} stx__twins;

/* Fills the table t from the list of allocations r. Returns the first allocation whose
   twin did not fit, or NULL. */
static const stx__range *stx__twins_from(const stx__range *r, stx__twins *t) {
    memset(t, 0, sizeof *t);
    for (; r && t->n < STX__TWINS; r = r->next)
        if (r->twin) {
            t->base[t->n] = r->base;
            t->bytes[t->n] = r->bytes;
            t->twin[t->n++] = r->twin;
        }
    while (r && !r->twin) r = r->next;
    return r;
}

/* Returns the array at p with its twin. The whole block searches for the twin: thread i
   checks allocation i. */
static __device__ __forceinline__ stx__array stx__chunk_num(const stx__twins &t, float *p,
                                                          stx__bf16 **sh) {
    stx__array a = {p, NULL, 0};
    if (!t.n) return a;
    __syncthreads();
    if (threadIdx.x == 0) *sh = NULL;
    __syncthreads();
    if ((int)threadIdx.x < t.n && (const char *)p >= t.base[threadIdx.x]
        && (const char *)p < t.base[threadIdx.x] + t.bytes[threadIdx.x])
        *sh = t.twin[threadIdx.x] + (p - (const float *)(const void *)t.base[threadIdx.x]);
    __syncthreads();
    a.twin = *sh;
    return a;
}

static __device__ __forceinline__ int stx__aligned(const void *p, size_t to) {
    return (uintptr_t)p % to == 0;
}

/* The loop over chunks of a kernel with blocks of 256 threads. A block processes one
   chunk at a time. */
#define STX__EACH_CHUNK(k, count) for (size_t k = blockIdx.x; k < count; k += gridDim.x)

static unsigned stx__chunk_blocks(size_t count) {
    return stx__blocks(count, 1, (size_t)1 << 20);
}

/* Calls `update(p, g, s0, s1)` for elements [lo,hi) of a chunk, then sets g to 0.
   States that the chunk does not have are passed as 0 and are not stored. */
template <int W, class F>
static __device__ __forceinline__ void stx__update_range(const stx_optim_chunk &q,
                                                         const stx__array &p, size_t lo, size_t hi,
                                                         F update) {
    const stx__array g = {q.g, NULL, 0}, s0 = {q.s[0], NULL, 0}, s1 = {q.s[1], NULL, 0};
    const float zero[W] = {0};
    for (size_t i = lo + (size_t)threadIdx.x * W; i < hi; i += 256 * W) {
        float vp[W], vg[W], v0[W] = {0}, v1[W] = {0};
        stx__getn<W>(vp, p, i);
        stx__getn<W>(vg, g, i);
        if (s0.p) stx__getn<W>(v0, s0, i);
        if (s1.p) stx__getn<W>(v1, s1, i);
        for (int e = 0; e < W; e++) update(vp[e], vg[e], v0[e], v1[e]);
        stx__putn<W>(p, i, vp);
        stx__putn<W>(g, i, zero);
        if (s0.p) stx__putn<W>(s0, i, v0);
        if (s1.p) stx__putn<W>(s1, i, v1);
    }
}

/* Calls `update` for all elements of a chunk, in groups of 4 if the arrays are aligned.
   If `ok` is 0, skips the update and only sets g to 0. */
template <class F>
static __device__ __forceinline__ void stx__update_chunk(const stx_optim_chunk &q,
                                                         const stx__array &p, int ok, F update) {
    size_t fours = stx__aligned(q.p, 16) && stx__aligned(q.g, 16) && stx__aligned(q.s[0], 16)
                           && stx__aligned(q.s[1], 16) && stx__aligned(p.twin, 8)
                       ? q.n / 4 * 4
                       : 0;
    if (!ok) {
        for (size_t i = threadIdx.x; i < q.n; i += 256) q.g[i] = 0;
        return;
    }
    stx__update_range<4>(q, p, 0, fours, update);
    stx__update_range<1>(q, p, fours, q.n, update);
}

/* Copies the parameters of the allocations in t to their twins. Used for allocations
   that did not fit in the table of the update kernel. A block processes one chunk at a
   time. */
STX__GLOBAL(256)
stx__twin_kernel(const stx_optim_chunk *chunk, size_t count, const stx__twins t) {
    STX__SHARED(stx__bf16 *, sh, 1);
    STX__EACH_CHUNK(k, count) {
        stx__array p = stx__chunk_num(t, chunk[k].p, sh);
        if (p.twin)
            for (size_t i = threadIdx.x; i < chunk[k].n; i += 256)
                p.twin[i] = __float2bfloat16(((const float *)p.p)[i]);
    }
}

/* Launches `kernel(chunk, count, twins, ..)`, then stx__twin_kernel for twins that did
   not fit in the table. */
#define STX__RUN_CHUNKS(x, name, kernel, chunk, count, ...) \
  do { \
    stx__twins twins; \
    const stx__range *rest = stx__twins_from(stx__gpu(x)->ranges, &twins); \
    STX__RUN_KERNEL(x, name, kernel, stx__chunk_blocks(count), 256, 0, chunk, count, twins, \
                    __VA_ARGS__); \
    while (rest) { \
      rest = stx__twins_from(rest, &twins); \
      STX__RUN_KERNEL(x, name, stx__twin_kernel, stx__chunk_blocks(count), 256, 0, chunk, count, \
                      twins); \
    } \
  } while (0)

/* Sets `out` (count) to the sum of g^2 over each chunk, in double. A block processes
   one chunk at a time: a thread adds every 256th group of 4 in order, then a fixed tree
   adds the threads' sums. */
STX__GLOBAL(256) stx__sum_squares_kernel(double *out, const stx_optim_chunk *chunk, size_t count) {
    STX__SHARED(double, sh, 32);
    STX__EACH_CHUNK(k, count) {
        const stx__array g = {chunk[k].g, NULL, 0};
        size_t n = chunk[k].n, fours = stx__aligned(g.p, 16) ? n / 4 * 4 : 0;
        double s = 0;
        for (size_t i = 4 * (size_t)threadIdx.x; i < fours; i += 1024) {
            float4 v = stx__get4(g, i);
            s += ((double)v.x * v.x + (double)v.y * v.y) + ((double)v.z * v.z + (double)v.w * v.w);
        }
        for (size_t i = fours + threadIdx.x; i < n; i += 256)
            s += (double)chunk[k].g[i] * chunk[k].g[i];
        s = stx__row_sum<256>(s, sh);
        if (threadIdx.x == 0) out[k] = s;
    }
}

void stx_sum_squares_cuda(stx_ctx *x, double *out, const stx_optim_chunk *chunk, size_t count) {
    if (count)
        STX__RUN_KERNEL(x, "stx_sum_squares", stx__sum_squares_kernel, stx__chunk_blocks(count),
                        256, 0, out, chunk, count);
}

/* Calls `of(first, end, lane)` for the chunks [first,end) of each tensor, in a block of
   1024 threads. Each warp checks 32 chunks at a time and makes the calls for the
   tensors that begin there. Since the chunks of a tensor are adjacent, binary search
   finds the last one. */
template <class F>
static __device__ __forceinline__ void stx__each_tensor(const stx_optim_chunk *chunk, size_t count,
                                                        F of) {
    const unsigned lane = threadIdx.x % 32;
    for (size_t base = threadIdx.x - lane; base < count; base += 1024) {
        size_t k = base + lane;
        unsigned begins = __ballot_sync(STX__ALL,
                                        k < count
                                            && (k == 0 || chunk[k - 1].tensor != chunk[k].tensor));
        for (; begins; begins &= begins - 1) {
            size_t first = base + (size_t)(__ffs((int)begins) - 1), tensor = chunk[first].tensor,
                   end = first + 1, above = count;
            while (end < above) {
                size_t mid = end + (above - end) / 2;
                if (chunk[mid].tensor == tensor)
                    end = mid + 1;
                else
                    above = mid;
            }
            of(first, end, lane);
        }
    }
}

/* The fields of stx_optim_desc that stx__optim_prepare_kernel reads. The struct must
   have no padding bytes: they would be uninitialised, and tests/cuda_host searches
   kernel arguments for host addresses. */
typedef struct stx__prepare_rule {
    int kind, eps_hat, radam_skip, no_correction;
    double clip, beta1, beta2;
} stx__prepare_rule;

/* Increments u->step and sets the global clipping factor and the bias corrections of
   the Adam family for this update, as described in stx_optim_desc. Called by thread 0.
   With power = beta2^step, RAdam (Liu et al. 2020, arXiv:1908.03265) multiplies the
   update by r if rho >= 5; otherwise u->plain is set, and the update does not use v:

       most = 2 / (1 - beta2) - 1         rho = most - 2 step power / (1 - power)
       r    = sqrt((1 - power) (rho-4) (rho-2) most / ((most-4) (most-2) rho)) */
static __device__ __forceinline__ void stx__optim_decide(stx_update *u, double norm,
                                                         const stx__prepare_rule &d) {
    double step = (double)++u->step, power = pow(d.beta2, step), rectify = 1;
    u->plain = 0;
    u->correction2 = (float)(1 - power);
    if (d.kind == STX_RADAM) {
        double most = 2 / (1 - d.beta2) - 1, rho = most - 2 * step * power / (1 - power);
        u->plain = !(rho >= 5);
        u->correction2 = 1;
        if (rho >= 5)
            rectify = sqrt((1 - power) * (rho - 4) * (rho - 2) * most
                           / ((most - 4) * (most - 2) * rho));
    }
    u->factor = (float)(d.clip > 0 && d.kind != STX_ADAGRAD && d.clip / (norm + 1e-6) < 1
                            ? d.clip / (norm + 1e-6)
                            : 1);
    if (d.eps_hat) {
        rectify = sqrt(1 - power);
        u->correction2 = 1;
    }
    u->correction1 = (float)((1 - pow(d.beta1, step)) / rectify);
    if (d.no_correction) u->correction1 = u->correction2 = 1;
}

/* Computes the norm of the gradient from `squares` (count), the sum of g^2 over each
   chunk. Then decides whether to update, and sets the lr of each chunk. The update is
   skipped if the norm is not finite. For Adagrad, each tensor is clipped by its own
   norm. One block: a thread adds every 1024th chunk, then a fixed tree adds the
   threads' sums. The CPU adds in order, so its norm differs by rounding errors.
 */
STX__GLOBAL(1024, 1)
stx__optim_prepare_kernel(stx_update *u, stx_optim_chunk *chunk, size_t count,
                          const double *squares, const stx__prepare_rule d) {
    STX__SHARED(double, sh, 32);
    const double clip = d.clip;
    double lr = u->lr, total = 0, norm;
#pragma unroll 8
    for (size_t k = threadIdx.x; k < count; k += 1024) total += squares[k];
    norm = sqrt(stx__row_sum<1024>(total, sh));
    if (threadIdx.x == 0) {
        u->norm = norm;
        u->ok = norm <= DBL_MAX; /* false for NaN as well */
        if (u->ok)
            stx__optim_decide(u, norm, d);
        else
            u->skipped++;
    }
    if (!(norm <= DBL_MAX)) return;

    if (d.radam_skip) {
        __syncthreads(); /* u->plain was written by thread 0 */
        if (u->plain) lr = 0;
    }
    if (!(clip > 0 && d.kind == STX_ADAGRAD)) {
        for (size_t k = threadIdx.x; k < count; k += 1024)
            chunk[k].lr = (float)(lr * (double)chunk[k].lr_factor);
        return;
    }
    stx__each_tensor(chunk, count, [=](size_t first, size_t end, unsigned lane) {
        double sq = 0, eta = lr;
#pragma unroll 8
        for (size_t i = first + lane; i < end; i += 32) sq += squares[i];
        sq = sqrt(stx__warp_sum_f64(sq));
        if (sq > clip) eta = lr * clip / (sq + 1e-10);
        for (size_t i = first + lane; i < end; i += 32)
            chunk[i].lr = (float)(eta * (double)chunk[i].lr_factor);
    });
}

void stx_optim_prepare_cuda(stx_ctx *x, stx_update *u, stx_optim_chunk *chunk, size_t count,
                            const double *squares, const stx_optim_desc *d) {
    const stx__prepare_rule rule = {d->kind, d->eps_hat, d->radam_skip, d->no_correction,
                                    d->clip, d->beta1,   d->beta2};
    STX__RUN_KERNEL(x, "stx_optim_prepare", stx__optim_prepare_kernel, 1, 1024, 0, u, chunk, count,
                    squares, rule);
}

/* SGD with momentum:

       g'  = factor g + decay p
       buf = momentum buf + g'           if there is a buffer
       p   = p - lr buf, g = 0           (p - lr g' without a buffer)

   A block processes one chunk at a time, a thread 4 adjacent elements at a time. This
   also holds for the update kernels below. */
STX__GLOBAL(256)
stx__sgd_kernel(const stx_optim_chunk *chunk, size_t count, const stx__twins t, const stx_update *u,
                float momentum) {
    STX__SHARED(stx__bf16 *, sh, 1);
    const float factor = u->factor;
    STX__EACH_CHUNK(k, count) {
        const stx_optim_chunk q = chunk[k];
        const stx__array p = stx__chunk_num(t, q.p, sh);
        const int has_buffer = q.s[0] != NULL;
        stx__update_chunk(q, p, u->ok, [=](float &v, float g, float &buf, float &) {
            g = fmaf(factor, g, q.decay * v);
            if (has_buffer) g = buf = fmaf(momentum, buf, g);
            v = fmaf(-q.lr, g, v);
        });
    }
}

void stx_sgd_update_cuda(stx_ctx *x, const stx_update *u, const stx_optim_chunk *chunk,
                         size_t count, stx_real momentum) {
    if (count) STX__RUN_CHUNKS(x, "stx_sgd_update", stx__sgd_kernel, chunk, count, u, momentum);
}

/* Adagrad: sum = sum + g^2 ; p = p - lr g / (sqrt(sum) + eps) ; g = 0 */
STX__GLOBAL(256)
stx__adagrad_kernel(const stx_optim_chunk *chunk, size_t count, const stx__twins t,
                    const stx_update *u, float eps) {
    STX__SHARED(stx__bf16 *, sh, 1);
    STX__EACH_CHUNK(k, count) {
        const stx_optim_chunk q = chunk[k];
        const stx__array p = stx__chunk_num(t, q.p, sh);
        stx__update_chunk(q, p, u->ok, [=](float &v, float g, float &sum, float &) {
            sum = fmaf(g, g, sum);
            v -= q.lr * g / (sqrtf(sum) + eps);
        });
    }
}

void stx_adagrad_update_cuda(stx_ctx *x, const stx_update *u, const stx_optim_chunk *chunk,
                             size_t count, stx_real eps) {
    if (count) STX__RUN_CHUNKS(x, "stx_adagrad_update", stx__adagrad_kernel, chunk, count, u, eps);
}

/* Adam, AdamW and RAdam, with the corrections c1 and c2 of u, rest1 = 1 - beta1 and
   rest2 = 1 - beta2. The chunk's weight decay is `decoupled` or, if a.decoupled is 0,
   `decay`; the other one is 0:

       g' = factor g + decay p
       m  = beta1 m + rest1 g'
       v  = beta2 v + rest2 g'^2
       p  = (1 - lr decoupled) p - lr (m / c1) / (sqrt(v / c2) + eps), g = 0
   If u->plain, p = (1 - lr decoupled) p - lr m / c1. */
static __device__ __forceinline__ void stx__adam_chunk(const stx_optim_chunk &q,
                                                       const stx__array &p, const stx_update *u,
                                                       const stx_adam_args &a) {
    const float factor = u->factor, unbias = 1 / u->correction2;
    const float keep = 1 - q.lr * (a.decoupled ? q.decay : 0), rate = q.lr / u->correction1;
    const float decay = a.decoupled ? 0 : q.decay;
    const int plain = u->plain;
    stx__update_chunk(q, p, u->ok, [=](float &w, float g, float &m, float &v) {
        float d = fmaf(factor, g, decay * w);
        m = fmaf(a.beta1, m, a.rest1 * d);
        v = fmaf(a.beta2, v, a.rest2 * d * d);
        w = keep * w - rate * m / (plain ? 1 : sqrtf(v * unbias) + a.eps);
    });
}

STX__GLOBAL(256)
stx__adam_kernel(const stx_optim_chunk *chunk, size_t count, const stx__twins t,
                 const stx_update *u, const stx_adam_args a) {
    STX__SHARED(stx__bf16 *, sh, 1);
    STX__EACH_CHUNK(k, count) {
        const stx_optim_chunk q = chunk[k];
        stx__adam_chunk(q, stx__chunk_num(t, q.p, sh), u, a);
    }
}

void stx_adam_update_cuda(stx_ctx *x, const stx_update *u, const stx_optim_chunk *chunk,
                          size_t count, const stx_adam_args *a) {
    if (count) STX__RUN_CHUNKS(x, "stx_adam_update", stx__adam_kernel, chunk, count, u, *a);
}

/* LAMB, first kernel. Replaces g with the direction of each element (rest1 and rest2
   are 1 - beta1 and 1 - beta2):

       d = factor g
       m = beta1 m + rest1 d
       v = beta2 v + rest2 d^2
       g = (m / c1) / (sqrt(v / c2) + eps) + decay p

   Sets `squares` (count,2) to the sums of p^2 and of the new g^2 over each chunk, in
   double. A block processes one chunk at a time: a thread adds every 256th element in
   order, then a fixed tree adds the threads' sums. */
STX__GLOBAL(256)
stx__lamb_direction_kernel(const stx_optim_chunk *chunk, size_t count, const stx_update *u,
                           double *squares, const stx_adam_args a) {
    STX__SHARED(double, sh, 32);
    if (!u->ok) return;
    const float factor = u->factor, rate = 1 / u->correction1, unbias = 1 / u->correction2;
    STX__EACH_CHUNK(k, count) {
        const stx_optim_chunk q = chunk[k];
        double pp = 0, gg = 0;
        for (size_t i = threadIdx.x; i < q.n; i += 256) {
            float p = q.p[i], d = factor * q.g[i];
            float m = fmaf(a.beta1, q.s[0][i], a.rest1 * d);
            float v = fmaf(a.beta2, q.s[1][i], a.rest2 * d * d);
            float r = fmaf(q.decay, p, rate * m / (sqrtf(v * unbias) + a.eps));
            q.s[0][i] = m;
            q.s[1][i] = v;
            q.g[i] = r;
            pp += (double)p * p;
            gg += (double)r * r;
        }
        pp = stx__row_sum<256>(pp, sh);
        gg = stx__row_sum<256>(gg, sh);
        if (threadIdx.x == 0) {
            squares[2 * k] = pp;
            squares[2 * k + 1] = gg;
        }
    }
}

void stx_lamb_direction_cuda(stx_ctx *x, const stx_update *u, const stx_optim_chunk *chunk,
                             size_t count, double *squares, const stx_adam_args *a) {
    if (count)
        STX__RUN_KERNEL(x, "stx_lamb_direction", stx__lamb_direction_kernel,
                        stx__chunk_blocks(count), 256, 0, chunk, count, u, squares, *a);
}

/* LAMB, second kernel. Multiplies the lr of each tensor's chunks by its trust ratio,
   min(|p|, trust_max) / |g|, or 1 if one of the norms is 0. One block; one warp per
   tensor. */
STX__GLOBAL(1024)
stx__lamb_trust_kernel(const stx_update *u, stx_optim_chunk *chunk, size_t count,
                       const double *squares, double trust_max) {
    if (!u->ok) return;
    stx__each_tensor(chunk, count, [=](size_t first, size_t end, unsigned lane) {
        double p = 0, g = 0;
        for (size_t i = first + lane; i < end; i += 32) {
            p += squares[2 * i];
            g += squares[2 * i + 1];
        }
        p = sqrt(stx__warp_sum_f64(p));
        g = stx__warp_sum_f64(g);
        if (trust_max > 0 && p > trust_max) p = trust_max;
        if (p > 0 && g > 0)
            for (size_t i = first + lane; i < end; i += 32)
                chunk[i].lr = (float)((double)chunk[i].lr * p / sqrt(g));
    });
}

/* LAMB, third kernel: p = p - lr g ; g = 0. The first kernel has already updated m and
   v. */
STX__GLOBAL(256)
stx__lamb_update_kernel(const stx_optim_chunk *chunk, size_t count, const stx__twins t,
                        const stx_update *u) {
    STX__SHARED(stx__bf16 *, sh, 1);
    STX__EACH_CHUNK(k, count) {
        stx_optim_chunk q = chunk[k];
        const stx__array p = stx__chunk_num(t, q.p, sh);
        q.s[0] = q.s[1] = NULL;
        stx__update_chunk(q, p, u->ok,
                          [=](float &w, float g, float &, float &) { w = fmaf(-q.lr, g, w); });
    }
}

void stx_lamb_update_cuda(stx_ctx *x, const stx_update *u, stx_optim_chunk *chunk, size_t count,
                          const double *squares, double trust_max) {
    if (!count) return;
    STX__RUN_KERNEL(x, "stx_lamb_update", stx__lamb_trust_kernel, 1, 1024, 0, u, chunk, count,
                    squares, trust_max);
    STX__RUN_CHUNKS(x, "stx_lamb_update", stx__lamb_update_kernel, chunk, count, u);
}

/* Muon, first kernel. For matrices, whose chunks have no s[1], with buf = s[0]:

       d   = factor g
       buf = momentum buf + d
       g   = d + momentum buf

   Sets `squares` (count) to the sums of the new g^2 over their chunks, in double, as
   stx__lamb_direction_kernel does. */
STX__GLOBAL(256)
stx__muon_direction_kernel(const stx_optim_chunk *chunk, size_t count, const stx_update *u,
                           double *squares, float momentum) {
    STX__SHARED(double, sh, 32);
    if (!u->ok) return;
    const float factor = u->factor;
    STX__EACH_CHUNK(k, count) {
        const stx_optim_chunk q = chunk[k];
        double gg = 0;
        if (q.s[1]) continue;
        for (size_t i = threadIdx.x; i < q.n; i += 256) {
            float d = factor * q.g[i], m = fmaf(momentum, q.s[0][i], d);
            float g = fmaf(momentum, m, d);
            q.s[0][i] = m;
            q.g[i] = g;
            gg += (double)g * g;
        }
        gg = stx__row_sum<256>(gg, sh);
        if (threadIdx.x == 0) squares[k] = gg;
    }
}

void stx_muon_direction_cuda(stx_ctx *x, const stx_update *u, const stx_optim_chunk *chunk,
                             size_t count, double *squares, stx_real momentum) {
    if (count)
        STX__RUN_KERNEL(x, "stx_muon_direction", stx__muon_direction_kernel,
                        stx__chunk_blocks(count), 256, 0, chunk, count, u, squares, momentum);
}

/* Muon: X (n) = u / (|u|_F + 1e-7) for one matrix, whose chunks have the sums of squares
   `squares` (count). Each block adds all of them, in the order of
   stx__optim_prepare_kernel. A thread computes one element at a time. */
STX__GLOBAL(256)
stx__muon_normalise_kernel(stx__array X, const float *u, size_t n, const double *squares,
                           size_t count) {
    STX__SHARED(double, sh, 32);
    double s = 0;
    for (size_t k = threadIdx.x; k < count; k += 256) s += squares[k];
    const float scale = (float)(1 / (sqrt(stx__row_sum<256>(s, sh)) + 1e-7));
    for (size_t i = blockIdx.x * (size_t)256 + threadIdx.x; i < n; i += (size_t)gridDim.x * 256)
        stx__put(X, i, scale * u[i]);
}

void stx_muon_normalise_cuda(stx_ctx *x, stx_real *X, const stx_real *u, size_t n,
                             const double *squares, size_t count) {
    STX__RUN_KERNEL(x, "stx_muon_normalise", stx__muon_normalise_kernel, stx__blocks(n, 256, 1024),
                    256, 0, stx__array_of(x, X), u, n, squares, count);
}

/* Muon: a GEMM with a symmetric result. Computing only half of it would need more
   launches. */
void stx_muon_symmetric_cuda(stx_ctx *x, const stx_gemm_args *g) {
    stx_gemm_cuda(x, g);
}

/* Muon: B (n,n) = a I + b A. A thread computes one element at a time. */
STX__GLOBAL(256)
stx__muon_polynomial_kernel(stx__array B, stx__array A, size_t n, float a, float b) {
    for (size_t i = blockIdx.x * (size_t)256 + threadIdx.x; i < n * n;
         i += (size_t)gridDim.x * 256)
        stx__put(B, i, fmaf(b, stx__get(A, i), i % (n + 1) ? 0 : a)); /* i = row n + row */
}

void stx_muon_polynomial_cuda(stx_ctx *x, stx_real *B, const stx_real *A, size_t n, stx_real a,
                              stx_real b) {
    STX__RUN_KERNEL(x, "stx_muon_polynomial", stx__muon_polynomial_kernel,
                    stx__blocks(n * n, 256, 1024), 256, 0, stx__array_of(x, B),
                    stx__array_of(x, A), n, a, b);
}

/* Muon, last kernel. For matrices, p = p - lr (g + decay p), where g is the scaled
   orthogonalised direction; AdamW for other chunks. g = 0. */
STX__GLOBAL(256)
stx__muon_update_kernel(const stx_optim_chunk *chunk, size_t count, const stx__twins t,
                        const stx_update *u, const stx_adam_args a) {
    STX__SHARED(stx__bf16 *, sh, 1);
    STX__EACH_CHUNK(k, count) {
        stx_optim_chunk q = chunk[k];
        const stx__array p = stx__chunk_num(t, q.p, sh);
        if (q.s[1]) {
            stx__adam_chunk(q, p, u, a);
            continue;
        }
        q.s[0] = NULL; /* updated by the first kernel */
        stx__update_chunk(q, p, u->ok, [=](float &w, float g, float &, float &) {
            w = fmaf(-q.lr, fmaf(q.decay, w, g), w);
        });
    }
}

void stx_muon_update_cuda(stx_ctx *x, const stx_update *u, const stx_optim_chunk *chunk,
                          size_t count, const stx_adam_args *a) {
    if (count) STX__RUN_CHUNKS(x, "stx_muon_update", stx__muon_update_kernel, chunk, count, u, *a);
}

/* Clips the gradients g of each chunk to [-c,c]. Infinities and NaN are left unchanged.
   A block processes one chunk at a time. */
STX__GLOBAL(256) stx__clip_values_kernel(const stx_optim_chunk *chunk, size_t count, float c) {
    STX__EACH_CHUNK(k, count)
    for (size_t i = threadIdx.x; i < chunk[k].n; i += 256) {
        float v = chunk[k].g[i];
        if (fabsf(v) > c && fabsf(v) <= FLT_MAX) chunk[k].g[i] = v < 0 ? -c : c;
    }
}

void stx_clip_values_cuda(stx_ctx *x, const stx_optim_chunk *chunk, size_t count, stx_real c) {
    if (count)
        STX__RUN_KERNEL(x, "stx_clip_values", stx__clip_values_kernel, stx__chunk_blocks(count),
                        256, 0, chunk, count, c);
}

/* Clamps the parameters p of each chunk to [lo,hi]. NaN is left unchanged. A block
   processes one chunk at a time. */
STX__GLOBAL(256)
stx__clamp_kernel(const stx_optim_chunk *chunk, size_t count, const stx__twins t, float lo,
                  float hi) {
    STX__SHARED(stx__bf16 *, sh, 1);
    STX__EACH_CHUNK(k, count) {
        const stx__array p = stx__chunk_num(t, chunk[k].p, sh);
        for (size_t i = threadIdx.x; i < chunk[k].n; i += 256) {
            float v = stx__get(p, i), above = v > hi ? hi : v;
            stx__put(p, i, v < lo ? lo : above);
        }
    }
}

void stx_clamp_cuda(stx_ctx *x, const stx_optim_chunk *chunk, size_t count, stx_real lo,
                    stx_real hi) {
    if (count) STX__RUN_CHUNKS(x, "stx_clamp", stx__clamp_kernel, chunk, count, lo, hi);
}


/* ---- src/cuda/group_streams.cuh ---- */
// >>group: streams

/* The group code that the device layer and graph capture need: freeing a group, the fork,
   the join, and captures. Gradient exchanges run on the group's stream, so that the
   backward pass of earlier layers can continue meanwhile. The fork is an event after
   which an exchange may begin; the join is an event after which the context's stream may
   use the results. In a captured step, both are dependencies of the CUDA graph.

   No call blocks. The communicator is created with ncclConfig_t.blocking = 0, and
   pending work is polled (stx__group_wait_for) until it has finished, NCCL reports an
   error, or the other ranks do not answer within the timeout. In the last two cases the
   group is given up: ncclCommAbort ends kernels that wait for other ranks, and the
   context's error is set.

   NCCL documents captures and nonblocking communicators, but not their combination. If
   the first capture fails because of NCCL, steps are launched without a graph, with
   bit-identical results, and stx_step_replay_status reports the reason. If the failed
   capture broke the communicator, the ranks create another one, with an id that they
   exchanged when they joined. */
#ifdef SEQTX_NCCL

/* Waits for an NCCL call and checks its status. Returns 1, or sets an error and returns
   0. */
static int stx__nccl_ok(stx_ctx *x, stx_gpu *g, ncclResult_t r, const char *what) {
    if (r == ncclInProgress) return stx__group_wait_for(x, g, NULL, NULL, what);
    return r == ncclSuccess || stx__nccl_failed(x, g, r, what);
}

/* Creates the communicator. All ranks must call this together, with the same id. */
static int stx__group_connect(stx_ctx *x, stx_gpu *g, ncclUniqueId id, const char *what) {
    stx__group *c = g->group;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    return stx__nccl_ok(x, g, ncclCommInitRankConfig(&c->comm, c->ranks, id, c->rank, &config),
                        what);
}

static void stx__group_free(stx_gpu *g) {
    stx__group *c = g->group;
    if (!c) return;
    stx__group_give_up(g);
    if (c->stream) (void)cudaStreamSynchronize(c->stream);
    if (c->device) {
        (void)cudaStreamSynchronize(g->stream);
        (void)cudaFree(c->device);
        g->bytes -= STX__GROUP_BYTES;
    }
    if (c->pinned) (void)cudaFreeHost(c->pinned);
    if (c->ready) (void)cudaEventDestroy(c->ready);
    if (c->done) (void)cudaEventDestroy(c->done);
    if (c->stream) (void)cudaStreamDestroy(c->stream);
    free(c);
    g->group = NULL;
}

/* The fork: further work on the group's stream waits for the context's work so far.
   Returns 0 after an error, or if the step is being captured and NCCL cannot capture
   exchanges. */
static int stx__group_fork(stx_ctx *x, stx_gpu *g, const char *what) {
    stx__group *c = g->group;
    if (g->capturing && c->no_capture[0]) return 0;
    c->forked = 1;
    return stx__cuda_ok(x, g, cudaEventRecord(c->ready, g->stream), what)
           && stx__cuda_ok(x, g, cudaStreamWaitEvent(c->stream, c->ready, 0), what);
}

/* The join: further work on the context's stream waits for the group's work so far.
   Also required after an error, because streams that were forked in a capture must be
   joined. */
static cudaError_t stx__group_join_streams(stx_gpu *g) {
    stx__group *c = g->group;
    cudaError_t e;
    if (!c || !c->forked) return cudaSuccess;
    c->forked = 0;
    e = cudaEventRecord(c->done, c->stream);
    return e == cudaSuccess ? cudaStreamWaitEvent(g->stream, c->done, 0) : e;
}

/* Called before a capture. Returns 0 if steps of this group cannot be captured. Before
   the first capture, waits for all pending work, because the communicator may fail with
   the capture. */
static int stx__group_may_capture(stx_ctx *x, stx_gpu *g) {
    const stx__group *c = g->group;
    if (!stx__group_is_alive(g) || c->captured) return 1;
    if (!c->no_capture[0]) return stx__wait(x, g, g->stream, NULL, "stx_step_run");
    snprintf(g->graph_error, sizeof g->graph_error, "%s", c->no_capture);
    return 0;
}

/* Called after a capture. Ends the communicator if the group was given up during the
   capture, and replaces it if it failed in the first capture. */
static void stx__group_after_capture(stx_ctx *x, stx_gpu *g, int captured) {
    static const char what[] = "stx_step_run";
    stx__group *c = g->group;
    ncclResult_t state = ncclSuccess;
    if (!c) return;
    if (c->given_up) stx__group_give_up(g);
    if (captured) c->captured = 1;
    if (!c->comm || !c->no_capture[0]) return;

    snprintf(g->graph_error, sizeof g->graph_error, "%s", c->no_capture);
    if (ncclCommGetAsyncError(c->comm, &state) == ncclSuccess
        && (state == ncclSuccess || state == ncclInProgress))
        return;
    if (c->captured) { /* other graphs contain exchanges of this communicator */
        stx_fail(x, STX_ERR_DEVICE, "%s: rank %d of %d: %s: set desc.no_graph", what, c->rank,
                 c->ranks, c->no_capture);
        stx__group_give_up(g);
        return;
    }
    (void)ncclCommAbort(c->comm);
    c->comm = NULL;
    stx__group_connect(x, g, c->spare, what);
}
#else
static void stx__group_free(stx_gpu *g) {
    (void)g;
}

static cudaError_t stx__group_join_streams(stx_gpu *g) {
    (void)g;
    return cudaSuccess;
}

static int stx__group_may_capture(stx_ctx *x, stx_gpu *g) {
    (void)x;
    (void)g;
    return 1;
}

static void stx__group_after_capture(stx_ctx *x, stx_gpu *g, int captured) {
    (void)x;
    (void)g;
    (void)captured;
}
#endif /* SEQTX_NCCL */


/* ---- src/cuda/device.cuh ---- */
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


/* ---- src/cuda/graph.cuh ---- */
// >>graph

/* If e is an error, records it for stx_step_replay_status and returns 1. This does not
   set the context's error: without a graph, the step is relaunched, which is slower but
   equivalent. If the device itself has failed, the next launch reports it. */
static int stx__no_graph(stx_gpu *g, cudaError_t e, const char *what) {
    g->graph_error[0] = 0;
    if (e == cudaSuccess) return 0;
    (void)cudaGetLastError();
    snprintf(g->graph_error, sizeof g->graph_error, "CUDA %s: %s (%.60s)", what,
             cudaGetErrorName(e), cudaGetErrorString(e));
    return 1;
}

int stx_cuda_capturing(const stx_ctx *x) {
    return stx__gpu(x) && stx__gpu(x)->capturing;
}

int stx_cuda_capture_begin(stx_ctx *x) {
    stx_gpu *g = stx__use_gpu(x);
    cudaError_t e;
    if (!stx_ok(x) || g->capturing) return 0;
    /* pending exchanges are not part of the step */
    if (!stx__cuda_ok(x, g, stx__group_join_streams(g), "stx_step_run")) return 0;
    if (!stx__group_may_capture(x, g)) return 0;
    e = cudaStreamBeginCapture(g->stream, cudaStreamCaptureModeThreadLocal);
    if (stx__no_graph(g, e, "cannot capture the step")) return 0;
    g->capturing = g->repeatable = 1;
    return 1;
}

const char *stx_cuda_capture_error(const stx_ctx *x) {
    return stx__gpu(x)->graph_error;
}

/* Instantiates a captured graph. If that fails, sets g->graph_error and returns NULL. */
static stx_graph *stx__graph_make(stx_gpu *g, cudaGraph_t graph) {
    stx_graph *r = (stx_graph *)calloc(1, sizeof *r);
    if (!r) {
        snprintf(g->graph_error, sizeof g->graph_error, "out of host memory for a graph");
        return NULL;
    }
    if (stx__no_graph(g, cudaGraphInstantiate(&r->exec, graph, 0),
                      "cannot instantiate the graph")) {
        free(r);
        return NULL;
    }
    r->next = g->graphs;
    g->graphs = r;
    return r;
}

stx_graph *stx_cuda_capture_end(stx_ctx *x) {
    stx_gpu *g = stx__use_gpu(x);
    cudaGraph_t graph = NULL;
    stx_graph *r = NULL;
    int failed;
    /* a step that did not reach its update has not joined the streams yet */
    (void)stx__group_join_streams(g);
    failed = stx__no_graph(g, cudaStreamEndCapture(g->stream, &graph), "cannot capture the step");
    g->capturing = 0;
    if (!failed && !g->repeatable)
        snprintf(g->graph_error, sizeof g->graph_error,
                 "during its capture, the step transferred data between host and GPU, or freed "
                 "GPU memory");
    if (graph && !failed && g->repeatable && stx_ok(x)) r = stx__graph_make(g, graph);
    if (graph) (void)cudaGraphDestroy(graph);
    stx__group_after_capture(x, g, r != NULL);
    return r;
}

void stx_cuda_graph_launch(stx_ctx *x, stx_graph *r) {
    stx_gpu *g = stx__use_gpu(x);
    if (stx_ok(x) && r && !r->exec)
        stx_fail(x, STX_ERR_ARG,
                 "stx_step_run: the step was captured in a group that has ended");
    if (stx_ok(x) && r)
        stx__cuda_ok(x, g, cudaGraphLaunch(r->exec, g->stream),
                     "replaying a step (desc.no_graph and CUDA_LAUNCH_BLOCKING=1 show which op "
                     "fails)");
}

void stx_cuda_graph_free(stx_ctx *x, stx_graph *r) {
    stx_graph **at;
    if (!r) return;
    stx_cuda_sync(x);
    at = &stx__gpu(x)->graphs;
    while (*at && *at != r) at = &(*at)->next;
    if (*at) *at = r->next;
    if (r->exec) (void)cudaGraphExecDestroy(r->exec);
    free(r);
}


/* ---- src/cuda/group.cuh ---- */
// >>group

#ifdef SEQTX_NCCL

/* Returns nonzero if the context is in a group that has not ended. Otherwise sets an
   error and returns 0. */
static int stx__group_check(stx_ctx *x, const stx_gpu *g, const char *what) {
    if (!stx_ok(x)) return 0;
    if (stx__group_is_alive(g)) return 1;
    stx_fail(x, STX_ERR_DEVICE, "%s: the context is not in a group, or its group has ended", what);
    return 0;
}

/* Extracts the first host of a SLURM host list: gpu03 from "gpu[03-05,9]", gpu03-ib from
   "gpu03-ib,gpu07". Returns 0 if the host name is empty or does not fit in `out`. */
static int stx__first_host(char *out, size_t size, const char *list) {
    size_t n = 0;
    int in = 0, first = 1; /* `in`: inside brackets; `first`: in the first number of the
                              brackets */
    for (; *list && (in || *list != ','); list++) {
        if (*list == '[' || *list == ']') {
            in = *list == '[';
            first = 1;
            continue;
        }
        if (in && (*list == '-' || *list == ',')) first = 0;
        if (in && !first) continue;
        if (n + 1 >= size) return 0;
        out[n++] = *list;
    }
    out[n] = 0;
    return n > 0;
}

/* Sets NCCL_COMM_ID to the address at which rank 0 listens: MASTER_ADDR, or the first
   host of SLURM's list, with port MASTER_PORT + 1. ncclGetUniqueId then returns the
   same id on all ranks. Returns 1, or sets an error and returns 0. */
static int stx__group_address(stx_ctx *x) {
    const char *addr = getenv("MASTER_ADDR"), *port = getenv("MASTER_PORT"),
               *list = getenv("SLURM_STEP_NODELIST"), *format;
    char host[256], id[300], *end;
    long n = 29500;
    if (getenv("NCCL_COMM_ID") && *getenv("NCCL_COMM_ID")) return 1;
    if (!list || !*list) list = getenv("SLURM_JOB_NODELIST");
    if (!addr || !*addr) {
        if (!list || !*list) {
            stx_fail(x, STX_ERR_DEVICE,
                     "stx_group_join: the address of rank 0 is unknown: set MASTER_ADDR (and "
                     "MASTER_PORT), as torchrun does, set NCCL_COMM_ID=host:port, or start the "
                     "ranks with srun, which sets SLURM_STEP_NODELIST");
            return 0;
        }
        addr = stx__first_host(host, sizeof host, list) ? host : NULL;
    }
    if (port && *port) {
        n = strtol(port, &end, 10);
        if (*end) n = 0;
    }
    if (!addr || strlen(addr) >= sizeof host || n < 1 || n > 65534) {
        stx_fail(x, STX_ERR_DEVICE,
                 "stx_group_join: expected the host of rank 0 and a port from 1 to 65534, got "
                 "MASTER_ADDR %.80s, MASTER_PORT %.40s and SLURM host list %.80s",
                 addr ? addr : "missing", port ? port : "missing", list ? list : "missing");
        return 0;
    }
    /* an IPv6 address is written in brackets */
    format = strchr(addr, ':') && addr[0] != '[' ? "[%s]:%ld" : "%s:%ld";
    snprintf(id, sizeof id, format, addr, n + 1);
    if (setenv("NCCL_COMM_ID", id, 1) == 0) return 1;
    stx_fail(x, STX_ERR_MEMORY, "stx_group_join: out of host memory");
    return 0;
}

int stx_cuda_group_id(stx_ctx *x, void *id, int by_address) {
    ncclUniqueId u;
    ncclResult_t r;
    static_assert(sizeof u == STX_NCCL_ID, "STX_NCCL_ID must be the size of ncclUniqueId");
    if (!stx__use_gpu(x) || !stx_ok(x) || (by_address && !stx__group_address(x))) return 0;
    memset(&u, 0, sizeof u);
    r = ncclGetUniqueId(&u);
    if (r != ncclSuccess)
        stx_fail(x, STX_ERR_DEVICE, "stx_group_join: NCCL error \"%s\" (%.200s)%s%.80s",
                 ncclGetErrorString(r), ncclGetLastError(NULL),
                 by_address ? ": NCCL_COMM_ID is " : "", by_address ? getenv("NCCL_COMM_ID") : "");
    memcpy(id, &u, sizeof u);
    return stx_ok(x);
}

/* Creates the stream, events and buffers of a group. */
static int stx__group_open(stx_ctx *x, stx_gpu *g, const char *what) {
    stx__group *c = g->group;
    if (!stx__cuda_ok(x, g, cudaStreamCreateWithFlags(&c->stream, cudaStreamNonBlocking), what)
        || !stx__cuda_ok(x, g, cudaEventCreateWithFlags(&c->ready, cudaEventDisableTiming), what)
        || !stx__cuda_ok(x, g, cudaEventCreateWithFlags(&c->done, cudaEventDisableTiming), what)
        || !stx__cuda_ok(x, g, cudaMallocHost((void **)&c->pinned, STX__GROUP_BYTES), what)
        || !stx__cuda_ok(x, g, cudaMalloc((void **)&c->device, STX__GROUP_BYTES), what))
        return 0;
    g->bytes += STX__GROUP_BYTES;
    return 1;
}

int stx_cuda_group_join(stx_ctx *x, const void *id, int rank, int ranks) {
    static const char what[] = "stx_group_join";
    stx_gpu *g = stx__use_gpu(x);
    const char *seconds = getenv("SEQTX_GROUP_TIMEOUT");
    ncclUniqueId u;
    stx__group *c;
    int version = 0;
    if (!g || !stx_ok(x)) return 0;
    if (g->group) {
        stx_fail(x, STX_ERR_ARG, "%s: the context is already in a group; it can join only once",
                 what);
        return 0;
    }
    if (ncclGetVersion(&version) != ncclSuccess || version < NCCL_VERSION(2, 14, 0)) {
        stx_fail(x, STX_ERR_DEVICE,
                 "%s: expected NCCL 2.14 (code %d) or newer, got version code %d", what,
                 NCCL_VERSION(2, 14, 0), version);
        return 0;
    }
    c = (stx__group *)calloc(1, sizeof *c);
    if (!c) {
        stx_fail(x, STX_ERR_MEMORY, "%s: out of host memory", what);
        return 0;
    }
    g->group = c;
    c->rank = rank;
    c->ranks = ranks;
    c->timeout = seconds ? strtod(seconds, NULL) : 0;
    if (!(c->timeout > 0)) c->timeout = 600;
    memcpy(&u, id, sizeof u);
    /* rank 0 creates the id of the spare communicator and broadcasts it */
    if (stx__group_open(x, g, what) && stx__group_connect(x, g, u, what)
        && (rank || stx__nccl_ok(x, g, ncclGetUniqueId(&c->spare), what)))
        stx_cuda_group_broadcast(x, &c->spare, sizeof c->spare, 0);
    if (!stx_ok(x)) stx__group_free(g);
    return stx_ok(x);
}

static const char stx__mean_of_gradients[] = "averaging the ranks' gradients";

void stx_cuda_group_mean(stx_ctx *x, stx_real *p, size_t n, int owner) {
    static const char *const what = stx__mean_of_gradients;
    stx_gpu *g = stx__use_gpu(x);
    stx__group *c = g->group;
    ncclResult_t r;
    if (!n || !stx__group_check(x, g, what) || !stx__group_fork(x, g, what)) return;
    if (owner < 0)
        r = ncclAllReduce(p, p, n, ncclFloat, ncclAvg, c->comm, c->stream);
    else
        r = ncclReduce(p, p, n, ncclFloat, ncclAvg, owner, c->comm, c->stream);
    stx__nccl_ok(x, g, r, what);
}

void stx_cuda_group_spread(stx_ctx *x, stx_real *p, size_t n, int owner) {
    static const char what[] = "broadcasting the ranks' parameters";
    stx_gpu *g = stx__use_gpu(x);
    stx__group *c = g->group;
    if (!n || !stx__group_check(x, g, what) || !stx__group_fork(x, g, what)) return;
    stx__nccl_ok(x, g, ncclBroadcast(p, p, n, ncclFloat, owner, c->comm, c->stream), what);
}

void stx_cuda_group_wait(stx_ctx *x) {
    stx_gpu *g = stx__use_gpu(x);
    if (stx_ok(x)) stx__cuda_ok(x, g, stx__group_join_streams(g), stx__mean_of_gradients);
}

void stx_cuda_group_sum(stx_ctx *x, double *p, size_t n) {
    static const char what[] = "summing over the ranks' parameters";
    stx_gpu *g = stx__use_gpu(x);
    stx__group *c = g->group;
    if (!n || !stx__group_check(x, g, what) || !stx__group_fork(x, g, what)) return;
    stx__nccl_ok(x, g, ncclAllReduce(p, p, n, ncclDouble, ncclSum, c->comm, c->stream), what);
    stx_cuda_group_wait(x);
}

/* Exchanges of host memory pass through the buffers of the group, in parts of at most
   STX__GROUP_BYTES. Callers call stx__group_begin once, then stx__group_put, an NCCL
   call and stx__group_end for each part. An exchange waits for all earlier work, even
   for work whose results it does not need: all ranks must enqueue the exchanges of a
   communicator in the same order, and replayed steps contain exchanges too. */
static int stx__group_begin(stx_ctx *x, stx_gpu *g, const char *what) {
    /* a step that exchanges host memory cannot be replayed: instead, the step is
       launched again, and the exchange runs then */
    return stx__group_check(x, g, what) && stx__host_copy_allowed(g) && stx__group_fork(x, g, what);
}

static int stx__group_put(stx_ctx *x, stx_gpu *g, const void *part, size_t bytes,
                          const char *what) {
    stx__group *c = g->group;
    cudaError_t e;
    memcpy(c->pinned, part, bytes);
    e = cudaMemcpyAsync(c->device, c->pinned, bytes, cudaMemcpyHostToDevice, c->stream);
    return stx__cuda_ok(x, g, e, what);
}

/* Copies a part of an exchange from the device to `to`, unless `to` is NULL. Waits in
   both cases, because the next part uses the same memory. */
static int stx__group_end(stx_ctx *x, stx_gpu *g, void *to, size_t bytes, const char *what) {
    stx__group *c = g->group;
    if (to) {
        cudaError_t e = cudaMemcpyAsync(c->pinned, c->device, bytes, cudaMemcpyDeviceToHost,
                                        c->stream);
        if (!stx__cuda_ok(x, g, e, what)) return 0;
    }
    if (!stx__wait(x, g, c->stream, NULL, what)) return 0;
    if (to) memcpy(to, c->pinned, bytes);
    return 1;
}

/* Reduces n doubles on the device to rank 0 and broadcasts the result. If each rank
   reduced them separately, the last bits might differ between ranks. */
static int stx__group_reduce_part(stx_ctx *x, stx_gpu *g, size_t n, ncclRedOp_t op,
                                  const char *what) {
    stx__group *c = g->group;
    char *p = c->device;
    return stx__nccl_ok(x, g, ncclReduce(p, p, n, ncclDouble, op, 0, c->comm, c->stream), what)
           && stx__nccl_ok(x, g, ncclBroadcast(p, p, n, ncclDouble, 0, c->comm, c->stream), what);
}

int stx_cuda_group_reduce(stx_ctx *x, double *v, size_t n, int most) {
    static const char what[] = "stx_group_sum";
    const ncclRedOp_t op = most ? ncclMax : ncclSum;
    stx_gpu *g = stx__use_gpu(x);
    size_t m, bytes;
    int ok = n && stx__group_begin(x, g, what);
    for (; ok && n; v += m, n -= m) {
        m = STX_MIN(n, STX__GROUP_BYTES / sizeof *v);
        bytes = m * sizeof *v;
        ok = stx__group_put(x, g, v, bytes, what) && stx__group_reduce_part(x, g, m, op, what)
             && stx__group_end(x, g, v, bytes, what);
    }
    return stx_ok(x);
}

int stx_cuda_group_broadcast(stx_ctx *x, void *bytes, size_t n, int from) {
    static const char what[] = "stx_group_broadcast";
    stx_gpu *g = stx__use_gpu(x);
    stx__group *c;
    char *at = (char *)bytes;
    size_t m;
    int ok = n && stx__group_begin(x, g, what);
    for (c = g->group; ok && n; at += m, n -= m) {
        ncclResult_t r;
        m = STX_MIN(n, (size_t)STX__GROUP_BYTES);
        if (c->rank == from && !stx__group_put(x, g, at, m, what)) break;
        r = ncclBroadcast(c->device, c->device, m, ncclUint8, from, c->comm, c->stream);
        ok = stx__nccl_ok(x, g, r, what)
             && stx__group_end(x, g, c->rank == from ? NULL : at, m, what);
    }
    return stx_ok(x);
}

int stx_cuda_group_send(stx_ctx *x, void *bytes, size_t n, int from, int to) {
    static const char what[] = "stx_group_send_bytes";
    stx_gpu *g = stx__use_gpu(x);
    stx__group *c;
    char *at = (char *)bytes;
    size_t m;
    int ok = n && stx__group_begin(x, g, what);
    for (c = g->group; ok && n; at += m, n -= m) {
        ncclResult_t r;
        m = STX_MIN(n, (size_t)STX__GROUP_BYTES);
        if (c->rank == from) {
            if (!stx__group_put(x, g, at, m, what)) break;
            r = ncclSend(c->device, m, ncclUint8, to, c->comm, c->stream);
            ok = stx__nccl_ok(x, g, r, what) && stx__group_end(x, g, NULL, m, what);
        } else if (c->rank == to) {
            r = ncclRecv(c->device, m, ncclUint8, from, c->comm, c->stream);
            ok = stx__nccl_ok(x, g, r, what) && stx__group_end(x, g, at, m, what);
        } else {
            break;
        }
    }
    return stx_ok(x);
}

void stx_cuda_group_leave(stx_ctx *x) {
    static const char what[] = "stx_group_leave";
    stx_gpu *g = stx__use_gpu(x);
    stx__group *c = g ? g->group : NULL;
    if (!c) return;
    /* finalise together with the other ranks. This is skipped after an error, because
       the other ranks may have ended then */
    if (stx_ok(x) && c->comm && stx__cuda_ok(x, g, stx__group_join_streams(g), what)
        && stx__wait(x, g, g->stream, NULL, what)) {
        stx__graphs_end(g);
        if (stx__nccl_ok(x, g, ncclCommFinalize(c->comm), what)) {
            (void)ncclCommDestroy(c->comm);
            c->comm = NULL;
        }
    }
    stx__group_free(g);
}

void stx_cuda_group_abort(stx_ctx *x) {
    stx_gpu *g = stx__use_gpu(x);
    if (g) stx__group_give_up(g);
}
#endif /* SEQTX_NCCL */


/* ---- src/cuda/sru.cuh ---- */
// >>recurrence

#ifdef SEQTX_SRU_H
/* The recurrence of stx_sru_args, with the letters defined there. In bfloat16 it moves
   10 bytes per column and step for about 40 instructions. Its speed is therefore
   limited by memory or, with few columns, by the latency of the chain c -> f -> c,
   about 60 cycles per step. Loads must start long before they are needed, and columns
   must be distributed over the whole GPU. A warp therefore processes 32 columns of one
   batch row and one direction, one column per lane (64 bytes per plane and step in
   bfloat16). A plane is one of the adjacent arrays in u or V.

   Forward: a block is one warp, which walks all steps. A ring of cp.async stages in
   shared memory loads 40 or more steps ahead.

   Forward without v and V (scan): f does not depend on c, so a tile of 32 steps turns c
   into P c + Q. With few columns, each warp of a block processes a different tile. The
   warps exchange P and Q, and each computes its initial state from them. Inputs are
   read from global memory only once.

       step     0      32      64      96     128
                |--------|-------|-------|-------|
       warp         0        1       2       3       P, Q; exchange; then states and h

   Backward: a warp loads a tile, recomputes its states from the saved one, then walks
   back. For any v, a tile turns the adjoint e after it into P e + Q before it (see J
   below). With few columns, the warps of a block therefore process one tile each here
   too. P and Q are computed together with the states. If there are several warps, their
   number does not affect how e passes from tile to tile.

   A single warp loads the next tile meanwhile if data is in bfloat16. There are three
   slots of half a tile. If A and B contain tile 3:

       computed                      loaded
       ----------------------------  ----------------------------------
       states of tile 3              first half of tile 2, to C
       back to the middle of tile 3
       back to the start of tile 3   second half of tile 2, to B
       states of tile 2              first half of tile 1, to A

   The kernel and the number of warps depend on sizes alone, so results do not depend on
   the GPU. Arithmetic is in float. Parameter gradients are summed over the tiles of a
   warp, then over warps, then over batch rows, each in a fixed order.

   One warp processes all tiles of its columns if there are STX__SRU_ONE_WARP columns or
   more. Otherwise four warps share them, or eight if there are fewer than
   STX__SRU_FOUR_WARPS columns. STX__SRU_SHARED is the largest shared memory of a block
   in bytes, STX__SRU_SLOT the number of elements in one plane of a tile. */
enum {
    STX__SRU_ONE_WARP = 30000,
    STX__SRU_FOUR_WARPS = 8192,
    STX__SRU_SHARED = 96 << 10,
    STX__SRU_SLOT = 32 * STX_SRU_TILE
};

typedef struct stx__sru {
    size_t T, H, O, k, tiles;
    size_t groups; /* groups of 32 columns per direction */
    int D, add_xr;
    float alpha; /* scale of the highway; 1 for k = 4 */
    stx__array u, xr, V, h, last, v, bias, c0, m, dh, dlast, du, dV, dxr, dc0;
    const int32_t *pad;
    float *c;    /* (B,tiles,O): the state before each tile; or NULL */
    float *part; /* (B,4,O): dvf, dvr, dbf, dbr of each batch row; or NULL */
} stx__sru;

/* The column of a lane: column o of batch row b. A lane beyond the last column
   duplicates lane 0 and stores the same values, so no conditions are needed. Step n, in
   the order of the direction, is row stx__sru_row(n) of (B,T). */
typedef struct stx__sru_column {
    size_t b, o, o0; /* o0: column of lane 0 */
    size_t first;    /* row of step 0 */
    int lane, width, back;
    int col;              /* index among the warp's columns */
    float vf, vr, bf, br; /* gate parameters times -log2 e, so that e^-z is a power of 2 */
    float m;
} stx__sru_column;

  #define STX__NLOG2E (-1.44269504088896340736f)

static __device__ __forceinline__ size_t stx__sru_row(const stx__sru_column &q, size_t n) {
    return q.back ? q.first - n : q.first + n;
}

/* Returns a[i], or `none` if the array is NULL. */
static __device__ __forceinline__ float stx__sru_get_or(const stx__array &a, size_t i, float none) {
    return a.p ? stx__get(a, i) : none;
}

static __device__ __forceinline__ stx__sru_column stx__sru_column_of(const stx__sru &p) {
    stx__sru_column q;
    size_t at = blockIdx.x, s, j0;
    q.b = at / (p.groups * p.D);
    at -= q.b * p.groups * p.D;
    s = at / p.groups;
    j0 = (at - s * p.groups) * 32;
    q.lane = threadIdx.x % 32;
    q.width = p.H - j0 < 32 ? (int)(p.H - j0) : 32;
    q.col = q.lane < q.width ? q.lane : 0;
    q.back = s == 1;
    q.o0 = s * p.H + j0;
    q.o = q.o0 + q.col;
    q.first = q.b * p.T + (q.back ? p.T - 1 : 0);
    q.vf = STX__NLOG2E * stx__sru_get_or(p.v, q.o, 0);
    q.vr = STX__NLOG2E * stx__sru_get_or(p.v, p.O + q.o, 0);
    q.bf = STX__NLOG2E * stx__sru_get_or(p.bias, q.o, 0);
    q.br = STX__NLOG2E * stx__sru_get_or(p.bias, p.O + q.o, 0);
    q.m = stx__sru_get_or(p.m, q.b * p.O + q.o, 1);
    return q;
}

/* An array that a warp reads, in planes of 32 columns. p is the first 16-byte piece of
   this lane at step 0. `by` and `plane` are the strides in bytes between steps and
   between planes. `there` is 0 if this lane has nothing to read. */
typedef struct stx__sru_input {
    const char *p;
    ptrdiff_t by, plane;
    int there;
} stx__sru_input;

template <class E>
static __device__ __forceinline__ stx__sru_input stx__sru_input_of(const stx__array &a, size_t ld,
                                                                   size_t plane, const stx__sru &p,
                                                                   const stx__sru_column &q) {
    constexpr int IN = 16 / (int)sizeof(E), PIECES = 32 / IN;
    stx__sru_input f;
    f.by = (q.back ? -(ptrdiff_t)ld : (ptrdiff_t)ld) * (ptrdiff_t)sizeof(E);
    f.p = (const char *)((const E *)a.p + q.first * ld + plane + q.o0 + q.lane % PIECES * IN)
          + q.lane / PIECES * f.by;
    f.plane = (ptrdiff_t)(p.O * sizeof(E));
    f.there = a.p && q.lane % PIECES * IN < q.width;
    return f;
}

/* Starts copying steps n0 .. n0+STEPS-1 to PLANES slots (STEPS,32), 16 bytes at a time.
   Pieces beyond the end of an array are filled with zeros. Their source address is u,
   because the computed address may be outside any array. */
template <class E, int STEPS, int PLANES>
static __device__ __forceinline__ void stx__sru_fetch(E *slot, const stx__sru_input &f,
                                                      const stx__sru &p, const stx__sru_column &q,
                                                      size_t n0) {
    constexpr int IN = 16 / (int)sizeof(E), PIECES = 32 / IN, ROWS = 32 / PIECES;
    const char *from = f.p + (ptrdiff_t)n0 * f.by;
    const int i = q.lane / PIECES;
    int left = 0;
    E *to = slot + q.lane * IN;
    if (f.there && p.T > n0) left = p.T - n0 < (size_t)STEPS ? (int)(p.T - n0) : STEPS;
  #pragma unroll
    for (int j = 0; j < STEPS / ROWS; j++) {
  #pragma unroll
        for (int k = 0; k < PLANES; k++) {
            const int yes = i + j * ROWS < left;
            stx__cp16(to + (k * STEPS + j * ROWS) * 32,
                      yes ? from + k * f.plane : (const char *)p.u.p, yes ? 16 : 0);
        }
        from += ROWS * f.by;
    }
}

/* Copies one plane of an array with any storage and alignment. Each lane copies its own
   column, element by element. */
template <class E, int STEPS>
static __device__ __forceinline__ void stx__sru_fetch_plain(E *slot, const stx__array &a, size_t ld,
                                                            size_t plane, const stx__sru &p,
                                                            const stx__sru_column &q, size_t n0) {
  #pragma unroll 4
    for (int i = 0; i < STEPS; i++)
        slot[i * 32 + q.lane] = a.p && n0 + i < p.T
                                    ? stx__get(a, stx__sru_row(q, n0 + i) * ld + plane + q.o)
                                    : 0.0f;
}

/* The inputs of a tile, in this order of slots: u0, u1, u2, the highway (u3 or xr),
   with HASV the two planes of V, and with BACK dh and, if gradients are added to it,
   dxr. PLAIN supports any storage and alignment. */
template <class E, int PLAIN, int HASV, int STEPS, int BACK> struct stx__sru_source {
    stx__sru_input u, x, V, dh, dxr;

    __device__ __forceinline__ stx__sru_source(const stx__sru &p, const stx__sru_column &q) {
        if (PLAIN) return;
        u = stx__sru_input_of<E>(p.u, p.k * p.O, 0, p, q);
        x = p.k == 4 ? stx__sru_input_of<E>(p.u, 4 * p.O, 3 * p.O, p, q)
                     : stx__sru_input_of<E>(p.xr, p.O, 0, p, q);
        if (HASV) V = stx__sru_input_of<E>(p.V, 2 * p.O, 0, p, q);
        if (BACK) dh = stx__sru_input_of<E>(p.dh, p.O, 0, p, q);
        if (BACK) dxr = stx__sru_input_of<E>(p.dxr, p.O, 0, p, q);
    }

    __device__ __forceinline__ void fetch(E *slot, const stx__sru &p, const stx__sru_column &q,
                                          size_t n0) const {
        constexpr int N = 32 * STEPS, GRAD = HASV ? 6 : 4;
        if constexpr (PLAIN) {
            for (int i = 0; i < 3; i++)
                stx__sru_fetch_plain<E, STEPS>(slot + i * N, p.u, p.k * p.O, i * p.O, p, q, n0);
            stx__sru_fetch_plain<E, STEPS>(slot + 3 * N, p.k == 4 ? p.u : p.xr,
                                           p.k == 4 ? 4 * p.O : p.O, p.k == 4 ? 3 * p.O : 0, p, q,
                                           n0);
            if (HASV)
                for (int i = 0; i < 2; i++)
                    stx__sru_fetch_plain<E, STEPS>(slot + (4 + i) * N, p.V, 2 * p.O, i * p.O, p, q,
                                                   n0);
            if (BACK) stx__sru_fetch_plain<E, STEPS>(slot + GRAD * N, p.dh, p.O, 0, p, q, n0);
            if (BACK && p.add_xr)
                stx__sru_fetch_plain<E, STEPS>(slot + (GRAD + 1) * N, p.dxr, p.O, 0, p, q, n0);
        } else {
            stx__sru_fetch<E, STEPS, 3>(slot, u, p, q, n0);
            stx__sru_fetch<E, STEPS, 1>(slot + 3 * N, x, p, q, n0);
            if (HASV) stx__sru_fetch<E, STEPS, 2>(slot + 4 * N, V, p, q, n0);
            if (BACK) stx__sru_fetch<E, STEPS, 1>(slot + GRAD * N, dh, p, q, n0);
            if (BACK && p.add_xr) stx__sru_fetch<E, STEPS, 1>(slot + (GRAD + 1) * N, dxr, p, q, n0);
        }
        stx__cp_commit();
    }
};

static __device__ __forceinline__ float stx__sru_float(float v) {
    return v;
}

static __device__ __forceinline__ float stx__sru_float(stx__bf16 v) {
    return __bfloat162float(v);
}

static __device__ __forceinline__ void stx__sru_store(float *p, float v) {
    *p = v;
}

static __device__ __forceinline__ void stx__sru_store(stx__bf16 *p, float v) {
    *p = __float2bfloat16(v);
}

/* A pointer into an array that is written step by step. */
template <class E, int PLAIN> struct stx__sru_output {
    E *p;

    __device__ __forceinline__ stx__sru_output(const stx__array &a, size_t i) : p((E *)a.p + i) {}

    __device__ __forceinline__ void put(size_t i, float v) const {
        stx__sru_store(p + i, v);
    }

    __device__ __forceinline__ void step(ptrdiff_t by) {
        p += by;
    }
};

template <class E> struct stx__sru_output<E, 1> {
    stx__array a;
    size_t at;

    __device__ __forceinline__ stx__sru_output(const stx__array &b, size_t i) : a(b), at(i) {}

    __device__ __forceinline__ void put(size_t i, float v) const {
        stx__put(a, at + i, v);
    }

    __device__ __forceinline__ void step(ptrdiff_t by) {
        at += (size_t)by;
    }
};

/* These functions find steps to skip. stx__sru_pad returns nonzero if step n is
   padding. stx__sru_skips returns a bit mask of the steps to skip among the 32 from n0:
   padding and steps beyond the last one. Its argument `pad` is the result of
   stx__sru_pad for step n0 + lane. */
static __device__ __forceinline__ int stx__sru_pad(const stx__sru &p, const stx__sru_column &q,
                                                   size_t n) {
    return p.pad && n < p.T ? p.pad[stx__sru_row(q, n)] != 0 : 0;
}

static __device__ __forceinline__ uint32_t stx__sru_skips(const stx__sru &p,
                                                          const stx__sru_column &q, size_t n0,
                                                          int pad) {
    return __ballot_sync(STX__ALL, pad || n0 + q.lane >= p.T);
}

/* Returns sigmoid(u + v c + b) at index `at` of slots (STEPS,32). Gate 0 is the forget
   gate, gate 1 the reset gate. */
template <class E, int HASV, int STEPS>
static __device__ __forceinline__ float stx__sru_gate(const E *slot, int gate, int at,
                                                      const stx__sru_column &q, float c) {
    float v = gate ? q.vr : q.vf, z = fmaf(stx__sru_float(slot[(1 + gate) * 32 * STEPS + at]),
                                           STX__NLOG2E, gate ? q.br : q.bf);
    if (HASV) v = fmaf(stx__sru_float(slot[(4 + gate) * 32 * STEPS + at]), STX__NLOG2E, v);
    return stx__rcp(1.0f + stx__exp2(fmaf(v, c, z)));
}

/* Returns h = xt + (g(c) - xt) m r, see stx_sru_args. */
template <class E, int TANH, int STEPS>
static __device__ __forceinline__ float stx__sru_out(const E *slot, int at, const stx__sru &p,
                                                     const stx__sru_column &q, float c, float r) {
    float xt = p.alpha * stx__sru_float(slot[3 * 32 * STEPS + at]), g = TANH ? tanhf(c) : c;
    return fmaf(g - xt, q.m * r, xt);
}

/* Runs STEPS steps from n0, with inputs from `slot`, and returns the last state. A set
   bit in `skip` marks a step to skip; with FULL, there are none. With SCAN, v is 0. */
template <class E, int PLAIN, int HASV, int TANH, int STEPS, int FULL, int SCAN>
static __device__ __forceinline__ float stx__sru_steps(const E *slot, const stx__sru &p,
                                                       const stx__sru_column &q, size_t n0,
                                                       uint32_t skip, float c) {
    stx__sru_output<E, PLAIN> to(p.h, stx__sru_row(q, n0) * p.O + q.o);
    const ptrdiff_t by = q.back ? -(ptrdiff_t)p.O : (ptrdiff_t)p.O;
  #pragma unroll(!FULL ? 1 : PLAIN ? 4 : STEPS < 16 ? STEPS : 16)
    for (int i = 0; i < STEPS; i++, to.step(by)) {
        int at = i * 32 + q.col;
        if (!FULL && (skip >> i & 1)) {
            if (n0 + i < p.T) to.put(0, 0);
            continue;
        }
        float u0 = stx__sru_float(slot[at]);
        float f = stx__sru_gate<E, HASV, STEPS>(slot, 0, at, q, SCAN ? 0 : c);
        float r = stx__sru_gate<E, HASV, STEPS>(slot, 1, at, q, SCAN ? 0 : c);
        c = fmaf(c - u0, f, u0);
        to.put(0, stx__sru_out<E, TANH, STEPS>(slot, at, p, q, c, r));
    }
    return c;
}

/* Forward. A block is one warp (launch bound 32). The ring has STAGES stages of STEPS
   steps; all but one are in flight. */
template <class E, int PLAIN, int HASV, int TANH> STX__GLOBAL(32) stx__sru_fwd_kernel(stx__sru p) {
    constexpr int STEPS = sizeof(E) == 2 ? 16 : 8, STAGES = sizeof(E) == 2 ? 4 : 6,
                  STAGE = (HASV ? 6 : 4) * 32 * STEPS;
    STX__SHARED(E, ring, STAGES * STAGE);
    const stx__sru_column q = stx__sru_column_of(p);
    const stx__sru_source<E, PLAIN, HASV, STEPS, 0> from(p, q);
    float c = stx__sru_get_or(p.c0, q.b * p.O + q.o, 0);
    int at = 0, pad = stx__sru_pad(p, q, q.lane);
    for (int s = 0; s + 1 < STAGES; s++) from.fetch(ring + s * STAGE, p, q, (size_t)s * STEPS);
    for (size_t n0 = 0; n0 < p.T; n0 += STEPS) {
        uint32_t skip = stx__sru_skips(p, q, n0, pad) & ((1u << STEPS) - 1);
        pad = stx__sru_pad(p, q, n0 + STEPS + q.lane);
        stx__cp_wait<STAGES - 2>();
        /* all lanes now see this stage, and no lane still reads the previous one */
        __syncwarp();
        from.fetch(ring + (at ? at - 1 : STAGES - 1) * STAGE, p, q, n0 + (STAGES - 1) * STEPS);
        if (p.c && n0 % STX_SRU_TILE == 0) p.c[(q.b * p.tiles + n0 / STX_SRU_TILE) * p.O + q.o] = c;
        if (skip)
            c = stx__sru_steps<E, PLAIN, HASV, TANH, STEPS, 0, 0>(ring + at * STAGE, p, q, n0, skip,
                                                                  c);
        else
            c = stx__sru_steps<E, PLAIN, HASV, TANH, STEPS, 1, 0>(ring + at * STAGE, p, q, n0, 0,
                                                                  c);
        at = at + 1 < STAGES ? at + 1 : 0;
    }
    stx__cp_wait<0>();
    if (p.last.p) stx__put(p.last, q.b * p.O + q.o, c);
}

/* Exchanges P and Q of the warps' tiles. `mine` receives the value before this warp's
   tile, and x the value after all tiles. `buffer` is (2,warps,2,32); rounds alternate
   between its halves, so that one barrier per round suffices. */
static __device__ __forceinline__ void stx__sru_exchange(float *buffer, int round, int warps,
                                                         int warp, int lane, float P, float Q,
                                                         float &mine, float &x) {
    float *to = buffer + (round & 1) * warps * 64;
    to[warp * 64 + lane] = P;
    to[warp * 64 + 32 + lane] = Q;
    __syncthreads();
    for (int w = 0; w < warps; w++) {
        if (w == warp) mine = x;
        x = fmaf(to[w * 64 + lane], x, to[w * 64 + 32 + lane]);
    }
}

/* Forward without v and V. In each round, the warps of a block process adjacent tiles.
   The launch bound is 8 warps and one block per multiprocessor, so that the unrolled
   loops keep their values in registers. */
template <class E, int PLAIN, int TANH> STX__GLOBAL(256, 1) stx__sru_scan_kernel(stx__sru p) {
    STX__DYNAMIC(raw);
    const stx__sru_column q = stx__sru_column_of(p);
    const int warps = blockDim.x / 32, warp = threadIdx.x / 32;
    const stx__sru_source<E, PLAIN, 0, STX_SRU_TILE, 0> from(p, q);
    E *slot = (E *)raw + warp * 4 * STX__SRU_SLOT;
    float *buffer = (float *)((E *)raw + warps * 4 * STX__SRU_SLOT),
          c = stx__sru_get_or(p.c0, q.b * p.O + q.o, 0);
    for (size_t tile = warp, round = 0; tile - warp < p.tiles; tile += warps, round++) {
        size_t n0 = tile * STX_SRU_TILE;
        float P = 1, Q = 0, mine = 0;
        uint32_t skip = 0;
        if (tile < p.tiles) {
            __syncwarp();
            from.fetch(slot, p, q, n0);
            skip = stx__sru_skips(p, q, n0, stx__sru_pad(p, q, n0 + q.lane));
            stx__cp_wait<0>();
            __syncwarp();
  #pragma unroll 8
            for (int i = 0; i < STX_SRU_TILE; i++) {
                int at = i * 32 + q.col;
                float u0 = stx__sru_float(slot[at]),
                      f = stx__sru_gate<E, 0, STX_SRU_TILE>(slot, 0, at, q, 0),
                      next = fmaf(Q - u0, f, u0);
                P = skip >> i & 1 ? P : P * f;
                Q = skip >> i & 1 ? Q : next;
            }
        }
        stx__sru_exchange(buffer, (int)round, warps, warp, q.lane, P, Q, mine, c);
        if (tile >= p.tiles) continue;
        if (p.c) p.c[(q.b * p.tiles + tile) * p.O + q.o] = mine;
        if (skip)
            (void)stx__sru_steps<E, PLAIN, 0, TANH, STX_SRU_TILE, 0, 1>(slot, p, q, n0, skip, mine);
        else
            (void)stx__sru_steps<E, PLAIN, 0, TANH, STX_SRU_TILE, 1, 1>(slot, p, q, n0, 0, mine);
    }
    if (p.last.p && warp == 0) stx__put(p.last, q.b * p.O + q.o, c);
}

/* The derivatives of a step. Forward: c' = u0 + (c - u0) f, h = xt + (g(c') - xt) m r.
   Backward, where e comes from the following step:

       a   = dh m r g' + e                          dL/dc'
       dzf = a (c - u0) f (1 - f)                   dzr = dh (g - xt) m r (1 - r)
       du0 = a (1 - f)   du1 = dzf   du2 = dzr      dxt = dh (1 - m r)
       dvf += dzf c      dvr += dzr c               dbf += dzf   dbr += dzr
       e   = a f + dzf vf + dzr vr = a J + dzr vr   J = f + vf (c - u0) f (1 - f)

   The fields are d = c - u0, s = f (1 - f), kept = m r, gr = dh m r g' and rest = dzr
   vr. The argument cn is c'. */
typedef struct stx__sru_step_grad {
    float d, f, r, s, kept, gr, dzr, J, rest;
} stx__sru_step_grad;

template <class E, int HASV, int TANH, int STEPS>
static __device__ __forceinline__ stx__sru_step_grad stx__sru_step_grads(const E *slot, int at,
                                                                         const stx__sru &p,
                                                                         const stx__sru_column &q,
                                                                         float c, float cn, float f,
                                                                         float r) {
    constexpr int N = 32 * STEPS, GRAD = HASV ? 6 : 4;
    const float unscale = 1.0f / STX__NLOG2E;
    stx__sru_step_grad k;
    float vf = q.vf * unscale, vr = q.vr * unscale, g = TANH ? tanhf(cn) : cn,
          xt = p.alpha * stx__sru_float(slot[3 * N + at]), G = stx__sru_float(slot[GRAD * N + at]);
    if (HASV) {
        vf += stx__sru_float(slot[4 * N + at]);
        vr += stx__sru_float(slot[5 * N + at]);
    }
    k.d = c - stx__sru_float(slot[at]);
    k.f = f;
    k.r = r;
    k.s = f * (1 - f);
    k.kept = q.m * r;
    k.gr = G * k.kept;
    k.dzr = k.gr * (g - xt) * (1 - r);
    if (TANH) k.gr *= fmaf(-g, g, 1.0f);
    k.J = fmaf(vf, k.d * k.s, f);
    k.rest = k.dzr * vr;
    return k;
}

/* Computes the states (STEPS,32) of a part of a tile from c. With PARALLEL, also
   continues P and Q, where (e before the tile) = P (e after these steps) + Q. */
template <class E, int HASV, int TANH, int PARALLEL, int STEPS, int FULL>
static __device__ __forceinline__ float stx__sru_states(float *state, const E *slot,
                                                        const stx__sru &p, const stx__sru_column &q,
                                                        uint32_t skip, float c, float &P,
                                                        float &Q) {
  #pragma unroll(FULL ? 8 : 1)
    for (int i = 0; i < STEPS; i++) {
        int at = i * 32 + q.col;
        state[i * 32 + q.lane] = c;
        if (!FULL && (skip >> i & 1)) continue;
        float u0 = stx__sru_float(slot[at]),
              f = stx__sru_gate<E, HASV, STEPS>(slot, 0, at, q, c), cn = fmaf(c - u0, f, u0);
        if (PARALLEL) {
            stx__sru_step_grad k = stx__sru_step_grads<E, HASV, TANH, STEPS>(
                slot, at, p, q, c, cn, f, stx__sru_gate<E, HASV, STEPS>(slot, 1, at, q, c));
            Q = fmaf(P, fmaf(k.gr, k.J, k.rest), Q);
            P *= k.J;
        }
        c = cn;
    }
    return c;
}

/* Walks back through the STEPS steps from n0 on. Computes all gradients, replaces the
   state cn and the adjoint e after these steps by those before them, and adds dvf, dvr,
   dbf and dbr to `sum`. */
template <class E, int PLAIN, int HASV, int TANH, int STEPS, int FULL>
static __device__ __forceinline__ void stx__sru_steps_back(const float *state, const E *slot,
                                                           const stx__sru &p,
                                                           const stx__sru_column &q, size_t n0,
                                                           uint32_t skip, float &cn, float &e,
                                                           float (&sum)[4]) {
    constexpr int N = 32 * STEPS, GRAD = HASV ? 6 : 4;
    /* may be beyond the last row, but is not used then */
    const size_t row = stx__sru_row(q, n0 + STEPS - 1);
    const ptrdiff_t by = q.back ? (ptrdiff_t)p.O : -(ptrdiff_t)p.O, by_u = by * (ptrdiff_t)p.k,
                    by_x = p.k == 4 ? by_u : by;
    stx__sru_output<E, PLAIN> du(p.du, row * p.k * p.O + q.o),
        dx(p.k == 4 ? p.du : p.dxr, p.k == 4 ? (row * 4 + 3) * p.O + q.o : row * p.O + q.o),
        dV(p.dV, row * 2 * p.O + q.o);
    const int has_x = p.k == 4 || p.dxr.p, has_V = HASV && p.dV.p;
  #pragma unroll(FULL && !PLAIN ? 4 : 1)
    for (int i = STEPS - 1; i >= 0; i--, du.step(by_u), dx.step(by_x), dV.step(2 * by)) {
        int at = i * 32 + q.col;
        float c = state[i * 32 + q.lane], du0 = 0, dzf = 0, dzr = 0, dxt = 0,
              was = p.add_xr ? stx__sru_float(slot[(GRAD + 1) * N + at]) : 0.0f;
        if (FULL || !(skip >> i & 1)) {
            float f = stx__sru_gate<E, HASV, STEPS>(slot, 0, at, q, c),
                  r = stx__sru_gate<E, HASV, STEPS>(slot, 1, at, q, c);
            stx__sru_step_grad k =
                stx__sru_step_grads<E, HASV, TANH, STEPS>(slot, at, p, q, c, cn, f, r);
            float a = k.gr + e;
            du0 = fmaf(-a, f, a);
            dzf = a * (k.d * k.s);
            dzr = k.dzr;
            dxt = stx__sru_float(slot[GRAD * N + at]) * (1 - k.kept);
            e = fmaf(a, k.J, k.rest);
            sum[0] = fmaf(dzf, c, sum[0]);
            sum[1] = fmaf(dzr, c, sum[1]);
            sum[2] += dzf;
            sum[3] += dzr;
        }
        cn = c;
        if (!FULL && n0 + i >= p.T) continue;
        du.put(0, du0);
        du.put(p.O, dzf);
        du.put(2 * p.O, dzr);
        if (has_x) dx.put(0, fmaf(p.alpha, dxt, was));
        if (has_V) {
            dV.put(0, dzf * c);
            dV.put(p.O, dzr * c);
        }
    }
}

/* Returns whether a warp of the backward kernel loads the next tile ahead. In float, the
   copies of the other warps should keep the memory busy, and a third slot would leave
   fewer warps per multiprocessor. */
static constexpr __host__ __device__ int stx__sru_ahead(int parallel, size_t size) {
    return !parallel && size == 2;
}

/* Returns the shared memory of a warp of the backward kernel in bytes, without the buffer
   for the exchange: `inputs` planes of a tile, or of one and a half if the next tile is
   loaded ahead, and the states. `size` is the size of an element. */
static __host__ __device__ __forceinline__ size_t stx__sru_bwd_bytes(int ahead, int inputs,
                                                                     size_t size) {
    const size_t plane = STX__SRU_SLOT * size;
    return inputs * (ahead ? plane + plane / 2 : plane) + STX__SRU_SLOT * sizeof(float);
}

/* Backward. With PARALLEL, a block has up to 8 warps, which process adjacent tiles in
   each round, from the last tile to the first. Otherwise a block is one warp. */
template <class E, int PLAIN, int HASV, int TANH, int PARALLEL>
STX__GLOBAL(PARALLEL ? 256 : 32, 1)
stx__sru_bwd_kernel(stx__sru p) {
    constexpr int AHEAD = stx__sru_ahead(PARALLEL, sizeof(E)),
                  STEPS = AHEAD ? STX_SRU_TILE / 2 : STX_SRU_TILE, N = 32 * STEPS;
    STX__DYNAMIC(raw);
    const stx__sru_column q = stx__sru_column_of(p);
    const int warps = PARALLEL ? blockDim.x / 32 : 1, warp = PARALLEL ? threadIdx.x / 32 : 0,
              inputs = (HASV ? 7 : 5) + p.add_xr;
    const stx__sru_source<E, PLAIN, HASV, STEPS, 1> from(p, q);
    const size_t each = stx__sru_bwd_bytes(AHEAD, inputs, sizeof(E));
    float *state = (float *)(raw + warp * each), *buffer = (float *)(raw + warps * each);
    E *first = (E *)(state + STX__SRU_SLOT), *second = first + inputs * N,
      *other = second + inputs * N; /* without AHEAD, `first` is the only slot */
    float e = stx__sru_get_or(p.dlast, q.b * p.O + q.o, 0), total[4] = {0, 0, 0, 0}, c_next = 0;
    int pad_next = 0;
    for (size_t turn = warp, round = 0; turn - warp < p.tiles; turn += warps, round++) {
        const size_t tile = p.tiles - 1 - turn, n0 = tile * STX_SRU_TILE;
        const int ahead = AHEAD && tile > 0;
        float P = 1, Q = 0, mine = e, c = 0;
        uint32_t skip = 0;
        if (turn < p.tiles) {
            if (!AHEAD || round == 0) {
                __syncwarp();
                from.fetch(first, p, q, n0);
                if (AHEAD) from.fetch(second, p, q, n0 + STEPS);
                c_next = p.c[(q.b * p.tiles + tile) * p.O + q.o];
                pad_next = stx__sru_pad(p, q, n0 + q.lane);
            }
            c = c_next;
            skip = stx__sru_skips(p, q, n0, pad_next);
            stx__cp_wait<0>();
            /* all lanes now see this tile, and no lane still reads the previous one */
            __syncwarp();
            if (ahead) {
                from.fetch(other, p, q, n0 - STX_SRU_TILE);
                c_next = p.c[(q.b * p.tiles + tile - 1) * p.O + q.o];
                pad_next = stx__sru_pad(p, q, n0 - STX_SRU_TILE + q.lane);
            }
            for (int n = 0; n < STX_SRU_TILE; n += STEPS) {
                const E *slot = n ? second : first;
                if (skip)
                    c = stx__sru_states<E, HASV, TANH, PARALLEL, STEPS, 0>(
                        state + n * 32, slot, p, q, skip >> n, c, P, Q);
                else
                    c = stx__sru_states<E, HASV, TANH, PARALLEL, STEPS, 1>(state + n * 32, slot, p,
                                                                           q, 0, c, P, Q);
            }
        }
        if (PARALLEL) stx__sru_exchange(buffer, (int)round, warps, warp, q.lane, P, Q, mine, e);
        if (turn < p.tiles) {
            float sum[4] = {0, 0, 0, 0};
            for (int n = STX_SRU_TILE - STEPS; n >= 0; n -= STEPS) {
                const E *slot = n ? second : first;
                if (skip)
                    stx__sru_steps_back<E, PLAIN, HASV, TANH, STEPS, 0>(
                        state + n * 32, slot, p, q, n0 + n, skip >> n, c, mine, sum);
                else
                    stx__sru_steps_back<E, PLAIN, HASV, TANH, STEPS, 1>(
                        state + n * 32, slot, p, q, n0 + n, 0, c, mine, sum);
                if (!ahead || !n) continue;
                __syncwarp(); /* no lane still reads the second half */
                from.fetch(second, p, q, n0 - STEPS);
            }
            for (int k = 0; k < 4; k++) total[k] += sum[k];
        }
        if (!PARALLEL) e = mine;
        if (!AHEAD) continue;
        E *spare = first;
        first = other;
        other = spare;
    }
    /* add the sums of the warps, in order */
    if (PARALLEL && p.part) {
        __syncthreads();
        for (int k = 0; k < 4; k++) buffer[(warp * 4 + k) * 32 + q.lane] = total[k];
        __syncthreads();
        if (warp == 0)
            for (int k = 0; k < 4; k++)
                for (int w = 1; w < warps; w++) total[k] += buffer[(w * 4 + k) * 32 + q.lane];
    }
    if (warp || q.lane >= q.width) return;
    if (p.part)
        for (int k = 0; k < 4; k++) p.part[(q.b * 4 + k) * p.O + q.o] = total[k];
    if (p.dc0.p) stx__add(p.dc0, q.b * p.O + q.o, e, 1);
}

typedef stx__kernel_of<stx__sru> stx__sru_kernel;

template <class E, int PLAIN> static stx__sru_kernel stx__sru_fwd_of(int hasV, int tanh) {
    if (hasV)
        return tanh ? stx__sru_fwd_kernel<E, PLAIN, 1, 1> : stx__sru_fwd_kernel<E, PLAIN, 1, 0>;
    return tanh ? stx__sru_fwd_kernel<E, PLAIN, 0, 1> : stx__sru_fwd_kernel<E, PLAIN, 0, 0>;
}

template <class E, int PLAIN> static stx__sru_kernel stx__sru_scan_of(int tanh) {
    return tanh ? stx__sru_scan_kernel<E, PLAIN, 1> : stx__sru_scan_kernel<E, PLAIN, 0>;
}

template <class E, int PLAIN, int PARALLEL>
static stx__sru_kernel stx__sru_bwd_of(int hasV, int tanh) {
    if (hasV)
        return tanh ? stx__sru_bwd_kernel<E, PLAIN, 1, 1, PARALLEL>
                    : stx__sru_bwd_kernel<E, PLAIN, 1, 0, PARALLEL>;
    return tanh ? stx__sru_bwd_kernel<E, PLAIN, 0, 1, PARALLEL>
                : stx__sru_bwd_kernel<E, PLAIN, 0, 0, PARALLEL>;
}

/* These functions return the kernel for a call's storage and options. */
static stx__sru_kernel stx__sru_fwd_choose(const stx_sru_args *a, int plain, int half, int warps) {
    const int hasV = a->V != NULL;
    if (warps > 1) {
        if (plain) return stx__sru_scan_of<float, 1>(a->tanh);
        return half ? stx__sru_scan_of<stx__bf16, 0>(a->tanh) : stx__sru_scan_of<float, 0>(a->tanh);
    }
    if (plain) return stx__sru_fwd_of<float, 1>(hasV, a->tanh);
    return half ? stx__sru_fwd_of<stx__bf16, 0>(hasV, a->tanh)
                : stx__sru_fwd_of<float, 0>(hasV, a->tanh);
}

template <int PARALLEL>
static stx__sru_kernel stx__sru_bwd_choose(const stx_sru_args *a, int plain, int half) {
    const int hasV = a->V != NULL;
    if (plain) return stx__sru_bwd_of<float, 1, PARALLEL>(hasV, a->tanh);
    return half ? stx__sru_bwd_of<stx__bf16, 0, PARALLEL>(hasV, a->tanh)
                : stx__sru_bwd_of<float, 0, PARALLEL>(hasV, a->tanh);
}

static stx__sru stx__sru_of(stx_ctx *x, const stx_sru_args *a, int backward) {
    stx__sru p;
    memset(&p, 0, sizeof p);
    p.T = a->T;
    p.H = a->H;
    p.O = a->D * a->H;
    p.k = a->k;
    p.tiles = stx_sru_tiles(a);
    p.groups = (a->H + 31) / 32;
    p.D = (int)a->D;
    p.alpha = a->k == 4 ? 1 : a->alpha;
    p.u = stx__array_of(x, a->u);
    p.xr = stx__array_of(x, a->k == 4 ? NULL : a->xr);
    p.V = stx__array_of(x, a->V);
    p.v = stx__array_of(x, a->v);
    p.bias = stx__array_of(x, a->bias);
    p.c0 = stx__array_of(x, a->c0);
    p.m = stx__array_of(x, a->m);
    p.pad = a->pad;
    p.c = (float *)a->c;
    if (!backward) {
        p.h = stx__array_of(x, a->h);
        p.last = stx__array_of(x, a->last);
        return p;
    }
    p.dh = stx__array_of(x, a->dh);
    p.dlast = stx__array_of(x, a->dlast);
    p.dc0 = stx__array_of(x, a->dc0);
    p.du = stx__array_of(x, a->du);
    p.dV = stx__array_of(x, a->dV);
    p.dxr = stx__array_of(x, p.xr.p ? a->dxr : NULL);
    p.add_xr = p.dxr.p && a->add_xr;
    p.part = a->dv || a->dbias ? (float *)a->work : NULL;
    return p;
}

/* Returns whether all inputs and outputs have the same storage, inputs are aligned to
   16 bytes, and rows are multiples of 16 bytes. Otherwise the plain kernels run. */
static int stx__sru_is_uniform(const stx__sru &p) {
    const stx__array *in[5] = {&p.u, &p.xr, &p.V, &p.dh, p.add_xr ? &p.dxr : NULL},
                   *out[4] = {&p.h, &p.du, &p.dV, &p.dxr};
    int i;
    for (i = 0; i < 5; i++)
        if (in[i] && in[i]->p && (in[i]->half != p.u.half || (uintptr_t)in[i]->p % 16)) return 0;
    for (i = 0; i < 4; i++)
        if (out[i]->p && (out[i]->half != p.u.half || out[i]->twin)) return 0;
    return p.H % (p.u.half ? 8 : 4) == 0;
}

/* Returns the number of warps that share the tiles of a column: 1 if there are enough
   columns to fill a GPU. */
static int stx__sru_warps(const stx_sru_args *a, size_t each) {
    const size_t columns = a->B * a->D * a->H;
    size_t w = 8;
    if (columns >= STX__SRU_FOUR_WARPS) w = 4;
    if (columns >= STX__SRU_ONE_WARP) w = 1;
    w = STX_MIN(w, (size_t)STX__SRU_SHARED / each);
    return (int)STX_MIN(w, stx_sru_tiles(a));
}

static void stx__sru_run(stx_ctx *x, const char *name, stx__sru_kernel kernel,
                         const stx_sru_args *a, const stx__sru &p, int warps, size_t each) {
    size_t blocks = a->B * a->D * p.groups, bytes = (size_t)warps * each;
    static_assert((int)STX__SRU_SHARED <= (int)STX__SHARED_LEAST,
                  "STX__SRU_SHARED exceeds the shared memory of some GPUs");
    STX__RUN_KERNEL(x, name, kernel, (unsigned)blocks, 32 * warps, bytes, p);
}

static int stx__sru_refused(stx_ctx *x, const stx_sru_args *a, const char *what) {
    if (!stx_ok(x) || !a->B || !a->D || !a->H) return 1;
    if ((a->k == 3 || a->k == 4) && a->D <= 2 && (a->H + 31) / 32 * a->D * a->B < (size_t)1 << 31)
        return 0;
    stx_fail(x, STX_ERR_SHAPE,
             "%s: expected k = 3 or 4, D = 1 or 2 and fewer than 2^31 blocks of 32 columns, got "
             "k = %zu, D = %zu and %zu blocks",
             what, a->k, a->D, (a->H + 31) / 32 * a->D * a->B);
    return 1;
}

size_t stx_sru_work_cuda(stx_ctx *x, const stx_sru_args *a, int backward) {
    (void)x;
    return backward ? a->B * 4 * a->D * a->H * sizeof(float) : 0;
}

void stx_sru_fwd_cuda(stx_ctx *x, const stx_sru_args *a) {
    stx__sru p;
    size_t each;
    int warps, plain;
    if (stx__sru_refused(x, a, "stx_sru_fwd")) return;
    p = stx__sru_of(x, a, 0);
    plain = !stx__sru_is_uniform(p);
    each = STX__SRU_SLOT * 4 * (plain || !p.u.half ? sizeof(float) : 2) + 4 * 32 * sizeof(float);
    warps = a->v || a->V ? 1 : stx__sru_warps(a, each);
    stx__sru_run(x, "stx_sru_fwd", stx__sru_fwd_choose(a, plain, p.u.half != 0, warps), a, p,
                 warps > 1 ? warps : 1, warps > 1 ? each : 0);
}

void stx_sru_bwd_cuda(stx_ctx *x, const stx_sru_args *a) {
    stx__sru p;
    stx__sru_kernel kernel;
    size_t each, size, O2 = 2 * a->D * a->H;
    stx_real *to[2];
    int warps, plain, half, inputs;
    if (stx__sru_refused(x, a, "stx_sru_bwd")) return;
    p = stx__sru_of(x, a, 1);
    plain = !stx__sru_is_uniform(p);
    half = p.u.half != 0;
    size = plain || !half ? sizeof(float) : 2;
    inputs = 5 + 2 * (a->V != NULL) + p.add_xr;
    each = stx__sru_bwd_bytes(0, inputs, size) + 4 * 32 * sizeof(float);
    warps = stx__sru_warps(a, each);
    if (warps <= 1) each = stx__sru_bwd_bytes(stx__sru_ahead(0, size), inputs, size);
    kernel = warps > 1 ? stx__sru_bwd_choose<1>(a, plain, half)
                       : stx__sru_bwd_choose<0>(a, plain, half);
    stx__sru_run(x, "stx_sru_bwd", kernel, a, p, warps < 1 ? 1 : warps, each);
    to[0] = a->dv;
    to[1] = a->dbias;
    stx__columns_sum(x, "stx_sru_bwd", to, 2, p.part, 2 * O2, a->B, O2, 0);
}
#endif /* SEQTX_SRU_H */


/* ---- src/cuda/comp.cuh ---- */
// >>groups

#ifdef SEQTX_COMPRESSIVE_H
/* Kernels for seqtx_compressive.h, with the letters defined there. They move rows and
   compute gates. Convolutions, and the attention in the losses, use the core's matmul and
   attention kernels.

   Row kernels use one warp per row and W adjacent elements per lane. The source of a
   row is computed once per row, and loads and stores cover whole cache lines. Blocks
   have 256 threads. The size of the grid is limited; STX__WARPS distributes n = 0 .. N-1
   over its warps. */
  #define STX__WARPS(n, N) \
    for (size_t n = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) / 32; n < N; \
         n += (size_t)gridDim.x * blockDim.x / 32)
  #define STX__RUN_WARPS(x, name, four, kernel, N, ...) \
    do { \
      if (four) \
        STX__RUN_KERNEL(x, name, kernel<4>, stx__grid(x, 32 * (N)), 256, 0, __VA_ARGS__); \
      else \
        STX__RUN_KERNEL(x, name, kernel<1>, stx__grid(x, 32 * (N)), 256, 0, __VA_ARGS__); \
    } while (0)

/* The rows and groups of a stream. Tap t of group i is row base + i * step + t, if this
   row is in [first,rows) and not marked in `pad`. `own` is G_b, the stream's number of
   groups. */
typedef struct stx__comp_stream {
    ptrdiff_t base, first;
    size_t own;
    const int32_t *pad;
} stx__comp_stream;

static __device__ __forceinline__ stx__comp_stream stx__comp_stream_of(const stx_comp_groups &g,
                                                                       size_t b) {
    stx__comp_stream s;
    s.base = g.at;
    s.first = 0;
    s.own = g.groups;
    s.pad = g.pad ? g.pad + b * g.rows : NULL;
    if (g.first) {
        s.first = g.first[b];
        s.own = (g.rows - (size_t)s.first + g.step - 1) / g.step;
        s.base += s.first + ((ptrdiff_t)s.own - (ptrdiff_t)g.groups) * (ptrdiff_t)g.step;
    }
    return s;
}

/* Returns the row of a tap, or -1 if it is missing. */
static __device__ __forceinline__ ptrdiff_t stx__comp_row(const stx_comp_groups &g,
                                                          const stx__comp_stream &s, size_t group,
                                                          size_t t) {
    ptrdiff_t row = s.base + (ptrdiff_t)(group * g.step + t);
    return row < s.first || row >= (ptrdiff_t)g.rows || (s.pad && s.pad[row]) ? -1 : row;
}

static int stx__comp_refused(stx_ctx *x, const stx_comp_groups *g, const char *what) {
    if (stx_ok(x) && !g->step)
        stx_fail(x, STX_ERR_SHAPE, "%s: step: expected at least 1 row between groups, got 0", what);
    return !stx_ok(x);
}

/* Returns a copy of *g in which a stride of 0 is replaced by the default, and sets
   *four to 1 if rows can be read four elements at a time, otherwise to 0. */
static stx_comp_groups stx__comp_strided(const stx_comp_groups *g, const stx__array &rows,
                                         int *four) {
    stx_comp_groups s = *g;
    if (!s.stride) s.stride = s.rows * s.D;
    *four = s.D % 4 == 0 && s.stride % 4 == 0 && stx__aligned4(rows);
    return s;
}

/* Sets each tap of y (B,groups,taps,D) to its row of `rows` (B,rows,D), or to 0 if that
   row is missing. With accumulate, adds to y instead. One warp per tap. */
template <int W>
STX__GLOBAL(256)
stx__comp_unfold_kernel(stx__array y, stx__array rows, stx_comp_groups g, int accumulate) {
    const size_t taps = g.groups * g.taps;
    STX__WARPS(n, g.B * taps) {
        size_t b = n / taps, in = n - b * taps, group = in / g.taps;
        ptrdiff_t row = stx__comp_row(g, stx__comp_stream_of(g, b), group, in - group * g.taps);
        if (row < 0 && accumulate) continue;
        for (size_t c = threadIdx.x % 32 * W; c < g.D; c += 32 * W) {
            float v[W] = {0};
            if (row >= 0) stx__getn<W>(v, rows, b * g.stride + (size_t)row * g.D + c);
            stx__addn<W>(y, n * g.D + c, v, accumulate);
        }
    }
}

void stx_comp_unfold_cuda(stx_ctx *x, stx_real *y, const stx_real *rows, const stx_comp_groups *g,
                          int accumulate) {
    stx__array Y = stx__array_of(x, y), R = stx__array_of(x, rows);
    size_t n = g->B * g->groups * g->taps;
    int four;
    const stx_comp_groups s = stx__comp_strided(g, R, &four);
    if (!n || !g->D || stx__comp_refused(x, g, "stx_comp_unfold")) return;
    STX__RUN_WARPS(x, "stx_comp_unfold", four && stx__aligned4(Y), stx__comp_unfold_kernel, n, Y, R,
                   s, accumulate);
}

/* Sets each row of `rows` (B,rows,D) to the sum of the taps of y (B,groups,taps,D) that
   refer to it, in ascending order of groups. Rows without taps and missing rows become 0.
   One warp per row, which first computes the range of groups that contain the row. */
template <int W>
STX__GLOBAL(256)
stx__comp_fold_kernel(stx__array rows, stx__array y, stx_comp_groups g) {
    STX__WARPS(n, g.B * g.rows) {
        size_t b = n / g.rows, row = n - b * g.rows;
        stx__comp_stream s = stx__comp_stream_of(g, b);
        /* in group i, the row is tap t = from - i * step */
        ptrdiff_t from = (ptrdiff_t)row - s.base, step = (ptrdiff_t)g.step,
                  before = from - (ptrdiff_t)g.taps;
        ptrdiff_t lo = before < 0 ? 0 : before / step + 1, hi = from < 0 ? -1 : from / step;
        if (hi >= (ptrdiff_t)g.groups) hi = (ptrdiff_t)g.groups - 1;
        if ((ptrdiff_t)row < s.first || (s.pad && s.pad[row])) hi = -1;
        for (size_t c = threadIdx.x % 32 * W; c < g.D; c += 32 * W) {
            float v[W] = {0}, w[W];
            for (ptrdiff_t i = lo; i <= hi; i++) {
                stx__getn<W>(w, y,
                             ((b * g.groups + (size_t)i) * g.taps + (size_t)(from - i * step)) * g.D
                                 + c);
                for (int e = 0; e < W; e++) v[e] += w[e];
            }
            stx__putn<W>(rows, n * g.D + c, v);
        }
    }
}

void stx_comp_fold_cuda(stx_ctx *x, stx_real *rows, const stx_real *y, const stx_comp_groups *g) {
    stx__array R = stx__array_of(x, rows), Y = stx__array_of(x, y);
    size_t n = g->B * g->rows;
    if (!n || !g->D || stx__comp_refused(x, g, "stx_comp_fold")) return;
    STX__RUN_WARPS(x, "stx_comp_fold", g->D % 4 == 0 && stx__aligned4(Y) && stx__aligned4(R),
                   stx__comp_fold_kernel, n, R, Y, *g);
}

/* Sets y (B,groups,D) to the mean (max = 0) or maximum (max = 1) of the rows of each
   group, per channel, or to 0 if all are missing. One warp per group; a lane processes
   the rows of its channels in chronological order. */
template <int W>
STX__GLOBAL(256)
stx__comp_pool_kernel(stx__array y, stx__array rows, stx_comp_groups g, int max) {
    STX__WARPS(n, g.B * g.groups) {
        size_t b = n / g.groups, group = n - b * g.groups;
        stx__comp_stream s = stx__comp_stream_of(g, b);
        for (size_t c = threadIdx.x % 32 * W; c < g.D; c += 32 * W) {
            float v[W] = {0}, w[W];
            size_t met = 0;
            for (size_t t = 0; t < g.taps; t++) {
                ptrdiff_t row = stx__comp_row(g, s, group, t);
                if (row < 0) continue;
                stx__getn<W>(w, rows, b * g.stride + (size_t)row * g.D + c);
                for (int e = 0; e < W; e++) {
                    if (!met || (max && (w[e] > v[e] || w[e] != w[e])))
                        v[e] = w[e];
                    else if (!max)
                        v[e] += w[e];
                }
                met++;
            }
            if (!max && met > 1)
                for (int e = 0; e < W; e++) v[e] /= (float)met;
            stx__putn<W>(y, n * g.D + c, v);
        }
    }
}

void stx_comp_pool_cuda(stx_ctx *x, stx_real *y, const stx_real *rows, const stx_comp_groups *g,
                        int max) {
    stx__array Y = stx__array_of(x, y), R = stx__array_of(x, rows);
    size_t n = g->B * g->groups;
    int four;
    const stx_comp_groups s = stx__comp_strided(g, R, &four);
    if (!n || !g->D || stx__comp_refused(x, g, "stx_comp_pool")) return;
    STX__RUN_WARPS(x, "stx_comp_pool", four && stx__aligned4(Y), stx__comp_pool_kernel, n, Y, R, s,
                   max);
}

/* Copies the G_b most used rows of stream b, in chronological order, to the last G_b
   rows of y (B,groups,D). The rows of y before them become 0.

   The first kernel sets `kept` (B,rows) to 1 for the most used rows and to 0 for the
   others. The rank of a row is the number of rows that precede it. Existing rows
   precede missing ones; among existing rows, more used rows come first, and newer rows
   precede older ones that are used equally. One thread per row; the usages of the other
   rows pass through shared memory, 256 at a time. */
static __device__ __forceinline__ float stx__comp_usage_of(const stx__array &usage, size_t i) {
    float all = stx__get(usage, i + 1);
    return all > 0 ? stx__get(usage, i) / all : 0;
}

STX__GLOBAL(256)
stx__comp_rank_kernel(int32_t *kept, stx__array usage, size_t usage_batch_stride, stx_comp_groups g,
                      size_t blocks) {
    STX__SHARED(float, used, 256);
    STX__SHARED(int32_t, lost, 256);
    for (size_t n = blockIdx.x; n < g.B * blocks; n += gridDim.x) {
        const size_t b = n / blocks, i = (n - b * blocks) * 256 + threadIdx.x;
        const stx__comp_stream s = stx__comp_stream_of(g, b);
        const float mine =
            i < g.rows ? stx__comp_usage_of(usage, b * usage_batch_stride + 2 * i) : 0;
        const int mine_lost = i < g.rows && s.pad && s.pad[i];
        size_t better = 0;
        for (size_t k0 = (size_t)s.first; k0 < g.rows; k0 += 256) {
            size_t left = g.rows - k0 < 256 ? g.rows - k0 : 256, k = k0 + threadIdx.x;
            if (k < g.rows) {
                used[threadIdx.x] = stx__comp_usage_of(usage, b * usage_batch_stride + 2 * k);
                lost[threadIdx.x] = s.pad && s.pad[k];
            }
            __syncthreads();
            for (size_t e = 0; e < left; e++) {
                float u = used[e];
                if (k0 + e == i) continue;
                if (lost[e] != mine_lost)
                    better += !lost[e];
                else if (mine_lost)
                    better += k0 + e < i;
                else
                    better += u > mine || (!(mine > u) && k0 + e > i);
            }
            __syncthreads();
        }
        if (i < g.rows) kept[b * g.rows + i] = i >= (size_t)s.first && better < s.own;
    }
}

/* The second kernel copies the m-th kept row to the m-th of the last G_b places in y.
   The kernel counts the kept rows 32 at a time. One warp per place. */
template <int W>
STX__GLOBAL(256)
stx__comp_pick_kernel(stx__array y, stx__array rows, const int32_t *kept, stx_comp_groups g) {
    const size_t lane = threadIdx.x % 32;
    STX__WARPS(n, g.B * g.groups) {
        size_t b = n / g.groups, place = n - b * g.groups, row = g.rows, k0, m;
        stx__comp_stream s = stx__comp_stream_of(g, b);
        if (place + s.own >= g.groups) {
            m = place + s.own - g.groups;
            for (k0 = 0; k0 < g.rows; k0 += 32) {
                uint32_t some = __ballot_sync(STX__ALL,
                                              k0 + lane < g.rows && kept[b * g.rows + k0 + lane]);
                size_t here = (size_t)__popc(some);
                if (m < here) {
                    for (; m; m--) some &= some - 1;
                    row = k0 + (size_t)__ffs((int)some) - 1;
                    break;
                }
                m -= here;
            }
        }
        if (row < g.rows && s.pad && s.pad[row]) row = g.rows;
        for (size_t c = lane * W; c < g.D; c += 32 * W) {
            float v[W] = {0};
            if (row < g.rows) stx__getn<W>(v, rows, b * g.stride + row * g.D + c);
            stx__putn<W>(y, n * g.D + c, v);
        }
    }
}

void stx_comp_pick_cuda(stx_ctx *x, stx_real *y, const stx_real *rows, const stx_real *usage,
                        size_t usage_batch_stride, const stx_comp_groups *g) {
    stx__array Y = stx__array_of(x, y), R = stx__array_of(x, rows), U = stx__array_of(x, usage);
    size_t n = g->B * g->groups, blocks = (g->rows + 255) / 256;
    int32_t *kept;
    int four;
    const stx_comp_groups s = stx__comp_strided(g, R, &four);
    if (!n || !g->D || stx__comp_refused(x, g, "stx_comp_pick")) return;
    if (!g->rows) {
        stx_fill_cuda(x, y, n * g->D, 0);
        return;
    }
    kept = (int32_t *)stx__scratch_of(x, g->B * g->rows * sizeof *kept, "stx_comp_pick");
    if (!kept) return;
    STX__RUN_KERNEL(x, "stx_comp_pick", stx__comp_rank_kernel,
                    stx__blocks(g->B * blocks, 1, (size_t)1 << 30), 256, 0, kept, U,
                    usage_batch_stride, *g, blocks);
    STX__RUN_WARPS(x, "stx_comp_pick", four && stx__aligned4(Y), stx__comp_pick_kernel, n, Y, R,
                   kept, s);
}


// >>usage

/* Adds the softmax weights of key `first` + j, summed over queries and averaged over
   heads, to usage[b][j][0], and the number of queries to usage[b][j][1]. Each weight is
   recomputed from its logit and the statistics of the row.

   The first kernel computes `part` (B,H,n), the sums over the queries of one head. A
   block processes 64 keys of a unit (batch row and head) and walks its queries, 64 at a
   time. A thread computes 4 x 4 logits; operands pass through shared memory, 16 channels
   at a time. A tile uses 127 adjacent rows of pe, indexed by (query - key) + 63; the 16
   logits of a thread use 7 of them. Each thread adds its queries in ascending order, then
   the sums of a key's 16 threads are added in order. The launch bound is 256 threads and
   3 blocks per multiprocessor, which allows 80 registers per thread. */
enum { STX__USAGE_TILE = 64, STX__USAGE_STEP = 16, STX__USAGE_POSITIONS = 2 * STX__USAGE_TILE };

typedef struct stx__comp_usage {
    stx__array q, k, pe, u, vb;
    const float *row_max, *inv_sum; /* (B,H,T) */
    const int32_t *pad;
    size_t T, S, H, D, P, q_row_stride, kv_row_stride, q_batch_stride, kv_batch_stride,
        pad_batch_stride, span, first, n, tiles;
    int delta_min, pe_heads;
    float scale;
} stx__comp_usage;

/* Loads channels c0 .. c0+15 of the tile's rows of pe to shared memory, one array per
   channel. d0 is the query-key distance of the first row. */
static __device__ __forceinline__ void stx__comp_usage_load_pe(const stx__comp_usage &p, float *ps,
                                                               size_t h, size_t c0, ptrdiff_t d0) {
    enum { LR = STX__USAGE_POSITIONS + 4 };

    for (int e = (int)threadIdx.x; e < STX__USAGE_POSITIONS * STX__USAGE_STEP; e += 256) {
        int d = e % STX__USAGE_STEP, r = e / STX__USAGE_STEP;
        size_t ch = c0 + (size_t)d;
        ptrdiff_t row = (ptrdiff_t)p.P - 1 + p.delta_min - (d0 + r);
        size_t at = p.pe_heads > 1 ? ((size_t)row * p.H + h) * p.D + ch : (size_t)row * p.D + ch;
        float v = 0;
        if (ch < p.D && row >= 0 && row < (ptrdiff_t)p.P) v = stx__get(p.pe, at);
        ps[d * LR + r] = v;
    }
}

/* Loads channels c0 .. c0+15 of the tile's queries (q + u, and with PE also q + vb),
   keys and, with PE, rows of pe. */
template <int PE>
static __device__ __forceinline__ void stx__comp_usage_load(const stx__comp_usage &p, float *qu,
                                                            float *qv, float *ks, float *ps,
                                                            size_t b, size_t h, size_t i0,
                                                            size_t j0, size_t c0, ptrdiff_t d0) {
    enum { LD = STX__USAGE_TILE + 4 };

    const int tid = (int)threadIdx.x;
    for (int e = tid; e < STX__USAGE_TILE * STX__USAGE_STEP; e += 256) {
        int d = e % STX__USAGE_STEP, r = e / STX__USAGE_STEP;
        size_t ch = c0 + (size_t)d, i = i0 + (size_t)r, j = j0 + (size_t)r;
        float q = 0, k = 0;
        if (ch < p.D && i < p.T)
            q = stx__get(p.q, b * p.q_batch_stride + i * p.q_row_stride + h * p.D + ch);
        if (ch < p.D && j < p.n)
            k = stx__get(p.k,
                         b * p.kv_batch_stride + (p.first + j) * p.kv_row_stride + h * p.D + ch);
        qu[d * LD + r] = p.u.p && ch < p.D ? q + stx__get(p.u, h * p.D + ch) : q;
        if (PE) qv[d * LD + r] = p.vb.p && ch < p.D ? q + stx__get(p.vb, h * p.D + ch) : q;
        ks[d * LD + r] = k;
    }
    if (PE) stx__comp_usage_load_pe(p, ps, h, c0, d0);
}

/* Adds the contribution of the loaded channels to a thread's 4 x 4 logits. */
template <int PE>
static __device__ __forceinline__ void stx__comp_usage_dots(float (&c)[4][4], const float *qu,
                                                            const float *qv, const float *ks,
                                                            const float *ps) {
    enum { LD = STX__USAGE_TILE + 4, LR = STX__USAGE_POSITIONS + 4 };

    const int tx = (int)threadIdx.x % 16, ty = (int)threadIdx.x / 16;
  #pragma unroll 4 /* allows 3 blocks per multiprocessor without spills */
    for (int d = 0; d < STX__USAGE_STEP; d++) {
        float a[4], k[4], v[4], w[7];
        for (int e = 0; e < 4; e++) {
            a[e] = qu[d * LD + 4 * ty + e];
            k[e] = ks[d * LD + 4 * tx + e];
        }
        if (PE) {
            for (int e = 0; e < 4; e++) v[e] = qv[d * LD + 4 * ty + e];
            for (int e = 0; e < 7; e++) w[e] = ps[d * LR + 4 * (ty - tx) + STX__USAGE_TILE - 4 + e];
        }
        for (int i = 0; i < 4; i++)
            for (int j = 0; j < 4; j++) {
                c[i][j] = fmaf(a[i], k[j], c[i][j]);
                if (PE) c[i][j] = fmaf(v[i], w[i - j + 3], c[i][j]);
            }
    }
}

/* Adds the softmax weights of a thread's 4 x 4 logits to sum[j], for queries that see
   the key. */
static __device__ __forceinline__ void stx__comp_usage_weights(const stx__comp_usage &p,
                                                               const float (&c)[4][4],
                                                               double (&sum)[4], size_t unit,
                                                               size_t b, size_t i0, size_t j0) {
    const int tx = (int)threadIdx.x % 16, ty = (int)threadIdx.x / 16;
    const int32_t *pad = p.pad ? p.pad + b * p.pad_batch_stride : NULL;
    for (int i = 0; i < 4; i++) {
        size_t query = i0 + (size_t)(4 * ty + i), here = p.S - p.T + query,
               row = unit * p.T + query;
        if (query >= p.T || (pad && pad[here])) continue;
        float row_max = p.row_max[row], inv_sum = p.inv_sum[row];
        for (int j = 0; j < 4; j++) {
            size_t key = p.first + j0 + (size_t)(4 * tx + j);
            if (key >= p.first + p.n || here - key > p.span || (pad && pad[key])) continue;
            sum[j] += (double)(expf(fmaf(c[i][j], p.scale, -row_max)) * inv_sum);
        }
    }
}

template <int PE>
STX__HOST_UNROLLED STX__GLOBAL(256, 3) stx__comp_usage_kernel(double *part, stx__comp_usage p) {
    enum { LD = STX__USAGE_TILE + 4, LR = STX__USAGE_POSITIONS + 4 };

    STX__SHARED(float, qu, STX__USAGE_STEP *LD);
    STX__SHARED(float, qv, PE ? STX__USAGE_STEP *LD : 4);
    STX__SHARED(float, ks, STX__USAGE_STEP *LD);
    STX__SHARED(float, ps, PE ? STX__USAGE_STEP *LR : 4);
    STX__SHARED(double, sums, 16 * STX__USAGE_TILE);
    const size_t unit = blockIdx.x / p.tiles, j0 = (blockIdx.x - unit * p.tiles) * STX__USAGE_TILE,
                 b = unit / p.H, h = unit - b * p.H;
    const int tid = (int)threadIdx.x, tx = tid % 16, ty = tid / 16;
    double sum[4] = {0};
    for (size_t i0 = 0; i0 < p.T; i0 += STX__USAGE_TILE) {
        /* distance of the tile's first row of pe */
        const ptrdiff_t d0 = (ptrdiff_t)(p.S - p.T + i0) - (ptrdiff_t)(p.first + j0)
                             - (STX__USAGE_TILE - 1);
        float c[4][4] = {{0}};
        for (size_t c0 = 0; c0 < p.D; c0 += STX__USAGE_STEP) {
            stx__comp_usage_load<PE>(p, qu, qv, ks, ps, b, h, i0, j0, c0, d0);
            __syncthreads();
            stx__comp_usage_dots<PE>(c, qu, qv, ks, ps);
            __syncthreads();
        }
        stx__comp_usage_weights(p, c, sum, unit, b, i0, j0);
    }
    for (int j = 0; j < 4; j++) sums[ty * STX__USAGE_TILE + 4 * tx + j] = sum[j];
    __syncthreads();
    if (tid < STX__USAGE_TILE && j0 + (size_t)tid < p.n) {
        double all = 0;
        for (int r = 0; r < 16; r++) all += sums[r * STX__USAGE_TILE + tid];
        part[unit * p.n + j0 + (size_t)tid] = all;
    }
}

/* The second kernel adds the sums over heads, in order, and the number of queries to
   usage. One thread per key; all threads of a block count the queries together. */
STX__GLOBAL(256)
stx__comp_usage_sum_kernel(stx__array usage, size_t usage_batch_stride, const double *part,
                           stx__comp_usage p, size_t B, size_t blocks) {
    STX__SHARED(double, sh, 32);
    for (size_t at = blockIdx.x; at < B * blocks; at += gridDim.x) {
        const size_t b = at / blocks, j = (at - b * blocks) * 256 + threadIdx.x;
        double queries = 0, all = 0;
        for (size_t i = threadIdx.x; i < p.T; i += 256)
            queries += !(p.pad && p.pad[b * p.pad_batch_stride + p.S - p.T + i]);
        queries = stx__row_sum<256>(queries, sh);
        if (j >= p.n) continue;
        for (size_t h = 0; h < p.H; h++) all += part[(b * p.H + h) * p.n + j];
        stx__add(usage, b * usage_batch_stride + 2 * j, (float)(all / (double)p.H), 1);
        stx__add(usage, b * usage_batch_stride + 2 * j + 1, (float)queries, 1);
    }
}

void stx_comp_usage_cuda(stx_ctx *x, stx_real *usage, size_t usage_batch_stride,
                         const stx_attention_args *a, size_t first, size_t n) {
    stx__comp_usage p;
    size_t blocks = (n + 255) / 256;
    double *part;
    if (!stx_ok(x) || !a->B || !a->H || !a->T || !n) return;
    if (a->span_fraction || a->eps > 0 || a->N || a->not_causal || a->S < a->T
        || first > a->S - a->T || n > a->S - a->T - first) {
        stx_fail(x, STX_ERR_ARG,
                 "stx_comp_usage: expected causal attention without learned spans, eps or "
                 "persistent vectors, and only keys before the last T = %zu of S = %zu, got %zu "
                 "keys from key %zu",
                 a->T, a->S, n, first);
        return;
    }
    memset(&p, 0, sizeof p);
    p.q = stx__array_of(x, a->q);
    p.k = stx__array_of(x, a->k);
    p.pe = stx__array_of(x, a->P ? a->pe : NULL);
    p.u = stx__array_of(x, a->content_bias);
    p.vb = stx__array_of(x, a->position_bias);
    p.row_max = (const float *)a->row_max;
    p.inv_sum = (const float *)a->inv_sum;
    p.pad = a->pad;
    p.T = a->T;
    p.S = a->S;
    p.H = a->H;
    p.D = a->D;
    p.P = a->P;
    p.q_row_stride = a->q_row_stride;
    p.kv_row_stride = a->kv_row_stride;
    p.q_batch_stride = a->q_batch_stride;
    p.kv_batch_stride = a->kv_batch_stride;
    p.pad_batch_stride = a->pad_batch_stride;
    p.span = a->span;
    p.first = first;
    p.n = n;
    p.tiles = (n + STX__USAGE_TILE - 1) / STX__USAGE_TILE;
    p.delta_min = a->delta_min;
    p.pe_heads = a->pe_heads;
    p.scale = (float)a->scale;
    part = (double *)stx__scratch_of(x, a->B * a->H * n * sizeof *part, "stx_comp_usage");
    if (!part) return;
    if (p.pe.p)
        STX__RUN_KERNEL(x, "stx_comp_usage", stx__comp_usage_kernel<1>,
                        (unsigned)(a->B * a->H * p.tiles), 256, 0, part, p);
    else
        STX__RUN_KERNEL(x, "stx_comp_usage", stx__comp_usage_kernel<0>,
                        (unsigned)(a->B * a->H * p.tiles), 256, 0, part, p);
    STX__RUN_KERNEL(x, "stx_comp_usage", stx__comp_usage_sum_kernel,
                    stx__blocks(a->B * blocks, 1, (size_t)1 << 30), 256, 0, stx__array_of(x, usage),
                    usage_batch_stride, part, p, a->B, blocks);
}
#endif /* SEQTX_COMPRESSIVE_H */


/* ---- src/cuda/comp_gates.cuh ---- */
// >>error

#ifdef SEQTX_COMPRESSIVE_H
/* Computes loss (1) = sum (a - t)^2 / count and rel_error (1) = sum (a - t)^2 / sum t^2
   (0 if sum t^2 is 0), over the rows of `a` and t (N,C) that are not marked in `skip`.
   The first kernel stores the two sums of each row in `work` (N,2). One warp per row. */
template <int W>
STX__GLOBAL(256)
stx__comp_error_kernel(double *work, stx__array a, stx__array t, const int32_t *skip, size_t N,
                       size_t C) {
    STX__WARPS(n, N) {
        double off = 0, all = 0;
        if (!skip || !skip[n])
            for (size_t c = threadIdx.x % 32 * W; c < C; c += 32 * W) {
                float v[W], w[W];
                stx__getn<W>(v, a, n * C + c);
                stx__getn<W>(w, t, n * C + c);
                for (int e = 0; e < W; e++) {
                    double d = (double)v[e] - (double)w[e];
                    off += d * d;
                    all += (double)w[e] * (double)w[e];
                }
            }
        off = stx__warp_sum_f64(off);
        all = stx__warp_sum_f64(all);
        if (threadIdx.x % 32 == 0) {
            work[2 * n] = off;
            work[2 * n + 1] = all;
        }
    }
}

/* The second kernel sums over all rows. One block: a thread adds every 1024th row, then
   a fixed tree adds the threads' sums. */
STX__GLOBAL(1024)
stx__comp_error_sum_kernel(stx__array loss, stx__array rel_error, const double *work, size_t N,
                           double count) {
    STX__SHARED(double, sh, 32);
    double off = 0, all = 0;
  #pragma unroll 4
    for (size_t n = threadIdx.x; n < N; n += 1024) {
        off += work[2 * n];
        all += work[2 * n + 1];
    }
    off = stx__row_sum<1024>(off, sh);
    all = stx__row_sum<1024>(all, sh);
    if (threadIdx.x) return;
    stx__put(loss, 0, (float)(off / count));
    stx__put(rel_error, 0, (float)(all > 0 ? off / all : 0));
}

void stx_comp_error_fwd_cuda(stx_ctx *x, const stx_comp_error_args *e) {
    stx__array A = stx__array_of(x, e->a), T = stx__array_of(x, e->target);
    int four = e->D % 4 == 0 && stx__aligned4(A) && stx__aligned4(T);
    if (e->N)
        STX__RUN_WARPS(x, "stx_comp_error_fwd", four, stx__comp_error_kernel, e->N, e->work, A, T,
                       e->skip, e->N, e->D);
    STX__RUN_KERNEL(x, "stx_comp_error_fwd", stx__comp_error_sum_kernel, 1, 1024, 0,
                    stx__array_of(x, e->loss), stx__array_of(x, e->rel_error), e->work, e->N,
                    e->count);
}

/* Gradient of loss = sum (a - t)^2 / count: da = or += 2 (a - t) dloss / count, or 0 in
   rows marked in `skip`. One warp per row. */
template <int W>
STX__GLOBAL(256)
stx__comp_error_bwd_kernel(stx__array da, stx__array dloss, stx__array a, stx__array t,
                           const int32_t *skip, size_t N, size_t C, double count,
                           int accumulate) {
    const float scale = (float)(2 * (double)stx__get(dloss, 0) / count);
    STX__WARPS(n, N) {
        const int out = skip && skip[n];
        if (out && accumulate) continue;
        for (size_t c = threadIdx.x % 32 * W; c < C; c += 32 * W) {
            float v[W] = {0}, w[W];
            if (!out) {
                stx__getn<W>(v, a, n * C + c);
                stx__getn<W>(w, t, n * C + c);
                for (int e = 0; e < W; e++) v[e] = scale * (v[e] - w[e]);
            }
            stx__addn<W>(da, n * C + c, v, accumulate);
        }
    }
}

void stx_comp_error_bwd_cuda(stx_ctx *x, const stx_comp_error_args *e) {
    stx__array D = stx__array_of(x, e->da), G = stx__array_of(x, e->dloss),
               A = stx__array_of(x, e->a), T = stx__array_of(x, e->target);
    int four = e->D % 4 == 0 && stx__aligned4(D) && stx__aligned4(A) && stx__aligned4(T);
    if (e->N && e->D)
        STX__RUN_WARPS(x, "stx_comp_error_bwd", four, stx__comp_error_bwd_kernel, e->N, D, G, A, T,
                       e->skip, e->N, e->D, e->count, e->accumulate);
}


// >>gates

/* The elementwise part of a gate (see stx_comp_gate_args). A thread processes W = 4 or
   1 adjacent elements at a time. The kind is selected outside the loop, so that each
   kind has a separate loop. */
typedef struct stx__comp_gate {
    int kind, accumulate;
    size_t n, D;
    stx__array x, y, p[4], out, dout, dx, dy, dp[4];
} stx__comp_gate;

/* Returns the number of planes of a gate kind. A plane has rows of D elements; p[0] and
   p[1] may each hold several planes side by side. GRU has r, z, n in p[0] and again in
   p[1]. In stx__comp_kind, X and Y are 1 if the kind uses x and y. */
static constexpr __host__ __device__ int stx__comp_planes(int kind) {
    switch (kind) {
    case STX_COMP_GATE_GRU: return 6;
    case STX_COMP_GATE_GTRXL: return 4;
    case STX_COMP_GATE_SIGTANH:
    case STX_COMP_GATE_RESET:
    case STX_COMP_GATE_GLU: return 2;
    default: return 1;
    }
}

template <int K> struct stx__comp_kind {
    static constexpr int P = stx__comp_planes(K);
    static constexpr int X = K != STX_COMP_GATE_GLU;
    static constexpr int Y = K == STX_COMP_GATE_INPUT || K == STX_COMP_GATE_OUTPUT
                             || K == STX_COMP_GATE_HIGHWAY;
    /* number of planes side by side in each p[i] */
    static constexpr int side = P == 6 ? 3 : 1 + (K == STX_COMP_GATE_GLU);
};

static __device__ __forceinline__ float stx__comp_sigmoid(float v) {
    return 1 / (1 + expf(-v));
}

/* These functions return the array that holds plane k, and the index of element i of
   the plane in this array. */
template <int K>
static __device__ __forceinline__ const stx__array &stx__comp_plane(const stx__array (&p)[4],
                                                                    int k) {
    return p[k / stx__comp_kind<K>::side];
}

template <int K>
static __device__ __forceinline__ size_t stx__comp_plane_at(const stx__comp_gate &a, size_t i,
                                                            int k) {
    constexpr int side = stx__comp_kind<K>::side;
    return side > 1 ? i + (side - 1) * a.D * (i / a.D) + (size_t)(k % side) * a.D : i;
}

template <int W, int K>
static __device__ __forceinline__ void stx__comp_gate_get(const stx__comp_gate &a, size_t i,
                                                          float (&x)[W], float (&y)[W],
                                                          float (&p)[6][W]) {
    if (stx__comp_kind<K>::X) stx__getn<W>(x, a.x, i);
    if (stx__comp_kind<K>::Y) stx__getn<W>(y, a.y, i);
  #pragma unroll
    for (int k = 0; k < stx__comp_kind<K>::P; k++)
        stx__getn<W>(p[k], stx__comp_plane<K>(a.p, k), stx__comp_plane_at<K>(a, i, k));
}

template <int W, int K>
static __device__ __forceinline__ void stx__comp_gate_forward(const stx__comp_gate &a) {
    STX__STEP(i, a.n, W) {
        float x[W] = {0}, y[W] = {0}, p[6][W];
        stx__comp_gate_get<W, K>(a, i, x, y, p);
  #pragma unroll
        for (int e = 0; e < W; e++) {
            if constexpr (K == STX_COMP_GATE_GRU) {
                float r = stx__comp_sigmoid(p[0][e] + p[3][e]),
                      z = stx__comp_sigmoid(p[1][e] + p[4][e]);
                float n = tanhf(fmaf(r, p[5][e], p[2][e]));
                x[e] = fmaf(z, x[e] - n, n);
            } else if constexpr (K == STX_COMP_GATE_GTRXL) {
                x[e] = fmaf(stx__comp_sigmoid(p[0][e] + p[1][e]), tanhf(p[2][e] + p[3][e]) - x[e],
                            x[e]);
            } else if constexpr (K == STX_COMP_GATE_RESET) {
                x[e] = stx__comp_sigmoid(p[0][e] + p[1][e]) * x[e];
            } else if constexpr (K == STX_COMP_GATE_GLU) {
                x[e] = p[0][e] * stx__phi(p[0][e]) * p[1][e];
            } else {
                float s = stx__comp_sigmoid(p[0][e]);
                if constexpr (K == STX_COMP_GATE_INPUT)
                    x[e] = fmaf(s, x[e], y[e]);
                else if constexpr (K == STX_COMP_GATE_OUTPUT)
                    x[e] = fmaf(s, y[e], x[e]);
                else if constexpr (K == STX_COMP_GATE_HIGHWAY)
                    x[e] = fmaf(s, x[e] - y[e], y[e]);
                else if constexpr (K == STX_COMP_GATE_SIGTANH)
                    x[e] = fmaf(s, tanhf(p[1][e]), x[e]);
                else
                    x[e] = 2 * s * x[e];
            }
        }
        stx__putn<W>(a.out, i, x);
    }
}

/* The values of W adjacent elements from which the gradients are computed */
template <int W> struct stx__comp_gate_values {
    float x[W], y[W], g[W], p[6][W];
};

template <int W, int K>
static __device__ __forceinline__ stx__comp_gate_values<W>
stx__comp_gate_values_at(const stx__comp_gate &a, size_t i) {
    stx__comp_gate_values<W> v = {};
    stx__getn<W>(v.g, a.dout, i);
    stx__comp_gate_get<W, K>(a, i, v.x, v.y, v.p);
    return v;
}

/* Computes the gradients of elements i .. i+W-1. Replaces v.p with the gradients of the
   planes. With g = dout, s' = s (1 - s) and out as in stx__comp_gate_forward, the
   gradients of GRU are (p_n is plane n of p[1]):

       dn = g (1 - z) (1 - n^2)    dz = g (x - n) z'    dr = dn p_n r'    dx = g z
       gradients of p[0]: dr, dz, dn; of p[1]: dr, dz, r dn */
template <int W, int K>
static __device__ __forceinline__ void stx__comp_gate_grads(const stx__comp_gate &a, size_t i,
                                                            stx__comp_gate_values<W> &v) {
    float(&x)[W] = v.x, (&y)[W] = v.y, (&g)[W] = v.g, (&p)[6][W] = v.p;
  #pragma unroll
    /* each value is replaced by its gradient */
    for (int e = 0; e < W; e++) {
        if constexpr (K == STX_COMP_GATE_GRU) {
            float r = stx__comp_sigmoid(p[0][e] + p[3][e]),
                  z = stx__comp_sigmoid(p[1][e] + p[4][e]);
            float n = tanhf(fmaf(r, p[5][e], p[2][e])), dn = g[e] * (1 - z) * fmaf(-n, n, 1.0f);
            p[0][e] = p[3][e] = dn * p[5][e] * r * (1 - r);
            p[1][e] = p[4][e] = g[e] * (x[e] - n) * z * (1 - z);
            p[2][e] = dn;
            p[5][e] = dn * r;
            x[e] = g[e] * z;
        } else if constexpr (K == STX_COMP_GATE_GTRXL) {
            float z = stx__comp_sigmoid(p[0][e] + p[1][e]), n = tanhf(p[2][e] + p[3][e]);
            p[0][e] = p[1][e] = g[e] * (n - x[e]) * z * (1 - z);
            p[2][e] = p[3][e] = g[e] * z * fmaf(-n, n, 1.0f);
            x[e] = g[e] * (1 - z);
        } else if constexpr (K == STX_COMP_GATE_RESET) {
            float s = stx__comp_sigmoid(p[0][e] + p[1][e]);
            p[0][e] = p[1][e] = g[e] * x[e] * s * (1 - s);
            x[e] = g[e] * s;
        } else if constexpr (K == STX_COMP_GATE_SIGTANH) {
            float s = stx__comp_sigmoid(p[0][e]), n = tanhf(p[1][e]);
            p[0][e] = g[e] * n * s * (1 - s);
            p[1][e] = g[e] * s * fmaf(-n, n, 1.0f);
            x[e] = g[e];
        } else if constexpr (K == STX_COMP_GATE_MOGRIFY) {
            float s = stx__comp_sigmoid(p[0][e]);
            p[0][e] = 2 * g[e] * x[e] * s * (1 - s);
            x[e] = 2 * g[e] * s;
        } else if constexpr (K == STX_COMP_GATE_GLU) {
            float u = p[0][e], phi = stx__phi(u);
            p[0][e] = g[e] * p[1][e] * fmaf(u, 0.39894228040143267794f * expf(-0.5f * u * u), phi);
            p[1][e] = g[e] * u * phi;
        } else if constexpr (K == STX_COMP_GATE_INPUT) {
            float s = stx__comp_sigmoid(p[0][e]);
            p[0][e] = g[e] * x[e] * s * (1 - s);
            x[e] = g[e] * s;
            y[e] = g[e];
        } else if constexpr (K == STX_COMP_GATE_OUTPUT) {
            float s = stx__comp_sigmoid(p[0][e]);
            p[0][e] = g[e] * y[e] * s * (1 - s);
            x[e] = g[e];
            y[e] = g[e] * s;
        } else {
            float s = stx__comp_sigmoid(p[0][e]);
            p[0][e] = g[e] * (x[e] - y[e]) * s * (1 - s);
            x[e] = g[e] * s;
            y[e] = g[e] * (1 - s);
        }
    }
    if (stx__comp_kind<K>::X) stx__addn<W>(a.dx, i, x, a.accumulate);
    if (stx__comp_kind<K>::Y) stx__addn<W>(a.dy, i, y, a.accumulate);
  #pragma unroll
    for (int k = 0; k < stx__comp_kind<K>::P; k++)
        stx__addn<W>(stx__comp_plane<K>(a.dp, k), stx__comp_plane_at<K>(a, i, k), p[k],
                     a.accumulate);
}

template <int W, int K>
static __device__ __forceinline__ void stx__comp_gate_backward(const stx__comp_gate &a) {
    STX__STEP(i, a.n, W) {
        stx__comp_gate_values<W> v = stx__comp_gate_values_at<W, K>(a, i);
        stx__comp_gate_grads<W, K>(a, i, v);
    }
}

/* Runs the loop for one kind, forward or backward. stx__comp_gate_of_kind selects the
   kind. */
template <int W, int K, int BACKWARD>
static __device__ __forceinline__ void stx__comp_gate_pass(const stx__comp_gate &a) {
    if constexpr (BACKWARD)
        stx__comp_gate_backward<W, K>(a);
    else
        stx__comp_gate_forward<W, K>(a);
}

template <int W, int BACKWARD>
static __device__ __forceinline__ void stx__comp_gate_of_kind(const stx__comp_gate &a) {
    switch (a.kind) {
    case STX_COMP_GATE_GRU: stx__comp_gate_pass<W, STX_COMP_GATE_GRU, BACKWARD>(a); break;
    case STX_COMP_GATE_INPUT: stx__comp_gate_pass<W, STX_COMP_GATE_INPUT, BACKWARD>(a); break;
    case STX_COMP_GATE_OUTPUT: stx__comp_gate_pass<W, STX_COMP_GATE_OUTPUT, BACKWARD>(a); break;
    case STX_COMP_GATE_HIGHWAY: stx__comp_gate_pass<W, STX_COMP_GATE_HIGHWAY, BACKWARD>(a); break;
    case STX_COMP_GATE_SIGTANH: stx__comp_gate_pass<W, STX_COMP_GATE_SIGTANH, BACKWARD>(a); break;
    case STX_COMP_GATE_GTRXL: stx__comp_gate_pass<W, STX_COMP_GATE_GTRXL, BACKWARD>(a); break;
    case STX_COMP_GATE_RESET: stx__comp_gate_pass<W, STX_COMP_GATE_RESET, BACKWARD>(a); break;
    case STX_COMP_GATE_GLU: stx__comp_gate_pass<W, STX_COMP_GATE_GLU, BACKWARD>(a); break;
    default: stx__comp_gate_pass<W, STX_COMP_GATE_MOGRIFY, BACKWARD>(a);
    }
}

template <int W> STX__GLOBAL(256) stx__comp_gate_fwd_kernel(stx__comp_gate a) {
    stx__comp_gate_of_kind<W, 0>(a);
}

template <int W> STX__GLOBAL(256) stx__comp_gate_bwd_kernel(stx__comp_gate a) {
    stx__comp_gate_of_kind<W, 1>(a);
}

/* Backward pass that also computes `part` (chunks,P D): the sums of the planes' gradients
   over `rows` rows per chunk. */
template <int S, int K>
STX__GLOBAL(256)
stx__comp_gate_sums_kernel(stx__comp_gate a, float *part, size_t rows) {
    constexpr int W = stx__width<S>, P = stx__comp_kind<K>::P;
    STX__SHARED(float, sh, 8 * 32 * W);
    a.x = stx__stored<S>(a.x);
    a.dx = stx__stored<S>(a.dx);
    a.dout = stx__stored<S>(a.dout);
  #pragma unroll
    for (int k = 0; k < 4; k++) {
        a.p[k] = stx__stored<S>(a.p[k]);
        a.dp[k] = stx__stored<S>(a.dp[k]);
    }
    stx__column_sums<P, W, 1>(
        part, P * a.D, a.n / a.D, a.D, rows, sh,
        [&](size_t n, size_t c) { return stx__comp_gate_values_at<W, K>(a, n * a.D + c); },
        [&](float (&s)[P][W], stx__comp_gate_values<W> &v, size_t n, size_t c) {
            stx__comp_gate_grads<W, K>(a, n * a.D + c, v);
  #pragma unroll
            for (int k = 0; k < P; k++)
                for (int e = 0; e < W; e++) s[k][e] += v.p[k][e];
        });
}

template <int K>
static void stx__comp_gate_bwd_sums(stx_ctx *x, const stx_comp_gate_args *a,
                                    const stx__comp_gate *p) {
    const char *what = "stx_comp_gate_bwd, sums";
    const size_t P = stx__comp_kind<K>::P;
    const int count = K == STX_COMP_GATE_GRU ? 2 : 1,
              access = stx__access(a->D, {p->x, p->dx, p->dout, p->p[0], p->p[1], p->dp[0],
                                          p->dp[1]}, {});
    const stx__column_launch l =
        stx__column_launch_of(x, what, a->N, a->D, P, access, a->defer_db);
    if (!l.part) return;
    STX__CHOOSE(S, access, (STX__FLOATS, STX__HALVES, STX__MIXED),
                STX__RUN_KERNEL(x, what, (stx__comp_gate_sums_kernel<S, K>), l.grid, 256, 0, *p,
                                l.part, l.rows));
    stx__column_launch_end(x, &l, a->db, count, P / (size_t)count * a->D);
}

/* Sets the arguments of the kernels and sets *four to 1 if all arrays can be accessed
   four elements at a time, otherwise to 0. Returns 0 if there is nothing to do or after
   an error. */
static int stx__comp_gate_of(stx_ctx *x, const stx_comp_gate_args *a, int backward,
                             stx__comp_gate *p, int *four) {
    const char *what = backward ? "stx_comp_gate_bwd" : "stx_comp_gate_fwd";
    int i;
    if (!stx_ok(x) || !a->N || !a->D) return 0;
    if (a->kind < STX_COMP_GATE_GRU || a->kind > STX_COMP_GATE_GLU) {
        stx_fail(x, STX_ERR_ARG, "%s: kind: expected one of STX_COMP_GATE_GRU .. _GLU, got %d",
                 what, a->kind);
        return 0;
    }
    memset(p, 0, sizeof *p);
    p->kind = a->kind;
    p->accumulate = a->accumulate;
    p->n = a->N * a->D;
    p->D = a->D;
    p->x = stx__array_of(x, a->x);
    p->y = stx__array_of(x, a->y);
    p->out = stx__array_of(x, backward ? NULL : a->out);
    p->dout = stx__array_of(x, backward ? a->dout : NULL);
    p->dx = stx__array_of(x, backward ? a->dx : NULL);
    p->dy = stx__array_of(x, backward ? a->dy : NULL);
    *four = a->D % 4 == 0 && stx__aligned4(p->x) && stx__aligned4(p->y) && stx__aligned4(p->out)
            && stx__aligned4(p->dout) && stx__aligned4(p->dx) && stx__aligned4(p->dy);
    for (i = 0; i < 4; i++) {
        p->p[i] = stx__array_of(x, a->p[i]);
        p->dp[i] = stx__array_of(x, backward ? a->dp[i] : NULL);
        *four = *four && stx__aligned4(p->p[i]) && stx__aligned4(p->dp[i]);
    }
    return 1;
}

void stx_comp_gate_fwd_cuda(stx_ctx *x, const stx_comp_gate_args *a) {
    stx__comp_gate p;
    int four;
    if (stx__comp_gate_of(x, a, 0, &p, &four))
        STX__RUN_BY(x, "stx_comp_gate_fwd", four, stx__comp_gate_fwd_kernel, p.n, p);
}

void stx_comp_gate_bwd_cuda(stx_ctx *x, const stx_comp_gate_args *a) {
    stx__comp_gate p;
    int four;
    if (!stx__comp_gate_of(x, a, 1, &p, &four)) return;
    if ((a->db[0] || a->db[1]) && a->kind == STX_COMP_GATE_GRU)
        stx__comp_gate_bwd_sums<STX_COMP_GATE_GRU>(x, a, &p);
    else if (a->db[0] && a->kind == STX_COMP_GATE_GLU)
        stx__comp_gate_bwd_sums<STX_COMP_GATE_GLU>(x, a, &p);
    else
        STX__RUN_BY(x, "stx_comp_gate_bwd", four, stx__comp_gate_bwd_kernel, p.n, p);
}
#endif /* SEQTX_COMPRESSIVE_H */


/* ---- src/cuda/par_gate.cuh ---- */
// >>gate

#ifdef SEQTX_PAR_H
/* Kernels for seqtx_par.h. The gate of a network block has a value per branch, or one
   per branch and draw. They are computed in double, as on the CPU, and stay on the device
   from the noise to the parameter gradients. The kernels have arrays of N branches: N is
   3 for gates with three branches, otherwise STX_PAR_MAX_BRANCHES. */
typedef struct stx__par_gate {
    size_t R, uniforms_stride;
    int branches, form, hard, noisy, latency_w;
    uint64_t seed, stream, first;
    const uint64_t *shift;
    stx__array al, tau, uniforms, cost, before, w, y, lat, dw, dlat, dal, dbefore;
} stx__par_gate;

static stx__par_gate stx__par_gate_of(stx_ctx *x, const stx_par_gate_args *a) {
    stx__par_gate g;
    memset(&g, 0, sizeof g);
    g.R = a->R;
    g.uniforms_stride = a->uniforms_stride;
    g.branches = a->branches ? a->branches : 3;
    g.form = a->form;
    g.hard = a->hard;
    g.noisy = a->noisy;
    g.latency_w = a->latency_w;
    g.seed = a->seed;
    g.stream = a->stream;
    g.first = a->first;
    g.shift = stx__gpu(x)->shift;
    g.al = stx__array_of(x, a->al);
    g.tau = stx__array_of(x, a->tau);
    g.uniforms = stx__array_of(x, a->uniforms);
    g.cost = stx__array_of(x, a->cost);
    g.before = stx__array_of(x, a->before);
    g.w = stx__array_of(x, a->w);
    g.y = stx__array_of(x, a->y);
    g.lat = stx__array_of(x, a->lat);
    g.dw = stx__array_of(x, a->dw);
    g.dlat = stx__array_of(x, a->dlat);
    g.dal = stx__array_of(x, a->dal);
    g.dbefore = stx__array_of(x, a->dbefore);
    return g;
}

/* Returns whether the gate has branch k. */
template <int N> static __device__ __forceinline__ int stx__par_has(const stx__par_gate &a, int k) {
    return N == 3 || k < a.branches;
}

/* Returns the number of branches. */
template <int N> static __device__ __forceinline__ size_t stx__par_count(const stx__par_gate &a) {
    return N == 3 ? 3 : (size_t)a.branches;
}

/* Computes pi, ln_pi (ln p or, with STX_PAR_FORM_PI, ln pi) and p = pi / sum pi, like
   the CPU function stx__par_probabilities. Returns sum pi. */
template <int N>
static __device__ __forceinline__ double stx__par_probabilities(const stx__par_gate &a,
                                                                double (&ln_pi)[N], double (&pi)[N],
                                                                double (&p)[N]) {
    double al[N], top, sum = 0;
    for (int k = 0; k < N; k++)
        al[k] = stx__par_has<N>(a, k) ? (double)stx__get(a.al, (size_t)k) : 0;
    top = al[0];
    for (int k = 1; k < N; k++)
        if (stx__par_has<N>(a, k) && al[k] > top) top = al[k];
    for (int k = 0; k < N; k++) {
        pi[k] = 0;
        if (!stx__par_has<N>(a, k)) continue;
        if (al[k] != al[k])
            pi[k] = al[k];
        else if (a.form == STX_PAR_FORM_PI)
            pi[k] = (al[k] > 0 ? al[k] : 0) + 1e-5;
        else
            pi[k] = exp(al[k] - top);
        sum += pi[k];
    }
    for (int k = 0; k < N; k++) {
        ln_pi[k] = a.form == STX_PAR_FORM_PI ? log(pi[k]) : al[k] - top - log(sum);
        p[k] = pi[k] / sum;
    }
    return sum;
}

/* Returns whether the latency is computed from p. */
static __device__ __forceinline__ int stx__par_of_p(const stx__par_gate &a) {
    return a.lat.p && a.latency_w == STX_PAR_LATENCY_OF_P;
}

/* Returns whether the latency is computed from w. */
static __device__ __forceinline__ int stx__par_of_w(const stx__par_gate &a) {
    return a.lat.p && a.latency_w == STX_PAR_LATENCY_OF_W;
}

/* Sets lat to the latency of this network block plus the latency of the preceding
   blocks. */
static __device__ __forceinline__ void stx__par_gate_set_latency(const stx__par_gate &a,
                                                                 double lat) {
    stx__put(a.lat, 0, (float)(lat + (a.before.p ? (double)stx__get(a.before, 0) : 0)));
}

/* Computes y and w of each draw, and the latency. One thread per draw, T draws per
   block. If the latency is computed from w and there are several blocks, each block
   stores its sum over draws in `part` (blocks). The launch bound is T threads and one
   block per multiprocessor, because double arithmetic uses many registers. */
template <int T, int N>
STX__GLOBAL(T, 1)
stx__par_gate_fwd_kernel(stx__par_gate a, double *part) {
    STX__SHARED(double, sh, 32);
    const size_t r = (size_t)blockIdx.x * T + threadIdx.x, K = stx__par_count<N>(a);
    double ln_pi[N], pi[N], p[N], v[N], lat = 0;
    (void)stx__par_probabilities(a, ln_pi, pi, p);
    if (r < a.R) {
        const double tau = a.noisy ? (double)stx__get(a.tau, 0) : 1;
        double sum = 0, top;
        int best = 0;
        uint4 bits = make_uint4(0, 0, 0, 0), more = bits;
        if (a.noisy && !a.uniforms.p) {
            bits = stx__philox(a.seed, a.stream + *a.shift, a.first + (uint64_t)r);
            if (N > 4 && K > 4)
                more = stx__philox(a.seed, a.stream + *a.shift + ((uint64_t)1 << 61),
                                   a.first + (uint64_t)r);
        }
        const uint32_t word[8] = {bits.x, bits.y, bits.z, bits.w, more.x, more.y, more.z, more.w};
  #pragma unroll
        for (int k = 0; k < N; k++) {
            double u;
            v[k] = 0;       /* compared below before stx__par_has is known */
            if (!stx__par_has<N>(a, k)) continue;
            if (a.noisy && a.uniforms.p)
                u = (double)stx__get(a.uniforms, r * a.uniforms_stride + (size_t)k);
            else
                u = ((double)(word[k] >> 9) + 0.5) / 8388608;
            v[k] = (ln_pi[k] + (a.noisy ? -log(-log(u)) : 0)) / tau;
        }
        top = v[0];
  #pragma unroll
        for (int k = 1; k < N; k++)
            if (stx__par_has<N>(a, k) && v[k] > top) {
                top = v[k];
                best = k;
            }
  #pragma unroll
        for (int k = 0; k < N; k++)
            if (stx__par_has<N>(a, k)) sum += v[k] = exp(v[k] - top);
  #pragma unroll
        for (int k = 0; k < N; k++) {
            double y;
            if (!stx__par_has<N>(a, k)) continue;
            y = v[k] / sum;
            stx__put(a.y, K * r + (size_t)k, (float)y);
            if (a.hard && y == y) y = k == best;
            stx__put(a.w, K * r + (size_t)k, (float)y);
            if (stx__par_of_w(a)) lat += y * (double)stx__get(a.cost, (size_t)k) / (double)a.R;
        }
    }
    if (stx__par_of_w(a)) {
        lat = stx__row_sum<T>(lat, sh);
        if (part && threadIdx.x == 0) part[blockIdx.x] = lat;
    } else {
        for (int k = 0; k < N && a.lat.p && stx__par_has<N>(a, k); k++)
            lat += p[k] * (double)stx__get(a.cost, (size_t)k);
    }
    if (a.lat.p && !part && blockIdx.x == 0 && threadIdx.x == 0)
        stx__par_gate_set_latency(a, lat);
}

/* Adds the sums of the blocks. One block: a thread adds every 256th sum, then a fixed
   tree adds the threads' sums. */
STX__GLOBAL(256) stx__par_gate_lat_kernel(stx__par_gate a, const double *part, size_t blocks) {
    STX__SHARED(double, sh, 32);
    double lat = 0;
    for (size_t i = threadIdx.x; i < blocks; i += 256) lat += part[i];
    lat = stx__row_sum<256>(lat, sh);
    if (threadIdx.x == 0) stx__par_gate_set_latency(a, lat);
}

/* Rejects a call with more than 2^36 draws. The limit keeps the grid below 2^31 blocks.
   Returns nonzero after an error. */
static int stx__par_gate_refused(stx_ctx *x, const stx_par_gate_args *a, const char *what) {
    if (stx_ok(x) && a->R > (size_t)1 << 36)
        stx_fail(x, STX_ERR_SHAPE, "%s: R: expected at most 2^36 draws, got %zu", what, a->R);
    return !stx_ok(x);
}

void stx_par_gate_fwd_cuda(stx_ctx *x, const stx_par_gate_args *a) {
    const size_t blocks = a->R ? (a->R + 255) / 256 : 1;
    double *part = NULL;
    stx__par_gate g;
    if (stx__par_gate_refused(x, a, "stx_par_gate_fwd")) return;
    g = stx__par_gate_of(x, a);
    if (blocks > 1 && a->lat && a->latency_w == STX_PAR_LATENCY_OF_W
        && !(part = (double *)stx__scratch_of(x, blocks * sizeof *part, "stx_par_gate_fwd")))
        return;
    if (a->R <= 32)
        STX__CHOOSE(N, g.branches, (3, STX_PAR_MAX_BRANCHES),
                    STX__RUN_KERNEL(x, "stx_par_gate_fwd", (stx__par_gate_fwd_kernel<32, N>), 1, 32,
                                    0, g, part));
    else
        STX__CHOOSE(N, g.branches, (3, STX_PAR_MAX_BRANCHES),
                    STX__RUN_KERNEL(x, "stx_par_gate_fwd", (stx__par_gate_fwd_kernel<256, N>),
                                    (unsigned)blocks, 256, 0, g, part));
    if (part)
        STX__RUN_KERNEL(x, "stx_par_gate_fwd", stx__par_gate_lat_kernel, 1, 256, 0, g, part,
                        blocks);
}

/* Adds the parameter gradients, in one thread. Forward: w = y =
   softmax((ln pi + noise) / tau), and lat = before + sum_k p_k cost_k or, from w,
   before + the mean over draws of sum_k w_k cost_k. With ds and c_k as in
   stx_par_gate_args:

       LOGITS   dal_k += ds_k - p_k sum ds + p_k c_k
       PI       dal_k += ds_k / pi_k + c_k / sum pi, where al_k >= 0 */
template <int N>
static __device__ __forceinline__ void stx__par_gate_add_grads(const stx__par_gate &a,
                                                               const double (&ds)[N],
                                                               double dlat) {
    double ln_pi[N], pi[N], p[N], mean_cost = 0, ds_sum = ds[0];
    const double pi_sum = stx__par_probabilities(a, ln_pi, pi, p);
    for (int k = 1; k < N; k++) ds_sum += ds[k];
    for (int k = 0; k < N && stx__par_of_p(a) && stx__par_has<N>(a, k); k++)
        mean_cost += p[k] * (double)stx__get(a.cost, (size_t)k);
    for (int k = 0; k < N && stx__par_has<N>(a, k); k++) {
        double c = 0;
        if (stx__par_of_p(a)) c = dlat * ((double)stx__get(a.cost, (size_t)k) - mean_cost);
        if (a.form == STX_PAR_FORM_LOGITS)
            stx__add(a.dal, (size_t)k, (float)(ds[k] - p[k] * ds_sum + p[k] * c), 1);
        else if (!(stx__get(a.al, (size_t)k) < 0))
            stx__add(a.dal, (size_t)k, (float)(ds[k] / pi[k] + c / pi_sum), 1);
    }
}

static __device__ __forceinline__ double stx__par_gate_dlat(const stx__par_gate &a) {
    return a.lat.p && a.dlat.p ? (double)stx__get(a.dlat, 0) : 0;
}

/* Backward. A block sums over `each` draws, a thread over every T-th of them. If there
   are several blocks, each stores its sums in `part` (blocks,N), and
   stx__par_gate_sum_kernel adds them. */
template <int T, int N>
STX__GLOBAL(T)
stx__par_gate_bwd_kernel(stx__par_gate a, double *part, size_t each) {
    STX__SHARED(double, sh, 32);
    const size_t lo = (size_t)blockIdx.x * each, hi = lo + each < a.R ? lo + each : a.R;
    const double dlat = stx__par_gate_dlat(a),
                 tau = a.noisy && a.dal.p ? (double)stx__get(a.tau, 0) : 1;
    const size_t K = stx__par_count<N>(a);
    double s[N] = {0};
    if (a.dal.p)
        for (size_t r = lo + threadIdx.x; r < hi; r += T) {
            double y[N] = {0}, dw[N] = {0}, dot = 0;
  #pragma unroll
            for (int k = 0; k < N; k++) {
                if (!stx__par_has<N>(a, k)) continue;
                y[k] = (double)stx__get(a.y, K * r + (size_t)k);
                dw[k] = a.dw.p ? (double)stx__get(a.dw, K * r + (size_t)k) : 0;
                if (stx__par_of_w(a))
                    dw[k] += dlat * (double)stx__get(a.cost, (size_t)k) / (double)a.R;
                dot += y[k] * dw[k];
            }
  #pragma unroll
            for (int k = 0; k < N; k++) s[k] += y[k] * (dw[k] - dot) / tau;
        }
  #pragma unroll
    for (int k = 0; k < N; k++) {
        s[k] = stx__row_sum<T>(s[k], sh);
        if (part && threadIdx.x == 0) part[N * (size_t)blockIdx.x + (size_t)k] = s[k];
    }
    if (threadIdx.x || blockIdx.x) return;
    if (a.dbefore.p && a.lat.p) stx__add(a.dbefore, 0, (float)dlat, 1);
    if (a.dal.p && !part) stx__par_gate_add_grads(a, s, dlat);
}

template <int N>
STX__GLOBAL(256)
stx__par_gate_sum_kernel(stx__par_gate a, const double *part, size_t blocks) {
    STX__SHARED(double, sh, 32);
    double s[N] = {0};
    for (size_t i = threadIdx.x; i < blocks; i += 256)
        for (int k = 0; k < N; k++) s[k] += part[N * i + (size_t)k];
    for (int k = 0; k < N; k++) s[k] = stx__row_sum<256>(s[k], sh);
    if (threadIdx.x == 0) stx__par_gate_add_grads(a, s, stx__par_gate_dlat(a));
}

void stx_par_gate_bwd_cuda(stx_ctx *x, const stx_par_gate_args *a) {
    const size_t each = stx__chunk(a->R, 1024, 1024), blocks = a->R ? (a->R + each - 1) / each : 1;
    double *part = NULL;
    stx__par_gate g;
    if (stx__par_gate_refused(x, a, "stx_par_gate_bwd")) return;
    g = stx__par_gate_of(x, a);
    if (blocks > 1 && a->dal
        && !(part = (double *)stx__scratch_of(x, STX_PAR_MAX_BRANCHES * blocks * sizeof *part,
                                              "stx_par_gate_bwd")))
        return;
    if (a->R <= 32)
        STX__CHOOSE(N, g.branches, (3, STX_PAR_MAX_BRANCHES),
                    STX__RUN_KERNEL(x, "stx_par_gate_bwd", (stx__par_gate_bwd_kernel<32, N>), 1, 32,
                                    0, g, part, each));
    else
        STX__CHOOSE(N, g.branches, (3, STX_PAR_MAX_BRANCHES),
                    STX__RUN_KERNEL(x, "stx_par_gate_bwd", (stx__par_gate_bwd_kernel<256, N>),
                                    (unsigned)blocks, 256, 0, g, part, each));
    if (part)
        STX__CHOOSE(N, g.branches, (3, STX_PAR_MAX_BRANCHES),
                    STX__RUN_KERNEL(x, "stx_par_gate_bwd", stx__par_gate_sum_kernel<N>, 1, 256, 0,
                                    g, part, blocks));
}
#endif /* SEQTX_PAR_H */


/* ---- src/cuda/par_mix.cuh ---- */
// >>mix

#ifdef SEQTX_PAR_H
/* y = w0 Y0 + w1 Y1 + w2 h, where Yi = layernorm(h + branch_i), or Yi = h + branch_i if
   there are no gains (NORM = 0). See stx_par_mix_args. The forward pass sets y, mean
   and rstd, the backward pass the gradients. */
typedef struct stx__par_mix {
    size_t N, C, period, rows_per_draw, draws_per_period;
    float eps;
    int add_h, add[2];
    stx__array h, branch[2], gain[2], shift[2], y, dy, dh, dbranch[2];
    const float *w;
    float *mean[2], *rstd[2];
    double *work;
} stx__par_mix;

template <int S>
static __device__ __forceinline__ stx__par_mix stx__stored(const stx__par_mix &m) {
    stx__par_mix a = m;
    a.h = stx__stored<S>(a.h);
    a.y = stx__stored<S>(a.y);
    a.dy = stx__stored<S>(a.dy);
    a.dh = stx__stored<S>(a.dh);
  #pragma unroll
    for (int i = 0; i < 2; i++) {
        a.branch[i] = stx__stored<S>(a.branch[i]);
        a.dbranch[i] = stx__stored<S>(a.dbranch[i]);
        a.gain[i] = stx__stored_f32<S>(a.gain[i]);
        a.shift[i] = stx__stored_f32<S>(a.shift[i]);
    }
    return a;
}

static stx__par_mix stx__par_mix_of(stx_ctx *x, const stx_par_mix_args *a, int backward) {
    stx__par_mix m;
    int i;
    memset(&m, 0, sizeof m);
    m.N = a->N;
    m.C = a->C;
    m.period = a->period;
    m.rows_per_draw = a->rows_per_draw;
    m.draws_per_period = (a->period + a->rows_per_draw - 1) / a->rows_per_draw;
    m.eps = a->eps;
    m.h = stx__array_of(x, a->h);
    m.w = a->w;
    m.y = stx__array_of(x, backward ? NULL : a->y);
    m.dy = stx__array_of(x, backward ? a->dy : NULL);
    m.dh = stx__array_of(x, backward ? a->dh : NULL);
    m.add_h = a->add_h;
    m.work = backward && a->dw ? a->work : NULL;
    for (i = 0; i < 2; i++) {
        m.branch[i] = stx__array_of(x, a->branch[i]);
        m.gain[i] = stx__array_of(x, a->gain[i]);
        m.shift[i] = stx__array_of(x, a->shift[i]);
        m.mean[i] = a->mean[i];
        m.rstd[i] = a->rstd[i];
        m.dbranch[i] = stx__array_of(x, backward ? a->dbranch[i] : NULL);
        m.add[i] = a->add[i];
    }
    return m;
}

static int stx__par_mix_access(const stx__par_mix &m) {
    return stx__access(
        m.C, {m.h, m.y, m.dy, m.dh, m.branch[0], m.branch[1], m.dbranch[0], m.dbranch[1]},
        {m.gain[0], m.gain[1], m.shift[0], m.shift[1]});
}

static int stx__par_mix_refused(stx_ctx *x, const stx_par_mix_args *a, const char *what) {
    if (stx_ok(x) && (!a->period || !a->rows_per_draw))
        stx_fail(x, STX_ERR_SHAPE,
                 "%s: expected period and rows_per_draw to be at least 1, got %zu and %zu", what,
                 a->period, a->rows_per_draw);
    return !stx_ok(x);
}

/* Loads the weights of row n. */
static __device__ __forceinline__ void stx__par_weights(float (&w)[3], const stx__par_mix &a,
                                                        size_t n) {
    size_t k = n / a.period;
    size_t r = k * a.draws_per_period + (n - k * a.period) / a.rows_per_draw;
  #pragma unroll
    for (int i = 0; i < 3; i++) w[i] = a.w[3 * r + (size_t)i];
}

/* Adds w t to o if w is not 0. If w is 0, the branch was not selected, and its values
   must be ignored, because they may be NaN. Sums start from -0, because -0 + t is t bit
   for bit, even if t is -0. */
template <int W>
static __device__ __forceinline__ void stx__par_term(float (&o)[W], float w, const float (&t)[W]) {
    if (w != 0)
        for (int e = 0; e < W; e++) o[e] = fmaf(w, t[e], o[e]);
}

/* Loads W elements, starting at index i, of h and of the two sums h + branch_0 and
   h + branch_1. */
template <int W>
static __device__ __forceinline__ void stx__par_load_sums(float (&h)[W], float (&s)[2][W],
                                                          const stx__par_mix &a, size_t i) {
    stx__getn<W>(h, a.h, i);
    stx__getn<W>(s[0], a.branch[0], i);
    stx__getn<W>(s[1], a.branch[1], i);
    for (int e = 0; e < W; e++) {
        s[0][e] += h[e];
        s[1][e] += h[e];
    }
}

/* Computes the means and reciprocal standard deviations of a row of h + branch_i in
   registers, and subtracts the means from the row. */
template <int Q>
static __device__ __forceinline__ void stx__par_moments(float (&s)[Q][2][4], float (&m)[2],
                                                        float (&r)[2], size_t C, float eps) {
    const size_t lane = threadIdx.x % 32;
    float sum[2] = {0, 0};
  #pragma unroll
    for (int k = 0; k < Q; k++)
        for (int i = 0; i < 2; i++) sum[i] += (s[k][i][0] + s[k][i][1]) + (s[k][i][2] + s[k][i][3]);
  #pragma unroll
    for (int i = 0; i < 2; i++) {
        m[i] = stx__warp_sum(sum[i]) / (float)C;
        sum[i] = 0;
    }
  #pragma unroll
    for (int k = 0; k < Q; k++)
        if (4 * (lane + 32 * k) < C)
            for (int i = 0; i < 2; i++)
                for (int e = 0; e < 4; e++) {
                    s[k][i][e] -= m[i];
                    sum[i] = fmaf(s[k][i][e], s[k][i][e], sum[i]);
                }
  #pragma unroll
    for (int i = 0; i < 2; i++) r[i] = 1 / sqrtf(stx__warp_sum(sum[i]) / (float)C + eps);
}

/* Forward with layer norms, for C up to 128 Q. One warp per row; the row stays in
   registers, 4 Q elements per lane. The sums are bit-identical to those of
   stx__norm_fwd_kernel. A block has 256 threads and processes 8 rows. The bound on
   blocks per multiprocessor limits the longest rows to 128 registers. */
template <int Q, int S>
STX__GLOBAL(256, Q == 8 ? 2 : 0)
stx__par_mix_fwd_kernel(stx__par_mix mix) {
    const stx__par_mix a = stx__stored<S>(mix);
    const size_t lane = threadIdx.x % 32, C = a.C;
    STX__EACH_ROW(n, a.N, 32) {
        float h[Q][4], s[Q][2][4], w[3], m[2], r[2];
        stx__par_weights(w, a, n);
  #pragma unroll
        for (int k = 0; k < Q; k++) {
            size_t c = 4 * (lane + 32 * k);
            for (int e = 0; e < 4; e++) h[k][e] = s[k][0][e] = s[k][1][e] = 0;
            if (c < C) stx__par_load_sums<4>(h[k], s[k], a, n * C + c);
        }
        stx__par_moments<Q>(s, m, r, C, a.eps);
  #pragma unroll
        for (int k = 0; k < Q; k++) {
            size_t c = 4 * (lane + 32 * k);
            if (c < C) {
                float o[4] = {-0.0f, -0.0f, -0.0f, -0.0f};
  #pragma unroll
                for (int i = 0; i < 2; i++) {
                    float g[4], b[4];
                    stx__getn<4>(g, a.gain[i], c);
                    stx__getn<4>(b, a.shift[i], c);
                    for (int e = 0; e < 4; e++) s[k][i][e] = fmaf(s[k][i][e] * r[i], g[e], b[e]);
                    stx__par_term<4>(o, w[i], s[k][i]);
                }
                stx__par_term<4>(o, w[2], h[k]);
                for (int e = 0; e < 4; e++) h[k][e] = o[e];
            }
        }
        stx__put_quads<Q>(a.y, n * C, h, C);
        if (lane == 0)
            for (int i = 0; i < 2; i++) {
                a.mean[i][n] = m[i];
                a.rstd[i][n] = r[i];
            }
    }
}

/* Like stx__par_mix_fwd_kernel, for any C. A warp reads its row three times, mostly
   from the caches, or only once if there are no layer norms. */
template <int S, int NORM> STX__GLOBAL(256) stx__par_mix_fwd_any_kernel(stx__par_mix mix) {
    constexpr int W = stx__width<S>;
    const stx__par_mix a = stx__stored<S>(mix);
    const size_t lane = threadIdx.x % 32, C = a.C;
    STX__EACH_ROW(n, a.N, 32) {
        float h[W], s[2][W], w[3], sum[2] = {0, 0}, m[2] = {0, 0}, r[2] = {1, 1};
        stx__par_weights(w, a, n);
        if (NORM) {
            for (size_t c = lane * W; c < C; c += 32 * W) {
                stx__par_load_sums<W>(h, s, a, n * C + c);
                for (int i = 0; i < 2; i++)
                    for (int e = 0; e < W; e++) sum[i] += s[i][e];
            }
            for (int i = 0; i < 2; i++) {
                m[i] = stx__warp_sum(sum[i]) / (float)C;
                sum[i] = 0;
            }
            for (size_t c = lane * W; c < C; c += 32 * W) {
                stx__par_load_sums<W>(h, s, a, n * C + c);
                for (int i = 0; i < 2; i++)
                    for (int e = 0; e < W; e++)
                        sum[i] = fmaf(s[i][e] - m[i], s[i][e] - m[i], sum[i]);
            }
            for (int i = 0; i < 2; i++) r[i] = 1 / sqrtf(stx__warp_sum(sum[i]) / (float)C + a.eps);
        }
        for (size_t c = lane * W; c < C; c += 32 * W) {
            float o[W];
            for (int e = 0; e < W; e++) o[e] = -0.0f;
            stx__par_load_sums<W>(h, s, a, n * C + c);
  #pragma unroll
            for (int i = 0; i < 2; i++) {
                if (NORM) {
                    float g[W], b[W];
                    stx__getn<W>(g, a.gain[i], c);
                    stx__getn<W>(b, a.shift[i], c);
                    for (int e = 0; e < W; e++) s[i][e] = fmaf((s[i][e] - m[i]) * r[i], g[e], b[e]);
                }
                stx__par_term<W>(o, w[i], s[i]);
            }
            stx__par_term<W>(o, w[2], h);
            stx__putn<W>(a.y, n * C + c, o);
        }
        if (NORM && lane == 0)
            for (int i = 0; i < 2; i++) {
                a.mean[i][n] = m[i];
                a.rstd[i][n] = r[i];
            }
    }
}

template <int NORM> static void stx__par_mix_fwd(stx_ctx *x, const stx__par_mix &m) {
    const char *name = "stx_par_mix_fwd";
    const int access = stx__par_mix_access(m);
    unsigned grid = stx__blocks(m.N, 8, (size_t)1 << 20);
    if (NORM && access != STX__MIXED && m.C <= 1024)
        STX__CHOOSE(S, access, (STX__FLOATS, STX__HALVES),
                    STX__CHOOSE(Q, (m.C + 127) / 128, (1, 2, 4, 8),
                                STX__RUN_KERNEL(x, name, (stx__par_mix_fwd_kernel<Q, S>), grid, 256,
                                                0, m)));
    else
        STX__CHOOSE(S, access, (STX__FLOATS, STX__HALVES, STX__MIXED),
                    STX__RUN_KERNEL(x, name, (stx__par_mix_fwd_any_kernel<S, NORM>), grid, 256, 0,
                                    m));
}

void stx_par_mix_fwd_cuda(stx_ctx *x, const stx_par_mix_args *a) {
    if (!a->N || !a->C || stx__par_mix_refused(x, a, "stx_par_mix_fwd")) return;
    if (a->gain[0])
        stx__par_mix_fwd<1>(x, stx__par_mix_of(x, a, 0));
    else
        stx__par_mix_fwd<0>(x, stx__par_mix_of(x, a, 0));
}

/* The sums over a row that the backward pass requires. With d = dy gain_i and
   xi = h + branch_i - mean_i:

       [i]       sum d xi, so that sum dy Yi = rstd_i [i] + [5 + i]; without layer
                 norms, sum dy (h + branch_i)
       [2]       sum dy h
       [3 + i]   sum d
       [5 + i]   sum dy shift_i

   With k0 = mean d and k1 = rstd_i^2 mean (d xi), the gradients of a row are

       dsi = wi rstd_i (d - k0 - xi k1)       dh = w2 dy + ds0 + ds1 */
enum { STX__PAR_DOTS = 7 };

typedef struct stx__par_row {
    float w[3], m[2], r[2], k0[2], k1[2];
} stx__par_row;

template <int NORM>
static __device__ __forceinline__ stx__par_row stx__par_row_of(const stx__par_mix &a, size_t n) {
    stx__par_row q = {{0, 0, 0}, {0, 0}, {1, 1}, {0, 0}, {0, 0}};
    stx__par_weights(q.w, a, n);
  #pragma unroll
    for (int i = 0; i < 2 && NORM; i++) {
        q.m[i] = a.mean[i][n];
        q.r[i] = a.rstd[i][n];
    }
    return q;
}

/* Adds W elements of a row to its sums and, with NORM, replaces s by xi. */
template <int W, int NORM>
static __device__ __forceinline__ void stx__par_dots(float (&t)[STX__PAR_DOTS], float (&dy)[W],
                                                     float (&s)[2][W], const stx__par_mix &a,
                                                     const stx__par_row &q, size_t n, size_t c) {
    float h[W];
    stx__getn<W>(dy, a.dy, n * a.C + c);
    stx__par_load_sums<W>(h, s, a, n * a.C + c);
    for (int e = 0; e < W; e++) t[2] = fmaf(dy[e], h[e], t[2]);
  #pragma unroll
    for (int i = 0; i < 2; i++) {
        float g[W], b[W];
        if (!NORM) {
            for (int e = 0; e < W; e++) t[i] = fmaf(dy[e], s[i][e], t[i]);
            continue;
        }
        stx__getn<W>(g, a.gain[i], c);
        stx__getn<W>(b, a.shift[i], c);
        for (int e = 0; e < W; e++) {
            float d = dy[e] * g[e];
            s[i][e] -= q.m[i];
            t[i] = fmaf(d, s[i][e], t[i]);
            t[3 + i] += d;
            t[5 + i] = fmaf(dy[e], b[e], t[5 + i]);
        }
    }
}

/* Computes k0 and k1 from the complete sums, which all lanes hold. The thread whose
   `first` is nonzero stores the dot products of the row (dy with Y0, Y1 and h) in
   `work`. */
template <int NORM>
static __device__ __forceinline__ void stx__par_dots_end(stx__par_row &q,
                                                         const float (&t)[STX__PAR_DOTS],
                                                         const stx__par_mix &a, size_t n,
                                                         int first) {
  #pragma unroll
    for (int i = 0; i < 2; i++) {
        if (NORM) {
            q.k0[i] = t[3 + i] / (float)a.C;
            q.k1[i] = t[i] * q.r[i] * q.r[i] / (float)a.C;
        }
        if (a.work && first)
            a.work[3 * n + (size_t)i] = NORM ? (double)(t[i] * q.r[i]) + (double)t[5 + i]
                                             : (double)t[i];
    }
    if (a.work && first) a.work[3 * n + 2] = (double)t[2];
}

template <int W, int NORM>
static __device__ __forceinline__ void stx__par_grads(const float (&dy)[W], const float (&s)[2][W],
                                                      const stx__par_mix &a, const stx__par_row &q,
                                                      size_t n, size_t c) {
    float dh[W];
    for (int e = 0; e < W; e++) dh[e] = q.w[2] * dy[e];
  #pragma unroll
    for (int i = 0; i < 2; i++) {
        float d[W];
        if (NORM) {
            const float wr = q.w[i] * q.r[i];
            stx__getn<W>(d, a.gain[i], c);
            for (int e = 0; e < W; e++)
                d[e] = wr * (fmaf(dy[e], d[e], -q.k0[i]) - s[i][e] * q.k1[i]);
        } else {
            for (int e = 0; e < W; e++) d[e] = q.w[i] * dy[e];
        }
        for (int e = 0; e < W; e++) dh[e] += d[e];
        if (a.dbranch[i].p) stx__addn<W>(a.dbranch[i], n * a.C + c, d, a.add[i]);
    }
    if (a.dh.p) stx__addn<W>(a.dh, n * a.C + c, dh, a.add_h);
}

/* Adds the sums t of a row over the G warps that share it, and returns them in all
   lanes. Two sets of `dots` alternate, so that one barrier per row suffices. */
template <int G>
static __device__ __forceinline__ void stx__par_dots_share(float (&t)[STX__PAR_DOTS], float *dots,
                                                           int turn) {
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  #pragma unroll
    for (int i = 0; i < STX__PAR_DOTS; i++) {
        t[i] = stx__warp_sum(t[i]);
        if (G > 1 && lane == 0) dots[(turn * 4 + warp) * 8 + i] = t[i];
    }
    if (G > 1) {
        __syncthreads();
  #pragma unroll
        for (int i = 0; i < STX__PAR_DOTS; i++) {
            t[i] = 0;
            for (unsigned j = 0; j < G; j++) t[i] += dots[(turn * 4 + warp / G * G + j) * 8 + i];
        }
    }
}

/* Backward with layer norms. G warps share a row, which is read once and stays in
   registers. The sums over rows (dgain_0, dshift_0, dgain_1, dshift_1) are kept in
   registers too. A block of 4 warps processes `rows` rows, a number that depends on N
   alone, and stores their sums in `part` (blocks,4,C). C must be a multiple of 4 and at
   most 128 Q G. The launch bound of 2 blocks per multiprocessor allows 255 registers
   per thread. */
template <int Q, int G, int S>
STX__GLOBAL(128, 2)
stx__par_mix_bwd_kernel(stx__par_mix mix, float *part, size_t rows) {
    const stx__par_mix a = stx__stored<S>(mix);
    STX__SHARED(float, sh, 4 * 128 * Q);
    STX__SHARED(float, dots, 2 * 4 * 8);
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32,
                   c0 = warp % G * 128 * Q + 4 * lane;
    const size_t lo = blockIdx.x * rows, hi = lo + rows < a.N ? lo + rows : a.N;
    float sum[4][Q][4];
    int turn = 0;
  #pragma unroll
    for (int k = 0; k < Q; k++)
        for (int i = 0; i < 4; i++)
            for (int e = 0; e < 4; e++) sum[i][k][e] = 0;
    /* all warps run the same number of iterations, because they synchronise if G > 1 */
    for (size_t n0 = lo; n0 < hi; n0 += 4 / G) {
        const size_t n = n0 + warp / G;
        const unsigned C = n < hi ? (unsigned)a.C : 0;
        float dy[Q][4], s[Q][2][4], t[STX__PAR_DOTS] = {0};
        stx__par_row q = stx__par_row_of<1>(a, n < hi ? n : lo);
  #pragma unroll
        for (int k = 0; k < Q; k++) {
            unsigned c = c0 + 128 * (unsigned)k;
            if (c < C)
                stx__par_dots<4, 1>(t, dy[k], s[k], a, q, n, c);
            else
                for (int e = 0; e < 4; e++) dy[k][e] = s[k][0][e] = s[k][1][e] = 0;
        }
        stx__par_dots_share<G>(t, dots, turn);
        if (G > 1) turn ^= 1;
        if (n < hi) stx__par_dots_end<1>(q, t, a, n, lane == 0 && warp % G == 0);
  #pragma unroll
        for (int k = 0; k < Q; k++) {
            unsigned c = c0 + 128 * (unsigned)k;
            if (c < C) stx__par_grads<4, 1>(dy[k], s[k], a, q, n, c);
            for (int i = 0; i < 2; i++)
                for (int e = 0; e < 4; e++) {
                    float d = dy[k][e] * q.w[i];
                    sum[2 * i][k][e] = fmaf(d * q.r[i], s[k][i][e], sum[2 * i][k][e]);
                    sum[2 * i + 1][k][e] += d;
                }
        }
    }
    if (part) stx__column_sums_of_warps<4, Q, G>(part, a.C, sh, sum);
}

/* Backward for any C. A warp reads its row twice or, without layer norms, only dy
   twice. */
template <int S, int NORM> STX__GLOBAL(256) stx__par_mix_bwd_any_kernel(stx__par_mix mix) {
    constexpr int W = stx__width<S>;
    const stx__par_mix a = stx__stored<S>(mix);
    const size_t lane = threadIdx.x % 32;
    STX__EACH_ROW(n, a.N, 32) {
        stx__par_row q = stx__par_row_of<NORM>(a, n);
        float dy[W], s[2][W], t[STX__PAR_DOTS] = {0}, none[STX__PAR_DOTS] = {0};
        for (size_t c = lane * W; c < a.C; c += 32 * W)
            stx__par_dots<W, NORM>(t, dy, s, a, q, n, c);
  #pragma unroll
        for (int i = 0; i < (NORM ? STX__PAR_DOTS : 3); i++) t[i] = stx__warp_sum(t[i]);
        stx__par_dots_end<NORM>(q, t, a, n, lane == 0);
        for (size_t c = lane * W; c < a.C; c += 32 * W) {
            stx__par_dots<W, NORM>(none, dy, s, a, q, n, c);
            stx__par_grads<W, NORM>(dy, s, a, q, n, c);
        }
    }
}

/* Computes the sums over rows that stx__par_mix_bwd_any_kernel omits, for branch
   blockIdx.z, and stores them in `part` (chunks,4,C). */
template <int S>
STX__GLOBAL(256)
stx__par_mix_columns_kernel(stx__par_mix mix, float *part, size_t rows) {
    constexpr int W = stx__width<S>;
    STX__SHARED(float, sh, 8 * 32 * W);
    struct terms {
        float dy[W], h[W], v[W], m, r, w;
    };
    const stx__par_mix a = stx__stored<S>(mix);
    const size_t i = blockIdx.z, C = a.C;
    const stx__array branch = i ? a.branch[1] : a.branch[0];
    const float *mean = i ? a.mean[1] : a.mean[0], *rstd = i ? a.rstd[1] : a.rstd[0];
    stx__column_sums<2, W, 2>(
        part + 2 * i * C, 4 * C, a.N, C, rows, sh,
        [&](size_t n, size_t c) {
            terms t;
            float w[3];
            stx__par_weights(w, a, n);
            t.w = i ? w[1] : w[0];
            t.m = mean[n];
            t.r = rstd[n];
            stx__getn<W>(t.dy, a.dy, n * C + c);
            stx__getn<W>(t.h, a.h, n * C + c);
            stx__getn<W>(t.v, branch, n * C + c);
            return t;
        },
        [&](float (&s)[2][W], const terms &t, size_t, size_t) {
            for (int e = 0; e < W; e++) {
                float d = t.dy[e] * t.w;
                s[0][e] = fmaf(d * t.r, t.h[e] + t.v[e] - t.m, s[0][e]);
                s[1][e] += d;
            }
        });
}

/* Adds the dot products of each draw's rows to dw (draws,3). T threads per draw: each
   adds every T-th row, then a fixed tree adds the threads' sums. */
template <int T>
STX__GLOBAL(256)
stx__par_mix_dw_kernel(stx__array dw, const double *work, size_t draws, size_t N, size_t period,
                       size_t rows_per_draw, size_t draws_per_period) {
    STX__SHARED(double, sh, 32);
    STX__EACH_ROW(r, draws, T) {
        const size_t k = r / draws_per_period, next = (k + 1) * period, end = next < N ? next : N;
        const size_t lo = k * period + (r - k * draws_per_period) * rows_per_draw,
                     hi = end - lo > rows_per_draw ? lo + rows_per_draw : end;
        double s[3] = {0, 0, 0};
        for (size_t n = lo + threadIdx.x % T; n < hi; n += T)
            for (int i = 0; i < 3; i++) s[i] += work[3 * n + (size_t)i];
        for (int i = 0; i < 3; i++) {
            s[i] = stx__row_sum<T>(s[i], sh);
            if (threadIdx.x % T == 0) stx__add(dw, 3 * r + (size_t)i, (float)s[i], 1);
        }
    }
}

template <int NORM>
static void stx__par_mix_bwd(stx_ctx *x, const stx_par_mix_args *a, const stx__par_mix &m) {
    const char *name = "stx_par_mix_bwd";
    const size_t N = m.N, C = m.C, last = (N - 1) % m.period;
    const size_t draws = (N - 1) / m.period * m.draws_per_period + last / m.rows_per_draw + 1;
    const int access = stx__par_mix_access(m),
              fast = NORM && access != STX__MIXED && C <= 2048;
    const size_t rows = fast ? stx__chunk(N, 8, 512) : stx__chunk(N, 64, 1024),
                 blocks = (N + rows - 1) / rows;
    stx_real *to[4] = {a->dgain[0], a->dshift[0], a->dgain[1], a->dshift[1]};
    float *part = NULL;
    if (NORM && (to[0] || to[1] || to[2] || to[3])
        && !(part = (float *)stx__scratch_of(x, 4 * blocks * C * sizeof *part, name)))
        return;
    if (fast) {
        STX__CHOOSE(S, access, (STX__FLOATS, STX__HALVES),
                    STX__CHOOSE(QG, (C + 127) / 128, (1, 2, 4, 8, 16),
                                STX__RUN_KERNEL(x, name,
                                                (stx__par_mix_bwd_kernel<STX_MIN(QG, 4),
                                                                         (QG + 3) / 4, S>),
                                                (unsigned)blocks, 128, 0, m, part, rows)));
    } else {
        const dim3 grid((unsigned)blocks, stx__blocks(C, access == STX__MIXED ? 32 : 128, 65535),
                        2);
        const unsigned each = stx__blocks(N, 8, (size_t)1 << 20);
        STX__CHOOSE(S, access, (STX__FLOATS, STX__HALVES, STX__MIXED),
                    STX__RUN_KERNEL(x, name, (stx__par_mix_bwd_any_kernel<S, NORM>), each, 256, 0,
                                    m);
                    if (part) STX__RUN_KERNEL(x, name, stx__par_mix_columns_kernel<S>, grid, 256, 0,
                                              m, part, rows));
    }
    if (part) stx__columns_sum(x, name, to, 4, part, 4 * C, blocks, C, 0);
    if (a->dw)
        STX__CHOOSE(T, STX_MIN(m.rows_per_draw, m.period) <= 64 ? 32 : 256, (32, 256),
                    STX__RUN_KERNEL(x, name, stx__par_mix_dw_kernel<T>,
                                    stx__blocks(draws, 256 / T, (size_t)1 << 30), 256, 0,
                                    stx__array_of(x, a->dw), m.work, draws, N, m.period,
                                    m.rows_per_draw, m.draws_per_period));
}

void stx_par_mix_bwd_cuda(stx_ctx *x, const stx_par_mix_args *a) {
    if (!a->N || !a->C || stx__par_mix_refused(x, a, "stx_par_mix_bwd")) return;
    if (a->gain[0])
        stx__par_mix_bwd<1>(x, a, stx__par_mix_of(x, a, 1));
    else
        stx__par_mix_bwd<0>(x, a, stx__par_mix_of(x, a, 1));
}


// >>latency

/* Arguments of the loss with latency (see stx_par_latency_args). One thread computes this
   loss, so that the step does not wait for the host. The struct has no padding bytes. */
typedef struct stx__par_latency {
    double weight, target, power;
    size_t kind;
} stx__par_latency;

static stx__par_latency stx__par_latency_of(const stx_par_latency_args *a) {
    stx__par_latency p = {a->weight, a->target, a->power, (size_t)a->kind};
    return p;
}

STX__GLOBAL(32)
stx__par_latency_fwd_kernel(stx__array loss, stx__array nll, stx__array lat, stx__par_latency a) {
    const double v = (double)stx__get(lat, 0), n = (double)stx__get(nll, 0);
    if (a.kind == STX_PAR_LATENCY_FBNET) {
        double factor = v; /* NaN stays NaN */
        if (v > 1) factor = pow(log(v), a.power);
        if (v <= 1) factor = 0;
        stx__put(loss, 0, (float)(n * a.weight * factor));
    } else {
        double term = v;
        if (a.kind == STX_PAR_LATENCY_HINGE) {
            term = v / a.target - 1;
            if (term < 0) term = 0;
        }
        stx__put(loss, 0, (float)(n + a.weight * term));
    }
}

void stx_par_latency_fwd_cuda(stx_ctx *x, stx_real *loss, const stx_real *nll, const stx_real *lat,
                              const stx_par_latency_args *a) {
    if (!stx_ok(x)) return;
    STX__RUN_KERNEL(x, "stx_par_latency_fwd", stx__par_latency_fwd_kernel, 1, 1, 0,
                    stx__array_of(x, loss), stx__array_of(x, nll), stx__array_of(x, lat),
                    stx__par_latency_of(a));
}

STX__GLOBAL(32)
stx__par_latency_bwd_kernel(stx__array dnll, stx__array dlat, stx__array dloss, stx__array nll,
                            stx__array lat, stx__par_latency a) {
    double v = (double)stx__get(lat, 0), d = (double)stx__get(dloss, 0), by_nll = 1,
           by_lat = a.weight;
    if (a.kind == STX_PAR_LATENCY_HINGE) by_lat = v > a.target ? a.weight / a.target : 0;
    if (a.kind == STX_PAR_LATENCY_FBNET) {
        by_nll = v > 1 ? a.weight * pow(log(v), a.power) : 0;
        by_lat = v > 1
                     ? (double)stx__get(nll, 0) * a.weight * a.power * pow(log(v), a.power - 1) / v
                     : 0;
    }
    if (dnll.p) stx__add(dnll, 0, (float)(d * by_nll), 1);
    if (dlat.p) stx__add(dlat, 0, (float)(d * by_lat), 1);
}

void stx_par_latency_bwd_cuda(stx_ctx *x, stx_real *dnll, stx_real *dlat, const stx_real *dloss,
                              const stx_real *nll, const stx_real *lat,
                              const stx_par_latency_args *a) {
    if (!stx_ok(x)) return;
    STX__RUN_KERNEL(x, "stx_par_latency_bwd", stx__par_latency_bwd_kernel, 1, 1, 0,
                    stx__array_of(x, dnll), stx__array_of(x, dlat), stx__array_of(x, dloss),
                    stx__array_of(x, nll), stx__array_of(x, lat), stx__par_latency_of(a));
}
#endif /* SEQTX_PAR_H */
