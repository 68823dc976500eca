/* par/timing.h - measures the times of an attention block and a feed-forward block, if
   --latency requires them and there is no --latency-table. */
#pragma once
#include "../train/base.h"
#include "../train/options.h"
#include "../train/options_set.h"
#include "../train/terminal.h"
#include "../train/lm.h"
#include "../../seqtx_par.h"
#include "options.h"
#include "run.h"
#include "model.h"


// >>timing

/* Creates a context like the trainer's, for models that are freed after use. */
TR_DEF stx_ctx *bench_context(const tr_lm *t) {
    stx_desc d = *stx_ctx_desc(t->x);
    stx_ctx *x = stx_create(&d);
    if (!x) stx_fail(t->x, STX_ERR_MEMORY, "out of memory: cannot create a context");
    if (!x || stx_ok(x)) return x;
    stx_fail(t->x, stx_error_code(x), "%s", stx_error(x));
    stx_destroy(x);
    return NULL;
}

TR_DEF int by_value(const void *a, const void *b) {
    double u = *(const double *)a, v = *(const double *)b;
    return (u > v) - (u < v);
}

TR_DEF double median(double *v, size_t n) {
    qsort(v, n, sizeof *v, by_value);
    return n % 2 ? v[n / 2] : (v[n / 2 - 1] + v[n / 2]) / 2;
}

/* Describes a one-block network with the settings of the run's network. Its inputs are
   vectors, not tokens, and nothing follows the block. */
TR_DEF stx_par_desc block_desc(const char *pattern) {
    stx_par_desc d;
    memset(&d, 0, sizeof d);
    describe_blocks(&d);
    d.pattern = pattern;
    d.final_dropout = d.proj_std = 0;
    d.recompute_layers = opt.lm.recompute == TR_ALL ? SIZE_MAX : 0;
    return d;
}

/* Returns the time in milliseconds of a forward pass over h (B,T,D) and, unless
   --latency-pass is forward, of a backward pass. */
TR_DEF double time_block(stx_par *m, stx_par_state *memory, const stx_real *h, size_t B, size_t T) {
    stx_ctx *x = m->ctx;
    double began = tr_seconds();
    stx_tensor *y;
    stx_begin(x, opt.latency_pass ? STX_EVAL : STX_TRAIN);
    y = stx_par_segment(m, stx_variable(x, h, B, T, m->desc.dim, 0), NULL, memory, memory);
    y = stx_mean(x, y);
    if (!opt.latency_pass) stx_backward(x, y);
    stx_item(x, y);                     /* waits for the device */
    return 1000 * (tr_seconds() - began);
}

/* Measures how many milliseconds slower an attention block and a feed-forward block are
   than an identity block. `cost` receives the two differences, which are medians over
   interleaved steps of one block of each kind, with a full memory. Returns 0 after an
   error. */
TR_DEF int measure(run *r, double cost[2]) {
    enum { ROUNDS = 41, WARM = 3 };
    static const char *const kind[3] = {"s", "f", "i"};
    const size_t B = (size_t)(opt.lm.batch_sz / opt.lm.batch_split), T = r->desc.segment;
    const size_t size = B * T * r->desc.dim;
    stx_ctx *x = bench_context(&r->t);
    stx_par *m[3] = {NULL, NULL, NULL};
    stx_par_state *memory[3] = {NULL, NULL, NULL};
    stx_real *h = (stx_real *)malloc(size * sizeof *h);
    double took[3][ROUNDS], began, idle;
    size_t n, k, i;
    int ok;
    if (!h) stx_fail(r->t.x, STX_ERR_MEMORY, "out of memory: cannot measure the time of a block");
    for (i = 0; h && i < size; i++) h[i] = (stx_real)((double)(i * 2654435761u % 1000) / 500 - 1);
    for (k = 0; x && k < 3; k++) {
        stx_par_desc d = block_desc(kind[k]);
        m[k] = stx_par_create(x, &d);
        if (m[k]) memory[k] = stx_par_state_create(m[k], B);
    }

    ok = x && h && stx_ok(x);
    began = tr_seconds();
    for (n = 0; ok && n < ROUNDS + WARM; n++) {
        if (n >= WARM + 5 && tr_seconds() - began >= 3) break;
        for (k = 0; ok && k < 3; k++) {
            double ms = time_block(m[k], memory[k], h, B, T);
            if (n >= WARM) took[k][n - WARM] = ms;
            ok = stx_ok(x);
        }
    }
    if (ok) {
        idle = median(took[2], n - WARM);
        for (k = 0; k < 2; k++) {
            cost[k] = median(took[k], n - WARM) - idle;
            if (cost[k] < 1e-4) cost[k] = 1e-4;         /* the clock did not advance */
        }
    }
    if (x && !stx_ok(x))
        stx_fail(r->t.x, stx_error_code(x), "--latency: cannot time a block: %s", stx_error(x));
    for (k = 0; k < 3; k++) stx_par_state_free(memory[k]);
    stx_destroy(x);
    free(h);
    return ok;
}

/* Measures the latencies if a search requires them and there is no --latency-table. The
   results become the value of --latency-table, which the checkpoint stores. */
TR_DEF int fill_table(run *r) {
    tr_lm *t = &r->t;
    stx_par_desc d;
    char word[96], attention[32], feed[32];
    double cost[2], unit = opt.latency == STX_PAR_LATENCY_FBNET ? 1000 : 1;
    if (*r->pattern || !opt.latency || !t->training) return 1;
    if (opt.latency_table && *opt.latency_table) return 1;
    if (!stx_par_resolve(t->x, &r->desc, &d)) return report_error(t);
    /* all ranks use the times that rank 0 has measured */
    if (!measure(r, cost) || !stx_group_broadcast(t->x, cost, 2 * sizeof *cost, 0)) return 0;
    snprintf(attention, sizeof attention, "%.4g", cost[0] * unit);
    snprintf(feed, sizeof feed, "%.4g", cost[1] * unit);
    snprintf(word, sizeof word, "latency-table=%s,%s", attention, feed);
    return tr_apply(&options, word, TR_FROM_ARGS, t->err, TR_ERR) && describe(r, r->desc.vocab);
}
