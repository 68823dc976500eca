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
    int attention;                      /* which version, see stx_cuda_attention */
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

/* Version 0 of the attention: products, and between them one kernel a direction that works on whole rows of scores. It takes every call,
   is what the fused kernels are compared with, and does what they refuse. All of it is float, whatever is stored.

   Units (batch row, head) are worked on in chunks, a chunk in panels of queries, such that the scores of a panel stay small. Of a panel
   whose queries see the keys j0 .. j0+W-1 at most, a unit has the rows

       s (n, W + N)      column c < W: key j0 + c; column W + m: persistent vector m

   The relative term needs no matrix of its own: row r of (q + vb) PE^T belongs into s one column further left than row r - 1, and dR is
   ds seen the same way (skew of stx__mat). What all queries of a unit add to (dk, dv) or several units share (pe, u, vb, z, pk, pv) is
   summed in float by unit, then over the units of a chunk in their order, and added to the gradient once, at the end. */

/* A matrix of each unit (b,h): row r, column c stands at `at` + b sb + h sh + chunk's unit sz + (first + r) ld + c. Rows that are not in
   [0,rows) there are zero (keys before the first). bias: h sh + c of it is added. skew: column c is column c + r + off of what is stored,
   and zero outside of [0,width). */
typedef struct stx__mat {
    stx__num a, bias;
    size_t at, sb, sh, sz, ld;
    ptrdiff_t first, rows, off, width;
    int skew;
} stx__mat;
static stx__mat stx__mat_of(const stx__num &a, size_t ld, ptrdiff_t first, ptrdiff_t rows) {
    stx__mat m;
    memset(&m, 0, sizeof m);
    m.a = a; m.ld = ld; m.first = first; m.rows = rows;
    return m;
}
/* rows of scratch: n of them, sz numbers a unit */
static stx__mat stx__mat_scratch(float *p, size_t ld, size_t n, size_t sz) {
    stx__num a = {p, NULL, 0};
    stx__mat m = stx__mat_of(a, ld, 0, (ptrdiff_t)n);
    m.sz = sz;
    return m;
}
static __device__ __forceinline__ size_t stx__mat_base(const stx__mat &m, size_t b, size_t h, size_t z) { return m.at + b * m.sb + h * m.sh + z * m.sz; }
static __device__ __forceinline__ float stx__mat_get(const stx__mat &m, size_t base, size_t bias, ptrdiff_t r, ptrdiff_t c) {
    ptrdiff_t row = r + m.first;
    if (m.skew) {
        c += r + m.off;
        if (c < 0 || c >= m.width) return 0;
    }
    if (row < 0 || row >= m.rows) return 0;
    float v = stx__get(m.a, base + (size_t)row * m.ld + (size_t)c);
    return m.bias.p ? v + stx__get(m.bias, bias + (size_t)c) : v;
}

/* C (M,N) of each unit = or += alpha op(A) op(B), op = transpose if ta, tb; C is scratch, and may be skewed.
   A block makes 64 x 64 numbers of one unit (grid: columns, rows, units), a thread 4 x 4 of them; operands pass through shared memory
   16 columns of op(A) at a time. */
enum { STX__P = 64, STX__PK = 16 };
static __global__ void stx__attn0_product_kernel(stx__mat C, stx__mat A, stx__mat B, int ta, int tb, size_t M, size_t N, size_t K, float alpha,
                                                 int accumulate, size_t u0, size_t H) {
    STX__SHARED(float, as, STX__PK * (STX__P + 4));
    STX__SHARED(float, bs, STX__PK * (STX__P + 4));
    const size_t z = blockIdx.z, b = (u0 + z) / H, h = (u0 + z) % H, m0 = (size_t)blockIdx.y * STX__P, n0 = (size_t)blockIdx.x * STX__P;
    const size_t ab = stx__mat_base(A, b, h, z), bb = stx__mat_base(B, b, h, z), cb = stx__mat_base(C, b, h, z);
    const int tid = (int)threadIdx.x, tx = tid % 16, ty = tid / 16;
    float c[4][4] = {{0}};
    for (size_t k0 = 0; k0 < K; k0 += STX__PK) {
        for (int e = tid; e < STX__P * STX__PK; e += 256) {      /* neighbouring threads take neighbouring numbers of what is stored */
            int ka = ta ? e / STX__P : e % STX__PK, ma = ta ? e % STX__P : e / STX__PK, kb = tb ? e % STX__PK : e / STX__P, nb = tb ? e / STX__PK : e % STX__P;
            size_t k = k0 + (size_t)ka, m = m0 + (size_t)ma, l = k0 + (size_t)kb, n = n0 + (size_t)nb;
            as[ka * (STX__P + 4) + ma] = k < K && m < M ? stx__mat_get(A, ab, h * A.sh, (ptrdiff_t)(ta ? k : m), (ptrdiff_t)(ta ? m : k)) : 0;
            bs[kb * (STX__P + 4) + nb] = l < K && n < N ? stx__mat_get(B, bb, h * B.sh, (ptrdiff_t)(tb ? n : l), (ptrdiff_t)(tb ? l : n)) : 0;
        }
        __syncthreads();
        for (int k = 0; k < STX__PK; k++) {
            float av[4], bv[4];
            for (int i = 0; i < 4; i++) { av[i] = as[k * (STX__P + 4) + 4 * ty + i]; bv[i] = bs[k * (STX__P + 4) + 4 * tx + i]; }
            for (int i = 0; i < 4; i++) for (int j = 0; j < 4; j++) c[i][j] = fmaf(av[i], bv[j], c[i][j]);
        }
        __syncthreads();
    }
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++) {
            size_t m = m0 + (size_t)(4 * ty + i), n = n0 + (size_t)(4 * tx + j);
            ptrdiff_t at = (ptrdiff_t)n;
            if (m >= M || n >= N) continue;
            if (C.skew) {
                at += (ptrdiff_t)m + C.off;
                if (at < 0 || at >= C.width) continue;
            }
            float *to = (float *)C.a.p + cb + (size_t)((ptrdiff_t)m + C.first) * C.ld + (size_t)at;
            *to = accumulate ? *to + alpha * c[i][j] : alpha * c[i][j];
        }
}

/* What the kernels of rows need: rows z n + r of s and g, query i0 + r of unit u0 + z */
typedef struct stx__attn0_rows {
    float *s, *g, *top, *inv, *dz;      /* (units,n,ld) twice; (B,H,T) twice; (units,n) or NULL */
    size_t T, H, S, N, n, ld, u0, i0, units;
    ptrdiff_t C, j0, W, span, first;
    int delta_min, not_causal;
    float max_span, ramp, eps, wide, inv_keep;      /* wide: sqrt(N), a persistent value's factor; inv_keep: a kept weight's */
    uint32_t keep;                      /* of 65536; 0: no dropout */
    uint64_t seed, stream;
    const uint64_t *shift;
    stx__num z;
} stx__attn0_rows;
/* The largest distance that head h reaches: stx__attn_reach */
static __device__ ptrdiff_t stx__attn0_reach(const stx__attn0_rows &p, size_t h) {
    double e;
    if (!p.z.p || p.eps > 0) return p.span;
    e = ceil((double)stx__get(p.z, h) * (double)p.max_span) + (double)p.ramp + 1;
    if (!(e > 1)) e = 1;                /* also NaN */
    return e < (double)p.span ? (ptrdiff_t)e : p.span;
}
/* Columns [lo,hi) of the window that query i0 + r sees */
static __device__ void stx__attn0_bounds(const stx__attn0_rows &p, size_t h, size_t r, ptrdiff_t *lo, ptrdiff_t *hi) {
    ptrdiff_t i = p.C + (ptrdiff_t)(p.i0 + r), from = p.first, to = (ptrdiff_t)p.S;
    if (!p.not_causal) {
        ptrdiff_t reach = stx__attn0_reach(p, h);
        if (from < i - reach) from = i - reach;
        to = i - p.delta_min + 1;
    }
    *lo = from > p.j0 ? from - p.j0 : 0;
    *hi = to - p.j0 < p.W ? to - p.j0 : p.W;
}
/* The ramp's weight before it is clamped, of column c: 2 without a ramp. Operations in stx__attn_ramp's order, and none fused. */
static __device__ __forceinline__ float stx__attn0_ramp(const stx__attn0_rows &p, float zl, size_t r, ptrdiff_t c) {
    float delta;
    if (!p.z.p || c >= p.W) return 2;
    delta = (float)(p.C + (ptrdiff_t)(p.i0 + r) - p.j0 - c);
    return __fadd_rn(__fadd_rn(1.0f - delta, zl) / p.ramp, 1.0f);
}
/* What column c's weight is multiplied by after normalisation: stx__attn_drop */
static __device__ float stx__attn0_factor(const stx__attn0_rows &p, size_t u, size_t r, ptrdiff_t c, uint64_t stream) {
    uint64_t S = (uint64_t)p.S + (uint64_t)p.span, groups = (S + p.N) / 8 + 2, row = (uint64_t)u * p.T + p.i0 + r, at;
    float f = c < p.W ? 1.0f : p.wide;
    if (!p.keep) return f;
    at = c < p.W ? (uint64_t)(p.span + p.j0 + c) : S + (uint64_t)(c - p.W);
    uint4 v = stx__philox(p.seed, stream, row * groups + at / 8);
    uint32_t word = at % 8 < 2 ? v.x : at % 8 < 4 ? v.y : at % 8 < 6 ? v.z : v.w;
    return (at % 2 ? word >> 16 : word & 0xffffu) < p.keep ? __fmul_rn(f, p.inv_keep) : 0.0f;
}

/* s: logits become what multiplies the values, dropout and sqrt(N) included, 0 for keys that are not seen; top, inv: see the args.
   A warp a row: maximum, sums, weights. */
static __global__ void stx__attn0_soft_kernel(stx__attn0_rows p) {
    const size_t row = (size_t)blockIdx.x * (blockDim.x / STX__WARP) + threadIdx.x / STX__WARP;
    const int lane = (int)(threadIdx.x % STX__WARP);
    if (row >= p.units * p.n) return;
    const size_t u = p.u0 + row / p.n, r = row % p.n, h = u % p.H;
    const ptrdiff_t columns = p.W + (ptrdiff_t)p.N;
    const uint64_t stream = p.keep ? p.stream + *p.shift : 0;
    const float zl = p.z.p ? __fmul_rn(stx__get(p.z, h), p.max_span) : 0.0f;
    float *s = p.s + row * p.ld, top = -HUGE_VALF, sum = 0, all = 0, norm, inv;
    ptrdiff_t lo, hi, c;
    stx__attn0_bounds(p, h, r, &lo, &hi);
    for (c = lane; c < columns; c += STX__WARP)
        if (c >= p.W || (c >= lo && c < hi && (p.eps > 0 || !(stx__attn0_ramp(p, zl, r, c) <= 0)))) top = fmaxf(top, s[c]);
    top = stx__warp_max(top);
    for (c = lane; c < columns; c += STX__WARP) {
        float m = stx__attn0_ramp(p, zl, r, c), e;
        if (c < p.W && (c < lo || c >= hi || (!(p.eps > 0) && m <= 0))) { s[c] = 0; continue; }
        m = m <= 0 ? 0 : m >= 1 ? 1 : m;         /* NaN stays NaN */
        e = expf(s[c] - top);
        s[c] = m * e;
        sum += m * e;
        all += e;
    }
    sum = stx__warp_sum(sum);
    all = stx__warp_sum(all);
    norm = sum + p.eps * all;
    inv = norm == 0 ? 0 : 1 / norm;              /* no key at all: y = 0 */
    for (c = lane; c < columns; c += STX__WARP) if (s[c] != 0) s[c] *= inv * stx__attn0_factor(p, u, r, c, stream);
    if (lane == 0) {
        p.top[u * p.T + p.i0 + r] = top;
        p.inv[u * p.T + p.i0 + r] = inv;
    }
}

/* s: logits become what multiplied the values, as forward left them; g: dy.v becomes ds. With w = e^(s - top) inv, a = m w, f the factor
   of dropout: G = f g, D = sum a G (which is dy.y, without y's rounding), ds = a (G - D) - eps D w. dz: the row's sum of w (G - D) over
   0 <= ramp <= 1. A warp a row, twice over its columns. */
static __global__ void stx__attn0_soft_bwd_kernel(stx__attn0_rows p) {
    const size_t row = (size_t)blockIdx.x * (blockDim.x / STX__WARP) + threadIdx.x / STX__WARP;
    const int lane = (int)(threadIdx.x % STX__WARP);
    if (row >= p.units * p.n) return;
    const size_t u = p.u0 + row / p.n, r = row % p.n, h = u % p.H;
    const ptrdiff_t columns = p.W + (ptrdiff_t)p.N;
    const uint64_t stream = p.keep ? p.stream + *p.shift : 0;
    const float zl = p.z.p ? __fmul_rn(stx__get(p.z, h), p.max_span) : 0.0f, top = p.top[u * p.T + p.i0 + r], inv = p.inv[u * p.T + p.i0 + r];
    float *s = p.s + row * p.ld, *g = p.g + row * p.ld, D = 0, dz = 0;
    ptrdiff_t lo, hi, c;
    stx__attn0_bounds(p, h, r, &lo, &hi);
    for (c = lane; c < columns; c += STX__WARP) {
        float m = stx__attn0_ramp(p, zl, r, c), v = s[c] - top;
        if (inv == 0 || (c < p.W && (c < lo || c >= hi))) { s[c] = g[c] = 0; continue; }
        m = m <= 0 ? 0 : m >= 1 ? 1 : m;
        s[c] = expf(v < 80 ? v : v > 80 ? 80 : v) * inv;         /* m w <= 1, but w alone may not fit */
        g[c] *= stx__attn0_factor(p, u, r, c, stream);
        D += m * s[c] * g[c];
    }
    D = stx__warp_sum(D);
    for (c = lane; c < columns; c += STX__WARP) {
        float raw = stx__attn0_ramp(p, zl, r, c), m = raw <= 0 ? 0 : raw >= 1 ? 1 : raw, w = s[c], gd = g[c] - D;
        if (inv == 0 || (c < p.W && (c < lo || c >= hi))) continue;
        if (raw >= 0 && raw <= 1) dz += w * gd;
        g[c] = m * w * gd - p.eps * D * w;
        s[c] = m * w != 0 ? m * w * stx__attn0_factor(p, u, r, c, stream) : m * w;
    }
    dz = stx__warp_sum(dz);
    if (lane == 0 && p.dz) p.dz[row] = dz;
}

/* to (rows,D) of each unit = or += p + q, scratch of stride sz a unit; q may be NULL. A thread a number. */
static __global__ void stx__attn0_out_kernel(stx__mat to, const float *p, const float *q, size_t sz, size_t rows, size_t D, int accumulate, size_t units, size_t u0, size_t H) {
    size_t n = units * rows * D, step = (size_t)gridDim.x * blockDim.x;
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) {
        size_t z = i / (rows * D), e = i % (rows * D), u = u0 + z;
        size_t at = stx__mat_base(to, u / H, u % H, z) + (size_t)((ptrdiff_t)(e / D) + to.first) * to.ld + e % D;
        stx__add(to.a, at, q ? p[z * sz + e] + q[z * sz + e] : p[z * sz + e], accumulate);
    }
}
/* to (units,D) += the sums of the columns of from (units,n,D). A thread a column. */
static __global__ void stx__attn0_columns_kernel(float *to, const float *from, size_t sz, size_t n, size_t D, size_t units) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x, r;
    float s = 0;
    if (i >= units * D) return;
    for (r = 0; r < n; r++) s += from[i / D * sz + r * D + i % D];
    to[i] += s;
}
/* all (tables,size) += the sums over the chunk's units of parts (units,size), those of a table's heads, in order. A thread a number. */
static __global__ void stx__attn0_sum_kernel(float *all, const float *parts, size_t size, size_t tables, size_t units, size_t u0) {
    size_t step = (size_t)gridDim.x * blockDim.x;
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < tables * size; i += step) {
        size_t t = i / size, z;
        float s = 0;
        for (z = (t + tables - u0 % tables) % tables; z < units; z += tables) s += parts[z * size + i % size];
        all[i] += s;
    }
}
/* grad += f all (tables,rows,D): number (t,r,d) is at + t st + r ld + d of grad. A thread a number. */
static __global__ void stx__attn0_add_kernel(stx__num grad, const float *all, float f, size_t tables, size_t rows, size_t D, size_t at, size_t st, size_t ld) {
    size_t step = (size_t)gridDim.x * blockDim.x;
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < tables * rows * D; i += step)
        stx__add(grad, at + i / (rows * D) * st + i / D % rows * ld + i % D, f * all[i], 1);
}

/* How a call is cut, and its scratch. Sums that units share, one copy a unit and one for all: */
enum { STX__S_PE, STX__S_U, STX__S_VB, STX__S_Z, STX__S_PK, STX__S_PV, STX__SHARED_SUMS };
typedef struct stx__attn0 {
    stx_ctx *x;
    const stx_attention_args *a;
    size_t n, units, ld, tables, p0, np;                /* queries of a panel, units of a chunk, numbers of a row; rows p0 .. p0+np-1 of pe are met */
    size_t size[STX__SHARED_SUMS], copies[STX__SHARED_SUMS];    /* numbers of one copy (0: not wanted), and how many there are in the gradient */
    float *s, *g, *o, *o2, *rows, *dk, *dv, *part[STX__SHARED_SUMS], *all[STX__SHARED_SUMS];
    float *parts;                                       /* dk, dv and part[] */
    size_t parts_bytes, all_bytes, bytes;
    size_t u0, nu, i0, nb;                              /* the chunk and the panel at hand */
    ptrdiff_t j0, W;
    stx__num q, k, v, pe, u, vb, pk, pv, y, dy;
} stx__attn0;

static size_t stx__attn0_layout(stx__attn0 *A, int backward) {
    const stx_attention_args *a = A->a;
    const size_t budget = (size_t)200 << 20, few = stx__gpu(A->x)->attention == 3;
    size_t at = 0, i, all = a->B * a->H, window = (size_t)((ptrdiff_t)a->S - STX__MIN(a->first_key, (ptrdiff_t)a->S)), unit;
    char *base = a->work ? (char *)(((uintptr_t)a->work + 255) / 256 * 256) : NULL;
    if (a->not_causal && a->first_key < 0) window = a->S;
    A->tables = a->P ? (size_t)a->pe_heads : 0;
    A->p0 = a->P + (size_t)a->delta_min > a->span + 1 ? a->P + (size_t)a->delta_min - a->span - 1 : 0;
    if (A->p0 > a->P) A->p0 = a->P;
    A->np = a->P - A->p0;
    memset(A->size, 0, sizeof A->size);
    for (i = 0; i < STX__SHARED_SUMS; i++) A->copies[i] = a->H;
    if (backward) {
        if (a->dpe) { A->size[STX__S_PE] = A->np * a->D; A->copies[STX__S_PE] = A->tables; }
        if (a->du)  A->size[STX__S_U] = a->D;
        if (a->dvb) A->size[STX__S_VB] = a->D;
        if (a->dz)  A->size[STX__S_Z] = 1;
        if (a->dpk) A->size[STX__S_PK] = a->N * a->D;
        if (a->dpv) A->size[STX__S_PV] = a->N * a->D;
    }
    for (A->n = STX__MIN(a->T, (size_t)(few ? 16 : 256));; A->n = (A->n + 1) / 2) {
        A->ld = (a->not_causal ? window : STX__MIN(window, a->span + A->n)) + a->N;
        unit = A->n * (A->ld * (backward ? 2 : 1) + 2 * a->D + 1);
        if (A->n <= 16 || unit * sizeof(float) <= budget / 2) break;
    }
    if (backward) unit += (a->dk ? a->S * a->D : 0) + (a->dv ? a->S * a->D : 0);
    for (i = 0; i < STX__SHARED_SUMS; i++) unit += A->size[i];
    A->units = few ? 3 : budget / (unit * sizeof(float));
    A->units = STX__MAX((size_t)1, STX__MIN(STX__MIN(A->units, all), (size_t)65535));
  #define STX__TAKE(field, count) do { A->field = base ? (float *)(void *)(base + at) : NULL; at += ((count) * sizeof(float) + 255) / 256 * 256; } while (0)
    STX__TAKE(s, A->units * A->n * A->ld);
    STX__TAKE(o, A->units * A->n * a->D);
    if (backward) {
        STX__TAKE(g, A->units * A->n * A->ld);
        STX__TAKE(o2, A->units * A->n * a->D);
        STX__TAKE(rows, A->units * A->n);
        A->parts_bytes = at;
        STX__TAKE(dk, a->dk ? A->units * a->S * a->D : 0);
        STX__TAKE(dv, a->dv ? A->units * a->S * a->D : 0);
        A->parts = A->dk;
        for (i = 0; i < STX__SHARED_SUMS; i++) STX__TAKE(part[i], A->units * A->size[i]);
        A->parts_bytes = at - A->parts_bytes;
        A->all_bytes = at;
        for (i = 0; i < STX__SHARED_SUMS; i++) STX__TAKE(all[i], A->copies[i] * A->size[i]);
        A->all_bytes = at - A->all_bytes;
    }
  #undef STX__TAKE
    return A->bytes = at + 256;
}
static void stx__attn0_open(stx__attn0 *A, stx_ctx *x, const stx_attention_args *a, int backward) {
    memset(A, 0, sizeof *A);
    A->x = x; A->a = a;
    stx__attn0_layout(A, backward);
    A->q = stx__num_of(x, a->q); A->k = stx__num_of(x, a->k); A->v = stx__num_of(x, a->v);
    A->pe = stx__num_of(x, a->pe); A->u = stx__num_of(x, a->u); A->vb = stx__num_of(x, a->vb);
    A->pk = stx__num_of(x, a->pk); A->pv = stx__num_of(x, a->pv);
    A->y = stx__num_of(x, a->y); A->dy = stx__num_of(x, a->dy);
}
static void stx__attn0_product(const stx__attn0 *A, const stx__mat &C, const stx__mat &L, int ta, const stx__mat &R, int tb, size_t M, size_t N, size_t K, float alpha, int accumulate) {
    dim3 grid((unsigned)((N + STX__P - 1) / STX__P), (unsigned)((M + STX__P - 1) / STX__P), (unsigned)A->nu);
    if (!M || !N || (!K && accumulate)) return;
    STX__RUN_KERNEL(A->x, "stx_attention", stx__attn0_product_kernel, grid, 256, 0, C, L, R, ta, tb, M, N, K, alpha, accumulate, A->u0, A->a->H);
}
static void stx__attn0_out(const stx__attn0 *A, const stx__mat &to, const float *p, const float *q, size_t sz, size_t rows, int accumulate) {
    if (!rows) return;
    STX__RUN_KERNEL(A->x, "stx_attention", stx__attn0_out_kernel, stx__blocks(A->nu * rows * A->a->D, 256, 65535), 256, 0, to, p, q, sz, rows, A->a->D, accumulate,
                    A->nu, A->u0, A->a->H);
}
static void stx__attn0_columns(const stx__attn0 *A, float *to, const float *from, size_t sz, size_t D) {
    STX__RUN_KERNEL(A->x, "stx_attention_bwd", stx__attn0_columns_kernel, stx__blocks(A->nu * D, 128, (size_t)1 << 30), 128, 0, to, from, sz, A->nb, D, A->nu);
}
/* The matrices of a panel: rows of queries, keys and tables by unit; scratch */
static stx__mat stx__attn0_rows_q(const stx__attn0 *A, const stx__num &q, const stx__num *bias) {
    stx__mat m = stx__mat_of(q, A->a->ldq, (ptrdiff_t)A->i0, (ptrdiff_t)A->a->T);
    m.sb = A->a->stq; m.sh = A->a->D;
    if (bias) m.bias = *bias;
    return m;
}
static stx__mat stx__attn0_rows_y(const stx__attn0 *A, const stx__num &y) {
    stx__mat m = stx__mat_of(y, A->a->H * A->a->D, (ptrdiff_t)A->i0, (ptrdiff_t)A->a->T);
    m.sb = A->a->T * m.ld; m.sh = A->a->D;
    return m;
}
static stx__mat stx__attn0_rows_k(const stx__attn0 *A, const stx__num &k, ptrdiff_t first) {
    stx__mat m = stx__mat_of(k, A->a->ldk, first, (ptrdiff_t)A->a->S);
    m.sb = A->a->stk; m.sh = A->a->D;
    return m;
}
static stx__mat stx__attn0_rows_pe(const stx__attn0 *A) {
    stx__mat m = stx__mat_of(A->pe, A->tables * A->a->D, (ptrdiff_t)A->p0, (ptrdiff_t)A->a->P);
    m.sh = A->tables > 1 ? A->a->D : 0;
    return m;
}
static stx__mat stx__attn0_rows_p(const stx__attn0 *A, const stx__num &p) {
    stx__mat m = stx__mat_of(p, A->a->D, 0, (ptrdiff_t)A->a->N);
    m.sh = A->a->N * A->a->D;
    return m;
}
/* columns from `column` on of s or g; skewed: column p is what meets row p0 + p of pe */
static stx__mat stx__attn0_cells(const stx__attn0 *A, float *s, size_t column, int skew) {
    const stx_attention_args *a = A->a;
    stx__mat m = stx__mat_scratch(s + column, A->ld, A->nb, A->nb * A->ld);
    m.skew = skew;
    m.off = (ptrdiff_t)A->p0 - ((ptrdiff_t)a->P - 1 + a->delta_min) + (ptrdiff_t)a->S - (ptrdiff_t)a->T + (ptrdiff_t)A->i0 - A->j0;
    m.width = A->W;
    return m;
}
static stx__mat stx__attn0_wide(const stx__attn0 *A, float *o) { return stx__mat_scratch(o, A->a->D, A->nb, A->nb * A->a->D); }

/* Panel i0 .. of nb queries: the keys that they may see, and their logits into s */
static void stx__attn0_logits(stx__attn0 *A, size_t i0) {
    const stx_attention_args *a = A->a;
    ptrdiff_t C = (ptrdiff_t)a->S - (ptrdiff_t)a->T, last = (ptrdiff_t)a->S;
    A->i0 = i0;
    A->nb = STX__MIN(A->n, a->T - i0);
    A->j0 = a->not_causal ? STX__MAX(a->first_key, 0) : STX__MAX(a->first_key, C + (ptrdiff_t)i0 - (ptrdiff_t)a->span);
    if (!a->not_causal) last = C + (ptrdiff_t)(i0 + A->nb) - a->delta_min;
    A->W = STX__MAX(last - A->j0, (ptrdiff_t)0);
    stx__attn0_product(A, stx__attn0_cells(A, A->s, 0, 0), stx__attn0_rows_q(A, A->q, &A->u), 0, stx__attn0_rows_k(A, A->k, A->j0), 1, A->nb, (size_t)A->W, a->D, a->scale, 0);
    if (a->P) stx__attn0_product(A, stx__attn0_cells(A, A->s, 0, 1), stx__attn0_rows_q(A, A->q, &A->vb), 0, stx__attn0_rows_pe(A), 1, A->nb, A->np, a->D, a->scale, 1);
    stx__attn0_product(A, stx__attn0_cells(A, A->s, (size_t)A->W, 0), stx__attn0_rows_q(A, A->q, NULL), 0, stx__attn0_rows_p(A, A->pk), 1, A->nb, a->N, a->D,
                       a->scale * (float)sqrt((double)a->D), 0);
}
static stx__attn0_rows stx__attn0_rows_of(const stx__attn0 *A) {
    const stx_attention_args *a = A->a;
    stx__attn0_rows p;
    memset(&p, 0, sizeof p);
    p.s = A->s; p.g = A->g; p.top = a->top; p.inv = a->inv;
    p.T = a->T; p.H = a->H; p.S = a->S; p.N = a->N; p.n = A->nb; p.ld = A->ld; p.u0 = A->u0; p.i0 = A->i0; p.units = A->nu;
    p.C = (ptrdiff_t)a->S - (ptrdiff_t)a->T; p.j0 = A->j0; p.W = A->W; p.span = (ptrdiff_t)a->span; p.first = a->first_key;
    p.delta_min = a->delta_min; p.not_causal = a->not_causal;
    p.max_span = a->max_span; p.ramp = a->ramp; p.eps = a->eps;
    p.wide = (float)sqrt((double)a->N);
    if (a->drop > 0) {
        double k = floor((1.0 - (double)a->drop) * 65536.0 + 0.5);      /* stx__keep16 */
        p.keep = (uint32_t)(k < 1 ? 1 : k);
        p.inv_keep = (float)(65536.0 / p.keep);
        p.seed = a->seed; p.stream = a->stream; p.shift = stx__gpu(A->x)->shift;
    }
    p.z = stx__num_of(A->x, a->z);
    return p;
}

static void stx__attn0_fwd(stx_ctx *x, const stx_attention_args *a) {
    stx__attn0 A;
    size_t i0;
    stx__attn0_open(&A, x, a, 0);
    for (A.u0 = 0; A.u0 < a->B * a->H; A.u0 += A.nu) {
        A.nu = STX__MIN(A.units, a->B * a->H - A.u0);
        for (i0 = 0; i0 < a->T; i0 += A.nb) {
            stx__attn0_logits(&A, i0);
            STX__RUN_KERNEL(x, "stx_attention_fwd", stx__attn0_soft_kernel, stx__blocks(A.nu * A.nb, 4, (size_t)1 << 30), 4 * STX__WARP, 0, stx__attn0_rows_of(&A));
            stx__attn0_product(&A, stx__attn0_wide(&A, A.o), stx__attn0_cells(&A, A.s, 0, 0), 0, stx__attn0_rows_k(&A, A.v, A.j0), 0, A.nb, a->D, (size_t)A.W, 1, 0);
            stx__attn0_product(&A, stx__attn0_wide(&A, A.o), stx__attn0_cells(&A, A.s, (size_t)A.W, 0), 0, stx__attn0_rows_p(&A, A.pv), 0, A.nb, a->D, a->N, 1, 1);
            stx__attn0_out(&A, stx__attn0_rows_y(&A, A.y), A.o, NULL, A.nb * a->D, A.nb, 0);
        }
    }
}

/* One panel of the backward pass, after the logits */
static void stx__attn0_bwd_panel(stx__attn0 *A) {
    const stx_attention_args *a = A->a;
    const size_t D = a->D, W = (size_t)A->W, zeros = (size_t)STX__MIN(STX__MAX(-A->j0, (ptrdiff_t)0), A->W), real = (size_t)STX__MAX(A->j0, (ptrdiff_t)0);
    const float far = a->scale * (float)sqrt((double)D);
    stx__mat dy = stx__attn0_rows_y(A, A->dy), o = stx__attn0_wide(A, A->o), o2 = stx__attn0_wide(A, A->o2);
    stx__attn0_rows p = stx__attn0_rows_of(A);
    if (a->dz && p.z.p) p.dz = A->rows;
    stx__attn0_product(A, stx__attn0_cells(A, A->g, 0, 0), dy, 0, stx__attn0_rows_k(A, A->v, A->j0), 1, A->nb, W, D, 1, 0);
    stx__attn0_product(A, stx__attn0_cells(A, A->g, W, 0), dy, 0, stx__attn0_rows_p(A, A->pv), 1, A->nb, a->N, D, 1, 0);
    STX__RUN_KERNEL(A->x, "stx_attention_bwd", stx__attn0_soft_bwd_kernel, stx__blocks(A->nu * A->nb, 4, (size_t)1 << 30), 4 * STX__WARP, 0, p);
    if (a->dv) stx__attn0_product(A, stx__mat_scratch(A->dv + real * D, D, a->S, a->S * D), stx__attn0_cells(A, A->s, zeros, 0), 1, dy, 0, W - zeros, D, A->nb, 1, 1);
    if (a->dk) stx__attn0_product(A, stx__mat_scratch(A->dk + real * D, D, a->S, a->S * D), stx__attn0_cells(A, A->g, zeros, 0), 1, stx__attn0_rows_q(A, A->q, &A->u), 0,
                                  W - zeros, D, A->nb, a->scale, 1);
    if (p.dz) stx__attn0_columns(A, A->part[STX__S_Z], A->rows, A->nb, 1);
    if (A->size[STX__S_PV]) stx__attn0_product(A, stx__mat_scratch(A->part[STX__S_PV], D, a->N, a->N * D), stx__attn0_cells(A, A->s, W, 0), 1, dy, 0, a->N, D, A->nb, 1, 1);
    if (A->size[STX__S_PK]) stx__attn0_product(A, stx__mat_scratch(A->part[STX__S_PK], D, a->N, a->N * D), stx__attn0_cells(A, A->g, W, 0), 1,
                                               stx__attn0_rows_q(A, A->q, NULL), 0, a->N, D, A->nb, far, 1);
    if (A->size[STX__S_PE]) stx__attn0_product(A, stx__mat_scratch(A->part[STX__S_PE], D, A->np, A->np * D), stx__attn0_cells(A, A->g, 0, 1), 1,
                                               stx__attn0_rows_q(A, A->q, &A->vb), 0, A->np, D, A->nb, a->scale, 1);
    if (a->dq || a->du) stx__attn0_product(A, o, stx__attn0_cells(A, A->g, 0, 0), 0, stx__attn0_rows_k(A, A->k, A->j0), 0, A->nb, D, W, a->scale, 0);
    if (a->P && (a->dq || a->dvb)) stx__attn0_product(A, o2, stx__attn0_cells(A, A->g, 0, 1), 0, stx__attn0_rows_pe(A), 0, A->nb, D, A->np, a->scale, 0);
    if (a->du) stx__attn0_columns(A, A->part[STX__S_U], A->o, A->nb * D, D);
    if (a->dvb && a->P) stx__attn0_columns(A, A->part[STX__S_VB], A->o2, A->nb * D, D);
    if (a->dq) {
        stx__attn0_product(A, o, stx__attn0_cells(A, A->g, W, 0), 0, stx__attn0_rows_p(A, A->pk), 0, A->nb, D, a->N, far, 1);
        stx__attn0_out(A, stx__attn0_rows_q(A, stx__num_of(A->x, a->dq), NULL), A->o, a->P ? A->o2 : NULL, A->nb * D, A->nb, 1);
    }
}
static void stx__attn0_bwd(stx_ctx *x, const stx_attention_args *a) {
    stx_real *const grads[STX__SHARED_SUMS] = {a->dpe, a->du, a->dvb, a->dz, a->dpk, a->dpv};
    stx__attn0 A;
    size_t i0, i;
    stx__attn0_open(&A, x, a, 1);
    if (A.all_bytes && stx_ok(x)) stx__cuda_failed(x, cudaMemsetAsync(A.all[0], 0, A.all_bytes, stx__gpu(x)->stream), "stx_attention_bwd");
    for (A.u0 = 0; A.u0 < a->B * a->H; A.u0 += A.nu) {
        A.nu = STX__MIN(A.units, a->B * a->H - A.u0);
        if (A.parts_bytes && stx_ok(x)) stx__cuda_failed(x, cudaMemsetAsync(A.parts, 0, A.parts_bytes, stx__gpu(x)->stream), "stx_attention_bwd");
        for (i0 = 0; i0 < a->T; i0 += A.nb) {
            stx__attn0_logits(&A, i0);
            stx__attn0_bwd_panel(&A);
        }
        if (a->dk) stx__attn0_out(&A, stx__attn0_rows_k(&A, stx__num_of(x, a->dk), 0), A.dk, NULL, a->S * a->D, a->S, 1);
        if (a->dv) stx__attn0_out(&A, stx__attn0_rows_k(&A, stx__num_of(x, a->dv), 0), A.dv, NULL, a->S * a->D, a->S, 1);
        for (i = 0; i < STX__SHARED_SUMS; i++)
            if (A.size[i]) STX__RUN_KERNEL(x, "stx_attention_bwd", stx__attn0_sum_kernel, stx__blocks(A.copies[i] * A.size[i], 256, 65535), 256, 0, A.all[i], A.part[i], A.size[i],
                                           A.copies[i], A.nu, A.u0);
    }
    for (i = 0; i < STX__SHARED_SUMS; i++) {
        size_t rows = A.size[i] >= a->D && i != STX__S_Z ? A.size[i] / a->D : 1, cols = rows ? A.size[i] / rows : 0, n = A.copies[i] * A.size[i];
        size_t ld = i == STX__S_PE ? A.tables * a->D : cols, st = i == STX__S_PE ? a->D : A.size[i], at = i == STX__S_PE ? A.p0 * ld : 0;
        if (n) STX__RUN_KERNEL(x, "stx_attention_bwd", stx__attn0_add_kernel, stx__blocks(n, 256, 65535), 256, 0, stx__num_of(x, grads[i]), A.all[i],
                               i == STX__S_Z ? a->max_span / a->ramp : 1.0f, A.copies[i], rows, cols, at, st, ld);
    }
}

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
   after the next cp_wait and barrier. ld: bytes from row to row; bytes: of a row's numbers, a multiple of 16. */
template<int CH, int THREADS> static __device__ __forceinline__ void stx__at_load(unsigned char *tile, int n, const void *from, size_t ld, int bytes, int r0, int lo, int hi) {
    int r = (int)threadIdx.x / CH, c = (int)threadIdx.x % CH, k;
    const char *p = (const char *)from + (ptrdiff_t)(r0 + r) * (ptrdiff_t)ld + c * 16;          /* one product; the others are sums */
    #pragma unroll
    for (k = 0; k < n; k += THREADS / CH) {
        int yes = r0 + r + k >= lo && r0 + r + k < hi && c * 16 < bytes;
        if (n % (THREADS / CH) == 0 || r + k < n) stx__cp16(tile + stx__at_piece<CH>(r + k, c), yes ? p : (const char *)from, yes ? 16 : 0);
        p += THREADS / CH * ld;
    }
}

/* FRAGMENTS. 32 bytes of a row are one step of k in either precision: 16 bfloat16s or 8 tf32s, and ldmatrix, which moves units of 4
   bytes, gives the fragments of both.
   a: 16 rows r0.. (r0 % 8 == 0) and step k of a tile, as the left factor: rows r0 + g, r0 + g + 8
   b: the same rows as two right factors of 8 columns each (the tile transposed): b[0..1] for rows r0 .. r0+7, b[2..3] for the next 8
   b2: rows r0 .. r0+7 as a right factor, steps k (b[0..1]) and k + 1
   v: rows r0 .. r0+15 as k, 16 columns 8c.. as two right factors of 8 columns each; bfloat16 only (ldmatrix turns units of 2 bytes) */
template<int CH> static __device__ __forceinline__ void stx__at_frag_a(uint32_t (&a)[4], const unsigned char *tile, int r0, int k, int lane = (int)threadIdx.x & 31) {
    stx__ldmatrix_x4(a, tile + stx__at_piece<CH>(r0 + (lane & 15), 2 * k + (lane >> 4)));
}
template<int CH> static __device__ __forceinline__ void stx__at_frag_b(uint32_t (&b)[4], const unsigned char *tile, int r0, int k, int lane = (int)threadIdx.x & 31) {
    stx__ldmatrix_x4(b, tile + stx__at_piece<CH>(r0 + (lane & 7) + (lane >> 4) * 8, 2 * k + ((lane >> 3) & 1)));
}
template<int CH> static __device__ __forceinline__ void stx__at_frag_b2(uint32_t (&b)[4], const unsigned char *tile, int r0, int k, int lane = (int)threadIdx.x & 31) {
    stx__ldmatrix_x4(b, tile + stx__at_piece<CH>(r0 + (lane & 7), 2 * k + (lane >> 3)));
}
template<int CH> static __device__ __forceinline__ void stx__at_frag_v(uint32_t (&b)[4], const unsigned char *tile, int r0, int c, int lane = (int)threadIdx.x & 31) {
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
static __device__ __forceinline__ stx__at_lanes stx__at_lanes_of(int lane = (int)threadIdx.x & 31) {
    stx__at_lanes l;
    int g = lane >> 2, t = lane & 3, e;
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

/* FORWARD. One block has BQ queries of one head of one batch row, its 4 warps 16 MT rows each; it walks the keys in tiles of BK, from the
   oldest that its head reaches to the youngest that it may see, then the persistent vectors, under one running softmax.

       for each tile:     S  = skew(Qv PE^T)                  BK new columns a tile, see THE SKEW; 0 for persistent vectors
                          S += Q K^T                          summed onto it by the tensor cores
                          x  = S scale log2 e ;  top' = max(top, max x) ;  w = m 2^(x - top')
                          sum = sum 2^(top - top') + sum w ;  O = O 2^(top - top') + (dropped w) V

   A tile of persistent vectors has other scales (keys sqrt(D) pk: in x; values sqrt(N) pv: in w) and q without u: nothing else is different.

   Memory: K and V have two tiles each, the relative table a ring of BQ + 2 BK rows: what the 4 warps' skewed bands meet, BQ + BK, and the
   next BK. While tile s is worked on, tile s + 1 is on its way by cp.async. One barrier a tile is enough: it says that everybody's copies
   of tile s have come (each thread waits for its own before), and that everybody has left tile s - 1, whose room the copies issued right
   after it take. Q stands in registers as fragments, if numbers are bfloat16s; a second query (u or vb is there) and floats stand in shared
   memory, read back by the warp that wrote them, so that a barrier of the warp is enough. One block an entry of the work list: the GPU
   starts blocks in order, so the longest come first, and a multiprocessor takes the next one when it has room.

   A warp passes tiles by that none of its rows sees. Its first tile starts the skew: 16 columns to the left of the tile. Masks are
   applied only where a tile meets an edge of some row's window or the ramp (the test is the same for a whole warp). A row without keys
   has top = -inf, inv = 0 and y = 0, as on the CPU. w may be dropped after it was summed; 1/keep waits until the end. top is the largest
   logit of a key with m > 0, in natural units, inv = 1 / sum m e^(s - top).

   Cost of a tile of 64 queries, 64 keys and D = 64 in bfloat16: 3 x 2 x 64^3 = 1.57 MFLOP against 3 x 8 KiB from L2. With 16 rows a warp
   each of the 4 warps reads K, V and 64 rows of the table once from shared memory, 96 KiB = 768 clocks, more than the tensor cores need
   (~620). With 32 rows (MT = 2) a fragment serves two products: twice the work for 104 KiB. So long spans take 128 queries a block. Tiles
   have 8 KiB whatever D and the precision, which is what sets BK. */
/* Numbers of a warp's rows r0 .. r0+n-1 of queries, plus a bias, into a tile; rows beyond T become zeros */
template<class P, int CH> static __device__ __forceinline__ void stx__at_query(const stx__at &p, unsigned char *tile, int r0, int n, int i0, int b, int h, const stx__num &bias) {
    enum { PER = 16 / P::SIZE };
    const typename P::num *q = (const typename P::num *)p.q + (size_t)b * p.stq + (size_t)h * p.D;
    int i;
    for (i = (int)threadIdx.x & 31; i < n * CH; i += 32) {
        int r = r0 + i / CH, c = i % CH, row = i0 + r, e;
        uint4 v = make_uint4(0, 0, 0, 0);
        if (row < p.T && c * PER < p.D) {
            v = *(const uint4 *)(q + (size_t)row * p.ldq + c * PER);
            if (bias.p) {
                typename P::num x[PER];
                memcpy(x, &v, 16);
                for (e = 0; e < PER; e++) stx__at_store(x + e, stx__at_float(x[e]) + stx__get(bias, (size_t)(h * p.D + c * PER + e)));
                memcpy(&v, x, 16);
            }
        }
        *(uint4 *)(tile + stx__at_piece<CH>(r, c)) = v;
    }
    __syncwarp();
}
/* Words of 4 calls, one in each lane of a quad: afterwards x[l] is what lane l had as x[t] */
static __device__ __forceinline__ void stx__at_swap(uint32_t (&x)[4]) {
    int t = (int)threadIdx.x & 3, e;
    for (e = 0; e < 4; e += 2) {
        uint32_t v = __shfl_xor_sync(STX__ALL, t & 1 ? x[e] : x[e + 1], 1);
        if (t & 1) x[e] = v; else x[e + 1] = v;
    }
    for (e = 0; e < 2; e++) {
        uint32_t v = __shfl_xor_sync(STX__ALL, t & 2 ? x[e] : x[e + 2], 2);
        if (t & 2) x[e] = v; else x[e + 2] = v;
    }
}
/* Which cells of a strip of 16 rows and NB blocks of 8 columns the dropout keeps, as bits: 4 n + e for cell e of block n of an accumulator. The
   4 lanes of a quad share the calls of their two rows. row: of g = 0; at: position of the first column, a multiple of 8. All lanes. */
template<int NB> static __device__ __forceinline__ uint32_t stx__at_kept(const stx__at &p, uint64_t stream, uint64_t row, int at) {
    int lane = (int)threadIdx.x & 31, t = lane & 3, q, l;
    uint32_t kept = 0;
    row += (uint64_t)(lane >> 2);
    #pragma unroll 1
    for (q = 0; q < NB / 2; q++) {
        int c = 4 * q + t;
        uint4 w = stx__at_bits(p, stream, row + (c >= NB ? 8 : 0), at + (c >= NB ? c - NB : c) * 8);
        uint32_t x[4] = {w.x, w.y, w.z, w.w};
        stx__at_swap(x);
        #pragma unroll
        for (l = 0; l < 4; l++) {
            uint32_t two = ((x[l] & 0xffffu) < p.keep) | ((x[l] >> 16) < p.keep) << 1;
            c = 4 * q + l;
            kept |= two << (c >= NB ? (c - NB) * 4 + 2 : c * 4);
        }
    }
    return kept;
}
/* o += w V for one strip of rows; the tile's rows are k. Accumulators of S are, packed, fragments of a left factor: bfloat16s as they stand,
   tf32s if key 2t is taken for k = t and key 2t+1 for k = t+4, by both factors. */
template<class P, int CH, int MT, int NB, int ND> struct stx__at_values {
    static __device__ __forceinline__ void run(float (&o)[MT][ND][4], const float (&w)[MT][NB][4], const unsigned char *tile, int lane) {
        int g = lane >> 2, t = lane & 3, k, n, m;
        #pragma unroll
        for (k = 0; k < NB; k++) {
            #pragma unroll
            for (n = 0; n < ND; n++) {
                uint32_t b0 = *(const uint32_t *)(tile + stx__at_piece<CH>(8 * k + 2 * t, 2 * n + (g >> 2)) + (g & 3) * 4);
                uint32_t b1 = *(const uint32_t *)(tile + stx__at_piece<CH>(8 * k + 2 * t + 1, 2 * n + (g >> 2)) + (g & 3) * 4);
                #pragma unroll
                for (m = 0; m < MT; m++) {
                    uint32_t a[4] = {__float_as_uint(w[m][k][0]), __float_as_uint(w[m][k][2]), __float_as_uint(w[m][k][1]), __float_as_uint(w[m][k][3])};
                    P::mma(o[m][n], a, b0, b1);
                }
            }
        }
    }
};
template<int CH, int MT, int NB, int ND> struct stx__at_values<stx__at_bf16, CH, MT, NB, ND> {
    static __device__ __forceinline__ void run(float (&o)[MT][ND][4], const float (&w)[MT][NB][4], const unsigned char *tile, int lane) {
        int k, n, m;
        #pragma unroll
        for (k = 0; k < NB / 2; k++) {
            uint32_t a[MT][4];
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
                stx__at_frag_v<CH>(b, tile, 16 * k, n, lane);
                #pragma unroll
                for (m = 0; m < MT; m++) {
                    stx__at_bf16::mma(o[m][n], a[m], b[0], b[1]);
                    stx__at_bf16::mma(o[m][n + 1], a[m], b[2], b[3]);
                }
            }
        }
    }
};

/* What a block works on. In shared memory, for registers are scarce. */
typedef struct stx__at_job { stx__at_head w; int b, h, i0, first, windows, steps; } stx__at_job;
/* DP: D filled up; TWO: Q for S stands in shared memory and not in registers (two queries, or floats) */
template<class P, int DP, int BK, int MT, int TWO> struct stx__at_shape {
    enum { CH = DP * P::SIZE / 16, KS = CH / 2, NB = BK / 8, ND = DP / 8, BQ = 64 * MT, ROW = CH * 16, KEYS = BK, TILE = BK * ROW, SIZE = P::SIZE, RING = BQ + 2 * BK, REGS = P::SIZE == 2, THREADS = 128, RAMP = BK + 16 * MT, HEAD = (64 + 16 * RAMP + 127) / 128 * 128 };
    /* The job and each warp's ramp weights; K, V, K, V; the ring; the queries, which may use the second K and V if they move on to registers */
    static size_t shared(int pe, int two) { return HEAD + (size_t)ROW * (4 * BK + (pe ? RING : 0) + (!REGS ? (two ? 2 * BQ : BQ) : TWO ? BQ : 0)); }
    /* blocks that should fit on a multiprocessor: so many registers less may a thread take */
    enum { BLOCKS = MT > 1 || DP > 64 || !REGS ? 2 : 3 };
};
/* Copies of step s, into what step s - 2 had */
template<class X> static __device__ __forceinline__ void stx__at_fwd_load(const stx__at &p, const stx__at_job &job, unsigned char *shared, int s) {
    const int window = s < job.windows, j0 = window ? job.first + s * X::KEYS : (s - job.windows) * X::KEYS - ((p.S + p.span) & 7), bytes = p.D * X::SIZE;
    const size_t o = (window ? (size_t)job.b * p.stk + (size_t)job.h * p.D : (size_t)job.h * p.N * p.D) * X::SIZE, ld = (window ? p.ldk : (size_t)p.D) * X::SIZE;
    const char *k = (const char *)(window ? p.k : p.pk) + o, *v = (const char *)(window ? p.v : p.pv) + o;
    unsigned char *to = shared + (s & 1) * 2 * X::TILE, *ring = shared + 4 * X::TILE;
    stx__at_load<X::CH, X::THREADS>(to, X::KEYS, k, ld, bytes, j0, window ? p.lo : 0, window ? p.S : p.N);
    if (window && p.pe) {
        const char *pe = (const char *)p.pe + (size_t)job.h * p.pe_head * X::SIZE;
        int row = p.P - 1 + p.dmin - p.C + j0 - job.i0, at = (X::BQ + X::KEYS * s) % X::RING;
        if (!s) stx__at_load<X::CH, X::THREADS>(ring, X::BQ, pe, (size_t)p.ldpe * X::SIZE, bytes, row - X::BQ, 0, p.P);
        stx__at_load<X::CH, X::THREADS>(ring + at * X::ROW, X::KEYS, pe, (size_t)p.ldpe * X::SIZE, bytes, row, 0, p.P);
    }
    stx__at_load<X::CH, X::THREADS>(to + X::TILE, X::KEYS, v, ld, bytes, j0, window ? p.lo : 0, window ? p.S : p.N);
    stx__cp_commit();
}
/* v, but the compiler cannot know: what is made of it inside a loop is not worth registers throughout the loop */
static __device__ __forceinline__ int stx__at_again(int v) { asm volatile("" : "+r"(v)); return v; }

/* Entry blockIdx.x / B of the list, batch row blockIdx.x % B */
template<class P, int DP, int BK, int MT, int TWO> static __global__ void __launch_bounds__(128, stx__at_shape<P, DP, BK, MT, TWO>::BLOCKS) stx__at_fwd(stx__at p, const uint32_t *list, int tiles) {
    typedef stx__at_shape<P, DP, BK, MT, TWO> X;
    enum { CH = X::CH, KS = X::KS, NB = X::NB, ND = X::ND, BQ = X::BQ, ROWS = 16 * MT };
    STX__DYNAMIC(memory);
    const stx__at_job &job = *(const stx__at_job *)memory;
    unsigned char *shared = memory + X::HEAD;
    unsigned char *ring = shared + 4 * BK * X::ROW, *qs = X::REGS && !TWO ? shared + 2 * BK * X::ROW : ring + (p.pe ? X::RING * X::ROW : 0);
    unsigned char *qr = X::REGS || !(p.u.p || p.vb.p) ? qs : qs + BQ * X::ROW;
    const int warp = (int)threadIdx.x >> 5, r0 = warp * ROWS;
    const float LOG2E = 1.44269504f, unit = X::REGS ? LOG2E : 1;
    float *ramp = (float *)(memory + 64) + warp * X::RAMP;
    const stx__num none = {NULL, NULL, 0};
    uint32_t kept[MT], qf[MT][X::REGS ? KS : 1][4];
    float o[MT][ND][4], top[MT][2], sum[MT][2];
    stx__at_skew skew[MT];
    int s, m, n, k, e, started = 0;

    if (!threadIdx.x) {
        stx__at_job *j = (stx__at_job *)memory;
        int entry = (int)list[blockIdx.x / (unsigned)p.B], last;
        j->b = (int)(blockIdx.x % (unsigned)p.B);
        j->h = entry / tiles;
        j->i0 = entry % tiles * BQ;
        j->w = stx__at_open(p, j->h);
        stx__at_range(p, j->w, j->i0, BQ, &j->first, &last);
        j->windows = (last - j->first + BK - 1) / BK;
        j->steps = j->windows + (p.N ? (p.N + ((p.S + p.span) & 7) + BK - 1) / BK : 0);
    }
    __syncthreads();
    if (job.steps) stx__at_fwd_load<X>(p, job, shared, 0);
    /* the queries, first those that meet positions */
    if (X::REGS) {
        stx__at_query<P, CH>(p, qs, r0, ROWS, job.i0, job.b, job.h, p.vb);
        #pragma unroll
        for (m = 0; m < MT; m++)
            #pragma unroll
            for (k = 0; k < KS; k++) stx__at_frag_a<CH>(qf[m][X::REGS ? k : 0], qs, r0 + 16 * m, k);
        __syncwarp();
    } else if (qr != qs) {
        stx__at_query<P, CH>(p, qr, r0, ROWS, job.i0, job.b, job.h, p.vb);
    }
    if (TWO) stx__at_query<P, CH>(p, qs, r0, ROWS, job.i0, job.b, job.h, p.u);
    #pragma unroll
    for (m = 0; m < MT; m++) {
        #pragma unroll
        for (n = 0; n < ND; n++) o[m][n][0] = o[m][n][1] = o[m][n][2] = o[m][n][3] = 0;
        top[m][0] = top[m][1] = -INFINITY;
        sum[m][0] = sum[m][1] = 0;
        #pragma unroll
        for (e = 0; e < 2; e++) skew[m].lo[e] = skew[m].hi[e] = skew[m].next[e] = 0;
    }

    for (s = 0; s < job.steps; s++) {
        const int lane = stx__at_again((int)threadIdx.x & 31), g = lane >> 2, t = lane & 3;
        const unsigned char *kt = shared + (s & 1) * 2 * BK * X::ROW, *vt = kt + BK * X::ROW;
        const int window = s < job.windows, j0 = window ? job.first + s * BK : (s - job.windows) * BK - ((p.S + p.span) & 7), iw = job.i0 + r0;
        const int far = p.C + iw + ROWS - 1 - j0, near = p.C + iw - (j0 + BK - 1);          /* the largest and the smallest delta of the warp's rows */
        const float sc = (window ? p.scale : p.scale * sqrtf((float)p.D)) * unit;
        float x[MT][NB][4];
        int edge, ramped;
        stx__cp_wait<0>();
        __syncthreads();
        if (s + 1 < job.steps) stx__at_fwd_load<X>(p, job, shared, s + 1);
        if (TWO && s == job.windows && p.u.p) {                     /* u has no part in the persistent keys' logits */
            __syncwarp();
            stx__at_query<P, CH>(p, qs, r0, ROWS, job.i0, job.b, job.h, none);
        }
        if (iw >= p.T || (window && (near > job.w.live || far < p.dmin))) continue;

        if (p.keep)
            #pragma unroll
            for (m = 0; m < MT; m++) kept[m] = stx__at_kept<NB>(p, p.stream + *p.shift, ((uint64_t)job.b * p.H + job.h) * p.T + iw + 16 * m, (window ? p.span : p.S + p.span) + j0);
        ramped = p.z.p && window && far > job.w.full;
        if (ramped) {                                           /* m by near + e */
            __syncwarp();
            for (e = lane; e < BK + ROWS - 1; e += 32) {
                float f = stx__at_ramp(p, job.w, near + e);
                ramp[e] = f <= 0 ? 0 : f >= 1 ? 1 : f;        /* NaN stays NaN */
            }
            __syncwarp();
        }
        if (window && p.pe) {
            /* By blocks of 8 columns. Strip m of rows needs blocks n = 0 .. NB-1 and, at the start, two to their left. Block 0 of strip 0 is
               row `at` of the ring; strip 1 lies 16 columns further left. So round c serves block c + 2m of strip m: a fragment for both. */
            const int at = (BK / 16 * s + BQ / 16 - MT * warp) % (X::RING / 16) * 16;         /* in this way the compiler sees that it is a multiple of 16 */
            const stx__at_lanes lanes = stx__at_lanes_of(lane);
            int c;
            #pragma unroll
            for (c = -2 * MT; c < NB; c++) {
                float r[MT][4];
                int row = at + 8 * c;
                if (c < 2 - 2 * MT && started) continue;        /* what the tile before left behind is there */
                row += row < 0 ? (int)X::RING : row >= (int)X::RING ? -(int)X::RING : 0;
                #pragma unroll
                for (m = 0; m < MT; m++) r[m][0] = r[m][1] = r[m][2] = r[m][3] = 0;
                #pragma unroll
                for (k = 0; k < KS; k += 2) {
                    uint32_t f[4];
                    stx__at_frag_b2<CH>(f, ring, row, k, lane);
                    #pragma unroll
                    for (m = 0; m < MT; m++) {
                        if (c + 2 * m < -2 || c + 2 * m >= NB) continue;
                        #pragma unroll
                        for (e = 0; e < 2; e++) {
                            if (X::REGS) P::mma(r[m], qf[m][X::REGS ? k + e : 0], f[2 * e], f[2 * e + 1]);
                            else {
                                uint32_t a[4];
                                stx__at_frag_a<CH>(a, qr, r0 + 16 * m, k + e, lane);
                                P::mma(r[m], a, f[2 * e], f[2 * e + 1]);
                            }
                        }
                    }
                }
                #pragma unroll
                for (m = 0; m < MT; m++) {
                    const int n = c + 2 * m;
                    float none[4];
                    if (n < -2 || n >= NB) continue;
                    if (n < 0) stx__at_turn(skew[m], lanes, r[m], none);
                    else stx__at_turn(skew[m], lanes, r[m], x[m][n < 0 ? 0 : n]);
                }
            }
            started = 1;
        } else {
            #pragma unroll
            for (m = 0; m < MT; m++)
                #pragma unroll
                for (n = 0; n < NB; n++) x[m][n][0] = x[m][n][1] = x[m][n][2] = x[m][n][3] = 0;
        }
        #pragma unroll
        for (k = 0; k < KS; k++) {
            uint32_t a[MT][4], f[4];
            #pragma unroll
            for (m = 0; m < MT; m++) {
                if (TWO) stx__at_frag_a<CH>(a[m], qs, r0 + 16 * m, k, lane);
                else for (e = 0; e < 4; e++) a[m][e] = qf[m][X::REGS ? k : 0][e];
            }
            #pragma unroll
            for (n = 0; n < NB; n += 2) {
                stx__at_frag_b<CH>(f, kt, 8 * n, k, lane);
                #pragma unroll
                for (m = 0; m < MT; m++) {
                    P::mma(x[m][n], a[m], f[0], f[1]);
                    P::mma(x[m][n + 1], a[m], f[2], f[3]);
                }
            }
        }

        edge = window ? near < p.dmin || far > job.w.full || j0 < p.lo : j0 < 0 || j0 + BK > p.N;
        #pragma unroll
        for (m = 0; m < MT; m++) {
            const int i = p.C + iw + 16 * m + g;
            #pragma unroll
            for (e = 0; e < 2; e++) {
                float most = -INFINITY, old = top[m][e], from, f, add = 0;
                if (edge) {
                    const int lo = (window ? max(i + 8 * e - job.w.live, p.lo) : 0) - j0 - 2 * t, hi = (window ? i + 8 * e - p.dmin + 1 : p.N) - j0 - 2 * t;
                    #pragma unroll
                    for (n = 0; n < NB; n++) {
                        if (8 * n < lo || 8 * n >= hi) x[m][n][2 * e] = -INFINITY;
                        if (8 * n + 1 < lo || 8 * n + 1 >= hi) x[m][n][2 * e + 1] = -INFINITY;
                    }
                }
                #pragma unroll
                for (n = 0; n < NB; n++) most = fmaxf(most, fmaxf(x[m][n][2 * e], x[m][n][2 * e + 1]));
                most = fmaxf(most, __shfl_xor_sync(STX__ALL, most, 1));
                most = fmaxf(most, __shfl_xor_sync(STX__ALL, most, 2));
                top[m][e] = fmaxf(old, most * sc);
                from = top[m][e] == -INFINITY ? 0 : top[m][e];        /* no key yet: 2^-inf, and not 2^(-inf + inf) */
                f = stx__exp2((old - from) * (LOG2E / unit));
                #pragma unroll
                for (n = 0; n < NB; n++) {
                    x[m][n][2 * e] = stx__exp2(fmaf(x[m][n][2 * e], sc, -from) * (LOG2E / unit));
                    x[m][n][2 * e + 1] = stx__exp2(fmaf(x[m][n][2 * e + 1], sc, -from) * (LOG2E / unit));
                }
                if (ramped) {
                    const float *f0 = ramp + BK - 1 + 16 * m + g + 8 * e - 2 * t;
                    #pragma unroll
                    for (n = 0; n < NB; n++) { x[m][n][2 * e] *= f0[-8 * n]; x[m][n][2 * e + 1] *= f0[-8 * n - 1]; }
                }
                #pragma unroll
                for (n = 0; n < NB; n++) add += x[m][n][2 * e] + x[m][n][2 * e + 1];
                sum[m][e] = fmaf(sum[m][e], f, add);
                #pragma unroll
                for (n = 0; n < ND; n++) { o[m][n][2 * e] *= f; o[m][n][2 * e + 1] *= f; }
            }
            if (p.keep)
                #pragma unroll
                for (n = 0; n < NB; n++) for (e = 0; e < 4; e++) if (!(kept[m] >> (4 * n + e) & 1)) x[m][n][e] = 0;
            if (!window) {
                float f = sqrtf((float)p.N);
                #pragma unroll
                for (n = 0; n < NB; n++) for (e = 0; e < 4; e++) x[m][n][e] *= f;
            }
        }
        stx__at_values<P, CH, MT, NB, ND>::run(o, x, vt, lane);
    }

    #pragma unroll
    for (m = 0; m < MT; m++)
        #pragma unroll
        for (e = 0; e < 2; e++) {
            const int t = (int)threadIdx.x & 3, i = job.i0 + r0 + 16 * m + ((int)threadIdx.x >> 2 & 7) + 8 * e;
            float norm = sum[m][e], f;
            norm += __shfl_xor_sync(STX__ALL, norm, 1);
            norm += __shfl_xor_sync(STX__ALL, norm, 2);
            f = norm == 0 ? 0 : 1 / norm;
            if (i < p.T) {
                typename P::num *y = (typename P::num *)p.y + (((size_t)job.b * p.T + i) * p.H + job.h) * p.D;
                const float of = f * p.unkeep;
                #pragma unroll
                for (n = 0; n < ND; n++) if (8 * n < p.D) stx__at_store2(y + 8 * n + 2 * t, o[m][n][2 * e] * of, o[m][n][2 * e + 1] * of);
                if (!t) {
                    const size_t row = ((size_t)job.b * p.H + job.h) * p.T + i;
                    p.top[row] = X::REGS ? top[m][e] * 0.69314718f : top[m][e];
                    p.inv[row] = f;
                }
            }
        }
}

typedef void (*stx__at_kernel)(stx__at, const uint32_t *, int);
typedef struct stx__at_pick { stx__at_kernel run; size_t shared; int bq, bk, tiles; } stx__at_pick;
template<class P, int DP, int BK, int MT, int TWO> static stx__at_pick stx__at_choice(const stx__at *p, int two) {
    typedef stx__at_shape<P, DP, BK, MT, TWO> X;
    stx__at_pick c = {stx__at_fwd<P, DP, BK, MT, TWO>, X::shared(p->pe != NULL, two), X::BQ, BK, (p->T + X::BQ - 1) / X::BQ};
    return c;
}
template<class P> static stx__at_pick stx__at_choose_float(const stx__at *p, int two) {
    return p->D <= 32 ? stx__at_choice<P, 32, 64, 1, 1>(p, two) : p->D <= 64 ? stx__at_choice<P, 64, 32, 1, 1>(p, two) : stx__at_choice<P, 128, 16, 1, 1>(p, two);
}
/* Two strips a warp where the span is worth a tile of 128 queries and there are blocks enough for all multiprocessors */
static stx__at_pick stx__at_choose(stx_ctx *x, const stx__at *p, int half) {
    const stx_gpu *g = stx__gpu(x);
    int two = p->u.p || p->vb.p, wide = p->span >= 512 && p->T >= 128 && (size_t)p->B * p->H * ((p->T + 127) / 128) >= 2 * (size_t)g->sms;
    if (!half) return g->tf32 ? stx__at_choose_float<stx__at_tf32>(p, two) : stx__at_choose_float<stx__at_f32>(p, two);
#define STX__AT(DP, BK, MT) (two ? stx__at_choice<stx__at_bf16, DP, BK, MT, 1>(p, 1) : stx__at_choice<stx__at_bf16, DP, BK, MT, 0>(p, 0))
    if (p->D <= 32) return wide ? STX__AT(32, 64, 2) : STX__AT(32, 64, 1);
    if (p->D <= 64) return wide ? STX__AT(64, 64, 2) : STX__AT(64, 64, 1);
    return STX__AT(128, 32, 1);
#undef STX__AT
}
/* Can the fused kernels run this call? From the host's knowledge alone. */
static int stx__attn2_can(const stx_ctx *x, const stx_attention_args *a) {
    stx__at p;
    int half;
    return stx__at_make(x, a, &p, &half) && stx__at_choose((stx_ctx *)x, &p, half).shared <= stx__gpu(x)->shared_max &&
           (size_t)p.B * p.H * ((size_t)p.T + 63) / 64 < ((size_t)1 << 31);
}
static size_t stx__attn2_fwd_work(stx_ctx *x, const stx_attention_args *a) { (void)x; return a->H * ((a->T + 63) / 64) * sizeof(uint32_t); }
static void stx__attn2_fwd(stx_ctx *x, const stx_attention_args *a) {
    stx__at p;
    stx__at_pick c;
    int half, n;
    if (!stx_ok(x) || !stx__at_make(x, a, &p, &half)) return;
    c = stx__at_choose(x, &p, half);
    n = p.H * c.tiles;
    if (c.shared > 48 * 1024 && stx__cuda_failed(x, cudaFuncSetAttribute((const void *)c.run, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)c.shared), "stx_attention_fwd")) return;
    STX__RUN_KERNEL(x, "stx_attention_fwd", stx__at_list, stx__blocks((size_t)n, 128, (size_t)1 << 30), 128, 0, p, (uint32_t *)a->work, c.tiles, c.bq, c.bk);
    STX__RUN_KERNEL(x, "stx_attention_fwd", c.run, (unsigned)n * (unsigned)p.B, 128, c.shared, p, (const uint32_t *)a->work, c.tiles);
}

// >>attention: backward -----------------------------------------------------------------------------------------------

static size_t stx__attn2_bwd_work(stx_ctx *x, const stx_attention_args *a) { (void)x; (void)a; return 0; }
static void stx__attn2_bwd(stx_ctx *x, const stx_attention_args *a) { (void)x; (void)a; }

// >>attention: launchers ----------------------------------------------------------------------------------------------

enum { STX__MOST_HEADS = 256 };

/* Version 2 where it can take the call, else version 0: g->attention decides (stx_cuda_attention). top, inv are floats in any case: rows
   of the two passes may come from different versions. */
static int stx__attn_fused(stx_ctx *x, const stx_attention_args *a) {
    int version = stx__gpu(x)->attention;
    return (version == 0 || version == 2) && stx__attn2_can(x, a);
}
static int stx__attn_refused(stx_ctx *x, const stx_attention_args *a, const char *what) {
    if (a->H <= STX__MOST_HEADS) return !stx_ok(x) || !a->B || !a->T || !a->H || !a->D;
    stx_fail(x, STX_ERR_SHAPE, "%s: %zu heads, want at most %d", what, a->H, (int)STX__MOST_HEADS);
    return 1;
}
extern "C" size_t stx_attention_work_cuda(stx_ctx *x, const stx_attention_args *a, int backward) {
    stx__attn0 A;
    if (a->H > STX__MOST_HEADS || !a->B || !a->T || !a->H || !a->D) return 0;
    if (stx__attn_fused(x, a)) return backward ? stx__attn2_bwd_work(x, a) : stx__attn2_fwd_work(x, a);
    memset(&A, 0, sizeof A);
    A.x = x; A.a = a;
    return stx__attn0_layout(&A, backward);
}
extern "C" void stx_attention_fwd_cuda(stx_ctx *x, const stx_attention_args *a) {
    if (stx__attn_refused(x, a, "stx_attention_fwd")) return;
    if (stx__attn_fused(x, a)) stx__attn2_fwd(x, a);
    else stx__attn0_fwd(x, a);
}
extern "C" void stx_attention_bwd_cuda(stx_ctx *x, const stx_attention_args *a) {
    if (stx__attn_refused(x, a, "stx_attention_bwd")) return;
    if (stx__attn_fused(x, a)) stx__attn2_bwd(x, a);
    else stx__attn0_bwd(x, a);
}
extern "C" void stx_cuda_attention(stx_ctx *x, int version) { if (stx__gpu(x)) stx__gpu(x)->attention = version; }

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
