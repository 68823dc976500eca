/* seqtx_attn_span.h against the golden vectors of an independent PyTorch
   implementation (tests/golden): losses, caches, log-probabilities and every
   parameter's gradient, in the literal and in the corrected forms and in fairseq's;
   windows and caches; 50 optimiser steps; parameter counts of the published presets.
   1e-10 in the double build, 1e-5 in float. Usage: test_golden_span DIR */
#include <stdint.h>
#include "../seqtx_attn_span.h"
#include "test.h"
#include "golden.h"

#ifdef SEQTX_DOUBLE
static const double TOL = 1e-10, CURVE = 1e-9;
#else
static const double TOL = 1e-5, CURVE = 1e-5;
#endif

static void config(const stx_file *f, stx_span_desc *d) {
    const char *s;
    memset(d, 0, sizeof *d);
    d->vocab = (size_t)meta(f, "vocab", 0);
    d->layers = (size_t)meta(f, "layers", 0);
    d->dim = (size_t)meta(f, "dim", 0);
    d->heads = (size_t)meta(f, "heads", 0);
    d->inner = (size_t)meta(f, "inner", 0);
    d->span = (size_t)meta(f, "span", 0);
    d->adapt_span = (int)meta(f, "adapt_span", 0);
    d->ramp = meta(f, "ramp", 0);
    d->pers = (size_t)meta(f, "pers", 0);
    d->adapt_io = (int)meta(f, "adapt_io", 0);
    d->adapt_io_tied = (int)meta(f, "tied", 0);
    d->divval = meta(f, "divval", 0);
    d->forward_columns = (int)meta(f, "forward_columns", 0);
    d->span_loss = meta(f, "span_loss", 0);
    d->no_renorm = (int)meta(f, "no_renorm", 0);
    d->span_per_layer = (int)meta(f, "span_per_layer", 0);
    if (meta(f, "literal", 0) > 0) d->literal = STX_SPAN_LITERAL;
    for (s = d->adapt_io ? stx_file_meta(f, "cutoffs") : NULL; s && *s;
         s += strcspn(s, ","), s += *s == ',')
        d->cutoff[d->cutoffs++] = (size_t)atol(s);
    if (!d->inner) d->inner = 1;
}

/* block k of tokens (B,n) as ids and targets */
static void block_of(stx_ctx *x, const int32_t *tok, size_t B, size_t n, size_t M, size_t k,
                     stx_ids **in, stx_ids **out) {
    int32_t *buf = (int32_t *)calloc(B * M, sizeof *buf);
    size_t b;
    for (b = 0; b < B; b++) memcpy(buf + b * M, tok + b * n + k * M, M * sizeof *buf);
    *in = stx_tokens(x, buf, B, M);
    for (b = 0; b < B; b++) memcpy(buf + b * M, tok + b * n + k * M + 1, M * sizeof *buf);
    *out = stx_tokens(x, buf, B, M);
    free(buf);
}

static void model_case(const char *name, int recompute, int threads) {
    stx_ctx *x;
    stx_file *f;
    stx_span_desc d;
    stx_span *m;
    stx_span_state *s;
    size_t B, M, blocks, k, l, n, n0, i, zn;
    /* S, C, rows of the cache before and after: (blocks,layers), newer files only */
    int32_t *tok, *window[4];
    /* ill-conditioned on purpose: see golden/README.md */
    double *nll, *total, *zs, sharp = strstr(name, "sharp") && TOL > 1e-9 ? 10 : 1;
    char key[128];
    x = golden_ctx(threads);
    f = open_golden(x, name);
    if (!f) {
        stx_destroy(x);
        return;
    }
    config(f, &d);
    d.recompute = recompute;
    B = (size_t)meta(f, "batch", 0);
    M = (size_t)meta(f, "block", 0);
    blocks = (size_t)meta(f, "blocks", 0);
    m = stx_span_create(x, &d);
    CHECK(m && stx_params_load(m->params, f, "param."), "%s: %s", name, stx_error(x));
    if (!m) {
        stx_file_close(f);
        stx_destroy(x);
        return;
    }
    CHECK(stx_params_size(m->params) == stx_span_count(&d), "%s: %zu parameters, counted %zu", name,
          stx_params_size(m->params), stx_span_count(&d));
    s = stx_span_state_create(m, B);
    tok = integers(f, "tokens", &n);
    n /= B;
    nll = entry(f, "nll", NULL);
    total = entry(f, "total", NULL);
    zs = entry(f, "z_schedule", &zn);
    for (i = 0; i < 4; i++) {
        static const char *const names[] = {"window_span", "window_cache", "rows_in", "rows_out"};
        window[i] = integers(f, names[i], &n0);
        CHECK(!window[i] == (meta(f, "no_renorm", -1) < 0)
                  && (!window[i] || n0 == blocks * d.layers),
              "%s: %s", name, names[i]);
    }
    for (k = 0; k < blocks; k++) {
        stx_ids *in, *out;
        stx_tensor *h, *loss, *logp, *sum;
        for (l = 0; zs && l < d.layers; l++) {
            stx_real z[64];
            size_t heads = m->layer[l].z->size;
            CHECK(zn == blocks * d.layers * heads, "%s: z_schedule holds %zu numbers", name, zn);
            for (i = 0; i < heads; i++) z[i] = (stx_real)zs[(k * d.layers + l) * heads + i];
            stx_set(x, m->layer[l].z, z);
        }
        for (l = 0; window[0] && l < d.layers; l++) {
            size_t o = k * d.layers + l;
            CHECK(stx_span_window(m, l) == (size_t)window[0][o]
                      && stx_span_cache(m, l) == (size_t)window[1][o]
                      && s->memory->layer[l].logical_count == (size_t)window[2][o],
                  "%s block %zu layer %zu: window %zu, cache %zu, rows %zu, expected %ld, %ld, %ld",
                  name, k, l, stx_span_window(m, l), stx_span_cache(m, l),
                  s->memory->layer[l].logical_count, (long)window[0][o], (long)window[1][o],
                  (long)window[2][o]);
        }
        /* values by an evaluation that leaves the memory alone, then the training step */
        if (k == blocks - 1) {
            stx_begin(x, STX_EVAL);
            block_of(x, tok, B, n, M, k, &in, &out);
            h = stx_span_forward(m, in, s, NULL);
            logp = stx_span_log_probs(m, h);
            CHECK(logp != NULL, "%s: %s", name, stx_error(x));
            if (logp) same_as(x, f, name, "logits", logp->data, logp->size, TOL * sharp, 1e-7);
        }
        stx_begin(x, STX_TRAIN);
        block_of(x, tok, B, n, M, k, &in, &out);
        stx_params_zero_grad(m->params);
        loss = stx_span_loss(m, in, out, s, s);
        sum = stx_span_total(m, loss);
        CHECK(CLOSE(stx_item(x, loss), nll[k], TOL * sharp),
              "%s block %zu: nll %.12g, expected %.12g %s", name, k, stx_item(x, loss), nll[k],
              stx_error(x));
        CHECK(CLOSE(stx_item(x, sum), total[k], TOL * sharp),
              "%s block %zu: total %.12g, expected %.12g", name, k, stx_item(x, sum), total[k]);
        if (k == blocks - 1) stx_backward(x, sum);
        for (l = 0; window[3] && l < d.layers; l++)
            CHECK(s->memory->layer[l].logical_count == (size_t)window[3][k * d.layers + l],
                  "%s block %zu layer %zu: %zu rows, expected %ld", name, k, l,
                  s->memory->layer[l].logical_count, (long)window[3][k * d.layers + l]);
    }
    for (i = 0; i < 4; i++) free(window[i]);
    for (i = 0; i < m->params->count; i++) {
        snprintf(key, sizeof key, "grad.%s", m->params->name[i]);
        same_as(x, f, name, key, m->params->tensor[i]->grad, m->params->tensor[i]->size,
                TOL * sharp, 1e-7);
    }
    /* the file holds the zero rows too, the state only the real ones */
    for (l = 0; l < d.layers; l++) {
        size_t count, r, b, c, w = d.dim;
        double *want, worst = 0, top = 1;
        stx_real *cache;
        snprintf(key, sizeof key, "cache.%zu", l);
        want = entry(f, key, &count);
        CHECK(want && s->memory->layer[l].logical_count * B * w == count,
              "%s %s: %zu rows, expected %zu", name, key, s->memory->layer[l].logical_count,
              count / B / w);
        if (!want) continue;
        for (r = 0; r < count; r++)
            if (fabs(want[r]) > top) top = fabs(want[r]);
        cache = (stx_real *)malloc((B * s->memory->layer[l].count * w + 1) * sizeof *cache);
        stx_span_state_get(s, l, cache);
        for (b = 0; b < B; b++)
            for (r = 0; r < s->memory->layer[l].logical_count; r++)
                for (c = 0; c < w; c++) {
                    size_t pad = s->memory->layer[l].logical_count - s->memory->layer[l].count;
                    double have = r < pad
                                      ? 0
                                      : (double)
                                          cache[(b * s->memory->layer[l].count + r - pad) * w + c],
                           e = fabs(have
                                    - want[(b * s->memory->layer[l].logical_count + r) * w + c]);
                    if (!(e <= worst)) worst = e;
                }
        CHECK(worst <= TOL * top * sharp, "%s %s: error %g", name, key, worst);
        free(cache);
        free(want);
    }
    CHECK(stx_ok(x), "%s: %s", name, stx_error(x));
    free(tok);
    free(nll);
    free(total);
    free(zs);
    stx_span_state_free(s);
    stx_file_close(f);
    stx_destroy(x);
}

static void curve(const char *name) {
    stx_ctx *x = golden_ctx(0);
    stx_file *f = open_golden(x, name);
    stx_span_desc d;
    stx_span *m;
    stx_span_state *s;
    stx_optim_desc od;
    stx_optim *o;
    stx_schedule sc;
    size_t B, M, k, n, l, steps;
    int32_t *tok;
    double *losses, worst = 0;
    char key[64];
    const char *optim;
    if (!f) {
        stx_destroy(x);
        return;
    }
    config(f, &d);
    B = (size_t)meta(f, "batch", 0);
    M = (size_t)meta(f, "block", 0);
    steps = (size_t)meta(f, "steps", 0);
    m = stx_span_create(x, &d);
    CHECK(m && stx_params_load(m->params, f, "param."), "%s: %s", name, stx_error(x));
    if (!m) return;
    s = stx_span_state_create(m, B);
    memset(&od, 0, sizeof od);
    memset(&sc, 0, sizeof sc);
    optim = stx_file_meta(f, "optim");
    od.kind = optim && !strcmp(optim, "adam") ? STX_ADAM : STX_ADAGRAD;
    od.clip = meta(f, "clip", 0);
    sc.lr = meta(f, "lr", 0);
    sc.warmup = (uint64_t)meta(f, "warmup", 0);
    o = stx_optim_create(m->params, &od);
    tok = integers(f, "tokens", &n);
    n /= B;
    losses = entry(f, "losses", NULL);
    CHECK(steps == (strncmp(name, "fs_", 3) ? 50 : 8), "%s: %zu steps", name, steps);
    for (k = 0; k < steps; k++) {
        stx_ids *in, *out;
        stx_tensor *loss;
        double e;
        stx_begin(x, STX_TRAIN);
        block_of(x, tok, B, n, M, k, &in, &out);
        loss = stx_span_loss(m, in, out, s, s);
        e = fabs(stx_item(x, loss) - losses[k]);
        if (!(e <= worst)) worst = e;
        stx_backward(x, stx_span_total(m, loss));
        CHECK(stx_optim_step(o, stx_schedule_lr(&sc, k + 1)), "%s step %zu: %s", name, k,
              stx_error(x));
        stx_span_clamp(m);
    }
    CHECK(worst <= CURVE, "%s: the loss curves differ by %g", name, worst);
    for (l = 0; l < d.layers; l++) {
        snprintf(key, sizeof key, "span_final.%zu", l);
        if (m->layer[l].z)
            same_as(x, f, name, key, m->layer[l].z->data, m->layer[l].z->size, CURVE, 1e-7);
    }
    /* rows of key_pe beyond every ramp feel eps only, and Adagrad makes full steps of
       that: not comparable in float */
    for (k = 0; k < m->params->count; k++) {
        snprintf(key, sizeof key, "final.%s", m->params->name[k]);
        if (TOL < 1e-9 || strcmp(name, "curve_ref"))
            same_as(x, f, name, key, m->params->tensor[k]->data, m->params->tensor[k]->size, CURVE,
                    1e-7);
    }
    free(tok);
    free(losses);
    stx_file_close(f);
    stx_destroy(x);
}

static void preset(size_t want, size_t V, size_t layers, size_t dim, size_t inner, size_t heads,
                   size_t span, size_t pers, int adapt_io) {
    stx_span_desc d;
    memset(&d, 0, sizeof d);
    d.vocab = V;
    d.layers = layers;
    d.dim = dim;
    d.inner = inner;
    d.heads = heads;
    d.span = span;
    d.pers = pers;
    d.adapt_span = 1;
    d.adapt_io = d.adapt_io_tied = adapt_io;
    CHECK(stx_span_count(&d) == want, "%zu parameters, published %zu", stx_span_count(&d), want);
}

int main(int argc, char **argv) {
    static const char *const models[] = {
        "t_a1",      "t_a2",      "t_a3",          "t_a4",      "t_a5",       "t_a6",   "fix_a1",
        "fix_a2",    "fix_a3",    "fix_a4",        "fix_a5",    "fix_a6",     "odd1",   "odd2",
        "odd3",      "odd4",      "odd5",          "odd6",      "odd7",       "odd8",   "sharp",
        "sharp_fix", "blocklong", "blocklong_fix", "growth",    "growth_fix", "t_f1",   "t_f2",
        "fs_head",   "fs_layer",  "fs_layer_zero", "fs_growth", "frac_a",     "frac_b", "frac_fs"};
    size_t i;
    if (argc > 1) dir = argv[1];
    for (i = 0; i < sizeof models / sizeof *models; i++) {
        model_case(models[i], 0, 1);
        if (golden_cpu() || i % 4 == 1) model_case(models[i], 1, 2);
    }
    curve("curve");
    curve("curve_ref");
    curve("curve_adam");
    curve("fs_curve");
    curve("fs_curve_layer");
    /* the numbers of parameters of the authors' models */
    preset(6480621, 205, 8, 256, 1024, 4, 1024, 0, 0);
    preset(38538541, 205, 12, 512, 2048, 8, 8192, 0, 0);
    preset(208910221, 205, 24, 768, 4096, 8, 8192, 0, 0);
    preset(38357116, 28, 12, 512, 2048, 8, 8192, 0, 0);
    preset(208638172, 28, 24, 768, 4096, 8, 8192, 0, 0);
    preset(38501725, 205, 18, 512, 1, 8, 8192, 1024, 0);
    preset(114017773, 205, 36, 512, 1, 8, 8192, 2048, 0);
    preset(132493746, 267735, 36, 512, 1, 8, 2048, 2048, 1);
    return test_end();
}
