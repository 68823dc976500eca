/* par/presets.h - the defaults and the presets of train_par. */
#pragma once
#include "../train/options.h"


// >>presets

#define BASE \
    "pattern=xl batch-split=1 update-every=1 eval-mem=-1 eval-clamp-len=-1 pad-id=-1 " \
    "arch-every=5 derive-samples=8 tau-start=1 tau-end=0.1 arch-lr=0.01 arch-optim=adam " \
    "latency-weight=1 "

/* The defaults without --preset: the demo's model and optimiser. The settings in
   train_par.c replace them in part. */
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
