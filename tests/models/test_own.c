/* test_own.c - functions that programs add to the families, as in examples/own_*.c: the
   loss falls, gradients, generation compared with whole segments, and runs that resume
   bit-exactly from a file, with recomputation. */
#define SEQTX_IMPLEMENTATION_DONE
#define SEQTX_COMPRESSIVE_IMPLEMENTATION_DONE
#define SEQTX_TEXT_IMPLEMENTATION_DONE
#define STX_LOOPS_DONE
#include "../../seqtx_compressive.h"
#include "family.h"
#define main own_compression_main
#include "../../examples/own_compression.c"
#undef main

enum { V = 17, S = 6, STREAMS = 2, SEGMENTS = 40, N = SEGMENTS * S + 1 };

#ifdef SEQTX_DOUBLE
static const double TOL = 1e-11;
#else
static const double TOL = 1e-5;
#endif

/* A model under test, which the functions below run through its table lm. */
typedef struct own {
    stx_ctx    *x;
    stx_lm      lm;
    stx_params *gates;          /* a second list of parameters, or NULL */
    stx_optim  *o, *gates_o;
    void       *s;              /* the memory */
} own;

/* What is tested: a model in several variants */
typedef struct own_case {
    const char *name;
    int         variants;
    void      (*create)(own *r, int variant, size_t recompute);
    size_t      each;           /* tokens per call of an evaluation that equals generation */
    const char *weights;        /* part of the names of the parameters that are checked */
} own_case;

static void compressive(own *r, int variant, size_t recompute) {
    stx_comp_desc d;
    memset(&d, 0, sizeof d);
    d.vocab = V;
    d.layers = 2;
    d.dim = 16;
    d.heads = 2;
    d.segment = S;
    d.mem = 9;
    d.cmem = 5;
    d.ratio = 4;        /* the last group of a segment has fewer rows */
    d.custom = &gated_mean;
    d.aux = STX_COMP_AUX_ATTENTION + variant;
    d.recompute_layers = recompute;
    r->lm = stx_comp_as_lm(stx_comp_create(r->x, &d));
}

static own start(const own_case *c, int variant, size_t recompute) {
    own r;
    memset(&r, 0, sizeof r);
    r.x = context(1, 3);
    c->create(&r, variant, recompute);
    CHECK(r.lm.model != NULL, "%s %d: %s", c->name, variant, stx_error(r.x));
    if (!r.lm.model) exit(test_end());
    r.o = stx_optim_create(r.lm.params, NULL);
    if (r.gates) r.gates_o = stx_optim_create(r.gates, NULL);
    r.s = r.lm.state_create(r.lm.model, STREAMS, 0);
    return r;
}

static void end(const own_case *c, int variant, own *r) {
    CHECK(stx_ok(r->x), "%s %d: %s", c->name, variant, stx_error(r->x));
    stx_destroy(r->x);
}

/* Returns the nll of n tokens from token `at` of a text (STREAMS,N). */
static stx_tensor *loss_of(own *r, const int32_t *t, size_t at, size_t n, const void *in,
                           void *out) {
    return r->lm.loss(r->lm.model, token_block(r->x, t, STREAMS, N, at, n),
                      token_block(r->x, t, STREAMS, N, at + 1, n), in, out);
}

/* Trains on segment k. Returns the nll. */
static double train(own *r, const int32_t *t, size_t k) {
    stx_tensor *nll;
    stx_begin(r->x, STX_TRAIN);
    nll = loss_of(r, t, k * S, S, r->s, r->s);
    stx_backward(r->x, r->lm.total(r->lm.model, nll));
    stx_optim_step(r->o, 0.01);
    if (r->gates) stx_optim_step(r->gates_o, 0.01);
    return stx_item(r->x, nll);
}

static void loss_falls(const own_case *c, int variant, const int32_t *t) {
    own r = start(c, variant, 0);
    double first = 0, last = 0;
    size_t k;
    for (k = 0; k < 160; k++) {
        const double nll = train(&r, t, k % SEGMENTS);
        if (k < 20) first += nll / 20;
        if (k >= 140) last += nll / 20;
    }
    CHECK(last < 0.8 * first, "%s %d: the loss is %g at first and %g at last", c->name, variant,
          first, last);
    end(c, variant, &r);
}

/* Two runs, one of which stops after 6 steps and resumes from a file in another context
   with recomputation, must have equal losses and weights. */
static void resumes(const own_case *c, int variant, const int32_t *t, const char *path) {
    own a = start(c, variant, 0), b = start(c, variant, SIZE_MAX);
    stx_writer *w;
    stx_file *f;
    size_t k, p;
    for (k = 0; k < 6; k++) train(&a, t, k);
    w = stx_writer_create(a.x);
    stx_params_save(w, a.lm.params, "");
    stx_optim_save(w, a.o);
    if (a.gates) stx_params_save(w, a.gates, "");
    if (a.gates) stx_optim_save_as(w, a.gates_o, "g.");
    a.lm.state_save(w, a.s, "s.");
    CHECK(stx_writer_finish(w, path), "%s", stx_error(a.x));

    f = stx_file_open(b.x, path);
    stx_params_load(b.lm.params, f, "");
    stx_optim_load(b.o, f);
    if (b.gates) stx_params_load(b.gates, f, "");
    if (b.gates) stx_optim_load_as(b.gates_o, f, "g.");
    b.lm.state_load(b.s, f, "s.");
    stx_file_close(f);
    stx_set_step_index(b.x, stx_step_index(a.x));
    for (; k < 12; k++) {
        const double one = train(&a, t, k), two = train(&b, t, k);
        CHECK(one == two, "%s %d, step %d: nll %.9g, resumed %.9g", c->name, variant, (int)k, one,
              two);
    }
    for (p = 0; p < a.lm.params->count; p++)
        CHECK(!memcmp(a.lm.params->tensor[p]->data, b.lm.params->tensor[p]->data,
                      a.lm.params->tensor[p]->size * sizeof(stx_real)),
              "%s %d: %s differs in the resumed run", c->name, variant, a.lm.params->name[p]);
    end(c, variant, &a);
    end(c, variant, &b);
}

/* Returns -log p of `target` from scores (V). */
static double nll_of(const stx_real *score, int32_t target) {
    double top = (double)score[0], sum = 0;
    int i;
    for (i = 1; i < V; i++)
        if ((double)score[i] > top) top = (double)score[i];
    for (i = 0; i < V; i++) sum += exp((double)score[i] - top);
    return log(sum) + top - (double)score[target];
}

/* Token by token, a generator must have the same losses as an evaluation by segments. */
static void generates(const own_case *c, int variant, const int32_t *t) {
    own r = start(c, variant, 0);
    const size_t length = 9 * S;
    double *nll = (double *)calloc(length, sizeof *nll), worst = 0;
    void *g, *s = r.lm.state_create(r.lm.model, STREAMS, 0);
    size_t i, k, b;
    perturb(r.x, r.lm.params);
    g = r.lm.gen_create(r.lm.model, STREAMS, 0);
    for (i = 0; i < length; i++) {
        int32_t now[STREAMS];
        const stx_real *score;
        for (b = 0; b < STREAMS; b++) now[b] = t[b * N + i];
        score = r.lm.gen_feed(g, now, 1);
        for (b = 0; score && b < STREAMS; b++)
            nll[i] += nll_of(score + b * V, t[b * N + i + 1]) / STREAMS;
    }
    for (k = 0; k < length; k += c->each) {
        double one, sum = 0;
        stx_begin(r.x, STX_EVAL);
        one = stx_item(r.x, loss_of(&r, t, k, c->each, s, s));
        for (i = k; i < k + c->each; i++) sum += nll[i] / (double)c->each;
        raise_worst(&worst, fabs(one - sum));
    }
    CHECK(worst <= 10 * TOL, "%s %d: generation and evaluation differ by %g", c->name, variant,
          worst);
    free(nll);
    end(c, variant, &r);
}

#ifdef SEQTX_DOUBLE
/* Moves the weights by `by` times a random direction. Returns the product of the
   direction and the gradient. */
static double move(const own_case *c, own *r, double by) {
    double sum = 0;
    size_t p, i;
    test_state = 99;
    for (p = 0; p < r->lm.params->count; p++) {
        stx_tensor *w = r->lm.params->tensor[p];
        if (!strstr(r->lm.params->name[p], c->weights)) continue;
        for (i = 0; i < w->size; i++) {
            const double direction = test_rand();
            sum += direction * (double)w->grad[i];
            w->data[i] += (stx_real)(by * direction);
        }
    }
    return sum;
}

/* The total loss of segment 5 with fixed noise, in training */
static stx_tensor *total_of(own *r, const int32_t *t, void *out) {
    stx_set_step_index(r->x, 100);
    stx_begin(r->x, STX_TRAIN);
    return r->lm.total(r->lm.model, loss_of(r, t, 5 * S, S, r->s, out));
}

/* The gradient of the total loss, projected on a random direction of the user's weights,
   must equal the central difference. */
static void gradients(const own_case *c, int variant, const int32_t *t) {
    own r = start(c, variant, variant ? SIZE_MAX : 0);
    void *out = r.lm.state_create(r.lm.model, STREAMS, 0);
    const double h = 1e-5;
    double slope, up, down;
    size_t k;
    perturb(r.x, r.lm.params);
    for (k = 0; k < 5; k++) {
        stx_begin(r.x, STX_TRAIN);
        loss_of(&r, t, k * S, S, r.s, r.s);
    }
    stx_params_zero_grad(r.lm.params);
    stx_backward(r.x, total_of(&r, t, out));
    slope = move(c, &r, h);
    up = stx_item(r.x, total_of(&r, t, out));
    move(c, &r, -2 * h);
    down = stx_item(r.x, total_of(&r, t, out));
    CHECK(fabs(slope) > 1e-4 && CLOSE((up - down) / (2 * h), slope, 1e-7 * fabs(slope) + 1e-9),
          "%s %d: gradient %.12g, difference %.12g", c->name, variant, slope,
          (up - down) / (2 * h));
    end(c, variant, &r);
}
#endif

int main(void) {
    static const own_case cases[] = {{"compression", 3, compressive, S, "compress"}};
    int32_t *t = ordered_tokens(STREAMS, N, V, 5);
    char path[1024];
    size_t i;
    int k;
    test_path(path, sizeof path, "test_own");
    for (i = 0; i < sizeof cases / sizeof *cases; i++) {
        for (k = 0; k < cases[i].variants; k++) {
            loss_falls(&cases[i], k, t);
            resumes(&cases[i], k, t, path);
            generates(&cases[i], k, t);
#ifdef SEQTX_DOUBLE
            gradients(&cases[i], k, t);
#endif
        }
    }
    unlink(path);
    free(t);
    return test_end();
}
