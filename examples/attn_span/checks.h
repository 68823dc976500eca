/* attn_span/checks.h - what train_attn_span does with its options before a run: check
   refuses options that cannot be combined, and plan sets the run's length, intervals and
   schedule. Uses opt (options.h) and what all trainers share (train/lm_model.h). */
#pragma once
#include "../train/base.h"
#include "../train/options.h"
#include "../train/options_parse.h"
#include "../train/lm.h"
#include "../train/lm_context.h"
#include "../train/lm_model.h"
#include "../train/lm_minutes.h"
#include "options.h"


// >>checks

/* Checks that the options are consistent before any text is read. */
TR_DEF int check(tr_lm *t) {
    size_t cutoff[STX_MAX_CLUSTERS - 1], cutoffs;
    const char *flag = opt.no_renorm ? "no-renorm" : "span-per-layer";
    const tr_only only[] = {
        {"adapt-span-loss", opt.adapt_span, "--adapt-span"},
        {"adapt-span-ramp", opt.adapt_span, "--adapt-span"},
        {"adapt-span-init", opt.adapt_span, "--adapt-span"},
        {"adapt-span-cache", opt.adapt_span, "--adapt-span"},
        {"adapt-io-tied", opt.adapt_io, "--adapt-io"},
        {"adapt-io-divval", opt.adapt_io, "--adapt-io"},
        {"adapt-io-cutoffs", opt.adapt_io, "--adapt-io"},
        {"momentum", tr_lm_has_momentum(optim_kinds[opt.lm.optim]), "--optim sgd and muon"},
        {"lr-min", schedule_kinds[opt.lm.schedule] == STX_LR_COSINE, "--schedule cosine"},
        {"niter", !tr_given(&options, "steps") || !opt.lm.steps, "runs without --steps"}
    };
    if (!tr_check_only(&options, only, sizeof only / sizeof *only, t->err, TR_ERR)) return 0;
    if ((opt.no_renorm || opt.span_per_layer) && !opt.adapt_span)
        return tr_fail(t->err, TR_ERR, "--%s requires --adapt-span: add it, or leave --%s out",
                       flag, flag);
    if (!tr_lm_divides(t, "nheads", "hid-sz")) return 0;
    if (schedule_kinds[opt.lm.schedule] == STX_LR_COSINE && opt.lm.lr_min > opt.lm.lr)
        return tr_fail(t->err, TR_ERR, "--lr-min: expected at most --lr %g, got %g", opt.lm.lr,
                       opt.lm.lr_min);
    return tr_lm_cutoffs(t, cutoff, &cutoffs);
}

/* Sets the length of the run, the steps at which it logs, evaluates and saves, and the
   learning-rate schedule. */
TR_DEF void plan(tr_lm *t) {
    const tr_opt *steps = tr_find_option(&options, "steps", sizeof "steps" - 1);
    const tr_opt *niter = tr_find_option(&options, "niter", sizeof "niter" - 1);

    /* --niter on the command line overrides --steps from the checkpoint; --niter in a
       preset does not */
    if (steps->from == TR_FROM_CHECKPOINT && niter->from == TR_FROM_ARGS) opt.lm.steps = 0;

    tr_lm_plan(t, opt.niter * opt.nbatches, schedule_kinds[opt.lm.schedule]);
    if (!t->eval_every && !tr_lm_timed(t)) t->eval_every = opt.nbatches;
    if (!t->save_every && !tr_lm_timed(t)) t->save_every = opt.nbatches;
    if (!t->eval_blocks) t->eval_blocks = opt.nbatches < 10 ? 1 : opt.nbatches / 10;
    t->eval_literal = opt.full_eval;
}
