#pragma once
#include "common.cuh"
#include "wait.cuh"
#include "sums.cuh"
#include "gemm_plans.cuh"


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
