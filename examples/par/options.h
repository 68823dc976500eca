/* par/options.h - the options of train_par: their values (opt), and the table that parses
   and documents them. Uses the rows that all trainers share (train/lm.h). */
#pragma once
#include "../train/options.h"
#include "../train/lm.h"
#include "presets.h"


// >>options

enum { MAX_BLOCKS = 4096, MAX_ROWS = 1 << 30 };
enum { ARCH_SAME, ARCH_ADAM, ARCH_ADAMW, ARCH_SGD };            /* values of opt.arch_optim */
enum { WORDS_PLAIN, WORDS_ADAPTIVE, WORDS_REFERENCE };          /* values of opt.words_out */
enum { LR_XL_COSINE = 3, LR_REFERENCE };        /* the last two values of opt.lm.schedule */

static struct {
    /* model */
    uint64_t    nlayers, hid_sz, inner_hid_sz, nheads, head_sz, mem, clamp_len;
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
    int         eps_hat;
    double      eps, clip_value;

    /* evaluation */
    int         eval_mem, eval_clamp_len, eval_same_length;
    uint64_t    eval_block_sz;

    tr_lm_opt   lm;         /* options shared by all trainers */
} opt;

/* The library's values for the choices of --optim and --schedule, in the order of their
   names in the table below. */
static const int optim_kinds[] = {STX_ADAM, STX_ADAMW, STX_LAMB, STX_SGD, STX_ADAGRAD, STX_MUON};

static const int schedule_kinds[] = {
    STX_LR_CONSTANT, STX_LR_COSINE, STX_LR_INV_SQRT,
    STX_LR_COSINE,      /* LR_XL_COSINE: with schedule.literal */
    STX_LR_CONSTANT     /* LR_REFERENCE: see rate() in train_par.c */
};

/* The second column determines how checkpoints treat the option: see "Resuming" in
   train.h. Aliases are the names that PAR's reference code and Transformer-XL's
   training scripts use. */
static tr_opt table[] = {
    TR_GROUP("Model"),
    TR_SIZE("nlayers", TR_MODEL, &opt.nlayers, 1, MAX_BLOCKS,
        "number of blocks (ignored if --pattern lists the blocks)"),
    TR_TEXT("pattern", TR_MODEL, &opt.pattern,
        "the blocks, starting at the embedding: s attention, f feed-forward, i identity. A count "
        "repeats the letter or the group before it: s5f is 5 attention, 1 feed-forward; (sff)4f3. "
        "xl: Transformer-XL, sf repeated; par:P: one attention per P blocks, in the first two "
        "thirds; search: every block is a mixture of the three"),
    TR_SIZE("hid-sz", TR_MODEL, &opt.hid_sz, 1, 1u << 28, "model dimension D"),
    TR_SIZE("nheads", TR_MODEL, &opt.nheads, 1, 256,
        "number of attention heads"),
    TR_SIZE("head-sz", TR_MODEL, &opt.head_sz, 0, 1u << 20,
        "head dimension; 0: --hid-sz / --nheads"),
    TR_SIZE("inner-hid-sz", TR_MODEL, &opt.inner_hid_sz, 0, MAX_ROWS,
        "size of the feed-forward network; 0: 4 D"),
    TR_SIZE("block-sz", TR_MODEL, &opt.lm.block_sz, 1, MAX_ROWS,
        "segment length: tokens per stream and step"),
    TR_SIZE("mem", TR_MODEL, &opt.mem, 0, MAX_ROWS,
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
    TR_REAL_OPEN("dropout", TR_FREE, &opt.dropout, TR_OPEN_MAX, 0, 1,
        "dropout probability of the embedding and of the output of each branch"),
    TR_REAL_OPEN("attn-dropout", TR_FREE, &opt.attn_dropout, TR_OPEN_MAX, 0, 1,
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
    TR_LIST("cutoffs", TR_MODEL, &opt.cutoffs,
        "ends of the clusters, such as 20000,40000,200000; build/cuts finds good values. The "
        "option can also be repeated with one value each time"),
    TR_REAL("div-val", TR_MODEL, &opt.div_val, 0, 1e6,
        "with --words-out adaptive: each cluster is narrower than the previous one by this "
        "factor; 0: 1"),
    TR_REAL("proj-factor", TR_MODEL, &opt.proj_factor, 0, 1e6,
        "with --words-out reference: each tail is narrower than the previous cluster by this "
        "factor; 0: 4"),
    TR_LIST("proj-dims", TR_MODEL, &opt.proj_dims,
        "with --words-out reference: width of each tail, instead of --proj-factor, such as 64,16"),
    TR_SIZE("emb-sz", TR_MODEL, &opt.emb_sz, 0, 1u << 28,
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
    TR_LM_OPTIM(opt.lm, "adam|adamw|lamb|sgd|adagrad|muon"),
    TR_REAL("lr", TR_FREE, &opt.lm.lr, 0, 1e6, "learning rate"),
    TR_CHOICE("schedule", TR_FREE, &opt.lm.schedule,
        "constant|cosine|inv-sqrt|xl-cosine|reference",
        "learning-rate schedule after the warm-up; xl-cosine: Transformer-XL's, whose cosine "
        "starts at the first step; reference: the lower of a warm-up from 0 and a cosine"),
    TR_SIZE("lr-warmup", TR_FREE, &opt.lm.lr_warmup, 0, TR_INF,
        "length of the linear warm-up, in steps"),
    TR_REAL("lr-start", TR_FREE, &opt.lm.lr_start, 0, 1e6, "initial learning rate of the warm-up"),
    TR_REAL("lr-min", TR_FREE, &opt.lm.lr_min, 0, 1e6,
        "learning rate at the end of the cosine schedule"),
    TR_REAL("momentum", TR_FIXED, &opt.lm.momentum, 0, 1,
        "momentum of sgd and muon; with muon, 0: 0.95"),
    TR_REAL("eps", TR_FIXED, &opt.eps, 0, 1,
        "epsilon of the optimiser; 0: its default"),
    TR_FLAG("eps-hat", TR_FIXED, &opt.eps_hat,
        "with --optim adam or adamw: apply --eps as TensorFlow does"),
    TR_REAL("weight-decay", TR_FREE, &opt.lm.weight_decay, 0, 1e6,
        "weight decay of adam and sgd (added to the gradient), adamw and muon (decoupled) and lamb "
        "(added to the direction)"),
    TR_LM_GROUPS(opt.lm),
    TR_REAL("grad-clip", TR_FREE, &opt.lm.grad_clip, 0, 1e9,
        "gradient clipping norm, per tensor with adagrad, otherwise over all tensors; 0: no "
        "clipping"),
    TR_REAL("clip-value", TR_FREE, &opt.clip_value, 0, 1e9,
        "clipping value of gradient elements; 0: no clipping"),
    TR_SIZE("batch-sz", TR_FIXED, &opt.lm.batch_sz, 1, 1u << 30,
        "number of parallel text streams, each of which a step continues by a block"),
    TR_LM_STREAMS(opt.lm),
    TR_SIZE("batch-split", TR_FIXED, &opt.lm.batch_split, 1, 1u << 30,
        "process the batch in this many parts, to save memory"),
    TR_CHOICE("reading", TR_FIXED, &opt.lm.reading, "streams|roll|records",
        "order of the text: streams; streams that are rotated by a random number of tokens in "
        "every epoch; blocks without overlap, as PAR's reference reads"),
    TR_LM_PACE(opt.lm),
    TR_SIZE("steps", TR_FREE, &opt.lm.steps, 0, TR_INF,
        "total number of steps, each of one segment per stream; without it: --epochs, --minutes,"
        " or the preset"),
    TR_LM_LENGTH(opt.lm),
    TR_SIZE("seed", TR_FIXED, &opt.lm.seed, 0, TR_INF,
        "seed of initial values, dropout, noise and positions in the text. If given, also the seed "
        "of sampling; otherwise sampling differs every time"),
    TR_LM_DATA(opt.lm),
    TR_LM_SAVING(opt.lm, "only at the end", "the whole text"),
    TR_INT("eval-mem", TR_FREE | TR_KEPT, &opt.eval_mem, -1, MAX_ROWS,
        "evaluation and generation: number of memory rows; -1: as in training"),
    TR_SIZE("eval-block-sz", TR_FREE | TR_KEPT, &opt.eval_block_sz, 0,
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

static tr_options options = {
    "train_par",
    "Trains Transformer-XL on text, and searches for the best order of attention and feed-forward "
    "blocks (PAR).",
    table, presets, TR_LM_DEFAULTS DEMO "optim=muon", TR_LM_AFTER, "", &tr_lm_brief, NULL
};
