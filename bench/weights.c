/* weights.c - bf16 and int8 weights in generation (sh bench/weights.sh builds and runs
   it): products of one row beside plain reading and copying of memory, then tokens of
   models larger than the caches, and of ones so narrow that their arithmetic is
   nothing. All contenders take turns; medians. */
#define SEQTX_IMPLEMENTATION
#define SEQTX_ATTN_SPAN_IMPLEMENTATION
#define SEQTX_SRU_IMPLEMENTATION
#define SEQTX_COMPRESSIVE_IMPLEMENTATION
#define SEQTX_PAR_IMPLEMENTATION
#if !defined(_POSIX_C_SOURCE)
  #define _POSIX_C_SOURCE 200809L
#endif
#include "../seqtx.h"
#include "../seqtx_attn_span.h"
#include "../seqtx_sru.h"
#include "../seqtx_compressive.h"
#include "../seqtx_par.h"
#include "report.h"

enum { KINDS = 3, BLOCK = 1 << 16, PROMPT = 64 };

static const char *const kind_name[KINDS] = {"f32", "bf16", "int8"};

static struct {
    int threads, rounds, tokens;
    size_t megabytes, dim;
} opt = {0, 9, 16, 400, 1024};

static void check(const stx_ctx *x) {
    if (!stx_ok(x)) die(stx_error(x));
}

static stx_ctx *context(void) {
    stx_desc d;
    stx_ctx *x;
    memset(&d, 0, sizeof d);
    d.threads = opt.threads;
    d.seed = 1;
    x = stx_create(&d);
    check(x);
    return x;
}

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
    if (!m.from || !m.to || !m.sums) die("not enough memory");
    /* not 0: such memory may be one page, many times */
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

/* GB/s. The second pass is timed: threads are awake then, as they are while a model
   generates */
static double reading(stx_ctx *x, const memory *m) {
    double at = 0;
    int pass;
    for (pass = 0; pass < 2; pass++) {
        at = seconds();
        stx_parallel(x, m->blocks, m->blocks * BLOCK, read_part, m);
    }
    return (double)(m->blocks * BLOCK) / (seconds() - at) * 1e-9;
}

/* Matrices of dim x dim, as many as make so many MB in float: one row times each */
static void products(void) {
    enum { MOST = 1024 };

    static stx_tensor *W[KINDS][MOST];
    static samples copies, reads, times[KINDS][2];
    stx_ctx *x[KINDS];
    size_t d = opt.dim, n = opt.megabytes * 1000000 / (4 * d * d), bytes, i, packed[KINDS] = {0};
    stx_real *in, *out;
    memory m;
    int k, tb, r;
    if (n < 1) n = 1;
    if (n > MOST) n = MOST;
    m = memory_create(n * d * d * sizeof(float));
    bytes = m.blocks * BLOCK;
    in = (stx_real *)malloc(d * sizeof *in);
    out = (stx_real *)malloc(d * sizeof *out);
    if (!in || !out) die("not enough memory");
    for (i = 0; i < d; i++) in[i] = (stx_real)sin((double)i);
    for (k = 0; k < KINDS; k++) {
        stx_params *p;
        progress("matrices ..");
        x[k] = context();
        p = stx_params_create(x[k]);
        for (i = 0; i < n; i++) {
            char name[16];
            snprintf(name, sizeof name, "w%d", (int)i);
            W[k][i] = stx_param(p, STX_UNIFORM, 0.02, name, d, d, 0, 0);
        }
        check(x[k]);
        packed[k] = k ? stx_params_pack(p, k == 1 ? STX_WEIGHTS_BF16 : STX_WEIGHTS_INT8)
                      : n * d * d * sizeof(stx_real);
        check(x[k]);
    }
    for (r = -1; r < opt.rounds; r++) {
        double at = 0;
        int pass;
        progress("products ..");
        for (pass = 0; pass < 2; pass++) { /* the second one is timed, as in reading() */
            at = seconds();
            stx_parallel(x[0], m.blocks, bytes, copy_part, &m);
        }
        if (r >= 0) sample(&copies, 2 * (double)bytes / (seconds() - at) * 1e-9);
        at = reading(x[0], &m);
        if (r >= 0) sample(&reads, at);
        for (k = 0; k < KINDS; k++)
            for (tb = 0; tb < 2; tb++) {
                for (pass = 0; pass < 2; pass++) {
                    at = seconds();
                    for (i = 0; i < n; i++) {
                        stx_gemm_args g = stx_gemm_init(0, tb, 1, d, d, in, W[k][i]->data, out);
                        stx_gemm(x[k], &g);
                    }
                }
                if (r >= 0) sample(&times[k][tb], seconds() - at);
            }
    }
    say("## Products of one row\n\n"
        "%d matrices of %d x %d, %.0f MB in float, one after the other; %d threads, median of %d "
        "rounds in "
        "turns. "
        "Copying (read + written) %.1f GB/s,\n%.1f to %.1f; reading %.1f, %.1f to %.1f.\n\n",
        (int)n, (int)d, (int)d, (double)bytes * 1e-6, stx_threads(x[0]), opt.rounds,
        median(&copies), quantile(&copies, 0), quantile(&copies, 1), median(&reads),
        quantile(&reads, 0), quantile(&reads, 1));
    header("weights|product|ms|range|GB/s|of copying|of reading|f32's time");
    for (k = 0; k < KINDS; k++)
        for (tb = 1; tb >= 0; tb--) {
            double t = median(&times[k][tb]), rate = (double)packed[k] / t * 1e-9;
            row_begin();
            cell(0, "%s", kind_name[k]);
            cell(1, "x W%s", tb ? "^T" : "");
            cell(2, "%.2f", t * 1e3);
            cell(3, "%.2f - %.2f", quantile(&times[k][tb], 0) * 1e3,
                 quantile(&times[k][tb], 1) * 1e3);
            cell(4, "%.1f", rate);
            cell(5, "%.2f", rate / median(&copies));
            cell(6, "%.2f", rate / median(&reads));
            cell(7, "%.2f", t / median(&times[0][tb]));
        }
    print_table();
    for (k = 0; k < KINDS; k++) stx_destroy(x[k]);
    memory_free(&m);
    free(in);
    free(out);
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

/* The same layers so narrow that a token is what calling them costs */
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

/* window: for gen_create */
typedef struct {
    const char *name;
    stx_lm (*make)(stx_ctx *x);
    size_t window;
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

static void tokens(void) {
    int i, k, r, n;
    stx_ctx *reader = context();
    memory m = memory_create(opt.megabytes * 1000000);
    say("## Tokens\n\nOne stream, one token at a time, after %d of prompt; new models over bytes, "
        "%d tokens a round, median of %d rounds "
        "interleaved. GB/s: packed matrices,\n"
        "or in f32 all parameters, times tokens a second (cached keys and values are read "
        "besides); of "
        "what plain reading reached in the same rounds.\n\n",
        PROMPT, opt.tokens, opt.rounds);
    header("model|M parameters|weights|ms a token|range|tokens/s|GB/s|reading|of reading|to f32");
    for (i = 0; i < MODELS; i++) {
        static struct {
            stx_lm lm;
            void *gen;
            samples ms, reads;
            double bytes;
        } run[KINDS];

        memset(run, 0, sizeof run);
        for (k = 0; k < KINDS; k++) {
            progress(models[i].name);
            run[k].lm = models[i].make(context());
            check(run[k].lm.ctx);
            run[k].bytes = k ? (double)stx_params_pack(run[k].lm.params,
                                                       k == 1 ? STX_WEIGHTS_BF16 : STX_WEIGHTS_INT8)
                             : (double)stx_params_size(run[k].lm.params) * sizeof(stx_real);
            run[k].gen = run[k].lm.gen_create(run[k].lm.model, 1, models[i].window);
            check(run[k].lm.ctx);
        }
        for (r = -1; r < opt.rounds; r++)
            for (k = 0; k < KINDS; k++) {
                int32_t ids[PROMPT];
                double at, read = reading(reader, &m);
                progress(models[i].name);
                for (n = 0; n < PROMPT; n++) ids[n] = n * 37 % 256;
                run[k].lm.gen_reset(run[k].gen);
                run[k].lm.gen_feed(run[k].gen, ids, PROMPT);
                at = seconds();
                for (n = 0; n < opt.tokens; n++) run[k].lm.gen_feed(run[k].gen, ids + n, 1);
                check(run[k].lm.ctx);
                if (r < 0) continue;
                sample(&run[k].ms, (seconds() - at) * 1e3 / opt.tokens);
                sample(&run[k].reads, read);
            }
        for (k = 0; k < KINDS; k++) {
            double ms = median(&run[k].ms);
            row_begin();
            cell(0, "%s", k ? "" : models[i].name);
            cell(1, "%.1f", (double)stx_params_size(run[k].lm.params) * 1e-6);
            cell(2, "%s", kind_name[k]);
            cell(3, "%.2f", ms);
            cell(4, "%.2f - %.2f", quantile(&run[k].ms, 0), quantile(&run[k].ms, 1));
            cell(5, "%.1f", 1e3 / ms);
            cell(6, "%.1f", run[k].bytes / ms * 1e-6);
            cell(7, "%.1f", median(&run[k].reads));
            cell(8, "%.2f", run[k].bytes / ms * 1e-6 / median(&run[k].reads));
            cell(9, "%.2f", median(&run[0].ms) / ms);
        }
        for (k = 0; k < KINDS; k++) {
            run[k].lm.gen_free(run[k].gen);
            stx_destroy(run[k].lm.ctx);
        }
    }
    print_table();
    memory_free(&m);
    stx_destroy(reader);
}

static void overheads(void) {
    enum { EACH = 500 };

    static struct {
        stx_lm lm;
        void *gen;
        samples us;
    } run[NARROWS];

    int i, r, n, t;
    say("## What a token costs beyond its arithmetic\n\n"
        "The same layers with width %d, a window of %d and %d tokens in the vocabulary: one "
        "stream, microseconds a token;\n%d tokens a round, median of %d interleaved rounds.\n\n",
        NARROW, NARROW_WINDOW, NARROW_VOCAB, EACH, opt.rounds);
    header("model|threads|us a token|range");
    for (t = 0; t < 2; t++) {
        const int all = opt.threads;
        if (!t) opt.threads = 1;
        memset(run, 0, sizeof run);
        for (i = 0; i < NARROWS; i++) {
            run[i].lm = narrow[i].make(context());
            check(run[i].lm.ctx);
            run[i].gen = run[i].lm.gen_create(run[i].lm.model, 1, narrow[i].window);
            check(run[i].lm.ctx);
        }
        for (r = -1; r < opt.rounds; r++)
            for (i = 0; i < NARROWS; i++) {
                double at = seconds();
                for (n = 0; n < EACH; n++) {
                    const int32_t id = n * 37 % NARROW_VOCAB;
                    run[i].lm.gen_feed(run[i].gen, &id, 1);
                }
                check(run[i].lm.ctx);
                if (r >= 0) sample(&run[i].us, (seconds() - at) * 1e6 / EACH);
            }
        for (i = 0; i < NARROWS; i++) {
            row_begin();
            cell(0, "%s", narrow[i].name);
            cell(1, "%d", stx_threads(run[i].lm.ctx));
            cell(2, "%.1f", median(&run[i].us));
            cell(3, "%.1f - %.1f", quantile(&run[i].us, 0), quantile(&run[i].us, 1));
            run[i].lm.gen_free(run[i].gen);
            stx_destroy(run[i].lm.ctx);
        }
        opt.threads = all;
    }
    print_table();
}

int main(int argc, char **argv) {
    int i;
    for (i = 1; i + 1 < argc; i += 2) {
        int v = atoi(argv[i + 1]);
        if (!strcmp(argv[i], "--append"))
            report_path = argv[i + 1];
        else if (!strcmp(argv[i], "--threads") && v >= 0)
            opt.threads = v;
        else if (!strcmp(argv[i], "--rounds") && v > 0 && v < MAX_SAMPLES)
            opt.rounds = v;
        else if (!strcmp(argv[i], "--tokens") && v > 0 && v <= PROMPT)
            opt.tokens = v;
        else if (!strcmp(argv[i], "--mb") && v > 0)
            opt.megabytes = (size_t)v;
        else if (!strcmp(argv[i], "--dim") && v >= STX_PACK_MIN)
            opt.dim = (size_t)v;
        else
            break;
    }
    if (i < argc)
        die("options: --threads N, --rounds N, --tokens N (at most 64), --mb N, --dim N, --append "
            "FILE");
    products();
    tokens();
    overheads();
    return 0;
}
