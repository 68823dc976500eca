/* own_block.c - a block type of your own in seqtx_par.h: a gated causal convolution,
   which the search can choose in place of attention, feed-forward and identity.

   Next to the headers (in the source tree, with -I.):
       cc -O2 own_block.c -lm -o own_block && ./own_block FILE [STEPS]

   The block sees K adjacent rows of its input h (the gated linear units of Dauphin et al.
   2016, 1612.08083):

       z_t = [h_{t-K+1}, .., h_t]
       y_t = Wo ((Wc z_t + bc) sigmoid(Wg z_t + bg))

   Its memory holds the last K - 1 rows of h, so that a text in segments, or token by
   token in generation, gives the same result as the whole text. The model adds the
   residual connection, norm, dropout and gate. The program searches for an order of
   blocks, then continues the text with the network that it found. tests/models/test_own.c
   checks the gradients, generation and checkpoints of this block type. */
#define SEQTX_IMPLEMENTATION
#include "seqtx_par.h"
#include "seqtx_text.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { K = 3 };

/* The parameters layers.<l>.conv.gate.weight etc. The model counts, creates and saves
   them, and optimisers update them. w is initially all zeros. */
static size_t conv_weights(void *user, const stx_par_desc *d, size_t l, stx_weight *w) {
    const char *const name[5] = {"gate.weight", "gate.bias", "in.weight", "in.bias", "out.weight"};
    (void)user;
    (void)l;
    for (int i = 0; i < 5; i++) {
        w[i].name = name[i];
        w[i].rows = d->dim;
    }
    w[0].columns = w[2].columns = K * d->dim;
    w[4].columns = d->dim;
    w[0].init = w[2].init = w[4].init = STX_NORMAL;
    w[0].a = w[2].a = w[4].a = 1 / sqrt((double)(K * d->dim));
    return 5;
}

/* Returns y (B,T,D) for in->h (B,T,D). in->past (B,K-1,D) holds the rows before h; they
   are 0 at the start of a text. *state is appended to the memory. */
static stx_tensor *conv_forward(stx_ctx *x, void *user, const stx_par_branch *in,
                                stx_tensor **state) {
    const size_t n = in->h->dim[1];
    stx_tensor *rows = stx_concat(x, in->past, in->h), *z = NULL;
    (void)user;
    for (size_t k = 0; k < K; k++) {
        stx_tensor *tap = stx_slice(x, rows, k, k + n);
        z = z ? stx_concat_channels(x, z, tap) : tap;
    }
    stx_tensor *gate = stx_linear(x, z, in->w[0], in->w[1], STX_ACT_SIGMOID);
    stx_tensor *c = stx_linear(x, z, in->w[2], in->w[3], STX_ACT_NONE);
    *state = in->h;
    return stx_linear(x, stx_mul(x, c, gate), in->w[4], NULL, STX_ACT_NONE);
}

/* The letter in patterns, the name, the functions, and a memory of K - 1 rows of D */
static const stx_par_type conv_type = {'c', "conv", conv_weights, conv_forward, NULL, K - 1, 0,
                                       0, 0};

enum { BLOCKS = 4 };

/* Prints the shares of the block types, and continues the T tokens `in` with the network
   of the most probable types. */
static void derive(stx_par *supernet, stx_par_desc d, const int32_t *in, size_t T) {
    stx_ctx *x = supernet->ctx;
    double p[BLOCKS][4] = {{0}};        /* attention, feed-forward, identity, convolution */
    char pattern[BLOCKS + 1];
    stx_par_probs(supernet, p[0]);
    for (int l = 0; l < BLOCKS; l++)
        printf("block %d: s %.2f  f %.2f  i %.2f  c %.2f\n", l, p[l][0], p[l][1], p[l][2],
               p[l][3]);
    stx_par_argmax(supernet, pattern, sizeof pattern);
    d.pattern = pattern;
    stx_par *found = stx_par_create(x, &d);
    stx_par_inherit(found, supernet);
    stx_par_gen *gen = stx_par_gen_create(found, 1);
    printf("found %s; it continues:\n", pattern);

    stx_sampling sampling = {0};
    sampling.temperature = 0.7;
    stx_real work[256];
    const stx_real *logits = stx_par_gen_feed(gen, in, T);
    for (uint64_t i = 0; i < 200 && logits; i++) {
        int32_t token = stx_sample(&sampling, i, logits, 256, work);
        putchar(token);
        logits = stx_par_gen_feed(gen, &token, 1);
    }
    putchar('\n');
}

int main(int argc, char **argv) {
    enum { B = 4, T = 32 }; /* streams, tokens per segment */

    static int32_t in[B * T], next[B * T];
    const char *path = argc > 1 ? argv[1] : "examples/own_block.c";
    int steps = argc > 2 ? atoi(argv[2]) : 400;
    if (steps < 1) {
        fputs("usage: own_block [TEXT [STEPS]]\n", stderr);
        return 2;
    }

    stx_ctx *x = stx_create(NULL);
    stx_vocab *bytes = stx_vocab_build(x, NULL, NULL, 0, 0);
    stx_corpus *text = stx_corpus_open(x, bytes, path, 0, 0);
    stx_batches_desc bd = {0};
    bd.B = B;
    bd.T = T;
    stx_batches *batches = stx_batches_create(x, text, &bd);

    stx_par_desc d = {0};
    d.vocab = 256;
    d.dim = 64;
    d.heads = 4;
    d.blocks = BLOCKS;
    d.segment = T;
    d.words_out = STX_PAR_OUT_TIED;
    d.type = &conv_type;
    d.types = 1;
    stx_par *supernet = stx_par_create(x, &d);
    stx_optim *weights = stx_optim_create(stx_par_params(supernet), NULL);
    stx_optim *gates = stx_optim_create(supernet ? supernet->gates : NULL, NULL);
    stx_par_state *memory = stx_par_state_create(supernet, B);
    stx_par_anneal cooling = {STX_PAR_TAU_TARGET, 1, 0.2, (uint64_t)steps};

    for (int step = 1; step <= steps && stx_ok(x); step++) {
        if (stx_batches_next(batches, in, next) == STX_BATCH_FRESH) stx_par_state_reset(memory);
        stx_par_set_tau(supernet, stx_par_tau(&cooling, (uint64_t)step));
        stx_begin(x, STX_TRAIN);
        stx_tensor *nll = stx_par_loss(supernet, stx_tokens(x, in, B, T),
                                       stx_tokens(x, next, B, T), memory, memory);
        stx_backward(x, stx_par_total(supernet, nll));
        if (step % 50 == 0)
            printf("step %d: %.3f bits per byte\n", step, stx_item(x, nll) / 0.69314718);
        stx_optim_step(weights, 0.002);
        if (step > steps / 4) stx_optim_step(gates, 0.02);
    }

    if (stx_ok(x)) derive(supernet, d, in, T);

    int ok = stx_ok(x);
    if (!ok) fprintf(stderr, "own_block: %s\n", stx_error(x));
    stx_batches_free(batches);
    stx_corpus_close(text);
    stx_vocab_free(bytes);
    stx_destroy(x);
    return !ok;
}
