/* train_par.c - trains, searches, evaluates and samples from Transformer-XL and PAR

       cc -O3 -pthread train_par.c -lm -o train_par

   A Transformer-XL of four layers:
       ./train_par --data FILE --pattern "(sf)4" --checkpoint xl.st

   The next three commands search among 3^8 block orders, print the patterns that the
   search found, and train a network with one of these patterns, starting from the
   weights of the search:
       ./train_par --data FILE --pattern search --nlayers 8 --checkpoint search.st
       ./train_par --checkpoint search.st --derive
       ./train_par --data FILE --pattern sffsffff --inherit search.st

       ./train_par --help

   The training loop is in step() and train() below. Option parsing, text input,
   checkpoints, logging and terminal output come from train.h, which all trainers
   share. */
#define TR_LM
#include "train.h"
#include "svg.h"
#define SEQTX_IMPLEMENTATION
#include "../seqtx_par.h"
#include "../seqtx_text.h"


// >>options

enum { MAX_BLOCKS = 4096, MAX_ROWS = 1 << 30 };
enum { ARCH_SAME, ARCH_ADAM, ARCH_ADAMW, ARCH_SGD };            /* values of opt.arch_optim */
enum { WORDS_PLAIN, WORDS_ADAPTIVE, WORDS_REFERENCE };          /* values of opt.words_out */
enum { OPTIM_ADAM, OPTIM_ADAMW, OPTIM_LAMB, OPTIM_SGD, OPTIM_ADAGRAD };
enum { LR_CONSTANT, LR_COSINE, LR_INV_SQRT, LR_XL_COSINE, LR_REFERENCE };       /* opt.schedule */

static struct {
    /* model */
    uint64_t    nlayers, hid_sz, inner_hid_sz, nheads, head_sz, block_sz, mem, clamp_len;
    const char *pattern, *inherit;
    int         positions, same_length, norm_before, no_final_norm, own_uv, biases, init;
    double      norm_eps, init_std, proj_init_std;
    double      dropout, attn_dropout, inner_dropout, pos_dropout, final_dropout;

    /* vocabulary */
    int         adaptive_in, words_out, tied, tie_projs, one_proj, pad_id, divide_all;
    uint64_t    emb_sz;
    const char *cutoffs, *proj_dims;
    double      div_val, proj_factor, emb_scale;

    /* search */
    int         arch, straight_through, gate_eval, noise, tau_form, arch_optim;
    uint64_t    noise_tokens, tau_steps, arch_from, arch_until, arch_every;
    double      tau_start, tau_end, arch_lr, arch_weight_decay, arch_share;
    int         latency, latency_of, latency_pass;
    double      latency_weight, latency_target, latency_power;
    const char *latency_table;

    /* results */
    int         derive;
    uint64_t    derive_samples;
    const char *picture, *race;

    /* forms that PAR's reference code uses */
    int         sines, pos_mode, full_scale, attn_relu, literal;

    /* optimisation */
    int         optim, schedule, eps_hat;
    double      lr, lr_start, lr_min, eps, momentum, weight_decay, grad_clip, clip_value;
    double      epochs;
    uint64_t    lr_warmup, batch_sz, batch_split;

    /* evaluation */
    int         eval_mem, eval_clamp_len, eval_same_length;
    uint64_t    eval_block_sz;

    tr_lm_opt   lm;         /* options shared by all trainers */
} opt;

/* The second column determines how checkpoints treat the option: see "Resuming" in
   train.h. Aliases are the names that PAR's reference code and Transformer-XL's
   training scripts use. */
static tr_opt table[] = {
    TR_GROUP("Model"),
    TR_SIZE_ALSO("nlayers", "num-layers", TR_MODEL, &opt.nlayers, 1, MAX_BLOCKS,
        "number of blocks (ignored if --pattern lists the blocks)"),
    TR_TEXT("pattern", TR_MODEL, &opt.pattern,
        "the blocks, starting at the embedding: s attention, f feed-forward, i identity. A count "
        "repeats the letter or the group before it: s5f is 5 attention, 1 feed-forward; (sff)4f3. "
        "xl: Transformer-XL, sf repeated; par:P: one attention per P blocks, in the first two "
        "thirds; search: every block is a mixture of the three"),
    TR_SIZE_ALSO("hid-sz", "d-model", TR_MODEL, &opt.hid_sz, 1, 1u << 28, "model dimension D"),
    TR_SIZE_ALSO("nheads", "num-heads|n-head", TR_MODEL, &opt.nheads, 1, 256,
        "number of attention heads"),
    TR_SIZE_ALSO("head-sz", "d-head", TR_MODEL, &opt.head_sz, 0, 1u << 20,
        "head dimension; 0: --hid-sz / --nheads"),
    TR_SIZE_ALSO("inner-hid-sz", "d-ffn|d-inner", TR_MODEL, &opt.inner_hid_sz, 0, MAX_ROWS,
        "size of the feed-forward network; 0: 4 D"),
    TR_SIZE_ALSO("block-sz", "tgt-len|seq-len", TR_MODEL, &opt.block_sz, 1, MAX_ROWS,
        "segment length: tokens per stream and step"),
    TR_SIZE_ALSO("mem", "mem-len", TR_MODEL, &opt.mem, 0, MAX_ROWS,
        "number of memory rows per attention; 0: no memory"),
    TR_CHOICE("positions", TR_MODEL, &opt.positions, "sines|learned|learned-bias",
        "position encoding: sines of the distance; a table for each attention; a table, and a bias "
        "per distance and head instead of v (Transformer-XL's attn_type 1)"),
    TR_SIZE("clamp-len", TR_FIXED | TR_KEPT, &opt.clamp_len, 0, MAX_ROWS,
        "largest distance; larger distances are treated like it; 0: no limit"),
    TR_FLAG("same-length", TR_FIXED | TR_KEPT, &opt.same_length,
        "every query sees at most --mem keys, including its own"),
    TR_FLAG("norm-before", TR_MODEL, &opt.norm_before,
        "layer norm before each branch and one at the end, instead of after each branch"),
    TR_FLAG("no-final-norm", TR_MODEL | TR_LATER, &opt.no_final_norm,
        "with --norm-before: omit the norm at the end (Transformer-XL's pre_lnorm)"),
    TR_REAL("norm-eps", TR_MODEL, &opt.norm_eps, 0, 1, "epsilon of layer norms; 0: 1e-5"),
    TR_FLAG("own-uv", TR_MODEL, &opt.own_uv,
        "separate u and v for each attention (otherwise all share one pair)"),
    TR_FLAG("biases", TR_MODEL, &opt.biases, "use biases in the projections of attention"),
    TR_REAL_ALSO("dropout", "dropout-rate", TR_FREE, &opt.dropout, TR_OPEN_MAX, 0, 1,
        "dropout probability of the embedding and of the output of each branch"),
    TR_REAL_ALSO("attn-dropout", "dropatt", TR_FREE, &opt.attn_dropout, TR_OPEN_MAX, 0, 1,
        "dropout probability of attention weights"),
    TR_REAL_OPEN("inner-dropout", TR_FREE, &opt.inner_dropout, TR_OPEN_MAX, 0, 1,
        "dropout probability inside the feed-forward network"),
    TR_REAL_OPEN("pos-dropout", TR_FREE, &opt.pos_dropout, TR_OPEN_MAX, 0, 1,
        "dropout probability of the sines of --positions sines"),
    TR_REAL_OPEN("final-dropout", TR_FREE, &opt.final_dropout, TR_OPEN_MAX, 0, 1,
        "dropout probability of the last hidden states"),
    TR_CHOICE("init", TR_FIXED, &opt.init, "xl|reference",
        "initial values: Transformer-XL's normal distributions, or those of PAR's reference"),
    TR_REAL("init-std", TR_FIXED, &opt.init_std, 0, 100,
        "with --init xl: standard deviation of the weights; 0: 0.02"),
    TR_REAL("proj-init-std", TR_FIXED, &opt.proj_init_std, 0, 100,
        "with --init xl: standard deviation of the projections of the vocabulary; 0: 0.01"),
    TR_TEXT("inherit", TR_LOCAL, &opt.inherit,
        "start a new run with a fixed --pattern from the weights of this checkpoint, which may be "
        "that of a search"),

    TR_GROUP("Vocabulary"),
    TR_CHOICE("words-out", TR_MODEL, &opt.words_out, "plain|adaptive|reference",
        "output: one softmax; Transformer-XL's clusters; clusters of PAR's reference: a head of "
        "width D, and tails with a projection and its bias"),
    TR_FLAG("adaptive-in", TR_MODEL, &opt.adaptive_in,
        "with --words-out adaptive: the embedding uses the same clusters as the output"),
    TR_FLAG("tied", TR_MODEL, &opt.tied, "input and output share the tables"),
    TR_CHOICE("tie-projs", TR_MODEL, &opt.tie_projs, "none|all|but-first",
        "with --adaptive-in: the projections that input and output share"),
    TR_FLAG("one-proj", TR_MODEL | TR_LATER, &opt.one_proj,
        "with --adaptive-in and --div-val 1: all clusters of the input share one projection, and "
        "so do those of the output that --tie-projs ties (Transformer-XL)"),
    TR_LIST_ALSO("cutoffs", "adapt-io-cutoffs", TR_MODEL, &opt.cutoffs,
        "ends of the clusters, such as 20000,40000,200000; build/cuts finds good values. The "
        "option can also be repeated with one value each time"),
    TR_REAL_ALSO("div-val", "adapt-io-divval", TR_MODEL, &opt.div_val, 0, 0, 1e6,
        "with --words-out adaptive: each cluster is narrower than the previous one by this "
        "factor; 0: 1"),
    TR_REAL("proj-factor", TR_MODEL, &opt.proj_factor, 0, 1e6,
        "with --words-out reference: each tail is narrower than the previous cluster by this "
        "factor; 0: 4"),
    TR_LIST_ALSO("proj-dims", NULL, TR_MODEL, &opt.proj_dims,
        "with --words-out reference: width of each tail, instead of --proj-factor, such as 64,16"),
    TR_SIZE_ALSO("emb-sz", "d-embed", TR_MODEL, &opt.emb_sz, 0, 1u << 28,
        "with --words-out adaptive: width of the first cluster; 0: --hid-sz"),
    TR_REAL("emb-scale", TR_MODEL, &opt.emb_scale, 0, 1e6,
        "scale factor of the embedding; 0: the square root of --hid-sz"),
    TR_INT("pad-id", TR_MODEL, &opt.pad_id, -1, INT_MAX,
        "id of padding: targets with this id have no loss; -1: no padding"),
    TR_FLAG("divide-all", TR_MODEL, &opt.divide_all,
        "with --pad-id: divide the loss by the number of all targets, including padding"),

    TR_GROUP("Search"),
    TR_CHOICE("arch", TR_MODEL, &opt.arch, "logits|pi",
        "parameters of a block's gate: logits, or weights that are clamped at 0 (the reference)"),
    TR_FLAG("straight-through", TR_FIXED, &opt.straight_through,
        "in training, run one branch of each block, with the gradient of a mixture"),
    TR_CHOICE("gate-eval", TR_FREE | TR_KEPT, &opt.gate_eval, "argmax|soft|noise",
        "evaluation: the most probable branch of each block; the mixture; a mixture with noise, as "
        "in training (the reference)"),
    TR_CHOICE("noise", TR_FIXED, &opt.noise, "step|sequence|tokens",
        "draws of Gumbel noise: one per step; one per stream; one per --noise-tokens of each "
        "stream"),
    TR_SIZE("noise-tokens", TR_FIXED, &opt.noise_tokens, 0, MAX_ROWS,
        "with --noise tokens: number of tokens that share one draw"),
    TR_REAL_OPEN("tau-start", TR_FREE, &opt.tau_start, 0, 1e-6, 1e6,
        "temperature of the first step"),
    TR_REAL_OPEN("tau-end", TR_FREE, &opt.tau_end, 0, 1e-6, 1e6, "temperature of the last step"),
    TR_CHOICE("tau-form", TR_FREE, &opt.tau_form, "target|factor",
        "meaning of --tau-end. target: the last temperature; factor: the ratio of the last "
        "temperature to --tau-start (the reference)"),
    TR_SIZE("tau-steps", TR_FREE, &opt.tau_steps, 0, TR_INF,
        "number of steps from the first to the last temperature; 0: --steps"),
    TR_CHOICE("arch-optim", TR_FIXED, &opt.arch_optim, "same|adam|adamw|sgd",
        "optimiser of the gates; same: optimiser, learning rate and decay are those of the "
        "weights (the reference)"),
    TR_REAL("arch-lr", TR_FREE, &opt.arch_lr, 0, 1e6, "constant learning rate of the gates"),
    TR_REAL("arch-weight-decay", TR_FREE, &opt.arch_weight_decay, 0, 1e6,
        "weight decay of the gates"),
    TR_SIZE("arch-from", TR_FREE, &opt.arch_from, 0, TR_INF,
        "number of initial steps in which the gates do not learn"),
    TR_SIZE("arch-until", TR_FREE, &opt.arch_until, 0, TR_INF,
        "last step in which the gates learn; 0: no limit"),
    TR_REAL_OPEN("arch-share", TR_FIXED, &opt.arch_share, TR_OPEN_MAX, 0, 1,
        "the gates learn from this share of the training text, its end, and the weights from the "
        "rest; 0: both learn in the same steps"),
    TR_SIZE("arch-every", TR_FREE, &opt.arch_every, 2, 1u << 20,
        "with --arch-share: in one step out of this many, only the gates learn"),
    TR_CHOICE("latency", TR_FIXED, &opt.latency, "none|add|hinge|fbnet",
        "how the loss depends on the expected time of the blocks. none: not at all. add: the time "
        "is added. hinge: its excess over a target is added. fbnet: the loss is multiplied by a "
        "ln(time)^b"),
    TR_CHOICE("latency-of", TR_FIXED, &opt.latency_of, "p|w",
        "compute the expected time from the probabilities p, or from the weights w with noise"),
    TR_REAL("latency-weight", TR_FREE, &opt.latency_weight, 0, 1e9,
        "weight of the latency in the loss; with --latency fbnet: the factor a"),
    TR_REAL("latency-target", TR_FREE, &opt.latency_target, 0, 1e6,
        "with --latency hinge: target, as a fraction of the time of a Transformer-XL with the "
        "same number of blocks"),
    TR_REAL("latency-power", TR_FREE, &opt.latency_power, 0, 100,
        "with --latency fbnet: the exponent b; 0: 0.6"),
    TR_TEXT("latency-table", TR_FREE, &opt.latency_table,
        "times of an attention block and a feed-forward block, such as 1.25,0.8, in milliseconds "
        "(fbnet: microseconds). Default: measured at the start, on the device in use"),
    TR_CHOICE("latency-pass", TR_FREE, &opt.latency_pass, "training|forward",
        "passes that are measured for --latency-table: forward and backward, or only forward"),
    TR_FLAG("derive", TR_LOCAL, &opt.derive,
        "print what the search of a checkpoint found: the most probable pattern, --derive-samples "
        "random patterns and PAR's rule, each with the loss of that network alone; then the best "
        "one, within --latency-target if it is given"),
    TR_SIZE("derive-samples", TR_LOCAL, &opt.derive_samples, 0, 1u << 20,
        "with --derive: number of random patterns"),
    TR_TEXT("race", TR_LOCAL, &opt.race,
        "at the end, compare the speed of this pattern with that of the model, in alternating "
        "steps"),
    TR_TEXT("picture", TR_LOCAL, &opt.picture,
        "at the end, draw the probabilities of each block from the --log into this SVG file"),

    TR_GROUP("Forms of the reference"),
    TR_CHOICE("sines", TR_MODEL, &opt.sines, "block|reference",
        "order of the sines: all sines, then all cosines; or interleaved, the slowest first"),
    TR_CHOICE("pos-mode", TR_MODEL, &opt.pos_mode, "dist|fixed|reference",
        "row of the position table for a distance: the distance itself; counted from the other "
        "end of memory and segment; or from the other end of the keys that exist"),
    TR_FLAG("full-scale", TR_MODEL, &opt.full_scale,
        "divide scores by the head dimension instead of its square root"),
    TR_FLAG("attn-relu", TR_MODEL, &opt.attn_relu,
        "apply a ReLU after the last projection of attention"),
    TR_SET("literal", TR_LOCAL, &opt.literal, "", 0,
        "Transformer-XL and PAR have no literal forms: each form of an original is a separate "
        "option (this group, --schedule xl-cosine)"),

    TR_GROUP("Optimisation"),
    TR_CHOICE("optim", TR_FIXED, &opt.optim, "adam|adamw|lamb|sgd|adagrad", "optimiser"),
    TR_REAL_ALSO("lr", "max-lr", TR_FREE, &opt.lr, 0, 0, 1e6, "learning rate"),
    TR_CHOICE("schedule", TR_FREE, &opt.schedule,
        "constant|cosine|inv-sqrt|xl-cosine|reference",
        "learning-rate schedule after the warm-up; xl-cosine: Transformer-XL's, whose cosine "
        "starts at the first step; reference: the lower of a warm-up from 0 and a cosine"),
    TR_SIZE_ALSO("lr-warmup", "warmup-steps|warmup-step", TR_FREE, &opt.lr_warmup, 0, TR_INF,
        "length of the linear warm-up, in steps"),
    TR_REAL("lr-start", TR_FREE, &opt.lr_start, 0, 1e6, "initial learning rate of the warm-up"),
    TR_REAL_ALSO("lr-min", "eta-min", TR_FREE, &opt.lr_min, 0, 0, 1e6,
        "learning rate at the end of the cosine schedule"),
    TR_REAL_ALSO("momentum", "mom", TR_FIXED, &opt.momentum, 0, 0, 1, "momentum of sgd"),
    TR_REAL("eps", TR_FIXED, &opt.eps, 0, 1,
        "epsilon of the optimiser; 0: its default"),
    TR_FLAG("eps-hat", TR_FIXED, &opt.eps_hat,
        "with --optim adam or adamw: apply --eps as TensorFlow does"),
    TR_REAL("weight-decay", TR_FREE, &opt.weight_decay, 0, 1e6,
        "weight decay of adam and sgd (added to the gradient), adamw (decoupled) and lamb (added "
        "to the direction)"),
    TR_REAL_ALSO("grad-clip", "clip", TR_FREE, &opt.grad_clip, 0, 0, 1e9,
        "gradient clipping norm, per tensor with adagrad, otherwise over all tensors; 0: no "
        "clipping"),
    TR_REAL_ALSO("clip-value", "clipvalue", TR_FREE, &opt.clip_value, 0, 0, 1e9,
        "clipping value of gradient elements; 0: no clipping"),
    TR_SIZE_ALSO("batch-sz", "batch-size", TR_FIXED, &opt.batch_sz, 1, 1u << 30,
        "number of parallel text streams"),
    TR_SIZE_ALSO("batch-split", "batch-chunk", TR_FIXED, &opt.batch_split, 1, 1u << 30,
        "process the batch in this many parts, to save memory"),
    TR_CHOICE("reading", TR_FIXED, &opt.lm.reading, "streams|roll|records",
        "order of the text: streams; streams that are rotated by a random number of tokens in "
        "every epoch; blocks without overlap, as PAR's reference reads"),
    TR_LM_PACE(opt.lm),
    TR_SIZE_ALSO("steps", "max-step", TR_FREE, &opt.lm.steps, 0, TR_INF,
        "total number of steps, each of one segment per stream; 0: by --epochs, or 1000"),
    TR_REAL("epochs", TR_FREE, &opt.epochs, 0, 1e9,
        "number of passes over the training text, if --steps is 0"),
    TR_SIZE("seed", TR_FIXED, &opt.lm.seed, 0, TR_INF,
        "seed of initial values, dropout, noise and positions in the text. If given, also the seed "
        "of sampling; otherwise sampling differs every time"),
    TR_LM_DATA(opt.lm),
    TR_LM_SAVING(opt.lm, "only at the end; with --epochs, after each epoch", "the whole text"),
    TR_INT("eval-mem", TR_FREE | TR_KEPT, &opt.eval_mem, -1, MAX_ROWS,
        "evaluation and generation: number of memory rows; -1: as in training"),
    TR_SIZE_ALSO("eval-block-sz", "eval-tgt-len", TR_FREE | TR_KEPT, &opt.eval_block_sz, 0,
        MAX_ROWS, "evaluation: tokens per call; 0: --block-sz"),
    TR_INT("eval-clamp-len", TR_FREE | TR_KEPT, &opt.eval_clamp_len, -1, MAX_ROWS,
        "--clamp-len of evaluation and generation; -1: as in training"),
    TR_FLAG("eval-same-length", TR_FREE | TR_KEPT, &opt.eval_same_length,
        "use --same-length in evaluation and generation, even if training does not"),
    TR_LM_RUNNING(opt.lm),
    TR_LM_GENERATION(opt.lm),
    TR_LM_SAMPLING(opt.lm),
    TR_END
};

#define BASE \
    "pattern=xl batch-split=1 update-every=1 eval-mem=-1 eval-clamp-len=-1 pad-id=-1 " \
    "arch-every=5 derive-samples=8 tau-start=1 tau-end=0.1 arch-lr=0.01 arch-optim=adam " \
    "latency-weight=1 "

/* The defaults without --preset: the demo's model and optimiser, which kind.sized below
   scales to the size of the text. */
#define DEMO BASE \
    "tokens=bytes nlayers=6 hid-sz=128 nheads=4 inner-hid-sz=512 block-sz=64 mem=64 dropout=0 " \
    "optim=adam lr=0.003 schedule=cosine lr-warmup=60 grad-clip=1 batch-sz=16 "

/* The settings of PAR's base_model.sh in the forms of the reference implementation,
   with a SentencePiece vocabulary of 12,000 pieces. */
#define REFERENCE BASE \
    "tokens=spm join-lines reading=records vocab=12000 data-unit=ppl nlayers=6 hid-sz=128 " \
    "nheads=4 inner-hid-sz=512 block-sz=32 mem=16 dropout=0.1 norm-eps=0.001 own-uv biases " \
    "init=reference words-out=reference cutoffs=250,2500 proj-factor=4 pad-id=0 divide-all " \
    "pattern=search arch=pi gate-eval=noise tau-form=factor arch-optim=same " \
    "sines=reference pos-mode=reference full-scale attn-relu " \
    "optim=adam eps=0.0000001 eps-hat lr=0.0001 schedule=reference lr-warmup=4000 " \
    "batch-sz=32 epochs=20 log-every=100 "

/* Transformer-XL (1901.02860) as its authors ran it. batch-sz is the total over all
   GPUs. Dropout is also applied to the sines of the position encoding, inside the
   feed-forward networks and to the last hidden states. Evaluation uses a longer memory,
   in which all large distances are treated as equal. */
#define XL BASE \
    "optim=adam lr=0.00025 schedule=xl-cosine grad-clip=0.25 " \
    "log-every=200 eval-every=4000 save-every=4000 "
#define XL_DROP(p) "dropout=" p " inner-dropout=" p " pos-dropout=" p " final-dropout=" p " "
#define XL_EVAL(block, mem, clamp) \
    "eval-block-sz=" block " eval-mem=" mem " eval-clamp-len=" clamp " eval-same-length "

#define XL_CHARS XL "tied vocab=205 data-unit=bpc steps=400000 "
#define XL_12 XL_CHARS XL_DROP("0.1") \
    "nlayers=24 hid-sz=512 nheads=8 head-sz=64 inner-hid-sz=2048 block-sz=512 mem=512 " \
    "batch-sz=22 " XL_EVAL("80", "2100", "820")
#define XL_24 XL_CHARS XL_DROP("0.15") \
    "attn-dropout=0.15 nlayers=48 hid-sz=1024 nheads=8 head-sz=128 inner-hid-sz=3072 " \
    "block-sz=768 mem=768 batch-sz=64 lr-warmup=4000 " XL_EVAL("128", "3800", "1000")

#define XL_WORDS XL \
    "tokens=words vocab=267735 data-unit=ppl words-out=adaptive adaptive-in tied " \
    "cutoffs=20000,40000,200000 "
/* All clusters are as wide as the model, so there are no projections to tie. */
#define XL_WT103 XL_WORDS XL_DROP("0.1") \
    "nlayers=32 hid-sz=410 nheads=10 head-sz=41 inner-hid-sz=2100 block-sz=150 mem=150 " \
    "batch-sz=60 steps=200000 " XL_EVAL("64", "640", "400")
#define XL_LARGE \
    "div-val=4 tie-projs=but-first attn-dropout=0.2 nlayers=36 hid-sz=1024 nheads=16 head-sz=64 " \
    "inner-hid-sz=4096 block-sz=384 mem=384 batch-sz=128 lr-warmup=16000 " \
    XL_EVAL("128", "1600", "1000")
#define XL_WT103_LARGE XL_WORDS XL_DROP("0.2") XL_LARGE "steps=4000000 "

/* Transformer-XL as NVIDIA trains it: with LAMB, and with streams that are rotated in
   each epoch. */
#define NVIDIA XL_WORDS \
    "cutoffs=19997,39997,199997 reading=roll optim=lamb lr=0.01 schedule=cosine "
#define NVIDIA_BASE NVIDIA XL_DROP("0.1") \
    "nlayers=32 hid-sz=512 nheads=8 head-sz=64 inner-hid-sz=2048 block-sz=192 mem=192 " \
    "batch-sz=256 lr-min=0.001 lr-warmup=1000 steps=40000 " XL_EVAL("64", "640", "400")
#define NVIDIA_LARGE NVIDIA XL_DROP("0.2") XL_LARGE "init-std=0.005 lr-min=0.0001 steps=100000 "

static const tr_preset presets[] = {
    {"demo",
        "a small byte-level model that searches its blocks in a minute on two cores (make "
        "demo-par)",
        DEMO "pattern=search batch-sz=8 steps=500 latency=hinge latency-target=0.65 arch-from=250 "
        "arch-lr=0.03 tau-end=0.5 eval-every=250 save-every=250 eval-blocks=10 eval-batch-sz=16 "
        "log-every=25"},
    {"demo-found", "trains what the demo found (--pattern, --inherit) in another minute",
        DEMO "steps=1000 eval-every=500 save-every=500 eval-blocks=10 log-every=50"},
    {"reference",
        "PAR's base_model.sh: a search of 6 blocks on pieces of WikiText-2, in the reference's own "
        "forms: published valid 39.4 ppl per piece",
        REFERENCE},
    {"par-search",
        "the paper's search on WikiText-103: 32 blocks; the gates have a separate optimiser, "
        "separate steps and a fifth of the text",
        NVIDIA_BASE "pattern=search batch-sz=128 weight-decay=0.0001 arch-weight-decay=0.0005 "
        "arch-from=10000 arch-share=0.2 tau-start=2 tau-end=0.4 noise=sequence "
        "latency=hinge latency-target=0.65"},
    {"par-base",
        "PAR by the rule the paper found, 6 attentions in 32 blocks, trained as nvidia-base: "
        "published test 22.7 ppl",
        NVIDIA_BASE "pattern=par:5"},
    {"par-large", "PAR at the size of nvidia-large, 7 attentions in 36 blocks: published test "
        "18.4 ppl",
        NVIDIA_LARGE "pattern=par:5"},
    {"par-enwik8", "PAR, 24 blocks, 4 attentions: published test 1.11 bpc",
        XL_12 "tokens=bytes-compact pattern=par:5"},
    {"par-text8", "PAR, 24 blocks, 4 attentions: published test 1.18 bpc",
        XL_12 "tokens=chars vocab=28 pattern=par:5"},
    {"enwik8", "Transformer-XL, 41M parameters, 12 layers: published test 1.06 bpc",
        XL_12 "tokens=bytes-compact"},
    {"enwik8-large", "Transformer-XL, 277M parameters, 24 layers: published test 0.99 bpc",
        XL_24 "tokens=bytes-compact"},
    {"text8", "enwik8-large on text8: published test 1.08 bpc",
        XL_24 "tokens=chars vocab=28"},
    {"wt103-base", "Transformer-XL, 151M parameters, 16 layers: published test 24.0 ppl",
        XL_WT103},
    /* the paper says 257M; the sizes in its script and the published model have 285M */
    {"wt103-large", "Transformer-XL, 285M parameters, 18 layers: published test 18.3 ppl",
        XL_WT103_LARGE},
    {"lm1b-large", "Transformer-XL, 0.8B parameters, 24 layers: published test 21.8 ppl",
        XL_WORDS XL_DROP("0.05") "vocab=793471 tie-projs=none cutoffs=60000,100000,640000 "
        "div-val=4 nlayers=48 hid-sz=1280 nheads=16 head-sz=80 inner-hid-sz=8192 attn-dropout=0.05 "
        "block-sz=32 mem=32 batch-sz=512 lr-warmup=20000 steps=400000"},
    {"nvidia-base", "NVIDIA's base model on WikiText-103: published 23.2 ppl",
        NVIDIA_BASE},
    {"nvidia-large", "NVIDIA's large model on WikiText-103: published 18.2 ppl",
        NVIDIA_LARGE},
    {"fairseq",
        "fairseq's example of truncated backpropagation: wt103-base, with a cosine to 0 in 200,000 "
        "steps",
        XL_WT103 "schedule=cosine lr-min=0"},
    TR_PRESET_END
};

static tr_options options = {
    "train_par",
    "Trains Transformer-XL on text, and searches for the best order of attention and feed-forward "
    "blocks (PAR).",
    table, presets, TR_LM_DEFAULTS DEMO, TR_LM_AFTER, ""
};


// >>run: the state of a run

enum { PATTERN = MAX_BLOCKS + 1 };      /* size of the longest pattern, with its
                                           terminating 0 */

typedef struct run {
    tr_lm          t;           /* context, text, optimiser, log and more: see train.h */
    stx_par_desc   desc;
    stx_par       *model;
    char           pattern[PATTERN];    /* one letter per block; "" during a search */
    size_t         blocks;

    /* the search; the gate parameters are in model->gates */
    stx_optim     *arch;        /* NULL for a fixed network */
    stx_par_anneal anneal;
    double         tau, arch_lr;
    int            gates_learn; /* 1: the gates learn in this step */
    int            gates_only;  /* 1: only the gates learn in this step */

    /* --arch-share */
    stx_batches   *gate_batches;
    void         **gate_state;  /* for each part of the batch, the memory for the gates' text */
    size_t         gate_first;  /* position in the training text at which the gates'
                                   text begins */
} run;

/* Returns the time that a Transformer-XL with the same number of blocks takes,
   according to desc.cost. */
static double xl_time(const run *r) {
    return (double)r->blocks / 2 * (r->desc.cost[0] + r->desc.cost[1]);
}

static size_t eval_batch(void) {
    return (size_t)(opt.lm.eval_batch_sz ? opt.lm.eval_batch_sz : opt.batch_sz / opt.batch_split);
}


// >>training

enum { METRIC_LOSS };       /* mean loss of a step, in nats per token */

/* One step: a forward and a backward pass over a segment, and the updates that are due.
   Everything that changes between steps is read from t.in, t.out, the temperature and
   the optimisers' learning rates, so that a GPU can replay the step (stx_step_run).
   The batch is processed in parts, whose gradients are accumulated. */
static void step(void *user) {
    run *r = (run *)user;
    stx_ctx *x = r->t.x;
    void **state = r->gates_only ? r->gate_state : r->t.state;
    size_t part, parts = opt.batch_split;
    double each = 1.0 / (double)parts;
    for (part = 0; part < parts; part++) {
        stx_par_state *memory = (stx_par_state *)state[part];
        stx_tensor *loss, *total;
        stx_begin(x, STX_TRAIN);
        loss = stx_par_loss(r->model, r->t.in[part], r->t.out[part], memory, memory);
        stx_metric_set(x, METRIC_LOSS, loss, each, part > 0);
        total = stx_scale(x, stx_par_total(r->model, loss), each * r->t.share);
        if (r->t.update && part + 1 == parts) stx_group_overlap(r->t.optim);
        stx_backward(x, total);
    }
    if (r->t.update) stx_optim_step(r->t.optim, r->t.lr);
    if (r->gates_learn) stx_optim_step(r->arch, r->arch_lr);
    if (r->gates_only) stx_params_zero_grad(stx_par_params(r->model));
}

/* Returns the learning rate of step n + 1. The reference's schedule is the minimum of a
   linear ramp from 0 and a cosine. */
static double rate(const tr_lm *t, uint64_t n) {
    const double warmup = (double)opt.lr_warmup, falling = (double)t->steps - warmup;
    const double since = (double)n - warmup;
    double ramp = opt.lr, cosine = opt.lr;
    if (opt.schedule != LR_REFERENCE) return stx_schedule_lr(&t->schedule, n + 1);
    if (warmup > 0) ramp = opt.lr * (double)n / warmup;
    if (since > 0)
        cosine = falling > 0 ? 0.5 * opt.lr * (1 + cos(3.1415927 * since / falling)) : 0;
    return ramp < cosine ? ramp : cosine;
}

/* Decides whether the gates learn in the next step, and whether they learn alone. */
static void plan_step(run *r) {
    const uint64_t n = r->t.step, every = r->t.rehearsal ? 2 : opt.arch_every;
    int may = n >= opt.arch_from && (!opt.arch_until || n < opt.arch_until);
    if (r->t.rehearsal) may = 1;
    may = may && r->arch;
    r->gates_only = may && r->gate_batches && (n + 1) % every == 0;
    r->gates_learn = may && (!r->gate_batches || r->gates_only);
}

/* Sets the temperature of the next step. An evaluation or a checkpoint before that step
   uses the same temperature. */
static void cool(run *r) {
    r->tau = stx_par_tau(&r->anneal, r->t.step);
    stx_par_set_tau(r->model, r->tau);
}

/* Returns the expected time of blocks with probabilities p (blocks,3), or the time of a
   fixed network if p is NULL. */
static double expected_time(const run *r, const double *p) {
    const double *cost = r->desc.cost;
    double sum = 0;
    size_t l;
    for (l = 0; l < r->blocks; l++) {
        if (p)
            sum += p[3 * l] * cost[0] + p[3 * l + 1] * cost[1];
        else if (r->pattern[l] != 'i')
            sum += cost[r->pattern[l] == 'f'];
    }
    return sum;
}

/* Logs the temperature, the expected time and the probabilities of each block, as a
   list and as curves. For a fixed network, the list of probabilities is empty. */
static void log_search(run *r, double tau) {
    static const char *const branch[3] = {"attention", "feed-forward", "identity"};
    double *p = r->arch ? (double *)malloc(3 * r->blocks * sizeof *p) : NULL;
    double time = NAN;
    char text[64];
    size_t i;
    tr_buf list;
    if (p && !stx_par_probs(r->model, p)) {
        free(p);
        return;
    }
    if (r->desc.cost[0] > 0) time = expected_time(r, p);
    tr_log_num(&r->t.log, "tau", r->arch ? tau : (double)NAN);
    tr_log_num(&r->t.log, "latency", time);

    memset(&list, 0, sizeof list);
    tr_buf_puts(&list, "[");
    for (i = 0; p && i < 3 * r->blocks; i++) {
        tr_number(text, p[i]);
        if (i) tr_buf_puts(&list, ",");
        tr_buf_puts(&list, text);
        snprintf(text, sizeof text, "search/%s_block_%zu", branch[i % 3], i / 3 + 1);
        tr_lm_point(&r->t, text, p[i]);
    }
    tr_buf_puts(&list, "]");
    tr_log_json(&r->t.log, "pi", list.oom ? NULL : list.s);
    tr_buf_free(&list);
    if (p) tr_lm_point(&r->t, "search/tau", tau);
    if (p && time > 0) tr_lm_point(&r->t, "search/latency", time);
    free(p);
}

/* Reads the next batch from the weights' text or the gates' text. Returns the key of
   the step. *fresh receives the result of stx_batches_next. */
static uint64_t next_batch(run *r, int *fresh) {
    tr_lm *t = &r->t;
    void **state = t->state;
    uint64_t key;
    if (!r->gates_only) {
        *fresh = tr_lm_next(t);
        return *fresh == STX_BATCH_END ? 0 : tr_lm_batch(t, *fresh == STX_BATCH_FRESH);
    }
    *fresh = stx_batches_next(r->gate_batches, t->tokens, t->targets);
    if (*fresh == STX_BATCH_END) return 0;
    t->state = r->gate_state;
    key = tr_lm_batch(t, *fresh == STX_BATCH_FRESH);
    t->state = state;
    t->update = 0;
    return key;
}

static void train(tr_lm *t) {
    run *r = (run *)t;
    if (r->arch) cool(r);
    while (tr_lm_more(t)) {
        double tau = r->tau;
        uint64_t key;
        int fresh;
        plan_step(r);
        key = next_batch(r, &fresh);
        if (fresh == STX_BATCH_END) break;

        t->lr = rate(t, t->step);
        stx_optim_set_lr(t->optim, t->lr);
        if (r->arch) {
            r->arch_lr = opt.arch_optim == ARCH_SAME ? t->lr : opt.arch_lr;
            stx_optim_set_lr(r->arch, r->arch_lr);
            stx_par_freeze(r->model, !r->gates_learn);
        }
        key = stx_key_add(key, (uint64_t)(2 * r->gates_only + r->gates_learn));
        tr_lm_step(t, key, step, r);
        if (r->gates_learn && !stx_optim_sync(r->arch) && r->gates_only && stx_ok(t->x)) {
            /* the update was skipped: the memory may contain the values that made the
               loss infinite */
            size_t part;
            for (part = 0; part < t->parts; part++) t->lm.state_reset(r->gate_state[part]);
        }
        if (!tr_lm_stepped(t, stx_metric_get(t->x, METRIC_LOSS))) break;
        if (r->arch) cool(r);

        if (tr_lm_log_due(t)) {
            log_search(r, tau);
            tr_lm_logged(t);
        }
        if (!tr_lm_evaluate_and_save(t)) break;
    }
}


// >>timing: the time of a block, and races of networks

/* Creates a context like the trainer's, for models that are freed after use. */
static stx_ctx *bench_context(const tr_lm *t) {
    stx_desc d = *stx_ctx_desc(t->x);
    stx_ctx *x = stx_create(&d);
    if (!x) stx_fail(t->x, STX_ERR_MEMORY, "out of memory: cannot create a context");
    if (!x || stx_ok(x)) return x;
    stx_fail(t->x, stx_error_code(x), "%s", stx_error(x));
    stx_destroy(x);
    return NULL;
}

static int by_value(const void *a, const void *b) {
    double u = *(const double *)a, v = *(const double *)b;
    return (u > v) - (u < v);
}

static double median(double *v, size_t n) {
    qsort(v, n, sizeof *v, by_value);
    return n % 2 ? v[n / 2] : (v[n / 2 - 1] + v[n / 2]) / 2;
}

/* Describes a one-block network with the settings of the run's network. The inputs of
   the one-block network are vectors, not tokens. */
static stx_par_desc block_desc(const stx_par_desc *of, const char *pattern) {
    stx_par_desc d;
    memset(&d, 0, sizeof d);
    d.pattern = pattern;
    d.dim = of->dim;
    d.heads = of->heads;
    d.head_dim = of->head_dim;
    d.inner = of->inner;
    d.segment = of->segment;
    d.mem = of->mem;
    d.positions = of->positions;
    d.sines = of->sines;
    d.pos_mode = of->pos_mode;
    d.clamp_len = of->clamp_len;
    d.same_length = of->same_length;
    d.full_scale = of->full_scale;
    d.attn_relu = of->attn_relu;
    d.biases = of->biases;
    d.own_uv = of->own_uv;
    d.pre_norm = of->pre_norm;
    d.no_final_norm = of->no_final_norm;
    d.norm_eps = of->norm_eps;
    d.dropout = of->dropout;
    d.attn_dropout = of->attn_dropout;
    d.inner_dropout = of->inner_dropout;
    d.pos_dropout = of->pos_dropout;
    d.recompute_layers = opt.lm.recompute == TR_ALL ? SIZE_MAX : 0;
    return d;
}

/* Returns the time in milliseconds of a forward pass over h (B,T,D) and, unless
   --latency-pass is forward, of a backward pass. */
static double time_block(stx_par *m, stx_par_state *memory, const stx_real *h, size_t B, size_t T) {
    stx_ctx *x = m->ctx;
    double began = tr_seconds();
    stx_tensor *y;
    stx_begin(x, opt.latency_pass ? STX_EVAL : STX_TRAIN);
    y = stx_par_segment(m, stx_variable(x, h, B, T, m->desc.dim, 0), NULL, memory, memory);
    y = stx_mean(x, y);
    if (!opt.latency_pass) stx_backward(x, y);
    stx_item(x, y);                     /* waits for the device */
    return 1000 * (tr_seconds() - began);
}

/* Measures how many milliseconds slower an attention block and a feed-forward block are
   than an identity block. `cost` receives the two differences, which are medians over
   interleaved steps of one block of each kind, with a full memory. Returns 0 after an
   error. */
static int measure(run *r, double cost[2]) {
    enum { ROUNDS = 41, WARM = 3 };
    static const char *const kind[3] = {"s", "f", "i"};
    const size_t B = (size_t)(opt.batch_sz / opt.batch_split), T = r->desc.segment;
    const size_t size = B * T * r->desc.dim;
    stx_ctx *x = bench_context(&r->t);
    stx_par *m[3] = {NULL, NULL, NULL};
    stx_par_state *memory[3] = {NULL, NULL, NULL};
    stx_real *h = (stx_real *)malloc(size * sizeof *h);
    double took[3][ROUNDS], began, idle;
    size_t n, k, i;
    int ok;
    if (!h) stx_fail(r->t.x, STX_ERR_MEMORY, "out of memory: cannot measure the time of a block");
    for (i = 0; h && i < size; i++) h[i] = (stx_real)((double)(i * 2654435761u % 1000) / 500 - 1);
    for (k = 0; x && k < 3; k++) {
        stx_par_desc d = block_desc(&r->desc, kind[k]);
        m[k] = stx_par_create(x, &d);
        if (m[k]) memory[k] = stx_par_state_create(m[k], B);
    }

    ok = x && h && stx_ok(x);
    began = tr_seconds();
    for (n = 0; ok && n < ROUNDS + WARM; n++) {
        if (n >= WARM + 5 && tr_seconds() - began >= 3) break;
        for (k = 0; ok && k < 3; k++) {
            double ms = time_block(m[k], memory[k], h, B, T);
            if (n >= WARM) took[k][n - WARM] = ms;
            ok = stx_ok(x);
        }
    }
    if (ok) {
        idle = median(took[2], n - WARM);
        for (k = 0; k < 2; k++) {
            cost[k] = median(took[k], n - WARM) - idle;
            if (cost[k] < 1e-4) cost[k] = 1e-4;         /* the clock did not advance */
        }
    }
    if (x && !stx_ok(x))
        stx_fail(r->t.x, stx_error_code(x), "--latency: cannot time a block: %s", stx_error(x));
    for (k = 0; k < 3; k++) stx_par_state_free(memory[k]);
    stx_destroy(x);
    free(h);
    return ok;
}

/* One of the networks in a race, with one memory for training and one for
   evaluation. */
typedef struct racer {
    stx_par       *m;
    stx_par_state *memory[2];
} racer;

/* Returns the duration of a training step without an update, or of an evaluation step,
   in seconds. */
static double time_step(const racer *c, int evaluate, const int32_t *ids, size_t B, size_t T) {
    stx_ctx *x = c->m->ctx;
    stx_par_state *memory = c->memory[evaluate];
    double began = tr_seconds();
    stx_ids *in;
    stx_tensor *loss;
    stx_begin(x, evaluate ? STX_EVAL : STX_TRAIN);
    in = stx_tokens(x, ids, B, T);
    loss = stx_par_loss(c->m, in, in, memory, memory);
    if (!evaluate) {
        stx_backward(x, stx_par_total(c->m, loss));
        stx_params_zero_grad(stx_par_params(c->m));
    }
    stx_item(x, loss);                  /* waits for the device */
    return tr_seconds() - began;
}

/* --race: times interleaved steps of two networks on the first tokens of the text.
   speed receives tokens per second as [network][0: training, 1: evaluation].
   Returns 0 after an error. */
static int race(run *r, const char *const pattern[2], double speed[2][2]) {
    enum { ROUNDS = 15, WARM = 3 };
    const size_t B = (size_t)(opt.batch_sz / opt.batch_split), T = r->desc.segment;
    stx_corpus *text = r->t.text[0];
    int32_t *ids = (int32_t *)malloc(B * T * sizeof *ids);
    stx_ctx *x = bench_context(&r->t);
    racer c[2];
    double took[2][2][ROUNDS];
    size_t n, i;
    int ok, k, mode;
    memset(c, 0, sizeof c);
    if (!ids) stx_fail(r->t.x, STX_ERR_MEMORY, "out of memory: cannot start the race");
    for (i = 0; ids && i < B * T; i++) ids[i] = (int32_t)(i * 40503u % r->desc.vocab);
    if (ids && text && stx_corpus_size(text) >= B * T) stx_corpus_read(text, 0, B * T, ids);
    for (k = 0; x && k < 2; k++) {
        stx_par_desc d = r->desc;
        d.latency = 0;
        d.latency_target = d.latency_power = 0;
        d.blocks = 0;
        d.pattern = pattern[k];
        c[k].m = stx_par_create(x, &d);
        for (mode = 0; c[k].m && mode < 2; mode++)
            c[k].memory[mode] = stx_par_state_create(c[k].m, B);
    }

    ok = x && ids && stx_ok(x);
    for (n = 0; ok && n < ROUNDS + WARM; n++) {
        for (i = 0; ok && i < 4; i++) {
            double s;
            mode = (int)i / 2;
            k = (int)i % 2;
            s = time_step(&c[k], mode, ids, B, T);
            if (n >= WARM) took[k][mode][n - WARM] = s;
            ok = stx_ok(x);
        }
    }
    for (i = 0; ok && i < 4; i++)
        speed[i / 2][i % 2] = (double)(B * T) / median(took[i / 2][i % 2], ROUNDS);
    if (x && !stx_ok(x)) stx_fail(r->t.x, stx_error_code(x), "--race: %s", stx_error(x));
    for (i = 0; i < 4; i++) stx_par_state_free(c[i / 2].memory[i % 2]);
    stx_destroy(x);
    free(ids);
    return ok;
}


// >>patterns

/* Expands --pattern, or another option, to one letter per block for L blocks, or to ""
   for a search. Returns 0 and sets t->err on error. */
static int expand(tr_lm *t, const char *option, const char *text, size_t L, char out[PATTERN]) {
    size_t i;
    uint64_t p;
    out[0] = 0;
    if (text && !*text)
        return tr_fail(t->err, TR_ERR,
                       "--%s: expected letters s, f and i, or search, xl or par:5, got ''",
                       option);
    if (!text || !strcmp(text, "search")) return 1;
    if (!strcmp(text, "xl")) {
        for (i = 0; i < L; i++) out[i] = "sf"[i % 2];
        out[L] = 0;
        return 1;
    }
    if (!strncmp(text, "par:", 4)) {
        int valid = tr_read_size(text + 4, &p) && p >= 1 && p <= L;
        if (valid && stx_par_rule(out, PATTERN, L, (size_t)p)) return 1;
        return tr_fail(t->err, TR_ERR,
                       "--%s %.100s: expected par:P (one attention block per P blocks) with P "
                       "from 2 to %zu (--nlayers)", option, text, L);
    }
    if (stx_par_expand(out, PATTERN, text)) return 1;
    return tr_fail(t->err, TR_ERR,
                   "--%s %.200s: expected letters s, f and i, with counts and groups such as "
                   "(sff)4f3, for at most %d blocks; or search, xl or par:5",
                   option, text, (int)MAX_BLOCKS);
}

static const char *short_form(const char *pattern, char out[PATTERN]) {
    return stx_par_format(out, PATTERN, pattern) ? out : pattern;
}

/* Appends a description in words of the n characters at p, which are letters and counts
   without groups. */
static void run_in_words(tr_buf *out, const char *p, size_t n) {
    const char *end = p + n;
    char word[64], *next;
    while (p < end) {
        const char letter = *p, *name = letter == 's' ? "attention" : "identity";
        unsigned long blocks = 0;
        for (; p < end && *p == letter; p = next) {
            unsigned long times = strtoul(p + 1, &next, 10);
            blocks += next > p + 1 ? times : 1;
        }
        if (letter == 'f') name = "feed-forward";
        snprintf(word, sizeof word, "%lu %s%s", blocks, name, p < end ? ", " : "");
        tr_buf_puts(out, word);
    }
}

/* Describes a pattern in words, such as "5 attention, 1 feed-forward" for s5f. The
   caller frees the text. Returns NULL if memory runs out. */
static char *in_words(const char *pattern) {
    char text[PATTERN];
    const char *p = short_form(pattern, text);
    tr_buf out;
    memset(&out, 0, sizeof out);
    while (*p) {
        size_t n = strcspn(p, "(");
        if (n) {
            run_in_words(&out, p, n);
        } else {
            const char *unit = p + 1;
            size_t letters = strcspn(unit, ")");
            p = unit + letters + 1;
            n = strspn(p, "0123456789");
            tr_buf_put(&out, p, n);
            tr_buf_puts(&out, " x (");
            run_in_words(&out, unit, letters);
            tr_buf_puts(&out, ")");
        }
        p += n;
        if (*p) tr_buf_puts(&out, ", ");
    }
    if (out.oom) tr_buf_free(&out);
    return out.s;
}

/* Prints "s5f: 5 attention, 1 feed-forward". */
static void print_pattern(FILE *out, const char *pattern) {
    char text[PATTERN], *words = in_words(pattern);
    fprintf(out, "%s%s%s", short_form(pattern, text), words ? ": " : "", words ? words : "");
    free(words);
}


// >>derive: networks of a search

typedef struct candidate {
    char   pattern[PATTERN];
    double nll;
    double time;        /* time as a fraction of Transformer-XL's; 0: unknown */
} candidate;

/* Evaluates the validation text with this pattern, which one-hot gates select. Returns
   NAN after an error. */
static double score(run *r, const char *pattern) {
    size_t l, B = eval_batch(), T = r->t.eval_block;
    tr_lm_scored scored;
    for (l = 0; l < r->blocks; l++) {
        stx_real al[3] = {0, 0, 0};
        al[strchr("sfi", pattern[l]) - "sfi"] = 20;
        stx_set(r->t.x, r->model->block[l].al, al);
    }
    tr_lm_fit(r->t.text[1], &B, &T);
    return tr_lm_pass(&r->t, r->t.text[1], B, T, opt.lm.eval_blocks, &scored);
}

/* Returns the time of a pattern as a fraction of Transformer-XL's, or 0 if unknown. */
static double time_of(const run *r, const char *pattern) {
    double sum = 0;
    size_t l;
    if (!(xl_time(r) > 0)) return 0;
    for (l = 0; l < r->blocks; l++)
        if (pattern[l] != 'i') sum += r->desc.cost[pattern[l] == 'f'];
    return sum / xl_time(r);
}

/* Prints a line about candidate *n. If no earlier candidate has the same pattern,
   scores it first and increments *n. Returns 0 after an error. */
static int derive_one(run *r, FILE *out, const char *what, candidate *all, size_t *n) {
    candidate *c = &all[*n];
    char text[PATTERN], *words;
    size_t i;
    for (i = 0; i < *n; i++)
        if (!strcmp(all[i].pattern, c->pattern)) break;
    c->time = time_of(r, c->pattern);
    if (i < *n) {
        c->nll = all[i].nll;
    } else {
        c->nll = score(r, c->pattern);
        if (isnan(c->nll)) return 0;
        ++*n;
    }
    fprintf(out, "%-10s %s  %s %.4f", what, short_form(c->pattern, text), tr_lm_unit(&r->t),
            tr_lm_metric(&r->t, 1, c->nll));
    if (r->desc.cost[0] > 0) fprintf(out, "  %.0f %% of Transformer-XL's time", 100 * c->time);
    words = in_words(c->pattern);
    fprintf(out, "  (%s)\n", words ? words : "");
    free(words);
    return 1;
}

/* Nonzero if candidate `a` is better than `b`. A pattern within --latency-target is
   better than one beyond it. Within the target, the lower loss is better; beyond it,
   the shorter time. */
static int better(const candidate *a, const candidate *b) {
    const int limited = opt.latency_target > 0;
    const int a_within = !limited || a->time <= opt.latency_target;
    const int b_within = !limited || b->time <= opt.latency_target;
    if (a_within != b_within) return a_within;
    return a_within ? a->nll < b->nll : a->time < b->time;
}

static void print_best(FILE *out, const candidate *c, size_t n) {
    size_t i, best = 0;
    for (i = 1; i < n; i++)
        if (better(&c[i], &c[best])) best = i;
    fprintf(out, "best: ");
    print_pattern(out, c[best].pattern);
    fprintf(out, "\n");
    if (opt.latency_target > 0 && c[best].time > opt.latency_target)
        fprintf(out, "no pattern is within --latency-target %g: this one is the fastest\n",
                opt.latency_target);
}

/* Copies the parameters of all gates to or from values (blocks,3). */
static void copy_gates(run *r, stx_real *values, int to_model) {
    size_t l;
    for (l = 0; l < r->blocks; l++) {
        stx_tensor *gate = r->model->block[l].al;
        if (to_model)
            stx_set(r->t.x, gate, values + 3 * l);
        else
            stx_get(r->t.x, gate, values + 3 * l);
    }
}

/* Scores the most probable pattern, the pattern that PAR's rule forms with the same
   number of attention blocks, and random patterns. Returns the number of different
   patterns, or 0 after an error. */
static size_t derive_all(run *r, FILE *out, candidate *all, stx_real *gates) {
    const size_t L = r->blocks;
    size_t n = 0, attentions = 0, every = 5, i;
    char what[40];
    if (!stx_par_argmax(r->model, all[0].pattern, PATTERN)) return 0;
    for (i = 0; i < L; i++) attentions += all[0].pattern[i] == 's';
    if (!derive_one(r, out, "argmax", all, &n)) return 0;

    /* if there is no attention block, `every` keeps the paper's value. The rule
       requires an `every` of at least 2 */
    if (attentions) every = L / attentions;
    if (every > 1 && every <= L) {
        snprintf(what, sizeof what, "par:%zu", every);
        if (!stx_par_rule(all[n].pattern, PATTERN, L, every)) return 0;
        if (!derive_one(r, out, what, all, &n)) return 0;
    }
    for (i = 0; i < opt.derive_samples; i++) {
        copy_gates(r, gates, 1);
        snprintf(what, sizeof what, "sample %zu", i + 1);
        if (!stx_par_sample(r->model, opt.lm.seed, i, all[n].pattern, PATTERN)) return 0;
        if (!derive_one(r, out, what, all, &n)) return 0;
    }
    return n;
}

/* --derive: scores and prints the patterns that the search has found. */
static void derive(run *r, FILE *out) {
    const size_t samples = (size_t)opt.derive_samples;
    const int gate_eval = r->model->desc.gate_eval;
    candidate *all = (candidate *)malloc((samples + 2) * sizeof *all);
    stx_real *gates = (stx_real *)malloc(3 * r->blocks * sizeof *gates);
    size_t n;
    if (all && gates) {
        copy_gates(r, gates, 0);
        r->model->desc.gate_eval = STX_PAR_EVAL_ARGMAX;
        n = derive_all(r, out, all, gates);
        copy_gates(r, gates, 1);
        r->model->desc.gate_eval = gate_eval;
        if (n) print_best(out, all, n);
    } else {
        stx_fail(r->t.x, STX_ERR_MEMORY, "out of memory: cannot store %zu patterns", samples);
    }
    free(all);
    free(gates);
}


// >>picture: probabilities of a log as SVG (build/plot draws them too)

/* The rows of a log. A row contains the step, then the probabilities of each block. */
typedef struct log_rows {
    size_t  width, count, capacity;
    double *row;
} log_rows;

/* Adds a row for this line of the log if the line contains newer probabilities. `list`
   is a buffer for their text. Returns 0 if memory runs out. */
static int add_row(log_rows *rows, const char *line, char *list) {
    const size_t probabilities = rows->width - 1;
    double *now;
    char word[40];
    if (tr_json_find(line, "event", word, sizeof word) != 1 || strcmp(word, "train") != 0) return 1;
    if (tr_json_find(line, "pi", list, 32 * rows->width + 2) != 1) return 1;
    if (tr_json_find(line, "step", word, sizeof word) != 1) return 1;
    if (rows->count == rows->capacity) {
        size_t capacity = rows->capacity ? 2 * rows->capacity : 256;
        now = (double *)realloc(rows->row, capacity * rows->width * sizeof *now);
        if (!now) return 0;
        rows->row = now;
        rows->capacity = capacity;
    }
    now = rows->row + rows->count * rows->width;
    if (!svg_read(word, now)) return 1;
    if (svg_numbers(list, now + 1, probabilities) != probabilities) return 1;
    if (rows->count == 0 || now[0] > now[-(ptrdiff_t)rows->width]) rows->count++;
    return 1;
}

static int draw_rows(const log_rows *rows, size_t blocks, char *err) {
    const double last = rows->row[(rows->count - 1) * rows->width], width = 900;
    svg_axis steps = {0, 0, 0, 0, 0};
    tr_buf body;
    double height;
    int ok;
    memset(&body, 0, sizeof body);
    steps.hi = last > 0 ? last : 1;
    height = svg_shares(&body, rows->row, rows->count, blocks, &steps, 10, 6, width - 20);
    ok = svg_save(opt.picture, "probabilities of each block", width, height + 12, &body, err,
                  TR_ERR);
    tr_buf_free(&body);
    return ok;
}

/* --picture: draws the probabilities of each block from the log. */
static void picture(run *r) {
    log_rows rows;
    char *line = NULL, *list;
    size_t capacity = 0;
    FILE *in = fopen(opt.lm.log, "r");
    int ok;
    memset(&rows, 0, sizeof rows);
    rows.width = 1 + 3 * r->blocks;
    list = (char *)malloc(32 * rows.width + 2);
    ok = in && list;
    while (ok && getline(&line, &capacity, in) > 0) ok = add_row(&rows, line, list);
    if (!ok)
        stx_fail(r->t.x, STX_ERR_IO, "--picture %s: %s", opt.picture, strerror(errno));
    else if (!rows.count)
        tr_say(&r->t.term, "--picture: %s contains no probabilities of %zu blocks", opt.lm.log,
               r->blocks);
    else if (!draw_rows(&rows, r->blocks, r->t.err))
        stx_fail(r->t.x, STX_ERR_IO, "--picture %s", r->t.err);
    if (in) fclose(in);
    free(rows.row);
    free(line);
    free(list);
}


// >>report: what a run prints at its end

/* Evaluates the validation text with the other two values of --gate-eval. */
static void other_gates(run *r, FILE *out) {
    static const char *const way[3] = {"argmax", "soft", "noise"};
    tr_lm *t = &r->t;
    const int gate_eval = r->model->desc.gate_eval;
    size_t B = eval_batch(), T = t->eval_block;
    uint64_t blocks = t->training && tr_given(&options, "eval-blocks") ? opt.lm.eval_blocks : 0;
    const char *between = "";
    double nll[3];
    tr_lm_scored scored[3];
    int k, ok = 1;
    tr_lm_fit(t->text[1], &B, &T);
    for (k = 0; ok && k < 3; k++) {
        if (k == gate_eval) continue;
        r->model->desc.gate_eval = k;
        nll[k] = tr_lm_pass(t, t->text[1], B, T, blocks, &scored[k]);
        ok = !isnan(nll[k]);
    }
    r->model->desc.gate_eval = gate_eval;
    if (!ok || !stx_ok(t->x) || !tr_lm_begin(t)) return;

    fprintf(out, "valid with --gate-eval");
    tr_log_begin(&t->log, "gates");
    for (k = 0; k < 3; k++) {
        if (k == gate_eval) continue;
        fprintf(out, "%s %s: %s %.4f", between, way[k], tr_lm_unit(t), tr_lm_metric(t, 1, nll[k]));
        if (t->unit == TR_PPL) fprintf(out, " (mean of batches %.4f)", scored[k].batch_ppl);
        tr_log_num(&t->log, way[k], nll[k]);
        between = ", and";
    }
    fprintf(out, "\n");
    tr_log_int(&t->log, "step", t->step);
    tr_lm_note(t, t->log.err, tr_log_end(&t->log));
}

/* Logs the pattern of the network, or the most probable pattern of a search. */
static void log_pattern(run *r, const char *pattern) {
    char text[PATTERN], *words;
    if (!tr_lm_begin(&r->t)) return;
    words = in_words(pattern);
    tr_log_begin(&r->t.log, "architecture");
    tr_log_int(&r->t.log, "step", r->t.step);
    tr_log_str(&r->t.log, "pattern", short_form(pattern, text));
    tr_log_str(&r->t.log, "blocks", words);
    tr_lm_note(&r->t, r->t.log.err, tr_log_end(&r->t.log));
    free(words);
}

/* Prints the pattern and, for a search, the expected time of the mixture. Returns 0
   after an error. */
static int print_architecture(run *r, FILE *out, const char *pattern) {
    double *p = NULL;
    if (!*r->pattern) {
        p = (double *)malloc(3 * r->blocks * sizeof *p);
        if (p && !stx_par_probs(r->model, p)) {
            free(p);
            return 0;
        }
    }
    log_pattern(r, pattern);
    fprintf(out, "architecture: ");
    print_pattern(out, pattern);
    if (p && r->desc.cost[0] > 0)
        fprintf(out, "; expected time of the mixture %.0f %% of Transformer-XL's",
                100 * expected_time(r, p) / xl_time(r));
    fprintf(out, "\n");
    free(p);
    return 1;
}

/* --race: races the network against the pattern that the option names. */
static void print_race(run *r, FILE *out, const char *pattern) {
    char other[PATTERN], count[4][TR_TEXT_MAX];
    const char *pair[2];
    double speed[2][2];
    int i;
    if (!expand(&r->t, "race", opt.race, r->blocks, other) || !*other) return;
    pair[0] = pattern;
    pair[1] = other;
    if (!race(r, pair, speed)) return;
    for (i = 0; i < 4; i++) tr_count(count[i], speed[i / 2][i % 2]);
    fprintf(out,
            "race, tokens per second in training and evaluation, medians of alternating steps: "
            "%s and %s against %s and %s of ", count[0], count[1], count[2], count[3]);
    print_pattern(out, other);
    fprintf(out, "; %.2f and %.2f times as fast\n", speed[0][0] / speed[1][0],
            speed[0][1] / speed[1][1]);
}

static void report(const tr_lm *t, FILE *out) {
    run *r = (run *)(uintptr_t)t;
    const int search = !*r->pattern;
    char likely[PATTERN];
    const char *pattern = r->pattern;
    if (search) {
        if (!stx_par_argmax(r->model, likely, PATTERN)) return;
        pattern = likely;
    }
    if (!print_architecture(r, out, pattern)) return;
    if (search && t->text[1] && !opt.derive && !opt.lm.no_train) other_gates(r, out);
    if (opt.derive) derive(r, out);
    if (opt.race && *opt.race && stx_ok(t->x)) print_race(r, out, pattern);
    if (opt.picture && *opt.picture && search && stx_ok(t->x)) picture(r);
}


// >>memory of evaluation, and checkpoints

/* number of memory rows in evaluation; see plan() */
static size_t eval_rows;

/* The functions state_create and gen_create of stx_lm. `window` is 1 in evaluation and
   generation if --eval-mem, --eval-clamp-len or --eval-same-length is given. */
static void *state_create(void *m, size_t B, size_t window) {
    stx_par_state *s;
    if (!window) return stx_par_state_create((stx_par *)m, B);
    s = stx_par_state_create_sized((stx_par *)m, B, eval_rows);
    if (s && opt.eval_clamp_len >= 0) s->clamp_len = (size_t)opt.eval_clamp_len;
    if (s && opt.eval_same_length) s->same_length = 1;
    return s;
}

static void *gen_create(void *m, size_t B, size_t window) {
    stx_par_gen *g;
    if (!window) return stx_par_gen_create((stx_par *)m, B);
    g = stx_par_gen_create_sized((stx_par *)m, B, eval_rows);
    if (g && opt.eval_clamp_len >= 0) g->clamp_len = (size_t)opt.eval_clamp_len;
    if (g && opt.eval_same_length) g->same_length = 1;
    return g;
}

/* Saves the position in the gates' text, and the memory for that text. w is NULL on
   ranks that do not write. */
static int save_gate_text(run *r, stx_writer *w) {
    const stx_batches_state pos = stx_batches_get(r->gate_batches);
    char prefix[64];
    size_t part;
    if (w && !(stx_writer_meta_u64(w, "arch.position", pos.p)
               && stx_writer_meta_u64(w, "arch.wraps", pos.wraps)
               && stx_writer_meta_u64(w, "arch.fresh", (uint64_t)pos.fresh)))
        return 0;
    for (part = 0; part < r->t.parts; part++) {
        snprintf(prefix, sizeof prefix, "arch.memory.%zu.", part);
        if (!tr_lm_save_state(&r->t, w, r->gate_state[part], prefix)) return 0;
    }
    return 1;
}

/* Saves the entries that train.h does not save: the gates, their optimiser, the
   temperature and the gates' text. */
static int save_more(tr_lm *t, stx_writer *w) {
    run *r = (run *)t;
    char tau[64];
    if (w) {
        if (!stx_params_save(w, r->model->gates, "")) return 0;
        if (r->arch && !stx_optim_save_as(w, r->arch, "arch.")) return 0;
        tr_number(tau, r->tau);
        if (!stx_writer_meta(w, "tau", tau)) return 0;
    } else if (r->arch && !tr_lm_save_optim(t, r->arch, "arch.")) {
        return 0;
    }
    return !r->gate_batches || save_gate_text(r, w);
}

static int load_gate_text(run *r, const stx_file *f) {
    stx_ctx *x = r->t.x;
    stx_batches_state pos;
    uint64_t fresh;
    char prefix[64];
    size_t part;
    if (!stx_file_meta_u64(x, f, "arch.position", &pos.p)
        || !stx_file_meta_u64(x, f, "arch.wraps", &pos.wraps)
        || !stx_file_meta_u64(x, f, "arch.fresh", &fresh))
        return 0;
    pos.fresh = fresh != 0;
    if (!stx_batches_set(r->gate_batches, pos)) return 0;
    for (part = 0; part < r->t.parts; part++) {
        snprintf(prefix, sizeof prefix, "arch.memory.%zu.", part);
        if (!tr_lm_load_state(&r->t, f, r->gate_state[part], prefix)) return 0;
    }
    return 1;
}

/* Loads the temperature from the checkpoint. Computes it if the checkpoint is too old
   to contain it, or if the command line changes the temperature schedule. */
static int load_tau(run *r, const stx_file *f) {
    static const char *const cooling[4] = {"tau-start", "tau-end", "tau-form", "tau-steps"};
    const char *tau = stx_file_meta(f, "tau");
    int i, changed = 0;
    if (tau && (!tr_read_real(tau, &r->tau) || !(r->tau > 0))) {
        stx_fail(r->t.x, STX_ERR_FORMAT, "metadata \"tau\": expected a temperature above 0, got "
                 "'%.40s': the file is damaged", tau);
        return 0;
    }
    for (i = 0; i < 4; i++) changed |= tr_given(&options, cooling[i]);
    if (tau && !changed) {
        stx_par_set_tau(r->model, r->tau);
        return 1;
    }
    if (!stx_file_meta_u64(r->t.x, f, "step", &r->t.step)) return 0;
    cool(r);
    return 1;
}

static int load_more(tr_lm *t, const stx_file *f) {
    run *r = (run *)t;
    if (!stx_params_load(r->model->gates, f, "")) return 0;
    if (t->opt->init_from) return 1;
    if (!load_tau(r, f)) return 0;
    if (!t->training) return 1;
    if (r->arch && !stx_optim_load_as(r->arch, f, "arch.")) return 0;
    return !r->gate_batches || load_gate_text(r, f);
}


// >>main

/* Reports the library's error, with field names replaced by option names. */
static int report_error(tr_lm *t) {
    static const tr_word words[] = {
        /* fields */
        {"blocks", "nlayers"},
        {"dim", "hid-sz"},
        {"inner", "inner-hid-sz"},
        {"heads", "nheads"},
        {"head_dim", "head-sz"},
        {"segment", "block-sz"},
        {"emb", "emb-sz"},
        {"gate_form", "arch"},
        {"cutoff", "cutoffs"},
        {"pre_norm", "norm-before"},
        {"no_final_norm", "no-final-norm"},
        {"one_proj", "one-proj"},
        {"tie_words", "tied"},
        {"proj_std", "proj-init-std"},
        {"latency_w", "latency-of"},
        {"cost", "latency-table"},
        /* phrases that describe expected values */
        {"latency = STX_PAR_LATENCY_FBNET", "--latency fbnet"},
        {"latency = STX_PAR_LATENCY_HINGE", "--latency hinge"},
        {"noise = STX_PAR_NOISE_TOKENS", "--noise tokens"},
        {"pos_mode = STX_PAR_POS_DIST", "--pos-mode dist"},
        {"positions = STX_PAR_SINES", "--positions sines"},
        {"sines = STX_PAR_SINES_SPLIT", "--sines block"},
        {"sines = STX_PAR_SINES_REF", "--sines reference"},
        {"words_out = STX_PAR_OUT_REF", "--words-out reference"},
        {"STX_PAR_FORM_PI", "--arch pi"},
        {"an id below vocab if pads is set, otherwise 0", "an id of the vocabulary, or -1"},
        {"adaptive_in is set, div_val is 1 and emb differs from dim",
         "--adaptive-in is set, --div-val is 1 and --emb-sz differs from --hid-sz"},
        {"divisor of dim", "divisor of --hid-sz"},
        {"dim unless the input", "--hid-sz unless the input"},
        {"or set head_dim", "or set --head-sz"},
        {"mem is 2 or more", "--mem is 2 or more"},
        {"pre_norm = 1", "--norm-before"},
        {NULL, NULL}};
    return tr_lm_why_in(t, "stx_par_create: ", words);
}

/* Parses the value of an option that is a list, such as "3,5,8", into `out`. Returns 0
   and sets t->err on error. */
static int list(tr_lm *t, const char *option, const char *text, size_t *out, size_t capacity,
                size_t *n) {
    size_t i;
    int ok;
    *n = 0;
    if (!text || !*text) return 1;
    ok = tr_read_sizes(text, out, capacity, n);
    for (i = 0; i < *n; i++) ok = ok && out[i];
    if (ok) return 1;
    return tr_fail(t->err, TR_ERR,
                   "--%s %.200s: expected up to %zu numbers above 0, separated by commas, such as "
                   "20000,40000,200000", option, text, capacity);
}

/* Parses --latency-table. Without the option, both costs are 0. */
static int latency_table(tr_lm *t, double cost[2]) {
    char word[2][32];
    const char *text = opt.latency_table;
    size_t n;
    cost[0] = cost[1] = 0;
    if (!text || !*text) return 1;
    n = strcspn(text, ",");
    if (n < sizeof word[0] && text[n] && strlen(text + n + 1) < sizeof word[1]) {
        int ok;
        memcpy(word[0], text, n);
        word[0][n] = 0;
        strcpy(word[1], text + n + 1);
        ok = tr_read_real(word[0], &cost[0]) && tr_read_real(word[1], &cost[1]);
        if (ok && cost[0] > 0 && cost[1] > 0) return 1;
    }
    return tr_fail(t->err, TR_ERR,
                   "--latency-table %.100s: expected two positive times, of an attention and a "
                   "feed-forward block, such as 1.25,0.8", text);
}

static void describe_blocks(stx_par_desc *d) {
    d->dim = opt.hid_sz;
    d->heads = opt.nheads;
    d->head_dim = opt.head_sz;
    d->inner = opt.inner_hid_sz;
    d->segment = opt.block_sz;
    d->mem = opt.mem ? (size_t)opt.mem : STX_PAR_NO_ROWS;
    d->positions = opt.positions;
    d->sines = opt.sines;
    d->pos_mode = opt.pos_mode;
    d->clamp_len = opt.clamp_len;
    d->same_length = opt.same_length;
    d->full_scale = opt.full_scale;
    d->attn_relu = opt.attn_relu;
    d->biases = opt.biases;
    d->own_uv = opt.own_uv;
    d->pre_norm = opt.norm_before;
    d->no_final_norm = opt.no_final_norm;
    d->norm_eps = opt.norm_eps;
    d->dropout = opt.dropout;
    d->attn_dropout = opt.attn_dropout;
    d->inner_dropout = opt.inner_dropout;
    d->pos_dropout = opt.pos_dropout;
    d->final_dropout = opt.final_dropout;
    d->init = opt.init;
    d->init_std = opt.init_std;
    d->proj_std = opt.proj_init_std;
}

static int describe_vocabulary(tr_lm *t, stx_par_desc *d) {
    static const int out[] = {STX_PAR_OUT_PLAIN, STX_PAR_OUT_ADAPTIVE, STX_PAR_OUT_REF};
    const int tied_matrix = opt.tied && opt.words_out == WORDS_PLAIN;
    size_t n;
    d->adaptive_in = opt.adaptive_in;
    d->words_out = tied_matrix ? STX_PAR_OUT_TIED : out[opt.words_out];
    d->emb_scale = opt.emb_scale;
    d->emb = opt.emb_sz;
    d->div_val = opt.div_val;
    d->proj_factor = opt.proj_factor;
    d->tie_words = opt.tied && !tied_matrix;
    d->tie_projs = opt.tie_projs;
    d->one_proj = opt.one_proj;
    d->pads = opt.pad_id >= 0;
    d->pad_id = opt.pad_id >= 0 ? opt.pad_id : 0;
    d->divide_all = opt.divide_all;
    if (!list(t, "cutoffs", opt.cutoffs, d->cutoff, STX_MAX_CLUSTERS - 1, &d->cutoffs)) return 0;
    if (!list(t, "proj-dims", opt.proj_dims, d->proj_dims, STX_MAX_CLUSTERS - 1, &n)) return 0;
    if (!n || n == d->cutoffs) return 1;
    return tr_fail(t->err, TR_ERR,
                   "--proj-dims %.200s: expected %zu numbers, one for each tail (--cutoffs)",
                   opt.proj_dims, d->cutoffs);
}

static void describe_search(run *r) {
    stx_par_desc *d = &r->desc;
    d->gate_form = opt.arch;
    d->gate = opt.straight_through ? STX_PAR_ST : STX_PAR_SOFT;
    /* a rehearsal uses the evaluation that requires the most memory (other_gates) */
    d->gate_eval = r->t.rehearsal ? STX_PAR_EVAL_SOFT : opt.gate_eval;
    d->noise = opt.noise;
    d->noise_tokens = opt.noise_tokens;
    d->tau = opt.tau_start;
    d->latency = opt.latency;
    d->latency_w = opt.latency_of;
    d->latency_weight = opt.latency_weight;
    d->latency_power = opt.latency_power;
    if (!(d->cost[0] > 0) && d->latency) d->cost[0] = d->cost[1] = 1;   /* until measured */
    if (opt.latency == STX_PAR_LATENCY_HINGE) d->latency_target = opt.latency_target * xl_time(r);
}

/* Fills in r->desc from the options. Returns 0 and sets an error if they are invalid. */
static int describe(run *r, size_t vocab) {
    stx_par_desc *d = &r->desc;
    memset(d, 0, sizeof *d);
    if (!expand(&r->t, "pattern", opt.pattern, (size_t)opt.nlayers, r->pattern)) return 0;
    r->blocks = *r->pattern ? strlen(r->pattern) : (size_t)opt.nlayers;
    d->vocab = vocab;
    d->blocks = r->blocks;
    d->pattern = *r->pattern ? r->pattern : NULL;
    describe_blocks(d);
    if (!describe_vocabulary(&r->t, d) || !latency_table(&r->t, d->cost)) return 0;
    if (!*r->pattern) describe_search(r);
    return 1;
}

/* Returns the number of parameters, or sets an error and returns 0. */
static size_t count(tr_lm *t, size_t vocab) {
    run *r = (run *)t;
    size_t n;
    if (!describe(r, vocab)) return 0;
    n = stx_par_count(&r->desc);
    if (!n) {
        stx_par_create(t->x, &r->desc);     /* sets the error that says why */
        report_error(t);
    }
    return n;
}

/* Returns the number of blocks with a memory. */
static size_t attentions(const run *r) {
    size_t l, n = 0;
    for (l = 0; l < r->blocks; l++) n += !*r->pattern || r->pattern[l] == 's';
    return n;
}

/* Writes a one-line description of the model to `line`. *states receives the number of
   elements in the model's memory. */
static void shape(const tr_lm *t, char *line, size_t size, double *states) {
    const run *r = (const run *)t;
    const size_t n = attentions(r);
    const unsigned long long heads = opt.nheads, segment = opt.block_sz, memory = opt.mem;
    *states = (double)opt.batch_sz * (double)opt.hid_sz * (double)n * (double)opt.mem;
    if (*r->pattern) {
        char text[PATTERN], *words = in_words(r->pattern);
        snprintf(line, size,
                 "%zu block%s %.60s: %.600s; %zu of them attention with %llu head%s, segment %llu, "
                 "memory %llu",
                 r->blocks, tr_s(r->blocks), short_form(r->pattern, text), words ? words : "", n,
                 heads, tr_s(heads), segment, memory);
        free(words);
    } else {
        snprintf(line, size,
                 "a search of %zu block%s, %zu gate parameters, %llu head%s, segment %llu, memory "
                 "%llu", r->blocks, tr_s(r->blocks), 3 * r->blocks, heads, tr_s(heads), segment,
                 memory);
    }
}

/* Measures the latencies if a search requires them and there is no --latency-table. The
   results become the value of --latency-table, which the checkpoint stores. */
static int fill_table(run *r) {
    tr_lm *t = &r->t;
    stx_par_desc d;
    char word[96], attention[32], feed[32];
    double cost[2], unit = opt.latency == STX_PAR_LATENCY_FBNET ? 1000 : 1;
    if (*r->pattern || !opt.latency || !t->training) return 1;
    if (opt.latency_table && *opt.latency_table) return 1;
    if (!stx_par_resolve(t->x, &r->desc, &d)) return report_error(t);
    /* all ranks use the times that rank 0 has measured */
    if (!measure(r, cost) || !stx_group_broadcast(t->x, cost, 2 * sizeof *cost, 0)) return 0;
    snprintf(attention, sizeof attention, "%.4g", cost[0] * unit);
    snprintf(feed, sizeof feed, "%.4g", cost[1] * unit);
    snprintf(word, sizeof word, "latency-table=%s,%s", attention, feed);
    return tr_apply(&options, word, TR_FROM_ARGS, t->err, TR_ERR) && describe(r, r->desc.vocab);
}

/* Checks the options that change the meaning of weights but not their shapes. A network
   that inherits weights must have the same values for these options. */
static int same_network(tr_lm *t, const stx_file *f) {
    static const char *const names[] = {
        "nheads", "norm-before", "no-final-norm", "norm-eps", "emb-scale",
        "sines", "pos-mode", "full-scale", "attn-relu"
    };
    const char *config = stx_file_meta(f, "config");
    char theirs[64], ours[64];
    size_t i;
    for (i = 0; config && i < sizeof names / sizeof *names; i++) {
        tr_value(tr_find_option(&options, names[i], strlen(names[i])), ours);
        if (tr_json_find(config, names[i], theirs, sizeof theirs) != 1) continue;
        if (strcmp(theirs, ours) != 0)
            return tr_fail(t->err, TR_ERR,
                           "--inherit %.300s: its weights were trained with --%s %s, got %s: use "
                           "the same value", opt.inherit, names[i], theirs, ours);
    }
    return 1;
}

/* Nonzero if the file has the vocabulary of this run. */
static int same_vocabulary(const tr_lm *t, const stx_file *f) {
    const stx_entry *e = stx_file_find(f, "vocab");
    const size_t length = stx_vocab_save(t->vocab, NULL, 0);
    void *ours = malloc(length + 1);
    int same = e && ours && stx_vocab_save(t->vocab, ours, length) == length
               && e->bytes == length && !memcmp(e->data, ours, length);
    free(ours);
    return same;
}

/* --inherit: loads the weights of another run's checkpoint. */
static int inherit(run *r) {
    tr_lm *t = &r->t;
    struct stat st;
    stx_file *f;
    int ok;
    if (t->rehearsal || !opt.inherit || !*opt.inherit) return 1;
    if (opt.lm.checkpoint && stat(opt.lm.checkpoint, &st) == 0) return 1;
    f = stx_file_open(t->x, opt.inherit);
    if (!f) return tr_fail(t->err, TR_ERR, "--inherit: %s", stx_error(t->x));
    if (!same_vocabulary(t, f)) {
        ok = tr_fail(t->err, TR_ERR,
                     "--inherit %.300s: its vocabulary differs from that of this run: use the same "
                     "--data and --tokens", opt.inherit);
    } else {
        ok = same_network(t, f);
        if (ok && (!stx_file_verify(f) || !stx_params_load(r->model->params, f, "")))
            ok = tr_fail(t->err, TR_ERR, "--inherit %.300s: %s", opt.inherit, stx_error(t->x));
    }
    stx_file_close(f);
    return ok;
}

/* Creates the batches and the memory for the gates' text (--arch-share). */
static int make_gate_text(run *r) {
    tr_lm *t = &r->t;
    stx_batches_desc d;
    size_t part;
    memset(&d, 0, sizeof d);
    d.B = opt.batch_sz;
    d.T = opt.block_sz;
    d.seed = opt.lm.seed;
    d.how = opt.lm.reading;
    d.first = r->gate_first;
    r->gate_batches = stx_batches_create(t->x, t->text[0], &d);
    if (!r->gate_batches && stx_error_code(t->x) != STX_ERR_MEMORY)
        return tr_fail(t->err, TR_ERR, "--arch-share %g: %s", opt.arch_share, stx_error(t->x));
    r->gate_state = (void **)stx_block(t->x, t->parts * sizeof *r->gate_state);
    for (part = 0; r->gate_state && part < t->parts; part++)
        r->gate_state[part] = t->lm.state_create(t->lm.model, t->in[0]->B, 0);
    return 1;
}

/* Creates the gates' optimiser. With --arch-share, also prepares the gates' text. */
static int make_search(run *r, const stx_optim_desc *weights) {
    static const int kinds[] = {0, STX_ADAM, STX_ADAMW, STX_SGD};
    tr_lm *t = &r->t;
    stx_optim_desc od;
    memset(&od, 0, sizeof od);
    if (opt.arch_optim == ARCH_SAME) {
        od = *weights;
    } else {
        od.kind = kinds[opt.arch_optim];
        od.weight_decay = opt.arch_weight_decay;
    }
    r->arch = stx_optim_create(r->model->gates, &od);
    if (r->gate_first && !make_gate_text(r)) return 0;
    return stx_ok(t->x) ? 1 : tr_lm_why(t);
}

/* Nonzero if the memories for --eval-mem fit into --max-memory. */
static int eval_fits(run *r) {
    const double limit = (double)stx_ctx_desc(r->t.x)->max_bytes;
    double need = (double)eval_batch() * (double)attentions(r) * (double)opt.hid_sz;
    need *= (double)opt.eval_mem * sizeof(stx_real);
    if (!(limit > 0 && need > limit)) return 1;
    return tr_fail(r->t.err, TR_ERR,
                   "--eval-mem %d: memories of that many rows require %.3g GiB, but --max-memory "
                   "allows %.3g GiB: use fewer rows, or a smaller --eval-batch-sz",
                   opt.eval_mem, need / (1 << 30), limit / (1 << 30));
}

static void optim_desc(stx_optim_desc *od) {
    static const int kinds[] = {STX_ADAM, STX_ADAMW, STX_LAMB, STX_SGD, STX_ADAGRAD};
    memset(od, 0, sizeof *od);
    od->kind = kinds[opt.optim];
    od->momentum = opt.momentum;
    od->weight_decay = opt.weight_decay;
    od->clip = opt.grad_clip;
    od->clip_value = opt.clip_value;
    od->eps = opt.eps;
    od->eps_hat = opt.eps_hat;
    if (od->kind == STX_LAMB) {     /* as in NVIDIA's implementation */
        od->trust_max = 10;
        od->no_correction = 1;
    }
}

/* Creates the model and, for training, the optimisers. */
static int make(tr_lm *t) {
    run *r = (run *)t;
    stx_optim_desc od;
    if (!describe(r, stx_vocab_size(t->vocab))) return 0;
    if (!tr_lm_fits(t, (double)stx_par_count(&r->desc))) return 0;
    if (!fill_table(r)) return *t->err || stx_ok(t->x) ? 0 : tr_lm_why(t);
    if (r->desc.latency == STX_PAR_LATENCY_FBNET && !(xl_time(r) > 1))
        return tr_fail(t->err, TR_ERR,
                       "--latency fbnet: expected a Transformer-XL time above 1, so that its "
                       "logarithm is positive, got %g: use a --latency-table in a smaller unit",
                       xl_time(r));

    r->model = stx_par_create(t->x, &r->desc);
    if (!r->model) return report_error(t);
    t->lm = stx_par_as_lm(r->model);
    t->lm.state_create = state_create;
    t->lm.gen_create = gen_create;
    if (opt.eval_mem > 0 && !eval_fits(r)) return 0;
    if (r->model->gates) {
        t->save_more = save_more;
        t->load_more = load_more;
        t->whole_pass = opt.gate_eval == STX_PAR_EVAL_NOISE && opt.noise != STX_PAR_NOISE_STEP;
    }
    if (!t->training) return stx_ok(t->x) ? 1 : report_error(t);
    optim_desc(&od);
    if (!inherit(r) || !tr_lm_make(t, &od, 1)) return 0;
    return !r->model->gates || make_search(r, &od);
}

/* Refuses options that would have no effect. */
static int check_useful(tr_lm *t) {
    const int adaptive = opt.words_out == WORDS_ADAPTIVE, ref = opt.words_out == WORDS_REFERENCE;
    const int xl_init = !opt.init, ranges = opt.schedule != LR_REFERENCE && opt.lr_warmup;
    const int cosine = opt.schedule == LR_COSINE || opt.schedule == LR_XL_COSINE;
    const int trains = !opt.lm.no_train && !opt.lm.interactive;
    const int measures = !opt.latency_table && (opt.latency || opt.derive);
    const tr_only only[] = {
        {"cutoffs", adaptive || ref, "--words-out adaptive or reference"},
        {"tie-projs", opt.adaptive_in, "--adaptive-in"},
        {"emb-sz", adaptive, "--words-out adaptive"},
        {"one-proj", opt.adaptive_in || !opt.one_proj, "--adaptive-in"},
        {"no-final-norm", opt.norm_before || !opt.no_final_norm, "--norm-before"},
        {"proj-dims", ref, "--words-out reference"},
        {"proj-factor", ref, "--words-out reference"},
        {"div-val", adaptive, "--words-out adaptive"},
        {"divide-all", opt.pad_id >= 0 || !opt.divide_all, "runs with --pad-id"},
        {"init-std", xl_init, "--init xl"},
        {"proj-init-std", xl_init && (adaptive || opt.adaptive_in),
            "--init xl with an adaptive vocabulary"},
        {"momentum", opt.optim == OPTIM_SGD, "--optim sgd"},
        {"lr-min", cosine, "--schedule cosine or xl-cosine"},
        {"lr-start", ranges, "--lr-warmup with a --schedule other than reference"},
        {"inherit", trains, "training, not to --no-train"},
        {"arch-lr", opt.arch_optim != ARCH_SAME, "a separate --arch-optim"},
        {"arch-weight-decay", opt.arch_optim != ARCH_SAME, "a separate --arch-optim"},
        {"arch-every", opt.arch_share > 0, "runs with --arch-share"},
        {"latency-of", opt.latency > 0, "runs with --latency"},
        {"latency-weight", opt.latency > 0, "runs with --latency"},
        {"latency-target", opt.latency == STX_PAR_LATENCY_HINGE || opt.derive,
            "--latency hinge and to --derive"},
        {"latency-pass", measures,
            "measured times (--latency, --derive), not to a --latency-table that is given or "
            "stored in the checkpoint"}
    };
    return tr_check_only(&options, only, sizeof only / sizeof *only, t->err, TR_ERR);
}

static int check_model(tr_lm *t) {
    const char *split = NULL;
    if (t->training && opt.lm.update_every > 1) split = "update-every";
    if (opt.batch_split > 1) split = "batch-split";
    if (opt.pad_id >= 0 && !opt.divide_all && split && t->found_seal[0] && t->training)
        return tr_fail(t->err, TR_ERR,
                       "--pad-id with --%s: this run was started by an earlier version, which gave "
                       "all parts of an update equal weight, however much padding they contain, "
                       "and cannot be resumed: start a new run with --init-from %.400s and --%s 1",
                       split, opt.lm.checkpoint, split);
    if (opt.pad_id >= 0 && !opt.divide_all && split)
        return tr_fail(t->err, TR_ERR,
                       "--pad-id with --%s: the parts of an update would have equal weight, "
                       "although they contain different amounts of padding: use --divide-all, or "
                       "--%s 1",
                       split, split);
    if (!opt.head_sz && opt.hid_sz % opt.nheads)
        return tr_fail(t->err, TR_ERR,
                       "--nheads: expected a divisor of --hid-sz %llu (or set --head-sz), got "
                       "%llu",
                       (unsigned long long)opt.hid_sz, (unsigned long long)opt.nheads);
    if (opt.adaptive_in && opt.words_out != WORDS_ADAPTIVE)
        return tr_fail(t->err, TR_ERR, "--adaptive-in requires --words-out adaptive");
    if (opt.eps_hat && opt.optim != OPTIM_ADAM && opt.optim != OPTIM_ADAMW)
        return tr_fail(t->err, TR_ERR, "--eps-hat requires --optim adam or adamw");
    return 1;
}

static int check_evaluation(tr_lm *t) {
    if ((opt.same_length || opt.eval_same_length) && (opt.eval_mem == 0 || opt.eval_mem == 1))
        return tr_fail(t->err, TR_ERR,
                       "--eval-mem: expected 2 or more with --%ssame-length, which counts the "
                       "query's own key, got %d", opt.same_length ? "" : "eval-", opt.eval_mem);
    if (opt.eval_same_length && opt.eval_mem < 0 && opt.mem < 2)
        return tr_fail(t->err, TR_ERR, "--eval-same-length requires --eval-mem 2 or more");
    if (opt.picture && !opt.lm.log)
        return tr_fail(t->err, TR_ERR, "--picture requires --log: it is drawn from the log");
    return !opt.picture || (tr_lm_own_file(t, "picture", opt.picture)
                            && tr_can_write("picture", opt.picture, 1, t->err, TR_ERR));
}

/* Checks the options other than --pattern that contain patterns. */
static int check_patterns(tr_lm *t) {
    const run *r = (const run *)t;
    char pattern[PATTERN];
    if (opt.race) {
        if (!expand(t, "race", opt.race, r->blocks, pattern)) return 0;
        if (!*pattern)
            return tr_fail(t->err, TR_ERR,
                           "--race: expected a fixed pattern to race against, such as xl, got %s",
                           opt.race);
    }
    if (opt.inherit && opt.lm.init_from)
        return tr_fail(t->err, TR_ERR,
                       "--inherit and --init-from cannot be combined: --init-from also takes the "
                       "pattern from its file; --inherit is for a different --pattern");
    return 1;
}

/* Checks the options for a fixed pattern. */
static int check_fixed(tr_lm *t) {
    static const char *const search[] = {
        "arch", "gate-eval", "straight-through", "noise", "noise-tokens", "tau-start", "tau-end",
        "tau-form", "tau-steps", "arch-optim", "arch-lr", "arch-weight-decay", "arch-from",
        "arch-until", "arch-share", "arch-every", "latency", "latency-of", "latency-weight",
        "latency-target", "latency-power", "latency-pass", "derive-samples", "picture"
    };
    size_t i;
    for (i = 0; i < sizeof search / sizeof *search; i++)
        if (tr_given(&options, search[i]))
            return tr_fail(t->err, TR_ERR, "--%s is only for a search: the pattern %.80s is fixed",
                           search[i], opt.pattern);
    if (opt.derive)
        return tr_fail(t->err, TR_ERR,
                       "--derive is only for a search: this model's pattern is fixed");
    return 1;
}

static int check_search(tr_lm *t) {
    const char *by_token = tr_lm_by_token(t);
    const int samples = t->training && opt.lm.sample_every;
    if (opt.derive && t->opt->no_train)
        return tr_fail(t->err, TR_ERR, "--derive and --no-train cannot be combined: --derive "
                       "evaluates networks, but --no-train only generates text");
    if (opt.gate_eval == STX_PAR_EVAL_NOISE && (by_token || samples))
        return tr_fail(t->err, TR_ERR,
                       "--%s with --gate-eval noise: the model cannot read token by token if its "
                       "gates have noise: use --gate-eval argmax or soft",
                       by_token ? by_token : "sample-every");
    if (opt.inherit) return tr_fail(t->err, TR_ERR, "--inherit is only for a fixed --pattern");
    if (opt.arch_until && opt.arch_until <= opt.arch_from)
        return tr_fail(t->err, TR_ERR,
                       "--arch-until: expected more than --arch-from %llu, got %llu: the gates "
                       "would never learn",
                       (unsigned long long)opt.arch_from, (unsigned long long)opt.arch_until);
    if (opt.latency == STX_PAR_LATENCY_HINGE && !(opt.latency_target > 0))
        return tr_fail(t->err, TR_ERR,
                       "--latency hinge requires --latency-target, a fraction of "
                       "Transformer-XL's time, such as 0.65");
    if (t->training && tr_lm_ranks(t) > 1 && opt.latency > STX_PAR_LATENCY_ADD && opt.latency_of
        && opt.noise != STX_PAR_NOISE_STEP)
        return tr_fail(t->err, TR_ERR,
                       "with several ranks, --latency hinge and fbnet cannot be combined with "
                       "--latency-of w and --noise sequence or tokens: each rank knows only the "
                       "time of its streams, and the loss would not be the mean over ranks: use "
                       "--latency-of p or --noise step");
    if (opt.noise == STX_PAR_NOISE_TOKENS && !opt.noise_tokens)
        return tr_fail(t->err, TR_ERR, "--noise tokens requires --noise-tokens");
    if (t->training && opt.lm.update_every > 1)
        return tr_fail(t->err, TR_ERR,
                       "--update-every requires a fixed --pattern: a search updates in every step "
                       "(--batch-split saves memory)");
    if (opt.arch_share > 0 && opt.lm.random_segments)
        return tr_fail(t->err, TR_ERR,
                       "--arch-share and --random-segments cannot be combined: --arch-share "
                       "reserves the end of the training text, and random segments are drawn from "
                       "all of it");
    return 1;
}

/* Checks that the options are consistent before any text is read. */
static int check(tr_lm *t) {
    run *r = (run *)t;
    if (!check_useful(t) || !describe(r, 1)) return 0;
    if (!check_model(t) || !check_evaluation(t) || !check_patterns(t)) return 0;
    return *r->pattern ? check_fixed(t) : check_search(t);
}

/* Returns the number of steps per epoch of the text on which the weights are trained. */
static uint64_t epoch(const tr_lm *t) {
    stx_batches_desc d;
    memset(&d, 0, sizeof d);
    d.B = opt.batch_sz;
    d.T = opt.block_sz;
    d.how = opt.lm.reading;
    d.count = t->use;
    return stx_batches_epoch(t->text[0], &d);
}

/* Reserves the end of the training text for the gates (--arch-share). */
static void plan_gate_text(run *r) {
    tr_lm *t = &r->t;
    size_t size, share;
    t->use = 0;
    r->gate_first = 0;
    if (*r->pattern || !(opt.arch_share > 0) || !t->text[0]) return;
    size = stx_corpus_size(t->text[0]);
    share = (size_t)(opt.arch_share * (double)size);
    if (share > 0 && share < size) t->use = r->gate_first = size - share;
}

static void plan_evaluation(tr_lm *t) {
    t->eval_blocks = opt.lm.eval_blocks;
    t->eval_block = opt.eval_block_sz ? (size_t)opt.eval_block_sz : (size_t)opt.block_sz;
    t->eval_window = opt.eval_mem >= 0 || opt.eval_clamp_len >= 0 || opt.eval_same_length;
    t->more_figures = 1;
    t->blocks_see_more = !opt.same_length && !opt.eval_same_length;
    t->pad_id = opt.pad_id;
    t->mean_of_all = opt.pad_id >= 0 && opt.divide_all;
    t->no_evaluation = opt.derive;      /* --derive evaluates networks itself */
    eval_rows = opt.eval_mem >= 0 ? (size_t)opt.eval_mem : (size_t)opt.mem;
}

/* Sets the length of the run, the steps at which it logs, evaluates and saves, and the
   schedules of the learning rate and the temperature. */
static void plan(tr_lm *t) {
    static const int kinds[] = {
        STX_LR_CONSTANT, STX_LR_COSINE, STX_LR_INV_SQRT, STX_LR_COSINE, STX_LR_CONSTANT
    };
    run *r = (run *)t;
    uint64_t steps;     /* steps per epoch */
    plan_gate_text(r);
    steps = epoch(t);
    if (r->gate_first) steps = steps * opt.arch_every / (opt.arch_every - 1);

    t->steps = 1000;
    if (opt.epochs > 0 && steps) t->steps = (uint64_t)(opt.epochs * (double)steps + 0.5);
    if (opt.lm.steps) t->steps = opt.lm.steps;
    t->log_every = opt.lm.log_every ? opt.lm.log_every : 10;
    t->eval_every = t->save_every = opt.epochs > 0 ? steps : 0;
    if (opt.lm.eval_every) t->eval_every = opt.lm.eval_every;
    if (opt.lm.save_every) t->save_every = opt.lm.save_every;
    plan_evaluation(t);

    t->schedule.kind = kinds[opt.schedule];
    t->schedule.literal = opt.schedule == LR_XL_COSINE;
    t->schedule.lr = opt.lr;
    t->schedule.lr_start = opt.lr_start;
    t->schedule.lr_min = opt.lr_min;
    t->schedule.warmup = opt.lr_warmup;
    t->schedule.total = t->steps;

    r->anneal.form = opt.tau_form ? STX_PAR_TAU_FACTOR : STX_PAR_TAU_TARGET;
    r->anneal.from = opt.tau_start;
    r->anneal.to = opt.tau_end;
    r->anneal.total = opt.tau_steps ? opt.tau_steps : t->steps;
}

static const tr_lm_kind kind = {
    "seqtx.par.1", "memory", &opt.words_out, NULL, STX_ORDER_COUNT_EARLIER, 1,
    /* sized: changes to DEMO for texts of up to 1e5 tokens, for texts of up to 2e6
       tokens, and for longer texts */
    {"nlayers=4 hid-sz=64 dropout=0.2", "dropout=0.1", ""},
    check, plan, count, shape, make, train, report, sizeof(run)
};

int main(int argc, char **argv) {
    static run r;
    return tr_lm_main(&r.t, &kind, &options, &opt.lm, &opt.derive, argc, argv);
}
