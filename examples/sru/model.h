/* sru/model.h - the model of train_sru: its desc and the number of its parameters from
   the options, its description for --dry-run, and the library's errors in terms of the
   options. Uses opt (options.h) and the library. */
#pragma once
#include "../train/base.h"
#include "../train/buffer.h"
#include "../train/lm.h"
#include "../train/lm_errors.h"
#include "../train/lm_context.h"
#include "../train/lm_model.h"
#include "../../seqtx_sru.h"
#include "options.h"


// >>model

/* Reports the library's error, with field names replaced by option names. */
TR_DEF int report_error(tr_lm *t) {
    static const tr_word words[] = {
        {"layers", "nlayers"},
        {"hidden", "hid-sz"},
        {"dim", "hid-sz"},
        {"proj", "proj-sz"},
        {"heads", "nheads"},
        {"divisor of proj ", "divisor of --proj-sz "},
        {"emb_adaptive", "emb-sz"},
        {"emb", "emb-sz"},
        {"cutoff", "adapt-io-cutoffs"},
        {"width of the first cluster / divval^cutoffs",
            "the width of the last cluster, --emb-sz / --adapt-io-divval^cutoffs,"},
        {"divval", "adapt-io-divval"},
        {"cutoffs", "adapt-io-cutoffs"},
        {"a smaller divval or a larger width", "a smaller --adapt-io-divval or a larger --emb-sz"},
        {": STX_SRU_LITERAL_NORM", " norm"},
        {"STX_SRU_ATTENTION with STX_SRU_NORM_BEFORE", "--cell sru++ with --norm before"},
        {"STX_SRU_LITERAL selects", "--literal without names selects"},
        {NULL, NULL}
    };
    const char *stack = "stx_sru_create: ";
    if (!strncmp(stx_error(t->x), stack, strlen(stack))) return tr_lm_why_in(t, stack, words);
    return tr_lm_why_in(t, "stx_sru_lm_create: ", words);
}

/* Sets stack->projs for --cell sru. As in version 2.6 of the authors' code, a layer has a
   projection only if the projection is narrower than the layer's input and output. */
TR_DEF void describe_projs(stx_sru_desc *stack) {
    static size_t projs[MAX_LAYERS];
    const int same_width = opt.input_first || opt.adapt_io || !opt.emb_sz;
    size_t l;
    for (l = 0; l < opt.nlayers; l++) {
        size_t inputs = l || same_width ? opt.hid_sz : opt.emb_sz;
        projs[l] = opt.proj_sz < inputs && opt.proj_sz < opt.hid_sz ? opt.proj_sz : 0;
    }
    stack->projs = projs;
}

/* Creates the model in x and returns the forms of --literal that apply to it. */
TR_DEF const unsigned *literal_in(stx_ctx *x, const void *desc) {
    const stx_sru_lm *m = stx_sru_lm_create(x, (const stx_sru_lm_desc *)desc);
    return m ? &m->sru->desc.literal : NULL;
}

/* Fills in *d from the options. Returns 0 and sets an error if the cutoffs are invalid or
   the forms of --literal cannot be determined. */
TR_DEF int describe(tr_lm *t, stx_sru_lm_desc *d, size_t vocab) {
    stx_sru_desc *stack = &d->sru;
    memset(d, 0, sizeof *d);
    d->vocab = vocab;
    d->dim = opt.hid_sz;
    d->tied = opt.tied;
    d->dropout = opt.dropout;
    d->io_dropout = opt.io_dropout;
    d->emb_dropout = opt.emb_dropout;
    d->adapt_io = opt.adapt_io;
    d->separate_projs = opt.adapt_io_separate;
    d->divval = opt.adapt_io_divval;
    if (opt.adapt_io) d->emb_adaptive = opt.emb_sz;
    else d->emb = opt.emb_sz;

    stack->layers = opt.nlayers;
    stack->no_skip = !opt.skip;
    stack->rescale = opt.rescale;
    stack->highway_bias = opt.highway_bias;
    stack->tanh = opt.tanh;
    stack->v1 = opt.v1;
    stack->v_init = opt.v_init;
    stack->norm = opt.norm;
    stack->input_first = opt.input_first;
    stack->rnn_dropout = opt.rnn_dropout;
    if (opt.cell == CELL_SRUPP) {
        stack->transform = STX_SRU_ATTENTION;
        stack->proj = opt.proj_sz;
        stack->heads = opt.nheads;
        stack->attn_dropout = opt.attn_dropout;
        stack->attention_every = opt.attention_every;
        stack->attention_last = opt.attention_last;
        stack->no_attention = !opt.attention;
        stack->no_attn_norm = !opt.attn_norm;
        stack->attn_norm_first = opt.attn_norm_first;
        stack->alpha_init = opt.alpha_init;
    } else {
        stack->transform = STX_SRU_LINEAR;
        stack->init_xavier = opt.init_xavier;
        describe_projs(stack);
    }
    if (!tr_lm_cutoffs(t, d->cutoff, &d->cutoffs)) return 0;
    if (!opt.adapt_io) d->cutoffs = 0;
    return tr_lm_choose_literal(t, opt.literal, &d->sru.literal, d, literal_in);
}

/* Returns the number of parameters, or sets an error and returns 0. */
TR_DEF size_t count(tr_lm *t, size_t vocab) {
    stx_sru_lm_desc d;
    size_t n;
    if (!describe(t, &d, vocab)) return 0;
    n = stx_sru_lm_count(&d);
    if (!n) {
        stx_sru_lm_create(t->x, &d);        /* fails too, and sets the error */
        report_error(t);
    }
    return n;
}

/* Writes a one-line description of the model to `line`. *states receives the number of
   elements in the model's memory. */
TR_DEF void shape(const tr_lm *t, char *line, size_t size, double *states) {
    size_t l, attending = 0;
    (void)t;
    for (l = 0; l < opt.nlayers && opt.cell == CELL_SRUPP && opt.attention; l++) {
        if (opt.attention_last) attending += opt.nlayers - l <= opt.attention_last;
        else attending += !opt.attention_every || (l + 1) % opt.attention_every == 0;
    }
    snprintf(line, size, "%llu layer%s, %zu with attention", (unsigned long long)opt.nlayers,
             tr_s(opt.nlayers), attending);
    *states = (double)opt.nlayers + (double)attending * (double)opt.lm.block_sz;
    *states *= (double)tr_lm_streams(t) * (double)opt.hid_sz;
}
