/* train_compressive.c - trains, evaluates and samples from the Compressive Transformer

       cc -O3 -pthread train_compressive.c -lm -o train_compressive
       ./train_compressive --data FILE --steps 2000 --checkpoint run.safetensors
       ./train_compressive --help

   The training loop is in step() and train() below. Option parsing, text input,
   checkpoints, logging and terminal output come from train.h, which all trainers
   share. */
#define TR_LM
#include "train.h"
#define SEQTX_IMPLEMENTATION
#include "../seqtx_compressive.h"
#include "../seqtx_text.h"


// >>options

enum { MAX_LAYERS = 4096, MAX_ROWS = 1 << 30 };

/* Compile-time check: --literal without names selects the same flags as
   STX_COMP_LITERAL. */
typedef char literal_is_every[(int)STX_COMP_LITERAL == (int)TR_EVERY ? 1 : -1];

enum { OPTIM_ADAM, OPTIM_ADAMW, OPTIM_SGD, OPTIM_ADAGRAD };
enum { SCHEDULE_CONSTANT, SCHEDULE_COSINE, SCHEDULE_INV_SQRT };
static const int optim_kinds[] = {STX_ADAM, STX_ADAMW, STX_SGD, STX_ADAGRAD};
static const int schedule_kinds[] = {STX_LR_CONSTANT, STX_LR_COSINE, STX_LR_INV_SQRT};

static struct {
    /* model */
    uint64_t    nlayers, hid_sz, emb_sz, inner_hid_sz, nheads, kv_heads, block_sz;
    int         positions, norm_after, final_norm, glu, tied;
    int         gate, gate_relu, no_gate_bias, mogrify;
    double      gate_bias;
    double      dropout, attn_dropout, out_dropout, ff_dropout;

    /* memory */
    const char *memory_layers, *mems, *cmems;
    uint64_t    mem, cmem;
    int         recurrence;

    /* compression */
    int         compress, conv_no_bias, aux;
    uint64_t    ratio, overlap, bptt;
    const char *dilations;
    double      aux_weight, aux_dropout;

    int         literal;

    /* optimisation */
    int         optim, schedule;
    double      lr, lr_start, lr_min, momentum, weight_decay, grad_clip;
    uint64_t    lr_warmup, batch_sz, batch_split;

    /* evaluation */
    int         eval_mem, eval_cmem;
    uint64_t    eval_positions;

    tr_lm_opt   lm;         /* options shared by all trainers */
} opt;

/* The second column determines how checkpoints treat the option: see "Resuming" in
   train.h. */
static tr_opt table[] = {
    TR_GROUP("Model"),
    TR_SIZE("nlayers", TR_MODEL, &opt.nlayers, 1, MAX_LAYERS, "number of layers"),
    TR_SIZE("hid-sz", TR_MODEL, &opt.hid_sz, 1, 1u << 29, "model dimension d"),
    TR_SIZE("emb-sz", TR_MODEL, &opt.emb_sz, 0, 1u << 29, "width of the embedding; 0: --hid-sz"),
    TR_SIZE("inner-hid-sz", TR_MODEL, &opt.inner_hid_sz, 0, MAX_ROWS,
        "size of the feed-forward network; 0: 4 d"),
    TR_SIZE("nheads", TR_MODEL, &opt.nheads, 1, 256,
        "number of attention heads; must divide --hid-sz"),
    TR_SIZE("kv-heads", TR_MODEL, &opt.kv_heads, 0, 256,
        "number of key and value heads, which the query heads share; must divide --nheads; 0: "
        "--nheads"),
    TR_SIZE("block-sz", TR_MODEL, &opt.block_sz, 1, MAX_ROWS,
        "segment length: tokens per stream and step, which then enter the memory"),
    TR_CHOICE("positions", TR_MODEL, &opt.positions, "learned|xl",
        "position encoding. learned: one table for all layers, with a slice per head; xl: as in "
        "Transformer-XL"),
    TR_FLAG("norm-after", TR_MODEL, &opt.norm_after,
        "layer norm after each sublayer, as in the paper, instead of before"),
    TR_FLAG("final-norm", TR_MODEL, &opt.final_norm, "layer norm before the output head"),
    TR_FLAG("glu", TR_MODEL, &opt.glu, "gated linear units in the feed-forward network"),
    TR_FLAG("tied", TR_MODEL, &opt.tied, "use the embedding as the weight of the output head"),
    TR_CHOICE("gate", TR_MODEL, &opt.gate, "residual|gru|input|output|highway|sigtanh|gtrxl",
        "how the input x and the output y of a sublayer are combined: x + y, the reference's GRU, "
        "or one of GTrXL's gates"),
    TR_FLAG("gate-relu", TR_MODEL, &opt.gate_relu, "apply a ReLU before the gate (GTrXL)"),
    TR_REAL("gate-bias", TR_FIXED, &opt.gate_bias, -80, 80,
        "initial bias of the gate; 0: 2 for gtrxl, 1 for output, highway and sigtanh"),
    TR_FLAG("no-gate-bias", TR_FIXED, &opt.no_gate_bias, "initialise the bias of the gate to 0"),
    TR_FLAG("mogrify", TR_MODEL, &opt.mogrify, "with --gate gru: apply a mogrifier first"),
    TR_REAL_OPEN("dropout", TR_FREE, &opt.dropout, TR_OPEN_MAX, 0, 1,
        "dropout probability of attention weights, of attention outputs and inside the "
        "feed-forward network"),
    TR_REAL("attn-dropout", TR_FREE, &opt.attn_dropout, -1, 0.99,
        "dropout probability of attention weights; 0: --dropout, -1: none"),
    TR_REAL("out-dropout", TR_FREE, &opt.out_dropout, -1, 0.99,
        "dropout probability of attention outputs; 0: --dropout, -1: none"),
    TR_REAL("ff-dropout", TR_FREE, &opt.ff_dropout, -1, 0.99,
        "dropout probability inside the feed-forward network; 0: --dropout, -1: none"),

    TR_GROUP("Memory"),
    TR_TEXT("memory-layers", TR_MODEL, &opt.memory_layers,
        "layers with a memory: a list such as 6,7,8, or all, or none"),
    TR_SIZE("mem", TR_MODEL, &opt.mem, 0, MAX_ROWS, "rows of memory; 0: none"),
    TR_SIZE("cmem", TR_MODEL, &opt.cmem, 0, MAX_ROWS, "rows of compressed memory; 0: none"),
    TR_TEXT("mems", TR_MODEL, &opt.mems, "instead of --mem: one number per layer, such as 8,16"),
    TR_TEXT("cmems", TR_MODEL, &opt.cmems, "instead of --cmem: one number per layer"),
    TR_CHOICE("recurrence", TR_MODEL, &opt.recurrence, "none|ernie|rotate",
        "what the memory of a layer stores. none: the layer's input. ernie: its output. rotate: "
        "its input, and each call moves all memories down by one memory layer (the reference)"),

    TR_GROUP("Compression"),
    TR_CHOICE("compress", TR_MODEL, &opt.compress, "conv|dilated|max|mean|used|none",
        "how rows that leave the memory are compressed. used: the rows that received the most "
        "attention are kept. none: all rows are discarded"),
    TR_SIZE("ratio", TR_MODEL, &opt.ratio, 1, 1u << 20,
        "number of rows that are compressed into one"),
    TR_SIZE("overlap", TR_MODEL, &opt.overlap, 0, 1u << 20,
        "with --compress conv: number of older rows that the kernel also sees"),
    TR_FLAG("conv-no-bias", TR_MODEL, &opt.conv_no_bias, "with --compress conv: use no bias"),
    TR_TEXT("dilations", TR_MODEL, &opt.dilations,
        "with --compress dilated: up to eight dilations, such as 1,2,4 (the default)"),
    TR_CHOICE("aux", TR_MODEL, &opt.aux, "auto|attention|autoencode|bptt|none",
        "loss that trains the compression. auto: attention if the compression has parameters. "
        "bptt: the language loss of later segments"),
    TR_REAL("aux-weight", TR_FREE, &opt.aux_weight, 0, 1e6, "weight of the --aux loss; 0: 1"),
    TR_REAL_OPEN("aux-dropout", TR_FREE, &opt.aux_dropout, TR_OPEN_MAX, 0, 1,
        "dropout probability of the attention weights in the --aux loss"),
    TR_SIZE("bptt", TR_FIXED, &opt.bptt, 0, 1024,
        "with --aux bptt: number of later segments; 0: 1"),

    TR_GROUP("The reference's own forms"),
    TR_SET("literal", TR_MODEL, &opt.literal, "rows|pad|target|mask|freeze",
        STX_COMP_LITERAL_TARGET | STX_COMP_LITERAL_FREEZE,
        "reproduce accidental behaviour of the reference. rows: the table row of a distance "
        "depends on how full the memory is. pad: if --ratio does not divide the rows, padding "
        "precedes them and the newest rows are lost. target: the attention loss compares with "
        "the whole memory. mask: padding enters the memory (there is none in training). freeze: "
        "keys and values of a memory layer stop learning at its first compression"),

    TR_GROUP("Optimisation"),
    TR_CHOICE("optim", TR_FIXED, &opt.optim, "adam|adamw|sgd|adagrad", "optimiser"),
    TR_REAL("lr", TR_FREE, &opt.lr, 0, 1e6, "learning rate"),
    TR_CHOICE("schedule", TR_FREE, &opt.schedule, "constant|cosine|inv-sqrt",
        "learning-rate schedule after the warm-up"),
    TR_SIZE("lr-warmup", TR_FREE, &opt.lr_warmup, 0, TR_INF,
        "length of the linear warm-up, in steps"),
    TR_REAL("lr-start", TR_FREE, &opt.lr_start, 0, 1e6,
        "learning rate at the start of the warm-up"),
    TR_REAL("lr-min", TR_FREE, &opt.lr_min, 0, 1e6,
        "learning rate at the end of the cosine schedule"),
    TR_REAL("momentum", TR_FIXED, &opt.momentum, 0, 1, "momentum of sgd"),
    TR_REAL("weight-decay", TR_FREE, &opt.weight_decay, 0, 1e6,
        "weight decay of sgd and adam (added to the gradient) and of adamw (decoupled)"),
    TR_REAL("grad-clip", TR_FREE, &opt.grad_clip, 0, 1e9,
        "gradient clipping norm, per tensor with adagrad, otherwise over all tensors; 0: no "
        "clipping"),
    TR_SIZE("batch-sz", TR_FIXED, &opt.batch_sz, 1, 1u << 30, "number of parallel text streams"),
    TR_SIZE("batch-split", TR_FIXED, &opt.batch_split, 1, 1u << 30,
        "process the batch in this many parts, to save memory"),
    TR_LM_PACE(opt.lm),
    TR_SIZE("steps", TR_FREE, &opt.lm.steps, 0, TR_INF,
        "total number of steps, each of one segment per stream; 0: 1000"),
    TR_SIZE("seed", TR_FIXED, &opt.lm.seed, 0, TR_INF,
        "seed of initial values, dropout and positions in the text. If given, also the seed of "
        "sampling; otherwise sampling differs every time"),
    TR_LM_DATA(opt.lm),
    TR_LM_SAVING(opt.lm, "only at the end", "the whole text"),
    TR_INT("eval-mem", TR_FREE | TR_KEPT, &opt.eval_mem, -1, MAX_ROWS,
        "evaluation and generation: rows of memory in each memory layer; -1: as in training"),
    TR_INT("eval-cmem", TR_FREE | TR_KEPT, &opt.eval_cmem, -1, MAX_ROWS,
        "evaluation and generation: rows of compressed memory, in layers that have one; -1: as "
        "in training"),
    TR_SIZE("eval-positions", TR_LOCAL, &opt.eval_positions, 0, TR_INF,
        "at the end, print the loss of the validation text by distance from an empty memory; the "
        "memory is emptied every this many tokens, a multiple of --block-sz; 0: do not print it"),
    TR_LM_RUNNING(opt.lm),
    TR_LM_GENERATION(opt.lm),
    TR_LM_SAMPLING(opt.lm),
    TR_END
};

#define BASE \
    "memory-layers=all ratio=4 positions=learned recurrence=none no-final-norm aux-weight=1 " \
    "optim=adam batch-split=1 update-every=1 eval-mem=-1 eval-cmem=-1 "

/* The defaults without --preset: the demo's model and optimiser, which kind.sized below
   scales to the size of the text. */
#define DEMO \
    BASE "tokens=bytes nlayers=3 hid-sz=128 nheads=4 block-sz=64 mem=64 cmem=32 " \
    "positions=xl norm-after lr=0.003 schedule=cosine lr-warmup=60 grad-clip=1 batch-sz=16 "

/* The reference's enwik8 example, without its accidental behaviour, which --recurrence
   rotate --literal restores (see Fidelity in seqtx_compressive.h). The parameters are
   updated after each of the four segments that --random-segments reads in a row. */
#define REFERENCE \
    BASE "tokens=bytes nlayers=8 hid-sz=512 nheads=8 block-sz=512 memory-layers=6,7,8 " \
    "mem=512 cmem=128 gate=gru recurrence=ernie lr=0.0001 schedule=constant lr-warmup=0 " \
    "grad-clip=0.5 batch-sz=16 batch-split=4 random-segments=4 steps=400000 "

/* The settings of the paper (1911.05507, sections 4 and 5, appendices), which does not
   report the dropout or the batch size for enwik8. */
#define PAPER \
    BASE "positions=xl norm-after lr=0.0003 lr-start=0.000001 lr-min=0.000001 " \
    "schedule=cosine grad-clip=0.1 update-every=4 update-after=60000 " \
    "log-every=100 eval-every=2000 save-every=2000 eval-blocks=100 "
#define PAPER_WORDS \
    PAPER "tokens=words lr-warmup=16000 steps=516000 block-sz=512 mem=512 cmem=512 tied "

static const tr_preset presets[] = {
    {"demo", "a small byte-level model that trains in two minutes on two cores (make "
        "demo-compressive)",
        DEMO "memory-layers=2,3 steps=3600 eval-every=900 save-every=900 eval-blocks=10 "
        "log-every=100"},
    {"reference", "the reference's enwik8 example: 8 layers, memory in the last three, GRU gates",
        REFERENCE "eval-every=2000 save-every=2000 eval-blocks=16 sample-every=2000 "
        "sample-prime=512 sample-length=1024"},
    {"readme", "the sizes of the reference's README, on words: 12 layers, segment 1024, GLU",
        REFERENCE "tokens=words vocab=20000 nlayers=12 emb-sz=128 block-sz=1024 mem=1024 cmem=256 "
        "memory-layers=6,7,8,9,10,11,12 glu dropout=0.1 aux-dropout=0.1"},
    {"enwik8", "the paper's model, 24 layers: published test 0.97 bpc",
        PAPER "tokens=bytes-compact vocab=205 data-unit=bpc nlayers=24 hid-sz=1024 "
        "inner-hid-sz=3072 nheads=8 block-sz=768 mem=768 cmem=1152 ratio=3 batch-sz=32 "
        "lr-warmup=4000 steps=104000 eval-cmem=3072"},
    {"wikitext103", "the paper's model, 18 layers, but with tied tables instead of an adaptive "
        "input: published test 17.1 ppl",
        PAPER_WORDS "vocab=267735 nlayers=18 hid-sz=1024 inner-hid-sz=4096 nheads=16 batch-sz=128 "
        "eval-mem=500 eval-cmem=1500"},
    {"pg19", "the paper's model, 36 layers, for text in 32,000 subwords; we chose the width: "
        "published test 33.6 ppl per word",
        PAPER_WORDS "vocab=32000 data-unit=word-ppl nlayers=36 hid-sz=1024 inner-hid-sz=4096 "
        "nheads=16 ratio=2 batch-sz=512"},
    TR_PRESET_END
};

static tr_options options = {
    "train_compressive",
    "Trains a Compressive Transformer on text: old memories are compressed, not discarded.",
    table, presets, TR_LM_DEFAULTS DEMO, TR_LM_AFTER, ""
};


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
    const size_t parts = opt.batch_split;
    const double share = 1.0 / (double)parts;
    size_t part;
    for (part = 0; part < parts; part++) {
        stx_comp_state *memory = (stx_comp_state *)r->t.state[part];
        stx_tensor *loss, *total;
        stx_begin(x, STX_TRAIN);
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
    tr_buf list;
    size_t i;
    memset(&list, 0, sizeof list);
    tr_buf_puts(&list, "[");
    for (i = 0; i < r->reports; i++) {
        const compression *c = &r->reported[i];
        const double value = rel_error ? c->rel_error : c->loss;
        tr_number(text, value);
        if (i) tr_buf_puts(&list, ",");
        tr_buf_puts(&list, text);
        snprintf(text, sizeof text, "compression/%s_layer_%zu", curve, c->layer + 1);
        tr_lm_point(&r->t, text, value);
    }
    tr_buf_puts(&list, "]");
    tr_log_json(&r->t.log, name, list.oom ? NULL : list.s);
    tr_buf_free(&list);
}

static void log_compression(run *r) {
    read_compression(r);
    log_list(r, "aux", "loss", 0);
    log_list(r, "ratio", "ratio", 1);
}

/* When a run resumes, restores the `frozen` flags of the layers that --literal freeze had
   frozen, because the checkpoint does not store them. A layer freezes at its first
   compression, once M / S segments have filled its M-row memory. */
static void restore_frozen(run *r) {
    const size_t S = opt.block_sz;
    size_t l, segments = stx_batches_stream(r->t.batches) / S;     /* segments between two memory
                                                                      resets */
    if (!(r->model->desc.literal & STX_COMP_LITERAL_FREEZE)) return;
    if (opt.lm.random_segments) segments = (size_t)opt.lm.random_segments;
    for (l = 0; l < opt.nlayers; l++) {
        stx_comp_layer *p = &r->model->layer[l];
        p->frozen = p->C && r->t.step > p->M / S && segments > p->M / S;
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

        t->lr = stx_schedule_lr(&t->schedule, t->step + 1);
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


// >>results at the end of a run

static void print_compression(const tr_lm *t, FILE *out) {
    const run *r = (const run *)t;
    size_t i;
    if (!r->reports || t->step == t->first) return;
    fprintf(out, "lost by compression, sum (target - got)^2 / sum target^2:");
    for (i = 0; i < r->reports; i++) {
        const compression *c = &r->reported[i];
        fprintf(out, "%s %.3f (layer %zu)", i ? "," : "", c->rel_error, c->layer + 1);
    }
    fprintf(out, "\n");
}

static size_t eval_batch(void) {
    if (opt.lm.eval_batch_sz) return (size_t)opt.lm.eval_batch_sz;
    return (size_t)(opt.batch_sz / opt.batch_split);
}

/* Sums of losses and tokens, grouped by the number of blocks since the memory was empty.
   The buckets end at 1, 2, 4, .. blocks. */
enum { BUCKETS = 64 };

typedef struct buckets {
    double nll[BUCKETS], tokens[BUCKETS];
} buckets;

/* Evaluates the validation text in batches of B streams and T tokens, and empties the
   memory every `document` blocks. `tokens` is a buffer of 2 B T elements. */
static void eval_buckets(const tr_lm *t, size_t B, size_t T, size_t document, int32_t *tokens,
                         buckets *sums) {
    int32_t *next = tokens + B * T;
    void *state = t->lm.state_create(t->lm.model, B, t->eval_window);
    stx_batches_desc d;
    stx_batches *b;
    size_t n, k = 0;
    memset(&d, 0, sizeof d);
    d.B = B;
    d.T = T;
    b = stx_batches_create(t->x, t->text[1], &d);
    if (b) stx_batches_rewind(b, STX_EVAL_ALL);
    while (b && !tr_stop_requested()) {
        size_t blocks = k++ % document, bucket = 0;
        stx_ids *in, *out;
        if (stx_batches_next_eval(b, tokens, next, &n) == STX_BATCH_END) break;
        if (!blocks) t->lm.state_reset(state);
        for (; blocks; blocks /= 2) bucket++;
        stx_begin(t->x, STX_EVAL);
        in = stx_tokens(t->x, tokens, B, n);
        out = stx_tokens(t->x, next, B, n);
        sums->nll[bucket] += (double)(B * n)
                             * stx_item(t->x, t->lm.loss(t->lm.model, in, out, state, state));
        sums->tokens[bucket] += (double)(B * n);
    }
    stx_batches_free(b);
    t->lm.state_free(state);
}

/* --eval-positions: prints the mean loss in nats per token, by the number of tokens since
   the memory was empty. */
static void print_positions(const tr_lm *t, FILE *out) {
    const size_t document = (size_t)(opt.eval_positions / opt.block_sz);
    size_t B = eval_batch(), T = t->eval_block, i;
    buckets sums;
    int32_t *tokens;
    if (!document || !t->text[1]) return;
    tr_lm_fit(t->text[1], &B, &T);
    memset(&sums, 0, sizeof sums);
    tokens = (int32_t *)malloc(2 * B * T * sizeof *tokens);
    if (!tokens) {
        stx_fail(t->x, STX_ERR_MEMORY, "out of memory: cannot allocate a batch of %zu x %zu tokens",
                 B, T);
        return;
    }
    eval_buckets(t, B, T, document, tokens, &sums);
    free(tokens);
    if (!stx_ok(t->x) || tr_stop_requested()) return;
    fprintf(out, "loss by tokens since an empty memory:");
    for (i = 0; i < BUCKETS && sums.tokens[i] > 0; i++) {
        const size_t begin = i ? T << (i - 1) : 0;
        fprintf(out, "%s %zu-%zu %.4f", i ? "," : "", begin, T << i, sums.nll[i] / sums.tokens[i]);
    }
    fprintf(out, "\n");
}

static void print_results(const tr_lm *t, FILE *out) {
    print_compression(t, out);
    print_positions(t, out);
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

/* Reports the library's error, with field names replaced by option names. */
static int report_error(tr_lm *t) {
    static const tr_word words[] = {
        {"layers", "nlayers"},
        {"dim", "hid-sz"},
        {"emb", "emb-sz"},
        {"inner", "inner-hid-sz"},
        {"segment", "block-sz"},
        {"zero_gate_bias", "no-gate-bias"},
        {"mems, cmems", "--mems, --cmems"},
        {"a divisor of dim", "a divisor of --hid-sz"},
        {"a divisor of heads", "a divisor of --nheads"},
        {"compress is STX_COMP_COMPRESS_CONV", "--compress is conv"},
        {"compress is STX_COMP_COMPRESS_DILATED", "--compress is dilated"},
        {"aux is STX_COMP_AUX_BPTT", "--aux is bptt"},
        {"aux is STX_COMP_AUX_ATTENTION", "--aux is attention"},
        {"expected STX_COMP_AUX_NONE", "expected none"},
        {"other than STX_COMP_AUX_BPTT", "other than bptt"},
        {"gate is STX_COMP_GATE_GRU and dim is 4 or more",
         "--gate is gru and --hid-sz is 4 or more"},
        {"with zero_gate_bias", "with --no-gate-bias"},
        {"STX_COMP_STORE_ROTATE", "--recurrence rotate"},
        {"STX_COMP_POSITIONS_XL", "--positions xl"},
        {": STX_COMP_LITERAL_ROWS", " rows"},
        {": STX_COMP_LITERAL_PAD", " pad"},
        {": STX_COMP_LITERAL_TARGET", " target"},
        {": STX_COMP_LITERAL_MASK", " mask"},
        {": STX_COMP_LITERAL_FREEZE", " freeze"},
        {"requires STX_COMP_POSITIONS_LEARNED", "requires --positions learned"},
        {"requires STX_COMP_COMPRESS_CONV", "requires --compress conv"},
        {"requires STX_COMP_AUX_ATTENTION", "requires --aux attention"},
        {"a compression other than STX_COMP_COMPRESS_USED", "a --compress other than used"},
        {"STX_COMP_LITERAL selects", "--literal without names selects"},
        {NULL, NULL}
    };
    return tr_lm_why_in(t, "stx_comp_create: ", words);
}

/* Parses --mems or --cmems, a list of one number per layer. */
static int per_layer(tr_lm *t, const char *name, const char *text, size_t *out,
                     const size_t **list) {
    size_t n, l;
    *list = NULL;
    if (!text || !*text) return 1;
    if (!tr_read_sizes(text, out, opt.nlayers, &n) || n != opt.nlayers)
        return tr_fail(t->err, TR_ERR,
                       "--%s %.200s: expected %llu numbers, one per layer, separated by commas",
                       name, text, (unsigned long long)opt.nlayers);
    for (l = 0; l < n; l++)
        if (out[l] > MAX_ROWS)
            return tr_fail(t->err, TR_ERR, "--%s %.200s: expected at most %d rows, got %zu", name,
                           text, (int)MAX_ROWS, out[l]);
    *list = out;
    return 1;
}

static int read_memory_layers(run *r) {
    const char *text = opt.memory_layers;
    stx_comp_desc *d = &r->desc;
    size_t i, k;
    if (!text || !strcmp(text, "all")) return 1;
    d->no_memory = !*text || !strcmp(text, "none");
    if (d->no_memory) return 1;
    if (!tr_read_sizes(text, r->memory_layers, MAX_LAYERS, &d->memory_count))
        return tr_fail(r->t.err, TR_ERR,
                       "--memory-layers %.200s: expected all, none, or layer numbers separated by "
                       "commas", text);
    for (i = 0; i < d->memory_count; i++) {
        const size_t layer = r->memory_layers[i];
        if (!layer || layer > opt.nlayers)
            return tr_fail(r->t.err, TR_ERR,
                           "--memory-layers %.200s: expected layers from 1 to %llu (--nlayers), "
                           "got %zu", text, (unsigned long long)opt.nlayers, layer);
        for (k = 0; k < i; k++)
            if (r->memory_layers[k] == layer)
                return tr_fail(r->t.err, TR_ERR,
                               "--memory-layers %.200s: expected each layer at most once, got "
                               "%zu twice", text, layer);
    }
    d->memory_layers = r->memory_layers;
    return 1;
}

static int read_dilations(run *r) {
    stx_comp_desc *d = &r->desc;
    size_t i;
    int ok;
    if (!opt.dilations || !*opt.dilations) return 1;
    ok = tr_read_sizes(opt.dilations, d->dilation, STX_COMP_MAX_DILATIONS, &d->dilations);
    for (i = 0; i < d->dilations; i++) ok = ok && d->dilation[i] && d->dilation[i] <= 1u << 20;
    if (ok) return 1;
    return tr_fail(r->t.err, TR_ERR,
                   "--dilations %.200s: expected up to %d numbers from 1 to 2^20, separated by "
                   "commas", opt.dilations, (int)STX_COMP_MAX_DILATIONS);
}

/* Resolves a dropout option: 0 means the value of --dropout, and a negative value means
   no dropout. */
static double dropout(double own) {
    if (own < 0) return 0;
    return own == 0 ? opt.dropout : own;
}

/* Creates the model in x and returns the forms of --literal that apply to it. */
static const unsigned *literal_in(stx_ctx *x, const void *desc) {
    const stx_comp *m = stx_comp_create(x, (const stx_comp_desc *)desc);
    return m ? &m->desc.literal : NULL;
}

/* Fills in r->desc from the options. Returns 0 and sets an error if a list is invalid or
   the forms of --literal cannot be determined. */
static int describe(run *r, size_t vocab) {
    stx_comp_desc *d = &r->desc;
    memset(d, 0, sizeof *d);
    d->vocab = vocab;
    d->layers = opt.nlayers;
    d->dim = opt.hid_sz;
    d->emb = opt.emb_sz;
    d->inner = opt.inner_hid_sz;
    d->heads = opt.nheads;
    d->kv_heads = opt.kv_heads;
    d->segment = opt.block_sz;
    d->mem = opt.mem ? (size_t)opt.mem : STX_COMP_NO_ROWS;
    d->cmem = opt.cmem ? (size_t)opt.cmem : STX_COMP_NO_ROWS;
    d->ratio = opt.ratio;
    d->compress = opt.compress;
    d->overlap = opt.overlap;
    d->conv_no_bias = opt.conv_no_bias;
    d->aux = opt.aux;
    d->aux_weight = opt.aux_weight;
    d->aux_dropout = opt.aux_dropout;
    d->bptt = opt.bptt;
    d->positions = opt.positions;
    d->norm_after = opt.norm_after;
    d->final_norm = opt.final_norm;
    d->glu = opt.glu;
    d->tied = opt.tied;
    d->gate = opt.gate;
    d->gate_relu = opt.gate_relu;
    d->gate_bias = opt.gate_bias;
    d->zero_gate_bias = opt.no_gate_bias;
    d->mogrify = opt.mogrify;
    d->recurrence = opt.recurrence;
    d->attn_dropout = dropout(opt.attn_dropout);
    d->out_dropout = dropout(opt.out_dropout);
    d->ff_dropout = dropout(opt.ff_dropout);
    if (!read_memory_layers(r) || !read_dilations(r)) return 0;
    if (!per_layer(&r->t, "mems", opt.mems, r->mems, &d->mems)) return 0;
    return per_layer(&r->t, "cmems", opt.cmems, r->cmems, &d->cmems)
           && tr_lm_choose_literal(&r->t, opt.literal, &d->literal, d, literal_in);
}

/* Returns the number of parameters, or sets an error and returns 0. */
static size_t count(tr_lm *t, size_t vocab) {
    run *r = (run *)t;
    size_t n;
    if (!describe(r, vocab)) return 0;
    n = stx_comp_count(&r->desc);
    if (!n) {
        stx_comp_create(t->x, &r->desc);        /* fails too, and sets the error */
        report_error(t);
    }
    return n;
}

/* Writes a one-line description of the model to `line`. *states receives the number of
   elements in the model's memories. */
static void shape(const tr_lm *t, char *line, size_t size, double *states) {
    const stx_comp_desc *d = &((const run *)t)->desc;
    size_t l, i, rows = 0, n = 0;
    for (l = 0; l < opt.nlayers; l++) {
        int memory = !d->no_memory && !d->memory_layers;
        for (i = 0; i < d->memory_count; i++) memory |= d->memory_layers[i] == l + 1;
        if (!memory) continue;
        n++;
        rows += d->mems ? d->mems[l] : (size_t)opt.mem;
        if (opt.compress == STX_COMP_COMPRESS_DROP) continue;
        rows += d->cmems ? d->cmems[l] : (size_t)opt.cmem;
    }
    snprintf(line, size,
             "%llu layer%s, %llu head%s, segment %llu; "
             "%zu layer%s with a memory, %zu row%s in total",
             (unsigned long long)opt.nlayers, tr_s(opt.nlayers), (unsigned long long)opt.nheads,
             tr_s(opt.nheads), (unsigned long long)opt.block_sz, n, tr_s(n), rows, tr_s(rows));
    *states = (double)opt.batch_sz * (double)opt.hid_sz * (double)rows;
}

/* Sets and checks the memory capacities for evaluation and generation. */
static int eval_sizes(run *r) {
    const stx_comp *m = r->model;
    const double B = (double)eval_batch(), gib = 1 << 30;
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
        && opt.block_sz + most_M + most_C > m->key_pe->dim[0])
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
    for (l = 0; l < opt.nlayers && r->reports < (STX_MAX_METRICS - METRIC_AUX) / 2; l++)
        if (m->layer[l].C) r->reported[r->reports++].layer = l;
    return 1;
}

/* Creates the model and, for training, the optimiser. */
static int make(tr_lm *t) {
    run *r = (run *)t;
    stx_optim_desc od;
    if (!describe(r, stx_vocab_size(t->vocab))) return 0;
    if (!tr_lm_fits(t, (double)stx_comp_count(&r->desc))) return 0;
    r->model = stx_comp_create(t->x, &r->desc);
    if (!r->model) return report_error(t);
    t->lm = stx_comp_as_lm(r->model);
    t->lm.state_create = state_create;
    t->lm.gen_create = gen_create;
    if (!eval_sizes(r) || !report_layers(r)) return 0;
    if (!t->training) return stx_ok(t->x) ? 1 : report_error(t);
    memset(&od, 0, sizeof od);
    od.kind = optim_kinds[opt.optim];
    od.momentum = opt.momentum;
    od.weight_decay = opt.weight_decay;
    od.clip = opt.grad_clip;
    return tr_lm_make(t, &od, 1);
}

/* Checks that the options are consistent before any text is read. */
static int check(tr_lm *t) {
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
        {"lr-start", opt.lr_warmup, "runs with --lr-warmup"},
        {"lr-min", opt.schedule == SCHEDULE_COSINE, "--schedule cosine"},
        {"momentum", opt.optim == OPTIM_SGD, "--optim sgd"}
    };
    if (!tr_check_only(&options, only, sizeof only / sizeof *only, t->err, TR_ERR)) return 0;
    if (opt.hid_sz % opt.nheads)
        return tr_fail(t->err, TR_ERR, "--nheads: expected a divisor of --hid-sz %llu, got %llu",
                       (unsigned long long)opt.hid_sz, (unsigned long long)opt.nheads);
    if (opt.eval_positions % opt.block_sz)
        return tr_fail(t->err, TR_ERR,
                       "--eval-positions: expected a multiple of --block-sz %llu, got %llu",
                       (unsigned long long)opt.block_sz, (unsigned long long)opt.eval_positions);
    if (opt.compress == STX_COMP_COMPRESS_DROP && (cmem || cmems))
        return tr_fail(t->err, TR_ERR,
                       "--cmem, --cmems: --compress none has no compressed memory: leave them out, "
                       "or choose another --compress");
    return describe((run *)t, 1);
}

/* Sets the length of the run, the steps at which it logs, evaluates and saves, and the
   learning-rate schedule. */
static void plan(tr_lm *t) {
    t->steps = opt.lm.steps ? opt.lm.steps : 1000;
    t->log_every = opt.lm.log_every ? opt.lm.log_every : 10;
    t->eval_every = opt.lm.eval_every;
    t->save_every = opt.lm.save_every;
    t->eval_blocks = opt.lm.eval_blocks;
    t->eval_block = opt.block_sz;
    t->eval_window = opt.eval_mem >= 0 || opt.eval_cmem >= 0;      /* see state_create */
    t->schedule.kind = schedule_kinds[opt.schedule];
    t->schedule.lr = opt.lr;
    t->schedule.lr_start = opt.lr_start;
    t->schedule.lr_min = opt.lr_min;
    t->schedule.warmup = opt.lr_warmup;
    t->schedule.total = t->steps;
}

static const int no_adapt_io = 0;

static const tr_lm_kind kind = {
    "seqtx.compressive.1", "memory", &no_adapt_io, NULL, STX_ORDER_FIRST, 0,
    /* sized: changes to DEMO for texts of up to 1e5 tokens, for texts of up to 2e6
       tokens, and for longer texts */
    {"nlayers=2 hid-sz=64 dropout=0.2", "dropout=0.1", ""},
    check, plan, count, shape, make, train, print_results, sizeof(run)
};

int main(int argc, char **argv) {
    return tr_lm_main(&this_run.t, &kind, &options, &opt.lm, NULL, argc, argv);
}
