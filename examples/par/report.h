/* par/report.h - what train_par prints and logs at the end of a run. */
#pragma once
#include "../train/base.h"
#include "../train/options.h"
#include "../train/log.h"
#include "../train/lm.h"
#include "../train/lm_results.h"
#include "../train/lm_start.h"
#include "../train/lm_progress.h"
#include "../../seqtx_par.h"
#include "options.h"
#include "patterns.h"
#include "run.h"
#include "race.h"
#include "derive.h"
#include "picture.h"


// >>report

/* Evaluates the validation text with the other two values of --gate-eval. */
TR_DEF void other_gates(run *r, FILE *out) {
    static const char *const way[3] = {"argmax", "soft", "noise"};
    tr_lm *t = &r->t;
    const int gate_eval = r->model->desc.gate_eval;
    uint64_t blocks = t->training && tr_given(&options, "eval-blocks") ? opt.lm.eval_blocks : 0;
    const char *between = "";
    double nll[3];
    tr_lm_scored scored[3];
    int k, ok = 1;
    for (k = 0; ok && k < 3; k++) {
        if (k == gate_eval) continue;
        r->model->desc.gate_eval = k;
        nll[k] = valid_loss(r, blocks, &scored[k]);
        ok = !isnan(nll[k]);
    }
    r->model->desc.gate_eval = gate_eval;
    if (!ok || !stx_ok(t->x) || !tr_lm_begin(t)) return;

    fprintf(out, "valid with --gate-eval");
    tr_log_begin(&t->log, "gates");
    for (k = 0; k < 3; k++) {
        if (k == gate_eval) continue;
        fprintf(out, "%s %s: %s %.4f", between, way[k], tr_lm_unit(t), tr_lm_metric(t, 1, nll[k]));
        if (t->unit == TR_PPL) fprintf(out, " (mean of batches %.4f)", scored[k].batch_ppl);
        tr_log_num(&t->log, way[k], nll[k]);
        between = ", and";
    }
    fprintf(out, "\n");
    tr_log_int(&t->log, "step", t->step);
    tr_lm_note(t, t->log.err, tr_log_end(&t->log));
}

/* Logs the pattern of the network, or the most probable pattern of a search. */
TR_DEF void log_pattern(run *r, const char *pattern) {
    char text[PATTERN], *words;
    if (!tr_lm_begin(&r->t)) return;
    words = in_words(pattern);
    tr_log_begin(&r->t.log, "architecture");
    tr_log_int(&r->t.log, "step", r->t.step);
    tr_log_str(&r->t.log, "pattern", short_form(pattern, text));
    tr_log_str(&r->t.log, "blocks", words);
    tr_lm_note(&r->t, r->t.log.err, tr_log_end(&r->t.log));
    free(words);
}

/* Prints the pattern and, for a search, the expected time of the mixture. Returns 0
   after an error. */
TR_DEF int print_architecture(run *r, FILE *out, const char *pattern) {
    double *p = NULL;
    if (!*r->pattern) {
        p = (double *)malloc(3 * r->blocks * sizeof *p);
        if (p && !stx_par_probs(r->model, p)) {
            free(p);
            return 0;
        }
    }
    log_pattern(r, pattern);
    fprintf(out, "architecture: ");
    print_pattern(out, pattern);
    if (p && r->desc.cost[0] > 0)
        fprintf(out, "; expected time of the mixture %.0f %% of Transformer-XL's",
                100 * expected_time(r, p) / xl_time(r));
    fprintf(out, "\n");
    free(p);
    return 1;
}

TR_DEF void report(const tr_lm *t, FILE *out) {
    run *r = (run *)(uintptr_t)t;
    const int search = !*r->pattern;
    char likely[PATTERN];
    const char *pattern = r->pattern;
    if (search) {
        if (!stx_par_argmax(r->model, likely, PATTERN)) return;
        pattern = likely;
    }
    if (!print_architecture(r, out, pattern)) return;
    if (search && t->text[1] && !opt.derive && !opt.lm.no_train) other_gates(r, out);
    if (opt.derive) derive(r, out);
    if (opt.race && *opt.race && stx_ok(t->x)) print_race(r, out, pattern);
    if (opt.picture && *opt.picture && search && stx_ok(t->x)) picture(r);
}
