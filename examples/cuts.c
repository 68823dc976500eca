/* cuts.c - finds the best cutoffs of an adaptive softmax for a text

       cc -O3 -pthread cuts.c -lm -o cuts
       ./cuts --ids train.ids --vocab 12000 --clusters 3 --dim 128
       ./cuts --counts counts.txt --clusters 4 --dim 512 --factor 4 --sort
       ./cuts --text train.txt --tokens words --clusters 4 --dim 410

   Prints the cutoffs on standard output, in the form of the trainers' --cutoffs, and
   their cost on standard error. stx_par_cuts in seqtx_par.h defines the costs. */
#include "train.h"
#define SEQTX_IMPLEMENTATION
#include "../seqtx_par.h"
#include "../seqtx_text.h"


// >>options

enum { COST_MACS, COST_TIME, COST_REFERENCE };      /* opt.cost */

static struct {
    const char *counts, *ids, *text, *proj_dims, *against;
    uint64_t    clusters, vocab, dim, rows, threads, min_count;
    int         cost, sort, tokens;
    double      factor;
} opt;

static tr_opt table[] = {
    TR_TEXT("counts", TR_LOCAL, &opt.counts,
        "file with the count of each word in the text, in the order of the words' ids"),
    TR_TEXT("ids", TR_LOCAL, &opt.ids,
        "instead of --counts: the text itself, as ids separated by white space"),
    TR_TEXT("text", TR_LOCAL, &opt.text,
        "instead of --counts: the training text, whose words get the same ids as in train_par "
        "(<eos> first, then by decreasing count)"),
    TR_CHOICE("tokens", TR_LOCAL, &opt.tokens, "words|chars", "with --text: what a word is"),
    TR_SIZE("min-count", TR_LOCAL, &opt.min_count, 0, TR_INF,
        "with --text: words with a smaller count become <unk>, as in train_par"),
    TR_SIZE("vocab", TR_LOCAL, &opt.vocab, 0, 1u << 30,
        "with --ids: size of the vocabulary; 0: the largest id + 1"),
    TR_FLAG("sort", TR_LOCAL, &opt.sort, "first renumber the words by decreasing count"),
    TR_SIZE("clusters", TR_LOCAL, &opt.clusters, 1, STX_MAX_CLUSTERS,
        "number of clusters, including the head: one more than the number of cutoffs"),
    TR_CHOICE("cost", TR_LOCAL, &opt.cost, "macs|time|reference",
        "cost that is minimised. macs: multiply-adds per token. time: time of the matrix "
        "multiplications, as measured on this machine. reference: the cost of PAR's reference, "
        "in which only the tokens of the head pay for it"),
    TR_SIZE("dim", TR_LOCAL, &opt.dim, 1, 1u << 28, "model dimension D"),
    TR_REAL_OPEN("factor", TR_LOCAL, &opt.factor, 0, 1, 1e6, "tail k has width D / factor^k"),
    TR_TEXT("proj-dims", TR_LOCAL, &opt.proj_dims,
        "width of each tail, instead of --factor, such as 64,16"),
    TR_SIZE("rows", TR_LOCAL, &opt.rows, 1, 1u << 20, "with --cost time: tokens per step"),
    TR_TEXT("against", TR_LOCAL, &opt.against, "also print the cost of these cutoffs"),
    TR_SIZE("threads", TR_LOCAL, &opt.threads, 0, 4096,
        "with --cost time: number of threads; 0: all"),
    TR_END
};

static tr_options options = {
    "cuts", "Finds the best cutoffs of an adaptive softmax.", table, NULL,
    "clusters=3 dim=512 factor=4 rows=1024", NULL, "", NULL, NULL
};


// >>time of a matrix multiplication

/* Time model: a matmul of m multiply-adds takes max(floor, fixed + slope * m) seconds.
   stx_par_cuts finds the optimum for this model. `rows` is the number of tokens per
   step. */
typedef struct gemm_time {
    double floor, fixed, slope, rows;
} gemm_time;

static double time_of(void *user, size_t columns, size_t inner, double share) {
    const gemm_time *g = (const gemm_time *)user;
    double t = g->fixed + g->slope * g->rows * share * (double)inner * (double)columns;
    return t > g->floor ? t : g->floor;
}

/* Multiplies (rows,inner) by (inner,columns) several times. Returns the shortest time
   in seconds, or 0 after an error. */
static double shortest(stx_ctx *x, const stx_real *data, size_t rows, size_t inner,
                       size_t columns) {
    double best = HUGE_VAL, spent = 0;
    int n;
    for (n = 0; n < 20 && (n < 4 || spent < 0.2) && stx_ok(x); n++) {
        stx_tensor *h, *w;
        double took;
        stx_begin(x, STX_EVAL);
        h = stx_input(x, data, rows, inner, 0, 0);
        w = stx_input(x, data, columns, inner, 0, 0);
        took = tr_seconds();
        stx_linear(x, h, w, NULL, STX_ACT_NONE);
        took = tr_seconds() - took;
        spent += took;
        if (n && took < best) best = took;
    }
    return stx_ok(x) ? best : 0;
}

/* Fits g->fixed and g->slope to measured times t by least squares. The weights 1 / t^2
   minimise the relative errors. */
static void fit(gemm_time *g, stx_ctx *x, const stx_real *data) {
    static const size_t shape[6][2] = {     /* inner, columns */
        {64, 64}, {64, 512}, {128, 1024}, {128, 4096}, {256, 4096}, {512, 4096}
    };
    double w = 0, wm = 0, wt = 0, wmm = 0, wmt = 0;
    size_t i;
    for (i = 0; i < 6; i++) {
        double m = g->rows * (double)shape[i][0] * (double)shape[i][1];
        double t = shortest(x, data, (size_t)g->rows, shape[i][0], shape[i][1]);
        double weight = 1 / (t * t + 1e-30);
        w += weight;
        wm += weight * m;
        wt += weight * t;
        wmm += weight * m * m;
        wmt += weight * m * t;
    }
    g->slope = (w * wmt - wm * wt) / (w * wmm - wm * wm);
    g->fixed = (wt - g->slope * wm) / w;
    if (!(g->slope > 0)) g->slope = wt / wm;
    if (!(g->fixed > 0)) g->fixed = 0;
}

/* Determines the time model of this machine by measuring matrix multiplications. Returns
   0 and sets err on failure. */
static int measure(gemm_time *g, char err[TR_ERR]) {
    const size_t rows = (size_t)opt.rows, most = STX_MAX(rows, 4096) * 512;
    stx_real *data = (stx_real *)malloc(most * sizeof *data);
    stx_desc d;
    stx_ctx *x;
    size_t i;
    int ok;
    memset(&d, 0, sizeof d);
    d.threads = (int)opt.threads;
    x = stx_create(&d);
    ok = x && data;
    if (!ok) {
        tr_fail(err, TR_ERR, "--cost time: out of memory: cannot time matrix multiplications");
    } else {
        for (i = 0; i < most; i++)
            data[i] = (stx_real)((double)(i * 2654435761u % 1000) / 500 - 1);
        g->rows = (double)rows;
        g->floor = shortest(x, data, 1, 16, 16);
        fit(g, x, data);
        ok = stx_ok(x);
        if (!ok) tr_fail(err, TR_ERR, "--cost time: %s", stx_error(x));
    }
    stx_destroy(x);
    free(data);
    return ok;
}


// >>counts

typedef struct counts {
    uint64_t *n;
    size_t    size, capacity;
} counts;

/* Makes space for word i. Returns 0 and sets err if memory runs out. */
static int reserve(counts *c, size_t i, const char *path, char err[TR_ERR]) {
    size_t capacity = c->capacity ? c->capacity : 1024;
    uint64_t *n;
    while (capacity <= i) capacity *= 2;
    if (capacity == c->capacity) return 1;
    n = (uint64_t *)realloc(c->n, capacity * sizeof *n);
    if (!n)
        return tr_fail(err, TR_ERR, "%s: out of memory: cannot count %zu words", path, capacity);
    memset(n + c->capacity, 0, (capacity - c->capacity) * sizeof *n);
    c->n = n;
    c->capacity = capacity;
    return 1;
}

/* Adds a number that ends before byte `at` of the file. The number is a count or, if
   `ids` is 1, an id to be counted. Returns 0 and sets err on failure. */
static int add(counts *c, const char *number, int ids, const char *path, uint64_t at,
               char err[TR_ERR]) {
    const uint64_t limit = opt.vocab ? opt.vocab : 1u << 30;
    const char *expected = "a whole number";
    uint64_t v;
    size_t word;
    if (ids) expected = opt.vocab ? "an id below --vocab" : "an id";
    if (!tr_read_size(number, &v) || (ids && v >= limit))
        return tr_fail(err, TR_ERR, "--%s %.300s: expected %s before byte %llu, got '%s'",
                       ids ? "ids" : "counts", path, expected, (unsigned long long)at, number);
    word = ids ? (size_t)v : c->size;
    if (!reserve(c, word, path, err)) return 0;
    if (ids)
        c->n[word]++;
    else
        c->n[word] = v;
    if (word >= c->size) c->size = word + 1;
    return 1;
}

/* Reads numbers that are separated by white space: counts or, if ids is 1, ids to be
   counted. Skips a byte-order mark at the start. Returns 0 and sets err on failure. */
static int read_counts(counts *c, const char *path, int ids, char err[TR_ERR]) {
    static const unsigned char mark[3] = {0xEF, 0xBB, 0xBF};
    const char *option = ids ? "ids" : "counts";
    FILE *f = fopen(path, "rb");
    char number[24];
    size_t length = 0, marked = 0;
    uint64_t at = 0;
    int ch = 0, ok = 1;
    if (!f) return tr_fail(err, TR_ERR, "--%s %.300s: %s", option, path, strerror(errno));
    while (ok && ch != EOF) {
        ch = getc(f);
        at++;
        if (marked < 3 && at == marked + 1 && ch == mark[marked]) {
            marked++;
        } else if (marked == 1 || marked == 2) {
            ok = tr_fail(err, TR_ERR, "--%s %.300s: expected a number at byte 1", option, path);
        } else if (ch == EOF || (ch && strchr(" \t\r\n", ch))) {
            number[length] = 0;
            if (length) ok = add(c, number, ids, path, at, err);
            length = 0;
        } else if (ch && length < sizeof number - 1) {
            number[length++] = (char)ch;
        } else {
            ok = tr_fail(err, TR_ERR, "--%s %.300s: expected a number at byte %llu", option, path,
                         (unsigned long long)at);
        }
    }
    if (ok && ferror(f))
        ok = tr_fail(err, TR_ERR, "--%s %.300s: %s", option, path, strerror(errno));
    fclose(f);
    if (ok && !c->size)
        ok = tr_fail(err, TR_ERR, "--%s %.300s: expected numbers, got none", option, path);
    if (ok && ids && opt.vocab) {
        ok = reserve(c, (size_t)opt.vocab - 1, path, err);
        c->size = (size_t)opt.vocab;
    }
    return ok;
}

/* Counts each token of a text. On failure, sets err or the context's error and returns
   0. */
static int count_text(counts *c, const stx_vocab *v, stx_corpus *text, char err[TR_ERR]) {
    const size_t size = stx_corpus_size(text);
    int32_t id[4096];
    size_t at, i, n;
    if (!reserve(c, stx_vocab_size(v) - 1, opt.text, err)) return 0;
    c->size = stx_vocab_size(v);
    for (at = 0; at < size; at += n) {
        n = STX_MIN(sizeof id / sizeof *id, size - at);
        if (!stx_corpus_read(text, at, n, id)) return 0;
        for (i = 0; i < n; i++) c->n[id[i]]++;
    }
    return 1;
}

/* Counts the words of --text, in the order of the vocabulary that train_par would build
   from it. Returns 0 and sets err on failure. */
static int read_text(counts *c, stx_ctx *x, char err[TR_ERR]) {
    struct stat st;
    stx_vocab_desc d;
    stx_vocab *v = NULL;
    stx_corpus *text = NULL;
    int ok;
    if (stat(opt.text, &st) != 0)
        return tr_fail(err, TR_ERR, "--text %.300s: %s", opt.text, strerror(errno));
    if (!S_ISREG(st.st_mode))
        return tr_fail(err, TR_ERR, "--text %.300s: expected a regular file, got %s", opt.text,
                       S_ISDIR(st.st_mode) ? "a directory" : "a pipe or a device");
    memset(&d, 0, sizeof d);
    d.kind = opt.tokens ? STX_TOK_CHARS : STX_TOK_WORDS;
    d.order = STX_ORDER_COUNT_EARLIER;
    d.eos = d.kind == STX_TOK_CHARS;
    d.eos_first = d.kind == STX_TOK_WORDS;
    d.min_count = opt.min_count;
    v = stx_vocab_build(x, &d, opt.text, 0, (uint64_t)st.st_size);
    if (v) text = stx_corpus_open(x, v, opt.text, 0, (uint64_t)st.st_size);
    ok = text && count_text(c, v, text, err);
    if (!ok && !stx_ok(x)) tr_fail(err, TR_ERR, "--text: %.900s", stx_error(x));
    stx_corpus_close(text);
    stx_vocab_free(v);
    return ok;
}

static int falling(const void *a, const void *b) {
    uint64_t u = *(const uint64_t *)a, v = *(const uint64_t *)b;
    return (u < v) - (u > v);
}


// >>cost

/* Computes the share of the text in each cluster. */
static void shares(const counts *c, const size_t *cut, size_t cuts, double *share) {
    double sum[STX_MAX_CLUSTERS] = {0}, all = 0;
    size_t i, k = 0;
    for (i = 0; i < c->size; i++) {
        while (k < cuts && i >= cut[k]) k++;
        sum[k] += (double)c->n[i];
        all += (double)c->n[i];
    }
    for (k = 0; k <= cuts; k++) share[k] = all > 0 ? sum[k] / all : 0;
}

/* Returns the number of words in cluster k. */
static size_t words_in(const counts *c, const size_t *cut, size_t cuts, size_t k) {
    return (k < cuts ? cut[k] : c->size) - (k ? cut[k - 1] : 0);
}

/* Returns the cost of cutoffs as seqtx_par.h defines it. `widths` contains the widths of
   the tails, or is NULL to derive them from --factor. `time` is NULL unless --cost is
   time. */
static double cost_of(const counts *c, const size_t *cut, size_t cuts, const size_t *widths,
                      gemm_time *time, const double *share) {
    const size_t D = (size_t)opt.dim;
    double cost = 0, narrowed = (double)opt.dim;
    size_t k;
    if (opt.cost == COST_REFERENCE) {
        for (k = 0; k <= cuts; k++) cost += (double)words_in(c, cut, cuts, k) * share[k];
        return cost;
    }
    for (k = 0; k <= cuts; k++) {
        size_t size = words_in(c, cut, cuts, k), width;
        if (k == 0) {
            size_t rows = size + cuts;
            cost += time ? time_of(time, rows, D, 1) : (double)D * (double)rows;
            continue;
        }
        narrowed /= opt.factor;
        width = narrowed > 1 ? (size_t)narrowed : 1;
        if (widths) width = widths[k - 1];
        if (time)
            cost += time_of(time, width, D, share[k]) + time_of(time, size, width, share[k]);
        else
            cost += (double)width * (double)(D + size) * share[k];
    }
    return cost;
}

static void print_cost(const counts *c, const char *what, const size_t *cut, size_t cuts,
                       const size_t *widths, gemm_time *time) {
    static const char *const unit[3] = {
        "multiply-adds per token", "microseconds per step, by the fit", "of the reference's cost"
    };
    double share[STX_MAX_CLUSTERS], cost;
    size_t k;
    shares(c, cut, cuts, share);
    cost = cost_of(c, cut, cuts, widths, time, share);
    fprintf(stderr, "%-8s %.6g %s; share of the text:", what, time ? 1e6 * cost : cost,
            unit[opt.cost]);
    for (k = 0; k <= cuts; k++) fprintf(stderr, " %.3f", share[k]);
    fprintf(stderr, "\n");
}


// >>main

typedef struct job {
    size_t tails;
    size_t width[STX_MAX_CLUSTERS], widths;         /* values of --proj-dims, and their number */
    size_t against[STX_MAX_CLUSTERS], againsts;     /* values of --against, and their number */
} job;

static int read_widths(job *j, char err[TR_ERR]) {
    size_t k;
    if (!opt.proj_dims) return 1;
    if (!tr_read_sizes(opt.proj_dims, j->width, STX_MAX_CLUSTERS, &j->widths)
        || j->widths != j->tails)
        return tr_fail(err, TR_ERR, "--proj-dims %.100s: expected %zu numbers, one for each tail",
                       opt.proj_dims, j->tails);
    for (k = 0; k < j->widths; k++)
        if (!j->width[k])
            return tr_fail(err, TR_ERR, "--proj-dims %.100s: expected widths above 0",
                           opt.proj_dims);
    return 1;
}

static int read_against(job *j, size_t words, char err[TR_ERR]) {
    size_t k;
    int ok = 1;
    if (!opt.against) return 1;
    ok = tr_read_sizes(opt.against, j->against, STX_MAX_CLUSTERS - 1, &j->againsts);
    for (k = 0; ok && k < j->againsts; k++)
        ok = j->against[k] > (k ? j->against[k - 1] : 0) && j->against[k] < words;
    if (!ok)
        return tr_fail(err, TR_ERR,
                       "--against %.100s: expected increasing numbers from 1 to %zu, separated by "
                       "commas", opt.against, words - 1);
    if (j->widths && j->againsts && j->widths != j->againsts)
        return tr_fail(err, TR_ERR,
                       "--against %.100s: expected %zu cutoffs, one for each width in --proj-dims",
                       opt.against, j->widths);
    return 1;
}

/* Finds the best cutoffs for the counts c and prints them. */
static int solve(const job *j, counts *c, stx_ctx *x, char err[TR_ERR]) {
    static const int costs[] = {STX_PAR_CUTS_MACS, STX_PAR_CUTS_TIME, STX_PAR_CUTS_REF};
    const size_t *widths = j->widths ? j->width : NULL;
    size_t cut[STX_MAX_CLUSTERS], k;
    stx_par_cuts_desc d;
    gemm_time measured, *time = NULL;
    if (opt.cost == COST_TIME) {
        if (!measure(&measured, err)) return 0;
        time = &measured;
    }
    if (opt.sort) qsort(c->n, c->size, sizeof *c->n, falling);
    memset(&d, 0, sizeof d);
    d.clusters = (size_t)opt.clusters;
    d.cost = costs[opt.cost];
    d.dim = (size_t)opt.dim;
    d.factor = opt.factor;
    d.proj_dims = widths;
    d.time = time ? time_of : NULL;
    d.user = time;
    if (!stx_par_cuts(x, cut, NULL, c->n, c->size, &d))
        return tr_fail(err, TR_ERR, "%s", stx_error(x));

    for (k = 0; k < j->tails; k++) printf("%s%zu", k ? "," : "", cut[k]);
    printf("\n");
    print_cost(c, "these:", cut, j->tails, widths, time);
    if (j->againsts) print_cost(c, "against:", j->against, j->againsts, widths, time);
    print_cost(c, "one:", cut, 0, NULL, time);
    if (fflush(stdout) || ferror(stdout))
        return tr_fail(err, TR_ERR, "cannot write to standard output: %s", strerror(errno));
    return 1;
}

static int run(char err[TR_ERR]) {
    stx_ctx *x = stx_create(NULL);
    job j;
    counts c;
    int ok;
    memset(&j, 0, sizeof j);
    memset(&c, 0, sizeof c);
    j.tails = (size_t)opt.clusters - 1;
    ok = x ? read_widths(&j, err) : tr_fail(err, TR_ERR, "out of memory: cannot create a context");
    if (ok && opt.text) ok = read_text(&c, x, err);
    if (ok && opt.ids) ok = read_counts(&c, opt.ids, 1, err);
    if (ok && opt.counts) ok = read_counts(&c, opt.counts, 0, err);
    ok = ok && read_against(&j, c.size, err) && solve(&j, &c, x, err);
    free(c.n);
    stx_destroy(x);
    return ok;
}

static int check(char err[TR_ERR]) {
    if (!opt.counts + !opt.ids + !opt.text != 2)
        return tr_fail(err, TR_ERR, "expected exactly one of --counts, --ids and --text");
    if (!opt.text && (tr_given(&options, "tokens") || opt.min_count))
        return tr_fail(err, TR_ERR, "--tokens and --min-count require --text");
    if (!opt.ids && opt.vocab) return tr_fail(err, TR_ERR, "--vocab requires --ids");
    return 1;
}

int main(int argc, char **argv) {
    char err[TR_ERR];
    int ok, parsed;
    tr_standard_streams();
    parsed = tr_parse(&options, argc, argv, err, TR_ERR);
    if (parsed == 2) return 0;
    ok = parsed == 1 && check(err) && run(err);
    if (!ok) fprintf(stderr, "%s: %s\n", options.program, err);
    tr_options_free(&options);
    if (ok) return 0;
    return ferror(stdout) ? 1 : 2;      /* 1 if output was lost */
}
