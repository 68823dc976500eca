#pragma once
#include "../api/config.h"
#include "../api/context.h"
#include "../api/ops.h"
#include "../core/platform.h"
#include "../core/context.h"
#include "../core/arena.h"
#include "../core/tensors.h"
#include "../core/tape.h"


// >>matmul

typedef struct stx__matmul_save {
    int ta, tb;
    size_t batch, M, N, K;
    size_t sb;      /* distance between the matrices of b; 0: the batch shares one b */
} stx__matmul_save;

/* Computes the gradient of `a`: d op(A) = dY op(B)^T, transposed if op transposes A. */
static void stx__matmul_back_a(stx_ctx *x, const stx__node *n, stx_real *da, int accumulate) {
    const stx__matmul_save *s = (const stx__matmul_save *)n->save;
    const stx_real *b = n->in[1]->data, *dy = n->y->grad;
    stx_gemm_args g;
    if (s->ta) {
        g = stx_gemm_init(s->tb, 1, s->K, s->M, s->N, b, dy, da);
        g.sa = s->sb;
    } else {
        g = stx_gemm_init(0, !s->tb, s->M, s->K, s->N, dy, b, da);
        g.sb = s->sb;
    }
    g.batch = s->batch;
    g.beta = (stx_real)accumulate;
    STX_RUN(x, stx_gemm, (x, &g));
}

/* Computes the gradient of b: d op(B) = op(A)^T dY, transposed if op transposes B. If
   the batch shares one B, the contributions of the matrices of the batch are added one
   after another. */
static void stx__matmul_back_b(stx_ctx *x, const stx__node *n, stx_real *db, int accumulate) {
    const stx__matmul_save *s = (const stx__matmul_save *)n->save;
    const size_t M = s->M, N = s->N, K = s->K, calls = s->sb ? 1 : s->batch;
    stx_gemm_args g;
    size_t e;
    for (e = 0; e < calls; e++) {
        const stx_real *a = stx_offset_ptr(x, n->in[0]->data, e * M * K);
        const stx_real *dy = stx_offset_ptr(x, n->y->grad, e * M * N);
        g = s->tb ? stx_gemm_init(1, s->ta, N, K, M, dy, a, db)
                  : stx_gemm_init(!s->ta, 0, K, N, M, a, dy, db);
        g.batch = s->sb ? s->batch : 1;
        g.beta = (stx_real)(accumulate || e > 0);
        STX_RUN(x, stx_gemm, (x, &g));
    }
}

static void stx__matmul_back(stx_ctx *x, stx__node *n) {
    int fresh;
    stx_real *d = stx__grad_fresh(x, n->in[0], &fresh);
    if (d) stx__matmul_back_a(x, n, d, !fresh);
    d = stx__grad_fresh(x, n->in[1], &fresh);
    if (d) stx__matmul_back_b(x, n, d, !fresh);
}

/* Fills s with the sizes of op(a) op(b). Returns 0 and sets an error if the shapes do not
   match. */
static int stx__matmul_sizes(stx_ctx *x, const stx_tensor *a, const stx_tensor *b, int ta, int tb,
                             stx__matmul_save *s) {
    char t[96], u[96];
    int i, ok = a->ndim >= 2 && b->ndim >= 2 && (b->ndim == 2 || b->ndim == a->ndim);
    s->ta = ta;
    s->tb = tb;
    s->batch = 1;
    for (i = 0; ok && i < a->ndim - 2; i++) {
        s->batch *= a->dim[i];
        if (b->ndim > 2) ok = a->dim[i] == b->dim[i];
    }
    if (!ok) {
        stx_fail(x, STX_ERR_SHAPE,
                 "stx_matmul: a and b must have two or more dimensions, and equal leading "
                 "dimensions unless b has two dimensions, but a is %s and b is %s",
                 stx__shape(a, t), stx__shape(b, u));
        return 0;
    }

    s->M = a->dim[a->ndim - (ta ? 1 : 2)];
    s->K = a->dim[a->ndim - (ta ? 2 : 1)];
    s->N = b->dim[b->ndim - (tb ? 2 : 1)];
    s->sb = b->ndim == 2 ? 0 : s->K * s->N;
    if (s->K != b->dim[b->ndim - (tb ? 1 : 2)]) {
        stx_fail(x, STX_ERR_SHAPE,
                 "stx_matmul: a and b must have equal inner dimensions, but "
                 "a is %s%s and b is %s%s",
                 stx__shape(a, t), ta ? "^T" : "", stx__shape(b, u), tb ? "^T" : "");
        return 0;
    }
    return 1;
}

STX_DEF stx_tensor *stx_matmul(stx_ctx *x, stx_tensor *a, stx_tensor *b, int ta, int tb) {
    stx__matmul_save s;
    stx_gemm_args g;
    stx_tensor *y;
    stx__node *node;
    size_t dim[STX_MAX_DIM];
    if (!stx_ok(x) || !a || !b || !stx__matmul_sizes(x, a, b, ta, tb, &s)) return NULL;
    memcpy(dim, a->dim, sizeof dim);
    dim[a->ndim - 2] = s.M;
    dim[a->ndim - 1] = s.N;
    y = stx__tensor(x, STX__STEP_ACTIVATIONS, a->ndim, dim);
    if (!y) return NULL;

    g = stx_gemm_init(ta, tb, s.M, s.N, s.K, a->data, b->data, y->data);
    g.batch = s.batch;
    g.sb = s.sb;
    STX_RUN(x, stx_gemm, (x, &g));
    node = stx__record2(x, y, stx__matmul_back, a, b);
    return stx__save(x, node, &s, sizeof s) ? y : NULL;
}
