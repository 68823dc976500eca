/* train_attn_span.c - trains, evaluates and samples the Sequential Transformer of seqtx_attn_span.h on text.

       cc -O3 -pthread train_attn_span.c -lm -o train_attn_span
       ./train_attn_span --data FILE --steps 2000 --checkpoint run.safetensors
       ./train_attn_span --help

   The training loop is the function train(), in the open; options, data, checkpoints, log and terminal are train.h's. */
#define TR_LM
#include "train.h"
#define SEQTX_IMPLEMENTATION
#include "../seqtx_attn_span.h"
#include "text.h"

// >>options ----------------------------------------------------------------------------------------------------------

/* --literal without names is the library's own flag for all forms */
typedef char tr_every_is_all[(int)TR_EVERY == (int)STX_SPAN_LITERAL ? 1 : -1];

static struct {
    uint64_t nlayers, hid_sz, inner_hid_sz, nheads, attn_span, block_sz, pers_mem_size;
    int no_renorm, span_per_layer, fairseq_init, adapt_span, adapt_span_cache, adapt_io, adapt_io_tied, literal;
    double adapt_span_loss, adapt_span_ramp, adapt_span_init, adapt_io_divval, dropout, emb_dropout;
    const char *cutoffs;
    double lr, momentum, grad_clip, lr_min, weight_decay;
    uint64_t lr_warmup, batch_sz, batch_split, niter, nbatches;
    int optim, schedule, full_eval;
    tr_lm_opt lm;
} opt;

/* The second column says what a checkpoint does with an option: see "Resuming" in train.h. */
static tr_opt table[] = {
    TR_GROUP("Model"),
    TR_SIZE("nlayers", TR_MODEL, &opt.nlayers, 1, 4096, "layers"),
    TR_SIZE("hid-sz", TR_MODEL, &opt.hid_sz, 1, 1u << 29, "hidden size d"),
    TR_SIZE("inner-hid-sz", TR_MODEL, &opt.inner_hid_sz, 1, 1u << 30, "inner size of the feed-forward (unused with --pers-mem-size)"),
    TR_SIZE("nheads", TR_MODEL, &opt.nheads, 1, 256, "attention heads; must divide --hid-sz"),
    TR_SIZE("attn-span", TR_MODEL, &opt.attn_span, 1, 1u << 30, "largest attention span, tokens"),
    TR_SIZE("pers-mem-size", TR_MODEL, &opt.pers_mem_size, 0, 1u << 30,
        "persistent vectors per head in place of the feed-forward (all-attention)"),
    TR_REAL_OPEN("dropout", TR_FREE, &opt.dropout, TR_OPEN_MAX, 0, 1, "on attention weights and inside the feed-forward"),
    TR_REAL_OPEN("emb-dropout", TR_FREE, &opt.emb_dropout, TR_OPEN_MAX, 0, 1, "on the embedding and the last hidden state"),
    TR_SET("literal", TR_MODEL, &opt.literal, "eps|memory", 0,
        "accidental behaviour of the reference, reproduced. eps: 1e-8 of the keys beyond a span "
        "counts in the normaliser. memory: rows of an empty memory are attended to as zeros"),
    TR_GROUP("Adaptive span"),
    TR_FLAG("adapt-span", TR_MODEL, &opt.adapt_span, "learn a span for each head"),
    TR_REAL("adapt-span-loss", TR_FREE, &opt.adapt_span_loss, 0, 1e6, "weight of the span penalty"),
    TR_REAL("adapt-span-ramp", TR_MODEL, &opt.adapt_span_ramp, 1, 1e9, "length of the soft end of a span"),
    TR_REAL("adapt-span-init", TR_FIXED, &opt.adapt_span_init, 0, 1, "first span, as a fraction of --attn-span"),
    TR_FLAG("adapt-span-cache", TR_MODEL, &opt.adapt_span_cache, "keep only as much memory as the spans need"),
    TR_FLAG("span-per-layer", TR_MODEL | TR_LATER, &opt.span_per_layer, "one span for all heads of a layer"),
    TR_FLAG("no-renorm", TR_MODEL | TR_LATER, &opt.no_renorm, "fairseq's form: masked attention weights are not normalised again"),
    TR_FLAG("fairseq-init", TR_FIXED | TR_LATER, &opt.fairseq_init, "first values as in fairseq"),
    TR_GROUP("Adaptive input and output"),
    TR_FLAG("adapt-io", TR_MODEL, &opt.adapt_io, "adaptive embedding and softmax, for large vocabularies"),
    TR_FLAG("adapt-io-tied", TR_MODEL, &opt.adapt_io_tied, "input and output share tables and projections"),
    TR_REAL_OPEN("adapt-io-divval", TR_MODEL, &opt.adapt_io_divval, TR_OPEN_MIN, 1, 1e6,
        "each cluster is this much narrower than the one before"),
    TR_TEXT("adapt-io-cutoffs", TR_MODEL, &opt.cutoffs, "cluster ends, as 20000,40000,200000 (which is the default)"),
    TR_GROUP("Optimisation"),
    TR_CHOICE("optim", TR_FIXED, &opt.optim, "adagrad|sgd|adam|adamw", "optimiser"),
    TR_REAL("lr", TR_FREE, &opt.lr, 0, 1e6, "learning rate"),
    TR_CHOICE("schedule", TR_FREE, &opt.schedule, "constant|cosine|inv-sqrt", "learning rate after the warm-up"),
    TR_SIZE("lr-warmup", TR_FREE, &opt.lr_warmup, 0, TR_INF, "updates of linear warm-up"),
    TR_REAL("lr-min", TR_FREE, &opt.lr_min, 0, 1e6, "end of the cosine"),
    TR_REAL("momentum", TR_FIXED, &opt.momentum, 0, 1, "of sgd"),
    TR_REAL("weight-decay", TR_FREE, &opt.weight_decay, 0, 1e6, "of sgd, adam (in the gradient) and adamw (decoupled)"),
    TR_REAL("grad-clip", TR_FREE, &opt.grad_clip, 0, 1e9, "largest gradient norm: per tensor with adagrad, of all together otherwise; "
        "0: none"),
    TR_SIZE("batch-sz", TR_FIXED, &opt.batch_sz, 1, 1u << 30, "parallel streams of text"),
    TR_SIZE("batch-split", TR_FIXED, &opt.batch_split, 1, 1u << 30, "work on the batch in this many parts, one after the other (less "
        "memory)"),
    TR_SIZE("block-sz", TR_FIXED | TR_KEPT, &opt.block_sz, 1, 1u << 30, "tokens of each stream per step"),
    TR_SIZE("niter", TR_FREE, &opt.niter, 1, 1u << 30, "iterations of --nbatches steps"),
    TR_SIZE("nbatches", TR_FREE, &opt.nbatches, 1, 1u << 30, "steps per iteration; after each the model is evaluated and saved"),
    TR_SIZE("steps", TR_FREE, &opt.lm.steps, 0, TR_INF, "steps in all, instead of niter x nbatches; 0: niter x nbatches"),
    TR_SIZE("seed", TR_FIXED, &opt.lm.seed, 0, TR_INF, "of initial values, dropout and positions; of sampling where it is given, else "
        "that differs every time"),
    TR_LM_DATA(opt.lm),
    TR_LM_SAVING(opt.lm, "--nbatches", "a tenth of --nbatches"),
    TR_FLAG("full-eval-mode", TR_LOCAL, &opt.full_eval, "evaluate on the whole validation and test text as the reference counts them, "
        "then stop"),
    TR_LM_RUNNING(opt.lm),
    TR_LM_GENERATION(opt.lm),
    TR_LM_SAMPLING(opt.lm),
    TR_END
};

/* Without a preset: the demo's model and optimiser, then sized by the text (kind.sized below). */
#define DEMO "tokens=bytes nlayers=3 hid-sz=128 inner-hid-sz=512 nheads=4 attn-span=256 block-sz=64 batch-sz=16 batch-split=1 " \
    "adapt-span adapt-span-cache adapt-span-ramp=32 " \
    "adapt-span-loss=0.000002 adapt-span-init=0.06 adapt-io-divval=4 optim=adam lr=0.003 schedule=cosine lr-warmup=60 grad-clip=1 " \
        "nbatches=1200 "
/* The defaults of the reference's own program; but memory is kept only as far as the spans need it. */
#define REFERENCE "tokens=bytes nlayers=8 hid-sz=256 inner-hid-sz=1024 nheads=2 attn-span=32 block-sz=64 pers-mem-size=0 dropout=0.2 " \
    "emb-dropout=0 no-adapt-span adapt-span-cache " \
    "adapt-span-loss=0 adapt-span-ramp=32 adapt-span-init=0 optim=sgd lr=0.03 momentum=0.9 schedule=constant lr-warmup=0 grad-clip=0 " \
        "batch-sz=64 batch-split=1 niter=1000 nbatches=1000 "
/* The published experiments (1905.07799, section 4; 1907.01470, section 5). Fine-tuning, where the papers do it: the same command with
   lr / 10 and a larger --niter. */
#define ADAGRAD REFERENCE "optim=adagrad lr=0.07 grad-clip=0.03 momentum=0 adapt-span batch-sz=64 nbatches=1000 data-unit=bpc "
#define ENWIK8 ADAGRAD "tokens=bytes-compact vocab=205 "
#define TEXT8 ADAGRAD "tokens=chars vocab=28 "
#define BASE "nlayers=12 hid-sz=512 inner-hid-sz=2048 nheads=8 attn-span=8192 block-sz=512 dropout=0.3 adapt-span-loss=0.0000005 " \
    "lr-warmup=32000 "
#define LARGE "nlayers=24 hid-sz=768 inner-hid-sz=4096 nheads=8 attn-span=8192 block-sz=512 dropout=0.4 adapt-span-loss=0.0000005 " \
    "lr-warmup=32000 batch-split=2 "
#define PERS "hid-sz=512 inner-hid-sz=1 nheads=8 attn-span=8192 block-sz=512 adapt-span-loss=0.0000001 lr-warmup=32000 batch-split=2 "
static const tr_preset presets[] = {
    {"demo", "a small byte model that learns in two minutes on two cores (make demo)",
        DEMO "dropout=0 steps=4800 eval-blocks=20 log-every=100"},
    {"reference", "the defaults of the reference's program", REFERENCE},
    {"enwik8_small", "6.5M parameters, 8 layers, span 1024: published dev ~1.3 bpc",
        ENWIK8 "nlayers=8 hid-sz=256 inner-hid-sz=1024 nheads=4 attn-span=1024 block-sz=256 dropout=0 adapt-span-loss=0.000002 "
            "lr-warmup=8000 niter=150"},
    {"enwik8", "38.5M parameters, 12 layers, span 8192: published test 1.02 bpc", ENWIK8 BASE "niter=600"},
    {"enwik8_fairseq", "enwik8 as fairseq has it, with its mask and first values: published test 1.03 bpc",
        ENWIK8 BASE "niter=600 no-renorm fairseq-init"},
    {"enwik8_large", "209M parameters, 24 layers: published test 0.98 bpc", ENWIK8 LARGE "niter=150"},
    {"text8", "38.4M parameters, 12 layers: published test 1.11 bpc", TEXT8 BASE "niter=900"},
    {"text8_large", "209M parameters, 24 layers: published test 1.07 bpc", TEXT8 LARGE "niter=250"},
    {"enwik8_pers_small", "all-attention, 38.5M parameters, 18 layers: published test 1.01 bpc",
        ENWIK8 PERS "nlayers=18 dropout=0.3 niter=450 pers-mem-size=1024"},
    {"enwik8_pers", "all-attention, 114M parameters, 36 layers: published test 0.98 bpc",
        ENWIK8 PERS "nlayers=36 dropout=0.4 niter=200 pers-mem-size=2048"},
    {"wiki103_pers", "all-attention on words, 132M parameters: published test 19.7 ppl",
        REFERENCE "tokens=words vocab=267735 data-unit=ppl optim=adam lr=0.00025 grad-clip=1 momentum=0 lr-warmup=8000 nlayers=36 "
            "hid-sz=512 inner-hid-sz=1 nheads=8 attn-span=2048 block-sz=256 "
        "batch-sz=64 batch-split=2 dropout=0.3 emb-dropout=0.1 adapt-span adapt-span-loss=0.0000005 pers-mem-size=2048 adapt-io "
            "adapt-io-tied adapt-io-divval=4 nbatches=1000 niter=800"},
    TR_PRESET_END
};

static tr_options options = {"train_attn_span", "Trains a Sequential Transformer (adaptive attention span, all-attention) on text.",
    table, presets,
                             TR_LM_DEFAULTS DEMO "niter=1000", TR_LM_AFTER, ""};

// >>run: everything that one run works with ---------------------------------------------------------------------------

typedef struct run {
    tr_lm t;                        /* train.h's: context, data, optimiser, log, .. */
    stx_span_desc desc;
    stx_span *model;
} run;

// >>training

enum { NOTE_LOSS };      /* the mean loss of a step, nats per token */

/* One step: forward, backward, update. What changes from step to step comes from t.in, t.out and the optimiser's rate, so that a GPU can
   repeat it without this function (stx_step_run). */
static void step(void *user) {
    run *r = (run *)user;
    stx_ctx *x = r->t.x;
    size_t part, parts = opt.batch_split;
    for (part = 0; part < parts; part++) {      /* gradients add up over the parts of the batch */
        stx_span_state *memory = (stx_span_state *)r->t.state[part];
        stx_tensor *loss;
        stx_begin(x, STX_TRAIN);
        loss = stx_span_loss(r->model, r->t.in[part], r->t.out[part], memory, memory);
        stx_note(x, NOTE_LOSS, loss, 1.0 / (double)parts, part > 0);
        if (part + 1 == parts) stx_group_overlap(r->t.optim);
        stx_backward(x, stx_scale(x, stx_span_total(r->model, loss), 1.0 / (double)parts));
    }
    stx_optim_step(r->t.optim, r->t.lr);
    stx_span_clamp(r->model);
}

/* The span of each head, layer by layer (one for each layer with --span-per-layer), as a list and as curves. A curve for each head, not a
   histogram: a histogram has the spread of the spans, but no longer whose they are, and few heads hardly fill one. */
static void log_spans(run *r) {
    size_t l, h, heads = opt.span_per_layer ? 1 : (size_t)opt.nheads;
    char text[64];
    tr_buf list;
    memset(&list, 0, sizeof list);
    tr_buf_puts(&list, "[");
    for (l = 0; opt.adapt_span && l < opt.nlayers; l++)
        for (h = 0; h < heads; h++) {
            double v = stx_span_of(r->model, l, h);
            snprintf(text, sizeof text, l + h ? ",%.4g" : "%.4g", v);       /* a picture shows no more digits */
            tr_buf_puts(&list, text);
            snprintf(text, sizeof text, "span/layer_%zu_head_%zu", l + 1, h + 1);
            tr_lm_point(&r->t, text, v);
        }
    tr_buf_puts(&list, "]");
    tr_log_json(&r->t.log, "spans", list.oom ? NULL : list.s);
    tr_buf_free(&list);
}

static void train(tr_lm *t) {
    run *r = (run *)t;
    while (tr_lm_more(t)) {
        int fresh = stx_batches_next(t->batches, t->tokens, t->targets);
        uint64_t key;
        if (fresh == STX_BATCH_END) break;
        key = tr_lm_batch(t, fresh == STX_BATCH_FRESH);

        t->lr = stx_schedule_lr(&t->schedule, t->step + 1);
        stx_optim_rate(t->optim, t->lr);
        tr_lm_step(t, key, step, r);
        if (!tr_lm_stepped(t, stx_noted(t->x, NOTE_LOSS))) break;

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
        if (!tr_lm_look_and_save(t)) break;
    }
}

static void print_spans(const tr_lm *t, FILE *out) {
    size_t l, h;
    if (!opt.adapt_span) return;
    fprintf(out, "learned span of each head, tokens (of %llu; a ramp of %g comes on top)\n", (unsigned long long)opt.attn_span,
        opt.adapt_span_ramp);
    for (l = 0; l < opt.nlayers; l++) {
        fprintf(out, "  layer %2zu ", l);
        for (h = 0; h < opt.nheads; h++) fprintf(out, " %6.0f", stx_span_of(((const run *)t)->model, l, h));
        fprintf(out, "\n");
    }
}

// >>main

/* The library's error in the options' words */
static int why(tr_lm *t) {
    static const tr_word words[] = {{"layers", "nlayers"}, {"dim", "hid-sz"}, {"heads", "nheads"}, {"inner", "inner-hid-sz"},
        {"span_init", "adapt-span-init"}, {"span_loss", "adapt-span-loss"}, {"span", "attn-span"}, {"pers", "pers-mem-size"},
        {"ramp", "adapt-span-ramp"}, {"cutoff", "adapt-io-cutoffs"},
        {"width of the first cluster / divval^cutoffs", "the width of the last cluster, --hid-sz / --adapt-io-divval^cutoffs,"},
        {"divval", "adapt-io-divval"}, {"cutoffs", "adapt-io-cutoffs"},
        {"a smaller divval or a larger width", "a smaller --adapt-io-divval or a larger --hid-sz"},
        {" has STX_SPAN_LITERAL_EPS, which", " eps"},
        {"adapt_span without no_renorm", "--adapt-span without --no-renorm"},
        {"STX_SPAN_LITERAL takes", "--literal without names takes"}, {NULL, NULL}};
    return tr_lm_why_in(t, "stx_span_create: ", words);
}
/* The model that the options describe, for a vocabulary. */
static int describe(run *r, size_t vocab) {
    stx_span_desc *d = &r->desc;
    memset(d, 0, sizeof *d);
    d->vocab = vocab;
    d->layers = opt.nlayers; d->dim = opt.hid_sz; d->heads = opt.nheads; d->inner = opt.inner_hid_sz; d->span = opt.attn_span;
    d->adapt_span = opt.adapt_span; d->full_cache = !opt.adapt_span_cache;
    d->ramp = opt.adapt_span_ramp; d->span_init = opt.adapt_span_init;
    d->span_loss = opt.adapt_span_loss; d->pers = opt.pers_mem_size; d->adapt_io = opt.adapt_io; d->adapt_io_tied = opt.adapt_io_tied;
    d->divval = opt.adapt_io_divval; d->dropout = opt.dropout; d->emb_dropout = opt.emb_dropout;
    d->literal = (unsigned)opt.literal;
    d->no_renorm = opt.no_renorm; d->span_per_layer = opt.span_per_layer; d->fairseq_init = opt.fairseq_init;
    return tr_lm_cutoffs(&r->t, d->cutoff, &d->cutoffs);
}
static size_t count(tr_lm *t, size_t vocab) {
    run *r = (run *)t;
    size_t n;
    if (!describe(r, vocab)) return 0;
    n = stx_span_count(&r->desc);
    if (!n) { stx_span_create(t->x, &r->desc); why(t); }      /* which says why not */
    return n;
}
static void shape(const tr_lm *t, char *line, size_t room, double *states) {
    (void)t;
    snprintf(line, room, "%llu layers, %llu heads, span %llu", (unsigned long long)opt.nlayers, (unsigned long long)opt.nheads,
        (unsigned long long)opt.attn_span);
    *states = (double)opt.batch_sz * (double)opt.hid_sz * (double)opt.nlayers * (double)opt.attn_span;
}
static int make(tr_lm *t) {
    run *r = (run *)t;
    stx_optim_desc od;
    if (!describe(r, stx_vocab_size(t->vocab)) || !tr_lm_fits(t, (double)stx_span_count(&r->desc))) return 0;
    r->model = stx_span_create(t->x, &r->desc);
    t->lm = stx_span_lm(r->model);
    if (r->model && t->training) {
        static const int kinds[] = {STX_ADAGRAD, STX_SGD, STX_ADAM, STX_ADAMW};
        memset(&od, 0, sizeof od);
        od.kind = kinds[opt.optim];
        od.momentum = opt.momentum; od.clip = opt.grad_clip; od.weight_decay = opt.weight_decay;
        return tr_lm_make(t, &od, 1);
    }
    return stx_ok(t->x) ? 1 : why(t);
}
static int check(tr_lm *t) {
    size_t cutoff[STX_MAX_CLUSTERS - 1], cutoffs;
    const tr_only only[] = {
        {"adapt-span-loss", opt.adapt_span, "--adapt-span"},
        {"adapt-span-ramp", opt.adapt_span, "--adapt-span"},
        {"adapt-span-init", opt.adapt_span, "--adapt-span"},
        {"adapt-span-cache", opt.adapt_span, "--adapt-span"},
        {"adapt-io-tied", opt.adapt_io, "--adapt-io"},
        {"adapt-io-divval", opt.adapt_io, "--adapt-io"},
        {"adapt-io-cutoffs", opt.adapt_io, "--adapt-io"},
        {"momentum", opt.optim == 1, "--optim sgd"},
        {"lr-min", opt.schedule == 1, "--schedule cosine"},
        {"niter", !tr_given(&options, "steps") || !opt.lm.steps, "runs without --steps"}
    };
    if (!tr_all_count(&options, only, sizeof only / sizeof *only, t->err, TR_ERR)) return 0;
    if ((opt.no_renorm || opt.span_per_layer) && !opt.adapt_span)
        return tr_fail(t->err, TR_ERR, "--%s needs --adapt-span", opt.no_renorm ? "no-renorm" : "span-per-layer");
    if (opt.hid_sz % opt.nheads)
        return tr_fail(t->err, TR_ERR, "--nheads %llu does not divide --hid-sz %llu",
                       (unsigned long long)opt.nheads, (unsigned long long)opt.hid_sz);
    return tr_lm_cutoffs(t, cutoff, &cutoffs);
}
static void plan(tr_lm *t) {
    static const int kinds[] = {STX_LR_CONSTANT, STX_LR_COSINE, STX_LR_INV_SQRT};
    /* a number of iterations that is given counts more than steps that only the checkpoint has */
    if (tr_find_option(&options, "steps", 5)->from == TR_FROM_CHECKPOINT && tr_find_option(&options, "niter", 5)->from > TR_FROM_CHECKPOINT)
        opt.lm.steps = 0;
    t->steps = opt.lm.steps ? opt.lm.steps : opt.niter * opt.nbatches;
    t->log_every = opt.lm.log_every ? opt.lm.log_every : 10;
    t->eval_every = opt.lm.eval_every ? opt.lm.eval_every : opt.nbatches;
    t->save_every = opt.lm.save_every ? opt.lm.save_every : opt.nbatches;
    t->eval_blocks = opt.lm.eval_blocks ? opt.lm.eval_blocks : opt.nbatches < 10 ? 1 : opt.nbatches / 10;
    t->eval_block = opt.block_sz;
    t->eval_literal = opt.full_eval;
    t->schedule.kind = kinds[opt.schedule];
    t->schedule.lr = opt.lr; t->schedule.lr_min = opt.lr_min; t->schedule.warmup = opt.lr_warmup; t->schedule.total = t->steps;
}
static const tr_lm_kind kind = {
    "seqtx.attn_span.1", "memory", &opt.adapt_io, &opt.cutoffs, STX_ORDER_COUNT_LATER, 0,
    {"nlayers=2 hid-sz=64 attn-span=128 dropout=0.2", "dropout=0.1", ""},
    check, plan, count, shape, make, train, print_spans, sizeof(run)
};
int main(int argc, char **argv) {
    static run r;
    return tr_lm_main(&r.t, &kind, &options, &opt.lm, &opt.full_eval, argc, argv);
}
