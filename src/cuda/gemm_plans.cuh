#pragma once
#include "common.cuh"
#include "wait.cuh"


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
