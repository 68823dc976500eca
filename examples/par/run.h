/* par/run.h - the state of a run of train_par, and times of its network according to
   desc.cost. */
#pragma once
#include "../train/base.h"
#include "../train/lm.h"
#include "../../seqtx_par.h"
#include "options.h"
#include "patterns.h"


// >>run: the state of a run

typedef struct run {
    tr_lm          t;           /* context, text, optimiser, log and more: see train.h */
    stx_par_desc   desc;
    stx_par       *model;
    char           pattern[PATTERN];    /* one letter per block; "" during a search */
    size_t         blocks;

    /* the search; the gate parameters are in model->gates */
    stx_optim     *arch;        /* NULL for a fixed network */
    stx_par_anneal anneal;
    double         tau, arch_lr;
    int            gates_learn; /* 1: the gates learn in this step */
    int            gates_only;  /* 1: only the gates learn in this step */

    /* --arch-share */
    stx_batches   *gate_batches;
    void         **gate_state;  /* for each part of the batch, the memory for the gates' text */
    size_t         gate_first;  /* position in the training text at which the gates'
                                   text begins */
} run;

/* Returns the time that a Transformer-XL with the same number of blocks takes. */
TR_DEF double xl_time(const run *r) {
    return (double)r->blocks / 2 * (r->desc.cost[0] + r->desc.cost[1]);
}

/* Returns the time of a network with this pattern. */
TR_DEF double pattern_time(const run *r, const char *pattern) {
    double sum = 0;
    for (; *pattern; pattern++)
        if (*pattern != 'i') sum += r->desc.cost[*pattern == 'f'];
    return sum;
}

/* Returns the expected time of blocks with probabilities p (blocks,3). */
TR_DEF double expected_time(const run *r, const double *p) {
    const double *cost = r->desc.cost;
    double sum = 0;
    size_t l;
    for (l = 0; l < r->blocks; l++) sum += p[3 * l] * cost[0] + p[3 * l + 1] * cost[1];
    return sum;
}

/* Returns the number of blocks with a memory. */
TR_DEF size_t attentions(const run *r) {
    size_t l, n = 0;
    for (l = 0; l < r->blocks; l++) n += !*r->pattern || r->pattern[l] == 's';
    return n;
}
