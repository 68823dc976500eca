/* bench_comp.c - times the Compressive Transformer of seqtx on a CPU: training and
   generation, beside PyTorch.

       sh bench/run.sh --only comp      builds this file and runs it (bench/README.md)

   Contenders take turns within one run, so that a busy machine is busy for all of
   them; numbers are medians of rounds, with minimum and maximum beside them. All are
   processes of their own that answer a line on stdin with one round: this program again
   more with --worker, and PyTorch. Both take the options of
   bench/peers/compressive_torch.py, read the same data and start from the same
   parameter file, and a row whose losses are not the peer's is void. */
#define _POSIX_C_SOURCE 200809L
#define SEQTX_IMPLEMENTATION
#include "../seqtx_compressive.h"
#include "lm.h"


// >>worker: the options of bench/peers/compressive_torch.py

static struct {
    int L, D, H, M, C, r, generate, recompute, prompt;
    double aux_weight;
    const char *layers, *gate, *positions;
} model = {4, 256, 4, 128, 32, 4, 0, 0, 3, 1, "all", "residual", "learned"};

static const lm_option model_options[] = {{"--nlayers", &model.L, 1, NULL, NULL},
                                          {"--hid-sz", &model.D, 1, NULL, NULL},
                                          {"--nheads", &model.H, 1, NULL, NULL},
                                          {"--mem", &model.M, 0, NULL, NULL},
                                          {"--cmem", &model.C, 0, NULL, NULL},
                                          {"--ratio", &model.r, 1, NULL, NULL},
                                          {"--memory-layers", NULL, 0, NULL, &model.layers},
                                          {"--gate", NULL, 0, NULL, &model.gate},
                                          {"--positions", NULL, 0, NULL, &model.positions},
                                          {"--aux-weight", NULL, 0, &model.aux_weight, NULL},
                                          {"--generate", &model.generate, 1, NULL, NULL},
                                          {"--prompt", &model.prompt, 1, NULL, NULL},
                                          {"--recompute", &model.recompute, -1, NULL, NULL},
                                          {NULL, NULL, 0, NULL, NULL}};

static int chosen(const char *given, const char *a, const char *b, const char *option) {
    if (strcmp(given, a) && strcmp(given, b)) {
        fprintf(stderr, "bench_comp --worker: %s %s: of %s, %s\n", option, given, a, b);
        exit(2);
    }
    return !strcmp(given, b);
}

static stx_comp *model_create(stx_ctx *x) {
    static size_t list[64];
    stx_comp_desc d;
    stx_comp *m;
    const char *p = model.layers;
    memset(&d, 0, sizeof d);
    d.vocab = 256;
    d.layers = (size_t)model.L;
    d.dim = (size_t)model.D;
    d.heads = (size_t)model.H;
    d.segment = (size_t)job.T;
    d.mem = model.M ? (size_t)model.M : STX_COMP_NO_ROWS;
    d.cmem = model.C ? (size_t)model.C : STX_COMP_NO_ROWS;
    d.ratio = (size_t)model.r;
    d.aux_weight = model.aux_weight;
    d.gate = chosen(model.gate, "residual", "gru", "--gate") ? STX_COMP_GRU : STX_COMP_RESIDUAL;
    d.positions = chosen(model.positions, "learned", "xl", "--positions") ? STX_COMP_XL
                                                                          : STX_COMP_LEARNED;
    if (!strcmp(p, "none"))
        d.no_memory = 1;
    else if (strcmp(p, "all"))
        for (d.memory_layers = list; *p && d.memory_count < 64;
             p += strcspn(p, ","), p += *p == ',')
            list[d.memory_count++] = (size_t)strtoul(p, NULL, 10);
    m = stx_comp_create(x, &d);
    check(x);
    return m;
}

static stx_lm create(stx_ctx *x) {
    return stx_comp_as_lm(model_create(x));
}

static double nll_of(const stx_real *logits, int32_t token) {
    double top = (double)logits[0], sum = 0;
    size_t v;
    for (v = 1; v < 256; v++)
        if ((double)logits[v] > top) top = (double)logits[v];
    for (v = 0; v < 256; v++) sum += exp((double)logits[v] - top);
    return log(sum) + top - (double)logits[token];
}

/* --generate N: rounds of one stream after --prompt segments, with cached keys and
   values through a whole segment; with --recompute the segment so far for each of N
   tokens, evenly spread, as the peer. Both tell the nll of the first of these places,
   and their mean. */
static int generate_worker(void) {
    stx_ctx *x = context(job.precision, job.threads);
    size_t n, k, S = (size_t)job.T, N = (size_t)model.generate;
    unsigned char *text;
    int32_t *ids;
    stx_comp *m;
    stx_comp_state *state;
    stx_comp_gen *gen;
    char line[64];
    unsigned long long done = 0;
    if (!x) {
        fprintf(stderr, "cannot: %s is not in this build of the library\n",
                precision_name[job.precision]);
        return 3;
    }
    m = model_create(x);
    if (job.load) {
        stx_file *f = stx_file_open(x, job.load);
        stx_params_load(stx_comp_params(m), f, "");
        stx_file_close(f);
        check(x);
    }
    text = read_bytes(job.data, &n);
    if (n < ((size_t)model.prompt + 1) * S + 1) die("too few bytes for this prompt");
    n = ((size_t)model.prompt + 1) * S + 1;
    ids = (int32_t *)malloc(n * sizeof *ids);
    if (!ids) die("no memory");
    for (k = 0; k < n; k++) ids[k] = text[k];
    free(text);
    state = stx_comp_state_create(m, 1);
    for (k = 0; k < (size_t)model.prompt; k++) {
        stx_begin(x, STX_EVAL);
        stx_comp_forward(m, stx_tokens(x, ids + k * S, 1, S), NULL, state, state);
    }
    gen = stx_comp_gen_create(m, 1);
    check(x);
    n -= S + 1; /* where the timed segment begins */
    fprintf(stderr, "ready\n");
    while (fgets(line, sizeof line, stdin)) {
        double sum = 0, first = NAN, at = seconds();
        size_t place = 0;
        if (!model.recompute && !stx_comp_gen_set(gen, state)) check(x);
        for (k = 0; k < S; k++) {
            double z = 0;
            int timed = place < N && k == (2 * place + 1) * S / (2 * N);
            if (!model.recompute) {
                const stx_real *logits = stx_comp_gen_feed(gen, ids + n + k, 1);
                check(x);
                if (timed) z = nll_of(logits, ids[n + k + 1]);
            } else if (timed) {
                stx_tensor *h;
                stx_begin(x, STX_EVAL);
                h = stx_comp_forward(m, stx_tokens(x, ids + n, 1, k + 1), NULL, state, NULL);
                z = stx_item(x, stx_comp_nll(m, stx_slice(x, h, k, k + 1),
                                             stx_tokens(x, ids + n + k + 1, 1, 1), NULL));
                check(x);
            }
            if (!timed) continue;
            if (!place++) first = z;
            sum += z;
        }
        at = seconds() - at;
        done += model.recompute ? N : S;
        printf(
            "{\"tokens_per_s\": %.6g, \"loss_first\": %.9g, \"loss_last\": %.9g, \"loss_step1\": "
            "%.9g, \"steps_done\": %llu, "
            "\"seconds\": %.6g, \"peak_bytes\": %zu}\n",
            (double)(model.recompute ? N : S) / at, first, sum / (double)N, first, done, at,
            stx_peak_bytes(x));
        fflush(stdout);
    }
    free(ids);
    stx_comp_gen_free(gen);
    stx_comp_state_free(state);
    stx_destroy(x);
    return 0;
}


// >>configurations

enum { CONFIGS = 2 };

typedef struct {
    const char *name;
    int L, D, H, S, M, C, r, B, steps, places;
    const char *layers, *gate;
} config;

static const config configs[CONFIGS] = {/* the second: the reference's enwik8 example */
                                        {"small", 4, 256, 4, 128, 128, 32, 4, 8, 8, 16, "all",
                                         "residual"},
                                        {"example", 8, 512, 8, 512, 512, 128, 4, 4, 1, 8, "6,7,8",
                                         "gru"}};

enum { OWN, OWN_BF16, PEER, PEER_BF16, PEER_COMPILED, PEER_COMPILED_BF16, PEER_PLAIN, CONTENDERS };

static const lm_kind kinds[CONTENDERS] = {
    {"seqtx f32", 1e-3, F32, 0, LM_OWN, {NULL}},
    {"seqtx bf16", 2e-2, BF16, 0, LM_OWN, {NULL}},
    {"PyTorch eager f32", 1e-3, F32, 0, LM_PEER, {NULL}},
    {"PyTorch eager bf16 autocast", 2e-2, BF16, 0, LM_PEER, {NULL}},
    {"PyTorch compiled f32", 1e-3, F32, 1, LM_PEER, {NULL}},
    {"PyTorch compiled bf16 autocast", 2e-2, BF16, 1, LM_PEER, {NULL}},
    {"PyTorch eager f32, as installed", 1e-3, F32, 0, LM_PLAIN, {NULL}}};

enum { CACHED, CACHED_BF16, AGAIN, AGAIN_BF16, TORCH, TORCH_BF16, WAYS };

static const lm_kind ways[WAYS] = {
    {"seqtx f32, cached", 1e-3, F32, 0, LM_OWN, {NULL}},
    {"seqtx bf16, cached", 2e-2, BF16, 0, LM_OWN, {NULL}},
    {"seqtx f32, segment again", 1e-3, F32, 0, LM_OWN, {"--recompute", NULL}},
    {"seqtx bf16, segment again", 2e-2, BF16, 0, LM_OWN, {"--recompute", NULL}},
    {"PyTorch eager f32, segment again", 1e-3, F32, 0, LM_PEER, {NULL}},
    {"PyTorch eager bf16 autocast, segment again", 2e-2, BF16, 0, LM_PEER, {NULL}}};

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
    return opt.config ? listed(opt.config, g->name) : !opt.quick || g == configs;
}

/* Writes the initial parameters of a configuration to `path`; their number, in
   millions. Positions begin with small numbers, not with 0: so a wrong one shows in
   the first loss. */
static double configure(const config *g, const char *path) {
    stx_ctx *x = context(F32, opt.threads);
    stx_comp *m;
    size_t i;
    double n;
    model.L = g->L;
    model.D = g->D;
    model.H = g->H;
    job.T = g->S;
    model.M = g->M;
    model.C = g->C;
    model.r = g->r;
    model.layers = g->layers;
    model.gate = g->gate;
    m = model_create(x);
    fill_random(m->key_pe->data, m->key_pe->size, 11);
    for (i = 0; i < m->key_pe->size; i++) m->key_pe->data[i] *= (stx_real)0.2;
    params_save(x, stx_comp_params(m), path);
    n = (double)stx_params_size(stx_comp_params(m)) * 1e-6;
    stx_destroy(x);
    return n;
}

static void say_shape(const config *g, int B, double params) {
    say("%s: V 256, D %d, L %d, H %d, S %d, M %d, C %d, r %d, memory in layers %s, gate %s, "
        "learned positions, conv and attention loss, "
        "B %d; %.1f million parameters;",
        g->name, g->D, g->L, g->H, g->S, g->M, g->C, g->r, g->layers, g->gate, B, params);
}

#define SHAPE(g) \
  "--nlayers", number((g)->L), "--hid-sz", number((g)->D), "--nheads", number((g)->H), \
      "--block-sz", number((g)->S), "--mem", number((g)->M), "--cmem", number((g)->C), "--ratio", \
      number((g)->r), "--memory-layers", (char *)(uintptr_t)(g)->layers, "--gate", \
      (char *)(uintptr_t)(g)->gate, "--threads", number(opt.threads), "--load", params


// >>training

static void training_config(int at) {
    static contender c[CONTENDERS];
    const config *g = &configs[at];
    int i, r, skip[CONTENDERS] = {0}, warmup = opt.warmup >= 0 ? opt.warmup : 4,
              B = opt.batch ? opt.batch : g->B;
    int steps = opt.steps ? opt.steps : opt.quick ? 1 + g->steps / 4 : g->steps;
    char params[512], label[80];
    char *shared[] = {SHAPE(g),   "--batch-sz",   number(B), "--steps", number(steps),
                      "--warmup", number(warmup), "--optim", "adamw",   "--weight-decay",
                      "0",        "--clip",       "0.5",     NULL};
    double millions;
    memset(c, 0, sizeof c);
    snprintf(params, sizeof params, "%s/params.comp.%s.safetensors", opt.work, g->name);
    millions = configure(g, params);
    snprintf(label, sizeof label, "training, %s", g->name);
    lm_start(c, kinds, CONTENDERS, PEER, skip, label, shared);
    probe_begin(opt.threads);
    r = contest(c, CONTENDERS, rounds(7), opt.rounds ? 1e9 : 240, label);
    say_shape(g, B, millions);
    say(" median of %d rounds of %d step%s after %d discarded steps:\n\n", r, steps,
        steps == 1 ? "" : "s", warmup + steps);
    contest_say(c, CONTENDERS, PEER);
    header("contender|ms a step|range");
    for (i = 0; i < CONTENDERS; i++) {
        double tokens = 1e3 * B * g->S;
        if (!c[i].fits) continue;
        found.rate[at][i] = median(&c[i].rate);
        found.memory[at][i] = c[i].memory;
        row_begin();
        cell(0, "%s", c[i].name);
        cell(1, "%.1f", tokens / median(&c[i].rate));
        cell(2, "%.1f - %.1f", tokens / quantile(&c[i].rate, 1), tokens / quantile(&c[i].rate, 0));
    }
    print_table();
    unlink(params);
}

static void bench_training(void) {
    int i;
    say("## Training\n\nLanguage models over bytes; a step is one segment of every stream: "
        "forward, backward, the compression's loss, clip "
        "of the gradient's norm and Adam; %d threads.\n"
        "The same data, first parameters and steps for all; memories are full when time is "
        "taken. The mean nll must agree with the first PyTorch row to %g (f32)\n"
        "and %g (bf16), or the row is void.\n\n",
        opt.threads, kinds[OWN].tolerance, kinds[OWN_BF16].tolerance);
    for (i = 0; i < CONFIGS; i++)
        if (wanted(&configs[i])) training_config(i);
}


// >>generation

static void generation_config(int at) {
    static contender c[WAYS];
    const config *g = &configs[at];
    int i, r, skip[WAYS] = {0}, places = opt.quick ? 4 : g->places;
    char params[512], label[80];
    char *shared[] = {SHAPE(g), "--generate", number(places), NULL};
    double millions;
    memset(c, 0, sizeof c);
    snprintf(params, sizeof params, "%s/params.comp.%s.safetensors", opt.work, g->name);
    millions = configure(g, params);
    snprintf(label, sizeof label, "generation, %s", g->name);
    lm_start(c, ways, WAYS, -1, skip, label, shared);
    probe_begin(opt.threads);
    r = contest(c, WAYS, rounds(5), opt.rounds ? 1e9 : 240, label);
    say_shape(g, 1, millions);
    say(" median of %d rounds:\n\n", r);
    contest_say(c, WAYS, TORCH);
    for (i = 0; i < WAYS; i++)
        if (c[i].fits) found.way[at][i] = median(&c[i].rate);
    unlink(params);
}

static void bench_generation(void) {
    int i;
    say("## Generation\n\nOne stream after three segments of text, %d threads. Cached: "
        "stx_comp_gen_feed, token by token through one "
        "segment, with the keys and values of its memories made at its start.\n"
        "Segment again: the reference's way, a forward pass of the "
        "segment so far for each token, by stx_comp_forward and by PyTorch; timed at places "
        "evenly spread over the segment, whose\n"
        "mean is the segment's. The text is given, so that losses can be compared: \"step 1\" is "
        "the nll at the first of these places, "
        "\"last step\" the mean over them.\n\n",
        opt.threads);
    for (i = 0; i < CONFIGS; i++)
        if (wanted(&configs[i])) generation_config(i);
}


// >>summary

static void bench_summary(void) {
    int i, k;
    say("## Summary\n\nRatios within this run, to PyTorch of the same model; \"-\" is not "
        "measured, or void. Wanted: training in f32 2 "
        "times eager at the small shape and 1.4 times at the example's, generation 20 times the "
        "reference's way.\n\n");
    header(
        "model|training tokens/s f32|to eager f32|to compiled f32|to eager as installed|bf16|to "
        "eager bf16|to compiled bf16|"
        "memory MB f32|of eager|cached tokens/s f32|to segment again|to PyTorch's|bf16|to "
        "PyTorch's bf16");
    for (i = 0; i < CONFIGS; i++) {
        const double *v = found.rate[i], *m = found.memory[i], *w = found.way[i];
        const double told[14] = {v[OWN],
                                 v[OWN] / v[PEER],
                                 v[OWN] / v[PEER_COMPILED],
                                 v[OWN] / v[PEER_PLAIN],
                                 v[OWN_BF16],
                                 v[OWN_BF16] / v[PEER_BF16],
                                 v[OWN_BF16] / v[PEER_COMPILED_BF16],
                                 m[OWN] * 1e-6,
                                 m[OWN] / m[PEER],
                                 w[CACHED],
                                 w[CACHED] / w[AGAIN],
                                 w[CACHED] / w[TORCH],
                                 w[CACHED_BF16],
                                 w[CACHED_BF16] / w[TORCH_BF16]};
        static const int digits[14] = {0, 2, 2, 2, 0, 2, 2, 0, 2, 0, 1, 1, 0, 1};
        if (!(v[OWN] == v[OWN]) && !(w[CACHED] == w[CACHED])) continue;
        row_begin();
        cell(0, "%s", configs[i].name);
        for (k = 0; k < 14; k++) {
            if (told[k] == told[k])
                cell(1 + k, "%.*f", digits[k], told[k]);
            else
                cell(1 + k, "-");
        }
    }
    if (table.rows > 1) print_table();
}


// >>main

static const char usage[] =
    "bench_comp [options]: times the Compressive Transformer (sh bench/run.sh --only comp builds "
    "and runs it)\n"
    "  --only LIST        comp, or of comp-training,comp-generation\n"
    "  --config LIST      of small,example (default: all; with --quick small)\n"
    "  --without LIST     contenders to leave out: of compiled,installed,bf16,peer\n"
    "  --quick            fewer rounds, places and models, about 2 minutes\n"
    "  --threads N        default: all\n"
    "  --rounds N         samples of each number (default 7 of training, 5 of generation)\n"
    "  --batch N, --steps N    streams, and steps in a round, of all models (default: each has "
    "its own)\n"
    "  --warmup N         training: steps before the first round, at least 4 for a compiled "
    "contender (default 4)\n"
    "  --data FILE        text\n"
    "  --python CMD --python-plain CMD --peer FILE    PyTorch contenders, with and without what "
    "its tuning guide asks for\n"
    "  --work DIR         for temporary files\n"
    "  --append FILE      write the tables there too\n"
    "  --worker OPTIONS   one contender: options of bench/peers/compressive_torch.py; --save "
    "FILE; with --generate N --recompute\n";

int main(int argc, char **argv) {
    int i;
    family.program = "bench_comp";
    family.options = model_options;
    family.create = create;
    opt.only = "comp";
    if (argc > 1 && !strcmp(argv[1], "--worker")) {
        if (!worker_options(argc, argv)) return 2;
        return model.generate ? generate_worker() : worker();
    }
    if ((i = lm_parse(argc, argv, usage)) <= 0) return i ? 2 : 0;
    for (i = 0; i < CONFIGS && !wanted(&configs[i]); i++) continue;
    if (i == CONFIGS) {
        fprintf(stderr, "bench_comp: --config %s: of small, example\n", opt.config);
        return 2;
    }
    found_nothing();
    if (listed(opt.only, "comp") || listed(opt.only, "comp-training")) bench_training();
    if (listed(opt.only, "comp") || listed(opt.only, "comp-generation")) bench_generation();
    bench_summary();
    if (probe.x) stx_destroy(probe.x);
    return 0;
}
