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
            for (int i = 0; i < 4; i++) for (int j = 0; j < 4; j++) c[i][j] += av[i] * bv[j];
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
    for (A->n = STX__MIN(a->T, (size_t)(few ? 32 : 256));; A->n = (A->n + 1) / 2) {
        A->ld = (a->not_causal ? window : STX__MIN(window, a->span + A->n)) + a->N;
        unit = A->n * (A->ld * (backward ? 2 : 1) + 2 * a->D + 1);
        if (A->n <= 32 || unit * sizeof(float) <= budget / 2) break;
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

static int stx__attn2_can(const stx_ctx *x, const stx_attention_args *a) { (void)x; (void)a; return 0; }
static size_t stx__attn2_fwd_work(stx_ctx *x, const stx_attention_args *a) { (void)x; (void)a; return 0; }
static void stx__attn2_fwd(stx_ctx *x, const stx_attention_args *a) { (void)x; (void)a; }

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
