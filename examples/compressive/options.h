/* compressive/options.h - the options of train_compressive: their values (opt), the table
   that parses and documents them, the defaults, and the presets. Uses the rows that all
   trainers share (train/lm.h). */
#pragma once
#include "../train/options.h"
#include "../train/lm.h"
#include "../../seqtx_compressive.h"


// >>options

enum { MAX_LAYERS = 4096, MAX_ROWS = 1 << 30 };

/* Compile-time check: --literal without names selects the same flags as
   STX_COMP_LITERAL. */
typedef char literal_is_every[(int)STX_COMP_LITERAL == (int)TR_EVERY ? 1 : -1];

static struct {
    /* model */
    uint64_t    nlayers, hid_sz, emb_sz, inner_hid_sz, nheads, kv_heads;
    int         positions, norm_after, final_norm, glu, tied;
    int         gate, gate_relu, no_gate_bias, mogrify;
    double      gate_bias;
    double      dropout, attn_dropout, out_dropout, ff_dropout;

    /* memory */
    const char *memory_layers, *mems, *cmems;
    uint64_t    mem, cmem;
    int         recurrence;

    /* compression */
    int         compress, conv_no_bias, aux;
    uint64_t    ratio, overlap, bptt;
    const char *dilations;
    double      aux_weight, aux_dropout;

    int         literal;

    /* evaluation */
    int         eval_mem, eval_cmem;
    uint64_t    eval_positions;

    tr_lm_opt   lm;         /* options shared by all trainers */
} opt;

/* The library's values for the choices of --optim and --schedule, in the order of their
   names in the table below. */
static const int optim_kinds[] = {STX_ADAM, STX_ADAMW, STX_SGD, STX_ADAGRAD, STX_MUON};
static const int schedule_kinds[] = {STX_LR_CONSTANT, STX_LR_COSINE, STX_LR_INV_SQRT};

/* The second column determines how checkpoints treat the option: see "Resuming" in
   train.h. */
static tr_opt table[] = {
    TR_GROUP("Model"),
    TR_SIZE("nlayers", TR_MODEL, &opt.nlayers, 1, MAX_LAYERS, "number of layers"),
    TR_SIZE("hid-sz", TR_MODEL, &opt.hid_sz, 1, 1u << 29, "model dimension d"),
    TR_SIZE("emb-sz", TR_MODEL, &opt.emb_sz, 0, 1u << 29, "width of the embedding; 0: --hid-sz"),
    TR_SIZE("inner-hid-sz", TR_MODEL, &opt.inner_hid_sz, 0, MAX_ROWS,
        "size of the feed-forward network; 0: 4 d"),
    TR_SIZE("nheads", TR_MODEL, &opt.nheads, 1, 256,
        "number of attention heads; must divide --hid-sz"),
    TR_SIZE("kv-heads", TR_MODEL, &opt.kv_heads, 0, 256,
        "number of key and value heads, which the query heads share; must divide --nheads; 0: "
        "--nheads"),
    TR_SIZE("block-sz", TR_MODEL, &opt.lm.block_sz, 1, MAX_ROWS,
        "segment length: tokens per stream and step, which then enter the memory"),
    TR_CHOICE("positions", TR_MODEL, &opt.positions, "learned|xl",
        "position encoding. learned: one table for all layers, with a slice per head; xl: as in "
        "Transformer-XL"),
    TR_FLAG("norm-after", TR_MODEL, &opt.norm_after,
        "layer norm after each sublayer, as in the paper, instead of before"),
    TR_FLAG("final-norm", TR_MODEL, &opt.final_norm, "layer norm before the output head"),
    TR_FLAG("glu", TR_MODEL, &opt.glu, "gated linear units in the feed-forward network"),
    TR_FLAG("tied", TR_MODEL, &opt.tied, "use the embedding as the weight of the output head"),
    TR_CHOICE("gate", TR_MODEL, &opt.gate, "residual|gru|input|output|highway|sigtanh|gtrxl",
        "how the input x and the output y of a sublayer are combined: x + y, the reference's GRU, "
        "or one of GTrXL's gates"),
    TR_FLAG("gate-relu", TR_MODEL, &opt.gate_relu, "apply a ReLU before the gate (GTrXL)"),
    TR_REAL("gate-bias", TR_FIXED, &opt.gate_bias, -80, 80,
        "initial bias of the gate; 0: 2 for gtrxl, 1 for output, highway and sigtanh"),
    TR_FLAG("no-gate-bias", TR_FIXED, &opt.no_gate_bias, "initialise the bias of the gate to 0"),
    TR_FLAG("mogrify", TR_MODEL, &opt.mogrify, "with --gate gru: apply a mogrifier first"),
    TR_REAL_OPEN("dropout", TR_FREE, &opt.dropout, TR_OPEN_MAX, 0, 1,
        "dropout probability of attention weights, of attention outputs and inside the "
        "feed-forward network"),
    TR_REAL("attn-dropout", TR_FREE, &opt.attn_dropout, -1, 0.99,
        "dropout probability of attention weights; 0: --dropout, -1: none"),
    TR_REAL("out-dropout", TR_FREE, &opt.out_dropout, -1, 0.99,
        "dropout probability of attention outputs; 0: --dropout, -1: none"),
    TR_REAL("ff-dropout", TR_FREE, &opt.ff_dropout, -1, 0.99,
        "dropout probability inside the feed-forward network; 0: --dropout, -1: none"),

    TR_GROUP("Memory"),
    TR_TEXT("memory-layers", TR_MODEL, &opt.memory_layers,
        "layers with a memory: a list such as 6,7,8, or all, or none"),
    TR_SIZE("mem", TR_MODEL, &opt.mem, 0, MAX_ROWS, "rows of memory; 0: none"),
    TR_SIZE("cmem", TR_MODEL, &opt.cmem, 0, MAX_ROWS, "rows of compressed memory; 0: none"),
    TR_TEXT("mems", TR_MODEL, &opt.mems, "instead of --mem: one number per layer, such as 8,16"),
    TR_TEXT("cmems", TR_MODEL, &opt.cmems, "instead of --cmem: one number per layer"),
    TR_CHOICE("recurrence", TR_MODEL, &opt.recurrence, "none|ernie|rotate",
        "what the memory of a layer stores. none: the layer's input. ernie: its output. rotate: "
        "its input, and each call moves all memories down by one memory layer (the reference)"),

    TR_GROUP("Compression"),
    TR_CHOICE("compress", TR_MODEL, &opt.compress, "conv|dilated|max|mean|used|none",
        "how rows that leave the memory are compressed. used: the rows that received the most "
        "attention are kept. none: all rows are discarded"),
    TR_SIZE("ratio", TR_MODEL, &opt.ratio, 1, 1u << 20,
        "number of rows that are compressed into one"),
    TR_SIZE("overlap", TR_MODEL, &opt.overlap, 0, 1u << 20,
        "with --compress conv: number of older rows that the kernel also sees"),
    TR_FLAG("conv-no-bias", TR_MODEL, &opt.conv_no_bias, "with --compress conv: use no bias"),
    TR_TEXT("dilations", TR_MODEL, &opt.dilations,
        "with --compress dilated: up to eight dilations, such as 1,2,4 (the default)"),
    TR_CHOICE("aux", TR_MODEL, &opt.aux, "auto|attention|autoencode|bptt|none",
        "loss that trains the compression. auto: attention if the compression has parameters. "
        "bptt: the language loss of later segments"),
    TR_REAL("aux-weight", TR_FREE, &opt.aux_weight, 0, 1e6, "weight of the --aux loss; 0: 1"),
    TR_REAL_OPEN("aux-dropout", TR_FREE, &opt.aux_dropout, TR_OPEN_MAX, 0, 1,
        "dropout probability of the attention weights in the --aux loss"),
    TR_SIZE("bptt", TR_FIXED, &opt.bptt, 0, 1024,
        "with --aux bptt: number of later segments; 0: 1"),

    TR_GROUP("The reference's own forms"),
    TR_SET("literal", TR_MODEL, &opt.literal, "rows|pad|target|mask|freeze",
        STX_COMP_LITERAL_TARGET | STX_COMP_LITERAL_FREEZE,
        "reproduce accidental behaviour of the reference. rows: the table row of a distance "
        "depends on how full the memory is. pad: if --ratio does not divide the rows, padding "
        "precedes them and the newest rows are lost. target: the attention loss compares with "
        "the whole memory. mask: padding enters the memory (there is none in training). freeze: "
        "keys and values of a memory layer stop learning at its first compression"),

    TR_GROUP("Optimisation"),
    TR_LM_OPTIM(opt.lm, "adam|adamw|sgd|adagrad|muon"),
    TR_REAL("lr", TR_FREE, &opt.lm.lr, 0, 1e6, "learning rate"),
    TR_CHOICE("schedule", TR_FREE, &opt.lm.schedule, "constant|cosine|inv-sqrt",
        "learning-rate schedule after the warm-up"),
    TR_SIZE("lr-warmup", TR_FREE, &opt.lm.lr_warmup, 0, TR_INF,
        "length of the linear warm-up, in steps"),
    TR_REAL("lr-start", TR_FREE, &opt.lm.lr_start, 0, 1e6,
        "learning rate at the start of the warm-up"),
    TR_REAL("lr-min", TR_FREE, &opt.lm.lr_min, 0, 1e6,
        "learning rate at the end of the cosine schedule"),
    TR_REAL("momentum", TR_FIXED, &opt.lm.momentum, 0, 1,
        "momentum of sgd and muon; with muon, 0: 0.95"),
    TR_REAL("weight-decay", TR_FREE, &opt.lm.weight_decay, 0, 1e6,
        "weight decay of sgd and adam (added to the gradient) and of adamw and muon (decoupled)"),
    TR_LM_GROUPS(opt.lm),
    TR_REAL("grad-clip", TR_FREE, &opt.lm.grad_clip, 0, 1e9,
        "gradient clipping norm, per tensor with adagrad, otherwise over all tensors; 0: no "
        "clipping"),
    TR_LM_BATCH(opt.lm),
    TR_LM_PACE(opt.lm),
    TR_SIZE("steps", TR_FREE, &opt.lm.steps, 0, TR_INF,
        "total number of steps, each of one segment per stream; without it: --epochs, --minutes,"
        " or the preset"),
    TR_LM_LENGTH(opt.lm),
    TR_SIZE("seed", TR_FIXED, &opt.lm.seed, 0, TR_INF,
        "seed of initial values, dropout and positions in the text. If given, also the seed of "
        "sampling; otherwise sampling differs every time"),
    TR_LM_DATA(opt.lm),
    TR_LM_SAVING(opt.lm, "only at the end", "the whole text"),
    TR_INT("eval-mem", TR_FREE | TR_KEPT, &opt.eval_mem, -1, MAX_ROWS,
        "evaluation and generation: rows of memory in each memory layer; -1: as in training"),
    TR_INT("eval-cmem", TR_FREE | TR_KEPT, &opt.eval_cmem, -1, MAX_ROWS,
        "evaluation and generation: rows of compressed memory, in layers that have one; -1: as "
        "in training"),
    TR_SIZE("eval-positions", TR_LOCAL, &opt.eval_positions, 0, TR_INF,
        "at the end, print the loss of the validation text by distance from an empty memory; the "
        "memory is emptied every this many tokens, a multiple of --block-sz; 0: do not print it"),
    TR_LM_RUNNING(opt.lm),
    TR_LM_GENERATION(opt.lm),
    TR_LM_SAMPLING(opt.lm),
    TR_END
};

#define BASE \
    "memory-layers=all ratio=4 positions=learned recurrence=none no-final-norm aux-weight=1 " \
    "optim=adam batch-split=1 update-every=1 eval-mem=-1 eval-cmem=-1 "

/* The defaults without --preset: the demo's model and optimiser. The settings in
   train_compressive.c replace them in part. */
#define DEMO \
    BASE "tokens=bytes nlayers=3 hid-sz=128 nheads=4 block-sz=64 mem=64 cmem=32 " \
    "positions=xl norm-after lr=0.003 schedule=cosine lr-warmup=60 grad-clip=1 batch-sz=16 "

/* The reference's enwik8 example, without its accidental behaviour, which --recurrence
   rotate --literal restores (see Fidelity in seqtx_compressive.h). The parameters are
   updated after each of the four segments that --random-segments reads in a row. */
#define REFERENCE \
    BASE "tokens=bytes nlayers=8 hid-sz=512 nheads=8 block-sz=512 memory-layers=6,7,8 " \
    "mem=512 cmem=128 gate=gru recurrence=ernie lr=0.0001 schedule=constant lr-warmup=0 " \
    "grad-clip=0.5 batch-sz=16 batch-split=4 random-segments=4 steps=400000 "

/* The settings of the paper (1911.05507, sections 4 and 5, appendices), which does not
   report the dropout or the batch size for enwik8. */
#define PAPER \
    BASE "positions=xl norm-after lr=0.0003 lr-start=0.000001 lr-min=0.000001 " \
    "schedule=cosine grad-clip=0.1 update-every=4 update-after=60000 " \
    "log-every=100 eval-every=2000 save-every=2000 eval-blocks=100 "
#define PAPER_WORDS \
    PAPER "tokens=words lr-warmup=16000 steps=516000 block-sz=512 mem=512 cmem=512 tied "

static const tr_preset presets[] = {
    {"demo", "a small byte-level model that trains in two minutes on two cores",
        DEMO "memory-layers=2,3 steps=3600 eval-every=900 save-every=900 eval-blocks=10 "
        "log-every=100"},
    {"reference", "the reference's enwik8 example: 8 layers, memory in the last three, GRU gates",
        REFERENCE "eval-every=2000 save-every=2000 eval-blocks=16 sample-every=2000 "
        "sample-prime=512 sample-length=1024"},
    {"readme", "the sizes of the reference's README, on words: 12 layers, segment 1024, GLU",
        REFERENCE "tokens=words vocab=20000 nlayers=12 emb-sz=128 block-sz=1024 mem=1024 cmem=256 "
        "memory-layers=6,7,8,9,10,11,12 glu dropout=0.1 aux-dropout=0.1"},
    {"enwik8", "the paper's model, 24 layers: published test 0.97 bpc",
        PAPER "tokens=bytes-compact vocab=205 data-unit=bpc nlayers=24 hid-sz=1024 "
        "inner-hid-sz=3072 nheads=8 block-sz=768 mem=768 cmem=1152 ratio=3 batch-sz=32 "
        "lr-warmup=4000 steps=104000 eval-cmem=3072"},
    {"wikitext103", "the paper's model, 18 layers, but with tied tables instead of an adaptive "
        "input: published test 17.1 ppl",
        PAPER_WORDS "vocab=267735 nlayers=18 hid-sz=1024 inner-hid-sz=4096 nheads=16 batch-sz=128 "
        "eval-mem=500 eval-cmem=1500"},
    {"pg19", "the paper's model, 36 layers, for text in 32,000 subwords; we chose the width: "
        "published test 33.6 ppl per word",
        PAPER_WORDS "vocab=32000 data-unit=word-ppl nlayers=36 hid-sz=1024 inner-hid-sz=4096 "
        "nheads=16 ratio=2 batch-sz=512"},
    TR_PRESET_END
};

static tr_options options = {
    "train_compressive",
    "Trains a Compressive Transformer on text: old memories are compressed, not discarded.",
    table, presets, TR_LM_DEFAULTS DEMO "optim=muon", TR_LM_AFTER, "", &tr_lm_brief, NULL
};
