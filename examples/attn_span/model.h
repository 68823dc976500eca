/* attn_span/model.h - the model of train_attn_span: its desc and the number of its
   parameters from the options, its description for --dry-run, and the library's errors in
   terms of the options. Uses opt (options.h) and the library. */
#pragma once
#include "../train/base.h"
#include "../train/buffer.h"
#include "../train/lm.h"
#include "../train/lm_errors.h"
#include "../train/lm_context.h"
#include "../train/lm_model.h"
#include "../../seqtx_attn_span.h"
#include "options.h"


// >>model

/* Reports the library's error in terms of the options. Returns 0. An entry in words[]
   maps a field of stx_span_desc to an option, or one phrase to another. If a phrase
   begins with another, the longer one comes first. */
TR_DEF int report_error(tr_lm *t) {
    static const tr_word words[] = {
        {"layers", "nlayers"},
        {"dim", "hid-sz"},
        {"heads", "nheads"},
        {"inner", "inner-hid-sz"},
        {"span_init", "adapt-span-init"},
        {"span_loss", "adapt-span-loss"},
        {"span", "attn-span"},
        {"pers", "pers-mem-size"},
        {"ramp", "adapt-span-ramp"},
        {"width of the first cluster / divval^cutoffs",
            "the width of the last cluster, --hid-sz / --adapt-io-divval^(number of cutoffs)"},
        {"divval", "adapt-io-divval"},
        {"cutoffs", "adapt-io-cutoffs"},
        {"cutoff", "adapt-io-cutoffs"},
        {"a smaller divval or a larger width", "a smaller --adapt-io-divval or a larger --hid-sz"},
        {": STX_SPAN_LITERAL_EPS", " eps"},
        {"adapt_span without no_renorm", "--adapt-span without --no-renorm"},
        {"STX_SPAN_LITERAL selects the flags that apply",
            "--literal without names selects all that apply"},
        {NULL, NULL}
    };
    return tr_lm_why_in(t, "stx_span_create: ", words);
}

/* Creates the model in x and returns the forms of --literal that apply to it. */
TR_DEF const unsigned *literal_in(stx_ctx *x, const void *desc) {
    const stx_span *m = stx_span_create(x, (const stx_span_desc *)desc);
    return m ? &m->desc.literal : NULL;
}

/* Fills in *d from the options. Returns 0 and sets an error if the cutoffs are invalid or
   the flags of --literal cannot be determined. */
TR_DEF int describe(tr_lm *t, stx_span_desc *d, size_t vocab) {
    memset(d, 0, sizeof *d);
    d->vocab = vocab;
    d->layers = opt.nlayers;
    d->dim = opt.hid_sz;
    d->heads = opt.nheads;
    d->inner = opt.inner_hid_sz;
    d->span = opt.attn_span;
    d->pers = opt.pers_mem_size;
    d->dropout = opt.dropout;
    d->emb_dropout = opt.emb_dropout;
    d->adapt_span = opt.adapt_span;
    d->full_cache = !opt.adapt_span_cache;
    d->ramp = opt.adapt_span_ramp;
    d->span_init = opt.adapt_span_init;
    d->span_loss = opt.adapt_span_loss;
    d->span_per_layer = opt.span_per_layer;
    d->no_renorm = opt.no_renorm;
    d->fairseq_init = opt.fairseq_init;
    d->adapt_io = opt.adapt_io;
    d->adapt_io_tied = opt.adapt_io_tied;
    d->divval = opt.adapt_io_divval;
    return tr_lm_cutoffs(t, d->cutoff, &d->cutoffs)
           && tr_lm_choose_literal(t, opt.literal, &d->literal, d, literal_in);
}

/* Returns the number of parameters, or sets an error and returns 0. */
TR_DEF size_t count(tr_lm *t, size_t vocab) {
    stx_span_desc d;
    size_t n;
    if (!describe(t, &d, vocab)) return 0;
    n = stx_span_count(&d);
    if (!n) {
        stx_span_create(t->x, &d);      /* fails too, and sets the error */
        report_error(t);
    }
    return n;
}

/* Writes a one-line description of the model to `line`. *elements receives the number of
   elements in a full memory with L rows in every layer, without spare rows. */
TR_DEF void shape(const tr_lm *t, char *line, size_t size, double *elements) {
    (void)t;
    snprintf(line, size, "%llu layer%s, %llu head%s, span %llu", (unsigned long long)opt.nlayers,
             tr_s(opt.nlayers), (unsigned long long)opt.nheads, tr_s(opt.nheads),
             (unsigned long long)opt.attn_span);
    *elements = (double)tr_lm_streams(t) * (double)opt.hid_sz * (double)opt.nlayers
                * (double)opt.attn_span;
}
