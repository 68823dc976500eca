/* par/race.h - compares the speed of two networks (--race). */
#pragma once
#include "../train/base.h"
#include "../train/formats.h"
#include "../train/terminal.h"
#include "../../seqtx_par.h"
#include "options.h"
#include "patterns.h"
#include "run.h"
#include "timing.h"


// >>race

/* One of the networks in a race, with one memory for training and one for
   evaluation. */
typedef struct racer {
    stx_par       *m;
    stx_par_state *memory[2];
} racer;

/* Returns the duration of a training step without an update, or of an evaluation step,
   in seconds. */
TR_DEF double time_step(const racer *c, int evaluate, const int32_t *ids, size_t B, size_t T) {
    stx_ctx *x = c->m->ctx;
    stx_par_state *memory = c->memory[evaluate];
    double began = tr_seconds();
    stx_ids *in;
    stx_tensor *loss;
    stx_begin(x, evaluate ? STX_EVAL : STX_TRAIN);
    in = stx_tokens(x, ids, B, T);
    loss = stx_par_loss(c->m, in, in, memory, memory);
    if (!evaluate) {
        stx_backward(x, stx_par_total(c->m, loss));
        stx_params_zero_grad(stx_par_params(c->m));
    }
    stx_item(x, loss);                  /* waits for the device */
    return tr_seconds() - began;
}

/* --race: times interleaved steps of two networks on the first tokens of the text.
   speed receives tokens per second as [network][0: training, 1: evaluation].
   Returns 0 after an error. */
TR_DEF int race(run *r, const char *const pattern[2], double speed[2][2]) {
    enum { ROUNDS = 15, WARM = 3 };
    const size_t B = (size_t)(opt.lm.batch_sz / opt.lm.batch_split), T = r->desc.segment;
    stx_corpus *text = r->t.text[0];
    int32_t *ids = (int32_t *)malloc(B * T * sizeof *ids);
    stx_ctx *x = bench_context(&r->t);
    racer c[2];
    double took[2][2][ROUNDS];
    size_t n, i;
    int ok, k, mode;
    memset(c, 0, sizeof c);
    if (!ids) stx_fail(r->t.x, STX_ERR_MEMORY, "out of memory: cannot start the race");
    for (i = 0; ids && i < B * T; i++) ids[i] = (int32_t)(i * 40503u % r->desc.vocab);
    if (ids && text && stx_corpus_size(text) >= B * T) stx_corpus_read(text, 0, B * T, ids);
    for (k = 0; x && k < 2; k++) {
        stx_par_desc d = r->desc;
        d.latency = 0;
        d.latency_target = d.latency_power = 0;
        d.blocks = 0;
        d.pattern = pattern[k];
        c[k].m = stx_par_create(x, &d);
        for (mode = 0; c[k].m && mode < 2; mode++)
            c[k].memory[mode] = stx_par_state_create(c[k].m, B);
    }

    ok = x && ids && stx_ok(x);
    for (n = 0; ok && n < ROUNDS + WARM; n++) {
        for (i = 0; ok && i < 4; i++) {
            double s;
            mode = (int)i / 2;
            k = (int)i % 2;
            s = time_step(&c[k], mode, ids, B, T);
            if (n >= WARM) took[k][mode][n - WARM] = s;
            ok = stx_ok(x);
        }
    }
    for (i = 0; ok && i < 4; i++)
        speed[i / 2][i % 2] = (double)(B * T) / median(took[i / 2][i % 2], ROUNDS);
    if (x && !stx_ok(x)) stx_fail(r->t.x, stx_error_code(x), "--race: %s", stx_error(x));
    for (i = 0; i < 4; i++) stx_par_state_free(c[i / 2].memory[i % 2]);
    stx_destroy(x);
    free(ids);
    return ok;
}

/* --race: races the network against the pattern that the option names. */
TR_DEF void print_race(run *r, FILE *out, const char *pattern) {
    char other[PATTERN], count[4][TR_TEXT_MAX];
    const char *pair[2];
    double speed[2][2];
    int i;
    if (!expand(&r->t, "race", opt.race, r->blocks, other) || !*other) return;
    pair[0] = pattern;
    pair[1] = other;
    if (!race(r, pair, speed)) return;
    for (i = 0; i < 4; i++) tr_count(count[i], speed[i / 2][i % 2]);
    fprintf(out,
            "race, tokens per second in training and evaluation, medians of alternating steps: "
            "%s and %s against %s and %s of ", count[0], count[1], count[2], count[3]);
    print_pattern(out, other);
    fprintf(out, "; %.2f and %.2f times as fast\n", speed[0][0] / speed[1][0],
            speed[0][1] / speed[1][1]);
}
