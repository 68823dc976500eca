/* cuts.c - the best cutoffs of an adaptive softmax for a text: how often each word stands
   in it decides (seqtx_par.h, stx_par_cuts)

       cc -O3 -pthread cuts.c -lm -o cuts
       ./cuts --ids train.ids --vocab 12000 --clusters 3 --dim 128
       ./cuts --counts counts.txt --clusters 4 --dim 512 --factor 4 --sort
       ./cuts --text train.txt --tokens words --clusters 4 --dim 410

   Standard output has the cutoffs alone, as --cutoffs of the trainers takes them;
   standard error says what they cost. */
#include "train.h"
#define SEQTX_IMPLEMENTATION
#include "../seqtx_par.h"
#include "../seqtx_text.h"

static struct {
    const char *counts, *ids, *text, *proj_dims, *against;
    uint64_t clusters, vocab, dim, rows, threads, min_count;
    int cost, sort, tokens;
    double factor;
} opt;

static tr_opt table[] = {
    TR_TEXT("counts", TR_LOCAL, &opt.counts, "how often each word stands in the text: a whole number a line, in the order of the words' "
            "numbers"),
    TR_TEXT("ids", TR_LOCAL, &opt.ids, "or the text itself, as words' numbers with white space between"),
    TR_TEXT("text", TR_LOCAL, &opt.text, "or the training text, whose words are numbered as train_par does it: by falling "
            "count, <eos> first"),
    TR_CHOICE("tokens", TR_LOCAL, &opt.tokens, "words|chars", "text: what a word is"),
    TR_SIZE("min-count", TR_LOCAL, &opt.min_count, 0, TR_INF, "text: words seen fewer times become <unk>, as in train_par"),
    TR_SIZE("vocab", TR_LOCAL, &opt.vocab, 0, 1u << 30, "ids: words there are; 0: as many as the largest number says"),
    TR_FLAG("sort", TR_LOCAL, &opt.sort, "words are renumbered by falling count first"),
    TR_SIZE("clusters", TR_LOCAL, &opt.clusters, 1, STX_MAX_CLUSTERS, "clusters, the head among them: one more than cutoffs"),
    TR_CHOICE("cost", TR_LOCAL, &opt.cost, "macs|time|reference", "multiply-adds of a token; time, from products measured on this "
              "machine; what PAR's reference minimises, in which the head costs only its own words"),
    TR_SIZE("dim", TR_LOCAL, &opt.dim, 1, 1u << 28, "width of the hidden states"),
    TR_REAL_OPEN("factor", TR_LOCAL, &opt.factor, 0, 1, 1e6, "tail k is dim / factor^k wide"),
    TR_TEXT("proj-dims", TR_LOCAL, &opt.proj_dims, "in place of that the width of each tail, as 64,16"),
    TR_SIZE("rows", TR_LOCAL, &opt.rows, 1, 1u << 20, "time: tokens of a step"),
    TR_TEXT("against", TR_LOCAL, &opt.against, "say what these cutoffs cost, too"),
    TR_SIZE("threads", TR_LOCAL, &opt.threads, 0, 4096, "time: threads; 0: all"),
    TR_END
};
static tr_options options = {"cuts", "Finds the best cutoffs of an adaptive softmax.", table, NULL, "clusters=3 dim=512 factor=4 "
    "rows=1024", NULL, ""};

/* Time of a product as a function of its multiply-adds: max(floor, c + a m), convex
   and rising, so that the cuts are exact */
typedef struct {
    double floor, c, a, rows;
} products;

static double product_time(void *user, size_t columns, size_t inner, double share) {
    const products *p = (const products *)user;
    double t = p->c + p->a * p->rows * share * (double)inner * (double)columns;
    return t > p->floor ? t : p->floor;
}

/* The least time of a few tries of (rows, inner) (inner, columns); 0 in error */
static double one_product(stx_ctx *x, const stx_real *data, size_t rows, size_t inner,
                          size_t columns) {
    double best = HUGE_VAL, spent = 0;
    int n;
    for (n = 0; n < 20 && (n < 4 || spent < 0.2) && stx_ok(x); n++) {
        stx_tensor *h, *w;
        double now;
        stx_begin(x, STX_EVAL);
        h = stx_input(x, data, rows, inner, 0, 0);
        w = stx_input(x, data, columns, inner, 0, 0);
        now = tr_seconds();
        stx_linear(x, h, w, NULL, STX_ACT_NONE);
        now = tr_seconds() - now;
        spent += now;
        if (n && now < best) best = now;
    }
    return stx_ok(x) ? best : 0;
}

static int measure(products *p, char err[TR_ERR]) {
    static const size_t shape[][2] = {{64, 64},    {64, 512},   {128, 1024},
                                      {128, 4096}, {256, 4096}, {512, 4096}}; /* inner, columns */

    enum { SHAPES = sizeof shape / sizeof *shape };

    size_t rows = (size_t)opt.rows, i, most = (rows > 4096 ? rows : 4096) * 512;
    stx_desc d;
    stx_ctx *x;
    stx_real *data = (stx_real *)malloc(most * sizeof *data);
    double sm = 0, st = 0, smm = 0, smt = 0, n = SHAPES;
    int ok;
    memset(&d, 0, sizeof d);
    d.threads = (int)opt.threads;
    x = stx_create(&d);
    if (!x || !data) {
        stx_destroy(x);
        free(data);
        return tr_fail(err, TR_ERR, "no memory to measure products");
    }
    for (i = 0; i < most; i++) data[i] = (stx_real)((double)(i * 2654435761u % 1000) / 500 - 1);
    p->rows = (double)rows;
    p->floor = one_product(x, data, 1, 16, 16);
    for (i = 0; i < SHAPES; i++) { /* least squares, each point by its relative error */
        double m = (double)rows * (double)shape[i][0] * (double)shape[i][1],
               t = one_product(x, data, rows, shape[i][0], shape[i][1]), w;
        w = 1 / (t * t + 1e-30);
        if (i == 0) n = 0;
        n += w;
        sm += w * m;
        st += w * t;
        smm += w * m * m;
        smt += w * m * t;
    }
    ok = stx_ok(x);
    if (!ok) tr_fail(err, TR_ERR, "--cost time: %s", stx_error(x));
    p->a = (n * smt - sm * st) / (n * smm - sm * sm);
    p->c = (st - p->a * sm) / n;
    if (!(p->a > 0)) p->a = st / sm;
    if (!(p->c > 0)) p->c = 0;
    stx_destroy(x);
    free(data);
    return ok;
}

typedef struct {
    uint64_t *n;
    size_t size, room;
} counts;

/* There is room for word number i; 0: err */
static int room_for(counts *c, size_t i, const char *path, char err[TR_ERR]) {
    size_t room = c->room ? c->room : 1024;
    uint64_t *n;
    while (room <= i) room *= 2;
    if (room == c->room) return 1;
    n = (uint64_t *)realloc(c->n, room * sizeof *n);
    if (!n) return tr_fail(err, TR_ERR, "%s: no memory for %zu words", path, room);
    memset(n + c->room, 0, (room - c->room) * sizeof *n);
    c->n = n;
    c->room = room;
    return 1;
}

/* Numbers with white space between: counts, or ids that are counted. 0: err */
static int read_counts(counts *c, const char *path, int ids, char err[TR_ERR]) {
    FILE *f = fopen(path, "rb");
    const char *name = ids ? "ids" : "counts";
    char word[24];
    uint64_t v, at = 0, words = 0;
    int ch, ok = 1, n = 0;
    if (!f) return tr_fail(err, TR_ERR, "--%s %.300s: %s", name, path, strerror(errno));
    do {
        ch = getc(f);
        at++;
        if (ch != EOF && (!ch || !strchr(" \t\r\n", ch))) {
            if (n < (int)sizeof word - 1 && ch)
                word[n++] = (char)ch;
            else
                ok = tr_fail(err, TR_ERR, "--%s %.300s: no number at byte %llu", name, path,
                             (unsigned long long)at);
        } else if (n) {
            word[n] = 0;
            n = 0;
            ok = tr_read_size(word, &v) && (!ids || v < (opt.vocab ? opt.vocab : 1u << 30));
            if (!ok)
                tr_fail(err, TR_ERR, "--%s %.300s: '%s' before byte %llu is no whole number%s",
                        name, path, word, (unsigned long long)at,
                        ids ? opt.vocab ? " below --vocab" : " of a word" : "");
            else if (!ids) {
                ok = room_for(c, c->size, path, err);
                if (ok) c->n[c->size++] = v;
            } else {
                ok = room_for(c, (size_t)v, path, err);
                if (ok) c->n[v]++;
                if (v >= c->size) c->size = (size_t)v + 1;
            }
            words++;
        }
    } while (ok && ch != EOF);
    if (ok && ferror(f)) ok = tr_fail(err, TR_ERR, "--%s %.300s: %s", name, path, strerror(errno));
    fclose(f);
    if (ok && !words) ok = tr_fail(err, TR_ERR, "--%s %.300s: it holds no numbers", name, path);
    if (ok && ids && opt.vocab) {
        ok = room_for(c, (size_t)opt.vocab - 1, path, err);
        c->size = (size_t)opt.vocab;
    }
    return ok;
}

/* A text's words, counted in the order of the vocabulary that the trainer makes of it.
   0: err */
static int read_text(counts *c, stx_ctx *x, char err[TR_ERR]) {
    struct stat st;
    stx_vocab_desc d;
    stx_vocab *v = NULL;
    stx_corpus *text = NULL;
    int32_t id[4096];
    size_t at, n = 0, i, size = 0;
    int ok = stat(opt.text, &st) == 0;
    if (!ok) return tr_fail(err, TR_ERR, "--text %.300s: %s", opt.text, strerror(errno));
    if (!S_ISREG(st.st_mode)) return tr_fail(err, TR_ERR, "--text %.300s: it is no file", opt.text);
    memset(&d, 0, sizeof d);
    d.kind = opt.tokens ? STX_TOK_CHARS : STX_TOK_WORDS;
    d.order = STX_ORDER_COUNT_EARLIER;
    d.eos = d.kind == STX_TOK_CHARS;
    d.eos_first = d.kind == STX_TOK_WORDS;
    d.min_count = opt.min_count;
    v = stx_vocab_build(x, &d, opt.text, 0, (uint64_t)st.st_size);
    text = v ? stx_corpus_open(x, v, opt.text, 0, (uint64_t)st.st_size) : NULL;
    if (text) size = stx_corpus_size(text);
    ok = text && room_for(c, stx_vocab_size(v) - 1, opt.text, err);
    if (ok) c->size = stx_vocab_size(v);
    for (at = 0; ok && at < size; at += n) {
        n = STX_MIN(sizeof id / sizeof *id, size - at);
        ok = stx_corpus_read(text, at, n, id);
        for (i = 0; ok && i < n; i++) c->n[id[i]]++;
    }
    if (!ok && !stx_ok(x)) tr_fail(err, TR_ERR, "--text: %.900s", stx_error(x));
    stx_corpus_close(text);
    stx_vocab_free(v);
    return ok;
}

static int falling(const void *a, const void *b) {
    uint64_t u = *(const uint64_t *)a, v = *(const uint64_t *)b;
    return u > v ? -1 : u < v;
}

/* What cutoffs cost, and what part of the text each cluster has, by the definition in
   seqtx_par.h */
static double cost_of(const counts *c, const size_t *cut, size_t cuts, const size_t *dims,
                      const products *p, double *mass) {
    double sum[STX_MAX_CLUSTERS] = {0}, all = 0, cost, h = (double)opt.dim;
    size_t i, k;
    for (i = k = 0; i < c->size; i++) {
        while (k < cuts && i >= cut[k]) k++;
        sum[k] += (double)c->n[i];
        all += (double)c->n[i];
    }
    for (k = 0; k <= cuts; k++) mass[k] = all > 0 ? sum[k] / all : 0;
    if (opt.cost == 2) {
        for (cost = 0, k = 0; k <= cuts; k++)
            cost += (double)((k < cuts ? cut[k] : c->size) - (k ? cut[k - 1] : 0)) * mass[k];
        return cost;
    }
    i = cuts ? cut[0] + cuts : c->size;
    cost = p ? product_time((void *)(uintptr_t)p, i, (size_t)opt.dim, 1)
             : (double)opt.dim * (double)i;
    for (k = 1; k <= cuts; k++) {
        double width, size = (double)((k < cuts ? cut[k] : c->size) - cut[k - 1]);
        h /= opt.factor;
        width = dims ? (double)dims[k - 1] : floor(h) > 1 ? floor(h) : 1;
        cost += p ? product_time((void *)(uintptr_t)p, (size_t)width, (size_t)opt.dim, mass[k])
                        + product_time((void *)(uintptr_t)p, (size_t)size, (size_t)width, mass[k])
                  : width * ((double)opt.dim + size) * mass[k];
    }
    return cost;
}

static void say(const counts *c, const char *what, const size_t *cut, size_t cuts,
                const size_t *dims, const products *p) {
    static const char *const unit[3] = {"multiply-adds a token", "microseconds a step, by the fit",
                                        "of the reference's cost"};
    double mass[STX_MAX_CLUSTERS], v = cost_of(c, cut, cuts, dims, p, mass);
    size_t k;
    fprintf(stderr, "%-8s %.6g %s; share of the text:", what, p ? 1e6 * v : v, unit[opt.cost]);
    for (k = 0; k <= cuts; k++) fprintf(stderr, " %.3f", mass[k]);
    fprintf(stderr, "\n");
}

static int run(char err[TR_ERR]) {
    size_t cut[STX_MAX_CLUSTERS], other[STX_MAX_CLUSTERS], dims[STX_MAX_CLUSTERS], n = 0, m = 0, k;
    stx_par_cuts_desc d;
    products p;
    counts c;
    stx_ctx *x = stx_create(NULL);
    int ok;
    memset(&c, 0, sizeof c);
    memset(&d, 0, sizeof d);
    d.clusters = (size_t)opt.clusters;
    d.sort = 0;
    d.dim = (size_t)opt.dim;
    d.factor = opt.factor;
    d.cost = opt.cost == 0   ? STX_PAR_CUTS_MACS
             : opt.cost == 1 ? STX_PAR_CUTS_TIME
                             : STX_PAR_CUTS_REF;
    ok = x != NULL;
    if (!ok) tr_fail(err, TR_ERR, "no memory");
    if (ok && opt.proj_dims
        && (!tr_read_sizes(opt.proj_dims, dims, STX_MAX_CLUSTERS, &n) || n != d.clusters - 1))
        ok = tr_fail(err, TR_ERR, "--proj-dims %.100s: want %zu numbers, one for each tail",
                     opt.proj_dims, d.clusters - 1);
    for (k = 0; ok && k < n; k++)
        if (!dims[k])
            ok = tr_fail(err, TR_ERR, "--proj-dims %.100s: a tail of width 0", opt.proj_dims);
    ok = ok
         && (opt.text ? read_text(&c, x, err)
                      : read_counts(&c, opt.ids ? opt.ids : opt.counts, opt.ids != NULL, err));
    if (ok && opt.against && !tr_read_sizes(opt.against, other, STX_MAX_CLUSTERS - 1, &m))
        ok = tr_fail(err, TR_ERR, "--against %.100s: want rising numbers with commas between",
                     opt.against);
    for (k = 0; ok && k < m; k++)
        if (other[k] <= (k ? other[k - 1] : 0) || other[k] >= c.size || (n && n != m))
            ok = tr_fail(err, TR_ERR,
                         "--against %.100s: want rising numbers above 0 and below the %zu words%s",
                         opt.against, c.size, n ? ", as many as --proj-dims" : "");
    if (ok && opt.cost == 1) {
        ok = measure(&p, err);
        d.time = product_time;
        d.user = &p;
    }
    if (ok && opt.sort) qsort(c.n, c.size, sizeof *c.n, falling);
    d.proj_dims = n ? dims : NULL;
    if (ok && !stx_par_cuts(x, cut, NULL, c.n, c.size, &d))
        ok = tr_fail(err, TR_ERR, "%s", stx_error(x));
    if (ok) {
        for (k = 0; k + 1 < d.clusters; k++) printf("%s%zu", k ? "," : "", cut[k]);
        printf("\n");
        say(&c, "these:", cut, d.clusters - 1, d.proj_dims, opt.cost == 1 ? &p : NULL);
        if (m) say(&c, "against:", other, m, d.proj_dims, opt.cost == 1 ? &p : NULL);
        say(&c, "one:", cut, 0, NULL, opt.cost == 1 ? &p : NULL);
        if (fflush(stdout) || ferror(stdout))
            ok = tr_fail(err, TR_ERR, "cannot print: %s", strerror(errno));
    }
    free(c.n);
    stx_destroy(x);
    return ok;
}

int main(int argc, char **argv) {
    char err[TR_ERR];
    int ok, got;
    tr_standard_streams();
    got = tr_parse(&options, argc, argv, err, TR_ERR);
    if (got == 2) return 0;
    ok = got == 1;
    if (ok && !opt.counts + !opt.ids + !opt.text != 2)
        ok = tr_fail(err, TR_ERR, "give --counts, or --ids, or --text");
    if (ok && !opt.text && (tr_given(&options, "tokens") || opt.min_count))
        ok = tr_fail(err, TR_ERR, "--tokens and --min-count are for --text");
    if (ok && !opt.ids && opt.vocab) ok = tr_fail(err, TR_ERR, "--vocab is for --ids");
    ok = ok && run(err);
    if (!ok) fprintf(stderr, "%s: %s\n", options.program, err);
    tr_options_free(&options);
    return ok ? 0 : 2;
}
