/* train_sru.c - trains, evaluates and samples language models of SRU and SRU++
   (seqtx_sru.h) on text.

       cc -O3 -pthread train_sru.c -lm -o train_sru
       ./train_sru --data FILE --steps 2000 --checkpoint run.safetensors
       ./train_sru --help

   The training loop is the function train(), in the open; options, data, checkpoints,
   log and terminal are train.h's. */
#define TR_LM
#include "train.h"
#define SEQTX_IMPLEMENTATION
#include "../seqtx_sru.h"
#include "../seqtx_text.h"

// >>options ----------------------------------------------------------------------------------------------------------

/* --literal without names is the library's own flag for all forms */
typedef char tr_every_is_all[(int)TR_EVERY == (int)STX_SRU_LITERAL ? 1 : -1];

enum { CELL_SRUPP, CELL_SRU };
enum { LR_CONSTANT, LR_COSINE, LR_INV_SQRT, LR_RECURSIVE, LR_NOAM };

static struct {
    int cell;
    uint64_t nlayers, hid_sz, emb_sz, proj_sz, nheads, attention_every, attention_last;
    int attention, attn_norm, attn_norm_first, norm, rescale, skip, tanh, v1, input_first, init_xavier, literal;
    double highway_bias, v_init, alpha_init, dropout, attn_dropout, rnn_dropout, io_dropout, emb_dropout;
    int tied, adapt_io, adapt_io_separate;
    double adapt_io_divval;
    const char *cutoffs;
    int optim, radam_skip, schedule, lr_first_zero, sum_loss;
    double lr, momentum, weight_decay, grad_clip, lr_min, lr_decay;
    uint64_t lr_warmup, lr_decay_from, lr_decay_every, batch_sz, batch_split, update_param_freq, block_sz, eval_unroll;
    tr_lm_opt lm;
} opt;

/* The second column says what a checkpoint does with an option: see "Resuming" in
   train.h. */
static tr_opt table[] = {
    TR_GROUP("Model"),
    TR_CHOICE("cell", TR_MODEL, &opt.cell, "sru++|sru", "sru++: attention inside the products of every layer; sru: recurrence alone"),
    TR_SIZE("nlayers", TR_MODEL, &opt.nlayers, 1, 4096, "layers"),
    TR_SIZE("hid-sz", TR_MODEL, &opt.hid_sz, 1, 1u << 28, "hidden size d"),
    TR_SIZE("emb-sz", TR_MODEL, &opt.emb_sz, 0, 1u << 28, "width of the embedding, with --adapt-io of its first cluster; 0: --hid-sz"),
    TR_SIZE("proj-sz", TR_MODEL, &opt.proj_sz, 0, 1u << 28, "width d' inside a layer's product; sru++: 0 is a quarter of --hid-sz; "
        "sru: 0 is none, and a layer that is not wider has none"),
    TR_FLAG("skip", TR_MODEL, &opt.skip, "highway from a layer's input to its output"),
    TR_REAL("highway-bias", TR_MODEL, &opt.highway_bias, -80, 80, "first bias of the reset gate"),
    TR_FLAG("rescale", TR_MODEL, &opt.rescale, "multiply the highway by sqrt(1 + 2 e^bias)"),
    TR_FLAG("tanh", TR_MODEL, &opt.tanh, "tanh of the state"),
    TR_FLAG("v1", TR_MODEL, &opt.v1, "gates do not see the state (SRU of 2017)"),
    TR_CHOICE("norm", TR_MODEL, &opt.norm, "none|before|after", "layer norm of each cell: before the product, or after the recurrence"),
    TR_FLAG("input-first", TR_MODEL, &opt.input_first, "with another --emb-sz: bring the embedding to --hid-sz first, so that all "
        "layers are alike"),
    TR_REAL_OPEN("dropout", TR_FREE, &opt.dropout, TR_OPEN_MAX, 0, 1, "on the embedding, in every layer, on the output"),
    TR_REAL_OPEN("rnn-dropout", TR_FREE, &opt.rnn_dropout, TR_OPEN_MAX, 0, 1, "on the input of every product, one draw for all times"),
    TR_FLAG("init-xavier", TR_FIXED, &opt.init_xavier, "sru: first values as in 3.0 of the reference, not 2.6; sru++ has them always"),
    TR_REAL("v-init", TR_FIXED, &opt.v_init, 0, 1e6, "first values of the gates' weights of the state are up to this; 0: the reference's"),
    TR_SET("literal", TR_MODEL, &opt.literal, "norm", 0,
        "accidental behaviour of the reference, reproduced. norm: --norm before leaves out the "
        "memory"),
    TR_GROUP("Attention (sru++)"),
    TR_SIZE("nheads", TR_MODEL, &opt.nheads, 1, 256, "attention heads; must divide --proj-sz"),
    TR_FLAG("attention", TR_MODEL, &opt.attention, "layers attend; without, they project only"),
    TR_SIZE("attention-every", TR_MODEL, &opt.attention_every, 0, 4096, "only layers N, 2 N, .. attend; 0: all"),
    TR_SIZE("attention-last", TR_MODEL, &opt.attention_last, 0, 4096, "only the last N layers attend; 0: all"),
    TR_REAL_OPEN("attn-dropout", TR_FREE, &opt.attn_dropout, TR_OPEN_MAX, 0, 1, "on attention weights"),
    TR_FLAG("attn-norm", TR_MODEL, &opt.attn_norm, "layer norm in the product of a layer"),
    TR_FLAG("attn-norm-first", TR_MODEL, &opt.attn_norm_first, "... before the attention in place of after it"),
    TR_REAL("alpha-init", TR_FIXED, &opt.alpha_init, -1e6, 1e6, "first weight of the attention; 0: it is learned from nothing"),
    TR_GROUP("Input and output"),
    TR_FLAG("tied", TR_MODEL, &opt.tied, "the output's matrix is the embedding's"),
    TR_FLAG("adapt-io", TR_MODEL, &opt.adapt_io, "adaptive embedding and softmax with common tables, for large vocabularies"),
    TR_FLAG("adapt-io-separate", TR_MODEL, &opt.adapt_io_separate, "... with projections of their own"),
    TR_REAL_OPEN("adapt-io-divval", TR_MODEL, &opt.adapt_io_divval, TR_OPEN_MIN, 1, 1e6,
        "each cluster is this much narrower than the one before"),
    TR_TEXT("adapt-io-cutoffs", TR_MODEL, &opt.cutoffs, "cluster ends, as 20000,40000,200000 (which is the default)"),
    TR_REAL("io-dropout", TR_FREE, &opt.io_dropout, -1, 0.99, "on embedding and output; 0: as --dropout, -1: none"),
    TR_REAL_OPEN("emb-dropout", TR_FREE, &opt.emb_dropout, TR_OPEN_MAX, 0, 1, "inside the adaptive embedding and softmax"),
    TR_GROUP("Optimisation"),
    TR_CHOICE("optim", TR_FIXED, &opt.optim, "radam|adamw|adam|sgd|adagrad", "optimiser"),
    TR_FLAG("radam-skip", TR_FIXED, &opt.radam_skip, "radam: no update while the variance is unknown (5 steps), as later versions do; "
        "else one without it"),
    TR_REAL("lr", TR_FREE, &opt.lr, 0, 1e6, "learning rate"),
    TR_CHOICE("schedule", TR_FREE, &opt.schedule, "constant|cosine|inv-sqrt|recursive|noam",
        "learning rate after the warm-up; recursive: the reference's cosine, from the end of the warm-up; noam: lr / sqrt(d) "
        "min(n^-0.5, n warmup^-1.5)"),
    TR_SIZE("lr-warmup", TR_FREE, &opt.lr_warmup, 0, TR_INF, "updates of linear warm-up"),
    TR_FLAG("lr-first-zero", TR_FREE, &opt.lr_first_zero, "recursive: the first update has rate 0, as in the reference's WikiText-103 "
        "trainer"),
    TR_REAL("lr-min", TR_FREE, &opt.lr_min, 0, 1e6, "end of the cosine"),
    TR_REAL_OPEN("lr-decay", TR_FREE, &opt.lr_decay, TR_OPEN_MIN, 0, 1, "after --lr-decay-from updates the rate, of every schedule, "
        "is multiplied by this; 1: never"),
    TR_SIZE("lr-decay-from", TR_FREE, &opt.lr_decay_from, 0, TR_INF, "..."),
    TR_SIZE("lr-decay-every", TR_FREE, &opt.lr_decay_every, 0, TR_INF, "... and again after each so many more; 0: only once"),
    TR_REAL("momentum", TR_FIXED, &opt.momentum, 0, 1, "of sgd"),
    TR_REAL("weight-decay", TR_FREE, &opt.weight_decay, 0, 1e6, "of radam and adamw (decoupled), adam and sgd (in the gradient); "
        "adagrad has none"),
    TR_REAL("grad-clip", TR_FREE, &opt.grad_clip, 0, 1e9, "largest gradient norm: per tensor with adagrad, of all together otherwise; "
        "0: none"),
    TR_FLAG("sum-loss", TR_FIXED, &opt.sum_loss, "the loss is the sum over a block's times, not the mean: gradients are --block-sz "
        "times as large"),
    TR_SIZE("batch-sz", TR_FIXED, &opt.batch_sz, 1, 1u << 30, "parallel streams of text"),
    TR_SIZE("batch-split", TR_FIXED, &opt.batch_split, 1, 1u << 30, "work on the batch in this many parts, one after the other (less "
        "memory)"),
    TR_SIZE("block-sz", TR_FIXED | TR_KEPT, &opt.block_sz, 1, 1u << 30,
        "tokens of each stream per pass (unroll); attention also sees the block "
        "before"),
    TR_SIZE("update-param-freq", TR_FIXED, &opt.update_param_freq, 1, 1u << 20, "blocks of each stream per update, one after the other"),
    TR_SIZE("steps", TR_FREE, &opt.lm.steps, 0, TR_INF, "updates in all; 0: 1000"),
    TR_SIZE("seed", TR_FIXED, &opt.lm.seed, 0, TR_INF, "of initial values and dropout; of sampling where it is given, else that "
        "differs every time"),
    TR_LM_DATA(opt.lm),
    TR_LM_SAVING(opt.lm, "only at the end", "the whole text"),
    TR_SIZE("eval-unroll", TR_FREE | TR_KEPT, &opt.eval_unroll, 0, 1u << 30,
        "evaluation and generation: block, and how far back attention sees "
        "from every token; 0: --block-sz"),
    TR_LM_RUNNING(opt.lm),
    TR_LM_GENERATION(opt.lm),
    TR_LM_SAMPLING(opt.lm),
    TR_END
};

/* Without a preset: the demo's model and optimiser, then sized by the text (kind.sized
   below). */
#define CELL "cell=sru++ nheads=1 skip attention attn-norm adapt-io-divval=4 lr-decay=1 batch-split=1 update-param-freq=1 "
#define DEMO CELL "tokens=bytes nlayers=4 hid-sz=384 attention-last=2 highway-bias=-1 optim=radam lr=0.02 schedule=recursive " \
    "lr-warmup=60 weight-decay=0.01 grad-clip=1 " \
    "batch-sz=32 block-sz=64 eval-unroll=256 steps=2400 "
/* SRU++ of four layers of 512 with the optimiser, schedule and cell of the published
   runs: what they share. */
#define REFERENCE CELL "tokens=bytes nlayers=4 hid-sz=512 proj-sz=128 emb-sz=0 attention-last=0 highway-bias=-2 dropout=0.1 " \
    "attn-dropout=0.1 optim=radam lr=0.0003 schedule=recursive lr-warmup=100 " \
    "weight-decay=0.1 grad-clip=1 batch-sz=16 block-sz=256 eval-unroll=0 steps=1000 "
/* The published experiments (2102.12459, appendix A; 1709.02755, section 4). batch-sz
   is that of all the reference's GPUs together. */
#define SRUPP REFERENCE "nlayers=10 lr-warmup=16000 log-every=200 eval-every=8000 save-every=2000 "
#define ENWIK8 SRUPP "tokens=bytes-compact data-unit=bpc vocab=205 steps=400000 eval-batch-sz=16 "
#define WT103 SRUPP "tokens=words data-unit=ppl vocab=267735 adapt-io emb-sz=1024 adapt-io-cutoffs=19997,39997,199997 lr-first-zero " \
    "lr=0.0003 steps=400000 batch-sz=64 " \
    "eval-unroll=2560 eval-batch-sz=16 "
#define LM1B SRUPP "tokens=words data-unit=ppl vocab=793471 adapt-io adapt-io-separate emb-sz=1024 adapt-io-cutoffs=59998,159998 " \
    "lr=0.0002 steps=800000 block-sz=64 " \
    "eval-unroll=96 eval-batch-sz=8 attn-dropout=0 emb-dropout=0 "
#define OLDER REFERENCE "cell=sru tokens=bytes-compact data-unit=bpc vocab=205 proj-sz=0 optim=adam weight-decay=0.0000001 " \
    "grad-clip=0.3 schedule=constant lr=0.001 lr-warmup=0 " \
    "highway-bias=-3 attn-dropout=0 log-every=100 eval-every=7000 save-every=2000 "
static const tr_preset presets[] = {
    {"demo", "a small byte model that learns in two minutes on two cores (make demo-sru)",
        DEMO "proj-sz=96 dropout=0 attn-dropout=0 eval-every=800 save-every=800 eval-blocks=5 log-every=100"},
    {"reference", "SRU++, 4 layers of 512 with what the published runs share: the defaults of a run to study", REFERENCE},
    {"enwik8-base", "SRU++, 107.6M parameters: published test 0.974 bpc",
        ENWIK8 "hid-sz=3072 proj-sz=768 dropout=0.22 attn-dropout=0.22 lr=0.0003 batch-sz=32 block-sz=1024 eval-unroll=3072"},
    {"enwik8-large", "SRU++, 190.6M: published test 0.96 bpc",
        ENWIK8 "hid-sz=4096 proj-sz=1024 dropout=0.32 attn-dropout=0.32 lr=0.0004 batch-sz=64 block-sz=1024 eval-unroll=3072"},
    {"enwik8-large-8to1", "SRU++, 195.0M: published test 0.953 bpc; only its sizes are published, the rest is enwik8-large's",
        ENWIK8 "hid-sz=6016 proj-sz=752 dropout=0.32 attn-dropout=0.32 lr=0.0004 batch-sz=64 block-sz=1024 eval-unroll=3072"},
    {"enwik8-fp32", "SRU++, 42.3M: the reference's variant for one machine",
        ENWIK8 "hid-sz=1920 proj-sz=480 dropout=0.1 attn-dropout=0.1 lr=0.00025 lr-warmup=0 batch-sz=24 block-sz=512 eval-batch-sz=32"},
    {"wt103-base", "SRU++ on words, 147.7M: published test 18.3 ppl",
        WT103 "hid-sz=3072 proj-sz=768 dropout=0.15 attn-dropout=0.15 emb-dropout=0.15 block-sz=768"},
    {"wt103-large", "SRU++ on words, 231.7M: published test 17.4 ppl",
        WT103 "hid-sz=4096 proj-sz=1024 dropout=0.2 attn-dropout=0.2 emb-dropout=0.2 block-sz=1024"},
    {"wt103-large-8to1", "SRU++ on words, 233.7M: published test 17.1 ppl",
        WT103 "hid-sz=5952 proj-sz=744 dropout=0.2 attn-dropout=0.2 emb-dropout=0.2 block-sz=1024"},
    {"wt103-large-k5", "the same with attention in layers 5 and 10, 224.9M: published test 17.3 ppl",
        WT103 "hid-sz=5952 proj-sz=744 attention-every=5 dropout=0.2 attn-dropout=0.2 emb-dropout=0.2 block-sz=1024"},
    {"lm1b-base", "SRU++ on words, 328.3M: published test 25.1 ppl, on streams of sentences that are not reproduced here",
        LM1B "hid-sz=4096 proj-sz=1024 dropout=0.05 batch-sz=1024"},
    {"lm1b-large-k5", "with attention in layers 5 and 10, 465.3M: published test 23.5 ppl, on the same",
        LM1B "hid-sz=7616 proj-sz=1024 attention-every=5 dropout=0.1 batch-sz=1536"},
    {"enwik8-sru", "SRU, 6 layers of 1024: the defaults of the reference's older trainer",
        OLDER "nlayers=6 hid-sz=1024 emb-sz=205 dropout=0.2 batch-sz=128 block-sz=100 steps=703100"},
    {"enwik8-sru-8x1312", "SRU, 37M; this and the next three: the published sizes, the rest is enwik8-sru's",
        OLDER "nlayers=8 hid-sz=1312 emb-sz=205 dropout=0.2 batch-sz=128 block-sz=100 steps=703100"},
    {"enwik8-sru-10x1152", "SRU, 37M",
        OLDER "nlayers=10 hid-sz=1152 emb-sz=205 dropout=0.2 batch-sz=128 block-sz=100 steps=703100"},
    {"enwik8-sru-8x3056", "SRU with projections to 512, 47M",
        OLDER "nlayers=8 hid-sz=3056 proj-sz=512 emb-sz=256 dropout=0.3 batch-sz=64 block-sz=256 steps=549300"},
    {"enwik8-sru-12x2048", "SRU with projections to 512, published as 47M, 48.8M here",
        OLDER "nlayers=12 hid-sz=2048 proj-sz=512 emb-sz=256 dropout=0.3 batch-sz=64 block-sz=256 steps=549300"},
    {"ptb", "SRU of 2017 on Penn Treebank's words, 6 layers of 910, 24M",
        REFERENCE "cell=sru tokens=words data-unit=ppl vocab=10000 nlayers=6 hid-sz=910 proj-sz=0 tied v1 highway-bias=-3 optim=sgd "
            "lr=1 schedule=constant lr-warmup=0 lr-decay=0.98 "
        "lr-decay-from=145075 lr-decay-every=829 weight-decay=0.00001 grad-clip=5 sum-loss batch-sz=32 block-sz=35 dropout=0.2 "
            "rnn-dropout=0.2 io-dropout=0.7 attn-dropout=0 steps=248700 "
        "log-every=100 eval-every=829 save-every=829"},
    TR_PRESET_END
};

static tr_options options = {"train_sru", "Trains a language model of SRU or SRU++ on text. Recipes of the papers are presets. Not "
    "reproduced: the Billion Word trainer's streams "
    "of shuffled sentences (<S> w .. <S>, its own vocabulary file; here the text is read in order and <eos> ends a line), the targets "
        "that the reference predicts across the ends of "
    "streams, the short last block of an epoch, training on several GPUs.", table, presets, TR_LM_DEFAULTS DEMO, TR_LM_AFTER, ""};

// >>run: everything that one run works with ---------------------------------------------------------------------------

typedef struct run {
    tr_lm t; /* train.h's: context, data, optimiser, log, .. */
    stx_sru_lm *model;
    stx_sru_lm_desc desc;
    size_t *projs;
} run;

// >>training

enum { NOTE_LOSS }; /* the mean loss of an update, nats per token */

/* One update: forward and backward of each block, then the optimiser. What changes
   from one to the next comes from t.in, t.out and the optimiser's rate, so that a GPU
   can repeat it without this function (stx_step_run). */
static void step(void *user) {
    run *r = (run *)user;
    stx_ctx *x = r->t.x;
    size_t parts = opt.batch_split, blocks = parts * opt.update_param_freq, k;
    double each = 1.0 / (double)blocks;
    for (k = 0; k < blocks; k++) { /* gradients add up */
        stx_sru_state *s = (stx_sru_state *)r->t.state[k % parts];
        stx_tensor *loss;
        stx_begin(x, STX_TRAIN);
        loss = stx_sru_lm_loss(r->model, r->t.in[k], r->t.out[k], s, s);
        stx_note(x, NOTE_LOSS, loss, each, k > 0);
        if (k + 1 == blocks) stx_group_overlap(r->t.optim);
        stx_backward(x, stx_scale(x, loss, opt.sum_loss ? each * (double)opt.block_sz : each));
    }
    stx_optim_step(r->t.optim, r->t.lr);
}

/* The blocks (B,T) of the next update, in order. When what is left of the text is too
   short an epoch ends: the next one starts at the beginning, with empty states, as in
   the reference. */
static int next_update(tr_lm *t) {
    stx_batches *b = t->batches;
    stx_batches_state pos = stx_batches_get(b);
    size_t T = opt.block_sz, N = opt.batch_sz * T, k;
    int fresh = pos.fresh || pos.p + opt.update_param_freq * T >= stx_batches_stream(b);
    if (fresh && pos.p) {
        if (!pos.fresh) pos.wraps++;
        pos.p = 0;
        pos.fresh = 1;
        if (!stx_batches_set(b, pos)) return STX_BATCH_END;
    }
    for (k = 0; k < opt.update_param_freq; k++)
        if (stx_batches_next(b, t->tokens + k * N, t->targets + k * N) == STX_BATCH_END)
            return STX_BATCH_END;
    return fresh ? STX_BATCH_FRESH : STX_BATCH_OK;
}

static void train(tr_lm *t) {
    while (tr_lm_more(t)) {
        int fresh = next_update(t);
        uint64_t key;
        if (fresh == STX_BATCH_END) break;
        key = tr_lm_batch(t, fresh == STX_BATCH_FRESH);

        t->lr = stx_schedule_lr(&t->schedule, t->step + 1);
        stx_optim_rate(t->optim, t->lr);
        tr_lm_step(t, key, step, t);
        if (!tr_lm_stepped(t, stx_noted(t->x, NOTE_LOSS))) break;

        if (tr_lm_log_due(t)) {
            tr_log_int(&t->log, "skipped", t->optim->skipped);
            tr_lm_logged(t);
        }
        if (!tr_lm_look_and_save(t)) break;
    }
}

static void print_alpha(const tr_lm *t, FILE *out) {
    size_t l, n = 0;
    for (l = 0; l < opt.nlayers; l++) {
        const stx_sru_layer *a = &((const run *)t)->model->sru->layer[l];
        stx_real alpha;
        if (!a->attends) continue;
        stx_get(t->x, a->alpha_attn, &alpha);
        fprintf(out, n++ ? ", %.3f (layer %zu)" : "learned weight of attention: %.3f (layer %zu)",
                (double)alpha, l + 1);
    }
    if (n) fprintf(out, "\n");
}

// >>main

/* The library's error in the options' words */
static int why(tr_lm *t) {
    static const tr_word words[] = {
        {"layers", "nlayers"},
        {"hidden", "hid-sz"},
        {"dim, emb or emb_adaptive", "hid-sz"},
        {"dim", "hid-sz"},
        {"proj", "proj-sz"},
        {"emb with adapt_io", "emb-sz"},
        {"emb", "emb-sz"},
        {"cutoff", "adapt-io-cutoffs"},
        {"width of the first cluster / divval^cutoffs",
         "the width of the last cluster, --emb-sz / --adapt-io-divval^cutoffs,"},
        {"divval", "adapt-io-divval"},
        {"cutoffs", "adapt-io-cutoffs"},
        {"heads do not divide the projection", "heads (--nheads) do not divide the --proj-sz"},
        {"a smaller divval or a larger width", "a smaller --adapt-io-divval or a larger --emb-sz"},
        {" has STX_SRU_LITERAL_NORM, which", " norm"},
        {"STX_SRU_ATTENTION with STX_SRU_NORM_BEFORE", "--cell sru++ with --norm before"},
        {"STX_SRU_LITERAL takes", "--literal without names takes"},
        {NULL, NULL}};
    if (!strncmp(stx_error(t->x), "stx_sru_create: ", 16))
        return tr_lm_why_in(t, "stx_sru_create: ", words);
    return tr_lm_why_in(t, "stx_sru_lm_create: ", words);
}

/* The model that the options describe, for a vocabulary. */
static int describe(run *r, size_t vocab) {
    stx_sru_lm_desc *d = &r->desc;
    size_t l;
    memset(d, 0, sizeof *d);
    d->vocab = vocab;
    d->dim = opt.hid_sz;
    d->tied = opt.tied;
    d->dropout = opt.dropout;
    d->emb_dropout = opt.emb_dropout;
    d->io_dropout = opt.io_dropout;
    d->adapt_io = opt.adapt_io;
    d->separate_projs = opt.adapt_io_separate;
    d->divval = opt.adapt_io_divval;
    if (opt.adapt_io)
        d->emb_adaptive = opt.emb_sz;
    else
        d->emb = opt.emb_sz;
    d->sru.layers = opt.nlayers;
    d->sru.no_skip = !opt.skip;
    d->sru.rescale = opt.rescale;
    d->sru.tanh = opt.tanh;
    d->sru.v1 = opt.v1;
    d->sru.norm = opt.norm;
    d->sru.highway_bias = opt.highway_bias;
    d->sru.input_first = opt.input_first;
    d->sru.rnn_dropout = opt.rnn_dropout;
    d->sru.v_init = opt.v_init;
    d->sru.literal = (unsigned)opt.literal;
    if (opt.cell == CELL_SRUPP) {
        d->sru.transform = STX_SRU_ATTENTION;
        d->sru.proj = opt.proj_sz;
        d->sru.heads = opt.nheads;
        d->sru.attn_dropout = opt.attn_dropout;
        d->sru.attention_every = opt.attention_every;
        d->sru.attention_last = opt.attention_last;
        d->sru.no_attention = !opt.attention;
        d->sru.no_attn_norm = !opt.attn_norm;
        d->sru.attn_norm_first = opt.attn_norm_first;
        d->sru.alpha_init = opt.alpha_init;
    } else {
        d->sru.transform = STX_SRU_LINEAR;
        d->sru.init_xavier = opt.init_xavier;
        free(r->projs);
        r->projs = (size_t *)calloc(opt.nlayers, sizeof *r->projs);
        if (!r->projs) return tr_fail(r->t.err, TR_ERR, "no memory");
        /* as in 2.6 of the reference a projection that is not narrower than what comes
           in or goes out is none */
        for (l = 0; l < opt.nlayers; l++) {
            size_t I = l || opt.input_first || opt.adapt_io || !opt.emb_sz ? opt.hid_sz
                                                                           : opt.emb_sz;
            if (opt.proj_sz < I && opt.proj_sz < opt.hid_sz) r->projs[l] = opt.proj_sz;
        }
        d->sru.projs = r->projs;
    }
    if (!tr_lm_cutoffs(&r->t, d->cutoff, &d->cutoffs)) return 0;
    if (!opt.adapt_io) d->cutoffs = 0;
    return 1;
}

static int make(tr_lm *t) {
    run *r = (run *)t;
    stx_optim_desc od;
    if (!describe(r, stx_vocab_size(t->vocab))
        || !tr_lm_fits(t, (double)stx_sru_lm_count(&r->desc)))
        return 0;
    r->model = stx_sru_lm_create(t->x, &r->desc);
    t->lm = stx_sru_lm_of(r->model);
    if (r->model && t->training) {
        static const int kinds[] = {STX_RADAM, STX_ADAMW, STX_ADAM, STX_SGD, STX_ADAGRAD};
        memset(&od, 0, sizeof od);
        od.kind = kinds[opt.optim];
        od.radam_skip = opt.radam_skip;
        od.momentum = opt.momentum;
        od.clip = opt.grad_clip;
        od.weight_decay = od.kind == STX_ADAGRAD && !tr_given(&options, "weight-decay")
                              ? 0
                              : opt.weight_decay;
        return tr_lm_make(t, &od, opt.update_param_freq);
    }
    return stx_ok(t->x) ? 1 : why(t);
}

static size_t count(tr_lm *t, size_t vocab) {
    run *r = (run *)t;
    size_t n;
    if (!describe(r, vocab)) return 0;
    n = stx_sru_lm_count(&r->desc);
    if (!n) {
        stx_sru_lm_create(t->x, &r->desc);
        why(t);
    } /* which says why not */
    return n;
}

static void shape(const tr_lm *t, char *line, size_t room, double *states) {
    size_t l, attending = 0;
    (void)t;
    for (l = 0; l < opt.nlayers && opt.cell == CELL_SRUPP && opt.attention; l++)
        attending += opt.attention_last
                         ? opt.nlayers - l <= opt.attention_last
                         : !opt.attention_every || (l + 1) % opt.attention_every == 0;
    snprintf(line, room, "%llu layers, %zu with attention", (unsigned long long)opt.nlayers,
             attending);
    *states = (double)opt.batch_sz * (double)opt.hid_sz
              * ((double)opt.nlayers + (double)attending * (double)opt.block_sz);
}

static int check(tr_lm *t) {
    int plus = opt.cell == CELL_SRUPP, attends = plus && opt.attention;
    const tr_only only[] = {{"init-xavier", !plus, "--cell sru"},
                            {"attention", plus, "--cell sru++"},
                            {"attention-every", attends, "attention, of --cell sru++"},
                            {"attention-last", attends, "attention, of --cell sru++"},
                            {"attn-dropout", attends, "attention, of --cell sru++"},
                            {"attn-norm", plus, "--cell sru++"},
                            {"attn-norm-first", plus && opt.attn_norm,
                             "--attn-norm, of --cell sru++"},
                            {"alpha-init", attends, "attention, of --cell sru++"},
                            {"highway-bias", opt.skip, "--skip"},
                            {"rescale", opt.skip, "--skip"},
                            {"v-init", !opt.v1, "gates that see the state, not for --v1"},
                            {"input-first", opt.emb_sz && opt.emb_sz != opt.hid_sz && !opt.adapt_io,
                             "another --emb-sz than --hid-sz, without --adapt-io"},
                            {"adapt-io-separate", opt.adapt_io, "--adapt-io"},
                            {"adapt-io-divval", opt.adapt_io, "--adapt-io"},
                            {"adapt-io-cutoffs", opt.adapt_io, "--adapt-io"},
                            {"emb-dropout", opt.adapt_io, "--adapt-io"},
                            {"radam-skip", opt.optim == 0, "--optim radam"},
                            {"momentum", opt.optim == 3, "--optim sgd"},
                            {"lr-first-zero", opt.schedule == LR_RECURSIVE, "--schedule recursive"},
                            {"lr-min", opt.schedule == LR_COSINE || opt.schedule == LR_RECURSIVE,
                             "--schedule cosine and recursive"},
                            {"lr-decay-from", opt.lr_decay < 1, "an --lr-decay below 1"},
                            {"lr-decay-every", opt.lr_decay < 1, "an --lr-decay below 1"}};
    if (!tr_all_count(&options, only, sizeof only / sizeof *only, t->err, TR_ERR)) return 0;
    if (!tr_lm_decided(t, "attention-last")) { /* a default makes room for what is given */
        if (opt.attention_every) opt.attention_last = 0;
        if (opt.attention_last > opt.nlayers) opt.attention_last = opt.nlayers;
    }
    if (attends && (opt.attention_every > opt.nlayers || opt.attention_last > opt.nlayers))
        return tr_fail(
            t->err, TR_ERR,
            "--attention-%s %llu: there are only %llu layers (--nlayers); --no-attention for none",
            opt.attention_every ? "every" : "last",
            (unsigned long long)(opt.attention_every ? opt.attention_every : opt.attention_last),
            (unsigned long long)opt.nlayers);
    if (opt.cell == CELL_SRUPP && opt.attention && opt.proj_sz % opt.nheads)
        return tr_fail(t->err, TR_ERR, "--nheads %llu does not divide --proj-sz %llu",
                       (unsigned long long)opt.nheads, (unsigned long long)opt.proj_sz);
    if (tr_lm_by_token(t) && opt.literal && opt.norm == STX_SRU_NORM_BEFORE && attends)
        return tr_fail(t->err, TR_ERR,
                       "--%s: with --literal norm a key depends on where its block "
                       "began; leave --%s out",
                       tr_lm_by_token(t), tr_lm_by_token(t));
    if (opt.attention_every && opt.attention_last)
        return tr_fail(t->err, TR_ERR, "--attention-every and --attention-last: one of them only");
    if (opt.tied && opt.adapt_io)
        return tr_fail(t->err, TR_ERR,
                       "--tied: with --adapt-io the tables are common in any case; leave it out");
    if (opt.tied && opt.emb_sz && opt.emb_sz != opt.hid_sz)
        return tr_fail(t->err, TR_ERR, "--tied: --emb-sz %llu is not --hid-sz %llu",
                       (unsigned long long)opt.emb_sz, (unsigned long long)opt.hid_sz);
    if (opt.schedule == LR_NOAM && !opt.lr_warmup)
        return tr_fail(t->err, TR_ERR, "--schedule noam needs a --lr-warmup");
    return 1;
}

static void plan(tr_lm *t) {
    static const int kinds[] = {STX_LR_CONSTANT, STX_LR_COSINE, STX_LR_INV_SQRT, STX_LR_RECURSIVE,
                                STX_LR_NOAM};
    stx_schedule *s = &t->schedule;
    t->steps = opt.lm.steps ? opt.lm.steps : 1000;
    t->log_every = opt.lm.log_every ? opt.lm.log_every : 10;
    t->eval_every = opt.lm.eval_every;
    t->save_every = opt.lm.save_every;
    t->eval_blocks = opt.lm.eval_blocks;
    /* every token sees exactly so many before it, and all that came before through the
       recurrence */
    t->eval_block = t->eval_window = opt.eval_unroll ? opt.eval_unroll : opt.block_sz;
    s->kind = kinds[opt.schedule];
    s->lr = opt.lr;
    s->lr_min = opt.lr_min;
    s->warmup = opt.lr_warmup;
    s->total = t->steps;
    s->literal = opt.schedule == LR_RECURSIVE && opt.lr_first_zero;
    s->dim = (double)opt.hid_sz;
    if (opt.lr_decay < 1) {
        s->decay = opt.lr_decay;
        s->decay_from = opt.lr_decay_from;
        s->decay_every = opt.lr_decay_every;
    }
}

/* words are sorted by count for the adaptive softmax, <eos> before all: the
   reference's order */
static const tr_lm_kind kind = {"seqtx.sru.1",
                                "state",
                                &opt.adapt_io,
                                &opt.cutoffs,
                                STX_ORDER_COUNT_EARLIER,
                                1,
                                {"nlayers=3 hid-sz=192 dropout=0.2 attn-dropout=0.1",
                                 "dropout=0.1 attn-dropout=0.1", ""},
                                check,
                                plan,
                                count,
                                shape,
                                make,
                                train,
                                print_alpha,
                                sizeof(run)};

int main(int argc, char **argv) {
    static run r;
    int code = tr_lm_main(&r.t, &kind, &options, &opt.lm, NULL, argc, argv);
    free(r.projs);
    return code;
}
