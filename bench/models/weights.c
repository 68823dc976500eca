/* weights.c - bf16 and int8 weights in generation (sh bench/models/weights.sh builds and
   runs it): matmuls of one row compared with the bandwidth of reading and copying memory,
   then the token rate of models larger than the caches, and of models so narrow that
   their arithmetic is negligible. All contenders are interleaved; values are
   medians. */
#define SEQTX_IMPLEMENTATION
#define SEQTX_ATTN_SPAN_IMPLEMENTATION
#define SEQTX_SRU_IMPLEMENTATION
#define SEQTX_COMPRESSIVE_IMPLEMENTATION
#define SEQTX_PAR_IMPLEMENTATION
#if !defined(_POSIX_C_SOURCE)
  #define _POSIX_C_SOURCE 200809L
#endif
#include "../../seqtx.h"
#include "../../seqtx_attn_span.h"
#include "../../seqtx_sru.h"
#include "../../seqtx_compressive.h"
#include "../../seqtx_par.h"
#include "../cpu.h"

enum { KINDS = 3, BLOCK = 1 << 16, PROMPT = 64 };

enum { KIND_F32, KIND_BF16, KIND_INT8 };

static const char *const kind_name[KINDS] = {"f32", "bf16", "int8"};

static const int kind_weights[KINDS] = {0, STX_WEIGHTS_BF16, STX_WEIGHTS_INT8};

static struct {
    int tokens, megabytes, dim;
} size = {16, 400, 1024};

typedef struct {
    char *to, *from;
    double *sums;
    size_t blocks;
} memory;

static memory memory_create(size_t bytes) {
    memory m;
    m.blocks = bytes / BLOCK;
    m.from = (char *)malloc(m.blocks * BLOCK);
    m.to = (char *)malloc(m.blocks * BLOCK);
    m.sums = (double *)malloc(m.blocks * sizeof *m.sums);
    if (!m.from || !m.to || !m.sums) die("out of memory");
    /* write to all pages, because untouched pages may all be mapped to one zero page */
    memset(m.from, 1, m.blocks * BLOCK);
    memset(m.to, 1, m.blocks * BLOCK);
    return m;
}

static void memory_free(memory *m) {
    free(m->from);
    free(m->to);
    free(m->sums);
}

static void read_part(const stx_share *s, const void *job) {
    const memory *m = (const memory *)job;
    size_t i, k, e;
    for (i = s->begin; i < s->end; i++) {
        const float *f = (const float *)(const void *)(m->from + i * BLOCK);
        float t[64] = {0}, all = 0;
        for (k = 0; k < BLOCK / sizeof *f; k += 64)
            for (e = 0; e < 64; e++) t[e] += f[k + e];
        for (e = 0; e < 64; e++) all += t[e];
        m->sums[i] = (double)all;
    }
}

static void copy_part(const stx_share *s, const void *job) {
    const memory *m = (const memory *)job;
    size_t i;
    for (i = s->begin; i < s->end; i++) memcpy(m->to + i * BLOCK, m->from + i * BLOCK, BLOCK);
}

/* Returns the rate of reading memory in GB/s. Only the second pass is timed, because
   the threads are then awake, as they are while a model generates. */
static double reading(stx_ctx *x, const memory *m) {
    double at = 0;
    int pass;
    for (pass = 0; pass < 2; pass++) {
        at = seconds();
        stx_parallel(x, m->blocks, m->blocks * BLOCK, read_part, m);
    }
    return (double)(m->blocks * BLOCK) / (seconds() - at) * 1e-9;
}

static double copying(stx_ctx *x, const memory *m) {
    double at = 0;
    int pass;
    for (pass = 0; pass < 2; pass++) {
        at = seconds();
        stx_parallel(x, m->blocks, m->blocks * BLOCK, copy_part, m);
    }
    return 2 * (double)(m->blocks * BLOCK) / (seconds() - at) * 1e-9;
}

/* Packs parameters as `kind` requires, and returns the bytes read per token. */
static double pack(stx_params *p, int kind, double floats) {
    if (kind == KIND_F32) return floats * sizeof(stx_real);
    return (double)stx_params_pack(p, kind_weights[kind]);
}


// >>matmuls of one row

/* n matrices of d x d elements, whose total size in float is --mb megabytes. Each is
   multiplied by one row. */
enum { MOST = 1024 };

typedef struct {
    stx_ctx *x[KINDS];
    stx_tensor *W[KINDS][MOST];
    double packed[KINDS];
    size_t d, n;
    stx_real *in, *out;
    memory m;
    samples copies, reads, times[KINDS][2];
} rows_bench;

static void rows_begin(rows_bench *b) {
    size_t i, d = (size_t)size.dim;
    int k;
    b->d = d;
    b->n = (size_t)size.megabytes * 1000000 / (4 * d * d);
    if (b->n < 1) b->n = 1;
    if (b->n > MOST) b->n = MOST;
    b->m = memory_create(b->n * d * d * sizeof(float));
    b->in = (stx_real *)malloc(d * sizeof *b->in);
    b->out = (stx_real *)malloc(d * sizeof *b->out);
    if (!b->in || !b->out) die("out of memory");
    for (i = 0; i < d; i++) b->in[i] = (stx_real)sin((double)i);
    for (k = 0; k < KINDS; k++) {
        stx_params *p;
        progress("matrices ..");
        b->x[k] = context(F32, opt.threads);
        p = stx_params_create(b->x[k]);
        for (i = 0; i < b->n; i++) {
            char name[16];
            snprintf(name, sizeof name, "w%d", (int)i);
            b->W[k][i] = stx_param(p, STX_UNIFORM, 0.02, name, d, d, 0, 0);
        }
        check(b->x[k]);
        b->packed[k] = pack(p, k, (double)(b->n * d * d));
        check(b->x[k]);
    }
}

/* Returns the time of all matmuls in seconds. As in reading(), only the second pass is
   timed. */
static double rows_time(const rows_bench *b, int kind, int tb) {
    double at = 0;
    size_t i;
    int pass;
    for (pass = 0; pass < 2; pass++) {
        at = seconds();
        for (i = 0; i < b->n; i++) {
            stx_gemm_args g = stx_gemm_init(0, tb, 1, b->d, b->d, b->in, b->W[kind][i]->data,
                                            b->out);
            stx_gemm(b->x[kind], &g);
        }
    }
    return seconds() - at;
}

static void rows_table(const rows_bench *b) {
    int k, tb;
    header("weights|matmul|ms|range|GB/s|of copying|of reading|f32's time");
    for (k = 0; k < KINDS; k++)
        for (tb = 1; tb >= 0; tb--) {
            double t = median(&b->times[k][tb]), rate = b->packed[k] / t * 1e-9;
            row_begin();
            cell(0, "%s", kind_name[k]);
            cell(1, "x W%s", tb ? "^T" : "");
            cell_spread(2, &b->times[k][tb], 2, 1e3);
            cell(4, "%.1f", rate);
            cell(5, "%.2f", rate / median(&b->copies));
            cell(6, "%.2f", rate / median(&b->reads));
            cell(7, "%.2f", t / median(&b->times[KIND_F32][tb]));
        }
    print_table();
}

static void bench_rows(void) {
    static rows_bench bench;
    rows_bench *b = &bench;
    int k, tb, r;
    rows_begin(b);
    for (r = -1; r < opt.rounds; r++) {
        double copy, read;
        progress("matmuls ..");
        copy = copying(b->x[0], &b->m);
        read = reading(b->x[0], &b->m);
        if (r >= 0) {
            sample(&b->copies, copy);
            sample(&b->reads, read);
        }
        for (k = 0; k < KINDS; k++)
            for (tb = 0; tb < 2; tb++) {
                double t = rows_time(b, k, tb);
                if (r >= 0) sample(&b->times[k][tb], t);
            }
    }
    say("## Matmuls of one row\n\n"
        "%d matrices of %d x %d, %.0f MB in float, one after the other; %d threads, median of %d "
        "interleaved rounds.\nCopying (read + written) %.1f GB/s, %.1f to %.1f; reading %.1f, %.1f "
        "to %.1f.\n\n",
        (int)b->n, size.dim, size.dim, (double)(b->m.blocks * BLOCK) * 1e-6, stx_threads(b->x[0]),
        opt.rounds, median(&b->copies), quantile(&b->copies, 0), quantile(&b->copies, 1),
        median(&b->reads), quantile(&b->reads, 0), quantile(&b->reads, 1));
    rows_table(b);
    for (k = 0; k < KINDS; k++) stx_destroy(b->x[k]);
    memory_free(&b->m);
    free(b->in);
    free(b->out);
}


// >>models

static stx_lm make_span(stx_ctx *x) {
    stx_span_desc d;
    memset(&d, 0, sizeof d);
    d.vocab = 256;
    d.layers = 8;
    d.dim = 1024;
    d.heads = 8;
    d.span = 512;
    return stx_span_as_lm(stx_span_create(x, &d));
}

static stx_lm make_sru(stx_ctx *x) {
    stx_sru_lm_desc d;
    memset(&d, 0, sizeof d);
    d.vocab = 256;
    d.dim = 3072;
    d.sru.layers = 10;
    d.sru.transform = STX_SRU_ATTENTION;
    d.sru.proj = 768;
    d.sru.heads = 1;
    return stx_sru_as_lm(stx_sru_lm_create(x, &d));
}

static stx_lm make_comp(stx_ctx *x) {
    stx_comp_desc d;
    memset(&d, 0, sizeof d);
    d.vocab = 256;
    d.dim = 1024;
    d.layers = 8;
    d.heads = 8;
    d.segment = 256;
    return stx_comp_as_lm(stx_comp_create(x, &d));
}

static stx_lm make_par(stx_ctx *x) {
    stx_par_desc d;
    memset(&d, 0, sizeof d);
    d.vocab = 256;
    d.dim = 1024;
    d.heads = 8;
    d.pattern = "(sf)8";
    d.segment = 256;
    return stx_par_as_lm(stx_par_create(x, &d));
}

/* Models with the same layers, but so narrow that function calls dominate the cost of a
   token. */
enum { NARROW = 16, NARROW_VOCAB = 16, NARROW_WINDOW = 32 };

static stx_lm narrow_span(stx_ctx *x) {
    stx_span_desc d;
    memset(&d, 0, sizeof d);
    d.vocab = NARROW_VOCAB;
    d.layers = 8;
    d.dim = d.inner = NARROW;
    d.heads = 1;
    d.span = NARROW_WINDOW;
    return stx_span_as_lm(stx_span_create(x, &d));
}

static stx_lm narrow_sru(stx_ctx *x) {
    stx_sru_lm_desc d;
    memset(&d, 0, sizeof d);
    d.vocab = NARROW_VOCAB;
    d.dim = NARROW;
    d.sru.layers = 10;
    d.sru.transform = STX_SRU_ATTENTION;
    d.sru.proj = NARROW;
    d.sru.heads = 1;
    return stx_sru_as_lm(stx_sru_lm_create(x, &d));
}

static stx_lm narrow_comp(stx_ctx *x) {
    stx_comp_desc d;
    memset(&d, 0, sizeof d);
    d.vocab = NARROW_VOCAB;
    d.dim = NARROW;
    d.layers = 8;
    d.heads = 1;
    d.segment = NARROW_WINDOW;
    return stx_comp_as_lm(stx_comp_create(x, &d));
}

static stx_lm narrow_par(stx_ctx *x) {
    stx_par_desc d;
    memset(&d, 0, sizeof d);
    d.vocab = NARROW_VOCAB;
    d.dim = d.inner = NARROW;
    d.heads = 1;
    d.pattern = "(sf)8";
    d.segment = NARROW_WINDOW;
    return stx_par_as_lm(stx_par_create(x, &d));
}

typedef struct {
    const char *name;
    stx_lm (*make)(stx_ctx *x);
    size_t window; /* the window argument of gen_create */
} model;

static const model narrow[] = {{"Sequential Transformer, 8 layers", narrow_span, 0},
                               {"SRU++, 10 layers", narrow_sru, NARROW_WINDOW},
                               {"Compressive Transformer, 8 layers", narrow_comp, 0},
                               {"Transformer-XL, (sf)8", narrow_par, 0}};

static const model models[] = {{"Sequential Transformer, 8 layers, d 1024", make_span, 0},
                               {"SRU++, enwik8-base", make_sru, 0},
                               {"Compressive Transformer, 8 layers, d 1024", make_comp, 0},
                               {"Transformer-XL, (sf)8, d 1024", make_par, 0}};

enum { MODELS = sizeof models / sizeof *models, NARROWS = sizeof narrow / sizeof *narrow };

/* A model that generates. */
typedef struct {
    stx_lm lm;
    void *gen;
    samples times, reads; /* times: time per token in ms or us; reads: read rate in GB/s */
    double bytes;         /* bytes read per token */
} generator;

static void generator_create(generator *g, const model *m, int kind, int threads) {
    memset(g, 0, sizeof *g);
    g->lm = m->make(context(F32, threads));
    check(g->lm.ctx);
    g->bytes = pack(g->lm.params, kind, (double)stx_params_size(g->lm.params));
    g->gen = g->lm.gen_create(g->lm.model, 1, m->window);
    check(g->lm.ctx);
}

static void generator_free(generator *g) {
    g->lm.gen_free(g->gen);
    stx_destroy(g->lm.ctx);
}

/* Returns the time of n tokens in seconds. */
static double generator_time(generator *g, int n, int vocab) {
    double at = seconds();
    int i;
    for (i = 0; i < n; i++) {
        const int32_t id = i * 37 % vocab;
        g->lm.gen_feed(g->gen, &id, 1);
    }
    check(g->lm.ctx);
    return seconds() - at;
}

static void tokens_row(const generator *g, const generator *f32, const char *name, int kind) {
    const double ms = median(&g->times), rate = g->bytes / ms * 1e-6;
    row_begin();
    cell(0, "%s", kind ? "" : name);
    cell(1, "%.1f", (double)stx_params_size(g->lm.params) * 1e-6);
    cell(2, "%s", kind_name[kind]);
    cell_spread(3, &g->times, 2, 1);
    cell(5, "%.1f", 1e3 / ms);
    cell(6, "%.1f", rate);
    cell_median(7, &g->reads, 1, 1);
    cell(8, "%.2f", rate / median(&g->reads));
    cell(9, "%.2f", median(&f32->times) / ms);
}

static void tokens_model(const model *of, stx_ctx *reader, const memory *m) {
    static generator run[KINDS];
    int32_t prompt[PROMPT];
    int k, r, i;
    for (i = 0; i < PROMPT; i++) prompt[i] = i * 37 % 256;
    progress(of->name);
    for (k = 0; k < KINDS; k++) generator_create(&run[k], of, k, opt.threads);
    for (r = -1; r < opt.rounds; r++)
        for (k = 0; k < KINDS; k++) {
            double t, read = reading(reader, m);
            progress(of->name);
            run[k].lm.gen_reset(run[k].gen);
            run[k].lm.gen_feed(run[k].gen, prompt, PROMPT);
            t = generator_time(&run[k], size.tokens, 256);
            if (r < 0) continue;
            sample(&run[k].times, t * 1e3 / size.tokens);
            sample(&run[k].reads, read);
        }
    for (k = 0; k < KINDS; k++) tokens_row(&run[k], &run[KIND_F32], of->name, k);
    for (k = 0; k < KINDS; k++) generator_free(&run[k]);
}

static void bench_tokens(void) {
    stx_ctx *reader = context(F32, opt.threads);
    memory m = memory_create((size_t)size.megabytes * 1000000);
    int i;
    say("## Tokens\n\n"
        "One stream, one token at a time, after a prompt of %d; new models over bytes, %d tokens "
        "per round, median of %d\ninterleaved rounds. GB/s: packed matrices, or in f32 all "
        "parameters, times tokens per second (cached keys and\nvalues are read in addition); "
        "\"of reading\": relative to the rate of reading in the same rounds.\n\n",
        PROMPT, size.tokens, opt.rounds);
    header("model|M parameters|weights|ms per token|range|tokens/s|GB/s|reading|of reading|to f32");
    for (i = 0; i < MODELS; i++) tokens_model(&models[i], reader, &m);
    print_table();
    memory_free(&m);
    stx_destroy(reader);
}

static void bench_overheads(void) {
    enum { EACH = 500 };

    static generator run[NARROWS];
    int i, r, t;
    say("## Cost of a token without its arithmetic\n\n"
        "The same layers with width %d, a window of %d and %d tokens in the vocabulary: one "
        "stream, microseconds per token;\n%d tokens per round, median of %d interleaved "
        "rounds.\n\n",
        NARROW, NARROW_WINDOW, NARROW_VOCAB, EACH, opt.rounds);
    header("model|threads|us per token|range");
    for (t = 0; t < 2; t++) {
        for (i = 0; i < NARROWS; i++)
            generator_create(&run[i], &narrow[i], KIND_F32, t ? opt.threads : 1);
        for (r = -1; r < opt.rounds; r++)
            for (i = 0; i < NARROWS; i++) {
                double took = generator_time(&run[i], EACH, NARROW_VOCAB);
                if (r >= 0) sample(&run[i].times, took * 1e6 / EACH);
            }
        for (i = 0; i < NARROWS; i++) {
            row_begin();
            cell(0, "%s", narrow[i].name);
            cell(1, "%d", stx_threads(run[i].lm.ctx));
            cell_spread(2, &run[i].times, 1, 1);
            generator_free(&run[i]);
        }
    }
    print_table();
}

static const option options[] = {OPTION_WHOLE("--threads", &opt.threads, 0),
                                 OPTION_WHOLE("--rounds", &opt.rounds, 1),
                                 OPTION_WHOLE("--tokens", &size.tokens, 1),
                                 OPTION_WHOLE("--mb", &size.megabytes, 1),
                                 OPTION_WHOLE("--dim", &size.dim, STX_PACK_MIN),
                                 OPTION_TEXT("--append", &report_path),
                                 OPTION_END};

int main(int argc, char **argv) {
    int i, taken;
    program = "weights";
    opt.rounds = 9;
    for (i = 1; i < argc; i += taken) {
        taken = option_take(options, argc, argv, i);
        if (!taken)
            return option_unknown(argv[i], "options: --threads N, --rounds N, --tokens N (at most "
                                           "64), --mb N, --dim N, --append FILE\n");
    }
    if (size.tokens > PROMPT) die("--tokens: expected at most 64");
    if (opt.rounds >= MAX_SAMPLES) die("--rounds: expected at most 1023");
    bench_rows();
    bench_tokens();
    bench_overheads();
    return 0;
}
