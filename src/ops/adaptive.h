#pragma once
#include "../api/config.h"
#include "../api/context.h"
#include "../api/ops.h"
#include "../api/attention.h"
#include "../api/private.h"
#include "../api/train.h"
#include "../core/loops.h"
#include "../core/functions.h"
#include "../core/platform.h"
#include "../core/context.h"
#include "../core/arena.h"
#include "../core/tensors.h"
#include "../core/sums.h"
#include "embedding.h"
#include "shape.h"
#include "linear.h"
#include "cross_entropy.h"
#include "attention.h"


// >>adaptive input and output

/* Returns the cluster that contains id, or `count` if none does. */
static size_t stx__cluster(const size_t *end, size_t count, int32_t id) {
    size_t c = 0;
    if (id < 0) return count;
    while (c < count && (size_t)id >= end[c]) c++;
    return c;
}

/* Returns the first id of cluster c. */
static size_t stx__cluster_start(const size_t *end, size_t c) {
    return c ? end[c - 1] : 0;
}

/* Returns the column of cluster c >= 1 in the output head. The head has `words` columns
   for words and then K - 1 columns for clusters 1 .. K-1 in ascending (`forward`) or
   descending order. */
static size_t stx__cluster_column(size_t words, size_t K, size_t c, int forward) {
    return words + (forward ? c - 1 : K - 1 - c);
}

static void stx__cluster_sort(stx_ctx *x, const stx__cluster_sort_args *k) {
    size_t next[STX_MAX_CLUSTERS], i, c; /* next free slot of each cluster */
    (void)x;
    memcpy(next, k->first, sizeof next);
    for (i = 0; i < k->first[k->count]; i++) {
        k->local[i] = k->leftover;
        k->place[i] = 0;
    }
    *k->over = 0;
    for (i = 0; i < k->n; i++) {
        const int32_t id = k->ids[i];
        int32_t *at = k->at + i;
        *at = -1;
        c = stx__cluster(k->end, k->count, id);
        if (c == k->count) continue;
        if (k->head) {
            *at = id;
            if (c == 0) continue;
            *at = (int32_t)stx__cluster_column(k->end[0], k->count, c, k->forward_columns);
        }
        if (next[c] == k->first[c + 1]) {
            *k->over = 1;
            if (!k->head) *at = 0;
            continue;
        }
        if (!k->head) *at = (int32_t)next[c];
        k->local[next[c]] = id - (int32_t)stx__cluster_start(k->end, c);
        k->place[next[c]++] = (int32_t)i;
    }
}

static void stx__nan_if(stx_ctx *x, stx_real *y, size_t n, const int32_t *flag) {
    size_t i;
    (void)x;
    if (*flag)
        for (i = 0; i < n; i++) y[i] = (stx_real)NAN;
}

/* Checks cluster c. d is the model width, or 0 if it is unknown. */
static int stx__adaptive_check_cluster(stx_ctx *x, const char *op, const stx_adaptive *a, size_t c,
                                       size_t d, int output) {
    const size_t start = stx__cluster_start(a->end, c);
    const stx_tensor *T = a->table[c], *P = a->proj[c];
    const stx_tensor *bias = output ? a->bias[c] : NULL;
    const stx_tensor *proj_bias = output ? a->proj_bias[c] : NULL;
    char s[96];
    STX__CHECK(x, a->end[c] > start && a->end[c] <= INT32_MAX, STX_ERR_ARG,
               "%s: end[%zu]: expected more than %zu, the start of the cluster, and less than "
               "2^31, got %zu", op, c, start, a->end[c]);
    STX__CHECK(x, T && T->ndim == 2 && T->dim[0] == a->end[c] - start, STX_ERR_SHAPE,
               "%s: table[%zu]: expected (%zu,width), got %s", op, c, a->end[c] - start,
               T ? stx__shape(T, s) : "NULL");
    STX__CHECK(x, !P || d || (P->ndim == 2 && P->dim[1] == T->dim[1]), STX_ERR_SHAPE,
               "%s: proj[%zu]: expected (dim,%zu), got %s", op, c, T->dim[1], stx__shape(P, s));
    STX__CHECK(x, !P || !d || (P->ndim == 2 && P->dim[1] == T->dim[1] && P->dim[0] == d),
               STX_ERR_SHAPE, "%s: proj[%zu]: expected (%zu,%zu), got %s", op, c, d, T->dim[1],
               stx__shape(P, s));
    STX__CHECK(x, P || !d || T->dim[1] == d, STX_ERR_SHAPE,
               "%s: table[%zu]: expected width %zu, because there is no projection, got shape %s",
               op, c, d, stx__shape(T, s));
    STX__CHECK(x, !proj_bias || (P && proj_bias->size == P->dim[1]), STX_ERR_SHAPE,
               "%s: proj_bias[%zu]: expected shape (%zu) and a projection, got shape %s and %s", op,
               c, T->dim[1], stx__shape(proj_bias, s), P ? "a projection" : "no projection");
    STX__CHECK(x, !bias || bias->size == T->dim[0], STX_ERR_SHAPE,
               "%s: bias[%zu]: expected (%zu), got %s", op, c, T->dim[0], stx__shape(bias, s));
    return 1;
}

/* Checks the fields of *a that an adaptive input uses or, if `output` is set, those
   that an adaptive softmax uses. */
static int stx__adaptive_check(stx_ctx *x, const char *op, const stx_adaptive *a, size_t d,
                               int output) {
    STX__FP_SCOPE;
    const stx_tensor *w = a->cluster_w, *b = a->cluster_b;
    size_t c, K, width;
    char s[96];
    STX__CHECK(x, a->clusters >= 1 && a->clusters <= STX_MAX_CLUSTERS, STX_ERR_ARG,
               "%s: clusters: expected 1 to %d, got %zu", op, STX_MAX_CLUSTERS, a->clusters);
    if (!(a->dropout >= 0 && a->dropout < 1))
        return stx_bad_value(x, op, "dropout", a->dropout, "at least 0 and below 1");
    if (!output && !stx__finite(a->scale))
        return stx_bad_value(x, op, "scale", a->scale, "a finite number, or 0 for sqrt(d)");
    for (c = 0; c < a->clusters; c++)
        if (!stx__adaptive_check_cluster(x, op, a, c, d, output)) return 0;
    if (!output || a->clusters == 1) return 1;

    K = a->clusters - 1;
    width = a->table[0]->dim[1];
    STX__CHECK(x, w && w->ndim == 2 && w->dim[0] == K && w->dim[1] == width, STX_ERR_SHAPE,
               "%s: cluster_w: expected (%zu,%zu), got %s", op, K, width,
               w ? stx__shape(w, s) : "NULL");
    STX__CHECK(x, !b || b->size == K, STX_ERR_SHAPE, "%s: cluster_b: expected (%zu), got %s", op,
               K, stx__shape(b, s));
    return 1;
}

/* Sets m[c] to the number of ids in cluster c, excluding ignored ids. If an id is in no
   cluster, sets an error and returns 0, or skips the id if op is NULL. */
static int stx__cluster_counts(stx_ctx *x, const char *op, const stx_adaptive *a,
                               const stx_ids *ids, const stx_token_loss *how, size_t *m) {
    size_t c, i, n = ids->B * ids->T;
    memset(m, 0, STX_MAX_CLUSTERS * sizeof *m);
    for (i = 0; i < n; i++) {
        if (stx__is_ignored(how, ids->data[i])) continue;
        c = stx__cluster(a->end, a->clusters, ids->data[i]);
        if (c < a->clusters) {
            m[c]++;
            continue;
        }
        STX__CHECK(x, !op, STX_ERR_ARG,
                   "%s: id at position %zu: expected at least 0 and below the vocabulary size %zu, "
                   "got %ld", op, i, a->end[a->clusters - 1], (long)ids->data[i]);
    }
    return 1;
}

/* Returns the number of slots for m ids. On a CPU, it is m. On a GPU, m is rounded up
   to a multiple of 1/16 of the total number of ids, so that steps with similar counts
   have the same shapes. */
static size_t stx__cluster_capacity(const stx_ids *ids, size_t m) {
    size_t n = ids->B * ids->T, each = (n + 15) / 16;
    if (ids->data == ids->device || !m) return m;
    return STX_MIN(n, (m + each - 1) / each * each);
}

STX_DEF uint64_t stx_adaptive_key(uint64_t key, const stx_adaptive *a, const stx_ids *ids,
                                  int output, const stx_token_loss *how) {
    size_t m[STX_MAX_CLUSTERS], c;
    if (!a || !ids || ids->data == ids->device || a->clusters > STX_MAX_CLUSTERS) return key;
    (void)stx__cluster_counts(NULL, NULL, a, ids, how, m);
    for (c = output ? 1 : 0; c < a->clusters; c++)
        key = stx_key_add(key, stx__cluster_capacity(ids, m[c]));
    return key;
}

/* Ids sorted by cluster on the device. Cluster c has size[c] slots. */
typedef struct stx__sorted_ids {
    stx__cluster_sort_args k;
    size_t size[STX_MAX_CLUSTERS];
} stx__sorted_ids;

/* Sorts the ids by cluster. `known` holds the ids in device memory, with -1 for ignored
   ids. */
static int stx__sort_ids(stx_ctx *x, const char *op, const stx_adaptive *a, const stx_ids *ids,
                         const int32_t *known, const stx_token_loss *how, int head,
                         stx__sorted_ids *s) {
    size_t m[STX_MAX_CLUSTERS], n = ids->B * ids->T, c, all;
    if (!stx__cluster_counts(x, op, a, ids, how, m)) return 0;
    stx__ids_used(ids, a->end[a->clusters - 1], how);
    memset(s, 0, sizeof *s);
    s->k.count = a->clusters;
    s->k.head = head;
    s->k.leftover = head ? -1 : 0;
    s->k.forward_columns = a->forward_columns;
    for (c = 0; c < a->clusters; c++) {
        if (!head || c) s->size[c] = stx__cluster_capacity(ids, m[c]);
        s->k.end[c] = a->end[c];
        s->k.first[c + 1] = s->k.first[c] + s->size[c];
    }
    all = s->k.first[a->clusters];
    s->k.n = n;
    s->k.ids = known;
    s->k.at = (int32_t *)stx_step_device_bytes(x, (n + 2 * all + 1) * sizeof *s->k.at);
    if (!s->k.at) return 0;
    s->k.local = s->k.at + n;
    s->k.place = s->k.local + all;
    s->k.over = s->k.place + all;
    STX_RUN(x, stx__cluster_sort, (x, &s->k));
    return 1;
}

/* Returns a dropout mask (m,C) for m of the n tokens, those at place[0..m), or NULL
   without dropout. Masks are drawn for all n tokens, so that a token's mask does not
   depend on which rows are in its cluster or on their order. Both depend on the rank's
   share of the batch. */
static stx_tensor *stx__token_mask(stx_ctx *x, size_t n, size_t C, double p, const int32_t *place,
                                   size_t m) {
    stx_tensor *all, *mask;
    if (!stx_ok(x) || !stx_training(x) || p == 0) return NULL;
    all = stx_new_f32(x, n, C, 0, 0);
    if (!all) return NULL;
    STX_RUN(x, stx_fill, (x, all->data, all->size, 1));
    all = stx_dropout(x, all, p);
    mask = m ? stx_new_f32(x, m, C, 0, 0) : NULL;
    if (all && mask) STX_RUN(x, stx_embedding_fwd, (x, mask->data, all->data, place, m, C));
    return all ? mask : NULL;
}

/* Returns the rows P_c dropout(T_c[id]) of all clusters c, one cluster after the other,
   as (1,all,d). T_c is the table of the cluster, and P_c its projection, if any. */
static stx_tensor *stx__adaptive_rows(stx_ctx *x, const stx_adaptive *a, size_t n,
                                      const stx__sorted_ids *s) {
    stx_tensor *all = NULL;
    size_t c;
    for (c = 0; c < a->clusters; c++) {
        const int32_t *local = s->k.local + s->k.first[c], *place = s->k.place + s->k.first[c];
        stx_tensor *rows, *mask;
        size_t dim[3];
        dim[0] = 1;
        dim[1] = s->size[c];
        dim[2] = stx__last(a->table[c]);
        mask = stx__token_mask(x, n, dim[2], a->dropout, place, dim[1]);
        if (!dim[1]) continue;
        rows = stx__lookup(x, a->table[c], local, dim[1], 3, dim);
        if (mask) rows = stx_mul(x, rows, mask);
        if (a->proj[c]) rows = stx_linear(x, rows, a->proj[c], NULL, STX_ACT_NONE);
        if (!rows) return NULL;
        all = all ? stx_concat(x, all, rows) : rows;
    }
    return all;
}

STX_DEF stx_tensor *stx_adaptive_input(stx_ctx *x, const stx_adaptive *a, const stx_ids *ids) {
    STX__FP_SCOPE;
    size_t n, d = 0, dim[3];
    stx__sorted_ids s;
    stx_tensor *rows, *y;
    if (!stx_ok(x) || !a || !ids) return NULL;
    n = ids->B * ids->T;
    if (a->clusters && a->table[0]) d = a->proj[0] ? a->proj[0]->dim[0] : stx__last(a->table[0]);
    if (!stx__adaptive_check(x, "stx_adaptive_input", a, d, 0)) return NULL;
    STX__NEED(x, n <= INT32_MAX / 2, STX_ERR_ARG,
              "stx_adaptive_input: ids: expected fewer than 2^30 tokens, got %zu", n);
    if (!stx__sort_ids(x, "stx_adaptive_input", a, ids, ids->device, NULL, 0, &s)) return NULL;
    rows = stx__adaptive_rows(x, a, n, &s);
    if (!rows) return NULL;

    dim[0] = ids->B;
    dim[1] = ids->T;
    dim[2] = stx__last(rows);
    y = stx__lookup(x, rows, s.k.at, n, 3, dim);
    if (y && a->scale != 1) y = stx_scale(x, y, a->scale != 0 ? a->scale : sqrt((double)dim[2]));
    if (y && stx__on_gpu(x)) STX_RUN(x, stx__nan_if, (x, y->data, y->size, s.k.over));
    return y;
}

/* Padded logits. Tensor cores need rows that start at multiples of 16 bytes. With an
   odd vocabulary size, for example, rows of logits do not. On a GPU, a table whose
   number of rows is not a multiple of 8 is therefore followed by zero rows up to a
   multiple of 64. The GEMM computes these columns anyway: 64 columns of bf16 are 128
   bytes, less than one of its tiles. The logits then have columns that do not
   correspond to words. Losses do not read them and set their gradients to 0, so GEMMs
   with the table and with its gradient can include them. The padding is not part of the
   parameters or of their gradients, and is not counted in their sizes. */
enum {
    STX__ALIGNED = 8,
    STX__PADDED  = 64
};

static size_t stx__vocab_io_pad(const stx_ctx *x, size_t rows) {
    return stx__on_gpu(x) && rows % STX__ALIGNED ? STX__PADDED - rows % STX__PADDED : 0;
}

/* Returns T h + b for h (..,d), with padding columns if the table and its bias have
   space for them. */
static stx_tensor *stx__logits(stx_ctx *x, stx_tensor *h, stx_tensor *T, stx_tensor *b) {
    size_t pad = T && T->ndim == 2 ? stx__vocab_io_pad(x, T->dim[0]) : 0;
    if (pad && (T->padding < pad * T->dim[1] || (b && b->padding < pad))) pad = 0;
    return stx__linear_padded(x, h, T, b, STX_ACT_NONE, pad);
}

/* Returns the logits of cluster c for rows h (n,d): T_c dropout(P_c^T h + p_c) + b_c,
   with the cluster's table T_c, projection P_c, projection bias p_c and bias b_c. The
   head (c = 0) has one more column for each other cluster. `mask` holds the dropout
   masks of the cluster's rows; if it is NULL, new masks are drawn with the probability
   `dropout`. *w receives the number of columns without padding. */
static stx_tensor *stx__adaptive_logits(stx_ctx *x, const stx_adaptive *a, stx_tensor *h, size_t c,
                                        double dropout, stx_tensor *mask, size_t *w) {
    stx_tensor *e = a->proj[c] ? stx_matmul(x, h, a->proj[c], 0, 0) : h, *logits;
    if (a->proj_bias[c]) e = stx_add(x, e, a->proj_bias[c]);
    e = mask ? stx_mul(x, e, mask) : stx_dropout(x, e, dropout);
    logits = stx__logits(x, e, a->table[c], a->bias[c]);
    *w = a->table[c]->dim[0];
    if (c || a->clusters == 1) return logits;
    *w += a->clusters - 1;
    return stx__join_columns(x, logits, a->table[c]->dim[0],
                             stx__logits(x, e, a->cluster_w, a->cluster_b), a->clusters - 1);
}

/* State of an adaptive softmax call. The loss is the head's loss over all n rows plus
   the loss of each cluster over its rows. Rows have weights if `how` is given. On a
   GPU, they always have weights, because some of a cluster's slots do not hold a row. */
typedef struct stx__adaptive_loss {
    const stx_adaptive *a;
    stx_token_loss *how;             /* options of the token loss, or NULL */
    stx_tensor     *h;               /* (n,d) */
    size_t          n;
    stx__sorted_ids s;
    stx_real       *weight;          /* (n), row weights on the device; NULL if there are none */
    stx_tensor     *nll;             /* (n), losses of the rows; NULL if there are no weights */
} stx__adaptive_loss;

/* Returns `loss` plus the loss of cluster c >= 1. */
static stx_tensor *stx__adaptive_add_cluster(stx_ctx *x, const stx__adaptive_loss *l, size_t c,
                                             stx_tensor *loss) {
    const stx_adaptive *a = l->a;
    const int32_t *local = l->s.k.local + l->s.k.first[c], *place = l->s.k.place + l->s.k.first[c];
    const size_t d = stx__last(l->h), m = l->s.size[c];
    stx_tensor *mask, *rows, *logits;
    stx_real *weight, *nll;
    size_t dim[2], V;
    mask = stx__token_mask(x, l->n, a->proj[c] ? a->proj[c]->dim[1] : d, a->dropout, place, m);
    if (!m) return loss;
    dim[0] = m;
    dim[1] = d;
    rows = stx__lookup(x, l->h, place, m, 2, dim);
    logits = stx__adaptive_logits(x, a, rows, c, 0, mask, &V);
    if (!l->weight)
        return stx_add(x, loss, stx__cross_entropy_of(x, logits, V, local, (double)l->n, 0));

    weight = (stx_real *)stx_step_device_bytes(x, 2 * m * sizeof *weight);
    if (!weight) return NULL;
    nll = weight + m;
    STX_RUN(x, stx_embedding_fwd, (x, weight, l->weight, place, m, 1));
    loss = stx_add(x, loss, stx__token_loss(x, logits, V, local, weight, nll));
    if (loss && l->how) STX_RUN(x, stx_embedding_bwd, (x, l->nll->data, nll, place, m, 1));
    return loss;
}

static stx_tensor *stx__adaptive_softmax(stx_ctx *x, const char *op, const stx_adaptive *a,
                                         stx_tensor *h, const stx_ids *targets,
                                         stx_token_loss *how) {
    stx__adaptive_loss l;
    stx_tensor *loss, *logits;
    int32_t *known;
    size_t c, V;
    if (how) how->nll = NULL;
    if (!stx_ok(x) || !a || !h || !targets) return NULL;
    memset(&l, 0, sizeof l);
    l.a = a;
    l.how = how;
    l.n = targets->B * targets->T;
    known = targets->device;
    if (!stx__adaptive_check(x, op, a, stx__last(h), 1)) return NULL;
    STX__NEED(x, stx__rows(h) == l.n && l.n <= INT32_MAX / 2, STX_ERR_SHAPE,
              "%s: expected one target per row and fewer than 2^30 rows, got %zu rows and %zu "
              "targets", op, stx__rows(h), l.n);
    if ((how || stx__on_gpu(x)) && !stx__token_weights(x, op, targets, how, &l.weight, &known))
        return NULL;
    if (!stx__sort_ids(x, op, a, targets, known, how, 1, &l.s)) return NULL;
    l.h = stx_reshape(x, h, l.n, stx__last(h), 0, 0);
    if (!l.h) return NULL;
    if (l.weight) {
        l.nll = stx_new_f32(x, l.n, 0, 0, 0);
        if (!l.nll) return NULL;
        if (stx__on_gpu(x)) STX_RUN(x, stx__nan_if, (x, l.weight, l.n, l.s.k.over));
    }

    logits = stx__adaptive_logits(x, a, l.h, 0, a->dropout, NULL, &V);
    if (l.weight)
        loss = stx__token_loss(x, logits, V, l.s.k.at, l.weight, l.nll->data);
    else
        loss = stx__cross_entropy_of(x, logits, V, l.s.k.at, (double)l.n, 0);
    for (c = 1; c < a->clusters; c++) loss = stx__adaptive_add_cluster(x, &l, c, loss);
    if (how && loss) how->nll = l.nll;
    return loss;
}

STX_DEF stx_tensor *stx_adaptive_softmax(stx_ctx *x, const stx_adaptive *a, stx_tensor *h,
                                         const stx_ids *targets) {
    return stx__adaptive_softmax(x, "stx_adaptive_softmax", a, h, targets, NULL);
}

STX_DEF stx_tensor *stx_adaptive_softmax_tokens(stx_ctx *x, const stx_adaptive *a, stx_tensor *h,
                                                const stx_ids *targets, stx_token_loss *how) {
    stx_token_loss none;
    memset(&none, 0, sizeof none);
    return stx__adaptive_softmax(x, "stx_adaptive_softmax_tokens", a, h, targets,
                                 how ? how : &none);
}

/* Returns log sum_i e^a_i, summed in double. */
static double stx__row_lse(const stx_real *a, size_t n) {
    stx_real max = stx__max(a, n);
    double s = 0;
    size_t i;
    for (i = 0; i < n; i++) s += stx_math_exp((double)(a[i] - max));
    return (double)max + stx_math_log(s);
}

/* Computes log p(word) = logit - log sum e^logits, plus log p of the word's cluster. */
static void stx__cluster_log_probs_part(const stx_share *s, const void *job) {
    const stx__cluster_log_probs_args *k = (const stx__cluster_log_probs_args *)job;
    size_t n, j;
    for (n = s->begin; n < s->end; n++) {
        const stx_real *row = k->logits + n * k->w;
        stx_real *to = k->out + n * k->V + k->start, *gate = k->gate + n * k->K;
        const double lse = stx__row_lse(row, k->w), add = k->c ? (double)gate[k->c] : 0;
        for (j = 1; !k->c && j < k->K; j++) {
            const size_t column = stx__cluster_column(k->size, k->K, j, k->forward);
            gate[j] = (stx_real)((double)row[column] - lse);
        }
        for (j = 0; j < k->size; j++) to[j] = (stx_real)((double)row[j] - lse + add);
    }
}

static void stx__cluster_log_probs(stx_ctx *x, const stx__cluster_log_probs_args *a) {
    stx_parallel(x, a->N, 16 * a->N * a->w, stx__cluster_log_probs_part, a);
}

STX_DEF stx_tensor *stx_adaptive_log_probs(stx_ctx *x, const stx_adaptive *a, stx_tensor *h) {
    stx__cluster_log_probs_args k;
    size_t c, dim[2];
    stx_tensor *out;
    int recording;
    if (!stx_ok(x) || !a || !h) return NULL;
    if (!stx__adaptive_check(x, "stx_adaptive_log_probs", a, stx__last(h), 1)) return NULL;
    memset(&k, 0, sizeof k);
    dim[0] = k.N = stx__rows(h);
    dim[1] = k.V = a->end[a->clusters - 1];
    k.K = a->clusters;
    k.forward = a->forward_columns;
    recording = x->tape.recording;
    x->tape.recording = 0;
    h = stx_reshape(x, h, k.N, stx__last(h), 0, 0);
    out = stx__tensor(x, STX__STEP_F32, 2, dim);
    k.gate = (stx_real *)stx_step_device_bytes(x, k.N * k.K * sizeof *k.gate);
    for (c = 0; c < a->clusters; c++) {
        size_t w;
        stx_tensor *logits = stx__adaptive_logits(x, a, h, c, 0, NULL, &w);
        logits = stx__join_columns(x, logits, w, NULL, 0); /* remove the padding */
        if (!logits || !out || !k.gate) {
            out = NULL;
            break;
        }
        k.c = c;
        k.w = w;
        k.start = stx__cluster_start(a->end, c);
        k.size = a->end[c] - k.start;
        k.logits = logits->data;
        k.out = out->data;
        STX_RUN(x, stx__cluster_log_probs, (x, &k));
    }
    x->tape.recording = recording;
    return out;
}
