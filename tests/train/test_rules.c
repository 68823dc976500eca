/* test_rules.c - parameter groups (stx_params_set_rule): patterns, the formulas of all
   optimisers with separate learning rates and weight decays, computed in double by
   independent code, and frozen parameters: gradients of the four families, the end of the
   backward pass, recomputation, memory and checkpoints. */
#include "../../seqtx_attn_span.h"
#include "../../seqtx_compressive.h"
#include "../../seqtx_par.h"
#include "../../seqtx_sru.h"
#include "../test.h"
#include "../models/family.h"


// >>patterns

static const char *const names[] = {"in_emb.weight",      "key_pe",
                                    "layers.0.attn.wq",   "layers.0.ff.fc1.weight",
                                    "layers.0.ff.fc1.bias", "layers.1.attn.wq",
                                    "layers.2.attn.wq",   "layers.10.attn.wq",
                                    "layers.12.attn.wq",  "out_emb.weight"};

enum { NAMES = sizeof names / sizeof *names };

static stx_params *named_params(stx_ctx *x) {
    stx_params *p = stx_params_create(x);
    size_t i;
    for (i = 0; i < NAMES; i++) stx_param(p, STX_NORMAL, 1, names[i], 3, 2, 0, 0);
    return p;
}

/* Selections are written as one letter per name, x if it is selected. */
static void patterns(void) {
    static const struct {
        const char *patterns, *selected;
    } right[] = {
        {"key_pe", ".x........"},
        {"*", "xxxxxxxxxx"},
        {"layers.0.*", "..xxx....."},
        {"*.attn.*", "..x..xxxx."},
        {"layers.?.attn.wq", "..x..xx..."},
        {"layers.[0-1].*", "..xxxx...."},
        {"layers.[1-10].*", ".....xxx.."},
        {"layers.[2-99].*", "......xxx."},
        {"layers.*[0-2].*wq", "..x..xx..."},
        {"*[0-0]*", "..xxx....."},
        {"*emb*,key_pe", "xx.......x"},
        {"*weight*,*bias", "x..xx....x"},
        {"*,!layers.*", "xx.......x"},
        {"*,!layers.*,layers.0.*", "xxxxx....x"},
        {"!layers.*,*", "xxxxxxxxxx"},
        {"**wq**", "..x..xxxx."},
    };
    static const char *const wrong[] = {"",          "key_pe,",       "key",      "key_pe,layer.*",
                                        "*,!heads",  "layers.[3-9].*", "layers.[0].*",
                                        "layers.[x-2]*", "KEY_PE",     "*.*.*.*.*.*", " key_pe"};
    stx_ctx *x = context(1, 1);
    stx_param_rule rule;
    stx_params *p;
    size_t i, k, n;
    for (k = 0; k < sizeof right / sizeof *right; k++) {
        char got[NAMES + 1] = {0};
        p = named_params(x);
        memset(&rule, 0, sizeof rule);
        rule.lr = 0.5;
        n = stx_params_set_rule(p, right[k].patterns, &rule);
        for (i = 0; i < NAMES; i++) {
            got[i] = p->rule[i].lr > 0 ? 'x' : '.';
            n -= got[i] == 'x';
        }
        CHECK(!strcmp(got, right[k].selected) && !n, "%s: %s, expected %s: %s", right[k].patterns,
              got, right[k].selected, stx_error(x));
    }
    for (k = 0; k < sizeof wrong / sizeof *wrong; k++) {
        const char *comma = strrchr(wrong[k], ',');
        char quoted[32];
        p = named_params(x);
        memset(&rule, 0, sizeof rule);
        rule.freeze = 1;
        CHECK(!stx_params_set_rule(p, wrong[k], &rule) && stx_error_code(x) == STX_ERR_ARG,
              "\"%s\" is accepted", wrong[k]);
        snprintf(quoted, sizeof quoted, "\"%s\"", comma ? comma + 1 : wrong[k]);
        CHECK(strstr(stx_error(x), quoted) && strstr(stx_error(x), "in_emb.weight"),
              "\"%s\": %s", wrong[k], stx_error(x));
        stx_clear_error(x);
        for (i = 0; i < NAMES; i++)
            CHECK(p->tensor[i]->needs_grad, "\"%s\" freezes %s", wrong[k], names[i]);
    }
    stx_destroy(x);
}

/* Calls combine: fields that are 0 change nothing. Wrong rules are errors and change
   nothing. */
static void combined(void) {
    static const stx_param_rule bad[] = {{2, 0, 0},          {0, -1, 0},  {0, HUGE_VAL, 0},
                                         {0, 0, -0.5},       {0, 0, NAN}, {0, NAN, 0},
                                         {0, 0, HUGE_VAL}};
    stx_ctx *x = context(1, 1);
    stx_params *p = named_params(x);
    const stx_param_rule freeze = {1, 0, 0}, thaw = {-1, 0, 0}, slow = {0, 0.5, 0.25},
                         bare = {0, 0, -1}, none = {0, 0, 0};
    size_t i;
    for (i = 0; i < sizeof bad / sizeof *bad; i++) {
        CHECK(!stx_params_set_rule(p, "*", &bad[i]) && stx_error_code(x) == STX_ERR_ARG
                  && p->tensor[0]->needs_grad && p->rule[0].lr == 0,
              "rule %zu is accepted", i);
        stx_clear_error(x);
    }
    CHECK(!stx_params_set_rule(p, NULL, &slow) && stx_error_code(x) == STX_ERR_ARG, "no patterns");
    stx_clear_error(x);
    CHECK(!stx_params_set_rule(p, "*", NULL) && stx_error_code(x) == STX_ERR_ARG, "no rule");
    stx_clear_error(x);
    CHECK(!stx_params_set_rule(stx_params_create(x), "*", &slow), "an empty list");
    stx_clear_error(x);
    CHECK(!stx_params_set_rule(NULL, "*", &slow) && stx_ok(x), "no list");

    CHECK(stx_params_set_rule(p, "layers.*", &freeze) == 7
              && stx_params_set_rule(p, "*", &slow) == 10
              && stx_params_set_rule(p, "*wq", &bare) == 5
              && stx_params_set_rule(p, "layers.1*", &thaw) == 3
              && stx_params_set_rule(p, "key_pe", &none) == 1,
          "%s", stx_error(x));
    CHECK(p->rule[3].freeze == 1 && p->rule[3].lr == 0.5 && p->rule[3].weight_decay == 0.25
              && p->rule[7].freeze == -1 && p->rule[7].lr == 0.5 && p->rule[7].weight_decay == -1
              && p->rule[1].freeze == 0 && p->rule[1].lr == 0.5,
          "rules do not combine");
    CHECK(stx_params_size(p) == 60 && stx_params_trained_size(p) == 36 && !p->tensor[2]->needs_grad
              && p->tensor[7]->needs_grad,
          "%zu of %zu elements are trained", stx_params_trained_size(p), stx_params_size(p));

    CHECK(stx_optim_create(p, NULL) != NULL, "%s", stx_error(x));
    CHECK(!stx_params_set_rule(p, "*", &slow) && strstr(stx_error(x), "before stx_optim_create"),
          "a rule is set after stx_optim_create: %s", stx_error(x));
    stx_clear_error(x);

    p = named_params(x);
    stx_params_set_rule(p, "*", &freeze);
    CHECK(!stx_optim_create(p, NULL) && strstr(stx_error(x), "all 10 are frozen"), "%s",
          stx_error(x));
    stx_destroy(x);
}


// >>formulas, in double

enum { PARAMS = 6, STEPS = 7 };

/* The parameters of a run: shape, whether it is a hidden matrix, and its rule. Some have
   several chunks of 4096 elements. */
static const struct {
    size_t dim[2];
    int elementwise;
    stx_param_rule rule;
} params[PARAMS] = {{{100, 72}, 0, {0, 0, 0}},   {{7, 0}, 0, {0, 0.1, 0}},
                    {{33, 130}, 0, {1, 0, 0}},   {{9, 5}, 0, {0, 3, 0.02}},
                    {{90, 60}, 1, {0, 0, 0.3}},  {{40, 3}, 0, {0, 0.5, -1}}};

/* Orthogonalises u (rows,cols) in place, with rows >= cols. */
static void orthogonalise(double *u, size_t rows, size_t cols) {
    double *A = (double *)calloc(cols * cols, sizeof *A);
    double *P = (double *)calloc(cols * cols, sizeof *P);
    double *Y = (double *)calloc(rows * cols, sizeof *Y), norm = 0;
    size_t i, j, k;
    int step;
    for (i = 0; i < rows * cols; i++) norm += u[i] * u[i];
    for (i = 0; i < rows * cols; i++) u[i] /= sqrt(norm) + 1e-7;
    for (step = 0; step < 5; step++) {
        for (i = 0; i < cols; i++)
            for (j = 0; j < cols; j++)
                for (A[i * cols + j] = 0, k = 0; k < rows; k++)
                    A[i * cols + j] += u[k * cols + i] * u[k * cols + j];
        for (i = 0; i < cols; i++)
            for (j = 0; j < cols; j++) {
                double sum = 0;
                for (k = 0; k < cols; k++) sum += A[i * cols + k] * A[k * cols + j];
                P[i * cols + j] = (i == j) * 3.4445 - 4.7750 * A[i * cols + j] + 2.0315 * sum;
            }
        for (i = 0; i < rows; i++)
            for (j = 0; j < cols; j++)
                for (Y[i * cols + j] = 0, k = 0; k < cols; k++)
                    Y[i * cols + j] += u[i * cols + k] * P[k * cols + j];
        memcpy(u, Y, rows * cols * sizeof *u);
    }
    free(A);
    free(P);
    free(Y);
}

static double norm_of(const double *a, size_t n) {
    double sum = 0;
    size_t i;
    for (i = 0; i < n; i++) sum += a[i] * a[i];
    return sqrt(sum);
}

/* Update t of parameter i with learning rate lr and weight decay wd, which include its
   rule. g is clipped, except for Adagrad, whose step is multiplied by `clip`. */
static void formula(const stx_optim_desc *d, int t, double lr, double wd, double clip, size_t i,
                    const double *g, double *theta, double *m, double *v, size_t n) {
    const double c1 = 1 - pow(0.9, t), c2 = 1 - pow(0.999, t);
    const double eps = d->kind == STX_LAMB ? 1e-6 : 1e-8;
    const double most = 2 / (1 - 0.999) - 1, rho = most - 2 * t * pow(0.999, t) / c2;
    const size_t rows = params[i].dim[0], cols = params[i].dim[1];
    double *u = (double *)calloc(n, sizeof *u), phi = 1;
    size_t e;
    for (e = 0; e < n; e++) {
        double h = g[e] + (d->kind == STX_ADAM || d->kind == STX_SGD ? wd * theta[e] : 0);
        if (d->kind == STX_ADAGRAD) {
            v[e] += h * h;
            theta[e] -= lr * clip * h / (sqrt(v[e]) + 1e-10);
        } else if (d->kind == STX_SGD) {
            m[e] = 0.7 * m[e] + h;
            theta[e] -= lr * m[e];
        } else if (d->kind == STX_MUON && cols > 1 && !params[i].elementwise) {
            m[e] = 0.95 * m[e] + h;
            u[e] = h + 0.95 * m[e];
        } else {
            m[e] = 0.9 * m[e] + 0.1 * h;
            v[e] = 0.999 * v[e] + 0.001 * h * h;
            u[e] = m[e] / c1 / (sqrt(v[e] / c2) + eps);
            if (d->kind == STX_RADAM) u[e] = m[e] / c1;
            if (d->kind == STX_RADAM && rho >= 5)
                u[e] *= sqrt(c2 * (rho - 4) * (rho - 2) * most / ((most - 4) * (most - 2) * rho))
                        / (sqrt(v[e]) + eps);
        }
    }
    if (d->kind == STX_MUON && cols > 1 && !params[i].elementwise) {
        orthogonalise(u, rows, cols);
        for (e = 0; e < n; e++) u[e] *= 0.2 * sqrt((double)rows);
    }
    if (d->kind == STX_LAMB) {
        for (e = 0; e < n; e++) u[e] += wd * theta[e];
        phi = norm_of(theta, n) / norm_of(u, n);
        wd = 0;
    }
    if (d->kind >= STX_ADAM)
        for (e = 0; e < n; e++)
            theta[e] -= lr * (d->kind == STX_ADAM ? 0 : wd) * theta[e] + lr * phi * u[e];
    free(u);
}

typedef struct run {
    stx_ctx *x;
    stx_params *p;
    stx_optim *o;
} run;

/* Adds parameter i, with its rule if `rules` is set. */
static void add_param(run *r, size_t i, int rules) {
    char name[16];
    stx_tensor *t;
    snprintf(name, sizeof name, "p%d", (int)i);
    t = stx_param(r->p, STX_NORMAL, 0.3, name, params[i].dim[0], params[i].dim[1], 0, 0);
    if (params[i].elementwise) stx_param_elementwise(t);
    if (rules) stx_params_set_rule(r->p, name, &params[i].rule);
}

static run run_create(const stx_optim_desc *d, int threads, int dry) {
    stx_desc c;
    run r;
    size_t i;
    memset(&c, 0, sizeof c);
    c.seed = 3;
    c.threads = threads;
    c.dry = dry;
    r.x = stx_create(&c);
    r.p = stx_params_create(r.x);
    for (i = 0; i < PARAMS; i++) add_param(&r, i, 1);
    r.o = stx_optim_create(r.p, d);
    CHECK(r.o != NULL, "%s", stx_error(r.x));
    return r;
}

static double gradient(size_t i, size_t e, int t) {
    return sin((double)(e * e % 1009) + 0.7 * (double)i + 1.3 * t) / (double)(1 + e % 7);
}

static void set_gradients(const run *r, int t) {
    size_t i, e;
    for (i = 0; i < r->p->count; i++) {
        const stx_tensor *q = r->p->tensor[i];
        const size_t number = (size_t)(r->p->name[i][1] - '0');
        for (e = 0; q->needs_grad && e < q->size; e++)
            q->grad[e] = (stx_real)gradient(number, e, t);
    }
}

static int same(const stx_tensor *a, const stx_tensor *b) {
    if (!a || !b) return a == b;
    return a->size == b->size && !memcmp(a->data, b->data, a->size * sizeof *a->data);
}

/* Compares updates with the formulas. The frozen parameter has no gradient and no state,
   and does not change. */
static void formulas_of(const stx_optim_desc *d) {
    const double tol = sizeof(stx_real) == 8 ? 1e-12 : 6e-6;
    run r = run_create(d, 1, 0), fresh = run_create(d, 1, 0);
    double *theta[PARAMS], *m[PARAMS], *v[PARAMS], *g[PARAMS];
    size_t i, e;
    int t;
    for (i = 0; i < PARAMS; i++) {
        const size_t n = r.p->tensor[i]->size;
        const int frozen = params[i].rule.freeze;
        theta[i] = (double *)calloc(n, sizeof **theta);
        m[i] = (double *)calloc(n, sizeof **m);
        v[i] = (double *)calloc(n, sizeof **v);
        g[i] = (double *)calloc(n, sizeof **g);
        for (e = 0; e < n; e++) theta[i][e] = (double)r.p->tensor[i]->data[e];
        CHECK((r.p->tensor[i]->grad == NULL) == frozen && (r.o->state[0][i] == NULL) == frozen,
              "kind %d: gradient or state of parameter %zu", d->kind, i);
    }
    for (t = 1; t <= STEPS; t++) {
        double norm = 0, factor = 1;
        set_gradients(&r, t);
        for (i = 0; i < PARAMS; i++) {
            for (e = 0; r.p->tensor[i]->grad && e < r.p->tensor[i]->size; e++)
                g[i][e] = (double)r.p->tensor[i]->grad[e];
            norm += norm_of(g[i], r.p->tensor[i]->size) * norm_of(g[i], r.p->tensor[i]->size);
        }
        norm = sqrt(norm);
        CHECK(stx_optim_step(r.o, 0.05 / t) == 1 && CLOSE(r.o->grad_norm / norm, 1, 1e-6),
              "kind %d: norm %g, expected %g: %s", d->kind, r.o->grad_norm, norm, stx_error(r.x));
        if (d->clip > 0 && d->kind != STX_ADAGRAD && d->clip / (norm + 1e-6) < 1)
            factor = d->clip / (norm + 1e-6);
        for (i = 0; i < PARAMS; i++) {
            const stx_param_rule *rule = &params[i].rule;
            const size_t n = r.p->tensor[i]->size;
            const int matrix = params[i].dim[1] > 1 && !params[i].elementwise;
            const double own = norm_of(g[i], n), lr = 0.05 / t * (rule->lr > 0 ? rule->lr : 1);
            double wd = d->decay_matrices && !matrix ? 0 : d->weight_decay, clip = 1, worst = 0;
            if (rule->freeze) continue;
            if (rule->weight_decay != 0) wd = rule->weight_decay > 0 ? rule->weight_decay : 0;
            if (d->clip > 0 && own > d->clip) clip = d->clip / (own + 1e-10);
            for (e = 0; e < n; e++) g[i][e] *= factor;
            formula(d, t, lr, wd, clip, i, g[i], theta[i], m[i], v[i], n);
            for (e = 0; e < n; e++) {
                const double off = fabs((double)r.p->tensor[i]->data[e] - theta[i][e]);
                if (!(off <= worst)) worst = off;
            }
            CHECK(worst <= tol, "kind %d, update %d, parameter %zu: off by %g", d->kind, t, i,
                  worst);
        }
    }
    for (i = 0; i < PARAMS; i++) {
        if (params[i].rule.freeze)
            CHECK(same(r.p->tensor[i], fresh.p->tensor[i]), "a frozen parameter changes");
        free(theta[i]);
        free(m[i]);
        free(v[i]);
        free(g[i]);
    }
    stx_destroy(r.x);
    stx_destroy(fresh.x);
}

static void formulas(void) {
    static const stx_optim_desc d[] = {
        {.kind = STX_SGD, .momentum = 0.7, .weight_decay = 0.1, .clip = 0.8},
        {.kind = STX_ADAM, .weight_decay = 0.1},
        {.kind = STX_ADAMW, .weight_decay = 0.1, .clip = 0.8},
        {.kind = STX_ADAMW, .weight_decay = 0.1, .decay_matrices = 1},
        {.kind = STX_RADAM, .weight_decay = 0.1, .decay_matrices = 1},
        {.kind = STX_LAMB, .weight_decay = 0.1, .decay_matrices = 1},
        {.kind = STX_MUON, .weight_decay = 0.1},
        {.kind = STX_MUON, .weight_decay = 0.1, .decay_matrices = 1, .clip = 0.8}};
    size_t i;
    for (i = 0; i < sizeof d / sizeof *d; i++) formulas_of(&d[i]);
}

/* Adagrad has no weight decay, neither in the desc nor in a rule. */
static void adagrad(void) {
    const stx_optim_desc d = {.kind = STX_ADAGRAD, .clip = 0.8};
    const stx_param_rule none = {0, 0, -1}, some = {0, 0.5, 0.1};
    run r = {context(1, 1), NULL, NULL};
    double theta[7], sum[7] = {0};
    size_t i;
    int t;
    r.p = stx_params_create(r.x);
    add_param(&r, 1, 1);
    stx_params_set_rule(r.p, "*", &none);
    for (i = 0; i < 7; i++) theta[i] = (double)r.p->tensor[0]->data[i];
    r.o = stx_optim_create(r.p, &d);
    for (t = 1; r.o && t <= 3; t++) {
        double g[7], clip, zero[7] = {0};
        for (i = 0; i < 7; i++) g[i] = gradient(1, i, t);
        set_gradients(&r, t);
        clip = norm_of(g, 7) > 0.8 ? 0.8 / (norm_of(g, 7) + 1e-10) : 1;
        CHECK(stx_optim_step(r.o, 0.1) == 1, "%s", stx_error(r.x));
        formula(&d, t, 0.01, 0, clip, 1, g, theta, zero, sum, 7);
        for (i = 0; i < 7; i++)
            CHECK(CLOSE(r.p->tensor[0]->data[i], theta[i], 1e-6), "update %d, element %zu", t, i);
    }
    CHECK(r.o && stx_ok(r.x), "%s", stx_error(r.x));
    r.p = stx_params_create(r.x);
    add_param(&r, 1, 0);
    stx_params_set_rule(r.p, "p1", &some);
    CHECK(!stx_optim_create(r.p, &d) && strstr(stx_error(r.x), "weight_decay of \"p1\""), "%s",
          stx_error(r.x));
    stx_destroy(r.x);
}

/* A run with a frozen parameter equals, bit-exactly, a run without this parameter, with
   any number of threads, and continues from a checkpoint. */
static void frozen(void) {
    static const int kinds[] = {STX_SGD, STX_ADAM, STX_ADAMW, STX_RADAM, STX_LAMB, STX_MUON};
    size_t k, i, j;
    int t;
    for (k = 0; k < sizeof kinds / sizeof *kinds; k++) {
        stx_optim_desc d = {.kind = kinds[k], .clip = 0.5, .weight_decay = 0.1};
        stx_desc c;
        run a, b, without;
        stx_writer *w;
        stx_file *f;
        void *bytes;
        size_t size;
        if (kinds[k] == STX_SGD) d.momentum = 0.9;
        a = run_create(&d, 3, 0);
        b = run_create(&d, 1, 0);
        memset(&c, 0, sizeof c);
        c.seed = 3;
        c.threads = 1;
        without.x = stx_create(&c);
        without.p = stx_params_create(without.x);
        for (i = 0; i < PARAMS; i++) {
            if (params[i].rule.freeze) {
                stx_params_rng_offset(without.p, 1);
                continue;
            }
            if (i > 2) stx_params_rng_offset(without.p, 1);
            add_param(&without, i, 1);
        }
        without.o = stx_optim_create(without.p, &d);
        CHECK(without.o != NULL, "%s", stx_error(without.x));
        for (t = 1; t <= 6; t++) {
            if (t == 4) { /* b continues from the checkpoint of a */
                w = stx_writer_create(a.x);
                CHECK(stx_params_save(w, a.p, "") && stx_optim_save(w, a.o), "%s", stx_error(a.x));
                bytes = stx_writer_bytes(w, &size);
                f = stx_file_in_memory(b.x, "run", bytes, size);
                CHECK(f && stx_params_load(b.p, f, "") && stx_optim_load(b.o, f), "%s",
                      stx_error(b.x));
                CHECK(f && !stx_file_find(f, "optim.0.p2") && stx_file_find(f, "optim.0.p0"),
                      "the file has the state of a frozen parameter");
                stx_file_close(f);
                stx_block_free(a.x, bytes);
            }
            set_gradients(&a, t);
            set_gradients(&without, t);
            if (t >= 4) set_gradients(&b, t);
            CHECK(stx_optim_step(a.o, 0.05) == 1 && stx_optim_step(without.o, 0.05) == 1, "%s",
                  stx_error(a.x));
            if (t >= 4) stx_optim_step(b.o, 0.05);
            CHECK(a.o->grad_norm == without.o->grad_norm, "kind %d: norms differ", kinds[k]);
            for (i = j = 0; i < PARAMS; i++) {
                CHECK(t < 4 || same(a.p->tensor[i], b.p->tensor[i]), "kind %d: resuming",
                      kinds[k]);
                if (params[i].rule.freeze) continue;
                CHECK(same(a.p->tensor[i], without.p->tensor[j])
                          && same(a.o->state[0][i], without.o->state[0][j]),
                      "kind %d, update %d: parameter %zu differs", kinds[k], t, i);
                j++;
            }
        }
        stx_destroy(a.x);
        stx_destroy(b.x);
        stx_destroy(without.x);
    }
}

/* A checkpoint lacks the state of parameters that were frozen: a run that trains them
   cannot load it, and one that freezes more can. */
static void other_rules(void) {
    const stx_optim_desc d = {.kind = STX_ADAMW};
    const stx_param_rule thaw = {-1, 0, 0}, freeze = {1, 0, 0};
    run a = run_create(&d, 1, 0);
    stx_writer *w = stx_writer_create(a.x);
    void *bytes;
    size_t size, i;
    int k;
    set_gradients(&a, 1);
    stx_optim_step(a.o, 0.1);
    CHECK(stx_params_save(w, a.p, "") && stx_optim_save(w, a.o), "%s", stx_error(a.x));
    bytes = stx_writer_bytes(w, &size);
    for (k = 0; k < 2; k++) {
        run b = {context(1, 1), NULL, NULL};
        stx_file *f;
        b.p = stx_params_create(b.x);
        for (i = 0; i < PARAMS; i++) add_param(&b, i, 1);
        stx_params_set_rule(b.p, k ? "p0" : "p2", k ? &freeze : &thaw);
        b.o = stx_optim_create(b.p, &d);
        f = stx_file_in_memory(b.x, "run", bytes, size);
        CHECK(b.o && f && stx_params_load(b.p, f, ""), "%s", stx_error(b.x));
        if (k)
            CHECK(stx_optim_load(b.o, f) && same(b.o->state[1][1], a.o->state[1][1]), "%s",
                  stx_error(b.x));
        else
            CHECK(!stx_optim_load(b.o, f) && strstr(stx_error(b.x), "\"p2\"")
                      && strstr(stx_error(b.x), "frozen"),
                  "%s", stx_error(b.x));
        stx_file_close(f);
        stx_destroy(b.x);
    }
    stx_block_free(a.x, bytes);
    stx_destroy(a.x);
}

/* Frozen parameters need memory only for their values, in a dry context as well. */
static void memory(void) {
    enum { SIZE = 1 << 20 };
    const stx_param_rule freeze = {1, 0, 0};
    size_t peak[2][2];
    int k, dry;
    for (k = 0; k < 2; k++)
        for (dry = 0; dry < 2; dry++) {
            stx_desc c;
            stx_ctx *x;
            stx_params *p;
            memset(&c, 0, sizeof c);
            c.threads = 1;
            c.dry = dry;
            x = stx_create(&c);
            p = stx_params_create(x);
            stx_param(p, STX_NORMAL, 1, "big", SIZE, 0, 0, 0);
            stx_param(p, STX_NORMAL, 1, "small", 64, 0, 0, 0);
            if (k) stx_params_set_rule(p, "big", &freeze);
            CHECK(stx_optim_create(p, NULL) != NULL, "%s", stx_error(x));
            peak[k][dry] = stx_bytes(x);
            stx_destroy(x);
        }
    CHECK(peak[0][0] - peak[1][0] > 29 * (size_t)SIZE / 10 * sizeof(stx_real),
          "%zu bytes, %zu with a frozen parameter", peak[0][0], peak[1][0]);
    CHECK(peak[0][0] == peak[0][1] && peak[1][0] == peak[1][1], "dry: %zu and %zu bytes",
          peak[0][1], peak[1][1]);
}

/* stx_params_grads has no gradients of frozen parameters. Gradients keep their values
   when it is called again for other rules. */
static void grads(void) {
    const stx_param_rule freeze = {1, 0, 0}, thaw = {-1, 0, 0};
    stx_ctx *x = context(1, 1);
    stx_params *p = stx_params_create(x);
    stx_tensor *a = stx_param(p, STX_NORMAL, 1, "a", 70, 0, 0, 0);
    stx_tensor *b = stx_param(p, STX_NORMAL, 1, "b", 5, 0, 0, 0);
    stx_tensor *c = stx_param(p, STX_NORMAL, 1, "c", 3, 0, 0, 0);
    stx_real host[5], *g;
    size_t n;
    c->grad[2] = 4;
    CHECK(stx_params_grads(p, &n) && n == 256, "%zu gradients", n);
    stx_params_set_rule(p, "b", &freeze);
    g = stx_params_grads(p, &n);
    CHECK(n == 192 && a->grad == g && !b->grad && c->grad == g + 128 && c->grad[2] == 4,
          "%zu gradients", n);
    CHECK(!stx_get_grad(x, b, host) && host[4] == 0 && stx_ok(x), "%s", stx_error(x));
    stx_params_zero_grad(p);
    CHECK(c->grad[2] == 0 && stx_ok(x), "%s", stx_error(x));
    c->grad[1] = 7;
    stx_params_set_rule(p, "*", &thaw);
    CHECK(b->grad && b->grad[4] == 0 && b->needs_grad, "%s", stx_error(x));
    g = stx_params_grads(p, &n);
    CHECK(n == 256 && b->grad == g + 128 && c->grad[1] == 7, "%zu gradients", n);
    stx_destroy(x);
}


// >>the end of the backward pass

/* Counts how often its backward function runs. */
static void mark_back(stx_ctx *x, stx_tensor *y, stx_tensor *const *in, void *save) {
    stx_real *d = stx_grad(x, in[0], NULL);
    size_t i;
    ++**(int **)save;
    for (i = 0; d && i < y->size; i++) d[i] += y->grad[i];
}

static stx_tensor *mark(stx_ctx *x, stx_tensor *h, int *count) {
    stx_tensor *y = stx_new(x, h->dim[0], h->dim[1], 0, 0);
    int **save = (int **)stx_step_host_bytes(x, sizeof *save);
    *save = count;
    memcpy(y->data, h->data, h->size * sizeof *h->data);
    stx_record(x, y, &h, 1, mark_back, save);
    return y;
}

enum { LAYERS = 4 };

typedef struct layer {
    stx_tensor *w;
    int runs, backs;
} layer;

static stx_tensor *layer_run(stx_ctx *x, void *user, stx_tensor **in, stx_tensor **out) {
    layer *l = (layer *)user;
    (void)out;
    l->runs++;
    return mark(x, stx_linear(x, in[0], l->w, NULL, STX_ACT_TANH), &l->backs);
}

/* Freezes the layers whose bits are set in `bits`. The layers below the lowest that is
   trained neither run backward nor are recomputed. Gradients of the others are identical
   to those without frozen layers. */
static void backward_ends(void) {
    stx_real reference[LAYERS][25], got[25];
    unsigned bits;
    int recompute, l;
    for (bits = 0; bits < (1u << LAYERS) - 1; bits++)
        for (recompute = 0; recompute < 2; recompute++) {
            const stx_param_rule freeze = {1, 0, 0};
            static const stx_real input[15] = {1, 2, -3, 0.5f, 0.25f, -1, 3};
            stx_ctx *x = context(1, 5);
            stx_params *p = stx_params_create(x);
            layer layers[LAYERS];
            stx_tensor *h;
            int lowest = 0;
            memset(layers, 0, sizeof layers);
            for (l = 0; l < LAYERS; l++) {
                char name[16];
                snprintf(name, sizeof name, "w%d", l);
                layers[l].w = stx_param(p, STX_NORMAL, 0.5, name, 5, 5, 0, 0);
                if (bits >> l & 1) stx_params_set_rule(p, name, &freeze);
            }
            while (bits >> lowest & 1) lowest++;
            stx_begin(x, STX_TRAIN);
            h = stx_input(x, input, 3, 5, 0, 0);
            for (l = 0; l < LAYERS; l++)
                h = recompute ? stx_recompute(x, layer_run, &layers[l], &h, 1, NULL, 0)
                              : layer_run(x, &layers[l], &h, NULL);
            stx_backward(x, stx_mean(x, stx_mul(x, h, h)));
            CHECK(stx_ok(x), "%s", stx_error(x));
            for (l = 0; l < LAYERS; l++) {
                const int has = stx_get_grad(x, layers[l].w, got);
                const int again = recompute && l >= lowest;
                if (!bits && !recompute) memcpy(reference[l], got, sizeof got);
                CHECK(layers[l].backs == (l >= lowest) && layers[l].runs == 1 + again,
                      "frozen %x: layer %d ran %d times, backward %d times", bits, l,
                      layers[l].runs, layers[l].backs);
                if (!(bits >> l & 1))
                    CHECK(has && !memcmp(got, reference[l], sizeof got), "frozen %x: layer %d",
                          bits, l);
                else
                    CHECK(got[0] == 0 && got[24] == 0, "frozen %x: layer %d has a gradient",
                          bits, l);
            }
            stx_destroy(x);
        }
}

static stx_tensor *identity(stx_ctx *x, void *user, stx_tensor **in, stx_tensor **out) {
    (void)x;
    (void)user;
    (void)out;
    return in[0];
}

/* A recomputed function without ops can return an input. */
static void recompute_identity(void) {
    static const stx_real input[6] = {1, 2, 3, 4, 5, 6};
    stx_ctx *x = context(1, 5);
    stx_tensor *v, *c, *y, *z;
    stx_begin(x, STX_TRAIN);
    v = stx_variable(x, input, 2, 3, 0, 0);
    c = stx_input(x, input, 2, 3, 0, 0);
    y = stx_recompute(x, identity, NULL, &v, 1, NULL, 0);
    z = stx_recompute(x, identity, NULL, &c, 1, NULL, 0);
    CHECK(y && y->needs_grad && z && !z->needs_grad && z->data[5] == 6, "%s", stx_error(x));
    stx_backward_from(x, y, NULL);
    CHECK(v->grad && v->grad[5] == 1, "%s", stx_error(x));
    stx_destroy(x);
}


// >>families

enum { FAMILIES = 4, VARIANTS = 2, B = 2, T = 8, V = 21 };

/* Creates a small model. */
static stx_lm family_lm(stx_ctx *x, int family, int variant, int recompute) {
    const size_t layers = recompute ? SIZE_MAX : 0;
    stx_lm none;
    memset(&none, 0, sizeof none);
    if (family == 0) {
        stx_span_desc d;
        memset(&d, 0, sizeof d);
        d.vocab = V;
        d.layers = 2;
        d.dim = 16;
        d.heads = 2;
        d.span = 24;
        d.ramp = 4;
        d.adapt_span = 1;
        d.pers = variant ? 4 : 0;
        d.recompute_layers = layers;
        return stx_span_as_lm(stx_span_create(x, &d));
    }
    if (family == 1) {
        stx_comp_desc d;
        memset(&d, 0, sizeof d);
        d.vocab = V;
        d.layers = 3;
        d.dim = 16;
        d.heads = 2;
        d.segment = T;
        d.emb = variant ? 12 : 0;
        d.gate = variant ? STX_COMP_GATE_GRU : 0;
        d.mogrify = variant;
        d.positions = variant ? STX_COMP_POSITIONS_LEARNED : STX_COMP_POSITIONS_XL;
        d.recompute_layers = layers;
        return stx_comp_as_lm(stx_comp_create(x, &d));
    }
    if (family == 2) {
        stx_par_desc d;
        memset(&d, 0, sizeof d);
        d.vocab = V;
        d.dim = 16;
        d.heads = 2;
        d.inner = 20;
        d.pattern = variant ? NULL : "sfsf";
        d.blocks = 4;
        d.segment = T;
        d.own_uv = variant;
        d.biases = 1;
        d.recompute_layers = layers;
        return stx_par_as_lm(stx_par_create(x, &d));
    }
    if (family == 3) {
        stx_sru_lm_desc d;
        memset(&d, 0, sizeof d);
        d.vocab = V;
        d.sru.layers = 2;
        d.sru.hidden = 16;
        d.sru.transform = variant ? STX_SRU_LINEAR : STX_SRU_ATTENTION;
        d.sru.proj = 8;
        d.sru.norm = variant ? 0 : STX_SRU_NORM_AFTER;
        d.sru.recompute_layers = layers;
        return stx_sru_as_lm(stx_sru_lm_create(x, &d));
    }
    return none;
}

/* Computes the gradients of all parameters in the third of three steps, after freezing
   frozen_names and then unfreezing trained_names; both can be NULL. Returns the gradients
   one after another, or NULL after an error. */
static stx_real *family_grads(int family, int variant, int recompute, const char *frozen_names,
                              const char *trained_names, stx_params **list, stx_ctx **ctx) {
    const stx_param_rule freeze = {1, 0, 0}, thaw = {-1, 0, 0};
    stx_ctx *x = context(1, 7);
    stx_lm lm = family_lm(x, family, variant, recompute);
    int32_t *text = ordered_tokens(B, 4 * T, V, 3), in[B * T], out[B * T];
    stx_real *g = NULL;
    size_t i, at, b, step;
    void *state;
    *ctx = x;
    *list = lm.params;
    if (!stx_ok(x) || !lm.params) return NULL;
    perturb(x, lm.params);
    if (frozen_names) stx_params_set_rule(lm.params, frozen_names, &freeze);
    if (trained_names) stx_params_set_rule(lm.params, trained_names, &thaw);
    if (!stx_params_grads(lm.params, NULL)) return NULL; /* frees gradients of frozen parameters */
    state = lm.state_create(lm.model, B, 0);
    for (step = 0; step < 3 && stx_ok(x); step++) {
        const stx_ids *ids, *targets;
        stx_tensor *total;
        for (b = 0; b < B; b++)
            for (i = 0; i < T; i++) {
                in[b * T + i] = text[b * 4 * T + step * T + i];
                out[b * T + i] = text[b * 4 * T + step * T + i + 1];
            }
        stx_begin(x, STX_TRAIN);
        stx_params_zero_grad(lm.params);
        ids = stx_tokens(x, in, B, T);
        targets = stx_tokens(x, out, B, T);
        total = lm.total(lm.model, lm.loss(lm.model, ids, targets, state, state));
        if (total && total->needs_grad) stx_backward(x, total);
    }
    g = (stx_real *)calloc(stx_params_size(lm.params) + 1, sizeof *g);
    for (i = at = 0; stx_ok(x) && i < lm.params->count; at += lm.params->tensor[i++]->size)
        stx_get_grad(x, lm.params->tensor[i], g + at);
    lm.state_free(state);
    free(text);
    return g;
}

/* For every parameter: freezes it alone, and all others. The gradients that are still
   computed equal those without frozen parameters. */
static void family_case(int family, int variant, int recompute) {
    const double tol = sizeof(stx_real) == 8 ? 1e-12 : 2e-5;
    stx_params *p, *q;
    stx_ctx *x, *y;
    stx_real *all = family_grads(family, variant, recompute, NULL, NULL, &p, &x);
    size_t i, k, e, at;
    int others;
    CHECK(all && stx_ok(x), "family %d: %s", family, stx_error(x));
    for (i = 0; all && i < p->count; i++)
        for (others = 0; others < 2; others++) {
            stx_real *g = family_grads(family, variant, recompute, others ? "*" : p->name[i],
                                       others ? p->name[i] : NULL, &q, &y);
            CHECK(g && stx_ok(y), "family %d, %s: %s", family, p->name[i], stx_error(y));
            for (k = at = 0; g && k < p->count; at += p->tensor[k++]->size) {
                const int has = (k == i) == others;
                double worst = 0, top = 1e-3;
                for (e = at; e < at + p->tensor[k]->size; e++) {
                    const double want = has ? (double)all[e] : 0;
                    const double off = fabs((double)g[e] - want);
                    if (fabs(want) > top) top = fabs(want);
                    if (!(off <= worst)) worst = off;
                }
                CHECK(worst <= tol * top && (q->tensor[k]->grad != NULL) == has,
                      "family %d.%d, recompute %d, %s %s: gradient of %s is off by %g", family,
                      variant, recompute, others ? "all frozen except" : "frozen", p->name[i],
                      p->name[k], worst);
            }
            free(g);
            stx_destroy(y);
        }
    free(all);
    stx_destroy(x);
}

static void families(void) {
    int family, variant, recompute;
    for (family = 0; family < FAMILIES; family++)
        for (variant = 0; variant < VARIANTS; variant++)
            for (recompute = 0; recompute < 2; recompute++) family_case(family, variant, recompute);
}

int main(int argc, char **argv) {
    static const test_part parts[] = {
        {"patterns", patterns},       {"combined", combined},
        {"formulas", formulas},       {"adagrad", adagrad},
        {"frozen", frozen},           {"other_rules", other_rules},
        {"memory", memory},           {"grads", grads},
        {"backward", backward_ends},  {"identity", recompute_identity},
        {"families", families}};
    test_run(parts, sizeof parts / sizeof *parts, argc, argv);
    return test_end();
}
