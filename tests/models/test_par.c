/* test_par.c - behaviour of seqtx_par.h beyond the golden vectors: a search with
   one-hot gates compared with the network that it selects; segments with memory
   compared with one long segment; generation steps compared with calls; recomputation
   and resumption; noise; penalties and temperatures; patterns and cutoffs compared with
   their definitions; errors; examples computed by hand. */
#include <stdint.h>
#include "../../seqtx_par.h"
#include "../inner/inner.h"
#include "family.h"
#include <unistd.h>

#ifdef SEQTX_DOUBLE
static const double TOL = 1e-11;
#else
static const double TOL = 2e-5;
#endif
enum { V = 13, S = 6, D = 16 };

static stx_par_desc small(void) {
    stx_par_desc d;
    memset(&d, 0, sizeof d);
    d.vocab = V;
    d.dim = D;
    d.heads = 4;
    d.inner = 20;
    d.segment = S;
    d.mem = 2 * S;
    d.pattern = "sfsf";
    return d;
}

/* Variants of the model, which together cover all options. */
enum { VARIANTS = 26, FIRST_GATED = 16 };

static stx_par_desc variant(int k, const char **name) {
    static const char *const names[VARIANTS] = {"plain",
                                                "pre",
                                                "learned",
                                                "clamped",
                                                "same length",
                                                "fixed rows",
                                                "rows by keys",
                                                "no memory",
                                                "short memory",
                                                "no attention",
                                                "biases, separate u and v, wide heads",
                                                "adaptive words",
                                                "pre without a last norm",
                                                "learned with a bias",
                                                "learned with a bias, short and clamped",
                                                "one projection",
                                                "soft",
                                                "straight-through",
                                                "pi, pre",
                                                "by sequence",
                                                "by tokens",
                                                "soft evaluation",
                                                "reference",
                                                "latency",
                                                "learned with a bias, soft evaluation",
                                                "pre without a last norm, argmax"};
    stx_par_desc d = small();
    *name = names[k];
    if (k >= FIRST_GATED) {
        d.pattern = NULL;
        d.blocks = 4;
    }
    switch (k) {
    case 1:
        d.pre_norm = 1;
        d.pattern = "ssff";
        break;
    case 2: d.positions = STX_PAR_LEARNED; break;
    case 3:
        d.clamp_len = 4;
        d.words_out = STX_PAR_OUT_TIED;
        break;
    case 4:
        d.same_length = 1;
        d.mem = 4;
        d.sines = STX_PAR_SINES_REF;
        break;
    case 5:
        d.sines = STX_PAR_SINES_REF;
        d.pos_mode = STX_PAR_POS_FIXED;
        d.attn_relu = 1;
        break;
    case 6:
        d.sines = STX_PAR_SINES_REF;
        d.pos_mode = STX_PAR_POS_REF;
        d.full_scale = 1;
        break;
    case 7: d.mem = STX_PAR_NO_ROWS; break;
    case 8:
        d.mem = 2;
        d.pattern = "sfisf";
        d.pre_norm = 1;
        break;
    case 9: d.pattern = "fif"; break;
    case 10:
        d.biases = d.own_uv = 1;
        d.head_dim = 7;
        break;
    case 11:
        d.adaptive_in = d.tie_words = 1;
        d.tie_projs = STX_PAR_TIE_BUT_FIRST;
        d.div_val = 2;
        d.cutoffs = 2;
        d.cutoff[0] = 4;
        d.cutoff[1] = 8;
        break;
    case 12:
        d.pre_norm = d.no_final_norm = 1;
        d.pattern = "ssfsf";
        d.attn_relu = 1;
        break;
    case 13: d.positions = STX_PAR_LEARNED_BIAS; break;
    case 14:
        d.positions = STX_PAR_LEARNED_BIAS;
        d.pre_norm = d.biases = d.own_uv = d.full_scale = 1;
        d.head_dim = 7;
        d.clamp_len = 5;
        d.mem = 4;
        break;
    case 15:
        d.adaptive_in = d.tie_words = d.one_proj = 1;
        d.tie_projs = STX_PAR_TIE_BUT_FIRST;
        d.emb = 10;
        d.cutoffs = 2;
        d.cutoff[0] = 4;
        d.cutoff[1] = 8;
        break;
    case 17:
        d.gate = STX_PAR_ST;
        d.words_out = STX_PAR_OUT_PLAIN;
        break;
    case 18:
        d.gate_form = STX_PAR_FORM_PI;
        d.pre_norm = 1;
        d.gate = STX_PAR_ST;
        break;
    case 19: d.noise = STX_PAR_NOISE_SEQUENCE; break;
    case 20:
        d.noise = STX_PAR_NOISE_TOKENS;
        d.noise_tokens = 4;
        d.positions = STX_PAR_LEARNED;
        break;
    case 21: d.gate_eval = STX_PAR_EVAL_SOFT; break;
    case 22:
        stx_par_reference(&d);
        d.cutoffs = 1;
        d.cutoff[0] = 7;
        d.mem = 3;
        break;
    case 23:
        d.latency = STX_PAR_LATENCY_FBNET;
        d.cost[0] = 5;
        d.cost[1] = 2;
        d.latency_weight = 0.5;
        d.latency_w = STX_PAR_LATENCY_OF_W;
        break;
    case 24:
        d.positions = STX_PAR_LEARNED_BIAS;
        d.gate_eval = STX_PAR_EVAL_SOFT;
        d.recompute_layers = 2;
        break;
    case 25: d.pre_norm = d.no_final_norm = 1; break;
    default: break;
    }
    return d;
}

/* Returns a model with perturbed parameters. */
static stx_par *model(stx_ctx *x, const stx_par_desc *d) {
    stx_par *m = stx_par_create(x, d);
    CHECK(m != NULL, "%s", stx_error(x));
    if (!m) return NULL;
    CHECK(stx_par_count(d) == stx_params_size(m->params), "%zu parameters, counted %zu",
          stx_params_size(m->params), stx_par_count(d));
    perturb(x, m->params);
    perturb(x, m->gates);
    return m;
}

/* Computes the hidden states (B,n,D) of a text in calls of w tokens, in `mode`. reset may
   be NULL; otherwise, reset[c] is 1 + the stream that is reset before call c, or 0. */
static stx_real *by_calls(stx_par *m, const int32_t *t, size_t B, size_t n, size_t w,
                          stx_par_state *s, const int *reset, int mode) {
    stx_real *all = (stx_real *)calloc(B * n * D, sizeof *all);
    size_t at, b, call;
    for (at = call = 0; at < n; at += w, call++) {
        stx_tensor *y;
        size_t T = STX_MIN(w, n - at);
        stx_begin(m->ctx, mode);
        if (reset && reset[call]) stx_par_state_reset_stream(s, (size_t)reset[call] - 1);
        y = stx_par_forward(m, token_block(m->ctx, t, B, n, at, T), s, s);
        if (!y) break;
        for (b = 0; b < B; b++)
            memcpy(all + (b * n + at) * D, y->data + b * T * D, T * D * sizeof *all);
    }
    CHECK(stx_ok(m->ctx), "%s", stx_error(m->ctx));
    return all;
}

/* Returns a model that evaluates without noise, so that outputs can be compared. */
static stx_par *quiet_model(stx_ctx *x, stx_par_desc *d) {
    if (d->gate_eval == STX_PAR_EVAL_NOISE) d->gate_eval = STX_PAR_EVAL_SOFT;
    return model(x, d);
}

/* `letters` receives the blocks that a search model of 6 blocks selects, by argmax
   (eval) or by the noise of a training step. */
static void selected_blocks(stx_par *m, const int32_t *t, int eval, char letters[7]) {
    size_t l, k;
    if (eval) {
        stx_par_argmax(m, letters, 7);
        return;
    }
    stx_begin(m->ctx, STX_TRAIN);
    stx_par_forward(m, token_block(m->ctx, t, 3, 4 * S, 0, S), NULL, NULL);
    for (l = 0; l < 6; l++)
        for (k = 0; k < 3; k++)
            if (m->w[l]->data[k] == 1) letters[l] = "sfi"[k];
}

/* The memory s of a search model must equal the memory of the network of its selected
   blocks. */
static void memories_equal(const stx_par_state *s, const stx_par_state *o, const char *letters) {
    const size_t dim = s->model->desc.dim;
    size_t l;
    for (l = 0; l < 6; l++) {
        const stx_memory_layer *p = &s->mem->layer[l], *q = &o->mem->layer[l];
        if (letters[l] == 's')
            CHECK(p->count == q->count && p->count
                      && !memcmp(p->data, q->data, 3 * q->count * dim * sizeof(stx_real)),
                  "memory of block %zu", l);
        else
            CHECK(q->count == 0, "block %zu is %c and has a memory", l, letters[l]);
    }
}

static void one_hot_case(int pre, size_t dim, int eval) {
    stx_ctx *x = context(2, 7);
    stx_par_desc d = small();
    stx_par *m, *network;
    stx_par_state *s, *o;
    int32_t *t = random_tokens(3, 4 * S, V, 5);
    char letters[7] = "";
    stx_real u[18];
    size_t call, l;

    d.pattern = NULL;
    d.blocks = 6;
    d.gate = STX_PAR_ST;
    d.pre_norm = pre;
    d.dim = dim;
    d.heads = 2;
    d.recompute_layers = pre ? SIZE_MAX : 0;
    m = model(x, &d);
    s = stx_par_state_create(m, 3);
    selected_blocks(m, t, eval, letters);
    d.pattern = letters;
    network = stx_par_create(x, &d);
    CHECK(network && strlen(letters) == 6, "\"%s\" %s", letters, stx_error(x));
    if (!network) {
        free(t);
        stx_destroy(x);
        return;
    }
    CHECK(stx_par_inherit(network, m), "%s", stx_error(x));
    o = stx_par_state_create(network, 3);
    for (l = 0; l < 18; l++)
        u[l] = (stx_real)(letters[l / 3] == "sfi"[l % 3] ? 0.999999 : 1e-6);
    for (call = 0; call < 4; call++) {
        stx_tensor *a, *b;
        stx_begin(x, eval ? STX_EVAL : STX_TRAIN);
        stx_par_set_uniforms(m, u, 18);
        a = stx_par_forward(m, token_block(x, t, 3, 4 * S, call * S, S), s, s);
        b = stx_par_forward(network, token_block(x, t, 3, 4 * S, call * S, S), o, o);
        CHECK(a && b && !memcmp(a->data, b->data, a->size * sizeof *a->data),
              "%s, pre %d, width %zu, eval %d, call %zu: differs by %g %s", letters, pre, dim, eval,
              call, a && b ? max_difference(a->data, b->data, a->size) : HUGE_VAL, stx_error(x));
        memories_equal(s, o, letters);
    }
    free(t);
    stx_destroy(x);
}

/* If the noise makes the gates of a search model one-hot, or if the model is evaluated
   by argmax, its hidden states and memories must be bit-identical to those of the
   network of the selected blocks with the same weights. */
static void one_hot(void) {
    int pre, eval;
    for (pre = 0; pre < 2; pre++)
        for (eval = 0; eval < 2; eval++) {
            one_hot_case(pre, 16, eval);
            one_hot_case(pre, 70, eval);
        }
}

/* Calls of all lengths, with a memory of all earlier tokens, must give the same results
   as one long call. */
static void all_lengths(const char *name, stx_par *m, const int32_t *t, size_t B, size_t n) {
    stx_par_state *s = stx_par_state_create(m, B);
    stx_real *whole = by_calls(m, t, B, n, n, NULL, NULL, STX_EVAL), *parts;
    size_t w;
    for (w = 1; w < n && m->desc.mem == 2 * S && m->desc.pos_mode != STX_PAR_POS_REF; w++) {
        stx_par_state_reset(s);
        parts = by_calls(m, t, B, n, w, s, NULL, STX_EVAL);
        CHECK(max_difference(whole, parts, B * n * D) <= TOL * largest(whole, B * n * D),
              "%s: calls of %zu tokens differ by %g", name, w,
              max_difference(whole, parts, B * n * D));
        free(parts);
    }
    free(whole);
    stx_par_state_free(s);
}

/* Returns nonzero if a token affects the next call through the memory. The length of
   the memory does not matter, because its rows in later blocks depend on earlier
   tokens. */
static int has_memory(stx_par *m, char letters[16]) {
    stx_par_argmax(m, letters, 16);
    if (m->desc.mem == STX_PAR_NO_ROWS) return 0;
    return strchr(letters, 's') || m->desc.gate_eval == STX_PAR_EVAL_SOFT;
}

/* Tests calls of many lengths, and causality. Every stream must have the same output in
   a batch as alone. */
static void segments(void) {
    int k;
    for (k = 0; k < VARIANTS; k++) {
        const char *name;
        stx_par_desc d = variant(k, &name);
        stx_ctx *x = context(2, 7);
        stx_par *m = quiet_model(x, &d);
        const size_t n = 2 * S, B = 2, p = S + 2;
        /* With an adaptive vocabulary, the number of rows of a cluster's GEMM is the
           number of its tokens, so changing a token changes the order of sums. */
        const double tol = d.adaptive_in ? TOL : 0;
        int32_t *t = random_tokens(B, n, V, 9), keep;
        stx_par_state *s = stx_par_state_create(m, B), *one = stx_par_state_create(m, 1);
        stx_real *b, *c, *r;
        char letters[16] = "";
        double e;

        all_lengths(name, m, t, B, n);
        b = by_calls(m, t, B, n, S, s, NULL, STX_EVAL);
        keep = t[p];
        t[p] = (keep + 1) % V;
        stx_par_state_reset(s);
        c = by_calls(m, t, B, n, S, s, NULL, STX_EVAL);
        CHECK(max_difference(b, c, p * D) <= tol, "%s: a token changes the output before it", name);
        CHECK(max_difference(b + n * D, c + n * D, n * D) <= tol,
              "%s: a token changes the other row", name);
        CHECK(max_difference(b + p * D, c + p * D, D) > 0,
              "%s: a token does not change the output at its position", name);
        t[p] = keep;
        free(c);

        t[1] = (t[1] + 1) % V;
        stx_par_state_reset(s);
        c = by_calls(m, t, B, n, S, s, NULL, STX_EVAL);
        e = max_difference(b + S * D, c + S * D, S * D);
        CHECK((e > 0) == has_memory(m, letters), "%s (%s): a token changes the next call by %g",
              name, letters, e);

        r = by_calls(m, t + n, 1, n, S, one, NULL, STX_EVAL);
        CHECK(max_difference(r, b + n * D, n * D) <= TOL * largest(b, B * n * D),
              "%s: a row alone differs by %g", name, max_difference(r, b + n * D, n * D));
        free(t);
        free(b);
        free(c);
        free(r);
        stx_destroy(x);
    }
}

/* A stream that was reset must give the same results as a new stream. */
static void resets(void) {
    int k;
    for (k = 0; k < VARIANTS; k++) {
        static const int reset[8] = {0, 0, 2, 0, 0};
        const char *name;
        stx_par_desc d = variant(k, &name);
        stx_ctx *x = context(2, 7);
        stx_par *m = quiet_model(x, &d);
        const size_t n = 5 * S, from = 2 * S;
        int32_t *t = random_tokens(2, n, V, 11);
        stx_par_state *s = stx_par_state_create(m, 2), *one = stx_par_state_create(m, 1),
                      *cut = stx_par_state_create(m, 1);
        stx_real *a, *r;
        double e;
        size_t l;
        /* Skip this mode, in which positions depend on the number of keys in the
           batch. */
        if (d.pos_mode == STX_PAR_POS_REF) {
            free(t);
            stx_destroy(x);
            continue;
        }
        a = by_calls(m, t, 2, n, S, s, reset, STX_EVAL);
        r = by_calls(m, t + n + from, 1, n - from, S, one, NULL, STX_EVAL);
        e = max_difference(r, a + (n + from) * D, (n - from) * D);
        CHECK(e <= TOL * largest(a, 2 * n * D), "%s: a reset stream differs from a new one by %g",
              name, e);
        CHECK(stx_par_state_copy(cut, 0, s, 1, 1), "%s: %s", name, stx_error(x));
        for (l = 0; l < m->desc.blocks; l++) {
            const stx_memory_layer *p = &cut->mem->layer[l], *q = &one->mem->layer[l];
            size_t rows = q->count;
            CHECK(p->count >= rows
                      && max_difference(p->data + (p->count - rows) * D, q->data, rows * D)
                             <= TOL * largest(q->data, rows * D),
                  "%s: rows of block %zu", name, l);
        }
        free(t);
        free(a);
        free(r);
        stx_destroy(x);
    }
}

enum { GEN_TOKENS = 6 * S };

/* Computes the hidden states (2,n,D) of a text of n = GEN_TOKENS tokens with a
   generator. Steps have up to 5 tokens in the first half of the text. reset[i] is 1 +
   the stream that is reset before token i, or 0. */
static stx_real *by_steps(const char *name, stx_par_gen *g, const int32_t *t, const int *reset) {
    const size_t n = GEN_TOKENS;
    stx_par *m = g->model;
    stx_ctx *x = m->ctx;
    stx_real *all = (stx_real *)calloc(2 * n * D, sizeof *all);
    size_t i, b, w, bytes = 0;
    for (i = 0; i < n && stx_ok(x); i += w) {
        stx_tensor *y;
        w = STX_MIN(n - i, i < n / 2 ? 1 + i * 7 % 5 : 1);
        for (b = 1; b < w; b++)
            if (reset[i + b]) w = b;
        stx_begin(x, STX_EVAL);
        if (reset[i]) stx_par_gen_reset_stream(g, (size_t)reset[i] - 1);
        y = stx_par_gen_step(g, stx_par_embed(m, token_block(x, t, 2, n, i, w)));
        CHECK(y && y->dim[1] == w, "%s: %s", name, stx_error(x));
        if (!y) break;
        for (b = 0; b < 2; b++)
            memcpy(all + (b * n + i) * D, y->data + b * w * D, w * D * sizeof *all);
        if (i > 4 * S && !bytes) bytes = stx_bytes(x);
    }
    CHECK(bytes == stx_bytes(x), "%s: steps keep allocating: %zu, %zu bytes", name, bytes,
          stx_bytes(x));
    return all;
}

/* Computes the first half of the text in calls; the generator's steps then continue
   from the memory of these calls. whole: the hidden states from calls of one token
   each. */
static void continued_steps(const char *name, stx_par_gen *g, const int32_t *t, const int *reset,
                            const stx_real *whole) {
    const size_t n = GEN_TOKENS;
    const double top = largest(whole, 2 * n * D);
    stx_par *m = g->model;
    stx_ctx *x = m->ctx;
    stx_par_state *s = stx_par_state_create(m, 2);
    size_t i, b, w;

    free(by_calls(m, t, 2, n, 1, s, reset, STX_EVAL));
    stx_par_state_reset(s);
    for (i = 0; i < n / 2; i++) {
        stx_begin(x, STX_EVAL);
        if (reset[i]) stx_par_state_reset_stream(s, (size_t)reset[i] - 1);
        stx_par_forward(m, token_block(x, t, 2, n, i, 1), s, s);
    }
    CHECK(stx_par_gen_set(g, s), "%s: %s", name, stx_error(x));
    for (; i < n && stx_ok(x); i += w) {
        stx_tensor *y;
        w = reset[i + 1] || reset[i + 2] || i + 3 > n ? 1 : 3;
        stx_begin(x, STX_EVAL);
        if (reset[i]) stx_par_gen_reset_stream(g, (size_t)reset[i] - 1);
        y = stx_par_gen_step(g, stx_par_embed(m, token_block(x, t, 2, n, i, w)));
        for (b = 0; y && b < 2; b++) {
            double e = max_difference(y->data + b * w * D, whole + (b * n + i) * D, w * D);
            CHECK(e <= TOL * top, "%s: continued from a memory at %zu, the error is %g",
                  name, i, e);
        }
    }
}

static void generation_case(const char *name, stx_par_desc d, const int *reset, int resets_too) {
    const size_t n = GEN_TOKENS;
    stx_ctx *x = context(2, 7);
    stx_par *m = quiet_model(x, &d);
    int32_t *t = random_tokens(2, n, V, 5);
    stx_par_state *s = stx_par_state_create(m, 2);
    stx_par_gen *g = stx_par_gen_create(m, 2);
    stx_real *whole, *stepwise;
    const stx_real *scores;
    size_t l;
    double top, e;

    /* Skip this mode, in which positions depend on the number of keys in the batch. */
    if (resets_too && d.pos_mode == STX_PAR_POS_REF) {
        free(t);
        stx_destroy(x);
        return;
    }
    whole = by_calls(m, t, 2, n, 1, s, reset, STX_EVAL);
    top = largest(whole, 2 * n * D);
    stepwise = by_steps(name, g, t, reset);
    e = max_difference(stepwise, whole, 2 * n * D);
    CHECK(e <= TOL * top, "%s%s: steps differ from calls by %g", name,
          resets_too ? " with resets" : "", e);
    /* the capacity of the generator's memory, as stated in the manual */
    for (l = 0; l < m->desc.blocks; l++)
        CHECK(!g->pos[l] || g->cache->layer[l].capacity == 2 * (g->M + !g->M) + 64,
              "%s: %zu rows for %zu", name, g->cache->layer[l].capacity, g->M);
    continued_steps(name, g, t, reset, whole);
    stx_par_gen_reset(g);
    scores = stx_par_gen_feed(g, t, n / 2); /* prompts of n / 2 tokens: both halves of stream 0 */
    stx_begin(x, STX_EVAL);
    if (!resets_too) {
        stx_tensor *h = stx_input(x, whole + (n / 2 - 1) * D, 1, 1, D, 0);
        stx_tensor *y = stx_vocab_io_scores(m->vocab_io, h);
        e = scores && y ? max_difference(y->data, scores, V) : HUGE_VAL;
        CHECK(e <= TOL * top * 10, "%s: scores after a prompt: the error is %g %s", name, e,
              stx_error(x));
    }
    CHECK(stx_ok(x), "%s: %s", name, stx_error(x));
    stx_par_gen_free(g);
    free(t);
    free(whole);
    free(stepwise);
    stx_destroy(x);
}

/* Steps of many lengths with cached keys and values must give the same results as calls
   of one token each, even after stream resets and when they continue from a memory. */
static void generation(void) {
    static const int none[GEN_TOKENS + 3];
    int k, reset[GEN_TOKENS + 3] = {0};
    reset[7] = 2;
    reset[8] = 1;
    reset[20] = 2;
    for (k = 0; k < VARIANTS; k++) {
        const char *name;
        stx_par_desc d = variant(k, &name);
        generation_case(name, d, none, 0);
        generation_case(name, d, reset, 1);
    }
}

/* Runs one training step and returns the total loss. */
static double train(stx_par *m, stx_optim *o, stx_optim *gates, stx_par_state *s, const int32_t *t,
                    size_t B, size_t n, size_t at) {
    stx_ctx *x = m->ctx;
    stx_tensor *total;
    double v;
    stx_begin(x, STX_TRAIN);
    total = stx_par_total(m, stx_par_loss(m, token_block(x, t, B, n, at, S),
                                          token_block(x, t, B, n, at + 1, S), s, s));
    v = stx_item(x, total);
    stx_backward(x, total);
    if (o) stx_optim_step(o, 0.01);
    if (gates) stx_optim_step(gates, 0.02);
    return v;
}

static int same_params(const stx_params *a, const stx_params *b) {
    size_t i;
    for (i = 0; a && b && i < a->count; i++)
        if (memcmp(a->tensor[i]->data, b->tensor[i]->data, a->tensor[i]->size * sizeof(stx_real)))
            return 0;
    return !a == !b;
}

static void dropouts_on(stx_par_desc *d) {
    d->dropout = 0.1;
    d->attn_dropout = 0.2;
    d->inner_dropout = 0.15;
    d->final_dropout = 0.05;
    if (d->positions == STX_PAR_SINES) d->pos_dropout = 0.1;
}

/* Recomputation must not change losses and gradients, with dropout and noise. Results
   with different numbers of threads must be equal up to rounding; with the same number,
   they must be bit-identical. */
static void recomputed(void) {
    int k, run;
    for (k = 0; k < VARIANTS; k++) {
        static const int threads[] = {1, 1, 1, 3};
        stx_real *g[4] = {NULL};
        double loss[4] = {0}, sum = 0;
        size_t n = 0, gates = 0, i;
        const char *name = "";
        for (run = 0; run < 4; run++) {
            stx_par_desc d = variant(k, &name);
            stx_ctx *x = context(threads[run], 3);
            stx_par *m;
            stx_par_state *s;
            int32_t *t = random_tokens(3, 3 * S + 1, V, 2);
            size_t at = 0;
            d.recompute_layers = run == 1 ? SIZE_MAX : 0;
            dropouts_on(&d);
            m = model(x, &d);
            s = stx_par_state_create(m, 3);
            for (i = 0; i < 3; i++) loss[run] = train(m, NULL, NULL, s, t, 3, 3 * S + 1, i * S);
            n = stx_params_size(m->params);
            gates = m->gates ? stx_params_size(m->gates) : 0;
            g[run] = (stx_real *)calloc(n + gates, sizeof **g);
            for (i = 0; i < m->params->count; i++) {
                stx_get_grad(x, m->params->tensor[i], g[run] + at);
                at += m->params->tensor[i]->size;
            }
            for (i = 0; m->gates && i < m->gates->count; i++, at += 3)
                stx_get_grad(x, m->gates->tensor[i], g[run] + at);
            CHECK(stx_ok(x), "%s: %s", name, stx_error(x));
            free(t);
            stx_destroy(x);
        }
        for (run = 1; run < 4; run++) {
            double e = max_difference(g[0], g[run], n + gates), top = largest(g[0], n + gates);
            CHECK(fabs(loss[run] - loss[0]) <= (run == 3 ? TOL : 1e-12) * 10
                      && e <= (run == 2 ? 0 : TOL) * top,
                  "%s, run %d: losses %.9g, %.9g, gradients differ by %g", name, run, loss[0],
                  loss[run], e);
        }
        for (i = 0; i < gates; i++) sum += fabs((double)g[0][n + i]);
        CHECK(!gates || sum > 0, "%s: the gates have no gradient", name);
        for (run = 0; run < 4; run++) free(g[run]);
    }
}

/* Returns a model with the parameters, the memory and the step index of a file. */
static stx_par *loaded(stx_ctx *x, const stx_par_desc *d, const char *path, stx_par_state **s) {
    stx_par *m = stx_par_create(x, d);
    stx_file *f = stx_file_open(x, path);
    uint64_t tick = 0;
    CHECK(m && f && stx_file_verify(f) && stx_params_load(m->params, f, "")
              && (!m->gates || stx_params_load(m->gates, f, "")),
          "%s", stx_error(x));
    *s = stx_par_state_create(m, 2);
    CHECK(stx_par_state_load(*s, f, "train."), "%s", stx_error(x));
    CHECK(stx_file_meta_u64(x, f, "tick", &tick), "%s", stx_error(x));
    stx_set_step_index(x, tick);
    stx_file_close(f);
    return m;
}

static void save(stx_par *m, stx_par_state *s, const char *path) {
    stx_writer *w = stx_writer_create(m->ctx);
    CHECK(stx_params_save(w, m->params, "") && (!m->gates || stx_params_save(w, m->gates, ""))
              && stx_par_state_save(w, s, "train.")
              && stx_writer_meta_u64(w, "tick", stx_step_index(m->ctx)) && stx_writer_checksum(w)
              && stx_writer_finish(w, path),
          "%s", stx_error(m->ctx));
}

/* A network of fixed blocks in context y loads the file of a search, and a network in
   context x inherits the weights from that network. Both must then have the same
   parameters. */
static void network_from_search(const char *name, stx_ctx *x, stx_ctx *y, stx_par_desc d,
                                const char *path) {
    stx_par *a, *b;
    stx_file *f;
    d.pattern = "sffi";
    a = stx_par_create(x, &d);
    b = stx_par_create(y, &d);
    f = stx_file_open(y, path);
    CHECK(stx_params_load(b->params, f, "") && stx_par_inherit(a, b)
              && same_params(a->params, b->params)
              && stx_params_find(b->params, "layers.1.ff.fc1.weight")
              && !stx_params_find(b->params, "layers.1.attn.query.weight"),
          "%s: %s%s", name, stx_error(x), stx_error(y));
    stx_file_close(f);
}

/* A model in training: its optimisers (SGD, which has no state) and its memory. `gates`
   is the optimiser of the gates, or NULL if there is no search. */
typedef struct trainee {
    stx_ctx *x;
    stx_par *m;
    stx_optim *o, *gates;
    stx_par_state *s;
} trainee;

/* Creates the model and its memory if m is NULL. */
static trainee trainee_of(stx_ctx *x, const stx_par_desc *d, stx_par *m, stx_par_state *s) {
    trainee r;
    stx_optim_desc od;
    memset(&od, 0, sizeof od);
    od.kind = STX_SGD;
    r.x = x;
    r.m = m ? m : model(x, d);
    r.o = stx_optim_create(r.m->params, &od);
    r.gates = r.m->gates ? stx_optim_create(r.m->gates, &od) : NULL;
    r.s = m ? s : stx_par_state_create(r.m, 2);
    return r;
}

static double trainee_step(const trainee *r, const int32_t *t, size_t n, size_t at) {
    return train(r->m, r->o, r->gates, r->s, t, 2, n, at);
}

/* A run that is resumed from a file, and one with evaluations that use another memory
   between its steps, must be bit-identical to a plain run. */
static void resumed(void) {
    int k;
    char path[1024];
    test_path(path, sizeof path, "test_par");
    for (k = 0; k < VARIANTS; k++) {
        const char *name;
        stx_par_desc d = variant(k, &name);
        stx_ctx *x = context(1, 3), *y = context(1, 3), *z = context(1, 3);
        trainee plain, evaluated, again;
        stx_par *m;
        stx_par_state *s, *eval;
        const size_t n = 6 * S + 1;
        int32_t *t = random_tokens(2, n, V, 4);
        size_t i;

        dropouts_on(&d);
        plain = trainee_of(x, &d, NULL, NULL);
        evaluated = trainee_of(z, &d, NULL, NULL);
        eval = stx_par_state_create_sized(evaluated.m, 1, 9);
        for (i = 0; i < 3; i++) {
            trainee_step(&plain, t, n, i * S);
            trainee_step(&evaluated, t, n, i * S);
            free(by_calls(evaluated.m, t, 1, n, 5, eval, NULL, STX_EVAL));
        }
        save(plain.m, plain.s, path);
        m = loaded(y, &d, path, &s);
        again = trainee_of(y, &d, m, s);
        CHECK(s->calls == 3, "%s: %llu calls", name, (unsigned long long)s->calls);
        for (i = 3; i < 6; i++) {
            double a = trainee_step(&plain, t, n, i * S), b = trainee_step(&again, t, n, i * S),
                   c = trainee_step(&evaluated, t, n, i * S);
            CHECK(a == b && a == c, "%s, step %zu: %.9g, resumed %.9g, with evaluations %.9g %s",
                  name, i, a, b, c, stx_error(y));
        }
        CHECK(same_params(plain.m->params, m->params) && same_params(plain.m->gates, m->gates),
              "%s: resumed weights differ", name);
        CHECK(same_params(plain.m->params, evaluated.m->params)
                  && same_params(plain.m->gates, evaluated.m->gates),
              "%s: evaluation changes training", name);
        CHECK(stx_ok(x) && stx_ok(y) && stx_ok(z), "%s: %s%s%s", name, stx_error(x), stx_error(y),
              stx_error(z));
        if (m->gates) network_from_search(name, x, y, d, path);
        remove(path);
        free(t);
        stx_destroy(x);
        stx_destroy(y);
        stx_destroy(z);
    }
}

/* Checks that the context has an error that matches the pattern (see test_says), and
   clears it. */
static void fails(stx_ctx *x, const char *pattern) {
    CHECK(!stx_ok(x) && test_says(stx_error(x), pattern), "expected \"%s\", got \"%s\"", pattern,
          stx_error(x));
    stx_clear_error(x);
    stx_begin(x, STX_EVAL);
}

/* Tests noise that the caller sets, for a model with 4 blocks and 4 draws per call.
   Invalid values must be an error of stx_par_set_uniforms, and the previous noise must
   remain in use. */
static void given_uniforms(stx_par *m, const int32_t *t) {
    stx_ctx *x = m->ctx;
    stx_par_desc step;
    stx_par *other;
    stx_tensor *h;
    stx_real u[48], first[12];
    size_t i;
    for (i = 0; i < 48; i++) u[i] = (stx_real)((double)(29 * i % 47 + 1) / 49);
    stx_par_set_uniforms(m, u, 48);
    CHECK(stx_par_forward(m, token_block(x, t, 2, 2 * S, 0, S), NULL, NULL), "%s", stx_error(x));
    memcpy(first, m->w[0]->data, sizeof first);
    for (i = 0; i < 7; i++) {
        static const double bad[4] = {0, 1, -0.5, NAN};
        static const size_t counts_[3] = {0, 4, 50};
        stx_real v[50];
        memcpy(v, u, sizeof u);
        if (i < 4) v[5] = (stx_real)bad[i];
        stx_par_set_uniforms(m, v, i < 4 ? 48 : counts_[i - 4]);
        fails(x, i < 4 ? "stx_par_set_uniforms: u[5]: expected a value above 0"
                       : "stx_par_set_uniforms: count: expected a multiple of 12 values");
        h = stx_par_forward(m, token_block(x, t, 2, 2 * S, 0, S), NULL, NULL);
        CHECK(h && !memcmp(first, m->w[0]->data, sizeof first), "the noise changed: %s",
              stx_error(x));
    }
    stx_par_set_uniforms(m, u, 12); /* one draw per block, which suffices for a shorter call */
    CHECK(stx_ok(x), "%s", stx_error(x));
    h = stx_par_forward(m, token_block(x, t, 2, 2 * S, 0, S), NULL, NULL);
    CHECK(!h, "a call of 4 draws with values for one");
    fails(x, "(4,4,3)");
    stx_par_set_uniforms(m, NULL, 0);
    h = stx_par_forward(m, token_block(x, t, 2, 2 * S, 0, S), NULL, NULL);
    CHECK(h && memcmp(first, m->w[0]->data, sizeof first), "the caller's noise after NULL");
    step = small();
    step.pattern = NULL;
    step.blocks = 2;
    other = model(x, &step);
    stx_par_set_uniforms(other, u, 12);
    fails(x, "count: expected 6 values (3 per block), got 12");
}

/* Checks the variance of dal_0 at several temperatures against the manual, for dw =
   (1,0,0) and equal branches. At low temperatures, halving the temperature doubles the
   variance. */
static void variance(void) {
    static const double expected[] = {0.0059, 0.031, 0.10, 0.25, 0.54, 1.13};

    enum { DRAWS = 100000 };

    stx_ctx *x = context(1, 1);
    stx_real *w = (stx_real *)malloc(3 * DRAWS * sizeof *w), al[3] = {0}, tau = 1;
    stx_par_gate_args a;
    size_t i, r;
    memset(&a, 0, sizeof a);
    a.R = DRAWS;
    a.noisy = 1;
    a.al = al;
    a.tau = &tau;
    a.seed = 5;
    a.w = a.y = w;
    for (i = 0; i < 6; i++, tau /= 2) {
        double sum = 0, squares = 0;
        stx_par_gate_fwd(x, &a);
        for (r = 0; r < DRAWS; r++) {
            double d = (double)w[3 * r] * (1 - (double)w[3 * r]) / (double)tau;
            sum += d / DRAWS;
            squares += d * d / DRAWS;
        }
        squares -= sum * sum;
        CHECK(fabs(squares - expected[i]) <= 0.05 * expected[i], "tau %g: %g", (double)tau,
              squares);
    }
    free(w);
    stx_destroy(x);
}

/* Compares soft and hard draws of a gate with the definition in double. The weights
   must never be exactly 0 or 1, no two draws may be equal, and branches must be drawn
   with the frequencies in p. */
static void draws(void) {
    enum { DRAWS = 6000 };

    stx_ctx *x = context(2, 11);
    stx_par_gate_args a;
    stx_real al[3] = {0.5f, -0.3f, 0}, tau = 0.5f, *w = (stx_real *)malloc(6 * DRAWS * sizeof *w),
             *hard = w + 3 * DRAWS;
    double p[3], often[3] = {0, 0, 0}, mean[3] = {0, 0, 0}, sum = 0, same = 0;
    size_t r, k;

    for (k = 0; k < 3; k++) sum += p[k] = exp((double)al[k]);
    memset(&a, 0, sizeof a);
    a.R = DRAWS;
    a.noisy = a.hard = 1;
    a.al = al;
    a.tau = &tau;
    a.seed = 3;
    a.stream = 99;
    a.first = 41;
    a.w = hard;
    a.y = w;
    stx_par_gate_fwd(x, &a);
    for (r = 0; r < DRAWS; r++) {
        uint32_t bits[4];
        double v[3], z1 = 0;
        size_t best = 0;
        stx_philox(3, 99, 41 + r, bits);
        for (k = 0; k < 3; k++) {
            double u = (double)((float)(bits[k] >> 9) + 0.5f) / 8388608;
            CHECK(u > 0 && u < 1, "u = %g", u);
            v[k] = ((double)al[k] - log(sum) - log(-log(u))) / 0.5;
            if (v[k] > v[best]) best = k;
        }
        for (k = 0; k < 3; k++) z1 += exp(v[k] - v[best]);
        for (k = 0; k < 3; k++) {
            double expected = exp(v[k] - v[best]) / z1;
            CHECK(fabs((double)w[3 * r + k] - expected) < 1e-6 && hard[3 * r + k] == (k == best),
                  "draw %zu branch %zu: %g, %g; expected %g", r, k, (double)w[3 * r + k],
                  (double)hard[3 * r + k], expected);
            mean[k] += expected / DRAWS;
            often[k] += (double)hard[3 * r + k] / DRAWS;
        }
        same += r && !memcmp(w + 3 * r, w + 3 * r - 3, 3 * sizeof *w);
    }
    CHECK(same == 0, "%g equal draws", same);
    for (k = 0; k < 3; k++) /* a tolerance of 4 sigma */
        CHECK(fabs(often[k] - p[k] / sum) < 4 * sqrt(p[k] / sum * (1 - p[k] / sum) / DRAWS),
              "branch %zu: %g of the draws, p is %g", k, often[k], p[k] / sum);
    CHECK(mean[0] > mean[2] && mean[2] > mean[1], "soft gates: %g %g %g", mean[0], mean[1],
          mean[2]);
    free(w);
    stx_destroy(x);
}

/* Training noise must depend only on the seed, the step, the block and the draw. */
static void training_noise(stx_par *m[3], const int32_t *t) {
    stx_ctx *x = m[0]->ctx;
    stx_real *h[3], first[3];
    double same, other;
    int i;
    for (i = 0; i < 3; i++) h[i] = by_calls(m[i], t, 2, 2 * S, S, NULL, NULL, STX_TRAIN);
    same = max_difference(h[0], h[1], 4 * S * D);
    other = max_difference(h[0], h[2], 4 * S * D);
    CHECK(same <= TOL && other > 1e-3, "the same seed differs by %g, another one by %g", same,
          other);
    CHECK(m[0]->w[0]->dim[0] == 4 && stx_par_draws(m[0], 2, S) == 4, "%zu draws",
          m[0]->w[0]->dim[0]);
    memcpy(first, m[0]->w[0]->data, sizeof first);
    CHECK(memcmp(first, m[0]->w[0]->data + 3, sizeof first)
              && memcmp(first, m[0]->w[1]->data, sizeof first),
          "two draws or two blocks have the same noise");
    stx_begin(x, STX_TRAIN);
    stx_par_forward(m[0], token_block(x, t, 2, 2 * S, 0, S), NULL, NULL);
    CHECK(memcmp(first, m[0]->w[0]->data, sizeof first), "two steps have the same noise");
    stx_set_step_index(x, stx_step_index(x) - 2);
    stx_begin(x, STX_TRAIN);
    stx_par_forward(m[0], token_block(x, t, 2, 2 * S, 0, S), NULL, NULL);
    CHECK(!memcmp(first, m[0]->w[0]->data, sizeof first), "a repeated step has other noise");
    for (i = 0; i < 3; i++) free(h[i]);
}

/* Evaluation noise must differ between calls, but must be the same if the text is
   evaluated again. */
static void evaluation_noise(stx_par *m, const int32_t *t) {
    stx_ctx *x = m->ctx;
    stx_par_state *s = stx_par_state_create(m, 2);
    stx_real first[3], again[3];
    int i;
    for (i = 0; i < 2; i++) {
        uint64_t tick = stx_step_index(x);
        stx_par_state_reset(s);
        stx_begin(x, STX_EVAL);
        stx_par_forward(m, token_block(x, t, 2, 2 * S, 0, S), s, s);
        memcpy(i ? again : first, m->w[1]->data, sizeof first);
        stx_begin(x, STX_EVAL);
        stx_par_forward(m, token_block(x, t, 2, 2 * S, 0, S), s, s);
        CHECK(memcmp(first, m->w[1]->data, sizeof first) && stx_step_index(x) == tick,
              "two calls of evaluation have the same noise");
    }
    CHECK(!memcmp(first, again, sizeof first)
              && memcmp(m->w[0]->data, m->w[1]->data, sizeof first),
          "a repeated evaluation has other noise, or two blocks have the same");
    CHECK(!stx_par_gen_create(m, 1) && strstr(stx_error(x), "gate_eval"), "%s", stx_error(x));
    stx_clear_error(x);
}

static void noise(void) {
    const char *name;
    stx_par_desc d = variant(20, &name);
    stx_par *m[3];
    int32_t *t = random_tokens(2, 2 * S, V, 8);
    int i;
    draws();
    d.gate_eval = STX_PAR_EVAL_NOISE;
    m[0] = model(context(2, 11), &d);
    m[1] = model(context(1, 11), &d);
    m[2] = model(context(1, 12), &d);
    training_noise(m, t);
    evaluation_noise(m[0], t);
    given_uniforms(m[0], t);
    free(t);
    for (i = 0; i < 3; i++) stx_destroy(m[i]->ctx);
}

/* The sizes of a mixture: N rows of C elements, in texts of `period` rows, with one
   gate per rows_per_draw rows of a text. */
typedef struct mix_case {
    size_t N, C, period, rows_per_draw;
} mix_case;

static size_t mix_draws(const mix_case *c) {
    return c->N / c->period * ((c->period + c->rows_per_draw - 1) / c->rows_per_draw);
}

/* Returns the total number of elements of all arrays. */
static size_t mix_size(const mix_case *c) {
    return 8 * c->N * c->C + 6 * mix_draws(c) + 8 * c->C + 4 * c->N;
}

/* Places all arrays of a case in one buffer of mix_size random elements: h, b, y, dy,
   dh and db; the gates and their gradients; with `norm`, the arrays of the norms. The
   caller frees the buffer and k->work. */
static stx_real *mix_args(stx_par_mix_args *k, const mix_case *c, int norm, int hot,
                          uint64_t seed) {
    const size_t n = c->N * c->C, draws_ = mix_draws(c), size = mix_size(c);
    stx_real *v, *p;
    size_t i;
    int b;

    test_state = seed;
    v = random_values(size);
    memset(k, 0, sizeof *k);
    k->N = c->N;
    k->C = c->C;
    k->period = c->period;
    k->rows_per_draw = c->rows_per_draw;
    k->eps = (stx_real)1e-3;
    k->h = v;
    k->branch[0] = v + n;
    k->branch[1] = v + 2 * n;
    k->y = v + 3 * n;
    k->dy = v + 4 * n;
    k->dh = v + 5 * n;
    k->dbranch[0] = v + 6 * n;
    k->dbranch[1] = v + 7 * n;
    p = v + 8 * n;
    if (hot)
        for (i = 0; i < 3 * draws_; i++) p[i] = i % 3 == i / 3 % 3;
    k->w = p;
    k->dw = p + 3 * draws_;
    p += 6 * draws_;
    for (b = 0; b < 2 && norm; b++) {
        k->gain[b] = p;
        k->shift[b] = p + c->C;
        k->dgain[b] = p + 2 * c->C;
        k->dshift[b] = p + 3 * c->C;
        p += 4 * c->C;
        k->mean[b] = v + size - 4 * c->N + (size_t)b * c->N;
        k->rstd[b] = v + size - 2 * c->N + (size_t)b * c->N;
    }
    k->add_h = k->add[0] = k->add[1] = 1;
    k->work = (double *)malloc(3 * c->N * sizeof *k->work);
    return v;
}

/* Compares the definition (a[0]) with the kernel (a[1]). */
static void mixture_case(int i, const mix_case *c, int norm, int hot) {
    stx_ctx *x = context(1 + i % 3, 1);
    const size_t n = c->N * c->C, rest = mix_size(c) - 8 * n;
    stx_par_mix_args a[2];
    stx_real *v[2];
    const stx_real *dy;
    double e, e_rest;
    int part;

    for (part = 0; part < 2; part++)
        v[part] = mix_args(&a[part], c, norm, hot, 12345 + (uint64_t)i);
    dy = a[0].dy;
    a[0].dy = NULL;
    stx_par_mix_plain(&a[0]);
    a[0].dy = dy;
    stx_par_mix_plain(&a[0]);
    stx_par_mix_fwd(x, &a[1]);
    stx_par_mix_bwd(x, &a[1]);
    e = max_difference(v[0], v[1], 8 * n);
    e_rest = max_difference(v[0] + 8 * n, v[1] + 8 * n, rest);
    CHECK(e <= TOL * largest(v[0], 8 * n) && e_rest <= TOL * 10 * largest(v[0] + 8 * n, rest),
          "shape %d, norm %d, one-hot %d: errors %g, %g", i, norm, hot, e, e_rest);

    /* now the kernel overwrites gradients, and does not write gradients whose pointer
       is NULL */
    a[1].add_h = a[1].add[0] = a[1].add[1] = 0;
    for (part = 0; part < 2; part++) {
        memset(v[part] + 5 * n, 0xff, 3 * n * sizeof(stx_real));
        a[part].dbranch[1] = a[part].dw = a[part].dgain[0] = a[part].dshift[1] = NULL;
    }
    stx_par_mix_bwd(x, &a[1]);
    memset(v[0] + 5 * n, 0, 2 * n * sizeof(stx_real));
    stx_par_mix_plain(&a[0]);
    e = max_difference(v[0] + 5 * n, v[1] + 5 * n, 2 * n);
    CHECK(e <= TOL * largest(v[0], 5 * n), "shape %d, norm %d: overwritten with an error of %g", i,
          norm, e);
    CHECK(!memcmp(v[0] + 7 * n, v[1] + 7 * n, n * sizeof(stx_real)),
          "shape %d: a gradient that was not requested is written", i);
    for (part = 0; part < 2; part++) {
        free(v[part]);
        free(a[part].work);
    }
    stx_destroy(x);
}

/* Compares the fused mixture with its definition, for every way in which rows share
   gates. */
static void mixture(void) {
    static const mix_case shapes[] = {
        {6, 5, 6, 6}, {12, 33, 4, 4}, {15, 64, 5, 2}, {130, 129, 65, 9}, {1, 1, 1, 1}};
    int i, norm, hot;
    for (i = 0; i < 5; i++)
        for (norm = 0; norm < 2; norm++)
            for (hot = 0; hot < 2; hot++) mixture_case(i, &shapes[i], norm, hot);
}

/* Tests the manual's example of attention. */
static void attention_by_hand(void) {
    static const double gradient[3] = {0.5, -5.0 / 3, 7.0 / 6};
    const stx_real q[2] = {0, -1}, value[3] = {6, 0, 12}, u = 1, v = 2, pick[2] = {0, 1};
    const stx_real k[3] = {0, (stx_real)log(2), 5}, r[3] = {(stx_real)log(3), (stx_real)log(2), 0};
    stx_ctx *x = context(1, 1);
    stx_attention_in in;
    stx_attention_desc d;
    stx_tensor *y;
    stx_real got[3] = {0, 0, 0};
    int t;
    memset(&in, 0, sizeof in);
    memset(&d, 0, sizeof d);
    stx_begin(x, STX_TRAIN);
    in.q = stx_input(x, q, 1, 2, 1, 0);
    in.k = stx_input(x, k, 1, 3, 1, 0);
    in.v = stx_input(x, value, 1, 3, 1, 0);
    in.pe = stx_variable(x, r, 3, 1, 0, 0);     /* the largest distance first */
    in.content_bias = stx_input(x, &u, 1, 0, 0, 0);
    in.position_bias = stx_input(x, &v, 1, 0, 0, 0);
    d.heads = 1;
    y = stx_attention(x, &in, &d);
    stx_backward(x, stx_sum(x, stx_mul(x, y, stx_input(x, pick, 1, 2, 1, 0))));
    CHECK(stx_ok(x), "%s", stx_error(x));
    if (stx_ok(x)) stx_get(x, y, got);
    CHECK(fabs((double)got[0] - 4) < 1e-5 && fabs((double)got[1] - 5) < 1e-5,
          "attend %g, %g", (double)got[0], (double)got[1]);
    if (stx_ok(x)) stx_get_grad(x, in.pe, got);
    for (t = 0; t < 3; t++)
        CHECK(fabs((double)got[t] - gradient[t]) < 1e-5, "dr_%d %g", 2 - t, (double)got[t]);
    stx_destroy(x);
}

/* Tests the manual's example of a gate. */
static void by_hand(void) {
    stx_par_gate_args a;
    stx_real al[3], tau = 1, u[3], w[3], y[3], cost[3] = {2, 1, 0}, lat, dw[3] = {1, 0, 1},
                    dlat = 0, dal[3] = {0, 0, 0};
    const double p[3] = {2, 0.5, 1}, g[3] = {0, log(2.0), 0}, expected[3] = {0.5, 0.25, 0.25},
                 da[3] = {0.125, -0.1875, 0.0625};
    int k;
    memset(&a, 0, sizeof a);
    for (k = 0; k < 3; k++) {
        al[k] = (stx_real)log(p[k]);
        u[k] = (stx_real)exp(-exp(-g[k]));
    }
    a.R = 1;
    a.uniforms_stride = 3;
    a.noisy = 1;
    a.latency_w = STX_PAR_LATENCY_OF_W;
    a.al = al;
    a.tau = &tau;
    a.uniforms = u;
    a.cost = cost;
    a.w = w;
    a.y = y;
    a.lat = &lat;
    stx_par_gate_fwd(NULL, &a);
    for (k = 0; k < 3; k++) CHECK(CLOSE(w[k], expected[k], 1e-6), "w[%d] = %g", k, (double)w[k]);
    CHECK(CLOSE(lat, 1.25, 1e-6), "latency of w = %g", (double)lat);
    a.latency_w = STX_PAR_LATENCY_OF_P;
    stx_par_gate_fwd(NULL, &a);
    CHECK(CLOSE(lat, 9.0 / 7, 1e-6), "latency of p = %g", (double)lat);
    a.latency_w = STX_PAR_LATENCY_OF_W;
    a.dw = dw;
    a.dlat = &dlat;
    a.dal = dal;
    stx_par_gate_bwd(NULL, &a);
    for (k = 0; k < 3; k++) CHECK(CLOSE(dal[k], da[k], 1e-6), "dal[%d] = %g", k, (double)dal[k]);
    a.hard = 1;
    stx_par_gate_fwd(NULL, &a);
    CHECK(w[0] == 1 && w[1] == 0 && w[2] == 0 && lat == 2, "one-hot: %g %g %g, Lat %g",
          (double)w[0], (double)w[1], (double)w[2], (double)lat);
    memset(dal, 0, sizeof dal);
    stx_par_gate_bwd(NULL, &a);
    for (k = 0; k < 3; k++)
        CHECK(CLOSE(dal[k], da[k], 1e-6), "straight-through: dal[%d] = %g", k, (double)dal[k]);
}

/* Returns the expected latency of the two branches that have a cost. It is computed
   from p or, with latency_w, from the gates of the step. */
static double expected_latency(const stx_par *m, const double *p) {
    double lat = 0;
    size_t l, k;
    for (l = 0; l < 4; l++)
        for (k = 0; k < 2; k++) {
            const stx_real *w = m->w[l]->data;
            double share = p[3 * l + k];
            if (m->desc.latency_w) share = ((double)w[k] + (double)w[3 + k]) / 2;
            lat += m->desc.cost[k] * share;
        }
    return lat;
}

/* Returns the total loss according to its definition. */
static double expected_total(int kind, double nll, double lat) {
    if (kind == STX_PAR_LATENCY_ADD) return nll + 0.4 * lat;
    if (kind == STX_PAR_LATENCY_HINGE) return nll + 0.4 * (lat > 2 ? lat / 2 - 1 : 0);
    return nll * 0.4 * pow(log(lat), 0.6);
}

/* Tests a latency penalty computed from p (of_w = 0) or from the gates (of_w = 1). In a
   frozen search, the penalty must have no gradient. */
static void latency(int kind, int of_w) {
    stx_par_desc d = small();
    stx_ctx *x = context(1, 3);
    stx_par *m;
    int32_t *t = random_tokens(2, S + 1, V, 4);
    stx_tensor *nll, *total;
    double p[12], grads[2] = {0, 0};
    size_t k, i;
    int frozen;

    d.pattern = NULL;
    d.blocks = 4;
    d.latency = kind;
    d.latency_w = of_w;
    d.cost[0] = 1.5;
    d.cost[1] = 0.75;
    d.latency_weight = 0.4;
    d.noise = STX_PAR_NOISE_SEQUENCE;
    if (kind == STX_PAR_LATENCY_HINGE) d.latency_target = 2;
    m = model(x, &d);
    CHECK(stx_par_probs(m, p), "%s", stx_error(x));
    for (frozen = 0; frozen < 2; frozen++) {
        double lat, expected;
        stx_par_freeze(m, frozen);
        stx_params_zero_grad(m->params);
        stx_params_zero_grad(m->gates);
        stx_begin(x, STX_TRAIN);
        nll = stx_par_loss(m, token_block(x, t, 2, S + 1, 0, S), token_block(x, t, 2, S + 1, 1, S),
                           NULL, NULL);
        total = stx_par_total(m, nll);
        lat = expected_latency(m, p);
        expected = expected_total(kind, stx_item(x, nll), lat);
        CHECK(CLOSE(stx_item(x, m->latency), lat, 1e-6)
                  && CLOSE(stx_item(x, total), expected, 1e-6),
              "kind %d of %d: total %g, Lat %g, expected %g, %g", kind, of_w, stx_item(x, total),
              stx_item(x, m->latency), expected, lat);
        stx_backward(x, total);
        for (i = 0; i < 4; i++)
            for (k = 0; k < 3; k++) grads[frozen] += fabs((double)m->gates->tensor[i]->grad[k]);
        for (i = 0; i < m->params->count; i++)
            CHECK(largest(m->params->tensor[i]->grad, m->params->tensor[i]->size) < 1e6,
                  "gradient of %s", m->params->name[i]);
    }
    CHECK(grads[0] > 1e-4 && grads[1] == 0 && stx_ok(x), "gradients of the gates: %g, frozen %g %s",
          grads[0], grads[1], stx_error(x));
    stx_begin(x, STX_EVAL);
    nll = stx_par_loss(m, token_block(x, t, 2, S + 1, 0, S), token_block(x, t, 2, S + 1, 1, S),
                       NULL, NULL);
    CHECK(stx_par_total(m, nll) == nll, "a latency penalty in evaluation");
    free(t);
    stx_destroy(x);
}

static void temperatures(void) {
    stx_par_anneal a;
    a.form = STX_PAR_TAU_TARGET;
    a.from = 2;
    a.to = 0.5;
    a.total = 10;
    CHECK(stx_par_tau(&a, 0) == 2 && CLOSE(stx_par_tau(&a, 5), 1, 1e-15)
              && stx_par_tau(&a, 10) == 0.5 && stx_par_tau(&a, 99) == 0.5,
          "target");
    a.form = STX_PAR_TAU_FACTOR;
    CHECK(CLOSE(stx_par_tau(&a, 10), 1, 1e-15), "factor");
    a.total = 0;
    CHECK(CLOSE(stx_par_tau(&a, 0), 1, 1e-15), "no updates");
    CHECK(stx_par_tau(NULL, 3) == 1, "no annealing");
    CHECK(!stx_par_resolve(NULL, NULL, NULL) && !stx_par_count(NULL), "no desc");
}

/* A low temperature must make soft gates hard. */
static void low_temperature(stx_par *m, const int32_t *t) {
    size_t l;
    stx_par_set_tau(m, 1e-4);
    stx_begin(m->ctx, STX_TRAIN);
    stx_par_forward(m, token_block(m->ctx, t, 2, S + 1, 0, S), NULL, NULL);
    for (l = 0; l < 4; l++)
        CHECK(largest(m->w[l]->data, 3) > 0.999, "a gate of %g at tau 1e-4",
              largest(m->w[l]->data, 3));
}

/* The step key of an evaluation with a memory must depend on everything that determines
   its gates. */
static void keys_of_evaluation(stx_par *m, const int32_t *t) {
    stx_ctx *x = m->ctx;
    stx_par_state *s = stx_par_state_create(m, 2);
    stx_real al[3] = {9, 3, 0};
    uint64_t key, k1;
    size_t l;

    stx_begin(x, STX_EVAL);
    stx_par_forward(m, token_block(x, t, 2, S + 1, 0, S), s, s);
    key = stx_par_key(m, NULL, NULL, s, 1);
    CHECK(key == stx_par_key(m, NULL, NULL, s, 1) && key != stx_par_key(m, NULL, NULL, s, 2),
          "keys");
    m->desc.gate_eval = STX_PAR_EVAL_SOFT;
    CHECK(key != stx_par_key(m, NULL, NULL, s, 1), "the key without gate_eval");
    m->desc.gate_eval = STX_PAR_EVAL_ARGMAX;
    stx_set(x, m->gates->tensor[2], al);
    k1 = stx_par_key(m, NULL, NULL, s, 1);
    al[0] = 0;
    stx_set(x, m->gates->tensor[2], al);
    CHECK(k1 != stx_par_key(m, NULL, NULL, s, 1), "the key without the selected branch");
    stx_par_state_free(s);

    /* Without a memory, or before its first call, the step may be an evaluation, so its
       key must depend on the evaluation's gates. */
    s = stx_par_state_create(m, 2);
    for (l = 0; l < 2; l++) {
        key = stx_par_key(m, NULL, NULL, l ? s : NULL, 1);
        m->desc.gate_eval = STX_PAR_EVAL_NOISE;
        k1 = stx_par_key(m, NULL, NULL, l ? s : NULL, 1);
        CHECK(k1 != key, "the key of a first call without gate_eval");
        m->desc.gate_eval = STX_PAR_EVAL_ARGMAX;
        al[0] = al[0] > 0 ? 0 : 9;
        stx_set(x, m->gates->tensor[2], al);
        CHECK(key != stx_par_key(m, NULL, NULL, l ? s : NULL, 1),
              "the key of a first call without the selected branch");
    }
    m->desc.gate_eval = STX_PAR_EVAL_NOISE;
    key = stx_par_key(m, NULL, NULL, s, 1);
    s->calls = 1;
    CHECK(key != stx_par_key(m, NULL, NULL, s, 1), "the key without the call of the noise");
}

/* In training, the step key must depend on the number of uniforms that the caller has
   set, but not on the gates of evaluation. */
static void keys_of_training(stx_par *m, const int32_t *t) {
    stx_ctx *x = m->ctx;
    stx_par_state *s = stx_par_state_create(m, 2);
    stx_real u[24];
    uint64_t key, k1;
    size_t l;

    stx_begin(x, STX_TRAIN);
    stx_par_forward(m, token_block(x, t, 2, S + 1, 0, S), NULL, s);
    key = stx_par_key(m, NULL, NULL, s, 1);
    m->desc.gate_eval = STX_PAR_EVAL_SOFT;
    s->calls++;
    CHECK(key == stx_par_key(m, NULL, NULL, s, 1), "the key in training depends on gate_eval");
    for (l = 0; l < 24; l++) u[l] = (stx_real)0.5;
    stx_par_set_uniforms(m, u, 12);
    key = stx_par_key(m, NULL, NULL, s, 1);
    m->desc.noise = STX_PAR_NOISE_SEQUENCE;
    stx_par_set_uniforms(m, u, 24);
    k1 = stx_par_key(m, NULL, NULL, s, 1);
    CHECK(key != k1 && m->uniforms_count == 24, "the key without the number of uniforms");
    m->desc.noise = STX_PAR_NOISE_STEP;
    stx_fail(x, STX_ERR_ARG, "an error");
    stx_par_set_uniforms(m, NULL, 0);
    stx_clear_error(x);
    CHECK(m->uniforms_count == 0, "NULL has no effect while the context has an error");
}

/* same_length with a memory of fewer than 2 rows must be refused. */
static void short_same_length(stx_par *m, const int32_t *t) {
    static const char expected[] = "same_length: expected a memory of 2 rows or more";
    stx_ctx *x = m->ctx;
    size_t rows;
    m->desc.gate_eval = STX_PAR_EVAL_ARGMAX;
    for (rows = 0; rows < 2; rows++) {
        stx_par_state *s = stx_par_state_create_sized(m, 2, rows);
        stx_par_gen *gen = stx_par_gen_create_sized(m, 2, rows);
        s->same_length = gen->same_length = 1;
        stx_begin(x, STX_EVAL);
        CHECK(!stx_par_forward(m, token_block(x, t, 2, S + 1, 0, S), s, s)
                  && strstr(stx_error(x), expected),
              "%s", stx_error(x));
        stx_clear_error(x);
        CHECK(!stx_par_gen_feed(gen, t, 1) && strstr(stx_error(x), expected), "%s", stx_error(x));
        stx_clear_error(x);
        stx_par_gen_free(gen);
        stx_par_state_free(s);
    }
}

/* Tests penalties, a frozen search, temperatures and keys. */
static void searching(void) {
    stx_par_desc d = small();
    stx_ctx *x = context(1, 3);
    stx_par *m;
    int32_t *t = random_tokens(2, S + 1, V, 4);
    int kind;
    for (kind = STX_PAR_LATENCY_ADD; kind <= STX_PAR_LATENCY_FBNET; kind++) {
        latency(kind, 0);
        latency(kind, 1);
    }
    temperatures();
    d.pattern = NULL;
    d.blocks = 4;
    m = model(x, &d);
    low_temperature(m, t);
    keys_of_evaluation(m, t);
    keys_of_training(m, t);
    short_same_length(m, t);
    stx_par_set_tau(m, 0);
    CHECK(!stx_ok(x) && test_says(stx_error(x), "tau: expected .. got 0"), "%s", stx_error(x));
    free(t);
    stx_destroy(x);
}

/* Checks that `from` expands to `expected`, which is "" if `from` is not a valid
   pattern. */
static void pattern_is(const char *from, const char *expected) {
    char got[64];
    size_t n = stx_par_expand(got, sizeof got, from);
    CHECK(n == strlen(expected) && !strcmp(got, expected), "%s: expected %s, got %s", from,
          expected, got);
}

static void expand(void) {
    char got[4200];
    pattern_is("sfi", "sfi");
    pattern_is("(sfff)6f8", "sfffsfffsfffsfffsfffsfffffffffff");
    pattern_is("(sf)3", "sfsfsf");
    pattern_is("((sf)2i)2s1", "sfsfisfsfis");
    pattern_is("s3(f)2", "sssff");
    pattern_is("", "");
    pattern_is("sx", "");
    pattern_is("(sf", "");
    pattern_is("sf)", "");
    pattern_is("()3", "");
    pattern_is("3s", "");
    pattern_is("s0", "");
    pattern_is("s9999999999999999999999", "");
    pattern_is("s4097", "");
    pattern_is("s64", ""); /* 64 letters and the terminating zero exceed the capacity */
    pattern_is("((((((((((s))))))))))", "");
    CHECK(stx_par_expand(got, sizeof got, "((s64)8)8") == 4096
              && stx_par_expand(got, sizeof got, "((s64)8)9") == 0,
          "the longest pattern");
    CHECK(!stx_par_expand(NULL, 9, "s") && !stx_par_expand(got, 0, "s")
              && !stx_par_expand(got, 9, NULL) && !stx_par_rule(NULL, 0, 3, 3)
              && !stx_par_format(got, 0, "s") && !stx_par_argmax(NULL, got, 9)
              && !stx_par_sample(NULL, 0, 0, got, 9),
          "NULL is accepted");
}

/* Formats a pattern with stx_par_format and expands the result with stx_par_expand. */
static void format(void) {
    char got[64], back[64], again[64], short_[3];
    size_t i, p, n;
    CHECK(stx_par_format(got, sizeof got, "sfffsfffsfffsfffsfffsfffffffffff")
              && !strcmp(got, "(sfff)6f8"),
          "format: %s", got);
    CHECK(stx_par_format(got, sizeof got, "sf") == 2 && !strcmp(got, "sf")
              && stx_par_format(got, sizeof got, "sss") && !strcmp(got, "s3"),
          "format: %s", got);
    CHECK(!stx_par_format(short_, sizeof short_, "sfi") && !short_[0]
              && stx_par_format(short_, sizeof short_, "sf") == 2,
          "a format that exceeds the capacity");
    for (i = 0; i < 200; i++) {
        n = 1 + i * 7 % 61;
        for (p = 0; p < n; p++) got[p] = "sfi"[(size_t)((test_rand() + 1) * 1.4999)];
        if (i % 3 == 0)
            for (p = 4; p < n; p++) got[p] = got[p % 4];
        got[n] = 0;
        CHECK(stx_par_format(back, sizeof back, got) && strlen(back) <= n, "%s becomes %s", got,
              back);
        CHECK(stx_par_expand(again, sizeof again, back) == n && !strcmp(again, got), "%s, %s, %s",
              got, back, again);
    }
}

/* Tests the design rule: floor(L / p) evenly spaced attention blocks, all of them among
   the first floor(2 L / 3) + 1 of the L blocks. */
static void rule(void) {
    char got[64];
    size_t L, p, i, n;
    for (L = 1; L < 60; L++)
        for (p = 3; p < 12; p++) {
            size_t attn = 0, last = 0, gap = 0;
            n = stx_par_rule(got, sizeof got, L, p);
            if (L < p) {
                CHECK(!n, "PAR(%zu,%zu) has no attention", L, p);
                continue;
            }
            CHECK(n == L && strlen(got) == L && got[0] == 's', "PAR(%zu,%zu): %s", L, p, got);
            for (i = 0; i < L; i++)
                if (got[i] == 's') {
                    if (attn == 1) gap = i;
                    CHECK(attn < 2 || i - last == gap, "PAR(%zu,%zu): %s is uneven", L, p, got);
                    attn++;
                    last = i;
                }
            CHECK(attn == L / p && last < 2 * L / 3 + 1, "PAR(%zu,%zu): %s", L, p, got);
        }
    CHECK(stx_par_rule(got, sizeof got, 32, 5) && !strcmp(got, "sfffsfffsfffsfffsfffsfffffffffff"),
          "PAR(32,5): %s", got);
    CHECK(stx_par_rule(got, sizeof got, 24, 5) && !strcmp(got, "sffffsffffsffffsffffffff"),
          "PAR(24,5): %s", got);
    CHECK(!stx_par_rule(got, 32, 32, 5) && !stx_par_rule(got, sizeof got, 32, 0)
              && !stx_par_rule(got, sizeof got, 9999, 5),
          "a rule without capacity or without attention");
}

/* Returns a letter's branch index, that is, the letter's position in "sfi". */
static size_t branch_of(char letter) {
    return (size_t)(strchr("sfi", letter) - "sfi");
}

/* Tests the most probable network of a model, and samples, which must occur with the
   frequencies in p. */
static void argmax_and_samples(void) {
    stx_par_desc d = small();
    stx_ctx *x = context(1, 1);
    stx_par *m;
    char got[64];
    double q[9], often[9] = {0}, off = 0;
    size_t i, p, n;
    d.pattern = NULL;
    d.blocks = 3;
    m = model(x, &d);
    CHECK(stx_par_probs(m, q), "%s", stx_error(x));
    for (i = 0; i < 4000; i++) {
        n = stx_par_sample(m, 5, i, got, sizeof got);
        CHECK(n == 3, "sample %s", got);
        for (p = 0; p < n; p++) often[3 * p + branch_of(got[p])] += 1.0 / 4000;
    }
    for (i = 0; i < 9; i++) raise_worst(&off, fabs(often[i] - q[i]));
    CHECK(off < 0.03, "frequencies of samples differ from p by %g", off);
    CHECK(stx_par_argmax(m, got, sizeof got) == 3, "argmax");
    for (p = 0; p < 3; p++)
        for (i = 0; i < 3; i++)
            CHECK(q[3 * p + i] <= q[3 * p + branch_of(got[p])], "argmax %s", got);
    CHECK(!stx_par_argmax(m, got, 3) && !got[0], "an argmax that exceeds the capacity");
    stx_destroy(x);
}

static void patterns(void) {
    expand();
    format();
    rule();
    argmax_and_samples();
}

/* An exhaustive search for the best cutoffs. */
typedef struct trial {
    const uint64_t *n;
    size_t N;
    stx_par_cuts_desc d;
    double best;
    size_t cut[STX_MAX_CLUSTERS], at[STX_MAX_CLUSTERS];
} trial;

/* Simulates the measured time of a matrix multiplication. */
static double product_time(void *user, size_t columns, size_t inner, double share) {
    double *calls = (double *)user, t = 3 + 0.01 * (double)columns * (double)inner * share * 8;
    ++*calls;
    return t > 20 ? t : 20;
}

/* Returns the cost of cluster k. The cluster has `size` words, which account for
   `count` of the F tokens, and its projection has width h. */
static double cluster_cost(const trial *t, size_t k, size_t h, double size, double count,
                           double F) {
    const size_t K = t->d.clusters, dim = t->d.dim;
    double calls = 0;
    switch (t->d.cost) {
    case STX_PAR_CUTS_REF: return size * count;
    case STX_PAR_CUTS_MACS:
        if (!k) return (double)dim * (size + (double)K - 1) * F;
        return (double)h * count * ((double)dim + size);
    default:
        if (!k) return product_time(&calls, (size_t)size + K - 1, dim, 1);
        return product_time(&calls, h, dim, count / F)
               + product_time(&calls, (size_t)size, h, count / F);
    }
}

/* Returns the cost of the cutoffs t->at according to the definition. */
static double cost_of(const trial *t) {
    double F = 0, count, cost = 0;
    size_t K = t->d.clusters, k, i;
    for (i = 0; i < t->N; i++) F += (double)t->n[i];
    for (k = 0; k < K; k++) {
        size_t from = k ? t->at[k - 1] : 0, to = k + 1 < K ? t->at[k] : t->N,
               h = t->d.proj_dims && k ? t->d.proj_dims[k - 1] : 0;
        if (!h) h = (size_t)floor((double)t->d.dim / pow(t->d.factor, (double)k));
        if (!h) h = 1;
        for (count = 0, i = from; i < to; i++) count += (double)t->n[i];
        cost += cluster_cost(t, k, h, (double)(to - from), count, F);
    }
    return cost;
}

/* Tries all values of the cutoffs k, k + 1, .. that are above `from`. Of two choices
   with equal costs, it keeps the one whose last differing cutoff is larger. */
static void try_all(trial *t, size_t k, size_t from) {
    size_t K = t->d.clusters, i;
    if (k + 1 == K) {
        double c = cost_of(t);
        int later = 0;
        for (i = K - 1; i > 0 && !later; i--)
            if (t->at[i - 1] != t->cut[i - 1]) {
                later = t->at[i - 1] > t->cut[i - 1];
                break;
            }
        if (!(c > t->best) && (c < t->best || later)) {
            t->best = c;
            memcpy(t->cut, t->at, sizeof t->cut);
        }
        return;
    }
    for (i = from + 1; i + (K - 1 - k) <= t->N; i++) {
        t->at[k] = i;
        try_all(t, k + 1, i);
    }
}

static void cut_refused(const char *pattern, const uint64_t *n, size_t N,
                        const stx_par_cuts_desc *d) {
    stx_ctx *x = context(1, 1);
    size_t cut[8];
    CHECK(!stx_par_cuts(x, cut, NULL, n, N, d) && test_says(stx_error(x), pattern)
              && strstr(stx_error(x), "stx_par_cuts"),
          "expected \"%s\", got \"%s\"", pattern, stx_error(x));
    stx_destroy(x);
}

/* The chosen cutoffs must have the lowest cost of all. */
static void best_cuts(int i) {
    static const size_t widths[3] = {5, 1, 3};
    stx_ctx *x = context(1, 1);
    uint64_t n[16];
    trial t;
    size_t k, got[STX_MAX_CLUSTERS];
    double total = 0, calls = 0, scale = 1;

    memset(&t, 0, sizeof t);
    t.N = 1 + (size_t)i % 12;
    for (k = 0; k < t.N; k++)
        n[k] = (uint64_t)((test_rand() + 1) * (i % 5 == 0 ? 1.6 : 20)) + (i % 7 != 0);
    n[0]++;
    t.n = n;
    t.d.clusters = STX_MIN(1 + (size_t)i / 12 % 4, t.N);
    t.d.cost = i % 3;
    t.d.dim = 8;
    t.d.factor = 2;
    t.d.time = product_time;
    t.d.user = &calls;
    if (i % 11 == 0) t.d.proj_dims = widths;
    t.best = HUGE_VAL;
    try_all(&t, 0, 0);
    CHECK(stx_par_cuts(x, got, &total, n, t.N, &t.d), "%s", stx_error(x));
    if (t.d.cost == STX_PAR_CUTS_MACS)
        for (k = 0, scale = 0; k < t.N; k++) scale += (double)n[k];
    CHECK(CLOSE(total, t.best / scale, 1e-12), "case %d, cost %d: %.17g, the least is %.17g", i,
          t.d.cost, total, t.best / scale);
    if (t.d.cost != STX_PAR_CUTS_TIME)
        for (k = 0; k + 1 < t.d.clusters; k++)
            CHECK(got[k] == t.cut[k], "case %d, cost %d: cutoff %zu: expected %zu, got %zu", i,
                  t.d.cost, k, t.cut[k], got[k]);
    stx_destroy(x);
}

static stx_par_cuts_desc cuts_desc(void) {
    stx_par_cuts_desc d;
    memset(&d, 0, sizeof d);
    d.cost = STX_PAR_CUTS_REF;
    d.clusters = 2;
    d.dim = 8;
    d.factor = 2;
    d.time = product_time;
    return d;
}

static void bad_cuts(void) {
    static const uint64_t n[3] = {9, 8, 7}, many[3] = {(uint64_t)1 << 62, (uint64_t)1 << 62, 5},
                          zeros[3] = {0, 0, 0};
    stx_ctx *x = context(1, 1);
    stx_par_cuts_desc d;
    size_t cut[2];

    d = cuts_desc();
    d.clusters = 0;
    cut_refused("clusters: expected .. got 0", n, 3, &d);
    d = cuts_desc();
    d.clusters = 9;
    cut_refused("clusters: expected .. got 9", n, 3, &d);
    d = cuts_desc();
    d.clusters = 4;
    cut_refused("clusters: expected at most the number of words (3), got 4", n, 3, &d);
    d = cuts_desc();
    d.cost = 3;
    cut_refused("cost: expected .. got 3", n, 3, &d);
    d = cuts_desc();
    d.cost = 1;
    d.dim = 0;
    cut_refused("dim: expected .. got 0", n, 3, &d);
    d = cuts_desc();
    d.factor = 0.5;
    cut_refused("factor: expected .. got 0.5", n, 3, &d);
    d = cuts_desc();
    d.cost = 2;
    d.time = NULL;
    cut_refused("time: STX_PAR_CUTS_TIME requires a function, got NULL", n, 3, &d);
    d = cuts_desc();
    cut_refused("do not fit", many, 3, &d);
    cut_refused("do not fit", many, 2, &d);
    cut_refused("words are 0", zeros, 3, &d);
    CHECK(!stx_par_cuts(x, cut, NULL, NULL, 3, &d)
              && strstr(stx_error(x), "counts: expected a pointer"),
          "%s", stx_error(x));
    stx_destroy(x);
}

static void cutting(void) {
    int i;
    for (i = 0; i < 600; i++) best_cuts(i);
    bad_cuts();
}

/* The desc must be refused with an error that matches the pattern. */
static void refused(const char *pattern, const stx_par_desc *d) {
    stx_ctx *x = context(1, 1);
    CHECK(!stx_par_create(x, d) && test_says(stx_error(x), pattern)
              && strstr(stx_error(x), "stx_par_create"),
          "expected \"%s\", got \"%s\"", pattern, stx_error(x));
    CHECK(!stx_par_count(d), "%s: counted", pattern);
    stx_destroy(x);
}

/* Returns a desc with an adaptive vocabulary. */
static stx_par_desc adaptive(void) {
    stx_par_desc d = small();
    d.adaptive_in = 1;
    d.cutoffs = 2;
    d.cutoff[0] = 4;
    d.cutoff[1] = 8;
    d.div_val = 2;
    return d;
}

static void bad_sizes(void) {
    stx_par_desc d;

    d = small();
    d.pattern = "sfx";
    refused("pattern: expected .. got \"sfx\"", &d);
    d = small();
    d.blocks = 3;
    refused("blocks: expected .. got 3", &d);
    d = small();
    d.pattern = NULL;
    d.blocks = 5000;
    refused("blocks: expected .. got 5000", &d);
    d = small();
    d.dim = (size_t)1 << 30;
    refused("dim: expected", &d);
    d = small();
    d.dim = 15;
    d.heads = 3;
    refused("dim: expected .. got 15", &d);
    d = small();
    d.heads = 300;
    refused("heads: expected .. got 300", &d);
    d = small();
    d.heads = 5;
    refused("heads: expected .. got 5", &d);
    d = small();
    d.head_dim = (size_t)1 << 21;
    refused("head_dim: expected", &d);
    d = small();
    d.inner = ((size_t)1 << 31) + 1;
    refused("inner: expected", &d);
    d = small();
    d.segment = ((size_t)1 << 30) + 1;
    refused("segment: expected", &d);
    d = small();
    d.mem = ((size_t)1 << 30) + 1;
    refused("mem: expected", &d);
}

static void bad_positions(void) {
    stx_par_desc d;

    d = small();
    d.positions = 3;
    refused("positions: expected .. got 3", &d);
    d = small();
    d.sines = 2;
    refused("sines: expected .. got 2", &d);
    d = small();
    d.pos_mode = 3;
    refused("pos_mode: expected .. got 3", &d);
    d = small();
    d.positions = STX_PAR_LEARNED;
    d.sines = 1;
    refused("sines: expected .. got 1", &d);
    d = small();
    d.pos_mode = 1;
    refused("pos_mode: expected .. got 1", &d);
    d = small();
    d.sines = 1;
    d.pos_mode = 1;
    d.clamp_len = 3;
    refused("clamp_len: expected .. got 3", &d);
    d = small();
    d.same_length = 1;
    d.mem = 1;
    refused("same_length: expected .. got 1", &d);
    d = small();
    d.same_length = 1;
    d.mem = STX_PAR_NO_ROWS;
    refused("same_length: expected .. got 1", &d);
}

static void bad_norms_and_rates(void) {
    stx_par_desc d;

    d = small();
    d.norm_eps = -1;
    refused("norm_eps: expected .. got -1", &d);
    d = small();
    d.norm_eps = NAN;
    refused("norm_eps: expected", &d);
    d = small();
    d.dropout = 1;
    refused("dropout: expected .. got 1", &d);
    d = small();
    d.attn_dropout = -0.5;
    refused("attn_dropout: expected .. got -0.5", &d);
    d = small();
    d.inner_dropout = 2;
    refused("inner_dropout: expected .. got 2", &d);
    d = small();
    d.pos_dropout = NAN;
    refused("pos_dropout: expected", &d);
    d = small();
    d.positions = STX_PAR_LEARNED;
    d.pos_dropout = 0.1;
    refused("pos_dropout: expected .. got 0.1", &d);
    d.positions = STX_PAR_LEARNED_BIAS;
    refused("pos_dropout: expected .. got 0.1", &d);
    d = small();
    d.no_final_norm = 1;
    refused("no_final_norm: expected .. got 1", &d);
    d = adaptive();
    d.one_proj = 1;
    refused("one_proj: expected .. got 1", &d);
    d = adaptive();
    d.one_proj = 1;
    d.div_val = 1;
    refused("one_proj: expected .. got 1", &d);
    d = small();
    d.one_proj = 1;
    refused("one_proj: expected .. got 1", &d);
    d = small();
    d.final_dropout = 1;
    refused("final_dropout: expected .. got 1", &d);
}

static void bad_search(void) {
    stx_par_desc d;

    d = small();
    d.gate_form = 2;
    refused("gate_form: expected .. got 2", &d);
    d = small();
    d.gate = -1;
    refused("gate: expected .. got -1", &d);
    d = small();
    d.gate_eval = 3;
    refused("gate_eval: expected .. got 3", &d);
    d = small();
    d.noise = 3;
    refused("noise: expected .. got 3", &d);
    d = small();
    d.noise = STX_PAR_NOISE_TOKENS;
    refused("noise_tokens: expected .. got 0", &d);
    d = small();
    d.noise_tokens = 4;
    refused("noise_tokens: expected .. got 4", &d);
    d = small();
    d.pi0[0] = 1;
    refused("pi0: expected .. got 0", &d);
    d = small();
    d.pi0[0] = d.pi0[1] = 1;
    d.pi0[2] = NAN;
    refused("pi0: expected", &d);
    d = small();
    d.tau = -1;
    refused("tau: expected .. got -1", &d);
}

static void bad_words(void) {
    stx_par_desc d;

    d = small();
    d.words_out = 4;
    refused("words_out: expected .. got 4", &d);
    d = small();
    d.emb = 8;
    d.words_out = STX_PAR_OUT_TIED;
    refused("emb: expected .. got 8", &d);
    d = small();
    d.words_out = STX_PAR_OUT_PLAIN;
    d.cutoffs = 1;
    d.cutoff[0] = 3;
    refused("cutoffs: expected .. got 1", &d);
    d = adaptive();
    d.cutoffs = 8;
    refused("cutoffs: expected .. got 8", &d);
    d = adaptive();
    d.cutoff[1] = 3;
    refused("cutoff: expected .. got 3 at position 2", &d);
    d = adaptive();
    d.div_val = 0.5;
    refused("div_val: expected .. got 0.5", &d);
    d = adaptive();
    d.div_val = 5;
    refused("div_val: expected .. got 5", &d);
    d = adaptive();
    d.proj_factor = 0.5;
    refused("proj_factor: expected .. got 0.5", &d);
    d = adaptive();
    d.proj_dims[0] = 3;
    refused("proj_dims: expected .. got 3", &d);
    d = small();
    d.tie_words = 1;
    refused("tie_words: expected .. got 1", &d);
    d = adaptive();
    d.div_val = 1;
    d.tie_projs = 1;
    refused("tie_projs: expected .. got 1", &d);
    d = adaptive();
    d.tie_projs = 3;
    refused("tie_projs: expected .. got 3", &d);
    d = small();
    d.emb_scale = NAN;
    refused("emb_scale: expected", &d);
}

static void bad_pads(void) {
    stx_par_desc d;

    d = small();
    d.pad_id = 2;
    refused("pad_id: expected .. got 2", &d);
    d = small();
    d.pads = 1;
    d.pad_id = V;
    refused("pad_id: expected .. got 13", &d);
    d = small();
    d.vocab = 0;
    d.pads = 1;
    refused("pads: expected .. got 1", &d);
}

static void bad_latency(void) {
    stx_par_desc d;

    d = small();
    d.latency = 4;
    refused("latency: expected .. got 4", &d);
    d = small();
    d.latency = 1;
    refused("cost: expected .. got 0", &d);
    d = small();
    d.latency = 1;
    d.cost[0] = 1;
    refused("latency_weight: expected .. got 0", &d);
    d = small();
    d.latency = 1;
    d.cost[0] = -1;
    refused("cost: expected .. got -1", &d);
    d = small();
    d.latency = 2;
    d.cost[0] = d.latency_weight = 1;
    refused("latency_target: expected .. got 0", &d);
    d = small();
    d.latency_target = 1;
    refused("latency_target: expected .. got 1", &d);
    d = small();
    d.latency_power = 1;
    refused("latency_power: expected .. got 1", &d);
    d = small();
    d.latency_w = 2;
    refused("latency_w: expected .. got 2", &d);
}

static void bad_init(void) {
    stx_par_desc d;

    d = small();
    d.init = 2;
    refused("init: expected .. got 2", &d);
    d = small();
    d.init_std = -1;
    refused("init_std: expected .. got -1", &d);
    d = small();
    d.proj_std = NAN;
    refused("proj_std: expected", &d);
    d = small();
    d.vocab = ((size_t)1 << 31) + 1;
    refused("vocab: expected", &d);
}

/* A resolved desc must resolve to itself. */
static void resolved(void) {
    stx_ctx *x = context(1, 1);
    stx_par_desc d = small(), a = adaptive(), to, again;
    CHECK(!stx_par_create(x, NULL) && strstr(stx_error(x), "expected a desc"), "%s", stx_error(x));
    CHECK(stx_par_resolve(NULL, &a, &to) && stx_par_resolve(NULL, &to, &again)
              && !memcmp(&to, &again, sizeof to),
          "a resolved desc changed");
    CHECK(to.segment == S && to.emb_scale == 4 && to.inner == 20 && to.norm_eps == 1e-5,
          "defaults");
    CHECK(!stx_par_create(NULL, &d) && !stx_par_params(NULL) && !stx_par_state_create(NULL, 1)
              && !stx_par_gen_create(NULL, 1) && !stx_par_forward(NULL, NULL, NULL, NULL)
              && !stx_par_total(NULL, NULL) && !stx_par_as_lm(NULL).model && !stx_par_count(NULL)
              && !stx_par_inherit(NULL, NULL) && !stx_par_state_copy(NULL, 0, NULL, 0, 0)
              && !stx_par_gen_feed(NULL, NULL, 0),
          "NULL is accepted");
    stx_destroy(x);
}

static void bad_descs(void) {
    bad_sizes();
    bad_positions();
    bad_norms_and_rates();
    bad_search();
    bad_words();
    bad_pads();
    bad_latency();
    bad_init();
    resolved();
}

/* Invalid calls must be refused. */
static void errors(void) {
    stx_ctx *x = context(1, 1);
    stx_par_desc d = small(), e = small();
    stx_par *m = model(x, &d), *wide, *bare;
    stx_par_state *s = stx_par_state_create(m, 2), *o;
    stx_par_gen *g = stx_par_gen_create(m, 2);
    int32_t *t = random_tokens(2, S, V, 1);
    stx_real v[4 * D] = {0};
    stx_tensor *h;
    e.vocab = 0;
    e.pattern = "ssss";
    bare = model(x, &e);
    e.dim = 32;
    wide = model(x, &e);
    stx_begin(x, STX_EVAL);
    h = stx_input(x, v, 2, 2, D, 0);
    CHECK(!stx_par_segment(m, stx_input(x, v, 2, 2, D / 2, 0), NULL, NULL, NULL),
          "h of half the width");
    fails(x, "expected h (B,T,16), got (2,2,8)");
    h = stx_input(x, v, 2, 2, D, 0);
    CHECK(!stx_par_segment(m, h, stx_tokens(x, t, 2, 3), NULL, NULL), "pad of 3 tokens");
    fails(x, "expected pad (2,2), as in h, got (2,3)");
    h = stx_input(x, v, 1, 2, D, 0);
    CHECK(!stx_par_segment(m, h, NULL, s, s), "one stream of two");
    fails(x, "expected a memory with B = 1 streams, as in h, got 2");
    h = stx_input(x, v, 2, 2, D, 0);
    CHECK(!stx_par_segment(bare, h, NULL, s, s), "a memory of another model");
    fails(x, "expected a memory of this model");
    CHECK(!stx_par_embed(bare, stx_tokens(x, t, 2, 3)), "tokens without vocab");
    fails(x, "stx_par_embed: the model has no vocabulary");
    CHECK(!stx_par_logits(m, stx_input(x, v, 2, 2, D, 0)), "logits of adaptive words");
    fails(x, "stx_vocab_io_logits");
    CHECK(!stx_par_state_create(m, 0), "a state of no streams");
    fails(x, "expected B >= 1 streams .. got B = 0");
    CHECK(!stx_par_gen_create(m, 0), "a generator of no streams");
    fails(x, "expected B >= 1 streams .. got B = 0");
    o = stx_par_state_create_sized(m, 2, 3);
    CHECK(!stx_par_state_copy(s, 0, o, 0, 1), "a copy from a smaller state");
    fails(x, "expected a memory with M = 12 rows, got 3");
    CHECK(!stx_par_state_set(s, 1, v, 1), "a memory of a feed-forward block");
    fails(x, "expected an attention block .. got block 1");
    CHECK(!stx_par_state_set(o, 0, v, 4), "4 rows");
    fails(x, "at most M = 3 rows, got block 0 and 4 rows");
    CHECK(stx_par_state_set(o, 0, v, 2) && o->mem->layer[0].count == 2
              && stx_par_state_get(o, 0, v),
          "%s", stx_error(x));
    CHECK(!stx_par_gen_set(g, NULL), "NULL");
    fails(x, "stx_par_gen_set");
    CHECK(!stx_par_gen_set(g, o), "different numbers of rows");
    fails(x, "expected the same number of rows in all blocks, got 0 in block 2, but 2 in earlier");
    stx_par_gen_reset_stream(g, 2);
    fails(x, "stream: expected less than 2, got 2");
    CHECK(!stx_par_gen_step(g, stx_input(x, v, 1, 1, D, 0)), "one stream of two");
    fails(x, "expected h (2,T,16), got (1,1,16)");
    CHECK(!stx_par_inherit(wide, bare), "weights of another width");
    fails(x, "expected a weight of the same shape .. got another shape");
    CHECK(!stx_par_inherit(bare, m), "a block without weights");
    fails(x, "layers.1.attn.norm.weight: expected a weight .. got none");
    free(t);
    stx_destroy(x);
}

/* The loss must be the mean over all targets that are not ignored. h: hidden states
   (2,S,D). */
static void ignored_targets(const char *name, stx_par *m, const stx_real *h) {
    const stx_par_desc *d = &m->desc;
    stx_ctx *x = m->ctx;
    stx_tensor *nll, *rows;
    int32_t targets[2 * S];
    double sum = 0;
    size_t i, n = 0;
    for (i = 0; i < 2 * S; i++) {
        targets[i] = (int32_t)(i % V);
        if (i % 3 == 1) targets[i] = i % 2 ? -1 : -7;
        n += targets[i] >= 0 && !(d->pads && !targets[i]);
    }
    stx_begin(x, STX_TRAIN);
    nll = stx_par_nll(m, stx_input(x, h, 2, S, D, 0), stx_tokens(x, targets, 2, S), &rows);
    for (i = 0; rows && i < 2 * S; i++) {
        CHECK((rows->data[i] == 0) == (targets[i] < 0 || (d->pads && !targets[i])),
              "%s: nll of target %ld is %g", name, (long)targets[i], (double)rows->data[i]);
        sum += (double)rows->data[i];
    }
    CHECK(CLOSE(stx_item(x, nll), sum / (double)(d->divide_all ? 2 * S : n), 1e-6),
          "%s: %g, expected %g of %zu %s", name, stx_item(x, nll), sum / (double)n, n,
          stx_error(x));
}

/* Padding must have no effect, in this call or later ones. Also tests ignored targets. */
static void padding(void) {
    static const int32_t mask[2][2 * S] = {{0, 1, 0, 0, 0, 1, 1, 1, 1, 1, 0, 1},
                                           {0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1}};
    int k;
    for (k = 0; k < VARIANTS; k++) {
        const char *name;
        stx_par_desc d = variant(k, &name);
        stx_ctx *x = context(2, 7);
        stx_par *m = quiet_model(x, &d);
        int32_t *t = random_tokens(2, 2 * S, V, 4);
        stx_real *h[2];
        size_t i, call;
        int other;
        for (other = 0; other < 2; other++) {
            stx_par_state *s = stx_par_state_create(m, 2);
            h[other] = (stx_real *)calloc(4 * S * D, sizeof **h);
            for (i = 0; other && i < 4 * S; i++)
                if (mask[i / (2 * S)][i % (2 * S)]) t[i] = (t[i] + 5) % V;
            for (call = 0; call < 2; call++) {
                stx_tensor *y;
                stx_begin(x, STX_EVAL);
                y = stx_par_segment(m, stx_par_embed(m, token_block(x, t, 2, 2 * S, call * S, S)),
                                    token_block(x, mask[0], 2, 2 * S, call * S, S), s, s);
                CHECK(y != NULL, "%s: %s", name, stx_error(x));
                if (y) memcpy(h[other] + call * 2 * S * D, y->data, 2 * S * D * sizeof **h);
            }
        }
        for (i = 0; i < 4 * S; i++) {
            size_t at = i / (2 * S) * S + i % S, b = i / S % 2;
            if (mask[b][at]) continue;
            CHECK(max_difference(h[0] + i * D, h[1] + i * D, D) <= (d.adaptive_in ? TOL : 0),
                  "%s: padding changes token %zu of row %zu", name, at, b);
        }
        ignored_targets(name, m, h[0]);
        free(t);
        free(h[0]);
        free(h[1]);
        stx_destroy(x);
    }
}

/* Returns the desc of a Transformer-XL with a published number of weights. */
static stx_par_desc xl(size_t vocab, size_t dim, size_t heads, size_t inner, size_t layers) {
    static char pattern[64];
    stx_par_desc d;
    memset(&d, 0, sizeof d);
    snprintf(pattern, sizeof pattern, "(sf)%zu", layers);
    d.vocab = vocab;
    d.dim = dim;
    d.heads = heads;
    d.inner = inner;
    d.pattern = pattern;
    d.words_out = STX_PAR_OUT_TIED;
    return d;
}

static void counts(void) {
    stx_par_desc d = xl(204, 512, 8, 2048, 12);
    size_t n = stx_par_count(&d);
    CHECK(n == 41055436 && n / 1000000 == 41, "enwik8, 12 layers: %zu", n);
    d = xl(204, 1024, 8, 3072, 24);
    n = stx_par_count(&d);
    CHECK((n + 500000) / 1000000 == 277, "enwik8, 24 layers: %zu", n);
    d = xl(267735, 410, 10, 2100, 16);
    d.adaptive_in = d.tie_words = 1;
    d.words_out = STX_PAR_OUT_ADAPTIVE;
    d.cutoffs = 3;
    d.cutoff[0] = 20000;
    d.cutoff[1] = 40000;
    d.cutoff[2] = 200000;
    n = stx_par_count(&d);
    CHECK((n + 500000) / 1000000 == 151, "WikiText-103, standard: %zu", n);
    d = xl(267735, 1024, 16, 4096, 18);
    d.adaptive_in = d.tie_words = 1;
    d.words_out = STX_PAR_OUT_ADAPTIVE;
    d.tie_projs = STX_PAR_TIE_BUT_FIRST;
    d.div_val = 4;
    d.cutoffs = 3;
    d.cutoff[0] = 20000;
    d.cutoff[1] = 40000;
    d.cutoff[2] = 200000;
    n = stx_par_count(&d);
    CHECK(n > 255000000 && n < 286000000, "WikiText-103, large: %zu", n);
    memset(&d, 0, sizeof d);
    d.vocab = 12000;
    d.dim = 128;
    d.heads = 4;
    d.inner = 512;
    d.blocks = 6;
    d.cutoffs = 2;
    d.cutoff[0] = 250;
    d.cutoff[1] = 2500;
    stx_par_reference(&d);
    n = stx_par_count(&d);
    CHECK(n + 3 * 6 == 3023676, "the base model of the reference: %zu", n);
    d.vocab = (size_t)1 << 31;
    d.dim = d.heads = (size_t)1 << 20;
    d.heads = 1;
    d.inner = (size_t)1 << 31;
    d.blocks = 4096;
    CHECK(stx_par_count(&d) > 0, "a large model is not counted");
}

/* Checks the mean, the standard deviation and, with bound > 0, the largest magnitude of
   initial values. */
static void spread(stx_par *m, const char *name, double mean, double std, double bound) {
    stx_tensor *t = stx_params_find(m->params, name);
    double sum = 0, squares = 0, top = 0;
    size_t i;
    CHECK(t != NULL, "no %s", name);
    if (!t) return;
    for (i = 0; i < t->size; i++) {
        sum += (double)t->data[i];
        top = fabs((double)t->data[i]) > top ? fabs((double)t->data[i]) : top;
    }
    sum /= (double)t->size;
    for (i = 0; i < t->size; i++)
        squares += ((double)t->data[i] - sum) * ((double)t->data[i] - sum) / (double)t->size;
    CHECK(fabs(sum - mean) <= 5 * std / sqrt((double)t->size)
              && fabs(sqrt(squares) - std) <= 5 * std / sqrt((double)t->size),
          "%s: mean %g, deviation %g; expected %g, %g", name, sum, sqrt(squares), mean, std);
    if (bound > 0)
        CHECK(top <= bound * (1 + 1e-6) && top > 0.95 * bound, "%s: up to %g, expected nearly %g",
              name, top, bound);
}

static void uniform(stx_par *m, const char *name, size_t fan) {
    double a = sqrt(6 / (double)fan);
    spread(m, name, 0, a / sqrt(3), a);
}

static void first_values_of_paper(stx_ctx *x) {
    stx_par_desc d;
    stx_par *m;
    double p[6];
    memset(&d, 0, sizeof d);
    d.vocab = 400;
    d.dim = 64;
    d.heads = 4;
    d.head_dim = 24;
    d.inner = 96;
    d.blocks = 2;
    d.cutoffs = 1;
    d.cutoff[0] = 100;
    d.div_val = 2;
    d.adaptive_in = 1;
    d.own_uv = d.biases = d.pre_norm = 1;
    m = stx_par_create(x, &d);
    CHECK(m != NULL, "%s", stx_error(x));
    if (!m) return;
    spread(m, "layers.0.attn.query.weight", 0, 0.02, 0);
    spread(m, "layers.1.attn.pos.weight", 0, 0.02, 0);
    spread(m, "layers.1.attn.u", 0, 0.02, 0);
    spread(m, "layers.0.ff.fc1.weight", 0, 0.02, 0);
    spread(m, "layers.0.ff.norm.weight", 1, 0.02, 0);
    spread(m, "final_norm.weight", 1, 0.02, 0);
    spread(m, "layers.0.ff.fc2.bias", 0, 0, 0);
    spread(m, "layers.0.attn.kv.bias", 0, 0, 0);
    spread(m, "in_emb.tables.1", 0, 0.02, 0);
    spread(m, "out_emb.tables.0", 0, 0.02, 0);
    spread(m, "out_emb.projs.1", 0, 0.01, 0);
    spread(m, "out_emb.cluster.weight", 0, 0.02, 0);
    CHECK(stx_par_probs(m, p) && CLOSE(p[0], 0.33, 1e-6) && CLOSE(p[4], 0.33, 1e-6)
              && CLOSE(p[5], 0.34, 1e-6),
          "p %g %g %g", p[0], p[4], p[5]);
}

static void first_values_of_reference(stx_ctx *x) {
    stx_par_desc d;
    stx_par *m;
    double pi;
    memset(&d, 0, sizeof d);
    d.vocab = 400;
    d.dim = 64;
    d.heads = 4;
    d.inner = 96;
    d.blocks = 2;
    d.cutoffs = 1;
    d.cutoff[0] = 100;
    stx_par_reference(&d);
    m = stx_par_create(x, &d);
    CHECK(m != NULL, "%s", stx_error(x));
    if (!m) return;
    spread(m, "in_emb.weight", 0, 0.05 / sqrt(3), 0.05);
    uniform(m, "layers.0.attn.query.weight", 4 * 64);
    uniform(m, "layers.0.attn.kv.weight", 4 * 64);
    uniform(m, "layers.0.attn.pos.weight", 2 * 64);
    uniform(m, "layers.0.attn.out.weight", 2 * 64);
    uniform(m, "layers.1.ff.fc1.weight", 64 + 96);
    uniform(m, "layers.1.ff.fc2.weight", 64 + 96);
    uniform(m, "out_emb.tables.0", 64 + 101);
    uniform(m, "out_emb.tables.1", 16 + 300);
    uniform(m, "out_emb.projs.1", 64 + 16);
    spread(m, "layers.0.attn.v", 0, sqrt(2.0 / 68), 2 * sqrt(2.0 / 68) / 0.87962566103423978);
    spread(m, "layers.0.attn.norm.weight", 1, 0, 0);
    spread(m, "out_emb.proj_biases.1", 0, 0, 0);
    pi = (double)m->gates->tensor[0]->data[2];
    CHECK(m->gates->count == 2 && pi == (double)(stx_real)0.34
              && !stx_params_find(m->params, "arch.0"),
          "pi %g", pi);
}

static void first_values(void) {
    stx_ctx *x = context(1, 5);
    first_values_of_paper(x);
    first_values_of_reference(x);
    stx_destroy(x);
}

/* Trains through stx_lm on a text of 4 S tokens. Returns the last nll; *first receives
   the first one. gates: the optimiser of the gates, or NULL if there is no search. */
static double fitted(stx_par *m, const int32_t *t, stx_optim *o, stx_optim *gates, int steps,
                     double rate, double *first) {
    stx_ctx *x = m->ctx;
    stx_lm lm = stx_par_as_lm(m);
    void *s = lm.state_create(lm.model, 1, 0);
    double last = 0;
    int step;
    for (step = 0; step < steps && stx_ok(x); step++) {
        const size_t at = (size_t)step % 4 * S;
        stx_tensor *nll;
        if (!at) lm.state_reset(s);
        stx_begin(x, STX_TRAIN);
        nll = lm.loss(lm.model, stx_tokens(x, t + at, 1, S), stx_tokens(x, t + at + 1, 1, S), s, s);
        last = stx_item(x, nll);
        if (!step) *first = last;
        stx_backward(x, lm.total(lm.model, nll));
        stx_optim_step(o, rate);
        if (gates) stx_optim_step(gates, rate);
        lm.updated(lm.model);
    }
    lm.state_free(s);
    return last;
}

/* A search with two optimisers must be able to learn a text. The network that the
   search finds must memorise the text and generate it. */
static void learned(void) {
    stx_ctx *x = context(1, 2);
    stx_par_desc d = small();
    stx_par *m, *found;
    stx_lm lm;
    stx_sampling best;
    void *g;
    int32_t t[4 * S + 1];
    double first = 0, last;
    char letters[8];
    size_t i, right = 0;

    d.pattern = NULL;
    d.blocks = 4;
    d.mem = S;
    for (i = 0; i <= 4 * S; i++) t[i] = (int32_t)((i * i + 1) % 8 + i % 3);
    m = stx_par_create(x, &d);
    last = fitted(m, t, stx_optim_create(m->params, NULL), stx_optim_create(m->gates, NULL), 400,
                  0.01, &first);
    CHECK(first > 1.5 && last < 0.8, "search: nll from %g to %g %s", first, last, stx_error(x));
    d.pattern = letters;
    CHECK(stx_par_argmax(m, letters, sizeof letters) == 4, "%s", letters);
    if (!strchr(letters, 's')) letters[0] = 's';
    found = stx_par_create(x, &d);
    CHECK(found && stx_par_inherit(found, m), "%s", stx_error(x));
    last = fitted(found, t, stx_optim_create(found->params, NULL), NULL, 300, 0.005, &first);
    CHECK(last < 0.1, "the network %s: nll %g %s", letters, last, stx_error(x));

    lm = stx_par_as_lm(found);
    g = lm.gen_create(lm.model, 1, S);
    memset(&best, 0, sizeof best);
    for (i = 0; i < 4 * S; i++) {
        const stx_real *y = lm.gen_feed(g, t + i, 1);
        right += y && stx_sample(&best, 0, y, V, NULL) == t[i + 1];
    }
    CHECK((double)right > 3.5 * S, "%zu of %d tokens are right %s", right, 4 * S, stx_error(x));
    lm.gen_reset(g);
    lm.gen_free(g);
    stx_destroy(x);
}

/* Runs some steps of a variant in a context that can make `left` allocations. Returns
   nonzero if `left` was sufficient; otherwise the context must report that memory ran
   out. */
static int enough_memory(int k, int left) {
    static const uint64_t word_counts[9] = {9, 8, 7, 6, 5, 4, 3, 2, 1};
    const char *name;
    stx_par_desc d = variant(k, &name);
    int remaining = left, ok;
    stx_ctx *x = limited_context(&remaining);
    int32_t *t;
    stx_par *m;
    stx_par_state *s;
    stx_par_gen *g;
    stx_par_cuts_desc c;
    size_t i, cut[4];

    if (!x) return 0;
    if (d.gate_eval == STX_PAR_EVAL_NOISE) d.gate_eval = STX_PAR_EVAL_SOFT;
    t = random_tokens(1, 40, V, 1);
    m = stx_par_create(x, &d);
    s = stx_par_state_create(m, 1);
    g = stx_par_gen_create(m, 1);
    memset(&c, 0, sizeof c);
    c.clusters = 3;
    for (i = 0; i < 3; i++) {
        stx_tensor *nll;
        stx_begin(x, STX_TRAIN);
        nll = stx_par_loss(m, token_block(x, t, 1, 40, i * S, S),
                           token_block(x, t, 1, 40, i * S + 1, S), s, s);
        stx_backward(x, stx_par_total(m, nll));
    }
    if (stx_ok(x)) stx_par_gen_feed(g, t, 20);
    if (stx_ok(x)) stx_par_cuts(x, cut, NULL, word_counts, 9, &c);
    ok = stx_ok(x);
    CHECK(ok || stx_error_code(x) == STX_ERR_MEMORY, "%s, %d allocations: %s", name, left,
          stx_error(x));
    stx_par_gen_free(g);
    stx_par_state_free(s);
    stx_destroy(x);
    free(t);
    return ok;
}

/* Wherever memory runs out, there must be an error and no crash. */
static void no_memory(void) {
    int k, left;
    for (k = 0; k < VARIANTS; k += 3)
        for (left = 1; left < 4000 && !enough_memory(k, left); left += 1 + left / 6) {
        }
}

/* Invalid uses of a memory must be refused. */
static void memory_errors(void) {
    stx_par_desc d;
    stx_ctx *x = context(1, 1);
    stx_par *m, *shallow;
    stx_par_state *s, *other;
    stx_real rows[2 * 4 * 8];
    int32_t ids[2 * 4] = {1, 2, 3, 4, 5, 6, 7, 8};
    memset(&d, 0, sizeof d);
    d.vocab = 16;
    d.dim = 8;
    d.heads = 2;
    d.inner = 16;
    d.segment = d.mem = 4;
    d.pattern = "sfsf";
    m = stx_par_create(x, &d);
    d.pattern = "sf";
    shallow = stx_par_create(x, &d);
    s = stx_par_state_create(m, 2);
    other = stx_par_state_create(shallow, 2);
    stx_begin(x, STX_EVAL);
    stx_par_forward(m, stx_tokens(x, ids, 2, 4), NULL, s);
    CHECK(stx_par_state_get(s, 0, rows), "%s", stx_error(x));

    stx_par_state_reset_stream(s, 1);
    CHECK(!stx_par_state_get(s, 0, rows), "a memory with missing rows was copied");
    CHECK(test_says(stx_error(x), "stx_par_state_get: some streams lack rows"), "%s", stx_error(x));
    stx_clear_error(x);

    stx_par_key(m, NULL, NULL, other, 0);
    CHECK(test_says(stx_error(x), "stx_par_key: expected a memory of this model"), "%s",
          stx_error(x));
    stx_destroy(x);
}

static void opened(void) {
    static const double cost[2] = {0.7, 1.3};
    int k;
    for (k = 0; k < VARIANTS; k++) {
        const char *name;
        stx_par_desc d = variant(k, &name);
        stx_ctx *x = context(1, 7);
        stx_par *m = stx_par_create(x, &d);
        perturb(x, m->params);
        perturb(x, m->gates);
        stx_par_set_tau(m, 0.3);
        stx_par_set_cost(m, cost);
        saved_and_opened(stx_par_family(), m, name);
        stx_destroy(x);
    }
}

int main(void) {
    memory_errors();
    setvbuf(stdout, NULL, _IOLBF, 0);
    attention_by_hand();
    by_hand();
    mixture();
    one_hot();
    segments();
    resets();
    generation();
    recomputed();
    resumed();
    noise();
    variance();
    searching();
    patterns();
    cutting();
    bad_descs();
    errors();
    padding();
    counts();
    first_values();
    learned();
    no_memory();
    opened();
    return test_end();
}
