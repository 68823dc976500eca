#pragma once
#include "../api/config.h"
#include "../api/context.h"
#include "../api/ops.h"
#include "../core/loops.h"
#include "../core/maths.h"
#include "../core/platform.h"
#include "../core/context.h"
#include "../core/tensors.h"
#include "../core/tape.h"
#include "../core/sums.h"


// >>add, mul, scale

/* Creates the result of an op, with the shape and precision of `a`. Returns NULL after
   an error or if `a` is NULL. */
static stx_tensor *stx__result_like(stx_ctx *x, const stx_tensor *a) {
    return stx_ok(x) && a ? stx__like(x, a) : NULL;
}

/* Returns whether b has the same shape as `a` or as the last dimensions of `a`. */
static int stx__repeats(const stx_tensor *a, const stx_tensor *b) {
    int i;
    if (b->ndim > a->ndim) return 0;
    for (i = 1; i <= b->ndim; i++)
        if (a->dim[a->ndim - i] != b->dim[b->ndim - i]) return 0;
    return 1;
}

/* Creates the result of stx_add or stx_mul. Returns NULL after an error. */
static stx_tensor *stx__binary_result(stx_ctx *x, const char *op, const stx_tensor *a,
                                      const stx_tensor *b) {
    char s[96], t[96];
    if (!stx_ok(x) || !a || !b) return NULL;
    STX__NEED(x, stx__repeats(a, b), STX_ERR_SHAPE,
              "%s: b must have the shape of a or of its last dimensions, but a is %s and b is %s",
              op, stx__shape(a, s), stx__shape(b, t));
    return stx__like(x, a);
}

static void stx__add_back(stx_ctx *x, stx__node *n) {
    stx_tensor *a = n->in[0], *b = n->in[1];
    if (b->size != n->y->size) {
        stx_real *db = stx__grad(x, b);
        if (db) STX_RUN(x, stx_sum_rows, (x, db, n->y->grad, n->y->size / b->size, b->size));
        stx__grad_dy(x, n, a, 1);
    } else if (a->grad || !a->needs_grad) {
        /* the last call can reuse the buffer of dy for its input's gradient */
        stx__grad_dy(x, n, a, 0);
        stx__grad_dy(x, n, b, 1);
    } else {
        stx__grad_dy(x, n, b, 0);
        stx__grad_dy(x, n, a, 1);
    }
}

STX_DEF stx_tensor *stx_add(stx_ctx *x, stx_tensor *a, stx_tensor *b) {
    stx_tensor *y = stx__binary_result(x, "stx_add", a, b);
    if (!y) return NULL;
    STX_RUN(x, stx_add_fwd, (x, y->data, a->data, b->data, a->size, b->size));
    stx__record2(x, y, stx__add_back, a, b);
    return y;
}

static void stx__mul_back(stx_ctx *x, stx__node *n) {
    stx_mul_bwd_args m;
    int fresh;
    memset(&m, 0, sizeof m);
    m.n = n->y->size;
    m.nb = n->in[1]->size;
    m.a = n->in[0]->data;
    m.b = n->in[1]->data;
    m.dy = n->y->grad;
    m.da = stx__grad_fresh(x, n->in[0], &fresh);
    m.db = stx__grad(x, n->in[1]);
    m.accumulate = !fresh;
    STX_RUN(x, stx_mul_bwd, (x, &m));
}

STX_DEF stx_tensor *stx_mul(stx_ctx *x, stx_tensor *a, stx_tensor *b) {
    stx_tensor *y = stx__binary_result(x, "stx_mul", a, b);
    if (!y) return NULL;
    STX_RUN(x, stx_mul_fwd, (x, y->data, a->data, b->data, a->size, b->size));
    stx__record2(x, y, stx__mul_back, a, b);
    return y;
}

static void stx__scale_back(stx_ctx *x, stx__node *n) {
    const stx_real s = *(const stx_real *)n->save;
    int fresh;
    stx_real *da = stx__grad_fresh(x, n->in[0], &fresh);
    if (da) STX_RUN(x, stx_axpy, (x, da, n->y->grad, n->y->size, s, !fresh));
}

STX_DEF stx_tensor *stx_scale(stx_ctx *x, stx_tensor *a, double s) {
    STX__FP_SCOPE;
    const stx_real factor = (stx_real)s;
    stx_tensor *y = stx__result_like(x, a);
    stx__node *node;
    if (!y) return NULL;
    STX_RUN(x, stx_axpy, (x, y->data, a->data, a->size, factor, 0));
    node = stx__record1(x, y, stx__scale_back, a);
    return stx__save(x, node, &factor, sizeof factor) ? y : NULL;
}

/* The gradients of y = s a are those of ReZero, y = h + alpha f, with alpha = s and
   f = a. */
static void stx__scale_by_back(stx_ctx *x, stx__node *n) {
    stx_rezero_bwd_args r;
    int fresh;
    memset(&r, 0, sizeof r);
    r.n = n->y->size;
    r.f = n->in[0]->data;
    r.alpha = n->in[1]->data;
    r.dy = n->y->grad;
    r.dalpha = stx__grad(x, n->in[1]); /* requested before df, which must accumulate if
                                          `a` is s */
    r.df = stx__grad_fresh(x, n->in[0], &fresh);
    r.accumulate = !fresh;
    STX_RUN(x, stx_rezero_bwd, (x, &r));
}

STX_DEF stx_tensor *stx_scale_by(stx_ctx *x, stx_tensor *a, stx_tensor *s) {
    stx_tensor *y;
    char t[96];
    if (!stx_ok(x) || !a || !s) return NULL;
    STX__NEED(x, s->size == 1, STX_ERR_SHAPE, "stx_scale_by: s: expected one element, got shape %s",
              stx__shape(s, t));
    y = stx__like(x, a);
    if (!y) return NULL;
    STX_RUN(x, stx_rezero_fwd, (x, y->data, NULL, a->data, s->data, y->size));
    stx__record2(x, y, stx__scale_by_back, a, s);
    return y;
}

/* The arguments of y (n) = a (n) op b (nb), where b is repeated n / nb times.
   Multiplication also supports y += a b. */
typedef struct stx__binary_job {
    size_t n, nb;
    stx_real *y;
    const stx_real *a, *b;
    int accumulate;
} stx__binary_job;

/* Runs `elements` over all elements if b is not repeated; otherwise runs `rows` over
   rows of nb elements. */
static void stx__binary(stx_ctx *x, stx_part elements, stx_part rows, const stx__binary_job *j) {
    if (j->n == j->nb)
        stx__for_elements(x, j->n, j->n, elements, j);
    else
        stx_parallel(x, j->n / j->nb, j->n, rows, j);
}

STX_INNER void stx__add_n(stx_real *STX_RESTRICT y, const stx_real *STX_RESTRICT a,
                          const stx_real *STX_RESTRICT b, size_t n) {
    size_t i;
    for (i = 0; i < n; i++) y[i] = a[i] + b[i];
}

STX_INNER void stx__add_loop(int fma, const stx_share *s, const void *job) {
    const stx__binary_job *j = (const stx__binary_job *)job;
    size_t first, n = stx__share_of(s, j->n, &first);
    (void)fma;
    stx__add_n(j->y + first, j->a + first, j->b + first, n);
}

STX_LOOP(stx__add_loop)

STX_INNER void stx__add_rows_loop(int fma, const stx_share *s, const void *job) {
    const stx__binary_job *j = (const stx__binary_job *)job;
    size_t r;
    (void)fma;
    for (r = s->begin; r < s->end; r++)
        stx__add_n(j->y + r * j->nb, j->a + r * j->nb, j->b, j->nb);
}

STX_LOOP(stx__add_rows_loop)

STX_DEF void stx_add_fwd(stx_ctx *x, stx_real *y, const stx_real *a, const stx_real *b, size_t n,
                         size_t nb) {
    stx__binary_job j;
    j.n = n;
    j.nb = nb;
    j.y = y;
    j.a = a;
    j.b = b;
    j.accumulate = 0;
    stx__binary(x, stx__add_loop_run, stx__add_rows_loop_run, &j);
}

STX_INNER void stx__mul_n(int fma, stx_real *STX_RESTRICT y, const stx_real *STX_RESTRICT a,
                          const stx_real *STX_RESTRICT b, size_t n, int accumulate) {
    size_t i;
    if (accumulate)
        for (i = 0; i < n; i++) y[i] = STX_FMA(fma, a[i], b[i], y[i]);
    else
        for (i = 0; i < n; i++) y[i] = a[i] * b[i];
}

STX_INNER void stx__mul_loop(int fma, const stx_share *s, const void *job) {
    const stx__binary_job *j = (const stx__binary_job *)job;
    size_t first, n = stx__share_of(s, j->n, &first);
    stx__mul_n(fma, j->y + first, j->a + first, j->b + first, n, j->accumulate);
}

STX_LOOP(stx__mul_loop)

STX_INNER void stx__mul_rows_loop(int fma, const stx_share *s, const void *job) {
    const stx__binary_job *j = (const stx__binary_job *)job;
    size_t r;
    for (r = s->begin; r < s->end; r++)
        stx__mul_n(fma, j->y + r * j->nb, j->a + r * j->nb, j->b, j->nb, j->accumulate);
}

STX_LOOP(stx__mul_rows_loop)

static void stx__mul(stx_ctx *x, stx_real *y, const stx_real *a, const stx_real *b, size_t n,
                     size_t nb, int accumulate) {
    stx__binary_job j;
    j.n = n;
    j.nb = nb;
    j.y = y;
    j.a = a;
    j.b = b;
    j.accumulate = accumulate;
    stx__binary(x, stx__mul_loop_run, stx__mul_rows_loop_run, &j);
}

STX_DEF void stx_mul_fwd(stx_ctx *x, stx_real *y, const stx_real *a, const stx_real *b, size_t n,
                         size_t nb) {
    stx__mul(x, y, a, b, n, nb, 0);
}

/* y = a b:   da (+)= dy b ; db += sum of dy a over the repetitions of b */
STX_DEF void stx_mul_bwd(stx_ctx *x, const stx_mul_bwd_args *m) {
    if (m->da) stx__mul(x, m->da, m->dy, m->b, m->n, m->nb, m->accumulate);
    if (m->db && m->n == m->nb)
        stx__mul(x, m->db, m->dy, m->a, m->n, m->n, 1);
    else if (m->db)
        stx__sum_rows(x, m->db, m->dy, m->a, m->n / m->nb, m->nb);
}


// >>activations

static void stx__act_back(stx_ctx *x, stx__node *n) {
    stx_act_bwd_args a;
    int fresh;
    memset(&a, 0, sizeof a);
    a.n = n->y->size;
    a.act = *(const int *)n->save;
    a.dy = n->y->grad;
    a.y = n->y->data;
    a.a = n->in[0]->data;
    a.da = stx__grad_reuse(x, n, n->in[0], &fresh);
    a.accumulate = !fresh;
    if (a.da) STX_RUN(x, stx_act_bwd, (x, &a));
}

static stx_tensor *stx__activation(stx_ctx *x, stx_tensor *a, int act) {
    stx_tensor *y = stx__result_like(x, a);
    stx__node *node;
    if (!y) return NULL;
    STX_RUN(x, stx_act_fwd, (x, y->data, a->data, a->size, act));
    node = stx__record1(x, y, stx__act_back, a);
    return stx__save(x, node, &act, sizeof act) ? y : NULL;
}

STX_DEF stx_tensor *stx_relu(stx_ctx *x, stx_tensor *a) {
    return stx__activation(x, a, STX_ACT_RELU);
}

STX_DEF stx_tensor *stx_gelu(stx_ctx *x, stx_tensor *a) {
    return stx__activation(x, a, STX_ACT_GELU);
}

STX_DEF stx_tensor *stx_tanh(stx_ctx *x, stx_tensor *a) {
    return stx__activation(x, a, STX_ACT_TANH);
}

STX_DEF stx_tensor *stx_sigmoid(stx_ctx *x, stx_tensor *a) {
    return stx__activation(x, a, STX_ACT_SIGMOID);
}

typedef struct stx__act_job {
    size_t n;
    stx_real *y;
    const stx_real *a;
    int act;
} stx__act_job;

/* y = act(a). y and `a` may be the same array. Each activation has a separate loop, so
   that the activation is not selected for each element. */
STX_INNER void stx__act_n(int fma, stx_real *y, const stx_real *a, size_t n, int act) {
    size_t i;
    switch (act) {
    case STX_ACT_RELU:
        for (i = 0; i < n; i++) y[i] = stx__act_any(fma, a[i], STX_ACT_RELU);
        break;
    case STX_ACT_GELU:
        for (i = 0; i < n; i++) y[i] = stx__act_any(fma, a[i], STX_ACT_GELU);
        break;
    case STX_ACT_TANH:
        for (i = 0; i < n; i++) y[i] = stx__act_any(fma, a[i], STX_ACT_TANH);
        break;
    case STX_ACT_SIGMOID:
        for (i = 0; i < n; i++) y[i] = stx__act_any(fma, a[i], STX_ACT_SIGMOID);
        break;
    default:
        for (i = 0; i < n; i++) y[i] = a[i];
    }
}

STX_INNER void stx__act_apart(int fma, stx_real *STX_RESTRICT y, const stx_real *STX_RESTRICT a,
                              size_t n, int act) {
    stx__act_n(fma, y, a, n, act);
}

STX_INNER void stx__act_loop(int fma, const stx_share *s, const void *job) {
    const stx__act_job *j = (const stx__act_job *)job;
    size_t first, n = stx__share_of(s, j->n, &first);
    stx_real *y = j->y + first;
    if (j->y == j->a)
        stx__act_n(fma, y, y, n, j->act);
    else
        stx__act_apart(fma, y, j->a + first, n, j->act);
}

STX_LOOP(stx__act_loop)

STX_DEF void stx_act_fwd(stx_ctx *x, stx_real *y, const stx_real *a, size_t n, int act) {
    stx__act_job j;
    j.n = n;
    j.y = y;
    j.a = a;
    j.act = act;
    stx__for_elements(x, n, n, stx__act_loop_run, &j);
}

/* da (+)= dy act'(a), where `act` is a compile-time constant */
STX_INNER void stx__act_bwd_as(int fma, stx_real *da, const stx_real *dy, const stx_real *y,
                               const stx_real *a, size_t n, int act, int accumulate) {
    size_t i;
    if (accumulate)
        for (i = 0; i < n; i++)
            da[i] += stx__act_slope_any(fma, dy[i], y[i], act == STX_ACT_GELU ? a[i] : 0, act);
    else
        for (i = 0; i < n; i++)
            da[i] = stx__act_slope_any(fma, dy[i], y[i], act == STX_ACT_GELU ? a[i] : 0, act);
}

/* Computes da (+)= dy act'(a) for any activation. da and dy may be the same array. */
STX_INNER void stx__act_bwd_n(int fma, stx_real *da, const stx_real *dy, const stx_real *y,
                              const stx_real *a, size_t n, int act, int accumulate) {
    switch (act) {
    case STX_ACT_RELU: stx__act_bwd_as(fma, da, dy, y, a, n, STX_ACT_RELU, accumulate); break;
    case STX_ACT_GELU: stx__act_bwd_as(fma, da, dy, y, a, n, STX_ACT_GELU, accumulate); break;
    case STX_ACT_TANH: stx__act_bwd_as(fma, da, dy, y, a, n, STX_ACT_TANH, accumulate); break;
    case STX_ACT_SIGMOID: stx__act_bwd_as(fma, da, dy, y, a, n, STX_ACT_SIGMOID, accumulate); break;
    default: stx__act_bwd_as(fma, da, dy, y, a, n, STX_ACT_NONE, accumulate);
    }
}

STX_INNER void stx__act_bwd_apart(int fma, stx_real *STX_RESTRICT da,
                                  const stx_real *STX_RESTRICT dy, const stx_real *STX_RESTRICT y,
                                  const stx_real *STX_RESTRICT a, size_t n, int act,
                                  int accumulate) {
    stx__act_bwd_n(fma, da, dy, y, a, n, act, accumulate);
}

STX_INNER void stx__act_bwd_in_place(int fma, stx_real *STX_RESTRICT d,
                                     const stx_real *STX_RESTRICT y,
                                     const stx_real *STX_RESTRICT a, size_t n, int act) {
    stx__act_bwd_n(fma, d, d, y, a, n, act, 0);
}

STX_INNER void stx__act_bwd_loop(int fma, const stx_share *s, const void *job) {
    const stx_act_bwd_args *j = (const stx_act_bwd_args *)job;
    size_t first, n = stx__share_of(s, j->n, &first);
    stx_real *da = j->da + first;
    const stx_real *y = j->y + first, *a = j->a ? j->a + first : NULL;
    if (j->da == j->dy)
        stx__act_bwd_in_place(fma, da, y, a, n, j->act);
    else
        stx__act_bwd_apart(fma, da, j->dy + first, y, a, n, j->act, j->accumulate);
}

STX_LOOP(stx__act_bwd_loop)

STX_DEF void stx_act_bwd(stx_ctx *x, const stx_act_bwd_args *a) {
    stx__for_elements(x, a->n, a->n, stx__act_bwd_loop_run, a);
}
