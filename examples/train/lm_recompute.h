#pragma once
#include "base.h"
#include "formats.h"
#include "terminal.h"
#include "lm.h"
#include "lm_errors.h"
#include "lm_evaluate.h"


// >>lm: --recompute auto

enum {
    TR_SMALL            = 4096, /* maximum size of a parameter that is copied, in elements */
    TR_SETTLED          = 4,    /* steps without a new peak after which a rehearsal ends */
    TR_SETTLED_WORDS    = 64,   /* TR_SETTLED for an adaptive vocabulary */
    TR_REHEARSED        = 4096, /* maximum number of steps in a rehearsal */
    TR_REHEARSED_BLOCKS = 256   /* number of blocks in the evaluation of a rehearsal */
};

/* Records a step of a rehearsal. Returns 1 while the peak can still rise, because
   memories are filling or because, with an adaptive vocabulary, the peak depends on the
   tokens. */
TR_DEF int tr_lm_rehearsed(tr_lm *t) {
    const size_t settled = t->groups * (*t->kind->adapt_io ? TR_SETTLED_WORDS : TR_SETTLED);
    const size_t peak = stx_peak_bytes(t->x);
    t->settled = peak > t->peak ? 0 : t->settled + 1;
    t->peak = peak;
    t->step++;
    return stx_ok(t->x) && t->settled < settled && t->step - t->first < TR_REHEARSED;
}

/* Copies the small parameters in `from`, including all that determine sizes, to the
   model of the rehearsal. If widest is 1, sets all spans to their maximum. */
TR_DEF void tr_lm_rehearse_params(tr_lm *t, const stx_params *from, int widest) {
    stx_real v[TR_SMALL];
    size_t i, k;
    for (i = 0; i < from->count; i++) {
        size_t n = from->tensor[i]->size;
        if (n > TR_SMALL) continue;
        stx_get(from->ctx, from->tensor[i], v);
        if (widest && strstr(from->name[i], "attn.span"))
            for (k = 0; k < n; k++) v[k] = 1;
        stx_set(t->x, t->lm.params->tensor[i], v);
    }
}

/* Returns the peak memory in bytes of a training run that recomputes n layers. If the
   run does not fit in `limit` bytes (the value for desc.max_bytes) or an error occurs,
   returns 0 and writes the reason to `why` (TR_ERR bytes). Creates the model and the
   optimiser in a dry context, which only counts memory, then trains and evaluates on
   the text. *made receives the number of bytes reserved before the first step. If
   widest is 1, all spans have their maximum length. */
TR_DEF size_t tr_lm_rehearse(tr_lm *t, size_t n, size_t limit, int widest, size_t *made,
                             char *why) {
    const stx_params *params = t->lm.params;
    const uint64_t step = t->step;
    const int ranks = tr_lm_ranks(t);
    stx_desc d = *stx_ctx_desc(t->x);
    void *real_run = malloc(t->kind->size);
    tr_lm_scored scored;
    size_t peak;
    int ok;
    *why = 0;
    if (!real_run) {
        snprintf(why, TR_ERR, "out of memory");
        return 0;
    }
    d.dry = 1;
    d.max_bytes = limit;
    d.alloc = NULL;
    d.release = NULL;
    d.user = NULL;

    /* restore the state from before the model was created */
    memcpy(real_run, t, t->kind->size);
    memcpy(t, t->before_make, t->kind->size);
    t->rehearsal = ranks;
    t->recompute = n;
    t->first = t->step = step;
    t->steps = UINT64_MAX;

    t->x = stx_create(&d);
    ok = stx_ok(t->x) && t->kind->make(t);
    if (ok) {
        *made = stx_bytes(t->x);
        tr_lm_rehearse_params(t, params, widest);
        t->kind->train(t);
        if (t->text[1]) tr_lm_nll(t, 1, TR_REHEARSED_BLOCKS, &scored);
        if ((t->opt->sample_every && !t->no_samples) || t->opt->generate)
            t->lm.gen_free(t->lm.gen_create(t->lm.model, 1, t->eval_window));
    }
    peak = ok && stx_ok(t->x) ? stx_peak_bytes(t->x) : 0;
    if (!peak && t->x && !stx_ok(t->x)) snprintf(why, TR_ERR, "%s", stx_error(t->x));
    else if (!peak) snprintf(why, TR_ERR, "%s", *t->err ? t->err : "out of memory");

    free(t->all_tokens);
    stx_batches_free(t->batches);
    stx_destroy(t->x);
    memcpy(t, real_run, t->kind->size);
    free(real_run);
    return *t->kind->adapt_io ? peak + peak / 20 : peak;
}

/* Reports that training does not fit even if all layers are recomputed, and suggests a
   --max-memory that suffices. This limit is found by search, because more memory is
   reserved than used. Returns 0. */
TR_DEF int tr_lm_nothing_fits(tr_lm *t) {
    char has[TR_TEXT_MAX], needs[TR_TEXT_MAX], why[TR_ERR];
    size_t made = 0, n, peak = tr_lm_rehearse(t, t->layers, 0, 0, &made, why);
    if (!peak)
        return tr_fail(t->err, TR_ERR,
                       "--recompute auto: cannot predict the memory use of training: %.900s", why);
    for (n = 0; n < 64 && !tr_lm_rehearse(t, t->layers, peak, 0, &made, why); n++)
        peak += peak / 64;
    tr_bytes(needs, (double)(peak + peak / 31 + t->overhead));
    tr_bytes(has, (double)stx_ctx_desc(t->x)->max_bytes);
    return tr_fail(t->err, TR_ERR, "--recompute auto: training requires %s even if all %zu layers "
                   "are recomputed, but --max-memory is %s: use a smaller --batch-sz, --streams, "
                   "--block-sz or model, use a larger --batch-split, or raise --max-memory",
                   needs, t->layers, has);
}

/* --recompute auto: chooses the smallest number of recomputed layers with which
   training fits. If training never fits, sets t->err and returns 0. All ranks choose
   the same number, so that they send their gradients in the same order. */
TR_DEF int tr_lm_choose(tr_lm *t) {
    size_t limit = stx_ctx_desc(t->x)->max_bytes, from = 0, to = t->layers + 1, n, made = 0, peak;
    double best;
    char why[TR_ERR];
    if (!t->predicted) {
        tr_lm_rehearse(t, 0, 0, 0, &made, why);
        t->overhead = made && stx_bytes(t->x) > made ? stx_bytes(t->x) - made : 0;
    }
    /* reserve 1/32 for what a rehearsal does not include: saving and fragmentation */
    limit = limit > t->overhead ? (limit - t->overhead) - (limit - t->overhead) / 32 : 1;

    /* because spans can grow, find the number for the widest spans; if there is none,
       recompute all layers */
    for (n = 0; from < to; n = (from + to) / 2) {
        if (tr_lm_rehearse(t, n, limit, 1, &made, why)) to = n;
        else from = n + 1;
    }
    if (to == 1 && t->layers > 1) to = 2;       /* recomputing only one layer saves nothing */
    if (to > t->layers) to = t->layers;
    peak = tr_lm_rehearse(t, to, limit, 0, &made, why);

    best = (double)(peak ? to : t->layers + 1);
    if (!stx_group_max(t->x, &best, 1)) return tr_lm_why(t);
    if (best > (double)t->layers) return tr_lm_nothing_fits(t);
    if (best > (double)to) peak = tr_lm_rehearse(t, (size_t)best, 0, 0, &made, why);
    t->recompute = t->lm.recompute(t->lm.model, (size_t)best);
    t->predicted = peak + t->overhead;
    return 1;
}

/* Chooses again after a step that used more memory than predicted, because spans grew
   or words of other clusters occurred. This happens only a few times, because each new
   prediction is at least a twentieth above the peak, and the number of layers never
   falls. If no number of layers fits, the choice remains unchanged. */
TR_DEF void tr_lm_choose_again(tr_lm *t) {
    size_t before = t->recompute, peak = stx_peak_bytes(t->x);
    if (!t->predicted || peak <= t->predicted || tr_lm_ranks(t) > 1) return;
    if (!tr_lm_choose(t) || t->recompute < before)
        t->recompute = t->lm.recompute(t->lm.model, before);
    if (t->predicted < peak + peak / 20) t->predicted = peak + peak / 20;
    if (t->recompute > before)
        tr_say(&t->term, "step %llu: memory use has grown; now recomputing %zu of %zu layers "
               "instead of %zu", (unsigned long long)t->step, t->recompute, t->layers, before);
}
