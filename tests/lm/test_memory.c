/* test_memory.c - tests layer recomputation and dry contexts. With any number of
   recomputed layers, losses, gradients and parameters must be bit-identical, and more
   recomputed layers must use less memory. A dry context must count exactly the bytes
   that the same calls use when they compute, and must fail in the same places. */
#include "../../seqtx_attn_span.h"
#include "../../seqtx_compressive.h"
#include "../../seqtx_par.h"
#include "../../seqtx_sru.h"
#include "../test.h"

enum { B = 3, T = 16, V = 23, C = 16, LAYERS = 4, STEPS = 4 };


// >>families with dropout, memories and the options that affect what a layer stores

static stx_lm make_span(stx_ctx *x, stx_params **arch) {
    stx_span_desc d;
    memset(&d, 0, sizeof d);
    (void)arch;
    d.vocab = V;
    d.layers = LAYERS;
    d.dim = C;
    d.heads = 2;
    d.inner = 32;
    d.span = 40;
    d.adapt_span = 1;
    d.ramp = 4;
    d.span_init = 0.5;
    d.span_loss = 0.01;
    d.dropout = 0.1;
    d.emb_dropout = 0.1;
    return stx_span_as_lm(stx_span_create(x, &d));
}

static stx_lm make_pers(stx_ctx *x, stx_params **arch) {
    stx_span_desc d;
    memset(&d, 0, sizeof d);
    (void)arch;
    d.vocab = V;
    d.layers = LAYERS;
    d.dim = C;
    d.heads = 2;
    d.span = 12;
    d.pers = 6;
    d.adapt_io = 1;
    d.cutoffs = 2;
    d.cutoff[0] = 6;
    d.cutoff[1] = 14;
    d.divval = 2;
    d.dropout = 0.1;
    return stx_span_as_lm(stx_span_create(x, &d));
}

static stx_lm make_sru(stx_ctx *x, stx_params **arch) {
    stx_sru_lm_desc d;
    memset(&d, 0, sizeof d);
    (void)arch;
    d.vocab = V;
    d.dim = C;
    d.sru.layers = LAYERS;
    d.sru.norm = STX_SRU_NORM_BEFORE;
    d.sru.rnn_dropout = 0.1;
    d.dropout = 0.1;
    d.adapt_io = 1;
    d.cutoffs = 2;
    d.cutoff[0] = 6;
    d.cutoff[1] = 14;
    d.divval = 2;
    d.emb_dropout = 0.2;
    return stx_sru_as_lm(stx_sru_lm_create(x, &d));
}

static stx_lm make_srupp(stx_ctx *x, stx_params **arch) {
    stx_sru_lm_desc d;
    memset(&d, 0, sizeof d);
    (void)arch;
    d.vocab = V;
    d.dim = C;
    d.tied = 1;
    d.sru.layers = LAYERS;
    d.sru.transform = STX_SRU_ATTENTION;
    d.sru.proj = 8;
    d.sru.heads = 2;
    d.sru.rnn_dropout = 0.1;
    d.sru.attn_dropout = 0.2;
    d.sru.alpha_init = 0.5;
    d.sru.norm = STX_SRU_NORM_AFTER;
    d.dropout = 0.1;
    return stx_sru_as_lm(stx_sru_lm_create(x, &d));
}

static stx_comp_desc comp_desc(void) {
    stx_comp_desc d;
    memset(&d, 0, sizeof d);
    d.vocab = V;
    d.dim = C;
    d.layers = LAYERS;
    d.heads = 2;
    d.inner = 32;
    d.segment = T;
    d.mem = T;
    d.cmem = 8;
    d.ratio = 4;
    d.compress = STX_COMP_COMPRESS_CONV;
    d.attn_dropout = d.out_dropout = d.ff_dropout = 0.1;
    return d;
}

static stx_lm make_comp(stx_ctx *x, stx_params **arch) {
    stx_comp_desc d = comp_desc();
    (void)arch;
    d.aux_dropout = 0.2;
    return stx_comp_as_lm(stx_comp_create(x, &d));
}

static stx_lm make_comp_auto(stx_ctx *x, stx_params **arch) {
    stx_comp_desc d = comp_desc();
    (void)arch;
    d.aux = STX_COMP_AUX_AUTOENCODE;
    d.positions = STX_COMP_POSITIONS_XL;
    d.gate = STX_COMP_GATE_GTRXL;
    d.tied = 1;
    return stx_comp_as_lm(stx_comp_create(x, &d));
}

static stx_par_desc par_desc(void) {
    stx_par_desc d;
    memset(&d, 0, sizeof d);
    d.vocab = V;
    d.dim = C;
    d.heads = 2;
    d.inner = 32;
    d.segment = T;
    d.mem = 24;
    d.dropout = d.attn_dropout = d.inner_dropout = 0.1;
    d.pos_dropout = d.final_dropout = 0.1;
    return d;
}

static stx_lm make_search(stx_ctx *x, stx_params **arch) {
    stx_par_desc d = par_desc();
    stx_par *m;
    d.blocks = LAYERS;
    d.noise = STX_PAR_NOISE_SEQUENCE;
    d.latency = STX_PAR_LATENCY_ADD;
    d.latency_w = STX_PAR_LATENCY_OF_W;
    d.cost[0] = 3;
    d.cost[1] = 2;
    d.latency_weight = 0.1;
    m = stx_par_create(x, &d);
    if (m) *arch = m->gates;
    return stx_par_as_lm(m);
}

static stx_lm make_par(stx_ctx *x, stx_params **arch) {
    stx_par_desc d = par_desc();
    (void)arch;
    d.pattern = "sfis";
    d.words_out = STX_PAR_OUT_ADAPTIVE;
    d.adaptive_in = 1;
    d.cutoffs = 2;
    d.cutoff[0] = 6;
    d.cutoff[1] = 14;
    d.div_val = 2;
    d.tie_words = 1;
    d.tie_projs = 1;
    return stx_par_as_lm(stx_par_create(x, &d));
}

static const struct family {
    const char *name;
    stx_lm (*make)(stx_ctx *x, stx_params **arch);
} families[] = {{"span", make_span},
                {"all-attention", make_pers},
                {"SRU", make_sru},
                {"SRU++", make_srupp},
                {"compressive", make_comp},
                {"compressive, autoencoder", make_comp_auto},
                {"PAR, a search", make_search},
                {"PAR, a pattern", make_par}};

enum { FAMILIES = sizeof families / sizeof *families };


// >>runs

typedef struct result {
    double loss[STEPS];
    stx_real *all;  /* (n): the gradients of the last step, then the final parameters */
    size_t n, peak, bytes;
    int code;
    char error[512];
} result;

/* Appends the gradients or the values of all parameters to r->all. */
static void keep(result *r, stx_ctx *x, const stx_params *p, int grads) {
    size_t i, n = p ? stx_params_size(p) : 0;
    stx_real *more = (stx_real *)realloc(r->all, (r->n + n + 1) * sizeof *more);
    r->all = more;
    for (i = 0; p && i < p->count; i++) {
        if (grads)
            stx_get_grad(x, p->tensor[i], more + r->n);
        else
            stx_get(x, p->tensor[i], more + r->n);
        r->n += p->tensor[i]->size;
    }
}

/* Trains one step. */
static void train(result *r, const stx_lm *lm, stx_params *arch, stx_optim *optim,
                  stx_optim *gates, void *memory, int step, int dry) {
    stx_ctx *x = lm->ctx;
    int32_t in[B * T], next[B * T];
    stx_tensor *nll;
    stx_ids *a, *b;
    int i;
    for (i = 0; i < B * T; i++) {
        in[i] = (i * i + 7 * step) % V;
        next[i] = (i * i + i + 3 + 7 * step) % V;
    }
    stx_begin(x, STX_TRAIN);
    a = stx_tokens(x, in, B, T);
    b = stx_tokens(x, next, B, T);
    nll = lm->loss(lm->model, a, b, memory, memory);
    stx_backward(x, lm->total(lm->model, nll));
    if (step + 1 == STEPS && !dry) {
        keep(r, x, lm->params, 1);
        keep(r, x, arch, 1);
    }
    r->loss[step] = stx_item(x, nll);
    stx_optim_step(optim, 0.01);
    if (gates) stx_optim_step(gates, 0.01);
    if (stx_ok(x)) lm->updated(lm->model);
}

/* Evaluates two steps with a separate, larger memory. */
static void evaluate(const stx_lm *lm) {
    stx_ctx *x = lm->ctx;
    void *memory = stx_ok(x) ? lm->state_create(lm->model, 2 * B, 0) : NULL;
    int step, i;
    for (step = 0; step < 2 && stx_ok(x); step++) {
        int32_t in[2 * B * T];
        stx_ids *a;
        for (i = 0; i < 2 * B * T; i++) in[i] = (i * i + 5 * step) % V;
        stx_begin(x, STX_EVAL);
        a = stx_tokens(x, in, 2 * B, T);
        lm->loss(lm->model, a, a, memory, memory);
    }
}

/* Trains and evaluates a model with recomputation of its last n layers. limit: the
   memory limit in bytes, or 0. */
static result run(const struct family *f, size_t n, int dry, size_t limit) {
    result r;
    stx_desc cd;
    stx_ctx *x;
    stx_params *arch = NULL;
    stx_lm lm;
    void *memory;
    stx_optim *optim, *gates;
    int step;
    memset(&r, 0, sizeof r);
    memset(&cd, 0, sizeof cd);
    cd.threads = 2;
    cd.seed = 5;
    cd.chunk_bytes = 1 << 14;
    cd.dry = dry;
    cd.max_bytes = limit;
    x = stx_create(&cd);
    lm = f->make(x, &arch);
    if (lm.model)
        CHECK(lm.recompute(lm.model, SIZE_MAX) == LAYERS && lm.recompute(lm.model, n) == n,
              "%s: number of recomputed layers", f->name);
    memory = lm.model ? lm.state_create(lm.model, B, 0) : NULL;
    optim = lm.model ? stx_optim_create(lm.params, NULL) : NULL;
    gates = arch ? stx_optim_create(arch, NULL) : NULL;
    for (step = 0; step < STEPS && stx_ok(x); step++)
        train(&r, &lm, arch, optim, gates, memory, step, dry);
    if (stx_ok(x)) evaluate(&lm);
    if (!dry && stx_ok(x)) {
        keep(&r, x, lm.params, 0);
        keep(&r, x, arch, 0);
    }
    r.peak = stx_peak_bytes(x);
    r.bytes = stx_bytes(x);
    r.code = stx_error_code(x);
    snprintf(r.error, sizeof r.error, "%s", stx_error(x));
    stx_destroy(x);
    return r;
}

/* With a memory limit, a dry run and a computing run must succeed or fail in the
   same way. */
static void limits(const struct family *f, size_t layers, const result *r) {
    int i;
    for (i = 0; i < 6; i++) {
        size_t limit = i == 5 ? r->bytes : r->peak * (size_t)(70 + 6 * i) / 100;
        result a = run(f, layers, 0, limit), b = run(f, layers, 1, limit);
        CHECK(a.code == b.code && !strcmp(a.error, b.error) && a.peak == b.peak,
              "%s, %zu layers, at most %zu bytes: \"%s\", dry \"%s\"", f->name, layers, limit,
              a.error, b.error);
        free(a.all);
        free(b.all);
    }
}

static void family(const struct family *f) {
    static const size_t some[] = {0, 1, LAYERS / 2, LAYERS};
    result first = {{0}, NULL, 0, 0, 0, 0, ""};
    size_t k, before = 0;
    for (k = 0; k < sizeof some / sizeof *some; k++) {
        result r = run(f, some[k], 0, 0), d = run(f, some[k], 1, 0);
        CHECK(r.code == STX_OK && d.code == STX_OK, "%s, %zu layers: %s%s", f->name, some[k],
              r.error, d.error);
        if (!k)
            first = r;
        else {
            CHECK(!memcmp(r.loss, first.loss, sizeof r.loss),
                  "%s: losses change with %zu layers recomputed", f->name, some[k]);
            CHECK(r.n == first.n && !memcmp(r.all, first.all, r.n * sizeof *r.all),
                  "%s: gradients or parameters change with %zu layers recomputed", f->name,
                  some[k]);
            /* Recomputing a single layer saves nothing, because its activations are
               reallocated at the peak. */
            CHECK(some[k] == 1 ? r.peak < first.peak + first.peak / 100 : r.peak <= before,
                  "%s: %zu layers recomputed use %zu bytes, fewer layers %zu", f->name, some[k],
                  r.peak, before);
        }
        before = r.peak;
        CHECK(d.peak == r.peak && d.bytes == r.bytes,
              "%s, %zu layers: dry %zu bytes at the peak and %zu reserved, computing %zu and %zu",
              f->name, some[k], d.peak, d.bytes, r.peak, r.bytes);
        limits(f, some[k], &r);
        if (k) free(r.all);
        free(d.all);
    }
    CHECK(before < first.peak, "%s: %zu bytes with all layers recomputed, %zu with none", f->name,
          before, first.peak);
    free(first.all);
}

static void recomputes(const char *name, size_t layers, size_t expected) {
    CHECK(layers == expected, "%s: expected %zu recomputed layers, got %zu", name, expected,
          layers);
}

/* recompute_layers of a created model must be at most the number of layers. */
static void descs(void) {
    static const struct {
        size_t given, expected;
    } cases[] = {{0, 0}, {3, 3}, {LAYERS, LAYERS}, {LAYERS + 1, LAYERS}, {SIZE_MAX, LAYERS}};

    size_t k;
    for (k = 0; k < sizeof cases / sizeof *cases; k++) {
        stx_ctx *x = stx_create(NULL);
        stx_span_desc s;
        stx_sru_lm_desc r;
        stx_comp_desc c = comp_desc();
        stx_par_desc p = par_desc();
        stx_span *sm;
        stx_sru_lm *rm;
        stx_comp *cm;
        stx_par *pm;
        memset(&s, 0, sizeof s);
        memset(&r, 0, sizeof r);
        s.vocab = r.vocab = V;
        s.layers = r.sru.layers = LAYERS;
        s.dim = r.dim = C;
        s.heads = 2;
        p.pattern = "sfsf";
        s.recompute_layers = r.sru.recompute_layers = cases[k].given;
        c.recompute_layers = p.recompute_layers = cases[k].given;
        sm = stx_span_create(x, &s);
        rm = stx_sru_lm_create(x, &r);
        cm = stx_comp_create(x, &c);
        pm = stx_par_create(x, &p);
        CHECK(sm && rm && cm && pm, "%s", stx_error(x));
        if (sm) recomputes("span", sm->desc.recompute_layers, cases[k].expected);
        if (rm) recomputes("SRU", rm->sru->desc.recompute_layers, cases[k].expected);
        if (cm) recomputes("compressive", cm->desc.recompute_layers, cases[k].expected);
        if (pm) recomputes("PAR", pm->desc.recompute_layers, cases[k].expected);
        stx_destroy(x);
    }
}

int main(void) {
    size_t k;
    descs();
    for (k = 0; k < FAMILIES; k++) family(&families[k]);
    return test_end();
}
