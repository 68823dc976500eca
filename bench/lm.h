/* lm.h - what the benchmarks of language models of any family (stx_lm) share: options,
   a contender that trains, the start of a contest. Included after the library; the
   program fills in `family`. */
#ifndef BENCH_LM_H
#define BENCH_LM_H
#include "cpu.h"

static struct {
    int quick, threads, rounds, warmup, steps, batch;
    const char *self, *data, *python, *python_plain, *peer, *work, *only, *config, *without;
} opt = {0, 0, 0, -1, 0, 0, NULL, NULL, NULL, NULL, NULL, ".", NULL, NULL, ""};

static inline int rounds(int usual) {
    return opt.rounds ? opt.rounds : opt.quick ? 3 : usual;
}

/* Is the name in a list with commas? */
static inline int listed(const char *list, const char *name) {
    size_t n = strlen(name);
    for (; *list; list += strcspn(list, ","), list += *list == ',')
        if (strcspn(list, ",") == n && !strncmp(list, name, n)) return 1;
    return 0;
}

static struct {
    char text[16][16];
    int n;
} pool;

static inline char *number(int v) { /* lasts until 16 more are asked for */
    char *s = pool.text[pool.n++ % 16];
    snprintf(s, sizeof pool.text[0], "%d", v);
    return s;
}

/* Memory that can be had, in bytes */
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
        die("the file of --data cannot be read");
    p = (unsigned char *)malloc((size_t)size + 1);
    if (!p || fread(p, 1, (size_t)size, f) != (size_t)size)
        die("the file of --data cannot be read");
    fclose(f);
    *n = (size_t)size;
    return p;
}

static inline void params_save(stx_ctx *x, const stx_params *params, const char *path) {
    stx_writer *w = stx_writer_create(x);
    stx_params_save(w, params, "");
    stx_writer_finish(w, path);
    check(x);
}


// >>worker: a model in training, with the options, data and answers of bench/peers

static struct {
    int T, B, threads, steps, warmup, train, precision, no_update, radam, cosine, lr_warmup,
        max_iter, seed, token_bytes;
    double lr, decay, clip;
    const char *data, *load, *save, *curve;
} job = {128, 8, 0, 10, 0, -1, F32, 0, 0, 0, 0, 400000, 1, 1, 3e-4, 0.1, 1, NULL, NULL, NULL, NULL};

/* Number i of a file of --data: a byte, or a number of 32 bits */
static inline int32_t token_at(const unsigned char *data, size_t i) {
    int32_t v;
    if (job.token_bytes == 1) return data[i];
    memcpy(&v, data + 4 * i, sizeof v);
    return v;
}

/* An option of the family's own: one of the three is not NULL. A flag (least -1) has
   no value. */
typedef struct {
    const char *name;
    int *whole, least;
    double *real;
    const char **text;
} lm_option;

/* What main() fills in */
static struct {
    const char *program;          /* its name in messages */
    const lm_option *options;     /* the last one's name is NULL */
    stx_lm (*create)(stx_ctx *x); /* the model that the options describe */
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
    if (job.load) {
        stx_file *f = stx_file_open(x, job.load);
        stx_params_load(t->lm.params, f, "");
        stx_file_close(f);
        check(x);
    }
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
    if (t->stream <= t->T) die("too few bytes for this batch and block");
    t->in = (int32_t *)malloc(2 * t->B * t->T * sizeof *t->in);
    if (!t->in) die("no memory");
    t->out = t->in + t->B * t->T;
    check(x);
}

static inline void trainee_free(trainee *t) {
    free(t->text);
    free(t->in);
    if (t->state) t->lm.state_free(t->state);
    stx_destroy(t->x);
}

/* Gives the mean nll, in nats. Batch row b is the b-th of B equal parts; at their end
   training starts again at 0, with an empty state. */
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

/* --train: N steps, a line each */
static inline void train_curve(trainee *t) {
    FILE *f = job.curve ? fopen(job.curve, "w") : stdout;
    int k;
    if (!f) die("the file of --curve cannot be written");
    for (k = 0; k < job.train; k++) {
        fprintf(f, "%d %.7f\n", k + 1, trainee_step(t));
        fflush(f);
        check(t->x);
    }
    if (f != stdout && fclose(f)) die("the file of --curve cannot be written");
}

static inline int worker(void) {
    trainee t;
    double first = NAN, norm = NAN;
    char line[64];
    int k;
    stx_ctx *x = context(job.precision, job.threads);
    if (!x) {
        fprintf(stderr, "cannot: %s is not in this build of the library\n",
                precision_name[job.precision]);
        return 3;
    }
    trainee_create(&t, x);
    if (!job.data) {
        trainee_free(&t);
        return job.save ? 0 : 2;
    }
    if (job.train >= 0) {
        train_curve(&t);
        trainee_free(&t);
        return 0;
    }
    for (k = 0; k < job.warmup; k++) {
        double nll = trainee_step(&t);
        if (!k) first = nll;
    }
    check(x);
    fprintf(stderr, "ready\n");
    while (fgets(line, sizeof line, stdin)) {
        double round_first = NAN, nll = NAN, at = seconds();
        for (k = 0; k < job.steps; k++) {
            nll = trainee_step(&t);
            if (t.done == 1) first = nll;
            if (k == 0) round_first = nll;
        }
        at = seconds() - at;
        check(x);
        printf(
            "{\"tokens_per_s\": %.6g, \"loss_first\": %.9g, \"loss_last\": %.9g, \"loss_step1\": "
            "%.9g, \"steps_done\": %llu, "
            "\"seconds\": %.6g, \"peak_bytes\": %zu",
            (double)(t.B * t.T * (size_t)job.steps) / at, round_first, nll, first,
            (unsigned long long)t.done, at, stx_peak_bytes(x));
        if (job.no_update) {
            norm = grad_norm(t.lm.params);
            printf(", \"grad_norm\": %.9g", norm);
        }
        printf("}\n");
        fflush(stdout);
    }
    trainee_free(&t);
    return 0;
}

/* The options of the peers that this program knows, the family's among them, and
   --save FILE (initial parameters). 1, or 0: said why not */
static inline int worker_options(int argc, char **argv) {
    static const lm_option shared[] = {{"--block-sz", &job.T, 1, NULL, NULL},
                                       {"--batch-sz", &job.B, 1, NULL, NULL},
                                       {"--threads", &job.threads, 0, NULL, NULL},
                                       {"--steps", &job.steps, 1, NULL, NULL},
                                       {"--warmup", &job.warmup, 0, NULL, NULL},
                                       {"--train", &job.train, 0, NULL, NULL},
                                       {"--lr-warmup", &job.lr_warmup, 0, NULL, NULL},
                                       {"--max-iter", &job.max_iter, 1, NULL, NULL},
                                       {"--seed", &job.seed, 0, NULL, NULL},
                                       {"--no-update", &job.no_update, -1, NULL, NULL},
                                       {"--lr", NULL, 0, &job.lr, NULL},
                                       {"--weight-decay", NULL, 0, &job.decay, NULL},
                                       {"--clip", NULL, 0, &job.clip, NULL},
                                       {"--data", NULL, 0, NULL, &job.data},
                                       {"--load", NULL, 0, NULL, &job.load},
                                       {"--save", NULL, 0, NULL, &job.save},
                                       {"--curve", NULL, 0, NULL, &job.curve},
                                       {NULL, NULL, 0, NULL, NULL}};
    int i;
    for (i = 1; i < argc; i++) {
        const char *a = argv[i], *v = i + 1 < argc ? argv[i + 1] : NULL;
        const lm_option *o = shared;
        int known = 0;
        if (!strcmp(a, "--worker")) continue;
        while (o->name && strcmp(o->name, a)) o++;
        if (!o->name)
            for (o = family.options; o->name && strcmp(o->name, a);) o++;
        if (o->name && o->least < 0) {
            *o->whole = 1;
            continue;
        }
        if (!v) break;
        if (o->name) {
            if (o->whole)
                *o->whole = whole(v, o->least, a);
            else if (o->real)
                *o->real = strtod(v, NULL);
            else
                *o->text = v;
            known = 1;
        }
        if (!strcmp(a, "--dtype") && (!strcmp(v, "f32") || !strcmp(v, "bf16"))) {
            job.precision = !strcmp(v, "bf16");
            known = 1;
        }
        if (!strcmp(a, "--optim") && (!strcmp(v, "adamw") || !strcmp(v, "radam"))) {
            job.radam = !strcmp(v, "radam");
            known = 1;
        }
        if (!strcmp(a, "--schedule") && (!strcmp(v, "constant") || !strcmp(v, "cosine"))) {
            job.cosine = !strcmp(v, "cosine");
            known = 1;
        }
        if (!known) break;
        i++;
    }
    if (i == argc) return 1;
    fprintf(stderr, "%s --worker: unknown option, or no value: %s\n", family.program, argv[i]);
    return 0;
}


// >>contest

enum {
    LM_OWN,
    LM_PEER,
    LM_PLAIN
}; /* this program; PyTorch; PyTorch in the surroundings in which it is installed */

/* own: further options of this one, up to a NULL */
typedef struct {
    const char *name;
    double tolerance;
    int precision, compile, who;
    const char *own[4];
} lm_kind;

/* Does --without leave it out? */
static inline int lm_without(const lm_kind *k) {
    return (k->compile && listed(opt.without, "compiled"))
           || (k->who == LM_PLAIN && listed(opt.without, "installed"))
           || (k->who != LM_OWN && listed(opt.without, "peer"))
           || (k->precision == BF16 && listed(opt.without, "bf16"));
}

/* Starts the n kinds of contenders but those that skip or --without marks, all with
   the options `shared` (ends with a NULL), up to the end of their first rounds. What
   memory one needs is guessed from those before it, for number `twice` double (-1:
   none). */
static inline void lm_start(contender *c, const lm_kind *kind, int n, int twice, const int *skip,
                            const char *what, char *const shared[]) {
    double largest = 0;
    int i, k;
    for (i = 0; i < n; i++) {
        char *argv[MAX_ARGS], now[160];
        double want = 1.2 * largest * (i == twice ? 2 : 1); /* all are in memory at once */
        int m = 0;
        if (skip[i] || lm_without(&kind[i])) continue;
        c[i].name = kind[i].name;
        c[i].tolerance = kind[i].tolerance;
        if (want > available()) {
            snprintf(c[i].cannot, sizeof c[i].cannot,
                     "not enough memory beside the others, about %.0f MB", want * 1e-6);
            continue;
        }
        if (kind[i].who != LM_OWN
            && (!opt.python || !opt.peer || (kind[i].who == LM_PLAIN && !opt.python_plain))) {
            snprintf(c[i].cannot, sizeof c[i].cannot, "no python3 with torch was found");
            continue;
        }
        snprintf(now, sizeof now, "%s: warm-up of %s ..", what, c[i].name);
        progress(now);
        if (kind[i].who == LM_OWN) {
            argv[m++] = (char *)(uintptr_t)opt.self;
            argv[m++] = (char *)(uintptr_t) "--worker";
        } else {
            argv[m++] = (char *)(uintptr_t)(kind[i].who == LM_PLAIN ? opt.python_plain
                                                                    : opt.python);
            argv[m++] = (char *)(uintptr_t)opt.peer;
            if (kind[i].compile) argv[m++] = (char *)(uintptr_t) "--compile";
        }
        for (k = 0; k < 4 && kind[i].own[k]; k++) argv[m++] = (char *)(uintptr_t)kind[i].own[k];
        argv[m++] = (char *)(uintptr_t) "--dtype";
        argv[m++] = (char *)(uintptr_t)precision_name[kind[i].precision];
        argv[m++] = (char *)(uintptr_t) "--data";
        argv[m++] = (char *)(uintptr_t)opt.data;
        for (k = 0; shared[k]; k++) argv[m++] = shared[k];
        argv[m] = NULL;
        contender_start(&c[i], argv, opt.work, i);
        if (!c[i].on) continue;
        look_at(&c[i]);
        if (c[i].memory > largest) largest = c[i].memory;
    }
}


// >>main

/* The command line of a benchmark into opt: 1; 0: --help; -1: said what is wrong */
static inline int lm_parse(int argc, char **argv, const char *usage) {
    int i;
    opt.self = argv[0];
    for (i = 1; i < argc; i++) {
        const char *a = argv[i], *v = i + 1 < argc ? argv[i + 1] : NULL;
        if (!strcmp(a, "--quick")) {
            opt.quick = 1;
            continue;
        }
        if (!strcmp(a, "--help")) {
            fputs(usage, stdout);
            return 0;
        }
        i++;
        if (!strcmp(a, "--threads"))
            opt.threads = whole(v, 1, a);
        else if (!strcmp(a, "--rounds")) {
            opt.rounds = whole(v, 1, a);
            if (opt.rounds > MAX_ROUNDS) opt.rounds = MAX_ROUNDS;
        } else if (!strcmp(a, "--batch"))
            opt.batch = whole(v, 1, a);
        else if (!strcmp(a, "--steps"))
            opt.steps = whole(v, 1, a);
        else if (!strcmp(a, "--warmup"))
            opt.warmup = whole(v, 0, a);
        else if (!v) {
            fprintf(stderr, "%s: unknown option, or no value: %s\n%s", family.program, a, usage);
            return -1;
        } else if (!strcmp(a, "--only"))
            opt.only = v;
        else if (!strcmp(a, "--config"))
            opt.config = v;
        else if (!strcmp(a, "--without")) {
            const char *p;
            size_t n;
            for (p = v; *p; p += n + (p[n] == ',')) {
                n = strcspn(p, ",");
                if ((n != 8 || memcmp(p, "compiled", 8)) && (n != 9 || memcmp(p, "installed", 9))
                    && (n != 4 || (memcmp(p, "bf16", 4) && memcmp(p, "peer", 4)))) {
                    fprintf(stderr, "%s: --without %s: want some of compiled,installed,bf16,peer\n",
                            family.program, v);
                    return -1;
                }
            }
            opt.without = v;
        } else if (!strcmp(a, "--data"))
            opt.data = v;
        else if (!strcmp(a, "--python"))
            opt.python = v;
        else if (!strcmp(a, "--python-plain"))
            opt.python_plain = v;
        else if (!strcmp(a, "--peer"))
            opt.peer = v;
        else if (!strcmp(a, "--work"))
            opt.work = v;
        else if (!strcmp(a, "--append"))
            report_path = v;
        else {
            fprintf(stderr, "%s: unknown option %s\n%s", family.program, a, usage);
            return -1;
        }
    }
    if (!opt.threads) {
        stx_ctx *x = stx_create(NULL);
        opt.threads = stx_threads(x);
        stx_destroy(x);
    }
    signal(SIGPIPE, SIG_IGN); /* a contender that died is reported, and is not the end */
    return 1;
}
#endif
