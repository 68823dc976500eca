/* test_lm.c - the language-model layer: words (embedding and output). */
#include "../seqtx.h"
#include "test.h"

#ifdef SEQTX_DOUBLE
#define TOL 1e-11
#else
#define TOL 2e-5
#endif

static stx_ctx *context(uint64_t seed) {
    stx_desc d;
    memset(&d, 0, sizeof d);
    d.seed = seed;
    return stx_create(&d);
}
static int32_t *text(size_t n, size_t V, unsigned salt) {
    int32_t *t = (int32_t *)malloc(n * sizeof *t);
    size_t i;
    for (i = 0; i < n; i++) t[i] = (int32_t)((i * i * 7 + i * 3 + salt + i / 5) % V);
    return t;
}
static stx_real *host_of(stx_ctx *x, const stx_tensor *t) {
    stx_real *v = (stx_real *)calloc(t ? t->size : 1, sizeof *v);
    stx_get(x, t, v);
    return v;
}

// >>words

enum { V = 29, D = 12 };
typedef struct words_case { int in, out; size_t emb; int share_tables, share_projs, by_cluster, head_direct, widths; const char *names; } words_case;
static const words_case words_cases[] = {
    {STX_WORDS_PLAIN, STX_WORDS_PLAIN, 0, 0, 0, 0, 0, 0, "in_emb.weight out_emb.weight out_emb.bias "},
    {STX_WORDS_PLAIN, STX_WORDS_PLAIN, 5, 0, 0, 1, 0, 0, "in_emb.weight out_emb.weight out_emb.bias "},
    {STX_WORDS_PLAIN, STX_WORDS_TIED, 0, 0, 0, 0, 0, 0, "in_emb.weight out_emb.bias "},
    {STX_WORDS_PLAIN, STX_WORDS_ADAPTIVE, 7, 0, 0, 0, 1, 0, "in_emb.weight out_emb.cluster.weight out_emb.cluster.bias out_emb.tables.0 out_emb.biases.0 "
        "out_emb.tables.1 out_emb.projs.1 out_emb.biases.1 out_emb.tables.2 out_emb.projs.2 out_emb.biases.2 "},
    {STX_WORDS_ADAPTIVE, STX_WORDS_PLAIN, 0, 0, 0, 0, 0, 0, "in_emb.tables.0 in_emb.projs.0 in_emb.tables.1 in_emb.projs.1 in_emb.tables.2 in_emb.projs.2 "
        "out_emb.weight out_emb.bias "},
    {STX_WORDS_ADAPTIVE, STX_WORDS_ADAPTIVE, 0, 0, 0, 0, 0, 0, "in_emb.tables.0 in_emb.projs.0 in_emb.tables.1 in_emb.projs.1 in_emb.tables.2 in_emb.projs.2 "
        "out_emb.cluster.weight out_emb.cluster.bias out_emb.tables.0 out_emb.projs.0 out_emb.biases.0 out_emb.tables.1 out_emb.projs.1 out_emb.biases.1 "
        "out_emb.tables.2 out_emb.projs.2 out_emb.biases.2 "},
    {STX_WORDS_ADAPTIVE, STX_WORDS_ADAPTIVE, 0, 1, 1, 0, 0, 0, "in_emb.tables.0 in_emb.projs.0 in_emb.tables.1 in_emb.projs.1 in_emb.tables.2 in_emb.projs.2 "
        "out_emb.cluster.weight out_emb.cluster.bias out_emb.biases.0 out_emb.biases.1 out_emb.biases.2 "},
    {STX_WORDS_ADAPTIVE, STX_WORDS_ADAPTIVE, 0, 1, 0, 1, 0, 1, "out_emb.tables.0 out_emb.projs.0 in_emb.projs.0 out_emb.biases.0 out_emb.tables.1 out_emb.projs.1 "
        "in_emb.projs.1 out_emb.biases.1 out_emb.tables.2 out_emb.projs.2 in_emb.projs.2 out_emb.biases.2 out_emb.cluster.weight out_emb.cluster.bias "},
    {STX_WORDS_ADAPTIVE, STX_WORDS_ADAPTIVE, 0, 1, 1, 1, 1, 0, "out_emb.tables.0 out_emb.biases.0 out_emb.tables.1 out_emb.projs.1 out_emb.biases.1 "
        "out_emb.tables.2 out_emb.projs.2 out_emb.biases.2 out_emb.cluster.weight out_emb.cluster.bias "},
};
static stx_words_desc words_of(const words_case *c) {
    stx_words_desc d;
    memset(&d, 0, sizeof d);
    d.vocab = V; d.dim = D; d.emb = c->emb; d.in = c->in; d.out = c->out;
    d.share_tables = c->share_tables; d.share_projs = c->share_projs; d.by_cluster = c->by_cluster; d.head_direct = c->head_direct;
    d.cutoffs = 2; d.cutoff[0] = 6; d.cutoff[1] = 15;
    d.divval = 2;
    if (c->widths) { d.width[0] = 8; d.width[2] = 7; }
    d.table.kind = STX_NORMAL; d.table.a = 0.5;
    d.out_table.kind = d.proj.kind = d.cluster.kind = d.bias.kind = STX_UNIFORM;
    d.out_table.a = 2; d.out_table.rule = STX_INIT_FAN_IN;
    d.proj.a = 1; d.proj.rule = STX_INIT_XAVIER;
    d.cluster.a = d.bias.a = 0.25;
    return d;
}
/* The largest number of a parameter against the bound of its draw: below it, and not far */
static void drawn(stx_words *w, const char *what, const stx_tensor *t, double bound) {
    stx_real *v = host_of(w->ctx, t);
    double top = 0;
    size_t i;
    for (i = 0; t && i < t->size; i++) if (fabs((double)v[i]) > top) top = fabs((double)v[i]);
    CHECK(t && top <= bound * (1 + 1e-6) && top > bound * 0.7, "%s: up to %g, want nearly %g", what, top, bound);
    free(v);
}
static void words_whole(void) {
    size_t k, i, b, B = 2, T = 40;
    for (k = 0; k < sizeof words_cases / sizeof *words_cases; k++) {
        const words_case *c = &words_cases[k];
        stx_ctx *x = context(k + 1);
        stx_params *p = stx_params_create(x);
        stx_words_desc d = words_of(c);
        stx_words *w;
        stx_ids *in, *out;
        stx_tensor *e, *h, *lp, *nll;
        stx_real *v, *hv = (stx_real *)malloc(B * T * D * sizeof *hv);
        int32_t *t = text(B * T + 1, V, 3);
        char names[1024] = "";
        double sum = 0, z, worst = 0;
        CHECK(stx_words_resolve(x, "test", &d, &d), "case %zu: %s", k, stx_error(x));
        w = stx_words_create(p, &d);
        CHECK(w != NULL, "case %zu: %s", k, stx_error(x));
        if (!w) return;
        for (i = 0; i < p->count; i++) { strcat(names, p->name[i]); strcat(names, " "); }
        CHECK(!strcmp(names, c->names), "case %zu: parameters %s", k, names);
        CHECK(stx_params_size(p) == stx_words_count(&d), "case %zu: %zu numbers, counted %zu", k, stx_params_size(p), stx_words_count(&d));
        for (i = 0; i < B * T * D; i++) hv[i] = (stx_real)test_rand();
        stx_begin(x, STX_TRAIN);
        in = stx_tokens(x, t, B, T);
        out = stx_tokens(x, t + 1, B, T);
        e = stx_words_embed(w, in);
        CHECK(e && e->ndim == 3 && e->dim[0] == B && e->dim[1] == T && e->dim[2] == (c->emb ? c->emb : D), "case %zu: embedding %s", k, stx_error(x));
        h = stx_variable(x, hv, B, T, D, 0);
        lp = stx_words_log_probs(w, h);
        CHECK(lp && lp->ndim == 3 && lp->dim[2] == V, "case %zu: %s", k, stx_error(x));
        v = host_of(x, lp);
        for (i = 0; i < B * T; i++) {
            for (z = 0, b = 0; b < V; b++) z += exp((double)v[i * V + b]);
            if (!(fabs(z - 1) <= worst)) worst = fabs(z - 1);
            sum -= (double)v[i * V + (size_t)t[i + 1]];
        }
        CHECK(worst < TOL, "case %zu: probabilities sum to 1 but for %g", k, worst);
        nll = stx_words_loss(w, h, out);
        CHECK(CLOSE(stx_item(x, nll), sum / (double)(B * T), TOL), "case %zu: loss %g, by log p %g", k, stx_item(x, nll), sum / (double)(B * T));
        lp = stx_words_scores(w, h);
        if (lp) {       /* log p but for a number of each row */
            stx_real *s = host_of(x, lp);
            for (worst = 0, i = 0; i < B * T * V; i++) {
                double off = fabs((double)s[i] - (double)s[i / V * V] - (double)v[i] + (double)v[i / V * V]);
                if (!(off <= worst)) worst = off;
            }
            free(s);
        }
        CHECK(lp && worst < 10 * TOL, "case %zu: scores are not log p and a constant: %g", k, worst);
        stx_backward(x, stx_add(x, nll, stx_mean(x, stx_mul(x, e, e))));
        for (i = 0; i < p->count; i++) {
            stx_real *g = (stx_real *)calloc(p->tensor[i]->size, sizeof *g);
            stx_fetch(x, g, p->tensor[i]->grad, p->tensor[i]->size);
            for (z = 0, b = 0; b < p->tensor[i]->size; b++) z += fabs((double)g[b]);
            CHECK(z > 0, "case %zu: no gradient reaches %s", k, p->name[i]);
            free(g);
        }
        CHECK(stx_ok(x), "case %zu: %s", k, stx_error(x));
        if (c->out == STX_WORDS_PLAIN) { drawn(w, "W", w->out_w, 2 / sqrt((double)D)); drawn(w, "bias", w->out_b, 0.25); }
        if (c->out == STX_WORDS_ADAPTIVE) {
            drawn(w, "projection", w->out.proj[1], sqrt(6.0 / (double)(D + d.width[1])));
            drawn(w, "columns", w->out.cluster_w, 0.25);
            CHECK(d.width[0] == (c->widths ? 8u : D) && d.width[1] == (c->widths ? 4u : D / 2) && d.width[2] == (c->widths ? 7u : D / 4), "case %zu: widths", k);
            CHECK(!stx_words_logits(w, h) && strstr(stx_error(x), "stx_words_log_probs"), "case %zu: %s", k, stx_error(x));
        }
        free(v); free(t); free(hv);
        stx_destroy(x);
    }
}
/* A scale, by hand: of a plain table it is 1 unless it is set, of adaptive ones sqrt(d) */
static void words_scale(void) {
    int adaptive, given;
    for (adaptive = 0; adaptive < 2; adaptive++)
        for (given = 0; given < 2; given++) {
            stx_ctx *x = context(1);
            stx_params *p = stx_params_create(x);
            stx_words_desc d = words_of(&words_cases[adaptive ? 4 : 0]);
            stx_words *w;
            stx_tensor *e;
            stx_real *got, *row;
            int32_t id = 20;
            size_t i, j;
            double worst = 0, s = given ? 3 : adaptive ? sqrt((double)D) : 1;
            d.scale = given ? 3 : 0;
            stx_words_resolve(x, NULL, &d, &d);
            w = stx_words_create(p, &d);
            stx_begin(x, STX_EVAL);
            e = stx_words_embed(w, stx_tokens(x, &id, 1, 1));
            got = host_of(x, e);
            row = host_of(x, adaptive ? w->in.table[2] : w->in_emb);
            if (adaptive) {
                stx_real *proj = host_of(x, w->in.proj[2]);
                for (i = 0; i < D; i++) {
                    double y = 0;
                    for (j = 0; j < d.width[2]; j++) y += (double)row[(20 - 15) * d.width[2] + j] * (double)proj[i * d.width[2] + j];
                    if (!(fabs(y * s - (double)got[i]) <= worst)) worst = fabs(y * s - (double)got[i]);
                }
                free(proj);
            } else for (i = 0; i < D; i++) if (!(fabs((double)row[20 * D + i] * s - (double)got[i]) <= worst)) worst = fabs((double)row[20 * D + i] * s - (double)got[i]);
            CHECK(e && worst < TOL, "adaptive %d scale %g: off by %g %s", adaptive, s, worst, stx_error(x));
            free(got); free(row);
            stx_destroy(x);
        }
}
static void words_refused(const char *want, const stx_words_desc *d) {
    stx_ctx *x = context(1);
    stx_words_desc to;
    CHECK(!stx_words_resolve(x, "test_lm", d, &to) && strstr(stx_error(x), want) && strstr(stx_error(x), "test_lm:"), "want \"%s\", got \"%s\"", want, stx_error(x));
    CHECK(!stx_words_resolve(NULL, NULL, d, &to), "%s: without a context", want);
    stx_destroy(x);
}
static void words_errors(void) {
    stx_words_desc plain = words_of(&words_cases[0]), ad = words_of(&words_cases[5]), d;
    d = plain; d.vocab = 0; words_refused("vocab is 0", &d);
    d = plain; d.dim = 0; words_refused("dim is 0", &d);
    d = plain; d.emb = (size_t)1 << 31; d.emb++; words_refused("emb is", &d);
    d = plain; d.in = STX_WORDS_TIED; words_refused("in is 1", &d);
    d = plain; d.out = 5; words_refused("out is 5", &d);
    d = plain; d.scale = NAN; words_refused("scale of words", &d);
    d = plain; d.dropout = 1; words_refused("dropout of words is 1", &d);
    d = plain; d.out = STX_WORDS_TIED; d.emb = 5; words_refused("emb with a tied output", &d);
    d = plain; d.share_tables = 1; words_refused("share_tables without", &d);
    d = plain; d.out = STX_WORDS_ADAPTIVE; d.share_projs = 1; words_refused("share_projs without", &d);
    d = ad; d.out = STX_WORDS_TIED; words_refused("a tied output wants a plain input", &d);
    d = ad; d.emb = 5; words_refused("emb of an adaptive input", &d);
    d = ad; d.divval = 1; words_refused("divval is 1", &d);
    d = ad; d.cutoffs = 8; words_refused("cutoffs is 8", &d);
    d = ad; d.cutoff[1] = 6; words_refused("cutoff 6 (number 2)", &d);
    d = ad; d.cutoff[1] = V; words_refused("cutoff 29", &d);
    d = ad; d.divval = 7; words_refused("divval^cutoffs", &d);
    d = ad; d.head_direct = 1; d.width[0] = 8; words_refused("width of the first cluster, which has no projection,", &d);
    d = ad; d.cutoffs = 0; d.vocab = 50000; d.dim = 64;
    CHECK(stx_words_resolve(NULL, NULL, &d, &d) && d.cutoffs == 2 && d.cutoff[0] == 20000 && d.cutoff[1] == 40000, "the usual cutoffs");
    d = plain; d.vocab = d.dim = (size_t)1 << 31;
    if (sizeof(size_t) == 8) CHECK(stx_words_resolve(NULL, NULL, &d, &d) && stx_words_count(&d) == ((size_t)1 << 63) + ((size_t)1 << 31), "a large count");
    CHECK(stx_size_add(SIZE_MAX - 5, 2, 3) == SIZE_MAX && stx_size_add(SIZE_MAX - 7, 2, 3) == SIZE_MAX - 1 && stx_size_add(1, SIZE_MAX, 2) == SIZE_MAX
          && stx_size_add(7, 0, 9) == 7, "sums that do not wrap");
    CHECK(!stx_words_create(NULL, &plain) && !stx_words_embed(NULL, NULL) && !stx_words_logits(NULL, NULL) && !stx_words_log_probs(NULL, NULL)
          && !stx_words_scores(NULL, NULL) && !stx_words_loss(NULL, NULL, NULL), "NULLs");
}

int main(void) {
    words_whole();
    words_scale();
    words_errors();
    return test_end();
}
