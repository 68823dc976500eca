/* test_golden_comp.c - compares seqtx_compressive.h with golden vectors of an
   independent PyTorch implementation (tests/golden, README_compressive.md): logits,
   losses, memories with their missing rows and every gradient, segment by segment, in
   the corrected and the literal forms; a training curve; greedy decoding. The tolerance
   is 1e-10 in the double build and 1e-5 in float. Usage: test_golden_comp DIR */
#include <stdint.h>
#include "../../seqtx_compressive.h"
#include "../golden/golden.h"
#include "maps.h"

#ifdef SEQTX_DOUBLE
static const double TOL = 1e-10, CURVE = 1e-9;
#else
static const double TOL = 1e-5, CURVE = 2e-5;
#endif
enum { MAX_LAYERS = 8 };

typedef struct lists {
    size_t layers[MAX_LAYERS], mems[MAX_LAYERS], cmems[MAX_LAYERS];
} lists;

static void config(const stx_file *f, stx_comp_desc *d, lists *k) {
    static const char *const compress[] = {"conv", "dilated", "max", "mean", "used", "none", NULL};
    static const char *const aux[] = {"", "attention", "autoencode", "bptt", "none", NULL},
                             *const positions[] = {"learned", "xl", NULL};
    static const char *const gates[] = {"residual", "gru",     "input", "output",
                                        "highway",  "sigtanh", "gtrxl", NULL};
    static const char *const recurrence[] = {"none", "ernie", "rotate", NULL};
    const char *s = stx_file_meta(f, "memory_layers");
    size_t mem = (size_t)need(f, "mem"), cmem = (size_t)need(f, "cmem");
    memset(d, 0, sizeof *d);
    d->vocab = (size_t)need(f, "vocab");
    d->dim = (size_t)need(f, "dim");
    d->emb = (size_t)need(f, "emb");
    d->layers = (size_t)need(f, "layers");
    d->heads = (size_t)need(f, "heads");
    d->kv_heads = (size_t)need(f, "kv_heads");
    d->inner = (size_t)need(f, "inner");
    d->segment = (size_t)need(f, "segment");
    d->ratio = (size_t)need(f, "ratio");
    d->mem = mem ? mem : STX_COMP_NO_ROWS;
    d->cmem = cmem ? cmem : STX_COMP_NO_ROWS;
    if (s && strcmp(s, "all")) {
        d->memory_count = list_of(s, k->layers, MAX_LAYERS);
        if (d->memory_count)
            d->memory_layers = k->layers;
        else
            d->no_memory = 1;
    }
    if (list_of(stx_file_meta(f, "mems"), k->mems, MAX_LAYERS)) d->mems = k->mems;
    if (list_of(stx_file_meta(f, "cmems"), k->cmems, MAX_LAYERS)) d->cmems = k->cmems;
    d->compress = choice(f, "compress", compress);
    d->aux = choice(f, "aux", aux);
    if (d->compress >= STX_COMP_COMPRESS_MAX) d->aux = STX_COMP_AUX_NONE;
    d->overlap = (size_t)need(f, "overlap");
    d->conv_no_bias = (int)need(f, "conv_no_bias");
    if (d->compress == STX_COMP_COMPRESS_DILATED)
        d->dilations = list_of(stx_file_meta(f, "dilations"), d->dilation, STX_COMP_MAX_DILATIONS);
    d->aux_weight = need(f, "aux_weight");
    if (d->aux == STX_COMP_AUX_BPTT) d->bptt = (size_t)need(f, "bptt");
    d->positions = choice(f, "positions", positions);
    d->gate = choice(f, "gate", gates);
    d->recurrence = choice(f, "recurrence", recurrence);
    d->norm_after = (int)need(f, "norm_after");
    d->final_norm = (int)need(f, "final_norm");
    d->glu = (int)need(f, "glu");
    d->tied = (int)need(f, "tied");
    d->gate_relu = (int)need(f, "gate_relu");
    d->mogrify = (int)need(f, "mogrify");
    if (need(f, "literal_rows")) d->literal |= STX_COMP_LITERAL_ROWS;
    if (need(f, "literal_pad")) d->literal |= STX_COMP_LITERAL_PAD;
    if (need(f, "literal_target")) d->literal |= STX_COMP_LITERAL_TARGET;
    if (need(f, "literal_mask")) d->literal |= STX_COMP_LITERAL_MASK;
    if (need(f, "literal_freeze")) d->literal |= STX_COMP_LITERAL_FREEZE;
}

/* Returns the file position of element i of a model parameter. The file stores tables
   as (H,rows,hd), convolutions as (out,in,taps) and decoders as (in,out,taps). */
static size_t place(const stx_comp *m, const char *name, const stx_tensor *t, size_t i) {
    const size_t D = m->desc.dim, hd = D / m->desc.heads, row = t->ndim == 2 ? i / t->dim[1] : 0,
                 col = t->ndim == 2 ? i % t->dim[1] : 0;
    if (t == m->key_pe) return (col / hd * t->dim[0] + row) * hd + col % hd;
    if (strstr(name, "compress.decoder")) return (col * D + row % D) * (t->dim[0] / D) + row / D;
    if (strstr(name, "compress.") && t->ndim == 2)
        return (row * D + col % D) * (t->dim[1] / D) + col / D;
    return i;
}

static void load(stx_comp *m, const stx_file *f) {
    size_t i, k, n;
    for (i = 0; i < m->params->count; i++) {
        stx_tensor *t = m->params->tensor[i];
        stx_real *v = (stx_real *)malloc((t->size + 1) * sizeof *v);
        char key[128];
        double *e;
        snprintf(key, sizeof key, "param.%s", m->params->name[i]);
        e = entry(f, key, &n);
        CHECK(e && n == t->size, "%s: %zu values, %zu in the file", key, t->size, n);
        for (k = 0; e && k < t->size && n == t->size; k++)
            v[k] = (stx_real)e[place(m, m->params->name[i], t, k)];
        stx_set(m->ctx, t, v);
        free(v);
        free(e);
    }
}

/* Compares the values or the gradients of parameter i, in the model's layout, with the
   entry "PREFIXname". If there is no such entry, all values must be 0. */
static void compare(const stx_comp *m, const stx_file *f, const char *file, const char *prefix,
                    size_t i, const stx_real *have, double tol) {
    const stx_tensor *t = m->params->tensor[i];
    char key[128];
    size_t n, k;
    double *e, *got = doubles_of(m->ctx, have, t->size),
               *expected = (double *)calloc(t->size + 1, sizeof *expected);
    snprintf(key, sizeof key, "%s%s", prefix, m->params->name[i]);
    e = entry(f, key, &n);
    CHECK(!e || n == t->size, "%s %s: %zu values, %zu in the file", file, key, t->size, n);
    for (k = 0; e && n == t->size && k < t->size; k++)
        expected[k] = e[place(m, m->params->name[i], t, k)];
    CHECK(test_error(got, expected, t->size, 1e-7) <= tol, "%s %s: error %g", file, key,
          test_error(got, expected, t->size, 1e-7));
    free(got);
    free(expected);
    free(e);
}

/* Compares a value with element `at` of entry "WHAT.S". */
static void number(const stx_file *f, const char *file, const char *what, size_t s, size_t at,
                   double have) {
    char key[64];
    size_t n;
    double *e;
    snprintf(key, sizeof key, "%s.%zu", what, s);
    e = entry(f, key, &n);
    CHECK(e && at < n && CLOSE(have, e[at], TOL), "%s %s [%zu]: %.12g, expected %.12g", file, key,
          at, have, e && at < n ? e[at] : NAN);
    free(e);
}

/* Compares the rows of a layer, and checks which of them are missing. */
static void memory(const stx_file *f, const char *file, const char *what, size_t l,
                   const stx_memory *s) {
    const stx_memory_layer *y = &s->layer[l];
    char key[64];
    size_t n, i;
    int32_t *pad;
    snprintf(key, sizeof key, "%s.%zu", what, l);
    if (!y->count || !y->width) {
        CHECK(!stx_file_find(f, key), "%s: no rows of %s", file, key);
        return;
    }
    same_as(s->ctx, f, file, key, stx_memory_read(s, l, SIZE_MAX)->data, s->B * y->count * y->width,
            TOL, 1e-7);
    snprintf(key, sizeof key, "%s_pad.%zu", what, l);
    pad = integers(f, key, &n);
    CHECK(!pad || n == s->B * y->count, "%s: %zu values in %s, expected %zu", file, n, key,
          s->B * y->count);
    for (i = 0; i < s->B * y->count; i++)
        CHECK((pad ? pad[i] : 0) == (y->masked ? y->pad[i] : 0), "%s %s: row %zu is %s", file, key,
              i, pad && pad[i] ? "missing" : "stored");
    free(pad);
}

/* Returns whether t is the key and value matrix of a layer that STX_COMP_LITERAL_FREEZE
   has frozen. */
static int frozen(const stx_comp *m, const stx_tensor *t) {
    size_t l;
    for (l = 0; l < m->desc.layers; l++)
        if (t == m->layer[l].wkv) return m->layer[l].frozen;
    return 0;
}

/* Reads the memory sizes that a file's evaluation uses. */
static void eval_sizes(const stx_comp *m, const stx_file *f, lists *k) {
    size_t l;
    for (l = 0; l < m->desc.layers; l++) {
        k->mems[l] = (size_t)need(f, "eval_mem");
        k->cmems[l] = (size_t)need(f, "eval_cmem");
        if (!m->layer[l].C) k->cmems[l] = 0;
    }
}

static void reset(const stx_file *f, size_t i, stx_comp_state *s) {
    char key[64];
    size_t b, n;
    int32_t *streams;
    snprintf(key, sizeof key, "reset.%zu", i);
    streams = integers(f, key, &n);
    for (b = 0; streams && b < s->B; b++)
        if (streams[b]) stx_comp_state_reset_stream(s, b);
    free(streams);
}

/* Compares the auxiliary losses of segment i. */
static void aux_losses(stx_comp *m, const stx_file *f, const char *name, size_t i,
                       double total_aux) {
    stx_ctx *x = m->ctx;
    size_t l, a = 0;
    number(f, name, "aux", i, 0, stx_item(x, stx_comp_aux(m)));
    number(f, name, "aux", i, 0, total_aux);
    for (l = 0; l < m->desc.layers; l++) {
        if (!m->layer[l].memory) continue;
        number(f, name, "aux_layer", i, a, m->aux[l] ? stx_item(x, m->aux[l]) : 0);
        number(f, name, "ratio_layer", i, a++, m->rel_error[l] ? stx_item(x, m->rel_error[l]) : 0);
    }
}

/* Checks the attention maps of the last forward pass. */
static void maps(stx_comp *m, const char *name, size_t B) {
    size_t l, b;
    for (l = 0; l < m->desc.layers && (!m->desc.recompute_layers || !stx_training(m->ctx)); l++)
        for (b = 0; b < B; b++)
            check_map(m->ctx, name, l, b, &m->attended[l].call, stx_comp_attention_map(m, l, b));
}

/* Runs segment i, which reads state s and writes state o, and compares its results.
   Returns whether the segment was computed. */
static int segment(stx_comp *m, const stx_file *f, const char *name, size_t i, int eval,
                   stx_comp_state *s, stx_comp_state *o) {
    stx_ctx *x = m->ctx;
    const size_t B = s->B;
    stx_ids *ids, *targets, *pad;
    stx_tensor *h, *y, *nll, *total;
    char key[64];

    stx_begin(x, eval ? STX_EVAL : STX_TRAIN);
    reset(f, i, s);
    ids = step_ids(x, f, "ids", i, B, 0);
    targets = step_ids(x, f, "targets", i, B, 0);
    pad = step_ids(x, f, "mask", i, B, 1);
    h = stx_comp_segment(m, stx_comp_embed(m, ids), pad, s, o);
    y = stx_comp_logits(m, h);
    CHECK(y != NULL, "%s segment %zu: %s", name, i, stx_error(x));
    if (!y) return 0;
    snprintf(key, sizeof key, "logits.%zu", i);
    same_as(x, f, name, key, y->data, y->size, TOL, 1e-7);
    maps(m, name, B);
    nll = stx_comp_nll(m, h, targets, m->desc.literal & STX_COMP_LITERAL_MASK ? NULL : pad);
    total = stx_comp_total(m, nll);
    number(f, name, "nll", i, 0, stx_item(x, nll));
    if (!eval) {
        aux_losses(m, f, name, i, stx_item(x, total) - stx_item(x, nll));
        stx_backward(x, total);
    }
    return 1;
}

/* Compares a model with its file. alternate: uses two states; each segment reads one
   and writes the other. all: STX_COMP_LITERAL replaces the four flags of the file,
   which changes only the gradients of frozen matrices. */
static void model_case(const char *name, int recompute, int threads, int alternate, int all) {
    stx_ctx *x = golden_ctx(threads);
    stx_file *f = open_golden(x, name);
    stx_comp_desc d;
    lists k;
    stx_comp *m;
    stx_comp_state *s, *o, *swap;
    size_t B, segments, i, l, skipped = 0;
    int eval;

    if (!f) {
        stx_destroy(x);
        return;
    }
    config(f, &d, &k);
    d.recompute_layers = recompute ? SIZE_MAX : 0;
    if (all) {
        CHECK(d.literal == 15, "%s: literal forms %u, expected 15 for this test", name, d.literal);
        d.literal = STX_COMP_LITERAL;
    }
    B = (size_t)need(f, "B");
    segments = (size_t)need(f, "segments");
    eval = (int)need(f, "eval");
    m = stx_comp_create(x, &d);
    CHECK(m != NULL, "%s: %s", name, stx_error(x));
    if (!m) {
        stx_file_close(f);
        stx_destroy(x);
        return;
    }
    CHECK(stx_params_size(m->params) == stx_comp_count(&d), "%s: %zu parameters, counted %zu", name,
          stx_params_size(m->params), stx_comp_count(&d));
    CHECK(!all || m->desc.literal == 31, "%s: all literal forms are %u, expected 31", name,
          m->desc.literal);
    load(m, f);
    if (eval) eval_sizes(m, f, &k);
    s = stx_comp_state_create_sized(m, B, eval ? k.mems : NULL, eval ? k.cmems : NULL);
    o = s;
    if (alternate)
        o = stx_comp_state_create_sized(m, B, eval ? k.mems : NULL, eval ? k.cmems : NULL);
    CHECK(s && o, "%s: %s", name, stx_error(x));
    for (i = 0; i < segments && stx_ok(x); i++) {
        if (!segment(m, f, name, i, eval, s, o)) break;
        swap = s;
        s = o;
        o = swap;
    }
    CHECK(stx_ok(x), "%s: %s", name, stx_error(x));
    for (l = 0; l < m->desc.layers && stx_ok(x); l++) {
        memory(f, name, "mem", l, s->mem);
        memory(f, name, "cmem", l, s->comp);
    }
    for (i = 0; i < m->params->count && !eval && stx_ok(x); i++) {
        if (all && frozen(m, m->params->tensor[i]))
            skipped++;
        else
            compare(m, f, name, "grad.", i, m->params->tensor[i]->grad, TOL);
    }
    CHECK(!all || skipped > 0, "%s: no matrix is frozen", name);
    stx_file_close(f);
    stx_destroy(x);
}

/* Trains with memory, and compares the losses and gradient norms of every step and the
   final parameters. */
static void curve_steps(stx_comp *m, const stx_file *f) {
    const size_t B = (size_t)need(f, "B"), steps = (size_t)need(f, "steps"), S = m->desc.segment;
    stx_ctx *x = m->ctx;
    stx_comp_state *s = stx_comp_state_create(m, B);
    stx_optim_desc od;
    stx_optim *optim;
    size_t i, n, length;
    int32_t *tokens = integers(f, "tokens", &n);
    double *nll = entry(f, "nll", NULL), *aux = entry(f, "aux", NULL),
           *norm = entry(f, "norm", NULL);

    memset(&od, 0, sizeof od);
    od.eps = need(f, "eps");
    od.clip = need(f, "clip");
    optim = stx_optim_create(m->params, &od);
    length = steps * S + 1;
    for (i = 0; i < steps && tokens && n == B * length; i++) {
        stx_ids *in, *out;
        stx_tensor *loss, *total;
        stx_begin(x, STX_TRAIN);
        in = token_block(x, tokens, B, length, i * S, S);
        out = token_block(x, tokens, B, length, i * S + 1, S);
        loss = stx_comp_loss(m, in, out, NULL, s, s);
        total = stx_comp_total(m, loss);
        CHECK(CLOSE(stx_item(x, loss), nll[i], CURVE),
              "curve step %zu: nll %.12g, expected %.12g %s", i, stx_item(x, loss), nll[i],
              stx_error(x));
        CHECK(CLOSE(stx_item(x, total) - stx_item(x, loss), aux[i], CURVE),
              "curve step %zu: aux, expected %.12g", i, aux[i]);
        stx_backward(x, total);
        stx_optim_step(optim, need(f, "lr"));
        stx_optim_sync(optim);
        CHECK(CLOSE(optim->grad_norm, norm[i], 10 * CURVE),
              "curve step %zu: norm %.12g, expected %.12g", i, optim->grad_norm, norm[i]);
    }
    CHECK(i == steps, "curve: %zu steps of %zu", i, steps);
    for (i = 0; i < m->params->count; i++)
        compare(m, f, "curve", "final.", i, m->params->tensor[i]->data, 10 * CURVE);
    free(tokens);
    free(nll);
    free(aux);
    free(norm);
}

static void curve(void) {
    stx_ctx *x = golden_ctx(1);
    stx_file *f = open_golden(x, "comp_curve");
    stx_comp_desc d;
    lists k;
    stx_comp *m;
    if (!f) {
        stx_destroy(x);
        return;
    }
    config(f, &d, &k);
    m = stx_comp_create(x, &d);
    CHECK(m != NULL, "curve: %s", stx_error(x));
    if (m) {
        load(m, f);
        curve_steps(m, f);
    }
    stx_file_close(f);
    stx_destroy(x);
}

/* After a prompt of t tokens, greedy decoding must return the expected 16 tokens. The
   model uses all literal forms, except that only full segments enter the memory. */
static void greedy(const char *name, size_t t, const char *expected) {
    stx_ctx *x = golden_ctx(1);
    stx_file *f = open_golden(x, name);
    stx_comp_desc d;
    lists k;
    stx_comp *m;
    stx_comp_gen *g;
    stx_sampling best;
    char got[128] = "";
    int32_t prompt[8];
    const stx_real *y;
    size_t i;
    if (!f) {
        stx_destroy(x);
        return;
    }
    config(f, &d, &k);
    m = stx_comp_create(x, &d);
    load(m, f);
    g = stx_comp_gen_create(m, 1);
    memset(&best, 0, sizeof best);
    for (i = 0; i < t; i++) prompt[i] = (int32_t)((3 * i + i * i % 5) % 11);
    y = stx_comp_gen_feed(g, prompt, t);
    for (i = 0; i < 16 && y; i++) {
        int32_t token = stx_sample(&best, 0, y, d.vocab, NULL);
        snprintf(got + strlen(got), sizeof got - strlen(got), i ? " %ld" : "%ld", (long)token);
        y = stx_comp_gen_feed(g, &token, 1);
    }
    CHECK(!strcmp(got, expected), "%s after %zu: %s, expected %s %s", name, t, got, expected,
          stx_error(x));
    stx_file_close(f);
    stx_destroy(x);
}

int main(int argc, char **argv) {
    char name[32];
    int i;
    if (argc > 1) dir = argv[1];
    if (argc > 2) {
        for (i = 2; i < argc; i++) model_case(argv[i], 0, 1, 0, 0);
        return test_end();
    }
    for (i = 0; i < 5; i++) {
        snprintf(name, sizeof name, "comp_%c", 'a' + i);
        model_case(name, 0, 1, 0, 0);
        model_case(name, 0, 1, 0, 1);
    }
    for (i = 1; i <= 85; i++) {
        snprintf(name, sizeof name, "comp_%02d", i);
        model_case(name, 0, 1 + i % 3, 0, 0);
        if (golden_cpu() || i % 5 == 0) model_case(name, 1, 1, i % 2, 0);
    }
    curve();
    greedy("comp_a", 4, "5 2 0 2 5 2 5 5 2 9 5 0 5 5 5 5");
    greedy("comp_a", 6, "2 5 5 2 5 5 5 5 5 5 5 0 5 0 5 5");
    greedy("comp_e", 4, "4 8 10 5 4 9 9 8 4 4 4 4 0 4 4 4");
    greedy("comp_e", 6, "1 1 1 4 4 4 4 4 4 4 4 4 4 4 4 9");
    return test_end();
}
