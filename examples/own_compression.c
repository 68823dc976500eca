/* own_compression.c - a compression method of your own in seqtx_compressive.h: a learned,
   gated mean of the rows of a group.

   Next to the headers (in the source tree, with -I.):
       cc -O2 own_compression.c -lm -o own_compression && ./own_compression FILE [STEPS]

   The r rows old_t of a group become one row

       new = 2/r sum_t sigmoid(W old_t + b) old_t

   W and b start at 0, so the method begins as the mean. The compression loss trains them
   to keep what attention reads. At the end, the program compares the relative error of
   the compression with that of the mean (W = b = 0). tests/models/test_own.c checks the
   gradients, generation and checkpoints of this method. */
#define SEQTX_IMPLEMENTATION
#include "seqtx_compressive.h"
#include "seqtx_text.h"
#include <stdio.h>
#include <stdlib.h>

/* The parameters of layer l: layers.<l>.compress.gate.weight and .bias. The model counts,
   creates and saves them, and optimisers update them. w is initially all zeros. */
static size_t gated_weights(void *user, const stx_comp_desc *d, size_t l, stx_weight *w) {
    (void)user;
    (void)l;
    w[0].name = "gate.weight";
    w[0].rows = w[0].columns = d->dim;
    w[1].name = "gate.bias";
    w[1].rows = d->dim;
    return 2;
}

/* Returns the new rows (B,G,D). e->rows (B,G taps,D) holds the rows of each group. Rows
   that the last group lacks are 0, so they add nothing. */
static stx_tensor *gated_forward(stx_ctx *x, void *user, const stx_comp_evicted *e) {
    (void)user;
    stx_tensor *gate = stx_linear(x, e->rows, e->w[0], e->w[1], STX_ACT_SIGMOID);
    stx_tensor *kept = stx_mul(x, gate, e->rows), *sum = NULL;
    kept = stx_reshape(x, kept, e->B, e->G, e->taps * e->D, 0);
    for (size_t t = 0; t < e->taps; t++) {
        stx_tensor *row = stx_slice_channels(x, kept, t * e->D, (t + 1) * e->D);
        sum = sum ? stx_add(x, sum, row) : row;
    }
    return stx_scale(x, sum, 2.0 / (double)e->taps);
}

static const stx_comp_method gated_mean = {"gated mean", gated_weights, gated_forward, NULL,
                                           STX_COMP_ROWS_GROUPED};

enum { B = 4, T = 64 }; /* streams, and tokens per segment */

/* Returns the relative error of the compression in the last layer, for one segment. The
   result of the segment is written to `out`, and the weights do not change. */
static double error_of(stx_comp *model, const int32_t *in, const int32_t *next,
                       const stx_comp_state *memory, stx_comp_state *out) {
    stx_ctx *x = model->ctx;
    stx_begin(x, STX_TRAIN);
    stx_comp_loss(model, stx_tokens(x, in, B, T), stx_tokens(x, next, B, T), NULL, memory, out);
    return stx_item(x, model->rel_error[model->desc.layers - 1]);
}

/* Prints the relative error of the compression, and that of the mean: W = b = 0. */
static void compare(stx_comp *model, const int32_t *in, const int32_t *next,
                    const stx_comp_state *memory) {
    stx_comp_state *out = stx_comp_state_create(model, B);
    double own = error_of(model, in, next, memory, out), mean;
    for (size_t l = 0; l < model->desc.layers; l++) {
        stx_param_fill(model->ctx, model->layer[l].compress[0], 0, model->desc.dim, 0);
        stx_param_fill(model->ctx, model->layer[l].compress[1], 0, model->desc.dim, 0);
    }
    mean = error_of(model, in, next, memory, out);
    printf("relative error of the compression: %.4f, of the mean: %.4f\n", own, mean);
}

int main(int argc, char **argv) {
    static int32_t in[B * T], next[B * T];
    const char *path = argc > 1 ? argv[1] : "examples/own_compression.c";
    int steps = argc > 2 ? atoi(argv[2]) : 300;
    if (steps < 1) {
        fputs("usage: own_compression [TEXT [STEPS]]\n", stderr);
        return 2;
    }

    stx_ctx *x = stx_create(NULL);
    stx_vocab *bytes = stx_vocab_build(x, NULL, NULL, 0, 0);
    stx_corpus *text = stx_corpus_open(x, bytes, path, 0, 0);
    stx_batches_desc bd = {0};
    bd.B = B;
    bd.T = T;
    stx_batches *batches = stx_batches_create(x, text, &bd);

    stx_comp_desc d = {0};
    d.vocab = 256;
    d.layers = 2;
    d.dim = 64;
    d.heads = 4;
    d.segment = d.mem = T;
    d.ratio = 4;
    d.custom = &gated_mean;
    stx_comp *model = stx_comp_create(x, &d);
    stx_optim *adam = stx_optim_create(stx_comp_params(model), NULL);
    stx_comp_state *memory = stx_comp_state_create(model, B);

    for (int step = 1; step <= steps && stx_ok(x); step++) {
        if (stx_batches_next(batches, in, next) == STX_BATCH_FRESH) stx_comp_state_reset(memory);
        stx_begin(x, STX_TRAIN);
        stx_tensor *nll = stx_comp_loss(model, stx_tokens(x, in, B, T), stx_tokens(x, next, B, T),
                                        NULL, memory, memory);
        stx_backward(x, stx_comp_total(model, nll));
        if (step % 50 == 0)
            printf("step %d: %.3f bits per byte\n", step, stx_item(x, nll) / 0.69314718);
        stx_optim_step(adam, 0.003);
    }

    if (stx_ok(x)) compare(model, in, next, memory);

    int ok = stx_ok(x);
    if (!ok) fprintf(stderr, "own_compression: %s\n", stx_error(x));
    stx_batches_free(batches);
    stx_corpus_close(text);
    stx_vocab_free(bytes);
    stx_destroy(x);
    return !ok;
}
