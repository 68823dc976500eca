/* train_sru.c - trains, evaluates and samples from SRU and SRU++ models

       cc -O3 -pthread train_sru.c -lm -o train_sru
       ./train_sru --data FILE --steps 2000 --checkpoint run.safetensors
       ./train_sru --help

   The training loop is in step() and train() below. The options are in sru/, with the
   model that they describe and their checks. Option parsing, text input, checkpoints,
   logging and terminal output come from train.h, which all trainers share. */
#define TR_LM
#include "train.h"
#define SEQTX_IMPLEMENTATION
#include "../seqtx_sru.h"
#include "../seqtx_text.h"
#include "sru/options.h"
#include "sru/model.h"
#include "sru/checks.h"


// >>run: the state of a run

typedef struct run {
    tr_lm           t;      /* context, text, optimiser, log and more: see train.h */
    stx_sru_lm_desc desc;
    stx_sru_lm     *model;
} run;


// >>training

enum { METRIC_LOSS };       /* mean loss of an update, in nats per token */

/* One update: a forward and a backward pass over each block, which accumulate gradients,
   then an optimiser step. Everything that changes between updates is read from t.in,
   t.out and the optimiser's learning rate, so that a GPU can replay the step
   (stx_step_run). */
static void step(void *user) {
    run *r = (run *)user;
    stx_ctx *x = r->t.x;
    const size_t parts = opt.lm.batch_split, blocks = parts * opt.update_param_freq;
    const double share = 1.0 / (double)blocks;
    const double scale = opt.sum_loss ? share * (double)opt.lm.block_sz : share;
    size_t i;
    for (i = 0; i < blocks; i++) {
        stx_sru_state *state = (stx_sru_state *)r->t.state[i % parts];
        stx_tensor *loss;
        stx_begin_part(x, i % parts);
        loss = stx_sru_lm_loss(r->model, r->t.in[i], r->t.out[i], state, state);
        stx_metric_set(x, METRIC_LOSS, loss, share, i > 0);
        if (i + 1 == blocks) stx_group_overlap(r->t.optim);
        stx_backward(x, stx_scale(x, loss, scale));
    }
    stx_optim_step(r->t.optim, r->t.lr);
}

/* Reads the blocks (B,T) of the next update, in order. If the rest of the text is too
   short for an update, the next epoch starts at the beginning of the text with empty
   states, as in the authors' code (without --streams). */
static int next_update(tr_lm *t) {
    stx_batches *b = t->batches;
    stx_batches_state at = stx_batches_get(b);
    const size_t T = opt.lm.block_sz, tokens = opt.lm.batch_sz * T;
    const int fresh = at.fresh || at.p + opt.update_param_freq * T >= stx_batches_stream(b);
    size_t i;
    if (t->groups > 1) return tr_lm_next(t);
    if (fresh && at.p) {
        if (!at.fresh) at.wraps++;
        at.p = 0;
        at.fresh = 1;
        if (!stx_batches_set(b, at)) return STX_BATCH_END;
    }
    for (i = 0; i < opt.update_param_freq; i++) {
        int got = stx_batches_next(b, t->tokens + i * tokens, t->targets + i * tokens);
        if (got == STX_BATCH_END) return STX_BATCH_END;
    }
    return fresh ? STX_BATCH_FRESH : STX_BATCH_OK;
}

static void train(tr_lm *t) {
    while (tr_lm_more(t)) {
        int fresh = next_update(t);
        uint64_t key;
        if (fresh == STX_BATCH_END) break;
        key = tr_lm_batch(t, fresh == STX_BATCH_FRESH);

        t->lr = tr_lm_rate(t);
        stx_optim_set_lr(t->optim, t->lr);
        tr_lm_step(t, key, step, t);
        if (!tr_lm_stepped(t, stx_metric_get(t->x, METRIC_LOSS))) break;

        if (tr_lm_log_due(t)) {
            tr_log_int(&t->log, "skipped", t->optim->skipped);
            tr_lm_logged(t);
        }
        if (!tr_lm_evaluate_and_save(t)) break;
    }
}

/* Prints each layer's learned attention weight at the end of a run. */
static void print_alpha(const tr_lm *t, FILE *out) {
    const run *r = (const run *)t;
    size_t l, count = 0;
    for (l = 0; l < opt.nlayers; l++) {
        const stx_sru_layer *layer = &r->model->sru->layer[l];
        stx_real alpha;
        if (!layer->attends) continue;
        stx_get(t->x, layer->alpha_attn, &alpha);
        fprintf(out, "%s%.3f (layer %zu)", count++ ? ", " : "learned weight of attention: ",
                (double)alpha, l + 1);
    }
    if (count) fprintf(out, "\n");
}


// >>main

/* Creates the model and, for training, the optimiser. */
static int make(tr_lm *t) {
    run *r = (run *)t;
    stx_optim_desc od = tr_lm_optim_desc(t, optim_kinds[opt.lm.optim]);
    if (!describe(t, &r->desc, stx_vocab_size(t->vocab))) return 0;
    if (!tr_lm_fits(t, (double)stx_sru_lm_count(&r->desc))) return 0;
    r->model = stx_sru_lm_create(t->x, &r->desc);
    t->lm = stx_sru_as_lm(r->model);
    if (!r->model || !t->training) return stx_ok(t->x) ? 1 : report_error(t);

    od.radam_skip = opt.radam_skip;
    /* adagrad has no weight decay: ignore a preset's value */
    if (od.kind == STX_ADAGRAD && !tr_given(&options, "weight-decay")) od.weight_decay = 0;
    return tr_lm_make(t, &od, opt.update_param_freq);
}

/* Settings by size of the text and processor seconds (docs/quality.md). Attention does
   not help such small models and texts. */
#define SMALL "optim=muon lr=0.01 batch-sz=8 no-attention "
static const tr_lm_sized sized[] = {
    {2e4, 0, SMALL "nlayers=2 hid-sz=64 dropout=0.3"},
    {2e5, 0, SMALL "nlayers=3 hid-sz=128 dropout=0.2"},
    {2e6, 40, SMALL "hid-sz=192"},
    {2e6, 200, SMALL "hid-sz=256"},
    {2e6, 400, SMALL "hid-sz=256 dropout=0.05"},
    {2e6, 1000, SMALL "hid-sz=384 dropout=0.05"},
    {2e6, 0, SMALL "hid-sz=384 dropout=0.1"},
    {0, 40, SMALL "hid-sz=192"},
    {0, 200, SMALL "hid-sz=256"},
    {0, 1000, SMALL "hid-sz=384 batch-sz=16"},
    {0, 0, "optim=muon lr=0.01 batch-sz=16 hid-sz=512"},
    {0, 0, NULL}
};

/* For the adaptive softmax, words are sorted by count, with <eos> first, as in the
   authors' code. */
static const tr_lm_kind kind = {
    "seqtx.sru.1", "state", &opt.adapt_io, &opt.cutoffs, STX_ORDER_COUNT_EARLIER, 1,
    sized, 2e7,
    check, plan, count, shape, make, train, print_alpha, sizeof(run)
};

int main(int argc, char **argv) {
    static run r;
    return tr_lm_main(&r.t, &kind, &options, &opt.lm, NULL, argc, argv);
}
