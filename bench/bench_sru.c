/* bench_sru.c - times SRU and SRU++ of seqtx on a CPU: the recurrence beside a copy of
   memory, training beside PyTorch, generation.

       sh bench/run.sh --only sru      builds this file and runs it (bench/README.md)

   Contenders take turns within one run, so that a busy machine is busy for all of
   them; numbers are medians of rounds, with minimum and maximum beside them. Training
   contenders are processes of their own that answer a line on stdin with one round of
   steps: this program again, with --worker, and PyTorch. Both take the options of
   bench/peers/sru_torch.py, read the same data and start from the same parameter file,
   and a row whose losses are not the peer's is void. */
#define _POSIX_C_SOURCE 200809L
#define SEQTX_IMPLEMENTATION
#include "../seqtx_sru.h"
#include "lm.h"


// >>found: what the summary at the end needs; NaN where nothing was measured

enum { OWN, OWN_BF16, PEER, PEER_BF16, PEER_COMPILED, PEER_COMPILED_BF16, PEER_PLAIN, CONTENDERS };

enum { CONFIGS = 5, SHAPES = 7, HEADS = 4 };

static struct {
    double fwd[SHAPES], bwd[SHAPES]; /* to the copy */
    double rate[CONFIGS][CONTENDERS], memory[CONFIGS][CONTENDERS];
    double token[CONFIGS]; /* ms */
    /* products to attention, time */
    double head[HEADS];
} found;

static void found_nothing(void) {
    double *v = (double *)(void *)&found;
    size_t i;
    for (i = 0; i < sizeof found / sizeof *v; i++) v[i] = NAN;
}


// >>recurrence: bytes a second, beside those of memcpy

/* What the kernels cannot do without, in numbers a unit and time: u0, u1, u2, x read
   and h written; those and dh read (h not), and their gradients written. The other two
   count what the published kernels move: every c too. */
enum { LEAST_FWD = 5, LEAST_BWD = 9, TABLE_FWD = 6, TABLE_BWD = 10 };

static struct {
    stx_ctx *x;
    char *from, *to;
    size_t n;
} copy;

static void copy_begin(void) {
    copy.n = (size_t)(opt.quick ? 128 : 256) << 20; /* far beyond any cache */
    copy.x = context(F32, opt.threads);
    copy.from = (char *)stx_persist(copy.x, copy.n);
    copy.to = (char *)stx_persist(copy.x, copy.n);
    check(copy.x);
}

/* Bytes read and written a second, by memcpy in all threads; the median of three */
static void copy_part(const stx_share *s, const void *unused) {
    size_t k, each = copy.n / (size_t)opt.threads;
    (void)unused;
    for (k = s->begin; k < s->end; k++)
        memcpy(copy.to + k * each, copy.from + k * each,
               k + 1 < (size_t)opt.threads ? each : copy.n - k * each);
}

static double copy_rate(void) {
    samples s;
    stx_desc d = {0};
    stx_ctx *x;
    int i;
    d.threads = opt.threads;
    x = stx_create(&d);
    s.n = 0;
    for (i = 0; i < 3; i++) {
        double t = seconds();
        stx_parallel(x, (size_t)opt.threads, SIZE_MAX, copy_part, NULL);
        sample(&s, 2.0 * (double)copy.n / (seconds() - t));
    }
    stx_destroy(x);
    return median(&s);
}

/* As fill_random, faster: a million numbers again and again */
static void fill_again(stx_real *a, size_t n, uint64_t stream, double scale) {
    size_t i, period = 1000003 < n ? 1000003 : n;
    fill_random(a, period, stream);
    for (i = 0; i < period; i++) a[i] *= (stx_real)scale;
    for (i = period; i < n; i += period)
        memcpy(a + i, a, (n - i < period ? n - i : period) * sizeof *a);
}

static stx_real *numbers(stx_ctx *x, size_t n) {
    stx_real *p = (stx_real *)stx_persist(x, n * sizeof *p);
    check(x);
    return p;
}

typedef struct {
    size_t B, T, d;
    int quick;
} shape;

static void recurrence_shape(const shape *s, size_t B, int at, int R) {
    stx_ctx *x = context(F32, opt.threads);
    size_t O = s->d, rows = B * s->T, n = rows * O, j, calls[2] = {1, 1};
    samples rate[2], ratio[2], copies;
    stx_sru_args a;
    stx_real *m, *v, *bias, *c0;
    char name[64];
    int r, back;
    rate[0].n = rate[1].n = ratio[0].n = ratio[1].n = copies.n = 0;
    memset(&a, 0, sizeof a);
    a.B = B;
    a.T = s->T;
    a.H = O;
    a.D = 1;
    a.k = 3;
    a.alpha = 1;
    a.u = numbers(x, 3 * n);
    a.xr = numbers(x, n);
    a.dh = numbers(x, n);
    fill_again((stx_real *)(uintptr_t)a.u, 3 * n, 1, 2);
    fill_again((stx_real *)(uintptr_t)a.xr, n, 2, 1);
    fill_again((stx_real *)(uintptr_t)a.dh, n, 3, 1);
    a.v = v = numbers(x, 2 * O);
    a.bias = bias = numbers(x, 2 * O);
    a.c0 = c0 = numbers(x, B * O);
    a.m = m = numbers(x, B * O);
    fill_random(v, 2 * O, 4);
    for (j = 0; j < 2 * O; j++) bias[j] = j < O ? 0 : -2;
    fill_random(c0, B * O, 5);
    fill_random(m, B * O, 6);
    /* dropout of 0.1 */
    for (j = 0; j < B * O; j++) m[j] = m[j] < (stx_real)-0.8 ? 0 : (stx_real)(1 / 0.9);
    a.h = numbers(x, n);
    a.last = numbers(x, B * O);
    a.c = numbers(x, B * stx_sru_tiles(&a) * O);
    a.du = numbers(x, 3 * n);
    a.dxr = numbers(x, n);
    a.dv = numbers(x, 2 * O);
    a.dbias = numbers(x, 2 * O);
    a.dc0 = numbers(x, B * O);
    for (j = 0; j < 2 * O; j++) a.dv[j] = a.dbias[j] = 0;
    for (j = 0; j < B * O; j++) a.dc0[j] = 0;
    {
        size_t most = stx_sru_work(x, &a, 0), other = stx_sru_work(x, &a, 1);
        a.work = stx_persist(x, most > other ? most : other);
        check(x);
    }
    for (r = -2; r < R; r++) /* two rounds warm up; the second finds the number of calls */
        for (back = 0; back < 2; back++) {
            double bytes = (double)n * (back ? LEAST_BWD : LEAST_FWD) * sizeof(stx_real),
                   with = r < 0 ? 0 : copy_rate(), t, now;
            size_t i;
            t = seconds();
            for (i = 0; i < calls[back]; i++)
                if (back)
                    stx_sru_bwd(x, &a);
                else
                    stx_sru_fwd(x, &a);
            t = (seconds() - t) / (double)calls[back];
            check(x);
            if (r < 0) {
                calls[back] = t < 0.05 ? 1 + (size_t)(0.05 / t) : 1;
                continue;
            }
            now = bytes / t;
            sample(&copies, with);
            sample(&rate[back], now);
            sample(&ratio[back], now / with);
        }
    for (j = 0; j < n; j += 997)
        if (!isfinite(a.h[j]) || !isfinite(a.du[j]) || !isfinite(a.dxr[j]))
            die("the recurrence's results are "
                "not finite");
    snprintf(name, sizeof name, "(%zu, %zu, %zu)%s", B, s->T, s->d,
             n * LEAST_BWD * sizeof(stx_real) < 4 << 20 ? ", in caches" : "");
    for (back = 0; back < 2; back++) {
        double least = back ? LEAST_BWD : LEAST_FWD, as_table = back ? TABLE_BWD : TABLE_FWD,
               v_ = median(&rate[back]);
        int c = 0;
        row_begin();
        cell(c++, "%s", name);
        cell(c++, "%s", back ? "backward" : "forward");
        cell(c++, "%.3f", (double)n * least * sizeof(stx_real) / v_ * 1e3);
        cell(c++, "%.1f", v_ * 1e-9);
        cell(c++, "%.1f - %.1f", quantile(&rate[back], 0) * 1e-9, quantile(&rate[back], 1) * 1e-9);
        cell(c++, "%.2f", median(&ratio[back]));
        cell(c++, "%.2f - %.2f", quantile(&ratio[back], 0), quantile(&ratio[back], 1));
        cell(c++, "%.1f", v_ * 1e-9 * as_table / least);
        cell(c++, "%.2f", median(&ratio[back]) * as_table / least);
        cell(c++, "%.1f", median(&copies) * 1e-9);
        *(back ? &found.bwd[at] : &found.fwd[at]) = median(&ratio[back]);
    }
    stx_destroy(x);
}

static const shape shapes[SHAPES] = {{4, 1024, 3072, 1}, {32, 1024, 3072, 0}, {64, 256, 3056, 0},
                                     {8, 512, 1920, 0},  {1, 1024, 3072, 1},  {1, 4096, 1024, 0},
                                     {2, 64, 256, 1}};

static void bench_recurrence(void) {
    int i, R = rounds(9);
    copy_begin();
    say("## Recurrence\n\nstx_sru_fwd and stx_sru_bwd on (B, T, d): k = 3, a mask, no padding, "
        "f32, %d threads; forward keeps what "
        "backward needs. Median of %d rounds\n"
        "(least - most). GB/s count what must be moved at least: %d numbers a unit and time "
        "forward (u0 u1 u2 x; h), %d backward (u0 u1 "
        "u2 x dh; du0 du1 du2 dx);\n"
        "\"with c\": %d and %d, of kernels that keep every state. Beside each sample memcpy "
        "between two buffers of %zu MiB in all "
        "threads, bytes read and written:\n"
        "\"of copy\" is the median of the rounds' ratios.\n\n",
        opt.threads, R, LEAST_FWD, LEAST_BWD, TABLE_FWD, TABLE_BWD, copy.n >> 20);
    header("(B, T, d)|pass|ms|GB/s|range|of copy|range|GB/s with c|of copy|copy GB/s");
    for (i = 0; i < SHAPES; i++) {
        size_t B = shapes[i].B;
        char what[64];
        if (opt.quick && !shapes[i].quick) continue;
        /* u, x, dh, h, du, dx; a quarter more for what else there is */
        while (B > 1
               && 10.0 * (double)(B * shapes[i].T * shapes[i].d) * sizeof(stx_real) * 1.25
                      > available())
            B /= 2;
        snprintf(what, sizeof what, "recurrence (%zu, %zu, %zu) ..", B, shapes[i].T, shapes[i].d);
        progress(what);
        recurrence_shape(&shapes[i], B, i, R);
    }
    print_table();
    stx_destroy(copy.x);
}


// >>attention: of one head as wide as P, beside batched products with a softmax of rows

typedef struct {
    size_t B, T, M, P;
    int quick;
} head;

static const head one_heads[HEADS] = {{1, 1024, 1024, 768, 1},
                                      {4, 1024, 1024, 744, 0},
                                      {4, 1024, 1024, 1024, 0},
                                      {2, 512, 512, 480, 1}};

/* One forward and backward: the op, or products, which store the scores of all B T (M
   + T) pairs; seconds. out (2 B T P) gets o and the gradient of q. */
static double head_pass(stx_ctx *x, const head *s, int products, const stx_real *numbers_,
                        const stx_real *mask, stx_real *out) {
    size_t S = s->M + s->T, nq = s->B * s->T * s->P, nk = s->B * S * s->P;
    stx_attention_in in;
    stx_attention_desc d;
    stx_tensor *o, *q, *dy;
    double t;
    stx_begin(x, STX_TRAIN);
    q = stx_variable(x, numbers_, s->B, s->T, s->P, 0);
    dy = stx_input(x, numbers_ + nq, s->B, s->T, s->P, 0);
    memset(&in, 0, sizeof in);
    memset(&d, 0, sizeof d);
    in.q = q;
    if (products) {
        stx_tensor *k = stx_variable(x, numbers_ + 2 * nq, s->B, S, s->P, 0),
                   *v = stx_variable(x, numbers_ + 2 * nq + nk, s->B, S, s->P, 0),
                   *hide = stx_input(x, mask, s->T, S, 0, 0);
        t = seconds();
        o = stx_matmul(x,
                       stx_softmax(x, stx_add(x,
                                              stx_scale(x, stx_matmul(x, q, k, 0, 1),
                                                        1 / sqrt((double)s->P)),
                                              hide)),
                       v, 0, 0);
    } else {
        in.kv = stx_variable(x, numbers_ + 2 * nq + 2 * nk, s->B, S, 2 * s->P, 0);
        d.heads = 1;
        t = seconds();
        o = stx_attention(x, &in, &d);
    }
    stx_backward(x, stx_mean(x, stx_mul(x, o, dy)));
    t = seconds() - t;
    check(x);
    memcpy(out, o->data, nq * sizeof *out);
    memcpy(out + nq, q->grad, nq * sizeof *out);
    return t;
}

static void bench_attention(void) {
    int i, r, way, R = rounds(5);
    say("## Attention of one head\n\n"
        "The attention of SRU++, forward and backward, one head of P channels, B streams of T "
        "times after a "
        "memory of M, f32, %d threads: stx_attention,\n"
        "which keeps no scores, and the same by stx_matmul and stx_softmax, which keep them. In "
        "turns; median of %d rounds (least - "
        "most). MB: the most that the context had in use, inputs too.\n\n",
        opt.threads, R);
    header("B, T, M, P|attention ms|range|MB|products ms|range|MB|products / attention");
    for (i = 0; i < HEADS; i++) {
        const head *s = &one_heads[i];
        size_t S = s->M + s->T, nq = s->B * s->T * s->P, nk = s->B * S * s->P, n = 2 * nq + 4 * nk,
               j, b, k;
        stx_real *v = (stx_real *)malloc(n * sizeof *v),
                 *mask = (stx_real *)malloc(s->T * S * sizeof *mask), *out[2];
        samples ms[2];
        double worst, memory[2];
        stx_ctx *x[2];
        if (opt.quick && !s->quick) {
            free(v);
            free(mask);
            continue;
        }
        for (way = 0; way < 2; way++) {
            out[way] = (stx_real *)malloc(2 * nq * sizeof **out);
            x[way] = context(F32, opt.threads);
            ms[way].n = 0;
        }
        if (!v || !mask || !out[0] || !out[1]) die("no memory");
        progress("attention ..");
        fill_again(v, 2 * nq + 2 * nk, 7, 1);
        for (b = 0; b < s->B * S; b++) /* the same keys and values, side by side */
            for (k = 0; k < 2; k++)
                memcpy(v + 2 * nq + 2 * nk + (2 * b + k) * s->P, v + 2 * nq + k * nk + b * s->P,
                       s->P * sizeof *v);
        for (j = 0; j < s->T; j++)
            for (k = 0; k < S; k++) mask[j * S + k] = k > s->M + j ? (stx_real)-1e30 : 0;
        for (r = -1; r < R; r++)
            for (way = 0; way < 2; way++) {
                double t = head_pass(x[way], s, way, v, mask, out[way]);
                if (r >= 0) sample(&ms[way], t * 1e3);
            }
        for (b = 0; b < 2; b++) { /* o, then dq: to the largest number of each */
            double top = 0;
            worst = 0;
            for (j = b * nq; j < (b + 1) * nq; j++) {
                double e = fabs((double)out[0][j] - (double)out[1][j]);
                top = fmax(top, fabs((double)out[1][j]));
                if (!(e <= worst)) worst = e;
            }
            if (!(worst <= 1e-4 * top)) die("attention and products differ");
        }
        for (way = 0; way < 2; way++) {
            memory[way] = (double)stx_peak_bytes(x[way]) * 1e-6;
            stx_destroy(x[way]);
            free(out[way]);
        }
        found.head[i] = median(&ms[1]) / median(&ms[0]);
        row_begin();
        cell(0, "%zu, %zu, %zu, %zu", s->B, s->T, s->M, s->P);
        for (way = 0; way < 2; way++) {
            cell(1 + 3 * way, "%.1f", median(&ms[way]));
            cell(2 + 3 * way, "%.1f - %.1f", quantile(&ms[way], 0), quantile(&ms[way], 1));
            cell(3 + 3 * way, "%.0f", memory[way]);
        }
        cell(7, "%.2f", found.head[i]);
        free(v);
        free(mask);
    }
    print_table();
}


// >>worker: the options of bench/peers/sru_torch.py

static struct {
    int layers, d, P, heads, recompute;
    double alpha;
} model = {4, 512, 128, 1, 0, 0};

static const lm_option model_options[] = {{"--nlayers", &model.layers, 1, NULL, NULL},
                                          {"--hid-sz", &model.d, 1, NULL, NULL},
                                          {"--n-proj", &model.P, 0, NULL, NULL},
                                          {"--nheads", &model.heads, 1, NULL, NULL},
                                          {"--recompute", &model.recompute, -1, NULL, NULL},
                                          {"--alpha", NULL, 0, &model.alpha, NULL},
                                          {NULL, NULL, 0, NULL, NULL}};

static stx_sru_lm *model_create(stx_ctx *x, int layers, int d, int P, int heads, double alpha) {
    stx_sru_lm_desc ld;
    stx_sru_lm *m;
    memset(&ld, 0, sizeof ld);
    ld.vocab = 256;
    ld.dim = (size_t)d;
    ld.sru.layers = (size_t)layers;
    ld.sru.transform = P ? STX_SRU_ATTENTION : STX_SRU_LINEAR;
    ld.sru.proj = (size_t)P;
    ld.sru.heads = (size_t)heads;
    ld.sru.alpha_init = P ? alpha : 0;
    ld.sru.recompute = model.recompute;
    m = stx_sru_lm_create(x, &ld);
    check(x);
    return m;
}

static stx_lm create(stx_ctx *x) {
    return stx_sru_as_lm(model_create(x, model.layers, model.d, model.P, model.heads, model.alpha));
}


// >>training

typedef struct {
    const char *name, *title;
    int layers, d, P, T, B, steps, bf16, no_update,
        quick; /* bf16: those contenders too, 2: but the compiled one; quick: with --quick
                                                                   too */
} config;

static const config configs[CONFIGS] = {/* P 0: SRU, else SRU++ */
                                        {"tiny", "SRU++", 4, 256, 64, 128, 4, 40, 1, 0, 1},
                                        {"small", "SRU++", 4, 512, 128, 256, 8, 8, 1, 0, 0},
                                        {"fp32-small", "SRU++", 10, 1920, 480, 512, 2, 1, 1, 0, 0},
                                        {"base", "SRU++", 10, 3072, 768, 1024, 1, 1, 2, 0, 0},
                                        {"sru", "SRU, forward and backward only", 4, 1024, 0, 256,
                                         8, 3, 1, 1, 1}};
static const lm_kind kinds[CONTENDERS] = {
    {"seqtx f32", 1e-3, F32, 0, LM_OWN, {NULL}},
    {"seqtx bf16", 2e-2, BF16, 0, LM_OWN, {NULL}},
    {"PyTorch eager f32", 1e-3, F32, 0, LM_PEER, {NULL}},
    {"PyTorch eager bf16 autocast", 2e-2, BF16, 0, LM_PEER, {NULL}},
    {"PyTorch compiled f32", 1e-3, F32, 1, LM_PEER, {NULL}},
    {"PyTorch compiled bf16 autocast", 2e-2, BF16, 1, LM_PEER, {NULL}},
    {"PyTorch eager f32, as installed, recurrence by autograd",
     1e-3,
     F32,
     0,
     LM_PLAIN,
     {"--recurrence", "loop", NULL}}};

/* Those that --config names; else all, or with --quick the small ones */
static int wanted(const config *g) {
    return opt.config ? listed(opt.config, g->name) : g->quick || !opt.quick;
}

static double params_millions(const config *g) {
    double n = 0;
    stx_sru_lm_desc ld;
    memset(&ld, 0, sizeof ld);
    ld.vocab = 256;
    ld.dim = (size_t)g->d;
    ld.sru.layers = (size_t)g->layers;
    ld.sru.proj = (size_t)g->P;
    ld.sru.transform = g->P ? STX_SRU_ATTENTION : STX_SRU_LINEAR;
    n = (double)stx_sru_lm_count(&ld);
    return n * 1e-6;
}

static void training_config(int at) {
    static contender c[CONTENDERS];
    const config *g = &configs[at];
    int i, r,
        warmup = opt.warmup >= 0 ? opt.warmup
                 : opt.quick     ? 2
                                 : 3,
        B = opt.batch ? opt.batch : g->B,
        steps = opt.steps   ? opt.steps
                : opt.quick ? 1 + g->steps / 4
                            : g->steps;
    char params[512], label[80];
    int skip[CONTENDERS];
    char *shared[] = {"--nlayers",
                      number(g->layers),
                      "--hid-sz",
                      number(g->d),
                      "--n-proj",
                      number(g->P),
                      "--block-sz",
                      number(g->T),
                      "--batch-sz",
                      number(B),
                      "--steps",
                      number(steps),
                      "--warmup",
                      number(warmup),
                      "--threads",
                      number(opt.threads),
                      "--optim",
                      "adamw",
                      "--load",
                      params,
                      g->no_update ? "--no-update" : NULL,
                      NULL};
    stx_ctx *x = context(F32, opt.threads);
    memset(c, 0, sizeof c);
    snprintf(params, sizeof params, "%s/params.%s.safetensors", opt.work, g->name);
    /* attention counts from the first step on: a wrong one shows in the losses */
    params_save(x, stx_sru_lm_params(model_create(x, g->layers, g->d, g->P, 1, 1)), params);
    stx_destroy(x);
    for (i = 0; i < CONTENDERS; i++) /* for want of memory */
        skip[i] = kinds[i].precision == BF16 && (!g->bf16 || (g->bf16 == 2 && kinds[i].compile));
    snprintf(label, sizeof label, "training, %s", g->name);
    lm_start(c, kinds, CONTENDERS, PEER, skip, label, shared);
    probe_begin(opt.threads);
    r = contest(c, CONTENDERS, rounds(7), opt.rounds ? 1e9 : 120, label);
    say("%s: %s, d %d, ", g->name, g->title, g->d);
    if (g->P) say("P %d, ", g->P);
    say("%d layers, T %d, B %d; %.1f million parameters; median of %d rounds of %d step%s after "
        "%d discarded steps:\n\n",
        g->layers, g->T, B, params_millions(g), r, steps, steps == 1 ? "" : "s", warmup + steps);
    contest_say(c, CONTENDERS, PEER);
    for (i = 0; i < CONTENDERS; i++) {
        if (!c[i].fits) continue;
        found.rate[at][i] = median(&c[i].rate);
        found.memory[at][i] = c[i].memory;
    }
    unlink(params);
}

static void bench_training(void) {
    int i;
    say("## Training\n\nLanguage models over bytes; a step is forward, backward, clip of the "
        "gradient's norm and AdamW, except where it "
        "says otherwise; %d threads.\n"
        "The same data, first parameters and steps for all; memory of the segment before. Losses "
        "(and the gradient's norm, relative) "
        "must agree with the\n"
        "first PyTorch row to %g (f32) and %g (bf16), or the row is void.\n\n",
        opt.threads, kinds[OWN].tolerance, kinds[OWN_BF16].tolerance);
    for (i = 0; i < CONFIGS; i++)
        if (wanted(&configs[i])) training_config(i);
}


// >>generation

static void bench_generation(void) {
    typedef struct {
        stx_ctx *x;
        stx_sru_gen *g;
        samples ms, prompt;
        double bytes;
    } stream;

    enum { PROMPT = 1100, WINDOW = 1024 };

    static stream streams[CONFIGS][2];
    static int32_t ids[PROMPT];
    int i, t, k, r, R = rounds(5), last = opt.threads > 1, n = opt.quick ? 16 : 64;
    size_t bytes;
    unsigned char *text = read_bytes(opt.data, &bytes);
    if (bytes < PROMPT) die("too few bytes for a prompt");
    for (k = 0; k < PROMPT; k++) ids[k] = text[k];
    free(text);
#define EACH_STREAM \
  for (i = 0; i < CONFIGS; i++) \
    for (t = 0; t <= last; t++) \
      if (wanted(&configs[i]))
    EACH_STREAM {
        stream *s = &streams[i][t];
        stx_sru_lm *m;
        s->x = context(F32, t ? opt.threads : 1);
        m = model_create(s->x, configs[i].layers, configs[i].d, configs[i].P, 1, 1);
        s->g = stx_sru_gen_create(m, 1, WINDOW);
        check(s->x);
        s->bytes = (double)(stx_params_size(stx_sru_lm_params(m)) - m->vocab_io->in_emb->size)
                   * sizeof(stx_real);
    }
    probe_begin(opt.threads);
    for (r = -1; r < R; r++) {
        progress("generation ..");
        EACH_STREAM {
            stream *s = &streams[i][t];
            stx_sampling how;
            stx_real work[256];
            const stx_real *logits;
            double at = seconds();
            memset(&how, 0, sizeof how);
            how.temperature = 0.8;
            how.top_p = 0.95;
            how.seed = 1;
            stx_sru_gen_reset(s->g);
            logits = stx_sru_gen_feed(s->g, ids, PROMPT);
            check(s->x);
            if (r >= 0) sample(&s->prompt, PROMPT / (seconds() - at));
            at = seconds();
            for (k = 0; k < n && logits; k++) {
                int32_t token = stx_sample(&how, (uint64_t)k, logits, 256, work);
                if (token < 0) die("the logits are not finite");
                logits = stx_sru_gen_feed(s->g, &token, 1);
            }
            check(s->x);
            if (r >= 0) sample(&s->ms, (seconds() - at) * 1e3 / n);
        }
        if (r >= 0) probe_now();
    }
    say("## Generation\n\nOne stream, one token at a time, f32, after a prompt of %d bytes, which "
        "fills the window of %d of SRU++. "
        "Median of %d rounds of %d tokens\n"
        "(least - most). GB/s: parameters that a token reads, a second.\n\n",
        PROMPT, WINDOW, R, n);
    header("model|threads|ms a token|range|tokens/s|GB/s|prompt tokens/s|memory MB");
    EACH_STREAM {
        stream *s = &streams[i][t];
        double ms = median(&s->ms);
        row_begin();
        cell(0, "%s: d %d, %d layers", configs[i].name, configs[i].d, configs[i].layers);
        cell(1, "%d", t ? opt.threads : 1);
        cell(2, "%.3f", ms);
        cell(3, "%.3f - %.3f", quantile(&s->ms, 0), quantile(&s->ms, 1));
        cell(4, "%.0f", 1e3 / ms);
        cell(5, "%.1f", s->bytes / ms * 1e-6);
        cell(6, "%.0f", median(&s->prompt));
        cell(7, "%.0f", (double)stx_bytes(s->x) * 1e-6);
        if (!(found.token[i] <= ms)) found.token[i] = ms;
    }
    print_table();
    probe_say();
    EACH_STREAM stx_destroy(streams[i][t].x);
#undef EACH_STREAM
}


// >>summary

static void bench_summary(void) {
    int i, k;
    say("## Summary\n\nRatios within this run. Training against PyTorch of the same model; \"-\" "
        "is not measured, or void.\n\n");
    header("recurrence (B, T, d)|forward, of copy|backward, of copy");
    for (i = 0; i < SHAPES; i++) {
        if (!(found.fwd[i] == found.fwd[i])) continue;
        row_begin();
        cell(0, "(%zu, %zu, %zu)", shapes[i].B, shapes[i].T, shapes[i].d);
        cell(1, "%.2f", found.fwd[i]);
        cell(2, "%.2f", found.bwd[i]);
    }
    if (table.rows > 1) print_table();
    header("attention of one head (B, T, M, P)|time of products / of attention");
    for (i = 0; i < HEADS; i++) {
        if (!(found.head[i] == found.head[i])) continue;
        row_begin();
        cell(0, "(%zu, %zu, %zu, %zu)", one_heads[i].B, one_heads[i].T, one_heads[i].M,
             one_heads[i].P);
        cell(1, "%.2f", found.head[i]);
    }
    if (table.rows > 1) print_table();
    header(
        "training|tokens/s f32|to eager f32|to compiled f32|to eager f32 as installed|tokens/s "
        "bf16|to eager bf16|to compiled "
        "bf16|memory MB f32|of eager|ms a generated token");
    for (i = 0; i < CONFIGS; i++) {
        const double *v = found.rate[i], *m = found.memory[i];
        const double say_[10] = {v[OWN],
                                 v[OWN] / v[PEER],
                                 v[OWN] / v[PEER_COMPILED],
                                 v[OWN] / v[PEER_PLAIN],
                                 v[OWN_BF16],
                                 v[OWN_BF16] / v[PEER_BF16],
                                 v[OWN_BF16] / v[PEER_COMPILED_BF16],
                                 m[OWN] * 1e-6,
                                 m[OWN] / m[PEER],
                                 found.token[i]};
        static const int digits[10] = {0, 2, 2, 2, 0, 2, 2, 0, 2, 3};
        if (!(v[OWN] == v[OWN]) && !(found.token[i] == found.token[i])) continue;
        row_begin();
        cell(0, "%s", configs[i].name);
        for (k = 0; k < 10; k++) {
            if (say_[k] == say_[k])
                cell(1 + k, "%.*f", digits[k], say_[k]);
            else
                cell(1 + k, "-");
        }
    }
    if (table.rows > 1) print_table();
}


// >>main

static const char usage[] =
    "bench_sru [options]: times SRU and SRU++ (sh bench/run.sh --only sru builds and runs it)\n"
    "  --only LIST        sru, or of sru-recurrence,sru-attention,sru-training,sru-generation\n"
    "  --config LIST      of tiny,small,fp32-small,base,sru: models of training and generation "
    "(default: all)\n"
    "  --without LIST     contenders to leave out: of compiled,installed,bf16,peer\n"
    "  --quick            fewer rounds, shapes and models, about 2 minutes\n"
    "  --threads N        default: all\n"
    "  --rounds N         samples of each number (default 9 of the recurrence, 7 of training, 5 "
    "of generation)\n"
    "  --batch N, --steps N    streams, and steps in a round, of all models (default: each has "
    "its own)\n"
    "  --warmup N         training: steps before the first round, at least 2 for a compiled "
    "contender (default 3)\n"
    "  --data FILE        text\n"
    "  --python CMD --python-plain CMD --peer FILE    PyTorch contenders, with and without what "
    "its tuning guide asks for\n"
    "  --work DIR         for temporary files\n"
    "  --append FILE      write the tables there too\n"
    "  --worker OPTIONS   one contender: options of bench/peers/sru_torch.py; --save FILE, "
    "--alpha X, --recompute\n";

int main(int argc, char **argv) {
    int i;
    family.program = "bench_sru";
    family.options = model_options;
    family.create = create;
    opt.only = "sru";
    if (argc > 1 && !strcmp(argv[1], "--worker")) {
        job.radam = 1;
        job.T = 256;
        return worker_options(argc, argv) ? worker() : 2;
    }
    if ((i = lm_parse(argc, argv, usage)) <= 0) return i ? 2 : 0;
    for (i = 0; i < CONFIGS && !wanted(&configs[i]); i++) continue;
    if (i == CONFIGS) {
        fprintf(stderr, "bench_sru: --config %s: of tiny, small, fp32-small, base, sru\n",
                opt.config);
        return 2;
    }
    found_nothing();
    if (listed(opt.only, "sru") || listed(opt.only, "sru-recurrence")) bench_recurrence();
    if (listed(opt.only, "sru") || listed(opt.only, "sru-attention")) bench_attention();
    if (listed(opt.only, "sru") || listed(opt.only, "sru-training")) bench_training();
    if (listed(opt.only, "sru") || listed(opt.only, "sru-generation")) bench_generation();
    bench_summary();
    if (probe.x) stx_destroy(probe.x);
    return 0;
}
