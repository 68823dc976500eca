#pragma once
#include "base.h"


// >>options: other names

/* For each option, the names under which users of nanoGPT, the authors' programs, the
   Hugging Face Trainer, llama.cpp and others look for it. A program accepts the names in
   `also` as names of its option. A name of one letter is written with one dash. The names
   in `like` mean something similar: they are not accepted, but the error suggests our
   option. If a name is in several rows, the first row whose option exists in the program
   applies. A program's own option precedes all names of this table. */
static const struct {
    const char *ours, *also, *like;
} tr_names[] TR_UNUSED = {
    {"attn-dropout", "dropatt", ""},
    {"batch-split", "batch-chunk", "gradient-accumulation-steps"},
    {"batch-sz", "batch-size", "b|per-device-train-batch-size"},
    {"block-sz", "block-size|seq-len|tgt-len",
        "bptt|c|context-length|context-size|ctx-size|max-seq-len|max-seq-length|n-ctx|seq-length"},
    {"checkpoint", "m|o|model|resume",
        "ckpt|ckpt-path|load|model-path|resume-from-checkpoint"},
    {"clip-value", "clipvalue", ""},
    {"cutoffs", "adapt-io-cutoffs", ""},
    {"data", "", "data-dir|data-path|dataset|file|f|input|train-data|train-file"},
    {"device", "", "cuda|n-gpu-layers|ngl"},
    {"div-val", "adapt-io-divval", ""},
    {"dropout", "dropout-rate", ""},
    {"emb-sz", "d-embed", ""},
    {"epochs", "", "max-epochs|n-epochs|num-epochs|num-train-epochs"},
    {"eval-batch-sz", "", "eval-batch-size|per-device-eval-batch-size"},
    {"eval-block-sz", "eval-tgt-len", ""},
    {"eval-blocks", "eval-iters", ""},
    {"eval-every", "eval-interval", "eval-steps"},
    {"eval-only", "", "do-eval|ppl"},
    {"generate", "n|max-new-tokens",
        "length|max-length|max-tokens|n-predict|num-tokens|sample"},
    {"grad-clip", "clip", "max-grad-norm"},
    {"head-sz", "d-head", ""},
    {"hid-sz", "d-model|n-embd", "embedding-dim|hidden-size"},
    {"init-from", "", "model-name-or-path"},
    {"inner-hid-sz", "d-ffn|d-inner", "d-ff|intermediate-size"},
    {"interactive", "i", "chat|cnv|conversation"},
    {"log-every", "log-interval", "logging-steps"},
    {"lr", "learning-rate|max-lr", ""},
    {"lr-min", "eta-min|min-lr", ""},
    {"lr-warmup", "warmup-iters|warmup-step|warmup-steps", "warmup"},
    {"mem", "mem-len", ""},
    {"momentum", "mom", ""},
    {"nheads", "n-head|num-heads", "heads|n-heads|num-attention-heads"},
    {"nlayers", "n-layer|num-layers", "depth|layers|n-layers|num-hidden-layers"},
    {"optim", "", "optimizer"},
    {"out", "o|out-dir", "output-dir"},
    {"pieces", "", "tokenizer|vocab-file"},
    {"precision", "", "bf16|dtype|fp16"},
    {"prompt", "p|start", "f"},
    {"recompute", "", "gradient-checkpointing"},
    {"repetition-penalty", "", "repeat-penalty"},
    {"repetition-window", "", "repeat-last-n"},
    {"sample-every", "", "samples|no-samples|sample-interval"},
    {"save-every", "", "save-interval|save-steps"},
    {"schedule", "", "decay-lr|lr-decay|lr-scheduler-type|scheduler"},
    {"seed", "s", ""},
    {"steps", "max-iters|max-step|max-steps",
        "iterations|num-steps|train-iters"},
    {"temperature", "temp", ""},
    {"tensorboard", "", "log-dir|logdir|logging-dir"},
    {"threads", "t", "num-threads"},
    {"update-every", "", "gradient-accumulation-steps"},
    {"vocab", "", "vocab-size"},
    {"weight-decay", "", "wd"},
    {"weights", "", "quantize"}
};

enum { TR_NAMES = sizeof tr_names / sizeof *tr_names };

/* Options of other programs that have no equivalent, and what the error says of them. */
static const struct {
    const char *names, *note;
} tr_notes[] TR_UNUSED = {
    {"always-save-checkpoint", "--save-every saves, --keep-best keeps the best model"},
    {"adam-beta1|adam-beta2|beta1|beta2|betas", "not an option here"},
    {"backend|ddp", "mpirun starts several processes"},
    {"compile", "not necessary"},
    {"lr-decay-iters", "the schedule ends with the run"},
    {"num-return-sequences|num-samples", "each --generate writes one text"},
    {"report-to|wandb|wandb-log|wandb-project|wandb-run-name",
        "--log and --tensorboard write logs"}
};

enum { TR_NOTES = sizeof tr_notes / sizeof *tr_notes };
