/* compressive/model.h - the model of train_compressive: its desc and the number of its
   parameters from the options, its description for --dry-run, and the library's errors in
   terms of the options. */
#pragma once
#include "../train/base.h"
#include "../train/buffer.h"
#include "../train/options_values.h"
#include "../train/lm.h"
#include "../train/lm_errors.h"
#include "../train/lm_context.h"
#include "../train/lm_model.h"
#include "../../seqtx_compressive.h"
#include "options.h"
#include "run.h"


// >>model

/* Reports the library's error, with field names replaced by option names. */
TR_DEF int report_error(tr_lm *t) {
    static const tr_word words[] = {
        {"layers", "nlayers"},
        {"dim", "hid-sz"},
        {"emb", "emb-sz"},
        {"inner", "inner-hid-sz"},
        {"segment", "block-sz"},
        {"zero_gate_bias", "no-gate-bias"},
        {"mems, cmems", "--mems, --cmems"},
        {"a divisor of dim", "a divisor of --hid-sz"},
        {"a divisor of heads", "a divisor of --nheads"},
        {"compress is STX_COMP_COMPRESS_CONV", "--compress is conv"},
        {"compress is STX_COMP_COMPRESS_DILATED", "--compress is dilated"},
        {"aux is STX_COMP_AUX_BPTT", "--aux is bptt"},
        {"aux is STX_COMP_AUX_ATTENTION", "--aux is attention"},
        {"expected STX_COMP_AUX_NONE", "expected none"},
        {"other than STX_COMP_AUX_BPTT", "other than bptt"},
        {"gate is STX_COMP_GATE_GRU and dim is 4 or more",
         "--gate is gru and --hid-sz is 4 or more"},
        {"with zero_gate_bias", "with --no-gate-bias"},
        {"STX_COMP_STORE_ROTATE", "--recurrence rotate"},
        {"STX_COMP_POSITIONS_XL", "--positions xl"},
        {": STX_COMP_LITERAL_ROWS", " rows"},
        {": STX_COMP_LITERAL_PAD", " pad"},
        {": STX_COMP_LITERAL_TARGET", " target"},
        {": STX_COMP_LITERAL_MASK", " mask"},
        {": STX_COMP_LITERAL_FREEZE", " freeze"},
        {"requires STX_COMP_POSITIONS_LEARNED", "requires --positions learned"},
        {"requires STX_COMP_COMPRESS_CONV", "requires --compress conv"},
        {"requires STX_COMP_AUX_ATTENTION", "requires --aux attention"},
        {"a compression other than STX_COMP_COMPRESS_USED", "a --compress other than used"},
        {"STX_COMP_LITERAL selects", "--literal without names selects"},
        {NULL, NULL}
    };
    return tr_lm_why_in(t, "stx_comp_create: ", words);
}

/* Parses --mems or --cmems, a list of one number per layer. */
TR_DEF int per_layer(tr_lm *t, const char *name, const char *text, size_t *out,
                     const size_t **list) {
    size_t n, l;
    *list = NULL;
    if (!text || !*text) return 1;
    if (!tr_read_sizes(text, out, opt.nlayers, &n) || n != opt.nlayers)
        return tr_fail(t->err, TR_ERR,
                       "--%s %.200s: expected %" PRIu64 " numbers, one per layer, separated by "
                       "commas", name, text, opt.nlayers);
    for (l = 0; l < n; l++)
        if (out[l] > MAX_ROWS)
            return tr_fail(t->err, TR_ERR, "--%s %.200s: expected at most %d rows, got %zu", name,
                           text, (int)MAX_ROWS, out[l]);
    *list = out;
    return 1;
}

TR_DEF int read_memory_layers(run *r) {
    const char *text = opt.memory_layers;
    stx_comp_desc *d = &r->desc;
    size_t i, k;
    if (!text || !strcmp(text, "all")) return 1;
    d->no_memory = !*text || !strcmp(text, "none");
    if (d->no_memory) return 1;
    if (!tr_read_sizes(text, r->memory_layers, MAX_LAYERS, &d->memory_count))
        return tr_fail(r->t.err, TR_ERR,
                       "--memory-layers %.200s: expected all, none, or layer numbers separated by "
                       "commas", text);
    for (i = 0; i < d->memory_count; i++) {
        const size_t layer = r->memory_layers[i];
        if (!layer || layer > opt.nlayers)
            return tr_fail(r->t.err, TR_ERR,
                           "--memory-layers %.200s: expected layers from 1 to %" PRIu64
                           " (--nlayers), got %zu", text, opt.nlayers, layer);
        for (k = 0; k < i; k++)
            if (r->memory_layers[k] == layer)
                return tr_fail(r->t.err, TR_ERR,
                               "--memory-layers %.200s: expected each layer at most once, got "
                               "%zu twice", text, layer);
    }
    d->memory_layers = r->memory_layers;
    return 1;
}

TR_DEF int read_dilations(run *r) {
    stx_comp_desc *d = &r->desc;
    size_t i;
    int ok;
    if (!opt.dilations || !*opt.dilations) return 1;
    ok = tr_read_sizes(opt.dilations, d->dilation, STX_COMP_MAX_DILATIONS, &d->dilations);
    for (i = 0; i < d->dilations; i++) ok = ok && d->dilation[i] && d->dilation[i] <= 1u << 20;
    if (ok) return 1;
    return tr_fail(r->t.err, TR_ERR,
                   "--dilations %.200s: expected up to %d numbers from 1 to 2^20, separated by "
                   "commas", opt.dilations, (int)STX_COMP_MAX_DILATIONS);
}

/* Resolves a dropout option: 0 means the value of --dropout, and a negative value means
   no dropout. */
TR_DEF double dropout(double own) {
    if (own < 0) return 0;
    return own == 0 ? opt.dropout : own;
}

/* Creates the model in x and returns the forms of --literal that apply to it. */
TR_DEF const unsigned *literal_in(stx_ctx *x, const void *desc) {
    const stx_comp *m = stx_comp_create(x, (const stx_comp_desc *)desc);
    return m ? &m->desc.literal : NULL;
}

/* Fills in r->desc from the options. Returns 0 and sets an error if a list is invalid or
   the forms of --literal cannot be determined. */
TR_DEF int describe(run *r, size_t vocab) {
    stx_comp_desc *d = &r->desc;
    memset(d, 0, sizeof *d);
    d->vocab = vocab;
    d->layers = opt.nlayers;
    d->dim = opt.hid_sz;
    d->emb = opt.emb_sz;
    d->inner = opt.inner_hid_sz;
    d->heads = opt.nheads;
    d->kv_heads = opt.kv_heads;
    d->segment = opt.lm.block_sz;
    d->mem = opt.mem ? (size_t)opt.mem : STX_COMP_NO_ROWS;
    d->cmem = opt.cmem ? (size_t)opt.cmem : STX_COMP_NO_ROWS;
    d->ratio = opt.ratio;
    d->compress = opt.compress;
    d->overlap = opt.overlap;
    d->conv_no_bias = opt.conv_no_bias;
    d->aux = opt.aux;
    d->aux_weight = opt.aux_weight;
    d->aux_dropout = opt.aux_dropout;
    d->bptt = opt.bptt;
    d->positions = opt.positions;
    d->norm_after = opt.norm_after;
    d->final_norm = opt.final_norm;
    d->glu = opt.glu;
    d->tied = opt.tied;
    d->gate = opt.gate;
    d->gate_relu = opt.gate_relu;
    d->gate_bias = opt.gate_bias;
    d->zero_gate_bias = opt.no_gate_bias;
    d->mogrify = opt.mogrify;
    d->recurrence = opt.recurrence;
    d->attn_dropout = dropout(opt.attn_dropout);
    d->out_dropout = dropout(opt.out_dropout);
    d->ff_dropout = dropout(opt.ff_dropout);
    if (!read_memory_layers(r) || !read_dilations(r)) return 0;
    if (!per_layer(&r->t, "mems", opt.mems, r->mems, &d->mems)) return 0;
    return per_layer(&r->t, "cmems", opt.cmems, r->cmems, &d->cmems)
           && tr_lm_choose_literal(&r->t, opt.literal, &d->literal, d, literal_in);
}

/* Returns the number of parameters, or sets an error and returns 0. */
TR_DEF size_t count(tr_lm *t, size_t vocab) {
    run *r = (run *)t;
    size_t n;
    if (!describe(r, vocab)) return 0;
    n = stx_comp_count(&r->desc);
    if (!n) {
        stx_comp_create(t->x, &r->desc);        /* fails too, and sets the error */
        report_error(t);
    }
    return n;
}

/* Writes a one-line description of the model to `line`. *states receives the number of
   elements in the model's memories. */
TR_DEF void shape(const tr_lm *t, char *line, size_t size, double *states) {
    const stx_comp_desc *d = &((const run *)t)->desc;
    size_t l, i, rows = 0, n = 0;
    for (l = 0; l < opt.nlayers; l++) {
        int memory = !d->no_memory && !d->memory_layers;
        for (i = 0; i < d->memory_count; i++) memory |= d->memory_layers[i] == l + 1;
        if (!memory) continue;
        n++;
        rows += d->mems ? d->mems[l] : (size_t)opt.mem;
        if (opt.compress == STX_COMP_COMPRESS_DROP) continue;
        rows += d->cmems ? d->cmems[l] : (size_t)opt.cmem;
    }
    snprintf(line, size,
             "%" PRIu64 " layer%s, %" PRIu64 " head%s, segment %" PRIu64 "; "
             "%zu layer%s with a memory, %zu row%s in total",
             opt.nlayers, tr_s(opt.nlayers), opt.nheads, tr_s(opt.nheads), opt.lm.block_sz, n,
             tr_s(n), rows, tr_s(rows));
    *states = (double)tr_lm_streams(t) * (double)opt.hid_sz * (double)rows;
}
