#pragma once
#include "base.h"
#include "buffer.h"
#include "options.h"
#include "terminal.h"
#include "lm.h"
#include "lm_sample.h"
#include "lm_generate.h"


// >>lm: samples during training

/* Samples that the user did not request (--sample-every auto) take at most this share of
   the time. */
#define TR_SAMPLE_SHARE 0.009

/* Nonzero if a sample is due after this step. evaluates is 1 if an evaluation is due. */
TR_DEF int tr_lm_sample_due(const tr_lm *t, int evaluates) {
    const int every = t->opt->sample_every;
    if (!every || t->no_samples || stx_rank(t->x)) return 0;
    if (every == TR_ALL) return evaluates;
    if (every != TR_AS_FITS) return t->step % (uint64_t)every == 0;
    return evaluates && t->term.tty && !(t->step >= t->steps && t->opt->generate);
}

/* Writes a sample of `length` tokens to `text`. It continues `prime` tokens of the
   validation text or, if there is none, of the training text; if prime is 0, it begins
   with a new line. Ends at the time `until`, or never if that is 0. */
TR_DEF void tr_lm_sample(tr_lm *t, uint64_t prime, uint64_t length, double until, tr_buf *text) {
    const stx_corpus *from = t->text[1] ? t->text[1] : t->text[0];
    const size_t n = stx_corpus_size(from), p = prime < n ? (size_t)prime : n;
    int32_t *ids = (int32_t *)malloc((p + !p) * sizeof *ids);
    uint32_t r[4];
    tr_gen g;
    int ok = 0;
    stx_philox(t->opt->seed, t->step, 0x73616d706c65u, r);      /* "sample" */
    if (!ids) {
        stx_fail(t->x, STX_ERR_MEMORY, "out of memory: cannot show a sample");
    } else {
        *ids = tr_lm_start_token(t);
        ok = !p || stx_corpus_read(from, r[0] % (n - p + 1), p, ids);
    }

    if (tr_gen_open(t, &g) && ok) {
        g.until = until;
        if (p) {
            tr_gen_write(t, &g, NULL, ids, p);
            tr_buf_put(text, g.written.s, g.written.n);
            tr_buf_puts(text, "==>");
        }
        tr_gen_read(t, &g, ids, p + !p);
        tr_gen_draw(t, &g, length, r[1], NULL, NULL);
        if (g.written.n) tr_buf_put(text, g.written.s, g.written.n);
        text->oom |= g.written.oom;
    }
    tr_gen_close(t, &g);
    free(ids);
    if (text->oom) stx_fail(t->x, STX_ERR_MEMORY, "out of memory: cannot show a sample");
}

/* Shows a sample of what the model writes. Training is not affected. A sample that the
   user did not request never ends the run: after an error, there are no more of them.
   Returns 0 on other errors. */
TR_DEF int tr_lm_show_sample(tr_lm *t) {
    const tr_lm_opt *o = t->opt;
    const int by_itself = o->sample_every == TR_AS_FITS;
    const int by_steps = !by_itself && o->sample_every != TR_ALL;
    const double now = tr_seconds(), left = TR_SAMPLE_SHARE * (now - t->began) - t->sampling;
    uint64_t prime = o->sample_prime, length = o->sample_length;
    tr_buf text;
    memset(&text, 0, sizeof text);
    if (by_itself && !(left > 0)) return 1;
    if (!prime && by_steps) prime = 256;
    if (!length) length = by_steps ? 500 : 200;
    tr_lm_sample(t, prime, length, by_itself ? now + left : 0, &text);
    t->sampling += tr_seconds() - now;
    if (by_itself && !stx_ok(t->x)) {
        tr_say(&t->term, "no more samples: %.400s", stx_error(t->x));
        stx_clear_error(t->x);
        t->no_samples = 1;
    } else if (stx_ok(t->x) && text.n) {
        tr_term_close(&t->term);        /* keeps the progress line above the sample */
        tr_say(&t->term, prime ? "--- step %llu, the model continues held-out text at ==>"
                               : "--- step %llu, a sample", (unsigned long long)t->step);
        tr_term_text(&t->term, &text);
        tr_say(&t->term, "%s---", text.s[text.n - 1] == '\n' && !prime ? "" : "\n");
    }
    tr_buf_free(&text);
    return stx_ok(t->x);
}
