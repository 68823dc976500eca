/* test_span.c - behaviour of seqtx_attn_span.h beyond the golden vectors: causality;
   blocks with memory, and generation, compared with one long forward pass; training,
   recomputation and resumption; groups of heads; errors. */
#include <pthread.h>
#include <stdint.h>
#include "../../seqtx_attn_span.h"
#include "family.h"
#include <unistd.h>

enum { V = 29 };

#ifdef TEST_AMX_EMULATED
/* AMX emulation and sanitizers make this build slow. It covers the same code paths with
   fewer steps and cases, and other builds check the results. */
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

/* Sets spans that differ between heads, so that windows can skip keys. */
static void set_spans(stx_span *m) {
    size_t l, h;
    for (l = 0; l < m->desc.layers; l++)
        for (h = 0; m->layer[l].z && h < m->layer[l].z->size; h++)
            m->layer[l].z->data[h] = (stx_real)(0.031 + 0.17 * (double)((l + 2 * h) % 4));
}

/* Runs one training step on tokens [at, at + T] of a text (B,n) and returns the loss. */
static double step(stx_span *m, stx_optim *o, stx_span_state *s, const int32_t *t, size_t B,
                   size_t n, size_t at, size_t T) {
    stx_ctx *x = m->ctx;
    stx_tensor *loss;
    double v;
    stx_begin(x, STX_TRAIN);
    loss =
        stx_span_loss(m, token_block(x, t, B, n, at, T), token_block(x, t, B, n, at + 1, T), s, s);
    v = stx_item(x, loss);
    stx_backward(x, stx_span_total(m, loss));
    if (stx_optim_step(o, 0.003)) stx_span_clamp(m);
    return v;
}

/* Returns a copy of all parameters' elements, one parameter after another. The caller
   frees it. */
static stx_real *all_parameters(const stx_params *p) {
    stx_real *all = (stx_real *)malloc(stx_params_size(p) * sizeof *all);
    size_t i, at;
    for (i = at = 0; i < p->count; i++) {
        memcpy(all + at, p->tensor[i]->data, p->tensor[i]->size * sizeof *all);
        at += p->tensor[i]->size;
    }
    return all;
}

/* Computes the attention sublayer of layer l with single ops, without its residual
   connection. Queries come from h; keys and values come from `rows`, whose last rows
   are h. */
static stx_tensor *attention_by_hand(stx_span *m, size_t l, stx_tensor *h, stx_tensor *rows,
                                     size_t span, double eps) {
    stx_ctx *x = m->ctx;
    const stx_span_layer *p = &m->layer[l];
    stx_attention_in in;
    stx_attention_desc d;
    memset(&in, 0, sizeof in);
    memset(&d, 0, sizeof d);
    in.q = stx_linear(x, h, p->wq, NULL, STX_ACT_NONE);
    in.k = stx_linear(x, rows, p->wk, NULL, STX_ACT_NONE);
    in.v = stx_linear(x, rows, p->wv, NULL, STX_ACT_NONE);
    in.pe = m->key_pe;
    in.span_fraction = p->z;
    in.persistent_k = p->pers_key;
    in.persistent_v = p->pers_val;
    d.heads = m->desc.heads;
    d.span = span;
    d.delta_min = 1;
    d.max_span = (double)m->desc.span;
    d.ramp = m->desc.ramp;
    d.dropout = m->desc.dropout;
    d.eps = eps;
    return stx_linear(x, stx_attention(x, &in, &d), p->wo, NULL, STX_ACT_NONE);
}

/* Returns variant k of the model. Generation, causality and memory are tested for all
   variants. */
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

/* Returns log p (B,n,V) of a text, computed in blocks of T tokens with memory. */
static stx_real *by_blocks(stx_span *m, const int32_t *t, size_t B, size_t n, size_t T,
                           stx_span_state *s) {
    stx_real *all = (stx_real *)calloc(B * n * V, sizeof *all);
    size_t at, b, w;
    for (at = 0; at < n; at += w) {
        stx_tensor *y;
        w = n - at < T ? n - at : T;
        stx_begin(m->ctx, STX_EVAL);
        y = stx_span_log_probs(m, stx_span_forward(m, token_block(m->ctx, t, B, n, at, w), s, s));
        if (!y) break;
        for (b = 0; b < B; b++)
            memcpy(all + (b * n + at) * V, y->data + b * w * V, w * V * sizeof *all);
    }
    return all;
}

/* Compares generation with log p of the whole text. The prompt is fed in parts of many
   lengths, the rest token by token. */
static void generation_is_forward(const char *name, stx_span *m, const int32_t *t, size_t B,
                                  size_t n, const stx_real *whole) {
    stx_span_gen *g = stx_span_gen_create(m, B);
    int32_t *piece = (int32_t *)malloc(B * n * sizeof *piece);
    size_t at, b, feeds, bytes = 0;
    double worst = 0;

    for (at = 0, feeds = 0; at < n; feeds++) {
        size_t w = at < 300 ? 1 + feeds * 13 % 90 : 1;
        const stx_real *y;
        if (w > n - at) w = n - at;
        for (b = 0; b < B; b++) memcpy(piece + b * w, t + b * n + at, w * sizeof *piece);
        y = stx_span_gen_feed(g, piece, w);
        at += w;
        if (!y) break;
        for (b = 0; b < B; b++)
            raise_worst(&worst, max_difference(y + b * V, whole + (b * n + at - 1) * V, V));
        if (at > 500 && !bytes) bytes = stx_bytes(m->ctx);
    }
    CHECK(at == n && worst <= 1e-5 * largest(whole, B * n * V),
          "%s: generation differs from the forward by %g %s", name, worst, stx_error(m->ctx));
    CHECK(bytes == stx_bytes(m->ctx), "%s: generation keeps allocating", name);
    stx_span_gen_free(g);
    free(piece);
}

/* Causality: changing the token at position p must change the output at p, but nothing
   before it and nothing in the other row. blocks: log p of the text. */
static void causality(const char *name, stx_span *m, int32_t *t, size_t n, const stx_real *blocks) {
    stx_span_state *s = stx_span_state_create(m, 2);
    const size_t p = 411;
    const int32_t token = t[p];
    stx_real *changed;

    t[p] = (token + 1) % V;
    changed = by_blocks(m, t, 2, n, 64, s);
    CHECK(max_difference(changed, blocks, p * V) == 0, "%s: a token changed the past", name);
    CHECK(max_difference(changed + p * V, blocks + p * V, V) > 0, "%s: a token changed nothing",
          name);
    CHECK(max_difference(changed + n * V, blocks + n * V, n * V) == 0,
          "%s: a token changed another row", name);
    t[p] = token;
    free(changed);
    stx_span_state_free(s);
}

static void generation_and_memory(void) {
    int k;
    for (k = 0; k < VARIANTS; k++) {
        const char *name;
        stx_span_desc d = variant(k, &name);
        stx_ctx *x = context(2, 7);
        stx_span *m = stx_span_create(x, &d);
        size_t B = 2, n = 700;
        int32_t *t = ordered_tokens(B, n, V, 5);
        stx_span_state *s = stx_span_state_create(m, B), *s2 = stx_span_state_create(m, B);
        stx_real *whole, *blocks;

        set_spans(m);
        whole = by_blocks(m, t, B, n, n, s); /* the whole text in one forward pass */
        stx_span_state_reset(s2);
        blocks = by_blocks(m, t, B, n, 64, s2);
        CHECK(max_difference(whole, blocks, B * n * V) <= 1e-5 * largest(whole, B * n * V),
              "%s: blocks with memory differ from one text by %g", name,
              max_difference(whole, blocks, B * n * V));
        generation_is_forward(name, m, t, B, n, whole);
        causality(name, m, t, n, blocks);

        stx_span_state_free(s);
        stx_span_state_free(s2);
        free(whole);
        free(blocks);
        free(t);
        CHECK(stx_ok(x), "%s: %s", name, stx_error(x));
        stx_destroy(x);
    }
}

/* Computes the last hidden states (2,40,d) of a model with the chain of ops of the
   authors' code. Dropout is applied to the embedding, to the attention weights
   (including those of persistent vectors), inside the feed-forward layer and to the
   last hidden state, and nowhere else. */
static stx_tensor *forward_by_hand(stx_span *m, const int32_t *t) {
    stx_ctx *x = m->ctx;
    const stx_span_desc *d = &m->desc;
    stx_tensor *h, *f;
    size_t l;

    h = stx_embedding(x, m->vocab_io->in_emb, token_block(x, t, 2, 40, 0, 40));
    h = stx_dropout(x, h, d->emb_dropout);
    for (l = 0; l < d->layers; l++) {
        const stx_span_layer *p = &m->layer[l];
        f = attention_by_hand(m, l, h, h, stx_span_window(m, l), 0);
        h = stx_layernorm(x, stx_add(x, h, f), p->norm1_gain, p->norm1_shift, 0);
        if (d->pers) continue;
        f = stx_dropout(x, stx_linear(x, h, p->w1, p->b1, STX_ACT_RELU), d->dropout);
        f = stx_linear(x, f, p->w2, p->b2, STX_ACT_NONE);
        h = stx_layernorm(x, stx_add(x, h, f), p->norm2_gain, p->norm2_shift, 0);
    }
    return stx_dropout(x, h, d->emb_dropout);
}

/* The model and the chain of ops draw the same masks, so their results must be
   bit-identical. */
static void dropout_case(size_t pers, double dropout, double emb_dropout) {
    stx_span_desc d = small();
    stx_ctx *x = context(2, 13);
    stx_span *m;
    int32_t *t = ordered_tokens(2, 40, V, 17);
    stx_tensor *h, *y;
    stx_real *model;

    d.pers = pers;
    d.dropout = dropout;
    d.emb_dropout = emb_dropout;
    m = stx_span_create(x, &d);
    set_spans(m);
    stx_begin(x, STX_TRAIN);
    y = stx_span_forward(m, token_block(x, t, 2, 40, 0, 40), NULL, NULL);
    model = (stx_real *)malloc(y->size * sizeof *model);
    memcpy(model, y->data, y->size * sizeof *model);

    stx_set_step_index(x, stx_step_index(x) - 1); /* draws the same masks again */
    stx_begin(x, STX_TRAIN);
    h = forward_by_hand(m, t);
    CHECK(h && !memcmp(h->data, model, h->size * sizeof *model),
          "pers %zu, dropout %g, emb_dropout %g: differs from the chain of ops by %g", pers,
          dropout, emb_dropout, h ? max_difference(h->data, model, h->size) : 0);

    stx_begin(x, STX_EVAL);
    y = stx_span_forward(m, token_block(x, t, 2, 40, 0, 40), NULL, NULL);
    CHECK(y && (max_difference(y->data, model, y->size) > 1e-3) == (dropout || emb_dropout),
          "pers %zu: dropout %g, emb_dropout %g: no effect, or an effect of rates of 0", pers,
          dropout, emb_dropout);
    free(model);
    free(t);
    CHECK(stx_ok(x), "%s", stx_error(x));
    stx_destroy(x);
}

static void dropout(void) {
    int k;
    for (k = 0; k < 4; k++) {
        const double rate = k & 1 ? 0.3 : 0, emb_rate = k & 2 ? 0.2 : 0;
        dropout_case(0, rate, emb_rate);
        dropout_case(4, rate, emb_rate);
    }
}

/* STX_SPAN_LITERAL must select only the literal forms that apply to the model. */
static void literal(void) {
    static const unsigned expected[4] = {2, 3, 2, 2};
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
        CHECK(m && m->desc.literal == expected[k], "model %d: %u, expected %u %s", k,
              m ? m->desc.literal : 99, expected[k], stx_error(x));
        stx_destroy(x);
    }
}

/* By default, the first tokens must see no keys in an empty memory, and padding rows
   must have no effect. With STX_SPAN_LITERAL_MEMORY, the memory's zero rows must be
   keys. */
static void beginnings(void) {
    stx_span_desc d = small();
    stx_ctx *x = context(1, 3);
    stx_span *m = stx_span_create(x, &d);
    int32_t *t = ordered_tokens(1, 40, V, 9);
    stx_real *a, *b;
    stx_span_state *s = stx_span_state_create(m, 1);
    set_spans(m);
    a = by_blocks(m, t, 1, 40, 40, s);
    m->desc.literal = STX_SPAN_LITERAL_MEMORY;
    stx_span_state_reset(s);
    b = by_blocks(m, t, 1, 40, 40, s);
    CHECK(max_difference(a, b, 40 * V) > 1e-4, "STX_SPAN_LITERAL_MEMORY has no effect");
    free(a);
    free(b);
    free(t);
    stx_destroy(x);
}

/* stx_span_logits must return logits or an error, stx_span_log_probs must return log p
   without a gradient, and generation must return log p. */
static void logits_and_log_probs(void) {
    int k;
    for (k = 0; k < 5; k += 4) {
        const char *name;
        stx_span_desc d = variant(k, &name);
        stx_ctx *x = context(1, 3);
        stx_span *m = stx_span_create(x, &d);
        int32_t *t = ordered_tokens(2, 20, V, 9);
        stx_tensor *h, *y, *z;
        const stx_real *g;
        stx_real last[V];
        double total = 0;
        size_t r, v;

        stx_begin(x, STX_TRAIN);
        h = stx_span_forward(m, token_block(x, t, 2, 20, 0, 20), NULL, NULL);
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
                raise_worst(&off, fabs((double)z->data[r * V + v] - log(raw)
                                       - (double)y->data[r * V + v]));
            CHECK(fabs(sum - 1) < 1e-5 && off < 1e-5 && (!z || fabs(log(raw)) > 1e-4),
                  "%s row %zu: the sum is %g, the largest difference %g", name, r, sum, off);
        }

        memcpy(last, y->data + 19 * V, sizeof last);
        g = stx_span_gen_feed(stx_span_gen_create(m, 1), t, 20);
        for (v = 0; g && v < V; v++) total += exp((double)g[v]);
        CHECK(g && fabs(total - 1) < 1e-5 && max_difference(g, last, V) < 1e-5,
              "%s: generation: the sum is %g %s", name, total, stx_error(x));
        free(t);
        stx_destroy(x);
    }
}

/* Copies one state's memory to another state, layer by layer. Returns nonzero if the
   memory of a layer is full. */
static int copy_memory(const char *name, stx_span_state *from, stx_span_state *to, size_t B) {
    stx_span *m = from->model;
    size_t l;
    int full = 0;
    for (l = 0; l < m->desc.layers; l++) {
        const stx_memory_layer *p = &from->memory->layer[l];
        stx_real *row = (stx_real *)malloc((B * p->count * m->desc.dim + 1) * sizeof *row);
        CHECK(stx_span_state_get(from, l, row)
                  && stx_span_state_set(to, l, p->logical_count, row, p->count),
              "%s: %s %s", name, stx_error(m->ctx), stx_error(to->model->ctx));
        full |= p->count == stx_span_cache_length(m, l);
        free(row);
    }
    return full;
}

/* Returns the hidden states (B,T,d) of tokens [at, at + T) of a text (B,n). The caller
   frees them. */
static stx_real *hidden(stx_span *m, const int32_t *t, size_t B, size_t n, size_t at, size_t T,
                        stx_span_state *before, stx_span_state *after) {
    stx_real *h = (stx_real *)malloc(B * T * m->desc.dim * sizeof *h);
    stx_begin(m->ctx, STX_EVAL);
    stx_get(m->ctx, stx_span_forward(m, token_block(m->ctx, t, B, n, at, T), before, after), h);
    return h;
}

/* A memory that cannot be set must be refused with an error, and the state must not
   change. */
static void memory_refused(stx_span_state *s) {
    const stx_span_desc *d = &s->model->desc;
    stx_ctx *x = s->model->ctx;
    stx_real row[1] = {0};
    const struct {
        size_t layer, logical;
        const stx_real *rows;
        size_t count;
    } cases[] = {{d->layers, 5, row, 0}, {0, d->span + 1, row, 0}, {0, 5, row, 6}, {0, 5, NULL, 2}};
    size_t i;
    for (i = 0; i < 4; i++) {
        const stx_memory_layer before = s->memory->layer[0];
        CHECK(!stx_span_state_set(s, cases[i].layer, cases[i].logical, cases[i].rows,
                                  cases[i].count)
                  && !stx_ok(x),
              "case %zu", i);
        CHECK(s->memory->layer[0].logical_count == before.logical_count
                  && s->memory->layer[0].count == before.count
                  && strstr(stx_error(x), "stx_memory_set"),
              "case %zu: %s", i, stx_error(x));
        stx_clear_error(x);
    }
    CHECK(!stx_span_state_get(s, d->layers, NULL)
              && strstr(stx_error(x), "layer: expected less than 2, got 2"),
          "%s", stx_error(x));
}

/* A memory that is copied to another context must give bit-identical hidden states,
   both while the memories fill and when they are full. */
static void copied_memory(void) {
    int k;
    for (k = 0; k < VARIANTS; k++) {
        const char *name;
        stx_span_desc d = variant(k, &name);
        stx_ctx *x[2];
        stx_span *m[2];
        stx_span_state *s[2], *empty;
        const size_t B = 2, n = 500, length[2] = {30, 61};
        size_t at, T;
        int32_t *t = ordered_tokens(B, n, V, 12);
        int c, steps, full = 0;

        for (c = 0; c < 2; c++) {
            x[c] = context(1 + c, 4);
            m[c] = stx_span_create(x[c], &d);
            set_spans(m[c]);
            s[c] = stx_span_state_create(m[c], B);
        }
        empty = stx_span_state_create(m[1], B);
        for (at = 0, steps = 0; at + 2 * length[steps & 1] < n; steps++, at += T) {
            stx_real *original, *copy, *without;
            T = length[steps & 1];
            full |= copy_memory(name, s[0], s[1], B);
            original = hidden(m[0], t, B, n, at, T, s[0], s[0]);
            copy = hidden(m[1], t, B, n, at, T, s[1], s[1]);
            without = hidden(m[1], t, B, n, at, T, empty, NULL);
            CHECK(!memcmp(original, copy, B * T * d.dim * sizeof *copy),
                  "%s at %zu: the copied memory differs by %g", name, at,
                  max_difference(original, copy, B * T * d.dim));
            CHECK((max_difference(without, copy, B * T * d.dim) > 1e-4) == (at > 0),
                  "%s at %zu: the memory has no effect", name, at);
            free(original);
            free(copy);
            free(without);
        }
        CHECK(full, "%s: no memory was ever full", name);
        memory_refused(s[1]);
        free(t);
        for (c = 0; c < 2; c++) stx_destroy(x[c]);
    }
}

/* Returns the root mean square of a tensor's elements. *top receives the largest
   magnitude. */
static double root_mean_square(const stx_tensor *t, double *top) {
    double sum = 0;
    size_t i;
    *top = 0;
    for (i = 0; i < t->size; i++) {
        sum += (double)t->data[i] * (double)t->data[i];
        *top = fmax(*top, fabs((double)t->data[i]));
    }
    return sqrt(sum / (double)t->size);
}

/* Checks the initial values of the original code and, with fairseq_init, of fairseq:
   their standard deviation, and whether they are normal (largest > 2.5 deviations) or
   uniform (largest = sqrt(3) deviations). */
static void first_values(const stx_span *m, int fairseq) {
    const double sd = 1 / sqrt(96.0), xavier = sqrt(6.0 / (96 + 160)) / sqrt(3);
    const struct {
        const stx_tensor *t;
        double deviation[2];
        int uniform[2];
    } row[] = {
        /* tensor, standard deviation in {original, fairseq}, uniform in {original,
           fairseq} */
        {m->layer[1].wq, {sd / sqrt(3), sd}, {1, 0}},
        {m->layer[0].wo, {sd / sqrt(3), sd}, {1, 0}},
        {m->layer[1].w1, {sd / sqrt(3), xavier}, {1, 1}},
        {m->layer[1].w2, {1 / sqrt(160.0) / sqrt(3), xavier}, {1, 1}},
        {m->vocab_io->in_emb, {1, sd}, {0, 0}},
    };
    size_t i;
    for (i = 0; i < sizeof row / sizeof *row; i++) {
        const double expected = row[i].deviation[fairseq];
        double top, deviation = root_mean_square(row[i].t, &top);
        CHECK(fabs(deviation / expected - 1) < 0.03,
              "fairseq_init %d, tensor %zu: deviation %g, expected %g", fairseq, i, deviation,
              expected);
        CHECK(row[i].uniform[fairseq] ? top < 1.7321 * expected : top > 2.5 * expected,
              "fairseq_init %d, tensor %zu: largest %g, deviation %g", fairseq, i, top, expected);
    }
}

/* Checks what the options of fairseq's form change: the parameters, their initial
   values, and the head spans. */
static void fairseq_form(void) {
    stx_ctx *x = context(1, 8);
    int fairseq;
    for (fairseq = 0; fairseq < 2; fairseq++) {
        stx_span_desc d = small();
        stx_span *m;
        double first, third;
        d.dim = 96;
        d.inner = 160;
        d.vocab = 200;
        d.span = 400;
        d.no_renorm = d.span_per_layer = d.fairseq_init = fairseq;
        m = stx_span_create(x, &d);
        CHECK(m && m->layer[1].z->size == (fairseq ? 1 : 3)
                  && stx_params_size(m->params) == stx_span_count(&d),
              "%s", stx_error(x));
        if (!m) break;
        first_values(m, fairseq);
        m->layer[0].z->data[0] = (stx_real)0.5;
        first = stx_span_head_span(m, 0, 0);
        third = stx_span_head_span(m, 0, 2);
        CHECK(first == 200 && third == (fairseq ? 200 : 0) && stx_span_window(m, 0) == 208,
              "spans of layer 0: %g %g window %zu", first, third, stx_span_window(m, 0));
    }
    CHECK(stx_ok(x), "%s", stx_error(x));
    stx_destroy(x);
}

/* With no_renorm, the window affects the results: the span of one head changes which
   keys another head sees. Here only head 0 contributes to the output, and z of head 1
   changes. */
static void window_of_all_heads(void) {
    stx_ctx *x = context(1, 8);
    int32_t *t = ordered_tokens(1, 300, V, 2);
    int no_renorm;
    for (no_renorm = 0; no_renorm < 2; no_renorm++) {
        stx_span_desc d = small();
        stx_span *m;
        stx_real *a, *b;
        size_t k;
        d.layers = 1;
        d.span = 300;
        d.no_renorm = no_renorm;
        m = stx_span_create(x, &d);
        memset(m->layer[0].wo->data, 0, m->layer[0].wo->size * sizeof *a);
        for (k = 0; k < 8; k++) m->layer[0].wo->data[k * 24 + k] = 1;
        a = hidden(m, t, 1, 300, 0, 300, NULL, NULL);
        m->layer[0].z->data[1] = 1;
        b = hidden(m, t, 1, 300, 0, 300, NULL, NULL);
        CHECK((max_difference(a, b, 300 * d.dim) > 1e-3) == no_renorm,
              "no_renorm %d: another head's window changes the result by %g", no_renorm,
              max_difference(a, b, 300 * d.dim));
        free(a);
        free(b);
    }
    free(t);
    CHECK(stx_ok(x), "%s", stx_error(x));
    stx_destroy(x);
}

/* Evaluation and generation between training steps must not affect training. */
static void evaluation_is_separate(void) {
    int evaluate;
    stx_real *first = NULL;
    size_t n = 600;
    for (evaluate = 0; evaluate < 2; evaluate++) {
        stx_span_desc d = small();
        stx_ctx *x;
        stx_span *m;
        stx_optim *o;
        stx_span_state *s, *e;
        int32_t *t = ordered_tokens(3, n, V, 11);
        size_t i;
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
            if (evaluate) {
                stx_real *y = by_blocks(m, t, 1, 100, 30, e);
                stx_span_gen *g = stx_span_gen_create(m, 1);
                stx_span_gen_feed(g, t, 20);
                stx_span_gen_free(g);
                free(y);
            }
        }
        all = all_parameters(m->params);
        if (!first)
            first = all;
        else {
            CHECK(!memcmp(first, all, stx_params_size(m->params) * sizeof *all),
                  "evaluation between the steps changed training");
            free(all);
        }
        free(t);
        CHECK(stx_ok(x), "%s", stx_error(x));
        stx_destroy(x);
    }
    free(first);
}

/* Returns all parameters after some training steps. The batch of 4 streams is divided
   into `parts` parts. *size receives the number of elements, and *loss the loss of the
   last part. The caller frees the result. */
static stx_real *trained(const stx_span_desc *d, int threads, int kind, size_t parts, int steps,
                         size_t *size, double *loss) {
    stx_ctx *x = context(threads, 21);
    stx_span *m = stx_span_create(x, d);
    stx_optim_desc od;
    stx_optim *o;
    stx_span_state *s[4];
    size_t B = 4, T = 24, n = 24 * 40, rows = B / parts, p;
    int32_t *t = ordered_tokens(B, n, V, 31);
    stx_real *all;
    int k;
    memset(&od, 0, sizeof od);
    od.kind = kind;
    o = stx_optim_create(m->params, &od);
    for (p = 0; p < parts; p++) s[p] = stx_span_state_create(m, rows);
    for (k = 0; k < steps; k++) {
        for (p = 0; p < parts; p++) {
            const int32_t *part = t + p * rows * n;
            const size_t at = (size_t)k * T;
            stx_tensor *l;
            stx_begin(x, STX_TRAIN);
            l = stx_span_loss(m, token_block(x, part, rows, n, at, T),
                              token_block(x, part, rows, n, at + 1, T), s[p], s[p]);
            *loss = stx_item(x, l);
            stx_backward(x, stx_scale(x, stx_span_total(m, l), 1.0 / (double)parts));
        }
        if (stx_optim_step(o, 0.003)) stx_span_clamp(m);
    }
    *size = stx_params_size(m->params);
    all = all_parameters(m->params);
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
        d.recompute_layers = SIZE_MAX;
        free(b);
        b = trained(&d, (int)k, STX_ADAM, 1, 6, &n, &l2);
        CHECK(!memcmp(a, b, n * sizeof *a) && l == l2, "%zu threads: recomputation changes the run",
              k);
        d.recompute_layers = 0;
        free(a);
        free(b);
    }

    a = trained(&d, 1, STX_SGD, 1, 6, &n, &l);
    b = trained(&d, 3, STX_SGD, 1, 6, &n, &l2);
    CHECK(max_difference(a, b, n) < 1e-6 && CLOSE(l, l2, 1e-5), "1 and 3 threads differ by %g",
          max_difference(a, b, n));
    free(a);
    free(b);

    d.dropout = d.emb_dropout = 0;
    a = trained(&d, 1, STX_SGD, 1, 6, &n, &l);
    b = trained(&d, 1, STX_SGD, 4, 6, &n, &l2);
    CHECK(max_difference(a, b, n) < 1e-6, "a batch in 4 parts differs by %g",
          max_difference(a, b, n));
    free(a);
    free(b);
}

/* Changing span_loss and ramp between steps: the following steps are those of a model
   that was created with the new values. */
static void changed_between_steps(void) {
    stx_span_desc d = small();
    stx_ctx *x = context(1, 7);
    stx_span *before, *m;
    stx_ids *ids;
    stx_tensor *nll;
    int32_t t[2 * 65];
    double loss[2], total[2];
    uint64_t key[4];
    size_t i;
    d.span_init = 0.3;
    d.span_loss = 1e-3;
    d.ramp = 4;
    for (i = 0; i < 2 * 65; i++) t[i] = (int32_t)(i * i % 7);
    before = stx_span_create(x, &d);
    d.span_loss = 0.5;
    d.ramp = 9;
    m = stx_span_create(x, &d);
    for (i = 0; i < stx_span_params(m)->count; i++)
        memcpy(before->params->tensor[i]->data, m->params->tensor[i]->data,
               m->params->tensor[i]->size * sizeof(stx_real));
    stx_begin(x, STX_EVAL);
    ids = token_block(x, t, 2, 65, 0, 64);
    key[0] = stx_span_key(before, ids, NULL, NULL, 0);
    before->desc.span_loss = 0.5;
    key[1] = stx_span_key(before, ids, NULL, NULL, 0);
    before->desc.ramp = 8.99;       /* the windows of the layers are those of 9 */
    key[2] = stx_span_key(before, ids, NULL, NULL, 0);
    before->desc.ramp = 9;
    key[3] = stx_span_key(before, ids, NULL, NULL, 0);
    CHECK(key[0] != key[1] && key[1] != key[2] && key[2] != key[3],
          "the key does not depend on span_loss and ramp");
    for (i = 0; i < 2; i++) {
        stx_begin(x, STX_TRAIN);
        nll = stx_span_loss(i ? m : before, token_block(x, t, 2, 65, 0, 64),
                            token_block(x, t, 2, 65, 1, 64), NULL, NULL);
        loss[i] = stx_item(x, nll);
        total[i] = stx_item(x, stx_span_total(i ? m : before, nll));
    }
    CHECK(stx_ok(x) && loss[0] == loss[1] && total[0] == total[1],
          "changed between steps: loss %g and total %g, expected %g and %g", loss[0], total[0],
          loss[1], total[1]);
    stx_destroy(x);
}

/* Contexts of two threads each, used concurrently by threads of the caller. */
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
        CHECK(!pthread_create(thread + k, NULL, callers_thread, c + k),
              "thread %d was not created", k);
    for (k = 0; k < 4; k++) pthread_join(thread[k], NULL);
    for (k = 1; k < 4; k++)
        CHECK(c[k].loss == c[0].loss && !memcmp(c[k].all, c[0].all, c[0].n * sizeof(stx_real)),
              "the result of the caller's thread %d differs", k);
    for (k = 0; k < 4; k++) free(c[k].all);
}

/* A model must be able to learn one batch. */
static void learns(void) {
    static const int variants[] = {0, 1, 2, 3, 4, 8};
    int k;
    for (k = 0; k < 6; k++) {
        const char *name;
        stx_span_desc d = variant(variants[k], &name);
        stx_ctx *x;
        stx_span *m;
        stx_optim *o;
        int32_t *t = ordered_tokens(2, 33, V, 77);
        double first, last = 0;
        int i;
        d.span_init = 0.3;
        x = context(2, 1);
        m = stx_span_create(x, &d);
        o = stx_optim_create(m->params, NULL);
        first = step(m, o, NULL, t, 2, 33, 0, 32);
        for (i = 0; i < (SLOW ? 20 : 300); i++) last = step(m, o, NULL, t, 2, 33, 0, 32);
        CHECK(first > 2 && last < (SLOW ? first : 0.1), "%s: the loss of one batch: %g -> %g", name,
              first, last);
        free(t);
        CHECK(stx_ok(x), "%s", stx_error(x));
        stx_destroy(x);
    }
}

/* Writes the parameters, optimiser and memory and, if `tick` is set, the step index. */
static void save(stx_span *m, stx_optim *o, stx_span_state *s, int tick, const char *path) {
    stx_writer *w = stx_writer_create(m->ctx);
    CHECK(stx_params_save(w, m->params, "") && stx_optim_save(w, o)
              && stx_span_state_save(w, s, "memory.")
              && (!tick || stx_writer_meta_u64(w, "tick", stx_step_index(m->ctx)))
              && stx_writer_finish(w, path),
          "%s", stx_error(m->ctx));
}

/* The checksum must detect every flipped bit, and a file without a checksum must not be
   accepted as verified. */
static void checksums(const stx_params *p, const char *path) {
    stx_ctx *x = context(1, 1);
    stx_writer *w;
    stx_file *f;
    FILE *io;
    uint64_t big = 0;
    long size, at;
    int c, k;

    w = stx_writer_create(x);
    CHECK(stx_params_save(w, p, "") == 1 && stx_writer_meta(w, "text", "abc")
              && stx_writer_checksum(w) && stx_writer_finish(w, path),
          "%s", stx_error(x));
    f = stx_file_open(x, path);
    CHECK(f && stx_file_verify(f), "%s", stx_error(x));
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
        f = stx_file_open(x, path);
        CHECK(f && !stx_file_verify(f) && strstr(stx_error(x), "damaged"), "bit %d of byte %ld: %s",
              k, at, stx_error(x));
        stx_file_close(f);
        stx_clear_error(x);
        fseek(io, at, SEEK_SET);
        fputc(c, io);
        fflush(io);
    }
    fclose(io);

    w = stx_writer_create(x);
    CHECK(stx_writer_meta_u64(w, "big", UINT64_MAX) && stx_writer_finish(w, path), "%s",
          stx_error(x));
    f = stx_file_open(x, path);
    CHECK(stx_file_meta_u64(x, f, "big", &big) && big == UINT64_MAX, "%s", stx_error(x));
    CHECK(!stx_file_verify(f) && !stx_ok(x), "a file without a checksum verifies");
    stx_file_close(f);
    stx_destroy(x);
}

/* A file that does not match the model must be refused with the reason, and no parameter
   may change. d: the desc of the model in the file, whose memory has 2 streams. */
static void loads_refused(const stx_span_desc *d, const char *path) {
    int k;
    for (k = 0; k < 6; k++) {
        static const char *const expected[] = {"layers.2",  "streams",    "optimiser",
                                               "no tensor", "an unsigned 64-bit integer",
                                               "the file has shape"};
        stx_span_desc e = *d;
        stx_optim_desc od;
        stx_ctx *x = context(1, 1);
        stx_span *m;
        stx_optim *o;
        stx_span_state *s;
        stx_file *f;
        stx_real before;
        int loaded = 1;

        memset(&od, 0, sizeof od);
        if (k == 0) e.layers = 3;
        if (k == 2) od.kind = STX_ADAGRAD;
        if (k == 5) e.inner = 41;
        m = stx_span_create(x, &e);
        o = stx_optim_create(m->params, &od);
        s = stx_span_state_create(m, k == 1 ? 3 : 2);
        before = m->key_pe->data[0];
        f = stx_file_open(x, path);
        switch (k) {
        case 0:
        case 5: loaded = stx_params_load(m->params, f, ""); break;
        case 1: loaded = stx_span_state_load(s, f, "memory."); break;
        case 2: loaded = stx_optim_load(o, f); break;
        case 3: loaded = stx_params_load(m->params, f, "other."); break;
        case 4: loaded = stx_span_state_load(s, f, "no.such."); break;
        default: break;
        }
        CHECK(!loaded && strstr(stx_error(x), expected[k]), "case %d: %s", k, stx_error(x));
        CHECK(m->key_pe->data[0] == before, "case %d: loaded in part", k);
        stx_file_close(f);
        stx_destroy(x);
    }
}

/* A run that is saved, loaded into a new context and continued must end with the same
   parameters as an uninterrupted run. */
static void resume(void) {
    char path[1024];
    stx_span_desc d = small();
    stx_ctx *x[2];
    stx_span *m[2];
    stx_optim *o[2];
    stx_span_state *s[2];
    size_t n = 1000, B = 2, i;
    int32_t *t = ordered_tokens(B, n, V, 3);
    stx_file *f;
    uint64_t tick = 0;
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
    save(m[0], o[0], s[0], 1, path);
    f = stx_file_open(x[1], path);
    CHECK(f && stx_params_load(m[1]->params, f, "") && stx_optim_load(o[1], f)
              && stx_span_state_load(s[1], f, "memory.")
              && stx_file_meta_u64(x[1], f, "tick", &tick),
          "%s", stx_error(x[1]));
    stx_set_step_index(x[1], tick);
    stx_file_close(f);
    for (k = 0; k < 2; k++)
        for (i = 10; i < 20; i++) step(m[k], o[k], s[k], t, B, n, i * 30, 30);
    for (i = 0; i < m[0]->params->count; i++)
        CHECK(!memcmp(m[0]->params->tensor[i]->data, m[1]->params->tensor[i]->data,
                      m[0]->params->tensor[i]->size * sizeof(stx_real)),
              "%s differs after the resume", m[0]->params->name[i]);

    checksums(m[0]->params, path);
    save(m[0], o[0], s[0], 0, path);
    loads_refused(&d, path);
    remove(path);
    free(t);
    for (k = 0; k < 2; k++) stx_destroy(x[k]);
}

/* The desc must be refused with an error that contains `part`. */
static void refused(stx_span_desc d, const char *part) {
    stx_ctx *x = context(1, 0);
    stx_span *m = stx_span_create(x, &d);
    CHECK(!m && !stx_ok(x) && strstr(stx_error(x), part),
          "expected an error with \"%s\", got \"%s\"", part, stx_error(x));
    CHECK(stx_span_count(&d) == 0 || strstr(part, "memory"), "counted %zu parameters of a bad desc",
          stx_span_count(&d));
    stx_destroy(x);
}

static void bad_sizes_and_rates(void) {
    stx_span_desc d;

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
    d.pers = 3;
    CHECK(stx_span_count(&d) > 0, "inner counts although persistent vectors replace it");

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
}

static void bad_adaptive_io(void) {
    stx_span_desc d;

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
    d.adapt_io = 1;
    d.divval = 100;
    d.cutoffs = 2;
    d.cutoff[0] = 3;
    d.cutoff[1] = 9;
    refused(d, "divval");
}

static void bad_forms(void) {
    stx_span_desc d;

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
}

static void bad_calls(void) {
    int32_t ids[4] = {1, 2, 3, V};
    stx_ctx *x = context(1, 0);
    stx_span_desc d = small();
    stx_span *m = stx_span_create(x, &d);
    stx_span_state *s = stx_span_state_create(m, 2);

    CHECK(m->desc.layers == 2 && m->desc.divval == 4, "resolved desc");
    stx_begin(x, STX_EVAL);
    CHECK(!stx_span_forward(m, stx_tokens(x, ids, 1, 4), NULL, NULL) && strstr(stx_error(x), "29"),
          "%s", stx_error(x));
    stx_clear_error(x);
    stx_begin(x, STX_EVAL);
    CHECK(!stx_span_forward(m, stx_tokens(x, ids, 1, 3), s, NULL)
              && strstr(stx_error(x), "streams"),
          "%s", stx_error(x));
    stx_clear_error(x);
    CHECK(!stx_span_state_create(m, 0) && !stx_ok(x), "a state of no streams");
    stx_clear_error(x);
    CHECK(!stx_span_gen_feed(stx_span_gen_create(m, 1), ids, 0) && !stx_ok(x), "no tokens to feed");
    stx_destroy(x);
}

static void nulls(void) {
    CHECK(!stx_span_create(NULL, NULL) && !stx_span_forward(NULL, NULL, NULL, NULL)
              && !stx_span_loss(NULL, NULL, NULL, NULL, NULL) && !stx_span_total(NULL, NULL)
              && !stx_span_logits(NULL, NULL) && !stx_span_log_probs(NULL, NULL)
              && !stx_span_state_get(NULL, 0, NULL) && !stx_span_state_set(NULL, 0, 0, NULL, 0)
              && !stx_span_gen_create(NULL, 1) && !stx_span_gen_feed(NULL, NULL, 1)
              && !stx_span_state_create(NULL, 1),
          "NULL is accepted");
    stx_span_clamp(NULL);
    stx_span_state_free(NULL);
    stx_span_gen_free(NULL);
    stx_span_state_reset(NULL);
}

static void errors(void) {
    bad_sizes_and_rates();
    bad_adaptive_io();
    bad_forms();
    bad_calls();
    nulls();
}

/* Computes window S and cache length C by hand: cur = ceil(z L) + R, S = L -
   floor(min(L-1, L-cur) / 64) 64, C = min(L, S + 64). */
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
        C = stx_span_cache_length(m, 0);
        CHECK(S == row[i].S && C == row[i].C, "L %zu z %g: S %zu C %zu", row[i].L, row[i].z, S, C);
        CHECK(fabs(stx_span_head_span(m, 0, 1) - row[i].z * (double)row[i].L) < 1e-2,
              "span of head 1");
        stx_span_stats(m, &avg, &max);
        CHECK(max <= (double)row[i].L && max >= row[i].z * (double)row[i].L && avg <= max,
              "stats %g %g", avg, max);
        CHECK(stx_span_window(m, 1) == 0 && stx_span_cache_length(NULL, 0) == 0,
              "a layer that does not exist");
        m->layer[0].z->data[0] = -3;
        m->layer[0].z->data[2] = 7;
        stx_span_clamp(m);
        CHECK(m->layer[0].z->data[0] == 0 && m->layer[0].z->data[2] == 1, "clamp");
        stx_destroy(x);
    }
}

/* Returns the hidden states (B,n,d) of a one-layer model computed with single ops, with
   the mask applied to every key. These are the reference for the forward pass, the
   caches and generation, which skip some keys. */
static stx_real *whole_mask(stx_span *m, const int32_t *t, size_t B, size_t n) {
    stx_ctx *x = m->ctx;
    const stx_span_layer *p = &m->layer[0];
    stx_tensor *h, *f;
    stx_real *to = (stx_real *)malloc(B * n * m->desc.dim * sizeof *to);
    stx_begin(x, STX_EVAL);
    h = stx_embedding(x, m->vocab_io->in_emb, token_block(x, t, B, n, 0, n));
    /* Because of eps, every key contributes to the normaliser, even if only by a
       negligible amount, so the kernel cannot skip any key. */
    f = attention_by_hand(m, 0, h, h, 0, 1e-30);
    h = stx_residual_norm(x, h, f, 0, p->norm1_gain, p->norm1_shift, 1e-5);
    f = stx_linear(x, stx_linear(x, h, p->w1, p->b1, STX_ACT_RELU), p->w2, p->b2, STX_ACT_NONE);
    h = stx_residual_norm(x, h, f, 0, p->norm2_gain, p->norm2_shift, 1e-5);
    CHECK(h != NULL, "%s", stx_error(x));
    if (h) stx_get(x, h, to);
    return to;
}

/* A case of ramps(). The span is in tokens, at most L; it is divided by L later. */
typedef struct ramp_case {
    size_t L;
    double span, ramp;
} ramp_case;

/* Compares the forward pass, memory and generation of a one-layer model of width 8 with
   the results of the mask applied to every key. */
static void nothing_left_out(stx_span *m, const ramp_case *c) {
    stx_ctx *x = m->ctx;
    const size_t n = 150, B = 2;
    size_t at, w, b;
    int32_t *t = ordered_tokens(B, n, V, 4);
    int32_t *piece = (int32_t *)malloc(B * n * sizeof *piece);
    stx_real *expected = whole_mask(m, t, B, n), *h;
    stx_real *scores = (stx_real *)malloc(B * n * V * sizeof *scores);
    stx_span_state *s = stx_span_state_create(m, B);
    stx_span_gen *g = stx_span_gen_create(m, B);
    double worst = 0;

    h = hidden(m, t, B, n, 0, n, NULL, NULL);
    CHECK(max_difference(h, expected, B * n * 8) <= 2e-5,
          "L %zu span %g R %g: the forward leaves out %g", c->L, c->span, c->ramp,
          max_difference(h, expected, B * n * 8));
    free(h);
    stx_get(x, stx_span_log_probs(m, stx_input(x, expected, B, n, 8, 0)), scores);
    for (at = 0; at < n; at += w) {
        const stx_real *y;
        w = n - at < 19 ? n - at : 19;
        h = hidden(m, t, B, n, at, w, s, s);
        for (b = 0; b < B; b++) {
            raise_worst(&worst,
                        max_difference(h + b * w * 8, expected + (b * n + at) * 8, w * 8));
            memcpy(piece + b * w, t + b * n + at, w * sizeof *piece);
        }
        free(h);
        y = stx_span_gen_feed(g, piece, w);
        for (b = 0; y && b < B; b++)
            raise_worst(&worst,
                        max_difference(y + b * V, scores + (b * n + at + w - 1) * V, V));
    }
    CHECK(worst <= 2e-5, "L %zu span %g R %g: memory or generation leave out %g", c->L, c->span,
          c->ramp, worst);
    free(t);
    free(piece);
    free(expected);
    free(scores);
}

/* Returns the distance of the farthest key with a nonzero weight. The mask is computed
   as in the kernels. */
static size_t farthest(size_t L, stx_real z, stx_real ramp) {
    size_t t, far = 0;
    for (t = 1; t <= L; t++) {
        stx_real zl = z * (stx_real)L, u = ((1 - (stx_real)t) + zl) / ramp + 1;
        if (u > 0) far = t;
    }
    return far;
}

/* The window, the cache and the reported span must include every key with a nonzero
   weight. compare: also compares hidden states and log p. */
static void ramp_is_covered(const ramp_case *c, int compare) {
    const size_t L = c->L;
    const double z = (double)(stx_real)(c->span < (double)L ? c->span / (double)L : 1);
    const size_t far = farthest(L, (stx_real)z, (stx_real)c->ramp);
    stx_span_desc d = small();
    stx_ctx *x = context(1, 0);
    stx_span *m;
    size_t window, cache, reach;
    double avg, max;

    d.layers = 1;
    d.heads = 1;
    d.dim = 8;
    d.inner = 8;
    d.span = L;
    d.ramp = c->ramp;
    d.span_init = z;
    m = stx_span_create(x, &d);
    CHECK(m, "%s", stx_error(x));
    if (!m) {
        stx_destroy(x);
        return;
    }
    window = stx_span_window(m, 0);
    cache = stx_span_cache_length(m, 0);
    reach = stx_attention_reach(z, (double)L, c->ramp, L);
    stx_span_stats(m, &avg, &max);
    CHECK(reach >= far && reach <= far + 1,
          "L %zu span %g R %g: reach %zu, but the last key with weight is %zu steps back", L,
          c->span, c->ramp, reach, far);
    if (c->ramp == floor(c->ramp))
        CHECK((double)reach == fmin((double)L, ceil(z * (double)L) + c->ramp),
              "L %zu span %g R %g: reach %zu", L, c->span, c->ramp, reach);
    CHECK(window >= far && window <= L && (L - window) % 64 == 0,
          "L %zu span %g R %g: window %zu, but the last key with weight is %zu steps back", L,
          c->span, c->ramp, window, far);
    CHECK(cache == STX_MIN(window + 64, L) && max == (double)reach && avg == max,
          "L %zu span %g R %g: cache %zu, reported %g", L, c->span, c->ramp, cache, max);
    if (compare) nothing_left_out(m, c);
    CHECK(stx_attention_reach(-3, 100, c->ramp, 100) == 0, "reach of a negative span");
    CHECK(stx_attention_reach(NAN, 100, c->ramp, 100) == 0, "reach of a span of NaN");
    CHECK(stx_attention_reach(1e300, 1e300, c->ramp, 100) == 100
              && stx_attention_reach(0.5, 1e18, c->ramp, SIZE_MAX) >= (size_t)500000000000000000,
          "reach of a huge span");
    CHECK(stx_ok(x), "%s", stx_error(x));
    stx_destroy(x);
}

/* Tests ramps that are not integers. */
static void ramps(void) {
    static const size_t L[] = {1, 2, 3, 64, 65, 66, 67, 100, 129, 130, 200};
    static const double span[] = {0, 0.25, 0.6, 0.999999, 1, 1.4, 5, 31.5, 62.75, 63.1, 64, 1e9},
                        ramp[] = {1, 1.25, 1.5, 1.999, 2, 2.25, 7.5, 31.01, 32, 40.7};
    size_t i, j, k, cases = 0;
    for (i = 0; i < sizeof L / sizeof *L; i++)
        for (j = 0; j < sizeof span / sizeof *span; j++)
            for (k = 0; k < sizeof ramp / sizeof *ramp; k++) {
                const ramp_case c = {L[i], span[j], ramp[k]};
                int compare = c.L > 60 && cases++ % (SLOW ? 12 : 3) == 0;
                if (c.L == 66 && c.span == 0.6 && c.ramp == 1.5) compare = 1;
                ramp_is_covered(&c, compare);
            }
}

/* Tests the example that the manual computes by hand. */
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
        /* the query's own row, which is never attended to */
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

/* Returns the cost of three windows. The heads, sorted by decreasing window w, are
   divided at i and j. Each head uses the largest window of its group; the window of the
   first group is m. */
static size_t cut_cost(const size_t *w, size_t n, size_t m, size_t i, size_t j) {
    size_t k, cost = 64 * n * ((i < n) + (j < n && j > i));
    for (k = 0; k < n; k++) {
        if (k < i)
            cost += m;
        else
            cost += w[k < j ? i : j];
    }
    return cost;
}

/* No other division may cost less than the chosen groups, and every head must have the
   rows that it needs. */
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
                  "the windows do not decrease");
        for (h = 0, cost = 64 * n * (g.count - 1); h < n; h++) {
            CHECK(g.of[h] < g.count && g.rows[g.of[h]] >= STX_MIN(m, need[h]),
                  "head %zu has %zu rows and requires %zu", h, g.rows[g.of[h]], need[h]);
            cost += g.rows[g.of[h]];
        }
        for (i = 0; i < g.count; i++) {
            for (h = 0; h < n && g.of[h] != i; h++) {
            }
            CHECK(h < n, "group %zu has no head", i);
        }

        /* heads with equal windows are in the same group */
        for (best = m * n, i = 1; i < n; i++)
            for (j = i + 1; j <= n; j++)
                if (w[i] < w[i - 1] && (j == n || w[j] < w[j - 1]))
                    best = STX_MIN(best, cut_cost(w, n, m, i, j));
        CHECK(cost == best, "%zu heads, %zu rows: the groups cost %zu, the best ones %zu", n, m,
              cost, best);
    }
}

/* Returns the peak memory of a step with a full cache, from a dry run. z: the head
   spans. */
static size_t groups_peak(const double *z, size_t B, size_t dim, size_t heads) {
    stx_span_desc d = small();
    stx_desc cd;
    stx_ctx *x;
    stx_span *m;
    stx_span_state *s;
    int32_t *t = ordered_tokens(B, 1200, V, 5);
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
        stx_span_forward(m, token_block(x, t, B, 1200, at, 100), s, s);
    }
    stx_begin(x, STX_TRAIN);
    stx_backward(x, stx_span_loss(m, token_block(x, t, B, 1200, 1000, 100),
                                  token_block(x, t, B, 1200, 1001, 100), s, s));
    peak = stx_peak_bytes(x);
    CHECK(stx_ok(x), "%s", stx_error(x));
    free(t);
    stx_destroy(x);
    return peak;
}

/* Groups must never need more memory than a single window for all heads. */
static void groups_memory(void) {
    static const double full[8] = {0.93, 0.93, 0.93, 0.93, 0.93, 0.93, 0.93, 0.93};
    static const size_t sizes[][3] = {{1, 48, 6}, {3, 48, 6}, {8, 64, 8}, {2, 24, 2}, {16, 16, 4}};
    size_t i, c, h, less = 0;
    for (i = 0; i < 5; i++) {
        const size_t all = groups_peak(full, sizes[i][0], sizes[i][1], sizes[i][2]);
        for (c = 0; c < (SLOW ? 2 : 12); c++) {
            const double most = c % 2 ? 0.9 : 0.3;
            double z[8];
            size_t peak;
            for (h = 0; h < 8; h++) z[h] = h < 1 + c % 3 ? 0.93 : (test_rand() + 1) / 2 * most;
            peak = groups_peak(z, sizes[i][0], sizes[i][1], sizes[i][2]);
            CHECK(peak <= all, "B %zu: %zu bytes, %zu with one window", sizes[i][0], peak, all);
            less += peak < all;
        }
    }
    CHECK(less > 5, "groups save memory %zu times", less);
}

/* The step key must depend on the groups' windows, but not on spans within these
   windows. */
static void groups_in_key(stx_span *m, stx_span_state *s) {
    stx_real *z = m->layer[0].z->data;
    const stx_real z2 = z[2], z5 = z[5];
    const uint64_t key = stx_span_key(m, NULL, NULL, s, 0);
    z[2] = (stx_real)0.28; /* changes no window */
    stx_begin(m->ctx, STX_TRAIN);
    CHECK(stx_span_key(m, NULL, NULL, s, 0) == key, "the key depends on spans within a window");
    z[2] = z[5] = (stx_real)0.45;
    CHECK(stx_span_key(m, NULL, NULL, s, 0) != key, "a group's window is not in the key");
    z[2] = z2;
    z[5] = z5;
}

/* Computes the last hidden states of tokens [1120, 1160) with single ops, with the keys
   and values of every head over the whole window. */
static stx_tensor *without_groups(stx_span *m, stx_span_state *s, const int32_t *t) {
    stx_ctx *x = m->ctx;
    const stx_span_desc *d = &m->desc;
    stx_tensor *h = stx_embedding(x, m->vocab_io->in_emb, token_block(x, t, 2, 1200, 1120, 40)), *f;
    size_t l;
    for (l = 0; l < d->layers; l++) {
        const stx_span_layer *p = &m->layer[l];
        const size_t window = stx_span_window(m, l);
        f = stx_concat(x, stx_memory_read(s->memory, l, window), h);
        f = attention_by_hand(m, l, h, f, window, 0);
        h = stx_residual_norm(x, h, f, 0, p->norm1_gain, p->norm1_shift, 1e-5);
        if (d->pers) continue;
        f = stx_dropout(x, stx_linear(x, h, p->w1, p->b1, STX_ACT_RELU), d->dropout);
        f = stx_linear(x, f, p->w2, NULL, STX_ACT_NONE);
        h = stx_residual_norm_bias(x, h, f, p->b2, 0, p->norm2_gain, p->norm2_shift, 1e-5);
    }
    return h;
}

/* Compares hidden states, and gradients of their mean square, with and without groups. */
static void groups_case(size_t pers, double dropout_, int recompute_layers) {
    static const double z[2][6] = {{0.02, 0.9, 0.3, 0.02, 0.9, 0.28},
                                   {0.95, 0.01, 0.01, 0.02, 0.03, 0.4}};
    stx_span_desc d = small();
    stx_ctx *x = context(2, 3);
    stx_span *m;
    stx_span_state *s;
    stx_tensor *y;
    int32_t *t = ordered_tokens(2, 1200, V, 5);
    stx_real *h, *grads;
    size_t l, i, at, c, need[6];
    stx_head_groups g;

    d.dim = 48;
    d.heads = 6;
    d.span = 1024;
    d.dropout = dropout_;
    d.pers = pers;
    d.recompute_layers = recompute_layers;
    m = stx_span_create(x, &d);
    for (l = 0; l < 2; l++)
        for (i = 0; i < 6; i++) m->layer[l].z->data[i] = (stx_real)z[l][i];
    s = stx_span_state_create(m, 2);
    for (at = 0; at < 1120; at += 40) {
        stx_begin(x, STX_EVAL);
        stx_span_forward(m, token_block(x, t, 2, 1200, at, 40), s, s);
    }
    for (i = 0; i < 6; i++) need[i] = stx_attention_reach(z[0][i], 1024, d.ramp, 1024) + 1;
    stx_head_groups_choose(need, 6, 960, &g);
    CHECK(g.count == 3 && stx_span_window(m, 0) == 960, "%zu groups", g.count);
    groups_in_key(m, s);

    stx_set_step_index(x, 9);
    stx_begin(x, STX_TRAIN);
    y = stx_span_forward(m, token_block(x, t, 2, 1200, 1120, 40), s, NULL);
    CHECK(y, "%s", stx_error(x));
    h = (stx_real *)malloc(y->size * sizeof *h);
    stx_get(x, y, h);
    stx_params_zero_grad(m->params);
    stx_backward(x, stx_mean(x, stx_mul(x, y, y)));
    grads = (stx_real *)malloc(stx_params_size(m->params) * sizeof *grads);
    for (i = at = 0; i < m->params->count; at += m->params->tensor[i++]->size)
        memcpy(grads + at, m->params->tensor[i]->grad, m->params->tensor[i]->size * sizeof *grads);

    stx_params_zero_grad(m->params);
    stx_set_step_index(x, 9);
    stx_begin(x, STX_TRAIN);
    y = without_groups(m, s, t);
    CHECK(y && max_difference(y->data, h, y->size) <= 4 * GROUPS_OFF,
          "pers %zu, dropout %g: groups change the output by %g", pers, dropout_,
          y ? max_difference(y->data, h, y->size) : 1);
    stx_backward(x, stx_mean(x, stx_mul(x, y, y)));
    for (i = at = 0; i < m->params->count; at += m->params->tensor[i++]->size) {
        const stx_tensor *p = m->params->tensor[i];
        double top = 1e-4, off;
        for (c = 0; c < p->size; c++)
            if (fabs((double)p->grad[c]) > top) top = fabs((double)p->grad[c]);
        off = max_difference(p->grad, grads + at, p->size) / top;
        CHECK(off <= 30 * GROUPS_OFF,
              "pers %zu, dropout %g: groups change the gradient of %s by %g of its largest element",
              pers, dropout_, m->params->name[i], off);
    }
    CHECK(stx_ok(x), "%s", stx_error(x));
    free(grads);
    free(h);
    free(t);
    stx_destroy(x);
}

/* Tests heads with three different windows. The heads' past keys and values are
   computed in groups. */
static void groups(void) {
    cheapest_groups();
    groups_memory();
    groups_case(0, 0, 0);
    groups_case(0, 0.2, 1);
    groups_case(5, 0, 0);
    groups_case(5, 0.2, 1);
}

/* Invalid uses of a memory must be refused, and the memory must not change. */
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

    /* After a reset, the rows of the stream do not exist; they are not copied as
       zeros. */
    stx_span_state_reset_stream(s, 1);
    CHECK(!stx_span_state_get(s, 0, rows), "a memory with missing rows was copied");
    CHECK(test_says(stx_error(x), "stx_span_state_get: .. copy; use"), "%s", stx_error(x));
    stx_clear_error(x);

    /* A step key for a memory of another model must be refused. */
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
    CHECK(stx_span_count(&d) == 0, "a bad desc was counted");
    CHECK(!stx_span_create(x, &d)
              && test_says(stx_error(x), "pers: expected at most 1073741824, got"),
          "%s", stx_error(x));
    stx_destroy(x);
}

/* A creation that fails must free what it allocated, so that a retry with a smaller size
   can succeed. */
static void failed_creations(void) {
    int kind, n, failed[2] = {0, 0};
    for (kind = 0; kind < 2; kind++) {
        void *made = NULL;
        for (n = 0; n < 50 && !made; n++) {
            stx_span_desc d;
            int left = 1000;
            stx_ctx *x = limited_context(&left);
            stx_span *m;
            size_t before;
            memset(&d, 0, sizeof d);
            d.vocab = 8;
            d.layers = 3;
            d.dim = 16;
            d.heads = 2;
            d.span = 50;
            d.adapt_span = 1;
            m = stx_span_create(x, &d);
            before = stx_bytes(x);
            left = n;
            made = kind ? (void *)stx_span_gen_create(m, 2) : (void *)stx_span_state_create(m, 2);
            failed[kind] += !made;
            CHECK(!made == !stx_ok(x), "creation %d: %s", kind, stx_error(x));
            CHECK(made || stx_bytes(x) == before, "creation %d, allocation %d: %zu bytes remain",
                  kind, n, stx_bytes(x) - before);
            left = 1000;
            stx_destroy(x);
        }
        CHECK(made && failed[kind] >= 3, "creation %d: %d failures", kind, failed[kind]);
    }
}

/* Memories whose rows have another meaning must be refused. */
static void copies_between_models(void) {
    stx_ctx *x = stx_create(NULL);
    stx_span_desc d;
    stx_span_state *s[3];
    int k;
    memset(&d, 0, sizeof d);
    d.vocab = 8;
    d.layers = 2;
    d.dim = 16;
    d.heads = 2;
    for (k = 0; k < 3; k++) {
        d.span = k == 1 ? 8 : 64;
        d.literal = k == 2 ? STX_SPAN_LITERAL_MEMORY : 0;
        s[k] = stx_span_state_create(stx_span_create(x, &d), 1);
    }
    CHECK(stx_ok(x), "%s", stx_error(x));
    for (k = 1; k < 3; k++) {
        CHECK(!stx_span_state_copy(s[k], 0, s[0], 0, 1), "copied to memory %d", k);
        CHECK(test_says(stx_error(x), k == 1 ? "stx_span_state_copy: .. span 8 and 64, flag 0"
                                             : "stx_span_state_copy: .. span 64 and 64, flag 1"),
              "%s", stx_error(x));
        stx_clear_error(x);
    }
    stx_destroy(x);
}

static void opened(void) {
    int k;
    for (k = 0; k < VARIANTS; k++) {
        const char *name;
        stx_span_desc d = variant(k, &name);
        stx_ctx *x = context(1, 7);
        stx_span *m = stx_span_create(x, &d);
        perturb(x, m->params);
        if (d.adapt_span) set_spans(m);
        saved_and_opened(stx_span_family(), m, name);
        stx_destroy(x);
    }
}

int main(void) {
    memory_errors();
    failed_creations();
    copies_between_models();
    by_hand();
    groups();
    windows();
    ramps();
    generation_and_memory();
    dropout();
    literal();
    beginnings();
    logits_and_log_probs();
    copied_memory();
    fairseq_form();
    window_of_all_heads();
    evaluation_is_separate();
    repeatable();
    changed_between_steps();
    callers_threads();
    learns();
    resume();
    errors();
    opened();
    return test_end();
}
