/* train_attn_span.c - trains, evaluates and samples the Sequential Transformer of seqtx_attn_span.h on text.

       cc -O3 -march=native -fopenmp train_attn_span.c -lm -o train_attn_span
       ./train_attn_span --data FILE --steps 2000 --checkpoint run.safetensors
       ./train_attn_span --help

   The training loop is the function train(), in the open; options, data, checkpoints, log and terminal are train.h's. */
#define TR_LM
#include "train.h"
#define SEQTX_IMPLEMENTATION
#include "../seqtx_attn_span.h"

// >>options ----------------------------------------------------------------------------------------------------------

static struct {
    uint64_t nlayers, hid_sz, inner_hid_sz, nheads, attn_span, block_sz, pers_mem_size;
    int adapt_span, adapt_span_cache, adapt_io, adapt_io_tied, literal, recompute;
    double adapt_span_loss, adapt_span_ramp, adapt_span_init, adapt_io_divval, dropout, emb_dropout;
    const char *cutoffs;
    double lr, momentum, grad_clip, lr_min, weight_decay;
    uint64_t lr_warmup, batch_sz, batch_split, niter, nbatches;
    int optim, schedule, full_eval;
    tr_lm_opt lm;
} opt = {
    8, 256, 1024, 2, 32, 64, 0,
    0, 1, 0, 0, 0, 0,
    0, 32, 0, 4, 0.2, 0,
    NULL,
    0.03, 0.9, 0, 0, 0,
    0, 64, 1, 1000, 1000,
    1, 0, 0,
    TR_LM_DEFAULTS
};

static tr_opt table[] = {
    TR_GROUP("Model"),
    TR_SIZE("nlayers", &opt.nlayers, 1, 4096, "layers"),
    TR_SIZE("hid-sz", &opt.hid_sz, 1, 1u << 29, "hidden size d"),
    TR_SIZE("inner-hid-sz", &opt.inner_hid_sz, 1, 1u << 30, "inner size of the feed-forward (unused with --pers-mem-size)"),
    TR_SIZE("nheads", &opt.nheads, 1, 256, "attention heads; must divide --hid-sz"),
    TR_SIZE("attn-span", &opt.attn_span, 1, 1u << 30, "largest attention span, tokens"),
    TR_SIZE("pers-mem-size", &opt.pers_mem_size, 0, 1u << 30, "persistent vectors per head in place of the feed-forward (all-attention)"),
    TR_REAL_OPEN("dropout", &opt.dropout, TR_OPEN_MAX, 0, 1, "on attention weights and inside the feed-forward"),
    TR_REAL_OPEN("emb-dropout", &opt.emb_dropout, TR_OPEN_MAX, 0, 1, "on the embedding and the last hidden state"),
    TR_FLAG("literal", &opt.literal, "the reference's own forms: eps 1e-8 after the softmax, empty memory attended to as zeros"),
    TR_FLAG("recompute", &opt.recompute, "make activations again in backward: less memory, more time"),
    TR_GROUP("Adaptive span"),
    TR_FLAG("adapt-span", &opt.adapt_span, "learn a span for each head"),
    TR_REAL("adapt-span-loss", &opt.adapt_span_loss, 0, 1e6, "weight of the span penalty"),
    TR_REAL("adapt-span-ramp", &opt.adapt_span_ramp, 1, 1e9, "length of the soft end of a span"),
    TR_REAL("adapt-span-init", &opt.adapt_span_init, 0, 1, "first span, as a fraction of --attn-span"),
    TR_FLAG("adapt-span-cache", &opt.adapt_span_cache, "keep only as much memory as the spans need"),
    TR_GROUP("Adaptive input and output"),
    TR_FLAG("adapt-io", &opt.adapt_io, "adaptive embedding and softmax, for large vocabularies"),
    TR_FLAG("adapt-io-tied", &opt.adapt_io_tied, "input and output share tables and projections"),
    TR_REAL_OPEN("adapt-io-divval", &opt.adapt_io_divval, TR_OPEN_MIN, 1, 1e6, "each cluster is this much narrower than the one before"),
    TR_TEXT("adapt-io-cutoffs", &opt.cutoffs, "cluster ends, as 20000,40000,200000 (which is the default)"),
    TR_GROUP("Optimisation"),
    TR_CHOICE("optim", &opt.optim, "adagrad|sgd|adam|adamw", "optimiser"),
    TR_REAL("lr", &opt.lr, 0, 1e6, "learning rate"),
    TR_CHOICE("schedule", &opt.schedule, "constant|cosine|inv-sqrt", "learning rate after the warm-up"),
    TR_SIZE("lr-warmup", &opt.lr_warmup, 0, TR_INF, "updates of linear warm-up"),
    TR_REAL("lr-min", &opt.lr_min, 0, 1e6, "end of the cosine"),
    TR_REAL("momentum", &opt.momentum, 0, 1, "of sgd"),
    TR_REAL("weight-decay", &opt.weight_decay, 0, 1e6, "of sgd, adam (in the gradient) and adamw (decoupled)"),
    TR_REAL("grad-clip", &opt.grad_clip, 0, 1e9, "largest gradient norm: per tensor with adagrad, of all together otherwise; 0: none"),
    TR_SIZE("batch-sz", &opt.batch_sz, 1, 1u << 30, "parallel streams of text"),
    TR_SIZE("batch-split", &opt.batch_split, 1, 1u << 30, "work on the batch in this many parts, one after the other (less memory)"),
    TR_SIZE("block-sz", &opt.block_sz, 1, 1u << 30, "tokens of each stream per step"),
    TR_SIZE("niter", &opt.niter, 1, 1u << 30, "iterations of --nbatches steps"),
    TR_SIZE("nbatches", &opt.nbatches, 1, 1u << 30, "steps per iteration; after each the model is evaluated and saved"),
    TR_SIZE("steps", &opt.lm.steps, 0, TR_INF, "steps in all, instead of niter x nbatches; 0: niter x nbatches"),
    TR_SIZE("seed", &opt.lm.seed, 0, TR_INF, "of initial values, dropout, positions and sampling"),
    TR_LM_DATA(opt.lm),
    TR_LM_SAVING(opt.lm, "--nbatches", "a tenth of --nbatches"),
    TR_FLAG("full-eval-mode", &opt.full_eval, "evaluate on the whole validation and test text as the reference counts them, then stop"),
    TR_LM_RUNNING(opt.lm),
    TR_LM_GENERATION(opt.lm),
    TR_END
};

/* The published experiments (1905.07799, 1907.01470; spec attn_span 3). Fine-tuning, where the papers do it: the same
   command with lr / 10 and a larger --niter. */
#define ADAGRAD "optim=adagrad", "lr=0.07", "grad-clip=0.03", "momentum=0", "adapt-span", "adapt-span-init=0", "adapt-span-ramp=32", "batch-sz=64", "nbatches=1000", "data-unit=bpc"
static const char *const p_enwik8_small[] = {ADAGRAD, "tokens=bytes-compact", "nlayers=8", "hid-sz=256", "inner-hid-sz=1024", "nheads=4", "attn-span=1024", "block-sz=256", "dropout=0", "adapt-span-loss=0.000002", "lr-warmup=8000", "niter=150", NULL};
static const char *const p_enwik8[] = {ADAGRAD, "tokens=bytes-compact", "nlayers=12", "hid-sz=512", "inner-hid-sz=2048", "nheads=8", "attn-span=8192", "block-sz=512", "dropout=0.3", "adapt-span-loss=0.0000005", "lr-warmup=32000", "niter=600", NULL};
static const char *const p_enwik8_large[] = {ADAGRAD, "tokens=bytes-compact", "nlayers=24", "hid-sz=768", "inner-hid-sz=4096", "nheads=8", "attn-span=8192", "block-sz=512", "dropout=0.4", "adapt-span-loss=0.0000005", "lr-warmup=32000", "niter=150", "batch-split=2", NULL};
static const char *const p_text8[] = {ADAGRAD, "tokens=chars", "nlayers=12", "hid-sz=512", "inner-hid-sz=2048", "nheads=8", "attn-span=8192", "block-sz=512", "dropout=0.3", "adapt-span-loss=0.0000005", "lr-warmup=32000", "niter=900", NULL};
static const char *const p_text8_large[] = {ADAGRAD, "tokens=chars", "nlayers=24", "hid-sz=768", "inner-hid-sz=4096", "nheads=8", "attn-span=8192", "block-sz=512", "dropout=0.4", "adapt-span-loss=0.0000005", "lr-warmup=32000", "niter=250", "batch-split=2", NULL};
static const char *const p_enwik8_pers_small[] = {ADAGRAD, "tokens=bytes-compact", "nlayers=18", "hid-sz=512", "inner-hid-sz=1", "nheads=8", "attn-span=8192", "block-sz=512", "dropout=0.3", "adapt-span-loss=0.0000001", "lr-warmup=32000", "niter=450", "batch-split=2", "pers-mem-size=1024", NULL};
static const char *const p_enwik8_pers[] = {ADAGRAD, "tokens=bytes-compact", "nlayers=36", "hid-sz=512", "inner-hid-sz=1", "nheads=8", "attn-span=8192", "block-sz=512", "dropout=0.4", "adapt-span-loss=0.0000001", "lr-warmup=32000", "niter=200", "batch-split=2", "pers-mem-size=2048", NULL};
static const char *const p_wiki103_pers[] = {"tokens=words", "data-unit=ppl", "optim=adam", "lr=0.00025", "grad-clip=1", "momentum=0", "lr-warmup=8000", "nlayers=36", "hid-sz=512", "inner-hid-sz=1", "nheads=8", "attn-span=2048", "block-sz=256", "batch-sz=64", "batch-split=2", "dropout=0.3", "emb-dropout=0.1", "adapt-span", "adapt-span-init=0", "adapt-span-ramp=32", "adapt-span-loss=0.0000005", "pers-mem-size=2048", "adapt-io", "adapt-io-tied", "adapt-io-divval=4", "nbatches=1000", "niter=800", NULL};
static const char *const p_demo[] = {"tokens=bytes", "nlayers=3", "hid-sz=128", "inner-hid-sz=512", "nheads=4", "attn-span=256", "block-sz=64", "batch-sz=16", "dropout=0", "adapt-span", "adapt-span-loss=0.000002", "adapt-span-init=0.06", "optim=adam", "lr=0.003", "schedule=cosine", "lr-warmup=60", "grad-clip=1", "steps=4800", "nbatches=1200", "eval-blocks=20", "log-every=100", NULL};
static const tr_preset presets[] = {
    {"demo", "a small byte model that learns in two minutes on two cores (make demo)", p_demo},
    {"enwik8_small", "6.5M parameters, 8 layers, span 1024: published dev ~1.3 bpc", p_enwik8_small},
    {"enwik8", "38.5M parameters, 12 layers, span 8192: published test 1.02 bpc", p_enwik8},
    {"enwik8_large", "209M parameters, 24 layers: published test 0.98 bpc", p_enwik8_large},
    {"text8", "38.4M parameters, 12 layers: published test 1.11 bpc", p_text8},
    {"text8_large", "209M parameters, 24 layers: published test 1.07 bpc", p_text8_large},
    {"enwik8_pers_small", "all-attention, 38.5M parameters, 18 layers: published test 1.01 bpc", p_enwik8_pers_small},
    {"enwik8_pers", "all-attention, 114M parameters, 36 layers: published test 0.98 bpc", p_enwik8_pers},
    {"wiki103_pers", "all-attention on words, 132M parameters: published test 19.7 ppl", p_wiki103_pers},
    TR_PRESET_END
};
/* What a checkpoint decides: these are taken from it, and must agree when they are given as well. */
static const char *const from_checkpoint[] = {"nlayers", "hid-sz", "inner-hid-sz", "nheads", "attn-span", "pers-mem-size", "literal", "adapt-span",
    "adapt-span-ramp", "adapt-span-cache", "adapt-io", "adapt-io-tied", "adapt-io-divval", "optim", "momentum", "batch-sz", "batch-split", "block-sz", "tokens", NULL};
/* The same, but what is stored does not depend on it: evaluation and generation may ask for another. */
static const char *const from_checkpoint_run[] = {"precision", NULL};

static tr_options options = {"train_attn_span", "Trains a Sequential Transformer (adaptive attention span, all-attention) on text.", table, presets, NULL};

// >>run: everything that one run works with ---------------------------------------------------------------------------

static const tr_lm_kind kind = {"seqtx.attn_span.1", from_checkpoint, from_checkpoint_run, NULL, &opt.adapt_io, &opt.cutoffs};
typedef struct run {
    tr_lm t;                        /* train.h's: context, data, optimiser, log, .. */
    stx_span *model;
    stx_span_state **memory;        /* one per part of the batch */
    stx_ids **in, **out;            /* the same: tokens and targets of a step */
    size_t cutoff[STX_MAX_CLUSTERS - 1], cutoffs;
} run;

// >>checkpoint: train.h's, and the memories

static int save(run *r) {
    stx_writer *w;
    size_t part;
    char prefix[32];
    int ok;
    if (!opt.lm.checkpoint) return 1;
    w = tr_lm_save_begin(&r->t);
    ok = w != NULL;
    for (part = 0; ok && part < opt.batch_split; part++) {
        snprintf(prefix, sizeof prefix, "memory.%zu.", part);
        ok = stx_span_state_save(w, r->memory[part], prefix);
    }
    return tr_lm_save_end(&r->t, w, ok, opt.lm.checkpoint);
}
static int load(run *r, const stx_file *f) {
    size_t part;
    char prefix[32];
    if (!tr_lm_load(&r->t, f)) return 0;
    for (part = 0; r->t.training && part < opt.batch_split; part++) {
        snprintf(prefix, sizeof prefix, "memory.%zu.", part);
        if (!stx_span_state_load(r->memory[part], f, prefix)) return 0;
    }
    return 1;
}

// >>evaluation: with a memory of its own, so that training does not notice

typedef struct { stx_span *model; stx_span_state *memory; } pass;
static double score(void *user, const stx_ids *in, const stx_ids *targets) {
    pass *p = (pass *)user;
    return stx_item(p->model->ctx, stx_span_loss(p->model, in, targets, p->memory, p->memory));
}
static int evaluate_and_report(run *r, int part, uint64_t blocks, int rule) {
    size_t B = opt.lm.eval_batch_sz ? opt.lm.eval_batch_sz : opt.batch_sz / opt.batch_split, T = opt.block_sz;
    double nll, scored;
    pass p;
    if (!r->t.text[part]) return 1;
    tr_lm_fit(r->t.text[part], &B, &T);
    p.model = r->model;
    p.memory = stx_span_state_create(r->model, B);
    nll = tr_lm_pass(&r->t, r->t.text[part], B, T, blocks, rule, score, &p, &scored);
    stx_span_state_free(p.memory);
    return tr_lm_report(&r->t, part, nll, scored, blocks != 0);
}

// >>training

enum { NOTE_LOSS };      /* the mean loss of a step, nats per token */

/* One step: forward, backward, update. What changes from step to step comes from r->in, r->out and the optimiser's rate, so that a GPU can
   repeat it without this function (stx_step_run). */
static void step(void *user) {
    run *r = (run *)user;
    stx_ctx *x = r->t.x;
    size_t part, parts = opt.batch_split;
    for (part = 0; part < parts; part++) {      /* gradients add up over the parts of the batch */
        stx_tensor *loss;
        stx_begin(x, STX_TRAIN);
        loss = stx_span_loss(r->model, r->in[part], r->out[part], r->memory[part], r->memory[part]);
        stx_note(x, NOTE_LOSS, loss, 1.0 / (double)parts, part > 0);
        stx_backward(x, stx_scale(x, stx_span_total(r->model, loss), 1.0 / (double)parts));
    }
    stx_optim_step(r->t.optim, r->t.lr);
    stx_span_clamp(r->model);
}

static int train(run *r) {
    tr_lm *t = &r->t;
    stx_ctx *x = t->x;
    size_t B = opt.batch_sz, T = opt.block_sz, parts = opt.batch_split, rows = B / parts, part, bad = 0;
    uint64_t log_every = opt.lm.log_every ? opt.lm.log_every : 10, eval_every = opt.lm.eval_every ? opt.lm.eval_every : opt.nbatches, save_every = opt.lm.save_every ? opt.lm.save_every : opt.nbatches;
    uint64_t eval_blocks = opt.lm.eval_blocks ? opt.lm.eval_blocks : opt.nbatches < 10 ? 1 : opt.nbatches / 10, logged = 0, saved = t->step;
    int32_t *in = (int32_t *)malloc(B * T * sizeof *in), *out = (int32_t *)malloc(B * T * sizeof *out);
    double sum = 0, span_avg, span_max, last = (double)NAN;
    if (!in || !out) { stx_fail(x, STX_ERR_MEMORY, "no memory for a batch of %zu x %zu tokens", B, T); return 0; }
    tr_rate_start(&t->rate, tr_seconds());
    while (t->step < t->steps && !tr_stop_requested() && stx_ok(x)) {
        double nll;
        int fresh = stx_batches_next(t->batches, in, out), done;
        uint64_t key = 0;
        if (fresh == STX_BATCH_END) break;

        for (part = 0; part < parts; part++) {
            if (fresh == STX_BATCH_FRESH) stx_span_state_reset(r->memory[part]);
            stx_tokens_set(x, r->in[part], in + part * rows * T);
            stx_tokens_set(x, r->out[part], out + part * rows * T);
            key = stx_span_key(r->model, r->in[part], r->out[part], r->memory[part], key);
        }
        t->lr = stx_schedule_lr(&t->schedule, t->step + 1);
        stx_optim_rate(t->optim, t->lr);
        stx_step_run(x, key, step, r);
        nll = stx_noted(x, NOTE_LOSS);
        done = stx_optim_sync(t->optim);
        if (!stx_ok(x)) break;
        t->step++;
        if (done) { sum += nll; logged++; last = nll; bad = 0; }
        else {                                      /* the memory may hold what is not a number: start it again */
            tr_say(&t->term, "step %llu: the %s is not finite; this update is skipped and the memory is emptied", (unsigned long long)t->step, isfinite(nll) ? "gradient" : "loss");
            for (part = 0; part < parts; part++) stx_span_state_reset(r->memory[part]);
            if (++bad == 50) { stx_fail(x, STX_ERR_ARG, "50 updates one after the other were not finite: use a smaller --lr or a --grad-clip"); break; }
        }
        tr_rate_add(&t->rate, tr_seconds(), 1, (double)(B * T));

        tr_lm_show(t, last, t->step % log_every == 0 || t->step == t->steps);
        if (t->step % log_every == 0 || t->step == t->steps) {
            stx_span_stats(r->model, &span_avg, &span_max);
            tr_lm_log_step(t, logged ? sum / (double)logged : (double)NAN);
            tr_log_num(&t->log, "span_avg", span_avg);
            tr_log_num(&t->log, "span_max", span_max);
            tr_lm_note(t, t->log.err, tr_log_end(&t->log));
            tr_lm_point(t, "span/avg", span_avg);
            tr_lm_point(t, "span/max", span_max);
            sum = 0;
            logged = 0;
        }
        if (t->step % eval_every == 0 && t->step < t->steps) {
            if (!evaluate_and_report(r, 1, eval_blocks, STX_EVAL_ALL)) {      /* say why at the end, but lose nothing */
                tr_lm_why(t);
                stx_clear_error(x);
                save(r);
                stx_fail(x, STX_ERR_ARG, "the evaluation failed: %s", t->err);
                break;
            }
            tr_rate_skip(&t->rate, tr_seconds());
        }
        if (t->step % save_every == 0 && t->step < t->steps) {
            if (!save(r)) break;
            saved = t->step;
            tr_rate_skip(&t->rate, tr_seconds());
        }
    }
    free(in);
    free(out);
    if (stx_ok(x) && t->step > saved) save(r);
    return stx_ok(x);
}

// >>generation

static const stx_real *feed(void *user, const int32_t *ids, size_t n) { return stx_span_gen_feed((stx_span_gen *)user, ids, n); }
static int generate(run *r) {
    stx_span_gen *g = stx_span_gen_create(r->model, 1);
    int ok = g && tr_lm_generate(&r->t, feed, g);
    stx_span_gen_free(g);
    return ok;
}

static void print_spans(const run *r) {
    size_t l, h;
    if (!opt.adapt_span) return;
    printf("learned span of each head, tokens (of %llu; a ramp of %g comes on top)\n", (unsigned long long)opt.attn_span, opt.adapt_span_ramp);
    for (l = 0; l < opt.nlayers; l++) {
        printf("  layer %2zu ", l);
        for (h = 0; h < opt.nheads; h++) printf(" %6.0f", stx_span_of(r->model, l, h));
        printf("\n");
    }
}

// >>main

static int make_model(run *r) {
    tr_lm *t = &r->t;
    stx_ctx *x = t->x;
    stx_span_desc d;
    stx_optim_desc od;
    size_t part;
    memset(&d, 0, sizeof d);
    memset(&od, 0, sizeof od);
    d.vocab = stx_vocab_size(t->vocab);
    d.layers = opt.nlayers; d.dim = opt.hid_sz; d.heads = opt.nheads; d.inner = opt.inner_hid_sz; d.span = opt.attn_span;
    d.adapt_span = opt.adapt_span; d.full_cache = !opt.adapt_span_cache; d.ramp = opt.adapt_span_ramp; d.span_init = opt.adapt_span_init;
    d.span_loss = opt.adapt_span_loss; d.pers = opt.pers_mem_size; d.adapt_io = opt.adapt_io; d.adapt_io_tied = opt.adapt_io_tied;
    d.divval = opt.adapt_io_divval; d.dropout = opt.dropout; d.emb_dropout = opt.emb_dropout;
    d.literal_eps = d.literal_memory = opt.literal;
    d.recompute = opt.recompute;
    memcpy(d.cutoff, r->cutoff, sizeof d.cutoff);
    d.cutoffs = r->cutoffs;
    if (!tr_lm_fits(t, (double)stx_span_count(&d))) return 0;
    r->model = stx_span_create(x, &d);
    t->params = r->model ? r->model->params : NULL;
    od.kind = opt.optim == 0 ? STX_ADAGRAD : opt.optim == 1 ? STX_SGD : opt.optim == 2 ? STX_ADAM : STX_ADAMW;
    od.momentum = opt.momentum; od.clip = opt.grad_clip; od.weight_decay = opt.weight_decay;
    if (r->model && t->training) {
        if (!tr_lm_batches(t, opt.batch_sz, opt.block_sz)) return 0;
        t->optim = stx_optim_create(t->params, &od);
        r->memory = (stx_span_state **)stx_block(x, opt.batch_split * sizeof *r->memory);
        r->in = (stx_ids **)stx_block(x, 2 * opt.batch_split * sizeof *r->in);
        r->out = r->in + opt.batch_split;
        for (part = 0; r->memory && r->in && part < opt.batch_split; part++) {
            r->memory[part] = stx_span_state_create(r->model, opt.batch_sz / opt.batch_split);
            r->in[part] = stx_tokens_create(x, opt.batch_sz / opt.batch_split, opt.block_sz);
            r->out[part] = stx_tokens_create(x, opt.batch_sz / opt.batch_split, opt.block_sz);
        }
    }
    return stx_ok(x) ? 1 : tr_lm_why(t);
}
/* Everything that can be refused is refused here, before a file is written. */
static int prepare(run *r) {
    tr_lm *t = &r->t;
    stx_file *f = NULL;
    int ok;
    if (!tr_lm_context(t)) return 0;
    if (!t->training && !opt.lm.checkpoint) return tr_fail(t->err, TR_ERR, "--eval-only, --full-eval-mode and --no-train need a --checkpoint to load");
    ok = tr_lm_open_checkpoint(t, &f);      /* first: it decides the shape of the model, the precision and the vocabulary */
    t->steps = opt.lm.steps ? opt.lm.steps : opt.niter * opt.nbatches;
    t->words = opt.lm.unit == TR_PPL || (opt.lm.unit == TR_AUTO && opt.lm.tokens == TR_WORDS);
    t->schedule.kind = opt.schedule == 0 ? STX_LR_CONSTANT : opt.schedule == 1 ? STX_LR_COSINE : STX_LR_INV_SQRT;
    t->schedule.lr = opt.lr; t->schedule.lr_min = opt.lr_min; t->schedule.warmup = opt.lr_warmup; t->schedule.total = t->steps;
    if (ok && opt.batch_sz % opt.batch_split) ok = tr_fail(t->err, TR_ERR, "--batch-split %llu does not divide --batch-sz %llu", (unsigned long long)opt.batch_split, (unsigned long long)opt.batch_sz);
    if (ok && opt.hid_sz % opt.nheads) ok = tr_fail(t->err, TR_ERR, "--nheads %llu does not divide --hid-sz %llu", (unsigned long long)opt.nheads, (unsigned long long)opt.hid_sz);
    ok = ok && tr_lm_cutoffs(t, r->cutoff, &r->cutoffs);
    if (ok && (opt.lm.data || !opt.lm.no_train)) ok = tr_lm_data(t, opt.adapt_io ? STX_ORDER_COUNT_LATER : STX_ORDER_FIRST, 0);
    ok = ok && make_model(r);
    if (ok && f && !load(r, f)) ok = tr_fail(t->err, TR_ERR, "%s: %s", opt.lm.checkpoint, stx_error(t->x));
    stx_file_close(f);
    return ok && tr_lm_open(t);
}

static int run_main(run *r, int argc, char **argv) {
    tr_lm *t = &r->t;
    int ok = 1, training;
    t->options = &options; t->opt = &opt.lm; t->kind = &kind;
    switch (tr_parse(&options, argc, argv, t->err, TR_ERR)) {
    case 0: return tr_lm_refuse(t);
    case 2: return 0;
    default: break;
    }
    training = t->training = !opt.lm.eval_only && !opt.full_eval && !opt.lm.no_train;
    if (!prepare(r)) return tr_lm_refuse(t);

    tr_lm_hello(t);
    if (training) ok = train(r);
    if (tr_stop_requested()) tr_say(&t->term, "stopped at step %llu%s", (unsigned long long)t->step, opt.lm.checkpoint && training && ok ? "; the checkpoint is saved, the same command goes on from it" : "");
    else if (ok && (training || opt.lm.eval_only || opt.full_eval)) {
        int rule = opt.full_eval ? STX_EVAL_LITERAL : STX_EVAL_ALL;
        ok = evaluate_and_report(r, 1, training && tr_given(&options, "eval-blocks") ? opt.lm.eval_blocks : 0, rule);
        if (ok && !training) ok = evaluate_and_report(r, 2, 0, rule);
    }
    tr_term_close(&t->term);
    if (!training && tr_stop_requested()) { fprintf(stderr, "%s: stopped before the evaluation had a result\n", options.program); return 1; }
    if (ok && !tr_stop_requested()) {
        print_spans(r);
        if (opt.lm.generate) {
            if (training || opt.lm.eval_only || opt.full_eval) printf("---\n");
            ok = generate(r);
        }
    }
    if (!ok) { tr_lm_why(t); fprintf(stderr, "%s: %s\n", options.program, t->err); return 1; }
    return 0;
}
int main(int argc, char **argv) {
    static run r;
    int code = run_main(&r, argc, argv);
    tr_lm_close(&r.t);
    return code;
}
