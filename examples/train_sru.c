/* train_sru.c - trains, evaluates and samples from SRU and SRU++ models

       cc -O3 -pthread train_sru.c -lm -o train_sru
       ./train_sru --data FILE --steps 2000 --checkpoint run.safetensors
       ./train_sru --help

   The training loop is in step() and train() below. Option parsing, text input,
   checkpoints, logging and terminal output come from train.h, which all trainers
   share. */
#define TR_LM
#include "train.h"
#define SEQTX_IMPLEMENTATION
#include "../seqtx_sru.h"
#include "../seqtx_text.h"


// >>options

/* Compile-time check: --literal without names selects the same flags as
   STX_SRU_LITERAL. */
typedef char literal_is_every[(int)STX_SRU_LITERAL == (int)TR_EVERY ? 1 : -1];

enum { CELL_SRUPP, CELL_SRU };

enum { OPTIM_RADAM, OPTIM_ADAMW, OPTIM_ADAM, OPTIM_SGD, OPTIM_ADAGRAD };

enum { LR_CONSTANT, LR_COSINE, LR_INV_SQRT, LR_RECURSIVE, LR_NOAM };

static struct {
    /* model */
    int         cell;
    uint64_t    nlayers, hid_sz, emb_sz, proj_sz;
    int         skip, rescale, tanh, v1, norm, input_first, init_xavier, literal;
    double      highway_bias, v_init;
    double      dropout, rnn_dropout;

    /* attention */
    uint64_t    nheads, attention_every, attention_last;
    int         attention, attn_norm, attn_norm_first;
    double      attn_dropout, alpha_init;

    /* input and output */
    int         tied, adapt_io, adapt_io_separate;
    double      adapt_io_divval;
    const char *cutoffs;
    double      io_dropout, emb_dropout;

    /* optimisation */
    int         optim, radam_skip, schedule, lr_first_zero, sum_loss;
    double      lr, momentum, weight_decay, grad_clip, lr_min, lr_decay;
    uint64_t    lr_warmup, lr_decay_from, lr_decay_every;
    uint64_t    batch_sz, batch_split, update_param_freq, block_sz, eval_unroll;

    tr_lm_opt   lm;         /* options shared by all trainers */
} opt;

/* The second column determines how checkpoints treat the option: see "Resuming" in
   train.h. */
static tr_opt table[] = {
    TR_GROUP("Model"),
    TR_CHOICE("cell", TR_MODEL, &opt.cell, "sru++|sru",
        "sru++: attention in the input transform of each layer; sru: recurrence only"),
    TR_SIZE("nlayers", TR_MODEL, &opt.nlayers, 1, 4096, "number of layers"),
    TR_SIZE("hid-sz", TR_MODEL, &opt.hid_sz, 1, 1u << 28, "model dimension d"),
    TR_SIZE("emb-sz", TR_MODEL, &opt.emb_sz, 0, 1u << 28,
        "width of the embedding (with --adapt-io: of its first cluster); 0: --hid-sz"),
    TR_SIZE("proj-sz", TR_MODEL, &opt.proj_sz, 0, 1u << 28,
        "width of the projection in each layer. sru++: 0 means a quarter of --hid-sz. sru: 0 "
        "means no projection; layers that are not wider than it have none"),
    TR_FLAG("skip", TR_MODEL, &opt.skip, "highway from a layer's input to its output"),
    TR_REAL("highway-bias", TR_MODEL, &opt.highway_bias, -80, 80,
        "initial bias of the reset gate"),
    TR_FLAG("rescale", TR_MODEL, &opt.rescale, "multiply the highway by sqrt(1 + 2 e^bias)"),
    TR_FLAG("tanh", TR_MODEL, &opt.tanh, "output the tanh of the state"),
    TR_FLAG("v1", TR_MODEL, &opt.v1, "gates do not depend on the state (SRU of 2017)"),
    TR_CHOICE("norm", TR_MODEL, &opt.norm, "none|before|after",
        "layer norm of each cell: before the input transform or after the recurrence"),
    TR_FLAG("input-first", TR_MODEL, &opt.input_first,
        "if --emb-sz differs from --hid-sz: project the embedding to --hid-sz first, so that all "
        "layers have the same shapes"),
    TR_REAL_OPEN("dropout", TR_FREE, &opt.dropout, TR_OPEN_MAX, 0, 1,
        "dropout probability of the embedding, within every layer, and of the last hidden state"),
    TR_REAL_OPEN("rnn-dropout", TR_FREE, &opt.rnn_dropout, TR_OPEN_MAX, 0, 1,
        "dropout probability of the input of every transform, with one mask for all time steps"),
    TR_FLAG("init-xavier", TR_FIXED, &opt.init_xavier,
        "with --cell sru: initialise as version 3.0 of the authors' code does, instead of 2.6 "
        "(sru++ always uses 3.0)"),
    TR_REAL("v-init", TR_FIXED, &opt.v_init, 0, 1e6,
        "bound of the initial gate vectors; 0: as in the authors' code"),
    TR_SET("literal", TR_MODEL, &opt.literal, "norm", 0,
        "reproduce accidental behaviour of the authors' code. norm: with --norm before, do not "
        "normalise the memory"),

    TR_GROUP("Attention (sru++)"),
    TR_SIZE("nheads", TR_MODEL, &opt.nheads, 1, 256,
        "number of attention heads; must divide --proj-sz"),
    TR_FLAG("attention", TR_MODEL, &opt.attention,
        "use attention in the layers; with --no-attention, they only project"),
    TR_SIZE("attention-every", TR_MODEL, &opt.attention_every, 0, 4096,
        "only layers N, 2 N, .. attend; 0: all"),
    TR_SIZE("attention-last", TR_MODEL, &opt.attention_last, 0, 4096,
        "only the last N layers attend; 0: all"),
    TR_REAL_OPEN("attn-dropout", TR_FREE, &opt.attn_dropout, TR_OPEN_MAX, 0, 1,
        "dropout probability of attention weights"),
    TR_FLAG("attn-norm", TR_MODEL, &opt.attn_norm, "layer norm in the transform of each layer"),
    TR_FLAG("attn-norm-first", TR_MODEL, &opt.attn_norm_first,
        "apply this layer norm before the attention instead of after it"),
    TR_REAL("alpha-init", TR_FIXED, &opt.alpha_init, -1e6, 1e6,
        "initial weight of the attention; 0: training starts without attention"),

    TR_GROUP("Input and output"),
    TR_FLAG("tied", TR_MODEL, &opt.tied, "use the embedding as the output matrix, too"),
    TR_FLAG("adapt-io", TR_MODEL, &opt.adapt_io,
        "adaptive embedding and softmax with shared tables, for large vocabularies"),
    TR_FLAG("adapt-io-separate", TR_MODEL, &opt.adapt_io_separate,
        "use separate projections for the embedding and the softmax"),
    TR_REAL_OPEN("adapt-io-divval", TR_MODEL, &opt.adapt_io_divval, TR_OPEN_MIN, 1, 1e6,
        "each cluster is narrower than the previous one by this factor"),
    TR_TEXT("adapt-io-cutoffs", TR_MODEL, &opt.cutoffs,
        "ends of the clusters, such as 20000,40000,200000 (the default)"),
    TR_REAL("io-dropout", TR_FREE, &opt.io_dropout, -1, 0.99,
        "dropout probability of the embedding and the last hidden state; 0: --dropout, -1: none"),
    TR_REAL_OPEN("emb-dropout", TR_FREE, &opt.emb_dropout, TR_OPEN_MAX, 0, 1,
        "dropout probability inside the adaptive embedding and softmax"),

    TR_GROUP("Optimisation"),
    TR_CHOICE("optim", TR_FIXED, &opt.optim, "radam|adamw|adam|sgd|adagrad", "optimiser"),
    TR_FLAG("radam-skip", TR_FIXED, &opt.radam_skip,
        "with --optim radam: leave the parameters unchanged in the first 5 updates, in which the "
        "variance is unknown, as later versions do, instead of updating without the variance"),
    TR_REAL("lr", TR_FREE, &opt.lr, 0, 1e6, "learning rate"),
    TR_CHOICE("schedule", TR_FREE, &opt.schedule, "constant|cosine|inv-sqrt|recursive|noam",
        "learning-rate schedule after the warm-up. recursive: the authors' cosine, from the end "
        "of the warm-up; noam: lr / sqrt(d) min(n^-0.5, n warmup^-1.5) in update n"),
    TR_SIZE("lr-warmup", TR_FREE, &opt.lr_warmup, 0, TR_INF,
        "length of the linear warm-up, in updates"),
    TR_FLAG("lr-first-zero", TR_FREE, &opt.lr_first_zero,
        "with --schedule recursive: the first update has a rate of 0, as in the authors' "
        "WikiText-103 trainer"),
    TR_REAL("lr-min", TR_FREE, &opt.lr_min, 0, 1e6,
        "learning rate at the end of the cosine schedule"),
    TR_REAL_OPEN("lr-decay", TR_FREE, &opt.lr_decay, TR_OPEN_MIN, 0, 1,
        "factor by which the rate of any schedule decays after --lr-decay-from updates; 1: no "
        "decay"),
    TR_SIZE("lr-decay-from", TR_FREE, &opt.lr_decay_from, 0, TR_INF,
        "updates before the first decay"),
    TR_SIZE("lr-decay-every", TR_FREE, &opt.lr_decay_every, 0, TR_INF,
        "updates from one decay to the next; 0: decay once"),
    TR_REAL("momentum", TR_FIXED, &opt.momentum, 0, 1, "momentum of sgd"),
    TR_REAL("weight-decay", TR_FREE, &opt.weight_decay, 0, 1e6,
        "weight decay of radam and adamw (decoupled) and of adam and sgd (added to the "
        "gradient); adagrad has none"),
    TR_REAL("grad-clip", TR_FREE, &opt.grad_clip, 0, 1e9,
        "gradient clipping norm, per tensor with adagrad, otherwise over all tensors; 0: no "
        "clipping"),
    TR_FLAG("sum-loss", TR_FIXED, &opt.sum_loss,
        "sum the loss over the time steps of a block instead of averaging it, which multiplies "
        "the gradients by --block-sz"),
    TR_SIZE("batch-sz", TR_FIXED, &opt.batch_sz, 1, 1u << 30, "number of parallel text streams"),
    TR_SIZE("batch-split", TR_FIXED, &opt.batch_split, 1, 1u << 30,
        "process the batch in this many parts, to save memory"),
    TR_SIZE("block-sz", TR_FIXED | TR_KEPT, &opt.block_sz, 1, 1u << 30,
        "tokens per stream and pass (unroll); attention also sees the previous block"),
    TR_SIZE("update-param-freq", TR_FIXED, &opt.update_param_freq, 1, 1u << 20,
        "blocks of each stream per update, processed one after the other"),
    TR_SIZE("steps", TR_FREE, &opt.lm.steps, 0, TR_INF, "total number of updates; 0: 1000"),
    TR_SIZE("seed", TR_FIXED, &opt.lm.seed, 0, TR_INF,
        "seed of initial values and dropout. If given, also the seed of sampling; otherwise "
        "sampling differs every time"),
    TR_LM_DATA(opt.lm),
    TR_LM_SAVING(opt.lm, "only at the end", "the whole text"),
    TR_SIZE("eval-unroll", TR_FREE | TR_KEPT, &opt.eval_unroll, 0, 1u << 30,
        "evaluation and generation: size of a block, and number of tokens that attention looks "
        "back; 0: --block-sz"),
    TR_LM_RUNNING(opt.lm),
    TR_LM_GENERATION(opt.lm),
    TR_LM_SAMPLING(opt.lm),
    TR_END
};

/* DEMO contains the defaults without --preset: the demo's model and optimiser, which
   kind.sized below scales to the size of the text. */
#define CELL \
    "cell=sru++ nheads=1 skip attention attn-norm adapt-io-divval=4 lr-decay=1 batch-split=1 " \
    "update-param-freq=1 "
#define DEMO \
    CELL "tokens=bytes nlayers=4 hid-sz=384 attention-last=2 highway-bias=-1 " \
    "batch-sz=32 block-sz=64 eval-unroll=256 steps=2400 " \
    "optim=radam lr=0.02 schedule=recursive lr-warmup=60 weight-decay=0.01 grad-clip=1 "

/* The settings that all published SRU++ runs share, with 4 layers of width 512. */
#define REFERENCE \
    CELL "tokens=bytes nlayers=4 hid-sz=512 proj-sz=128 emb-sz=0 attention-last=0 " \
    "highway-bias=-2 dropout=0.1 attn-dropout=0.1 " \
    "batch-sz=16 block-sz=256 eval-unroll=0 steps=1000 " \
    "optim=radam lr=0.0003 schedule=recursive lr-warmup=100 weight-decay=0.1 grad-clip=1 "

/* The published experiments (2102.12459, appendix A; 1709.02755, section 4). batch-sz
   is the total over all of the authors' GPUs. */
#define SRUPP \
    REFERENCE "nlayers=10 lr-warmup=16000 log-every=200 eval-every=8000 save-every=2000 "
#define ENWIK8 \
    SRUPP "tokens=bytes-compact data-unit=bpc vocab=205 steps=400000 eval-batch-sz=16 "
#define WT103 \
    SRUPP "tokens=words data-unit=ppl vocab=267735 adapt-io emb-sz=1024 " \
    "adapt-io-cutoffs=19997,39997,199997 lr=0.0003 lr-first-zero steps=400000 batch-sz=64 " \
    "eval-unroll=2560 eval-batch-sz=16 "
#define LM1B \
    SRUPP "tokens=words data-unit=ppl vocab=793471 adapt-io adapt-io-separate emb-sz=1024 " \
    "adapt-io-cutoffs=59998,159998 lr=0.0002 steps=800000 block-sz=64 " \
    "eval-unroll=96 eval-batch-sz=8 attn-dropout=0 emb-dropout=0 "
#define OLDER \
    REFERENCE "cell=sru tokens=bytes-compact data-unit=bpc vocab=205 proj-sz=0 " \
    "highway-bias=-3 attn-dropout=0 optim=adam lr=0.001 schedule=constant lr-warmup=0 " \
    "weight-decay=0.0000001 grad-clip=0.3 log-every=100 eval-every=7000 save-every=2000 "
#define OLDER_SMALL OLDER "emb-sz=205 dropout=0.2 batch-sz=128 block-sz=100 steps=703100 "
#define OLDER_PROJ OLDER "proj-sz=512 emb-sz=256 dropout=0.3 batch-sz=64 block-sz=256 steps=549300 "

static const tr_preset presets[] = {
    {"demo", "a small byte-level model that trains in two minutes on two cores (make demo-sru)",
        DEMO "proj-sz=96 dropout=0 attn-dropout=0 eval-every=800 save-every=800 eval-blocks=5 "
        "log-every=100"},
    {"reference", "SRU++, 4 layers of 512 with the settings that the published runs share",
        REFERENCE},
    {"enwik8-base", "SRU++, 107.6M parameters: published test 0.974 bpc",
        ENWIK8 "hid-sz=3072 proj-sz=768 dropout=0.22 attn-dropout=0.22 lr=0.0003 batch-sz=32 "
        "block-sz=1024 eval-unroll=3072"},
    {"enwik8-large", "SRU++, 190.6M parameters: published test 0.96 bpc",
        ENWIK8 "hid-sz=4096 proj-sz=1024 dropout=0.32 attn-dropout=0.32 lr=0.0004 batch-sz=64 "
        "block-sz=1024 eval-unroll=3072"},
    {"enwik8-large-8to1",
        "SRU++, 195.0M parameters: published test 0.953 bpc; published sizes, other settings as "
        "in enwik8-large",
        ENWIK8 "hid-sz=6016 proj-sz=752 dropout=0.32 attn-dropout=0.32 lr=0.0004 batch-sz=64 "
        "block-sz=1024 eval-unroll=3072"},
    {"enwik8-fp32", "SRU++, 42.3M parameters: the authors' variant for one machine",
        ENWIK8 "hid-sz=1920 proj-sz=480 dropout=0.1 attn-dropout=0.1 lr=0.00025 lr-warmup=0 "
        "batch-sz=24 block-sz=512 eval-batch-sz=32"},
    {"wt103-base", "SRU++ on words, 147.7M parameters: published test 18.3 ppl",
        WT103 "hid-sz=3072 proj-sz=768 dropout=0.15 attn-dropout=0.15 emb-dropout=0.15 "
        "block-sz=768"},
    {"wt103-large", "SRU++ on words, 231.7M parameters: published test 17.4 ppl",
        WT103 "hid-sz=4096 proj-sz=1024 dropout=0.2 attn-dropout=0.2 emb-dropout=0.2 "
        "block-sz=1024"},
    {"wt103-large-8to1", "SRU++ on words, 233.7M parameters: published test 17.1 ppl",
        WT103 "hid-sz=5952 proj-sz=744 dropout=0.2 attn-dropout=0.2 emb-dropout=0.2 "
        "block-sz=1024"},
    {"wt103-large-k5",
        "wt103-large-8to1 with attention only in layers 5 and 10, 224.9M parameters: published "
        "test 17.3 ppl",
        WT103 "hid-sz=5952 proj-sz=744 attention-every=5 dropout=0.2 attn-dropout=0.2 "
        "emb-dropout=0.2 block-sz=1024"},
    {"lm1b-base",
        "SRU++ on words, 328.3M parameters: published test 25.1 ppl, on streams of sentences "
        "that are not reproduced here",
        LM1B "hid-sz=4096 proj-sz=1024 dropout=0.05 batch-sz=1024"},
    {"lm1b-large-k5",
        "SRU++ on words with attention only in layers 5 and 10, 465.3M parameters: published "
        "test 23.5 ppl, on streams as in lm1b-base",
        LM1B "hid-sz=7616 proj-sz=1024 attention-every=5 dropout=0.1 batch-sz=1536"},
    {"enwik8-sru", "SRU, 6 layers of 1024: the defaults of the authors' older trainer",
        OLDER_SMALL "nlayers=6 hid-sz=1024"},
    {"enwik8-sru-8x1312",
        "SRU, 37M parameters; this preset and the next three have published sizes, and other "
        "settings as in enwik8-sru",
        OLDER_SMALL "nlayers=8 hid-sz=1312"},
    {"enwik8-sru-10x1152", "SRU, 37M parameters",
        OLDER_SMALL "nlayers=10 hid-sz=1152"},
    {"enwik8-sru-8x3056", "SRU with projections to 512, 47M parameters",
        OLDER_PROJ "nlayers=8 hid-sz=3056"},
    {"enwik8-sru-12x2048",
        "SRU with projections to 512, published with 47M parameters, 48.8M here",
        OLDER_PROJ "nlayers=12 hid-sz=2048"},
    {"ptb", "SRU of 2017 on the words of Penn Treebank, 6 layers of 910, 24M parameters",
        REFERENCE "cell=sru tokens=words data-unit=ppl vocab=10000 nlayers=6 hid-sz=910 "
        "proj-sz=0 tied v1 highway-bias=-3 dropout=0.2 rnn-dropout=0.2 io-dropout=0.7 "
        "attn-dropout=0 optim=sgd lr=1 schedule=constant lr-warmup=0 lr-decay=0.98 "
        "lr-decay-from=145075 lr-decay-every=829 weight-decay=0.00001 grad-clip=5 sum-loss "
        "batch-sz=32 block-sz=35 steps=248700 log-every=100 eval-every=829 save-every=829"},
    TR_PRESET_END
};

static tr_options options = {
    "train_sru",
    "Trains an SRU or SRU++ language model on text. The papers' recipes are available as presets. "
    "Not reproduced: the Billion Word trainer's streams of shuffled sentences (<S> w .. <S>, with "
    "a separate vocabulary file; here the text is read in order and <eos> ends a line), the "
    "targets that the authors' code predicts across the ends of streams, the short last block of "
    "an epoch, and training on several GPUs.",
    table, presets, TR_LM_DEFAULTS DEMO, TR_LM_AFTER, ""
};


// >>run: the state of a run

typedef struct run {
    tr_lm           t;      /* context, text, optimiser, log and more: see train.h */
    stx_sru_lm_desc desc;
    stx_sru_lm     *model;
    size_t         *projs;  /* (nlayers) storage of desc.sru.projs with --cell sru */
} run;


// >>training

enum { METRIC_LOSS };       /* mean loss of an update, in nats per token */

/* One update: a forward and a backward pass over each block, which accumulate gradients,
   then an optimiser step. Everything that changes between updates is read from t.in,
   t.out and the optimiser's learning rate, so that a GPU can replay the step
   (stx_step_run). */
static void step(void *user) {
    run *r = (run *)user;
    stx_ctx *x = r->t.x;
    const size_t parts = opt.batch_split, blocks = parts * opt.update_param_freq;
    const double share = 1.0 / (double)blocks;
    const double scale = opt.sum_loss ? share * (double)opt.block_sz : share;
    size_t i;
    for (i = 0; i < blocks; i++) {
        stx_sru_state *state = (stx_sru_state *)r->t.state[i % parts];
        stx_tensor *loss;
        stx_begin(x, STX_TRAIN);
        loss = stx_sru_lm_loss(r->model, r->t.in[i], r->t.out[i], state, state);
        stx_metric_set(x, METRIC_LOSS, loss, share, i > 0);
        if (i + 1 == blocks) stx_group_overlap(r->t.optim);
        stx_backward(x, stx_scale(x, loss, scale));
    }
    stx_optim_step(r->t.optim, r->t.lr);
}

/* Reads the blocks (B,T) of the next update, in order. If the rest of the text is too
   short for an update, the next epoch starts at the beginning of the text with empty
   states, as in the authors' code. */
static int next_update(tr_lm *t) {
    stx_batches *b = t->batches;
    stx_batches_state at = stx_batches_get(b);
    const size_t T = opt.block_sz, tokens = opt.batch_sz * T;
    const int fresh = at.fresh || at.p + opt.update_param_freq * T >= stx_batches_stream(b);
    size_t i;
    if (fresh && at.p) {
        if (!at.fresh) at.wraps++;
        at.p = 0;
        at.fresh = 1;
        if (!stx_batches_set(b, at)) return STX_BATCH_END;
    }
    for (i = 0; i < opt.update_param_freq; i++) {
        int got = stx_batches_next(b, t->tokens + i * tokens, t->targets + i * tokens);
        if (got == STX_BATCH_END) return STX_BATCH_END;
    }
    return fresh ? STX_BATCH_FRESH : STX_BATCH_OK;
}

static void train(tr_lm *t) {
    while (tr_lm_more(t)) {
        int fresh = next_update(t);
        uint64_t key;
        if (fresh == STX_BATCH_END) break;
        key = tr_lm_batch(t, fresh == STX_BATCH_FRESH);

        t->lr = stx_schedule_lr(&t->schedule, t->step + 1);
        stx_optim_set_lr(t->optim, t->lr);
        tr_lm_step(t, key, step, t);
        if (!tr_lm_stepped(t, stx_metric_get(t->x, METRIC_LOSS))) break;

        if (tr_lm_log_due(t)) {
            tr_log_int(&t->log, "skipped", t->optim->skipped);
            tr_lm_logged(t);
        }
        if (!tr_lm_evaluate_and_save(t)) break;
    }
}

/* Prints each layer's learned attention weight at the end of a run. */
static void print_alpha(const tr_lm *t, FILE *out) {
    const run *r = (const run *)t;
    size_t l, count = 0;
    for (l = 0; l < opt.nlayers; l++) {
        const stx_sru_layer *layer = &r->model->sru->layer[l];
        stx_real alpha;
        if (!layer->attends) continue;
        stx_get(t->x, layer->alpha_attn, &alpha);
        fprintf(out, "%s%.3f (layer %zu)", count++ ? ", " : "learned weight of attention: ",
                (double)alpha, l + 1);
    }
    if (count) fprintf(out, "\n");
}


// >>main

/* Reports the library's error, with field names replaced by option names. */
static int report_error(tr_lm *t) {
    static const tr_word words[] = {
        {"layers", "nlayers"},
        {"hidden", "hid-sz"},
        {"dim", "hid-sz"},
        {"proj", "proj-sz"},
        {"heads", "nheads"},
        {"divisor of proj ", "divisor of --proj-sz "},
        {"emb_adaptive", "emb-sz"},
        {"emb", "emb-sz"},
        {"cutoff", "adapt-io-cutoffs"},
        {"width of the first cluster / divval^cutoffs",
            "the width of the last cluster, --emb-sz / --adapt-io-divval^cutoffs,"},
        {"divval", "adapt-io-divval"},
        {"cutoffs", "adapt-io-cutoffs"},
        {"a smaller divval or a larger width", "a smaller --adapt-io-divval or a larger --emb-sz"},
        {": STX_SRU_LITERAL_NORM", " norm"},
        {"STX_SRU_ATTENTION with STX_SRU_NORM_BEFORE", "--cell sru++ with --norm before"},
        {"STX_SRU_LITERAL selects", "--literal without names selects"},
        {NULL, NULL}
    };
    const char *stack = "stx_sru_create: ";
    if (!strncmp(stx_error(t->x), stack, strlen(stack))) return tr_lm_why_in(t, stack, words);
    return tr_lm_why_in(t, "stx_sru_lm_create: ", words);
}

/* Sets r->desc.sru.projs for --cell sru. As in version 2.6 of the authors' code, a
   layer has a projection only if the projection is narrower than the layer's input and
   output. */
static int describe_projs(run *r) {
    const int same_width = opt.input_first || opt.adapt_io || !opt.emb_sz;
    size_t l;
    free(r->projs);
    r->projs = (size_t *)calloc(opt.nlayers, sizeof *r->projs);
    if (!r->projs)
        return tr_fail(r->t.err, TR_ERR, "out of memory: cannot store the projection widths");
    for (l = 0; l < opt.nlayers; l++) {
        size_t inputs = l || same_width ? opt.hid_sz : opt.emb_sz;
        if (opt.proj_sz < inputs && opt.proj_sz < opt.hid_sz) r->projs[l] = opt.proj_sz;
    }
    r->desc.sru.projs = r->projs;
    return 1;
}

/* Creates the model in x and returns the forms of --literal that apply to it. */
static const unsigned *literal_in(stx_ctx *x, const void *desc) {
    const stx_sru_lm *m = stx_sru_lm_create(x, (const stx_sru_lm_desc *)desc);
    return m ? &m->sru->desc.literal : NULL;
}

/* Fills in r->desc from the options. Returns 0 and sets an error if the cutoffs are
   invalid or the forms of --literal cannot be determined. */
static int describe(run *r, size_t vocab) {
    stx_sru_lm_desc *d = &r->desc;
    stx_sru_desc *stack = &d->sru;
    memset(d, 0, sizeof *d);
    d->vocab = vocab;
    d->dim = opt.hid_sz;
    d->tied = opt.tied;
    d->dropout = opt.dropout;
    d->io_dropout = opt.io_dropout;
    d->emb_dropout = opt.emb_dropout;
    d->adapt_io = opt.adapt_io;
    d->separate_projs = opt.adapt_io_separate;
    d->divval = opt.adapt_io_divval;
    if (opt.adapt_io) d->emb_adaptive = opt.emb_sz;
    else d->emb = opt.emb_sz;

    stack->layers = opt.nlayers;
    stack->no_skip = !opt.skip;
    stack->rescale = opt.rescale;
    stack->highway_bias = opt.highway_bias;
    stack->tanh = opt.tanh;
    stack->v1 = opt.v1;
    stack->v_init = opt.v_init;
    stack->norm = opt.norm;
    stack->input_first = opt.input_first;
    stack->rnn_dropout = opt.rnn_dropout;
    if (opt.cell == CELL_SRUPP) {
        stack->transform = STX_SRU_ATTENTION;
        stack->proj = opt.proj_sz;
        stack->heads = opt.nheads;
        stack->attn_dropout = opt.attn_dropout;
        stack->attention_every = opt.attention_every;
        stack->attention_last = opt.attention_last;
        stack->no_attention = !opt.attention;
        stack->no_attn_norm = !opt.attn_norm;
        stack->attn_norm_first = opt.attn_norm_first;
        stack->alpha_init = opt.alpha_init;
    } else {
        stack->transform = STX_SRU_LINEAR;
        stack->init_xavier = opt.init_xavier;
        if (!describe_projs(r)) return 0;
    }
    if (!tr_lm_cutoffs(&r->t, d->cutoff, &d->cutoffs)) return 0;
    if (!opt.adapt_io) d->cutoffs = 0;
    return tr_lm_choose_literal(&r->t, opt.literal, &d->sru.literal, d, literal_in);
}

/* Returns the number of parameters, or sets an error and returns 0. */
static size_t count(tr_lm *t, size_t vocab) {
    run *r = (run *)t;
    size_t n;
    if (!describe(r, vocab)) return 0;
    n = stx_sru_lm_count(&r->desc);
    if (!n) {
        stx_sru_lm_create(t->x, &r->desc);      /* fails too, and sets the error */
        report_error(t);
    }
    return n;
}

/* Writes a one-line description of the model to `line`. *states receives the number of
   elements in the model's memory. */
static void shape(const tr_lm *t, char *line, size_t size, double *states) {
    size_t l, attending = 0;
    (void)t;
    for (l = 0; l < opt.nlayers && opt.cell == CELL_SRUPP && opt.attention; l++) {
        if (opt.attention_last) attending += opt.nlayers - l <= opt.attention_last;
        else attending += !opt.attention_every || (l + 1) % opt.attention_every == 0;
    }
    snprintf(line, size, "%llu layer%s, %zu with attention", (unsigned long long)opt.nlayers,
             tr_s(opt.nlayers), attending);
    *states = (double)opt.nlayers + (double)attending * (double)opt.block_sz;
    *states *= (double)opt.batch_sz * (double)opt.hid_sz;
}

/* Creates the model and, for training, the optimiser. */
static int make(tr_lm *t) {
    static const int kinds[] = {STX_RADAM, STX_ADAMW, STX_ADAM, STX_SGD, STX_ADAGRAD};
    run *r = (run *)t;
    stx_optim_desc od;
    if (!describe(r, stx_vocab_size(t->vocab))) return 0;
    if (!tr_lm_fits(t, (double)stx_sru_lm_count(&r->desc))) return 0;
    r->model = stx_sru_lm_create(t->x, &r->desc);
    t->lm = stx_sru_as_lm(r->model);
    if (!r->model || !t->training) return stx_ok(t->x) ? 1 : report_error(t);
    memset(&od, 0, sizeof od);
    od.kind = kinds[opt.optim];
    od.radam_skip = opt.radam_skip;
    od.momentum = opt.momentum;
    od.clip = opt.grad_clip;
    od.weight_decay = opt.weight_decay;
    /* adagrad has no weight decay: ignore a preset's value */
    if (opt.optim == OPTIM_ADAGRAD && !tr_given(&options, "weight-decay")) od.weight_decay = 0;
    return tr_lm_make(t, &od, opt.update_param_freq);
}

/* Checks the attention options. If --attention-last was not given, its default is
   adjusted first: it becomes 0 if --attention-every is set, and at most --nlayers
   otherwise. */
static int check_attention(tr_lm *t) {
    const unsigned long long layers = opt.nlayers, proj = opt.proj_sz;
    if (!tr_lm_decided(t, "attention-last")) {
        if (opt.attention_every) opt.attention_last = 0;
        if (opt.attention_last > opt.nlayers) opt.attention_last = opt.nlayers;
    }
    if (opt.cell != CELL_SRUPP || !opt.attention) return 1;
    if (opt.attention_every > opt.nlayers || opt.attention_last > opt.nlayers)
        return tr_fail(t->err, TR_ERR,
                       "--attention-%s: expected at most --nlayers %llu (--no-attention for "
                       "none), got %llu", opt.attention_every ? "every" : "last", layers,
                       (unsigned long long)(opt.attention_every ? opt.attention_every
                                                                : opt.attention_last));
    if (opt.proj_sz % opt.nheads)
        return tr_fail(t->err, TR_ERR, "--nheads: expected a divisor of --proj-sz %llu, got %llu",
                       proj, (unsigned long long)opt.nheads);
    if (tr_lm_by_token(t) && opt.literal && opt.norm == STX_SRU_NORM_BEFORE
        && !(tr_set_removed(opt.literal) & STX_SRU_LITERAL_NORM))
        return tr_fail(t->err, TR_ERR,
                       "--%s and --literal norm cannot be combined: keys would depend on where "
                       "blocks begin; omit --%s", tr_lm_by_token(t), tr_lm_by_token(t));
    return 1;
}

/* Checks that the options are consistent before any text is read. */
static int check(tr_lm *t) {
    const int srupp = opt.cell == CELL_SRUPP, attends = srupp && opt.attention;
    const int recursive = opt.schedule == LR_RECURSIVE, decays = opt.lr_decay < 1;
    const int other_width = opt.emb_sz && opt.emb_sz != opt.hid_sz;
    const tr_only only[] = {
        {"init-xavier", !srupp, "--cell sru"},
        {"attention", srupp, "--cell sru++"},
        {"attention-every", attends, "the attention of --cell sru++"},
        {"attention-last", attends, "the attention of --cell sru++"},
        {"attn-dropout", attends, "the attention of --cell sru++"},
        {"attn-norm", srupp, "--cell sru++"},
        {"attn-norm-first", srupp && opt.attn_norm, "--attn-norm with --cell sru++"},
        {"alpha-init", attends, "the attention of --cell sru++"},
        {"highway-bias", opt.skip, "--skip"},
        {"rescale", opt.skip, "--skip"},
        {"v-init", !opt.v1, "gates that depend on the state (without --v1)"},
        {"input-first", other_width && !opt.adapt_io,
            "--emb-sz other than --hid-sz, without --adapt-io"},
        {"adapt-io-separate", opt.adapt_io, "--adapt-io"},
        {"adapt-io-divval", opt.adapt_io, "--adapt-io"},
        {"adapt-io-cutoffs", opt.adapt_io, "--adapt-io"},
        {"emb-dropout", opt.adapt_io, "--adapt-io"},
        {"radam-skip", opt.optim == OPTIM_RADAM, "--optim radam"},
        {"momentum", opt.optim == OPTIM_SGD, "--optim sgd"},
        {"lr-first-zero", recursive, "--schedule recursive"},
        {"lr-min", recursive || opt.schedule == LR_COSINE, "--schedule cosine and recursive"},
        {"lr-decay-from", decays, "--lr-decay below 1"},
        {"lr-decay-every", decays, "--lr-decay below 1"}
    };
    if (!tr_check_only(&options, only, sizeof only / sizeof *only, t->err, TR_ERR)) return 0;
    if (!check_attention(t)) return 0;
    if (opt.attention_every && opt.attention_last)
        return tr_fail(t->err, TR_ERR, "--attention-every and --attention-last cannot be combined");
    if (opt.tied && opt.adapt_io)
        return tr_fail(t->err, TR_ERR,
                       "--tied and --adapt-io cannot be combined: --adapt-io always shares its "
                       "tables");
    if (opt.tied && other_width)
        return tr_fail(t->err, TR_ERR, "--emb-sz: expected --hid-sz %llu with --tied, got %llu",
                       (unsigned long long)opt.hid_sz, (unsigned long long)opt.emb_sz);
    if (opt.schedule == LR_NOAM && !opt.lr_warmup)
        return tr_fail(t->err, TR_ERR, "--schedule noam requires --lr-warmup 1 or more");
    return 1;
}

/* Sets the length of the run, the steps at which it logs, evaluates and saves, and the
   learning-rate schedule. */
static void plan(tr_lm *t) {
    static const int kinds[] = {STX_LR_CONSTANT, STX_LR_COSINE, STX_LR_INV_SQRT, STX_LR_RECURSIVE,
                                STX_LR_NOAM};
    stx_schedule *s = &t->schedule;
    t->steps = opt.lm.steps ? opt.lm.steps : 1000;
    t->log_every = opt.lm.log_every ? opt.lm.log_every : 10;
    t->eval_every = opt.lm.eval_every;
    t->save_every = opt.lm.save_every;
    t->eval_blocks = opt.lm.eval_blocks;

    /* with this window, attention looks back equally far from every token of the block */
    t->eval_block = t->eval_window = opt.eval_unroll ? opt.eval_unroll : opt.block_sz;

    s->kind = kinds[opt.schedule];
    s->lr = opt.lr;
    s->lr_min = opt.lr_min;
    s->warmup = opt.lr_warmup;
    s->total = t->steps;
    s->literal = opt.schedule == LR_RECURSIVE && opt.lr_first_zero;
    s->dim = (double)opt.hid_sz;
    if (opt.lr_decay < 1) {
        s->decay = opt.lr_decay;
        s->decay_from = opt.lr_decay_from;
        s->decay_every = opt.lr_decay_every;
    }
}

/* For the adaptive softmax, words are sorted by count, with <eos> first, as in the
   authors' code. */
static const tr_lm_kind kind = {
    "seqtx.sru.1", "state", &opt.adapt_io, &opt.cutoffs, STX_ORDER_COUNT_EARLIER, 1,
    /* sized: changes to DEMO for texts of up to 1e5 tokens, for texts of up to 2e6
       tokens, and for longer texts */
    {"nlayers=3 hid-sz=192 dropout=0.2 attn-dropout=0.1", "dropout=0.1 attn-dropout=0.1", ""},
    check, plan, count, shape, make, train, print_alpha, sizeof(run)
};

int main(int argc, char **argv) {
    static run r;
    int code = tr_lm_main(&r.t, &kind, &options, &opt.lm, NULL, argc, argv);
    free(r.projs);
    return code;
}
