/* compressive/run.h - the state of a run of train_compressive. */
#pragma once
#include "../train/lm.h"
#include "../../seqtx_compressive.h"
#include "options.h"


// >>run: the state of a run

/* The compression losses of one layer in the last logged step. */
typedef struct compression {
    size_t layer;           /* layer index, from 0 */
    double loss;
    double rel_error;       /* sum (target - got)^2 / sum target^2 */
} compression;

typedef struct run {
    tr_lm         t;        /* context, text, optimiser, log and more: see train.h */
    stx_comp_desc desc;
    stx_comp     *model;

    /* arrays to which desc points, one element per layer or memory layer */
    size_t        memory_layers[MAX_LAYERS], mems[MAX_LAYERS], cmems[MAX_LAYERS];

    /* memory capacities in evaluation and generation, per layer */
    size_t        eval_mems[MAX_LAYERS], eval_cmems[MAX_LAYERS];

    compression   reported[MAX_LAYERS];     /* results of the layers whose compression has
                                               a loss */
    size_t        reports;
} run;
