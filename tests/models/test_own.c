/* test_own.c - functions that programs add to the families, as in examples/own_*.c: the
   loss falls, gradients, generation compared with whole segments, and runs that resume
   bit-exactly from a file, with recomputation. */
#define SEQTX_IMPLEMENTATION_DONE
#define SEQTX_COMPRESSIVE_IMPLEMENTATION_DONE
#define SEQTX_PAR_IMPLEMENTATION_DONE
#define SEQTX_TEXT_IMPLEMENTATION_DONE
#define STX_LOOPS_DONE
#include "../../seqtx_compressive.h"
#include "../../seqtx_par.h"
#include "family.h"
#define main own_block_main
#include "../../examples/own_block.c"
#undef main
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

/* A block type whose memory has another width than the model: it projects h to LATENT
   channels, and maps each projected row and the two before it to the result. */
enum { LATENT = 5 };

static size_t latent_weights(void *user, const stx_par_desc *d, size_t l, stx_weight *w) {
    const stx_weight down = {"down.weight", LATENT, d->dim, STX_NORMAL, 0.3, 0};
    const stx_weight up = {"up.weight", d->dim, 3 * LATENT, STX_NORMAL, 0.3, 0};
    (void)user;
    (void)l;
    w[0] = down;
    w[1] = up;
    return 2;
}

static stx_tensor *latent_forward(stx_ctx *x, void *user, const stx_par_branch *in,
                                  stx_tensor **state) {
    const size_t n = in->h->dim[1];
    stx_tensor *rows, *z;
    (void)user;
    *state = stx_linear(x, in->h, in->w[0], NULL, STX_ACT_TANH);
    rows = stx_concat(x, in->past, *state);
    z = stx_concat_channels(x, stx_slice(x, rows, 0, n), stx_slice(x, rows, 1, 1 + n));
    return stx_linear(x, stx_concat_channels(x, z, *state), in->w[1], NULL, STX_ACT_NONE);
}

/* A block type without memory and without weights */
static stx_tensor *plain_forward(stx_ctx *x, void *user, const stx_par_branch *in,
                                 stx_tensor **state) {
    (void)user;
    (void)state;
    return stx_tanh(x, in->h);
}

static stx_par_type own_types[STX_PAR_MAX_TYPES];

static stx_par_desc par_desc(size_t types) {
    const stx_par_type latent = {'r', "latent", latent_weights, latent_forward, NULL, 2, LATENT,
                                 3, 0.5};
    const stx_par_type plain = {'Z', "plain", NULL, plain_forward, NULL, 0, 0, 0, 0};
    stx_par_desc d;
    memset(&d, 0, sizeof d);
    own_types[0] = conv_type;
    own_types[0].cost = 2;
    own_types[1] = latent;
    own_types[2] = plain;
    d.vocab = V;
    d.dim = 16;
    d.heads = 2;
    d.inner = 24;
    d.segment = S;
    d.mem = 8;
    d.words_out = STX_PAR_OUT_PLAIN;
    d.type = own_types;
    d.types = types;
    return d;
}

static void par(own *r, int variant, size_t recompute) {
    static const char *const patterns[] = {"cffc", "(rc)2Z", "csrf"};
    stx_par_desc d = par_desc(3);
    stx_par *m;
    d.recompute_layers = recompute;
    d.pre_norm = variant == 1;
    d.pattern = patterns[variant];
    m = stx_par_create(r->x, &d);
    CHECK(m && stx_par_count(&d) == stx_params_size(m->params), "%zu parameters, counted %zu",
          m ? stx_params_size(m->params) : 0, stx_par_count(&d));
    r->lm = stx_par_as_lm(m);
}

/* Supernets with one, two and three types */
static void par_search(own *r, int variant, size_t recompute) {
    stx_par_desc d = par_desc((size_t)variant + 1);
    stx_par *m;
    d.recompute_layers = recompute;
    d.blocks = 3;
    d.pre_norm = variant == 2;
    d.gate_eval = variant == 1 ? STX_PAR_EVAL_ARGMAX : STX_PAR_EVAL_SOFT;
    d.noise = variant == 2 ? STX_PAR_NOISE_TOKENS : STX_PAR_NOISE_STEP;
    d.noise_tokens = variant == 2 ? 4 : 0;
    d.gate_form = variant == 1 ? STX_PAR_FORM_PI : STX_PAR_FORM_LOGITS;
    d.latency = STX_PAR_LATENCY_ADD;
    d.latency_w = variant == 2 ? STX_PAR_LATENCY_OF_W : STX_PAR_LATENCY_OF_P;
    d.latency_weight = 0.01;
    m = stx_par_create(r->x, &d);
    CHECK(m && stx_par_count(&d) == stx_params_size(m->params)
              && stx_params_size(m->gates) == 3 * (4 + (size_t)variant),
          "%s", stx_error(r->x));
    if (m) stx_par_set_tau(m, 0.7);
    r->lm = stx_par_as_lm(m);
    r->gates = m ? m->gates : NULL;
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
static double move_list(const char *part, const stx_params *list, double by) {
    double sum = 0;
    size_t p, i;
    for (p = 0; list && p < list->count; p++) {
        stx_tensor *w = list->tensor[p];
        if (!strstr(list->name[p], part)) continue;
        for (i = 0; i < w->size; i++) {
            const double direction = test_rand();
            sum += direction * (double)w->grad[i];
            w->data[i] += (stx_real)(by * direction);
        }
    }
    return sum;
}

static double move(const own_case *c, own *r, double by) {
    test_state = 99;
    return move_list(c->weights, r->lm.params, by) + move_list("arch", r->gates, by);
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
    if (r.gates) stx_params_zero_grad(r.gates);
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

/* Returns the hidden states (B,n,D) of random vectors as m computes them with memory s.
   Tokens before `first` are padding in stream 1. */
static stx_real *hidden(stx_par *m, stx_par_state *s, size_t n, size_t first,
                        uint64_t seed) {
    stx_ctx *x = m->ctx;
    const size_t D = m->desc.dim;
    int32_t *pad = (int32_t *)calloc(STREAMS * n, sizeof *pad);
    stx_real *v, *out = (stx_real *)calloc(STREAMS * n * D, sizeof *out);
    stx_tensor *h;
    size_t i;
    test_state = seed;
    v = random_values(STREAMS * n * D);
    for (i = 0; i < first; i++) pad[n + i] = 1;
    stx_begin(x, STX_EVAL);
    h = stx_input(x, v, STREAMS, n, D, 0);
    h = stx_par_segment(m, h, first ? stx_tokens(x, pad, STREAMS, n) : NULL, s, s);
    if (h) memcpy(out, h->data, STREAMS * n * D * sizeof *out);
    CHECK(h != NULL, "%s", stx_error(x));
    free(pad);
    free(v);
    return out;
}

/* The memory of own types: a stream that is reset, copied, or that begins after padding
   must have the results of a stream on its own. */
static void par_streams(void) {
    enum { n = 5, D = 16 };

    static const char *const patterns[] = {"crcZ", NULL};
    int k;
    for (k = 0; k < 2; k++) {
        stx_par_desc d = par_desc(3);
        stx_ctx *x = context(1, 3);
        stx_par *m;
        stx_par_state *s, *fresh, *copy;
        stx_real *a, *b;
        d.pattern = patterns[k];
        d.blocks = k ? 3 : 0;
        d.pre_norm = k;
        d.gate_eval = STX_PAR_EVAL_SOFT;
        m = stx_par_create(x, &d);
        perturb(x, stx_par_params(m));
        s = stx_par_state_create(m, STREAMS);
        fresh = stx_par_state_create(m, STREAMS);
        copy = stx_par_state_create(m, STREAMS);
        free(hidden(m, s, n, 0, 5));
        CHECK(stx_par_state_copy(copy, 0, s, 0, STREAMS), "%s", stx_error(x));
        a = hidden(m, copy, n, 0, 6);
        stx_par_state_reset_stream(s, 1);
        b = hidden(m, s, n, 0, 6);
        CHECK(max_difference(a, b, n * D) <= TOL, "stream 0 depends on the reset of stream 1");
        CHECK(max_difference(a + n * D, b + n * D, n * D) > 1e-3, "the reset changes nothing");
        free(a);
        a = hidden(m, fresh, n, 0, 6);
        CHECK(max_difference(a + n * D, b + n * D, n * D) <= TOL,
              "a reset stream differs from a new one by %g",
              max_difference(a + n * D, b + n * D, n * D));
        free(a);
        free(b);

        /* two tokens of padding, then three; or only the three */
        stx_par_state_reset(s);
        stx_par_state_reset(fresh);
        a = hidden(m, s, n, 2, 7);
        stx_par_state_reset(copy);
        test_state = 7;
        b = random_values(STREAMS * n * D);
        stx_begin(x, STX_EVAL);
        {
            stx_tensor *h = stx_slice(x, stx_input(x, b, STREAMS, n, D, 0), 2, n);
            h = stx_par_segment(m, h, NULL, fresh, fresh);
            CHECK(h && max_difference(h->data + 3 * D, a + n * D + 2 * D, 3 * D) <= TOL,
                  "padding changes later tokens by %g %s",
                  h ? max_difference(h->data + 3 * D, a + n * D + 2 * D, 3 * D) : 0, stx_error(x));
        }
        free(a);
        free(b);
        CHECK(stx_ok(x), "%s", stx_error(x));
        stx_destroy(x);
    }
}

/* Returns the hidden states (B,n,D) of the vectors that `hidden` makes from this seed, as
   a generator computes them. */
static stx_real *generated(stx_par_gen *g, size_t n, uint64_t seed) {
    stx_ctx *x = g->model->ctx;
    const size_t size = STREAMS * n * g->model->desc.dim;
    stx_real *v;
    stx_tensor *h;
    test_state = seed;
    v = random_values(size);
    stx_begin(x, STX_EVAL);
    h = stx_par_gen_step(g, stx_input(x, v, STREAMS, n, g->model->desc.dim, 0));
    CHECK(h != NULL, "%s", stx_error(x));
    if (h) memcpy(v, h->data, size * sizeof *v);
    return v;
}

/* A generator that continues from a memory, and whose streams are reset, must have the
   results of segments. (The pattern has no attention: generation sees the rows that an
   evaluation with one token per call sees.) */
static void par_generators(void) {
    enum { n = 7, D = 16 };

    stx_par_desc d = par_desc(3);
    stx_ctx *x = context(1, 3);
    stx_par *m;
    stx_par_state *s;
    stx_par_gen *g;
    stx_real *a, *b;
    d.pattern = "crfcZ";
    m = stx_par_create(x, &d);
    perturb(x, stx_par_params(m));
    s = stx_par_state_create(m, STREAMS);
    g = stx_par_gen_create(m, STREAMS);
    free(generated(g, n, 9));
    free(hidden(m, s, n, 0, 5));
    CHECK(stx_par_gen_set(g, s), "%s", stx_error(x));
    a = hidden(m, s, n, 0, 6);
    b = generated(g, n, 6);
    CHECK(max_difference(a, b, STREAMS * n * D) <= TOL, "continued from a memory: error %g",
          max_difference(a, b, STREAMS * n * D));
    free(a);
    free(b);

    stx_par_state_reset_stream(s, 1);
    stx_par_gen_reset_stream(g, 1);
    a = hidden(m, s, n, 0, 7);
    b = generated(g, n, 7);
    CHECK(max_difference(a, b, STREAMS * n * D) <= TOL, "a stream was reset: error %g",
          max_difference(a, b, STREAMS * n * D));
    free(a);
    free(b);

    stx_par_state_reset(s);
    stx_par_gen_reset(g);
    a = hidden(m, s, n, 0, 8);
    b = generated(g, n, 8);
    CHECK(max_difference(a, b, STREAMS * n * D) <= TOL, "reset: error %g",
          max_difference(a, b, STREAMS * n * D));
    free(a);
    free(b);
    CHECK(stx_ok(x), "%s", stx_error(x));
    stx_par_gen_free(g);
    stx_destroy(x);
}

/* Gates that prefer one branch must give that branch's letter, latency and hidden states:
   those of the network with this pattern and the same weights. With a straight-through
   gate, so does training. */
static void par_found(void) {
    enum { n = 6, D = 16, ALL = 6 };

    static const char letters[] = "sficrZ";
    static const double times[] = {3, 1, 0, 2, 4, 5};
    size_t best, l, k;
    for (best = 0; best < ALL; best++) {
        stx_par_desc d = par_desc(3);
        stx_ctx *x = context(1, 3), *y = context(1, 3);
        stx_real al[ALL], *a, *b, *c;
        double p[2 * ALL], cost[5] = {3, 1, 2, 4, 5}, sum = 0;
        char got[3], sample[3];
        stx_par *m, *found;
        stx_tensor *h;
        d.blocks = 2;
        d.latency = STX_PAR_LATENCY_ADD;
        d.latency_weight = 1;
        d.gate = STX_PAR_ST;
        m = stx_par_create(x, &d);
        perturb(x, m->params);
        stx_par_set_cost(m, cost);
        for (k = 0; k < ALL; k++) al[k] = (stx_real)(k == best ? 60 : (double)k);
        for (l = 0; l < 2; l++) stx_set(x, m->block[l].al, al);
        stx_par_probs(m, p);
        for (k = 0; k < ALL; k++) sum += p[ALL + k];
        CHECK(CLOSE(sum, 1, 1e-12) && p[ALL + best] > 0.999, "probabilities: %g, %g", sum,
              p[ALL + best]);
        stx_par_argmax(m, got, sizeof got);
        stx_par_sample(m, 3, 4, sample, sizeof sample);
        CHECK(got[0] == letters[best] && got[1] == got[0] && !strcmp(got, sample),
              "found %s, drew %s, expected %c", got, sample, letters[best]);

        d.pattern = got;
        found = stx_par_create(y, &d);
        CHECK(found && stx_par_inherit(found, m), "%s", stx_error(y));
        a = hidden(m, NULL, n, 0, 4);
        b = hidden(found, NULL, n, 0, 4);
        CHECK(max_difference(a, b, STREAMS * n * D) == 0, "%s: evaluation differs by %g", got,
              max_difference(a, b, STREAMS * n * D));
        test_state = 4;
        c = random_values(STREAMS * n * D);
        stx_begin(x, STX_TRAIN);
        h = stx_par_segment(m, stx_input(x, c, STREAMS, n, D, 0), NULL, NULL, NULL);
        CHECK(h && max_difference(h->data, b, STREAMS * n * D) <= TOL,
              "%s: training differs by %g %s", got,
              h ? max_difference(h->data, b, STREAMS * n * D) : 0, stx_error(x));
        CHECK(h && CLOSE(stx_item(x, m->latency), 2 * times[best], 1e-5), "%s: latency %g", got,
              stx_item(x, m->latency));
        free(a);
        free(b);
        free(c);
        CHECK(stx_ok(x) && stx_ok(y), "%s%s", stx_error(x), stx_error(y));
        stx_destroy(x);
        stx_destroy(y);
    }
}

/* The noise of six branches: uniform, and independent of each other. With the same
   parameters for all branches, each is drawn equally often. */
static void par_noise(void) {
    enum { R = 600, ALL = 6 };

    stx_ctx *x = context(1, 3);
    stx_par_gate_args a;
    stx_real al[ALL] = {0}, tau = 1, *w = (stx_real *)malloc(R * ALL * sizeof *w),
             *y = (stx_real *)malloc(R * ALL * sizeof *y);
    double count[ALL] = {0}, pairs = 0;
    size_t r, k;
    memset(&a, 0, sizeof a);
    a.R = R;
    a.branches = ALL;
    a.noisy = a.hard = 1;
    a.seed = 9;
    a.al = al;
    a.tau = &tau;
    a.w = w;
    a.y = y;
    stx_par_gate_fwd(x, &a);
    for (r = 0; r < R; r++) {
        double sum = 0;
        for (k = 0; k < ALL; k++) {
            sum += (double)y[r * ALL + k];
            count[k] += (double)w[r * ALL + k] / R;
        }
        CHECK(CLOSE(sum, 1, 1e-6), "draw %zu: the sum is %g", r, sum);
        /* words 0 and 4, and 1 and 5, are of different blocks of the generator */
        pairs += (y[r * ALL] < y[r * ALL + 4]) == (y[r * ALL + 1] < y[r * ALL + 5]);
    }
    for (k = 0; k < ALL; k++)
        CHECK(fabs(count[k] - 1.0 / ALL) < 0.06, "branch %zu is drawn with frequency %g", k,
              count[k]);
    CHECK(fabs(pairs / R - 0.5) < 0.08, "branches depend on each other: %g", pairs / R);
    free(w);
    free(y);
    stx_destroy(x);
}

static void refused(const char *pattern, const stx_par_desc *d) {
    stx_ctx *x = context(1, 1);
    CHECK(!stx_par_create(x, d) && strstr(stx_error(x), "stx_par_create: ")
              && test_says(stx_error(x), pattern), "expected \"%s\", got \"%s\"", pattern,
          stx_error(x));
    CHECK(!stx_par_count(d), "%s: counted", pattern);
    stx_destroy(x);
}

/* Weights without a name, and too many */
static size_t nameless(void *user, const stx_par_desc *d, size_t l, stx_weight *w) {
    (void)user;
    (void)l;
    w[0].rows = d->dim;
    return 1;
}

static size_t many(void *user, const stx_par_desc *d, size_t l, stx_weight *w) {
    (void)user;
    (void)d;
    (void)l;
    (void)w;
    return STX_MAX_WEIGHTS + 1;
}

static void par_errors(void) {
    static const char bad_letters[] = {'s', 'f', 'i', 'g', '1', 0};
    stx_par_desc d = par_desc(2);
    size_t i;
    d.blocks = 2;
    d.types = 4;
    refused("types: expected the number of elements in `type`, at most .. got 4", &d);
    d.type = NULL;
    d.types = 1;
    refused("types: expected the number of elements in `type`, at most .. got 1", &d);
    d = par_desc(2);
    for (i = 0; i < sizeof bad_letters; i++) {
        own_types[1].letter = bad_letters[i];
        refused("type[1].letter: expected a letter other than s, f, i and g", &d);
    }
    own_types[1].letter = 'c';
    refused("type[1].letter: expected .. and those of other types, got 'c'", &d);
    d = par_desc(2);
    own_types[1].name = NULL;
    refused("type[1].name: expected 1 to 32 bytes .. got \"\"", &d);
    own_types[1].name = "attn";
    refused("type[1].name: expected 1 to 32 bytes .. got \"attn\"", &d);
    own_types[1].name = "conv";
    refused("type[1].name: expected 1 to 32 bytes .. got \"conv\"", &d);
    d = par_desc(1);
    own_types[0].forward = NULL;
    refused("type[0].forward: expected a function that returns (B,T,D), got NULL", &d);
    d = par_desc(1);
    own_types[0].rows = 0;
    own_types[0].width = 3;
    refused("type[0].width: expected .. 0 unless `rows` is set, got 3", &d);
    d = par_desc(1);
    own_types[0].rows = SIZE_MAX;
    refused("type[0].rows: expected at most 2^30", &d);
    d = par_desc(1);
    own_types[0].cost = -1;
    refused("type[0].cost: expected 0 or more, got -1", &d);
    d = par_desc(1);
    own_types[0].pi0 = NAN;
    refused("type[0].pi0: expected 0 or more", &d);
    d = par_desc(1);
    own_types[0].weights = nameless;
    refused("type[0]: weight 0: name: expected 1 to 48 bytes, got 0 (NULL)", &d);
    own_types[0].weights = many;
    refused("type[0]: weights: expected at most 16, got 17", &d);
    d = par_desc(1);
    d.pattern = "csx";
    refused("pattern: expected at most 4096 of the letters s, f and i and of desc.type (c), .. got "
            "\"csx\"", &d);
    d.pattern = "cr";   /* the letter of a type that is not in the list */
    refused("pattern: expected at most 4096 .. (c), .. got \"cr\"", &d);
}

/* Wrong results: 0: NULL; 1: a wrong shape; 2: no state; 3: a state of a wrong width */
static stx_tensor *wrong_forward(stx_ctx *x, void *user, const stx_par_branch *in,
                                 stx_tensor **state) {
    const int kind = *(const int *)user;
    stx_tensor *h = in->h;
    if (kind == 0) return NULL;
    if (kind == 1) return stx_slice(x, h, 1, h->dim[1]);
    if (kind == 3) *state = stx_slice_channels(x, h, 0, 3);
    return h;
}

static void par_wrong_results(void) {
    static const char *const expected[] = {
        "block 1, type 'c' (conv): result: expected (2,5,16), got NULL",
        "block 1, type 'c' (conv): result: expected (2,5,16), got 3 dimensions, (2,4,16)",
        "block 1, type 'c' (conv): *state: expected (2,n,16), got NULL",
        "block 1, type 'c' (conv): *state: expected (2,n,16), got 3 dimensions, (2,5,3)"};
    int k, again;
    for (k = 0; k < 4; k++)
        for (again = 0; again < 2; again++) {
            stx_par_desc d = par_desc(1);
            stx_ctx *x = context(1, 3);
            stx_par *m;
            stx_real *v = random_values(2 * 5 * 16);
            own_types[0].weights = NULL;
            own_types[0].forward = wrong_forward;
            own_types[0].user = &k;
            d.pattern = "fc";
            d.recompute_layers = again ? SIZE_MAX : 0;
            m = stx_par_create(x, &d);
            stx_begin(x, STX_TRAIN);
            CHECK(m && !stx_par_segment(m, stx_input(x, v, 2, 5, 16, 0), NULL, NULL, NULL)
                      && test_says(stx_error(x), expected[k]),
                  "expected \"%s\", got \"%s\"", expected[k], stx_error(x));
            free(v);
            stx_destroy(x);
        }
}

/* The examples report a text that does not exist. */
static void examples_fail(void) {
    char name[] = "example", text[] = "no such file";
    char *argv[] = {name, text, NULL};
    CHECK(own_compression_main(2, argv) == 1, "own_compression of a missing file");
    CHECK(own_block_main(2, argv) == 1, "own_block of a missing file");
}

int main(void) {
    static const own_case cases[] = {{"compression", 3, compressive, S, "compress"},
                                     {"blocks", 2, par, S, "layers."},
                                     {"blocks with attention", 3, par, 1, "layers."},
                                     {"search", 3, par_search, 1, "layers."}};
    int32_t *t = ordered_tokens(STREAMS, N, V, 5);
    char path[1024];
    size_t i;
    int k;
    test_path(path, sizeof path, "test_own");
    examples_fail();
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
    par_streams();
    par_generators();
    par_found();
    par_noise();
    par_errors();
    par_wrong_results();
    unlink(path);
    free(t);
    return test_end();
}
