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
   --steps with --niter, which the trainer checks. A number of 0 gives no length; training
   refuses it if it is alone. */
TR_DEF int tr_lm_choose_length(tr_lm *t) {
    enum { MINUTES, PLAN, STEPS, NITER, EPOCHS, LENGTHS };
    static const char *const name[] = {"minutes", "plan", "steps", "niter", "epochs"};
    const tr_opt *p[LENGTHS];
    char value[64];
    int i, given = LENGTHS, zero = LENGTHS;
    for (i = 0; i < LENGTHS; i++) {
        p[i] = tr_find_option(t->options, name[i], strlen(name[i]));
        if (!p[i] || p[i]->from != TR_FROM_ARGS) continue;
        tr_value(p[i], value);
        if (!strcmp(value, "0")) {
            zero = i;
            continue;
        }
        if (i == PLAN) given = LENGTHS;
        if (given <= PLAN || (i == EPOCHS && given < LENGTHS))
            return tr_fail(t->err, TR_ERR, "--%s and --%s cannot be combined", name[given],
                           name[i]);
        if (given == LENGTHS) given = i;
    }
    if (given == LENGTHS && zero < LENGTHS && t->training)
        return tr_fail(t->err, TR_ERR, "--%s: expected more than 0 to train, got 0; --eval-only or "
                       "--no-train uses a --checkpoint without training", name[zero]);
    if (given == LENGTHS) return 1;
    if (p[MINUTES]->from != TR_FROM_ARGS) *(double *)p[MINUTES]->to = 0;
    if (given != PLAN) *(const char **)p[PLAN]->to = NULL;
    if (given != EPOCHS) *(double *)p[EPOCHS]->to = 0;
    else *(uint64_t *)p[STEPS]->to = 0;
    return 1;
}

/* Returns the share of the run that is done after n steps, according to the entries of
   the plan up to the current step: a run does not know the others yet. */
TR_DEF double tr_lm_progress(const tr_lm *t, uint64_t n) {
    double done = 0;
    size_t i;
    if (!t->plan_count) return t->steps ? (double)n / (double)t->steps : 1;
    for (i = 0; i < t->plan_count && t->plan[i].step < n && t->plan[i].step <= t->step; i++) {
        const tr_lm_entry *e = &t->plan[i];
        const int last = i + 1 == t->plan_count || e[1].step > t->step;
        const uint64_t end = last || e[1].step > n ? n : e[1].step;
        if (e->steps <= e->step) return 1;
        done += (1 - done) * (double)(end - e->step) / (double)(e->steps - e->step);
    }
    return done < 1 ? done : 1;
}

/* Where an update is in the schedule of the learning rate. */
typedef struct {
    double at, warmup, total;   /* the update, the end of the warm-up, and the end of the run */
} tr_lm_place;

enum { TR_PLACES = 1 << 20 };

/* Returns the place of update n. With --minutes or --plan, all three are shares of the
   run times TR_PLACES. A warm-up that was not chosen by the user takes at most a tenth of
   the run. Once it is over, the share at its end no longer changes, so that the learning
   rate never rises again, whatever the speed does. */
TR_DEF tr_lm_place tr_lm_placed(const tr_lm *t, uint64_t n) {
    const uint64_t W = t->opt->lr_warmup;
    double done, risen = W ? (double)n / (double)W : 1, warm = W ? tr_lm_progress(t, W) : 0;
    tr_lm_place p;
    p.at = (double)n;
    p.warmup = (double)W;
    p.total = (double)t->steps;
    if (!t->plan_count) return p;
    done = tr_lm_progress(t, n);
    if (!tr_lm_decided(t, "lr-warmup") && W) {
        if (warm > 0.1) warm = 0.1;
        if (risen < done / 0.1) risen = done / 0.1;
    }
    p.at = TR_PLACES * (risen < 1 ? warm * risen : done);
    p.warmup = TR_PLACES * warm;
    p.total = TR_PLACES;
    return p;
}

/* Returns the learning rate of the next update. Noam's schedule and --lr-decay depend
   only on the number of updates. */
TR_DEF double tr_lm_rate(const tr_lm *t) {
    const uint64_t n = t->step + 1;
    const tr_lm_place p = tr_lm_placed(t, n);
    stx_schedule s = t->schedule, decay = t->schedule;
    if (!t->plan_count || s.kind == STX_LR_NOAM) return stx_schedule_lr(&s, n);
    s.warmup = (uint64_t)(p.warmup + 0.5);
    s.total = (uint64_t)p.total;
    s.decay = 0;
    decay.kind = STX_LR_CONSTANT;
    decay.lr = decay.lr_start = 1;
    decay.literal = 0;
    return stx_schedule_lr(&s, (uint64_t)(p.at + 0.5)) * stx_schedule_lr(&decay, n);
}

/* Sets the length of the run to that of the plan at the current step. */
TR_DEF void tr_lm_follow_plan(tr_lm *t) {
    size_t i = 0;
    if (!t->plan_count) return;
    while (i + 1 < t->plan_count && t->plan[i + 1].step <= t->step) i++;
    t->steps = t->plan[i].steps;
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

/* Measures a step that took dt seconds. A single step that takes ten times as long as
   the others says nothing about their speed. If it takes more than two seconds, the
   process or the machine was stopped, and the pause is not training time. */
TR_DEF void tr_lm_measure(tr_lm *t, uint64_t n, double dt) {
    tr_lm_pace *pace = &t->pace;
    const int stalled = pace->step > 0 && dt > 10 * pace->step && !pace->stalled;
    pace->stalled = stalled;
    if (!stalled) {
        pace->seconds += dt;
        pace->steps++;
        return;
    }
    if (dt < 2) {
        t->apart += dt;
        return;
    }
    t->used -= dt - pace->step;
    t->rate.last += dt - pace->step;
    tr_say(&t->term, "step %" PRIu64 " took %.3g seconds instead of %.3g: this pause is not part "
           "of --minutes", n, dt, pace->step);
}

/* Sets the seconds per step that were measured since the last check. Small changes are
   averaged. */
TR_DEF void tr_lm_set_pace(tr_lm_pace *pace, double seconds) {
    const double before = pace->step;
    const int small = before > 0 && seconds > before / 1.5 && seconds < before * 1.5;
    pace->step = small ? 0.75 * before + 0.25 * seconds : seconds;
}

/* Returns the total number of steps that fit into --minutes, as far as is known after n
   steps, or 0 if the plan need not change. Assumes that evaluation and saving continue to
   take the same share of the time. Checks after the first three steps, then after each
   hundredth of the time or of the progress, whichever comes first, and before the last
   step. The speed is that since the last check, so progress is never far from the share
   of the time. Changes the plan by 1 % or more. If the time is over, one step remains,
   with the schedule's last learning rate. */
TR_DEF uint64_t tr_lm_fitting_steps(tr_lm *t, uint64_t n) {
    const double budget = 60 * t->opt->minutes, now = tr_seconds();
    const double done = tr_lm_progress(t, n), here = done - tr_lm_progress(t, t->first);
    tr_lm_pace *pace = &t->pace;
    double used, left, steps, change;
    int due;
    if (!tr_lm_timed(t) || t->rehearsal || n >= t->steps) return 0;
    if (n > t->first + 1) tr_lm_measure(t, n, now - t->rate.last);      /* the first is slower */
    if (n < t->first + 3) return 0;
    used = t->used + (now - t->began);
    left = budget - used - t->apart * (1 - done) / (here > 0.1 ? here : 0.1);
    due = n == t->first + 3 || used - pace->used >= budget / 100 || done - pace->done >= 0.01;
    if (!due && left > 0 && n + 1 < t->steps) return 0;
    if (due) {
        if (pace->steps) tr_lm_set_pace(pace, pace->seconds / (double)pace->steps);
        pace->seconds = 0;
        pace->steps = 0;
        pace->used = used;
        pace->done = done;
    }
    if (left > 0 && !(pace->step > 0)) return 0;
    steps = left > 0 ? floor(left / pace->step) : 0;
    steps = (double)n + (steps > 1 ? steps : 1);
    change = fabs(steps - (double)t->steps);
    if (change < 0.01 * ((double)t->steps - (double)n) + 0.5) return 0;
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
   --minutes, the schedule continues at the share of the new time that is over, as it
   does when --steps changes: with more minutes, the learning rate rises. If the
   checkpoint is of a run without --minutes, the time begins now, with a guess of the
   number of steps. */
TR_DEF int tr_lm_load_plan(tr_lm *t, const stx_file *f) {
    const char *text = stx_file_meta(f, "plan");
    const double budget = 60 * t->opt->minutes;
    double minutes = 0;
    if (!tr_lm_meta_real(t, f, "minutes", &minutes)) return 0;
    if (!tr_lm_meta_real(t, f, "plan.seconds", &t->used)) return 0;
    if (tr_lm_timed(t) && !tr_lm_load_judged(t, f)) return 0;
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
