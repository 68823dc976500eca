/* test_golden_par.c - compares seqtx_par.h with golden vectors of an independent
   PyTorch implementation (tests/golden, README_par.md): hidden states, losses, nll of
   every token, gates, memories with their missing rows and every gradient, call by
   call; evaluations with other memories; greedy decoding; training; cutoffs and
   patterns. The tolerance is 1e-10 in the double build and 1e-5 in float. Usage:
   test_golden_par DIR [NAME ...] */
#include <stdint.h>
#include "../../seqtx_par.h"
#include "../golden/golden.h"
#include "maps.h"

#ifdef SEQTX_DOUBLE
static const double TOL = 1e-10, CURVE = 1e-9;
#else
static const double TOL = 1e-5, CURVE = 2e-5;
#endif

/* Returns the text of metadata `key`, which must exist. */
static const char *text_of(const stx_file *f, const char *key) {
    const char *s = stx_file_meta(f, key);
    CHECK(s != NULL, "no metadata %s", key);
    return s ? s : "";
}

/* Returns the elements of entry "WHAT.S". */
static stx_real *step_reals(const stx_file *f, const char *what, size_t s, size_t *n) {
    char key[64];
    snprintf(key, sizeof key, "%s.%zu", what, s);
    return reals(f, key, n);
}

static void config_attention(const stx_file *f, stx_par_desc *d) {
    static const char *const positions[] = {"sines", "learned", NULL};
    static const char *const sines[] = {"block", "ref", NULL};
    static const char *const modes[] = {"dist", "fixed", "ref", NULL};
    static const char *const scales[] = {"sqrt", "full", NULL};
    static const char *const norms[] = {"post", "pre", NULL};
    d->positions = choice(f, "positions", positions);
    if (meta(f, "rel_bias", 0) > 0) d->positions = STX_PAR_LEARNED_BIAS;
    d->sines = d->positions ? 0 : choice(f, "sines_form", sines);
    d->pos_mode = d->positions ? 0 : choice(f, "pos_mode", modes);
    d->clamp_len = (size_t)need(f, "clamp_len");
    d->same_length = (int)need(f, "same_length");
    d->full_scale = choice(f, "scale", scales);
    d->attn_relu = (int)need(f, "attn_relu");
    d->biases = (int)need(f, "biases");
    d->own_uv = !(int)need(f, "share_uv");
    d->pre_norm = choice(f, "norm", norms);
    d->no_final_norm = d->pre_norm && meta(f, "final_norm", 1) == 0;
    d->norm_eps = need(f, "norm_eps");
}

static void config_search(const stx_file *f, stx_par_desc *d) {
    static const char *const archs[] = {"logits", "pi", NULL};
    static const char *const gates[] = {"soft", "st", NULL};
    static const char *const evals[] = {"argmax", "soft", "noise", NULL};
    static const char *const noises[] = {"step", "sequence", "tokens", NULL};
    d->gate_form = choice(f, "arch", archs);
    d->gate = choice(f, "gate", gates);
    d->gate_eval = choice(f, "gate_eval", evals);
    d->noise = choice(f, "noise", noises);
    if (d->noise == STX_PAR_NOISE_TOKENS) d->noise_tokens = (size_t)need(f, "noise_tokens");
}

static void config_words(const stx_file *f, stx_par_desc *d) {
    static const char *const ins[] = {"plain", "adaptive", NULL};
    static const char *const outs[] = {"adaptive", "plain", "tied", "ref", NULL};
    static const char *const ties[] = {"none", "all", "but_first", NULL};
    static const char *const divisors[] = {"valid", "all", NULL};
    d->adaptive_in = choice(f, "words_in", ins);
    d->words_out = choice(f, "words_out", outs);
    d->emb_scale = need(f, "emb_scale");
    if (d->adaptive_in || d->words_out == STX_PAR_OUT_ADAPTIVE || d->words_out == STX_PAR_OUT_REF)
        d->cutoffs = list_of(text_of(f, "cutoffs"), d->cutoff, STX_MAX_CLUSTERS - 1);
    if (d->adaptive_in || d->words_out == STX_PAR_OUT_ADAPTIVE) {
        d->emb = (size_t)need(f, "emb");
        d->div_val = need(f, "div_val");
    }
    if (d->words_out == STX_PAR_OUT_REF) {
        d->proj_factor = need(f, "proj_factor");
        list_of(text_of(f, "proj_dims"), d->proj_dims, STX_MAX_CLUSTERS - 1);
    }
    d->tie_words = (int)need(f, "tie_words");
    d->one_proj = (int)meta(f, "one_projection", 0);
    /* tie_projs has no effect in a model without projections */
    if (d->div_val > 1 || (d->emb && d->emb != d->dim)) d->tie_projs = choice(f, "tie_projs", ties);
    d->pads = need(f, "pad_id") >= 0;
    d->pad_id = d->pads ? (int32_t)need(f, "pad_id") : 0;
    d->divide_all = choice(f, "pad_divisor", divisors);
}

static void config_latency(const stx_file *f, stx_par_desc *d) {
    static const char *const latencies[] = {"none", "add", "hinge", "fbnet", NULL};
    static const char *const of[] = {"p", "w", NULL};
    size_t n;
    double *c;
    d->latency = choice(f, "latency", latencies);
    if (!d->latency) return;
    d->latency_w = choice(f, "latency_w", of);
    d->latency_weight = need(f, d->latency == STX_PAR_LATENCY_FBNET ? "latency_alpha"
                                                                    : "latency_lam");
    if (d->latency == STX_PAR_LATENCY_HINGE) d->latency_target = need(f, "latency_target");
    if (d->latency == STX_PAR_LATENCY_FBNET) d->latency_power = need(f, "latency_beta");
    c = entry(f, "latency", &n);
    CHECK(c && n == 3 && c[2] == 0, "the table of latencies");
    if (c) {
        d->cost[0] = c[0];
        d->cost[1] = c[1];
    }
    free(c);
}

static void config(const stx_file *f, stx_par_desc *d) {
    memset(d, 0, sizeof *d);
    d->vocab = (size_t)need(f, "vocab");
    d->dim = (size_t)need(f, "dim");
    d->heads = (size_t)need(f, "heads");
    d->head_dim = (size_t)need(f, "head_dim");
    d->inner = (size_t)need(f, "inner");
    d->blocks = (size_t)need(f, "blocks");
    d->pattern = text_of(f, "pattern");
    d->segment = (size_t)need(f, "segment");
    d->mem = need(f, "mem") > 0 ? (size_t)need(f, "mem") : STX_PAR_NO_ROWS;
    config_attention(f, d);
    config_search(f, d);
    config_words(f, d);
    config_latency(f, d);
}

static void load(stx_ctx *x, stx_params *p, const stx_file *f) {
    size_t i, n;
    for (i = 0; p && i < p->count; i++) {
        char key[128];
        double *e;
        snprintf(key, sizeof key, "param.%s", p->name[i]);
        e = entry(f, key, &n);
        CHECK(e && n == p->tensor[i]->size, "%s: %zu values, %zu in the file", key,
              p->tensor[i]->size, n);
        if (e && n == p->tensor[i]->size) put_f64(x, p->tensor[i]->data, e, n);
        free(e);
    }
}

/* Checks that the file has no parameters that the model lacks. */
static void no_more(const stx_par *m, const stx_file *f, const char *file) {
    size_t i;
    for (i = 0; i < stx_file_count(f); i++) {
        const char *name = stx_file_entry(f, i)->name;
        if (strncmp(name, "param.", 6)) continue;
        CHECK(stx_params_find(m->params, name + 6)
                  || (m->gates && stx_params_find(m->gates, name + 6)),
              "%s: the model has no %s", file, name);
    }
}

/* Returns the largest magnitude in all entries whose names start with `beginning` and
   end with `ending`. */
static double entry_top(const stx_file *f, const char *ending, const char *beginning) {
    double top = 0;
    size_t i, k, n;
    for (i = 0; i < stx_file_count(f); i++) {
        const char *name = stx_file_entry(f, i)->name;
        size_t len = strlen(name), e = strlen(ending);
        double *v;
        if (strncmp(name, beginning, strlen(beginning)) || len < e
            || strcmp(name + len - e, ending))
            continue;
        v = entry(f, name, &n);
        for (k = 0; v && k < n; k++)
            if (fabs(v[k]) > top) top = fabs(v[k]);
        free(v);
    }
    return top;
}

/* Compares gradients. A position bias adds the same value to all logits of a row, so
   its gradient is 0 except for rounding. The rounded terms are as large as other
   gradients, so the tolerance has a floor. */
static void gradients(stx_ctx *x, const stx_params *p, const stx_file *f, const char *file,
                      size_t s) {
    char key[128], ending[24];
    double floor_;
    size_t i;
    snprintf(ending, sizeof ending, ".%zu", s);
    floor_ = entry_top(f, ending, "grad.") / 1000;
    for (i = 0; p && i < p->count; i++) {
        snprintf(key, sizeof key, "grad.%s.%zu", p->name[i], s);
        same_as(x, f, file, key, p->tensor[i]->grad, p->tensor[i]->size, TOL,
                strstr(key, "attn.pos.bias") ? 10 * floor_ : floor_);
    }
}

/* Compares a tensor with entry "WHAT.S". */
static void tensor_is(stx_ctx *x, const stx_file *f, const char *file, const char *what, size_t s,
                      const stx_tensor *t) {
    char key[64];
    snprintf(key, sizeof key, "%s.%zu", what, s);
    CHECK(t != NULL, "%s %s: %s", file, key, stx_error(x));
    if (t) same_as(x, f, file, key, t->data, t->size, TOL, 1e-2);
}

/* Compares the rows of a block after step s, and checks which of them are missing. */
static void memory(const stx_file *f, const char *file, size_t l, size_t s,
                   const stx_par_state *st) {
    const stx_memory_layer *y = &st->mem->layer[l];
    const size_t n = st->B * y->count, D = y->width;
    char key[64];
    size_t m, i, c;
    int32_t *pad;
    double *expected, *have;
    snprintf(key, sizeof key, "mem.%zu.%zu", l, s);
    if (!y->count || !D) {
        CHECK(!stx_file_find(f, key), "%s: no rows of %s", file, key);
        return;
    }
    expected = entry(f, key, &m);
    CHECK(expected && m == n * D, "%s: %zu values in %s, expected %zu", file, m, key, n * D);
    snprintf(key, sizeof key, "mem_pad.%zu.%zu", l, s);
    pad = integers(f, key, &m);
    have = doubles_of(st->model->ctx, stx_memory_read(st->mem, l, SIZE_MAX)->data, n * D);
    for (i = 0; expected && i < n; i++) {
        double off = 0;
        CHECK((pad ? pad[i] : 0) == (y->masked ? y->pad[i] != 0 : 0), "%s %s: row %zu is %s", file,
              key, i, pad && pad[i] ? "missing" : "stored");
        if (pad && pad[i]) continue;
        for (c = 0; c < D; c++) raise_worst(&off, fabs(have[i * D + c] - expected[i * D + c]));
        CHECK(off <= 5 * TOL, "%s memory %zu after %zu, row %zu: error %g", file, l, s, i, off);
    }
    free(pad);
    free(expected);
    free(have);
}

static void reset(const stx_file *f, size_t s, stx_par_state *st) {
    char key[64];
    size_t n, b;
    int32_t *v;
    snprintf(key, sizeof key, "reset.%zu", s);
    v = integers(f, key, &n);
    for (b = 0; v && b < n; b++)
        if (v[b]) stx_par_state_reset_stream(st, b);
    free(v);
}

/* Sets the temperature and the noise of step s in a search. *u is the noise of the
   previous step, or NULL; it is freed and replaced by the new noise. */
static void set_noise(stx_par *m, const stx_file *f, size_t s, stx_real **u) {
    size_t n;
    double *tau = entry(f, "tau", &n);
    if (!m->gates) {
        free(tau);
        return;
    }
    CHECK(tau && s < n, "no tau of step %zu", s);
    if (tau && s < n) stx_par_set_tau(m, tau[s]);
    free(tau);
    free(*u);
    *u = step_reals(f, "uniforms", s, &n);
    stx_par_set_uniforms(m, *u, n);
}

/* Checks the attention maps of the last forward pass. */
static void maps(stx_par *m, const char *name, size_t B) {
    size_t l, b;
    for (l = 0; l < m->desc.blocks && (!m->desc.recompute_layers || !stx_training(m->ctx)); l++)
        for (b = 0; b < B; b++) {
            const stx_attention_map *map = stx_par_attention_map(m, l, b);
            if (map || m->block[l].kind == 's')
                check_map(m->ctx, name, l, b, &m->attended[l], map);
        }
}

/* Compares an evaluation of a search in the given mode, or of a fixed network. */
static void evaluate(stx_par *m, const stx_file *f, const char *file, const char *mode, size_t B,
                     size_t steps) {
    stx_ctx *x = m->ctx;
    const size_t rows_max = (size_t)meta(f, "eval_mem", need(f, "mem"));
    stx_par_state *s = stx_par_state_create_sized(m, B, rows_max);
    const int other = stx_file_meta(f, "eval_segment") != NULL; /* whether the evaluation
                                                                   has a separate text */
    stx_real *u = NULL;
    size_t i;
    CHECK(s != NULL, "%s: %s", file, stx_error(x));
    if (!s) return;
    s->clamp_len = (size_t)meta(f, "eval_clamp_len", need(f, "clamp_len"));
    s->same_length = (int)meta(f, "eval_same_length", need(f, "same_length"));
    for (i = 0; stx_ok(x) && (other || i < steps); i++) {
        char key[64];
        stx_ids *ids, *targets, *pad;
        stx_tensor *h, *nll, *rows;
        stx_begin(x, STX_EVAL);
        ids = step_ids(x, f, other ? "eval.tokens" : "tokens", i, B, 0);
        targets = step_ids(x, f, other ? "eval.targets" : "targets", i, B, 0);
        if (!ids) break;
        if (!strcmp(mode, "noise")) set_noise(m, f, i, &u);
        reset(f, i, s);
        pad = other ? NULL : step_ids(x, f, "mask", i, B, 1);
        h = stx_par_segment(m, stx_par_embed(m, ids), pad, s, s);
        maps(m, file, B);
        nll = stx_par_nll(m, h, targets, &rows);
        snprintf(key, sizeof key, "eval.%s.loss", mode);
        tensor_is(x, f, file, key, i, nll);
        snprintf(key, sizeof key, "eval.%s.nll", mode);
        tensor_is(x, f, file, key, i, rows);
    }
    CHECK(i >= (other ? 2 : steps), "%s: evaluation of %zu calls", file, i);
    free(u);
    stx_par_set_uniforms(m, NULL, 0);
    stx_par_state_free(s);
}

/* Compares greedy decoding of `count` words after the first segment, and these words'
   log p. */
static void greedy(stx_par *m, const stx_file *f, const char *file, size_t B, size_t count) {
    stx_ctx *x = m->ctx;
    stx_par_state *s = stx_par_state_create(m, B);
    const size_t V = m->desc.vocab;
    size_t n, b, i, v;
    int32_t *expected = integers(f, "greedy", &n), *now = (int32_t *)calloc(B, sizeof *now);
    double *logp = entry(f, "greedy.logp", &n);
    for (i = 0; i < count && expected && logp; i++) {
        stx_tensor *h, *p;
        stx_real *got;
        stx_ids *ids;
        stx_begin(x, STX_EVAL);
        ids = i ? stx_tokens(x, now, B, 1) : step_ids(x, f, "tokens", 0, B, 0);
        h = stx_par_forward(m, ids, s, s);
        h = h ? stx_slice(x, h, ids->T - 1, ids->T) : NULL;
        p = stx_par_log_probs(m, h);
        CHECK(p != NULL, "%s greedy: %s", file, stx_error(x));
        if (!p) break;
        got = host_of(x, p->data, B * V);
        for (b = 0; b < B; b++) {
            const size_t at = b * count + i;
            double best;
            for (now[b] = 0, v = 1; v < V; v++)
                if (got[b * V + v] > got[b * V + (size_t)now[b]]) now[b] = (int32_t)v;
            best = (double)got[b * V + (size_t)now[b]];
            CHECK(now[b] == expected[at] && CLOSE(best, logp[at], TOL),
                  "%s greedy word %zu of row %zu: %ld, log p %g; expected %ld, %g", file, i, b,
                  (long)now[b], best, (long)expected[at], logp[at]);
        }
        free(got);
    }
    free(expected);
    free(now);
    free(logp);
    stx_par_state_free(s);
}

/* Compares the gates of step i. */
static void gates(stx_par *m, const stx_file *f, const char *name, size_t i, size_t draws) {
    const size_t L = m->desc.blocks;
    size_t n, l, r;
    double off = 0;
    stx_real *w = step_reals(f, "w", i, &n);
    CHECK(w && n == draws * L * 3, "%s: w of %zu values", name, n);
    for (l = 0; w && l < L; l++) {
        stx_real *have = host_of(m->ctx, m->w[l]->data, 3 * draws);
        for (r = 0; r < 3 * draws; r++)
            raise_worst(&off, fabs((double)have[r] - (double)w[(r / 3 * L + l) * 3 + r % 3]));
        free(have);
    }
    CHECK(off <= TOL, "%s: gates of step %zu: error %g", name, i, off);
    free(w);
}

/* Compares a training step that reads state s and writes state o. last: whether this is
   the last step of the file. Returns the total loss, or NULL. */
static stx_tensor *train_step(stx_par *m, const stx_file *f, const char *name, size_t i, int last,
                              stx_real **u, stx_par_state *s, stx_par_state *o) {
    const size_t B = s->B;
    stx_ctx *x = m->ctx;
    stx_ids *ids, *targets;
    stx_tensor *h, *nll, *rows, *total;
    size_t l;
    stx_begin(x, STX_TRAIN);
    reset(f, i, s);
    set_noise(m, f, i, u);
    ids = step_ids(x, f, "tokens", i, B, 0);
    targets = step_ids(x, f, "targets", i, B, 0);
    h = stx_par_segment(m, stx_par_embed(m, ids), step_ids(x, f, "mask", i, B, 1), s, o);
    tensor_is(x, f, name, "hidden", i, h);
    maps(m, name, B);
    nll = stx_par_nll(m, h, targets, &rows);
    total = stx_par_total(m, nll);
    tensor_is(x, f, name, "loss", i, total);
    tensor_is(x, f, name, "nll", i, rows);
    if (m->desc.latency) {
        tensor_is(x, f, name, "ce", i, nll);
        tensor_is(x, f, name, "lat", i, m->latency);
    }
    if (!total) return NULL;
    if (m->gates) gates(m, f, name, i, stx_par_draws(m, B, ids->T));
    if (last) tensor_is(x, f, name, "logp", i, stx_par_log_probs(m, h));
    for (l = 0; l < m->desc.blocks; l++) memory(f, name, l, i, o);
    return total;
}

/* Compares all training steps, and the gradients of some. alternate: uses two states;
   each step reads one and writes the other. */
static void train_steps(stx_par *m, const stx_file *f, const char *name, size_t B, size_t steps,
                        int alternate) {
    stx_ctx *x = m->ctx;
    stx_par_state *s = stx_par_state_create(m, B), *o = alternate ? stx_par_state_create(m, B) : s,
                  *swap;
    stx_real *u = NULL;
    size_t i, k, grads[16], count = list_of(text_of(f, "grad_steps"), grads, 16);
    for (i = 0; i < steps && stx_ok(x); i++) {
        stx_tensor *total = train_step(m, f, name, i, i + 1 == steps, &u, s, o);
        if (!total) break;
        for (k = 0; k < count; k++)
            if (grads[k] == i) {
                stx_params_zero_grad(m->params);
                stx_params_zero_grad(m->gates);
                stx_backward(x, total);
                gradients(x, m->params, f, name, i);
                gradients(x, m->gates, f, name, i);
            }
        swap = s;
        s = o;
        o = swap;
    }
    CHECK(stx_ok(x) && i == steps, "%s: %s", name, stx_error(x));
    free(u);
    stx_par_set_uniforms(m, NULL, 0);
}

/* Compares the probabilities p of a search, and the network that the search selects. */
static void selected(stx_par *m, const stx_file *f, const char *name) {
    size_t n;
    double *p = (double *)malloc(3 * m->desc.blocks * sizeof *p), *expected = entry(f, "p", &n);
    char got[64];
    CHECK(stx_par_probs(m, p) && expected && n == 3 * m->desc.blocks
              && test_error(p, expected, n, 1e-2) <= TOL,
          "%s: p", name);
    if (stx_file_meta(f, "derived"))
        CHECK(stx_par_argmax(m, got, sizeof got) == m->desc.blocks
                  && !strcmp(got, text_of(f, "derived")),
              "%s: %s, expected %s", name, got, text_of(f, "derived"));
    free(p);
    free(expected);
}

/* Compares evaluations in all modes of the file and, for argmax, the network of the
   selected blocks. */
static void evaluations(stx_par *m, const stx_file *f, const char *name, const stx_par_desc *d,
                        size_t B, size_t steps) {
    const char *modes = text_of(f, "evals");
    stx_ctx *x = m->ctx;
    while (*modes && stx_ok(x)) {
        char mode[16];
        size_t len = strcspn(modes, ",");
        snprintf(mode, sizeof mode, "%.*s", (int)len, modes);
        modes += len + (modes[len] == ',');
        m->desc.gate_eval = STX_PAR_EVAL_ARGMAX;
        if (!strcmp(mode, "soft")) m->desc.gate_eval = STX_PAR_EVAL_SOFT;
        if (!strcmp(mode, "noise")) m->desc.gate_eval = STX_PAR_EVAL_NOISE;
        evaluate(m, f, name, mode, B, steps);
        if (m->gates && !strcmp(mode, "argmax")) {
            stx_par_desc fixed = *d;
            stx_par *network;
            fixed.pattern = text_of(f, "derived");
            network = stx_par_create(x, &fixed);
            CHECK(network && stx_par_inherit(network, m), "%s: %s", name, stx_error(x));
            if (network) evaluate(network, f, name, mode, B, steps);
        }
    }
    m->desc.gate_eval = d->gate_eval;
}

static void model_case(const char *name, int recompute, int threads, int alternate) {
    stx_ctx *x = golden_ctx(threads);
    stx_file *f = open_golden(x, name);
    stx_par_desc d;
    stx_par *m;
    size_t B, steps;
    if (!f) {
        stx_destroy(x);
        return;
    }
    config(f, &d);
    d.recompute_layers = recompute ? SIZE_MAX : 0;
    B = (size_t)need(f, "B");
    steps = (size_t)need(f, "steps");
    m = stx_par_create(x, &d);
    CHECK(m != NULL, "%s: %s", name, stx_error(x));
    if (!m) {
        stx_file_close(f);
        stx_destroy(x);
        return;
    }
    CHECK(stx_params_size(m->params) == stx_par_count(&d), "%s: %zu parameters, counted %zu", name,
          stx_params_size(m->params), stx_par_count(&d));
    load(x, m->params, f);
    load(x, m->gates, f);
    no_more(m, f, name);
    train_steps(m, f, name, B, steps, alternate);
    if (m->gates) selected(m, f, name);
    evaluations(m, f, name, &d, B, steps);
    if (need(f, "generate") > 0) greedy(m, f, name, B, (size_t)need(f, "generate"));
    CHECK(stx_ok(x), "%s: %s", name, stx_error(x));
    stx_file_close(f);
    stx_destroy(x);
}

/* Creates the optimisers for the weights and, in a search, for the gates. Returns the
   name of the entry with the gates' learning rates. */
static const char *optimisers(const stx_par *m, const stx_file *f, stx_optim **weights,
                              stx_optim **gates_) {
    stx_optim_desc od;
    memset(&od, 0, sizeof od);
    od.kind = STX_ADAM;
    od.eps_hat = 1;
    od.beta1 = need(f, "beta1");
    od.beta2 = need(f, "beta2");
    od.eps = need(f, "eps");
    *weights = stx_optim_create(m->params, &od);
    *gates_ = NULL;
    if (m->gates && !strcmp(text_of(f, "arch_optimizer"), "adamw")) {
        od.kind = STX_ADAMW;
        od.eps_hat = 0;
        od.beta1 = need(f, "arch_beta1");
        od.beta2 = need(f, "arch_beta2");
        od.eps = need(f, "arch_eps");
        od.weight_decay = need(f, "arch_decay");
    }
    if (m->gates) *gates_ = stx_optim_create(m->gates, &od);
    return od.kind == STX_ADAMW ? "arch_lr" : "lr";
}

/* Runs some updates with memory, and compares the loss of every step and the final
   parameters. */
static void training_steps(stx_par *m, const stx_file *f, const char *name) {
    const size_t B = (size_t)need(f, "B"), steps = (size_t)need(f, "steps");
    stx_ctx *x = m->ctx;
    stx_optim *weights, *gates_;
    double *loss = entry(f, "loss", NULL), *lr = entry(f, "lr", NULL),
           *gate_lr = entry(f, optimisers(m, f, &weights, &gates_), NULL);
    stx_par_state *s = stx_par_state_create(m, B);
    stx_real *u = NULL;
    size_t i;
    for (i = 0; i < steps && stx_ok(x) && loss && lr && gate_lr; i++) {
        stx_tensor *total, *h;
        stx_begin(x, STX_TRAIN);
        reset(f, i, s);
        set_noise(m, f, i, &u);
        h = stx_par_embed(m, step_ids(x, f, "tokens", i, B, 0));
        h = stx_par_segment(m, h, step_ids(x, f, "mask", i, B, 1), s, s);
        total = stx_par_total(m, stx_par_nll(m, h, step_ids(x, f, "targets", i, B, 0), NULL));
        CHECK(CLOSE(stx_item(x, total), loss[i], CURVE), "%s step %zu: %.12g, expected %.12g %s",
              name, i, stx_item(x, total), loss[i], stx_error(x));
        stx_backward(x, total);
        CHECK(stx_optim_step(weights, lr[i]), "%s step %zu: %s", name, i, stx_error(x));
        if (gates_)
            CHECK(stx_optim_step(gates_, gate_lr[i]), "%s step %zu: %s", name, i, stx_error(x));
    }
    CHECK(i == steps, "%s: %zu steps of %zu", name, i, steps);
    same_finals(x, f, name, m->params, 50 * CURVE, 1e-2);
    if (m->gates) same_finals(x, f, name, m->gates, 50 * CURVE, 1e-2);
    free(u);
    free(loss);
    free(lr);
    free(gate_lr);
}

static void training(const char *name) {
    stx_ctx *x = golden_ctx(1);
    stx_file *f = open_golden(x, name);
    stx_par_desc d;
    stx_par *m;
    if (!f) {
        stx_destroy(x);
        return;
    }
    config(f, &d);
    m = stx_par_create(x, &d);
    CHECK(m != NULL, "%s: %s", name, stx_error(x));
    if (m) {
        load(x, m->params, f);
        load(x, m->gates, f);
        training_steps(m, f, name);
    }
    stx_file_close(f);
    stx_destroy(x);
}

static int32_t *case_cuts(const stx_file *f, const char *what, size_t c, size_t *n) {
    char key[128];
    snprintf(key, sizeof key, "%s.%zu", what, c);
    return integers(f, key, n);
}

static void check_cuts(stx_ctx *x, const stx_file *f, const char *prefix, size_t c,
                       const uint64_t *counts, size_t N) {
    char key[64];
    stx_par_cuts_desc d;
    size_t cut[STX_MAX_CLUSTERS], n, i;
    memset(&d, 0, sizeof d);
    d.sort = 1;
    snprintf(key, sizeof key, "%sclusters.%zu", prefix, c);
    d.clusters = (size_t)need(f, key);
    snprintf(key, sizeof key, "%sdim.%zu", prefix, c);
    d.dim = (size_t)need(f, key);
    snprintf(key, sizeof key, "%sproj_factor.%zu", prefix, c);
    d.factor = need(f, key);
    for (d.cost = STX_PAR_CUTS_REF; d.cost <= STX_PAR_CUTS_MACS; d.cost++) {
        double total = 0, *expected;
        int32_t *ends;
        int same;
        snprintf(key, sizeof key, "%s%s", prefix, d.cost ? "true" : "ref");
        ends = case_cuts(f, key, c, &n);
        CHECK(stx_par_cuts(x, cut, &total, counts, N, &d), "%s of case %zu: %s", key, c,
              stx_error(x));
        for (same = n == d.clusters - 1, i = 0; same && i < n; i++)
            same = (size_t)ends[i] == cut[i];
        CHECK(same, "%s of case %zu: the first cutoff is %zu of %zu, expected %ld", key, c,
              d.clusters > 1 ? cut[0] : 0, d.clusters - 1, ends ? (long)ends[0] : -1);
        snprintf(key, sizeof key, "%s%s_cost.%zu", prefix, d.cost ? "true" : "ref", c);
        expected = entry(f, key, &n);
        CHECK(expected && fabs(total - expected[0]) <= 1e-12 * fabs(expected[0]),
              "%s: %.17g, expected %.17g", key, total, expected ? expected[0] : NAN);
        free(ends);
        free(expected);
    }
}

static void cuts(void) {
    stx_ctx *x = golden_ctx(1);
    stx_file *f = open_golden(x, "par_cuts");
    size_t c, i, n, cases = f ? (size_t)need(f, "cases") : 0,
                    zipf = f ? (size_t)need(f, "zipf_cases") : 0;
    for (c = 0; c < cases + zipf; c++) {
        char key[64];
        int32_t *v = NULL;
        uint64_t *counts;
        if (c < cases)
            v = case_cuts(f, "counts", c, &n);
        else {
            snprintf(key, sizeof key, "zipf_words.%zu", c - cases);
            n = (size_t)need(f, key);
        }
        counts = (uint64_t *)malloc((n + 1) * sizeof *counts);
        for (i = 0; i < n; i++)
            counts[i] = v ? (uint64_t)v[i] : (uint64_t)floor(1e9 / ((double)i + 2.7));
        check_cuts(x, f, c < cases ? "" : "zipf_", c < cases ? c : c - cases, counts, n);
        free(v);
        free(counts);
    }
    stx_file_close(f);
    stx_destroy(x);
}

static void rules(void) {
    stx_ctx *x = golden_ctx(1);
    stx_file *f = open_golden(x, "par_rules");
    size_t i, n = f ? (size_t)need(f, "patterns") : 0, steps;
    int form;
    for (i = 0; i < n; i++) {
        char key[64], got[256];
        size_t L, p;
        snprintf(key, sizeof key, "pattern_blocks.%zu", i);
        L = (size_t)need(f, key);
        snprintf(key, sizeof key, "pattern_p.%zu", i);
        p = (size_t)need(f, key);
        snprintf(key, sizeof key, "pattern.%zu", i);
        CHECK(stx_par_rule(got, sizeof got, L, p) == L && !strcmp(got, text_of(f, key)),
              "PAR(%zu,%zu): %s, expected %s", L, p, got, text_of(f, key));
    }
    for (form = 0; form < 2 && f; form++) {
        stx_par_anneal a;
        double *expected = entry(f, form ? "tau.factor" : "tau.target", &steps);
        a.form = form ? STX_PAR_TAU_FACTOR : STX_PAR_TAU_TARGET;
        a.from = need(f, "tau_start");
        a.to = need(f, form ? "tau_factor" : "tau_target");
        a.total = (uint64_t)need(f, "total");
        for (i = 0; expected && i < steps; i++)
            CHECK(CLOSE(stx_par_tau(&a, i), expected[i], 1e-13), "tau %d at %zu: %g, expected %g",
                  form, i, stx_par_tau(&a, i), expected[i]);
        CHECK(expected && steps > 1, "no tau");
        free(expected);
    }
    stx_file_close(f);
    stx_destroy(x);
}

int main(int argc, char **argv) {
    static const char *const more[] = {"par_a_soft", "par_a_st", "par_a_plain"};
    static const char *const trained[] = {"par_a_train",  "par_train_xl",   "par_train_pi",
                                          "par_train_st", "par_train_arch", "par_train_arch2"};
    static const char *const forms[] = {"pre_1", "pre_2", "pre_3", "pre_4", "rel_1", "rel_2",
                                        "rel_3", "rel_4", "rel_5", "rel_6", "one_1", "one_2",
                                        "one_3", "one_4", "one_5", "one_6", "all_1", "all_2",
                                        "all_3", "all_4", "all_5"};
    char name[32];
    int i;
    if (argc > 1) dir = argv[1];
    if (argc > 2) {
        for (i = 2; i < argc; i++) {
            if (!strstr(argv[i], "train")) model_case(argv[i], 0, 1, 0);
            if (strstr(argv[i], "train") || strstr(argv[i], "xl_")) training(argv[i]);
        }
        return test_end();
    }
    for (i = 0; i < 3; i++) model_case(more[i], i == 1, 1, 0);
    for (i = 1; i <= 80; i++) {
        snprintf(name, sizeof name, "par_%02d", i);
        model_case(name, 0, 1 + i % 3, 0);
        if (golden_cpu() || i % 5 == 0) model_case(name, 1, 1, i % 2);
    }
    for (i = 0; i < 21; i++) {
        snprintf(name, sizeof name, "par_xl_%s", forms[i]);
        model_case(name, 0, 1 + i % 3, 0);
        if (golden_cpu() || i % 5 == 4) model_case(name, 1, 1, i % 2);
        training(name);
    }
    for (i = 0; i < 6; i++) training(trained[i]);
    cuts();
    rules();
    return test_end();
}
