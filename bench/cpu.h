/* cpu.h - what the benchmarks on a CPU share: contexts, the probe, contenders that
   train interleaved. Included after the library. */
#ifndef BENCH_CPU_H
#define BENCH_CPU_H
#include "report.h"

enum { MAX_ROUNDS = 64 };

enum { F32, BF16, PRECISIONS }; /* as STX_PREC_F32, STX_PREC_BF16 */

static const char *const precision_name[PRECISIONS] = {"f32", "bf16"};

static inline void check(stx_ctx *x) {
    if (!stx_ok(x)) die(stx_error(x));
}

/* A context, or NULL when this library has not the precision; anything else that is
   wrong ends the program. */
static inline stx_ctx *context(int precision, int threads) {
    stx_desc d;
    stx_ctx *x;
    memset(&d, 0, sizeof d);
    d.threads = threads;
    d.precision = precision;
    x = stx_create(&d);
    if (!x) die("no memory");
    if (precision != F32 && stx_error_code(x) == STX_ERR_DEVICE) {
        stx_destroy(x);
        return NULL;
    }
    check(x);
    return x;
}

/* 1 if bf16 can be measured; else the report says why it is not. */
static inline int have_bf16(void) {
    stx_ctx *x = context(BF16, 1);
    stx_destroy(x);
    return x != NULL;
}

static inline void fill_random(stx_real *a, size_t n, uint64_t stream) { /* uniform in [-1,1) */
    size_t i, e;
    for (i = 0; i < n; i += 4) {
        uint32_t r[4];
        stx_philox(20190519, stream, i, r);
        for (e = 0; e < 4 && i + e < n; e++) a[i + e] = (stx_real)((double)r[e] / 2147483648.0 - 1);
    }
}


// >>machine probe: a small product of fixed size beside every sample, to see how quiet
// the machine was

static struct {
    stx_ctx *x;
    stx_real *a;
    samples all;
} probe;

static inline void probe_begin(int threads) {
    size_t i;
    if (!probe.x) {
        probe.x = context(F32, threads);
        probe.a = (stx_real *)stx_persist(probe.x, 3 * 512 * 512 * sizeof *probe.a);
        check(probe.x);
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
    say("Probe beside each sample (512-cubed stx_gemm): median %.0f GFLOP/s, %.0f to %.0f. A wide "
        "range means a busy machine.\n\n",
        median(&probe.all), quantile(&probe.all, 0), quantile(&probe.all, 1));
}


// >>contenders: processes that answer a line with one round of training steps (the
// protocol of bench/peers)

typedef struct {
    const char *name; /* NULL: not for this contest */
    /* losses (and gradient norms, relative) differ by no more from the reference's */
    double tolerance;
    int on, fits; /* still answers; and agrees with the reference */
    process p;
    samples rate;
    double step1, last, norm, peak,
        memory; /* norm: of the last gradient, NaN if it is not told; memory: peak, of the process where
                                                   known */
    char blas[128], cannot[256], log[512];
} contender;

/* One round; a rate of 0 is of a round that does not count, since something was
   compiled in it. */
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

/* Starts one, up to the end of its first round, which is discarded. Its messages go to
   DIR/contender.NUMBER.log. */
static inline void contender_start(contender *c, char *const argv[], const char *dir, int number) {
    double rate;
    snprintf(c->log, sizeof c->log, "%s/contender.%d.log", dir, number);
    c->on = spawn(&c->p, argv, c->log) && ask_round(c, &rate);
    if (c->on) return;
    stop(&c->p);
    why_not(c->log, c->cannot, sizeof c->cannot);
    progress("");
    fprintf(stderr, "bench: contender \"%s\" does not answer: %s; its messages are in %s\n",
            c->name, c->cannot, c->log);
}

/* From /proc, where there is one: the resident peak of the process, and the BLAS that
   it loaded. */
static inline void look_at(contender *c) {
    char path[64], line[4096];
    FILE *f;
    c->memory = c->peak;
    snprintf(path, sizeof path, "/proc/%ld/status", (long)c->p.pid);
    if ((f = fopen(path, "r"))) {
        while (fgets(line, sizeof line, f))
            if (!strncmp(line, "VmHWM:", 6)) c->memory = strtod(line + 6, NULL) * 1024;
        fclose(f);
    }
    snprintf(path, sizeof path, "/proc/%ld/maps", (long)c->p.pid);
    if ((f = fopen(path, "r"))) {
        while (fgets(line, sizeof line, f)) {
            char *base = strrchr(line, '/');
            if (!base || strstr(base, "scipy") || strstr(base, "libcu")
                || !(strstr(base, "blas") || strstr(base, "libmkl_core")
                     || strstr(base, "libblis")))
                continue;
            base[strcspn(base, "\n")] = 0;
            if (!c->blas[0] || strstr(base, "openblas"))
                snprintf(c->blas, sizeof c->blas, "%.100s", base + 1);
        }
        fclose(f);
    }
}

/* Up to R interleaved rounds, each starting with another one; returns how many. After
   three rounds no more than take limit seconds. */
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
                snprintf(c[i].cannot, sizeof c[i].cannot, "it stopped answering");
                fprintf(stderr, "bench: contender \"%s\" stopped answering\n", c[i].name);
            } else if (rate > 0)
                sample(&c[i].rate, rate);
        }
    }
    for (i = 0; i < n; i++)
        if (c[i].on) look_at(&c[i]);
    return r;
}

/* The table of a contest, and who is left out of it and why; then all are ended. The
   reference is number `peer`, of which the report says what BLAS it has, or the first
   one when that is not there. */
static inline void contest_say(contender *c, int n, int peer) {
    const contender *with = c[peer].on ? &c[peer] : &c[0];
    int i, norms = with->on && with->norm == with->norm;
    header(
        norms
            ? "contender|tokens/s|range|to PyTorch eager f32|loss, step 1|loss, last "
              "step|gradient|memory MB|"
            : "contender|tokens/s|range|to PyTorch eager f32|loss, step 1|loss, last step|memory "
              "MB|");
    for (i = 0; i < n; i++) {
        double off = fmax(fabs(c[i].step1 - with->step1), fabs(c[i].last - with->last));
        int k = 0;
        if (norms) off = fmax(off, fabs(c[i].norm / with->norm - 1));
        if (c[i].step1 != c[i].step1 || c[i].last != c[i].last || (norms && c[i].norm != c[i].norm))
            off = HUGE_VAL;
        c[i].fits = off <= c[i].tolerance;
        if (!c[i].on || !c[i].rate.n) {
            c[i].fits = 0;
            continue;
        }
        row_begin();
        cell(k++, "%s", c[i].name);
        cell(k++, "%.0f", median(&c[i].rate));
        cell(k++, "%.0f - %.0f", quantile(&c[i].rate, 0), quantile(&c[i].rate, 1));
        if (c[peer].on && c[peer].rate.n)
            cell(k, "%.2f", median(&c[i].rate) / median(&c[peer].rate));
        k++;
        cell(k++, "%.5f", c[i].step1);
        cell(k++, "%.5f", c[i].last);
        if (norms) cell(k++, "%.5f", c[i].norm);
        cell(k++, "%.0f", c[i].memory * 1e-6);
        if (with != &c[i])
            cell(k,
                 c[i].fits ? "equal to %.0e"
                 : norms   ? "VOID: differs by %.0e"
                           : "VOID: losses differ by %.0e",
                 off);
        else
            cell(k, "reference");
    }
    print_table();
    for (i = 0; i < n; i++)
        if (c[i].name && (!c[i].on || !c[i].rate.n))
            say("Left out: %s: %s.\n", c[i].name,
                c[i].cannot[0] ? c[i].cannot : "every round compiled something");
    if (c[peer].on && c[peer].blas[0])
        say("PyTorch's BLAS: %s%s\n", c[peer].blas,
            strstr(c[peer].blas, "openblas") || strstr(c[peer].blas, "mkl")
                    || strstr(c[peer].blas, "blis")
                ? "."
                : ". This is the slow reference BLAS: the ratio flatters seqtx. Install "
                  "libopenblas0.");
    probe_say();
    for (i = 0; i < n; i++) stop(&c[i].p);
}

/* Number of an option that must be whole and at least `least` */
static inline int whole(const char *s, int least, const char *name) {
    char *end;
    long v = s ? strtol(s, &end, 10) : 0;
    if (!s || end == s || *end || v < least || v > 1000000000) {
        fprintf(stderr, "bench: %s wants a whole number of at least %d\n", name, least);
        exit(2);
    }
    return (int)v;
}
#endif
