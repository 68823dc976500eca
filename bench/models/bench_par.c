/* bench_par.c - times Transformer-XL and the search of PAR on a CPU: training and
   generation, compared with PyTorch.

       sh bench/run.sh --only par       builds this file and runs it (bench/README.md)
       build/bench/bench_par --loop par-base bf16 --threads 1
                                        runs only this library, in one process, for a
                                        profiler

   Contenders alternate within one run, so that a busy machine affects all of them; values
   are medians of rounds, with minimum and maximum. The contenders (this program with
   --worker, and PyTorch) are separate processes that run one round for each line on
   stdin. All take the options of bench/peers/par_torch.py, read the same tokens and
   start from the same parameter file. A row is void if its losses differ from the
   peer's. */
#define _POSIX_C_SOURCE 200809L
#define SEQTX_IMPLEMENTATION
#include "../../seqtx_par.h"
#include "../lm.h"


// >>worker: the options of bench/peers/par_torch.py

static struct {
    int D, H, F, M, V, generate, reference, prompt;
    const char *pattern, *cutoffs;
} model = {256, 4, 1024, 128, 256, 0, 0, 2, "sfsfsfsf", ""};

static const option model_options[] = {OPTION_TEXT("--pattern", &model.pattern),
                                       OPTION_WHOLE("--hid-sz", &model.D, 1),
                                       OPTION_WHOLE("--nheads", &model.H, 1),
                                       OPTION_WHOLE("--inner-hid-sz", &model.F, 1),
                                       OPTION_WHOLE("--mem", &model.M, 0),
                                       OPTION_WHOLE("--vocab", &model.V, 1),
                                       OPTION_TEXT("--cutoffs", &model.cutoffs),
                                       OPTION_FLAG("--reference", &model.reference),
                                       OPTION_WHOLE("--token-bytes", &job.token_bytes, 1),
                                       OPTION_WHOLE("--generate", &model.generate, 1),
                                       OPTION_WHOLE("--prompt", &model.prompt, 1),
                                       OPTION_END};

static stx_par *model_create(stx_ctx *x) {
    stx_par_desc d;
    stx_par *m;
    const char *p;
    memset(&d, 0, sizeof d);
    if (model.reference) stx_par_reference(&d);
    d.vocab = (size_t)model.V;
    d.dim = (size_t)model.D;
    d.heads = (size_t)model.H;
    d.inner = (size_t)model.F;
    d.segment = (size_t)job.T;
    d.mem = model.M ? (size_t)model.M : STX_PAR_NO_ROWS;
    d.blocks = strlen(model.pattern);
    if (model.pattern[0] != 'g') d.pattern = model.pattern;
    for (p = model.cutoffs; *p && d.cutoffs < STX_MAX_CLUSTERS - 1; p = after(p))
        d.cutoff[d.cutoffs++] = (size_t)strtoul(p, NULL, 10);
    if (!model.reference) {
        d.words_out = d.cutoffs ? STX_PAR_OUT_ADAPTIVE : STX_PAR_OUT_TIED;
        d.adaptive_in = d.tie_words = d.cutoffs > 0;
    }
    m = stx_par_create(x, &d);
    check(x);
    return m;
}

/* An architecture search in training, with deterministic noise and a separate optimiser
   for the gates. */
static struct {
    stx_lm lm;
    stx_par *m;
    stx_optim *gates;
    stx_real *u;
    uint64_t step;
} search;

/* Returns the loss with the same noise as the peer. In step n, the noise of branch k in
   block l of L blocks is ((37 (3 (L n + l) + k) + 11) mod 101 + 1/2) / 102. */
static stx_tensor *search_loss(void *m, const stx_ids *ids, const stx_ids *targets, const void *in,
                               void *out) {
    size_t i, n = 3 * search.m->desc.blocks;
    for (i = 0; i < n; i++)
        search.u[i] = (stx_real)(((double)((37 * (n * (size_t)search.step + i) + 11) % 101) + 0.5)
                                 / 102);
    stx_par_set_uniforms(search.m, search.u, n);
    search.step++;
    return search.lm.loss(m, ids, targets, in, out);
}

static void search_updated(void *m) {
    stx_optim_step(search.gates, job.lr);
    search.lm.updated(m);
}

static stx_lm create(stx_ctx *x) {
    stx_lm lm;
    stx_optim_desc od;
    search.m = model_create(x);
    search.lm = lm = stx_par_as_lm(search.m);
    if (!search.m->gates) return lm;
    memset(&od, 0, sizeof od);
    od.kind = STX_ADAMW;
    od.weight_decay = job.decay;
    search.gates = stx_optim_create(search.m->gates, &od);
    search.u = (stx_real *)stx_persist(x, 3 * search.m->desc.blocks * sizeof *search.u);
    check(x);
    lm.loss = search_loss;
    lm.updated = search_updated;
    return lm;
}

typedef struct {
    stx_ctx *x;
    stx_par *m;
    stx_par_state *state;
    stx_par_gen *gen;
    int32_t *ids;
    size_t count;
} generation;

/* Creates a model and feeds it --prompt segments of the text. g->ids receives the next
   `count` tokens. Returns 0 if this build does not have the precision. */
static int generation_begin(generation *g) {
    size_t n, k, T = (size_t)job.T, N = (size_t)model.prompt * T;
    unsigned char *text;
    memset(g, 0, sizeof *g);
    g->x = worker_context(job.precision, job.threads);
    if (!g->x) return 0;
    g->m = model_create(g->x);
    if (job.load) params_load(g->x, stx_par_params(g->m), job.load);
    text = read_bytes(job.data, &n);
    g->count = (size_t)model.generate + 2;
    if (n / (size_t)job.token_bytes < N + g->count)
        die("the --data file is too short for --prompt and --block-sz");
    g->ids = (int32_t *)malloc((N + g->count) * sizeof *g->ids);
    if (!g->ids) die("out of memory");
    for (k = 0; k < N + g->count; k++) g->ids[k] = token_at(text, k);
    free(text);
    g->state = stx_par_state_create(g->m, 1);
    for (k = 0; k < (size_t)model.prompt; k++) {
        stx_begin(g->x, STX_EVAL);
        stx_par_forward(g->m, stx_tokens(g->x, g->ids + k * T, 1, T), g->state, g->state);
    }
    g->gen = stx_par_gen_create(g->m, 1);
    check(g->x);
    memmove(g->ids, g->ids + N, g->count * sizeof *g->ids);
    return 1;
}

static void generation_end(generation *g) {
    free(g->ids);
    stx_par_gen_free(g->gen);
    stx_par_state_free(g->state);
    stx_destroy(g->x);
}

/* Runs one round, token by token, from the same memory each time. The first token is
   not timed, because keys, values and positions are computed before it. */
static void generation_round(generation *g, reply *r) {
    double sum = 0;
    size_t k, N = (size_t)model.generate;
    r->seconds = 0;
    if (!stx_par_gen_set(g->gen, g->state)) check(g->x);
    for (k = 0; k <= N; k++) {
        double nll, at = seconds();
        const stx_real *logits = stx_par_gen_feed(g->gen, g->ids + k, 1);
        at = seconds() - at;
        check(g->x);
        if (!k) continue;
        r->seconds += at;
        nll = nll_of(logits, (size_t)model.V, g->ids[k + 1]);
        if (k == 1) r->first = r->step1 = nll;
        sum += nll;
    }
    r->last = sum / (double)N;
    r->tokens = (double)N;
    r->done += N;
}

static int generate_worker(void) {
    generation g;
    reply r;
    char line[64];
    memset(&r, 0, sizeof r);
    r.norm = NAN;
    if (!generation_begin(&g)) return 3;
    fprintf(stderr, "ready\n");
    while (fgets(line, sizeof line, stdin)) {
        generation_round(&g, &r);
        reply_print(g.x, &r);
    }
    generation_end(&g);
    return 0;
}


// >>configurations

enum { CONFIGS = 3, WORDS_MADE = 400000 };

/* search: number of blocks of the search, or 0 for a Transformer-XL with `layers`
   layers. quick: cutoffs with --quick, for a tenth of the words. found: blocks of the
   network that replaces the search in generation. */
typedef struct {
    const char *name;
    int search, layers, D, H, F, T, M, B, V;
    const char *cutoffs, *quick, *clip, *found;
    int steps, places;
} config;

/* base_model.sh of PAR's reference, and the standard models of Transformer-XL for
   enwik8 and WikiText-103. */
static const config configs[CONFIGS] = {
    {"par-base", 6, 0, 128, 4, 512, 32, 16, 32, 12000, "250,2500", "250,600", "0", "sffsff", 8, 64},
    {"enwik8", 0, 12, 512, 8, 2048, 512, 512, 1, 205, "", "", "0.25", NULL, 1, 32},
    {"wt103", 0, 16, 410, 10, 2100, 150, 150, 4, 267735, "20000,40000,200000", "2000,4000,20000",
     "0.25", NULL, 1, 32}};

enum { CACHED, CACHED_BF16, TORCH_CACHED, TORCH_CACHED_BF16, TORCH, TORCH_BF16, WAYS };

static const lm_kind ways[WAYS] = {
    {"seqtx f32, cached", 1e-3, F32, 0, BY_SEQTX, {NULL}},
    {"seqtx bf16, cached", 2e-2, BF16, 0, BY_SEQTX, {NULL}},
    {"PyTorch eager f32, cached", 1e-3, F32, 0, BY_PEER, {"--cached", NULL}},
    {"PyTorch eager bf16, cached", 2e-2, BF16, 0, BY_PEER, {"--cached", NULL}},
    {"PyTorch eager f32, with memory", 1e-3, F32, 0, BY_PEER, {NULL}},
    {"PyTorch eager bf16, with memory", 2e-2, BF16, 0, BY_PEER, {NULL}}};

static lm_found found[CONFIGS];
static double rate_found[CONFIGS][WAYS];

static int wanted(const config *g) {
    return listed(opt.config, g->name);
}

/* Returns the relative frequency of the word of rank r: Zipf's law, but steeper beyond
   rank 20,000, so that clusters have about the same shares as in WikiText-103. */
static double often(int r) {
    return 1 / (((double)r + 2.7) * (1 + pow((double)r / 20000, 0.7)));
}

/* Returns the text's bytes as ids, which are numbered by first occurrence. */
static int32_t *byte_tokens(size_t *n) {
    unsigned char *text = read_bytes(opt.data, n);
    int32_t *ids = (int32_t *)malloc((*n + 1) * sizeof *ids);
    int v, number_of[256], known = 0;
    size_t i;
    if (!ids) die("out of memory");
    for (v = 0; v < 256; v++) number_of[v] = -1;
    for (i = 0; i < *n; i++) {
        if (number_of[text[i]] < 0) number_of[text[i]] = known++ % model.V;
        ids[i] = number_of[text[i]];
    }
    free(text);
    return ids;
}

/* Returns the first index at which an increasing array is not less than x. */
static int search_sorted(const double *sum, int n, double x) {
    int low = 0, high = n - 1;
    while (low < high) {
        int middle = low + (high - low) / 2;
        if (sum[middle] < x)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* Returns n independently drawn words. If model.reference is 1, id 0 is padding, as in
   the reference code, and does not occur. */
static int32_t *word_tokens(size_t n) {
    int32_t *ids = (int32_t *)malloc(n * sizeof *ids);
    double *sum = (double *)malloc((size_t)model.V * sizeof *sum), total = 0;
    int v, words = model.V - model.reference;
    size_t i;
    if (!ids || !sum) die("out of memory");
    for (v = 0; v < words; v++) sum[v] = total += often(v);
    for (i = 0; i < n; i++) {
        uint32_t r[4];
        stx_philox(20190109, 1, i, r);
        ids[i] = search_sorted(sum, words, ((double)r[0] + 0.5) / 4294967296.0 * total);
        ids[i] += model.reference;
    }
    free(sum);
    return ids;
}

/* Writes each cluster's share of the tokens to `to`, as text. */
static void describe_clusters(const int32_t *ids, size_t n, char *to, size_t size) {
    size_t i, cluster, count[STX_MAX_CLUSTERS] = {0};
    const char *p;
    for (i = 0; i < n; i++) {
        cluster = 0;
        for (p = model.cutoffs; *p && ids[i] >= (int32_t)strtol(p, NULL, 10); p = after(p))
            cluster++;
        count[cluster]++;
    }
    for (cluster = 0, p = model.cutoffs;; cluster++, p = after(p)) {
        size_t used = strlen(to);
        snprintf(to + used, size - used, "%s%.1f %%",
                 cluster ? ", " : "; shares of the clusters ",
                 100 * (double)count[cluster] / (double)n);
        if (!*p) break;
    }
}

/* Writes the model's tokens to `path`: the text's bytes or, if the vocabulary has more
   than 256 words, random words. For random words, `said` receives a description of their
   clusters. */
static void write_tokens(const char *path, char *said, size_t size) {
    FILE *f = fopen(path, "wb");
    size_t n = WORDS_MADE;
    int32_t *ids = model.V <= 256 ? byte_tokens(&n) : word_tokens(n);
    int ok;
    said[0] = 0;
    if (model.V > 256) describe_clusters(ids, n, said, size);
    ok = f && fwrite(ids, sizeof *ids, n, f) == n;
    if (!f || fclose(f) || !ok) die("cannot write the file of tokens");
    free(ids);
}

static char pattern[128], data_path[512], params_path[512], shares[128];

/* Initialises the weights so that scores are about 1. Also sets u and v to nonzero
   values; an error in the positions then changes the first loss. */
static void set_attention(stx_par_block *b, size_t l) {
    stx_tensor *t[3];
    size_t i;
    int k;
    if (!b->wq) return;
    t[0] = b->wq;
    t[1] = b->wkv;
    t[2] = b->wr;
    for (k = 0; k < 3; k++) {
        fill_random(t[k]->data, t[k]->size, 3 * l + (size_t)k);
        for (i = 0; i < t[k]->size; i++) t[k]->data[i] *= (stx_real)sqrt(3 / (double)model.D);
    }
    fill_random(b->u->data, b->u->size, 1000 + 2 * l);
    fill_random(b->v->data, b->v->size, 1001 + 2 * l);
}

/* Sets up the model that the workers' options describe, and writes its tokens and
   initial parameters to files. Returns the number of parameters in millions. */
static double configure(const config *g, int generates) {
    stx_ctx *x = context(F32, opt.threads);
    stx_par *m;
    size_t l, layers = (size_t)(opt.quick ? 2 : g->layers);
    double n;
    if (g->search)
        snprintf(pattern, sizeof pattern, "%s", generates ? g->found : "gggggg");
    else
        for (l = 0; l < layers; l++) memcpy(pattern + 2 * l, "sf", 3);
    model.pattern = pattern;
    model.reference = g->search > 0;
    model.D = g->D;
    model.H = g->H;
    model.F = g->F;
    job.T = g->T;
    model.M = g->M;
    model.V = opt.quick && g->V > 256 ? g->V / 10 : g->V;
    model.cutoffs = opt.quick ? g->quick : g->cutoffs;
    snprintf(data_path, sizeof data_path, "%s/tokens.par.%s", opt.work, g->name);
    snprintf(params_path, sizeof params_path, "%s/params.par.%s.safetensors", opt.work, g->name);
    write_tokens(data_path, shares, sizeof shares);
    m = model_create(x);
    for (l = 0; l < m->desc.blocks; l++) set_attention(&m->block[l], l);
    params_save(x, stx_par_params(m), params_path);
    n = (double)stx_params_size(stx_par_params(m)) * 1e-6;
    stx_destroy(x);
    return n;
}

static const char *words_of_model(void) {
    if (!*model.cutoffs) return "tied words";
    return model.reference ? "adaptive softmax, cutoffs " : "adaptive words, tied, cutoffs ";
}

static void say_shape(const config *g, int B, double params) {
    char now[128];
    if (!stx_par_format(now, sizeof now, pattern)) now[0] = 0;
    if (pattern[0] == 'g') snprintf(now, sizeof now, "a search of %zu blocks", strlen(pattern));
    say("%s: %s, V %d, D %d, H %d, F %d, T %d, M %d, B %d, ", g->name, now, model.V, g->D, g->H,
        g->F, g->T, g->M, B);
    say("%s%s%s, %.1f million parameters%s;", model.reference ? "the reference's form, " : "",
        words_of_model(), model.cutoffs, params, shares);
}

static void shape_arguments(arguments *a, const config *g) {
    a->n = 0;
    arg_text(a, "--pattern", pattern);
    arg_number(a, "--hid-sz", (size_t)g->D);
    arg_number(a, "--nheads", (size_t)g->H);
    arg_number(a, "--inner-hid-sz", (size_t)g->F);
    arg_number(a, "--block-sz", (size_t)g->T);
    arg_number(a, "--mem", (size_t)g->M);
    arg_number(a, "--vocab", (size_t)model.V);
    arg_text(a, "--token-bytes", "4");
    arg_text(a, "--load", params_path);
    if (*model.cutoffs) arg_text(a, "--cutoffs", model.cutoffs);
    if (model.reference) arg(a, "--reference");
}


// >>training

static void training_config(int at) {
    static contender c[CONTENDERS];
    const config *g = &configs[at];
    int r, warmup = lm_warmup(3), B = opt.batch ? opt.batch : g->B, steps = lm_steps(g->steps);
    char label[80];
    arguments shared;
    double millions = configure(g, 0);
    snprintf(label, sizeof label, "training, %s", g->name);
    shape_arguments(&shared, g);
    lm_training_arguments(&shared, B, steps, warmup);
    arg_text(&shared, "--weight-decay", "0");
    arg_text(&shared, "--lr", "0.00025");
    arg_text(&shared, "--clip", g->clip);
    lm_start(c, lm_kinds, CONTENDERS, PEER, NULL, label, data_path, &shared);
    r = lm_rounds(c, CONTENDERS, 7, 90, label);
    say_shape(g, B, millions);
    lm_training_say(c, r, steps, warmup);
    lm_step_times(c, (double)B * g->T);
    lm_keep(&found[at], c);
    unlink(params_path);
    unlink(data_path);
}

static void bench_training(void) {
    int i;
    say("## Training\n\n"
        "A step is one segment of every stream: forward, backward, gradient clipping (not in the "
        "search) and Adam, also\nof the gates; no dropout; %d threads. The tokens, initial "
        "parameters and steps are the same for all, in a\nsearch also the noise, at temperature "
        "1; memories are full when time is taken. Tokens are bytes of the text\nor, with a "
        "vocabulary of words, drawn by Zipf's law. The mean nll must agree with the first "
        "PyTorch row to %g\n(f32) and %g (bf16), or the row is void.\n\n",
        opt.threads, lm_kinds[OWN].tolerance, lm_kinds[OWN_BF16].tolerance);
    for (i = 0; i < CONFIGS; i++)
        if (wanted(&configs[i])) training_config(i);
}


// >>generation

static void generation_config(int at) {
    static contender c[WAYS];
    const config *g = &configs[at];
    int i, r, places = opt.quick ? g->places / 4 : g->places;
    char label[80];
    arguments shared;
    double millions = configure(g, 1);
    snprintf(label, sizeof label, "generation, %s", g->name);
    shape_arguments(&shared, g);
    arg_number(&shared, "--threads", (size_t)opt.threads);
    arg_number(&shared, "--generate", (size_t)places);
    lm_start(c, ways, WAYS, -1, NULL, label, data_path, &shared);
    r = lm_rounds(c, WAYS, 5, 40, label);
    say_shape(g, 1, millions);
    say(" median of %d rounds of %d tokens:\n\n", r, places);
    contest_say(c, WAYS, TORCH_CACHED);
    for (i = 0; i < WAYS; i++)
        if (c[i].fits) rate_found[at][i] = median(&c[i].rate);
    unlink(params_path);
    unlink(data_path);
}

static void bench_generation(void) {
    int i;
    say("## Generation\n\n"
        "One stream after two segments, token by token, with log p of all words for each; %d "
        "threads. \"cached\":\nprojected keys, values and positions are kept, here by "
        "stx_par_gen_feed; they are computed before the first\ntoken, which is not timed. "
        "\"with memory\": the published method, a call of the model for each token, which\n"
        "projects its memory again. Instead of the search a network of its blocks generates. "
        "PyTorch's bf16 has\nmatrices in bf16. The text is given, so that losses can be "
        "compared: \"step 1\" is the nll of the first timed\ntoken, \"last step\" the mean. "
        "Ratios are to PyTorch's cached f32.\n\n",
        opt.threads);
    for (i = 0; i < CONFIGS; i++)
        if (wanted(&configs[i])) generation_config(i);
}


// >>summary

static void bench_summary(void) {
    enum { MORE = 6 };

    static const int digits[MORE] = {0, 2, 1, 0, 2, 1};
    int i;
    say("## Summary\n\nRatios within this run, to PyTorch with the same model; \"-\": not "
        "measured, or void.\n\n");
    header("model|" LM_SUMMARY_HEADER
           "|generation tokens/s f32|to PyTorch cached|to PyTorch with memory|bf16|"
           "to PyTorch cached bf16|to PyTorch with memory bf16");
    for (i = 0; i < CONFIGS; i++) {
        const double *w = rate_found[i];
        double value[MORE];
        if (!measured(found[i].rate[OWN]) && !measured(w[CACHED])) continue;
        value[0] = w[CACHED];
        value[1] = w[CACHED] / w[TORCH_CACHED];
        value[2] = w[CACHED] / w[TORCH];
        value[3] = w[CACHED_BF16];
        value[4] = w[CACHED_BF16] / w[TORCH_CACHED_BF16];
        value[5] = w[CACHED_BF16] / w[TORCH_BF16];
        row_begin();
        cell(0, "%s", configs[i].name);
        lm_summary(1, &found[i]);
        cell_values(1 + LM_SUMMARY, value, digits, MORE);
    }
    if (table.rows > 1) print_table();
}


// >>loop: only this library, in this process

static int loop_generation(int R, samples *times, double *last) {
    generation run;
    reply round;
    int r;
    memset(&round, 0, sizeof round);
    if (!generation_begin(&run)) return 0;
    for (r = 0; r < R; r++) {
        generation_round(&run, &round);
        sample(times, round.seconds / model.generate);
        *last = round.last;
    }
    generation_end(&run);
    return 1;
}

static int loop_training(int steps, samples *times, double *last) {
    trainee t;
    int k;
    stx_ctx *x = worker_context(job.precision, job.threads);
    if (!x) return 0;
    trainee_create(&t, x);
    for (k = lm_warmup(1); k > 0; k--) trainee_step(&t);
    for (k = 0; k < steps; k++) {
        double at = seconds();
        *last = trainee_step(&t);
        sample(times, seconds() - at);
        check(x);
    }
    trainee_free(&t);
    return 1;
}

/* Implements --loop CONFIG PRECISION: runs --rounds rounds of training steps or, with
   --only par-generation, of token generation, with the benchmark's parameters and
   tokens. */
static int loop(const config *g, int precision) {
    int ok, generates = !strcmp(opt.only, "par-generation");
    samples times;
    double last = NAN;
    times.n = 0;
    configure(g, generates);
    job.precision = precision;
    job.threads = opt.threads;
    job.data = data_path;
    job.load = params_path;
    job.token_bytes = 4;
    job.B = opt.batch ? opt.batch : g->B;
    job.decay = 0;
    job.lr = 0.00025;
    job.clip = strtod(g->clip, NULL);
    model.generate = opt.steps ? opt.steps : g->places;
    ok = generates ? loop_generation(rounds(5), &times, &last)
                   : loop_training(rounds(5) * lm_steps(g->steps), &times, &last);
    unlink(params_path);
    unlink(data_path);
    if (!ok) return 3;
    printf("%s %s %s, threads %d: %.3f ms per %s (median of %d, %.3f to %.3f), nll %.5f\n", g->name,
           precision_name[precision], generates ? "generation" : "training", opt.threads,
           1e3 * median(&times), generates ? "token" : "step", times.n, 1e3 * quantile(&times, 0),
           1e3 * quantile(&times, 1), last);
    return 0;
}


// >>main

#define CONFIG_NAMES "par-base,enwik8,wt103"

static const char usage[] =
    "bench_par [options]: times Transformer-XL and PAR's search (sh bench/run.sh --only par)\n"
    "  --only LIST        par, or some of par-training,par-generation\n"
    "  --config LIST      some of par-base,enwik8,wt103 (default: all)\n"
    "  --quick            two layers, a tenth of the words, fewer rounds, steps and tokens\n"
    "  --rounds N         samples of each value (default 7 of training, 5 of generation)\n"
    "  --warmup N         steps before the first round (default 3; at least 2 for compilation)\n"
    "  --worker OPTIONS   one contender: options of bench/peers/par_torch.py, --save FILE\n"
    "  --loop CONFIG f32|bf16 [options]    only this library, for a profiler: training, or with "
    "--only par-generation tokens\n" LM_USAGE;

/* Handles a command line that begins with --loop CONFIG PRECISION. Other options may
   follow. */
static int loop_main(int argc, char **argv) {
    int ended, config_number = argc > 2 ? position(CONFIG_NAMES, argv[2]) : -1,
               precision = argc > 3 ? position("f32,bf16", argv[3]) : -1;
    if (config_number < 0 || precision < 0) {
        fprintf(stderr, "bench_par: --loop: expected one of " CONFIG_NAMES ", then f32 or bf16\n");
        return 2;
    }
    argv[3] = argv[0];
    ended = lm_parse(argc - 3, argv + 3, usage, CONFIG_NAMES);
    return ended ? ended - 1 : loop(&configs[config_number], precision);
}

int main(int argc, char **argv) {
    int i, ended;
    program = "bench_par";
    family.options = model_options;
    family.create = create;
    opt.only = "par";
    if (argc > 1 && !strcmp(argv[1], "--worker")) {
        ended = worker_parse(argc, argv);
        if (ended) return ended;
        return model.generate ? generate_worker() : worker();
    }
    if (argc > 1 && !strcmp(argv[1], "--loop")) return loop_main(argc, argv);
    ended = lm_parse(argc, argv, usage, CONFIG_NAMES);
    if (ended) return ended - 1;
    for (i = 0; i < CONFIGS; i++) {
        lm_found_nothing(&found[i]);
        not_measured(rate_found[i], WAYS);
    }
    if (section("par", "par-training")) bench_training();
    if (section("par", "par-generation")) bench_generation();
    bench_summary();
    probe_end();
    return 0;
}
