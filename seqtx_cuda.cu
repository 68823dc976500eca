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
    int tune;                           /* of a new kind of product: 0 the heuristic's first algorithm, 1 the fastest, -1 our own kernel: >>gemm */
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

/* Every matrix product goes through one wrapper of cublasLt, stx__lt_product. cublasLt's matrices are column-major, so a row-major
   C (M,N) = op(A) op(B) is handed over as C^T (N,M) = op(B)^T op(A)^T: the operands change places, and no memory changes. (Its row-major
   order would forbid the epilogues: "not supported when D matrix memory order is defined as CUBLASLT_ORDER_ROW", cublasLtMatmul.)

   Types, from the table of cublasLtMatmul: A and B alike; bfloat16 gives bfloat16 or float, float gives float; the bias has the type of
   the output. Hence in a bf16 context
     activations are read as they are, parameters through their bfloat16 twin, and what is float and has no twin is rounded on the way;
     two operands that are both float, for a float result, are multiplied as floats;
     a gradient of a weight is a float sum of bfloat16 products, added to what is there.

   A plan is what one kind of product needs: descriptors, layouts and cublasLt's choice of algorithm. They are made when a kind comes for
   the first time and kept. Which algorithm decides the order of the sums, and so the last bits. The default is the heuristic's first
   answer, which depends on nothing but the kind of product, the GPU and the version of cublasLt. g->tune = 1 times the first eight instead:
   faster at times, but another process may choose otherwise.

   Repeatability: "all cuBLAS API routines from a given toolkit version, generate the same bit-wise results at every run when executed on
   GPUs with the same architecture and the same number of SMs" (Results Reproducibility), with a workspace of one's own where there are
   several streams. Of the ways to add up a split K, only COMPUTE_TYPE is allowed ("intermediate results are stored in compute type in the
   workspace and reduced in a separate step"): INPLACE promises sequence but not which, OUTPUT_TYPE would round partial sums to bfloat16. */

typedef struct stx__plan_key {          /* compared as bytes: set to zero first */
    size_t batch, M, N, K, lda, ldb, ldc, sa, sb, sc;
    int ta, tb, half_in, half_out, epilogue, tf32, beta0;
    int align_a, align_b, align_c;
} stx__plan_key;
typedef struct stx__plan {
    stx__plan_key key;
    cublasLtMatmulDesc_t op;
    cublasLtMatrixLayout_t a, b, c;     /* ours, not cublasLt's, which has a and b the other way round */
    cublasLtMatmulAlgo_t algo;
    size_t used;                        /* of the workspace, bytes */
    int plain;                          /* cublasLt has no algorithm: stx__gemm_plain */
    struct stx__plan *next;
} stx__plan;
enum { STX__PLAN_SLOTS = 512, STX__CANDIDATES = 8 };
typedef struct stx__plans {
    stx__plan *slot[STX__PLAN_SLOTS];
    size_t count;
    void *room;                         /* the workspace, STX__ROOM bytes */
} stx__plans;
#ifndef CUDA_HOST
  #define STX__ROOM ((size_t)32 << 20)      /* "Recommended size of user-provided workspace": 32 MiB on Hopper (cublasSetWorkspace) */
#else
  #define STX__ROOM ((size_t)1 << 18)       /* where every page costs time at every launch */
#endif

/* What one call brings, beyond its kind */
typedef struct stx__operands { const void *A, *B, *bias; void *C; float alpha, beta; } stx__operands;

static void stx__plan_free(stx__plan *p) {
    if (p->a) cublasLtMatrixLayoutDestroy(p->a);
    if (p->b) cublasLtMatrixLayoutDestroy(p->b);
    if (p->c) cublasLtMatrixLayoutDestroy(p->c);
    if (p->op) cublasLtMatmulDescDestroy(p->op);
    free(p);
}
/* For stx_cuda_open, before anything can be captured: nothing is allocated later. For stx_cuda_close, when the device has nothing to do. */
static int stx__gemm_open(stx_ctx *x, stx_gpu *g) {
    stx__plans *p = (stx__plans *)calloc(1, sizeof *p);
    cublasStatus_t s;
    if (!p) { stx_fail(x, STX_ERR_MEMORY, "stx_create: no memory"); return 0; }
    g->plans = p;
    s = cublasLtCreate(&g->lt);
    if (s != CUBLAS_STATUS_SUCCESS) {
        g->lt = NULL;
        stx_fail(x, STX_ERR_DEVICE, "stx_create: cublasLt says %s on %s: look whether libcublasLt fits the driver (nvidia-smi)", cublasLtGetStatusName(s), g->name);
        return 0;
    }
    if (cudaMalloc(&p->room, STX__ROOM) != cudaSuccess) {
        (void)cudaGetLastError();
        p->room = NULL;
        stx_fail(x, STX_ERR_MEMORY, "stx_create: no %zu KiB of memory on %s for cublasLt's workspace: is another program using the GPU?", STX__ROOM >> 10, g->name);
        return 0;
    }
    return 1;
}
static void stx__gemm_close(stx_gpu *g) {
    stx__plans *p = (stx__plans *)g->plans;
    if (!p) return;
    for (size_t i = 0; i < STX__PLAN_SLOTS; i++)
        while (p->slot[i]) {
            stx__plan *next = p->slot[i]->next;
            stx__plan_free(p->slot[i]);
            p->slot[i] = next;
        }
    if (p->room) (void)cudaFree(p->room);
    if (g->lt) (void)cublasLtDestroy(g->lt);
    free(p);
    g->plans = NULL;
    g->lt = NULL;
}
/* For tests: how many plans there are; g->tune */
extern "C" size_t stx__plans_count(const stx_ctx *x) { const stx__plans *p = (const stx__plans *)stx__gpu(x)->plans; return p ? p->count : 0; }
extern "C" void stx__plans_tune(stx_ctx *x, int tune) { stx__gpu(x)->tune = tune; }

static void stx__lt_fail(stx_ctx *x, const char *what, cublasStatus_t s, const stx__plan_key *k) {
    stx__gpu(x)->failed = 1;
    stx_fail(x, STX_ERR_DEVICE, "%s: cublasLt says %s for %zu products of (%zu,%zu) and (%zu,%zu), %s to %s, on %s: nothing that this step made can be "
             "used; free the context and go on from the last checkpoint", what, cublasLtGetStatusName(s), k->batch, k->M, k->K, k->K, k->N,
             k->half_in ? "bf16" : "f32", k->half_out ? "bf16" : "f32", stx__gpu(x)->name);
}
/* Calls one after the other until one fails */
#define STX__LT(call) do { if (s == CUBLAS_STATUS_SUCCESS) s = (call); } while (0)

/* A row-major (rows,cols) is a column-major (cols,rows). */
static cublasStatus_t stx__layout(cublasLtMatrixLayout_t *l, int half, size_t rows, size_t cols, size_t ld, size_t batch, size_t stride) {
    cublasStatus_t s = cublasLtMatrixLayoutCreate(l, half ? CUDA_R_16BF : CUDA_R_32F, cols, rows, (int64_t)ld);
    int32_t count = (int32_t)batch;
    int64_t step = (int64_t)stride;
    if (batch > 1) {
        STX__LT(cublasLtMatrixLayoutSetAttribute(*l, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count, sizeof count));
        STX__LT(cublasLtMatrixLayoutSetAttribute(*l, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &step, sizeof step));
    }
    return s;
}
static cublasStatus_t stx__lt_run(stx_gpu *g, const stx__plan *p, const stx__operands *o, const cublasLtMatmulAlgo_t *algo, size_t used, void *D) {
    void *room = used ? ((stx__plans *)g->plans)->room : NULL;
    cublasStatus_t s = CUBLAS_STATUS_SUCCESS;
    if (o->bias) STX__LT(cublasLtMatmulDescSetAttribute(p->op, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &o->bias, sizeof o->bias));
    STX__LT(cublasLtMatmul(g->lt, p->op, &o->alpha, o->B, p->b, o->A, p->a, &o->beta, o->C, p->c, D, p->c, algo, room, used, g->stream));
    return s;
}
/* The fastest of n candidates: the best of three runs each, after one that does not count. They write to memory of their own: C must be
   added to once, and may be an operand of the next. */
static int stx__plan_fastest(stx_gpu *g, const stx__plan *p, const stx__operands *o, const cublasLtMatmulHeuristicResult_t *r, int n) {
    const stx__plan_key *k = &p->key;
    size_t bytes = ((k->batch - 1) * k->sc + (k->M - 1) * k->ldc + k->N) * (k->half_out ? 2 : 4);
    cudaEvent_t from = NULL, to = NULL;
    void *D = NULL;
    float best = 0, ms;
    int i, j, choice = 0, timed = 0;
    if (cudaMalloc(&D, bytes) != cudaSuccess || cudaEventCreate(&from) != cudaSuccess || cudaEventCreate(&to) != cudaSuccess) n = 0;
    for (i = 0; i < n; i++) {
        if (r[i].state != CUBLAS_STATUS_SUCCESS || r[i].workspaceSize > STX__ROOM) continue;
        for (j = 0; j < 4; j++) {
            if (cudaEventRecord(from, g->stream) != cudaSuccess) break;
            if (stx__lt_run(g, p, o, &r[i].algo, r[i].workspaceSize, D) != CUBLAS_STATUS_SUCCESS) break;
            if (cudaEventRecord(to, g->stream) != cudaSuccess || cudaEventSynchronize(to) != cudaSuccess || cudaEventElapsedTime(&ms, from, to) != cudaSuccess) break;
            if (j && (!timed || ms < best)) { best = ms; choice = i; timed = 1; }
        }
    }
    if (from) cudaEventDestroy(from);
    if (to) cudaEventDestroy(to);
    (void)cudaStreamSynchronize(g->stream);
    if (D) (void)cudaFree(D);
    if (!timed) { (void)cudaGetLastError(); choice = -1; }        /* no memory to write to: the first one then */
    return choice;
}
static cublasStatus_t stx__plan_make(stx_gpu *g, stx__plan *p, const stx__operands *o) {
    const stx__plan_key *k = &p->key;
    cublasLtMatmulPreference_t pref = NULL;
    cublasLtMatmulHeuristicResult_t r[STX__CANDIDATES];
    cublasOperation_t opA = k->ta ? CUBLAS_OP_T : CUBLAS_OP_N, opB = k->tb ? CUBLAS_OP_T : CUBLAS_OP_N;
    cublasLtEpilogue_t epilogue = (cublasLtEpilogue_t)k->epilogue;
    cudaDataType_t bias = k->half_out ? CUDA_R_16BF : CUDA_R_32F;
    uint32_t schemes = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE, aa = (uint32_t)k->align_a, ab = (uint32_t)k->align_b, ac = (uint32_t)k->align_c;
    uint64_t room = STX__ROOM;
    int i, n = 0, choice = -1;
    cublasStatus_t s;
    if (g->tune < 0) { p->plain = 1; return CUBLAS_STATUS_SUCCESS; }
    s = cublasLtMatmulDescCreate(&p->op, k->tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F, CUDA_R_32F);
    STX__LT(cublasLtMatmulDescSetAttribute(p->op, CUBLASLT_MATMUL_DESC_TRANSA, &opB, sizeof opB));
    STX__LT(cublasLtMatmulDescSetAttribute(p->op, CUBLASLT_MATMUL_DESC_TRANSB, &opA, sizeof opA));
    STX__LT(cublasLtMatmulDescSetAttribute(p->op, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof epilogue));
    if (o->bias) {
        STX__LT(cublasLtMatmulDescSetAttribute(p->op, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &bias, sizeof bias));
        STX__LT(cublasLtMatmulDescSetAttribute(p->op, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &o->bias, sizeof o->bias));
    }
    STX__LT(stx__layout(&p->a, k->half_in, k->ta ? k->K : k->M, k->ta ? k->M : k->K, k->lda, k->batch, k->sa));
    STX__LT(stx__layout(&p->b, k->half_in, k->tb ? k->N : k->K, k->tb ? k->K : k->N, k->ldb, k->batch, k->sb));
    STX__LT(stx__layout(&p->c, k->half_out, k->M, k->N, k->ldc, k->batch, k->sc));
    STX__LT(cublasLtMatmulPreferenceCreate(&pref));
    STX__LT(cublasLtMatmulPreferenceSetAttribute(pref, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &room, sizeof room));
    STX__LT(cublasLtMatmulPreferenceSetAttribute(pref, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &schemes, sizeof schemes));
    STX__LT(cublasLtMatmulPreferenceSetAttribute(pref, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &ab, sizeof ab));
    STX__LT(cublasLtMatmulPreferenceSetAttribute(pref, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &aa, sizeof aa));
    STX__LT(cublasLtMatmulPreferenceSetAttribute(pref, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &ac, sizeof ac));
    STX__LT(cublasLtMatmulPreferenceSetAttribute(pref, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &ac, sizeof ac));
    if (s == CUBLAS_STATUS_SUCCESS) {
        s = cublasLtMatmulAlgoGetHeuristic(g->lt, p->op, p->b, p->a, p->c, p->c, pref, STX__CANDIDATES, r, &n);
        if (s == CUBLAS_STATUS_NOT_SUPPORTED) { s = CUBLAS_STATUS_SUCCESS; n = 0; }
    }
    if (pref) cublasLtMatmulPreferenceDestroy(pref);
    if (s != CUBLAS_STATUS_SUCCESS) return s;
    if (n > 1 && g->tune > 0 && !g->capturing) choice = stx__plan_fastest(g, p, o, r, n);
    for (i = 0; i < n && choice < 0; i++) if (r[i].state == CUBLAS_STATUS_SUCCESS && r[i].workspaceSize <= STX__ROOM) choice = i;
    p->plain = choice < 0;
    if (!p->plain) { p->algo = r[choice].algo; p->used = r[choice].workspaceSize; }
    return s;
}
static stx__plan *stx__plan_of(stx_ctx *x, const char *what, const stx__plan_key *key, const stx__operands *o) {
    stx__plans *all = (stx__plans *)stx__gpu(x)->plans;
    const unsigned char *bytes = (const unsigned char *)key;
    uint64_t h = 14695981039346656037u;
    stx__plan *p;
    cublasStatus_t s;
    for (size_t i = 0; i < sizeof *key; i++) h = (h ^ bytes[i]) * 1099511628211u;
    h = (h ^ h >> 32) % STX__PLAN_SLOTS;
    for (p = all->slot[h]; p; p = p->next) if (!memcmp(&p->key, key, sizeof *key)) return p;
    p = (stx__plan *)calloc(1, sizeof *p);
    if (!p) { stx_fail(x, STX_ERR_MEMORY, "%s: no memory for the table of products", what); return NULL; }
    memcpy(&p->key, key, sizeof *key);          /* padding as well */
    s = stx__plan_make(stx__gpu(x), p, o);
    if (s != CUBLAS_STATUS_SUCCESS) {
        stx__plan_free(p);
        stx__lt_fail(x, what, s, key);
        return NULL;
    }
    p->next = all->slot[h];
    all->slot[h] = p;
    all->count++;
    return p;
}

/* C (batch,M,N) = beta C, rows ldc and matrices sc apart; beta 0 writes 0 whatever was there, and beta 1 renews a parameter's twin after a
   product. A block takes rows in turn, its threads the columns. */
static __global__ void stx__scale_kernel(stx__num C, size_t ldc, size_t sc, size_t M, size_t N, size_t rows, float beta) {
    for (size_t row = blockIdx.x; row < rows; row += gridDim.x) {
        size_t at = row / M * sc + row % M * ldc;
        for (size_t j = threadIdx.x; j < N; j += blockDim.x) stx__put(C, at + j, beta == 0 ? 0 : beta * stx__get(C, at + j));
    }
}
/* to (rows of all matrices, ldt) = a (batch,each,cols), rows lda and matrices sa apart: as bfloat16, or as floats. As stx__scale_kernel. */
static __global__ void stx__pack_kernel(stx__num to, size_t ldt, stx__num a, size_t lda, size_t sa, size_t each, size_t cols, size_t rows) {
    for (size_t row = blockIdx.x; row < rows; row += gridDim.x) {
        size_t at = row / each * sa + row % each * lda;
        for (size_t j = threadIdx.x; j < cols; j += blockDim.x) stx__put(to, row * ldt + j, stx__get(a, at + j));
    }
}

/* C (M,N) = alpha op(A) op(B) + beta C for each of batch matrices, then + bias (N) and relu if wanted; of any types, strides and alignment:
   for what cublasLt has no algorithm for. A block of 256 threads makes a tile of 64 x 64, 4 x 4 numbers a thread, 16 of K at a time through shared memory: each number is one
   sum over K in order. */
enum { STX__TILE = 64, STX__SLAB = 16, STX__TILE_LD = STX__TILE + 1 };
static __global__ void __launch_bounds__(256) stx__gemm_plain_kernel(stx__num C, size_t ldc, size_t sc, stx__num A, size_t lda, size_t sa, stx__num B, size_t ldb, size_t sb,
                                                                     size_t batch, int ta, int tb, size_t M, size_t N, size_t K, float alpha, float beta, stx__num bias, int relu) {
    STX__SHARED(float, as, STX__SLAB * STX__TILE_LD);
    STX__SHARED(float, bs, STX__SLAB * STX__TILE_LD);
    size_t across = (N + STX__TILE - 1) / STX__TILE, tiles = (M + STX__TILE - 1) / STX__TILE * across;
    int t = (int)threadIdx.x, tx = t % 16, ty = t / 16;
    for (size_t job = blockIdx.x; job < tiles * batch; job += gridDim.x) {
        size_t e = job / tiles, m0 = job % tiles / across * STX__TILE, n0 = job % tiles % across * STX__TILE;
        float s[4][4] = {{0}};
        for (size_t k0 = 0; k0 < K; k0 += STX__SLAB) {
            for (int q = t; q < STX__TILE * STX__SLAB; q += 256) {          /* neighbouring threads read neighbours, whichever way the matrix lies */
                int k = ta ? q / STX__TILE : q % STX__SLAB, m = ta ? q % STX__TILE : q / STX__SLAB;
                size_t kk = k0 + (size_t)k, mm = m0 + (size_t)m;
                as[k * STX__TILE_LD + m] = kk < K && mm < M ? stx__get(A, e * sa + (ta ? kk * lda + mm : mm * lda + kk)) : 0;
                k = tb ? q % STX__SLAB : q / STX__TILE;
                m = tb ? q / STX__SLAB : q % STX__TILE;
                kk = k0 + (size_t)k;
                mm = n0 + (size_t)m;
                bs[k * STX__TILE_LD + m] = kk < K && mm < N ? stx__get(B, e * sb + (tb ? mm * ldb + kk : kk * ldb + mm)) : 0;
            }
            __syncthreads();
            for (int k = 0; k < STX__SLAB; k++) {
                float a[4], b[4];
                #pragma unroll
                for (int i = 0; i < 4; i++) { a[i] = as[k * STX__TILE_LD + ty + 16 * i]; b[i] = bs[k * STX__TILE_LD + tx + 16 * i]; }
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
                size_t m = m0 + (size_t)(ty + 16 * i), n = n0 + (size_t)(tx + 16 * j), at = e * sc + m * ldc + n;
                if (m < M && n < N) {
                    float v = beta == 0 ? alpha * s[i][j] : fmaf(alpha, s[i][j], beta * stx__get(C, at));
                    if (bias.p) v += stx__get(bias, n);
                    stx__put(C, at, relu && v < 0 ? 0 : v);
                }
            }
    }
}
static void stx__gemm_plain(stx_ctx *x, const char *what, size_t batch, int ta, int tb, size_t M, size_t N, size_t K, float alpha, const stx__num &A, size_t lda, size_t sa,
                            const stx__num &B, size_t ldb, size_t sb, float beta, const stx__num &C, size_t ldc, size_t sc, const stx__num &bias, int relu) {
    size_t tiles = (M + STX__TILE - 1) / STX__TILE * ((N + STX__TILE - 1) / STX__TILE) * batch;
    STX__RUN_KERNEL(x, what, stx__gemm_plain_kernel, stx__blocks(tiles, 1, 1u << 30), 256, 0, C, ldc, sc, A, lda, sa, B, ldb, sb, batch, ta, tb, M, N, K, alpha, beta, bias, relu);
}

/* An operand as the product will read it; pack: it has to be copied first, to bfloat16 if half */
typedef struct stx__operand { stx__num v; size_t rows, cols, ld, stride, count; int pack, half; } stx__operand;
static stx__operand stx__operand_of(const stx_ctx *x, const stx_real *p, size_t rows, size_t cols, size_t ld, size_t stride, size_t batch) {
    stx__operand o;
    o.v = stx__num_of(x, p);
    o.rows = rows;
    o.cols = cols;
    o.ld = rows > 1 ? ld : cols;                /* cublasLt wants ld >= cols of a single row, too */
    o.stride = batch > 1 ? stride : 0;
    o.count = o.stride ? batch : 1;
    o.pack = o.half = 0;
    return o;
}
/* It must be bfloat16, or float: decides how. */
static void stx__want(stx__operand *o, int half, size_t align) {
    if (half && o->v.twin) { o->v.p = o->v.twin; o->v.half = 1; }
    o->v.twin = NULL;
    o->half = half;
    o->pack = o->v.p && (o->v.half != half || (uintptr_t)o->v.p % align);
}
/* Bytes of its copy: rows of whole 16 bytes, as tensor cores like them, and up to where another may begin */
static size_t stx__packed(const stx__operand *o) { return o->pack ? (o->count * o->rows * ((o->cols + 7) / 8 * 8) * (o->half ? 2 : 4) + 255) / 256 * 256 : 0; }
static void stx__pack(stx_ctx *x, const char *what, stx__operand *o, char *to) {
    size_t rows = o->count * o->rows, ld = (o->cols + 7) / 8 * 8;
    stx__num t = {to, NULL, o->half};
    if (!o->pack) return;
    STX__RUN_KERNEL(x, what, stx__pack_kernel, stx__blocks(rows, 1, 4096), 256, 0, t, ld, o->v, o->ld, o->stride, o->rows, o->cols, rows);
    o->v = t;
    o->ld = ld;
    if (o->stride) o->stride = o->rows * ld;
}
/* Alignment in three classes, not in all powers of two, so that a tensor that moves in the arena keeps its plan and its bits */
static int stx__align(const void *p) {
    uintptr_t a = (uintptr_t)p;
    return a % 256 == 0 ? 256 : a % 16 == 0 ? 16 : (int)(a & (0 - a));
}

/* C (M,N) = alpha op(A) op(B) + beta C for each of batch matrices at strides sa, sb, sc; then, with bias (N) or relu, C = relu(C + bias) in
   the same pass. Returns 0 if that is left to be done, where cublasLt has no algorithm that does it. The bias has C's type and is aligned to
   16 bytes, if need be by a copy: "cuBLASLt's alignment preferences cover A, B, C, D but not the epilogue bias pointer, so the heuristic can
   pick a kernel that assumes 16-byte bias alignment" (pytorch/pytorch 194497). */
static int stx__lt_product(stx_ctx *x, const char *what, size_t batch, int ta, int tb, size_t M, size_t N, size_t K, float alpha, const stx_real *A, size_t lda, size_t sa,
                           const stx_real *B, size_t ldb, size_t sb, float beta, stx_real *C, size_t ldc, size_t sc, const stx_real *bias, int relu) {
    stx_gpu *g = stx__gpu(x);
    stx__plan_key key;
    stx__plan *plan = NULL;
    stx__operands o;
    stx__operand a, b, v;
    stx__num c;
    size_t of_a, of_b, of_v;
    int low, fuse = bias || relu;
    cublasStatus_t s;
    if (!stx_ok(x) || !batch || !M || !N) return 1;
    c = stx__num_of(x, C);
    if (!K || alpha == 0) {
        STX__RUN_KERNEL(x, what, stx__scale_kernel, stx__blocks(batch * M, 1, 4096), 256, 0, c, ldc, sc, M, N, batch * M, beta);
        return !fuse;
    }
    /* one matrix for all: then the batch is more rows of one product */
    if (batch > 1 && !ta && !sb && sa == M * lda && sc == M * ldc) { M *= batch; batch = 1; }
    if (M > INT32_MAX || N > INT32_MAX || K > INT32_MAX || batch > INT32_MAX) {
        stx_fail(x, STX_ERR_ARG, "%s: %zu products of (%zu,%zu) and (%zu,%zu): a GPU takes sizes up to 2147483647; use smaller batches", what, batch, M, K, K, N);
        return 1;
    }
    a = stx__operand_of(x, A, ta ? K : M, ta ? M : K, lda, sa, batch);
    b = stx__operand_of(x, B, tb ? N : K, tb ? K : N, ldb, sb, batch);
    v = stx__operand_of(x, bias, 1, N, N, 0, 1);
    low = a.v.half || a.v.twin || b.v.half || b.v.twin || c.half;
    stx__want(&a, low, 1);
    stx__want(&b, low, 1);
    stx__want(&v, c.half, 16);
    of_a = stx__packed(&a);
    of_b = stx__packed(&b);
    of_v = stx__packed(&v);
    if (of_a + of_b + of_v) {
        char *to = (char *)stx__scratch_of(x, of_a + of_b + of_v, what);
        if (!to) return 1;
        stx__pack(x, what, &a, to);
        stx__pack(x, what, &b, to + of_a);
        stx__pack(x, what, &v, to + of_a + of_b);
    }
    memset(&key, 0, sizeof key);
    key.batch = batch; key.M = M; key.N = N; key.K = K;
    key.lda = a.ld; key.ldb = b.ld; key.ldc = M > 1 ? ldc : N;
    key.sa = a.stride; key.sb = b.stride; key.sc = batch > 1 ? sc : 0;
    key.ta = !!ta; key.tb = !!tb;
    key.half_in = low; key.half_out = c.half;
    key.tf32 = g->tf32 && !low; key.beta0 = beta == 0;
    key.align_a = stx__align(a.v.p); key.align_b = stx__align(b.v.p); key.align_c = stx__align(c.p);
    o.A = a.v.p; o.B = b.v.p; o.C = c.p;
    o.alpha = alpha; o.beta = beta;
    o.bias = v.v.p;
    key.epilogue = bias ? relu ? CUBLASLT_EPILOGUE_RELU_BIAS : CUBLASLT_EPILOGUE_BIAS : relu ? CUBLASLT_EPILOGUE_RELU : CUBLASLT_EPILOGUE_DEFAULT;
    plan = stx__plan_of(x, what, &key, &o);
    if (plan && plan->plain && fuse) {          /* perhaps without */
        o.bias = NULL;
        key.epilogue = CUBLASLT_EPILOGUE_DEFAULT;
        plan = stx__plan_of(x, what, &key, &o);
    }
    if (!plan || !stx_ok(x)) return 1;
    if (plan->plain) {
        stx__gemm_plain(x, what, batch, ta, tb, M, N, K, alpha, a.v, key.lda, key.sa, b.v, key.ldb, key.sb, beta, c, key.ldc, key.sc, v.v, relu);
        return 1;
    }
    s = stx__lt_run(g, plan, &o, &plan->algo, plan->used, c.p);
    if (s != CUBLAS_STATUS_SUCCESS) { stx__lt_fail(x, what, s, &key); return 1; }
    if (c.twin) STX__RUN_KERNEL(x, what, stx__scale_kernel, stx__blocks(batch * M, 1, 4096), 256, 0, c, key.ldc, key.sc, M, N, batch * M, 1.0f);
    return key.epilogue != CUBLASLT_EPILOGUE_DEFAULT || !fuse;
}

/* As stx_gemm; see stx__lt_product. */
void stx_gemm_cuda(stx_ctx *x, size_t batch, int ta, int tb, size_t M, size_t N, size_t K, stx_real alpha, const stx_real *A, size_t lda, size_t sa,
                   const stx_real *B, size_t ldb, size_t sb, stx_real beta, stx_real *C, size_t ldc, size_t sc) {
    stx__lt_product(x, "stx_gemm", batch, ta, tb, M, N, K, alpha, A, lda, sa, B, ldb, sb, beta, C, ldc, sc, NULL, 0);
}

/* y = act(in W^T + b): product, bias and relu are one pass. cublasLt's GELU is the tanh approximation and ours is exact, so gelu, tanh and
   sigmoid are a pass of their own over what the product left: pre, where it is wanted, or y itself. */
void stx_linear_fwd_cuda(stx_ctx *x, stx_real *y, stx_real *pre, const stx_real *in, const stx_real *W, const stx_real *b, size_t N, size_t I, size_t O, int act) {
    stx_real *to = pre ? pre : y;
    int relu = act == STX_ACT_RELU && !pre;
    if (!stx_ok(x) || !N || !O) return;
    if (!stx__lt_product(x, "stx_linear_fwd", 1, 0, 1, N, O, I, 1, in, I, 0, W, I, 0, 0, to, O, 0, b, relu)) {
        stx_bias_act_fwd_cuda(x, to, NULL, b, N, O, pre ? STX_ACT_NONE : act);
        act = pre ? act : STX_ACT_NONE;
    } else if (relu) act = STX_ACT_NONE;
    if (pre) stx_act_fwd_cuda(x, y, pre, N * O, act);
    else if (act) stx_bias_act_fwd_cuda(x, y, NULL, NULL, N, O, act);
}

/* g times d act / d a, given y = act(a) and, for gelu, a: stx__act_slope_any of seqtx.h */
static __device__ __forceinline__ float stx__linear_slope(float g, float y, float a, int act) {
    switch (act) {
    case STX_ACT_RELU: return y > 0 ? g : 0;
    case STX_ACT_GELU: return g * fmaf(a, 0.39894228040143267794f * expf(-0.5f * a * a), 0.5f * erfcf(-0.70710678118654752440f * a));
    case STX_ACT_TANH: return g * fmaf(-y, y, 1);
    case STX_ACT_SIGMOID: return g * (y * (1 - y));
    default: return g;
    }
}
/* da (N,O) = da act'(a), unless act is none; sums (chunks,O), if wanted: of da's rows, `each` rows a chunk. In one pass: da is read once.
   A block has a chunk of 32 V columns, 8 rows at a time, each thread V columns of a row; then 8 sums of a column become one, in order. */
enum { STX__SUM_ROWS = 8 };
template<int V> static __global__ void stx__slope_sums_kernel(stx__num da, stx__num y, stx__num pre, float *sums, size_t N, size_t O, size_t each, int act) {
    STX__SHARED(float, part, STX__SUM_ROWS * STX__WARP * V);
    size_t c = ((size_t)blockIdx.x * STX__WARP + threadIdx.x) * V, n = (size_t)blockIdx.y * each, end = n + each < N ? n + each : N;
    float s[V] = {0};
    if (c < O)
        for (n += threadIdx.y; n < end; n += STX__SUM_ROWS) {
            size_t at = n * O + c;
            if (V == 4) {
                float4 g = stx__get4(da, at), v = make_float4(0, 0, 0, 0), a = v;
                if (act) {
                    if (act == STX_ACT_GELU) a = stx__get4(pre, at);
                    else v = stx__get4(y, at);
                    g.x = stx__linear_slope(g.x, v.x, a.x, act);
                    g.y = stx__linear_slope(g.y, v.y, a.y, act);
                    g.z = stx__linear_slope(g.z, v.z, a.z, act);
                    g.w = stx__linear_slope(g.w, v.w, a.w, act);
                    stx__put4(da, at, g);
                }
                s[0] += g.x;
                s[1 % V] += g.y;
                s[2 % V] += g.z;
                s[3 % V] += g.w;
            } else {
                float g = stx__get(da, at);
                if (act) {
                    g = stx__linear_slope(g, act == STX_ACT_GELU ? 0 : stx__get(y, at), act == STX_ACT_GELU ? stx__get(pre, at) : 0, act);
                    stx__put(da, at, g);
                }
                s[0] += g;
            }
        }
    if (!sums) return;
    for (int v = 0; v < V; v++) part[(v * STX__SUM_ROWS + threadIdx.y) * STX__WARP + threadIdx.x] = s[v];
    __syncthreads();
    if (threadIdx.y || c >= O) return;
    for (int v = 0; v < V; v++) {
        float t = 0;
        for (int r = 0; r < STX__SUM_ROWS; r++) t += part[(v * STX__SUM_ROWS + r) * STX__WARP + threadIdx.x];
        sums[(size_t)blockIdx.y * O + c + v] = t;
    }
}
/* db (O) += the sum of sums (chunks,O) over the chunks. A block has 32 columns, 16 chunks at a time. */
static __global__ void stx__sum_chunks_kernel(stx__num db, const float *sums, size_t O, size_t chunks) {
    STX__SHARED(float, part, 16 * STX__WARP);
    size_t c = (size_t)blockIdx.x * STX__WARP + threadIdx.x;
    float s = 0;
    if (c < O) for (size_t k = threadIdx.y; k < chunks; k += 16) s += sums[k * O + c];
    part[threadIdx.y * STX__WARP + threadIdx.x] = s;
    __syncthreads();
    if (threadIdx.y || c >= O) return;
    s = 0;
    for (int k = 0; k < 16; k++) s += part[k * STX__WARP + threadIdx.x];
    stx__add(db, c, s, 1);
}
/* da = da act'(a), and db += the sum of da's rows if db is wanted. The chunks depend on N alone, so the sums are the same on every GPU. */
static void stx__slope_sums(stx_ctx *x, stx_real *db, stx_real *da, const stx_real *y, const stx_real *pre, size_t N, size_t O, int act) {
    static const char what[] = "stx_linear_bwd";
    size_t chunks = (N + 63) / 64 < 256 ? (N + 63) / 64 : 256, each = (N + chunks - 1) / chunks;
    stx__num a = stx__num_of(x, da), v = stx__num_of(x, act == STX_ACT_GELU ? NULL : y), p = stx__num_of(x, act == STX_ACT_GELU ? pre : NULL);
    float *sums = NULL;
    if (db) {
        sums = (float *)stx__scratch_of(x, chunks * O * sizeof *sums, what);
        if (!sums) return;
    }
    if (O % 4 == 0 && stx__by4(a) && (!act || (stx__by4(v) && stx__by4(p))))
        STX__RUN_KERNEL(x, what, stx__slope_sums_kernel<4>, dim3(stx__blocks(O, 128, 1u << 30), (unsigned)chunks), dim3(STX__WARP, STX__SUM_ROWS), 0, a, v, p, sums, N, O, each, act);
    else
        STX__RUN_KERNEL(x, what, stx__slope_sums_kernel<1>, dim3(stx__blocks(O, 32, 1u << 30), (unsigned)chunks), dim3(STX__WARP, STX__SUM_ROWS), 0, a, v, p, sums, N, O, each, act);
    if (db) STX__RUN_KERNEL(x, what, stx__sum_chunks_kernel, stx__blocks(O, STX__WARP, 1u << 30), dim3(STX__WARP, 16), 0, stx__num_of(x, db), sums, O, chunks);
}
/* y = act(in W^T + b):   da = dy act' ; dx (+)= da W ; dW += da^T in ; db += sum_n da
   db is not left to cublasLt's epilogue BGRADB of dW's product: that one stores and does not add, in the type of dW, and narrows the choice
   of algorithms, while with an activation da has to be read and written anyway and the sums come with it. */
void stx_linear_bwd_cuda(stx_ctx *x, stx_real *dx, stx_real *dW, stx_real *db, stx_real *da, const stx_real *y, const stx_real *pre, const stx_real *in, const stx_real *W,
                         size_t N, size_t I, size_t O, int act, int accumulate) {
    if (!stx_ok(x)) return;
    if (N && O && (act || db)) stx__slope_sums(x, db, da, y, pre, N, O, act);
    if (dx) stx__lt_product(x, "stx_linear_bwd, dx", 1, 0, 0, N, I, O, 1, da, O, 0, W, I, 0, accumulate ? 1.0f : 0.0f, dx, I, 0, NULL, 0);
    if (dW) stx__lt_product(x, "stx_linear_bwd, dW", 1, 1, 0, O, I, N, 1, da, O, 0, in, I, 0, 1, dW, I, 0, NULL, 0);
}

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
