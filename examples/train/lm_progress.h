#pragma once
#include "base.h"
#include "options.h"
#include "log.h"
#include "terminal.h"
#include "tensorboard.h"
#include "lm.h"
#include "lm_results.h"
#include "lm_checkpoint.h"


// >>lm: progress and log records

/* If ok is 0, prints why the log or the event file failed. The run continues. */
TR_DEF void tr_lm_note(tr_lm *t, const char *what, int ok) {
    if (!ok) tr_say(&t->term, "%s: %s", t->options->program, what);
}

/* Adds a point to a TensorBoard curve. */
TR_DEF void tr_lm_point(tr_lm *t, const char *tag, double x) {
    tr_lm_note(t, t->board.err, tr_board_scalar(&t->board, tag, t->step, x));
}

/* Shows progress. `loss` is the loss of this step. */
TR_DEF void tr_lm_show(tr_lm *t, double loss, int due) {
    tr_progress p;
    memset(&p, 0, sizeof p);
    p.step = t->step;
    p.steps = t->steps;
    p.loss = loss;
    p.unit = tr_lm_unit(t);
    p.metric = tr_lm_train_metric(t, loss);
    if (!isnan(t->best_seen)) p.best = tr_lm_metric(t, 1, t->best_seen);
    p.lr = t->lr;
    p.tokens_per_s = tr_rate_tokens(&t->rate);
    p.left = tr_rate_left(&t->rate, t->steps - t->step);
    tr_show(&t->term, &p, due);
}

/* This many consecutive steps without a CUDA graph are normal: the first steps of a run
   allocate memory, and the sizes of a step change while a memory fills. */
enum { TR_NOT_REPLAYED = 64 };

/* Runs a step with stx_step_run. If steps persistently run without a CUDA graph, reports
   the reason once. */
TR_DEF int tr_lm_step(tr_lm *t, uint64_t key, stx_step_fn step, void *user) {
    const char *note;
    if (!stx_step_run(t->x, key, step, user)) return 0;
    note = stx_step_replay_status(t->x);
    t->not_replayed = *note ? t->not_replayed + 1 : 0;
    if (t->not_replayed >= TR_NOT_REPLAYED && !t->note_reported) {
        t->note_reported = 1;
        tr_say(&t->term, "steps run without a CUDA graph, which is slower; %s", note);
        tr_log_begin(&t->log, "note");
        tr_log_int(&t->log, "step", t->step);
        tr_log_str(&t->log, "note", note);
        tr_lm_note(t, t->log.err, tr_log_end(&t->log));
    }
    return 1;
}

/* Begins a "train" record. loss is the mean since the previous record. The trainer adds
   its values and calls tr_lm_logged. "grad_norm" is null in a step without an update.
   "seconds" is the time since training began in this process, including evaluation and
   saving. */
TR_DEF void tr_lm_log_step(tr_lm *t, double loss) {
    const double metric = tr_lm_train_metric(t, loss), seconds = tr_seconds() - t->began;
    char tag[40];
    tr_log_begin(&t->log, "train");
    tr_log_int(&t->log, "step", t->step);
    tr_log_num(&t->log, "loss", loss);
    tr_log_num(&t->log, tr_lm_unit(t), metric);
    tr_log_num(&t->log, "lr", t->lr);
    tr_log_num(&t->log, "grad_norm", t->update ? t->optim->grad_norm : (double)NAN);
    tr_log_num(&t->log, "tokens_per_s", tr_rate_tokens(&t->rate));
    tr_log_num(&t->log, "seconds", floor(1000 * seconds) / 1000);
    tr_log_int(&t->log, "peak_bytes", stx_peak_bytes(t->x));

    tr_lm_point(t, "train/loss", loss);
    snprintf(tag, sizeof tag, "train/%s", tr_lm_unit(t));
    tr_lm_point(t, tag, metric);
    tr_lm_point(t, "train/lr", t->lr);
    if (t->update) tr_lm_point(t, "train/grad_norm", t->optim->grad_norm);
    tr_lm_point(t, "train/tokens_per_s", tr_rate_tokens(&t->rate));
}

/* Nonzero if this evaluation is the best so far; if so, also records it. An interrupted
   evaluation has the result NaN, which is never the best. */
TR_DEF int tr_lm_better(tr_lm *t, double nll) {
    if (!(isnan(t->best) ? !isnan(nll) : nll < t->best)) return 0;
    t->best = nll;
    return 1;
}

/* Saves the best model so far and reports it. Returns 0 on error. */
TR_DEF int tr_lm_save_best(tr_lm *t) {
    const char *path = t->opt->best;
    if (!tr_lm_save(t, path)) return 0;
    if (stx_rank(t->x)) return 1;
    if (tr_given(t->options, "best"))
        tr_say(&t->term, "step %llu: best so far, saved in %.1000s", (unsigned long long)t->step,
               path);
    tr_log_begin(&t->log, "best");
    tr_log_int(&t->log, "step", t->step);
    tr_log_num(&t->log, "loss", t->best);
    tr_log_num(&t->log, tr_lm_unit(t), tr_lm_metric(t, 1, t->best));
    tr_log_str(&t->log, "file", path);
    tr_lm_note(t, t->log.err, tr_log_end(&t->log));
    return 1;
}
