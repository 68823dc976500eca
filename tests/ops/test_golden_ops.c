/* test_golden_ops.c - compares single ops, fused attention and the optimisers with
   golden vectors of an independent PyTorch implementation (tests/golden): values and
   every gradient. The tolerance is 1e-10 in the double build and 1e-5 in float. Usage:
   test_golden_ops DIR */
#include <stdint.h>
#include "../../seqtx.h"
#include "../golden/golden.h"

#ifdef SEQTX_DOUBLE
static const double TOL = 1e-10;
#else
static const double TOL = 1e-5;
#endif

/* Returns a variable with the shape and elements of an entry, or NULL if the file has
   no such entry. */
static stx_tensor *var(stx_ctx *x, const stx_file *f, const char *name) {
    const stx_entry *e = stx_file_find(f, name);
    stx_real *r;
    stx_tensor *t;
    size_t i, dim[4] = {0, 0, 0, 0};
    if (!e) return NULL;
    r = reals(f, name, NULL);
    for (i = 0; i < (size_t)e->ndim; i++) dim[i] = e->dim[i];
    t = stx_variable(x, r, dim[0], dim[1], dim[2], dim[3]);
    free(r);
    return t;
}

/* Returns a bias, which is (H,D) in the file and (C) in the op. */
static stx_tensor *bias_var(stx_ctx *x, const stx_file *f, const char *name) {
    stx_tensor *t = var(x, f, name);
    if (t) {
        t->ndim = 1;
        t->dim[0] = t->size;
    }
    return t;
}

static void attention_inputs(stx_ctx *x, const stx_file *f, const char *name, stx_attention_in *in,
                             stx_attention_desc *d) {
    memset(in, 0, sizeof *in);
    memset(d, 0, sizeof *d);
    in->q = var(x, f, "q");
    in->k = var(x, f, "k");
    in->v = var(x, f, "v");
    in->pe = var(x, f, "pe");
    in->span_fraction = var(x, f, "z");
    in->persistent_k = var(x, f, "pk");
    in->persistent_v = var(x, f, "pv");
    in->content_bias = bias_var(x, f, "u");
    in->position_bias = bias_var(x, f, "vb");
    d->heads = (size_t)need(f, "heads");
    d->delta_min = (int)need(f, "delta_min");
    d->not_causal = (int)need(f, "not_causal");
    d->span = d->not_causal ? 0 : (size_t)need(f, "span");
    d->ramp = in->span_fraction ? need(f, "ramp") : 0;
    d->max_span = in->span_fraction ? need(f, "max_span") : 0;
    d->eps = need(f, "eps");
    d->no_renorm = (int)meta(f, "no_renorm", 0);
    CHECK(!in->span_fraction
              || in->span_fraction->size == (meta(f, "span_per_layer", 0) > 0 ? 1 : d->heads),
          "%s: %zu spans", name, in->span_fraction ? in->span_fraction->size : 0);
    d->first_key = (ptrdiff_t)need(f, "first_key");
    d->scale = need(f, "scale");
}

static void attention_grads(stx_ctx *x, const stx_file *f, const char *name,
                            const stx_attention_in *in) {
    const struct {
        const char *entry;
        const stx_tensor *t;
    } grads[] = {{"dq", in->q},
                 {"dk", in->k},
                 {"dv", in->v},
                 {"dpe", in->pe},
                 {"du", in->content_bias},
                 {"dvb", in->position_bias},
                 {"dz", in->span_fraction},
                 {"dpk", in->persistent_k},
                 {"dpv", in->persistent_v}};
    size_t i;
    for (i = 0; i < sizeof grads / sizeof *grads; i++)
        if (grads[i].t)
            same_as(x, f, name, grads[i].entry, grads[i].t->grad, grads[i].t->size, TOL, 1e-3);
}

static void attention_case(const char *name, int threads) {
    stx_ctx *x = golden_ctx(threads);
    stx_file *f = open_golden(x, name);
    stx_attention_in in;
    stx_attention_desc d;
    stx_tensor *y;
    if (!f) {
        stx_destroy(x);
        return;
    }
    stx_begin(x, STX_TRAIN);
    attention_inputs(x, f, name, &in, &d);
    y = stx_attention(x, &in, &d);
    CHECK(y != NULL, "%s: %s", name, stx_error(x));
    if (y) {
        stx_real *dy = reals(f, "dy", NULL);
        same_as(x, f, name, "y", y->data, y->size, TOL, 1e-3);
        stx_backward_from(x, y, dy);
        CHECK(stx_ok(x), "%s: %s", name, stx_error(x));
        attention_grads(x, f, name, &in);
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

/* Compares y with "OP.y". After a backward pass from "OP.dy" (or ones if there is no
   such entry), compares the gradients of the input, weight and bias. Tensors that are
   NULL are skipped. */
static void finish(stx_ctx *x, const stx_file *f, const char *op, stx_tensor *y, stx_tensor *in,
                   stx_tensor *w, stx_tensor *b) {
    const struct {
        const char *entry;
        const stx_tensor *t;
    } grads[] = {{"dx", in}, {"dw", w}, {"db", b}};
    char name[64];
    size_t i;
    stx_real *dy;
    CHECK(y != NULL, "%s: %s", op, stx_error(x));
    if (!y) return;
    snprintf(name, sizeof name, "%s.y", op);
    same_as(x, f, op, name, y->data, y->size, TOL, 1e-3);
    snprintf(name, sizeof name, "%s.dy", op);
    dy = reals(f, name, NULL);
    if (!dy) {
        dy = (stx_real *)malloc((y->size + 1) * sizeof *dy);
        for (i = 0; i < y->size; i++) dy[i] = 1;
    }
    stx_backward_from(x, y, dy);
    free(dy);
    for (i = 0; i < 3; i++) {
        if (!grads[i].t) continue;
        snprintf(name, sizeof name, "%s.%s", op, grads[i].entry);
        same_as(x, f, op, name, grads[i].t->grad, grads[i].t->size, TOL, 1e-3);
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

/* A run of an optimiser: two parameters, with their gradients and values for every
   step. */
typedef struct optim_run {
    size_t n[2], steps;
    double *init[2], *grads[2], *expected[2];
} optim_run;

/* Reads the entries of a variant. The entries of variant "spec" have different names. */
static int read_run(const stx_file *f, const char *variant, optim_run *r) {
    const int spec = !strcmp(variant, "spec");
    char key[64], param[16];
    size_t k;
    for (k = 0; k < 2; k++) {
        snprintf(param, sizeof param, spec ? "spec.%c" : "p%c", spec ? "pq"[k] : "01"[k]);
        snprintf(key, sizeof key, "%s.init", param);
        r->init[k] = entry(f, key, &r->n[k]);
        snprintf(key, sizeof key, "%s.grad", param);
        r->grads[k] = entry(f, key, &r->steps);
        if (spec)
            snprintf(key, sizeof key, "%s", param);
        else
            snprintf(key, sizeof key, "%s.%s", variant, param);
        r->expected[k] = entry(f, key, NULL);
        CHECK(r->init[k] && r->grads[k] && r->expected[k], "%s", key);
        if (!r->init[k] || !r->grads[k] || !r->expected[k]) return 0;
        r->steps /= r->n[k];
    }
    return 1;
}

static double variant_need(const stx_file *f, const char *variant, const char *what) {
    char key[64];
    snprintf(key, sizeof key, "%s.%s", variant, what);
    return need(f, key);
}

static void variant_desc(const stx_file *f, const char *variant, stx_optim_desc *od,
                         stx_schedule *sc) {
    static const char *const names[] = {"sgd", "adam", "adamw", "adagrad", NULL};
    static const int kinds[] = {STX_SGD, STX_ADAM, STX_ADAMW, STX_ADAGRAD};
    char key[64];
    memset(od, 0, sizeof *od);
    memset(sc, 0, sizeof *sc);
    if (!strcmp(variant, "spec")) {
        od->kind = STX_ADAGRAD;
        od->clip = 0.03;
        sc->lr = 0.07;
        sc->warmup = 4;
        return;
    }
    snprintf(key, sizeof key, "%s.kind", variant);
    od->kind = kinds[index_of(stx_file_meta(f, key), key, names)];
    sc->lr = variant_need(f, variant, "lr");
    od->clip = variant_need(f, variant, "clip");
    sc->warmup = (uint64_t)variant_need(f, variant, "warmup");
    od->momentum = variant_need(f, variant, "momentum");
    od->weight_decay = variant_need(f, variant, "weight_decay");
}

/* Compares the parameters after a step, and checks that the step has zeroed the
   gradients. */
static void compare_step(const char *variant, const optim_run *r, const stx_params *p, size_t step,
                         double tol) {
    stx_ctx *x = p->ctx;
    size_t k, i;
    for (k = 0; k < 2; k++) {
        stx_real *value = host_of(x, p->tensor[k]->data, r->n[k]),
                 *grad = host_of(x, p->tensor[k]->grad, r->n[k]);
        const double *expected = r->expected[k] + step * r->n[k];
        for (i = 0; i < r->n[k]; i++) {
            CHECK(CLOSE(value[i], expected[i], tol),
                  "%s step %zu tensor %zu[%zu]: %.12g, expected %.12g", variant, step, k, i,
                  (double)value[i], expected[i]);
            CHECK(grad[i] == 0, "%s: the gradient is not zeroed", variant);
        }
        free(value);
        free(grad);
    }
}

static void optimiser_case(const char *variant) {
    const double spec_tol = TOL > 1e-9 ? 1e-5 : 1e-11;
    const double tol = strcmp(variant, "spec") ? TOL : spec_tol;
    stx_ctx *x = golden_ctx(0);
    stx_file *f = open_golden(x, "optim");
    stx_params *p = stx_params_create(x);
    stx_optim_desc od;
    stx_schedule sc;
    stx_optim *o;
    optim_run r;
    size_t step, k;

    memset(&r, 0, sizeof r);
    if (f && read_run(f, variant, &r)) {
        for (k = 0; k < 2; k++) {
            stx_param(p, STX_ZEROS, 0, k ? "p1" : "p0", r.n[k], 0, 0, 0);
            put_f64(x, p->tensor[k]->data, r.init[k], r.n[k]);
        }
        variant_desc(f, variant, &od, &sc);
        o = stx_optim_create(p, &od);
        CHECK(o != NULL, "%s: %s", variant, stx_error(x));
        for (step = 0; o && step < r.steps; step++) {
            for (k = 0; k < 2; k++)
                put_f64(x, p->tensor[k]->grad, r.grads[k] + step * r.n[k], r.n[k]);
            CHECK(stx_optim_step(o, stx_schedule_lr(&sc, step + 1)) == 1 && stx_optim_sync(o),
                  "%s step %zu", variant, step);
            compare_step(variant, &r, p, step, tol);
        }
    }
    for (k = 0; k < 2; k++) {
        free(r.init[k]);
        free(r.grads[k]);
        free(r.expected[k]);
    }
    stx_file_close(f);
    stx_destroy(x);
}

static void optimisers(void) {
    static const char *const variants[] = {"sgd",          "sgd_clip",   "adam",    "adam_clip",
                                           "adamw",        "adamw_clip", "adagrad", "adagrad_clip",
                                           "adagrad_warm", "spec"};
    size_t v;
    for (v = 0; v < sizeof variants / sizeof *variants; v++) optimiser_case(variants[v]);
}

/* Compares values on the device with expected ones. */
static void muon_compare(stx_ctx *x, const char *key, const stx_real *got, const double *expected,
                         size_t n) {
    stx_real *value = host_of(x, got, n);
    double worst = 0, top = 0;
    size_t i;
    for (i = 0; i < n; i++) {
        const double off = fabs((double)value[i] - expected[i]);
        if (!(off <= worst)) worst = off;
        top = fmax(top, fabs(expected[i]));
    }
    CHECK(worst <= TOL * top, "%s: off by %g of %g", key, worst, top);
    free(value);
}

/* Muon: three matrices, a vector and an embedding. */
static void muon_case(const char *variant) {
    static const size_t dim[5][2] = {{24, 8}, {8, 40}, {16, 16}, {7}, {11, 6}};
    stx_ctx *x = golden_ctx(0);
    stx_file *f = open_golden(x, "muon");
    stx_params *p = stx_params_create(x);
    stx_optim_desc d;
    stx_optim *o;
    double *grads[5], *v;
    size_t n[5], steps = 0, step, k;
    char key[64], name[8];
    memset(&d, 0, sizeof d);
    d.kind = STX_MUON;
    d.momentum = variant_need(f, variant, "momentum");
    d.weight_decay = variant_need(f, variant, "weight_decay");
    d.clip = variant_need(f, variant, "clip");
    for (k = 0; k < 5; k++) {
        stx_tensor *t;
        snprintf(name, sizeof name, "p%zu", k);
        t = stx_param(p, STX_ZEROS, 0, name, dim[k][0], dim[k][1], 0, 0);
        if (k == 4) stx_param_elementwise(t);
        snprintf(key, sizeof key, "%s.init", name);
        v = entry(f, key, &n[k]);
        put_f64(x, t->data, v, n[k]);
        free(v);
        snprintf(key, sizeof key, "%s.grad", name);
        grads[k] = entry(f, key, &steps);
        steps /= n[k];
    }
    o = stx_optim_create(p, &d);
    CHECK(o && steps == 5, "%s: %s", variant, stx_error(x));
    for (step = 0; o && step < steps; step++) {
        for (k = 0; k < 5; k++) put_f64(x, p->tensor[k]->grad, grads[k] + step * n[k], n[k]);
        CHECK(stx_optim_step(o, need(f, "lr")) == 1 && stx_optim_sync(o), "%s step %zu", variant,
              step);
        for (k = 0; k < 5; k++) {
            snprintf(key, sizeof key, "%s.p%zu", variant, k);
            v = entry(f, key, NULL);
            muon_compare(x, key, p->tensor[k]->data, v + step * n[k], n[k]);
            free(v);
            snprintf(key, sizeof key, "%s.p%zu.buf", variant, k);
            v = k < 3 && step + 1 == steps ? entry(f, key, NULL) : NULL;
            if (v) muon_compare(x, key, o->state[0][k]->data, v, n[k]);
            free(v);
        }
    }
    for (k = 0; k < 5; k++) free(grads[k]);
    stx_file_close(f);
    stx_destroy(x);
}

static void muon(void) {
    static const char *const variants[] = {"m95", "m95_clip", "m95_decay", "m95_decay_clip",
                                           "m90", "m90_clip", "m90_decay", "m90_decay_clip"};
    size_t v;
    for (v = 0; v < sizeof variants / sizeof *variants; v++) muon_case(variants[v]);
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
    muon();
    return test_end();
}
