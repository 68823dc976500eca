#pragma once
#include "base.h"
#include "options.h"
#include "lm.h"
#include "lm_context.h"


// >>lm: model, optimiser and plan from the options

/* Checks that the value of the option `name` divides the value of the option `whole`. */
TR_DEF int tr_lm_divides(tr_lm *t, const char *name, const char *whole) {
    const uint64_t n = tr_lm_number(t, name, 1), of = tr_lm_number(t, whole, 1);
    if (of % n == 0) return 1;
    return tr_fail(t->err, TR_ERR, "--%s: expected a divisor of --%s %" PRIu64 ", got %" PRIu64,
                   name, whole, of, n);
}

/* Creates the model that `desc` describes in x, and returns the forms of --literal in its
   resolved desc. Returns NULL if the model cannot be created. */
typedef const unsigned *tr_lm_literal_in(stx_ctx *x, const void *desc);

/* Sets *literal, a field of the model's desc, to the forms that the value `set` of
   --literal selects; all other fields of desc must be set. If the value excludes names
   ("all,no-eps"), the result depends on which forms apply to the model, which only the
   library knows. A model is then created in a dry context, where it uses no memory, and
   its desc is read. On error, sets t->err and returns 0. */
TR_DEF int tr_lm_choose_literal(tr_lm *t, int set, unsigned *literal, const void *desc,
                                tr_lm_literal_in *create) {
    stx_desc d;
    stx_ctx *x;
    const unsigned *applied;
    int lacks_memory;
    *literal = (unsigned)tr_set_given(set);
    if (!tr_set_removed(set)) return 1;
    memset(&d, 0, sizeof d);
    d.dry = 1;
    d.threads = 1;
    x = stx_create(&d);
    applied = create(x, desc);
    lacks_memory = !x || stx_error_code(x) == STX_ERR_MEMORY;
    if (applied) *literal = *applied & ~(unsigned)tr_set_removed(set);
    stx_destroy(x);
    if (applied || !lacks_memory) return 1;     /* creating the model reports the error */
    return tr_fail(t->err, TR_ERR,
                   "--literal: out of memory: cannot determine which forms apply: name them");
}

/* Returns 1 if the optimiser of this kind (STX_SGD ..) has a momentum. */
TR_DEF int tr_lm_has_momentum(int kind) {
    return kind == STX_SGD || kind == STX_MUON;
}

/* Returns an optimiser with the values of the options that all trainers have. `kind` is
   the library's constant for the value of --optim. */
TR_DEF stx_optim_desc tr_lm_optim_desc(const tr_lm *t, int kind) {
    stx_optim_desc d;
    memset(&d, 0, sizeof d);
    d.kind = kind;
    d.momentum = t->opt->momentum;
    d.weight_decay = t->opt->weight_decay;
    d.clip = t->opt->grad_clip;
    return d;
}

/* Returns the number of steps in which the streams of the training text reach their ends.
   It need not be whole. */
TR_DEF double tr_lm_epoch(const tr_lm *t) {
    const double B = (double)tr_lm_number(t, "batch-sz", 1);
    const double blocks = (double)tr_lm_number(t, "update-param-freq", 1);
    const double share = t->weight_steps > 0 ? t->weight_steps : 1;
    stx_batches_desc d;
    memset(&d, 0, sizeof d);
    d.B = (size_t)tr_lm_streams(t);
    d.T = (size_t)tr_lm_number(t, "block-sz", 1);
    d.how = t->opt->reading;
    d.count = t->use;
    return (double)stx_batches_epoch(t->text[0], &d) * (double)d.B / B / blocks / share;
}

/* Returns the number of steps that --epochs requests, or `other` without --epochs. */
TR_DEF uint64_t tr_lm_epoch_steps(const tr_lm *t, uint64_t other) {
    const double steps = t->opt->epochs * tr_lm_epoch(t) + 0.5;
    if (!(steps > 0.5)) return other;
    if (steps > 1e18) return (uint64_t)1e18;
    return steps < 1 ? 1 : (uint64_t)steps;
}

/* Sets the length of the run, the steps at which it logs, evaluates and saves, and the
   learning-rate schedule. `steps` is the length without --steps and --epochs, and `kind`
   the library's constant for the value of --schedule. */
TR_DEF void tr_lm_plan(tr_lm *t, uint64_t steps, int kind) {
    const tr_lm_opt *o = t->opt;
    const int epochs = !o->steps && o->epochs > 0 && t->text[0];
    const uint64_t epoch = epochs ? (uint64_t)(tr_lm_epoch(t) + 0.5) : 0;
    t->steps = o->steps;
    if (!t->steps) t->steps = epochs ? tr_lm_epoch_steps(t, steps) : steps;
    t->log_every = o->log_every ? o->log_every : 10;
    t->eval_every = o->eval_every ? o->eval_every : epoch;
    t->save_every = o->save_every ? o->save_every : epoch;
    t->eval_blocks = o->eval_blocks;
    t->eval_block = o->block_sz;
    t->schedule.kind = kind;
    t->schedule.lr = o->lr;
    t->schedule.lr_start = o->lr_start;
    t->schedule.lr_min = o->lr_min;
    t->schedule.warmup = o->lr_warmup;
    t->schedule.total = t->steps;
}
