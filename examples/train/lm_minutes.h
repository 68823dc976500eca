#pragma once
#include "base.h"
#include "buffer.h"
#include "options.h"
#include "options_values.h"
#include "options_set.h"
#include "log.h"
#include "terminal.h"
#include "lm.h"
#include "lm_context.h"
#include "lm_results.h"


// >>lm: runs of a given time (--minutes)

/* With --minutes, the number of steps follows from the speed of the machine, which is
   measured all the time. A plan is a list of entries (step, steps): from `step` on, the
   run was to have `steps` steps in total. Progress, from 0 to 1, is linear between two
   entries, so a new entry changes the slope of the learning rate, but the rate does not
   jump.

   The checkpoint and the log contain the plan. --plan repeats it without a clock, which
   makes the run repeatable to the last bit. */

/* Nonzero if the clock determines the length of the run. */
TR_DEF int tr_lm_timed(const tr_lm *t) {
    return t->opt->minutes > 0 && !t->opt->plan;
}

/* A length on the command line replaces those of presets and of the checkpoint: clears
   --minutes, --plan, --steps and --epochs if another option gives the length. Refuses
   several of them, except --plan with --minutes, which then only determines sizes, and
   --steps with --niter, which the trainer checks. A number of 0 gives no length. */
TR_DEF int tr_lm_choose_length(tr_lm *t) {
    enum { MINUTES, PLAN, STEPS, NITER, EPOCHS, LENGTHS };
    static const char *const name[] = {"minutes", "plan", "steps", "niter", "epochs"};
    const tr_opt *p[LENGTHS];
    char value[64];
    int i, given = LENGTHS;
    for (i = 0; i < LENGTHS; i++) {
        p[i] = tr_find_option(t->options, name[i], strlen(name[i]));
        if (!p[i] || p[i]->from != TR_FROM_ARGS) continue;
        tr_value(p[i], value);
        if (!strcmp(value, "0")) continue;
        if (i == PLAN) given = LENGTHS;
        if (given <= PLAN || (i == EPOCHS && given < LENGTHS))
            return tr_fail(t->err, TR_ERR, "--%s and --%s cannot be combined", name[given],
                           name[i]);
        if (given == LENGTHS) given = i;
    }
    if (given == LENGTHS) return 1;
    if (p[MINUTES]->from != TR_FROM_ARGS) *(double *)p[MINUTES]->to = 0;
    if (given != PLAN) *(const char **)p[PLAN]->to = NULL;
    if (given != EPOCHS) *(double *)p[EPOCHS]->to = 0;
    else *(uint64_t *)p[STEPS]->to = 0;
    return 1;
}

/* Returns the share of the run that is done after n steps. */
TR_DEF double tr_lm_progress(const tr_lm *t, uint64_t n) {
    double done = 0;
    size_t i;
    if (!t->plan_count) return t->steps ? (double)n / (double)t->steps : 1;
    for (i = 0; i < t->plan_count && t->plan[i].step < n; i++) {
        const tr_lm_entry *e = &t->plan[i];
        const uint64_t next = i + 1 < t->plan_count ? t->plan[i + 1].step : n;
        const uint64_t end = next < n ? next : n;
        if (e->steps <= e->step) return 1;
        done += (1 - done) * (double)(end - e->step) / (double)(e->steps - e->step);
    }
    return done < 1 ? done : 1;
}

/* Returns the place of step n in the schedule: the step at which as large a share of a
   run of t->steps equal steps is done. Without --minutes and --plan, this is n. */
TR_DEF uint64_t tr_lm_place(const tr_lm *t, uint64_t n) {
    uint64_t place;
    if (!t->plan_count) return n;
    place = (uint64_t)(tr_lm_progress(t, n) * (double)t->steps + 0.5);
    return place ? place : 1;
}

/* Returns the learning rate of the next update. */
TR_DEF double tr_lm_rate(const tr_lm *t) {
    return stx_schedule_lr(&t->schedule, tr_lm_place(t, t->step + 1));
}

/* Sets the length of the run and of the schedule to those of the plan at the current
   step. A warm-up that was not chosen by the user is a tenth of a short run. */
TR_DEF void tr_lm_follow_plan(tr_lm *t) {
    const uint64_t warmup = t->opt->lr_warmup;
    size_t i = 0;
    if (!t->plan_count) return;
    while (i + 1 < t->plan_count && t->plan[i + 1].step <= t->step) i++;
    t->steps = t->plan[i].steps;
    t->schedule.total = t->steps;
    t->schedule.warmup = warmup;
    if (!tr_lm_decided(t, "lr-warmup") && warmup > t->steps / 10)
        t->schedule.warmup = t->steps / 10;
}

/* From now on, the run has `steps` steps in total. Logs the new length. */
TR_DEF void tr_lm_replan(tr_lm *t, uint64_t steps) {
    tr_lm_entry *e = &t->plan[t->plan_count];
    if (t->plan_count == TR_PLAN_MAX) return;
    if (t->plan_count && e[-1].step == t->step) e--;
    else t->plan_count++;
    e->step = t->step;
    e->steps = steps;
    if (!t->begun) return;
    tr_log_begin(&t->log, "plan");
    tr_log_int(&t->log, "step", t->step);
    tr_log_int(&t->log, "steps", steps);
    if (!tr_log_end(&t->log)) tr_say(&t->term, "%s: %s", t->options->program, t->log.err);
}

/* Returns the total number of steps that fit into --minutes, as far as is known after n
   steps, or 0 if the plan need not change. Assumes that evaluation and saving continue to
   take the same share of the time. Checks after the first three steps, then 100 times per
   run, and before the last step, and changes the plan by 1 % or more. If the time is
   over, one step remains, with the schedule's last learning rate. */
TR_DEF uint64_t tr_lm_fitting_steps(tr_lm *t, uint64_t n) {
    const double budget = 60 * t->opt->minutes, now = tr_seconds();
    const double used = t->used + (now - t->began), every = budget / 100;
    const double done = tr_lm_progress(t, n), share = done > 0.25 ? done : 0.25;
    double left = budget - used - t->apart * (1 - done) / share, steps, change;
    if (!tr_lm_timed(t) || t->rehearsal || n < t->first + 3 || n >= t->steps) return 0;
    if (used - t->checked < every && left > 0 && n > t->first + 3 && n + 1 < t->steps) return 0;
    t->checked = used;
    steps = left > 0 ? floor(left * t->rate.steps / t->rate.seconds) : 0;
    steps = (double)n + (steps > 1 ? steps : 1);
    change = fabs(steps - (double)t->steps);
    if (!(t->rate.seconds > 0) || change < 0.01 * ((double)t->steps - (double)n) + 0.5) return 0;
    return (uint64_t)steps;
}

/* Excludes the time since the last step, for example of an evaluation, from the speed. */
TR_DEF void tr_lm_skip_time(tr_lm *t) {
    const double now = tr_seconds();
    t->apart += now - t->rate.last;
    tr_rate_skip(&t->rate, now);
}

/* Nonzero if something that happens every `every` steps is due after this step. If
   `every` is 0, it happens never, or `times` times in a run with --minutes. */
TR_DEF int tr_lm_due(const tr_lm *t, uint64_t every, double times) {
    if (every) return t->step % every == 0;
    if (!t->plan_count) return 0;
    return floor(times * tr_lm_progress(t, t->step))
           > floor(times * tr_lm_progress(t, t->step - 1));
}

/* Returns the number of blocks in an evaluation during training. Unless the user has
   chosen it, an evaluation of a run with --minutes takes about 0.4 % of the time: it is
   about three times as fast as training. All evaluations of a run have the same number of
   blocks, so that their results can be compared. */
TR_DEF uint64_t tr_lm_eval_blocks(const tr_lm *t) {
    const double tokens = 0.004 * 60 * t->opt->minutes * 3 * tr_rate_tokens(&t->rate);
    const double B = (double)tr_lm_number(t, "batch-sz", 1);
    const double blocks = tokens / (B * (double)tr_lm_number(t, "block-sz", 1));
    if (!tr_lm_timed(t) || tr_lm_decided(t, "eval-blocks")) return t->eval_blocks;
    if (t->timed_blocks) return t->timed_blocks;
    return blocks < 1 ? 1 : (uint64_t)blocks;
}

/* Compares the loss of an evaluation with that of the best one. Reports the third
   evaluation in a row that is no better. If the loss is also 10 % and 0.05 nats above the
   best one, the model over-fits, and a run with --minutes ends here. */
TR_DEF void tr_lm_judge(tr_lm *t, double nll) {
    const double best = t->best_seen, used = t->used + (tr_seconds() - t->began);
    char where[48] = "";
    if (isnan(nll)) return;
    if (isnan(best) || nll < best) {
        t->best_seen = nll;
        t->best_step = t->step;
        t->no_better = 0;
        return;
    }
    t->no_better++;
    if (t->best_step)
        snprintf(where, sizeof where, " at step %llu", (unsigned long long)t->best_step);
    if (t->no_better == 3)
        tr_say(&t->term, "no better for 3 evaluations: the best was %s %.4f%s%s%.1000s",
               tr_lm_unit(t), tr_lm_metric(t, 1, best), where,
               t->opt->best ? ", saved in " : "", t->opt->best ? t->opt->best : "");
    if (t->no_better < 3 || !(nll > 1.1 * best + 0.05) || !tr_lm_timed(t)) return;
    if (t->step >= t->steps || t->plan_count == TR_PLAN_MAX) return;
    tr_say(&t->term, "the model over-fits: the run ends after %.3g of %g minutes. A larger text or "
           "more --dropout would help", used / 60, t->opt->minutes);
    tr_lm_replan(t, t->step);
    tr_lm_follow_plan(t);
}

/* Writes the plan as text, such as "0:1000,3:2410", to b. */
TR_DEF void tr_lm_plan_text(const tr_lm *t, tr_buf *b) {
    size_t i;
    for (i = 0; i < t->plan_count; i++)
        tr_buf_printf(b, "%s%" PRIu64 ":%" PRIu64, i ? "," : "", t->plan[i].step,
                      t->plan[i].steps);
}

/* Reads a plan from text. Returns 0 if it is not a valid one. */
TR_DEF int tr_lm_read_plan(tr_lm *t, const char *text) {
    const char *p = text;
    t->plan_count = 0;
    for (;;) {
        tr_lm_entry *e = &t->plan[t->plan_count];
        char *end;
        if (t->plan_count == TR_PLAN_MAX || *p < '0' || *p > '9') return 0;
        e->step = strtoull(p, &end, 10);
        if (*end != ':' || end[1] < '0' || end[1] > '9') return 0;
        e->steps = strtoull(end + 1, &end, 10);
        if (t->plan_count ? e->step <= e[-1].step : e->step) return 0;
        if (e->steps < e->step || e->steps > TR_INF || !e->steps) return 0;
        t->plan_count++;
        if (!*end) return 1;
        if (*end != ',') return 0;
        p = end + 1;
    }
}

/* Begins the plan of a new run. The length of a run with --minutes is a guess until steps
   have been measured. */
TR_DEF int tr_lm_begin_plan(tr_lm *t) {
    const char *text = t->opt->plan;
    if (text && !tr_lm_read_plan(t, text))
        return tr_fail(t->err, TR_ERR, "--plan: expected increasing steps and the lengths of the "
                       "run from there on, such as 0:1000,3:2410, got '%.200s'", text);
    if (!text && tr_lm_timed(t)) {
        t->plan_count = 1;
        t->plan[0].step = 0;
        t->plan[0].steps = TR_PLAN_GUESS;
    }
    tr_lm_follow_plan(t);
    return 1;
}

/* Reads a real number from the metadata, if the key exists. */
TR_DEF int tr_lm_meta_real(tr_lm *t, const stx_file *f, const char *key, double *v) {
    const char *text = stx_file_meta(f, key);
    if (!text || tr_read_real(text, v)) return 1;
    stx_fail(t->x, STX_ERR_FORMAT, "metadata \"%s\": expected a number, got '%.40s'", key, text);
    return 0;
}

/* Adds the plan and the time to a checkpoint. */
TR_DEF int tr_lm_save_plan(const tr_lm *t, stx_writer *w) {
    const double used = t->used + (tr_seconds() - t->began);
    char text[64];
    tr_buf plan;
    int ok;
    memset(&plan, 0, sizeof plan);
    tr_lm_plan_text(t, &plan);
    snprintf(text, sizeof text, "%.17g", t->opt->minutes);
    ok = !plan.oom && stx_writer_meta(w, "plan", plan.s) && stx_writer_meta(w, "minutes", text);
    snprintf(text, sizeof text, "%.17g", tr_lm_timed(t) ? used : 0);
    ok = ok && stx_writer_meta(w, "plan.seconds", text);
    if (ok && !isnan(t->best_seen)) {
        snprintf(text, sizeof text, "%.17g", t->best_seen);
        ok = stx_writer_meta(w, "plan.best", text);
        ok = ok && stx_writer_meta_u64(w, "plan.best_step", t->best_step);
        ok = ok && stx_writer_meta_u64(w, "plan.no_better", t->no_better);
        ok = ok && stx_writer_meta_u64(w, "plan.eval_blocks", t->timed_blocks);
    }
    if (plan.oom) stx_fail(t->x, STX_ERR_MEMORY, "out of memory: cannot save the plan");
    tr_buf_free(&plan);
    return ok;
}

/* Loads the results of the evaluations of a run with --minutes. If evaluations now read
   another part of the text, they cannot be compared with those results. After a change of
   options, the model may improve again. */
TR_DEF int tr_lm_load_judged(tr_lm *t, const stx_file *f) {
    if (!stx_file_meta(f, "plan.best") || tr_given(t->options, "eval-blocks")) return 1;
    if (isnan(t->best) && !tr_lm_meta_real(t, f, "plan.best", &t->best)) return 0;
    if (!tr_lm_meta_real(t, f, "plan.best", &t->best_seen)
        || !stx_file_meta_u64(t->x, f, "plan.best_step", &t->best_step)
        || !stx_file_meta_u64(t->x, f, "plan.no_better", &t->no_better)
        || !stx_file_meta_u64(t->x, f, "plan.eval_blocks", &t->timed_blocks))
        return 0;
    if (t->adopted.changed.n) t->no_better = 0;
    return 1;
}

/* Continues the plan of a checkpoint whose step is t->step. If the user has changed
   --minutes, the schedule continues at the share of the new time that is over. If the
   checkpoint is of a run without --minutes, the time begins now, with a guess of the
   number of steps. */
TR_DEF int tr_lm_load_plan(tr_lm *t, const stx_file *f) {
    const char *text = stx_file_meta(f, "plan");
    const double budget = 60 * t->opt->minutes;
    double minutes = 0;
    if (!tr_lm_meta_real(t, f, "minutes", &minutes)) return 0;
    if (!tr_lm_meta_real(t, f, "plan.seconds", &t->used)) return 0;
    if (tr_lm_timed(t) && !tr_lm_load_judged(t, f)) return 0;
    t->checked = t->used;
    if (!tr_lm_timed(t)) {              /* --plan, or --steps in place of --minutes */
        tr_lm_follow_plan(t);
        return 1;
    }
    if (text && !tr_lm_read_plan(t, text)) {
        stx_fail(t->x, STX_ERR_FORMAT, "metadata \"plan\": expected a list of steps, got '%.40s'",
                 text);
        return 0;
    }
    if (!text || minutes != t->opt->minutes) {
        t->plan_count = 1;
        t->plan[0].step = 0;
        t->plan[0].steps = t->step + TR_PLAN_GUESS;
        if (t->used >= budget) t->plan[0].steps = t->step;
        else if (t->used > 0) t->plan[0].steps = (uint64_t)((double)t->step * budget / t->used);
    }
    tr_lm_follow_plan(t);
    return 1;
}
