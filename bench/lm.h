/* lm.h - shared by the benchmarks of language models (stx_lm): options, a training
   contender, and a contest. Include it after the library. main() sets `family`. */
#ifndef BENCH_LM_H
#define BENCH_LM_H
#include "cpu.h"

static const option lm_options[] = {OPTION_TEXT("--config", &opt.config),
                                    OPTION_TEXT("--without", &opt.without), OPTION_END};

#define LM_USAGE \
  "  --without LIST     omits contenders, some of compiled,installed,bf16,peer\n" \
  "  --batch N, --steps N    streams, and steps per round, of all models (default: per model)\n"

/* Returns the available memory in bytes. */
static inline double available(void) {
    char line[256];
    double v = 4e9;
    FILE *f = fopen("/proc/meminfo", "r");
    while (f && fgets(line, sizeof line, f))
        if (!strncmp(line, "MemAvailable:", 13)) v = strtod(line + 13, NULL) * 1024;
    if (f) fclose(f);
    return v;
}

static inline unsigned char *read_bytes(const char *path, size_t *n) {
    FILE *f = path ? fopen(path, "rb") : NULL;
    unsigned char *p;
    long size = -1;
    if (!f || fseek(f, 0, SEEK_END) || (size = ftell(f)) < 0 || fseek(f, 0, SEEK_SET))
        die("cannot read the --data file");
    p = (unsigned char *)malloc((size_t)size + 1);
    if (!p || fread(p, 1, (size_t)size, f) != (size_t)size)
        die("cannot read the --data file");
    fclose(f);
    *n = (size_t)size;
    return p;
}

/* Returns the nll of a token, computed from logits or from log p. */
static inline double nll_of(const stx_real *logits, size_t V, int32_t token) {
    double top = (double)logits[0], sum = 0;
    size_t v;
    for (v = 1; v < V; v++)
        if ((double)logits[v] > top) top = (double)logits[v];
    for (v = 0; v < V; v++) sum += exp((double)logits[v] - top);
    return log(sum) + top - (double)logits[token];
}


// >>worker: a model in training, with the options, data and replies of bench/peers

static struct {
    int T, B, threads, steps, warmup, train, precision, no_update, radam, cosine, lr_warmup,
        max_iter, seed, token_bytes;
    double lr, decay, clip;
    const char *data, *load, *save, *curve;
} job = {128, 8, 0, 10, 0, -1, F32, 0, 0, 0, 0, 400000, 1, 1, 3e-4, 0.1, 1, NULL, NULL, NULL, NULL};

/* Returns token i of the --data file, which contains bytes or 32-bit integers. */
static inline int32_t token_at(const unsigned char *data, size_t i) {
    int32_t v;
    if (job.token_bytes == 1) return data[i];
    memcpy(&v, data + 4 * i, sizeof v);
    return v;
}

static struct {
    const option *options;        /* the model's options */
    stx_lm (*create)(stx_ctx *x); /* creates the model that the options describe */
} family;

typedef struct {
    stx_ctx *x;
    stx_lm lm;
    stx_optim *optim;
    void *state;
    stx_schedule lr;
    unsigned char *text;
    int32_t *in, *out;
    size_t B, T, stream, at;
    uint64_t done;
} trainee;

static inline void trainee_create(trainee *t, stx_ctx *x) {
    stx_optim_desc od;
    size_t n;
    memset(t, 0, sizeof *t);
    memset(&od, 0, sizeof od);
    t->x = x;
    t->B = (size_t)job.B;
    t->T = (size_t)job.T;
    t->lm = family.create(x);
    check(x);
    if (job.load) params_load(x, t->lm.params, job.load);
    if (job.save) params_save(x, t->lm.params, job.save);
    if (!job.data) return;

    od.kind = job.radam ? STX_RADAM : STX_ADAMW;
    od.weight_decay = job.decay;
    od.clip = job.clip;
    t->lr.kind = job.cosine ? STX_LR_RECURSIVE : STX_LR_CONSTANT;
    t->lr.lr = job.lr;
    t->lr.warmup = job.cosine ? (uint64_t)job.lr_warmup : 0;
    t->lr.total = (uint64_t)job.max_iter;
    if (!job.no_update) t->optim = stx_optim_create(t->lm.params, &od);
    t->state = t->lm.state_create(t->lm.model, t->B, 0);

    t->text = read_bytes(job.data, &n);
    t->stream = n / (size_t)job.token_bytes / t->B;
    if (t->stream <= t->T) die("the --data file is too short for --batch-sz and --block-sz");
    t->in = (int32_t *)malloc(2 * t->B * t->T * sizeof *t->in);
    if (!t->in) die("out of memory");
    t->out = t->in + t->B * t->T;
    check(x);
}

static inline void trainee_free(trainee *t) {
    free(t->text);
    free(t->in);
    if (t->state) t->lm.state_free(t->state);
    stx_destroy(t->x);
}

/* Runs a step and returns the mean nll in nats. The text is divided into B equal parts,
   and batch row b reads part b. At the end of the parts, training restarts at their
   beginning with an empty state. */
static inline double trainee_step(trainee *t) {
    stx_tensor *loss;
    double nll;
    size_t b, i;
    for (b = 0; b < t->B; b++)
        for (i = 0; i < t->T; i++) {
            t->in[b * t->T + i] = token_at(t->text, b * t->stream + t->at + i);
            t->out[b * t->T + i] = token_at(t->text, b * t->stream + t->at + i + 1);
        }
    stx_begin(t->x, STX_TRAIN);
    if (job.no_update) stx_params_zero_grad(t->lm.params);
    loss = t->lm.loss(t->lm.model, stx_tokens(t->x, t->in, t->B, t->T),
                      stx_tokens(t->x, t->out, t->B, t->T), t->state, t->state);
    stx_backward(t->x, t->lm.total(t->lm.model, loss));
    nll = stx_item(t->x, loss);
    t->done++;
    if (t->optim) {
        stx_optim_step(t->optim, stx_schedule_lr(&t->lr, t->done));
        t->lm.updated(t->lm.model);
    }
    t->at += t->T;
    if (t->at >= t->stream - t->T) {
        t->at = 0;
        t->lm.state_reset(t->state);
    }
    return nll;
}

static inline double grad_norm(const stx_params *p) {
    double sum = 0;
    size_t i, j;
    for (i = 0; i < p->count; i++)
        for (j = 0; j < p->tensor[i]->size; j++)
            sum += (double)p->tensor[i]->grad[j] * (double)p->tensor[i]->grad[j];
    return sqrt(sum);
}

/* Implements --train N: runs N steps and prints one line for each. */
static inline void train_curve(trainee *t) {
    FILE *f = job.curve ? fopen(job.curve, "w") : stdout;
    int k;
    if (!f) die("cannot write the --curve file");
    for (k = 0; k < job.train; k++) {
        fprintf(f, "%d %.7f\n", k + 1, trainee_step(t));
        fflush(f);
        check(t->x);
    }
    if (f != stdout && fclose(f)) die("cannot write the --curve file");
}

/* Runs a round of --steps steps for each line on stdin. */
static inline void train_rounds(trainee *t) {
    reply r;
    char line[64];
    int k;
    memset(&r, 0, sizeof r);
    r.step1 = r.norm = NAN;
    for (k = 0; k < job.warmup; k++) {
        double nll = trainee_step(t);
        if (!k) r.step1 = nll;
    }
    check(t->x);
    fprintf(stderr, "ready\n");
    while (fgets(line, sizeof line, stdin)) {
        double at = seconds();
        for (k = 0; k < job.steps; k++) {
            r.last = trainee_step(t);
            if (t->done == 1) r.step1 = r.last;
            if (k == 0) r.first = r.last;
        }
        r.seconds = seconds() - at;
        check(t->x);
        r.tokens = (double)(t->B * t->T * (size_t)job.steps);
        r.done = t->done;
        if (job.no_update) r.norm = grad_norm(t->lm.params);
        reply_print(t->x, &r);
    }
}

static inline int worker(void) {
    trainee t;
    stx_ctx *x = worker_context(job.precision, job.threads);
    if (!x) return 3;
    trainee_create(&t, x);
    if (!job.data) {
        trainee_free(&t);
        return job.save ? 0 : 2;
    }
    if (job.train >= 0)
        train_curve(&t);
    else
        train_rounds(&t);
    trainee_free(&t);
    return 0;
}

static const option worker_options[] = {
    OPTION_WHOLE("--block-sz", &job.T, 1),
    OPTION_WHOLE("--batch-sz", &job.B, 1),
    OPTION_WHOLE("--threads", &job.threads, 0),
    OPTION_WHOLE("--steps", &job.steps, 1),
    OPTION_WHOLE("--warmup", &job.warmup, 0),
    OPTION_WHOLE("--train", &job.train, 0),
    OPTION_WHOLE("--lr-warmup", &job.lr_warmup, 0),
    OPTION_WHOLE("--max-iter", &job.max_iter, 1),
    OPTION_WHOLE("--seed", &job.seed, 0),
    OPTION_FLAG("--no-update", &job.no_update),
    OPTION_REAL("--lr", &job.lr),
    OPTION_REAL("--weight-decay", &job.decay),
    OPTION_REAL("--clip", &job.clip),
    OPTION_CHOICE("--dtype", &job.precision, "f32,bf16"),
    OPTION_CHOICE("--optim", &job.radam, "adamw,radam"),
    OPTION_CHOICE("--schedule", &job.cosine, "constant,cosine"),
    OPTION_TEXT("--data", &job.data),
    OPTION_TEXT("--load", &job.load),
    OPTION_TEXT("--save", &job.save), /* file for the initial parameters */
    OPTION_TEXT("--curve", &job.curve),
    OPTION_END};

/* Parses the options after --worker: the supported options of the peers, and the
   model's options. Returns 0, or the exit code after reporting an error. */
static inline int worker_parse(int argc, char **argv) {
    int i, taken;
    for (i = 2; i < argc; i += taken) {
        taken = option_take(worker_options, argc, argv, i);
        if (!taken) taken = option_take(family.options, argc, argv, i);
        if (!taken) return option_unknown(argv[i], "");
    }
    return 0;
}


// >>contest

enum { BY_SEQTX, BY_PEER, BY_INSTALLED }; /* BY_INSTALLED: PyTorch with default settings */

typedef struct {
    const char *name;
    double tolerance;
    int precision, compile, who;
    const char *more[3]; /* further options, terminated by NULL */
} lm_kind;

/* The training contenders. */
enum { OWN, OWN_BF16, PEER, PEER_BF16, PEER_COMPILED, PEER_COMPILED_BF16, PEER_PLAIN, CONTENDERS };

static lm_kind lm_kinds[CONTENDERS] = {
    {"seqtx f32", 1e-3, F32, 0, BY_SEQTX, {NULL}},
    {"seqtx bf16", 2e-2, BF16, 0, BY_SEQTX, {NULL}},
    {"PyTorch eager f32", 1e-3, F32, 0, BY_PEER, {NULL}},
    {"PyTorch eager bf16 autocast", 2e-2, BF16, 0, BY_PEER, {NULL}},
    {"PyTorch compiled f32", 1e-3, F32, 1, BY_PEER, {NULL}},
    {"PyTorch compiled bf16 autocast", 2e-2, BF16, 1, BY_PEER, {NULL}},
    {"PyTorch eager f32, as installed", 1e-3, F32, 0, BY_INSTALLED, {NULL}}};

/* Returns nonzero if --without omits the contender. */
static inline int lm_without(const lm_kind *k) {
    return (k->compile && listed(opt.without, "compiled"))
           || (k->who == BY_INSTALLED && listed(opt.without, "installed"))
           || (k->who != BY_SEQTX && listed(opt.without, "peer"))
           || (k->precision == BF16 && listed(opt.without, "bf16"));
}

/* Returns 1 if a contender can run. Otherwise writes the reason to c->cannot. */
static inline int lm_possible(contender *c, const lm_kind *k, double memory) {
    if (memory > available()) {
        snprintf(c->cannot, sizeof c->cannot,
                 "too little free memory while the others run; it needs about %.0f MB",
                 memory * 1e-6);
        return 0;
    }
    if (k->who != BY_SEQTX
        && (!opt.python || !opt.peer || (k->who == BY_INSTALLED && !opt.python_plain))) {
        snprintf(c->cannot, sizeof c->cannot, "no python3 with torch was found");
        return 0;
    }
    return 1;
}

static inline void lm_command(arguments *a, const lm_kind *k, const char *data,
                              const arguments *shared) {
    int i;
    a->n = 0;
    if (k->who == BY_SEQTX)
        arg_text(a, opt.self, "--worker");
    else {
        arg_text(a, k->who == BY_INSTALLED ? opt.python_plain : opt.python, opt.peer);
        if (k->compile) arg(a, "--compile");
    }
    for (i = 0; i < 3 && k->more[i]; i++) arg(a, k->more[i]);
    arg_text(a, "--dtype", precision_name[k->precision]);
    arg_text(a, "--data", data);
    for (i = 0; i < shared->n; i++) arg(a, shared->v[i]);
}

/* Starts n contenders with the options `shared`, except those marked in `skip` (may be
   NULL) or omitted by --without. Waits until all have finished their first rounds. All
   are in memory at the same time, so the memory of each contender is estimated first,
   from the contenders before it. The estimate is doubled for contender number `twice`
   (-1: for none). */
static inline void lm_start(contender *c, const lm_kind *kind, int n, int twice, const int *skip,
                            const char *what, const char *data, const arguments *shared) {
    double largest = 0;
    int i;
    memset(c, 0, (size_t)n * sizeof *c);
    for (i = 0; i < n; i++) {
        arguments a;
        char now[160];
        if ((skip && skip[i]) || lm_without(&kind[i])) continue;
        c[i].name = kind[i].name;
        c[i].tolerance = kind[i].tolerance;
        if (!lm_possible(&c[i], &kind[i], 1.2 * largest * (i == twice ? 2 : 1))) continue;
        snprintf(now, sizeof now, "%s: warm-up of %s ..", what, c[i].name);
        progress(now);
        lm_command(&a, &kind[i], data, shared);
        contender_start(&c[i], a.v, opt.work, i);
        if (!c[i].on) continue;
        look_at(&c[i]);
        if (c[i].memory > largest) largest = c[i].memory;
    }
    probe_begin();
}

/* Adds the options of a training contender to a command line. */
static inline void lm_training_arguments(arguments *a, int B, int steps, int warmup) {
    arg_number(a, "--batch-sz", (size_t)B);
    arg_number(a, "--steps", (size_t)steps);
    arg_number(a, "--warmup", (size_t)warmup);
    arg_number(a, "--threads", (size_t)opt.threads);
    arg_text(a, "--optim", "adamw");
}

static inline int lm_steps(int of_model) {
    if (opt.steps) return opt.steps;
    return opt.quick ? 1 + of_model / 4 : of_model;
}

static inline int lm_warmup(int usual) {
    return opt.warmup >= 0 ? opt.warmup : usual;
}

static inline int lm_rounds(contender *c, int n, int usual, double limit, const char *label) {
    return contest(c, n, rounds(usual), opt.rounds ? 1e9 : limit, label);
}

/* Ends the line that describes the model and prints the table. */
static inline void lm_training_say(contender *c, int r, int steps, int warmup) {
    say(" median of %d rounds of %d step%s after %d discarded steps:\n\n", r, steps,
        steps == 1 ? "" : "s", warmup + steps);
    contest_say(c, CONTENDERS, PEER);
}

/* Prints a table of step times. `tokens` is the number of tokens per step. */
static inline void lm_step_times(const contender *c, double tokens) {
    int i;
    header("contender|ms per step|range");
    for (i = 0; i < CONTENDERS; i++) {
        if (!c[i].fits) continue;
        row_begin();
        cell(0, "%s", c[i].name);
        cell(1, "%.1f", 1e3 * tokens / median(&c[i].rate));
        cell(2, "%.1f - %.1f", 1e3 * tokens / quantile(&c[i].rate, 1),
             1e3 * tokens / quantile(&c[i].rate, 0));
    }
    print_table();
}


// >>summary

typedef struct {
    double rate[CONTENDERS], memory[CONTENDERS];
} lm_found;

static inline void lm_found_nothing(lm_found *f) {
    not_measured(f->rate, CONTENDERS);
    not_measured(f->memory, CONTENDERS);
}

static inline void lm_keep(lm_found *f, const contender *c) {
    int i;
    for (i = 0; i < CONTENDERS; i++) {
        if (!c[i].fits) continue;
        f->rate[i] = median(&c[i].rate);
        f->memory[i] = c[i].memory;
    }
}

/* Number of columns of the summary. */
enum { LM_SUMMARY = 9 };

#define LM_SUMMARY_HEADER \
  "training tokens/s f32|to eager f32|to compiled f32|to eager as installed|bf16|" \
  "to eager bf16|to compiled bf16|memory MB f32|of eager"

static const int lm_summary_digits[LM_SUMMARY] = {0, 2, 2, 2, 0, 2, 2, 0, 2};

static inline void lm_summary(int column, const lm_found *f) {
    const double *v = f->rate, *m = f->memory;
    double value[LM_SUMMARY];
    value[0] = v[OWN];
    value[1] = v[OWN] / v[PEER];
    value[2] = v[OWN] / v[PEER_COMPILED];
    value[3] = v[OWN] / v[PEER_PLAIN];
    value[4] = v[OWN_BF16];
    value[5] = v[OWN_BF16] / v[PEER_BF16];
    value[6] = v[OWN_BF16] / v[PEER_COMPILED_BF16];
    value[7] = m[OWN] * 1e-6;
    value[8] = m[OWN] / m[PEER];
    cell_values(column, value, lm_summary_digits, LM_SUMMARY);
}


// >>main

/* Parses the command line of a benchmark. configs lists the names of its models.
   Returns 0 to continue. Otherwise, the program must exit with the returned value minus 1
   as its status. */
static inline int lm_parse(int argc, char **argv, const char *usage, const char *configs) {
    int ended = parse(argc, argv, usage, lm_options);
    if (ended) return ended;
    require_listed("--without", opt.without, "compiled,installed,bf16,peer");
    require_listed("--config", opt.config, configs);
    return 0;
}

/* Returns nonzero if --only names the whole benchmark or this section of it. */
static inline int section(const char *whole, const char *name) {
    return listed(opt.only, whole) || listed(opt.only, name);
}
#endif
