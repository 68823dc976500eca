/* cpu.h - shared by the CPU benchmarks: options, contexts, the machine probe, and
   training contenders that run interleaved. Include it after the library. */
#ifndef BENCH_CPU_H
#define BENCH_CPU_H
#include "report.h"

enum { MAX_ROUNDS = 64 };

enum { F32, BF16, PRECISIONS }; /* same values as STX_PREC_F32 and STX_PREC_BF16 */

static const char *const precision_name[PRECISIONS] = {"f32", "bf16"};


// >>options

static struct {
    int quick, help, threads, rounds, warmup, steps, batch; /* not given: 0, or -1 for warmup */
    const char *self, *data, *python, *python_plain, *peer, *work, *only, *config, *without;
} opt = {0, 0, 0, 0, -1, 0, 0, NULL, NULL, NULL, NULL, NULL, ".", NULL, NULL, ""};

static const option cpu_options[] = {OPTION_FLAG("--quick", &opt.quick),
                                     OPTION_FLAG("--help", &opt.help),
                                     OPTION_WHOLE("--threads", &opt.threads, 1),
                                     OPTION_WHOLE("--rounds", &opt.rounds, 1),
                                     OPTION_WHOLE("--warmup", &opt.warmup, 0),
                                     OPTION_WHOLE("--steps", &opt.steps, 1),
                                     OPTION_WHOLE("--batch", &opt.batch, 1),
                                     OPTION_TEXT("--data", &opt.data),
                                     OPTION_TEXT("--python", &opt.python),
                                     OPTION_TEXT("--python-plain", &opt.python_plain),
                                     OPTION_TEXT("--peer", &opt.peer),
                                     OPTION_TEXT("--work", &opt.work),
                                     OPTION_TEXT("--append", &report_path),
                                     OPTION_TEXT("--only", &opt.only),
                                     OPTION_END};

static const char shared_usage[] =
    "  --threads N        default: all\n"
    "  --data FILE        text\n"
    "  --python CMD --peer FILE    PyTorch contenders\n"
    "  --python-plain CMD the same python without the settings of PyTorch's tuning guide\n"
    "  --work DIR         for temporary files\n"
    "  --append FILE      also append the tables to this file\n";

/* Parses the command line into opt and into the variables of the options in `more`.
   Returns 0 to continue. Otherwise, the program must exit with the returned value minus 1
   as its status. */
static inline int parse(int argc, char **argv, const char *usage, const option *more) {
    int i, taken;
    opt.self = argv[0];
    for (i = 1; i < argc; i += taken) {
        taken = option_take(cpu_options, argc, argv, i);
        if (!taken) taken = option_take(more, argc, argv, i);
        if (!taken) return 1 + option_unknown(argv[i], usage);
        if (opt.help) {
            printf("%s%s", usage, shared_usage);
            return 1;
        }
    }
    if (opt.rounds > MAX_ROUNDS) opt.rounds = MAX_ROUNDS;
    if (!opt.threads) {
        stx_ctx *x = stx_create(NULL);
        opt.threads = stx_threads(x);
        stx_destroy(x);
    }
    signal(SIGPIPE, SIG_IGN); /* otherwise, writing to a contender that has ended would
                                 end this program */
    return 0;
}

static inline int rounds(int usual) {
    if (opt.rounds) return opt.rounds;
    return opt.quick ? 3 : usual;
}


// >>contexts and files

static inline void check(const stx_ctx *x) {
    if (!stx_ok(x)) die(stx_error(x));
}

/* Creates a context. Returns NULL if this build of the library does not have the
   precision; any other error ends the program. */
static inline stx_ctx *context(int precision, int threads) {
    stx_desc d;
    stx_ctx *x;
    memset(&d, 0, sizeof d);
    d.threads = threads;
    d.precision = precision;
    x = stx_create(&d);
    if (!x) die("out of memory");
    if (precision != F32 && stx_error_code(x) == STX_ERR_DEVICE) {
        stx_destroy(x);
        return NULL;
    }
    check(x);
    return x;
}

static inline int have_bf16(void) {
    stx_ctx *x = context(BF16, 1);
    stx_destroy(x);
    return x != NULL;
}

static const char *const no_bf16 = " bf16: not in this build of the library.";

/* Like context(), but for a contender: reports the reason before it returns NULL. */
static inline stx_ctx *worker_context(int precision, int threads) {
    stx_ctx *x = context(precision, threads);
    if (!x)
        fprintf(stderr, "cannot: %s is not in this build of the library\n",
                precision_name[precision]);
    return x;
}

static inline void fill_random(stx_real *a, size_t n, uint64_t stream) { /* uniform in [-1,1) */
    size_t i, e;
    for (i = 0; i < n; i += 4) {
        uint32_t r[4];
        stx_philox(20190519, stream, i, r);
        for (e = 0; e < 4 && i + e < n; e++) a[i + e] = (stx_real)((double)r[e] / 2147483648.0 - 1);
    }
}

static inline stx_real *persist(stx_ctx *x, size_t n) {
    stx_real *p = (stx_real *)stx_persist(x, n * sizeof *p);
    check(x);
    return p;
}

static inline void params_save(stx_ctx *x, const stx_params *params, const char *path) {
    stx_writer *w = stx_writer_create(x);
    stx_params_save(w, params, "");
    stx_writer_finish(w, path);
    check(x);
}

static inline void params_load(stx_ctx *x, stx_params *params, const char *path) {
    stx_file *f = stx_file_open(x, path);
    stx_params_load(params, f, "");
    stx_file_close(f);
    check(x);
}

/* The reply of this library's contenders after a round (the protocol of bench/peers).
   It ends with the gradient norm, if measured. */
typedef struct {
    double tokens, seconds, first, last, step1, norm;
    unsigned long long done;
} reply;

static inline void reply_print(const stx_ctx *x, const reply *r) {
    printf("{\"tokens_per_s\": %.6g, \"loss_first\": %.9g, \"loss_last\": %.9g, ",
           r->tokens / r->seconds, r->first, r->last);
    printf("\"loss_step1\": %.9g, \"steps_done\": %llu, \"seconds\": %.6g, \"peak_bytes\": %zu",
           r->step1, r->done, r->seconds, stx_peak_bytes(x));
    if (measured(r->norm)) printf(", \"grad_norm\": %.9g", r->norm);
    printf("}\n");
    fflush(stdout);
}

/* Generates bytes in one stream. Returns the time in seconds of n sampled tokens.
   *prompt_rate receives the tokens per second of the prompt. */
static inline double generate(const stx_lm *lm, void *gen, const int32_t *prompt, size_t length,
                              int n, double *prompt_rate) {
    stx_sampling how;
    stx_real work[256];
    const stx_real *logits;
    double at = seconds();
    int i;
    memset(&how, 0, sizeof how);
    how.temperature = 0.8;
    how.top_p = 0.95;
    how.seed = 1;
    lm->gen_reset(gen);
    logits = lm->gen_feed(gen, prompt, length);
    check(lm->ctx);
    *prompt_rate = (double)length / (seconds() - at);
    at = seconds();
    for (i = 0; i < n && logits; i++) {
        int32_t token = stx_sample(&how, (uint64_t)i, logits, 256, work);
        if (token < 0) die("the logits are not finite");
        logits = lm->gen_feed(gen, &token, 1);
    }
    check(lm->ctx);
    return seconds() - at;
}


// >>machine probe: a small matmul of fixed size, run with every sample, shows how idle
// the machine was

static struct {
    stx_ctx *x;
    stx_real *a;
    samples all;
} probe;

static inline void probe_begin(void) {
    size_t i;
    if (!probe.x) {
        probe.x = context(F32, opt.threads);
        probe.a = persist(probe.x, 3 * 512 * 512);
        for (i = 0; i < 3 * 512 * 512; i++)
            probe.a[i] = (stx_real)((double)(i * 2654435761u % 1000) / 500 - 1);
    }
    probe.all.n = 0;
}

static inline void probe_now(void) {
    samples s;
    int i;
    s.n = 0;
    for (i = 0; i < 5; i++) {
        stx_gemm_args g = stx_gemm_init(0, 0, 512, 512, 512, probe.a, probe.a + 512 * 512,
                                        probe.a + 2 * 512 * 512);
        double t = seconds();
        stx_gemm(probe.x, &g);
        sample(&s, 2.0 * 512 * 512 * 512 / (seconds() - t) * 1e-9);
    }
    sample(&probe.all, median(&s));
}

static inline void probe_say(void) {
    say("Probe with each sample (stx_gemm, 512 x 512 x 512): median %.0f GFLOP/s, %.0f to %.0f. "
        "A wide range means a busy machine.\n\n",
        median(&probe.all), quantile(&probe.all, 0), quantile(&probe.all, 1));
}

static inline void probe_end(void) {
    if (probe.x) stx_destroy(probe.x);
}


// >>contenders: processes that run one round of training steps for each line on stdin
// (the protocol of bench/peers)

typedef struct {
    const char *name; /* NULL: the contender does not take part */
    /* the largest accepted difference of losses (and relative difference of gradient
       norms) from the reference */
    double tolerance;
    int on, fits; /* on: 1 while the contender replies; fits: 1 if its results agree with the
                     reference */
    process p;
    samples rate;
    /* norm: norm of the last gradient, or NaN. peak: peak memory that the contender
       reports. memory: peak memory of its process if known, otherwise equal to `peak` */
    double step1, last, norm, peak, memory;
    char blas[128], cannot[256], log[512];
} contender;

/* Runs one round. *rate receives the tokens per second, or 0 if code was compiled
   during the round, which then does not count. Returns 0 if the contender failed. */
static inline int ask_round(contender *c, double *rate) {
    const char *line = c->p.line;
    if (ask(&c->p, "", 3600) != 1) return 0;
    *rate = json_number(line, "tokens_per_s");
    c->step1 = json_number(line, "loss_step1");
    c->last = json_number(line, "loss_last");
    c->norm = json_number(line, "grad_norm");
    c->peak = json_number(line, "peak_bytes");
    if (!(*rate > 0)) return 0;
    if (json_number(line, "compiled") > 0) *rate = 0;
    return 1;
}

/* Starts a contender and waits for the end of its first round, which is discarded. Its
   messages go to DIR/contender.NUMBER.log. */
static inline void contender_start(contender *c, char *const argv[], const char *dir, int number) {
    double rate;
    snprintf(c->log, sizeof c->log, "%s/contender.%d.log", dir, number);
    c->on = spawn(&c->p, argv, c->log) && ask_round(c, &rate);
    if (c->on) return;
    stop(&c->p);
    why_not(c->log, c->cannot, sizeof c->cannot);
    progress("");
    fprintf(stderr, "%s: contender \"%s\" does not reply: %s; its messages are in %s\n", program,
            c->name, c->cannot, c->log);
}

static inline FILE *proc_open(const contender *c, const char *what) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%ld/%s", (long)c->p.pid, what);
    return fopen(path, "r");
}

static inline int is_blas(const char *file) {
    if (strstr(file, "scipy") || strstr(file, "libcu")) return 0;
    return strstr(file, "blas") || strstr(file, "libmkl_core") || strstr(file, "libblis");
}

/* Reads the peak resident memory of a contender's process, and the BLAS that it has
   loaded, from /proc, if that exists. */
static inline void look_at(contender *c) {
    char line[4096];
    FILE *f = proc_open(c, "status");
    c->memory = c->peak;
    if (f) {
        while (fgets(line, sizeof line, f))
            if (!strncmp(line, "VmHWM:", 6)) c->memory = strtod(line + 6, NULL) * 1024;
        fclose(f);
    }
    f = proc_open(c, "maps");
    if (f) {
        while (fgets(line, sizeof line, f)) {
            char *base = strrchr(line, '/');
            if (!base || !is_blas(base)) continue;
            base[strcspn(base, "\n")] = 0;
            if (!c->blas[0] || strstr(base, "openblas"))
                snprintf(c->blas, sizeof c->blas, "%.100s", base + 1);
        }
        fclose(f);
    }
}

/* Runs up to R interleaved rounds, each of which begins with a different contender, and
   returns the number of rounds. After three rounds, stops before the total time exceeds
   `limit` seconds. */
static inline int contest(contender *c, int n, int R, double limit, const char *what) {
    double rate, start = seconds();
    int r, turn, i;
    for (r = 0; r < R; r++) {
        if (r >= 3 && (seconds() - start) * (r + 1) / r > limit) break;
        for (turn = 0; turn < n; turn++) {
            char now[160];
            i = (turn + r) % n;
            if (!c[i].on) continue;
            snprintf(now, sizeof now, "%s: round %d of %d, %s ..", what, r + 1, R, c[i].name);
            progress(now);
            probe_now();
            if (!ask_round(&c[i], &rate)) {
                c[i].on = 0;
                snprintf(c[i].cannot, sizeof c[i].cannot, "it stopped replying");
                fprintf(stderr, "%s: contender \"%s\" stopped replying\n", program, c[i].name);
            } else if (rate > 0)
                sample(&c[i].rate, rate);
        }
    }
    for (i = 0; i < n; i++)
        if (c[i].on) look_at(&c[i]);
    return r;
}

/* Returns the largest difference between a contender's losses and the reference's losses
   and, if the reference has a gradient norm, the relative difference of the norms. */
static inline double difference(const contender *c, const contender *with) {
    double off = fmax(fabs(c->step1 - with->step1), fabs(c->last - with->last));
    int norms = with->on && measured(with->norm);
    if (norms) off = fmax(off, fabs(c->norm / with->norm - 1));
    if (!measured(c->step1) || !measured(c->last) || (norms && !measured(c->norm)))
        return HUGE_VAL;
    return off;
}

static inline void contest_row(const contender *c, const contender *peer, const contender *with) {
    int k, norms = with->on && measured(with->norm);
    double off = difference(c, with);
    row_begin();
    cell(0, "%s", c->name);
    k = cell_spread(1, &c->rate, 0, 1);
    if (peer->on && peer->rate.n) cell(k, "%.2f", median(&c->rate) / median(&peer->rate));
    k++;
    cell(k++, "%.5f", c->step1);
    cell(k++, "%.5f", c->last);
    if (norms) cell(k++, "%.5f", c->norm);
    cell(k++, "%.0f", c->memory * 1e-6);
    if (c == with)
        cell(k, "reference");
    else if (c->fits)
        cell(k, "equal to %.0e", off);
    else
        cell(k, norms ? "VOID: differs by %.0e" : "VOID: losses differ by %.0e", off);
}

static inline void say_blas(const contender *peer) {
    const char *name = peer->blas;
    if (!peer->on || !name[0]) return;
    say("PyTorch's BLAS: %s.", name);
    if (!strstr(name, "openblas") && !strstr(name, "mkl") && !strstr(name, "blis"))
        say(" This is the slow reference BLAS, so the ratio flatters seqtx. Install "
            "libopenblas0.");
    say("\n");
}

/* Prints the table of a contest, the reasons why contenders were left out, and the BLAS
   of contender number `peer`. Then ends all contenders. The reference is contender
   `peer` or, if it is missing, the first one. */
static inline void contest_say(contender *c, int n, int peer) {
    const contender *with = c[peer].on ? &c[peer] : &c[0];
    int i;
    header(with->on && measured(with->norm)
               ? "contender|tokens/s|range|to PyTorch eager f32|loss, step 1|loss, last step|"
                 "gradient|memory MB|"
               : "contender|tokens/s|range|to PyTorch eager f32|loss, step 1|loss, last step|"
                 "memory MB|");
    for (i = 0; i < n; i++) {
        c[i].fits = c[i].on && c[i].rate.n && difference(&c[i], with) <= c[i].tolerance;
        if (c[i].on && c[i].rate.n) contest_row(&c[i], &c[peer], with);
    }
    print_table();
    for (i = 0; i < n; i++)
        if (c[i].name && (!c[i].on || !c[i].rate.n))
            say("Left out: %s: %s.\n", c[i].name,
                c[i].cannot[0] ? c[i].cannot : "every round compiled something");
    say_blas(&c[peer]);
    probe_say();
    for (i = 0; i < n; i++) stop(&c[i].p);
}
#endif
