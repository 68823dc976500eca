/* hello.c - trains a small adaptive-span model on a text, then prints what it generates.

   Copy it next to seqtx.h, seqtx_attn_span.h and seqtx_text.h:
       cc -O2 hello.c -lm -o hello && ./hello hello.c

   In the source tree, where it trains on itself by default:
       cc -O2 -I. examples/hello.c -lm -o hello && ./hello */
#define SEQTX_IMPLEMENTATION
#include "seqtx_attn_span.h"
#include "seqtx_text.h"
#include <stdio.h>

enum { B = 4, T = 64, STEPS = 800 }; /* B: streams; T: tokens per stream and step */

int main(int argc, char **argv) {
    const char *path = argc > 1 ? argv[1] : "examples/hello.c";
    static int32_t in[B * T], next[B * T];

    /* Every call reports errors in the context; one check at the end is enough. */
    stx_ctx *x = stx_create(NULL);

    /* the text: its bytes are the tokens, and B streams read it in segments of T */
    stx_vocab *bytes = stx_vocab_build(x, NULL, NULL, 0, 0);
    stx_corpus *text = stx_corpus_open(x, bytes, path, 0, 0);
    stx_batches_desc bd = {0};
    bd.B = B;
    bd.T = T;
    stx_batches *batches = stx_batches_create(x, text, &bd);

    /* the model, with learned attention spans, and its memory of earlier segments */
    stx_span_desc d = {0};
    d.vocab = 256;
    d.layers = 2;
    d.dim = 64;
    d.heads = 4;
    d.span = 128;
    d.adapt_span = 1;
    d.span_init = 0.2;
    stx_span *model = stx_span_create(x, &d);
    stx_span_state *memory = stx_span_state_create(model, B);

    stx_optim_desc od = {0}; /* Adam with its usual constants */
    stx_optim *optim = stx_optim_create(stx_span_params(model), &od);

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

    /* generate 400 bytes after a newline */
    stx_span_gen *gen = stx_span_gen_create(model, 1);
    stx_sampling how = {0};
    how.temperature = 0.3;
    stx_real work[256];
    int32_t token = '\n';
    for (uint64_t i = 0; i < 400 && stx_ok(x); i++) {
        const stx_real *log_p = stx_span_gen_feed(gen, &token, 1);
        putchar(token);
        token = log_p ? stx_sample(&how, i, log_p, 256, work) : 0;
    }
    putchar('\n');
    if (fflush(stdout) || ferror(stdout)) stx_fail(x, STX_ERR_IO, "the text cannot be written");

    int ok = stx_ok(x);
    if (!ok) fprintf(stderr, "hello: %s\n", stx_error(x));
    stx_batches_free(batches);
    stx_corpus_close(text);
    stx_vocab_free(bytes);
    stx_destroy(x); /* frees the model, its memory and the optimiser */
    return !ok;
}
