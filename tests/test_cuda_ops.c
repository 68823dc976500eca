/* test_cuda_ops.c - the CUDA twins of the elementwise kernels, embedding,
   normalisation, softmax, losses and optimisers against their CPU bodies: in f32 and
   bf16, at odd sizes, from misaligned starts, with guard numbers around every array,
   and in any order of threads. */
#include "../seqtx.h"
#include "inner.h"
#include "kernels.h"
#include "cuda_arr.h"

static const size_t sizes[] = {1,   2,   3,    5,    31,   32,   33,   127,
                               129, 257, 1000, 1024, 1025, 4099, 20000};
static int brief; /* sanitizers are slow, and see no values */
static const size_t widths[] = {1, 3, 4, 28, 33, 128, 260, 515, 1000, 1024, 1025, 2052, 40001};

static void mean_check(const char *name, const arr *a) {
    least = 1;
    arr_check(name, a, 3e-7);
    least = 0;
}

static int32_t *ids_to(const int32_t *ids, size_t n) {
    return (int32_t *)cuda_bytes(gx, ids, n * sizeof *ids);
}

static void test_flat(void) {
    size_t k, acc;
    for (k = 0; k < COUNT(sizes); k++) {
        size_t n = sizes[k];
        arr y = arr_of(n, 1, 0, N_), a = arr_of(n, 2, 0, N_), b = arr_of(n, 2, 0, N_),
            p = arr_of(n, 1, 0, P_), i = arr_of(n, 9, 1, N_), j = arr_of(n, 9, 1, N_);
        int act;
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
            BOTH(k_mul_bwd, (cx, y.c, j.c, i.c, a.c, b.c, n, n, (int)acc),
                 (gx, y.d, j.d, i.d, a.d, b.d, n, n, (int)acc));
            arr_check("mul da", &y, 1e-6);
            arr_check("mul db", &j, 1e-6);
        }
        for (act = 0; act <= STX_ACT_SIGMOID; act++) {
            arr z = arr_of(n, 1, 0, N_), d = arr_of(n, 1, 0, N_), g = arr_of(n, 1, 0, N_);
            BOTH(stx_act_fwd, (cx, z.c, a.c, n, act), (gx, z.d, a.d, n, act));
            arr_check("act", &z, 1e-6);
            for (acc = 0; acc < 2; acc++) {
                BOTH(k_act_bwd, (cx, d.c, g.c, z.c, a.c, n, act, (int)acc),
                     (gx, d.d, g.d, z.d, a.d, n, act, (int)acc));
                arr_check("act da", &d, 1e-6);
            }
            BOTH(k_act_bwd, (cx, g.c, g.c, z.c, a.c, n, act, 0),
                 (gx, g.d, g.d, z.d, a.d, n, act, 0));
            arr_check("act da in place", &g, 1e-6);
            BOTH(k_act_bwd, (cx, g.c, a.c, z.c, act == STX_ACT_GELU ? a.c : NULL, n, act, 1),
                 (gx, g.d, a.d, z.d, act == STX_ACT_GELU ? a.d : NULL, n, act, 1));
            arr_check("act da without a", &g, 1e-6);
            BOTH(stx_act_fwd, (cx, g.c, g.c, n, act), (gx, g.d, g.d, n, act));
            arr_check("act in place", &g, 1e-6);
            arr_free(&z);
            arr_free(&d);
            arr_free(&g);
        }
        for (acc = 0; acc < 2; acc++) {
            BOTH(k_dropout_fwd,
                 (cx, y.c, a.c, n, 0.3f, 0x9e3779b97f4a7c15u, (uint64_t)1 << 63 | 5,
                  1000 * (uint64_t)acc, (int)acc),
                 (gx, y.d, a.d, n, 0.3f, 0x9e3779b97f4a7c15u, (uint64_t)1 << 63 | 5,
                  1000 * (uint64_t)acc, (int)acc));
            arr_check("dropout", &y, 1e-6);
        }
        BOTH(stx_fill, (cx, a.c, n, 1), (gx, a.d, n, 1));
        BOTH(k_dropout_fwd, (cx, y.c, a.c, n, 0.5f, 9, 11, 0, 0),
             (gx, y.d, a.d, n, 0.5f, 9, 11, 0, 0));
        arr_check("dropout mask", &y, 0);
        BOTH(k_dropout_fwd, (cx, y.c, b.c, n, 0, 9, 11, 0, 0), (gx, y.d, b.d, n, 0, 9, 11, 0, 0));
        arr_check("dropout 0", &y, 0);
        stx_cuda_rng_shift(gx, 1000); /* a replayed step: the stream moves on */
        BOTH(k_dropout_fwd, (cx, y.c, a.c, n, 0.5f, 9, 1011, 0, 0),
             (gx, y.d, a.d, n, 0.5f, 9, 11, 0, 0));
        arr_check("dropout shifted", &y, 0);
        stx_cuda_rng_shift(gx, 0);
        {
            arr l = arr_of(1, 1, 0, B_), g = arr_of(1, 1, 0, B_), d = arr_of(n, 1, 0, N_),
                e = arr_of(n, 1, 0, N_);
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
            { /* l + 0.3 (mean b + mean p + mean a), and gradients: d twice, a parameter's, none */
                stx_means_args mc, mg;
                arr t = arr_of(1, 1, 0, B_);
                memset(&mc, 0, sizeof mc);
                mc.count = 3;
                mc.n[0] = mc.n[1] = mc.n[2] = n;
                mc.s = 0.3f;
                mg = mc;
                mc.a[0] = b.c;
                mc.a[1] = p.c;
                mc.a[2] = a.c;
                mc.y0 = l.c;
                mc.y = t.c;
                mg.a[0] = b.d;
                mg.a[1] = p.d;
                mg.a[2] = a.d;
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
                arr_check("add_means da, second", &e, 1e-6);
                /* written, and then added to */
                mc.da[2] = mc.da[0];
                mg.da[2] = mg.da[0];
                mc.overwrite = mg.overwrite = 3;
                BOTH(stx_add_means_bwd, (cx, &mc), (gx, &mg));
                arr_check("add_means da, fresh", &d, 1e-6);
                arr_check("add_means da, fresh, second", &e, 1e-6);
                CHECK(!n || fabs((double)d.c[0] * (double)n / (0.6 * (double)g.c[0]) - 1) < 1e-2,
                      "fresh: %g", (double)d.c[0]);
                arr_free(&t);
            }
            BOTH(stx_rezero_fwd, (cx, d.c, NULL, b.c, g.c, n), (gx, d.d, NULL, b.d, g.d, n));
            arr_check("scale by", &d, 1e-7);
            BOTH(k_rezero_bwd, (cx, d.c, l.c, b.c, a.c, g.c, n, 0),
                 (gx, d.d, l.d, b.d, a.d, g.d, n, 0));
            arr_check("scale by da", &d, 1e-6);
            arr_check("scale by ds", &l, 4e-6);
            BOTH(stx_mse_fwd, (cx, l.c, b.c, i.c, n), (gx, l.d, b.d, i.d, n));
            arr_check("mse", &l, 1e-6);
            BOTH(stx_mse_bwd, (cx, d.c, e.c, g.c, b.c, i.c, n), (gx, d.d, e.d, g.d, b.d, i.d, n));
            arr_check("mse da", &d, 1e-6);
            arr_check("mse db", &e, 1e-6);
            BOTH(stx_mse_bwd, (cx, NULL, e.c, g.c, b.c, i.c, n), (gx, NULL, e.d, g.d, b.d, i.d, n));
            arr_check("mse db alone", &e, 1e-6);
            arr_free(&l);
            arr_free(&g);
            arr_free(&d);
            arr_free(&e);
        }
        arr_free(&y);
        arr_free(&a);
        arr_free(&b);
        arr_free(&p);
        arr_free(&i);
        arr_free(&j);
    }
    { /* nothing to do, nothing done */
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
        arr_check("no numbers", &y, 0);
        arr_free(&y);
    }
}

/* The numbers of these arrays for stx_residual_norm's kernels, on the host (c) or the
   device (d) */
typedef struct residual {
    const arr *y, *s, *mean, *rstd, *h, *f, *gain, *shift, *dy, *ds, *df, *dgain, *dshift, *bias,
        *dbias;
} residual;

static stx_residual_norm_args residual_args(const residual *r, int device, size_t N, size_t C,
                                            float drop, int accumulate) {
    stx_residual_norm_args k;
    memset(&k, 0, sizeof k);
#define AT(a) ((a) ? device ? (a)->d : (a)->c : NULL)
    k.N = N;
    k.C = C;
    k.eps = 1e-5f;
    k.drop = drop;
    k.seed = 77;
    k.stream = 99;
    k.h = AT(r->h);
    k.f = AT(r->f);
    k.gain = AT(r->gain);
    k.shift = AT(r->shift);
    k.y = AT(r->y);
    k.s = AT(r->s);
    k.mean = AT(r->mean);
    k.rstd = AT(r->rstd);
    k.dy = AT(r->dy);
    k.ds = AT(r->ds);
    k.df = AT(r->df);
    k.dgain = AT(r->dgain);
    k.dshift = AT(r->dshift);
    k.bias = AT(r->bias);
    k.dbias = AT(r->dbias);
#undef AT
    k.accumulate = accumulate;
    return k;
}

static void test_rows(void) {
    static const size_t rows[] = {1, 3, 37, 200};
    size_t k, r, acc;
    for (k = 0; k < COUNT(widths); k++)
        for (r = 0; r < COUNT(rows); r++) {
            size_t C = widths[k], N = rows[r], n = N * C, i;
            int kind = r % 2 ? P_ : B_;
            arr y, a, i1, f, b, db, g, s, mean, rstd, gain, shift, dgain, dshift, d, df;
            residual all = {&y, &s, &mean, &rstd,  &a,      &f,   &gain, &shift,
                            &g, &d, &df,   &dgain, &dshift, NULL, NULL};
            residual with = {&y, &s, &mean, &rstd,  &a,      &f, &gain, &shift,
                             &g, &d, &df,   &dgain, &dshift, &b, &db};
            stx_residual_norm_args kc, kg;
            /* 1, 3, 37, and 200 rows, several chunks of them, of up to three tiles of
               columns; wider rows have the same loops over rows:
           37 or 3, and one 1 */
            if (C > 300 ? r != 1 + k % 2 && (r || C < 2052) : n > 80000) continue;
            /* the longest: one row, once */
            if (C > 4096 && (r || off || (brief && half))) continue;
            /* one number of rows for each width */
            if (brief && C <= 300 && r != (k % 2 ? 1 : 3)) continue;
            y = arr_of(n, 1, 0, N_);
            a = arr_of(n, 2, 0, N_);
            i1 = arr_of(n, 9, 1, N_);
            f = arr_of(n, 1, 0, N_);
            b = arr_of(C, 1, 0, kind);
            db = arr_of(C, 5, 1, B_);
            g = arr_of(n, 1, 0, N_);
            s = arr_of(n, 1, 0, N_);
            mean = arr_of(N, 1, 0, B_);
            rstd = arr_of(N, 1, 0, B_);
            gain = arr_of(C, 1, 0, P_);
            shift = arr_of(C, 1, 0, P_);
            dgain = arr_of(C, 1, 0, B_);
            dshift = arr_of(C, 1, 0, B_);
            d = arr_of(n, 1, 0, N_);
            df = arr_of(n, 1, 0, N_);
            for (i = 0; i < C; i++) gain.c[i] += 1;
            stx_cuda_upload_activations(gx, gain.d, gain.c, C);
            BOTH(stx_add_fwd, (cx, y.c, a.c, b.c, n, C), (gx, y.d, a.d, b.d, n, C));
            arr_check("add a row", &y, 0);
            BOTH(stx_mul_fwd, (cx, y.c, a.c, b.c, n, C), (gx, y.d, a.d, b.d, n, C));
            arr_check("mul by a row", &y, 0);
            BOTH(k_mul_bwd, (cx, y.c, db.c, f.c, a.c, b.c, n, C, 1),
                 (gx, y.d, db.d, f.d, a.d, b.d, n, C, 1));
            arr_check("mul da", &y, 1e-6);
            arr_check("mul db, b repeats", &db, 2e-6);
            BOTH(stx_bias_act_fwd, (cx, y.c, d.c, b.c, N, C, STX_ACT_GELU),
                 (gx, y.d, d.d, b.d, N, C, STX_ACT_GELU));
            arr_check("bias_act", &y, 1e-6);
            arr_check("bias_act pre", &d, 1e-6);
            BOTH(stx_bias_act_fwd, (cx, y.c, NULL, NULL, N, C, STX_ACT_RELU),
                 (gx, y.d, NULL, NULL, N, C, STX_ACT_RELU));
            arr_check("bias_act without b", &y, 0);
            BOTH(stx_sum_rows, (cx, db.c, f.c, N, C), (gx, db.d, f.d, N, C));
            arr_check("sum_rows", &db, 2e-6);
            {
                arr t = arr_of(C, 5, 1, B_);
                BOTH(stx_sum_rows, (cx, t.c, i1.c, N, C), (gx, t.d, i1.d, N, C));
                arr_check("sum_rows of integers", &t, 0);
                arr_free(&t);
            }

            BOTH(k_layernorm_fwd, (cx, y.c, mean.c, rstd.c, a.c, gain.c, shift.c, N, C, 1e-5f),
                 (gx, y.d, mean.d, rstd.d, a.d, gain.d, shift.d, N, C, 1e-5f));
            arr_check("layernorm", &y, C == 1 ? 1e-4 : 4e-6);
            mean_check("layernorm mean", &mean);
            arr_check("layernorm rstd", &rstd, 1e-5);
            for (acc = 0; acc < 2; acc++) {
                BOTH(k_layernorm_bwd,
                     (cx, d.c, dgain.c, dshift.c, g.c, a.c, gain.c, mean.c, rstd.c, N, C, (int)acc),
                     (gx, d.d, dgain.d, dshift.d, g.d, a.d, gain.d, mean.d, rstd.d, N, C,
                      (int)acc));
                arr_check("layernorm din", &d, C < 4 ? 1e-3 : 4e-6);
                arr_check("layernorm dgain", &dgain, 4e-6);
                arr_check("layernorm dshift", &dshift, 4e-6);
            }
            BOTH(k_layernorm_bwd,
                 (cx, NULL, dgain.c, NULL, g.c, a.c, gain.c, mean.c, rstd.c, N, C, 0),
                 (gx, NULL, dgain.d, NULL, g.d, a.d, gain.d, mean.d, rstd.d, N, C, 0));
            arr_check("layernorm dgain alone", &dgain, 4e-6);
            BOTH(k_layernorm_bwd,
                 (cx, d.c, NULL, NULL, g.c, a.c, gain.c, mean.c, rstd.c, N, C, 0),
                 (gx, d.d, NULL, NULL, g.d, a.d, gain.d, mean.d, rstd.d, N, C, 0));
            arr_check("layernorm din alone", &d, C < 4 ? 1e-3 : 4e-6);
            for (acc = 0; acc < 2; acc++) {
                float drop = acc ? 0.25f : 0;
                /* the CPU normalises s as the GPU has stored it: in bf16 y is compared
                   from there */
                kc = residual_args(&all, 0, N, C, drop, (int)acc);
                kg = residual_args(&all, 1, N, C, drop, (int)acc);
                BOTH(stx_residual_norm_fwd, (cx, &kc), (gx, &kg));
                arr_check("residual_norm s", &s, 1e-6);
                k_layernorm_fwd(cx, y.c, mean.c, rstd.c, s.c, gain.c, shift.c, N, C, 1e-5f);
                arr_check("residual_norm y", &y, C == 1 ? 1e-4 : 4e-6);
                mean_check("residual_norm mean", &mean);
                arr_check("residual_norm rstd", &rstd, 1e-5);
                BOTH(stx_residual_norm_bwd, (cx, &kc), (gx, &kg));
                arr_check("residual_norm ds", &d, C < 4 ? 1e-3 : 4e-6);
                arr_check("residual_norm df", &df, C < 4 ? 1e-3 : 4e-6);
                arr_check("residual_norm dgain", &dgain, 4e-6);
                arr_check("residual_norm dshift", &dshift, 4e-6);
            }
            kc.df = kg.df = NULL;
            kc.accumulate = kg.accumulate = 0;
            BOTH(stx_residual_norm_bwd, (cx, &kc), (gx, &kg));
            arr_check("residual_norm ds alone", &d, C < 4 ? 1e-3 : 4e-6);
            for (acc = 0; acc < 4; acc++) { /* with a bias; ds is added to, or not wanted */
                kc = residual_args(&with, 0, N, C, acc % 2 ? 0.25f : 0, 0);
                kg = residual_args(&with, 1, N, C, acc % 2 ? 0.25f : 0, 0);
                BOTH(stx_residual_norm_fwd, (cx, &kc), (gx, &kg));
                arr_check("residual_norm_bias s", &s, 1e-6);
                k_layernorm_fwd(cx, y.c, mean.c, rstd.c, s.c, gain.c, shift.c, N, C, 1e-5f);
                arr_check("residual_norm_bias y", &y, C == 1 ? 1e-4 : 4e-6);
                mean_check("residual_norm_bias mean", &mean);
                arr_check("residual_norm_bias rstd", &rstd, 1e-5);
                kc.accumulate_ds = kg.accumulate_ds = acc < 3;
                if (acc == 3) kc.ds = kg.ds = NULL;
                if (acc == 2) kc.dgain = kg.dgain = kc.dshift = kg.dshift = NULL;
                BOTH(stx_residual_norm_bwd, (cx, &kc), (gx, &kg));
                arr_check("residual_norm_bias ds +=", &d, C < 4 ? 1e-3 : 4e-6);
                arr_check("residual_norm_bias df", &df, C < 4 ? 1e-3 : 4e-6);
                arr_check("residual_norm_bias dgain", &dgain, 4e-6);
                arr_check("residual_norm_bias dshift", &dshift, 4e-6);
                arr_check("residual_norm_bias dbias", &db, half ? 4e-3 : C < 4 ? 1e-3 : 8e-6);
                kc.df = kg.df = kc.dbias = kg.dbias = NULL;
                if (acc < 2) BOTH(stx_residual_norm_bwd, (cx, &kc), (gx, &kg));
                arr_check("residual_norm ds += alone", &d, C < 4 ? 1e-3 : 4e-6);
                arr_check("residual_norm dgain again", &dgain, 4e-6);
                arr_check("residual_norm dshift again", &dshift, 4e-6);
            }
            BOTH(k_layernorm_bwd,
                 (cx, NULL, dgain.c, dgain.c, g.c, a.c, gain.c, mean.c, rstd.c, N, C, 0),
                 (gx, NULL, dgain.d, dgain.d, g.d, a.d, gain.d, mean.d, rstd.d, N, C, 0));
            arr_check("layernorm dgain and dshift in one", &dgain, 8e-6);

            BOTH(stx_softmax_fwd, (cx, y.c, a.c, N, C), (gx, y.d, a.d, N, C));
            arr_check("softmax", &y, 1e-6);
            for (acc = 0; acc < 2; acc++) {
                BOTH(stx_softmax_bwd, (cx, d.c, g.c, y.c, N, C, (int)acc),
                     (gx, d.d, g.d, y.d, N, C, (int)acc));
                arr_check("softmax da", &d, 2e-6);
            }
            BOTH(stx_log_softmax_fwd, (cx, y.c, a.c, N, C), (gx, y.d, a.d, N, C));
            arr_check("log_softmax", &y, 1e-6);
            for (acc = 0; acc < 2; acc++) {
                BOTH(stx_log_softmax_bwd, (cx, d.c, g.c, y.c, N, C, (int)acc),
                     (gx, d.d, g.d, y.d, N, C, (int)acc));
                arr_check("log_softmax da", &d, 4e-6);
            }
            { /* columns [1, 1 + w) of y = or += columns [2, 2 + w) of a, and an aligned block of them */
                size_t w = C > 4 ? C - 4 : 1, ac = C > 4 ? 2 : 0, yc = C > 4 ? 1 : 0;
                for (acc = 0; acc < 2; acc++) {
                    BOTH(stx_copy2d, (cx, y.c + yc, C, a.c + ac, C, N, w, (int)acc),
                         (gx, stx_offset_ptr(gx, y.d, yc), C, stx_offset_ptr(gx, a.d, ac), C, N, w,
                          (int)acc));
                    arr_check("copy2d", &y, 1e-7);
                    BOTH(stx_copy2d, (cx, y.c, C, a.c + (C > 4 ? 4 : 0), C, N, w, (int)acc),
                         (gx, y.d, C, stx_offset_ptr(gx, a.d, C > 4 ? 4 : 0), C, N, w, (int)acc));
                    arr_check("copy2d by fours", &y, 1e-7);
                }
            }
            { /* rows side by side, of columns from 1 on; and rows that move on by w, in one step and in many */
                size_t wb = C / 3 + (C > 4 ? 0 : 1), w[4], e;
                arr t = arr_of(N * (C + wb), 1, 0, N_);
                BOTH(stx_concat2d, (cx, t.c, a.c, C, C, f.c, C, wb, N),
                     (gx, t.d, a.d, C, C, f.d, C, wb, N));
                arr_check("concat2d", &t, 0);
                BOTH(stx_concat2d, (cx, t.c, f.c + (C - wb), C, wb, a.c, C, C, N),
                     (gx, t.d, stx_offset_ptr(gx, f.d, C - wb), C, wb, a.d, C, C, N));
                arr_check("concat2d, the first narrow", &t, 0);
                w[0] = C;
                w[1] = wb;
                w[2] = C > 8 ? C / 8 * 4 : 1;
                w[3] = C > 33 ? 4 : 1;
                for (e = 0; e < 4; e++) {
                    size_t n_t = C + wb, from = C - w[e];
                    BOTH(inner_shift2d, (cx, t.c, n_t, n_t, a.c + from, C, w[e], N),
                         (gx, t.d, n_t, n_t, stx_offset_ptr(gx, a.d, from), C, w[e], N));
                    arr_check("shift2d", &t, 0);
                    BOTH(inner_shift2d, (cx, t.c, n_t, C, NULL, 0, w[e], N),
                         (gx, t.d, n_t, C, NULL, 0, w[e], N));
                    arr_check("shift2d, apart", &t, 0);
                    BOTH(inner_shift2d, (cx, t.c, n_t, C - w[e] + wb, a.c, C, wb, N),
                         (gx, t.d, n_t, C - w[e] + wb, a.d, C, wb, N));
                    arr_check("shift2d, short rows", &t, 0);
                    BOTH(inner_shift2d, (cx, y.c, C, C, a.c, C, w[e], N),
                         (gx, y.d, C, C, a.d, C, w[e], N));
                    arr_check("shift2d, aligned", &y, 0);
                }
                arr_free(&t);
            }
            { /* a part becomes zero, and nothing else */
                arr z = arr_of(n, 1, 0, N_);
                BOTH(stx_fill, (cx, z.c, n / 2, 0), (gx, z.d, n / 2, 0));
                arr_check("fill of a part", &z, 0);
                arr_free(&z);
            }
            arr_free(&y);
            arr_free(&a);
            arr_free(&i1);
            arr_free(&f);
            arr_free(&b);
            arr_free(&db);
            arr_free(&g);
            arr_free(&s);
            arr_free(&mean);
            arr_free(&rstd);
            arr_free(&gain);
            arr_free(&shift);
            arr_free(&dgain);
            arr_free(&dshift);
            arr_free(&d);
            arr_free(&df);
        }
}

static void test_embedding(void) {
    static const size_t cases[][3] = {{1, 1, 1},       {5, 7, 3},       {28, 300, 33},
                                      {256, 4500, 12}, {3000, 2048, 5}, {9000, 6000, 4},
                                      {50, 200, 516},  {50, 200, 1030}};
    size_t k, i;
    int how;
    /* all equal, all different, Zipf */
    for (k = 0; k < COUNT(cases); k++)
        for (how = 0; how < 3; how++) {
            size_t V = cases[k][0], N = cases[k][1], C = cases[k][2];
            int32_t *ids = (int32_t *)malloc(N * sizeof *ids), *dev;
            arr table, y, dy, dt, dw;
            if (how == 1 && N > V) N = V;
            for (i = 0; i < N; i++) {
                double u = (test_rand() + 1) / 2;
                ids[i] = how == 0   ? (int32_t)(V - 1)
                         : how == 1 ? (int32_t)((i * 7919) % V)
                                    : (int32_t)((double)V * u * u * u * u);
            }
            dev = ids_to(ids, N);
            table = arr_of(V * C, 1, 0, P_);
            y = arr_of(N * C, 1, 0, N_);
            dy = arr_of(N * C, 3, 1, N_);
            dt = arr_of(V * C, 3, 1, B_);
            dw = arr_of(N * C, 1, 0, N_);
            BOTH(stx_embedding_fwd, (cx, y.c, table.c, ids, N, C),
                 (gx, y.d, table.d, dev, N, C));
            arr_check("embedding", &y, 0);
            BOTH(stx_embedding_bwd, (cx, dt.c, dy.c, ids, N, C), (gx, dt.d, dy.d, dev, N, C));
            arr_check("embedding dtable, integers", &dt, 0);
            BOTH(stx_embedding_bwd, (cx, dt.c, dw.c, ids, N, C),
                 (gx, dt.d, dw.d, dev, N, C));
            arr_check("embedding dtable", &dt, how ? 2e-6 : 2e-5);
            if (how != 0 && N < 400) { /* the gradient of an activation (stx_gather) */
                arr da = arr_of(V * C, 3, 0, N_);
                BOTH(stx_embedding_bwd, (cx, da.c, dw.c, ids, N, C),
                     (gx, da.d, dw.d, dev, N, C));
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
}

/* Logits (N,V), rows ld apart, NaN between them */
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

/* Behind V classes of each row are zeros (arr_check has made both sides equal) */
static void padding_check(const char *name, const arr *a, size_t V, size_t ld) {
    size_t i, bad = 0;
    for (i = 0; i < a->n; i++)
        if (i % ld >= V) bad += !(a->c[i] == 0);
    CHECK(!bad, "%s of %zu classes, %zu apart: %zu numbers of the padding are not 0", name, V, ld,
          bad);
}

static void test_cross_entropy(void) {
    /* rows, classes, and how far rows are apart; what stands between is NaN */
    static const size_t cases[][3] = {{1, 1, 1},        {3, 2, 2},         {70, 28, 28},
                                      {9, 127, 127},    {5, 513, 513},     {4, 1024, 1024},
                                      {3, 4099, 4099},  {2, 40001, 40001}, {3, 2, 7},
                                      {17, 28, 64},     {9, 205, 256},     {5, 513, 576},
                                      {2, 40001, 40064}};
    size_t k, i, acc;
    for (k = 0; k < COUNT(cases); k++) {
        size_t N = cases[k][0], V = cases[k][1], ld = cases[k][2];
        int32_t *ids = (int32_t *)malloc(N * sizeof *ids), *dev;
        arr logits = logits_of(N, V, ld), loss = arr_of(1, 1, 0, B_), top = arr_of(N, 1, 0, B_),
            inv = arr_of(N, 1, 0, B_), g = arr_of(1, 1, 0, B_), d = arr_of(N * ld, 1, 0, N_);
        for (i = 0; i < N; i++) ids[i] = (int32_t)(i ? (i * 7919) % V : V - 1);
        dev = ids_to(ids, N);
        BOTH(k_cross_entropy_fwd, (cx, loss.c, top.c, inv.c, logits.c, ids, N, V, ld, (double)N),
             (gx, loss.d, top.d, inv.d, logits.d, dev, N, V, ld, (double)N));
        arr_check("cross_entropy", &loss, 1e-6);
        arr_check("cross_entropy top", &top, 0);
        arr_check("cross_entropy inv", &inv, 5e-6);
        for (acc = 0; acc < 2; acc++) {
            BOTH(k_cross_entropy_bwd,
                 (cx, d.c, g.c, top.c, inv.c, logits.c, ids, N, V, ld, 3, (int)acc),
                 (gx, d.d, g.d, top.d, inv.d, logits.d, dev, N, V, ld, 3, (int)acc));
            arr_check("cross_entropy dlogits", &d, 1e-6);
            padding_check("cross_entropy dlogits", &d, V, ld);
        }
        BOTH(k_cross_entropy_bwd,
             (cx, logits.c, g.c, top.c, inv.c, logits.c, ids, N, V, ld, 3, 0),
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
    /* with weights, and rows that are left out: every third, and the first of one */
    for (k = 0; k < COUNT(cases); k++) {
        size_t N = cases[k][0], V = cases[k][1], ld = cases[k][2];
        int32_t *ids = (int32_t *)malloc(N * sizeof *ids), *dev,
                *known = (int32_t *)malloc(N * sizeof *ids), *dev_known,
                *got = (int32_t *)malloc(N * sizeof *ids);
        arr logits = logits_of(N, V, ld), loss = arr_of(1, 1, 0, B_), nll = arr_of(N, 1, 0, B_),
            top = arr_of(N, 1, 0, B_), inv = arr_of(N, 1, 0, B_), g = arr_of(1, 1, 0, B_),
            d = arr_of(N * ld, 1, 0, N_), w = arr_of(N, 1, 0, B_), weights = arr_of(N, 2, 0, N_);
        int how;
        for (i = 0; i < N; i++) ids[i] = i % 3 == 1 ? -100 : (int32_t)(i ? (i * 7919) % V : V - 1);
        dev = ids_to(ids, N);
        dev_known = ids_to(ids, N);
        for (how = 0; how < 4; how++) {
            stx__loss_weights_args wc, wg;
            memset(&wc, 0, sizeof wc);
            wc.N = N;
            wc.ignore = 1;
            wc.ignored_id = -100;
            wc.divisor = how & 1 ? 3 : 0;
            wg = wc;
            wc.targets = ids;
            wc.weights = how & 2 ? weights.c : NULL;
            wc.w = w.c;
            wc.known = known;
            wg.targets = dev;
            wg.weights = how & 2 ? weights.d : NULL;
            wg.w = w.d;
            wg.known = dev_known;
            BOTH(inner_loss_weights, (cx, &wc), (gx, &wg));
            arr_check("token weights", &w, how & 1 ? 1e-7 : 1e-5);
            stx_cuda_download(gx, got, dev_known, N * sizeof *got);
            CHECK(!memcmp(got, known, N * sizeof *got) && (N < 2 || known[1] == -1)
                      && known[0] == ids[0],
                  "known targets");
            BOTH(k_token_loss_fwd,
                 (cx, loss.c, nll.c, top.c, inv.c, logits.c, known, w.c, N, V, ld),
                 (gx, loss.d, nll.d, top.d, inv.d, logits.d, dev_known, w.d, N, V, ld));
            arr_check("token loss", &loss, 1e-5);
            arr_check("token nll", &nll, 2e-6);
            arr_check("token loss top", &top, 0);
            arr_check("token loss inv", &inv, 5e-6);
            for (acc = 0; acc < 2; acc++) {
                BOTH(k_token_loss_bwd,
                     (cx, d.c, g.c, top.c, inv.c, logits.c, known, w.c, N, V, ld, (int)acc),
                     (gx, d.d, g.d, top.d, inv.d, logits.d, dev_known, w.d, N, V, ld, (int)acc));
                arr_check("token loss dlogits", &d, 5e-6);
                padding_check("token loss dlogits", &d, V, ld);
            }
        }
        arr_free(&logits);
        arr_free(&loss);
        arr_free(&nll);
        arr_free(&top);
        arr_free(&inv);
        arr_free(&g);
        arr_free(&d);
        arr_free(&w);
        arr_free(&weights);
        stx_cuda_free(gx, dev);
        stx_cuda_free(gx, dev_known);
        free(ids);
        free(known);
        free(got);
    }
    { /* ids sorted by cluster: exactly, also where a cluster has too few places */
        static const size_t ns[] = {1, 31, 33, 1000, 1025, 5000};
        int head, tight;
        for (k = 0; k < COUNT(ns); k++)
            for (head = 0; head < 2; head++)
                for (tight = 0; tight < 2; tight++) {
                    size_t n = ns[k], all, c, m[4] = {0};
                    int32_t *ids = (int32_t *)malloc(n * sizeof *ids), *dev, *a, *b, *dev_b;
                    stx__cluster_sort_args s, g;
                    memset(&s, 0, sizeof s);
                    s.count = 4;
                    s.end[0] = 10;
                    s.end[1] = 12;
                    s.end[2] = 500;
                    s.end[3] = 2000;
                    s.head = head;
                    s.leftover = head ? -1 : 0;
                    s.forward_columns = tight;
                    for (i = 0; i < n; i++) {
                        ids[i] = i % 5 == 4 ? -1 : (int32_t)((i * i * 31) % (i % 2 ? 13 : 2000));
                        for (c = 0; ids[i] >= 0 && (size_t)ids[i] >= s.end[c]; c++) {
                        }
                        if (ids[i] >= 0) m[c]++;
                    }
                    for (c = 0; c < 4; c++)
                        s.first[c + 1] = s.first[c]
                                         + (head && c == 0    ? 0
                                            : tight && c == 2 ? m[c] / 2
                                                              : m[c] + 3 * c);
                    all = s.first[4];
                    dev = ids_to(ids, n);
                    a = (int32_t *)malloc((n + 2 * all + 1) * sizeof *a);
                    b = (int32_t *)malloc((n + 2 * all + 1) * sizeof *b);
                    dev_b = (int32_t *)cuda_bytes(gx, NULL, (n + 2 * all + 1) * sizeof *b);
                    s.n = n;
                    g = s;
                    s.ids = ids;
                    s.at = a;
                    s.local = a + n;
                    s.place = a + n + all;
                    s.over = a + n + 2 * all;
                    g.ids = dev;
                    g.at = dev_b;
                    g.local = dev_b + n;
                    g.place = dev_b + n + all;
                    g.over = dev_b + n + 2 * all;
                    BOTH(inner_cluster_sort, (cx, &s), (gx, &g));
                    stx_cuda_download(gx, b, dev_b, (n + 2 * all + 1) * sizeof *b);
                    CHECK(!memcmp(a, b, (n + 2 * all + 1) * sizeof *a),
                          "clusters of %zu ids, head %d, tight %d: not as on the CPU", n, head,
                          tight);
                    CHECK(b[n + 2 * all] == (tight && m[2] > 0), "clusters of %zu ids: over is %d",
                          n, (int)b[n + 2 * all]);
                    for (i = 0; i < all; i++)
                        CHECK(b[n + i] == s.leftover || (size_t)b[n + all + i] < n, "place %zu", i);
                    {
                        arr y = arr_of(9, 1, 0, N_);
                        stx_real v[9];
                        stx__nan_if_cuda(gx, y.d, 9, dev_b + n + 2 * all);
                        stx_download(gx, v, y.d, 9);
                        CHECK(b[n + 2 * all] ? isnan(v[0]) && isnan(v[8])
                                             : v[0] == y.c[0] && v[8] == y.c[8],
                              "spoil: %g", (double)v[0]);
                        arr_free(&y);
                    }
                    stx_cuda_free(gx, dev);
                    stx_cuda_free(gx, dev_b);
                    free(ids);
                    free(a);
                    free(b);
                }
    }
    { /* infinities and NaN: rows with -infinity among numbers, alone, +infinity, NaN, all NaN */

        enum { V = 530, R = 6 };

        float *v = cuda_random(R * V, 3, 0);
        int32_t ids[R] = {5, 6, 7, 8, 9, 10}, *dev = ids_to(ids, R);
        arr logits, loss, top, inv, y;
        for (i = 0; i < V; i++) {
            v[i] = i % 600 < 500 ? -HUGE_VALF : v[i];
            v[V + i] = -HUGE_VALF;
            v[4 * V + i] = NAN;
        }
        v[2 * V + 100] = HUGE_VALF;
        v[3 * V + 100] = NAN;
        ids[0] = 525;
        stx_cuda_upload(gx, dev, ids, sizeof ids);
        logits = arr_from(v, R * V, N_);
        loss = arr_of(1, 1, 0, B_);
        top = arr_of(R, 1, 0, B_);
        inv = arr_of(R, 1, 0, B_);
        y = arr_of(R * V, 1, 0, N_);
        BOTH(stx_softmax_fwd, (cx, y.c, logits.c, R, V), (gx, y.d, logits.d, R, V));
        arr_check("softmax of infinities and NaN", &y, 1e-6);
        BOTH(stx_softmax_fwd, (cx, y.c, logits.c, 53, 60), (gx, y.d, logits.d, 53, 60));
        arr_check("softmax of infinities and NaN, "
                  "narrow",
                  &y, 1e-6);
        BOTH(k_cross_entropy_fwd, (cx, loss.c, top.c, inv.c, logits.c, ids, R, V, V, 6),
             (gx, loss.d, top.d, inv.d, logits.d, dev, R, V, V, 6));
        arr_check("cross_entropy of infinities and NaN", &loss, 1e-6);
        arr_check("inv of infinities and NaN", &inv, 2e-6);
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
    { /* clusters of an adaptive softmax: the head with two gates, then a cluster */
        int forward;
        for (forward = 0; forward < 2; forward++) {
            size_t N = 7, V = 900, K = 3, size0 = 300, size1 = 500;
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
            arr_check("cluster 0", &out, 1e-6);
            arr_check("cluster gates", &gate, 1e-6);
            kc.c = kg.c = 1;
            kc.start = kg.start = size0;
            kc.size = kc.w = kg.size = kg.w = size1;
            kc.logits = l1.c;
            kg.logits = l1.d;
            BOTH(inner_cluster_log_probs, (cx, &kc), (gx, &kg));
            arr_check("cluster 1", &out, 1e-6);
            arr_free(&out);
            arr_free(&gate);
            arr_free(&l0);
            arr_free(&l1);
        }
    }
}

/* NaN, infinities, zeros, extremes through everything elementwise */
static void test_special(void) {
    float v[64];
    size_t i, n = 64;
    arr a, y, g, d;
    int act;
    for (i = 0; i < n; i++) v[i] = (float)((double)i - 32);
    v[0] = NAN;
    v[1] = HUGE_VALF;
    v[2] = -HUGE_VALF;
    v[3] = -0.0f;
    v[4] = 1e30f;
    v[5] = -1e30f;
    v[6] = 1e-20f;
    v[7] = 90;
    v[8] = -90;
    v[9] = 10;
    v[10] = -10;
    v[11] = 15.5f;
    v[12] = -14;
    a = arr_from(v, n, N_);
    y = arr_of(n, 1, 0, N_);
    g = arr_of(n, 1, 0, N_);
    d = arr_of(n, 1, 0, N_);
    for (act = 0; act <= STX_ACT_SIGMOID; act++) {
        BOTH(stx_act_fwd, (cx, y.c, a.c, n, act), (gx, y.d, a.d, n, act));
        arr_check("act of extremes", &y, 1e-6);
        BOTH(k_act_bwd, (cx, d.c, g.c, y.c, a.c, n, act, 0), (gx, d.d, g.d, y.d, a.d, n, act, 0));
        arr_check("act da of extremes", &d, 1e-6);
        BOTH(k_act_bwd, (cx, d.c, a.c, y.c, a.c, n, act, 0), (gx, d.d, a.d, y.d, a.d, n, act, 0));
        arr_check("act da of extreme dy", &d, 1e-6);
    }
    BOTH(stx_add_fwd, (cx, y.c, a.c, g.c, n, n), (gx, y.d, a.d, g.d, n, n));
    arr_check("add extremes", &y, 0);
    BOTH(stx_mul_fwd, (cx, y.c, a.c, g.c, n, n), (gx, y.d, a.d, g.d, n, n));
    arr_check("mul extremes", &y, 0);
    BOTH(k_dropout_fwd, (cx, y.c, a.c, n, 0.5f, 3, 4, 0, 0), (gx, y.d, a.d, n, 0.5f, 3, 4, 0, 0));
    arr_check("dropout of extremes", &y, 0);
    BOTH(stx_copy2d, (cx, y.c, 8, a.c, 8, 8, 8, 0), (gx, y.d, 8, a.d, 8, 8, 8, 0));
    arr_check("copy2d of extremes", &y, 0);
    arr_free(&a);
    arr_free(&y);
    arr_free(&g);
    arr_free(&d);
}

/* Optimisers. Tensors of odd sizes, one after the other in a parameter allocation, or
   each in its own (more than the kernels' table holds)
   */
enum { TENSORS = 70 };

typedef struct opt {
    size_t tensors, pieces;
    arr p[TENSORS], g[TENSORS], s0[TENSORS], s1[TENSORS];
    stx_optim_chunk *c, *host, *d;
    stx_update u, *du;
    double *squares, *dsq;
} opt;

static void opt_make(opt *o, size_t tensors, int states) {
    static const size_t size[] = {4096, 1, 5, 8197, 129, 12288, 1000, 33};
    size_t t, k, at;
    o->tensors = tensors;
    for (t = 0, o->pieces = 0; t < tensors; t++)
        o->pieces += ((tensors > 8 ? 40 + t : size[t]) + 4095) / 4096;
    o->c = (stx_optim_chunk *)calloc(o->pieces, sizeof *o->c);
    o->host = (stx_optim_chunk *)calloc(o->pieces, sizeof *o->host);
    o->squares = (double *)calloc(o->pieces, sizeof *o->squares);
    for (t = 0, k = 0; t < tensors; t++) {
        size_t n = tensors > 8 ? 40 + t : size[t];
        o->p[t] = arr_of(n, 1, 0, P_);
        o->g[t] = arr_of(n, 1, 0, B_);
        o->s0[t] = arr_of(n, 0, 0, B_);
        o->s1[t] = arr_of(n, 0, 0, B_);
        for (at = 0; at < n; at += 4096, k++) {
            stx_optim_chunk *c = o->c + k, *d = o->host + k;
            c->n = d->n = n - at < 4096 ? n - at : 4096;
            c->tensor = d->tensor = t;
            c->p = o->p[t].c + at;
            c->g = o->g[t].c + at;
            c->s[0] = states > 0 ? o->s0[t].c + at : NULL;
            c->s[1] = states > 1 ? o->s1[t].c + at : NULL;
            d->p = o->p[t].d + at;
            d->g = o->g[t].d + at;
            d->s[0] = states > 0 ? o->s0[t].d + at : NULL;
            d->s[1] = states > 1 ? o->s1[t].d + at : NULL;
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

static void opt_run(const char *name, size_t tensors, int kind, float momentum, float decay,
                    double clip, int hat) {
    static opt o;
    stx_optim_desc d;
    const int skip = kind == STX_RADAM && decay > 0.05f;
    int step, states = kind == STX_SGD ? momentum > 0 : kind == STX_ADAGRAD ? 1 : 2;
    size_t t, i, k;
    opt_make(&o, tensors, states);
    memset(&d, 0, sizeof d);
    d.kind = kind;
    d.clip = clip;
    d.beta1 = 0.9;
    d.beta2 = 0.999;
    d.radam_skip = skip;
    d.eps_hat = hat && kind != STX_LAMB;
    d.no_correction = hat && kind == STX_LAMB;
    d.trust_max = hat && kind == STX_LAMB ? 20 : 0;
    for (step = 0; step < 10; step++) {
        stx_update u;
        double *sq = (double *)malloc(o.pieces * sizeof *sq);
        for (t = 0; t < tensors; t++) {
            /* some tensors are clipped on their own, some not */
            double s = t % 3 == 1 ? 3 : 0.01;
            for (i = 0; i < o.g[t].n; i++) o.g[t].c[i] = (float)(test_rand() * s);
            if (step == 4 && t == 1) o.g[t].c[0] = NAN;
            if (step == 6 && t == 0) o.g[t].c[o.g[t].n - 1] = HUGE_VALF;
            stx_cuda_upload_activations(gx, o.g[t].d, o.g[t].c, o.g[t].n);
        }
        o.u.lr = 0.01 * (step + 1);
        stx_cuda_set_f64(gx, &o.du->lr, o.u.lr);
        if (clip == 1) {
            BOTH(stx_clip_values, (cx, o.c, o.pieces, 0.9f), (gx, o.d, o.pieces, 0.9f));
            for (t = 0; t < tensors; t++) {
                if (step != 4 && step != 6) arr_check(name, o.g + t, 0);
                for (i = 0; i < o.g[t].n; i++)
                    if (o.g[t].c[i] > 0.9f && o.g[t].c[i] < 1e30f) break;
                CHECK(i == o.g[t].n, "%s: number %zu of gradient %zu is not clipped", name, i, t);
            }
        }
        BOTH(stx_sum_squares, (cx, o.squares, o.c, o.pieces), (gx, o.dsq, o.d, o.pieces));
        stx_cuda_download(gx, sq, o.dsq, o.pieces * sizeof *sq);
        for (k = 0; k < o.pieces; k++)
            CHECK(CLOSE(sq[k], o.squares[k], 1e-13)
                      || (!(sq[k] <= 1e300) && !(o.squares[k] <= 1e300)),
                  "%s: squares of piece %zu are %g, expected %g", name, k, sq[k], o.squares[k]);
        BOTH(stx_optim_prepare, (cx, &o.u, o.c, o.pieces, o.squares, &d),
             (gx, o.du, o.d, o.pieces, o.dsq, &d));
        stx_cuda_download(gx, &u, o.du, sizeof u);
        CHECK(u.ok == o.u.ok && u.ok == (step != 4 && step != 6) && u.step == o.u.step
                  && u.skipped == o.u.skipped,
              "%s: step %d: ok %d, %llu made, %llu left out", name, step, u.ok,
              (unsigned long long)u.step, (unsigned long long)u.skipped);
        CHECK(!u.ok || CLOSE(u.norm / o.u.norm, 1, 1e-12), "%s: norm %.17g, expected %.17g", name,
              u.norm, o.u.norm);
        CHECK(!u.ok
                  || (CLOSE(u.factor, o.u.factor, 1e-7)
                      && CLOSE(u.correction1, o.u.correction1, 1e-7)
                      && CLOSE(u.correction2, o.u.correction2, 1e-9) && u.plain == o.u.plain),
              "%s: factor %g, expected %g", name, (double)u.factor, (double)o.u.factor);
        CHECK(o.u.plain == (kind == STX_RADAM && o.u.step < 6), "%s: update %llu is %s", name,
              (unsigned long long)o.u.step, o.u.plain ? "plain" : "divided by the root of v");
        stx_cuda_download(gx, o.host, o.d, o.pieces * sizeof *o.host);
        for (k = 0; k < o.pieces; k++)
            CHECK(CLOSE(o.host[k].lr / (o.c[k].lr > 0 ? o.c[k].lr : 1), o.c[k].lr > 0, 2e-7),
                  "%s: lr of piece %zu is %g, expected %g", name, k, (double)o.host[k].lr,
                  (double)o.c[k].lr);
        if (kind == STX_SGD)
            BOTH(stx_sgd_update, (cx, &o.u, o.c, o.pieces, momentum, decay),
                 (gx, o.du, o.d, o.pieces, momentum, decay));
        else if (kind == STX_LAMB) {
            double *both = (double *)calloc(o.pieces, 2 * sizeof *both),
                   *dev = (double *)cuda_bytes(gx, both, 2 * o.pieces * sizeof *both);
            stx_adam_args lamb = {0.9f, 0.1f, 0.999f, 0.001f, 1e-6f, 0, 0};
            lamb.decay = decay;
            BOTH(stx_lamb_direction, (cx, &o.u, o.c, o.pieces, both, &lamb),
                 (gx, o.du, o.d, o.pieces, dev, &lamb));
            BOTH(stx_lamb_update, (cx, &o.u, o.c, o.pieces, both, d.trust_max),
                 (gx, o.du, o.d, o.pieces, dev, d.trust_max));
            stx_cuda_free(gx, dev);
            free(both);
        } else if (kind == STX_ADAGRAD)
            BOTH(stx_adagrad_update, (cx, &o.u, o.c, o.pieces, 1e-10f),
                 (gx, o.du, o.d, o.pieces, 1e-10f));
        else {
            stx_adam_args adam = {0.9f, 0.1f, 0.999f, 0.001f, 1e-8f, 0, 0};
            if (kind == STX_ADAM)
                adam.decay = decay;
            else
                adam.decoupled = decay;
            BOTH(stx_adam_update, (cx, &o.u, o.c, o.pieces, &adam),
                 (gx, o.du, o.d, o.pieces, &adam));
        }
        for (t = 0; t < tensors; t++) {
            float *was = NULL;
            if (step == 4 || step == 6) {
                was = (float *)malloc(o.p[t].n * sizeof *was);
                memcpy(was, o.p[t].c, o.p[t].n * sizeof *was);
            }
            arr_check(name, o.p + t, step == 4 || step == 6 ? 0 : 1e-6);
            if (was)
                CHECK(!memcmp(was, o.p[t].c, o.p[t].n * sizeof *was),
                      "%s: a skipped update changed tensor %zu", name, t);
            free(was);
            arr_check(name, o.g + t, 0);
            for (i = 0; i < o.g[t].n; i++)
                if (!(o.g[t].c[i] == 0)) break;
            CHECK(i == o.g[t].n, "%s: gradient %zu is not cleared", name, t);
            if (states > 0) arr_check(name, o.s0 + t, 1e-6);
            if (states > 1) arr_check(name, o.s1 + t, 1e-6);
        }
        if (step == 8) {
            BOTH(stx_clamp, (cx, o.c, o.pieces, -0.5f, 0.25f), (gx, o.d, o.pieces, -0.5f, 0.25f));
            for (t = 0; t < tensors; t++) arr_check("clamp", o.p + t, 0);
        }
        free(sq);
    }
    opt_free(&o);
}

static void test_optimisers(void) {
    opt_run("radam clip skip", 8, STX_RADAM, 0, 0.1f, 1, 0);
    opt_run("lamb, many allocations", TENSORS, STX_LAMB, 0, 0.01f, 1, 0);
    opt_run("adagrad", 8, STX_ADAGRAD, 0, 0, 0, 0);
    opt_run("sgd momentum decay clip", 8, STX_SGD, 0.9f, 0.01f, 1, 0);
    opt_run("lamb without correction, clip", 8, STX_LAMB, 0, 0.1f, 1, 1);
    /* each kernel has run, with a table that is full, too: the rest are other numbers
       in the same memory */
    if (!brief) {
        opt_run("sgd", 8, STX_SGD, 0, 0, 0, 0);
        opt_run("adagrad clip", 8, STX_ADAGRAD, 0, 0, 2, 0);
        opt_run("adam decay", 8, STX_ADAM, 0, 0.01f, 0, 0);
        opt_run("adamw clip", 8, STX_ADAMW, 0, 0.1f, 1, 0);
        opt_run("radam", 8, STX_RADAM, 0, 0.01f, 0, 0);
        opt_run("radam, many allocations", TENSORS, STX_RADAM, 0, 0.01f, 1, 0);
        opt_run("adam, many allocations", TENSORS, STX_ADAM, 0, 0, 1, 0);
        opt_run("adagrad clip, many allocations", TENSORS, STX_ADAGRAD, 0, 0, 2, 0);
        opt_run("adam, eps hat", 8, STX_ADAM, 0, 0, 1, 1);
        opt_run("adamw, eps hat", 8, STX_ADAMW, 0, 0.1f, 0, 1);
        opt_run("lamb", 8, STX_LAMB, 0, 0.01f, 0, 0);
    }
    {
        double m = 3, got = 0, *dm = (double *)cuda_bytes(gx, &m, sizeof m);
        arr a = arr_of(1, 1, 0, B_);
        BOTH(inner_metric_accumulate, (cx, &m, a.c, 0.3, 1), (gx, dm, a.d, 0.3, 1));
        stx_cuda_download(gx, &got, dm, sizeof got);
        CHECK(CLOSE(got, m, 1e-15), "meter is %.17g, expected %.17g", got, m);
        BOTH(inner_metric_accumulate, (cx, &m, a.c, -7, 0), (gx, dm, a.d, -7, 0));
        stx_cuda_download(gx, &got, dm, sizeof got);
        CHECK(CLOSE(got, m, 1e-15), "meter is %.17g, expected %.17g", got, m);
        arr_free(&a);
        stx_cuda_free(gx, dm);
    }
}

/* Everything that sums, from the same numbers: the same bits each time */
static void sums(void *user, uint64_t *h) {
    enum { N = 300, C = 132, V = 40 };

    int32_t ids[N], *dev;
    arr a, b, g, y, s, d, df, gain, shift, dgain, dshift, mean, rstd, dt, loss;
    residual all = {&y, &s, &mean, &rstd,  &a,      &g,   &gain, &shift,
                    &g, &d, &df,   &dgain, &dshift, NULL, NULL};
    stx_residual_norm_args k;
    stx_optim_chunk piece;
    double sq, *dsq;
    size_t i;
    (void)user;
    test_state = 88172645463325252u;
    gx = cuda_ctx(STX_CUDA, half ? STX_PREC_BF16 : STX_PREC_F32);
    for (i = 0; i < N; i++) ids[i] = (int32_t)(i * i * 7 % V);
    dev = ids_to(ids, N);
    a = arr_of(N * C, 1, 0, N_);
    b = arr_of(C, 1, 0, P_);
    g = arr_of(N * C, 1, 0, N_);
    y = arr_of(N * C, 1, 0, N_);
    s = arr_of(N * C, 1, 0, N_);
    d = arr_of(N * C, 1, 0, N_);
    df = arr_of(N * C, 1, 0, N_);
    gain = arr_of(C, 1, 0, P_);
    shift = arr_of(C, 1, 0, P_);
    dgain = arr_of(C, 1, 0, B_);
    dshift = arr_of(C, 1, 0, B_);
    mean = arr_of(N, 1, 0, B_);
    rstd = arr_of(N, 1, 0, B_);
    dt = arr_of(V * C, 1, 0, B_);
    loss = arr_of(C, 1, 0, B_);
    k = residual_args(&all, 1, N, C, 0.1f, 1);
    stx_residual_norm_fwd_cuda(gx, &k);
    stx_residual_norm_bwd_cuda(gx, &k);
    *h = cuda_hash(gx, y.d, N * C, *h);
    *h = cuda_hash(gx, d.d, N * C, *h);
    *h = cuda_hash(gx, df.d, N * C, *h);
    k.bias = b.d;
    k.dbias = loss.d;
    k.accumulate = 0;
    k.accumulate_ds = 1;
    stx_residual_norm_fwd_cuda(gx, &k);
    stx_residual_norm_bwd_cuda(gx, &k);
    *h = cuda_hash(gx, y.d, N * C, *h);
    *h = cuda_hash(gx, d.d, N * C, *h);
    *h = cuda_hash(gx, loss.d, C, *h);
    inner_shift2d_cuda(gx, d.d, N * C / 4, N * C / 4, g.d, N * C / 4, N * C / 12, 4);
    *h = cuda_hash(gx, d.d, N * C, *h);
    stx_sum_rows_cuda(gx, dshift.d, g.d, N, C);
    k_layernorm_bwd_cuda(gx, d.d, dgain.d, dshift.d, g.d, s.d, gain.d, mean.d, rstd.d, N, 33, 0);
    k_mul_bwd_cuda(gx, d.d, dgain.d, g.d, a.d, b.d, N * C, C, 0);
    *h = cuda_hash(gx, dgain.d, C, *h);
    *h = cuda_hash(gx, dshift.d, C, *h);
    stx_embedding_bwd_cuda(gx, dt.d, g.d, dev, N, C);
    stx_embedding_bwd_cuda(gx, dt.d, g.d, dev, N, 33);
    *h = cuda_hash(gx, dt.d, V * C, *h);
    stx_mean_fwd_cuda(gx, loss.d, a.d, N * C);
    *h = cuda_hash(gx, loss.d, 1, *h);
    k_cross_entropy_fwd_cuda(gx, loss.d, mean.d, rstd.d, a.d, dev, N, C, C, 3);
    *h = cuda_hash(gx, loss.d, 1, *h);
    *h = cuda_hash(gx, rstd.d, N, *h);
    k_cross_entropy_fwd_cuda(gx, loss.d, mean.d, rstd.d, a.d, dev, 3, N * C / 3, N * C / 3, 3);
    k_cross_entropy_bwd_cuda(gx, a.d, loss.d, mean.d, rstd.d, a.d, dev, 3, N * C / 3, N * C / 3,
                               3, 0);
    *h = cuda_hash(gx, a.d, N * C, *h);
    stx_softmax_bwd_cuda(gx, d.d, g.d, y.d, 10, N * C / 10, 1);
    stx_log_softmax_bwd_cuda(gx, d.d, g.d, y.d, 10, N * C / 10, 1);
    stx_sum_fwd_cuda(gx, loss.d, d.d, N * C);
    *h = cuda_hash(gx, loss.d, 1, *h);
    *h = cuda_hash(gx, d.d, N * C, *h);
    memset(&piece, 0, sizeof piece);
    piece.g = dt.d;
    piece.n = 4096;
    {
        stx_optim_chunk *dp = (stx_optim_chunk *)cuda_bytes(gx, &piece, sizeof piece);
        dsq = (double *)stx_cuda_alloc(gx, sizeof *dsq, STX_MEM_BYTES);
        stx_sum_squares_cuda(gx, dsq, dp, 1);
        stx_cuda_download(gx, &sq, dsq, sizeof sq);
    }
    {
        uint64_t u;
        memcpy(&u, &sq, 8);
        *h = (*h ^ u) * 1099511628211u;
    }
    CHECK(stx_ok(gx), "sums: %s", stx_error(gx));
    free(a.c);
    free(b.c);
    free(g.c);
    free(y.c);
    free(s.c);
    free(d.c);
    free(df.c);
    free(gain.c);
    free(shift.c);
    free(dgain.c);
    free(dshift.c);
    free(mean.c);
    free(rstd.c);
    free(dt.c);
    free(loss.c);
    stx_destroy(gx);
}

/* "short" leaves out what sanitizers see nothing new in: other orders of the same
   threads, which touch the same memory */
int main(int argc, char **argv) {
    brief = argc > 1 && !strcmp(argv[1], "short");
    cx = cuda_ctx(STX_CPU, STX_PREC_F32);
    for (half = 0; half < 2; half++) {
        gx = cuda_ctx(STX_CUDA, half ? STX_PREC_BF16 : STX_PREC_F32);
        CHECK(stx_ok(gx), "%s", stx_error(gx));
        for (off = 0; off < 2 && stx_ok(gx); off++) {
            test_state = 88172645463325252u; /* the same numbers, whatever came before */
            test_flat();
            test_rows();
            test_embedding();
            test_cross_entropy();
            test_special();
            test_optimisers();
        }
        stx_destroy(gx);
        for (off = 0; off < 2; off++) {
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
