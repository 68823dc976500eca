/* plot.c - draws the logs of training runs (--log of the trainers) as one SVG.

       cc -O2 plot.c -lm -o plot
       ./plot run.jsonl -o run.svg
       ./plot long.jsonl short.jsonl --log-x --smooth 50 --title "two spans" -o spans.svg
       ssh machine cat run.jsonl | ./plot - -o run.svg

   docs/log.md documents the format of logs, for those of other programs. The picture has
   a panel for each quantity that the runs have logged: loss by step and by time, in the
   run's unit (if one of the logs has only losses: the losses of all); learning rate,
   tokens per second and gradient norm; the spans of all heads; the probabilities of PAR's
   blocks; compression losses. */
#include "train.h"
#include "svg.h"
#include "../seqtx.h"

static struct {
    const char *out, *title, *axis;
    uint64_t smooth;
    int log_x, version;
} opt;

static tr_opt table[] = {
    TR_TEXT("out", TR_LOCAL, &opt.out,
                 "the SVG file to write; -: standard output"),
    TR_TEXT("title", TR_LOCAL, &opt.title,
            "title of the picture; default: the model that was trained"),
    TR_SIZE("smooth", TR_LOCAL, &opt.smooth, 0, 1u << 30,
            "draw means over this many records of the log, with the records themselves as faint "
            "lines; 1: no smoothing; 0: a fortieth of each log"),
    TR_TEXT("axis", TR_LOCAL, &opt.axis,
            "what the steps of the logs count; default: steps. The logs of a script can have other "
            "numbers there, such as seconds"),
    TR_FLAG("log-x", TR_LOCAL, &opt.log_x, "use a logarithmic axis for steps"),
    TR_FLAG("version", TR_LOCAL, &opt.version, "print the version and exit"),
    TR_END};

static tr_options options = {
    "plot",
    "Draws the logs of training runs, which the trainers write with --log or --out. A log named - "
    "is read from standard input.",
    table,
    NULL,
    "",
    NULL,
    "", NULL, "LOG.jsonl [MORE.jsonl ..] -o PICTURE.svg [--option value ...]"};


// >>logs

/* the columns of a training record, and their names in the log */
enum { STEP, SECONDS, METRIC, LR, SPEED, NORM, SPAN, TAU, LATENCY, LOSS, COLUMNS };

static const char *const column[COLUMNS] = {"step",     "seconds",      NULL,
                                            "lr",       "tokens_per_s", "grad_norm",
                                            "span_avg", "tau",          "latency",
                                            "loss"};

enum { SPANS, PI, AUX, RATIO, LISTS };

static const char *const list_name[LISTS] = {"spans", "pi", "aux", "ratio"};

enum { VALID, TEST, SPLITS };

static const char *const split_name[SPLITS] = {"valid", "test"};

enum { UNITS = 5 };

static const struct {
    const char *key, *title;
    int log;
} unit[UNITS] = {{"bpb", "bits per byte", 0},
                 {"bpc", "bits per character", 0},
                 {"ppl", "perplexity", 1},
                 {"word_ppl", "perplexity per word", 1},
                 {"loss", "loss, nats per token", 0}};

/* Rows of `width` values. The first value of a row is the step, which increases from
   row to row. */
typedef struct rows {
    double *v;
    size_t n, capacity, width;
} rows;

typedef struct run {
    char name[80], family[48];
    int unit;                /* index in unit[]; -1: not yet known */
    double params, per_step; /* number of parameters, and of tokens per step; 0: unknown */
    size_t layers;
    char memories[200];                    /* --memory-layers */
    rows train, list[LISTS], eval[SPLITS]; /* the values in `list` are not negative */
    double before;                         /* seconds before the run was last resumed */
    double clock;                          /* seconds since the run was last resumed */
    int timed;                             /* 1: the log contains times */
} run;

/* All runs; the last `here` of them are from the log that is being read. */
typedef struct runs {
    run *v;
    size_t n, here;
} runs;

static double *row_of(const rows *t, size_t i) {
    return t->v + i * t->width;
}

/* Appends a row and returns it, or NULL if memory runs out. */
static double *add_row(rows *t) {
    if (t->n == t->capacity) {
        size_t capacity = t->capacity ? 2 * t->capacity : 64;
        double *v = (double *)realloc(t->v, capacity * t->width * sizeof *v);
        if (!v) return NULL;
        t->v = v;
        t->capacity = capacity;
    }
    return row_of(t, t->n++);
}

/* Removes the records after `step`, the step at which a run was resumed. */
static void go_back(run *r, double step) {
    rows *t[1 + LISTS + SPLITS];
    size_t k, n = 0;
    t[n++] = &r->train;
    for (k = 0; k < LISTS; k++) t[n++] = &r->list[k];
    for (k = 0; k < SPLITS; k++) t[n++] = &r->eval[k];
    for (k = 0; k < n; k++)
        while (t[k]->n && row_of(t[k], t[k]->n - 1)[0] > step) t[k]->n--;
}

/* Returns the time in seconds of the last record that contains a time, or 0. */
static double so_far(const run *r) {
    size_t n = r->train.n;
    while (n && isnan(row_of(&r->train, n - 1)[SECONDS])) n--;
    return n ? row_of(&r->train, n - 1)[SECONDS] : 0;
}

static double number_of(const tr_json_member *m) {
    double x;
    return svg_read(m->value, &x) == m->p ? x : (double)NAN;
}

/* Copies a string to `out` without its quotes, and truncates it to fit. Does not decode
   escapes. */
static void text_of(const tr_json_member *m, char *out, size_t size) {
    size_t n = *m->value == '"' ? (size_t)(m->p - m->value) - 2 : 0;
    if (n >= size) n = size - 1;
    memcpy(out, m->value + 1, n);
    out[n] = 0;
}

static void configure(run *r, const char *config) {
    double batch = 0, block = 0, updates = 1;
    char word[40] = "", cell[40] = "";
    tr_json_member m = {config, NULL, NULL, 0};
    int cmem = 0, span = 0, attention = 1;
    while (tr_json_next(&m) > 0) {
        if (tr_json_is_key(&m, "batch-sz"))
            batch = number_of(&m);
        else if (tr_json_is_key(&m, "block-sz"))
            block = number_of(&m);
        else if (tr_json_is_key(&m, "update-param-freq"))
            updates = number_of(&m);
        else if (tr_json_is_key(&m, "nlayers"))
            r->layers = number_of(&m) > 0 && number_of(&m) < 1e6 ? (size_t)number_of(&m) : 0;
        else if (tr_json_is_key(&m, "memory-layers"))
            text_of(&m, r->memories, sizeof r->memories);
        else if (tr_json_is_key(&m, "pattern"))
            text_of(&m, word, sizeof word);
        else if (tr_json_is_key(&m, "cell"))
            text_of(&m, cell, sizeof cell);
        else if (tr_json_is_key(&m, "attention"))
            attention = *m.value != 'f';
        else if (tr_json_is_key(&m, "cmem"))
            cmem = 1;
        else if (tr_json_is_key(&m, "adapt-span"))
            span = *m.value == 't' ? 2 : 1;
    }
    r->per_step = batch * block * updates > 0 ? batch * block * updates : 0;
    if (span)
        snprintf(r->family, sizeof r->family,
                 span == 2 ? "Adaptive attention span" : "Sequential Transformer");
    else if (*cell)
        snprintf(r->family, sizeof r->family,
                 strcmp(cell, "sru++") || !attention ? "SRU" : "SRU++");
    else if (cmem)
        snprintf(r->family, sizeof r->family, "Compressive Transformer");
    else if (strcmp(word, "search") == 0)
        snprintf(r->family, sizeof r->family, "PAR search");
    else if (*word)
        snprintf(r->family, sizeof r->family, strcmp(word, "xl") ? "PAR %s" : "Transformer-XL",
                 word);
}

/* Returns a record's metric in the run's unit, which the run's first record
   determines. */
static double metric_of(run *r, const double *v, const int *there) {
    int k;
    for (k = 0; r->unit < 0 && k < UNITS; k++)
        if (there[k]) r->unit = k;
    return r->unit >= 0 ? v[r->unit] : (double)NAN;
}

/* The content of one line of a log. */
typedef struct record {
    char event[16], split[16];
    double v[COLUMNS];              /* NaN: the line lacks this column */
    double metric[UNITS];
    int there[UNITS];               /* nonzero if metric[k] is in the line */
    const char *list[LISTS];        /* text of each list; NULL: not in the line */
} record;

/* Adds another run from the same log. Returns 0 if memory runs out. */
static int start_run(runs *all) {
    run *more = (run *)realloc(all->v, (all->n + 1) * sizeof *more), *r;
    char number[32];
    if (!more) return 0;
    all->v = more;
    r = &more[all->n];
    memset(r, 0, sizeof *r);
    r->unit = -1;
    svg_number(number, (double)(all->here + 1), 0);
    strcpy(r->name, more[all->n - all->here].name);
    snprintf(r->name + strlen(r->name), 16, " (%.10s)", number);
    all->n++;
    all->here++;
    return 1;
}

/* Reads a line into *c, and the options and the number of parameters into *r. */
static void read_record(run *r, const char *line, record *c) {
    tr_json_member m = {line, NULL, NULL, 0};
    int k;
    for (k = 0; k < COLUMNS; k++) c->v[k] = (double)NAN;
    for (k = 0; k < UNITS; k++) c->metric[k] = (double)NAN;
    while (tr_json_next(&m) > 0) {
        if (tr_json_is_key(&m, "config") && *m.value == '{')
            configure(r, m.value);
        else if (tr_json_is_key(&m, "params"))
            r->params = number_of(&m);
        else if (tr_json_is_key(&m, "split"))
            text_of(&m, c->split, sizeof c->split);
        for (k = 0; k < UNITS; k++)
            if (tr_json_is_key(&m, unit[k].key)) {
                c->metric[k] = number_of(&m);
                c->there[k] = 1;
            }
        for (k = 0; k < COLUMNS; k++)
            if (column[k] && tr_json_is_key(&m, column[k])) c->v[k] = number_of(&m);
        for (k = 0; k < LISTS; k++)
            if (tr_json_is_key(&m, list_name[k])) c->list[k] = m.value;
    }
    if (!(c->v[SECONDS] >= 0 && c->v[SECONDS] < 1e12)) c->v[SECONDS] = (double)NAN;
}

/* Inserts an evaluation in the order of steps, because an older checkpoint can be
   evaluated later. The evaluation replaces an earlier one of the same step. Returns 0
   if memory runs out. */
static int add_evaluation(rows *t, double step, double metric, double loss) {
    double *row;
    size_t i;
    t->width = 3;
    if (!add_row(t)) return 0;
    for (i = t->n - 1; i > 0 && row_of(t, i - 1)[0] >= step; i--)
        memcpy(row_of(t, i), row_of(t, i - 1), 3 * sizeof *t->v);
    row = row_of(t, i);
    row[0] = step;
    row[1] = metric;
    row[2] = loss;
    if (i + 1 < t->n && row[3] <= row[0]) {
        memmove(row + 3, row + 6, (t->n - i - 2) * 3 * sizeof *row);
        t->n--;
    }
    return 1;
}

/* Converts the time in a training record, which is measured from the last start or
   resumption, to seconds since the run first started. If the record has no time,
   estimates it from the tokens per second. */
static void set_seconds(run *r, double *v) {
    if (isfinite(v[SECONDS])) {
        /* time went backwards: the run was resumed, but no record reports it */
        if (v[SECONDS] < r->clock) r->before = so_far(r);
        r->clock = v[SECONDS];
        v[SECONDS] += r->before;
        r->timed = 1;
    } else if (r->per_step > 0 && v[SPEED] > 0) {
        double last = r->train.n ? row_of(&r->train, r->train.n - 1)[STEP] : 0;
        v[SECONDS] = so_far(r) + (v[STEP] - last) * r->per_step / v[SPEED];
        if (!(v[SECONDS] < 1e12)) v[SECONDS] = (double)NAN;
    }
}

/* Adds list k of a training record. Returns 1 on success, 0 if the list is malformed,
   or -1 if memory runs out. */
static int add_list(run *r, int k, const record *c) {
    rows *t = &r->list[k];
    const char *text = c->list[k];
    size_t n = text && *text == '[' ? svg_numbers(text, NULL, 0) : 0, i;
    double *row;
    if (n == SIZE_MAX) return 0;
    if (!n || (t->width && t->width != n + 1)) return 1;
    t->width = n + 1;
    row = add_row(t);
    if (!row) return -1;
    row[0] = c->v[STEP];
    svg_numbers(text, row + 1, n);
    for (i = 1; i <= n && row[i] >= 0 && row[i] < 1e30; i++) {
    }
    if (i <= n) t->n--;
    return 1;
}

/* Adds a training record. Returns the same values as take(). */
static int add_training(run *r, record *c) {
    double *row;
    int k;
    if (r->train.n && c->v[STEP] <= row_of(&r->train, r->train.n - 1)[STEP])
        go_back(r, c->v[STEP] > 0 ? c->v[STEP] - 0.5 : -1);
    set_seconds(r, c->v);
    r->train.width = COLUMNS;
    row = add_row(&r->train);
    if (!row) return -1;
    memcpy(row, c->v, sizeof c->v);
    for (k = 0; k < LISTS; k++) {
        int added = add_list(r, k, c);
        if (added <= 0) return added;
    }
    return 1;
}

/* Returns the split of an evaluation: other programs call the validation text val,
   validation, dev or eval. Returns SPLITS for an unknown one. */
static int split_of(const char *name) {
    if (strcmp(name, "test") == 0) return TEST;
    return tr_choice_index("valid|val|validation|dev|eval", name, strlen(name)) < 0 ? SPLITS
                                                                                    : VALID;
}

/* Adds one record. Returns 1 (even if there is nothing to draw), 0 if the line is
   damaged, -1 if memory runs out, or 2 if the line lacks its step. */
static int take(runs *all, const char *line) {
    run *r = &all->v[all->n - 1];
    record c;
    int k, training, evaluation;
    memset(&c, 0, sizeof c);
    if (tr_json_find(line, "event", c.event, sizeof c.event) != 1) return 0;
    training = strcmp(c.event, "train") == 0;
    evaluation = strcmp(c.event, "eval") == 0;
    if (strcmp(c.event, "start") == 0 && (r->train.n || r->eval[VALID].n || r->eval[TEST].n)) {
        if (!start_run(all)) return -1;
        r = &all->v[all->n - 1];
    }
    read_record(r, line, &c);
    if (strcmp(c.event, "resume") == 0 && c.v[STEP] >= 0) {
        go_back(r, c.v[STEP]);
        r->before = so_far(r);
        r->clock = 0;
    }
    if (!training && !evaluation) return 1;
    if (isnan(c.v[STEP])) return 2;
    if (!(c.v[STEP] >= 0 && c.v[STEP] < 1e18)) return 0;
    c.v[METRIC] = metric_of(r, c.metric, c.there);
    if (training) return add_training(r, &c);
    k = split_of(c.split);
    if (k == SPLITS || !isfinite(c.v[METRIC])) return 1;
    return add_evaluation(&r->eval[k], c.v[STEP], c.v[METRIC], c.v[LOSS]) ? 1 : -1;
}

/* Nonzero if the run has a loss in nats wherever it has a result. */
static int has_loss(const run *r) {
    size_t i;
    int k;
    for (i = 0; i < r->train.n; i++) {
        const double *row = row_of(&r->train, i);
        if (isfinite(row[METRIC]) && !isfinite(row[LOSS])) return 0;
    }
    for (k = 0; k < SPLITS; k++)
        for (i = 0; i < r->eval[k].n; i++)
            if (!isfinite(row_of(&r->eval[k], i)[2])) return 0;
    return 1;
}

/* The loss in nats per token is the measure that all logs share. If the log of another
   program has no other, all runs are drawn in it, so that they share a panel. */
static void share_measure(runs *all) {
    const int loss = UNITS - 1;
    size_t i, k;
    int split, some = 0;
    for (i = 0; i < all->n; i++) some |= all->v[i].unit == loss;
    for (i = 0; some && i < all->n; i++) {
        run *r = &all->v[i];
        if (r->unit < 0 || r->unit == loss || !has_loss(r)) continue;
        for (k = 0; k < r->train.n; k++)
            row_of(&r->train, k)[METRIC] = row_of(&r->train, k)[LOSS];
        for (split = 0; split < SPLITS; split++)
            for (k = 0; k < r->eval[split].n; k++)
                row_of(&r->eval[split], k)[1] = row_of(&r->eval[split], k)[2];
        r->unit = loss;
    }
}

static void free_run(run *r) {
    int k;
    free(r->train.v);
    for (k = 0; k < LISTS; k++) free(r->list[k].v);
    for (k = 0; k < SPLITS; k++) free(r->eval[k].v);
}

/* Reads the runs of a log. Each "start" record begins a run. Returns 1, or 0 with a
   message in err. */
static int read_log(runs *all, const char *path, const char *name, char err[TR_ERR]) {
    FILE *in = strcmp(path, "-") ? fopen(path, "rb") : stdin;
    char *line = NULL;
    size_t capacity = 0, lines = 0, bad = 0, first_bad = 0, stepless = 0, n0 = all->n, i;
    ssize_t len;
    int got = 1, drawn = 0, tensors = 0;
    run *more = (run *)realloc(all->v, (all->n + 1) * sizeof *more);
    if (!in) {
        if (more) all->v = more;
        return tr_fail(err, TR_ERR, "%.300s: cannot open the log: %s", path, strerror(errno));
    }
    if (!more)
        got = -1;
    else {
        all->v = more;
        memset(&more[all->n], 0, sizeof *more);
        more[all->n].unit = -1;
        len = (ssize_t)strlen(name);
        snprintf(more[all->n].name, sizeof more->name, "%s%.60s", len > 60 ? ".." : "",
                 len > 60 ? name + len - 60 : name);
        all->n++;
        all->here = 1;
    }
    while (got >= 0 && (errno = 0, len = getline(&line, &capacity, in)) > 0) {
        lines++;
        /* a safetensors file begins with the length of its header, in eight bytes */
        tensors |= lines == 1 && len > 9 && line[8] == '{' && !line[7];
        /* ignore a byte-order mark */
        if (lines == 1 && strncmp(line, "\xef\xbb\xbf", 3) == 0) memset(line, ' ', 3);
        if (line[strspn(line, " \t\r\n")] == 0 && (size_t)len == strlen(line)) continue;
        got = strlen(line) == (size_t)len ? take(all, line) : 0;
        stepless += got == 2;
        if ((!got || got == 2) && !bad++) first_bad = lines;
        if (lines == bad && lines > 1000) break; /* this is not a log */
    }
    if (got < 0)
        tr_fail(err, TR_ERR, "%.300s: out of memory: cannot read the log", path);
    else if (ferror(in))
        got = tr_fail(err, TR_ERR, "%.300s: cannot read the log: %s", path, strerror(errno)) - 1;
    free(line);
    if (in != stdin) fclose(in);
    if (got < 0) return 0;
    for (i = n0; i < all->n; i++)
        drawn |= all->v[i].train.n || all->v[i].eval[VALID].n || all->v[i].eval[TEST].n;
    if (!lines) return tr_fail(err, TR_ERR, "%.300s: expected a log, got an empty file", path);
    if (tensors)
        return tr_fail(err, TR_ERR,
                       "%.300s: expected a log, got a safetensors file: give the trainer's "
                       "--log file (with --out DIR: DIR/log.jsonl), not its checkpoint",
                       path);
    if (stepless && !drawn)
        return tr_fail(err, TR_ERR,
                       "%.300s: the training and evaluation lines have no \"step\": docs/log.md "
                       "documents the format",
                       path);
    if (lines == bad)
        return tr_fail(err, TR_ERR,
                       "%.300s: expected a log, got a file without the JSON lines that the "
                       "trainers' --log writes",
                       path);
    if (!drawn)
        return tr_fail(err, TR_ERR,
                       "%.300s: the log contains no training or evaluation records yet", path);
    if (bad)
        fprintf(stderr, "plot: %.300s: skipped %zu %sline%s%s, the first is line %zu\n", path, bad,
                stepless == bad ? "" : "damaged ", bad > 1 ? "s" : "",
                stepless == bad ? " without a \"step\"" : "", first_bad);
    /* remove the runs that have nothing to draw */
    for (i = all->n; i-- > n0;)
        if (!all->v[i].train.n && !all->v[i].eval[VALID].n && !all->v[i].eval[TEST].n) {
            free_run(&all->v[i]);
            memmove(&all->v[i], &all->v[i + 1], (all->n - i - 1) * sizeof *all->v);
            all->n--;
        }
    return 1;
}


// >>panels

/* The colours of Okabe and Ito, which colour-blind readers can distinguish. Their
   yellow is left out, because it is faint on white. From the eighth run on, the colours
   repeat, with dashed lines. */
static const char *const colour[] = {"#0072B2", "#D55E00", "#009E73", "#CC79A7",
                                     "#E69F00", "#56B4E9", "#000000"};

enum { COLOURS = sizeof colour / sizeof *colour };

static const char *const dash[] = {"", " stroke-dasharray=\"6 3\"", " stroke-dasharray=\"2 2\"",
                                   " stroke-dasharray=\"8 3 2 3\""};

/* Values of series.style. NOISY: a smoothed line. PLAIN: an unsmoothed line. DOTS: an
   unsmoothed line with dots. DIAMONDS: diamonds without a line. */
enum { NOISY, PLAIN, DOTS, DIAMONDS };

typedef struct series {
    double *x, *y, *mean;
    size_t n;
    int style;
    const char *colour, *dash;
} series;

/* value of panel.log_y: logarithmic only if the values are widely spread (see spread) */
enum { MAYBE = 2 };

typedef struct panel {
    series *v;
    size_t n;
    double x, y, w, h; /* position and size */
    double lo, hi;     /* range of the horizontal axis */
    const char *title, *below;
    int log_x, log_y;
    int zero;     /* 1: the vertical axis starts at 0 unless it is logarithmic */
    svg_axis *as; /* vertical axis that several panels share; NULL: not shared. The first of these
                     panels sets its range */
} panel;

/* Set if an allocation for the picture fails. In this case, no picture is written. */
static int no_memory;

/* Adds an empty series with capacity for n points. Returns NULL if n is 0 or memory runs
   out. */
static series *add_series(panel *p, size_t n, int style, const char *ink, const char *strokes) {
    series *v = n ? (series *)realloc(p->v, (p->n + 1) * sizeof *v) : NULL, *s;
    no_memory |= n && !v;
    if (!v) return NULL;
    p->v = v;
    s = &v[p->n];
    s->x = (double *)malloc(3 * n * sizeof *s->x);
    no_memory |= !s->x;
    if (!s->x) return NULL;
    s->y = s->x + n;
    s->mean = s->y + n;
    s->n = 0;
    s->style = style;
    s->colour = ink;
    s->dash = strokes;
    p->n++;
    return s;
}

static void add_point(series *s, double x, double y) {
    if (!isfinite(x) || !(fabs(y) < 1e30)) return;
    s->x[s->n] = x;
    s->y[s->n++] = y;
}

static void free_panel(panel *p) {
    size_t i;
    for (i = 0; i < p->n; i++) free(p->v[i].x);
    free(p->v);
    memset(p, 0, sizeof *p);
}

/* Computes the mean of about N points around each point. Near the ends, fewer points are
   averaged, because each side must have the same number. If `logs` is 1, the means are
   geometric. On a logarithmic step axis, the first points are far apart, so fewer of
   them are averaged. */
static void smooth(series *s, int logs) {
    size_t n = s->n, N = opt.smooth ? (size_t)opt.smooth : n / 40, i, k;
    double *sum = s->style == NOISY && N > 1 && n > 2 ? (double *)malloc((n + 1) * sizeof *sum)
                                                      : NULL;
    for (i = 0; i < n; i++) s->mean[i] = s->y[i];
    no_memory |= !sum && s->style == NOISY && N > 1 && n > 2;
    if (!sum) return;
    for (sum[0] = 0, i = 0; i < n; i++) sum[i + 1] = sum[i] + (logs ? log(s->y[i]) : s->y[i]);
    for (i = 0; i < n; i++) {
        k = N / 2 < i ? N / 2 : i;
        if (k > n - 1 - i) k = n - 1 - i;
        if (opt.log_x && k > i / 8) k = i / 8;
        s->mean[i] = (sum[i + k + 1] - sum[i - k]) / (double)(2 * k + 1);
        if (logs) s->mean[i] = exp(s->mean[i]);
    }
    free(sum);
}

/* The points of a series that are drawn within BIN pixels: their range and mean. `falls`
   is 1 if the highest point precedes the lowest. */
typedef struct bin {
    double x, lo, hi, mean;
    int falls;
} bin;

enum { BIN = 2, MOST_BINS = 1000 };

/* Collects the points of a series in the bins b and returns the number of bins. */
static size_t gather(const series *s, const svg_axis *x, bin *b) {
    size_t i, n = 0, count = 0;
    double at = -1e9;
    for (i = 0; i < s->n; i++) {
        double here = floor((svg_at(x, s->x[i]) - x->from) / BIN);
        if (here > at || !n) {
            if (n == MOST_BINS) break;
            at = here;
            b[n].x = s->x[i];
            b[n].lo = b[n].hi = s->y[i];
            b[n].mean = s->mean[i];
            b[n].falls = 1;
            n++;
            count = 1;
            continue;
        }
        if (s->y[i] < b[n - 1].lo) {
            b[n - 1].lo = s->y[i];
            b[n - 1].falls = 1;
        }
        if (s->y[i] > b[n - 1].hi) {
            b[n - 1].hi = s->y[i];
            b[n - 1].falls = 0;
        }
        count++;
        b[n - 1].x += (s->x[i] - b[n - 1].x) / (double)count;
        b[n - 1].mean += (s->mean[i] - b[n - 1].mean) / (double)count;
    }
    return n;
}

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

/* Nonzero if more than 3 % of the values exceed 20 times the median. A logarithmic axis
   then shows more detail. */
static int spread(const panel *p) {
    size_t n = 0, i;
    double *v;
    int is = 0;
    for (i = 0; i < p->n; i++) n += p->v[i].n;
    v = (double *)malloc((n + 1) * sizeof *v);
    no_memory |= !v;
    for (n = 0, i = 0; v && i < p->n; n += p->v[i++].n)
        memcpy(v + n, p->v[i].y, p->v[i].n * sizeof *v);
    if (v && n) {
        qsort(v, n, sizeof *v, ascending);
        is = v[n - 1 - 3 * n / 100] > 20 * v[n / 2];
    }
    free(v);
    return is;
}

/* A value, and the width over which it is drawn. */
typedef struct weighted {
    double v, width;
} weighted;

static int falling(const void *a, const void *b) {
    return ascending(&((const weighted *)b)->v, &((const weighted *)a)->v);
}

/* Sets the range of the vertical axis, from the lowest to the highest value. However,
   outliers on up to 3 % of the width, such as those of the first steps, are cut off if
   the rest is then drawn much larger. Returns 0 if there is nothing to draw. */
static int range(const panel *p, const svg_axis *x, bin *b, svg_axis *y) {
    size_t capacity = 0, n = 0, i, k, m;
    weighted *v;
    double hi, most, least, all = 0, above = 0;
    for (i = 0; i < p->n; i++) capacity += p->v[i].n < MOST_BINS ? p->v[i].n : (size_t)MOST_BINS;
    v = (weighted *)malloc((2 * capacity + 1) * sizeof *v);
    no_memory |= !v;
    if (!v) return 0;
    for (i = 0; i < p->n; i++)
        for (m = gather(&p->v[i], x, b), k = 0; k < m; k++) {
            v[n].width = v[n + 1].width =
                m < 3 ? 1 : svg_at(x, b[k + (k + 1 < m)].x) - svg_at(x, b[k - (k > 0)].x);
            v[n++].v = b[k].lo;
            v[n++].v = b[k].hi;
        }
    if (!n) {
        free(v);
        return 0;
    }
    qsort(v, n, sizeof *v, falling);
    for (i = 0; i < n; i++) {
        all += v[i].width;
        if (y->log) v[i].v = log(v[i].v);
    }
    for (i = 0; i + 1 < n && above + v[i].width <= 0.03 * all; i++) above += v[i].width;
    hi = v[i].v;
    most = v[0].v;
    least = v[n - 1].v;
    free(v);
    if (p->zero && !y->log && least > 0) least = 0;
    if (most - least <= 1.7 * (hi - least)) hi = most;
    if (!(hi - least > 1e-9 * fabs(hi))) {
        double d = fabs(hi) > 1e-30 ? 0.1 * fabs(hi) : 1;
        hi += d;
        if (!p->zero || y->log) least -= d;
    }
    y->hi = hi + 0.05 * (hi - least);
    y->lo = p->zero && !y->log && least >= 0 ? 0 : least - 0.05 * (hi - least);
    if (y->log) {
        y->lo = exp(y->lo);
        y->hi = exp(y->hi);
    }
    return 1;
}

static void draw_line(tr_buf *out, const svg_axis *x, const svg_axis *y, const bin *b, size_t n,
                      int raw, const char *look) {
    size_t i;
    svg_add(out, "<polyline fill=\"none\" stroke-linejoin=\"round\"%s points=\"", look);
    for (i = 0; i < n; i++) {
        double at = svg_at(x, b[i].x);
        double first = b[i].falls ? b[i].hi : b[i].lo;
        svg_add(out, i ? " %p,%p" : "%p,%p", at, svg_at(y, raw ? first : b[i].mean));
        if (raw && b[i].hi > b[i].lo)
            svg_add(out, " %p,%p", at, svg_at(y, b[i].falls ? b[i].lo : b[i].hi));
    }
    svg_add(out, "\"/>\n");
}

/* Draws a panel and frees it. Returns 0 if there is nothing to draw. */
static int draw_panel(tr_buf *out, panel *p) {
    static int clips;
    svg_axis x = {0, 0, 0, 0, 0}, y = {0, 0, 0, 0, 0};
    bin *b = (bin *)malloc(MOST_BINS * sizeof *b);
    char look[200], number[32];
    size_t i, k, n;
    int pass, drawn;
    x.lo = p->lo;
    x.hi = p->hi;
    x.from = p->x + 46;
    x.to = p->x + p->w - 8;
    x.log = p->log_x;
    y.from = p->y + p->h - 32;
    y.to = p->y + 22;
    y.log = p->log_y == MAYBE ? spread(p) : p->log_y;
    for (i = 0; i < p->n; i++)
        for (k = 0; y.log && k < p->v[i].n; k++)
            if (!(p->v[i].y[k] > 1e-30)) y.log = 0;
    for (i = 0; i < p->n; i++) smooth(&p->v[i], y.log);
    no_memory |= !b;
    drawn = b != NULL && range(p, &x, b, &y);
    if (drawn && p->as && p->as->hi > p->as->lo) {
        y.lo = p->as->lo;
        y.hi = p->as->hi;
        y.log = p->as->log;
    } else if (drawn && p->as)
        *p->as = y;
    if (!drawn) {
        free(b);
        free_panel(p);
        return 0;
    }
    svg_frame(out, &x, &y, p->title, p->below);
    svg_number(number, (double)++clips, 0);
    svg_add(
        out,
        "<clipPath id=\"c%s\"><rect x=\"%n\" y=\"%n\" width=\"%n\" height=\"%n\"/></clipPath>\n",
        number, x.from, y.to, x.to - x.from + 4,
        y.from - y.to); /* 4 more pixels, so that the last point is not clipped */
    svg_add(out, "<g clip-path=\"url(#c%s)\">\n", number);
    for (pass = 0; pass < 2; pass++) /* faint lines first, so that others cover them */
        for (i = 0; i < p->n; i++) {
            const series *s = &p->v[i];
            int means = s->style == NOISY && memcmp(s->y, s->mean, s->n * sizeof *s->y) != 0;
            n = gather(s, &x, b);
            if (pass == 0) {
                snprintf(look, sizeof look,
                         " stroke=\"%s\" stroke-opacity=\"0.3\" stroke-width=\"1\"", s->colour);
                if (means) draw_line(out, &x, &y, b, n, 1, look);
                continue;
            }
            snprintf(look, sizeof look, " stroke=\"%s\" stroke-width=\"%s\"%s", s->colour,
                     s->style == DOTS ? "1" : "1.6", s->dash);
            if (s->style != DIAMONDS)
                draw_line(out, &x, &y, b, n, s->style == NOISY && !means, look);
            for (k = 0; k < n && (s->style == DOTS || (n == 1 && s->style != DIAMONDS)); k++)
                svg_add(out,
                        "<circle cx=\"%n\" cy=\"%n\" r=\"2.6\" fill=\"%s\" stroke=\"#fff\" "
                        "stroke-width=\"0.7\"/>\n",
                        svg_at(&x, b[k].x), svg_at(&y, b[k].mean), s->colour);
            for (k = 0; k < n && s->style == DIAMONDS; k++)
                svg_add(out,
                        "<path d=\"M%n %nl4 4 -4 4 -4 -4z\" fill=\"#fff\" stroke=\"%s\" "
                        "stroke-width=\"1.5\"/>\n",
                        svg_at(&x, b[k].x), svg_at(&y, b[k].mean) - 4, s->colour);
        }
    svg_add(out, "</g>\n");
    free(b);
    free_panel(p);
    return 1;
}


// >>picture

enum { WIDTH = 900, EDGE = 14 };

typedef struct page {
    tr_buf out;
    double y, last_step, first_step, last_second;
    int estimated;
    const runs *all;
} page;

/* Returns the colour of run i. If there is only one run, its evaluations have a
   different colour. */
static const char *ink(const page *g, size_t i, int evaluation) {
    return colour[(g->all->n == 1 && evaluation ? 1 : i) % COLOURS];
}

static const char *strokes(size_t i) {
    return dash[i / COLOURS % 4];
}

static void by_step(const page *g, panel *p) {
    p->lo = opt.log_x ? g->first_step : 0;
    p->hi = g->last_step;
    p->log_x = opt.log_x;
    p->below = opt.axis ? opt.axis : "steps";
}

/* Sets an axis to the range of one run's steps. */
static void own_steps(const rows *t, svg_axis *x) {
    const double first = row_of(t, 0)[0], last = row_of(t, t->n - 1)[0];
    x->hi = last > 0 ? last : 1;
    x->lo = 0;
    if (opt.log_x) x->lo = first > 0 && first < x->hi ? first : x->hi / 10;
    x->log = opt.log_x;
}

/* Returns the time of a step in seconds, interpolated between two records, or NaN if
   the time is unknown. */
static double when(const run *r, double step) {
    size_t lo = 0, hi = r->train.n;
    const double *a, *b;
    while (lo < hi) {
        size_t mid = (lo + hi) / 2;
        if (row_of(&r->train, mid)[STEP] < step)
            lo = mid + 1;
        else
            hi = mid;
    }
    if (lo == r->train.n) return (double)NAN;
    b = row_of(&r->train, lo);
    if (b[STEP] <= step) return b[SECONDS];
    if (lo == 0) return b[STEP] > 0 ? b[SECONDS] * step / b[STEP] : (double)NAN;
    a = b - COLUMNS;
    return a[SECONDS] + (b[SECONDS] - a[SECONDS]) * (step - a[STEP]) / (b[STEP] - a[STEP]);
}

/* Returns the number of runs whose records have no time, and reports them. */
static size_t without_time(const page *g) {
    size_t i, k, n = 0;
    for (i = 0; i < g->all->n; i++) {
        const run *r = &g->all->v[i];
        for (k = 0; k < r->train.n && isnan(row_of(&r->train, k)[SECONDS]); k++) {
        }
        if (k < r->train.n) continue;
        fprintf(stderr, "plot: %s: no \"seconds\", so it is not in the panel by time\n", r->name);
        n++;
    }
    return n;
}

/* Adds the losses of the runs whose unit is unit[of]. `time` is the number of seconds
   per unit of the time axis, or 0 to draw by steps. Returns 0 if there are no losses. */
static int loss_panel(page *g, panel *p, int of, double time) {
    size_t i, k;
    int split, some = 0;
    p->log_y = unit[of].log;
    for (i = 0; i < g->all->n; i++) {
        const run *r = &g->all->v[i];
        series *s = r->unit == of ? add_series(p, r->train.n, NOISY, ink(g, i, 0), strokes(i))
                                  : NULL;
        for (k = 0; s && k < r->train.n; k++) {
            const double *row = row_of(&r->train, k);
            add_point(s, time > 0 ? row[SECONDS] / time : row[STEP], row[METRIC]);
        }
        some |= s && s->n;
    }
    for (i = 0; i < g->all->n; i++)
        for (split = 0; split < SPLITS; split++) {
            const run *r = &g->all->v[i];
            const rows *t = &r->eval[split];
            const int style = split == VALID ? DOTS : DIAMONDS;
            series *s = r->unit == of ? add_series(p, t->n, style, ink(g, i, 1), strokes(i)) : NULL;
            for (k = 0; s && k < t->n; k++)
                add_point(s, time > 0 ? when(r, row_of(t, k)[0]) / time : row_of(t, k)[0],
                          row_of(t, k)[1]);
            some |= s && s->n;
        }
    return some;
}

static void draw_losses(page *g) {
    static const struct {
        double seconds, from;
        const char *name;
    } units[] = {{86400, 3, "days"}, {3600, 2, "hours"}, {60, 3, "minutes"}, {1, 0, "seconds"}};

    int of, k = 0;
    char below[120], title[80], number[32];
    const size_t missing = g->last_second > 0 ? without_time(g) : 0;
    while (g->last_second < units[k].from * units[k].seconds) k++;
    snprintf(below, sizeof below, "%s of wall time%s", units[k].name,
             g->estimated ? " (from tokens per second)" : "");
    if (missing)
        snprintf(below + strlen(below), 40, "; without %.20s run%s",
                 svg_number(number, (double)missing, 0), tr_s(missing));
    for (of = 0; of < UNITS; of++) {
        panel p, q;
        svg_axis y = {0, 0, 0, 0, 0};
        int timed;
        memset(&p, 0, sizeof p);
        memset(&q, 0, sizeof q);
        timed = g->last_second > 0 && loss_panel(g, &q, of, units[k].seconds);
        if (loss_panel(g, &p, of, 0)) {
            by_step(g, &p);
            p.x = EDGE / 2;
            q.x = WIDTH / 2 + 4;
            p.y = q.y = g->y;
            p.w = timed ? WIDTH / 2 - 4 - EDGE / 2 : WIDTH - EDGE;
            q.w = WIDTH / 2 - 4 - EDGE / 2;
            p.h = q.h = 270;
            /* on a logarithmic step axis, the large first values require a larger
               range, which the panel by time does not share */
            p.as = q.as = opt.log_x ? NULL : &y;
            p.title = unit[of].title;
            q.hi = g->last_second / units[k].seconds;
            q.below = below;
            snprintf(title, sizeof title, "%s by time", unit[of].title);
            q.title = title;
            if (draw_panel(&g->out, &p)) g->y += 270;
            if (timed) draw_panel(&g->out, &q);
        }
        free_panel(&p);
        free_panel(&q);
    }
}

/* Draws the other columns of the training records: four panels in one row if there are
   exactly four panels, otherwise three per row. */
static void draw_columns(page *g) {
    static const struct {
        const char *title;
        int style;
    } is[COLUMNS] = {{NULL, 0},
                     {NULL, 0},
                     {NULL, 0},
                     {"learning rate", PLAIN},
                     {"tokens per second", NOISY},
                     {"gradient norm", NOISY},
                     {"mean span and ramp", PLAIN},
                     {"gate temperature", PLAIN},
                     {"expected time of blocks", PLAIN},
                     {NULL, 0}};

    panel p[COLUMNS];
    int c, n = 0, across, points;
    size_t i, k;
    for (c = LR; c < LOSS; c++) {
        memset(&p[n], 0, sizeof p[n]);
        for (points = 0, i = 0; i < g->all->n; i++) {
            const rows *t = &g->all->v[i].train;
            series *s = add_series(&p[n], t->n, is[c].style, ink(g, i, 0), strokes(i));
            for (k = 0; s && k < t->n; k++) add_point(s, row_of(t, k)[STEP], row_of(t, k)[c]);
            points |= s && s->n;
        }
        by_step(g, &p[n]);
        p[n].title = is[c].title;
        p[n].zero = 1;
        p[n].log_y = c == NORM ? MAYBE : 0;
        if (points)
            n++;
        else
            free_panel(&p[n]);
    }
    across = n == 4 ? 4 : 3;
    for (c = 0; c < n; c++) {
        p[c].w = (double)(WIDTH - EDGE) / across;
        p[c].x = EDGE / 2 + p[c].w * (c % across);
        p[c].y = g->y + 150.0 * (c / across);
        p[c].h = 150;
        draw_panel(&g->out, &p[c]);
    }
    g->y += 150.0 * ((n + across - 1) / across);
}

/* Writes a title. If there are several runs, adds the name of the run. */
static void heading(page *g, const char *title, const run *r) {
    svg_add(&g->out,
            "<text x=\"%n\" y=\"%n\" font-size=\"12\"><tspan font-weight=\"bold\">%t</tspan>",
            EDGE + 0.0, g->y + 14, title);
    if (g->all->n > 1) svg_add(&g->out, " of %t", r->name);
    svg_add(&g->out, "</text>\n");
}

/* Writes the viridis colour for t (0 to 1) to `out`, and returns `out`. */
static const char *shade(char out[8], double t) {
    static const unsigned char at[10][3] = {{68, 1, 84},    {72, 40, 120},  {62, 73, 137},
                                            {49, 104, 142}, {38, 130, 142}, {31, 158, 137},
                                            {53, 183, 121}, {109, 205, 89}, {180, 222, 44},
                                            {253, 231, 37}};
    int k, c, v[3];
    double part;
    if (!(t > 0)) t = 0;
    if (t > 1) t = 1;
    k = t < 1 ? (int)(9 * t) : 8;
    part = 9 * t - k;
    for (c = 0; c < 3; c++) v[c] = (int)(at[k][c] + part * (at[k + 1][c] - at[k][c]) + 0.5);
    snprintf(out, 8, "#%02x%02x%02x", (unsigned)v[0] & 255, (unsigned)v[1] & 255,
             (unsigned)v[2] & 255);
    return out;
}

/* Returns the row height of a span map with R rows. */
static double row_height(size_t R) {
    if (R <= 16) return 14;
    if (R <= 40) return 9;
    if (R <= 100) return 5;
    return R <= 200 ? 3 : 2;
}

/* A span map has one row of cells per head. Cells are CELL pixels wide and have one of
   SHADES colours, or NO_SHADE if there is no value. */
enum { CELL = 4, SHADES = 32, NO_SHADE = 255 };

/* Sets each element of `cell` (columns,R) to the shade of a head's mean span over the
   steps of a column. *most receives the largest span. Returns 0 if memory runs out. */
static int span_cells(const rows *t, const svg_axis *x, size_t columns, unsigned char *cell,
                      double *most) {
    const size_t R = t->width - 1;
    double *sum = (double *)calloc(columns * R, sizeof *sum);
    size_t *count = (size_t *)calloc(columns, sizeof *count), i, c, k;
    int ok = sum && count;
    *most = 0;
    for (i = 0; ok && i < t->n; i++) {
        const double *row = row_of(t, i);
        double at = (svg_at(x, row[0]) - x->from) / CELL;
        /* a record describes the steps before it */
        if (at < 1) at = 1;
        c = at < (double)columns ? (size_t)ceil(at) - 1 : columns - 1;
        for (k = 0; k < R; k++) {
            sum[c * R + k] += row[1 + k];
            if (row[1 + k] > *most) *most = row[1 + k];
        }
        count[c]++;
    }
    if (!(*most > 0)) *most = 1;
    for (c = 0; ok && c < columns; c++) {
        /* a column between two records has the colours of the later record, and a
           column after the last record is empty */
        size_t from = c;
        while (from < columns && !count[from]) from++;
        for (k = 0; k < R; k++) {
            double shades = NO_SHADE;
            if (from < columns)
                shades = SHADES * sum[from * R + k] / (double)count[from] / (*most * 1.0001);
            cell[c * R + k] = (unsigned char)shades;
        }
    }
    free(sum);
    free(count);
    return ok;
}

/* Draws the cells of one shade as a path. `gap` is the space between layers, in rows. */
static void draw_shade(page *g, const unsigned char *cell, size_t columns, size_t R, size_t heads,
                       double gap, int level) {
    char hex[8];
    size_t c, k;
    int any = 0;
    for (k = 0; k < R; k++) {
        size_t layer = k / heads, from = 0, to, at = 0;
        int begun = 0;
        for (c = 0; c < columns; c = to) {
            to = c + 1;
            if (cell[c * R + k] != level) continue;
            while (to < columns && cell[to * R + k] == level) to++;
            from = c;
            if (!any)
                svg_add(&g->out, "<path stroke=\"%s\" d=\"", shade(hex, level / (SHADES - 1.0)));
            any = 1;
            if (!begun)
                svg_add(&g->out, "M%n %n", (double)from, (double)k + 0.5 + gap * (double)layer);
            else
                svg_add(&g->out, "m%n 0", (double)from - (double)at);
            svg_add(&g->out, "h%n", (double)(to - from));
            begun = 1;
            at = to;
        }
    }
    if (any) svg_add(&g->out, "\"/>\n");
}

/* Draws the colour scale for values from 0 to bar->hi, at x. */
static void draw_bar(page *g, const svg_axis *bar, double x) {
    double tick[SVG_TICKS], step;
    char hex[8], text[32];
    size_t n, i;
    int level;
    for (level = 0; level < SHADES; level++)
        svg_add(&g->out, "<rect x=\"%n\" y=\"%n\" width=\"12\" height=\"%n\" fill=\"%s\"/>\n",
                x + 18, bar->from - (bar->from - bar->to) * (level + 1) / SHADES,
                (bar->from - bar->to) / SHADES + 0.4, shade(hex, level / (SHADES - 1.0)));
    n = svg_ticks(bar, 5, tick, &step);
    for (i = 0; i < n; i++)
        svg_text(&g->out, x + 35, svg_at(bar, tick[i]) + 4, " fill=\"#555\"",
                 svg_tick_text(text, bar, tick[i], step, tick[n - 1]));
}

/* Draws the span map: the spans of all heads, by step. Adjacent cells of the same
   colour are drawn as one stroke to keep the file small. */
static void draw_spans(page *g, const run *r) {
    const rows *t = &r->list[SPANS];
    size_t R = t->width - 1, layers = r->layers && R % r->layers == 0 ? r->layers : 1,
           heads = R / layers, columns, i;
    svg_axis x = {0, 0, EDGE + 46, WIDTH - 100, 0}, bar = {0, 0, 0, 0, 0};
    double h = row_height(R), y0 = g->y + 44;
    unsigned char *cell;
    char text[48], number[32];
    int level;
    own_steps(t, &x);
    columns = (size_t)((x.to - x.from) / CELL);
    cell = (unsigned char *)malloc(columns * R);
    if (!cell || !span_cells(t, &x, columns, cell, &bar.hi)) {
        no_memory = 1;
        free(cell);
        return;
    }
    heading(g, "spans of the heads, tokens", r);
    if (heads > 1)
        snprintf(text, sizeof text, "layers from above, %u heads in each", (unsigned)heads);
    svg_text(&g->out, EDGE, g->y + 30, " fill=\"#555\"",
             heads > 1 ? text : "layers from above, one span in each");
    svg_add(&g->out,
            "<g transform=\"translate(%n %n) scale(%n %n)\" shape-rendering=\"crispEdges\" "
            "stroke-width=\"1\" fill=\"none\">\n",
            x.from, y0, (double)CELL, h);
    for (level = 0; level < SHADES; level++)
        draw_shade(g, cell, columns, R, heads, layers > 1 ? 2.0 / h : 0, level);
    free(cell);
    svg_add(&g->out, "</g>\n<g fill=\"#555\" text-anchor=\"end\">\n");
    for (i = 0; layers > 1 && i < layers; i++)
        if ((double)heads * h >= 10 || i % 4 == 0)
            svg_text(&g->out, x.from - 6,
                     y0 + ((double)i + 0.5) * (double)heads * h + 2 * (double)i + 4, "",
                     svg_number(number, (double)(i + 1), 0));
    svg_add(&g->out, "</g>\n");
    h = (double)R * h + 2 * (double)(layers - 1);
    svg_below(&g->out, &x, y0 + h, 7);
    svg_text(&g->out, x.to, y0 + h + 26, " text-anchor=\"end\" fill=\"#555\"", "steps");
    bar.to = y0;
    bar.from = y0 + (h < 90 ? 90 : h);
    draw_bar(g, &bar, x.to);
    g->y = (h < 90 ? bar.from : y0 + h) + 34;
}

/* Draws the compression losses, with one line per layer that has a compressed
   memory. */
static void draw_compression(page *g, const run *r) {
    static const char *const title[2] = {"compression loss",
                                         "relative squared error of compression"};
    size_t n = (r->list[AUX].n ? r->list[AUX].width : r->list[RATIO].width) - 1, i, k, items = 1;
    const char *word = r->memories;
    char hex[64][8];
    double at = EDGE + 4.0;
    int drawn = 0, of;
    for (i = 0; word[i]; i++) items += word[i] == ',';
    if (items != n || strspn(word, "0123456789,") != strlen(word)) word = "";
    for (of = 0; of < 2; of++) {
        const rows *t = &r->list[of ? RATIO : AUX];
        panel p;
        memset(&p, 0, sizeof p);
        for (k = 0; t->n && k + 1 < t->width; k++) {
            size_t shown = k * 64 / (n > 64 ? n : 64);
            const char *tint = n <= COLOURS ? colour[k % COLOURS]
                                            : shade(hex[shown], 0.9 * (double)k / (double)(n - 1));
            series *s = add_series(&p, t->n, NOISY, tint, "");
            for (i = 0; s && i < t->n; i++)
                if (row_of(t, i)[1 + k] > 0) add_point(s, row_of(t, i)[0], row_of(t, i)[1 + k]);
        }
        by_step(g, &p);
        p.x = of ? WIDTH / 2 + 4 : EDGE / 2;
        p.y = g->y + 36;
        p.w = WIDTH / 2 - 4 - EDGE / 2;
        p.h = 180;
        p.title = title[of];
        p.log_y = MAYBE;
        drawn |= draw_panel(&g->out, &p);
    }
    if (!drawn) return;
    heading(g, "compression by layer", r);
    for (k = 0; k < n; k++) {
        size_t shown = k * 64 / (n > 64 ? n : 64), len = strcspn(word, ",");
        char name[32], number[32];
        if (n > 8 && k % ((n + 7) / 8) && k + 1 < n) {
            word += len + (word[len] == ',');
            continue;
        }
        svg_number(number, (double)(k + 1), 0);
        snprintf(name, sizeof name, "%s %.10s", *word || n == r->layers ? "layer" : "memory",
                 *word ? word : number);
        if (*word && len < 10) name[6 + len] = 0;
        svg_add(&g->out,
                "<path d=\"M%n %nh14\" stroke=\"%s\" stroke-width=\"2\"/>"
                "<text x=\"%n\" y=\"%n\">%s</text>\n",
                at, g->y + 26, n <= COLOURS ? colour[k % COLOURS] : hex[shown], at + 18, g->y + 30,
                name);
        at += 92;
        word += len + (word[len] == ',');
    }
    g->y += 36 + 180;
}

/* Writes the title and, for each run, a line with the model, its size, the last step
   and the results. */
static void draw_head(page *g, const char **title) {
    size_t i;
    int same = 1, split, trained = 0, tests = 0, evals = 0, k;
    for (i = 1; i < g->all->n; i++) same &= strcmp(g->all->v[i].family, g->all->v[0].family) == 0;
    if (opt.title)
        *title = opt.title;
    else if (same && *g->all->v[0].family)
        *title = g->all->v[0].family;
    else
        *title = g->all->n > 1 ? "Training runs" : "Training run";
    svg_text(&g->out, EDGE, 24, " font-size=\"16\" font-weight=\"bold\" fill=\"#111\"", *title);
    g->y = 42;
    for (i = 0; i < g->all->n; i++, g->y += 16) {
        const run *r = &g->all->v[i];
        char text[32], line[32];
        const rows *all_steps = r->train.n ? &r->train : &r->eval[!r->eval[VALID].n];
        double last = row_of(all_steps, all_steps->n - 1)[STEP];
        trained |= r->train.n > 0;
        svg_add(&g->out, "<path d=\"M%n %nh22\" stroke=\"%s\" stroke-width=\"2.5\"%s/>", EDGE + 0.0,
                g->y - 4, ink(g, i, 0), strokes(i));
        svg_add(&g->out, "<text x=\"%n\" y=\"%n\"><tspan font-weight=\"bold\">%t</tspan>",
                EDGE + 29.0, g->y, r->name);
        if (*r->family && *title != r->family) svg_add(&g->out, ", %t", r->family);
        if (r->params >= 1e5)
            svg_add(&g->out, ", %sM parameters",
                    svg_number(line, r->params / 1e6, r->params < 1e7 ? 2 : 1));
        else if (r->params > 0)
            svg_add(&g->out, ", %s parameters", svg_number(line, r->params, 0));
        svg_number(line, last, 0);
        if (opt.axis)
            svg_add(&g->out, ", %s %t", line, opt.axis);
        else
            svg_add(&g->out, ", step %s", line);
        for (split = 0; split < SPLITS; split++) {
            const rows *t = &r->eval[split];
            double v = t->n ? row_of(t, t->n - 1)[1] : 0;
            if (!t->n) continue;
            if (split == TEST)
                tests = 1;
            else
                evals = 1;
            k = v < 1000 ? 2 : 0;
            svg_number(text, v, v < 10 ? 3 : k);
            svg_add(&g->out, ", %s %s %s", split_name[split], unit[r->unit].title, text);
        }
        svg_add(&g->out, "</text>\n");
    }
    svg_add(&g->out,
            "<text x=\"%n\" y=\"%n\" fill=\"#555\">%s",
            EDGE + 29.0, g->y,
            trained ? "Lines: training, means of records (faint: the records)"
                    : "Evaluations only");
    if (evals)
        svg_add(&g->out, "<tspan%s>; dots: validation</tspan>",
                g->all->n > 1 ? "" : " fill=\"#D55E00\"");
    svg_add(&g->out, tests ? "; diamonds: test</text>\n" : "</text>\n");
    g->y += 12;
}

static int draw(const runs *all, char err[TR_ERR]) {
    page g;
    const char *title;
    double head;
    size_t i, k;
    int split, ok;
    memset(&g, 0, sizeof g);
    g.all = all;
    g.first_step = HUGE_VAL;
    for (i = 0; i < all->n; i++) {
        const run *r = &all->v[i];
        const rows *t = &r->train;
        for (k = 0; k < t->n; k++) {
            const double *row = row_of(t, k);
            if (row[STEP] > 0 && row[STEP] < g.first_step) g.first_step = row[STEP];
            if (row[STEP] > g.last_step) g.last_step = row[STEP];
            if (row[SECONDS] > g.last_second) g.last_second = row[SECONDS];
        }
        g.estimated |= t->n && !r->timed && so_far(r) > 0;
        for (split = 0; split < SPLITS; split++)
            for (t = &r->eval[split], k = 0; k < t->n; k++) {
                double step = row_of(t, k)[0];
                if (step > 0 && step < g.first_step) g.first_step = step;
                if (step > g.last_step) g.last_step = step;
            }
    }
    if (!(g.last_step > 0)) g.last_step = 1;
    if (!(g.first_step < g.last_step)) g.first_step = g.last_step / 10;
    draw_head(&g, &title);
    head = g.y;
    draw_losses(&g);
    draw_columns(&g);
    for (i = 0; i < all->n; i++)
        if (all->v[i].list[SPANS].n) draw_spans(&g, &all->v[i]);
    for (i = 0; i < all->n; i++) {
        const rows *t = &all->v[i].list[PI];
        svg_axis steps = {0, 0, 0, 0, 0};
        if (!t->n || (t->width - 1) % 3) continue;
        own_steps(t, &steps);
        if (all->n > 1) {
            heading(&g, "search", &all->v[i]);
            g.y += 18;
        }
        g.y += 4
               + svg_shares(&g.out, t->v, t->n, (t->width - 1) / 3, &steps, EDGE, g.y,
                            WIDTH - 2 * EDGE);
    }
    for (i = 0; i < all->n; i++)
        if (all->v[i].list[AUX].n || all->v[i].list[RATIO].n) draw_compression(&g, &all->v[i]);
    if (no_memory)
        ok = tr_fail(err, TR_ERR, "out of memory: cannot draw the picture");
    else if (!(g.y > head))
        ok = tr_fail(err, TR_ERR, "no value in the log%s can be drawn", all->n > 1 ? "s" : "");
    else
        ok = svg_save(opt.out, title, WIDTH, floor(g.y + 8), &g.out, err, TR_ERR);
    tr_buf_free(&g.out);
    return ok;
}


// >>main

/* Refuses to overwrite a log, or a file that is not an SVG. */
static int may_write(const char *path, char **in, size_t n, char err[TR_ERR]) {
    struct stat a, b;
    char first[6] = "";
    size_t i;
    if (strcmp(path, "-") == 0 || stat(path, &a) != 0 || !S_ISREG(a.st_mode)) return 1;
    for (i = 0; i < n; i++)
        if (strcmp(in[i], "-") && stat(in[i], &b) == 0 && a.st_dev == b.st_dev
            && a.st_ino == b.st_ino)
            return tr_fail(err, TR_ERR, "--out: expected a file other than the log, got %.300s",
                           path);
    if (tr_first_bytes(path, first, 5) && memcmp(first, "<svg", 4) && memcmp(first, "<?xml", 5))
        return tr_fail(err, TR_ERR,
                       "--out: expected a new file or an SVG file, got %.300s: choose another name",
                       path);
    return 1;
}

static int work(char **in, size_t n, char err[TR_ERR]) {
    runs all = {NULL, 0, 0};
    size_t i, k;
    int ok = 1;
    if (!n)
        return tr_fail(err, TR_ERR,
                       "no log is given: for example, plot run.jsonl -o run.svg; see --help");
    if (!opt.out)
        return tr_fail(err, TR_ERR,
                       "--out is missing: give the output file, for example -o run.svg");
    for (i = 0, k = 0; i < n; i++) k += strcmp(in[i], "-") == 0;
    if (k > 1) return tr_fail(err, TR_ERR, "standard input (-) can be given only once");
    ok = may_write(opt.out, in, n, err);
    for (i = 0; ok && i < n; i++) {
        const char *name = strrchr(in[i], '/');
        name = name && name[1] ? name + 1 : in[i];
        for (k = 0; k < n; k++) { /* files with the same name are shown with their directories */
            const char *other = strrchr(in[k], '/');
            if (k != i && strcmp(other && other[1] ? other + 1 : in[k], name) == 0) {
                name = in[i];
                break;
            }
        }
        ok = read_log(&all, in[i], strcmp(in[i], "-") ? name : "standard input", err);
    }
    if (ok) share_measure(&all);
    ok = ok && draw(&all, err);
    for (i = 0; i < all.n; i++) free_run(&all.v[i]);
    free(all.v);
    return ok;
}

int main(int argc, char **argv) {
    char err[TR_ERR], **word = (char **)malloc(2 * ((size_t)argc + 1) * sizeof *word),
                      **in = word + argc + 1;
    static char plot[] = "plot";
    size_t n = 0;
    int i, words = 0, got, ok;
    tr_standard_streams();
    if (!word) {
        fprintf(stderr, "plot: out of memory: cannot read the command line\n");
        return 2;
    }
    word[words++] = argc ? argv[0] : plot;
    for (i = 1; i < argc; i++) { /* separate the logs from the options */
        const tr_opt *p;
        tr_argument a;
        if (strcmp(argv[i], "--") == 0) {
            while (++i < argc) in[n++] = argv[i];
            break;
        }
        if (!tr_is_option(&options, argv[i])) {
            in[n++] = argv[i];
            continue;
        }
        a = tr_read_argument(argv[i]);
        p = a.value ? NULL : tr_find_option(&options, a.name, a.n);
        word[words++] = argv[i];
        if (p && p->type != TR_T_FLAG && i + 1 < argc) word[words++] = argv[++i];
    }
    word[words] = NULL;
    got = tr_parse(&options, words, word, err, TR_ERR);
    ok = got == 2;
    if (got == 1 && opt.version)
        ok = printf("plot, seqtx %s\n", STX_VERSION) > 0 && fflush(stdout) == 0;
    else if (got == 1)
        ok = work(in, n, err);
    if (!ok) fprintf(stderr, "plot: %s\n", got == 1 && opt.version ? strerror(errno) : err);
    tr_options_free(&options);
    free(word);
    return ok ? 0 : 2;
}
