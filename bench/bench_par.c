/* bench_par.c - times Transformer-XL and the search of PAR on a CPU: training and
   generation, beside PyTorch.

       sh bench/run.sh --only par       builds this file and runs it (bench/README.md)
       build/bench/bench_par --loop par-base bf16 --threads 1       this library alone, in this process: for a profiler

   Contenders take turns within one run, so that a busy machine is busy for all of
   them; numbers are medians of rounds, with minimum and maximum beside them. All are
   processes of their own that answer a line on stdin with one round: this program again
   more with --worker, and PyTorch. Both take the options of bench/peers/par_torch.py,
   read the same tokens and start from the same parameter file, and a row whose losses
   are not the peer's is void. */
#define _POSIX_C_SOURCE 200809L
#define SEQTX_IMPLEMENTATION
#include "../seqtx_par.h"
#include "lm.h"


// >>worker: the options of bench/peers/par_torch.py

static struct {
    int D, H, F, M, V, generate, reference, prompt;
    const char *pattern, *cutoffs;
} model = {256, 4, 1024, 128, 256, 0, 0, 2, "sfsfsfsf", ""};

static const lm_option model_options[] = {{"--pattern", NULL, 0, NULL, &model.pattern},
                                          {"--hid-sz", &model.D, 1, NULL, NULL},
                                          {"--nheads", &model.H, 1, NULL, NULL},
                                          {"--inner-hid-sz", &model.F, 1, NULL, NULL},
                                          {"--mem", &model.M, 0, NULL, NULL},
                                          {"--vocab", &model.V, 1, NULL, NULL},
                                          {"--cutoffs", NULL, 0, NULL, &model.cutoffs},
                                          {"--reference", &model.reference, -1, NULL, NULL},
                                          {"--token-bytes", &job.token_bytes, 1, NULL, NULL},
                                          {"--generate", &model.generate, 1, NULL, NULL},
                                          {"--prompt", &model.prompt, 1, NULL, NULL},
                                          {NULL, NULL, 0, NULL, NULL}};

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
    for (p = model.cutoffs; *p && d.cutoffs < STX_MAX_CLUSTERS - 1;
         p += strcspn(p, ","), p += *p == ',')
        d.cutoff[d.cutoffs++] = (size_t)strtoul(p, NULL, 10);
    if (!model.reference) {
        d.words_out = d.cutoffs ? STX_PAR_OUT_ADAPTIVE : STX_PAR_OUT_TIED;
        d.adaptive_in = d.tie_words = d.cutoffs > 0;
    }
    m = stx_par_create(x, &d);
    check(x);
    return m;
}

/* A search in training: noise of known numbers, and an optimiser for the gates */
static struct {
    stx_lm lm;
    stx_par *m;
    stx_optim *gates;
    stx_real *u;
    uint64_t step;
} search;

/* Step n, block l of L, branch k: ((37 (3 (L n + l) + k) + 11) mod 101 + 1/2) / 102,
   as the peer */
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
    if (!search.m->arch) return lm;
    memset(&od, 0, sizeof od);
    od.kind = STX_ADAMW;
    od.weight_decay = job.decay;
    search.gates = stx_optim_create(search.m->arch, &od);
    search.u = (stx_real *)stx_persist(x, 3 * search.m->desc.blocks * sizeof *search.u);
    check(x);
    lm.loss = search_loss;
    lm.updated = search_updated;
    return lm;
}

/* Of logits, or of log p */
static double nll_of(const stx_real *logits, int32_t token) {
    double top = (double)logits[0], sum = 0;
    int v;
    for (v = 1; v < model.V; v++)
        if ((double)logits[v] > top) top = (double)logits[v];
    for (v = 0; v < model.V; v++) sum += exp((double)logits[v] - top);
    return log(sum) + top - (double)logits[token];
}

typedef struct {
    stx_ctx *x;
    stx_par *m;
    stx_par_state *state;
    stx_par_gen *gen;
    int32_t *ids;
    size_t count;
} generation;

/* A model that has read --prompt segments of the text; ids: the next `count` tokens.
   0: this build has not the precision */
static int generation_begin(generation *g) {
    size_t n, k, T = (size_t)job.T, N = (size_t)model.prompt * T;
    unsigned char *text;
    memset(g, 0, sizeof *g);
    g->x = context(job.precision, job.threads);
    if (!g->x) {
        fprintf(stderr, "cannot: %s is not in this build of the library\n",
                precision_name[job.precision]);
        return 0;
    }
    g->m = model_create(g->x);
    if (job.load) {
        stx_file *f = stx_file_open(g->x, job.load);
        stx_params_load(stx_par_params(g->m), f, "");
        stx_file_close(f);
        check(g->x);
    }
    text = read_bytes(job.data, &n);
    g->count = (size_t)model.generate + 2;
    if (n / (size_t)job.token_bytes < N + g->count) die("too few tokens for this prompt");
    g->ids = (int32_t *)malloc((N + g->count) * sizeof *g->ids);
    if (!g->ids) die("no memory");
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

/* One round: from the same memory, token by token. The first token, before which keys,
   values and positions are made, is not timed. */
static double generation_round(generation *g, double *first, double *mean) {
    double took = 0, sum = 0;
    size_t k, N = (size_t)model.generate;
    if (!stx_par_gen_set(g->gen, g->state)) check(g->x);
    for (k = 0; k <= N; k++) {
        double at = seconds(), z;
        const stx_real *logits = stx_par_gen_feed(g->gen, g->ids + k, 1);
        at = seconds() - at;
        check(g->x);
        if (!k) continue;
        took += at;
        z = nll_of(logits, g->ids[k + 1]);
        if (k == 1) *first = z;
        sum += z;
    }
    *mean = sum / (double)N;
    return took;
}

static int generate_worker(void) {
    generation g;
    char line[64];
    unsigned long long done = 0;
    if (!generation_begin(&g)) return 3;
    fprintf(stderr, "ready\n");
    while (fgets(line, sizeof line, stdin)) {
        double first = NAN, mean = NAN, took = generation_round(&g, &first, &mean);
        done += (unsigned long long)model.generate;
        printf(
            "{\"tokens_per_s\": %.6g, \"loss_first\": %.9g, \"loss_last\": %.9g, \"loss_step1\": "
            "%.9g, \"steps_done\": %llu, "
            "\"seconds\": %.6g, \"peak_bytes\": %zu}\n",
            (double)model.generate / took, first, mean, first, done, took, stx_peak_bytes(g.x));
        fflush(stdout);
    }
    generation_end(&g);
    return 0;
}


// >>configurations

enum { CONFIGS = 3, WORDS_MADE = 400000 };

/* search: of how many blocks, 0: Transformer-XL of `layers`; found: what generation
   runs in place of the search */
typedef struct {
    const char *name;
    int search, layers, D, H, F, T, M, B, V;
    const char *cutoffs, *quick, *clip, *found; /* quick: cutoffs of a tenth of the words */
    int steps, places;
} config;

/* base_model.sh of PAR's reference; Transformer-XL's enwik8 and WikiText-103 standard */
static const config configs[CONFIGS] = {
    {"par-base", 6, 0, 128, 4, 512, 32, 16, 32, 12000, "250,2500", "250,600", "0", "sffsff", 8, 64},
    {"enwik8", 0, 12, 512, 8, 2048, 512, 512, 1, 205, "", "", "0.25", NULL, 1, 32},
    {"wt103", 0, 16, 410, 10, 2100, 150, 150, 4, 267735, "20000,40000,200000", "2000,4000,20000",
     "0.25", NULL, 1, 32}};

enum { OWN, OWN_BF16, PEER, PEER_BF16, PEER_COMPILED, PEER_COMPILED_BF16, PEER_PLAIN, CONTENDERS };

static const lm_kind kinds[CONTENDERS] = {
    {"seqtx f32", 1e-3, F32, 0, LM_OWN, {NULL}},
    {"seqtx bf16", 2e-2, BF16, 0, LM_OWN, {NULL}},
    {"PyTorch eager f32", 1e-3, F32, 0, LM_PEER, {NULL}},
    {"PyTorch eager bf16 autocast", 2e-2, BF16, 0, LM_PEER, {NULL}},
    {"PyTorch compiled f32", 1e-3, F32, 1, LM_PEER, {NULL}},
    {"PyTorch compiled bf16 autocast", 2e-2, BF16, 1, LM_PEER, {NULL}},
    {"PyTorch eager f32, as installed", 1e-3, F32, 0, LM_PLAIN, {NULL}}};

enum { CACHED, CACHED_BF16, TORCH_CACHED, TORCH_CACHED_BF16, TORCH, TORCH_BF16, WAYS };

static const lm_kind ways[WAYS] = {
    {"seqtx f32, cached", 1e-3, F32, 0, LM_OWN, {NULL}},
    {"seqtx bf16, cached", 2e-2, BF16, 0, LM_OWN, {NULL}},
    {"PyTorch eager f32, cached", 1e-3, F32, 0, LM_PEER, {"--cached", NULL}},
    {"PyTorch eager bf16, cached", 2e-2, BF16, 0, LM_PEER, {"--cached", NULL}},
    {"PyTorch eager f32, with memory", 1e-3, F32, 0, LM_PEER, {NULL}},
    {"PyTorch eager bf16, with memory", 2e-2, BF16, 0, LM_PEER, {NULL}}};

/* NaN: not measured */
static struct {
    double rate[CONFIGS][CONTENDERS], memory[CONFIGS][CONTENDERS], way[CONFIGS][WAYS];
} found;

static void found_nothing(void) {
    double *v = (double *)(void *)&found;
    size_t i;
    for (i = 0; i < sizeof found / sizeof *v; i++) v[i] = NAN;
}

static int wanted(const config *g) {
    return !opt.config || listed(opt.config, g->name);
}

static const char *after(const char *list) { /* what follows the first element */
    list += strcspn(list, ",");
    return list + (*list == ',');
}

/* How often the word of rank r is met: Zipf's law, steeper beyond 20,000, so that
   clusters have about the shares of WikiText-103 */
static double often(int r) {
    return 1 / (((double)r + 2.7) * (1 + pow((double)r / 20000, 0.7)));
}

/* Writes tokens for the model to `path`: the text's bytes, numbered in the order in
   which they first appear; where there are more words than bytes have values, words
   drawn by themselves (0 is the reference's padding), and to `said` which share each
   cluster has. */
static void write_tokens(const char *path, char *said, size_t room) {
    FILE *f = fopen(path, "wb");
    double *sum = (double *)malloc((size_t)model.V * sizeof *sum), total = 0;
    size_t n = 0, i, count[STX_MAX_CLUSTERS] = {0};
    int32_t *ids = NULL;
    int v, ok;
    said[0] = 0;
    if (!f || !sum) die("no file, or no memory, for tokens");
    if (model.V <= 256) {
        unsigned char *text = read_bytes(opt.data, &n);
        int number_of[256], known = 0;
        for (v = 0; v < 256; v++) number_of[v] = -1;
        ids = (int32_t *)malloc((n + 1) * sizeof *ids);
        if (!ids) die("no memory");
        for (i = 0; i < n; i++) {
            if (number_of[text[i]] < 0) number_of[text[i]] = known++ % model.V;
            ids[i] = number_of[text[i]];
        }
        free(text);
    } else {
        const char *p;
        size_t cluster, pads = (size_t)model.reference;
        n = WORDS_MADE;
        ids = (int32_t *)malloc(n * sizeof *ids);
        if (!ids) die("no memory");
        for (v = 0; v < model.V - (int)pads; v++) sum[v] = total += often(v);
        for (i = 0; i < n; i++) {
            uint32_t r[4];
            double at;
            int low = 0, high = model.V - (int)pads - 1;
            stx_philox(20190109, 1, i, r);
            at = ((double)r[0] + 0.5) / 4294967296.0 * total;
            while (low < high) {
                v = low + (high - low) / 2;
                if (sum[v] < at)
                    low = v + 1;
                else
                    high = v;
            }
            ids[i] = low + (int32_t)pads;
            for (cluster = 0, p = model.cutoffs; *p && ids[i] >= (int32_t)strtol(p, NULL, 10);
                 p = after(p))
                cluster++;
            count[cluster]++;
        }
        for (cluster = 0, p = model.cutoffs;; cluster++, p = after(p)) {
            size_t used = strlen(said);
            double share = 100 * (double)count[cluster] / (double)n;
            snprintf(said + used, room - used, "%s%.1f %%",
                     cluster ? ", " : "; of the tokens the clusters have ", share);
            if (!*p) break;
        }
    }
    ok = fwrite(ids, sizeof *ids, n, f) == n;
    ok = fclose(f) == 0 && ok;
    if (!ok) die("the tokens cannot be written");
    free(ids);
    free(sum);
}

static char pattern[128], data_path[512], params_path[512], shares[128];

/* Sets up the model that the workers' options describe; writes its tokens and its
   first parameters to files; their number, in millions. Projections of queries, keys
   and positions give scores of about 1, u and v are not 0: so a wrong position shows
   in the first loss. */
static double configure(const config *g, int generate) {
    stx_ctx *x = context(F32, opt.threads);
    stx_par *m;
    size_t l, i, layers = (size_t)(opt.quick ? 2 : g->layers);
    double n;
    if (g->search)
        snprintf(pattern, sizeof pattern, "%s", generate ? g->found : "gggggg");
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
    for (l = 0; l < m->desc.blocks; l++) {
        stx_par_block *b = &m->block[l];
        stx_tensor *t[3];
        int k;
        if (!b->wq) continue;
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
    params_save(x, stx_par_params(m), params_path);
    n = (double)stx_params_size(stx_par_params(m)) * 1e-6;
    stx_destroy(x);
    return n;
}

static void say_shape(const config *g, int B, double params) {
    char now[128];
    if (!stx_par_format(now, sizeof now, pattern)) now[0] = 0;
    if (pattern[0] == 'g') snprintf(now, sizeof now, "a search of %zu blocks", strlen(pattern));
    say("%s: %s, V %d, D %d, H %d, F %d, T %d, M %d, B %d, ", g->name, now, model.V, g->D, g->H,
        g->F, g->T, g->M, B);
    say("%s%s%s, %.1f million parameters%s;", model.reference ? "the reference's form, " : "",
        *model.cutoffs
            ? model.reference ? "adaptive softmax, cutoffs " : "adaptive words, tied, cutoffs "
            : "tied words",
        model.cutoffs, params, shares);
}

enum { SHAPE = 24 }; /* options of the shape; returns how many */

static int shape_options(char **to, const config *g) {
    int n = 0;
    to[n++] = (char *)(uintptr_t) "--pattern";
    to[n++] = pattern;
    to[n++] = (char *)(uintptr_t) "--hid-sz";
    to[n++] = number(g->D);
    to[n++] = (char *)(uintptr_t) "--nheads";
    to[n++] = number(g->H);
    to[n++] = (char *)(uintptr_t) "--inner-hid-sz";
    to[n++] = number(g->F);
    to[n++] = (char *)(uintptr_t) "--block-sz";
    to[n++] = number(g->T);
    to[n++] = (char *)(uintptr_t) "--mem";
    to[n++] = number(g->M);
    to[n++] = (char *)(uintptr_t) "--vocab";
    to[n++] = number(model.V);
    to[n++] = (char *)(uintptr_t) "--token-bytes";
    to[n++] = (char *)(uintptr_t) "4";
    to[n++] = (char *)(uintptr_t) "--threads";
    to[n++] = number(opt.threads);
    to[n++] = (char *)(uintptr_t) "--load";
    to[n++] = params_path;
    if (*model.cutoffs) {
        to[n++] = (char *)(uintptr_t) "--cutoffs";
        to[n++] = (char *)(uintptr_t)model.cutoffs;
    }
    if (model.reference) to[n++] = (char *)(uintptr_t) "--reference";
    return n;
}

static int steps_of(const config *g) {
    return opt.steps ? opt.steps : opt.quick ? 1 + g->steps / 4 : g->steps;
}


// >>training

static void training_config(int at) {
    static contender c[CONTENDERS];
    const config *g = &configs[at];
    int i, r, skip[CONTENDERS] = {0}, warmup = opt.warmup >= 0 ? opt.warmup : 3,
              B = opt.batch ? opt.batch : g->B, steps = steps_of(g);
    char label[80];
    char *shared[SHAPE + 16];
    const char *data = opt.data;
    double millions = configure(g, 0);
    int n = shape_options(shared, g);
    memset(c, 0, sizeof c);
    shared[n++] = (char *)(uintptr_t) "--batch-sz";
    shared[n++] = number(B);
    shared[n++] = (char *)(uintptr_t) "--steps";
    shared[n++] = number(steps);
    shared[n++] = (char *)(uintptr_t) "--warmup";
    shared[n++] = number(warmup);
    shared[n++] = (char *)(uintptr_t) "--optim";
    shared[n++] = (char *)(uintptr_t) "adamw";
    shared[n++] = (char *)(uintptr_t) "--weight-decay";
    shared[n++] = (char *)(uintptr_t) "0";
    shared[n++] = (char *)(uintptr_t) "--lr";
    shared[n++] = (char *)(uintptr_t) "0.00025";
    shared[n++] = (char *)(uintptr_t) "--clip";
    shared[n++] = (char *)(uintptr_t)g->clip;
    shared[n] = NULL;
    snprintf(label, sizeof label, "training, %s", g->name);
    opt.data = data_path;
    lm_start(c, kinds, CONTENDERS, PEER, skip, label, shared);
    opt.data = data;
    probe_begin(opt.threads);
    r = contest(c, CONTENDERS, rounds(7), opt.rounds ? 1e9 : 90, label);
    say_shape(g, B, millions);
    say(" median of %d rounds of %d step%s after %d discarded steps:\n\n", r, steps,
        steps == 1 ? "" : "s", warmup + steps);
    contest_say(c, CONTENDERS, PEER);
    header("contender|ms a step|range");
    for (i = 0; i < CONTENDERS; i++) {
        double tokens = 1e3 * B * g->T;
        if (!c[i].fits) continue;
        found.rate[at][i] = median(&c[i].rate);
        found.memory[at][i] = c[i].memory;
        row_begin();
        cell(0, "%s", c[i].name);
        cell(1, "%.1f", tokens / median(&c[i].rate));
        cell(2, "%.1f - %.1f", tokens / quantile(&c[i].rate, 1), tokens / quantile(&c[i].rate, 0));
    }
    print_table();
    unlink(params_path);
    unlink(data_path);
}

static void bench_training(void) {
    int i;
    say("## Training\n\nA step is one segment of every stream: forward, backward, clip of the "
        "gradient's norm (not in the search), and "
        "Adam, of the gates, too; no dropout; %d threads.\n"
        "The same tokens, first parameters and steps for all, in a search the same "
        "noise, at temperature 1; memories are full when time is taken. Tokens are the text's "
        "bytes,\nor, with a vocabulary of words, "
        "words drawn by Zipf's law. The mean nll must agree with the first PyTorch row to %g "
        "(f32) and %g (bf16), or the row is void.\n\n",
        opt.threads, kinds[OWN].tolerance, kinds[OWN_BF16].tolerance);
    for (i = 0; i < CONFIGS; i++)
        if (wanted(&configs[i])) training_config(i);
}


// >>generation

static void generation_config(int at) {
    static contender c[WAYS];
    const config *g = &configs[at];
    int i, r, n, skip[WAYS] = {0}, places = opt.quick ? g->places / 4 : g->places;
    char label[80];
    char *shared[SHAPE + 4];
    const char *data = opt.data;
    double millions = configure(g, 1);
    memset(c, 0, sizeof c);
    n = shape_options(shared, g);
    shared[n++] = (char *)(uintptr_t) "--generate";
    shared[n++] = number(places);
    shared[n] = NULL;
    snprintf(label, sizeof label, "generation, %s", g->name);
    opt.data = data_path;
    lm_start(c, ways, WAYS, -1, skip, label, shared);
    opt.data = data;
    probe_begin(opt.threads);
    r = contest(c, WAYS, rounds(5), opt.rounds ? 1e9 : 40, label);
    say_shape(g, 1, millions);
    say(" median of %d rounds of %d tokens:\n\n", r, places);
    contest_say(c, WAYS, TORCH_CACHED);
    for (i = 0; i < WAYS; i++)
        if (c[i].fits) found.way[at][i] = median(&c[i].rate);
    unlink(params_path);
    unlink(data_path);
}

static void bench_generation(void) {
    int i;
    say("## Generation\n\nOne stream after two segments, token by token, log p of all words for "
        "each; %d threads. Cached: projected "
        "keys, values and positions are kept, here by stx_par_gen_feed; they are made before the "
        "first token,\nwhich is not timed. With "
        "memory: the published way, a call of the model for each token, which projects its memory "
        "again. Of the search runs a network that "
        "could come out of it.\n"
        "PyTorch's bf16 has matrices in bf16. The text is given, so that losses can be compared: "
        "\"step 1\" is the nll of the first timed token, \"last step\" the mean. Ratios are to "
        "PyTorch's cached f32.\n\n",
        opt.threads);
    for (i = 0; i < CONFIGS; i++)
        if (wanted(&configs[i])) generation_config(i);
}


// >>summary

static void bench_summary(void) {
    int i, k;
    say("## Summary\n\nRatios within this run, to PyTorch of the same model; \"-\" is not "
        "measured, or void.\n\n");
    header(
        "model|training tokens/s f32|to eager f32|to compiled f32|to eager as installed|bf16|to "
        "eager bf16|to compiled bf16|"
        "memory MB f32|of eager|generation tokens/s f32|to PyTorch cached|to PyTorch with "
        "memory|bf16|to PyTorch cached bf16|"
        "to PyTorch with memory bf16");
    for (i = 0; i < CONFIGS; i++) {
        const double *v = found.rate[i], *m = found.memory[i], *w = found.way[i];
        const double told[15] = {v[OWN],
                                 v[OWN] / v[PEER],
                                 v[OWN] / v[PEER_COMPILED],
                                 v[OWN] / v[PEER_PLAIN],
                                 v[OWN_BF16],
                                 v[OWN_BF16] / v[PEER_BF16],
                                 v[OWN_BF16] / v[PEER_COMPILED_BF16],
                                 m[OWN] * 1e-6,
                                 m[OWN] / m[PEER],
                                 w[CACHED],
                                 w[CACHED] / w[TORCH_CACHED],
                                 w[CACHED] / w[TORCH],
                                 w[CACHED_BF16],
                                 w[CACHED_BF16] / w[TORCH_CACHED_BF16],
                                 w[CACHED_BF16] / w[TORCH_BF16]};
        static const int digits[15] = {0, 2, 2, 2, 0, 2, 2, 0, 2, 0, 2, 1, 0, 2, 1};
        for (k = 0; k < 15 && !(told[k] == told[k]); k++) continue;
        if (k == 15) continue;
        row_begin();
        cell(0, "%s", configs[i].name);
        for (k = 0; k < 15; k++) {
            if (told[k] == told[k])
                cell(1 + k, "%.*f", digits[k], told[k]);
            else
                cell(1 + k, "-");
        }
    }
    if (table.rows > 1) print_table();
}


// >>loop: this library alone, in this process

/* --loop CONFIG PRECISION: --rounds rounds of the configuration's steps, or with
   --only par-generation of its tokens, from the parameters and tokens of the benchmark */
static int loop(const config *g, int precision) {
    int k, r, generate = !strcmp(opt.only, "par-generation"), R = rounds(5);
    samples times;
    double last = NAN, first;
    times.n = 0;
    configure(g, generate);
    job.precision = precision;
    job.threads = opt.threads;
    job.data = data_path;
    job.load = params_path;
    job.token_bytes = 4;
    job.B = opt.batch ? opt.batch : g->B;
    job.decay = 0;
    job.lr = 0.00025;
    job.clip = strtod(g->clip, NULL);
    if (generate) {
        generation run;
        model.generate = opt.steps ? opt.steps : g->places;
        if (!generation_begin(&run)) return 3;
        for (r = 0; r < R; r++)
            sample(&times, generation_round(&run, &first, &last) / model.generate);
        generation_end(&run);
    } else {
        trainee t;
        stx_ctx *x = context(precision, opt.threads);
        if (!x) {
            fprintf(stderr, "bench_par: %s is not in this build of the library\n",
                    precision_name[precision]);
            return 3;
        }
        trainee_create(&t, x);
        for (k = 0; k < (opt.warmup >= 0 ? opt.warmup : 1); k++) trainee_step(&t);
        for (r = 0; r < R * steps_of(g); r++) {
            double at = seconds();
            last = trainee_step(&t);
            sample(&times, seconds() - at);
            check(x);
        }
        trainee_free(&t);
    }
    printf("%s %s %s, threads %d: %.3f ms a %s (median of %d, %.3f to %.3f), nll %.5f\n", g->name,
           precision_name[precision], generate ? "generation" : "training", opt.threads,
           1e3 * median(&times), generate ? "token" : "step", times.n, 1e3 * quantile(&times, 0),
           1e3 * quantile(&times, 1), last);
    unlink(params_path);
    unlink(data_path);
    return 0;
}


// >>main

static const char usage[] =
    "bench_par [options]: times Transformer-XL and PAR's search (sh bench/run.sh --only par "
    "builds and runs it)\n"
    "  --only LIST        par, or of par-training,par-generation\n"
    "  --config LIST      of par-base,enwik8,wt103 (default: all)\n"
    "  --without LIST     contenders to leave out: of compiled,installed,bf16,peer\n"
    "  --quick            two layers, a tenth of the words, fewer rounds, steps and tokens\n"
    "  --threads N        default: all\n"
    "  --rounds N         samples of each number (default 7 of training, 5 of generation)\n"
    "  --batch N, --steps N    streams, and steps in a round, of all models (default: each has "
    "its own)\n"
    "  --warmup N         training: steps before the first round, at least 2 for a compiled "
    "contender (default 3)\n"
    "  --data FILE        text\n"
    "  --python CMD --python-plain CMD --peer FILE    PyTorch contenders, with and without what "
    "its tuning guide asks for\n"
    "  --work DIR         for temporary files\n"
    "  --append FILE      write the tables there too\n"
    "  --worker OPTIONS   one contender: options of bench/peers/par_torch.py; --save FILE\n"
    "  --loop CONFIG f32|bf16 [options]    this library alone, for a profiler: training, or with "
    "--only par-generation tokens\n";

int main(int argc, char **argv) {
    const config *own = NULL;
    int i, precision = F32;
    family.program = "bench_par";
    family.options = model_options;
    family.create = create;
    opt.only = "par";
    if (argc > 1 && !strcmp(argv[1], "--worker")) {
        if (!worker_options(argc, argv)) return 2;
        return model.generate ? generate_worker() : worker();
    }
    if (argc > 1 && !strcmp(argv[1], "--loop")) {
        for (i = 0; argc > 2 && i < CONFIGS; i++)
            if (!strcmp(argv[2], configs[i].name)) own = &configs[i];
        if (argc > 3) precision = !strcmp(argv[3], "bf16") ? BF16 : F32;
        if (!own || argc < 4 || strcmp(argv[3], precision_name[precision])) {
            fprintf(stderr,
                    "bench_par --loop: want one of par-base, enwik8, wt103, then f32 or bf16\n");
            return 2;
        }
        argv[3] = argv[0];
        argv += 3;
        argc -= 3;
    }
    if ((i = lm_parse(argc, argv, usage)) <= 0) return i ? 2 : 0;
    if (own) return loop(own, precision);
    for (i = 0; i < CONFIGS && !wanted(&configs[i]); i++) continue;
    if (i == CONFIGS) {
        fprintf(stderr, "bench_par: --config %s: of par-base, enwik8, wt103\n", opt.config);
        return 2;
    }
    found_nothing();
    if (listed(opt.only, "par") || listed(opt.only, "par-training")) bench_training();
    if (listed(opt.only, "par") || listed(opt.only, "par-generation")) bench_generation();
    bench_summary();
    if (probe.x) stx_destroy(probe.x);
    return 0;
}
