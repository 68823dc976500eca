/* train_compressive.c - trains, evaluates and samples from the Compressive Transformer

       cc -O3 -pthread train_compressive.c -lm -o train_compressive
       ./train_compressive --data FILE --steps 2000 --checkpoint run.safetensors
       ./train_compressive --help

   The training loop is in step() and train() below. The folder compressive/ has the
   options, the model that they describe, their checks, the state of a run, and what is
   printed at its end. Option parsing, text input, checkpoints, logging and terminal
   output come from train.h, which all trainers share. */
#define TR_LM
#include "train.h"
#define SEQTX_IMPLEMENTATION
#include "../seqtx_compressive.h"
#include "../seqtx_text.h"
#include "compressive/options.h"
#include "compressive/run.h"
#include "compressive/model.h"
#include "compressive/checks.h"
#include "compressive/results.h"


// >>training

/* Metrics of a step: the mean loss in nats per token, then the compression loss and
   rel_error of each reported layer. */
enum { METRIC_LOSS, METRIC_AUX };

static int metric_aux(size_t i) {
    return METRIC_AUX + 2 * (int)i;
}

static int metric_rel_error(size_t i) {
    return metric_aux(i) + 1;
}

/* Records the metrics of one part of the batch. For a layer that evicted nothing, the
   compression loss and rel_error are 0. */
static void note_part(run *r, stx_tensor *loss, double share, int add) {
    stx_ctx *x = r->t.x;
    size_t i;
    stx_metric_set(x, METRIC_LOSS, loss, share, add);
    for (i = 0; i < r->reports; i++) {
        stx_tensor *aux = r->model->aux[r->reported[i].layer];
        stx_tensor *rel_error = r->model->rel_error[r->reported[i].layer];
        stx_metric_set(x, metric_aux(i), aux ? aux : loss, aux ? share : 0, add);
        stx_metric_set(x, metric_rel_error(i), rel_error ? rel_error : loss,
                       rel_error ? share : 0, add);
    }
}

/* One step: a forward and a backward pass over a segment, and an update if it is due.
   Everything that changes between steps is read from t.in, t.out and the optimiser's
   learning rate, so that a GPU can replay the step (stx_step_run). Gradients are
   accumulated over the parts of the batch, and over steps without an update. */
static void step(void *user) {
    run *r = (run *)user;
    stx_ctx *x = r->t.x;
    const size_t parts = opt.lm.batch_split;
    const double share = 1.0 / (double)parts;
    size_t part;
    for (part = 0; part < parts; part++) {
        stx_comp_state *memory = (stx_comp_state *)r->t.state[part];
        stx_tensor *loss, *total;
        stx_begin_part(x, part);
        loss = stx_comp_loss(r->model, r->t.in[part], r->t.out[part], NULL, memory, memory);
        note_part(r, loss, share, part > 0);
        total = stx_scale(x, stx_comp_total(r->model, loss), share * r->t.share);
        if (r->t.update && part + 1 == parts) stx_group_overlap(r->t.optim);
        stx_backward(x, total);
    }
    if (r->t.update) stx_optim_step(r->t.optim, r->t.lr);
}

/* Reads the compression losses of the last step. With several ranks, the loss is the
   mean over the ranks, and rel_error is the ratio of two sums over the ranks: a rank's
   sum of (target - got)^2 is proportional to its loss, and its sum of target^2 to loss /
   rel_error. */
static void read_compression(run *r) {
    const int ranks = tr_lm_ranks(&r->t);
    double sums[2 * MAX_LAYERS];
    size_t i;
    for (i = 0; i < r->reports; i++) {
        const double loss = stx_metric_get(r->t.x, metric_aux(i));
        const double rel_error = stx_metric_get(r->t.x, metric_rel_error(i));
        r->reported[i].loss = sums[2 * i] = loss;
        r->reported[i].rel_error = rel_error;
        sums[2 * i + 1] = rel_error > 0 ? loss / rel_error : 0;
    }
    if (ranks < 2 || !stx_group_sum(r->t.x, sums, 2 * r->reports)) return;
    for (i = 0; i < r->reports; i++) {
        const double errors = sums[2 * i], squares = sums[2 * i + 1];
        r->reported[i].loss = errors / ranks;
        r->reported[i].rel_error = squares > 0 ? errors / squares : 0;
    }
}

/* Logs the loss, or rel_error, of each reported layer: as a list, and as one
   TensorBoard curve per layer. */
static void log_list(run *r, const char *name, const char *curve, int rel_error) {
    char text[64];
    size_t i;
    tr_log_list(&r->t.log, name);
    for (i = 0; i < r->reports; i++) {
        const compression *c = &r->reported[i];
        const double value = rel_error ? c->rel_error : c->loss;
        tr_number(text, value);
        tr_log_item(&r->t.log, text);
        snprintf(text, sizeof text, "compression/%s_layer_%zu", curve, c->layer + 1);
        tr_lm_point(&r->t, text, value);
    }
    tr_log_list_end(&r->t.log);
}

static void log_compression(run *r) {
    read_compression(r);
    log_list(r, "aux", "loss", 0);
    log_list(r, "ratio", "ratio", 1);
}

/* When a run resumes, restores the `frozen` flags of the layers that --literal freeze had
   frozen, because the checkpoint does not store them. A layer freezes at its first
   compression, once M / S segments of the same streams have filled its M-row memory. */
static void restore_frozen(run *r) {
    const size_t S = opt.lm.block_sz;
    size_t l, segments = stx_batches_stream(r->t.batches) / S;     /* segments between two memory
                                                                      resets */
    if (!(r->model->desc.literal & STX_COMP_LITERAL_FREEZE)) return;
    if (opt.lm.random_segments) segments = (size_t)opt.lm.random_segments;
    for (l = 0; l < opt.nlayers; l++) {
        stx_comp_layer *p = &r->model->layer[l];
        p->frozen = p->C && r->t.step > p->M / S * r->t.groups && segments > p->M / S;
    }
}

static void train(tr_lm *t) {
    run *r = (run *)t;
    restore_frozen(r);
    while (tr_lm_more(t)) {
        int fresh = tr_lm_next(t);
        uint64_t key;
        if (fresh == STX_BATCH_END) break;
        key = tr_lm_batch(t, fresh == STX_BATCH_FRESH);

        t->lr = tr_lm_rate(t);
        stx_optim_set_lr(t->optim, t->lr);
        tr_lm_step(t, key, step, r);
        if (!tr_lm_stepped(t, stx_metric_get(t->x, METRIC_LOSS))) break;

        if (tr_lm_log_due(t)) {
            log_compression(r);
            tr_lm_logged(t);
        }
        if (!tr_lm_evaluate_and_save(t)) break;
    }
    if (stx_ok(t->x)) read_compression(r);
}


// >>main

static run this_run;

/* The functions state_create and gen_create of stx_lm. `window` is 1 in evaluation and
   generation if --eval-mem or --eval-cmem is given (see plan). */
static void *state_create(void *m, size_t B, size_t window) {
    if (!window) return stx_comp_state_create((stx_comp *)m, B);
    return stx_comp_state_create_sized((stx_comp *)m, B, this_run.eval_mems, this_run.eval_cmems);
}

static void *gen_create(void *m, size_t B, size_t window) {
    if (!window) return stx_comp_gen_create((stx_comp *)m, B);
    return stx_comp_gen_create_sized((stx_comp *)m, B, this_run.eval_mems, this_run.eval_cmems);
}

/* Finds the layers whose compression has a loss. */
static int report_layers(run *r) {
    const stx_comp *m = r->model;
    const int aux = m->desc.aux;
    size_t l;
    if (!m->A && tr_given(&options, "aux") && opt.aux != STX_COMP_AUX_AUTO
        && opt.aux != STX_COMP_AUX_NONE)
        return tr_fail(r->t.err, TR_ERR,
                       "--aux: no layer has a compressed memory to train: check --memory-layers, "
                       "--mem and --cmem");
    if (aux != STX_COMP_AUX_ATTENTION && aux != STX_COMP_AUX_AUTOENCODE) return 1;
    for (l = 0; l < opt.nlayers && metric_rel_error(r->reports) < STX_MAX_METRICS; l++)
        if (m->layer[l].C) r->reported[r->reports++].layer = l;
    return 1;
}

/* Creates the model and, for training, the optimiser. */
static int make(tr_lm *t) {
    run *r = (run *)t;
    stx_optim_desc od = tr_lm_optim_desc(t, optim_kinds[opt.lm.optim]);
    if (!describe(r, stx_vocab_size(t->vocab))) return 0;
    if (!tr_lm_fits(t, (double)stx_comp_count(&r->desc))) return 0;
    r->model = stx_comp_create(t->x, &r->desc);
    if (!r->model) return report_error(t);
    t->lm = stx_comp_as_lm(r->model);
    t->lm.state_create = state_create;
    t->lm.gen_create = gen_create;
    if (!eval_sizes(r) || !report_layers(r)) return 0;
    if (!t->training) return stx_ok(t->x) ? 1 : report_error(t);
    return tr_lm_make(t, &od, 1);
}

static const int no_adapt_io = 0;

/* Settings by size of the text and processor seconds (docs/quality.md). */
#define SMALL "optim=muon lr=0.004 batch-sz=8 "
static const tr_lm_sized sized[] = {
    {2e4, 0, SMALL "nlayers=2 hid-sz=48 dropout=0.3"},
    {2e5, 0, SMALL "nlayers=2 hid-sz=64 dropout=0.2"},
    {2e6, 40, SMALL "hid-sz=64"},
    {2e6, 100, SMALL "hid-sz=96"},
    {2e6, 200, SMALL "hid-sz=128"},
    {2e6, 400, SMALL "hid-sz=128 dropout=0.05"},
    {2e6, 0, SMALL "hid-sz=128 dropout=0.1"},
    {0, 40, SMALL "hid-sz=64"},
    {0, 100, SMALL "hid-sz=96"},
    {0, 1000, SMALL "hid-sz=128"},
    {0, 0, "optim=muon lr=0.003 batch-sz=16 nlayers=4 hid-sz=192"},
    {0, 0, NULL}
};

static const tr_lm_kind kind = {
    "seqtx.compressive.1", "memory", &no_adapt_io, NULL, STX_ORDER_FIRST, 0,
    sized, 5e6,
    check, plan, count, shape, make, train, print_results, sizeof(run)
};

int main(int argc, char **argv) {
    return tr_lm_main(&this_run.t, &kind, &options, &opt.lm, NULL, argc, argv);
}
