#pragma once
#include "base.h"
#include "log.h"
#include "terminal.h"
#include "lm.h"
#include "lm_errors.h"
#include "lm_text.h"
#include "lm_checkpoint.h"
#include "lm_start.h"
#include "lm_progress.h"
#include "lm_evaluate.h"
#include "lm_recompute.h"
#include "lm_watch.h"
#include "lm_minutes.h"


// >>lm: steps, in the order of the training loop

/* Nonzero if several ranks are between two updates and therefore have different
   gradients. Saving and stopping then wait for the update, so that the run resumes
   bit-exactly. The last step and the best model, which cannot wait, are saved with the
   mean of the gradients (tr_lm_average_grads). */
TR_DEF int tr_lm_between(const tr_lm *t) {
    return tr_lm_ranks(t) > 1 && tr_lm_pending(t) > 0;
}

/* Nonzero if training continues with another step. */
TR_DEF int tr_lm_more(const tr_lm *t) {
    return t->step < t->steps && (!tr_lm_stop(t) || tr_lm_between(t)) && stx_ok(t->x);
}

/* Makes t->tokens, t->targets and t->state those of this step's group of streams. The
   first group's step reads the next block of all streams. Returns the result of
   stx_batches_next for that block. */
TR_DEF int tr_lm_next_group(tr_lm *t) {
    const size_t group = (size_t)(t->step % t->groups);
    const size_t tokens = t->parts * t->in[0]->B * (size_t)tr_lm_ranks(t) * t->in[0]->T;
    if (!group || t->all_status == STX_BATCH_END) {
        t->all_from = stx_batches_get(t->batches);
        t->all_status = stx_batches_next(t->batches, t->all_tokens, t->all_targets);
    }
    t->tokens = t->all_tokens + group * tokens;
    t->targets = t->all_targets + group * tokens;
    t->state = t->states + group * t->parts;
    return t->all_status;
}

/* Reads the next block of this step's streams into t->tokens and t->targets. Returns the
   result of stx_batches_next. With --random-segments N, reads segments of N blocks. Their
   positions depend only on the seed and the step, so checkpoints need not store them. */
TR_DEF int tr_lm_next(tr_lm *t) {
    const uint64_t N = t->opt->random_segments, stream_key = 0x7069656365000000u;   /* "piece" */
    const size_t B = t->parts * t->in[0]->B * (size_t)tr_lm_ranks(t), T = t->in[0]->T;
    size_t b;
    if (!N) return tr_lm_next_group(t);
    for (b = 0; b < B; b++) {
        const uint64_t positions = stx_corpus_size(t->text[0]) - N * T;
        uint32_t r[4];
        size_t at;
        stx_philox(t->opt->seed, t->step / N, stream_key + b, r);
        at = (size_t)((r[0] | (uint64_t)r[1] << 32) % positions + t->step % N * T);
        if (!stx_corpus_read(t->text[0], at, T, t->tokens + b * T)) return STX_BATCH_END;
        if (!stx_corpus_read(t->text[0], at + 1, T, t->targets + b * T)) return STX_BATCH_END;
    }
    return t->step % N ? STX_BATCH_OK : STX_BATCH_FRESH;
}

/* Copies the blocks in t->tokens and t->targets to t->in and t->out. If fresh is 1,
   resets the states, because the blocks do not continue the previous ones. Decides
   whether the step updates the parameters. Returns the step's key. */
TR_DEF uint64_t tr_lm_batch(tr_lm *t, int fresh) {
    const uint64_t every = t->opt->update_every, after = t->opt->update_after;
    const int several = every > 1 && t->step >= after;
    uint64_t key = 0;
    size_t k;
    t->update = !several || (t->step + 1 - after) % every == 0;
    /* average the gradients, as in one larger batch, so that the same --grad-clip
       applies */
    t->share = several ? 1.0 / (double)every : 1;
    if (several) key = 1 + (uint64_t)t->update;
    for (k = 0; k < t->pieces; k++) {
        void *state = k < t->parts ? t->state[k] : NULL;        /* only for the first block */
        size_t n = t->in[k]->B * t->in[k]->T;
        size_t at = (k * (size_t)tr_lm_ranks(t) + (size_t)stx_rank(t->x)) * n;
        if (state && fresh) t->lm.state_reset(state);
        stx_tokens_set(t->x, t->in[k], t->tokens + at);
        stx_tokens_set(t->x, t->out[k], t->targets + at);
        key = t->lm.key(t->lm.model, t->in[k], t->out[k], state, key);
    }
    return key;
}

/* Reports a step whose loss or gradient is not finite. Resets the states, which may
   contain NaN. Returns 0 after too many consecutive steps of this kind. */
TR_DEF int tr_lm_skipped(tr_lm *t, double nll) {
    size_t k;
    tr_say(&t->term, "step %llu: the %s is not finite; this update is skipped and the memory is "
           "cleared", (unsigned long long)t->step, isfinite(nll) ? "gradient" : "loss");
    for (k = 0; k < t->parts; k++) t->lm.state_reset(t->state[k]);
    if (++t->bad_updates < 50) return 1;
    stx_fail(t->x, STX_ERR_ARG,
             "50 consecutive updates were not finite: use a smaller --lr or --grad-clip");
    return 0;
}

/* Records a step with mean loss nll, or reports that its update was skipped, and shows
   progress. Returns 0 if the run ends here. Opens the files after the first step, which
   has shown that training fits in memory. */
TR_DEF int tr_lm_stepped(tr_lm *t, double nll) {
    const double tokens = (double)(t->pieces * t->in[0]->B * t->in[0]->T);
    double v[2];        /* nll, and rank 0's new length of the run */
    int done;
    if (t->rehearsal) return tr_lm_rehearsed(t);
    v[0] = nll;
    v[1] = stx_rank(t->x) ? 0 : (double)tr_lm_fitting_steps(t, t->step + 1);
    if (!tr_lm_texts_are_whole(t) || !tr_lm_agree(t, v, 2)) return 0;
    nll = v[0] / tr_lm_ranks(t);
    done = t->update ? stx_optim_sync(t->optim) : isfinite(nll);
    if (!stx_ok(t->x) || !tr_lm_begin(t)) return 0;

    t->step++;
    if (done) {
        t->sum += nll;
        t->logged++;
        t->loss = nll;
        t->bad_updates = 0;
    } else if (!tr_lm_skipped(t, nll)) {
        return 0;
    }
    tr_lm_choose_again(t);
    if (v[1] > 0) tr_lm_replan(t, (uint64_t)v[1]);
    tr_lm_follow_plan(t);
    tr_rate_add(&t->rate, tr_seconds(), 1, tokens * tr_lm_ranks(t));
    tr_lm_show(t, t->loss, t->step % t->log_every == 0 || t->step == t->steps);
    return 1;
}

/* If a log record is due, begins it with the mean loss since the previous one and
   returns 1. The trainer adds its values and calls tr_lm_logged. */
TR_DEF int tr_lm_log_due(tr_lm *t) {
    if (t->rehearsal || (t->step % t->log_every && t->step != t->steps)) return 0;
    tr_lm_log_step(t, t->logged ? t->sum / (double)t->logged : (double)NAN);
    t->sum = 0;
    t->logged = 0;
    return 1;
}

TR_DEF void tr_lm_logged(tr_lm *t) {
    tr_lm_note(t, t->log.err, tr_log_end(&t->log));
}

/* Evaluates, and saves the best model. After an error, saves the checkpoint and sets an
   error that names the step. With several ranks, does not save, because ranks without an
   error would not take part. */
TR_DEF int tr_lm_evaluate_step(tr_lm *t) {
    const tr_lm_opt *o = t->opt;
    double nll, blocks = stx_rank(t->x) ? 0 : (double)tr_lm_eval_blocks(t);
    int ok = tr_lm_agree(t, &blocks, 1) && tr_lm_evaluate(t, 1, (uint64_t)blocks, &nll);
    if (ok && tr_lm_timed(t)) t->timed_blocks = (uint64_t)blocks;
    if (ok) tr_lm_judge(t, nll);
    if (ok && o->best && tr_lm_better(t, nll)) ok = tr_lm_save_best(t);
    if (ok || tr_lm_ranks(t) > 1) return ok;
    tr_lm_why(t);
    stx_clear_error(t->x);
    tr_lm_save(t, o->checkpoint);
    stx_fail(t->x, STX_ERR_ARG, "after step %llu: %s", (unsigned long long)t->step, t->err);
    return 0;
}

/* Evaluates, writes a sample and saves, each when it is due. If an error ends the run,
   saves what can be saved and returns 0. */
TR_DEF int tr_lm_evaluate_and_save(tr_lm *t) {
    const tr_lm_opt *o = t->opt;
    const int ends = t->step >= t->steps;
    int evaluates;
    if (t->rehearsal) return 1;
    evaluates = tr_lm_due(t, t->eval_every, 10);
    if (evaluates && (o->best || !ends)) {
        if (!tr_lm_evaluate_step(t)) return 0;
        tr_lm_skip_time(t);
    }
    if (tr_lm_sample_due(t, evaluates)) {
        if (!tr_lm_show_sample(t)) return 0;
        tr_lm_skip_time(t);
    }
    t->save_due |= tr_lm_due(t, t->save_every, 4) && !ends;
    if (t->save_due && !tr_lm_between(t)) {
        t->save_due = 0;
        if (!tr_lm_save(t, o->checkpoint)) return 0;
        t->saved = t->step;
        tr_lm_skip_time(t);
    }
    return 1;
}

/* Saves the final state after the training loop. */
TR_DEF int tr_lm_trained(tr_lm *t) {
    if (stx_ok(t->x) && t->step > t->saved) tr_lm_save(t, t->opt->checkpoint);
    return stx_ok(t->x);
}
