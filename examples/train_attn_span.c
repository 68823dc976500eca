/* train_attn_span.c - trains, evaluates and samples the Sequential Transformer of seqtx_attn_span.h on text.

       cc -O3 -march=native -fopenmp train_attn_span.c -lm -o train_attn_span
       ./train_attn_span --data FILE --steps 2000 --checkpoint run.safetensors
       ./train_attn_span --help

   The training loop is the function train(), in the open; options, log and terminal are train.h's. */
#include "train.h"
#define SEQTX_IMPLEMENTATION
#include "../seqtx_attn_span.h"

// >>options ----------------------------------------------------------------------------------------------------------

enum { TOKENS_BYTES, TOKENS_COMPACT, TOKENS_CHARS, TOKENS_WORDS };
enum { UNIT_AUTO, UNIT_BPC, UNIT_PPL };

static struct {
    uint64_t nlayers, hid_sz, inner_hid_sz, nheads, attn_span, block_sz, pers_mem_size;
    int adapt_span, adapt_span_cache, adapt_io, adapt_io_tied, literal, recompute;
    double adapt_span_loss, adapt_span_ramp, adapt_span_init, adapt_io_divval, dropout, emb_dropout;
    const char *cutoffs;
    double lr, momentum, grad_clip, lr_min, weight_decay;
    uint64_t lr_warmup, batch_sz, batch_split, niter, nbatches, steps;
    int optim, schedule, full_eval, eval_only, no_train;
    const char *data, *checkpoint, *log, *tensorboard, *prompt;
    int tokens, unit, threads, precision, device, tf32, no_graph, tune;
    uint64_t gpu;
    uint64_t min_count;
    uint64_t seed, eval_batch_sz, eval_every, eval_blocks, save_every, log_every, generate, top_k;
    double temperature, top_p, max_memory;
} opt = {
    8, 256, 1024, 2, 32, 64, 0,
    0, 1, 0, 0, 0, 0,
    0, 32, 0, 4, 0.2, 0,
    NULL,
    0.03, 0.9, 0, 0, 0,
    0, 64, 1, 1000, 1000, 0,
    1, 0, 0, 0, 0,
    NULL, NULL, NULL, NULL, NULL,
    TOKENS_BYTES, UNIT_AUTO, 0, STX_PREC_F32, STX_CPU, 0, 0, 0,
    0,
    0,
    1, 0, 0, 0, 0, 0, 0, 0,
    0.8, 0.95, 0
};

static tr_opt table[] = {
    TR_GROUP("Model"),
    TR_SIZE("nlayers", &opt.nlayers, 1, 4096, "layers"),
    TR_SIZE("hid-sz", &opt.hid_sz, 1, 1u << 29, "hidden size d"),
    TR_SIZE("inner-hid-sz", &opt.inner_hid_sz, 1, 1u << 30, "inner size of the feed-forward (unused with --pers-mem-size)"),
    TR_SIZE("nheads", &opt.nheads, 1, 256, "attention heads; must divide --hid-sz"),
    TR_SIZE("attn-span", &opt.attn_span, 1, 1u << 30, "largest attention span, tokens"),
    TR_SIZE("pers-mem-size", &opt.pers_mem_size, 0, 1u << 30, "persistent vectors per head in place of the feed-forward (all-attention)"),
    TR_REAL_OPEN("dropout", &opt.dropout, TR_OPEN_MAX, 0, 1, "on attention weights and inside the feed-forward"),
    TR_REAL_OPEN("emb-dropout", &opt.emb_dropout, TR_OPEN_MAX, 0, 1, "on the embedding and the last hidden state"),
    TR_FLAG("literal", &opt.literal, "the reference's own forms: eps 1e-8 after the softmax, empty memory attended to as zeros"),
    TR_FLAG("recompute", &opt.recompute, "make activations again in backward: less memory, more time"),
    TR_GROUP("Adaptive span"),
    TR_FLAG("adapt-span", &opt.adapt_span, "learn a span for each head"),
    TR_REAL("adapt-span-loss", &opt.adapt_span_loss, 0, 1e6, "weight of the span penalty"),
    TR_REAL("adapt-span-ramp", &opt.adapt_span_ramp, 1, 1e9, "length of the soft end of a span"),
    TR_REAL("adapt-span-init", &opt.adapt_span_init, 0, 1, "first span, as a fraction of --attn-span"),
    TR_FLAG("adapt-span-cache", &opt.adapt_span_cache, "keep only as much memory as the spans need"),
    TR_GROUP("Adaptive input and output"),
    TR_FLAG("adapt-io", &opt.adapt_io, "adaptive embedding and softmax, for large vocabularies"),
    TR_FLAG("adapt-io-tied", &opt.adapt_io_tied, "input and output share tables and projections"),
    TR_REAL_OPEN("adapt-io-divval", &opt.adapt_io_divval, TR_OPEN_MIN, 1, 1e6, "each cluster is this much narrower than the one before"),
    TR_TEXT("adapt-io-cutoffs", &opt.cutoffs, "cluster ends, as 20000,40000,200000 (which is the default)"),
    TR_GROUP("Optimisation"),
    TR_CHOICE("optim", &opt.optim, "adagrad|sgd|adam|adamw", "optimiser"),
    TR_REAL("lr", &opt.lr, 0, 1e6, "learning rate"),
    TR_CHOICE("schedule", &opt.schedule, "constant|cosine|inv-sqrt", "learning rate after the warm-up"),
    TR_SIZE("lr-warmup", &opt.lr_warmup, 0, TR_INF, "updates of linear warm-up"),
    TR_REAL("lr-min", &opt.lr_min, 0, 1e6, "end of the cosine"),
    TR_REAL("momentum", &opt.momentum, 0, 1, "of sgd"),
    TR_REAL("weight-decay", &opt.weight_decay, 0, 1e6, "of sgd, adam (in the gradient) and adamw (decoupled)"),
    TR_REAL("grad-clip", &opt.grad_clip, 0, 1e9, "largest gradient norm: per tensor with adagrad, of all together otherwise; 0: none"),
    TR_SIZE("batch-sz", &opt.batch_sz, 1, 1u << 30, "parallel streams of text"),
    TR_SIZE("batch-split", &opt.batch_split, 1, 1u << 30, "work on the batch in this many parts, one after the other (less memory)"),
    TR_SIZE("block-sz", &opt.block_sz, 1, 1u << 30, "tokens of each stream per step"),
    TR_SIZE("niter", &opt.niter, 1, 1u << 30, "iterations of --nbatches steps"),
    TR_SIZE("nbatches", &opt.nbatches, 1, 1u << 30, "steps per iteration; after each the model is evaluated and saved"),
    TR_SIZE("steps", &opt.steps, 0, TR_INF, "steps in all, instead of niter x nbatches; 0: niter x nbatches"),
    TR_SIZE("seed", &opt.seed, 0, TR_INF, "of initial values, dropout, positions and sampling"),
    TR_GROUP("Data"),
    TR_TEXT("data", &opt.data, "a text file (last 5 % test, 5 % before them validation), or a directory with train.txt, valid.txt, test.txt"),
    TR_CHOICE("tokens", &opt.tokens, "bytes|bytes-compact|chars|words", "what a token is; compact: bytes that occur, newline is <eos>"),
    TR_SIZE("min-count", &opt.min_count, 0, TR_INF, "words or characters seen fewer times become <unk>; 2 or more makes an <unk> for what is new"),
    TR_CHOICE("data-unit", &opt.unit, "auto|bpc|ppl", "report bits per byte or perplexity; auto: perplexity for words"),
    TR_GROUP("Running"),
    TR_TEXT("checkpoint", &opt.checkpoint, "save here, and go on from it if it is there (safetensors)"),
    TR_SIZE("save-every", &opt.save_every, 0, TR_INF, "steps between saves; 0: --nbatches"),
    TR_SIZE("eval-every", &opt.eval_every, 0, TR_INF, "steps between evaluations; 0: --nbatches"),
    TR_SIZE("eval-blocks", &opt.eval_blocks, 0, TR_INF, "blocks per evaluation while training (given here, also of the one at the end, which is else of the whole text); 0: a tenth of --nbatches"),
    TR_SIZE("eval-batch-sz", &opt.eval_batch_sz, 0, 1u << 30, "streams in evaluation; 0: --batch-sz, fewer if the text is short"),
    TR_SIZE("log-every", &opt.log_every, 0, TR_INF, "steps between log lines; 0: 10"),
    TR_TEXT("log", &opt.log, "append JSON lines to this file"),
    TR_TEXT("tensorboard", &opt.tensorboard, "write TensorBoard event files into this directory"),
    TR_FLAG("full-eval-mode", &opt.full_eval, "evaluate on the whole validation and test text as the reference counts them, then stop"),
    TR_FLAG("eval-only", &opt.eval_only, "evaluate on the whole validation and test text, every token, then stop"),
    TR_FLAG("no-train", &opt.no_train, "do not train: only --generate"),
    TR_INT("threads", &opt.threads, 0, 4096, "threads; 0: all"),
    TR_CHOICE("precision", &opt.precision, "f32|bf16", "bf16 on a CPU: factors of products rounded to bfloat16, all else float; on a GPU: activations stored as bfloat16, parameters and sums float"),
    TR_CHOICE("device", &opt.device, "cpu|cuda", "cuda: in programs built with CUDA (make cuda)"),
    TR_SIZE("gpu", &opt.gpu, 0, 1023, "which one, as CUDA counts them from 0"),
    TR_FLAG("tf32", &opt.tf32, "cuda, f32: products of TF32 factors, faster and less exact"),
    TR_FLAG("tune", &opt.tune, "cuda: time the algorithms of each product and keep the fastest; a repeated run may differ in the last bits"),
    TR_FLAG("no-graph", &opt.no_graph, "cuda: launch every kernel of every step, in place of replaying steps as CUDA graphs"),
    TR_REAL("max-memory", &opt.max_memory, 0, 1e9, "GiB of the device; 0: nine tenths of the machine's, on a GPU all that it has"),
    TR_GROUP("Generation"),
    TR_SIZE("generate", &opt.generate, 0, TR_INF, "write this many tokens at the end"),
    TR_TEXT("prompt", &opt.prompt, "text to go on from"),
    TR_REAL("temperature", &opt.temperature, 0, 1000, "0: always the likeliest token"),
    TR_SIZE("top-k", &opt.top_k, 0, TR_INF, "draw among this many likeliest; 0: all"),
    TR_REAL("top-p", &opt.top_p, 0, 1, "draw among the likeliest that make up this probability; 0 or 1: all"),
    TR_END
};

/* The published experiments (1905.07799, 1907.01470; spec attn_span 3). Fine-tuning, where the papers do it: the same
   command with lr / 10 and a larger --niter. */
#define ADAGRAD "optim=adagrad", "lr=0.07", "grad-clip=0.03", "momentum=0", "adapt-span", "adapt-span-init=0", "adapt-span-ramp=32", "batch-sz=64", "nbatches=1000", "data-unit=bpc"
static const char *const p_enwik8_small[] = {ADAGRAD, "tokens=bytes-compact", "nlayers=8", "hid-sz=256", "inner-hid-sz=1024", "nheads=4", "attn-span=1024", "block-sz=256", "dropout=0", "adapt-span-loss=0.000002", "lr-warmup=8000", "niter=150", NULL};
static const char *const p_enwik8[] = {ADAGRAD, "tokens=bytes-compact", "nlayers=12", "hid-sz=512", "inner-hid-sz=2048", "nheads=8", "attn-span=8192", "block-sz=512", "dropout=0.3", "adapt-span-loss=0.0000005", "lr-warmup=32000", "niter=600", NULL};
static const char *const p_enwik8_large[] = {ADAGRAD, "tokens=bytes-compact", "nlayers=24", "hid-sz=768", "inner-hid-sz=4096", "nheads=8", "attn-span=8192", "block-sz=512", "dropout=0.4", "adapt-span-loss=0.0000005", "lr-warmup=32000", "niter=150", "batch-split=2", NULL};
static const char *const p_text8[] = {ADAGRAD, "tokens=chars", "nlayers=12", "hid-sz=512", "inner-hid-sz=2048", "nheads=8", "attn-span=8192", "block-sz=512", "dropout=0.3", "adapt-span-loss=0.0000005", "lr-warmup=32000", "niter=900", NULL};
static const char *const p_text8_large[] = {ADAGRAD, "tokens=chars", "nlayers=24", "hid-sz=768", "inner-hid-sz=4096", "nheads=8", "attn-span=8192", "block-sz=512", "dropout=0.4", "adapt-span-loss=0.0000005", "lr-warmup=32000", "niter=250", "batch-split=2", NULL};
static const char *const p_enwik8_pers_small[] = {ADAGRAD, "tokens=bytes-compact", "nlayers=18", "hid-sz=512", "inner-hid-sz=1", "nheads=8", "attn-span=8192", "block-sz=512", "dropout=0.3", "adapt-span-loss=0.0000001", "lr-warmup=32000", "niter=450", "batch-split=2", "pers-mem-size=1024", NULL};
static const char *const p_enwik8_pers[] = {ADAGRAD, "tokens=bytes-compact", "nlayers=36", "hid-sz=512", "inner-hid-sz=1", "nheads=8", "attn-span=8192", "block-sz=512", "dropout=0.4", "adapt-span-loss=0.0000001", "lr-warmup=32000", "niter=200", "batch-split=2", "pers-mem-size=2048", NULL};
static const char *const p_wiki103_pers[] = {"tokens=words", "data-unit=ppl", "optim=adam", "lr=0.00025", "grad-clip=1", "momentum=0", "lr-warmup=8000", "nlayers=36", "hid-sz=512", "inner-hid-sz=1", "nheads=8", "attn-span=2048", "block-sz=256", "batch-sz=64", "batch-split=2", "dropout=0.3", "emb-dropout=0.1", "adapt-span", "adapt-span-init=0", "adapt-span-ramp=32", "adapt-span-loss=0.0000005", "pers-mem-size=2048", "adapt-io", "adapt-io-tied", "adapt-io-divval=4", "nbatches=1000", "niter=800", NULL};
static const char *const p_demo[] = {"tokens=bytes", "nlayers=3", "hid-sz=128", "inner-hid-sz=512", "nheads=4", "attn-span=256", "block-sz=64", "batch-sz=16", "dropout=0", "adapt-span", "adapt-span-loss=0.000002", "adapt-span-init=0.06", "optim=adam", "lr=0.003", "schedule=cosine", "lr-warmup=60", "grad-clip=1", "steps=4800", "nbatches=1200", "eval-blocks=20", "log-every=100", NULL};
static const tr_preset presets[] = {
    {"demo", "a small byte model that learns in two minutes on two cores (make demo)", p_demo},
    {"enwik8_small", "6.5M parameters, 8 layers, span 1024: published dev ~1.3 bpc", p_enwik8_small},
    {"enwik8", "38.5M parameters, 12 layers, span 8192: published test 1.02 bpc", p_enwik8},
    {"enwik8_large", "209M parameters, 24 layers: published test 0.98 bpc", p_enwik8_large},
    {"text8", "38.4M parameters, 12 layers: published test 1.11 bpc", p_text8},
    {"text8_large", "209M parameters, 24 layers: published test 1.07 bpc", p_text8_large},
    {"enwik8_pers_small", "all-attention, 38.5M parameters, 18 layers: published test 1.01 bpc", p_enwik8_pers_small},
    {"enwik8_pers", "all-attention, 114M parameters, 36 layers: published test 0.98 bpc", p_enwik8_pers},
    {"wiki103_pers", "all-attention on words, 132M parameters: published test 19.7 ppl", p_wiki103_pers},
    TR_PRESET_END
};
/* What a checkpoint decides: these are taken from it, and must agree when they are given as well. */
static const char *const from_checkpoint[] = {"nlayers", "hid-sz", "inner-hid-sz", "nheads", "attn-span", "pers-mem-size", "literal", "adapt-span",
    "adapt-span-ramp", "adapt-span-cache", "adapt-io", "adapt-io-tied", "adapt-io-divval", "optim", "momentum", "batch-sz", "batch-split", "block-sz", "tokens", NULL};
/* The same, but what is stored does not depend on it: evaluation and generation may ask for another. */
static const char *const from_checkpoint_run[] = {"precision", NULL};

static tr_options options = {"train_attn_span", "Trains a Sequential Transformer (adaptive attention span, all-attention) on text.", table, presets, NULL};

// >>run: everything that one run works with ---------------------------------------------------------------------------

typedef struct run {
    stx_ctx *x;
    stx_vocab *vocab;
    stx_corpus *text[3];            /* train, valid, test; NULL where there is none */
    stx_batches *batches;           /* of the training text */
    stx_span *model;
    stx_optim *optim;
    stx_span_state **memory;        /* one per part of the batch */
    stx_ids **in, **out;            /* the same: tokens and targets of a step */
    stx_schedule schedule;
    uint64_t step, steps;
    double lr;                      /* of this step */
    uint64_t print;                 /* of the training text: a run goes on with the same one only */
    size_t cutoff[STX_MAX_CLUSTERS - 1], cutoffs;
    int words;                      /* report perplexity */
    char *config;                   /* the options as JSON */
    tr_log log;
    tr_term term;
    tr_board board;
    char err[TR_ERR];
} run;

/* Prints why and gives the exit code of bad input. */
static int refuse(const char *why) {
    fprintf(stderr, "%s: %s\n", options.program, why);
    return 2;
}
/* The context's error into r->err; where memory is short, with the option that says how much there may be. */
static int say_why(run *r) {
    return tr_fail(r->err, TR_ERR, "%s%s", stx_error_code(r->x) == STX_ERR_MEMORY ? "--max-memory: " : "", stx_error(r->x));
}
static double metric_of(const run *r, const stx_corpus *text, double nll) {
    if (r->words) return exp(nll);      /* of the mean, not the mean of exponentials */
    return nll / log(2.0) * (double)stx_corpus_size(text) / (double)stx_corpus_bytes(text);
}
static const char *metric_name(const run *r) { return r->words ? "ppl" : "bpb"; }

// >>data

/* A number for the training text: a hash of up to 256 pieces of it, spread evenly. Another text of the same length gives another. */
static uint64_t print_of(const stx_corpus *c) {
    size_t n = stx_corpus_size(c), step = n / 256 > 256 ? n / 256 : 256, at, i;
    uint64_t h = 14695981039346656037u;
    int32_t piece[256];
    for (at = 0; at < n; at += step) {
        size_t m = n - at < 256 ? n - at : 256;
        if (!stx_corpus_read(c, at, m, piece)) return 0;
        for (i = 0; i < m; i++) h = (h ^ (uint32_t)piece[i]) * 1099511628211u;
    }
    return h;
}
static int open_part(run *r, int part, const char *path, uint64_t begin, uint64_t end) {
    r->text[part] = stx_corpus_open(r->x, r->vocab, path, begin, end);
    return r->text[part] != NULL;
}
static int open_data(run *r, int have_vocab) {
    static const char *const names[3] = {"train.txt", "valid.txt", "test.txt"};
    char path[3][4096];
    uint64_t begin[3] = {0, 0, 0}, end[3] = {0, 0, 0};
    struct stat st;
    int part, dir;
    if (!opt.data) return tr_fail(r->err, TR_ERR, "no --data: give a text file, or a directory with train.txt, valid.txt and test.txt");
    if (stat(opt.data, &st)) return tr_fail(r->err, TR_ERR, "--data %s: %s", opt.data, strerror(errno));
    dir = S_ISDIR(st.st_mode);
    for (part = 0; part < 3; part++) {
        int n = dir ? snprintf(path[part], sizeof path[part], "%s/%s", opt.data, names[part]) : snprintf(path[part], sizeof path[part], "%s", opt.data);
        if (n < 0 || (size_t)n >= sizeof path[part]) return tr_fail(r->err, TR_ERR, "--data: the path is too long");
    }
    if (!dir) {
        uint64_t size = (uint64_t)st.st_size;
        if (!S_ISREG(st.st_mode)) return tr_fail(r->err, TR_ERR, "--data %s: neither a file nor a directory", opt.data);
        if (size < 64) return tr_fail(r->err, TR_ERR, "--data %s: %llu bytes are too short to train on", opt.data, (unsigned long long)size);
        end[0] = begin[1] = size - size / 20 * 2;
        end[1] = begin[2] = size - size / 20;
        end[2] = size;
    }
    if (!have_vocab) {
        stx_vocab_desc d;
        memset(&d, 0, sizeof d);
        d.kind = opt.tokens == TOKENS_CHARS ? STX_TOK_CHARS : opt.tokens == TOKENS_WORDS ? STX_TOK_WORDS : STX_TOK_BYTES;
        d.compact = opt.tokens == TOKENS_COMPACT;
        d.eos = opt.tokens == TOKENS_CHARS;
        d.min_count = opt.min_count;
        d.order = opt.adapt_io ? STX_ORDER_COUNT_LATER : STX_ORDER_FIRST;
        r->vocab = stx_vocab_build(r->x, &d, path[0], begin[0], end[0]);
        if (!r->vocab) return say_why(r);
    }
    for (part = 0; part < 3; part++) {
        if (dir && part && stat(path[part], &st) && errno == ENOENT) continue;      /* no validation or test text: fine */
        if (!open_part(r, part, path[part], begin[part], end[part])) return say_why(r);
    }
    for (part = 0; part < 3; part++)
        if (r->text[part] && stx_corpus_size(r->text[part]) < 2) return tr_fail(r->err, TR_ERR, "--data %s: the %s text has fewer than two tokens: nothing can be predicted in it", opt.data, part == 0 ? "training" : part == 1 ? "validation" : "test");
    r->print = print_of(r->text[0]);
    return 1;
}

// >>checkpoint
/* Parameters, optimiser, memories, step, random state, data position, vocabulary and options, in one safetensors file. */

static int save(run *r) {
    stx_writer *w;
    stx_batches_state pos = stx_batches_get(r->batches);
    size_t part, len = stx_vocab_save(r->vocab, NULL, 0);
    void *blob;
    char prefix[32];
    int ok;
    if (!opt.checkpoint) return 1;
    w = stx_writer_create(r->x);
    blob = malloc(len + 1);
    ok = w && blob && stx_vocab_save(r->vocab, blob, len) == len;
    ok = ok && stx_writer_meta(w, "format", "seqtx.attn_span.1") && stx_writer_meta(w, "config", r->config);
    ok = ok && stx_writer_meta_u64(w, "step", r->step) && stx_writer_meta_u64(w, "tick", stx_tick(r->x)) && stx_writer_meta_u64(w, "seed", opt.seed);
    ok = ok && stx_writer_meta_u64(w, "data.tokens", stx_corpus_size(r->text[0])) && stx_writer_meta_u64(w, "data.print", r->print) && stx_writer_meta_u64(w, "data.position", pos.p);
    ok = ok && stx_writer_meta_u64(w, "data.wraps", pos.wraps) && stx_writer_meta_u64(w, "data.fresh", (uint64_t)pos.fresh);
    ok = ok && stx_params_save(w, r->model->params, "") && stx_optim_save(w, r->optim);
    for (part = 0; ok && part < opt.batch_split; part++) {
        snprintf(prefix, sizeof prefix, "memory.%zu.", part);
        ok = stx_span_state_save(w, r->memory[part], prefix);
    }
    ok = ok && stx_writer_add(w, "vocab", STX_U8, 1, &len, blob);
    ok = ok && stx_writer_seal(w);
    ok = w && ok ? stx_writer_finish(w, opt.checkpoint) : (stx_writer_free(w), 0);
    free(blob);
    return ok;
}
/* Parameters (and what training needs besides, if wanted) from an open checkpoint whose options were adopted. */
static int load(run *r, const stx_file *f, int training) {
    stx_batches_state pos;
    uint64_t tick, seed, tokens, print, fresh;
    size_t part;
    char prefix[32];
    if (!stx_params_load(r->model->params, f, "")) return 0;
    if (!stx_file_meta_u64(r->x, f, "step", &r->step)) return 0;
    if (!training) return 1;
    if (!stx_file_meta_u64(r->x, f, "tick", &tick) || !stx_file_meta_u64(r->x, f, "seed", &seed) ||
        !stx_file_meta_u64(r->x, f, "data.tokens", &tokens) || !stx_file_meta_u64(r->x, f, "data.print", &print) || !stx_file_meta_u64(r->x, f, "data.position", &pos.p) ||
        !stx_file_meta_u64(r->x, f, "data.wraps", &pos.wraps) || !stx_file_meta_u64(r->x, f, "data.fresh", &fresh)) return 0;
    if (seed != opt.seed) { stx_fail(r->x, STX_ERR_ARG, "the checkpoint was made with --seed %llu: give it again, so that the run goes on as it would have", (unsigned long long)seed); return 0; }
    if (tokens != stx_corpus_size(r->text[0])) {
        stx_fail(r->x, STX_ERR_ARG, "the training text has %zu tokens, the checkpoint's had %llu: it is another --data", stx_corpus_size(r->text[0]), (unsigned long long)tokens);
        return 0;
    }
    if (print != r->print) { stx_fail(r->x, STX_ERR_ARG, "the training text is not the one that the checkpoint was trained on: it is another --data, or was changed"); return 0; }
    pos.fresh = fresh != 0;
    if (!stx_optim_load(r->optim, f) || !stx_batches_set(r->batches, pos)) return 0;
    for (part = 0; part < opt.batch_split; part++) {
        snprintf(prefix, sizeof prefix, "memory.%zu.", part);
        if (!stx_span_state_load(r->memory[part], f, prefix)) return 0;
    }
    stx_set_tick(r->x, tick);
    return 1;
}

// >>evaluation
/* Mean nll over a text, nats per token, with a memory of its own: training does not notice. blocks 0: the whole text.
   NaN in error, or when a signal wants the run to stop. */
static double evaluate(run *r, int part, uint64_t blocks, int rule, double *scored) {
    stx_corpus *text = r->text[part];
    size_t B = opt.eval_batch_sz ? opt.eval_batch_sz : opt.batch_sz / opt.batch_split, T = opt.block_sz, t, n = stx_corpus_size(text);
    stx_batches_desc d;
    stx_batches *b;
    stx_span_state *memory;
    int32_t *in, *out;
    double sum = 0, count = 0;
    uint64_t k;
    while (B > 1 && n / B < 2 * (T + 1)) B--;
    if (n < T + 1) T = n > 2 ? n - 2 : 1;
    memset(&d, 0, sizeof d);
    d.B = B; d.T = T;
    b = stx_batches_create(r->x, text, &d);
    memory = stx_span_state_create(r->model, B);
    in = (int32_t *)malloc(B * T * sizeof *in);
    out = (int32_t *)malloc(B * T * sizeof *out);
    if (b && memory && in && out) {
        stx_batches_rewind(b, rule);
        for (k = 0; (!blocks || k < blocks) && stx_batches_next_eval(b, in, out, &t) != STX_BATCH_END && !tr_stop_requested(); k++) {
            stx_begin(r->x, STX_EVAL);
            sum += stx_item(r->x, stx_span_loss(r->model, stx_tokens(r->x, in, B, t), stx_tokens(r->x, out, B, t), memory, memory)) * (double)(B * t);
            count += (double)(B * t);
        }
    }
    free(in);
    free(out);
    stx_span_state_free(memory);
    stx_batches_free(b);
    *scored = count;
    return count > 0 && !tr_stop_requested() ? sum / count : (double)NAN;
}
static void note(run *r, const char *what, int ok) { if (!ok) tr_say(&r->term, "%s: %s", options.program, what); }

static int evaluate_and_report(run *r, int part, uint64_t blocks, int rule) {
    static const char *const split[3] = {"train", "valid", "test"};
    double nll, m, scored;
    char tag[40];
    if (!r->text[part]) return 1;
    nll = evaluate(r, part, blocks, rule, &scored);
    if (tr_stop_requested()) return 1;
    if (!stx_ok(r->x)) return 0;
    m = metric_of(r, r->text[part], nll);
    tr_say(&r->term, "step %llu: %s %s %.4f (loss %.4f%s)", (unsigned long long)r->step, split[part], metric_name(r), m, nll, blocks ? ", part of the text" : "");
    tr_log_begin(&r->log, "eval");
    tr_log_str(&r->log, "split", split[part]);
    tr_log_num(&r->log, "loss", nll);
    tr_log_num(&r->log, metric_name(r), m);
    tr_log_int(&r->log, "step", r->step);
    tr_log_int(&r->log, "tokens", (uint64_t)scored);
    note(r, r->log.err, tr_log_end(&r->log));
    snprintf(tag, sizeof tag, "%s/%s%s", split[part], metric_name(r), blocks ? "_of_part" : "");
    note(r, r->board.err, tr_board_scalar(&r->board, tag, (int64_t)r->step, m));
    return 1;
}

// >>training

enum { NOTE_LOSS };      /* the mean loss of a step, nats per token */

/* One step: forward, backward, update. What changes from step to step comes from r->in, r->out and the optimiser's rate, so that a GPU can
   repeat it without this function (stx_step_run). */
static void step(void *user) {
    run *r = (run *)user;
    stx_ctx *x = r->x;
    size_t part, parts = opt.batch_split;
    for (part = 0; part < parts; part++) {      /* gradients add up over the parts of the batch */
        stx_tensor *loss;
        stx_begin(x, STX_TRAIN);
        loss = stx_span_loss(r->model, r->in[part], r->out[part], r->memory[part], r->memory[part]);
        stx_note(x, NOTE_LOSS, loss, 1.0 / (double)parts, part > 0);
        stx_backward(x, stx_scale(x, stx_span_total(r->model, loss), 1.0 / (double)parts));
    }
    stx_optim_step(r->optim, r->lr);
    stx_span_clamp(r->model);
}

static int train(run *r) {
    stx_ctx *x = r->x;
    size_t B = opt.batch_sz, T = opt.block_sz, parts = opt.batch_split, rows = B / parts, part, bad = 0;
    uint64_t log_every = opt.log_every ? opt.log_every : 10, eval_every = opt.eval_every ? opt.eval_every : opt.nbatches, save_every = opt.save_every ? opt.save_every : opt.nbatches;
    uint64_t eval_blocks = opt.eval_blocks ? opt.eval_blocks : opt.nbatches < 10 ? 1 : opt.nbatches / 10, logged = 0, saved = r->step;
    int32_t *in = (int32_t *)malloc(B * T * sizeof *in), *out = (int32_t *)malloc(B * T * sizeof *out);
    double sum = 0, span_avg, span_max, last = (double)NAN;
    tr_rate rate;
    if (!in || !out) { stx_fail(x, STX_ERR_MEMORY, "no memory for a batch of %zu x %zu tokens", B, T); return 0; }
    tr_rate_start(&rate, tr_seconds());
    while (r->step < r->steps && !tr_stop_requested() && stx_ok(x)) {
        double nll, lr = r->lr = stx_schedule_lr(&r->schedule, r->step + 1);
        int fresh = stx_batches_next(r->batches, in, out), done;
        uint64_t key = 0;
        if (fresh == STX_BATCH_END) break;

        for (part = 0; part < parts; part++) {
            if (fresh == STX_BATCH_FRESH) stx_span_state_reset(r->memory[part]);
            stx_tokens_set(x, r->in[part], in + part * rows * T);
            stx_tokens_set(x, r->out[part], out + part * rows * T);
            key = stx_span_key(r->model, r->in[part], r->out[part], r->memory[part], key);
        }
        stx_optim_rate(r->optim, lr);
        stx_step_run(x, key, step, r);
        nll = stx_noted(x, NOTE_LOSS);
        done = stx_optim_sync(r->optim);
        if (!stx_ok(x)) break;
        r->step++;
        if (done) { sum += nll; logged++; last = nll; bad = 0; }
        else {                                      /* the memory may hold what is not a number: start it again */
            tr_say(&r->term, "step %llu: the %s is not finite; this update is skipped and the memory is emptied", (unsigned long long)r->step, isfinite(nll) ? "gradient" : "loss");
            for (part = 0; part < parts; part++) stx_span_state_reset(r->memory[part]);
            if (++bad == 50) { stx_fail(x, STX_ERR_ARG, "50 updates one after the other were not finite: use a smaller --lr or a --grad-clip"); break; }
        }
        tr_rate_add(&rate, tr_seconds(), 1, (double)(B * T));

        {
            tr_progress p;
            memset(&p, 0, sizeof p);
            p.step = r->step; p.steps = r->steps;
            p.loss = last;
            p.unit = metric_name(r);
            p.metric = metric_of(r, r->text[0], last);
            p.lr = lr;
            p.tokens_per_s = tr_rate_tokens(&rate);
            p.left = tr_rate_left(&rate, r->steps - r->step);
            tr_show(&r->term, &p, r->step % log_every == 0 || r->step == r->steps);
        }
        if (r->step % log_every == 0 || r->step == r->steps) {
            double mean = logged ? sum / (double)logged : (double)NAN;
            stx_span_stats(r->model, &span_avg, &span_max);
            tr_log_begin(&r->log, "train");
            tr_log_int(&r->log, "step", r->step);
            tr_log_num(&r->log, "loss", mean);
            tr_log_num(&r->log, metric_name(r), metric_of(r, r->text[0], mean));
            tr_log_num(&r->log, "lr", lr);
            tr_log_num(&r->log, "grad_norm", r->optim->grad_norm);
            tr_log_num(&r->log, "tokens_per_s", tr_rate_tokens(&rate));
            tr_log_int(&r->log, "peak_bytes", stx_peak_bytes(x));
            tr_log_num(&r->log, "span_avg", span_avg);
            tr_log_num(&r->log, "span_max", span_max);
            note(r, r->log.err, tr_log_end(&r->log));
            tr_board_scalar(&r->board, "train/loss", (int64_t)r->step, mean);
            tr_board_scalar(&r->board, "train/lr", (int64_t)r->step, lr);
            tr_board_scalar(&r->board, "train/grad_norm", (int64_t)r->step, r->optim->grad_norm);
            tr_board_scalar(&r->board, "span/avg", (int64_t)r->step, span_avg);
            note(r, r->board.err, tr_board_scalar(&r->board, "span/max", (int64_t)r->step, span_max));
            sum = 0;
            logged = 0;
        }
        if (r->step % eval_every == 0 && r->step < r->steps) {
            if (!evaluate_and_report(r, 1, eval_blocks, STX_EVAL_ALL)) {      /* say why at the end, but lose nothing */
                say_why(r);
                stx_clear_error(x);
                save(r);
                stx_fail(x, STX_ERR_ARG, "the evaluation failed: %s", r->err);
                break;
            }
            tr_rate_skip(&rate, tr_seconds());
        }
        if (r->step % save_every == 0 && r->step < r->steps) {
            if (!save(r)) break;
            saved = r->step;
            tr_rate_skip(&rate, tr_seconds());
        }
    }
    free(in);
    free(out);
    if (stx_ok(x) && r->step > saved) save(r);
    return stx_ok(x);
}

// >>generation

static int generate(run *r) {
    stx_span_gen *g = stx_span_gen_create(r->model, 1);
    size_t V = r->model->desc.vocab, n, len;
    const char *prompt = opt.prompt && *opt.prompt ? opt.prompt : NULL;
    int32_t *ids, token = stx_vocab_eos(r->vocab);
    stx_real *work = (stx_real *)malloc(V * sizeof *work);
    const stx_real *logits;
    stx_sampling s;
    uint64_t i;
    char piece[4096];
    if (!g || !work) { free(work); return 0; }
    memset(&s, 0, sizeof s);
    s.temperature = opt.temperature; s.top_k = opt.top_k; s.top_p = opt.top_p; s.seed = opt.seed;
    if (prompt) {
        n = stx_vocab_encode(r->vocab, prompt, strlen(prompt), NULL, 0);
        if (n == STX_NPOS || !n) { free(work); stx_fail(r->x, STX_ERR_ARG, "--prompt gives no tokens"); return 0; }
        ids = (int32_t *)malloc(n * sizeof *ids);
        if (!ids) { free(work); return 0; }
        stx_vocab_encode(r->vocab, prompt, strlen(prompt), ids, n);
        fputs(prompt, stdout);
        if (stx_vocab_kind(r->vocab) == STX_TOK_WORDS) putchar(' ');
        logits = stx_span_gen_feed(g, ids, n);
        free(ids);
    } else {
        if (token < 0) token = stx_vocab_find(r->vocab, "\n", 1);
        if (token < 0) token = 0;
        logits = stx_span_gen_feed(g, &token, 1);
    }
    for (i = 0; i < opt.generate && logits && !tr_stop_requested(); i++) {
        token = stx_sample(&s, i, logits, V, work);
        if (token < 0) { stx_fail(r->x, STX_ERR_ARG, "the model's output is not finite"); break; }
        len = stx_vocab_decode(r->vocab, &token, 1, piece, sizeof piece);
        if (len != STX_NPOS) fwrite(piece, 1, len < sizeof piece ? len : sizeof piece, stdout);
        fflush(stdout);
        logits = stx_span_gen_feed(g, &token, 1);
    }
    putchar('\n');
    if (fflush(stdout) || ferror(stdout)) stx_fail(r->x, STX_ERR_IO, "the generated text cannot be written: %s", strerror(errno));
    free(work);
    stx_span_gen_free(g);
    return stx_ok(r->x);
}

static void print_spans(const run *r) {
    size_t l, h;
    if (!opt.adapt_span) return;
    printf("learned span of each head, tokens (of %llu; a ramp of %g comes on top)\n", (unsigned long long)opt.attn_span, opt.adapt_span_ramp);
    for (l = 0; l < opt.nlayers; l++) {
        printf("  layer %2zu ", l);
        for (h = 0; h < opt.nheads; h++) printf(" %6.0f", stx_span_of(r->model, l, h));
        printf("\n");
    }
}

// >>main

static int make_model(run *r) {
    stx_span_desc d;
    stx_optim_desc od;
    size_t part;
    double need, limit = (double)stx_ctx_desc(r->x)->max_bytes;
    memset(&d, 0, sizeof d);
    memset(&od, 0, sizeof od);
    d.vocab = stx_vocab_size(r->vocab);
    d.layers = opt.nlayers; d.dim = opt.hid_sz; d.heads = opt.nheads; d.inner = opt.inner_hid_sz; d.span = opt.attn_span;
    d.adapt_span = opt.adapt_span; d.full_cache = !opt.adapt_span_cache; d.ramp = opt.adapt_span_ramp; d.span_init = opt.adapt_span_init;
    d.span_loss = opt.adapt_span_loss; d.pers = opt.pers_mem_size; d.adapt_io = opt.adapt_io; d.adapt_io_tied = opt.adapt_io_tied;
    d.divval = opt.adapt_io_divval; d.dropout = opt.dropout; d.emb_dropout = opt.emb_dropout;
    d.literal_eps = d.literal_memory = opt.literal;
    d.recompute = opt.recompute;
    memcpy(d.cutoff, r->cutoff, sizeof d.cutoff);
    d.cutoffs = r->cutoffs;
    need = (double)stx_span_count(&d) * sizeof(stx_real) * 4;      /* value, gradient, two optimiser states */
    if (limit > 0 && need > limit) return tr_fail(r->err, TR_ERR, "the model alone needs %.3g GiB, more than the %.3g GiB of --max-memory: use smaller sizes", need / (1 << 30), limit / (1 << 30));
    r->model = stx_span_create(r->x, &d);
    od.kind = opt.optim == 0 ? STX_ADAGRAD : opt.optim == 1 ? STX_SGD : opt.optim == 2 ? STX_ADAM : STX_ADAMW;
    od.momentum = opt.momentum; od.clip = opt.grad_clip; od.weight_decay = opt.weight_decay;
    if (r->model && !opt.eval_only && !opt.full_eval && !opt.no_train) {
        stx_batches_desc bd;
        memset(&bd, 0, sizeof bd);
        bd.B = opt.batch_sz; bd.T = opt.block_sz; bd.seed = opt.seed;
        r->batches = stx_batches_create(r->x, r->text[0], &bd);
        if (!r->batches && stx_error_code(r->x) != STX_ERR_MEMORY) return tr_fail(r->err, TR_ERR, "--data %s, --batch-sz %llu, --block-sz %llu: %s", opt.data, (unsigned long long)opt.batch_sz, (unsigned long long)opt.block_sz, stx_error(r->x));
        r->optim = stx_optim_create(r->model->params, &od);
        r->memory = (stx_span_state **)stx_block(r->x, opt.batch_split * sizeof *r->memory);
        r->in = (stx_ids **)stx_block(r->x, 2 * opt.batch_split * sizeof *r->in);
        r->out = r->in + opt.batch_split;
        for (part = 0; r->memory && r->in && part < opt.batch_split; part++) {
            r->memory[part] = stx_span_state_create(r->model, opt.batch_sz / opt.batch_split);
            r->in[part] = stx_tokens_create(r->x, opt.batch_sz / opt.batch_split, opt.block_sz);
            r->out[part] = stx_tokens_create(r->x, opt.batch_sz / opt.batch_split, opt.block_sz);
        }
    }
    if (!stx_ok(r->x)) return say_why(r);
    return 1;
}
static int parse_cutoffs(run *r) {
    const char *s = opt.cutoffs;
    while (s && *s) {
        char *end;
        unsigned long long v = strtoull(s, &end, 10);
        if (end == s || *s < '0' || *s > '9' || (*end && *end != ',') || r->cutoffs == STX_MAX_CLUSTERS - 1 || v == 0)
            return tr_fail(r->err, TR_ERR, "--adapt-io-cutoffs %s: want up to %d rising numbers with commas between, as 20000,40000,200000", opt.cutoffs, STX_MAX_CLUSTERS - 1);
        r->cutoff[r->cutoffs++] = (size_t)v;
        s = *end ? end + 1 : end;
    }
    return 1;
}

/* Writing must not fail for the first time after hours: the directory has to be there and to take files. */
static int can_write(run *r, const char *option, const char *path) {
    char dir[4096];
    struct stat link, target;
    const char *slash = strrchr(path, '/');
    size_t n = slash ? (size_t)(slash - path) + 1 : 0;
    if (n + 2 > sizeof dir) return tr_fail(r->err, TR_ERR, "--%s: the path is too long", option);
    if (!*path) return tr_fail(r->err, TR_ERR, "--%s: got '', wants the name of a file", option);
    memcpy(dir, path, n);
    memcpy(dir + n, ".", 2);
    if (!lstat(path, &link) && S_ISLNK(link.st_mode) && stat(path, &target)) return tr_fail(r->err, TR_ERR, "--%s %s: a symbolic link that leads nowhere", option, path);
    if (access(dir, W_OK | X_OK) || (access(path, W_OK) && errno != ENOENT)) return tr_fail(r->err, TR_ERR, "--%s %s: cannot write there: %s", option, path, strerror(errno));
    return 1;
}

static int make_context(run *r) {
    stx_desc cd;
    memset(&cd, 0, sizeof cd);
    cd.threads = opt.threads;
    cd.precision = opt.precision;
    cd.device = opt.device;
    cd.gpu = (int)opt.gpu;
    cd.tf32 = opt.tf32;
    cd.tune = opt.tune;
    cd.no_graph = opt.no_graph || opt.adapt_io;      /* with adapt_io the sizes of a step depend on its tokens */
    cd.seed = opt.seed;
    cd.max_bytes = opt.max_memory > 0 ? (size_t)(opt.max_memory * 1073741824.0) : opt.device == STX_CUDA ? 0 : (size_t)((double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGESIZE) * 0.9);
    r->x = stx_create(&cd);
    if (!r->x) return tr_fail(r->err, TR_ERR, "no memory");
    if (stx_ok(r->x)) return 1;
    if (stx_error_code(r->x) == STX_ERR_DEVICE) return tr_fail(r->err, TR_ERR, "--device %s --precision %s: %s", opt.device ? "cuda" : "cpu", opt.precision ? "bf16" : "f32", stx_error(r->x));
    return say_why(r);
}

static int run_main(run *r, int argc, char **argv) {
    stx_file *f = NULL;
    struct stat st;
    int training, code = 0, ok;
    char size[TR_TEXT_MAX], mem[TR_TEXT_MAX];
    switch (tr_parse(&options, argc, argv, r->err, TR_ERR)) {
    case 0: return refuse(r->err);
    case 2: return 0;
    default: break;
    }
    training = !opt.eval_only && !opt.full_eval && !opt.no_train;
    if (!make_context(r)) return refuse(r->err);

    /* the checkpoint first: it decides the shape of the model, the precision and the vocabulary */
    if (opt.checkpoint && (!stat(opt.checkpoint, &st) || errno != ENOENT)) {
        const char *config, *format;
        const stx_entry *e;
        f = stx_file_open(r->x, opt.checkpoint);
        if (!f) return refuse(stx_error(r->x));
        format = stx_file_meta(f, "format");
        config = stx_file_meta(f, "config");
        e = stx_file_find(f, "vocab");
        ok = format && !strcmp(format, "seqtx.attn_span.1") && config && e && e->dtype == STX_U8;
        if (ok && !stx_file_sealed(f)) code = refuse(stx_error(r->x));
        else if (!ok) { snprintf(r->err, TR_ERR, "%s is a safetensors file, but no checkpoint of this program", opt.checkpoint); code = refuse(r->err); }
        else if (!tr_options_adopt(&options, config, from_checkpoint, r->err, TR_ERR)) code = refuse(r->err);
        else if ((training || !tr_given(&options, "precision")) && !tr_options_adopt(&options, config, from_checkpoint_run, r->err, TR_ERR)) code = refuse(r->err);
        else {
            /* cutoffs are text, which cannot be adopted: the run's must give the same shapes, or loading says so */
            char text[256];
            if (!opt.cutoffs && tr_json_find(config, "adapt-io-cutoffs", text, sizeof text) == 1 && strcmp(text, "null")) {
                static char keep[256];
                memcpy(keep, text, sizeof keep);
                opt.cutoffs = keep;
            }
            if (stx_ctx_desc(r->x)->precision != opt.precision) {       /* the checkpoint's: a context has one from its beginning */
                stx_file_close(f);
                stx_destroy(r->x);
                if (!make_context(r)) return refuse(r->err);
                f = stx_file_open(r->x, opt.checkpoint);
                e = f ? stx_file_find(f, "vocab") : NULL;
            }
            r->vocab = e ? stx_vocab_load(r->x, e->data, e->bytes) : NULL;
            if (!r->vocab) code = refuse(stx_error(r->x));
        }
        if (code) { stx_file_close(f); return code; }
    } else if (!training) {
        if (!opt.checkpoint) return refuse("--eval-only, --full-eval-mode and --no-train need a --checkpoint to load");
        snprintf(r->err, TR_ERR, "--checkpoint %s: %s", opt.checkpoint, strerror(ENOENT));
        return refuse(r->err);
    }
    r->steps = opt.steps ? opt.steps : opt.niter * opt.nbatches;
    r->words = opt.unit == UNIT_PPL || (opt.unit == UNIT_AUTO && opt.tokens == TOKENS_WORDS);
    r->schedule.kind = opt.schedule == 0 ? STX_LR_CONSTANT : opt.schedule == 1 ? STX_LR_COSINE : STX_LR_INV_SQRT;
    r->schedule.lr = opt.lr; r->schedule.lr_min = opt.lr_min; r->schedule.warmup = opt.lr_warmup; r->schedule.total = r->steps;
    ok = 1;
    if (opt.batch_sz % opt.batch_split) ok = tr_fail(r->err, TR_ERR, "--batch-split %llu does not divide --batch-sz %llu", (unsigned long long)opt.batch_split, (unsigned long long)opt.batch_sz);
    if (ok && opt.hid_sz % opt.nheads) ok = tr_fail(r->err, TR_ERR, "--nheads %llu does not divide --hid-sz %llu", (unsigned long long)opt.nheads, (unsigned long long)opt.hid_sz);
    ok = ok && parse_cutoffs(r);
    if (ok && (opt.data || !opt.no_train)) ok = open_data(r, r->vocab != NULL);
    ok = ok && make_model(r);
    if (ok && f && !load(r, f, training)) ok = tr_fail(r->err, TR_ERR, "%s: %s", opt.checkpoint, stx_error(r->x));
    stx_file_close(f);
    if (ok && opt.prompt && *opt.prompt && stx_vocab_encode(r->vocab, opt.prompt, strlen(opt.prompt), NULL, 0) == STX_NPOS) ok = tr_fail(r->err, TR_ERR, "--prompt: %s", stx_error(r->x));
    if (ok && opt.tensorboard && !stat(opt.tensorboard, &st) && !S_ISDIR(st.st_mode)) ok = tr_fail(r->err, TR_ERR, "--tensorboard %s: not a directory", opt.tensorboard);
    if (ok && training && opt.checkpoint) ok = can_write(r, "checkpoint", opt.checkpoint);
    if (ok && opt.log && strncmp(opt.log, "/dev/", 5)) ok = can_write(r, "log", opt.log);
    r->config = tr_options_json(&options);
    if (ok && !r->config) ok = tr_fail(r->err, TR_ERR, "no memory");
    /* all that can be refused is refused by now: from here on files are written */
    /* only a run that goes on from its checkpoint writes the later lines of its log again */
    ok = ok && tr_board_open(&r->board, opt.tensorboard, training ? r->step : 0, r->err, TR_ERR);
    ok = ok && tr_log_open(&r->log, opt.log, training && r->step ? r->step : TR_KEEP_ALL, r->err, TR_ERR);
    ok = ok && tr_signals(r->err, TR_ERR);
    if (!ok) return refuse(r->err);

    tr_term_open(&r->term, stdout);
    tr_count(size, (double)stx_params_size(r->model->params));
    tr_bytes(mem, (double)stx_bytes(r->x));
    if (opt.device) tr_say(&r->term, "%s parameters, vocabulary %zu, %s, %s, %s of its memory so far", size, r->model->desc.vocab, stx_backend(r->x), opt.precision ? "bf16" : opt.tf32 ? "f32 (tf32 products)" : "f32", mem);
    else tr_say(&r->term, "%s parameters, vocabulary %zu, %d thread%s, %s, %s of memory so far", size, r->model->desc.vocab, stx_threads(r->x), stx_threads(r->x) > 1 ? "s" : "", opt.precision ? "bf16 products" : "f32", mem);
    if (r->text[0]) {
        tr_bytes(size, (double)stx_corpus_bytes(r->text[0]));
        tr_say(&r->term, "training text: %s, %zu tokens; step %llu of %llu", size, stx_corpus_size(r->text[0]), (unsigned long long)r->step, (unsigned long long)r->steps);
    }
    if (r->step == 0 && training) {
        tr_log_begin(&r->log, "start");
        tr_log_json(&r->log, "config", r->config);
        tr_log_int(&r->log, "params", stx_params_size(r->model->params));
        note(r, r->log.err, tr_log_end(&r->log));
    }
    ok = 1;
    if (training) ok = train(r);
    if (tr_stop_requested()) tr_say(&r->term, "stopped at step %llu%s", (unsigned long long)r->step, opt.checkpoint && training && ok ? "; the checkpoint is saved, the same command goes on from it" : "");
    else if (ok && (training || opt.eval_only || opt.full_eval)) {
        int rule = opt.full_eval ? STX_EVAL_LITERAL : STX_EVAL_ALL;
        ok = evaluate_and_report(r, 1, training && tr_given(&options, "eval-blocks") ? opt.eval_blocks : 0, rule);
        if (ok && !training) ok = evaluate_and_report(r, 2, 0, rule);
    }
    if (!training && tr_stop_requested()) { tr_term_close(&r->term); fprintf(stderr, "%s: stopped before the evaluation had a result\n", options.program); return 1; }
    tr_term_close(&r->term);
    if (ok && !tr_stop_requested()) {
        print_spans(r);
        if (opt.generate) {
            if (training || opt.eval_only || opt.full_eval) printf("---\n");
            ok = generate(r);
        }
    }
    if (!ok) { say_why(r); fprintf(stderr, "%s: %s\n", options.program, r->err); return 1; }
    return 0;
}
int main(int argc, char **argv) {
    static run r;
    int code = run_main(&r, argc, argv), part;
    for (part = 0; part < 3; part++) stx_corpus_close(r.text[part]);
    stx_batches_free(r.batches);
    stx_vocab_free(r.vocab);
    tr_log_close(&r.log);
    tr_board_close(&r.board);
    free(r.config);
    stx_destroy(r.x);
    return code;
}
