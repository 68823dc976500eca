/* compressive/results.h - what train_compressive prints at the end of a run: how much the
   compression of each layer lost, and the loss by distance from an empty memory
   (--eval-positions). */
#pragma once
#include "../train/base.h"
#include "../train/signals.h"
#include "../train/lm.h"
#include "../train/lm_evaluate.h"
#include "../../seqtx_compressive.h"
#include "options.h"
#include "run.h"


// >>results

TR_DEF void print_compression(const tr_lm *t, FILE *out) {
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

/* Sums of losses and tokens, grouped by the number of blocks since the memory was empty.
   The buckets end at 1, 2, 4, .. blocks. */
enum { BUCKETS = 64 };

typedef struct buckets {
    double nll[BUCKETS], tokens[BUCKETS];
} buckets;

/* Evaluates the validation text in batches of B streams and T tokens, and empties the
   memory every `document` blocks. `tokens` is a buffer of 2 B T elements. */
TR_DEF void eval_buckets(const tr_lm *t, size_t B, size_t T, size_t document, int32_t *tokens,
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
TR_DEF void print_positions(const tr_lm *t, FILE *out) {
    const size_t document = (size_t)(opt.eval_positions / opt.lm.block_sz);
    size_t B = tr_lm_eval_batch(t), T = t->eval_block, i;
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

TR_DEF void print_results(const tr_lm *t, FILE *out) {
    print_compression(t, out);
    print_positions(t, out);
}
