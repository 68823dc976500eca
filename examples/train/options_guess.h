#pragma once
#include "base.h"
#include "options.h"


// >>options: names that do not exist

/* Names that nanoGPT, the Hugging Face Trainer, llama.cpp and other programs use for our
   options. If a name is in several rows, the first row whose option exists in this
   program applies. */
static const struct {
    const char *ours, *theirs;
} tr_foreign[] TR_UNUSED = {
    {"batch-sz",           "b|batch-size|per-device-train-batch-size"},
    {"block-sz",           "block-size|bptt|c|context-length|context-size|ctx-size|max-seq-len|"
                           "max-seq-length|n-ctx|seq-len|seq-length|tgt-len"},
    {"checkpoint",         "ckpt|ckpt-path|load|m|model|model-path|resume|resume-from-checkpoint"},
    {"data",               "data-dir|data-path|dataset|file|input|train-data|train-file"},
    {"device",             "cuda|n-gpu-layers|ngl"},
    {"epochs",             "max-epochs|n-epochs|num-epochs|num-train-epochs"},
    {"eval-batch-sz",      "eval-batch-size|per-device-eval-batch-size"},
    {"eval-blocks",        "eval-iters"},
    {"eval-every",         "eval-interval|eval-steps"},
    {"eval-only",          "do-eval|ppl"},
    {"generate",           "length|max-length|max-new-tokens|max-tokens|n|n-predict|num-tokens|"
                           "sample"},
    {"grad-clip",          "clip|max-grad-norm"},
    {"hid-sz",             "d-model|embedding-dim|hidden-size|n-embd"},
    {"init-from",          "model-name-or-path"},
    {"inner-hid-sz",       "d-ff|d-inner|intermediate-size"},
    {"interactive",        "chat|cnv|conversation|i"},
    {"log-every",          "log-interval|logging-steps"},
    {"lr",                 "learning-rate"},
    {"lr-min",             "min-lr"},
    {"lr-warmup",          "warmup|warmup-iters|warmup-steps"},
    {"mem",                "mem-len"},
    {"nheads",             "heads|n-head|n-heads|num-attention-heads|num-heads"},
    {"nlayers",            "depth|layers|n-layer|n-layers|num-hidden-layers|num-layers"},
    {"optim",              "optimizer"},
    {"out",                "out-dir|output-dir"},
    {"pieces",             "tokenizer|vocab-file"},
    {"precision",          "bf16|dtype|fp16"},
    {"prompt",             "f|p"},
    {"recompute",          "gradient-checkpointing"},
    {"repetition-penalty", "repeat-penalty"},
    {"repetition-window",  "repeat-last-n"},
    {"save-every",         "save-interval|save-steps"},
    {"schedule",           "decay-lr|lr-decay|lr-scheduler-type|scheduler"},
    {"seed",               "s"},
    {"steps",              "epochs|iterations|max-epochs|max-iters|max-steps|n-epochs|num-epochs|"
                           "num-steps|num-train-epochs|train-iters"},
    {"temperature",        "temp"},
    {"tensorboard",        "log-dir|logdir|logging-dir"},
    {"threads",            "num-threads|t"},
    {"update-every",       "gradient-accumulation-steps"},
    {"batch-split",        "gradient-accumulation-steps"},
    {"vocab",              "vocab-size"},
    {"weight-decay",       "wd"},
    {"weights",            "quantize"}
};

/* Nonzero if exactly one of the names `got` and `name` is negated, that is, begins with
   "no-". If `name` is negated, a `got` that begins with "no" counts as negated, because
   it may be a misspelled "no-". */
TR_DEF int tr_is_opposite(const char *got, size_t n, const char *name) {
    if (tr_same(name, "no-", 3)) return !(n > 2 && tr_same(got, "no", 2));
    return n > 3 && tr_same(got, "no-", 3);
}

/* Returns the option that an unknown name probably means: the option that has this name
   in other programs, or else the shortest option that begins with the name, or else an
   option with nearly the same spelling, or else the longest option with which the name
   begins. Returns NULL if there is none. */
TR_DEF const char *tr_guess_option(const tr_options *o, const char *name, size_t n) {
    tr_nearest best = {NULL, 0, 0};
    const tr_opt *p;
    size_t i, len;
    for (i = 0; i < sizeof tr_foreign / sizeof *tr_foreign; i++) {
        if (tr_choice_index(tr_foreign[i].theirs, name, n) < 0) continue;
        p = tr_find_option(o, tr_foreign[i].ours, strlen(tr_foreign[i].ours));
        if (p != NULL) return p->name;
    }

    for (p = o->opt; n > 1 && p->type != TR_T_END; p++) {
        if (p->type == TR_T_GROUP) continue;
        len = strlen(p->name);
        if (len <= n || !tr_same(name, p->name, n) || (best.name && len >= best.len)) continue;
        best.name = p->name;
        best.len = len;
    }
    if (best.name != NULL) return best.name;

    tr_consider(&best, name, n, "help", 4);
    if (o->preset != NULL) tr_consider(&best, name, n, "preset", 6);
    for (p = o->opt; p->type != TR_T_END; p++)
        if (p->type != TR_T_GROUP && !tr_is_opposite(name, n, p->name))
            tr_consider(&best, name, n, p->name, strlen(p->name));
    if (best.name != NULL) return best.name;

    for (p = o->opt; p->type != TR_T_END; p++) {
        if (p->type == TR_T_GROUP) continue;
        len = strlen(p->name);
        if (len >= n || len <= best.len || tr_dash(name[len]) != '-') continue;
        if (!tr_same(name, p->name, len)) continue;
        best.name = p->name;
        best.len = len;
    }
    return best.name;
}

TR_DEF int tr_unknown_option(const tr_options *o, const char *name, size_t n, char *err,
                             size_t size) {
    tr_nearest best = {NULL, 0, 0};
    const char *meant = tr_guess_option(o, name, n), *no = "";
    const tr_opt *p;
    int len = (int)(n < 80 ? n : 80);
    if (meant == NULL && n > 3 && tr_same(name, "no-", 3)) {
        for (p = o->opt; p->type != TR_T_END; p++)
            if ((p->type == TR_T_FLAG || p->type == TR_T_SET) && !tr_same(p->name, "no-", 3))
                tr_consider(&best, name + 3, n - 3, p->name, strlen(p->name));
        meant = best.name;
        no = "no-";
    }
    if (meant == NULL)
        return tr_fail(err, size, "--%.*s: unknown option; --help lists all options", len, name);
    return tr_fail(err, size,
                   "--%.*s: unknown option (did you mean --%s%s?); --help lists all options", len,
                   name, no, meant);
}
