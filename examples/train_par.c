/* train_par.c - trains, searches, evaluates and samples from Transformer-XL and PAR

       cc -O3 -pthread train_par.c -lm -o train_par

   A Transformer-XL of four layers:
       ./train_par --data FILE --pattern "(sf)4" --checkpoint xl.st

   The next three commands search among 3^8 block orders, print the patterns that the
   search found, and train a network with one of these patterns, starting from the
   weights of the search:
       ./train_par --data FILE --pattern search --nlayers 8 --checkpoint search.st
       ./train_par --checkpoint search.st --derive
       ./train_par --data FILE --pattern sffsffff --inherit search.st

       ./train_par --help

   The training loop is in step() and train() below. The folder par/ has the options, the
   model that they describe, their checks, the state of a run, the search, and what is
   printed at the end. Option parsing, text input, checkpoints, logging and terminal
   output come from train.h, which all trainers share. */
#define TR_LM
#include "train.h"
#define SEQTX_IMPLEMENTATION
#include "../seqtx_par.h"
#include "../seqtx_text.h"
#include "par/presets.h"
#include "par/options.h"
#include "par/patterns.h"
#include "par/run.h"
#include "par/model.h"
#include "par/checks.h"
#include "par/search.h"
#include "par/timing.h"
#include "par/race.h"
#include "par/derive.h"
#include "par/picture.h"
#include "par/report.h"
#include "par/checkpoint.h"


// >>training

enum { METRIC_LOSS };       /* mean loss of a step, in nats per token */

/* One step: a forward and a backward pass over a segment, and the updates that are due.
   Everything that changes between steps is read from t.in, t.out, the temperature and
   the optimisers' learning rates, so that a GPU can replay the step (stx_step_run).
   The batch is processed in parts, whose gradients are accumulated. */
static void step(void *user) {
    run *r = (run *)user;
    stx_ctx *x = r->t.x;
    void **state = r->gates_only ? r->gate_state : r->t.state;
    size_t part, parts = opt.lm.batch_split;
    double each = 1.0 / (double)parts;
    for (part = 0; part < parts; part++) {
        stx_par_state *memory = (stx_par_state *)state[part];
        stx_tensor *loss, *total;
        stx_begin_part(x, part);
        loss = stx_par_loss(r->model, r->t.in[part], r->t.out[part], memory, memory);
        stx_metric_set(x, METRIC_LOSS, loss, each, part > 0);
        total = stx_scale(x, stx_par_total(r->model, loss), each * r->t.share);
        if (r->t.update && part + 1 == parts) stx_group_overlap(r->t.optim);
        stx_backward(x, total);
    }
    if (r->t.update) stx_optim_step(r->t.optim, r->t.lr);
    if (r->gates_learn) stx_optim_step(r->arch, r->arch_lr);
    if (r->gates_only) stx_params_zero_grad(stx_par_params(r->model));
}

/* Returns the learning rate of the next step. The reference's schedule is the minimum of
   a linear ramp from 0 and a cosine. */
static double rate(const tr_lm *t) {
    const tr_lm_place p = tr_lm_placed(t, t->step + 1);
    const double n = p.at - 1, warmup = p.warmup, falling = p.total - warmup, since = n - warmup;
    double ramp = opt.lm.lr, cosine = opt.lm.lr;
    if (opt.lm.schedule != LR_REFERENCE) return tr_lm_rate(t);
    if (warmup > 0) ramp = opt.lm.lr * n / warmup;
    if (since > 0)
        cosine = falling > 0 ? 0.5 * opt.lm.lr * (1 + cos(3.1415927 * since / falling)) : 0;
    return ramp < cosine ? ramp : cosine;
}

/* Logs the temperature, the expected time and the probabilities of each block, as a
   list and as curves. For a fixed network, the list of probabilities is empty. */
static void log_search(run *r, double tau) {
    static const char *const branch[3] = {"attention", "feed-forward", "identity"};
    double *p = r->arch ? (double *)malloc(3 * r->blocks * sizeof *p) : NULL;
    double time = (double)NAN;
    char text[64];
    size_t i;
    if (p && !stx_par_probs(r->model, p)) {
        free(p);
        return;
    }
    if (r->desc.cost[0] > 0) time = p ? expected_time(r, p) : pattern_time(r, r->pattern);
    tr_log_num(&r->t.log, "tau", r->arch ? tau : (double)NAN);
    tr_log_num(&r->t.log, "latency", time);

    tr_log_list(&r->t.log, "pi");
    for (i = 0; p && i < 3 * r->blocks; i++) {
        tr_number(text, p[i]);
        tr_log_item(&r->t.log, text);
        snprintf(text, sizeof text, "search/%s_block_%zu", branch[i % 3], i / 3 + 1);
        tr_lm_point(&r->t, text, p[i]);
    }
    tr_log_list_end(&r->t.log);
    if (p) tr_lm_point(&r->t, "search/tau", tau);
    if (p && time > 0) tr_lm_point(&r->t, "search/latency", time);
    free(p);
}

static void train(tr_lm *t) {
    run *r = (run *)t;
    if (r->arch) cool(r);
    while (tr_lm_more(t)) {
        double tau = r->tau;
        uint64_t key;
        int fresh;
        plan_step(r);
        key = next_batch(r, &fresh);
        if (fresh == STX_BATCH_END) break;

        t->lr = rate(t);
        stx_optim_set_lr(t->optim, t->lr);
        if (r->arch) {
            r->arch_lr = opt.arch_optim == ARCH_SAME ? t->lr : opt.arch_lr;
            stx_optim_set_lr(r->arch, r->arch_lr);
            stx_par_freeze(r->model, !r->gates_learn);
        }
        key = stx_key_add(key, (uint64_t)(2 * r->gates_only + r->gates_learn));
        tr_lm_step(t, key, step, r);
        if (r->gates_learn && !stx_optim_sync(r->arch) && r->gates_only && stx_ok(t->x)) {
            /* the update was skipped: the memory may contain the values that made the
               loss infinite */
            size_t part;
            for (part = 0; part < t->parts; part++) t->lm.state_reset(r->gate_state[part]);
        }
        if (!tr_lm_stepped(t, stx_metric_get(t->x, METRIC_LOSS))) break;
        if (r->arch) cool(r);

        if (tr_lm_log_due(t)) {
            log_search(r, tau);
            tr_lm_logged(t);
        }
        if (!tr_lm_evaluate_and_save(t)) break;
    }
}


// >>main

/* Returns the optimiser of the weights. */
static stx_optim_desc optim_desc(const tr_lm *t) {
    stx_optim_desc d = tr_lm_optim_desc(t, optim_kinds[opt.lm.optim]);
    d.clip_value = opt.clip_value;
    d.eps = opt.eps;
    d.eps_hat = opt.eps_hat;
    if (d.kind == STX_LAMB) {       /* as in NVIDIA's implementation */
        d.trust_max = 10;
        d.no_correction = 1;
    }
    return d;
}

/* Creates the model and, for training, the optimisers. */
static int make(tr_lm *t) {
    run *r = (run *)t;
    stx_optim_desc od = optim_desc(t);
    if (!describe(r, stx_vocab_size(t->vocab))) return 0;
    if (!tr_lm_fits(t, (double)stx_par_count(&r->desc))) return 0;
    if (!fill_table(r)) return *t->err || stx_ok(t->x) ? 0 : tr_lm_why(t);
    if (r->desc.latency == STX_PAR_LATENCY_FBNET && !(xl_time(r) > 1))
        return tr_fail(t->err, TR_ERR,
                       "--latency fbnet: expected a Transformer-XL time above 1, so that its "
                       "logarithm is positive, got %g: use a --latency-table in a smaller unit",
                       xl_time(r));

    r->model = stx_par_create(t->x, &r->desc);
    if (!r->model) return report_error(t);
    t->lm = stx_par_as_lm(r->model);
    t->lm.state_create = state_create;
    t->lm.gen_create = gen_create;
    if (opt.eval_mem > 0 && !eval_fits(r)) return 0;
    if (r->model->gates) {
        t->save_more = save_more;
        t->load_more = load_more;
        t->whole_pass = opt.gate_eval == STX_PAR_EVAL_NOISE && opt.noise != STX_PAR_NOISE_STEP;
    }
    if (!t->training) return stx_ok(t->x) ? 1 : report_error(t);
    if (!inherit(r) || !tr_lm_make(t, &od, 1)) return 0;
    return !r->model->gates || make_search(r, &od);
}

/* Settings by size of the text and processor seconds (docs/quality.md). */
#define SMALL "optim=muon lr=0.004 batch-sz=8 "
static const tr_lm_sized sized[] = {
    {2e4, 0, SMALL "nlayers=4 hid-sz=48 dropout=0.3"},
    {2e5, 0, SMALL "nlayers=4 hid-sz=64 dropout=0.2"},
    {2e6, 40, SMALL "hid-sz=64"},
    {2e6, 100, SMALL "hid-sz=96"},
    {2e6, 200, SMALL "hid-sz=128"},
    {2e6, 400, SMALL "hid-sz=128 dropout=0.05"},
    {2e6, 0, SMALL "hid-sz=128 dropout=0.1"},
    {0, 40, SMALL "hid-sz=64"},
    {0, 100, SMALL "hid-sz=96"},
    {0, 1000, SMALL "hid-sz=128"},
    {0, 0, "optim=muon lr=0.003 batch-sz=16 nlayers=8 hid-sz=192"},
    {0, 0, NULL}
};

static const tr_lm_kind kind = {
    "seqtx.par.1", "memory", &opt.words_out, NULL, STX_ORDER_COUNT_EARLIER, 1,
    sized, 5e6,
    check, plan, count, shape, make, train, report, sizeof(run)
};

int main(int argc, char **argv) {
    static run r;
    return tr_lm_main(&r.t, &kind, &options, &opt.lm, &opt.derive, argc, argv);
}
