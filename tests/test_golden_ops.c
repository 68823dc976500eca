/* Every golden vector of single ops, the fused attention and the optimisers
   (tests/golden, made by an independent PyTorch implementation): values and every
   gradient. 1e-10 in the double build, 1e-5 in float. Usage: test_golden_ops DIR */
#include <stdint.h>
#include "../seqtx.h"
#include "test.h"
#include "golden.h"

#ifdef SEQTX_DOUBLE
static const double TOL = 1e-10;
#else
static const double TOL = 1e-5;
#endif

static stx_tensor *var(stx_ctx *x, const stx_file *f, const char *name) {
    const stx_entry *e = stx_file_find(f, name);
    double *d;
    stx_real *r;
    stx_tensor *t;
    size_t i, dim[4] = {0, 0, 0, 0};
    if (!e) return NULL;
    d = entry(f, name, NULL);
    r = (stx_real *)malloc((e->count + 1) * sizeof *r);
    for (i = 0; i < e->count; i++) r[i] = (stx_real)d[i];
    for (i = 0; i < (size_t)e->ndim; i++) dim[i] = e->dim[i];
    t = stx_variable(x, r, dim[0], dim[1], dim[2], dim[3]);
    free(d);
    free(r);
    return t;
}

static void attention_case(const char *name, int threads) {
    stx_ctx *x;
    stx_file *f;
    stx_attention_in in;
    stx_attention_desc d;
    stx_tensor *y;
    size_t n, i;
    double *dy;
    stx_real *g;
    memset(&in, 0, sizeof in);
    memset(&d, 0, sizeof d);
    x = golden_ctx(threads);
    f = open_golden(x, name);
    if (!f) {
        stx_destroy(x);
        return;
    }
    stx_begin(x, STX_TRAIN);
    in.q = var(x, f, "q");
    in.k = var(x, f, "k");
    in.v = var(x, f, "v");
    in.pe = var(x, f, "pe");
    in.span_fraction = var(x, f, "z");
    in.persistent_k = var(x, f, "pk");
    in.persistent_v = var(x, f, "pv");
    {
        /* (H,D) in the file, (C) in the op */
        stx_tensor *u = var(x, f, "u"), *vb = var(x, f, "vb");
        if (u) {
            u->ndim = 1;
            u->dim[0] = u->size;
            in.content_bias = u;
        }
        if (vb) {
            vb->ndim = 1;
            vb->dim[0] = vb->size;
            in.position_bias = vb;
        }
    }
    d.heads = (size_t)need(f, "heads");
    d.delta_min = (int)need(f, "delta_min");
    d.not_causal = (int)need(f, "not_causal");
    d.span = d.not_causal ? 0 : (size_t)need(f, "span");
    d.ramp = in.span_fraction ? need(f, "ramp") : 0;
    d.max_span = in.span_fraction ? need(f, "max_span") : 0;
    d.eps = need(f, "eps");
    d.no_renorm = (int)meta(f, "no_renorm", 0);
    CHECK(!in.span_fraction
              || in.span_fraction->size == (meta(f, "span_per_layer", 0) > 0 ? 1 : d.heads),
          "%s: %zu spans", name, in.span_fraction ? in.span_fraction->size : 0);
    d.first_key = (ptrdiff_t)need(f, "first_key");
    d.scale = need(f, "scale");
    y = stx_attention(x, &in, &d);
    CHECK(y != NULL, "%s: %s", name, stx_error(x));
    if (y) {
        same_as(x, f, name, "y", y->data, y->size, TOL, 1e-3);
        dy = entry(f, "dy", &n);
        g = (stx_real *)malloc((n + 1) * sizeof *g);
        for (i = 0; i < n; i++) g[i] = (stx_real)dy[i];
        stx_backward_from(x, y, g);
        CHECK(stx_ok(x), "%s: %s", name, stx_error(x));
        same_as(x, f, name, "dq", in.q->grad, in.q->size, TOL, 1e-3);
        same_as(x, f, name, "dk", in.k->grad, in.k->size, TOL, 1e-3);
        same_as(x, f, name, "dv", in.v->grad, in.v->size, TOL, 1e-3);
        if (in.pe) same_as(x, f, name, "dpe", in.pe->grad, in.pe->size, TOL, 1e-3);
        if (in.content_bias)
            same_as(x, f, name, "du", in.content_bias->grad, in.content_bias->size, TOL, 1e-3);
        if (in.position_bias)
            same_as(x, f, name, "dvb", in.position_bias->grad, in.position_bias->size, TOL, 1e-3);
        if (in.span_fraction)
            same_as(x, f, name, "dz", in.span_fraction->grad, in.span_fraction->size, TOL, 1e-3);
        if (in.persistent_k)
            same_as(x, f, name, "dpk", in.persistent_k->grad, in.persistent_k->size, TOL, 1e-3);
        if (in.persistent_v)
            same_as(x, f, name, "dpv", in.persistent_v->grad, in.persistent_v->size, TOL, 1e-3);
        free(g);
        free(dy);
    }
    stx_file_close(f);
    stx_destroy(x);
}

static stx_ids *ids_of(stx_ctx *x, const stx_file *f, const char *name) {
    size_t n;
    int32_t *w = integers(f, name, &n);
    stx_ids *ids = stx_tokens(x, w, 1, n);
    free(w);
    return ids;
}

static void finish(stx_ctx *x, const stx_file *f, const char *op, stx_tensor *y, stx_tensor *in,
                   stx_tensor *w, stx_tensor *b) {
    char name[64];
    size_t n, i;
    double *dy;
    stx_real *g;
    CHECK(y != NULL, "%s: %s", op, stx_error(x));
    if (!y) return;
    snprintf(name, sizeof name, "%s.y", op);
    same_as(x, f, op, name, y->data, y->size, TOL, 1e-3);
    snprintf(name, sizeof name, "%s.dy", op);
    dy = entry(f, name, &n);
    g = (stx_real *)malloc((y->size + 1) * sizeof *g);
    for (i = 0; i < y->size; i++) g[i] = dy ? (stx_real)dy[i] : 1;
    stx_backward_from(x, y, g);
    free(dy);
    free(g);
    if (in) {
        snprintf(name, sizeof name, "%s.dx", op);
        same_as(x, f, op, name, in->grad, in->size, TOL, 1e-3);
    }
    if (w) {
        snprintf(name, sizeof name, "%s.dw", op);
        same_as(x, f, op, name, w->grad, w->size, TOL, 1e-3);
    }
    if (b) {
        snprintf(name, sizeof name, "%s.db", op);
        same_as(x, f, op, name, b->grad, b->size, TOL, 1e-3);
    }
}

static void plain_ops(void) {
    stx_ctx *x = golden_ctx(0);
    stx_file *f = open_golden(x, "ops");
    stx_tensor *a, *b, *w;
    if (!f) return;
    stx_begin(x, STX_TRAIN);
    a = var(x, f, "layernorm.x");
    w = var(x, f, "layernorm.w");
    b = var(x, f, "layernorm.b");
    finish(x, f, "layernorm", stx_layernorm(x, a, w, b, 0), a, w, b);
    a = var(x, f, "softmax.x");
    finish(x, f, "softmax", stx_softmax(x, a), a, NULL, NULL);
    a = var(x, f, "gelu.x");
    finish(x, f, "gelu", stx_gelu(x, a), a, NULL, NULL);
    a = var(x, f, "tanh.x");
    finish(x, f, "tanh", stx_tanh(x, a), a, NULL, NULL);
    a = var(x, f, "sigmoid.x");
    finish(x, f, "sigmoid", stx_sigmoid(x, a), a, NULL, NULL);
    a = var(x, f, "relu.x");
    finish(x, f, "relu", stx_relu(x, a), a, NULL, NULL);
    a = var(x, f, "linear.x");
    w = var(x, f, "linear.w");
    b = var(x, f, "linear.b");
    finish(x, f, "linear", stx_linear(x, a, w, b, STX_ACT_NONE), a, w, b);
    a = var(x, f, "linear_nobias.x");
    w = var(x, f, "linear_nobias.w");
    finish(x, f, "linear_nobias", stx_linear(x, a, w, NULL, STX_ACT_NONE), a, w, NULL);
    a = var(x, f, "cross_entropy.x");
    finish(x, f, "cross_entropy", stx_cross_entropy(x, a, ids_of(x, f, "cross_entropy.target"), 0),
           a, NULL, NULL);
    a = var(x, f, "mse.x");
    b = var(x, f, "mse.target");
    finish(x, f, "mse", stx_mse(x, a, b), a, NULL, NULL);
    same_as(x, f, "mse", "mse.dtarget", b->grad, b->size, TOL, 1e-3);
    w = var(x, f, "embedding.w");
    finish(x, f, "embedding", stx_embedding(x, w, ids_of(x, f, "embedding.ids")), NULL, w, NULL);
    CHECK(stx_ok(x), "%s", stx_error(x));
    stx_file_close(f);
    stx_destroy(x);
}

static void optimisers(void) {
    static const char *const variants[] = {"sgd",          "sgd_clip",   "adam",    "adam_clip",
                                           "adamw",        "adamw_clip", "adagrad", "adagrad_clip",
                                           "adagrad_warm", "spec"};
    size_t v, step, k, i;
    for (v = 0; v < sizeof variants / sizeof *variants; v++) {
        stx_ctx *x = golden_ctx(0);
        stx_file *f = open_golden(x, "optim");
        stx_params *p = stx_params_create(x);
        stx_optim_desc od;
        stx_schedule sc;
        stx_optim *o;
        char key[64];
        const char *kind, *var_ = variants[v];
        int spec = !strcmp(var_, "spec");
        size_t steps = 0, n[2];
        double *init[2], *grads[2], *want[2];
        static const char *const letters[2] = {"p", "q"};
        if (!f) {
            stx_destroy(x);
            return;
        }
        for (k = 0; k < 2; k++) {
            if (spec) {
                snprintf(key, sizeof key, "spec.%s.init", letters[k]);
                init[k] = entry(f, key, &n[k]);
                snprintf(key, sizeof key, "spec.%s.grad", letters[k]);
                grads[k] = entry(f, key, &steps);
                snprintf(key, sizeof key, "spec.%s", letters[k]);
                want[k] = entry(f, key, NULL);
            } else {
                snprintf(key, sizeof key, "p%d.init", (int)k);
                init[k] = entry(f, key, &n[k]);
                snprintf(key, sizeof key, "p%d.grad", (int)k);
                grads[k] = entry(f, key, &steps);
                snprintf(key, sizeof key, "%s.p%d", var_, (int)k);
                want[k] = entry(f, key, NULL);
            }
            CHECK(init[k] && grads[k] && want[k], "%s", key);
            if (!init[k] || !grads[k] || !want[k]) return;
            steps /= n[k];
            snprintf(key, sizeof key, "p%d", (int)k);
            stx_param(p, STX_ZEROS, 0, key, n[k], 0, 0, 0);
            put_f64(x, p->tensor[k]->data, init[k], n[k]);
        }
        memset(&od, 0, sizeof od);
        memset(&sc, 0, sizeof sc);
        if (spec) {
            od.kind = STX_ADAGRAD;
            od.clip = 0.03;
            sc.lr = 0.07;
            sc.warmup = 4;
        } else {
            snprintf(key, sizeof key, "%s.kind", var_);
            kind = stx_file_meta(f, key);
            od.kind = !strcmp(kind, "sgd")     ? STX_SGD
                      : !strcmp(kind, "adam")  ? STX_ADAM
                      : !strcmp(kind, "adamw") ? STX_ADAMW
                                               : STX_ADAGRAD;
            snprintf(key, sizeof key, "%s.lr", var_);
            sc.lr = need(f, key);
            snprintf(key, sizeof key, "%s.clip", var_);
            od.clip = need(f, key);
            snprintf(key, sizeof key, "%s.warmup", var_);
            sc.warmup = (uint64_t)need(f, key);
            snprintf(key, sizeof key, "%s.momentum", var_);
            od.momentum = need(f, key);
            snprintf(key, sizeof key, "%s.weight_decay", var_);
            od.weight_decay = need(f, key);
        }
        o = stx_optim_create(p, &od);
        CHECK(o != NULL, "%s: %s", var_, stx_error(x));
        for (step = 0; o && step < steps; step++) {
            for (k = 0; k < 2; k++) put_f64(x, p->tensor[k]->grad, grads[k] + step * n[k], n[k]);
            CHECK(stx_optim_step(o, stx_schedule_lr(&sc, step + 1)) == 1 && stx_optim_sync(o),
                  "%s step %zu", var_, step);
            for (k = 0; k < 2; k++) {
                stx_real *value = host_of(x, p->tensor[k]->data, n[k]),
                         *grad = host_of(x, p->tensor[k]->grad, n[k]);
                for (i = 0; i < n[k]; i++) {
                    CHECK(CLOSE(value[i], want[k][step * n[k] + i],
                                spec ? (TOL > 1e-9 ? 1e-5 : 1e-11) : TOL),
                          "%s step %zu tensor %zu[%zu]: %.12g, expected %.12g", var_, step, k, i,
                          (double)value[i], want[k][step * n[k] + i]);
                    CHECK(grad[i] == 0, "%s: the gradient is not zeroed", var_);
                }
                free(value);
                free(grad);
            }
        }
        for (k = 0; k < 2; k++) {
            free(init[k]);
            free(grads[k]);
            free(want[k]);
        }
        stx_file_close(f);
        stx_destroy(x);
    }
}

int main(int argc, char **argv) {
    static const struct {
        const char *name;
        int count;
    } kinds[] = {{"attn", 14}, {"attn_fs", 8}, {"attn_frac", 5}};

    size_t k;
    int i;
    if (argc > 1) dir = argv[1];
    plain_ops();
    for (k = 0; k < sizeof kinds / sizeof *kinds; k++)
        for (i = 1; i <= kinds[k].count; i++) {
            char name[32];
            snprintf(name, sizeof name, "%s_%02d", kinds[k].name, i);
            attention_case(name, 1);
            if (golden_cpu()) attention_case(name, 3);
        }
    optimisers();
    return test_end();
}
