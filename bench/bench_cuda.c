/* bench_cuda.c - times seqtx on a GPU, beside PyTorch: training steps, the attention,
   curves, products and passes, idle gaps.

       make bench-cuda CUDA_ARCH=sm_90         builds this file and runs bench/run_cuda.sh (bench/README.md)

   Times are of CUDA events on the context's stream, rates of whole rounds by the
   host's clock. Training contenders are processes of their own, which answer lines on
   stdin, alternating (the protocol of peers/attn_span_torch_cuda.py): this program again
   more with --worker, and PyTorch. All start from the same parameter file, read the
   same random tokens, and a row whose losses are not the peer's is void. */
#define _DEFAULT_SOURCE
#ifdef SEQTX_CUDA_HOST /* tests/cuda_host declares CUDA for C++ only */
  #include "../tests/cuda_host/cuda_host.h"
typedef struct CUevent_st *cudaEvent_t;
typedef struct CUstream_st *cudaStream_t;
extern int cudaEventCreate(cudaEvent_t *event);
extern int cudaEventDestroy(cudaEvent_t event);
extern int cudaEventRecord(cudaEvent_t event, cudaStream_t stream);
extern int cudaEventSynchronize(cudaEvent_t event);
extern int cudaEventElapsedTime(float *ms, cudaEvent_t start, cudaEvent_t end);
extern int cudaMemGetInfo(size_t *left, size_t *total);
extern int cudaRuntimeGetVersion(int *version);
extern int cudaDriverGetVersion(int *version);
#else
  #include <cuda_runtime_api.h>
#endif
#define SEQTX_IMPLEMENTATION
#include "../seqtx_attn_span.h"
#include "../seqtx_sru.h"
#include "../seqtx_text.h"
#include "report.h"
#include "cuda_model.h"

enum { F32, TF32, BF16, MODES };

static const char *const mode_name[MODES] = {"f32", "tf32", "bf16"};

static struct {
    int tiny, rounds, warmup, check, batch, worker, no_graph, mode;
    double limit; /* seconds for each section */
    const char *self, *data, *params, *python, *peer, *peer_device, *work, *section, *config;
} opt = {0,
         5,
         20,
         10,
         0,
         0,
         0,
         BF16,
         540,
         NULL,
         NULL,
         NULL,
         NULL,
         NULL,
         "cuda",
         ".",
         "training,attention,curves,gemm,idle",
         NULL};

static void check(stx_ctx *x) {
    if (!stx_ok(x)) die(stx_error(x));
}

static void cuda(int error, const char *what) {
    if (error) {
        fprintf(stderr, "bench: %s: CUDA error %d\n", what, error);
        exit(1);
    }
}

/* Refused: an error of the context, which the caller reports. */
static stx_ctx *context_or(int mode, int no_graph) {
    stx_desc d;
    stx_ctx *x;
    memset(&d, 0, sizeof d);
    d.device = STX_CUDA;
    d.precision = mode == BF16 ? STX_PREC_BF16 : STX_PREC_F32;
    d.tf32 = mode == TF32;
    d.no_graph = no_graph;
    d.threads = 1;
    x = stx_create(&d);
    if (!x) die("no memory");
    return x;
}

static stx_ctx *context(int mode, int no_graph) {
    stx_ctx *x = context_or(mode, no_graph);
    check(x);
    return x;
}

static double used_bytes(void) { /* of the whole device, by the driver */
    size_t left = 0, total = 0;
    cuda(cudaMemGetInfo(&left, &total), "cudaMemGetInfo");
    return (double)(total - left);
}

static config configured(config c) {
    if (opt.tiny) c = tiny(c);
    if (opt.batch) c.batch = (size_t)opt.batch;
    return c;
}

static const config *config_named(const char *name) {
    int i;
    for (i = 0; i < CONFIGS; i++)
        if (!strcmp(configs[i].name, name)) return &configs[i];
    die("--config names none of small-full, small, 12x512, 24x768, all-attention, small-205");
    return NULL;
}

/* Is name among the words of list, which commas separate? NULL: everything is. */
static int listed(const char *list, const char *name) {
    size_t n = strlen(name);
    while (list && *list) {
        size_t w = strcspn(list, ",");
        if (w == n && !strncmp(list, name, n)) return 1;
        list += w + (list[w] == ',');
    }
    return !list;
}


// >>events: time on the device

enum { MAX_STEPS = 512 };

static struct {
    cudaEvent_t at[MAX_STEPS + 1];
    int made;
} mark;

static void mark_now(stx_ctx *x, int i) {
    while (mark.made <= i) cuda(cudaEventCreate(&mark.at[mark.made++]), "cudaEventCreate");
    cuda(cudaEventRecord(mark.at[i], (cudaStream_t)stx_cuda_stream(x)), "cudaEventRecord");
}

static double mark_ms(int from, int to) { /* waits for the later one */
    float ms = 0;
    cuda(cudaEventSynchronize(mark.at[to]), "cudaEventSynchronize");
    cuda(cudaEventElapsedTime(&ms, mark.at[from], mark.at[to]), "cudaEventElapsedTime");
    return (double)ms;
}

/* What is timed: fn(user), many times between two events, long enough for the events'
   resolution and the first launch not to matter */
typedef struct job {
    void (*fn)(struct job *j);
    stx_ctx *x;
    stx_real *a[8];
    int32_t *ids;
    size_t n[4];
    int ta, tb;
    stx_attention_args attention;
    stx_sru_args sru;
    void *work[2];
    stx_optim *optim;
    int reps;
    samples ms;
} job;

static double job_ms(job *j) {
    int i;
    mark_now(j->x, 0);
    for (i = 0; i < j->reps; i++) j->fn(j);
    mark_now(j->x, 1);
    return mark_ms(0, 1) / j->reps;
}

static int job_warm(job *j) { /* 0: it cannot be done, the context says why */
    double ms;
    j->reps = 1;
    if (!stx_ok(j->x)) return 0;
    job_ms(j); /* loads code, chooses algorithms */
    stx_cuda_sync(j->x);
    if (!stx_ok(j->x)) return 0;
    ms = job_ms(j);
    j->reps = opt.tiny || ms > 5 ? 1 : ms * 1000 < 5 ? 1000 : (int)(5 / ms) + 1;
    if (!opt.tiny) job_ms(j);
    return stx_ok(j->x);
}

static void job_round(job *j) {
    sample(&j->ms, job_ms(j));
}

/* n random numbers in (-scale, scale) on the device. The host draws four million once;
   runs of them, begun at odd places, fill what is larger. */
static void random_fill(stx_ctx *x, stx_real *to, size_t n, double scale) {
    enum { POOL = 1 << 22, PIECE = 1 << 20 };

    static float *pool;
    static size_t turn;
    float *piece = (float *)malloc(PIECE * sizeof *piece);
    size_t i, at, e;
    if (!pool) {
        pool = (float *)malloc(POOL * sizeof *pool);
        for (i = 0; pool && i < POOL; i += 4) {
            uint32_t r[4];
            stx_philox(20190519, 1, i, r);
            for (e = 0; e < 4; e++) pool[i + e] = (float)((double)r[e] / 2147483648.0 - 1);
        }
    }
    if (!pool || !piece) die("no memory");
    for (at = 0; at < n && stx_ok(x); at += PIECE) {
        size_t w = n - at < PIECE ? n - at : PIECE, from = (turn++ * 1299709) % (POOL - PIECE);
        for (i = 0; i < w; i++) piece[i] = (float)scale * pool[from + i];
        stx_cuda_upload_activations(x, stx_offset_ptr(x, to, at), piece, w);
        stx_cuda_sync(x);
    }
    free(piece);
}

static stx_real *device_random(stx_ctx *x, size_t n, double scale, int kind) {
    size_t bytes =
        n * (kind == STX_MEM_ACTIVATIONS && stx_ctx_desc(x)->precision == STX_PREC_BF16 ? 2 : 4);
    stx_real *p = stx_ok(x) ? (stx_real *)stx_cuda_alloc(x, bytes, kind) : NULL;
    if (!p) {
        stx_fail(x, STX_ERR_MEMORY, "out of memory: %zu bytes on the GPU", bytes);
        return NULL;
    }
    random_fill(x, p, n, scale);
    return p;
}

static void *device_bytes(stx_ctx *x, size_t bytes) {
    void *p = stx_ok(x) ? stx_cuda_alloc(x, bytes ? bytes : 1, STX_MEM_BYTES) : NULL;
    if (!p)
        stx_fail(x, STX_ERR_MEMORY, "out of memory: %zu bytes on the GPU", bytes);
    else
        stx_cuda_zero(x, p, bytes ? bytes : 1);
    return p;
}


// >>products

static void run_product(job *j) {
    stx_gemm_args g = stx_gemm_init(j->ta, j->tb, j->n[0], j->n[1], j->n[2], j->a[0], j->a[1],
                                    j->a[2]);
    /* gradients of weights are added, in pieces, to what is there */
    g.beta = j->ta ? 1 : 0;
    stx_gemm_cuda(j->x, &g);
}

static void product_job(job *j, stx_ctx *x, size_t M, size_t N, size_t K, int ta, int tb) {
    memset(j, 0, sizeof *j);
    j->fn = run_product;
    j->x = x;
    j->n[0] = M;
    j->n[1] = N;
    j->n[2] = K;
    j->ta = ta;
    j->tb = tb;
    j->a[0] = device_random(x, M * K, 1, STX_MEM_ACTIVATIONS);
    j->a[1] = device_random(x, K * N, 1, STX_MEM_ACTIVATIONS);
    /* gradients of weights are floats */
    j->a[2] = device_random(x, M * N, 1, ta ? STX_MEM_BYTES : STX_MEM_ACTIVATIONS);
}

static void job_free(job *j) {
    int i;
    for (i = 0; i < 8; i++)
        if (j->a[i]) stx_cuda_free(j->x, j->a[i]);
    for (i = 0; i < 2; i++)
        if (j->work[i]) stx_cuda_free(j->x, j->work[i]);
    if (j->ids) stx_cuda_free(j->x, j->ids);
}

/* FLOP/s of a large bf16 product: what "of the product's rate" means in the tables */
static double product_rate(void) {
    size_t n = opt.tiny ? 64 : 8192;
    stx_ctx *x = context(BF16, 1);
    static job j;
    double rate = NAN;
    int r;
    product_job(&j, x, n, n, n, 0, 1);
    if (job_warm(&j)) {
        for (r = 0; r < opt.rounds; r++) job_round(&j);
        rate = 2.0 * (double)n * (double)n * (double)n / median(&j.ms) * 1e3;
    }
    check(x);
    stx_destroy(x);
    return rate;
}


// >>trainee: a model in training, and all that a step needs

typedef struct {
    config c;
    stx_ctx *x;
    stx_span *m;
    stx_optim *optim;
    stx_corpus *text;
    stx_batches *batches;
    stx_span_state *memory;
    stx_schedule lr;
    stx_ids *in, *out;
    int32_t *block[2];
    double rate, nll, first, at_check;
    uint64_t done, key;
} trainee;

/* literal: bit 0: rows that never existed are zero keys, as the peer has them; bit 1:
   exact eps */
static stx_span *model_create(stx_ctx *x, const config *c, int literal) {
    stx_span_desc d;
    stx_span *m;
    stx_real *z = (stx_real *)malloc(c->heads * sizeof *z);
    size_t l, h;
    memset(&d, 0, sizeof d);
    d.vocab = vocab_of(c);
    d.layers = c->layers;
    d.dim = c->dim;
    d.heads = c->heads;
    d.inner = c->inner;
    d.span = c->span;
    d.pers = c->pers;
    d.adapt_span = 1;
    d.ramp = RAMP;
    d.span_loss = 5e-7;
    if (literal & 1) d.literal |= STX_SPAN_LITERAL_MEMORY;
    if (literal & 2) d.literal |= STX_SPAN_LITERAL_EPS;
    m = stx_span_create(x, &d);
    for (l = 0; z && m && l < c->layers; l++) {
        for (h = 0; h < c->heads; h++) z[h] = (stx_real)(span_of(c, l, h) / (double)c->span);
        stx_set(x, m->layer[l].z, z);
    }
    free(z);
    return m;
}

/* Random bytes, the same on every machine; as many as steps need, so that no one
   starts again at the beginning */
static void write_data(const char *path, const config *c, size_t steps) {
    FILE *f = fopen(path, "wb");
    size_t n = c->batch * ((steps + 2) * c->block + 2), i, e;
    if (!f) die("the file of random tokens cannot be written");
    for (i = 0; i < n; i += 16) {
        uint32_t r[4];
        unsigned char b[16];
        stx_philox(7, 2, i, r);
        for (e = 0; e < 16; e++)
            b[e] = (unsigned char)((r[e / 4] >> 8 * (e % 4) & 255) % vocab_of(c));
        fwrite(b, 1, n - i < 16 ? n - i : 16, f);
    }
    if (fclose(f)) die("the file of random tokens cannot be written");
}

static int trainee_create(trainee *t, const config *c, int mode, int no_graph, int literal,
                          const char *data, const char *params) {
    stx_optim_desc od;
    stx_batches_desc bd;
    stx_vocab *v;
    memset(t, 0, sizeof *t);
    memset(&od, 0, sizeof od);
    memset(&bd, 0, sizeof bd);
    t->c = *c;
    t->first = t->at_check = t->nll = NAN;
    t->x = context_or(mode, no_graph);
    t->m = model_create(t->x, c, literal);
    if (t->m && params) {
        stx_file *f = stx_file_open(t->x, params);
        if (f) stx_params_load(t->m->params, f, "");
        stx_file_close(f);
    }
    od.kind = STX_ADAGRAD;
    od.clip = 0.03;
    t->lr.lr = 0.07;
    t->lr.warmup = 32000;
    if (t->m) t->optim = stx_optim_create(t->m->params, &od);
    v = stx_vocab_build(t->x, NULL, NULL, 0, 0);
    t->text = stx_corpus_open(t->x, v, data, 0, 0);
    stx_vocab_free(v);
    bd.B = c->batch;
    bd.T = c->block;
    if (t->text) t->batches = stx_batches_create(t->x, t->text, &bd);
    if (t->m) t->memory = stx_span_state_create(t->m, c->batch);
    t->in = stx_tokens_create(t->x, c->batch, c->block);
    t->out = stx_tokens_create(t->x, c->batch, c->block);
    t->block[0] = (int32_t *)malloc(c->batch * c->block * sizeof **t->block);
    t->block[1] = (int32_t *)malloc(c->batch * c->block * sizeof **t->block);
    if (!t->block[0] || !t->block[1]) die("no memory");
    return stx_ok(t->x);
}

static void trainee_destroy(trainee *t) {
    free(t->block[0]);
    free(t->block[1]);
    stx_batches_free(t->batches);
    stx_corpus_close(t->text);
    stx_destroy(t->x);
    memset(t, 0, sizeof *t);
}

static void step(void *user) {
    trainee *t = (trainee *)user;
    stx_tensor *loss;
    stx_begin(t->x, STX_TRAIN);
    loss = stx_span_loss(t->m, t->in, t->out, t->memory, t->memory);
    stx_metric_set(t->x, 0, loss, 1, 0);
    stx_backward(t->x, stx_span_total(t->m, loss));
    stx_optim_step(t->optim, t->rate);
    stx_span_clamp(t->m);
}

/* What comes before a step: tokens and learning rate */
static void trainee_feed(trainee *t) {
    if (stx_batches_next(t->batches, t->block[0], t->block[1]) == STX_BATCH_FRESH)
        stx_span_state_reset(t->memory);
    stx_tokens_set(t->x, t->in, t->block[0]);
    stx_tokens_set(t->x, t->out, t->block[1]);
    t->rate = stx_schedule_lr(&t->lr, ++t->done);
    stx_optim_set_lr(t->optim, t->rate);
}

/* One step as a training program makes it, which asks for the loss after each: the
   host waits for the device once a step. */
static int trainee_step(trainee *t) {
    trainee_feed(t);
    t->key = stx_span_key(t->m, t->in, t->out, t->memory, 0);
    stx_step_run(t->x, t->key, step, t);
    t->nll = stx_metric_get(t->x, 0);
    if (t->done == 1) t->first = t->nll;
    if (t->done == (uint64_t)opt.check) t->at_check = t->nll;
    return stx_ok(t->x);
}

/* n steps with a time for each into ms (NULL: not wanted); gives the seconds of all
   together */
static double trainee_round(trainee *t, int n, samples *ms) {
    double at;
    int k;
    if (n > MAX_STEPS) n = MAX_STEPS;
    stx_cuda_sync(t->x);
    at = seconds();
    mark_now(t->x, 0);
    for (k = 0; k < n && trainee_step(t); k++) mark_now(t->x, k + 1);
    stx_cuda_sync(t->x);
    at = seconds() - at;
    for (k = 0; ms && stx_ok(t->x) && k < n; k++) sample(ms, mark_ms(k, k + 1));
    return at;
}

/* Steps until the memory is full, the clocks are up, the graph is captured and the
   loss that is compared is known */
static int trainee_warm(trainee *t, double limit) {
    double until = seconds() + limit;
    int fill = 3, n;
    size_t l;
    for (l = 0; l < t->c.layers; l++)
        if (3 + ceil(window_of(&t->c, l) / (double)t->c.block) > fill)
            fill = 3 + (int)ceil(window_of(&t->c, l) / (double)t->c.block);
    if (fill < opt.check) fill = opt.check;
    for (n = (int)t->done; n < opt.warmup || n < fill; n++) {
        if (n >= fill && seconds() > until) break;
        if (!trainee_step(t)) return 0;
    }
    return 1;
}

static void answer_line(const trainee *t, double took, int n, const samples *ms, double used) {
    int k;
    printf(
        "{\"tokens_per_s\": %.6g, \"loss_step1\": %.9g, \"loss_check\": %.9g, \"steps_done\": "
        "%llu, \"peak_bytes\": %zu, "
        "\"reserved_bytes\": %zu, \"driver_bytes\": %.0f, \"compiled\": 0, \"ms\": [",
        n ? (double)(t->c.batch * t->c.block) * n / took : 0.0, t->first,
        isfinite(t->at_check) ? t->at_check : -1, (unsigned long long)t->done, stx_peak_bytes(t->x),
        stx_bytes(t->x), used);
    for (k = 0; k < ms->n; k++) printf(k ? ", %.4f" : "%.4f", ms->v[k]);
    printf("]}\n");
    fflush(stdout);
}

/* One contender: says the loss of its first step, then answers "warm" and "round" on
   stdin. */
static int worker(void) {
    static trainee t;
    static samples ms;
    config c = configured(*config_named(opt.config ? opt.config : "small"));
    char line[64];
    double before = used_bytes();
    if (!trainee_create(&t, &c, opt.mode, opt.no_graph, 1, opt.data, opt.params)
        || !trainee_step(&t)) {
        fprintf(stderr, "cannot: %s\n", stx_error(t.x));
        return 3;
    }
    answer_line(&t, 0, 0, &ms, used_bytes() - before);
    while (fgets(line, sizeof line, stdin)) {
        double took = 0;
        int warm = !strncmp(line, "warm", 4);
        ms.n = 0;
        if (warm)
            trainee_warm(&t, opt.limit);
        else {
            trainee_round(&t, 1, NULL); /* others had the device: once without a time */
            took = trainee_round(&t, c.steps, &ms);
        }
        if (!stx_ok(t.x)) {
            fprintf(stderr, "cannot: %s\n", stx_error(t.x));
            return 3;
        }
        answer_line(&t, took, warm ? 0 : c.steps, &ms, used_bytes() - before);
    }
    trainee_destroy(&t);
    return 0;
}

// >>training: contenders interleaved

enum {
    OWN_F32,
    OWN_TF32,
    OWN_BF16,
    OWN_LAUNCHED,
    PEER_F32,
    PEER_TF32,
    PEER_BF16,
    PEER_COMPILED,
    PEER_FLEX,
    CONTENDERS
};

static const struct {
    const char *name;
    int mode;
    const char *extra;
    double tolerance;
} kinds[CONTENDERS] = {{"seqtx f32", F32, NULL, 1e-3},
                       {"seqtx tf32", TF32, NULL, 5e-3},
                       {"seqtx bf16", BF16, NULL, 2e-2},
                       {"seqtx bf16, no graph", BF16, "--no-graph", 2e-2},
                       {"PyTorch eager f32", F32, NULL, 1e-3},
                       {"PyTorch eager tf32", TF32, NULL, 5e-3},
                       {"PyTorch eager bf16 autocast", BF16, NULL, 2e-2},
                       {"PyTorch compiled bf16 autocast", BF16, "--compile", 2e-2},
                       {"PyTorch compiled, FlexAttention, bf16", BF16, "--flex", 2e-2}};

typedef struct {
    process p;
    int on, again, alone;
    samples rate, ms;
    double first_step, first, at_check, peak, driver, warm_steps;
    char cannot[256], note[256];
} contender;

static int out_of_memory(const char *text) {
    return strstr(text, "memory") != NULL;
}

static double at_least(double a, double b) {
    return a > b ? a : b;
}

static void contender_failed(contender *c, int i, int got, const char *log) {
    stop(&c->p);
    c->on = 0;
    if (got < 0)
        snprintf(c->cannot, sizeof c->cannot, "no answer in the time that was left");
    else
        why_not(log, c->cannot, sizeof c->cannot);
    fprintf(stderr, "bench: %s: %s\n", kinds[i].name, c->cannot);
}

static void contender_heard(contender *c) {
    const char *line = c->p.line;
    c->first = json_number(line, "loss_step1");
    c->at_check = json_number(line, "loss_check");
    c->peak = json_number(line, "peak_bytes");
    c->driver = json_number(line, "driver_bytes");
    json_text(line, "note", c->note, sizeof c->note);
}

static void contender_start(contender *c, int i, const config *g, const char *params,
                            const char *data, double until) {
    char *argv[MAX_ARGS], log[512], number[10][24];
    int n = 0, k = 0, got;
    double from = seconds();
    char share[24], rounds_check[2][24];
    snprintf(log, sizeof log, "%s/contender.%s.%d.log", opt.work, g->name, i);
    /* one that does not come to an end leaves time for others */
    until = from + at_least(0.45 * (until - from), 20);
    snprintf(share, sizeof share, "%.0f", at_least((until - from) / 3, 2));
    snprintf(rounds_check[0], sizeof rounds_check[0], "%d", opt.warmup);
    snprintf(rounds_check[1], sizeof rounds_check[1], "%d", opt.check);
#define ARG(s) argv[n++] = (char *)(uintptr_t)(s)
#define NUMBER(name, v) \
  (ARG(name), snprintf(number[k], sizeof *number, "%zu", (size_t)(v)), ARG(number[k++]))
    if (i < PEER_F32) {
        ARG(opt.self);
        ARG("--worker");
        ARG("--config");
        ARG(g->name);
        NUMBER("--batch", g->batch);
        ARG("--mode");
        ARG(mode_name[kinds[i].mode]);
        if (opt.tiny) ARG("--tiny");
        ARG("--seconds");
        ARG(share);
    } else {
        ARG(opt.python);
        ARG(opt.peer);
        ARG("--device");
        ARG(opt.peer_device);
        NUMBER("--nlayers", g->layers);
        NUMBER("--hid-sz", g->dim);
        NUMBER("--inner-hid-sz", g->inner);
        NUMBER("--nheads", g->heads);
        NUMBER("--attn-span", g->span);
        NUMBER("--vocab", vocab_of(g));
        NUMBER("--block-sz", g->block);
        NUMBER("--batch-sz", g->batch);
        NUMBER("--pers", g->pers);
        NUMBER("--steps", g->steps);
        ARG("--adapt-span");
        ARG("--adapt-span-loss");
        ARG("5e-7");
        ARG("--lr-warmup");
        ARG("32000");
        ARG("--dtype");
        ARG(kinds[i].mode == BF16 ? "bf16" : "f32");
        if (kinds[i].mode == TF32) ARG("--tf32");
        ARG("--warm-seconds");
        ARG(share);
    }
    if (kinds[i].extra) ARG(kinds[i].extra);
    ARG("--data");
    ARG(data);
    ARG("--params");
    ARG(params);
    ARG("--warmup");
    ARG(rounds_check[0]);
    ARG("--check-step");
    ARG(rounds_check[1]);
    argv[n] = NULL;
#undef ARG
#undef NUMBER
    c->on = spawn(&c->p, argv, log) != 0;
    got = answer(&c->p, at_least(until - from, 1));
    c->first_step = seconds() - from;
    if (got == 1) {
        contender_heard(c);
        got = ask(&c->p, "warm", at_least(until - seconds(), 1));
    }
    if (got != 1) {
        contender_failed(c, i, got, log);
        return;
    }
    contender_heard(c);
    c->warm_steps = json_number(c->p.line, "steps_done");
}

static void contender_round(contender *c, int i, const config *g, double until) {
    char log[512];
    double rate;
    int got = ask(&c->p, "round", at_least(until - seconds(), 1));
    snprintf(log, sizeof log, "%s/contender.%s.%d.log", opt.work, g->name, i);
    if (got != 1) {
        contender_failed(c, i, got, log);
        return;
    }
    contender_heard(c);
    rate = json_number(c->p.line, "tokens_per_s");
    /* a round in which something was compiled does not count */
    if (!(rate > 0) || json_number(c->p.line, "compiled") > 0) return;
    sample(&c->rate, rate);
    json_numbers(c->p.line, "ms", &c->ms);
}

static void params_write(const config *c, const char *path) {
    stx_desc d;
    stx_ctx *x;
    stx_span *m;
    stx_writer *w;
    memset(&d, 0, sizeof d);
    d.seed = 11;
    x = stx_create(&d);
    m = model_create(x, c, 1);
    check(x);
    w = stx_writer_create(x);
    stx_params_save(w, m->params, "");
    stx_writer_finish(w, path);
    check(x);
    stx_destroy(x);
}

static void training_config(const config *g, double until, double gemm) {
    static contender c[CONTENDERS];
    char params[512], data[512];
    double flop, reserve = 0.2 * (until - seconds()); /* for the rounds */
    int i, r, turn, with = -1;
    work w;
    memset(c, 0, sizeof c);
    snprintf(params, sizeof params, "%s/params.%s.safetensors", opt.work, g->name);
    snprintf(data, sizeof data, "%s/tokens.%s", opt.work, g->name);
    params_write(g, params);
    write_data(data, g, (size_t)(opt.warmup + opt.check + 24 + (opt.rounds + 2) * (g->steps + 3)));
    work_count(&w, g);
    flop = w.model_flop;
    for (i = 0; i < CONTENDERS; i++) {
        char what[128];
        if (i >= PEER_F32 && (!opt.python || !opt.peer)) {
            snprintf(c[i].cannot, sizeof c[i].cannot, "no python3 with torch was found");
            continue;
        }
        if (i > OWN_F32 && seconds() > until - reserve) {
            snprintf(c[i].cannot, sizeof c[i].cannot, "the section's time was over");
            continue;
        }
        snprintf(what, sizeof what, "training, %s: warm-up of %s ..", g->name, kinds[i].name);
        progress(what);
        contender_start(&c[i], i, g, params, data, until - reserve);
        c[i].again = !c[i].on && out_of_memory(c[i].cannot);
    }
    for (r = 0; r < opt.rounds; r++)
        for (turn = 0; turn < CONTENDERS; turn++) {
            char what[128];
            i = (turn + r) % CONTENDERS;
            if (!c[i].on || (r > 0 && seconds() > until)) continue;
            snprintf(what, sizeof what, "training, %s: round %d of %d, %s ..", g->name, r + 1,
                     opt.rounds, kinds[i].name);
            progress(what);
            contender_round(&c[i], i, g, at_least(until, seconds() + 30));
            if (!c[i].on && out_of_memory(c[i].cannot)) c[i].again = 1;
        }
    for (i = 0; i < CONTENDERS; i++)
        if (c[i].on) stop(&c[i].p);
    for (i = 0; i < CONTENDERS; i++) { /* again, with the device to itself */
        if (!c[i].again || seconds() > until - 0.2 * reserve) continue;
        c[i].rate.n = c[i].ms.n = 0;
        contender_start(&c[i], i, g, params, data, until);
        if (!c[i].on) continue;
        c[i].alone = 1;
        for (r = 0; r < opt.rounds && c[i].on && (r == 0 || seconds() < until); r++)
            contender_round(&c[i], i, g, at_least(until, seconds() + 30));
        if (c[i].on) stop(&c[i].p);
    }
    if (c[PEER_F32].rate.n)
        with = PEER_F32;
    else if (c[OWN_F32].rate.n)
        with = OWN_F32;
    for (i = 0; i < CONTENDERS; i++) {
        double off = with < 0 ? NAN
                              : fmax(fabs(c[i].first - c[with].first),
                                     fabs(c[i].at_check - c[with].at_check)),
               ms = median(&c[i].ms);
        int fits = with < 0 || off <= kinds[i].tolerance;
        row_begin();
        cell(0, "%s", g->name);
        cell(1, "%s", kinds[i].name);
        if (!c[i].rate.n) {
            cell(14, "%s: %.80s", "left out",
                 c[i].cannot[0] ? c[i].cannot : "every round compiled something");
            continue;
        }
        cell(12, "%.5f", c[i].first);
        cell(13, "%.5f", c[i].at_check);
        cell(11, "%.1f", c[i].first_step);
        cell(8, "%.2f", c[i].driver * 1e-9);
        cell(7, "%.2f", c[i].peak * 1e-9);
        if (!fits) {
            int k;
            for (k = 2; k < 7; k++) cell(k, "void");
            cell(9, "void");
            cell(10, "void");
            cell(14, "void: losses differ by %.0e", off);
            continue;
        }
        cell(2, "%.0f", median(&c[i].rate));
        cell(3, "%.0f - %.0f", quantile(&c[i].rate, 0), quantile(&c[i].rate, 1));
        cell(4, "%.3f", ms);
        cell(5, "%.3f", quantile(&c[i].ms, 0.95));
        if (c[PEER_BF16].ms.n
            && fmax(fabs(c[PEER_BF16].first - c[with].first),
                    fabs(c[PEER_BF16].at_check - c[with].at_check))
                   <= kinds[PEER_BF16].tolerance)
            cell(6, "%.2f", median(&c[PEER_BF16].ms) / ms);
        cell(9, "%.1f %%", 100 * flop / ms * 1e3 / 989e12);
        if (gemm > 0) cell(10, "%.1f %%", 100 * flop / ms * 1e3 / gemm);
        if (with < 0)
            cell(14, "nothing to compare with");
        else if (i == with)
            cell(14, "reference%s", c[i].alone ? ", alone" : "");
        else
            cell(14, "equal to %.0e%s%s%.40s", off, c[i].alone ? ", alone" : "",
                 c[i].note[0] ? ", " : "", c[i].note);
        if (c[i].warm_steps < opt.warmup) {
            size_t n = strlen(table.cell[table.rows - 1][14]);
            snprintf(table.cell[table.rows - 1][14] + n, CELL - n, ", %.0f warm-up steps",
                     c[i].warm_steps);
        }
    }
    unlink(params);
    unlink(data);
}

static void bench_training(void) {
    double gemm, until = seconds() + opt.limit;
    int i, left = 0;
    for (i = 0; i < CONFIGS; i++) left += listed(opt.config, configs[i].name);
    gemm = product_rate();
    say("## Training\n\nOne step with Adagrad on random bytes; contenders interleaved, %d rounds "
        "after %d warm-up steps or more (a round: "
        "the configuration's steps, after one without a time).\n"
        "tokens/s: host's clock over a round, median (least - most). step ms: between events at "
        "the steps' ends, all rounds. peak: in "
        "use at most by the contender's own\n"
        "count (seqtx: stx_peak_bytes, PyTorch: max_memory_allocated); driver: what the device "
        "holds for it. MFU counts attention 3 "
        "products forward and 6 backward, nothing\n"
        "twice (cuda_model.h), against 989 TFLOP/s and against a bf16 product of 8192 measured "
        "now: %.0f TFLOP/s. First step: from the "
        "process's start to its first loss, with\n"
        "imports, CUDA's start and compilation. Losses are of steps 1 and %d; a row that differs "
        "from the reference by more than 1e-3 "
        "(f32), 5e-3 (tf32) or 2e-2 (bf16) is void.\n"
        "alone: it did not fit beside the others, and ran after them.\n\n",
        opt.rounds, opt.warmup, gemm * 1e-12, opt.check);
    for (i = 0; i < CONFIGS; i++) {
        config c = configured(configs[i]);
        work w;
        if (!listed(opt.config, c.name)) continue;
        work_count(&w, &c);
        say("- %s: %s; %zu streams of %zu tokens, %.1f M parameters, mean keys of a head %.0f, "
            "mean memory %.0f rows, rounds of %d "
            "steps, %.2f TFLOP a step\n",
            c.name, c.what, c.batch, c.block, parameters(&c) * 1e-6, mean_keys(&c), mean_window(&c),
            c.steps, w.model_flop * 1e-12);
    }
    say("\n");
    header(
        "configuration|contender|tokens/s|range|step ms p50|p95|to eager bf16|peak GB|driver "
        "GB|MFU|of product|first step s|loss "
        "1|loss N|");
    for (i = 0; i < CONFIGS; i++) {
        config c = configured(configs[i]);
        double now = seconds();
        if (!listed(opt.config, c.name)) continue;
        training_config(&c, now + (until - now) / left--, gemm);
    }
    print_table();
}


// >>peer for single operations: PyTorch, one process for a section

static struct {
    process p;
    int on;
    char cannot[256];
} ops;

static void ops_start(void) {
    char *argv[8], log[512];
    int n = 0;
    memset(&ops, 0, sizeof ops);
    if (!opt.python || !opt.peer) {
        snprintf(ops.cannot, sizeof ops.cannot, "no python3 with torch was found");
        return;
    }
    snprintf(log, sizeof log, "%s/ops.log", opt.work);
#define ARG(s) argv[n++] = (char *)(uintptr_t)(s)
    ARG(opt.python);
    ARG(opt.peer);
    ARG("--ops");
    ARG("--device");
    ARG(opt.peer_device);
#undef ARG
    argv[n] = NULL;
    ops.on = spawn(&ops.p, argv, log) && answer(&ops.p, 120) == 1;
    if (!ops.on) {
        stop(&ops.p);
        why_not(log, ops.cannot, sizeof ops.cannot);
    }
}

/* One round of an operation: 1 and its times in ms (backward may be NULL), or 0 and
   why. */
static int ops_ask(const char *what, samples *forward, samples *backward, char *why, size_t room,
                   double limit) {
    double ms;
    if (!ops.on) {
        snprintf(why, room, "%s", ops.cannot);
        return 0;
    }
    if (ask(&ops.p, what, limit) != 1) {
        snprintf(ops.cannot, sizeof ops.cannot, "PyTorch stopped answering");
        snprintf(why, room, "%s", ops.cannot);
        stop(&ops.p);
        ops.on = 0;
        return 0;
    }
    ms = json_number(ops.p.line, "fwd_ms");
    if (!(ms >= 0)) {
        json_text(ops.p.line, "cannot", why, room);
        return 0;
    }
    sample(forward, ms);
    ms = json_number(ops.p.line, "bwd_ms");
    if (backward && ms >= 0) sample(backward, ms);
    return 1;
}


// >>attention: the kernels alone

static void run_attention_fwd(job *j) {
    j->attention.work = j->work[0];
    stx_attention_fwd_cuda(j->x, &j->attention);
}

static void run_attention_bwd(job *j) {
    j->attention.work = j->work[1];
    stx_attention_bwd_cuda(j->x, &j->attention);
}

/* E keys of every query: a learned span of E - ramp in all heads */
static void attention_job(job *j, stx_ctx *x, size_t B, size_t T, size_t H, size_t D, size_t E,
                          size_t L) {
    stx_attention_args *a = &j->attention;
    size_t C = H * D, S = E + T, i;
    stx_real z[256];
    memset(j, 0, sizeof *j);
    j->x = x;
    a->B = B;
    a->T = T;
    a->S = S;
    a->H = H;
    a->D = D;
    a->P = L;
    a->pe_heads = 1;
    a->q_row_stride = a->kv_row_stride = C;
    a->q_batch_stride = T * C;
    a->kv_batch_stride = S * C;
    a->span = E;
    a->delta_min = 1;
    a->scale = (stx_real)(1 / sqrt((double)D));
    a->max_span = (stx_real)L;
    a->ramp = RAMP;
    a->q = j->a[0] = device_random(x, B * T * C, 1, STX_MEM_ACTIVATIONS);
    a->k = j->a[1] = device_random(x, B * S * C, 1, STX_MEM_ACTIVATIONS);
    a->v = j->a[2] = device_random(x, B * S * C, 1, STX_MEM_ACTIVATIONS);
    a->dy = j->a[3] = device_random(x, B * T * C, 1, STX_MEM_ACTIVATIONS);
    a->pe = j->a[4] = device_random(x, L * D, 1, STX_MEM_PARAMS);
    a->y = j->a[5] = device_random(x, B * T * C, 0, STX_MEM_ACTIVATIONS);
    a->dk = j->a[6] = device_random(x, B * S * C, 0, STX_MEM_ACTIVATIONS);
    a->dv = j->a[7] = device_random(x, B * S * C, 0, STX_MEM_ACTIVATIONS);
    for (i = 0; i < H; i++) z[i] = (stx_real)(((double)E - RAMP) / (double)L);
    a->span_fraction = (stx_real *)(stx_ok(x) ? stx_cuda_alloc(x, 4 * 256, STX_MEM_PARAMS) : NULL);
    a->row_max = (stx_real *)device_bytes(x, 4 * B * H * T);
    a->inv_sum = (stx_real *)device_bytes(x, 4 * B * H * T);
    a->dq = (stx_real *)(stx_ok(x) ? stx_cuda_alloc(x, 4 * B * T * C, STX_MEM_ACTIVATIONS) : NULL);
    a->dpe = (stx_real *)device_bytes(x, 4 * L * D);
    a->dspan_fraction = (stx_real *)device_bytes(x, 4 * 256);
    if (!a->span_fraction || !a->dq || !stx_ok(x)) {
        stx_fail(x, STX_ERR_MEMORY, "out of memory");
        return;
    }
    stx_cuda_upload_activations(x, (stx_real *)(uintptr_t)a->span_fraction, z, H);
    stx_cuda_zero(x, a->dq, B * T * C * (stx_cuda_is_bf16(x, a->dq) ? 2 : 4));
    j->work[0] = device_bytes(x, stx_attention_work_cuda(x, a, 0));
    j->work[1] = device_bytes(x, stx_attention_work_cuda(x, a, 1));
}

static void bench_attention(void) {
    enum { SPANS = 8, WHO = 4 };

    static const char *const who[WHO] = {"seqtx bf16", "seqtx f32",
                                         "PyTorch FlexAttention bf16, R materialised",
                                         "PyTorch SDPA bf16, E keys, no window, no positions"};
    size_t B = opt.tiny ? 1 : 64, T = opt.tiny ? 16 : 512, H = opt.tiny ? 2 : 8,
           D = opt.tiny ? 16 : 64, L = opt.tiny ? 96 : 8192, n = opt.tiny ? 2 : SPANS, i;
    double until = seconds() + opt.limit;
    int r, w;
    ops_start();
    say("## Attention\n\nAdaptive-span attention (relative table, learned span), the kernels "
        "alone, head size %zu, %zu heads, %zu "
        "streams of %zu queries, E keys each. Median of %d rounds (least -\n"
        "most), interleaved. TFLOP/s count products of 2 D E a query and head: forward 3 and "
        "backward 6 for this attention, 2 and 4 for "
        "SDPA, which has neither window nor positions and\n"
        "stands for what the device can do; nothing made twice counts.\n\n",
        D, H, B, T, opt.rounds);
    header("E|who|forward ms|range|TFLOP/s|backward ms|range|TFLOP/s|");
    for (i = 0; i < n; i++) {
        static samples ms[WHO][2];
        static job j[2][2];
        char cannot[WHO][256], ask_for[2][256];
        size_t E = opt.tiny ? (i ? 96 : 40) : (size_t)64 << i;
        stx_ctx *x[2];
        memset(ms, 0, sizeof ms);
        memset(cannot, 0, sizeof cannot);
        for (w = 0; w < 2; w++) {
            if (seconds() > until) {
                snprintf(cannot[w], sizeof cannot[w], "the section's time was over");
                x[w] = NULL;
                continue;
            }
            x[w] = context(w == 0 ? BF16 : F32, 1);
            attention_job(&j[w][0], x[w], B, T, H, D, E, L);
            j[w][0].fn = run_attention_fwd;
            j[w][1] = j[w][0];
            j[w][1].fn = run_attention_bwd;
            if (!job_warm(&j[w][0]) || !job_warm(&j[w][1]))
                snprintf(cannot[w], sizeof cannot[w], "%.200s", stx_error(x[w]));
        }
        for (w = 0; w < 2; w++)
            snprintf(
                ask_for[w], sizeof ask_for[w],
                "{\"op\": \"attention\", \"kind\": \"%s\", \"B\": %zu, \"T\": %zu, \"H\": %zu, "
                "\"D\": %zu, \"E\": %zu, \"L\": %zu, \"dtype\": \"bf16\"}",
                w ? "sdpa" : "flex", B, T, H, D, E, L);
        for (r = 0; r < opt.rounds && seconds() < until; r++)
            for (w = 0; w < WHO; w++) {
                char what[64];
                snprintf(what, sizeof what, "attention: E %zu, round %d of %d ..", E, r + 1,
                         opt.rounds);
                progress(what);
                if (cannot[w][0]) continue;
                if (w < 2) {
                    sample(&ms[w][0], job_ms(&j[w][0]));
                    sample(&ms[w][1], job_ms(&j[w][1]));
                } else
                    ops_ask(ask_for[w - 2], &ms[w][0], &ms[w][1], cannot[w], sizeof cannot[w],
                            at_least(until - seconds(), 60));
            }
        for (w = 0; w < WHO; w++) {
            int p;
            row_begin();
            cell(0, "%zu", E);
            cell(1, "%s", who[w]);
            for (p = 0; p < 2; p++) {
                double flop = 2.0 * (double)(B * H * T) * (double)D * (double)E
                              * (w == 3 ? p ? 4 : 2
                                 : p    ? 6
                                        : 3);
                if (!ms[w][p].n) continue;
                cell(2 + 3 * p, "%.3f", median(&ms[w][p]));
                cell(3 + 3 * p, "%.3f - %.3f", quantile(&ms[w][p], 0), quantile(&ms[w][p], 1));
                cell(4 + 3 * p, "%.*f", opt.tiny ? 6 : 1, flop / median(&ms[w][p]) * 1e-9);
            }
            cell(8, cannot[w][0] ? "left out: %.80s" : "%s", cannot[w]);
        }
        for (w = 0; w < 2; w++) stx_destroy(x[w]);
    }
    print_table();
    stop(&ops.p);
}


// >>curves: what the cost of a step follows

typedef struct {
    char name[CELL];
    int curve, no_graph, literal;
    config c;
    trainee t;
    samples ms;
    /* keys: sum over layers and heads; rows: sum over layers of the memory */
    double peak, keys, rows;
    char cannot[200];
} point;

static void point_add(point *p, int *n, int curve, const char *name, config c, int no_graph,
                      int literal) {
    point *q = &p[(*n)++];
    memset(q, 0, sizeof *q);
    snprintf(q->name, CELL, "%s", name);
    q->curve = curve;
    q->c = c;
    q->no_graph = no_graph;
    q->literal = literal;
    q->keys = mean_keys(&c) * (double)(c.layers * c.heads);
    q->rows = mean_window(&c) * (double)c.layers;
}

/* 3 x 3 by elimination with pivots: 0 if there is no solution */
static int solve(double a[3][4], double v[3]) {
    int i, j, k;
    for (i = 0; i < 3; i++) {
        int best = i;
        for (j = i + 1; j < 3; j++)
            if (fabs(a[j][i]) > fabs(a[best][i])) best = j;
        if (fabs(a[best][i]) < 1e-300) return 0;
        for (k = 0; k < 4; k++) {
            double s = a[i][k];
            a[i][k] = a[best][k];
            a[best][k] = s;
        }
        for (j = 0; j < 3; j++)
            for (k = 3; j != i && k >= i; k--) a[j][k] -= a[j][i] / a[i][i] * a[i][k];
    }
    for (i = 0; i < 3; i++) v[i] = a[i][3] / a[i][i];
    return 1;
}

static void bench_curves(void) {
    enum { POINTS = 48, KEPT = 4, BLOCK_Q = 64, BLOCK_K = 64 };

    enum { UNIFORM, CONTEXT, BATCH, GRAPH, EPS, CURVES };

    static const char *const curve_name[CURVES] = {"span", "context", "batch", "graph",
                                                   "exact eps"};
    static point p[POINTS];
    config base = configured(configs[2]);
    char name[CELL], data[512];
    double until = seconds() + opt.limit, a[3][4], v[3], worst = 0, first[CURVES];
    int n = 0, i, k, l, r, curve, used = 0;
    size_t s, longest = base.span, B = base.batch;
    /* all points of a curve are in memory at once */
    if (!opt.batch && !opt.tiny) base.batch = 16;
    for (s = opt.tiny ? 8 : 32; s <= longest; s *= opt.tiny ? 8 : 4) {
        config c = base;
        c.spans = SPANS_ALL;
        c.reach = (double)s;
        snprintf(name, CELL, "all heads %zu", s);
        point_add(p, &n, UNIFORM, name, c, 0, 0);
    }
    if (p[n - 1].c.reach < (double)longest) {
        config c = base;
        c.spans = SPANS_ALL;
        c.reach = (double)longest;
        snprintf(name, CELL, "all heads %zu", longest);
        point_add(p, &n, UNIFORM, name, c, 0, 0);
    }
    {
        config c = base;
        c.spans = SPANS_ONE;
        c.reach = opt.tiny ? 8 : 64;
        snprintf(name, CELL, "one head %zu, others %.0f", longest, c.reach);
        point_add(p, &n, UNIFORM, name, c, 0, 0);
    }
    for (s = opt.tiny ? 64 : 512; s <= (opt.tiny ? 128u : 32768u); s *= 2) {
        config c = base;
        c.span = s;
        c.heads = base.heads;
        c.reach = opt.tiny ? 16 : 448;
        snprintf(name, CELL, "S %zu", s);
        point_add(p, &n, CONTEXT, name, c, 0, 0);
    }
    for (s = 1; s <= (opt.tiny ? 2 : 64); s *= 2) {
        config c = base;
        c.batch = s;
        snprintf(name, CELL, "batch %zu", s);
        point_add(p, &n, BATCH, name, c, 0, 0);
    }
    for (s = 1; s <= B; s = s < 8 && B >= 8 ? 8 : s < B ? B : B + 1)
        for (k = 0; k < 2; k++) {
            config c = base;
            c.batch = s;
            snprintf(name, CELL, "batch %zu, %s", s, k ? "launched" : "replayed");
            point_add(p, &n, GRAPH, name, c, k, 0);
        }
    for (k = 0; k < 2; k++)
        point_add(p, &n, EPS, k ? "eps 1e-8 over the whole window" : "eps 0", base, 0, 2 * k);
    snprintf(data, sizeof data, "%s/tokens.curves", opt.work);
    {
        config c = base;
        c.batch = 64;
        write_data(data, &c, (size_t)(40 + (opt.rounds + 1) * 12));
    }
    say("## Curves\n\nseqtx bf16, the model 12x512 (block %zu), %zu streams where it is not said. "
        "Median of %d rounds of %d steps (least "
        "- most), the points of a curve interleaved; memory full. "
        "keys: mean\nof a query and head; rows: mean memory of a layer. At S the spans are the "
        "learned-like ones, at most %d tokens, for "
        "every S.\n\n",
        base.block, base.batch, opt.rounds, opt.tiny ? 1 : 6, opt.tiny ? 16 : 448);
    header("curve|point|step ms|range|to the first|tokens/s|keys|rows|peak GB|");
    for (curve = 0; curve < CURVES; curve++) {
        /* a curve has an equal share of what time is left */
        double end = seconds() + (until - seconds()) / (CURVES - curve);
        int any = 0;
        first[curve] = NAN;
        for (i = 0; i < n; i++) {
            if (p[i].curve != curve) continue;
            snprintf(name, CELL, "curves: %s, %s ..", curve_name[curve], p[i].name);
            progress(name);
            if (any && seconds() > end) {
                snprintf(p[i].cannot, sizeof p[i].cannot, "the section's time was over");
                continue;
            }
            any = 1;
            if (!trainee_create(&p[i].t, &p[i].c, BF16, p[i].no_graph, p[i].literal, data, NULL)
                || !trainee_warm(&p[i].t, opt.tiny ? 0 : 8)) {
                snprintf(p[i].cannot, sizeof p[i].cannot, "%.190s", stx_error(p[i].t.x));
                trainee_destroy(&p[i].t);
            }
        }
        for (r = 0; r < opt.rounds; r++)
            for (i = 0; i < n; i++) {
                if (p[i].curve != curve || !p[i].t.x || (r > 0 && seconds() > end)) continue;
                trainee_round(&p[i].t, 1, NULL);
                trainee_round(&p[i].t, opt.tiny ? 1 : 6, &p[i].ms);
                if (!stx_ok(p[i].t.x)) {
                    snprintf(p[i].cannot, sizeof p[i].cannot, "%.190s", stx_error(p[i].t.x));
                    trainee_destroy(&p[i].t);
                    p[i].ms.n = 0;
                } else
                    p[i].peak = (double)stx_peak_bytes(p[i].t.x);
            }
        for (i = 0; i < n; i++) {
            double ms = median(&p[i].ms);
            if (p[i].curve != curve) continue;
            row_begin();
            cell(0, "%s", curve_name[curve]);
            cell(1, "%s", p[i].name);
            cell(6, "%.0f", mean_keys(&p[i].c));
            cell(7, "%.0f", mean_window(&p[i].c));
            if (p[i].cannot[0]) cell(9, "left out: %.80s", p[i].cannot);
            if (!p[i].ms.n) continue;
            if (!(first[curve] > 0)) first[curve] = ms;
            cell(2, "%.3f", ms);
            cell(3, "%.3f - %.3f", quantile(&p[i].ms, 0), quantile(&p[i].ms, 1));
            cell(4, "%.3f", ms / first[curve]);
            cell(5, "%.0f", (double)(p[i].c.batch * p[i].c.block) / ms * 1e3);
            cell(8, "%.2f", p[i].peak * 1e-9);
            if (p[i].t.x) trainee_destroy(&p[i].t);
        }
    }
    print_table();
    unlink(data);
    /* ms = t0 + a sum (keys + Bq + Bk / 2) + b sum rows, errors relative: each point
       divided by its time */
    memset(a, 0, sizeof a);
    for (i = 0; i < n; i++) {
        double f[3], ms = median(&p[i].ms);
        if (!p[i].ms.n || (p[i].curve != UNIFORM && p[i].curve != CONTEXT)) continue;
        f[0] = 1 / ms;
        f[1] = (p[i].keys + (double)(p[i].c.layers * p[i].c.heads) * (BLOCK_Q + BLOCK_K / 2)) / ms;
        f[2] = p[i].rows / ms;
        for (k = 0; k < 3; k++) {
            for (l = 0; l < 3; l++) a[k][l] += f[k] * f[l];
            a[k][3] += f[k];
        }
        used++;
    }
    if (used < KEPT || !solve(a, v)) {
        say("Fit: too few points.\n\n");
        return;
    }
    for (i = 0; i < n; i++) {
        double ms = median(&p[i].ms), fit;
        if (!p[i].ms.n || (p[i].curve != UNIFORM && p[i].curve != CONTEXT)) continue;
        fit = v[0]
              + v[1]
                    * (p[i].keys + (double)(p[i].c.layers * p[i].c.heads) * (BLOCK_Q + BLOCK_K / 2))
              + v[2] * p[i].rows;
        worst = at_least(worst, fabs(fit / ms - 1));
    }
    say("Fit over the %d points of span and context, least squares of relative errors: step ms = "
        "t0 + a sum over layers and heads of "
        "(keys + Bq + Bk/2) + b sum over layers of rows,\n"
        "Bq = Bk = %d: t0 = %.4g ms, a = %.4g us a key, b = %.4g us a row of memory; the worst "
        "point is off by %.0f %%.\n\n",
        used, (int)BLOCK_Q, v[0], v[1] * 1e3, v[2] * 1e3, 100 * worst);
}


// >>gemm: products, and passes that wait for memory

static void run_copy(job *j) {
    stx_cuda_copy(j->x, j->a[0], j->a[1], j->n[0]);
}

static void run_layernorm_fwd(job *j) {
    stx_residual_norm_args k;
    memset(&k, 0, sizeof k);
    k.N = j->n[0];
    k.C = j->n[1];
    k.eps = 1e-5f;
    k.h = j->a[1];
    k.gain = j->a[3];
    k.shift = j->a[4];
    k.y = j->a[0];
    k.mean = j->a[5];
    k.rstd = j->a[6];
    stx_residual_norm_fwd_cuda(j->x, &k);
}

static void run_layernorm_bwd(job *j) {
    stx_residual_norm_args k;
    memset(&k, 0, sizeof k);
    k.N = j->n[0];
    k.C = j->n[1];
    k.s = j->a[1];
    k.gain = j->a[3];
    k.mean = j->a[5];
    k.rstd = j->a[6];
    k.dy = j->a[0];
    k.ds = j->a[2];
    k.dgain = (stx_real *)j->work[0];
    k.dshift = (stx_real *)j->work[1];
    stx_residual_norm_bwd_cuda(j->x, &k);
}

static void run_residual_fwd(job *j) {
    stx_residual_norm_args k;
    memset(&k, 0, sizeof k);
    k.N = j->n[0];
    k.C = j->n[1];
    k.eps = 1e-5f;
    k.h = j->a[1];
    k.f = j->a[7];
    k.gain = j->a[3];
    k.shift = j->a[4];
    k.y = j->a[0];
    k.s = j->a[2];
    k.mean = j->a[5];
    k.rstd = j->a[6];
    stx_residual_norm_fwd_cuda(j->x, &k);
}

static void run_residual_bwd(job *j) {
    stx_residual_norm_args k;
    memset(&k, 0, sizeof k);
    k.N = j->n[0];
    k.C = j->n[1];
    k.s = j->a[1];
    k.gain = j->a[3];
    k.mean = j->a[5];
    k.rstd = j->a[6];
    k.dy = j->a[0];
    k.ds = j->a[2];
    k.df = j->a[7];
    k.dgain = (stx_real *)j->work[0];
    k.dshift = (stx_real *)j->work[1];
    stx_residual_norm_bwd_cuda(j->x, &k);
}

static void run_bias_relu(job *j) {
    stx_bias_act_fwd_cuda(j->x, j->a[0], NULL, j->a[3], j->n[0], j->n[1], STX_ACT_RELU);
}

static stx_token_loss_args entropy_args(const job *j) {
    stx_token_loss_args k;
    memset(&k, 0, sizeof k);
    k.N = j->n[0];
    k.V = k.ld = j->n[1];
    k.divisor = (double)k.N;
    k.logits = j->a[1];
    k.targets = j->ids;
    k.loss = j->a[7];
    k.row_max = j->a[5];
    k.inv_sum = j->a[6];
    k.dloss = j->a[7];
    k.dlogits = j->a[0];
    return k;
}

static void run_entropy_fwd(job *j) {
    stx_token_loss_args k = entropy_args(j);
    stx_token_loss_fwd_cuda(j->x, &k);
}

static void run_entropy_bwd(job *j) {
    stx_token_loss_args k = entropy_args(j);
    stx_token_loss_bwd_cuda(j->x, &k);
}

static void run_embedding(job *j) {
    stx_embedding_fwd_cuda(j->x, j->a[0], j->a[3], j->ids, j->n[0], j->n[1]);
}

static void run_optim(job *j) {
    stx_optim_step(j->optim, 1e-4);
}

static void rows_job(job *j, stx_ctx *x, void (*fn)(job *), size_t N, size_t C, size_t table_rows) {
    size_t i;
    int32_t *ids = (int32_t *)malloc(N * sizeof *ids);
    memset(j, 0, sizeof *j);
    j->fn = fn;
    j->x = x;
    j->n[0] = N;
    j->n[1] = C;
    for (i = 0; i < 3; i++) j->a[i] = device_random(x, N * C, 1, STX_MEM_ACTIVATIONS);
    j->a[7] = device_random(x, N * C, 1,
                            fn == run_entropy_fwd || fn == run_entropy_bwd ? STX_MEM_BYTES
                                                                           : STX_MEM_ACTIVATIONS);
    j->a[3] = device_random(x, table_rows * C, 1, STX_MEM_PARAMS);
    j->a[4] = device_random(x, C, 1, STX_MEM_PARAMS);
    for (i = 5; i < 7; i++) j->a[i] = device_random(x, N, 1, STX_MEM_BYTES);
    for (i = 0; i < 2; i++) j->work[i] = device_bytes(x, 4 * C);
    j->ids = (int32_t *)device_bytes(x, N * sizeof *ids);
    if (!ids) die("no memory");
    for (i = 0; i < N; i++) {
        uint32_t r[4];
        stx_philox(3, 4, i, r);
        ids[i] = (int32_t)(r[0] % C % table_rows);
    }
    if (stx_ok(x)) stx_cuda_upload(x, j->ids, ids, N * sizeof *ids);
    if (stx_ok(x)) stx_cuda_sync(x);
    free(ids);
    /* real means and deviations */
    if (stx_ok(x) && (fn == run_layernorm_bwd || fn == run_residual_bwd)) run_layernorm_fwd(j);
    if (stx_ok(x) && fn == run_entropy_bwd) run_entropy_fwd(j);
    if (stx_ok(x) && fn == run_bias_relu) stx_cuda_sync(x);
}

/* SRU's recurrence with a highway, one direction, as in SRU++ */
static void run_sru_fwd(job *j) {
    stx_sru_fwd_cuda(j->x, &j->sru);
}

static void run_sru_bwd(job *j) {
    stx_sru_bwd_cuda(j->x, &j->sru);
}

static void sru_job(job *j, stx_ctx *x, int backward, size_t B, size_t T, size_t O) {
    stx_sru_args *a = &j->sru;
    size_t n = B * T * O, i, part;
    memset(j, 0, sizeof *j);
    j->fn = backward ? run_sru_bwd : run_sru_fwd;
    j->x = x;
    a->B = B;
    a->T = T;
    a->H = O;
    a->D = 1;
    a->k = 3;
    a->alpha = 1;
    for (i = 0; i < 6; i++) j->a[i] = device_random(x, i < 2 ? 3 * n : n, 1, STX_MEM_ACTIVATIONS);
    for (; i < 8; i++) j->a[i] = device_random(x, 2 * O, 1, STX_MEM_PARAMS);
    a->u = j->a[0];
    a->du = j->a[1];
    a->xr = j->a[2];
    a->dxr = j->a[3];
    a->h = j->a[4];
    a->dh = j->a[5];
    a->v = j->a[6];
    a->bias = j->a[7];
    part = stx_sru_work_cuda(x, a, 1);
    j->work[0] = device_bytes(x, 4 * B * stx_sru_tiles(a) * O);
    j->work[1] = device_bytes(x, part + 16 * O);
    a->c = (stx_real *)j->work[0];
    a->work = j->work[1];
    a->dv = (stx_real *)((char *)j->work[1] + part);
    a->dbias = a->dv + 2 * O;
    if (stx_ok(x)) run_sru_fwd(j);
}

static void bench_gemm(void) {
    size_t N = opt.tiny ? 32 : 32768, small = opt.tiny ? 32 : 16384, d[3], n = 0, i;

    struct {
        size_t M, N, K;
        int ta, tb;
        const char *what;
    } shape[28];

    double until = seconds() + opt.limit;
    int m, r;
    d[0] = opt.tiny ? 16 : 256;
    d[1] = opt.tiny ? 32 : 512;
    d[2] = opt.tiny ? 48 : 768;
#define SHAPE(a, b, c, t, u, w) \
  do { \
    shape[n].M = a; \
    shape[n].N = b; \
    shape[n].K = c; \
    shape[n].ta = t; \
    shape[n].tb = u; \
    shape[n++].what = w; \
  } while (0)
    SHAPE(opt.tiny ? 64 : 8192, opt.tiny ? 64 : 8192, opt.tiny ? 64 : 8192, 0, 1, "square");
    for (i = 0; i < 3; i++) {
        size_t rows = i ? N : small, f = i == 2 ? 16 * d[i] / 3 : 4 * d[i];
        SHAPE(rows, d[i], d[i], 0, 1, "x Wq^T");
        SHAPE(rows, f, d[i], 0, 1, "x W1^T");
        SHAPE(rows, d[i], f, 0, 1, "x W2^T");
        SHAPE(rows, d[i], f, 0, 0, "dy W1");
        SHAPE(f, d[i], rows, 1, 0, "dW1 = dy^T x");
        SHAPE(d[i], d[i], rows, 1, 0, "dWq = dy^T x");
    }
    /* an output layer of 205 words: as they are, to whole 16 bytes, and as it is
       padded */
    for (i = 0; i < 3; i++) {
        size_t words = opt.tiny ? 13 + 3 * i : i == 0 ? 205 : i == 1 ? 208 : 256;
        SHAPE(N, words, d[1], 0, 1, "h Wout^T");
        SHAPE(N, d[1], words, 0, 0, "dlogits Wout");
        SHAPE(words, d[1], N, 1, 0, "dWout = dlogits^T h");
    }
#undef SHAPE
    ops_start();
    say("## Products and passes\n\n"
        "Products: stx_gemm (cublasLt), op(A) op(B) as M x N x K, beside torch.matmul; gradients "
        "of weights "
        "are floats in seqtx, added to what is there, and of the factors' kind in PyTorch. Median "
        "of %d\n"
        "rounds (least - most), interleaved, each of calls for 5 ms and more.\n\n",
        opt.rounds);
    header(
        "product|M x N x K|precision|seqtx us|range|TFLOP/s|PyTorch us|range|TFLOP/s|to PyTorch|");
    for (i = 0; i < n; i++)
        for (m = 0; m < MODES; m++) {
            static job j;
            static samples peer;
            stx_ctx *x;
            char what[256], why[256] = "";
            double flop = 2.0 * (double)shape[i].M * (double)shape[i].N * (double)shape[i].K;
            /* of the slow ones a few */
            if (m == F32 && i > 0 && strcmp(shape[i].what, "x W1^T")) continue;
            if (seconds() > until) break;
            x = context(m, 1);
            peer.n = 0;
            product_job(&j, x, shape[i].M, shape[i].N, shape[i].K, shape[i].ta, shape[i].tb);
            snprintf(what, sizeof what, "products: %s, %s ..", shape[i].what, mode_name[m]);
            progress(what);
            if (!job_warm(&j)) snprintf(why, sizeof why, "%.200s", stx_error(x));
            snprintf(
                what, sizeof what,
                "{\"op\": \"gemm\", \"M\": %zu, \"N\": %zu, \"K\": %zu, \"ta\": %d, \"tb\": %d, "
                "\"dtype\": "
                "\"%s\"}",
                shape[i].M, shape[i].N, shape[i].K, shape[i].ta, shape[i].tb, mode_name[m]);
            for (r = 0; r < opt.rounds; r++) {
                if (stx_ok(x)) job_round(&j);
                if (!ops_ask(what, &peer, NULL, why, sizeof why, 60)) break;
            }
            for (; r < opt.rounds && stx_ok(x); r++) job_round(&j);
            row_begin();
            cell(0, "%s", shape[i].what);
            cell(1, "%zu x %zu x %zu", shape[i].M, shape[i].N, shape[i].K);
            cell(2, "%s", mode_name[m]);
            if (j.ms.n) {
                cell(3, "%.1f", median(&j.ms) * 1e3);
                cell(4, "%.1f - %.1f", quantile(&j.ms, 0) * 1e3, quantile(&j.ms, 1) * 1e3);
                cell(5, "%.1f", flop / median(&j.ms) * 1e-9);
            }
            if (peer.n) {
                cell(6, "%.1f", median(&peer) * 1e3);
                cell(7, "%.1f - %.1f", quantile(&peer, 0) * 1e3, quantile(&peer, 1) * 1e3);
                cell(8, "%.1f", flop / median(&peer) * 1e-9);
                if (j.ms.n) cell(9, "%.2f", median(&peer) / median(&j.ms));
            }
            if (why[0]) cell(10, "left out: %.80s", why);
            job_free(&j);
            stx_destroy(x);
        }
    print_table();
    stop(&ops.p);
    {
        /* bytes: every operand once; a numbers of 2 or 4 bytes */
        static const struct {
            const char *name;
            void (*fn)(job *);
            double numbers, a_row;
            size_t cols, table;
        } pass[] = {{"copy on the device", run_copy, 2, 0, 512, 1},
                    {"layernorm forward", run_layernorm_fwd, 2, 8, 512, 1},
                    {"layernorm backward", run_layernorm_bwd, 3, 8, 512, 1},
                    {"residual and norm forward", run_residual_fwd, 4, 8, 512, 1},
                    {"residual and norm backward", run_residual_bwd, 4, 8, 512, 1},
                    {"layernorm forward, d 768", run_layernorm_fwd, 2, 8, 768, 1},
                    {"layernorm backward, d 768", run_layernorm_bwd, 3, 8, 768, 1},
                    {"bias and relu", run_bias_relu, 2, 0, 2048, 1},
                    {"embedding forward", run_embedding, 1, 4, 512, 256},
                    {"cross entropy forward, V 256", run_entropy_fwd, 1, 12, 256, 1},
                    {"cross entropy backward, V 256", run_entropy_bwd, 2, 12, 256, 1},
                    {"cross entropy forward, V 8192", run_entropy_fwd, 1, 12, 8192, 1},
                    {"cross entropy backward, V 8192", run_entropy_bwd, 2, 12, 8192, 1}};

        static const size_t sru[][3] = {{4, 1024, 3072},
                                        {32, 1024, 3072},
                                        {64, 256, 3056},
                                        {1, 1024, 3072}};

        enum { PASSES_N = sizeof pass / sizeof *pass, SRU_N = sizeof sru / sizeof *sru };

        say("Passes over memory: GB/s of every operand once, by formula. Buffers are larger than "
            "the second-level cache.\n\n");
        header("pass|rows x columns|precision|us|range|MB|GB/s|");
        for (i = 0; i < PASSES_N; i++)
            for (m = F32; m <= BF16; m += BF16) {
                static job j;
                stx_ctx *x;
                size_t cols = opt.tiny ? pass[i].cols / 32 : pass[i].cols,
                       rows = opt.tiny              ? 32
                              : pass[i].cols > 4096 ? 16384
                                                    : 131072;
                double bytes = (double)rows
                               * ((double)cols * pass[i].numbers * (m == BF16 ? 2 : 4)
                                  + pass[i].a_row);
                if (seconds() > until + 60) break;
                x = context(m, 1);
                rows_job(&j, x, pass[i].fn, rows, cols, pass[i].table);
                if (pass[i].fn == run_copy) j.n[0] = rows * cols * (m == BF16 ? 2 : 4);
                if (job_warm(&j))
                    for (r = 0; r < opt.rounds; r++) job_round(&j);
                row_begin();
                cell(0, "%s", pass[i].name);
                cell(1, "%zu x %zu", rows, cols);
                cell(2, "%s", mode_name[m]);
                if (j.ms.n) {
                    cell(3, "%.1f", median(&j.ms) * 1e3);
                    cell(4, "%.1f - %.1f", quantile(&j.ms, 0) * 1e3, quantile(&j.ms, 1) * 1e3);
                    cell(5, "%.1f", bytes * 1e-6);
                    cell(6, "%.0f", bytes / median(&j.ms) * 1e-6);
                } else
                    cell(7, "left out: %.80s", stx_error(x));
                job_free(&j);
                stx_destroy(x);
            }
        /* u0 u1 u2 x -> h ; u0 u1 u2 x dh -> du0 du1 du2 dx ; a state of 32 */
        for (i = 0; i < 2 * SRU_N * 2; i++) {
            static job j;
            int backward = i / 2 % 2;
            size_t B = opt.tiny ? 1 : sru[i / 4][0], T = opt.tiny ? 40 : sru[i / 4][1],
                   O = opt.tiny ? 40 : sru[i / 4][2];
            double bytes = (double)(B * T * O)
                           * ((backward ? 9 : 5) * (i % 2 ? 2 : 4) + 4.0 / STX_SRU_TILE);
            stx_ctx *x;
            if (seconds() > until + 60) break;
            x = context(i % 2 ? BF16 : F32, 1);
            sru_job(&j, x, backward, B, T, O);
            if (job_warm(&j))
                for (r = 0; r < opt.rounds; r++) job_round(&j);
            row_begin();
            cell(0, backward ? "SRU recurrence backward" : "SRU recurrence forward");
            cell(1, "%zu x %zu x %zu", B, T, O);
            cell(2, "%s", mode_name[i % 2 ? BF16 : F32]);
            if (j.ms.n) {
                cell(3, "%.1f", median(&j.ms) * 1e3);
                cell(4, "%.1f - %.1f", quantile(&j.ms, 0) * 1e3, quantile(&j.ms, 1) * 1e3);
                cell(5, "%.1f", bytes * 1e-6);
                cell(6, "%.0f", bytes / median(&j.ms) * 1e-6);
            } else
                cell(7, "left out: %.80s", stx_error(x));
            job_free(&j);
            stx_destroy(x);
        }
        for (i = 0; i < 2; i++) { /* all parameters of a model */
            static job j;
            config c = configured(configs[i ? 3 : 2]);
            stx_ctx *x = context(BF16, 1);
            stx_span *model = model_create(x, &c, 0);
            stx_optim_desc od;
            memset(&j, 0, sizeof j);
            memset(&od, 0, sizeof od);
            od.kind = STX_ADAGRAD;
            od.clip = 0.03;
            j.x = x;
            j.fn = run_optim;
            j.optim = model ? stx_optim_create(model->params, &od) : NULL;
            if (j.optim && job_warm(&j))
                for (r = 0; r < opt.rounds; r++) job_round(&j);
            row_begin();
            cell(0, "Adagrad, model %s", c.name);
            cell(1, "%.1f M parameters", parameters(&c) * 1e-6);
            cell(2, "bf16");
            if (j.ms.n) {
                double bytes = 30 * parameters(&c);
                cell(3, "%.1f", median(&j.ms) * 1e3);
                cell(4, "%.1f - %.1f", quantile(&j.ms, 0) * 1e3, quantile(&j.ms, 1) * 1e3);
                cell(5, "%.1f", bytes * 1e-6);
                cell(6, "%.0f", bytes / median(&j.ms) * 1e-6);
            } else
                cell(7, "left out: %.80s", stx_error(x));
            stx_destroy(x);
        }
        print_table();
    }
}


// >>idle: how long the device waits for the host

/* Steps without asking for anything in between: the host only feeds and launches, so
   that the device has the next step at hand. The spans stay in their windows for these
   few steps (checked by the caller), so that the key stays. */
static double back_to_back(trainee *t, int n, double *host) {
    double at;
    int k;
    stx_cuda_sync(t->x);
    trainee_step(t);
    mark_now(t->x, 0);
    at = seconds();
    for (k = 0; k < n; k++) {
        trainee_feed(t);
        stx_step_run(t->x, t->key, step, t);
    }
    *host = (seconds() - at) * 1e3 / n;
    mark_now(t->x, 1);
    return mark_ms(0, 1) / n;
}

static void bench_idle(void) {
    static trainee t;
    static samples wall, busy, host;
    char data[512];
    double until = seconds() + opt.limit;
    int i, g, r;
    say("## Idle gaps\n\nseqtx bf16. wall: a step as the trainer makes it, which waits for each "
        "loss before it feeds the next step "
        "(host's clock, median of %d rounds). back to back: the same steps "
        "launched\nwithout waiting, between one event before the first and one after the last: "
        "the device always has work at hand. idle: "
        "what of wall is not back to back, that is, waiting for the\n"
        "host. Gaps between the kernels inside a step are in both, and only a profiler sees them. "
        "host: time of the host to feed and "
        "launch a step.\n\n",
        opt.rounds);
    header("configuration|steps are|wall ms|range|back to back ms|range|idle|host ms|");
    for (i = 0; i < CONFIGS; i++) {
        config c = configured(configs[i]);
        if (!listed(opt.config, c.name)) continue;
        snprintf(data, sizeof data, "%s/tokens.idle", opt.work);
        write_data(data, &c,
                   (size_t)(opt.warmup + opt.check + 24 + (opt.rounds + 1) * (2 * c.steps + 4)));
        for (g = 0; g < 2; g++) {
            uint64_t key = 0;
            int same = 1;
            if (seconds() > until) break;
            wall.n = busy.n = host.n = 0;
            row_begin();
            cell(0, "%s", c.name);
            cell(1, "%s", g ? "launched" : "replayed");
            if (trainee_create(&t, &c, BF16, g, 0, data, NULL)
                && trainee_warm(&t, opt.tiny ? 0 : 15))
                for (r = 0; r < opt.rounds && stx_ok(t.x); r++) {
                    double h = 0;
                    trainee_round(&t, 1, NULL);
                    key = t.key;
                    sample(&wall, trainee_round(&t, c.steps, NULL) * 1e3 / c.steps);
                    sample(&busy, back_to_back(&t, c.steps, &h));
                    sample(&host, h);
                    same = same && key == stx_span_key(t.m, t.in, t.out, t.memory, 0);
                }
            if (!stx_ok(t.x) || !wall.n) {
                cell(8, "left out: %.80s", stx_error(t.x));
                trainee_destroy(&t);
                continue;
            }
            cell(2, "%.3f", median(&wall));
            cell(3, "%.3f - %.3f", quantile(&wall, 0), quantile(&wall, 1));
            cell(4, "%.3f", median(&busy));
            cell(5, "%.3f - %.3f", quantile(&busy, 0), quantile(&busy, 1));
            cell(6, "%.1f %%", 100 * (1 - median(&busy) / median(&wall)));
            cell(7, "%.3f", median(&host));
            if (!same) cell(8, "a window changed meanwhile");
            trainee_destroy(&t);
        }
        unlink(data);
    }
    print_table();
}


// >>main

static const char usage[] =
    "bench_cuda [options]: times seqtx on a GPU (make bench-cuda builds and runs it)\n"
    "  --section LIST     of training,attention,curves,gemm,idle (default: all)\n"
    "  --config LIST      training, idle: of "
    "small-full,small,12x512,24x768,all-attention,small-205 (default: all)\n"
    "  --seconds N        for each section (default 540)\n"
    "  --rounds N         samples of each number (default 5)\n"
    "  --warmup N         steps before the first round (default 20)\n"
    "  --check-step N     the step whose losses are compared, with the first one's (default 10)\n"
    "  --batch N          streams, in place of the configuration's\n"
    "  --tiny             toy sizes: does it run?\n"
    "  --python CMD --peer FILE --peer-device D    PyTorch; device cuda or cpu\n"
    "  --work DIR         for temporary files\n"
    "  --append FILE      write the tables there too\n"
    "  --about            name the GPU, the driver and CUDA, and end\n";

static int whole(const char *s, int least, const char *name) {
    char *end;
    long v = s ? strtol(s, &end, 10) : 0;
    if (!s || end == s || *end || v < least || v > 1000000) {
        fprintf(stderr, "bench_cuda: %s wants a whole number of at least %d\n", name, least);
        exit(2);
    }
    return (int)v;
}

static int about(void) {
    stx_ctx *x = context(F32, 1);
    int runtime = 0, driver = 0;
    size_t left = 0, total = 0;
    cuda(cudaRuntimeGetVersion(&runtime), "cudaRuntimeGetVersion");
    cuda(cudaDriverGetVersion(&driver), "cudaDriverGetVersion");
    cuda(cudaMemGetInfo(&left, &total), "cudaMemGetInfo");
    printf("%s, %.1f GB of memory (%.1f in use); CUDA runtime %d.%d, driver's CUDA %d.%d\n",
           stx_cuda_name(x), (double)total * 1e-9, (double)(total - left) * 1e-9, runtime / 1000,
           runtime % 1000 / 10, driver / 1000, driver % 1000 / 10);
    stx_destroy(x);
    return 0;
}

int main(int argc, char **argv) {
    int i;
    opt.self = argv[0];
    for (i = 1; i < argc; i++) {
        const char *a = argv[i], *v = i + 1 < argc ? argv[i + 1] : NULL;
        if (!strcmp(a, "--tiny")) {
            opt.tiny = 1;
            continue;
        }
        if (!strcmp(a, "--worker")) {
            opt.worker = 1;
            continue;
        }
        if (!strcmp(a, "--no-graph")) {
            opt.no_graph = 1;
            continue;
        }
        if (!strcmp(a, "--about")) return about();
        if (!strcmp(a, "--help")) {
            fputs(usage, stdout);
            return 0;
        }
        i++;
        if (!v) {
            fprintf(stderr, "bench_cuda: unknown option, or no value: %s\n%s", a, usage);
            return 2;
        }
        if (!strcmp(a, "--rounds")) {
            opt.rounds = whole(v, 1, a);
            if (opt.rounds > 30) opt.rounds = 30;
        } else if (!strcmp(a, "--warmup"))
            opt.warmup = whole(v, 1, a);
        else if (!strcmp(a, "--check-step"))
            opt.check = whole(v, 1, a);
        else if (!strcmp(a, "--batch"))
            opt.batch = whole(v, 1, a);
        else if (!strcmp(a, "--seconds"))
            opt.limit = whole(v, 1, a);
        else if (!strcmp(a, "--section"))
            opt.section = v;
        else if (!strcmp(a, "--config"))
            opt.config = v;
        else if (!strcmp(a, "--data"))
            opt.data = v;
        else if (!strcmp(a, "--params"))
            opt.params = v;
        else if (!strcmp(a, "--python"))
            opt.python = v;
        else if (!strcmp(a, "--peer"))
            opt.peer = v;
        else if (!strcmp(a, "--peer-device"))
            opt.peer_device = v;
        else if (!strcmp(a, "--work"))
            opt.work = v;
        else if (!strcmp(a, "--append"))
            report_path = v;
        else if (!strcmp(a, "--mode")) {
            for (opt.mode = 0; opt.mode < MODES && strcmp(v, mode_name[opt.mode]); opt.mode++)
                continue;
            if (opt.mode == MODES) {
                fprintf(stderr, "bench_cuda: --mode f32, tf32 or bf16\n");
                return 2;
            }
        } else {
            fprintf(stderr, "bench_cuda: unknown option %s\n%s", a, usage);
            return 2;
        }
    }
    signal(SIGPIPE, SIG_IGN); /* a contender that died is reported, and is not the end */
    if (opt.worker) return worker();
    if (opt.config) {
        char list[256], *w;
        snprintf(list, sizeof list, "%s", opt.config);
        for (w = strtok(list, ","); w; w = strtok(NULL, ",")) config_named(w);
    }
    if (listed(opt.section, "training")) bench_training();
    if (listed(opt.section, "attention")) bench_attention();
    if (listed(opt.section, "curves")) bench_curves();
    if (listed(opt.section, "gemm")) bench_gemm();
    if (listed(opt.section, "idle")) bench_idle();
    return 0;
}
