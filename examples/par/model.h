/* par/model.h - the model of train_par: its desc and the number of its parameters from
   the options, its description for --dry-run, its memory in evaluations, and the
   library's errors in terms of the options. */
#pragma once
#include "../train/base.h"
#include "../train/buffer.h"
#include "../train/options_values.h"
#include "../train/lm.h"
#include "../train/lm_errors.h"
#include "../train/lm_context.h"
#include "../../seqtx_par.h"
#include "options.h"
#include "patterns.h"
#include "run.h"


// >>model

/* Reports the library's error, with field names replaced by option names. */
TR_DEF int report_error(tr_lm *t) {
    static const tr_word words[] = {
        /* fields */
        {"blocks", "nlayers"},
        {"dim", "hid-sz"},
        {"inner", "inner-hid-sz"},
        {"heads", "nheads"},
        {"head_dim", "head-sz"},
        {"segment", "block-sz"},
        {"emb", "emb-sz"},
        {"gate_form", "arch"},
        {"cutoff", "cutoffs"},
        {"pre_norm", "norm-before"},
        {"no_final_norm", "no-final-norm"},
        {"one_proj", "one-proj"},
        {"tie_words", "tied"},
        {"proj_std", "proj-init-std"},
        {"latency_w", "latency-of"},
        {"cost", "latency-table"},
        /* phrases that describe expected values */
        {"latency = STX_PAR_LATENCY_FBNET", "--latency fbnet"},
        {"latency = STX_PAR_LATENCY_HINGE", "--latency hinge"},
        {"noise = STX_PAR_NOISE_TOKENS", "--noise tokens"},
        {"pos_mode = STX_PAR_POS_DIST", "--pos-mode dist"},
        {"positions = STX_PAR_SINES", "--positions sines"},
        {"sines = STX_PAR_SINES_SPLIT", "--sines block"},
        {"sines = STX_PAR_SINES_REF", "--sines reference"},
        {"words_out = STX_PAR_OUT_REF", "--words-out reference"},
        {"STX_PAR_FORM_PI", "--arch pi"},
        {"an id below vocab if pads is set, otherwise 0", "an id of the vocabulary, or -1"},
        {"adaptive_in is set, div_val is 1 and emb differs from dim",
         "--adaptive-in is set, --div-val is 1 and --emb-sz differs from --hid-sz"},
        {"divisor of dim", "divisor of --hid-sz"},
        {"dim unless the input", "--hid-sz unless the input"},
        {"or set head_dim", "or set --head-sz"},
        {"mem is 2 or more", "--mem is 2 or more"},
        {"pre_norm = 1", "--norm-before"},
        {NULL, NULL}};
    return tr_lm_why_in(t, "stx_par_create: ", words);
}

/* Parses the value of an option that is a list, such as "3,5,8", into `out`. Returns 0
   and sets t->err on error. */
TR_DEF int list(tr_lm *t, const char *option, const char *text, size_t *out, size_t capacity,
                size_t *n) {
    size_t i;
    int ok;
    *n = 0;
    if (!text || !*text) return 1;
    ok = tr_read_sizes(text, out, capacity, n);
    for (i = 0; i < *n; i++) ok = ok && out[i];
    if (ok) return 1;
    return tr_fail(t->err, TR_ERR,
                   "--%s %.200s: expected up to %zu numbers above 0, separated by commas, such as "
                   "20000,40000,200000", option, text, capacity);
}

/* Parses --latency-table. Without the option, both costs are 0. */
TR_DEF int latency_table(tr_lm *t, double cost[2]) {
    char word[2][32];
    const char *text = opt.latency_table;
    size_t n;
    cost[0] = cost[1] = 0;
    if (!text || !*text) return 1;
    n = strcspn(text, ",");
    if (n < sizeof word[0] && text[n] && strlen(text + n + 1) < sizeof word[1]) {
        int ok;
        memcpy(word[0], text, n);
        word[0][n] = 0;
        strcpy(word[1], text + n + 1);
        ok = tr_read_real(word[0], &cost[0]) && tr_read_real(word[1], &cost[1]);
        if (ok && cost[0] > 0 && cost[1] > 0) return 1;
    }
    return tr_fail(t->err, TR_ERR,
                   "--latency-table %.100s: expected two positive times, of an attention and a "
                   "feed-forward block, such as 1.25,0.8", text);
}

TR_DEF void describe_blocks(stx_par_desc *d) {
    d->dim = opt.hid_sz;
    d->heads = opt.nheads;
    d->head_dim = opt.head_sz;
    d->inner = opt.inner_hid_sz;
    d->segment = opt.lm.block_sz;
    d->mem = opt.mem ? (size_t)opt.mem : STX_PAR_NO_ROWS;
    d->positions = opt.positions;
    d->sines = opt.sines;
    d->pos_mode = opt.pos_mode;
    d->clamp_len = opt.clamp_len;
    d->same_length = opt.same_length;
    d->full_scale = opt.full_scale;
    d->attn_relu = opt.attn_relu;
    d->biases = opt.biases;
    d->own_uv = opt.own_uv;
    d->pre_norm = opt.norm_before;
    d->no_final_norm = opt.no_final_norm;
    d->norm_eps = opt.norm_eps;
    d->dropout = opt.dropout;
    d->attn_dropout = opt.attn_dropout;
    d->inner_dropout = opt.inner_dropout;
    d->pos_dropout = opt.pos_dropout;
    d->final_dropout = opt.final_dropout;
    d->init = opt.init;
    d->init_std = opt.init_std;
    d->proj_std = opt.proj_init_std;
}

TR_DEF int describe_vocabulary(tr_lm *t, stx_par_desc *d) {
    static const int out[] = {STX_PAR_OUT_PLAIN, STX_PAR_OUT_ADAPTIVE, STX_PAR_OUT_REF};
    const int tied_matrix = opt.tied && opt.words_out == WORDS_PLAIN;
    size_t n;
    d->adaptive_in = opt.adaptive_in;
    d->words_out = tied_matrix ? STX_PAR_OUT_TIED : out[opt.words_out];
    d->emb_scale = opt.emb_scale;
    d->emb = opt.emb_sz;
    d->div_val = opt.div_val;
    d->proj_factor = opt.proj_factor;
    d->tie_words = opt.tied && !tied_matrix;
    d->tie_projs = opt.tie_projs;
    d->one_proj = opt.one_proj;
    d->pads = opt.pad_id >= 0;
    d->pad_id = opt.pad_id >= 0 ? opt.pad_id : 0;
    d->divide_all = opt.divide_all;
    if (!list(t, "cutoffs", opt.cutoffs, d->cutoff, STX_MAX_CLUSTERS - 1, &d->cutoffs)) return 0;
    if (!list(t, "proj-dims", opt.proj_dims, d->proj_dims, STX_MAX_CLUSTERS - 1, &n)) return 0;
    if (!n || n == d->cutoffs) return 1;
    return tr_fail(t->err, TR_ERR,
                   "--proj-dims %.200s: expected %zu numbers, one for each tail (--cutoffs)",
                   opt.proj_dims, d->cutoffs);
}

TR_DEF void describe_search(run *r) {
    stx_par_desc *d = &r->desc;
    d->gate_form = opt.arch;
    d->gate = opt.straight_through ? STX_PAR_ST : STX_PAR_SOFT;
    /* a rehearsal uses the evaluation that requires the most memory (other_gates) */
    d->gate_eval = r->t.rehearsal ? STX_PAR_EVAL_SOFT : opt.gate_eval;
    d->noise = opt.noise;
    d->noise_tokens = opt.noise_tokens;
    d->tau = opt.tau_start;
    d->latency = opt.latency;
    d->latency_w = opt.latency_of;
    d->latency_weight = opt.latency_weight;
    d->latency_power = opt.latency_power;
    if (!(d->cost[0] > 0) && d->latency) d->cost[0] = d->cost[1] = 1;   /* until measured */
    if (opt.latency == STX_PAR_LATENCY_HINGE) d->latency_target = opt.latency_target * xl_time(r);
}

/* Fills in r->desc from the options. Returns 0 and sets an error if they are invalid. */
TR_DEF int describe(run *r, size_t vocab) {
    stx_par_desc *d = &r->desc;
    memset(d, 0, sizeof *d);
    if (!expand(&r->t, "pattern", opt.pattern, (size_t)opt.nlayers, r->pattern)) return 0;
    r->blocks = *r->pattern ? strlen(r->pattern) : (size_t)opt.nlayers;
    d->vocab = vocab;
    d->blocks = r->blocks;
    d->pattern = *r->pattern ? r->pattern : NULL;
    describe_blocks(d);
    if (!describe_vocabulary(&r->t, d) || !latency_table(&r->t, d->cost)) return 0;
    if (!*r->pattern) describe_search(r);
    return 1;
}

/* Returns the number of parameters, or sets an error and returns 0. */
TR_DEF size_t count(tr_lm *t, size_t vocab) {
    run *r = (run *)t;
    size_t n;
    if (!describe(r, vocab)) return 0;
    n = stx_par_count(&r->desc);
    if (!n) {
        stx_par_create(t->x, &r->desc);     /* sets the error that says why */
        report_error(t);
    }
    return n;
}

/* Writes a description of the model, of one or two lines, to `line`. *states receives the
   number of elements in the model's memory. */
TR_DEF void shape(const tr_lm *t, char *line, size_t size, double *states) {
    const run *r = (const run *)t;
    const size_t n = attentions(r);
    const uint64_t heads = opt.nheads, segment = opt.lm.block_sz, memory = opt.mem;
    *states = (double)tr_lm_streams(t) * (double)opt.hid_sz * (double)n * (double)opt.mem;
    if (*r->pattern) {
        char text[PATTERN], *words = in_words(r->pattern);
        snprintf(line, size,
                 "%zu block%s %.60s: %.600s;\n%zu of them attention with %" PRIu64 " head%s, "
                 "segment %" PRIu64 ", memory %" PRIu64,
                 r->blocks, tr_s(r->blocks), short_form(r->pattern, text), words ? words : "", n,
                 heads, tr_s(heads), segment, memory);
        free(words);
    } else {
        snprintf(line, size,
                 "a search of %zu block%s, %zu gate parameters, %" PRIu64 " head%s, "
                 "segment %" PRIu64 ", memory %" PRIu64,
                 r->blocks, tr_s(r->blocks), 3 * r->blocks, heads, tr_s(heads), segment, memory);
    }
}

/* Returns the number of memory rows in evaluation and generation. */
TR_DEF size_t eval_rows(void) {
    return opt.eval_mem >= 0 ? (size_t)opt.eval_mem : (size_t)opt.mem;
}

/* The functions state_create and gen_create of stx_lm. `window` is 1 in evaluation and
   generation if --eval-mem, --eval-clamp-len or --eval-same-length is given. */
TR_DEF void *state_create(void *m, size_t B, size_t window) {
    stx_par_state *s;
    if (!window) return stx_par_state_create((stx_par *)m, B);
    s = stx_par_state_create_sized((stx_par *)m, B, eval_rows());
    if (s && opt.eval_clamp_len >= 0) s->clamp_len = (size_t)opt.eval_clamp_len;
    if (s && opt.eval_same_length) s->same_length = 1;
    return s;
}

TR_DEF void *gen_create(void *m, size_t B, size_t window) {
    stx_par_gen *g;
    if (!window) return stx_par_gen_create((stx_par *)m, B);
    g = stx_par_gen_create_sized((stx_par *)m, B, eval_rows());
    if (g && opt.eval_clamp_len >= 0) g->clamp_len = (size_t)opt.eval_clamp_len;
    if (g && opt.eval_same_length) g->same_length = 1;
    return g;
}
