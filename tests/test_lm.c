/* test_lm.c - the language-model layer: words (embedding and output), rows (what
   crosses steps), the cache of generation, and the smallest family (lm), which is made
   of them: it is trained, resumed, evaluated and sampled through stx_lm alone. */
#include "../seqtx_attn_span.h"
#include "../seqtx_sru.h"
#include <unistd.h>
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

// >>vocab_io

enum { V = 29, D = 12 };

typedef struct words_case {
    int in, out;
    size_t emb;
    int share_tables, share_projs, cluster_major, direct_head, widths;
    const char *names;
    /* 1 no_projections, 2 separate_first, 4 proj_biases, 8 no_cutoffs, 16 an input
       without projections */
    int more;
} words_case;

static const words_case words_cases[] = {
    {STX_VOCAB_PLAIN, STX_VOCAB_PLAIN, 0, 0, 0, 0, 0, 0,
     "in_emb.weight out_emb.weight out_emb.bias ", 0},
    {STX_VOCAB_PLAIN, STX_VOCAB_PLAIN, 5, 0, 0, 1, 0, 0,
     "in_emb.weight out_emb.weight out_emb.bias ", 0},
    {STX_VOCAB_PLAIN, STX_VOCAB_TIED, 0, 0, 0, 0, 0, 0, "in_emb.weight out_emb.bias ", 0},
    {STX_VOCAB_PLAIN, STX_VOCAB_ADAPTIVE, 7, 0, 0, 0, 1, 0,
     "in_emb.weight out_emb.cluster.weight out_emb.cluster.bias out_emb.tables.0 "
     "out_emb.biases.0 "
     "out_emb.tables.1 out_emb.projs.1 out_emb.biases.1 out_emb.tables.2 out_emb.projs.2 "
     "out_emb.biases.2 ",
     0},
    {STX_VOCAB_ADAPTIVE, STX_VOCAB_PLAIN, 0, 0, 0, 0, 0, 0,
     "in_emb.tables.0 in_emb.projs.0 in_emb.tables.1 in_emb.projs.1 "
     "in_emb.tables.2 in_emb.projs.2 "
     "out_emb.weight out_emb.bias ",
     0},
    {STX_VOCAB_ADAPTIVE, STX_VOCAB_ADAPTIVE, 0, 0, 0, 0, 0, 0,
     "in_emb.tables.0 in_emb.projs.0 in_emb.tables.1 in_emb.projs.1 in_emb.tables.2 in_emb.projs.2 "
     "out_emb.cluster.weight out_emb.cluster.bias out_emb.tables.0 out_emb.projs.0 "
     "out_emb.biases.0 out_emb.tables.1 out_emb.projs.1 "
     "out_emb.biases.1 "
     "out_emb.tables.2 out_emb.projs.2 out_emb.biases.2 ",
     0},
    {STX_VOCAB_ADAPTIVE, STX_VOCAB_ADAPTIVE, 0, 1, 1, 0, 0, 0,
     "in_emb.tables.0 in_emb.projs.0 in_emb.tables.1 in_emb.projs.1 in_emb.tables.2 in_emb.projs.2 "
     "out_emb.cluster.weight out_emb.cluster.bias out_emb.biases.0 out_emb.biases.1 "
     "out_emb.biases.2 ",
     0},
    {STX_VOCAB_ADAPTIVE, STX_VOCAB_ADAPTIVE, 0, 1, 0, 1, 0, 1,
     "out_emb.tables.0 out_emb.projs.0 in_emb.projs.0 out_emb.biases.0 out_emb.tables.1 "
     "out_emb.projs.1 "
     "in_emb.projs.1 out_emb.biases.1 out_emb.tables.2 out_emb.projs.2 in_emb.projs.2 "
     "out_emb.biases.2 out_emb.cluster.weight "
     "out_emb.cluster.bias ",
     0},
    {STX_VOCAB_ADAPTIVE, STX_VOCAB_ADAPTIVE, 0, 1, 1, 1, 1, 0,
     "out_emb.tables.0 out_emb.biases.0 out_emb.tables.1 out_emb.projs.1 out_emb.biases.1 "
     "out_emb.tables.2 out_emb.projs.2 out_emb.biases.2 out_emb.cluster.weight "
     "out_emb.cluster.bias ",
     0},
    {STX_VOCAB_ADAPTIVE, STX_VOCAB_ADAPTIVE, 0, 1, 0, 0, 0, 0,
     "in_emb.tables.0 in_emb.tables.1 in_emb.tables.2 out_emb.cluster.weight out_emb.cluster.bias "
     "out_emb.biases.0 out_emb.biases.1 "
     "out_emb.biases.2 ",
     1},
    {STX_VOCAB_ADAPTIVE, STX_VOCAB_ADAPTIVE, 0, 1, 1, 0, 0, 0,
     "in_emb.tables.0 in_emb.projs.0 in_emb.tables.1 in_emb.projs.1 in_emb.tables.2 in_emb.projs.2 "
     "out_emb.cluster.weight out_emb.cluster.bias out_emb.projs.0 out_emb.biases.0 "
     "out_emb.biases.1 out_emb.biases.2 ",
     2},
    {STX_VOCAB_PLAIN, STX_VOCAB_ADAPTIVE, 0, 0, 0, 0, 1, 0,
     "in_emb.weight out_emb.cluster.weight out_emb.cluster.bias "
     "out_emb.tables.0 out_emb.biases.0 out_emb.tables.1 out_emb.projs.1 out_emb.proj_biases.1 "
     "out_emb.biases.1 "
     "out_emb.tables.2 out_emb.projs.2 out_emb.proj_biases.2 out_emb.biases.2 ",
     4},
    {STX_VOCAB_ADAPTIVE, STX_VOCAB_ADAPTIVE, 0, 1, 1, 1, 0, 0,
     "out_emb.tables.0 out_emb.projs.0 out_emb.biases.0 ", 8},
    {STX_VOCAB_ADAPTIVE, STX_VOCAB_ADAPTIVE, 0, 1, 1, 1, 0, 1,
     "out_emb.tables.0 out_emb.projs.0 out_emb.proj_biases.0 in_emb.projs.0 out_emb.biases.0 "
     "out_emb.tables.1 out_emb.projs.1 "
     "out_emb.proj_biases.1 out_emb.biases.1 out_emb.tables.2 out_emb.projs.2 "
     "out_emb.proj_biases.2 out_emb.biases.2 "
     "out_emb.cluster.weight out_emb.cluster.bias ",
     2 + 4},
    {STX_VOCAB_ADAPTIVE, STX_VOCAB_ADAPTIVE, 0, 0, 0, 0, STX_VOCAB_OUTPUT, 0,
     "in_emb.tables.0 in_emb.tables.1 in_emb.tables.2 out_emb.cluster.weight out_emb.cluster.bias "
     "out_emb.tables.0 out_emb.biases.0 "
     "out_emb.tables.1 out_emb.projs.1 out_emb.proj_biases.1 out_emb.biases.1 "
     "out_emb.tables.2 out_emb.projs.2 out_emb.proj_biases.2 out_emb.biases.2 ",
     4 + 16},
    {STX_VOCAB_ADAPTIVE, STX_VOCAB_ADAPTIVE, 0, 0, 0, 0, STX_VOCAB_OUTPUT, 0,
     "in_emb.tables.0 in_emb.projs.0 in_emb.tables.1 in_emb.projs.1 in_emb.tables.2 in_emb.projs.2 "
     "out_emb.cluster.weight out_emb.cluster.bias out_emb.tables.0 out_emb.biases.0 "
     "out_emb.tables.1 out_emb.projs.1 out_emb.biases.1 "
     "out_emb.tables.2 out_emb.projs.2 out_emb.biases.2 ",
     0},
};

static stx_vocab_io_desc words_of(const words_case *c) {
    stx_vocab_io_desc d;
    memset(&d, 0, sizeof d);
    d.vocab = V;
    d.dim = D;
    d.emb = c->emb;
    d.in = c->in;
    d.out = c->out;
    d.share_tables = c->share_tables;
    d.share_projs = c->share_projs;
    d.cluster_major = c->cluster_major;
    d.direct_head = c->direct_head;
    d.cutoffs = 2;
    d.cutoff[0] = 6;
    d.cutoff[1] = 15;
    d.divval = 2;
    d.no_projections = c->more & 1;
    d.separate_first = c->more >> 1 & 1;
    d.proj_biases = c->more >> 2 & 1;
    d.no_cutoffs = c->more >> 3 & 1;
    if (d.no_cutoffs) d.cutoffs = 0;
    if (c->more & 16) {
        d.no_projections = STX_VOCAB_INPUT;
        d.width[0] = d.width[1] = d.width[2] = D;
        d.out_width[1] = D / 2;
        d.out_width[2] = D / 4;
    }
    d.proj_bias.kind = STX_UNIFORM;
    d.proj_bias.a = 0.125;
    if (c->widths) {
        d.width[0] = 8;
        d.width[2] = 7;
    }
    d.table.kind = STX_NORMAL;
    d.table.a = 0.5;
    d.out_table.kind = d.proj.kind = d.cluster.kind = d.bias.kind = STX_UNIFORM;
    d.out_table.a = 2;
    d.out_table.rule = STX_INIT_FAN_IN;
    d.proj.a = 1;
    d.proj.rule = STX_INIT_XAVIER;
    d.cluster.a = d.bias.a = 0.25;
    return d;
}

/* The largest number of a parameter against the bound of its draw: below it, and not
   far */
static void drawn(stx_vocab_io *w, const char *what, const stx_tensor *t, double bound) {
    stx_real *v = host_of(w->ctx, t);
    double top = 0;
    size_t i;
    for (i = 0; t && i < t->size; i++)
        if (fabs((double)v[i]) > top) top = fabs((double)v[i]);
    CHECK(t && top <= bound * (1 + 1e-6) && top > bound * 0.7, "%s: up to %g, expected nearly %g",
          what, top, bound);
    free(v);
}

static void words_whole(void) {
    size_t k, i, b, B = 2, T = 40;
    for (k = 0; k < sizeof words_cases / sizeof *words_cases; k++) {
        const words_case *c = &words_cases[k];
        stx_ctx *x = context(k + 1);
        stx_params *p = stx_params_create(x);
        stx_vocab_io_desc d = words_of(c);
        stx_vocab_io *w;
        stx_ids *in, *out;
        stx_tensor *e, *h, *lp, *nll;
        stx_real *v, *hv = (stx_real *)malloc(B * T * D * sizeof *hv);
        int32_t *t = text(B * T + 1, V, 3);
        char names[1024] = "";
        double sum = 0, z, worst = 0;
        CHECK(stx_vocab_io_resolve(x, "test", &d, &d), "case %zu: %s", k, stx_error(x));
        w = stx_vocab_io_create(p, &d);
        CHECK(w != NULL, "case %zu: %s", k, stx_error(x));
        if (!w) return;
        for (i = 0; i < p->count; i++) {
            strcat(names, p->name[i]);
            strcat(names, " ");
        }
        CHECK(!strcmp(names, c->names), "case %zu: parameters %s", k, names);
        CHECK(stx_params_size(p) == stx_vocab_io_count(&d), "case %zu: %zu numbers, counted %zu", k,
              stx_params_size(p), stx_vocab_io_count(&d));
        for (i = 0; i < B * T * D; i++) hv[i] = (stx_real)test_rand();
        stx_begin(x, STX_TRAIN);
        in = stx_tokens(x, t, B, T);
        out = stx_tokens(x, t + 1, B, T);
        e = stx_vocab_io_embed(w, in);
        CHECK(e && e->ndim == 3 && e->dim[0] == B && e->dim[1] == T
                  && e->dim[2] == (c->emb ? c->emb : D),
              "case %zu: embedding %s", k, stx_error(x));
        h = stx_variable(x, hv, B, T, D, 0);
        lp = stx_vocab_io_log_probs(w, h);
        CHECK(lp && lp->ndim == 3 && lp->dim[2] == V, "case %zu: %s", k, stx_error(x));
        v = host_of(x, lp);
        for (i = 0; i < B * T; i++) {
            for (z = 0, b = 0; b < V; b++) z += exp((double)v[i * V + b]);
            if (!(fabs(z - 1) <= worst)) worst = fabs(z - 1);
            sum -= (double)v[i * V + (size_t)t[i + 1]];
        }
        CHECK(worst < TOL, "case %zu: probabilities sum to 1 but for %g", k, worst);
        nll = stx_vocab_io_loss(w, h, out, NULL);
        CHECK(CLOSE(stx_item(x, nll), sum / (double)(B * T), TOL), "case %zu: loss %g, by log p %g",
              k, stx_item(x, nll), sum / (double)(B * T));
        { /* weights, an ignored id, the rows' own losses, of every kind of output */
            stx_token_loss how;
            stx_real weight[B * T], *rows;
            double want = 0, off = 0;
            memset(&how, 0, sizeof how);
            for (i = 0; i < B * T; i++) weight[i] = (stx_real)(0.5 + 0.25 * (double)i);
            how.weights = stx_input(x, weight, B * T, 0, 0, 0);
            how.ignore = 1;
            how.ignored_id = t[2];
            how.divisor = 3;
            lp = stx_vocab_io_loss(w, stx_detach(x, h), out, &how);
            rows = host_of(x, how.nll);
            for (i = 0; i < B * T; i++) {
                double nll_i = t[i + 1] == how.ignored_id ? 0
                                                          : -(double)v[i * V + (size_t)t[i + 1]];
                want += (double)weight[i] * nll_i / 3;
                if (!(fabs((double)rows[i] - nll_i) <= off)) off = fabs((double)rows[i] - nll_i);
            }
            CHECK(CLOSE(stx_item(x, lp), want, 10 * TOL) && off < 10 * TOL,
                  "case %zu: weighted loss %g, expected %g; rows off by %g: %s", k, stx_item(x, lp),
                  want, off, stx_error(x));
            free(rows);
        }
        lp = stx_vocab_io_scores(w, h);
        if (lp) { /* log p but for a number of each row */
            stx_real *s = host_of(x, lp);
            for (worst = 0, i = 0; i < B * T * V; i++) {
                double off = fabs((double)s[i] - (double)s[i / V * V] - (double)v[i]
                                  + (double)v[i / V * V]);
                if (!(off <= worst)) worst = off;
            }
            free(s);
        }
        CHECK(lp && worst < 10 * TOL, "case %zu: scores are not log p and a constant: %g", k,
              worst);
        stx_backward(x, stx_add(x, nll, stx_mean(x, stx_mul(x, e, e))));
        for (i = 0; i < p->count; i++) {
            stx_real *g = (stx_real *)calloc(p->tensor[i]->size, sizeof *g);
            stx_download(x, g, p->tensor[i]->grad, p->tensor[i]->size);
            for (z = 0, b = 0; b < p->tensor[i]->size; b++) z += fabs((double)g[b]);
            CHECK(z > 0, "case %zu: no gradient reaches %s", k, p->name[i]);
            free(g);
        }
        CHECK(stx_ok(x), "case %zu: %s", k, stx_error(x));
        if (c->out == STX_VOCAB_PLAIN) {
            drawn(w, "W", w->out_w, 2 / sqrt((double)D));
            drawn(w, "bias", w->out_b, 0.25);
        }
        if (c->out == STX_VOCAB_ADAPTIVE) {
            if (!d.no_projections && d.cutoffs)
                drawn(w, "projection", w->out.proj[1], sqrt(6.0 / (double)(D + d.out_width[1])));
            if (d.proj_biases) drawn(w, "bias of a projection", w->out.proj_bias[1], 0.125);
            if (d.cutoffs) drawn(w, "columns", w->out.cluster_w, 0.25);
            CHECK(d.out_width[0] == (c->widths ? 8u : D)
                      && (!d.cutoffs
                          || (d.out_width[1]
                                  == (c->more & 1 ? D
                                      : c->widths ? 4u
                                                  : D / 2)
                              && d.out_width[2]
                                     == (c->more & 1 ? D
                                         : c->widths ? 7u
                                                     : D / 4))),
                  "case %zu: widths", k);
            CHECK(!stx_vocab_io_logits(w, h) && strstr(stx_error(x), "stx_vocab_io_log_probs"),
                  "case %zu: %s", k, stx_error(x));
        }
        free(v);
        free(t);
        free(hv);
        stx_destroy(x);
    }
}

/* A scale, by hand: of a plain table it is 1 unless it is set, of adaptive ones
   sqrt(d) */
static void words_scale(void) {
    int adaptive, given;
    for (adaptive = 0; adaptive < 2; adaptive++)
        for (given = 0; given < 2; given++) {
            stx_ctx *x = context(1);
            stx_params *p = stx_params_create(x);
            stx_vocab_io_desc d = words_of(&words_cases[adaptive ? 4 : 0]);
            stx_vocab_io *w;
            stx_tensor *e;
            stx_real *got, *row;
            int32_t id = 20;
            size_t i, j;
            double worst = 0, s = given ? 3 : adaptive ? sqrt((double)D) : 1;
            d.scale = given ? 3 : 0;
            stx_vocab_io_resolve(x, NULL, &d, &d);
            w = stx_vocab_io_create(p, &d);
            stx_begin(x, STX_EVAL);
            e = stx_vocab_io_embed(w, stx_tokens(x, &id, 1, 1));
            got = host_of(x, e);
            row = host_of(x, adaptive ? w->in.table[2] : w->in_emb);
            if (adaptive) {
                stx_real *proj = host_of(x, w->in.proj[2]);
                for (i = 0; i < D; i++) {
                    double y = 0;
                    for (j = 0; j < d.width[2]; j++)
                        y += (double)row[(20 - 15) * d.width[2] + j]
                             * (double)proj[i * d.width[2] + j];
                    if (!(fabs(y * s - (double)got[i]) <= worst))
                        worst = fabs(y * s - (double)got[i]);
                }
                free(proj);
            } else
                for (i = 0; i < D; i++)
                    if (!(fabs((double)row[20 * D + i] * s - (double)got[i]) <= worst))
                        worst = fabs((double)row[20 * D + i] * s - (double)got[i]);
            CHECK(e && worst < TOL, "adaptive %d scale %g: off by %g %s", adaptive, s, worst,
                  stx_error(x));
            free(got);
            free(row);
            stx_destroy(x);
        }
}

static void words_refused(const char *want, const stx_vocab_io_desc *d) {
    stx_ctx *x = context(1);
    stx_vocab_io_desc to;
    CHECK(!stx_vocab_io_resolve(x, "test_lm", d, &to) && test_says(stx_error(x), want)
              && strstr(stx_error(x), "test_lm:"),
          "want \"%s\", got \"%s\"", want, stx_error(x));
    CHECK(!stx_vocab_io_resolve(NULL, NULL, d, &to), "%s: without a context", want);
    stx_destroy(x);
}

static void words_errors(void) {
    stx_vocab_io_desc plain = words_of(&words_cases[0]), ad = words_of(&words_cases[5]), d;
    d = plain;
    d.vocab = 0;
    words_refused("vocab: expected .. got 0", &d);
    d = plain;
    d.dim = 0;
    words_refused("dim: expected .. got 0", &d);
    d = plain;
    d.emb = (size_t)1 << 31;
    d.emb++;
    words_refused("emb: expected", &d);
    d = plain;
    d.in = STX_VOCAB_TIED;
    words_refused("in: expected .. got 1", &d);
    d = plain;
    d.out = 5;
    words_refused("out: expected .. got 5", &d);
    d = plain;
    d.scale = NAN;
    words_refused("scale of the embedding", &d);
    d = plain;
    d.dropout = 1;
    words_refused("dropout of adaptive input and output: expected .. got 1", &d);
    d = plain;
    d.out = STX_VOCAB_TIED;
    d.emb = 5;
    words_refused("emb with a tied output", &d);
    d = plain;
    d.share_tables = 1;
    words_refused("share_tables requires", &d);
    d = plain;
    d.out = STX_VOCAB_ADAPTIVE;
    d.share_projs = 1;
    words_refused("share_projs requires", &d);
    d = ad;
    d.out = STX_VOCAB_TIED;
    words_refused("STX_VOCAB_TIED requires a plain input", &d);
    d = ad;
    d.emb = 5;
    words_refused("emb of an adaptive input", &d);
    d = ad;
    d.divval = 1;
    words_refused("divval: expected .. got 1", &d);
    d = ad;
    d.cutoffs = 8;
    words_refused("cutoffs: expected .. got 8", &d);
    d = ad;
    d.cutoff[1] = 6;
    words_refused("cutoff: expected .. got 6 at position 2", &d);
    d = ad;
    d.cutoff[1] = V;
    words_refused("cutoff: expected .. got 29", &d);
    d = ad;
    d.divval = 7;
    words_refused("divval^cutoffs", &d);
    d = ad;
    d.direct_head = 1;
    d.width[0] = 8;
    words_refused("width of the first cluster, which has no projection: expected dim, got 8", &d);
    d = ad;
    d.no_projections = 1;
    d.width[0] = 8;
    words_refused("width of the first cluster, which has no projection: expected dim, got 8", &d);
    d = ad;
    d.no_projections = 1;
    d.width[1] = 8;
    words_refused("width of a cluster with no_projections: expected .. got 8", &d);
    d = ad;
    d.no_projections = 4;
    words_refused("no_projections: expected .. got 4", &d);
    d = ad;
    d.direct_head = -1;
    words_refused("direct_head: expected .. got -1", &d);
    d = ad;
    d.out_width[1] = 5;
    d.share_tables = 1;
    words_refused("out_width: expected 0 with share_tables or share_projs, got 5", &d);
    d = ad;
    d.no_cutoffs = 1;
    words_refused("cutoffs: expected 0 with no_cutoffs, got 2", &d);
    d = ad;
    d.separate_first = 1;
    words_refused("separate_first: expected .. got 1", &d);
    d = ad;
    d.out = STX_VOCAB_PLAIN;
    d.proj_biases = 1;
    words_refused("proj_biases: expected .. got 1", &d);
    d = ad;
    d.cutoffs = 0;
    d.vocab = 50000;
    d.dim = 64;
    CHECK(stx_vocab_io_resolve(NULL, NULL, &d, &d) && d.cutoffs == 2 && d.cutoff[0] == 20000
              && d.cutoff[1] == 40000,
          "the usual cutoffs");
    d = plain;
    d.vocab = d.dim = (size_t)1 << 31;
    if (sizeof(size_t) == 8)
        CHECK(stx_vocab_io_resolve(NULL, NULL, &d, &d)
                  && stx_vocab_io_count(&d) == ((size_t)1 << 63) + ((size_t)1 << 31),
              "a large count");
    CHECK(stx_size_add(SIZE_MAX - 5, 2, 3) == SIZE_MAX
              && stx_size_add(SIZE_MAX - 7, 2, 3) == SIZE_MAX - 1
              && stx_size_add(1, SIZE_MAX, 2) == SIZE_MAX && stx_size_add(7, 0, 9) == 7,
          "sums that do not wrap");
    CHECK(!stx_vocab_io_create(NULL, &plain) && !stx_vocab_io_embed(NULL, NULL)
              && !stx_vocab_io_logits(NULL, NULL) && !stx_vocab_io_log_probs(NULL, NULL)
              && !stx_vocab_io_scores(NULL, NULL) && !stx_vocab_io_loss(NULL, NULL, NULL, NULL),
          "NULLs");
}

// >>memory

/* What rows should hold, said the slow way: every row of every stream that was ever
   pushed, and whether it was padding */
enum { RB = 3, RW = 5, RMAX = 400 };

typedef struct told {
    double row[RMAX][RW];
    int gone[RMAX];
    size_t n;
} told;

static stx_memory *rows_of(stx_ctx *x, size_t B, size_t layers, int as_one, int zeros, int whole,
                           size_t most) {
    stx_memory_desc d;
    memset(&d, 0, sizeof d);
    d.B = B;
    d.layers = layers;
    d.width = RW;
    d.shared_layout = as_one;
    d.missing_as_zeros = zeros;
    d.count_unwritten = whole;
    d.max_rows = most;
    return stx_memory_create(x, &d);
}

/* T new rows for each of B streams, drawn; pads: some of them padding */
static stx_tensor *some(stx_ctx *x, told *t, size_t B, size_t T, int pads, const stx_ids **pad) {
    stx_real *v = (stx_real *)calloc(B * T * RW, sizeof *v);
    int32_t *m = (int32_t *)calloc(B * T, sizeof *m);
    stx_tensor *h;
    size_t b, i, c;
    for (b = 0; b < B; b++)
        for (i = 0; i < T; i++, t[b].n++) {
            for (c = 0; c < RW; c++)
                t[b].row[t[b].n][c] =
                    (double)(v[(b * T + i) * RW + c] = (stx_real)(float)test_rand());
            t[b].gone[t[b].n] = m[b * T + i] = pads && test_rand() > 0.4;
        }
    h = stx_input(x, v, B, T, RW, 0);
    *pad = pads ? stx_tokens(x, m, B, T) : NULL;
    free(v);
    free(m);
    return h;
}

/* The newest rows of layer l, by way of read and mask, against what was told */
static void holds(const char *what, stx_memory *s, size_t l, const told *t, size_t n) {
    stx_ctx *x = s->ctx;
    stx_tensor *y = stx_memory_read(s, l, n);
    const stx_ids *mask = stx_memory_mask(s, l, n, NULL, 0);
    stx_real *v = host_of(x, y);
    size_t b, i, c, m = y ? y->dim[1] : 0, wrong = 0, missing = 0;
    for (b = 0; b < s->B; b++)
        for (i = 0; i < m; i++) {
            int gone = i + t[b].n < m || t[b].gone[t[b].n - m + i],
                told_gone = mask && mask->data[b * m + i];
            missing += (size_t)gone;
            if (s->desc.missing_as_zeros) {
                if (told_gone) wrong++;
            } else if (gone != told_gone)
                wrong++;
            for (c = 0; c < RW; c++) {
                double want = gone && (s->desc.missing_as_zeros || i + t[b].n < m) ? 0
                              : i + t[b].n >= m ? t[b].row[t[b].n - m + i][c]
                                                : 0;
                if ((!gone || s->desc.missing_as_zeros) && (double)v[(b * m + i) * RW + c] != want)
                    wrong++;
            }
        }
    CHECK(!wrong && stx_ok(x), "%s layer %zu: %zu of %zu rows are wrong %s", what, l, wrong, m,
          stx_error(x));
    CHECK(mask == NULL || missing, "%s: a mask although nothing is missing", what);
    free(v);
}

static void forget(told *t) {
    size_t i;
    for (i = 0; i < t->n; i++) t->gone[i] = 1;
}

/* Random pushes, of blocks and windows of all lengths, resets and reads; out may be in
   or another one */
static void rows_random(void) {
    int kind;
    for (kind = 0; kind < 8; kind++) {
        const int pads = kind & 1, zeros = kind & 2 && !pads, two = kind & 4;
        stx_ctx *x = context((uint64_t)kind);
        stx_memory *s = rows_of(x, RB, 2, 1, zeros, 0, kind == 4 ? 40 : 0),
                   *o = two ? rows_of(x, RB, 2, 1, zeros, 0, 0) : s, *swap;
        told *t = (told *)calloc(RB, sizeof *t);
        size_t step, b;
        for (step = 0; step < 24; step++) {
            size_t T = 1 + step * 7 % 13,
                   keep = step % 5 == 3   ? 4
                          : step % 7 == 5 ? 0
                                          : 11 + step % 9,
                   e, had;
            const stx_ids *pad, *mask;
            stx_tensor *h, *X, *old;
            stx_cached_rows past;
            stx_begin(x, STX_EVAL);
            if (step == 9 || step == 13 || step == 14) {
                stx_memory_reset_stream(s, step % RB);
                forget(&t[step % RB]);
                holds("after a stream's reset", s, 0, t, 30);
            }
            if (step == 18) {
                stx_memory_reset(s);
                for (b = 0; b < RB; b++) forget(&t[b]);
                CHECK(!stx_memory_max_rows(s) && !stx_memory_read(s, 0, 9), "a reset");
            }
            h = some(x, t, RB, T, pads && step != 20, &pad);
            had = stx_memory_max_rows(s);
            X = stx_memory_concat(s, 1, 6, h);
            CHECK(X && X->dim[1] == STX_MIN(had, 6) + T && (had || X == h),
                  "rows before a block: %s", stx_error(x));
            e = had + T > keep ? had + T - keep : 0;
            old = stx_memory_evicted(s, 0, keep, h, pad, &mask);
            CHECK(e ? old && old->dim[1] == e : !old && !mask, "%zu fall out, expected %zu",
                  old ? old->dim[1] : 0, e);
            if (old) { /* as the newest of a memory of their own */
                stx_memory *fell = rows_of(x, RB, 1, 0, zeros, 0, 0);
                told *u = (told *)calloc(RB, sizeof *u);
                for (b = 0; b < RB; b++) {
                    u[b] = t[b];
                    u[b].n -= keep < u[b].n ? keep : u[b].n;
                }
                if (had + T <= t[0].n) {
                    CHECK(stx_memory_push(fell, NULL, 0, e, old, mask), "%s", stx_error(x));
                    holds("what falls out", fell, 0, u, e);
                }
                free(u);
                stx_memory_free(fell);
            }
            CHECK(stx_memory_view(s, 1, 6, &past) && past.rows == STX_MIN(had, 6),
                  "a view of %zu rows: %s", past.rows, stx_error(x));
            old = stx_memory_read(s, 1, 6);
            for (b = 0; b < 2; b++)
                CHECK(stx_memory_push(o, s, b, keep, h, pad), "%s", stx_error(x));
            CHECK(stx_memory_max_rows(o) == STX_MIN(keep, had + T), "%zu rows, expected %zu",
                  stx_memory_max_rows(o), STX_MIN(keep, had + T));
            /* what is pushed does not change it in this step */
            for (b = 0; old && b < RB; b++)
                CHECK(!memcmp(past.data + b * past.stride, old->data + b * past.rows * RW,
                              past.rows * RW * sizeof(stx_real)),
                      "it moved");
            holds("pushed", o, 0, t, 100);
            holds("pushed", o, 1, t, 7);
            swap = s;
            s = o;
            o = swap;
        }
        CHECK(stx_memory_key(s, 1) != stx_memory_key(s, 2), "keys");
        free(t);
        stx_destroy(x);
    }
}

/* Splitting in two, joining again, swapping streams, beside rows of another length */
static void rows_streams(void) {
    int zeros;
    for (zeros = 0; zeros < 2; zeros++) {
        stx_ctx *x = context(3);
        stx_memory *s = rows_of(x, RB, 2, 0, zeros, 0, 0), *a = rows_of(x, 1, 2, 0, zeros, 0, 0),
                   *b = rows_of(x, 2, 2, 0, zeros, 0, 0), *j = rows_of(x, RB, 2, 0, zeros, 0, 0);
        told *t = (told *)calloc(RB + 1, sizeof *t);
        const stx_ids *pad;
        stx_tensor *h;
        size_t l;
        stx_begin(x, STX_EVAL);
        h = some(x, t, RB, 9, !zeros, &pad);
        for (l = 0; l < 2; l++) stx_memory_push(s, NULL, l, 20, h, pad);
        CHECK(stx_memory_copy(a, 0, s, 0, 1) && stx_memory_copy(b, 0, s, 1, 2), "split: %s",
              stx_error(x));
        holds("the first stream", a, 1, t, 50);
        holds("the others", b, 0, t + 1, 50);
        h = some(x, t + 1, 2, 6, 0, &pad); /* one part goes on */
        for (l = 0; l < 2; l++) stx_memory_push(b, b, l, 20, h, pad);
        CHECK(stx_memory_copy(j, 0, a, 0, 1) && stx_memory_copy(j, 1, b, 0, 2), "join: %s",
              stx_error(x));
        CHECK(stx_memory_max_rows(j) == 15, "%zu rows", stx_memory_max_rows(j));
        holds("joined", j, 0, t, 50);
        holds("joined, the newest", j, 1, t, 4);
        /* a shorter stream into a longer batch */
        CHECK(stx_memory_copy(j, 2, a, 0, 1), "%s", stx_error(x));
        t[2] = t[0];
        holds("a shorter one", j, 0, t, 50);
        CHECK(stx_memory_copy(j, 0, j, 1, 1), "%s", stx_error(x));
        t[0] = t[1];
        holds("repeated", j, 0, t, 50);
        CHECK(stx_memory_copy(j, 0, s, 0, 3) && stx_memory_max_rows(j) == 9,
              "all of them: %zu rows", stx_memory_max_rows(j));
        CHECK(!stx_memory_copy(j, 1, s, 0, 3) && strstr(stx_error(x), "stx_memory_copy"), "%s",
              stx_error(x));
        stx_clear_error(x);
        CHECK(!stx_memory_copy(j, 0, j, 1, 2) && strstr(stx_error(x), "do not overlap"), "%s",
              stx_error(x));
        stx_clear_error(x);
        free(t);
        stx_destroy(x);
    }
}

/* Rows that are float in every precision: what is read of them is, too */
static void rows_full(void) {
    stx_ctx *x = context(4);
    stx_memory_desc d;
    stx_memory *s;
    stx_real v[RB * 3 * 2], w[RB * 4 * 2];
    stx_tensor *h, *y;
    size_t i;
    memset(&d, 0, sizeof d);
    d.layers = 1;
    d.B = RB;
    d.width = 2;
    d.always_f32 = d.missing_as_zeros = 1;
    s = stx_memory_create(x, &d);
    stx_begin(x, STX_EVAL);
    for (i = 0; i < RB * 6; i++) v[i] = (stx_real)i;
    h = stx_new_f32(x, RB, 3, 2, 0);
    stx_set(x, h, v);
    CHECK(stx_memory_push(s, s, 0, 4, h, NULL) && stx_memory_push(s, s, 0, 4, h, NULL), "%s",
          stx_error(x));
    y = stx_memory_read(s, 0, 9);
    CHECK(y && y->is_f32 && y->dim[1] == 4, "%s", stx_error(x));
    stx_get(x, y, w);
    for (i = 0; i < RB * 8; i++)
        CHECK(w[i] == v[i / 8 * 6 + (i % 8 < 2 ? 4 + i % 2 : i % 8 - 2)], "number %zu is %g", i,
              (double)w[i]);
    y = stx_memory_concat(s, 0, 2, h);
    CHECK(y && y->is_f32 && y->dim[1] == 5, "%s", stx_error(x));
    y = stx_memory_evicted(s, 0, 4, h, NULL, NULL);
    CHECK(y && y->is_f32 && y->dim[1] == 3, "%s", stx_error(x));
    stx_destroy(x);
}

static void rows_fixed(void) {
    stx_ctx *x = context(4);
    stx_memory_desc d;
    stx_memory *s, *r;
    stx_real v[RB * 4], w[RB * 4];
    stx_tensor *y;
    size_t i;
    memset(&d, 0, sizeof d);
    d.layers = 2;
    d.B = RB;
    d.width = 4;
    d.is_state = 1;
    s = stx_memory_create(x, &d);
    r = stx_memory_create(x, &d);
    stx_begin(x, STX_EVAL);
    for (i = 0; i < RB * 4; i++) v[i] = (stx_real)(i + 1);
    CHECK(stx_memory_push(s, NULL, 1, 1, stx_input(x, v, RB, 4, 0, 0), NULL), "%s", stx_error(x));
    y = stx_memory_read(s, 1, 1);
    CHECK(y && y->ndim == 2 && y->is_f32, "%s", stx_error(x));
    stx_get(x, y, w);
    CHECK(!memcmp(v, w, sizeof v), "the row");
    y = stx_memory_read(s, 0, 1);
    stx_get(x, y, w);
    for (i = 0; i < RB * 4; i++) CHECK(w[i] == 0, "another layer");
    CHECK(stx_memory_copy(r, 0, s, 1, 2), "%s", stx_error(x));
    CHECK(stx_memory_get(r, 1, w) && !memcmp(v + 4, w, 8 * sizeof *v) && w[8] == 0,
          "two of three streams");
    stx_memory_reset_stream(s, 1);
    CHECK(stx_memory_get(s, 1, w) && w[3] == 4 && w[4] == 0 && w[7] == 0 && w[8] == 9,
          "one stream's reset");
    CHECK(stx_memory_set(s, 0, 1, v, 1) && stx_memory_get(s, 0, w) && !memcmp(v, w, sizeof v),
          "set and get");
    stx_memory_reset(s);
    CHECK(stx_memory_get(s, 0, w) && w[0] == 0 && stx_memory_max_rows(s) == 1, "reset");
    CHECK(!stx_memory_set(s, 0, 2, v, 2), "two rows");
    stx_clear_error(x);
    CHECK(!stx_memory_push(s, NULL, 0, 1, stx_input(x, v, RB, 2, 2, 0), NULL)
              && strstr(stx_error(x), "stx_memory_push"),
          "%s", stx_error(x));
    stx_destroy(x);
}

static void rows_files(void) {
    int as_one;
    for (as_one = 0; as_one < 2; as_one++) {
        stx_ctx *x = context(5);
        stx_memory *s = rows_of(x, RB, 2, as_one, 0, !as_one, 0),
                   *r = rows_of(x, RB, 2, as_one, 0, !as_one, 0),
                   *few = rows_of(x, 2, 2, as_one, 0, !as_one, 0),
                   *none = rows_of(x, RB, 2, as_one, 0, !as_one, 0);
        told *t = (told *)calloc(RB, sizeof *t);
        const stx_ids *pad;
        stx_tensor *h;
        char path[1024], name[100], at[32];
        stx_writer *w;
        stx_file *f;
        stx_real *v = (stx_real *)calloc(RB * 9 * RW, sizeof *v);
        size_t l;
        test_path(path, sizeof path, "test_lm");
        stx_begin(x, STX_EVAL);
        h = some(x, t, RB, 9, 1, &pad);
        for (l = 0; l < 2; l++) stx_memory_push(s, NULL, l, 12, h, pad);
        CHECK(s->layer[0].count == 9 && s->layer[0].logical_count == (as_one ? 9u : 12u),
              "%zu of %zu rows", s->layer[0].count, s->layer[0].logical_count);
        w = stx_writer_create(x);
        CHECK(stx_memory_save(w, s, "a.") && stx_memory_save(w, none, "none.")
                  && stx_writer_finish(w, path),
              "%s", stx_error(x));
        f = stx_file_open(x, path);
        snprintf(name, sizeof name, "a.%s1", as_one ? "memory." : "");
        CHECK(f && stx_file_find(f, name) && stx_file_find(f, as_one ? "a.pad" : "a.pad.1")
                  && stx_file_meta(f, as_one ? "a.rows" : "a.rows.1"),
              "names");
        CHECK(stx_memory_load(r, f, "a.") && r->layer[1].logical_count == s->layer[1].logical_count,
              "%s", stx_error(x));
        for (l = 0; l < 2; l++) holds("loaded", r, l, t, 50);
        CHECK(stx_memory_load(r, f, "none.") && !stx_memory_max_rows(r), "%s", stx_error(x));
        CHECK(!stx_memory_load(few, f, "a.")
                  && strstr(stx_error(x), "expected (2,9,5), got another shape")
                  && !stx_memory_max_rows(few),
              "%s", stx_error(x));
        stx_clear_error(x);
        CHECK(!stx_memory_load(r, f, "b.") && strstr(stx_error(x), "b.rows"), "%s", stx_error(x));
        stx_clear_error(x);
        memset(name, 'n', 90);
        name[90] = 0;
        CHECK(!stx_memory_load(r, f, name) && strstr(stx_error(x), "prefix: expected at most 80 bytes, got 90"), "%s",
              stx_error(x));
        stx_clear_error(x);
        stx_file_close(f);
        /* by hand, in the caller's memory: what is set is all there */
        CHECK(stx_memory_get(s, 1, v) && stx_memory_set(r, 1, 9, v, 9) && !r->layer[1].masked, "%s",
              stx_error(x));
        h = stx_memory_read(r, 1, 99);
        CHECK(h && h->dim[1] == 9 && !stx_memory_mask(r, 1, 99, NULL, 0), "set: %s", stx_error(x));
        stx_download(x, v, r->layer[1].data, 1);
        CHECK((double)v[0] == t[0].row[0][0], "the first number");
        /* damaged: counts that are too large, a mask of another shape */
        w = stx_writer_create(x);
        snprintf(at, sizeof at, "%s", as_one ? "c.rows" : "c.rows.0");
        stx_writer_meta_u64(w, at, (uint64_t)1 << 40);
        stx_writer_meta_u64(w, as_one ? "d.rows" : "d.rows.0", 9);
        if (!as_one) {
            stx_writer_meta_u64(w, "d.real.0", 9);
            stx_writer_meta_u64(w, "d.rows.1", 9);
            stx_writer_meta_u64(w, "d.real.1", 9);
            stx_writer_meta_u64(w, "e.rows.0", 3);
            stx_writer_meta_u64(w, "e.real.0", 9);
        }
        {
            size_t dim[3] = {RB, 9, RW}, off[2] = {RB, 8};
            for (l = 0; l < 2; l++) {
                snprintf(name, sizeof name, "d.%s%zu", as_one ? "memory." : "", l);
                stx_writer_add_device(w, name, 3, dim, s->layer[l].data);
            }
            stx_writer_add(w, as_one ? "d.pad" : "d.pad.1", STX_I32, 2, off, s->layer[0].pad);
        }
        CHECK(stx_writer_finish(w, path), "%s", stx_error(x));
        f = stx_file_open(x, path);
        CHECK(!stx_memory_load(r, f, "c.") && strstr(stx_error(x), "damaged")
                  && !stx_memory_max_rows(r),
              "%s", stx_error(x));
        stx_clear_error(x);
        CHECK(!stx_memory_load(r, f, "d.") && strstr(stx_error(x), "pad")
                  && !stx_memory_max_rows(r),
              "%s", stx_error(x));
        stx_clear_error(x);
        if (!as_one)
            CHECK(!stx_memory_load(r, f, "e.") && strstr(stx_error(x), "expected at most 3, got 9"), "%s",
                  stx_error(x));
        stx_clear_error(x);
        stx_file_close(f);
        remove(path);
        free(v);
        free(t);
        stx_destroy(x);
    }
}

/* A file from a buffer with more room than rows: written from where streams stand
   apart, whole words of the checksum or not */
static void rows_apart(void) {
    size_t n, i;
    for (n = 8; n < 10; n++) {
        stx_ctx *x = context(9);
        stx_memory *s = rows_of(x, RB, 1, 0, 0, 0, 0), *r = rows_of(x, RB, 1, 0, 0, 0, 0);
        told *t = (told *)calloc(RB, sizeof *t);
        const stx_ids *pad;
        stx_writer *w = stx_writer_create(x);
        stx_file *f;
        char path[1024];
        test_path(path, sizeof path, "test_lm");
        stx_begin(x, STX_EVAL);
        stx_memory_reserve(s, 20);
        for (i = 0; i < 2; i++) stx_memory_push(s, s, 0, n, some(x, t, RB, n, 0, &pad), NULL);
        CHECK(s->layer[0].stride == 20 * RW, "%zu apart", s->layer[0].stride);
        CHECK(stx_memory_save(w, s, "a.") && stx_writer_checksum(w) && stx_writer_finish(w, path),
              "%s", stx_error(x));
        f = stx_file_open(x, path);
        CHECK(f && stx_file_verify(f) && stx_memory_load(r, f, "a."), "%s", stx_error(x));
        holds("from a file", r, 0, t, n);
        stx_file_close(f);
        remove(path);
        free(t);
        stx_destroy(x);
    }
}

/* Views: what a step has looked at stays as it is until the next one begins, whatever
   is pushed (several times, too), set, reset, copied or freed; and from then on rows
   slide through one buffer. */
static void rows_views(void) {
    enum { MOST = 6 };

    int kind;
    for (kind = 0; kind < 4; kind++) {
        const size_t T = kind & 1 ? 5 : 3, keep = 12;
        stx_ctx *x = context(8);
        stx_memory *s = rows_of(x, RB, 1, 0, 1, 0, 12), *other = rows_of(x, RB, 1, 0, 1, 0, 0);
        told *t = (told *)calloc(RB, sizeof *t);
        const stx_real *base = NULL;
        const stx_ids *pad;
        size_t step, k, b, bytes = 0;
        for (step = 0; step < 40; step++) {
            stx_cached_rows view[MOST];
            stx_tensor *copy[MOST], *h = NULL;
            size_t views = 0;
            stx_begin(x, kind & 2 ? STX_TRAIN : STX_EVAL);
            for (k = 0; k < (step % 4 == 3 ? 3 : 1); k++) {
                h = some(x, t, RB, T, 0, &pad);
                copy[views] = stx_memory_read(s, 0, step % 2 ? 12 : 7);
                CHECK(stx_memory_view(s, 0, step % 2 ? 12 : 7, &view[views]), "%s", stx_error(x));
                CHECK(view[views].rows == (copy[views] ? copy[views]->dim[1] : 0), "%zu rows",
                      view[views].rows);
                views++;
                CHECK(stx_memory_push(s, s, 0, keep, h, NULL), "%s", stx_error(x));
                holds("pushed", s, 0, t, 12);
            }
            if (step == 34) {
                base = s->layer[0].base;
                bytes = stx_bytes(x);
            }
            if (step > 34)
                CHECK(s->layer[0].base == base && stx_bytes(x) == bytes, "step %zu: another buffer",
                      step);
            if (step == 9) {
                stx_memory_reset_stream(s, 1);
                forget(&t[1]);
                holds("a stream's reset", s, 0, t, 12);
            }
            if (step == 13) {
                stx_real *all = (stx_real *)calloc(RB * 12 * RW, sizeof *all);
                CHECK(stx_memory_get(s, 0, all)
                          && stx_memory_set(s, 0, stx_memory_max_rows(s), all,
                                            stx_memory_max_rows(s)),
                      "%s", stx_error(x));
                holds("set", s, 0, t, 12);
                free(all);
            }
            if (step == 17) {
                stx_memory_push(other, NULL, 0, 4, h, NULL);
                CHECK(stx_memory_copy(s, 2, other, 2, 1), "%s", stx_error(x));
                for (k = 0; k + STX_MIN(T, 4) < t[2].n; k++) t[2].gone[k] = 1;
                holds("a stream copied", s, 0, t, 12);
            }
            if (step == 21) { /* what another one holds, none of it, and a block */
                CHECK(stx_memory_push(s, other, 0, STX_MIN(T, 4), h, NULL), "%s", stx_error(x));
                holds("in place of all", s, 0, t, 12);
            }
            if (step >= 25 && step < 29) {
                stx_memory_reset(s);
                for (b = 0; b < RB; b++) forget(&t[b]);
                CHECK(stx_memory_push(s, s, 0, keep, some(x, t, RB, T, 0, &pad), NULL), "%s",
                      stx_error(x));
                holds("after a reset", s, 0, t, 12);
            }
            if (step == 29) { /* set to nothing, and a block */
                CHECK(stx_memory_set(s, 0, 0, NULL, 0), "%s", stx_error(x));
                for (b = 0; b < RB; b++) forget(&t[b]);
                CHECK(stx_memory_push(s, s, 0, keep, some(x, t, RB, T, 0, &pad), NULL), "%s",
                      stx_error(x));
                holds("after a set of none", s, 0, t, 12);
            }
            if (step == 39) stx_memory_free(s);
            for (k = 0; k < views; k++)
                for (b = 0; copy[k] && b < RB; b++)
                    CHECK(!memcmp(view[k].data + b * view[k].stride,
                                  copy[k]->data + b * view[k].rows * RW,
                                  view[k].rows * RW * sizeof(stx_real)),
                          "step %zu: view %zu has changed", step, k);
        }
        free(t);
        stx_destroy(x);
    }
}

/* No memory for a larger buffer: an error, and the rows are still there; and room that
   a single step wanted is forgotten */
static int lose_memory;

static void *lose_alloc(void *user, size_t n) {
    (void)user;
    return lose_memory ? NULL : malloc(n);
}

static void lose_free(void *user, void *p) {
    (void)user;
    free(p);
}

static void rows_kept(void) {
    enum { KEEP = 64, STEP = 4 };

    stx_memory_desc rd;
    stx_real v[2 * KEEP * RW], got[2 * KEEP * RW];
    stx_cached_rows view;
    stx_memory *a, *b;
    stx_desc d;
    stx_ctx *x;
    size_t i, k, moves[2] = {0, 0}, pace[2];
    memset(&d, 0, sizeof d);
    memset(&rd, 0, sizeof rd);
    d.alloc = lose_alloc;
    d.release = lose_free;
    rd.B = 2;
    rd.layers = 1;
    rd.width = RW;
    x = stx_create(&d);
    a = stx_memory_create(x, &rd);
    b = stx_memory_create(x, &rd);
    for (i = 0; i < 2 * KEEP * RW; i++) v[i] = (stx_real)i;
    stx_begin(x, STX_EVAL);
    CHECK(stx_memory_push(a, NULL, 0, KEEP, stx_input(x, v, 2, KEEP, RW, 0), NULL), "%s",
          stx_error(x));
    stx_begin(x, STX_EVAL);
    lose_memory = 1;
    i = stx_bytes(x);
    CHECK(!stx_memory_reserve(a, 100 * KEEP) && !stx_ok(x), "a reserve without memory");
    lose_memory = 0;
    stx_clear_error(x);
    CHECK(stx_bytes(x) == i && stx_memory_max_rows(a) == KEEP && stx_memory_get(a, 0, got)
              && !memcmp(got, v, sizeof v),
          "rows are lost with an error: %zu", stx_memory_max_rows(a));
    for (k = 0; k < 2; k++) {
        if (k) { /* once from a to b and back */
            stx_begin(x, STX_EVAL);
            stx_memory_view(a, 0, KEEP, &view);
            stx_memory_push(b, a, 0, KEEP, stx_input(x, v, 2, STEP, RW, 0), NULL);
            stx_memory_view(b, 0, KEEP, &view);
            stx_memory_push(a, b, 0, KEEP, stx_input(x, v, 2, STEP, RW, 0), NULL);
            CHECK(stx_ok(x) && a->layer[0].max_pushed >= KEEP, "%s", stx_error(x));
        }
        for (i = 0; i < 300; i++) {
            size_t first = a->layer[0].offset;
            stx_begin(x, STX_TRAIN);
            stx_memory_view(a, 0, KEEP, &view);
            moves[k] += i >= 100 && a->layer[0].offset != first;
            stx_memory_push(a, a, 0, KEEP, stx_input(x, v, 2, STEP, RW, 0), NULL);
        }
        pace[k] = a->layer[0].max_pushed;
    }
    CHECK(stx_ok(x) && pace[0] == STEP && pace[1] == STEP && moves[1] <= moves[0],
          "pace %zu then %zu; %zu moves then %zu", pace[0], pace[1], moves[0], moves[1]);
    stx_destroy(x);
}

/* Alternating states within one step: each is looked at, and its rows are replaced by
   others. What the step has looked at stays until it ends; from the third step with full
   memories on, nothing is allocated, and steps begin with the same addresses and room. */
static void rows_turns(void) {
    enum { STATES = 3, MOST = 6 };

    int kind;
    for (kind = 0; kind < 12; kind++) {
        const size_t states = kind % 3 == 2 ? 3 : 2,
                     turns = states * (size_t)(kind % 3 == 1 ? 2 : 1), T = kind & 4 ? 9 : 5,
                     keep = 12;
        stx_ctx *x = context(8);
        stx_memory *s[STATES];
        told *t = (told *)calloc(RB, sizeof *t);
        uint64_t key = 0, before;
        size_t step, k, b, bytes = 0;
        for (k = 0; k < states; k++) s[k] = rows_of(x, RB, 1, 0, 0, 0, kind & 1 ? 12 : 0);
        for (step = 0; step < 10 && (t[0].n + turns * T < RMAX); step++) {
            stx_cached_rows view[MOST];
            stx_tensor *copy[MOST];
            before = key;
            for (key = 1, k = 0; k < states; k++) key = stx_memory_key(s[k], key);
            if (step > 5)
                CHECK(key == before && bytes == stx_bytes(x),
                      "kind %d: step %zu begins with other addresses", kind, step);
            bytes = stx_bytes(x);
            stx_begin(x, kind & 1 ? STX_TRAIN : STX_EVAL);
            for (k = 0; k < turns; k++) {
                const stx_ids *pad;
                stx_memory *in = s[k % states], *out = s[(k + 1) % states];
                copy[k] = stx_memory_read(in, 0, 12);
                CHECK(stx_memory_view(in, 0, 12, &view[k])
                          && view[k].rows == (copy[k] ? copy[k]->dim[1] : 0),
                      "%s", stx_error(x));
                stx_tensor *h = some(x, t, RB, T, kind > 5 && step == 2, &pad);
                CHECK(stx_memory_push(out, in, 0, keep, h, pad), "%s", stx_error(x));
                holds("pushed", out, 0, t, 12);
            }
            for (k = 0; k < turns; k++)
                for (b = 0; copy[k] && b < RB; b++)
                    CHECK(!memcmp(view[k].data + b * view[k].stride,
                                  copy[k]->data + b * view[k].rows * RW,
                                  view[k].rows * RW * sizeof(stx_real)),
                          "kind %d, step %zu: view %zu has changed", kind, step, k);
        }
        CHECK(step > 7, "%zu steps", step);
        CHECK(s[0]->layer[0].capacity <= (turns > states ? 3 : 2) * keep + 6, "room for %zu rows",
              s[0]->layer[0].capacity);
        free(t);
        stx_destroy(x);
    }
}

/* Room: half as much again up to a limit, or what is asked; asked for beforehand,
   addresses stay */
static void rows_room(void) {
    stx_ctx *x = context(6);
    stx_memory *s = rows_of(x, RB, 1, 0, 0, 0, 12), *r = rows_of(x, RB, 1, 0, 0, 0, 0);
    told *t = (told *)calloc(RB, sizeof *t);
    const stx_ids *pad;
    const stx_real *data;
    stx_tensor *h;
    size_t i, bytes;
    stx_begin(x, STX_EVAL);
    h = some(x, t, RB, 6, 0, &pad);
    stx_memory_push(s, NULL, 0, 30, h, NULL);
    stx_memory_push(r, NULL, 0, 30, h, NULL);
    CHECK(s->layer[0].capacity == 9 && r->layer[0].capacity == 6, "room for %zu and %zu",
          s->layer[0].capacity, r->layer[0].capacity);
    CHECK(stx_memory_reserve(r, 30), "%s", stx_error(x));
    holds("with more room", r, 0, t, 30);
    data = r->layer[0].data;
    bytes = stx_bytes(x);
    for (i = 0; i < 5; i++) {
        h = some(x, t, RB, 6, 0, &pad);
        stx_memory_push(r, r, 0, 30, h, NULL);
    }
    holds("full", r, 0, t, 30);
    CHECK(data == r->layer[0].data && bytes == stx_bytes(x), "it moved");
    for (i = 0; i < 3; i++) stx_memory_push(s, s, 0, 12, h, NULL);
    CHECK(s->layer[0].capacity == 12 && stx_memory_max_rows(s) == 12, "room for %zu",
          s->layer[0].capacity);
    free(t);
    stx_destroy(x);
}

static void rows_errors(void) {
    stx_ctx *x = context(7);
    stx_memory_desc d;
    stx_memory *s;
    stx_real v[60] = {0};
    size_t widths[2] = {RW, 0};
    stx_cached_rows past;
    stx_tensor *h;
    memset(&d, 0, sizeof d);
    CHECK(!stx_memory_create(x, &d) && strstr(stx_error(x), "stx_memory_create"), "%s",
          stx_error(x));
    stx_clear_error(x);
    d.layers = 2;
    d.B = 2;
    d.widths = widths;
    d.is_state = 1;
    CHECK(!stx_memory_create(x, &d) && strstr(stx_error(x), "requires one width"), "%s", stx_error(x));
    stx_clear_error(x);
    d.is_state = 0;
    d.max_rows = 8;
    s = stx_memory_create(x, &d);
    stx_begin(x, STX_EVAL);
    h = stx_input(x, v, 2, 6, RW, 0);
    CHECK(!stx_memory_push(s, NULL, 2, 4, h, NULL) && strstr(stx_error(x), "layer: expected less than 2, got 2"), "%s",
          stx_error(x));
    stx_clear_error(x);
    CHECK(!stx_memory_push(s, NULL, 1, 4, h, NULL)
              && strstr(stx_error(x), "expected (2,T,0), got"),
          "%s", stx_error(x));
    stx_clear_error(x);
    stx_begin(x, STX_EVAL);
    CHECK(!stx_memory_push(s, NULL, 0, 4, stx_input(x, v, 3, 4, RW, 0), NULL), "three streams");
    stx_clear_error(x);
    stx_memory_reset_stream(s, 2);
    CHECK(strstr(stx_error(x), "stream: expected less than 2, got 2"), "%s", stx_error(x));
    stx_clear_error(x);
    CHECK(!stx_memory_set(s, 0, 9, v, 9) && strstr(stx_error(x), "rows <= 8"), "%s", stx_error(x));
    stx_clear_error(x);
    CHECK(!stx_memory_set(s, 5, 1, v, 1) && strstr(stx_error(x), "got 5"), "%s", stx_error(x));
    stx_clear_error(x);
    CHECK(!stx_memory_get(s, 5, v) && strstr(stx_error(x), "got 5"), "%s", stx_error(x));
    stx_clear_error(x);
    CHECK(!stx_memory_read(s, 5, 1) && !stx_ok(x), "layer 5");
    stx_clear_error(x);
    stx_memory_free(s);
    stx_memory_free(NULL);
    stx_memory_reset(NULL);
    stx_memory_reset_stream(NULL, 0);
    CHECK(stx_memory_view(NULL, 0, 9, &past) && !past.rows && !past.data, "a view of no rows");
    CHECK(!stx_memory_create(NULL, NULL) && !stx_memory_push(NULL, NULL, 0, 0, NULL, NULL)
              && !stx_memory_read(NULL, 0, 0) && !stx_memory_mask(NULL, 0, 0, NULL, 0)
              && !stx_memory_get(NULL, 0, NULL) && !stx_memory_set(NULL, 0, 0, NULL, 0)
              && !stx_memory_save(NULL, NULL, "") && !stx_memory_load(NULL, NULL, "")
              && !stx_memory_copy(NULL, 0, NULL, 0, 0) && !stx_memory_max_rows(NULL)
              && !stx_memory_reserve(NULL, 1) && !stx_memory_evicted(NULL, 0, 0, NULL, NULL, NULL)
              && !stx_memory_view(NULL, 0, 0, NULL) && stx_memory_concat(NULL, 0, 0, h) == h
              && stx_memory_key(NULL, 5) == 5,
          "NULLs");
    stx_destroy(x);
}

/* A stream of a family's state that is reset goes on as one that begins, and the
   others as if nothing had been */
static int span_nll(stx_span *m, const int32_t *t, size_t B, size_t T, size_t row,
                    stx_span_state *s, stx_real *out) {
    stx_tensor *lp;
    int32_t *in = (int32_t *)malloc(B * T * sizeof *in);
    size_t b;
    for (b = 0; b < B; b++) memcpy(in + b * T, t + b * row, T * sizeof *in);
    stx_begin(m->ctx, STX_EVAL);
    lp = stx_span_log_probs(m, stx_span_forward(m, stx_tokens(m->ctx, in, B, T), s, s));
    free(in);
    if (lp) stx_get(m->ctx, lp, out);
    return lp != NULL;
}

static int sru_nll(stx_sru_lm *m, const int32_t *t, size_t B, size_t T, size_t row,
                   stx_sru_state *s, stx_real *out) {
    stx_tensor *lp;
    int32_t *in = (int32_t *)malloc(B * T * sizeof *in);
    size_t b;
    for (b = 0; b < B; b++) memcpy(in + b * T, t + b * row, T * sizeof *in);
    stx_begin(m->ctx, STX_EVAL);
    lp = stx_sru_lm_log_probs(m, stx_sru_lm_forward(m, stx_tokens(m->ctx, in, B, T), s, s));
    free(in);
    if (lp) stx_get(m->ctx, lp, out);
    return lp != NULL;
}

static double apart(const stx_real *a, const stx_real *b, size_t n) {
    double worst = 0;
    size_t i;
    for (i = 0; i < n; i++) {
        double e = fabs((double)a[i] - (double)b[i]);
        if (!(e <= worst)) worst = e;
    }
    return worst;
}

static void one_stream(void) {
    enum { B = 3, T = 12, N = 12 * 5 };

    int kind;
    for (kind = 0; kind < 5; kind++) {
        stx_ctx *x = context(11);
        stx_span_desc d;
        stx_sru_lm_desc e;
        stx_span *m = NULL;
        stx_sru_lm *r = NULL;
        stx_span_state *s = NULL, *alone = NULL;
        stx_sru_state *u = NULL, *lone = NULL;
        int32_t *t = text(B * N, V, 1);
        stx_real *out = (stx_real *)malloc(B * T * V * sizeof *out),
                 *want = (stx_real *)malloc(T * V * sizeof *want);
        size_t i, b;
        memset(&d, 0, sizeof d);
        memset(&e, 0, sizeof e);
        if (kind < 3) {
            d.vocab = V;
            d.layers = 2;
            d.dim = 16;
            d.heads = 2;
            d.inner = 16;
            d.span = 30;
            d.adapt_span = kind != 1;
            d.ramp = 4;
            d.span_init = 0.5;
            d.literal = kind == 2 ? STX_SPAN_LITERAL_MEMORY : 0;
            d.pers = kind == 1 ? 3 : 0;
            m = stx_span_create(x, &d);
            s = stx_span_state_create(m, B);
        } else {
            e.vocab = V;
            e.dim = 16;
            e.sru.layers = 2;
            e.sru.alpha_init = 0.7;
            e.sru.transform = kind == 3 ? STX_SRU_ATTENTION : STX_SRU_LINEAR;
            r = stx_sru_lm_create(x, &e);
            u = stx_sru_state_create(r->sru, B);
            u->keep = 20;
        }
        /* stream b is reset in the midst; the others are compared with batches of one,
           too */
        for (b = 0; b < B; b++) {
            if (m) {
                stx_span_state_reset(s);
                alone = stx_span_state_create(m, 1);
            } else {
                stx_sru_state_reset(u);
                lone = stx_sru_state_create(r->sru, 1);
                lone->keep = 20;
            }
            for (i = 0; i < 5; i++) {
                double off;
                size_t k = i < 3 ? (b + 1) % B : b; /* the one that is looked at */
                if (i == 3) {
                    if (m) {
                        stx_span_state_reset_stream(s, b);
                        stx_span_state_reset(alone);
                    } else {
                        stx_sru_state_reset_stream(u, b);
                        stx_sru_state_reset(lone);
                    }
                }
                CHECK(m ? span_nll(m, t + i * T, B, T, N, s, out)
                        : sru_nll(r, t + i * T, B, T, N, u, out),
                      "%s", stx_error(x));
                CHECK(m ? span_nll(m, t + k * N + i * T, 1, T, N, alone, want)
                        : sru_nll(r, t + k * N + i * T, 1, T, N, lone, want),
                      "%s", stx_error(x));
                off = apart(out + k * T * V, want, T * V);
                CHECK(off < 20 * TOL, "kind %d, block %zu, stream %zu: off by %g", kind, i, k, off);
            }
        }
        { /* a stream that is not reset does not feel it: with the reset and without it */
            stx_real *with = (stx_real *)malloc(B * T * V * sizeof *with);
            int reset;
            for (reset = 0; reset < 2; reset++) {
                if (m)
                    stx_span_state_reset(s);
                else
                    stx_sru_state_reset(u);
                for (i = 0; i < 3; i++) {
                    if (i == 2 && reset) {
                        if (m)
                            stx_span_state_reset_stream(s, 1);
                        else
                            stx_sru_state_reset_stream(u, 1);
                    }
                    if (m)
                        span_nll(m, t + i * T, B, T, N, s, reset ? with : out);
                    else
                        sru_nll(r, t + i * T, B, T, N, u, reset ? with : out);
                }
            }
            CHECK(apart(out, with, T * V) < TOL
                      && apart(out + 2 * T * V, with + 2 * T * V, T * V) < TOL,
                  "kind %d: others feel a reset", kind);
            CHECK(apart(out + T * V, with + T * V, T * V) > 1e-3,
                  "kind %d: a reset changes nothing: %g", kind,
                  apart(out + T * V, with + T * V, T * V));
            free(with);
        }
        free(t);
        free(out);
        free(want);
        stx_destroy(x);
    }
}


// >>cache

static stx_tensor *columns(stx_ctx *x, const stx_real *v, size_t B, size_t N, size_t C, size_t t0,
                           size_t t) {
    stx_real *part = (stx_real *)stx_step_alloc(x, B * t * C * sizeof *part);
    size_t b;
    for (b = 0; b < B; b++) memcpy(part + b * t * C, v + (b * N + t0) * C, t * C * sizeof *part);
    return stx_input(x, part, B, t, C, 0);
}

static stx_real *numbers(size_t n) {
    stx_real *v = (stx_real *)malloc(n * sizeof *v);
    size_t i;
    for (i = 0; i < n; i++) v[i] = (stx_real)test_rand();
    return v;
}

/* In pieces of all lengths what stx_attention gives at once, whatever it takes besides
   q, k and v */
static void cache_attention(void) {
    enum { B = 2, N = 230, C = 8 };

    int kind;
    for (kind = 0; kind < 8; kind++) {
        const size_t window = kind == 5 ? 1 : kind == 6 ? 400 : 20, P = 20;
        stx_ctx *x = context(12);
        stx_params *p = stx_params_create(x);
        stx_cache *c = stx_cache_create(x, 2, B, 3);
        stx_real *q = numbers(B * N * C), *k = numbers(B * N * C), *v = numbers(B * N * C),
                 *kv = (stx_real *)malloc(2 * B * N * C * sizeof *kv), *all = NULL;
        stx_attention_in a;
        stx_attention_desc d;
        stx_tensor *y;
        size_t at, t, i, n = 0, bytes = 0;
        double worst = 0, e;
        const int both = kind == 1 || kind == 6;
        for (i = 0; i < B * N; i++) {
            memcpy(kv + 2 * i * C, k + i * C, C * sizeof *kv);
            memcpy(kv + (2 * i + 1) * C, v + i * C, C * sizeof *kv);
        }
        memset(&a, 0, sizeof a);
        memset(&d, 0, sizeof d);
        d.heads = 2;
        d.span = window;
        if (kind == 2 || kind == 3)
            a.pe = stx_param(p, STX_NORMAL, 1, "pe", P, kind == 2 ? C / 2 : C, 0, 0);
        if (kind == 3) {
            a.content_bias = stx_param(p, STX_NORMAL, 1, "u", C, 0, 0, 0);
            a.position_bias = stx_param(p, STX_NORMAL, 1, "vb", C, 0, 0, 0);
            d.scale = 0.3;
        }
        if (kind == 4) {
            a.span_fraction = stx_param(p, STX_CONSTANT, 0.6, "z", 2, 0, 0, 0);
            a.persistent_k = stx_param(p, STX_NORMAL, 1, "pk", 2, 3, C / 2, 0);
            a.persistent_v = stx_param(p, STX_NORMAL, 1, "pv", 2, 3, C / 2, 0);
            d.max_span = (double)window;
            d.ramp = 4;
            d.delta_min = 1;
        }
        if (kind == 7) {
            d.first_key = -(ptrdiff_t)window;
            d.delta_min = 1;
        }
        stx_begin(x, STX_EVAL);
        a.q = stx_input(x, q, B, N, C, 0);
        if (both)
            a.kv = stx_input(x, kv, B, N, 2 * C, 0);
        else {
            a.k = stx_input(x, k, B, N, C, 0);
            a.v = stx_input(x, v, B, N, C, 0);
        }
        all = host_of(x, stx_attention(x, &a, &d));
        CHECK(stx_cache_window(c, 0, 3, C, 0) && stx_cache_window(c, 0, window, C, both),
              "kind %d: %s", kind, stx_error(x));
        for (at = 0; at < N; at += t, n++) {
            t = n % 5 == 4 ? 64 : n % 3 ? 1 : 7;
            if (t > N - at) t = N - at;
            stx_begin(x, STX_EVAL);
            a.q = columns(x, q, B, N, C, at, t);
            if (both)
                a.kv = columns(x, kv, B, N, 2 * C, at, t);
            else {
                a.k = columns(x, k, B, N, C, at, t);
                a.v = columns(x, v, B, N, C, at, t);
            }
            y = stx_cache_attention(c, 0, &a, &d);
            CHECK(y && y->dim[1] == t, "kind %d: %s", kind, stx_error(x));
            if (y) {
                stx_real *got = host_of(x, y), *want = (stx_real *)malloc(B * t * C * sizeof *want);
                for (i = 0; i < B; i++)
                    memcpy(want + i * t * C, all + (i * N + at) * C, t * C * sizeof *want);
                e = apart(got, want, B * t * C);
                if (!(e <= worst)) worst = e;
                free(got);
                free(want);
            }
            if (at == 0) bytes = stx_bytes(x);
        }
        CHECK(worst < TOL, "kind %d: pieces are off by %g", kind, worst);
        CHECK(c->layer[0].len <= c->layer[0].capacity && c->layer[1].capacity == 0 && bytes,
              "kind %d: room", kind);
        stx_cache_reset(c);
        stx_begin(x, STX_EVAL);
        a.q = columns(x, q, B, N, C, 0, 5);
        if (both)
            a.kv = columns(x, kv, B, N, 2 * C, 0, 5);
        else {
            a.k = columns(x, k, B, N, C, 0, 5);
            a.v = columns(x, v, B, N, C, 0, 5);
        }
        {
            stx_real *got = host_of(x, stx_cache_attention(c, 0, &a, &d));
            CHECK(apart(got, all, 5 * C) < TOL, "kind %d: after a reset", kind);
            free(got);
        }
        stx_cache_free(c);
        free(q);
        free(k);
        free(v);
        free(kv);
        free(all);
        stx_destroy(x);
    }
}

/* Keys that pad marks among those that are kept: as stx_attention over all of them; and
   what it says it gave the kernel, whose statistics make the weights again */
static void cache_pad(void) {
    enum { B = 2, N = 40, C = 8, H = 2 };

    stx_ctx *x = context(12);
    stx_cache *c = stx_cache_create(x, 1, B, 3);
    stx_real *q = numbers(B * N * C), *k = numbers(B * N * C), *v = numbers(B * N * C), *want, *got;
    int32_t pad[B * N], *part = (int32_t *)calloc(B * N, sizeof *part);
    stx_attention_in a;
    stx_attention_desc d;
    stx_attention_args *made = NULL;
    double work[2 * N], worst = 0;
    size_t at, t, b, h, i, j;
    for (i = 0; i < B * N; i++) pad[i] = i % 5 == 1 || (i > N && i < N + 9);
    memset(&a, 0, sizeof a);
    memset(&d, 0, sizeof d);
    d.heads = H;
    stx_begin(x, STX_EVAL);
    a.q = stx_input(x, q, B, N, C, 0);
    a.k = stx_input(x, k, B, N, C, 0);
    a.v = stx_input(x, v, B, N, C, 0);
    a.pad = stx_tokens(x, pad, B, N);
    a.args_out = &made;
    want = host_of(x, stx_attention(x, &a, &d));
    CHECK(made && made->T == N && made->row_max && made->inv_sum, "%s", stx_error(x));
    for (b = 0; made && b < B; b++)
        for (h = 0; h < H; h++)
            for (i = 0; i < N; i++) {
                stx_attention_weights(made, b, h, i, work, work + N);
                for (j = 0; j <= i; j++) {
                    double s = 0, w;
                    size_t e, row = (b * H + h) * N + i;
                    if (pad[b * N + j]) continue;
                    for (e = 0; e < C / H; e++)
                        s += (double)q[(b * N + i) * C + h * (C / H) + e]
                             * (double)k[(b * N + j) * C + h * (C / H) + e];
                    w = exp(s * (double)made->scale - (double)made->row_max[row])
                        * (double)made->inv_sum[row];
                    if (!(fabs(w - work[j]) <= worst)) worst = fabs(w - work[j]);
                }
            }
    CHECK(worst < TOL, "weights by the statistics are off by %g", worst);
    CHECK(stx_cache_window(c, 0, N, C, 0), "%s", stx_error(x));
    a.args_out = NULL;
    for (at = 0, worst = 0; at < N; at += t) {
        double e;
        t = at % 3 ? 1 : 4;
        if (t > N - at) t = N - at;
        stx_begin(x, STX_EVAL);
        for (b = 0; b < B; b++) memcpy(part + b * (at + t), pad + b * N, (at + t) * sizeof *part);
        a.q = columns(x, q, B, N, C, at, t);
        a.k = columns(x, k, B, N, C, at, t);
        a.v = columns(x, v, B, N, C, at, t);
        a.pad = stx_tokens(x, part, B, at + t);
        got = host_of(x, stx_cache_attention(c, 0, &a, &d));
        for (b = 0; b < B; b++) {
            e = apart(got + b * t * C, want + (b * N + at) * C, t * C);
            if (!(e <= worst)) worst = e;
        }
        free(got);
    }
    CHECK(worst < TOL && stx_ok(x), "kept keys under padding are off by %g %s", worst,
          stx_error(x));
    free(q);
    free(k);
    free(v);
    free(want);
    free(part);
    stx_destroy(x);
}

static stx_tensor *no_step(void *user, const stx_ids *ids) {
    (void)user;
    (void)ids;
    return NULL;
}

static void cache_errors(void) {
    stx_ctx *x = context(1);
    stx_vocab_io_desc d = words_of(&words_cases[0]);
    stx_vocab_io *w;
    stx_cache *c;
    stx_attention_in a;
    stx_attention_desc ad;
    stx_real *v = numbers(2 * 80 * 8);
    int32_t id[2] = {1, 2};
    int k;
    static const char *const want[] = {"no window",        "STX_EVAL",       "causal",
                                       "expected (2,t,8)", "first_key of at most 0", "1 to 64"};
    stx_vocab_io_resolve(x, NULL, &d, &d);
    w = stx_vocab_io_create(stx_params_create(x), &d);
    CHECK(!stx_cache_create(x, 1, 0, 5) && strstr(stx_error(x), "stx_cache_create"), "%s",
          stx_error(x));
    stx_clear_error(x);
    c = stx_cache_create(x, 2, 2, V);
    CHECK(!stx_cache_window(c, 2, 5, 8, 0) && strstr(stx_error(x), "got layer 2"), "%s",
          stx_error(x));
    stx_clear_error(x);
    CHECK(stx_cache_window(c, 0, 9, 8, 0), "%s", stx_error(x));
    for (k = 0; k < 6; k++) {
        stx_begin(x, k == 1 ? STX_TRAIN : STX_EVAL);
        memset(&a, 0, sizeof a);
        memset(&ad, 0, sizeof ad);
        ad.heads = 2;
        a.q = a.k = a.v = stx_input(x, v, 2, k == 5 ? 65 : 4, 8, 0);
        if (k == 3) a.k = a.v = stx_input(x, v, 2, 3, 8, 0);
        ad.not_causal = k == 2;
        ad.first_key = k == 4;
        CHECK(!stx_cache_attention(c, k == 0, &a, &ad) && strstr(stx_error(x), want[k]), "%s: %s",
              want[k], stx_error(x));
        stx_clear_error(x);
    }
    CHECK(!stx_cache_feed(c, w, id, 0, 0, no_step, NULL) && strstr(stx_error(x), "at least one token"), "%s",
          stx_error(x));
    stx_clear_error(x);
    c->V++;
    CHECK(!stx_cache_feed(c, w, id, 1, 0, no_step, NULL)
              && strstr(stx_error(x), "30 words, as in stx_cache_create, got 29"),
          "%s", stx_error(x));
    stx_clear_error(x);
    c->V--;
    CHECK(!stx_cache_feed(c, w, id, 1, 0, no_step, NULL) && stx_ok(x), "a step that gives nothing");
    CHECK(!stx_cache_create(NULL, 1, 1, 1) && !stx_cache_window(NULL, 0, 1, 1, 0)
              && !stx_cache_attention(NULL, 0, &a, &ad)
              && !stx_cache_feed(NULL, w, id, 1, 0, no_step, NULL),
          "NULLs");
    stx_cache_reset(NULL);
    stx_cache_free(NULL);
    free(v);
    stx_destroy(x);
}

// >>lm: a family. One layer of attention over a memory of its inputs, with learned
// distances, and a residual

typedef struct mini {
    stx_ctx *ctx;
    stx_params *params;
    stx_vocab_io *words;
    size_t d, window;
    stx_tensor *wq, *wk, *wv, *wo, *pe, *gain, *shift;
} mini;

typedef struct mini_gen {
    mini *m;
    stx_cache *cache;
} mini_gen;

static mini *mini_create(stx_ctx *x, size_t vocab, size_t d, size_t window) {
    mini *m = (mini *)stx_persist(x, sizeof *m);
    stx_vocab_io_desc w;
    stx_params *p = stx_params_create(x);
    double a = 1 / sqrt((double)d);
    if (!m || !p) return NULL;
    memset(&w, 0, sizeof w);
    w.vocab = vocab;
    w.dim = d;
    w.table.kind = STX_NORMAL;
    w.table.a = 1;
    w.out_table.kind = STX_UNIFORM;
    w.out_table.a = 1;
    w.out_table.rule = STX_INIT_FAN_IN;
    if (!stx_vocab_io_resolve(x, "mini_create", &w, &w)) return NULL;
    m->ctx = x;
    m->params = p;
    m->d = d;
    m->window = window;
    m->words = stx_vocab_io_create(p, &w);
    m->wq = stx_param(p, STX_UNIFORM, a, "wq", d, d, 0, 0);
    m->wk = stx_param(p, STX_UNIFORM, a, "wk", d, d, 0, 0);
    m->wv = stx_param(p, STX_UNIFORM, a, "wv", d, d, 0, 0);
    m->wo = stx_param(p, STX_UNIFORM, a, "wo", d, d, 0, 0);
    m->pe = stx_param(p, STX_NORMAL, 1, "pe", window + 1, d, 0, 0);
    m->gain = stx_param(p, STX_CONSTANT, 1, "gain", d, 0, 0, 0);
    m->shift = stx_param(p, STX_ZEROS, 0, "shift", d, 0, 0, 0);
    return stx_ok(x) ? m : NULL;
}

static void mini_attention(const mini *m, stx_attention_in *a, stx_attention_desc *d) {
    memset(a, 0, sizeof *a);
    memset(d, 0, sizeof *d);
    a->pe = m->pe;
    d->heads = 1;
    d->span = m->window;
}

static stx_tensor *mini_after(const mini *m, stx_tensor *h, stx_tensor *y) {
    return stx_residual_norm(m->ctx, h, stx_linear(m->ctx, y, m->wo, NULL, STX_ACT_NONE), 0,
                             m->gain, m->shift, 0);
}

static stx_tensor *mini_loss(void *model, const stx_ids *ids, const stx_ids *targets,
                             const void *in, void *out) {
    mini *m = (mini *)model;
    const stx_memory *before = (const stx_memory *)in;
    stx_tensor *h = stx_vocab_io_embed(m->words, ids),
               *X = stx_memory_concat(before, 0, m->window, h);
    stx_attention_in a;
    stx_attention_desc d;
    mini_attention(m, &a, &d);
    a.q = stx_linear(m->ctx, h, m->wq, NULL, STX_ACT_NONE);
    a.k = stx_linear_memory(m->ctx, X, h, m->wk, NULL);
    a.v = stx_linear_memory(m->ctx, X, h, m->wv, NULL);
    a.pad = stx_memory_mask(before, 0, m->window, NULL, ids->T);
    if (out && !stx_memory_push((stx_memory *)out, before, 0, m->window, h, NULL)) return NULL;
    return stx_vocab_io_loss(m->words, mini_after(m, h, stx_attention(m->ctx, &a, &d)), targets,
                             NULL);
}

static stx_tensor *mini_total(void *m, stx_tensor *nll) {
    (void)m;
    return nll;
}

static void mini_updated(void *m) {
    (void)m;
}

static uint64_t mini_key(const void *m, const stx_ids *ids, const stx_ids *targets, const void *s,
                         uint64_t salt) {
    return stx_memory_key((const stx_memory *)s, stx_step_key(m, ids, targets, salt));
}

static void *mini_state_create(void *model, size_t B, size_t window) {
    stx_memory_desc d;
    memset(&d, 0, sizeof d);
    d.layers = 1;
    d.B = B;
    d.width = ((mini *)model)->d;
    if (window) stx_fail(((mini *)model)->ctx, STX_ERR_ARG, "mini: the window is the model's");
    return stx_memory_create(((mini *)model)->ctx, &d);
}

static void mini_state_free(void *s) {
    stx_memory_free((stx_memory *)s);
}

static void mini_state_reset(void *s) {
    stx_memory_reset((stx_memory *)s);
}

static void mini_state_reset_stream(void *s, size_t b) {
    stx_memory_reset_stream((stx_memory *)s, b);
}

static int mini_state_copy(void *to, size_t b, const void *from, size_t c, size_t n) {
    return stx_memory_copy((stx_memory *)to, b, (const stx_memory *)from, c, n);
}

static int mini_state_save(stx_writer *w, const void *s, const char *prefix) {
    return stx_memory_save(w, (const stx_memory *)s, prefix);
}

static int mini_state_load(void *s, const stx_file *f, const char *prefix) {
    return stx_memory_load((stx_memory *)s, f, prefix);
}

static void mini_gen_reset(void *g) {
    stx_cache_reset(((mini_gen *)g)->cache);
}

static void mini_gen_free(void *g) {
    if (!g) return;
    stx_cache_free(((mini_gen *)g)->cache);
    stx_block_free(((mini_gen *)g)->m->ctx, g);
}

static void *mini_gen_create(void *model, size_t B, size_t window) {
    mini *m = (mini *)model;
    mini_gen *g = (mini_gen *)stx_block(m->ctx, sizeof *g);
    (void)window;
    if (!g) return NULL;
    g->m = m;
    g->cache = stx_cache_create(m->ctx, 1, B, m->words->desc.vocab);
    return stx_cache_window(g->cache, 0, m->window, m->d, 0) ? g : NULL;
}

static stx_tensor *mini_gen_step(void *user, const stx_ids *ids) {
    mini_gen *g = (mini_gen *)user;
    mini *m = g->m;
    stx_tensor *h = stx_vocab_io_embed(m->words, ids);
    stx_attention_in a;
    stx_attention_desc d;
    mini_attention(m, &a, &d);
    a.q = stx_linear(m->ctx, h, m->wq, NULL, STX_ACT_NONE);
    a.k = stx_linear(m->ctx, h, m->wk, NULL, STX_ACT_NONE);
    a.v = stx_linear(m->ctx, h, m->wv, NULL, STX_ACT_NONE);
    return mini_after(m, h, stx_cache_attention(g->cache, 0, &a, &d));
}

static const stx_real *mini_gen_feed(void *gen, const int32_t *ids, size_t n) {
    mini_gen *g = (mini_gen *)gen;
    return stx_cache_feed(g->cache, g->m->words, ids, n, 1, mini_gen_step, g);
}

static stx_lm mini_lm(mini *m) {
    stx_lm lm;
    memset(&lm, 0, sizeof lm);
    if (!m) return lm;
    lm.model = m;
    lm.ctx = m->ctx;
    lm.params = m->params;
    lm.vocab_io = m->words;
    lm.loss = mini_loss;
    lm.total = mini_total;
    lm.updated = mini_updated;
    lm.key = mini_key;
    lm.state_create = mini_state_create;
    lm.state_free = mini_state_free;
    lm.state_reset = mini_state_reset;
    lm.state_reset_stream = mini_state_reset_stream;
    lm.state_copy = mini_state_copy;
    lm.state_save = mini_state_save;
    lm.state_load = mini_state_load;
    lm.gen_create = mini_gen_create;
    lm.gen_free = mini_gen_free;
    lm.gen_reset = mini_gen_reset;
    lm.gen_feed = mini_gen_feed;
    return lm;
}


// >>lm: what a program does with any family, by the table alone

enum { LB = 2, LT = 16, LV = 16, LSTEPS = 60 };

enum { MINI, SPAN, SRU, SRUPP, LMS };

static stx_lm some_lm(stx_ctx *x, int kind) {
    stx_span_desc d;
    stx_sru_lm_desc e;
    if (kind == MINI) return mini_lm(mini_create(x, LV, 24, 40));
    if (kind == SPAN) {
        memset(&d, 0, sizeof d);
        d.vocab = LV;
        d.layers = 2;
        d.dim = 24;
        d.heads = 2;
        d.inner = 32;
        d.span = 40;
        d.adapt_span = 1;
        d.ramp = 4;
        d.span_init = 0.2;
        d.span_loss = 1e-4;
        return stx_span_as_lm(stx_span_create(x, &d));
    }
    memset(&e, 0, sizeof e);
    e.vocab = LV;
    e.dim = 24;
    e.sru.layers = 2;
    e.sru.transform = kind == SRUPP ? STX_SRU_ATTENTION : STX_SRU_LINEAR;
    return stx_sru_as_lm(stx_sru_lm_create(x, &e));
}

/* The text's second half repeats its first: who remembers a block sees it coming */
static void lm_tokens(int32_t *in, size_t step) {
    size_t b, i;
    for (b = 0; b < LB; b++)
        for (i = 0; i <= LT; i++)
            in[b * (LT + 1) + i] = (int32_t)((step * LT + i + b * 5) % 20 * 7 % LV);
}

static double lm_step(const stx_lm *lm, stx_optim *o, void *state, size_t step, int train) {
    int32_t t[LB * (LT + 1)], in[LB * LT], out[LB * LT];
    stx_tensor *nll;
    double v;
    size_t b;
    lm_tokens(t, step);
    for (b = 0; b < LB; b++) {
        memcpy(in + b * LT, t + b * (LT + 1), LT * sizeof *t);
        memcpy(out + b * LT, t + b * (LT + 1) + 1, LT * sizeof *t);
    }
    stx_begin(lm->ctx, train ? STX_TRAIN : STX_EVAL);
    nll = lm->loss(lm->model, stx_tokens(lm->ctx, in, LB, LT), stx_tokens(lm->ctx, out, LB, LT),
                   state, state);
    v = stx_item(lm->ctx, nll);
    if (!train) return v;
    stx_backward(lm->ctx, lm->total(lm->model, nll));
    stx_optim_step(o, 0.01);
    lm->updated(lm->model);
    return v;
}

static void lm_whole(void) {
    int kind;
    for (kind = 0; kind < LMS; kind++) {
        stx_ctx *x = context(21), *y = context(21);
        stx_lm a = some_lm(x, kind), b = some_lm(y, kind);
        stx_optim_desc od;
        stx_optim *oa, *ob;
        void *sa, *sb, *ev, *gen;
        double first = 0, la, lb;
        char path[1024];
        stx_writer *w;
        stx_file *f;
        size_t step, i, v;
        int32_t t[LB * (LT + 1)], ids[2 * LT];
        const stx_real *got;
        CHECK(a.model && a.params && a.vocab_io && a.ctx == x, "kind %d: %s", kind, stx_error(x));
        if (!a.model || !b.model) return;
        memset(&od, 0, sizeof od);
        oa = stx_optim_create(a.params, &od);
        ob = stx_optim_create(b.params, &od);
        sa = a.state_create(a.model, LB, 0);
        sb = b.state_create(b.model, LB, 0);
        for (step = 0; step < LSTEPS; step++) {
            la = lm_step(&a, oa, sa, step, 1);
            if (!step) first = la;
        }
        CHECK(la < 0.5 * first, "kind %d: learned from %g to %g: %s", kind, first, la,
              stx_error(x));
        /* saved, and resumed bit for bit */
        test_path(path, sizeof path, "test_lm");
        w = stx_writer_create(x);
        CHECK(stx_params_save(w, a.params, "") && stx_optim_save(w, oa)
                  && a.state_save(w, sa, "state.0.") && stx_writer_finish(w, path),
              "%s", stx_error(x));
        f = stx_file_open(y, path);
        CHECK(stx_params_load(b.params, f, "") && stx_optim_load(ob, f)
                  && b.state_load(sb, f, "state.0."),
              "kind %d: %s", kind, stx_error(y));
        stx_file_close(f);
        stx_set_step_index(y, stx_step_index(x));
        remove(path);
        for (; step < LSTEPS + 5; step++) {
            la = lm_step(&a, oa, sa, step, 1);
            lb = lm_step(&b, ob, sb, step, 1);
            CHECK(la == lb, "kind %d step %zu: %.17g, resumed %.17g", kind, step, la, lb);
        }
        /* evaluated with a separate state: training does not notice */
        ev = a.state_create(a.model, LB, 0);
        for (la = 0, i = 0; i < 3; i++) la += lm_step(&a, NULL, ev, i, 0);
        a.state_reset(ev);
        for (lb = 0, i = 0; i < 3; i++) lb += lm_step(&a, NULL, ev, i, 0);
        CHECK(la == lb && la < 3 * first, "kind %d: evaluated to %g, again %g", kind, la, lb);
        a.state_free(ev);
        la = lm_step(&a, oa, sa, step, 1);
        lb = lm_step(&b, ob, sb, step, 1);
        CHECK(la == lb, "kind %d: evaluation is felt", kind);
        CHECK(a.key(a.model, NULL, NULL, sa, 1) == a.key(a.model, NULL, NULL, sa, 1)
                  && a.key(a.model, NULL, NULL, sa, 1) != a.key(a.model, NULL, NULL, sa, 2),
              "kind %d: keys", kind);
        a.state_reset_stream(sa, 1);
        lb = lm_step(&a, oa, sa, ++step, 0);
        CHECK(isfinite(lb) && stx_ok(x), "kind %d: after a stream's reset %g %s", kind, lb,
              stx_error(x));
        /* what is generated token by token is what the loss says of it */
        gen = a.gen_create(a.model, 1, 0);
        lm_tokens(t, 0);
        for (i = 0; i < LT; i++) ids[i] = t[i];
        for (la = 0, i = 0; i < LT; i++) {
            double top = -1e300, z = 0;
            got = a.gen_feed(gen, &ids[i], 1);
            CHECK(got != NULL, "kind %d: %s", kind, stx_error(x));
            if (!got) break;
            for (v = 0; v < LV; v++)
                if ((double)got[v] > top) top = (double)got[v];
            for (v = 0; v < LV; v++) z += exp((double)got[v] - top);
            la += top + log(z) - (double)got[t[i + 1]];
        }
        stx_begin(x, STX_EVAL);
        lb = stx_item(x, a.loss(a.model, stx_tokens(x, t, 1, LT), stx_tokens(x, t + 1, 1, LT), NULL,
                                NULL));
        CHECK(CLOSE(la / LT, lb, 10 * TOL), "kind %d: token by token %g, at once %g", kind, la / LT,
              lb);
        a.gen_reset(gen);
        got = a.gen_feed(gen, t, LT);
        for (i = v = 0; got && v < LV; v++)
            if (got[v] > got[i]) i = v;
        CHECK(got && (int32_t)i == t[LT], "kind %d: goes on with %zu, expected %d", kind, i,
              (int)t[LT]);
        a.gen_free(gen);
        a.state_free(sa);
        b.state_free(sb);
        if (kind == SPAN)
            CHECK(!a.state_create(a.model, 1, 5) && strstr(stx_error(x), "expected window = 0"),
                  "%s", stx_error(x));
        stx_destroy(x);
        stx_destroy(y);
    }
}

/* Functions that take a desc or write to pointers, with none */
static void nulls(void) {
    stx_ctx *x = context(1);
    stx_vocab_io_desc d;
    double longest = -1;
    stx_map m;
    CHECK(!stx_vocab_io_resolve(x, NULL, NULL, &d), "a desc that is NULL");
    CHECK(strstr(stx_error(x), "NULL"), "%s", stx_error(x));
    stx_clear_error(x);
    CHECK(!stx_map_open(x, NULL, "file") && strstr(stx_error(x), "NULL"), "%s", stx_error(x));
    stx_clear_error(x);
    CHECK(!stx_map_open(NULL, &m, "file") && !m.data, "a map without a context");
    CHECK(stx_vocab_io_count(NULL) == 0, "parameters of no desc");
    stx_span_stats(NULL, NULL, &longest);
    CHECK(longest == 0, "the longest span of no model is %g", longest);
    stx_destroy(x);
}

int main(void) {
    words_whole();
    words_scale();
    words_errors();
    rows_random();
    rows_streams();
    rows_fixed();
    rows_full();
    rows_files();
    rows_room();
    rows_views();
    rows_turns();
    rows_kept();
    rows_apart();
    rows_errors();
    one_stream();
    cache_attention();
    cache_pad();
    cache_errors();
    lm_whole();
    nulls();
    return test_end();
}
