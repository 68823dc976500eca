/* par/derive.h - the networks that a search has found (--derive): their patterns, losses
   and times. */
#pragma once
#include "../train/base.h"
#include "../train/lm.h"
#include "../train/lm_results.h"
#include "../train/lm_evaluate.h"
#include "../../seqtx_par.h"
#include "options.h"
#include "patterns.h"
#include "run.h"


// >>derive

typedef struct candidate {
    char   pattern[PATTERN];
    double nll;
    double time;        /* time as a fraction of Transformer-XL's; 0: unknown */
} candidate;

/* Returns the loss of the validation text, or NAN after an error. */
TR_DEF double valid_loss(run *r, uint64_t blocks, tr_lm_scored *scored) {
    size_t B = tr_lm_eval_batch(&r->t), T = r->t.eval_block;
    tr_lm_fit(r->t.text[1], &B, &T);
    return tr_lm_pass(&r->t, r->t.text[1], B, T, blocks, scored);
}

/* Returns the loss of the network with this pattern, which one-hot gates select, or NAN
   after an error. */
TR_DEF double score(run *r, const char *pattern) {
    tr_lm_scored scored;
    size_t l;
    for (l = 0; l < r->blocks; l++) {
        stx_real al[3] = {0, 0, 0};
        al[strchr("sfi", pattern[l]) - "sfi"] = 20;
        stx_set(r->t.x, r->model->block[l].al, al);
    }
    return valid_loss(r, opt.lm.eval_blocks, &scored);
}

/* Prints a line about candidate *n. If no earlier candidate has the same pattern,
   scores it first and increments *n. Returns 0 after an error. */
TR_DEF int derive_one(run *r, FILE *out, const char *what, candidate *all, size_t *n) {
    candidate *c = &all[*n];
    char text[PATTERN], *words;
    size_t i;
    for (i = 0; i < *n; i++)
        if (!strcmp(all[i].pattern, c->pattern)) break;
    c->time = xl_time(r) > 0 ? pattern_time(r, c->pattern) / xl_time(r) : 0;
    if (i < *n) {
        c->nll = all[i].nll;
    } else {
        c->nll = score(r, c->pattern);
        if (isnan(c->nll)) return 0;
        ++*n;
    }
    fprintf(out, "%-10s %s  %s %.4f", what, short_form(c->pattern, text), tr_lm_unit(&r->t),
            tr_lm_metric(&r->t, 1, c->nll));
    if (r->desc.cost[0] > 0) fprintf(out, "  %.0f %% of Transformer-XL's time", 100 * c->time);
    words = in_words(c->pattern);
    fprintf(out, "  (%s)\n", words ? words : "");
    free(words);
    return 1;
}

/* Nonzero if candidate `a` is better than `b`. A pattern within --latency-target is
   better than one beyond it. Within the target, the lower loss is better; beyond it,
   the shorter time. */
TR_DEF int better(const candidate *a, const candidate *b) {
    const int limited = opt.latency_target > 0;
    const int a_within = !limited || a->time <= opt.latency_target;
    const int b_within = !limited || b->time <= opt.latency_target;
    if (a_within != b_within) return a_within;
    return a_within ? a->nll < b->nll : a->time < b->time;
}

TR_DEF void print_best(FILE *out, const candidate *c, size_t n) {
    size_t i, best = 0;
    for (i = 1; i < n; i++)
        if (better(&c[i], &c[best])) best = i;
    fprintf(out, "best: ");
    print_pattern(out, c[best].pattern);
    fprintf(out, "\n");
    if (opt.latency_target > 0 && c[best].time > opt.latency_target)
        fprintf(out, "no pattern is within --latency-target %g: this one is the fastest\n",
                opt.latency_target);
}

/* Copies the parameters of all gates to or from values (blocks,3). */
TR_DEF void copy_gates(run *r, stx_real *values, int to_model) {
    size_t l;
    for (l = 0; l < r->blocks; l++) {
        stx_tensor *gate = r->model->block[l].al;
        if (to_model)
            stx_set(r->t.x, gate, values + 3 * l);
        else
            stx_get(r->t.x, gate, values + 3 * l);
    }
}

/* Scores the most probable pattern, the pattern that PAR's rule forms with the same
   number of attention blocks, and random patterns. Returns the number of different
   patterns, or 0 after an error. */
TR_DEF size_t derive_all(run *r, FILE *out, candidate *all, stx_real *gates) {
    const size_t L = r->blocks;
    size_t n = 0, attentions = 0, every = 5, i;
    char what[40];
    if (!stx_par_argmax(r->model, all[0].pattern, PATTERN)) return 0;
    for (i = 0; i < L; i++) attentions += all[0].pattern[i] == 's';
    if (!derive_one(r, out, "argmax", all, &n)) return 0;

    /* if there is no attention block, `every` keeps the paper's value. The rule
       requires an `every` of at least 2 */
    if (attentions) every = L / attentions;
    if (every > 1 && every <= L) {
        snprintf(what, sizeof what, "par:%zu", every);
        if (!stx_par_rule(all[n].pattern, PATTERN, L, every)) return 0;
        if (!derive_one(r, out, what, all, &n)) return 0;
    }
    for (i = 0; i < opt.derive_samples; i++) {
        copy_gates(r, gates, 1);
        snprintf(what, sizeof what, "sample %zu", i + 1);
        if (!stx_par_sample(r->model, opt.lm.seed, i, all[n].pattern, PATTERN)) return 0;
        if (!derive_one(r, out, what, all, &n)) return 0;
    }
    return n;
}

/* --derive: scores and prints the patterns that the search has found. */
TR_DEF void derive(run *r, FILE *out) {
    const size_t samples = (size_t)opt.derive_samples;
    const int gate_eval = r->model->desc.gate_eval;
    candidate *all = (candidate *)malloc((samples + 2) * sizeof *all);
    stx_real *gates = (stx_real *)malloc(3 * r->blocks * sizeof *gates);
    size_t n;
    if (all && gates) {
        copy_gates(r, gates, 0);
        r->model->desc.gate_eval = STX_PAR_EVAL_ARGMAX;
        n = derive_all(r, out, all, gates);
        copy_gates(r, gates, 1);
        r->model->desc.gate_eval = gate_eval;
        if (n) print_best(out, all, n);
    } else {
        stx_fail(r->t.x, STX_ERR_MEMORY, "out of memory: cannot store %zu patterns", samples);
    }
    free(all);
    free(gates);
}
