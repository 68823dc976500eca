/* Behaviour of seqtx_sru.h beyond the golden vectors: segments = one whole, two
   directions = two runs, generation = forward, causality, what training leaves alone,
   initialisers, transforms of one's own, states in files, errors, memory that runs
   out. */
#include <stdint.h>
#include "../seqtx_sru.h"
#include "test.h"
#include <unistd.h>

#ifdef SEQTX_DOUBLE
static const double TOL = 1e-11;
#else
static const double TOL = 2e-5;
#endif
enum { V = 29 };

static stx_ctx *context(int threads, uint64_t seed) {
    stx_desc d;
    memset(&d, 0, sizeof d);
    d.threads = threads;
    d.seed = seed;
    return stx_create(&d);
}

static stx_real *random_of(size_t n, uint64_t seed) {
    stx_real *r = (stx_real *)malloc((n + 1) * sizeof *r);
    size_t i;
    test_state = 88172645463325252u + seed;
    for (i = 0; i < n; i++) r[i] = (stx_real)test_rand();
    return r;
}

static int32_t *text(size_t n, uint64_t seed) {
    int32_t *t = (int32_t *)malloc((n + 1) * sizeof *t);
    size_t i;
    test_state = 88172645463325252u + seed;
    for (i = 0; i < n; i++)
        t[i] = i && test_rand() < 0.4 ? (t[i - 1] * 7 + 3) % V
                                      : (int32_t)((test_rand() + 1) * 0.4999 * V);
    return t;
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

/* columns [t0, t0 + t) of (B,n,C) */
static stx_real *columns(const stx_real *v, size_t B, size_t n, size_t t0, size_t t, size_t C) {
    stx_real *r = (stx_real *)malloc((B * t * C + 1) * sizeof *r);
    size_t b;
    for (b = 0; b < B; b++) memcpy(r + b * t * C, v + (b * n + t0) * C, t * C * sizeof *r);
    return r;
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

/* Stacks that segments and generation must hold for */
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

/* h (B,n,O) of x (B,n,input) by segments of the given lengths; keep, window: see
   stx_sru_state */
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

static void segments(void) {
    static const size_t whole[] = {60}, parts[] = {7, 1, 20, 13, 19},
                        ones[60] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,
                                    1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,
                                    1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
    const size_t B = 3, n = 60;
    int k;
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
        /* all that came before; a window shorter than the parts; one over several */
        for (w = 0; w < 3; w++) {
            static const size_t window[] = {0, 5, 33};
            a = by_segments(m, v, B, n, whole, 0, window[w], sa);
            b = by_segments(m, v, B, n, parts, 60, window[w], sb);
            CHECK(difference(a, b, B * n * m->O) <= TOL, "%s, window %zu: in parts off by %g", name,
                  window[w], difference(a, b, B * n * m->O));
            CHECK(difference(sa, sb, 3 * B * m->O) <= TOL, "%s: states", name);
            free(b);
            b = by_segments(m, v, B, n, ones, 60, window[w], sb);
            CHECK(difference(a, b, B * n * m->O) <= TOL, "%s, window %zu: one by one off by %g",
                  name, window[w], difference(a, b, B * n * m->O));
            free(b);
            if (window[w]) { /* no more memory than the window is needed */
                b = by_segments(m, v, B, n, parts, window[w], window[w], sb);
                CHECK(difference(a, b, B * n * m->O) <= TOL, "%s, window %zu kept: off by %g", name,
                      window[w], difference(a, b, B * n * m->O));
                free(b);
            }
            free(a);
        }
        /* the last segment alone is something else: memory matters */
        if (d.transform == STX_SRU_ATTENTION) {
            a = by_segments(m, v, B, n, whole, 0, 0, NULL);
            b = by_segments(m, v, B, n, parts, 0, 0, NULL);
            CHECK(difference(a, b, B * n * m->O) > 1e-3, "%s: memory is not felt", name);
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

/* Activations made again in backward: the same outputs, states and gradients, with
   every dropout drawn once, in less memory */
static void recomputed(void) {
    const size_t B = 3, T = 20;
    int k, drop;
    for (k = 0; k < STACKS + 2; k++)
        for (drop = 0; drop < 2; drop++) {
            const char *name;
            stx_real *v = random_of(B * 2 * T * 12, 3), *got[2] = {NULL, NULL};
            size_t n = 0, peak[2];
            int r;
            for (r = 0; r < 2; r++) {
                stx_sru_desc d = stack(k % STACKS, &name);
                stx_ctx *x = context(2, 5);
                stx_params *p = stx_params_create(x);
                stx_sru *m;
                stx_sru_state *s;
                size_t seg, i;
                if (k >= STACKS) d.tanh = 1; /* with padding */
                if (k > STACKS) {
                    d.bidirectional = 1;
                    d.hidden = 6;
                }
                if (drop) {
                    d.dropout = 0.3;
                    d.rnn_dropout = 0.2;
                    d.attn_dropout = d.transform == STX_SRU_ATTENTION ? 0.2 : 0;
                }
                d.recompute = r;
                m = stx_sru_create(p, "", &d);
                s = stx_sru_state_create(m, B);
                CHECK(m && s, "%s: %s", name, stx_error(x));
                if (!m || !s) {
                    stx_destroy(x);
                    continue;
                }
                n = 2 * (B * T * m->O + stx_params_size(p) + d.layers * B * m->O);
                got[r] = (stx_real *)malloc(n * sizeof **got);
                /* the second with memory and states; gradients of both are added up */
                for (seg = 0; seg < 2; seg++) {
                    static const size_t length[3] = {20, 13, 1};
                    stx_real *piece = columns(v, B, 2 * T, seg * T, T, d.input),
                             *to = got[r] + seg * n / 2;
                    stx_ids *pad;
                    stx_tensor *h;
                    stx_begin(x, STX_TRAIN);
                    pad = k >= STACKS ? stx_sru_lengths(x, length, B, T) : NULL;
                    h = stx_sru_segment(m, stx_input(x, piece, B, T, d.input, 0), pad, s,
                                        k > STACKS ? NULL : s);
                    stx_backward(x, stx_mean(x, stx_mul(x, h, stx_add(x, h, h))));
                    CHECK(stx_ok(x) && h, "%s: %s", name, stx_error(x));
                    if (h) memcpy(to, h->data, h->size * sizeof *to);
                    to += B * T * m->O;
                    for (i = 0; i < p->count; i++) {
                        memcpy(to, p->tensor[i]->grad, p->tensor[i]->size * sizeof *to);
                        to += p->tensor[i]->size;
                    }
                    stx_download(x, to, s->c, d.layers * B * m->O);
                    free(piece);
                }
                peak[r] = stx_peak_bytes(x);
                stx_sru_state_free(s);
                stx_destroy(x);
            }
            CHECK(got[0] && got[1] && difference(got[0], got[1], n) == 0,
                  "%s, dropout %d: made again, off by %g", name, drop,
                  got[0] && got[1] ? difference(got[0], got[1], n) : NAN);
            CHECK(peak[1] < peak[0], "%s: %zu bytes made again, %zu kept", name, peak[1], peak[0]);
            free(got[0]);
            free(got[1]);
            free(v);
        }
}

/* ... and through stx_sru_forward: gradients of x, states and memories, padding of
   both, a window, a transform of one's own */
typedef struct own_products {
    stx_tensor *w[3], *g[3];
    int calls;
} own_products;

static int own_planes(stx_ctx *x, void *user, size_t l, stx_tensor *in, stx_tensor **U,
                      stx_tensor **V_) {
    own_products *o = (own_products *)user;
    o->calls++;
    *U = stx_linear(x, in, o->w[l], NULL, STX_ACT_NONE);
    *V_ = stx_reshape(x, stx_linear(x, in, o->g[l], NULL, STX_ACT_NONE), in->dim[0], in->dim[1], 2,
                      12);
    return 1;
}

static void recomputed_forward(void) {
    enum { B = 3, T = 20, M = 9, N = 3 };

    static const size_t length[B] = {20, 13, 1};
    int k, pads;
    for (k = 0; k <= STACKS; k++)
        for (pads = 0; pads < 2; pads++) {
            const char *name;
            stx_real *v = random_of(B * (T + M) * 12 + N * B * 12, 3), *got[2];
            size_t n = 0, peak[2];
            int r;
            for (r = 0; r < 2; r++) {
                stx_sru_desc d = stack(k % STACKS, &name);
                stx_ctx *x = context(2, 5);
                stx_params *p = stx_params_create(x);
                own_products own;
                stx_sru *m;
                stx_sru_io io;
                stx_tensor *in, *c0[N], *mem[N], *last[N], *inputs[N], *h, *loss;
                stx_real *at;
                size_t l, i, j;
                int32_t hidden[B * M];
                memset(&own, 0, sizeof own);
                if (k == STACKS) {
                    d.custom = own_planes;
                    d.user = &own;
                }
                if (pads && d.norm == STX_SRU_NORM_AFTER) d.zero_pads = 1;
                d.recompute = r;
                m = stx_sru_create(p, "", &d);
                CHECK(m != NULL, "%s: %s", name, stx_error(x));
                for (l = 0; k == STACKS && l < N; l++) {
                    char key[16];
                    snprintf(key, sizeof key, "own%zu", l);
                    own.w[l] = stx_param(p, STX_NORMAL, 0.3, key, 36, 12, 0, 0);
                    snprintf(key, sizeof key, "gate%zu", l);
                    own.g[l] = stx_param(p, STX_NORMAL, 0.3, key, 24, 12, 0, 0);
                }
                /* a norm's shift is 0 at first: padding would be, too */
                for (i = 0; i < p->count; i++)
                    if (strstr(p->name[i], "norm") && strstr(p->name[i], "bias"))
                        for (j = 0; j < p->tensor[i]->size; j++)
                            p->tensor[i]->data[j] = (stx_real)(0.1 * (double)(j % 5) - 0.3);
                stx_begin(x, STX_TRAIN);
                memset(&io, 0, sizeof io);
                in = stx_variable(x, v, B, T, d.input, 0);
                for (l = 0; l < N; l++) {
                    c0[l] = stx_variable(x, v + B * (T + M) * 12 + l * B * 12, B, m->O, 0, 0);
                    mem[l] = m->layer[l].attends
                                 ? stx_variable(x, v + B * T * 12 - l, B, M, m->layer[l].Ci, 0)
                                 : NULL;
                }
                for (i = 0; i < B * M; i++) hidden[i] = i % M >= M - i / M;
                io.c0 = c0;
                io.memory = mem;
                io.last = last;
                io.inputs = inputs;
                if (pads) {
                    io.pad = stx_sru_lengths(x, length, B, T);
                    for (l = 0; l < N; l++)
                        if (mem[l]) io.memory_pad = stx_tokens(x, hidden, B, M);
                    io.window = 7;
                }
                h = stx_sru_forward(m, in, &io);
                CHECK(h && stx_ok(x), "%s: %s", name, stx_error(x));
                loss = stx_mean(x, stx_mul(x, h, stx_add(x, h, stx_sigmoid(x, h))));
                loss = stx_add(x, loss, stx_mean(x, stx_mul(x, inputs[2], inputs[2])));
                /* states are results like h */
                for (l = 0; l < N; l++)
                    loss = stx_add(x, loss, stx_mean(x, stx_mul(x, last[l], last[l])));
                n = h->size + in->size + stx_params_size(p) + N * 2 * B * m->O + N * B * M * 12;
                got[r] = (stx_real *)calloc(n, sizeof **got);
                at = got[r];
                memcpy(at, h->data, h->size * sizeof *at);
                at += h->size;
                for (l = 0; l < N; l++) {
                    memcpy(at, last[l]->data, last[l]->size * sizeof *at);
                    at += last[l]->size;
                }
                stx_backward(x, loss);
                CHECK(stx_ok(x), "%s: %s", name, stx_error(x));
                for (l = 0; l < N; l++)
                    CHECK(!memcmp(at - (N - l) * B * m->O, last[l]->data,
                                  last[l]->size * sizeof *at),
                          "%s: backward changes the states", name);
                memcpy(at, in->grad, in->size * sizeof *at);
                at += in->size;
                for (l = 0; l < N; l++) {
                    CHECK(c0[l]->grad && (!mem[l] || mem[l]->grad),
                          "%s: no gradient of layer %zu's state or memory", name, l);
                    if (c0[l]->grad) memcpy(at, c0[l]->grad, c0[l]->size * sizeof *at);
                    at += c0[l]->size;
                    if (mem[l] && mem[l]->grad) {
                        memcpy(at, mem[l]->grad, mem[l]->size * sizeof *at);
                        at += mem[l]->size;
                    }
                }
                for (i = 0; i < p->count; i++) {
                    memcpy(at, p->tensor[i]->grad, p->tensor[i]->size * sizeof *at);
                    at += p->tensor[i]->size;
                }
                if (k == STACKS)
                    CHECK(own.calls == N * (1 + r), "the transform was called %d times", own.calls);
                peak[r] = stx_peak_bytes(x);
                stx_destroy(x);
            }
            CHECK(difference(got[0], got[1], n) == 0, "%s, padding %d: made again, off by %g",
                  k == STACKS ? "custom" : name, pads, difference(got[0], got[1], n));
            CHECK(peak[1] < peak[0], "%s: %zu bytes made again, %zu kept", name, peak[1], peak[0]);
            free(got[0]);
            free(got[1]);
            free(v);
        }
}

/* STX_SRU_LITERAL means the form that the model can have, here none */
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

/* Memory that is not normalised under a cell norm: then parts are not the whole */
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
        e = difference(a, b, 2 * 24 * 12);
        CHECK(k ? e > 1e-3 : e <= TOL, "literal %d: parts and whole differ by %g", k, e);
        free(a);
        free(b);
        free(v);
        stx_destroy(x);
    }
}

/* Two directions are two runs, one of them on the reversed sequence, each with its
   half of the weights */
static void directions(void) {
    int skip;
    for (skip = 0; skip < 2; skip++) {
        stx_ctx *x = context(2, 9);
        stx_params *p = stx_params_create(x);
        stx_sru_desc d;
        stx_sru *m;
        const size_t B = 2, T = 37, H = 5, O = 10, I = skip ? 10 : 7;
        size_t k, s, b, t, j, i;
        stx_real *v = random_of(B * T * I, 4), *all, *half, *back = random_of(B * T * I, 4);
        stx_tensor *h;
        memset(&d, 0, sizeof d);
        d.input = I;
        d.hidden = H;
        d.layers = 1;
        d.bidirectional = 1;
        d.highway_bias = 0.3;
        m = stx_sru_create(p, "", &d);
        CHECK(m && m->layer[0].k == (skip ? 3u : 4u), "directions: %s", stx_error(x));
        if (!m) return;
        k = m->layer[0].k;
        stx_begin(x, STX_EVAL);
        h = stx_sru_forward(m, stx_input(x, v, B, T, I, 0), NULL);
        CHECK(h != NULL, "directions: %s", stx_error(x));
        all = (stx_real *)malloc(h->size * sizeof *all);
        stx_get(x, h, all);
        for (b = 0; b < B; b++)
            for (t = 0; t < T; t++)
                memcpy(back + (b * T + t) * I, v + (b * T + T - 1 - t) * I, I * sizeof *v);
        for (s = 0; s < 2; s++) {
            stx_sru_recurrence_in c;
            stx_tensor *w = stx_new(x, k * H, I, 0, 0), *u, *xr = stx_new(x, B, T, H, 0),
                       *gv = stx_new(x, 2, H, 0, 0), *gb = stx_new(x, 2, H, 0, 0);
            double e = 0;
            for (i = 0; i < k; i++)
                memcpy(w->data + i * H * I, m->layer[0].w3->data + (i * O + s * H) * I,
                       H * I * sizeof(stx_real));
            for (i = 0; i < 2; i++) {
                memcpy(gv->data + i * H, m->layer[0].v->data + i * O + s * H, H * sizeof(stx_real));
                memcpy(gb->data + i * H, m->layer[0].bias->data + i * O + s * H,
                       H * sizeof(stx_real));
            }
            for (i = 0; skip && i < B * T; i++)
                memcpy(xr->data + i * H, (s ? back : v) + i * I + s * H, H * sizeof(stx_real));
            memset(&c, 0, sizeof c);
            u = stx_linear(x, stx_input(x, s ? back : v, B, T, I, 0), w, NULL, STX_ACT_NONE);
            c.u = stx_reshape(x, u, B, T, k, H);
            c.xr = skip ? xr : NULL;
            c.v = gv;
            c.bias = gb;
            h = stx_sru_recurrence(x, &c, NULL);
            half = h->data;
            for (b = 0; b < B; b++)
                for (t = 0; t < T; t++)
                    for (j = 0; j < H; j++) {
                        double q = fabs((double)half[(b * T + (s ? T - 1 - t : t)) * H + j]
                                        - (double)all[(b * T + t) * O + s * H + j]);
                        if (!(q <= e)) e = q;
                    }
            CHECK(e <= TOL, "direction %zu, skip %d: off by %g", s, skip, e);
        }
        free(v);
        free(all);
        free(back);
        stx_destroy(x);
    }
}

/* Chunks of time in parallel give what the walk gives, and threads change nothing
   otherwise */
static void chunks(void) {
    /* B T H D */
    static const size_t s[][4] = {
        {1, 999, 3, 1}, {1, 400, 16, 2}, {2, 257, 5, 1}, {1, 70, 600, 1}, {3, 33, 40, 2}};
    int i, v1, k;
    /* v1 & 2: forget gates near 1, so that a chunk's state is felt in the next ones */
    for (i = 0; i < 5; i++)
        for (v1 = 0; v1 < 4; v1++) {
            const size_t B = s[i][0], T = s[i][1], H = s[i][2], D = s[i][3], O = H * D;
            stx_real *u = random_of(B * T * 3 * O, 1), *xr = random_of(B * T * O, 2),
                     *v = random_of(2 * O, 3), *dy = random_of(B * T * O, 4), *got[3][4];
            int32_t *pad = (int32_t *)calloc(B * T, sizeof *pad);
            size_t n[4], j;
            stx_real *bias = random_of(2 * O, 5);
            for (j = 0; j < O && v1 & 2; j++) bias[j] += 7;
            for (j = 0; j < B * T; j++) pad[j] = i == 2 && (j % 11 == 3 || (j > 64 && j < 100));
            n[0] = B * T * O;
            n[1] = B * T * 3 * O;
            n[2] = 2 * O;
            n[3] = B * O;
            for (k = 0; k < 3; k++) {
                stx_ctx *x = context(k == 0 ? 1 : k == 1 ? 7 : 64, 1);
                stx_sru_recurrence_in c;
                stx_tensor *h, *last;
                stx_begin(x, STX_TRAIN);
                memset(&c, 0, sizeof c);
                c.u = stx_variable(x, u, B, T, 3, O);
                c.xr = stx_variable(x, xr, B, T, O, 0);
                c.v = v1 & 1 ? NULL : stx_variable(x, v, 2, O, 0, 0);
                c.bias = stx_variable(x, bias, 2, O, 0, 0);
                c.directions = D;
                c.pad = stx_tokens(x, pad, B, T);
                h = stx_sru_recurrence(x, &c, &last);
                CHECK(h && last, "chunks: %s", stx_error(x));
                stx_backward_from(x, stx_add(x, h, stx_scale(x, h, 0.5)), dy);
                for (j = 0; j < 4; j++) {
                    const stx_real *from = j == 0   ? h->data
                                           : j == 1 ? c.u->grad
                                           : j == 2 ? c.bias->grad
                                                    : last->data;
                    got[k][j] = (stx_real *)malloc(n[j] * sizeof(stx_real));
                    memcpy(got[k][j], from, n[j] * sizeof(stx_real));
                }
                stx_destroy(x);
            }
            for (k = 1; k < 3; k++)
                for (j = 0; j < 4; j++) {
                    double top = 1, e = difference(got[0][j], got[k][j], n[j]);
                    size_t q;
                    for (q = 0; q < n[j]; q++)
                        if (fabs((double)got[0][j][q]) > top) top = fabs((double)got[0][j][q]);
                    CHECK(e <= TOL * top, "chunks, shape %d v1 %d, array %zu: off by %g of %g", i,
                          v1, j, e, top);
                    if (O * B >= 2 * 7 * 16 && k == 1)
                        CHECK(e == 0, "threads alone change bits: shape %d array %zu", i, j);
                }
            for (k = 0; k < 3; k++)
                for (j = 0; j < 4; j++) free(got[k][j]);
            free(u);
            free(xr);
            free(v);
            free(bias);
            free(dy);
            free(pad);
        }
}

/* frees plain */
static void as_plain(const char *what, const stx_real *have, stx_real *plain, size_t n) {
    double top = 1, e = difference(have, plain, n);
    size_t i;
    for (i = 0; i < n; i++)
        if (fabs((double)plain[i]) > top) top = fabs((double)plain[i]);
    CHECK(e <= TOL * top, "kernels: %s: off by %g of %g from the plain definition", what, e, top);
    free(plain);
}

/* The kernels alone, by their declarations, against their plain definition; overruns
   of every array are seen by the sanitizer's red zones of separate blocks */
static void kernels_alone(void) {
    static const size_t s[][4] = {
        {1, 1, 1, 1}, {2, 33, 17, 1}, {1, 64, 1100, 1}, {2, 5, 515, 2}, {1, 300, 2, 2}};
    int i, k, opts;
    for (i = 0; i < 5; i++)
        for (k = 3; k < 5; k++)
            for (opts = 0; opts < 8; opts++) {
                const size_t B = s[i][0], T = s[i][1], D = s[i][3], O = s[i][2] * D;
                stx_ctx *x = context(3, 1);
                stx_sru_args a, plain;
                double *state = (double *)malloc((T + 1) * sizeof *state);
                stx_real *u = random_of(B * T * (size_t)k * O, 1), *xr = random_of(B * T * O, 2),
                         *v = random_of(2 * O, 3), *gv = random_of(B * T * 2 * O, 4),
                         *h = random_of(B * T * O, 5), *last = random_of(B * O, 6);
                stx_real *du = random_of(B * T * (size_t)k * O, 1), *dx = random_of(B * T * O, 2),
                         *dV = random_of(B * T * 2 * O, 1), *dv = random_of(2 * O, 1),
                         *db = random_of(2 * O, 1), *dc = random_of(B * O, 1),
                         *was = random_of(B * T * O, 2), *c, *wf, *wb;
                double e = 0;
                size_t j;
                memset(&a, 0, sizeof a);
                a.B = B;
                a.T = T;
                a.H = O / D;
                a.D = D;
                a.k = (size_t)k;
                a.alpha = (stx_real)1.5;
                a.tanh = opts & 1;
                a.u = u;
                a.xr = k == 3 ? xr : NULL;
                a.v = opts & 2 ? v : NULL;
                a.bias = v;
                a.V = opts & 4 ? gv : NULL;
                a.h = h;
                a.last = last;
                c = random_of(B * stx_sru_tiles(&a) * O, 7);
                a.c = c;
                wf = (stx_real *)malloc(stx_sru_work(x, &a, 0) + 1);
                wb = (stx_real *)malloc(stx_sru_work(x, &a, 1) + 1);
                a.work = wf;
                stx_sru_fwd(x, &a);
                a.work = wb;
                a.dh = u;
                a.dlast = v;
                if (O * B > 2 * O) a.dlast = last;
                a.du = du;
                a.dV = a.V ? dV : NULL;
                a.dxr = k == 3 ? dx : NULL;
                a.dv = a.v ? dv : NULL;
                a.dbias = db;
                a.dc0 = dc;
                stx_sru_bwd(x, &a);
                plain = a; /* what is added to begins as above */
                plain.h = random_of(B * T * O, 5);
                plain.last = random_of(B * O, 6);
                plain.c = random_of(B * stx_sru_tiles(&a) * O, 7);
                plain.du = random_of(B * T * (size_t)k * O, 1);
                plain.dV = a.V ? random_of(B * T * 2 * O, 1) : NULL;
                plain.dxr = k == 3 ? random_of(B * T * O, 2) : NULL;
                plain.dv = a.v ? random_of(2 * O, 1) : NULL;
                plain.dbias = random_of(2 * O, 1);
                plain.dc0 = random_of(B * O, 1);
                stx_sru_fwd_plain(&plain, state);
                stx_sru_bwd_plain(&plain, state);
                as_plain("h", h, plain.h, B * T * O);
                as_plain("last", last, plain.last, B * O);
                as_plain("c", c, plain.c, B * stx_sru_tiles(&a) * O);
                as_plain("du", du, plain.du, B * T * (size_t)k * O);
                as_plain("dbias", db, plain.dbias, 2 * O);
                as_plain("dc0", dc, plain.dc0, B * O);
                if (a.V) as_plain("dV", dV, plain.dV, B * T * 2 * O);
                if (a.v) as_plain("dv", dv, plain.dv, 2 * O);
                if (k == 3) as_plain("dxr", dx, plain.dxr, B * T * O);
                a.dxr = k == 3 ? was : NULL;
                a.add_xr = 1;
                stx_sru_bwd(x, &a);
                for (j = 0; k == 3 && j < B * T * O; j++) {
                    test_rand();
                    /* was began as xr: the same seed */
                    if (!(fabs((double)(was[j] - dx[j]) - (double)xr[j]) <= e))
                        e = fabs((double)(was[j] - dx[j]) - (double)xr[j]);
                }
                CHECK(e <= TOL, "kernels: dxr added and written differ by %g", e);
                for (j = 0, e = 0; j < B * T * O; j++) e += fabs((double)h[j]);
                CHECK(e > 0 && e < 1e30, "kernels: h");
                free(u);
                free(xr);
                free(v);
                free(gv);
                free(h);
                free(last);
                free(du);
                free(dx);
                free(dV);
                free(dv);
                free(db);
                free(dc);
                free(was);
                free(c);
                free(wf);
                free(wb);
                free(state);
                stx_destroy(x);
            }
}

/* Language models */
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

static stx_real *logits(stx_sru_lm *m, const int32_t *t, size_t B, size_t n, size_t window) {
    stx_ctx *x = m->ctx;
    stx_sru_state *s = stx_sru_state_create(m->sru, B);
    stx_real *all = (stx_real *)calloc(B * n * V, sizeof *all);
    stx_tensor *y;
    s->window = window;
    stx_begin(x, STX_EVAL);
    y = stx_vocab_io_scores(m->vocab_io, stx_sru_lm_forward(m, block(x, t, B, n, 0, n), s, NULL));
    CHECK(y && y->size == B * n * V, "logits: %s", stx_error(x));
    if (y) stx_get(x, y, all);
    stx_sru_state_free(s);
    return all;
}

static void generation(void) {
    const size_t B = 2, n = 150, window = 9;
    int k;
    for (k = 0; k < MODELS; k++) {
        const char *name;
        stx_sru_lm_desc d = model(k, &name);
        stx_ctx *x = context(2, 7);
        stx_sru_lm *m = stx_sru_lm_create(x, &d);
        int32_t *t = text(B * n, 5), one[2];
        stx_real *all, *part;
        stx_sru_gen *g;
        size_t at, bytes = 0, b;
        double worst = 0, e;
        CHECK(m != NULL, "%s: %s", name, stx_error(x));
        if (!m) continue;
        all = logits(m, t, B, n, window);
        g = stx_sru_gen_create(m, B, window);
        CHECK(g != NULL, "%s: %s", name, stx_error(x));
        for (at = 0; g && at < n; at++) {
            const stx_real *y;
            for (b = 0; b < B; b++) one[b] = t[b * n + at];
            y = stx_sru_gen_feed(g, one, 1);
            CHECK(y != NULL, "%s token %zu: %s", name, at, stx_error(x));
            if (!y) break;
            for (b = 0; b < B; b++) {
                e = difference(y + b * V, all + (b * n + at) * V, V);
                if (!(e <= worst)) worst = e;
            }
            if (at == 20) bytes = stx_bytes(x);
        }
        CHECK(worst <= TOL, "%s: token by token off by %g", name, worst);
        CHECK(bytes == stx_bytes(x), "%s: generation keeps allocating", name);
        stx_sru_gen_reset(g); /* in pieces longer than a chunk, and what is left */
        part = columns(all, B, n, 0, 0, V);
        free(part);
        {
            int32_t *head = (int32_t *)malloc(B * 131 * sizeof *head),
                    *tail = (int32_t *)malloc(B * 19 * sizeof *tail);
            const stx_real *y;
            for (b = 0; b < B; b++) {
                memcpy(head + b * 131, t + b * n, 131 * sizeof *t);
                memcpy(tail + b * 19, t + b * n + 131, 19 * sizeof *t);
            }
            y = stx_sru_gen_feed(g, head, 131);
            for (worst = 0, b = 0; y && b < B; b++) {
                e = difference(y + b * V, all + (b * n + 130) * V, V);
                if (!(e <= worst)) worst = e;
            }
            CHECK(y && worst <= TOL, "%s: 131 at once off by %g", name, worst);
            y = stx_sru_gen_feed(g, tail, 19);
            for (worst = 0, b = 0; y && b < B; b++) {
                e = difference(y + b * V, all + (b * n + 149) * V, V);
                if (!(e <= worst)) worst = e;
            }
            CHECK(y && worst <= TOL, "%s: the rest off by %g", name, worst);
            free(head);
            free(tail);
        }
        stx_sru_gen_free(g);
        { /* causality: another token later changes nothing before, and something after */
            stx_real *other;
            t[60] = (t[60] + 1) % V;
            other = logits(m, t, B, n, window);
            CHECK(difference(all, other, 60 * V) == 0, "%s: the past feels the future", name);
            CHECK(difference(all + 60 * V, other + 60 * V, V) > 1e-6, "%s: nothing feels the token",
                  name);
            CHECK(difference(all + n * V, other + n * V, n * V) == 0, "%s: another stream feels it",
                  name);
            free(other);
        }
        CHECK(stx_ok(x), "%s: %s", name, stx_error(x));
        free(all);
        free(t);
        stx_destroy(x);
    }
}

/* One plain training step on tokens [at, at+T] */
static double step(stx_sru_lm *m, stx_optim *o, stx_sru_state *s, const int32_t *t, size_t B,
                   size_t n, size_t at, size_t T, double lr) {
    stx_ctx *x = m->ctx;
    stx_tensor *loss;
    double v;
    stx_begin(x, STX_TRAIN);
    loss = stx_sru_lm_loss(m, block(x, t, B, n, at, T), block(x, t, B, n, at + 1, T), s, s);
    v = stx_item(x, loss);
    stx_backward(x, loss);
    stx_optim_step(o, lr);
    return v;
}

static void training(void) {
    int k;
    for (k = 0; k < 3; k++) { /* SRU++, plain with projections, adaptive */
        const char *name;
        stx_sru_lm_desc d = model(k == 0 ? 7 : k == 1 ? 4 : STACKS, &name);
        const size_t B = 2, T = 16, n = 33;
        int32_t *t = text(B * n, 5);
        double first = 0, last = 0, one[20], two[20];
        stx_real *p1 = NULL;
        int run, i;
        char path[1024];
        d.sru.layers = 2;
        d.dropout = k == 0 ? 0.1 : 0;
        d.emb_dropout = k == 2 ? 0.1 : 0;
        d.sru.attn_dropout = k == 0 ? 0.1 : 0;
        for (run = 0; run < 2; run++) { /* the same bits again */
            stx_ctx *x = context(2, 3);
            stx_sru_lm *m = stx_sru_lm_create(x, &d);
            stx_optim_desc od;
            stx_optim *o;
            stx_sru_state *s = stx_sru_state_create(m->sru, B);
            memset(&od, 0, sizeof od);
            od.kind = STX_RADAM;
            od.clip = 1;
            o = stx_optim_create(m->params, &od);
            for (i = 0; i < 20; i++)
                (run ? two : one)[i] = step(m, o, s, t, B, n, (size_t)(i % 2) * T, T, 0.01);
            if (!run) {
                p1 = (stx_real *)malloc(m->params->tensor[0]->size * sizeof *p1);
                stx_get(x, m->params->tensor[0], p1);
            } else
                CHECK(!memcmp(p1, m->params->tensor[0]->data,
                              m->params->tensor[0]->size * sizeof *p1)
                          && !memcmp(one, two, sizeof one),
                      "%s: a run does not repeat", name);
            CHECK(stx_ok(x), "%s: %s", name, stx_error(x));
            stx_destroy(x);
        }
        free(p1);
        /* stop after 7 steps, go on from the file: run 0 never stops, 1 writes, 2 goes
           on */
        for (run = 0; run < 3; run++) {
            stx_ctx *x = context(2, 3);
            stx_sru_lm *m = stx_sru_lm_create(x, &d);
            stx_optim_desc od;
            stx_optim *o;
            stx_sru_state *s = stx_sru_state_create(m->sru, B);
            memset(&od, 0, sizeof od);
            od.kind = STX_RADAM;
            o = stx_optim_create(m->params, &od);
            test_path(path, sizeof path, "test_sru");
            if (run == 2) {
                stx_file *f = stx_file_open(x, path);
                CHECK(f && stx_params_load(m->params, f, "") && stx_optim_load(o, f)
                          && stx_sru_state_load(s, f, "state."),
                      "%s: %s", name, stx_error(x));
                stx_file_close(f);
                stx_set_step_index(x, 7);
            }
            for (i = run == 2 ? 7 : 0; i < (run == 1 ? 7 : 20); i++) {
                double v = step(m, o, s, t, B, n, (size_t)(i % 2) * T, T, 0.01);
                if (run == 0)
                    one[i] = v;
                else
                    CHECK(one[i] == v, "%s: step %d after resuming has loss %.9g, not %.9g", name,
                          i, v, one[i]);
            }
            if (run == 1) {
                stx_writer *w = stx_writer_create(x);
                CHECK(stx_params_save(w, m->params, "") && stx_optim_save(w, o)
                          && stx_sru_state_save(w, s, "state.") && stx_writer_finish(w, path),
                      "%s: %s", name, stx_error(x));
            }
            stx_destroy(x);
        }
        remove(path);
        d.dropout = d.emb_dropout = d.sru.attn_dropout = 0;
        { /* learns a batch by heart; an evaluation in between changes nothing */
            stx_ctx *x = context(2, 3);
            stx_sru_lm *m = stx_sru_lm_create(x, &d);
            stx_optim_desc od;
            stx_optim *o;
            stx_sru_state *s = stx_sru_state_create(m->sru, B),
                          *e = stx_sru_state_create(m->sru, B);
            memset(&od, 0, sizeof od);
            o = stx_optim_create(m->params, &od);
            for (i = 0; i < 400; i++) {
                stx_sru_state_reset(s);
                last = step(m, o, s, t, B, n, 0, T, 0.01);
                if (!i) first = last;
            }
            CHECK(first > 2.5 && last < 0.1 * first, "%s: loss from %g to %g", name, first, last);
            {
                stx_real *c = random_of(m->sru->desc.layers * B * m->sru->O, 1),
                         *c2 = random_of(m->sru->desc.layers * B * m->sru->O, 1);
                stx_download(x, c, s->c, m->sru->desc.layers * B * m->sru->O);
                stx_begin(x, STX_EVAL);
                CHECK(stx_sru_lm_loss(m, block(x, t, B, n, 0, T), block(x, t, B, n, 1, T), e, e)
                          != NULL,
                      "%s", stx_error(x));
                stx_begin(x, STX_EVAL);
                CHECK(stx_sru_lm_loss(m, block(x, t, B, n, 0, T), block(x, t, B, n, 1, T), s, NULL)
                          != NULL,
                      "%s", stx_error(x));
                stx_download(x, c2, s->c, m->sru->desc.layers * B * m->sru->O);
                CHECK(!memcmp(c, c2, m->sru->desc.layers * B * m->sru->O * sizeof *c),
                      "%s: evaluation writes the training's state", name);
                free(c);
                free(c2);
            }
            stx_destroy(x);
        }
        free(t);
    }
}

/* Which dropout is where: with one plain layer only the embedding's and the output's
   are left */
static void dropouts(void) {
    /* dropout, io_dropout, felt */
    static const double set[5][3] = {
        {0.3, -1, 0}, {0.3, 0, 1}, {0, 0.5, 1}, {0, 0, 0}, {0.5, 0.2, 1}};
    int i, k;
    for (k = 0; k < 2; k++)
        for (i = 0; i < 5; i++) {
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
            CHECK(h
                      && (difference(one, h->data, h->size) > 0)
                             == (set[i][2] > 0 || (k && set[i][0] > 0)),
                  "dropout %g, io_dropout %g, %d "
                  "layers: %s",
                  set[i][0], set[i][1], k + 1, stx_error(x));
            stx_destroy(x);
        }
}

/* Every dropout, by hand: which probability goes where, drawn once for all times or
   not, in the order in which it is drawn */
static void dropouts_by_hand(void) {
    int plus;
    for (plus = 0; plus < 2; plus++) {
        stx_sru_lm_desc d;
        stx_ctx *x = context(1, 3);
        stx_sru_lm *m;
        stx_sru_state *s;
        int32_t t[24];
        stx_real got[2 * 12 * 8] = {0};
        stx_tensor *h, *ones, *y, *mem[2], *in[2];
        size_t l;
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
        if (h) stx_get(x, h, got);
        stx_set_step_index(x, 40);
        stx_begin(x, STX_TRAIN);
        for (l = 0; l < 2; l++) {
            mem[l] = plus ? stx_input(x, s->memory->layer[l].data, 2, 12, 8, 0) : NULL;
            in[l] = stx_input(x, s->c + l * 16, 2, 8, 0, 0);
        }
        h = stx_dropout(x, stx_embedding(x, m->vocab_io->in_emb, stx_tokens(x, t, 2, 12)), 0.45);
        for (l = 0; l < 2 && h; l++) {
            const stx_sru_layer *p = &m->sru->layer[l];
            stx_sru_recurrence_in c;
            stx_tensor *z, *zn;
            memset(&c, 0, sizeof c);
            y = stx_dropout_variational(x, h, 0.15);
            if (l == 0) {
                ones = stx_new_f32(x, 2, 8, 0, 0);
                stx_fill(x, ones->data, 16, 1);
                c.mask = stx_dropout(x, ones, 0.3);
            }
            if (plus) {
                stx_attention_in a;
                stx_attention_desc ad;
                memset(&a, 0, sizeof a);
                memset(&ad, 0, sizeof ad);
                z = stx_linear(x, y, p->w1, NULL, STX_ACT_NONE);
                zn = stx_concat(x, stx_linear(x, mem[l], p->w1, NULL, STX_ACT_NONE), z);
                a.q = z;
                a.kv = stx_linear(x, zn, p->w2, NULL, STX_ACT_NONE);
                ad.heads = 1;
                ad.dropout = 0.2;
                y = stx_layernorm(x, stx_rezero(x, z, stx_attention(x, &a, &ad), p->alpha_attn),
                                  p->attn_gain, p->attn_shift, 1e-5);
                y = stx_dropout(x, y, 0.3);
            }
            c.u = stx_reshape(x, stx_linear(x, y, p->w3, NULL, STX_ACT_NONE), 2, 12, 3, 8);
            c.xr = h;
            c.v = p->v;
            c.bias = p->bias;
            c.c0 = in[l];
            h = stx_sru_recurrence(x, &c, NULL);
        }
        h = stx_dropout(x, h, 0.45);
        CHECK(h && difference(h->data, got, 2 * 12 * 8) == 0,
              "dropouts by hand, SRU%s: off by %g %s", plus ? "++" : "",
              h ? difference(h->data, got, 2 * 12 * 8) : -1.0, stx_error(x));
        stx_destroy(x);
    }
}

/* Padding in a memory that is kept over several segments, and k = 4 with rescale */
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
    CHECK(h && difference(h->data, parts, B * n * 12) <= TOL,
          "padding kept over segments: off by %g",
          h ? difference(h->data, parts, B * n * 12) : -1.0);
    free(v);
    free(parts);
    stx_destroy(x);
}

/* Steady state: no allocation, and the key of a step knows the state */
static void steady(void) {
    const char *name;
    stx_sru_lm_desc d = model(6, &name);
    stx_ctx *x = context(2, 3);
    stx_sru_lm *m = stx_sru_lm_create(x, &d);
    stx_optim *o = stx_optim_create(m->params, NULL);
    stx_sru_state *s = stx_sru_state_create(m->sru, 2);
    int32_t *t = text(2 * 200, 5);
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
          "keys: the first step has no memory, the others are alike");
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

/* Largest magnitudes of fresh parameters: bounds, nearly reached */
static double largest(const stx_tensor *t, size_t r0, size_t rows) {
    double top = 0;
    size_t i, C = t->size / t->dim[0];
    for (i = r0 * C; i < (r0 + rows) * C; i++)
        if (fabs((double)t->data[i]) > top) top = fabs((double)t->data[i]);
    return top;
}

static void near_(double have, double bound, const char *what) {
    CHECK(have <= bound * 1.000001 && have >= 0.99 * bound, "%s: largest %.5f, bound %.5f", what,
          have, bound);
}

static void initialisers(void) {
    stx_ctx *x = context(1, 11);
    stx_sru_desc d;
    stx_sru *m;
    size_t i;
    memset(&d, 0, sizeof d);
    d.input = d.hidden = 256;
    m = stx_sru_create(stx_params_create(x), "", &d);
    near_(largest(m->layer[0].w3, 0, 256), sqrt(3.0 / 256), "W0");
    near_(largest(m->layer[0].w3, 256, 256), sqrt(1.5 / 256), "W1");
    near_(largest(m->layer[0].w3, 512, 256), sqrt(1.5 / 256), "W2");
    near_(largest(m->layer[0].v, 0, 2), sqrt(1.5), "v");
    CHECK(largest(m->layer[0].bias, 0, 2) == 0 && (double)m->layer[0].alpha == 1,
          "bias 0, alpha 1");
    d.dropout = 0.3;
    m = stx_sru_create(stx_params_create(x), "", &d);
    near_(largest(m->layer[0].w3, 0, 256), sqrt(3.0 / 256 * 0.7), "W0 with dropout");
    near_(largest(m->layer[1].w3, 0, 256), sqrt(3.0 / 256), "W0 of the last layer");
    d.rnn_dropout = 0.2;
    d.norm = STX_SRU_NORM_AFTER;
    d.dropout = 0;
    m = stx_sru_create(stx_params_create(x), "", &d);
    near_(largest(m->layer[0].w3, 0, 256), 0.1 * sqrt(3.0 / 256 * 0.8),
          "W0 with norm and rnn dropout");
    memset(&d, 0, sizeof d);
    d.input = 256;
    d.hidden = 128;
    d.rescale = 1;
    d.highway_bias = -2;
    d.v_init = 0.25;
    m = stx_sru_create(stx_params_create(x), "", &d);
    CHECK(m->layer[0].k == 4 && m->layer[1].k == 3, "k");
    near_(largest(m->layer[0].w3, 3 * 128, 128), sqrt(3.0 / 256) * sqrt(1 + 2 * exp(-2)),
          "W3 with k 4");
    near_(largest(m->layer[0].v, 0, 2), 0.25, "v by v_init");
    CHECK((double)m->layer[0].alpha == 1
              && fabs((double)m->layer[1].alpha - sqrt(1 + 2 * exp(-2))) < 1e-6,
          "alpha: only where x is raw");
    for (i = 0; i < 128; i++)
        CHECK((double)m->layer[0].bias->data[i] == 0
                  && (double)m->layer[0].bias->data[128 + i] == -2,
              "bias");
    d.v1 = 1;
    m = stx_sru_create(stx_params_create(x), "", &d);
    CHECK(!m->layer[0].v, "v1 has no v");
    near_(largest(m->layer[0].w3, 128, 128), sqrt(3.0 / 256), "W1 of v1");
    memset(&d, 0, sizeof d);
    d.input = 256;
    d.transform = STX_SRU_ATTENTION;
    d.dropout = 0.2;
    d.attention_every = 2;
    m = stx_sru_create(stx_params_create(x), "", &d);
    CHECK(m->layer[0].P == 64 && !m->layer[0].attends && m->layer[1].attends && !m->layer[0].w2
              && m->layer[1].w2,
          "attention every 2");
    near_(largest(m->layer[1].w1, 0, 64), sqrt(6.0 / 320), "w1");
    near_(largest(m->layer[1].w2, 0, 128), sqrt(2.0 / 64), "w2");
    near_(largest(m->layer[1].w3, 0, 768), sqrt(6.0 / 832) * sqrt(0.8), "w3");
    near_(largest(m->layer[1].v, 0, 2), 1, "v of SRU++");
    CHECK((double)m->layer[1].alpha_attn->data[0] == 0 && (double)m->layer[0].bias->data[256] == 0
              && (double)m->layer[0].attn_gain->data[63] == 1,
          "alpha 0, highway bias 0, gain 1");
    { /* the highway's bias is what the desc says, 0 as well, in the stack and in the language model; read back it is the same */
        static const double bias[] = {0, -2, -3, 0.5};
        stx_sru_lm_desc ld;
        stx_sru_lm *lm;
        int k, plus;
        for (k = 0; k < 4; k++)
            for (plus = 0; plus < 2; plus++) {
                memset(&ld, 0, sizeof ld);
                ld.vocab = 11;
                ld.dim = 8;
                ld.sru.transform = plus ? STX_SRU_ATTENTION : STX_SRU_LINEAR;
                ld.sru.highway_bias = bias[k];
                ld.sru.rescale = 1;
                lm = stx_sru_lm_create(x, &ld);
                CHECK(lm && lm->desc.sru.highway_bias == bias[k],
                      "highway_bias %g is read back as %g", bias[k],
                      lm ? lm->desc.sru.highway_bias : 0);
                for (i = 0; lm && i < 8; i++) {
                    const stx_real *first = lm->sru->layer[1].bias->data;
                    CHECK((double)first[8 + i] == bias[k], "highway_bias %g begins with %g",
                          bias[k], (double)first[8 + i]);
                    CHECK((double)first[i] == 0, "the forget gate's bias begins with %g",
                          (double)first[i]);
                }
                CHECK(lm
                          && fabs((double)lm->sru->layer[1].alpha - sqrt(1 + 2 * exp(bias[k])))
                                 < 1e-6,
                      "alpha with highway_bias %g", bias[k]);
            }
        /* v that begins with zeros, and is a parameter, unlike v1's */
        memset(&ld, 0, sizeof ld);
        ld.vocab = 11;
        ld.dim = 8;
        ld.sru.v_init = -1;
        lm = stx_sru_lm_create(x, &ld);
        CHECK(lm && lm->sru->layer[0].v && stx_sru_lm_count(&ld) == stx_params_size(lm->params),
              "v_init -1: %s", stx_error(x));
        for (i = 0; lm && i < 16; i++)
            CHECK((double)lm->sru->layer[0].v->data[i] == 0, "v_init -1 begins with %g",
                  (double)lm->sru->layer[0].v->data[i]);
    }
    CHECK(stx_ok(x), "%s", stx_error(x));
    stx_destroy(x);
}

/* At the start attention contributes nothing, and w2 learns nothing until alpha moves */
static void rezero(void) {
    stx_ctx *x = context(1, 4);
    stx_params *p = stx_params_create(x);
    stx_sru_desc d;
    stx_sru *m;
    stx_real *v = random_of(2 * 5 * 8, 1);
    stx_tensor *h;
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
    {
        size_t i;
        double top = 0;
        for (i = 0; i < m->layer[0].w2->size; i++)
            if (fabs((double)m->layer[0].w2->grad[i]) > top)
                top = fabs((double)m->layer[0].w2->grad[i]);
        CHECK(top == 0 && fabs((double)m->layer[0].alpha_attn->grad[0]) > 1e-6, "w2 %g, alpha %g",
              top, (double)m->layer[0].alpha_attn->grad[0]);
    }
    free(v);
    stx_destroy(x);
}

/* Transforms of one's own */
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
          "a stack with its own transform has v and bias: %zu", q->count);
    stx_set(x, m->layer[0].v, ref->layer[0].v->data);
    o.w = ref->layer[0].w3;
    stx_begin(x, STX_TRAIN);
    a = stx_sru_forward(ref, stx_input(x, v, 2, 5, 6, 0), NULL);
    b = stx_sru_forward(m, stx_input(x, v, 2, 5, 6, 0), NULL);
    CHECK(a && b && difference(a->data, b->data, a->size) == 0 && o.calls == 1, "own transform: %s",
          stx_error(x));
    o.g = stx_param(q, STX_UNIFORM, 0.5, "gates", 12, 6, 0, 0);
    b = stx_sru_forward(m, stx_input(x, v, 2, 5, 6, 0), NULL);
    CHECK(a && b && difference(a->data, b->data, a->size) > 1e-4,
          "gates by the input are not felt");
    stx_backward_from(x, b, v);
    CHECK(stx_ok(x) && fabs((double)o.g->grad[0]) > 0, "no gradient to the gates");
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

/* Padding: what stands there is of no consequence; lengths; outputs and states */
static void padding(void) {
    const size_t B = 3, T = 11;
    const size_t length[3] = {11, 4, 7};
    int k;
    for (k = 0; k < STACKS; k++) {
        const char *name;
        stx_sru_desc d = stack(k, &name);
        stx_ctx *x = context(1, 4);
        stx_sru *m;
        stx_real *v = random_of(B * T * d.input, 1), *w = random_of(B * T * d.input, 1), *one, *two;
        stx_sru_state *s, *r;
        stx_tensor *h;
        size_t b, t, i;
        double e = 0;
        d.zero_pads = 1;
        m = stx_sru_create(stx_params_create(x), "", &d);
        for (b = 0; b < B; b++)
            for (t = length[b]; t < T; t++)
                for (i = 0; i < d.input; i++) w[(b * T + t) * d.input + i] = 3;
        s = stx_sru_state_create(m, B);
        r = stx_sru_state_create(m, 1);
        stx_begin(x, STX_EVAL);
        h = stx_sru_segment(m, stx_input(x, v, B, T, d.input, 0), stx_sru_lengths(x, length, B, T),
                            s, s);
        CHECK(h != NULL, "%s: %s", name, stx_error(x));
        if (!h) continue;
        one = (stx_real *)malloc(h->size * sizeof *one);
        two = (stx_real *)malloc(h->size * sizeof *two);
        stx_get(x, h, one);
        for (b = 0; b < B; b++)
            for (t = length[b]; t < T; t++)
                for (i = 0; i < m->O; i++) e += fabs((double)one[(b * T + t) * m->O + i]);
        CHECK(e == 0, "%s: padding gives %g", name, e);
        stx_begin(x, STX_EVAL);
        h = stx_sru_segment(m, stx_input(x, w, B, T, d.input, 0), stx_sru_lengths(x, length, B, T),
                            NULL, s);
        stx_get(x, h, two);
        CHECK(!memcmp(one, two, h->size * sizeof *one), "%s: what padding holds is felt", name);
        stx_begin(x, STX_EVAL); /* row 1 alone, short */
        h = stx_sru_segment(m, stx_input(x, v + T * d.input, 1, 4, d.input, 0), NULL, r, r);
        CHECK(h && difference(h->data, one + T * m->O, 4 * m->O) <= TOL, "%s: a row alone differs",
              name);
        stx_download(x, one, r->c, m->desc.layers * m->O);
        for (i = 0; i < m->desc.layers; i++) {
            stx_download(x, two, stx_offset_ptr(x, s->c, (i * B + 1) * m->O), m->O);
            CHECK(difference(one + i * m->O, two, m->O) <= TOL, "%s: its state differs", name);
        }
        if (d.transform == STX_SRU_ATTENTION
            && stx_memory_max_rows(
                s->memory)) { /* memory knows what was padding: the next segment does
                                                                                    not
                                                                                    feel
                                                                                    it
                                                                                    either
                                                                                    */
            stx_begin(x, STX_EVAL);
            h = stx_sru_segment(m, stx_input(x, v, B, 3, d.input, 0), NULL, s, NULL);
            stx_get(x, h, one);
            for (i = 0; i < m->desc.layers; i++)
                if (m->layer[i].attends)
                    for (t = length[1]; t < T; t++)
                        s->memory->layer[i].data[(T + t) * m->layer[i].Ci] = 9;
            stx_begin(x, STX_EVAL);
            h = stx_sru_segment(m, stx_input(x, v, B, 3, d.input, 0), NULL, s, NULL);
            CHECK(h && !memcmp(one, h->data, h->size * sizeof *one),
                  "%s: padding in the memory is felt", name);
        }
        free(one);
        free(two);
        free(v);
        free(w);
        stx_destroy(x);
    }
}

/* What a padded time attends to is of no consequence. Padding before, between and behind
   what there is, whole rows of it, in the segment and in the memory, a window or none:
   with other numbers at the padded times, so with other queries, keys and values there,
   every output, state and gradient has the same bits, and the gradient at padding is 0.
   So no mask for queries that see nothing but padding can matter.
   */
static void padded_queries(void) {
    enum { B = 4, T = 9, M = 5, N = 3, W = 12 };

    int k, window, r;
    for (k = 6; k < STACKS; k++)
        for (window = 0; window < 5; window += 4) {
            const char *name;
            stx_sru_desc d = stack(k, &name);
            stx_real *kept[2] = {NULL, NULL};
            size_t total[2] = {0, 0};
            for (r = 0; r < 2; r++) {
                stx_ctx *x = context(1, 4);
                stx_params *p = stx_params_create(x);
                stx_sru *m = stx_sru_create(p, "", &d);
                stx_real *v = random_of(B * T * d.input, 7), *g = random_of(B * T * W, 8),
                         *c = random_of(B * W, 9), *mem[N], *at;
                int32_t pad[B * T], before[B * M];
                stx_tensor *in, *h, *loss, *c0[N], *memory[N], *last[N];
                stx_sru_io io;
                size_t i, j, l, n;
                double e = 0;
                memset(&io, 0, sizeof io);
                for (i = 0; i < B * T; i++)
                    pad[i] = i / T == 0   ? i % T < 4
                             : i / T == 1 ? i % T > 5
                             : i / T == 2 ? 1
                                          : i % T % 4 == 1;
                for (i = 0; i < B * M; i++)
                    before[i] = i / M == 0   ? 1
                                : i / M == 1 ? i % M < 3
                                : i / M == 2 ? i % M == 1
                                             : 0;
                for (i = 0; i < B * T; i++)
                    for (j = 0; j < d.input; j++)
                        if (r && pad[i]) v[i * d.input + j] = (stx_real)(3 + (double)j);
                stx_begin(x, STX_TRAIN);
                in = stx_variable(x, v, B, T, d.input, 0);
                for (l = 0; l < N; l++) {
                    n = m->layer[l].Ci;
                    mem[l] = random_of(B * M * n, 20 + l);
                    for (i = 0; i < B * M; i++)
                        for (j = 0; j < n; j++)
                            if (r && before[i]) mem[l][i * n + j] = (stx_real)(-2 - (double)j);
                    memory[l] = m->layer[l].attends ? stx_input(x, mem[l], B, M, n, 0) : NULL;
                    c0[l] = stx_input(x, c, B, W, 0, 0);
                    free(mem[l]);
                }
                io.c0 = c0;
                io.memory = memory;
                io.last = last;
                io.window = (size_t)window;
                io.pad = stx_tokens(x, pad, B, T);
                io.memory_pad = stx_tokens(x, before, B, M);
                h = stx_sru_forward(m, in, &io);
                CHECK(h != NULL, "%s: %s", name, stx_error(x));
                if (!h) {
                    stx_destroy(x);
                    free(v);
                    free(g);
                    free(c);
                    break;
                }
                loss = stx_mean(x, stx_mul(x, h, stx_input(x, g, B, T, W, 0)));
                for (l = 0; l < N; l++)
                    loss = stx_add(x, loss, stx_mean(x, stx_mul(x, last[l], last[l])));
                stx_backward(x, loss);
                total[r] = h->size + N * B * W + B * T * d.input + stx_params_size(p);
                at = kept[r] = (stx_real *)malloc(total[r] * sizeof *at);
                stx_get(x, h, at);
                at += h->size;
                for (l = 0; l < N; l++) {
                    stx_get(x, last[l], at);
                    at += B * W;
                }
                stx_download(x, at, in->grad, in->size);
                for (i = 0; i < B * T; i++)
                    for (j = 0; j < d.input; j++)
                        if (pad[i]) e += fabs((double)at[i * d.input + j]);
                CHECK(e == 0, "%s, window %d: the gradient at padding is %g", name, window, e);
                at += in->size;
                for (i = 0; i < p->count; i++) {
                    stx_download(x, at, p->tensor[i]->grad, p->tensor[i]->size);
                    at += p->tensor[i]->size;
                }
                CHECK(stx_ok(x), "%s: %s", name, stx_error(x));
                stx_destroy(x);
                free(v);
                free(g);
                free(c);
            }
            if (kept[1]) {
                size_t i, other = 0;
                for (i = 0; i < total[0]; i++) other += !(kept[0][i] == kept[1][i]);
                CHECK(
                    !other && total[0] == total[1],
                    "%s, window %d: of %zu outputs, states and gradients %zu feel what padding "
                    "holds",
                    name, window, total[0], other);
            }
            free(kept[0]);
            free(kept[1]);
        }
}

/* The window of a first segment is the state's that comes out; with k = 4 the highway
   is u3 whatever alpha says */
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
    CHECK(h && !memcmp(one, h->data, h->size * sizeof *one), "the window of the state out");
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

static void nn_states(void) {
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
    CHECK(!memcmp(c, again, sizeof c) && stx_ok(x), "states there and back");
    /* as many numbers in another order, batch first, other sizes: refused, by name,
       and nothing changes */
    for (i = 0; i < 6; i++) {
        static const size_t shape[6][3] = {{2, 3, 8}, {3, 4, 4}, {4, 4, 3},
                                           {4, 3, 8}, {4, 2, 4}, {0, 0, 0}};
        char want[64];
        for (j = 0; j < 48; j++) nn[j] = -1;
        CHECK(!stx_sru_state_set_nn(s, nn, shape[i][0], shape[i][1], shape[i][2])
                  && stx_error_code(x) == STX_ERR_SHAPE,
              "shape %d is taken", (int)i);
        snprintf(want, sizeof want, "expected shape (4,3,4)..got (%d,%d,%d)", (int)shape[i][0],
                 (int)shape[i][1], (int)shape[i][2]);
        CHECK(test_says(stx_error(x), want) && strstr(stx_error(x), "stx_sru_state_set_nn"), "%s",
              stx_error(x));
        stx_clear_error(x);
        stx_download(x, again, s->c, 48);
        CHECK(!memcmp(c, again, sizeof c), "shape %d is refused and written", (int)i);
    }
    stx_destroy(x);
}

static void refused(const char *want, const stx_sru_desc *d) {
    stx_ctx *x = context(1, 1);
    CHECK(!stx_sru_create(stx_params_create(x), "", d) && stx_error_code(x) == STX_ERR_ARG
              && test_says(stx_error(x), want),
          "want \"%s\", got \"%s\"", want, stx_error(x));
    CHECK(stx_sru_count(d) == 0, "counted: %s", want);
    stx_destroy(x);
}

static void refused_lm(const char *want, const stx_sru_lm_desc *d) {
    stx_ctx *x = context(1, 1);
    CHECK(!stx_sru_lm_create(x, d) && stx_error_code(x) == STX_ERR_ARG
              && test_says(stx_error(x), want),
          "want \"%s\", got \"%s\"", want, stx_error(x));
    CHECK(stx_sru_lm_count(d) == 0, "counted: %s", want);
    stx_destroy(x);
}

static void errors(void) {
    stx_sru_desc good, d;
    stx_sru_lm_desc lm, l;
    stx_ctx *x, *y;
    stx_params *p;
    stx_sru *m;
    stx_sru_state *s3, *other;
    stx_sru_io io;
    stx_tensor *in, *c0[2];
    stx_real *v = random_of(4000, 1);
    int32_t tok[64] = {0};
    size_t bad[2] = {5, 7}, none[2] = {4, 0};
    memset(&good, 0, sizeof good);
    good.input = 8;
    good.layers = 2;
    refused("input: expected .. got 0", memset(&d, 0, sizeof d) ? &d : NULL);
    /* sizes that are allowed and sizes that overflow */
    memset(&lm, 0, sizeof lm);
    d = good;
    d.input = (size_t)1 << 28;
    d.layers = 4096;
    CHECK(stx_sru_count(&d) == SIZE_MAX, "4096 layers of 2^28: %zu parameters", stx_sru_count(&d));
    lm.vocab = (size_t)1 << 31;
    lm.dim = (size_t)1 << 28;
    lm.sru.layers = 63;
    if (sizeof(size_t) == 8)
        CHECK(stx_sru_lm_count(&lm) < SIZE_MAX && stx_sru_lm_count(&lm) > SIZE_MAX / 2,
              "63 layers and a vocabulary "
              "of 2^31: %zu",
              stx_sru_lm_count(&lm));
    lm.sru.layers = 4096;
    CHECK(stx_sru_lm_count(&lm) == SIZE_MAX, "4096 layers and a vocabulary: %zu parameters",
          stx_sru_lm_count(&lm));
    d = good;
    d.transform = 7;
    refused("transform: expected .. got 7", &d);
    d = good;
    d.literal = STX_SRU_LITERAL_NORM;
    refused("literal: STX_SRU_LITERAL_NORM requires", &d);
    d.norm = STX_SRU_NORM_BEFORE;
    refused("STX_SRU_LITERAL_NORM requires", &d);
    d.transform = STX_SRU_ATTENTION;
    d.no_attention = 1;
    refused("STX_SRU_LITERAL_NORM requires", &d);
    d.literal |= STX_SRU_LITERAL;
    refused("STX_SRU_LITERAL_NORM requires", &d);
    d = good;
    d.literal = 2;
    refused("literal: expected .. got 2", &d);
    d = good;
    d.norm = 3;
    refused("norm: expected .. got 3", &d);
    d = good;
    d.norm = -1;
    refused("norm: expected .. got -1", &d);
    d = good;
    d.layers = 5000;
    refused("layers: expected .. got 5000", &d);
    d = good;
    d.hidden = (size_t)1 << 40;
    refused("hidden: expected", &d);
    d = good;
    d.input = (size_t)1 << 40;
    refused("input: expected", &d);
    d = good;
    d.dropout = 1;
    refused("dropout: expected .. got 1", &d);
    d = good;
    d.dropout = NAN;
    refused("dropout: expected", &d);
    d = good;
    d.rnn_dropout = -0.1;
    refused("rnn_dropout: expected .. got -0.1", &d);
    d = good;
    d.highway_bias = 100;
    refused("highway_bias: expected .. got 100", &d);
    d = good;
    d.highway_bias = NAN;
    refused("highway_bias", &d);
    d = good;
    d.v_init = -2;
    refused("v_init: expected .. got -2", &d);
    d = good;
    d.v_init = NAN;
    refused("v_init", &d);
    d = good;
    d.proj = (size_t)1 << 40;
    refused("proj: expected", &d);
    d = good;
    d.transform = STX_SRU_ATTENTION;
    d.proj = 6;
    d.heads = 4;
    refused("heads: expected a divisor of proj 6 .. layer 0,..got 4", &d);
    d = good;
    d.transform = STX_SRU_ATTENTION;
    d.projs = bad;
    d.heads = 5;
    refused("heads: expected a divisor of proj 7 .. layer 1,..got 5", &d);
    d = good;
    d.transform = STX_SRU_ATTENTION;
    d.projs = none;
    refused("projs: expected .. got 0", &d);
    d = good;
    d.transform = STX_SRU_ATTENTION;
    d.attention_every = 2;
    d.attention_last = 1;
    refused("attention_last: expected 0 with attention_every 2, got 1", &d);
    d = good;
    d.transform = STX_SRU_ATTENTION;
    d.attention_every = 3;
    refused("attention_every: expected .. got 3", &d);
    d = good;
    d.transform = STX_SRU_ATTENTION;
    d.attention_last = 3;
    refused("attention_last: expected .. got 3", &d);
    d = good;
    d.transform = STX_SRU_ATTENTION;
    d.attn_dropout = 2;
    refused("attn_dropout: expected .. got 2", &d);
    d = good;
    d.transform = STX_SRU_ATTENTION;
    d.alpha_init = NAN;
    refused("alpha_init", &d);
    memset(&lm, 0, sizeof lm);
    refused_lm("vocab: expected .. got 0", &lm);
    lm.vocab = V;
    lm.dim = 8;
    l = lm;
    l.sru.bidirectional = 1;
    refused_lm("must not see what it predicts", &l);
    l = lm;
    l.sru.not_causal = 1;
    refused_lm("must not see what it predicts", &l);
    l = lm;
    l.dropout = 1.5;
    refused_lm("dropout: expected .. got 1.5", &l);
    l = lm;
    l.emb_dropout = -1;
    refused_lm("emb_dropout: expected .. got -1", &l);
    l = lm;
    l.io_dropout = 1;
    refused_lm("io_dropout: expected .. got 1", &l);
    l = lm;
    l.tied = 1;
    l.emb = 5;
    refused_lm("emb: expected dim 8 with tied, got 5", &l);
    l = lm;
    l.tied = 1;
    l.adapt_io = 1;
    refused_lm("tied: expected 0 with adapt_io", &l);
    l = lm;
    l.adapt_io = 1;
    l.emb = 5;
    refused_lm("emb: expected dim 8 with adapt_io,..got 5", &l);
    l = lm;
    l.adapt_io = 1;
    l.cutoffs = 1;
    l.cutoff[0] = V;
    refused_lm("cutoff: expected .. got 29", &l);
    l = lm;
    l.adapt_io = 1;
    l.cutoffs = 2;
    l.cutoff[0] = 9;
    l.cutoff[1] = 8;
    refused_lm("cutoff: expected .. got 8", &l);
    l = lm;
    l.adapt_io = 1;
    l.cutoffs = 3;
    l.cutoff[0] = 9;
    l.cutoff[1] = 12;
    l.cutoff[2] = 20;
    refused_lm("divval^cutoffs", &l);
    l = lm;
    l.adapt_io = 1;
    l.divval = 1;
    refused_lm("divval: expected .. got 1", &l);
    l = lm;
    l.adapt_io = 1;
    l.cutoffs = 9;
    refused_lm("cutoffs: expected .. got 9", &l);
    l = lm;
    l.dim = (size_t)1 << 50;
    refused_lm("dim", &l);
    l = lm;
    l.sru.heads = 3;
    l.sru.transform = STX_SRU_ATTENTION;
    l.sru.proj = 4;
    refused_lm("heads: expected a divisor of proj 4 .. got 3", &l);
    x = context(1, 1);
    CHECK(!stx_sru_create(NULL, "", &good) && !stx_sru_lm_create(NULL, &lm), "no context");
    CHECK(!stx_sru_create(stx_params_create(x), "", NULL)
              && strstr(stx_error(x), "expected a desc"),
          "%s", stx_error(x));
    stx_clear_error(x);
    CHECK(!stx_sru_lm_create(x, NULL) && strstr(stx_error(x), "expected a desc"), "%s",
          stx_error(x));
    stx_clear_error(x);
    l = lm;
    l.adapt_io = 1;
    l.cutoffs = 1;
    l.cutoff[0] = 9;
    l.sru.layers = 1;
    CHECK(!stx_sru_lm_logits(stx_sru_lm_create(x, &l), stx_new(x, 1, 1, 8, 0))
              && strstr(stx_error(x), "stx_vocab_io_log_probs"),
          "%s", stx_error(x));
    stx_clear_error(x);
    p = stx_params_create(x);
    good.transform = STX_SRU_ATTENTION;
    good.proj = 4;
    m = stx_sru_create(p, NULL, &good);
    CHECK(m && !stx_sru_create(p, "", &good)
              && strstr(stx_error(x), "parameter \"layers.0.w1\" already exists"),
          "%s", stx_error(x));
    stx_clear_error(x);
    CHECK(!stx_sru_state_create(m, 0) && strstr(stx_error(x), "B >= 1"), "%s", stx_error(x));
    stx_clear_error(x);
    s3 = stx_sru_state_create(m, 3);
    y = context(1, 1);
    other = stx_sru_state_create(stx_sru_create(stx_params_create(y), "", &good), 2);
#define REFUSE(call, text) \
  do { \
    stx_begin(x, STX_TRAIN); \
    in = stx_input(x, v, 2, 5, 8, 0); \
    (void)in; \
    CHECK(!(call) && test_says(stx_error(x), text), "want \"%s\", got \"%s\"", text, \
          stx_error(x)); \
    stx_clear_error(x); \
  } while (0)
    memset(&io, 0, sizeof io);
    REFUSE(stx_sru_forward(m, stx_input(x, v, 2, 5, 7, 0), NULL), "x: expected shape (B,T,8)");
    REFUSE(stx_sru_forward(m, stx_input(x, v, 10, 8, 0, 0), NULL), "x: expected shape (B,T,8)");
    REFUSE(stx_sru_segment(m, in, NULL, s3, NULL), "state in: expected B = 2 .. got 3");
    REFUSE(stx_sru_segment(m, in, NULL, NULL, s3), "state out: expected B = 2 .. got 3");
    REFUSE(stx_sru_segment(m, in, NULL, other, NULL), "state in: expected one of this model");
    REFUSE((io.pad = stx_tokens(x, tok, 2, 4), stx_sru_forward(m, in, &io)),
           "pad: expected shape (2,5), got (2,4)");
    memset(&io, 0, sizeof io);
    REFUSE((io.memory_pad = stx_tokens(x, tok, 2, 4), stx_sru_forward(m, in, &io)),
           "memory_pad: expected shape (2,0), got (2,4)");
    memset(&io, 0, sizeof io);
    io.c0 = c0;
    REFUSE((c0[0] = NULL, c0[1] = stx_input(x, v, 2, 7, 0, 0), stx_sru_forward(m, in, &io)),
           "c0: expected shape (2,8),..got (2,7)");
    memset(&io, 0, sizeof io);
    io.memory = c0;
    REFUSE((c0[0] = stx_input(x, v, 2, 3, 7, 0), c0[1] = NULL, stx_sru_forward(m, in, &io)),
           "memory: expected shape (2,M,8),..got (2,3,7)");
    REFUSE((c0[0] = stx_input(x, v, 2, 3, 8, 0), c0[1] = NULL, stx_sru_forward(m, in, &io)),
           "layer 1: expected 3 rows .. got 0");
    REFUSE((c0[0] = stx_input(x, v, 2, 3, 8, 0), c0[1] = stx_input(x, v, 2, 4, 8, 0),
            stx_sru_forward(m, in, &io)),
           "layer 1: expected 3 rows .. got 4");
    REFUSE(stx_sru_lengths(x, bad, 2, 6), "row 1: expected at most T = 6, got 7");
    REFUSE(stx_sru_lengths(x, NULL, 2, 6), "expected lengths .. got NULL");
    {
        stx_sru_recurrence_in c;
        memset(&c, 0, sizeof c);
#define CELL(set, text) \
  do { \
    memset(&c, 0, sizeof c); \
    stx_begin(x, STX_TRAIN); \
    c.u = stx_input(x, v, 2, 3, 3, 4); \
    c.bias = stx_input(x, v, 2, 4, 0, 0); \
    set; \
    CHECK(!stx_sru_recurrence(x, &c, NULL) && test_says(stx_error(x), text), \
          "want \"%s\", got \"%s\"", text, stx_error(x)); \
    stx_clear_error(x); \
  } while (0)
        CELL(c.u = stx_input(x, v, 2, 9, 4, 0), "(B,T,k,O)");
        CELL(c.u = stx_input(x, v, 2, 3, 5, 4), "u: expected .. got (2,3,5,4)");
        CELL(c.bias = NULL, "bias: expected shape (2,O), got NULL");
        CELL(c.directions = 3, "directions: expected 1 or 2 .. got 3");
        CELL(c.xr = stx_input(x, v, 2, 3, 5, 0), "xr: expected shape (B,T,O) .. got (2,3,5)");
        CELL(c.v = stx_input(x, v, 2, 5, 0, 0), "v: expected shape (2,O), got (2,5)");
        CELL(c.bias = stx_input(x, v, 4, 0, 0, 0), "bias: expected shape (2,O), got (4)");
        CELL(c.V = stx_input(x, v, 2, 3, 4, 0), "V: expected shape (B,T,2,O), got (2,3,4)");
        CELL(c.c0 = stx_input(x, v, 2, 3, 0, 0), "c0: expected shape (B,O), got (2,3)");
        CELL(c.mask = stx_input(x, v, 2, 3, 0, 0), "mask: expected shape (B,O), got (2,3)");
        CELL(c.pad = stx_tokens(x, tok, 3, 2), "pad: expected shape (2,3), got (3,2)");
        CELL((c.u = stx_input(x, v, 2, 3, 4, 4), c.xr = stx_input(x, v, 2, 3, 4, 0)),
             "xr: expected NULL with 4 planes");
    }
    CHECK(!stx_sru_forward(NULL, NULL, NULL) && !stx_sru_segment(NULL, NULL, NULL, NULL, NULL)
              && !stx_sru_lm_forward(NULL, NULL, NULL, NULL)
              && !stx_sru_lm_loss(NULL, NULL, NULL, NULL, NULL) && !stx_sru_gen_create(NULL, 1, 0)
              && !stx_sru_gen_feed(NULL, tok, 1) && !stx_sru_state_create(NULL, 1)
              && !stx_sru_recurrence(NULL, NULL, NULL) && !stx_sru_lengths(NULL, bad, 1, 1)
              && !stx_sru_count(NULL) && !stx_sru_lm_count(NULL) && !stx_sru_lm_params(NULL)
              && !stx_sru_lm_logits(NULL, NULL),
          "NULLs");
    stx_sru_state_free(NULL);
    stx_sru_state_reset(NULL);
    stx_sru_gen_free(NULL);
    stx_sru_gen_reset(NULL);
    stx_sru_state_get_nn(NULL, v);
    CHECK(!stx_sru_state_set_nn(NULL, v, 1, 1, 1), "no state");
    {
        stx_sru_lm *g = stx_sru_lm_create(y, &lm);
        stx_sru_gen *gen = stx_sru_gen_create(g, 1, 0);
        CHECK(gen && !stx_sru_gen_feed(gen, tok, 0) && strstr(stx_error(y), "at least one token"), "%s",
              stx_error(y));
        stx_clear_error(y);
        tok[0] = V;
        CHECK(!stx_sru_gen_feed(gen, tok, 1) && strstr(stx_error(y), "outside the table"), "%s",
              stx_error(y));
        stx_clear_error(y);
        CHECK(!stx_sru_gen_create(g, 0, 0) && strstr(stx_error(y), "B >= 1"), "%s", stx_error(y));
        stx_clear_error(y);
        CHECK(!stx_sru_gen_create(g, 1, SIZE_MAX - 15) && strstr(stx_error(y), "at most 2^31"),
              "%s", stx_error(y));
        stx_clear_error(y);
        { /* no columns: nothing to do */
            stx_sru_args a;
            int i;
            for (i = 0; i < 4; i++) {
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
                a.work = malloc(stx_sru_work(y, &a, 1) + stx_sru_work(y, &a, 0) + 64);
                stx_sru_fwd(y, &a);
                stx_sru_bwd(y, &a);
                free(a.work);
            }
            CHECK(stx_ok(y), "%s", stx_error(y));
        }
        l = lm;
        l.sru.transform = STX_SRU_ATTENTION;
        l.sru.proj = 4;
        l.sru.norm = STX_SRU_NORM_BEFORE;
        l.sru.literal = STX_SRU_LITERAL;
        {
            stx_ctx *w = context(1, 1);
            CHECK(!stx_sru_gen_create(stx_sru_lm_create(w, &l), 1, 0)
                      && strstr(stx_error(w), "LITERAL_NORM"),
                  "%s", stx_error(w));
            stx_destroy(w);
        }
        tok[0] = 1;
        CHECK(stx_sru_gen_feed(gen, tok, 1) != NULL, "after an error: %s", stx_error(y));
    }
    free(v);
    stx_destroy(x);
    stx_destroy(y);
}

/* States in files: padding too; those of another model, batch or damaged are refused
   and leave an empty state */
static void files(void) {
    stx_ctx *x = context(1, 1);
    const char *name;
    stx_sru_desc d = stack(7, &name);
    stx_sru *m = stx_sru_create(stx_params_create(x), "", &d), *plain;
    stx_sru_state *s = stx_sru_state_create(m, 2), *r = stx_sru_state_create(m, 2),
                  *three = stx_sru_state_create(m, 3), *p;
    stx_real *v = random_of(2 * 9 * 12, 1);
    size_t length[2] = {9, 4}, l, dim[3];
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
              && strstr(stx_error(x), "got another shape"),
          "%s", stx_error(x));
    stx_clear_error(x);
    CHECK(!stx_sru_state_load(r, f, "b.") && strstr(stx_error(x), "\"b.c\": expected"), "%s",
          stx_error(x));
    stx_clear_error(x);
    d = stack(0, &name);
    plain = stx_sru_create(stx_params_create(x), "", &d);
    p = stx_sru_state_create(plain, 2);
    CHECK(!stx_sru_state_load(p, f, "a.") && strstr(stx_error(x), "a memory in other layers"), "%s",
          stx_error(x));
    stx_clear_error(x);
    stx_file_close(f);
    w = stx_writer_create(x); /* a memory of the wrong length, after a good c */
    dim[0] = 3;
    dim[1] = 2;
    dim[2] = 12;
    stx_writer_add_device(w, "a.c", 3, dim, s->c);
    stx_writer_meta_u64(w, "a.rows", 9);
    dim[0] = 2;
    dim[1] = 8;
    stx_writer_add_device(w, "a.memory.1", 3, dim, s->memory->layer[1].data);
    CHECK(stx_writer_finish(w, path), "%s", stx_error(x));
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

/* Every allocation fails once: an error each time, and nothing left behind */
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

static void memory(void) {
    long at, total = 1;
    for (at = 0; at <= total; at++) {
        counter c;
        stx_desc d;
        stx_ctx *x;
        const char *name;
        stx_sru_lm_desc md = model(STACKS, &name);
        stx_sru_lm *m;
        stx_sru_state *s;
        stx_sru_gen *g;
        int32_t t[40] = {1, 2, 3, 4, 5};
        int done = 0;
        memset(&c, 0, sizeof c);
        memset(&d, 0, sizeof d);
        c.fail_at = at;
        d.alloc = count_alloc;
        d.release = count_release;
        d.user = &c;
        d.threads = 1;
        d.chunk_bytes = 4096;
        x = stx_create(&d);
        m = stx_sru_lm_create(x, &md);
        s = m ? stx_sru_state_create(m->sru, 2) : NULL;
        if (s) {
            int i;
            for (i = 0; i < 2; i++) {
                stx_begin(x, STX_TRAIN);
                stx_backward(x, stx_sru_lm_loss(m, stx_tokens(x, t, 2, 8),
                                                stx_tokens(x, t + 1, 2, 8), s, s));
            }
            g = stx_sru_gen_create(m, 1, 8);
            done = g && stx_sru_gen_feed(g, t, 12) != NULL;
        }
        if (!at) {
            total = c.calls;
            CHECK(done && stx_ok(x), "%s", stx_error(x));
        } else
            CHECK(!x || (!done && stx_error_code(x) == STX_ERR_MEMORY),
                  "allocation %ld of %ld failed: %s", at, total, x ? stx_error(x) : "");
        stx_destroy(x);
        CHECK(c.live == 0, "allocation %ld: %ld blocks left", at, c.live);
    }
}

/* the example that the manual works by hand */
static void by_hand(void) {
    static const double h_want[2] = {1.5, 4}, du0[2] = {0.125, 0.25}, dx[2] = {0, 0.5};
    stx_ctx *x = context(1, 1);
    stx_params *p = stx_params_create(x);
    /* the mean of 0, 2 h is h's second */
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
        CHECK(fabs((double)h[t] - h_want[t]) < 1e-6, "h %g", (double)h[t]);
        CHECK(fabs((double)ut->grad[3 * t] - du0[t]) < 1e-6, "du0 %g", (double)ut->grad[3 * t]);
        CHECK(fabs((double)xt->grad[t] - dx[t]) < 1e-6, "dx %g", (double)xt->grad[t]);
    }
    CHECK(fabs((double)c0->grad[0] - 0.125) < 1e-6, "dc0 %g", (double)c0->grad[0]);
    stx_get(x, last, h);
    CHECK(fabs((double)h[0] - 5) < 1e-6, "c %g", (double)h[0]);
    stx_destroy(x);
}

int main(void) {
    by_hand();
    segments();
    recomputed();
    recomputed_forward();
    literal_none();
    literal_norm();
    directions();
    chunks();
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
    return test_end();
}
