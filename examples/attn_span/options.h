/* attn_span/options.h - the options of train_attn_span: their values (opt), the table
   that parses and documents them, the defaults, and the presets. Uses the rows that all
   trainers share (train/lm.h). */
#pragma once
#include "../train/options.h"
#include "../train/lm.h"
#include "../../seqtx_attn_span.h"


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

    /* length of the run, evaluation */
    uint64_t    niter, nbatches;
    int         full_eval;

    tr_lm_opt   lm;         /* options shared by all trainers */
} opt;

/* The library's values for the choices of --optim and --schedule, in the order of their
   names in the table below. */
static const int optim_kinds[] = {STX_ADAGRAD, STX_SGD, STX_ADAM, STX_ADAMW, STX_MUON};
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
    TR_LM_OPTIM(opt.lm, "adagrad|sgd|adam|adamw|muon"),
    TR_REAL("lr", TR_FREE, &opt.lm.lr, 0, 1e6, "learning rate"),
    TR_CHOICE("schedule", TR_FREE, &opt.lm.schedule, "constant|cosine|inv-sqrt",
        "learning-rate schedule after the warm-up"),
    TR_SIZE("lr-warmup", TR_FREE, &opt.lm.lr_warmup, 0, TR_INF,
        "length of the linear warm-up, in steps"),
    TR_REAL("lr-min", TR_FREE, &opt.lm.lr_min, 0, 1e6,
        "learning rate at the end of the cosine schedule"),
    TR_REAL("momentum", TR_FIXED, &opt.lm.momentum, 0, 1,
        "momentum of sgd and muon; with muon, 0: 0.95"),
    TR_REAL("weight-decay", TR_FREE, &opt.lm.weight_decay, 0, 1e6,
        "weight decay of sgd and adam (added to the gradient) and of adamw and muon (decoupled)"),
    TR_LM_GROUPS(opt.lm),
    TR_REAL("grad-clip", TR_FREE, &opt.lm.grad_clip, 0, 1e9,
        "maximum norm of the gradient: of each tensor with adagrad, otherwise of all tensors "
        "together; 0: no clipping"),
    TR_LM_BATCH(opt.lm),
    TR_SIZE("block-sz", TR_FIXED | TR_KEPT, &opt.lm.block_sz, 1, 1u << 30,
        "tokens per stream per step"),
    TR_SIZE("niter", TR_FREE, &opt.niter, 1, 1u << 30,
        "number of iterations, each of --nbatches steps"),
    TR_SIZE("nbatches", TR_FREE, &opt.nbatches, 1, 1u << 30,
        "steps per iteration; the model is evaluated and saved after each iteration"),
    TR_SIZE("steps", TR_FREE, &opt.lm.steps, 0, TR_INF,
        "total number of steps; without it: --epochs, --minutes, or --niter times --nbatches"),
    TR_LM_LENGTH(opt.lm),
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

/* The defaults without --preset: the demo's model and optimiser. The settings in
   train_attn_span.c replace them in part. */
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
    {"demo", "a small byte-level model that trains in two minutes on two cores",
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
    table, presets, TR_LM_DEFAULTS DEMO "niter=1000 optim=muon", TR_LM_AFTER, "", &tr_lm_brief, NULL
};
