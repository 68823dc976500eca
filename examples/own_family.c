/* own_family.c - a template for a new model family: parameters, a forward pass made of
   stx_ operators, a memory, training with AdamW, and a gradient check.

   Next to the headers (in the source tree, with -I.):
       cc -O2 own_family.c -lm -o own_family && ./own_family own_family.c
       cc -O2 -DSEQTX_DOUBLE own_family.c -lm -o own_check && ./own_check

   The first program trains on a file (own_family FILE [STEPS]). The second checks the
   gradients and the memory.

   The model is a stack of gated convolutions over time, each with twice the reach of
   the one below (the gates of WaveNet, van den Oord et al. 2016, 1609.03499). Layer l
   concatenates each input row h_t with the row k = 2^l positions earlier, so that L
   layers see 2^L - 1 tokens back:

       z_t = [h_{t-k}, h_t]
       h_t <- layernorm(h_t + sigmoid(Wg z_t + bg) tanh(Wc z_t + bc))

   The memory holds the last k inputs of each layer, so that reading a text in segments
   gives the same result as reading it in one piece. docs/cookbook.md explains the
   program. */
#define SEQTX_IMPLEMENTATION
#include "seqtx.h"
#include "seqtx_text.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { V = 256, L = 5, D = 64 }; /* V: vocabulary size; L: layers; D: channels */

typedef struct conv {
    stx_ctx *x;
    stx_params *params;             /* all parameters by name, for the optimiser and
                                       checkpoints */
    stx_tensor *emb, *out, *out_b;  /* emb and out: (V,D); out_b: (V) */

    struct {
        stx_tensor *wg, *bg;        /* the gate: wg (D,2D), bg (D) */
        stx_tensor *wc, *bc;        /* the convolution: wc (D,2D), bc (D) */
        stx_tensor *gain, *shift;   /* layer norm: both (D) */
    } layer[L];
} conv;

/* Adds parameter layers.<l>.<field>: a matrix (d0,d1), or a vector (d0) if d1 is 0. */
static stx_tensor *param(conv *m, int l, const char *field, int init, double a, size_t d0,
                         size_t d1) {
    char name[64];
    snprintf(name, sizeof name, "layers.%d.%s", l, field);
    return stx_param(m->params, init, a, name, d0, d1, 0, 0);
}

/* Creates the model. Errors are recorded in the context, so callers need to check only
   once. */
static conv conv_create(stx_ctx *x) {
    conv m;
    double a = 1 / sqrt(2.0 * D);
    m.x = x;
    m.params = stx_params_create(x);
    m.emb = stx_param(m.params, STX_NORMAL, 1, "in_emb.weight", V, D, 0, 0);
    for (int l = 0; l < L; l++) {
        m.layer[l].wg = param(&m, l, "gate.weight", STX_NORMAL, a, D, 2 * D);
        m.layer[l].bg = param(&m, l, "gate.bias", STX_ZEROS, 0, D, 0);
        m.layer[l].wc = param(&m, l, "conv.weight", STX_NORMAL, a, D, 2 * D);
        m.layer[l].bc = param(&m, l, "conv.bias", STX_ZEROS, 0, D, 0);
        m.layer[l].gain = param(&m, l, "norm.weight", STX_CONSTANT, 1, D, 0);
        m.layer[l].shift = param(&m, l, "norm.bias", STX_ZEROS, 0, D, 0);
    }
    m.out = stx_param(m.params, STX_NORMAL, 1 / sqrt((double)D), "out_emb.weight", V, D, 0, 0);
    m.out_b = stx_param(m.params, STX_ZEROS, 0, "out_emb.bias", V, 0, 0, 0);
    return m;
}

/* Creates the memory of B streams at the start of a text. All rows are zero.
   stx_memory_save stores a memory in a file, and stx_memory_load restores it. */
static stx_memory *conv_memory(const conv *m, size_t B) {
    stx_memory_desc d = {0};
    stx_real *zeros = (stx_real *)calloc((B << (L - 1)) * D, sizeof *zeros);
    d.layers = L;
    d.B = B;
    d.width = D;
    stx_memory *s = stx_memory_create(m->x, &d);
    if (!zeros) stx_fail(m->x, STX_ERR_MEMORY, "out of memory: cannot create the zero rows");
    for (size_t l = 0; l < L && stx_ok(m->x); l++)
        stx_memory_set(s, l, (size_t)1 << l, zeros, (size_t)1 << l);
    free(zeros);
    return s;
}

/* Computes logits (B,T,V) from ids (B,T). Reads the memory `in`. Writes the memory
   after these tokens to `out`, which can be the same memory, or NULL. */
static stx_tensor *conv_forward(const conv *m, const stx_ids *ids, const stx_memory *in,
                                stx_memory *out) {
    stx_ctx *x = m->x;
    stx_tensor *h = stx_embedding(x, m->emb, ids);
    for (size_t l = 0; l < L; l++) {
        size_t k = (size_t)1 << l;

        /* the memory (B,k,D) is a constant: gradients end here */
        stx_tensor *past = stx_memory_read(in, l, k);
        /* (B,T,D): row t is the row k positions before row t of h */
        stx_tensor *older = stx_slice(x, stx_concat(x, past, h), 0, ids->T);

        stx_tensor *z = stx_concat_channels(x, older, h);
        stx_tensor *gate = stx_linear(x, z, m->layer[l].wg, m->layer[l].bg, STX_ACT_SIGMOID);
        stx_tensor *c = stx_linear(x, z, m->layer[l].wc, m->layer[l].bc, STX_ACT_TANH);
        if (out) stx_memory_push(out, in, l, k, h, NULL);

        h = stx_add(x, h, stx_mul(x, gate, c));
        h = stx_layernorm(x, h, m->layer[l].gain, m->layer[l].shift, 0);
    }
    return stx_linear(x, h, m->out, m->out_b, STX_ACT_NONE);
}

/* Returns the mean negative log-likelihood of `next` (B,T), in nats per token. */
static stx_tensor *conv_loss(const conv *m, const stx_ids *ids, const stx_ids *next,
                             const stx_memory *in, stx_memory *out) {
    return stx_cross_entropy(m->x, conv_forward(m, ids, in, out), next, 0);
}

#ifdef SEQTX_DOUBLE

/* Returns the loss of text[1 .. n], predicted from text[0 .. n-1]. */
static stx_tensor *loss_of(const conv *m, const int32_t *text, size_t n, const stx_memory *in,
                           stx_memory *out) {
    return conv_loss(m, stx_tokens(m->x, text, 1, n), stx_tokens(m->x, text + 1, 1, n), in, out);
}

/* Compares about eight elements of the gradient of parameter p with central differences
   of the loss. Returns the largest error, relative to the largest element of the
   gradient. */
static double gradient_error(const conv *m, size_t p, const int32_t *text, size_t n,
                             const stx_memory *memory) {
    static stx_real value[V * D], grad[V * D];
    stx_ctx *x = m->x;
    stx_tensor *w = m->params->tensor[p];
    double largest = 1e-3, error = 0, h = 1e-5;
    stx_params_zero_grad(m->params);
    stx_begin(x, STX_TRAIN);
    stx_backward(x, loss_of(m, text, n, memory, NULL));
    stx_get(x, w, value);
    stx_get_grad(x, w, grad);
    for (size_t i = 0; i < w->size; i++)
        if (fabs((double)grad[i]) > largest) largest = fabs((double)grad[i]);

    for (size_t i = p % 7; i < w->size; i += w->size / 8 + 1) {
        stx_real was = value[i];
        double f[2], e;
        for (int up = 0; up < 2; up++) {
            value[i] = (stx_real)((double)was + (up ? h : -h));
            stx_set(x, w, value);
            stx_begin(x, STX_EVAL);
            f[up] = stx_item(x, loss_of(m, text, n, memory, NULL));
        }
        value[i] = was;
        stx_set(x, w, value);
        e = fabs((f[1] - f[0]) / (2 * h) - (double)grad[i]) / largest;
        if (!(e <= error)) error = e; /* also true if e is NaN */
    }
    return error;
}

/* Checks the gradients, and checks that reading a text in two parts gives the same
   loss. */
int main(void) {
    enum { T = 64, PART = 40 };

    stx_ctx *x = stx_create(NULL);
    conv m = conv_create(x);
    stx_memory *memory = conv_memory(&m, 1), *parts = conv_memory(&m, 1);
    int32_t text[T + 1];
    double worst = 0, whole, two;
    for (int i = 0; i <= T; i++) text[i] = i * i % 23;

    for (size_t p = 0; p < m.params->count && stx_ok(x); p++) {
        double error = gradient_error(&m, p, text, T, memory);
        if (!(error <= worst)) worst = error;
        if (!(error < 1e-6))
            printf("%s: relative error of the gradient %g\n", m.params->name[p], error);
    }

    stx_begin(x, STX_EVAL);
    whole = stx_item(x, loss_of(&m, text, T, memory, NULL));
    two = PART * stx_item(x, loss_of(&m, text, PART, parts, parts));
    two = (two + (T - PART) * stx_item(x, loss_of(&m, text + PART, T - PART, parts, parts))) / T;
    printf("relative error of the gradients: at most %g\n", worst);
    printf("loss of the text in two parts: %.12f, at once: %.12f %s\n", two, whole, stx_error(x));
    int ok = stx_ok(x) && worst < 1e-6 && fabs(two - whole) < 1e-12;
    stx_destroy(x);
    return !ok;
}

#else

int main(int argc, char **argv) {
    enum { B = 8, T = 32 };

    static int32_t in[B * T], next[B * T];
    const char *path = argc > 1 ? argv[1] : "examples/own_family.c";
    int steps = argc > 2 ? atoi(argv[2]) : 600;

    stx_ctx *x = stx_create(NULL);
    conv m = conv_create(x);
    stx_memory *memory = conv_memory(&m, B);

    stx_vocab *bytes = stx_vocab_build(x, NULL, NULL, 0, 0);
    stx_corpus *text = stx_corpus_open(x, bytes, path, 0, 0);
    stx_batches_desc bd = {0};
    bd.B = B;
    bd.T = T;
    stx_batches *batches = stx_batches_create(x, text, &bd);

    stx_optim_desc od = {0};
    od.kind = STX_ADAMW;
    od.weight_decay = 0.01;
    od.clip = 1;
    stx_optim *optim = stx_optim_create(m.params, &od);

    for (int step = 1; step <= steps && stx_ok(x); step++) {
        if (stx_batches_next(batches, in, next) == STX_BATCH_FRESH) {
            /* the next pass over the text begins with an empty memory */
            stx_memory_free(memory);
            memory = conv_memory(&m, B);
        }
        stx_begin(x, STX_TRAIN);
        stx_tensor *nll = conv_loss(&m, stx_tokens(x, in, B, T), stx_tokens(x, next, B, T), memory,
                                    memory);
        stx_backward(x, nll);
        if (step % 100 == 0 || step == steps)
            printf("step %d: %.3f bits per byte\n", step, stx_item(x, nll) / 0.69314718);
        stx_optim_step(optim, 0.003);
    }

    int ok = stx_ok(x);
    if (!ok) fprintf(stderr, "own_family: %s\n", stx_error(x));
    stx_batches_free(batches);
    stx_corpus_close(text);
    stx_vocab_free(bytes);
    stx_destroy(x);
    return !ok;
}

#endif
