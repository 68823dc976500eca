/* test_golden_sru.c - compares seqtx_sru.h with golden vectors of an independent
   PyTorch implementation (tests/golden): every result, state and gradient of the
   recurrence, the attention transform, stacks over segments, language models and
   training curves. The tolerance is 1e-10 in the double build and 1e-5 in float. Usage:
   test_golden_sru DIR */
#include <stdint.h>
#include "../../seqtx_sru.h"
#include "../inner/inner.h"
#include "../golden/golden.h"
#include "maps.h"

#ifdef SEQTX_DOUBLE
static const double TOL = 1e-10;
#else
static const double TOL = 1e-5;
#endif

/* Returns a variable of this shape with the elements of an entry, or NULL if the file
   has no such entry. */
static stx_tensor *tensor_of(stx_ctx *x, const stx_file *f, const char *name, size_t d0, size_t d1,
                             size_t d2, size_t d3) {
    size_t n;
    stx_real *r = reals(f, name, &n);
    stx_tensor *t;
    if (!r) return NULL;
    t = stx_variable(x, r, d0, d1, d2, d3);
    CHECK(t && t->size == n, "%s: %zu values in the file: %s", name, n, stx_error(x));
    free(r);
    return t;
}

static stx_ids *ids_of(stx_ctx *x, const stx_file *f, const char *name, size_t B, size_t T) {
    size_t n;
    int32_t *v = integers(f, name, &n);
    stx_ids *t = v ? stx_tokens(x, v, B, T) : NULL;
    CHECK(!v || n == B * T, "%s: %zu values", name, n);
    free(v);
    return t;
}

/* Returns the sum of the elementwise product y G as a tensor, or NULL if y or G is
   NULL. */
static stx_tensor *against(stx_ctx *x, stx_tensor *y, const stx_real *G) {
    stx_tensor *p, *g = G && y ? stx_input(x, G, y->dim[0], y->dim[1], y->dim[2], y->dim[3]) : NULL;
    p = g ? stx_mul(x, y, g) : NULL;
    return p ? stx_scale(x, stx_mean(x, p), (double)y->size) : NULL;
}

/* Compares the gradient of t, which may be NULL, with an entry. */
static void gradient(stx_ctx *x, const stx_file *f, const char *file, const char *name,
                     const stx_tensor *t) {
    if (t) same_as(x, f, file, name, t->grad, t->size, TOL, 1e-7);
}

/* Compares an array in host memory with an entry. */
static void array_is(const stx_file *f, const char *file, const char *name, const stx_real *have,
                     size_t n) {
    size_t m, i;
    double *expected = entry(f, name, &m), *got = (double *)malloc((n + 1) * sizeof *got), e;
    CHECK(expected && m == n, "%s: %s", file, name);
    for (i = 0; i < n; i++) got[i] = (double)have[i];
    e = expected && m == n ? test_error(got, expected, n, 1e-7) : HUGE_VAL;
    CHECK(e <= TOL, "%s %s: error %g", file, name, e);
    free(expected);
    free(got);
}

static void cell_case(const char *name, int threads) {
    stx_ctx *x = golden_ctx(threads);
    stx_file *f = open_golden(x, name);
    stx_sru_recurrence_in c;
    stx_tensor *h, *last;
    stx_real *G, *E;
    size_t B, T, D, O, k;
    if (!f) {
        stx_destroy(x);
        return;
    }
    B = (size_t)need(f, "B");
    T = (size_t)need(f, "T");
    D = (size_t)need(f, "D");
    O = D * (size_t)need(f, "H");
    k = (size_t)need(f, "k");
    stx_begin(x, STX_TRAIN);
    memset(&c, 0, sizeof c);
    c.u = tensor_of(x, f, "U", B, T, k, O);
    c.xr = tensor_of(x, f, "xr", B, T, O, 0);
    c.v = tensor_of(x, f, "v", 2, O, 0, 0);
    c.bias = tensor_of(x, f, "bias", 2, O, 0, 0);
    c.V = tensor_of(x, f, "V", B, T, 2, O);
    c.c0 = tensor_of(x, f, "c0", B, O, 0, 0);
    c.mask = tensor_of(x, f, "m", B, O, 0, 0);
    c.pad = ids_of(x, f, "pad", B, T);
    c.directions = D;
    c.alpha = need(f, "alpha");
    c.tanh = (int)need(f, "tanh");
    h = stx_sru_recurrence(x, &c, &last);
    CHECK(h && last, "%s: %s", name, stx_error(x));
    if (h && last) {
        same_as(x, f, name, "h", h->data, h->size, TOL, 1e-7);
        same_as(x, f, name, "c_last", last->data, last->size, TOL, 1e-7);
        G = reals(f, "G", NULL);
        E = reals(f, "Glast", NULL);
        stx_backward(x, stx_add(x, against(x, h, G), against(x, last, E)));
        gradient(x, f, name, "dU", c.u);
        gradient(x, f, name, "dxr", c.xr);
        gradient(x, f, name, "dv", c.v);
        gradient(x, f, name, "dbias", c.bias);
        gradient(x, f, name, "dV", c.V);
        gradient(x, f, name, "dc0", c.c0);
        free(G);
        free(E);
    }
    CHECK(stx_ok(x), "%s: %s", name, stx_error(x));
    stx_file_close(f);
    stx_destroy(x);
}

/* Returns whether query t of batch row b attends only to padding, in a memory of M rows
   and in the segment. Requires a causal file. */
static int only_padding(const stx_ids *before, const stx_ids *pad, size_t b, size_t t, size_t M,
                        size_t window) {
    size_t row = M + t, j;
    for (j = window && row > window ? row - window : 0; j <= row; j++) {
        const stx_ids *p = j < M ? before : pad;
        if (!p || !p->data[j < M ? b * M + j : b * p->T + j - M]) return 0;
    }
    return 1;
}

/* The transform of a one-layer stack, assembled in this test, and its inputs. */
typedef struct transform {
    stx_sru m;
    stx_sru_layer p;
    stx_tensor *h, *memory;
    stx_ids *pad, *before;
    size_t B, T, M, window, row;    /* row: the row length of U */
} transform;

static void read_transform(transform *a, stx_ctx *x, const stx_file *f, const char *name) {
    const size_t I = (size_t)need(f, "I"), P = (size_t)need(f, "P"), k = (size_t)need(f, "k"),
                 O = (size_t)need(f, "H") * (size_t)need(f, "D");
    const char *norm = stx_file_meta(f, "norm");
    CHECK(norm && (!strcmp(norm, "none") || !strcmp(norm, "pre") || !strcmp(norm, "post")),
          "%s: norm %s", name, norm ? norm : "");
    memset(a, 0, sizeof *a);
    a->B = (size_t)need(f, "B");
    a->T = (size_t)need(f, "T");
    a->M = (size_t)need(f, "memory_rows");
    a->row = k * O;
    a->m.ctx = x;
    a->m.O = O;
    a->m.layer = &a->p;
    a->m.desc.transform = STX_SRU_ATTENTION;
    a->m.desc.layers = 1;
    a->m.desc.heads = (size_t)need(f, "heads");
    a->m.desc.not_causal = !(int)need(f, "causal");
    a->m.desc.attn_norm_first = norm && !strcmp(norm, "pre");
    a->p.Ci = I;
    a->p.P = P;
    a->p.k = k;
    a->p.attends = (int)need(f, "attention");
    a->p.w1 = tensor_of(x, f, "w1", P, I, 0, 0);
    a->p.w2 = tensor_of(x, f, "w2", 2 * P, P, 0, 0);
    a->p.w3 = tensor_of(x, f, "w3", k * O, P, 0, 0);
    a->p.alpha_attn = tensor_of(x, f, "alpha", 1, 0, 0, 0);
    a->p.attn_gain = tensor_of(x, f, "gain", P, 0, 0, 0);
    a->p.attn_shift = tensor_of(x, f, "shift", P, 0, 0, 0);
    a->h = tensor_of(x, f, "x", a->B, a->T, I, 0);
    a->memory = stx_detach(x, tensor_of(x, f, "memory", a->B, a->M, I, 0));
    a->pad = ids_of(x, f, "pad", a->B, a->T);
    a->before = ids_of(x, f, "memory_pad", a->B, a->M);
    a->window = (size_t)need(f, "window");
}

/* Returns the number of queries that attend only to padding, in files with the
   reference's mask. */
static size_t padding_queries(const transform *a, const stx_file *f) {
    const size_t window = (size_t)need(f, "window");
    size_t b, t, n = 0;
    for (b = 0; meta(f, "literal_mask", 0) > 0 && b < a->B; b++)
        for (t = 0; t < a->T; t++)
            n += (size_t)only_padding(a->before, a->pad, b, t, a->M, window);
    return n;
}

/* In files with the reference's mask (literal_mask), a query that sees only padding
   attends to the future; in the library, it attends to nothing. Such a query is padding
   itself, so the recurrence ignores its U. For all other queries, U is compared.
   Gradients are not compared, because those in the file depend on all queries. */
static void other_queries(const transform *a, stx_ctx *x, const stx_file *f, const char *name,
                          const stx_tensor *U, size_t count) {
    const size_t row = a->row;
    size_t n, b, t;
    double *expected = entry(f, "U", &n), *all = doubles_of(x, U->data, U->size);
    CHECK(expected && n == U->size && count < a->B * a->T,
          "%s: %zu queries that attend only to padding", name, count);
    for (b = 0; expected && n == U->size && b < a->B; b++)
        for (t = 0; t < a->T; t++) {
            const size_t at = (b * a->T + t) * row;
            double e = test_error(all + at, expected + at, row, 1e-7);
            if (!only_padding(a->before, a->pad, b, t, a->M, a->window))
                CHECK(e <= TOL, "%s: U of row %zu, time %zu: error %g", name, b, t, e);
            else
                CHECK(a->pad->data[b * a->T + t] && e > 1e-3,
                      "%s: row %zu, time %zu is not padding, or has the reference's U: %g", name, b,
                      t, e);
        }
    free(all);
    free(expected);
}

static void transform_grads(const transform *a, stx_ctx *x, const stx_file *f, const char *name) {
    gradient(x, f, name, "dx", a->h);
    gradient(x, f, name, "dw1", a->p.w1);
    gradient(x, f, name, "dw2", a->p.w2);
    gradient(x, f, name, "dw3", a->p.w3);
    gradient(x, f, name, "dalpha", a->p.alpha_attn);
    gradient(x, f, name, "dgain", a->p.attn_gain);
    gradient(x, f, name, "dshift", a->p.attn_shift);
}

static void attn_case(const char *name, int threads) {
    stx_ctx *x = golden_ctx(threads);
    stx_file *f = open_golden(x, name);
    transform a;
    stx_tensor *U;
    stx_real *G;
    size_t count, n;
    if (!f) {
        stx_destroy(x);
        return;
    }
    stx_begin(x, STX_TRAIN);
    read_transform(&a, x, f, name);
    U = inner_sru_transform(&a.m, 0, a.h, a.memory, a.before, a.pad, a.B, a.M, a.T, a.window);
    CHECK(U != NULL, "%s: %s", name, stx_error(x));
    count = padding_queries(&a, f);
    if (U && count)
        other_queries(&a, x, f, name, U, count);
    else if (U) {
        same_as(x, f, name, "U", U->data, U->size, TOL, 1e-7);
        G = reals(f, "G", &n);
        CHECK(n == U->size, "%s: G has %zu values", name, n);
        stx_backward_from(x, U, G);
        free(G);
        transform_grads(&a, x, f, name);
    }
    if (!count) CHECK(stx_ok(x), "%s: %s", name, stx_error(x));
    stx_file_close(f);
    stx_destroy(x);
}

static size_t sizes_of(const stx_file *f, const char *key, size_t *v, size_t most) {
    const char *s = stx_file_meta(f, key);
    CHECK(s != NULL, "no metadata %s", key);
    return list_of(s, v, most);
}

static size_t projs[16];

static void stack_desc(const stx_file *f, stx_sru_desc *d) {
    static const char *const norms[] = {"none", "pre", "post", NULL};
    static const int norm_kinds[] = {STX_SRU_NORM_NONE, STX_SRU_NORM_BEFORE, STX_SRU_NORM_AFTER};
    const char *norm = stx_file_meta(f, "norm");
    size_t n;
    memset(d, 0, sizeof *d);
    d->layers = (size_t)need(f, "layers");
    d->bidirectional = (int)meta(f, "bidirectional", 0);
    d->transform = need(f, "attention") != 0 ? STX_SRU_ATTENTION : STX_SRU_LINEAR;
    n = sizes_of(f, "proj", projs, 16);
    if (n > 1)
        d->projs = projs;
    else
        d->proj = projs[0];
    d->heads = (size_t)meta(f, "heads", 1);
    d->attention_every = (size_t)meta(f, "attn_every", 1);
    if (meta(f, "attn_last", -1) > 0) {
        d->attention_last = (size_t)meta(f, "attn_last", 0);
        d->attention_every = 0;
    }
    d->no_attn_norm = !(int)meta(f, "attn_norm", 1);
    d->attn_norm_first = (int)meta(f, "attn_pre", 0);
    d->norm = norm ? norm_kinds[index_of(norm, "norm", norms)] : STX_SRU_NORM_NONE;
    d->no_skip = !(int)meta(f, "skip", 1);
    d->tanh = (int)meta(f, "tanh", 0);
    d->rescale = (int)meta(f, "rescale", 0);
    d->highway_bias = meta(f, "highway_bias", 0);
    d->input_first = (int)meta(f, "input_first", 0);
    d->not_causal = !(int)meta(f, "causal", 1);
    if (meta(f, "literal_norm", 0) > 0) d->literal = STX_SRU_LITERAL_NORM;
    d->zero_pads = (int)meta(f, "zero_pads", 0);
    d->v1 = (int)meta(f, "v1", 0);
}

static void memories(stx_ctx *x, const stx_file *f, const char *name, const stx_sru_state *s) {
    char key[64];
    const stx_tensor *t;
    size_t l;
    for (l = 0; l < s->model->desc.layers; l++) {
        if (!s->model->layer[l].attends) continue;
        snprintf(key, sizeof key, "memory.%zu", l);
        t = stx_memory_read(s->memory, l, SIZE_MAX);
        same_as(x, f, name, key, t ? t->data : NULL, t ? t->size : 0, TOL, 1e-7);
    }
}

/* Returns a copy of time steps [t0, t0 + t) of v (B,n,C). The caller frees it. */
static stx_real *columns(const stx_real *v, size_t B, size_t n, size_t t0, size_t t, size_t C) {
    stx_real *r = (stx_real *)malloc((B * t * C + 1) * sizeof *r);
    size_t b;
    for (b = 0; b < B; b++) memcpy(r + b * t * C, v + (b * n + t0) * C, t * C * sizeof *r);
    return r;
}

/* The sequences (B,n,..) in the file of a stack. all: the outputs so far; p: the
   parameters. */
typedef struct sequences {
    stx_params *p;
    size_t B, n;
    stx_real *x, *G, *Glast, *all;
    int32_t *pads;
} sequences;

static void read_sequences(sequences *q, const stx_file *f, const stx_sru *m) {
    const stx_entry *e = stx_file_find(f, "x");
    q->B = e->dim[0];
    q->n = e->dim[1];
    q->x = reals(f, "x", NULL);
    q->G = reals(f, "G", NULL);
    q->Glast = reals(f, "Glast", NULL);
    q->pads = integers(f, "pad", NULL);
    q->all = (stx_real *)malloc((q->B * q->n * m->O + 1) * sizeof *q->all);
}

static void free_sequences(sequences *q) {
    free(q->x);
    free(q->G);
    free(q->Glast);
    free(q->pads);
    free(q->all);
}

/* Returns the input of time steps [t0, t0 + T), as a variable or without a gradient.
   *pad receives its padding. */
static stx_tensor *input_at(stx_ctx *x, const sequences *q, const stx_sru *m, size_t t0, size_t T,
                            int variable, stx_ids **pad) {
    const size_t I = m->desc.input;
    stx_real *piece = columns(q->x, q->B, q->n, t0, T, I);
    stx_tensor *in = variable ? stx_variable(x, piece, q->B, T, I, 0)
                              : stx_input(x, piece, q->B, T, I, 0);
    free(piece);
    *pad = q->pads ? token_block(x, q->pads, q->B, q->n, t0, T) : NULL;
    return in;
}

/* Compares the gradients of the initial states c (layers,B,O). */
static void state_gradients(stx_ctx *x, const stx_file *f, const char *name, stx_tensor *const *c,
                            size_t layers) {
    const size_t n = c[0]->size;
    stx_real *all = (stx_real *)calloc(layers * n + 1, sizeof *all);
    size_t l;
    for (l = 0; l < layers && stx_ok(x); l++) {
        stx_real *g = host_of(x, c[l]->grad, n);
        memcpy(all + l * n, g, n * sizeof *g);
        free(g);
    }
    array_is(f, name, "grad.c0", all, layers * n);
    free(all);
}

/* Checks the attention maps of the last forward pass. */
static void maps(const stx_sru *m, const char *name, size_t B) {
    size_t l, b;
    for (l = 0; l < m->desc.layers; l++)
        for (b = 0; m->layer[l].attends && b < B; b++)
            check_map(m->ctx, name, l, b, &m->attended[l], stx_sru_attention_map(m, l, b));
}

/* Runs the last segment through stx_sru_forward with variables as states, so that all
   gradients can be compared. */
static void last_segment(stx_sru *m, const stx_sru_state *s, const stx_file *f, const char *name,
                         const sequences *q, stx_tensor *in, stx_ids *pad) {
    const size_t layers = m->desc.layers, B = q->B, O = m->O,
                 rows = stx_memory_max_rows(s->memory);
    stx_ctx *x = m->ctx;
    stx_sru_io io;
    stx_tensor *c[16], *mem[16], *last[16], *h, *loss;
    stx_real *states = host_of(x, s->c, layers * B * O), *piece;
    size_t l;

    memset(&io, 0, sizeof io);
    memset(mem, 0, sizeof mem);
    for (l = 0; l < layers; l++) {
        c[l] = stx_variable(x, states + l * B * O, B, O, 0, 0);
        if (!m->layer[l].attends || !rows) continue;
        piece = host_of(x, stx_memory_read(s->memory, l, SIZE_MAX)->data,
                        B * rows * m->layer[l].Ci);
        mem[l] = stx_input(x, piece, B, rows, m->layer[l].Ci, 0);
        free(piece);
    }
    free(states);
    io.c0 = c;
    io.memory = mem;
    io.pad = pad;
    io.window = s->window;
    io.last = last;
    for (l = 0; l < layers && q->pads && !io.memory_pad; l++)
        io.memory_pad = stx_memory_mask(s->memory, l, SIZE_MAX, NULL, 0);
    h = stx_sru_forward(m, in, &io);
    loss = against(x, h, q->G);
    for (l = 0; l < layers; l++) loss = stx_add(x, loss, against(x, last[l], q->Glast + l * B * O));
    stx_backward(x, loss);
    same_grads(x, f, name, "grad.param.", q->p, TOL, 1e-7);
    gradient(x, f, name, "grad.x", in);
    state_gradients(x, f, name, c, layers);
}

/* Runs segment [t0, t0 + T). The last segment is run twice: once for the gradients, and
   once without a tape for the outputs and the final states. Returns whether the segment
   was computed. */
static int segment(stx_sru *m, stx_sru_state *s, const stx_file *f, const char *name, sequences *q,
                   size_t t0, size_t T, int last) {
    const size_t O = m->O;
    stx_ctx *x = m->ctx;
    stx_tensor *in, *h;
    stx_ids *pad;
    stx_real *out;
    size_t b;
    stx_begin(x, STX_TRAIN);
    stx_params_zero_grad(q->p);
    in = input_at(x, q, m, t0, T, 1, &pad);
    if (last) {
        last_segment(m, s, f, name, q, in, pad);
        stx_begin(x, STX_EVAL);
        in = input_at(x, q, m, t0, T, 0, &pad);
    }
    h = stx_sru_segment(m, in, pad, s, s);
    CHECK(h != NULL, "%s: %s", name, stx_error(x));
    if (!h) return 0;
    maps(m, name, q->B);
    out = host_of(x, h->data, h->size);
    for (b = 0; b < q->B; b++)
        memcpy(q->all + (b * q->n + t0) * O, out + b * T * O, T * O * sizeof *out);
    free(out);
    return 1;
}

static void stack_case(const char *name, int threads) {
    stx_ctx *x = golden_ctx(threads);
    stx_file *f = open_golden(x, name);
    stx_sru_desc d;
    stx_sru *m;
    stx_sru_state *s;
    sequences q;
    stx_real *c0;
    size_t seg[16], count, n, i, t0;
    const stx_entry *e;

    if (!f) {
        stx_destroy(x);
        return;
    }
    stack_desc(f, &d);
    d.input = (size_t)need(f, "input");
    d.hidden = (size_t)need(f, "hidden");
    count = sizes_of(f, "segments", seg, 16);
    e = stx_file_find(f, "x");
    CHECK(e && e->ndim == 3 && e->dim[2] == d.input && count, "%s: x", name);
    if (!e) return;
    q.p = stx_params_create(x);
    m = stx_sru_create(q.p, "", &d);
    CHECK(m && stx_params_load(q.p, f, "param."), "%s: %s", name, stx_error(x));
    if (!m || !stx_ok(x)) {
        stx_file_close(f);
        stx_destroy(x);
        return;
    }
    CHECK(stx_params_size(q.p) == stx_sru_count(&d), "%s: %zu parameters, counted %zu", name,
          stx_params_size(q.p), stx_sru_count(&d));
    read_sequences(&q, f, m);
    s = stx_sru_state_create(m, q.B);
    s->window = (size_t)meta(f, "window", 0);
    c0 = reals(f, "c0", &n);
    if (c0) stx_upload(x, s->c, c0, n);
    for (i = t0 = 0; i < count; t0 += seg[i++])
        if (!segment(m, s, f, name, &q, t0, seg[i], i + 1 == count)) break;
    array_is(f, name, "h", q.all, q.B * q.n * m->O);
    same_as(x, f, name, "c_last", s->c, d.layers * q.B * m->O, TOL, 1e-7);
    memories(x, f, name, s);
    CHECK(stx_ok(x), "%s: %s", name, stx_error(x));
    free(c0);
    free_sequences(&q);
    stx_sru_state_free(s);
    stx_file_close(f);
    stx_destroy(x);
}

static void lm_desc(const stx_file *f, stx_sru_lm_desc *d) {
    size_t v[16], n, i;
    const char *cut = stx_file_meta(f, "cutoffs");
    memset(d, 0, sizeof *d);
    stack_desc(f, &d->sru);
    d->vocab = (size_t)need(f, "vocab");
    d->dim = (size_t)need(f, "dim");
    d->emb = (size_t)meta(f, "emb", 0);
    d->adapt_io = cut && *cut;
    d->tied = !d->adapt_io && (int)meta(f, "tied", 0);
    if (!d->adapt_io) return;
    n = sizes_of(f, "cutoffs", v, 7);
    for (i = 0; i < n; i++) d->cutoff[d->cutoffs++] = v[i];
    d->emb_adaptive = (size_t)need(f, "n_e");
    d->divval = need(f, "div_val");
    d->separate_projs = (int)need(f, "separate_projs");
}

/* Compares a segment's log p, in an evaluation that does not write the state. This
   function normalises the logits. */
static void last_logits(stx_sru_lm *m, stx_sru_state *s, const stx_file *f, const char *name,
                        stx_ids *in) {
    const size_t V = m->desc.vocab;
    stx_ctx *x = m->ctx;
    stx_tensor *h = stx_sru_lm_forward(m, in, s, NULL), *y;
    stx_real *v;
    size_t r, w;
    y = m->desc.adapt_io ? stx_sru_lm_log_probs(m, h) : stx_sru_lm_logits(m, h);
    if (!y) return;
    v = host_of(x, y->data, y->size);
    for (r = 0; r < y->size / V; r++) {
        double z = 0;
        for (w = 0; w < V; w++) z += exp((double)v[r * V + w]);
        for (w = 0; w < V; w++) v[r * V + w] = (stx_real)((double)v[r * V + w] - log(z));
    }
    stx_upload(x, y->data, v, y->size);
    same_as(x, f, name, "logits", y->data, y->size, TOL, 1e-7);
    free(v);
}

/* Compares the nll, gradients, states and memories of all segments, and log p of the
   last segment. */
static void lm_segments(stx_sru_lm *m, const stx_file *f, const char *name, size_t B,
                        const size_t *seg, size_t count) {
    stx_ctx *x = m->ctx;
    stx_sru_state *s = stx_sru_state_create(m->sru, B);
    size_t i, n, t0, l;
    int32_t *tok = integers(f, "tokens", &n);
    double *nll = entry(f, "nll", NULL);
    char key[64];
    n /= B;
    s->window = (size_t)meta(f, "window", 0);
    for (i = t0 = 0; i < count; t0 += seg[i++]) {
        stx_ids *in, *out;
        stx_tensor *loss;
        if (i + 1 == count) {
            stx_begin(x, STX_EVAL);
            last_logits(m, s, f, name, token_block(x, tok, B, n, t0, seg[i]));
        }
        stx_begin(x, STX_TRAIN);
        stx_params_zero_grad(m->params);
        in = token_block(x, tok, B, n, t0, seg[i]);
        out = token_block(x, tok, B, n, t0 + 1, seg[i]);
        loss = stx_sru_lm_loss(m, in, out, s, s);
        if (!m->sru->desc.recompute_layers) maps(m->sru, name, B);
        CHECK(CLOSE(stx_item(x, loss), nll[i], TOL), "%s segment %zu: nll %.12g, expected %.12g %s",
              name, i, stx_item(x, loss), nll[i], stx_error(x));
        stx_backward(x, loss);
    }
    same_grads(x, f, name, "grad.", m->params, TOL, 1e-7);
    for (l = 0; l < m->sru->desc.layers; l++) {
        const size_t size = B * m->desc.dim;
        snprintf(key, sizeof key, "c.%zu", l);
        same_as(x, f, name, key, stx_offset_ptr(x, s->c, l * size), size, TOL, 1e-7);
    }
    memories(x, f, name, s);
    free(tok);
    free(nll);
    stx_sru_state_free(s);
}

static void lm_run(const char *name, int recompute, int threads) {
    stx_ctx *x = golden_ctx(threads);
    stx_file *f = open_golden(x, name);
    stx_sru_lm_desc d;
    stx_sru_lm *m;
    size_t B, seg[16], count;
    if (!f) {
        stx_destroy(x);
        return;
    }
    lm_desc(f, &d);
    d.sru.recompute_layers = recompute ? SIZE_MAX : 0;
    B = (size_t)need(f, "batch");
    count = sizes_of(f, "segments", seg, 16);
    m = stx_sru_lm_create(x, &d);
    CHECK(m && stx_params_load(m->params, f, "param."), "%s: %s", name, stx_error(x));
    if (m && stx_ok(x)) {
        CHECK(stx_params_size(m->params) == stx_sru_lm_count(&d), "%s: %zu parameters, counted %zu",
              name, stx_params_size(m->params), stx_sru_lm_count(&d));
        lm_segments(m, f, name, B, seg, count);
        CHECK(stx_ok(x), "%s: %s", name, stx_error(x));
    }
    stx_file_close(f);
    stx_destroy(x);
}

static void lm_case(const char *name, int threads) {
    lm_run(name, 0, threads);
    lm_run(name, 1, threads);
}

/* Trains with state, and compares learning rates, losses, gradient norms and final
   parameters. */
static void curve_steps(stx_sru_lm *m, const stx_file *f, const char *name, int kind) {
    const size_t B = (size_t)need(f, "batch"), T = (size_t)need(f, "block"),
                 steps = (size_t)need(f, "steps");
    stx_ctx *x = m->ctx;
    stx_sru_state *s = stx_sru_state_create(m->sru, B);
    stx_optim_desc od;
    stx_optim *o;
    stx_schedule sc;
    size_t n, k;
    int32_t *tok = integers(f, "tokens", &n);
    double *loss = entry(f, "loss", NULL), *lr = entry(f, "lr", NULL),
           *norm = entry(f, "norm", NULL);

    memset(&od, 0, sizeof od);
    od.kind = kind;
    od.clip = need(f, "clip");
    od.weight_decay = need(f, "weight_decay");
    od.beta1 = need(f, "beta1");
    od.beta2 = need(f, "beta2");
    od.eps = need(f, "eps");
    o = stx_optim_create(m->params, &od);
    memset(&sc, 0, sizeof sc);
    sc.kind = STX_LR_RECURSIVE;
    sc.lr = need(f, "lr");
    sc.warmup = (uint64_t)need(f, "warmup");
    sc.total = (uint64_t)need(f, "max_iter");
    n /= B;
    for (k = 0; k < steps; k++) {
        stx_ids *in, *out;
        stx_tensor *l;
        double rate = stx_schedule_lr(&sc, k + 1);
        CHECK(CLOSE(rate, lr[k], 1e-12), "%s step %zu: rate %.15g, expected %.15g", name, k, rate,
              lr[k]);
        stx_begin(x, STX_TRAIN);
        in = token_block(x, tok, B, n, k * T, T);
        out = token_block(x, tok, B, n, k * T + 1, T);
        l = stx_sru_lm_loss(m, in, out, s, s);
        CHECK(CLOSE(stx_item(x, l), loss[k], TOL), "%s step %zu: loss %.12g, expected %.12g", name,
              k, stx_item(x, l), loss[k]);
        stx_backward(x, l);
        stx_optim_step(o, rate);
        CHECK(stx_optim_sync(o) && CLOSE(o->grad_norm, norm[k], 10 * TOL),
              "%s step %zu: norm %.12g, expected %.12g", name, k, o->grad_norm, norm[k]);
    }
    same_finals(x, f, name, m->params, TOL, 1e-7);
    free(tok);
    free(loss);
    free(lr);
    free(norm);
}

static void curve_case(const char *name, int kind) {
    stx_ctx *x = golden_ctx(0);
    stx_file *f = open_golden(x, name);
    stx_sru_lm_desc d;
    stx_sru_lm *m;
    if (!f) {
        stx_destroy(x);
        return;
    }
    lm_desc(f, &d);
    m = stx_sru_lm_create(x, &d);
    CHECK(m && stx_params_load(m->params, f, "param."), "%s: %s", name, stx_error(x));
    if (m && stx_ok(x)) {
        curve_steps(m, f, name, kind);
        CHECK(stx_ok(x), "%s: %s", name, stx_error(x));
    }
    stx_file_close(f);
    stx_destroy(x);
}

/* Compares the optimisers with the options of the SRU recipes. */
static void optim_case(const char *variant, int kind, int skip) {
    static const size_t dims[3][3] = {{3, 5, 0}, {7, 0, 0}, {2, 1, 4}};
    stx_ctx *x = golden_ctx(0);
    stx_file *f = open_golden(x, "sru_optim");
    stx_params *p;
    stx_optim_desc od;
    stx_optim *o;
    double *expected[3], *grad[3];
    size_t i, k, n[3];
    char key[64];
    if (!f) {
        stx_destroy(x);
        return;
    }
    p = stx_params_create(x);
    memset(&od, 0, sizeof od);
    od.kind = kind;
    od.radam_skip = skip;
    snprintf(key, sizeof key, "%s.weight_decay", variant);
    od.weight_decay = need(f, key);
    od.beta1 = need(f, "beta1");
    od.beta2 = need(f, "beta2");
    od.eps = need(f, "eps");
    for (i = 0; i < 3; i++) {
        double *init;
        snprintf(key, sizeof key, "p%zu", i);
        stx_param(p, STX_ZEROS, 0, key, dims[i][0], dims[i][1], dims[i][2], 0);
        snprintf(key, sizeof key, "p%zu.init", i);
        init = entry(f, key, &n[i]);
        put_f64(x, p->tensor[i]->data, init, n[i]);
        free(init);
        snprintf(key, sizeof key, "p%zu.grad", i);
        grad[i] = entry(f, key, NULL);
        snprintf(key, sizeof key, "%s.p%zu", variant, i);
        expected[i] = entry(f, key, NULL);
        CHECK(grad[i] && expected[i], "%s", key);
    }
    o = stx_optim_create(p, &od);
    snprintf(key, sizeof key, "%s.lr", variant);
    for (k = 0; k < 12 && stx_ok(x); k++) {
        stx_begin(x, STX_TRAIN);
        for (i = 0; i < 3; i++) put_f64(x, p->tensor[i]->grad, grad[i] + k * n[i], n[i]);
        stx_optim_step(o, need(f, key));
        for (i = 0; i < 3; i++) {
            double *v = doubles_of(x, p->tensor[i]->data, n[i]);
            double e = test_error(v, expected[i] + k * n[i], n[i], 1e-7);
            CHECK(e <= TOL, "%s update %zu of p%zu: error %g", variant, k + 1, i, e);
            free(v);
        }
    }
    CHECK(stx_ok(x) && k == 12, "%s: %s", variant, stx_error(x));
    for (i = 0; i < 3; i++) {
        free(grad[i]);
        free(expected[i]);
    }
    stx_file_close(f);
    stx_destroy(x);
}

static void schedule_case(void) {
    stx_ctx *x = golden_ctx(1);
    stx_file *f = open_golden(x, "sru_optim");
    stx_schedule s;
    double *plus1, *zero, *noam;
    size_t n, k;
    if (!f) {
        stx_destroy(x);
        return;
    }
    plus1 = entry(f, "cosine.plus1", &n);
    zero = entry(f, "cosine.zero", NULL);
    noam = entry(f, "noam", NULL);
    memset(&s, 0, sizeof s);
    s.kind = STX_LR_RECURSIVE;
    s.lr = need(f, "cosine.lr");
    s.warmup = (uint64_t)need(f, "cosine.warmup");
    s.total = (uint64_t)need(f, "cosine.max_iter");
    CHECK(plus1 && zero && noam && n == 41, "%zu rates", n);
    for (k = 0; plus1 && k < n; k++) {
        s.literal = 0;
        CHECK(CLOSE(stx_schedule_lr(&s, k + 1) / s.lr, plus1[k] / s.lr, 1e-12),
              "recursive cosine %zu: %.15g, expected %.15g", k, stx_schedule_lr(&s, k + 1),
              plus1[k]);
        s.literal = 1;
        CHECK(CLOSE(stx_schedule_lr(&s, k + 1) / s.lr, zero[k] / s.lr, 1e-12),
              "recursive cosine from 0, %zu: %.15g, expected %.15g", k, stx_schedule_lr(&s, k + 1),
              zero[k]);
    }
    memset(&s, 0, sizeof s);
    s.kind = STX_LR_NOAM;
    s.lr = need(f, "noam.lr");
    s.dim = (size_t)need(f, "noam.dim");
    s.warmup = (uint64_t)need(f, "noam.warmup");
    for (k = 0; noam && k < 40; k++)
        CHECK(CLOSE(stx_schedule_lr(&s, k + 1) / s.lr, noam[k] / s.lr, 1e-12),
              "noam %zu: %.15g, expected %.15g", k + 1, stx_schedule_lr(&s, k + 1), noam[k]);
    free(plus1);
    free(zero);
    free(noam);
    stx_file_close(f);
    stx_destroy(x);
}

/* Calls fn for the files STEM_01, STEM_02, .., of which there must be `most`. */
static void all_of(const char *stem, size_t most, void (*fn)(const char *, int)) {
    char name[64], path[1200];
    size_t i, found = 0;
    for (i = 1; i <= most; i++) {
        FILE *file;
        snprintf(name, sizeof name, "%s_%02zu", stem, i);
        snprintf(path, sizeof path, "%s/%s.safetensors", dir, name);
        file = fopen(path, "rb");
        if (!file) continue;
        fclose(file);
        found++;
        fn(name, 1);
        if (golden_cpu()) fn(name, 16);
    }
    CHECK(found == most, "%zu files of %s", found, stem);
}

int main(int argc, char **argv) {
    if (argc > 1) dir = argv[1];
    cell_case("sru_cell_a", 1);
    cell_case("sru_cell_b", 1);
    cell_case("sru_cell_c", 1);
    all_of("sru_cell", 23, cell_case);
    attn_case("sru_attn_post", 1);
    attn_case("sru_attn_pre", 1);
    all_of("sru_attn", 18, attn_case);
    all_of("sru_stack", 27, stack_case);
    all_of("sru_lm", 8, lm_case);
    curve_case("sru_curve_radam", STX_RADAM);
    curve_case("sru_curve_adamw", STX_ADAMW);
    optim_case("radam", STX_RADAM, 0);
    optim_case("radam_skip", STX_RADAM, 1);
    optim_case("radam_nodecay", STX_RADAM, 0);
    optim_case("adamw", STX_ADAMW, 0);
    schedule_case();
    return test_end();
}
