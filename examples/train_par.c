/* train_par.c - trains, searches, evaluates and samples Transformer-XL and PAR
   (seqtx_par.h) on text.

       cc -O3 -pthread train_par.c -lm -o train_par
       ./train_par --data FILE --pattern "(sf)4" --checkpoint xl.safetensors                    a Transformer-XL of four layers
       ./train_par --data FILE --pattern search --nlayers 8 --checkpoint search.safetensors     a search among 3^8 orders of blocks
       ./train_par --checkpoint search.safetensors --derive                                     what it found
       ./train_par --data FILE --pattern sffsffff --inherit search.safetensors --checkpoint found.safetensors
       ./train_par --help

   The training loop is the function train(), in the open; options, data, checkpoints,
   log and terminal are train.h's. */
#define TR_LM
#include "train.h"
#include "svg.h"
#define SEQTX_IMPLEMENTATION
#include "../seqtx_par.h"
#include "../seqtx_text.h"

// >>options ----------------------------------------------------------------------------------------------------------

enum { MAX_BLOCKS = 4096, MAX_ROWS = 1 << 30 };
enum { ARCH_SAME, ARCH_ADAM, ARCH_ADAMW, ARCH_SGD };        /* opt.arch_optim */

static struct {
    uint64_t nlayers, hid_sz, emb_sz, inner_hid_sz, nheads, head_sz, block_sz, mem, clamp_len;
    const char *pattern, *cutoffs, *proj_dims, *inherit;
    int positions, sines, pos_mode, same_length, full_scale, attn_relu, biases, own_uv, norm_before, init;
    int no_final_norm, one_proj;
    int adaptive_in, words_out, tied, tie_projs, pad_id, divide_all, eval_mem, eval_clamp_len, eval_same_length;
    double norm_eps, dropout, attn_dropout, inner_dropout, pos_dropout, final_dropout, init_std, proj_init_std, div_val, proj_factor,
        emb_scale;
    int arch, straight_through, gate_eval, noise, tau_form, arch_optim, latency, latency_of, latency_pass;
    uint64_t noise_tokens, tau_steps, arch_from, arch_until, arch_every, eval_block_sz, derive_samples;
    double tau_start, tau_end, arch_lr, arch_weight_decay, arch_share, latency_weight, latency_target, latency_power;
    const char *latency_table, *picture, *race;
    int derive;
    int optim, schedule, eps_hat, literal;
    double lr, lr_start, lr_min, eps, momentum, weight_decay, grad_clip, clip_value, epochs;
    uint64_t lr_warmup, batch_sz, batch_split;
    tr_lm_opt lm;
} opt;

/* The second column says what a checkpoint does with an option: see "Resuming" in
   train.h. Other names of an option are those of PAR's reference and of
   Transformer-XL's trainers. */
static tr_opt table[] = {
    TR_GROUP("Model"),
    TR_SIZE_ALSO("nlayers", "num-layers", TR_MODEL, &opt.nlayers, 1, MAX_BLOCKS, "blocks; a pattern that is written out has its own "
                 "number"),
    TR_TEXT("pattern", TR_MODEL, &opt.pattern, "blocks from below: s attention, f feed-forward, i "
            "identity. A number repeats what is before it, a letter or a group: s5f is 5 "
            "attention, then 1 feed-forward; (sff)4f3. xl: Transformer-XL, sf repeated; par:P: one "
            "attention for P blocks, in the first two thirds; search: every block is a mixture of "
            "the three"),
    TR_SIZE_ALSO("hid-sz", "d-model", TR_MODEL, &opt.hid_sz, 1, 1u << 28, "hidden size d"),
    TR_SIZE_ALSO("nheads", "num-heads|n-head", TR_MODEL, &opt.nheads, 1, 256, "attention heads"),
    TR_SIZE_ALSO("head-sz", "d-head", TR_MODEL, &opt.head_sz, 0, 1u << 20, "width of a head; 0: --hid-sz / --nheads"),
    TR_SIZE_ALSO("inner-hid-sz", "d-ffn|d-inner", TR_MODEL, &opt.inner_hid_sz, 0, MAX_ROWS, "inner size of the feed-forward; 0: 4 d"),
    TR_SIZE_ALSO("block-sz", "tgt-len|seq-len", TR_MODEL, &opt.block_sz, 1, MAX_ROWS, "segment: tokens of each stream per step"),
    TR_SIZE_ALSO("mem", "mem-len", TR_MODEL, &opt.mem, 0, MAX_ROWS, "rows of memory of each attention; 0: none"),
    TR_CHOICE("positions", TR_MODEL, &opt.positions, "sines|learned|learned-bias",
              "sines of the distance; a table for each attention; a table, and a bias per distance "
              "and head in place of v (Transformer-XL's attn_type 1)"),
    TR_SIZE("clamp-len", TR_FIXED | TR_KEPT, &opt.clamp_len, 0, MAX_ROWS, "distances beyond it count as it; 0: none do"),
    TR_FLAG("same-length", TR_FIXED | TR_KEPT, &opt.same_length, "a query sees --mem keys and no more, itself included"),
    TR_FLAG("norm-before", TR_MODEL, &opt.norm_before, "layer norm before each branch, and one at the end, in place of after it"),
    TR_FLAG("no-final-norm", TR_MODEL | TR_LATER, &opt.no_final_norm,
            "norm-before: none at the end (Transformer-XL's pre_lnorm)"),
    TR_REAL("norm-eps", TR_MODEL, &opt.norm_eps, 0, 1, "of layer norms; 0: 1e-5"),
    TR_FLAG("own-uv", TR_MODEL, &opt.own_uv, "each attention has its own u and v; without, all have one pair"),
    TR_FLAG("biases", TR_MODEL, &opt.biases, "of the projections of attention"),
    TR_REAL_ALSO("dropout", "dropout-rate", TR_FREE, &opt.dropout, TR_OPEN_MAX, 0, 1, "on the embedding and the output of each branch"),
    TR_REAL_ALSO("attn-dropout", "dropatt", TR_FREE, &opt.attn_dropout, TR_OPEN_MAX, 0, 1, "on attention weights"),
    TR_REAL_OPEN("inner-dropout", TR_FREE, &opt.inner_dropout, TR_OPEN_MAX, 0, 1, "inside the feed-forward"),
    TR_REAL_OPEN("pos-dropout", TR_FREE, &opt.pos_dropout, TR_OPEN_MAX, 0, 1, "on the sines"),
    TR_REAL_OPEN("final-dropout", TR_FREE, &opt.final_dropout, TR_OPEN_MAX, 0, 1, "on the last hidden states"),
    TR_CHOICE("init", TR_FIXED, &opt.init, "xl|reference", "first values: Transformer-XL's normal ones, or those of PAR's reference"),
    TR_REAL("init-std", TR_FIXED, &opt.init_std, 0, 100, "xl: their deviation; 0: 0.02"),
    TR_REAL("proj-init-std", TR_FIXED, &opt.proj_init_std, 0, 100, "... that of the words' projections; 0: 0.01"),
    TR_TEXT("inherit", TR_LOCAL, &opt.inherit, "a new run with a --pattern begins with the weights of this checkpoint, of a search or not"),
    TR_GROUP("Words"),
    TR_CHOICE("words-out", TR_MODEL, &opt.words_out, "plain|adaptive|reference", "one softmax; clusters as Transformer-XL has them; "
              "clusters of PAR's reference: a head of width d, tails with a projection and its bias"),
    TR_FLAG("adaptive-in", TR_MODEL, &opt.adaptive_in, "adaptive: the embedding is, too"),
    TR_FLAG("tied", TR_MODEL, &opt.tied, "the output's matrix is the embedding's, also of adaptive ones"),
    TR_CHOICE("tie-projs", TR_MODEL, &opt.tie_projs, "none|all|but-first", "adaptive-in: which projections are the output's, too"),
    TR_FLAG("one-proj", TR_MODEL | TR_LATER, &opt.one_proj,
            "adaptive-in with --div-val 1: its clusters, and those of the output that --tie-projs "
            "ties, have one projection (Transformer-XL)"),
    TR_LIST_ALSO("cutoffs", "adapt-io-cutoffs", TR_MODEL, &opt.cutoffs, "cluster ends, as 20000,40000,200000, or one after the other; "
                 "build/cuts finds the best ones"),
    TR_REAL_ALSO("div-val", "adapt-io-divval", TR_MODEL, &opt.div_val, 0, 0, 1e6, "adaptive: each cluster is this much narrower than the "
        "one before; 0: 1"),
    TR_REAL("proj-factor", TR_MODEL, &opt.proj_factor, 0, 1e6, "reference: the same of its tails; 0: 4"),
    TR_LIST_ALSO("proj-dims", NULL, TR_MODEL, &opt.proj_dims, "reference: in place of that the width of each tail, as 64,16"),
    TR_SIZE_ALSO("emb-sz", "d-embed", TR_MODEL, &opt.emb_sz, 0, 1u << 28, "adaptive-in: width of the first cluster; 0: --hid-sz"),
    TR_REAL("emb-scale", TR_MODEL, &opt.emb_scale, 0, 1e6, "the embedding is multiplied by this; 0: the root of --hid-sz"),
    TR_INT("pad-id", TR_MODEL, &opt.pad_id, -1, INT_MAX, "targets with this number have no loss; -1: all have"),
    TR_FLAG("divide-all", TR_MODEL, &opt.divide_all, "... but count in the mean"),
    TR_GROUP("Search"),
    TR_CHOICE("arch", TR_MODEL, &opt.arch, "logits|pi", "a block's three numbers: logits, or weights that are cut off at 0 (the "
              "reference)"),
    TR_FLAG("straight-through", TR_FIXED, &opt.straight_through, "training runs with one branch a block, and learns as if with a mixture"),
    TR_CHOICE("gate-eval", TR_FREE | TR_KEPT, &opt.gate_eval, "argmax|soft|noise",
        "evaluation: the likeliest branch of each block; the mixture; a "
        "mixture with noise, as in training (the reference)"),
    TR_CHOICE("noise", TR_FIXED, &opt.noise, "step|sequence|tokens", "Gumbel noise is drawn once a step; for each stream; for each "
        "--noise-tokens of each stream"),
    TR_SIZE("noise-tokens", TR_FIXED, &opt.noise_tokens, 0, MAX_ROWS, "..."),
    TR_REAL_OPEN("tau-start", TR_FREE, &opt.tau_start, 0, 1e-6, 1e6, "temperature of the first step"),
    TR_REAL_OPEN("tau-end", TR_FREE, &opt.tau_end, 0, 1e-6, 1e6, "of the last one"),
    TR_CHOICE("tau-form", TR_FREE, &opt.tau_form, "target|factor", "factor: the last one is tau-start times tau-end (the reference)"),
    TR_SIZE("tau-steps", TR_FREE, &opt.tau_steps, 0, TR_INF, "steps from the first to the last; 0: --steps"),
    TR_CHOICE("arch-optim", TR_FIXED, &opt.arch_optim, "same|adam|adamw|sgd", "optimiser of those numbers; same: kind, rate and decay of "
              "the weights' (the reference)"),
    TR_REAL("arch-lr", TR_FREE, &opt.arch_lr, 0, 1e6, "its rate, which stays"),
    TR_REAL("arch-weight-decay", TR_FREE, &opt.arch_weight_decay, 0, 1e6, "its decay"),
    TR_SIZE("arch-from", TR_FREE, &opt.arch_from, 0, TR_INF, "they stay as they are in the first steps, so many"),
    TR_SIZE("arch-until", TR_FREE, &opt.arch_until, 0, TR_INF, "... and after this step; 0: to the end"),
    TR_REAL_OPEN("arch-share", TR_FIXED, &opt.arch_share, TR_OPEN_MAX, 0, 1, "they learn from this share of the training text, its end, "
                 "and the weights from the rest; 0: both from the same steps"),
    TR_SIZE("arch-every", TR_FREE, &opt.arch_every, 2, 1u << 20, "... in every such step, in which the weights stay"),
    TR_CHOICE("latency", TR_FIXED, &opt.latency, "none|add|hinge|fbnet", "the expected time of the blocks is added to the loss; as far "
              "as it is above the target; loss times a ln(time)^b"),
    TR_CHOICE("latency-of", TR_FIXED, &opt.latency_of, "p|w", "expected by the probabilities, or by the noisy weights"),
    TR_REAL("latency-weight", TR_FREE, &opt.latency_weight, 0, 1e9, "of that loss; a of fbnet"),
    TR_REAL("latency-target", TR_FREE, &opt.latency_target, 0, 1e6, "hinge: a share of the time of a Transformer-XL of as many blocks"),
    TR_REAL("latency-power", TR_FREE, &opt.latency_power, 0, 100, "b of fbnet; 0: 0.6"),
    TR_TEXT("latency-table", TR_FREE, &opt.latency_table, "time of an attention and of a feed-forward, as 1.25,0.8, in milliseconds "
            "(fbnet: microseconds); none: measured at the start, on the device in use"),
    TR_CHOICE("latency-pass", TR_FREE, &opt.latency_pass, "training|forward", "what is measured"),
    TR_FLAG("derive", TR_LOCAL, &opt.derive, "say what the search of a checkpoint found: the likeliest pattern, --derive-samples drawn "
        "ones, PAR's rule, each with its loss as a network by itself; and the best, within --latency-target if there is one"),
    TR_SIZE("derive-samples", TR_LOCAL, &opt.derive_samples, 0, 1u << 20, "..."),
    TR_TEXT("race", TR_LOCAL, &opt.race, "at the end, time steps of this pattern against the model's, in turn"),
    TR_TEXT("picture", TR_LOCAL, &opt.picture, "at the end, draw the probabilities of each block by step from the --log into this SVG"),
    TR_GROUP("The reference's own forms"),
    TR_CHOICE("sines", TR_MODEL, &opt.sines, "block|reference", "sines, then cosines; or in turn, the slowest first"),
    TR_CHOICE("pos-mode", TR_MODEL, &opt.pos_mode, "dist|fixed|reference", "the row of a distance is the distance; counted from the "
              "other end, of memory and segment, or of the keys that there are"),
    TR_FLAG("full-scale", TR_MODEL, &opt.full_scale, "scores are divided by the width of a head, not its root"),
    TR_FLAG("attn-relu", TR_MODEL, &opt.attn_relu, "ReLU after the attention's last projection"),
    TR_SET("literal", TR_LOCAL, &opt.literal, "", 0,
           "Transformer-XL and PAR have no literal forms: each form of an original is an option of "
           "its own (this group, --schedule xl-cosine)"),
    TR_GROUP("Optimisation"),
    TR_CHOICE("optim", TR_FIXED, &opt.optim, "adam|adamw|lamb|sgd|adagrad", "optimiser"),
    TR_REAL_ALSO("lr", "max-lr", TR_FREE, &opt.lr, 0, 0, 1e6, "learning rate"),
    TR_CHOICE("schedule", TR_FREE, &opt.schedule, "constant|cosine|inv-sqrt|xl-cosine|reference", "learning rate after the warm-up; "
              "xl-cosine: Transformer-XL's own, whose cosine counts from the first step; reference: the lower of warm-up and cosine, 0 "
              "at first"),
    TR_SIZE_ALSO("lr-warmup", "warmup-steps|warmup-step", TR_FREE, &opt.lr_warmup, 0, TR_INF, "steps of linear warm-up"),
    TR_REAL("lr-start", TR_FREE, &opt.lr_start, 0, 1e6, "where it begins"),
    TR_REAL_ALSO("lr-min", "eta-min", TR_FREE, &opt.lr_min, 0, 0, 1e6, "end of the cosine"),
    TR_REAL_ALSO("momentum", "mom", TR_FIXED, &opt.momentum, 0, 0, 1, "of sgd"),
    TR_REAL("eps", TR_FIXED, &opt.eps, 0, 1, "of the optimiser's denominator; 0: its usual one"),
    TR_FLAG("eps-hat", TR_FIXED, &opt.eps_hat, "adam, adamw: eps as it is in TensorFlow's form"),
    TR_REAL("weight-decay", TR_FREE, &opt.weight_decay, 0, 1e6, "of adam and sgd (in the gradient), adamw (decoupled) and lamb (in the "
        "direction)"),
    TR_REAL_ALSO("grad-clip", "clip", TR_FREE, &opt.grad_clip, 0, 0, 1e9, "largest gradient norm: per tensor with adagrad, of all together "
        "otherwise; 0: none"),
    TR_REAL_ALSO("clip-value", "clipvalue", TR_FREE, &opt.clip_value, 0, 0, 1e9, "largest number of a gradient; 0: none"),
    TR_SIZE_ALSO("batch-sz", "batch-size", TR_FIXED, &opt.batch_sz, 1, 1u << 30, "parallel streams of text"),
    TR_SIZE_ALSO("batch-split", "batch-chunk", TR_FIXED, &opt.batch_split, 1, 1u << 30, "work on the batch in this many parts, one after "
        "the other (less memory)"),
    TR_CHOICE("reading", TR_FIXED, &opt.lm.reading, "streams|roll|records", "streams of the text; each turned by a random number of "
              "tokens in every epoch; blocks without overlap, as the reference of PAR reads"),
    TR_LM_PACE(opt.lm),
    TR_SIZE_ALSO("steps", "max-step", TR_FREE, &opt.lm.steps, 0, TR_INF, "steps in all: one segment of every stream each; 0: as --epochs "
        "says, or 1000"),
    TR_REAL("epochs", TR_FREE, &opt.epochs, 0, 1e9, "times through the training text, where no --steps are said"),
    TR_SIZE("seed", TR_FIXED, &opt.lm.seed, 0, TR_INF, "of initial values, dropout, noise and pieces of text; of sampling where it is "
            "given, else that differs every time"),
    TR_LM_DATA(opt.lm),
    TR_LM_SAVING(opt.lm, "only at the end; with --epochs after each", "the whole text"),
    TR_INT("eval-mem", TR_FREE | TR_KEPT, &opt.eval_mem, -1, MAX_ROWS, "evaluation and generation: rows of memory; -1: as in training"),
    TR_SIZE_ALSO("eval-block-sz", "eval-tgt-len", TR_FREE | TR_KEPT, &opt.eval_block_sz, 0, MAX_ROWS,
        "evaluation: tokens at once; 0: --block-sz"),
    TR_INT("eval-clamp-len", TR_FREE | TR_KEPT, &opt.eval_clamp_len, -1, MAX_ROWS,
        "evaluation and generation: --clamp-len; -1: as in training"),
    TR_FLAG("eval-same-length", TR_FREE | TR_KEPT, &opt.eval_same_length, "... --same-length, if it is not already"),
    TR_LM_RUNNING(opt.lm),
    TR_LM_GENERATION(opt.lm),
    TR_LM_SAMPLING(opt.lm),
    TR_END
};

/* Without a preset: the demo's model and optimiser, then sized by the text (kind.sized
   below). */
#define BASE "pattern=xl batch-split=1 update-every=1 eval-mem=-1 eval-clamp-len=-1 pad-id=-1 " \
    "arch-every=5 derive-samples=8 tau-start=1 tau-end=0.1 arch-lr=0.01 arch-optim=adam latency-weight=1 "
#define DEMO BASE "tokens=bytes nlayers=6 hid-sz=128 nheads=4 inner-hid-sz=512 block-sz=64 mem=64 dropout=0 optim=adam lr=0.003 " \
    "schedule=cosine lr-warmup=60 grad-clip=1 batch-sz=16 "
/* The reference's base_model.sh, in the reference's own forms. Pieces are those of a
   SentencePiece model of 12,000. */
#define REFERENCE BASE "tokens=spm join-lines reading=records vocab=12000 data-unit=ppl nlayers=6 hid-sz=128 nheads=4 inner-hid-sz=512 " \
    "block-sz=32 mem=16 dropout=0.1 norm-eps=0.001 own-uv biases init=reference words-out=reference cutoffs=250,2500 proj-factor=4 " \
        "pad-id=0 " \
    "divide-all pattern=search arch=pi gate-eval=noise tau-form=factor arch-optim=same sines=reference pos-mode=reference full-scale " \
        "attn-relu optim=adam " \
    "eps=0.0000001 eps-hat lr=0.0001 schedule=reference lr-warmup=4000 batch-sz=32 epochs=20 log-every=100 "
/* Transformer-XL (1901.02860) as its authors ran it: batches of all GPUs together,
   dropout also on sines, inside the feed-forward and at the end, memory kept,
   evaluated with a longer memory in which far distances count as one. */
#define XL BASE "optim=adam lr=0.00025 schedule=xl-cosine grad-clip=0.25 log-every=200 eval-every=4000 save-every=4000 "
#define XL_DROP(p) "dropout=" p " inner-dropout=" p " pos-dropout=" p " final-dropout=" p " "
#define XL_EVAL(block, mem, clamp) "eval-block-sz=" block " eval-mem=" mem " eval-clamp-len=" clamp " eval-same-length "
#define XL_CHARS XL "tied vocab=205 data-unit=bpc steps=400000 "
#define XL_12 XL_CHARS XL_DROP("0.1") "nlayers=24 hid-sz=512 nheads=8 head-sz=64 inner-hid-sz=2048 block-sz=512 mem=512 " \
    "batch-sz=22 " XL_EVAL("80", "2100", "820")
#define XL_24 XL_CHARS XL_DROP("0.15") "attn-dropout=0.15 nlayers=48 hid-sz=1024 nheads=8 head-sz=128 inner-hid-sz=3072 " \
    "block-sz=768 mem=768 batch-sz=64 lr-warmup=4000 " XL_EVAL("128", "3800", "1000")
#define XL_WORDS XL "tokens=words vocab=267735 data-unit=ppl words-out=adaptive adaptive-in tied cutoffs=20000,40000,200000 "
/* where clusters are as wide as the model there are no projections, and nothing of
   them to tie */
#define XL_WT103 XL_WORDS XL_DROP("0.1") "nlayers=32 hid-sz=410 nheads=10 head-sz=41 inner-hid-sz=2100 block-sz=150 mem=150 " \
    "batch-sz=60 steps=200000 " XL_EVAL("64", "640", "400")
#define XL_LARGE(eval) "div-val=4 tie-projs=but-first attn-dropout=0.2 nlayers=36 hid-sz=1024 nheads=16 head-sz=64 inner-hid-sz=4096 " \
    "block-sz=384 mem=384 batch-sz=128 lr-warmup=16000 " eval
#define XL_WT103_LARGE XL_WORDS XL_DROP("0.2") XL_LARGE(XL_EVAL("128", "1600", "1000")) "steps=4000000 "
/* NVIDIA's training of it: LAMB, streams that are turned in each epoch. */
#define NVIDIA XL_WORDS "cutoffs=19997,39997,199997 reading=roll optim=lamb lr=0.01 schedule=cosine "
#define NVIDIA_BASE NVIDIA XL_DROP("0.1") "nlayers=32 hid-sz=512 nheads=8 head-sz=64 inner-hid-sz=2048 block-sz=192 mem=192 " \
    "batch-sz=256 lr-min=0.001 lr-warmup=1000 steps=40000 " XL_EVAL("64", "640", "400")
#define NVIDIA_LARGE NVIDIA XL_DROP("0.2") XL_LARGE(XL_EVAL("128", "1600", "1000")) "init-std=0.005 lr-min=0.0001 steps=100000 "
static const tr_preset presets[] = {
    {"demo", "a small byte model that searches its blocks in a minute on two cores (make demo-par)",
        DEMO "pattern=search batch-sz=8 steps=500 latency=hinge latency-target=0.65 arch-from=250 arch-lr=0.03 tau-end=0.5 eval-every=250 "
            "save-every=250 eval-blocks=10 eval-batch-sz=16 log-every=25"},
    {"demo-found", "... and trains what it found (--pattern, --inherit) in the other minute",
        DEMO "steps=1000 eval-every=500 save-every=500 eval-blocks=10 log-every=50"},
    {"reference", "PAR's base_model.sh: a search of 6 blocks on WikiText-2 in pieces, in its own forms: published 39.4 ppl a piece, valid",
        REFERENCE},
    {"par-search", "the search of the paper on WikiText-103: 32 blocks, gates with an optimiser, steps and a fifth of the text of their "
        "own",
        NVIDIA_BASE "pattern=search batch-sz=128 weight-decay=0.0001 arch-weight-decay=0.0005 arch-from=10000 arch-share=0.2 tau-start=2 "
            "tau-end=0.4 noise=sequence latency=hinge latency-target=0.65"},
    {"par-base", "PAR by the rule the paper found, 6 of 32 blocks attend: published test 22.7 ppl; trained as nvidia-base",
        NVIDIA_BASE "pattern=par:5"},
    {"par-large", "the same at the size of nvidia-large, 7 of 36: published test 18.4 ppl", NVIDIA_LARGE "pattern=par:5"},
    {"par-enwik8", "24 blocks, 4 attend: published test 1.11 bpc", XL_12 "tokens=bytes-compact pattern=par:5"},
    {"par-text8", "24 blocks, 4 attend: published test 1.18 bpc", XL_12 "tokens=chars vocab=28 pattern=par:5"},
    {"enwik8", "Transformer-XL of 12 layers, 41M: published test 1.06 bpc", XL_12 "tokens=bytes-compact"},
    {"enwik8-large", "24 layers, 277M: published test 0.99 bpc", XL_24 "tokens=bytes-compact"},
    {"text8", "the same on text8: published test 1.08 bpc", XL_24 "tokens=chars vocab=28"},
    {"wt103-base", "16 layers, 151M: published test 24.0 ppl", XL_WT103},
    /* the paper says 257M; its script's sizes have 285M, and so has the model that was
       published */
    {"wt103-large", "18 layers, 285M: published test 18.3 ppl", XL_WT103_LARGE},
    {"lm1b-large", "24 layers, 0.8B: published test 21.8 ppl",
        XL_WORDS XL_DROP("0.05") "vocab=793471 tie-projs=none cutoffs=60000,100000,640000 div-val=4 nlayers=48 hid-sz=1280 nheads=16 "
            "head-sz=80 inner-hid-sz=8192 attn-dropout=0.05 block-sz=32 mem=32 batch-sz=512 lr-warmup=20000 steps=400000"},
    {"nvidia-base", "NVIDIA's base on WikiText-103: published 23.2 ppl", NVIDIA_BASE},
    {"nvidia-large", "NVIDIA's large: published 18.2 ppl", NVIDIA_LARGE},
    {"fairseq", "fairseq's example of truncated backpropagation: wt103-base, decayed to 0 by a cosine in 200,000 steps",
        XL_WT103 "schedule=cosine lr-min=0"},
    TR_PRESET_END
};

static tr_options options = {"train_par", "Trains Transformer-XL, and networks of attention and feed-forward blocks in an order that it "
    "searches (PAR), on text.", table, presets, TR_LM_DEFAULTS DEMO, TR_LM_AFTER, ""};


// >>run: everything that one run works with ---------------------------------------------------------------------------

enum { MAX_PARTS = 1 << 20, PATTERN = MAX_BLOCKS + 1 };

typedef struct run {
    tr_lm t; /* train.h's: context, data, optimiser, log, .. */
    stx_par_desc desc;
    stx_par *model;
    char pattern[PATTERN]; /* a letter a block; "" in a search */
    size_t blocks;
    /* the search: its gates' numbers stand in model->arch */
    stx_optim *arch; /* NULL for a fixed network */
    stx_par_anneal anneal;
    double tau, arch_lr;
    int turn, learn;  /* this step is the gates' own; the gates learn in it */
    stx_batches *own; /* --arch-share: their text, */
    void **own_state; /* ... and what is remembered of it by each part of the batch */
    size_t own_first; /* ... its first token */
} run;


// >>training

enum { NOTE_LOSS }; /* the mean loss of a step, nats per token */

/* One step: forward and backward of a segment, and where it is time updates. What
   changes from step to step comes from t.in, t.out, the temperature and the
   optimisers' rates, so that a GPU can repeat it without this function (stx_step_run). */
static void step(void *user) {
    run *r = (run *)user;
    stx_ctx *x = r->t.x;
    void **memory = r->turn ? r->own_state : r->t.state;
    size_t part, parts = opt.batch_split;
    double each = 1.0 / (double)parts;
    for (part = 0; part < parts; part++) {
        stx_par_state *m = (stx_par_state *)memory[part];
        stx_tensor *loss;
        stx_begin(x, STX_TRAIN);
        loss = stx_par_loss(r->model, r->t.in[part], r->t.out[part], m, m);
        stx_note(x, NOTE_LOSS, loss, each, part > 0);
        if (r->t.update && part + 1 == parts) stx_group_overlap(r->t.optim);
        stx_backward(x, stx_scale(x, stx_par_total(r->model, loss), each * r->t.share));
    }
    if (r->t.update) stx_optim_step(r->t.optim, r->t.lr);
    if (r->learn) stx_optim_step(r->arch, r->arch_lr);
    if (r->turn)
        stx_params_zero_grad(
            stx_par_params(r->model)); /* the weights' gradients of a step that is not theirs */
}

/* The rate of step n + 1, n = 0, 1, ..: the reference's schedule is the lower of a
   ramp from 0 and a cosine */
static double rate(const tr_lm *t, uint64_t n) {
    double W = (double)opt.lr_warmup, rest = (double)t->steps - W, k = (double)n - W, ramp, fall;
    if (opt.schedule != 4) return stx_schedule_lr(&t->schedule, n + 1);
    ramp = W > 0 ? opt.lr * (double)n / W : opt.lr;
    fall = k <= 0 ? opt.lr : rest > 0 ? 0.5 * opt.lr * (1 + cos(3.1415927 * k / rest)) : 0;
    return ramp < fall ? ramp : fall;
}

/* Whether the gates learn in the next step, and whether it is theirs alone. */
static void plan_step(run *r) {
    uint64_t n = r->t.step;
    int may = r->arch
              && (r->t.rehearsal
                  || (n >= opt.arch_from && (!opt.arch_until || n < opt.arch_until)));
    r->turn = may && r->own && (n + 1) % (r->t.rehearsal ? 2 : opt.arch_every) == 0;
    r->learn = may && (!r->own || r->turn);
}

/* Probabilities of each block, what they are expected to take, and curves. For a fixed
   network the list is empty, and the time is that of its blocks. */
static double expected(const run *r, const double *p) {
    double sum = 0;
    size_t l;
    for (l = 0; l < r->blocks; l++)
        sum += p                      ? p[3 * l] * r->desc.cost[0] + p[3 * l + 1] * r->desc.cost[1]
               : r->pattern[l] == 's' ? r->desc.cost[0]
               : r->pattern[l] == 'f' ? r->desc.cost[1]
                                      : 0;
    return sum;
}

static void log_search(run *r, double tau) {
    static const char *const branch[3] = {"attention", "feed-forward", "identity"};
    double *p = r->arch ? (double *)malloc(3 * r->blocks * sizeof *p) : NULL, time;
    char text[64];
    size_t i;
    tr_buf list;
    memset(&list, 0, sizeof list);
    if (p && !stx_par_probs(r->model, p)) {
        free(p);
        return;
    }
    tr_log_num(&r->t.log, "tau", r->arch ? tau : (double)NAN);
    time = r->desc.cost[0] > 0 ? expected(r, p) : (double)NAN;
    tr_log_num(&r->t.log, "latency", time);
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
    if (p) {
        tr_lm_point(&r->t, "search/tau", tau);
        if (time > 0) tr_lm_point(&r->t, "search/latency", time);
    }
    tr_buf_free(&list);
    free(p);
}

/* The temperature after t.step steps: that of the next one, of an evaluation and of a
   checkpoint now */
static void cool(run *r) {
    r->tau = stx_par_tau(&r->anneal, r->t.step);
    stx_par_set_tau(r->model, r->tau);
}

static void train(tr_lm *t) {
    run *r = (run *)t;
    double tau; /* of the step that is logged */
    if (r->arch) cool(r);
    while (tr_lm_more(t)) {
        void **weights = t->state;
        int fresh;
        uint64_t key;
        plan_step(r);
        fresh = r->turn ? stx_batches_next(r->own, t->tokens, t->targets) : tr_lm_next(t);
        if (fresh == STX_BATCH_END) break;
        if (r->turn) t->state = r->own_state;
        key = tr_lm_batch(t, fresh == STX_BATCH_FRESH);
        t->state = weights;
        if (r->turn) t->update = 0;

        t->lr = rate(t, t->step);
        stx_optim_rate(t->optim, t->lr);
        if (r->arch) {
            r->arch_lr = opt.arch_optim == ARCH_SAME ? t->lr : opt.arch_lr;
            stx_par_freeze(r->model, !r->learn);
            stx_optim_rate(r->arch, r->arch_lr);
        }
        tau = r->tau;
        tr_lm_step(t, stx_key_add(key, (uint64_t)(2 * r->turn + r->learn)), step, r);
        if (r->learn && !stx_optim_sync(r->arch) && r->turn && stx_ok(t->x)) {
            size_t k;
            for (k = 0; k < t->parts; k++) t->lm.state_reset(r->own_state[k]);
        }
        if (!tr_lm_stepped(t, stx_noted(t->x, NOTE_LOSS))) break;
        if (r->arch) cool(r);

        if (tr_lm_log_due(t)) {
            log_search(r, tau);
            tr_lm_logged(t);
        }
        if (!tr_lm_look_and_save(t)) break;
    }
}


// >>timing: what a block takes here, and races of whole networks

/* A context like the trainer's own, for models that are to be gone afterwards */
static stx_ctx *bench_context(const tr_lm *t) {
    stx_desc d = *stx_ctx_desc(t->x);
    stx_ctx *x = stx_create(&d);
    if (x && !stx_ok(x)) {
        stx_fail(t->x, stx_error_code(x), "%s", stx_error(x));
        stx_destroy(x);
        return NULL;
    }
    if (!x) stx_fail(t->x, STX_ERR_MEMORY, "no memory for a context");
    return x;
}

static int by_value(const void *a, const void *b) {
    double u = *(const double *)a, v = *(const double *)b;
    return u < v ? -1 : u > v;
}

static double median(double *v, size_t n) {
    qsort(v, n, sizeof *v, by_value);
    return n % 2 ? v[n / 2] : (v[n / 2 - 1] + v[n / 2]) / 2;
}

/* One block of each kind in turn, its memory full, until the medians are of enough
   rounds. Milliseconds into cost[0], cost[1]. */
static int measure(run *r, double cost[2]) {
    enum { ROUNDS = 41, WARM = 3 };

    static const char *const kind[3] = {"s", "f", "i"};
    tr_lm *t = &r->t;
    size_t B = (size_t)(opt.batch_sz / opt.batch_split), T = r->desc.segment, D = r->desc.dim, n, k,
           i;
    stx_ctx *x = bench_context(t);
    stx_par *m[3];
    stx_par_state *s[3];
    stx_real *h = (stx_real *)malloc(B * T * D * sizeof *h);
    double took[3][ROUNDS], began = tr_seconds(), now;
    int ok;
    if (!h) stx_fail(t->x, STX_ERR_MEMORY, "no memory to measure blocks");
    for (i = 0; h && i < B * T * D; i++)
        h[i] = (stx_real)((double)(i * 2654435761u % 1000) / 500 - 1);
    for (k = 0; k < 3; k++) {
        const stx_par_desc *o = &r->desc;
        stx_par_desc d;
        memset(&d, 0, sizeof d);
        d.dim = o->dim;
        d.heads = o->heads;
        d.head_dim = o->head_dim;
        d.inner = o->inner;
        d.segment = o->segment;
        d.mem = o->mem;
        d.positions = o->positions;
        d.sines = o->sines;
        d.pos_mode = o->pos_mode;
        d.clamp_len = o->clamp_len;
        d.same_length = o->same_length;
        d.full_scale = o->full_scale;
        d.attn_relu = o->attn_relu;
        d.biases = o->biases;
        d.own_uv = o->own_uv;
        d.pre_norm = o->pre_norm;
        d.norm_eps = o->norm_eps;
        d.recompute = opt.lm.recompute == TR_ALL;
        d.no_final_norm = o->no_final_norm;
        d.dropout = o->dropout;
        d.attn_dropout = o->attn_dropout;
        d.inner_dropout = o->inner_dropout;
        d.pos_dropout = o->pos_dropout;
        d.pattern = kind[k];
        m[k] = x ? stx_par_create(x, &d) : NULL;
        s[k] = m[k] ? stx_par_state_create(m[k], B) : NULL;
    }
    for (n = 0;
         x && h && stx_ok(x) && n < ROUNDS + WARM && (n < WARM + 5 || tr_seconds() - began < 3);
         n++)
        for (k = 0; k < 3; k++) {
            stx_tensor *y;
            now = tr_seconds();
            stx_begin(x, opt.latency_pass ? STX_EVAL : STX_TRAIN);
            y = stx_mean(x,
                         stx_par_segment(m[k], stx_variable(x, h, B, T, D, 0), NULL, s[k], s[k]));
            if (!opt.latency_pass) stx_backward(x, y);
            stx_item(x, y); /* waits */
            if (n >= WARM) took[k][n - WARM] = 1000 * (tr_seconds() - now);
        }
    ok = x && h && stx_ok(x);
    if (x && !stx_ok(x))
        stx_fail(t->x, stx_error_code(x), "--latency: blocks cannot be measured: %s", stx_error(x));
    for (k = 0; ok && k < 2; k++) {
        double idle[ROUNDS];
        memcpy(idle, took[2], sizeof idle);
        cost[k] = median(took[k], n - WARM) - median(idle, n - WARM);
        if (cost[k] < 1e-4) cost[k] = 1e-4; /* a clock that stood still */
    }
    for (k = 0; k < 3; k++) stx_par_state_free(s[k]);
    stx_destroy(x);
    free(h);
    return ok;
}

/* --race: training steps without updates, and evaluation, of two networks in turn on
   the text's first tokens. Tokens a second into speed[network][0, 1]. */
static int race(run *r, const char *const pattern[2], double speed[2][2]) {
    enum { ROUNDS = 15, WARM = 3 };

    tr_lm *t = &r->t;
    size_t B = (size_t)(opt.batch_sz / opt.batch_split), T = r->desc.segment, n, i;
    int32_t *ids = (int32_t *)malloc(B * T * sizeof *ids);
    stx_ctx *x = bench_context(t);
    stx_par *m[2] = {NULL, NULL};
    stx_par_state *s[2][2];
    double took[2][2][ROUNDS];
    int ok, k, mode;
    memset(s, 0, sizeof s);
    for (i = 0; ids && i < B * T; i++) ids[i] = (int32_t)(i * 40503u % r->desc.vocab);
    if (ids && t->text[0] && stx_corpus_size(t->text[0]) >= B * T)
        stx_corpus_read(t->text[0], 0, B * T, ids);
    if (!ids) stx_fail(t->x, STX_ERR_MEMORY, "no memory for a race");
    for (k = 0; x && ids && k < 2; k++) {
        stx_par_desc d = r->desc;
        d.latency = 0;
        d.latency_target = d.latency_power = 0;
        d.blocks = 0;
        d.pattern = pattern[k];
        m[k] = stx_par_create(x, &d);
        for (mode = 0; m[k] && mode < 2; mode++) s[k][mode] = stx_par_state_create(m[k], B);
    }
    for (n = 0; x && ids && stx_ok(x) && n < ROUNDS + WARM; n++)
        for (mode = 0; mode < 2; mode++)
            for (k = 0; k < 2; k++) {
                double now = tr_seconds();
                stx_ids *in;
                stx_tensor *loss;
                stx_begin(x, mode ? STX_EVAL : STX_TRAIN);
                in = stx_tokens(x, ids, B, T);
                loss = stx_par_loss(m[k], in, in, s[k][mode], s[k][mode]);
                if (!mode) {
                    stx_backward(x, stx_par_total(m[k], loss));
                    stx_params_zero_grad(stx_par_params(m[k]));
                }
                stx_item(x, loss);
                if (n >= WARM) took[k][mode][n - WARM] = tr_seconds() - now;
            }
    ok = x && ids && stx_ok(x);
    if (x && !stx_ok(x)) stx_fail(t->x, stx_error_code(x), "--race: %s", stx_error(x));
    for (k = 0; k < 2; k++)
        for (mode = 0; mode < 2; mode++) {
            if (ok) speed[k][mode] = (double)(B * T) / median(took[k][mode], ROUNDS);
            stx_par_state_free(s[k][mode]);
        }
    stx_destroy(x);
    free(ids);
    return ok;
}


// >>patterns

/* --pattern for L blocks, as letters; "" for a search. 0: t->err */
static int expand(tr_lm *t, const char *name, const char *text, size_t L, char out[PATTERN]) {
    size_t i;
    uint64_t p;
    out[0] = 0;
    if (text && !*text)
        return tr_fail(t->err, TR_ERR,
                       "--%s: it is empty; want letters s, f, i, or search, xl, par:5", name);
    if (!text || !strcmp(text, "search")) return 1;
    if (!strcmp(text, "xl")) {
        for (i = 0; i < L; i++) out[i] = "sf"[i % 2];
        out[L] = 0;
        return 1;
    }
    if (!strncmp(text, "par:", 4)) {
        if (tr_read_size(text + 4, &p) && p >= 1 && p <= L
            && stx_par_rule(out, PATTERN, L, (size_t)p))
            return 1;
        return tr_fail(
            t->err, TR_ERR,
            "--%s %.100s: want par: and the number of blocks for one attention, 2 or more and at most the "
            "%zu blocks of --nlayers",
            name, text, L);
    }
    if (stx_par_expand(out, PATTERN, text)) return 1;
    return tr_fail(t->err, TR_ERR,
                   "--%s %.200s: want letters s, f, i, or groups of them in "
                   "parentheses, each with how often it is repeated after it, at most %d blocks, "
                   "as (sff)4f3; or search, xl, par:5",
                   name, text, (int)MAX_BLOCKS);
}

static const char *short_form(const char *pattern, char out[PATTERN]) {
    return stx_par_format(out, PATTERN, pattern) ? out : pattern;
}

/* The n letters and numbers at p, which have no groups, in words */
static void run_in_words(tr_buf *out, const char *p, size_t n) {
    const char *end = p + n;
    const char *name;
    char word[64], *next;
    while (p < end) {
        char letter = *p;
        unsigned long blocks = 0;
        for (; p < end && *p == letter; p = next) {
            unsigned long times = strtoul(p + 1, &next, 10);
            blocks += next > p + 1 ? times : 1;
        }
        name = letter == 's' ? "attention" : "identity";
        if (letter == 'f') name = "feed-forward";
        snprintf(word, sizeof word, "%lu %s%s", blocks, name, p < end ? ", " : "");
        tr_buf_puts(out, word);
    }
}

/* A pattern in words, as "5 attention, 1 feed-forward" for s5f (Patterns in the manual
   of seqtx_par.h). To be freed; NULL: no memory */
static char *in_words(const char *pattern) {
    char text[PATTERN];
    const char *p = short_form(pattern, text);
    tr_buf out;
    memset(&out, 0, sizeof out);
    while (*p) {
        size_t n = strcspn(p, "(");
        if (n)
            run_in_words(&out, p, n);
        else {
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

/* "s5f: 5 attention, 1 feed-forward" */
static void print_pattern(FILE *out, const char *pattern) {
    char text[PATTERN], *words = in_words(pattern);
    fprintf(out, "%s%s%s", short_form(pattern, text), words ? ": " : "", words ? words : "");
    free(words);
}

/* ---- --derive: networks of a search, each for itself, which the gates make when they
   are certain */

typedef struct {
    char pattern[PATTERN];
    double nll, time;
} candidate; /* time: as a share of Transformer-XL's; 0: not known */

/* The gates choose this pattern, and the validation text is scored. NaN in error. */
static double score(run *r, const char *pattern) {
    size_t l,
        B = (size_t)(opt.lm.eval_batch_sz ? opt.lm.eval_batch_sz : opt.batch_sz / opt.batch_split),
        T = r->t.eval_block;
    tr_lm_scored scored;
    for (l = 0; l < r->blocks; l++) {
        stx_real a[3] = {0, 0, 0};
        a[pattern[l] == 's' ? 0 : pattern[l] == 'f' ? 1 : 2] = 20;
        stx_set(r->t.x, r->model->block[l].gate, a);
    }
    tr_lm_fit(r->t.text[1], &B, &T);
    return tr_lm_pass(&r->t, r->t.text[1], B, T, opt.lm.eval_blocks, &scored);
}

/* One line of what was found; a pattern that was scored before is not scored again. */
static int derive_one(run *r, FILE *out, const char *what, candidate *all, size_t *n) {
    candidate *c = &all[*n];
    char text[PATTERN], *words;
    size_t i, k;
    for (i = 0; i < *n; i++)
        if (!strcmp(all[i].pattern, c->pattern)) break;
    for (k = 0, c->time = 0; k < r->blocks; k++)
        c->time += c->pattern[k] == 's'   ? r->desc.cost[0]
                   : c->pattern[k] == 'f' ? r->desc.cost[1]
                                          : 0;
    if (c->time > 0) c->time /= (double)r->blocks / 2 * (r->desc.cost[0] + r->desc.cost[1]);
    if (i < *n)
        c->nll = all[i].nll;
    else {
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

/* The best: of those within --latency-target, where there is a target and they are; by
   validation loss. */
static size_t best_of(const candidate *c, size_t n) {
    size_t i, best = 0;
    for (i = 1; i < n; i++) {
        int in = !(opt.latency_target > 0) || c[i].time <= opt.latency_target,
            best_in = !(opt.latency_target > 0) || c[best].time <= opt.latency_target;
        if (in != best_in ? in : in ? c[i].nll < c[best].nll : c[i].time < c[best].time) best = i;
    }
    return best;
}

static void derive(run *r, FILE *out) {
    size_t S = (size_t)opt.derive_samples, n = 0, i, L = r->blocks, attend = 0, share;
    candidate *all = (candidate *)malloc((S + 2) * sizeof *all);
    stx_real *kept = (stx_real *)malloc(3 * L * sizeof *kept);
    int was = r->model->desc.gate_eval, ok = all && kept;
    char what[40];
    if (!ok) stx_fail(r->t.x, STX_ERR_MEMORY, "no memory for %zu patterns", S);
    for (i = 0; ok && i < L; i++) stx_get(r->t.x, r->model->block[i].gate, kept + 3 * i);
    r->model->desc.gate_eval = STX_PAR_EVAL_ARGMAX;
    ok = ok && stx_par_argmax(r->model, all[0].pattern, PATTERN);
    for (i = 0; ok && i < L; i++) attend += all[0].pattern[i] == 's';
    ok = ok && derive_one(r, out, "argmax", all, &n);
    share =
        attend
            ? L / attend
            : 5; /* as many attentions as the likeliest has; where it has none, the paper's share */
    if (ok && share > 1
        && share <= L) { /* the rule has at most an attention for every two blocks */
        snprintf(what, sizeof what, "par:%zu", share);
        ok = stx_par_rule(all[n].pattern, PATTERN, L, share) && derive_one(r, out, what, all, &n);
    }
    for (i = 0; ok && i < S; i++) {
        size_t l;
        for (l = 0; l < L; l++) stx_set(r->t.x, r->model->block[l].gate, kept + 3 * l);
        snprintf(what, sizeof what, "sample %zu", i + 1);
        ok = stx_par_sample(r->model, opt.lm.seed, i, all[n].pattern, PATTERN)
             && derive_one(r, out, what, all, &n);
    }
    for (i = 0; all && kept && i < L; i++) stx_set(r->t.x, r->model->block[i].gate, kept + 3 * i);
    r->model->desc.gate_eval = was;
    if (ok && n) {
        size_t best = best_of(all, n);
        fprintf(out, "best: ");
        print_pattern(out, all[best].pattern);
        fprintf(out, "\n");
        if (opt.latency_target > 0 && all[best].time > opt.latency_target)
            fprintf(out, "none of them is within --latency-target %g: this one is the fastest\n",
                    opt.latency_target);
    }
    free(all);
    free(kept);
}

/* ---- --picture: the log's probabilities as an SVG. build/plot draws them, too, and
   all else that is in a log */

static int picture(run *r) {
    size_t L = r->blocks, row = 1 + 3 * L, n = 0, room = 0, cap = 0;
    double *at = NULL;
    char *line = NULL, *list = (char *)malloc(32 * row + 2), word[40];
    FILE *in = fopen(opt.lm.log, "r");
    ssize_t len;
    tr_buf body;
    int ok = in && list;
    memset(&body, 0, sizeof body);
    while (ok && (len = getline(&line, &cap, in)) > 0) {
        double *now;
        if (tr_json_find(line, "event", word, sizeof word) != 1 || strcmp(word, "train") != 0)
            continue;
        if (tr_json_find(line, "pi", list, 32 * row + 2) != 1
            || tr_json_find(line, "step", word, sizeof word) != 1)
            continue;
        if (n == room) {
            double *more = (double *)realloc(at, (room = room ? 2 * room : 256) * row * sizeof *at);
            ok = more != NULL;
            if (!ok) break;
            at = more;
        }
        now = at + n * row;
        if (svg_read(word, now))
            n += svg_numbers(list, now + 1, 3 * L) == 3 * L
                 && (n == 0 || now[0] > now[-(ptrdiff_t)row]);
    }
    if (in) fclose(in);
    if (!ok)
        stx_fail(r->t.x, STX_ERR_IO, "--picture %s: %s", opt.picture, strerror(errno));
    else if (!n)
        tr_say(&r->t.term, "--picture: %s has no probabilities of %zu blocks", opt.lm.log, L);
    else {
        svg_axis steps = {0, 0, 0, 0, 0};
        double width = 900, height;
        steps.hi = at[(n - 1) * row] > 0 ? at[(n - 1) * row] : 1;
        height = svg_shares(&body, at, n, L, &steps, 10, 6, width - 20);
        ok = svg_save(opt.picture, "probabilities of each block", width, height + 12, &body,
                      r->t.err, TR_ERR);
        if (!ok) stx_fail(r->t.x, STX_ERR_IO, "--picture %s", r->t.err);
    }
    tr_buf_free(&body);
    free(at);
    free(line);
    free(list);
    return ok;
}

/* The validation text with the gates' two other ways of evaluation, beside the result
   of --gate-eval */
static void other_gates(run *r, FILE *out) {
    static const char *const way[3] = {"argmax", "soft", "noise"};
    tr_lm *t = &r->t;
    size_t B = (size_t)(opt.lm.eval_batch_sz ? opt.lm.eval_batch_sz
                                             : opt.batch_sz / opt.batch_split),
           T = t->eval_block;
    uint64_t blocks = t->training && tr_given(&options, "eval-blocks") ? opt.lm.eval_blocks : 0;
    double nll[3];
    tr_lm_scored scored[3];
    int k, was = r->model->desc.gate_eval, n = 0;
    tr_lm_fit(t->text[1], &B, &T);
    for (k = 0; k < 3; k++) {
        if (k == was) continue;
        r->model->desc.gate_eval = k;
        nll[k] = tr_lm_pass(t, t->text[1], B, T, blocks, &scored[k]);
        if (isnan(nll[k])) break;
    }
    r->model->desc.gate_eval = was;
    if (k < 3 || !stx_ok(t->x) || !tr_lm_begin(t)) return;
    fprintf(out, "valid with --gate-eval");
    tr_log_begin(&t->log, "gates");
    for (k = 0; k < 3; k++) {
        if (k == was) continue;
        fprintf(out, "%s %s: %s %.4f", n++ ? ", and" : "", way[k], tr_lm_unit(t),
                tr_lm_metric(t, 1, nll[k]));
        if (t->unit == TR_PPL) fprintf(out, " (mean of batches %.4f)", scored[k].batch_ppl);
        tr_log_num(&t->log, way[k], nll[k]);
    }
    fprintf(out, "\n");
    tr_log_int(&t->log, "step", t->step);
    tr_lm_note(t, t->log.err, tr_log_end(&t->log));
}

/* The blocks of the network, or the likeliest ones of a search, into the log */
static void log_order(run *r, const char *pattern) {
    char text[PATTERN], *words = in_words(pattern);
    if (!tr_lm_begin(&r->t)) {
        free(words);
        return;
    }
    tr_log_begin(&r->t.log, "architecture");
    tr_log_int(&r->t.log, "step", r->t.step);
    tr_log_str(&r->t.log, "pattern", short_form(pattern, text));
    tr_log_str(&r->t.log, "blocks", words);
    tr_lm_note(&r->t, r->t.log.err, tr_log_end(&r->t.log));
    free(words);
}

/* What is worth saying at the end */
static void learned(const tr_lm *t, FILE *out) {
    run *r = (run *)(uintptr_t)t;
    char own[PATTERN], other[PATTERN];
    const char *pattern = r->pattern;
    double *p = NULL;
    if (r->arch || !*pattern) {
        if (!stx_par_argmax(r->model, own, PATTERN)) return;
        pattern = own;
        p = (double *)malloc(3 * r->blocks * sizeof *p);
        if (p && !stx_par_probs(r->model, p)) return;
    }
    log_order(r, pattern);
    fprintf(out, "architecture: ");
    print_pattern(out, pattern);
    if (p && r->desc.cost[0] > 0)
        fprintf(out, "; expected time of the mixture %.0f %% of Transformer-XL's",
                100 * expected(r, p)
                    / ((double)r->blocks / 2 * (r->desc.cost[0] + r->desc.cost[1])));
    fprintf(out, "\n");
    free(p);
    if (!*r->pattern && t->text[1] && !opt.derive && !opt.lm.no_train) other_gates(r, out);
    if (opt.derive) derive(r, out);
    if (opt.race && *opt.race && stx_ok(t->x) && expand(&r->t, "race", opt.race, r->blocks, other)
        && *other) {
        const char *pair[2];
        double speed[2][2];
        char a[TR_TEXT_MAX], b[TR_TEXT_MAX], c[TR_TEXT_MAX], d[TR_TEXT_MAX];
        pair[0] = pattern;
        pair[1] = other;
        if (race(r, pair, speed)) {
            fprintf(out,
                    "race, tokens a second training and evaluating, medians in turn: %s and "
                    "%s against %s and %s of ",
                    tr_count(a, speed[0][0]), tr_count(b, speed[0][1]), tr_count(c, speed[1][0]),
                    tr_count(d, speed[1][1]));
            print_pattern(out, other);
            fprintf(out, "; %.2f and %.2f times as fast\n", speed[0][0] / speed[1][0],
                    speed[0][1] / speed[1][1]);
        }
    }
    if (opt.picture && *opt.picture && !*r->pattern && stx_ok(t->x)) picture(r);
}


// >>main

/* As stx_lm wants them; window is 1 for evaluation and generation with a memory of
   another kind than training's (see plan) */
static size_t eval_rows;

static void *state_create(void *m, size_t B, size_t window) {
    stx_par_state *s = window ? stx_par_state_create_sized((stx_par *)m, B, eval_rows)
                              : stx_par_state_create((stx_par *)m, B);
    if (s && window && opt.eval_clamp_len >= 0) s->clamp_len = (size_t)opt.eval_clamp_len;
    if (s && window && opt.eval_same_length) s->same_length = 1;
    return s;
}

static void *gen_create(void *m, size_t B, size_t window) {
    stx_par_gen *g = window ? stx_par_gen_create_sized((stx_par *)m, B, eval_rows)
                            : stx_par_gen_create((stx_par *)m, B);
    if (g && window && opt.eval_clamp_len >= 0) g->clamp_len = (size_t)opt.eval_clamp_len;
    if (g && window && opt.eval_same_length) g->same_length = 1;
    return g;
}

/* The gates, their optimiser, their text and its memory, beside what train.h saves */
static int save_more(tr_lm *t, stx_writer *w) {
    run *r = (run *)t;
    char prefix[64];
    size_t part;
    int ok = w ? stx_params_save(w, r->model->arch, "")
                     && (!r->arch || stx_optim_save_as(w, r->arch, "arch."))
               : !r->arch || tr_lm_save_optim(t, r->arch, "arch.");
    if (ok && w) {
        char tau[64];
        tr_number(tau, r->tau);
        ok = stx_writer_meta(w, "tau", tau);
    }
    if (ok && r->own) {
        stx_batches_state pos = stx_batches_get(r->own);
        ok = !w
             || (stx_writer_meta_u64(w, "arch.position", pos.p)
                 && stx_writer_meta_u64(w, "arch.wraps", pos.wraps)
                 && stx_writer_meta_u64(w, "arch.fresh", (uint64_t)pos.fresh));
        for (part = 0; ok && part < t->parts; part++) {
            snprintf(prefix, sizeof prefix, "arch.memory.%zu.", part);
            ok = tr_lm_save_state(t, w, r->own_state[part], prefix);
        }
    }
    return ok;
}

static int load_more(tr_lm *t, const stx_file *f) {
    run *r = (run *)t;
    stx_batches_state pos;
    uint64_t fresh;
    char prefix[64];
    size_t part;
    static const char *const cooling[4] = {"tau-start", "tau-end", "tau-form", "tau-steps"};
    const char *tau = stx_file_meta(f, "tau");
    int i, other = 0;
    if (!stx_params_load(r->model->arch, f, "")) return 0;
    if (t->opt->init_from) return 1;
    if (tau && (!tr_read_real(tau, &r->tau) || !(r->tau > 0))) {
        stx_fail(t->x, STX_ERR_FORMAT, "metadata \"tau\" is no temperature");
        return 0;
    }
    /* evaluation goes on at the temperature of the checkpoint, which of older ones is
       computed; or that of the options, where they are given */
    for (i = 0; i < 4; i++) other |= tr_given(&options, cooling[i]);
    if (!tau || other) {
        if (!stx_file_meta_u64(t->x, f, "step", &t->step)) return 0;
        cool(r);
    } else
        stx_par_set_tau(r->model, r->tau);
    if (!t->training) return 1;
    if (r->arch && !stx_optim_load_as(r->arch, f, "arch.")) return 0;
    if (!r->own) return 1;
    if (!stx_file_meta_u64(t->x, f, "arch.position", &pos.p)
        || !stx_file_meta_u64(t->x, f, "arch.wraps", &pos.wraps)
        || !stx_file_meta_u64(t->x, f, "arch.fresh", &fresh))
        return 0;
    pos.fresh = fresh != 0;
    if (!stx_batches_set(r->own, pos)) return 0;
    for (part = 0; part < t->parts; part++) {
        snprintf(prefix, sizeof prefix, "arch.memory.%zu.", part);
        if (!tr_lm_load_state(t, f, r->own_state[part], prefix)) return 0;
    }
    return 1;
}

static int why(tr_lm *t) {
    static const tr_word words[] = {
        /* fields */
        {"blocks", "nlayers"},
        {"dim", "hid-sz"},
        {"inner", "inner-hid-sz"},
        {"heads", "nheads"},
        {"head_dim", "head-sz"},
        {"segment", "block-sz"},
        {"emb", "emb-sz"},
        {"cutoff", "cutoffs"},
        {"pre_norm", "norm-before"},
        {"no_final_norm", "no-final-norm"},
        {"one_proj", "one-proj"},
        {"tie_words", "tied"},
        {"proj_std", "proj-init-std"},
        {"latency_w", "latency-of"},
        {"cost", "latency-table"},
        /* what is expected of them */
        {"latency = STX_PAR_LATENCY_FBNET", "--latency fbnet"},
        {"latency = STX_PAR_LATENCY_HINGE", "--latency hinge"},
        {"noise = STX_PAR_NOISE_TOKENS", "--noise tokens"},
        {"pos_mode = STX_PAR_POS_DIST", "--pos-mode dist"},
        {"positions = STX_PAR_SINES", "--positions sines"},
        {"sines = STX_PAR_SINES_BLOCK", "--sines block"},
        {"sines = STX_PAR_SINES_REF", "--sines reference"},
        {"words_out = STX_PAR_OUT_REF", "--words-out reference"},
        {"STX_PAR_PI", "--arch pi"},
        {"an id below vocab with pads, else 0", "an id of the vocabulary, or -1"},
        {"adaptive_in with div_val = 1 and emb other than dim",
         "--adaptive-in with --div-val 1 and --emb-sz other than --hid-sz"},
        {"divisor of dim", "divisor of --hid-sz"},
        {"dim unless the input", "--hid-sz unless the input"},
        {"or a head_dim", "or a --head-sz"},
        {"mem is 2 or more", "--mem is 2 or more"},
        {"pre_norm = 1", "--norm-before"},
        {NULL, NULL}};
    return tr_lm_why_in(t, "stx_par_create: ", words);
}

/* "3,5,8" of an option into out; 0: t->err */
static int list(tr_lm *t, const char *name, const char *text, size_t *out, size_t room, size_t *n) {
    size_t i;
    int ok = 1;
    *n = 0;
    if (!text || !*text) return 1;
    ok = tr_read_sizes(text, out, room, n);
    for (i = 0; i < *n; i++) ok = ok && out[i];
    return ok ? 1
              : tr_fail(
                  t->err, TR_ERR,
                  "--%s %.200s: want up to %zu numbers with commas between, as 20000,40000,200000",
                  name, text, room);
}

static int latency_table(tr_lm *t, double cost[2]) {
    char word[2][32];
    const char *text = opt.latency_table;
    size_t n;
    cost[0] = cost[1] = 0;
    if (!text || !*text) return 1;
    n = strcspn(text, ",");
    if (n < sizeof word[0] && text[n] && strlen(text + n + 1) < sizeof word[1]) {
        memcpy(word[0], text, n);
        word[0][n] = 0;
        strcpy(word[1], text + n + 1);
        if (tr_read_real(word[0], &cost[0]) && tr_read_real(word[1], &cost[1]) && cost[0] > 0
            && cost[1] > 0)
            return 1;
    }
    return tr_fail(
        t->err, TR_ERR,
        "--latency-table %.100s: want two times above 0, of an attention and of a feed-forward, as 1.25,0.8",
        text);
}

/* The model that the options describe, for a vocabulary. */
static int describe(run *r, size_t vocab) {
    static const int out[] = {STX_PAR_OUT_PLAIN, STX_PAR_OUT_ADAPTIVE, STX_PAR_OUT_REF};
    stx_par_desc *d = &r->desc;
    size_t n;
    memset(d, 0, sizeof *d);
    if (!expand(&r->t, "pattern", opt.pattern, (size_t)opt.nlayers, r->pattern)) return 0;
    r->blocks = *r->pattern ? strlen(r->pattern) : (size_t)opt.nlayers;
    d->vocab = vocab;
    d->dim = opt.hid_sz;
    d->heads = opt.nheads;
    d->head_dim = opt.head_sz;
    d->inner = opt.inner_hid_sz;
    d->blocks = r->blocks;
    d->pattern = *r->pattern ? r->pattern : NULL;
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
    d->norm_eps = opt.norm_eps;
    d->dropout = opt.dropout;
    d->no_final_norm = opt.no_final_norm;
    d->one_proj = opt.one_proj;
    d->attn_dropout = opt.attn_dropout;
    d->inner_dropout = opt.inner_dropout;
    d->pos_dropout = opt.pos_dropout;
    d->final_dropout = opt.final_dropout;
    d->init = opt.init;
    d->init_std = opt.init_std;
    d->proj_std = opt.proj_init_std;
    d->adaptive_in = opt.adaptive_in;
    d->words_out = opt.tied && !opt.words_out ? STX_PAR_OUT_TIED : out[opt.words_out];
    d->emb_scale = opt.emb_scale;
    d->emb = opt.emb_sz;
    d->div_val = opt.div_val;
    d->proj_factor = opt.proj_factor;
    d->tie_words = opt.tied && opt.words_out;
    d->tie_projs = opt.tie_projs;
    d->pads = opt.pad_id >= 0;
    d->pad_id = opt.pad_id >= 0 ? opt.pad_id : 0;
    d->divide_all = opt.divide_all;
    if (!list(&r->t, "cutoffs", opt.cutoffs, d->cutoff, STX_MAX_CLUSTERS - 1, &d->cutoffs))
        return 0;
    if (!list(&r->t, "proj-dims", opt.proj_dims, d->proj_dims, STX_MAX_CLUSTERS - 1, &n)) return 0;
    if (n && n != d->cutoffs)
        return tr_fail(r->t.err, TR_ERR,
                       "--proj-dims %.200s: want %zu numbers, one for each tail (--cutoffs)",
                       opt.proj_dims, d->cutoffs);
    if (*r->pattern) return latency_table(&r->t, d->cost);
    d->arch = opt.arch;
    d->gate = opt.straight_through;
    d->noise = opt.noise;
    d->noise_tokens = opt.noise_tokens;
    d->tau = opt.tau_start;
    d->latency = opt.latency;
    d->latency_w = opt.latency_of;
    d->latency_weight = opt.latency_weight;
    d->latency_power = opt.latency_power;
    d->gate_eval = r->t.rehearsal ? STX_PAR_EVAL_SOFT
                                  : opt.gate_eval; /* what takes most memory (other_gates) */
    if (!latency_table(&r->t, d->cost)) return 0;
    if (!(d->cost[0] > 0) && d->latency) d->cost[0] = d->cost[1] = 1; /* until they are measured */
    if (opt.latency == STX_PAR_LATENCY_HINGE)
        d->latency_target = opt.latency_target * (double)r->blocks / 2 * (d->cost[0] + d->cost[1]);
    return 1;
}

static size_t count(tr_lm *t, size_t vocab) {
    run *r = (run *)t;
    size_t n;
    if (!describe(r, vocab)) return 0;
    n = stx_par_count(&r->desc);
    if (!n) {
        stx_par_create(t->x, &r->desc);
        why(t);
    } /* which says why not */
    return n;
}

static void shape(const tr_lm *t, char *line, size_t room, double *states) {
    const run *r = (const run *)t;
    char text[PATTERN], *words = in_words(r->pattern);
    size_t l, n = 0;
    for (l = 0; l < r->blocks; l++) n += !*r->pattern || r->pattern[l] == 's';
    if (*r->pattern)
        snprintf(line, room,
                 "%zu blocks %.60s: %.600s; %zu of them attention of %llu heads, "
                 "segment %llu, memory %llu",
                 r->blocks, short_form(r->pattern, text), words ? words : "", n,
                 (unsigned long long)opt.nheads, (unsigned long long)opt.block_sz,
                 (unsigned long long)opt.mem);
    else
        snprintf(
            line, room,
            "a search of %zu blocks, %zu numbers in their gates, %llu heads, segment %llu, memory %llu",
            r->blocks, 3 * r->blocks, (unsigned long long)opt.nheads,
            (unsigned long long)opt.block_sz, (unsigned long long)opt.mem);
    *states = (double)opt.batch_sz * (double)opt.hid_sz * (double)n * (double)opt.mem;
    free(words);
}

/* --latency without a table: measured, and from then on an option, which the
   checkpoint holds */
static int fill_table(run *r) {
    tr_lm *t = &r->t;
    stx_par_desc d;
    char word[96], a[32], b[32];
    double cost[2], unit = opt.latency == STX_PAR_LATENCY_FBNET ? 1000 : 1;
    if (*r->pattern || !opt.latency || !r->t.training || (opt.latency_table && *opt.latency_table))
        return 1;
    if (!stx_par_resolve(t->x, &r->desc, &d)) return why(t);
    if (!measure(r, cost) || !stx_group_broadcast(r->t.x, cost, 2 * sizeof *cost, 0))
        return 0; /* all ranks: what rank 0 measured */
    snprintf(a, sizeof a, "%.4g", cost[0] * unit);
    snprintf(b, sizeof b, "%.4g", cost[1] * unit);
    snprintf(word, sizeof word, "latency-table=%s,%s", a, b);
    return tr_apply(&options, word, TR_FROM_ARGS, r->t.err, TR_ERR) && describe(r, r->desc.vocab);
}

/* What weights mean without having another shape: a network that inherits them must
   have the same */
static int same_network(tr_lm *t, const stx_file *f) {
    static const char *const meaning[] = {"nheads",   "norm-before", "no-final-norm",
                                          "norm-eps", "emb-scale",   "sines",
                                          "pos-mode", "full-scale",  "attn-relu"};
    const char *config = stx_file_meta(f, "config");
    char theirs[64], ours[64];
    size_t i;
    for (i = 0; config && i < sizeof meaning / sizeof *meaning; i++) {
        tr_value(tr_find_option(&options, meaning[i], strlen(meaning[i])), ours);
        if (tr_json_find(config, meaning[i], theirs, sizeof theirs) == 1 && strcmp(theirs, ours))
            return tr_fail(
                t->err, TR_ERR,
                "--inherit %.300s: its weights were made with --%s %s, here it is %s: give the same",
                opt.inherit, meaning[i], theirs, ours);
    }
    return 1;
}

/* --inherit: the weights of another run's checkpoint, whose vocabulary must be this
   one's */
static int inherit(run *r) {
    tr_lm *t = &r->t;
    struct stat st;
    stx_file *f;
    const stx_entry *e;
    size_t len = stx_vocab_save(t->vocab, NULL, 0);
    void *blob;
    int ok;
    if (t->rehearsal || !opt.inherit || !*opt.inherit
        || (opt.lm.checkpoint && stat(opt.lm.checkpoint, &st) == 0))
        return 1;
    f = stx_file_open(t->x, opt.inherit);
    if (!f) return tr_fail(t->err, TR_ERR, "--inherit: %s", stx_error(t->x));
    e = stx_file_find(f, "vocab");
    blob = malloc(len + 1);
    ok = e && blob && stx_vocab_save(t->vocab, blob, len) == len && e->bytes == len
         && !memcmp(e->data, blob, len);
    if (!ok)
        tr_fail(
            t->err, TR_ERR,
            "--inherit %.300s: its vocabulary is not that of this run: give the same --data and --tokens",
            opt.inherit);
    else if (!same_network(t, f))
        ok = 0;
    else if (!stx_file_verify(f) || !stx_params_load(r->model->params, f, "")) {
        ok = tr_fail(t->err, TR_ERR, "--inherit %.300s: %s", opt.inherit, stx_error(t->x));
    }
    free(blob);
    stx_file_close(f);
    return ok;
}

/* The gates' optimiser, and with --arch-share their text */
static int make_search(run *r, const stx_optim_desc *weights) {
    static const int kinds[] = {0, STX_ADAM, STX_ADAMW, STX_SGD};
    tr_lm *t = &r->t;
    stx_optim_desc od;
    size_t k;
    memset(&od, 0, sizeof od);
    if (opt.arch_optim == ARCH_SAME)
        od = *weights;
    else {
        od.kind = kinds[opt.arch_optim];
        od.weight_decay = opt.arch_weight_decay;
    }
    r->arch = stx_optim_create(r->model->arch, &od);
    if (r->own_first) {
        stx_batches_desc d;
        memset(&d, 0, sizeof d);
        d.B = opt.batch_sz;
        d.T = opt.block_sz;
        d.seed = opt.lm.seed;
        d.how = opt.lm.reading;
        d.first = r->own_first;
        r->own = stx_batches_create(t->x, t->text[0], &d);
        if (!r->own && stx_error_code(t->x) != STX_ERR_MEMORY)
            return tr_fail(t->err, TR_ERR, "--arch-share %g: %s", opt.arch_share, stx_error(t->x));
        r->own_state = (void **)stx_block(t->x, t->parts * sizeof *r->own_state);
        for (k = 0; r->own_state && k < t->parts; k++)
            r->own_state[k] = t->lm.state_create(t->lm.model, t->in[0]->B, 0);
    }
    return stx_ok(t->x) ? 1 : tr_lm_why(t);
}

static int eval_fits(run *r) {
    double B = (double)(opt.lm.eval_batch_sz ? opt.lm.eval_batch_sz
                                             : opt.batch_sz / opt.batch_split),
           n = 0, need;
    double limit = (double)stx_ctx_desc(r->t.x)->max_bytes;
    size_t l;
    for (l = 0; l < r->blocks; l++) n += !*r->pattern || r->pattern[l] == 's';
    need = B * n * (double)opt.hid_sz * (double)opt.eval_mem * sizeof(stx_real);
    return !(limit > 0 && need > limit)
               ? 1
               : tr_fail(r->t.err, TR_ERR,
                         "--eval-mem %d: memories of so many rows take %.3g GiB "
                         "of the %.3g GiB of --max-memory: use fewer, or a smaller --eval-batch-sz",
                         (int)opt.eval_mem, need / (1 << 30), limit / (1 << 30));
}

static int make(tr_lm *t) {
    static const int kinds[] = {STX_ADAM, STX_ADAMW, STX_LAMB, STX_SGD, STX_ADAGRAD};
    run *r = (run *)t;
    stx_optim_desc od;
    if (!describe(r, stx_vocab_size(t->vocab)) || !tr_lm_fits(t, (double)stx_par_count(&r->desc)))
        return 0;
    if (!fill_table(r)) return *t->err || stx_ok(t->x) ? 0 : tr_lm_why(t);
    if (r->desc.latency == STX_PAR_LATENCY_FBNET
        && !((double)r->blocks / 2 * (r->desc.cost[0] + r->desc.cost[1]) > 1))
        return tr_fail(
            t->err, TR_ERR,
            "--latency fbnet: half of the blocks attention, half feed-forward take a time of %g, and only "
            "times above 1 count: give --latency-table in a smaller unit",
            (double)r->blocks / 2 * (r->desc.cost[0] + r->desc.cost[1]));
    r->model = stx_par_create(t->x, &r->desc);
    if (!r->model) return why(t);
    t->lm = stx_par_lm(r->model);
    t->lm.state_create = state_create;
    t->lm.gen_create = gen_create;
    if (opt.eval_mem > 0 && !eval_fits(r)) return 0;
    if (r->model->arch) {
        t->save_more = save_more;
        t->load_more = load_more;
    }
    t->whole_pass = r->model->arch && opt.gate_eval == STX_PAR_EVAL_NOISE
                    && opt.noise != STX_PAR_NOISE_STEP;
    if (!t->training) return stx_ok(t->x) ? 1 : why(t);
    memset(&od, 0, sizeof od);
    od.kind = kinds[opt.optim];
    od.momentum = opt.momentum;
    od.weight_decay = opt.weight_decay;
    od.clip = opt.grad_clip;
    od.clip_value = opt.clip_value;
    od.eps = opt.eps;
    od.eps_hat = opt.eps_hat;
    if (od.kind == STX_LAMB) {
        od.trust_max = 10;
        od.no_correction = 1;
    } /* as NVIDIA's */
    return inherit(r) && tr_lm_make(t, &od, 1) && (!r->model->arch || make_search(r, &od));
}

/* Options that would change nothing are refused: who gives one expects something of it */
static int all_count(tr_lm *t) {
    const tr_only only[] = {
        {"cutoffs", opt.words_out > 0, "--words-out adaptive and reference"},
        {"tie-projs", opt.adaptive_in, "--adaptive-in"},
        {"emb-sz", opt.words_out == 1, "--words-out adaptive"},
        {"one-proj", opt.adaptive_in || !opt.one_proj, "--adaptive-in"},
        {"no-final-norm", opt.norm_before || !opt.no_final_norm, "--norm-before"},
        {"proj-dims", opt.words_out == 2, "--words-out reference"},
        {"proj-factor", opt.words_out == 2, "--words-out reference"},
        {"div-val", opt.words_out == 1, "--words-out adaptive"},
        {"divide-all", opt.pad_id >= 0 || !opt.divide_all, "a --pad-id"},
        {"init-std", !opt.init, "--init xl"},
        {"proj-init-std", !opt.init && (opt.words_out == 1 || opt.adaptive_in),
         "--init xl of adaptive words"},
        {"momentum", opt.optim == 3, "--optim sgd"},
        {"lr-min", opt.schedule == 1 || opt.schedule == 3, "--schedule cosine and xl-cosine"},
        {"lr-start", opt.schedule < 4 && opt.lr_warmup,
         "an --lr-warmup, and another --schedule than reference"},
        {"inherit", !opt.lm.no_train && !opt.lm.interactive, "training, not for --no-train"},
        {"arch-lr", opt.arch_optim > 0, "an --arch-optim of its own"},
        {"arch-weight-decay", opt.arch_optim > 0, "an --arch-optim of its own"},
        {"arch-every", opt.arch_share > 0, "an --arch-share"},
        {"latency-of", opt.latency > 0, "a --latency"},
        {"latency-weight", opt.latency > 0, "a --latency"},
        {"latency-target", opt.latency == STX_PAR_LATENCY_HINGE || opt.derive,
         "--latency hinge, and --derive"},
        {"latency-pass", !opt.latency_table && (opt.latency || opt.derive),
         "times that are measured (--latency, --derive), not for a table "
         "that is given or in the checkpoint"},
    };
    return tr_all_count(&options, only, sizeof only / sizeof *only, t->err, TR_ERR);
}

static int check(tr_lm *t) {
    run *r = (run *)t;
    const char *split = NULL;
    if (t->training && opt.lm.update_every > 1) split = "update-every";
    if (opt.batch_split > 1) split = "batch-split";
    if (!all_count(t) || !describe(r, 1)) return 0;
    if (opt.pad_id >= 0 && !opt.divide_all && split)
        return tr_fail(t->err, TR_ERR,
                       "--pad-id with --%s: an update would be of several means, "
                       "which would count the same however much padding is in each; give "
                       "--divide-all, or --%s 1",
                       split, split);
    if (!opt.head_sz && opt.hid_sz % opt.nheads)
        return tr_fail(
            t->err, TR_ERR,
            "--nheads %llu does not divide --hid-sz %llu: choose heads that do, or give --head-sz",
            (unsigned long long)opt.nheads, (unsigned long long)opt.hid_sz);
    if (opt.adaptive_in && opt.words_out != 1)
        return tr_fail(t->err, TR_ERR, "--adaptive-in is for --words-out adaptive");
    if (opt.eps_hat && opt.optim > 1)
        return tr_fail(t->err, TR_ERR, "--eps-hat is for --optim adam and adamw");
    if (opt.picture && !opt.lm.log)
        return tr_fail(t->err, TR_ERR, "--picture is drawn from the --log: give one");
    if (opt.picture
        && (!tr_lm_own_file(t, "picture", opt.picture)
            || !tr_can_write("picture", opt.picture, 1, t->err, TR_ERR)))
        return 0;
    if ((opt.same_length || opt.eval_same_length) && (opt.eval_mem == 0 || opt.eval_mem == 1))
        return tr_fail(
            t->err, TR_ERR,
            "--eval-mem %d: with --%ssame-length a query sees so many keys, itself among them: want 2 or more",
            opt.eval_mem, opt.same_length ? "" : "eval-");
    if (opt.eval_same_length && opt.eval_mem < 0 && opt.mem < 2)
        return tr_fail(t->err, TR_ERR, "--eval-same-length wants an --eval-mem of at least 2");
    if (opt.race) {
        char pattern[PATTERN];
        if (!expand(t, "race", opt.race, r->blocks, pattern)) return 0;
        if (!*pattern)
            return tr_fail(t->err, TR_ERR, "--race: want a pattern to race against, as xl");
    }
    if (opt.inherit && opt.lm.init_from)
        return tr_fail(
            t->err, TR_ERR,
            "--inherit and --init-from: one of them only. --init-from takes the blocks of its file, too; "
            "--inherit is for another --pattern");
    if (*r->pattern) {
        static const char *const search[] = {
            "arch",          "gate-eval",    "straight-through", "noise",
            "noise-tokens",  "tau-start",    "tau-end",          "tau-form",
            "tau-steps",     "arch-optim",   "arch-lr",          "arch-weight-decay",
            "arch-from",     "arch-until",   "arch-share",       "arch-every",
            "latency",       "latency-of",   "latency-weight",   "latency-target",
            "latency-power", "latency-pass", "derive-samples",   "picture"};
        size_t i;
        for (i = 0; i < sizeof search / sizeof *search; i++)
            if (tr_given(&options, search[i]))
                return tr_fail(t->err, TR_ERR, "--%s is for a search: the pattern %.80s is fixed",
                               search[i], opt.pattern);
        if (opt.derive)
            return tr_fail(t->err, TR_ERR,
                           "--derive is for a search: this model's pattern is fixed");
        return 1;
    }
    if (opt.derive && t->opt->no_train)
        return tr_fail(t->err, TR_ERR, "--derive evaluates: it does not go with --no-train");
    if (opt.gate_eval == STX_PAR_EVAL_NOISE
        && (tr_lm_by_token(t) || (t->training && opt.lm.sample_every)))
        return tr_fail(
            t->err, TR_ERR,
            "--%s with --gate-eval noise: gates with noise do not read token by token: give --gate-eval argmax "
            "or soft",
            tr_lm_by_token(t) ? tr_lm_by_token(t) : "sample-every");
    if (opt.inherit) return tr_fail(t->err, TR_ERR, "--inherit is for a fixed --pattern");
    if (opt.arch_until && opt.arch_until <= opt.arch_from)
        return tr_fail(
            t->err, TR_ERR,
            "--arch-until %llu: the gates would never learn, for they rest until --arch-from %llu",
            (unsigned long long)opt.arch_until, (unsigned long long)opt.arch_from);
    if (opt.latency == STX_PAR_LATENCY_HINGE && !(opt.latency_target > 0))
        return tr_fail(
            t->err, TR_ERR,
            "--latency hinge wants a --latency-target, a share of Transformer-XL's time, as 0.65");
    if (t->training && tr_lm_ranks(t) > 1 && opt.latency > STX_PAR_LATENCY_ADD && opt.latency_of
        && opt.noise != STX_PAR_NOISE_STEP)
        return tr_fail(
            t->err, TR_ERR,
            "--latency hinge and fbnet, --latency-of w and --noise sequence or tokens: each of several ranks would "
            "have a time of its own streams, and the loss would not be the mean of theirs; give --latency-of p or --noise step");
    if (opt.noise == STX_PAR_NOISE_TOKENS && !opt.noise_tokens)
        return tr_fail(t->err, TR_ERR, "--noise tokens wants --noise-tokens");
    if (t->training && opt.lm.update_every > 1)
        return tr_fail(
            t->err, TR_ERR,
            "--update-every is for a fixed --pattern: a search updates in every step (--batch-split saves "
            "memory)");
    if (opt.arch_share > 0 && opt.lm.random_segments)
        return tr_fail(
            t->err, TR_ERR,
            "--arch-share and --random-segments do not go together: the share is a part of the streams");
    return 1;
}

/* Blocks of the weights' text in an epoch */
static uint64_t epoch(const tr_lm *t) {
    stx_batches_desc d;
    memset(&d, 0, sizeof d);
    d.B = opt.batch_sz;
    d.T = opt.block_sz;
    d.how = opt.lm.reading;
    d.count = t->use;
    return stx_batches_epoch(t->text[0], &d);
}

static void plan(tr_lm *t) {
    static const int kinds[] = {STX_LR_CONSTANT, STX_LR_COSINE, STX_LR_INV_SQRT, STX_LR_COSINE,
                                STX_LR_CONSTANT};
    run *r = (run *)t;
    uint64_t blocks;
    t->use = 0;
    r->own_first = 0;
    if (!*r->pattern && opt.arch_share > 0 && t->text[0]) {
        size_t n = stx_corpus_size(t->text[0]), own = (size_t)(opt.arch_share * (double)n);
        if (own > 0 && own < n) t->use = r->own_first = n - own;
    }
    blocks = epoch(t);
    if (r->own_first)
        blocks = blocks * opt.arch_every
                 / (opt.arch_every - 1); /* and the steps of the gates between */
    t->steps = opt.lm.steps               ? opt.lm.steps
               : opt.epochs > 0 && blocks ? (uint64_t)(opt.epochs * (double)blocks + 0.5)
                                          : 1000;
    t->log_every = opt.lm.log_every ? opt.lm.log_every : 10;
    t->eval_every = opt.lm.eval_every ? opt.lm.eval_every : opt.epochs > 0 ? blocks : 0;
    t->save_every = opt.lm.save_every ? opt.lm.save_every : opt.epochs > 0 ? blocks : 0;
    t->eval_blocks = opt.lm.eval_blocks;
    t->eval_block = opt.eval_block_sz ? (size_t)opt.eval_block_sz : (size_t)opt.block_sz;
    t->eval_window = opt.eval_mem >= 0 || opt.eval_clamp_len >= 0 || opt.eval_same_length;
    t->more_figures = 1;
    t->blocks_see_more = !opt.same_length && !opt.eval_same_length;
    t->pad_id = opt.pad_id;
    t->mean_of_all = opt.pad_id >= 0 && opt.divide_all;
    eval_rows = opt.eval_mem >= 0 ? (size_t)opt.eval_mem : (size_t)opt.mem;
    t->no_evaluation = opt.derive; /* which scores its own */
    t->schedule.kind = kinds[opt.schedule];
    t->schedule.literal = opt.schedule == 3;
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

static const tr_lm_kind kind = {"seqtx.par.1",
                                "memory",
                                &opt.words_out,
                                NULL,
                                STX_ORDER_COUNT_EARLIER,
                                1,
                                {"nlayers=4 hid-sz=64 dropout=0.2", "dropout=0.1", ""},
                                check,
                                plan,
                                count,
                                shape,
                                make,
                                train,
                                learned,
                                sizeof(run)};

int main(int argc, char **argv) {
    static run r;
    return tr_lm_main(&r.t, &kind, &options, &opt.lm, &opt.derive, argc, argv);
}
