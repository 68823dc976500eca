/* test_grad.c - checks the gradients of every op against central differences, and fused
   attention against its plain definition. Compiled with -DSEQTX_DOUBLE. parts[] below has
   one row for each function of the ops, attention and adaptive sections of seqtx.h:
   tests/build/form.sh fails if the header declares one that has no row.

   The output y of an op is projected on a random dy, f = sum dy y. The elements of y
   are never simply summed, because softmax outputs sum to 1, so the loss sum(y) would
   have gradient 0 and hide every mistake. With step h = 1e-5 on values near 1, the
   central difference is off by h^2 f'''/6 ~ 1e-10, and by rounding 2e-16 |f| / h ~
   1e-10. TOL = 1e-6 of the largest entry of the gradient is far above that, and far
   below the effect of a lost term, a wrong sign or a stale index. Terms that are tiny
   by nature (eps) are checked at sizes where they matter. For small inputs, every entry
   is checked; for large ones, some entries and random directions, to which every entry
   contributes. */
#include <stdint.h>
#include "../../seqtx_sru.h"
#include "../../seqtx_compressive.h"
#include "../../seqtx_par.h"
#include "../inner/inner.h"
#include "../test.h"
#include "gemm_check.h"

#ifndef SEQTX_DOUBLE
  #error "compile with -DSEQTX_DOUBLE"
#endif

static const double TOL = 1e-6;
static double fd_step = 1e-5; /* the step h of the differences */
static stx_ctx *ctx1, *ctx3;  /* one thread, three threads */


/* >>harness */
enum { MAX_IN = 16, TICK = 7 };

typedef stx_tensor *(*op_make)(stx_ctx *x, stx_tensor **in, void *user);

/* An op and the inputs it is tested with. */
typedef struct problem {
    const char *label;
    op_make make;
    void *user;
    int n;       /* number of inputs */
    int random;  /* whether `make` draws random numbers */
    int entries; /* the largest number of elements checked per input; 0: 200 */
    size_t dim[MAX_IN][4], size[MAX_IN];
    stx_real *data[MAX_IN];
    int fixed[MAX_IN];  /* nonzero if the input requires no gradient */
    int absent[MAX_IN]; /* nonzero if the input is NULL */
} problem;

static problem start(const char *label, op_make make, void *user) {
    problem p;
    memset(&p, 0, sizeof p);
    p.label = label;
    p.make = make;
    p.user = user;
    return p;
}

/* Adds an input with random values and returns the values. */
static stx_real *add(problem *p, size_t d0, size_t d1, size_t d2, size_t d3) {
    size_t n = d0 * (d1 ? d1 : 1) * (d2 ? d2 : 1) * (d3 ? d3 : 1);
    stx_real *a = random_values(n);
    p->dim[p->n][0] = d0;
    p->dim[p->n][1] = d1;
    p->dim[p->n][2] = d2;
    p->dim[p->n][3] = d3;
    p->size[p->n] = n;
    return p->data[p->n++] = a;
}

static void add_absent(problem *p) {
    p->absent[p->n++] = 1;
}

/* Adds an input, or marks it as absent. */
static stx_real *add_if(problem *p, int present, size_t d0, size_t d1, size_t d2, size_t d3) {
    if (present) return add(p, d0, d1, d2, d3);
    add_absent(p);
    return NULL;
}

/* Nonzero if input k has a gradient. */
static int has_gradient(const problem *p, int k) {
    return !p->absent[k] && !p->fixed[k];
}

/* Adds an input with values that are not close to 0, where relu has a kink. */
static void add_away(problem *p, size_t d0, size_t d1, size_t d2) {
    stx_real *a = add(p, d0, d1, d2, 0);
    size_t i;
    for (i = 0; i < p->size[p->n - 1]; i++) a[i] += a[i] < 0 ? -0.01 : 0.01;
}

static void finish(problem *p) {
    int i;
    for (i = 0; i < p->n; i++) free(p->data[i]);
}

/* Returns input k as a leaf of the current step. */
static stx_tensor *leaf(stx_ctx *x, const problem *p, int k) {
    const size_t *d = p->dim[k];
    if (p->absent[k]) return NULL;
    if (p->fixed[k]) return stx_input(x, p->data[k], d[0], d[1], d[2], d[3]);
    return stx_variable(x, p->data[k], d[0], d[1], d[2], d[3]);
}

/* Runs the op. Resetting the step index makes each call draw the same random numbers. */
static stx_tensor *forward(stx_ctx *x, const problem *p, stx_tensor **in) {
    int i;
    stx_set_step_index(x, TICK);
    stx_begin(x, STX_TRAIN);
    for (i = 0; i < p->n; i++) in[i] = leaf(x, p, i);
    return p->make(x, in, p->user);
}

/* Computes f = sum dy y. */
static double project(const problem *p, const stx_real *dy, size_t ny) {
    stx_tensor *in[MAX_IN], *y = forward(ctx1, p, in);
    double s = 0;
    size_t i;
    if (!y || y->size != ny) return NAN;
    for (i = 0; i < ny; i++) s += dy[i] * y->data[i];
    return s;
}

/* Computes the gradients of all inputs for dy, in context x. With uses = 2, the op is
   called twice, and the gradients are those of y + y'/2, where y' is the result of the
   second call. */
static int gradients(stx_ctx *x, const problem *p, const stx_real *dy, int uses, stx_real **g,
                     stx_real *value) {
    stx_tensor *in[MAX_IN], *y = forward(x, p, in);
    int i;
    if (y && uses == 2) y = stx_add(x, y, stx_scale(x, p->make(x, in, p->user), 0.5));
    if (y && value) stx_get(x, y, value);
    stx_backward_from(x, y, dy);
    if (!stx_ok(x) || !y) return 0;
    for (i = 0; i < p->n; i++) {
        if (!has_gradient(p, i)) continue;
        if (in[i]->grad)
            memcpy(g[i], in[i]->grad, p->size[i] * sizeof **g);
        else
            memset(g[i], 0, p->size[i] * sizeof **g);
    }
    return 1;
}

/* Returns a random index below n. */
static size_t random_index(size_t n) {
    return (size_t)((test_rand() + 1) / 2 * (double)n) % n;
}

/* Returns the error of gradient g of input k in single elements: in all of them, or in
   `limit` random ones. */
static double entries_error(problem *p, int k, const stx_real *g, const stx_real *dy, size_t ny,
                            size_t limit) {
    size_t n = p->size[k], i;
    double worst = 0;
    for (i = 0; i < (n <= limit ? n : limit); i++) {
        size_t at = n <= limit ? i : random_index(n);
        stx_real keep = p->data[k][at];
        double up, down;
        p->data[k][at] = keep + fd_step;
        up = project(p, dy, ny);
        p->data[k][at] = keep - fd_step;
        down = project(p, dy, ny);
        p->data[k][at] = keep;
        raise_worst(&worst, fabs((up - down) / (2 * fd_step) - g[at]));
    }
    return worst;
}

/* Returns the error of gradient g of input k along a random direction. */
static double direction_error(problem *p, int k, const stx_real *g, const stx_real *dy, size_t ny) {
    size_t n = p->size[k], i;
    stx_real *keep = random_values(n), *dir = random_values(n);
    double up, down, slope = 0;
    memcpy(keep, p->data[k], n * sizeof *keep);
    for (i = 0; i < n; i++) {
        p->data[k][i] = keep[i] + fd_step * dir[i];
        slope += g[i] * dir[i];
    }
    up = project(p, dy, ny);
    for (i = 0; i < n; i++) p->data[k][i] = keep[i] - fd_step * dir[i];
    down = project(p, dy, ny);
    memcpy(p->data[k], keep, n * sizeof *keep);
    free(keep);
    free(dir);
    return fabs((up - down) / (2 * fd_step) - slope) / sqrt((double)n);
}

/* Compares gradient g of input k with central differences. */
static void check_differences(problem *p, int k, const stx_real *g, const stx_real *dy, size_t ny) {
    size_t n = p->size[k], i, limit = p->entries ? (size_t)p->entries : 200;
    double top = 1e-3, worst;
    int d;
    for (i = 0; i < n; i++)
        if (!(fabs(g[i]) <= top)) top = fabs(g[i]);
    worst = entries_error(p, k, g, dy, ny, limit) / top;
    CHECK(worst <= TOL, "%s, input %d: an entry is off by %g of the largest", p->label, k, worst);
    for (worst = 0, d = 0; d < (n <= limit ? 1 : 3); d++)
        raise_worst(&worst, direction_error(p, k, g, dy, ny) / top);
    CHECK(worst <= TOL, "%s, input %d: a direction is off by %g", p->label, k, worst);
}

/* The gradients of two uses of the op must add up to 1.5 g. */
static void check_two_uses(problem *p, stx_real **g, stx_real **g2, const stx_real *dy) {
    size_t i;
    int k;
    CHECK(gradients(ctx1, p, dy, 2, g2, NULL), "%s twice: %s", p->label, stx_error(ctx1));
    for (k = 0; k < p->n; k++) {
        if (!has_gradient(p, k)) continue;
        for (i = 0; i < p->size[k]; i++) g2[k][i] /= 1.5;
        CHECK(test_error(g2[k], g[k], p->size[k], 1e-3) <= 1e-12,
              "%s, input %d: the gradients of two uses do not add up", p->label, k);
    }
}

/* Three threads must compute the same value v1 and gradients g. v3 and g3 are scratch. */
static void check_threads(problem *p, stx_real **g, stx_real **g3, const stx_real *dy,
                          const stx_real *v1, stx_real *v3, size_t ny) {
    int k;
    if (!gradients(ctx3, p, dy, 1, g3, v3)) {
        CHECK(0, "%s, three threads: %s", p->label, stx_error(ctx3));
        return;
    }
    CHECK(test_error(v3, v1, ny, 1e-3) <= 1e-13, "%s: three threads change the value", p->label);
    for (k = 0; k < p->n; k++)
        if (has_gradient(p, k))
            CHECK(test_error(g3[k], g[k], p->size[k], 1e-3) <= 1e-12,
                  "%s, input %d: three threads change the gradient", p->label, k);
}

/* Runs all checks of a problem and frees it. */
static void check(problem *p) {
    stx_tensor *in[MAX_IN], *y = forward(ctx1, p, in);
    stx_real *dy, *v1, *v3, *g[MAX_IN] = {0}, *g2[MAX_IN] = {0};
    size_t ny;
    int k;
    CHECK(y && y->needs_grad, "%s: %s", p->label, stx_error(ctx1));
    if (!y) {
        stx_clear_error(ctx1);
        finish(p);
        return;
    }
    ny = y->size;
    dy = random_values(ny);
    v1 = random_values(ny);
    v3 = random_values(ny);
    for (k = 0; k < p->n; k++) {
        g[k] = random_values(p->size[k]);
        g2[k] = random_values(p->size[k]);
    }
    CHECK(gradients(ctx1, p, dy, 1, g, v1), "%s: %s", p->label, stx_error(ctx1));
    for (k = 0; k < p->n; k++)
        if (has_gradient(p, k)) check_differences(p, k, g[k], dy, ny);
    if (!p->random) check_two_uses(p, g, g2, dy);
    check_threads(p, g, g2, dy, v1, v3, ny);
    for (k = 0; k < p->n; k++) {
        free(g[k]);
        free(g2[k]);
    }
    free(dy);
    free(v1);
    free(v3);
    stx_clear_error(ctx1);
    stx_clear_error(ctx3);
    finish(p);
}

/* Returns n random ids below V, with repetitions. If n > 1, the ids include both 0 and
   V - 1. */
static int32_t *ids_of(size_t n, size_t V) {
    int32_t *id = (int32_t *)malloc((n + 1) * sizeof *id);
    size_t i;
    for (i = 0; i < n; i++) id[i] = (int32_t)random_index(V);
    id[0] = 0;
    if (n > 1) id[n - 1] = (int32_t)V - 1;
    return id;
}


/* >>rows: one function per row of parts[] */

typedef struct id_user {
    int32_t *id;
    size_t B, T;
    double divisor;
} id_user;

static stx_tensor *make_embedding(stx_ctx *x, stx_tensor **in, void *user) {
    id_user *u = (id_user *)user;
    return stx_embedding(x, in[0], stx_tokens(x, u->id, u->B, u->T));
}

static void row_embedding(void) {
    static const size_t s[][4] = {{31, 5, 3, 7}, {65, 33, 2, 31}, {2, 1, 1, 9}};
    int i;
    for (i = 0; i < 3; i++) {
        id_user u;
        problem p = start("embedding", make_embedding, &u);
        u.B = s[i][2];
        u.T = s[i][3];
        u.id = ids_of(u.B * u.T, s[i][0]);
        add(&p, s[i][0], s[i][1], 0, 0);
        check(&p);
        free(u.id);
    }
}

static stx_tensor *make_linear(stx_ctx *x, stx_tensor **in, void *user) {
    return stx_linear(x, in[0], in[1], in[2], *(int *)user);
}

/* Checks a linear op with O outputs and an input (d0,d1,d2), or (d0,d1) if d2 is 0. */
static void check_linear(const char *label, int act, int bias, const size_t *d, size_t O,
                         int entries) {
    problem p = start(label, make_linear, &act);
    size_t Ci = d[0], i;
    for (i = 1; i < 3 && d[i]; i++) Ci = d[i];
    p.entries = entries;
    add(&p, d[0], d[1], d[2], 0);
    add(&p, O, Ci, 0, 0);
    add_if(&p, bias, O, 0, 0, 0);
    check(&p);
}

static void row_linear(void) {
    static const size_t small[] = {3, 7, 5}, blocks[] = {2, 33, 31}, row[] = {5, 0, 0},
                        rows[] = {401, 33, 0};
    int act, bias;
    for (act = STX_ACT_NONE; act <= STX_ACT_SIGMOID; act++)
        for (bias = 0; bias < 2; bias++) {
            check_linear("linear (3,7,5)", act, bias, small, 11, 0);
            check_linear("linear (2,33,31)", act, bias, blocks, 65, 20);
        }
    check_linear("linear (5)", STX_ACT_GELU, 1, row, 3, 0);
    check_linear("linear (401,33)", STX_ACT_GELU, 1, rows, 65, 10);
}

typedef struct matmul_user {
    int ta, tb, self;
} matmul_user;

static stx_tensor *make_matmul(stx_ctx *x, stx_tensor **in, void *user) {
    matmul_user *u = (matmul_user *)user;
    return stx_matmul(x, in[0], u->self ? in[0] : in[1], u->ta, u->tb);
}

/* Adds matrices (d0, d1), or (d1, d0) if transposed, with `lead` leading dimensions. */
static void add_matrices(problem *p, int transposed, int lead, size_t d0, size_t d1) {
    size_t r = transposed ? d1 : d0, c = transposed ? d0 : d1;
    if (lead == 0) add(p, r, c, 0, 0);
    if (lead == 1) add(p, 3, r, c, 0);
    if (lead == 2) add(p, 2, 3, r, c);
}

static void matmul_transposed(int ta, int tb) {
    int lead, shared;
    problem p;
    matmul_user u;
    u.ta = ta;
    u.tb = tb;
    u.self = 0;
    for (lead = 0; lead < 3; lead++)
        for (shared = 0; shared < 2; shared++) {
            p = start(shared ? "matmul, shared second" : "matmul", make_matmul, &u);
            add_matrices(&p, ta, lead, 7, 5);
            add_matrices(&p, tb, shared ? 0 : lead, 5, 11);
            check(&p);
        }
    p = start("matmul (2,65,33)", make_matmul, &u);
    p.entries = 20;
    add(&p, 2, ta ? 33 : 65, ta ? 65 : 33, 0);
    add(&p, 2, tb ? 31 : 33, tb ? 33 : 31, 0);
    check(&p);
    u.self = 1;
    p = start("matmul with itself", make_matmul, &u);
    add(&p, 2, 7, 7, 0);
    check(&p);
}

static void row_matmul(void) {
    int ta, tb;
    for (ta = 0; ta < 2; ta++)
        for (tb = 0; tb < 2; tb++) matmul_transposed(ta, tb);
}

/* in: memory (without a gradient), h, W, b. user: not NULL if a second op also uses h
   and W */
static stx_tensor *make_linear_memory(stx_ctx *x, stx_tensor **in, void *user) {
    stx_tensor *X = in[0] ? stx_detach(x, stx_concat(x, in[0], in[1])) : stx_detach(x, in[1]),
               *y = stx_linear_memory(x, X, in[1], in[2], in[3]), *all;
    if (!user) return y;
    all = stx_concat(x, in[0], in[1]);
    return stx_add(x, y, stx_linear(x, all, in[2], NULL, STX_ACT_NONE));
}

static void row_linear_memory(void) {
    int one = 1, k;
    for (k = 0; k < 6; k++) {
        problem p = start("linear_memory", make_linear_memory, k % 3 == 2 ? &one : NULL);
        add(&p, 3, 5, 7, 0);
        add(&p, 3, 4, 7, 0);
        add(&p, 11, 7, 0, 0);
        add_if(&p, k >= 3, 11, 0, 0, 0);
        p.fixed[0] = 1;
        p.fixed[2] = k == 4;
        if (k % 3 == 1) p.absent[0] = 1;
        check(&p);
    }
}

/* in: x, two weights, two biases */
static stx_tensor *make_linear_concat(stx_ctx *x, stx_tensor **in, void *user) {
    (void)user;
    return stx_linear_concat(x, in[0], in + 1, in + 3, 2);
}

static void row_linear_concat(void) {
    int k;
    for (k = 0; k < 4; k++) {
        problem p = start("linear_concat", make_linear_concat, NULL);
        add(&p, 3, 5, 7, 0);
        add(&p, 11, 7, 0, 0);
        add(&p, 4, 7, 0, 0);
        add_if(&p, k & 1, 11, 0, 0, 0);
        add_if(&p, k & 1, 4, 0, 0, 0);
        p.fixed[1] = k == 3;
        check(&p);
    }
}

/* in: memory (B,6,Ci), a second memory (B,4,Ci), then two weights, each followed by its
   bias. */
typedef struct cached_user {
    size_t B;
    int first;   /* number of rows of the first memory; 0: none */
    int second;  /* whether the second memory is used */
    int weights; /* number of weights */
} cached_user;

static stx_tensor *make_linear_cached(stx_ctx *x, stx_tensor **in, void *user) {
    const cached_user *u = (const cached_user *)user;
    stx_tensor *W[2], *b[2];
    stx_cached_rows p[3];
    memset(p, 0, sizeof p);
    if (u->first) {
        p[0].data = in[0]->data + 7 * (6 - (size_t)u->first);
        p[0].rows = (size_t)u->first;
        p[0].stride = 6 * 7;
    }
    if (u->second) {
        p[2].data = in[1]->data;
        p[2].rows = 4;
        p[2].stride = 4 * 7;
    }
    W[0] = in[2];
    W[1] = in[4];
    b[0] = in[3];
    b[1] = in[5];
    return stx_linear_cached(x, p, 3, u->B, W, b, u->weights);
}

static void row_linear_cached(void) {
    static const cached_user u[] = {{3, 6, 0, 1}, {3, 4, 0, 1}, {3, 0, 1, 1}, {3, 5, 1, 1},
                                    {1, 2, 0, 1}, {1, 6, 1, 1}, {3, 5, 1, 2}, {2, 6, 0, 2}};
    size_t k;
    int bias;
    for (k = 0; k < sizeof u / sizeof *u; k++)
        for (bias = 0; bias < 2; bias++) {
            cached_user one = u[k];
            problem p = start("linear_cached", make_linear_cached, &one);
            add(&p, one.B, 6, 7, 0);
            add(&p, one.B, 4, 7, 0);
            p.fixed[0] = p.fixed[1] = 1;
            add(&p, 11, 7, 0, 0);
            add_if(&p, bias, 11, 0, 0, 0);
            add_if(&p, one.weights > 1, 4, 7, 0, 0);
            add_if(&p, one.weights > 1 && bias, 4, 0, 0, 0);
            check(&p);
        }
}

/* in: memory (B,6,Ci), wk, wv. y: the concatenated results of all groups */
static stx_tensor *make_linear_heads(stx_ctx *x, stx_tensor **in, void *user) {
    const stx_head_groups *g = (const stx_head_groups *)user;
    stx_tensor *out[STX_HEAD_GROUPS], *y = NULL;
    stx_cached_rows p;
    size_t i;
    p.data = in[0]->data + 7;
    p.rows = 5;
    p.stride = 6 * 7;
    if (!stx_linear_heads(x, &p, in[0]->dim[0], in[1], in[2], 4, g, out)) return NULL;
    for (i = 0; i < g->count; i++) {
        stx_tensor *t = stx_reshape(x, out[i], 1, out[i]->size, 1, 0);
        y = y ? stx_concat(x, y, t) : t;
    }
    return y;
}

static void row_linear_heads(void) {
    static const unsigned char of[3][4] = {{0, 0, 0, 0}, {1, 0, 0, 1}, {2, 0, 1, 2}};
    size_t k, h;
    for (k = 0; k < 6; k++) {
        stx_head_groups g;
        problem p = start("linear_heads", make_linear_heads, &g);
        memset(&g, 0, sizeof g);
        g.count = 1 + k % 3;
        g.rows[0] = 5;
        g.rows[1] = 3;
        g.rows[2] = 1;
        for (h = 0; h < 4; h++) g.of[h] = of[k % 3][h];
        add(&p, k < 3 ? 3 : 1, 6, 7, 0);
        add(&p, 12, 7, 0, 0);
        add(&p, 12, 7, 0, 0);
        p.fixed[0] = 1;
        p.fixed[1] = k == 4;
        p.fixed[2] = k == 5;
        check(&p);
    }
}

enum { WIDTH = 64, PAST = 8 }; /* sizes in linear_contiguous */

/* Creates three weights and biases, contiguous or separate. Contiguous weights are
   created in the order 0, 1, 2, but draw their values in the order 0, 2, 1, like the
   separate ones. */
static void contiguous_params(stx_params *p, int separate, stx_tensor **w, stx_tensor **b) {
    static const char *const names[] = {"b0", "b1", "b2"};
    int k;
    if (!separate) CHECK(stx_params_make_contiguous(p, 3 * WIDTH * WIDTH), "%s", stx_error(p->ctx));
    w[0] = stx_param(p, STX_NORMAL, 0.1, "w0", WIDTH, WIDTH, 0, 0);
    if (separate) {
        w[2] = stx_param(p, STX_NORMAL, 0.1, "w2", WIDTH, WIDTH, 0, 0);
        w[1] = stx_param(p, STX_NORMAL, 0.1, "w1", WIDTH, WIDTH, 0, 0);
    } else {
        stx_params_rng_offset(p, 1);
        w[1] = stx_param(p, STX_NORMAL, 0.1, "w1", WIDTH, WIDTH, 0, 0);
        stx_params_rng_offset(p, -1);
        w[2] = stx_param(p, STX_NORMAL, 0.1, "w2", WIDTH, WIDTH, 0, 0);
        stx_params_make_contiguous(p, 3 * WIDTH);
    }
    for (k = 0; k < 3; k++) b[k] = stx_param(p, STX_UNIFORM, 1, names[k], WIDTH, 0, 0, 0);
}

/* Nonzero if three weights and three biases are contiguous. */
static int contiguous(stx_real *const *w, stx_real *const *b) {
    return w[1] == w[0] + WIDTH * WIDTH && w[2] == w[1] + WIDTH * WIDTH && b[2] == b[0] + 2 * WIDTH;
}

/* Checks that separate parameters are not contiguous, and that contiguous parameters
   and their gradients are, even after all gradients have been moved into one block. */
static void check_contiguous(stx_params *p, int separate, stx_tensor **w, stx_tensor **b) {
    const char *are = separate ? "contiguous" : "not contiguous";
    stx_real *wd[3], *wg[3], *bd[3], *bg[3];
    int i, k;
    for (k = 0; k < 2; k++) {
        for (i = 0; i < 3; i++) {
            wd[i] = w[i]->data;
            wg[i] = w[i]->grad;
            bd[i] = b[i]->data;
            bg[i] = b[i]->grad;
        }
        CHECK(contiguous(wd, bd) == !separate, "parameters are %s", are);
        CHECK(contiguous(wg, bg) == !separate, "gradients are %s", are);
        if (!k) stx_params_grads(p, NULL);
    }
}

/* Appends n values to out. */
static size_t append(double *out, size_t at, const stx_real *a, size_t n) {
    size_t i;
    for (i = 0; i < n; i++) out[at + i] = (double)a[i];
    return at + n;
}

/* Writes results and gradients to out. Returns the number of results; *all receives the
   total number of values. */
static size_t contiguous_run(int separate, double *out, size_t *all) {
    stx_real v[15 * WIDTH], m[PAST * WIDTH];
    stx_ctx *x;
    stx_desc d = {0};
    stx_params *p;
    stx_tensor *w[3], *b[3], *in, *y[2], *t;
    stx_cached_rows past;
    size_t n = 0, results, i, k;
    for (i = 0; i < 15 * WIDTH; i++) v[i] = (stx_real)sin(i * 1.3);
    for (i = 0; i < PAST * WIDTH; i++) m[i] = (stx_real)cos(i * 0.7);
    d.threads = 1;
    x = stx_create(&d);
    p = stx_params_create(x);
    contiguous_params(p, separate, w, b);
    check_contiguous(p, separate, w, b);

    stx_begin(x, STX_TRAIN);
    in = stx_variable(x, v, 3, 5, WIDTH, 0);
    t = stx_input(x, m, 1, PAST, WIDTH, 0);
    past.data = t->data;
    past.rows = PAST;
    past.stride = PAST * WIDTH;
    y[0] = stx_linear_concat(x, in, w, b, 3);
    y[1] = stx_linear_cached(x, &past, 1, 1, w, b, 3);
    CHECK(stx_ok(x) && y[0]->dim[2] == 3 * WIDTH && y[1]->dim[1] == PAST
              && y[1]->dim[2] == 3 * WIDTH,
          "%s", stx_error(x));
    for (k = 0; k < 2; k++) n = append(out, n, y[k]->data, y[k]->size);
    results = n;
    stx_backward(
        x, stx_add(x, stx_mean(x, stx_mul(x, y[0], y[0])), stx_mean(x, stx_mul(x, y[1], y[1]))));
    n = append(out, n, in->grad, in->size);
    for (k = 0; k < 3; k++) n = append(out, n, w[k]->grad, w[k]->size);
    for (k = 0; k < 3; k++) n = append(out, n, b[k]->grad, b[k]->size);
    *all = n;
    stx_destroy(x);
    return results;
}

/* Contiguous weights must draw the same values as separate ones, and produce
   bit-identical results. The gradients may differ by rounding, because dx is computed
   as one sum or as several. */
static void linear_contiguous(void) {
    static double out[2][15 * 3 * WIDTH + PAST * 3 * WIDTH + 15 * WIDTH + 3 * WIDTH * (WIDTH + 1)];
    double worst = 0;
    size_t results, all, i;
    contiguous_run(0, out[0], &all);
    results = contiguous_run(1, out[1], &all);
    CHECK(!memcmp(out[0], out[1], results * sizeof **out),
          "contiguous and separate weights: results differ");
    for (i = results; i < all; i++) raise_worst(&worst, fabs(out[0][i] - out[1][i]));
    CHECK(worst < 1e-15, "contiguous and separate weights: gradients differ by %g", worst);
}

static void row_linear_concat_all(void) {
    row_linear_concat();
    linear_contiguous();
}

enum { GAPS_B = 3, GAPS_M = 40, GAPS_C = 24, GAPS_MOST = 100 }; /* sizes in cached_gaps */

enum { GAPS_OUT = 2 * GAPS_B * GAPS_M * 2 * GAPS_C + 4 * GAPS_C * GAPS_C };

/* Runs linear_cached and linear_heads on rows with `gap` elements between streams.
   Writes results and gradients to out and returns their number. */
static size_t cached_gap(size_t gap, stx_real *out) {
    enum { B = GAPS_B, M = GAPS_M, C = GAPS_C };

    static stx_real rows[B * (M * C + GAPS_MOST)];
    stx_head_groups groups;
    stx_tensor *w[2], *y[1 + STX_HEAD_GROUPS], *loss = NULL, *t;
    stx_params *p = stx_params_create(ctx1);
    stx_cached_rows past;
    size_t n = 0, b, i, g;
    char name[2][24];
    for (b = 0; b < B; b++)
        for (i = 0; i < M * C; i++)
            rows[b * (M * C + gap) + i] = sin((double)(b * M * C + i) * 0.37);
    past.data = rows;
    past.rows = M;
    past.stride = M * C + gap;
    for (i = 0; i < 2; i++) {
        snprintf(name[i], sizeof name[i], "gap %zu, %zu", gap, i);
        w[i] = stx_param(p, STX_ZEROS, 0, name[i], C, C, 0, 0);
        for (b = 0; b < C * C; b++) w[i]->data[b] = cos((double)(b * (i + 2)) * 0.61);
    }
    memset(&groups, 0, sizeof groups);
    groups.count = 3;
    groups.rows[0] = M;
    groups.rows[1] = 30;
    groups.rows[2] = 4; /* so few rows that they are copied */
    groups.of[1] = 1;
    groups.of[2] = groups.of[3] = 2;

    stx_begin(ctx1, STX_TRAIN);
    y[0] = stx_linear_cached(ctx1, &past, 1, B, w, NULL, 2);
    CHECK(y[0] && stx_linear_heads(ctx1, &past, B, w[0], w[1], 4, &groups, y + 1), "%s",
          stx_error(ctx1));
    for (g = 0; g < 4; g++) {
        for (i = 0; i < y[g]->size; i++) out[n++] = y[g]->data[i];
        t = stx_mean(ctx1, stx_mul(ctx1, y[g], y[g]));
        loss = loss ? stx_add(ctx1, loss, t) : t;
    }
    stx_backward(ctx1, loss);
    for (i = 0; i < 2; i++)
        for (b = 0; b < C * C; b++) out[n++] = w[i]->grad[b];
    return n;
}

/* The distance between streams must not change a bit. Otherwise, a run resumed from a
   checkpoint would differ from an uninterrupted one. */
static void cached_gaps(void) {
    static const size_t gaps[] = {0, 1, 5, 24, GAPS_MOST};
    static stx_real out[2][GAPS_OUT];
    size_t k, n;
    for (k = 0; k < sizeof gaps / sizeof *gaps; k++) {
        n = cached_gap(gaps[k], out[k > 0]);
        CHECK(n <= GAPS_OUT && (!k || !memcmp(out[0], out[1], n * sizeof **out)),
              "a gap of %zu elements between streams changes bits", gaps[k]);
    }
}

static void row_linear_cached_all(void) {
    row_linear_cached();
    cached_gaps();
}

static stx_tensor *make_layernorm(stx_ctx *x, stx_tensor **in, void *user) {
    return stx_layernorm(x, in[0], in[1], in[2], *(double *)user);
}

static void row_layernorm(void) {
    static const size_t s[][3] = {{5, 7, 0},   {3, 31, 0}, {2, 33, 65},
                                  {67, 33, 0}, {3, 16, 0}, {4, 1, 0}};
    double eps;
    int i;
    for (i = 0; i < 6; i++)
        for (eps = 0; eps < 0.5; eps += 0.3) {
            problem p = start("layernorm", make_layernorm, &eps);
            size_t C = s[i][2] ? s[i][2] : s[i][1];
            p.entries = 100;
            /* with C = 1, x - mean is 0 and y is constant */
            if (C == 1 && eps == 0) continue;
            add(&p, s[i][0], s[i][1], s[i][2], 0);
            add(&p, C, 0, 0, 0);
            add(&p, C, 0, 0, 0);
            check(&p);
        }
}

enum { ALONE, GRADIENT_BEFORE, SAME_TENSOR };

/* p: dropout probability. how: SAME_TENSOR if h and f are the same tensor,
   GRADIENT_BEFORE if they already have gradients from another op. */
typedef struct residual_user {
    double p;
    int how;
} residual_user;

/* in: h, f, gain, shift, bias or NULL */
static stx_tensor *make_residual_norm(stx_ctx *x, stx_tensor **in, void *user) {
    residual_user *u = (residual_user *)user;
    stx_tensor *h = in[0], *f = u->how == SAME_TENSOR ? h : in[1], *y;
    if (in[4])
        y = stx_residual_norm_bias(x, h, f, in[4], u->p, in[2], in[3], 0.1);
    else
        y = stx_residual_norm(x, h, f, u->p, in[2], in[3], 0.1);
    return u->how == GRADIENT_BEFORE ? stx_add(x, y, stx_mul(x, h, f)) : y;
}

static void residual_norm(const char *label, int bias) {
    static const size_t s[][3] = {{5, 7, 0}, {2, 33, 65}, {67, 33, 0}, {4, 16, 0}};
    int i, k, fixed;
    for (i = 0; i < 4; i++)
        for (k = 0; k < 6; k++)
            for (fixed = 0; fixed < 4 + bias; fixed++) {
                residual_user u;
                problem p = start(label, make_residual_norm, &u);
                size_t C = s[i][2] ? s[i][2] : s[i][1];
                u.p = k % 2 ? 0.3 : 0;
                u.how = k / 2;
                p.entries = 60;
                p.random = u.p > 0;
                add(&p, s[i][0], s[i][1], s[i][2], 0);
                add(&p, s[i][0], s[i][1], s[i][2], 0);
                add(&p, C, 0, 0, 0);
                add(&p, C, 0, 0, 0);
                add_if(&p, bias, C, 0, 0, 0);
                /* fixed: no gradient of h (1), of f (2), of both (3) or of the bias
                   (4) */
                if (fixed == 3) p.fixed[0] = p.fixed[1] = 1;
                if (fixed == 4) p.fixed[4] = 1;
                if ((fixed == 1 || fixed == 2) && u.how != SAME_TENSOR) p.fixed[fixed - 1] = 1;
                if (u.how == SAME_TENSOR) p.fixed[1] = 1;
                check(&p);
            }
}

static void row_residual_norm(void) {
    residual_norm("residual_norm", 0);
}

static void row_residual_norm_bias(void) {
    residual_norm("residual_norm_bias", 1);
}

static stx_tensor *make_add(stx_ctx *x, stx_tensor **in, void *user) {
    return stx_add(x, in[0], user ? in[0] : in[1]);
}

static stx_tensor *make_mul(stx_ctx *x, stx_tensor **in, void *user) {
    return stx_mul(x, in[0], user ? in[0] : in[1]);
}

/* Tests y = op(a, b) and y = op(a, a). b has the shape of `a` or of the last dimensions
   of `a`. */
static void binary(const char *label, op_make make) {
    static const size_t s[][2][4] = {{{3, 7, 5}, {3, 7, 5}},
                                     {{3, 7, 5}, {7, 5}},
                                     {{3, 7, 5}, {5}},
                                     {{2, 3, 5, 7}, {3, 5, 7}},
                                     {{131, 65}, {65}}};
    int one = 1;
    size_t i;
    problem p;
    for (i = 0; i < sizeof s / sizeof *s; i++) {
        const size_t *a = s[i][0], *b = s[i][1];
        p = start(label, make, NULL);
        p.entries = a[0] == 131 ? 40 : 0;
        add(&p, a[0], a[1], a[2], a[3]);
        add(&p, b[0], b[1], b[2], b[3]);
        check(&p);
    }
    p = start(label, make, &one);
    add(&p, 33, 0, 0, 0);
    check(&p);
}

static void row_add(void) {
    binary("add", make_add);
}

static void row_mul(void) {
    binary("mul", make_mul);
}

static stx_tensor *make_scale(stx_ctx *x, stx_tensor **in, void *user) {
    return stx_scale(x, in[0], *(double *)user);
}

static stx_tensor *make_relu(stx_ctx *x, stx_tensor **in, void *user) {
    (void)user;
    return stx_relu(x, in[0]);
}

static stx_tensor *make_gelu(stx_ctx *x, stx_tensor **in, void *user) {
    (void)user;
    return stx_gelu(x, in[0]);
}

static stx_tensor *make_tanh(stx_ctx *x, stx_tensor **in, void *user) {
    (void)user;
    return stx_tanh(x, in[0]);
}

static stx_tensor *make_sigmoid(stx_ctx *x, stx_tensor **in, void *user) {
    (void)user;
    return stx_sigmoid(x, in[0]);
}

static stx_tensor *make_softmax(stx_ctx *x, stx_tensor **in, void *user) {
    (void)user;
    return stx_softmax(x, in[0]);
}

static stx_tensor *make_mean(stx_ctx *x, stx_tensor **in, void *user) {
    (void)user;
    return stx_mean(x, in[0]);
}

static void unary(const char *label, op_make make, void *user) {
    static const size_t s[][3] = {{5, 33, 0}, {2, 3, 65}, {31, 0, 0}, {4, 1, 0}};
    int i;
    for (i = 0; i < 4; i++) {
        problem p = start(label, make, user);
        add_away(&p, s[i][0], s[i][1], s[i][2]);
        check(&p);
    }
}

static void row_scale(void) {
    double s = -1.7;
    unary("scale", make_scale, &s);
}

static void row_relu(void) {
    unary("relu", make_relu, NULL);
}

static void row_gelu(void) {
    unary("gelu", make_gelu, NULL);
}

static void row_tanh(void) {
    unary("tanh", make_tanh, NULL);
}

static void row_sigmoid(void) {
    unary("sigmoid", make_sigmoid, NULL);
}

static void row_softmax(void) {
    unary("softmax", make_softmax, NULL);
}

static void row_mean(void) {
    unary("mean", make_mean, NULL);
}

static stx_tensor *make_sum(stx_ctx *x, stx_tensor **in, void *user) {
    (void)user;
    return stx_sum(x, in[0]);
}

static stx_tensor *make_log_softmax(stx_ctx *x, stx_tensor **in, void *user) {
    return stx_log_softmax(x, user ? stx_scale(x, in[0], *(double *)user) : in[0]);
}

static void row_sum(void) {
    static const stx_real a[5] = {1, -2, 0.5, 4, -1.25};
    unary("sum", make_sum, NULL);
    stx_begin(ctx1, STX_EVAL);
    CHECK(stx_item(ctx1, stx_sum(ctx1, stx_input(ctx1, a, 5, 0, 0, 0))) == 2.25, "sum: %g",
          stx_item(ctx1, stx_sum(ctx1, stx_input(ctx1, a, 5, 0, 0, 0))));
}

static void row_log_softmax(void) {
    double far = 300;
    stx_real *a = random_values(37);
    stx_tensor *t, *y, *z;
    size_t i;
    unary("log_softmax", make_log_softmax, NULL);
    stx_begin(ctx1, STX_EVAL);
    t = stx_input(ctx1, a, 37, 0, 0, 0);
    y = make_log_softmax(ctx1, &t, NULL);
    z = stx_softmax(ctx1, t);
    for (i = 0; i < 37; i++)
        CHECK(CLOSE(y->data[i], log(z->data[i]), 1e-12), "log_softmax: expected %g, got %g",
              log(z->data[i]), (double)y->data[i]);
    /* log softmax stays finite where softmax underflows to 0 */
    y = make_log_softmax(ctx1, &t, &far);
    for (i = 0; i < 37; i++)
        CHECK(y->data[i] <= 0 && y->data[i] >= -600, "log_softmax of distant logits: %g",
              (double)y->data[i]);
    free(a);
}

static stx_tensor *make_scale_by(stx_ctx *x, stx_tensor **in, void *user) {
    return stx_scale_by(x, in[0], user ? in[0] : in[1]);
}

static void row_scale_by(void) {
    int one = 1, k;
    problem p;
    for (k = 0; k < 3; k++) {
        p = start("scale_by", make_scale_by, NULL);
        add(&p, 3, 7, 5, 0);
        add(&p, 1, 0, 0, 0);
        p.fixed[0] = k == 1;
        p.fixed[1] = k == 2;
        check(&p);
    }
    p = start("scale_by of one tensor", make_scale_by, &one);
    add(&p, 1, 0, 0, 0);
    check(&p);
}

static stx_tensor *make_dropout(stx_ctx *x, stx_tensor **in, void *user) {
    return stx_dropout(x, in[0], *(double *)user);
}

static stx_tensor *make_dropout_replicated(stx_ctx *x, stx_tensor **in, void *user) {
    return stx_dropout_replicated(x, in[0], *(double *)user);
}

/* Without a group, the op must equal stx_dropout. tests/train/test_group.c tests it in a
   group. */
static void row_dropout_replicated(void) {
    double p = 0.3;
    problem q = start("dropout_replicated", make_dropout_replicated, &p);
    stx_real a[77], y[2][77];
    stx_tensor *t;
    size_t i;
    q.random = 1;
    add(&q, 7, 33, 0, 0);
    check(&q);
    for (i = 0; i < 77; i++) a[i] = 1 + (stx_real)i;
    for (i = 0; i < 2; i++) {
        stx_set_step_index(ctx1, TICK);
        stx_begin(ctx1, STX_TRAIN);
        t = stx_input(ctx1, a, 77, 0, 0, 0);
        stx_get(ctx1, i ? stx_dropout_replicated(ctx1, t, p) : stx_dropout(ctx1, t, p), y[i]);
    }
    CHECK(!memcmp(y[0], y[1], sizeof y[0]) && memcmp(y[0], a, sizeof a),
          "dropout_replicated: the mask is not that of stx_dropout");
    stx_begin(ctx1, STX_EVAL);
    t = stx_input(ctx1, a, 77, 0, 0, 0);
    CHECK(stx_dropout_replicated(ctx1, t, p) == t,
          "dropout_replicated: evaluation is not the identity");
}

enum { DROPPED = 100003 };

/* Applies dropout to `a` in context x, at step index `step`. */
static stx_tensor *dropped(stx_ctx *x, const stx_real *a, double p, uint64_t step) {
    stx_set_step_index(x, step);
    stx_begin(x, STX_TRAIN);
    return stx_dropout(x, stx_input(x, a, DROPPED, 0, 0, 0), p);
}

/* Checks the fraction of kept elements, their scale, and the mask in the backward pass.
   y receives the result. */
static void dropout_mask(double p, const stx_real *a, const stx_real *dy, stx_real *y) {
    const double n = DROPPED, keep = floor((1 - p) * 65536 + 0.5) / 65536;
    double kept = 0;
    stx_tensor *t, *out;
    int good = 1;
    size_t i;
    stx_set_step_index(ctx1, TICK);
    stx_begin(ctx1, STX_TRAIN);
    t = stx_variable(ctx1, a, DROPPED, 0, 0, 0);
    out = stx_dropout(ctx1, t, p);
    stx_get(ctx1, out, y);
    for (i = 0; i < DROPPED; i++) {
        if (y[i] == 0) continue;
        kept++;
        if (!CLOSE(y[i], a[i] / keep, 1e-14)) good = 0;
    }
    CHECK(good, "dropout %g: kept elements are not scaled by 1/keep", p);
    CHECK(fabs(kept / n - keep) <= 4.5 * sqrt(keep * (1 - keep) / n),
          "dropout %g: expected a share of %g to be kept, got %g", p, keep, kept / n);
    stx_backward_from(ctx1, out, dy);
    for (i = 0, good = 1; i < DROPPED; i++)
        if (!CLOSE(t->grad[i], y[i] == 0 ? 0 : dy[i] / keep, 1e-14)) good = 0;
    CHECK(good, "dropout %g: backward uses another mask", p);
}

/* The mask must depend on the step and the op, but not on the number of threads. y: the
   result of dropout_mask; again: scratch. */
static void dropout_repeats(double p, const stx_real *a, const stx_real *y, stx_real *again) {
    const size_t bytes = DROPPED * sizeof *y;
    stx_desc d = {0};
    stx_ctx *two;
    stx_tensor *t;
    d.threads = 2;
    two = stx_create(&d);
    stx_get(two, dropped(two, a, p, TICK), again);
    CHECK(!memcmp(again, y, bytes), "dropout %g: two threads draw another mask", p);
    stx_destroy(two);
    stx_get(ctx3, dropped(ctx3, a, p, TICK), again);
    CHECK(!memcmp(again, y, bytes), "dropout %g: three threads draw another mask", p);
    stx_get(ctx1, dropped(ctx1, a, p, TICK + 1), again);
    CHECK(memcmp(again, y, bytes) != 0, "dropout %g: the next step has the same mask", p);
    stx_get(ctx1, dropped(ctx1, a, p, TICK), again);
    CHECK(!memcmp(again, y, bytes), "dropout %g: the same step has another mask", p);
    t = stx_input(ctx1, a, DROPPED, 0, 0, 0);
    stx_get(ctx1, stx_dropout(ctx1, t, p), again);
    CHECK(memcmp(again, y, bytes) != 0, "dropout %g: two ops of a step have one mask", p);
    stx_begin(ctx1, STX_EVAL);
    t = stx_input(ctx1, a, DROPPED, 0, 0, 0);
    stx_get(ctx1, stx_dropout(ctx1, t, p), again);
    CHECK(!memcmp(again, a, bytes), "dropout %g: evaluation is not the identity", p);
}

static void row_dropout(void) {
    static const double rate[] = {0.3, 0.5, 0.9, 1.0 / 65536};
    stx_real *a = random_values(DROPPED), *y = random_values(DROPPED), *dy = random_values(DROPPED),
             *again = random_values(DROPPED);
    size_t i;
    int r;
    for (i = 0; i < DROPPED; i++) a[i] = 1 + (double)i / DROPPED;
    for (r = 0; r < 4; r++) {
        double p = rate[r];
        problem q = start("dropout", make_dropout, &p);
        q.random = 1;
        add(&q, 7, 33, 0, 0);
        check(&q);
        dropout_mask(p, a, dy, y);
        dropout_repeats(p, a, y, again);
    }
    free(a);
    free(y);
    free(dy);
    free(again);
}

static stx_tensor *make_cross_entropy(stx_ctx *x, stx_tensor **in, void *user) {
    id_user *u = (id_user *)user;
    return stx_cross_entropy(x, in[0], stx_tokens(x, u->id, u->B, u->T), u->divisor);
}

static stx_tensor *make_cross_entropy_inplace(stx_ctx *x, stx_tensor **in, void *user) {
    id_user *u = (id_user *)user;
    stx_tensor *logits = stx_scale(x, in[0], 1.5);
    logits = stx_reshape(x, logits, u->B * u->T, in[0]->dim[2], 0, 0);
    return stx_cross_entropy_inplace(x, logits, stx_tokens(x, u->id, u->B, u->T), u->divisor);
}

static void cross_entropy_rows(const char *label, op_make make) {
    static const size_t s[][3] = {{3, 7, 31}, {2, 5, 65}, {1, 1, 2}, {1, 9, 1}};
    int i, k;
    for (i = 0; i < 4; i++)
        for (k = 0; k < 2; k++) {
            id_user u;
            problem p = start(label, make, &u);
            u.B = s[i][0];
            u.T = s[i][1];
            u.divisor = k ? 3.5 : 0;
            u.id = ids_of(u.B * u.T, s[i][2]);
            add(&p, u.B, u.T, s[i][2], 0);
            check(&p);
            free(u.id);
        }
}

static void row_cross_entropy(void) {
    cross_entropy_rows("cross entropy", make_cross_entropy);
}

static void row_cross_entropy_inplace(void) {
    cross_entropy_rows("cross_entropy_inplace", make_cross_entropy_inplace);
}

/* The settings of a token loss: the targets, the weights (or NULL), the options, and
   the clusters of an adaptive softmax. */
typedef struct token_user {
    int32_t *id;
    stx_real *weights;
    size_t B, T;
    stx_token_loss how;
    stx_adaptive a;
} token_user;

/* Options of a token loss. FOREIGN_ID: the ignored id is not the id of a class. */
enum { WEIGHTS = 1, IGNORE = 2, MEAN = 4, DIVISOR = 8, FOREIGN_ID = 16, TOKEN_OPTIONS = 32 };

/* Nonzero if the options can be combined. */
static int combines(int options) {
    return !(options & MEAN && options & DIVISOR) && !(options & FOREIGN_ID && !(options & IGNORE));
}

static stx_tensor *make_cross_entropy_tokens(stx_ctx *x, stx_tensor **in, void *user) {
    token_user *u = (token_user *)user;
    u->how.weights = u->weights ? stx_input(x, u->weights, u->B, u->T, 0, 0) : NULL;
    return stx_cross_entropy_tokens(x, in[0], stx_tokens(x, u->id, u->B, u->T), &u->how);
}

static void token_options(token_user *u, int options, size_t B, size_t T, size_t V) {
    size_t i;
    memset(u, 0, sizeof *u);
    u->B = B;
    u->T = T;
    u->id = ids_of(B * T, V);
    u->weights = options & WEIGHTS ? random_values(B * T) : NULL;
    if (options & WEIGHTS) {
        u->weights[0] = 0;
        /* for a mean, positive weights, because it divides by their sum */
        for (i = 0; i < B * T; i++) u->weights[i] += options & MEAN ? 1.5 : 0;
    }
    u->how.ignore = (options & IGNORE) != 0;
    u->how.ignored_id = options & FOREIGN_ID ? -100 : (int32_t)(V > 1);
    if (options & FOREIGN_ID)
        for (i = 0; i < B * T; i += 3) u->id[i] = -100;
    u->how.mean = (options & MEAN) != 0;
    u->how.divisor = options & DIVISOR ? 7.5 : 0;
}

static int is_ignored(const token_user *u, size_t i) {
    return u->how.ignore && u->id[i] == u->how.ignored_id;
}

/* Returns the loss of N targets with the negative log-likelihoods nll. */
static double token_sum(const token_user *u, const double *nll, size_t N) {
    double sum = 0, weights = 0;
    size_t i;
    for (i = 0; i < N; i++) {
        double w = u->weights ? u->weights[i] : 1;
        if (is_ignored(u, i)) w = 0;
        sum += w * nll[i];
        weights += w;
    }
    if (u->how.mean) return weights != 0 ? sum / weights : 0;
    return sum / (u->how.divisor > 0 ? u->how.divisor : (double)N);
}

static void token_case(const size_t *s, int options) {
    token_user u;
    problem p = start("cross_entropy_tokens", make_cross_entropy_tokens, &u);
    stx_tensor *in[MAX_IN], *y, *lp;
    double *nll;
    size_t n, N = s[0] * s[1], V = s[2];
    token_options(&u, options, s[0], s[1], V);
    nll = (double *)calloc(N, sizeof *nll);
    add(&p, u.B, u.T, V, 0);
    p.entries = 60;
    y = forward(ctx1, &p, in);
    lp = stx_log_softmax(ctx1, in[0]);
    for (n = 0; n < N && y; n++) {
        nll[n] = is_ignored(&u, n) ? 0 : -lp->data[n * V + (size_t)u.id[n]];
        CHECK(CLOSE(u.how.nll->data[n], nll[n], 1e-13),
              "options %d: nll of row %zu: expected %g, got %g", options, n, nll[n],
              (double)u.how.nll->data[n]);
    }
    CHECK(y && y->size == 1 && u.how.nll->size == N && !u.how.nll->needs_grad
              && CLOSE(y->data[0], token_sum(&u, nll, N), 1e-13),
          "options %d: expected a loss of %g, got %g: %s", options, token_sum(&u, nll, N),
          y ? y->data[0] : 0, stx_error(ctx1));
    check(&p);
    free(nll);
    free(u.id);
    free(u.weights);
}

/* If every row is ignored, the loss and its gradient must be 0. */
static void tokens_all_ignored(void) {
    stx_token_loss how;
    stx_real a[6] = {1, 2, 3, 4, 5, 6};
    int32_t id[2] = {2, 2};
    stx_tensor *y, *t;
    memset(&how, 0, sizeof how);
    how.ignore = 1;
    how.ignored_id = 2;
    how.mean = 1;
    stx_begin(ctx1, STX_TRAIN);
    t = stx_variable(ctx1, a, 1, 2, 3, 0);
    y = stx_cross_entropy_tokens(ctx1, t, stx_tokens(ctx1, id, 1, 2), &how);
    stx_backward(ctx1, y);
    CHECK(stx_ok(ctx1) && y->data[0] == 0 && t->grad && t->grad[0] == 0 && t->grad[5] == 0,
          "all rows ignored: a loss of %g %s", (double)y->data[0], stx_error(ctx1));
}

static void row_cross_entropy_tokens(void) {
    static const size_t s[4][3] = {{3, 5, 7}, {1, 1, 1}, {2, 33, 31}, {7, 3, 65}};
    int i, options;
    for (i = 0; i < 4; i++)
        for (options = 0; options < TOKEN_OPTIONS; options++)
            if (combines(options) && !(i == 1 && options & (IGNORE | FOREIGN_ID)))
                token_case(s[i], options);
    tokens_all_ignored();
}

static stx_tensor *make_mse(stx_ctx *x, stx_tensor **in, void *user) {
    return stx_mse(x, in[0], user ? stx_tanh(x, in[0]) : in[1]);
}

static void row_mse(void) {
    int one = 1, k;
    problem p = start("mse", make_mse, NULL);
    add(&p, 3, 31, 0, 0);
    add(&p, 3, 31, 0, 0);
    check(&p);
    for (k = 1; k >= 0; k--) {
        p = start("mse with one gradient", make_mse, NULL);
        add(&p, 33, 0, 0, 0);
        add(&p, 33, 0, 0, 0);
        p.fixed[k] = 1;
        check(&p);
    }
    p = start("mse of one tensor", make_mse, &one);
    add(&p, 33, 0, 0, 0);
    check(&p);
}

/* Adds the means of `count` tensors to in[0]. If `count` is greater than 4, tensors are
   repeated, and in[0] itself is one of them. */
static stx_tensor *make_add_means(stx_ctx *x, stx_tensor **in, void *user) {
    stx_tensor *a[19];
    int count = *(int *)user, k;
    for (k = 0; k < count; k++) a[k] = in[k % 4];
    return stx_add_means(x, in[0], a, (size_t)count, -1.7);
}

static void row_add_means(void) {
    static const int counts[] = {0, 1, 3, 4, 8, 9, 19};
    size_t i;
    for (i = 0; i < sizeof counts / sizeof *counts; i++) {
        int count = counts[i];
        problem p = start("add_means", make_add_means, &count);
        add(&p, 1, 0, 0, 0);
        add(&p, 7, 0, 0, 0);
        add(&p, 3, 11, 0, 0);
        add(&p, 2, 0, 0, 0);
        p.fixed[1] = i == 4;
        check(&p);
    }
}

static stx_tensor *make_concat(stx_ctx *x, stx_tensor **in, void *user) {
    return stx_concat(x, in[0], user ? in[0] : in[1]);
}

static stx_tensor *make_concat_channels(stx_ctx *x, stx_tensor **in, void *user) {
    return stx_concat_channels(x, in[0], user ? in[0] : in[1]);
}

static void row_concat(void) {
    int one = 1;
    problem p = start("concat", make_concat, NULL);
    add(&p, 3, 7, 5, 0);
    add(&p, 3, 11, 5, 0);
    check(&p);
    p = start("concat with itself", make_concat, &one);
    add(&p, 2, 1, 33, 0);
    check(&p);
}

static void row_concat_channels(void) {
    int one = 1;
    problem p = start("concat_channels", make_concat_channels, NULL);
    add(&p, 3, 7, 5, 0);
    add(&p, 3, 7, 11, 0);
    check(&p);
    p = start("concat_channels (N,C)", make_concat_channels, NULL);
    add(&p, 31, 2, 0, 0);
    add(&p, 31, 1, 0, 0);
    check(&p);
    p = start("concat_channels with itself", make_concat_channels, &one);
    add(&p, 2, 3, 5, 0);
    check(&p);
}

static stx_tensor *make_slice(stx_ctx *x, stx_tensor **in, void *user) {
    size_t *t = (size_t *)user;
    return stx_slice(x, in[0], t[0], t[1]);
}

static void row_slice(void) {
    static size_t t[][2] = {{0, 31}, {0, 1}, {30, 31}, {7, 19}};
    int i;
    for (i = 0; i < 4; i++) {
        problem p = start("slice", make_slice, t[i]);
        add(&p, 3, 31, 2, 0);
        check(&p);
    }
}

static stx_tensor *make_slice_channels(stx_ctx *x, stx_tensor **in, void *user) {
    size_t *t = (size_t *)user;
    return stx_slice_channels(x, in[0], t[0], t[1]);
}

/* Slices of a concatenation must equal its parts. */
static void slices_of_concat(void) {
    stx_real *a = random_values(6 * 5), *b = random_values(6 * 7);
    stx_tensor *both, *y;
    stx_begin(ctx1, STX_EVAL);
    both = stx_concat_channels(ctx1, stx_input(ctx1, a, 2, 3, 5, 0),
                               stx_input(ctx1, b, 2, 3, 7, 0));
    y = stx_slice_channels(ctx1, both, 0, 5);
    CHECK(y && y->ndim == 3 && y->dim[0] == 2 && y->dim[1] == 3 && y->dim[2] == 5
              && !memcmp(y->data, a, 30 * sizeof *a),
          "slice_channels: the first part");
    y = stx_slice_channels(ctx1, both, 5, 12);
    CHECK(y && !memcmp(y->data, b, 42 * sizeof *b), "slice_channels: the second part");
    free(a);
    free(b);
}

static void row_slice_channels(void) {
    static size_t c[][2] = {{0, 33}, {0, 1}, {32, 33}, {7, 19}};
    problem p;
    int i;
    for (i = 0; i < 4; i++) {
        p = start("slice_channels", make_slice_channels, c[i]);
        add(&p, 3, 5, 33, 0);
        check(&p);
    }
    p = start("slice_channels (C)", make_slice_channels, c[3]);
    add(&p, 31, 0, 0, 0);
    check(&p);
    p = start("slice_channels of four dimensions", make_slice_channels, c[1]);
    add(&p, 2, 3, 5, 7);
    check(&p);
    slices_of_concat();
}

/* in: a weight, and the input x of a linear op that uses some of the weight's rows, or
   NULL. user: the range of these rows. */
static stx_tensor *make_view_rows(stx_ctx *x, stx_tensor **in, void *user) {
    size_t *t = (size_t *)user;
    stx_tensor *y = stx_view_rows(x, in[0], t[0], t[1]);
    return in[1] ? stx_linear(x, in[1], y, NULL, STX_ACT_TANH) : y;
}

static void row_view_rows(void) {
    static size_t r[][2] = {{0, 11}, {0, 1}, {10, 11}, {3, 9}};
    stx_real *a;
    stx_tensor *t, *y;
    int i;
    for (i = 0; i < 8; i++) {
        problem p = start("view_rows", make_view_rows, r[i % 4]);
        add(&p, 11, 7, 0, 0);
        add_if(&p, i >= 4, 3, 5, 7, 0);
        check(&p);
    }
    a = random_values(77);
    stx_begin(ctx1, STX_EVAL);
    t = stx_input(ctx1, a, 11, 7, 0, 0);
    y = stx_view_rows(ctx1, t, 3, 9);
    CHECK(y && y->ndim == 2 && y->dim[0] == 6 && y->dim[1] == 7 && y->size == 42
              && y->data == t->data + 21,
          "view_rows: the view does not share memory");
    free(a);
}

static stx_tensor *make_gather(stx_ctx *x, stx_tensor **in, void *user) {
    id_user *u = (id_user *)user;
    return stx_gather(x, in[0], u->id, u->T);
}

static void row_gather(void) {
    id_user u;
    problem p = start("gather", make_gather, &u);
    u.T = 31;
    u.id = ids_of(u.T, 21);
    add(&p, 3, 7, 5, 0);
    check(&p);
    free(u.id);
}

static stx_tensor *make_reshape(stx_ctx *x, stx_tensor **in, void *user) {
    (void)user;
    return stx_mul(x, stx_reshape(x, in[0], 5, 21, 0, 0), stx_reshape(x, in[0], 5, 21, 0, 0));
}

static void row_reshape(void) {
    problem p = start("reshape", make_reshape, NULL);
    add(&p, 3, 7, 5, 0);
    check(&p);
    p = start("reshape", make_reshape, NULL);
    add(&p, 105, 0, 0, 0);
    check(&p);
}

static void row_detach(void) {
    stx_real *a = random_values(33), *dy = random_values(33);
    stx_tensor *t, *d, *y;
    int i, good = 1;
    stx_begin(ctx1, STX_TRAIN);
    t = stx_variable(ctx1, a, 33, 0, 0, 0);
    d = stx_detach(ctx1, t);
    CHECK(d && !d->needs_grad && !memcmp(d->data, a, 33 * sizeof *a), "detach changes the value");
    y = stx_mul(ctx1, d, t);
    stx_backward_from(ctx1, y, dy);
    /* without detach, the gradient would be 2 dy a */
    for (i = 0; i < 33; i++)
        if (!CLOSE(t->grad[i], dy[i] * a[i], 1e-15)) good = 0;
    CHECK(good, "a gradient passes through detach");
    stx_begin(ctx1, STX_TRAIN);
    t = stx_variable(ctx1, a, 33, 0, 0, 0);
    y = stx_add(ctx1, stx_scale(ctx1, stx_tanh(ctx1, stx_detach(ctx1, t)), 2), t);
    stx_backward_from(ctx1, y, dy);
    CHECK(stx_ok(ctx1) && !memcmp(t->grad, dy, 33 * sizeof *a),
          "a gradient passes through detach and a chain of ops");
    stx_begin(ctx1, STX_TRAIN);
    t = stx_variable(ctx1, a, 33, 0, 0, 0);
    y = stx_mean(ctx1, stx_detach(ctx1, t));
    stx_backward(ctx1, y);
    CHECK(!stx_ok(ctx1) && !t->grad, "backward without any gradient gives no error");
    stx_clear_error(ctx1);
    free(a);
    free(dy);
}


/* >>recompute: values and gradients must be bit-identical to those without
   recomputation */
typedef struct block_user {
    stx_params *p;
    int nested, what;
} block_user;

static stx_tensor *inner_block(stx_ctx *x, void *user, stx_tensor **in, stx_tensor **out) {
    block_user *u = (block_user *)user;
    stx_tensor *h;
    (void)out;
    h = stx_linear(x, in[0], stx_params_find(u->p, "w1"), stx_params_find(u->p, "b1"),
                   STX_ACT_GELU);
    return stx_linear(x, stx_dropout(x, h, 0.25), stx_params_find(u->p, "w2"), NULL, STX_ACT_NONE);
}

static stx_tensor *outer_block(stx_ctx *x, void *user, stx_tensor **in, stx_tensor **out) {
    block_user *u = (block_user *)user;
    stx_attention_in ai;
    stx_attention_desc ad;
    stx_tensor *h, *ff;
    (void)out;
    memset(&ai, 0, sizeof ai);
    memset(&ad, 0, sizeof ad);
    ai.q = in[0];
    ai.k = ai.v = stx_dropout(x, in[0], 0.1);
    ai.pe = stx_params_find(u->p, "pe");
    ad.heads = 2;
    ad.dropout = 0.2;
    h = stx_add(x, stx_attention(x, &ai, &ad), in[1]);
    ff = u->nested ? stx_recompute(x, inner_block, u, &h, 1, NULL, 0) : inner_block(x, u, &h, NULL);
    return stx_dropout(x, stx_tanh(x, ff), 0.15);
}

static stx_tensor *identity_block(stx_ctx *x, void *user, stx_tensor **in, stx_tensor **out) {
    (void)x;
    (void)user;
    (void)out;
    return in[0];
}

static stx_tensor *outside_block(stx_ctx *x, void *user, stx_tensor **in, stx_tensor **out) {
    (void)out;
    return stx_mul(x, in[0], (stx_tensor *)user);
}

static stx_tensor *constant_block(stx_ctx *x, void *user, stx_tensor **in, stx_tensor **out) {
    (void)user;
    (void)out;
    return stx_scale(x, stx_detach(x, in[0]), 2);
}

/* Runs two steps of three layers. mode: 0 without recomputation, 1 with recomputation,
   2 with nested recomputation. */
static void recompute_run(int mode, size_t chunk, stx_real *out, stx_real *grads) {
    stx_desc d = {0};
    stx_ctx *x;
    stx_params *p;
    stx_tensor *in[2], *y, *W;
    block_user u;
    stx_real *a, *b, *dy;
    size_t i, n = 0, k;
    int layer, step;
    d.chunk_bytes = chunk;
    d.threads = 2;
    d.seed = 5;
    x = stx_create(&d);
    p = stx_params_create(x);
    stx_param(p, STX_NORMAL, 0.4, "w1", 13, 6, 0, 0);
    stx_param(p, STX_NORMAL, 0.4, "b1", 13, 0, 0, 0);
    stx_param(p, STX_NORMAL, 0.4, "w2", 6, 13, 0, 0);
    stx_param(p, STX_NORMAL, 0.4, "pe", 9, 3, 0, 0);
    W = stx_param(p, STX_NORMAL, 0.4, "w", 6, 6, 0, 0);
    u.p = p;
    u.nested = mode == 2;
    u.what = 0;
    test_state = 99;
    a = random_values(2 * 31 * 6);
    b = random_values(2 * 31 * 6);
    dy = random_values(2 * 31 * 6);
    for (step = 0; step < 2; step++) {
        stx_begin(x, STX_TRAIN);
        in[0] = stx_variable(x, a, 2, 31, 6, 0);
        in[1] = stx_variable(x, b, 2, 31, 6, 0);
        y = stx_linear(x, in[0], W, NULL, STX_ACT_NONE);
        for (layer = 0; layer < 3; layer++) {
            stx_tensor *both[2];
            both[0] = y;
            both[1] = in[1];
            if (mode)
                y = stx_recompute(x, outer_block, &u, both, 2, NULL, 0);
            else
                y = outer_block(x, &u, both, NULL);
        }
        y = stx_dropout(x, y, 0.1);
        CHECK(y != NULL, "recompute mode %d: %s", mode, stx_error(x));
        if (!y) break;
        stx_get(x, y, out);
        stx_backward_from(x, y, dy);
        CHECK(stx_ok(x), "recompute mode %d: %s", mode, stx_error(x));
    }
    for (k = 0; k < 2 && y; k++)
        for (i = 0; i < in[k]->size; i++) grads[n++] = in[k]->grad[i];
    for (k = 0; k < p->count && y; k++)
        for (i = 0; i < p->tensor[k]->size; i++) grads[n++] = p->tensor[k]->grad[i];
    stx_destroy(x);
    free(a);
    free(b);
    free(dy);
}


/* >>recompute outer: every op on a tensor that is not among the inputs of the
   recomputed function. Either the gradient must be right, or the error must say what to
   do; no gradient may be lost. */
enum { OUTER_OPS = 44 };

typedef struct outer_user {
    stx_params *p;
    stx_tensor *outer;
    int op, listed; /* listed: whether the outer tensor is in[1] */
} outer_user;

/* Operands of an op: the outer tensor o (2,3,4), h of the same shape, and parameters. */
typedef struct outer_operands {
    stx_tensor *o, *h, *g, *s, *W, *alpha;
} outer_operands;

static void double_bwd(stx_ctx *x, stx_tensor *y, stx_tensor *const *in, void *save) {
    int fresh;
    stx_real *d = stx_grad(x, in[0], &fresh);
    (void)save;
    if (d) stx_axpy(x, d, y->grad, y->size, 2, !fresh);
}

static stx_tensor *outer_elementwise(stx_ctx *x, int op, const outer_operands *t) {
    stx_tensor *o = t->o, *h = t->h, *g = t->g, *s = t->s, *row;
    switch (op) {
    case 0: return stx_add(x, o, h);
    case 1: return stx_add(x, h, o);
    case 2: return stx_add(x, o, o);
    case 3: return stx_add(x, o, g);
    case 4:
        row = stx_slice(x, stx_reshape(x, o, 1, 6, 4, 0), 0, 1);
        return stx_add(x, h, stx_reshape(x, row, 4, 0, 0, 0));
    case 5: return stx_residual_norm(x, o, h, 0, g, s, 0);
    case 6: return stx_residual_norm(x, h, o, 0, g, s, 0);
    case 7: return stx_residual_norm(x, o, o, 0, g, s, 0);
    case 8: return stx_residual_norm(x, o, h, 0.25, g, s, 0);
    case 9: return stx_residual_norm(x, h, o, 0.25, g, s, 0);
    case 10: return stx_rezero(x, o, h, t->alpha);
    case 11: return stx_rezero(x, h, o, t->alpha);
    case 12: return stx_mul(x, o, h);
    case 13: return stx_mul(x, h, o);
    case 14: return stx_scale(x, o, 1.5);
    case 15: return stx_reshape(x, o, 6, 4, 0, 0);
    case 16: return stx_relu(x, o);
    case 17: return stx_gelu(x, o);
    case 18: return stx_tanh(x, o);
    case 19: return stx_sigmoid(x, o);
    case 20: return stx_softmax(x, o);
    case 21: return stx_dropout(x, o, 0.25);
    case 22: return stx_dropout_variational(x, o, 0.25);
    default: return NULL;
    }
}

static stx_tensor *outer_attention(stx_ctx *x, stx_tensor *q, stx_tensor *k, stx_tensor *v) {
    stx_attention_in in;
    stx_attention_desc d;
    memset(&in, 0, sizeof in);
    memset(&d, 0, sizeof d);
    d.heads = 2;
    in.q = q;
    in.k = k;
    in.v = v;
    return stx_attention(x, &in, &d);
}

/* Applies an op that this test defines: y = 2 o. */
static stx_tensor *outer_double(stx_ctx *x, stx_tensor *o) {
    stx_tensor *y = stx_new(x, 2, 3, 4, 0);
    if (!y) return NULL;
    stx_axpy(x, y->data, o->data, y->size, 2, 0);
    (void)stx_record(x, y, &o, 1, double_bwd, NULL); /* returns 0 if nothing is recorded */
    return y;
}

/* Applies op number u->op to the outer tensor. All parameters already have gradients. */
static stx_tensor *outer_op(stx_ctx *x, void *user, stx_tensor **in, stx_tensor **out) {
    static const int32_t rows[6] = {3, 0, 3, 5, 1, 2}, class_[6] = {3, 0, 3, 1, 2, 2};
    outer_user *u = (outer_user *)user;
    stx_tensor *o = u->listed ? in[1] : u->outer, *h = in[0];
    stx_ids *ids = stx_tokens(x, rows, 2, 3), *classes = stx_tokens(x, class_, 2, 3);
    outer_operands t;
    (void)out;
    t.o = o;
    t.h = h;
    t.g = stx_params_find(u->p, "g");
    t.s = stx_params_find(u->p, "s");
    t.W = stx_params_find(u->p, "W");
    t.alpha = stx_params_find(u->p, "alpha");
    switch (u->op) {
    case 23: return stx_concat(x, o, h);
    case 24: return stx_concat(x, h, o);
    case 25: return stx_concat_channels(x, o, h);
    case 26: return stx_concat_channels(x, h, o);
    case 27: return stx_slice(x, o, 1, 3);
    case 28: return stx_gather(x, o, rows, 4);
    case 29: return stx_layernorm(x, o, t.g, t.s, 0);
    case 30: return stx_linear(x, o, t.W, t.s, STX_ACT_TANH);
    case 31: return stx_matmul(x, o, h, 0, 1);
    case 32: return stx_matmul(x, h, o, 0, 1);
    case 33: return stx_mean(x, o);
    case 34: return stx_mse(x, o, h);
    case 35: return stx_mse(x, h, o);
    case 36: return stx_cross_entropy(x, o, classes, 0);
    case 37: return stx_cross_entropy_inplace(x, stx_scale(x, o, 2), classes, 0);
    case 38: return stx_cross_entropy_inplace(x, stx_reshape(x, o, 6, 4, 0, 0), classes, 0);
    case 39: return outer_attention(x, o, h, h);
    case 40: return outer_attention(x, h, o, h);
    case 41: return stx_linear_memory(x, stx_detach(x, o), o, t.W, NULL);
    case 42: return stx_embedding(x, stx_reshape(x, o, 6, 4, 0, 0), ids);
    case 43: return outer_double(x, o);
    default: return outer_elementwise(x, u->op, &t);
    }
}

/* How the op is run. In the last mode, the outer tensor is listed as an input of the
   recomputed function, but the function accesses it directly; by then the tensor has a
   gradient. */
enum { PLAIN, OUTSIDE, LISTED, LISTED_UNREAD };

static int outer_run(int op, int mode, stx_real *y, stx_real *grads) {
    stx_ctx *x = stx_create(NULL);
    outer_user u;
    stx_tensor *a, *h, *in[2], *out;
    stx_real n[24], m[24], dy[48];
    int i, code;
    size_t size = 0;
    test_state = 99;
    for (i = 0; i < 24; i++) {
        n[i] = (stx_real)test_rand();
        m[i] = (stx_real)test_rand();
    }
    for (i = 0; i < 48; i++) {
        dy[i] = (stx_real)test_rand();
        y[i] = 0;
    }
    u.op = op;
    u.p = stx_params_create(x);
    stx_param(u.p, STX_NORMAL, 1, "g", 4, 0, 0, 0);
    stx_param(u.p, STX_NORMAL, 1, "s", 4, 0, 0, 0);
    stx_param(u.p, STX_NORMAL, 1, "W", 4, 4, 0, 0);
    stx_param(u.p, STX_CONSTANT, 0.5, "alpha", 1, 0, 0, 0);
    stx_param(u.p, STX_NORMAL, 1, "V", 4, 4, 0, 0);
    stx_begin(x, STX_TRAIN);
    /* without the gradient of the outer tensor a, the gradient of V would differ */
    a = stx_linear(x, stx_input(x, n, 2, 3, 4, 0), stx_params_find(u.p, "V"), NULL, STX_ACT_TANH);
    h = stx_linear(x, stx_input(x, m, 2, 3, 4, 0), stx_params_find(u.p, "W"), NULL, STX_ACT_NONE);
    u.outer = a;
    u.listed = mode == LISTED;
    in[0] = h;
    in[1] = a;
    if (mode == PLAIN)
        out = outer_op(x, &u, in, NULL);
    else
        out = stx_recompute(x, outer_op, &u, in, mode == OUTSIDE ? 1 : 2, NULL, 0);
    if (out) stx_get(x, out, y);
    stx_backward_from(x, out, dy);
    for (i = 0; (size_t)i < u.p->count; size += u.p->tensor[i++]->size)
        memcpy(grads + size, u.p->tensor[i]->grad, u.p->tensor[i]->size * sizeof *grads);
    code = stx_error_code(x);
    if (code)
        CHECK(code == STX_ERR_ARG && strstr(stx_error(x), "not an input of stx_recompute"),
              "op %d mode %d: %s", op, mode, stx_error(x));
    stx_destroy(x);
    return code;
}

static void outer_tensors(void) {
    enum { GRADS = 4 + 4 + 16 + 1 + 16 };

    static stx_real y0[48], y1[48], g0[GRADS], g1[GRADS];
    int op, mode, i;
    for (op = 0; op < OUTER_OPS; op++) {
        CHECK(outer_run(op, PLAIN, y0, g0) == STX_OK, "op %d without recomputation fails", op);
        CHECK(outer_run(op, OUTSIDE, y1, g1) == STX_ERR_ARG,
              "op %d: the first gradient of an outer tensor is lost without an error", op);
        CHECK(!memcmp(y0, y1, sizeof y0), "op %d: values differ", op);
        for (mode = LISTED; mode <= LISTED_UNREAD; mode++) {
            CHECK(outer_run(op, mode, y1, g1) == STX_OK && !memcmp(y0, y1, sizeof y0),
                  "op %d mode %d: values differ", op, mode);
            for (i = 0; i < GRADS; i++)
                CHECK(CLOSE(g1[i], g0[i], 1e-13), "op %d mode %d: gradient %d: expected %g, got %g",
                      op, mode, i, (double)g0[i], (double)g1[i]);
        }
    }
}

static stx_tensor *make_recompute(stx_ctx *x, stx_tensor **in, void *user) {
    return stx_recompute(x, inner_block, user, in, 1, NULL, 0);
}

/* The backward function of an op with the results y = 2 a and *save = 3 a. */
static void pair_bwd(stx_ctx *x, stx_tensor *y, stx_tensor *const *in, void *save) {
    const stx_tensor *second = *(stx_tensor **)save;
    stx_real *d = stx_grad(x, in[0], NULL);
    if (y->grad) stx_axpy(x, d, y->grad, y->size, 2, 1);
    if (second->grad) stx_axpy(x, d, second->grad, y->size, 3, 1);
}

/* A function with several results. The returned tensor is recorded after out[0]. out[1]
   is an input, and out[2] stays NULL. If u->what is set, the returned tensor and out[0]
   are results of the same op. */
static stx_tensor *several_block(stx_ctx *x, void *user, stx_tensor **in, stx_tensor **out) {
    const block_user *u = (block_user *)user;
    stx_tensor *a = stx_tanh(x, stx_mul(x, in[0], in[1])), *y[2], *part,
               **save = (stx_tensor **)stx_step_host_bytes(x, sizeof *save);
    part = stx_slice(x, stx_reshape(x, a, 1, 5, 7, 0), 1, 4);
    out[0] = stx_dropout(x, stx_reshape(x, part, 3, 7, 0, 0), 0.25);
    out[1] = in[1];
    if (!u->what) return stx_mul(x, stx_sigmoid(x, a), in[1]);
    y[0] = stx_new(x, 5, 7, 0, 0);
    y[1] = stx_new(x, 5, 7, 0, 0);
    if (!a || !y[0] || !y[1] || !save) return NULL;
    *save = y[1];
    stx_axpy(x, y[0]->data, a->data, a->size, 2, 0);
    stx_axpy(x, y[1]->data, a->data, a->size, 3, 0);
    (void)stx_record_results(x, y, 2, &a, 1, pair_bwd, save);
    out[0] = y[1];
    return y[0];
}

static stx_tensor *around_block(stx_ctx *x, void *user, stx_tensor **in, stx_tensor **out) {
    return stx_recompute(x, several_block, user, in, 2, out, 3);
}

/* Bits of block_user.nested. ONCE: the function is recomputed; NESTED: it is recomputed
   within another recomputation; FIRST to THIRD: the results that contribute to the
   loss. */
enum { ONCE = 1, NESTED = 2, FIRST = 4, SECOND = 8, THIRD = 16 };

/* Concatenates the elements of t and y, either of which may be NULL. */
static stx_tensor *join(stx_ctx *x, stx_tensor *t, stx_tensor *y) {
    t = stx_reshape(x, t, 1, t->size, 1, 0);
    return y ? stx_concat(x, t, y) : t;
}

static stx_tensor *make_several(stx_ctx *x, stx_tensor **in, void *user) {
    const block_user *u = (block_user *)user;
    stx_tensor *more[3] = {NULL, NULL, NULL}, *y = NULL, *first;
    if (u->nested & NESTED)
        first = stx_recompute(x, around_block, user, in, 2, more, 3);
    else if (u->nested & ONCE)
        first = stx_recompute(x, several_block, user, in, 2, more, 3);
    else
        first = several_block(x, user, in, more);
    if (!first || !more[0] || !more[1] || more[2]) return NULL;
    if (u->nested & FIRST) y = join(x, first, NULL);
    if (u->nested & SECOND) y = join(x, more[0], y);
    if (u->nested & THIRD) {
        stx_tensor *t = join(x, more[1], NULL);
        y = y ? stx_concat(x, y, t) : t;
    }
    return y;
}

/* Recomputes a function with several results. used: bit mask of the results that
   contribute to the loss. */
static void several_case(int what, int used) {
    block_user u;
    problem p = start(what ? "several results of an op" : "several results", make_several, &u);
    stx_real *y0 = random_values(200), *y1 = random_values(200), *dy = random_values(200),
             *g0[MAX_IN] = {0}, *g1[MAX_IN] = {0};
    size_t n = 0;
    int k;
    memset(&u, 0, sizeof u);
    u.what = what;
    p.random = 1;
    add(&p, 5, 7, 0, 0);
    add(&p, 5, 7, 0, 0);
    for (k = 0; k < 2; k++) {
        g0[k] = random_values(35);
        g1[k] = random_values(35);
    }
    if (used & FIRST) n += 35;
    if (used & SECOND) n += what ? 35 : 21;
    if (used & THIRD) n += 35;
    u.nested = used;
    CHECK(gradients(ctx1, &p, dy, 1, g0, y0), "without recomputation: %s", stx_error(ctx1));
    for (k = ONCE; k <= NESTED; k++) {
        u.nested = used | k;
        CHECK(gradients(ctx1, &p, dy, 1, g1, y1), "several results: %s", stx_error(ctx1));
        CHECK(!memcmp(y0, y1, n * sizeof *y0) && test_error(g1[0], g0[0], 35, 1e-3) <= 1e-14
                  && test_error(g1[1], g0[1], 35, 1e-3) <= 1e-14,
              "results %d of op %d, %s: recomputation changes them", used, what,
              k == NESTED ? "nested" : "once");
    }
    u.nested = used | ONCE;
    if (used == THIRD) p.fixed[0] = 1;
    check(&p);
    for (k = 0; k < 2; k++) {
        free(g0[k]);
        free(g1[k]);
    }
    free(y0);
    free(y1);
    free(dy);
}

static void several_results(void) {
    int what, used;
    for (what = 0; what < 2; what++)
        for (used = FIRST; used < 2 * THIRD; used += FIRST) several_case(what, used);
}

/* Neither the chunk size nor nesting of recomputations may change a bit. */
static void recompute_bits(void) {
    enum { VALUES = 2 * 31 * 6, GRADS = 2 * VALUES + 13 * 6 * 2 + 13 + 27 + 36 };

    static const size_t chunk[] = {0, 1, 5000, 40000};
    static stx_real y0[VALUES], y1[VALUES], g0[GRADS], g1[GRADS];
    int i, mode;
    recompute_run(0, 0, y0, g0);
    for (mode = 1; mode < 3; mode++)
        for (i = 0; i < 4; i++) {
            const char *how = mode == 2 ? "nested recomputation" : "recomputation";
            recompute_run(mode, chunk[i], y1, g1);
            CHECK(!memcmp(y0, y1, sizeof y0), "%s, chunks of %zu: values differ", how, chunk[i]);
            CHECK(!memcmp(g0, g1, sizeof g0), "%s, chunks of %zu: gradients differ by %g", how,
                  chunk[i], test_error(g1, g0, GRADS, 1e-3));
        }
}

static void recompute_differences(void) {
    block_user u;
    problem p = start("recompute", make_recompute, &u);
    memset(&u, 0, sizeof u);
    u.p = stx_params_create(ctx1);
    stx_param(u.p, STX_NORMAL, 0.4, "w1", 13, 6, 0, 0);
    stx_param(u.p, STX_NORMAL, 0.4, "b1", 13, 0, 0, 0);
    stx_param(u.p, STX_NORMAL, 0.4, "w2", 6, 13, 0, 0);
    p.random = 1;
    add(&p, 5, 6, 0, 0);
    check(&p);
}

/* Recomputes a function that returns its input, and another one whose result requires
   no gradient. */
static void recompute_trivial(const stx_real *a, const stx_real *dy) {
    stx_tensor *t, *y;
    stx_begin(ctx1, STX_TRAIN);
    t = stx_variable(ctx1, a, 33, 0, 0, 0);
    y = stx_recompute(ctx1, identity_block, NULL, &t, 1, NULL, 0);
    CHECK(y && !memcmp(y->data, a, 33 * sizeof *a), "identity: the value changes");
    stx_backward_from(ctx1, y, dy);
    CHECK(stx_ok(ctx1) && t->grad && !memcmp(t->grad, dy, 33 * sizeof *a),
          "identity: the gradient is not dy: %s", stx_error(ctx1));
    stx_begin(ctx1, STX_TRAIN);
    t = stx_variable(ctx1, a, 33, 0, 0, 0);
    y = stx_add(ctx1, stx_recompute(ctx1, constant_block, NULL, &t, 1, NULL, 0), t);
    stx_backward_from(ctx1, y, dy);
    CHECK(stx_ok(ctx1) && t->grad && !memcmp(t->grad, dy, 33 * sizeof *a),
          "a gradient passes through detach inside recompute: %s", stx_error(ctx1));
    stx_begin(ctx1, STX_EVAL);
    t = stx_variable(ctx1, a, 33, 0, 0, 0);
    y = stx_recompute(ctx1, constant_block, NULL, &t, 1, NULL, 0);
    CHECK(y && y->data[3] == 2 * a[3], "recompute in evaluation");
}

/* The gradient of a tensor from outside the recomputed function would be lost. That must
   be an error if the tensor requires a gradient and has none yet (LEAF, OP_RESULT).
   Constants, detached tensors and tensors that already have a gradient are allowed. */
static void recompute_outside(const stx_real *a, const stx_real *dy) {
    enum { LEAF, CONSTANT, DETACHED, HAS_GRADIENT, OP_RESULT, KINDS };

    stx_tensor *t, *y, *other, *used;
    int kind;
    for (kind = 0; kind < KINDS; kind++) {
        stx_clear_error(ctx1);
        stx_begin(ctx1, STX_TRAIN);
        t = stx_variable(ctx1, a, 33, 0, 0, 0);
        if (kind == CONSTANT)
            other = stx_input(ctx1, dy, 33, 0, 0, 0);
        else
            other = stx_variable(ctx1, dy, 33, 0, 0, 0);
        if (kind == OP_RESULT) other = stx_scale(ctx1, other, 2);
        used = kind == DETACHED ? stx_detach(ctx1, other) : other;
        y = stx_recompute(ctx1, outside_block, used, &t, 1, NULL, 0);
        if (kind == HAS_GRADIENT) y = stx_add(ctx1, y, other); /* its backward runs first */
        stx_backward_from(ctx1, y, dy);
        if (kind == LEAF || kind == OP_RESULT) {
            CHECK(stx_error_code(ctx1) == STX_ERR_ARG
                      && strstr(stx_error(ctx1), "not an input of stx_recompute"),
                  "outside tensor of kind %d: %s", kind, stx_error(ctx1));
            continue;
        }
        CHECK(stx_ok(ctx1) && CLOSE(t->grad[5], dy[5] * dy[5], 1e-12),
              "outside tensor of kind %d: %s", kind, stx_error(ctx1));
        if (kind == HAS_GRADIENT)
            CHECK(CLOSE(other->grad[5], dy[5] + dy[5] * a[5], 1e-12),
                  "the gradient of a tensor from outside that already has one: %g",
                  (double)other->grad[5]);
    }
    stx_clear_error(ctx1);
}

static void row_recompute(void) {
    stx_real *a, *dy;
    outer_tensors();
    several_results();
    recompute_bits();
    recompute_differences();
    a = random_values(33);
    dy = random_values(33);
    recompute_trivial(a, dy);
    recompute_outside(a, dy);
    free(a);
    free(dy);
}


/* >>attention */

/* Which biases are used. Kinds of span_fraction z: values off the kinks of the ramp, 0,
   1, and a mixture that includes kinks. Kinds of padding: scattered; at the start; at
   the end; all keys of batch row 0; all keys but a few that are far apart. */
enum { CONTENT = 1, POSITION = 2, BOTH = 3 };

enum { Z_NONE, Z_INSIDE, Z_ZERO, Z_ONE, Z_MIXED };

enum { PAD_NONE, PAD_SCATTERED, PAD_START, PAD_END, PAD_ROW, PAD_SPARSE };

typedef struct attn {
    size_t B, T, S, H, D;
    size_t P;     /* number of rows of pe; 0: no pe */
    int pe_heads; /* whether each head has a separate pe */
    int bias, z;
    int z_shared; /* whether all heads share one z */
    size_t N;
    stx_attention_desc d;
    int pad;
    int32_t *is_pad; /* (B,S), set by attn_inputs */
} attn;

static stx_tensor *make_attention(stx_ctx *x, stx_tensor **in, void *user) {
    const attn *u = (const attn *)user;
    stx_attention_in a;
    memset(&a, 0, sizeof a);
    if (u->pad) a.pad = stx_tokens(x, u->is_pad, u->B, u->S);
    a.q = in[0];
    a.k = in[1];
    a.v = in[2];
    a.pe = in[3];
    a.content_bias = in[4];
    a.position_bias = in[5];
    a.span_fraction = in[6];
    a.persistent_k = in[7];
    a.persistent_v = in[8];
    return stx_attention(x, &a, &u->d);
}

static int key_is_padded(const attn *a, size_t b, size_t j) {
    size_t length = (a->S * (b + 1) + 1) / 3 % (a->S + 1);
    switch (a->pad) {
    case PAD_SCATTERED: return test_rand() < -0.2;
    case PAD_START: return j < length;
    case PAD_END: return a->S - j <= length;
    case PAD_ROW: return b == 0 || j % 3 == 1;
    case PAD_SPARSE: return j % 97 != b;
    default: return 0;
    }
}

/* Returns the padding (B,S) of case `a`. Any nonzero value marks a padded key. */
static int32_t *padding_of(const attn *a) {
    static const int32_t mark[4] = {1, 1, 1 << 30, -5};
    int32_t *pad = (int32_t *)calloc(a->B * a->S, sizeof *pad);
    size_t b, j;
    for (b = 0; b < a->B; b++)
        for (j = 0; j < a->S; j++)
            if (key_is_padded(a, b, j)) pad[b * a->S + j] = mark[j % 4];
    return pad;
}

static double span_fraction(const attn *a, size_t h) {
    static const double mixed[3] = {0, 1, 0.25};
    double share = 0.05 + 0.9 * (double)((h * 7 + 3) % 11) / 11;
    switch (a->z) {
    case Z_INSIDE: return (floor(share * a->d.max_span) + 0.37) / a->d.max_span;
    case Z_ZERO: return 0;
    case Z_ONE: return 1;
    default: return mixed[h % 3];
    }
}

static void attn_inputs(problem *p, attn *a) {
    size_t C = a->H * a->D, spans = a->z_shared ? 1 : a->H, h, i;
    stx_real *z;
    a->is_pad = a->pad ? padding_of(a) : NULL;
    add(p, a->B, a->T, C, 0);
    add(p, a->B, a->S, C, 0);
    add(p, a->B, a->S, C, 0);
    add_if(p, a->P > 0, a->P, a->pe_heads ? C : a->D, 0, 0);
    add_if(p, a->bias & CONTENT, C, 0, 0, 0);
    add_if(p, a->bias & POSITION, C, 0, 0, 0);
    z = add_if(p, a->z, spans, 0, 0, 0);
    for (h = 0; z && h < spans; h++) z[h] = span_fraction(a, h);
    /* z at a kink is compared with the plain derivative, not with differences */
    p->fixed[6] = a->z && a->z != Z_INSIDE;
    add_if(p, a->N > 0, a->H, a->N, a->D, 0);
    add_if(p, a->N > 0, a->H, a->N, a->D, 0);
    /* without this factor, the softmax would be saturated */
    if (a->D > 100)
        for (i = 0; i < p->size[0]; i++) p->data[0][i] *= 0.2;
}

/* Returns the kernel arguments that stx_attention would pass for these inputs. y:
   (B,T,H D). */
static stx_attention_args attn_args(const problem *p, const attn *a, stx_real *y) {
    stx_attention_args g;
    size_t zero_keys = a->d.first_key < 0 ? (size_t)-a->d.first_key : 0;
    memset(&g, 0, sizeof g);
    g.B = a->B;
    g.T = a->T;
    g.S = a->S;
    g.H = a->H;
    g.D = a->D;
    g.P = a->P;
    g.N = a->N;
    g.pe_heads = a->pe_heads ? (int)a->H : 1;
    g.span_shared = a->z_shared;
    g.q_row_stride = g.kv_row_stride = a->H * a->D;
    g.q_batch_stride = a->T * g.q_row_stride;
    g.kv_batch_stride = a->S * g.kv_row_stride;
    g.pad_batch_stride = a->S;
    g.span = a->S + zero_keys;
    if (a->d.span && a->d.span < g.span) g.span = a->d.span;
    /* keys without a position are not attended to */
    if (a->P && g.span > a->P + (size_t)a->d.delta_min - 1)
        g.span = a->P + (size_t)a->d.delta_min - 1;
    g.delta_min = a->d.delta_min;
    g.not_causal = a->d.not_causal;
    g.no_renorm = a->d.no_renorm && a->z;
    g.first_key = a->d.first_key < -(ptrdiff_t)g.span ? -(ptrdiff_t)g.span : a->d.first_key;
    g.scale = a->d.scale != 0 ? a->d.scale : 1 / sqrt((double)a->D);
    g.max_span = a->d.max_span;
    g.ramp = a->d.ramp;
    g.eps = a->d.eps;
    g.q = p->data[0];
    g.k = p->data[1];
    g.v = p->data[2];
    g.pe = p->data[3];
    g.content_bias = p->data[4];
    g.position_bias = p->data[5];
    g.span_fraction = p->data[6];
    g.persistent_k = p->data[7];
    g.persistent_v = p->data[8];
    g.pad = a->is_pad;
    g.y = y;
    return g;
}

/* Returns the value of key n of head h in batch row b, or NULL for a zero key. The
   order of keys is: zero keys, S real keys, N persistent vectors. */
static const stx_real *value_of(const stx_attention_args *g, size_t b, size_t h, size_t n) {
    size_t persistent = stx_attention_keys(g) - g->N, first = persistent - g->S;
    if (n < first) return NULL;
    if (n < persistent)
        return g->v + b * g->kv_batch_stride + (n - first) * g->kv_row_stride + h * g->D;
    return g->persistent_v + (h * g->N + n - persistent) * g->D;
}

/* Computes y by the plain definition. mask (B,H,T,keys): factors of the weights after
   normalisation, or NULL. Unless dz is NULL, dz (H) or (1) receives the gradient of z
   for dy, where the ramp includes both of its ends:

       dz = max_span/ramp sum over 0 <= ramp <= 1 of e^s/norm (dy.v - dy.y),

   where dy.y is omitted if the ramp is not part of the normaliser. */
static void dense(const problem *p, const attn *a, const stx_real *mask, const stx_real *dy,
                  stx_real *y, stx_real *dz) {
    stx_attention_args g = attn_args(p, a, y);
    size_t keys = stx_attention_keys(&g), persistent = keys - g.N, D = g.D, row, h, n, d;
    double *w = (double *)malloc(2 * keys * sizeof *w), *ramp = w + keys;
    stx_attention_plain(&g, w);
    for (h = 0; dz && h < g.H; h++) dz[h] = 0;
    for (row = 0; row < g.B * g.H * g.T && (mask || (dz && g.span_fraction)); row++) {
        size_t b = row / (g.H * g.T), i = row % g.T, at;
        double dot = 0;
        h = row / g.T % g.H;
        at = ((b * g.T + i) * g.H + h) * D;
        stx_attention_weights(&g, b, h, i, w, ramp);
        for (d = 0; mask && d < D; d++) y[at + d] = 0;
        for (d = 0; dz && d < D; d++) dot += dy[at + d] * y[at + d];
        for (n = 0; n < keys; n++) {
            const stx_real *v = w[n] > 0 ? value_of(&g, b, h, n) : NULL;
            double f = n < persistent ? 1 : sqrt((double)g.N), dw = 0;
            if (mask) f *= mask[row * keys + n] * fmax(0, fmin(1, ramp[n]));
            for (d = 0; mask && v && d < D; d++) y[at + d] += w[n] * f * v[d];
            for (d = 0; dz && v && d < D; d++) dw += f * dy[at + d] * v[d];
            if (dz && ramp[n] >= 0 && ramp[n] <= 1)
                dz[g.span_shared ? 0 : h] += g.max_span / g.ramp * w[n]
                                             * (g.no_renorm ? dw : dw - dot);
        }
    }
    free(w);
}

static const char *attn_label(const attn *a) {
    static char t[300];
    const char *pe = a->pe_heads ? " per head" : " shared";
    snprintf(t, sizeof t,
             "attention B %zu T %zu S %zu H %zu D %zu P %zu%s bias %d z %d%s N %zu delta_min %d "
             "span %zu eps %g%s first %ld%s scale %g max_span %g ramp %g dropout %g pad %d",
             a->B, a->T, a->S, a->H, a->D, a->P, a->P ? pe : "", a->bias, a->z,
             a->z_shared ? " shared" : "", a->N, a->d.delta_min, a->d.span, a->d.eps,
             a->d.no_renorm ? " no renorm" : "", (long)a->d.first_key,
             a->d.not_causal ? " not causal" : "", a->d.scale, a->d.max_span, a->d.ramp,
             a->d.dropout, a->pad);
    return t;
}

enum { ATTN_IN = 9, ATTN_ALL }; /* ATTN_IN: number of inputs of make_attention; ATTN_ALL:
                                   number of inputs and outputs */

/* Returns array n of a pass: the gradient of input n, or NULL; for n = ATTN_IN, the
   output y. */
static const stx_real *attn_array(stx_tensor *const *in, const stx_tensor *y, size_t n) {
    if (n == ATTN_IN) return y->data;
    return in[n] ? in[n]->grad : NULL;
}

/* Nonzero if the gradients of padded keys and of queries that see no key are 0. was:
   the arrays of a pass. */
static int padding_has_no_gradient(const attn *a, stx_real *const *was) {
    size_t C = a->H * a->D, n, i, c;
    for (n = 1; n < 3; n++)
        for (i = 0; i < a->B * a->S; i++)
            for (c = 0; a->is_pad[i] && c < C; c++)
                if (!was[n] || was[n][i * C + c] != 0) return 0;
    /* without persistent vectors, y is 0 only if there is no key */
    if (a->N || !was[0]) return 1;
    for (i = 0; i < a->B * a->T * a->H; i++) {
        for (c = 0; c < a->D && was[ATTN_IN][i * a->D + c] == 0; c++) continue;
        if (c < a->D) continue;
        for (c = 0; c < a->D; c++)
            if (was[0][i * a->D + c] != 0) return 0;
    }
    return 1;
}

/* Padded keys and values must never be read: filling them with NaN must change neither
   y nor a gradient. */
static void attn_padding(problem *p, const attn *a, const stx_tensor *y, stx_tensor **in,
                         const stx_real *dy) {
    size_t C = a->H * a->D, n, i, c, j;
    stx_real *was[ATTN_ALL], *kept[2];
    stx_tensor *again;
    int same = 1;
    for (n = 0; n < ATTN_ALL; n++) {
        const stx_real *from = attn_array(in, y, n);
        size_t size = n == ATTN_IN ? y->size : p->size[n];
        was[n] = from ? (stx_real *)malloc(size * sizeof *from) : NULL;
        if (from) memcpy(was[n], from, size * sizeof *from);
    }
    CHECK(padding_has_no_gradient(a, was),
          "%s: gradients of padded keys, or of queries without a key, are not 0", p->label);
    for (n = 0; n < 2; n++) {
        kept[n] = p->data[1 + n];
        p->data[1 + n] = (stx_real *)malloc(p->size[1 + n] * sizeof **kept);
        memcpy(p->data[1 + n], kept[n], p->size[1 + n] * sizeof **kept);
        for (j = 0; j < a->B * a->S; j++)
            for (c = 0; a->is_pad[j] && c < C; c++) p->data[1 + n][j * C + c] = NAN;
    }
    again = forward(ctx1, p, in);
    if (again) stx_backward_from(ctx1, again, dy);
    CHECK(again && stx_ok(ctx1), "%s: %s", p->label, stx_error(ctx1));
    for (n = 0; n < ATTN_ALL && again; n++) {
        const stx_real *now = attn_array(in, again, n);
        size_t size = n == ATTN_IN ? again->size : p->size[n];
        for (i = 0; was[n] && i < size; i++)
            if (!now || !(now[i] == was[n][i])) same = 0;
    }
    CHECK(same, "%s: the contents of padded keys have an effect", p->label);
    for (n = 0; n < 2; n++) {
        free(p->data[1 + n]);
        p->data[1 + n] = kept[n];
    }
    for (n = 0; n < ATTN_ALL; n++) free(was[n]);
}

/* Compares y and dz with the plain definition, checks padding and, if entries > 0,
   compares all gradients with differences. */
static void attn_case(const attn *spec, int entries) {
    attn a = *spec;
    problem p = start(attn_label(&a), make_attention, &a);
    stx_tensor *in[MAX_IN], *y;
    size_t n = a.B * a.T * a.H * a.D;
    stx_real *want = random_values(n), *dy = random_values(n), *dz = random_values(a.H);
    double dropout = a.d.dropout, e;
    a.d.heads = a.H;
    attn_inputs(&p, &a);
    a.d.dropout = 0;
    p.fixed[6] = 0;
    y = forward(ctx1, &p, in);
    CHECK(y != NULL, "%s: %s", p.label, stx_error(ctx1));
    if (y) {
        dense(&p, &a, NULL, dy, want, dz);
        e = test_error(y->data, want, n, 1e-3);
        CHECK(e <= 1e-12, "%s: the value is off by %g", p.label, e);
        stx_backward_from(ctx1, y, dy);
        if (a.z && stx_ok(ctx1)) {
            e = in[6]->grad ? test_error(in[6]->grad, dz, p.size[6], 1e-3) : HUGE_VAL;
            CHECK(e <= 1e-10, "%s: dz is off by %g", p.label, e);
        }
        if (a.pad && stx_ok(ctx1)) attn_padding(&p, &a, y, in, dy);
    }
    stx_clear_error(ctx1);
    p.fixed[6] = a.z != Z_INSIDE;
    a.d.dropout = dropout;
    p.random = dropout > 0;
    p.entries = entries;
    free(want);
    free(dy);
    free(dz);
    if (entries)
        check(&p);
    else
        finish(&p);
    free(a.is_pad);
}

/* Returns an attention problem whose output shows which keys dropout keeps: all weights
   are equal, and the values are unit vectors (D = S + N). */
static problem unit_values(attn *a) {
    problem p = start("unit values", make_attention, a);
    size_t C = a->H * a->D, i, h, n;
    attn_inputs(&p, a);
    for (n = 0; n < 3; n++) memset(p.data[n], 0, p.size[n] * sizeof **p.data);
    for (i = 0; i < a->B * a->S; i++)
        for (h = 0; h < a->H; h++) p.data[2][i * C + h * a->D + i % a->S] = 1;
    for (n = 7; n < 9 && a->N; n++) memset(p.data[n], 0, p.size[n] * sizeof **p.data);
    for (h = 0; h < a->H; h++)
        for (i = 0; i < a->N; i++)
            p.data[8][(h * a->N + i) * a->D + a->S + i] = 1 / sqrt((double)a->N);
    return p;
}

/* Reads the mask (B,H,T,zero keys + S + N) from the output y of unit_values. Kept
   weights must be scaled by 1/keep, the fraction of kept weights must be near `keep`,
   and no query may see a later key. */
static void read_mask(const attn *a, const stx_tensor *y, double keep, stx_real *mask) {
    size_t S = a->S, N = a->N, b, h, i, n, kept = 0, all = 0,
           zero = a->d.first_key < 0 ? (size_t)-a->d.first_key : 0;
    int good = 1;
    for (b = 0; b < a->B && y; b++)
        for (h = 0; h < a->H; h++)
            for (i = 0; i < a->T; i++) {
                size_t keys = zero + S - a->T + i + 1 + N; /* every weight is 1/keys */
                const stx_real *row = y->data + ((b * a->T + i) * a->H + h) * a->D;
                for (n = 0; n < S + N; n++) {
                    double m = row[n] * (double)keys;
                    if (n < S && n > S - a->T + i) {
                        if (m != 0) good = 0;
                        continue;
                    }
                    if (m != 0 && !CLOSE(m, 1 / keep, 1e-12)) good = 0;
                    kept += m != 0;
                    all++;
                    mask[((b * a->H + h) * a->T + i) * (zero + S + N) + zero + n] = m;
                }
            }
    CHECK(good, "attention dropout %g: kept weights are not scaled by 1/keep", a->d.dropout);
    CHECK(fabs((double)kept / (double)all - keep) <= 4.5 * sqrt(keep * (1 - keep) / (double)all),
          "attention dropout %g: a share of %g is kept", a->d.dropout, (double)kept / (double)all);
}

/* The kernel must draw the same mask as the plain definition. y, want: scratch. */
static void kernel_dropout(const problem *p, const attn *a, stx_real *y, stx_real *want) {
    stx_attention_args g = attn_args(p, a, y);
    double *work = (double *)malloc(2 * stx_attention_keys(&g) * sizeof *work), e;
    size_t rows = a->B * a->H * a->T;
    g.drop = a->d.dropout;
    g.seed = 11;
    g.stream = (uint64_t)5 << 40 | 3;
    g.row_max = random_values(2 * rows);
    g.inv_sum = g.row_max + rows;
    stx_begin(ctx1, STX_EVAL);
    stx_attention_run(ctx1, &g);
    g.y = want;
    stx_attention_plain(&g, work);
    e = test_error(y, want, rows * a->D, 1e-3);
    CHECK(stx_ok(ctx1) && e <= 1e-12, "attention dropout %g: off by %g from the plain one",
          a->d.dropout, e);
    free(work);
    free(g.row_max);
}

/* Reads the mask that dropout draws, then compares attention with this dropout to the
   plain definition with the same mask. */
static void attn_dropout(size_t B, size_t T, size_t S, size_t H, size_t N, ptrdiff_t first,
                         double rate) {
    size_t zero = first < 0 ? (size_t)-first : 0, n = B * T * H * (S + N);
    attn a = {0};
    problem p, units;
    stx_tensor *in[MAX_IN], *y;
    stx_real *mask = (stx_real *)calloc(B * H * T * (zero + S + N), sizeof *mask),
             *want = random_values(n), *y1 = random_values(n);
    int k;
    a.B = B;
    a.T = T;
    a.S = S;
    a.H = H;
    a.D = S + N;
    a.N = N;
    a.d.heads = H;
    a.d.dropout = rate;
    a.d.first_key = first;
    units = unit_values(&a);
    y = forward(ctx1, &units, in);
    CHECK(y != NULL, "dropout: %s", stx_error(ctx1));
    read_mask(&a, y, floor((1 - rate) * 65536 + 0.5) / 65536, mask);
    if (y) memcpy(y1, y->data, y->size * sizeof *y1);
    y = forward(ctx3, &units, in);
    CHECK(y && !memcmp(y1, y->data, y->size * sizeof *y1),
          "attention dropout: threads change the mask");
    finish(&units);

    p = start("attention with dropout", make_attention, &a);
    attn_inputs(&p, &a);
    y = forward(ctx1, &p, in);
    dense(&p, &a, mask, NULL, want, NULL);
    if (y)
        CHECK(test_error(y->data, want, y->size, 1e-3) <= 1e-12,
              "attention with dropout: off by %g", test_error(y->data, want, y->size, 1e-3));
    kernel_dropout(&p, &a, y1, want);

    stx_begin(ctx1, STX_EVAL);
    for (k = 0; k < p.n; k++) in[k] = leaf(ctx1, &p, k);
    y = make_attention(ctx1, in, &a);
    dense(&p, &a, NULL, NULL, want, NULL);
    if (y)
        CHECK(test_error(y->data, want, y->size, 1e-3) <= 1e-12, "attention drops in evaluation");
    finish(&p);
    free(mask);
    free(want);
    free(y1);
}

static stx_tensor *make_self_attention(stx_ctx *x, stx_tensor **in, void *user) {
    stx_tensor *full[MAX_IN] = {0};
    full[0] = full[1] = full[2] = in[0];
    full[3] = in[1];
    return make_attention(x, full, user);
}

/* Runs a case. Members that are 0 are replaced by their defaults. */
static void attn_small(attn a, int entries) {
    if (!a.B) a.B = 2;
    if (!a.T) a.T = 5;
    if (!a.S) a.S = 11;
    if (!a.H) a.H = 2;
    if (!a.D) a.D = 3;
    if (a.d.max_span == 0) a.d.max_span = 16;
    if (a.d.ramp == 0) a.d.ramp = 4;
    attn_case(&a, entries);
}

/* Tests padding combined with each option, with few queries, and with queries that
   attend to no key. */
static void attn_pads(void) {
    static const attn cases[] = {
        {.pad = 0},
        {.T = 7, .S = 7, .d.delta_min = 1},
        {.P = 11, .bias = BOTH, .pe_heads = 1},
        {.P = 7, .d.delta_min = 1, .z = Z_INSIDE},
        {.H = 3, .P = 11, .N = 2, .d.delta_min = 1, .z = Z_MIXED, .d.eps = 0.3},
        {.z = Z_INSIDE, .d.eps = 0.02},
        {.N = 3, .bias = CONTENT},
        {.d.first_key = -4, .P = 20, .d.delta_min = 1},
        {.d.first_key = 4},
        {.d.not_causal = 1},
        {.S = 4, .N = 2, .d.not_causal = 1, .d.first_key = 1},
        {.d.span = 3},
        {.P = 11, .N = 3, .d.dropout = 0.4},
        {.T = 2, .P = 11, .bias = BOTH, .z = Z_INSIDE},
        {.T = 3, .S = 9, .P = 8, .N = 2, .z = Z_MIXED, .d.first_key = -5, .d.eps = 0.1},
        {.T = 1, .d.not_causal = 1},
        {.H = 3, .P = 11, .N = 2, .d.delta_min = 1, .z = Z_MIXED, .d.no_renorm = 1},
        {.T = 2, .z = Z_INSIDE, .z_shared = 1, .d.no_renorm = 1}};
    size_t i;
    int pad;
    for (pad = PAD_SCATTERED; pad <= PAD_SPARSE; pad++)
        for (i = 0; i < sizeof cases / sizeof *cases; i++) {
            attn a = cases[i];
            a.B = 3;
            a.pad = pad;
            attn_small(a, 30);
        }
}

/* Tests padding at tile borders. In case 1, the ramp is so steep that dz is too small
   for differences. */
static void attn_pads_tiles(void) {
#define LONG_SPAN .bias = BOTH, .d.max_span = 400, .d.ramp = 32
    static const attn cases[] = {
        {LONG_SPAN, .T = 2, .S = 238, .P = 239, .z = Z_INSIDE},
        {LONG_SPAN, .T = 65, .S = 536, .P = 537, .z = Z_MIXED, .d.delta_min = 1,
         .d.first_key = -300},
        {LONG_SPAN, .T = 129, .S = 365, .P = 366, .z = Z_INSIDE, .d.eps = 0.01},
        {LONG_SPAN, .T = 2, .S = 473, .P = 474, .z = Z_INSIDE, .d.delta_min = 1, .N = 300},
        {.T = 65, .S = 301, .d.not_causal = 1},
        {.T = 129, .S = 600, .d.not_causal = 1}};
#undef LONG_SPAN
    size_t i;
    int pad;
    for (pad = PAD_SCATTERED; pad <= PAD_SPARSE; pad++)
        for (i = 0; i < sizeof cases / sizeof *cases; i++) {
            attn a = cases[i];
            a.pad = pad;
            attn_small(a, i % 2 ? 4 : 0);
        }
}

/* Tests heads as wide as a model. Sizes 130 and 400 exceed one tile of queries and one
   of keys. */
static void attn_wide(void) {
    static const size_t D[] = {256, 257, 744, 768, 1024}, T[] = {1, 5, 33, 130};
    size_t d, t;
    /* Here f is a sum of 10^5 terms. With the default step, rounding errors would reach
       1e-6; with this step, the error of the differences is 1e-8. */
    fd_step = 1e-4;
    for (d = 0; d < 5; d++)
        for (t = 0; t < 4; t++) {
            attn a = {0};
            a.B = 1 + (t == 1);
            a.T = T[t];
            a.S = a.T + (t == 3 ? 270 : 7 * t);
            a.H = 1;
            a.D = D[d];
            a.pad = (int)((d + t) % 4);
            if (d % 2) {
                a.P = a.S;
                a.bias = BOTH;
                a.N = 2;
                a.z = Z_INSIDE;
                a.d.max_span = 40;
                a.d.ramp = 8;
            }
            attn_case(&a, 2);
            if (t != 2 || d % 2) continue;
            a.H = 2;
            a.d.not_causal = 1;
            attn_case(&a, 2);
        }
    fd_step = 1e-5;
}

/* Tests each option alone and in pairs. */
static void attn_options(void) {
    static const attn cases[] = {
        {.pad = 0},
        {.d.delta_min = 1},
        {.d.delta_min = 1, .S = 5}, /* the first query attends to nothing */
        /* as many positions as keys, fewer, and more */
        {.P = 11},
        {.P = 11, .pe_heads = 1},
        {.P = 7, .d.delta_min = 1},
        {.P = 40, .pe_heads = 1, .d.delta_min = 1},
        /* biases */
        {.bias = CONTENT},
        {.P = 11, .bias = BOTH},
        {.P = 11, .bias = POSITION},
        {.P = 11, .bias = BOTH, .pe_heads = 1, .N = 3},
        /* learned spans */
        {.z = Z_INSIDE},
        {.z = Z_ZERO},
        {.z = Z_ONE},
        {.z = Z_MIXED, .H = 3},
        {.z = Z_INSIDE, .d.eps = 1e-8},
        {.z = Z_INSIDE, .d.eps = 0.02},
        {.z = Z_MIXED, .d.eps = 0.3, .P = 11, .d.delta_min = 1, .N = 2},
        /* persistent vectors */
        {.N = 3},
        {.N = 1, .bias = CONTENT},
        {.N = 3, .z = Z_INSIDE, .d.eps = 0.05},
        /* first_key; with first_key = 20, there is no key */
        {.d.first_key = -9},
        {.d.first_key = -9, .P = 30, .d.delta_min = 1},
        {.d.first_key = 4},
        {.d.first_key = 20},
        {.d.first_key = 8, .P = 11, .d.delta_min = 1},
        /* not causal; also fewer keys than queries */
        {.d.not_causal = 1},
        {.d.not_causal = 1, .S = 3, .N = 2},
        {.d.not_causal = 1, .d.first_key = 4, .bias = CONTENT},
        /* scale, span, dropout */
        {.d.scale = 1.3},
        {.d.scale = -0.4, .P = 11, .bias = BOTH, .N = 2},
        {.d.span = 3},
        {.d.span = 1, .d.delta_min = 1},
        {.d.span = 64, .d.first_key = -7},
        {.d.dropout = 0.4, .N = 3},
        {.d.dropout = 0.4, .P = 11, .z = Z_INSIDE, .d.eps = 0.1},
        /* sizes of 1; if P = 1, only distance 0 has a position */
        {.D = 1, .H = 3, .P = 11, .bias = BOTH},
        {.T = 1, .S = 1, .H = 1, .P = 1},
        {.P = 1},
        {.P = 1, .d.delta_min = 1, .pe_heads = 1, .H = 1},
        /* the ramp is not part of the normaliser */
        {.d.no_renorm = 1, .z = Z_INSIDE},
        {.d.no_renorm = 1, .z = Z_ZERO, .P = 11, .d.delta_min = 1},
        {.d.no_renorm = 1, .z = Z_ONE},
        {.d.no_renorm = 1, .z = Z_MIXED, .H = 3, .d.delta_min = 1, .P = 7, .N = 2, .bias = BOTH},
        {.d.no_renorm = 1, .z = Z_INSIDE, .d.dropout = 0.4, .P = 11},
        {.d.no_renorm = 1, .z = Z_INSIDE, .d.first_key = -9, .P = 30, .d.delta_min = 1},
        {.d.no_renorm = 1, .z = Z_INSIDE, .d.delta_min = 1, .S = 5},
        {.d.no_renorm = 1, .z = Z_INSIDE, .T = 2, .P = 11},
        {.d.no_renorm = 1, .z = Z_MIXED, .d.span = 3},
        {.d.no_renorm = 1}, /* has no effect without a ramp */
        /* one span for all heads */
        {.z = Z_INSIDE, .z_shared = 1, .H = 3},
        {.z = Z_ZERO, .z_shared = 1, .d.no_renorm = 1, .H = 3},
        {.z = Z_INSIDE,
         .z_shared = 1,
         .d.no_renorm = 1,
         .d.first_key = -3,
         .P = 20,
         .d.delta_min = 1},
        /* ramps that are not integers */
        {.z = Z_INSIDE, .d.ramp = 1.5},
        {.z = Z_MIXED, .d.ramp = 2.75, .H = 3, .d.delta_min = 1, .P = 11},
        {.z = Z_INSIDE, .z_shared = 1, .d.ramp = 3.3, .d.no_renorm = 1, .N = 1}};
    size_t i;
    for (i = 0; i < sizeof cases / sizeof *cases; i++) attn_small(cases[i], 200);
}

/* Tests the borders of query tiles (128) and key tiles (384). */
static void attn_tiles(void) {
    static const size_t T[] = {1, 63, 65, 128, 129}, S[] = {0, 1, 255, 319, 320, 471};
    size_t t, s;
    for (t = 0; t < 5; t++)
        for (s = 0; s < 6; s++) {
            attn a = {0};
            a.B = 1;
            a.T = T[t];
            a.S = T[t] + S[s];
            a.H = 2;
            a.D = 3;
            a.P = a.S + 1;
            a.bias = BOTH;
            a.N = (t + s) % 3 ? 0 : 5;
            a.d.delta_min = (int)(s & 1);
            a.pe_heads = (int)(t & 1);
            a.d.max_span = 400;
            a.d.ramp = 32;
            a.z = (int)((t + s) % 5);
            a.d.eps = s % 3 == 2 ? 0.01 : 0;
            attn_case(&a, (t + s) % 4 == 0 ? 4 : 0);
            a.d.eps = 0;
            a.d.no_renorm = 1;
            a.z = 1 + (int)((t + s) % 4);
            a.z_shared = (int)(t & 1);
            a.d.ramp = s & 1 ? 32 : 17.3;
            attn_case(&a, (t + s) % 4 == 1 ? 4 : 0);
        }
}

/* Tests many keys, many zero keys, many persistent vectors, and wide heads. */
static void attn_large(void) {
#define SPANS(span) .z = Z_INSIDE, .d.delta_min = 1, .d.max_span = span, .d.ramp = 32

    static const struct {
        attn a;
        int entries;
    } cases[] = {{{.B = 1, .T = 33, .S = 300, .H = 2, .D = 64, .P = 300, SPANS(290)}, 3},
                 {{.B = 1,
                   .T = 129,
                   .S = 800,
                   .H = 2,
                   .D = 3,
                   .P = 800,
                   SPANS(790),
                   .d.eps = 1e-8,
                   .d.first_key = -7},
                  4},
                 {{.B = 1,
                   .T = 5,
                   .S = 9,
                   .H = 2,
                   .D = 3,
                   .P = 720,
                   .N = 390,
                   SPANS(700),
                   .d.first_key = -700},
                  4},
                 {{.B = 1, .T = 33, .S = 37, .H = 1, .D = 700, .P = 37, .N = 3, .bias = BOTH}, 4},
                 {{.B = 1,
                   .T = 33,
                   .S = 37,
                   .H = 2,
                   .D = 331,
                   .P = 45,
                   .pe_heads = 1,
                   .bias = BOTH,
                   .d.first_key = -3},
                  3},
                 {{.B = 1, .T = 2, .S = 3, .H = 1, .D = 10240, .d.first_key = -3}, 2},
                 {{.B = 2, .T = 129, .S = 300, .H = 2, .D = 3, .d.not_causal = 1}, 3}};

#undef SPANS
    size_t i;
    for (i = 0; i < sizeof cases / sizeof *cases; i++) attn_case(&cases[i].a, cases[i].entries);
}

/* A key that the ramp hides from most queries has by far the largest logit. For these
   queries, it must not become the running maximum. */
static void attn_hidden_maximum(void) {
    attn a = {.B = 1, .T = 33, .S = 37, .H = 2, .D = 3, .z = Z_INSIDE};
    problem p = start("a huge logit out of span", make_attention, &a);
    stx_tensor *in[MAX_IN], *y;
    stx_real *want, *dy;
    size_t j, c;
    int finite = 1;
    a.d.heads = 2;
    a.d.max_span = 40;
    a.d.ramp = 4;
    attn_inputs(&p, &a);
    for (c = 0; c < p.size[0]; c++) p.data[0][c] = fabs(p.data[0][c]) + 0.1;
    for (c = 0; c < 6; c++) p.data[1][5 * 6 + c] = 3000;
    want = random_values(p.size[0]);
    dy = random_values(p.size[0]);
    dense(&p, &a, NULL, NULL, want, NULL);
    y = forward(ctx1, &p, in);
    CHECK(y && test_error(y->data, want, y->size, 1e-3) <= 1e-12, "%s: off by %g", p.label,
          y ? test_error(y->data, want, y->size, 1e-3) : 0);
    stx_backward_from(ctx1, y, dy);
    for (j = 0; j < 7; j++)
        for (c = 0; in[j] && c < in[j]->size; c++)
            if (!(fabs(in[j]->grad[c]) < 1e100)) finite = 0;
    CHECK(finite, "%s: gradients are not finite", p.label);
    free(want);
    free(dy);
    finish(&p);
}

#define PICK(list) list[random_index(sizeof list / sizeof *list)]

/* Tests random combinations of options. */
static void attn_random(void) {
    static const size_t T[] = {1, 2, 7, 31, 33, 65}, more[] = {0, 0, 1, 5, 31, 64}, H[] = {1, 2, 3},
                        D[] = {1, 3, 5, 16}, N[] = {0, 0, 1, 3, 7}, span[] = {0, 0, 1, 6, 40, 200},
                        P[] = {0, 2, 9, 40, 140};
    static const double eps[] = {0, 0, 1e-8, 0.03}, scale[] = {0, 0, 0.7};
    static const ptrdiff_t first[] = {0, 0, 0, -1, -13, -70, 3, 9};
    static const int coin[] = {0, 1};
    int i;
    for (i = 0; i < 150; i++) {
        attn a = {0};
        a.B = 1 + (size_t)PICK(coin);
        a.T = PICK(T);
        a.S = a.T + PICK(more);
        a.H = PICK(H);
        a.D = PICK(D);
        a.N = PICK(N);
        a.d.eps = PICK(eps);
        a.d.scale = PICK(scale);
        a.d.first_key = PICK(first);
        a.bias = PICK(coin) ? CONTENT : 0;
        a.d.not_causal = i % 8 == 7;
        if (i % 5 == 0) a.d.dropout = 0.3;
        if (a.d.not_causal) {
            if (a.d.first_key < 0) a.d.first_key = 0;
        } else {
            a.d.span = PICK(span);
            a.d.delta_min = PICK(coin);
            a.P = PICK(P);
            a.pe_heads = PICK(coin);
            if (a.P && PICK(coin)) a.bias |= POSITION;
            a.z = (int)((test_rand() + 1) * 2.5) % 5;
            a.d.max_span = 5 + 7 * (i % 9);
            a.d.ramp = i % 2 ? 4 : 7;
        }
        a.pad = i % 3 == 2 ? 1 + i / 3 % 5 : 0;
        if (!a.d.not_causal && i % 7 < 3) {
            a.d.no_renorm = a.d.eps == 0;
            a.z_shared = i % 7 == 1;
            if (i % 7 == 2) a.d.ramp += 0.4;
        }
        attn_case(&a, i % 2 ? 6 : 0);
    }
}

/* Tests attention in which one tensor is query, key and value. */
static void attn_self(void) {
    attn a = {0};
    problem p = start("self-attention of one tensor", make_self_attention, &a);
    a.d.heads = 3;
    add(&p, 2, 31, 15, 0);
    add(&p, 33, 5, 0, 0);
    p.entries = 40;
    check(&p);
}

/* A huge span selects all keys and must not overflow. */
static void attn_huge_span(void) {
    static const size_t huge[] = {(size_t)1 << 40, SIZE_MAX / 2, SIZE_MAX};
    int i;
    for (i = 0; i < 3; i++) {
        attn a = {.B = 1, .T = 5, .S = 9, .H = 2, .D = 3};
        problem p = start("huge span", make_attention, &a);
        stx_tensor *in[MAX_IN], *y;
        stx_real *want;
        a.d.heads = 2;
        attn_inputs(&p, &a);
        want = random_values(30);
        dense(&p, &a, NULL, NULL, want, NULL);
        a.d.span = huge[i];
        y = forward(ctx1, &p, in);
        CHECK(y && test_error(y->data, want, 30, 1e-3) <= 1e-12, "span %zu is not every key: %s",
              huge[i], stx_error(ctx1));
        stx_clear_error(ctx1);
        free(want);
        finish(&p);
    }
}

static void row_attention(void) {
    attn_options();
    attn_tiles();
    attn_large();
    attn_hidden_maximum();
    attn_random();
    attn_pads();
    attn_pads_tiles();
    attn_wide();
    attn_dropout(2, 33, 40, 2, 0, 0, 0.3);
    attn_dropout(1, 65, 70, 3, 5, 0, 0.5);
    attn_dropout(2, 7, 9, 1, 2, -20, 0.25);
    attn_self();
    attn_huge_span();
}


/* >>adaptive */

enum { ROWS = 33, DIM = 12, CLUSTERS = 3 }; /* ROWS: 3 x 11 positions; CLUSTERS: the maximum */

typedef struct adaptive_user {
    stx_adaptive a;
    int32_t *id;
    size_t B, T;
} adaptive_user;

/* in: k tables, k projections, k biases, cluster_w, cluster_b, h, k projection biases */
static stx_adaptive with_inputs(const adaptive_user *u, stx_tensor **in) {
    stx_adaptive a = u->a;
    size_t c, k = a.clusters;
    for (c = 0; c < k; c++) {
        a.table[c] = in[c];
        a.proj[c] = in[k + c];
        a.bias[c] = in[2 * k + c];
    }
    a.cluster_w = in[3 * k];
    a.cluster_b = in[3 * k + 1];
    for (c = 0; c < k && a.proj_bias[0]; c++) a.proj_bias[c] = in[3 * k + 3 + c];
    return a;
}

static stx_tensor *make_adaptive_input(stx_ctx *x, stx_tensor **in, void *user) {
    adaptive_user *u = (adaptive_user *)user;
    stx_adaptive a = with_inputs(u, in);
    return stx_adaptive_input(x, &a, stx_tokens(x, u->id, u->B, u->T));
}

static stx_tensor *make_adaptive_softmax(stx_ctx *x, stx_tensor **in, void *user) {
    adaptive_user *u = (adaptive_user *)user;
    stx_adaptive a = with_inputs(u, in);
    return stx_adaptive_softmax(x, &a, in[3 * a.clusters + 2], stx_tokens(x, u->id, u->B, u->T));
}

/* Returns cluster c's dropout mask (ROWS, width of table c), or NULL without dropout.
   The mask has one row for every position. The mask comes from stx_dropout, which draws
   in the same order in the same step. */
static stx_real *mask_of(const problem *p, const adaptive_user *u, size_t c) {
    size_t e, i;
    stx_real *mask = NULL, one[ROWS * DIM];
    if (u->a.dropout == 0) return NULL;
    stx_set_step_index(ctx1, TICK);
    stx_begin(ctx1, STX_TRAIN);
    for (i = 0; i < ROWS * DIM; i++) one[i] = 1;
    for (e = 0; e < u->a.clusters; e++) {
        size_t w = p->dim[e][1];
        stx_tensor *t = stx_dropout(ctx1, stx_input(ctx1, one, ROWS, w, 0, 0), u->a.dropout);
        if (!t || e != c) continue;
        mask = random_values(ROWS * w);
        stx_get(ctx1, t, mask);
    }
    return mask;
}

/* Adds the inputs for `clusters` clusters, with or without projections to smaller
   widths. For an output, the inputs include biases and the parameters of the cluster
   logits. */
static void adaptive_inputs(problem *p, adaptive_user *u, int clusters, int projected,
                            int forward_columns, int output) {
    static const size_t end[CLUSTERS] = {7, 18, 31};
    size_t c, k = (size_t)clusters;
    memset(u, 0, sizeof *u);
    u->a.clusters = k;
    u->a.forward_columns = forward_columns;
    u->B = 3;
    u->T = ROWS / 3;
    u->id = ids_of(ROWS, end[k - 1]);
    for (c = 0; c < k; c++) u->a.end[c] = end[c];
    for (c = 0; c < k; c++) add(p, end[c] - (c ? end[c - 1] : 0), projected ? DIM >> c : DIM, 0, 0);
    for (c = 0; c < k; c++) add_if(p, projected, DIM, DIM >> c, 0, 0);
    for (c = 0; c < k; c++) add_if(p, output, end[c] - (c ? end[c - 1] : 0), 0, 0, 0);
    add_if(p, output && k > 1, k - 1, DIM, 0, 0);
    add_if(p, output && k > 1, k - 1, 0, 0, 0);
    if (output) add(p, 3, ROWS / 3, DIM, 0);
}

/* Returns the cluster of an id. *first receives the first id of the cluster. */
static size_t cluster_of(const stx_adaptive *a, size_t id, size_t *first) {
    size_t c = 0;
    while (id >= a->end[c]) c++;
    *first = c ? a->end[c - 1] : 0;
    return c;
}

/* Nonzero if y (3,11,DIM) is the embedding of the ids by definition: the id's row of
   the cluster's table, with dropout, projected and multiplied by `scale`. *zeros counts
   dropped elements. */
static int adaptive_input_is(const problem *p, const adaptive_user *u, const stx_tensor *y,
                             stx_real *const *mask, double scale, size_t *zeros) {
    size_t i, o, e, k = u->a.clusters, first;
    for (i = 0; i < ROWS; i++) {
        size_t id = (size_t)u->id[i], c = cluster_of(&u->a, id, &first), w = p->dim[c][1];
        const stx_real *proj = p->data[k + c];
        double row[DIM];
        for (e = 0; e < w; e++) {
            row[e] = p->data[c][(id - first) * w + e] * (mask[c] ? mask[c][i * w + e] : 1);
            *zeros += row[e] == 0;
        }
        for (o = 0; o < DIM; o++) {
            double s = proj ? 0 : row[o];
            for (e = 0; e < w && proj; e++) s += proj[o * w + e] * row[e];
            if (!CLOSE(y->data[i * DIM + o], scale * s, 1e-13)) return 0;
        }
    }
    return 1;
}

/* drop: 0: no dropout and the default scale; 1 and 2: dropout and scale[drop]. */
static void adaptive_input_case(int k, int projected, int drop) {
    static const double scale[] = {0, 1, -0.7}; /* 0: the default, sqrt(DIM) */
    adaptive_user u;
    problem p = start(drop ? "adaptive_input with dropout" : "adaptive_input", make_adaptive_input,
                      &u);
    stx_real *mask[CLUSTERS] = {NULL};
    stx_tensor *in[MAX_IN], *y, *y0;
    size_t zeros = 0;
    int c, good;
    adaptive_inputs(&p, &u, k, projected, 0, 0);
    u.a.dropout = drop ? 0.3 : 0;
    u.a.scale = scale[drop];
    p.random = drop;
    for (c = 0; c < k; c++) mask[c] = mask_of(&p, &u, (size_t)c);
    y = forward(ctx1, &p, in);
    good = y && y->ndim == 3 && y->dim[0] == 3 && y->dim[1] == ROWS / 3 && y->dim[2] == DIM
           && adaptive_input_is(&p, &u, y, mask, drop ? scale[drop] : sqrt(DIM), &zeros);
    CHECK(good && (zeros > 0) == (drop > 0), "adaptive_input, %d clusters, dropout %g: value", k,
          u.a.dropout);
    for (c = 0; c < k; c++) free(mask[c]);
    stx_begin(ctx1, STX_EVAL);
    for (c = 0; c < p.n; c++) in[c] = leaf(ctx1, &p, c);
    y = make_adaptive_input(ctx1, in, &u);
    u.a.dropout = 0;
    y0 = make_adaptive_input(ctx1, in, &u);
    CHECK(y && y0 && !memcmp(y->data, y0->data, y->size * sizeof(stx_real)),
          "adaptive_input: dropout in evaluation");
    u.a.dropout = drop ? 0.3 : 0;
    check(&p);
    free(u.id);
}

static void row_adaptive_input(void) {
    int k, projected, drop;
    for (k = 1; k <= CLUSTERS; k++)
        for (projected = 0; projected < 2; projected++)
            for (drop = 0; drop < 3; drop++) adaptive_input_case(k, projected, drop);
}

/* Computes the logits of cluster c for row h: those of its words and, in cluster 0,
   those of the other clusters. mask: dropout of the projected row, or NULL. Returns the
   number of logits. */
static size_t adaptive_logits(const problem *p, size_t k, size_t c, const stx_real *h,
                              const stx_real *mask, double *logits) {
    size_t w = p->dim[c][1], n = p->dim[c][0], e, o, v;
    double row[DIM];
    for (e = 0; e < w; e++) {
        row[e] = p->absent[k + c] ? h[e] : 0;
        for (o = 0; o < DIM && !p->absent[k + c]; o++) row[e] += p->data[k + c][o * w + e] * h[o];
        if (mask) row[e] *= mask[e];
    }
    for (v = 0; v < n; v++) {
        logits[v] = p->data[2 * k + c][v];
        for (e = 0; e < w; e++) logits[v] += p->data[c][v * w + e] * row[e];
    }
    for (v = 0; c == 0 && v + 1 < k; v++, n++) {
        logits[n] = p->data[3 * k + 1][v];
        for (e = 0; e < w; e++) logits[n] += p->data[3 * k][v * w + e] * row[e];
    }
    return n;
}

/* Returns the negative log softmax of logit `target`. */
static double nll_of(const double *logits, size_t n, size_t target) {
    double top = -1e300, s = 0;
    size_t v;
    for (v = 0; v < n; v++) top = fmax(top, logits[v]);
    for (v = 0; v < n; v++) s += exp(logits[v] - top);
    return top + log(s) - logits[target];
}

/* Returns -log p(id) of row h, by its definition. mask0 and mask: dropout of the row in
   the head and in the id's cluster, or NULL. */
static double adaptive_nll(const problem *p, const adaptive_user *u, const stx_real *h, size_t id,
                           const stx_real *mask0, const stx_real *mask) {
    size_t k = u->a.clusters, first, c = cluster_of(&u->a, id, &first), n, column;
    double logits[64], nll;
    n = adaptive_logits(p, k, 0, h, mask0, logits);
    if (c == 0) return nll_of(logits, n, id);
    column = u->a.forward_columns ? c - 1 : k - 1 - c;
    nll = nll_of(logits, n, u->a.end[0] + column);
    n = adaptive_logits(p, k, c, h, mask, logits);
    return nll + nll_of(logits, n, id - first);
}

static void adaptive_softmax_case(int k, int projected, int forward_columns, int drop) {
    adaptive_user u;
    problem p = start(drop ? "adaptive_softmax with dropout" : "adaptive_softmax",
                      make_adaptive_softmax, &u);
    stx_real *mask[CLUSTERS] = {NULL};
    stx_tensor *in[MAX_IN], *y;
    double want = 0;
    size_t i, c, first;
    adaptive_inputs(&p, &u, k, projected, forward_columns, 1);
    u.a.dropout = drop ? 0.3 : 0;
    p.random = drop;
    p.entries = 60;
    for (c = 0; c < (size_t)k; c++) mask[c] = mask_of(&p, &u, c);
    for (i = 0; i < ROWS; i++) {
        const stx_real *h = p.data[3 * k + 2] + i * DIM;
        c = cluster_of(&u.a, (size_t)u.id[i], &first);
        want += adaptive_nll(&p, &u, h, (size_t)u.id[i], mask[0] ? mask[0] + i * p.dim[0][1] : NULL,
                             mask[c] ? mask[c] + i * p.dim[c][1] : NULL)
                / ROWS;
    }
    y = forward(ctx1, &p, in);
    CHECK(y && y->size == 1 && CLOSE(y->data[0], want, 1e-13),
          "adaptive_softmax, %d clusters, dropout %g: expected %g, got %g", k, u.a.dropout, want,
          y ? y->data[0] : 0);
    for (c = 0; c < (size_t)k; c++) free(mask[c]);
    check(&p);
    free(u.id);
}

static void row_adaptive_softmax(void) {
    int k, projected, columns, drop;
    for (k = 1; k <= CLUSTERS; k++)
        for (projected = 0; projected < 2; projected++)
            for (columns = 0; columns < 2; columns++)
                for (drop = 0; drop < 2; drop++) adaptive_softmax_case(k, projected, columns, drop);
}

static stx_tensor *make_adaptive_softmax_tokens(stx_ctx *x, stx_tensor **in, void *user) {
    token_user *u = (token_user *)user;
    adaptive_user au;
    stx_adaptive a;
    au.a = u->a;
    a = with_inputs(&au, in);
    u->how.weights = u->weights ? stx_input(x, u->weights, u->B * u->T, 0, 0, 0) : NULL;
    return stx_adaptive_softmax_tokens(x, &a, in[3 * a.clusters + 2],
                                       stx_tokens(x, u->id, u->B, u->T), &u->how);
}

/* Tests adaptive token losses with k clusters. biased: whether the projections have
   biases. */
static void adaptive_tokens_case(int k, int options, int biased) {
    adaptive_user au;
    token_user u;
    problem p = start("adaptive_softmax_tokens", make_adaptive_softmax_tokens, &u);
    stx_tensor *in[MAX_IN], *y, *lp;
    stx_adaptive a;
    double nll[ROWS];
    size_t i, c;
    adaptive_inputs(&p, &au, k, 1, options % 2, 1);
    for (c = 0; c < (size_t)k; c++) add_if(&p, biased, p.dim[c][1], 0, 0, 0);
    token_options(&u, options, 3, ROWS / 3, au.a.end[k - 1]);
    u.a = au.a;
    if (biased) u.a.proj_bias[0] = (stx_tensor *)&u; /* any pointer but NULL;
                                                        with_inputs sets all of them */
    p.entries = 30;
    y = forward(ctx1, &p, in);
    au.a = u.a;
    a = with_inputs(&au, in);
    lp = stx_adaptive_log_probs(ctx1, &a, in[3 * k + 2]);
    for (i = 0; i < ROWS && y && lp; i++) {
        nll[i] = is_ignored(&u, i) ? 0 : -lp->data[i * lp->dim[1] + (size_t)u.id[i]];
        CHECK(CLOSE(u.how.nll->data[i], nll[i], 1e-12),
              "%d clusters, options %d: nll of row %zu: expected %g, got %g", k, options, i, nll[i],
              (double)u.how.nll->data[i]);
    }
    CHECK(y && lp && CLOSE(y->data[0], token_sum(&u, nll, ROWS), 1e-12),
          "%d clusters, options %d: expected a loss of %g, got %g: %s", k, options,
          token_sum(&u, nll, ROWS), y ? y->data[0] : 0, stx_error(ctx1));
    check(&p);
    free(u.id);
    free(u.weights);
    free(au.id);
}

static void row_adaptive_softmax_tokens(void) {
    int k, options, biased;
    for (k = 1; k <= CLUSTERS; k++)
        for (options = 0; options < TOKEN_OPTIONS; options += options ? 1 : 3)
            for (biased = 0; biased < 2; biased++)
                if (combines(options)) adaptive_tokens_case(k, options, biased);
}

/* The log-probabilities must agree with the loss, and their exponentials must sum to 1.
   The op must ignore dropout and record nothing. */
static void row_adaptive_log_probs(void) {
    int k, f;
    for (k = 1; k <= CLUSTERS; k++)
        for (f = 0; f < 2; f++) {
            adaptive_user u;
            problem p = start("adaptive_log_probs", make_adaptive_softmax, &u);
            stx_tensor *in[MAX_IN], *y;
            stx_adaptive a;
            size_t i, v, V;
            int good = 1;
            adaptive_inputs(&p, &u, k, 1, f, 1);
            u.a.dropout = 0.4;
            forward(ctx1, &p, in);
            a = with_inputs(&u, in);
            V = a.end[k - 1];
            y = stx_adaptive_log_probs(ctx1, &a, in[3 * k + 2]);
            CHECK(y && y->ndim == 2 && y->dim[0] == ROWS && y->dim[1] == V && !y->needs_grad,
                  "adaptive_log_probs: a wrong shape, or it is recorded: %s", stx_error(ctx1));
            for (i = 0; i < ROWS && y; i++) {
                const stx_real *h = p.data[3 * k + 2] + i * DIM;
                double sum = 0;
                for (v = 0; v < V; v++) {
                    double nll = adaptive_nll(&p, &u, h, v, NULL, NULL);
                    sum += exp(y->data[i * V + v]);
                    if (!CLOSE(-y->data[i * V + v], nll, 1e-12)) good = 0;
                }
                if (!CLOSE(sum, 1, 1e-12)) good = 0;
            }
            CHECK(good,
                  "adaptive_log_probs, %d clusters: not those of the loss, or their sum is not 1",
                  k);
            free(u.id);
            finish(&p);
        }
}

static stx_tensor *make_dropout_variational(stx_ctx *x, stx_tensor **in, void *user) {
    return stx_dropout_variational(x, in[0], *(double *)user);
}

/* The mask must be drawn once for all time steps, separately for each row and channel. */
static void dropout_variational_mask(double p) {
    size_t B = 3, T = 5, C = 4001, b, t, c, kept = 0;
    stx_real *a = random_values(B * T * C);
    stx_tensor *y;
    int same = 1;
    stx_begin(ctx1, STX_TRAIN);
    y = stx_dropout_variational(ctx1, stx_input(ctx1, a, B, T, C, 0), p);
    for (b = 0; y && b < B; b++)
        for (c = 0; c < C; c++) {
            int on = y->data[b * T * C + c] != 0;
            kept += (size_t)on;
            for (t = 0; t < T; t++) {
                size_t i = (b * T + t) * C + c;
                same &= on ? fabs(y->data[i] - a[i] / (1 - p)) < 1e-4 : y->data[i] == 0;
            }
        }
    CHECK(y && same, "dropout_variational: the mask is not the same at all times");
    CHECK(fabs((double)kept / (double)(B * C) - (1 - p)) < 0.02,
          "dropout_variational: %zu of %zu are kept", kept, B * C);
    stx_begin(ctx1, STX_EVAL);
    y = stx_input(ctx1, a, B, T, C, 0);
    CHECK(stx_dropout_variational(ctx1, y, p) == y,
          "dropout_variational: evaluation is not the identity");
    free(a);
}

static void row_dropout_variational(void) {
    static const size_t s[][3] = {{2, 5, 7}, {3, 1, 33}, {1, 9, 1}};
    double p = 0.4;
    int i;
    for (i = 0; i < 3; i++) {
        problem q = start("dropout_variational", make_dropout_variational, &p);
        q.random = 1;
        add(&q, s[i][0], s[i][1], s[i][2], 0);
        check(&q);
    }
    dropout_variational_mask(p);
}

/* user: ALONE, GRADIENT_BEFORE or SAME_TENSOR, as for residual_norm */
static stx_tensor *make_rezero(stx_ctx *x, stx_tensor **in, void *user) {
    int how = *(int *)user;
    stx_tensor *y = stx_rezero(x, in[0], how == SAME_TENSOR ? in[0] : in[1], in[2]);
    return how == GRADIENT_BEFORE ? stx_add(x, y, stx_mul(x, in[0], in[1])) : y;
}

static void row_rezero(void) {
    static const size_t s[][3] = {{5, 7, 0}, {2, 3, 65}, {1, 0, 0}, {4099, 0, 0}};
    static const int hows[] = {ALONE, SAME_TENSOR, GRADIENT_BEFORE};
    int i, k, fixed;
    for (i = 0; i < 4; i++)
        for (k = 0; k < 3; k++)
            for (fixed = 0; fixed < 4; fixed++) {
                int how = hows[k];
                problem p = start("rezero", make_rezero, &how);
                p.entries = 50;
                add(&p, s[i][0], s[i][1], s[i][2], 0);
                add(&p, s[i][0], s[i][1], s[i][2], 0);
                add(&p, 1, 0, 0, 0);
                if (fixed) p.fixed[fixed - 1] = 1;
                if (how == SAME_TENSOR) {
                    p.fixed[1] = 1;
                    p.fixed[0] = 0;
                }
                check(&p);
            }
}


/* >>families */

enum { NO_STATES, WITH_STATES, ONLY_STATES };

enum { NO_PADDING, PAD_THIRD, PAD_LAST_TWO, PAD_ALL };

/* A case of the recurrence. k: number of matrices in u; D: number of directions. With
   `open`, forget gates are near 1, so that the state at the start of a time chunk
   affects its end. */
typedef struct recurrence {
    size_t B, T, k, O, D;
    int no_xr, no_v, V, no_c0, mask; /* the inputs */
    int tanh, states, pads, open;
    double alpha;
} recurrence;

/* Calls the op and returns h followed by the last states, or only one of the two. */
static stx_tensor *make_recurrence(stx_ctx *x, stx_tensor **in, void *user) {
    const recurrence *u = (const recurrence *)user;
    stx_sru_recurrence_in c;
    stx_tensor *h, *last = NULL;
    int32_t pad[1024];
    size_t i;
    memset(&c, 0, sizeof c);
    c.u = in[0];
    c.bias = in[1];
    c.xr = in[2];
    c.v = in[3];
    c.V = in[4];
    c.c0 = in[5];
    c.mask = in[6];
    c.directions = u->D;
    c.alpha = u->alpha;
    c.tanh = u->tanh;
    for (i = 0; i < u->B * u->T; i++)
        pad[i] = u->pads == PAD_ALL || (u->pads == PAD_THIRD && i % 3 == 1)
                 || (u->pads == PAD_LAST_TWO && i % u->T >= u->T - 2);
    if (u->pads) c.pad = stx_tokens(x, pad, u->B, u->T);
    h = stx_sru_recurrence(x, &c, u->states ? &last : NULL);
    if (!u->states || !h) return h;
    last = stx_reshape(x, last, u->B, 1, u->O, 0);
    return u->states == WITH_STATES ? stx_concat(x, h, last) : last;
}

/* Runs a case. Sizes that are 0 are replaced by their defaults. */
static void recurrence_case(recurrence u) {
    problem p = start("sru_recurrence", make_recurrence, &u);
    size_t i;
    if (!u.B) u.B = 2;
    if (!u.T) u.T = 5;
    if (!u.k) u.k = 3;
    if (!u.O) u.O = 6;
    if (!u.D) u.D = 1;
    p.entries = 60;
    add(&p, u.B, u.T, u.k, u.O);
    add(&p, 2, u.O, 0, 0);
    for (i = 0; u.open && i < u.O; i++) p.data[1][i] += 7;
    add_if(&p, !u.no_xr, u.B, u.T, u.O, 0);
    add_if(&p, !u.no_v, 2, u.O, 0, 0);
    add_if(&p, u.V, u.B, u.T, 2, u.O);
    add_if(&p, !u.no_c0, u.B, u.O, 0, 0);
    add_if(&p, u.mask, u.B, u.O, 0, 0);
    p.fixed[6] = u.mask;
    for (i = 0; i < p.size[6]; i++) p.data[6][i] = i % 3 ? 1.5 : 0;
    check(&p);
}

static void row_sru_recurrence(void) {
    static const recurrence cases[] = {
        /* numbers of inputs and directions */
        {.B = 0},
        {.k = 4, .no_xr = 1},
        {.no_xr = 1},
        {.D = 2},
        {.D = 2, .k = 4, .no_xr = 1, .tanh = 1},
        {.tanh = 1},
        {.alpha = 1.7, .mask = 1},
        /* without v, the forward pass can divide time among threads */
        {.no_v = 1},
        {.no_v = 1, .B = 1, .T = 200, .O = 3, .open = 1, .states = WITH_STATES},
        {.V = 1},
        {.V = 1, .no_v = 1, .tanh = 1, .mask = 1, .D = 2},
        {.no_c0 = 1},
        {.states = WITH_STATES},
        {.states = ONLY_STATES, .D = 2},
        {.states = WITH_STATES, .pads = PAD_THIRD},
        {.states = WITH_STATES, .pads = PAD_LAST_TWO, .D = 2, .alpha = 0.7},
        {.states = WITH_STATES, .pads = PAD_ALL},
        {.states = WITH_STATES, .T = 1},
        {.states = WITH_STATES, .B = 1, .T = 70, .O = 17},
        /* several time chunks in the backward pass */
        {.states = WITH_STATES, .B = 1, .T = 300, .O = 2, .V = 1, .pads = PAD_THIRD},
        {.states = WITH_STATES, .B = 1, .T = 131, .O = 4, .D = 2, .tanh = 1, .mask = 1},
        /* several column blocks */
        {.states = WITH_STATES, .B = 1, .T = 3, .O = 700},
        {.B = 2, .T = 3, .O = 1101, .V = 1, .pads = PAD_THIRD},
        /* time chunks with open gates */
        {.states = WITH_STATES, .B = 1, .T = 300, .O = 2, .open = 1, .pads = PAD_THIRD},
        {.states = WITH_STATES, .B = 1, .T = 200, .O = 4, .D = 2, .open = 1, .tanh = 1},
        {.states = WITH_STATES, .B = 3, .T = 33, .O = 1, .k = 4, .no_xr = 1}};
    size_t i;
    for (i = 0; i < sizeof cases / sizeof *cases; i++) recurrence_case(cases[i]);
}

/* Options of the private ops of seqtx_compressive.h. */
typedef struct comp_user {
    int kind;
    stx_comp_groups g;
    int32_t *skip, *pad, *first;
    stx_comp_desc d;
} comp_user;

static stx_tensor *make_comp_gate(stx_ctx *x, stx_tensor **in, void *user) {
    stx_tensor *t[8] = {NULL};
    memcpy(t, in, 6 * sizeof *t);
    return inner_comp_gate(x, ((comp_user *)user)->kind, t);
}

/* in: x, y, and the weights and biases of the linear layers that compute p0 from y and
   p1 from x. The gate computes the bias gradients. If d.glu is set, x is added to the
   result, so that x has a gradient before the gate's backward pass. */
static stx_tensor *make_comp_gate_biased(stx_ctx *x, stx_tensor **in, void *user) {
    stx_tensor *t[8] = {NULL}, *y;
    comp_user *u = (comp_user *)user;
    if (u->kind == STX_COMP_GATE_GRU) t[0] = in[0];
    t[2] = stx_linear(x, in[1], in[2], stx_detach(x, in[3]), STX_ACT_NONE);
    t[6] = in[3];
    if (u->kind == STX_COMP_GATE_GRU) {
        t[3] = stx_linear(x, in[0], in[4], stx_detach(x, in[5]), STX_ACT_NONE);
        t[7] = in[5];
    }
    y = inner_comp_gate(x, u->kind, t);
    return u->d.glu ? stx_add(x, in[0], y) : y;
}

/* Returns the width of the gate's parameters p for D channels. */
static size_t comp_gate_width(int kind, size_t D) {
    if (kind == STX_COMP_GATE_GRU) return 3 * D;
    return kind == STX_COMP_GATE_GLU ? 2 * D : D;
}

static void row_comp_gate(void) {
    static const size_t s[][3] = {{2, 3, 5}, {1, 2, 67}};
    /* for each kind: whether the gate has an input y, and how many inputs p0, p1, .. it
       has */
    static const int y[] = {0, 0, 1, 1, 1, 0, 0, 0, 0, 0}, count[] = {0, 2, 1, 1, 1, 2, 4, 2, 1, 1};
    comp_user u;
    problem p;
    size_t w;
    int i, k;
    memset(&u, 0, sizeof u);
    for (u.kind = STX_COMP_GATE_GRU; u.kind <= STX_COMP_GATE_GLU; u.kind++)
        for (i = 0; i < 2; i++) {
            p = start("comp_gate", make_comp_gate, &u);
            w = comp_gate_width(u.kind, s[i][2]);
            add_if(&p, u.kind != STX_COMP_GATE_GLU, s[i][0], s[i][1], s[i][2], 0);
            add_if(&p, y[u.kind], s[i][0], s[i][1], s[i][2], 0);
            for (k = 0; k < 4; k++) add_if(&p, k < count[u.kind], s[i][0], s[i][1], w, 0);
            check(&p);
        }
    for (k = 0; k < 4; k++) {
        p = start("comp_gate with biases", make_comp_gate_biased, &u);
        u.kind = k / 2 ? STX_COMP_GATE_GLU : STX_COMP_GATE_GRU;
        u.d.glu = k % 2;
        w = comp_gate_width(u.kind, 5);
        add(&p, 2, 3, 5, 0);
        add(&p, 2, 3, 5, 0);
        for (i = 0; i < 2; i++) {
            add(&p, w, 5, 0, 0);
            add(&p, w, 0, 0, 0);
        }
        check(&p);
    }
    u.kind = STX_COMP_GATE_GTRXL;
    p = start("comp_gate of a constant", make_comp_gate, &u);
    add(&p, 2, 3, 5, 0);
    add_absent(&p);
    for (k = 0; k < 4; k++) add(&p, 2, 3, 5, 0);
    p.fixed[0] = p.fixed[3] = 1;
    check(&p);
}

static stx_tensor *make_comp_distance(stx_ctx *x, stx_tensor **in, void *user) {
    comp_user *u = (comp_user *)user;
    stx_tensor *rel_error,
        *y = inner_comp_distance(x, in[0], in[1], u->skip ? stx_tokens(x, u->skip, 3, 5) : NULL,
                                 u->skip ? 77 : 105, &rel_error);
    double off = 0, all = 0;
    size_t i;
    for (i = 0; i < 105; i++) {
        double a = (double)in[0]->data[i], t = (double)in[1]->data[i];
        if (u->skip && u->skip[i / 7]) continue;
        off += (a - t) * (a - t);
        all += t * t;
    }
    CHECK(y && CLOSE(stx_item(x, y), off / (u->skip ? 77 : 105), 1e-12)
              && CLOSE(stx_item(x, rel_error), off / all, 1e-12),
          "comp_distance: %s", stx_error(x));
    return y;
}

static void row_comp_distance(void) {
    static int32_t skip[15] = {0, 1, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0, 1};
    int i;
    for (i = 0; i < 2; i++) {
        comp_user u;
        problem p = start("comp_distance", make_comp_distance, &u);
        u.skip = i ? skip : NULL;
        add(&p, 3, 5, 7, 0);
        add(&p, 3, 5, 7, 0);
        p.fixed[1] = 1;
        check(&p);
    }
}

static stx_tensor *make_comp_folded(stx_ctx *x, stx_tensor **in, void *user) {
    return inner_comp_folded(x, in[0], &((comp_user *)user)->g);
}

static void row_comp_folded(void) {
    static int32_t first[3] = {0, 4, 7}, pad[21] = {0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0};
    /* groups, taps, step */
    static const size_t s[][3] = {{3, 3, 3}, {4, 5, 2}, {2, 3, 4}, {1, 9, 9}};
    int i, k;
    for (i = 0; i < 4; i++)
        for (k = 0; k < 4; k++) {
            comp_user u;
            problem p = start("comp_folded", make_comp_folded, &u);
            memset(&u, 0, sizeof u);
            u.g.B = 3;
            u.g.rows = 7;
            u.g.groups = s[i][0];
            u.g.taps = s[i][1];
            u.g.step = s[i][2];
            u.g.D = 5;
            u.g.at = -(ptrdiff_t)(s[i][1] - s[i][2] * (s[i][1] > s[i][2]));
            if (k & 1 && (7 + s[i][2] - 1) / s[i][2] <= s[i][0]) u.g.first = first;
            if (k & 2) u.g.pad = pad;
            add(&p, 3, s[i][0], s[i][1] * 5, 0);
            check(&p);
        }
}

static stx_tensor *make_comp_zero(stx_ctx *x, stx_tensor **in, void *user) {
    return inner_comp_zero(x, in[0], stx_tokens(x, ((comp_user *)user)->pad, 3, 5));
}

static void row_comp_zero(void) {
    static int32_t pad[15] = {0, 1, 0, 0, 0, 1, 1, 1, 1, 1, 0, 0, 0, 0, 1};
    comp_user u;
    problem p = start("comp_zero", make_comp_zero, &u);
    u.pad = pad;
    add(&p, 3, 5, 7, 0);
    check(&p);
}

static stx_tensor *make_comp_all_heads(stx_ctx *x, stx_tensor **in, void *user) {
    return inner_comp_all_heads(x, &((comp_user *)user)->d, in[0]);
}

static void row_comp_all_heads(void) {
    static const size_t s[][2] = {{6, 1}, {6, 2}, {6, 3}};
    int i;
    for (i = 0; i < 3; i++) {
        comp_user u;
        problem p = start("comp_all_heads", make_comp_all_heads, &u);
        memset(&u, 0, sizeof u);
        u.d.dim = 30;
        u.d.heads = s[i][0];
        u.d.kv_heads = s[i][1];
        add(&p, 3, 4, 2 * s[i][1] * 5, 0);
        check(&p);
    }
}

typedef struct stack_user {
    stx_sru_desc d;
    size_t B, T, M, O, window;
    int pads;
    /* the two contexts, and the model in each of them */
    stx_ctx *of[2];
    stx_sru *m[2];
} stack_user;

/* in: x, the first state, and memory or NULL. y: h, followed by the last states of all
   layers. */
static stx_tensor *make_stack(stx_ctx *x, stx_tensor **in, void *user) {
    stack_user *u = (stack_user *)user;
    stx_sru *m = u->m[x == u->of[0] ? 0 : 1];
    stx_sru_io io;
    stx_tensor *c0[4], *mem[4], *last[4], *h;
    int32_t pad[64];
    size_t i;
    memset(&io, 0, sizeof io);
    for (i = 0; i < 4; i++) {
        c0[i] = in[1];
        mem[i] = in[2];
    }
    io.c0 = c0;
    io.memory = in[2] ? mem : NULL;
    io.last = last;
    io.window = u->window;
    for (i = 0; i < 64; i++) pad[i] = i % 4 == 1;
    if (u->pads) io.pad = stx_tokens(x, pad, u->B, u->T);
    if (u->pads && u->M) io.memory_pad = stx_tokens(x, pad, u->B, u->M);
    h = stx_sru_forward(m, in[0], &io);
    for (i = 0; h && i < m->desc.layers; i++)
        h = stx_concat(x, h, stx_reshape(x, last[i], u->B, 1, m->O, 0));
    return h;
}

/* Creates a stack in each of the two contexts, with identical parameters. */
static void stack_models(stack_user *u, size_t number) {
    size_t j, e;
    int k;
    for (k = 0; k < 2; k++) {
        stx_params *p = stx_params_create(k ? ctx3 : ctx1);
        u->of[k] = p->ctx;
        u->m[k] = stx_sru_create(p, "", &u->d);
        CHECK(u->m[k] != NULL, "stack %zu: %s", number, stx_error(p->ctx));
        if (!u->m[k]) return;
        for (j = 0; j < p->count; j++) {
            const stx_tensor *t = p->tensor[j];
            test_state = 88172645463325252u + j + 100 * (uint64_t)number;
            test_rand();
            for (e = 0; t->ndim > 1 && e < t->size; e++) t->data[e] = 0.8 * test_rand();
        }
    }
}

static void row_sru_forward(void) {
#define ATTENTION .d.transform = STX_SRU_ATTENTION
    static const stack_user cases[] = {
        {.M = 0},
        {.d.bidirectional = 1, .d.hidden = 2, .d.norm = STX_SRU_NORM_BEFORE, .d.rescale = 1},
        {.d.input = 3, .d.proj = 3, .d.norm = STX_SRU_NORM_AFTER, .pads = 1, .d.zero_pads = 1},
        {.d.input = 3, .d.input_first = 1, .d.tanh = 1, .d.dropout = 0.3, .d.rnn_dropout = 0.3},
        {ATTENTION, .d.proj = 4, .d.heads = 2, .M = 3, .d.alpha_init = 0.6},
        {ATTENTION, .d.proj = 4, .M = 5, .window = 3, .d.alpha_init = 0.6,
         .d.norm = STX_SRU_NORM_BEFORE, .pads = 1},
        {ATTENTION, .d.proj = 4, .M = 2, .d.alpha_init = 0.6, .d.dropout = 0.2,
         .d.attn_dropout = 0.2, .d.attn_norm_first = 1},
        {ATTENTION, .d.proj = 2, .d.bidirectional = 1, .d.hidden = 2, .d.not_causal = 1, .pads = 1,
         .d.alpha_init = -0.4},
        {ATTENTION, .d.proj = 4, .M = 2, .d.alpha_init = 0.5, .d.literal = STX_SRU_LITERAL,
         .d.norm = STX_SRU_NORM_BEFORE, .pads = 1}};
#undef ATTENTION
    size_t i;
    for (i = 0; i < sizeof cases / sizeof *cases; i++) {
        stack_user u = cases[i];
        problem p = start("sru_forward", make_stack, &u);
        u.B = 2;
        u.T = 4;
        u.d.layers = 2;
        if (!u.d.input) u.d.input = 4;
        if (!u.d.hidden) u.d.hidden = 4;
        stack_models(&u, i);
        if (!u.m[0] || !u.m[1]) return;
        u.O = u.m[0]->O;
        p.random = u.d.dropout > 0;
        p.entries = 60;
        add(&p, u.B, u.T, u.d.input, 0);
        add(&p, u.B, u.O, 0, 0);
        add_if(&p, u.M > 0, u.B, u.M, u.d.input, 0);
        check(&p);
    }
}

static stx_tensor *make_attention_kv(stx_ctx *x, stx_tensor **in, void *user) {
    stx_attention_desc *d = (stx_attention_desc *)user;
    stx_attention_in a;
    memset(&a, 0, sizeof a);
    a.q = in[0];
    a.kv = in[1];
    return stx_attention(x, &a, d);
}

/* Computes attention of q (B,T,C) over k and v (B,S,C), all in host memory. */
static stx_tensor *separate_attention(const stx_attention_desc *d, const stx_real *q,
                                      const stx_real *k, const stx_real *v, size_t B, size_t T,
                                      size_t S, size_t C) {
    stx_attention_in a;
    memset(&a, 0, sizeof a);
    a.q = stx_input(ctx1, q, B, T, C, 0);
    a.k = stx_input(ctx1, k, B, S, C, 0);
    a.v = stx_input(ctx1, v, B, S, C, 0);
    return stx_attention(ctx1, &a, d);
}

/* Tests keys and values in one tensor: the gradients must be right, and the result must
   be bit-identical to the result with separate tensors. */
static void attention_kv(void) {
    /* B, T, S, H, D */
    static const size_t s[][5] = {{2, 5, 9, 2, 3}, {1, 1, 70, 1, 16}, {2, 33, 65, 3, 8}};
    int i;
    for (i = 0; i < 3; i++) {
        size_t B = s[i][0], T = s[i][1], S = s[i][2], H = s[i][3], C = H * s[i][4], r;
        stx_attention_desc d;
        stx_attention_in a;
        stx_tensor *y;
        stx_real *q, *k, *v, *both, *want;
        problem p = start("attention of kv", make_attention_kv, &d);
        memset(&d, 0, sizeof d);
        d.heads = H;
        d.span = i == 2 ? 20 : 0;
        p.entries = 60;
        q = add(&p, B, T, C, 0);
        both = add(&p, B, S, 2 * C, 0);
        k = random_values(B * S * C);
        v = random_values(B * S * C);
        want = random_values(B * T * C);
        for (r = 0; r < B * S; r++) {
            memcpy(k + r * C, both + r * 2 * C, C * sizeof *k);
            memcpy(v + r * C, both + r * 2 * C + C, C * sizeof *v);
        }
        stx_begin(ctx1, STX_EVAL);
        y = separate_attention(&d, q, k, v, B, T, S, C);
        if (y) stx_get(ctx1, y, want);
        memset(&a, 0, sizeof a);
        a.q = stx_input(ctx1, q, B, T, C, 0);
        a.kv = stx_input(ctx1, both, B, S, 2 * C, 0);
        y = stx_attention(ctx1, &a, &d);
        CHECK(y && !memcmp(y->data, want, y->size * sizeof *want),
              "attention of kv, case %d: separate keys and values give another result", i);
        free(k);
        free(v);
        free(want);
        check(&p);
    }
}

/* Sizes of attention over m cached and T new rows. groups: number of head groups, or 0
   without a learned span. P: whether there are positions; N: number of persistent
   vectors. */
typedef struct cached_sizes {
    size_t B, T, m, H, D;
    int groups, P, N;
    double dropout;
} cached_sizes;

/* Options, and the layout of the cache: the rows and heads of each group, and the index
   of each head in its group. */
typedef struct cached_attn {
    stx_attention_desc d;
    stx_head_groups groups;
    int grouped;
    size_t rows[3], heads[3], place[256];
} cached_attn;

/* in: qkv of the new rows, keys and values of up to three groups, pe, span_fraction,
   persistent_k, persistent_v. */
static stx_tensor *make_attention_cached(stx_ctx *x, stx_tensor **in, void *user) {
    const cached_attn *u = (const cached_attn *)user;
    stx_attention_in a;
    memset(&a, 0, sizeof a);
    a.qkv = in[0];
    a.cached[0] = in[1];
    a.cached[1] = in[2];
    a.cached[2] = in[3];
    if (u->grouped) a.groups = &u->groups;
    a.pe = in[4];
    a.span_fraction = in[5];
    a.persistent_k = in[6];
    a.persistent_v = in[7];
    return stx_attention(x, &a, &u->d);
}

/* Assigns heads to groups. z: the spans, which are shorter in later groups. */
static cached_attn cached_layout(const cached_sizes *s, stx_real *z) {
    static const double span[3] = {0.6, 0.3, 0.1};
    const size_t m = s->m;
    cached_attn u;
    size_t h, g, reach;
    memset(&u, 0, sizeof u);
    u.d.heads = s->H;
    u.d.delta_min = 1;
    u.d.dropout = s->dropout;
    u.grouped = s->groups > 0;
    u.groups.count = u.grouped ? (size_t)s->groups : 1;
    if (u.grouped) {
        u.d.max_span = (double)m;
        u.d.ramp = 5;
    }
    for (h = 0; h < s->H; h++) {
        g = h % u.groups.count;
        z[h] = (floor(span[g] * (double)m) + 0.37) / (double)(m ? m : 1);
        reach = m;
        if (g) reach = STX_MIN(m, stx_attention_reach(z[h], u.d.max_span, u.d.ramp, m) + 1);
        u.groups.of[h] = (unsigned char)g;
        u.place[h] = u.heads[g]++;
        u.rows[g] = STX_MAX(u.rows[g], reach);
    }
    return u;
}

static void cached_inputs(problem *p, const cached_sizes *s, const cached_attn *u,
                          const stx_real *z) {
    const size_t N = (size_t)s->N;
    size_t g;
    stx_real *spans;
    add(p, s->B, s->T, 3 * s->H * s->D, 0);
    for (g = 0; g < 3; g++) add_if(p, u->rows[g] > 0, s->B, u->rows[g], 2 * s->D * u->heads[g], 0);
    add_if(p, s->P, s->m + s->T, s->D, 0, 0);
    spans = add_if(p, u->grouped, s->H, 0, 0, 0);
    if (spans) memcpy(spans, z, s->H * sizeof *z);
    add_if(p, s->N, s->H, N, s->D, 0);
    add_if(p, s->N, s->H, N, s->D, 0);
    p->random = s->dropout > 0;
    p->entries = 60;
}

/* Copies head h of batch row b to separate q (B,T,C), k and v (B,S,C). Cached rows that
   no group keeps are set to 0, because they must not be read. */
static void separate_head(const problem *p, const cached_sizes *s, const cached_attn *u, size_t b,
                          size_t h, stx_real *q, stx_real *k, stx_real *v) {
    const size_t T = s->T, m = s->m, D = s->D, C = s->H * D, S = m + T, g = u->groups.of[h],
                 rows = u->rows[g], width = D * u->heads[g], bytes = D * sizeof *q;
    size_t r;
    for (r = 0; r < T; r++) {
        const stx_real *row = p->data[0] + (b * T + r) * 3 * C + h * D;
        size_t at = (b * S + m + r) * C + h * D;
        memcpy(q + (b * T + r) * C + h * D, row, bytes);
        memcpy(k + at, row + C, bytes);
        memcpy(v + at, row + 2 * C, bytes);
    }
    for (r = 0; r < m; r++) {
        size_t at = (b * S + r) * C + h * D;
        const stx_real *row;
        if (r + rows < m) {
            memset(k + at, 0, bytes);
            memset(v + at, 0, bytes);
            continue;
        }
        row = p->data[1 + g] + (b * rows + r + rows - m) * 2 * width + u->place[h] * D;
        memcpy(k + at, row, bytes);
        memcpy(v + at, row + width, bytes);
    }
}

/* Compares the result of cached attention with the result for separate q, k and v, then
   checks all gradients. */
static void attention_cached_case(const cached_sizes *s, size_t number) {
    const size_t B = s->B, T = s->T, H = s->H, D = s->D, C = H * D, S = s->m + T, N = (size_t)s->N;
    stx_real *z = random_values(H), *q, *k, *v, *want;
    cached_attn u = cached_layout(s, z);
    problem p = start("attention, cached", make_attention_cached, &u);
    stx_tensor *y, *in[MAX_IN];
    stx_attention_in a;
    double off = 0;
    size_t b, h, r;
    cached_inputs(&p, s, &u, z);
    q = random_values(B * T * C);
    k = random_values(B * S * C);
    v = random_values(B * S * C);
    want = random_values(B * T * C);
    for (b = 0; b < B; b++)
        for (h = 0; h < H; h++) separate_head(&p, s, &u, b, h, q, k, v);

    stx_set_step_index(ctx1, TICK);
    stx_begin(ctx1, STX_TRAIN);
    memset(&a, 0, sizeof a);
    a.q = stx_input(ctx1, q, B, T, C, 0);
    a.k = stx_input(ctx1, k, B, S, C, 0);
    a.v = stx_input(ctx1, v, B, S, C, 0);
    if (s->P) a.pe = stx_input(ctx1, p.data[4], S, D, 0, 0);
    if (u.grouped) a.span_fraction = stx_input(ctx1, z, H, 0, 0, 0);
    if (N) a.persistent_k = stx_input(ctx1, p.data[6], H, N, D, 0);
    if (N) a.persistent_v = stx_input(ctx1, p.data[7], H, N, D, 0);
    y = stx_attention(ctx1, &a, &u.d);
    CHECK(y, "attention, cached: %s", stx_error(ctx1));
    if (y) stx_get(ctx1, y, want);

    y = forward(ctx1, &p, in);
    CHECK(y && y->size == B * T * C, "attention, cached, case %zu: %s", number, stx_error(ctx1));
    for (r = 0; y && r < y->size; r++) raise_worst(&off, fabs(y->data[r] - want[r]));
    CHECK(off <= (T > 3 ? 0 : 1e-14),
          "attention, cached, case %zu: off by %g from separate keys and values", number, off);
    free(z);
    free(q);
    free(k);
    free(v);
    free(want);
    check(&p);
}

static void attention_cached(void) {
    static const cached_sizes s[] = {
        /* B, T, m, H, D, groups, P, N, dropout */
        {2, 5, 4, 2, 3, 0, 0, 0, 0},    {2, 5, 0, 2, 3, 0, 1, 0, 0},
        {1, 9, 70, 3, 4, 0, 1, 2, 0},   {2, 7, 60, 4, 4, 3, 1, 0, 0.2},
        {1, 40, 290, 3, 8, 2, 1, 3, 0}, {2, 2, 60, 4, 4, 3, 1, 1, 0}};
    size_t i;
    for (i = 0; i < sizeof s / sizeof *s; i++) attention_cached_case(&s[i], i);
}

/* The queries are part of a constant qkv; the keys and values are some rows of a
   constant kv, or a whole kv with a gradient. Results and gradients must be
   bit-identical to those with separate copies. */
static void attention_parts(void) {
    enum { B = 2, T = 5, S = 9, C = 6, KV_FIRST = 2, KV_ROWS = 6 };

    static stx_real q[B * T * 3 * C], kv[B * S * 2 * C];
    stx_attention_desc d;
    stx_attention_in in;
    stx_tensor *Q, *K, *y[2];
    size_t i, all;
    memset(&d, 0, sizeof d);
    d.heads = 2;
    d.not_causal = 1;
    for (i = 0; i < B * T * 3 * C; i++) q[i] = sin((double)i * 0.37);
    for (i = 0; i < B * S * 2 * C; i++) kv[i] = cos((double)i * 0.61);
    for (all = 0; all < 2; all++) {
        stx_begin(ctx1, STX_TRAIN);
        Q = stx_input(ctx1, q, B, T, 3 * C, 0);
        K = all ? stx_variable(ctx1, kv, B, S, 2 * C, 0) : stx_input(ctx1, kv, B, S, 2 * C, 0);
        memset(&in, 0, sizeof in);
        in.qkv = Q;
        in.kv = K;
        if (!all) {
            in.kv_first = KV_FIRST;
            in.kv_rows = KV_ROWS;
        }
        y[0] = stx_attention(ctx1, &in, &d);
        memset(&in, 0, sizeof in);
        in.q = stx_slice_channels(ctx1, Q, 0, C);
        if (all)
            in.kv = stx_variable(ctx1, kv, B, S, 2 * C, 0);
        else
            in.kv = stx_slice(ctx1, K, KV_FIRST, KV_FIRST + KV_ROWS);
        y[1] = stx_attention(ctx1, &in, &d);
        CHECK(y[0] && y[1] && !memcmp(y[0]->data, y[1]->data, y[0]->size * sizeof *q),
              "parts of tensors: the results differ %s", stx_error(ctx1));
        if (!all) continue;
        stx_backward(ctx1, stx_add(ctx1, stx_mean(ctx1, stx_mul(ctx1, y[0], y[0])),
                                   stx_mean(ctx1, stx_mul(ctx1, y[1], y[1]))));
        CHECK(!memcmp(K->grad, in.kv->grad, K->size * sizeof *q),
              "queries of a constant qkv: the gradients differ");
    }
}

static void row_attention_all(void) {
    row_attention();
    attention_kv();
    attention_cached();
    attention_parts();
}

typedef struct mix_user {
    size_t period, rows_per_draw;
} mix_user;

static stx_tensor *make_par_mix(stx_ctx *x, stx_tensor **in, void *user) {
    const mix_user *u = (const mix_user *)user;
    return inner_par_mix(x, in, u->period, u->rows_per_draw, 1e-3);
}

static void row_par_mix(void) {
    /* B, T, C of the input; period and rows_per_draw of the mixture */
    static const size_t shape[][5] = {{2, 3, 5, 6, 6},
                                      {3, 5, 33, 5, 5},
                                      {2, 5, 70, 5, 2},
                                      {1, 1, 129, 1, 1}};
    int i, norm, hot, k;
    for (i = 0; i < 4; i++)
        for (norm = 0; norm < 2; norm++)
            for (hot = 0; hot < 4; hot++) {
                mix_user u;
                problem p = start(norm ? "par_mix" : "par_mix without norms", make_par_mix, &u);
                size_t draws, c;
                stx_real *w;
                u.period = shape[i][3];
                u.rows_per_draw = shape[i][4];
                draws = shape[i][0] * shape[i][1] / u.period
                        * ((u.period + u.rows_per_draw - 1) / u.rows_per_draw);
                if (shape[i][2] > 40) p.entries = 40;
                for (k = 0; k < 3; k++) add(&p, shape[i][0], shape[i][1], shape[i][2], 0);
                w = add(&p, draws, 3, 0, 0);
                if (hot)
                    for (c = 0; c < 3 * draws; c++) w[c] = c % 3 == (size_t)hot - 1;
                for (k = 0; k < 4; k++) add_if(&p, norm, shape[i][2], 0, 0, 0);
                if (i == 1 && hot < 3) p.fixed[hot] = p.fixed[3] = 1;
                check(&p);
            }
}

typedef struct gate_user {
    stx_par_gate_args a;
    stx_real tau, cost[3], u[24];
    int constant, latency;
} gate_user;

static stx_tensor *make_par_gate(stx_ctx *x, stx_tensor **in, void *user) {
    gate_user *u = (gate_user *)user;
    stx_par_gate_args a = u->a;
    stx_tensor *lat = in[1], *w;
    a.tau = &u->tau;
    a.cost = u->cost;
    a.seed = 5;
    a.stream = 77;
    if (u->constant) a.uniforms = u->u;
    if (u->latency == 2) a.latency_w = STX_PAR_LATENCY_OF_W;
    w = inner_par_gate(x, in[0], &a, u->latency ? &lat : NULL);
    return u->latency ? stx_scale_by(x, w, lat) : w;
}

static void row_par_gate(void) {
    gate_user u;
    size_t k;
    memset(&u, 0, sizeof u);
    u.tau = 0.7;
    u.cost[0] = 2;
    u.cost[1] = 0.5;
    for (k = 0; k < 24; k++) u.u[k] = 0.5 + 0.45 * test_rand();
    u.a.uniforms_stride = 4;
    for (u.a.form = 0; u.a.form < 2; u.a.form++)
        for (u.a.noisy = 0; u.a.noisy < 2; u.a.noisy++)
            for (u.latency = 0; u.latency < 3; u.latency++)
                for (u.constant = 0; u.constant < 2; u.constant++)
                    for (u.a.R = 1; u.a.R < 7; u.a.R += 5) {
                        problem p = start(u.a.form ? "par_gate of pi" : "par_gate of logits",
                                          make_par_gate, &u);
                        add_away(&p, 3, 0, 0);
                        add_if(&p, u.a.R > 1, 1, 0, 0, 0);
                        p.fixed[1] = !u.latency;
                        check(&p);
                    }
}

typedef struct widen_user {
    size_t w, ld;
    int full;
} widen_user;

static stx_tensor *make_par_widen(stx_ctx *x, stx_tensor **in, void *user) {
    const widen_user *u = (const widen_user *)user;
    return inner_par_widen(x, in[0], in[1], u->w, u->ld, -1, u->full);
}

static void row_par_widen(void) {
    int i, two;
    for (i = 0; i < 4; i++)
        for (two = 0; two < 2; two++) {
            static const size_t shape[4][2] = {{1, 8}, {7, 8}, {5, 5}, {12, 40}};
            widen_user u;
            problem p = start(two ? "par_widen of two" : "par_widen", make_par_widen, &u);
            u.w = shape[i][0];
            u.ld = shape[i][1];
            u.full = i % 2;
            add(&p, 3, 2 * u.w, 0, 0);
            add_if(&p, two, 4, u.w, 0, 0);
            if (i == 1 && two) p.fixed[0] = 1;
            check(&p);
        }
}

static stx_tensor *make_par_latency(stx_ctx *x, stx_tensor **in, void *user) {
    return inner_par_latency(x, in[0], in[1], (const stx_par_latency_args *)user);
}

static void row_par_latency(void) {
    static const double lat[] = {3.5, 1.25, 0.5};
    stx_par_latency_args a;
    int i;
    a.weight = 0.3;
    a.target = 2;
    a.power = 0.6;
    for (a.kind = STX_PAR_LATENCY_ADD; a.kind <= STX_PAR_LATENCY_FBNET; a.kind++)
        for (i = 0; i < 3; i++) {
            problem p = start("par_latency", make_par_latency, &a);
            add(&p, 1, 0, 0, 0)[0] = 2.5;
            add(&p, 1, 0, 0, 0)[0] = lat[i];
            check(&p);
        }
}


/* >>passed: recomputed functions that return their inputs, views of them, parameters,
   or the same tensor twice. Loss and gradients must be the same as without
   recomputation, whichever of the returned tensors contribute to the loss and whatever
   the chunk size. */
enum { PASSED_CASES = 9, PASSED_MOST = 40 * 4 };

typedef struct passed {
    int what;
    stx_tensor *W;
} passed;

static stx_tensor *passes(stx_ctx *x, void *user, stx_tensor **in, stx_tensor **out) {
    const passed *u = (const passed *)user;
    stx_tensor *a;
    switch (u->what) {
    case 0:
        out[0] = in[1];
        return in[0];
    case 1:
        out[0] = in[1];
        return stx_scale(x, in[0], 2);
    case 2:
        out[0] = stx_reshape(x, in[1], in[1]->size, 0, 0, 0);
        return stx_reshape(x, in[0], in[0]->size, 0, 0, 0);
    case 3:
        a = stx_tanh(x, in[0]);
        out[0] = a;
        return a;
    case 4:
        out[0] = stx_mean(x, in[1]);
        out[1] = in[0];
        out[2] = in[1];
        return stx_linear(x, in[0], u->W, NULL, STX_ACT_TANH);
    case 5:
        a = stx_linear(x, in[0], u->W, NULL, STX_ACT_TANH);
        out[0] = stx_reshape(x, a, a->size, 0, 0, 0);
        return stx_linear(x, a, u->W, NULL, STX_ACT_NONE);
    case 6:
        out[2] = stx_sum(x, in[1]);
        return stx_gelu(x, in[0]);
    case 7:
        out[0] = u->W;
        return stx_linear(x, in[0], u->W, NULL, STX_ACT_NONE);
    default:
        out[0] = stx_view_rows(x, u->W, 1, 3);
        return stx_linear(x, in[0], u->W, NULL, STX_ACT_NONE);
    }
}

/* Computes the loss and its gradients. Bit 0 of `used` is set if the returned tensor
   contributes to the loss, and bit k + 1 if out[k] does. */
static void passed_run(int what, int used, const size_t *rows, size_t chunk, int recompute,
                       double *result) {
    stx_desc desc;
    stx_ctx *x;
    stx_params *p;
    stx_tensor *in[2], *out[3] = {NULL, NULL, NULL}, *y, *loss = NULL, *leaves[3];
    stx_real v[2][PASSED_MOST];
    passed u;
    int more = what == 4 || what == 6 ? 3 : 1, i, k;
    memset(&desc, 0, sizeof desc);
    desc.chunk_bytes = chunk;
    desc.threads = 1;
    x = stx_create(&desc);
    p = stx_params_create(x);
    u.what = what;
    u.W = stx_param(p, STX_NORMAL, 0.5, "w", 4, 4, 0, 0);
    for (i = 0; i < PASSED_MOST; i++) {
        v[0][i] = (stx_real)sin(i + 1.0);
        v[1][i] = (stx_real)cos(i * 1.7);
    }
    stx_begin(x, STX_TRAIN);
    for (k = 0; k < 2; k++) in[k] = stx_variable(x, v[k], rows[k], 4, 0, 0);
    leaves[0] = in[0];
    leaves[1] = in[1];
    leaves[2] = u.W;
    y = recompute ? stx_recompute(x, passes, &u, in, 2, out, more) : passes(x, &u, in, out);
    if (used & 1) loss = stx_mean(x, stx_mul(x, y, y));
    for (k = 0; k < 3; k++)
        if (out[k] && used >> (k + 1) & 1) {
            stx_tensor *t = stx_scale(x, stx_mean(x, stx_mul(x, out[k], out[k])), k + 2);
            loss = loss ? stx_add(x, loss, t) : t;
        }
    if (loss) {
        stx_backward(x, loss);
        result[0] = stx_item(x, loss);
        for (k = 0; k < 3; k++)
            for (i = 0; leaves[k]->grad && i < (int)leaves[k]->size; i++)
                result[1 + PASSED_MOST * k + i] = (double)leaves[k]->grad[i];
    }
    CHECK(stx_ok(x), "passed results %d, used %d: %s", what, used, stx_error(x));
    stx_destroy(x);
}

static void passed_case(int what, int used, const size_t *rows, size_t chunk) {
    static double plain[3 * PASSED_MOST + 1], again[3 * PASSED_MOST + 1];
    double worst = 0;
    int i;
    memset(plain, 0, sizeof plain);
    memset(again, 0, sizeof again);
    passed_run(what, used, rows, chunk, 0, plain);
    passed_run(what, used, rows, chunk, 1, again);
    for (i = 0; i < 3 * PASSED_MOST + 1; i++) raise_worst(&worst, fabs(plain[i] - again[i]));
    CHECK(worst < 1e-12,
          "passed results %d, used %d, rows %zu and %zu, chunks of %zu: recomputation is off by %g",
          what, used, rows[0], rows[1], chunk, worst);
}

static void passed_results(void) {
    static const size_t rows[][2] = {{1, 1}, {1, 16}, {33, 7}}, chunks[] = {0, 256, 1024};
    int what, used, r, c;
    for (what = 0; what < PASSED_CASES; what++)
        for (used = 1; used < 16; used++)
            for (r = 0; r < 3; r++)
                for (c = 0; c < 3; c++) passed_case(what, used, rows[r], chunks[c]);
}


/* >>accumulation */
static stx_tensor *normal(stx_params *p, const char *name, size_t d0, size_t d1, size_t d2) {
    return stx_param(p, STX_NORMAL, 0.5, name, d0, d1, d2, 0);
}

/* A parameter's gradient must accumulate over passes: after two passes, it must be
   twice the gradient after one. With few rows, each pass adds once to each element, so
   the result is exact. Sums that are computed in parts (over 64 rows, or over a depth
   of 384) are rounded. */
static void two_passes(size_t N, int exactly) {
    stx_ctx *x = stx_create(NULL);
    stx_params *p = stx_params_create(x);
    stx_tensor *W = normal(p, "w", 7, 7, 0), *b = normal(p, "b", 7, 0, 0),
               *g = normal(p, "g", 7, 0, 0), *s = normal(p, "s", 7, 0, 0),
               *m = normal(p, "m", 7, 0, 0), *z = stx_param(p, STX_CONSTANT, 0.31, "z", 1, 0, 0, 0),
               *pe = normal(p, "pe", 9, 7, 0), *pk = normal(p, "pk", 1, 3, 7),
               *pv = normal(p, "pv", 1, 3, 7), *alone = normal(p, "alone", 1, 0, 0), *h;
    size_t bytes = stx_params_size(p) * sizeof(stx_real), i, k, n = 0;
    stx_real *in = random_values(N * 7), *once = (stx_real *)malloc(bytes),
             *twice = (stx_real *)malloc(bytes);
    stx_attention_in ai;
    stx_attention_desc ad;
    double e;
    int pass;
    memset(&ad, 0, sizeof ad);
    ad.heads = 1;
    ad.delta_min = 1;
    ad.max_span = 8;
    ad.ramp = 4;
    for (pass = 0; pass < 2; pass++) {
        memset(&ai, 0, sizeof ai);
        stx_begin(x, STX_TRAIN);
        h = stx_linear(x, stx_input(x, in, 1, N, 7, 0), W, b, STX_ACT_TANH);
        ai.q = ai.k = ai.v = stx_layernorm(x, h, g, s, 0);
        ai.pe = pe;
        ai.span_fraction = z;
        ai.persistent_k = pk;
        ai.persistent_v = pv;
        h = stx_mul(x, stx_attention(x, &ai, &ad), m);
        stx_backward(x, stx_add(x, stx_mean(x, stx_mul(x, h, h)), alone));
        CHECK(stx_ok(x), "%s", stx_error(x));
        for (k = 0, n = 0; k < p->count; k++)
            for (i = 0; i < p->tensor[k]->size; i++)
                (pass ? twice : once)[n++] = p->tensor[k]->grad[i];
    }
    for (i = 0; i < n; i++) once[i] *= 2;
    e = test_error(twice, once, n, 1e-3);
    if (exactly)
        CHECK(!memcmp(once, twice, n * sizeof *once), "two passes are not exactly twice one: %g",
              e);
    CHECK(e <= 1e-14, "two passes are not twice one: %g", e);
    stx_params_zero_grad(p);
    for (k = 0; k < p->count; k++)
        for (i = 0; i < p->tensor[k]->size; i++)
            CHECK(p->tensor[k]->grad[i] == 0, "stx_params_zero_grad");
    free(in);
    free(once);
    free(twice);
    stx_destroy(x);
}

/* If the op's output is itself a parameter, dy must be added to the parameter's
   gradient. */
static void output_is_parameter(void) {
    stx_ctx *x = stx_create(NULL);
    stx_params *p = stx_params_create(x);
    stx_tensor *w = stx_param(p, STX_CONSTANT, 2, "w", 1, 0, 0, 0);
    stx_real one = 1;
    stx_begin(x, STX_TRAIN);
    stx_backward_from(x, w, &one);
    stx_backward_from(x, w, &one);
    CHECK(w->grad[0] == 2, "dy of a parameter overwrites its gradient: expected 2, got %g",
          w->grad[0]);
    stx_destroy(x);
}

/* A second backward pass in a step must either add its gradients or cause an error. It
   must not be silently ignored. */
static void second_backward(void) {
    stx_ctx *x = stx_create(NULL);
    stx_params *p = stx_params_create(x);
    stx_tensor *w = stx_param(p, STX_CONSTANT, 2, "w", 1, 0, 0, 0), *l1, *l2;
    stx_begin(x, STX_TRAIN);
    l1 = stx_mean(x, stx_scale(x, w, 3));
    l2 = stx_mean(x, stx_scale(x, w, 5));
    stx_backward(x, l1);
    stx_backward(x, l2);
    CHECK(!stx_ok(x) || w->grad[0] == 8,
          "the second backward of a step: expected a gradient of 8 or an error, got %g",
          w->grad[0]);
    stx_destroy(x);
}

static void accumulation(void) {
    two_passes(5, 1);
    two_passes(500, 0);
    output_is_parameter();
    second_backward();
}


/* >>parts: one row per op */
static const test_part parts[] = {
    {"stx_embedding", row_embedding},
    {"stx_linear", row_linear},
    {"stx_linear_memory", row_linear_memory},
    {"stx_linear_concat", row_linear_concat_all},
    {"stx_linear_cached", row_linear_cached_all},
    {"stx_linear_heads", row_linear_heads},
    {"stx_matmul", row_matmul},
    {"stx_layernorm", row_layernorm},
    {"stx_residual_norm", row_residual_norm},
    {"stx_residual_norm_bias", row_residual_norm_bias},
    {"stx_add", row_add},
    {"stx_mul", row_mul},
    {"stx_scale", row_scale},
    {"stx_scale_by", row_scale_by},
    {"stx_relu", row_relu},
    {"stx_gelu", row_gelu},
    {"stx_tanh", row_tanh},
    {"stx_sigmoid", row_sigmoid},
    {"stx_softmax", row_softmax},
    {"stx_log_softmax", row_log_softmax},
    {"stx_dropout", row_dropout},
    {"stx_dropout_replicated", row_dropout_replicated},
    {"stx_dropout_variational", row_dropout_variational},
    {"stx_rezero", row_rezero},
    {"stx_mean", row_mean},
    {"stx_sum", row_sum},
    {"stx_add_means", row_add_means},
    {"stx_cross_entropy", row_cross_entropy},
    {"stx_cross_entropy_inplace", row_cross_entropy_inplace},
    {"stx_cross_entropy_tokens", row_cross_entropy_tokens},
    {"stx_mse", row_mse},
    {"stx_concat", row_concat},
    {"stx_slice", row_slice},
    {"stx_gather", row_gather},
    {"stx_concat_channels", row_concat_channels},
    {"stx_slice_channels", row_slice_channels},
    {"stx_view_rows", row_view_rows},
    {"stx_reshape", row_reshape},
    {"stx_detach", row_detach},
    {"stx_recompute", row_recompute},
    {"stx_attention", row_attention_all},
    {"stx_adaptive_input", row_adaptive_input},
    {"stx_adaptive_softmax", row_adaptive_softmax},
    {"stx_adaptive_softmax_tokens", row_adaptive_softmax_tokens},
    {"stx_adaptive_log_probs", row_adaptive_log_probs},
    {"stx_sru_recurrence", row_sru_recurrence},
    {"stx_sru_forward", row_sru_forward},
    {"comp_gate", row_comp_gate},
    {"comp_distance", row_comp_distance},
    {"comp_folded", row_comp_folded},
    {"comp_zero", row_comp_zero},
    {"comp_all_heads", row_comp_all_heads},
    {"par_mix", row_par_mix},
    {"par_gate", row_par_gate},
    {"par_widen", row_par_widen},
    {"par_latency", row_par_latency}};

/* Usage: test_grad [PART ..] */
int main(int argc, char **argv) {
    stx_desc d = {0};
    d.threads = 1;
    ctx1 = stx_create(&d);
    d.threads = 3;
    ctx3 = stx_create(&d);
    test_run(parts, sizeof parts / sizeof *parts, argc, argv);
    if (argc < 2 || !strcmp(argv[1], "passed")) passed_results();
    if (argc < 2) {
        accumulation();
        /* test_api.c checks this library's kernels */
        if (!gemm_own(ctx1)) gemm_check(ctx1, ctx3, 1);
    }
    stx_destroy(ctx1);
    stx_destroy(ctx3);
    return test_end();
}
