/* par/search.h - what a search of train_par adds to training: the temperature of its
   gates, their optimiser, the steps in which they learn, and the text from which they
   learn (--arch-share). */
#pragma once
#include "../train/base.h"
#include "../train/lm.h"
#include "../train/lm_errors.h"
#include "../train/lm_minutes.h"
#include "../train/lm_steps.h"
#include "../../seqtx_par.h"
#include "options.h"
#include "run.h"


// >>search

/* Sets the temperature of the next step. An evaluation or a checkpoint before that step
   uses the same temperature. */
TR_DEF void cool(run *r) {
    const int whole_run = r->t.plan_count && !opt.tau_steps;
    uint64_t n = r->t.step;
    if (whole_run) {
        r->anneal.total = TR_PLACES;
        n = (uint64_t)(TR_PLACES * tr_lm_progress(&r->t, n));
    }
    r->tau = stx_par_tau(&r->anneal, n);
    stx_par_set_tau(r->model, r->tau);
}

/* Decides whether the gates learn in the next step, and whether they learn alone. */
TR_DEF void plan_step(run *r) {
    const uint64_t n = r->t.step, every = r->t.rehearsal ? 2 : opt.arch_every;
    int may = n >= opt.arch_from && (!opt.arch_until || n < opt.arch_until);
    if (r->t.rehearsal) may = 1;
    may = may && r->arch;
    r->gates_only = may && r->gate_batches && (n + 1) % every == 0;
    r->gates_learn = may && (!r->gate_batches || r->gates_only);
}

/* Reads the next batch from the weights' text or the gates' text. Returns the key of
   the step. *fresh receives the result of stx_batches_next. */
TR_DEF uint64_t next_batch(run *r, int *fresh) {
    tr_lm *t = &r->t;
    void **state = t->state;
    uint64_t key;
    if (!r->gates_only) {
        *fresh = tr_lm_next(t);
        return *fresh == STX_BATCH_END ? 0 : tr_lm_batch(t, *fresh == STX_BATCH_FRESH);
    }
    *fresh = stx_batches_next(r->gate_batches, t->tokens, t->targets);
    if (*fresh == STX_BATCH_END) return 0;
    t->state = r->gate_state;
    key = tr_lm_batch(t, *fresh == STX_BATCH_FRESH);
    t->state = state;
    t->update = 0;
    return key;
}

/* Reserves the end of the training text for the gates (--arch-share). */
TR_DEF void plan_gate_text(run *r) {
    tr_lm *t = &r->t;
    size_t size, share;
    t->use = 0;
    r->gate_first = 0;
    if (*r->pattern || !(opt.arch_share > 0) || !t->text[0]) return;
    size = stx_corpus_size(t->text[0]);
    share = (size_t)(opt.arch_share * (double)size);
    if (share > 0 && share < size) t->use = r->gate_first = size - share;
}

/* Creates the batches and the memory for the gates' text (--arch-share). */
TR_DEF int make_gate_text(run *r) {
    tr_lm *t = &r->t;
    stx_batches_desc d;
    size_t part;
    memset(&d, 0, sizeof d);
    d.B = opt.lm.batch_sz;
    d.T = opt.lm.block_sz;
    d.seed = opt.lm.seed;
    d.how = opt.lm.reading;
    d.first = r->gate_first;
    r->gate_batches = stx_batches_create(t->x, t->text[0], &d);
    if (!r->gate_batches && stx_error_code(t->x) != STX_ERR_MEMORY)
        return tr_fail(t->err, TR_ERR, "--arch-share %g: %s", opt.arch_share, stx_error(t->x));
    r->gate_state = (void **)stx_block(t->x, t->parts * sizeof *r->gate_state);
    for (part = 0; r->gate_state && part < t->parts; part++)
        r->gate_state[part] = t->lm.state_create(t->lm.model, t->in[0]->B, 0);
    return 1;
}

/* Creates the gates' optimiser. With --arch-share, also prepares the gates' text. */
TR_DEF int make_search(run *r, const stx_optim_desc *weights) {
    static const int kinds[] = {0, STX_ADAM, STX_ADAMW, STX_SGD};
    tr_lm *t = &r->t;
    stx_optim_desc od;
    memset(&od, 0, sizeof od);
    if (opt.arch_optim == ARCH_SAME) {
        od = *weights;
    } else {
        od.kind = kinds[opt.arch_optim];
        od.weight_decay = opt.arch_weight_decay;
    }
    r->arch = stx_optim_create(r->model->gates, &od);
    if (r->gate_first && !make_gate_text(r)) return 0;
    return stx_ok(t->x) ? 1 : tr_lm_why(t);
}
