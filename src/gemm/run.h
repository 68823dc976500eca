#pragma once
#include "../api/config.h"
#include "../api/context.h"
#include "../api/ops.h"
#include "../core/loops.h"
#include "../core/platform.h"
#include "../core/context.h"
#include "../core/arena.h"
#include "micro.h"
#include "blocked.h"
#include "gemv.h"


// >>gemm: paths and plan

/* The code paths of a matmul, in the order in which stx__gemm_choose and
   stx__gemm_plan_of try them. A gain of 1.4 means 1.4 times the speed of BLOCKED,
   unless stated otherwise; the measurements are in docs/speed.md. */
typedef enum stx__gemm_path {
    /* Used if SEQTX_CBLAS is defined, for f32 matmuls with K > 0 and sizes that fit in an
       int, except those with packed weights. An external BLAS computes the matmul, so the
       result may depend on the number of threads. */
    STX__GEMM_CBLAS,

    /* Used if M <= STX__GEMV_ROWS (generation), if K or alpha is 0, or if there is no
       context and therefore no scratch memory. Reads B or its packed copy in place, and
       only once from memory. Computes in f32 even with STX_PREC_BF16. Prefetching makes
       this path 1.4 to 3.3 times as fast. */
    STX__GEMM_GEMV,

    /* GEMV for C = A B (ta = tb = 0) if K >= 2 STX__K_PART_MIN, alpha is not 0, batch = 1
       and there is no epilogue. N is limited, because the partial sums must fit in
       scratch memory. K is split so that each thread reads contiguous memory, and the
       partial sums are added in a fixed order. The number of parts depends only on the
       shape. */
    STX__GEMM_K_SPLIT,

    /* Used for x W^T if x has few rows (generation with several streams). Transposing W
       into strips would take longer than the arithmetic, so W is read in place. In bf16,
       AVX-512 only. Gain: 1.1 to 2.7 with AVX-512. */
    STX__GEMM_SKINNY,

    /* Used if C has few columns: computes the transpose of C; in f32 with tb and up to
       STX__GEMV_ROWS columns, by stx__gemv. Gain: 1.4 to 2.9, and 12 if C has only one
       column. */
    STX__GEMM_TRANSPOSED,

    /* If several parts of C need the same op(B), all threads pack a block of it
       together before they compute. The result is bit-identical to that of BLOCKED.
       Gain: 1.02 to 1.10 if op(B) is read from memory, 1.32 in a batch. */
    STX__GEMM_SHARED_B,

    /* Used for all other matmuls. Each part packs the operands that it needs. */
    STX__GEMM_BLOCKED
} stx__gemm_path;

/* How a matmul is computed and how C is split into parts. */
typedef struct stx__gemm_plan {
    stx__gemm_path path;
    int by_rows;                /* nonzero: parts are rows of C; 0: parts are columns */
    size_t extent;              /* number of rows or columns of C to split */
    size_t per_part;            /* rows or columns per part; K_SPLIT: rows of B per
                                   part */
    size_t parts;               /* number of parts per matrix of the batch */
    const stx__packed *weights; /* GEMV, K_SPLIT: the packed weights that contain B, or NULL */
    size_t weights_at;          /* index of B's first element in the packed weights */
} stx__gemm_plan;

/* STX_WEIGHTS_INT8: the number of adjacent weights of a row that share a scale
   factor. */
enum { STX__INT8_GROUP = 32 };

/* Returns the packed weights that contain all of B. *at receives the index of B's first
   element in the packed weights. Returns NULL if there are none, if the kernels for
   packed weights cannot compute g, or if B begins inside a group of STX__INT8_GROUP
   weights. The matrix itself is then read; stx_params_pack has rounded it to the same
   values. */
static const stx__packed *stx__packed_weights(const stx_ctx *x, const stx_gemm_args *g,
                                              size_t *at) {
    const size_t rows = g->tb ? g->N : g->K, cols = g->tb ? g->K : g->N;
    const stx__packed *w;
    size_t row, col;
    if (!x || !x->packed.count || g->M > STX__GEMV_ROWS) return NULL;
    if (g->ta || !g->K || g->alpha == 0) return NULL;
    if (g->batch > 1 && g->sb) return NULL;
    w = stx__packed_at(x, g->B);
    if (!w || g->ldb != w->C) return NULL;
    *at = (size_t)(g->B - w->from);
    row = *at / w->C;
    col = *at % w->C;
    if (col % STX__INT8_GROUP || col + cols > w->C || row + rows > w->size / w->C) return NULL;
    return w;
}

/* K_SPLIT: the maximum number of parts, and the minimum number of rows of B per part.
   stx__k_split_rows returns the rows per part, or 0 if K_SPLIT cannot be used. */
enum { STX__K_PARTS = 16, STX__K_PART_MIN = 128 };

static size_t stx__k_split_rows(const stx_ctx *x, const stx_gemm_args *g) {
    size_t rows = (g->K + STX__K_PARTS - 1) / STX__K_PARTS;
    if (!x || !x->threads.scratch || g->M > STX__GEMV_ROWS || g->ta || g->tb || g->batch > 1)
        return 0;
    if (g->K < 2 * STX__K_PART_MIN || g->alpha == 0) return 0;
    /* the partial sums must fit in the scratch memory */
    if (g->N > (size_t)STX__SCRATCH / STX__K_PARTS / STX__GEMV_ROWS) return 0;
    return stx__round_up(STX_MAX(rows, (size_t)STX__K_PART_MIN), 4);
}

/* Returns nonzero if SKINNY is the fastest path. The limits were measured. The shorter
   the rows of x are, the larger the share of the time that is spent on adding up lanes.
   In f32, if W fills exactly one strip of AVX-512, transposing W pays off for M > NR. In
   bf16, the limit for M is K / 10, clamped to 6 .. 32 (AVX512-BF16) or 6 .. 14 (AMX). */
static int stx__is_skinny(const stx__micro *mk, const stx_gemm_args *g) {
    const size_t M = g->M, K = g->K;
    if (g->ta || !g->tb || (mk->kr > 1 && !mk->skinny)) return 0;
    if (g->alpha != 1 || (g->beta != 0 && g->beta != 1)) return 0;
    if (mk->kr == 1)
        return K >= 32 && M <= STX_MIN(K / 4, (size_t)112) && (g->N != STX__NR_MAX || M <= g->N);
    return M <= STX_MIN(STX_MAX(K / 10, (size_t)6), mk->kr == 2 ? (size_t)32 : (size_t)14);
}

/* SHARED_B: the minimum number of multiplications per block of k. With fewer, the
   additional barrier costs more time than shared packing saves. */
enum { STX__SHARE_MIN = 24 << 20 };

static int stx__shares_b(const stx__micro *mk, const stx_gemm_args *g, const stx__gemm_plan *p) {
    const size_t k = STX_MIN(g->K, stx__block_k(mk, g->K));
    if (g->batch * p->parts <= 1 || (!p->by_rows && p->parts > 1)) return 0;
    if (g->batch > 1 && g->sb) return 0;
    return g->batch * g->M * g->N * k >= STX__SHARE_MIN;
}

/* Chooses the path for g. `packed` is nonzero if op(B) is available as packed weights. */
static stx__gemm_path stx__gemm_choose(const stx_ctx *x, const stx_gemm_args *g, int packed) {
    const stx__micro *mk = stx__micro_kernel(x);
#ifdef SEQTX_CBLAS
    if (!packed && (!x || x->desc.precision == STX_PREC_F32) && g->K && g->M <= INT_MAX
        && g->N <= INT_MAX && g->K <= INT_MAX && g->lda <= INT_MAX && g->ldb <= INT_MAX
        && g->ldc <= INT_MAX)
        return STX__GEMM_CBLAS;
#endif
    (void)packed;
    if (g->M <= STX__GEMV_ROWS || !g->K || g->alpha == 0 || !x || !x->threads.scratch)
        return STX__GEMM_GEMV;
    if (stx__is_skinny(mk, g)) return STX__GEMM_SKINNY;
    /* at least half of a strip of AVX-512 would be padding, and with four times as many
       rows or more, avoiding that saves more time than the transposition costs */
    if (g->M >= 4 * STX__NR_MAX && 2 * g->N <= STX__NR_MAX) return STX__GEMM_TRANSPOSED;
    return STX__GEMM_BLOCKED;
}

/* Returns the granularity of the parts. Each part begins at a multiple of this number
   of columns or rows of C:
       columns   NR; 4 for SKINNY, whose tiles have at most 4 rows of W; the size of a
                 group for packed weights
       rows      MR if it is at most 8; 4 for MR = 14, because smaller steps make the
                 parts more equal, and the cost of a short tile is proportional to its
                 number of rows; 16 for AMX, because a tile register has 16 rows; NR for
                 TRANSPOSED, because rows of C become columns */
static size_t stx__part_multiple(const stx__micro *mk, const stx__gemm_plan *p) {
    if (p->weights) return STX__INT8_GROUP;
    if (p->path == STX__GEMM_SKINNY) return 4;
    if (!p->by_rows || p->path == STX__GEMM_TRANSPOSED) return mk->nr;
    if (mk->mr > 16) return 16;
    return mk->mr > 8 ? 4 : mk->mr;
}

/* Matmuls with fewer multiplications than this are one part, except with K_SPLIT. */
enum { STX__GEMM_SPLIT_MIN = 100000 };

/* Decides how g is computed. Except with CBLAS, the result does not depend on the number
   of threads. The thread count affects only the choice between SHARED_B and BLOCKED,
   whose results are bit-identical. Otherwise, the path depends on the arguments of the
   whole matmul (shape, ta, tb, batch, alpha, beta), the presence of an epilogue and of
   packed weights, and the precision; in bf16, also on the micro-kernel. In f32, the
   result is therefore the same with every micro-kernel. */
static stx__gemm_plan stx__gemm_plan_of(const stx_ctx *x, const stx_gemm_args *g, int epilogue) {
    const size_t threads = (size_t)stx_threads(x), work = g->M * g->N * g->K;
    const stx__micro *mk = stx__micro_kernel(x);
    stx__gemm_plan p;
    size_t multiple;
    memset(&p, 0, sizeof p);
    p.parts = 1;
    p.weights = stx__packed_weights(x, g, &p.weights_at);
    p.path = stx__gemm_choose(x, g, p.weights != NULL);
    if (p.path == STX__GEMM_CBLAS) return p;
    if (p.path == STX__GEMM_GEMV && !epilogue) {
        p.per_part = stx__k_split_rows(x, g);
        if (p.per_part) {
            p.path = STX__GEMM_K_SPLIT;
            p.parts = (g->K + p.per_part - 1) / p.per_part;
            return p;
        }
    }
    p.by_rows = g->M >= g->N && p.path != STX__GEMM_SKINNY && !p.weights;
    p.extent = p.by_rows ? g->M : g->N;
    multiple = stx__part_multiple(mk, &p);

    /* One part per thread, or up to four per thread if each part still has at least 512
       rows or columns. A batch is divided only into its matrices: if there are fewer
       matrices than threads, some threads idle. */
    if (g->batch == 1 && work >= STX__GEMM_SPLIT_MIN) {
        p.parts = threads * STX_MAX((size_t)1, STX_MIN((size_t)4, p.extent / threads / 512));
        p.parts = STX_MIN(p.parts, (p.extent + multiple - 1) / multiple);
    }
    p.per_part = stx__round_up((p.extent + p.parts - 1) / p.parts, multiple);
    if (p.path == STX__GEMM_BLOCKED && stx__shares_b(mk, g, &p)) p.path = STX__GEMM_SHARED_B;
    return p;
}

/* A matmul and its plan: the job of the parallel loops below. */
typedef struct stx__gemm_job {
    const stx_gemm_args *g;
    const stx__micro *mk;
    const stx__epilogue *epilogue;
    stx__gemm_plan plan;
    stx_real *shared_b;     /* SHARED_B: the current packed block of op(B) */
    size_t shared_col;      /* index in C of the block's first column */
} stx__gemm_job;

/* Returns the scratch memory of a thread, or NULL if there is none. */
static stx_real *stx__scratch(stx_ctx *x, size_t thread) {
    return x && x->threads.scratch ? x->threads.scratch + thread * STX__SCRATCH : NULL;
}

/* *p receives part i of a job, which belongs to matrix i / parts of the batch. *at
   receives the index in the packed weights of the first element of B that the part
   uses. Returns 0 if the part is empty. */
static int stx__gemm_part_of(const stx_share *s, const stx__gemm_job *j, size_t i,
                             stx__gemm_part *p, size_t *at) {
    const stx_gemm_args *g = j->g;
    const size_t e = i / j->plan.parts;
    const size_t begin = i % j->plan.parts * j->plan.per_part;
    const size_t end = STX_MIN(j->plan.extent, begin + j->plan.per_part);
    const size_t row = j->plan.by_rows ? begin : 0, col = j->plan.by_rows ? 0 : begin;
    if (begin >= end) return 0;
    p->x = s->x;
    p->mk = j->mk;
    p->scratch = stx__scratch(s->x, s->thread);
    p->shared_b = j->shared_b;
    p->epilogue = j->epilogue;
    p->offset = j->shared_col + row * g->ldc + col;
    p->col = j->shared_col + col;
    p->g = *g;
    p->g.batch = 1;
    p->g.M = j->plan.by_rows ? end - begin : g->M;
    p->g.N = j->plan.by_rows ? g->N : end - begin;
    p->g.A += e * g->sa + (g->ta ? row : row * g->lda);
    p->g.B += e * g->sb + (g->tb ? col * g->ldb : col);
    p->g.C += e * g->sc + row * g->ldc + col;
    *at = j->plan.weights_at + (g->tb ? col * g->ldb : col);
    return 1;
}

/* Computes g by GEMV. If B is packed, reads the packed weights from index `at`. */
static void stx__gemv_any(stx_ctx *x, const stx__gemm_job *j, const stx_gemm_args *g, size_t at) {
    if (j->plan.weights)
        j->plan.weights->gemv(x, g, j->plan.weights, at);
    else
        STX_CALL(x, stx__gemv, (g));
}

/* Computes parts [begin,end) of C. Applies the epilogue for GEMV and SKINNY; the
   functions for the other paths apply it themselves. */
static void stx__gemm_parts(const stx_share *s, const void *job) {
    const stx__gemm_job *j = (const stx__gemm_job *)job;
    stx__gemm_part p;
    size_t i, at;
    for (i = s->begin; i < s->end; i++) {
        if (!stx__gemm_part_of(s, j, i, &p, &at)) continue;
        switch (j->plan.path) {
        case STX__GEMM_GEMV:
            stx__gemv_any(s->x, j, &p.g, at);
            stx__part_epilogue(&p, 0, 0, p.g.M, p.g.N);
            break;
        case STX__GEMM_SKINNY:
            if (p.mk->skinny)
                p.mk->skinny(&p.g, p.scratch);
            else
                STX_CALL(s->x, stx__skinny_dots, (&p.g));
            stx__part_epilogue(&p, 0, 0, p.g.M, p.g.N);
            break;
        default:
            if (p.mk->enter) p.mk->enter();
            if (j->plan.path == STX__GEMM_TRANSPOSED)
                stx__gemm_transposed(&p);
            else
                stx__gemm_blocked(&p);
            if (p.mk->leave) p.mk->leave();
        }
    }
}

static void stx__gemm_all_parts(stx_ctx *x, const stx__gemm_job *j) {
    const stx_gemm_args *g = j->g;
    const size_t work = g->batch * g->M * g->N * g->K;
    stx_parallel(x, g->batch * j->plan.parts, work, stx__gemm_parts, j);
}

/* K_SPLIT: computes the partial sums of parts [begin,end) of K. All parts are in the
   scratch memory of the first thread, (parts,M,N). */
static void stx__k_split_part(const stx_share *s, const void *job) {
    const stx__gemm_job *j = (const stx__gemm_job *)job;
    size_t i;
    for (i = s->begin; i < s->end; i++) {
        const size_t k = i * j->plan.per_part;
        stx_gemm_args g = *j->g;
        g.K = STX_MIN(j->plan.per_part, g.K - k);
        g.A += k;
        g.B += k * g.ldb;
        g.C = s->x->threads.scratch + i * g.M * g.N;
        g.ldc = g.N;
        g.beta = 0;
        stx__gemv_any(s->x, j, &g, j->plan.weights_at + k * g.ldb);
    }
}

/* K_SPLIT: adds the partial sums to columns [begin,end) of C, part by part. */
static void stx__k_split_sum(const stx_share *s, const void *job) {
    const stx__gemm_job *j = (const stx__gemm_job *)job;
    const size_t M = j->g->M, N = j->g->N, n = s->end - s->begin;
    stx_gemm_args g = *j->g;
    size_t i, r, e;
    g.C += s->begin;
    g.N = n;
    stx__gemm_scale_c(&g);
    for (i = 0; i < M; i++)
        for (r = 0; r < j->plan.parts; r++) {
            const stx_real *sum = s->x->threads.scratch + (r * M + i) * N + s->begin;
            for (e = 0; e < n; e++) g.C[i * g.ldc + e] += sum[e];
        }
}

static void stx__gemm_k_split(stx_ctx *x, const stx__gemm_job *j) {
    const stx_gemm_args *g = j->g;
    stx_parallel(x, j->plan.parts, g->M * g->N * g->K, stx__k_split_part, j);
    stx_parallel(x, g->N, g->M * g->N * j->plan.parts, stx__k_split_sum, j);
}

/* SHARED_B: packs strips [begin,end) of a block of op(B). */
static void stx__shared_b_pack(const stx_share *s, const void *job) {
    const stx__gemm_job *j = (const stx__gemm_job *)job;
    const stx_gemm_args *g = j->g;
    const size_t nr = j->mk->nr, u = stx__unit_elements(j->mk);
    const size_t col = s->begin * nr, n = STX_MIN(g->N, s->end * nr) - col;
    const size_t stride = nr * (stx__round_up(g->K, j->mk->kr) / u);
    stx_real *to = j->shared_b + s->begin * stride;
    size_t i;
    stx__pack_b(j->mk, to, stride, g->B + (g->tb ? col * g->ldb : col), g->ldb, g->tb, g->K, n);
    if (g->alpha == 1 || u == 2) return;
    for (i = 0; i < (s->end - s->begin) * stride; i++) to[i] *= g->alpha;
}

/* SHARED_B: processes op(B) block by block. For each block, all threads first pack it
   into the scratch memory of the first thread and then compute with it. */
static void stx__gemm_shared_b(stx_ctx *x, const stx__gemm_job *job) {
    const stx_gemm_args *g = job->g;
    const stx__micro *mk = job->mk;
    const size_t kc = stx__block_k(mk, g->K), nc = stx__block_n(mk, g->N, g->K);
    stx__gemm_job j = *job;
    stx_gemm_args block = *g;
    size_t p;
    /* only in a batch, where each part is a whole matmul. A block has fewer columns than
       `extent`, so the part becomes all M rows of the block */
    if (!j.plan.by_rows) {
        j.plan.by_rows = 1;
        j.plan.extent = j.plan.per_part = g->M;
    }
    j.g = &block;
    j.shared_b = x->threads.scratch + STX__MC * STX__KC;
    for (j.shared_col = 0; j.shared_col < g->N; j.shared_col += nc)
        for (p = 0; p < g->K; p += kc) {
            block.N = STX_MIN(nc, g->N - j.shared_col);
            block.K = STX_MIN(kc, g->K - p);
            block.A = g->A + (g->ta ? p * g->lda : p);
            block.B = g->B + (g->tb ? j.shared_col * g->ldb + p : p * g->ldb + j.shared_col);
            block.C = g->C + j.shared_col;
            block.beta = p ? 1 : g->beta;
            j.epilogue = p + block.K == g->K ? job->epilogue : NULL;
            stx_parallel(x, (block.N + mk->nr - 1) / mk->nr, block.N * block.K,
                         stx__shared_b_pack, &j);
            stx__gemm_all_parts(x, &j);
        }
}

/* Applies the epilogue to rows [begin,end) of C. */
static void stx__gemm_epilogue_part(const stx_share *s, const void *job) {
    const stx__gemm_job *j = (const stx__gemm_job *)job;
    const stx_gemm_args *g = j->g;
    stx__c_block block;
    block.rows = s->end - s->begin;
    block.cols = g->N;
    block.ldc = g->ldc;
    block.offset = s->begin * g->ldc;
    block.col = 0;
    block.C = g->C + block.offset;
    j->epilogue->run(s->x, j->epilogue->arg, &block);
}

static void stx__gemm_epilogue(stx_ctx *x, const stx__gemm_job *j) {
    if (j->epilogue) stx_parallel(x, j->g->M, j->g->M * j->g->N, stx__gemm_epilogue_part, j);
}

#ifdef SEQTX_CBLAS
static void stx__gemm_cblas(stx_ctx *x, const stx__gemm_job *j) {
    const stx_gemm_args *g = j->g;
    size_t e;
    for (e = 0; e < g->batch; e++)
        stx__cblas_gemm(STX__CBLAS_ROWS, STX__CBLAS_TRANS(g->ta), STX__CBLAS_TRANS(g->tb),
                        (int)g->M, (int)g->N, (int)g->K, g->alpha, g->A + e * g->sa, (int)g->lda,
                        g->B + e * g->sb, (int)g->ldb, g->beta, g->C + e * g->sc, (int)g->ldc);
    stx__gemm_epilogue(x, j);
}
#endif

/* Plans and computes a matmul, or a batch of matmuls with separate C matrices. */
static void stx__gemm_run(stx_ctx *x, stx__gemm_job *j) {
    j->plan = stx__gemm_plan_of(x, j->g, j->epilogue != NULL);
    switch (j->plan.path) {
#ifdef SEQTX_CBLAS
    case STX__GEMM_CBLAS: stx__gemm_cblas(x, j); break;
#endif
    case STX__GEMM_K_SPLIT: stx__gemm_k_split(x, j); break;
    case STX__GEMM_SHARED_B: stx__gemm_shared_b(x, j); break;
    default: stx__gemm_all_parts(x, j);
    }
}

/* Computes the matmul that g describes and, unless `epilogue` is NULL, applies the
   epilogue to C. An epilogue requires batch = 1 or sc = 0, because only the first C would
   be handled correctly. If all matmuls of a batch are added to the same C (sc = 0, for
   weight gradients), they run one after another, so that the number of threads does not
   affect the order of the additions. */
static void stx__gemm_fused(stx_ctx *x, const stx_gemm_args *g, const stx__epilogue *epilogue) {
    stx_gemm_args one = *g;
    stx__gemm_job j;
    size_t e;
    if (!g->batch || !g->M || !g->N) return;
    memset(&j, 0, sizeof j);
    j.mk = stx__micro_kernel(x);
    j.g = g;
    j.epilogue = epilogue;
    if (g->batch == 1 || g->sc) {
        stx__gemm_run(x, &j);
        return;
    }
    one.batch = 1;
    j.g = &one;
    j.epilogue = NULL;
    for (e = 0; e < g->batch; e++, one.A += g->sa, one.B += g->sb, one.beta = 1)
        stx__gemm_run(x, &j);
    j.epilogue = epilogue;
    stx__gemm_epilogue(x, &j);
}

STX_DEF void stx_gemm(stx_ctx *x, const stx_gemm_args *g) {
    stx__gemm_fused(x, g, NULL);
}
