/* train_compressive.c - trains, evaluates and samples the Compressive Transformer of seqtx_compressive.h on text.

       cc -O3 -pthread train_compressive.c -lm -o train_compressive
       ./train_compressive --data FILE --steps 2000 --checkpoint run.safetensors
       ./train_compressive --help

   The training loop is the function train(), in the open; options, data, checkpoints, log and terminal are train.h's. */
#define TR_LM
#include "train.h"
#define SEQTX_IMPLEMENTATION
#include "../seqtx_compressive.h"
#include "../seqtx_text.h"

// >>options ----------------------------------------------------------------------------------------------------------

enum { MAX_LAYERS = 4096, MAX_ROWS = 1 << 30 };
/* --literal without names is the library's own flag for all forms */
typedef char tr_every_is_all[(int)TR_EVERY == (int)STX_COMP_LITERAL ? 1 : -1];

static struct {
    uint64_t nlayers, hid_sz, emb_sz, inner_hid_sz, nheads, kv_heads, block_sz, mem, cmem, ratio, overlap, bptt;
    const char *memory_layers, *mems, *cmems, *dilations;
    int compress, conv_no_bias, aux, positions, norm_after, final_norm, glu, tied, gate, gate_relu, no_gate_bias, mogrify, recurrence;
    int literal, eval_mem, eval_cmem;
    uint64_t eval_positions;
    double aux_weight, gate_bias, dropout, attn_dropout, out_dropout, ff_dropout, aux_dropout;
    int optim, schedule;
    double lr, lr_start, lr_min, momentum, weight_decay, grad_clip;
    uint64_t lr_warmup, batch_sz, batch_split;
    tr_lm_opt lm;
} opt;

/* The second column says what a checkpoint does with an option: see "Resuming" in train.h. */
static tr_opt table[] = {
    TR_GROUP("Model"),
    TR_SIZE("nlayers", TR_MODEL, &opt.nlayers, 1, MAX_LAYERS, "layers"),
    TR_SIZE("hid-sz", TR_MODEL, &opt.hid_sz, 1, 1u << 29, "hidden size d"),
    TR_SIZE("emb-sz", TR_MODEL, &opt.emb_sz, 0, 1u << 29, "width of the embedding; 0: --hid-sz"),
    TR_SIZE("inner-hid-sz", TR_MODEL, &opt.inner_hid_sz, 0, MAX_ROWS, "inner size of the feed-forward; 0: 4 d"),
    TR_SIZE("nheads", TR_MODEL, &opt.nheads, 1, 256, "attention heads; must divide --hid-sz"),
    TR_SIZE("kv-heads", TR_MODEL, &opt.kv_heads, 0, 256, "heads of keys and values, which several queries share; 0: --nheads"),
    TR_SIZE("block-sz", TR_MODEL, &opt.block_sz, 1, MAX_ROWS, "segment: tokens of each stream per step, after which memory moves"),
    TR_CHOICE("positions", TR_MODEL, &opt.positions, "learned|xl", "learned: a table for all layers, a part a head; xl: Transformer-XL's"),
    TR_FLAG("norm-after", TR_MODEL, &opt.norm_after, "layer norm after each sublayer (the paper), in place of before"),
    TR_FLAG("final-norm", TR_MODEL, &opt.final_norm, "a layer norm before the output"),
    TR_FLAG("glu", TR_MODEL, &opt.glu, "gated linear units in the feed-forward"),
    TR_FLAG("tied", TR_MODEL, &opt.tied, "the output's matrix is the embedding's"),
    TR_CHOICE("gate", TR_MODEL, &opt.gate, "residual|gru|input|output|highway|sigtanh|gtrxl",
        "how a sublayer meets the stream: x + y, the reference's GRU, or the gates of GTrXL"),
    TR_FLAG("gate-relu", TR_MODEL, &opt.gate_relu, "ReLU on what goes into the gate (GTrXL)"),
    TR_REAL("gate-bias", TR_FIXED, &opt.gate_bias, -80, 80, "the gate's first bias; 0: 2 for gtrxl, 1 for output, highway and sigtanh"),
    TR_FLAG("no-gate-bias", TR_FIXED, &opt.no_gate_bias, "... which begins with 0"),
    TR_FLAG("mogrify", TR_MODEL, &opt.mogrify, "gru: a mogrifier before the gate"),
    TR_REAL_OPEN("dropout", TR_FREE, &opt.dropout, TR_OPEN_MAX, 0, 1, "on attention weights, attention's output, inside the feed-forward"),
    TR_REAL("attn-dropout", TR_FREE, &opt.attn_dropout, -1, 0.99, "on attention weights; 0: as --dropout, -1: none"),
    TR_REAL("out-dropout", TR_FREE, &opt.out_dropout, -1, 0.99, "on attention's output; 0: as --dropout, -1: none"),
    TR_REAL("ff-dropout", TR_FREE, &opt.ff_dropout, -1, 0.99, "inside the feed-forward; 0: as --dropout, -1: none"),
    TR_GROUP("Memory"),
    TR_TEXT("memory-layers", TR_MODEL, &opt.memory_layers, "layers that have a memory, as 6,7,8, or: all, none"),
    TR_SIZE("mem", TR_MODEL, &opt.mem, 0, MAX_ROWS, "rows of memory; 0: none"),
    TR_SIZE("cmem", TR_MODEL, &opt.cmem, 0, MAX_ROWS, "rows of compressed memory; 0: none"),
    TR_TEXT("mems", TR_MODEL, &opt.mems, "in place of --mem: a number for each layer, with commas between"),
    TR_TEXT("cmems", TR_MODEL, &opt.cmems, "in place of --cmem: a number for each layer"),
    TR_CHOICE("recurrence", TR_MODEL, &opt.recurrence, "none|ernie|rotate", "what a layer remembers: its own input; its own output; its "
        "input, handed one memory layer down at each call (the reference's)"),
    TR_GROUP("Compression"),
    TR_CHOICE("compress", TR_MODEL, &opt.compress, "conv|dilated|max|mean|used|none", "what --ratio rows that leave the memory become; "
        "used: those that got most attention stay; none: all are lost"),
    TR_SIZE("ratio", TR_MODEL, &opt.ratio, 1, 1u << 20, "rows that become one"),
    TR_SIZE("overlap", TR_MODEL, &opt.overlap, 0, 1u << 20, "conv: it sees so many older rows besides"),
    TR_FLAG("conv-no-bias", TR_MODEL, &opt.conv_no_bias, "conv: no bias"),
    TR_TEXT("dilations", TR_MODEL, &opt.dilations, "dilated: up to eight numbers, as 1,2,4 (which is the default)"),
    TR_CHOICE("aux", TR_MODEL, &opt.aux, "auto|attention|autoencode|bptt|none", "what trains the compression; auto: attention where there "
        "is something to train; bptt: the loss of the next segments"),
    TR_REAL("aux-weight", TR_FREE, &opt.aux_weight, 0, 1e6, "weight of that loss; 0: 1"),
    TR_REAL_OPEN("aux-dropout", TR_FREE, &opt.aux_dropout, TR_OPEN_MAX, 0, 1, "on its attention weights"),
    TR_SIZE("bptt", TR_FIXED, &opt.bptt, 0, 1024, "bptt: how many segments later; 0: 1"),
    TR_GROUP("The reference's own forms"),
    TR_SET("literal", TR_MODEL, &opt.literal, "rows|pad|target|mask|freeze",
        STX_COMP_LITERAL_TARGET | STX_COMP_LITERAL_FREEZE,
        "accidental behaviour of the reference, reproduced. rows: the table row of a distance "
        "depends on how full the memory is. pad: if --ratio does not divide the rows, padding goes "
        "in front and the newest rows are lost. target: the attention loss compares with the whole "
        "memory. mask: padding enters the memory (there is none in training). freeze: keys and "
        "values of a memory layer stop learning at its first compression"),
    TR_GROUP("Optimisation"),
    TR_CHOICE("optim", TR_FIXED, &opt.optim, "adam|adamw|sgd|adagrad", "optimiser"),
    TR_REAL("lr", TR_FREE, &opt.lr, 0, 1e6, "learning rate"),
    TR_CHOICE("schedule", TR_FREE, &opt.schedule, "constant|cosine|inv-sqrt", "learning rate after the warm-up"),
    TR_SIZE("lr-warmup", TR_FREE, &opt.lr_warmup, 0, TR_INF, "steps of linear warm-up"),
    TR_REAL("lr-start", TR_FREE, &opt.lr_start, 0, 1e6, "where it begins"),
    TR_REAL("lr-min", TR_FREE, &opt.lr_min, 0, 1e6, "end of the cosine"),
    TR_REAL("momentum", TR_FIXED, &opt.momentum, 0, 1, "of sgd"),
    TR_REAL("weight-decay", TR_FREE, &opt.weight_decay, 0, 1e6, "of adam and sgd (in the gradient) and adamw (decoupled)"),
    TR_REAL("grad-clip", TR_FREE, &opt.grad_clip, 0, 1e9, "largest gradient norm: per tensor with adagrad, of all together otherwise; "
        "0: none"),
    TR_SIZE("batch-sz", TR_FIXED, &opt.batch_sz, 1, 1u << 30, "parallel streams of text"),
    TR_SIZE("batch-split", TR_FIXED, &opt.batch_split, 1, 1u << 30, "work on the batch in this many parts, one after the other (less "
        "memory)"),
    TR_LM_PACE(opt.lm),
    TR_SIZE("steps", TR_FREE, &opt.lm.steps, 0, TR_INF, "steps in all: one segment of every stream each; 0: 1000"),
    TR_SIZE("seed", TR_FIXED, &opt.lm.seed, 0, TR_INF, "of initial values, dropout and pieces of text; of sampling where it is given, else "
        "that differs every time"),
    TR_LM_DATA(opt.lm),
    TR_LM_SAVING(opt.lm, "only at the end", "the whole text"),
    TR_INT("eval-mem", TR_FREE | TR_KEPT, &opt.eval_mem, -1, MAX_ROWS,
        "evaluation and generation: rows of memory of each memory layer; -1: as in "
        "training"),
    TR_INT("eval-cmem", TR_FREE | TR_KEPT, &opt.eval_cmem, -1, MAX_ROWS,
        "... rows of compressed memory, where there is any; -1: as in training"),
    TR_SIZE("eval-positions", TR_LOCAL, &opt.eval_positions, 0, TR_INF, "at the end, loss of the validation text by the number of tokens "
        "before, with memory emptied every so many; a multiple of --block-sz. 0: no"),
    TR_LM_RUNNING(opt.lm),
    TR_LM_GENERATION(opt.lm),
    TR_LM_SAMPLING(opt.lm),
    TR_END
};

/* Without a preset: the demo's model and optimiser, then sized by the text (kind.sized below). */
#define BASE "memory-layers=all ratio=4 positions=learned recurrence=none no-final-norm aux-weight=1 optim=adam " \
    "batch-split=1 update-every=1 eval-mem=-1 eval-cmem=-1 "
#define DEMO BASE "tokens=bytes nlayers=3 hid-sz=128 nheads=4 block-sz=64 mem=64 cmem=32 positions=xl norm-after " \
    "lr=0.003 schedule=cosine lr-warmup=60 grad-clip=1 batch-sz=16 "
/* The reference's enwik8 example with its accidental behaviour corrected
   (seqtx_compressive.h, Fidelity). As the reference trains it: --recurrence rotate
   --literal. An update after each of the four segments of a piece. */
#define REFERENCE BASE "tokens=bytes nlayers=8 hid-sz=512 nheads=8 block-sz=512 memory-layers=6,7,8 mem=512 cmem=128 gate=gru " \
    "recurrence=ernie lr=0.0001 schedule=constant lr-warmup=0 grad-clip=0.5 batch-sz=16 batch-split=4 random-segments=4 steps=400000 "
/* The paper (1911.05507, sections 4 and 5, appendices). Dropout, and the batch of enwik8, are not in it. */
#define PAPER BASE "positions=xl norm-after lr=0.0003 lr-start=0.000001 lr-min=0.000001 schedule=cosine grad-clip=0.1 update-every=4 " \
    "update-after=60000 log-every=100 eval-every=2000 save-every=2000 eval-blocks=100 "
#define PAPER_WORDS PAPER "tokens=words lr-warmup=16000 steps=516000 block-sz=512 mem=512 cmem=512 tied "
static const tr_preset presets[] = {
    {"demo", "a small byte model that learns in two minutes on two cores (make demo-compressive)",
        DEMO "memory-layers=2,3 steps=3600 eval-every=900 save-every=900 eval-blocks=10 log-every=100"},
    {"reference", "the reference's enwik8 example: memory in the last three of 8 layers, GRU gates, pieces of four segments",
        REFERENCE "eval-every=2000 save-every=2000 eval-blocks=16 sample-every=2000 sample-prime=512 sample-length=1024"},
    {"readme", "the sizes of the reference's README: 12 layers, segment 1024, GLU; tokens are words here",
        REFERENCE "tokens=words vocab=20000 nlayers=12 emb-sz=128 block-sz=1024 mem=1024 cmem=256 memory-layers=6,7,8,9,10,11,12 glu "
            "dropout=0.1 aux-dropout=0.1"},
    {"enwik8", "the paper's, 24 layers: published test 0.97 bpc",
        PAPER "tokens=bytes-compact vocab=205 data-unit=bpc nlayers=24 hid-sz=1024 inner-hid-sz=3072 nheads=8 block-sz=768 mem=768 "
            "cmem=1152 ratio=3 batch-sz=32 lr-warmup=4000 steps=104000 eval-cmem=3072"},
    {"wikitext103", "the paper's, 18 layers: published test 17.1 ppl, with an adaptive input that is not here: the tables are tied",
        PAPER_WORDS "vocab=267735 nlayers=18 hid-sz=1024 inner-hid-sz=4096 nheads=16 batch-sz=128 eval-mem=500 eval-cmem=1500"},
    {"pg19", "the paper's, 36 layers, on text that is cut into 32,000 subwords before: published test 33.6 ppl a word; the width is ours",
        PAPER_WORDS "vocab=32000 data-unit=word-ppl nlayers=36 hid-sz=1024 inner-hid-sz=4096 nheads=16 ratio=2 batch-sz=512"},
    TR_PRESET_END
};

static tr_options options = {"train_compressive", "Trains a Compressive Transformer on text: a memory whose old rows are compressed, not "
    "thrown away.", table, presets, TR_LM_DEFAULTS DEMO, TR_LM_AFTER, ""};

// >>run: everything that one run works with ---------------------------------------------------------------------------

typedef struct run {
    tr_lm t; /* train.h's: context, data, optimiser, log, .. */
    stx_comp_desc desc;
    stx_comp *model;
    size_t layers[MAX_LAYERS], mems[MAX_LAYERS], cmems[MAX_LAYERS]; /* the lists of the desc */
    size_t reported[MAX_LAYERS], n; /* layers whose compression has a loss, from 0 on; how many */
    double figure
        [2]
        [MAX_LAYERS]; /* of each: that loss, and sum (t - c)^2 / sum t^2; of the step that was asked for last */
} run;

// >>training

enum {
    NOTE_LOSS,
    NOTE_AUX
}; /* the mean loss of a step, nats per token; from NOTE_AUX on two of each reported layer */

/* One step: forward and backward of a segment, and where it is time an update. What changes from step to step comes from t.in, t.out and
   the optimiser's rate, so that a GPU can repeat it without this function (stx_step_run). */
static void step(void *user) {
    run *r = (run *)user;
    stx_ctx *x = r->t.x;
    size_t part, parts = opt.batch_split, i;
    double each = 1.0 / (double)parts;
    for (
        part = 0; part < parts;
        part++) { /* gradients add up over the parts of the batch, and over steps without an update */
        stx_comp_state *memory = (stx_comp_state *)r->t.state[part];
        stx_tensor *loss;
        stx_begin(x, STX_TRAIN);
        loss = stx_comp_loss(r->model, r->t.in[part], r->t.out[part], NULL, memory, memory);
        stx_note(x, NOTE_LOSS, loss, each, part > 0);
        for (i = 0; i < r->n; i++) { /* 0 where nothing left the memory */
            stx_tensor *aux = r->model->aux[r->reported[i]],
                       *ratio = r->model->ratio[r->reported[i]];
            stx_note(x, NOTE_AUX + 2 * (int)i, aux ? aux : loss, aux ? each : 0, part > 0);
            stx_note(x, NOTE_AUX + 2 * (int)i + 1, ratio ? ratio : loss, ratio ? each : 0,
                     part > 0);
        }
        if (r->t.update && part + 1 == parts) stx_group_overlap(r->t.optim);
        stx_backward(x, stx_scale(x, stx_comp_total(r->model, loss), each * r->t.share));
    }
    if (r->t.update) stx_optim_step(r->t.optim, r->t.lr);
}

/* The figures of the last step, all ranks': the mean of the losses, and the ratio of the sums. A rank's sum t^2 is its loss / its ratio. */
static void figures(run *r) {
    double v[2 * MAX_LAYERS];
    size_t i;
    for (i = 0; i < r->n; i++) {
        double loss = stx_noted(r->t.x, NOTE_AUX + 2 * (int)i),
               ratio = stx_noted(r->t.x, NOTE_AUX + 2 * (int)i + 1);
        r->figure[0][i] = v[2 * i] = loss;
        r->figure[1][i] = ratio;
        v[2 * i + 1] = ratio > 0 ? loss / ratio : 0;
    }
    if (tr_lm_ranks(&r->t) < 2 || !stx_group_sum(r->t.x, v, 2 * r->n)) return;
    for (i = 0; i < r->n; i++) {
        r->figure[0][i] = v[2 * i] / tr_lm_ranks(&r->t);
        r->figure[1][i] = v[2 * i + 1] > 0 ? v[2 * i] / v[2 * i + 1] : 0;
    }
}

/* Each layer's compression loss and what share of the rows' square it loses, of the last step: a list each, and curves. */
static void log_compression(run *r) {
    static const char *const name[2] = {"aux", "ratio"}, *const curve[2] = {"loss", "ratio"};
    size_t k, i;
    figures(r);
    for (k = 0; k < 2; k++) {
        tr_buf list;
        memset(&list, 0, sizeof list);
        tr_buf_puts(&list, "[");
        for (i = 0; i < r->n; i++) {
            char text[64];
            double v = r->figure[k][i];
            tr_number(text, v);
            if (i) tr_buf_puts(&list, ",");
            tr_buf_puts(&list, text);
            snprintf(text, sizeof text, "compression/%s_layer_%zu", curve[k], r->reported[i] + 1);
            tr_lm_point(&r->t, text, v);
        }
        tr_buf_puts(&list, "]");
        tr_log_json(&r->t.log, name[k], list.oom ? NULL : list.s);
        tr_buf_free(&list);
    }
}

/* A resumed run with --literal freeze: marks the layers that are frozen already, which
   the checkpoint does not say */
static void freeze(run *r) {
    size_t l, S = opt.block_sz,
              blocks = opt.lm.random_segments ? (size_t)opt.lm.random_segments
                                              : stx_batches_stream(r->t.batches) / S;
    for (l = 0; (r->model->desc.literal & STX_COMP_LITERAL_FREEZE) && l < opt.nlayers; l++) {
        stx_comp_layer *y = &r->model->layer[l];
        y->frozen = y->C && r->t.step > y->M / S && blocks > y->M / S;
    }
}

static void train(tr_lm *t) {
    run *r = (run *)t;
    freeze(r);
    while (tr_lm_more(t)) {
        int fresh = tr_lm_next(t);
        uint64_t key;
        if (fresh == STX_BATCH_END) break;
        key = tr_lm_batch(t, fresh == STX_BATCH_FRESH);

        t->lr = stx_schedule_lr(&t->schedule, t->step + 1);
        stx_optim_rate(t->optim, t->lr);
        tr_lm_step(t, key, step, r);
        if (!tr_lm_stepped(t, stx_noted(t->x, NOTE_LOSS))) break;

        if (tr_lm_log_due(t)) {
            log_compression(r);
            tr_lm_logged(t);
        }
        if (!tr_lm_look_and_save(t)) break;
    }
    if (stx_ok(t->x)) figures(r);
}

static void print_compression(const tr_lm *t, FILE *out) {
    const run *r = (const run *)t;
    size_t i;
    if (!r->n || t->step == t->first) return;
    fprintf(out, "lost by compression, sum (t - c)^2 / sum t^2:");
    for (i = 0; i < r->n; i++)
        fprintf(out, "%s %.3f (layer %zu)", i ? "," : "", r->figure[1][i], r->reported[i] + 1);
    fprintf(out, "\n");
}

/* --eval-positions: the mean loss, nats per token, by the distance from an empty memory. A block of text lies within one bucket: they
   end at one block, two, four, .. */
static void print_positions(const tr_lm *t, FILE *out) {
    enum { BUCKETS = 64 };

    double sum[BUCKETS] = {0}, count[BUCKETS] = {0};
    size_t B = (size_t)(opt.lm.eval_batch_sz ? opt.lm.eval_batch_sz
                                             : opt.batch_sz / opt.batch_split),
           T = t->eval_block, n, k, at, i;
    size_t document = (size_t)(opt.eval_positions / opt.block_sz);
    int32_t *in, *next;
    stx_batches_desc d;
    stx_batches *b;
    void *state;
    if (!document || !t->text[1]) return;
    tr_lm_fit(t->text[1], &B, &T);
    memset(&d, 0, sizeof d);
    d.B = B;
    d.T = T;
    in = (int32_t *)malloc(2 * B * T * sizeof *in);
    if (!in) {
        stx_fail(t->x, STX_ERR_MEMORY, "no memory for a batch of %zu x %zu tokens", B, T);
        return;
    }
    next = in + B * T;
    state = t->lm.state_create(t->lm.model, B, t->eval_window);
    b = stx_batches_create(t->x, t->text[1], &d);
    if (b) stx_batches_rewind(b, STX_EVAL_ALL);
    for (k = 0;
         b && stx_batches_next_eval(b, in, next, &n) != STX_BATCH_END && !tr_stop_requested();
         k++) {
        if (k % document == 0) t->lm.state_reset(state);
        for (at = k % document, i = 0; at; at /= 2) i++;
        stx_begin(t->x, STX_EVAL);
        sum[i] += (double)(B * n)
                  * stx_item(t->x, t->lm.loss(t->lm.model, stx_tokens(t->x, in, B, n),
                                              stx_tokens(t->x, next, B, n), state, state));
        count[i] += (double)(B * n);
    }
    stx_batches_free(b);
    t->lm.state_free(state);
    free(in);
    if (!stx_ok(t->x) || tr_stop_requested()) return;
    fprintf(out, "loss by tokens since an empty memory:");
    for (i = 0; i < BUCKETS && count[i] > 0; i++)
        fprintf(out, "%s %zu-%zu %.4f", i ? "," : "", i ? T << (i - 1) : 0, T << i,
                sum[i] / count[i]);
    fprintf(out, "\n");
}

static void learned(const tr_lm *t, FILE *out) {
    print_compression(t, out);
    print_positions(t, out);
}

// >>main

/* The sizes of evaluation's memories, which may be others than the model's */
static size_t eval_mems[MAX_LAYERS], eval_cmems[MAX_LAYERS];

/* As stx_lm wants them; window is 1 for evaluation and generation with such memories (see plan) */
static void *state_create(void *m, size_t B, size_t window) {
    return stx_comp_state_create_sized((stx_comp *)m, B, window ? eval_mems : NULL,
                                       window ? eval_cmems : NULL);
}

static void *gen_create(void *m, size_t B, size_t window) {
    return stx_comp_gen_create_sized((stx_comp *)m, B, window ? eval_mems : NULL,
                                     window ? eval_cmems : NULL);
}

static int why(tr_lm *t) {
    static const tr_word words[] = {{"layers", "nlayers"},
                                    {"dim", "hid-sz"},
                                    {"emb", "emb-sz"},
                                    {"inner", "inner-hid-sz"},
                                    {"segment", "block-sz"},
                                    {"mems, cmems", "--mems, --cmems"},
                                    {"divide dim", "divide --hid-sz"},
                                    {"a divisor of heads", "a divisor of --nheads"},
                                    {"compress is STX_COMP_CONV", "--compress is conv"},
                                    {"compress is STX_COMP_DILATED", "--compress is dilated"},
                                    {"aux is STX_COMP_AUX_BPTT", "--aux is bptt"},
                                    {"aux is STX_COMP_AUX_ATTENTION", "--aux is attention"},
                                    {"expected STX_COMP_AUX_NONE", "expected none"},
                                    {"other than STX_COMP_AUX_BPTT", "other than bptt"},
                                    {"gate is STX_COMP_GRU and dim is 4 or more",
                                     "--gate is gru and --hid-sz is 4 or more"},
                                    {"with no_gate_bias", "with --no-gate-bias"},
                                    {"STX_COMP_ROTATE", "--recurrence rotate"},
                                    {"STX_COMP_XL", "--positions xl"},
                                    {": STX_COMP_LITERAL_ROWS", " rows"},
                                    {": STX_COMP_LITERAL_PAD", " pad"},
                                    {": STX_COMP_LITERAL_TARGET", " target"},
                                    {": STX_COMP_LITERAL_MASK", " mask"},
                                    {": STX_COMP_LITERAL_FREEZE", " freeze"},
                                    {"requires STX_COMP_LEARNED", "requires --positions learned"},
                                    {"requires STX_COMP_CONV", "requires --compress conv"},
                                    {"requires STX_COMP_AUX_ATTENTION", "requires --aux attention"},
                                    {"a compression other than STX_COMP_USED",
                                     "a --compress other than used"},
                                    {"STX_COMP_LITERAL selects", "--literal without names selects"},
                                    {NULL, NULL}};
    return tr_lm_why_in(t, "stx_comp_create: ", words);
}

/* --mems or --cmems: a number for each layer */
static int per_layer(tr_lm *t, const char *name, const char *text, size_t *out,
                     const size_t **list) {
    size_t n, l;
    *list = NULL;
    if (!text || !*text) return 1;
    if (!tr_read_sizes(text, out, opt.nlayers, &n) || n != opt.nlayers)
        return tr_fail(t->err, TR_ERR,
                       "--%s %.200s: want %llu numbers, one for each layer, with commas between",
                       name, text, (unsigned long long)opt.nlayers);
    for (l = 0; l < n; l++)
        if (out[l] > MAX_ROWS)
            return tr_fail(t->err, TR_ERR, "--%s %.200s: %zu rows, want at most %d", name, text,
                           out[l], (int)MAX_ROWS);
    *list = out;
    return 1;
}

static int memory_layers(run *r) {
    const char *text = opt.memory_layers;
    stx_comp_desc *d = &r->desc;
    size_t i, k;
    if (!text || !strcmp(text, "all")) return 1;
    d->no_memory = !*text || !strcmp(text, "none");
    if (d->no_memory) return 1;
    if (!tr_read_sizes(text, r->layers, MAX_LAYERS, &d->memory_count))
        return tr_fail(
            r->t.err, TR_ERR,
            "--memory-layers %.200s: want all, none, or numbers of layers with commas between",
            text);
    for (i = 0; i < d->memory_count; i++) {
        if (!r->layers[i] || r->layers[i] > opt.nlayers)
            return tr_fail(
                r->t.err, TR_ERR,
                "--memory-layers %.200s: there is no layer %zu, only 1 to %llu (--nlayers)", text,
                r->layers[i], (unsigned long long)opt.nlayers);
        for (k = 0; k < i; k++)
            if (r->layers[k] == r->layers[i])
                return tr_fail(r->t.err, TR_ERR, "--memory-layers %.200s: layer %zu stands twice",
                               text, r->layers[i]);
    }
    d->memory_layers = r->layers;
    return 1;
}

static int dilations(run *r) {
    stx_comp_desc *d = &r->desc;
    size_t i;
    int ok;
    if (!opt.dilations || !*opt.dilations) return 1;
    ok = tr_read_sizes(opt.dilations, d->dilation, STX_COMP_MAX_DILATIONS, &d->dilations);
    for (i = 0; i < d->dilations; i++) ok = ok && d->dilation[i] && d->dilation[i] <= 1u << 20;
    return ok ? 1
              : tr_fail(
                  r->t.err, TR_ERR,
                  "--dilations %.200s: want up to %d numbers from 1 to 2^20 with commas between",
                  opt.dilations, (int)STX_COMP_MAX_DILATIONS);
}

static double dropout(double own) {
    return own < 0 ? 0 : own == 0 ? opt.dropout : own;
}

/* The model that the options describe, for a vocabulary. */
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
    d->no_gate_bias = opt.no_gate_bias;
    d->mogrify = opt.mogrify;
    d->recurrence = opt.recurrence;
    d->attn_dropout = dropout(opt.attn_dropout);
    d->out_dropout = dropout(opt.out_dropout);
    d->ff_dropout = dropout(opt.ff_dropout);
    d->literal = (unsigned)opt.literal;
    return memory_layers(r) && dilations(r) && per_layer(&r->t, "mems", opt.mems, r->mems, &d->mems)
           && per_layer(&r->t, "cmems", opt.cmems, r->cmems, &d->cmems);
}

static size_t count(tr_lm *t, size_t vocab) {
    run *r = (run *)t;
    size_t n;
    if (!describe(r, vocab)) return 0;
    n = stx_comp_count(&r->desc);
    if (!n) {
        stx_comp_create(t->x, &r->desc);
        why(t);
    } /* which says why not */
    return n;
}

static void shape(const tr_lm *t, char *line, size_t room, double *states) {
    const stx_comp_desc *d = &((const run *)t)->desc;
    size_t l, i, rows = 0, n = 0;
    for (l = 0; l < opt.nlayers; l++) {
        int in = !d->no_memory && !d->memory_layers;
        for (i = 0; i < d->memory_count; i++) in |= d->memory_layers[i] == l + 1;
        if (!in) continue;
        n++;
        rows += d->mems ? d->mems[l] : (size_t)opt.mem;
        if (opt.compress != STX_COMP_DROP) rows += d->cmems ? d->cmems[l] : (size_t)opt.cmem;
    }
    snprintf(
        line, room,
        "%llu layers, %llu heads, segment %llu; %zu layers with a memory, of %zu rows together",
        (unsigned long long)opt.nlayers, (unsigned long long)opt.nheads,
        (unsigned long long)opt.block_sz, n, rows);
    *states = (double)opt.batch_sz * (double)opt.hid_sz * (double)rows;
}

/* Evaluation's memories: every memory layer's, every compressed memory's */
static int eval_sizes(run *r) {
    const stx_comp *m = r->model;
    size_t l, mems = 0, cmems = 0, most = 0, cmost = 0;
    double B = (double)(opt.lm.eval_batch_sz ? opt.lm.eval_batch_sz
                                             : opt.batch_sz / opt.batch_split),
           need = 0;
    double limit = (double)stx_ctx_desc(r->t.x)->max_bytes;
    for (l = 0; l < opt.nlayers; l++) {
        const stx_comp_layer *y = &m->layer[l];
        eval_mems[l] = !y->memory || opt.eval_mem < 0 ? y->M : (size_t)opt.eval_mem;
        eval_cmems[l] = !y->C || opt.eval_cmem < 0 ? y->C : (size_t)opt.eval_cmem;
        mems += y->memory;
        cmems += y->C > 0;
        need += B * (double)opt.hid_sz * ((double)eval_mems[l] + (double)eval_cmems[l])
                * sizeof(stx_real);
        if (eval_mems[l] > most) most = eval_mems[l];
        if (eval_cmems[l] > cmost) cmost = eval_cmems[l];
    }
    if (opt.eval_mem > 0 && !mems)
        return tr_fail(r->t.err, TR_ERR, "--eval-mem %d: no layer of this model has a memory",
                       opt.eval_mem);
    if (opt.eval_cmem > 0 && !cmems)
        return tr_fail(r->t.err, TR_ERR, "--eval-cmem %d: this model has no compressed memory",
                       opt.eval_cmem);
    if (tr_given(&options, "aux") && r->desc.aux != STX_COMP_AUX_AUTO
        && r->desc.aux != STX_COMP_AUX_NONE && !cmems)
        return tr_fail(
            r->t.err, TR_ERR,
            "--aux: no layer has a compressed memory for it to train (--memory-layers, --mem, --cmem)");
    if ((m->desc.literal & STX_COMP_LITERAL_ROWS)
        && opt.block_sz + most + cmost > m->key_pe->dim[0])
        return tr_fail(r->t.err, TR_ERR,
                       "--eval-mem, --eval-cmem: %zu and %zu rows are more than "
                       "the model's, which --literal rows does not allow",
                       most, cmost);
    if (limit > 0 && need > limit)
        return tr_fail(
            r->t.err, TR_ERR,
            "--eval-mem, --eval-cmem: memories of %zu and %zu rows take %.3g GiB of the %.3g GiB of "
            "--max-memory: use smaller ones, or a smaller --eval-batch-sz",
            most, cmost, need / (1 << 30), limit / (1 << 30));
    return 1;
}

static int make(tr_lm *t) {
    static const int kinds[] = {STX_ADAM, STX_ADAMW, STX_SGD, STX_ADAGRAD};
    run *r = (run *)t;
    stx_optim_desc od;
    size_t l;
    if (!describe(r, stx_vocab_size(t->vocab)) || !tr_lm_fits(t, (double)stx_comp_count(&r->desc)))
        return 0;
    r->model = stx_comp_create(t->x, &r->desc);
    if (!r->model) return why(t);
    t->lm = stx_comp_lm(r->model);
    t->lm.state_create = state_create;
    t->lm.gen_create = gen_create;
    if (!eval_sizes(r)) return 0;
    for (l = 0; l < opt.nlayers && r->n < (STX_NOTES - NOTE_AUX) / 2; l++)
        if (r->model->layer[l].C
            && (r->model->desc.aux == STX_COMP_AUX_ATTENTION
                || r->model->desc.aux == STX_COMP_AUX_AUTOENCODE))
            r->reported[r->n++] = l;
    if (!t->training) return stx_ok(t->x) ? 1 : why(t);
    memset(&od, 0, sizeof od);
    od.kind = kinds[opt.optim];
    od.momentum = opt.momentum;
    od.weight_decay = opt.weight_decay;
    od.clip = opt.grad_clip;
    return tr_lm_make(t, &od, 1);
}

static int check(tr_lm *t) {
    const int gated = opt.gate != STX_COMP_RESIDUAL, biased = gated && opt.gate != STX_COMP_INPUT;
    const tr_only only[] = {
        {"gate-relu", gated, "a --gate"},
        {"gate-bias", biased, "a --gate with a bias: gru, output, highway, sigtanh or gtrxl"},
        {"no-gate-bias", biased, "a --gate with a bias: gru, output, highway, sigtanh or gtrxl"},
        {"mogrify", opt.gate == STX_COMP_GRU, "--gate gru"},
        {"overlap", opt.compress == STX_COMP_CONV, "--compress conv"},
        {"conv-no-bias", opt.compress == STX_COMP_CONV, "--compress conv"},
        {"dilations", opt.compress == STX_COMP_DILATED, "--compress dilated"},
        {"bptt", opt.aux == STX_COMP_AUX_BPTT, "--aux bptt"},
        {"aux-dropout", opt.aux == STX_COMP_AUX_ATTENTION || opt.aux == STX_COMP_AUX_AUTO,
         "--aux attention"},
        {"aux-weight", opt.aux != STX_COMP_AUX_NONE && opt.aux != STX_COMP_AUX_BPTT,
         "--aux attention and autoencode"},
        {"lr-start", opt.lr_warmup, "an --lr-warmup"},
        {"lr-min", opt.schedule == 1, "--schedule cosine"},
        {"momentum", opt.optim == 2, "--optim sgd"}};
    if (!tr_all_count(&options, only, sizeof only / sizeof *only, t->err, TR_ERR)) return 0;
    if (opt.hid_sz % opt.nheads)
        return tr_fail(t->err, TR_ERR,
                       "--nheads %llu does not divide --hid-sz %llu: choose heads that do",
                       (unsigned long long)opt.nheads, (unsigned long long)opt.hid_sz);
    if (opt.eval_positions % opt.block_sz)
        return tr_fail(t->err, TR_ERR, "--eval-positions %llu: not a multiple of --block-sz %llu",
                       (unsigned long long)opt.eval_positions, (unsigned long long)opt.block_sz);
    if (opt.compress == STX_COMP_DROP
        && ((tr_given(&options, "cmem") && opt.cmem) || (tr_given(&options, "cmems") && opt.cmems)))
        return tr_fail(
            t->err, TR_ERR,
            "--cmem, --cmems: with --compress none there is no compressed memory: leave them out, or choose "
            "another --compress");
    return describe((run *)t, 1);
}

static void plan(tr_lm *t) {
    static const int kinds[] = {STX_LR_CONSTANT, STX_LR_COSINE, STX_LR_INV_SQRT};
    t->steps = opt.lm.steps ? opt.lm.steps : 1000;
    t->log_every = opt.lm.log_every ? opt.lm.log_every : 10;
    t->eval_every = opt.lm.eval_every;
    t->save_every = opt.lm.save_every;
    t->eval_blocks = opt.lm.eval_blocks;
    t->eval_block = opt.block_sz;
    t->eval_window = opt.eval_mem >= 0 || opt.eval_cmem >= 0;
    t->schedule.kind = kinds[opt.schedule];
    t->schedule.lr = opt.lr;
    t->schedule.lr_start = opt.lr_start;
    t->schedule.lr_min = opt.lr_min;
    t->schedule.warmup = opt.lr_warmup;
    t->schedule.total = t->steps;
}

static const int no_adapt_io = 0;
static const tr_lm_kind kind = {"seqtx.compressive.1",
                                "memory",
                                &no_adapt_io,
                                NULL,
                                STX_ORDER_FIRST,
                                0,
                                {"nlayers=2 hid-sz=64 dropout=0.2", "dropout=0.1", ""},
                                check,
                                plan,
                                count,
                                shape,
                                make,
                                train,
                                learned,
                                sizeof(run)};

int main(int argc, char **argv) {
    static run r;
    return tr_lm_main(&r.t, &kind, &options, &opt.lm, NULL, argc, argv);
}
