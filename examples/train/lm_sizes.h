#pragma once
#include "base.h"
#include "buffer.h"
#include "options.h"
#include "options_set.h"
#include "lm.h"
#include "lm_context.h"
#include "lm_minutes.h"


// >>lm: sizes without a preset

/* Repeatedly halves the number of streams and the block length, unless they were given,
   until n tokens are enough for four blocks per stream. */
TR_DEF int tr_lm_shrink_batch(tr_lm *t, double n) {
    const int any_B = !tr_lm_decided(t, "batch-sz") && !tr_lm_decided(t, "batch-split");
    const int any_T = !tr_lm_decided(t, "block-sz");
    for (;;) {
        uint64_t B = tr_lm_number(t, "batch-sz", 1), T = tr_lm_number(t, "block-sz", 1);
        int ok;
        if (n >= (double)B * 4.0 * (double)(T + 1)) return 1;
        if (any_B && B > 4) ok = tr_lm_suggest(t, "batch-sz", B / 2);
        else if (any_T && T > 8) ok = tr_lm_suggest(t, "block-sz", T / 2);
        else if (any_B && B > 1) ok = tr_lm_suggest(t, "batch-sz", B / 2);
        else return 1;
        if (!ok) return 0;
    }
}

/* Lists in t->sized the options that were chosen for the size of the text. */
TR_DEF int tr_lm_report_sizes(tr_lm *t) {
    static const char *const report[] = {
        "nlayers", "hid-sz", "dropout", "batch-sz", "block-sz", "steps"
    };
    char value[64];
    size_t i;
    for (i = 0; i < sizeof report / sizeof *report; i++) {
        const tr_opt *p = tr_find_option(t->options, report[i], strlen(report[i]));
        if (!p || p->from > TR_FROM_TEXT) continue;
        if (tr_lm_timed(t) && !strcmp(report[i], "steps")) continue;
        tr_value(p, value);
        tr_buf_printf(&t->sized, " --%s %s", report[i], value);
    }
    return 1;
}

/* Chooses the options that depend on the size of the text, unless a preset was given.
   For a short text, the model is smaller and dropout is higher. The text is read up to
   20 times, but no more than 5 million tokens in all. A longer text is read once, up to
   a total of 20 million tokens. */
TR_DEF int tr_lm_size(tr_lm *t) {
    const double n = (double)stx_corpus_size(t->text[0]);
    const char *sizes = t->kind->sized[2];
    double tokens = 20 * n < 5e6 ? 20 * n : 5e6;
    uint64_t steps;
    if (t->options->preset_used[0]) return 1;
    if (n <= 1e5) sizes = t->kind->sized[0];
    else if (n <= 2e6) sizes = t->kind->sized[1];
    if (n > 5e6) tokens = n < 2e7 ? n : 2e7;

    if (!tr_apply(t->options, sizes, TR_FROM_TEXT, t->err, TR_ERR)) return 0;
    if (!tr_lm_suggest(t, "inner-hid-sz", 4 * tr_lm_number(t, "hid-sz", 1))) return 0;
    if (!tr_lm_shrink_batch(t, n)) return 0;

    if (tr_lm_timed(t)) return tr_lm_suggest(t, "lr-warmup", 60) && tr_lm_report_sizes(t);
    if (!tr_lm_decided(t, "steps") && !tr_lm_decided(t, "niter") && !tr_lm_decided(t, "epochs")) {
        double per_step = (double)tr_lm_number(t, "batch-sz", 1);
        per_step *= (double)tr_lm_number(t, "block-sz", 1);
        per_step *= (double)tr_lm_number(t, "update-param-freq", 1);
        steps = tokens / per_step < 100 ? 100 : (uint64_t)(tokens / per_step);
        if (!tr_lm_suggest(t, "steps", steps)) return 0;
    }
    steps = t->opt->steps;
    if (!steps) steps = tr_lm_number(t, "niter", 1) * tr_lm_number(t, "nbatches", 1000);
    if (!tr_lm_suggest(t, "lr-warmup", steps / 10 < 60 ? steps / 10 : 60)) return 0;
    if (!tr_lm_decided(t, "nbatches")
        && (!tr_lm_suggest(t, "save-every", (steps + 3) / 4)
            || !tr_lm_suggest(t, "eval-every", (steps + 3) / 4)))
        return 0;
    return tr_lm_report_sizes(t);
}
