#pragma once
#include "base.h"
#include "buffer.h"
#include "options.h"
#include "options_set.h"
#include "lm.h"
#include "lm_errors.h"
#include "lm_context.h"
#include "lm_model.h"


// >>lm: sizes without a preset

/* Suggests 16 times as many streams as a batch has, so that successive steps see
   different parts of the text, unless another option determines how the text is read. A
   GPU replays a step only if the next step continues the same streams. */
TR_DEF int tr_lm_suggest_streams(tr_lm *t) {
    static const char *const other[] = {"random-segments", "arch-share", "update-param-freq"};
    const uint64_t B = tr_lm_number(t, "batch-sz", 1), most = (uint64_t)1 << 30;
    size_t i;
    for (i = 0; i < sizeof other / sizeof *other; i++)
        if (tr_lm_decided(t, other[i])) return 1;
    if (t->opt->device == STX_CUDA || 16 * B > most) return 1;
    return tr_lm_suggest(t, "streams", 16 * B);
}

/* Makes the suggested number of streams per batch fit --batch-split, --streams and the
   number of ranks. */
TR_DEF int tr_lm_fit_batch(tr_lm *t) {
    const uint64_t parts = tr_lm_number(t, "batch-split", 1) * (uint64_t)tr_lm_ranks(t);
    uint64_t B = tr_lm_number(t, "batch-sz", 1);
    if (tr_lm_decided(t, "batch-sz")) return 1;
    if (tr_lm_decided(t, "streams") && t->opt->streams)
        while (t->opt->streams % B) B--;
    B = (B + parts - 1) / parts * parts;
    return tr_lm_suggest(t, "batch-sz", B);
}

/* Repeatedly halves the number of streams and the block length, unless they were given,
   until n tokens are enough for four blocks per stream. */
TR_DEF int tr_lm_shrink_batch(tr_lm *t, double n) {
    const int any_streams = t->opt->streams && !tr_lm_decided(t, "streams");
    const int any_B = !tr_lm_decided(t, "batch-sz") && !tr_lm_decided(t, "batch-split")
                      && !tr_lm_decided(t, "streams");
    const int any_T = !tr_lm_decided(t, "block-sz");
    const uint64_t ranks = (uint64_t)tr_lm_ranks(t);
    for (;;) {
        uint64_t B = tr_lm_number(t, "batch-sz", 1), T = tr_lm_number(t, "block-sz", 1);
        uint64_t streams = tr_lm_streams(t);
        int ok;
        if (n >= (double)streams * 4.0 * (double)(T + 1)) return 1;
        if (any_streams && streams > B) ok = tr_lm_suggest(t, "streams", streams / 2);
        else if (any_B && B > 4 && B / 2 % ranks == 0) ok = tr_lm_suggest(t, "batch-sz", B / 2);
        else if (any_T && T > 8) ok = tr_lm_suggest(t, "block-sz", T / 2);
        else if (any_B && B > 1 && B / 2 % ranks == 0) ok = tr_lm_suggest(t, "batch-sz", B / 2);
        else return 1;
        if (ok && any_streams && streams == B)
            ok = tr_lm_suggest(t, "streams", tr_lm_number(t, "batch-sz", 1));
        if (!ok) return 0;
    }
}

/* Lists in t->sized the options that were chosen for the text and the time. */
TR_DEF int tr_lm_report_sizes(tr_lm *t) {
    static const char *const report[] = {
        "nlayers", "hid-sz", "dropout", "attn-span", "attention", "optim", "lr",
        "batch-sz", "streams", "block-sz", "precision", "steps"
    };
    char value[64];
    size_t i;
    for (i = 0; i < sizeof report / sizeof *report; i++) {
        const tr_opt *p = tr_find_option(t->options, report[i], strlen(report[i]));
        if (!p || p->from > TR_FROM_TEXT) continue;
        if ((t->opt->minutes > 0 || t->opt->epochs > 0) && !strcmp(report[i], "steps")) continue;
        tr_value(p, value);
        if (p->type != TR_T_FLAG) tr_buf_printf(&t->sized, " --%s %s", report[i], value);
        else if (p->from == TR_FROM_TEXT)
            tr_buf_printf(&t->sized, " --%s%s", *(int *)p->to ? "" : "no-", report[i]);
    }
    return 1;
}

/* Returns the number of tokens that a run without --steps and --minutes reads. A short
   text is read up to 20 times. The length of the run grows with the cube root of a long
   text. */
TR_DEF double tr_lm_usual_tokens(const tr_lm *t, double n) {
    const double usual = t->kind->tokens;
    if (n > usual) return usual * cbrt(n / usual);
    return 20 * n < usual ? 20 * n : usual;
}

/* Applies the settings for a training text of n tokens and the processor seconds that
   the run will have: the time of all threads of all ranks with --minutes, otherwise a
   guess. A GPU counts as unlimited. The learning rate is for the optimiser of the
   settings, so it does not apply if the user chose another. */
TR_DEF int tr_lm_apply_settings(tr_lm *t, double n) {
    const tr_lm_sized *s = t->kind->sized;
    const double usual = 300, lr = t->opt->lr;
    double threads = stx_threads(t->x), seconds;
    if (!tr_lm_agree(t, &threads, 1)) return tr_lm_why(t);
    seconds = usual * tr_lm_usual_tokens(t, n) / t->kind->tokens;
    if (t->opt->minutes > 0) seconds = 60 * t->opt->minutes * threads;
    if (t->opt->device == STX_CUDA) seconds = HUGE_VAL;
    while (s[1].settings
           && ((s->tokens > 0 && n > s->tokens) || (s->seconds > 0 && seconds > s->seconds)))
        s++;
    if (!tr_apply(t->options, s->settings, TR_FROM_TEXT, t->err, TR_ERR)) return 0;
    if (tr_lm_decided(t, "optim") && !tr_lm_decided(t, "lr")) {
        tr_opt *p = tr_find_option(t->options, "lr", strlen("lr"));
        *(double *)p->to = lr;
    }
    return 1;
}

/* Chooses the options that depend on the size of the text and on the time, unless a
   preset was given. */
TR_DEF int tr_lm_size(tr_lm *t) {
    const double n = (double)stx_corpus_size(t->text[0]);
    const double tokens = tr_lm_usual_tokens(t, n);
    uint64_t steps;
    if (t->options->preset_used[0]) return 1;

    if (!tr_lm_apply_settings(t, n) || !tr_lm_fit_batch(t)) return 0;
    if (!tr_lm_suggest(t, "inner-hid-sz", 4 * tr_lm_number(t, "hid-sz", 1))) return 0;
    if (!tr_lm_suggest_streams(t) || !tr_lm_shrink_batch(t, n)) return 0;

    if (t->opt->minutes > 0)
        return tr_lm_suggest(t, "lr-warmup", 60) && tr_lm_report_sizes(t);
    if (!tr_lm_decided(t, "steps") && !tr_lm_decided(t, "niter") && !tr_lm_decided(t, "epochs")) {
        double per_step = (double)tr_lm_number(t, "batch-sz", 1);
        per_step *= (double)tr_lm_number(t, "block-sz", 1);
        per_step *= (double)tr_lm_number(t, "update-param-freq", 1);
        steps = tokens / per_step < 100 ? 100 : (uint64_t)(tokens / per_step);
        if (!tr_lm_suggest(t, "steps", steps)) return 0;
    }
    steps = t->opt->steps;
    if (!steps) steps = tr_lm_epoch_steps(t, 0);
    if (!steps) steps = tr_lm_number(t, "niter", 1) * tr_lm_number(t, "nbatches", 1000);
    if (!tr_lm_suggest(t, "lr-warmup", steps / 10 < 60 ? steps / 10 : 60)) return 0;
    if (!tr_lm_decided(t, "nbatches")
        && (!tr_lm_suggest(t, "save-every", (steps + 3) / 4)
            || !tr_lm_suggest(t, "eval-every", (steps + 3) / 4)))
        return 0;
    return tr_lm_report_sizes(t);
}
