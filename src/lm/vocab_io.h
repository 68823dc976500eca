#pragma once
#include "../api/config.h"
#include "../api/context.h"
#include "../api/ops.h"
#include "../api/attention.h"
#include "../api/lm.h"
#include "../core/loops.h"
#include "../core/functions.h"
#include "../core/platform.h"
#include "../core/tensors.h"
#include "../ops/shape.h"
#include "../ops/cross_entropy.h"
#include "../ops/adaptive.h"


// >>vocab_io: parameters

/* Returns 1 if cluster i has a projection on the given side, STX_VOCAB_INPUT or
   STX_VOCAB_OUTPUT. */
static int stx__vocab_io_projects(const stx_vocab_io_desc *d, size_t i, int side) {
    if (d->no_projections == STX_VOCAB_BOTH || d->no_projections == side) return 0;
    return i || (d->direct_head != STX_VOCAB_BOTH && d->direct_head != side);
}

static size_t stx__vocab_io_width(const stx_vocab_io_desc *d, size_t i, int side) {
    return side == STX_VOCAB_OUTPUT ? d->out_width[i] : d->width[i];
}

/* Returns 1 if input and output share the projection of cluster i. */
static int stx__vocab_io_shares(const stx_vocab_io_desc *d, size_t i) {
    return d->share_projs && (i || !d->separate_first);
}

/* Returns the index of the input projection that cluster i uses. */
static size_t stx__vocab_io_proj(const stx_vocab_io_desc *d, size_t i) {
    return d->one_proj ? 0 : i;
}

static int stx__vocab_io_cutoffs(stx_ctx *x, const char *op, stx_vocab_io_desc *d) {
    static const size_t usual[3] = {20000, 40000, 200000};
    size_t i;
    if (d->no_cutoffs && d->cutoffs)
        return stx_bad_value(x, op, "cutoffs", (double)d->cutoffs, "0 with no_cutoffs");
    if (!d->cutoffs && !d->no_cutoffs)
        for (i = 0; i < 3 && usual[i] < d->vocab; i++) d->cutoff[d->cutoffs++] = usual[i];
    if (d->cutoffs > STX_MAX_CLUSTERS - 1)
        return stx_bad_value(x, op, "cutoffs", (double)d->cutoffs, "at most 7");
    for (i = 0; i < d->cutoffs; i++) {
        if (d->cutoff[i] > (i ? d->cutoff[i - 1] : 0) && d->cutoff[i] < d->vocab) continue;
        stx_fail(x, STX_ERR_ARG,
                 "%s: cutoff: expected increasing values below the vocabulary size %zu, got %zu at "
                 "position %zu", op, d->vocab, d->cutoff[i], i + 1);
        return 0;
    }
    return 1;
}

/* Checks that the fields are consistent with each other. */
static int stx__vocab_io_consistent(stx_ctx *x, const char *op, const stx_vocab_io_desc *d) {
    static const char sides[] = "0, STX_VOCAB_BOTH, STX_VOCAB_INPUT or STX_VOCAB_OUTPUT";
    if (d->direct_head < 0 || d->direct_head > STX_VOCAB_OUTPUT)
        return stx_bad_value(x, op, "direct_head", d->direct_head, sides);
    if (d->no_projections < 0 || d->no_projections > STX_VOCAB_OUTPUT)
        return stx_bad_value(x, op, "no_projections", d->no_projections, sides);
    if (d->proj_biases && d->out != STX_VOCAB_ADAPTIVE)
        return stx_bad_value(x, op, "proj_biases", 1, "0 without an adaptive output");
    if (d->separate_first && !d->share_projs)
        return stx_bad_value(x, op, "separate_first", 1, "0 without share_projs");
    if (d->one_proj
        && (d->in != STX_VOCAB_ADAPTIVE || d->cluster_major
            || !stx__vocab_io_projects(d, 0, STX_VOCAB_INPUT)))
        return stx_bad_value(x, op, "one_proj", 1,
                             "0 unless the input is adaptive, its first cluster has a projection "
                             "and cluster_major is 0");
    return 1;
}

/* Replaces zero widths of cluster i with the defaults, and checks both widths. */
static int stx__vocab_io_widths(stx_ctx *x, const char *op, stx_vocab_io_desc *d, size_t i) {
    STX__FP_SCOPE;
    const size_t most = (size_t)1 << 31;
    int side;
    if (!d->width[i] && d->no_projections == STX_VOCAB_BOTH) d->width[i] = d->dim;
    if (!d->width[i])
        d->width[i] = (size_t)floor((double)d->width[0] / stx_math_pow(d->divval, (double)i));
    if (!d->out_width[i]) d->out_width[i] = d->width[i];

    if (d->one_proj && d->width[i] != d->width[0])
        return stx_bad_value(x, op, "width of a cluster with one_proj", (double)d->width[i],
                             "the width of the first cluster");
    for (side = STX_VOCAB_INPUT; side <= STX_VOCAB_OUTPUT; side++) {
        const int kind = side == STX_VOCAB_INPUT ? d->in : d->out;
        const size_t width = stx__vocab_io_width(d, i, side);
        if (kind != STX_VOCAB_ADAPTIVE || width == d->dim || stx__vocab_io_projects(d, i, side))
            continue;
        return stx_bad_value(x, op,
                             i ? "width of a cluster with no_projections"
                               : "width of the first cluster, which has no projection",
                             (double)width, "dim");
    }
    if (d->out_width[i] != d->width[i] && (d->share_tables || d->share_projs))
        return stx_bad_value(x, op, "out_width", (double)d->out_width[i],
                             "0 with share_tables or share_projs");
    if (!d->width[i] || d->width[i] > most || d->out_width[i] > most)
        return stx_bad_value(x, op, "width of the first cluster / divval^cutoffs",
                             (double)d->width[i],
                             "1 to 2^31 (use fewer cutoffs, a smaller divval or a larger width)");
    return 1;
}

/* Resolves the fields of an adaptive input or output. */
static int stx__vocab_io_adaptive(stx_ctx *x, const char *op, stx_vocab_io_desc *d) {
    STX__FP_SCOPE;
    size_t i;
    if (!(d->divval > 1 && d->divval < 1e6))
        return stx_bad_value(x, op, "divval", d->divval, "more than 1 and less than 1e6");
    if (!stx__vocab_io_cutoffs(x, op, d)) return 0;
    if (!d->width[0]) d->width[0] = d->dim;
    if (!stx__vocab_io_consistent(x, op, d)) return 0;
    for (i = 0; i <= d->cutoffs; i++)
        if (!stx__vocab_io_widths(x, op, d, i)) return 0;
    return 1;
}

STX_DEF int stx_vocab_io_resolve(stx_ctx *x, const char *op, const stx_vocab_io_desc *from,
                                 stx_vocab_io_desc *d) {
    STX__FP_SCOPE;
    const size_t most = (size_t)1 << 31;
    int in, out;
    if (!op) op = "stx_vocab_io_create";
    if (!from || !d) {
        stx_fail(x, STX_ERR_ARG, "%s: expected an stx_vocab_io_desc, got NULL", op);
        return 0;
    }
    *d = *from;
    if (!d->emb) d->emb = d->dim;
    if (d->divval == 0) d->divval = 4;
    in = d->in == STX_VOCAB_ADAPTIVE;
    out = d->out == STX_VOCAB_ADAPTIVE;

    if (!d->vocab || d->vocab > most)
        return stx_bad_value(x, op, "vocab", (double)d->vocab, "1 to 2^31");
    if (!d->dim || d->dim > most) return stx_bad_value(x, op, "dim", (double)d->dim, "1 to 2^31");
    if (d->emb > most) return stx_bad_value(x, op, "emb", (double)d->emb, "at most 2^31");
    if (!in && d->in != STX_VOCAB_PLAIN)
        return stx_bad_value(x, op, "in", d->in, "STX_VOCAB_PLAIN or STX_VOCAB_ADAPTIVE");
    if (!out && d->out != STX_VOCAB_PLAIN && d->out != STX_VOCAB_TIED)
        return stx_bad_value(x, op, "out", d->out, "STX_VOCAB_PLAIN, _TIED or _ADAPTIVE");
    if (!stx__finite(d->scale))
        return stx_bad_value(x, op, "scale of the embedding", d->scale, "a finite value");
    if (!(d->dropout >= 0 && d->dropout < 1))
        return stx_bad_value(x, op, "dropout of adaptive input and output", d->dropout,
                             "at least 0 and below 1");
    if (d->out == STX_VOCAB_TIED && in) {
        stx_fail(x, STX_ERR_ARG,
                 "%s: out: STX_VOCAB_TIED requires a plain input: with an adaptive input, use "
                 "share_tables", op);
        return 0;
    }
    if ((in || d->out == STX_VOCAB_TIED) && d->emb != d->dim)
        return stx_bad_value(x, op, in ? "emb of an adaptive input" : "emb with a tied output",
                             (double)d->emb, "dim");
    if ((d->share_tables || d->share_projs) && !(in && out)) {
        stx_fail(x, STX_ERR_ARG, "%s: %s requires an adaptive input and an adaptive output", op,
                 d->share_tables ? "share_tables" : "share_projs");
        return 0;
    }
    return in || out ? stx__vocab_io_adaptive(x, op, d) : 1;
}

/* Returns the first token id of cluster i. */
static size_t stx__vocab_io_start(const stx_vocab_io_desc *d, size_t i) {
    return i ? d->cutoff[i - 1] : 0;
}

/* Returns the number of token ids in cluster i. */
static size_t stx__vocab_io_size(const stx_vocab_io_desc *d, size_t i) {
    return (i < d->cutoffs ? d->cutoff[i] : d->vocab) - stx__vocab_io_start(d, i);
}

STX_DEF size_t stx_vocab_io_count(const stx_vocab_io_desc *d) {
    size_t n = 0, i;
    int in = d && d->in == STX_VOCAB_ADAPTIVE, out = d && d->out == STX_VOCAB_ADAPTIVE;
    if (!d) return 0;
    if (!in) n = stx_size_add(n, d->vocab, d->emb);
    if (!out && d->out != STX_VOCAB_TIED) n = stx_size_add(n, d->vocab, d->dim);
    if (!out) n = stx_size_add(n, d->vocab, 1);
    for (i = 0; (in || out) && i <= d->cutoffs; i++) {
        size_t size = stx__vocab_io_size(d, i), wi = d->width[i], wo = d->out_width[i];
        if (in) n = stx_size_add(n, size, wi);
        if (in && stx__vocab_io_projects(d, i, STX_VOCAB_INPUT) && stx__vocab_io_proj(d, i) == i)
            n = stx_size_add(n, d->dim, wi);
        if (out && !d->share_tables) n = stx_size_add(n, size, wo);
        if (!out || !stx__vocab_io_projects(d, i, STX_VOCAB_OUTPUT)) continue;
        if (!stx__vocab_io_shares(d, i)) n = stx_size_add(n, d->dim, wo);
        if (d->proj_biases) n = stx_size_add(n, 1, wo);
    }
    if (!out) return n;
    n = stx_size_add(n, d->vocab, 1);
    return stx_size_add(n, d->cutoffs, d->out_width[0] + 1);
}

/* Creates the parameter "name.<i>", or "name" if i is SIZE_MAX: a matrix (rows,columns)
   or, if `bias` is set, the bias (rows) that belongs to such a matrix. If `output` is
   set, the rows are logits and may be padded (see stx__vocab_io_pad). */
static stx_tensor *stx__vocab_io_param(stx_params *p, const stx_init *init, const char *name,
                                       size_t i, size_t rows, size_t columns, int bias,
                                       int output) {
    char full[64];
    size_t d[STX_MAX_DIM], padded = 0;
    double a = init->a;
    if (init->rule == STX_INIT_FAN_IN) a = a / sqrt((double)columns);
    if (init->rule == STX_INIT_XAVIER) a = a * sqrt(6 / (double)(rows + columns));
    if (i == SIZE_MAX)
        snprintf(full, sizeof full, "%s", name);
    else
        snprintf(full, sizeof full, "%s.%zu", name, i);
    d[0] = rows;
    d[1] = bias ? 0 : columns;
    d[2] = d[3] = 0;
    if (output) padded = stx__vocab_io_pad(p->ctx, rows) * (bias ? 1 : columns);
    return stx_param_elementwise(stx__param_padded(p, init->kind, a, full, d, padded));
}

/* Creates the table and projection of input cluster i. With cluster_major, the output
   cluster already exists, and the input reuses the shared parameters. */
static void stx__vocab_io_in(stx_vocab_io *w, stx_params *p, size_t i) {
    const stx_vocab_io_desc *d = &w->desc;
    if (d->cluster_major && d->share_tables)
        w->in.table[i] = w->out.table[i];
    else
        w->in.table[i] = stx__vocab_io_param(p, &d->table, "in_emb.tables", i,
                                             stx__vocab_io_size(d, i), d->width[i], 0,
                                             d->share_tables);
    if (!stx__vocab_io_projects(d, i, STX_VOCAB_INPUT)) return;
    if (stx__vocab_io_proj(d, i) < i)
        w->in.proj[i] = w->in.proj[0];
    else if (d->cluster_major && stx__vocab_io_shares(d, i))
        w->in.proj[i] = w->out.proj[i];
    else
        w->in.proj[i] = stx__vocab_io_param(p, &d->proj, "in_emb.projs", i, d->dim, d->width[i], 0,
                                            0);
}

/* Creates the table, projection and projection bias of output cluster i. Without
   cluster_major, the input cluster already exists, and the output reuses the shared
   parameters. */
static void stx__vocab_io_out(stx_vocab_io *w, stx_params *p, size_t i) {
    const stx_vocab_io_desc *d = &w->desc;
    if (!d->cluster_major && d->share_tables)
        w->out.table[i] = w->in.table[i];
    else
        w->out.table[i] = stx__vocab_io_param(p, &d->out_table, "out_emb.tables", i,
                                              stx__vocab_io_size(d, i), d->out_width[i], 0, 1);
    if (!stx__vocab_io_projects(d, i, STX_VOCAB_OUTPUT)) return;
    if (!d->cluster_major && stx__vocab_io_shares(d, i))
        w->out.proj[i] = w->in.proj[stx__vocab_io_proj(d, i)];
    else
        w->out.proj[i] = stx__vocab_io_param(p, &d->proj, "out_emb.projs", i, d->dim,
                                             d->out_width[i], 0, 0);
    if (d->proj_biases)
        w->out.proj_bias[i] = stx__vocab_io_param(p, &d->proj_bias, "out_emb.proj_biases", i,
                                                  d->out_width[i], d->dim, 1, 0);
}

static void stx__vocab_io_bias(stx_vocab_io *w, stx_params *p, size_t i) {
    const stx_vocab_io_desc *d = &w->desc;
    w->out.bias[i] = stx__vocab_io_param(p, &d->bias, "out_emb.biases", i, stx__vocab_io_size(d, i),
                                         d->out_width[i], 1, 1);
}

/* Creates the weight and bias of the cluster logits: the first output cluster has one
   additional logit for each of the other clusters. */
static void stx__vocab_io_cluster(stx_vocab_io *w, stx_params *p) {
    const stx_vocab_io_desc *d = &w->desc;
    if (!d->cutoffs) return;
    w->out.cluster_w = stx__vocab_io_param(p, &d->cluster, "out_emb.cluster.weight", SIZE_MAX,
                                           d->cutoffs, d->out_width[0], 0, 1);
    w->out.cluster_b = stx__vocab_io_param(p, &d->cluster_bias, "out_emb.cluster.bias", SIZE_MAX,
                                           d->cutoffs, d->out_width[0], 1, 1);
}

/* Creates the bias of a plain or tied output, and the weight of a plain output; the
   weight of a tied output is the input table. w->out also describes the output, as a
   single cluster. */
static void stx__vocab_io_plain_out(stx_vocab_io *w, stx_params *p) {
    const stx_vocab_io_desc *d = &w->desc;
    w->out_w = w->in_emb;
    if (d->out != STX_VOCAB_TIED)
        w->out_w = stx__vocab_io_param(p, &d->out_table, "out_emb.weight", SIZE_MAX, d->vocab,
                                       d->dim, 0, 1);
    w->out_b = stx__vocab_io_param(p, &d->bias, "out_emb.bias", SIZE_MAX, d->vocab, d->dim, 1, 1);
    w->out.table[0] = w->out_w;
    w->out.bias[0] = w->out_b;
}

STX_DEF stx_vocab_io *stx_vocab_io_create(stx_params *p, const stx_vocab_io_desc *desc) {
    STX__FP_SCOPE;
    stx_ctx *x = p ? p->ctx : NULL;
    stx_vocab_io *w;
    const stx_vocab_io_desc *d;
    size_t i, K;
    int in, out;
    if (!stx_ok(x) || !desc) return NULL;
    w = (stx_vocab_io *)stx_persist(x, sizeof *w);
    if (!w) return NULL;
    w->ctx = x;
    /* the caller may have resolved desc already: resolving it again changes nothing */
    if (!stx_vocab_io_resolve(x, "stx_vocab_io_create", desc, &w->desc)) return NULL;
    d = &w->desc;
    in = d->in == STX_VOCAB_ADAPTIVE;
    out = d->out == STX_VOCAB_ADAPTIVE;
    K = d->cutoffs + 1;
    w->in.clusters = K;
    w->in.scale = d->scale;
    w->out.clusters = out ? K : 1;
    w->in.dropout = w->out.dropout = d->dropout;
    w->out.forward_columns = d->forward_columns;
    for (i = 0; i < K; i++)
        w->in.end[i] = w->out.end[i] = stx__vocab_io_start(d, i) + stx__vocab_io_size(d, i);
    if (!out) w->out.end[0] = d->vocab;

    /* The order of creation is the order of the parameter list, and determines the random
       stream that initialises each parameter. */
    if (!in)
        w->in_emb = stx__vocab_io_param(p, &d->table, "in_emb.weight", SIZE_MAX, d->vocab, d->emb,
                                        0, d->out == STX_VOCAB_TIED);
    for (i = 0; in && i < K && !(d->cluster_major && out); i++) stx__vocab_io_in(w, p, i);
    if (out && !d->cluster_major) stx__vocab_io_cluster(w, p);
    for (i = 0; out && i < K; i++) {
        stx__vocab_io_out(w, p, i);
        if (in && d->cluster_major) stx__vocab_io_in(w, p, i);
        stx__vocab_io_bias(w, p, i);
    }
    if (out && d->cluster_major) stx__vocab_io_cluster(w, p);
    if (!out) stx__vocab_io_plain_out(w, p);
    return stx_ok(x) ? w : NULL;
}


// >>vocab_io: forward

STX_DEF stx_tensor *stx_vocab_io_embed(const stx_vocab_io *w, const stx_ids *ids) {
    stx_tensor *h;
    if (!w || !stx_ok(w->ctx)) return NULL;
    STX__NEED(w->ctx, ids, STX_ERR_ARG,
              "stx_vocab_io_embed: ids: expected tokens (B,T), got NULL");
    if (w->desc.in == STX_VOCAB_ADAPTIVE) return stx_adaptive_input(w->ctx, &w->in, ids);
    h = stx_embedding(w->ctx, w->in_emb, ids);
    return w->desc.scale == 0 || w->desc.scale == 1 ? h : stx_scale(w->ctx, h, w->desc.scale);
}

STX_DEF stx_tensor *stx_vocab_io_logits(const stx_vocab_io *w, stx_tensor *h) {
    stx_tensor *l;
    if (!w || !h || !stx_ok(w->ctx)) return NULL;
    STX__NEED(w->ctx, w->desc.out != STX_VOCAB_ADAPTIVE, STX_ERR_ARG,
              "stx_vocab_io_logits: an adaptive output has no logits over the whole vocabulary: "
              "use stx_vocab_io_log_probs, or the log_probs function of the model");
    l = stx__logits(w->ctx, h, w->out_w, w->out_b);
    return stx__join_columns(w->ctx, l, w->desc.vocab, NULL, 0);
}

STX_DEF stx_tensor *stx_vocab_io_log_probs(const stx_vocab_io *w, stx_tensor *h) {
    stx_tensor *y;
    if (!w || !h) return NULL;
    y = stx_adaptive_log_probs(w->ctx, &w->out, h);
    return h->ndim == 3 ? stx_reshape(w->ctx, y, h->dim[0], h->dim[1], w->desc.vocab, 0) : y;
}

STX_DEF stx_tensor *stx_vocab_io_scores(const stx_vocab_io *w, stx_tensor *h) {
    return w && w->desc.out == STX_VOCAB_ADAPTIVE ? stx_vocab_io_log_probs(w, h)
                                                  : stx_vocab_io_logits(w, h);
}

STX_DEF stx_tensor *stx_vocab_io_loss(const stx_vocab_io *w, stx_tensor *h, const stx_ids *targets,
                                      stx_token_loss *how) {
    stx_tensor *logits;
    if (how) how->nll = NULL;
    if (!w || !h || !stx_ok(w->ctx)) return NULL;
    STX__NEED(w->ctx, targets, STX_ERR_ARG,
              "stx_vocab_io_loss: targets: expected tokens (B,T), got NULL");
    if (w->desc.out == STX_VOCAB_ADAPTIVE)
        return stx_adaptive_softmax_tokens(w->ctx, &w->out, h, targets, how);
    logits = stx__logits(w->ctx, h, w->out_w, w->out_b);
    if (how) return stx__cross_entropy_tokens(w->ctx, logits, w->desc.vocab, targets, how);
    return stx__cross_entropy(w->ctx, logits, w->desc.vocab, targets, 0, 1);
}

STX_DEF uint64_t stx_vocab_io_key(const stx_vocab_io *w, uint64_t key, const stx_ids *ids,
                                  const stx_ids *targets, const stx_token_loss *how) {
    if (!w) return key;
    if (w->desc.in == STX_VOCAB_ADAPTIVE) key = stx_adaptive_key(key, &w->in, ids, 0, NULL);
    if (w->desc.out == STX_VOCAB_ADAPTIVE) key = stx_adaptive_key(key, &w->out, targets, 1, how);
    return key;
}
