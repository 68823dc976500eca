/* train_attn_span.c - trains, evaluates and samples from a Sequential Transformer

       cc -O3 -pthread train_attn_span.c -lm -o train_attn_span
       ./train_attn_span --data FILE --steps 2000 --checkpoint run.safetensors
       ./train_attn_span --help

   The training loop is in step() and train() below. The options are in attn_span/, with
   the model that they describe and their checks. Option parsing, text input, checkpoints,
   logging and terminal output come from train.h, which all trainers share. */
#define TR_LM
#include "train.h"
#define SEQTX_IMPLEMENTATION
#include "../seqtx_attn_span.h"
#include "../seqtx_text.h"
#include "attn_span/options.h"
#include "attn_span/model.h"
#include "attn_span/checks.h"


// >>run: the state of a run

typedef struct run {
    tr_lm         t;        /* context, text, optimiser, log and more: see train.h. Must be
                               first, because train.h passes a pointer to it */
    stx_span_desc desc;
    stx_span     *model;
} run;


// >>training

enum { METRIC_LOSS };       /* mean loss of a step in nats per token, without span penalty */

/* One step: a forward pass, a backward pass and an update. Everything that changes
   between steps is read from t.in, t.out and t.lr, so that a GPU can replay the step
   (stx_step_run; train() sets the learning rate of replays). The batch is processed in
   parts, whose gradients are accumulated. */
static void step(void *user) {
    run *r = (run *)user;
    stx_ctx *x = r->t.x;
    size_t part, parts = opt.lm.batch_split;
    for (part = 0; part < parts; part++) {
        stx_span_state *memory = (stx_span_state *)r->t.state[part];
        stx_tensor *loss, *total;
        stx_begin_part(x, part);
        loss = stx_span_loss(r->model, r->t.in[part], r->t.out[part], memory, memory);
        stx_metric_set(x, METRIC_LOSS, loss, 1.0 / (double)parts, part > 0);
        total = stx_scale(x, stx_span_total(r->model, loss), 1.0 / (double)parts);
        /* In the last part, gradients are sent to the other ranks as soon as they are
           final, while the backward pass continues. */
        if (part + 1 == parts) stx_group_overlap(r->t.optim);
        stx_backward(x, total);
    }
    stx_optim_step(r->t.optim, r->t.lr);
    stx_span_clamp(r->model);
}

/* Logs the span of each head (of each layer with --span-per-layer), without the ramp,
   as a list in the log and as TensorBoard curves. The log's span_avg and span_max
   include the ramp. */
static void log_spans(run *r) {
    size_t l, head, heads = opt.span_per_layer ? 1 : (size_t)opt.nheads;
    char text[64];
    tr_log_list(&r->t.log, "spans");
    for (l = 0; opt.adapt_span && l < opt.nlayers; l++) {
        for (head = 0; head < heads; head++) {
            double span = stx_span_head_span(r->model, l, head);
            snprintf(text, sizeof text, "%.4g", span);
            tr_log_item(&r->t.log, text);
            snprintf(text, sizeof text, "span/layer_%zu_head_%zu", l + 1, head + 1);
            tr_lm_point(&r->t, text, span);
        }
    }
    tr_log_list_end(&r->t.log);
}

/* Trains until the last step or a signal, and logs, evaluates and saves when due. */
static void train(tr_lm *t) {
    run *r = (run *)t;
    while (tr_lm_more(t)) {
        int status = tr_lm_next(t);
        uint64_t key;
        if (status == STX_BATCH_END) break;
        /* sets t.in and t.out (stx_tokens_set), and resets the memories if the block does
           not continue the previous one */
        key = tr_lm_batch(t, status == STX_BATCH_FRESH);

        t->lr = tr_lm_rate(t);
        stx_optim_set_lr(t->optim, t->lr); /* for replays, which do not run step() */
        tr_lm_step(t, key, step, r);
        if (!tr_lm_stepped(t, stx_metric_get(t->x, METRIC_LOSS))) break;

        if (tr_lm_log_due(t)) {
            double span_avg, span_max;
            stx_span_stats(r->model, &span_avg, &span_max);
            tr_log_num(&t->log, "span_avg", span_avg);
            tr_log_num(&t->log, "span_max", span_max);
            log_spans(r);
            tr_lm_logged(t);
            tr_lm_point(t, "span/avg", span_avg);
            tr_lm_point(t, "span/max", span_max);
        }
        if (!tr_lm_evaluate_and_save(t)) break;
    }
}

/* Prints the learned spans at the end of a run. */
static void print_spans(const tr_lm *t, FILE *out) {
    const run *r = (const run *)t;
    size_t l, head, heads = opt.span_per_layer ? 1 : (size_t)opt.nheads;
    if (!opt.adapt_span) return;
    fprintf(out,
            "learned span of each %s in tokens (at most %llu), without the ramp of %g tokens\n",
            opt.span_per_layer ? "layer" : "head", (unsigned long long)opt.attn_span,
            opt.adapt_span_ramp);
    for (l = 0; l < opt.nlayers; l++) {
        fprintf(out, "  layer %2zu ", l + 1);
        for (head = 0; head < heads; head++)
            fprintf(out, " %6.0f", stx_span_head_span(r->model, l, head));
        fprintf(out, "\n");
    }
}


// >>main

/* Creates the model and, for training, the optimiser. */
static int make(tr_lm *t) {
    run *r = (run *)t;
    stx_optim_desc od = tr_lm_optim_desc(t, optim_kinds[opt.lm.optim]);
    if (!describe(t, &r->desc, stx_vocab_size(t->vocab))) return 0;
    if (!tr_lm_fits(t, (double)stx_span_count(&r->desc))) return 0;
    r->model = stx_span_create(t->x, &r->desc);
    t->lm = stx_span_as_lm(r->model);
    if (!stx_ok(t->x)) return report_error(t);
    return !t->training || tr_lm_make(t, &od, 1 /* block per update */);
}

/* Settings by size of the text and processor seconds (docs/quality.md). */
#define SMALL "optim=muon lr=0.004 batch-sz=8 "
static const tr_lm_sized sized[] = {
    {2e4, 0, SMALL "nlayers=2 hid-sz=48 attn-span=128 dropout=0.3"},
    {2e5, 0, SMALL "nlayers=2 hid-sz=64 attn-span=128 dropout=0.2"},
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
    "seqtx.attn_span.1",                /* format of checkpoints */
    "memory",                           /* prefix of the memory in checkpoints */
    &opt.adapt_io, &opt.adapt_io_cutoffs,
    STX_ORDER_COUNT_LATER,              /* order of token ids with --adapt-io */
    0,                                  /* eos_first */
    sized, 5e6,
    check, plan, count, shape, make, train, print_spans, sizeof(run)
};

int main(int argc, char **argv) {
    static run r;
    return tr_lm_main(&r.t, &kind, &options, &opt.lm, &opt.full_eval, argc, argv);
}
