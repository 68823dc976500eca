/* hello.c - the whole of it in one sitting: build a small adaptive-span model, train it
   on its own source text, print what it writes. Copy it beside seqtx.h, seqtx_attn_span.h
   and seqtx_text.h, or give the directory of these to -I:
       cc -O2 hello.c -lm -o hello && ./hello hello.c
       cc -O2 -I. examples/hello.c -lm -o hello && ./hello      in the source tree */
#define SEQTX_IMPLEMENTATION
#include "seqtx_attn_span.h"
#include "seqtx_text.h"
#include <stdio.h>

int main(int argc, char **argv) {
    const char *path = argc > 1 ? argv[1] : "examples/hello.c";
    stx_ctx *x = stx_create(NULL);
    /* bytes */
    stx_corpus *text = stx_corpus_open(x, stx_vocab_build(x, NULL, NULL, 0, 0), path, 0, 0);
    stx_batches_desc bd = {0};
    stx_span_desc d = {0};
    stx_optim_desc od = {0};

    enum { B = 4, T = 64, STEPS = 800 };

    static int32_t in[B * T], next[B * T];

    bd.B = B;
    bd.T = T;
    stx_batches *batches = stx_batches_create(x, text, &bd);
    d.vocab = 256;
    d.layers = 2;
    d.dim = 64;
    d.heads = 4;
    d.span = 128;
    d.adapt_span = 1;
    d.span_init = 0.2;
    stx_span *model = stx_span_create(x, &d);
    stx_optim *optim = stx_optim_create(stx_span_params(model), &od); /* Adam */
    stx_span_state *memory = stx_span_state_create(model, B);

    for (int step = 1; step <= STEPS && stx_ok(x); step++) {
        if (stx_batches_next(batches, in, next) == STX_BATCH_FRESH) stx_span_state_reset(memory);
        stx_begin(x, STX_TRAIN);
        stx_tensor *nll = stx_span_loss(model, stx_tokens(x, in, B, T), stx_tokens(x, next, B, T),
                                        memory, memory);
        stx_backward(x, stx_span_total(model, nll));
        if (step % 100 == 0)
            printf("step %d: %.3f bits per byte\n", step, stx_item(x, nll) / 0.6931);
        if (stx_optim_step(optim, 0.003)) stx_span_clamp(model);
    }

    stx_span_gen *gen = stx_span_gen_create(model, 1);
    stx_sampling how = {0};
    stx_real work[256];
    int32_t token = '\n';
    how.temperature = 0.3;
    for (uint64_t i = 0; i < 400 && stx_ok(x); i++) {
        const stx_real *logits = stx_span_gen_feed(gen, &token, 1);
        putchar(token);
        token = logits ? stx_sample(&how, i, logits, 256, work) : 0;
    }
    putchar('\n');
    if (!stx_ok(x)) fprintf(stderr, "hello: %s\n", stx_error(x));
    stx_batches_free(batches);
    stx_corpus_close(text);
    int ok = stx_ok(x);
    stx_destroy(x);
    return !ok;
}
