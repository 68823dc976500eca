/* bench_sru.c - times SRU and SRU++ of seqtx on a CPU: the recurrence compared with
   memcpy, training compared with PyTorch, generation.

       sh bench/run.sh --only sru      builds this file and runs it (bench/README.md)

   Contenders alternate within one run, so that a busy machine affects all of them; values
   are medians of rounds, with minimum and maximum. Training contenders (this program
   with --worker, and PyTorch) are separate processes that run one round of steps for
   each line on stdin. All take the options of bench/peers/sru_torch.py, read the same
   data and start from the same parameter file. A row is void if its losses differ from
   the peer's. */
#define _POSIX_C_SOURCE 200809L
#define SEQTX_IMPLEMENTATION
#include "../../seqtx_sru.h"
#include "../lm.h"


// >>found: results for the summary at the end; NaN: not measured

enum { CONFIGS = 5, SHAPES = 7, HEADS = 4 };

static struct {
    double fwd[SHAPES], bwd[SHAPES]; /* relative to memcpy */
    double head[HEADS];              /* time with matmuls divided by time with stx_attention */
    double token[CONFIGS];           /* ms per generated token */
    lm_found training[CONFIGS];
} found;


// >>recurrence: bytes per second, compared with memcpy

/* Elements moved per unit and time step, {forward, backward}. `minimum`: the forward pass
   reads u0, u1, u2 and x and writes h; the backward pass reads u0, u1, u2, x and dh and
   writes four gradients. `published`: the published kernels, which also move every c. */
static const int minimum[2] = {5, 9}, published[2] = {6, 10};

static struct {
    stx_ctx *x;
    char *from, *to;
    size_t n;
} copy;

static void copy_begin(void) {
    copy.n = (size_t)(opt.quick ? 128 : 256) << 20; /* much larger than any cache */
    copy.x = context(F32, opt.threads);
    copy.from = (char *)stx_persist(copy.x, copy.n);
    copy.to = (char *)stx_persist(copy.x, copy.n);
    check(copy.x);
}

static void copy_part(const stx_share *s, const void *unused) {
    size_t k, each = copy.n / (size_t)opt.threads;
    (void)unused;
    for (k = s->begin; k < s->end; k++)
        memcpy(copy.to + k * each, copy.from + k * each,
               k + 1 < (size_t)opt.threads ? each : copy.n - k * each);
}

/* Returns the bytes per second that memcpy reads and writes with all threads, as the
   median of three runs. */
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

/* Like fill_random, but faster, because it repeats a million values. */
static void fill_repeating(stx_real *a, size_t n, uint64_t stream, double scale) {
    size_t i, period = 1000003 < n ? 1000003 : n;
    fill_random(a, period, stream);
    for (i = 0; i < period; i++) a[i] *= (stx_real)scale;
    for (i = period; i < n; i += period)
        memcpy(a + i, a, (n - i < period ? n - i : period) * sizeof *a);
}

typedef struct {
    size_t B, T, d;
    int quick;
} shape;

static stx_real *persist_random(stx_ctx *x, size_t n, uint64_t stream, double scale) {
    stx_real *p = persist(x, n);
    fill_repeating(p, n, stream, scale);
    return p;
}

static stx_real *persist_zero(stx_ctx *x, size_t n) {
    stx_real *p = persist(x, n);
    memset(p, 0, n * sizeof *p);
    return p;
}

/* Returns arguments for both passes, with random arrays and a dropout of 0.1. */
static stx_sru_args recurrence_args(stx_ctx *x, size_t B, size_t T, size_t O) {
    size_t n = B * T * O, j, forward, backward;
    stx_sru_args a;
    stx_real *bias = persist(x, 2 * O), *mask = persist_random(x, B * O, 6, 1);
    memset(&a, 0, sizeof a);
    a.B = B;
    a.T = T;
    a.H = O;
    a.D = 1;
    a.k = 3;
    a.alpha = 1;
    a.u = persist_random(x, 3 * n, 1, 2);
    a.xr = persist_random(x, n, 2, 1);
    a.dh = persist_random(x, n, 3, 1);
    a.v = persist_random(x, 2 * O, 4, 1);
    a.c0 = persist_random(x, B * O, 5, 1);
    for (j = 0; j < 2 * O; j++) bias[j] = j < O ? 0 : -2;
    a.bias = bias;
    for (j = 0; j < B * O; j++) mask[j] = mask[j] < (stx_real)-0.8 ? 0 : (stx_real)(1 / 0.9);
    a.m = mask;
    a.h = persist(x, n);
    a.last = persist(x, B * O);
    a.c = persist(x, B * stx_sru_tiles(&a) * O);
    a.du = persist(x, 3 * n);
    a.dxr = persist(x, n);
    a.dv = persist_zero(x, 2 * O);
    a.dbias = persist_zero(x, 2 * O);
    a.dc0 = persist_zero(x, B * O);
    forward = stx_sru_work(x, &a, 0);
    backward = stx_sru_work(x, &a, 1);
    a.work = stx_persist(x, forward > backward ? forward : backward);
    check(x);
    return a;
}

/* Returns the time per call in seconds. */
static double recurrence_time(stx_ctx *x, stx_sru_args *a, int backward, size_t calls) {
    double at = seconds();
    size_t i;
    for (i = 0; i < calls; i++) {
        if (backward)
            stx_sru_bwd(x, a);
        else
            stx_sru_fwd(x, a);
    }
    at = (seconds() - at) / (double)calls;
    check(x);
    return at;
}

static void recurrence_shape(const shape *s, size_t B, int at, int R) {
    stx_ctx *x = context(F32, opt.threads);
    size_t n = B * s->T * s->d, j, calls[2] = {1, 1};
    samples rate[2], ratio[2], copies;
    stx_sru_args a = recurrence_args(x, B, s->T, s->d);
    const double element = (double)(n * sizeof(stx_real));
    int r, back;
    rate[0].n = rate[1].n = ratio[0].n = ratio[1].n = copies.n = 0;
    for (r = -2; r < R; r++) /* two warm-up rounds, the second of which finds the number
                                of calls */
        for (back = 0; back < 2; back++) {
            double with = r < 0 ? 0 : copy_rate(),
                   t = recurrence_time(x, &a, back, calls[back]);
            if (r < 0) {
                calls[back] = t < 0.05 ? 1 + (size_t)(0.05 / t) : 1;
                continue;
            }
            sample(&copies, with);
            sample(&rate[back], element * minimum[back] / t);
            sample(&ratio[back], element * minimum[back] / t / with);
        }
    for (j = 0; j < n; j += 997)
        if (!isfinite(a.h[j]) || !isfinite(a.du[j]) || !isfinite(a.dxr[j]))
            die("the results of the recurrence are not finite");
    for (back = 0; back < 2; back++) {
        const double more = (double)published[back] / minimum[back];
        row_begin();
        cell(0, "(%zu, %zu, %zu)%s", B, s->T, s->d,
             element * minimum[1] < 4 << 20 ? ", in caches" : "");
        cell(1, "%s", back ? "backward" : "forward");
        cell(2, "%.3f", element * minimum[back] / median(&rate[back]) * 1e3);
        cell_spread(3, &rate[back], 1, 1e-9);
        cell_spread(5, &ratio[back], 2, 1);
        cell_median(7, &rate[back], 1, 1e-9 * more);
        cell_median(8, &ratio[back], 2, more);
        cell_median(9, &copies, 1, 1e-9);
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
    say("## Recurrence\n\n"
        "stx_sru_fwd and stx_sru_bwd on (B, T, d): k = 3, a mask, no padding, f32, %d threads; "
        "forward keeps what\nbackward needs. Median of %d rounds (minimum - maximum). GB/s count "
        "the minimum that must be moved: %d elements\nper unit and time forward (u0 u1 u2 x; h), "
        "%d backward (u0 u1 u2 x dh; du0 du1 du2 dx). \"with c\": %d and %d, as\nmoved by "
        "kernels that keep every state. Before each sample, memcpy between two buffers of %zu "
        "MiB in all\nthreads is timed, bytes read and written; \"of copy\" is the median of the "
        "ratios of the rounds.\n\n",
        opt.threads, R, minimum[0], minimum[1], published[0], published[1], copy.n >> 20);
    header("(B, T, d)|pass|ms|GB/s|range|of copy|range|GB/s with c|of copy|copy GB/s");
    for (i = 0; i < SHAPES; i++) {
        size_t B = shapes[i].B;
        char what[64];
        if (opt.quick && !shapes[i].quick) continue;
        /* 10 elements per unit and time step for u, x, dh, h, du and dx, and a quarter
           more for all other arrays */
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


// >>attention: one head with P channels, compared with batched matmuls and a row softmax

typedef struct {
    size_t B, T, M, P;
    int quick;
} head;

static const head one_heads[HEADS] = {{1, 1024, 1024, 768, 1},
                                      {4, 1024, 1024, 744, 0},
                                      {4, 1024, 1024, 1024, 0},
                                      {2, 512, 512, 480, 1}};

typedef struct {
    stx_ctx *x[2];                  /* [0] for stx_attention, [1] for matmuls */
    stx_real *in, *mask, *out[2];   /* in: q, dy, k, v, and the concatenation of k and v */
    size_t nq, nk, S;               /* nq, nk: number of elements of q and of k; S: number of
                                       keys */
    samples ms[2];
} head_run;

static stx_tensor *by_matmuls(stx_ctx *x, const head *s, const head_run *h, stx_tensor *q) {
    const stx_real *keys = h->in + 2 * h->nq;
    stx_tensor *k = stx_variable(x, keys, s->B, h->S, s->P, 0),
               *v = stx_variable(x, keys + h->nk, s->B, h->S, s->P, 0),
               *hide = stx_input(x, h->mask, s->T, h->S, 0, 0), *scores;
    scores = stx_scale(x, stx_matmul(x, q, k, 0, 1), 1 / sqrt((double)s->P));
    return stx_matmul(x, stx_softmax(x, stx_add(x, scores, hide)), v, 0, 0);
}

static stx_tensor *by_attention(stx_ctx *x, const head *s, const head_run *h, stx_tensor *q) {
    stx_attention_in in;
    stx_attention_desc d;
    memset(&in, 0, sizeof in);
    memset(&d, 0, sizeof d);
    in.q = q;
    in.kv = stx_variable(x, h->in + 2 * h->nq + 2 * h->nk, s->B, h->S, 2 * s->P, 0);
    d.heads = 1;
    return stx_attention(x, &in, &d);
}

/* Runs one forward and backward pass, by stx_attention (way 0) or by matmuls that store
   the scores of all B T (M + T) pairs (way 1). Returns the time in seconds. h->out[way]
   receives the output and the gradient of q. */
static double head_pass(head_run *h, const head *s, int way) {
    stx_ctx *x = h->x[way];
    stx_tensor *o, *q, *dy;
    double t;
    stx_begin(x, STX_TRAIN);
    q = stx_variable(x, h->in, s->B, s->T, s->P, 0);
    dy = stx_input(x, h->in + h->nq, s->B, s->T, s->P, 0);
    t = seconds();
    o = way ? by_matmuls(x, s, h, q) : by_attention(x, s, h, q);
    stx_backward(x, stx_mean(x, stx_mul(x, o, dy)));
    t = seconds() - t;
    check(x);
    memcpy(h->out[way], o->data, h->nq * sizeof *q->data);
    memcpy(h->out[way] + h->nq, q->grad, h->nq * sizeof *q->data);
    return t;
}

static void head_begin(head_run *h, const head *s) {
    size_t b, j, k;
    stx_real *kv;
    int way;
    memset(h, 0, sizeof *h);
    h->S = s->M + s->T;
    h->nq = s->B * s->T * s->P;
    h->nk = s->B * h->S * s->P;
    h->in = (stx_real *)malloc((2 * h->nq + 4 * h->nk) * sizeof *h->in);
    h->mask = (stx_real *)malloc(s->T * h->S * sizeof *h->mask);
    for (way = 0; way < 2; way++) {
        h->out[way] = (stx_real *)malloc(2 * h->nq * sizeof *h->in);
        h->x[way] = context(F32, opt.threads);
    }
    if (!h->in || !h->mask || !h->out[0] || !h->out[1]) die("out of memory");
    fill_repeating(h->in, 2 * h->nq + 2 * h->nk, 7, 1);
    kv = h->in + 2 * h->nq + 2 * h->nk;
    for (b = 0; b < s->B * h->S; b++) /* the same keys and values, concatenated */
        for (k = 0; k < 2; k++)
            memcpy(kv + (2 * b + k) * s->P, h->in + 2 * h->nq + k * h->nk + b * s->P,
                   s->P * sizeof *kv);
    for (j = 0; j < s->T; j++)
        for (k = 0; k < h->S; k++) h->mask[j * h->S + k] = k > s->M + j ? (stx_real)-1e30 : 0;
}

/* Ends the program if the n results of the two ways differ, relative to the largest
   one. */
static void compare(const stx_real *a, const stx_real *b, size_t n) {
    double top = 0, worst = 0;
    size_t j;
    for (j = 0; j < n; j++) {
        double e = fabs((double)a[j] - (double)b[j]);
        top = fmax(top, fabs((double)b[j]));
        if (!(e <= worst)) worst = e;
    }
    if (!(worst <= 1e-4 * top)) die("attention and matmuls differ");
}

static void head_end(head_run *h) {
    int way;
    for (way = 0; way < 2; way++) {
        stx_destroy(h->x[way]);
        free(h->out[way]);
    }
    free(h->in);
    free(h->mask);
}

static void bench_attention(void) {
    static head_run h;
    int i, r, way, R = rounds(5);
    say("## Attention of one head\n\n"
        "The attention of SRU++, forward and backward, one head of P channels, B streams of T "
        "times after a memory of M,\nf32, %d threads: stx_attention, which keeps no scores, and "
        "the same by stx_matmul and stx_softmax, which keep\nthem. Interleaved; median of %d "
        "rounds (minimum - maximum). MB: peak use of the context, with the inputs.\n\n",
        opt.threads, R);
    header("B, T, M, P|attention ms|range|MB|matmuls ms|range|MB|matmuls / attention");
    for (i = 0; i < HEADS; i++) {
        const head *s = &one_heads[i];
        if (opt.quick && !s->quick) continue;
        progress("attention ..");
        head_begin(&h, s);
        for (r = -1; r < R; r++)
            for (way = 0; way < 2; way++) {
                double t = head_pass(&h, s, way);
                if (r >= 0) sample(&h.ms[way], t * 1e3);
            }
        compare(h.out[0], h.out[1], h.nq);
        compare(h.out[0] + h.nq, h.out[1] + h.nq, h.nq);
        found.head[i] = median(&h.ms[1]) / median(&h.ms[0]);
        row_begin();
        cell(0, "%zu, %zu, %zu, %zu", s->B, s->T, s->M, s->P);
        for (way = 0; way < 2; way++) {
            cell_spread(1 + 3 * way, &h.ms[way], 1, 1);
            cell(3 + 3 * way, "%.0f", (double)stx_peak_bytes(h.x[way]) * 1e-6);
        }
        cell(7, "%.2f", found.head[i]);
        head_end(&h);
    }
    print_table();
}


// >>worker: the options of bench/peers/sru_torch.py

static struct {
    int layers, d, P, heads, recompute;
    double alpha;
} model = {4, 512, 128, 1, 0, 0};

static const option model_options[] = {OPTION_WHOLE("--nlayers", &model.layers, 1),
                                       OPTION_WHOLE("--hid-sz", &model.d, 1),
                                       OPTION_WHOLE("--n-proj", &model.P, 0),
                                       OPTION_WHOLE("--nheads", &model.heads, 1),
                                       OPTION_FLAG("--recompute", &model.recompute),
                                       OPTION_REAL("--alpha", &model.alpha),
                                       OPTION_END};

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
    ld.sru.recompute_layers = model.recompute ? SIZE_MAX : 0;
    m = stx_sru_lm_create(x, &ld);
    check(x);
    return m;
}

static stx_lm create(stx_ctx *x) {
    return stx_sru_as_lm(model_create(x, model.layers, model.d, model.P, model.heads, model.alpha));
}


// >>training

/* P: 0 for SRU, otherwise the width of SRU++. bf16: 0 for no bf16 contenders, 1 for
   all, 2 for all but the compiled one. quick: 1 if --quick includes the model. */
typedef struct {
    const char *name, *title;
    int layers, d, P, T, B, steps, bf16, no_update, quick;
} config;

static const config configs[CONFIGS] = {
    {"tiny", "SRU++", 4, 256, 64, 128, 4, 40, 1, 0, 1},
    {"small", "SRU++", 4, 512, 128, 256, 8, 8, 1, 0, 0},
    {"fp32-small", "SRU++", 10, 1920, 480, 512, 2, 1, 1, 0, 0},
    {"base", "SRU++", 10, 3072, 768, 1024, 1, 1, 2, 0, 0},
    {"sru", "SRU, forward and backward only", 4, 1024, 0, 256, 8, 3, 1, 1, 1}};

/* Returns nonzero for a configuration named by --config. The default is all of them or,
   with --quick, the small ones. */
static int wanted(const config *g) {
    if (opt.config) return listed(opt.config, g->name);
    return g->quick || !opt.quick;
}

/* Writes the initial parameters and returns their number in millions. alpha_attn is
   nonzero, so that an error in attention changes the losses from the first step on. */
static double configure(const config *g, const char *path) {
    stx_ctx *x = context(F32, opt.threads);
    const stx_params *p = stx_sru_lm_params(model_create(x, g->layers, g->d, g->P, 1, 1));
    double n = (double)stx_params_size(p) * 1e-6;
    params_save(x, p, path);
    stx_destroy(x);
    return n;
}

static void training_config(int at) {
    static contender c[CONTENDERS];
    const config *g = &configs[at];
    int i, r, skip[CONTENDERS], warmup = lm_warmup(opt.quick ? 2 : 3),
              B = opt.batch ? opt.batch : g->B, steps = lm_steps(g->steps);
    char params[512], label[80];
    arguments shared;
    double millions;
    snprintf(params, sizeof params, "%s/params.%s.safetensors", opt.work, g->name);
    snprintf(label, sizeof label, "training, %s", g->name);
    millions = configure(g, params);
    shared.n = 0;
    arg_number(&shared, "--nlayers", (size_t)g->layers);
    arg_number(&shared, "--hid-sz", (size_t)g->d);
    arg_number(&shared, "--n-proj", (size_t)g->P);
    arg_number(&shared, "--block-sz", (size_t)g->T);
    lm_training_arguments(&shared, B, steps, warmup);
    arg_text(&shared, "--load", params);
    if (g->no_update) arg(&shared, "--no-update");
    for (i = 0; i < CONTENDERS; i++) /* skip contenders that would run out of memory */
        skip[i] = lm_kinds[i].precision == BF16
                  && (!g->bf16 || (g->bf16 == 2 && lm_kinds[i].compile));
    lm_start(c, lm_kinds, CONTENDERS, PEER, skip, label, opt.data, &shared);
    r = lm_rounds(c, CONTENDERS, 7, 120, label);
    say("%s: %s, d %d, ", g->name, g->title, g->d);
    if (g->P) say("P %d, ", g->P);
    say("%d layers, T %d, B %d; %.1f million parameters;", g->layers, g->T, B, millions);
    lm_training_say(c, r, steps, warmup);
    lm_keep(&found.training[at], c);
    unlink(params);
}

static void bench_training(void) {
    int i;
    say("## Training\n\n"
        "Language models over bytes. A step is forward, backward, gradient clipping and AdamW, "
        "except where it says\notherwise; %d threads. The data, initial parameters and steps are "
        "the same for all; memory of the previous\nsegment. Losses (and the relative norm of the "
        "gradient) must agree with the first PyTorch row to %g (f32) and\n%g (bf16), or the row "
        "is void.\n\n",
        opt.threads, lm_kinds[OWN].tolerance, lm_kinds[OWN_BF16].tolerance);
    for (i = 0; i < CONFIGS; i++)
        if (wanted(&configs[i])) training_config(i);
}


// >>generation

enum { PROMPT = 1100, WINDOW = 1024 };

typedef struct {
    stx_lm lm;
    void *gen;
    samples ms, prompt;
    double bytes; /* parameter bytes read per token */
    int config, threads;
} stream;

static void stream_open(stream *s, int at, int threads) {
    const config *g = &configs[at];
    stx_ctx *x = context(F32, threads);
    stx_sru_lm *m = model_create(x, g->layers, g->d, g->P, 1, 1);
    s->config = at;
    s->threads = threads;
    s->lm = stx_sru_as_lm(m);
    s->gen = s->lm.gen_create(s->lm.model, 1, WINDOW);
    check(x);
    s->bytes = (double)(stx_params_size(s->lm.params) - m->vocab_io->in_emb->size)
               * sizeof(stx_real);
}

static void stream_row(const stream *s) {
    const config *g = &configs[s->config];
    const double ms = median(&s->ms);
    row_begin();
    cell(0, "%s: d %d, %d layers", g->name, g->d, g->layers);
    cell(1, "%d", s->threads);
    cell_spread(2, &s->ms, 3, 1);
    cell(4, "%.0f", 1e3 / ms);
    cell(5, "%.1f", s->bytes / ms * 1e-6);
    cell_median(6, &s->prompt, 0, 1);
    cell(7, "%.0f", (double)stx_bytes(s->lm.ctx) * 1e-6);
    if (!(found.token[s->config] <= ms)) found.token[s->config] = ms;
}

static void bench_generation(void) {
    static stream streams[2 * CONFIGS];
    int32_t ids[PROMPT];
    int i, k, r, t, count = 0, R = rounds(5), n = opt.quick ? 16 : 64;
    size_t bytes;
    unsigned char *text = read_bytes(opt.data, &bytes);
    if (bytes < PROMPT) die("the --data file is too short for the prompt of 1100 bytes");
    for (k = 0; k < PROMPT; k++) ids[k] = text[k];
    free(text);
    for (i = 0; i < CONFIGS; i++)
        for (t = 0; t <= (opt.threads > 1) && wanted(&configs[i]); t++)
            stream_open(&streams[count++], i, t ? opt.threads : 1);
    probe_begin();
    for (r = -1; r < R; r++) {
        progress("generation ..");
        for (i = 0; i < count; i++) {
            double prompt_rate, took;
            stream *s = &streams[i];
            took = generate(&s->lm, s->gen, ids, PROMPT, n, &prompt_rate);
            if (r < 0) continue;
            sample(&s->prompt, prompt_rate);
            sample(&s->ms, took * 1e3 / n);
        }
        if (r >= 0) probe_now();
    }
    say("## Generation\n\n"
        "One stream, one token at a time, f32, after a prompt of %d bytes, which fills the window "
        "of %d of SRU++.\nMedian of %d rounds of %d tokens (minimum - maximum). GB/s: parameters "
        "that a token reads, per second.\n\n",
        PROMPT, WINDOW, R, n);
    header("model|threads|ms per token|range|tokens/s|GB/s|prompt tokens/s|memory MB");
    for (i = 0; i < count; i++) stream_row(&streams[i]);
    print_table();
    probe_say();
    for (i = 0; i < count; i++) stx_destroy(streams[i].lm.ctx);
}


// >>summary

static void bench_summary(void) {
    static const int digits[1] = {3};
    int i;
    say("## Summary\n\nRatios within this run. Training is compared with PyTorch with the same "
        "model; \"-\": not measured, or void.\n\n");
    header("recurrence (B, T, d)|forward, of copy|backward, of copy");
    for (i = 0; i < SHAPES; i++) {
        if (!measured(found.fwd[i])) continue;
        row_begin();
        cell(0, "(%zu, %zu, %zu)", shapes[i].B, shapes[i].T, shapes[i].d);
        cell(1, "%.2f", found.fwd[i]);
        cell(2, "%.2f", found.bwd[i]);
    }
    if (table.rows > 1) print_table();
    header("attention of one head (B, T, M, P)|time of matmuls / of attention");
    for (i = 0; i < HEADS; i++) {
        const head *s = &one_heads[i];
        if (!measured(found.head[i])) continue;
        row_begin();
        cell(0, "(%zu, %zu, %zu, %zu)", s->B, s->T, s->M, s->P);
        cell(1, "%.2f", found.head[i]);
    }
    if (table.rows > 1) print_table();
    header("model|" LM_SUMMARY_HEADER "|ms per generated token");
    for (i = 0; i < CONFIGS; i++) {
        const lm_found *f = &found.training[i];
        if (!measured(f->rate[OWN]) && !measured(found.token[i])) continue;
        row_begin();
        cell(0, "%s", configs[i].name);
        lm_summary(1, f);
        cell_values(1 + LM_SUMMARY, &found.token[i], digits, 1);
    }
    if (table.rows > 1) print_table();
}


// >>main

static const char usage[] =
    "bench_sru [options]: times SRU and SRU++ (sh bench/run.sh --only sru)\n"
    "  --only LIST        sru, or some of sru-recurrence,sru-attention,sru-training,"
    "sru-generation\n"
    "  --config LIST      models of training and generation, some of "
    "tiny,small,fp32-small,base,sru (default: all)\n"
    "  --quick            fewer rounds, shapes and models, about 2 minutes\n"
    "  --rounds N         samples of each value (default: 9 of the recurrence, 7 of training, "
    "5 of the others)\n"
    "  --warmup N         steps before the first round (default 3; at least 2 for compilation)\n"
    "  --worker OPTIONS   one contender: options of bench/peers/sru_torch.py, --save FILE, "
    "--alpha X, --recompute\n" LM_USAGE;

int main(int argc, char **argv) {
    int ended;
    program = "bench_sru";
    family.options = model_options;
    family.create = create;
    opt.only = "sru";
    lm_kinds[PEER_PLAIN].name = "PyTorch eager f32, as installed, recurrence by autograd";
    lm_kinds[PEER_PLAIN].more[0] = "--recurrence";
    lm_kinds[PEER_PLAIN].more[1] = "loop";
    if (argc > 1 && !strcmp(argv[1], "--worker")) {
        job.radam = 1;
        job.T = 256;
        ended = worker_parse(argc, argv);
        return ended ? ended : worker();
    }
    ended = lm_parse(argc, argv, usage, "tiny,small,fp32-small,base,sru");
    if (ended) return ended - 1;
    not_measured((double *)(void *)&found, sizeof found / sizeof(double));
    if (section("sru", "sru-recurrence")) bench_recurrence();
    if (section("sru", "sru-attention")) bench_attention();
    if (section("sru", "sru-training")) bench_training();
    if (section("sru", "sru-generation")) bench_generation();
    bench_summary();
    probe_end();
    return 0;
}
