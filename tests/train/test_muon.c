/* test_muon.c - STX_MUON against its formulas, computed in double by independent code:
   matrices of all shapes, parameters that AdamW updates, skipped updates, checkpoints,
   threads, bf16, and which parameters of the families are matrices. */
#include "../../seqtx_attn_span.h"
#include "../../seqtx_compressive.h"
#include "../../seqtx_par.h"
#include "../../seqtx_sru.h"
#include "../test.h"


// >>formulas, in double

/* O (rows,cols) = orthogonalise(u). A matrix with more rows than columns is
   transposed. */
static void orthogonalise(double *O, const double *u, size_t rows, size_t cols) {
    const int tall = rows > cols;
    const size_t m = tall ? cols : rows, n = tall ? rows : cols;
    double *X = (double *)calloc(m * n, sizeof *X), *Y = (double *)calloc(m * n, sizeof *Y);
    double *A = (double *)calloc(m * m, sizeof *A), *P = (double *)calloc(m * m, sizeof *P);
    double norm = 0;
    size_t i, j, k, t;
    for (i = 0; i < m * n; i++) norm += u[i] * u[i];
    norm = sqrt(norm) + 1e-7;
    for (i = 0; i < m; i++)
        for (j = 0; j < n; j++) X[i * n + j] = (tall ? u[j * m + i] : u[i * n + j]) / norm;
    for (t = 0; t < 5; t++) {
        for (i = 0; i < m; i++)
            for (j = 0; j < m; j++)
                for (A[i * m + j] = 0, k = 0; k < n; k++)
                    A[i * m + j] += X[i * n + k] * X[j * n + k];
        for (i = 0; i < m; i++)
            for (j = 0; j < m; j++) {
                double square = 0;
                for (k = 0; k < m; k++) square += A[i * m + k] * A[k * m + j];
                P[i * m + j] = -4.7750 * A[i * m + j] + 2.0315 * square;
            }
        for (i = 0; i < m; i++)
            for (j = 0; j < n; j++) {
                Y[i * n + j] = 3.4445 * X[i * n + j];
                for (k = 0; k < m; k++) Y[i * n + j] += P[i * m + k] * X[k * n + j];
            }
        memcpy(X, Y, m * n * sizeof *X);
    }
    for (i = 0; i < m; i++)
        for (j = 0; j < n; j++) O[tall ? j * m + i : i * n + j] = X[i * n + j];
    free(X);
    free(Y);
    free(A);
    free(P);
}

static void muon_formula(const stx_optim_desc *d, double lr, const double *g, double *theta,
                         double *buf, size_t rows, size_t cols) {
    const double momentum = d->momentum > 0 ? d->momentum : 0.95;
    const double scale = 0.2 * sqrt((double)(rows > cols ? rows : cols));
    const size_t n = rows * cols;
    double *u = (double *)calloc(n, sizeof *u), *O = (double *)calloc(n, sizeof *O);
    size_t i;
    for (i = 0; i < n; i++) {
        buf[i] = momentum * buf[i] + g[i];
        u[i] = g[i] + momentum * buf[i];
    }
    orthogonalise(O, u, rows, cols);
    for (i = 0; i < n; i++)
        theta[i] = theta[i] - lr * d->weight_decay * theta[i] - lr * scale * O[i];
    free(u);
    free(O);
}

static void adamw_formula(const stx_optim_desc *d, double lr, int t, const double *g, double *theta,
                          double *m, double *v, size_t n) {
    const double beta1 = d->beta1 > 0 ? d->beta1 : 0.9, beta2 = d->beta2 > 0 ? d->beta2 : 0.999;
    const double eps = d->eps > 0 ? d->eps : 1e-8;
    size_t i;
    for (i = 0; i < n; i++) {
        m[i] = beta1 * m[i] + (1 - beta1) * g[i];
        v[i] = beta2 * v[i] + (1 - beta2) * g[i] * g[i];
        theta[i] -= lr * d->weight_decay * theta[i];
        theta[i] -= lr * m[i] / (1 - pow(beta1, t)) / (sqrt(v[i] / (1 - pow(beta2, t))) + eps);
    }
}


// >>runs

/* The parameters of a run. Some matrices have several chunks of 4096 elements. */
enum { PARAMS = 12 };

static const struct {
    size_t dim[4];
    int elementwise;    /* stx_param_elementwise was called */
    int matrix;         /* expected: updated as a matrix */
} params[PARAMS] = {{{5, 3}, 0, 1},    {{3, 5}, 0, 1},    {{7}, 0, 0},      {{4, 4}, 0, 1},
                    {{9, 4}, 1, 0},    {{1, 6}, 0, 0},    {{6, 1}, 0, 0},   {{2, 3, 4}, 0, 0},
                    {{100, 72}, 0, 1}, {{33, 130}, 0, 1}, {{90, 60}, 1, 0}, {{2, 2}, 0, 1}};

typedef struct run {
    stx_ctx *x;
    stx_params *p;
    stx_optim *o;
} run;

static run run_create(const stx_optim_desc *d, int threads, int precision, int dry) {
    stx_desc c;
    run r;
    size_t i;
    memset(&c, 0, sizeof c);
    c.seed = 3;
    c.threads = threads;
    c.precision = precision;
    c.dry = dry;
    r.x = stx_create(&c);
    r.p = stx_params_create(r.x);
    for (i = 0; i < PARAMS; i++) {
        const size_t *n = params[i].dim;
        char name[16];
        stx_tensor *t;
        snprintf(name, sizeof name, "p%d", (int)i);
        t = stx_param(r.p, STX_NORMAL, 0.3, name, n[0], n[1], n[2], n[3]);
        if (params[i].elementwise) CHECK(stx_param_elementwise(t) == t, "parameter %zu", i);
    }
    r.o = stx_optim_create(r.p, d);
    CHECK(r.o != NULL, "%s", stx_error(r.x));
    return r;
}

/* Element e of the gradient of parameter i in update t. The matrices have small singular
   values, too: rows of very different lengths. */
static double gradient(size_t i, size_t e, int t) {
    const size_t row = e / (params[i].dim[1] ? params[i].dim[1] : 1);
    return sin((double)(e * e % 1009) + 0.7 * (double)i + 1.3 * t) / (double)(1 + row % 7);
}

static void set_gradients(const run *r, int t) {
    size_t i, e;
    for (i = 0; i < PARAMS; i++)
        for (e = 0; e < r->p->tensor[i]->size; e++)
            r->p->tensor[i]->grad[e] = (stx_real)gradient(i, e, t);
}

static int equal(const stx_tensor *a, const stx_tensor *b) {
    if (!a || !b) return a == b;
    return a->size == b->size && !memcmp(a->data, b->data, a->size * sizeof *a->data);
}

/* Whether two runs have bit-identical parameters and states. */
static int same_runs(const run *a, const run *b) {
    size_t i;
    int same = a->o->step == b->o->step && a->o->skipped == b->o->skipped;
    for (i = 0; i < PARAMS; i++)
        same &= equal(a->p->tensor[i], b->p->tensor[i])
                && equal(a->o->state[0][i], b->o->state[0][i])
                && equal(a->o->state[1][i], b->o->state[1][i]);
    return same;
}

/* Sets a gradient of one parameter to `bad`. The update must only clear gradients. */
static void skipped(run *r, size_t param, double bad, const stx_optim_desc *d) {
    run was = run_create(d, 1, STX_PREC_F32, 0);
    size_t i, e, left = 0;
    for (i = 0; i < PARAMS; i++) {
        memcpy(was.p->tensor[i]->data, r->p->tensor[i]->data,
               r->p->tensor[i]->size * sizeof(stx_real));
        for (e = 0; e < 2; e++)
            if (was.o->state[e][i])
                memcpy(was.o->state[e][i]->data, r->o->state[e][i]->data,
                       r->o->state[e][i]->size * sizeof(stx_real));
    }
    was.o->step = r->o->step;
    was.o->skipped = r->o->skipped + 1;
    set_gradients(r, 50);
    r->p->tensor[param]->grad[1] = (stx_real)bad;
    CHECK(stx_optim_step(r->o, 0.1) == 0 && stx_ok(r->x), "%s", stx_error(r->x));
    CHECK(same_runs(r, &was), "parameter %zu: a gradient of %g has an effect", param, bad);
    for (i = 0; i < PARAMS; i++)
        for (e = 0; e < r->p->tensor[i]->size; e++) left += r->p->tensor[i]->grad[e] != 0;
    CHECK(!left, "parameter %zu: %zu gradients are not cleared", param, left);
    stx_destroy(was.x);
}

/* Compares seven updates with the formulas; after the third, updates are skipped. In
   update 5, all gradients are 0. */
static void formulas(const stx_optim_desc *d) {
    const double tol = sizeof(stx_real) == 8 ? 2e-14 : 3e-6;
    run r = run_create(d, 1, STX_PREC_F32, 0);
    double *theta[PARAMS], *s[2][PARAMS], *g[PARAMS];
    size_t i, e;
    int t, k;
    CHECK(r.o->desc.momentum == (d->momentum > 0 ? d->momentum : 0.95), "the default momentum");
    for (i = 0; i < PARAMS; i++) {
        const size_t n = r.p->tensor[i]->size;
        theta[i] = (double *)calloc(n, sizeof **theta);
        g[i] = (double *)calloc(n, sizeof **g);
        for (k = 0; k < 2; k++) s[k][i] = (double *)calloc(n, sizeof **s[k]);
        for (e = 0; e < n; e++) theta[i][e] = (double)r.p->tensor[i]->data[e];
        CHECK(r.o->is_matrix[i] == params[i].matrix && r.o->state[0][i]
                  && (r.o->state[1][i] == NULL) == params[i].matrix,
              "parameter %zu: matrix %d", i, r.o->is_matrix[i]);
    }
    for (t = 1; t <= 7; t++) {
        const double lr = 0.05 / t;
        double norm = 0, factor = 1;
        if (t == 4) skipped(&r, 0, NAN, d);
        if (t == 4) skipped(&r, 2, HUGE_VAL, d);
        set_gradients(&r, t);
        for (i = 0; i < PARAMS; i++)
            for (e = 0; e < r.p->tensor[i]->size; e++) {
                if (t == 5) r.p->tensor[i]->grad[e] = 0;
                g[i][e] = (double)r.p->tensor[i]->grad[e];
                norm += g[i][e] * g[i][e];
            }
        norm = sqrt(norm);
        if (d->clip > 0 && d->clip / (norm + 1e-6) < 1) factor = d->clip / (norm + 1e-6);
        CHECK(stx_optim_step(r.o, lr) == 1 && r.o->step == (uint64_t)t, "%s", stx_error(r.x));
        for (i = 0; i < PARAMS; i++) {
            const size_t n = r.p->tensor[i]->size;
            double worst = 0;
            for (e = 0; e < n; e++) g[i][e] *= factor;
            if (params[i].matrix)
                muon_formula(d, lr, g[i], theta[i], s[0][i], params[i].dim[0], params[i].dim[1]);
            else
                adamw_formula(d, lr, t, g[i], theta[i], s[0][i], s[1][i], n);
            for (e = 0; e < n; e++) {
                const double off = fabs((double)r.p->tensor[i]->data[e] - theta[i][e]);
                if (!(off <= worst)) worst = off;
            }
            CHECK(worst <= tol, "update %d, parameter %zu: off by %g", t, i, worst);
        }
    }
    for (i = 0; i < PARAMS; i++) {
        free(theta[i]);
        free(g[i]);
        free(s[0][i]);
        free(s[1][i]);
    }
    stx_destroy(r.x);
}

static void all_formulas(void) {
    static const stx_optim_desc d[] = {
        {.kind = STX_MUON},
        {.kind = STX_MUON, .clip = 0.8, .weight_decay = 0.1},
        {.kind = STX_MUON, .momentum = 0.8, .beta1 = 0.8, .beta2 = 0.95, .eps = 0.01}};
    size_t i;
    for (i = 0; i < sizeof d / sizeof *d; i++) formulas(&d[i]);
}

/* Results must not depend on the number of threads. */
static void threads(void) {
    const stx_optim_desc d = {.kind = STX_MUON, .clip = 0.8, .weight_decay = 0.1};
    run one = run_create(&d, 1, STX_PREC_F32, 0);
    int n, t;
    for (t = 1; t <= 3; t++) {
        set_gradients(&one, t);
        stx_optim_step(one.o, 0.05);
    }
    for (n = 2; n <= 5; n++) {
        run many = run_create(&d, n, STX_PREC_F32, 0);
        for (t = 1; t <= 3; t++) {
            set_gradients(&many, t);
            stx_optim_step(many.o, 0.05);
        }
        CHECK(same_runs(&one, &many), "%d threads change results", n);
        stx_destroy(many.x);
    }
    stx_destroy(one.x);
}

/* A run that is saved after the third update and loaded must continue bit-exactly. The
   file has no second state of the matrices. */
static void resume(void) {
    const stx_optim_desc d = {.kind = STX_MUON, .clip = 0.8, .weight_decay = 0.1};
    run a = run_create(&d, 1, STX_PREC_F32, 0), b = run_create(&d, 1, STX_PREC_F32, 0);
    stx_writer *w = stx_writer_create(a.x);
    stx_optim_desc adam = {.kind = STX_ADAMW};
    stx_file *f;
    void *bytes;
    size_t size, i;
    run other;
    int t;
    for (t = 1; t <= 3; t++) {
        set_gradients(&a, t);
        stx_optim_step(a.o, 0.05);
    }
    CHECK(stx_params_save(w, a.p, "") && stx_optim_save(w, a.o), "%s", stx_error(a.x));
    bytes = stx_writer_bytes(w, &size);
    f = stx_file_in_memory(b.x, "run", bytes, size);
    CHECK(f && stx_params_load(b.p, f, "") && stx_optim_load(b.o, f), "%s", stx_error(b.x));
    for (i = 0; i < PARAMS; i++) {
        char name[32];
        snprintf(name, sizeof name, "optim.1.p%d", (int)i);
        CHECK((stx_file_find(f, name) == NULL) == params[i].matrix, "%s in the file", name);
    }
    stx_file_close(f);
    for (t = 4; t <= 7; t++) {
        set_gradients(&a, t);
        set_gradients(&b, t);
        CHECK(stx_optim_step(a.o, 0.02) == 1 && stx_optim_step(b.o, 0.02) == 1, "update %d", t);
        CHECK(same_runs(&a, &b), "update %d differs after loading", t);
    }

    other = run_create(&adam, 1, STX_PREC_F32, 0);
    f = stx_file_in_memory(other.x, "run", bytes, size);
    CHECK(f && !stx_optim_load(other.o, f) && strstr(stx_error(other.x), "optimiser 7")
              && strstr(stx_error(other.x), "7 muon"),
          "%s", stx_error(other.x));
    stx_file_close(f);
    stx_block_free(a.x, bytes);
    stx_destroy(other.x);
    stx_destroy(a.x);
    stx_destroy(b.x);
}

/* A dry context must need as much memory, including scratch memory, as a real one. */
static void dry(void) {
    const stx_optim_desc d = {.kind = STX_MUON}, adam = {.kind = STX_ADAMW};
    run a = run_create(&d, 1, STX_PREC_F32, 0), b = run_create(&d, 1, STX_PREC_F32, 1);
    run c = run_create(&adam, 1, STX_PREC_F32, 0);
    const size_t v = 100 * 72 * sizeof(stx_real), square = 72 * 72 * sizeof(stx_real);
    CHECK(stx_peak_bytes(a.x) == stx_peak_bytes(b.x), "dry: %zu bytes, real: %zu",
          stx_peak_bytes(b.x), stx_peak_bytes(a.x));
    CHECK(stx_optim_step(b.o, 0.1) == 1, "%s", stx_error(b.x));
    /* scratch memory, less the second state of the two largest matrices */
    CHECK(stx_peak_bytes(a.x) > stx_peak_bytes(c.x) + 2 * v + 2 * square - 2 * v
              && stx_peak_bytes(a.x) < stx_peak_bytes(c.x) + 2 * v + 2 * square,
          "scratch memory: %zu bytes, AdamW: %zu", stx_peak_bytes(a.x), stx_peak_bytes(c.x));
    stx_destroy(a.x);
    stx_destroy(b.x);
    stx_destroy(c.x);
}

/* With bf16, the matmuls round their operands to 8 bits. The direction must stay
   close. */
static void bf16(void) {
    const stx_optim_desc d = {.kind = STX_MUON};
    run a = run_create(&d, 1, STX_PREC_F32, 0), b = run_create(&d, 1, STX_PREC_BF16, 0);
    size_t i, e;
    set_gradients(&a, 1);
    set_gradients(&b, 1);
    CHECK(stx_optim_step(a.o, 1) == 1 && stx_optim_step(b.o, 1) == 1, "bf16: %s", stx_error(b.x));
    for (i = 0; i < PARAMS; i++) {
        double off = 0, size = 0;
        if (!params[i].matrix) continue;
        for (e = 0; e < a.p->tensor[i]->size; e++) {
            const double was = (double)a.p->tensor[i]->data[e];
            const double now = (double)b.p->tensor[i]->data[e];
            off += (now - was) * (now - was);
            size++;
        }
        off = sqrt(off / size);     /* the update has a root mean square of about 0.2 */
        CHECK(off < 0.02, "bf16: parameter %zu is off by %g", i, off);
        if (i == 8) CHECK(off > 0, "bf16 is not used");
    }
    stx_destroy(a.x);
    stx_destroy(b.x);
}


// >>families

/* Checks which parameters of a model are matrices: those whose name has one of the parts
   in `hidden`, which NULL ends. */
static void check_family(stx_ctx *x, stx_params *p, const char *const *hidden) {
    const stx_optim_desc d = {.kind = STX_MUON};
    stx_optim *o = stx_optim_create(p, &d);
    size_t i, k, found = 0;
    CHECK(o != NULL, "%s", stx_error(x));
    for (i = 0; o && i < p->count; i++) {
        int expected = 0;
        for (k = 0; hidden[k]; k++) expected |= strstr(p->name[i], hidden[k]) != NULL;
        expected &= p->tensor[i]->ndim == 2;
        CHECK(o->is_matrix[i] == expected, "%s: matrix %d", p->name[i], o->is_matrix[i]);
        found += (size_t)expected;
    }
    CHECK(found > 0, "no matrix");
    stx_destroy(x);
}

static stx_ctx *dry_context(void) {
    stx_desc c;
    memset(&c, 0, sizeof c);
    c.threads = 1;
    c.dry = 1;
    return stx_create(&c);
}

static void families(void) {
    static const char *const span[] = {"attn.w", "ff.fc", NULL};
    static const char *const comp[] = {"attn.query", "attn.kv", "attn.out", "attn.pos", "gate.",
                                       "compress", "ff.fc", NULL};
    static const char *const par[] = {"attn.query", "attn.kv", "attn.out", "attn.pos", "ff.fc",
                                      NULL};
    static const char *const sru[] = {".w1", ".w2", ".w3", NULL};
    stx_span_desc s;
    stx_comp_desc c;
    stx_par_desc q;
    stx_sru_lm_desc u;
    stx_ctx *x;
    int k;
    for (k = 0; k < 2; k++) {
        memset(&s, 0, sizeof s);
        s.vocab = 300;
        s.adapt_span = 1;
        s.pers = k ? 4 : 0;
        x = dry_context();
        check_family(x, stx_span_params(stx_span_create(x, &s)), span);

        memset(&c, 0, sizeof c);
        c.vocab = 300;
        c.dim = 32;
        c.heads = 4;
        c.emb = k ? 16 : 0;
        c.gate = k ? STX_COMP_GATE_GRU : 0;
        c.mogrify = k;
        c.positions = k ? STX_COMP_POSITIONS_LEARNED : STX_COMP_POSITIONS_XL;
        x = dry_context();
        check_family(x, stx_comp_create(x, &c)->params, comp);

        memset(&q, 0, sizeof q);
        q.vocab = 300;
        q.positions = k ? STX_PAR_LEARNED_BIAS : 0;
        q.own_uv = k;
        q.biases = 1;
        x = dry_context();
        check_family(x, stx_par_create(x, &q)->params, par);

        memset(&u, 0, sizeof u);
        u.vocab = 300;
        x = dry_context();
        check_family(x, stx_sru_lm_create(x, &u)->params, sru);
    }
}

int main(int argc, char **argv) {
    static const test_part parts[] = {
        {"formulas", all_formulas}, {"threads", threads}, {"resume", resume},
        {"dry", dry},               {"families", families}, {"bf16", bf16}};
    const size_t count = sizeof parts / sizeof *parts;
    /* a double build has no bf16 */
    test_run(parts, count - (sizeof(stx_real) == 8), argc, argv);
    return test_end();
}
