/* seqtx_par.h against the golden vectors of an independent PyTorch implementation
   (tests/golden, README_par.md): hidden states, losses, every token's nll, gates,
   memories with what is missing in them, every gradient, of call after call; evaluations
   with other memories; greedy words; training; cuts and patterns. 1e-10 in the double
   build, 1e-5 in float. Usage: test_golden_par DIR [NAME ...] */
#include <stdint.h>
#include "../seqtx_par.h"
#include "test.h"
#include "golden.h"

#ifdef SEQTX_DOUBLE
static const double TOL = 1e-10, CURVE = 1e-9;
#else
static const double TOL = 1e-5, CURVE = 2e-5;
#endif
enum { MOST = 8 };

static const char *text_of(const stx_file *f, const char *key) {
    const char *s = stx_file_meta(f, key);
    CHECK(s != NULL, "no metadata %s", key);
    return s ? s : "";
}

static size_t list_of(const char *s, size_t *v, size_t most) {
    size_t n = 0;
    for (; s && *s && n < most; s += strcspn(s, ","), s += *s == ',') v[n++] = (size_t)atol(s);
    return n;
}

static int choice(const stx_file *f, const char *key, const char *const *names) {
    const char *s = text_of(f, key);
    int i;
    for (i = 0; names[i]; i++)
        if (!strcmp(s, names[i])) return i;
    CHECK(0, "%s is %s", key, s);
    return 0;
}

static stx_real *step_numbers(const stx_file *f, const char *what, size_t s, size_t *n) {
    char key[64];
    double *e;
    stx_real *v;
    size_t i;
    snprintf(key, sizeof key, "%s.%zu", what, s);
    e = entry(f, key, n);
    v = e ? (stx_real *)malloc((*n + 1) * sizeof *v) : NULL;
    for (i = 0; e && i < *n; i++) v[i] = (stx_real)e[i];
    free(e);
    return v;
}

static void config(const stx_file *f, stx_par_desc *d) {
    static const char *const positions[] = {"sines", "learned", NULL}, *const sines[] = {"block",
                                                                                         "ref",
                                                                                         NULL};
    static const char *const modes[] = {"dist", "fixed", "ref", NULL}, *const scales[] = {"sqrt",
                                                                                          "full",
                                                                                          NULL};
    static const char *const norms[] = {"post", "pre", NULL}, *const archs[] = {"logits", "pi",
                                                                                NULL};
    static const char *const gates[] = {"soft", "st", NULL};
    static const char *const evals[] = {"argmax", "soft", "noise", NULL}, *const noises[] = {
                                                                              "step", "sequence",
                                                                              "tokens", NULL};
    static const char *const ins[] = {"plain", "adaptive", NULL}, *const outs[] = {"adaptive",
                                                                                   "plain", "tied",
                                                                                   "ref", NULL};
    static const char *const ties[] = {"none", "all", "but_first", NULL}, *const divisors[] = {
                                                                              "valid", "all", NULL};
    static const char *const latencies[] = {"none", "add", "hinge", "fbnet", NULL}, *const of[] = {
                                                                                        "p", "w",
                                                                                        NULL};
    size_t n;
    double *c;
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
    d->arch = choice(f, "arch", archs);
    d->gate = choice(f, "gate", gates);
    d->gate_eval = choice(f, "gate_eval", evals);
    d->noise = choice(f, "noise", noises);
    if (d->noise == STX_PAR_NOISE_TOKENS) d->noise_tokens = (size_t)need(f, "noise_tokens");
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
    /* else there are none */
    if (d->div_val > 1 || (d->emb && d->emb != d->dim)) d->tie_projs = choice(f, "tie_projs", ties);
    d->pads = need(f, "pad_id") >= 0;
    d->pad_id = d->pads ? (int32_t)need(f, "pad_id") : 0;
    d->divide_all = choice(f, "pad_divisor", divisors);
    d->latency = choice(f, "latency", latencies);
    if (!d->latency) return;
    d->latency_w = choice(f, "latency_w", of);
    d->latency_weight = need(f,
                             d->latency == STX_PAR_LATENCY_FBNET ? "latency_alpha" : "latency_lam");
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

static void load(stx_ctx *x, stx_params *p, const stx_file *f) {
    size_t i, n;
    for (i = 0; p && i < p->count; i++) {
        char key[128];
        double *e;
        snprintf(key, sizeof key, "param.%s", p->name[i]);
        e = entry(f, key, &n);
        CHECK(e && n == p->tensor[i]->size, "%s: %zu numbers, %zu in the file", key,
              p->tensor[i]->size, n);
        if (e && n == p->tensor[i]->size) put_f64(x, p->tensor[i]->data, e, n);
        free(e);
    }
}

/* Has the file what the model has not? */
static void no_more(const stx_par *m, const stx_file *f, const char *file) {
    size_t i;
    for (i = 0; i < stx_file_count(f); i++) {
        const char *name = stx_file_entry(f, i)->name;
        if (strncmp(name, "param.", 6)) continue;
        CHECK(stx_params_find(m->params, name + 6)
                  || (m->arch && stx_params_find(m->arch, name + 6)),
              "%s: the model has no %s", file, name);
    }
}

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

/* The gradient of a bias of positions is 0 but for rounding: a number that all logits
   of a row have alike. What is rounded are sums of numbers of other gradients' size */
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

static stx_ids *ids_of(stx_ctx *x, const stx_file *f, const char *what, size_t s, size_t B,
                       int opposite) {
    char key[64];
    size_t n, i;
    int32_t *v;
    stx_ids *t;
    snprintf(key, sizeof key, "%s.%zu", what, s);
    v = integers(f, key, &n);
    for (i = 0; v && opposite && i < n; i++) v[i] = !v[i];
    t = v ? stx_tokens(x, v, B, n / B) : NULL;
    free(v);
    return t;
}

static void numbers(stx_ctx *x, const stx_file *f, const char *file, const char *what, size_t s,
                    const stx_tensor *t) {
    char key[64];
    snprintf(key, sizeof key, "%s.%zu", what, s);
    CHECK(t != NULL, "%s %s: %s", file, key, stx_error(x));
    if (t) same_as(x, f, file, key, t->data, t->size, TOL, 1e-2);
}

static void memory(const stx_file *f, const char *file, size_t l, size_t s,
                   const stx_par_state *st) {
    const stx_memory_layer *y = &st->mem->layer[l];
    const size_t n = st->B * y->count, D = y->width;
    char key[64];
    size_t m, i, c;
    int32_t *pad;
    double *want;
    stx_real *have;
    snprintf(key, sizeof key, "mem.%zu.%zu", l, s);
    if (!y->count || !D) {
        CHECK(!stx_file_find(f, key), "%s: no rows of %s", file, key);
        return;
    }
    want = entry(f, key, &m);
    CHECK(want && m == n * D, "%s: %zu numbers in %s, expected %zu", file, m, key, n * D);
    snprintf(key, sizeof key, "mem_pad.%zu.%zu", l, s);
    pad = integers(f, key, &m);
    have = host_of(st->model->ctx, stx_memory_read(st->mem, l, SIZE_MAX)->data, n * D);
    for (i = 0; want && i < n; i++) {
        double off = 0;
        CHECK((pad ? pad[i] : 0) == (y->masked ? y->pad[i] != 0 : 0), "%s %s: row %zu is %s", file,
              key, i, pad && pad[i] ? "missing" : "there");
        if (pad && pad[i]) continue;
        for (c = 0; c < D; c++) {
            double e = fabs((double)have[i * D + c] - want[i * D + c]);
            if (!(e <= off)) off = isnan(e) ? HUGE_VAL : e;
        }
        CHECK(off <= 5 * TOL, "%s memory %zu after %zu, row %zu: off by %g", file, l, s, i, off);
    }
    free(pad);
    free(want);
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

static void set_noise(stx_par *m, const stx_file *f, size_t s, stx_real **u) {
    size_t n;
    double *tau = entry(f, "tau", &n);
    if (!m->arch) {
        free(tau);
        return;
    }
    CHECK(tau && s < n, "no tau of step %zu", s);
    if (tau && s < n) stx_par_set_tau(m, tau[s]);
    free(tau);
    free(*u);
    *u = step_numbers(f, "uniforms", s, &n);
    stx_par_set_uniforms(m, *u, n);
}

/* Evaluation in a mode, by m or by a fixed network */
static void evaluate(stx_par *m, const stx_file *f, const char *file, const char *mode, size_t B,
                     size_t steps) {
    stx_ctx *x = m->ctx;
    stx_par_state *s = stx_par_state_create_sized(m, B,
                                                  (size_t)meta(f, "eval_mem", need(f, "mem")));
    const int other = stx_file_meta(f, "eval_segment") != NULL;
    stx_real *u = NULL;
    size_t i;
    CHECK(s != NULL, "%s: %s", file, stx_error(x));
    if (!s) return;
    s->clamp_len = (size_t)meta(f, "eval_clamp_len", need(f, "clamp_len"));
    s->same_length = (int)meta(f, "eval_same_length", need(f, "same_length"));
    for (i = 0; stx_ok(x) && (other || i < steps); i++) {
        char key[64];
        stx_ids *ids, *targets;
        stx_tensor *h, *nll, *rows;
        stx_begin(x, STX_EVAL);
        ids = ids_of(x, f, other ? "eval.tokens" : "tokens", i, B, 0);
        targets = ids_of(x, f, other ? "eval.targets" : "targets", i, B, 0);
        if (!ids) break;
        if (!strcmp(mode, "noise")) set_noise(m, f, i, &u);
        reset(f, i, s);
        h = stx_par_segment(m, stx_par_embed(m, ids), other ? NULL : ids_of(x, f, "mask", i, B, 1),
                            s, s);
        nll = stx_par_nll(m, h, targets, &rows);
        snprintf(key, sizeof key, "eval.%s.loss", mode);
        numbers(x, f, file, key, i, nll);
        snprintf(key, sizeof key, "eval.%s.nll", mode);
        numbers(x, f, file, key, i, rows);
    }
    CHECK(i >= (other ? 2 : steps), "%s: evaluation of %zu calls", file, i);
    free(u);
    stx_par_set_uniforms(m, NULL, 0);
    stx_par_state_free(s);
}

static void greedy(stx_par *m, const stx_file *f, const char *file, size_t B, size_t count) {
    stx_ctx *x = m->ctx;
    stx_par_state *s = stx_par_state_create(m, B);
    const size_t V = m->desc.vocab;
    size_t n, b, i, v;
    int32_t *want = integers(f, "greedy", &n), *now = (int32_t *)calloc(B, sizeof *now);
    double *logp = entry(f, "greedy.logp", &n);
    for (i = 0; i < count && want && logp; i++) {
        stx_tensor *h, *p;
        stx_real *got;
        stx_ids *ids;
        stx_begin(x, STX_EVAL);
        ids = i ? stx_tokens(x, now, B, 1) : ids_of(x, f, "tokens", 0, B, 0);
        h = stx_par_forward(m, ids, s, s);
        h = h ? stx_slice(x, h, ids->T - 1, ids->T) : NULL;
        p = stx_par_log_probs(m, h);
        CHECK(p != NULL, "%s greedy: %s", file, stx_error(x));
        if (!p) break;
        got = host_of(x, p->data, B * V);
        for (b = 0; b < B; b++) {
            for (now[b] = 0, v = 1; v < V; v++)
                if (got[b * V + v] > got[b * V + (size_t)now[b]]) now[b] = (int32_t)v;
            CHECK(now[b] == want[b * count + i]
                      && CLOSE(got[b * V + (size_t)now[b]], logp[b * count + i], TOL),
                  "%s greedy word %zu of row "
                  "%zu: %ld, log p %g; want %ld, %g",
                  file, i, b, (long)now[b], (double)got[b * V + (size_t)now[b]],
                  (long)want[b * count + i], logp[b * count + i]);
        }
        free(got);
    }
    free(want);
    free(now);
    free(logp);
    stx_par_state_free(s);
}

/* two: the state goes from one to another and back */
static void model_case(const char *name, int recompute, int threads, int two) {
    stx_ctx *x = golden_ctx(threads);
    stx_file *f = open_golden(x, name);
    stx_par_desc d;
    stx_par *m;
    stx_par_state *s, *o;
    size_t B, steps, i, l, n, grads[16], grad_count;
    stx_real *u = NULL;
    const char *modes;
    if (!f) {
        stx_destroy(x);
        return;
    }
    config(f, &d);
    d.recompute = recompute;
    B = (size_t)need(f, "B");
    steps = (size_t)need(f, "steps");
    grad_count = list_of(text_of(f, "grad_steps"), grads, 16);
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
    load(x, m->arch, f);
    no_more(m, f, name);
    s = stx_par_state_create(m, B);
    o = two ? stx_par_state_create(m, B) : s;
    for (i = 0; i < steps && stx_ok(x); i++) {
        stx_ids *ids, *targets;
        stx_tensor *h, *nll, *rows, *total;
        stx_par_state *swap;
        stx_begin(x, STX_TRAIN);
        reset(f, i, s);
        set_noise(m, f, i, &u);
        ids = ids_of(x, f, "tokens", i, B, 0);
        targets = ids_of(x, f, "targets", i, B, 0);
        h = stx_par_segment(m, stx_par_embed(m, ids), ids_of(x, f, "mask", i, B, 1), s, o);
        numbers(x, f, name, "hidden", i, h);
        nll = stx_par_nll(m, h, targets, &rows);
        total = stx_par_total(m, nll);
        numbers(x, f, name, "loss", i, total);
        numbers(x, f, name, "nll", i, rows);
        if (d.latency) {
            numbers(x, f, name, "ce", i, nll);
            numbers(x, f, name, "lat", i, m->latency);
        }
        if (!total) break;
        if (m->arch) {
            size_t draws = stx_par_draws(m, B, ids->T), r;
            stx_real *w = step_numbers(f, "w", i, &n), off = 0;
            CHECK(w && n == draws * m->desc.blocks * 3, "%s: w of %zu numbers", name, n);
            for (l = 0; w && l < m->desc.blocks; l++) {
                stx_real *have = host_of(x, m->w[l]->data, 3 * draws);
                for (r = 0; r < 3 * draws; r++) {
                    stx_real e = (stx_real)fabs(
                        (double)have[r] - (double)w[(r / 3 * m->desc.blocks + l) * 3 + r % 3]);
                    if (!(e <= off)) off = e;
                }
                free(have);
            }
            CHECK(off <= TOL, "%s: gates of step %zu are off by %g", name, i, (double)off);
            free(w);
        }
        if (i + 1 == steps) numbers(x, f, name, "logp", i, stx_par_log_probs(m, h));
        for (l = 0; l < m->desc.blocks; l++) memory(f, name, l, i, o);
        for (n = 0; n < grad_count; n++)
            if (grads[n] == i) {
                stx_params_zero_grad(m->params);
                stx_params_zero_grad(m->arch);
                stx_backward(x, total);
                gradients(x, m->params, f, name, i);
                gradients(x, m->arch, f, name, i);
            }
        swap = s;
        s = o;
        o = swap;
    }
    CHECK(stx_ok(x) && i == steps, "%s: %s", name, stx_error(x));
    free(u);
    stx_par_set_uniforms(m, NULL, 0);
    if (m->arch) {
        double *p = (double *)malloc(3 * m->desc.blocks * sizeof *p), *want = entry(f, "p", &n);
        char got[64];
        CHECK(stx_par_probs(m, p) && want && n == 3 * m->desc.blocks
                  && test_error(p, want, n, 1e-2) <= TOL,
              "%s: p", name);
        if (stx_file_meta(f, "derived"))
            CHECK(stx_par_argmax(m, got, sizeof got) == m->desc.blocks
                      && !strcmp(got, text_of(f, "derived")),
                  "%s: %s, expected %s", name, got, text_of(f, "derived"));
        free(p);
        free(want);
    }
    modes = text_of(f, "evals");
    while (*modes && stx_ok(x)) {
        char mode[16];
        size_t len = strcspn(modes, ",");
        snprintf(mode, sizeof mode, "%.*s", (int)len, modes);
        modes += len + (modes[len] == ',');
        m->desc.gate_eval = !strcmp(mode, "soft")    ? STX_PAR_EVAL_SOFT
                            : !strcmp(mode, "noise") ? STX_PAR_EVAL_NOISE
                                                     : STX_PAR_EVAL_ARGMAX;
        evaluate(m, f, name, mode, B, steps);
        if (m->arch && !strcmp(mode, "argmax")) { /* the network of these branches alone */
            stx_par_desc fixed = d;
            stx_par *alone;
            fixed.pattern = text_of(f, "derived");
            alone = stx_par_create(x, &fixed);
            CHECK(alone && stx_par_inherit(alone, m), "%s: %s", name, stx_error(x));
            if (alone) evaluate(alone, f, name, mode, B, steps);
        }
    }
    m->desc.gate_eval = d.gate_eval;
    if (need(f, "generate") > 0) greedy(m, f, name, B, (size_t)need(f, "generate"));
    CHECK(stx_ok(x), "%s: %s", name, stx_error(x));
    stx_file_close(f);
    stx_destroy(x);
}

/* Some updates with memory carried over */
static void training(const char *name) {
    stx_ctx *x = golden_ctx(1);
    stx_file *f = open_golden(x, name);
    stx_par_desc d;
    stx_optim_desc od;
    stx_par *m;
    stx_optim *weights, *gates = NULL;
    stx_par_state *s;
    stx_real *u = NULL;
    size_t B, steps, i, k, n;
    double *loss, *lr, *gate_lr;
    stx_params *list[2];
    if (!f) {
        stx_destroy(x);
        return;
    }
    config(f, &d);
    m = stx_par_create(x, &d);
    CHECK(m != NULL, "%s: %s", name, stx_error(x));
    if (!m) {
        stx_file_close(f);
        stx_destroy(x);
        return;
    }
    load(x, m->params, f);
    load(x, m->arch, f);
    B = (size_t)need(f, "B");
    steps = (size_t)need(f, "steps");
    memset(&od, 0, sizeof od);
    od.kind = STX_ADAM;
    od.eps_hat = 1;
    od.beta1 = need(f, "beta1");
    od.beta2 = need(f, "beta2");
    od.eps = need(f, "eps");
    weights = stx_optim_create(m->params, &od);
    if (m->arch && !strcmp(text_of(f, "arch_optimizer"), "adamw")) {
        od.kind = STX_ADAMW;
        od.eps_hat = 0;
        od.beta1 = need(f, "arch_beta1");
        od.beta2 = need(f, "arch_beta2");
        od.eps = need(f, "arch_eps");
        od.weight_decay = need(f, "arch_decay");
    }
    if (m->arch) gates = stx_optim_create(m->arch, &od);
    loss = entry(f, "loss", &n);
    lr = entry(f, "lr", &n);
    gate_lr = od.kind == STX_ADAMW ? entry(f, "arch_lr", &n) : entry(f, "lr", &n);
    s = stx_par_state_create(m, B);
    for (i = 0; i < steps && stx_ok(x) && loss && lr && gate_lr; i++) {
        stx_tensor *total, *h;
        stx_begin(x, STX_TRAIN);
        reset(f, i, s);
        set_noise(m, f, i, &u);
        h = stx_par_embed(m, ids_of(x, f, "tokens", i, B, 0));
        h = stx_par_segment(m, h, ids_of(x, f, "mask", i, B, 1), s, s);
        total = stx_par_total(m, stx_par_nll(m, h, ids_of(x, f, "targets", i, B, 0), NULL));
        CHECK(CLOSE(stx_item(x, total), loss[i], CURVE), "%s step %zu: %.12g, expected %.12g %s",
              name, i, stx_item(x, total), loss[i], stx_error(x));
        stx_backward(x, total);
        CHECK(stx_optim_step(weights, lr[i]), "%s step %zu: %s", name, i, stx_error(x));
        if (gates)
            CHECK(stx_optim_step(gates, gate_lr[i]), "%s step %zu: %s", name, i, stx_error(x));
    }
    CHECK(i == steps, "%s: %zu steps of %zu", name, i, steps);
    list[0] = m->params;
    list[1] = m->arch;
    for (k = 0; k < 2; k++)
        for (i = 0; list[k] && i < list[k]->count; i++) {
            char key[128];
            snprintf(key, sizeof key, "final.%s", list[k]->name[i]);
            same_as(x, f, name, key, list[k]->tensor[i]->data, list[k]->tensor[i]->size, 50 * CURVE,
                    1e-2);
        }
    free(u);
    free(loss);
    free(lr);
    free(gate_lr);
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
        double total = 0, *want;
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
        want = entry(f, key, &n);
        CHECK(want && fabs(total - want[0]) <= 1e-12 * fabs(want[0]), "%s: %.17g, expected %.17g",
              key, total, want ? want[0] : NAN);
        free(ends);
        free(want);
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
        double *want = entry(f, form ? "tau.factor" : "tau.target", &steps);
        a.form = form ? STX_PAR_TAU_FACTOR : STX_PAR_TAU_TARGET;
        a.from = need(f, "tau_start");
        a.to = need(f, form ? "tau_factor" : "tau_target");
        a.total = (uint64_t)need(f, "total");
        for (i = 0; want && i < steps; i++)
            CHECK(CLOSE(stx_par_tau(&a, i), want[i], 1e-13), "tau %d at %zu: %g, expected %g", form,
                  i, stx_par_tau(&a, i), want[i]);
        CHECK(want && steps > 1, "no tau");
        free(want);
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
