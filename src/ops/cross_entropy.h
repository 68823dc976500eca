#pragma once
#include "../api/config.h"
#include "../api/context.h"
#include "../api/ops.h"
#include "../api/private.h"
#include "../core/loops.h"
#include "../core/maths.h"
#include "../core/functions.h"
#include "../core/platform.h"
#include "../core/context.h"
#include "../core/arena.h"
#include "../core/tensors.h"
#include "../core/tape.h"
#include "../core/sums.h"
#include "elementwise.h"
#include "softmax.h"
#include "shape.h"
#include "matmul.h"
#include "linear.h"
#include "mean.h"


// >>cross_entropy

/* The saved arguments of a token loss. All token losses use stx_token_loss_fwd and
   _bwd. Without weights, every row has the weight 1, and the sum is divided by
   `divisor`. */
typedef struct stx__token_loss_save {
    stx_token_loss_args args;
    int inplace;    /* 1: backward may overwrite the logits with their gradient */
} stx__token_loss_save;

/* Returns nonzero if the gradient of `a` may overwrite the elements of `a`, because the
   op that created `a` does not need them in the backward pass. */
static int stx__may_overwrite(const stx_ctx *x, const stx_tensor *a) {
    const stx__node *n;
    for (n = x->tape.last; n && n->y != a; n = n->prev) {
    }
    if (!n) return 0;
    if (n->back == stx__linear_back) return !((const stx__linear_save *)n->save)->act;
    if (n->back == stx__reshape_back) return stx__may_overwrite(x, n->in[0]);
    return n->back == stx__matmul_back || n->back == stx__scale_back
           || n->back == stx__join_columns_back;
}

static void stx__token_loss_back(stx_ctx *x, stx__node *n) {
    const stx__token_loss_save *s = (const stx__token_loss_save *)n->save;
    stx_token_loss_args a = s->args;
    stx_tensor *t = n->in[0];
    const int overwrite = s->inplace && t->needs_grad && !t->grad && stx__may_overwrite(x, t);
    int fresh;
    a.dlogits = stx__grad_to(x, t, overwrite ? t->data : NULL, &fresh);
    a.accumulate = !fresh;
    a.dloss = n->y->grad;
    if (a.dlogits) STX_RUN(x, stx_token_loss_bwd, (x, &a));
}

/* Computes the loss of logits (N,ld). The caller sets V, targets, weights, nll and
   divisor in `a`. */
static stx_tensor *stx__run_token_loss(stx_ctx *x, stx_tensor *logits,
                                       const stx_token_loss_args *a, int inplace) {
    stx__token_loss_save s;
    stx__node *node;
    stx_tensor *y;
    if (!logits) return NULL;
    y = stx__scalar_new(x);
    if (!y) return NULL;
    s.args = *a;
    s.args.N = stx__rows(logits);
    s.args.ld = stx__last(logits);
    s.args.logits = logits->data;
    s.args.loss = y->data;
    s.args.row_max = (stx_real *)stx_step_device_bytes(x, 2 * s.args.N * sizeof(stx_real));
    if (!s.args.row_max) return NULL;
    s.args.inv_sum = s.args.row_max + s.args.N;
    s.inplace = inplace;
    STX_RUN(x, stx_token_loss_fwd, (x, &s.args));
    node = stx__record1(x, y, stx__token_loss_back, logits);
    return stx__save(x, node, &s, sizeof s) ? y : NULL;
}

/* Computes the sum of the cross-entropies of the N rows of logits, divided by
   `divisor`, where a divisor of 0 means N. V is the number of classes; logits (N,..)
   may have more columns. targets (N) must be in device memory. */
static stx_tensor *stx__cross_entropy_of(stx_ctx *x, stx_tensor *logits, size_t V,
                                         const int32_t *targets, double divisor, int inplace) {
    STX__FP_SCOPE;
    stx_token_loss_args a;
    if (!logits) return NULL;
    memset(&a, 0, sizeof a);
    a.V = V;
    a.targets = targets;
    a.divisor = divisor > 0 ? divisor : (double)stx__rows(logits);
    return stx__run_token_loss(x, logits, &a, inplace);
}

/* Computes the sum of weights[n] nll[n] over the N rows of logits, and stores the
   cross-entropy of row n in nll[n]. weights (N) and nll (N) are in device memory. */
static stx_tensor *stx__token_loss(stx_ctx *x, stx_tensor *logits, size_t V, const int32_t *targets,
                                   const stx_real *weights, stx_real *nll) {
    stx_token_loss_args a;
    if (!nll) return NULL;
    memset(&a, 0, sizeof a);
    a.V = V;
    a.targets = targets;
    a.weights = weights;
    a.nll = nll;
    a.divisor = 1;
    return stx__run_token_loss(x, logits, &a, 0);
}

/* Checks that there is one target per row of the logits and that each target is below V
   or equals the ignored id in `how`. */
static int stx__targets_fit(stx_ctx *x, const char *op, const stx_tensor *logits, size_t V,
                            const stx_ids *targets, const stx_token_loss *how) {
    const size_t N = stx__rows(logits);
    size_t i;
    char t[96];
    if (N != targets->B * targets->T) {
        stx_fail(x, STX_ERR_SHAPE,
                 "%s: expected one target per row of the logits %s, got %zu x %zu targets", op,
                 stx__shape(logits, t), targets->B, targets->T);
        return 0;
    }
    for (i = 0; i < N; i++) {
        const int32_t id = targets->data[i];
        if ((id >= 0 && (size_t)id < V) || stx__is_ignored(how, id)) continue;
        stx_fail(x, STX_ERR_ARG,
                 "%s: target at position %zu: expected a class from 0 to %zu%s, got %ld", op, i,
                 V - 1, how && how->ignore ? " or the ignored id" : "", (long)id);
        return 0;
    }
    stx__ids_used(targets, V, how);
    return 1;
}

static stx_tensor *stx__cross_entropy(stx_ctx *x, stx_tensor *logits, size_t V,
                                      const stx_ids *targets, double divisor, int inplace) {
    if (!stx_ok(x) || !logits || !targets) return NULL;
    if (!stx__targets_fit(x, "stx_cross_entropy", logits, V, targets, NULL)) return NULL;
    return stx__cross_entropy_of(x, logits, V, targets->device, divisor, inplace);
}

STX_DEF stx_tensor *stx_cross_entropy(stx_ctx *x, stx_tensor *logits, const stx_ids *targets,
                                      double divisor) {
    return stx__cross_entropy(x, logits, logits ? stx__last(logits) : 0, targets, divisor, 0);
}

STX_DEF stx_tensor *stx_cross_entropy_inplace(stx_ctx *x, stx_tensor *logits,
                                              const stx_ids *targets, double divisor) {
    return stx__cross_entropy(x, logits, logits ? stx__last(logits) : 0, targets, divisor, 1);
}

/* Returns the divisor of a loss over N rows. A result of 0 means that the divisor is
   the sum of the weights. */
static double stx__loss_divisor(const stx_token_loss *how, size_t N) {
    if (how && how->mean) return 0;
    return how && how->divisor > 0 ? how->divisor : (double)N;
}

static int stx__token_loss_ok(stx_ctx *x, const char *op, size_t N, const stx_token_loss *how) {
    if (!how) return 1;
    if (!(how->divisor >= 0 && stx__finite(how->divisor)))
        return stx_bad_value(x, op, "divisor", how->divisor, "0 or a finite positive number");
    if (how->mean && how->divisor > 0)
        return stx_bad_value(x, op, "divisor", how->divisor, "0 if mean is set");
    if (how->weights && how->weights->size != N) {
        stx_fail(x, STX_ERR_SHAPE, "%s: weights: expected one element per target, got %zu for %zu "
                 "targets", op, how->weights->size, N);
        return 0;
    }
    if (how->weights && how->weights->needs_grad) {
        stx_fail(x, STX_ERR_SHAPE,
                 "%s: weights: expected a tensor that requires no gradient: use stx_input or "
                 "stx_detach", op);
        return 0;
    }
    return 1;
}

static void stx__loss_weights(stx_ctx *x, const stx__loss_weights_args *a) {
    STX__FP_SCOPE;
    double divisor = a->divisor, weight;
    size_t n;
    (void)x;
    for (n = 0; n < a->N; n++)
        a->known[n] = a->ignore && a->targets[n] == a->ignored_id ? -1 : a->targets[n];

    if (divisor == 0 && a->mean)
        divisor = (double)a->mean[0] * (double)a->N;
    else if (divisor == 0)
        for (n = 0; n < a->N; n++)
            if (a->known[n] >= 0) divisor += a->weights ? (double)a->weights[n] : 1;

    for (n = 0; n < a->N; n++) {
        weight = a->weights ? (double)a->weights[n] : 1;
        a->w[n] = a->known[n] >= 0 && divisor != 0 ? (stx_real)(weight / divisor) : 0;
    }
}

/* Creates two arrays in device memory. *w receives the weight of each row, and *known
   receives the target of each row, or -1 if the target is ignored. Returns 0 after an
   error. In a group, the divisor of a mean is N times the mean of the weights over the
   rows of all ranks. */
static int stx__token_weights(stx_ctx *x, const char *op, const stx_ids *targets,
                              const stx_token_loss *how, stx_real **w, int32_t **known) {
    STX__FP_SCOPE;
    const size_t N = targets->B * targets->T;
    const double divisor = stx__loss_divisor(how, N);
    stx__loss_weights_args a;
    stx_real *mean = NULL;
    if (!stx__token_loss_ok(x, op, N, how)) return 0;
    *w = (stx_real *)stx_step_device_bytes(x, N * sizeof **w);
    *known = (int32_t *)stx_step_device_bytes(x, N * sizeof **known);
    if (!*w || !*known) return 0;

    memset(&a, 0, sizeof a);
    a.N = N;
    a.w = *w;
    a.known = *known;
    a.targets = targets->device;
    if (how) {
        a.weights = how->weights ? how->weights->data : NULL;
        a.ignore = how->ignore;
        a.ignored_id = how->ignored_id;
    }
    if (divisor == 0 && x->group.ranks > 1 && stx_training(x)) {
        mean = (stx_real *)stx_step_device_bytes(x, sizeof *mean);
        if (!mean) return 0;
        a.divisor = 1;
        STX_RUN(x, stx__loss_weights, (x, &a));
        STX_RUN(x, stx_mean_fwd, (x, mean, *w, N));
        stx__group_mean(x, mean, 1);
    }
    a.divisor = divisor;
    a.mean = mean;
    STX_RUN(x, stx__loss_weights, (x, &a));
    return stx_ok(x);
}

static stx_tensor *stx__cross_entropy_tokens(stx_ctx *x, stx_tensor *logits, size_t V,
                                             const stx_ids *targets, stx_token_loss *how) {
    const char *op = "stx_cross_entropy_tokens";
    stx_tensor *nll, *y;
    stx_real *w;
    int32_t *known;
    if (how) how->nll = NULL;
    if (!stx_ok(x) || !logits || !targets) return NULL;
    if (!stx__targets_fit(x, op, logits, V, targets, how)) return NULL;
    if (!stx__token_weights(x, op, targets, how, &w, &known)) return NULL;
    nll = stx_new_f32(x, stx__rows(logits), 0, 0, 0);
    y = stx__token_loss(x, logits, V, known, w, nll ? nll->data : NULL);
    if (how && y) how->nll = nll;
    return y;
}

STX_DEF stx_tensor *stx_cross_entropy_tokens(stx_ctx *x, stx_tensor *logits, const stx_ids *targets,
                                             stx_token_loss *how) {
    return stx__cross_entropy_tokens(x, logits, logits ? stx__last(logits) : 0, targets, how);
}

typedef struct stx__token_loss_job {
    const stx_token_loss_args *a;
    double *sums;       /* (STX__SUM_BLOCKS), see stx__sum_blocks; backward: NULL */
    stx_real scale;     /* backward: dloss / divisor */
} stx__token_loss_job;

/* Computes the nll of row n, row_max - log inv_sum - logits[n,target], where
   row_max = max_v logits and inv_sum = 1 / sum_v e^(logits - row_max). row_max and
   inv_sum are stored separately, because storing only row_max - log inv_sum would lose
   digits in the backward pass. */
STX_INNER double stx__token_loss_row(int fma, const stx_token_loss_args *a, size_t n) {
    const stx_real *row = a->logits + n * a->ld;
    const stx_real max = stx__max(row, a->V);
    const stx_real sum = stx__exp_sum(fma, NULL, 0, row, a->V, max);
    a->row_max[n] = max;
    a->inv_sum[n] = 1 / sum;
    return (double)max + stx_math_log((double)sum) - (double)row[a->targets[n]];
}

STX_INNER void stx__token_loss_loop(int fma, const stx_share *s, const void *job) {
    const stx__token_loss_job *j = (const stx__token_loss_job *)job;
    const stx_token_loss_args *a = j->a;
    size_t k, n, first, end;
    for (k = s->begin; k < s->end; k++) {
        double sum = 0;
        end = stx__sum_block(a->N, k, &first);
        end += first;
        for (n = first; n < end; n++) {
            double nll = 0;
            if (a->targets[n] >= 0)
                nll = stx__token_loss_row(fma, a, n);
            else
                a->row_max[n] = a->inv_sum[n] = 0;
            if (a->nll) a->nll[n] = (stx_real)nll;
            sum += a->weights ? (double)a->weights[n] * nll : nll;
        }
        j->sums[k] = sum;
    }
}

STX_LOOP(stx__token_loss_loop)

/* loss = sum_n weights[n] nll[n] / divisor */
STX_DEF void stx_token_loss_fwd(stx_ctx *x, const stx_token_loss_args *a) {
    STX__FP_SCOPE;
    double sums[STX__SUM_BLOCKS], sum;
    stx__token_loss_job j;
    j.a = a;
    j.sums = sums;
    j.scale = 0;
    sum = stx__sum_blocks(x, 8 * a->N * a->V, stx__token_loss_loop_run, &j, sums);
    *a->loss = (stx_real)(sum / a->divisor);
}

/* Sets d to f e^(row - max) or, if accumulate is set, adds this value to d. Without
   accumulate, d and row may be the same array. */
STX_INNER void stx__token_loss_bwd_n(int fma, stx_real *d, const stx_real *row, size_t V,
                                     stx_real max, stx_real f, int accumulate) {
    size_t v;
    if (accumulate)
        for (v = 0; v < V; v++) d[v] = STX_FMA(fma, f, stx_fast_exp(fma, row[v] - max), d[v]);
    else
        for (v = 0; v < V; v++) d[v] = f * stx_fast_exp(fma, row[v] - max);
}

STX_INNER void stx__token_loss_bwd_apart(int fma, stx_real *STX_RESTRICT d,
                                         const stx_real *STX_RESTRICT row, size_t V, stx_real max,
                                         stx_real f, int accumulate) {
    stx__token_loss_bwd_n(fma, d, row, V, max, f, accumulate);
}

/* dlogits[n,v] (+)= g (e^(logits[n,v] - row_max) inv_sum - [v = target]), where
   g = weights[n] dloss / divisor and (+)= adds if accumulate is set */
STX_INNER void stx__token_loss_bwd_loop(int fma, const stx_share *s, const void *job) {
    const stx__token_loss_job *j = (const stx__token_loss_job *)job;
    const stx_token_loss_args *a = j->a;
    const size_t V = a->V;
    size_t n;
    for (n = s->begin; n < s->end; n++) {
        stx_real *d = a->dlogits + n * a->ld;
        const stx_real g = a->weights ? j->scale * a->weights[n] : j->scale;
        const stx_real f = g * a->inv_sum[n];
        if (a->targets[n] < 0) {
            if (!a->accumulate) stx__fill_n(d, a->ld, 0);
            continue;
        }
        if (a->dlogits == a->logits)
            stx__token_loss_bwd_n(fma, d, d, V, a->row_max[n], f, 0);
        else
            stx__token_loss_bwd_apart(fma, d, a->logits + n * a->ld, V, a->row_max[n], f,
                                      a->accumulate);
        d[a->targets[n]] -= g;
        if (!a->accumulate && a->ld > V) stx__fill_n(d + V, a->ld - V, 0);
    }
}

STX_LOOP(stx__token_loss_bwd_loop)

STX_DEF void stx_token_loss_bwd(stx_ctx *x, const stx_token_loss_args *a) {
    STX__FP_SCOPE;
    stx__token_loss_job j;
    j.a = a;
    j.sums = NULL;
    j.scale = (stx_real)((double)a->dloss[0] / a->divisor);
    stx_parallel(x, a->N, 8 * a->N * a->V, stx__token_loss_bwd_loop_run, &j);
}
