/* test_comp.c - behaviour of seqtx_compressive.h beyond the golden vectors: single
   steps compared with segments, causality, resets, independent streams, calls that
   change the memory, where gradients stop, copies and files of states, recomputation,
   errors, and an example computed by hand. */
#include <stdint.h>
#include "../../seqtx_compressive.h"
#include "../inner/inner.h"
#include "family.h"
#include <unistd.h>

#ifdef SEQTX_DOUBLE
static const double TOL = 1e-11;
#else
static const double TOL = 2e-5;
#endif
enum { V = 13, S = 6, LAYERS = 3 };
#ifdef TEST_AMX_EMULATED
/* Under sanitizers, code paths are run with fewer steps and cases; the other builds
   check results. */
enum { SLOW = 1 };
#else
enum { SLOW = 0 };
#endif

/* Literal forms that require all streams to have the same age. */
enum { AGED = STX_COMP_LITERAL_ROWS | STX_COMP_LITERAL_PAD | STX_COMP_LITERAL_MASK };

static stx_comp_desc small(void) {
    stx_comp_desc d;
    memset(&d, 0, sizeof d);
    d.vocab = V;
    d.layers = LAYERS;
    d.dim = 16;
    d.heads = 4;
    d.inner = 20;
    d.segment = S;
    d.mem = 6;
    d.cmem = 4;
    d.ratio = 2;
    return d;
}

/* Layer and size lists for the variants, which together cover all options. */
static const size_t some_layers[] = {1, 3}, sizes_m[] = {4, 0, 14}, sizes_c[] = {3, 2, 0};

/* Two custom methods with the same weights. Both read `missing`: they add fill[1] to
   missing rows and fill[0] to the others, multiply the rows by a gate, and map the rows
   of a group to one. */
static size_t own_weights(void *user, const stx_comp_desc *d, size_t l, stx_weight *w) {
    const size_t D = d->dim;
    const stx_weight fill = {"fill", 2, D, STX_NORMAL, 0.3, 1};
    const stx_weight gate = {"gate.weight", D, D, STX_NORMAL, 0.3, 0};
    const stx_weight sum = {"sum.weight", D, (d->ratio + *(size_t *)user) * D, STX_NORMAL, 0.2, 0};
    (void)l;
    w[0] = fill;
    w[1] = gate;
    w[2] = sum;
    return 3;
}

static stx_tensor *own_gated(stx_ctx *x, const stx_comp_evicted *e) {
    stx_tensor *rows = e->rows, *fill;
    if (e->missing)
        fill = stx_embedding(x, e->w[0], e->missing);
    else
        fill = stx_reshape(x, stx_view_rows(x, e->w[0], 0, 1), e->D, 0, 0, 0);
    rows = stx_add(x, rows, fill);
    return stx_mul(x, rows, stx_linear(x, rows, e->w[1], NULL, STX_ACT_SIGMOID));
}

static stx_tensor *own_grouped(stx_ctx *x, void *user, const stx_comp_evicted *e) {
    stx_tensor *rows = own_gated(x, e);
    (void)user;
    if (rows) rows = stx_reshape(x, rows, e->B, e->G, e->taps * e->D, 0);
    return stx_linear(x, rows, e->w[2], NULL, STX_ACT_TANH);
}

/* Adds to each row the gated row `before` rows earlier. */
static stx_tensor *own_consecutive(stx_ctx *x, void *user, const stx_comp_evicted *e) {
    stx_tensor *rows = own_gated(x, e);
    const size_t n = rows ? rows->dim[1] : 0;
    (void)user;
    if (!rows) return NULL;
    rows = stx_add(x, stx_slice(x, rows, e->before, n), stx_slice(x, rows, 0, n - e->before));
    rows = stx_reshape(x, rows, e->B, e->G, n - e->before ? (n - e->before) / e->G * e->D : 0, 0);
    return stx_linear(x, rows, e->w[2], NULL, STX_ACT_TANH);
}

/* The number of additional taps, for own_weights */
static size_t own_extra[] = {0, 1};

static const stx_comp_method own_methods[] = {
    {"grouped", own_weights, own_grouped, &own_extra[0], STX_COMP_ROWS_GROUPED},
    {"grouped, overlap", own_weights, own_grouped, &own_extra[1], STX_COMP_ROWS_GROUPED},
    {NULL, own_weights, own_consecutive, &own_extra[0], STX_COMP_ROWS_CONSECUTIVE}
};

enum { VARIANTS = 29 };

static stx_comp_desc variant(int k, const char **name) {
    static const char *const names[VARIANTS] = {"conv",
                                                "overlap",
                                                "dilated",
                                                "max",
                                                "mean without memory",
                                                "used",
                                                "used ernie",
                                                "drop",
                                                "no memory",
                                                "xl after",
                                                "ernie, shared heads",
                                                "ernie xl after",
                                                "rotate",
                                                "literal",
                                                "gtrxl",
                                                "input",
                                                "output",
                                                "highway",
                                                "sigtanh",
                                                "autoencode",
                                                "bptt",
                                                "several sizes",
                                                "gru",
                                                "bptt dilated",
                                                "used, small",
                                                "ernie, small",
                                                "custom",
                                                "custom, bptt",
                                                "custom, autoencode"};
    stx_comp_desc d = small();
    *name = names[k];
    switch (k) {
    case 1:
        d.overlap = 1;
        d.ratio = 3;
        d.mem = 10;
        d.conv_no_bias = 1;
        break;
    case 2:
        d.compress = STX_COMP_COMPRESS_DILATED;
        d.dilations = 2;
        d.dilation[0] = 1;
        d.dilation[1] = 2;
        break;
    case 3:
        d.compress = STX_COMP_COMPRESS_MAX;
        d.mem = 4;
        d.ratio = 3;
        break;
    case 4:
        d.compress = STX_COMP_COMPRESS_MEAN;
        d.mem = STX_COMP_NO_ROWS;
        break;
    case 5:
        d.compress = STX_COMP_COMPRESS_USED;
        d.mem = 9;
        d.cmem = 7;
        break;
    case 6:
        d.compress = STX_COMP_COMPRESS_USED;
        d.recurrence = STX_COMP_STORE_OUTPUT;
        d.ratio = 3;
        break;
    case 7:
        d.compress = STX_COMP_COMPRESS_DROP;
        d.mem = 14;
        break;
    case 8: d.no_memory = 1; break;
    case 9:
        d.positions = STX_COMP_POSITIONS_XL;
        d.norm_after = d.final_norm = 1;
        break;
    case 10:
        d.recurrence = STX_COMP_STORE_OUTPUT;
        d.kv_heads = 2;
        d.mem = 8;
        break;
    case 11:
        d.recurrence = STX_COMP_STORE_OUTPUT;
        d.positions = STX_COMP_POSITIONS_XL;
        d.norm_after = 1;
        d.kv_heads = 1;
        break;
    case 12:
        d.recurrence = STX_COMP_STORE_ROTATE;
        d.memory_layers = some_layers;
        d.memory_count = 2;
        d.mem = 9;
        break;
    case 13:
        d.recurrence = STX_COMP_STORE_ROTATE;
        d.gate = STX_COMP_GATE_GRU;
        d.literal = AGED | STX_COMP_LITERAL_TARGET;
        d.mogrify = 1;
        d.mem = 9;
        break;
    case 14:
        d.gate = STX_COMP_GATE_GTRXL;
        d.gate_relu = d.glu = 1;
        d.emb = 5;
        break;
    case 15: d.gate = STX_COMP_GATE_INPUT; break;
    case 16:
        d.gate = STX_COMP_GATE_OUTPUT;
        d.gate_relu = 1;
        break;
    case 17:
        d.gate = STX_COMP_GATE_HIGHWAY;
        d.tied = 1;
        break;
    case 18:
        d.gate = STX_COMP_GATE_SIGTANH;
        d.norm_after = 1;
        break;
    case 19:
        d.aux = STX_COMP_AUX_AUTOENCODE;
        d.ratio = 4;
        d.overlap = 2;
        break;
    case 20:
        d.aux = STX_COMP_AUX_BPTT;
        d.bptt = 2;
        d.overlap = 1;
        d.mem = 8;
        break;
    case 21:
        d.mems = sizes_m;
        d.cmems = sizes_c;
        d.positions = STX_COMP_POSITIONS_XL;
        d.kv_heads = 2;
        break;
    case 22:
        d.gate = STX_COMP_GATE_GRU;
        d.gate_bias = 1.5;
        break;
    case 23:
        d.aux = STX_COMP_AUX_BPTT;
        d.compress = STX_COMP_COMPRESS_DILATED;
        d.recurrence = STX_COMP_STORE_OUTPUT;
        break;
    case 24:
        d.compress = STX_COMP_COMPRESS_USED;
        d.mem = 4;
        d.ratio = 4;
        d.positions = STX_COMP_POSITIONS_XL;
        break;
    case 25:
        d.recurrence = STX_COMP_STORE_OUTPUT;
        d.mem = 4;
        d.ratio = 4;
        break;
    case 26:
        d.custom = &own_methods[0];
        d.ratio = 4;
        d.mem = 9;
        break;
    case 27:
        d.custom = &own_methods[1];
        d.overlap = 1;
        d.aux = STX_COMP_AUX_BPTT;
        d.bptt = 2;
        d.ratio = 4;
        d.mem = 9;
        break;
    case 28:
        d.custom = &own_methods[2];
        d.overlap = 2;
        d.aux = STX_COMP_AUX_AUTOENCODE;
        d.ratio = 4;
        break;
    default: break;
    }
    return d;
}

/* Returns a model with perturbed parameters. */
static stx_comp *model(stx_ctx *x, const stx_comp_desc *d) {
    stx_comp *m = stx_comp_create(x, d);
    CHECK(m != NULL, "%s", stx_error(x));
    if (m) perturb(x, m->params);
    return m;
}

/* Computes the hidden states (B,n,D) of a text in segments. reset may be NULL;
   otherwise, reset[s] is 1 + the stream that is reset before segment s, or 0. */
static stx_real *by_segments(stx_comp *m, const int32_t *t, size_t B, size_t n, stx_comp_state *s,
                             const int *reset) {
    const size_t D = m->desc.dim;
    stx_real *all = (stx_real *)calloc(B * n * D, sizeof *all);
    size_t at, b, w;
    for (at = 0; at < n; at += w) {
        stx_tensor *y;
        w = STX_MIN(n - at, m->desc.segment);
        stx_begin(m->ctx, STX_EVAL);
        if (reset && reset[at / m->desc.segment])
            stx_comp_state_reset_stream(s, (size_t)reset[at / m->desc.segment] - 1);
        y = stx_comp_forward(m, token_block(m->ctx, t, B, n, at, w), NULL, s, s);
        if (!y) break;
        for (b = 0; b < B; b++)
            memcpy(all + (b * n + at) * D, y->data + b * w * D, w * D * sizeof *all);
    }
    CHECK(stx_ok(m->ctx), "%s", stx_error(m->ctx));
    return all;
}

/* Returns the largest difference between the rows of two states, ignoring missing rows.
   Returns infinity if the states differ in which rows exist, are missing or were
   pushed. */
static double states_differ(const stx_comp_state *a, const stx_comp_state *b) {
    double worst = 0;
    size_t l, i;
    int part;
    for (part = 0; part < 2; part++)
        for (l = 0; l < a->model->desc.layers; l++) {
            const stx_memory_layer *p = part ? &a->comp->layer[l] : &a->mem->layer[l],
                                   *q = part ? &b->comp->layer[l] : &b->mem->layer[l];
            const stx_tensor *u = stx_memory_read(part ? a->comp : a->mem, l, SIZE_MAX),
                             *v = stx_memory_read(part ? b->comp : b->mem, l, SIZE_MAX);
            if (p->count != q->count || p->masked != q->masked || !u != !v) return HUGE_VAL;
            for (i = 0; u && v && i < a->B * p->count; i++) {
                if (p->masked && p->pad[i] != q->pad[i]) return HUGE_VAL;
                if (p->masked && p->pad[i]) continue;
                raise_worst(&worst, max_difference(u->data + i * p->width, v->data + i * p->width,
                                                   p->width));
            }
        }
    for (i = 0; i < a->B; i++)
        if (a->pushed[i] != b->pushed[i]) return HUGE_VAL;
    return worst;
}

/* Returns the number of tokens of the step that starts at token i. Steps first have
   many different lengths, then one token, then one to three. With resets, no step
   crosses the end of a segment. */
static size_t step_length(size_t i, size_t n, int resets) {
    size_t w = 1 + i % 3;
    if (resets)
        w = STX_MIN(w, S - i % S);
    else if (i < 3 * S)
        w = 1 + i * 7 % 11;
    else if (i < 6 * S)
        w = 1;
    return STX_MIN(w, n - i);
}

/* Computes the hidden states (B,n,D) of a text with steps of a generator. Unless reset
   is NULL, reset[s] is 1 + the stream that is reset before segment s, or 0. */
static stx_real *by_steps(const char *name, stx_comp_gen *g, const int32_t *t, size_t B, size_t n,
                          const int *reset) {
    stx_comp *m = g->model;
    stx_ctx *x = m->ctx;
    const size_t D = m->desc.dim;
    stx_real *all = (stx_real *)calloc(B * n * D, sizeof *all);
    size_t i, b, w, bytes = 0;
    for (i = 0; i < n && stx_ok(x); i += w) {
        stx_tensor *y;
        w = step_length(i, n, reset != NULL);
        stx_begin(x, STX_EVAL);
        if (reset && i % S == 0 && reset[i / S])
            stx_comp_gen_reset_stream(g, (size_t)reset[i / S] - 1);
        y = stx_comp_gen_step(g, stx_comp_embed(m, token_block(x, t, B, n, i, w)));
        CHECK(y && y->dim[1] == w, "%s: %s", name, stx_error(x));
        if (!y) break;
        for (b = 0; b < B; b++)
            memcpy(all + (b * n + i) * D, y->data + b * w * D, w * D * sizeof *all);
        if (i > 5 * S && !bytes) bytes = stx_bytes(x);
    }
    CHECK(bytes == stx_bytes(x), "%s: steps keep allocating: %zu, %zu bytes", name, bytes,
          stx_bytes(x));
    return all;
}

/* A generator must continue correctly from a memory of four segments, then from a
   prompt of several segments. whole: the hidden states of the text. t: 2 streams of n
   tokens. */
static void continued_steps(const char *name, stx_comp_gen *g, const int32_t *t, size_t n,
                            stx_real *whole) {
    enum { B = 2, W = 2 * S + 1 };

    stx_comp *m = g->model;
    stx_ctx *x = m->ctx;
    const size_t D = m->desc.dim;
    const double top = largest(whole, B * n * D);
    stx_comp_state *s = stx_comp_state_create(m, B);
    const stx_real *y;
    stx_tensor *h;
    size_t i, b;
    double e = 0;

    for (i = 0; i < 4; i++) {
        stx_begin(x, STX_EVAL);
        stx_comp_forward(m, token_block(x, t, B, n, i * S, S), NULL, s, s);
    }
    CHECK(stx_comp_gen_set(g, s), "%s: %s", name, stx_error(x));
    stx_begin(x, STX_EVAL);
    h = stx_comp_gen_step(g, stx_comp_embed(m, token_block(x, t, B, n, 4 * S, W)));
    for (b = 0; h && b < B; b++)
        raise_worst(&e, max_difference(h->data + b * W * D, whole + (b * n + 4 * S) * D, W * D));
    CHECK(h && e <= TOL * top, "%s: continued from a memory, the error is %g %s", name, e,
          stx_error(x));

    stx_comp_gen_reset(g);
    y = stx_comp_gen_feed(g, t, n / 2); /* B prompts of n / 2 tokens: both halves of stream 0 */
    stx_begin(x, STX_EVAL);
    h = y ? stx_comp_logits(m, stx_input(x, whole + (n / 2 - 1) * D, 1, 1, D, 0)) : NULL;
    e = h ? max_difference(h->data, y, V) : HUGE_VAL;
    CHECK(e <= TOL * top * 10 && g->at == n / 2 % S,
          "%s: scores after a long prompt: the error is %g %s", name, e, stx_error(x));
    stx_comp_state_free(s);
}

static void steps_case(const char *name, const stx_comp_desc *d, int resets) {
    static const int reset[16] = {0, 0, 2, 0, 1, 0, 2, 2};
    stx_ctx *x = context(2, 7);
    stx_comp *m = model(x, d);
    const size_t B = 2, n = 8 * S + 4, D = m->desc.dim;
    const char *how = resets ? " with resets" : "";
    int32_t *t = random_tokens(B, n, V, 5);
    stx_comp_state *s = stx_comp_state_create(m, B);
    stx_comp_gen *g = stx_comp_gen_create(m, B);
    stx_real *whole, *stepwise;
    double tol, e;

    whole = by_segments(m, t, B, n, s, resets ? reset : NULL);
    tol = TOL * largest(whole, B * n * D);
    stepwise = by_steps(name, g, t, B, n, resets ? reset : NULL);
    e = max_difference(stepwise, whole, B * n * D);
    CHECK(e <= tol, "%s%s: steps differ from segments by %g", name, how, e);
    if (d->recurrence != STX_COMP_STORE_ROTATE) { /* ROTATE moves the memory even in a
                                                     short call */
        e = states_differ(s, g->state);
        CHECK(e <= tol, "%s%s: memories differ by %g", name, how, e);
    }
    if (!resets) continued_steps(name, g, t, n, whole);
    CHECK(stx_ok(x), "%s: %s", name, stx_error(x));
    stx_comp_gen_free(g);
    stx_comp_state_free(s);
    free(t);
    free(whole);
    free(stepwise);
    stx_destroy(x);
}

/* Compares single tokens and steps of many lengths with whole segments, also with
   streams that are reset between segments. Compares hidden states, final memories, and
   the scores of feed. */
static void steps(void) {
    int k;
    for (k = 0; k < VARIANTS; k++) {
        const char *name;
        stx_comp_desc d = variant(k, &name);
        steps_case(name, &d, 0);
        if (!(d.literal & AGED)) steps_case(name, &d, 1);
    }
}

/* A changed token must change the output at its position, but nothing before it and
   nothing in the other row. A row's output must be the same alone as in the batch. */
static void causality(void) {
    int k;
    for (k = 0; k < VARIANTS; k++) {
        const char *name;
        stx_comp_desc d = variant(k, &name);
        stx_ctx *x = context(2, 7);
        stx_comp *m = model(x, &d);
        const size_t B = 2, n = 6 * S, D = m->desc.dim, p = S + 2;
        int32_t *t = random_tokens(B, n, V, 9), keep = t[p];
        stx_comp_state *s = stx_comp_state_create(m, B), *one = stx_comp_state_create(m, 1);
        stx_real *a = by_segments(m, t, B, n, s, NULL), *c, *r;
        double far_;
        t[p] = (keep + 1) % V;
        stx_comp_state_reset(s);
        c = by_segments(m, t, B, n, s, NULL);
        CHECK(!memcmp(a, c, p * D * sizeof *a), "%s: a token changes the output before it", name);
        CHECK(!memcmp(a + n * D, c + n * D, n * D * sizeof *a),
              "%s: a token changes the other row", name);
        CHECK(max_difference(a + p * D, c + p * D, D) > 0,
              "%s: a token does not change the output at its position", name);
        far_ = max_difference(a + 2 * S * D, c + 2 * S * D, S * D);
        CHECK(d.no_memory ? far_ == 0 : far_ > 0, "%s: a token changes the next segment by %g",
              name, far_);
        t[p] = keep;
        r = by_segments(m, t + n, 1, n, one, NULL);
        CHECK(max_difference(r, a + n * D, n * D) <= TOL * largest(a, B * n * D),
              "%s: a row alone differs by %g", name, max_difference(r, a + n * D, n * D));
        free(t);
        free(a);
        free(c);
        free(r);
        stx_destroy(x);
    }
}

/* A reset stream's values and memories must match a new stream's, even if some segments
   of the stream were padding. */
static void resets(void) {
    int k;
    for (k = 0; k < VARIANTS; k++) {
        const char *name;
        stx_comp_desc d = variant(k, &name);
        stx_ctx *x = context(2, 7);
        stx_comp *m = model(x, &d);
        const size_t n = 8 * S, D = m->desc.dim, from = 3;
        int32_t *t = random_tokens(2, n, V, 11);
        int reset[8] = {0};
        stx_comp_state *s = stx_comp_state_create(m, 2), *one = stx_comp_state_create(m, 1),
                       *cut = stx_comp_state_create(m, 1);
        stx_real *a, *r;
        size_t l, i;
        double e;
        if (d.literal & AGED) {
            free(t);
            stx_destroy(x);
            continue;
        }
        reset[from] = 2;
        a = by_segments(m, t, 2, n, s, reset);
        r = by_segments(m, t + n + from * S, 1, n - from * S, one, NULL);
        e = max_difference(r, a + (n + from * S) * D, (n - from * S) * D);
        CHECK(e <= TOL * largest(a, 2 * n * D), "%s: a reset stream differs from a new one by %g",
              name, e);
        CHECK(stx_comp_state_copy(cut, 0, s, 1, 1), "%s: %s", name, stx_error(x));

        /* The newest rows must be equal. The reset stream's older rows are missing. */
        for (l = 0; l < LAYERS; l++)
            for (i = 0; i < 2; i++) {
                const stx_memory_layer *p = i ? &cut->comp->layer[l] : &cut->mem->layer[l],
                                       *q = i ? &one->comp->layer[l] : &one->mem->layer[l];
                size_t rows = q->count, w = p->width, c;
                CHECK(p->count >= rows, "%s: %zu rows, expected at least %zu", name,
                      p->count, rows);
                if (!rows || !w) continue;
                CHECK(max_difference(p->data + (p->count - rows) * w, q->data, rows * w)
                          <= TOL * largest(q->data, rows * w),
                      "%s: rows of layer %zu", name, l);
                for (c = 0; c < p->count; c++)
                    CHECK((p->masked && p->pad[c]) == (c < p->count - rows), "%s: row %zu of %zu",
                          name, c, p->count);
            }
        CHECK(cut->pushed[0] == one->pushed[0], "%s: pushed %zu rows, the new stream %zu", name,
              cut->pushed[0], one->pushed[0]);
        free(t);
        free(a);
        free(r);
        stx_destroy(x);
    }
}

/* Runs one training step on the segment that begins at token `at` of a text (B,n).
   Returns the nll; *total receives the sum of all losses. */
static double train(stx_comp *m, stx_optim *o, stx_comp_state *s, const int32_t *t, size_t B,
                    size_t n, size_t at, double *total) {
    stx_ctx *x = m->ctx;
    stx_tensor *nll, *sum;
    double v;
    stx_begin(x, STX_TRAIN);
    nll = stx_comp_loss(m, token_block(x, t, B, n, at, S), token_block(x, t, B, n, at + 1, S), NULL,
                        s, s);
    sum = stx_comp_total(m, nll);
    v = stx_item(x, nll);
    if (total) *total = stx_item(x, sum);
    stx_backward(x, sum);
    if (o) stx_optim_step(o, 0.01);
    return v;
}

/* Like resets(), but in training. If the streams of a batch are reset at different
   times, the nll must be the mean over single streams, each of which starts with a new
   state when it is reset. A stream that is copied out of its batch, and streams that
   are joined one by one, must continue unchanged. */
static void resets_in_training(void) {
    int k;
    for (k = 0; k < VARIANTS; k++) {
        const char *name;
        stx_comp_desc d = variant(k, &name);
        stx_ctx *x = context(2, 7);
        stx_comp *m = model(x, &d);
        const size_t segments = 11, n = segments * S + 1;
        int32_t *t = random_tokens(2, n, V, 13);
        stx_comp_state *s = stx_comp_state_create(m, 2), *joined = stx_comp_state_create(m, 2),
                       *alone[2], *out = NULL;
        size_t at, b;
        double both, one[2], was;
        alone[0] = stx_comp_state_create(m, 1);
        alone[1] = stx_comp_state_create(m, 1);
        if (d.literal & AGED) {
            stx_comp_state_reset_stream(s, 0);
            CHECK(!stx_ok(x) && strstr(stx_error(x), "STX_COMP_LITERAL_ROWS"), "%s: %s", name,
                  stx_error(x));
            free(t);
            stx_destroy(x);
            continue;
        }
        for (at = 0; at < segments && stx_ok(x); at++) {
            for (b = 0; b < 2; b++)
                if (at == 4 + 2 * b) {
                    stx_comp_state_reset_stream(s, b);
                    stx_comp_state_reset(alone[b]);
                }
            if (at == 8) {
                stx_comp_state_copy(joined, 0, s, 0, 1);
                stx_comp_state_copy(joined, 1, s, 1, 1);
                out = stx_comp_state_create(m, 1);
                stx_comp_state_copy(out, 0, s, 1, 1);
            }
            both = train(m, NULL, s, t, 2, n, at * S, NULL);
            for (b = 0; b < 2; b++)
                one[b] = train(m, NULL, alone[b], t + b * n, 1, n, at * S, NULL);
            CHECK(CLOSE(both, (one[0] + one[1]) / 2, TOL),
                  "%s, segment %zu: nll %.9g, of single streams %.9g", name, at, both,
                  (one[0] + one[1]) / 2);
            if (at < 8) continue;
            was = train(m, NULL, joined, t, 2, n, at * S, NULL);
            CHECK(CLOSE(was, both, TOL), "%s, segment %zu: nll %.9g, joined %.9g", name, at,
                  both, was);
            was = train(m, NULL, out, t + n, 1, n, at * S, NULL);
            CHECK(CLOSE(was, one[1], TOL), "%s, segment %zu: nll %.9g, copied out %.9g", name, at,
                  one[1], was);
        }
        CHECK(at == segments && stx_ok(x), "%s: %s", name, stx_error(x));
        free(t);
        stx_destroy(x);
    }
}

/* Streams of different ages that are joined must continue as they would alone: rows
   that a stream has not seen are missing, and rows that the streams compressed in
   different groups must not be confused. */
static void ages(void) {
    int k;
    for (k = 0; k < 3 * VARIANTS; k++) {
        const char *name;
        stx_comp_desc d = variant(k / 3, &name);
        stx_ctx *x = context(2, 7);
        stx_comp *m = model(x, &d);
        const size_t young = (size_t)k % 3 + 1, segments = 9, n = segments * S + 1;
        int32_t *t = random_tokens(2, n, V, 17);
        stx_comp_state *joined = stx_comp_state_create(m, 2), *alone[2];
        size_t at, b;
        alone[0] = stx_comp_state_create(m, 1);
        alone[1] = stx_comp_state_create(m, 1);
        for (at = 0; at < segments && stx_ok(x); at++) {
            double one[2] = {0, 0}, both;
            if (at == 6)
                for (b = 0; b < 2; b++) stx_comp_state_copy(joined, b, alone[b], 0, 1);
            for (b = 0; b < 2; b++)
                if (!b || at >= 6 - young)
                    one[b] = train(m, NULL, alone[b], t + b * n, 1, n, at * S, NULL);
            if (at < 6 || (d.literal & AGED)) continue;
            both = train(m, NULL, joined, t, 2, n, at * S, NULL);
            CHECK(CLOSE(both, (one[0] + one[1]) / 2, TOL),
                  "%s, %zu and 6 segments old, segment %zu: nll %.9g, of single streams %.9g", name,
                  young, at, both, (one[0] + one[1]) / 2);
        }
        CHECK(at == segments && stx_ok(x), "%s: %s", name, stx_error(x));
        free(t);
        stx_destroy(x);
    }
}

/* Like ages(), but for gradients. Joining streams of different ages drops the rows from
   which the newest compressed rows were computed, because the streams group them
   differently. The expected gradient is therefore computed from single streams, with
   the same source rows dropped. */
static void ages_and_gradients(void) {
    int k, tried = 0;
    for (k = 0; k < 3 * VARIANTS; k++) {
        const char *name;
        stx_comp_desc d = variant(k / 3, &name);
        stx_ctx *x = context(2, 7);
        stx_comp *m = model(x, &d);
        const size_t young = (size_t)k % 3 + 1, n = 7 * S + 1;
        int32_t *t = random_tokens(2, n, V, 17);
        stx_comp_state *joined = stx_comp_state_create(m, 2), *alone[2];
        stx_real *grad[3];
        size_t at, b, i, c, rows = 0, count = stx_params_size(m->params);
        for (b = 0; b < 3; b++) grad[b] = (stx_real *)calloc(count, sizeof **grad);
        for (b = 0; b < 2 && d.aux == STX_COMP_AUX_BPTT; b++) {
            alone[b] = stx_comp_state_create(m, 1);
            for (at = b ? 6 - young : 0; at < 6; at++)
                train(m, NULL, alone[b], t + b * n, 1, n, at * S, NULL);
            stx_comp_state_copy(joined, b, alone[b], 0, 1);
            for (i = 0; i < LAYERS; i++) rows += alone[b]->source->layer[i].count;
            stx_memory_reset(alone[b]->source);
        }
        for (b = 0; b < 3 && d.aux == STX_COMP_AUX_BPTT; b++) {
            stx_params_zero_grad(m->params);
            if (b < 2)
                train(m, NULL, alone[b], t + b * n, 1, n, 6 * S, NULL);
            else
                train(m, NULL, joined, t, 2, n, 6 * S, NULL);
            for (i = 0, c = 0; i < m->params->count; c += m->params->tensor[i++]->size)
                memcpy(grad[b] + c, m->params->tensor[i]->grad,
                       m->params->tensor[i]->size * sizeof **grad);
        }
        for (i = 0; i < count; i++) grad[0][i] = (grad[0][i] + grad[1][i]) / 2;
        if (d.aux == STX_COMP_AUX_BPTT) {
            CHECK(rows > 0, "%s: nothing was compressed", name);
            CHECK(max_difference(grad[0], grad[2], count) <= TOL * largest(grad[0], count),
                  "%s, %zu and 6 segments old: gradients differ by %g", name, young,
                  max_difference(grad[0], grad[2], count));
            tried++;
        }
        CHECK(stx_ok(x), "%s: %s", name, stx_error(x));
        for (b = 0; b < 3; b++) free(grad[b]);
        free(t);
        stx_destroy(x);
    }
    CHECK(tried >= 6, "%d cases", tried);
}

/* A memory that needs more positions than fit in the context's memory limit must cause
   an error, and the model must keep its table of positions. */
static void limit(void) {
    const size_t most[LAYERS] = {1 << 20, 1 << 20, 1 << 20};
    stx_comp_desc d = small();
    stx_desc c;
    stx_ctx *x;
    stx_comp *m;
    stx_tensor *sines;
    memset(&c, 0, sizeof c);
    c.threads = 1;
    c.max_bytes = 1 << 23;
    d.positions = STX_COMP_POSITIONS_XL;
    x = stx_create(&c);
    m = stx_comp_create(x, &d);
    CHECK(m && stx_ok(x), "%s", stx_error(x));
    sines = m->sines;
    CHECK(!stx_comp_state_create_sized(m, 1, most, NULL), "2^20 rows within 8 MiB");
    CHECK(stx_error_code(x) == STX_ERR_MEMORY, "%s", stx_error(x));
    CHECK(m->sines == sines && sines->dim[0] == 2 * S + 4, "the model's positions changed");
    stx_destroy(x);
}

/* STX_COMP_LITERAL_FREEZE must take effect in the segment after the one in which a
   matrix is frozen, with and without recomputed layers. Both segments are on one
   tape. */
static void frozen(void) {
    double norm[2];
    int k;
    for (k = 0; k < 2; k++) {
        stx_comp_desc d = small();
        stx_ctx *x = context(1, 5);
        stx_comp *m;
        stx_comp_state *s;
        stx_tensor *a, *b;
        stx_real *g;
        int32_t *t = random_tokens(1, 40, V, 2);
        size_t i, n;
        d.mem = S;
        d.literal = STX_COMP_LITERAL_FREEZE;
        d.recompute_layers = k ? SIZE_MAX : 0;
        m = model(x, &d);
        s = stx_comp_state_create(m, 1);
        stx_begin(x, STX_TRAIN);
        a = stx_comp_loss(m, token_block(x, t, 1, 40, 0, S), token_block(x, t, 1, 40, 1, S), NULL,
                          s, s);
        b = stx_comp_loss(m, token_block(x, t, 1, 40, S, S), token_block(x, t, 1, 40, S + 1, S),
                          NULL, s, s);
        stx_backward(x, stx_add(x, a, b));
        n = m->layer[1].wkv->size;
        g = (stx_real *)calloc(n, sizeof *g);
        stx_get_grad(x, m->layer[1].wkv, g);
        for (norm[k] = 0, i = 0; i < n; i++) norm[k] += (double)g[i] * (double)g[i];
        CHECK(m->layer[1].frozen && stx_ok(x), "%s", stx_error(x));
        free(g);
        free(t);
        stx_destroy(x);
    }
    CHECK(norm[0] > 0 && CLOSE(norm[1] / norm[0], 1, TOL), "|dWkv|^2 %g, recomputed %g", norm[0],
          norm[1]);
}

/* In training, STX_COMP_AUX_BPTT recompresses the rows of the last evictions. With the
   same weights, this changes nothing, so the losses must equal those of an evaluation.
   The memory is not a multiple of a segment, so the first eviction is smaller than the
   others. */
static void bptt_again(int compress, const stx_comp_method *custom) {
    stx_comp_desc d = small();
    stx_ctx *x = context(1, 5);
    int32_t *t = random_tokens(1, 60, V, 2);
    stx_comp_state *s[2];
    stx_comp *m;
    size_t at;
    d.compress = compress;
    d.custom = custom;
    if (custom) d.ratio = 4;    /* the last group has 2 rows */
    d.mem = S + 2;
    d.cmem = 3 * S;
    d.aux = STX_COMP_AUX_BPTT;
    d.bptt = 3;
    m = model(x, &d);
    s[0] = stx_comp_state_create(m, 1);
    s[1] = stx_comp_state_create(m, 1);
    for (at = 0; at < 5; at++) {
        double loss[2];
        int k;
        for (k = 0; k < 2; k++) {
            stx_begin(x, k ? STX_TRAIN : STX_EVAL);
            loss[k] = stx_item(x, stx_comp_loss(m, token_block(x, t, 1, 60, at * S, S),
                                                token_block(x, t, 1, 60, at * S + 1, S), NULL,
                                                s[k], s[k]));
        }
        CHECK(CLOSE(loss[0], loss[1], TOL), "segment %zu: loss %g in an evaluation, %g in training",
              at, loss[0], loss[1]);
    }
    CHECK(stx_ok(x), "%s", stx_error(x));
    free(t);
    stx_destroy(x);
}

/* Each dropout must change the auxiliary loss, but not by much. Each dropout except
   aux_dropout must also change the nll. */
static void dropouts(void) {
    int k;
    double nll[5], aux[5];
    for (k = 0; k < 5; k++) {
        stx_comp_desc d = small();
        stx_ctx *x = context(1, 5);
        stx_comp *m;
        stx_comp_state *s;
        int32_t *t = random_tokens(2, 60, V, 2);
        size_t at;
        double total;
        d.mem = S;
        if (k == 1) d.attn_dropout = 0.3;
        if (k == 2) d.out_dropout = 0.3;
        if (k == 3) d.ff_dropout = 0.3;
        if (k == 4) d.aux_dropout = 0.3;
        m = model(x, &d);
        s = stx_comp_state_create(m, 2);
        for (nll[k] = aux[k] = 0, at = 0; at < 4; at++) {
            double v = train(m, NULL, s, t, 2, 60, at * S, &total);
            nll[k] += v / 4;
            aux[k] += (total - v) / 3;
        }
        CHECK(stx_ok(x), "%s", stx_error(x));
        free(t);
        stx_destroy(x);
    }
    for (k = 1; k < 5; k++) {
        CHECK((nll[k] != nll[0]) == (k < 4) && fabs(nll[k] - nll[0]) < 0.5,
              "dropout %d: nll %g, without %g", k, nll[k], nll[0]);
        CHECK(aux[k] != aux[0] && aux[k] > 0.2 * aux[0] && aux[k] < 5 * aux[0],
              "dropout %d: aux %g, without %g", k, aux[k], aux[0]);
    }
}

/* Trains m, with evaluations between the steps, and m2 in another context, with
   recomputation and without evaluations. All kinds of dropout are enabled. The losses
   must be equal. */
static void steps_equal(const char *name, stx_comp *m, stx_comp_state *s, stx_comp *m2,
                        stx_comp_state *s2, const int32_t *t, size_t n) {
    stx_ctx *x = m->ctx, *x2 = m2->ctx;
    stx_optim *o = stx_optim_create(m->params, NULL), *o2 = stx_optim_create(m2->params, NULL);
    stx_comp_state *eval = stx_comp_state_create(m, s->B);
    size_t i;
    for (i = 0; i < 6; i++) {
        double total, total2, a = train(m, o, s, t, s->B, n, i * S, &total), c;
        stx_begin(x, STX_EVAL);
        stx_comp_forward(m, token_block(x, t, s->B, n, 2, S), NULL, eval, eval);
        c = train(m2, o2, s2, t, s->B, n, i * S, &total2);
        CHECK(a == c && total == total2,
              "%s step %zu: nll %.12g, recomputed and without evaluation %.12g; "
              "total %.12g %.12g %s%s",
              name, i, a, c, total, total2, stx_error(x), stx_error(x2));
    }
}

/* A state of 3 streams that is split in two and joined must equal the original. */
static void split_and_joined(const char *name, const stx_comp_state *s, stx_comp_state *to) {
    stx_comp *m = s->model;
    stx_comp_state *two = stx_comp_state_create(m, 2), *first = stx_comp_state_create(m, 1);
    CHECK(stx_comp_state_copy(two, 0, s, 1, 2) && stx_comp_state_copy(first, 0, s, 0, 1),
          "%s: %s", name, stx_error(m->ctx));
    stx_comp_state_reset(to);
    CHECK(stx_comp_state_copy(to, 0, first, 0, 1) && stx_comp_state_copy(to, 1, two, 0, 2),
          "%s: %s", name, stx_error(m->ctx));
    CHECK(states_differ(s, to) == 0, "%s: a state that was split and joined", name);
    stx_comp_state_free(two);
    stx_comp_state_free(first);
}

/* A state loaded from a file must equal the saved one, and training must continue
   bit-identically. */
static void saved_and_loaded(const char *name, stx_comp_state *s, stx_comp_state *to,
                             const int32_t *t, size_t n, const char *path) {
    stx_comp *m = s->model;
    stx_ctx *x = m->ctx;
    stx_writer *w = stx_writer_create(x);
    stx_file *f;
    size_t i;
    CHECK(stx_comp_state_save(w, s, "memory.") && stx_writer_finish(w, path), "%s: %s", name,
          stx_error(x));
    stx_comp_state_reset(to);
    f = stx_file_open(x, path);
    CHECK(stx_comp_state_load(to, f, "memory."), "%s: %s", name, stx_error(x));
    stx_file_close(f);
    CHECK(states_differ(s, to) == 0, "%s: a state from a file", name);
    for (i = 7; i < 9; i++) {
        uint64_t tick = stx_step_index(x);
        double a, c, total, total2;
        a = train(m, NULL, s, t, s->B, n, i * S, &total);
        stx_set_step_index(x, tick);
        c = train(m, NULL, to, t, s->B, n, i * S, &total2);
        CHECK(a == c && total == total2,
              "%s: continued from a file, nll %.12g and %.12g, total %.12g and %.12g", name, a, c,
              total, total2);
    }
}

/* A state copied through the caller's arrays must equal the original. */
static void got_and_set(const char *name, stx_comp_state *s, stx_comp_state *to) {
    stx_comp *m = s->model;
    const size_t B = s->B, D = m->desc.dim;
    size_t l, b;
    stx_comp_state_reset(to);
    for (l = 0; l < LAYERS; l++) {
        size_t rows = s->mem->layer[l].count, comp = s->comp->layer[l].count;
        stx_real *v = (stx_real *)calloc(B * rows * D + 1, sizeof *v),
                 *c = (stx_real *)calloc(B * comp * D + 1, sizeof *c);
        if (m->layer[l].memory)
            CHECK(stx_comp_state_get(s, l, v, c) && stx_comp_state_set(to, l, v, rows, c, comp),
                  "%s: %s", name, stx_error(m->ctx));
        free(v);
        free(c);
    }
    for (b = 0; b < B; b++) to->pushed[b] = s->pushed[b];
    CHECK(states_differ(s, to) == 0, "%s: a state from the caller's arrays", name);
}

/* Tests states in training and evaluation, their copies, and their files. */
static void states(void) {
    char path[1024];
    int k;
    test_path(path, sizeof path, "test_comp");
    for (k = 0; k < VARIANTS; k++) {
        const char *name;
        stx_comp_desc d = variant(k, &name);
        stx_ctx *x = context(2, 7), *x2 = context(2, 7);
        stx_comp *m, *m2;
        const size_t B = 3, n = 12 * S + 1;
        int32_t *t = random_tokens(B, n, V, 3);
        stx_comp_state *s, *s2, *other;

        d.attn_dropout = 0.1;
        d.out_dropout = 0.2;
        d.ff_dropout = 0.1;
        if (d.aux == STX_COMP_AUX_AUTO && d.compress <= STX_COMP_COMPRESS_DILATED)
            d.aux_dropout = 0.2;
        m = model(x, &d);
        d.recompute_layers = SIZE_MAX;
        m2 = model(x2, &d);
        s = stx_comp_state_create(m, B);
        s2 = stx_comp_state_create(m2, B);
        other = stx_comp_state_create(m, B);
        steps_equal(name, m, s, m2, s2, t, n);
        train(m, NULL, s, t, B, n, 6 * S, NULL);
        CHECK(d.no_memory || states_differ(s, s2) > 0, "%s: a segment does not change the memory",
              name);

        /* with T < segment, the memory must not change */
        stx_params_zero_grad(m->params);
        stx_comp_state_copy(other, 0, s, 0, B);
        stx_begin(x, STX_TRAIN);
        stx_comp_forward(m, token_block(x, t, B, n, 0, S - 1), NULL, s, s);
        if (d.recurrence != STX_COMP_STORE_ROTATE)
            CHECK(states_differ(s, other) == 0, "%s: a short segment changes the memory", name);
        stx_comp_state_copy(s, 0, other, 0, B);

        split_and_joined(name, s, other);
        saved_and_loaded(name, s, other, t, n, path);
        got_and_set(name, s, other);
        CHECK(stx_ok(x) && stx_ok(x2), "%s: %s%s", name, stx_error(x), stx_error(x2));
        free(t);
        stx_destroy(x);
        stx_destroy(x2);
    }
    unlink(path);
}

/* Returns the sum of the gradients' magnitudes over all parameters whose names contain
   `part`. */
static double gradient_of(const stx_comp *m, const char *part) {
    double sum = 0;
    size_t i, k;
    for (i = 0; i < m->params->count; i++) {
        const stx_tensor *t = m->params->tensor[i];
        if (!strstr(m->params->name[i], part)) continue;
        for (k = 0; k < t->size; k++) sum += fabs((double)t->grad[k]);
    }
    return sum;
}

/* Checks the auxiliary losses of the layers and their sum. Their gradients must reach
   only the compression parameters. nll: the language loss of this step. */
static void aux_is_separate(const char *name, stx_comp *m, stx_tensor *nll) {
    stx_ctx *x = m->ctx;
    stx_tensor *aux;
    double sum = 0;
    size_t k, l;
    for (l = 0; l < LAYERS; l++) {
        CHECK(m->aux[l] && m->rel_error[l] && stx_item(x, m->rel_error[l]) > 0,
              "%s: no aux loss", name);
        CHECK(stx_item(x, m->aux[l]) > 0, "%s: an aux loss of 0", name);
        sum += stx_item(x, m->aux[l]);
    }
    aux = stx_comp_aux(m);
    sum *= m->desc.aux_weight / LAYERS;
    CHECK(CLOSE(stx_item(x, aux), sum, TOL), "%s: aux %g, expected %g", name,
          stx_item(x, aux), sum);
    sum += stx_item(x, nll);
    CHECK(CLOSE(stx_item(x, stx_comp_total(m, nll)), sum, TOL), "%s: total", name);
    stx_backward(x, aux);
    for (k = 0; k < m->params->count; k++)
        CHECK((gradient_of(m, m->params->name[k]) > 0)
                  == (strstr(m->params->name[k], "compress") != NULL),
              "%s: the gradient of the aux loss in %s is %g", name, m->params->name[k],
              gradient_of(m, m->params->name[k]));
}

/* The gradient of the language loss must reach all parameters, except that it reaches
   the compression parameters only with BPTT. The gradient of the auxiliary loss must
   reach only the compression parameters. Neither gradient may reach an earlier
   segment. */
static void detached(void) {
    static const int which[] = {0, 2, 19, 20, 23, 10, 9, 26, 27, 28};
    size_t i;
    for (i = 0; i < sizeof which / sizeof *which; i++) {
        const char *name;
        stx_comp_desc d = variant(which[i], &name);
        stx_ctx *x = context(1, 7);
        stx_comp *m = model(x, &d);
        const size_t B = 2, n = 8 * S + 1, D = m->desc.dim;
        int32_t *t = random_tokens(B, n, V, 3);
        stx_comp_state *s = stx_comp_state_create(m, B);
        stx_tensor *nll, *h0, *h1;
        stx_real *v;
        size_t k;
        for (k = 0; k < 5; k++) {
            stx_begin(x, STX_TRAIN);
            stx_comp_forward(m, token_block(x, t, B, n, k * S, S), NULL, s, s);
        }
        stx_begin(x, STX_TRAIN);
        nll = stx_comp_loss(m, token_block(x, t, B, n, 5 * S, S),
                            token_block(x, t, B, n, 5 * S + 1, S), NULL, s, s);
        stx_backward(x, nll);
        CHECK((gradient_of(m, "compress") > 0) == (d.aux == STX_COMP_AUX_BPTT),
              "%s: the gradient of the language loss in the compression is %g", name,
              gradient_of(m, "compress"));
        for (k = 0; k < m->params->count; k++)
            if (!strstr(m->params->name[k], "compress"))
                CHECK(gradient_of(m, m->params->name[k]) > 0, "%s: no gradient in %s", name,
                      m->params->name[k]);

        stx_params_zero_grad(m->params);
        stx_begin(x, STX_TRAIN);
        nll = stx_comp_loss(m, token_block(x, t, B, n, 6 * S, S),
                            token_block(x, t, B, n, 6 * S + 1, S), NULL, s, s);
        if (d.aux != STX_COMP_AUX_BPTT) aux_is_separate(name, m, nll);

        /* two segments in one step */
        stx_begin(x, STX_TRAIN);
        test_state = 5;
        v = random_values(B * S * D);
        h0 = stx_variable(x, v, B, S, D, 0);
        h1 = stx_variable(x, v, B, S, D, 0);
        stx_comp_segment(m, h0, NULL, s, s);
        stx_backward(x, stx_sum(x, stx_comp_segment(m, h1, NULL, s, s)));
        CHECK(!stx_get_grad(x, h0, v) && stx_get_grad(x, h1, v) && largest(v, B * S * D) > 0,
              "%s: a gradient through the memory", name);
        CHECK(stx_ok(x), "%s: %s", name, stx_error(x));
        free(t);
        free(v);
        stx_destroy(x);
    }
}

/* Runs one pass of training over 4 segments of 2 streams through stx_lm. Returns the
   mean nll; *rel_error receives the relative compression loss of the last step. */
static double pass_of(stx_lm *lm, stx_comp *m, stx_optim *o, void *s, const int32_t *t, size_t n,
                      double *rel_error) {
    stx_ctx *x = m->ctx;
    double mean = 0;
    size_t i, l;
    lm->state_reset(s);
    for (i = 0; i < 4; i++) {
        stx_ids *in, *out;
        stx_tensor *nll;
        stx_begin(x, STX_TRAIN);
        in = token_block(x, t, 2, n, i * S, S);
        out = token_block(x, t, 2, n, i * S + 1, S);
        CHECK(lm->key(m, in, out, s, 1) != lm->key(m, in, out, s, 2), "keys");
        nll = lm->loss(m, in, out, s, s);
        mean += stx_item(x, nll) / 4;
        stx_backward(x, lm->total(m, nll));
        for (*rel_error = 0, l = 0; l < LAYERS; l++)
            if (m->rel_error[l]) *rel_error += stx_item(x, m->rel_error[l]) / LAYERS;
        if (stx_optim_step(o, 0.01)) lm->updated(m);
    }
    return mean;
}

/* Returns the number of tokens, among tokens 1 to n - 1 of a text, that a generator
   predicts correctly. */
static size_t predicted(stx_lm *lm, stx_comp *m, const int32_t *t, size_t n) {
    void *g = lm->gen_create(m, 1, 0);
    stx_sampling best;
    size_t i, right = 0;
    memset(&best, 0, sizeof best);
    for (i = 0; i + 1 < n; i++) {
        const stx_real *y = lm->gen_feed(g, t + i, 1);
        right += y && stx_sample(&best, 0, y, V, NULL) == t[i + 1];
    }
    lm->gen_reset(g);
    lm->gen_free(g);
    return right;
}

/* A model trained through stx_lm must be able to overfit one batch. The compression
   loss must decrease as well. */
static void overfit(void) {
    static const int which[] = {0, 5, 13, 14, 20, 25};
    size_t k;
    for (k = 0; k < sizeof which / sizeof *which; k++) {
        const char *name;
        stx_comp_desc d = variant(which[k], &name);
        stx_ctx *x = context(1, 3);
        stx_comp *m = stx_comp_create(x, &d);
        stx_lm lm = stx_comp_as_lm(m);
        const size_t B = 2, n = 4 * S + 1;
        int32_t *t = random_tokens(B, n, V, 21);
        stx_optim_desc od;
        stx_optim *o;
        void *s = lm.state_create(m, B, 0);
        double first = 0, last = 0, rel_error = 0, first_error = 0;
        size_t right;
        int pass;

        memset(&od, 0, sizeof od);
        od.clip = 1;
        o = stx_optim_create(lm.params, &od);
        for (pass = 0; pass < (SLOW ? 8 : 80) && stx_ok(x); pass++) {
            last = pass_of(&lm, m, o, s, t, n, &rel_error);
            if (!pass) {
                first = last;
                first_error = rel_error;
            }
            /* At this learning rate, further steps may increase the loss again;
               rounding determines which steps do. */
            if (last < 0.02) break;
        }
        CHECK(stx_ok(x) && first > 2 && last < (SLOW ? first : 0.2), "%s: nll from %g to %g %s",
              name, first, last, stx_error(x));
        CHECK(m->desc.aux != STX_COMP_AUX_ATTENTION
                  || (first_error > 0 && rel_error < first_error && rel_error > 0),
              "%s: compression from %g to %g", name, first_error, rel_error);
        right = predicted(&lm, m, t, n);
        CHECK(SLOW || right > (n - 1) * 8 / 10, "%s: %zu of %zu learned tokens are generated", name,
              right, n - 1);
        CHECK(!lm.state_create(m, 1, 5)
                  && strstr(stx_error(x), "stx_lm.state_create: expected window = 0, got 5"),
              "%s", stx_error(x));
        stx_clear_error(x);
        CHECK(!lm.gen_create(m, 1, 5)
                  && strstr(stx_error(x), "stx_lm.gen_create: expected window = 0, got 5"),
              "%s", stx_error(x));
        stx_clear_error(x);
        lm.state_reset_stream(s, 0);
        lm.state_free(s);
        free(t);
        stx_destroy(x);
    }
    CHECK(!stx_comp_as_lm(NULL).model, "no model");
}

/* Tests the manual's example: one channel, two rows with the values 0 and ln 3, and a
   convolution that computes their mean. */
static void by_hand(void) {
    stx_ctx *x = context(1, 1);
    stx_comp_desc d;
    stx_comp *m;
    stx_comp_layer *p;
    stx_comp_state *s;
    const double ln3 = log(3.0);
    stx_real one = 1, both[2] = {1, 1}, halves[2] = {0.5, 0.5}, zero = 0, h[2] = {0, 0},
             q[2] = {1, 1}, g[2];
    memset(&d, 0, sizeof d);
    d.layers = d.dim = d.heads = d.inner = d.norm_after = 1;
    d.segment = d.mem = d.ratio = 2;
    d.cmem = 1;
    m = stx_comp_create(x, &d);
    CHECK(m != NULL, "%s", stx_error(x));
    if (!m) return;
    p = &m->layer[0];
    stx_set(x, p->wq, &one);
    stx_set(x, p->wkv, both);
    stx_set(x, p->compress[0], halves);
    stx_set(x, p->compress[1], &zero);
    s = stx_comp_state_create(m, 1);
    h[1] = (stx_real)ln3;
    stx_begin(x, STX_TRAIN);
    stx_comp_segment(m, stx_input(x, h, 1, 2, 1, 0), NULL, s, s);
    CHECK(!m->aux[0] && s->mem->layer[0].count == 2 && !s->comp->layer[0].count,
          "the first segment compressed rows");
    stx_begin(x, STX_TRAIN);
    stx_comp_segment(m, stx_input(x, q, 1, 2, 1, 0), NULL, s, s);
    CHECK(s->comp->layer[0].count == 1, "%zu compressed rows",
          s->comp->layer[0].count);
    CHECK(CLOSE(s->comp->layer[0].data[0], 0.5493, 1e-4), "the row is %g",
          (double)s->comp->layer[0].data[0]);
    CHECK(CLOSE(stx_item(x, m->aux[0]), 0.0754, 1e-4)
              && CLOSE(stx_item(x, m->aux[0]), ln3 * ln3 / 16, 1e-6),
          "aux %g", stx_item(x, m->aux[0]));
    CHECK(CLOSE(stx_item(x, m->rel_error[0]), 1.0 / 9, 1e-6), "rel_error %g",
          stx_item(x, m->rel_error[0]));
    stx_backward(x, m->aux[0]);
    CHECK(stx_get_grad(x, p->compress[0], g) && CLOSE(g[0], 0, 1e-6) && CLOSE(g[1], -0.6035, 1e-4),
          "gradient of the taps %g %g", (double)g[0], (double)g[1]);
    CHECK(stx_get_grad(x, p->compress[1], g) && CLOSE(g[0], -0.5493, 1e-4),
          "gradient of the bias %g", (double)g[0]);
    CHECK(stx_ok(x), "%s", stx_error(x));
    stx_destroy(x);
}

/* The desc must be refused with an error that matches the pattern; see test_says. */
static void refused(const char *pattern, const stx_comp_desc *d) {
    stx_ctx *x = context(1, 1);
    CHECK(!stx_comp_create(x, d) && test_says(stx_error(x), pattern)
              && strstr(stx_error(x), "stx_comp_create"),
          "expected \"%s\", got \"%s\"", pattern, stx_error(x));
    CHECK(!stx_comp_count(d), "%s: counted", pattern);
    stx_destroy(x);
}

#define TOO_MANY (((size_t)1 << 31) + 1)

static void bad_sizes(void) {
    stx_comp_desc d;

    d = small();
    d.layers = 5000;
    refused("layers: expected .. got 5000", &d);
    d = small();
    d.dim = (size_t)1 << 30;
    refused("dim: expected", &d);
    d = small();
    d.emb = (size_t)1 << 30;
    refused("emb: expected", &d);
    d = small();
    d.heads = 5;
    refused("heads: expected a divisor of dim (16) that is at most 256, got 5", &d);
    d = small();
    d.kv_heads = 3;
    refused("kv_heads: expected .. got 3", &d);
    d = small();
    d.kv_heads = 8;
    refused("kv_heads: expected .. got 8", &d);
    d = small();
    d.inner = TOO_MANY;
    refused("inner: expected", &d);
    d = small();
    d.segment = TOO_MANY;
    refused("segment: expected", &d);
}

static void bad_memory_layers(void) {
    static const size_t twice[] = {1, 2, 1}, beyond[] = {1, 4}, zeroth[] = {0};
    stx_comp_desc d;

    d = small();
    d.memory_layers = twice;
    d.memory_count = 3;
    refused("memory_layers: expected each layer at most once, got 1 twice", &d);
    d = small();
    d.memory_layers = beyond;
    d.memory_count = 2;
    refused("memory_layers: expected layers from 1 to 3, got 4", &d);
    d = small();
    d.memory_layers = zeroth;
    d.memory_count = 1;
    refused("memory_layers: expected layers from 1 to 3, got 0", &d);
    d = small();
    d.memory_layers = zeroth;
    refused("memory_count: expected .. got 0", &d);
    d = small();
    d.memory_count = 2;
    refused("memory_count: expected .. got 2", &d);
    d = small();
    d.memory_layers = some_layers;
    d.memory_count = 2;
    d.no_memory = 1;
    refused("no_memory: expected 0 if memory_layers is set, got 1", &d);
}

static void bad_memory_sizes(void) {
    static const size_t huge[] = {1, 1, (size_t)1 << 40}, unequal[] = {4, 6, 4};
    stx_comp_desc d;

    d = small();
    d.mem = TOO_MANY;
    refused("mem: expected", &d);
    d = small();
    d.cmem = TOO_MANY;
    refused("cmem: expected", &d);
    d = small();
    d.mems = huge;
    refused(": mems: expected 0 to 2^31, got", &d);
    d = small();
    d.cmems = huge;
    refused(": cmems: expected 0 to 2^31, got", &d);
    d = small();
    d.mems = unequal;
    d.recurrence = STX_COMP_STORE_ROTATE;
    refused("mems, cmems: expected equal sizes .. in layer 2", &d);
}

static void bad_compression(void) {
    stx_comp_desc d;

    d = small();
    d.ratio = TOO_MANY;
    refused("ratio: expected", &d);
    d = small();
    d.compress = 6;
    refused("compress: expected .. got 6", &d);
    d = small();
    d.compress = -1;
    refused("compress: expected .. got -1", &d);
    d = small();
    d.overlap = TOO_MANY;
    refused("overlap: expected", &d);
    d = small();
    d.overlap = 1;
    d.compress = STX_COMP_COMPRESS_MAX;
    refused("overlap: expected .. got 1", &d);
    d = small();
    d.conv_no_bias = 1;
    d.compress = STX_COMP_COMPRESS_DILATED;
    refused("conv_no_bias: expected .. got 1", &d);
    d = small();
    d.dilations = 9;
    d.compress = STX_COMP_COMPRESS_DILATED;
    refused("dilations: expected .. got 9", &d);
    d = small();
    d.dilations = 1;
    d.dilation[0] = 1;
    refused("dilations: expected .. got 1", &d);
    d = small();
    d.dilations = 1;
    d.compress = STX_COMP_COMPRESS_DILATED;
    refused("dilation: expected .. got 0", &d);
}

/* Weights with one error each */
static size_t bad_weights(void *user, const stx_comp_desc *d, size_t l, stx_weight *w) {
    const int kind = *(const int *)user;
    const stx_weight good = {"a", d->dim, 0, STX_ZEROS, 0, 0};
    (void)l;
    w[0] = w[1] = good;
    w[1].name = kind == 0 ? NULL : "b";
    if (kind == 1) w[1].name = "a";
    if (kind == 2) w[1].rows = 0;
    if (kind == 3) w[1].init = 9;
    return kind == 4 ? STX_MAX_WEIGHTS + 1 : 2;
}

/* Returns NULL, or rows of a wrong shape. */
static stx_tensor *bad_rows(stx_ctx *x, void *user, const stx_comp_evicted *e) {
    if (!*(const int *)user) return NULL;
    return stx_reshape(x, e->rows, e->B, e->G * e->taps / 2, 2 * e->D, 0);
}

static void bad_methods(void) {
    static const char *const expected[] = {
        "custom: weight 1: name: expected 1 to 48 bytes, got 0 (NULL)",
        "custom: weight 1: name: expected a unique name, got \"a\" twice",
        "custom: weight \"b\": rows: expected at least 1, got 0",
        "custom: weight \"b\": init: expected STX_ZEROS, .. got 9",
        "custom: weights: expected at most 16, got 17"};
    stx_comp_method method = own_methods[0];
    stx_comp_desc d = small();
    int k;
    d.custom = &method;
    d.compress = STX_COMP_COMPRESS_MAX;
    refused("compress: expected 0 if custom is set, got 2", &d);
    d.compress = STX_COMP_COMPRESS_CUSTOM;
    d.conv_no_bias = 1;
    refused("conv_no_bias: expected .. got 1", &d);
    d.conv_no_bias = 0;
    method.layout = 3;
    refused("custom: layout: expected STX_COMP_ROWS_GROUPED, .. got 3", &d);
    method.layout = STX_COMP_ROWS_IN_PLACE;
    d.aux = STX_COMP_AUX_BPTT;
    refused("aux: expected a loss other than .. got 3", &d);
    method.forward = NULL;
    refused("custom: forward: expected a function that returns the new rows (B,G,D), got NULL", &d);
    d.custom = NULL;
    refused("compress: expected STX_COMP_COMPRESS_CONV to _DROP, unless custom is set, got 6", &d);

    d = small();
    d.custom = &method;
    method = own_methods[0];
    method.weights = bad_weights;
    method.user = &k;
    for (k = 0; k < 5; k++) refused(expected[k], &d);

    method = own_methods[0];
    method.weights = NULL;
    method.forward = bad_rows;
    method.user = &k;
    d.aux = STX_COMP_AUX_ATTENTION;
    refused("aux: expected STX_COMP_AUX_NONE, because this compression has no parameters", &d);
    d.aux = STX_COMP_AUX_AUTO;
    for (k = 0; k < 2; k++) {
        stx_ctx *x = context(1, 1);
        stx_comp *m = model(x, &d);
        stx_comp_state *s = stx_comp_state_create(m, 1);
        int32_t *t = random_tokens(1, 2 * S, V, 2);
        size_t at;
        for (at = 0; at < 2; at++) {
            stx_begin(x, STX_EVAL);
            stx_comp_forward(m, token_block(x, t, 1, 2 * S, at * S, S), NULL, s, s);
        }
        CHECK(test_says(stx_error(x), k ? "compression \"grouped\" of layer 0: expected new rows "
                                          "(B,G,D) = (1,3,16), got 3 dimensions, (1,3,32)"
                                        : "compression \"grouped\" of layer 0: expected new rows "
                                          "(1,3,16), got NULL"),
              "%s", stx_error(x));
        free(t);
        stx_destroy(x);
    }
}

/* A convolution as a custom method. */
static size_t conv_weights(void *user, const stx_comp_desc *d, size_t l, stx_weight *w) {
    const size_t columns = (d->ratio + d->overlap) * d->dim;
    const double bound = 1 / sqrt((double)columns);
    (void)user;
    (void)l;
    w[0].name = "weight";
    w[0].rows = d->dim;
    w[0].columns = columns;
    w[1].name = "bias";
    w[1].rows = d->dim;
    w[0].init = w[1].init = STX_UNIFORM;
    w[0].a = w[1].a = bound;
    return 2;
}

static stx_tensor *conv_forward(stx_ctx *x, void *user, const stx_comp_evicted *e) {
    (void)user;
    return stx_linear(x, stx_reshape(x, e->rows, e->B, e->G, e->taps * e->D, 0), e->w[0], e->w[1],
                      STX_ACT_NONE);
}

/* The maximum, by a kernel that reads the rows in place. */
static stx_tensor *max_forward(stx_ctx *x, void *user, const stx_comp_evicted *e) {
    stx_tensor *y = stx_new(x, e->B, e->G, e->D, 0);
    (void)user;
    if (y) STX_RUN(x, stx_comp_pool, (x, y->data, e->old.data, &e->groups, 1));
    return y;
}

/* A built-in method and the same method as a custom one must train bit-identically, with
   every loss. */
static void same_as_built_in(void) {
    static const stx_comp_method own[2] = {
        {"conv", conv_weights, conv_forward, NULL, STX_COMP_ROWS_GROUPED},
        {"max", NULL, max_forward, NULL, STX_COMP_ROWS_IN_PLACE}};
    int k;
    for (k = 0; k < 5; k++) {
        const int max = k == 4;
        stx_real *v[2];
        size_t n = 0;
        int i;
        for (i = 0; i < 2; i++) {
            stx_comp_desc d = small();
            stx_ctx *x = context(1, 5);
            int32_t *t = random_tokens(2, 8 * S + 1, V, 2);
            stx_comp_state *s;
            stx_optim *o;
            stx_comp *m;
            size_t at, p;
            d.ratio = 4;
            d.mem = 9;
            d.aux = max ? STX_COMP_AUX_AUTO : STX_COMP_AUX_ATTENTION + k;
            if (!max) d.overlap = 1;
            if (max) d.compress = STX_COMP_COMPRESS_MAX;
            if (i) d.compress = 0;
            if (i) d.custom = &own[max];
            m = stx_comp_create(x, &d);
            CHECK(m && stx_params_size(m->params) == stx_comp_count(&d), "%s", stx_error(x));
            o = stx_optim_create(stx_comp_params(m), NULL);
            s = stx_comp_state_create(m, 2);
            for (at = 0; at < 8; at++) {
                train(m, NULL, s, t, 2, 8 * S + 1, at * S, NULL);
                stx_optim_step(o, 0.01);
            }
            n = stx_params_size(m->params);
            v[i] = (stx_real *)malloc(n * sizeof *v[i]);
            for (at = p = 0; p < m->params->count; at += m->params->tensor[p++]->size)
                stx_get(x, m->params->tensor[p], v[i] + at);
            CHECK(stx_ok(x), "%s", stx_error(x));
            free(t);
            stx_destroy(x);
        }
        CHECK(memcmp(v[0], v[1], n * sizeof **v) == 0, "custom %s, aux %d: differs",
              own[max].name, k + 1);
        free(v[0]);
        free(v[1]);
    }
}

static void bad_aux(void) {
    stx_comp_desc d;

    d = small();
    d.aux = 5;
    refused("aux: expected .. got 5", &d);
    d = small();
    d.aux = STX_COMP_AUX_ATTENTION;
    d.compress = STX_COMP_COMPRESS_MEAN;
    refused("aux: expected .. got 1", &d);
    d = small();
    d.aux_weight = -1;
    refused("aux_weight: expected .. got -1", &d);
    d = small();
    d.aux_weight = NAN;
    refused("aux_weight: expected", &d);
    d = small();
    d.bptt = 2;
    refused("bptt: expected .. got 2", &d);
    d = small();
    d.bptt = 2000;
    d.aux = STX_COMP_AUX_BPTT;
    refused("bptt: expected .. got 2000", &d);
}

static void bad_positions_and_gates(void) {
    stx_comp_desc d;

    d = small();
    d.positions = 2;
    refused("positions: expected .. got 2", &d);
    d = small();
    d.positions = STX_COMP_POSITIONS_XL;
    d.dim = 15;
    d.heads = 3;
    refused("dim: expected .. got 15", &d);
    d = small();
    d.gate = 7;
    refused("gate: expected .. got 7", &d);
    d = small();
    d.gate_bias = 1;
    refused("gate_bias: expected .. got 1", &d);
    d = small();
    d.zero_gate_bias = 1;
    refused("zero_gate_bias: expected .. got 1", &d);
    d = small();
    d.gate = STX_COMP_GATE_GTRXL;
    d.gate_bias = NAN;
    refused("gate_bias: expected", &d);
    d = small();
    d.gate = STX_COMP_GATE_GTRXL;
    d.gate_bias = d.zero_gate_bias = 1;
    refused("gate_bias: expected 0 with zero_gate_bias, got 1", &d);
    d = small();
    d.mogrify = 1;
    refused("mogrify: expected .. got 1", &d);
    d = small();
    d.recurrence = 3;
    refused("recurrence: expected .. got 3", &d);
}

static void bad_rates_and_words(void) {
    stx_comp_desc d;

    d = small();
    d.attn_dropout = 1;
    refused("attn_dropout: expected .. got 1", &d);
    d = small();
    d.out_dropout = -0.5;
    refused("out_dropout: expected .. got -0.5", &d);
    d = small();
    d.ff_dropout = NAN;
    refused("ff_dropout: expected", &d);
    d = small();
    d.aux_dropout = 2;
    refused("aux_dropout: expected .. got 2", &d);
    d = small();
    d.vocab = 0;
    d.tied = 1;
    refused("tied: expected .. got 1", &d);
    d = small();
    d.vocab = 0;
    d.emb = 4;
    refused("emb: expected .. got 4", &d);
    d = small();
    d.vocab = TOO_MANY;
    refused("vocab", &d);
}

static void bad_descs(void) {
    stx_comp_desc d = small();
    stx_ctx *x = context(1, 1);
    bad_sizes();
    bad_memory_layers();
    bad_memory_sizes();
    bad_compression();
    bad_aux();
    bad_positions_and_gates();
    bad_rates_and_words();
    CHECK(!stx_comp_create(x, NULL) && strstr(stx_error(x), "expected a desc"), "%s", stx_error(x));
    CHECK(!stx_comp_create(NULL, &d), "no context");
    CHECK(!stx_comp_count(NULL) && !stx_comp_params(NULL), "NULL is accepted");
    stx_destroy(x);
}

/* Counting parameters must not require a model, and zeros in the desc must select the
   defaults. */
static void counts_and_defaults(void) {
    stx_comp_desc d;
    stx_ctx *x;
    stx_comp *m;
    const char *name;
    int k;
    for (k = 0; k < VARIANTS; k++) {
        d = variant(k, &name);
        x = context(1, 1);
        m = stx_comp_create(x, &d);
        CHECK(m && stx_params_size(m->params) == stx_comp_count(&d),
              "%s: %zu parameters, counted %zu", name, m ? stx_params_size(m->params) : 0,
              stx_comp_count(&d));
        stx_destroy(x);
    }
    memset(&d, 0, sizeof d);
    d.vocab = 256;
    d.dim = 32;
    d.layers = 2;
    x = context(1, 1);
    m = stx_comp_create(x, &d);
    CHECK(m && m->desc.segment == 512 && m->desc.heads == 8 && m->layer[1].M == 512
              && m->layer[1].C == 128 && m->desc.inner == 128
              && m->desc.aux == STX_COMP_AUX_ATTENTION && m->A == 2
              && m->key_pe->dim[0] == 512 + 512 + 128,
          "defaults");
    stx_destroy(x);
}

/* Checks that the context has an error that matches the pattern, and clears it. */
static void fails(stx_ctx *x, const char *pattern) {
    CHECK(test_says(stx_error(x), pattern), "expected \"%s\", got \"%s\"", pattern, stx_error(x));
    stx_clear_error(x);
    stx_begin(x, STX_EVAL);
}

/* Padding passed with the tokens and padding passed with the vectors must result in
   bit-identical hidden states, losses and memories. stx_comp_aux must be 0 if nothing
   is compressed. */
static void padded_tokens(void) {
    enum { B = 2, N = 5 * S };

    stx_ctx *x = context(1, 4);
    stx_comp_desc d = small();
    stx_comp *m = model(x, &d);
    stx_comp_state *a = stx_comp_state_create(m, B), *b = stx_comp_state_create(m, B);
    int32_t *t = random_tokens(B, N + 1, V, 21), *pads = (int32_t *)calloc(B * N, sizeof *pads);
    size_t at, i;

    for (i = 0; i < 4; i++) pads[i] = 1;             /* before the text of the first stream */
    for (i = 2 * N - 9; i < 2 * N; i++) pads[i] = 1; /* after the text of the second stream */
    for (at = 0; at + S <= N; at += S) {
        stx_ids *in, *next, *pad;
        stx_tensor *h, *vectors, *tokens;

        stx_begin(x, STX_TRAIN);
        in = token_block(x, t, B, N + 1, at, S);
        next = token_block(x, t, B, N + 1, at + 1, S);
        pad = token_block(x, pads, B, N, at, S);
        h = stx_comp_segment(m, stx_comp_embed(m, in), pad, a, a);
        vectors = stx_comp_nll(m, h, next, pad);
        tokens = stx_comp_loss(m, in, next, pad, b, b);
        CHECK(stx_item(x, vectors) == stx_item(x, tokens),
              "segment %zu: nll %.9g of vectors, %.9g of tokens %s",
              at / S, stx_item(x, vectors), stx_item(x, tokens), stx_error(x));
        CHECK((stx_item(x, stx_comp_aux(m)) > 0) == (at > 0), "segment %zu: aux %g", at / S,
              stx_item(x, stx_comp_aux(m)));
        if (at) continue;
        vectors = stx_comp_loss(m, in, next, NULL, NULL, NULL);
        CHECK(stx_item(x, vectors) != stx_item(x, tokens), "padding has no effect");
        stx_begin(x, STX_TRAIN);
        stx_comp_forward(m, token_block(x, t, B, N + 1, 0, S), token_block(x, pads, B, N, 0, S),
                         NULL, NULL);
        CHECK(stx_item(x, stx_comp_aux(m)) == 0, "an aux loss without memory");
    }
    stx_begin(x, STX_EVAL);
    stx_comp_forward(m, token_block(x, t, B, N + 1, 0, S), NULL, b, b);
    CHECK(stx_item(x, stx_comp_aux(m)) == 0 && stx_ok(x), "an aux loss in evaluation %s",
          stx_error(x));
    free(t);
    free(pads);
    stx_destroy(x);
}

/* A literal form that a model does not support must be refused with an error that names
   the form. STX_COMP_LITERAL must select all forms that the model supports. */
static void literal(void) {
    static const struct {
        int compress, aux, positions;
        unsigned can;
    } model[] = {{STX_COMP_COMPRESS_CONV, STX_COMP_AUX_AUTO, STX_COMP_POSITIONS_LEARNED, 31},
                 {STX_COMP_COMPRESS_CONV, STX_COMP_AUX_AUTO, STX_COMP_POSITIONS_XL, 30},
                 {STX_COMP_COMPRESS_CONV, STX_COMP_AUX_AUTOENCODE, STX_COMP_POSITIONS_LEARNED, 11},
                 {STX_COMP_COMPRESS_CONV, STX_COMP_AUX_NONE, STX_COMP_POSITIONS_XL, 10},
                 {STX_COMP_COMPRESS_DILATED, STX_COMP_AUX_AUTO, STX_COMP_POSITIONS_LEARNED, 29},
                 {STX_COMP_COMPRESS_MAX, STX_COMP_AUX_AUTO, STX_COMP_POSITIONS_LEARNED, 9},
                 {STX_COMP_COMPRESS_USED, STX_COMP_AUX_AUTO, STX_COMP_POSITIONS_LEARNED, 1},
                 {STX_COMP_COMPRESS_USED, STX_COMP_AUX_AUTO, STX_COMP_POSITIONS_XL, 0}};

    static const char *const name[5] = {"_ROWS", "_PAD", "_TARGET", "_MASK", "_FREEZE"};
    char pattern[64];
    size_t i, k;

    for (i = 0; i < sizeof model / sizeof *model; i++) {
        stx_comp_desc d = small();
        stx_ctx *x = context(1, 1);
        stx_comp *m;

        d.compress = model[i].compress;
        d.aux = model[i].aux;
        d.positions = model[i].positions;
        d.literal = STX_COMP_LITERAL;
        m = stx_comp_create(x, &d);
        CHECK(m && m->desc.literal == model[i].can, "model %zu: %u, expected %u %s", i,
              m ? m->desc.literal : 0, model[i].can, stx_error(x));
        for (k = 0; k < 5; k++) {
            d.literal = 1u << k;
            snprintf(pattern, sizeof pattern, "literal: STX_COMP_LITERAL%s requires", name[k]);
            if (!(model[i].can >> k & 1)) {
                refused(pattern, &d);
                d.literal |= STX_COMP_LITERAL;
                refused(pattern, &d);
                continue;
            }
            m = stx_comp_create(x, &d);
            CHECK(m && m->desc.literal == 1u << k, "model %zu, literal%s: %s", i, name[k],
                  stx_error(x));
        }
        d.literal = 32;
        refused("literal: expected .. got 32", &d);
        stx_destroy(x);
    }
}

static void bad_inputs(stx_comp *m, stx_comp_state *s, stx_comp_state *strange, const int32_t *t) {
    stx_ctx *x = m->ctx;
    static const int32_t unknown[6] = {1, 2, 3, 99, 1, 2};
    static const stx_real v[6 * 16];
    stx_tensor *h;

    stx_begin(x, STX_EVAL);
    CHECK(!stx_comp_forward(m, token_block(x, t, 2, 40, 0, S + 1), NULL, s, s), "a long segment");
    fails(x, "T from 1 to segment (6)");
    CHECK(!stx_comp_forward(m, NULL, NULL, s, s), "no tokens");
    fails(x, "ids: expected tokens (B,T), got NULL");
    CHECK(!stx_comp_forward(m, token_block(x, t, 1, 40, 0, S), NULL, s, s), "one row of two");
    fails(x, "B = 1");
    CHECK(!stx_comp_forward(m, token_block(x, t, 2, 40, 0, S), NULL, s, strange), "another model");
    fails(x, "another model");
    CHECK(!stx_comp_segment(m, stx_input(x, v, 1, 6, 15, 0), NULL, NULL, NULL), "dim - 1");
    fails(x, "stx_comp_segment");
    CHECK(!stx_comp_segment(m, stx_input(x, v, 1, 6, 16, 0), token_block(x, t, 1, 40, 0, 5), NULL,
                            NULL),
          "padding of another size");
    fails(x, "pad: expected (1,6)");
    h = stx_comp_forward(m, token_block(x, t, 2, 40, 0, 3), NULL, NULL, NULL);
    CHECK(h && !stx_comp_nll(m, h, token_block(x, t, 2, 40, 0, 3), token_block(x, t, 2, 40, 0, 2)),
          "padding of targets of another size");
    fails(x, "stx_comp_nll");
    CHECK(!stx_comp_forward(m, stx_tokens(x, unknown, 2, 3), NULL, s, s), "token 99");
    fails(x, "99");
}

static void bad_states(stx_comp *m, stx_comp_state *s, stx_comp_state *strange) {
    static const size_t more[LAYERS] = {9, 9, 9}, over[LAYERS] = {(size_t)1 << 40, 1, 1};
    static const stx_real v[6 * 16];
    stx_ctx *x = m->ctx;
    stx_real rows[1];
    stx_comp_state *big;

    CHECK(!stx_comp_state_create(m, 0), "a state of no streams");
    fails(x, "expected B >= 1 streams");
    CHECK(!stx_comp_gen_create(m, 0), "a generator of no streams");
    fails(x, "expected B >= 1 streams");
    CHECK(!stx_comp_state_create_sized(m, 1, over, NULL), "2^40 rows");
    fails(x, "layer 0");
    stx_comp_state_reset_stream(s, 2);
    fails(x, "stream: expected less than 2, got 2");
    CHECK(!stx_comp_state_copy(s, 0, strange, 0, 2), "another model");
    fails(x, "another model");
    CHECK(!stx_comp_state_copy(s, 1, s, 0, 2), "a copy beyond the last stream");
    fails(x, "stx_memory_copy");
    big = stx_comp_state_create_sized(m, 2, more, NULL);
    CHECK(big && !stx_comp_state_copy(s, 0, big, 0, 2), "a copy between other sizes");
    fails(x, "got one with other sizes");
    CHECK(!stx_comp_state_get(s, 3, rows, NULL), "reading layer 3");
    fails(x, "stx_comp_state_get: layer: expected less than 3, got 3");
    CHECK(!stx_comp_state_set(s, 3, v, 1, NULL, 0), "layer 3");
    fails(x, "stx_comp_state_set: layer: expected less than 3, got 3");
    CHECK(!stx_comp_state_set(s, 0, v, 7, NULL, 0), "7 rows");
    fails(x, "got 7 and 0");
    CHECK(!stx_comp_state_set(s, 0, NULL, 1, NULL, 0), "NULL");
    fails(x, "got NULL");
    CHECK(!stx_comp_state_set(s, 0, v, 1, v, 5), "5 compressed rows");
    fails(x, "got 1 and 5");
}

/* State sizes that the model's options exclude must be refused. */
static void bad_state_sizes(stx_ctx *x) {
    static const size_t more[LAYERS] = {9, 9, 9}, unequal[LAYERS] = {4, 5, 6};
    stx_comp_desc d = small();
    stx_comp *m;

    d.recurrence = STX_COMP_STORE_ROTATE;
    m = stx_comp_create(x, &d);
    CHECK(m && !stx_comp_state_create_sized(m, 1, unequal, NULL), "unequal sizes");
    fails(x, "STX_COMP_STORE_ROTATE");
    d.recurrence = 0;
    d.literal = STX_COMP_LITERAL_ROWS;
    m = stx_comp_create(x, &d);
    CHECK(m && !stx_comp_state_create_sized(m, 1, more, NULL), "other sizes");
    fails(x, "STX_COMP_LITERAL_ROWS");
    d = small();
    d.cmem = STX_COMP_NO_ROWS;
    m = stx_comp_create(x, &d);
    CHECK(m && !stx_comp_state_create_sized(m, 1, NULL, more), "no compression");
    fails(x, "no compressed memory in this");
}

/* Invalid calls of a generator must be refused. m, s: a model with a vocabulary and a
   state of two streams. t: tokens (2,40). */
static void bad_generation(stx_comp *m, stx_comp_state *s, const int32_t *t) {
    stx_ctx *x = m->ctx;
    static const stx_real v[6 * 16];
    stx_comp_desc d = small();
    stx_comp *bare;
    stx_comp_gen *g, *one;
    stx_tensor *h;

    d.vocab = 0;
    bare = stx_comp_create(x, &d);
    CHECK(bare && !stx_comp_embed(bare, token_block(x, t, 1, 40, 0, 3)), "embedding without vocab");
    fails(x, "the model has no vocabulary");
    CHECK(!stx_comp_logits(bare, stx_input(x, v, 1, 6, 16, 0)), "logits without vocab");
    fails(x, "the model has no vocabulary");
    CHECK(stx_comp_segment(bare, stx_input(x, v, 1, 6, 16, 0), NULL, NULL, NULL)
              && !stx_comp_as_lm(bare).model,
          "a model of vectors");
    g = stx_comp_gen_create(bare, 1);
    CHECK(g && !stx_comp_gen_feed(g, t, 1), "a token without vocab");
    fails(x, "the model has no vocabulary");
    h = stx_comp_gen_step(g, stx_input(x, v, 1, 6, 16, 0));
    CHECK(h && h->dim[1] == 6, "%s", stx_error(x));
    CHECK(!stx_comp_gen_step(g, stx_input(x, v, 2, 3, 16, 0)), "two rows");
    fails(x, "stx_comp_gen_step");
    stx_begin(x, STX_TRAIN);
    CHECK(!stx_comp_gen_step(g, stx_input(x, v, 1, 6, 16, 0)), "training");
    fails(x, "STX_EVAL");
    CHECK(!stx_comp_gen_set(g, s), "a state of another model");
    fails(x, "another model");
    one = stx_comp_gen_create(m, 1);
    CHECK(one && !stx_comp_gen_set(one, s), "a state of more streams");
    fails(x, "B = 1 streams, got 2");
}

/* Invalid calls must be refused. */
static void errors(void) {
    stx_ctx *x = context(1, 1);
    stx_comp_desc d = small();
    stx_comp *m = stx_comp_create(x, &d), *other = stx_comp_create(x, &d);
    stx_comp_state *s = stx_comp_state_create(m, 2), *strange = stx_comp_state_create(other, 2);
    int32_t *t = random_tokens(2, 40, V, 1);

    bad_inputs(m, s, strange, t);
    bad_states(m, s, strange);
    bad_state_sizes(x);
    bad_generation(m, s, t);
    CHECK(!stx_comp_segment(NULL, NULL, NULL, NULL, NULL) && !stx_comp_nll(m, NULL, NULL, NULL)
              && !stx_comp_total(NULL, NULL) && !stx_comp_state_get(NULL, 0, NULL, NULL)
              && !stx_comp_state_set(NULL, 0, NULL, 0, NULL, 0) && !stx_comp_gen_feed(NULL, t, 1)
              && !stx_comp_state_save(NULL, NULL, "") && !stx_comp_state_load(NULL, NULL, "")
              && !stx_comp_gen_set(NULL, s),
          "NULL is accepted");
    stx_comp_state_free(NULL);
    stx_comp_gen_free(NULL);
    stx_comp_state_reset(NULL);
    stx_comp_gen_reset(NULL);
    stx_comp_state_reset_stream(NULL, 0);
    stx_comp_gen_reset_stream(NULL, 0);
    CHECK(stx_ok(x), "%s", stx_error(x));
    free(t);
    stx_destroy(x);
}

/* A file with different sizes, a different number of streams or damaged counts must be
   refused, and the memory must stay empty. */
static void bad_files(void) {
    char path[1024];
    const size_t more[LAYERS] = {14, 14, 14};
    int k;
    test_path(path, sizeof path, "test_comp");
    for (k = 0; k < 4; k++) {
        static const char *const expected[] = {"mem", "number of streams", "seen", "usage"};
        stx_ctx *x = context(1, 1);
        stx_comp_desc d = small();
        stx_comp *m;
        stx_comp_state *s, *to;
        stx_writer *w;
        stx_file *f;
        int32_t *t = random_tokens(2, 40, V, 1);
        size_t i;
        if (k == 3) d.compress = STX_COMP_COMPRESS_USED;
        m = stx_comp_create(x, &d);
        s = stx_comp_state_create_sized(m, 2, more, NULL);
        for (i = 0; i < 3; i++) {
            stx_begin(x, STX_EVAL);
            stx_comp_forward(m, token_block(x, t, 2, 40, i * S, S), NULL, s, s);
        }
        w = stx_writer_create(x);
        if (k == 2) s->pushed[1] = (size_t)1 << 40;
        if (k == 3) s->usage->layer[0].count--;
        CHECK(stx_comp_state_save(w, s, "a.") && stx_writer_finish(w, path), "%s", stx_error(x));
        to = stx_comp_state_create_sized(m, k == 1 ? 1 : 2, k >= 1 ? more : NULL, NULL);
        f = stx_file_open(x, path);
        CHECK(!stx_comp_state_load(to, f, "a.") && strstr(stx_error(x), expected[k]),
              "expected \"%s\", got \"%s\"", expected[k], stx_error(x));
        CHECK(!stx_memory_max_rows(to->mem) && !stx_memory_max_rows(to->comp) && !to->pushed[0],
              "the memory is not empty");
        stx_clear_error(x);
        CHECK(!stx_comp_state_load(to, f, "b."), "another prefix");
        stx_clear_error(x);
        stx_file_close(f);
        free(t);
        stx_destroy(x);
    }
    unlink(path);
}

/* With ignored targets (-1, other negative ids, and padding), the nll must be the mean
   of -log p over the remaining targets. */
static void targets(void) {
    int k;
    for (k = 0; k < 4; k++) {
        stx_ctx *x = context(1, 1);
        stx_comp_desc d = small();
        stx_comp *m;
        int32_t *t = random_tokens(2, 40, V, 1), target[12];
        static const int32_t pad[12] = {0, 0, 1, 0, 0, 0, 1, 1, 0, 0, 0, 0};
        stx_ids *ids, *to, *no;
        stx_tensor *h, *lp, *nll;
        double sum = 0;
        size_t i, count = 0;
        d.emb = 5;
        m = model(x, &d);
        stx_begin(x, STX_TRAIN);
        ids = token_block(x, t, 2, 40, 0, S);
        for (i = 0; i < 12; i++) {
            target[i] = t[i];
            if ((k == 1 && i % 5 == 1) || k == 3) target[i] = -1;
            if (k == 2 && i % 4 == 2) target[i] = -7;
        }
        to = stx_tokens(x, target, 2, 6);
        no = k == 2 ? stx_tokens(x, pad, 2, 6) : NULL;
        h = stx_comp_segment(m, stx_comp_embed(m, ids), no, NULL, NULL);
        lp = stx_comp_log_probs(m, h);
        nll = stx_comp_nll(m, h, to, no);
        for (i = 0; i < 12; i++) {
            if (target[i] < 0 || (k == 2 && pad[i])) continue;
            sum -= (double)lp->data[i * V + (size_t)target[i]];
            count++;
        }
        CHECK(CLOSE(stx_item(x, nll), count ? sum / (double)count : 0, 1e-5),
              "case %d: nll %g, expected %g %s", k, stx_item(x, nll), sum / (double)count,
              stx_error(x));
        stx_backward(x, nll);
        CHECK(stx_ok(x), "%s", stx_error(x));
        free(t);
        stx_destroy(x);
    }
}

/* Changing the tokens in the padding must not change a bit of any other output, in this
   segment or later ones. */
static void padding(void) {
    static const int which[] = {0, 2, 3, 4, 5, 6, 9, 10, 14, 19, 24, 25};
    size_t k;
    for (k = 0; k < sizeof which / sizeof *which; k++) {
        const char *name;
        stx_comp_desc d = variant(which[k], &name);
        stx_ctx *x = context(1, 1);
        stx_comp *m = model(x, &d);
        const size_t B = 2, n = 5 * S;
        int32_t *t = random_tokens(B, n, V, 4), *p = (int32_t *)calloc(B * n, sizeof *p);
        stx_comp_state *s[2];
        size_t i, b, c, other;
        for (i = 0; i < B * n; i++) p[i] = i % 7 == 3 || (i >= S && i < 2 * S);
        for (other = 0; other < 2; other++) s[other] = stx_comp_state_create(m, B);
        for (i = 0; i < n; i += S) {
            stx_real *h[2];
            double aux[2] = {0, 0};
            for (other = 0; other < 2; other++) {
                stx_tensor *y;
                size_t l;
                stx_begin(x, STX_TRAIN);
                for (c = 0; other && c < B * n; c++)
                    if (p[c]) t[c] = (t[c] + 1) % V;
                y = stx_comp_segment(m, stx_comp_embed(m, token_block(x, t, B, n, i, S)),
                                     token_block(x, p, B, n, i, S), s[other], s[other]);
                CHECK(y != NULL, "%s: %s", name, stx_error(x));
                if (!y) return;
                h[other] = (stx_real *)malloc(y->size * sizeof **h);
                memcpy(h[other], y->data, y->size * sizeof **h);
                for (l = 0; l < LAYERS; l++)
                    if (m->aux[l]) aux[other] += stx_item(x, m->aux[l]);
            }
            for (b = 0; b < B; b++)
                for (c = 0; c < S; c++)
                    CHECK(p[b * n + i + c]
                              || !memcmp(h[0] + (b * S + c) * 16, h[1] + (b * S + c) * 16,
                                         16 * sizeof **h),
                          "%s: padding changes row %zu, token %zu",
                          name, b, i + c);
            CHECK(aux[0] == aux[1], "%s: aux loss %g and %g", name, aux[0], aux[1]);
            free(h[0]);
            free(h[1]);
        }
        CHECK(states_differ(s[0], s[1]) == 0, "%s: padding changes the memory", name);
        free(t);
        free(p);
        stx_destroy(x);
    }
}

/* After a reset in the middle of a segment, earlier tokens must not affect this segment
   or later ones. */
static void reset_midway(void) {
    static const int which[] = {0, 5, 6, 10, 11, 21, 4};
    size_t k;
    for (k = 0; k < sizeof which / sizeof *which; k++) {
        const char *name;
        stx_comp_desc d = variant(which[k], &name);
        stx_ctx *x = context(1, 1);
        stx_comp *m = model(x, &d);
        const size_t n = 5 * S, at = 2 * S + 2, D = m->desc.dim;
        int32_t *t = random_tokens(2, n, V, 4);
        stx_real *h[2];
        size_t i, other;
        double e;
        for (other = 0; other < 2; other++) {
            stx_comp_gen *g = stx_comp_gen_create(m, 2);
            for (i = 0; other && i < at; i++) t[i] = (t[i] + 1) % V;
            h[other] = (stx_real *)calloc(2 * n * D, sizeof **h);
            for (i = 0; i < n; i++) {
                stx_tensor *y;
                stx_begin(x, STX_EVAL);
                if (i == at) stx_comp_gen_reset_stream(g, 0);
                y = stx_comp_gen_step(g, stx_comp_embed(m, token_block(x, t, 2, n, i, 1)));
                CHECK(y != NULL, "%s: %s", name, stx_error(x));
                if (!y) return;
                memcpy(h[other] + i * 2 * D, y->data, 2 * D * sizeof **h);
            }
            stx_comp_gen_free(g);
        }
        e = max_difference(h[0] + at * 2 * D, h[1] + at * 2 * D, (n - at) * 2 * D);
        CHECK(e == 0 && max_difference(h[0], h[1], 2 * D) > 0,
              "%s: tokens before the reset change the output by %g", name, e);
        free(t);
        free(h[0]);
        free(h[1]);
        stx_destroy(x);
    }
}

/* Compares the kernel that sums the attention that each row received with the plain
   definition, with and without positions, biases and padding. */
static void usage(void) {
    int k;
    for (k = 0; k < 8; k++) {
        stx_ctx *x = context(3, 1);

        enum { B = 3, T = 5, K = 40, H = 3, D = 19, C = H * D, first = 2, n = 33 };

        static stx_real q[B * T * C], kv[B * K * 2 * C], pe[K * C], u[C], got[B * (n + 2) * 2];
        int32_t pad[B * K];
        double *sum = (double *)calloc(B * n, sizeof *sum), *work, worst = 0;
        stx_attention_in in;
        stx_attention_desc d;
        stx_attention_args *made = NULL;
        stx_tensor *out;
        size_t i, b, j;
        test_state = 77;
        for (i = 0; i < B * T * C; i++) q[i] = (stx_real)test_rand();
        for (i = 0; i < B * K * 2 * C; i++) kv[i] = (stx_real)test_rand();
        for (i = 0; i < K * C; i++) pe[i] = (stx_real)test_rand();
        for (i = 0; i < C; i++) u[i] = (stx_real)test_rand();
        for (i = 0; i < B * K; i++) pad[i] = i % 11 == 4 || i % K == K - 2;
        stx_begin(x, STX_EVAL);
        memset(&in, 0, sizeof in);
        memset(&d, 0, sizeof d);
        d.heads = H;
        in.q = stx_input(x, q, B, T, C, 0);
        in.kv = stx_input(x, kv, B, K, 2 * C, 0);
        if (k & 1) in.pe = stx_input(x, pe, K, C, 0, 0);
        if (k & 2) in.content_bias = stx_input(x, u, C, 0, 0, 0);
        if (k == 3) in.position_bias = in.content_bias;
        if (k & 4) in.pad = stx_tokens(x, pad, B, K);
        in.args_out = &made;
        CHECK(stx_attention(x, &in, &d) && made, "%s", stx_error(x));
        if (!made) return;
        out = stx_new_f32(x, B, n + 2, 2, 0);
        for (i = 0; i < out->size; i++) out->data[i] = (stx_real)0.5;
        stx_comp_usage(x, out->data, 2 * (n + 2), made, first, n);
        stx_get(x, out, got);
        work = (double *)calloc(2 * stx_attention_keys(made), sizeof *work);
        stx_comp_usage_plain(sum, made, first, n, work);
        for (b = 0; b < B; b++)
            for (j = 0; j < n + 2; j++) {
                const stx_real *have = got + (b * (n + 2) + j) * 2;
                double queries = 0;
                for (i = K - T; i < K; i++) queries += !(k & 4) || !pad[b * K + i];
                raise_worst(&worst,
                            fabs((double)have[0] - 0.5 - (j < n ? sum[b * n + j] : 0)));
                CHECK((double)have[1] == 0.5 + (j < n ? queries : 0),
                      "row %zu: %g queries, expected %g", j, (double)have[1] - 0.5, queries);
            }
        CHECK(worst < 1e-5, "case %d: the error is %g", k, worst);
        free(sum);
        free(work);
        stx_destroy(x);
    }
}

/* The rows with the largest usage must be kept and, of two rows with equal usage, the
   newer one. Missing rows have the lowest priority. Kept rows stay in temporal order;
   the rows of a young stream are at the end. */
static void pick(void) {
    static const stx_real rows[2 * 6] = {1, 2, 3, 4, 5, 6, 10, 20, 30, 40, 50, 60};
    static const stx_real used[2 * 7 * 2] = {3, 1, 8, 4, 4, 2, 1, 1, 2, 1, 0, 0, 9, 1,
                                             0, 0, 0, 0, 6, 2, 3, 1, 5, 1, 3, 1, 9, 1};
    static const int32_t pad[12] = {0, 0, 0, 0, 0, 0, 1, 1, 0, 0, 1, 1}, first[2] = {0, 2};
    stx_comp_groups g;
    stx_real y[6];
    memset(&g, 0, sizeof g);
    g.B = 2;
    g.rows = 6;
    g.groups = 3;
    g.taps = g.step = 2;
    g.D = 1;
    stx_comp_pick(NULL, y, rows, used, 14, &g); /* usages 3 2 2 1 2 0 and 0 0 3 3 5 3 */
    CHECK(y[0] == 1 && y[1] == 3 && y[2] == 5 && y[3] == 40 && y[4] == 50 && y[5] == 60,
          "by usage: %g %g %g, %g %g %g", (double)y[0], (double)y[1], (double)y[2], (double)y[3],
          (double)y[4], (double)y[5]);
    g.pad = pad;
    stx_comp_pick(NULL, y, rows, used, 14, &g);
    CHECK(y[0] == 1 && y[3] == 0 && y[4] == 30 && y[5] == 40, "missing rows: %g %g %g",
          (double)y[3], (double)y[4], (double)y[5]);
    /* first[1] = 2: in batch row 1, the first two rows do not exist */
    g.first = first;
    stx_comp_pick(NULL, y, rows, used, 14, &g);
    CHECK(y[0] == 1 && y[3] == 0 && y[4] == 30 && y[5] == 40, "a young stream: %g %g %g",
          (double)y[3], (double)y[4], (double)y[5]);
}

#ifndef SEQTX_DOUBLE
/* The data of a training step. With bf16 operands, the losses must be nearly the same
   as in f32. With several threads, a repeated run must be bit-identical, whether or not
   its steps are replayed. */
typedef struct repeated {
    stx_comp *m;
    stx_comp_state *s;
    stx_ids *in, *out;
    stx_tensor *nll;
} repeated;

static void one_step(void *user) {
    repeated *r = (repeated *)user;
    stx_ctx *x = r->m->ctx;
    stx_begin(x, STX_TRAIN);
    r->nll = stx_comp_loss(r->m, r->in, r->out, NULL, r->s, r->s);
    stx_metric_set(x, 0, r->nll, 1, 0);
    stx_backward(x, stx_comp_total(r->m, r->nll));
}

/* Runs four steps of variant k with stx_step_run. nll (4) receives their losses. */
static void repeated_steps(int k, int precision, double *nll) {
    const char *name;
    stx_comp_desc d = variant(k, &name);
    stx_desc cd;
    stx_ctx *x;
    repeated r;
    const size_t n = 5 * S;
    int32_t *t = random_tokens(2, n, V, 2), in[2 * S], out[2 * S];
    size_t i, b;

    memset(&cd, 0, sizeof cd);
    cd.threads = 3;
    cd.precision = precision;
    x = stx_create(&cd);
    r.m = model(x, &d);
    r.s = stx_comp_state_create(r.m, 2);
    r.in = stx_tokens_create(x, 2, S);
    r.out = stx_tokens_create(x, 2, S);
    for (i = 0; i < 4; i++) {
        for (b = 0; b < 2; b++) {
            memcpy(in + b * S, t + b * n + i * S, S * sizeof *in);
            memcpy(out + b * S, t + b * n + i * S + 1, S * sizeof *out);
        }
        stx_tokens_set(x, r.in, in);
        stx_tokens_set(x, r.out, out);
        CHECK(stx_step_run(x, stx_comp_key(r.m, r.in, r.out, r.s, 0), one_step, &r), "%s: %s", name,
              stx_error(x));
        nll[i] = stx_metric_get(x, 0);
    }
    free(t);
    stx_destroy(x);
}

static void precisions(void) {
    int k, i;
    for (k = 0; k < VARIANTS; k += 4) {
        double f32[4], again[4], bf16[4];
        repeated_steps(k, STX_PREC_F32, f32);
        repeated_steps(k, STX_PREC_F32, again);
        repeated_steps(k, STX_PREC_BF16, bf16);
        for (i = 0; i < 4; i++)
            CHECK(f32[i] == again[i] && CLOSE(bf16[i], f32[i], 0.05),
                  "variant %d: nll %g, repeated %g, bf16 %g", k, f32[i], again[i], bf16[i]);
    }
}
#endif

/* Runs some steps of a variant in a context that can make `left` allocations. Returns
   nonzero if `left` was sufficient; otherwise the context must report that memory ran
   out. */
static int enough_memory(int k, int left) {
    const char *name;
    stx_comp_desc d = variant(k, &name);
    int remaining = left, ok;
    stx_ctx *x = limited_context(&remaining);
    int32_t *t;
    stx_comp *m;
    stx_comp_state *s;
    stx_comp_gen *g;
    size_t i;

    if (!x) return 0;
    t = random_tokens(1, 40, V, 1);
    m = stx_comp_create(x, &d);
    s = stx_comp_state_create(m, 1);
    g = stx_comp_gen_create(m, 1);
    for (i = 0; i < 4; i++) {
        stx_tensor *nll;
        stx_begin(x, STX_TRAIN);
        nll = stx_comp_loss(m, token_block(x, t, 1, 40, i * S, S),
                            token_block(x, t, 1, 40, i * S + 1, S), NULL, s, s);
        stx_backward(x, stx_comp_total(m, nll));
    }
    stx_comp_gen_feed(g, t, 20);
    ok = stx_ok(x);
    CHECK(ok || stx_error_code(x) == STX_ERR_MEMORY, "%s, %d allocations: %s", name, left,
          stx_error(x));
    stx_comp_gen_free(g);
    stx_comp_state_free(s);
    stx_destroy(x);
    free(t);
    return ok;
}

/* Wherever memory runs out, an error must be reported, without a crash. */
static void no_memory(void) {
    int k, left;
    for (k = 0; k < VARIANTS; k += 5)
        for (left = 1; left < 4000 && !enough_memory(k, left); left += 1 + left / 6) {
        }
}

/* Invalid uses of a memory must be refused. */
static void memory_errors(void) {
    stx_comp_desc d;
    stx_ctx *x = context(1, 1);
    stx_comp *m, *shallow;
    stx_comp_state *s, *other;
    stx_real rows[2 * 4 * 8];
    int32_t ids[2 * 4] = {1, 2, 3, 4, 5, 6, 7, 8};
    memset(&d, 0, sizeof d);
    d.vocab = 16;
    d.layers = 2;
    d.dim = 8;
    d.heads = 2;
    d.segment = d.mem = 4;
    d.cmem = 2;
    d.ratio = 2;
    m = stx_comp_create(x, &d);
    d.layers = 1;
    shallow = stx_comp_create(x, &d);
    s = stx_comp_state_create(m, 2);
    other = stx_comp_state_create(shallow, 2);
    stx_begin(x, STX_EVAL);
    stx_comp_forward(m, stx_tokens(x, ids, 2, 4), NULL, NULL, s);
    CHECK(stx_comp_state_get(s, 0, rows, NULL), "%s", stx_error(x));

    stx_comp_state_reset_stream(s, 1);
    CHECK(!stx_comp_state_get(s, 0, rows, NULL), "a memory with missing rows was copied");
    CHECK(test_says(stx_error(x), "stx_comp_state_get: some streams lack rows"), "%s",
          stx_error(x));
    stx_clear_error(x);

    stx_comp_key(m, NULL, NULL, other, 0);
    CHECK(test_says(stx_error(x), "stx_comp_key: expected a memory of this model"), "%s",
          stx_error(x));
    stx_destroy(x);
}

static void opened(void) {
    int k;
    for (k = 0; k < VARIANTS; k++) {
        const char *name;
        stx_comp_desc d = variant(k, &name);
        stx_ctx *x = context(1, 7);
        stx_comp *m = stx_comp_create(x, &d);
        perturb(x, m->params);
        saved_and_opened(stx_comp_family(), m, name);
        stx_destroy(x);
    }
}

int main(void) {
    memory_errors();
    setvbuf(stdout, NULL, _IOLBF, 0);
    steps();
    causality();
    resets();
    resets_in_training();
    ages();
    ages_and_gradients();
    limit();
    frozen();
    bptt_again(STX_COMP_COMPRESS_CONV, NULL);
    bptt_again(STX_COMP_COMPRESS_DILATED, NULL);
    bptt_again(STX_COMP_COMPRESS_CUSTOM, &own_methods[0]);
    bptt_again(STX_COMP_COMPRESS_CUSTOM, &own_methods[2]);
    same_as_built_in();
    bad_methods();
    dropouts();
    states();
    detached();
    overfit();
    by_hand();
    bad_descs();
    counts_and_defaults();
    literal();
    padded_tokens();
    errors();
    bad_files();
    targets();
    padding();
    reset_midway();
    usage();
    pick();
#ifndef SEQTX_DOUBLE
    precisions();
#endif
    no_memory();
    opened();
    return test_end();
}
