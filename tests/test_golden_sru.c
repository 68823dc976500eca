/* seqtx_sru.h against the golden vectors of an independent PyTorch implementation
   (tests/golden): the recurrence, the attention transform, stacks over segments,
   language models and training curves; every result, state and gradient. 1e-10 in the
   double build, 1e-5 in float. Usage: test_golden_sru DIR */
#include <stdint.h>
#include "../seqtx_sru.h"
#include "inner.h"
#include "test.h"
#include "golden.h"

#ifdef SEQTX_DOUBLE
static const double TOL = 1e-10;
#else
static const double TOL = 1e-5;
#endif

/* A variable or, with full, a float tensor of the device with a gradient; NULL when
   the file has no such entry */
static stx_tensor *tensor_of(stx_ctx *x, const stx_file *f, const char *name, size_t d0, size_t d1,
                             size_t d2, size_t d3) {
    size_t n, i;
    double *v = entry(f, name, &n);
    stx_real *r;
    stx_tensor *t;
    if (!v) return NULL;
    r = (stx_real *)malloc((n + 1) * sizeof *r);
    for (i = 0; i < n; i++) r[i] = (stx_real)v[i];
    t = stx_variable(x, r, d0, d1, d2, d3);
    CHECK(t && t->size == n, "%s: %zu numbers in the file: %s", name, n, stx_error(x));
    free(r);
    free(v);
    return t;
}

static stx_real *numbers(const stx_file *f, const char *name, size_t *n) {
    size_t i;
    double *v = entry(f, name, n);
    stx_real *r = v ? (stx_real *)malloc((*n + 1) * sizeof *r) : NULL;
    for (i = 0; v && i < *n; i++) r[i] = (stx_real)v[i];
    free(v);
    return r;
}

static stx_ids *ids_of(stx_ctx *x, const stx_file *f, const char *name, size_t B, size_t T) {
    size_t n;
    int32_t *v = integers(f, name, &n);
    stx_ids *t = v ? stx_tokens(x, v, B, T) : NULL;
    CHECK(!v || n == B * T, "%s: %zu numbers", name, n);
    free(v);
    return t;
}

/* sum(y G) as a tensor, for a G that may be absent */
static stx_tensor *against(stx_ctx *x, stx_tensor *y, const stx_real *G) {
    stx_tensor *p, *g = G && y ? stx_input(x, G, y->dim[0], y->dim[1], y->dim[2], y->dim[3]) : NULL;
    p = g ? stx_mul(x, y, g) : NULL;
    return p ? stx_scale(x, stx_mean(x, p), (double)y->size) : NULL;
}

static void gradient(stx_ctx *x, const stx_file *f, const char *file, const char *name,
                     const stx_tensor *t) {
    if (t) same_as(x, f, file, name, t->grad, t->size, TOL, 1e-7);
}

static void cell_case(const char *name, int threads) {
    stx_ctx *x = golden_ctx(threads);
    stx_file *f = open_golden(x, name);
    stx_sru_recurrence_in c;
    stx_tensor *h, *last;
    stx_real *G, *E;
    size_t B, T, D, O, k, n;
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
        G = numbers(f, "G", &n);
        E = numbers(f, "Glast", &n);
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

/* Is query t (of T) of batch row b, which sees M rows of memory too, one that may see
   nothing but padding? Causal files only. */
static int blind(const stx_ids *before, const stx_ids *pad, size_t b, size_t t, size_t M,
                 size_t window) {
    size_t row = M + t, j;
    for (j = window && row > window ? row - window : 0; j <= row; j++) {
        const stx_ids *p = j < M ? before : pad;
        if (!p || !p->data[j < M ? b * M + j : b * p->T + j - M]) return 0;
    }
    return 1;
}

/* The transform alone: a stack of one layer, put together by hand. In files of the
   reference's own mask (literal_mask) such a query sees the future. It is padding
   itself, and the recurrence does not look at its U; here it sees nothing. Where there
   is one, the U of all other queries is compared, and no gradient, for those of the
   file come from all. */
static void attn_case(const char *name, int threads) {
    stx_ctx *x = golden_ctx(threads);
    stx_file *f = open_golden(x, name);
    stx_sru m;
    stx_sru_layer p;
    stx_tensor *h, *M, *U;
    stx_ids *pad, *before;
    stx_real *G;
    size_t B, T, Tm, I, P, k, O, n;
    const char *norm;
    if (!f) {
        stx_destroy(x);
        return;
    }
    B = (size_t)need(f, "B");
    T = (size_t)need(f, "T");
    Tm = (size_t)need(f, "memory_rows");
    I = (size_t)need(f, "I");
    P = (size_t)need(f, "P");
    k = (size_t)need(f, "k");
    O = (size_t)need(f, "H") * (size_t)need(f, "D");
    norm = stx_file_meta(f, "norm");
    CHECK(norm && (!strcmp(norm, "none") || !strcmp(norm, "pre") || !strcmp(norm, "post")),
          "%s: norm %s", name, norm ? norm : "");
    stx_begin(x, STX_TRAIN);
    memset(&m, 0, sizeof m);
    memset(&p, 0, sizeof p);
    m.ctx = x;
    m.O = O;
    m.layer = &p;
    m.desc.transform = STX_SRU_ATTENTION;
    m.desc.layers = 1;
    m.desc.heads = (size_t)need(f, "heads");
    m.desc.not_causal = !(int)need(f, "causal");
    m.desc.attn_norm_first = norm && !strcmp(norm, "pre");
    p.Ci = I;
    p.P = P;
    p.k = k;
    p.attends = (int)need(f, "attention");
    p.w1 = tensor_of(x, f, "w1", P, I, 0, 0);
    p.w2 = tensor_of(x, f, "w2", 2 * P, P, 0, 0);
    p.w3 = tensor_of(x, f, "w3", k * O, P, 0, 0);
    p.alpha_attn = tensor_of(x, f, "alpha", 1, 0, 0, 0);
    p.attn_gain = tensor_of(x, f, "gain", P, 0, 0, 0);
    p.attn_shift = tensor_of(x, f, "shift", P, 0, 0, 0);
    h = tensor_of(x, f, "x", B, T, I, 0);
    M = stx_detach(x, tensor_of(x, f, "memory", B, Tm, I, 0));
    pad = ids_of(x, f, "pad", B, T);
    before = ids_of(x, f, "memory_pad", B, Tm);
    U = inner_sru_transform(&m, 0, h, M, before, pad, B, Tm, T, (size_t)need(f, "window"));
    CHECK(U != NULL, "%s: %s", name, stx_error(x));
    if (U) {
        size_t b, t, row = k * O, blinds = 0;
        const size_t window = (size_t)need(f, "window");
        for (b = 0; meta(f, "literal_mask", 0) > 0 && b < B; b++)
            for (t = 0; t < T; t++) blinds += (size_t)blind(before, pad, b, t, Tm, window);
        if (blinds) {
            double *want = entry(f, "U", &n);
            stx_real *all = host_of(x, U->data, U->size);
            CHECK(want && n == U->size && blinds < B * T, "%s: %zu queries that see nothing", name,
                  blinds);
            for (b = 0; want && n == U->size && b < B; b++)
                for (t = 0; t < T; t++) {
                    double *have = (double *)malloc(row * sizeof *have), e;
                    size_t i;
                    for (i = 0; i < row; i++) have[i] = (double)all[(b * T + t) * row + i];
                    e = test_error(have, want + (b * T + t) * row, row, 1e-7);
                    if (!blind(before, pad, b, t, Tm, window))
                        CHECK(e <= TOL, "%s: U of row %zu, time %zu: error %g", name, b, t, e);
                    else
                        CHECK(pad->data[b * T + t] && e > 1e-3,
                              "%s: row %zu, time %zu is no padding, or has the reference's U: %g",
                              name, b, t, e);
                    free(have);
                }
            free(all);
            free(want);
            stx_file_close(f);
            stx_destroy(x);
            return;
        }
        same_as(x, f, name, "U", U->data, U->size, TOL, 1e-7);
        G = numbers(f, "G", &n);
        CHECK(n == U->size, "%s: G has %zu numbers", name, n);
        stx_backward_from(x, U, G);
        free(G);
        gradient(x, f, name, "dx", h);
        gradient(x, f, name, "dw1", p.w1);
        gradient(x, f, name, "dw2", p.w2);
        gradient(x, f, name, "dw3", p.w3);
        gradient(x, f, name, "dalpha", p.alpha_attn);
        gradient(x, f, name, "dgain", p.attn_gain);
        gradient(x, f, name, "dshift", p.attn_shift);
    }
    CHECK(stx_ok(x), "%s: %s", name, stx_error(x));
    stx_file_close(f);
    stx_destroy(x);
}

/* Whole numbers of a text like "5,5,3"; returns how many */
static size_t list_of(const stx_file *f, const char *key, size_t *v, size_t most) {
    const char *s = stx_file_meta(f, key);
    size_t n = 0;
    CHECK(s != NULL, "no metadata %s", key);
    for (; s && *s && n < most; s += strcspn(s, ","), s += *s == ',') v[n++] = (size_t)atol(s);
    return n;
}

static size_t projs[16];

static void stack_desc(const stx_file *f, stx_sru_desc *d) {
    const char *norm = stx_file_meta(f, "norm");
    size_t n;
    memset(d, 0, sizeof *d);
    d->layers = (size_t)need(f, "layers");
    d->bidirectional = (int)meta(f, "bidirectional", 0);
    d->transform = need(f, "attention") != 0 ? STX_SRU_ATTENTION : STX_SRU_LINEAR;
    n = list_of(f, "proj", projs, 16);
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
    d->norm = !norm || !strcmp(norm, "none") ? STX_SRU_NORM_NONE
              : !strcmp(norm, "pre")         ? STX_SRU_NORM_BEFORE
                                             : STX_SRU_NORM_AFTER;
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

static void param_gradients(stx_ctx *x, const stx_file *f, const char *name, const stx_params *p,
                            const char *prefix) {
    char key[160];
    size_t i;
    for (i = 0; i < p->count; i++) {
        snprintf(key, sizeof key, "%s%s", prefix, p->name[i]);
        same_as(x, f, name, key, p->tensor[i]->grad, p->tensor[i]->size, TOL, 1e-7);
    }
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

/* columns [t0, t0+t) of (B,n,C) */
static stx_real *columns(const stx_real *v, size_t B, size_t n, size_t t0, size_t t, size_t C) {
    stx_real *r = (stx_real *)malloc((B * t * C + 1) * sizeof *r);
    size_t b;
    for (b = 0; b < B; b++) memcpy(r + b * t * C, v + (b * n + t0) * C, t * C * sizeof *r);
    return r;
}

static void stack_case(const char *name, int threads) {
    stx_ctx *x = golden_ctx(threads);
    stx_file *f = open_golden(x, name);
    stx_sru_desc d;
    stx_params *p;
    stx_sru *m;
    stx_sru_state *s;
    stx_real *X, *G, *E, *c0, *all, *piece;
    int32_t *pads;
    size_t seg[16], count, B, total, n, i, l, t0, b;
    const stx_entry *e;
    if (!f) {
        stx_destroy(x);
        return;
    }
    stack_desc(f, &d);
    d.input = (size_t)need(f, "input");
    d.hidden = (size_t)need(f, "hidden");
    count = list_of(f, "segments", seg, 16);
    e = stx_file_find(f, "x");
    CHECK(e && e->ndim == 3 && e->dim[2] == d.input && count, "%s: x", name);
    if (!e) return;
    B = e->dim[0];
    total = e->dim[1];
    p = stx_params_create(x);
    m = stx_sru_create(p, "", &d);
    CHECK(m && stx_params_load(p, f, "param."), "%s: %s", name, stx_error(x));
    if (!m || !stx_ok(x)) {
        stx_file_close(f);
        stx_destroy(x);
        return;
    }
    CHECK(stx_params_size(p) == stx_sru_count(&d), "%s: %zu parameters, counted %zu", name,
          stx_params_size(p), stx_sru_count(&d));
    s = stx_sru_state_create(m, B);
    s->window = (size_t)meta(f, "window", 0);
    X = numbers(f, "x", &n);
    G = numbers(f, "G", &n);
    E = numbers(f, "Glast", &n);
    c0 = numbers(f, "c0", &n);
    if (c0) stx_upload(x, s->c, c0, n);
    pads = integers(f, "pad", &n);
    all = (stx_real *)malloc((B * total * m->O + 1) * sizeof *all);
    for (i = t0 = 0; i < count; t0 += seg[i++]) {
        stx_tensor *in, *h, *loss;
        stx_ids *pad = NULL;
        stx_real *out;
        stx_begin(x, STX_TRAIN);
        stx_params_zero_grad(p);
        piece = columns(X, B, total, t0, seg[i], d.input);
        in = stx_variable(x, piece, B, seg[i], d.input, 0);
        free(piece);
        if (pads) {
            int32_t *v = (int32_t *)malloc(B * seg[i] * sizeof *v);
            for (b = 0; b < B; b++)
                memcpy(v + b * seg[i], pads + b * total + t0, seg[i] * sizeof *v);
            pad = stx_tokens(x, v, B, seg[i]);
            free(v);
        }
        if (i + 1 < count)
            h = stx_sru_segment(m, in, pad, s, s);
        else { /* by hand, to have the gradients of the states too */
            stx_sru_io io;
            stx_tensor *c[16], *mem[16], *last[16];
            stx_real *states = host_of(x, s->c, d.layers * B * m->O);
            memset(&io, 0, sizeof io);
            memset(mem, 0, sizeof mem);
            for (l = 0; l < d.layers; l++) {
                c[l] = stx_variable(x, states + l * B * m->O, B, m->O, 0, 0);
                if (!m->layer[l].attends || !stx_memory_max_rows(s->memory)) continue;
                piece = host_of(x, stx_memory_read(s->memory, l, SIZE_MAX)->data,
                                B * stx_memory_max_rows(s->memory) * m->layer[l].Ci);
                mem[l] = stx_input(x, piece, B, stx_memory_max_rows(s->memory), m->layer[l].Ci, 0);
                free(piece);
            }
            free(states);
            io.c0 = c;
            io.memory = mem;
            io.pad = pad;
            io.window = s->window;
            io.last = last;
            for (l = 0; l < d.layers && pads && !io.memory_pad; l++)
                io.memory_pad = stx_memory_mask(s->memory, l, SIZE_MAX, NULL, 0);
            h = stx_sru_forward(m, in, &io);
            loss = against(x, h, G);
            for (l = 0; l < d.layers; l++)
                loss = stx_add(x, loss, against(x, last[l], E + l * B * m->O));
            stx_backward(x, loss);
            param_gradients(x, f, name, p, "grad.param.");
            gradient(x, f, name, "grad.x", in);
            piece = (stx_real *)malloc((d.layers * B * m->O + 1) * sizeof *piece);
            for (l = 0; l < d.layers && stx_ok(x); l++) {
                stx_real *g = host_of(x, c[l]->grad, B * m->O);
                memcpy(piece + l * B * m->O, g, B * m->O * sizeof *g);
                free(g);
            }
            {
                double *want = entry(f, "grad.c0", &n),
                       *have = (double *)malloc((n + 1) * sizeof *have);
                CHECK(want && n == d.layers * B * m->O, "%s: grad.c0", name);
                for (l = 0; want && l < n; l++) have[l] = (double)piece[l];
                CHECK(want && test_error(have, want, n, 1e-7) <= TOL, "%s grad.c0: error %g", name,
                      want ? test_error(have, want, n, 1e-7) : 0);
                free(want);
                free(have);
            }
            free(piece);
            /* and again as a segment, for what it leaves behind: the same h,
               without a tape */
            stx_begin(x, STX_EVAL);
            piece = columns(X, B, total, t0, seg[i], d.input);
            in = stx_input(x, piece, B, seg[i], d.input, 0);
            free(piece);
            if (pads) {
                int32_t *v = (int32_t *)malloc(B * seg[i] * sizeof *v);
                for (b = 0; b < B; b++)
                    memcpy(v + b * seg[i], pads + b * total + t0, seg[i] * sizeof *v);
                pad = stx_tokens(x, v, B, seg[i]);
                free(v);
            }
            h = stx_sru_segment(m, in, pad, s, s);
        }
        CHECK(h != NULL, "%s: %s", name, stx_error(x));
        if (!h) break;
        out = host_of(x, h->data, h->size);
        for (b = 0; b < B; b++)
            memcpy(all + (b * total + t0) * m->O, out + b * seg[i] * m->O,
                   seg[i] * m->O * sizeof *out);
        free(out);
    }
    {
        double *want = entry(f, "h", &n), *have = (double *)malloc((n + 1) * sizeof *have);
        CHECK(want && n == B * total * m->O, "%s: h", name);
        for (i = 0; want && i < n; i++) have[i] = (double)all[i];
        CHECK(want && test_error(have, want, n, 1e-7) <= TOL, "%s h: error %g", name,
              want ? test_error(have, want, n, 1e-7) : 0);
        free(want);
        free(have);
    }
    same_as(x, f, name, "c_last", s->c, d.layers * B * m->O, TOL, 1e-7);
    memories(x, f, name, s);
    CHECK(stx_ok(x), "%s: %s", name, stx_error(x));
    free(X);
    free(G);
    free(E);
    free(c0);
    free(pads);
    free(all);
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
    n = list_of(f, "cutoffs", v, 7);
    for (i = 0; i < n; i++) d->cutoff[d->cutoffs++] = v[i];
    d->emb_adaptive = (size_t)need(f, "n_e");
    d->divval = need(f, "div_val");
    d->separate_projs = (int)need(f, "separate_projs");
}

/* T tokens from t0 on of (B,n), and those after them */
static void tokens_of(stx_ctx *x, const int32_t *tok, size_t B, size_t n, size_t t0, size_t T,
                      stx_ids **in, stx_ids **out) {
    int32_t *v = (int32_t *)calloc(B * T, sizeof *v);
    size_t b;
    for (b = 0; b < B; b++) memcpy(v + b * T, tok + b * n + t0, T * sizeof *v);
    *in = stx_tokens(x, v, B, T);
    for (b = 0; b < B; b++) memcpy(v + b * T, tok + b * n + t0 + 1, T * sizeof *v);
    *out = stx_tokens(x, v, B, T);
    free(v);
}

static void lm_run(const char *name, int recompute, int threads) {
    stx_ctx *x = golden_ctx(threads);
    stx_file *f = open_golden(x, name);
    stx_sru_lm_desc d;
    stx_sru_lm *m;
    stx_sru_state *s;
    size_t B, seg[16], count, i, n, t0, l;
    int32_t *tok;
    double *nll;
    char key[64];
    if (!f) {
        stx_destroy(x);
        return;
    }
    lm_desc(f, &d);
    d.sru.recompute = recompute;
    B = (size_t)need(f, "batch");
    count = list_of(f, "segments", seg, 16);
    m = stx_sru_lm_create(x, &d);
    CHECK(m && stx_params_load(m->params, f, "param."), "%s: %s", name, stx_error(x));
    if (!m || !stx_ok(x)) {
        stx_file_close(f);
        stx_destroy(x);
        return;
    }
    CHECK(stx_params_size(m->params) == stx_sru_lm_count(&d), "%s: %zu parameters, counted %zu",
          name, stx_params_size(m->params), stx_sru_lm_count(&d));
    s = stx_sru_state_create(m->sru, B);
    s->window = (size_t)meta(f, "window", 0);
    tok = integers(f, "tokens", &n);
    n /= B;
    nll = entry(f, "nll", NULL);
    for (i = t0 = 0; i < count; t0 += seg[i++]) {
        stx_ids *in, *out;
        stx_tensor *loss;
        if (i + 1 == count) {
            stx_tensor *h, *y;
            stx_real *v;
            size_t r, w;
            stx_begin(x, STX_EVAL);
            tokens_of(x, tok, B, n, t0, seg[i], &in, &out);
            h = stx_sru_lm_forward(m, in, s, NULL);
            y = d.adapt_io ? stx_sru_lm_log_probs(m, h) : stx_sru_lm_logits(m, h);
            v = y ? host_of(x, y->data, y->size) : NULL;
            for (r = 0; y && r < B * seg[i]; r++) {
                double z = 0;
                for (w = 0; w < d.vocab; w++) z += exp((double)v[r * d.vocab + w]);
                for (w = 0; w < d.vocab; w++)
                    v[r * d.vocab + w] = (stx_real)((double)v[r * d.vocab + w] - log(z));
            }
            if (y) {
                stx_upload(x, y->data, v, y->size);
                same_as(x, f, name, "logits", y->data, y->size, TOL, 1e-7);
            }
            free(v);
        }
        stx_begin(x, STX_TRAIN);
        stx_params_zero_grad(m->params);
        tokens_of(x, tok, B, n, t0, seg[i], &in, &out);
        loss = stx_sru_lm_loss(m, in, out, s, s);
        CHECK(CLOSE(stx_item(x, loss), nll[i], TOL), "%s segment %zu: nll %.12g, expected %.12g %s",
              name, i, stx_item(x, loss), nll[i], stx_error(x));
        stx_backward(x, loss);
    }
    param_gradients(x, f, name, m->params, "grad.");
    for (l = 0; l < m->sru->desc.layers; l++) {
        snprintf(key, sizeof key, "c.%zu", l);
        same_as(x, f, name, key, stx_offset_ptr(x, s->c, l * B * d.dim), B * d.dim, TOL, 1e-7);
    }
    memories(x, f, name, s);
    CHECK(stx_ok(x), "%s: %s", name, stx_error(x));
    free(tok);
    free(nll);
    stx_sru_state_free(s);
    stx_file_close(f);
    stx_destroy(x);
}

static void lm_case(const char *name, int threads) {
    lm_run(name, 0, threads);
    lm_run(name, 1, threads);
}

static void curve_case(const char *name, int kind) {
    stx_ctx *x = golden_ctx(0);
    stx_file *f = open_golden(x, name);
    stx_sru_lm_desc d;
    stx_sru_lm *m;
    stx_sru_state *s;
    stx_optim_desc od;
    stx_optim *o;
    stx_schedule sc;
    size_t B, T, steps, n, k;
    int32_t *tok;
    double *loss, *lr, *norm;
    char key[160];
    if (!f) {
        stx_destroy(x);
        return;
    }
    lm_desc(f, &d);
    B = (size_t)need(f, "batch");
    T = (size_t)need(f, "block");
    steps = (size_t)need(f, "steps");
    m = stx_sru_lm_create(x, &d);
    CHECK(m && stx_params_load(m->params, f, "param."), "%s: %s", name, stx_error(x));
    if (!m || !stx_ok(x)) {
        stx_file_close(f);
        stx_destroy(x);
        return;
    }
    s = stx_sru_state_create(m->sru, B);
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
    tok = integers(f, "tokens", &n);
    n /= B;
    loss = entry(f, "loss", NULL);
    lr = entry(f, "lr", NULL);
    norm = entry(f, "norm", NULL);
    for (k = 0; k < steps; k++) {
        stx_ids *in, *out;
        stx_tensor *l;
        double rate = stx_schedule_lr(&sc, k + 1);
        CHECK(CLOSE(rate, lr[k], 1e-12), "%s step %zu: rate %.15g, expected %.15g", name, k, rate,
              lr[k]);
        stx_begin(x, STX_TRAIN);
        tokens_of(x, tok, B, n, k * T, T, &in, &out);
        l = stx_sru_lm_loss(m, in, out, s, s);
        CHECK(CLOSE(stx_item(x, l), loss[k], TOL), "%s step %zu: loss %.12g, expected %.12g", name,
              k, stx_item(x, l), loss[k]);
        stx_backward(x, l);
        stx_optim_step(o, rate);
        CHECK(stx_optim_sync(o) && CLOSE(o->grad_norm, norm[k], 10 * TOL),
              "%s step %zu: norm %.12g, expected %.12g", name, k, o->grad_norm, norm[k]);
    }
    for (k = 0; k < m->params->count; k++) {
        snprintf(key, sizeof key, "final.%s", m->params->name[k]);
        same_as(x, f, name, key, m->params->tensor[k]->data, m->params->tensor[k]->size, TOL, 1e-7);
    }
    CHECK(stx_ok(x), "%s: %s", name, stx_error(x));
    free(tok);
    free(loss);
    free(lr);
    free(norm);
    stx_file_close(f);
    stx_destroy(x);
}

/* Optimisers and schedules of this family's recipes */
static void optim_case(const char *variant, int kind, int skip) {
    static const size_t dims[3][3] = {{3, 5, 0}, {7, 0, 0}, {2, 1, 4}};
    stx_ctx *x = golden_ctx(0);
    stx_file *f = open_golden(x, "sru_optim");
    stx_params *p;
    stx_optim_desc od;
    stx_optim *o;
    double *want[3], *grad[3];
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
        want[i] = entry(f, key, NULL);
        CHECK(grad[i] && want[i], "%s", key);
    }
    o = stx_optim_create(p, &od);
    snprintf(key, sizeof key, "%s.lr", variant);
    for (k = 0; k < 12 && stx_ok(x); k++) {
        stx_begin(x, STX_TRAIN);
        for (i = 0; i < 3; i++) put_f64(x, p->tensor[i]->grad, grad[i] + k * n[i], n[i]);
        stx_optim_step(o, need(f, key));
        for (i = 0; i < 3; i++) {
            stx_real *v = host_of(x, p->tensor[i]->data, n[i]);
            double have[32];
            size_t j;
            for (j = 0; j < n[i]; j++) have[j] = (double)v[j];
            CHECK(test_error(have, want[i] + k * n[i], n[i], 1e-7) <= TOL,
                  "%s update %zu of p%zu: error %g", variant, k + 1, i,
                  test_error(have, want[i] + k * n[i], n[i], 1e-7));
            free(v);
        }
    }
    CHECK(stx_ok(x) && k == 12, "%s: %s", variant, stx_error(x));
    for (i = 0; i < 3; i++) {
        free(grad[i]);
        free(want[i]);
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

/* calls fn for <stem>_01, _02, .. as long as there are such files */
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
