/* Behaviour of seqtx_attn_span.h beyond the golden vectors: causality, memory = one
   long text, generation = forward, evaluation that training does not notice,
   recomputation, resume, batch parts, errors. */
#include <pthread.h>
#include <stdint.h>
#include "../seqtx_attn_span.h"
#include "test.h"
#include <unistd.h>

enum { V = 29 };

#ifdef TEST_AMX_EMULATED
/* under sanitizers fewer steps and cases of a path: what they come to is seen without
   them */
enum { SLOW = 1 };
#else
enum { SLOW = 0 };
#endif

#ifdef SEQTX_DOUBLE
  #define GROUPS_OFF 1e-15
#else
  #define GROUPS_OFF 1e-6
#endif

static stx_span_desc small(void) {
    stx_span_desc d;
    memset(&d, 0, sizeof d);
    d.vocab = V;
    d.layers = 2;
    d.dim = 24;
    d.heads = 3;
    d.inner = 40;
    d.span = 100;
    d.ramp = 8;
    d.adapt_span = 1;
    return d;
}

static stx_ctx *context(int threads, uint64_t seed) {
    stx_desc d;
    memset(&d, 0, sizeof d);
    d.threads = threads;
    d.seed = seed;
    return stx_create(&d);
}

/* text with some order in it, for B rows of n tokens */
static int32_t *text(size_t B, size_t n, uint64_t seed) {
    int32_t *t = (int32_t *)malloc(B * n * sizeof *t);
    size_t i;
    test_state = 88172645463325252u + seed;
    for (i = 0; i < B * n; i++)
        t[i] = i && test_rand() < 0.4 ? (t[i - 1] * 7 + 3) % V
                                      : (int32_t)((test_rand() + 1) * 0.4999 * V);
    return t;
}

/* spans that differ by head, by hand, so that the windows have something to skip */
static void set_spans(stx_span *m) {
    size_t l, h;
    for (l = 0; l < m->desc.layers; l++)
        for (h = 0; m->layer[l].z && h < m->layer[l].z->size; h++)
            m->layer[l].z->data[h] = (stx_real)(0.031 + 0.17 * (double)((l + 2 * h) % 4));
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
        if (!(e <= worst)) worst = e;
    }
    return worst;
}

/* one plain training step on tokens [at, at+T] */
static double step(stx_span *m, stx_optim *o, stx_span_state *s, const int32_t *t, size_t B,
                   size_t n, size_t at, size_t T) {
    stx_ctx *x = m->ctx;
    stx_tensor *loss;
    double v;
    stx_begin(x, STX_TRAIN);
    loss = stx_span_loss(m, block(x, t, B, n, at, T), block(x, t, B, n, at + 1, T), s, s);
    v = stx_item(x, loss);
    stx_backward(x, stx_span_total(m, loss));
    if (stx_optim_step(o, 0.003)) stx_span_clamp(m);
    return v;
}

/* Variants of the model that generation, causality and memory must hold for. */
static stx_span_desc variant(int k, const char **name) {
    static const char *const names[] = {"adaptive",           "fixed",       "literal",
                                        "persistent",         "adaptive io", "long fixed",
                                        "persistent literal", "no renorm",   "fairseq",
                                        "one span persistent"};
    stx_span_desc d = small();
    *name = names[k];
    if (k == 1) {
        d.adapt_span = 0;
        d.span = 33;
    }
    if (k == 2) d.literal = STX_SPAN_LITERAL;
    if (k == 3) d.pers = 5;
    if (k == 4) {
        d.adapt_io = d.adapt_io_tied = 1;
        d.cutoffs = 2;
        d.cutoff[0] = 9;
        d.cutoff[1] = 17;
        d.divval = 2;
    }
    if (k == 5) {
        d.adapt_span = 0;
        d.span = 300;
    }
    if (k == 6) {
        d.pers = 3;
        d.literal = STX_SPAN_LITERAL_EPS | STX_SPAN_LITERAL_MEMORY;
    }
    if (k == 7) {
        d.no_renorm = 1;
        d.ramp = 7.3;
    }
    if (k == 8) {
        d.no_renorm = d.span_per_layer = d.fairseq_init = 1;
        d.literal = STX_SPAN_LITERAL;
    }
    if (k == 9) {
        d.pers = 3;
        d.span_per_layer = 1;
        d.no_renorm = 1;
    }
    return d;
}

enum { VARIANTS = 10 };

/* log p (B,n,V) of a text by blocks of T with memory */
static stx_real *by_blocks(stx_span *m, const int32_t *t, size_t B, size_t n, size_t T,
                           stx_span_state *s) {
    stx_real *all = (stx_real *)calloc(B * n * V, sizeof *all);
    size_t at, b, w;
    for (at = 0; at < n; at += w) {
        stx_tensor *y;
        w = n - at < T ? n - at : T;
        stx_begin(m->ctx, STX_EVAL);
        y = stx_span_log_probs(m, stx_span_forward(m, block(m->ctx, t, B, n, at, w), s, s));
        if (!y) break;
        for (b = 0; b < B; b++)
            memcpy(all + (b * n + at) * V, y->data + b * w * V, w * V * sizeof *all);
    }
    return all;
}

static void generation_and_memory(void) {
    int k;
    for (k = 0; k < VARIANTS; k++) {
        const char *name;
        stx_span_desc d = variant(k, &name);
        stx_ctx *x = context(2, 7);
        stx_span *m = stx_span_create(x, &d);
        size_t B = 2, n = 700, i, b, feeds, bytes = 0;
        int32_t *t = text(B, n, 5), *one = (int32_t *)malloc(B * n * sizeof *one);
        stx_span_state *s = stx_span_state_create(m, B), *s2 = stx_span_state_create(m, B);
        stx_real *whole, *other;
        stx_span_gen *g;
        double worst = 0, top = 1; /* 1e-5 of the largest logit */
        set_spans(m);
        whole = by_blocks(m, t, B, n, n, s); /* the whole text at once */
        for (i = 0; i < B * n * V; i++)
            if (fabs((double)whole[i]) > top) top = fabs((double)whole[i]);
        stx_span_state_reset(s2);
        /* equal to blocks with memory: the window is where it was */
        other = by_blocks(m, t, B, n, 64, s2);
        CHECK(difference(whole, other, B * n * V) <= 1e-5 * top,
              "%s: blocks with memory differ from one text by %g", name,
              difference(whole, other, B * n * V));
        g = stx_span_gen_create(m, B);
        /* prompt pieces of many lengths, then token by token */
        for (i = 0, feeds = 0; i < n; feeds++) {
            size_t w = i < 300 ? 1 + feeds * 13 % 90 : 1;
            const stx_real *y;
            if (w > n - i) w = n - i;
            for (b = 0; b < B; b++) memcpy(one + b * w, t + b * n + i, w * sizeof *one);
            y = stx_span_gen_feed(g, one, w);
            i += w;
            if (!y) break;
            for (b = 0; b < B; b++) {
                double e = difference(y + b * V, whole + (b * n + i - 1) * V, V);
                if (!(e <= worst)) worst = e;
            }
            if (i > 500 && !bytes) bytes = stx_bytes(x);
        }
        CHECK(i == n && worst <= 1e-5 * top, "%s: generation differs from the forward by %g %s",
              name, worst, stx_error(x));
        CHECK(bytes == stx_bytes(x), "%s: generation keeps allocating", name);
        { /* causality: another token at place p changes nothing before p, and something after */
            size_t p = 411;
            int32_t keep = t[p];
            stx_real *changed;
            t[p] = (keep + 1) % V;
            stx_span_state_reset(s);
            changed = by_blocks(m, t, B, n, 64, s);
            CHECK(difference(changed, other, p * V) == 0, "%s: a token changed the past", name);
            CHECK(difference(changed + p * V, other + p * V, V) > 0, "%s: a token changed nothing",
                  name);
            CHECK(difference(changed + n * V, other + n * V, n * V) == 0,
                  "%s: a token changed another row", name);
            t[p] = keep;
            free(changed);
        }
        stx_span_gen_free(g);
        stx_span_state_free(s);
        stx_span_state_free(s2);
        free(whole);
        free(other);
        free(t);
        free(one);
        CHECK(stx_ok(x), "%s: %s", name, stx_error(x));
        stx_destroy(x);
    }
}

/* Dropout stands where the authors' code has it and nowhere else: embedding, attention
   weights (persistent ones too), inside the feed-forward, last hidden state. The same
   chain built by hand from ops draws the same masks, so it must agree to the bit; and
   each of the two rates alone must change the result. */
static void dropout(void) {
    int k, pers;
    for (pers = 0; pers < 2; pers++)
        for (k = 0; k < 4; k++) {
            stx_span_desc d = small();
            stx_ctx *x = context(2, 13);
            stx_span *m;
            int32_t *t = text(2, 40, 17);
            stx_tensor *h, *want, *plain;
            size_t l;
            d.pers = pers ? 4 : 0;
            d.dropout = k & 1 ? 0.3 : 0;
            d.emb_dropout = k & 2 ? 0.2 : 0;
            m = stx_span_create(x, &d);
            set_spans(m);
            stx_begin(x, STX_TRAIN);
            want = stx_span_forward(m, block(x, t, 2, 40, 0, 40), NULL, NULL);
            {
                stx_real *got = (stx_real *)malloc(want->size * sizeof *got);
                memcpy(got, want->data, want->size * sizeof *got);
                stx_set_step_index(x, stx_step_index(x) - 1); /* the same masks again */
                stx_begin(x, STX_TRAIN);
                h = stx_dropout(x, stx_embedding(x, m->vocab_io->in_emb, block(x, t, 2, 40, 0, 40)),
                                d.emb_dropout);
                for (l = 0; l < d.layers; l++) {
                    stx_span_layer *p = &m->layer[l];
                    stx_attention_in in;
                    stx_attention_desc a;
                    stx_tensor *f;
                    size_t S = stx_span_window(m, l);
                    memset(&in, 0, sizeof in);
                    memset(&a, 0, sizeof a);
                    in.q = stx_linear(x, h, p->wq, NULL, STX_ACT_NONE);
                    in.k = stx_linear(x, h, p->wk, NULL, STX_ACT_NONE);
                    in.v = stx_linear(x, h, p->wv, NULL, STX_ACT_NONE);
                    in.pe = m->key_pe;
                    in.span_fraction = p->z;
                    in.persistent_k = p->pers_key;
                    in.persistent_v = p->pers_val;
                    a.heads = d.heads;
                    a.span = S;
                    a.delta_min = 1;
                    a.max_span = (double)d.span;
                    a.ramp = d.ramp;
                    a.dropout = d.dropout;
                    f = stx_linear(x, stx_attention(x, &in, &a), p->wo, NULL, STX_ACT_NONE);
                    h = stx_layernorm(x, stx_add(x, h, f), p->norm1_gain, p->norm1_shift, 0);
                    if (pers) continue;
                    f = stx_dropout(x, stx_linear(x, h, p->w1, p->b1, STX_ACT_RELU), d.dropout);
                    h = stx_layernorm(x,
                                      stx_add(x, h, stx_linear(x, f, p->w2, p->b2, STX_ACT_NONE)),
                                      p->norm2_gain, p->norm2_shift, 0);
                }
                h = stx_dropout(x, h, d.emb_dropout);
                CHECK(h && !memcmp(h->data, got, h->size * sizeof *got),
                      "pers %d, dropout %g, emb_dropout %g: differs from the chain by "
                      "hand by %g",
                      pers, d.dropout, d.emb_dropout, h ? difference(h->data, got, h->size) : 0);
                stx_begin(x, STX_EVAL);
                plain = stx_span_forward(m, block(x, t, 2, 40, 0, 40), NULL, NULL);
                CHECK(plain && (difference(plain->data, got, plain->size) > 1e-3) == (k != 0),
                      "pers %d, dropout %g, emb_dropout %g: no "
                      "effect, or without cause",
                      pers, d.dropout, d.emb_dropout);
                free(got);
            }
            free(t);
            CHECK(stx_ok(x), "%s", stx_error(x));
            stx_destroy(x);
        }
}

/* STX_SPAN_LITERAL means the forms that the model can have */
static void literal(void) {
    static const unsigned want[4] = {2, 3, 2, 2};
    int k;

    for (k = 0; k < 4; k++) {
        stx_ctx *x = context(1, 3);
        stx_span_desc d = small();
        stx_span *m;

        d.adapt_span = k > 0;
        d.no_renorm = k > 1;
        d.span_per_layer = k > 2;
        d.literal = STX_SPAN_LITERAL;
        m = stx_span_create(x, &d);
        CHECK(m && m->desc.literal == want[k], "model %d: %u, expected %u %s", k,
              m ? m->desc.literal : 99, want[k], stx_error(x));
        stx_destroy(x);
    }
}

/* The default form of an empty memory: the first tokens see nothing at all, and
   padding rows have no say. */
static void beginnings(void) {
    stx_span_desc d = small();
    stx_ctx *x = context(1, 3);
    stx_span *m = stx_span_create(x, &d);
    int32_t *t = text(1, 40, 9);
    stx_real *a, *b;
    stx_span_state *s = stx_span_state_create(m, 1);
    set_spans(m);
    a = by_blocks(m, t, 1, 40, 40, s);
    m->desc.literal = STX_SPAN_LITERAL_MEMORY;
    stx_span_state_reset(s);
    b = by_blocks(m, t, 1, 40, 40, s);
    CHECK(difference(a, b, 40 * V) > 1e-4, "zero rows have no effect, but should with the flag");
    free(a);
    free(b);
    free(t);
    stx_destroy(x);
}

/* One meaning each: logits are logits, or an error; log p is log p; generation gives
   log p; and no gradient passes log p. */
static void logits_and_log_probs(void) {
    int k;
    for (k = 0; k < 5; k += 4) {
        const char *name;
        stx_span_desc d = variant(k, &name);
        stx_ctx *x = context(1, 3);
        stx_span *m = stx_span_create(x, &d);
        int32_t *t = text(2, 20, 9);
        stx_tensor *h, *y, *z;
        const stx_real *g;
        size_t r, v;
        stx_begin(x, STX_TRAIN);
        h = stx_span_forward(m, block(x, t, 2, 20, 0, 20), NULL, NULL);
        y = stx_span_log_probs(m, h);
        CHECK(y && y->ndim == 3 && y->dim[0] == 2 && y->dim[1] == 20 && y->dim[2] == V && !y->grad,
              "%s: %s", name, stx_error(x));
        z = stx_span_logits(m, h);
        CHECK(!z == (k == 4) && (z || strstr(stx_error(x), "stx_vocab_io_log_probs")), "%s: %s",
              name, stx_error(x));
        stx_clear_error(x);
        for (r = 0; y && r < 40; r++) {
            double sum = 0, raw = 0, off = 0;
            for (v = 0; v < V; v++) {
                sum += exp((double)y->data[r * V + v]);
                if (z) raw += exp((double)z->data[r * V + v]);
            }
            for (v = 0; z && v < V; v++)
                off = fmax(off, fabs((double)z->data[r * V + v] - log(raw)
                                     - (double)y->data[r * V + v]));
            CHECK(fabs(sum - 1) < 1e-5 && off < 1e-5 && (!z || fabs(log(raw)) > 1e-4),
                  "%s row %zu: sums to %g, off by %g", name, r, sum, off);
        }
        {
            stx_real last[V];
            double sum = 0;
            memcpy(last, y->data + 19 * V, sizeof last);
            g = stx_span_gen_feed(stx_span_gen_create(m, 1), t, 20);
            for (v = 0; g && v < V; v++) sum += exp((double)g[v]);
            CHECK(g && fabs(sum - 1) < 1e-5 && difference(g, last, V) < 1e-5,
                  "%s: generation: sum %g %s", name, sum, stx_error(x));
        }
        free(t);
        stx_destroy(x);
    }
}

/* A memory that was handed over goes on as the one it was taken from, to the last bit:
   from context to context, while caches fill and when they are full; and what cannot
   be a memory is refused, and leaves the state as it was. */
static void handed_over(void) {
    int k;
    for (k = 0; k < VARIANTS; k++) {
        const char *name;
        stx_span_desc d = variant(k, &name);
        stx_ctx *x[2];
        stx_span *m[2];
        stx_span_state *s[2], *empty;
        size_t B = 2, n = 500, l, i, at, w[2] = {30, 61};
        int32_t *t = text(B, n, 12);
        int c, steps, filled = 0;
        for (c = 0; c < 2; c++) {
            x[c] = context(1 + c, 4);
            m[c] = stx_span_create(x[c], &d);
            set_spans(m[c]);
            s[c] = stx_span_state_create(m[c], B);
        }
        empty = stx_span_state_create(m[1], B);
        for (at = 0, steps = 0; at + 2 * w[steps & 1] < n; steps++) {
            stx_real *want, *a = NULL, *b;
            size_t T = w[steps & 1];
            for (l = 0; l < d.layers; l++) {
                stx_real *row = (stx_real *)malloc((B * s[0]->memory->layer[l].count * d.dim + 1)
                                                   * sizeof *row);
                CHECK(stx_span_state_get(s[0], l, row)
                          && stx_span_state_set(s[1], l, s[0]->memory->layer[l].logical_count, row,
                                                s[0]->memory->layer[l].count),
                      "%s: %s %s", name, stx_error(x[0]), stx_error(x[1]));
                filled |= s[0]->memory->layer[l].count == stx_span_cache(m[0], l);
                free(row);
            }
            for (c = 0; c < 2; c++) {
                stx_begin(x[c], STX_EVAL);
                want = (stx_real *)malloc(B * T * d.dim * sizeof *want);
                stx_get(x[c], stx_span_forward(m[c], block(x[c], t, B, n, at, T), s[c], s[c]),
                        want);
                if (c == 0) {
                    a = want;
                    continue;
                }
                b = (stx_real *)malloc(B * T * d.dim * sizeof *b);
                stx_begin(x[c], STX_EVAL);
                stx_get(x[c], stx_span_forward(m[c], block(x[c], t, B, n, at, T), empty, NULL), b);
                CHECK(!memcmp(a, want, B * T * d.dim * sizeof *a),
                      "%s at %zu: handed over differs by %g", name, at,
                      difference(a, want, B * T * d.dim));
                CHECK((difference(b, want, B * T * d.dim) > 1e-4) == (at > 0),
                      "%s at %zu: the memory has no say", name, at);
                free(a);
                free(b);
                free(want);
            }
            at += T;
        }
        CHECK(filled, "%s: no cache was ever full", name);
        for (i = 0; i < 4; i++) {
            size_t rows = s[1]->memory->layer[0].logical_count, real = s[1]->memory->layer[0].count;
            stx_real one[1] = {0};
            CHECK(!stx_span_state_set(s[1], i == 0 ? d.layers : 0, i == 1 ? m[1]->desc.span + 1 : 5,
                                      i == 3 ? NULL : one,
                                      i == 2   ? 6
                                      : i == 3 ? 2
                                               : 0)
                      && !stx_ok(x[1]),
                  "case %zu", i);
            CHECK(s[1]->memory->layer[0].logical_count == rows
                      && s[1]->memory->layer[0].count == real
                      && strstr(stx_error(x[1]), "stx_memory_set"),
                  "case %zu: %s", i, stx_error(x[1]));
            stx_clear_error(x[1]);
        }
        CHECK(!stx_span_state_get(s[1], d.layers, NULL) && strstr(stx_error(x[1]), "layer: expected less than 2, got 2"), "%s",
              stx_error(x[1]));
        free(t);
        for (c = 0; c < 2; c++) stx_destroy(x[c]);
    }
}

/* What the options of fairseq's form change: the parameters, their first values, and
   the result */
static void fairseq_form(void) {
    stx_span_desc d = small(), e;
    stx_ctx *x = context(1, 8);
    stx_span *m;
    stx_tensor *t;
    size_t i, k;
    int32_t *ids = text(1, 300, 2);
    d.dim = 96;
    d.inner = 160;
    d.vocab = 200;
    d.span = 400;
    for (i = 0; i < 2; i++) {
        double sd = 1 / sqrt(96.0), xavier = sqrt(6.0 / (96 + 160));
        e = d;
        e.no_renorm = e.span_per_layer = e.fairseq_init = (int)i;
        m = stx_span_create(x, &e);
        CHECK(m && m->layer[1].z->size == (i ? 1 : 3)
                  && stx_params_size(m->params) == stx_span_count(&e),
              "%s", stx_error(x));
        if (!m) break;
        /* mean square and largest: normal or uniform, and how wide */
        for (k = 0; k < 5; k++) {
            double want = 1, sum = 0, top = 0;
            size_t j;
            t = k == 0   ? m->layer[1].wq
                : k == 1 ? m->layer[0].wo
                : k == 2 ? m->layer[1].w1
                : k == 3 ? m->layer[1].w2
                         : m->vocab_io->in_emb;
            for (j = 0; j < t->size; j++) {
                sum += (double)t->data[j] * (double)t->data[j];
                top = fmax(top, fabs((double)t->data[j]));
            }
            sum = sqrt(sum / (double)t->size);
            want = k < 2   ? (i ? sd : sd / sqrt(3))
                   : k < 4 ? (i        ? xavier
                              : k == 2 ? sd
                                       : 1 / sqrt(160.0))
                                 / sqrt(3)
                   : i ? sd
                       : 1;
            CHECK(fabs(sum / want - 1) < 0.03, "init %zu, tensor %zu: deviation %g, expected %g", i,
                  k, sum, want);
            CHECK((k < 2 && !i) || k == 2 || k == 3 ? top < 1.7321 * want : top > 2.5 * want,
                  "init %zu, tensor %zu: largest %g of %g", i, k, top, want);
        }
        m->layer[0].z->data[0] = (stx_real)0.5;
        CHECK(stx_span_of(m, 0, 0) == 200 && stx_span_of(m, 0, 2) == (i ? 200 : 0)
                  && stx_span_window(m, 0) == 208,
              "spans of layer 0: %g %g window %zu", stx_span_of(m, 0, 0), stx_span_of(m, 0, 2),
              stx_span_window(m, 0));
    }
    /* the window is part of the model: z of one head moves what another one sees */
    for (i = 0; i < 2; i++) {
        stx_real *a, *b;
        stx_tensor *y;
        e = small();
        e.layers = 1;
        e.span = 300;
        e.no_renorm = (int)i;
        m = stx_span_create(x, &e);
        a = (stx_real *)malloc(300 * e.dim * sizeof *a);
        b = (stx_real *)malloc(300 * e.dim * sizeof *b);
        memset(m->layer[0].wo->data, 0, m->layer[0].wo->size * sizeof *a);
        /* head 0 alone counts */
        for (k = 0; k < 8; k++) m->layer[0].wo->data[k * 24 + k] = 1;
        stx_begin(x, STX_EVAL);
        y = stx_span_forward(m, block(x, ids, 1, 300, 0, 300), NULL, NULL);
        stx_get(x, y, a);
        m->layer[0].z->data[1] = 1;
        stx_begin(x, STX_EVAL);
        y = stx_span_forward(m, block(x, ids, 1, 300, 0, 300), NULL, NULL);
        stx_get(x, y, b);
        CHECK((difference(a, b, 300 * e.dim) > 1e-3) == (i == 1),
              "no_renorm %zu: another head's window changes the result by %g", i,
              difference(a, b, 300 * e.dim));
        free(a);
        free(b);
    }
    free(ids);
    CHECK(stx_ok(x), "%s", stx_error(x));
    stx_destroy(x);
}

static void evaluation_is_separate(void) {
    int k;
    stx_real *first = NULL;
    size_t n = 600;
    /* once with evaluations and generation in between, once without */
    for (k = 0; k < 2; k++) {
        stx_span_desc d = small();
        stx_ctx *x;
        stx_span *m;
        stx_optim *o;
        stx_span_state *s, *e;
        int32_t *t = text(3, n, 11);
        size_t i, size, at;
        stx_real *all;
        d.dropout = 0.2;
        d.emb_dropout = 0.1;
        d.span_init = 0.3;
        d.span_loss = 1e-3;
        x = context(2, 5);
        m = stx_span_create(x, &d);
        o = stx_optim_create(m->params, NULL);
        s = stx_span_state_create(m, 3);
        e = stx_span_state_create(m, 1);
        for (i = 0; i < 12; i++) {
            step(m, o, s, t, 3, n, i * 32, 32);
            if (k) {
                stx_real *y = by_blocks(m, t, 1, 100, 30, e);
                stx_span_gen *g = stx_span_gen_create(m, 1);
                stx_span_gen_feed(g, t, 20);
                stx_span_gen_free(g);
                free(y);
            }
        }
        size = stx_params_size(m->params);
        all = (stx_real *)malloc(size * sizeof *all);
        for (i = 0, at = 0; i < m->params->count; i++) {
            memcpy(all + at, m->params->tensor[i]->data, m->params->tensor[i]->size * sizeof *all);
            at += m->params->tensor[i]->size;
        }
        if (!first)
            first = all;
        else {
            CHECK(!memcmp(first, all, size * sizeof *all),
                  "evaluation between the steps changed training");
            free(all);
        }
        free(t);
        CHECK(stx_ok(x), "%s", stx_error(x));
        stx_destroy(x);
    }
    free(first);
}

/* all parameters after some steps of a configuration */
static stx_real *trained(const stx_span_desc *d, int threads, int kind, size_t parts, int steps,
                         size_t *size, double *loss) {
    stx_ctx *x = context(threads, 21);
    stx_span *m = stx_span_create(x, d);
    stx_optim_desc od;
    stx_optim *o;
    stx_span_state *s[4];
    size_t B = 4, T = 24, n = 24 * 40, rows = B / parts, p, i, at;
    int32_t *t = text(B, n, 31);
    stx_real *all;
    int k;
    memset(&od, 0, sizeof od);
    od.kind = kind;
    o = stx_optim_create(m->params, &od);
    for (p = 0; p < parts; p++) s[p] = stx_span_state_create(m, rows);
    for (k = 0; k < steps; k++) {
        for (p = 0; p < parts; p++) {
            stx_tensor *l;
            stx_begin(x, STX_TRAIN);
            l = stx_span_loss(m, block(x, t + p * rows * n, rows, n, (size_t)k * T, T),
                              block(x, t + p * rows * n, rows, n, (size_t)k * T + 1, T), s[p],
                              s[p]);
            *loss = stx_item(x, l);
            stx_backward(x, stx_scale(x, stx_span_total(m, l), 1.0 / (double)parts));
        }
        if (stx_optim_step(o, 0.003)) stx_span_clamp(m);
    }
    *size = stx_params_size(m->params);
    all = (stx_real *)malloc(*size * sizeof *all);
    for (i = 0, at = 0; i < m->params->count; i++) {
        memcpy(all + at, m->params->tensor[i]->data, m->params->tensor[i]->size * sizeof *all);
        at += m->params->tensor[i]->size;
    }
    CHECK(stx_ok(x), "%s", stx_error(x));
    free(t);
    stx_destroy(x);
    return all;
}

static void repeatable(void) {
    stx_span_desc d = small();
    size_t n, k;
    double l, l2;
    stx_real *a, *b;
    d.dropout = 0.3;
    d.emb_dropout = 0.2;
    d.span_init = 0.4;
    d.span_loss = 1e-3;
    for (k = 1; k <= 3; k++) {
        a = trained(&d, (int)k, STX_ADAM, 1, 6, &n, &l);
        b = trained(&d, (int)k, STX_ADAM, 1, 6, &n, &l2);
        CHECK(!memcmp(a, b, n * sizeof *a) && l == l2, "%zu threads: two runs differ", k);
        d.recompute = 1;
        free(b);
        b = trained(&d, (int)k, STX_ADAM, 1, 6, &n, &l2);
        CHECK(!memcmp(a, b, n * sizeof *a) && l == l2, "%zu threads: recomputation changes the run",
              k);
        d.recompute = 0;
        free(a);
        free(b);
    }
    a = trained(&d, 1, STX_SGD, 1, 6, &n, &l);
    b = trained(&d, 3, STX_SGD, 1, 6, &n, &l2);
    CHECK(difference(a, b, n) < 1e-6 && CLOSE(l, l2, 1e-5), "1 and 3 threads differ by %g",
          difference(a, b, n));
    free(a);
    free(b);
    d.dropout = d.emb_dropout = 0;
    a = trained(&d, 1, STX_SGD, 1, 6, &n, &l);
    b = trained(&d, 1, STX_SGD, 4, 6, &n, &l2);
    CHECK(difference(a, b, n) < 1e-6, "a batch in 4 parts differs by %g", difference(a, b, n));
    free(a);
    free(b);
}

/* Contexts of two threads each, used at the same time by threads of the caller's */
typedef struct callers {
    double loss;
    stx_real *all;
    size_t n;
} callers;

static void *callers_thread(void *out) {
    callers *c = (callers *)out;
    stx_span_desc d = small();
    stx_ctx *x = context(2, 21);
    stx_span *m;
    stx_optim *o;
    int32_t t[2 * 65];
    size_t i;
    d.dropout = 0.1;
    d.span_init = 0.3;
    m = stx_span_create(x, &d);
    o = stx_optim_create(m->params, NULL);
    for (i = 0; i < 2 * 65; i++) t[i] = (int32_t)(i * i % V);
    for (i = 0; i < 5; i++) c->loss = step(m, o, NULL, t, 2, 65, 0, 64);
    c->n = m->layer[0].wq->size;
    c->all = (stx_real *)malloc(c->n * sizeof(stx_real));
    memcpy(c->all, m->layer[0].wq->data, c->n * sizeof(stx_real));
    stx_destroy(x);
    return NULL;
}

static void callers_threads(void) {
    callers c[4];
    pthread_t thread[4];
    int k;
    for (k = 0; k < 4; k++)
        CHECK(!pthread_create(thread + k, NULL, callers_thread, c + k), "no thread %d", k);
    for (k = 0; k < 4; k++) pthread_join(thread[k], NULL);
    for (k = 1; k < 4; k++)
        CHECK(c[k].loss == c[0].loss && !memcmp(c[k].all, c[0].all, c[0].n * sizeof(stx_real)),
              "thread %d of the caller differs", k);
    for (k = 0; k < 4; k++) free(c[k].all);
}

static void learns(void) {
    int i0;
    for (i0 = 0; i0 < 6; i0++) {
        static const int kinds[] = {0, 1, 2, 3, 4, 8};
        int k = kinds[i0];
        const char *name;
        stx_span_desc d = variant(k, &name);
        stx_ctx *x;
        stx_span *m;
        stx_optim *o;
        int32_t *t = text(2, 33, 77);
        double first, last = 0;
        int i;
        d.span_init = 0.3;
        x = context(2, 1);
        m = stx_span_create(x, &d);
        o = stx_optim_create(m->params, NULL);
        first = step(m, o, NULL, t, 2, 33, 0, 32);
        for (i = 0; i < (SLOW ? 20 : 300); i++) last = step(m, o, NULL, t, 2, 33, 0, 32);
        CHECK(first > 2 && last < (SLOW ? first : 0.1), "%s: one batch: %g -> %g", name, first,
              last);
        free(t);
        CHECK(stx_ok(x), "%s", stx_error(x));
        stx_destroy(x);
    }
}

/* save, load into a fresh context, go on: the same bits as never having stopped; then
   every way a load can be refused */
static void resume(void) {
    char path[1024];
    stx_span_desc d = small();
    stx_ctx *x[2];
    stx_span *m[2];
    stx_optim *o[2];
    stx_span_state *s[2];
    size_t n = 1000, B = 2, i;
    int32_t *t = text(B, n, 3);
    stx_writer *w;
    stx_file *f;
    int k;
    test_path(path, sizeof path, "test_span");
    d.dropout = 0.25;
    d.emb_dropout = 0.1;
    d.span_init = 0.2;
    d.span_loss = 1e-3;
    for (k = 0; k < 2; k++) {
        x[k] = context(2, 9);
        m[k] = stx_span_create(x[k], &d);
        o[k] = stx_optim_create(m[k]->params, NULL);
        s[k] = stx_span_state_create(m[k], B);
    }
    for (i = 0; i < 10; i++) step(m[0], o[0], s[0], t, B, n, i * 30, 30);
    w = stx_writer_create(x[0]);
    CHECK(stx_params_save(w, m[0]->params, "") && stx_optim_save(w, o[0])
              && stx_span_state_save(w, s[0], "memory.")
              && stx_writer_meta_u64(w, "tick", stx_step_index(x[0])) && stx_writer_finish(w, path),
          "%s", stx_error(x[0]));
    f = stx_file_open(x[1], path);
    {
        uint64_t tick = 0;
        CHECK(f && stx_params_load(m[1]->params, f, "") && stx_optim_load(o[1], f)
                  && stx_span_state_load(s[1], f, "memory.")
                  && stx_file_meta_u64(x[1], f, "tick", &tick),
              "%s", stx_error(x[1]));
        stx_set_step_index(x[1], tick);
    }
    for (k = 0; k < 2; k++)
        for (i = 10; i < 20; i++) step(m[k], o[k], s[k], t, B, n, i * 30, 30);
    for (i = 0; i < m[0]->params->count; i++)
        CHECK(!memcmp(m[0]->params->tensor[i]->data, m[1]->params->tensor[i]->data,
                      m[0]->params->tensor[i]->size * sizeof(stx_real)),
              "%s differs after the resume", m[0]->params->name[i]);
    stx_file_close(f);

    { /* a checksum finds any changed bit */
        stx_ctx *y = context(1, 1);
        FILE *io;
        long size, at;
        int c;
        w = stx_writer_create(y);
        CHECK(stx_params_save(w, m[0]->params, "") == 1 && stx_writer_meta(w, "text", "abc")
                  && stx_writer_checksum(w) && stx_writer_finish(w, path),
              "%s", stx_error(y));
        f = stx_file_open(y, path);
        CHECK(f && stx_file_verify(f), "%s", stx_error(y));
        stx_file_close(f);
        io = fopen(path, "r+b");
        fseek(io, 0, SEEK_END);
        size = ftell(io);
        for (k = 0; k < 5; k++) {
            at = size - 1 - k * (size / 8);
            fseek(io, at, SEEK_SET);
            c = fgetc(io);
            fseek(io, at, SEEK_SET);
            fputc(c ^ (1 << k), io);
            fflush(io);
            f = stx_file_open(y, path);
            CHECK(f && !stx_file_verify(f) && strstr(stx_error(y), "damaged"),
                  "bit %d of byte %ld: %s", k, at, stx_error(y));
            stx_file_close(f);
            stx_clear_error(y);
            fseek(io, at, SEEK_SET);
            fputc(c, io);
            fflush(io);
        }
        fclose(io);
        w = stx_writer_create(y);
        CHECK(stx_writer_meta_u64(w, "big", UINT64_MAX) && stx_writer_finish(w, path), "%s",
              stx_error(y));
        f = stx_file_open(y, path);
        {
            uint64_t big = 0;
            CHECK(stx_file_meta_u64(y, f, "big", &big) && big == UINT64_MAX, "%s", stx_error(y));
            CHECK(!stx_file_verify(f) && !stx_ok(y), "a file without a checksum passes");
        }
        stx_file_close(f);
        stx_destroy(y);
        w = stx_writer_create(x[0]);
        CHECK(stx_params_save(w, m[0]->params, "") && stx_optim_save(w, o[0])
                  && stx_span_state_save(w, s[0], "memory.") && stx_writer_finish(w, path),
              "%s", stx_error(x[0]));
    }
    for (k = 0; k < 6; k++) { /* refused, with the reason, and nothing half loaded */
        static const char *const want[] = {"layers.1",  "streams",      "optimiser",
                                           "no tensor", "an integer", "dimensions"};
        stx_span_desc e = d;
        stx_optim_desc od;
        stx_ctx *y = context(1, 1);
        stx_span *p;
        stx_optim *q;
        stx_span_state *u;
        stx_real before;
        int ok = 1;
        memset(&od, 0, sizeof od);
        if (k == 0) e.layers = 3;
        if (k == 5) e.inner = 41;
        if (k == 2) od.kind = STX_ADAGRAD;
        p = stx_span_create(y, &e);
        q = stx_optim_create(p->params, &od);
        u = stx_span_state_create(p, k == 1 ? 3 : B);
        before = p->key_pe->data[0];
        f = stx_file_open(y, path);
        if (k == 0) {
            ok = stx_params_load(p->params, f, "");
            CHECK(strstr(stx_error(y), "layers.2"), "%s", stx_error(y));
        }
        if (k == 1) ok = stx_span_state_load(u, f, "memory.");
        if (k == 2) ok = stx_optim_load(q, f);
        if (k == 3) ok = stx_params_load(p->params, f, "other.");
        if (k == 4) ok = stx_span_state_load(u, f, "no.such.");
        if (k == 5) ok = stx_params_load(p->params, f, "");
        CHECK(!ok && (k == 0 || strstr(stx_error(y), want[k])), "case %d: %s", k, stx_error(y));
        CHECK(p->key_pe->data[0] == before, "case %d: loaded in part", k);
        stx_file_close(f);
        stx_destroy(y);
    }
    remove(path);
    free(t);
    for (k = 0; k < 2; k++) stx_destroy(x[k]);
}

static void refused(stx_span_desc d, const char *want) {
    stx_ctx *x = context(1, 0);
    stx_span *m = stx_span_create(x, &d);
    CHECK(!m && !stx_ok(x) && strstr(stx_error(x), want), "wanted an error with \"%s\", got \"%s\"",
          want, stx_error(x));
    CHECK(stx_span_count(&d) == 0 || strstr(want, "memory"), "counted %zu parameters of a bad desc",
          stx_span_count(&d));
    stx_destroy(x);
}

static void errors(void) {
    stx_span_desc d;
    stx_ctx *x;
    stx_span *m;
    int32_t ids[4] = {1, 2, 3, V};
    d = small();
    d.vocab = 0;
    refused(d, "vocab");
    d = small();
    d.heads = 5;
    refused(d, "heads");
    d = small();
    d.dim = (size_t)-1;
    refused(d, "dim");
    d = small();
    d.span = (size_t)-1;
    refused(d, "span");
    d = small();
    d.inner = (size_t)-1;
    refused(d, "inner");
    d = small();
    d.ramp = -1;
    refused(d, "ramp");
    d = small();
    d.ramp = NAN;
    refused(d, "ramp");
    d = small();
    d.span_init = 1.5;
    refused(d, "span_init");
    d = small();
    d.dropout = 1;
    refused(d, "dropout");
    d = small();
    d.emb_dropout = NAN;
    refused(d, "emb_dropout");
    d = small();
    d.span_loss = -1;
    refused(d, "span_loss");
    d = small();
    d.adapt_io = 1;
    d.cutoffs = 1;
    d.cutoff[0] = V;
    refused(d, "cutoff");
    d = small();
    d.adapt_io = 1;
    d.cutoffs = 2;
    d.cutoff[0] = 9;
    d.cutoff[1] = 9;
    refused(d, "cutoff");
    d = small();
    d.adapt_io = 1;
    d.divval = 1;
    refused(d, "divval");
    d = small();
    d.no_renorm = 1;
    d.adapt_span = 0;
    refused(d, "no_renorm requires adapt_span");
    d = small();
    d.span_per_layer = 1;
    d.adapt_span = 0;
    refused(d, "span_per_layer requires adapt_span");
    d = small();
    d.no_renorm = 1;
    d.literal = STX_SPAN_LITERAL_EPS;
    refused(d, "STX_SPAN_LITERAL_EPS requires adapt_span without no_renorm");
    d.literal |= STX_SPAN_LITERAL;
    refused(d, "STX_SPAN_LITERAL_EPS requires");
    d = small();
    d.adapt_span = 0;
    d.literal = STX_SPAN_LITERAL_EPS;
    refused(d, "STX_SPAN_LITERAL_EPS requires");
    d = small();
    d.literal = 4;
    refused(d, "STX_SPAN_LITERAL_EPS and STX_SPAN_LITERAL_MEMORY, got 0x4");
    d = small();
    d.adapt_io = 1;
    d.divval = 100;
    d.cutoffs = 2;
    d.cutoff[0] = 3;
    d.cutoff[1] = 9;
    refused(d, "divval");

    x = context(1, 0);
    d = small();
    m = stx_span_create(x, &d);
    CHECK(m->desc.layers == 2 && m->desc.divval == 4, "resolved desc");
    stx_begin(x, STX_EVAL);
    CHECK(!stx_span_forward(m, stx_tokens(x, ids, 1, 4), NULL, NULL) && strstr(stx_error(x), "29"),
          "%s", stx_error(x));
    stx_clear_error(x);
    {
        stx_span_state *s = stx_span_state_create(m, 2);
        stx_begin(x, STX_EVAL);
        CHECK(!stx_span_forward(m, stx_tokens(x, ids, 1, 3), s, NULL)
                  && strstr(stx_error(x), "streams"),
              "%s", stx_error(x));
    }
    stx_clear_error(x);
    CHECK(!stx_span_state_create(m, 0) && !stx_ok(x), "a state of no streams");
    stx_clear_error(x);
    CHECK(!stx_span_gen_feed(stx_span_gen_create(m, 1), ids, 0) && !stx_ok(x), "fed nothing");
    stx_destroy(x);
    CHECK(!stx_span_create(NULL, NULL) && !stx_span_forward(NULL, NULL, NULL, NULL)
              && !stx_span_loss(NULL, NULL, NULL, NULL, NULL) && !stx_span_total(NULL, NULL)
              && !stx_span_logits(NULL, NULL) && !stx_span_log_probs(NULL, NULL)
              && !stx_span_state_get(NULL, 0, NULL) && !stx_span_state_set(NULL, 0, 0, NULL, 0)
              && !stx_span_gen_create(NULL, 1) && !stx_span_gen_feed(NULL, NULL, 1)
              && !stx_span_state_create(NULL, 1),
          "NULL goes through");
    stx_span_clamp(NULL);
    stx_span_state_free(NULL);
    stx_span_gen_free(NULL);
    stx_span_state_reset(NULL);
}

/* S and C by hand: cur = ceil(z L) + R, S = L - floor(min(L-1, L-cur) / 64) 64, C = S
   + 64, at most L */
static void windows(void) {
    static const struct {
        size_t L;
        double z;
        size_t S, C;
    } row[] = {{8192, 0, 64, 128},      {8192, 0.01, 128, 192}, {8192, 0.1, 896, 960},
               {8192, 0.5, 4160, 4224}, {8192, 1, 8192, 8192},  {256, 0.3, 128, 192},
               {256, 0.61, 192, 256}};

    size_t i;
    for (i = 0; i < sizeof row / sizeof *row; i++) {
        stx_span_desc d = small();
        stx_ctx *x = context(1, 0);
        stx_span *m;
        size_t S, C;
        double avg, max;
        d.span = row[i].L;
        d.ramp = 32;
        d.layers = 1;
        m = stx_span_create(x, &d);
        m->layer[0].z->data[1] = (stx_real)row[i].z;
        S = stx_span_window(m, 0);
        C = stx_span_cache(m, 0);
        CHECK(S == row[i].S && C == row[i].C, "L %zu z %g: S %zu C %zu", row[i].L, row[i].z, S, C);
        CHECK(fabs(stx_span_of(m, 0, 1) - row[i].z * (double)row[i].L) < 1e-2, "span of head 1");
        stx_span_stats(m, &avg, &max);
        CHECK(max <= (double)row[i].L && max >= row[i].z * (double)row[i].L && avg <= max,
              "stats %g %g", avg, max);
        CHECK(stx_span_window(m, 1) == 0 && stx_span_cache(NULL, 0) == 0, "no such layer");
        m->layer[0].z->data[0] = -3;
        m->layer[0].z->data[2] = 7;
        stx_span_clamp(m);
        CHECK(m->layer[0].z->data[0] == 0 && m->layer[0].z->data[2] == 1, "clamp");
        stx_destroy(x);
    }
}

/* One layer, one head, written again with the mask over every key: what the forward,
   the caches and generation must be, whatever they leave out. Its hidden states
   (B,n,d). */
static stx_real *whole_mask(stx_span *m, const int32_t *t, size_t B, size_t n) {
    stx_ctx *x = m->ctx;
    const stx_span_layer *p = &m->layer[0];
    stx_attention_in a;
    stx_attention_desc d;
    stx_tensor *h, *f;
    stx_real *to = (stx_real *)malloc(B * n * m->desc.dim * sizeof *to);
    memset(&a, 0, sizeof a);
    memset(&d, 0, sizeof d);
    stx_begin(x, STX_EVAL);
    h = stx_embedding(x, m->vocab_io->in_emb, block(x, t, B, n, 0, n));
    a.q = stx_linear(x, h, p->wq, NULL, STX_ACT_NONE);
    a.k = stx_linear(x, h, p->wk, NULL, STX_ACT_NONE);
    a.v = stx_linear(x, h, p->wv, NULL, STX_ACT_NONE);
    a.pe = m->key_pe;
    a.span_fraction = p->z;
    d.heads = m->desc.heads;
    d.delta_min = 1;
    d.max_span = (double)m->desc.span;
    d.ramp = m->desc.ramp;
    /* every key counts in the normaliser, by nothing: the kernel may not leave one out */
    d.eps = 1e-30;
    h = stx_residual_norm(x, h, stx_linear(x, stx_attention(x, &a, &d), p->wo, NULL, STX_ACT_NONE),
                          0, p->norm1_gain, p->norm1_shift, 1e-5);
    f = stx_linear(x, stx_linear(x, h, p->w1, p->b1, STX_ACT_RELU), p->w2, p->b2, STX_ACT_NONE);
    h = stx_residual_norm(x, h, f, 0, p->norm2_gain, p->norm2_shift, 1e-5);
    CHECK(h != NULL, "%s", stx_error(x));
    if (h) stx_get(x, h, to);
    return to;
}

/* Ramps that are not whole: window, cache, generation and the numbers that are
   reported reach every key that has weight */
static void ramps(void) {
    static const size_t L[] = {1, 2, 3, 64, 65, 66, 67, 100, 129, 130, 200};
    static const double span[] = {0, 0.25, 0.6, 0.999999, 1, 1.4, 5, 31.5, 62.75, 63.1, 64, 1e9},
                        ramp[] = {1, 1.25, 1.5, 1.999, 2, 2.25, 7.5, 31.01, 32, 40.7};
    size_t i, j, k, t, l, cases = 0;
    for (i = 0; i < sizeof L / sizeof *L; i++)
        for (j = 0; j < sizeof span / sizeof *span; j++)
            for (k = 0; k < sizeof ramp / sizeof *ramp; k++) {
                stx_span_desc d = small();
                stx_ctx *x = context(1, 0);
                stx_span *m;
                size_t far = 0, S, C, reach;
                stx_real z = (stx_real)(span[j] < (double)L[i] ? span[j] / (double)L[i] : 1),
                         R = (stx_real)ramp[k];
                double avg, max;
                d.layers = 1;
                d.heads = 1;
                d.dim = 8;
                d.inner = 8;
                d.span = L[i];
                d.ramp = ramp[k];
                d.span_init = (double)z;
                m = stx_span_create(x, &d);
                CHECK(m, "%s", stx_error(x));
                if (!m) {
                    stx_destroy(x);
                    continue;
                }
                for (t = 1; t <= L[i]; t++) { /* the mask as the kernels compute it */
                    stx_real zl = z * (stx_real)L[i], u = ((1 - (stx_real)t) + zl) / R + 1;
                    if (u > 0) far = t;
                }
                S = stx_span_window(m, 0);
                C = stx_span_cache(m, 0);
                reach = stx_attention_reach((double)z, (double)L[i], ramp[k], L[i]);
                stx_span_stats(m, &avg, &max);
                CHECK(reach >= far && reach <= far + 1,
                      "L %zu span %g R %g: reach %zu, the last key with weight is %zu steps back",
                      L[i], span[j], ramp[k], reach, far);
                if (ramp[k] == floor(ramp[k]))
                    CHECK((double)reach
                              == fmin((double)L[i], ceil((double)z * (double)L[i]) + ramp[k]),
                          "L %zu span %g R %g: reach %zu", L[i], span[j], ramp[k], reach);
                CHECK(S >= far && S <= L[i] && (L[i] - S) % 64 == 0,
                      "L %zu span %g R %g: window %zu, the last key with weight is %zu steps back",
                      L[i], span[j], ramp[k], S, far);
                CHECK(C == (S + 64 < L[i] ? S + 64 : L[i]) && max == (double)reach && avg == max,
                      "L %zu span %g R %g: cache %zu, reported %g", L[i], span[j], ramp[k], C, max);
                if (L[i] > 60
                    && (cases++ % (SLOW ? 12 : 3) == 0
                        || (L[i] == 66 && span[j] == 0.6 && ramp[k] == 1.5))) {
                    size_t n = 150, B = 2, at, w;
                    int32_t *ids = text(B, n, 4);
                    stx_real *want = whole_mask(m, ids, B, n),
                             *have = (stx_real *)malloc(B * n * 8 * sizeof *have),
                             *scores = (stx_real *)malloc(B * n * V * sizeof *scores);
                    stx_span_state *s = stx_span_state_create(m, B);
                    stx_span_gen *g = stx_span_gen_create(m, B);
                    int32_t *one = (int32_t *)malloc(B * n * sizeof *one);
                    double worst = 0;
                    stx_begin(x, STX_EVAL);
                    stx_get(x, stx_span_forward(m, block(x, ids, B, n, 0, n), NULL, NULL), have);
                    CHECK(difference(have, want, B * n * 8) <= 2e-5,
                          "L %zu span %g R %g: the forward leaves out %g", L[i], span[j], ramp[k],
                          difference(have, want, B * n * 8));
                    stx_get(x, stx_span_log_probs(m, stx_input(x, want, B, n, 8, 0)), scores);
                    for (at = 0; at < n; at += w) {
                        size_t b;
                        const stx_real *y;
                        w = n - at < 19 ? n - at : 19;
                        stx_begin(x, STX_EVAL);
                        stx_get(x, stx_span_forward(m, block(x, ids, B, n, at, w), s, s), have);
                        for (b = 0; b < B; b++)
                            worst = fmax(worst, difference(have + b * w * 8,
                                                           want + (b * n + at) * 8, w * 8));
                        for (b = 0; b < B; b++)
                            memcpy(one + b * w, ids + b * n + at, w * sizeof *one);
                        y = stx_span_gen_feed(g, one, w);
                        for (b = 0; y && b < B; b++)
                            worst = fmax(worst, difference(y + b * V,
                                                           scores + (b * n + at + w - 1) * V, V));
                    }
                    CHECK(worst <= 2e-5, "L %zu span %g R %g: memory or generation leave out %g",
                          L[i], span[j], ramp[k], worst);
                    free(ids);
                    free(want);
                    free(have);
                    free(scores);
                    free(one);
                }
                for (l = 0; l < 2; l++)
                    CHECK(stx_attention_reach(l ? NAN : -3, 100, ramp[k], 100) == 0,
                          "reach of no span");
                CHECK(stx_attention_reach(1e300, 1e300, ramp[k], 100) == 100
                          && stx_attention_reach(0.5, 1e18, ramp[k], SIZE_MAX)
                                 >= (size_t)500000000000000000,
                      "reach of a huge span");
                CHECK(stx_ok(x), "%s", stx_error(x));
                stx_destroy(x);
            }
}

/* the example that the manual works by hand */
static void by_hand(void) {
    static const double e[4] = {1, 4.0 / 3, 4, 5.0 / 3}, v[4] = {6, 0, 9, 3}; /* t = 1..4 */
    int form;
    for (form = 0; form < 2; form++) {
        stx_ctx *x = context(1, 1);
        stx_params *p = stx_params_create(x);
        stx_real q = 1, key[5], val[5], got, z = (stx_real)0.125;
        stx_attention_in in;
        stx_attention_desc d;
        stx_tensor *y, *zt;
        int t;
        memset(&in, 0, sizeof in);
        memset(&d, 0, sizeof d);
        /* the query's own row: never attended to */
        key[4] = val[4] = 0;
        for (t = 1; t <= 4; t++) {
            key[4 - t] = (stx_real)log(e[t - 1]);
            val[4 - t] = (stx_real)v[t - 1];
        }
        zt = stx_param(p, STX_CONSTANT, 0.125, "z", 1, 0, 0, 0);
        stx_set(x, zt, &z);
        stx_begin(x, STX_TRAIN);
        in.q = stx_input(x, &q, 1, 1, 1, 0);
        in.k = stx_input(x, key, 1, 5, 1, 0);
        in.v = stx_input(x, val, 1, 5, 1, 0);
        in.span_fraction = zt;
        d.heads = 1;
        d.span = 4;
        d.delta_min = 1;
        d.max_span = 4;
        d.ramp = 2;
        d.no_renorm = form;
        y = stx_attention(x, &in, &d);
        CHECK(stx_ok(x), "%s", stx_error(x));
        if (!stx_ok(x)) {
            stx_destroy(x);
            continue;
        }
        stx_get(x, y, &got);
        CHECK(fabs((double)got - (form ? 15.0 / 8 : 5)) < 1e-5, "y %g", (double)got);
        stx_backward(x, stx_mean(x, y));
        if (!form)
            CHECK(fabs((double)zt->grad[0] - 56.0 / 9) < 1e-4, "dy/dz %g", (double)zt->grad[0]);
        stx_destroy(x);
    }
}

/* What three windows cost when heads are cut at i and j of the falling list of their
   windows */
static size_t cut_cost(const size_t *w, size_t n, size_t m, size_t i, size_t j) {
    size_t k, cost = 64 * n * ((i < n) + (j < n && j > i));
    for (k = 0; k < n; k++) cost += k < i ? m : w[k < j ? i : j];
    return cost;
}

/* The groups are as cheap as any, and every head has what it needs */
static void cheapest_groups(void) {
    size_t c, h, i, j, n, m, need[9], w[9], cost, best;
    for (c = 0; c < 400; c++) {
        stx_head_groups g;
        n = 1 + c % 9;
        m = 1 + (size_t)((test_rand() + 1) * (c % 2 ? 1000 : 100));
        for (h = 0; h < n; h++) {
            need[h] = (size_t)((test_rand() + 1) / 2 * (test_rand() > 0 ? 1.2 : 0.2) * (double)m);
            w[h] = STX_MIN(m, (STX_MAX(need[h], 1) + 63) / 64 * 64);
            for (i = h; i > 0 && w[i - 1] < w[i]; i--) {
                size_t t = w[i];
                w[i] = w[i - 1];
                w[i - 1] = t;
            }
        }
        stx_head_groups_choose(need, n, m, &g);
        CHECK(g.count >= 1 && g.count <= 3 && g.rows[0] == m, "groups %zu", g.count);
        for (i = 1; i < g.count; i++)
            CHECK(g.rows[i] < g.rows[i - 1] && g.rows[i] % 64 == 0 && g.rows[i],
                  "windows do not fall");
        for (h = 0, cost = 64 * n * (g.count - 1); h < n; h++) {
            CHECK(g.of[h] < g.count && g.rows[g.of[h]] >= STX_MIN(m, need[h]),
                  "head %zu has %zu rows and needs %zu", h, g.rows[g.of[h]], need[h]);
            cost += g.rows[g.of[h]];
        }
        for (i = 0; i < g.count; i++) {
            for (h = 0; h < n && g.of[h] != i; h++) {
            }
            CHECK(h < n, "group %zu has no head", i);
        }
        /* heads of one window stay together */
        for (best = m * n, i = 1; i < n; i++)
            for (j = i + 1; j <= n; j++)
                if (w[i] < w[i - 1] && (j == n || w[j] < w[j - 1]))
                    best = STX_MIN(best, cut_cost(w, n, m, i, j));
        CHECK(cost == best, "%zu heads, %zu rows: the groups cost %zu, others %zu", n, m, cost,
              best);
    }
}

/* The most memory of a step over a full cache, counted, with heads of these spans */
static size_t groups_peak(const double *z, size_t B, size_t dim, size_t heads) {
    stx_span_desc d = small();
    stx_desc cd;
    stx_ctx *x;
    stx_span *m;
    stx_span_state *s;
    int32_t *t = text(B, 1200, 5);
    size_t l, h, at, peak;
    memset(&cd, 0, sizeof cd);
    cd.dry = 1;
    cd.chunk_bytes = 4096;
    x = stx_create(&cd);
    d.dim = dim;
    d.heads = heads;
    d.span = 1024;
    m = stx_span_create(x, &d);
    for (l = 0; l < 2; l++)
        for (h = 0; h < heads; h++) m->layer[l].z->data[h] = (stx_real)z[h];
    s = stx_span_state_create(m, B);
    for (at = 0; at < 1000; at += 100) {
        stx_begin(x, STX_EVAL);
        stx_span_forward(m, block(x, t, B, 1200, at, 100), s, s);
    }
    stx_begin(x, STX_TRAIN);
    stx_backward(x, stx_span_loss(m, block(x, t, B, 1200, 1000, 100),
                                  block(x, t, B, 1200, 1001, 100), s, s));
    peak = stx_peak_bytes(x);
    CHECK(stx_ok(x), "%s", stx_error(x));
    free(t);
    stx_destroy(x);
    return peak;
}

/* Groups never take more than one window for all does */
static void groups_memory(void) {
    static const double full[8] = {0.93, 0.93, 0.93, 0.93, 0.93, 0.93, 0.93, 0.93};
    static const size_t sizes[][3] = {{1, 48, 6}, {3, 48, 6}, {8, 64, 8}, {2, 24, 2}, {16, 16, 4}};
    size_t i, c, h, less = 0;
    for (i = 0; i < 5; i++) {
        const size_t all = groups_peak(full, sizes[i][0], sizes[i][1], sizes[i][2]);
        for (c = 0; c < (SLOW ? 2 : 12); c++) {
            double z[8];
            size_t got;
            for (h = 0; h < 8; h++)
                z[h] = h < 1 + c % 3 ? 0.93 : (test_rand() + 1) / 2 * (c % 2 ? 0.9 : 0.3);
            got = groups_peak(z, sizes[i][0], sizes[i][1], sizes[i][2]);
            CHECK(got <= all, "B %zu: %zu bytes, %zu with one window", sizes[i][0], got, all);
            less += got < all;
        }
    }
    CHECK(less > 5, "groups save memory %zu times", less);
}

/* Heads of three reaches: keys and values of the past by groups, against every head's
   over the whole window, by hand. A head's window is part of the step's key. */
static void groups(void) {
    static const double z[2][6] = {{0.02, 0.9, 0.3, 0.02, 0.9, 0.28},
                                   {0.95, 0.01, 0.01, 0.02, 0.03, 0.4}};
    int pers, k;
    cheapest_groups();
    groups_memory();
    for (pers = 0; pers < 2; pers++)
        for (k = 0; k < 2; k++) {
            stx_span_desc d = small();
            stx_ctx *x = context(2, 3);
            stx_span *m;
            stx_span_state *s;
            stx_tensor *h, *y;
            int32_t *t = text(2, 1200, 5);
            stx_real *got, **grad;
            double worst = 0, top;
            uint64_t key;
            size_t l, i, at, c, need[6];
            stx_head_groups g;
            d.dim = 48;
            d.heads = 6;
            d.span = 1024;
            d.dropout = k ? 0.2 : 0;
            d.pers = pers ? 5 : 0;
            d.recompute_layers = k;
            m = stx_span_create(x, &d);
            for (l = 0; l < 2; l++)
                for (i = 0; i < 6; i++) m->layer[l].z->data[i] = (stx_real)z[l][i];
            s = stx_span_state_create(m, 2);
            for (at = 0; at < 1120; at += 40) {
                stx_begin(x, STX_EVAL);
                stx_span_forward(m, block(x, t, 2, 1200, at, 40), s, s);
            }
            for (i = 0; i < 6; i++) need[i] = stx_attention_reach(z[0][i], 1024, d.ramp, 1024) + 1;
            stx_head_groups_choose(need, 6, 960, &g);
            CHECK(g.count == 3 && stx_span_window(m, 0) == 960, "%zu groups", g.count);
            key = stx_span_key(m, NULL, NULL, s, 0);
            m->layer[0].z->data[2] = (stx_real)0.28; /* the windows stay */
            stx_begin(x, STX_TRAIN);
            CHECK(stx_span_key(m, NULL, NULL, s, 0) == key,
                  "the key depends on spans within a window");
            m->layer[0].z->data[2] = m->layer[0].z->data[5] = (stx_real)0.45;
            CHECK(stx_span_key(m, NULL, NULL, s, 0) != key, "a group's window is not in the key");
            m->layer[0].z->data[2] = (stx_real)0.3;
            m->layer[0].z->data[5] = (stx_real)0.28;
            stx_set_step_index(x, 9);
            stx_begin(x, STX_TRAIN);
            y = stx_span_forward(m, block(x, t, 2, 1200, 1120, 40), s, NULL);
            CHECK(y, "%s", stx_error(x));
            got = (stx_real *)malloc(y->size * sizeof *got);
            stx_get(x, y, got);
            stx_params_zero_grad(m->params);
            stx_backward(x, stx_mean(x, stx_mul(x, y, y)));
            grad = (stx_real **)malloc(m->params->count * sizeof *grad);
            for (i = 0; i < m->params->count; i++) {
                grad[i] = (stx_real *)malloc(m->params->tensor[i]->size * sizeof **grad);
                memcpy(grad[i], m->params->tensor[i]->grad,
                       m->params->tensor[i]->size * sizeof **grad);
            }
            stx_params_zero_grad(m->params);
            stx_set_step_index(x, 9);
            stx_begin(x, STX_TRAIN);
            h = stx_embedding(x, m->vocab_io->in_emb, block(x, t, 2, 1200, 1120, 40));
            for (l = 0; l < 2; l++) {
                stx_span_layer *p = &m->layer[l];
                stx_attention_in in;
                stx_attention_desc a;
                stx_tensor *f, *X;
                size_t S = stx_span_window(m, l);
                memset(&in, 0, sizeof in);
                memset(&a, 0, sizeof a);
                X = stx_concat(x, stx_memory_read(s->memory, l, S), h);
                in.q = stx_linear(x, h, p->wq, NULL, STX_ACT_NONE);
                in.k = stx_linear(x, X, p->wk, NULL, STX_ACT_NONE);
                in.v = stx_linear(x, X, p->wv, NULL, STX_ACT_NONE);
                in.pe = m->key_pe;
                in.span_fraction = p->z;
                in.persistent_k = p->pers_key;
                in.persistent_v = p->pers_val;
                a.heads = 6;
                a.span = S;
                a.delta_min = 1;
                a.max_span = 1024;
                a.ramp = d.ramp;
                a.dropout = d.dropout;
                f = stx_linear(x, stx_attention(x, &in, &a), p->wo, NULL, STX_ACT_NONE);
                h = stx_residual_norm(x, h, f, 0, p->norm1_gain, p->norm1_shift, 1e-5);
                if (pers) continue;
                f = stx_dropout(x, stx_linear(x, h, p->w1, p->b1, STX_ACT_RELU), d.dropout);
                h = stx_residual_norm_bias(x, h, stx_linear(x, f, p->w2, NULL, STX_ACT_NONE), p->b2,
                                           0, p->norm2_gain, p->norm2_shift, 1e-5);
            }
            CHECK(h && difference(h->data, got, h->size) <= 4 * GROUPS_OFF,
                  "pers %d, dropout %g: by groups is off by %g", pers, d.dropout,
                  h ? difference(h->data, got, h->size) : 1);
            stx_backward(x, stx_mean(x, stx_mul(x, h, h)));
            for (i = 0; i < m->params->count; i++) {
                const stx_tensor *q = m->params->tensor[i];
                for (top = 1e-4, c = 0; c < q->size; c++)
                    if (fabs((double)q->grad[c]) > top) top = fabs((double)q->grad[c]);
                worst = difference(q->grad, grad[i], q->size) / top;
                CHECK(worst <= 30 * GROUPS_OFF,
                      "pers %d, dropout %g: the gradient of %s is off by %g of its largest", pers,
                      d.dropout, m->params->name[i], worst);
                free(grad[i]);
            }
            CHECK(stx_ok(x), "%s", stx_error(x));
            free(grad);
            free(got);
            free(t);
            stx_destroy(x);
        }
}

/* What a memory cannot do is refused, and nothing is lost. */
static void memory_errors(void) {
    stx_span_desc d;
    stx_ctx *x = context(1, 0);
    stx_span *m, *shallow;
    stx_span_state *s, *other;
    stx_real rows[2 * 4 * 8];
    int32_t ids[2 * 4] = {1, 2, 3, 4, 5, 6, 7, 8};
    uint64_t key;
    memset(&d, 0, sizeof d);
    d.vocab = 16;
    d.layers = 2;
    d.dim = 8;
    d.heads = 2;
    d.span = 64;
    m = stx_span_create(x, &d);
    d.layers = 1;
    shallow = stx_span_create(x, &d);
    s = stx_span_state_create(m, 2);
    other = stx_span_state_create(shallow, 2);
    stx_begin(x, STX_EVAL);
    stx_span_forward(m, stx_tokens(x, ids, 2, 4), NULL, s);
    CHECK(stx_span_state_get(s, 0, rows), "%s", stx_error(x));

    /* the rows of a stream that was reset do not exist: they are not copied as zeros */
    stx_span_state_reset_stream(s, 1);
    CHECK(!stx_span_state_get(s, 0, rows), "a memory with missing rows is copied");
    CHECK(test_says(stx_error(x), "stx_span_state_get: .. reset: use"), "%s", stx_error(x));
    stx_clear_error(x);

    /* a key of a memory of another model */
    key = stx_span_key(m, NULL, NULL, other, 0);
    (void)key;
    CHECK(test_says(stx_error(x), "stx_span_key: expected a memory of this model"), "%s",
          stx_error(x));
    stx_clear_error(x);

    CHECK(!stx_span_state_load(s, NULL, "memory."), "loaded from no file");
    CHECK(test_says(stx_error(x), "stx_span_state_load: expected a file"), "%s", stx_error(x));
    CHECK(s->memory->layer[0].count == 0, "a failed load leaves rows");
    stx_clear_error(x);

    d.pers = ((size_t)1 << 30) + 1;
    CHECK(stx_span_count(&d) == 0, "counted");
    CHECK(!stx_span_create(x, &d)
              && test_says(stx_error(x), "pers: expected at most 1073741824, got"),
          "%s", stx_error(x));
    stx_destroy(x);
}

int main(void) {
    memory_errors();
    by_hand();
    groups();
    windows();
    ramps();
    generation_and_memory();
    dropout();
    literal();
    beginnings();
    logits_and_log_probs();
    handed_over();
    fairseq_form();
    evaluation_is_separate();
    repeatable();
    callers_threads();
    learns();
    resume();
    errors();
    return test_end();
}
