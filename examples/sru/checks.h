/* sru/checks.h - what train_sru does with its options before a run: check refuses
   options that cannot be combined, and plan sets the run's length, intervals and
   schedule. Uses opt (options.h) and what all trainers share (train/lm_model.h). */
#pragma once
#include "../train/base.h"
#include "../train/options.h"
#include "../train/options_set.h"
#include "../train/options_parse.h"
#include "../train/lm.h"
#include "../train/lm_results.h"
#include "../train/lm_context.h"
#include "../train/lm_model.h"
#include "options.h"


// >>checks

/* Checks the attention options. If --attention-last was not given, its default is
   adjusted first: it becomes 0 if --attention-every is set, and at most --nlayers
   otherwise. */
TR_DEF int check_attention(tr_lm *t) {
    if (!tr_lm_decided(t, "attention-last")) {
        if (opt.attention_every) opt.attention_last = 0;
        if (opt.attention_last > opt.nlayers) opt.attention_last = opt.nlayers;
    }
    if (opt.cell != CELL_SRUPP || !opt.attention) return 1;
    if (opt.attention_every > opt.nlayers || opt.attention_last > opt.nlayers)
        return tr_fail(t->err, TR_ERR,
                       "--attention-%s: expected at most --nlayers %llu (--no-attention for "
                       "none), got %llu", opt.attention_every ? "every" : "last",
                       (unsigned long long)opt.nlayers,
                       (unsigned long long)(opt.attention_every ? opt.attention_every
                                                                : opt.attention_last));
    if (!tr_lm_divides(t, "nheads", "proj-sz")) return 0;
    if (tr_lm_by_token(t) && opt.literal && opt.norm == STX_SRU_NORM_BEFORE
        && !(tr_set_removed(opt.literal) & STX_SRU_LITERAL_NORM))
        return tr_fail(t->err, TR_ERR,
                       "--%s and --literal norm cannot be combined: keys would depend on where "
                       "blocks begin; omit --%s", tr_lm_by_token(t), tr_lm_by_token(t));
    return 1;
}

/* An option of the attention on the command line selects --attention, which the settings
   for short runs switch off. It takes precedence over them as if it came from a
   checkpoint. */
TR_DEF int imply_attention(tr_lm *t) {
    static const char *const name[] = {
        "nheads", "attention-every", "attention-last", "attn-dropout", "alpha-init"
    };
    size_t i;
    if (tr_lm_decided(t, "attention")) return 1;
    for (i = 0; i < sizeof name / sizeof *name; i++)
        if (tr_given(&options, name[i]))
            return tr_apply(&options, "attention", TR_FROM_CHECKPOINT, t->err, TR_ERR);
    return 1;
}

/* Checks that the options are consistent before any text is read. */
TR_DEF int check(tr_lm *t) {
    const int srupp = opt.cell == CELL_SRUPP, attends = srupp && opt.attention;
    const int optim = optim_kinds[opt.lm.optim], schedule = schedule_kinds[opt.lm.schedule];
    const int recursive = schedule == STX_LR_RECURSIVE, decays = opt.lr_decay < 1;
    const int other_width = opt.emb_sz && opt.emb_sz != opt.hid_sz;
    const tr_only only[] = {
        {"init-xavier", !srupp, "--cell sru"},
        {"attention", srupp, "--cell sru++"},
        {"attention-every", attends, "the attention of --cell sru++"},
        {"attention-last", attends, "the attention of --cell sru++"},
        {"attn-dropout", attends, "the attention of --cell sru++"},
        {"attn-norm", srupp, "--cell sru++"},
        {"attn-norm-first", srupp && opt.attn_norm, "--attn-norm with --cell sru++"},
        {"alpha-init", attends, "the attention of --cell sru++"},
        {"highway-bias", opt.skip, "--skip"},
        {"rescale", opt.skip, "--skip"},
        {"v-init", !opt.v1, "gates that depend on the state (without --v1)"},
        {"input-first", other_width && !opt.adapt_io,
            "--emb-sz other than --hid-sz, without --adapt-io"},
        {"adapt-io-separate", opt.adapt_io, "--adapt-io"},
        {"adapt-io-divval", opt.adapt_io, "--adapt-io"},
        {"adapt-io-cutoffs", opt.adapt_io, "--adapt-io"},
        {"emb-dropout", opt.adapt_io, "--adapt-io"},
        {"radam-skip", optim == STX_RADAM, "--optim radam"},
        {"momentum", tr_lm_has_momentum(optim), "--optim sgd and muon"},
        {"lr-first-zero", recursive, "--schedule recursive"},
        {"lr-min", recursive || schedule == STX_LR_COSINE, "--schedule cosine and recursive"},
        {"lr-decay-from", decays, "--lr-decay below 1"},
        {"lr-decay-every", decays, "--lr-decay below 1"}
    };
    if (!imply_attention(t)) return 0;
    if (!tr_check_only(&options, only, sizeof only / sizeof *only, t->err, TR_ERR)) return 0;
    if (!check_attention(t)) return 0;
    if (opt.lm.streams && opt.update_param_freq > 1)
        return tr_fail(t->err, TR_ERR,
                       "--streams and --update-param-freq cannot be combined: an update reads "
                       "several blocks of the same streams");
    if (opt.attention_every && opt.attention_last)
        return tr_fail(t->err, TR_ERR, "--attention-every and --attention-last cannot be combined");
    if (opt.tied && opt.adapt_io)
        return tr_fail(t->err, TR_ERR,
                       "--tied and --adapt-io cannot be combined: --adapt-io always shares its "
                       "tables");
    if (opt.tied && other_width)
        return tr_fail(t->err, TR_ERR, "--emb-sz: expected --hid-sz %llu with --tied, got %llu",
                       (unsigned long long)opt.hid_sz, (unsigned long long)opt.emb_sz);
    if (schedule == STX_LR_NOAM && !opt.lm.lr_warmup)
        return tr_fail(t->err, TR_ERR, "--schedule noam requires --lr-warmup 1 or more");
    return 1;
}

/* Sets the length of the run, the steps at which it logs, evaluates and saves, and the
   learning-rate schedule. */
TR_DEF void plan(tr_lm *t) {
    stx_schedule *s = &t->schedule;
    tr_lm_plan(t, 1000, schedule_kinds[opt.lm.schedule]);

    /* with this window, attention looks back equally far from every token of the block */
    t->eval_block = t->eval_window = opt.eval_unroll ? opt.eval_unroll : opt.lm.block_sz;

    s->literal = s->kind == STX_LR_RECURSIVE && opt.lr_first_zero;
    s->dim = (double)opt.hid_sz;
    if (opt.lr_decay < 1) {
        s->decay = opt.lr_decay;
        s->decay_from = opt.lr_decay_from;
        s->decay_every = opt.lr_decay_every;
    }
}
