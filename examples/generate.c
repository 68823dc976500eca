/* generate.c - continues a prompt with a model that a trainer saved, of any family.

   Copy it next to seqtx.h, the headers of the families and seqtx_text.h:
       cc -O2 generate.c -lm -o generate
       ./generate run.safetensors "The " 500

   In the source tree:
       cc -O2 -I. examples/generate.c -lm -o generate

   A fourth argument is the seed. A program for a single family includes only its header,
   and calls stx_span_open instead of stx_lm_open: see README.md. */
#define SEQTX_IMPLEMENTATION
#include "seqtx_attn_span.h"
#include "seqtx_compressive.h"
#include "seqtx_par.h"
#include "seqtx_sru.h"
#include "seqtx_text.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Writes the prompt and `count` more tokens. They follow a line end if the prompt has no
   tokens. */
static void generate(const stx_lm *lm, const stx_vocab *vocab, const char *prompt, long count,
                     uint64_t seed) {
    const int any = stx_vocab_encode(vocab, prompt, strlen(prompt), NULL, 0) > 0;
    const char *first = any ? prompt : "\n";
    const size_t V = stx_vocab_size(vocab), length = strlen(first);
    const size_t n = stx_vocab_encode(vocab, first, length, NULL, 0);
    int32_t *ids = (int32_t *)stx_persist(lm->ctx, stx_bytes_of(n, sizeof *ids, 1));
    stx_real *work = (stx_real *)stx_persist(lm->ctx, V * sizeof *work);
    void *gen = lm->gen_create(lm->model, 1, 0);
    stx_sampling how = {0};
    how.temperature = 0.8;
    how.top_p = 0.95;
    how.seed = seed;

    if (!stx_ok(lm->ctx)) return;
    stx_vocab_encode(vocab, first, length, ids, n);
    fputs(prompt, stdout);
    const stx_real *scores = lm->gen_feed(gen, ids, n);
    for (long i = 0; i < count && scores; i++) {
        char text[4096]; /* a longer piece is cut */
        int32_t token = stx_sample(&how, (uint64_t)i, scores, V, work);
        if (token < 0) stx_fail(lm->ctx, STX_ERR_ARG, "the model's output is not finite");
        size_t bytes = stx_vocab_decode(vocab, &token, 1, text, sizeof text);
        if (bytes != STX_NPOS) fwrite(text, 1, STX_MIN(bytes, sizeof text), stdout);
        scores = lm->gen_feed(gen, &token, 1);
    }
    putchar('\n');
    if (fflush(stdout) || ferror(stdout))
        stx_fail(lm->ctx, STX_ERR_IO, "the text cannot be written");
}

int main(int argc, char **argv) {
    const stx_family *const families[] = {stx_span_family(), stx_sru_family(), stx_comp_family(),
                                          stx_par_family()};
    if (argc < 3) {
        fprintf(stderr, "usage: generate MODEL PROMPT [TOKENS [SEED]]\n");
        return 2;
    }
    stx_ctx *x = stx_create(NULL);
    stx_lm lm = stx_lm_open(x, argv[1], families, 4);
    stx_vocab *vocab = stx_vocab_open(x, argv[1]);
    if (stx_ok(x))
        generate(&lm, vocab, argv[2], argc > 3 ? atol(argv[3]) : 200,
                 argc > 4 ? strtoull(argv[4], NULL, 10) : 1);

    int ok = stx_ok(x);
    if (!ok) fprintf(stderr, "generate: %s\n", stx_error(x));
    stx_vocab_free(vocab);
    stx_destroy(x);
    return !ok;
}
