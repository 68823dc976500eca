/* train_attn_span.c - trains, evaluates and samples from a Sequential Transformer

       cc -O3 -pthread train_attn_span.c -lm -o train_attn_span
       ./train_attn_span --data FILE --steps 2000 --checkpoint run.safetensors
       ./train_attn_span --help

   The training loop is in step() and train() below. Option parsing, text input,
   checkpoints, logging and terminal output come from train.h, which all trainers
   share. */
#define TR_LM
#include "train.h"
#define SEQTX_IMPLEMENTATION
#include "../seqtx_attn_span.h"
#include "../seqtx_text.h"


// >>options

/* Compile-time check: --literal without names selects the same flags as
   STX_SPAN_LITERAL, and each of its names has the bit of the corresponding flag. */
typedef char literal_is_every[(int)STX_SPAN_LITERAL == (int)TR_EVERY && STX_SPAN_LITERAL_EPS == 1
                              && STX_SPAN_LITERAL_MEMORY == 2 ? 1 : -1];

static struct {
    /* model */
    uint64_t    nlayers, hid_sz, inner_hid_sz, nheads, attn_span, pers_mem_size;
    double      dropout, emb_dropout;
    int         literal;
    int         adapt_span, adapt_span_cache, span_per_layer, no_renorm, fairseq_init;
    double      adapt_span_loss, adapt_span_ramp, adapt_span_init;
    int         adapt_io, adapt_io_tied;
    double      adapt_io_divval;
    const char *adapt_io_cutoffs;

    /* optimisation */
    int         optim, schedule;
    double      lr, lr_min, momentum, weight_decay, grad_clip;
    uint64_t    lr_warmup, batch_sz, batch_split, block_sz, niter, nbatches;
    int         full_eval;

    tr_lm_opt   lm;         /* options shared by all trainers */
} opt;

/* The library's values for the choices of --optim and --schedule, in the order of their
   names in the table below. */
static const int optim_kinds[] = {STX_ADAGRAD, STX_SGD, STX_ADAM, STX_ADAMW};
static const int schedule_kinds[] = {STX_LR_CONSTANT, STX_LR_COSINE, STX_LR_INV_SQRT};

/* Columns: name; class, which determines how checkpoints treat the option (see
   "Resuming" in train.h); variable; limits or choices; help. */
static tr_opt table[] = {
    TR_GROUP("Model"),
    TR_SIZE("nlayers", TR_MODEL, &opt.nlayers, 1, 4096, "number of layers"),
    TR_SIZE("hid-sz", TR_MODEL, &opt.hid_sz, 1, 1u << 29, "model dimension d"),
    TR_SIZE("inner-hid-sz", TR_MODEL, &opt.inner_hid_sz, 1, 1u << 30,
        "hidden size of the feed-forward network (unused with --pers-mem-size)"),
    TR_SIZE("nheads", TR_MODEL, &opt.nheads, 1, 256,
        "number of attention heads; must divide --hid-sz"),
    TR_SIZE("attn-span", TR_MODEL, &opt.attn_span, 1, 1u << 30,
        "largest attention span, in tokens"),
    TR_SIZE("pers-mem-size", TR_MODEL, &opt.pers_mem_size, 0, 1u << 30,
        "number of persistent vectors per head, which replace the feed-forward network "
        "(all-attention); 0: none"),
    TR_REAL_OPEN("dropout", TR_FREE, &opt.dropout, TR_OPEN_MAX, 0, 1,
        "dropout probability for attention weights and feed-forward activations"),
    TR_REAL_OPEN("emb-dropout", TR_FREE, &opt.emb_dropout, TR_OPEN_MAX, 0, 1,
        "dropout probability for the embedding and the last hidden state"),
    TR_SET("literal", TR_MODEL, &opt.literal, "eps|memory", 0,
        "reproduce accidental behaviour of the authors' code. eps: add 1e-8 to the normaliser of "
        "the masked weights. memory: treat unwritten memory rows as rows of zeros"),

    TR_GROUP("Adaptive span"),
    TR_FLAG("adapt-span", TR_MODEL, &opt.adapt_span, "learn a span for each head"),
    TR_REAL("adapt-span-loss", TR_FREE, &opt.adapt_span_loss, 0, 1e6,
        "weight of the span penalty"),
    TR_REAL("adapt-span-ramp", TR_MODEL, &opt.adapt_span_ramp, 1, 1e9,
        "length of the soft ramp at the end of a span, in tokens"),
    TR_REAL("adapt-span-init", TR_FIXED, &opt.adapt_span_init, 0, 1,
        "initial span, as a fraction of --attn-span"),
    TR_FLAG("adapt-span-cache", TR_MODEL, &opt.adapt_span_cache,
        "keep only as much memory as the learned spans require"),
    TR_FLAG("span-per-layer", TR_MODEL | TR_LATER, &opt.span_per_layer,
        "one span for all heads of a layer"),
    TR_FLAG("no-renorm", TR_MODEL | TR_LATER, &opt.no_renorm,
        "do not renormalise the masked attention weights (fairseq's form)"),
    TR_FLAG("fairseq-init", TR_FIXED | TR_LATER, &opt.fairseq_init,
        "initialise the parameters as fairseq does"),

    TR_GROUP("Adaptive input and output"),
    TR_FLAG("adapt-io", TR_MODEL, &opt.adapt_io,
        "adaptive embedding and softmax, for large vocabularies"),
    TR_FLAG("adapt-io-tied", TR_MODEL, &opt.adapt_io_tied,
        "let the embedding and the softmax share tables and projections"),
    TR_REAL_OPEN("adapt-io-divval", TR_MODEL, &opt.adapt_io_divval, TR_OPEN_MIN, 1, 1e6,
        "each cluster is narrower than the previous one by this factor"),
    TR_TEXT("adapt-io-cutoffs", TR_MODEL, &opt.adapt_io_cutoffs,
        "ends of the clusters, such as 20000,40000,200000 (the default)"),

    TR_GROUP("Optimisation"),
    TR_CHOICE("optim", TR_FIXED, &opt.optim, "adagrad|sgd|adam|adamw", "optimiser"),
    TR_REAL("lr", TR_FREE, &opt.lr, 0, 1e6, "learning rate"),
    TR_CHOICE("schedule", TR_FREE, &opt.schedule, "constant|cosine|inv-sqrt",
        "learning-rate schedule after the warm-up"),
    TR_SIZE("lr-warmup", TR_FREE, &opt.lr_warmup, 0, TR_INF,
        "length of the linear warm-up, in steps"),
    TR_REAL("lr-min", TR_FREE, &opt.lr_min, 0, 1e6,
        "learning rate at the end of the cosine schedule"),
    TR_REAL("momentum", TR_FIXED, &opt.momentum, 0, 1, "momentum of sgd"),
    TR_REAL("weight-decay", TR_FREE, &opt.weight_decay, 0, 1e6,
        "weight decay of sgd and adam (added to the gradient) and of adamw (decoupled)"),
    TR_REAL("grad-clip", TR_FREE, &opt.grad_clip, 0, 1e9,
        "maximum norm of the gradient: of each tensor with adagrad, otherwise of all tensors "
        "together; 0: no clipping"),
    TR_SIZE("batch-sz", TR_FIXED, &opt.batch_sz, 1, 1u << 30, "number of parallel text streams"),
    TR_SIZE("batch-split", TR_FIXED, &opt.batch_split, 1, 1u << 30,
        "process the batch in this many parts, to save memory"),
    TR_SIZE("block-sz", TR_FIXED | TR_KEPT, &opt.block_sz, 1, 1u << 30,
        "tokens per stream per step"),
    TR_SIZE("niter", TR_FREE, &opt.niter, 1, 1u << 30,
        "number of iterations, each of --nbatches steps"),
    TR_SIZE("nbatches", TR_FREE, &opt.nbatches, 1, 1u << 30,
        "steps per iteration; the model is evaluated and saved after each iteration"),
    TR_SIZE("steps", TR_FREE, &opt.lm.steps, 0, TR_INF,
        "total number of steps; 0: --niter times --nbatches"),
    TR_SIZE("seed", TR_FIXED, &opt.lm.seed, 0, TR_INF,
        "seed for initial values, dropout and positions in the text; also for sampling if given, "
        "otherwise sampling differs every time"),
    TR_LM_DATA(opt.lm),
    TR_LM_SAVING(opt.lm, "--nbatches", "a tenth of --nbatches"),
    TR_FLAG("full-eval-mode", TR_LOCAL, &opt.full_eval,
        "evaluate on the whole validation and test texts, over the same targets as the authors' "
        "code, then stop"),
    TR_LM_RUNNING(opt.lm),
    TR_LM_GENERATION(opt.lm),
    TR_LM_SAMPLING(opt.lm),
    TR_END
};

/* The defaults without --preset: the demo's model and optimiser, which kind.sized below
   scales to the size of the text. */
#define DEMO \
    "tokens=bytes nlayers=3 hid-sz=128 inner-hid-sz=512 nheads=4 attn-span=256 " \
    "adapt-span adapt-span-cache adapt-span-ramp=32 adapt-span-loss=0.000002 " \
    "adapt-span-init=0.06 adapt-io-divval=4 " \
    "block-sz=64 batch-sz=16 batch-split=1 nbatches=1200 " \
    "optim=adam lr=0.003 schedule=cosine lr-warmup=60 grad-clip=1 "

/* The defaults of the authors' code, except that caches are only as long as the spans
   require. */
#define REFERENCE \
    "tokens=bytes nlayers=8 hid-sz=256 inner-hid-sz=1024 nheads=2 attn-span=32 " \
    "pers-mem-size=0 dropout=0.2 emb-dropout=0 " \
    "no-adapt-span adapt-span-cache adapt-span-loss=0 adapt-span-ramp=32 adapt-span-init=0 " \
    "block-sz=64 batch-sz=64 batch-split=1 niter=1000 nbatches=1000 " \
    "optim=sgd lr=0.03 momentum=0.9 schedule=constant lr-warmup=0 grad-clip=0 "

/* Experiments from 1905.07799 and 1907.01470, and one from fairseq. The results of
   enwik8_small and wiki103_pers are from the README of the authors' code.
   To fine-tune as in the papers, run the same command again with a tenth of --lr and a
   larger --niter. */
#define ADAGRAD \
    REFERENCE "optim=adagrad lr=0.07 grad-clip=0.03 momentum=0 adapt-span data-unit=bpc "
#define ENWIK8 ADAGRAD "tokens=bytes-compact vocab=205 "
#define TEXT8 ADAGRAD "tokens=chars vocab=28 "
#define BASE \
    "nlayers=12 hid-sz=512 inner-hid-sz=2048 nheads=8 attn-span=8192 block-sz=512 " \
    "dropout=0.3 adapt-span-loss=0.0000005 lr-warmup=32000 "
#define LARGE \
    "nlayers=24 hid-sz=768 inner-hid-sz=4096 nheads=8 attn-span=8192 block-sz=512 " \
    "dropout=0.4 adapt-span-loss=0.0000005 lr-warmup=32000 batch-split=2 "
/* inner-hid-sz is not used with pers-mem-size; the authors' scripts set it to 1. */
#define PERS \
    "hid-sz=512 inner-hid-sz=1 nheads=8 attn-span=8192 block-sz=512 " \
    "adapt-span-loss=0.0000001 lr-warmup=32000 batch-split=2 "

static const tr_preset presets[] = {
    {"demo", "a small byte-level model that trains in two minutes on two cores (make demo)",
        DEMO "dropout=0 steps=4800 eval-blocks=20 log-every=100"},
    {"reference", "the defaults of the authors' code",
        REFERENCE},
    {"enwik8_small", "6.5M parameters, 8 layers, span 1024: published dev about 1.3 bpc",
        ENWIK8 "nlayers=8 hid-sz=256 inner-hid-sz=1024 nheads=4 attn-span=1024 block-sz=256 "
        "dropout=0 adapt-span-loss=0.000002 lr-warmup=8000 niter=150"},
    {"enwik8", "38.5M parameters, 12 layers, span 8192: published test 1.02 bpc",
        ENWIK8 BASE "niter=600"},
    {"enwik8_fairseq", "enwik8 with fairseq's mask and initial values: published test ~1.03 bpc",
        ENWIK8 BASE "niter=600 no-renorm fairseq-init"},
    {"enwik8_large", "209M parameters, 24 layers: published test 0.98 bpc",
        ENWIK8 LARGE "niter=150"},
    {"text8", "38.4M parameters, 12 layers: published test 1.11 bpc",
        TEXT8 BASE "niter=900"},
    {"text8_large", "209M parameters, 24 layers: published test 1.07 bpc",
        TEXT8 LARGE "niter=250"},
    {"enwik8_pers_small", "all-attention, 38.5M parameters, 18 layers: published test 1.01 bpc",
        ENWIK8 PERS "nlayers=18 dropout=0.3 niter=450 pers-mem-size=1024"},
    {"enwik8_pers", "all-attention, 114M parameters, 36 layers: published test 0.98 bpc",
        ENWIK8 PERS "nlayers=36 dropout=0.4 niter=200 pers-mem-size=2048"},
    {"wiki103_pers", "all-attention on words, 132M parameters: published test 19.7 ppl",
        REFERENCE "tokens=words vocab=267735 data-unit=ppl nlayers=36 hid-sz=512 inner-hid-sz=1 "
        "nheads=8 attn-span=2048 block-sz=256 batch-split=2 dropout=0.3 "
        "emb-dropout=0.1 adapt-span adapt-span-loss=0.0000005 pers-mem-size=2048 adapt-io "
        "adapt-io-tied adapt-io-divval=4 optim=adam lr=0.00025 grad-clip=1 momentum=0 "
        "lr-warmup=8000 niter=800"},
    TR_PRESET_END
};

static tr_options options = {
    "train_attn_span",
    "Trains a Sequential Transformer (adaptive attention span, all-attention) on text.",
    table, presets, TR_LM_DEFAULTS DEMO "niter=1000", TR_LM_AFTER, ""
};


// >>run: the state of a run

typedef struct run {
    tr_lm         t;        /* context, text, optimiser, log and more: see train.h. Must be
                               first, because train.h passes a pointer to it */
    stx_span_desc desc;
    stx_span     *model;
} run;


// >>training

enum { METRIC_LOSS };       /* mean loss of a step in nats per token, without span penalty */

/* One step: a forward pass, a backward pass and an update. Everything that changes
   between steps is read from t.in, t.out and t.lr, so that a GPU can replay the step
   (stx_step_run; train() sets the learning rate of replays). The batch is processed in
   parts, whose gradients are accumulated. */
static void step(void *user) {
    run *r = (run *)user;
    stx_ctx *x = r->t.x;
    size_t part, parts = opt.batch_split;
    for (part = 0; part < parts; part++) {
        stx_span_state *memory = (stx_span_state *)r->t.state[part];
        stx_tensor *loss, *total;
        stx_begin(x, STX_TRAIN);
        loss = stx_span_loss(r->model, r->t.in[part], r->t.out[part], memory, memory);
        stx_metric_set(x, METRIC_LOSS, loss, 1.0 / (double)parts, part > 0);
        total = stx_scale(x, stx_span_total(r->model, loss), 1.0 / (double)parts);
        /* In the last part, gradients are sent to the other ranks as soon as they are
           final, while the backward pass continues. */
        if (part + 1 == parts) stx_group_overlap(r->t.optim);
        stx_backward(x, total);
    }
    stx_optim_step(r->t.optim, r->t.lr);
    stx_span_clamp(r->model);
}

/* Logs the span of each head (of each layer with --span-per-layer), without the ramp,
   as a list in the log and as TensorBoard curves. The log's span_avg and span_max
   include the ramp. */
static void log_spans(run *r) {
    size_t l, head, heads = opt.span_per_layer ? 1 : (size_t)opt.nheads;
    char text[64];
    tr_buf list;
    memset(&list, 0, sizeof list);
    tr_buf_puts(&list, "[");
    for (l = 0; opt.adapt_span && l < opt.nlayers; l++) {
        for (head = 0; head < heads; head++) {
            double span = stx_span_head_span(r->model, l, head);
            snprintf(text, sizeof text, "%.4g", span);
            if (list.n > 1) tr_buf_puts(&list, ",");
            tr_buf_puts(&list, text);
            snprintf(text, sizeof text, "span/layer_%zu_head_%zu", l + 1, head + 1);
            tr_lm_point(&r->t, text, span);
        }
    }
    tr_buf_puts(&list, "]");
    tr_log_json(&r->t.log, "spans", list.oom ? NULL : list.s);
    tr_buf_free(&list);
}

/* Trains until the last step or a signal, and logs, evaluates and saves when due. */
static void train(tr_lm *t) {
    run *r = (run *)t;
    while (tr_lm_more(t)) {
        int status = stx_batches_next(t->batches, t->tokens, t->targets);
        uint64_t key;
        if (status == STX_BATCH_END) break;
        /* sets t.in and t.out (stx_tokens_set), and resets the memories if the block does
           not continue the previous one */
        key = tr_lm_batch(t, status == STX_BATCH_FRESH);

        t->lr = stx_schedule_lr(&t->schedule, t->step + 1);
        stx_optim_set_lr(t->optim, t->lr); /* for replays, which do not run step() */
        tr_lm_step(t, key, step, r);
        if (!tr_lm_stepped(t, stx_metric_get(t->x, METRIC_LOSS))) break;

        if (tr_lm_log_due(t)) {
            double span_avg, span_max;
            stx_span_stats(r->model, &span_avg, &span_max);
            tr_log_num(&t->log, "span_avg", span_avg);
            tr_log_num(&t->log, "span_max", span_max);
            log_spans(r);
            tr_lm_logged(t);
            tr_lm_point(t, "span/avg", span_avg);
            tr_lm_point(t, "span/max", span_max);
        }
        if (!tr_lm_evaluate_and_save(t)) break;
    }
}

/* Prints the learned spans at the end of a run. */
static void print_spans(const tr_lm *t, FILE *out) {
    const run *r = (const run *)t;
    size_t l, head, heads = opt.span_per_layer ? 1 : (size_t)opt.nheads;
    if (!opt.adapt_span) return;
    fprintf(out,
            "learned span of each %s in tokens (at most %llu), without the ramp of %g tokens\n",
            opt.span_per_layer ? "layer" : "head", (unsigned long long)opt.attn_span,
            opt.adapt_span_ramp);
    for (l = 0; l < opt.nlayers; l++) {
        fprintf(out, "  layer %2zu ", l + 1);
        for (head = 0; head < heads; head++)
            fprintf(out, " %6.0f", stx_span_head_span(r->model, l, head));
        fprintf(out, "\n");
    }
}


// >>main

/* Reports the library's error in terms of the options. Returns 0. An entry in words[]
   maps a field of stx_span_desc to an option, or one phrase to another. If a phrase
   begins with another, the longer one comes first. */
static int report_error(tr_lm *t) {
    static const tr_word words[] = {
        {"layers", "nlayers"},
        {"dim", "hid-sz"},
        {"heads", "nheads"},
        {"inner", "inner-hid-sz"},
        {"span_init", "adapt-span-init"},
        {"span_loss", "adapt-span-loss"},
        {"span", "attn-span"},
        {"pers", "pers-mem-size"},
        {"ramp", "adapt-span-ramp"},
        {"width of the first cluster / divval^cutoffs",
            "the width of the last cluster, --hid-sz / --adapt-io-divval^(number of cutoffs)"},
        {"divval", "adapt-io-divval"},
        {"cutoffs", "adapt-io-cutoffs"},
        {"cutoff", "adapt-io-cutoffs"},
        {"a smaller divval or a larger width", "a smaller --adapt-io-divval or a larger --hid-sz"},
        {": STX_SPAN_LITERAL_EPS", " eps"},
        {"adapt_span without no_renorm", "--adapt-span without --no-renorm"},
        {"STX_SPAN_LITERAL selects the flags that apply",
            "--literal without names selects all that apply"},
        {NULL, NULL}
    };
    return tr_lm_why_in(t, "stx_span_create: ", words);
}

/* Creates the model in x and returns the forms of --literal that apply to it. */
static const unsigned *literal_in(stx_ctx *x, const void *desc) {
    const stx_span *m = stx_span_create(x, (const stx_span_desc *)desc);
    return m ? &m->desc.literal : NULL;
}

/* Fills in r->desc from the options. Returns 0 and sets an error if the cutoffs are
   invalid or the flags of --literal cannot be determined. */
static int describe(run *r, size_t vocab) {
    stx_span_desc *d = &r->desc;
    memset(d, 0, sizeof *d);
    d->vocab = vocab;
    d->layers = opt.nlayers;
    d->dim = opt.hid_sz;
    d->heads = opt.nheads;
    d->inner = opt.inner_hid_sz;
    d->span = opt.attn_span;
    d->pers = opt.pers_mem_size;
    d->dropout = opt.dropout;
    d->emb_dropout = opt.emb_dropout;
    d->adapt_span = opt.adapt_span;
    d->full_cache = !opt.adapt_span_cache;
    d->ramp = opt.adapt_span_ramp;
    d->span_init = opt.adapt_span_init;
    d->span_loss = opt.adapt_span_loss;
    d->span_per_layer = opt.span_per_layer;
    d->no_renorm = opt.no_renorm;
    d->fairseq_init = opt.fairseq_init;
    d->adapt_io = opt.adapt_io;
    d->adapt_io_tied = opt.adapt_io_tied;
    d->divval = opt.adapt_io_divval;
    return tr_lm_cutoffs(&r->t, d->cutoff, &d->cutoffs)
           && tr_lm_choose_literal(&r->t, opt.literal, &d->literal, d, literal_in);
}

/* Returns the number of parameters, or sets an error and returns 0. */
static size_t count(tr_lm *t, size_t vocab) {
    run *r = (run *)t;
    size_t n;
    if (!describe(r, vocab)) return 0;
    n = stx_span_count(&r->desc);
    if (!n) {
        stx_span_create(t->x, &r->desc);        /* fails too, and sets the error */
        report_error(t);
    }
    return n;
}

/* Writes a one-line description of the model to `line`. *elements receives the number of
   elements in a full memory with L rows in every layer, without spare rows. */
static void shape(const tr_lm *t, char *line, size_t size, double *elements) {
    (void)t;
    snprintf(line, size, "%llu layer%s, %llu head%s, span %llu", (unsigned long long)opt.nlayers,
             tr_s(opt.nlayers), (unsigned long long)opt.nheads, tr_s(opt.nheads),
             (unsigned long long)opt.attn_span);
    *elements = (double)opt.batch_sz * (double)opt.hid_sz * (double)opt.nlayers
                * (double)opt.attn_span;
}

/* Creates the model and, for training, the optimiser. */
static int make(tr_lm *t) {
    run *r = (run *)t;
    stx_optim_desc od;
    if (!describe(r, stx_vocab_size(t->vocab))) return 0;
    if (!tr_lm_fits(t, (double)stx_span_count(&r->desc))) return 0;
    r->model = stx_span_create(t->x, &r->desc);
    t->lm = stx_span_as_lm(r->model);
    if (!stx_ok(t->x)) return report_error(t);
    if (!t->training) return 1;

    memset(&od, 0, sizeof od);
    od.kind = optim_kinds[opt.optim];
    od.momentum = opt.momentum;
    od.clip = opt.grad_clip;
    od.weight_decay = opt.weight_decay;
    return tr_lm_make(t, &od, 1 /* block per update */);
}

/* Checks that the options are consistent before any text is read. */
static int check(tr_lm *t) {
    size_t cutoff[STX_MAX_CLUSTERS - 1], cutoffs;
    const char *flag = opt.no_renorm ? "no-renorm" : "span-per-layer";
    const tr_only only[] = {
        {"adapt-span-loss", opt.adapt_span, "--adapt-span"},
        {"adapt-span-ramp", opt.adapt_span, "--adapt-span"},
        {"adapt-span-init", opt.adapt_span, "--adapt-span"},
        {"adapt-span-cache", opt.adapt_span, "--adapt-span"},
        {"adapt-io-tied", opt.adapt_io, "--adapt-io"},
        {"adapt-io-divval", opt.adapt_io, "--adapt-io"},
        {"adapt-io-cutoffs", opt.adapt_io, "--adapt-io"},
        {"momentum", optim_kinds[opt.optim] == STX_SGD, "--optim sgd"},
        {"lr-min", schedule_kinds[opt.schedule] == STX_LR_COSINE, "--schedule cosine"},
        {"niter", !tr_given(&options, "steps") || !opt.lm.steps, "runs without --steps"}
    };
    if (!tr_check_only(&options, only, sizeof only / sizeof *only, t->err, TR_ERR)) return 0;
    if ((opt.no_renorm || opt.span_per_layer) && !opt.adapt_span)
        return tr_fail(t->err, TR_ERR, "--%s requires --adapt-span: add it, or leave --%s out",
                       flag, flag);
    if (opt.hid_sz % opt.nheads)
        return tr_fail(t->err, TR_ERR, "--nheads: expected a divisor of --hid-sz %llu, got %llu",
                       (unsigned long long)opt.hid_sz, (unsigned long long)opt.nheads);
    if (schedule_kinds[opt.schedule] == STX_LR_COSINE && opt.lr_min > opt.lr)
        return tr_fail(t->err, TR_ERR, "--lr-min: expected at most --lr %g, got %g", opt.lr,
                       opt.lr_min);
    return tr_lm_cutoffs(t, cutoff, &cutoffs);
}

/* Sets the length of the run, the steps at which it logs, evaluates and saves, and the
   learning-rate schedule. */
static void plan(tr_lm *t) {
    const tr_opt *steps = tr_find_option(&options, "steps", sizeof "steps" - 1);
    const tr_opt *niter = tr_find_option(&options, "niter", sizeof "niter" - 1);
    const uint64_t tenth = opt.nbatches < 10 ? 1 : opt.nbatches / 10;

    /* --niter on the command line overrides --steps from the checkpoint; --niter in a
       preset does not */
    if (steps->from == TR_FROM_CHECKPOINT && niter->from == TR_FROM_ARGS) opt.lm.steps = 0;

    t->steps = opt.lm.steps ? opt.lm.steps : opt.niter * opt.nbatches;
    t->log_every = opt.lm.log_every ? opt.lm.log_every : 10;
    t->eval_every = opt.lm.eval_every ? opt.lm.eval_every : opt.nbatches;
    t->save_every = opt.lm.save_every ? opt.lm.save_every : opt.nbatches;
    t->eval_blocks = opt.lm.eval_blocks ? opt.lm.eval_blocks : tenth;
    t->eval_block = opt.block_sz;
    t->eval_literal = opt.full_eval;
    t->schedule.kind = schedule_kinds[opt.schedule];
    t->schedule.lr = opt.lr;
    t->schedule.lr_min = opt.lr_min;
    t->schedule.warmup = opt.lr_warmup;
    t->schedule.total = t->steps;
}

static const tr_lm_kind kind = {
    "seqtx.attn_span.1",                /* format of checkpoints */
    "memory",                           /* prefix of the memory in checkpoints */
    &opt.adapt_io, &opt.adapt_io_cutoffs,
    STX_ORDER_COUNT_LATER,              /* order of token ids with --adapt-io */
    0,                                  /* eos_first */
    /* sized: changes to DEMO for texts of up to 1e5 tokens, for texts of up to 2e6
       tokens, and for longer texts */
    {"nlayers=2 hid-sz=64 attn-span=128 dropout=0.2", "dropout=0.1", ""},
    check, plan, count, shape, make, train, print_spans, sizeof(run)
};

int main(int argc, char **argv) {
    static run r;
    return tr_lm_main(&r.t, &kind, &options, &opt.lm, &opt.full_eval, argc, argv);
}
