/* bench_comp.c - times the Compressive Transformer of seqtx on a CPU: training and
   generation, compared with PyTorch.

       sh bench/run.sh --only comp      builds this file and runs it (bench/README.md)

   Contenders alternate within one run, so that a busy machine affects all of them; values
   are medians of rounds, with minimum and maximum. The contenders (this program with
   --worker, and PyTorch) are separate processes that run one round for each line on
   stdin. All take the options of bench/peers/compressive_torch.py, read the same data
   and start from the same parameter file. A row is void if its losses differ from the
   peer's. */
#define _POSIX_C_SOURCE 200809L
#define SEQTX_IMPLEMENTATION
#include "../../seqtx_compressive.h"
#include "../lm.h"


// >>worker: the options of bench/peers/compressive_torch.py

enum { GATE_RESIDUAL, GATE_GRU };

static const char *const gate_name[] = {"residual", "gru"};

static struct {
    int L, D, H, M, C, r, gate, positions, generate, recompute, prompt;
    double aux_weight;
    const char *layers;
} model = {4, 256, 4, 128, 32, 4, GATE_RESIDUAL, 0, 0, 0, 3, 1, "all"};

static const option model_options[] = {OPTION_WHOLE("--nlayers", &model.L, 1),
                                       OPTION_WHOLE("--hid-sz", &model.D, 1),
                                       OPTION_WHOLE("--nheads", &model.H, 1),
                                       OPTION_WHOLE("--mem", &model.M, 0),
                                       OPTION_WHOLE("--cmem", &model.C, 0),
                                       OPTION_WHOLE("--ratio", &model.r, 1),
                                       OPTION_TEXT("--memory-layers", &model.layers),
                                       OPTION_CHOICE("--gate", &model.gate, "residual,gru"),
                                       OPTION_CHOICE("--positions", &model.positions, "learned,xl"),
                                       OPTION_REAL("--aux-weight", &model.aux_weight),
                                       OPTION_WHOLE("--generate", &model.generate, 1),
                                       OPTION_WHOLE("--prompt", &model.prompt, 1),
                                       OPTION_FLAG("--recompute", &model.recompute),
                                       OPTION_END};

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
    d.gate = model.gate == GATE_GRU ? STX_COMP_GATE_GRU : STX_COMP_GATE_RESIDUAL;
    d.positions = model.positions ? STX_COMP_POSITIONS_XL : STX_COMP_POSITIONS_LEARNED;
    if (!strcmp(p, "none"))
        d.no_memory = 1;
    else if (strcmp(p, "all"))
        for (d.memory_layers = list; *p && d.memory_count < 64; p = after(p))
            list[d.memory_count++] = (size_t)strtoul(p, NULL, 10);
    m = stx_comp_create(x, &d);
    check(x);
    return m;
}

static stx_lm create(stx_ctx *x) {
    return stx_comp_as_lm(model_create(x));
}

/* A model that has read --prompt segments of the text. `ids` contains the tokens of the
   next segment and the token after it. */
typedef struct {
    stx_ctx *x;
    stx_comp *m;
    stx_comp_state *state;
    stx_comp_gen *gen;
    int32_t *text, *ids;
} generation;

static void generation_begin(generation *g, stx_ctx *x) {
    size_t k, n, bytes, S = (size_t)job.T, P = (size_t)model.prompt * S;
    unsigned char *text = read_bytes(job.data, &bytes);
    memset(g, 0, sizeof *g);
    g->x = x;
    g->m = model_create(x);
    if (job.load) params_load(x, stx_comp_params(g->m), job.load);
    n = P + S + 1;
    if (bytes < n) die("the --data file is too short for --prompt and --block-sz");
    g->text = (int32_t *)malloc(n * sizeof *g->text);
    if (!g->text) die("out of memory");
    for (k = 0; k < n; k++) g->text[k] = text[k];
    free(text);
    g->state = stx_comp_state_create(g->m, 1);
    for (k = 0; k < P; k += S) {
        stx_begin(x, STX_EVAL);
        stx_comp_forward(g->m, stx_tokens(x, g->text + k, 1, S), NULL, g->state, g->state);
    }
    g->ids = g->text + P;
    g->gen = stx_comp_gen_create(g->m, 1);
    check(x);
}

static void generation_end(generation *g) {
    free(g->text);
    stx_comp_gen_free(g->gen);
    stx_comp_state_free(g->state);
    stx_destroy(g->x);
}

/* Returns the nll of the token after position k, from a forward pass over the segment
   up to k. */
static double recomputed_nll(generation *g, size_t k) {
    stx_tensor *h;
    double nll;
    stx_begin(g->x, STX_EVAL);
    h = stx_comp_forward(g->m, stx_tokens(g->x, g->ids, 1, k + 1), NULL, g->state, NULL);
    nll = stx_item(g->x, stx_comp_nll(g->m, stx_slice(g->x, h, k, k + 1),
                                      stx_tokens(g->x, g->ids + k + 1, 1, 1), NULL));
    check(g->x);
    return nll;
}

/* Runs one round with one stream. With cached keys and values, it feeds the whole
   segment token by token. With --recompute, like the peer, it runs a forward pass over
   the segment so far for each of N evenly spaced tokens. In both cases, it reports the
   nll of the first of these N tokens, and their mean nll. */
static void generation_round(generation *g, reply *r) {
    size_t k, place = 0, S = (size_t)job.T, N = (size_t)model.generate;
    double sum = 0, at = seconds();
    if (!model.recompute && !stx_comp_gen_set(g->gen, g->state)) check(g->x);
    for (k = 0; k < S; k++) {
        double nll = 0;
        int counts = place < N && k == (2 * place + 1) * S / (2 * N);
        if (!model.recompute) {
            const stx_real *logits = stx_comp_gen_feed(g->gen, g->ids + k, 1);
            check(g->x);
            if (counts) nll = nll_of(logits, 256, g->ids[k + 1]);
        } else if (counts)
            nll = recomputed_nll(g, k);
        if (!counts) continue;
        if (!place++) r->first = r->step1 = nll;
        sum += nll;
    }
    r->seconds = seconds() - at;
    r->last = sum / (double)N;
    r->tokens = (double)(model.recompute ? N : S);
    r->done += model.recompute ? N : S;
}

static int generate_worker(void) {
    generation g;
    reply r;
    char line[64];
    stx_ctx *x = worker_context(job.precision, job.threads);
    if (!x) return 3;
    memset(&r, 0, sizeof r);
    r.norm = NAN;
    generation_begin(&g, x);
    fprintf(stderr, "ready\n");
    while (fgets(line, sizeof line, stdin)) {
        generation_round(&g, &r);
        reply_print(x, &r);
    }
    generation_end(&g);
    return 0;
}


// >>configurations

enum { CONFIGS = 2 };

typedef struct {
    const char *name;
    int L, D, H, S, M, C, r, B, steps, places;
    const char *layers;
    int gate;
} config;

static const config configs[CONFIGS] = {
    {"small", 4, 256, 4, 128, 128, 32, 4, 8, 8, 16, "all", GATE_RESIDUAL},
    /* the reference code's enwik8 example */
    {"example", 8, 512, 8, 512, 512, 128, 4, 4, 1, 8, "6,7,8", GATE_GRU}};

enum { CACHED, CACHED_BF16, AGAIN, AGAIN_BF16, TORCH, TORCH_BF16, WAYS };

static const lm_kind ways[WAYS] = {
    {"seqtx f32, cached", 1e-3, F32, 0, BY_SEQTX, {NULL}},
    {"seqtx bf16, cached", 2e-2, BF16, 0, BY_SEQTX, {NULL}},
    {"seqtx f32, segment again", 1e-3, F32, 0, BY_SEQTX, {"--recompute", NULL}},
    {"seqtx bf16, segment again", 2e-2, BF16, 0, BY_SEQTX, {"--recompute", NULL}},
    {"PyTorch eager f32, segment again", 1e-3, F32, 0, BY_PEER, {NULL}},
    {"PyTorch eager bf16 autocast, segment again", 2e-2, BF16, 0, BY_PEER, {NULL}}};

static lm_found found[CONFIGS];
static double rate_found[CONFIGS][WAYS];

static int wanted(const config *g) {
    if (opt.config) return listed(opt.config, g->name);
    return !opt.quick || g == configs;
}

/* Writes the initial parameters of a configuration to `path` and returns their number
   in millions. Position embeddings are small but nonzero, so that an error in them
   changes the first loss. */
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
        "learned positions, convolution and attention loss, B %d; %.1f million parameters;",
        g->name, g->D, g->L, g->H, g->S, g->M, g->C, g->r, g->layers, gate_name[g->gate], B,
        params);
}

static void shape_arguments(arguments *a, const config *g, const char *params) {
    a->n = 0;
    arg_number(a, "--nlayers", (size_t)g->L);
    arg_number(a, "--hid-sz", (size_t)g->D);
    arg_number(a, "--nheads", (size_t)g->H);
    arg_number(a, "--block-sz", (size_t)g->S);
    arg_number(a, "--mem", (size_t)g->M);
    arg_number(a, "--cmem", (size_t)g->C);
    arg_number(a, "--ratio", (size_t)g->r);
    arg_text(a, "--memory-layers", g->layers);
    arg_text(a, "--gate", gate_name[g->gate]);
    arg_text(a, "--load", params);
}


// >>training

static void training_config(int at) {
    static contender c[CONTENDERS];
    const config *g = &configs[at];
    int r, warmup = lm_warmup(4), B = opt.batch ? opt.batch : g->B, steps = lm_steps(g->steps);
    char params[512], label[80];
    arguments shared;
    double millions;
    snprintf(params, sizeof params, "%s/params.comp.%s.safetensors", opt.work, g->name);
    snprintf(label, sizeof label, "training, %s", g->name);
    millions = configure(g, params);
    shape_arguments(&shared, g, params);
    lm_training_arguments(&shared, B, steps, warmup);
    arg_text(&shared, "--weight-decay", "0");
    arg_text(&shared, "--clip", "0.5");
    lm_start(c, lm_kinds, CONTENDERS, PEER, NULL, label, opt.data, &shared);
    r = lm_rounds(c, CONTENDERS, 7, 240, label);
    say_shape(g, B, millions);
    lm_training_say(c, r, steps, warmup);
    lm_step_times(c, (double)B * g->S);
    lm_keep(&found[at], c);
    unlink(params);
}

static void bench_training(void) {
    int i;
    say("## Training\n\n"
        "Language models over bytes. A step is one segment of every stream: forward, backward, "
        "the loss of the\ncompression, gradient clipping and Adam; %d threads. The data, initial "
        "parameters and steps are the same for\nall; memories are full when time is taken. The "
        "mean nll must agree with the first PyTorch row to %g (f32)\nand %g (bf16), or the row "
        "is void.\n\n",
        opt.threads, lm_kinds[OWN].tolerance, lm_kinds[OWN_BF16].tolerance);
    for (i = 0; i < CONFIGS; i++)
        if (wanted(&configs[i])) training_config(i);
}


// >>generation

static void generation_config(int at) {
    static contender c[WAYS];
    const config *g = &configs[at];
    int i, r;
    char params[512], label[80];
    arguments shared;
    double millions;
    snprintf(params, sizeof params, "%s/params.comp.%s.safetensors", opt.work, g->name);
    snprintf(label, sizeof label, "generation, %s", g->name);
    millions = configure(g, params);
    shape_arguments(&shared, g, params);
    arg_number(&shared, "--threads", (size_t)opt.threads);
    arg_number(&shared, "--generate", (size_t)(opt.quick ? 4 : g->places));
    lm_start(c, ways, WAYS, -1, NULL, label, opt.data, &shared);
    r = lm_rounds(c, WAYS, 5, 240, label);
    say_shape(g, 1, millions);
    say(" median of %d rounds:\n\n", r);
    contest_say(c, WAYS, TORCH);
    for (i = 0; i < WAYS; i++)
        if (c[i].fits) rate_found[at][i] = median(&c[i].rate);
    unlink(params);
}

static void bench_generation(void) {
    int i;
    say("## Generation\n\n"
        "One stream after three segments of text, %d threads. \"cached\": stx_comp_gen_feed, "
        "token by token through one\nsegment; the keys and values of the memories are made at "
        "its start. \"segment again\": the reference's method,\na forward pass of the segment "
        "so far for each token, by stx_comp_forward and by PyTorch, timed at positions\nevenly "
        "spaced over the segment, whose mean is that of the segment. The text is given, so that "
        "losses can be\ncompared: \"step 1\" is the nll at the first of these positions, "
        "\"last step\" the mean over them.\n\n",
        opt.threads);
    for (i = 0; i < CONFIGS; i++)
        if (wanted(&configs[i])) generation_config(i);
}


// >>summary

static void bench_summary(void) {
    enum { MORE = 5 };

    static const int digits[MORE] = {0, 1, 1, 0, 1};
    int i;
    say("## Summary\n\n"
        "Ratios within this run, to PyTorch with the same model; \"-\": not measured, or void. "
        "Targets: training in f32\n2 times eager at the small shape and 1.4 times at that of "
        "the example, generation 20 times the reference's method.\n\n");
    header("model|" LM_SUMMARY_HEADER
           "|cached tokens/s f32|to segment again|to PyTorch's|bf16|to PyTorch's bf16");
    for (i = 0; i < CONFIGS; i++) {
        const double *w = rate_found[i];
        double value[MORE];
        if (!measured(found[i].rate[OWN]) && !measured(w[CACHED])) continue;
        value[0] = w[CACHED];
        value[1] = w[CACHED] / w[AGAIN];
        value[2] = w[CACHED] / w[TORCH];
        value[3] = w[CACHED_BF16];
        value[4] = w[CACHED_BF16] / w[TORCH_BF16];
        row_begin();
        cell(0, "%s", configs[i].name);
        lm_summary(1, &found[i]);
        cell_values(1 + LM_SUMMARY, value, digits, MORE);
    }
    if (table.rows > 1) print_table();
}


// >>main

static const char usage[] =
    "bench_comp [options]: times the Compressive Transformer (sh bench/run.sh --only comp)\n"
    "  --only LIST        comp, or some of comp-training,comp-generation\n"
    "  --config LIST      some of small,example (default: all; with --quick small)\n"
    "  --quick            fewer rounds, positions and models, about 2 minutes\n"
    "  --rounds N         samples of each value (default 7 of training, 5 of generation)\n"
    "  --warmup N         steps before the first round (default 4, the least for compilation)\n"
    "  --worker OPTIONS   one contender: options of bench/peers/compressive_torch.py, --save "
    "FILE; --generate N --recompute\n" LM_USAGE;

int main(int argc, char **argv) {
    int i, ended;
    program = "bench_comp";
    family.options = model_options;
    family.create = create;
    opt.only = "comp";
    if (argc > 1 && !strcmp(argv[1], "--worker")) {
        ended = worker_parse(argc, argv);
        if (ended) return ended;
        return model.generate ? generate_worker() : worker();
    }
    ended = lm_parse(argc, argv, usage, "small,example");
    if (ended) return ended - 1;
    for (i = 0; i < CONFIGS; i++) {
        lm_found_nothing(&found[i]);
        not_measured(rate_found[i], WAYS);
    }
    if (section("comp", "comp-training")) bench_training();
    if (section("comp", "comp-generation")) bench_generation();
    bench_summary();
    probe_end();
    return 0;
}
