#pragma once
#include "common.cuh"
#include "attention_plain.cuh"


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
