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

// >>elementwise -------------------------------------------------------------------------------------------------------

// >>embedding ---------------------------------------------------------------------------------------------------------

// >>layernorm ---------------------------------------------------------------------------------------------------------

// >>softmax, losses ---------------------------------------------------------------------------------------------------

// >>optimisers --------------------------------------------------------------------------------------------------------

// >>gemm --------------------------------------------------------------------------------------------------------------

// >>attention: oracle -------------------------------------------------------------------------------------------------

// >>attention: forward ------------------------------------------------------------------------------------------------

/* What the fused kernels, forward and backward, share (prefix stx__at_).

   THE WINDOW. Query i of T is key C + i of S, C = S - T; the distance to key j is delta = C + i - j. Head h sees the keys
       dmin <= delta <= live        live <= reach <= span
       lo <= j < S
   reach: the CPU's formula, from z in device memory. live: the largest delta whose ramp weight is not 0, for such a key must not even
   enter the running maximum (far keys may have the largest logits). full: up to here the weight is surely 1. Between full and live it is
       m(delta) = min(1, ((1 - delta) + z max_span) / ramp + 1)        in floats, in this order of operations, as on the CPU.
   With u = j - i, delta = C - u, and the row of the relative table is p = P - 1 + dmin - delta = (P - 1 + dmin - C) + u: it depends on
   j - i alone. Rows outside [0,P) are zeros.

   DROPOUT. Key j of row (b,h,i) has position at = span + j in its row's random numbers, persistent vector n has S + span + n. Philox call
   (row groups + at / 8) gives 16 bits to each of 8 neighbours: kept if they are below keep. So the tiles of keys begin where span + j is
   a multiple of 8, and a block of 8 columns is one call. */
typedef struct stx__at {
    const void *q, *k, *v, *pe, *pk, *pv;       /* (B,T,H D), (B,S,H D) twice, (P,D) or (P,H D), (H,N,D) twice: bfloat16s or floats, as the policy says */
    void *y;                                    /* (B,T,H D) */
    float *top, *inv;                           /* (B,H,T) */
    stx__num u, vb, z;                          /* (H D) twice, (H) */
    size_t ldq, ldk, stq, stk;                  /* numbers between rows and batches */
    uint64_t groups, seed, stream;              /* Philox calls of a row of the dropout */
    const uint64_t *shift;
    int B, T, S, H, D, P, N, C, ldpe, pe_head;  /* numbers between rows of pe, and between its heads (0: shared) */
    int span, dmin, lo;                         /* lo: the first key that there is */
    uint32_t keep;                              /* of 65536; 0: no dropout */
    float scale, max_span, ramp, unkeep;        /* unkeep: 65536 / keep, or 1 */
} stx__at;

/* An operand as the kernels read it: activations' bfloat16s and parameters' twins, or floats. ok becomes 0 if it is stored otherwise or rows
   are not 16 bytes apart and aligned. */
static const void *stx__at_in(const stx_ctx *x, const void *p, int half, size_t ld, int *ok) {
    stx__num v;
    const void *r = p;
    if (!p) return NULL;
    v = stx__num_of(x, p);
    if (half && !v.half) r = v.twin;
    if (!r || (!half && v.half) || (uintptr_t)r % 16 || ld % (half ? 8 : 4)) *ok = 0;
    return r;
}
/* The kernels' view of a call, and whether they can run it: 1, or 0 with *p half filled */
static int stx__at_make(const stx_ctx *x, const stx_attention_args *a, stx__at *p, int *half) {
    stx_gpu *g = stx__gpu(x);
    size_t big = (size_t)1 << 30, tables = a->P ? (size_t)a->pe_heads : 0;
    int ok = 1, h;
    memset(p, 0, sizeof *p);
    *half = h = g->half && stx__num_of(x, a->q).half;
    if (a->eps > 0 || a->not_causal || a->first_key < 0 || !(a->scale > 0) || a->D < 8 || a->D > 128 || a->D % 8 || !a->B || !a->T || !a->H || a->H > 256) return 0;
    if (a->B >= big || a->T >= big || a->S >= big || a->P >= big || a->N >= big || a->span >= big || a->S + a->span + a->N >= big || a->T > a->S) return 0;
    p->q = stx__at_in(x, a->q, h, a->ldq, &ok);
    p->k = stx__at_in(x, a->k, h, a->ldk, &ok);
    p->v = stx__at_in(x, a->v, h, a->ldk, &ok);
    p->y = (void *)(uintptr_t)stx__at_in(x, a->y, h, a->D, &ok);
    if (a->P) p->pe = stx__at_in(x, a->pe, h, a->D, &ok);
    if (a->N) { p->pk = stx__at_in(x, a->pk, h, a->D, &ok); p->pv = stx__at_in(x, a->pv, h, a->D, &ok); }
    if (!ok || a->stq % 8 || a->stk % 8 || (h && !stx__num_of(x, a->y).half)) return 0;
    p->top = (float *)a->top;
    p->inv = (float *)a->inv;
    p->u = stx__num_of(x, a->u);
    p->vb = stx__num_of(x, a->P ? a->vb : NULL);
    p->z = stx__num_of(x, a->z);
    p->ldq = a->ldq; p->ldk = a->ldk; p->stq = a->stq; p->stk = a->stk;
    p->B = (int)a->B; p->T = (int)a->T; p->S = (int)a->S; p->H = (int)a->H; p->D = (int)a->D; p->P = (int)a->P; p->N = (int)a->N;
    p->C = p->S - p->T;
    p->ldpe = (int)(tables * a->D);
    p->pe_head = tables > 1 ? (int)a->D : 0;
    p->span = (int)a->span; p->dmin = a->delta_min;
    p->lo = a->first_key > (ptrdiff_t)a->S ? p->S : (int)a->first_key;
    p->scale = a->scale; p->max_span = a->max_span; p->ramp = a->ramp;
    p->unkeep = 1;
    if (a->drop > 0) {
        double k = floor((1.0 - (double)a->drop) * 65536.0 + 0.5);      /* stx__keep16 */
        p->keep = (uint32_t)(k < 1 ? 1 : k);
        p->unkeep = (float)(65536.0 / p->keep);
        p->groups = ((uint64_t)a->S + a->span + a->N) / 8 + 2;
        p->seed = a->seed; p->stream = a->stream; p->shift = g->shift;
    }
    return 1;
}

/* What head h sees */
typedef struct stx__at_head { int reach, live, full; float zl; } stx__at_head;
/* The ramp at a distance before its clamps; 1 and more where the span is not learned */
static __device__ __forceinline__ float stx__at_ramp(const stx__at &p, const stx__at_head &w, int delta) {
    return __fadd_rn(__fdiv_rn(__fadd_rn((float)(1 - delta), w.zl), p.ramp), 1.0f);
}
static __device__ __forceinline__ int stx__at_reach(const stx__at &p, float z) {
    double e = ceil((double)z * (double)p.max_span) + (double)p.ramp + 1;
    if (!(e > 1)) e = 1;                                /* also NaN */
    return e < (double)p.span ? (int)e : p.span;
}
static __device__ __forceinline__ stx__at_head stx__at_open(const stx__at &p, int h) {
    stx__at_head w;
    w.reach = w.live = w.full = p.span;
    w.zl = 0;
    if (p.z.p) {
        float z = stx__get(p.z, (size_t)h), f;
        w.zl = __fmul_rn(z, p.max_span);
        w.reach = w.live = stx__at_reach(p, z);
        while (w.live >= p.dmin && stx__at_ramp(p, w, w.live) <= 0) w.live--;      /* a step or two: reach is hardly more */
        f = floorf(w.zl) + 1;                           /* (1 - delta) + zl >= 0, so nothing is taken from 1 */
        w.full = f >= (float)w.live ? w.live : f >= 0 ? (int)f : -1;                /* NaN: -1 */
    }
    return w;
}
/* Keys [first,last) that queries i0 .. i0+n-1 may see; empty: last <= first. Begins where a block of 8 does: first may be below lo, or
   even below 0, by 7. */
static __device__ __forceinline__ void stx__at_range(const stx__at &p, const stx__at_head &w, int i0, int n, int *first, int *last) {
    int f = max(p.lo, p.C + i0 - w.live);
    *last = p.C + min(i0 + n, p.T) - p.dmin;
    *first = *last > f ? ((f + p.span) & ~7) - p.span : *last;
}
/* The word of the dropout for lanes 2t and 2t+1 of a call: low and high half. row: (b H + h) T + i; at: position of the first of 8 */
static __device__ __forceinline__ uint4 stx__at_bits(const stx__at &p, uint64_t stream, uint64_t row, int at) {
    return stx__philox(p.seed, stream, row * p.groups + (uint64_t)(at >> 3));
}

/* THE WORK LIST: all (head, tile of queries) by falling number of key tiles, ties by head and tile: the blocks that take longest start
   first, and the short ones fill the gaps at the end. The lengths depend on z, so a kernel makes the list in each step. Within a head a
   later tile is never shorter (of the window at its old end only the beginning of the keys cuts anything off), so an entry's rank is a
   sum over the heads of what a binary search finds: no sort, no atomics. One thread an entry; the batch is not in the list, its rows
   have equal lengths. */
static __device__ __forceinline__ int stx__at_length(const stx__at &p, const stx__at_head &w, int tile, int bq, int bk) {
    int last = p.C + (tile + 1) * bq - p.dmin;        /* a last tile that T cuts counts as a whole one: never shorter than the tile before */
    return (max(last - max(p.lo, p.C + tile * bq - w.live), 0) + bk - 1) / bk;
}
static __global__ void stx__at_list(stx__at p, uint32_t *list, int tiles, int bq, int bk) {
    STX__SHARED(stx__at_head, head, 256);
    int h, e;
    for (h = (int)threadIdx.x; h < p.H; h += (int)blockDim.x) head[h] = stx__at_open(p, h);
    __syncthreads();
    e = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (e < p.H * tiles) {
        int mine = e / tiles, tile = e % tiles, n = stx__at_length(p, head[mine], tile, bq, bk), rank = 0;
        for (h = 0; h < p.H; h++) {
            int a = 0, b = tiles;           /* the first tile of head h that comes before this entry */
            while (a < b) {
                int m = (a + b) / 2, len = stx__at_length(p, head[h], m, bq, bk);
                if (len > n || (len == n && (h < mine || (h == mine && m > tile)))) b = m; else a = m + 1;
            }
            rank += tiles - a;
        }
        list[rank] = (uint32_t)e;
    }
}

/* TILES IN SHARED MEMORY: rows of D numbers, filled up with zeros to a power of two, in pieces of 16 bytes (CH a row). Piece c of row r
   stands at c ^ r: the 8 rows that ldmatrix reads at once, all at the same c, so lie in 8 different groups of 4 banks; and so do the 4 x 8
   floats of a transposed fragment. Rows of 64 bytes: two of them make a line of 128. */
template<int CH> static __device__ __forceinline__ unsigned stx__at_piece(int r, int c) {
    return (unsigned)(r * CH + (CH >= 8 ? c ^ (r & 7) : c ^ ((r >> 1) & 3))) * 16;
}
/* Rows r0 .. of a table at `from`, row 0 first, into n rows of a tile; those outside [lo,hi) become zeros. All threads of the block; there
   after the next cp_wait and barrier. bytes: of a row's numbers, a multiple of 16. */
template<int CH, int THREADS> static __device__ __forceinline__ void stx__at_load(unsigned char *tile, int n, const void *from, size_t ld, int bytes, int r0, int lo, int hi) {
    int i;
    for (i = (int)threadIdx.x; i < n * CH; i += THREADS) {
        int r = i / CH, c = i % CH, row = r0 + r, yes = row >= lo && row < hi && c * 16 < bytes;
        stx__cp16(tile + stx__at_piece<CH>(r, c), (const char *)from + (yes ? (size_t)row * ld + (size_t)c * 16 : 0), yes ? 16 : 0);
    }
}

/* FRAGMENTS. 32 bytes of a row are one step of k in either precision: 16 bfloat16s or 8 tf32s, and ldmatrix, which moves units of 4
   bytes, gives the fragments of both.
   a: 16 rows r0.. (r0 % 8 == 0) and step k of a tile, as the left factor: rows r0 + g, r0 + g + 8
   b: the same rows as two right factors of 8 columns each (the tile transposed): b[0..1] for rows r0 .. r0+7, b[2..3] for the next 8
   v: rows r0 .. r0+15 as k, 16 columns 8c.. as two right factors of 8 columns each; bfloat16 only (ldmatrix turns units of 2 bytes) */
template<int CH> static __device__ __forceinline__ void stx__at_frag_a(uint32_t (&a)[4], const unsigned char *tile, int r0, int k) {
    int lane = (int)threadIdx.x & 31;
    stx__ldmatrix_x4(a, tile + stx__at_piece<CH>(r0 + (lane & 15), 2 * k + (lane >> 4)));
}
template<int CH> static __device__ __forceinline__ void stx__at_frag_b(uint32_t (&b)[4], const unsigned char *tile, int r0, int k) {
    int lane = (int)threadIdx.x & 31;
    stx__ldmatrix_x4(b, tile + stx__at_piece<CH>(r0 + (lane & 7) + (lane >> 4) * 8, 2 * k + ((lane >> 3) & 1)));
}
template<int CH> static __device__ __forceinline__ void stx__at_frag_v(uint32_t (&b)[4], const unsigned char *tile, int r0, int c) {
    int lane = (int)threadIdx.x & 31;
    stx__ldmatrix_x4_trans(b, tile + stx__at_piece<CH>(r0 + (lane & 15), c + (lane >> 4)));
}

/* PRECISION. num: how numbers are stored; SIZE their bytes; mma: c (16,8) += a (16,32 bytes) b. A kernel is a template over these.
   f32: each operand in two tf32 parts, x = hi + lo up to 2^-22 x, and three products: nearly float accuracy. tf32: the high parts alone. */
struct stx__at_bf16 {
    typedef stx__bf16 num;
    enum { SIZE = 2, K = 16 };
    static __device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
        uint32_t b[2] = {b0, b1};
        stx__mma_bf16(c, a, b);
    }
};
static __device__ __forceinline__ uint32_t stx__at_hi(uint32_t v) { return (v + 0x1000u) & 0xffffe000u; }
static __device__ __forceinline__ uint32_t stx__at_lo(uint32_t v, uint32_t hi) { return stx__at_hi(__float_as_uint(__uint_as_float(v) - __uint_as_float(hi))); }
struct stx__at_tf32 {
    typedef float num;
    enum { SIZE = 4, K = 8 };
    static __device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
        uint32_t h[4] = {stx__at_hi(a[0]), stx__at_hi(a[1]), stx__at_hi(a[2]), stx__at_hi(a[3])}, b[2] = {stx__at_hi(b0), stx__at_hi(b1)};
        stx__mma_tf32(c, h, b);
    }
};
struct stx__at_f32 {
    typedef float num;
    enum { SIZE = 4, K = 8 };
    static __device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
        uint32_t h[4] = {stx__at_hi(a[0]), stx__at_hi(a[1]), stx__at_hi(a[2]), stx__at_hi(a[3])}, b[2] = {stx__at_hi(b0), stx__at_hi(b1)};
        uint32_t l[4] = {stx__at_lo(a[0], h[0]), stx__at_lo(a[1], h[1]), stx__at_lo(a[2], h[2]), stx__at_lo(a[3], h[3])};
        uint32_t m[2] = {stx__at_lo(b0, b[0]), stx__at_lo(b1, b[1])};
        stx__mma_tf32(c, l, b);
        stx__mma_tf32(c, h, m);
        stx__mma_tf32(c, h, b);
    }
};
/* The float of a stored number, and back */
static __device__ __forceinline__ float stx__at_float(stx__bf16 v) { return __bfloat162float(v); }
static __device__ __forceinline__ float stx__at_float(float v) { return v; }
static __device__ __forceinline__ void stx__at_store(stx__bf16 *p, float v) { *p = __float2bfloat16(v); }
static __device__ __forceinline__ void stx__at_store(float *p, float v) { *p = v; }
static __device__ __forceinline__ void stx__at_store2(stx__bf16 *p, float a, float b) { *(uint32_t *)p = stx__pair(a, b); }
static __device__ __forceinline__ void stx__at_store2(float *p, float a, float b) { *(float2 *)p = make_float2(a, b); }

/* THE SKEW, in registers. R[r][c'] = q_r . pe of column c' is wanted at S[r][c'+r], for the rows r = 0 .. 15 of one strip. A thread (g, t) of
   a fragment holds columns 8n+2t and 8n+2t+1 of rows g and g+8, and wants, for its cells of S,
       row g:    column 8n + 2t + e - g          lies in block n or n-1, in the same row, so in one of the 4 lanes of the same g
       row g+8:  column 8(n-1) + 2t + e - g      what the formula above gives for block n-1
   Whose? 2t + e - g = 2(t - k) + e' with k = (g + 1 - e) / 2 rounded down and e' = e ^ (g & 1): lane (t - k) mod 4, its element e', of
   block n if t >= k and of block n-1 otherwise. Each lane is asked by exactly one other for each e, so it can put the right block's
   number forward itself: a shuffle for each cell, no shared memory, no rounding, no barrier. Two blocks of 8 columns are carried from one
   tile of keys to the next: that is the ring.
   turn: one block of R; returns in s what belongs to block n of S. */
struct stx__at_skew {
    float lo[2], hi[2], next[2];        /* the block before, its elements already in the order e; row g+8's part of the next block of S */
};
struct stx__at_lanes { int from[2], odd, now[2]; };
static __device__ __forceinline__ stx__at_lanes stx__at_lanes_of(void) {
    stx__at_lanes l;
    int lane = (int)threadIdx.x & 31, g = lane >> 2, t = lane & 3, e;
    l.odd = g & 1;
    for (e = 0; e < 2; e++) {
        int k = (g + 1 - e) >> 1;
        l.from[e] = (t - k) & 3;
        l.now[e] = t + k < 4;           /* the one who asks this lane has t + k as his t, or has it 4 less and wants the block before */
    }
    return l;
}
static __device__ __forceinline__ void stx__at_turn(stx__at_skew &w, const stx__at_lanes &l, const float (&r)[4], float (&s)[4]) {
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

// >>attention: backward -----------------------------------------------------------------------------------------------

// >>attention: launchers ----------------------------------------------------------------------------------------------

// >>device ------------------------------------------------------------------------------------------------------------

// >>graph -------------------------------------------------------------------------------------------------------------
