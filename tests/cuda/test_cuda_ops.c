/* test_cuda_ops.c - the CUDA versions of elementwise kernels, embedding, normalisation,
   softmax, losses and optimisers compared with their CPU versions in f32 and bf16, with
   odd sizes, misaligned arrays, guard values around every array, and any thread order.
   "short" omits cases in which a sanitizer cannot find anything new: other values in
   the same memory, and other orders of the same threads. Another argument selects one
   part. */
#include "../../seqtx.h"
#include "../inner/inner.h"
#include "../ops/kernels.h"
#include "cuda_arr.h"

static const size_t sizes[] = {1,   2,   3,    5,    31,   32,   33,   127,
                               129, 257, 1000, 1024, 1025, 4099, 20000};

static const size_t widths[] = {1,   3,    4,    28,   33,   128,  200,
                                260, 515, 1000, 1024, 1025, 2052, CUDA_ON_HOST ? 16387 : 40001};

static int brief; /* whether "short" was given */

static void mean_check(const char *name, const arr *a) {
    least = 1;
    arr_check(name, a, 3e-7);
    least = 0;
}

static int32_t *ids_to_gpu(const int32_t *ids, size_t n) {
    return (int32_t *)cuda_bytes(gx, ids, n * sizeof *ids);
}


// >>flat: elementwise kernels and reductions of n values

/* Arrays of n elements. i and j contain integers; p is a parameter. */
typedef struct flat {
    size_t n;
    arr y, a, b, p, i, j;
} flat;

static void test_elementwise(const flat *f) {
    const arr y = f->y, a = f->a, b = f->b, p = f->p, i = f->i, j = f->j;
    size_t n = f->n;
    int acc;
    BOTH(stx_fill, (cx, y.c, n, 3), (gx, y.d, n, 3));
    arr_check("fill", &y, 0);
    BOTH(stx_fill, (cx, p.c, n, 1.2345f), (gx, p.d, n, 1.2345f));
    arr_check("fill a parameter", &p, 0);
    BOTH(stx_axpy, (cx, y.c, a.c, n, 0.7f, 0), (gx, y.d, a.d, n, 0.7f, 0));
    arr_check("axpy", &y, 0);
    BOTH(stx_axpy, (cx, y.c, a.c, n, 0.7f, 1), (gx, y.d, a.d, n, 0.7f, 1));
    arr_check("axpy +=", &y, 1e-6);
    BOTH(stx_axpy, (cx, j.c, i.c, n, 3, 1), (gx, j.d, i.d, n, 3, 1));
    arr_check("axpy of integers", &j, 0);
    BOTH(stx_axpy, (cx, p.c, a.c, n, 0.7f, 1), (gx, p.d, a.d, n, 0.7f, 1));
    arr_check("axpy to a parameter", &p, 1e-6);
    BOTH(stx_axpy, (cx, y.c, p.c, n, 1, 0), (gx, y.d, p.d, n, 1, 0));
    arr_check("axpy from a parameter", &y, 0);
    BOTH(stx_add_fwd, (cx, y.c, a.c, b.c, n, n), (gx, y.d, a.d, b.d, n, n));
    arr_check("add", &y, 0);
    BOTH(stx_mul_fwd, (cx, y.c, a.c, b.c, n, n), (gx, y.d, a.d, b.d, n, n));
    arr_check("mul", &y, 0);
    for (acc = 0; acc < 2; acc++) {
        BOTH(k_mul_bwd, (cx, y.c, j.c, i.c, a.c, b.c, n, n, acc),
             (gx, y.d, j.d, i.d, a.d, b.d, n, n, acc));
        arr_check("mul da", &y, 1e-6);
        arr_check("mul db", &j, 1e-6);
    }
}

static void test_activation(const arr *pa, size_t n, int act) {
    const arr a = *pa;
    arr z = arr_of(n, 1, 0, N_), d = arr_of(n, 1, 0, N_), g = arr_of(n, 1, 0, N_);
    int acc, gelu = act == STX_ACT_GELU;
    BOTH(stx_act_fwd, (cx, z.c, a.c, n, act), (gx, z.d, a.d, n, act));
    arr_check("act", &z, 1e-6);
    for (acc = 0; acc < 2; acc++) {
        BOTH(k_act_bwd, (cx, d.c, g.c, z.c, a.c, n, act, acc),
             (gx, d.d, g.d, z.d, a.d, n, act, acc));
        arr_check("act da", &d, 1e-6);
    }
    BOTH(k_act_bwd, (cx, g.c, g.c, z.c, a.c, n, act, 0), (gx, g.d, g.d, z.d, a.d, n, act, 0));
    arr_check("act da in place", &g, 1e-6);
    BOTH(k_act_bwd, (cx, g.c, a.c, z.c, gelu ? a.c : NULL, n, act, 1),
         (gx, g.d, a.d, z.d, gelu ? a.d : NULL, n, act, 1));
    arr_check("act da without a", &g, 1e-6);
    BOTH(stx_act_fwd, (cx, g.c, g.c, n, act), (gx, g.d, g.d, n, act));
    arr_check("act in place", &g, 1e-6);
    arr_free(&z);
    arr_free(&d);
    arr_free(&g);
}

/* Tests dropout. Fills the array a of f with ones. */
static void test_dropout(const flat *f) {
    const uint64_t seed = 0x9e3779b97f4a7c15u, stream = (uint64_t)1 << 63 | 5;
    const arr y = f->y, a = f->a, b = f->b;
    size_t n = f->n;
    int acc;
    for (acc = 0; acc < 2; acc++) {
        const uint64_t first = 1000 * (uint64_t)acc;
        BOTH(k_dropout_fwd, (cx, y.c, a.c, n, 0.3f, seed, stream, first, acc),
             (gx, y.d, a.d, n, 0.3f, seed, stream, first, acc));
        arr_check("dropout", &y, 1e-6);
    }
    BOTH(stx_fill, (cx, a.c, n, 1), (gx, a.d, n, 1));
    BOTH(k_dropout_fwd, (cx, y.c, a.c, n, 0.5f, 9, 11, 0, 0), (gx, y.d, a.d, n, 0.5f, 9, 11, 0, 0));
    arr_check("dropout mask", &y, 0);
    BOTH(k_dropout_fwd, (cx, y.c, b.c, n, 0, 9, 11, 0, 0), (gx, y.d, b.d, n, 0, 9, 11, 0, 0));
    arr_check("dropout 0", &y, 0);
    stx_cuda_rng_shift(gx, 1000); /* A replayed step draws from other streams. */
    BOTH(k_dropout_fwd, (cx, y.c, a.c, n, 0.5f, 9, 1011, 0, 0),
         (gx, y.d, a.d, n, 0.5f, 9, 11, 0, 0));
    arr_check("dropout shifted", &y, 0);
    stx_cuda_rng_shift(gx, 0);
}

/* The arrays for reduction tests. l and g have one element each. */
typedef struct reduced {
    arr l, g, d, e;
} reduced;

/* Tests l + 0.3 (mean b + mean p + mean a). The first backward pass adds the gradients
   of b and p to d and e, and omits the gradient of a. The second pass overwrites d and
   e, then adds the gradient of a to d. */
static void test_add_means(const flat *f, const reduced *r) {
    const arr l = r->l, g = r->g, d = r->d, e = r->e;
    size_t n = f->n;
    stx_means_args mc, mg;
    arr t = arr_of(1, 1, 0, B_);
    memset(&mc, 0, sizeof mc);
    mc.count = 3;
    mc.n[0] = mc.n[1] = mc.n[2] = n;
    mc.s = 0.3f;
    mg = mc;
    mc.a[0] = f->b.c;
    mc.a[1] = f->p.c;
    mc.a[2] = f->a.c;
    mc.y0 = l.c;
    mc.y = t.c;
    mg.a[0] = f->b.d;
    mg.a[1] = f->p.d;
    mg.a[2] = f->a.d;
    mg.y0 = l.d;
    mg.y = t.d;
    BOTH(stx_add_means_fwd, (cx, &mc), (gx, &mg));
    arr_check("add_means", &t, 2e-6);
    mc.dy = g.c;
    mc.da[0] = d.c;
    mc.da[1] = e.c;
    mg.dy = g.d;
    mg.da[0] = d.d;
    mg.da[1] = e.d;
    BOTH(stx_add_means_bwd, (cx, &mc), (gx, &mg));
    arr_check("add_means da", &d, 1e-6);
    arr_check("add_means da, second input", &e, 1e-6);
    mc.da[2] = mc.da[0];
    mg.da[2] = mg.da[0];
    mc.overwrite = mg.overwrite = 3;
    BOTH(stx_add_means_bwd, (cx, &mc), (gx, &mg));
    arr_check("add_means da, overwritten", &d, 1e-6);
    arr_check("add_means da, overwritten, second input", &e, 1e-6);
    CHECK(!n || fabs((double)d.c[0] * (double)n / (0.6 * (double)g.c[0]) - 1) < 1e-2,
          "add_means da, written and added to: %g", (double)d.c[0]);
    if (n > 1) { /* the third gradient overlaps the first, one element further */
        const uint64_t state = test_state;
        arr o = arr_of(n, 1, 0, B_);
        mc.da[0] = o.c;
        mg.da[0] = o.d;
        mc.da[2] = o.c + 1;
        mg.da[2] = o.d + 1;
        mc.da[1] = mg.da[1] = NULL;
        mc.n[2] = mg.n[2] = n - 1;
        mc.overwrite = mg.overwrite = 0;
        BOTH(stx_add_means_bwd, (cx, &mc), (gx, &mg));
        arr_check("add_means da, overlapping", &o, 1e-6);
        arr_free(&o);
        test_state = state;
    }
    arr_free(&t);
}

static void test_reductions(const flat *f) {
    const arr a = f->a, b = f->b, i = f->i;
    size_t n = f->n;
    reduced r;
    arr l = arr_of(1, 1, 0, B_), g = arr_of(1, 1, 0, B_), d = arr_of(n, 1, 0, N_),
        e = arr_of(n, 1, 0, N_);
    r.l = l;
    r.g = g;
    r.d = d;
    r.e = e;
    BOTH(stx_mean_fwd, (cx, l.c, b.c, n), (gx, l.d, b.d, n));
    arr_check("mean", &l, 1e-6);
    BOTH(stx_mean_bwd, (cx, d.c, g.c, n), (gx, d.d, g.d, n));
    arr_check("mean da", &d, 1e-6);
    BOTH(stx_sum_fwd, (cx, l.c, b.c, n), (gx, l.d, b.d, n));
    arr_check("sum", &l, 1e-6);
    BOTH(stx_sum_fwd, (cx, l.c, i.c, n), (gx, l.d, i.d, n));
    arr_check("sum of integers", &l, 0);
    BOTH(stx_sum_bwd, (cx, d.c, g.c, n), (gx, d.d, g.d, n));
    arr_check("sum da", &d, 1e-6);
    test_add_means(f, &r);
    BOTH(stx_rezero_fwd, (cx, d.c, NULL, b.c, g.c, n), (gx, d.d, NULL, b.d, g.d, n));
    arr_check("rezero without x", &d, 1e-7);
    BOTH(k_rezero_bwd, (cx, d.c, l.c, b.c, a.c, g.c, n, 0), (gx, d.d, l.d, b.d, a.d, g.d, n, 0));
    arr_check("rezero da", &d, 1e-6);
    arr_check("rezero dscale", &l, 4e-6);
    BOTH(stx_mse_fwd, (cx, l.c, b.c, i.c, n), (gx, l.d, b.d, i.d, n));
    arr_check("mse", &l, 1e-6);
    BOTH(stx_mse_bwd, (cx, d.c, e.c, g.c, b.c, i.c, n), (gx, d.d, e.d, g.d, b.d, i.d, n));
    arr_check("mse da", &d, 1e-6);
    arr_check("mse db", &e, 1e-6);
    BOTH(stx_mse_bwd, (cx, NULL, e.c, g.c, b.c, i.c, n), (gx, NULL, e.d, g.d, b.d, i.d, n));
    arr_check("mse db only", &e, 1e-6);
    arr_free(&l);
    arr_free(&g);
    arr_free(&d);
    arr_free(&e);
}

/* Kernels must write nothing if n is 0. */
static void test_empty(void) {
    arr y = arr_of(8, 1, 0, N_);
    stx_fill_cuda(gx, y.d, 0, 5);
    stx_axpy_cuda(gx, y.d, y.d, 0, 5, 1);
    stx_copy2d_cuda(gx, y.d, 4, y.d, 4, 0, 4, 0);
    stx_sum_rows_cuda(gx, y.d, y.d, 0, 8);
    k_dropout_fwd_cuda(gx, y.d, y.d, 0, 0.5f, 1, 1, 0, 0);
    k_layernorm_fwd_cuda(gx, y.d, y.d, y.d, y.d, y.d, y.d, 0, 8, 0);
    stx_softmax_fwd_cuda(gx, y.d, y.d, 0, 8);
    stx_embedding_bwd_cuda(gx, y.d, y.d, NULL, 0, 8);
    stx_add_fwd_cuda(gx, y.d, y.d, y.d, 0, 8);
    arr_check("kernels of 0 elements", &y, 0);
    arr_free(&y);
}

static void test_flat(void) {
    size_t k;
    int act;
    for (k = 0; k < COUNT(sizes); k++) {
        size_t n = sizes[k];
        flat f;
        f.n = n;
        f.y = arr_of(n, 1, 0, N_);
        f.a = arr_of(n, 2, 0, N_);
        f.b = arr_of(n, 2, 0, N_);
        f.p = arr_of(n, 1, 0, P_);
        f.i = arr_of(n, 9, 1, N_);
        f.j = arr_of(n, 9, 1, N_);
        test_elementwise(&f);
        for (act = 0; act <= STX_ACT_SIGMOID; act++) test_activation(&f.a, n, act);
        test_dropout(&f);
        test_reductions(&f);
        arr_free(&f.y);
        arr_free(&f.a);
        arr_free(&f.b);
        arr_free(&f.p);
        arr_free(&f.i);
        arr_free(&f.j);
    }
    test_empty();
}


// >>rows: kernels of N rows of C values

/* Indices of the arrays, in the order of their creation. R_BIAS may be a parameter. */
enum {
    R_Y,
    R_A,
    R_INT,
    R_F,
    R_BIAS,
    R_DBIAS,
    R_G,
    R_S,
    R_MEAN,
    R_RSTD,
    R_GAIN,
    R_SHIFT,
    R_DGAIN,
    R_DSHIFT,
    R_D,
    R_DF,
    ROW_ARRAYS
};

typedef struct rows {
    size_t N, C;
    arr a[ROW_ARRAYS];
} rows;

static stx_real *row_data(const rows *r, int device, int i) {
    return device ? r->a[i].d : r->a[i].c;
}

static stx_residual_norm_args residual_args(const rows *r, int device, int bias, float drop,
                                            int accumulate) {
    stx_residual_norm_args k;
    memset(&k, 0, sizeof k);
    k.N = r->N;
    k.C = r->C;
    k.eps = 1e-5f;
    k.drop = drop;
    k.seed = 77;
    k.stream = 99;
    k.h = row_data(r, device, R_A);
    k.f = row_data(r, device, R_F);
    k.gain = row_data(r, device, R_GAIN);
    k.shift = row_data(r, device, R_SHIFT);
    k.y = row_data(r, device, R_Y);
    k.s = row_data(r, device, R_S);
    k.mean = row_data(r, device, R_MEAN);
    k.rstd = row_data(r, device, R_RSTD);
    k.dy = row_data(r, device, R_G);
    k.ds = row_data(r, device, R_D);
    k.df = row_data(r, device, R_DF);
    k.dgain = row_data(r, device, R_DGAIN);
    k.dshift = row_data(r, device, R_DSHIFT);
    if (bias) {
        k.bias = row_data(r, device, R_BIAS);
        k.dbias = row_data(r, device, R_DBIAS);
    }
    k.accumulate_df = accumulate;
    return k;
}

/* in_kind: memory kind of R_A and R_D, which in bf16 are float unless it is N_ */
static rows rows_make(size_t N, size_t C, int in_kind, int gain_kind, int bias_kind) {
    size_t n = N * C, i;
    rows r;
    r.N = N;
    r.C = C;
    r.a[R_Y] = arr_of(n, 1, 0, N_);
    r.a[R_A] = arr_of(n, 2, 0, in_kind);
    r.a[R_INT] = arr_of(n, 9, 1, N_);
    r.a[R_F] = arr_of(n, 1, 0, N_);
    r.a[R_BIAS] = arr_of(C, 1, 0, bias_kind);
    r.a[R_DBIAS] = arr_of(C, 5, 1, B_);
    r.a[R_G] = arr_of(n, 1, 0, N_);
    r.a[R_S] = arr_of(n, 1, 0, N_);
    r.a[R_MEAN] = arr_of(N, 1, 0, B_);
    r.a[R_RSTD] = arr_of(N, 1, 0, B_);
    r.a[R_GAIN] = arr_of(C, 1, 0, gain_kind);
    r.a[R_SHIFT] = arr_of(C, 1, 0, P_);
    r.a[R_DGAIN] = arr_of(C, 1, 0, B_);
    r.a[R_DSHIFT] = arr_of(C, 1, 0, B_);
    r.a[R_D] = arr_of(n, 1, 0, in_kind);
    r.a[R_DF] = arr_of(n, 1, 0, N_);
    for (i = 0; i < C; i++) r.a[R_GAIN].c[i] += 1;
    if (is_half(gain_kind)) cuda_round(r.a[R_GAIN].c, C);
    arr_upload(&r.a[R_GAIN]);
    return r;
}

static void rows_free(rows *r) {
    int i;
    for (i = 0; i < ROW_ARRAYS; i++) arr_free(&r->a[i]);
}

static void test_row_vectors(const rows *r) {
    const arr y = r->a[R_Y], a = r->a[R_A], f = r->a[R_F], b = r->a[R_BIAS], db = r->a[R_DBIAS],
              d = r->a[R_D], integers = r->a[R_INT];
    size_t N = r->N, C = r->C, n = N * C;
    arr t;
    BOTH(stx_add_fwd, (cx, y.c, a.c, b.c, n, C), (gx, y.d, a.d, b.d, n, C));
    arr_check("add a row", &y, 0);
    BOTH(stx_mul_fwd, (cx, y.c, a.c, b.c, n, C), (gx, y.d, a.d, b.d, n, C));
    arr_check("mul by a row", &y, 0);
    BOTH(k_mul_bwd, (cx, y.c, db.c, f.c, a.c, b.c, n, C, 1),
         (gx, y.d, db.d, f.d, a.d, b.d, n, C, 1));
    arr_check("mul da", &y, 1e-6);
    arr_check("mul db, b is broadcast", &db, 2e-6);
    BOTH(stx_bias_act_fwd, (cx, y.c, d.c, b.c, N, C, STX_ACT_GELU),
         (gx, y.d, d.d, b.d, N, C, STX_ACT_GELU));
    arr_check("bias_act", &y, 1e-6);
    arr_check("bias_act pre", &d, 1e-6);
    BOTH(stx_bias_act_fwd, (cx, y.c, NULL, NULL, N, C, STX_ACT_RELU),
         (gx, y.d, NULL, NULL, N, C, STX_ACT_RELU));
    arr_check("bias_act without b", &y, 0);
    BOTH(stx_sum_rows, (cx, db.c, f.c, N, C), (gx, db.d, f.d, N, C));
    arr_check("sum_rows", &db, 2e-6);
    t = arr_of(C, 5, 1, B_);
    BOTH(stx_sum_rows, (cx, t.c, integers.c, N, C), (gx, t.d, integers.d, N, C));
    arr_check("sum_rows of integers", &t, 0);
    arr_free(&t);
}

/* Returns the tolerance for the gradients of normalisation over C elements. */
static double norm_tol(size_t C) {
    return C < 4 ? 1e-3 : 4e-6;
}

static void test_layernorm(const rows *r) {
    const arr y = r->a[R_Y], a = r->a[R_A], g = r->a[R_G], mean = r->a[R_MEAN],
              rstd = r->a[R_RSTD], gain = r->a[R_GAIN], shift = r->a[R_SHIFT],
              dgain = r->a[R_DGAIN], dshift = r->a[R_DSHIFT], d = r->a[R_D];
    size_t N = r->N, C = r->C;
    int acc;
    BOTH(k_layernorm_fwd, (cx, y.c, mean.c, rstd.c, a.c, gain.c, shift.c, N, C, 1e-5f),
         (gx, y.d, mean.d, rstd.d, a.d, gain.d, shift.d, N, C, 1e-5f));
    arr_check("layernorm", &y, C == 1 ? 1e-4 : 4e-6);
    mean_check("layernorm mean", &mean);
    arr_check("layernorm rstd", &rstd, 1e-5);
    for (acc = 0; acc < 2; acc++) {
        BOTH(k_layernorm_bwd,
             (cx, d.c, dgain.c, dshift.c, g.c, a.c, gain.c, mean.c, rstd.c, N, C, acc),
             (gx, d.d, dgain.d, dshift.d, g.d, a.d, gain.d, mean.d, rstd.d, N, C, acc));
        arr_check("layernorm din", &d, norm_tol(C));
        arr_check("layernorm dgain", &dgain, 4e-6);
        arr_check("layernorm dshift", &dshift, 4e-6);
    }
    BOTH(k_layernorm_bwd, (cx, NULL, dgain.c, NULL, g.c, a.c, gain.c, mean.c, rstd.c, N, C, 0),
         (gx, NULL, dgain.d, NULL, g.d, a.d, gain.d, mean.d, rstd.d, N, C, 0));
    arr_check("layernorm dgain only", &dgain, 4e-6);
    BOTH(k_layernorm_bwd, (cx, d.c, NULL, NULL, g.c, a.c, gain.c, mean.c, rstd.c, N, C, 0),
         (gx, d.d, NULL, NULL, g.d, a.d, gain.d, mean.d, rstd.d, N, C, 0));
    arr_check("layernorm din only", &d, norm_tol(C));
}

/* Compares s. Then has the CPU normalise the GPU's s, which is rounded in bf16, and
   compares y. */
static void residual_forward(const rows *r, const stx_residual_norm_args *kc,
                             const stx_residual_norm_args *kg) {
    const arr y = r->a[R_Y], s = r->a[R_S], mean = r->a[R_MEAN], rstd = r->a[R_RSTD],
              gain = r->a[R_GAIN], shift = r->a[R_SHIFT];
    BOTH(stx_residual_norm_fwd, (cx, kc), (gx, kg));
    arr_check("residual_norm s", &s, 1e-6);
    k_layernorm_fwd(cx, y.c, mean.c, rstd.c, s.c, gain.c, shift.c, r->N, r->C, 1e-5f);
    arr_check("residual_norm y", &y, r->C == 1 ? 1e-4 : 4e-6);
    mean_check("residual_norm mean", &mean);
    arr_check("residual_norm rstd", &rstd, 1e-5);
}

static void test_residual_norm(const rows *r) {
    const arr *d = &r->a[R_D], *df = &r->a[R_DF], *dgain = &r->a[R_DGAIN],
              *dshift = &r->a[R_DSHIFT];
    stx_residual_norm_args kc, kg;
    int acc;
    for (acc = 0; acc < 2; acc++) {
        kc = residual_args(r, 0, 0, acc ? 0.25f : 0, acc);
        kg = residual_args(r, 1, 0, acc ? 0.25f : 0, acc);
        residual_forward(r, &kc, &kg);
        BOTH(stx_residual_norm_bwd, (cx, &kc), (gx, &kg));
        arr_check("residual_norm ds", d, norm_tol(r->C));
        arr_check("residual_norm df", df, norm_tol(r->C));
        arr_check("residual_norm dgain", dgain, 4e-6);
        arr_check("residual_norm dshift", dshift, 4e-6);
    }
    kc.df = kg.df = NULL;
    kc.accumulate_df = kg.accumulate_df = 0;
    BOTH(stx_residual_norm_bwd, (cx, &kc), (gx, &kg));
    arr_check("residual_norm ds only", d, norm_tol(r->C));
}

static double dbias_tol(size_t C) {
    if (half) return 4e-3;
    return C < 4 ? 1e-3 : 8e-6;
}

/* Tests residual_norm with a bias. The kernel adds to ds or, if ds is NULL, does not
   compute it. */
static void test_residual_norm_bias(const rows *r) {
    const arr *d = &r->a[R_D], *df = &r->a[R_DF], *dgain = &r->a[R_DGAIN],
              *dshift = &r->a[R_DSHIFT], *db = &r->a[R_DBIAS];
    stx_residual_norm_args kc, kg;
    int k;
    for (k = 0; k < 4; k++) {
        kc = residual_args(r, 0, 1, k % 2 ? 0.25f : 0, 0);
        kg = residual_args(r, 1, 1, k % 2 ? 0.25f : 0, 0);
        residual_forward(r, &kc, &kg);
        kc.accumulate_ds = kg.accumulate_ds = k < 3;
        if (k == 3) kc.ds = kg.ds = NULL;
        if (k == 2) kc.dgain = kg.dgain = kc.dshift = kg.dshift = NULL;
        BOTH(stx_residual_norm_bwd, (cx, &kc), (gx, &kg));
        arr_check("residual_norm with bias: ds +=", d, norm_tol(r->C));
        arr_check("residual_norm with bias: df", df, norm_tol(r->C));
        arr_check("residual_norm with bias: dgain", dgain, 4e-6);
        arr_check("residual_norm with bias: dshift", dshift, 4e-6);
        arr_check("residual_norm with bias: dbias", db, dbias_tol(r->C));
        kc.df = kg.df = kc.dbias = kg.dbias = NULL;
        if (k < 2) BOTH(stx_residual_norm_bwd, (cx, &kc), (gx, &kg));
        arr_check("residual_norm ds += only", d, norm_tol(r->C));
        arr_check("residual_norm dgain without dbias", dgain, 4e-6);
        arr_check("residual_norm dshift without dbias", dshift, 4e-6);
    }
}

static void test_softmax(const rows *r) {
    const arr y = r->a[R_Y], a = r->a[R_A], g = r->a[R_G], d = r->a[R_D];
    size_t N = r->N, C = r->C;
    int acc;
    BOTH(stx_softmax_fwd, (cx, y.c, a.c, N, C), (gx, y.d, a.d, N, C));
    arr_check("softmax", &y, 1e-6);
    for (acc = 0; acc < 2; acc++) {
        BOTH(stx_softmax_bwd, (cx, d.c, g.c, y.c, N, C, acc), (gx, d.d, g.d, y.d, N, C, acc));
        arr_check("softmax da", &d, 2e-6);
    }
    BOTH(stx_log_softmax_fwd, (cx, y.c, a.c, N, C), (gx, y.d, a.d, N, C));
    arr_check("log_softmax", &y, 1e-6);
    for (acc = 0; acc < 2; acc++) {
        BOTH(stx_log_softmax_bwd, (cx, d.c, g.c, y.c, N, C, acc),
             (gx, d.d, g.d, y.d, N, C, acc));
        arr_check("log_softmax da", &d, 4e-6);
    }
}

/* Overwrites columns [1, 1 + w) of y with columns [2, 2 + w) of a, or adds the columns
   of `a` to them; then repeats this with an aligned block. */
static void test_copy2d(const rows *r) {
    const arr y = r->a[R_Y], a = r->a[R_A];
    size_t N = r->N, C = r->C, w = C > 4 ? C - 4 : 1;
    size_t from = C > 4 ? 2 : 0, to = C > 4 ? 1 : 0, aligned = C > 4 ? 4 : 0;
    int acc;
    for (acc = 0; acc < 2; acc++) {
        BOTH(stx_copy2d, (cx, y.c + to, C, a.c + from, C, N, w, acc),
             (gx, stx_offset_ptr(gx, y.d, to), C, stx_offset_ptr(gx, a.d, from), C, N, w, acc));
        arr_check("copy2d", &y, 1e-7);
        BOTH(stx_copy2d, (cx, y.c, C, a.c + aligned, C, N, w, acc),
             (gx, y.d, C, stx_offset_ptr(gx, a.d, aligned), C, N, w, acc));
        arr_check("copy2d, vectorised", &y, 1e-7);
    }
}

/* Tests kernels that concatenate the rows of two arrays, and that shift rows by w
   columns. */
static void test_concat_and_shift(const rows *r) {
    const arr y = r->a[R_Y], a = r->a[R_A], f = r->a[R_F];
    size_t N = r->N, C = r->C, wb = C / 3 + (C > 4 ? 0 : 1), ld = C + wb, w[4], k;
    arr t = arr_of(N * ld, 1, 0, N_);
    BOTH(stx_concat2d, (cx, t.c, a.c, C, C, f.c, C, wb, N), (gx, t.d, a.d, C, C, f.d, C, wb, N));
    arr_check("concat2d", &t, 0);
    BOTH(stx_concat2d, (cx, t.c, f.c + (C - wb), C, wb, a.c, C, C, N),
         (gx, t.d, stx_offset_ptr(gx, f.d, C - wb), C, wb, a.d, C, C, N));
    arr_check("concat2d, the first is narrow", &t, 0);
    w[0] = C;
    w[1] = wb;
    w[2] = C > 8 ? C / 8 * 4 : 1;
    w[3] = C > 33 ? 4 : 1;
    for (k = 0; k < 4; k++) {
        size_t from = C - w[k];
        BOTH(inner_shift2d, (cx, t.c, ld, ld, a.c + from, C, w[k], N),
             (gx, t.d, ld, ld, stx_offset_ptr(gx, a.d, from), C, w[k], N));
        arr_check("shift2d", &t, 0);
        BOTH(inner_shift2d, (cx, t.c, ld, C, NULL, 0, w[k], N),
             (gx, t.d, ld, C, NULL, 0, w[k], N));
        arr_check("shift2d with a stride, of zeros", &t, 0);
        BOTH(inner_shift2d, (cx, t.c, ld, from + wb, a.c, C, wb, N),
             (gx, t.d, ld, from + wb, a.d, C, wb, N));
        arr_check("shift2d of short rows", &t, 0);
        BOTH(inner_shift2d, (cx, y.c, C, C, a.c, C, w[k], N), (gx, y.d, C, C, a.d, C, w[k], N));
        arr_check("shift2d, aligned", &y, 0);
    }
    arr_free(&t);
}

static void test_row_kernels(size_t N, size_t C, int bias_kind) {
    rows r = rows_make(N, C, N_, P_, bias_kind);
    const arr g = r.a[R_G], a = r.a[R_A], gain = r.a[R_GAIN], mean = r.a[R_MEAN],
              rstd = r.a[R_RSTD], dgain = r.a[R_DGAIN];
    size_t n = N * C;
    arr z;
    test_row_vectors(&r);
    test_layernorm(&r);
    test_residual_norm(&r);
    test_residual_norm_bias(&r);
    BOTH(k_layernorm_bwd, (cx, NULL, dgain.c, dgain.c, g.c, a.c, gain.c, mean.c, rstd.c, N, C, 0),
         (gx, NULL, dgain.d, dgain.d, g.d, a.d, gain.d, mean.d, rstd.d, N, C, 0));
    arr_check("layernorm dgain and dshift in the same array", &dgain, 8e-6);
    test_softmax(&r);
    test_copy2d(&r);
    test_concat_and_shift(&r);
    z = arr_of(n, 1, 0, N_);
    BOTH(stx_fill, (cx, z.c, n / 2, 0), (gx, z.d, n / 2, 0));
    arr_check("fill the first half", &z, 0);
    arr_free(&z);
    rows_free(&r);
}

/* Calls that mix float and bfloat16: float inputs and gradients, or bfloat16 gains and
   biases. These are the only calls with C % 4 == 0 for which bf16 kernels test the
   storage of each element. */
static void test_mixed_rows(void) {
    static const size_t width[] = {64, 1028};
    size_t k;
    for (k = 0; k < 4; k++) {
        const int gains = (int)k % 2;
        rows r = rows_make(37, width[k / 2], gains ? N_ : B_, gains ? N_ : P_, gains ? N_ : B_);
        stx_linear_bwd_args c, g;
        test_row_vectors(&r);
        test_layernorm(&r);
        test_residual_norm(&r);
        test_residual_norm_bias(&r);
        memset(&c, 0, sizeof c);
        c.N = r.N;
        c.O = r.C;
        c.act = STX_ACT_TANH;
        g = c;
        c.da = row_data(&r, 0, R_G);
        g.da = row_data(&r, 1, R_G);
        c.y = row_data(&r, 0, R_A);
        g.y = row_data(&r, 1, R_A);
        c.db = row_data(&r, 0, R_DBIAS);
        g.db = row_data(&r, 1, R_DBIAS);
        BOTH(stx_linear_bwd, (cx, &c), (gx, &g));
        arr_check("linear da", &r.a[R_G], 1e-6);
        arr_check("linear db", &r.a[R_DBIAS], 4e-6);
        rows_free(&r);
    }
}

/* Nonzero if widths[k] is tested with N rows; N is element r of {1, 3, 37, 200}. Widths
   up to 300 are tested with all row counts, unless there are too many elements. Larger
   widths use the same row loops, so they are tested only with 37 or 3 rows; from 2052
   on, also with 1 row; and above 4096, only with 1 row. */
static int rows_selected(size_t N, size_t r, size_t k) {
    size_t C = widths[k];
    if (C <= 300 && N * C > 80000) return 0;
    if (C > 300 && r != 1 + k % 2 && (r || C < 2052)) return 0;
    if (C > 4096 && (r || off || (brief && half))) return 0;
    return !brief || C > 300 || r == (k % 2 ? 1 : 3);
}

static void test_rows(void) {
    static const size_t count[] = {1, 3, 37, 200};
    size_t k, r;
    for (k = 0; k < COUNT(widths); k++)
        for (r = 0; r < COUNT(count); r++)
            if (rows_selected(count[r], r, k))
                test_row_kernels(count[r], widths[k], r % 2 ? P_ : B_);
}


// >>embedding

/* Returns ids in [0,V). how: 0 all equal; 1 all different, which requires n <= V; 2
   Zipf-distributed. */
static int32_t *make_ids(size_t n, size_t V, int how) {
    int32_t *ids = (int32_t *)malloc(n * sizeof *ids);
    size_t i;
    for (i = 0; i < n; i++) {
        double u = (test_rand() + 1) / 2;
        if (how == 0)
            ids[i] = (int32_t)(V - 1);
        else if (how == 1)
            ids[i] = (int32_t)((i * 7919) % V);
        else
            ids[i] = (int32_t)((double)V * u * u * u * u);
    }
    return ids;
}

static void test_embedding_case(size_t V, size_t N, size_t C, int how) {
    int32_t *ids = make_ids(N, V, how), *dev = ids_to_gpu(ids, N);
    arr table = arr_of(V * C, 1, 0, P_), y = arr_of(N * C, 1, 0, N_), dy = arr_of(N * C, 3, 1, N_),
        dt = arr_of(V * C, 3, 1, B_), dw = arr_of(N * C, 1, 0, N_);
    BOTH(stx_embedding_fwd, (cx, y.c, table.c, ids, N, C), (gx, y.d, table.d, dev, N, C));
    arr_check("embedding", &y, 0);
    BOTH(stx_embedding_bwd, (cx, dt.c, dy.c, ids, N, C), (gx, dt.d, dy.d, dev, N, C));
    arr_check("embedding dtable of integers", &dt, 0);
    BOTH(stx_embedding_bwd, (cx, dt.c, dw.c, ids, N, C), (gx, dt.d, dw.d, dev, N, C));
    arr_check("embedding dtable", &dt, how ? 2e-6 : 2e-5);
    if (how != 0 && N < 400) { /* the gradient of an activation, as in stx_gather */
        arr da = arr_of(V * C, 3, 0, N_);
        BOTH(stx_embedding_bwd, (cx, da.c, dw.c, ids, N, C), (gx, da.d, dw.d, dev, N, C));
        arr_check("gather da", &da, 2e-6);
        arr_free(&da);
    }
    arr_free(&table);
    arr_free(&y);
    arr_free(&dy);
    arr_free(&dt);
    arr_free(&dw);
    stx_cuda_free(gx, dev);
    free(ids);
}

enum { ORDER_V = 1100, ORDER_EACH = 16, ORDER_N = ORDER_V * ORDER_EACH };

/* Each id occurs 16 times, in several of the sorted chunks, and its rows are in one tile
   of sorted positions. They must be added in their order in `ids`. */
static void test_embedding_order(void) {
    int32_t *ids = (int32_t *)malloc(ORDER_N * sizeof *ids), *dev;
    arr dt = arr_of(ORDER_V, 1, 0, B_), dy = arr_of(ORDER_N, 1, 0, N_);
    float *sum = (float *)calloc(ORDER_V, sizeof *sum), *got;
    size_t i, bad = 0;
    for (i = 0; i < ORDER_N; i++) {
        ids[i] = (int32_t)(i % ORDER_V);
        sum[ids[i]] += dy.c[i];
    }
    dev = ids_to_gpu(ids, ORDER_N);
    stx_embedding_bwd_cuda(gx, dt.d, dy.d, dev, ORDER_N, 1);
    got = arr_get(&dt);
    for (i = 0; i < ORDER_V; i++) bad += got[i] != dt.c[i] + sum[i];
    CHECK(!bad, "embedding order: %zu sums differ", bad);
    free(got);
    free(sum);
    free(ids);
    arr_free(&dt);
    arr_free(&dy);
    stx_cuda_free(gx, dev);
}

static void test_embedding(void) {
    static const size_t cases[][3] = {{1, 1, 1},        {5, 7, 3},       {28, 300, 33},
                                      {256, 4500, 12},  {3000, 2048, 5}, {9000, 6000, 4},
                                      {50, 200, 516},   {50, 200, 1030}, {2049, 2049, 1},
                                      {17000, 16385, 1}};
    size_t k;
    int how;
    for (k = 0; k < COUNT(cases); k++)
        for (how = 0; how < 3; how++) {
            size_t V = cases[k][0], N = cases[k][1], C = cases[k][2];
            test_embedding_case(V, how == 1 && N > V ? V : N, C, how);
        }
    test_embedding_order();
}


// >>losses

/* Returns logits (N,V) with a row stride of ld. The padding is NaN. */
static arr logits_of(size_t N, size_t V, size_t ld) {
    float *v = cuda_random(N * ld, 8, 0);
    arr a;
    size_t i;
    for (i = 0; i < N * ld; i++)
        if (i % ld >= V) v[i] = (float)NAN;
    a = arr_from(v, N * ld, N_);
    free(v);
    return a;
}

/* Checks that the gradients of the padding are zero. Requires that arr_check has
   already copied the GPU's values to a->c. */
static void padding_check(const char *name, const arr *a, size_t V, size_t ld) {
    size_t i, bad = 0;
    for (i = 0; i < a->n; i++)
        if (i % ld >= V) bad += !(a->c[i] == 0);
    CHECK(!bad, "%s of %zu classes, stride %zu: %zu values of the padding are not 0", name, V, ld,
          bad);
}

/* number of rows, number of classes, row stride */
static const size_t loss_cases[][3] = {
    {1, 1, 1}, {3, 2, 2}, {70, 28, 28}, {9, 127, 127}, {5, 513, 513}, {4, 1024, 1024},
    {3, 4099, 4099}, {2, 40001, 40001}, {3, 2, 7}, {17, 28, 64}, {9, 205, 256}, {5, 513, 576},
    {2, 40001, 40064}};

static void test_cross_entropy(size_t N, size_t V, size_t ld) {
    int32_t *ids = (int32_t *)malloc(N * sizeof *ids), *dev;
    arr logits = logits_of(N, V, ld), loss = arr_of(1, 1, 0, B_), top = arr_of(N, 1, 0, B_),
        inv = arr_of(N, 1, 0, B_), g = arr_of(1, 1, 0, B_), d = arr_of(N * ld, 1, 0, N_);
    size_t i;
    int acc;
    for (i = 0; i < N; i++) ids[i] = (int32_t)(i ? (i * 7919) % V : V - 1);
    dev = ids_to_gpu(ids, N);
    BOTH(k_cross_entropy_fwd, (cx, loss.c, top.c, inv.c, logits.c, ids, N, V, ld, (double)N),
         (gx, loss.d, top.d, inv.d, logits.d, dev, N, V, ld, (double)N));
    arr_check("cross_entropy", &loss, 1e-6);
    arr_check("cross_entropy top", &top, 0);
    arr_check("cross_entropy inv", &inv, 5e-6);
    for (acc = 0; acc < 2; acc++) {
        BOTH(k_cross_entropy_bwd, (cx, d.c, g.c, top.c, inv.c, logits.c, ids, N, V, ld, 3, acc),
             (gx, d.d, g.d, top.d, inv.d, logits.d, dev, N, V, ld, 3, acc));
        arr_check("cross_entropy dlogits", &d, 1e-6);
        padding_check("cross_entropy dlogits", &d, V, ld);
    }
    BOTH(k_cross_entropy_bwd, (cx, logits.c, g.c, top.c, inv.c, logits.c, ids, N, V, ld, 3, 0),
         (gx, logits.d, g.d, top.d, inv.d, logits.d, dev, N, V, ld, 3, 0));
    arr_check("cross_entropy dlogits in place", &logits, 1e-6);
    padding_check("cross_entropy dlogits in place", &logits, V, ld);
    arr_free(&logits);
    arr_free(&loss);
    arr_free(&top);
    arr_free(&inv);
    arr_free(&g);
    arr_free(&d);
    stx_cuda_free(gx, dev);
    free(ids);
}

/* A token loss with weights, in which every third row is ignored. */
typedef struct token_loss {
    size_t N, V, ld;
    int32_t *ids, *known, *dev, *dev_known;
    arr logits, loss, nll, top, inv, g, d, w, weights;
} token_loss;

static token_loss token_loss_make(size_t N, size_t V, size_t ld) {
    token_loss t;
    size_t i;
    t.N = N;
    t.V = V;
    t.ld = ld;
    t.ids = (int32_t *)malloc(N * sizeof *t.ids);
    t.known = (int32_t *)malloc(N * sizeof *t.known);
    t.logits = logits_of(N, V, ld);
    t.loss = arr_of(1, 1, 0, B_);
    t.nll = arr_of(N, 1, 0, B_);
    t.top = arr_of(N, 1, 0, B_);
    t.inv = arr_of(N, 1, 0, B_);
    t.g = arr_of(1, 1, 0, B_);
    t.d = arr_of(N * ld, 1, 0, N_);
    t.w = arr_of(N, 1, 0, B_);
    t.weights = arr_of(N, 2, 0, N_);
    for (i = 0; i < N; i++) {
        t.ids[i] = (int32_t)(i ? (i * 7919) % V : V - 1);
        if (i % 3 == 1) t.ids[i] = -100;
    }
    t.dev = ids_to_gpu(t.ids, N);
    t.dev_known = ids_to_gpu(t.ids, N);
    return t;
}

static void token_loss_free(token_loss *t) {
    arr_free(&t->logits);
    arr_free(&t->loss);
    arr_free(&t->nll);
    arr_free(&t->top);
    arr_free(&t->inv);
    arr_free(&t->g);
    arr_free(&t->d);
    arr_free(&t->w);
    arr_free(&t->weights);
    stx_cuda_free(gx, t->dev);
    stx_cuda_free(gx, t->dev_known);
    free(t->ids);
    free(t->known);
}

static void test_loss_weights(const token_loss *t, int weighted, double divisor) {
    size_t N = t->N;
    int32_t *got = (int32_t *)malloc(N * sizeof *got);
    stx__loss_weights_args wc, wg;
    memset(&wc, 0, sizeof wc);
    wc.N = N;
    wc.ignore = 1;
    wc.ignored_id = -100;
    wc.divisor = divisor;
    wg = wc;
    wc.targets = t->ids;
    wc.weights = weighted ? t->weights.c : NULL;
    wc.w = t->w.c;
    wc.known = t->known;
    wg.targets = t->dev;
    wg.weights = weighted ? t->weights.d : NULL;
    wg.w = t->w.d;
    wg.known = t->dev_known;
    BOTH(inner_loss_weights, (cx, &wc), (gx, &wg));
    arr_check("token weights", &t->w, divisor > 0 ? 1e-7 : 1e-5);
    stx_cuda_download(gx, got, t->dev_known, N * sizeof *got);
    CHECK(!memcmp(got, t->known, N * sizeof *got) && (N < 2 || t->known[1] == -1)
              && t->known[0] == t->ids[0],
          "targets that are not ignored");
    free(got);
}

static void test_token_loss(size_t N, size_t V, size_t ld) {
    token_loss t = token_loss_make(N, V, ld);
    const arr logits = t.logits, loss = t.loss, nll = t.nll, top = t.top, inv = t.inv, g = t.g,
              d = t.d, w = t.w;
    int how, acc;
    for (how = 0; how < 4; how++) {
        test_loss_weights(&t, how & 2, how & 1 ? 3 : 0);
        BOTH(k_token_loss_fwd,
             (cx, loss.c, nll.c, top.c, inv.c, logits.c, t.known, w.c, N, V, ld),
             (gx, loss.d, nll.d, top.d, inv.d, logits.d, t.dev_known, w.d, N, V, ld));
        arr_check("token loss", &loss, 1e-5);
        arr_check("token nll", &nll, 2e-6);
        arr_check("token loss top", &top, 0);
        arr_check("token loss inv", &inv, 5e-6);
        for (acc = 0; acc < 2; acc++) {
            BOTH(k_token_loss_bwd,
                 (cx, d.c, g.c, top.c, inv.c, logits.c, t.known, w.c, N, V, ld, acc),
                 (gx, d.d, g.d, top.d, inv.d, logits.d, t.dev_known, w.d, N, V, ld, acc));
            arr_check("token loss dlogits", &d, 5e-6);
            padding_check("token loss dlogits", &d, V, ld);
        }
    }
    token_loss_free(&t);
}

/* Cluster c has the ids from cluster_end[c - 1] (0 if c = 0) to cluster_end[c] - 1. */
static const size_t cluster_end[4] = {10, 12, 500, 2000};

enum { IDS_MIXED, IDS_EQUAL, IDS_NONE, IDS_KINDS };

/* Fills ids and counts the ids of each cluster. kind: every fifth id is -1, all ids are
   equal, or all are -1. */
static void cluster_ids(int32_t *ids, size_t n, int kind, size_t count[4]) {
    size_t i, c;
    memset(count, 0, 4 * sizeof *count);
    for (i = 0; i < n; i++) {
        ids[i] = (int32_t)((i * i * 31) % (i % 2 ? 13 : 2000));
        if (i % 5 == 4) ids[i] = -1;
        if (kind != IDS_MIXED) ids[i] = kind == IDS_EQUAL ? 77 : -1;
        for (c = 0; ids[i] >= 0 && (size_t)ids[i] >= cluster_end[c]; c++) continue;
        if (ids[i] >= 0) count[c]++;
    }
}

/* Returns the capacity of cluster c, which has `count` ids. tight: the capacity of
   cluster 2 is too small by one. */
static size_t cluster_capacity(size_t c, size_t count, int head, int tight) {
    if (head && c == 0) return 0;
    return tight && c == 2 && count ? count - 1 : count + 3 * c;
}

/* Places the results in one array: `at` (n elements), `local` and `place` (`all`
   elements each), and `over` (1 element). */
static void cluster_point(stx__cluster_sort_args *s, const int32_t *ids, int32_t *result,
                          size_t all) {
    s->ids = ids;
    s->at = result;
    s->local = result + s->n;
    s->place = result + s->n + all;
    s->over = result + s->n + 2 * all;
}

/* The kernel must set activations to NaN if the flag is set. */
static void test_nan_if(const int32_t *dev_flag, int flag) {
    arr y = arr_of(9, 1, 0, N_);
    stx_real v[9];
    stx__nan_if_cuda(gx, y.d, 9, dev_flag);
    stx_download(gx, v, y.d, 9);
    CHECK(flag ? isnan(v[0]) && isnan(v[8]) : v[0] == y.c[0] && v[8] == y.c[8],
          "nan_if with flag %d: %g", flag, (double)v[0]);
    arr_free(&y);
}

/* Sorts ids by cluster. The result must be identical to the CPU's, even if a cluster's
   capacity is too small. */
static void test_cluster_sort(size_t n, int kind, int head, int tight) {
    size_t all, size, c, i, count[4];
    int32_t *ids = (int32_t *)malloc(n * sizeof *ids), *dev, *a, *b, *dev_b;
    stx__cluster_sort_args s, g;
    cluster_ids(ids, n, kind, count);
    memset(&s, 0, sizeof s);
    s.n = n;
    s.count = 4;
    s.head = head;
    s.leftover = head ? -1 : 0;
    s.forward_columns = tight;
    for (c = 0; c < 4; c++) {
        s.end[c] = cluster_end[c];
        s.first[c + 1] = s.first[c] + cluster_capacity(c, count[c], head, tight);
    }
    all = s.first[4];
    size = n + 2 * all + 1;
    dev = ids_to_gpu(ids, n);
    a = (int32_t *)malloc(size * sizeof *a);
    b = (int32_t *)malloc(size * sizeof *b);
    dev_b = (int32_t *)cuda_bytes(gx, NULL, size * sizeof *b);
    g = s;
    cluster_point(&s, ids, a, all);
    cluster_point(&g, dev, dev_b, all);
    BOTH(inner_cluster_sort, (cx, &s), (gx, &g));
    stx_cuda_download(gx, b, dev_b, size * sizeof *b);
    CHECK(!memcmp(a, b, size * sizeof *a),
          "clusters of %zu ids, kind %d, head %d, tight %d: differ from the CPU", n, kind, head,
          tight);
    CHECK(b[size - 1] == (tight && count[2] > 0), "clusters of %zu ids: over is %d", n,
          (int)b[size - 1]);
    for (i = 0; i < all; i++)
        CHECK(b[n + i] == s.leftover || (size_t)b[n + all + i] < n, "place %zu", i);
    test_nan_if(dev_b + size - 1, (int)b[size - 1]);
    stx_cuda_free(gx, dev);
    stx_cuda_free(gx, dev_b);
    free(ids);
    free(a);
    free(b);
}

static void test_cluster_sorts(void) {
    static const size_t count[] = {1, 31, 33, 255, 256, 257, 1000, 5000, 9000};
    size_t k;
    int kind, head, tight;
    for (k = 0; k < COUNT(count); k++)
        for (kind = 0; kind < IDS_KINDS; kind++)
            for (head = 0; head < 2; head++)
                for (tight = 0; tight < 2; tight++)
                    test_cluster_sort(count[k], kind, head, tight);
}

/* Tests rows that contain some -infinity, only -infinity, one +infinity, one NaN, only
   NaN, or only finite values. */
static void test_infinities(void) {
    enum { V = 530, R = 6 };

    float *v = cuda_random(R * V, 3, 0);
    int32_t ids[R] = {525, 6, 7, 8, 9, 10}, *dev = ids_to_gpu(ids, R);
    arr logits, loss, top, inv, y;
    int i;
    for (i = 0; i < V; i++) {
        v[i] = i % 600 < 500 ? -HUGE_VALF : v[i];
        v[V + i] = -HUGE_VALF;
        v[4 * V + i] = NAN;
    }
    v[2 * V + 100] = HUGE_VALF;
    v[3 * V + 100] = NAN;
    logits = arr_from(v, R * V, N_);
    loss = arr_of(1, 1, 0, B_);
    top = arr_of(R, 1, 0, B_);
    inv = arr_of(R, 1, 0, B_);
    y = arr_of(R * V, 1, 0, N_);
    BOTH(stx_softmax_fwd, (cx, y.c, logits.c, R, V), (gx, y.d, logits.d, R, V));
    arr_check("softmax of infinities and NaN", &y, 1e-6);
    BOTH(stx_softmax_fwd, (cx, y.c, logits.c, 53, 60), (gx, y.d, logits.d, 53, 60));
    arr_check("softmax of infinities and NaN, narrow rows", &y, 1e-6);
    BOTH(k_cross_entropy_fwd, (cx, loss.c, top.c, inv.c, logits.c, ids, R, V, V, 6),
         (gx, loss.d, top.d, inv.d, logits.d, dev, R, V, V, 6));
    arr_check("cross_entropy of infinities and NaN", &loss, 1e-6);
    arr_check("cross_entropy inv of infinities and NaN", &inv, 2e-6);
    BOTH(k_cross_entropy_fwd, (cx, loss.c, top.c, inv.c, logits.c, ids, 1, V, V, 6),
         (gx, loss.d, top.d, inv.d, logits.d, dev, 1, V, V, 6));
    arr_check("cross_entropy of one row with -infinity", &loss, 1e-6);
    arr_free(&logits);
    arr_free(&loss);
    arr_free(&top);
    arr_free(&inv);
    arr_free(&y);
    stx_cuda_free(gx, dev);
    free(v);
}

/* Tests the log-probabilities of an adaptive softmax: first the head, which includes
   the logits of two clusters, then one of the clusters. */
static void test_cluster_log_probs(int forward) {
    const size_t N = 7, V = 900, K = 3, size0 = 300, size1 = 500;
    arr out = arr_of(N * V, 1, 0, N_), gate = arr_of(N * K, 1, 0, B_),
        l0 = arr_of(N * (size0 + 2), 5, 0, N_), l1 = arr_of(N * size1, 5, 0, N_);
    stx__cluster_log_probs_args kc, kg;
    memset(&kc, 0, sizeof kc);
    kc.N = N;
    kc.V = V;
    kc.K = K;
    kc.forward = forward;
    kc.size = size0;
    kc.w = size0 + 2;
    kg = kc;
    kc.out = out.c;
    kc.gate = gate.c;
    kc.logits = l0.c;
    kg.out = out.d;
    kg.gate = gate.d;
    kg.logits = l0.d;
    BOTH(inner_cluster_log_probs, (cx, &kc), (gx, &kg));
    arr_check("log probabilities of the head", &out, 1e-6);
    arr_check("log probabilities of the gates", &gate, 1e-6);
    kc.c = kg.c = 1;
    kc.start = kg.start = size0;
    kc.size = kc.w = kg.size = kg.w = size1;
    kc.logits = l1.c;
    kg.logits = l1.d;
    BOTH(inner_cluster_log_probs, (cx, &kc), (gx, &kg));
    arr_check("log probabilities of a cluster", &out, 1e-6);
    arr_free(&out);
    arr_free(&gate);
    arr_free(&l0);
    arr_free(&l1);
}

static void test_losses(void) {
    size_t k;
    for (k = 0; k < COUNT(loss_cases); k++)
        test_cross_entropy(loss_cases[k][0], loss_cases[k][1], loss_cases[k][2]);
    for (k = 0; k < COUNT(loss_cases); k++)
        test_token_loss(loss_cases[k][0], loss_cases[k][1], loss_cases[k][2]);
    test_cluster_sorts();
    test_infinities();
    test_cluster_log_probs(0);
    test_cluster_log_probs(1);
}

/* Tests all elementwise kernels with NaN, infinities, zeros and extreme values. */
static void test_special(void) {
    static const float special[] = {NAN, HUGE_VALF, -HUGE_VALF, -0.0f, 1e30f, -1e30f, 1e-20f,
                                    90, -90, 10, -10, 15.5f, -14};
    float v[64];
    size_t i, n = 64;
    arr a, y, g, d;
    int act;
    for (i = 0; i < n; i++) v[i] = (float)((double)i - 32);
    memcpy(v, special, sizeof special);
    a = arr_from(v, n, N_);
    y = arr_of(n, 1, 0, N_);
    g = arr_of(n, 1, 0, N_);
    d = arr_of(n, 1, 0, N_);
    for (act = 0; act <= STX_ACT_SIGMOID; act++) {
        BOTH(stx_act_fwd, (cx, y.c, a.c, n, act), (gx, y.d, a.d, n, act));
        arr_check("act of special values", &y, 1e-6);
        BOTH(k_act_bwd, (cx, d.c, g.c, y.c, a.c, n, act, 0), (gx, d.d, g.d, y.d, a.d, n, act, 0));
        arr_check("act da of special values", &d, 1e-6);
        BOTH(k_act_bwd, (cx, d.c, a.c, y.c, a.c, n, act, 0), (gx, d.d, a.d, y.d, a.d, n, act, 0));
        arr_check("act da of special dy", &d, 1e-6);
    }
    BOTH(stx_add_fwd, (cx, y.c, a.c, g.c, n, n), (gx, y.d, a.d, g.d, n, n));
    arr_check("add special values", &y, 0);
    BOTH(stx_mul_fwd, (cx, y.c, a.c, g.c, n, n), (gx, y.d, a.d, g.d, n, n));
    arr_check("mul special values", &y, 0);
    BOTH(k_dropout_fwd, (cx, y.c, a.c, n, 0.5f, 3, 4, 0, 0), (gx, y.d, a.d, n, 0.5f, 3, 4, 0, 0));
    arr_check("dropout of special values", &y, 0);
    BOTH(stx_copy2d, (cx, y.c, 8, a.c, 8, 8, 8, 0), (gx, y.d, 8, a.d, 8, 8, 8, 0));
    arr_check("copy2d of special values", &y, 0);
    arr_free(&a);
    arr_free(&y);
    arr_free(&g);
    arr_free(&d);
}


// >>optimisers: tensors of odd sizes. All tensors share one parameter allocation or, if
// there are more than the kernels' table can hold, each has a separate allocation

enum { TENSORS = 70 };

typedef struct opt {
    size_t tensors, pieces;
    arr p[TENSORS], g[TENSORS], s0[TENSORS], s1[TENSORS];
    stx_optim_chunk *c, *host, *d; /* c: the CPU's chunks; host and d: the GPU's chunks
                                      in host and in device memory */
    stx_update u, *du;
    double *squares, *dsq;
} opt;

/* An optimiser and its settings. */
typedef struct opt_case {
    const char *name;
    size_t tensors;
    int kind;
    float momentum, decay;
    double clip;
    int hat; /* selects a variant: epsilon inside the root, or LAMB without bias correction */
} opt_case;

enum { NAN_STEP = 4, INF_STEP = 6 }; /* steps in which a gradient is not finite, so that
                                        the update must be skipped */

static int is_skipped(int step) {
    return step == NAN_STEP || step == INF_STEP;
}

static size_t opt_size(size_t tensors, size_t t) {
    static const size_t size[] = {4096, 1, 5, 8197, 129, 12288, 1000, 33};
    return tensors > COUNT(size) ? 40 + t : size[t];
}

/* With Muon, every other tensor is a matrix, which has one state. Every third tensor has
   its own learning rate and weight decay. */
static void opt_make(opt *o, size_t tensors, int states, int muon, float decay) {
    size_t t, k, at;
    o->tensors = tensors;
    for (t = 0, o->pieces = 0; t < tensors; t++)
        o->pieces += (opt_size(tensors, t) + 4095) / 4096;
    o->c = (stx_optim_chunk *)calloc(o->pieces, sizeof *o->c);
    o->host = (stx_optim_chunk *)calloc(o->pieces, sizeof *o->host);
    o->squares = (double *)calloc(o->pieces, sizeof *o->squares);
    for (t = 0, k = 0; t < tensors; t++) {
        size_t n = opt_size(tensors, t);
        o->p[t] = arr_of(n, 1, 0, P_);
        o->g[t] = arr_of(n, 1, 0, B_);
        o->s0[t] = arr_of(n, 0, 0, B_);
        o->s1[t] = arr_of(n, 0, 0, B_);
        for (at = 0; at < n; at += 4096, k++) {
            stx_optim_chunk *c = o->c + k, *d = o->host + k;
            c->n = d->n = n - at < 4096 ? n - at : 4096;
            c->tensor = d->tensor = t;
            c->lr_factor = d->lr_factor = t % 3 == 2 ? 0.25f : 1;
            c->decay = d->decay = t % 3 == 2 ? 2 * decay : decay;
            c->p = o->p[t].c + at;
            c->g = o->g[t].c + at;
            c->s[0] = states > 0 ? o->s0[t].c + at : NULL;
            c->s[1] = states > 1 && !(muon && t % 2) ? o->s1[t].c + at : NULL;
            d->p = o->p[t].d + at;
            d->g = o->g[t].d + at;
            d->s[0] = states > 0 ? o->s0[t].d + at : NULL;
            d->s[1] = c->s[1] ? o->s1[t].d + at : NULL;
        }
    }
    memset(&o->u, 0, sizeof o->u);
    o->d = (stx_optim_chunk *)cuda_bytes(gx, o->host, o->pieces * sizeof *o->d);
    o->du = (stx_update *)cuda_bytes(gx, &o->u, sizeof o->u);
    o->dsq = (double *)stx_cuda_alloc(gx, o->pieces * sizeof(double), STX_MEM_BYTES);
}

static void opt_free(opt *o) {
    size_t t;
    for (t = 0; t < o->tensors; t++) {
        arr_free(o->p + t);
        arr_free(o->g + t);
        arr_free(o->s0 + t);
        arr_free(o->s1 + t);
    }
    free(o->c);
    free(o->host);
    free(o->squares);
    stx_cuda_free(gx, o->d);
    stx_cuda_free(gx, o->du);
    stx_cuda_free(gx, o->dsq);
}

static int opt_states(const opt_case *k) {
    if (k->kind == STX_SGD) return k->momentum > 0;
    return k->kind == STX_ADAGRAD ? 1 : 2;
}

static stx_optim_desc opt_desc(const opt_case *k) {
    stx_optim_desc d;
    memset(&d, 0, sizeof d);
    d.kind = k->kind;
    d.clip = k->clip;
    d.beta1 = 0.9;
    d.beta2 = 0.999;
    d.radam_skip = k->kind == STX_RADAM && k->decay > 0.05f;
    d.eps_hat = k->hat && k->kind != STX_LAMB;
    d.no_correction = k->hat && k->kind == STX_LAMB;
    d.trust_max = k->hat && k->kind == STX_LAMB ? 20 : 0;
    return d;
}

/* Generates new gradients. Some tensors' gradients are large enough to be clipped,
   others are not. */
static void opt_gradients(opt *o, int step) {
    size_t t, i;
    for (t = 0; t < o->tensors; t++) {
        double s = t % 3 == 1 ? 3 : 0.01;
        for (i = 0; i < o->g[t].n; i++) o->g[t].c[i] = (float)(test_rand() * s);
        if (step == NAN_STEP && t == 1) o->g[t].c[0] = NAN;
        if (step == INF_STEP && t == 0) o->g[t].c[o->g[t].n - 1] = HUGE_VALF;
        arr_upload(&o->g[t]);
    }
}

static void opt_clip_values(opt *o, const char *name, int step) {
    size_t t, i;
    BOTH(stx_clip_values, (cx, o->c, o->pieces, 0.9f), (gx, o->d, o->pieces, 0.9f));
    for (t = 0; t < o->tensors; t++) {
        const arr *g = o->g + t;
        if (!is_skipped(step)) arr_check(name, g, 0);
        for (i = 0; i < g->n; i++)
            if (g->c[i] > 0.9f && g->c[i] < 1e30f) break;
        CHECK(i == g->n, "%s: element %zu of gradient %zu is not clipped", name, i, t);
    }
}

static void opt_prepare(opt *o, const opt_case *k, int step) {
    const char *name = k->name;
    double *sq = (double *)malloc(o->pieces * sizeof *sq);
    stx_optim_desc d = opt_desc(k);
    stx_update u;
    size_t i;
    BOTH(stx_sum_squares, (cx, o->squares, o->c, o->pieces), (gx, o->dsq, o->d, o->pieces));
    stx_cuda_download(gx, sq, o->dsq, o->pieces * sizeof *sq);
    for (i = 0; i < o->pieces; i++)
        CHECK(CLOSE(sq[i], o->squares[i], 1e-13)
                  || (!(sq[i] <= 1e300) && !(o->squares[i] <= 1e300)),
              "%s: sum of squares of chunk %zu is %g, expected %g", name, i, sq[i], o->squares[i]);
    BOTH(stx_optim_prepare, (cx, &o->u, o->c, o->pieces, o->squares, &d),
         (gx, o->du, o->d, o->pieces, o->dsq, &d));
    stx_cuda_download(gx, &u, o->du, sizeof u);
    CHECK(u.ok == o->u.ok && u.ok == !is_skipped(step) && u.step == o->u.step
              && u.skipped == o->u.skipped,
          "%s: step %d: ok %d, %llu steps, %llu skipped", name, step, u.ok,
          (unsigned long long)u.step, (unsigned long long)u.skipped);
    CHECK(!u.ok || CLOSE(u.norm / o->u.norm, 1, 1e-12), "%s: norm %.17g, expected %.17g", name,
          u.norm, o->u.norm);
    CHECK(!u.ok
              || (CLOSE(u.factor, o->u.factor, 1e-7) && CLOSE(u.correction1, o->u.correction1, 1e-7)
                  && CLOSE(u.correction2, o->u.correction2, 1e-9) && u.plain == o->u.plain),
          "%s: factor %g, expected %g", name, (double)u.factor, (double)o->u.factor);
    CHECK(o->u.plain == (k->kind == STX_RADAM && o->u.step < 6), "%s: update %llu is %s", name,
          (unsigned long long)o->u.step, o->u.plain ? "plain" : "divided by the root of v");
    stx_cuda_download(gx, o->host, o->d, o->pieces * sizeof *o->host);
    for (i = 0; i < o->pieces; i++)
        CHECK(CLOSE(o->host[i].lr / (o->c[i].lr > 0 ? o->c[i].lr : 1), o->c[i].lr > 0, 2e-7),
              "%s: learning rate of chunk %zu is %g, expected %g", name, i, (double)o->host[i].lr,
              (double)o->c[i].lr);
    free(sq);
}

static void opt_lamb(opt *o, const opt_case *k) {
    double *norms = (double *)calloc(o->pieces, 2 * sizeof *norms),
           *dev = (double *)cuda_bytes(gx, norms, 2 * o->pieces * sizeof *norms);
    double trust_max = opt_desc(k).trust_max;
    const stx_adam_args lamb = {0.9f, 0.1f, 0.999f, 0.001f, 1e-6f, 0};
    BOTH(stx_lamb_direction, (cx, &o->u, o->c, o->pieces, norms, &lamb),
         (gx, o->du, o->d, o->pieces, dev, &lamb));
    BOTH(stx_lamb_update, (cx, &o->u, o->c, o->pieces, norms, trust_max),
         (gx, o->du, o->d, o->pieces, dev, trust_max));
    stx_cuda_free(gx, dev);
    free(norms);
}

/* Without the matmuls between the kernels. */
static void opt_muon(opt *o, const opt_case *k) {
    double *sums = (double *)calloc(o->pieces, sizeof *sums),
           *got = (double *)calloc(o->pieces, sizeof *got),
           *dev = (double *)cuda_bytes(gx, sums, o->pieces * sizeof *sums);
    const stx_adam_args adam = {0.9f, 0.1f, 0.999f, 0.001f, 1e-8f, 1};
    size_t t, i;
    BOTH(stx_muon_direction, (cx, &o->u, o->c, o->pieces, sums, k->momentum),
         (gx, o->du, o->d, o->pieces, dev, k->momentum));
    for (t = 0; t < o->tensors && o->u.ok; t++) arr_check(k->name, o->g + t, 1e-6);
    stx_cuda_download(gx, got, dev, o->pieces * sizeof *got);
    for (i = 0; i < o->pieces; i++)
        CHECK(CLOSE(got[i] / (sums[i] > 0 ? sums[i] : 1), sums[i] > 0, 1e-6),
              "%s: sum of squares of chunk %zu is %g, expected %g", k->name, i, got[i], sums[i]);
    BOTH(stx_muon_update, (cx, &o->u, o->c, o->pieces, &adam),
         (gx, o->du, o->d, o->pieces, &adam));
    stx_cuda_free(gx, dev);
    free(sums);
    free(got);
}

static void opt_update(opt *o, const opt_case *k) {
    stx_adam_args adam = {0.9f, 0.1f, 0.999f, 0.001f, 1e-8f, 0};
    switch (k->kind) {
    case STX_SGD:
        BOTH(stx_sgd_update, (cx, &o->u, o->c, o->pieces, k->momentum),
             (gx, o->du, o->d, o->pieces, k->momentum));
        break;
    case STX_LAMB: opt_lamb(o, k); break;
    case STX_MUON: opt_muon(o, k); break;
    case STX_ADAGRAD:
        BOTH(stx_adagrad_update, (cx, &o->u, o->c, o->pieces, 1e-10f),
             (gx, o->du, o->d, o->pieces, 1e-10f));
        break;
    default:
        adam.decoupled = k->kind != STX_ADAM;
        BOTH(stx_adam_update, (cx, &o->u, o->c, o->pieces, &adam),
             (gx, o->du, o->d, o->pieces, &adam));
    }
}

static void opt_check(opt *o, const opt_case *k, int step) {
    const char *name = k->name;
    int states = opt_states(k);
    size_t t, i;
    for (t = 0; t < o->tensors; t++) {
        const arr *p = o->p + t, *g = o->g + t;
        float *before = NULL;
        if (is_skipped(step)) {
            before = (float *)malloc(p->n * sizeof *before);
            memcpy(before, p->c, p->n * sizeof *before);
        }
        arr_check(name, p, is_skipped(step) ? 0 : 1e-6);
        if (before)
            CHECK(!memcmp(before, p->c, p->n * sizeof *before),
                  "%s: a skipped update changed tensor %zu", name, t);
        free(before);
        arr_check(name, g, 0);
        for (i = 0; i < g->n; i++)
            if (!(g->c[i] == 0)) break;
        CHECK(i == g->n, "%s: gradient %zu is not cleared", name, t);
        if (states > 0) arr_check(name, o->s0 + t, 1e-6);
        if (states > 1) arr_check(name, o->s1 + t, 1e-6);
    }
}

static void test_optimiser(const opt_case *k) {
    static opt o;
    int step;
    size_t t;
    opt_make(&o, k->tensors, opt_states(k), k->kind == STX_MUON, k->decay);
    for (step = 0; step < 10; step++) {
        opt_gradients(&o, step);
        o.u.lr = 0.01 * (step + 1);
        stx_cuda_set_f64(gx, &o.du->lr, o.u.lr);
        if (k->clip == 1) opt_clip_values(&o, k->name, step);
        opt_prepare(&o, k, step);
        opt_update(&o, k);
        opt_check(&o, k, step);
        if (step == 8) {
            BOTH(stx_clamp, (cx, o.c, o.pieces, -0.5f, 0.25f), (gx, o.d, o.pieces, -0.5f, 0.25f));
            for (t = 0; t < k->tensors; t++) arr_check("clamp", o.p + t, 0);
        }
    }
    opt_free(&o);
}

static void test_metric(void) {
    double m = 3, got = 0, *dm = (double *)cuda_bytes(gx, &m, sizeof m);
    arr a = arr_of(1, 1, 0, B_);
    BOTH(inner_metric_accumulate, (cx, &m, a.c, 0.3, 1), (gx, dm, a.d, 0.3, 1));
    stx_cuda_download(gx, &got, dm, sizeof got);
    CHECK(CLOSE(got, m, 1e-15), "metric is %.17g, expected %.17g", got, m);
    BOTH(inner_metric_accumulate, (cx, &m, a.c, -7, 0), (gx, dm, a.d, -7, 0));
    stx_cuda_download(gx, &got, dm, sizeof got);
    CHECK(CLOSE(got, m, 1e-15), "metric is %.17g, expected %.17g", got, m);
    arr_free(&a);
    stx_cuda_free(gx, dm);
}

/* The kernels of Muon for one matrix, in the types of its scratch memory. */
static void test_muon_matrix(void) {
    static const size_t width[] = {2, 5, 64, 129};
    size_t k, c;
    for (k = 0; k < COUNT(width); k++) {
        const size_t n = width[k], size = n * (n + 700), count = (size + 4095) / 4096;
        arr u = arr_of(size, 3, 0, B_), X = arr_of(size, 1, 0, N_);
        arr A = arr_of(n * n, 1, 0, N_), B = arr_of(n * n, 1, 0, N_);
        double *sums = (double *)malloc(count * sizeof *sums), *dev;
        for (c = 0; c < count; c++) sums[c] = (double)(1 + c % 7);
        dev = (double *)cuda_bytes(gx, sums, count * sizeof *sums);
        BOTH(stx_muon_normalise, (cx, X.c, u.c, size, sums, count),
             (gx, X.d, u.d, size, dev, count));
        arr_check("muon normalise", &X, 3e-7);
        BOTH(stx_muon_polynomial, (cx, B.c, A.c, n, 3.4445f, -4.775f),
             (gx, B.d, A.d, n, 3.4445f, -4.775f));
        arr_check("muon polynomial", &B, 3e-7);
        stx_cuda_free(gx, dev);
        free(sums);
        arr_free(&u);
        arr_free(&X);
        arr_free(&A);
        arr_free(&B);
    }
}

static void test_optimisers(void) {
    /* The first six cases together run every kernel and include a full table. */
    static const opt_case cases[] = {
        /* name, number of tensors, kind, momentum, weight decay, clipping limit, hat */
        {"radam clip skip", 8, STX_RADAM, 0, 0.1f, 1, 0},
        {"lamb, many allocations", TENSORS, STX_LAMB, 0, 0.01f, 1, 0},
        {"adagrad", 8, STX_ADAGRAD, 0, 0, 0, 0},
        {"sgd momentum decay clip", 8, STX_SGD, 0.9f, 0.01f, 1, 0},
        {"lamb without correction, clip", 8, STX_LAMB, 0, 0.1f, 1, 1},
        {"muon clip", 8, STX_MUON, 0.95f, 0.1f, 1, 0},
        {"sgd", 8, STX_SGD, 0, 0, 0, 0},
        {"adagrad clip", 8, STX_ADAGRAD, 0, 0, 2, 0},
        {"adam decay", 8, STX_ADAM, 0, 0.01f, 0, 0},
        {"adamw clip", 8, STX_ADAMW, 0, 0.1f, 1, 0},
        {"radam", 8, STX_RADAM, 0, 0.01f, 0, 0},
        {"radam, many allocations", TENSORS, STX_RADAM, 0, 0.01f, 1, 0},
        {"adam, many allocations", TENSORS, STX_ADAM, 0, 0, 1, 0},
        {"adagrad clip, many allocations", TENSORS, STX_ADAGRAD, 0, 0, 2, 0},
        {"adam, eps hat", 8, STX_ADAM, 0, 0, 1, 1},
        {"adamw, eps hat", 8, STX_ADAMW, 0, 0.1f, 0, 1},
        {"lamb", 8, STX_LAMB, 0, 0.01f, 0, 0},
        {"muon, many allocations", TENSORS, STX_MUON, 0.8f, 0, 0, 0},
    };
    size_t i;
    for (i = 0; i < (brief ? 6 : COUNT(cases)); i++) test_optimiser(&cases[i]);
    test_muon_matrix();
    test_metric();
}


// >>sums: all sums give the same bits in every thread order

enum { SUM_ROWS = 300, SUM_COLUMNS = 132, SUM_IDS = 40 };

typedef struct sum_arrays {
    rows r;
    arr table, loss;
    int32_t *ids;
} sum_arrays;

/* Adds the bits of the first n elements of array a to the hash *h. */
static void hash_arr(uint64_t *h, const arr *a, size_t n) {
    *h = cuda_hash(gx, a->d, n, *h);
}

static sum_arrays sum_arrays_make(void) {
    const size_t N = SUM_ROWS, C = SUM_COLUMNS, n = N * C;
    int32_t ids[SUM_ROWS];
    sum_arrays t;
    size_t i;
    memset(&t, 0, sizeof t);
    for (i = 0; i < N; i++) ids[i] = (int32_t)(i * i * 7 % SUM_IDS);
    t.ids = ids_to_gpu(ids, N);
    t.r.N = N;
    t.r.C = C;
    t.r.a[R_A] = arr_of(n, 1, 0, N_);
    t.r.a[R_BIAS] = arr_of(C, 1, 0, P_);
    t.r.a[R_G] = t.r.a[R_F] = arr_of(n, 1, 0, N_);
    t.r.a[R_Y] = arr_of(n, 1, 0, N_);
    t.r.a[R_S] = arr_of(n, 1, 0, N_);
    t.r.a[R_D] = arr_of(n, 1, 0, N_);
    t.r.a[R_DF] = arr_of(n, 1, 0, N_);
    t.r.a[R_GAIN] = arr_of(C, 1, 0, P_);
    t.r.a[R_SHIFT] = arr_of(C, 1, 0, P_);
    t.r.a[R_DGAIN] = arr_of(C, 1, 0, B_);
    t.r.a[R_DSHIFT] = arr_of(C, 1, 0, B_);
    t.r.a[R_MEAN] = arr_of(N, 1, 0, B_);
    t.r.a[R_RSTD] = arr_of(N, 1, 0, B_);
    t.table = arr_of(SUM_IDS * C, 1, 0, B_);
    t.loss = arr_of(C, 1, 0, B_);
    t.r.a[R_DBIAS] = t.loss;
    return t;
}

/* Frees the host memory. The GPU memory is freed with the context. */
static void sum_arrays_free(sum_arrays *t) {
    int i;
    t->r.a[R_F].c = t->r.a[R_DBIAS].c = NULL; /* shared with R_G and loss */
    for (i = 0; i < ROW_ARRAYS; i++) free(t->r.a[i].c);
    free(t->table.c);
    free(t->loss.c);
}

static void sum_residual_norm(const rows *r, uint64_t *h) {
    stx_residual_norm_args k = residual_args(r, 1, 0, 0.1f, 1);
    const size_t n = r->N * r->C;
    stx_residual_norm_fwd_cuda(gx, &k);
    stx_residual_norm_bwd_cuda(gx, &k);
    hash_arr(h, &r->a[R_Y], n);
    hash_arr(h, &r->a[R_D], n);
    hash_arr(h, &r->a[R_DF], n);
    k = residual_args(r, 1, 1, 0.1f, 0);
    k.accumulate_ds = 1;
    stx_residual_norm_fwd_cuda(gx, &k);
    stx_residual_norm_bwd_cuda(gx, &k);
    hash_arr(h, &r->a[R_Y], n);
    hash_arr(h, &r->a[R_D], n);
    hash_arr(h, &r->a[R_DBIAS], r->C);
}

static void sum_columns(const rows *r, uint64_t *h) {
    const arr a = r->a[R_A], b = r->a[R_BIAS], g = r->a[R_G], s = r->a[R_S], d = r->a[R_D],
              gain = r->a[R_GAIN], dgain = r->a[R_DGAIN], dshift = r->a[R_DSHIFT],
              mean = r->a[R_MEAN], rstd = r->a[R_RSTD];
    const size_t N = r->N, C = r->C, n = N * C;
    inner_shift2d_cuda(gx, d.d, n / 4, n / 4, g.d, n / 4, n / 12, 4);
    hash_arr(h, &d, n);
    stx_sum_rows_cuda(gx, dshift.d, g.d, N, C);
    k_layernorm_bwd_cuda(gx, d.d, dgain.d, dshift.d, g.d, s.d, gain.d, mean.d, rstd.d, N, 33, 0);
    k_mul_bwd_cuda(gx, d.d, dgain.d, g.d, a.d, b.d, n, C, 0);
    hash_arr(h, &dgain, C);
    hash_arr(h, &dshift, C);
}

static void sum_losses(const sum_arrays *t, uint64_t *h) {
    const arr a = t->r.a[R_A], g = t->r.a[R_G], y = t->r.a[R_Y], d = t->r.a[R_D],
              mean = t->r.a[R_MEAN], rstd = t->r.a[R_RSTD], loss = t->loss;
    const size_t N = t->r.N, C = t->r.C, n = N * C;
    stx_mean_fwd_cuda(gx, loss.d, a.d, n);
    hash_arr(h, &loss, 1);
    k_cross_entropy_fwd_cuda(gx, loss.d, mean.d, rstd.d, a.d, t->ids, N, C, C, 3);
    hash_arr(h, &loss, 1);
    hash_arr(h, &rstd, N);
    k_cross_entropy_fwd_cuda(gx, loss.d, mean.d, rstd.d, a.d, t->ids, 3, n / 3, n / 3, 3);
    k_cross_entropy_bwd_cuda(gx, a.d, loss.d, mean.d, rstd.d, a.d, t->ids, 3, n / 3, n / 3, 3, 0);
    hash_arr(h, &a, n);
    stx_softmax_bwd_cuda(gx, d.d, g.d, y.d, 10, n / 10, 1);
    stx_log_softmax_bwd_cuda(gx, d.d, g.d, y.d, 10, n / 10, 1);
    stx_sum_fwd_cuda(gx, loss.d, d.d, n);
    hash_arr(h, &loss, 1);
    hash_arr(h, &d, n);
}

static void sum_squares(const arr *g, uint64_t *h) {
    stx_optim_chunk chunk, *dev;
    double sq, *dsq;
    uint64_t u;
    memset(&chunk, 0, sizeof chunk);
    chunk.g = g->d;
    chunk.n = 4096;
    dev = (stx_optim_chunk *)cuda_bytes(gx, &chunk, sizeof chunk);
    dsq = (double *)stx_cuda_alloc(gx, sizeof *dsq, STX_MEM_BYTES);
    stx_sum_squares_cuda(gx, dsq, dev, 1);
    stx_cuda_download(gx, &sq, dsq, sizeof sq);
    memcpy(&u, &sq, 8);
    *h = (*h ^ u) * 1099511628211u;
}

static void sums(void *user, uint64_t *h) {
    sum_arrays t;
    (void)user;
    test_state = 88172645463325252u;
    gx = cuda_ctx(STX_CUDA, half ? STX_PREC_BF16 : STX_PREC_F32);
    t = sum_arrays_make();
    sum_residual_norm(&t.r, h);
    sum_columns(&t.r, h);
    stx_embedding_bwd_cuda(gx, t.table.d, t.r.a[R_G].d, t.ids, SUM_ROWS, SUM_COLUMNS);
    stx_embedding_bwd_cuda(gx, t.table.d, t.r.a[R_G].d, t.ids, SUM_ROWS, 33);
    hash_arr(h, &t.table, SUM_IDS * SUM_COLUMNS);
    sum_losses(&t, h);
    sum_squares(&t.table, h);
    CHECK(stx_ok(gx), "sums: %s", stx_error(gx));
    sum_arrays_free(&t);
    stx_destroy(gx);
}

int main(int argc, char **argv) {
    const char *part = argc > 1 ? argv[1] : "";
    brief = !strcmp(part, "short");
    if (brief) part = "";
    cx = cuda_ctx(STX_CPU, STX_PREC_F32);
    for (half = 0; half < 2; half++) {
        gx = cuda_ctx(STX_CUDA, half ? STX_PREC_BF16 : STX_PREC_F32);
        CHECK(stx_ok(gx), "%s", stx_error(gx));
        for (off = 0; off < 2 && stx_ok(gx); off++) {
            test_state = 88172645463325252u; /* the same values in every round */
            if (PART("flat")) test_flat();
            if (PART("rows")) test_rows();
            test_state = 88172645463325252u; /* rows differ between GPU and host */
            if (PART("mixed")) test_mixed_rows();
            if (PART("embedding")) test_embedding();
            if (PART("losses")) test_losses();
            if (PART("special")) test_special();
            if (PART("optimisers")) test_optimisers();
        }
        stx_destroy(gx);
        for (off = 0; off < 2 && PART("sums"); off++) {
            uint64_t hash = 1;
            if (brief)
                sums(NULL, &hash);
            else
                cuda_orders(off ? "sums, misaligned" : "sums", sums, NULL);
        }
    }
    stx_destroy(cx);
    return cuda_test_end();
}
