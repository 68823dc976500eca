/* par/checks.h - what train_par does with its options before a run: check refuses options
   that cannot be combined, and plan sets the run's length, intervals and schedules. */
#pragma once
#include "../train/base.h"
#include "../train/options.h"
#include "../train/options_parse.h"
#include "../train/files.h"
#include "../train/lm.h"
#include "../train/lm_errors.h"
#include "../train/lm_results.h"
#include "../train/lm_model.h"
#include "../train/lm_evaluate.h"
#include "../train/lm_program.h"
#include "../../seqtx_par.h"
#include "options.h"
#include "patterns.h"
#include "run.h"
#include "model.h"
#include "search.h"


// >>checks

/* Refuses options that would have no effect. */
TR_DEF int check_useful(tr_lm *t) {
    const int adaptive = opt.words_out == WORDS_ADAPTIVE, ref = opt.words_out == WORDS_REFERENCE;
    const int xl_init = !opt.init, ranges = opt.lm.schedule != LR_REFERENCE && opt.lm.lr_warmup;
    const int cosine = schedule_kinds[opt.lm.schedule] == STX_LR_COSINE;
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
        {"momentum", tr_lm_has_momentum(optim_kinds[opt.lm.optim]), "--optim sgd and muon"},
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

TR_DEF int check_model(tr_lm *t) {
    const int optim = optim_kinds[opt.lm.optim];
    const char *split = NULL;
    if (t->training && opt.lm.update_every > 1) split = "update-every";
    if (opt.lm.batch_split > 1) split = "batch-split";
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
                       "--nheads: expected a divisor of --hid-sz %" PRIu64 " (or set "
                       "--head-sz), got %" PRIu64, opt.hid_sz, opt.nheads);
    if (opt.adaptive_in && opt.words_out != WORDS_ADAPTIVE)
        return tr_fail(t->err, TR_ERR, "--adaptive-in requires --words-out adaptive");
    if (opt.eps_hat && optim != STX_ADAM && optim != STX_ADAMW)
        return tr_fail(t->err, TR_ERR, "--eps-hat requires --optim adam or adamw");
    return 1;
}

TR_DEF int check_evaluation(tr_lm *t) {
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
TR_DEF int check_patterns(tr_lm *t) {
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
TR_DEF int check_fixed(tr_lm *t) {
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

TR_DEF int check_search(tr_lm *t) {
    const char *by_token = tr_lm_by_token(t);
    const int samples = t->training && opt.lm.sample_every > 0;
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
                       "--arch-until: expected more than --arch-from %" PRIu64 ", got %" PRIu64
                       ": the gates would never learn", opt.arch_from, opt.arch_until);
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
    if (opt.arch_share > 0 && opt.lm.streams)
        return tr_fail(t->err, TR_ERR,
                       "--arch-share and --streams cannot be combined: the gates' text has only "
                       "--batch-sz streams");
    if (opt.arch_share > 0 && opt.lm.random_segments)
        return tr_fail(t->err, TR_ERR,
                       "--arch-share and --random-segments cannot be combined: --arch-share "
                       "reserves the end of the training text, and random segments are drawn from "
                       "all of it");
    return 1;
}

/* Checks that the options are consistent before any text is read. */
TR_DEF int check(tr_lm *t) {
    run *r = (run *)t;
    if (!check_useful(t) || !describe(r, 1)) return 0;
    if (!check_model(t) || !check_evaluation(t) || !check_patterns(t)) return 0;
    return *r->pattern ? check_fixed(t) : check_search(t);
}

/* Nonzero if the memories for --eval-mem fit into --max-memory. */
TR_DEF int eval_fits(run *r) {
    const double limit = (double)stx_ctx_desc(r->t.x)->max_bytes;
    double need = (double)tr_lm_eval_batch(&r->t) * (double)attentions(r) * (double)opt.hid_sz;
    need *= (double)opt.eval_mem * sizeof(stx_real);
    if (!(limit > 0 && need > limit)) return 1;
    return tr_fail(r->t.err, TR_ERR,
                   "--eval-mem %d: memories of that many rows require %.3g GiB, but --max-memory "
                   "allows %.3g GiB: use fewer rows, or a smaller --eval-batch-sz",
                   opt.eval_mem, need / (1 << 30), limit / (1 << 30));
}

TR_DEF void plan_evaluation(tr_lm *t) {
    if (opt.eval_block_sz) t->eval_block = (size_t)opt.eval_block_sz;
    t->eval_window = opt.eval_mem >= 0 || opt.eval_clamp_len >= 0 || opt.eval_same_length;
    t->more_figures = 1;
    t->blocks_see_more = !opt.same_length && !opt.eval_same_length;
    t->pad_id = opt.pad_id;
    t->mean_of_all = opt.pad_id >= 0 && opt.divide_all;
    t->no_samples = opt.gate_eval == STX_PAR_EVAL_NOISE;
    t->no_evaluation = opt.derive;      /* --derive evaluates networks itself */
}

/* Sets the length of the run, the steps at which it logs, evaluates and saves, and the
   schedules of the learning rate and the temperature. */
TR_DEF void plan(tr_lm *t) {
    run *r = (run *)t;
    plan_gate_text(r);
    if (r->gate_first) t->weight_steps = 1 - 1 / (double)opt.arch_every;
    tr_lm_plan(t, 1000, schedule_kinds[opt.lm.schedule]);
    t->schedule.literal = opt.lm.schedule == LR_XL_COSINE;
    plan_evaluation(t);

    r->anneal.form = opt.tau_form ? STX_PAR_TAU_FACTOR : STX_PAR_TAU_TARGET;
    r->anneal.from = opt.tau_start;
    r->anneal.to = opt.tau_end;
    r->anneal.total = opt.tau_steps ? opt.tau_steps : t->steps;
}
