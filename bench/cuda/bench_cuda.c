/* bench_cuda.c - times seqtx on a GPU, compared with PyTorch: training steps, attention
   kernels, cost curves, matmuls and memory passes, idle gaps.

       make bench-cuda CUDA_ARCH=sm_90         builds this file and runs bench/run_cuda.sh
                                               (bench/README.md)

   Times are measured between CUDA events on the context's stream, and rates of whole
   rounds with the host's clock. Training contenders (this program with --worker, and
   PyTorch) are separate processes that alternate and reply to lines on stdin (the
   protocol of peers/attn_span_torch_cuda.py). All start from the same parameter file and
   read the same random tokens. A row is void if its losses differ from the peer's. */
#define _DEFAULT_SOURCE
#ifdef SEQTX_CUDA_HOST /* tests/cuda_host declares CUDA for C++ only */
  #include "../../tests/cuda_host/cuda_host.h"
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
#include "../../seqtx_attn_span.h"
#include "../../seqtx_sru.h"
#include "../../seqtx_text.h"
#include "../report.h"
#include "cuda_model.h"

enum { F32, TF32, BF16, MODES };

static const char *const mode_name[MODES] = {"f32", "tf32", "bf16"};

static struct {
    int tiny, rounds, warmup, check, batch, worker, no_graph, mode, limit, help, about;
    const char *self, *data, *params, *python, *peer, *peer_device, *work, *section, *config;
} opt = {0,    5,    20,   10,   0,      0,   0,                                    BF16, 540, 0, 0,
         NULL, NULL, NULL, NULL, NULL, "cuda", ".", "training,attention,curves,gemm,idle", NULL};

static const option options[] = {OPTION_FLAG("--tiny", &opt.tiny),
                                 OPTION_FLAG("--worker", &opt.worker),
                                 OPTION_FLAG("--no-graph", &opt.no_graph),
                                 OPTION_FLAG("--help", &opt.help),
                                 OPTION_FLAG("--about", &opt.about),
                                 OPTION_CHOICE("--mode", &opt.mode, "f32,tf32,bf16"),
                                 OPTION_WHOLE("--rounds", &opt.rounds, 1),
                                 OPTION_WHOLE("--warmup", &opt.warmup, 1),
                                 OPTION_WHOLE("--check-step", &opt.check, 1),
                                 OPTION_WHOLE("--batch", &opt.batch, 1),
                                 OPTION_WHOLE("--seconds", &opt.limit, 1), /* seconds per section */
                                 OPTION_TEXT("--section", &opt.section),
                                 OPTION_TEXT("--config", &opt.config),
                                 OPTION_TEXT("--data", &opt.data),
                                 OPTION_TEXT("--params", &opt.params),
                                 OPTION_TEXT("--python", &opt.python),
                                 OPTION_TEXT("--peer", &opt.peer),
                                 OPTION_TEXT("--peer-device", &opt.peer_device),
                                 OPTION_TEXT("--work", &opt.work),
                                 OPTION_TEXT("--append", &report_path),
                                 OPTION_END};

static void check(const stx_ctx *x) {
    if (!stx_ok(x)) die(stx_error(x));
}

static void cuda(int error, const char *what) {
    if (error) {
        fprintf(stderr, "bench: %s: CUDA error %d\n", what, error);
        exit(1);
    }
}

/* Creates a context. The caller must check it for errors. */
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
    if (!x) die("out of memory");
    return x;
}

static stx_ctx *context(int mode, int no_graph) {
    stx_ctx *x = context_or(mode, no_graph);
    check(x);
    return x;
}

static double used_bytes(void) { /* in use on the whole device, as the driver reports */
    size_t left = 0, total = 0;
    cuda(cudaMemGetInfo(&left, &total), "cudaMemGetInfo");
    return (double)(total - left);
}

static double at_least(double a, double b) {
    return a > b ? a : b;
}

static config configured(config c) {
    if (opt.tiny) c = tiny(c);
    if (opt.batch) c.batch = (size_t)opt.batch;
    return c;
}

static const config *config_named(const char *name) {
    int i;
    for (i = 0; i < CONFIGS - 1 && strcmp(configs[i].name, name); i++) continue;
    return &configs[i];
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

static double mark_ms(int from, int to) { /* waits for the later event */
    float ms = 0;
    cuda(cudaEventSynchronize(mark.at[to]), "cudaEventSynchronize");
    cuda(cudaEventElapsedTime(&ms, mark.at[from], mark.at[to]), "cudaEventElapsedTime");
    return (double)ms;
}

/* A function to time. It is called often enough between two events that their
   resolution and the first launch are negligible. */
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

static int job_warm(job *j) { /* returns 0 if the job cannot run; the context has the error */
    double ms;
    j->reps = 1;
    if (!stx_ok(j->x)) return 0;
    job_ms(j); /* loads code and chooses algorithms */
    stx_cuda_sync(j->x);
    if (!stx_ok(j->x)) return 0;
    ms = job_ms(j);
    if (opt.tiny || ms > 5) /* enough calls for 5 ms, at most 1000 */
        j->reps = 1;
    else
        j->reps = ms * 1000 < 5 ? 1000 : (int)(5 / ms) + 1;
    if (!opt.tiny) job_ms(j);
    return stx_ok(j->x);
}

static void job_round(job *j) {
    sample(&j->ms, job_ms(j));
}

static void job_run(job *j) {
    int r;
    if (!job_warm(j)) return;
    for (r = 0; r < opt.rounds; r++) job_round(j);
}

/* Fills device memory with n random values in (-scale, scale). The host draws four
   million values once; larger arrays are filled with pieces of them. */
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
    if (!pool || !piece) die("out of memory");
    for (at = 0; at < n && stx_ok(x); at += PIECE) {
        size_t w = n - at < PIECE ? n - at : PIECE, from = (turn++ * 1299709) % (POOL - PIECE);
        for (i = 0; i < w; i++) piece[i] = (float)scale * pool[from + i];
        stx_cuda_upload_activations(x, stx_offset_ptr(x, to, at), piece, w);
        stx_cuda_sync(x);
    }
    free(piece);
}

static stx_real *device_random(stx_ctx *x, size_t n, double scale, int kind) {
    int is_bf16 = kind == STX_MEM_ACTIVATIONS && stx_ctx_desc(x)->precision == STX_PREC_BF16;
    size_t bytes = n * (is_bf16 ? 2 : 4);
    stx_real *p = stx_ok(x) ? (stx_real *)stx_cuda_alloc(x, bytes, kind) : NULL;
    if (!p) {
        stx_fail(x, STX_ERR_MEMORY, "out of memory: %zu bytes on the GPU", bytes);
        return NULL;
    }
    random_fill(x, p, n, scale);
    return p;
}

static void *device_bytes(stx_ctx *x, size_t bytes) {
    void *p;
    if (!bytes) bytes = 1;
    p = stx_ok(x) ? stx_cuda_alloc(x, bytes, STX_MEM_BYTES) : NULL;
    if (p)
        stx_cuda_zero(x, p, bytes);
    else
        stx_fail(x, STX_ERR_MEMORY, "out of memory: %zu bytes on the GPU", bytes);
    return p;
}


// >>matmuls

static void run_matmul(job *j) {
    stx_gemm_args g = stx_gemm_init(j->ta, j->tb, j->n[0], j->n[1], j->n[2], j->a[0], j->a[1],
                                    j->a[2]);
    /* weight gradients are accumulated, in slices of K */
    g.beta = j->ta ? 1 : 0;
    stx_gemm_cuda(j->x, &g);
}

static void matmul_job(job *j, stx_ctx *x, size_t M, size_t N, size_t K, int ta, int tb) {
    memset(j, 0, sizeof *j);
    j->fn = run_matmul;
    j->x = x;
    j->n[0] = M;
    j->n[1] = N;
    j->n[2] = K;
    j->ta = ta;
    j->tb = tb;
    j->a[0] = device_random(x, M * K, 1, STX_MEM_ACTIVATIONS);
    j->a[1] = device_random(x, K * N, 1, STX_MEM_ACTIVATIONS);
    /* weight gradients are float */
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

/* Returns the FLOP/s of a large bf16 matmul, the unit of the column "of matmul". */
static double matmul_rate(void) {
    size_t n = opt.tiny ? 64 : 8192;
    stx_ctx *x = context(BF16, 1);
    static job j;
    double rate = NAN;
    matmul_job(&j, x, n, n, n, 0, 1);
    job_run(&j);
    if (j.ms.n) rate = 2.0 * (double)n * (double)n * (double)n / median(&j.ms) * 1e3;
    check(x);
    stx_destroy(x);
    return rate;
}


// >>trainee: a model in training

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

/* Creates a configuration's model. Bit 0 of `literal` turns unwritten memory rows into
   zero keys, as in the peer, and bit 1 selects the eps in the authors' code. */
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

/* Writes enough random bytes for all steps. They are the same on every machine. */
static void write_data(const char *path, const config *c, size_t steps) {
    FILE *f = fopen(path, "wb");
    size_t n = c->batch * ((steps + 2) * c->block + 2), i, e;
    if (!f) die("cannot write the file of random tokens");
    for (i = 0; i < n; i += 16) {
        uint32_t r[4];
        unsigned char b[16];
        stx_philox(7, 2, i, r);
        for (e = 0; e < 16; e++)
            b[e] = (unsigned char)((r[e / 4] >> 8 * (e % 4) & 255) % vocab_of(c));
        fwrite(b, 1, n - i < 16 ? n - i : 16, f);
    }
    if (fclose(f)) die("cannot write the file of random tokens");
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
    if (!t->block[0] || !t->block[1]) die("out of memory");
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

/* Sets the tokens and the learning rate of a step. */
static void trainee_feed(trainee *t) {
    if (stx_batches_next(t->batches, t->block[0], t->block[1]) == STX_BATCH_FRESH)
        stx_span_state_reset(t->memory);
    stx_tokens_set(t->x, t->in, t->block[0]);
    stx_tokens_set(t->x, t->out, t->block[1]);
    t->rate = stx_schedule_lr(&t->lr, ++t->done);
    stx_optim_set_lr(t->optim, t->rate);
}

/* Runs one step like a training program that reads the loss after each step, so that
   the host waits for the device once per step. */
static int trainee_step(trainee *t) {
    trainee_feed(t);
    t->key = stx_span_key(t->m, t->in, t->out, t->memory, 0);
    stx_step_run(t->x, t->key, step, t);
    t->nll = stx_metric_get(t->x, 0);
    if (t->done == 1) t->first = t->nll;
    if (t->done == (uint64_t)opt.check) t->at_check = t->nll;
    return stx_ok(t->x);
}

/* Runs n steps, adds their times to ms (may be NULL), and returns the total number of
   seconds. */
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

/* Runs steps until the memory is full, the GPU's clock rate has risen, the graph is
   captured, and the loss of --check-step is known. */
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
    printf("{\"tokens_per_s\": %.6g, \"loss_step1\": %.9g, \"loss_check\": %.9g, ",
           n ? (double)(t->c.batch * t->c.block) * n / took : 0.0, t->first,
           isfinite(t->at_check) ? t->at_check : -1);
    printf("\"steps_done\": %llu, \"peak_bytes\": %zu, \"reserved_bytes\": %zu, ",
           (unsigned long long)t->done, stx_peak_bytes(t->x), stx_bytes(t->x));
    printf("\"driver_bytes\": %.0f, \"compiled\": 0, \"ms\": [", used);
    for (k = 0; k < ms->n; k++) printf(k ? ", %.4f" : "%.4f", ms->v[k]);
    printf("]}\n");
    fflush(stdout);
}

/* A contender: reports the loss of its first step, then answers "warm" and "round" on
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
            trainee_round(&t, 1, NULL); /* other contenders have used the device, so one
                                           step is not timed */
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

static void contender_failed(contender *c, int i, int got, const char *log) {
    stop(&c->p);
    c->on = 0;
    if (got < 0)
        snprintf(c->cannot, sizeof c->cannot, "no reply within the remaining time");
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

/* Builds the command line of contender i. `share` is the time for warming up, in
   seconds. */
static void contender_command(arguments *a, int i, const config *g, const char *params,
                              const char *data, size_t share) {
    a->n = 0;
    if (i < PEER_F32) {
        arg_text(a, opt.self, "--worker");
        arg_text(a, "--config", g->name);
        arg_number(a, "--batch", g->batch);
        arg_text(a, "--mode", mode_name[kinds[i].mode]);
        if (opt.tiny) arg(a, "--tiny");
        arg_number(a, "--seconds", share);
    } else {
        arg_text(a, opt.python, opt.peer);
        arg_text(a, "--device", opt.peer_device);
        arg_number(a, "--nlayers", g->layers);
        arg_number(a, "--hid-sz", g->dim);
        arg_number(a, "--inner-hid-sz", g->inner);
        arg_number(a, "--nheads", g->heads);
        arg_number(a, "--attn-span", g->span);
        arg_number(a, "--vocab", vocab_of(g));
        arg_number(a, "--block-sz", g->block);
        arg_number(a, "--batch-sz", g->batch);
        arg_number(a, "--pers", g->pers);
        arg_number(a, "--steps", (size_t)g->steps);
        arg(a, "--adapt-span");
        arg_text(a, "--adapt-span-loss", "5e-7");
        arg_text(a, "--lr-warmup", "32000");
        arg_text(a, "--dtype", kinds[i].mode == BF16 ? "bf16" : "f32");
        if (kinds[i].mode == TF32) arg(a, "--tf32");
        arg_number(a, "--warm-seconds", share);
    }
    if (kinds[i].extra) arg(a, kinds[i].extra);
    arg_text(a, "--data", data);
    arg_text(a, "--params", params);
    arg_number(a, "--warmup", (size_t)opt.warmup);
    arg_number(a, "--check-step", (size_t)opt.check);
}

static void contender_start(contender *c, int i, const config *g, const char *params,
                            const char *data, double until) {
    arguments a;
    char log[512];
    int got;
    double from = seconds();
    snprintf(log, sizeof log, "%s/contender.%s.%d.log", opt.work, g->name, i);
    /* a contender that does not finish must leave time for the others */
    until = from + at_least(0.45 * (until - from), 20);
    contender_command(&a, i, g, params, data, (size_t)(at_least((until - from) / 3, 2) + 0.5));
    c->on = spawn(&c->p, a.v, log) != 0;
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
    /* a round during which code was compiled does not count */
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

/* The contenders of one configuration, and the time at which their training ends. */
typedef struct {
    const config *g;
    char params[512], data[512];
    double until;
    contender c[CONTENDERS];
} training;

static void training_start(training *t, double until) {
    int i;
    for (i = 0; i < CONTENDERS; i++) {
        contender *c = &t->c[i];
        char what[128];
        if (i >= PEER_F32 && (!opt.python || !opt.peer)) {
            snprintf(c->cannot, sizeof c->cannot, "no python3 with torch was found");
            continue;
        }
        if (i > OWN_F32 && seconds() > until) {
            snprintf(c->cannot, sizeof c->cannot, "the time of the section was over");
            continue;
        }
        snprintf(what, sizeof what, "training, %s: warm-up of %s ..", t->g->name, kinds[i].name);
        progress(what);
        contender_start(c, i, t->g, t->params, t->data, until);
        c->again = !c->on && out_of_memory(c->cannot);
    }
}

static void training_rounds(training *t) {
    int i, r, turn;
    for (r = 0; r < opt.rounds; r++)
        for (turn = 0; turn < CONTENDERS; turn++) {
            char what[128];
            contender *c;
            i = (turn + r) % CONTENDERS;
            c = &t->c[i];
            if (!c->on || (r > 0 && seconds() > t->until)) continue;
            snprintf(what, sizeof what, "training, %s: round %d of %d, %s ..", t->g->name, r + 1,
                     opt.rounds, kinds[i].name);
            progress(what);
            contender_round(c, i, t->g, at_least(t->until, seconds() + 30));
            if (!c->on && out_of_memory(c->cannot)) c->again = 1;
        }
    for (i = 0; i < CONTENDERS; i++)
        if (t->c[i].on) stop(&t->c[i].p);
}

/* Runs each contender that did not fit into memory again, alone. */
static void training_alone(training *t, double last_start) {
    int i, r;
    for (i = 0; i < CONTENDERS; i++) {
        contender *c = &t->c[i];
        if (!c->again || seconds() > last_start) continue;
        c->rate.n = c->ms.n = 0;
        contender_start(c, i, t->g, t->params, t->data, t->until);
        if (!c->on) continue;
        c->alone = 1;
        for (r = 0; r < opt.rounds && c->on && (r == 0 || seconds() < t->until); r++)
            contender_round(c, i, t->g, at_least(t->until, seconds() + 30));
        if (c->on) stop(&c->p);
    }
}

static double difference(const contender *c, const contender *with) {
    return fmax(fabs(c->first - with->first), fabs(c->at_check - with->at_check));
}

/* Returns the reference for the losses: PyTorch in f32, or else seqtx in f32, or else
   NULL. */
static const contender *reference_of(const training *t) {
    if (t->c[PEER_F32].rate.n) return &t->c[PEER_F32];
    return t->c[OWN_F32].rate.n ? &t->c[OWN_F32] : NULL;
}

enum {
    AT_NAME,
    AT_WHO,
    AT_RATE,
    AT_STEP = 4,
    AT_P95,
    AT_RATIO,
    AT_PEAK,
    AT_DRIVER,
    AT_MFU,
    AT_OF_MATMUL,
    AT_FIRST,
    AT_LOSS1,
    AT_LOSSN,
    AT_NOTE
};

static void training_note(const training *t, const contender *c) {
    const contender *with = reference_of(t);
    char *note;
    if (!with)
        cell(AT_NOTE, "nothing to compare with");
    else if (c == with)
        cell(AT_NOTE, "reference%s", c->alone ? ", alone" : "");
    else
        cell(AT_NOTE, "equal to %.0e%s%s%.40s", difference(c, with), c->alone ? ", alone" : "",
             c->note[0] ? ", " : "", c->note);
    if (c->warm_steps >= opt.warmup) return;
    note = table.cell[table.rows - 1][AT_NOTE];
    snprintf(note + strlen(note), CELL - strlen(note), ", %.0f warm-up steps", c->warm_steps);
}

/* Prints contender i. `flop` is the number of operations of a step, and `gemm` the
   FLOP/s of the large matmul. */
static void training_row(const training *t, int i, double flop, double gemm) {
    const contender *c = &t->c[i], *with = reference_of(t), *bf16 = &t->c[PEER_BF16];
    double ms = median(&c->ms);
    row_begin();
    cell(AT_NAME, "%s", t->g->name);
    cell(AT_WHO, "%s", kinds[i].name);
    if (!c->rate.n) {
        cell(AT_NOTE, "left out: %.80s",
             c->cannot[0] ? c->cannot : "every round compiled something");
        return;
    }
    cell(AT_LOSS1, "%.5f", c->first);
    cell(AT_LOSSN, "%.5f", c->at_check);
    cell(AT_FIRST, "%.1f", c->first_step);
    cell(AT_DRIVER, "%.2f", c->driver * 1e-9);
    cell(AT_PEAK, "%.2f", c->peak * 1e-9);
    if (with && !(difference(c, with) <= kinds[i].tolerance)) {
        int k;
        for (k = AT_RATE; k <= AT_RATIO; k++) cell(k, "void");
        cell(AT_MFU, "void");
        cell(AT_OF_MATMUL, "void");
        cell(AT_NOTE, "void: losses differ by %.0e", difference(c, with));
        return;
    }
    cell_spread(AT_RATE, &c->rate, 0, 1);
    cell(AT_STEP, "%.3f", ms);
    cell(AT_P95, "%.3f", quantile(&c->ms, 0.95));
    if (with && bf16->ms.n && difference(bf16, with) <= kinds[PEER_BF16].tolerance)
        cell(AT_RATIO, "%.2f", median(&bf16->ms) / ms);
    cell(AT_MFU, "%.1f %%", 100 * flop / ms * 1e3 / 989e12);
    if (gemm > 0) cell(AT_OF_MATMUL, "%.1f %%", 100 * flop / ms * 1e3 / gemm);
    training_note(t, c);
}

static void training_config(const config *g, double until, double gemm) {
    static training t;
    double reserve = 0.2 * (until - seconds()); /* seconds reserved for the rounds */
    int i;
    work w;
    memset(&t, 0, sizeof t);
    t.g = g;
    t.until = until;
    snprintf(t.params, sizeof t.params, "%s/params.%s.safetensors", opt.work, g->name);
    snprintf(t.data, sizeof t.data, "%s/tokens.%s", opt.work, g->name);
    params_write(g, t.params);
    write_data(t.data, g,
               (size_t)(opt.warmup + opt.check + 24 + (opt.rounds + 2) * (g->steps + 3)));
    training_start(&t, until - reserve);
    training_rounds(&t);
    training_alone(&t, until - 0.2 * reserve);
    work_count(&w, g);
    for (i = 0; i < CONTENDERS; i++) training_row(&t, i, w.model_flop, gemm);
    unlink(t.params);
    unlink(t.data);
}

static void bench_training(void) {
    double gemm, until = seconds() + opt.limit;
    int i, left = 0;
    for (i = 0; i < CONFIGS; i++) left += listed(opt.config, configs[i].name);
    gemm = matmul_rate();
    say("## Training\n\n"
        "One step with Adagrad on random bytes; contenders interleaved, %d rounds after at least "
        "%d warm-up steps (a round:\nthe steps of the configuration, after one that is not "
        "timed). tokens/s: by the clock of the host over a round,\nmedian (minimum - maximum). "
        "step ms: between events at the ends of steps, all rounds. peak: by the contender's own\n"
        "count (seqtx: stx_peak_bytes, PyTorch: max_memory_allocated); driver: what the device "
        "holds for it. MFU counts\n3 matmuls of attention forward and 6 backward, nothing twice "
        "(cuda_model.h), relative to 989 TFLOP/s and to a bf16\nmatmul of 8192 measured now: "
        "%.0f TFLOP/s. First step: from the start of the process to its first loss, with\n"
        "imports, initialisation of CUDA and compilation. Losses are of steps 1 and %d; a row "
        "that differs from the\nreference by more than 1e-3 (f32), 5e-3 (tf32) or 2e-2 (bf16) "
        "is void. alone: it did not fit into memory with\nthe others, and ran after them.\n\n",
        opt.rounds, opt.warmup, gemm * 1e-12, opt.check);
    for (i = 0; i < CONFIGS; i++) {
        config c = configured(configs[i]);
        work w;
        if (!listed(opt.config, c.name)) continue;
        work_count(&w, &c);
        say("- %s: %s; %zu streams of %zu tokens, %.1f M parameters, mean keys per head %.0f, "
            "mean memory %.0f rows, rounds of %d steps, %.2f TFLOP per step\n",
            c.name, c.what, c.batch, c.block, parameters(&c) * 1e-6, mean_keys(&c), mean_window(&c),
            c.steps, w.model_flop * 1e-12);
    }
    say("\n");
    header("configuration|contender|tokens/s|range|step ms p50|p95|to eager bf16|peak GB|driver GB|"
           "MFU|of matmul|first step s|loss 1|loss N|");
    for (i = 0; i < CONFIGS; i++) {
        config c = configured(configs[i]);
        double now = seconds();
        if (!listed(opt.config, c.name)) continue;
        training_config(&c, now + (until - now) / left--, gemm);
    }
    print_table();
}


// >>peer for single operations: PyTorch, one process per section

static struct {
    process p;
    int on;
    char cannot[256];
} ops;

static void ops_start(void) {
    arguments a;
    char log[512];
    memset(&ops, 0, sizeof ops);
    if (!opt.python || !opt.peer) {
        snprintf(ops.cannot, sizeof ops.cannot, "no python3 with torch was found");
        return;
    }
    snprintf(log, sizeof log, "%s/ops.log", opt.work);
    a.n = 0;
    arg_text(&a, opt.python, opt.peer);
    arg(&a, "--ops");
    arg_text(&a, "--device", opt.peer_device);
    ops.on = spawn(&ops.p, a.v, log) && answer(&ops.p, 120) == 1;
    if (!ops.on) {
        stop(&ops.p);
        why_not(log, ops.cannot, sizeof ops.cannot);
    }
}

/* Runs one round of an operation. Adds its times in ms to `forward` and `backward` (may
   be NULL) and returns 1, or writes the reason to `why` and returns 0. */
static int ops_ask(const char *what, samples *forward, samples *backward, char *why, size_t size,
                   double limit) {
    double ms;
    if (!ops.on) {
        snprintf(why, size, "%s", ops.cannot);
        return 0;
    }
    if (ask(&ops.p, what, limit) != 1) {
        snprintf(ops.cannot, sizeof ops.cannot, "PyTorch stopped replying");
        snprintf(why, size, "%s", ops.cannot);
        stop(&ops.p);
        ops.on = 0;
        return 0;
    }
    ms = json_number(ops.p.line, "fwd_ms");
    if (!(ms >= 0)) {
        json_text(ops.p.line, "cannot", why, size);
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

/* Prepares a job in which every query sees E keys: all heads have a learned span of E -
   ramp. */
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

enum { BY_BF16, BY_F32, BY_FLEX, BY_SDPA, WHO };

static const char *const who[WHO] = {"seqtx bf16", "seqtx f32",
                                     "PyTorch FlexAttention bf16, R materialised",
                                     "PyTorch SDPA bf16, E keys, no window, no positions"};

/* Number of matmuls of 2 D E operations per query and head: {forward pass, backward
   pass} of each contender. SDPA has fewer, because it has no positions. */
static const int attention_matmuls[WHO][2] = {{3, 6}, {3, 6}, {3, 6}, {2, 4}};

typedef struct {
    size_t B, T, H, D, E, L;
    stx_ctx *x[2];
    job j[2][2]; /* [i]: the forward and the backward pass in context x[i] */
    samples ms[WHO][2];
    char cannot[WHO][256], request[WHO][256]; /* request: sent to PyTorch */
} attention_case;

static void attention_begin(attention_case *c, double until) {
    int w;
    for (w = 0; w < WHO; w++) {
        c->ms[w][0].n = c->ms[w][1].n = 0;
        c->cannot[w][0] = 0;
        snprintf(c->request[w], sizeof c->request[w],
                 "{\"op\": \"attention\", \"kind\": \"%s\", \"B\": %zu, \"T\": %zu, \"H\": %zu, "
                 "\"D\": %zu, \"E\": %zu, \"L\": %zu, \"dtype\": \"bf16\"}",
                 w == BY_SDPA ? "sdpa" : "flex", c->B, c->T, c->H, c->D, c->E, c->L);
    }
    for (w = 0; w < 2; w++) {
        c->x[w] = NULL;
        if (seconds() > until) {
            snprintf(c->cannot[w], sizeof c->cannot[w], "the time of the section was over");
            continue;
        }
        c->x[w] = context(w == BY_BF16 ? BF16 : F32, 1);
        attention_job(&c->j[w][0], c->x[w], c->B, c->T, c->H, c->D, c->E, c->L);
        c->j[w][0].fn = run_attention_fwd;
        c->j[w][1] = c->j[w][0];
        c->j[w][1].fn = run_attention_bwd;
        if (!job_warm(&c->j[w][0]) || !job_warm(&c->j[w][1]))
            snprintf(c->cannot[w], sizeof c->cannot[w], "%.200s", stx_error(c->x[w]));
    }
}

static void attention_round(attention_case *c, int w, double until) {
    if (c->cannot[w][0]) return;
    if (w < BY_FLEX) {
        sample(&c->ms[w][0], job_ms(&c->j[w][0]));
        sample(&c->ms[w][1], job_ms(&c->j[w][1]));
    } else
        ops_ask(c->request[w], &c->ms[w][0], &c->ms[w][1], c->cannot[w], sizeof c->cannot[w],
                at_least(until - seconds(), 60));
}

static void attention_row(const attention_case *c, int w) {
    const double unit = 2.0 * (double)(c->B * c->T * c->H) * (double)c->D * (double)c->E;
    int pass;
    row_begin();
    cell(0, "%zu", c->E);
    cell(1, "%s", who[w]);
    for (pass = 0; pass < 2; pass++) {
        const samples *ms = &c->ms[w][pass];
        if (!ms->n) continue;
        cell_spread(2 + 3 * pass, ms, 3, 1);
        cell(4 + 3 * pass, "%.*f", opt.tiny ? 6 : 1,
             unit * attention_matmuls[w][pass] / median(ms) * 1e-9);
    }
    cell(8, c->cannot[w][0] ? "left out: %.80s" : "%s", c->cannot[w]);
}

static void bench_attention(void) {
    static attention_case c;
    double until = seconds() + opt.limit;
    int i, r, w, n = opt.tiny ? 2 : 8;
    c.B = opt.tiny ? 1 : 64;
    c.T = opt.tiny ? 16 : 512;
    c.H = opt.tiny ? 2 : 8;
    c.D = opt.tiny ? 16 : 64;
    c.L = opt.tiny ? 96 : 8192;
    ops_start();
    say("## Attention\n\n"
        "Adaptive-span attention (relative table, learned span), only the kernels, head size %zu, "
        "%zu heads, %zu streams of\n%zu queries, E keys each. Median of %d rounds (minimum - "
        "maximum), interleaved. TFLOP/s count matmuls of 2 D E per\nquery and head: 3 forward and "
        "6 backward for this attention, 2 and 4 for SDPA, which has neither window nor\npositions "
        "and shows what the device can do; nothing is counted twice.\n\n",
        c.D, c.H, c.B, c.T, opt.rounds);
    header("E|who|forward ms|range|TFLOP/s|backward ms|range|TFLOP/s|");
    for (i = 0; i < n; i++) {
        c.E = (size_t)64 << i;
        if (opt.tiny) c.E = i ? 96 : 40;
        attention_begin(&c, until);
        for (r = 0; r < opt.rounds && seconds() < until; r++)
            for (w = 0; w < WHO; w++) {
                char what[64];
                snprintf(what, sizeof what, "attention: E %zu, round %d of %d ..", c.E, r + 1,
                         opt.rounds);
                progress(what);
                attention_round(&c, w, until);
            }
        for (w = 0; w < WHO; w++) attention_row(&c, w);
        for (w = 0; w < 2; w++) stx_destroy(c.x[w]);
    }
    print_table();
    stop(&ops.p);
}


// >>curves: how the cost of a step depends on its configuration

enum { UNIFORM, CONTEXT, BATCH, GRAPH, EPS, CURVES };

static const char *const curve_name[CURVES] = {"span", "context", "batch", "graph", "exact eps"};

/* A point of a curve. keys: keys per query, summed over layers and heads. rows: memory
   rows, summed over layers. */
typedef struct {
    char name[CELL];
    int curve, no_graph, literal;
    config c;
    trainee t;
    samples ms;
    double peak, keys, rows;
    char cannot[200];
} point;

static struct {
    point at[48];
    int n;
} points;

static point *point_add(int curve, config c, const char *name, ...) {
    point *q = &points.at[points.n++];
    va_list ap;
    memset(q, 0, sizeof *q);
    va_start(ap, name);
    vsnprintf(q->name, CELL, name, ap);
    va_end(ap);
    q->curve = curve;
    q->c = c;
    q->keys = mean_keys(&c) * (double)(c.layers * c.heads);
    q->rows = mean_window(&c) * (double)c.layers;
    return q;
}

/* Solves a 3 x 3 system by elimination with pivoting. Returns 0 if there is no
   solution. */
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

static void point_span(const config *base, int spans, double reach) {
    config c = *base;
    c.spans = spans;
    c.reach = reach;
    if (spans == SPANS_ALL)
        point_add(UNIFORM, c, "all heads %.0f", reach);
    else
        point_add(UNIFORM, c, "one head %zu, others %.0f", c.span, reach);
}

static void points_graph(const config *base, size_t batch) {
    config c = *base;
    c.batch = batch;
    point_add(GRAPH, c, "batch %zu, replayed", batch);
    point_add(GRAPH, c, "batch %zu, launched", batch)->no_graph = 1;
}

/* Lists the points of all curves. `base` is the model, and B its usual batch size. */
static void points_list(const config *base, size_t B) {
    config c;
    size_t s, last = 0, by = opt.tiny ? 8 : 4, least = opt.tiny ? 64 : 512,
              largest = opt.tiny ? 128 : 32768, most_streams = opt.tiny ? 2 : 64;
    points.n = 0;
    for (s = opt.tiny ? 8 : 32; s <= base->span; s *= by) {
        point_span(base, SPANS_ALL, (double)s);
        last = s;
    }
    if (last < base->span) point_span(base, SPANS_ALL, (double)base->span);
    point_span(base, SPANS_ONE, opt.tiny ? 8 : 64);
    for (s = least; s <= largest; s *= 2) {
        c = *base;
        c.span = s;
        c.reach = opt.tiny ? 16 : 448;
        point_add(CONTEXT, c, "S %zu", s);
    }
    c = *base;
    for (c.batch = 1; c.batch <= most_streams; c.batch *= 2)
        point_add(BATCH, c, "batch %zu", c.batch);
    points_graph(base, 1);
    if (B > 8) points_graph(base, 8);
    if (B > 1) points_graph(base, B);
    point_add(EPS, *base, "eps 0");
    point_add(EPS, *base, "eps 1e-8 over the whole window")->literal = 2;
}

static void point_failed(point *p) {
    snprintf(p->cannot, sizeof p->cannot, "%.190s", stx_error(p->t.x));
    trainee_destroy(&p->t);
    p->ms.n = 0;
}

/* Measures the points of a curve, interleaved, until a given time. */
static void curve_measure(int curve, const char *data, double until) {
    int r, any = 0;
    point *p, *end = points.at + points.n;
    for (p = points.at; p < end; p++) {
        char now[CELL + 40];
        if (p->curve != curve) continue;
        snprintf(now, sizeof now, "curves: %s, %.95s ..", curve_name[curve], p->name);
        progress(now);
        if (any && seconds() > until) {
            snprintf(p->cannot, sizeof p->cannot, "the time of the section was over");
            continue;
        }
        any = 1;
        if (!trainee_create(&p->t, &p->c, BF16, p->no_graph, p->literal, data, NULL)
            || !trainee_warm(&p->t, opt.tiny ? 0 : 8))
            point_failed(p);
    }
    for (r = 0; r < opt.rounds; r++)
        for (p = points.at; p < end; p++) {
            if (p->curve != curve || !p->t.x || (r > 0 && seconds() > until)) continue;
            trainee_round(&p->t, 1, NULL);
            trainee_round(&p->t, opt.tiny ? 1 : 6, &p->ms);
            if (stx_ok(p->t.x))
                p->peak = (double)stx_peak_bytes(p->t.x);
            else
                point_failed(p);
        }
}

static void curve_rows(int curve) {
    double first = NAN;
    point *p;
    for (p = points.at; p < points.at + points.n; p++) {
        double ms = median(&p->ms);
        if (p->curve != curve) continue;
        row_begin();
        cell(0, "%s", curve_name[curve]);
        cell(1, "%s", p->name);
        cell(6, "%.0f", mean_keys(&p->c));
        cell(7, "%.0f", mean_window(&p->c));
        if (p->cannot[0]) cell(9, "left out: %.80s", p->cannot);
        if (!p->ms.n) continue;
        if (!measured(first)) first = ms;
        cell_spread(2, &p->ms, 3, 1);
        cell(4, "%.3f", ms / first);
        cell(5, "%.0f", (double)(p->c.batch * p->c.block) / ms * 1e3);
        cell(8, "%.2f", p->peak * 1e-9);
        if (p->t.x) trainee_destroy(&p->t);
    }
}

/* The fitted formula is ms = v[0] + v[1] sum (keys + Bq + Bk / 2) + v[2] sum rows. The
   first sum is over layers and heads, the second over layers. Bq and Bk are BLOCK_Q and
   BLOCK_K. */
enum { BLOCK_Q = 64, BLOCK_K = 64, FIT_LEAST = 4 };

static int point_fits(const point *p, double f[3]) {
    f[0] = 1;
    f[1] = p->keys + (double)(p->c.layers * p->c.heads) * (BLOCK_Q + BLOCK_K / 2);
    f[2] = p->rows;
    return p->ms.n && (p->curve == UNIFORM || p->curve == CONTEXT);
}

/* Fits v by least squares of the relative errors: the equation of each point is divided
   by its measured time. */
static void curves_fit(void) {
    double a[3][4], v[3], f[3], worst = 0;
    int k, l, used = 0;
    const point *p, *end = points.at + points.n;
    memset(a, 0, sizeof a);
    for (p = points.at; p < end; p++) {
        double ms = median(&p->ms);
        if (!point_fits(p, f)) continue;
        for (k = 0; k < 3; k++) {
            for (l = 0; l < 3; l++) a[k][l] += f[k] * f[l] / (ms * ms);
            a[k][3] += f[k] / ms;
        }
        used++;
    }
    if (used < FIT_LEAST || !solve(a, v)) {
        say("Fit: too few points.\n\n");
        return;
    }
    for (p = points.at; p < end; p++)
        if (point_fits(p, f))
            worst = at_least(worst, fabs((v[0] + v[1] * f[1] + v[2] * f[2]) / median(&p->ms) - 1));
    say("Fit over the %d points of span and context, least squares of relative errors: step ms = "
        "t0 + a sum over layers\nand heads of (keys + Bq + Bk/2) + b sum over layers of rows, "
        "Bq = Bk = %d: t0 = %.4g ms, a = %.4g us per key,\nb = %.4g us per row of memory; the "
        "worst point is off by %.0f %%.\n\n",
        used, (int)BLOCK_Q, v[0], v[1] * 1e3, v[2] * 1e3, 100 * worst);
}

static void bench_curves(void) {
    config base = configured(configs[2]), most;
    char data[512];
    double until = seconds() + opt.limit;
    int curve;
    size_t B = base.batch;
    /* all points of a curve are in memory at the same time */
    if (!opt.batch && !opt.tiny) base.batch = 16;
    points_list(&base, B);
    snprintf(data, sizeof data, "%s/tokens.curves", opt.work);
    most = base;
    most.batch = 64;
    write_data(data, &most, (size_t)(40 + (opt.rounds + 1) * 12));
    say("## Curves\n\n"
        "seqtx bf16, the model 12x512 (block %zu), %zu streams unless stated otherwise. Median of "
        "%d rounds of %d steps\n(minimum - maximum), the points of a curve interleaved; memory "
        "full. keys: mean per query and head; rows: mean\nmemory of a layer. At S the spans are "
        "the learned-like ones, at most %d tokens, for every S.\n\n",
        base.block, base.batch, opt.rounds, opt.tiny ? 1 : 6, opt.tiny ? 16 : 448);
    header("curve|point|step ms|range|to the first|tokens/s|keys|rows|peak GB|");
    for (curve = 0; curve < CURVES; curve++) {
        /* each curve gets an equal share of the remaining time */
        curve_measure(curve, data, seconds() + (until - seconds()) / (CURVES - curve));
        curve_rows(curve);
    }
    print_table();
    unlink(data);
    curves_fit();
}


// >>gemm: matmuls, and passes that are limited by memory bandwidth

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
    int is_entropy = fn == run_entropy_fwd || fn == run_entropy_bwd;
    size_t i;
    int32_t *ids = (int32_t *)malloc(N * sizeof *ids);
    memset(j, 0, sizeof *j);
    j->fn = fn;
    j->x = x;
    j->n[0] = N;
    j->n[1] = C;
    for (i = 0; i < 3; i++) j->a[i] = device_random(x, N * C, 1, STX_MEM_ACTIVATIONS);
    j->a[7] = device_random(x, N * C, 1, is_entropy ? STX_MEM_BYTES : STX_MEM_ACTIVATIONS);
    j->a[3] = device_random(x, table_rows * C, 1, STX_MEM_PARAMS);
    j->a[4] = device_random(x, C, 1, STX_MEM_PARAMS);
    for (i = 5; i < 7; i++) j->a[i] = device_random(x, N, 1, STX_MEM_BYTES);
    for (i = 0; i < 2; i++) j->work[i] = device_bytes(x, 4 * C);
    j->ids = (int32_t *)device_bytes(x, N * sizeof *ids);
    if (!ids) die("out of memory");
    for (i = 0; i < N; i++) {
        uint32_t r[4];
        stx_philox(3, 4, i, r);
        ids[i] = (int32_t)(r[0] % C % table_rows);
    }
    if (stx_ok(x)) stx_cuda_upload(x, j->ids, ids, N * sizeof *ids);
    if (stx_ok(x)) stx_cuda_sync(x);
    free(ids);
    /* the forward pass writes the statistics that the backward pass reads */
    if (stx_ok(x) && (fn == run_layernorm_bwd || fn == run_residual_bwd)) run_layernorm_fwd(j);
    if (stx_ok(x) && fn == run_entropy_bwd) run_entropy_fwd(j);
    if (stx_ok(x) && fn == run_bias_relu) stx_cuda_sync(x);
}

/* The recurrence of SRU with a highway connection, in one direction, as in SRU++. */
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

typedef struct {
    size_t M, N, K;
    int ta, tb;
    const char *what;
} gemm_shape;

static struct {
    gemm_shape at[28];
    int n;
} shapes;

static void shape_add(const char *what, int ta, int tb, size_t M, size_t N, size_t K) {
    gemm_shape *s = &shapes.at[shapes.n++];
    s->M = M;
    s->N = N;
    s->K = K;
    s->ta = ta;
    s->tb = tb;
    s->what = what;
}

static void shapes_list(void) {
    static const size_t dims[2][3] = {{256, 512, 768}, {16, 32, 48}};
    /* an output layer of 205 words: unpadded, padded to a multiple of 16 bytes, and
       padded as in training on the GPU */
    static const size_t vocab[2][3] = {{205, 208, 256}, {13, 16, 19}};
    size_t N = opt.tiny ? 32 : 32768, large = opt.tiny ? 64 : 8192, i;
    shapes.n = 0;
    shape_add("square", 0, 1, large, large, large);
    for (i = 0; i < 3; i++) {
        size_t d = dims[opt.tiny][i], rows = i || opt.tiny ? N : 16384,
               f = i == 2 ? 16 * d / 3 : 4 * d;
        shape_add("x Wq^T", 0, 1, rows, d, d);
        shape_add("x W1^T", 0, 1, rows, f, d);
        shape_add("x W2^T", 0, 1, rows, d, f);
        shape_add("dy W1", 0, 0, rows, d, f);
        shape_add("dW1 = dy^T x", 1, 0, f, d, rows);
        shape_add("dWq = dy^T x", 1, 0, d, d, rows);
    }
    for (i = 0; i < 3; i++) {
        size_t V = vocab[opt.tiny][i], d = dims[opt.tiny][1];
        shape_add("h Wout^T", 0, 1, N, V, d);
        shape_add("dlogits Wout", 0, 0, N, d, V);
        shape_add("dWout = dlogits^T h", 1, 0, V, d, N);
    }
}

/* Writes the median time in microseconds, its range, and the TFLOP/s to three columns. */
static void cell_us(int column, const samples *ms, double flop) {
    if (!ms->n) return;
    cell_spread(column, ms, 1, 1e3);
    cell(column + 2, "%.1f", flop / median(ms) * 1e-9);
}

static void gemm_row(const gemm_shape *s, int mode) {
    static job j;
    static samples peer;
    stx_ctx *x = context(mode, 1);
    char what[256], why[256] = "";
    double flop = 2.0 * (double)s->M * (double)s->N * (double)s->K;
    int r;
    peer.n = 0;
    matmul_job(&j, x, s->M, s->N, s->K, s->ta, s->tb);
    snprintf(what, sizeof what, "matmuls: %s, %s ..", s->what, mode_name[mode]);
    progress(what);
    if (!job_warm(&j)) snprintf(why, sizeof why, "%.200s", stx_error(x));
    snprintf(what, sizeof what,
             "{\"op\": \"gemm\", \"M\": %zu, \"N\": %zu, \"K\": %zu, \"ta\": %d, \"tb\": %d, "
             "\"dtype\": \"%s\"}",
             s->M, s->N, s->K, s->ta, s->tb, mode_name[mode]);
    for (r = 0; r < opt.rounds; r++) {
        if (stx_ok(x)) job_round(&j);
        if (!ops_ask(what, &peer, NULL, why, sizeof why, 60)) break;
    }
    for (; r < opt.rounds && stx_ok(x); r++) job_round(&j);
    row_begin();
    cell(0, "%s", s->what);
    cell(1, "%zu x %zu x %zu", s->M, s->N, s->K);
    cell(2, "%s", mode_name[mode]);
    cell_us(3, &j.ms, flop);
    cell_us(6, &peer, flop);
    if (peer.n && j.ms.n) cell(9, "%.2f", median(&peer) / median(&j.ms));
    if (why[0]) cell(10, "left out: %.80s", why);
    job_free(&j);
    stx_destroy(x);
}

static void bench_matmuls(double until) {
    int i, m;
    shapes_list();
    ops_start();
    say("Matmuls: stx_gemm (cublasLt), op(A) op(B) as M x N x K, compared with torch.matmul; "
        "gradients of weights are\nfloats in seqtx, and accumulated; in PyTorch they have the "
        "type of the factors. Median of %d rounds (minimum -\nmaximum), interleaved, each of calls "
        "for at least 5 ms.\n\n",
        opt.rounds);
    header("matmul|M x N x K|precision|seqtx us|range|TFLOP/s|PyTorch us|range|TFLOP/s|"
           "to PyTorch|");
    for (i = 0; i < shapes.n; i++)
        for (m = 0; m < MODES; m++) {
            /* f32 is slow, so only some shapes are timed */
            if (m == F32 && i > 0 && strcmp(shapes.at[i].what, "x W1^T")) continue;
            if (seconds() <= until) gemm_row(&shapes.at[i], m);
        }
    print_table();
    stop(&ops.p);
}

/* A pass over memory. elements: elements read or written per element of (rows,cols),
   with each operand counted once; row_bytes: additional bytes per row. */
static const struct {
    const char *name;
    void (*fn)(job *);
    double elements, row_bytes;
    size_t cols, table;
} passes[] = {{"copy on the device", run_copy, 2, 0, 512, 1},
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

enum { PASSES_N = sizeof passes / sizeof *passes };

/* Runs a job and fills in the columns after name and shape. */
static void pass_measure(job *j, int mode, double bytes) {
    job_run(j);
    cell(2, "%s", mode_name[mode]);
    if (!j->ms.n) {
        cell(7, "left out: %.80s", stx_error(j->x));
        return;
    }
    cell_spread(3, &j->ms, 1, 1e3);
    cell(5, "%.1f", bytes * 1e-6);
    cell(6, "%.0f", bytes / median(&j->ms) * 1e-6);
}

static void pass_row(int i, int mode) {
    static job j;
    stx_ctx *x = context(mode, 1);
    size_t cols = passes[i].cols, rows = cols > 4096 ? 16384 : 131072;
    double element = mode == BF16 ? 2 : 4;
    if (opt.tiny) {
        cols /= 32;
        rows = 32;
    }
    rows_job(&j, x, passes[i].fn, rows, cols, passes[i].table);
    if (passes[i].fn == run_copy) j.n[0] = rows * cols * (size_t)element;
    row_begin();
    cell(0, "%s", passes[i].name);
    cell(1, "%zu x %zu", rows, cols);
    pass_measure(&j, mode,
                 (double)rows
                     * ((double)cols * passes[i].elements * element + passes[i].row_bytes));
    job_free(&j);
    stx_destroy(x);
}

static const size_t sru_shapes[][3] = {{4, 1024, 3072},
                                       {32, 1024, 3072},
                                       {64, 256, 3056},
                                       {1, 1024, 3072}};

enum { SRU_N = sizeof sru_shapes / sizeof *sru_shapes };

/* Times SRU's recurrence. The operands are u0 u1 u2 x -> h in the forward pass, and
   u0 u1 u2 x dh -> du0 du1 du2 dx in the backward pass, plus one state per tile. */
static void sru_row(const size_t *shape, int backward, int mode) {
    static job j;
    size_t B = opt.tiny ? 1 : shape[0], T = opt.tiny ? 40 : shape[1], O = opt.tiny ? 40 : shape[2];
    double bytes = (double)(B * T * O)
                   * ((backward ? 9 : 5) * (mode == BF16 ? 2 : 4) + 4.0 / STX_SRU_TILE);
    stx_ctx *x = context(mode, 1);
    sru_job(&j, x, backward, B, T, O);
    row_begin();
    cell(0, backward ? "SRU recurrence backward" : "SRU recurrence forward");
    cell(1, "%zu x %zu x %zu", B, T, O);
    pass_measure(&j, mode, bytes);
    job_free(&j);
    stx_destroy(x);
}

static void optim_row(const config *of) { /* updates all parameters of the model */
    static job j;
    config c = configured(*of);
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
    row_begin();
    cell(0, "Adagrad, model %s", c.name);
    cell(1, "%.1f M parameters", parameters(&c) * 1e-6);
    pass_measure(&j, BF16, 30 * parameters(&c));
    stx_destroy(x);
}

static void bench_passes(double until) {
    int i, backward, mode;
    say("Passes over memory: GB/s of every operand once, by formula. Buffers are larger than the "
        "second-level cache.\n\n");
    header("pass|rows x columns|precision|us|range|MB|GB/s|");
    for (i = 0; i < PASSES_N; i++)
        for (mode = F32; mode <= BF16; mode += BF16)
            if (seconds() <= until) pass_row(i, mode);
    for (i = 0; i < SRU_N; i++)
        for (backward = 0; backward < 2; backward++)
            for (mode = F32; mode <= BF16; mode += BF16)
                if (seconds() <= until) sru_row(sru_shapes[i], backward, mode);
    for (i = 2; i < 4; i++) optim_row(&configs[i]);
    print_table();
}

static void bench_gemm(void) {
    double until = seconds() + opt.limit;
    say("## Matmuls and passes\n\n");
    bench_matmuls(until);
    bench_passes(until + 60);
}


// >>idle: how long the device waits for the host

/* Runs n steps without reading results in between. The host only copies inputs and
   launches kernels, so the device always has work. The key of the steps must not
   change. The caller therefore checks that the spans stay within their windows during
   these few steps. */
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

static void idle_row(const config *c, const char *data, int no_graph) {
    static trainee t;
    static samples wall, busy, host;
    uint64_t key = 0;
    int r, same = 1;
    wall.n = busy.n = host.n = 0;
    row_begin();
    cell(0, "%s", c->name);
    cell(1, "%s", no_graph ? "launched" : "replayed");
    if (trainee_create(&t, c, BF16, no_graph, 0, data, NULL) && trainee_warm(&t, opt.tiny ? 0 : 15))
        for (r = 0; r < opt.rounds && stx_ok(t.x); r++) {
            double h = 0;
            trainee_round(&t, 1, NULL);
            key = t.key;
            sample(&wall, trainee_round(&t, c->steps, NULL) * 1e3 / c->steps);
            sample(&busy, back_to_back(&t, c->steps, &h));
            sample(&host, h);
            same = same && key == stx_span_key(t.m, t.in, t.out, t.memory, 0);
        }
    if (stx_ok(t.x) && wall.n) {
        cell_spread(2, &wall, 3, 1);
        cell_spread(4, &busy, 3, 1);
        cell(6, "%.1f %%", 100 * (1 - median(&busy) / median(&wall)));
        cell_median(7, &host, 3, 1);
        if (!same) cell(8, "a window changed meanwhile");
    } else
        cell(8, "left out: %.80s", stx_error(t.x));
    trainee_destroy(&t);
}

static void bench_idle(void) {
    char data[512];
    double until = seconds() + opt.limit;
    int i, no_graph;
    say("## Idle gaps\n\n"
        "seqtx bf16. wall: a step as in the trainer, which waits for each loss before it feeds "
        "the next step (clock of the\nhost, median of %d rounds). back to back: the same steps "
        "launched without waiting, between one event before the\nfirst and one after the last: "
        "the device always has work. idle: the part of wall that is not back to back, that\nis, "
        "waiting for the host. Gaps between the kernels of a step are in both; only a profiler "
        "shows them. host: time\nof the host to feed and launch a step.\n\n",
        opt.rounds);
    header("configuration|steps are|wall ms|range|back to back ms|range|idle|host ms|");
    for (i = 0; i < CONFIGS; i++) {
        config c = configured(configs[i]);
        if (!listed(opt.config, c.name)) continue;
        snprintf(data, sizeof data, "%s/tokens.idle", opt.work);
        write_data(data, &c,
                   (size_t)(opt.warmup + opt.check + 24 + (opt.rounds + 1) * (2 * c.steps + 4)));
        for (no_graph = 0; no_graph < 2; no_graph++)
            if (seconds() <= until) idle_row(&c, data, no_graph);
        unlink(data);
    }
    print_table();
}


// >>main

static const char usage[] =
    "bench_cuda [options]: times seqtx on a GPU (make bench-cuda builds and runs it)\n"
    "  --section LIST     some of training,attention,curves,gemm,idle (default: all)\n"
    "  --config LIST      training, idle: some of "
    "small-full,small,12x512,24x768,all-attention,small-205 (default: all)\n"
    "  --seconds N        per section (default 540)\n"
    "  --rounds N         samples of each value (default 5, at most 30)\n"
    "  --warmup N         steps before the first round (default 20)\n"
    "  --check-step N     the step whose losses are compared, with the first one's (default 10)\n"
    "  --batch N          streams, in place of the configuration's\n"
    "  --tiny             toy sizes, to test the program\n"
    "  --python CMD --peer FILE --peer-device D    PyTorch; device cuda or cpu\n"
    "  --work DIR         for temporary files\n"
    "  --append FILE      also append the tables to this file\n"
    "  --about            names the GPU, the driver and CUDA, and ends\n";

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
    int i, taken;
    program = "bench_cuda";
    opt.self = argv[0];
    for (i = 1; i < argc; i += taken) {
        taken = option_take(options, argc, argv, i);
        if (!taken) return option_unknown(argv[i], usage);
    }
    if (opt.help) {
        fputs(usage, stdout);
        return 0;
    }
    if (opt.about) return about();
    if (opt.rounds > 30) opt.rounds = 30;
    require_listed("--config", opt.config,
                   "small-full,small,12x512,24x768,all-attention,small-205");
    signal(SIGPIPE, SIG_IGN); /* a contender that has ended is reported, and this
                                 program continues */
    if (opt.worker) return worker();
    if (listed(opt.section, "training")) bench_training();
    if (listed(opt.section, "attention")) bench_attention();
    if (listed(opt.section, "curves")) bench_curves();
    if (listed(opt.section, "gemm")) bench_gemm();
    if (listed(opt.section, "idle")) bench_idle();
    return 0;
}
