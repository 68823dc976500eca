#pragma once
#include "base.h"
#include "log.h"
#include "terminal.h"
#include "signals.h"
#include "lm.h"
#include "lm_errors.h"
#include "lm_results.h"
#include "lm_context.h"
#include "lm_text.h"
#include "lm_start.h"
#include "lm_progress.h"


// >>lm: evaluation

/* Reduces the number of streams and the length of a block for a short text. */
TR_DEF void tr_lm_fit(const stx_corpus *text, size_t *B, size_t *T) {
    size_t n = stx_corpus_size(text);
    while (*B > 1 && n / *B < 2 * (*T + 1)) --*B;
    if (n < *T + 1) *T = n > 2 ? n - 2 : 1;
}

/* Nonzero if a signal ends the pass. */
TR_DEF int tr_lm_pass_stops(const tr_lm *t) {
    return t->share_pass == TR_PASS_RANK0 ? tr_stop_requested() : tr_lm_stop(t);
}

/* Evaluates one block of `rows` streams of n tokens each. v receives the sum of the
   losses, the number of tokens over which the mean is taken, and the number of tokens
   with a loss. Returns the mean loss. */
TR_DEF double tr_lm_pass_block(tr_lm *t, const int32_t *in, const int32_t *out, size_t rows,
                               size_t n, void *state, double v[3]) {
    stx_ids *ids, *targets;
    double nll;
    v[0] = v[1] = v[2] = 0;
    if (!rows) return 0;
    v[2] = tr_lm_counted(t, out, rows * n);
    v[1] = t->mean_of_all ? (double)(rows * n) : v[2];
    stx_begin(t->x, STX_EVAL);
    ids = stx_tokens(t->x, in, rows, n);
    targets = stx_tokens(t->x, out, rows, n);
    nll = stx_item(t->x, t->lm.loss(t->lm.model, ids, targets, state, state));
    if (v[1] > 0) v[0] = nll * v[1];
    return nll;
}

/* Returns the mean loss over a text, in nats per token that has a loss. Training is not
   affected, because the evaluation has a separate state. If blocks is 0, the whole text
   is evaluated. Returns NaN on error or when a signal ends the pass. */
TR_DEF double tr_lm_pass(tr_lm *t, const stx_corpus *text, size_t B, size_t T, uint64_t blocks,
                         tr_lm_scored *scored) {
    const int shared = t->share_pass == TR_PASS_SHARED;
    const size_t ranks = shared ? (size_t)tr_lm_ranks(t) : 1;
    const size_t rank = shared ? (size_t)stx_rank(t->x) : 0;
    const size_t first = B * rank / ranks;                      /* this rank's first stream */
    const size_t rows = B * (rank + 1) / ranks - first;         /* number of this rank's streams */
    const size_t size = stx_corpus_size(text);
    const size_t window = t->eval_window < size ? t->eval_window : size;
    int32_t *in = (int32_t *)malloc(B * T * sizeof *in);
    int32_t *out = (int32_t *)malloc(B * T * sizeof *out);
    void *state = t->lm.state_create(t->lm.model, rows + !rows, window);
    stx_batches_desc d;
    stx_batches *b;
    double sum = 0, count = 0, exps = 0, v[3], nll;
    uint64_t k = 0;
    size_t n;
    memset(&d, 0, sizeof d);
    d.B = B;
    d.T = T;
    if (t->opt->reading == STX_BATCH_RECORDS) d.how = STX_BATCH_RECORDS;
    b = stx_batches_create(t->x, text, &d);
    if (!in || !out)
        stx_fail(t->x, STX_ERR_MEMORY, "out of memory: cannot allocate a batch of %zu x %zu tokens",
                 B, T);
    else if (b)
        stx_batches_rewind(b, t->eval_literal ? STX_EVAL_LITERAL : STX_EVAL_ALL);

    for (; in && out && b && (!blocks || k < blocks); k++) {
        if (stx_batches_next_eval(b, in, out, &n) == STX_BATCH_END || tr_lm_pass_stops(t)) break;
        nll = tr_lm_pass_block(t, in + first * n, out + first * n, rows, n, state, v);
        if (ranks > 1) {
            if (!stx_ok(t->x) || !tr_lm_agree(t, v, 3)) break;
            nll = v[1] > 0 ? v[0] / v[1] : 0;
        }
        sum += v[0];
        exps += exp(nll);
        count += v[2];
    }
    scored->tokens = count;
    scored->batch_ppl = k ? exps / (double)k : (double)NAN;
    free(in);
    free(out);
    stx_batches_free(b);
    t->lm.state_free(state);
    return count > 0 && !tr_lm_pass_stops(t) ? sum / count : (double)NAN;
}

/* Returns the stream for results: standard output, or standard error if generated text is
   written to standard output. */
TR_DEF FILE *tr_lm_results(const tr_lm *t) {
    return t->opt->generate || t->opt->interactive ? stderr : stdout;
}

/* Logs the result of an evaluation. */
TR_DEF void tr_lm_log_eval(tr_lm *t, const char *split, double nll, double metric, int more,
                           double word_ppl, const tr_lm_scored *scored, uint64_t blocks) {
    const char *of_part = blocks ? "_of_part" : "";
    char tag[40];
    tr_log_begin(&t->log, "eval");
    tr_log_str(&t->log, "split", split);
    tr_log_num(&t->log, "loss", nll);
    tr_log_num(&t->log, tr_lm_unit(t), metric);
    if (more) {
        tr_log_num(&t->log, "word_ppl", word_ppl);
        tr_log_num(&t->log, "batch_ppl", scored->batch_ppl);
    }
    tr_log_int(&t->log, "step", t->step);
    tr_log_int(&t->log, "tokens", (uint64_t)scored->tokens);
    tr_lm_note(t, t->log.err, tr_log_end(&t->log));

    snprintf(tag, sizeof tag, "%s/%s%s", split, tr_lm_unit(t), of_part);
    tr_lm_point(t, tag, metric);
    snprintf(tag, sizeof tag, "%s/loss%s", split, of_part);
    tr_lm_point(t, tag, nll);
    if (!more) return;
    snprintf(tag, sizeof tag, "%s/ppl_of_batches%s", split, of_part);
    tr_lm_point(t, tag, scored->batch_ppl);
}

/* Prints and logs the result of an evaluation. Returns 0 if the evaluation failed. */
TR_DEF int tr_lm_report(tr_lm *t, int part, double nll, const tr_lm_scored *scored,
                        uint64_t blocks) {
    static const char *const split[3] = {"train", "valid", "test"};
    const int more = t->more_figures && t->unit == TR_PPL;
    double metric, word_ppl = 0;
    char figures[96] = "", share[48] = "";
    if (tr_lm_stop(t)) return 1;
    if (!stx_ok(t->x) || !tr_lm_texts_are_whole(t) || !tr_lm_begin(t)) return 0;
    if (part == 1) {
        t->evaluated = t->step;
        t->blocks = blocks;
    }

    metric = tr_lm_metric(t, part, nll);
    if (more) {
        word_ppl = tr_lm_word_ppl(t, part, nll);
        snprintf(figures, sizeof figures, ", %.2f per word, mean of batches %.4f", word_ppl,
                 scored->batch_ppl);
    }
    if (blocks && scored->tokens < t->counts[part].tokens - 1)
        snprintf(share, sizeof share, ", %.3g %% of the text",
                 100 * scored->tokens / t->counts[part].tokens);
    snprintf(t->result, sizeof t->result, "step %llu: %s %s %.4f (loss %.4f%s%s)",
             (unsigned long long)t->step, split[part], tr_lm_unit(t), metric, nll, figures, share);
    tr_term_close(&t->term);            /* keeps the progress line above the result */
    if (stx_rank(t->x)) return 1;
    if (t->last && tr_lm_results(t) == stdout) printf("%s\n", t->result);
    else tr_say(&t->term, "%s", t->result);
    fflush(stdout);
    tr_lm_log_eval(t, split[part], nll, metric, more, word_ppl, scored, blocks);
    return 1;
}

/* Returns the number of streams in an evaluation, before tr_lm_fit reduces it. */
TR_DEF size_t tr_lm_eval_batch(const tr_lm *t) {
    if (t->opt->eval_batch_sz) return (size_t)t->opt->eval_batch_sz;
    return (size_t)(tr_lm_number(t, "batch-sz", 1) / tr_lm_number(t, "batch-split", 1));
}

/* Returns the mean loss over text `part` (0, 1, 2: training, validation, test), as
   computed by tr_lm_pass. */
TR_DEF double tr_lm_nll(tr_lm *t, int part, uint64_t blocks, tr_lm_scored *scored) {
    size_t B = tr_lm_eval_batch(t), T = t->eval_block;
    double nll;
    tr_lm_fit(t->text[part], &B, &T);
    t->share_pass = t->whole_pass ? TR_PASS_EACH : TR_PASS_SHARED;
    nll = tr_lm_pass(t, t->text[part], B, T, blocks, scored);
    t->share_pass = TR_PASS_RANK0;
    return nll;
}

/* Evaluates text `part`, if it exists, and reports the result. *nll receives the mean
   loss, or NaN. */
TR_DEF int tr_lm_evaluate(tr_lm *t, int part, uint64_t blocks, double *nll) {
    tr_lm_scored scored;
    *nll = (double)NAN;
    if (!t->text[part]) return 1;
    *nll = tr_lm_nll(t, part, blocks, &scored);
    return tr_lm_report(t, part, *nll, &scored, blocks);
}
