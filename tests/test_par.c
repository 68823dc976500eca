/* Behaviour of seqtx_par.h beyond the golden vectors: a one-hot gate is the fixed
   network to the bit, segments with memory are one long segment, generation is token
   by token, causality, streams that do not see each other, resets, states in files,
   noise, patterns and cuts, recomputation, bad descs, published counts, first values,
   an example by hand. */
#include <stdint.h>
#include "../seqtx_par.h"
#include "inner.h"
#include "test.h"
#include <unistd.h>

#ifdef SEQTX_DOUBLE
static const double TOL = 1e-11;
#else
static const double TOL = 2e-5;
#endif
enum { V = 13, S = 6, D = 16 };

static stx_ctx *context(int threads, uint64_t seed) {
    stx_desc d;
    memset(&d, 0, sizeof d);
    d.threads = threads;
    d.seed = seed;
    return stx_create(&d);
}

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

/* Models that differ in all that there is to choose */
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
                                                "biases, own u and v, wide heads",
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
        d.arch = STX_PAR_PI;
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

/* A model whose biases and gates are not what they begin with */
static void shake(stx_ctx *x, stx_params *p) {
    size_t i, k;
    test_state = 88172645463325252u;
    for (i = 0; p && i < p->count; i++) {
        stx_tensor *t = p->tensor[i];
        stx_real *v = (stx_real *)malloc(t->size * sizeof *v);
        stx_get(x, t, v);
        for (k = 0; k < t->size; k++) v[k] += (stx_real)(0.3 * test_rand());
        stx_set(x, t, v);
        free(v);
    }
}

static stx_par *model(stx_ctx *x, const stx_par_desc *d) {
    stx_par *m = stx_par_create(x, d);
    CHECK(m != NULL, "%s", stx_error(x));
    if (!m) return NULL;
    CHECK(stx_par_count(d) == stx_params_size(m->params), "%zu numbers, counted %zu",
          stx_params_size(m->params), stx_par_count(d));
    shake(x, m->params);
    shake(x, m->arch);
    return m;
}

static int32_t *text(size_t B, size_t n, uint64_t seed) {
    int32_t *t = (int32_t *)malloc(B * n * sizeof *t);
    size_t i;
    test_state = 88172645463325252u + seed;
    for (i = 0; i < B * n; i++) t[i] = (int32_t)((test_rand() + 1) * 0.4999 * V);
    return t;
}

static stx_ids *block(stx_ctx *x, const int32_t *t, size_t B, size_t n, size_t at, size_t T) {
    int32_t *buf = (int32_t *)calloc(B * T, sizeof *buf);
    size_t b;
    stx_ids *ids;
    for (b = 0; b < B; b++) memcpy(buf + b * T, t + b * n + at, T * sizeof *buf);
    ids = stx_tokens(x, buf, B, T);
    free(buf);
    return ids;
}

static double difference(const stx_real *a, const stx_real *b, size_t n) {
    double worst = 0;
    size_t i;
    for (i = 0; i < n; i++) {
        double e = fabs((double)a[i] - (double)b[i]);
        if (!(e <= worst)) worst = isnan(e) ? HUGE_VAL : e;
    }
    return worst;
}

static double largest(const stx_real *a, size_t n) {
    double top = 1;
    size_t i;
    for (i = 0; i < n; i++)
        if (fabs((double)a[i]) > top) top = fabs((double)a[i]);
    return top;
}

/* Hidden states (B,n,D) of a text in calls of w tokens; reset[s]: 1 + the stream that
   restarts before call s. They are in `mode` */
static stx_real *by_calls(stx_par *m, const int32_t *t, size_t B, size_t n, size_t w,
                          stx_par_state *s, const int *reset, int mode) {
    stx_real *all = (stx_real *)calloc(B * n * D, sizeof *all);
    size_t at, b, call;
    for (at = call = 0; at < n; at += w, call++) {
        stx_tensor *y;
        size_t T = STX_MIN(w, n - at);
        stx_begin(m->ctx, mode);
        if (reset && reset[call]) stx_par_state_reset_stream(s, (size_t)reset[call] - 1);
        y = stx_par_forward(m, block(m->ctx, t, B, n, at, T), s, s);
        if (!y) break;
        for (b = 0; b < B; b++)
            memcpy(all + (b * n + at) * D, y->data + b * T * D, T * D * sizeof *all);
    }
    CHECK(stx_ok(m->ctx), "%s", stx_error(m->ctx));
    return all;
}

/* Evaluation without noise: what is compared */
static stx_par *quiet_model(stx_ctx *x, stx_par_desc *d) {
    if (d->gate_eval == STX_PAR_EVAL_NOISE) d->gate_eval = STX_PAR_EVAL_SOFT;
    return model(x, d);
}

/* A network that was searched, with its gates one-hot by noise, is the network of
   these blocks with the same weights: hidden states in training and memories, to the
   bit. And so is evaluation by argmax. */
static void one_hot(void) {
    static const size_t dims[] = {16, 70};
    int pre, i, eval, call;
    for (pre = 0; pre < 2; pre++)
        for (i = 0; i < 2; i++)
            for (eval = 0; eval < 2; eval++) {
                stx_ctx *x = context(2, 7);
                stx_par_desc d = small();
                stx_par *m, *alone;
                stx_par_state *s, *o;
                int32_t *t = text(3, 4 * S, 5);
                char letters[7] = "";
                d.pattern = NULL;
                d.blocks = 6;
                d.gate = STX_PAR_ST;
                d.pre_norm = pre;
                d.dim = dims[i];
                d.heads = 2;
                d.recompute = pre;
                m = model(x, &d);
                s = stx_par_state_create(m, 3);
                if (eval)
                    stx_par_argmax(m, letters, sizeof letters);
                else {
                    size_t l, k;
                    stx_begin(x, STX_TRAIN);
                    stx_par_forward(m, block(x, t, 3, 4 * S, 0, S), NULL, NULL);
                    for (l = 0; l < 6; l++)
                        for (k = 0; k < 3; k++)
                            if (m->w[l]->data[k] == 1) letters[l] = "sfi"[k];
                }
                d.pattern = letters;
                alone = stx_par_create(x, &d);
                CHECK(alone && strlen(letters) == 6, "\"%s\" %s", letters, stx_error(x));
                if (!alone) {
                    free(t);
                    stx_destroy(x);
                    continue;
                }
                CHECK(stx_par_inherit(alone, m), "%s", stx_error(x));
                o = stx_par_state_create(alone, 3);
                for (call = 0; call < 4; call++) {
                    stx_tensor *a, *b;
                    size_t l;
                    stx_real u[18];
                    for (l = 0; l < 18; l++)
                        u[l] = (stx_real)(letters[l / 3] == "sfi"[l % 3] ? 0.999999 : 1e-6);
                    stx_begin(x, eval ? STX_EVAL : STX_TRAIN);
                    stx_par_set_uniforms(m, u, 18);
                    a = stx_par_forward(m, block(x, t, 3, 4 * S, (size_t)call * S, S), s, s);
                    b = stx_par_forward(alone, block(x, t, 3, 4 * S, (size_t)call * S, S), o, o);
                    CHECK(a && b && !memcmp(a->data, b->data, a->size * sizeof *a->data),
                          "%s, pre %d, width %zu, eval %d, call %d: differs by %g %s", letters, pre,
                          d.dim, eval, call,
                          a && b ? difference(a->data, b->data, a->size) : HUGE_VAL, stx_error(x));
                    for (l = 0; l < 6; l++)
                        if (letters[l] == 's')
                            CHECK(s->mem->layer[l].count == o->mem->layer[l].count
                                      && s->mem->layer[l].count
                                      && !memcmp(s->mem->layer[l].data, o->mem->layer[l].data,
                                                 3 * o->mem->layer[l].count * d.dim
                                                     * sizeof(stx_real)),
                                  "memory of block %zu", l);
                        else
                            CHECK(o->mem->layer[l].count == 0, "block %zu is %c and remembers", l,
                                  letters[l]);
                }
                free(t);
                stx_destroy(x);
            }
}

/* Calls of any lengths with a memory that holds all before are one long call; and as
   many streams are as many alone. A later token is not felt before, nor in another
   row, to the bit */
static void segments(void) {
    int k;
    for (k = 0; k < VARIANTS; k++) {
        const char *name;
        stx_par_desc d = variant(k, &name);
        stx_ctx *x = context(2, 7);
        stx_par *m;
        const size_t n = 2 * S, B = 2, p = S + 2;
        int32_t *t = text(B, n, 9), keep;
        stx_par_state *s, *one;
        stx_real *a, *b, *c, *r;
        char letters[16] = "";
        int remembers;
        size_t w;
        m = quiet_model(x, &d);
        s = stx_par_state_create(m, B);
        one = stx_par_state_create(m, 1);
        stx_begin(x, STX_EVAL);
        a = by_calls(m, t, B, n, n, NULL, NULL, STX_EVAL);
        if (d.mem == 2 * S && d.pos_mode != STX_PAR_POS_REF)
            for (w = 1; w < n; w++) {
                stx_par_state_reset(s);
                b = by_calls(m, t, B, n, w, s, NULL, STX_EVAL);
                CHECK(difference(a, b, B * n * D) <= TOL * largest(a, B * n * D),
                      "%s: calls of %zu differ by %g", name, w, difference(a, b, B * n * D));
                free(b);
            }
        stx_par_state_reset(s);
        b = by_calls(m, t, B, n, S, s, NULL, STX_EVAL);
        keep = t[p];
        t[p] = (keep + 1) % V;
        stx_par_state_reset(s);
        c = by_calls(m, t, B, n, S, s, NULL, STX_EVAL);
        /* adaptive words multiply as many rows at once as their clusters have tokens:
           another token, another order of sums */
        CHECK(difference(b, c, p * D) <= (d.adaptive_in ? TOL : 0),
              "%s: a token is felt before it comes", name);
        CHECK(difference(b + n * D, c + n * D, n * D) <= (d.adaptive_in ? TOL : 0),
              "%s: a token is felt in the other row", name);
        CHECK(difference(b + p * D, c + p * D, D) > 0, "%s: a token is not felt at its place",
              name);
        t[p] = keep;
        free(c);
        /* of the call before: felt if there is a memory, also a short one by what a
           block above holds */
        t[1] = (t[1] + 1) % V;
        stx_par_state_reset(s);
        c = by_calls(m, t, B, n, S, s, NULL, STX_EVAL);
        stx_par_argmax(m, letters, sizeof letters);
        remembers = d.mem != STX_PAR_NO_ROWS
                    && (strchr(letters, 's') || d.gate_eval == STX_PAR_EVAL_SOFT);
        CHECK((difference(b + S * D, c + S * D, S * D) > 0) == remembers,
              "%s (%s): a call later %g is felt", name, letters,
              difference(b + S * D, c + S * D, S * D));
        r = by_calls(m, t + n, 1, n, S, one, NULL, STX_EVAL);
        CHECK(difference(r, b + n * D, n * D) <= TOL * largest(b, B * n * D),
              "%s: a row alone differs by %g", name, difference(r, b + n * D, n * D));
        free(t);
        free(a);
        free(b);
        free(c);
        free(r);
        stx_destroy(x);
    }
}

/* A stream that is reset is as one that begins */
static void resets(void) {
    int k;
    for (k = 0; k < VARIANTS; k++) {
        static const int reset[8] = {0, 0, 2, 0, 0};
        const char *name;
        stx_par_desc d = variant(k, &name);
        stx_ctx *x = context(2, 7);
        stx_par *m = quiet_model(x, &d);
        const size_t n = 5 * S, from = 2 * S;
        int32_t *t = text(2, n, 11);
        stx_par_state *s = stx_par_state_create(m, 2), *one = stx_par_state_create(m, 1),
                      *cut = stx_par_state_create(m, 1);
        stx_real *a, *r;
        double e;
        size_t l;
        /* positions by how many keys the batch has */
        if (d.pos_mode == STX_PAR_POS_REF) {
            free(t);
            stx_destroy(x);
            continue;
        }
        a = by_calls(m, t, 2, n, S, s, reset, STX_EVAL);
        r = by_calls(m, t + n + from, 1, n - from, S, one, NULL, STX_EVAL);
        e = difference(r, a + (n + from) * D, (n - from) * D);
        CHECK(e <= TOL * largest(a, 2 * n * D), "%s: a reset stream differs from a fresh one by %g",
              name, e);
        CHECK(stx_par_state_copy(cut, 0, s, 1, 1), "%s: %s", name, stx_error(x));
        for (l = 0; l < m->desc.blocks; l++) {
            const stx_memory_layer *p = &cut->mem->layer[l], *q = &one->mem->layer[l];
            size_t there = q->count;
            CHECK(p->count >= there
                      && difference(p->data + (p->count - there) * D, q->data, there * D)
                             <= TOL * largest(q->data, there * D),
                  "%s: rows of block %zu", name, l);
        }
        free(t);
        free(a);
        free(r);
        stx_destroy(x);
    }
}

/* Steps of any lengths with kept keys and values are calls of one token each, also
   after streams were reset and from a memory on */
static void generation(void) {
    int k, resets_too;
    for (k = 0; k < VARIANTS; k++)
        for (resets_too = 0; resets_too < 2; resets_too++) {
            static int reset[6 * S + 3];
            const char *name;
            stx_par_desc d = variant(k, &name);
            stx_ctx *x = context(2, 7);
            stx_par *m = quiet_model(x, &d);
            const size_t B = 2, n = 6 * S;
            int32_t *t = text(B, n, 5);
            stx_par_state *s = stx_par_state_create(m, B), *half = stx_par_state_create(m, B);
            stx_par_gen *g = stx_par_gen_create(m, B);
            stx_real *whole, *got = (stx_real *)calloc(B * n * D, sizeof *got);
            const stx_real *scores;
            size_t i, b, w, bytes = 0;
            double top, e;
            memset(reset, 0, sizeof reset);
            if (resets_too) {
                reset[7] = 2;
                reset[8] = 1;
                reset[20] = 2;
            }
            if (resets_too && d.pos_mode == STX_PAR_POS_REF) {
                free(t);
                free(got);
                stx_destroy(x);
                continue;
            }
            whole = by_calls(m, t, B, n, 1, s, reset, STX_EVAL);
            top = largest(whole, B * n * D);
            for (i = 0; i < n && stx_ok(x); i += w) {
                stx_tensor *y;
                w = STX_MIN(n - i, i < n / 2 ? 1 + i * 7 % 5 : 1);
                for (b = 1; b < w; b++)
                    if (reset[i + b]) w = b;
                stx_begin(x, STX_EVAL);
                if (reset[i]) stx_par_gen_reset_stream(g, (size_t)reset[i] - 1);
                y = stx_par_gen_step(g, stx_par_embed(m, block(x, t, B, n, i, w)));
                CHECK(y && y->dim[1] == w, "%s: %s", name, stx_error(x));
                if (!y) break;
                for (b = 0; b < B; b++)
                    memcpy(got + (b * n + i) * D, y->data + b * w * D, w * D * sizeof *got);
                if (i > 4 * S && !bytes) bytes = stx_bytes(x);
            }
            e = difference(got, whole, B * n * D);
            CHECK(e <= TOL * top, "%s%s: steps differ from calls by %g", name,
                  resets_too ? " with resets" : "", e);
            CHECK(bytes == stx_bytes(x), "%s: steps keep allocating: %zu, %zu bytes", name, bytes,
                  stx_bytes(x));
            for (b = 0; b < m->desc.blocks; b++) /* the manual's memory of generation */
                CHECK(!g->pos[b] || g->cache->layer[b].capacity == 2 * (g->M + !g->M) + 64,
                      "%s: %zu rows for %zu", name, g->cache->layer[b].capacity, g->M);
            /* again, up to the middle, and on by steps */
            free(by_calls(m, t, B, n, 1, half, reset, STX_EVAL));
            stx_par_state_reset(half);
            for (i = 0; i < n / 2; i++) {
                stx_begin(x, STX_EVAL);
                if (reset[i]) stx_par_state_reset_stream(half, (size_t)reset[i] - 1);
                stx_par_forward(m, block(x, t, B, n, i, 1), half, half);
            }
            CHECK(stx_par_gen_set(g, half), "%s: %s", name, stx_error(x));
            for (; i < n && stx_ok(x); i += w) {
                stx_tensor *y;
                w = reset[i + 1] || reset[i + 2] || i + 3 > n ? 1 : 3;
                stx_begin(x, STX_EVAL);
                if (reset[i]) stx_par_gen_reset_stream(g, (size_t)reset[i] - 1);
                y = stx_par_gen_step(g, stx_par_embed(m, block(x, t, B, n, i, w)));
                for (b = 0; y && b < B; b++) {
                    e = difference(y->data + b * w * D, whole + (b * n + i) * D, w * D);
                    CHECK(e <= TOL * top, "%s: on from a memory at %zu, off by %g", name, i, e);
                }
            }
            stx_par_gen_reset(g);
            /* B rows of n / 2: the first row's halves */
            scores = stx_par_gen_feed(g, t, n / 2);
            stx_begin(x, STX_EVAL);
            if (!resets_too) {
                stx_tensor *y = stx_vocab_io_scores(m->vocab_io,
                                                    stx_input(x, whole + (n / 2 - 1) * D, 1, 1, D,
                                                              0));
                e = scores && y ? difference(y->data, scores, V) : HUGE_VAL;
                CHECK(e <= TOL * top * 10, "%s: scores after a prompt are off by %g %s", name, e,
                      stx_error(x));
            }
            CHECK(stx_ok(x), "%s: %s", name, stx_error(x));
            stx_par_gen_free(g);
            free(t);
            free(whole);
            free(got);
            stx_destroy(x);
        }
}

/* One training step; returns what is minimised */
static double train(stx_par *m, stx_optim *o, stx_optim *gates, stx_par_state *s, const int32_t *t,
                    size_t B, size_t n, size_t at) {
    stx_ctx *x = m->ctx;
    stx_tensor *total;
    double v;
    stx_begin(x, STX_TRAIN);
    total = stx_par_total(m, stx_par_loss(m, block(x, t, B, n, at, S), block(x, t, B, n, at + 1, S),
                                          s, s));
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

/* With recomputation: the same losses and gradients, dropout and noise among them. On
   any number of threads the same to rounding, on one number to the bit */
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
            int32_t *t = text(3, 3 * S + 1, 2);
            size_t at = 0;
            d.recompute = run == 1;
            dropouts_on(&d);
            m = model(x, &d);
            s = stx_par_state_create(m, 3);
            for (i = 0; i < 3; i++) loss[run] = train(m, NULL, NULL, s, t, 3, 3 * S + 1, i * S);
            n = stx_params_size(m->params);
            gates = m->arch ? stx_params_size(m->arch) : 0;
            g[run] = (stx_real *)calloc(n + gates, sizeof **g);
            for (i = 0; i < m->params->count; i++) {
                stx_get_grad(x, m->params->tensor[i], g[run] + at);
                at += m->params->tensor[i]->size;
            }
            for (i = 0; m->arch && i < m->arch->count; i++, at += 3)
                stx_get_grad(x, m->arch->tensor[i], g[run] + at);
            CHECK(stx_ok(x), "%s: %s", name, stx_error(x));
            free(t);
            stx_destroy(x);
        }
        for (run = 1; run < 4; run++) {
            double e = difference(g[0], g[run], n + gates), top = largest(g[0], n + gates);
            CHECK(fabs(loss[run] - loss[0]) <= (run == 3 ? TOL : 1e-12) * 10
                      && e <= (run == 2 ? 0 : TOL) * top,
                  "%s, run %d: losses %.9g, %.9g, "
                  "gradients differ by %g",
                  name, run, loss[0], loss[run], e);
        }
        for (i = 0; i < gates; i++) sum += fabs((double)g[0][n + i]);
        CHECK(!gates || sum > 0, "%s: the gates have no gradient", name);
        for (run = 0; run < 4; run++) free(g[run]);
    }
}

static stx_par *loaded(stx_ctx *x, const stx_par_desc *d, const char *path, stx_par_state **s) {
    stx_par *m = stx_par_create(x, d);
    stx_file *f = stx_file_open(x, path);
    uint64_t tick = 0;
    CHECK(m && f && stx_file_verify(f) && stx_params_load(m->params, f, "")
              && (!m->arch || stx_params_load(m->arch, f, "")),
          "%s", stx_error(x));
    *s = stx_par_state_create(m, 2);
    CHECK(stx_par_state_load(*s, f, "train."), "%s", stx_error(x));
    CHECK(stx_file_meta_u64(x, f, "tick", &tick), "%s", stx_error(x));
    stx_set_step_index(x, tick);
    stx_file_close(f);
    return m;
}

/* Stopping after a step, with everything in a file, and going on is as never having
   stopped; and evaluation in between, with another memory, is as if there were none:
   to the bit. (By optimisers without a memory of their own: that of others is
   seqtx.h's affair.) */
static void resumed(void) {
    int k;
    char path[1024];
    test_path(path, sizeof path, "test_par");
    for (k = 0; k < VARIANTS; k++) {
        const char *name;
        stx_par_desc d = variant(k, &name);
        stx_ctx *x = context(1, 3), *y = context(1, 3), *z = context(1, 3);
        stx_par *m, *other, *watched;
        stx_optim_desc od;
        stx_optim *o, *go = NULL, *oo, *ogo, *wo, *wgo = NULL;
        stx_par_state *s, *os, *ws, *es;
        const size_t n = 6 * S + 1;
        int32_t *t = text(2, n, 4);
        stx_writer *w;
        size_t i;
        memset(&od, 0, sizeof od);
        od.kind = STX_SGD;
        dropouts_on(&d);
        m = model(x, &d);
        watched = model(z, &d);
        o = stx_optim_create(m->params, &od);
        wo = stx_optim_create(watched->params, &od);
        if (m->arch) {
            go = stx_optim_create(m->arch, &od);
            wgo = stx_optim_create(watched->arch, &od);
        }
        s = stx_par_state_create(m, 2);
        ws = stx_par_state_create(watched, 2);
        es = stx_par_state_create_sized(watched, 1, 9);
        for (i = 0; i < 3; i++) {
            train(m, o, go, s, t, 2, n, i * S);
            train(watched, wo, wgo, ws, t, 2, n, i * S);
            free(by_calls(watched, t, 1, n, 5, es, NULL, STX_EVAL));
        }
        w = stx_writer_create(x);
        CHECK(stx_params_save(w, m->params, "") && (!m->arch || stx_params_save(w, m->arch, ""))
                  && stx_par_state_save(w, s, "train.")
                  && stx_writer_meta_u64(w, "tick", stx_step_index(x)) && stx_writer_checksum(w)
                  && stx_writer_finish(w, path),
              "%s: %s", name, stx_error(x));
        other = loaded(y, &d, path, &os);
        oo = stx_optim_create(other->params, &od);
        ogo = other->arch ? stx_optim_create(other->arch, &od) : NULL;
        CHECK(os->calls == 3, "%s: %llu calls", name, (unsigned long long)os->calls);
        for (i = 3; i < 6; i++) {
            double a = train(m, o, go, s, t, 2, n, i * S),
                   b = train(other, oo, ogo, os, t, 2, n, i * S);
            double c = train(watched, wo, wgo, ws, t, 2, n, i * S);
            CHECK(a == b && a == c,
                  "%s, step %zu: %.9g, resumed %.9g, evaluated in between %.9g %s", name, i, a, b,
                  c, stx_error(y));
        }
        CHECK(same_params(m->params, other->params) && same_params(m->arch, other->arch),
              "%s: resumed weights differ", name);
        CHECK(same_params(m->params, watched->params) && same_params(m->arch, watched->arch),
              "%s: evaluation is felt", name);
        CHECK(stx_ok(x) && stx_ok(y) && stx_ok(z), "%s: %s%s%s", name, stx_error(x), stx_error(y),
              stx_error(z));
        { /* the weights of a search's file in a fixed network */
            stx_par_desc fixed = d;
            stx_par *a, *b;
            stx_file *f;
            fixed.pattern = "sffi";
            if (m->arch) {
                a = stx_par_create(x, &fixed);
                b = stx_par_create(y, &fixed);
                f = stx_file_open(y, path);
                CHECK(stx_params_load(b->params, f, "") && stx_par_inherit(a, b)
                          && same_params(a->params, b->params)
                          && stx_params_find(b->params, "layers.1.ff.fc1.weight")
                          && !stx_params_find(b->params, "layers.1.attn.query.weight"),
                      "%s: %s%s", name, stx_error(x), stx_error(y));
                stx_file_close(f);
            }
        }
        remove(path);
        free(t);
        stx_destroy(x);
        stx_destroy(y);
        stx_destroy(z);
    }
}

static void fails(stx_ctx *x, const char *want) {
    CHECK(!stx_ok(x) && test_says(stx_error(x), want), "want \"%s\", got \"%s\"", want,
          stx_error(x));
    stx_clear_error(x);
    stx_begin(x, STX_EVAL);
}

/* Uniform numbers of the caller for a model of 4 blocks and 4 draws per call: bad ones
   are an error of stx_par_set_uniforms, and those that were set before stay in use */
static void given_uniforms(stx_par *m, const int32_t *t) {
    stx_ctx *x = m->ctx;
    stx_par_desc step;
    stx_par *other;
    stx_tensor *h;
    stx_real u[48], first[12];
    size_t i;
    for (i = 0; i < 48; i++) u[i] = (stx_real)((double)(29 * i % 47 + 1) / 49);
    stx_par_set_uniforms(m, u, 48);
    CHECK(stx_par_forward(m, block(x, t, 2, 2 * S, 0, S), NULL, NULL), "%s", stx_error(x));
    memcpy(first, m->w[0]->data, sizeof first);
    for (i = 0; i < 7; i++) {
        static const double bad[4] = {0, 1, -0.5, NAN};
        static const size_t counts_[3] = {0, 4, 50};
        stx_real v[50];
        memcpy(v, u, sizeof u);
        if (i < 4) v[5] = (stx_real)bad[i];
        stx_par_set_uniforms(m, v, i < 4 ? 48 : counts_[i - 4]);
        fails(x, i < 4 ? "stx_par_set_uniforms: u[5]: expected a value above 0"
                       : "stx_par_set_uniforms: count: expected a multiple of 3 L = 12 values");
        h = stx_par_forward(m, block(x, t, 2, 2 * S, 0, S), NULL, NULL);
        CHECK(h && !memcmp(first, m->w[0]->data, sizeof first), "others: %s", stx_error(x));
    }
    stx_par_set_uniforms(m, u, 12); /* one draw, which a call may make */
    CHECK(stx_ok(x), "%s", stx_error(x));
    h = stx_par_forward(m, block(x, t, 2, 2 * S, 0, S), NULL, NULL);
    CHECK(!h, "a call of 4 draws with values for one");
    fails(x, "(4,4,3)");
    stx_par_set_uniforms(m, NULL, 0);
    h = stx_par_forward(m, block(x, t, 2, 2 * S, 0, S), NULL, NULL);
    CHECK(h && memcmp(first, m->w[0]->data, sizeof first), "drawn again");
    step = small();
    step.pattern = NULL;
    step.blocks = 2;
    other = model(x, &step);
    stx_par_set_uniforms(other, u, 12);
    fails(x, "count: expected 3 L = 6 values, got 12");
}

/* The manual's numbers: variance of dal_0 for dw = (1,0,0) and equal branches, by
   temperature; at low ones it doubles as the temperature halves */
static void variance(void) {
    static const double want[] = {0.0059, 0.031, 0.10, 0.24, 0.54, 1.12};

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
        CHECK(fabs(squares - want[i]) <= 0.05 * want[i], "tau %g: %g", (double)tau, squares);
    }
    free(w);
    stx_destroy(x);
}

/* Noise: by seed, step, block and draw alone, whatever the threads; never 0 or 1;
   branches come as often as p says; each draw differs; in evaluation the same for the
   same text and another in each call */
static void noise(void) {
    enum { DRAWS = 6000 };

    stx_ctx *x = context(2, 11), *y = context(1, 11), *z = context(1, 12);
    stx_par_gate_args a;
    stx_real al[3] = {0.5f, -0.3f, 0}, tau = 0.5f, *w = (stx_real *)malloc(6 * DRAWS * sizeof *w),
             *hard = w + 3 * DRAWS;
    double p[3], e[3] = {0, 0, 0}, mean[3] = {0, 0, 0}, sum = 0, same = 0;
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
            double want = exp(v[k] - v[best]) / z1;
            CHECK(fabs((double)w[3 * r + k] - want) < 1e-6 && hard[3 * r + k] == (k == best),
                  "draw %zu branch %zu: %g, %g; want %g", r, k, (double)w[3 * r + k],
                  (double)hard[3 * r + k], want);
            mean[k] += want / DRAWS;
            e[k] += (double)hard[3 * r + k] / DRAWS;
        }
        same += r && !memcmp(w + 3 * r, w + 3 * r - 3, 3 * sizeof *w);
    }
    CHECK(same == 0, "draws that are equal");
    for (k = 0; k < 3; k++) /* 4 sigma */
        CHECK(fabs(e[k] - p[k] / sum) < 4 * sqrt(p[k] / sum * (1 - p[k] / sum) / DRAWS),
              "branch %zu: %g of draws, p is %g", k, e[k], p[k] / sum);
    CHECK(mean[0] > mean[2] && mean[2] > mean[1], "soft gates: %g %g %g", mean[0], mean[1],
          mean[2]);
    free(w);
    {
        const char *name;
        stx_par_desc d = variant(20, &name);
        stx_par *m[3];
        stx_par_state *s;
        int32_t *t = text(2, 2 * S, 8);
        stx_real *h[3], first[3], again[3];
        int i;
        d.gate_eval = STX_PAR_EVAL_NOISE;
        m[0] = model(x, &d);
        m[1] = model(y, &d);
        m[2] = model(z, &d);
        for (i = 0; i < 3; i++) h[i] = by_calls(m[i], t, 2, 2 * S, S, NULL, NULL, STX_TRAIN);
        CHECK(difference(h[0], h[1], 4 * S * D) <= TOL && difference(h[0], h[2], 4 * S * D) > 1e-3,
              "by seed: %g, %g", difference(h[0], h[1], 4 * S * D),
              difference(h[0], h[2], 4 * S * D));
        CHECK(m[0]->w[0]->dim[0] == 4 && stx_par_draws(m[0], 2, S) == 4, "%zu draws",
              m[0]->w[0]->dim[0]);
        memcpy(first, m[0]->w[0]->data, sizeof first);
        CHECK(memcmp(first, m[0]->w[0]->data + 3, sizeof first)
                  && memcmp(first, m[0]->w[1]->data, sizeof first),
              "runs, blocks");
        stx_begin(x, STX_TRAIN);
        stx_par_forward(m[0], block(x, t, 2, 2 * S, 0, S), NULL, NULL);
        CHECK(memcmp(first, m[0]->w[0]->data, sizeof first), "two steps with one noise");
        stx_set_step_index(x, stx_step_index(x) - 2);
        stx_begin(x, STX_TRAIN);
        stx_par_forward(m[0], block(x, t, 2, 2 * S, 0, S), NULL, NULL);
        CHECK(!memcmp(first, m[0]->w[0]->data, sizeof first), "a step drawn again");
        s = stx_par_state_create(m[0], 2);
        for (i = 0; i < 2; i++) {
            uint64_t tick = stx_step_index(x);
            stx_par_state_reset(s);
            stx_begin(x, STX_EVAL);
            stx_par_forward(m[0], block(x, t, 2, 2 * S, 0, S), s, s);
            memcpy(i ? again : first, m[0]->w[1]->data, sizeof first);
            stx_begin(x, STX_EVAL);
            stx_par_forward(m[0], block(x, t, 2, 2 * S, 0, S), s, s);
            CHECK(memcmp(first, m[0]->w[1]->data, sizeof first) && stx_step_index(x) == tick,
                  "evaluation's noise");
        }
        CHECK(!memcmp(first, again, sizeof first)
                  && memcmp(m[0]->w[0]->data, m[0]->w[1]->data, sizeof first),
              "evaluation's noise, repeated");
        CHECK(!stx_par_gen_create(m[0], 1) && strstr(stx_error(x), "gate_eval"), "%s",
              stx_error(x));
        stx_clear_error(x);
        given_uniforms(m[0], t);
        for (i = 0; i < 3; i++) free(h[i]);
        free(t);
    }
    stx_destroy(x);
    stx_destroy(y);
    stx_destroy(z);
}

/* The fused mixture against its definition, in every way of sharing gates, and what
   adds and what writes */
static void mixture(void) {
    static const size_t shape[][4] = {
        {6, 5, 6, 6}, {12, 33, 4, 4}, {15, 64, 5, 2}, {130, 129, 65, 9}, {1, 1, 1, 1}};
    int i, norm, hot, part;
    for (i = 0; i < 5; i++)
        for (norm = 0; norm < 2; norm++)
            for (hot = 0; hot < 2; hot++) {
                stx_ctx *x = context(1 + i % 3, 1);
                const size_t N = shape[i][0], C = shape[i][1], n = N * C,
                             draws = N / shape[i][2]
                                     * ((shape[i][2] + shape[i][3] - 1) / shape[i][3]);
                const size_t room = 8 * n + 6 * draws + 8 * C + 4 * N;
                stx_real *v[2];
                stx_par_mix_args a[2];
                double worst[2] = {0, 0};
                for (part = 0; part < 2; part++) {
                    stx_par_mix_args *k = &a[part];
                    stx_real *p = v[part] = (stx_real *)malloc(room * sizeof *p);
                    size_t c;
                    int b;
                    test_state = 12345 + (uint64_t)i;
                    for (c = 0; c < room; c++) p[c] = (stx_real)test_rand();
                    memset(k, 0, sizeof *k);
                    k->N = N;
                    k->C = C;
                    k->T = shape[i][2];
                    k->run = shape[i][3];
                    k->eps = (stx_real)1e-3;
                    k->h = p;
                    k->b[0] = p + n;
                    k->b[1] = p + 2 * n;
                    k->y = p + 3 * n;
                    k->dy = p + 4 * n;
                    k->dh = p + 5 * n;
                    k->db[0] = p + 6 * n;
                    k->db[1] = p + 7 * n;
                    p += 8 * n;
                    if (hot)
                        for (c = 0; c < 3 * draws; c++) p[c] = c % 3 == c / 3 % 3;
                    k->w = p;
                    k->dw = p + 3 * draws;
                    p += 6 * draws;
                    for (b = 0; b < 2 && norm; b++) {
                        k->gain[b] = p;
                        k->shift[b] = p + C;
                        k->dgain[b] = p + 2 * C;
                        k->dshift[b] = p + 3 * C;
                        p += 4 * C;
                        k->mean[b] = v[part] + room - 4 * N + (size_t)b * N;
                        k->rstd[b] = v[part] + room - 2 * N + (size_t)b * N;
                    }
                    k->add_h = k->add[0] = k->add[1] = 1;
                    k->work = (double *)malloc(3 * N * sizeof *k->work);
                    if (part) {
                        stx_par_mix_fwd(x, k);
                        stx_par_mix_bwd(x, k);
                    } else {
                        const stx_real *dy = k->dy;
                        k->dy = NULL;
                        stx_par_mix_plain(k);
                        k->dy = dy;
                        stx_par_mix_plain(k);
                    }
                }
                worst[0] = difference(v[0], v[1], 8 * n);
                worst[1] = difference(v[0] + 8 * n, v[1] + 8 * n, room - 8 * n);
                CHECK(worst[0] <= TOL * largest(v[0], 8 * n)
                          && worst[1] <= TOL * 10 * largest(v[0] + 8 * n, room - 8 * n),
                      "shape %d, norm %d, one-hot %d: off by %g, %g", i, norm, hot, worst[0],
                      worst[1]);
                /* written over what was there; those not wanted left alone */
                a[1].add_h = a[1].add[0] = a[1].add[1] = 0;
                for (part = 0; part < 2; part++)
                    memset(v[part] + 5 * n, 0xff, 3 * n * sizeof(stx_real));
                a[1].db[1] = NULL;
                a[1].dw = NULL;
                a[1].dgain[0] = NULL;
                a[1].dshift[1] = NULL;
                stx_par_mix_bwd(x, &a[1]);
                memset(v[0] + 5 * n, 0, 2 * n * sizeof(stx_real));
                a[0].db[1] = a[0].dw = a[0].dgain[0] = a[0].dshift[1] = NULL;
                stx_par_mix_plain(&a[0]);
                CHECK(difference(v[0] + 5 * n, v[1] + 5 * n, 2 * n) <= TOL * largest(v[0], 5 * n),
                      "shape %d, norm %d: written %g", i, norm,
                      difference(v[0] + 5 * n, v[1] + 5 * n, 2 * n));
                CHECK(!memcmp(v[0] + 7 * n, v[1] + 7 * n, n * sizeof(stx_real)),
                      "shape %d: what is not wanted is written", i);
                for (part = 0; part < 2; part++) {
                    free(v[part]);
                    free(a[part].work);
                }
                stx_destroy(x);
            }
}

/* The manual's example */
static void by_hand(void) {
    stx_par_gate_args a;
    stx_real al[3], tau = 1, u[3], w[3], y[3], cost[3] = {2, 1, 0}, lat, dw[3] = {1, 0, 0},
                    dlat = 0, dal[3] = {0, 0, 0};
    const double g[3] = {0, log(2.0), 0}, want[3] = {0.5, 0.25, 0.25},
                 da[3] = {0.25, -0.125, -0.125};
    int k;
    memset(&a, 0, sizeof a);
    for (k = 0; k < 3; k++) {
        al[k] = (stx_real)(k == 0 ? log(2.0) : k == 1 ? log(0.5) : 0);
        u[k] = (stx_real)exp(-exp(-g[k]));
    }
    a.R = 1;
    a.ldu = 3;
    a.noisy = 1;
    a.latency = 2;
    a.al = al;
    a.tau = &tau;
    a.u = u;
    a.cost = cost;
    a.w = w;
    a.y = y;
    a.lat = &lat;
    stx_par_gate_fwd(NULL, &a);
    for (k = 0; k < 3; k++) CHECK(CLOSE(w[k], want[k], 1e-6), "w[%d] = %g", k, (double)w[k]);
    CHECK(CLOSE(lat, 1.25, 1e-6), "Lat = %g", (double)lat);
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

/* Penalties, a frozen search, temperatures */
static void searching(void) {
    int kind, of;
    for (kind = STX_PAR_LATENCY_ADD; kind <= STX_PAR_LATENCY_FBNET; kind++)
        for (of = 0; of < 2; of++) {
            stx_par_desc d = small();
            stx_ctx *x = context(1, 3);
            stx_par *m;
            int32_t *t = text(2, S + 1, 4);
            stx_tensor *nll, *total;
            double lat = 0, want, p[12], moved[2] = {0, 0};
            size_t l, k, i;
            int frozen;
            d.pattern = NULL;
            d.blocks = 4;
            d.latency = kind;
            d.latency_w = of;
            d.cost[0] = 1.5;
            d.cost[1] = 0.75;
            d.latency_weight = 0.4;
            d.noise = STX_PAR_NOISE_SEQUENCE;
            if (kind == STX_PAR_LATENCY_HINGE) d.latency_target = 2;
            m = model(x, &d);
            CHECK(stx_par_probs(m, p), "%s", stx_error(x));
            for (frozen = 0; frozen < 2; frozen++) {
                stx_par_freeze(m, frozen);
                stx_params_zero_grad(m->params);
                stx_params_zero_grad(m->arch);
                stx_begin(x, STX_TRAIN);
                nll = stx_par_loss(m, block(x, t, 2, S + 1, 0, S), block(x, t, 2, S + 1, 1, S),
                                   NULL, NULL);
                total = stx_par_total(m, nll);
                for (lat = 0, l = 0; l < 4; l++)
                    for (k = 0; k < 2; k++)
                        lat += d.cost[k]
                               * (of ? ((double)m->w[l]->data[k] + (double)m->w[l]->data[3 + k]) / 2
                                     : p[3 * l + k]);
                want = stx_item(x, nll);
                if (kind == STX_PAR_LATENCY_ADD)
                    want += 0.4 * lat;
                else if (kind == STX_PAR_LATENCY_HINGE)
                    want += 0.4 * (lat > 2 ? lat / 2 - 1 : 0);
                else
                    want *= 0.4 * pow(log(lat), 0.6);
                CHECK(CLOSE(stx_item(x, m->latency), lat, 1e-6)
                          && CLOSE(stx_item(x, total), want, 1e-6),
                      "kind %d of %d: %g of Lat %g, expected %g, %g", kind, of, stx_item(x, total),
                      stx_item(x, m->latency), want, lat);
                stx_backward(x, total);
                for (i = 0; i < 4; i++)
                    for (k = 0; k < 3; k++)
                        moved[frozen] += fabs((double)m->arch->tensor[i]->grad[k]);
                for (i = 0; i < m->params->count; i++)
                    CHECK(largest(m->params->tensor[i]->grad, m->params->tensor[i]->size) < 1e6,
                          "grad");
            }
            CHECK(moved[0] > 1e-4 && moved[1] == 0 && stx_ok(x), "gates get %g, frozen %g %s",
                  moved[0], moved[1], stx_error(x));
            stx_begin(x, STX_EVAL);
            nll = stx_par_loss(m, block(x, t, 2, S + 1, 0, S), block(x, t, 2, S + 1, 1, S), NULL,
                               NULL);
            CHECK(stx_par_total(m, nll) == nll, "latency in evaluation");
            free(t);
            stx_destroy(x);
        }
    {
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
    { /* a low temperature makes soft gates hard; what a step decides is in its key */
        stx_par_desc d = small();
        stx_ctx *x = context(1, 3);
        stx_par *m;
        stx_par_state *s;
        int32_t *t = text(2, S + 1, 4);
        uint64_t key, k1;
        stx_real al[3] = {9, 3, 0};
        size_t l;
        d.pattern = NULL;
        d.blocks = 4;
        m = model(x, &d);
        s = stx_par_state_create(m, 2);
        stx_par_set_tau(m, 1e-4);
        stx_begin(x, STX_TRAIN);
        stx_par_forward(m, block(x, t, 2, S + 1, 0, S), NULL, NULL);
        for (l = 0; l < 4; l++)
            CHECK(largest(m->w[l]->data, 3) > 0.999, "a gate of %g at tau 1e-4",
                  largest(m->w[l]->data, 3));
        stx_begin(x, STX_EVAL);
        stx_par_forward(m, block(x, t, 2, S + 1, 0, S), s, s);
        key = stx_par_key(m, NULL, NULL, s, 1);
        CHECK(key == stx_par_key(m, NULL, NULL, s, 1) && key != stx_par_key(m, NULL, NULL, s, 2),
              "keys");
        m->desc.gate_eval = STX_PAR_EVAL_SOFT;
        CHECK(key != (k1 = stx_par_key(m, NULL, NULL, s, 1)), "another gate_eval");
        m->desc.gate_eval = STX_PAR_EVAL_ARGMAX;
        stx_set(x, m->arch->tensor[2], al);
        k1 = stx_par_key(m, NULL, NULL, s, 1);
        al[0] = 0;
        stx_set(x, m->arch->tensor[2], al);
        CHECK(k1 != stx_par_key(m, NULL, NULL, s, 1), "another branch");
        /* before a memory's first call, and without one, it may be evaluation, too; of
           training evaluation's gates decide nothing */
        stx_par_state_free(s);
        s = stx_par_state_create(m, 2);
        for (l = 0; l < 2; l++) {
            key = stx_par_key(m, NULL, NULL, l ? s : NULL, 1);
            m->desc.gate_eval = STX_PAR_EVAL_NOISE;
            k1 = stx_par_key(m, NULL, NULL, l ? s : NULL, 1);
            CHECK(k1 != key, "another gate_eval of the first call");
            m->desc.gate_eval = STX_PAR_EVAL_ARGMAX;
            al[0] = al[0] > 0 ? 0 : 9;
            stx_set(x, m->arch->tensor[2], al);
            CHECK(key != stx_par_key(m, NULL, NULL, l ? s : NULL, 1),
                  "another branch in the first call");
        }
        m->desc.gate_eval = STX_PAR_EVAL_NOISE;
        key = stx_par_key(m, NULL, NULL, s, 1);
        s->calls = 1;
        CHECK(key != stx_par_key(m, NULL, NULL, s, 1), "another call's noise");
        stx_begin(x, STX_TRAIN);
        stx_par_forward(m, block(x, t, 2, S + 1, 0, S), NULL, s);
        key = stx_par_key(m, NULL, NULL, s, 1);
        m->desc.gate_eval = STX_PAR_EVAL_SOFT;
        s->calls++;
        CHECK(key == stx_par_key(m, NULL, NULL, s, 1), "in training the same");
        /* noise from outside: another count is another step, and NULL holds in error,
           too */
        {
            stx_real u[24];
            for (l = 0; l < 24; l++) u[l] = (stx_real)0.5;
            stx_par_set_uniforms(m, u, 12);
            key = stx_par_key(m, NULL, NULL, s, 1);
            m->desc.noise = STX_PAR_NOISE_SEQUENCE;
            stx_par_set_uniforms(m, u, 24);
            k1 = stx_par_key(m, NULL, NULL, s, 1);
            CHECK(key != k1 && m->uniforms_count == 24, "another count of noise");
            m->desc.noise = STX_PAR_NOISE_STEP;
            stx_fail(x, STX_ERR_ARG, "an error");
            stx_par_set_uniforms(m, NULL, 0);
            stx_clear_error(x);
            CHECK(m->uniforms_count == 0, "noise that stays after NULL");
        }
        m->desc.gate_eval = STX_PAR_EVAL_ARGMAX;
        for (l = 0; l < 2; l++) {
            stx_par_state *small = stx_par_state_create_sized(m, 2, l);
            stx_par_gen *gen = stx_par_gen_create_sized(m, 2, l);
            small->same_length = gen->same_length = 1;
            stx_begin(x, STX_EVAL);
            CHECK(!stx_par_forward(m, block(x, t, 2, S + 1, 0, S), small, small)
                      && strstr(stx_error(x),
                                "same_length: expected 0, or a memory of 2 rows or more"),
                  "%s", stx_error(x));
            stx_clear_error(x);
            CHECK(!stx_par_gen_feed(gen, t, 1)
                      && strstr(stx_error(x),
                                "same_length: expected 0, or a memory of 2 rows or more"),
                  "%s", stx_error(x));
            stx_clear_error(x);
            stx_par_gen_free(gen);
            stx_par_state_free(small);
        }
        stx_par_set_tau(m, 0);
        CHECK(!stx_ok(x) && test_says(stx_error(x), "tau: expected .. got 0"), "%s", stx_error(x));
        free(t);
        stx_destroy(x);
    }
}

static void pattern_is(const char *from, const char *want) {
    char got[64];
    size_t n = stx_par_expand(got, sizeof got, from);
    CHECK(n == strlen(want) && !strcmp(got, want), "%s is %s, expected %s", from, got, want);
}

static void patterns(void) {
    char got[4200], back[4200], short_[3];
    size_t L, p, i, n;
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
    pattern_is("s64", ""); /* no room for 64 and the 0 */
    pattern_is("((((((((((s))))))))))", "");
    CHECK(stx_par_expand(got, sizeof got, "((s64)8)8") == 4096
              && stx_par_expand(got, sizeof got, "((s64)8)9") == 0,
          "the longest");
    CHECK(!stx_par_expand(NULL, 9, "s") && !stx_par_expand(got, 0, "s")
              && !stx_par_expand(got, 9, NULL) && !stx_par_rule(NULL, 0, 3, 3)
              && !stx_par_format(got, 0, "s") && !stx_par_argmax(NULL, got, 9)
              && !stx_par_sample(NULL, 0, 0, got, 9),
          "NULLs");
    CHECK(stx_par_format(got, sizeof got, "sfffsfffsfffsfffsfffsfffffffffff")
              && !strcmp(got, "(sfff)6f8"),
          "format: %s", got);
    CHECK(stx_par_format(got, sizeof got, "sf") == 2 && !strcmp(got, "sf")
              && stx_par_format(got, sizeof got, "sss") && !strcmp(got, "s3"),
          "format: %s", got);
    CHECK(!stx_par_format(short_, sizeof short_, "sfi") && !short_[0]
              && stx_par_format(short_, sizeof short_, "sf") == 2,
          "no room");
    for (i = 0; i < 200; i++) { /* back and forth */
        n = 1 + i * 7 % 61;
        for (p = 0; p < n; p++) got[p] = "sfi"[(size_t)((test_rand() + 1) * 1.4999)];
        if (i % 3 == 0)
            for (p = 4; p < n; p++) got[p] = got[p % 4];
        got[n] = 0;
        CHECK(stx_par_format(back, sizeof back, got) && strlen(back) <= n, "%s becomes %s", got,
              back);
        {
            char again[64];
            CHECK(stx_par_expand(again, sizeof again, back) == n && !strcmp(again, got),
                  "%s, %s, %s", got, back, again);
        }
    }
    /* the rule: floor(L / p) attentions, evenly, within two thirds and a block */
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
          "no room, no rule");
    { /* of a model: argmax, and samples as often as p says */
        stx_par_desc d = small();
        stx_ctx *x = context(1, 1);
        stx_par *m;
        double q[9], often[9] = {0}, off = 0;
        d.pattern = NULL;
        d.blocks = 3;
        m = model(x, &d);
        CHECK(stx_par_probs(m, q), "%s", stx_error(x));
        for (i = 0; i < 4000; i++) {
            n = stx_par_sample(m, 5, i, got, sizeof got);
            CHECK(n == 3, "sample %s", got);
            for (p = 0; p < n; p++)
                often[3 * p + (got[p] == 's' ? 0 : got[p] == 'f' ? 1 : 2)] += 1.0 / 4000;
        }
        for (i = 0; i < 9; i++) off = fabs(often[i] - q[i]) > off ? fabs(often[i] - q[i]) : off;
        CHECK(off < 0.03, "samples are off by %g", off);
        CHECK(stx_par_argmax(m, got, sizeof got) == 3, "argmax");
        for (p = 0; p < 3; p++)
            for (i = 0; i < 3; i++)
                CHECK(q[3 * p + i] <= q[3 * p
                                        + (got[p] == 's'   ? 0
                                           : got[p] == 'f' ? 1
                                                           : 2)],
                      "argmax %s", got);
        CHECK(!stx_par_argmax(m, got, 3) && !got[0], "no room");
        stx_destroy(x);
    }
}

/* Cuts against all that there are */
typedef struct trial {
    const uint64_t *n;
    size_t N;
    stx_par_cuts_desc d;
    double best;
    size_t cut[STX_MAX_CLUSTERS], at[STX_MAX_CLUSTERS];
} trial;

static double product_time(void *user, size_t columns, size_t inner, double share) {
    double *calls = (double *)user, t = 3 + 0.01 * (double)columns * (double)inner * share * 8;
    ++*calls;
    return t > 20 ? t : 20;
}

static double cost_of(const trial *t) {
    double F = 0, c, cost = 0, calls = 0;
    size_t K = t->d.clusters, k, i;
    for (i = 0; i < t->N; i++) F += (double)t->n[i];
    for (k = 0; k < K; k++) {
        size_t from = k ? t->at[k - 1] : 0, to = k + 1 < K ? t->at[k] : t->N,
               h = t->d.proj_dims && k ? t->d.proj_dims[k - 1] : 0;
        double dim = (double)t->d.dim, size = (double)(to - from);
        if (!h) h = (size_t)floor(dim / pow(t->d.factor, (double)k));
        if (!h) h = 1;
        for (c = 0, i = from; i < to; i++) c += (double)t->n[i];
        if (t->d.cost == STX_PAR_CUTS_REF)
            cost += size * c;
        else if (t->d.cost == STX_PAR_CUTS_MACS)
            cost += k ? (double)h * c * (dim + size) : dim * (size + (double)K - 1) * F;
        else
            cost += k ? product_time(&calls, h, t->d.dim, c / F)
                            + product_time(&calls, (size_t)size, h, c / F)
                      : product_time(&calls, (size_t)size + K - 1, t->d.dim, 1);
    }
    return cost;
}

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

static void cut_refused(const char *want, const uint64_t *n, size_t N, const stx_par_cuts_desc *d) {
    stx_ctx *x = context(1, 1);
    size_t cut[8];
    CHECK(!stx_par_cuts(x, cut, NULL, n, N, d) && test_says(stx_error(x), want)
              && strstr(stx_error(x), "stx_par_cuts"),
          "want \"%s\", got \"%s\"", want, stx_error(x));
    stx_destroy(x);
}

static void cutting(void) {
    static const size_t widths[3] = {5, 1, 3};
    stx_ctx *x = context(1, 1);
    stx_par_cuts_desc d;
    uint64_t n[16], many[3] = {(uint64_t)1 << 62, (uint64_t)1 << 62, 5}, zeros[3] = {0, 0, 0};
    double calls = 0;
    int i;
    for (i = 0; i < 600; i++) {
        trial t;
        size_t k, got[STX_MAX_CLUSTERS];
        double total = 0;
        memset(&t, 0, sizeof t);
        memset(&d, 0, sizeof d);
        t.N = 1 + (size_t)i % 12;
        for (k = 0; k < t.N; k++)
            n[k] = (uint64_t)((test_rand() + 1) * (i % 5 == 0 ? 1.6 : 20)) + (i % 7 != 0);
        n[0]++;
        d.clusters = 1 + (size_t)i / 12 % 4;
        if (d.clusters > t.N) d.clusters = t.N;
        d.cost = i % 3;
        d.dim = 8;
        d.factor = 2;
        d.time = product_time;
        d.user = &calls;
        if (i % 11 == 0) d.proj_dims = widths;
        t.n = n;
        t.d = d;
        t.best = HUGE_VAL;
        try_all(&t, 0, 0);
        CHECK(stx_par_cuts(x, got, &total, n, t.N, &d), "%s", stx_error(x));
        if (d.cost == STX_PAR_CUTS_MACS)
            for (k = 0, calls = 0; k < t.N; k++) calls += (double)n[k];
        else
            calls = 1;
        CHECK(CLOSE(total, t.best / calls, 1e-12), "case %d, cost %d: %.17g, the least is %.17g", i,
              d.cost, total, t.best / calls);
        if (d.cost != STX_PAR_CUTS_TIME)
            for (k = 0; k + 1 < d.clusters; k++)
                CHECK(got[k] == t.cut[k], "case %d, cost %d: cutoff %zu is %zu, expected %zu", i,
                      d.cost, k, got[k], t.cut[k]);
    }
    d.cost = STX_PAR_CUTS_REF;
    d.clusters = 2;
    d.proj_dims = NULL;
    for (i = 0; i < 3; i++) n[i] = 9 - (uint64_t)i;
    {
        stx_par_cuts_desc e = d;
        e.clusters = 0;
        cut_refused("clusters: expected .. got 0", n, 3, &e);
    }
    {
        stx_par_cuts_desc e = d;
        e.clusters = 9;
        cut_refused("clusters: expected .. got 9", n, 3, &e);
    }
    {
        stx_par_cuts_desc e = d;
        e.clusters = 4;
        cut_refused("clusters: expected at most the 3 words, got 4", n, 3, &e);
    }
    {
        stx_par_cuts_desc e = d;
        e.cost = 3;
        cut_refused("cost: expected .. got 3", n, 3, &e);
    }
    {
        stx_par_cuts_desc e = d;
        e.cost = 1;
        e.dim = 0;
        cut_refused("dim: expected .. got 0", n, 3, &e);
    }
    {
        stx_par_cuts_desc e = d;
        e.factor = 0.5;
        cut_refused("factor: expected .. got 0.5", n, 3, &e);
    }
    {
        stx_par_cuts_desc e = d;
        e.cost = 2;
        e.time = NULL;
        cut_refused("time: expected .. got 0", n, 3, &e);
    }
    cut_refused("do not fit", many, 3, &d);
    cut_refused("do not fit", many, 2, &d);
    cut_refused("all 0", zeros, 3, &d);
    {
        size_t cut[2];
        CHECK(!stx_par_cuts(x, cut, NULL, NULL, 3, &d)
                  && strstr(stx_error(x), "counts: expected a pointer"),
              "%s", stx_error(x));
    }
    stx_destroy(x);
}

static void refused(const char *want, const stx_par_desc *d) {
    stx_ctx *x = context(1, 1);
    CHECK(!stx_par_create(x, d) && test_says(stx_error(x), want)
              && strstr(stx_error(x), "stx_par_create"),
          "want \"%s\", got \"%s\"", want, stx_error(x));
    CHECK(!stx_par_count(d), "%s: counted", want);
    stx_destroy(x);
}

static void bad_descs(void) {
    stx_par_desc o = small(), a = o, d;
    a.adaptive_in = 1;
    a.cutoffs = 2;
    a.cutoff[0] = 4;
    a.cutoff[1] = 8;
    a.div_val = 2;
    d = o;
    d.pattern = "sfx";
    refused("pattern: expected .. got \"sfx\"", &d);
    d = o;
    d.blocks = 3;
    refused("blocks: expected .. got 3", &d);
    d = o;
    d.pattern = NULL;
    d.blocks = 5000;
    refused("blocks: expected .. got 5000", &d);
    d = o;
    d.dim = (size_t)1 << 30;
    refused("dim: expected", &d);
    d = o;
    d.dim = 15;
    d.heads = 3;
    refused("dim: expected .. got 15", &d);
    d = o;
    d.heads = 300;
    refused("heads: expected .. got 300", &d);
    d = o;
    d.heads = 5;
    refused("heads: expected .. got 5", &d);
    d = o;
    d.head_dim = (size_t)1 << 21;
    refused("head_dim: expected", &d);
    d = o;
    d.inner = ((size_t)1 << 31) + 1;
    refused("inner: expected", &d);
    d = o;
    d.segment = ((size_t)1 << 30) + 1;
    refused("segment: expected", &d);
    d = o;
    d.mem = ((size_t)1 << 30) + 1;
    refused("mem: expected", &d);
    d = o;
    d.positions = 3;
    refused("positions: expected .. got 3", &d);
    d = o;
    d.sines = 2;
    refused("sines: expected .. got 2", &d);
    d = o;
    d.pos_mode = 3;
    refused("pos_mode: expected .. got 3", &d);
    d = o;
    d.positions = STX_PAR_LEARNED;
    d.sines = 1;
    refused("sines: expected .. got 1", &d);
    d = o;
    d.pos_mode = 1;
    refused("pos_mode: expected .. got 1", &d);
    d = o;
    d.sines = 1;
    d.pos_mode = 1;
    d.clamp_len = 3;
    refused("clamp_len: expected .. got 3", &d);
    d = o;
    d.same_length = 1;
    d.mem = 1;
    refused("same_length: expected .. got 1", &d);
    d = o;
    d.same_length = 1;
    d.mem = STX_PAR_NO_ROWS;
    refused("same_length: expected .. got 1", &d);
    d = o;
    d.norm_eps = -1;
    refused("norm_eps: expected .. got -1", &d);
    d = o;
    d.norm_eps = NAN;
    refused("norm_eps: expected", &d);
    d = o;
    d.dropout = 1;
    refused("dropout: expected .. got 1", &d);
    d = o;
    d.attn_dropout = -0.5;
    refused("attn_dropout: expected .. got -0.5", &d);
    d = o;
    d.inner_dropout = 2;
    refused("inner_dropout: expected .. got 2", &d);
    d = o;
    d.pos_dropout = NAN;
    refused("pos_dropout: expected", &d);
    d = o;
    d.positions = STX_PAR_LEARNED;
    d.pos_dropout = 0.1;
    refused("pos_dropout: expected .. got 0.1", &d);
    d.positions = STX_PAR_LEARNED_BIAS;
    refused("pos_dropout: expected .. got 0.1", &d);
    d = o;
    d.no_final_norm = 1;
    refused("no_final_norm: expected .. got 1", &d);
    d = a;
    d.one_proj = 1;
    refused("one_proj: expected .. got 1", &d);
    d = a;
    d.one_proj = 1;
    d.div_val = 1;
    refused("one_proj: expected .. got 1", &d);
    d = o;
    d.one_proj = 1;
    refused("one_proj: expected .. got 1", &d);
    d = o;
    d.final_dropout = 1;
    refused("final_dropout: expected .. got 1", &d);
    d = o;
    d.arch = 2;
    refused("arch: expected .. got 2", &d);
    d = o;
    d.gate = -1;
    refused("gate: expected .. got -1", &d);
    d = o;
    d.gate_eval = 3;
    refused("gate_eval: expected .. got 3", &d);
    d = o;
    d.noise = 3;
    refused("noise: expected .. got 3", &d);
    d = o;
    d.noise = STX_PAR_NOISE_TOKENS;
    refused("noise_tokens: expected .. got 0", &d);
    d = o;
    d.noise_tokens = 4;
    refused("noise_tokens: expected .. got 4", &d);
    d = o;
    d.pi0[0] = 1;
    refused("pi0: expected .. got 0", &d);
    d = o;
    d.pi0[0] = d.pi0[1] = 1;
    d.pi0[2] = NAN;
    refused("pi0: expected", &d);
    d = o;
    d.tau = -1;
    refused("tau: expected .. got -1", &d);
    d = o;
    d.words_out = 4;
    refused("words_out: expected .. got 4", &d);
    d = o;
    d.emb = 8;
    d.words_out = STX_PAR_OUT_TIED;
    refused("emb: expected .. got 8", &d);
    d = o;
    d.words_out = STX_PAR_OUT_PLAIN;
    d.cutoffs = 1;
    d.cutoff[0] = 3;
    refused("cutoffs: expected .. got 1", &d);
    d = a;
    d.cutoffs = 8;
    refused("cutoffs: expected .. got 8", &d);
    d = a;
    d.cutoff[1] = 3;
    refused("cutoff: expected .. got 3 at position 2", &d);
    d = a;
    d.div_val = 0.5;
    refused("div_val: expected .. got 0.5", &d);
    d = a;
    d.div_val = 5;
    refused("div_val: expected .. got 5", &d);
    d = a;
    d.proj_factor = 0.5;
    refused("proj_factor: expected .. got 0.5", &d);
    d = a;
    d.proj_dims[0] = 3;
    refused("proj_dims: expected .. got 3", &d);
    d = o;
    d.tie_words = 1;
    refused("tie_words: expected .. got 1", &d);
    d = a;
    d.div_val = 1;
    d.tie_projs = 1;
    refused("tie_projs: expected .. got 1", &d);
    d = a;
    d.tie_projs = 3;
    refused("tie_projs: expected .. got 3", &d);
    d = o;
    d.emb_scale = NAN;
    refused("emb_scale: expected", &d);
    d = o;
    d.pad_id = 2;
    refused("pad_id: expected .. got 2", &d);
    d = o;
    d.pads = 1;
    d.pad_id = V;
    refused("pad_id: expected .. got 13", &d);
    d = o;
    d.vocab = 0;
    d.pads = 1;
    refused("pads: expected .. got 1", &d);
    d = o;
    d.latency = 4;
    refused("latency: expected .. got 4", &d);
    d = o;
    d.latency = 1;
    refused("cost: expected .. got 0", &d);
    d = o;
    d.latency = 1;
    d.cost[0] = 1;
    refused("latency_weight: expected .. got 0", &d);
    d = o;
    d.latency = 1;
    d.cost[0] = -1;
    refused("cost: expected .. got -1", &d);
    d = o;
    d.latency = 2;
    d.cost[0] = d.latency_weight = 1;
    refused("latency_target: expected .. got 0", &d);
    d = o;
    d.latency_target = 1;
    refused("latency_target: expected .. got 1", &d);
    d = o;
    d.latency_power = 1;
    refused("latency_power: expected .. got 1", &d);
    d = o;
    d.latency_w = 2;
    refused("latency_w: expected .. got 2", &d);
    d = o;
    d.init = 2;
    refused("init: expected .. got 2", &d);
    d = o;
    d.init_std = -1;
    refused("init_std: expected .. got -1", &d);
    d = o;
    d.proj_std = NAN;
    refused("proj_std: expected", &d);
    d = o;
    d.vocab = ((size_t)1 << 31) + 1;
    refused("vocab: expected", &d);
    {
        stx_ctx *x = context(1, 1);
        stx_par_desc to, again;
        CHECK(!stx_par_create(x, NULL) && strstr(stx_error(x), "expected a desc"), "%s",
              stx_error(x));
        CHECK(stx_par_resolve(NULL, &a, &to) && stx_par_resolve(NULL, &to, &again)
                  && !memcmp(&to, &again, sizeof to),
              "what is resolved stays");
        CHECK(to.segment == S && to.emb_scale == 4 && to.inner == 20 && to.norm_eps == 1e-5,
              "defaults");
        CHECK(!stx_par_create(NULL, &o) && !stx_par_params(NULL) && !stx_par_state_create(NULL, 1)
                  && !stx_par_gen_create(NULL, 1) && !stx_par_forward(NULL, NULL, NULL, NULL)
                  && !stx_par_total(NULL, NULL) && !stx_par_as_lm(NULL).model
                  && !stx_par_count(NULL) && !stx_par_inherit(NULL, NULL)
                  && !stx_par_state_copy(NULL, 0, NULL, 0, 0) && !stx_par_gen_feed(NULL, NULL, 0),
              "NULLs");
        stx_destroy(x);
    }
}

/* Errors of calls */
static void errors(void) {
    stx_ctx *x = context(1, 1);
    stx_par_desc d = small(), e = small();
    stx_par *m = model(x, &d), *wide, *bare;
    stx_par_state *s = stx_par_state_create(m, 2), *o;
    stx_par_gen *g = stx_par_gen_create(m, 2);
    int32_t *t = text(2, S, 1);
    stx_real v[4 * D] = {0};
    stx_tensor *h;
    e.vocab = 0;
    e.pattern = "ssss";
    bare = model(x, &e);
    wide = (e.dim = 32, model(x, &e));
    stx_begin(x, STX_EVAL);
    h = stx_input(x, v, 2, 2, D, 0);
    CHECK(!stx_par_segment(m, stx_input(x, v, 2, 2, D / 2, 0), NULL, NULL, NULL), "-");
    fails(x, "expected h (B,T,16), got (2,2,8)");
    h = stx_input(x, v, 2, 2, D, 0);
    CHECK(!stx_par_segment(m, h, stx_tokens(x, t, 2, 3), NULL, NULL), "-");
    fails(x, "expected pad (2,2) like h, got (2,3)");
    h = stx_input(x, v, 1, 2, D, 0);
    CHECK(!stx_par_segment(m, h, NULL, s, s), "-");
    fails(x, "expected a memory of B = 1 streams like h, got 2");
    h = stx_input(x, v, 2, 2, D, 0);
    CHECK(!stx_par_segment(bare, h, NULL, s, s), "-");
    fails(x, "the memory belongs to another model");
    CHECK(!stx_par_embed(bare, stx_tokens(x, t, 2, 3)), "-");
    fails(x, "stx_par_embed: expected a model with vocab > 0");
    CHECK(!stx_par_logits(m, stx_input(x, v, 2, 2, D, 0)), "-");
    fails(x, "stx_vocab_io_logits");
    CHECK(!stx_par_state_create(m, 0), "-");
    fails(x, "expected B >= 1 streams .. got B = 0");
    CHECK(!stx_par_gen_create(m, 0), "-");
    fails(x, "expected B >= 1 streams .. got B = 0");
    o = stx_par_state_create_sized(m, 2, 3);
    CHECK(!stx_par_state_copy(s, 0, o, 0, 1), "-");
    fails(x, "expected a state of M = 12 rows, got 3");
    CHECK(!stx_par_state_set(s, 1, v, 1), "-");
    fails(x, "expected an attention block .. got block 1");
    CHECK(!stx_par_state_set(o, 0, v, 4), "-");
    fails(x, "at most M = 3 rows, got block 0 and 4 rows");
    CHECK(stx_par_state_set(o, 0, v, 2) && o->mem->layer[0].count == 2
              && stx_par_state_get(o, 0, v),
          "%s", stx_error(x));
    CHECK(!stx_par_gen_set(g, NULL), "-");
    fails(x, "stx_par_gen_set");
    CHECK(!stx_par_gen_set(g, o), "-");
    fails(x, "expected the same number of rows in all blocks, got 0 in block 2 and 2 before");
    stx_par_gen_reset_stream(g, 2);
    fails(x, "expected a stream below B = 2, got 2");
    CHECK(!stx_par_gen_step(g, stx_input(x, v, 1, 1, D, 0)), "-");
    fails(x, "expected h (2,T,16), got (1,1,16)");
    CHECK(!stx_par_inherit(wide, bare), "-");
    fails(x, "expected a weight of the same shape .. got another shape");
    CHECK(!stx_par_inherit(bare, m), "-");
    fails(x, "layers.1.attn.norm.weight: expected a weight .. got none");
    free(t);
    stx_destroy(x);
}

/* Padding: it has no effect, now or later; targets that do not count */
static void padding(void) {
    int k;
    for (k = 0; k < VARIANTS; k++) {
        static const int32_t mask[2][2 * S] = {{0, 1, 0, 0, 0, 1, 1, 1, 1, 1, 0, 1},
                                               {0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1}};
        const char *name;
        stx_par_desc d = variant(k, &name);
        stx_ctx *x = context(2, 7);
        stx_par *m = quiet_model(x, &d);
        int32_t *t = text(2, 2 * S, 4);
        stx_real *h[2];
        stx_tensor *nll, *rows;
        int other, call;
        size_t i, n;
        for (other = 0; other < 2; other++) {
            stx_par_state *s = stx_par_state_create(m, 2);
            h[other] = (stx_real *)calloc(4 * S * D, sizeof **h);
            for (i = 0; other && i < 4 * S; i++)
                if (mask[i / (2 * S)][i % (2 * S)]) t[i] = (t[i] + 5) % V;
            for (call = 0; call < 2; call++) {
                stx_tensor *y;
                stx_begin(x, STX_EVAL);
                y = stx_par_segment(m, stx_par_embed(m, block(x, t, 2, 2 * S, (size_t)call * S, S)),
                                    block(x, mask[0], 2, 2 * S, (size_t)call * S, S), s, s);
                CHECK(y != NULL, "%s: %s", name, stx_error(x));
                if (y) memcpy(h[other] + (size_t)call * 2 * S * D, y->data, 2 * S * D * sizeof **h);
            }
        }
        for (i = 0; i < 4 * S; i++) {
            size_t call_ = i / (2 * S), b = i / S % 2, at = i % S;
            if (mask[b][call_ * S + at]) continue;
            CHECK(difference(h[0] + i * D, h[1] + i * D, D) <= (d.adaptive_in ? TOL : 0),
                  "%s: padding is felt at %zu of row %zu", name, call_ * S + at, b);
        }
        stx_begin(x, STX_TRAIN);
        {
            int32_t targets[2 * S];
            double sum = 0;
            for (n = i = 0; i < 2 * S; i++) {
                targets[i] = i % 3 == 1 ? (i % 2 ? -1 : -7) : (int32_t)(i % V);
                n += targets[i] >= 0 && !(d.pads && !targets[i]);
            }
            nll = stx_par_nll(m, stx_input(x, h[0], 2, S, D, 0), stx_tokens(x, targets, 2, S),
                              &rows);
            for (i = 0; rows && i < 2 * S; i++) {
                CHECK((rows->data[i] == 0) == (targets[i] < 0 || (d.pads && !targets[i])),
                      "%s: nll of target %ld is %g", name, (long)targets[i], (double)rows->data[i]);
                sum += (double)rows->data[i];
            }
            CHECK(CLOSE(stx_item(x, nll), sum / (double)(d.divide_all ? 2 * S : n), 1e-6),
                  "%s: %g, expected %g of %zu %s", name, stx_item(x, nll), sum / (double)n, n,
                  stx_error(x));
        }
        free(t);
        free(h[0]);
        free(h[1]);
        stx_destroy(x);
    }
}

/* Numbers of weights that are known */
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
    CHECK(n + 3 * 6 == 3023676, "the reference's base model: %zu", n);
    d.vocab = (size_t)1 << 31;
    d.dim = d.heads = (size_t)1 << 20;
    d.heads = 1;
    d.inner = (size_t)1 << 31;
    d.blocks = 4096;
    CHECK(stx_par_count(&d) > 0, "a large one");
}

/* First values: mean, spread and bounds */
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
          "%s: mean %g, "
          "spread %g; want %g, %g",
          name, sum, sqrt(squares), mean, std);
    if (bound > 0)
        CHECK(top <= bound * (1 + 1e-6) && top > 0.95 * bound, "%s: up to %g, expected nearly %g",
              name, top, bound);
}

static void uniform(stx_par *m, const char *name, size_t fan) {
    double a = sqrt(6 / (double)fan);
    spread(m, name, 0, a / sqrt(3), a);
}

static void first_values(void) {
    stx_par_desc d;
    stx_ctx *x = context(1, 5);
    stx_par *m;
    double p[6], tails;
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
    tails = (double)m->arch->tensor[0]->data[2];
    CHECK(m->arch->count == 2 && tails == (double)(stx_real)0.34
              && !stx_params_find(m->params, "arch.0"),
          "pi %g", tails);
    stx_destroy(x);
}

/* By the table of functions: a loss that falls, a text that is learned, in a search by
   two optimisers and then in the network found */
static void learned(void) {
    stx_ctx *x = context(1, 2);
    stx_par_desc d = small();
    stx_optim_desc od;
    stx_optim *o, *gates;
    stx_par *m, *found;
    stx_lm lm;
    void *s, *g;
    int32_t t[4 * S + 1], token;
    double first = 0, last = 0;
    char letters[8];
    size_t i, step;
    memset(&od, 0, sizeof od);
    d.pattern = NULL;
    d.blocks = 4;
    d.mem = S;
    for (i = 0; i <= 4 * S; i++) t[i] = (int32_t)((i * i + 1) % 8 + i % 3);
    m = stx_par_create(x, &d);
    o = stx_optim_create(m->params, &od);
    gates = stx_optim_create(m->arch, &od);
    lm = stx_par_as_lm(m);
    s = lm.state_create(lm.model, 1, 0);
    for (step = 0; step < 400 && stx_ok(x); step++) {
        stx_tensor *nll;
        size_t at = step % 4 * S;
        if (!at) lm.state_reset(s);
        stx_begin(x, STX_TRAIN);
        nll = lm.loss(lm.model, stx_tokens(x, t + at, 1, S), stx_tokens(x, t + at + 1, 1, S), s, s);
        last = stx_item(x, nll);
        if (!step) first = last;
        stx_backward(x, lm.total(lm.model, nll));
        stx_optim_step(o, 0.01);
        stx_optim_step(gates, 0.01);
        lm.updated(lm.model);
    }
    CHECK(first > 1.5 && last < 0.8, "search: from %g to %g %s", first, last, stx_error(x));
    lm.state_free(s);
    d.pattern = letters;
    CHECK(stx_par_argmax(m, letters, sizeof letters) == 4, "%s", letters);
    if (!strchr(letters, 's')) letters[0] = 's';
    found = stx_par_create(x, &d);
    CHECK(found && stx_par_inherit(found, m), "%s", stx_error(x));
    o = stx_optim_create(found->params, &od);
    lm = stx_par_as_lm(found);
    s = lm.state_create(lm.model, 1, 0);
    for (step = 0; step < 300 && stx_ok(x); step++) {
        stx_tensor *nll;
        size_t at = step % 4 * S;
        if (!at) lm.state_reset(s);
        stx_begin(x, STX_TRAIN);
        nll = lm.loss(lm.model, stx_tokens(x, t + at, 1, S), stx_tokens(x, t + at + 1, 1, S), s, s);
        last = stx_item(x, nll);
        stx_backward(x, nll);
        stx_optim_step(o, 0.005);
    }
    CHECK(last < 0.1, "the network %s: %g %s", letters, last, stx_error(x));
    g = lm.gen_create(lm.model, 1, S);
    for (first = 0, i = 0; i < 4 * S; i++) {
        const stx_real *y = lm.gen_feed(g, t + i, 1);
        stx_sampling best;
        memset(&best, 0, sizeof best);
        token = y ? stx_sample(&best, 0, y, V, NULL) : -1;
        first += token == t[i + 1];
    }
    CHECK(first > 3.5 * S, "%g of %d letters are right %s", first, 4 * S, stx_error(x));
    lm.gen_reset(g);
    lm.gen_free(g);
    lm.state_free(s);
    stx_destroy(x);
}

/* Each allocation in turn fails: an error and nothing worse */
static int calls_left;

static void *few(void *user, size_t bytes) {
    (void)user;
    return calls_left-- > 0 ? malloc(bytes) : NULL;
}

static void gives_back(void *user, void *p) {
    (void)user;
    free(p);
}

static void no_memory(void) {
    int k, left, fine;
    for (k = 0; k < VARIANTS; k += 3)
        for (fine = 0, left = 1; !fine && left < 4000; left += 1 + left / 6) {
            const char *name;
            stx_par_desc d = variant(k, &name);
            stx_desc cd;
            stx_ctx *x;
            int32_t *t = text(1, 40, 1);
            memset(&cd, 0, sizeof cd);
            cd.alloc = few;
            cd.release = gives_back;
            cd.chunk_bytes = 4096;
            cd.threads = 1;
            calls_left = left;
            if (d.gate_eval == STX_PAR_EVAL_NOISE) d.gate_eval = STX_PAR_EVAL_SOFT;
            x = stx_create(&cd);
            if (x) {
                stx_par *m = stx_par_create(x, &d);
                stx_par_state *s = stx_par_state_create(m, 1);
                stx_par_gen *g = stx_par_gen_create(m, 1);
                uint64_t counts_[9] = {9, 8, 7, 6, 5, 4, 3, 2, 1};
                stx_par_cuts_desc c;
                size_t i, cut[4];
                memset(&c, 0, sizeof c);
                c.clusters = 3;
                for (i = 0; i < 3; i++) {
                    stx_begin(x, STX_TRAIN);
                    stx_backward(x, stx_par_total(m, stx_par_loss(m, block(x, t, 1, 40, i * S, S),
                                                                  block(x, t, 1, 40, i * S + 1, S),
                                                                  s, s)));
                }
                if (stx_ok(x)) stx_par_gen_feed(g, t, 20);
                if (stx_ok(x)) stx_par_cuts(x, cut, NULL, counts_, 9, &c);
                fine = stx_ok(x);
                CHECK(fine || stx_error_code(x) == STX_ERR_MEMORY, "%s, %d allocations: %s", name,
                      left, stx_error(x));
                stx_par_gen_free(g);
                stx_par_state_free(s);
                stx_destroy(x);
            }
            free(t);
        }
}

/* What a memory cannot do is refused. */
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
    CHECK(!stx_par_state_get(s, 0, rows), "a memory with missing rows is copied");
    CHECK(test_says(stx_error(x), "stx_par_state_get: expected every stream"), "%s", stx_error(x));
    stx_clear_error(x);

    stx_par_key(m, NULL, NULL, other, 0);
    CHECK(test_says(stx_error(x), "stx_par_key: expected a memory of this model"), "%s",
          stx_error(x));
    stx_destroy(x);
}

int main(void) {
    memory_errors();
    setvbuf(stdout, NULL, _IOLBF, 0);
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
    return test_end();
}
