#pragma once
#include "base.h"
#include "options.h"
#include "options_values.h"
#include "options_set.h"
#include "lm.h"
#include "lm_errors.h"


// >>lm: context

/* Nonzero if the context agrees with the options, which a checkpoint may have changed. */
TR_DEF int tr_lm_fits_options(const tr_lm *t) {
    const stx_desc *d = stx_ctx_desc(t->x);
    return d->precision == t->opt->precision && d->tf32 == t->opt->tf32 && d->seed == t->opt->seed
           && (d->no_graph || !*t->kind->adapt_io);
}

/* Without a preset, new runs on a CPU that multiplies bfloat16 numbers use them. */
TR_DEF int tr_lm_suggest_precision(tr_lm *t) {
    const tr_lm_opt *o = t->opt;
    if (!t->training || o->device == STX_CUDA || t->options->preset_used[0]) return 1;
    if (!stx_cpu_has_bf16()) return 1;
    return tr_apply(t->options, "precision=bf16", TR_FROM_TEXT, t->err, TR_ERR);
}

/* Creates the context that the options describe, or keeps the current one if it already
   matches them. Without --max-memory, the limit is 90 % of the machine's memory on a
   CPU, and there is no limit on a GPU. */
TR_DEF int tr_lm_context(tr_lm *t) {
    const tr_lm_opt *o = t->opt;
    double bytes = 0;
    stx_desc d;
    if (!t->x && !tr_lm_suggest_precision(t)) return 0;
    if (t->x && tr_lm_fits_options(t)) return 1;
    if (o->max_memory > 0)
        bytes = o->max_memory * 1073741824.0;
    else if (o->device != STX_CUDA)
        bytes = (double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGESIZE) * 0.9;

    memset(&d, 0, sizeof d);
    d.threads = o->threads;
    d.precision = o->precision;
    d.device = o->device;
    d.gpu = tr_given(t->options, "gpu") ? (int)o->gpu : t->start.local;
    d.tf32 = o->tf32;
    d.tune = o->tune;
    d.no_graph = o->no_graph || *t->kind->adapt_io;
    d.seed = o->seed;
    d.max_bytes = (size_t)bytes;

    stx_destroy(t->x);
    t->x = stx_create(&d);
    if (!t->x) return tr_fail(t->err, TR_ERR, "out of memory: cannot create a context");
    return stx_ok(t->x) ? 1 : tr_lm_why(t);
}

/* Joins the group of ranks. The context must not be replaced afterwards. */
TR_DEF int tr_lm_join(tr_lm *t) {
    stx_group_desc g;
    if ((!t->training && !t->evaluating) || t->start.ranks < 2) return 1;
    memset(&g, 0, sizeof g);
    g.shard = t->opt->shard;
    return stx_group_join(t->x, &g) || tr_lm_why(t);
}

/* Parses --adapt-io-cutoffs into cutoff[] and stores the number of cutoffs in *n. */
TR_DEF int tr_lm_cutoffs(tr_lm *t, size_t cutoff[STX_MAX_CLUSTERS - 1], size_t *n) {
    const char *text = *t->kind->cutoffs;
    size_t i;
    int ok;
    *n = 0;
    if (!text || !*text) return 1;
    ok = tr_read_sizes(text, cutoff, STX_MAX_CLUSTERS - 1, n);
    for (i = 0; i < *n; i++) ok = ok && cutoff[i];
    if (ok) return 1;
    return tr_fail(t->err, TR_ERR, "--adapt-io-cutoffs: expected up to %d increasing numbers, "
                   "separated by commas, such as 20000,40000,200000, got '%s'",
                   STX_MAX_CLUSTERS - 1, text);
}


// >>lm: options by name

/* Returns the value of an integer option, or `missing` if the trainer has no such
   option. */
TR_DEF uint64_t tr_lm_number(const tr_lm *t, const char *name, uint64_t missing) {
    const tr_opt *p = tr_find_option(t->options, name, strlen(name));
    return p ? *(uint64_t *)p->to : missing;
}

/* Returns the number of streams into which the training text is cut. */
TR_DEF uint64_t tr_lm_streams(const tr_lm *t) {
    return t->opt->streams ? t->opt->streams : tr_lm_number(t, "batch-sz", 1);
}

/* Nonzero if the checkpoint, a preset or the command line sets the option. */
TR_DEF int tr_lm_decided(const tr_lm *t, const char *name) {
    const tr_opt *p = tr_find_option(t->options, name, strlen(name));
    return p && p->from > TR_FROM_TEXT;
}

/* Sets an option to the value that the text and the time suggest, unless the option is
   already set. */
TR_DEF int tr_lm_suggest(tr_lm *t, const char *name, uint64_t value) {
    char word[96];
    if (!tr_find_option(t->options, name, strlen(name))) return 1;
    snprintf(word, sizeof word, "%s=%" PRIu64, name, value);
    return tr_apply(t->options, word, TR_FROM_TEXT, t->err, TR_ERR);
}

/* Checks that --max-memory suffices for four values per parameter: the parameter, its
   gradient and two optimiser states. With --freeze, checks only for the parameters,
   because the number of those that are trained is not yet known. */
TR_DEF int tr_lm_fits(tr_lm *t, double params) {
    const int values = tr_lm_decided(t, "freeze") ? 1 : 4;
    double need = params * sizeof(stx_real) * values;
    double limit = (double)stx_ctx_desc(t->x)->max_bytes;
    if (limit > 0 && need > limit)
        return tr_fail(t->err, TR_ERR, "--max-memory: the model alone requires %.3g GiB, "
                       "but the limit is %.3g GiB: use a smaller model, or raise --max-memory",
                       need / (1 << 30), limit / (1 << 30));
    return 1;
}
