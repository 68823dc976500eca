/* sru/options.h - the options of train_sru: their values (opt), the table that parses and
   documents them, the defaults, and the presets. Uses the rows that all trainers share
   (train/lm.h). */
#pragma once
#include "../train/options.h"
#include "../train/lm.h"
#include "../../seqtx_sru.h"


// >>options

/* Compile-time check: --literal without names selects the same flags as
   STX_SRU_LITERAL. */
typedef char literal_is_every[(int)STX_SRU_LITERAL == (int)TR_EVERY ? 1 : -1];

enum { MAX_LAYERS = 4096 };

enum { CELL_SRUPP, CELL_SRU };

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
    int         radam_skip, lr_first_zero, sum_loss;
    double      lr_decay;
    uint64_t    lr_decay_from, lr_decay_every, update_param_freq, eval_unroll;

    tr_lm_opt   lm;         /* options shared by all trainers */
} opt;

/* The library's values for the choices of --optim and --schedule, in the order of their
   names in the table below. */
static const int optim_kinds[] = {STX_RADAM, STX_ADAMW, STX_ADAM, STX_SGD, STX_ADAGRAD,
                                  STX_MUON};

static const int schedule_kinds[] = {
    STX_LR_CONSTANT, STX_LR_COSINE, STX_LR_INV_SQRT, STX_LR_RECURSIVE, STX_LR_NOAM
};

/* The second column determines how checkpoints treat the option: see "Resuming" in
   train.h. */
static tr_opt table[] = {
    TR_GROUP("Model"),
    TR_CHOICE("cell", TR_MODEL, &opt.cell, "sru++|sru",
        "sru++: attention in the input transform of each layer; sru: recurrence only"),
    TR_SIZE("nlayers", TR_MODEL, &opt.nlayers, 1, MAX_LAYERS, "number of layers"),
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
    TR_SIZE("attention-every", TR_MODEL, &opt.attention_every, 0, MAX_LAYERS,
        "only layers N, 2 N, .. attend; 0: all"),
    TR_SIZE("attention-last", TR_MODEL, &opt.attention_last, 0, MAX_LAYERS,
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
    TR_LM_OPTIM(opt.lm, "radam|adamw|adam|sgd|adagrad|muon"),
    TR_FLAG("radam-skip", TR_FIXED, &opt.radam_skip,
        "with --optim radam: leave the parameters unchanged in the first 5 updates, in which the "
        "variance is unknown, as later versions do, instead of updating without the variance"),
    TR_REAL("lr", TR_FREE, &opt.lm.lr, 0, 1e6, "learning rate"),
    TR_CHOICE("schedule", TR_FREE, &opt.lm.schedule, "constant|cosine|inv-sqrt|recursive|noam",
        "learning-rate schedule after the warm-up. recursive: the authors' cosine, from the end "
        "of the warm-up; noam: lr / sqrt(d) min(n^-0.5, n warmup^-1.5) in update n"),
    TR_SIZE("lr-warmup", TR_FREE, &opt.lm.lr_warmup, 0, TR_INF,
        "length of the linear warm-up, in updates"),
    TR_FLAG("lr-first-zero", TR_FREE, &opt.lr_first_zero,
        "with --schedule recursive: the first update has a rate of 0, as in the authors' "
        "WikiText-103 trainer"),
    TR_REAL("lr-min", TR_FREE, &opt.lm.lr_min, 0, 1e6,
        "learning rate at the end of the cosine schedule"),
    TR_REAL_OPEN("lr-decay", TR_FREE, &opt.lr_decay, TR_OPEN_MIN, 0, 1,
        "factor by which the rate of any schedule decays after --lr-decay-from updates; 1: no "
        "decay"),
    TR_SIZE("lr-decay-from", TR_FREE, &opt.lr_decay_from, 0, TR_INF,
        "updates before the first decay"),
    TR_SIZE("lr-decay-every", TR_FREE, &opt.lr_decay_every, 0, TR_INF,
        "updates from one decay to the next; 0: decay once"),
    TR_REAL("momentum", TR_FIXED, &opt.lm.momentum, 0, 1,
        "momentum of sgd and muon; with muon, 0: 0.95"),
    TR_REAL("weight-decay", TR_FREE, &opt.lm.weight_decay, 0, 1e6,
        "weight decay of radam, adamw and muon (decoupled) and of adam and sgd (added to the "
        "gradient); adagrad has none"),
    TR_LM_GROUPS(opt.lm),
    TR_REAL("grad-clip", TR_FREE, &opt.lm.grad_clip, 0, 1e9,
        "gradient clipping norm, per tensor with adagrad, otherwise over all tensors; 0: no "
        "clipping"),
    TR_FLAG("sum-loss", TR_FIXED, &opt.sum_loss,
        "sum the loss over the time steps of a block instead of averaging it, which multiplies "
        "the gradients by --block-sz"),
    TR_LM_BATCH(opt.lm),
    TR_SIZE("block-sz", TR_FIXED | TR_KEPT, &opt.lm.block_sz, 1, 1u << 30,
        "tokens per stream and pass (unroll); attention also sees the previous block"),
    TR_SIZE("update-param-freq", TR_FIXED, &opt.update_param_freq, 1, 1u << 20,
        "blocks of each stream per update, processed one after the other"),
    TR_SIZE("steps", TR_FREE, &opt.lm.steps, 0, TR_INF,
        "total number of updates; without it: --epochs, --minutes,"
        " or the preset"),
    TR_LM_LENGTH(opt.lm),
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

/* DEMO contains the defaults without --preset: the demo's model and optimiser. The
   settings in train_sru.c replace them in part. */
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
    {"demo", "a small byte-level model that trains in two minutes on two cores",
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
    "Trains an SRU or SRU++ language model on text. The papers' recipes are available as presets.",
    table, presets, TR_LM_DEFAULTS DEMO "optim=muon",
    "Not reproduced: the Billion Word trainer's streams of shuffled sentences (<S> w .. <S>, with "
    "a separate vocabulary file; here the text is read in order and <eos> ends a line), the "
    "targets that the authors' code predicts across the ends of streams, the short last block of "
    "an epoch, and training on several GPUs. " TR_LM_AFTER,
    "", &tr_lm_brief, NULL
};
