/* compressive/checks.h - what train_compressive does with its options before a run: check
   refuses options that cannot be combined, plan sets the run's length, intervals and
   schedule, and eval_sizes the memories of evaluations. */
#pragma once
#include "../train/base.h"
#include "../train/options.h"
#include "../train/options_parse.h"
#include "../train/lm.h"
#include "../train/lm_evaluate.h"
#include "../train/lm_model.h"
#include "../../seqtx_compressive.h"
#include "options.h"
#include "run.h"
#include "model.h"


// >>checks

/* Checks that the options are consistent before any text is read. */
TR_DEF int check(tr_lm *t) {
    static const char with_bias[] =
        "a --gate with a bias: gru, output, highway, sigtanh or gtrxl";
    const int gated = opt.gate != STX_COMP_GATE_RESIDUAL;
    const int bias = gated && opt.gate != STX_COMP_GATE_INPUT;
    const int conv = opt.compress == STX_COMP_COMPRESS_CONV, aux = opt.aux;
    const int attention = aux == STX_COMP_AUX_ATTENTION || aux == STX_COMP_AUX_AUTO;
    const int weighted = aux != STX_COMP_AUX_NONE && aux != STX_COMP_AUX_BPTT;
    const int cmem = tr_given(&options, "cmem") && opt.cmem;
    const int cmems = tr_given(&options, "cmems") && opt.cmems;
    const tr_only only[] = {
        {"gate-relu", gated, "a --gate other than residual"},
        {"gate-bias", bias, with_bias},
        {"no-gate-bias", bias, with_bias},
        {"mogrify", opt.gate == STX_COMP_GATE_GRU, "--gate gru"},
        {"overlap", conv, "--compress conv"},
        {"conv-no-bias", conv, "--compress conv"},
        {"dilations", opt.compress == STX_COMP_COMPRESS_DILATED, "--compress dilated"},
        {"bptt", aux == STX_COMP_AUX_BPTT, "--aux bptt"},
        {"aux-dropout", attention, "--aux attention"},
        {"aux-weight", weighted, "--aux attention or autoencode"},
        {"lr-start", opt.lm.lr_warmup > 0, "runs with --lr-warmup"},
        {"lr-min", schedule_kinds[opt.lm.schedule] == STX_LR_COSINE, "--schedule cosine"},
        {"momentum", tr_lm_has_momentum(optim_kinds[opt.lm.optim]), "--optim sgd and muon"}
    };
    if (!tr_check_only(&options, only, sizeof only / sizeof *only, t->err, TR_ERR)) return 0;
    if (!tr_lm_divides(t, "nheads", "hid-sz")) return 0;
    if (opt.eval_positions % opt.lm.block_sz)
        return tr_fail(t->err, TR_ERR,
                       "--eval-positions: expected a multiple of --block-sz %" PRIu64
                       ", got %" PRIu64, opt.lm.block_sz, opt.eval_positions);
    if (opt.compress == STX_COMP_COMPRESS_DROP && (cmem || cmems))
        return tr_fail(t->err, TR_ERR,
                       "--cmem, --cmems: --compress none has no compressed memory: leave them out, "
                       "or choose another --compress");
    return describe((run *)t, 1);
}

/* Sets the length of the run, the steps at which it logs, evaluates and saves, and the
   learning-rate schedule. */
TR_DEF void plan(tr_lm *t) {
    tr_lm_plan(t, 1000, schedule_kinds[opt.lm.schedule]);
    t->eval_window = opt.eval_mem >= 0 || opt.eval_cmem >= 0;      /* see state_create */
}

/* Sets and checks the memory capacities for evaluation and generation. */
TR_DEF int eval_sizes(run *r) {
    const stx_comp *m = r->model;
    const double B = (double)tr_lm_eval_batch(&r->t), gib = 1 << 30;
    const double limit = (double)stx_ctx_desc(r->t.x)->max_bytes;
    size_t l, mems = 0, cmems = 0, most_M = 0, most_C = 0;
    double need = 0;
    for (l = 0; l < opt.nlayers; l++) {
        const stx_comp_layer *p = &m->layer[l];
        const size_t M = !p->memory || opt.eval_mem < 0 ? p->M : (size_t)opt.eval_mem;
        const size_t C = !p->C || opt.eval_cmem < 0 ? p->C : (size_t)opt.eval_cmem;
        r->eval_mems[l] = M;
        r->eval_cmems[l] = C;
        mems += p->memory;
        cmems += p->C > 0;
        need += B * (double)opt.hid_sz * ((double)M + (double)C) * sizeof(stx_real);
        most_M = STX_MAX(most_M, M);
        most_C = STX_MAX(most_C, C);
    }
    if (opt.eval_mem > 0 && !mems)
        return tr_fail(r->t.err, TR_ERR, "--eval-mem %d: no layer of this model has a memory",
                       opt.eval_mem);
    if (opt.eval_cmem > 0 && !cmems)
        return tr_fail(r->t.err, TR_ERR, "--eval-cmem %d: this model has no compressed memory",
                       opt.eval_cmem);
    if ((m->desc.literal & STX_COMP_LITERAL_ROWS)
        && opt.lm.block_sz + most_M + most_C > m->key_pe->dim[0])
        return tr_fail(r->t.err, TR_ERR,
                       "--eval-mem, --eval-cmem: with --literal rows, expected no more rows than "
                       "in training, got %zu and %zu", most_M, most_C);
    if (limit > 0 && need > limit)
        return tr_fail(r->t.err, TR_ERR,
                       "--eval-mem, --eval-cmem: memories of %zu and %zu rows require %.3g GiB, "
                       "but --max-memory allows %.3g GiB: use smaller memories, or a smaller "
                       "--eval-batch-sz", most_M, most_C, need / gib, limit / gib);
    return 1;
}
