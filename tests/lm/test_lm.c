/* test_lm.c - the language-model layer: embedding and output head (words), memory that
   is kept across steps (rows), the KV cache of generation, and a minimal family (lm)
   that uses them. The family is trained, resumed, evaluated and sampled only through
   stx_lm. */
#include "../../seqtx_attn_span.h"
#include "../../seqtx_sru.h"
#include <unistd.h>
#include "../values.h"

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


// >>words: embedding and output head (stx_vocab_io)

enum { V = 29, D = 12 };

/* Less common options of a words_case. */
enum {
    NO_PROJECTIONS = 1,
    SEPARATE_FIRST = 2,
    PROJ_BIASES = 4,
    NO_CUTOFFS = 8,
    INPUT_UNPROJECTED = 16 /* only the input has no projections */
};

typedef struct words_case {
    int in, out;
    size_t emb;
    int share_tables, share_projs, cluster_major, direct_head;
    int widths; /* whether widths are given for the first and the last cluster */
    int more;   /* bits of the enum above */
    const char *names;
} words_case;

static const words_case words_cases[] = {
    /* in, out, emb, share_tables, share_projs, cluster_major, direct_head, widths, more,
       names */
    {STX_VOCAB_PLAIN, STX_VOCAB_PLAIN, 0, 0, 0, 0, 0, 0, 0,
     "in_emb.weight out_emb.weight out_emb.bias "},
    {STX_VOCAB_PLAIN, STX_VOCAB_PLAIN, 5, 0, 0, 1, 0, 0, 0,
     "in_emb.weight out_emb.weight out_emb.bias "},
    {STX_VOCAB_PLAIN, STX_VOCAB_TIED, 0, 0, 0, 0, 0, 0, 0,
     "in_emb.weight out_emb.bias "},
    {STX_VOCAB_PLAIN, STX_VOCAB_ADAPTIVE, 7, 0, 0, 0, 1, 0, 0,
     "in_emb.weight out_emb.cluster.weight out_emb.cluster.bias out_emb.tables.0 "
     "out_emb.biases.0 out_emb.tables.1 out_emb.projs.1 out_emb.biases.1 out_emb.tables.2 "
     "out_emb.projs.2 out_emb.biases.2 "},
    {STX_VOCAB_ADAPTIVE, STX_VOCAB_PLAIN, 0, 0, 0, 0, 0, 0, 0,
     "in_emb.tables.0 in_emb.projs.0 in_emb.tables.1 in_emb.projs.1 in_emb.tables.2 "
     "in_emb.projs.2 out_emb.weight out_emb.bias "},
    {STX_VOCAB_ADAPTIVE, STX_VOCAB_ADAPTIVE, 0, 0, 0, 0, 0, 0, 0,
     "in_emb.tables.0 in_emb.projs.0 in_emb.tables.1 in_emb.projs.1 in_emb.tables.2 "
     "in_emb.projs.2 out_emb.cluster.weight out_emb.cluster.bias out_emb.tables.0 "
     "out_emb.projs.0 out_emb.biases.0 out_emb.tables.1 out_emb.projs.1 out_emb.biases.1 "
     "out_emb.tables.2 out_emb.projs.2 out_emb.biases.2 "},
    {STX_VOCAB_ADAPTIVE, STX_VOCAB_ADAPTIVE, 0, 1, 1, 0, 0, 0, 0,
     "in_emb.tables.0 in_emb.projs.0 in_emb.tables.1 in_emb.projs.1 in_emb.tables.2 "
     "in_emb.projs.2 out_emb.cluster.weight out_emb.cluster.bias out_emb.biases.0 "
     "out_emb.biases.1 out_emb.biases.2 "},
    {STX_VOCAB_ADAPTIVE, STX_VOCAB_ADAPTIVE, 0, 1, 0, 1, 0, 1, 0,
     "out_emb.tables.0 out_emb.projs.0 in_emb.projs.0 out_emb.biases.0 out_emb.tables.1 "
     "out_emb.projs.1 in_emb.projs.1 out_emb.biases.1 out_emb.tables.2 out_emb.projs.2 "
     "in_emb.projs.2 out_emb.biases.2 out_emb.cluster.weight out_emb.cluster.bias "},
    {STX_VOCAB_ADAPTIVE, STX_VOCAB_ADAPTIVE, 0, 1, 1, 1, 1, 0, 0,
     "out_emb.tables.0 out_emb.biases.0 out_emb.tables.1 out_emb.projs.1 out_emb.biases.1 "
     "out_emb.tables.2 out_emb.projs.2 out_emb.biases.2 out_emb.cluster.weight "
     "out_emb.cluster.bias "},
    {STX_VOCAB_ADAPTIVE, STX_VOCAB_ADAPTIVE, 0, 1, 0, 0, 0, 0, NO_PROJECTIONS,
     "in_emb.tables.0 in_emb.tables.1 in_emb.tables.2 out_emb.cluster.weight "
     "out_emb.cluster.bias out_emb.biases.0 out_emb.biases.1 out_emb.biases.2 "},
    {STX_VOCAB_ADAPTIVE, STX_VOCAB_ADAPTIVE, 0, 1, 1, 0, 0, 0, SEPARATE_FIRST,
     "in_emb.tables.0 in_emb.projs.0 in_emb.tables.1 in_emb.projs.1 in_emb.tables.2 "
     "in_emb.projs.2 out_emb.cluster.weight out_emb.cluster.bias out_emb.projs.0 "
     "out_emb.biases.0 out_emb.biases.1 out_emb.biases.2 "},
    {STX_VOCAB_PLAIN, STX_VOCAB_ADAPTIVE, 0, 0, 0, 0, 1, 0, PROJ_BIASES,
     "in_emb.weight out_emb.cluster.weight out_emb.cluster.bias out_emb.tables.0 "
     "out_emb.biases.0 out_emb.tables.1 out_emb.projs.1 out_emb.proj_biases.1 "
     "out_emb.biases.1 out_emb.tables.2 out_emb.projs.2 out_emb.proj_biases.2 "
     "out_emb.biases.2 "},
    {STX_VOCAB_ADAPTIVE, STX_VOCAB_ADAPTIVE, 0, 1, 1, 1, 0, 0, NO_CUTOFFS,
     "out_emb.tables.0 out_emb.projs.0 out_emb.biases.0 "},
    {STX_VOCAB_ADAPTIVE, STX_VOCAB_ADAPTIVE, 0, 1, 1, 1, 0, 1, SEPARATE_FIRST | PROJ_BIASES,
     "out_emb.tables.0 out_emb.projs.0 out_emb.proj_biases.0 in_emb.projs.0 out_emb.biases.0 "
     "out_emb.tables.1 out_emb.projs.1 out_emb.proj_biases.1 out_emb.biases.1 "
     "out_emb.tables.2 out_emb.projs.2 out_emb.proj_biases.2 out_emb.biases.2 "
     "out_emb.cluster.weight out_emb.cluster.bias "},
    {STX_VOCAB_ADAPTIVE, STX_VOCAB_ADAPTIVE, 0, 0, 0, 0, STX_VOCAB_OUTPUT, 0,
     PROJ_BIASES | INPUT_UNPROJECTED,
     "in_emb.tables.0 in_emb.tables.1 in_emb.tables.2 out_emb.cluster.weight "
     "out_emb.cluster.bias out_emb.tables.0 out_emb.biases.0 out_emb.tables.1 out_emb.projs.1 "
     "out_emb.proj_biases.1 out_emb.biases.1 out_emb.tables.2 out_emb.projs.2 "
     "out_emb.proj_biases.2 out_emb.biases.2 "},
    {STX_VOCAB_ADAPTIVE, STX_VOCAB_ADAPTIVE, 0, 0, 0, 0, STX_VOCAB_OUTPUT, 0, 0,
     "in_emb.tables.0 in_emb.projs.0 in_emb.tables.1 in_emb.projs.1 in_emb.tables.2 "
     "in_emb.projs.2 out_emb.cluster.weight out_emb.cluster.bias out_emb.tables.0 "
     "out_emb.biases.0 out_emb.tables.1 out_emb.projs.1 out_emb.biases.1 out_emb.tables.2 "
     "out_emb.projs.2 out_emb.biases.2 "}};

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
    d.no_projections = (c->more & NO_PROJECTIONS) != 0;
    d.separate_first = (c->more & SEPARATE_FIRST) != 0;
    d.proj_biases = (c->more & PROJ_BIASES) != 0;
    d.no_cutoffs = (c->more & NO_CUTOFFS) != 0;
    if (d.no_cutoffs) d.cutoffs = 0;
    if (c->more & INPUT_UNPROJECTED) {
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

/* One case with its context, and the arrays that the checks below share. */
typedef struct words_test {
    size_t k;
    const words_case *c;
    stx_ctx *x;
    stx_params *p;
    stx_vocab_io_desc d;
    stx_vocab_io *w;
    int32_t *t;        /* (B * T + 1): the tokens */
    stx_ids *targets;  /* (B,T) */
    stx_tensor *h;     /* (B,T,D) */
    stx_real *log_p;   /* (B,T,V) */
} words_test;

enum { WB = 2, WT = 40 };

/* The largest magnitude in a parameter must be below the bound of its distribution, but
   close to it. */
static void words_init(const words_test *s, const char *what, const stx_tensor *t, double bound) {
    stx_real *v = host_of(s->x, t);
    double top = 0;
    size_t i;
    for (i = 0; t && i < t->size; i++) raise_worst(&top, fabs((double)v[i]));
    CHECK(t && top <= bound * (1 + 1e-6) && top > bound * 0.7,
          "case %zu: %s: up to %g, expected slightly less than %g", s->k, what, top, bound);
    free(v);
}

static void words_params(const words_test *s) {
    char names[1024] = "";
    size_t i;
    for (i = 0; i < s->p->count; i++) {
        strcat(names, s->p->name[i]);
        strcat(names, " ");
    }
    CHECK(!strcmp(names, s->c->names), "case %zu: parameters %s", s->k, names);
    CHECK(stx_params_size(s->p) == stx_vocab_io_count(&s->d),
          "case %zu: %zu values, stx_vocab_io_count gives %zu", s->k, stx_params_size(s->p),
          stx_vocab_io_count(&s->d));
}

/* Probabilities must add up to 1, and the loss must be the mean of their negative logs.
   Returns the loss. */
static stx_tensor *words_probs(words_test *s) {
    stx_tensor *lp = stx_vocab_io_log_probs(s->w, s->h), *nll;
    double sum = 0, z, worst = 0;
    size_t i, v;
    CHECK(lp && lp->ndim == 3 && lp->dim[2] == V, "case %zu: %s", s->k, stx_error(s->x));
    s->log_p = host_of(s->x, lp);
    for (i = 0; i < WB * WT; i++) {
        for (z = 0, v = 0; v < V; v++) z += exp((double)s->log_p[i * V + v]);
        raise_worst(&worst, fabs(z - 1));
        sum -= (double)s->log_p[i * V + (size_t)s->t[i + 1]];
    }
    CHECK(worst < TOL, "case %zu: the sum of probabilities differs from 1 by %g", s->k, worst);
    nll = stx_vocab_io_loss(s->w, s->h, s->targets, NULL);
    CHECK(CLOSE(stx_item(s->x, nll), sum / (double)(WB * WT), TOL),
          "case %zu: loss %g, from log p %g", s->k, stx_item(s->x, nll), sum / (double)(WB * WT));
    return nll;
}

/* Checks the loss with weights, an ignored token and a divisor, and the losses of
   single rows. */
static void words_token_loss(const words_test *s) {
    stx_token_loss how;
    stx_real weight[WB * WT], *rows;
    stx_tensor *loss;
    double expected = 0, worst = 0;
    size_t i;
    memset(&how, 0, sizeof how);
    for (i = 0; i < WB * WT; i++) weight[i] = (stx_real)(0.5 + 0.25 * (double)i);
    how.weights = stx_input(s->x, weight, WB * WT, 0, 0, 0);
    how.ignore = 1;
    how.ignored_id = s->t[2];
    how.divisor = 3;
    loss = stx_vocab_io_loss(s->w, stx_detach(s->x, s->h), s->targets, &how);
    rows = host_of(s->x, how.nll);
    for (i = 0; i < WB * WT; i++) {
        double nll = -(double)s->log_p[i * V + (size_t)s->t[i + 1]];
        if (s->t[i + 1] == how.ignored_id) nll = 0;
        expected += (double)weight[i] * nll / 3;
        raise_worst(&worst, fabs((double)rows[i] - nll));
    }
    CHECK(CLOSE(stx_item(s->x, loss), expected, 10 * TOL) && worst < 10 * TOL,
          "case %zu: weighted loss %g, expected %g; error of rows %g: %s", s->k,
          stx_item(s->x, loss), expected, worst, stx_error(s->x));
    free(rows);
}

/* Scores must be log p plus a constant per row. */
static void words_scores(const words_test *s) {
    stx_tensor *scores = stx_vocab_io_scores(s->w, s->h);
    double worst = 0;
    size_t i;
    if (scores) {
        const stx_real *lp = s->log_p;
        stx_real *v = host_of(s->x, scores);
        for (i = 0; i < WB * WT * V; i++) {
            size_t row = i / V * V;
            raise_worst(&worst, fabs((double)v[i] - (double)v[row] - (double)lp[i]
                                     + (double)lp[row]));
        }
        free(v);
    }
    CHECK(scores && worst < 10 * TOL, "case %zu: scores differ from log p and a constant by %g",
          s->k, worst);
}

static void words_gradients(const words_test *s, stx_tensor *loss) {
    size_t i, j;
    stx_backward(s->x, loss);
    for (i = 0; i < s->p->count; i++) {
        const stx_tensor *t = s->p->tensor[i];
        stx_real *g = (stx_real *)calloc(t->size, sizeof *g);
        double sum = 0;
        stx_download(s->x, g, t->grad, t->size);
        for (j = 0; j < t->size; j++) sum += fabs((double)g[j]);
        CHECK(sum > 0, "case %zu: the gradient of %s is 0", s->k, s->p->name[i]);
        free(g);
    }
    CHECK(stx_ok(s->x), "case %zu: %s", s->k, stx_error(s->x));
}

/* Checks the cluster widths and the initial values of an adaptive output. */
static void words_adaptive(const words_test *s) {
    const stx_vocab_io_desc *d = &s->d;
    const size_t *width = d->out_width;
    size_t first = D, second = D / 2, third = D / 4;
    if (s->c->widths) {
        first = 8;
        second = 4;
        third = 7;
    }
    if (s->c->more & NO_PROJECTIONS) second = third = D;
    if (!d->no_projections && d->cutoffs)
        words_init(s, "projection", s->w->out.proj[1], sqrt(6.0 / (double)(D + width[1])));
    if (d->proj_biases) words_init(s, "bias of a projection", s->w->out.proj_bias[1], 0.125);
    if (d->cutoffs) words_init(s, "columns", s->w->out.cluster_w, 0.25);
    CHECK(width[0] == first && (!d->cutoffs || (width[1] == second && width[2] == third)),
          "case %zu: widths %zu, %zu, %zu", s->k, width[0], width[1], width[2]);
    CHECK(!stx_vocab_io_logits(s->w, s->h) && strstr(stx_error(s->x), "stx_vocab_io_log_probs"),
          "case %zu: %s", s->k, stx_error(s->x));
}

static void words_whole(void) {
    size_t k;
    for (k = 0; k < sizeof words_cases / sizeof *words_cases; k++) {
        words_test s;
        stx_tensor *e, *nll;
        stx_real *h = random_values(WB * WT * D);
        s.k = k;
        s.c = &words_cases[k];
        s.x = context(k + 1);
        s.p = stx_params_create(s.x);
        s.d = words_of(s.c);
        s.t = text(WB * WT + 1, V, 3);
        CHECK(stx_vocab_io_resolve(s.x, "test", &s.d, &s.d), "case %zu: %s", k, stx_error(s.x));
        s.w = stx_vocab_io_create(s.p, &s.d);
        CHECK(s.w != NULL, "case %zu: %s", k, stx_error(s.x));
        if (!s.w) return;
        words_params(&s);
        stx_begin(s.x, STX_TRAIN);
        e = stx_vocab_io_embed(s.w, stx_tokens(s.x, s.t, WB, WT));
        s.targets = stx_tokens(s.x, s.t + 1, WB, WT);
        CHECK(e && e->ndim == 3 && e->dim[0] == WB && e->dim[1] == WT
                  && e->dim[2] == (s.c->emb ? s.c->emb : D),
              "case %zu: embedding %s", k, stx_error(s.x));
        s.h = stx_variable(s.x, h, WB, WT, D, 0);
        nll = words_probs(&s);
        words_token_loss(&s);
        words_scores(&s);
        words_gradients(&s, stx_add(s.x, nll, stx_mean(s.x, stx_mul(s.x, e, e))));
        if (s.c->out == STX_VOCAB_PLAIN) {
            words_init(&s, "weight", s.w->out_w, 2 / sqrt((double)D));
            words_init(&s, "bias", s.w->out_b, 0.25);
        }
        if (s.c->out == STX_VOCAB_ADAPTIVE) words_adaptive(&s);
        free(s.log_p);
        free(s.t);
        free(h);
        stx_destroy(s.x);
    }
}

/* Computes the embedding of one token by hand. The default scale is 1 for a plain table
   and sqrt(D) for adaptive ones. */
static void words_scale_case(int adaptive, double scale) {
    enum { ID = 20 };

    stx_ctx *x = context(1);
    stx_params *p = stx_params_create(x);
    stx_vocab_io_desc d = words_of(&words_cases[adaptive ? 4 : 0]);
    stx_vocab_io *w;
    stx_tensor *e;
    stx_real *got, *table, *proj = NULL;
    int32_t id = ID;
    size_t i, j, width;
    double worst = 0;
    d.scale = scale;
    stx_vocab_io_resolve(x, NULL, &d, &d);
    w = stx_vocab_io_create(p, &d);
    if (scale == 0) scale = adaptive ? sqrt((double)D) : 1;
    stx_begin(x, STX_EVAL);
    e = stx_vocab_io_embed(w, stx_tokens(x, &id, 1, 1));
    got = host_of(x, e);
    width = d.width[2];
    table = host_of(x, adaptive ? w->in.table[2] : w->in_emb);
    if (adaptive) proj = host_of(x, w->in.proj[2]);
    for (i = 0; i < D; i++) {
        double y = 0;
        if (adaptive)
            for (j = 0; j < width; j++)
                y += (double)table[(ID - d.cutoff[1]) * width + j] * (double)proj[i * width + j];
        else
            y = (double)table[ID * D + i];
        raise_worst(&worst, fabs(y * scale - (double)got[i]));
    }
    CHECK(e && worst < TOL, "adaptive %d scale %g: error %g %s", adaptive, scale, worst,
          stx_error(x));
    free(got);
    free(table);
    free(proj);
    stx_destroy(x);
}

static void words_scale(void) {
    int adaptive;
    for (adaptive = 0; adaptive < 2; adaptive++) {
        words_scale_case(adaptive, 0);
        words_scale_case(adaptive, 3);
    }
}

/* The desc must be refused, with an error that contains `part`. */
static void words_refused(const char *part, const stx_vocab_io_desc *d) {
    stx_ctx *x = context(1);
    stx_vocab_io_desc to;
    CHECK(!stx_vocab_io_resolve(x, "test_lm", d, &to) && test_says(stx_error(x), part)
              && strstr(stx_error(x), "test_lm:"),
          "expected \"%s\", got \"%s\"", part, stx_error(x));
    CHECK(!stx_vocab_io_resolve(NULL, NULL, d, &to), "%s: accepted without a context", part);
    stx_destroy(x);
}

static void words_errors(void) {
    stx_vocab_io_desc plain = words_of(&words_cases[0]), d;
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
}

static void words_adaptive_errors(void) {
    stx_vocab_io_desc ad = words_of(&words_cases[5]), d;
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
}

/* Tests default cutoffs, large counts, and NULL. */
static void words_limits(void) {
    stx_vocab_io_desc plain = words_of(&words_cases[0]), d = words_of(&words_cases[5]);
    d.cutoffs = 0;
    d.vocab = 50000;
    d.dim = 64;
    CHECK(stx_vocab_io_resolve(NULL, NULL, &d, &d) && d.cutoffs == 2 && d.cutoff[0] == 20000
              && d.cutoff[1] == 40000,
          "default cutoffs");
    d = plain;
    d.vocab = d.dim = (size_t)1 << 31;
    if (sizeof(size_t) == 8)
        CHECK(stx_vocab_io_resolve(NULL, NULL, &d, &d)
                  && stx_vocab_io_count(&d) == ((size_t)1 << 63) + ((size_t)1 << 31),
              "a large number of parameters");
    CHECK(stx_size_add(SIZE_MAX - 5, 2, 3) == SIZE_MAX
              && stx_size_add(SIZE_MAX - 7, 2, 3) == SIZE_MAX - 1
              && stx_size_add(1, SIZE_MAX, 2) == SIZE_MAX && stx_size_add(7, 0, 9) == 7,
          "stx_size_add wraps");
    CHECK(!stx_vocab_io_create(NULL, &plain) && !stx_vocab_io_embed(NULL, NULL)
              && !stx_vocab_io_logits(NULL, NULL) && !stx_vocab_io_log_probs(NULL, NULL)
              && !stx_vocab_io_scores(NULL, NULL) && !stx_vocab_io_loss(NULL, NULL, NULL, NULL),
          "NULL arguments");
}


// >>rows: memory that is kept across steps (stx_memory)

enum { RB = 3, RW = 5, RMAX = 400 };

/* All rows that were ever pushed to one stream. The newest of them are the expected
   rows of a memory. */
typedef struct history {
    double row[RMAX][RW];
    int missing[RMAX]; /* whether a row is padding or was pushed before a reset */
    size_t n;
} history;

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

/* Draws T random rows for each of B streams and appends them to their histories. pads:
   whether some of the rows are padding. */
static stx_tensor *draw(stx_ctx *x, history *t, size_t B, size_t T, int pads, const stx_ids **pad) {
    stx_real *v = (stx_real *)calloc(B * T * RW, sizeof *v);
    int32_t *m = (int32_t *)calloc(B * T, sizeof *m);
    stx_tensor *h;
    size_t b, i, c;
    for (b = 0; b < B; b++)
        for (i = 0; i < T; i++, t[b].n++) {
            for (c = 0; c < RW; c++) {
                stx_real e = (stx_real)(float)test_rand();
                v[(b * T + i) * RW + c] = e;
                t[b].row[t[b].n][c] = (double)e;
            }
            t[b].missing[t[b].n] = m[b * T + i] = pads && test_rand() > 0.4;
        }
    h = stx_input(x, v, B, T, RW, 0);
    *pad = pads ? stx_tokens(x, m, B, T) : NULL;
    free(v);
    free(m);
    return h;
}

/* Returns the number of errors in row i of the m rows that were read for one stream. */
static size_t wrong_row(const history *t, size_t m, size_t i, int zeros, int masked,
                        const stx_real *got) {
    int absent = i + t->n < m; /* never pushed */
    int missing = absent || t->missing[t->n - m + i];
    size_t c, wrong;
    wrong = zeros ? masked != 0 : missing != masked;
    if (missing && !zeros) return wrong; /* the content of a missing row does not matter */
    for (c = 0; c < RW; c++) wrong += (double)got[c] != (missing ? 0 : t->row[t->n - m + i][c]);
    return wrong;
}

/* Checks that the newest n rows of layer l and their mask equal those of the
   histories. */
static void check_rows(const char *what, stx_memory *s, size_t l, const history *t, size_t n) {
    stx_ctx *x = s->ctx;
    stx_tensor *y = stx_memory_read(s, l, n);
    const stx_ids *mask = stx_memory_mask(s, l, n, NULL, 0);
    stx_real *v = host_of(x, y);
    size_t b, i, m = y ? y->dim[1] : 0, wrong = 0, missing = 0;
    for (b = 0; b < s->B; b++)
        for (i = 0; i < m; i++) {
            missing += i + t[b].n < m || t[b].missing[t[b].n - m + i];
            wrong += wrong_row(&t[b], m, i, s->desc.missing_as_zeros,
                               mask && mask->data[b * m + i], v + (b * m + i) * RW);
        }
    CHECK(!wrong && stx_ok(x), "%s, layer %zu: %zu errors in %zu rows: %s", what, l, wrong, m,
          stx_error(x));
    CHECK(mask == NULL || missing, "%s: a mask although no row is missing", what);
    free(v);
}

/* Marks all rows of a stream as missing, as a reset does. */
static void forget(history *t) {
    size_t i;
    for (i = 0; i < t->n; i++) t->missing[i] = 1;
}

static void forget_all(history *t) {
    size_t b;
    for (b = 0; b < RB; b++) forget(&t[b]);
}

/* Resets a stream or the whole memory in some of the steps. */
static void random_reset(stx_memory *s, history *t, size_t step) {
    if (step == 9 || step == 13 || step == 14) {
        stx_memory_reset_stream(s, step % RB);
        forget(&t[step % RB]);
        check_rows("after the reset of a stream", s, 0, t, 30);
    }
    if (step == 18) {
        stx_memory_reset(s);
        forget_all(t);
        CHECK(!stx_memory_max_rows(s) && !stx_memory_read(s, 0, 9), "rows after a reset");
    }
}

/* Checks the rows that a push with `keep` will evict, which are read as the newest rows
   of a separate memory. had: the number of rows before the push. */
static void check_evicted(stx_memory *s, const history *t, size_t keep, size_t had,
                          const stx_tensor *h, const stx_ids *pad) {
    size_t T = h->dim[1], n = had + T > keep ? had + T - keep : 0, b;
    const stx_ids *mask;
    stx_tensor *old = stx_memory_evicted(s, 0, keep, h, pad, &mask);
    CHECK(n ? old && old->dim[1] == n : !old && !mask, "%zu rows are evicted, expected %zu",
          old ? old->dim[1] : 0, n);
    if (old) {
        stx_memory *evicted = rows_of(s->ctx, RB, 1, 0, s->desc.missing_as_zeros, 0, 0);
        history *u = (history *)calloc(RB, sizeof *u);
        for (b = 0; b < RB; b++) {
            u[b] = t[b];
            u[b].n -= keep < u[b].n ? keep : u[b].n;
        }
        if (had + T <= t[0].n) {
            CHECK(stx_memory_push(evicted, NULL, 0, n, old, mask), "%s", stx_error(s->ctx));
            check_rows("evicted", evicted, 0, u, n);
        }
        free(u);
        stx_memory_free(evicted);
    }
}

/* Returns the number of rows to keep in a step. */
static size_t random_keep(size_t step) {
    if (step % 5 == 3) return 4;
    if (step % 7 == 5) return 0;
    return 11 + step % 9;
}

/* Tests random pushes, resets and reads, with many block and window lengths. Each
   push updates the memory in place or, if `two` is set, writes to a second memory. */
static void rows_random(void) {
    int kind;
    for (kind = 0; kind < 8; kind++) {
        const int pads = kind & 1, zeros = kind & 2 && !pads, two = kind & 4;
        stx_ctx *x = context((uint64_t)kind);
        stx_memory *s = rows_of(x, RB, 2, 1, zeros, 0, kind == 4 ? 40 : 0), *o = s, *swap;
        history *t = (history *)calloc(RB, sizeof *t);
        size_t step, b;
        if (two) o = rows_of(x, RB, 2, 1, zeros, 0, 0);
        for (step = 0; step < 24; step++) {
            size_t T = 1 + step * 7 % 13, keep = random_keep(step), had;
            const stx_ids *pad;
            stx_tensor *h, *X, *old;
            stx_cached_rows past;
            stx_begin(x, STX_EVAL);
            random_reset(s, t, step);
            h = draw(x, t, RB, T, pads && step != 20, &pad);
            had = stx_memory_max_rows(s);
            X = stx_memory_concat(s, 1, 6, h);
            CHECK(X && X->dim[1] == STX_MIN(had, 6) + T && (had || X == h),
                  "rows before a block: %s", stx_error(x));
            check_evicted(s, t, keep, had, h, pad);
            CHECK(stx_memory_view(s, 1, 6, &past) && past.rows == STX_MIN(had, 6),
                  "a view of %zu rows: %s", past.rows, stx_error(x));
            old = stx_memory_read(s, 1, 6);
            for (b = 0; b < 2; b++)
                CHECK(stx_memory_push(o, s, b, keep, h, pad), "%s", stx_error(x));
            CHECK(stx_memory_max_rows(o) == STX_MIN(keep, had + T), "%zu rows, expected %zu",
                  stx_memory_max_rows(o), STX_MIN(keep, had + T));
            /* a push must not change a view of the same step */
            for (b = 0; old && b < RB; b++)
                CHECK(!memcmp(past.data + b * past.stride, old->data + b * past.rows * RW,
                              past.rows * RW * sizeof(stx_real)),
                      "a push changed a view");
            check_rows("pushed", o, 0, t, 100);
            check_rows("pushed", o, 1, t, 7);
            swap = s;
            s = o;
            o = swap;
        }
        CHECK(stx_memory_key(s, 1) != stx_memory_key(s, 2), "keys are equal");
        free(t);
        stx_destroy(x);
    }
}

/* Splits the streams of a memory into two memories, rejoins them, and swaps streams.
   Repeats this with streams of different lengths. */
static void rows_streams(void) {
    int zeros;
    for (zeros = 0; zeros < 2; zeros++) {
        stx_ctx *x = context(3);
        stx_memory *s = rows_of(x, RB, 2, 0, zeros, 0, 0), *a = rows_of(x, 1, 2, 0, zeros, 0, 0),
                   *b = rows_of(x, 2, 2, 0, zeros, 0, 0), *j = rows_of(x, RB, 2, 0, zeros, 0, 0);
        history *t = (history *)calloc(RB + 1, sizeof *t);
        const stx_ids *pad;
        stx_tensor *h;
        size_t l;
        stx_begin(x, STX_EVAL);
        h = draw(x, t, RB, 9, !zeros, &pad);
        for (l = 0; l < 2; l++) stx_memory_push(s, NULL, l, 20, h, pad);
        CHECK(stx_memory_copy(a, 0, s, 0, 1) && stx_memory_copy(b, 0, s, 1, 2), "split: %s",
              stx_error(x));
        check_rows("the first stream", a, 1, t, 50);
        check_rows("the others", b, 0, t + 1, 50);
        h = draw(x, t + 1, 2, 6, 0, &pad); /* only one of the two memories continues */
        for (l = 0; l < 2; l++) stx_memory_push(b, b, l, 20, h, pad);
        CHECK(stx_memory_copy(j, 0, a, 0, 1) && stx_memory_copy(j, 1, b, 0, 2), "join: %s",
              stx_error(x));
        CHECK(stx_memory_max_rows(j) == 15, "%zu rows", stx_memory_max_rows(j));
        check_rows("joined", j, 0, t, 50);
        check_rows("joined, the newest", j, 1, t, 4);
        /* copies a shorter stream into a longer batch */
        CHECK(stx_memory_copy(j, 2, a, 0, 1), "%s", stx_error(x));
        t[2] = t[0];
        check_rows("a shorter stream", j, 0, t, 50);
        CHECK(stx_memory_copy(j, 0, j, 1, 1), "%s", stx_error(x));
        t[0] = t[1];
        check_rows("a repeated stream", j, 0, t, 50);
        CHECK(stx_memory_copy(j, 0, s, 0, 3) && stx_memory_max_rows(j) == 9,
              "all streams: %zu rows", stx_memory_max_rows(j));
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

/* Tests rows that are stored and read as float in every precision. */
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
        CHECK(w[i] == v[i / 8 * 6 + (i % 8 < 2 ? 4 + i % 2 : i % 8 - 2)], "element %zu is %g", i,
              (double)w[i]);
    y = stx_memory_concat(s, 0, 2, h);
    CHECK(y && y->is_f32 && y->dim[1] == 5, "%s", stx_error(x));
    y = stx_memory_evicted(s, 0, 4, h, NULL, NULL);
    CHECK(y && y->is_f32 && y->dim[1] == 3, "%s", stx_error(x));
    stx_destroy(x);
}

/* Tests a memory that holds one row per stream, as a state does. */
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
    CHECK(!memcmp(v, w, sizeof v), "another row was read");
    y = stx_memory_read(s, 0, 1);
    stx_get(x, y, w);
    for (i = 0; i < RB * 4; i++) CHECK(w[i] == 0, "the other layer changed");
    CHECK(stx_memory_copy(r, 0, s, 1, 2), "%s", stx_error(x));
    CHECK(stx_memory_get(r, 1, w) && !memcmp(v + 4, w, 8 * sizeof *v) && w[8] == 0,
          "a copy of two of three streams");
    stx_memory_reset_stream(s, 1);
    CHECK(stx_memory_get(s, 1, w) && w[3] == 4 && w[4] == 0 && w[7] == 0 && w[8] == 9,
          "the reset of one stream");
    CHECK(stx_memory_set(s, 0, 1, v, 1) && stx_memory_get(s, 0, w) && !memcmp(v, w, sizeof v),
          "get after set");
    stx_memory_reset(s);
    CHECK(stx_memory_get(s, 0, w) && w[0] == 0 && stx_memory_max_rows(s) == 1, "after a reset");
    CHECK(!stx_memory_set(s, 0, 2, v, 2), "two rows were accepted");
    stx_clear_error(x);
    CHECK(!stx_memory_push(s, NULL, 0, 1, stx_input(x, v, RB, 2, 2, 0), NULL)
              && strstr(stx_error(x), "stx_memory_push"),
          "%s", stx_error(x));
    stx_destroy(x);
}

/* Writes a file with the entries of two memories, "a." and "none." (which is empty),
   and reads it. as_one: the layers share one layout. */
static void rows_file(int as_one) {
    stx_ctx *x = context(5);
    stx_memory *s = rows_of(x, RB, 2, as_one, 0, !as_one, 0),
               *r = rows_of(x, RB, 2, as_one, 0, !as_one, 0),
               *few = rows_of(x, 2, 2, as_one, 0, !as_one, 0),
               *none = rows_of(x, RB, 2, as_one, 0, !as_one, 0);
    history *t = (history *)calloc(RB, sizeof *t);
    const stx_ids *pad;
    stx_tensor *h;
    char path[1024], name[100];
    stx_writer *w;
    stx_file *f;
    stx_real *v = (stx_real *)calloc(RB * 9 * RW, sizeof *v);
    size_t l;
    test_path(path, sizeof path, "test_lm");
    stx_begin(x, STX_EVAL);
    h = draw(x, t, RB, 9, 1, &pad);
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
          "names of tensors");
    CHECK(stx_memory_load(r, f, "a.") && r->layer[1].logical_count == s->layer[1].logical_count,
          "%s", stx_error(x));
    for (l = 0; l < 2; l++) check_rows("loaded", r, l, t, 50);
    CHECK(stx_memory_load(r, f, "none.") && !stx_memory_max_rows(r), "%s", stx_error(x));
    CHECK(!stx_memory_load(few, f, "a.")
              && strstr(stx_error(x), "has another shape: expected (2,9,5)")
              && !stx_memory_max_rows(few),
          "%s", stx_error(x));
    stx_clear_error(x);
    CHECK(!stx_memory_load(r, f, "b.") && strstr(stx_error(x), "b.rows"), "%s", stx_error(x));
    stx_clear_error(x);
    memset(name, 'n', 90);
    name[90] = 0;
    CHECK(!stx_memory_load(r, f, name)
              && strstr(stx_error(x), "prefix: expected at most 80 bytes, got 90"),
          "%s", stx_error(x));
    stx_clear_error(x);
    stx_file_close(f);
    remove(path);

    /* all rows that are set from the caller's array are present */
    CHECK(stx_memory_get(s, 1, v) && stx_memory_set(r, 1, 9, v, 9) && !r->layer[1].masked, "%s",
          stx_error(x));
    h = stx_memory_read(r, 1, 99);
    CHECK(h && h->dim[1] == 9 && !stx_memory_mask(r, 1, 99, NULL, 0), "set: %s", stx_error(x));
    stx_download(x, v, r->layer[1].data, 1);
    CHECK((double)v[0] == t[0].row[0][0], "the first element after a set");
    free(v);
    free(t);
    stx_destroy(x);
}

/* Damaged files must be refused: the row count of "c." is too large, the mask of "d."
   has a wrong shape, and "e." has more present rows than rows. */
static void rows_damaged(int as_one) {
    stx_ctx *x = context(5);
    stx_memory *s = rows_of(x, RB, 2, as_one, 0, !as_one, 0),
               *r = rows_of(x, RB, 2, as_one, 0, !as_one, 0);
    history *t = (history *)calloc(RB, sizeof *t);
    const stx_ids *pad;
    size_t dim[3] = {RB, 9, RW}, off[2] = {RB, 8}, l;
    char path[1024], name[100];
    stx_tensor *h;
    stx_writer *w = stx_writer_create(x);
    stx_file *f;
    test_path(path, sizeof path, "test_lm");
    stx_begin(x, STX_EVAL);
    h = draw(x, t, RB, 9, 1, &pad);
    for (l = 0; l < 2; l++) {
        stx_memory_push(s, NULL, l, 12, h, pad);
        stx_memory_push(r, NULL, l, 12, h, pad);
    }
    stx_writer_meta_u64(w, as_one ? "c.rows" : "c.rows.0", (uint64_t)1 << 40);
    stx_writer_meta_u64(w, as_one ? "d.rows" : "d.rows.0", 9);
    if (!as_one) {
        stx_writer_meta_u64(w, "d.real.0", 9);
        stx_writer_meta_u64(w, "d.rows.1", 9);
        stx_writer_meta_u64(w, "d.real.1", 9);
        stx_writer_meta_u64(w, "e.rows.0", 3);
        stx_writer_meta_u64(w, "e.real.0", 9);
    }
    for (l = 0; l < 2; l++) {
        snprintf(name, sizeof name, "d.%s%zu", as_one ? "memory." : "", l);
        stx_writer_add_device(w, name, 3, dim, s->layer[l].data);
    }
    stx_writer_add(w, as_one ? "d.pad" : "d.pad.1", STX_I32, 2, off, s->layer[0].pad);
    CHECK(stx_writer_finish(w, path), "%s", stx_error(x));
    f = stx_file_open(x, path);
    CHECK(!stx_memory_load(r, f, "c.") && strstr(stx_error(x), "damaged")
              && !stx_memory_max_rows(r),
          "%s", stx_error(x));
    stx_clear_error(x);
    CHECK(!stx_memory_load(r, f, "d.") && strstr(stx_error(x), "pad") && !stx_memory_max_rows(r),
          "%s", stx_error(x));
    stx_clear_error(x);
    if (!as_one)
        CHECK(!stx_memory_load(r, f, "e.") && strstr(stx_error(x), "expected at most 3, got 9"),
              "%s", stx_error(x));
    stx_clear_error(x);
    stx_file_close(f);
    remove(path);
    free(t);
    stx_destroy(x);
}

static void rows_files(void) {
    int as_one;
    for (as_one = 0; as_one < 2; as_one++) {
        rows_file(as_one);
        rows_damaged(as_one);
    }
}

/* Writes a file from a buffer with more capacity than rows, in which streams are not
   contiguous. The stream lengths are multiples of a checksum word in one case and not
   in the other. */
static void rows_apart(void) {
    size_t n, i;
    for (n = 8; n < 10; n++) {
        stx_ctx *x = context(9);
        stx_memory *s = rows_of(x, RB, 1, 0, 0, 0, 0), *r = rows_of(x, RB, 1, 0, 0, 0, 0);
        history *t = (history *)calloc(RB, sizeof *t);
        const stx_ids *pad;
        stx_writer *w = stx_writer_create(x);
        stx_file *f;
        char path[1024];
        test_path(path, sizeof path, "test_lm");
        stx_begin(x, STX_EVAL);
        stx_memory_reserve(s, 20);
        for (i = 0; i < 2; i++) stx_memory_push(s, s, 0, n, draw(x, t, RB, n, 0, &pad), NULL);
        CHECK(s->layer[0].stride == 20 * RW, "stream stride %zu", s->layer[0].stride);
        CHECK(stx_memory_save(w, s, "a.") && stx_writer_checksum(w) && stx_writer_finish(w, path),
              "%s", stx_error(x));
        f = stx_file_open(x, path);
        CHECK(f && stx_file_verify(f) && stx_memory_load(r, f, "a."), "%s", stx_error(x));
        check_rows("from a file", r, 0, t, n);
        stx_file_close(f);
        remove(path);
        free(t);
        stx_destroy(x);
    }
}

enum { MOST_VIEWS = 6 };

/* A view of rows, and a copy of them. */
typedef struct rows_view {
    stx_cached_rows view;
    stx_tensor *copy;
} rows_view;

static rows_view view_rows(stx_memory *s, size_t n) {
    rows_view v;
    v.copy = stx_memory_read(s, 0, n);
    CHECK(stx_memory_view(s, 0, n, &v.view) && v.view.rows == (v.copy ? v.copy->dim[1] : 0),
          "a view of %zu rows: %s", v.view.rows, stx_error(s->ctx));
    return v;
}

/* The views of a step must still show the rows that were copied. */
static void check_views(const rows_view *v, size_t n, int kind, size_t step) {
    size_t k, b;
    for (k = 0; k < n; k++)
        for (b = 0; v[k].copy && b < RB; b++)
            CHECK(!memcmp(v[k].view.data + b * v[k].view.stride,
                          v[k].copy->data + b * v[k].view.rows * RW,
                          v[k].view.rows * RW * sizeof(stx_real)),
                  "kind %d, step %zu: view %zu has changed", kind, step, k);
}

/* Changes memory s in some of the steps, and the histories t accordingly. h: the last
   block; keep: the number of rows that a push keeps. */
static void change_rows(stx_memory *s, stx_memory *other, history *t, size_t step, stx_tensor *h,
                        size_t keep) {
    stx_ctx *x = s->ctx;
    size_t T = h->dim[1], k;
    const stx_ids *pad;
    if (step == 9) {
        stx_memory_reset_stream(s, 1);
        forget(&t[1]);
        check_rows("after the reset of a stream", s, 0, t, 12);
    }
    if (step == 13) {
        stx_real *all = (stx_real *)calloc(RB * 12 * RW, sizeof *all);
        size_t rows = stx_memory_max_rows(s);
        CHECK(stx_memory_get(s, 0, all) && stx_memory_set(s, 0, rows, all, rows), "%s",
              stx_error(x));
        check_rows("set", s, 0, t, 12);
        free(all);
    }
    if (step == 17) {
        stx_memory_push(other, NULL, 0, 4, h, NULL);
        CHECK(stx_memory_copy(s, 2, other, 2, 1), "%s", stx_error(x));
        for (k = 0; k + STX_MIN(T, 4) < t[2].n; k++) t[2].missing[k] = 1;
        check_rows("a copied stream", s, 0, t, 12);
    }
    if (step == 21) { /* the output must receive only the block, and no row of `other` */
        CHECK(stx_memory_push(s, other, 0, STX_MIN(T, 4), h, NULL), "%s", stx_error(x));
        check_rows("all rows replaced", s, 0, t, 12);
    }
    if (step >= 25 && step < 29) {
        stx_memory_reset(s);
        forget_all(t);
        CHECK(stx_memory_push(s, s, 0, keep, draw(x, t, RB, T, 0, &pad), NULL), "%s",
              stx_error(x));
        check_rows("after a reset", s, 0, t, 12);
    }
    if (step == 29) {
        CHECK(stx_memory_set(s, 0, 0, NULL, 0), "%s", stx_error(x));
        forget_all(t);
        CHECK(stx_memory_push(s, s, 0, keep, draw(x, t, RB, T, 0, &pad), NULL), "%s",
              stx_error(x));
        check_rows("after a set of no rows", s, 0, t, 12);
    }
}

/* A view must stay unchanged until the next step begins, even if rows are pushed (once
   or repeatedly), set, reset, copied or freed. After some steps, rows move within the
   same buffer. */
static void rows_views(void) {
    int kind;
    for (kind = 0; kind < 4; kind++) {
        const size_t T = kind & 1 ? 5 : 3, keep = 12;
        stx_ctx *x = context(8);
        stx_memory *s = rows_of(x, RB, 1, 0, 1, 0, 12), *other = rows_of(x, RB, 1, 0, 1, 0, 0);
        history *t = (history *)calloc(RB, sizeof *t);
        const stx_real *base = NULL;
        const stx_ids *pad;
        size_t step, bytes = 0;
        for (step = 0; step < 40; step++) {
            rows_view view[MOST_VIEWS];
            stx_tensor *h = NULL;
            size_t k, views = step % 4 == 3 ? 3 : 1;
            stx_begin(x, kind & 2 ? STX_TRAIN : STX_EVAL);
            for (k = 0; k < views; k++) {
                h = draw(x, t, RB, T, 0, &pad);
                view[k] = view_rows(s, step % 2 ? 12 : 7);
                CHECK(view[k].view.rows <= (step % 2 ? 12u : 7u), "step %zu: a view of %zu rows",
                      step, view[k].view.rows);
                CHECK(stx_memory_push(s, s, 0, keep, h, NULL), "%s", stx_error(x));
                check_rows("pushed", s, 0, t, 12);
            }
            if (step == 34) {
                base = s->layer[0].base;
                bytes = stx_bytes(x);
            }
            if (step > 34)
                CHECK(s->layer[0].base == base && stx_bytes(x) == bytes, "step %zu: another buffer",
                      step);
            change_rows(s, other, t, step, h, keep);
            if (step == 39) stx_memory_free(s);
            check_views(view, views, kind, step);
        }
        free(t);
        stx_destroy(x);
    }
}

/* An allocator that can fail. */
static int no_memory;

static void *failing_alloc(void *user, size_t n) {
    (void)user;
    return no_memory ? NULL : malloc(n);
}

static void failing_free(void *user, void *p) {
    (void)user;
    free(p);
}

/* If a larger buffer cannot be allocated, there must be an error, and the rows must be
   kept. Extra capacity that only one step needed must not be kept. */
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
    d.alloc = failing_alloc;
    d.release = failing_free;
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
    no_memory = 1;
    i = stx_bytes(x);
    CHECK(!stx_memory_reserve(a, 100 * KEEP) && !stx_ok(x),
          "stx_memory_reserve succeeded without memory");
    no_memory = 0;
    stx_clear_error(x);
    CHECK(stx_bytes(x) == i && stx_memory_max_rows(a) == KEEP && stx_memory_get(a, 0, got)
              && !memcmp(got, v, sizeof v),
          "rows were lost by an error: %zu left", stx_memory_max_rows(a));
    for (k = 0; k < 2; k++) {
        if (k) { /* one step pushes from a to b and back */
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
          "rows pushed per step: %zu, then %zu; buffer moves: %zu, then %zu",
          pace[0], pace[1], moves[0], moves[1]);
    stx_destroy(x);
}

/* Tests alternating states within one step: the rows of each state are viewed, then
   replaced. Views must stay unchanged until the step ends. From the third step with
   full memories on, nothing may be allocated, and steps must begin with the same
   addresses and capacity. */
static void rows_alternating(void) {
    enum { STATES = 3 };

    int kind;
    for (kind = 0; kind < 12; kind++) {
        const size_t states = kind % 3 == 2 ? 3 : 2, pushes = kind % 3 == 1 ? 2 * states : states;
        const size_t T = kind & 4 ? 9 : 5, keep = 12;
        stx_ctx *x = context(8);
        stx_memory *s[STATES];
        history *t = (history *)calloc(RB, sizeof *t);
        uint64_t key = 0, before;
        size_t step, k, bytes = 0;
        for (k = 0; k < states; k++) s[k] = rows_of(x, RB, 1, 0, 0, 0, kind & 1 ? 12 : 0);
        for (step = 0; step < 10 && (t[0].n + pushes * T < RMAX); step++) {
            rows_view view[MOST_VIEWS];
            before = key;
            for (key = 1, k = 0; k < states; k++) key = stx_memory_key(s[k], key);
            if (step > 5)
                CHECK(key == before && bytes == stx_bytes(x),
                      "kind %d: step %zu begins with other addresses", kind, step);
            bytes = stx_bytes(x);
            stx_begin(x, kind & 1 ? STX_TRAIN : STX_EVAL);
            for (k = 0; k < pushes; k++) {
                const stx_ids *pad;
                stx_memory *in = s[k % states], *out = s[(k + 1) % states];
                stx_tensor *h;
                view[k] = view_rows(in, 12);
                h = draw(x, t, RB, T, kind > 5 && step == 2, &pad);
                CHECK(stx_memory_push(out, in, 0, keep, h, pad), "%s", stx_error(x));
                check_rows("pushed", out, 0, t, 12);
            }
            check_views(view, pushes, kind, step);
        }
        CHECK(step > 7, "%zu steps", step);
        CHECK(s[0]->layer[0].capacity <= (pushes > states ? 3 : 2) * keep + 6,
              "a capacity of %zu rows", s[0]->layer[0].capacity);
        free(t);
        stx_destroy(x);
    }
}

/* Capacity must grow by half, up to max_rows, or without max_rows to the size needed.
   If capacity is reserved beforehand, addresses must not change. */
static void rows_capacity(void) {
    stx_ctx *x = context(6);
    stx_memory *s = rows_of(x, RB, 1, 0, 0, 0, 12), *r = rows_of(x, RB, 1, 0, 0, 0, 0);
    history *t = (history *)calloc(RB, sizeof *t);
    const stx_ids *pad;
    const stx_real *data;
    stx_tensor *h;
    size_t i, bytes;
    stx_begin(x, STX_EVAL);
    h = draw(x, t, RB, 6, 0, &pad);
    stx_memory_push(s, NULL, 0, 30, h, NULL);
    stx_memory_push(r, NULL, 0, 30, h, NULL);
    CHECK(s->layer[0].capacity == 9 && r->layer[0].capacity == 6, "capacities %zu and %zu",
          s->layer[0].capacity, r->layer[0].capacity);
    CHECK(stx_memory_reserve(r, 30), "%s", stx_error(x));
    check_rows("with more capacity", r, 0, t, 30);
    data = r->layer[0].data;
    bytes = stx_bytes(x);
    for (i = 0; i < 5; i++) {
        h = draw(x, t, RB, 6, 0, &pad);
        stx_memory_push(r, r, 0, 30, h, NULL);
    }
    check_rows("full", r, 0, t, 30);
    CHECK(data == r->layer[0].data && bytes == stx_bytes(x), "the buffer moved");
    for (i = 0; i < 3; i++) stx_memory_push(s, s, 0, 12, h, NULL);
    CHECK(s->layer[0].capacity == 12 && stx_memory_max_rows(s) == 12, "capacity %zu",
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
    stx_tensor *h;
    memset(&d, 0, sizeof d);
    CHECK(!stx_memory_create(x, &d) && strstr(stx_error(x), "stx_memory_create"), "%s",
          stx_error(x));
    stx_clear_error(x);
    d.layers = 2;
    d.B = 2;
    d.widths = widths;
    d.is_state = 1;
    CHECK(!stx_memory_create(x, &d) && strstr(stx_error(x), "requires one width"), "%s",
          stx_error(x));
    stx_clear_error(x);
    d.is_state = 0;
    d.max_rows = 8;
    s = stx_memory_create(x, &d);
    stx_begin(x, STX_EVAL);
    h = stx_input(x, v, 2, 6, RW, 0);
    CHECK(!stx_memory_push(s, NULL, 2, 4, h, NULL)
              && strstr(stx_error(x), "layer: expected less than 2, got 2"),
          "%s", stx_error(x));
    stx_clear_error(x);
    CHECK(!stx_memory_push(s, NULL, 1, 4, h, NULL)
              && strstr(stx_error(x), "expected (2,T,0), got"),
          "%s", stx_error(x));
    stx_clear_error(x);
    stx_begin(x, STX_EVAL);
    CHECK(!stx_memory_push(s, NULL, 0, 4, stx_input(x, v, 3, 4, RW, 0), NULL),
          "three streams were accepted");
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
    CHECK(!stx_memory_read(s, 5, 1) && !stx_ok(x), "layer 5 was accepted");
    stx_clear_error(x);
    stx_memory_free(s);
    stx_destroy(x);
}

static void rows_null(void) {
    stx_ctx *x = context(7);
    stx_real v[RW] = {0};
    stx_cached_rows past;
    stx_tensor *h;
    stx_begin(x, STX_EVAL);
    h = stx_input(x, v, 1, 1, RW, 0);
    stx_memory_free(NULL);
    stx_memory_reset(NULL);
    stx_memory_reset_stream(NULL, 0);
    CHECK(stx_memory_view(NULL, 0, 9, &past) && !past.rows && !past.data,
          "a view without a memory");
    CHECK(!stx_memory_create(NULL, NULL) && !stx_memory_push(NULL, NULL, 0, 0, NULL, NULL)
              && !stx_memory_read(NULL, 0, 0) && !stx_memory_mask(NULL, 0, 0, NULL, 0)
              && !stx_memory_get(NULL, 0, NULL) && !stx_memory_set(NULL, 0, 0, NULL, 0)
              && !stx_memory_save(NULL, NULL, "") && !stx_memory_load(NULL, NULL, "")
              && !stx_memory_copy(NULL, 0, NULL, 0, 0) && !stx_memory_max_rows(NULL)
              && !stx_memory_reserve(NULL, 1) && !stx_memory_evicted(NULL, 0, 0, NULL, NULL, NULL)
              && !stx_memory_view(NULL, 0, 0, NULL) && stx_memory_concat(NULL, 0, 0, h) == h
              && stx_memory_key(NULL, 5) == 5,
          "NULL arguments");
    stx_destroy(x);
}


// >>streams: resetting one stream of a state

/* The model of the tests below: an attention-span model or an SRU model. */
typedef struct stream_model {
    stx_ctx *ctx;
    stx_span *span; /* NULL if the model is `sru` */
    stx_sru_lm *sru;
} stream_model;

static stream_model stream_span(stx_ctx *x, int adapt_span, int literal, size_t pers) {
    stream_model m;
    stx_span_desc d;
    memset(&m, 0, sizeof m);
    memset(&d, 0, sizeof d);
    d.vocab = V;
    d.layers = 2;
    d.dim = 16;
    d.heads = 2;
    d.inner = 16;
    d.span = 30;
    d.adapt_span = adapt_span;
    d.ramp = 4;
    d.span_init = 0.5;
    d.literal = literal;
    d.pers = pers;
    m.ctx = x;
    m.span = stx_span_create(x, &d);
    return m;
}

static stream_model stream_sru(stx_ctx *x, int transform) {
    stream_model m;
    stx_sru_lm_desc d;
    memset(&m, 0, sizeof m);
    memset(&d, 0, sizeof d);
    d.vocab = V;
    d.dim = 16;
    d.sru.layers = 2;
    d.sru.alpha_init = 0.7;
    d.sru.transform = transform;
    m.ctx = x;
    m.sru = stx_sru_lm_create(x, &d);
    return m;
}

static stream_model stream_model_of(stx_ctx *x, int kind) {
    switch (kind) {
    case 0: return stream_span(x, 1, 0, 0);
    case 1: return stream_span(x, 0, 0, 3);
    case 2: return stream_span(x, 1, STX_SPAN_LITERAL_MEMORY, 0);
    case 3: return stream_sru(x, STX_SRU_ATTENTION);
    default: return stream_sru(x, STX_SRU_LINEAR);
    }
}

static void *stream_state(const stream_model *m, size_t B) {
    stx_sru_state *s;
    if (m->span) return stx_span_state_create(m->span, B);
    s = stx_sru_state_create(m->sru->sru, B);
    s->keep = 20;
    return s;
}

static void stream_reset_all(const stream_model *m, void *state) {
    if (m->span)
        stx_span_state_reset((stx_span_state *)state);
    else
        stx_sru_state_reset((stx_sru_state *)state);
}

static void stream_reset(const stream_model *m, void *state, size_t b) {
    if (m->span)
        stx_span_state_reset_stream((stx_span_state *)state, b);
    else
        stx_sru_state_reset_stream((stx_sru_state *)state, b);
}

/* Evaluates a block of T tokens of each of B streams. The streams are `row` tokens
   apart. out receives the log-probabilities (B,T,V). Returns 0 after an error. */
static int stream_block(const stream_model *m, void *state, const int32_t *t, size_t B, size_t T,
                        size_t row, stx_real *out) {
    stx_ctx *x = m->ctx;
    int32_t *in = (int32_t *)malloc(B * T * sizeof *in);
    stx_tensor *h, *lp;
    stx_ids *ids;
    size_t b;
    for (b = 0; b < B; b++) memcpy(in + b * T, t + b * row, T * sizeof *in);
    stx_begin(x, STX_EVAL);
    ids = stx_tokens(x, in, B, T);
    free(in);
    if (m->span) {
        h = stx_span_forward(m->span, ids, (stx_span_state *)state, (stx_span_state *)state);
        lp = stx_span_log_probs(m->span, h);
    } else {
        h = stx_sru_lm_forward(m->sru, ids, (stx_sru_state *)state, (stx_sru_state *)state);
        lp = stx_sru_lm_log_probs(m->sru, h);
    }
    if (lp) stx_get(x, lp, out);
    return lp != NULL;
}

enum { SB = 3, ST = 12, SN = ST * 5 }; /* SB: streams; ST: tokens per block; SN: tokens
                                          per stream */

/* Stream b is reset after three blocks. Until then, the results of another stream are
   compared with those of a batch that contains only that stream; after the reset, the
   results of stream b are compared in the same way. */
static void stream_alone(const stream_model *m, int kind, void *state, size_t b,
                         const int32_t *t) {
    static stx_real out[SB * ST * V], expected[ST * V];
    void *alone = stream_state(m, 1);
    size_t i;
    stream_reset_all(m, state);
    for (i = 0; i < 5; i++) {
        size_t k = i < 3 ? (b + 1) % SB : b; /* the stream to compare */
        double off;
        if (i == 3) {
            stream_reset(m, state, b);
            stream_reset_all(m, alone);
        }
        CHECK(stream_block(m, state, t + i * ST, SB, ST, SN, out), "%s", stx_error(m->ctx));
        CHECK(stream_block(m, alone, t + k * SN + i * ST, 1, ST, SN, expected), "%s",
              stx_error(m->ctx));
        off = max_difference(out + k * ST * V, expected, ST * V);
        CHECK(off < 20 * TOL, "kind %d, block %zu, stream %zu: error %g", kind, i, k, off);
    }
}

/* A reset of stream 1 before the third block must change only stream 1. */
static void stream_others(const stream_model *m, int kind, void *state, const int32_t *t) {
    static stx_real out[2][SB * ST * V]; /* without and with the reset */
    double changed[SB];
    size_t i, b;
    int reset;
    for (reset = 0; reset < 2; reset++) {
        stream_reset_all(m, state);
        for (i = 0; i < 3; i++) {
            if (i == 2 && reset) stream_reset(m, state, 1);
            stream_block(m, state, t + i * ST, SB, ST, SN, out[reset]);
        }
    }
    for (b = 0; b < SB; b++)
        changed[b] = max_difference(out[0] + b * ST * V, out[1] + b * ST * V, ST * V);
    CHECK(changed[0] < TOL && changed[2] < TOL, "kind %d: a reset changes other streams", kind);
    CHECK(changed[1] > 1e-3, "kind %d: a reset changes its stream only by %g", kind, changed[1]);
}

/* A reset stream must continue like a new one. The other streams must not be affected. */
static void one_stream(void) {
    int kind;
    for (kind = 0; kind < 5; kind++) {
        stx_ctx *x = context(11);
        stream_model m = stream_model_of(x, kind);
        void *state = stream_state(&m, SB);
        int32_t *t = text(SB * SN, V, 1);
        size_t b;
        for (b = 0; b < SB; b++) stream_alone(&m, kind, state, b, t);
        stream_others(&m, kind, state, t);
        free(t);
        stx_destroy(x);
    }
}


// >>cache: attention over cached keys and values

static stx_tensor *columns(stx_ctx *x, const stx_real *v, size_t B, size_t N, size_t C, size_t t0,
                           size_t t) {
    stx_real *part = (stx_real *)stx_step_host_bytes(x, B * t * C * sizeof *part);
    size_t b;
    for (b = 0; b < B; b++) memcpy(part + b * t * C, v + (b * N + t0) * C, t * C * sizeof *part);
    return stx_input(x, part, B, t, C, 0);
}

/* Attention of one kind, computed in one call and in parts. */
enum { CB = 2, CN = 230, CC = 8 }; /* CB: streams; CN: tokens; CC: channels */

typedef struct cache_test {
    int kind, both; /* both: whether keys and values are in one tensor */
    size_t window;
    stx_ctx *x;
    stx_real *q, *k, *v, *kv;
    stx_attention_in in;
    stx_attention_desc d;
} cache_test;

enum {
    CACHE_PLAIN,
    CACHE_KV,
    CACHE_PE_HEADS, /* a position table that all heads share */
    CACHE_BIASES,   /* a position table with separate channels per head, content and
                       position bias */
    CACHE_SPANS,    /* learned spans and persistent keys */
    CACHE_WINDOW_1,
    CACHE_WINDOW_400,
    CACHE_FIRST_KEY,
    CACHE_KINDS
};

static size_t cache_window_of(int kind) {
    if (kind == CACHE_WINDOW_1) return 1;
    return kind == CACHE_WINDOW_400 ? 400 : 20;
}

static void cache_open(cache_test *c, int kind) {
    stx_params *p;
    size_t i;
    memset(c, 0, sizeof *c);
    c->kind = kind;
    c->both = kind == CACHE_KV || kind == CACHE_WINDOW_400;
    c->window = cache_window_of(kind);
    c->x = context(12);
    c->q = random_values(CB * CN * CC);
    c->k = random_values(CB * CN * CC);
    c->v = random_values(CB * CN * CC);
    c->kv = (stx_real *)malloc(2 * CB * CN * CC * sizeof *c->kv);
    for (i = 0; i < CB * CN; i++) {
        memcpy(c->kv + 2 * i * CC, c->k + i * CC, CC * sizeof *c->kv);
        memcpy(c->kv + (2 * i + 1) * CC, c->v + i * CC, CC * sizeof *c->kv);
    }
    p = stx_params_create(c->x);
    c->d.heads = 2;
    c->d.span = c->window;
    if (kind == CACHE_PE_HEADS) c->in.pe = stx_param(p, STX_NORMAL, 1, "pe", 20, CC / 2, 0, 0);
    if (kind == CACHE_BIASES) {
        c->in.pe = stx_param(p, STX_NORMAL, 1, "pe", 20, CC, 0, 0);
        c->in.content_bias = stx_param(p, STX_NORMAL, 1, "u", CC, 0, 0, 0);
        c->in.position_bias = stx_param(p, STX_NORMAL, 1, "vb", CC, 0, 0, 0);
        c->d.scale = 0.3;
    }
    if (kind == CACHE_SPANS) {
        c->in.span_fraction = stx_param(p, STX_CONSTANT, 0.6, "z", 2, 0, 0, 0);
        c->in.persistent_k = stx_param(p, STX_NORMAL, 1, "pk", 2, 3, CC / 2, 0);
        c->in.persistent_v = stx_param(p, STX_NORMAL, 1, "pv", 2, 3, CC / 2, 0);
        c->d.max_span = (double)c->window;
        c->d.ramp = 4;
        c->d.delta_min = 1;
    }
    if (kind == CACHE_FIRST_KEY) {
        c->d.first_key = -(ptrdiff_t)c->window;
        c->d.delta_min = 1;
    }
}

static void cache_close(cache_test *c) {
    free(c->q);
    free(c->k);
    free(c->v);
    free(c->kv);
    stx_destroy(c->x);
}

/* Sets the inputs of tokens [t0, t0 + t). */
static void cache_inputs(cache_test *c, size_t t0, size_t t) {
    stx_begin(c->x, STX_EVAL);
    c->in.q = columns(c->x, c->q, CB, CN, CC, t0, t);
    if (c->both)
        c->in.kv = columns(c->x, c->kv, CB, CN, 2 * CC, t0, t);
    else {
        c->in.k = columns(c->x, c->k, CB, CN, CC, t0, t);
        c->in.v = columns(c->x, c->v, CB, CN, CC, t0, t);
    }
}

/* Returns the number of tokens of part n. */
static size_t cache_part(size_t n) {
    if (n % 5 == 4) return 64;
    return n % 3 ? 1 : 7;
}

/* With parts of many lengths and all kinds of inputs, the cache must give the same
   results as a single call of stx_attention. */
static void cache_attention(void) {
    int kind;
    for (kind = 0; kind < CACHE_KINDS; kind++) {
        cache_test a;
        stx_cache *c;
        stx_real *all, *got;
        stx_tensor *y;
        size_t at, t, b, n = 0, bytes = 0;
        double worst = 0;
        cache_open(&a, kind);
        c = stx_cache_create(a.x, 2, CB, 3);
        cache_inputs(&a, 0, CN);
        all = host_of(a.x, stx_attention(a.x, &a.in, &a.d));
        CHECK(stx_cache_window(c, 0, 3, CC, 0) && stx_cache_window(c, 0, a.window, CC, a.both),
              "kind %d: %s", kind, stx_error(a.x));
        for (at = 0; at < CN; at += t, n++) {
            t = STX_MIN(cache_part(n), CN - at);
            cache_inputs(&a, at, t);
            y = stx_cache_attention(c, 0, &a.in, &a.d);
            CHECK(y && y->dim[1] == t, "kind %d: %s", kind, stx_error(a.x));
            got = host_of(a.x, y);
            for (b = 0; y && b < CB; b++)
                raise_worst(&worst, max_difference(got + b * t * CC, all + (b * CN + at) * CC,
                                                   t * CC));
            free(got);
            if (at == 0) bytes = stx_bytes(a.x);
        }
        CHECK(worst < TOL, "kind %d: error of parts %g", kind, worst);
        CHECK(c->layer[0].len <= c->layer[0].capacity && c->layer[1].capacity == 0 && bytes,
              "kind %d: capacity", kind);
        stx_cache_reset(c);
        cache_inputs(&a, 0, 5);
        got = host_of(a.x, stx_cache_attention(c, 0, &a.in, &a.d));
        CHECK(max_difference(got, all, 5 * CC) < TOL, "kind %d: after a reset", kind);
        free(got);
        stx_cache_free(c);
        free(all);
        cache_close(&a);
    }
}

enum { PN = 40, PH = 2 }; /* PN: tokens; PH: heads */

/* stx_attention_weights must return the weights that follow from row_max and inv_sum.
   args: the arguments that stx_attention passed to its kernel. */
static void pad_weights(const stx_attention_args *args, const stx_real *q, const stx_real *k,
                        const int32_t *pad) {
    double work[2 * PN], worst = 0;
    size_t b, h, i, j, e;
    for (b = 0; args && b < CB; b++)
        for (h = 0; h < PH; h++)
            for (i = 0; i < PN; i++) {
                size_t row = (b * PH + h) * PN + i;
                stx_attention_weights(args, b, h, i, work, work + PN);
                for (j = 0; j <= i; j++) {
                    double s = 0, w;
                    if (pad[b * PN + j]) continue;
                    for (e = h * CC / PH; e < (h + 1) * CC / PH; e++)
                        s += (double)q[(b * PN + i) * CC + e] * (double)k[(b * PN + j) * CC + e];
                    w = exp(s * (double)args->scale - (double)args->row_max[row])
                        * (double)args->inv_sum[row];
                    raise_worst(&worst, fabs(w - work[j]));
                }
            }
    CHECK(worst < TOL, "weights from row_max and inv_sum: error %g", worst);
}

/* With padding among the cached keys, the cache must give the same results as a single
   call of stx_attention. */
static void cache_pad(void) {
    stx_ctx *x = context(12);
    stx_cache *c = stx_cache_create(x, 1, CB, 3);
    stx_real *q = random_values(CB * PN * CC), *k = random_values(CB * PN * CC);
    stx_real *v = random_values(CB * PN * CC), *expected, *got;
    int32_t pad[CB * PN], *part = (int32_t *)calloc(CB * PN, sizeof *part);
    stx_attention_in a;
    stx_attention_desc d;
    stx_attention_args *args = NULL;
    double worst = 0;
    size_t at, t, b, i;
    for (i = 0; i < CB * PN; i++) pad[i] = i % 5 == 1 || (i > PN && i < PN + 9);
    memset(&a, 0, sizeof a);
    memset(&d, 0, sizeof d);
    d.heads = PH;
    stx_begin(x, STX_EVAL);
    a.q = stx_input(x, q, CB, PN, CC, 0);
    a.k = stx_input(x, k, CB, PN, CC, 0);
    a.v = stx_input(x, v, CB, PN, CC, 0);
    a.pad = stx_tokens(x, pad, CB, PN);
    a.args_out = &args;
    expected = host_of(x, stx_attention(x, &a, &d));
    CHECK(args && args->T == PN && args->row_max && args->inv_sum, "%s", stx_error(x));
    pad_weights(args, q, k, pad);
    CHECK(stx_cache_window(c, 0, PN, CC, 0), "%s", stx_error(x));
    a.args_out = NULL;
    for (at = 0; at < PN; at += t) {
        t = STX_MIN(at % 3 ? 1u : 4u, PN - at);
        stx_begin(x, STX_EVAL);
        for (b = 0; b < CB; b++) memcpy(part + b * (at + t), pad + b * PN, (at + t) * sizeof *part);
        a.q = columns(x, q, CB, PN, CC, at, t);
        a.k = columns(x, k, CB, PN, CC, at, t);
        a.v = columns(x, v, CB, PN, CC, at, t);
        a.pad = stx_tokens(x, part, CB, at + t);
        got = host_of(x, stx_cache_attention(c, 0, &a, &d));
        for (b = 0; b < CB; b++)
            raise_worst(&worst, max_difference(got + b * t * CC, expected + (b * PN + at) * CC,
                                               t * CC));
        free(got);
    }
    CHECK(worst < TOL && stx_ok(x), "cached keys with padding: error %g %s", worst, stx_error(x));
    free(q);
    free(k);
    free(v);
    free(expected);
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
    static const char *const part[] = {"no window", "STX_EVAL", "causal", "expected shape (2,T,8)",
                                       "first_key at most 0", "T from 1 to 64"};
    stx_real *v = random_values(2 * 80 * 8);
    int32_t id[2] = {1, 2};
    int k;
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
        CHECK(!stx_cache_attention(c, k == 0, &a, &ad) && strstr(stx_error(x), part[k]), "%s: %s",
              part[k], stx_error(x));
        stx_clear_error(x);
    }
    CHECK(!stx_cache_feed(c, w, id, 0, 0, no_step, NULL)
              && strstr(stx_error(x), "at least one token"),
          "%s", stx_error(x));
    stx_clear_error(x);
    c->V++;
    CHECK(!stx_cache_feed(c, w, id, 1, 0, no_step, NULL)
              && strstr(stx_error(x), "30 words, as in stx_cache_create, got 29"),
          "%s", stx_error(x));
    stx_clear_error(x);
    c->V--;
    CHECK(!stx_cache_feed(c, w, id, 1, 0, no_step, NULL) && stx_ok(x),
          "a step without a result is an error");
    CHECK(!stx_cache_create(NULL, 1, 1, 1) && !stx_cache_window(NULL, 0, 1, 1, 0)
              && !stx_cache_attention(NULL, 0, &a, &ad)
              && !stx_cache_feed(NULL, w, id, 1, 0, no_step, NULL),
          "NULL arguments");
    stx_cache_reset(NULL);
    stx_cache_free(NULL);
    free(v);
    stx_destroy(x);
}


// >>lm: a family with one attention layer, learned distances and a residual, and a
// memory of the layer's inputs

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
    if (window) stx_fail(((mini *)model)->ctx, STX_ERR_ARG, "mini: expected window = 0");
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


// >>lm: a program that uses any family only through its function table

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

/* Sets the tokens of a step. The text has a period of 20 tokens, so a model can predict
   it if it remembers a block. */
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

/* Two copies of a model: `a` is trained, and `b` resumes from a file. */
typedef struct lm_pair {
    int kind;
    stx_lm a, b;
    stx_optim *optim_a, *optim_b;
    void *state_a, *state_b;
    double first; /* loss of the first step */
    size_t step;  /* the next step */
} lm_pair;

/* Both copies run a step and must have exactly the same loss. */
static void lm_same_step(lm_pair *p, const char *what) {
    double a = lm_step(&p->a, p->optim_a, p->state_a, p->step, 1);
    double b = lm_step(&p->b, p->optim_b, p->state_b, p->step, 1);
    CHECK(a == b, "kind %d step %zu: %.17g, %s %.17g", p->kind, p->step, a, what, b);
}

static void lm_train(lm_pair *p) {
    double loss = 0;
    for (p->step = 0; p->step < LSTEPS; p->step++) {
        loss = lm_step(&p->a, p->optim_a, p->state_a, p->step, 1);
        if (!p->step) p->first = loss;
    }
    CHECK(loss < 0.5 * p->first, "kind %d: trained from %g to %g: %s", p->kind, p->first, loss,
          stx_error(p->a.ctx));
}

static void lm_resume(lm_pair *p) {
    stx_ctx *x = p->a.ctx, *y = p->b.ctx;
    char path[1024];
    stx_writer *w;
    stx_file *f;
    int k;
    test_path(path, sizeof path, "test_lm");
    w = stx_writer_create(x);
    CHECK(stx_params_save(w, p->a.params, "") && stx_optim_save(w, p->optim_a)
              && p->a.state_save(w, p->state_a, "state.0.") && stx_writer_finish(w, path),
          "%s", stx_error(x));
    f = stx_file_open(y, path);
    CHECK(stx_params_load(p->b.params, f, "") && stx_optim_load(p->optim_b, f)
              && p->b.state_load(p->state_b, f, "state.0."),
          "kind %d: %s", p->kind, stx_error(y));
    stx_file_close(f);
    stx_set_step_index(y, stx_step_index(x));
    remove(path);
    for (k = 0; k < 5; k++, p->step++) lm_same_step(p, "resumed");
}

/* An evaluation with a separate state must be repeatable and must not affect training. */
static void lm_evaluate(lm_pair *p) {
    const stx_lm *a = &p->a;
    void *state = a->state_create(a->model, LB, 0);
    double once = 0, again = 0;
    size_t i;
    for (i = 0; i < 3; i++) once += lm_step(a, NULL, state, i, 0);
    a->state_reset(state);
    for (i = 0; i < 3; i++) again += lm_step(a, NULL, state, i, 0);
    CHECK(once == again && once < 3 * p->first, "kind %d: evaluated to %g, then to %g", p->kind,
          once, again);
    a->state_free(state);
    lm_same_step(p, "without the evaluation");
    CHECK(a->key(a->model, NULL, NULL, p->state_a, 1) == a->key(a->model, NULL, NULL, p->state_a, 1)
              && a->key(a->model, NULL, NULL, p->state_a, 1)
                     != a->key(a->model, NULL, NULL, p->state_a, 2),
          "kind %d: keys", p->kind);
    a->state_reset_stream(p->state_a, 1);
    again = lm_step(a, p->optim_a, p->state_a, ++p->step, 0);
    CHECK(isfinite(again) && stx_ok(a->ctx), "kind %d: loss %g after the reset of a stream: %s",
          p->kind, again, stx_error(a->ctx));
}

/* Returns -log p of a token, computed from its logits. */
static double lm_nll(const stx_real *logits, int32_t token) {
    double top = -1e300, z = 0;
    size_t v;
    for (v = 0; v < LV; v++)
        if ((double)logits[v] > top) top = (double)logits[v];
    for (v = 0; v < LV; v++) z += exp((double)logits[v] - top);
    return top + log(z) - (double)logits[token];
}

/* A generator that is fed token by token must reach the same loss as a single call of
   the model. */
static void lm_generate(const lm_pair *p) {
    const stx_lm *a = &p->a;
    stx_ctx *x = a->ctx;
    void *gen = a->gen_create(a->model, 1, 0);
    int32_t t[LB * (LT + 1)];
    const stx_real *logits;
    double sum = 0, loss;
    size_t i, v;
    lm_tokens(t, 0);
    for (i = 0; i < LT; i++) {
        logits = a->gen_feed(gen, &t[i], 1);
        CHECK(logits != NULL, "kind %d: %s", p->kind, stx_error(x));
        if (!logits) break;
        sum += lm_nll(logits, t[i + 1]);
    }
    stx_begin(x, STX_EVAL);
    loss = stx_item(x, a->loss(a->model, stx_tokens(x, t, 1, LT), stx_tokens(x, t + 1, 1, LT), NULL,
                               NULL));
    CHECK(CLOSE(sum / LT, loss, 10 * TOL), "kind %d: loss %g token by token, %g at once", p->kind,
          sum / LT, loss);
    a->gen_reset(gen);
    logits = a->gen_feed(gen, t, LT);
    for (i = v = 0; logits && v < LV; v++)
        if (logits[v] > logits[i]) i = v;
    CHECK(logits && (int32_t)i == t[LT], "kind %d: continues with %zu, expected %d", p->kind, i,
          (int)t[LT]);
    a->gen_free(gen);
}

/* NULL tokens must be refused, even if there was no earlier error. */
static void lm_no_tokens(const stx_lm *lm) {
    int32_t text[LB * LT] = {0};
    stx_ids *ids;
    stx_begin(lm->ctx, STX_EVAL);
    ids = stx_tokens(lm->ctx, text, LB, LT);
    CHECK(!lm->loss(lm->model, NULL, ids, NULL, NULL)
              && strstr(stx_error(lm->ctx), "ids: expected tokens (B,T), got NULL"),
          "%s", stx_error(lm->ctx));
    stx_clear_error(lm->ctx);
    CHECK(!lm->loss(lm->model, ids, NULL, NULL, NULL)
              && strstr(stx_error(lm->ctx), "targets: expected tokens (B,T), got NULL"),
          "%s", stx_error(lm->ctx));
    stx_clear_error(lm->ctx);
}

static void lm_whole(void) {
    int kind;
    for (kind = 0; kind < LMS; kind++) {
        stx_ctx *x = context(21), *y = context(21);
        lm_pair p;
        stx_optim_desc d;
        memset(&d, 0, sizeof d);
        memset(&p, 0, sizeof p);
        p.kind = kind;
        p.a = some_lm(x, kind);
        p.b = some_lm(y, kind);
        CHECK(p.a.model && p.a.params && p.a.vocab_io && p.a.ctx == x, "kind %d: %s", kind,
              stx_error(x));
        if (!p.a.model || !p.b.model) return;
        p.optim_a = stx_optim_create(p.a.params, &d);
        p.optim_b = stx_optim_create(p.b.params, &d);
        p.state_a = p.a.state_create(p.a.model, LB, 0);
        p.state_b = p.b.state_create(p.b.model, LB, 0);
        lm_train(&p);
        lm_resume(&p);
        lm_evaluate(&p);
        lm_generate(&p);
        if (kind != MINI) lm_no_tokens(&p.a);
        p.a.state_free(p.state_a);
        p.b.state_free(p.state_b);
        if (kind == SPAN) {
            CHECK(!p.a.state_create(p.a.model, 1, 5)
                      && strstr(stx_error(x), "stx_lm.state_create: expected window = 0, got 5"),
                  "%s", stx_error(x));
            stx_clear_error(x);
            CHECK(!p.a.gen_create(p.a.model, 1, 5)
                      && strstr(stx_error(x), "stx_lm.gen_create: expected window = 0, got 5"),
                  "%s", stx_error(x));
        }
        stx_destroy(x);
        stx_destroy(y);
    }
}

/* Passes NULL to functions that take a desc or write through pointers. */
static void nulls(void) {
    stx_ctx *x = context(1);
    stx_vocab_io_desc d;
    double longest = -1;
    stx_map m;
    CHECK(!stx_vocab_io_resolve(x, NULL, NULL, &d), "a desc of NULL was accepted");
    CHECK(strstr(stx_error(x), "NULL"), "%s", stx_error(x));
    stx_clear_error(x);
    CHECK(!stx_map_open(x, NULL, "file") && strstr(stx_error(x), "NULL"), "%s", stx_error(x));
    stx_clear_error(x);
    CHECK(!stx_map_open(NULL, &m, "file") && !m.data, "a map was opened without a context");
    CHECK(stx_vocab_io_count(NULL) == 0, "stx_vocab_io_count(NULL)");
    stx_span_stats(NULL, NULL, &longest);
    CHECK(longest == 0, "the longest span without a model is %g", longest);
    stx_destroy(x);
}

int main(void) {
    words_whole();
    words_scale();
    words_errors();
    words_adaptive_errors();
    words_limits();
    rows_random();
    rows_streams();
    rows_fixed();
    rows_full();
    rows_files();
    rows_capacity();
    rows_views();
    rows_alternating();
    rows_kept();
    rows_apart();
    rows_errors();
    rows_null();
    one_stream();
    cache_attention();
    cache_pad();
    cache_errors();
    lm_whole();
    nulls();
    return test_end();
}
