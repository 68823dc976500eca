/* test_sru.c - behaviour of seqtx_sru.h beyond the golden vectors: segments and
   generation compared with one forward pass; two directions compared with two runs;
   recomputation; padding; kernels compared with their definition; initial values;
   custom transforms; states in files; errors; failing allocations. */
#include <stdint.h>
#include "../../seqtx_sru.h"
#include "family.h"
#include <unistd.h>

#ifdef SEQTX_DOUBLE
static const double TOL = 1e-11;
#else
static const double TOL = 2e-5;
#endif
enum { V = 29 };

/* Returns n random values that depend only on the seed. The caller frees them. */
static stx_real *random_of(size_t n, uint64_t seed) {
    test_state = 88172645463325252u + seed;
    return random_values(n);
}

/* Returns a copy of time steps [t0, t0 + t) of v (B,n,C). The caller frees it. */
static stx_real *columns(const stx_real *v, size_t B, size_t n, size_t t0, size_t t, size_t C) {
    stx_real *r = (stx_real *)malloc((B * t * C + 1) * sizeof *r);
    size_t b;
    for (b = 0; b < B; b++) memcpy(r + b * t * C, v + (b * n + t0) * C, t * C * sizeof *r);
    return r;
}

/* Copies n elements to `to` and returns the position after them. */
static stx_real *append(stx_real *to, const stx_real *from, size_t n) {
    memcpy(to, from, n * sizeof *to);
    return to + n;
}

static stx_real *append_grads(stx_real *to, const stx_params *p) {
    size_t i;
    for (i = 0; i < p->count; i++) to = append(to, p->tensor[i]->grad, p->tensor[i]->size);
    return to;
}

/* Stacks for which segments and generation are tested. */
enum { STACKS = 12 };

static stx_sru_desc stack(int k, const char **name) {
    static const char *const names[] = {"plain",           "k 4",           "before",
                                        "after",           "projected",     "v1",
                                        "SRU++",           "SRU++ every 2", "SRU++ norm first",
                                        "SRU++ cell norm", "SRU++ heads",   "SRU++ last"};
    stx_sru_desc d;
    memset(&d, 0, sizeof d);
    *name = names[k];
    d.input = d.hidden = 12;
    d.layers = 3;
    switch (k) {
    case 1:
        d.input = 7;
        d.tanh = 1;
        break;
    case 2:
        d.norm = STX_SRU_NORM_BEFORE;
        d.rescale = 1;
        d.highway_bias = -1;
        break;
    case 3:
        d.norm = STX_SRU_NORM_AFTER;
        d.no_skip = 1;
        break;
    case 4: d.proj = 5; break;
    case 5: d.v1 = 1; break;
    case 6:
    case 7:
    case 8:
    case 9:
    case 10:
    case 11:
        d.transform = STX_SRU_ATTENTION;
        d.proj = 6;
        d.alpha_init = 0.7;
        if (k == 7) d.attention_every = 2;
        if (k == 8) d.attn_norm_first = 1;
        if (k == 9) d.norm = STX_SRU_NORM_BEFORE;
        if (k == 10) d.heads = 3;
        if (k == 11) {
            d.attention_last = 1;
            d.norm = STX_SRU_NORM_AFTER;
            d.input = 5;
            d.input_first = 1;
        }
        break;
    default: break;
    }
    return d;
}

/* Computes h (B,n,O) for the input v (B,n,input) in segments of the lengths `len`.
   keep, window: see stx_sru_state. */
static stx_real *by_segments(stx_sru *m, const stx_real *v, size_t B, size_t n, const size_t *len,
                             size_t keep, size_t window, stx_real *states) {
    stx_ctx *x = m->ctx;
    stx_sru_state *s = stx_sru_state_create(m, B);
    stx_real *all = (stx_real *)malloc((B * n * m->O + 1) * sizeof *all);
    size_t at, b;
    s->keep = keep;
    s->window = window;
    for (at = 0; at < n; at += *len++) {
        stx_real *piece = columns(v, B, n, at, *len, m->desc.input);
        stx_tensor *h;
        stx_begin(x, STX_EVAL);
        h = stx_sru_segment(m, stx_input(x, piece, B, *len, m->desc.input, 0), NULL, s, s);
        CHECK(h != NULL, "segment: %s", stx_error(x));
        for (b = 0; h && b < B; b++)
            memcpy(all + (b * n + at) * m->O, h->data + b * *len * m->O, *len * m->O * sizeof *all);
        free(piece);
        if (!h) break;
    }
    if (states) stx_download(x, states, s->c, m->desc.layers * B * m->O);
    stx_sru_state_free(s);
    return all;
}

/* Segments of any length must give the same results as one forward pass over the whole
   sequence. */
static void segments(void) {
    static const size_t whole[] = {60}, parts[] = {7, 1, 20, 13, 19};
    const size_t B = 3, n = 60;
    size_t ones[60], i;
    int k;
    for (i = 0; i < 60; i++) ones[i] = 1;
    for (k = 0; k < STACKS; k++) {
        const char *name;
        stx_sru_desc d = stack(k, &name);
        stx_ctx *x = context(2, 5);
        stx_params *p = stx_params_create(x);
        stx_sru *m = stx_sru_create(p, "deep.", &d);
        stx_real *v = random_of(B * n * d.input, 3), *a, *b, *sa = random_of(3 * B * 12, 1),
                 *sb = random_of(3 * B * 12, 2);
        size_t w;
        CHECK(m && !strncmp(p->name[0], "deep.", 5), "%s: %s", name, stx_error(x));
        /* windows: over all earlier tokens, shorter than a segment, and over several
           segments */
        for (w = 0; w < 3; w++) {
            static const size_t window[] = {0, 5, 33};
            a = by_segments(m, v, B, n, whole, 0, window[w], sa);
            b = by_segments(m, v, B, n, parts, 60, window[w], sb);
            CHECK(max_difference(a, b, B * n * m->O) <= TOL,
                  "%s, window %zu: segments differ by %g", name, window[w],
                  max_difference(a, b, B * n * m->O));
            CHECK(max_difference(sa, sb, 3 * B * m->O) <= TOL, "%s: states", name);
            free(b);
            b = by_segments(m, v, B, n, ones, 60, window[w], sb);
            CHECK(max_difference(a, b, B * n * m->O) <= TOL,
                  "%s, window %zu: single tokens differ by %g", name, window[w],
                  max_difference(a, b, B * n * m->O));
            free(b);
            if (window[w]) { /* a memory that is as long as the window is sufficient */
                b = by_segments(m, v, B, n, parts, window[w], window[w], sb);
                CHECK(max_difference(a, b, B * n * m->O) <= TOL,
                      "%s, a memory of the window, %zu rows: differs by %g", name, window[w],
                      max_difference(a, b, B * n * m->O));
                free(b);
            }
            free(a);
        }
        if (d.transform == STX_SRU_ATTENTION) {
            a = by_segments(m, v, B, n, whole, 0, 0, NULL);
            b = by_segments(m, v, B, n, parts, 0, 0, NULL);
            CHECK(max_difference(a, b, B * n * m->O) > 1e-3, "%s: the memory has no effect", name);
            free(a);
            free(b);
        }
        CHECK(stx_ok(x), "%s: %s", name, stx_error(x));
        free(v);
        free(sa);
        free(sb);
        stx_destroy(x);
    }
}

enum { RECOMPUTED_B = 3, RECOMPUTED_T = 20 };

/* Returns the desc of case k of recomputed(): a stack; if k >= STACKS, with padding; if
   k > STACKS, with two directions. */
static stx_sru_desc recomputed_desc(int k, int drop, const char **name) {
    stx_sru_desc d = stack(k % STACKS, name);
    if (k >= STACKS) d.tanh = 1;
    if (k > STACKS) {
        d.bidirectional = 1;
        d.hidden = 6;
    }
    if (drop) {
        d.dropout = 0.3;
        d.rnn_dropout = 0.2;
        d.attn_dropout = d.transform == STX_SRU_ATTENTION ? 0.2 : 0;
    }
    return d;
}

/* Returns the outputs, gradients and states of two training steps of a case. v: the
   input of both steps. *n receives the number of elements, *peak the peak memory in
   bytes. Returns NULL on failure; the caller frees the result. */
static stx_real *two_segments(int k, const stx_sru_desc *d, const char *name, const stx_real *v,
                              size_t *n, size_t *peak) {
    static const size_t length[3] = {20, 13, 1};
    const size_t B = RECOMPUTED_B, T = RECOMPUTED_T;
    stx_ctx *x = context(2, 5);
    stx_params *p = stx_params_create(x);
    stx_sru *m = stx_sru_create(p, "", d);
    stx_sru_state *s = stx_sru_state_create(m, B);
    stx_real *all;
    size_t seg;

    CHECK(m && s, "%s: %s", name, stx_error(x));
    if (!m || !s) {
        stx_destroy(x);
        return NULL;
    }
    *n = 2 * (B * T * m->O + stx_params_size(p) + d->layers * B * m->O);
    all = (stx_real *)malloc(*n * sizeof *all);
    /* The second segment uses the memory and states of the first. Gradients are
       accumulated. */
    for (seg = 0; seg < 2; seg++) {
        stx_real *piece = columns(v, B, 2 * T, seg * T, T, d->input), *to = all + seg * *n / 2;
        stx_ids *pad;
        stx_tensor *h;
        stx_begin(x, STX_TRAIN);
        pad = k >= STACKS ? stx_sru_lengths(x, length, B, T) : NULL;
        h = stx_sru_segment(m, stx_input(x, piece, B, T, d->input, 0), pad, s,
                            k > STACKS ? NULL : s);
        stx_backward(x, stx_mean(x, stx_mul(x, h, stx_add(x, h, h))));
        CHECK(stx_ok(x) && h, "%s: %s", name, stx_error(x));
        if (h) append(to, h->data, h->size);
        to = append_grads(to + B * T * m->O, p);
        stx_download(x, to, s->c, d->layers * B * m->O);
        free(piece);
    }
    *peak = stx_peak_bytes(x);
    stx_sru_state_free(s);
    stx_destroy(x);
    return all;
}

/* Recomputation of activations must give the same outputs, states and gradients with
   less memory. Every dropout mask must be drawn once. */
static void recomputed(void) {
    int k, drop;
    for (k = 0; k < STACKS + 2; k++)
        for (drop = 0; drop < 2; drop++) {
            const char *name;
            stx_sru_desc d = recomputed_desc(k, drop, &name);
            stx_real *v = random_of(RECOMPUTED_B * 2 * RECOMPUTED_T * 12, 3), *kept, *again;
            size_t n = 0, peak[2] = {0, 0};
            kept = two_segments(k, &d, name, v, &n, &peak[0]);
            d.recompute_layers = SIZE_MAX;
            again = two_segments(k, &d, name, v, &n, &peak[1]);
            CHECK(kept && again && max_difference(kept, again, n) == 0,
                  "%s, dropout %d: recomputed values differ by %g", name, drop,
                  kept && again ? max_difference(kept, again, n) : NAN);
            CHECK(peak[1] < peak[0], "%s: %zu bytes recomputed, %zu kept", name, peak[1], peak[0]);
            free(kept);
            free(again);
            free(v);
        }
}

/* A custom transform, with weights for three layers. */
typedef struct own_products {
    stx_tensor *w[3], *g[3];
    int calls;
} own_products;

static int own_planes(stx_ctx *x, void *user, size_t l, stx_tensor *in, stx_tensor **U,
                      stx_tensor **V_) {
    own_products *o = (own_products *)user;
    stx_tensor *gates = stx_linear(x, in, o->g[l], NULL, STX_ACT_NONE);
    o->calls++;
    *U = stx_linear(x, in, o->w[l], NULL, STX_ACT_NONE);
    *V_ = stx_reshape(x, gates, in->dim[0], in->dim[1], 2, 12);
    return 1;
}

static void own_parameters(own_products *o, stx_params *p) {
    size_t l;
    for (l = 0; l < 3; l++) {
        char key[16];
        snprintf(key, sizeof key, "own%zu", l);
        o->w[l] = stx_param(p, STX_NORMAL, 0.3, key, 36, 12, 0, 0);
        snprintf(key, sizeof key, "gate%zu", l);
        o->g[l] = stx_param(p, STX_NORMAL, 0.3, key, 24, 12, 0, 0);
    }
}

/* Sets the shifts of all norms to nonzero values, so that vectors at padding also
   become nonzero. */
static void shift_norms(stx_params *p) {
    size_t i, j;
    for (i = 0; i < p->count; i++)
        if (strstr(p->name[i], "norm") && strstr(p->name[i], "bias"))
            for (j = 0; j < p->tensor[i]->size; j++)
                p->tensor[i]->data[j] = (stx_real)(0.1 * (double)(j % 5) - 0.3);
}

enum { FORWARD_B = 3, FORWARD_T = 20, FORWARD_M = 9, FORWARD_N = 3 };

/* The variables for a call to stx_sru_forward: x, and the state and memory of each
   layer. */
typedef struct forward_call {
    stx_sru_io io;
    stx_tensor *in, *c0[FORWARD_N], *mem[FORWARD_N], *last[FORWARD_N], *inputs[FORWARD_N];
} forward_call;

static void forward_inputs(forward_call *f, stx_sru *m, const stx_real *v, int pads) {
    enum { B = FORWARD_B, T = FORWARD_T, M = FORWARD_M, N = FORWARD_N };

    static const size_t length[B] = {20, 13, 1};
    stx_ctx *x = m->ctx;
    int32_t hidden[B * M];
    size_t i, l;
    memset(f, 0, sizeof *f);
    f->in = stx_variable(x, v, B, T, m->desc.input, 0);
    for (l = 0; l < N; l++) {
        const stx_real *mem = v + B * T * 12 - l;
        f->c0[l] = stx_variable(x, v + B * (T + M) * 12 + l * B * 12, B, m->O, 0, 0);
        if (m->layer[l].attends) f->mem[l] = stx_variable(x, mem, B, M, m->layer[l].Ci, 0);
    }
    f->io.c0 = f->c0;
    f->io.memory = f->mem;
    f->io.last = f->last;
    f->io.inputs = f->inputs;
    if (!pads) return;
    for (i = 0; i < B * M; i++) hidden[i] = i % M >= M - i / M;
    f->io.pad = stx_sru_lengths(x, length, B, T);
    for (l = 0; l < N; l++)
        if (f->mem[l]) f->io.memory_pad = stx_tokens(x, hidden, B, M);
    f->io.window = 7;
}

/* Returns a loss that depends on all results: h, the inputs of the last layer, and the
   states. */
static stx_tensor *forward_loss(stx_ctx *x, const forward_call *f, stx_tensor *h) {
    stx_tensor *loss = stx_mean(x, stx_mul(x, h, stx_add(x, h, stx_sigmoid(x, h))));
    size_t l;
    loss = stx_add(x, loss, stx_mean(x, stx_mul(x, f->inputs[2], f->inputs[2])));
    for (l = 0; l < FORWARD_N; l++)
        loss = stx_add(x, loss, stx_mean(x, stx_mul(x, f->last[l], f->last[l])));
    return loss;
}

/* Returns the outputs, the states and all gradients of a stack. k == STACKS: with a
   custom transform. *n receives the number of elements, *peak the peak memory in bytes.
   The caller frees the result. */
static stx_real *forward_once(int k, const stx_sru_desc *desc, const char *name, const stx_real *v,
                              int pads, size_t *n, size_t *peak) {
    enum { B = FORWARD_B, N = FORWARD_N };

    stx_sru_desc d = *desc;
    stx_ctx *x = context(2, 5);
    stx_params *p = stx_params_create(x);
    own_products own;
    forward_call f;
    stx_sru *m;
    stx_tensor *h, *loss;
    stx_real *all, *at;
    size_t l;

    memset(&own, 0, sizeof own);
    if (k == STACKS) {
        d.custom = own_planes;
        d.user = &own;
    }
    m = stx_sru_create(p, "", &d);
    CHECK(m != NULL, "%s: %s", name, stx_error(x));
    if (k == STACKS) own_parameters(&own, p);
    shift_norms(p);
    stx_begin(x, STX_TRAIN);
    forward_inputs(&f, m, v, pads);
    h = stx_sru_forward(m, f.in, &f.io);
    CHECK(h && stx_ok(x), "%s: %s", name, stx_error(x));
    loss = forward_loss(x, &f, h);
    *n = h->size + f.in->size + stx_params_size(p) + N * 2 * B * m->O + N * B * FORWARD_M * 12;
    all = (stx_real *)calloc(*n, sizeof *all);
    at = append(all, h->data, h->size);
    for (l = 0; l < N; l++) at = append(at, f.last[l]->data, f.last[l]->size);
    stx_backward(x, loss);
    CHECK(stx_ok(x), "%s: %s", name, stx_error(x));
    for (l = 0; l < N; l++)
        CHECK(!memcmp(at - (N - l) * B * m->O, f.last[l]->data, f.last[l]->size * sizeof *at),
              "%s: backward changes the states", name);
    at = append(at, f.in->grad, f.in->size);
    for (l = 0; l < N; l++) {
        CHECK(f.c0[l]->grad && (!f.mem[l] || f.mem[l]->grad),
              "%s: no gradient of the state or memory of layer %zu", name, l);
        if (f.c0[l]->grad) append(at, f.c0[l]->grad, f.c0[l]->size);
        at += f.c0[l]->size;
        if (f.mem[l] && f.mem[l]->grad) at = append(at, f.mem[l]->grad, f.mem[l]->size);
    }
    append_grads(at, p);
    if (k == STACKS)
        CHECK(own.calls == N * (d.recompute_layers ? 2 : 1),
              "the transform was called %d times", own.calls);
    *peak = stx_peak_bytes(x);
    stx_destroy(x);
    return all;
}

/* Tests recomputation in stx_sru_forward: gradients of x, states and memories, with
   padding of x and of the memories, with a window, and with a custom transform. */
static void recomputed_forward(void) {
    enum { B = FORWARD_B, T = FORWARD_T, M = FORWARD_M, N = FORWARD_N };

    int k, pads;
    for (k = 0; k <= STACKS; k++)
        for (pads = 0; pads < 2; pads++) {
            const char *name;
            stx_sru_desc d = stack(k % STACKS, &name);
            stx_real *v = random_of(B * (T + M) * 12 + N * B * 12, 3), *kept, *again;
            size_t n, peak[2];
            if (k == STACKS) name = "custom";
            if (pads && d.norm == STX_SRU_NORM_AFTER) d.zero_pads = 1;
            kept = forward_once(k, &d, name, v, pads, &n, &peak[0]);
            d.recompute_layers = SIZE_MAX;
            again = forward_once(k, &d, name, v, pads, &n, &peak[1]);
            CHECK(max_difference(kept, again, n) == 0,
                  "%s, padding %d: recomputed values differ by %g", name, pads,
                  max_difference(kept, again, n));
            CHECK(peak[1] < peak[0], "%s: %zu bytes recomputed, %zu kept", name, peak[1], peak[0]);
            free(kept);
            free(again);
            free(v);
        }
}

/* STX_SRU_LITERAL must select only the literal forms that apply to the model: here none
   or one. */
static void literal_none(void) {
    stx_ctx *x = context(1, 5);
    stx_sru_desc d;
    stx_sru *m;
    int k;

    memset(&d, 0, sizeof d);
    d.input = 8;
    d.literal = STX_SRU_LITERAL;
    for (k = 0; k < 4; k++) {
        d.transform = k > 0 ? STX_SRU_ATTENTION : STX_SRU_LINEAR;
        d.norm = k < 3 ? STX_SRU_NORM_AFTER : STX_SRU_NORM_BEFORE;
        d.no_attention = k == 2;
        m = stx_sru_create(stx_params_create(x), "", &d);
        CHECK(m && m->desc.literal == (k == 3 ? STX_SRU_LITERAL_NORM : 0), "model %d: %u %s", k,
              m ? m->desc.literal : 99, stx_error(x));
    }
    stx_destroy(x);
}

/* With STX_SRU_LITERAL_NORM and a cell norm, the memory is not normalised, so the
   results of segments must differ from those of the whole sequence. */
static void literal_norm(void) {
    static const size_t whole[] = {24}, parts[] = {10, 14};
    static const unsigned flags[3] = {0, STX_SRU_LITERAL_NORM, STX_SRU_LITERAL};
    int k;
    for (k = 0; k < 3; k++) {
        const char *name;
        stx_sru_desc d = stack(9, &name);
        stx_ctx *x = context(1, 5);
        stx_params *p = stx_params_create(x);
        stx_real *v = random_of(2 * 24 * 12, 3), *a, *b;
        double e;
        stx_sru *m;
        d.literal = flags[k];
        m = stx_sru_create(p, "", &d);
        a = by_segments(m, v, 2, 24, whole, 0, 0, NULL);
        b = by_segments(m, v, 2, 24, parts, 0, 0, NULL);
        e = max_difference(a, b, 2 * 24 * 12);
        CHECK(k ? e > 1e-3 : e <= TOL, "literal %d: segments and the whole differ by %g", k, e);
        free(a);
        free(b);
        free(v);
        stx_destroy(x);
    }
}

/* Runs direction s of a layer with O = 2 H columns alone, with the rows of the weights
   that belong to its H columns. v: (B,T,I), reversed in time if s = 1. skip: the layer
   has no projection of x for the highway connection. */
static const stx_real *one_direction(stx_sru *m, size_t s, const stx_real *v, size_t B, size_t T,
                                     int skip) {
    const stx_sru_layer *p = &m->layer[0];
    const size_t I = m->desc.input, H = m->desc.hidden, O = 2 * H, k = p->k;
    stx_ctx *x = m->ctx;
    stx_sru_recurrence_in c;
    stx_tensor *w = stx_new(x, k * H, I, 0, 0), *xr = stx_new(x, B, T, H, 0),
               *gv = stx_new(x, 2, H, 0, 0), *gb = stx_new(x, 2, H, 0, 0), *u;
    size_t i;
    for (i = 0; i < k; i++) append(w->data + i * H * I, p->w3->data + (i * O + s * H) * I, H * I);
    for (i = 0; i < 2; i++) {
        append(gv->data + i * H, p->v->data + i * O + s * H, H);
        append(gb->data + i * H, p->bias->data + i * O + s * H, H);
    }
    for (i = 0; skip && i < B * T; i++) append(xr->data + i * H, v + i * I + s * H, H);
    memset(&c, 0, sizeof c);
    u = stx_linear(x, stx_input(x, v, B, T, I, 0), w, NULL, STX_ACT_NONE);
    c.u = stx_reshape(x, u, B, T, k, H);
    c.xr = skip ? xr : NULL;
    c.v = gv;
    c.bias = gb;
    return stx_sru_recurrence(x, &c, NULL)->data;
}

/* A layer with two directions must give the same results as two runs, each with half of
   the weights, the second on the reversed sequence. */
static void directions(void) {
    int skip;
    for (skip = 0; skip < 2; skip++) {
        stx_ctx *x = context(2, 9);
        stx_sru_desc d;
        stx_sru *m;
        const size_t B = 2, T = 37, H = 5, O = 10, I = skip ? 10 : 7;
        size_t s, b, t;
        stx_real *v = random_of(B * T * I, 4), *all, *back = random_of(B * T * I, 4);
        stx_tensor *h;
        memset(&d, 0, sizeof d);
        d.input = I;
        d.hidden = H;
        d.layers = 1;
        d.bidirectional = 1;
        d.highway_bias = 0.3;
        m = stx_sru_create(stx_params_create(x), "", &d);
        CHECK(m && m->layer[0].k == (skip ? 3u : 4u), "directions: %s", stx_error(x));
        if (!m) return;
        stx_begin(x, STX_EVAL);
        h = stx_sru_forward(m, stx_input(x, v, B, T, I, 0), NULL);
        CHECK(h != NULL, "directions: %s", stx_error(x));
        all = (stx_real *)malloc(h->size * sizeof *all);
        stx_get(x, h, all);
        for (b = 0; b < B; b++)
            for (t = 0; t < T; t++)
                memcpy(back + (b * T + t) * I, v + (b * T + T - 1 - t) * I, I * sizeof *v);
        for (s = 0; s < 2; s++) {
            const stx_real *half = one_direction(m, s, s ? back : v, B, T, skip);
            double e = 0;
            for (b = 0; b < B; b++)
                for (t = 0; t < T; t++)
                    raise_worst(&e, max_difference(half + (b * T + (s ? T - 1 - t : t)) * H,
                                                   all + (b * T + t) * O + s * H, H));
            CHECK(e <= TOL, "direction %zu, skip %d: the error is %g", s, skip, e);
        }
        free(v);
        free(all);
        free(back);
        stx_destroy(x);
    }
}

/* A case of any_threads(): the sizes of a recurrence with k = 3, and its inputs. */
typedef struct thread_case {
    size_t B, T, H, D;
    stx_real *u, *xr, *v, *bias, *dy;
    int32_t *pad;
} thread_case;

/* Runs the recurrence. `result` receives copies of h, du, dbias and the last state, of
   n[0] to n[3] elements. The caller frees them. */
static void thread_run(const thread_case *k, int threads, const size_t n[4], stx_real *result[4]) {
    const size_t B = k->B, T = k->T, O = k->H * k->D;
    stx_ctx *x = context(threads, 1);
    stx_sru_recurrence_in c;
    stx_tensor *h, *last;
    const stx_real *from[4];
    size_t j;
    stx_begin(x, STX_TRAIN);
    memset(&c, 0, sizeof c);
    c.u = stx_variable(x, k->u, B, T, 3, O);
    c.xr = stx_variable(x, k->xr, B, T, O, 0);
    c.v = k->v ? stx_variable(x, k->v, 2, O, 0, 0) : NULL;
    c.bias = stx_variable(x, k->bias, 2, O, 0, 0);
    c.directions = k->D;
    c.pad = stx_tokens(x, k->pad, B, T);
    h = stx_sru_recurrence(x, &c, &last);
    CHECK(h && last, "threads: %s", stx_error(x));
    stx_backward_from(x, stx_add(x, h, stx_scale(x, h, 0.5)), k->dy);
    from[0] = h->data;
    from[1] = c.u->grad;
    from[2] = c.bias->grad;
    from[3] = last->data;
    for (j = 0; j < 4; j++) {
        result[j] = (stx_real *)malloc(n[j] * sizeof(stx_real));
        append(result[j], from[j], n[j]);
    }
    stx_destroy(x);
}

/* Runs with 1, 7 and 64 threads, which must give the same bits. with_v: the cell has v.
   slow: forget gates are near 1, so that states affect much later times. */
static void threads_case(int i, thread_case k, int with_v, int slow) {
    static const int threads[3] = {1, 7, 64};
    const size_t B = k.B, T = k.T, O = k.H * k.D;
    const size_t n[4] = {B * T * O, B * T * 3 * O, 2 * O, B * O};
    stx_real *v = random_of(2 * O, 3), *result[3][4];
    size_t j;
    int r;

    k.u = random_of(B * T * 3 * O, 1);
    k.xr = random_of(B * T * O, 2);
    k.v = with_v ? v : NULL;
    k.dy = random_of(B * T * O, 4);
    k.bias = random_of(2 * O, 5);
    for (j = 0; j < O && slow; j++) k.bias[j] += 7;
    k.pad = (int32_t *)calloc(B * T, sizeof *k.pad);
    for (j = 0; j < B * T; j++) k.pad[j] = i == 2 && (j % 11 == 3 || (j > 64 && j < 100));
    for (r = 0; r < 3; r++) thread_run(&k, threads[r], n, result[r]);
    for (r = 1; r < 3; r++)
        for (j = 0; j < 4; j++)
            CHECK(!memcmp(result[0][j], result[r][j], n[j] * sizeof(stx_real)),
                  "%d threads differ from 1: shape %d, v %d, slow %d, array %zu", threads[r], i,
                  with_v, slow, j);
    for (r = 0; r < 3; r++)
        for (j = 0; j < 4; j++) free(result[r][j]);
    free(k.u);
    free(k.xr);
    free(v);
    free(k.bias);
    free(k.dy);
    free(k.pad);
}

/* The recurrence gives the same bits for any number of threads, also if there are more
   threads than blocks of columns. */
static void any_threads(void) {
    static const size_t size[][4] = {
        /* B, T, H, D */
        {1, 999, 3, 1}, {1, 400, 16, 2}, {2, 257, 5, 1}, {1, 70, 600, 1}, {3, 33, 40, 2}};
    int i, option;
    for (i = 0; i < 5; i++)
        for (option = 0; option < 4; option++) {
            thread_case k;
            memset(&k, 0, sizeof k);
            k.B = size[i][0];
            k.T = size[i][1];
            k.H = size[i][2];
            k.D = size[i][3];
            threads_case(i, k, !(option & 1), option >> 1);
        }
}

/* Compares a kernel's result with the result of the plain definition. */
static void as_plain(const char *what, const stx_real *kernel, const stx_real *plain, size_t n) {
    double top, e;
    if (!kernel) return;
    top = largest(plain, n);
    e = max_difference(kernel, plain, n);
    CHECK(e <= TOL * top, "kernels: %s: error %g of %g against the plain definition", what, e, top);
}

/* Allocates the outputs and gradients of a cell. Gradients to which the kernel adds
   have random initial values. */
static void cell_outputs(stx_sru_args *a) {
    const size_t B = a->B, T = a->T, O = a->H * a->D;
    a->h = random_of(B * T * O, 5);
    a->last = random_of(B * O, 6);
    a->c = random_of(B * stx_sru_tiles(a) * O, 7);
    a->du = random_of(B * T * a->k * O, 1);
    a->dV = a->V ? random_of(B * T * 2 * O, 1) : NULL;
    a->dxr = a->xr ? random_of(B * T * O, 2) : NULL;
    a->dv = a->v ? random_of(2 * O, 1) : NULL;
    a->dbias = random_of(2 * O, 1);
    a->dc0 = random_of(B * O, 1);
}

static void cell_free(stx_sru_args *a) {
    free(a->h);
    free(a->last);
    free(a->c);
    free(a->du);
    free(a->dV);
    free(a->dxr);
    free(a->dv);
    free(a->dbias);
    free(a->dc0);
}

static void cell_plain(stx_sru_args *a) {
    double *state = (double *)malloc((a->T + 1) * sizeof *state);
    stx_sru_fwd_plain(a, state);
    stx_sru_bwd_plain(a, state);
    free(state);
}

/* If a kernel adds to the gradient of xr, the result must differ from an overwritten
   gradient by the previous value. */
static void cell_adds(stx_ctx *x, stx_sru_args a) {
    const size_t n = a.B * a.T * a.H * a.D;
    const stx_real *written = a.dxr;
    stx_real *added = random_of(n, 2), *before = random_of(n, 2);
    double e = 0;
    size_t j;
    a.dxr = written ? added : NULL;
    a.add_xr = 1;
    stx_sru_bwd(x, &a);
    for (j = 0; written && j < n; j++)
        raise_worst(&e, fabs((double)(added[j] - written[j]) - (double)before[j]));
    CHECK(e <= TOL, "kernels: dxr added and written differ by %g", e);
    free(added);
    free(before);
}

/* Compares the kernels with the plain definition. options: a bit mask: 1 tanh, 2 v, 4
   V. */
static void kernel_case(size_t B, size_t T, size_t H, size_t D, size_t k, int options) {
    const size_t O = H * D;
    stx_ctx *x = context(3, 1);
    stx_sru_args a, plain;
    stx_real *u = random_of(B * T * k * O, 1), *xr = random_of(B * T * O, 2),
             *v = random_of(2 * O, 3), *gv = random_of(B * T * 2 * O, 4);
    void *work_fwd, *work_bwd;
    double sum = 0;
    size_t j;

    memset(&a, 0, sizeof a);
    a.B = B;
    a.T = T;
    a.H = H;
    a.D = D;
    a.k = k;
    a.alpha = (stx_real)1.5;
    a.tanh = options & 1;
    a.u = u;
    a.xr = k == 3 ? xr : NULL;
    a.v = options & 2 ? v : NULL;
    a.bias = v;
    a.V = options & 4 ? gv : NULL;
    cell_outputs(&a);
    a.work = work_fwd = malloc(stx_sru_work(x, &a, 0) + 1);
    stx_sru_fwd(x, &a);
    a.work = work_bwd = malloc(stx_sru_work(x, &a, 1) + 1);
    a.dh = u;
    a.dlast = B > 2 ? a.last : v;
    stx_sru_bwd(x, &a);
    plain = a;
    cell_outputs(&plain);
    cell_plain(&plain);
    for (j = 0; j < B * T * O; j++) sum += fabs((double)a.h[j]);
    CHECK(sum > 0 && sum < 1e30, "kernels: h");
    as_plain("h", a.h, plain.h, B * T * O);
    as_plain("last", a.last, plain.last, B * O);
    as_plain("c", a.c, plain.c, B * stx_sru_tiles(&a) * O);
    as_plain("du", a.du, plain.du, B * T * k * O);
    as_plain("dbias", a.dbias, plain.dbias, 2 * O);
    as_plain("dc0", a.dc0, plain.dc0, B * O);
    as_plain("dV", a.dV, plain.dV, B * T * 2 * O);
    as_plain("dv", a.dv, plain.dv, 2 * O);
    as_plain("dxr", a.dxr, plain.dxr, B * T * O);
    cell_adds(x, a);
    cell_free(&a);
    cell_free(&plain);
    free(u);
    free(xr);
    free(v);
    free(gv);
    free(work_fwd);
    free(work_bwd);
    stx_destroy(x);
}

/* Calls the kernels directly and compares them with their plain definition. Every array
   is a separate allocation, so that sanitizers detect overruns. */
static void kernels_alone(void) {
    static const size_t size[][4] = {
        /* B, T, H, D */
        {1, 1, 1, 1}, {2, 33, 17, 1}, {1, 64, 1100, 1}, {2, 5, 515, 2}, {1, 300, 2, 2}};
    size_t i, k;
    int options;
    for (i = 0; i < 5; i++)
        for (k = 3; k < 5; k++)
            for (options = 0; options < 8; options++)
                kernel_case(size[i][0], size[i][1], size[i][2], size[i][3], k, options);
}

/* Returns the desc of language-model case k. */
static stx_sru_lm_desc model(int k, const char **name) {
    stx_sru_lm_desc d;
    memset(&d, 0, sizeof d);
    if (k < STACKS) {
        d.sru = stack(k, name);
        d.dim = 12;
        d.emb = d.sru.input;
    } else {
        static const char *const names[] = {"adaptive", "adaptive, separate", "tied"};
        *name = names[k - STACKS];
        d.dim = 12;
        d.sru.layers = 2;
        d.sru.transform = STX_SRU_ATTENTION;
        d.sru.proj = 4;
        d.sru.alpha_init = 0.5;
        if (k == STACKS + 2) {
            d.tied = 1;
            memset(&d.sru, 0, sizeof d.sru);
        } else {
            d.adapt_io = 1;
            d.cutoffs = 2;
            d.cutoff[0] = 9;
            d.cutoff[1] = 17;
            d.divval = 2;
            d.separate_projs = k == STACKS + 1;
        }
    }
    d.vocab = V;
    return d;
}

enum { MODELS = STACKS + 3 };

/* Returns log p or logits (B,n,V) of a text. */
static stx_real *logits(stx_sru_lm *m, const int32_t *t, size_t B, size_t n, size_t window) {
    stx_ctx *x = m->ctx;
    stx_sru_state *s = stx_sru_state_create(m->sru, B);
    stx_real *all = (stx_real *)calloc(B * n * V, sizeof *all);
    stx_tensor *y;
    s->window = window;
    stx_begin(x, STX_EVAL);
    y = stx_vocab_io_scores(m->vocab_io,
                            stx_sru_lm_forward(m, token_block(x, t, B, n, 0, n), s, NULL));
    CHECK(y && y->size == B * n * V, "logits: %s", stx_error(x));
    if (y) stx_get(x, y, all);
    stx_sru_state_free(s);
    return all;
}

enum { GEN_B = 2, GEN_N = 150, GEN_WINDOW = 9 };

/* Feeds tokens [at, at + T) of a text to a generator. Returns the largest difference
   between its scores and `all`, or infinity on failure. */
static double feed_error(stx_sru_gen *g, const int32_t *t, size_t at, size_t T,
                         const stx_real *all) {
    int32_t *piece = (int32_t *)malloc(GEN_B * T * sizeof *piece);
    const stx_real *y;
    double worst = 0;
    size_t b;
    for (b = 0; b < GEN_B; b++) memcpy(piece + b * T, t + b * GEN_N + at, T * sizeof *t);
    y = stx_sru_gen_feed(g, piece, T);
    for (b = 0; y && b < GEN_B; b++)
        raise_worst(&worst, max_difference(y + b * V, all + (b * GEN_N + at + T - 1) * V, V));
    free(piece);
    return y ? worst : HUGE_VAL;
}

/* A changed token at position 60 must change the scores at that position, but no
   earlier scores and no scores of the other stream. */
static void causality(const char *name, stx_sru_lm *m, int32_t *t, const stx_real *all) {
    stx_real *other;
    t[60] = (t[60] + 1) % V;
    other = logits(m, t, GEN_B, GEN_N, GEN_WINDOW);
    CHECK(max_difference(all, other, 60 * V) == 0, "%s: a token changes the scores before it",
          name);
    CHECK(max_difference(all + 60 * V, other + 60 * V, V) > 1e-6, "%s: a token has no effect",
          name);
    CHECK(max_difference(all + GEN_N * V, other + GEN_N * V, GEN_N * V) == 0,
          "%s: a token changes the other stream", name);
    free(other);
}

/* Generation, token by token and in parts longer than a time chunk, must give the same
   results as the forward pass. */
static void generation(void) {
    int k;
    for (k = 0; k < MODELS; k++) {
        const char *name;
        stx_sru_lm_desc d = model(k, &name);
        stx_ctx *x = context(2, 7);
        stx_sru_lm *m = stx_sru_lm_create(x, &d);
        int32_t *t = ordered_tokens(1, GEN_B * GEN_N, V, 5);
        stx_real *all;
        stx_sru_gen *g;
        size_t at, bytes = 0;
        double worst = 0, e;
        CHECK(m != NULL, "%s: %s", name, stx_error(x));
        if (!m) continue;
        all = logits(m, t, GEN_B, GEN_N, GEN_WINDOW);
        g = stx_sru_gen_create(m, GEN_B, GEN_WINDOW);
        CHECK(g != NULL, "%s: %s", name, stx_error(x));
        for (at = 0; g && at < GEN_N; at++) {
            e = feed_error(g, t, at, 1, all);
            CHECK(e < HUGE_VAL, "%s token %zu: %s", name, at, stx_error(x));
            if (!(e < HUGE_VAL)) break;
            raise_worst(&worst, e);
            if (at == 20) bytes = stx_bytes(x);
        }
        CHECK(worst <= TOL, "%s: single tokens: the error is %g", name, worst);
        CHECK(bytes == stx_bytes(x), "%s: generation keeps allocating", name);
        stx_sru_gen_reset(g);
        e = feed_error(g, t, 0, 131, all);
        CHECK(e <= TOL, "%s: 131 tokens: the error is %g", name, e);
        e = feed_error(g, t, 131, 19, all);
        CHECK(e <= TOL, "%s: 19 more: the error is %g", name, e);
        stx_sru_gen_free(g);
        causality(name, m, t, all);
        CHECK(stx_ok(x), "%s: %s", name, stx_error(x));
        free(all);
        free(t);
        stx_destroy(x);
    }
}

/* Runs one training step on tokens [at, at + T] of a text (B,n) and returns the loss. */
static double step(stx_sru_lm *m, stx_optim *o, stx_sru_state *s, const int32_t *t, size_t B,
                   size_t n, size_t at, size_t T, double lr) {
    stx_ctx *x = m->ctx;
    stx_tensor *loss;
    double v;
    stx_begin(x, STX_TRAIN);
    loss = stx_sru_lm_loss(m, token_block(x, t, B, n, at, T), token_block(x, t, B, n, at + 1, T), s,
                           s);
    v = stx_item(x, loss);
    stx_backward(x, loss);
    stx_optim_step(o, lr);
    return v;
}

enum { TRAIN_B = 2, TRAIN_T = 16, TRAIN_N = 33 };

/* A run that trains a model with RAdam on a text (TRAIN_B,TRAIN_N). */
typedef struct sru_run {
    stx_ctx *x;
    stx_sru_lm *m;
    stx_optim *o;
    stx_sru_state *s;
} sru_run;

static sru_run run_of(const stx_sru_lm_desc *d, double clip) {
    sru_run r;
    stx_optim_desc od;
    r.x = context(2, 3);
    r.m = stx_sru_lm_create(r.x, d);
    r.s = stx_sru_state_create(r.m->sru, TRAIN_B);
    memset(&od, 0, sizeof od);
    od.kind = STX_RADAM;
    od.clip = clip;
    r.o = stx_optim_create(r.m->params, &od);
    return r;
}

static double run_step(const sru_run *r, const int32_t *t, int i) {
    return step(r->m, r->o, r->s, t, TRAIN_B, TRAIN_N, (size_t)(i % 2) * TRAIN_T, TRAIN_T, 0.01);
}

/* Two runs must have bit-identical losses and parameters. */
static void repeated(const char *name, const stx_sru_lm_desc *d, const int32_t *t) {
    double loss[2][20];
    stx_real *first = NULL;
    int k, i;
    for (k = 0; k < 2; k++) {
        sru_run r = run_of(d, 1);
        const stx_tensor *p = r.m->params->tensor[0];
        for (i = 0; i < 20; i++) loss[k][i] = run_step(&r, t, i);
        if (!k) {
            first = (stx_real *)malloc(p->size * sizeof *first);
            stx_get(r.x, p, first);
        } else
            CHECK(!memcmp(first, p->data, p->size * sizeof *first)
                      && !memcmp(loss[0], loss[1], sizeof loss[0]),
                  "%s: two runs differ", name);
        CHECK(stx_ok(r.x), "%s: %s", name, stx_error(r.x));
        stx_destroy(r.x);
    }
    free(first);
}

/* A run that is saved after 7 steps and resumed from the file must have the same losses
   as an uninterrupted run. */
static void resumed(const char *name, const stx_sru_lm_desc *d, const int32_t *t) {
    double loss[20];
    char path[1024];
    sru_run r;
    stx_writer *w;
    stx_file *f;
    int i;

    test_path(path, sizeof path, "test_sru");
    r = run_of(d, 0);
    for (i = 0; i < 20; i++) loss[i] = run_step(&r, t, i);
    stx_destroy(r.x);

    r = run_of(d, 0);
    for (i = 0; i < 7; i++) {
        double v = run_step(&r, t, i);
        CHECK(loss[i] == v, "%s: step %d: loss %.9g, repeated %.9g", name, i, loss[i], v);
    }
    w = stx_writer_create(r.x);
    CHECK(stx_params_save(w, r.m->params, "") && stx_optim_save(w, r.o)
              && stx_sru_state_save(w, r.s, "state.") && stx_writer_finish(w, path),
          "%s: %s", name, stx_error(r.x));
    stx_destroy(r.x);

    r = run_of(d, 0);
    f = stx_file_open(r.x, path);
    CHECK(f && stx_params_load(r.m->params, f, "") && stx_optim_load(r.o, f)
              && stx_sru_state_load(r.s, f, "state."),
          "%s: %s", name, stx_error(r.x));
    stx_file_close(f);
    stx_set_step_index(r.x, 7);
    for (i = 7; i < 20; i++) {
        double v = run_step(&r, t, i);
        CHECK(loss[i] == v, "%s: step %d: loss %.9g, resumed %.9g", name, i, loss[i], v);
    }
    stx_destroy(r.x);
    remove(path);
}

/* A model must be able to memorise one batch. Evaluation must not change the training
   states. */
static void fits(const char *name, stx_sru_lm_desc d, const int32_t *t) {
    const size_t B = TRAIN_B, T = TRAIN_T, n = TRAIN_N;
    stx_ctx *x = context(2, 3);
    stx_sru_lm *m;
    stx_optim *o;
    stx_sru_state *s, *e;
    stx_real *before, *after;
    double first = 0, last = 0;
    size_t size;
    int i;

    d.dropout = d.emb_dropout = d.sru.attn_dropout = 0;
    m = stx_sru_lm_create(x, &d);
    s = stx_sru_state_create(m->sru, B);
    e = stx_sru_state_create(m->sru, B);
    o = stx_optim_create(m->params, NULL);
    for (i = 0; i < 400; i++) {
        stx_sru_state_reset(s);
        last = step(m, o, s, t, B, n, 0, T, 0.01);
        if (!i) first = last;
    }
    CHECK(first > 2.5 && last < 0.1 * first, "%s: loss from %g to %g", name, first, last);

    size = m->sru->desc.layers * B * m->sru->O;
    before = random_of(size, 1);
    after = random_of(size, 1);
    stx_download(x, before, s->c, size);
    stx_begin(x, STX_EVAL);
    CHECK(stx_sru_lm_loss(m, token_block(x, t, B, n, 0, T), token_block(x, t, B, n, 1, T), e, e)
              != NULL,
          "%s", stx_error(x));
    stx_begin(x, STX_EVAL);
    CHECK(stx_sru_lm_loss(m, token_block(x, t, B, n, 0, T), token_block(x, t, B, n, 1, T), s, NULL)
              != NULL,
          "%s", stx_error(x));
    stx_download(x, after, s->c, size);
    CHECK(!memcmp(before, after, size * sizeof *before),
          "%s: evaluation writes the states of training", name);
    free(before);
    free(after);
    stx_destroy(x);
}

static void training(void) {
    static const int models[3] = {7, 4, STACKS}; /* SRU++, a model with projections, an
                                                    adaptive model */
    int k;
    for (k = 0; k < 3; k++) {
        const char *name;
        stx_sru_lm_desc d = model(models[k], &name);
        int32_t *t = ordered_tokens(1, TRAIN_B * TRAIN_N, V, 5);
        d.sru.layers = 2;
        d.dropout = k == 0 ? 0.1 : 0;
        d.emb_dropout = k == 2 ? 0.1 : 0;
        d.sru.attn_dropout = k == 0 ? 0.1 : 0;
        repeated(name, &d, t);
        resumed(name, &d, t);
        fits(name, d, t);
        free(t);
    }
}

/* Checks which dropouts have an effect: in a model with one plain layer, only the
   embedding and output dropouts. */
static void dropouts(void) {
    static const double set[5][3] = {
        /* dropout, io_dropout, whether there is an effect with one layer */
        {0.3, -1, 0}, {0.3, 0, 1}, {0, 0.5, 1}, {0, 0, 0}, {0.5, 0.2, 1}};
    int i, k;
    for (k = 0; k < 2; k++)
        for (i = 0; i < 5; i++) {
            const int effect = set[i][2] > 0 || (k && set[i][0] > 0);
            stx_sru_lm_desc d;
            stx_ctx *x = context(1, 3);
            stx_sru_lm *m;
            int32_t t[12] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12};
            stx_real one[12 * 16] = {0};
            stx_tensor *h;
            memset(&d, 0, sizeof d);
            d.vocab = V;
            d.dim = 16;
            d.dropout = set[i][0];
            d.io_dropout = set[i][1];
            d.sru.layers = k ? 2 : 1;
            m = stx_sru_lm_create(x, &d);
            stx_begin(x, STX_EVAL);
            h = stx_sru_lm_forward(m, stx_tokens(x, t, 1, 12), NULL, NULL);
            stx_get(x, h, one);
            stx_begin(x, STX_TRAIN);
            h = stx_sru_lm_forward(m, stx_tokens(x, t, 1, 12), NULL, NULL);
            CHECK(h && (max_difference(one, h->data, h->size) > 0) == effect,
                  "dropout %g, io_dropout %g, %d layers: %s", set[i][0], set[i][1], k + 1,
                  stx_error(x));
            stx_destroy(x);
        }
}

/* Computes the attention of an SRU++ layer with single ops and with the layer's
   dropouts. y: the layer's input (2,12,8). */
static stx_tensor *attention_by_hand(stx_ctx *x, const stx_sru_layer *p, stx_tensor *y,
                                     stx_tensor *memory) {
    stx_attention_in a;
    stx_attention_desc d;
    stx_tensor *z, *rows;
    memset(&a, 0, sizeof a);
    memset(&d, 0, sizeof d);
    z = stx_linear(x, y, p->w1, NULL, STX_ACT_NONE);
    rows = stx_concat(x, stx_linear(x, memory, p->w1, NULL, STX_ACT_NONE), z);
    a.q = z;
    a.kv = stx_linear(x, rows, p->w2, NULL, STX_ACT_NONE);
    d.heads = 1;
    d.dropout = 0.2;
    y = stx_rezero(x, z, stx_attention(x, &a, &d), p->alpha_attn);
    return stx_dropout(x, stx_layernorm(x, y, p->attn_gain, p->attn_shift, 1e-5), 0.3);
}

/* Computes the last hidden states of a model with single ops. The dropouts are drawn in
   the same order as in the model. */
static stx_tensor *forward_by_hand(stx_sru_lm *m, const stx_sru_state *s, const int32_t *t,
                                   int plus) {
    stx_ctx *x = m->ctx;
    stx_tensor *h, *ones, *y, *mem[2], *in[2];
    size_t l;
    for (l = 0; l < 2; l++) {
        mem[l] = plus ? stx_input(x, s->memory->layer[l].data, 2, 12, 8, 0) : NULL;
        in[l] = stx_input(x, s->c + l * 16, 2, 8, 0, 0);
    }
    h = stx_dropout(x, stx_embedding(x, m->vocab_io->in_emb, stx_tokens(x, t, 2, 12)), 0.45);
    for (l = 0; l < 2 && h; l++) {
        const stx_sru_layer *p = &m->sru->layer[l];
        stx_sru_recurrence_in c;
        memset(&c, 0, sizeof c);
        y = stx_dropout_variational(x, h, 0.15);
        if (l == 0) {
            ones = stx_new_f32(x, 2, 8, 0, 0);
            stx_fill(x, ones->data, 16, 1);
            c.mask = stx_dropout(x, ones, 0.3);
        }
        if (plus) y = attention_by_hand(x, p, y, mem[l]);
        c.u = stx_reshape(x, stx_linear(x, y, p->w3, NULL, STX_ACT_NONE), 2, 12, 3, 8);
        c.xr = h;
        c.v = p->v;
        c.bias = p->bias;
        c.c0 = in[l];
        h = stx_sru_recurrence(x, &c, NULL);
    }
    return stx_dropout(x, h, 0.45);
}

/* Compares every dropout with the same dropout in a model that is written as single
   ops: its rate, its position, and whether its mask is drawn once for all time steps. */
static void dropouts_by_hand(void) {
    int plus;
    for (plus = 0; plus < 2; plus++) {
        stx_sru_lm_desc d;
        stx_ctx *x = context(1, 3);
        stx_sru_lm *m;
        stx_sru_state *s;
        int32_t t[24];
        stx_real expected[2 * 12 * 8] = {0};
        stx_tensor *h;
        int i;
        for (i = 0; i < 24; i++) t[i] = i % V;
        memset(&d, 0, sizeof d);
        d.vocab = V;
        d.dim = 8;
        d.dropout = 0.3;
        d.io_dropout = 0.45;
        d.sru.layers = 2;
        d.sru.rnn_dropout = 0.15;
        if (plus) {
            d.sru.transform = STX_SRU_ATTENTION;
            d.sru.proj = 4;
            d.sru.attn_dropout = 0.2;
            d.sru.alpha_init = 0.6;
        }
        m = stx_sru_lm_create(x, &d);
        s = stx_sru_state_create(m->sru, 2);
        stx_begin(x, STX_EVAL);
        CHECK(stx_sru_lm_forward(m, stx_tokens(x, t, 2, 12), NULL, s) != NULL, "%s", stx_error(x));
        stx_set_step_index(x, 40);
        stx_begin(x, STX_TRAIN);
        h = stx_sru_lm_forward(m, stx_tokens(x, t, 2, 12), s, NULL);
        CHECK(h != NULL, "%s", stx_error(x));
        if (h) stx_get(x, h, expected);
        stx_set_step_index(x, 40);
        stx_begin(x, STX_TRAIN);
        h = forward_by_hand(m, s, t, plus);
        CHECK(h && max_difference(h->data, expected, 2 * 12 * 8) == 0,
              "dropouts by hand, SRU%s: the error is %g %s", plus ? "++" : "",
              h ? max_difference(h->data, expected, 2 * 12 * 8) : -1.0, stx_error(x));
        stx_destroy(x);
    }
}

/* Padding must have no effect in a memory that is kept over several segments. */
static void kept_padding(void) {
    static const size_t length[3][2] = {{4, 2}, {3, 4}, {1, 4}};
    const size_t B = 2, T = 4, n = 12;
    const char *name;
    stx_sru_desc d = stack(6, &name);
    stx_ctx *x = context(1, 4);
    stx_sru *m;
    stx_sru_state *s;
    stx_real *v = random_of(B * n * 12, 1), *parts = (stx_real *)calloc(B * n * 12, sizeof *parts);
    int32_t pad[24];
    size_t i, b, t;
    stx_sru_io io;
    stx_tensor *h;
    m = stx_sru_create(stx_params_create(x), "", &d);
    s = stx_sru_state_create(m, B);
    s->keep = 2 * T;
    s->window = 7;
    for (i = 0; i < 3; i++) {
        stx_real *piece = columns(v, B, n, i * T, T, 12);
        stx_begin(x, STX_EVAL);
        h = stx_sru_segment(m, stx_input(x, piece, B, T, 12, 0),
                            stx_sru_lengths(x, length[i], B, T), s, s);
        CHECK(h != NULL, "%s", stx_error(x));
        for (b = 0; h && b < B; b++)
            memcpy(parts + (b * n + i * T) * 12, h->data + b * T * 12, T * 12 * sizeof *parts);
        for (b = 0; b < B; b++)
            for (t = 0; t < T; t++) pad[b * n + i * T + t] = t >= length[i][b];
        free(piece);
    }
    stx_begin(x, STX_EVAL);
    memset(&io, 0, sizeof io);
    io.pad = stx_tokens(x, pad, B, n);
    io.window = 7;
    h = stx_sru_forward(m, stx_input(x, v, B, n, 12, 0), &io);
    CHECK(h && max_difference(h->data, parts, B * n * 12) <= TOL,
          "padding kept over segments: the error is %g",
          h ? max_difference(h->data, parts, B * n * 12) : -1.0);
    free(v);
    free(parts);
    stx_destroy(x);
}

/* After the first steps, training must not allocate memory. Step keys must depend on
   the state. */
static void steady(void) {
    const char *name;
    stx_sru_lm_desc d = model(6, &name);
    stx_ctx *x = context(2, 3);
    stx_sru_lm *m = stx_sru_lm_create(x, &d);
    stx_optim *o = stx_optim_create(m->params, NULL);
    stx_sru_state *s = stx_sru_state_create(m->sru, 2);
    int32_t *t = ordered_tokens(1, 2 * 200, V, 5);
    size_t bytes = 0, i;
    uint64_t key[8];
    stx_optim_desc od;
    memset(&od, 0, sizeof od);
    if (!o) {
        stx_clear_error(x);
        o = stx_optim_create(m->params, &od);
    }
    for (i = 0; i < 8; i++) {
        key[i] = stx_sru_lm_key(m, NULL, NULL, s, 0);
        step(m, o, s, t, 2, 200, 16 * i, 16, 0.01);
        if (i == 2) bytes = stx_bytes(x);
    }
    CHECK(bytes == stx_bytes(x), "training keeps allocating: %zu, then %zu bytes", bytes,
          stx_bytes(x));
    CHECK(key[0] != key[2] && key[2] == key[3] && key[3] == key[7],
          "keys: only those before the first memory differ");
    s->window = 5;
    CHECK(stx_sru_lm_key(m, NULL, NULL, s, 0) != key[7]
              && stx_sru_lm_key(m, NULL, NULL, s, 1) != stx_sru_lm_key(m, NULL, NULL, s, 0),
          "keys: window and salt");
    {
        stx_sru_lm *other = stx_sru_lm_create(x, &d);
        stx_ids *one = stx_tokens_create(x, 2, 16), *two = stx_tokens_create(x, 2, 16);
        CHECK(stx_sru_lm_key(m, one, two, NULL, 0) != stx_sru_lm_key(other, one, two, NULL, 0),
              "keys: the model");
        CHECK(stx_sru_lm_key(m, one, two, NULL, 0) != stx_sru_lm_key(m, two, one, NULL, 0)
                  && stx_sru_lm_key(m, one, NULL, NULL, 0) != stx_sru_lm_key(m, NULL, one, NULL, 0),
              "keys: tokens");
    }
    stx_sru_state_reset(s);
    CHECK(stx_memory_max_rows(s->memory) == 0 && stx_ok(x), "reset: %s", stx_error(x));
    free(t);
    stx_destroy(x);
}

/* The largest magnitude in rows [r0, r0 + rows) of a parameter must almost reach the
   bound. */
static void bound_is(const stx_tensor *t, size_t r0, size_t rows, double bound, const char *what) {
    const size_t C = t->size / t->dim[0];
    double top = 0;
    size_t i;
    for (i = r0 * C; i < (r0 + rows) * C; i++)
        if (fabs((double)t->data[i]) > top) top = fabs((double)t->data[i]);
    CHECK(top <= bound * 1.000001 && top >= 0.99 * bound, "%s: largest %.5f, bound %.5f", what, top,
          bound);
}

static int all_zero(const stx_tensor *t) {
    size_t i;
    for (i = 0; i < t->size; i++)
        if (t->data[i] != 0) return 0;
    return 1;
}

/* Tests initial weights. All cases below use one context and its random generator. */
static void initial_weights(stx_ctx *x) {
    stx_sru_desc d;
    stx_sru *m;

    memset(&d, 0, sizeof d);
    d.input = d.hidden = 256;
    m = stx_sru_create(stx_params_create(x), "", &d);
    bound_is(m->layer[0].w3, 0, 256, sqrt(3.0 / 256), "W0");
    bound_is(m->layer[0].w3, 256, 256, sqrt(1.5 / 256), "W1");
    bound_is(m->layer[0].w3, 512, 256, sqrt(1.5 / 256), "W2");
    bound_is(m->layer[0].v, 0, 2, sqrt(1.5), "v");
    CHECK(all_zero(m->layer[0].bias) && (double)m->layer[0].alpha == 1, "bias 0, alpha 1");
    d.dropout = 0.3;
    m = stx_sru_create(stx_params_create(x), "", &d);
    bound_is(m->layer[0].w3, 0, 256, sqrt(3.0 / 256 * 0.7), "W0 with dropout");
    bound_is(m->layer[1].w3, 0, 256, sqrt(3.0 / 256), "W0 of the last layer");
    d.rnn_dropout = 0.2;
    d.norm = STX_SRU_NORM_AFTER;
    d.dropout = 0;
    m = stx_sru_create(stx_params_create(x), "", &d);
    bound_is(m->layer[0].w3, 0, 256, 0.1 * sqrt(3.0 / 256 * 0.8), "W0 with norm and rnn dropout");
}

static void initial_rescale(stx_ctx *x) {
    stx_sru_desc d;
    stx_sru *m;
    size_t i;

    memset(&d, 0, sizeof d);
    d.input = 256;
    d.hidden = 128;
    d.rescale = 1;
    d.highway_bias = -2;
    d.v_init = 0.25;
    m = stx_sru_create(stx_params_create(x), "", &d);
    CHECK(m->layer[0].k == 4 && m->layer[1].k == 3, "k");
    bound_is(m->layer[0].w3, 3 * 128, 128, sqrt(3.0 / 256) * sqrt(1 + 2 * exp(-2)), "W3 with k 4");
    bound_is(m->layer[0].v, 0, 2, 0.25, "v by v_init");
    CHECK((double)m->layer[0].alpha == 1
              && fabs((double)m->layer[1].alpha - sqrt(1 + 2 * exp(-2))) < 1e-6,
          "alpha: only where x has no projection");
    for (i = 0; i < 128; i++)
        CHECK((double)m->layer[0].bias->data[i] == 0
                  && (double)m->layer[0].bias->data[128 + i] == -2,
              "bias");
    d.v1 = 1;
    m = stx_sru_create(stx_params_create(x), "", &d);
    CHECK(!m->layer[0].v, "v1 has no v");
    bound_is(m->layer[0].w3, 128, 128, sqrt(3.0 / 256), "W1 of v1");
}

static void initial_attention(stx_ctx *x) {
    stx_sru_desc d;
    stx_sru *m;

    memset(&d, 0, sizeof d);
    d.input = 256;
    d.transform = STX_SRU_ATTENTION;
    d.dropout = 0.2;
    d.attention_every = 2;
    m = stx_sru_create(stx_params_create(x), "", &d);
    CHECK(m->layer[0].P == 64 && !m->layer[0].attends && m->layer[1].attends && !m->layer[0].w2
              && m->layer[1].w2,
          "attention every 2");
    bound_is(m->layer[1].w1, 0, 64, sqrt(6.0 / 320), "w1");
    bound_is(m->layer[1].w2, 0, 128, sqrt(2.0 / 64), "w2");
    bound_is(m->layer[1].w3, 0, 768, sqrt(6.0 / 832) * sqrt(0.8), "w3");
    bound_is(m->layer[1].v, 0, 2, 1, "v of SRU++");
    CHECK((double)m->layer[1].alpha_attn->data[0] == 0 && (double)m->layer[0].bias->data[256] == 0
              && (double)m->layer[0].attn_gain->data[63] == 1,
          "alpha 0, highway bias 0, gain 1");
}

/* The highway bias of the desc, including 0, must be the initial value, and reading the
   desc must return it. */
static void initial_highway_bias(stx_ctx *x, double bias, int transform) {
    stx_sru_lm_desc d;
    stx_sru_lm *m;
    size_t i;

    memset(&d, 0, sizeof d);
    d.vocab = 11;
    d.dim = 8;
    d.sru.transform = transform;
    d.sru.highway_bias = bias;
    d.sru.rescale = 1;
    m = stx_sru_lm_create(x, &d);
    CHECK(m && m->desc.sru.highway_bias == bias, "highway_bias %g is read back as %g", bias,
          m ? m->desc.sru.highway_bias : 0);
    for (i = 0; m && i < 8; i++) {
        const stx_real *first = m->sru->layer[1].bias->data;
        CHECK((double)first[8 + i] == bias, "the first value of highway_bias %g is %g", bias,
              (double)first[8 + i]);
        CHECK((double)first[i] == 0, "the first bias of the forget gate is %g", (double)first[i]);
    }
    CHECK(m && fabs((double)m->sru->layer[1].alpha - sqrt(1 + 2 * exp(bias))) < 1e-6,
          "alpha with highway_bias %g", bias);
}

/* With v_init = -1, v must start as zeros but must still be a parameter. (With v1, v is
   not a parameter.) */
static void initial_v(stx_ctx *x) {
    stx_sru_lm_desc d;
    stx_sru_lm *m;
    size_t i;

    memset(&d, 0, sizeof d);
    d.vocab = 11;
    d.dim = 8;
    d.sru.v_init = -1;
    m = stx_sru_lm_create(x, &d);
    CHECK(m && m->sru->layer[0].v && stx_sru_lm_count(&d) == stx_params_size(m->params),
          "v_init -1: %s", stx_error(x));
    for (i = 0; m && i < 16; i++)
        CHECK((double)m->sru->layer[0].v->data[i] == 0, "v_init -1: the first value is %g",
              (double)m->sru->layer[0].v->data[i]);
}

static void initialisers(void) {
    static const double bias[] = {0, -2, -3, 0.5};
    stx_ctx *x = context(1, 11);
    size_t k;
    initial_weights(x);
    initial_rescale(x);
    initial_attention(x);
    for (k = 0; k < 4; k++) {
        initial_highway_bias(x, bias[k], STX_SRU_LINEAR);
        initial_highway_bias(x, bias[k], STX_SRU_ATTENTION);
    }
    initial_v(x);
    CHECK(stx_ok(x), "%s", stx_error(x));
    stx_destroy(x);
}

/* Initially, attention must contribute nothing, and w2 must have no gradient until
   alpha changes. */
static void rezero(void) {
    stx_ctx *x = context(1, 4);
    stx_params *p = stx_params_create(x);
    stx_sru_desc d;
    stx_sru *m;
    stx_real *v = random_of(2 * 5 * 8, 1);
    stx_tensor *h;
    size_t i;
    double top = 0;
    memset(&d, 0, sizeof d);
    d.input = 8;
    d.transform = STX_SRU_ATTENTION;
    d.proj = 4;
    d.layers = 1;
    m = stx_sru_create(p, "", &d);
    stx_begin(x, STX_TRAIN);
    h = stx_sru_forward(m, stx_input(x, v, 2, 5, 8, 0), NULL);
    stx_backward_from(x, h, v);
    CHECK(stx_ok(x), "%s", stx_error(x));
    for (i = 0; i < m->layer[0].w2->size; i++)
        raise_worst(&top, fabs((double)m->layer[0].w2->grad[i]));
    CHECK(top == 0 && fabs((double)m->layer[0].alpha_attn->grad[0]) > 1e-6, "w2 %g, alpha %g", top,
          (double)m->layer[0].alpha_attn->grad[0]);
    free(v);
    stx_destroy(x);
}

/* A custom transform. If g is NULL, it computes no V. */
typedef struct own {
    stx_tensor *w, *g;
    int calls, fail, shape;
} own;

static int own_transform(stx_ctx *x, void *user, size_t layer, stx_tensor *in, stx_tensor **U,
                         stx_tensor **Vg) {
    own *o = (own *)user;
    o->calls += layer == 0;
    if (o->fail) return 0;
    *U = stx_linear(x, in, o->w, NULL, STX_ACT_NONE);
    if (o->shape) *U = in;
    if (o->g) *Vg = stx_linear(x, in, o->g, NULL, STX_ACT_NONE);
    return 1;
}

static void custom(void) {
    stx_ctx *x = context(1, 4);
    stx_params *p = stx_params_create(x), *q = stx_params_create(x);
    stx_sru_desc d;
    stx_sru *m, *ref;
    own o;
    stx_real *v = random_of(2 * 5 * 6, 1);
    stx_tensor *a, *b;
    memset(&d, 0, sizeof d);
    memset(&o, 0, sizeof o);
    d.input = 6;
    d.layers = 1;
    ref = stx_sru_create(p, "", &d);
    d.custom = own_transform;
    d.user = &o;
    m = stx_sru_create(q, "", &d);
    CHECK(m && q->count == 2 && stx_sru_count(&d) == stx_params_size(q),
          "a stack with a custom transform has parameters other than v and bias: %zu", q->count);
    stx_set(x, m->layer[0].v, ref->layer[0].v->data);
    o.w = ref->layer[0].w3;
    stx_begin(x, STX_TRAIN);
    a = stx_sru_forward(ref, stx_input(x, v, 2, 5, 6, 0), NULL);
    b = stx_sru_forward(m, stx_input(x, v, 2, 5, 6, 0), NULL);
    CHECK(a && b && max_difference(a->data, b->data, a->size) == 0 && o.calls == 1,
          "custom transform: %s", stx_error(x));
    o.g = stx_param(q, STX_UNIFORM, 0.5, "gates", 12, 6, 0, 0);
    b = stx_sru_forward(m, stx_input(x, v, 2, 5, 6, 0), NULL);
    CHECK(a && b && max_difference(a->data, b->data, a->size) > 1e-4,
          "gates that depend on the input have no effect");
    stx_backward_from(x, b, v);
    CHECK(stx_ok(x) && fabs((double)o.g->grad[0]) > 0, "the gates have no gradient");
    o.shape = 1;
    stx_begin(x, STX_TRAIN);
    CHECK(!stx_sru_forward(m, stx_input(x, v, 2, 5, 6, 0), NULL)
              && strstr(stx_error(x), "180 elements, got 60"),
          "%s", stx_error(x));
    stx_clear_error(x);
    o.fail = 1;
    stx_begin(x, STX_TRAIN);
    CHECK(!stx_sru_forward(m, stx_input(x, v, 2, 5, 6, 0), NULL)
              && strstr(stx_error(x), "transform of layer 0 failed"),
          "%s", stx_error(x));
    stx_clear_error(x);
    free(v);
    stx_destroy(x);
}

enum { PAD_B = 3, PAD_T = 11 };

static const size_t pad_length[PAD_B] = {11, 4, 7};

/* The outputs of a segment must be 0 at padding and must not depend on the input there,
   and each row must equal the result of that row alone. `one` receives the outputs, s
   the new states. */
static void padded_outputs(const char *name, stx_sru *m, const stx_real *v, stx_sru_state *s,
                           stx_real *one, stx_real *two) {
    const size_t B = PAD_B, T = PAD_T, I = m->desc.input;
    stx_ctx *x = m->ctx;
    stx_sru_state *r = stx_sru_state_create(m, 1);
    stx_real *w = random_of(B * T * I, 1);
    stx_tensor *h;
    size_t b, t, i;
    double e = 0;

    for (b = 0; b < B; b++)
        for (t = pad_length[b]; t < T; t++) {
            for (i = 0; i < I; i++) w[(b * T + t) * I + i] = 3;
            for (i = 0; i < m->O; i++) e += fabs((double)one[(b * T + t) * m->O + i]);
        }
    CHECK(e == 0, "%s: the output of padding is %g", name, e);
    stx_begin(x, STX_EVAL);
    h = stx_sru_segment(m, stx_input(x, w, B, T, I, 0), stx_sru_lengths(x, pad_length, B, T), NULL,
                        s);
    stx_get(x, h, two);
    CHECK(!memcmp(one, two, h->size * sizeof *one), "%s: the input of padding has an effect", name);
    stx_begin(x, STX_EVAL);
    h = stx_sru_segment(m, stx_input(x, v + T * I, 1, 4, I, 0), NULL, r, r);
    CHECK(h && max_difference(h->data, one + T * m->O, 4 * m->O) <= TOL,
          "%s: a row alone differs", name);
    stx_download(x, one, r->c, m->desc.layers * m->O);
    for (i = 0; i < m->desc.layers; i++) {
        stx_download(x, two, stx_offset_ptr(x, s->c, (i * B + 1) * m->O), m->O);
        CHECK(max_difference(one + i * m->O, two, m->O) <= TOL, "%s: the state of a row differs",
              name);
    }
    free(w);
}

/* Padding is marked in the memory, so it must not affect the next segment either. */
static void padded_memory(const char *name, stx_sru *m, const stx_real *v, stx_sru_state *s,
                          stx_real *one) {
    const size_t B = PAD_B, T = PAD_T, I = m->desc.input;
    stx_ctx *x = m->ctx;
    stx_tensor *h;
    size_t i, t;
    stx_begin(x, STX_EVAL);
    h = stx_sru_segment(m, stx_input(x, v, B, 3, I, 0), NULL, s, NULL);
    stx_get(x, h, one);
    for (i = 0; i < m->desc.layers; i++)
        if (m->layer[i].attends)
            for (t = pad_length[1]; t < T; t++)
                s->memory->layer[i].data[(T + t) * m->layer[i].Ci] = 9;
    stx_begin(x, STX_EVAL);
    h = stx_sru_segment(m, stx_input(x, v, B, 3, I, 0), NULL, s, NULL);
    CHECK(h && !memcmp(one, h->data, h->size * sizeof *one),
          "%s: padding in the memory has an effect", name);
}

static void padding(void) {
    const size_t B = PAD_B, T = PAD_T;
    int k;
    for (k = 0; k < STACKS; k++) {
        const char *name;
        stx_sru_desc d = stack(k, &name);
        stx_ctx *x = context(1, 4);
        stx_sru *m;
        stx_real *v = random_of(B * T * d.input, 1), *one, *two;
        stx_sru_state *s;
        stx_tensor *h;
        d.zero_pads = 1;
        m = stx_sru_create(stx_params_create(x), "", &d);
        s = stx_sru_state_create(m, B);
        stx_begin(x, STX_EVAL);
        h = stx_sru_segment(m, stx_input(x, v, B, T, d.input, 0),
                            stx_sru_lengths(x, pad_length, B, T), s, s);
        CHECK(h != NULL, "%s: %s", name, stx_error(x));
        if (!h) continue;
        one = (stx_real *)malloc(h->size * sizeof *one);
        two = (stx_real *)malloc(h->size * sizeof *two);
        stx_get(x, h, one);
        padded_outputs(name, m, v, s, one, two);
        if (d.transform == STX_SRU_ATTENTION && stx_memory_max_rows(s->memory))
            padded_memory(name, m, v, s, one);
        free(one);
        free(two);
        free(v);
        stx_destroy(x);
    }
}

enum { QUERY_B = 4, QUERY_T = 9, QUERY_M = 5, QUERY_N = 3, QUERY_W = 12 };

/* Nonzero if position t of row b is padding: at the beginning, at the end, in the whole
   row, or in between. */
static int is_padding(size_t b, size_t t) {
    switch (b) {
    case 0: return t < 4;
    case 1: return t > 5;
    case 2: return 1;
    default: return t % 4 == 1;
    }
}

/* Nonzero if a position of the memory is padding: the whole row, the beginning, in
   between, or nowhere. */
static int is_memory_padding(size_t b, size_t t) {
    switch (b) {
    case 0: return 1;
    case 1: return t < 3;
    case 2: return t == 1;
    default: return 0;
    }
}

/* Overwrites each row of `rows` (n,C) that is marked in `pad` with the values `first`,
   first + step_, .. */
static void overwrite(stx_real *rows, const int32_t *pad, size_t n, size_t C, double first,
                      double step_) {
    size_t i, j;
    for (i = 0; i < n; i++)
        for (j = 0; pad[i] && j < C; j++) rows[i * C + j] = (stx_real)(first + step_ * (double)j);
}

/* Returns the outputs, states and gradients of a stack, or NULL on failure. other:
   whether the padding contains other values. The caller frees the result. */
static stx_real *padded_run(const stx_sru_desc *d, const char *name, size_t window, int other,
                            size_t *total) {
    enum { B = QUERY_B, T = QUERY_T, M = QUERY_M, N = QUERY_N, W = QUERY_W };

    stx_ctx *x = context(1, 4);
    stx_params *p = stx_params_create(x);
    stx_sru *m = stx_sru_create(p, "", d);
    stx_real *v = random_of(B * T * d->input, 7), *g = random_of(B * T * W, 8),
             *c = random_of(B * W, 9), *all = NULL, *at;
    int32_t pad[B * T], before[B * M];
    stx_tensor *in, *h, *loss, *c0[N], *memory[N], *last[N];
    stx_sru_io io;
    size_t i, j, l;
    double e = 0;

    for (i = 0; i < B * T; i++) pad[i] = is_padding(i / T, i % T);
    for (i = 0; i < B * M; i++) before[i] = is_memory_padding(i / M, i % M);
    if (other) overwrite(v, pad, B * T, d->input, 3, 1);
    stx_begin(x, STX_TRAIN);
    in = stx_variable(x, v, B, T, d->input, 0);
    for (l = 0; l < N; l++) {
        const size_t C = m->layer[l].Ci;
        stx_real *rows = random_of(B * M * C, 20 + l);
        if (other) overwrite(rows, before, B * M, C, -2, -1);
        memory[l] = m->layer[l].attends ? stx_input(x, rows, B, M, C, 0) : NULL;
        c0[l] = stx_input(x, c, B, W, 0, 0);
        free(rows);
    }
    memset(&io, 0, sizeof io);
    io.c0 = c0;
    io.memory = memory;
    io.last = last;
    io.window = window;
    io.pad = stx_tokens(x, pad, B, T);
    io.memory_pad = stx_tokens(x, before, B, M);
    h = stx_sru_forward(m, in, &io);
    CHECK(h != NULL, "%s: %s", name, stx_error(x));
    if (h) {
        loss = stx_mean(x, stx_mul(x, h, stx_input(x, g, B, T, W, 0)));
        for (l = 0; l < N; l++)
            loss = stx_add(x, loss, stx_mean(x, stx_mul(x, last[l], last[l])));
        stx_backward(x, loss);
        *total = h->size + N * B * W + B * T * d->input + stx_params_size(p);
        all = (stx_real *)malloc(*total * sizeof *all);
        at = append(all, h->data, h->size);
        for (l = 0; l < N; l++) at = append(at, last[l]->data, B * W);
        for (i = 0; i < B * T; i++)
            for (j = 0; pad[i] && j < d->input; j++) e += fabs((double)in->grad[i * d->input + j]);
        CHECK(e == 0, "%s, window %zu: the gradient of padding is %g", name, window, e);
        append_grads(append(at, in->grad, in->size), p);
        CHECK(stx_ok(x), "%s: %s", name, stx_error(x));
    }
    stx_destroy(x);
    free(v);
    free(g);
    free(c);
    return all;
}

/* Tests padding before, between and after the tokens, and in whole rows, in the segment
   and in the memory, with and without a window. Different input at padding, which
   changes queries, keys and values there, must leave all outputs, states and gradients
   bit-identical. The gradient of padding must be 0. Therefore, queries that see only
   padding need no mask. */
static void padded_queries(void) {
    int k;
    size_t window;
    for (k = 6; k < STACKS; k++)
        for (window = 0; window < 5; window += 4) {
            const char *name;
            stx_sru_desc d = stack(k, &name);
            size_t total[2] = {0, 0}, i, changed = 0;
            stx_real *a = padded_run(&d, name, window, 0, &total[0]);
            stx_real *b = a ? padded_run(&d, name, window, 1, &total[1]) : NULL;
            for (i = 0; b && i < total[0]; i++) changed += !(a[i] == b[i]);
            if (b)
                CHECK(!changed && total[0] == total[1],
                      "%s, window %zu: values in the padding change %zu of %zu outputs, states "
                      "and gradients",
                      name, window, changed, total[0]);
            free(a);
            free(b);
        }
}

/* In the first segment, the window is taken from the state that the segment writes.
   With k = 4, the highway input is u3, regardless of alpha. */
static void small_rules(void) {
    const char *name;
    stx_sru_desc d = stack(6, &name);
    stx_ctx *x = context(1, 4);
    stx_sru *m = stx_sru_create(stx_params_create(x), "", &d);
    stx_sru_state *s = stx_sru_state_create(m, 1);
    stx_real *v = random_of(20 * 12, 1), *u = random_of(20 * 4 * 12, 1),
             *one = random_of(20 * 12, 1);
    stx_sru_recurrence_in c;
    stx_tensor *h;
    s->window = 3;
    stx_begin(x, STX_EVAL);
    h = stx_sru_segment(m, stx_input(x, v, 1, 20, 12, 0), NULL, s, NULL);
    stx_get(x, h, one);
    stx_begin(x, STX_EVAL);
    h = stx_sru_segment(m, stx_input(x, v, 1, 20, 12, 0), NULL, NULL, s);
    CHECK(h && !memcmp(one, h->data, h->size * sizeof *one), "the window of the written state");
    stx_begin(x, STX_EVAL);
    memset(&c, 0, sizeof c);
    c.u = stx_input(x, u, 1, 20, 4, 12);
    c.bias = stx_input(x, v, 2, 12, 0, 0);
    h = stx_sru_recurrence(x, &c, NULL);
    stx_get(x, h, one);
    c.alpha = 3;
    h = stx_sru_recurrence(x, &c, NULL);
    CHECK(h && !memcmp(one, h->data, h->size * sizeof *one), "alpha with k = 4");
    free(v);
    free(u);
    free(one);
    stx_destroy(x);
}

/* States must be in the order of nn.GRU: (layers directions, B, H). */
static void nn_states(void) {
    static const size_t shape[6][3] = {{2, 3, 8}, {3, 4, 4}, {4, 4, 3},
                                       {4, 3, 8}, {4, 2, 4}, {0, 0, 0}};
    stx_ctx *x = context(1, 4);
    stx_sru_desc d;
    stx_sru *m;
    stx_sru_state *s;
    stx_real c[2 * 3 * 8] = {0}, nn[2 * 3 * 8] = {0}, again[2 * 3 * 8] = {0};
    size_t i, l, b, dir, j;

    memset(&d, 0, sizeof d);
    d.input = 8;
    d.hidden = 4;
    d.bidirectional = 1;
    m = stx_sru_create(stx_params_create(x), "", &d);
    s = stx_sru_state_create(m, 3);
    for (i = 0; i < 48; i++) c[i] = (stx_real)i;
    stx_upload(x, s->c, c, 48);
    stx_sru_state_get_nn(s, nn);
    for (l = 0; l < 2; l++)
        for (dir = 0; dir < 2; dir++)
            for (b = 0; b < 3; b++)
                for (j = 0; j < 4; j++)
                    CHECK(nn[((l * 2 + dir) * 3 + b) * 4 + j] == c[((l * 3 + b) * 2 + dir) * 4 + j],
                          "layer %zu direction %zu row %zu", l, dir, b);
    stx_sru_state_reset(s);
    CHECK(stx_sru_state_set_nn(s, nn, 4, 3, 4), "%s", stx_error(x));
    stx_download(x, again, s->c, 48);
    CHECK(!memcmp(c, again, sizeof c) && stx_ok(x), "states that were got and set");

    /* Tensors of another size must be refused, and so must tensors of the right size
       with another order of dimensions, such as batch first. The error must state the
       expected shape, and the state must not change. */
    for (i = 0; i < 6; i++) {
        char pattern[64];
        for (j = 0; j < 48; j++) nn[j] = -1;
        CHECK(!stx_sru_state_set_nn(s, nn, shape[i][0], shape[i][1], shape[i][2])
                  && stx_error_code(x) == STX_ERR_SHAPE,
              "shape %zu is accepted", i);
        snprintf(pattern, sizeof pattern, "expected shape (4,3,4)..got (%d,%d,%d)",
                 (int)shape[i][0], (int)shape[i][1], (int)shape[i][2]);
        CHECK(test_says(stx_error(x), pattern) && strstr(stx_error(x), "stx_sru_state_set_nn"),
              "%s", stx_error(x));
        stx_clear_error(x);
        stx_download(x, again, s->c, 48);
        CHECK(!memcmp(c, again, sizeof c), "shape %zu is refused, but written", i);
    }
    stx_destroy(x);
}

/* The desc must be refused with an error that matches the pattern; see test_says. */
static void refused(const char *pattern, const stx_sru_desc *d) {
    stx_ctx *x = context(1, 1);
    CHECK(!stx_sru_create(stx_params_create(x), "", d) && stx_error_code(x) == STX_ERR_ARG
              && test_says(stx_error(x), pattern),
          "expected \"%s\", got \"%s\"", pattern, stx_error(x));
    CHECK(stx_sru_count(d) == 0, "counted: %s", pattern);
    stx_destroy(x);
}

static void refused_lm(const char *pattern, const stx_sru_lm_desc *d) {
    stx_ctx *x = context(1, 1);
    CHECK(!stx_sru_lm_create(x, d) && stx_error_code(x) == STX_ERR_ARG
              && test_says(stx_error(x), pattern),
          "expected \"%s\", got \"%s\"", pattern, stx_error(x));
    CHECK(stx_sru_lm_count(d) == 0, "counted: %s", pattern);
    stx_destroy(x);
}

/* Returns a valid desc, which the cases below change. */
static stx_sru_desc small(void) {
    stx_sru_desc d;
    memset(&d, 0, sizeof d);
    d.input = 8;
    d.layers = 2;
    return d;
}

static stx_sru_lm_desc small_lm(void) {
    stx_sru_lm_desc d;
    memset(&d, 0, sizeof d);
    d.vocab = V;
    d.dim = 8;
    return d;
}

/* Tests parameter counts near the limit of size_t and beyond it. */
static void large_counts(void) {
    stx_sru_desc d = small();
    stx_sru_lm_desc lm;
    d.input = (size_t)1 << 28;
    d.layers = 4096;
    CHECK(stx_sru_count(&d) == SIZE_MAX, "4096 layers of 2^28: %zu parameters", stx_sru_count(&d));
    memset(&lm, 0, sizeof lm);
    lm.vocab = (size_t)1 << 31;
    lm.dim = (size_t)1 << 28;
    lm.sru.layers = 63;
    if (sizeof(size_t) == 8)
        CHECK(stx_sru_lm_count(&lm) < SIZE_MAX && stx_sru_lm_count(&lm) > SIZE_MAX / 2,
              "63 layers and a vocabulary of 2^31: %zu", stx_sru_lm_count(&lm));
    lm.sru.layers = 4096;
    CHECK(stx_sru_lm_count(&lm) == SIZE_MAX, "4096 layers and a vocabulary: %zu parameters",
          stx_sru_lm_count(&lm));
}

static void bad_forms(void) {
    stx_sru_desc d;

    memset(&d, 0, sizeof d);
    refused("input: expected .. got 0", &d);
    d = small();
    d.transform = 7;
    refused("transform: expected .. got 7", &d);
    d = small();
    d.literal = STX_SRU_LITERAL_NORM;
    refused("literal: STX_SRU_LITERAL_NORM requires", &d);
    d.norm = STX_SRU_NORM_BEFORE;
    refused("STX_SRU_LITERAL_NORM requires", &d);
    d.transform = STX_SRU_ATTENTION;
    d.no_attention = 1;
    refused("STX_SRU_LITERAL_NORM requires", &d);
    d.literal |= STX_SRU_LITERAL;
    refused("STX_SRU_LITERAL_NORM requires", &d);
    d = small();
    d.literal = 2;
    refused("literal: expected .. got 2", &d);
    d = small();
    d.norm = 3;
    refused("norm: expected .. got 3", &d);
    d = small();
    d.norm = -1;
    refused("norm: expected .. got -1", &d);
}

static void bad_sizes_and_rates(void) {
    stx_sru_desc d;

    d = small();
    d.layers = 5000;
    refused("layers: expected .. got 5000", &d);
    d = small();
    d.hidden = (size_t)1 << 40;
    refused("hidden: expected", &d);
    d = small();
    d.input = (size_t)1 << 40;
    refused("input: expected", &d);
    d = small();
    d.dropout = 1;
    refused("dropout: expected .. got 1", &d);
    d = small();
    d.dropout = NAN;
    refused("dropout: expected", &d);
    d = small();
    d.rnn_dropout = -0.1;
    refused("rnn_dropout: expected .. got -0.1", &d);
    d = small();
    d.highway_bias = 100;
    refused("highway_bias: expected .. got 100", &d);
    d = small();
    d.highway_bias = NAN;
    refused("highway_bias", &d);
    d = small();
    d.v_init = -2;
    refused("v_init: expected .. got -2", &d);
    d = small();
    d.v_init = NAN;
    refused("v_init", &d);
    d = small();
    d.proj = (size_t)1 << 40;
    refused("proj: expected", &d);
}

static void bad_attention(void) {
    static const size_t projs[2] = {5, 7}, zero[2] = {4, 0};
    stx_sru_desc d;

    d = small();
    d.transform = STX_SRU_ATTENTION;
    d.proj = 6;
    d.heads = 4;
    refused("heads: expected a divisor of proj 6 in layer 0 .. got 4", &d);
    d = small();
    d.transform = STX_SRU_ATTENTION;
    d.projs = projs;
    d.heads = 5;
    refused("heads: expected a divisor of proj 7 in layer 1 .. got 5", &d);
    d = small();
    d.transform = STX_SRU_ATTENTION;
    d.projs = zero;
    refused("projs: expected .. got 0", &d);
    d = small();
    d.transform = STX_SRU_ATTENTION;
    d.attention_every = 2;
    d.attention_last = 1;
    refused("attention_last: expected 0 with attention_every = 2, got 1", &d);
    d = small();
    d.transform = STX_SRU_ATTENTION;
    d.attention_every = 3;
    refused("attention_every: expected .. got 3", &d);
    d = small();
    d.transform = STX_SRU_ATTENTION;
    d.attention_last = 3;
    refused("attention_last: expected .. got 3", &d);
    d = small();
    d.transform = STX_SRU_ATTENTION;
    d.attn_dropout = 2;
    refused("attn_dropout: expected .. got 2", &d);
    d = small();
    d.transform = STX_SRU_ATTENTION;
    d.alpha_init = NAN;
    refused("alpha_init", &d);
}

static void bad_models(void) {
    stx_sru_lm_desc d;

    memset(&d, 0, sizeof d);
    refused_lm("vocab: expected .. got 0", &d);
    d = small_lm();
    d.sru.bidirectional = 1;
    refused_lm("must not see what it predicts", &d);
    d = small_lm();
    d.sru.not_causal = 1;
    refused_lm("must not see what it predicts", &d);
    d = small_lm();
    d.dropout = 1.5;
    refused_lm("dropout: expected .. got 1.5", &d);
    d = small_lm();
    d.emb_dropout = -1;
    refused_lm("emb_dropout: expected .. got -1", &d);
    d = small_lm();
    d.io_dropout = 1;
    refused_lm("io_dropout: expected .. got 1", &d);
    d = small_lm();
    d.dim = (size_t)1 << 50;
    refused_lm("dim", &d);
    d = small_lm();
    d.sru.heads = 3;
    d.sru.transform = STX_SRU_ATTENTION;
    d.sru.proj = 4;
    refused_lm("heads: expected a divisor of proj 4 .. got 3", &d);
}

static void bad_words(void) {
    stx_sru_lm_desc d;

    d = small_lm();
    d.tied = 1;
    d.emb = 5;
    refused_lm("emb: expected dim 8 with tied, got 5", &d);
    d = small_lm();
    d.tied = 1;
    d.adapt_io = 1;
    refused_lm("tied: expected 0 with adapt_io", &d);
    d = small_lm();
    d.adapt_io = 1;
    d.emb = 5;
    refused_lm("emb: expected dim 8 with adapt_io,..got 5", &d);
    d = small_lm();
    d.adapt_io = 1;
    d.cutoffs = 1;
    d.cutoff[0] = V;
    refused_lm("cutoff: expected .. got 29", &d);
    d = small_lm();
    d.adapt_io = 1;
    d.cutoffs = 2;
    d.cutoff[0] = 9;
    d.cutoff[1] = 8;
    refused_lm("cutoff: expected .. got 8", &d);
    d = small_lm();
    d.adapt_io = 1;
    d.cutoffs = 3;
    d.cutoff[0] = 9;
    d.cutoff[1] = 12;
    d.cutoff[2] = 20;
    refused_lm("divval^cutoffs", &d);
    d = small_lm();
    d.adapt_io = 1;
    d.divval = 1;
    refused_lm("divval: expected .. got 1", &d);
    d = small_lm();
    d.adapt_io = 1;
    d.cutoffs = 9;
    refused_lm("cutoffs: expected .. got 9", &d);
}

/* Models and states that cannot be created must be refused. */
static void bad_creation(stx_sru *m) {
    stx_ctx *x = m->ctx;
    stx_sru_desc d = m->desc;
    stx_sru_lm_desc lm = small_lm();

    CHECK(!stx_sru_create(NULL, "", &d) && !stx_sru_lm_create(NULL, &lm), "no context");
    CHECK(!stx_sru_create(stx_params_create(x), "", NULL)
              && strstr(stx_error(x), "expected a desc"),
          "%s", stx_error(x));
    stx_clear_error(x);
    CHECK(!stx_sru_lm_create(x, NULL) && strstr(stx_error(x), "expected a desc"), "%s",
          stx_error(x));
    stx_clear_error(x);
    lm.adapt_io = 1;
    lm.cutoffs = 1;
    lm.cutoff[0] = 9;
    lm.sru.layers = 1;
    CHECK(!stx_sru_lm_logits(stx_sru_lm_create(x, &lm), stx_new(x, 1, 1, 8, 0))
              && strstr(stx_error(x), "stx_vocab_io_log_probs"),
          "%s", stx_error(x));
    stx_clear_error(x);
    CHECK(!stx_sru_state_create(m, 0) && strstr(stx_error(x), "B >= 1"), "%s", stx_error(x));
    stx_clear_error(x);
}

/* Checks that the call failed with an error that matches the pattern, and clears it. */
static void call_refused(stx_ctx *x, const void *result, const char *pattern) {
    CHECK(!result && test_says(stx_error(x), pattern), "expected \"%s\", got \"%s\"", pattern,
          stx_error(x));
    stx_clear_error(x);
}

/* Begins a step and returns its input (2,5,8). */
static stx_tensor *next_input(stx_ctx *x, const stx_real *v) {
    stx_begin(x, STX_TRAIN);
    return stx_input(x, v, 2, 5, 8, 0);
}

static void bad_segments(stx_sru *m, const stx_real *v) {
    static const size_t length[2] = {5, 7};
    stx_ctx *x = m->ctx, *y = context(1, 1);
    stx_sru_state *s3 = stx_sru_state_create(m, 3), *other;
    stx_tensor *in;

    other = stx_sru_state_create(stx_sru_create(stx_params_create(y), "", &m->desc), 2);
    next_input(x, v);
    call_refused(x, stx_sru_forward(m, stx_input(x, v, 2, 5, 7, 0), NULL),
                 "x: expected shape (B,T,8)");
    next_input(x, v);
    call_refused(x, stx_sru_forward(m, stx_input(x, v, 10, 8, 0, 0), NULL),
                 "x: expected shape (B,T,8)");
    in = next_input(x, v);
    call_refused(x, stx_sru_segment(m, in, NULL, s3, NULL),
                 "stx_sru_segment: in: expected B = 2 .. got 3");
    in = next_input(x, v);
    call_refused(x, stx_sru_segment(m, in, NULL, NULL, s3),
                 "stx_sru_segment: out: expected B = 2 .. got 3");
    in = next_input(x, v);
    call_refused(x, stx_sru_segment(m, in, NULL, other, NULL),
                 "stx_sru_segment: in: expected a state of this model");
    next_input(x, v);
    call_refused(x, stx_sru_lengths(x, length, 2, 6), "row 1: expected at most T = 6, got 7");
    next_input(x, v);
    call_refused(x, stx_sru_lengths(x, NULL, 2, 6), "expected lengths,..got NULL");
    stx_destroy(y);
}

static void bad_io(stx_sru *m, const stx_real *v) {
    static const int32_t tok[64] = {0};
    stx_ctx *x = m->ctx;
    stx_sru_io io;
    stx_tensor *in, *layers[2];

    in = next_input(x, v);
    memset(&io, 0, sizeof io);
    io.pad = stx_tokens(x, tok, 2, 4);
    call_refused(x, stx_sru_forward(m, in, &io), "pad: expected shape (2,5), got (2,4)");
    in = next_input(x, v);
    memset(&io, 0, sizeof io);
    io.memory_pad = stx_tokens(x, tok, 2, 4);
    call_refused(x, stx_sru_forward(m, in, &io), "memory_pad: expected shape (2,0), got (2,4)");

    in = next_input(x, v);
    memset(&io, 0, sizeof io);
    io.c0 = layers;
    layers[0] = NULL;
    layers[1] = stx_input(x, v, 2, 7, 0, 0);
    call_refused(x, stx_sru_forward(m, in, &io), "c0: expected shape (2,8),..got (2,7)");
    in = next_input(x, v);
    memset(&io, 0, sizeof io);
    io.memory = layers;
    layers[0] = stx_input(x, v, 2, 3, 7, 0);
    layers[1] = NULL;
    call_refused(x, stx_sru_forward(m, in, &io), "memory: expected shape (2,M,8),..got (2,3,7)");
    in = next_input(x, v);
    layers[0] = stx_input(x, v, 2, 3, 8, 0);
    call_refused(x, stx_sru_forward(m, in, &io), "layer 1: expected 3 rows,..got 0");
    in = next_input(x, v);
    layers[0] = stx_input(x, v, 2, 3, 8, 0);
    layers[1] = stx_input(x, v, 2, 4, 8, 0);
    call_refused(x, stx_sru_forward(m, in, &io), "layer 1: expected 3 rows,..got 4");
}

/* Returns valid inputs of a cell, in a new step. */
static stx_sru_recurrence_in next_cell(stx_ctx *x, const stx_real *v) {
    stx_sru_recurrence_in c;
    memset(&c, 0, sizeof c);
    stx_begin(x, STX_TRAIN);
    c.u = stx_input(x, v, 2, 3, 3, 4);
    c.bias = stx_input(x, v, 2, 4, 0, 0);
    return c;
}

static void bad_cells(stx_ctx *x, const stx_real *v) {
    static const int32_t tok[64] = {0};
    stx_sru_recurrence_in c;

    c = next_cell(x, v);
    c.u = stx_input(x, v, 2, 9, 4, 0);
    call_refused(x, stx_sru_recurrence(x, &c, NULL), "(B,T,k,O)");
    c = next_cell(x, v);
    c.u = stx_input(x, v, 2, 3, 5, 4);
    call_refused(x, stx_sru_recurrence(x, &c, NULL), "u: expected .. got (2,3,5,4)");
    c = next_cell(x, v);
    c.bias = NULL;
    call_refused(x, stx_sru_recurrence(x, &c, NULL), "bias: expected shape (2,O), got NULL");
    c = next_cell(x, v);
    c.directions = 3;
    call_refused(x, stx_sru_recurrence(x, &c, NULL), "directions: expected 1, or 2 .. got 3");
    c = next_cell(x, v);
    c.xr = stx_input(x, v, 2, 3, 5, 0);
    call_refused(x, stx_sru_recurrence(x, &c, NULL), "xr: expected shape (B,T,O) .. got (2,3,5)");
    c = next_cell(x, v);
    c.v = stx_input(x, v, 2, 5, 0, 0);
    call_refused(x, stx_sru_recurrence(x, &c, NULL), "v: expected shape (2,O), got (2,5)");
    c = next_cell(x, v);
    c.bias = stx_input(x, v, 4, 0, 0, 0);
    call_refused(x, stx_sru_recurrence(x, &c, NULL), "bias: expected shape (2,O), got (4)");
    c = next_cell(x, v);
    c.V = stx_input(x, v, 2, 3, 4, 0);
    call_refused(x, stx_sru_recurrence(x, &c, NULL), "V: expected shape (B,T,2,O), got (2,3,4)");
    c = next_cell(x, v);
    c.c0 = stx_input(x, v, 2, 3, 0, 0);
    call_refused(x, stx_sru_recurrence(x, &c, NULL), "c0: expected shape (B,O), got (2,3)");
    c = next_cell(x, v);
    c.mask = stx_input(x, v, 2, 3, 0, 0);
    call_refused(x, stx_sru_recurrence(x, &c, NULL), "mask: expected shape (B,O), got (2,3)");
    c = next_cell(x, v);
    c.pad = stx_tokens(x, tok, 3, 2);
    call_refused(x, stx_sru_recurrence(x, &c, NULL), "pad: expected shape (2,3), got (3,2)");
    c = next_cell(x, v);
    c.u = stx_input(x, v, 2, 3, 4, 4);
    c.xr = stx_input(x, v, 2, 3, 4, 0);
    call_refused(x, stx_sru_recurrence(x, &c, NULL), "xr: expected NULL with k = 4");
}

static void nulls(void) {
    static const size_t length[1] = {1};
    static const int32_t tok[1] = {0};
    stx_real v[1] = {0};
    CHECK(!stx_sru_forward(NULL, NULL, NULL) && !stx_sru_segment(NULL, NULL, NULL, NULL, NULL)
              && !stx_sru_lm_forward(NULL, NULL, NULL, NULL)
              && !stx_sru_lm_loss(NULL, NULL, NULL, NULL, NULL) && !stx_sru_gen_create(NULL, 1, 0)
              && !stx_sru_gen_feed(NULL, tok, 1) && !stx_sru_state_create(NULL, 1)
              && !stx_sru_recurrence(NULL, NULL, NULL) && !stx_sru_lengths(NULL, length, 1, 1)
              && !stx_sru_count(NULL) && !stx_sru_lm_count(NULL) && !stx_sru_lm_params(NULL)
              && !stx_sru_lm_logits(NULL, NULL),
          "NULL is accepted");
    stx_sru_state_free(NULL);
    stx_sru_state_reset(NULL);
    stx_sru_gen_free(NULL);
    stx_sru_gen_reset(NULL);
    stx_sru_state_get_nn(NULL, v);
    CHECK(!stx_sru_state_set_nn(NULL, v, 1, 1, 1), "no state");
}

/* Kernels with a size of 0 must do nothing. */
static void empty_kernels(stx_ctx *x, stx_real *v) {
    int i;
    for (i = 0; i < 4; i++) {
        stx_sru_args a;
        memset(&a, 0, sizeof a);
        a.B = i != 0;
        a.H = i != 1;
        a.D = i != 2;
        a.k = 3;
        a.T = i != 3;
        a.bias = v;
        a.u = v;
        a.h = v;
        a.du = v;
        a.work = malloc(stx_sru_work(x, &a, 1) + stx_sru_work(x, &a, 0) + 64);
        stx_sru_fwd(x, &a);
        stx_sru_bwd(x, &a);
        free(a.work);
    }
    CHECK(stx_ok(x), "%s", stx_error(x));
}

/* A generator must refuse invalid calls, and must still work after them. */
static void bad_generation(void) {
    stx_ctx *x = context(1, 1), *y = context(1, 1);
    stx_sru_lm_desc d = small_lm();
    stx_sru_lm *m = stx_sru_lm_create(x, &d);
    stx_sru_gen *gen = stx_sru_gen_create(m, 1, 0);
    int32_t tok[1] = {0};

    CHECK(gen && !stx_sru_gen_feed(gen, tok, 0) && strstr(stx_error(x), "at least one token"),
          "%s", stx_error(x));
    stx_clear_error(x);
    tok[0] = V;
    CHECK(!stx_sru_gen_feed(gen, tok, 1) && strstr(stx_error(x), "outside the table"), "%s",
          stx_error(x));
    stx_clear_error(x);
    CHECK(!stx_sru_gen_create(m, 0, 0) && strstr(stx_error(x), "B >= 1"), "%s", stx_error(x));
    stx_clear_error(x);
    CHECK(!stx_sru_gen_create(m, 1, SIZE_MAX - 15) && strstr(stx_error(x), "at most 2^31"), "%s",
          stx_error(x));
    stx_clear_error(x);
    d.sru.transform = STX_SRU_ATTENTION;
    d.sru.proj = 4;
    d.sru.norm = STX_SRU_NORM_BEFORE;
    d.sru.literal = STX_SRU_LITERAL;
    CHECK(!stx_sru_gen_create(stx_sru_lm_create(y, &d), 1, 0)
              && strstr(stx_error(y), "LITERAL_NORM"),
          "%s", stx_error(y));
    stx_clear_error(y);
    d = small_lm();
    d.sru.custom = own_transform;
    m = stx_sru_lm_create(y, &d);
    CHECK(m && !stx_sru_gen_create(m, 1, 0)
              && strstr(stx_error(y), "stx_sru_gen_create: cannot generate with a custom"),
          "%s", stx_error(y));
    tok[0] = 1;
    CHECK(stx_sru_gen_feed(gen, tok, 1) != NULL, "after an error: %s", stx_error(x));
    stx_destroy(x);
    stx_destroy(y);
}

static void errors(void) {
    stx_ctx *x = context(1, 1);
    stx_params *p = stx_params_create(x);
    stx_sru_desc d = small();
    stx_sru *m;
    stx_real *v = random_of(4000, 1);

    large_counts();
    bad_forms();
    bad_sizes_and_rates();
    bad_attention();
    bad_models();
    bad_words();
    d.transform = STX_SRU_ATTENTION;
    d.proj = 4;
    m = stx_sru_create(p, NULL, &d);
    CHECK(m && !stx_sru_create(p, "", &d)
              && strstr(stx_error(x), "parameter \"layers.0.w1\" already exists"),
          "%s", stx_error(x));
    stx_clear_error(x);
    if (m) {
        bad_creation(m);
        bad_segments(m, v);
        bad_io(m, v);
    }
    bad_cells(x, v);
    nulls();
    empty_kernels(x, v);
    bad_generation();
    free(v);
    stx_destroy(x);
}

/* Writes a file whose state has one row more than its memory. */
static void write_damaged(const stx_sru_state *s, const char *path) {
    stx_ctx *x = s->model->ctx;
    stx_writer *w = stx_writer_create(x);
    size_t dim[3] = {3, 2, 12};
    stx_writer_add_device(w, "a.c", 3, dim, s->c);
    stx_writer_meta_u64(w, "a.rows", 9);
    dim[0] = 2;
    dim[1] = 8;
    stx_writer_add_device(w, "a.memory.1", 3, dim, s->memory->layer[1].data);
    CHECK(stx_writer_finish(w, path), "%s", stx_error(x));
}

/* A prefix of 64 bytes must work. A longer one and NULL must be refused. */
static void prefixes(stx_sru_state *s, const char *path) {
    stx_ctx *x = s->model->ctx;
    stx_writer *w = stx_writer_create(x);
    stx_file *f;
    char longest[65], longer[66];
    memset(longest, 'p', 64);
    memset(longer, 'p', 65);
    longest[64] = longer[65] = 0;
    CHECK(!stx_sru_state_save(w, s, longer)
              && strstr(stx_error(x), "state_save: prefix: expected at most 64 bytes, got 65"),
          "%s", stx_error(x));
    stx_clear_error(x);
    CHECK(!stx_sru_state_save(w, s, NULL) && strstr(stx_error(x), "at most 64 bytes, got NULL"),
          "%s", stx_error(x));
    stx_clear_error(x);
    CHECK(stx_sru_state_save(w, s, longest) && stx_writer_finish(w, path), "%s", stx_error(x));

    f = stx_file_open(x, path);
    CHECK(!stx_sru_state_load(s, f, longer)
              && strstr(stx_error(x), "state_load: prefix: expected at most 64 bytes, got 65"),
          "%s", stx_error(x));
    stx_clear_error(x);
    CHECK(!stx_sru_state_load(s, f, NULL) && strstr(stx_error(x), "at most 64 bytes, got NULL"),
          "%s", stx_error(x));
    stx_clear_error(x);
    CHECK(stx_sru_state_load(s, f, longest) && stx_memory_max_rows(s->memory) == 9, "%s",
          stx_error(x));
    stx_file_close(f);
}

/* Tests states in files, with padding. Files of another model or batch size, and
   damaged files, must be refused and leave an empty state. */
static void files(void) {
    stx_ctx *x = context(1, 1);
    const char *name;
    stx_sru_desc d = stack(7, &name);
    stx_sru *m = stx_sru_create(stx_params_create(x), "", &d), *plain;
    stx_sru_state *s = stx_sru_state_create(m, 2), *r = stx_sru_state_create(m, 2),
                  *three = stx_sru_state_create(m, 3), *p;
    stx_real *v = random_of(2 * 9 * 12, 1);
    size_t length[2] = {9, 4}, l;
    char path[1024];
    stx_writer *w;
    stx_file *f;

    test_path(path, sizeof path, "test_sru");
    stx_begin(x, STX_EVAL);
    CHECK(stx_sru_segment(m, stx_input(x, v, 2, 9, 12, 0), stx_sru_lengths(x, length, 2, 9), s, s)
              != NULL,
          "%s", stx_error(x));
    w = stx_writer_create(x);
    CHECK(stx_sru_state_save(w, s, "a.") && stx_sru_state_save(w, r, "empty.")
              && stx_writer_finish(w, path),
          "%s", stx_error(x));
    f = stx_file_open(x, path);
    CHECK(stx_sru_state_load(r, f, "a.") && stx_memory_max_rows(r->memory) == 9, "%s",
          stx_error(x));
    CHECK(!memcmp(s->c, r->c, 3 * 2 * 12 * sizeof *v), "state");
    for (l = 0; l < 3; l++)
        if (m->layer[l].attends) {
            const stx_memory_layer *a = &s->memory->layer[l], *b = &r->memory->layer[l];
            CHECK(!memcmp(a->data, b->data, 2 * 9 * 12 * sizeof *v), "memory %zu", l);
            CHECK(a->masked && b->masked && !memcmp(a->pad, b->pad, 18 * sizeof *a->pad),
                  "padding of %zu", l);
        }
    CHECK(stx_sru_state_load(r, f, "empty.") && stx_memory_max_rows(r->memory) == 0, "%s",
          stx_error(x));
    CHECK(!stx_sru_state_load(three, f, "a.") && stx_memory_max_rows(three->memory) == 0
              && strstr(stx_error(x), "has another shape"),
          "%s", stx_error(x));
    stx_clear_error(x);
    CHECK(!stx_sru_state_load(r, f, "b.") && strstr(stx_error(x), "\"b.c\" is missing: expected"),
          "%s", stx_error(x));
    stx_clear_error(x);
    d = stack(0, &name);
    plain = stx_sru_create(stx_params_create(x), "", &d);
    p = stx_sru_state_create(plain, 2);
    CHECK(!stx_sru_state_load(p, f, "a.") && strstr(stx_error(x), "no layer of this model has"),
          "%s", stx_error(x));
    stx_clear_error(x);
    stx_file_close(f);

    prefixes(s, path);
    write_damaged(s, path);
    f = stx_file_open(x, path);
    CHECK(!stx_sru_state_load(r, f, "a.") && stx_memory_max_rows(r->memory) == 0
              && strstr(stx_error(x), "a.memory.1"),
          "%s", stx_error(x));
    stx_clear_error(x);
    stx_file_close(f);
    remove(path);
    free(v);
    stx_destroy(x);
}

/* Counts allocations and live blocks. Allocation number fail_at fails. */
typedef struct counter {
    long calls, live, fail_at;
} counter;

static void *count_alloc(void *user, size_t n) {
    counter *c = (counter *)user;
    void *p;
    if (++c->calls == c->fail_at) return NULL;
    p = malloc(n);
    if (p) c->live++;
    return p;
}

static void count_release(void *user, void *p) {
    if (p) ((counter *)user)->live--;
    free(p);
}

/* Trains and generates in a context in which allocation number c->fail_at fails. Returns
   nonzero if generation succeeded. error and *code receive the context's error. */
static int with_failure(counter *c, char error[256], int *code) {
    static const int32_t t[40] = {1, 2, 3, 4, 5};
    const char *name;
    stx_sru_lm_desc md = model(STACKS, &name);
    stx_desc d;
    stx_ctx *x;
    stx_sru_lm *m;
    stx_sru_state *s;
    stx_sru_gen *g;
    int i, done = 0;

    memset(&d, 0, sizeof d);
    d.alloc = count_alloc;
    d.release = count_release;
    d.user = c;
    d.threads = 1;
    d.chunk_bytes = 4096;
    x = stx_create(&d);
    m = stx_sru_lm_create(x, &md);
    s = m ? stx_sru_state_create(m->sru, 2) : NULL;
    for (i = 0; s && i < 2; i++) {
        stx_begin(x, STX_TRAIN);
        stx_backward(x, stx_sru_lm_loss(m, stx_tokens(x, t, 2, 8), stx_tokens(x, t + 1, 2, 8), s,
                                        s));
    }
    if (s) {
        g = stx_sru_gen_create(m, 1, 8);
        done = g && stx_sru_gen_feed(g, t, 12) != NULL;
    }
    *code = x ? stx_error_code(x) : STX_ERR_MEMORY;
    snprintf(error, 256, "%.255s", x ? stx_error(x) : "");
    stx_destroy(x);
    return done;
}

/* Each allocation fails once. There must be an error, and all memory must be released. */
static void memory(void) {
    long at, total = 1;
    for (at = 0; at <= total; at++) {
        counter c;
        char error[256];
        int done, code;
        memset(&c, 0, sizeof c);
        c.fail_at = at;
        done = with_failure(&c, error, &code);
        if (!at) {
            total = c.calls;
            CHECK(done && !*error, "%s", error);
        } else
            CHECK(!done && code == STX_ERR_MEMORY, "allocation %ld of %ld failed: %s", at, total,
                  error);
        CHECK(c.live == 0, "allocation %ld: %ld blocks left", at, c.live);
    }
}

/* Tests the example that the manual computes by hand. */
static void by_hand(void) {
    static const double h_expected[2] = {1.5, 4}, du0[2] = {0.125, 0.25}, dx[2] = {0, 0.5};
    stx_ctx *x = context(1, 1);
    stx_params *p = stx_params_create(x);
    /* pick: the mean of (0, 2) h is the second element of h */
    stx_real u[6] = {4, 0, 0, 8, 0, 0}, in[2] = {1, 3}, pick[2] = {0, 2}, h[2];
    stx_tensor *ut = stx_param(p, STX_ZEROS, 0, "u", 1, 2, 3, 1),
               *xt = stx_param(p, STX_ZEROS, 0, "x", 1, 2, 1, 0);
    stx_tensor *c0 = stx_param(p, STX_ZEROS, 0, "c0", 1, 1, 0, 0),
               *bias = stx_param(p, STX_ZEROS, 0, "bias", 2, 1, 0, 0), *y, *last = NULL;
    stx_sru_recurrence_in cell;
    int t;
    memset(&cell, 0, sizeof cell);
    stx_set(x, ut, u);
    stx_set(x, xt, in);
    stx_begin(x, STX_TRAIN);
    cell.u = ut;
    cell.xr = xt;
    cell.bias = bias;
    cell.c0 = c0;
    y = stx_sru_recurrence(x, &cell, &last);
    CHECK(stx_ok(x), "%s", stx_error(x));
    if (!stx_ok(x)) {
        stx_destroy(x);
        return;
    }
    stx_get(x, y, h);
    stx_backward(x, stx_mean(x, stx_mul(x, y, stx_input(x, pick, 1, 2, 1, 0))));
    for (t = 0; t < 2; t++) {
        CHECK(fabs((double)h[t] - h_expected[t]) < 1e-6, "h %g", (double)h[t]);
        CHECK(fabs((double)ut->grad[3 * t] - du0[t]) < 1e-6, "du0 %g", (double)ut->grad[3 * t]);
        CHECK(fabs((double)xt->grad[t] - dx[t]) < 1e-6, "dx %g", (double)xt->grad[t]);
    }
    CHECK(fabs((double)c0->grad[0] - 0.125) < 1e-6, "dc0 %g", (double)c0->grad[0]);
    stx_get(x, last, h);
    CHECK(fabs((double)h[0] - 5) < 1e-6, "c %g", (double)h[0]);
    stx_destroy(x);
}

/* A creation that fails must free what it allocated, so that a retry with a smaller size
   can succeed. */
static void failed_creations(void) {
    int kind, n, failed[2] = {0, 0};
    for (kind = 0; kind < 2; kind++) {
        void *made = NULL;
        for (n = 0; n < 50 && !made; n++) {
            stx_sru_lm_desc d;
            int left = 1000;
            stx_ctx *x = limited_context(&left);
            stx_sru_lm *m;
            size_t before;
            memset(&d, 0, sizeof d);
            d.vocab = 8;
            d.dim = 16;
            d.sru.layers = 3;
            d.sru.transform = STX_SRU_ATTENTION;
            m = stx_sru_lm_create(x, &d);
            CHECK(m != NULL, "%s", stx_error(x));
            if (!m) return;
            before = stx_bytes(x);
            left = n;
            made = kind ? (void *)stx_sru_gen_create(m, 2, 9)
                        : (void *)stx_sru_state_create(m->sru, 2);
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

/* Language models with each stack, with adaptive words and with separate projections
   per layer. */
static void opened(void) {
    static const size_t projs[3] = {0, 5, 4};
    int k;
    for (k = 0; k < STACKS + 4; k++) {
        const char *name = "words";
        stx_ctx *x = context(1, 7);
        stx_sru_lm_desc d;
        stx_sru_lm *m;
        memset(&d, 0, sizeof d);
        if (k < STACKS) d.sru = stack(k, &name);
        d.vocab = 29;
        d.dim = 12;
        d.dropout = 0.1;
        d.sru.layers = 3;
        if (k == 1) d.emb = 7;
        if (k == 2) d.io_dropout = -1;
        if (k == 3) d.tied = 1;
        if (k >= STACKS) {
            d.adapt_io = k > STACKS;
            d.separate_projs = k == STACKS + 2;
            d.forward_columns = k == STACKS + 3;
            d.emb_adaptive = d.adapt_io ? 8 : 0;
            d.divval = d.adapt_io ? 2.5 : 0;
            d.cutoffs = d.adapt_io ? 2 : 0;
            d.cutoff[0] = 5;
            d.cutoff[1] = 11;
            d.sru.projs = projs;
        }
        m = stx_sru_lm_create(x, &d);
        CHECK(m != NULL, "%s", stx_error(x));
        if (m) {
            perturb(x, m->params);
            saved_and_opened(stx_sru_family(), m, name);
        }
        stx_destroy(x);
    }
}

int main(void) {
    failed_creations();
    by_hand();
    segments();
    recomputed();
    recomputed_forward();
    literal_none();
    literal_norm();
    directions();
    any_threads();
    kernels_alone();
    generation();
    training();
    dropouts();
    dropouts_by_hand();
    kept_padding();
    steady();
    initialisers();
    rezero();
    custom();
    padding();
    padded_queries();
    small_rules();
    nn_states();
    errors();
    files();
    memory();
    opened();
    return test_end();
}
