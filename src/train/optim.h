#pragma once
#include "../api/config.h"
#include "../api/context.h"
#include "../api/train.h"
#include "../api/cuda.h"
#include "../core/loops.h"
#include "../core/platform.h"
#include "../core/context.h"
#include "../core/arena.h"
#include "../core/tensors.h"
#include "report.h"
#include "group.h"
#include "optim_kernels.h"
#include "muon.h"


// >>optimisers

struct stx_param_subset {
    size_t count;
    stx_tensor **tensor;    /* (count) */
    stx_optim_chunk *chunk; /* (count), on the device: one chunk per parameter, in which
                               only p and n are set */
};

STX_DEF stx_param_subset *stx_params_subset(stx_ctx *x, stx_tensor *const *t, size_t count) {
    stx_param_subset *s;
    size_t i;
    if (!stx_ok(x) || !t) return NULL;
    s = (stx_param_subset *)stx_persist(x, sizeof *s);
    if (!s) return NULL;
    s->chunk = (stx_optim_chunk *)stx__zeroed_bytes(x, STX__STATE,
                                             stx_bytes_of(count, 1, sizeof *s->chunk));
    s->tensor = (stx_tensor **)stx_persist(x, stx_bytes_of(count, 1, sizeof *s->tensor));
    if (!s->chunk || !s->tensor) return NULL;
    for (i = 0; i < count; i++) {
        stx_optim_chunk chunk;
        STX__NEED(x, t[i] && t[i]->is_param, STX_ERR_ARG,
                  "stx_params_subset: tensor %zu: expected a parameter, got %s", i,
                  t[i] ? "another tensor" : "NULL");
        memset(&chunk, 0, sizeof chunk);
        chunk.p = t[i]->data;
        chunk.n = t[i]->size;
        stx__put_bytes(x, s->chunk + i, &chunk, sizeof chunk);
        s->tensor[i] = t[i];
    }
    s->count = count;
    return s;
}

STX_DEF void stx_clamp_params(stx_ctx *x, const stx_param_subset *s, double lo, double hi) {
    STX__FP_SCOPE;
    size_t i;
    if (!stx_ok(x) || !s || !s->count) return;
    for (i = 0; i < s->count; i++) stx__param_written(x, s->tensor[i]->data);
    STX_RUN(x, stx_clamp, (x, s->chunk, s->count, (stx_real)lo, (stx_real)hi));
}

/* Returns the value of a beta of the desc, where -1 means 0. The desc keeps the -1,
   because 0 selects the default if the desc is resolved again. */
static double stx__beta(double b) {
    return b == -1 ? 0 : b;
}

static double stx__default_eps(int kind) {
    if (kind == STX_ADAGRAD) return 1e-10;
    return kind == STX_LAMB ? 1e-6 : 1e-8;
}

/* Fills in the defaults and checks the desc. Returns 0 and sets an error if it is
   invalid. */
static int stx__optim_resolve(stx_ctx *x, stx_optim_desc *d) {
    static const char op[] = "stx_optim_create";
    double beta1, beta2;
    if (!d->kind) d->kind = STX_ADAM;
    if (d->kind < STX_SGD || d->kind > STX_MUON)
        return stx_bad_value(x, op, "kind", d->kind,
                             "STX_SGD, STX_ADAGRAD, STX_ADAM, STX_ADAMW, STX_RADAM, STX_LAMB or "
                             "STX_MUON");
    if (d->kind == STX_MUON && d->momentum == 0) d->momentum = 0.95;
    if (d->beta1 == 0) d->beta1 = 0.9;
    if (d->beta2 == 0) d->beta2 = 0.999;
    if (d->eps == 0) d->eps = stx__default_eps(d->kind);

    beta1 = stx__beta(d->beta1);
    beta2 = stx__beta(d->beta2);
    if (!(d->momentum >= 0)) return stx_bad_value(x, op, "momentum", d->momentum, "0 or more");
    if (!(beta1 >= 0 && beta1 < 1))
        return stx_bad_value(x, op, "beta1", d->beta1, "a value in [0,1), or -1 for 0");
    if (!(beta2 >= 0 && beta2 < 1))
        return stx_bad_value(x, op, "beta2", d->beta2, "a value in [0,1), or -1 for 0");
    if (!(d->eps >= 0)) return stx_bad_value(x, op, "eps", d->eps, "0 or more");
    if (!(d->clip >= 0)) return stx_bad_value(x, op, "clip", d->clip, "0 or more");
    if (!(d->clip_value >= 0))
        return stx_bad_value(x, op, "clip_value", d->clip_value, "0 or more");
    if (!(d->trust_max >= 0)) return stx_bad_value(x, op, "trust_max", d->trust_max, "0 or more");
    if (!(d->weight_decay >= 0))
        return stx_bad_value(x, op, "weight_decay", d->weight_decay, "0 or more");
    if (d->kind == STX_ADAGRAD && d->weight_decay > 0) {
        stx_fail(x, STX_ERR_ARG,
                 "%s: weight_decay: STX_ADAGRAD has no weight decay: set it to 0 or use STX_ADAMW",
                 op);
        return 0;
    }
    if (d->eps_hat && d->kind != STX_ADAM && d->kind != STX_ADAMW)
        return stx_bad_value(x, op, "eps_hat", d->eps_hat,
                             "0 unless kind is STX_ADAM or STX_ADAMW");
    if (d->no_correction && d->kind != STX_LAMB)
        return stx_bad_value(x, op, "no_correction", d->no_correction, "0 unless kind is STX_LAMB");
    if (d->trust_max > 0 && d->kind != STX_LAMB)
        return stx_bad_value(x, op, "trust_max", d->trust_max, "0 unless kind is STX_LAMB");
    return 1;
}

/* Returns 1 if t is the matrix of a hidden layer, as far as its shape and
   stx_param_elementwise say. */
static int stx__is_hidden_matrix(const stx_tensor *t) {
    return t->ndim == 2 && t->dim[0] > 1 && t->dim[1] > 1 && !t->elementwise;
}

/* Returns the weight decay of parameter i. */
static double stx__optim_decay(const stx_optim *o, size_t i) {
    const double own = o->params->rule[i].weight_decay;
    if (own != 0) return own == -1 ? 0 : own;
    if (o->desc.decay_matrices && !stx__is_hidden_matrix(o->params->tensor[i])) return 0;
    return o->desc.weight_decay;
}

/* Returns 0 and sets an error if a parameter has a rule that the optimiser does not
   support. */
static int stx__optim_check_rules(const stx_optim *o) {
    const stx_params *p = o->params;
    size_t i;
    for (i = 0; i < p->count; i++) {
        if (o->desc.kind != STX_ADAGRAD || stx__optim_decay(o, i) == 0) continue;
        stx_fail(p->ctx, STX_ERR_ARG,
                 "stx_optim_create: weight_decay of \"%.100s\": STX_ADAGRAD has no weight decay: "
                 "leave it out of stx_params_set_rule, or use STX_ADAMW", p->name[i]);
        return 0;
    }
    return 1;
}

/* Numbers the chunks of the parameters, and finds the parameters that STX_MUON updates as
   matrices. */
static int stx__optim_number_chunks(stx_optim *o) {
    stx_params *p = o->params;
    size_t i;
    o->first = (size_t *)stx_persist(p->ctx, (p->count + 1) * sizeof *o->first);
    if (!o->first) return 0;
    for (i = 0; i < p->count; i++) {
        o->first[i] = o->chunks;
        o->chunks += stx__chunks_of(p->tensor[i]);
    }
    o->first[i] = o->chunks;
    if (o->desc.kind != STX_MUON) return 1;
    o->is_matrix = (uint8_t *)stx_persist(p->ctx, p->count + 1);
    for (i = 0; o->is_matrix && i < p->count; i++)
        o->is_matrix[i] = (uint8_t)stx__is_hidden_matrix(p->tensor[i]);
    return o->is_matrix != NULL;
}

/* Allocates state k of every parameter and fills it with zeros. Sharded state is
   one-dimensional and has only the elements of this rank's shard; it is NULL for a
   parameter outside the shard. Frozen parameters have no state, and matrices of STX_MUON
   have no state 1. */
static int stx__optim_make_state(stx_optim *o, int k) {
    const stx_params *p = o->params;
    stx_ctx *x = p->ctx;
    size_t i, size;
    o->state[k] = (stx_tensor **)stx_persist(x, (p->count + 1) * sizeof **o->state);
    if (!o->state[k]) return 0;
    for (i = 0; i < p->count; i++) {
        const stx_tensor *t = p->tensor[i];
        stx__shard s = stx__own_shard(o, i);
        if (s.begin == s.end || (k == 1 && o->is_matrix && o->is_matrix[i])) continue;
        size = s.end - s.begin;
        o->state[k][i] = x->group.shard ? stx__tensor(x, STX__STATE, 1, &size)
                                        : stx__tensor(x, STX__STATE, t->ndim, t->dim);
        if (!o->state[k][i]) return 0;
        STX_RUN(x, stx_fill, (x, o->state[k][i]->data, o->state[k][i]->size, 0));
    }
    return 1;
}

/* Fills in the chunks of all parameters, in host memory. If the state of a chunk is on
   another rank, the chunk's n stays 0. */
static void stx__optim_fill_chunks(const stx_optim *o, stx_optim_chunk *chunk) {
    const stx_params *p = o->params;
    size_t i, at;
    int k;
    for (i = 0; i < p->count; i++) {
        const stx_tensor *t = p->tensor[i];
        const double lr = p->rule[i].lr;
        stx__shard s = stx__own_shard(o, i);
        for (at = 0; t->needs_grad && at < t->size; at += STX__OPTIM_CHUNK, chunk++) {
            chunk->tensor = i;
            chunk->lr_factor = lr > 0 ? (stx_real)lr : 1;
            chunk->decay = (stx_real)stx__optim_decay(o, i);
            if (at < s.begin || at >= s.end) continue;
            chunk->p = t->data + at;
            chunk->g = t->grad + at;
            for (k = 0; k < 2; k++)
                if (o->state[k] && o->state[k][i])
                    chunk->s[k] = o->state[k][i]->data + (at - s.begin);
            chunk->n = STX_MIN((size_t)STX__OPTIM_CHUNK, t->size - at);
        }
    }
}

/* Allocates the scratch memory of STX_MUON, for the largest matrix of this rank. */
static int stx__optim_make_scratch(stx_optim *o) {
    const stx_params *p = o->params;
    size_t i, most[2] = {0, 0};
    if (!o->is_matrix) return 1;
    for (i = 0; i < p->count; i++) {
        const stx_tensor *t = p->tensor[i];
        const size_t n = STX_MIN(t->dim[0], t->dim[1]);
        if (!o->is_matrix[i] || !o->state[0][i]) continue;
        most[0] = STX_MAX(most[0], t->size);
        most[1] = STX_MAX(most[1], n * n);
    }
    for (i = 0; i < 4 && most[0]; i++) {
        o->scratch[i] = stx_block_activations(p->ctx, most[i / 2]);
        if (!o->scratch[i]) return 0;
    }
    return 1;
}

/* Returns the number of state tensors per parameter. */
static int stx__optim_states(const stx_optim_desc *d) {
    if (d->kind == STX_SGD) return d->momentum > 0;
    return d->kind == STX_ADAGRAD ? 1 : 2;
}

STX_DEF stx_optim *stx_optim_create(stx_params *p, const stx_optim_desc *d) {
    STX__FP_SCOPE;
    stx_ctx *x = p ? p->ctx : NULL;
    stx_optim *o;
    stx_optim_chunk *chunk;
    size_t sums = 1;
    int k, states;
    if (!stx_ok(x)) return NULL;
    o = (stx_optim *)stx_persist(x, sizeof *o);
    if (!o) return NULL;
    if (d) o->desc = *d;
    if (!stx__optim_resolve(x, &o->desc)) return NULL;
    states = stx__optim_states(&o->desc);
    o->params = p;
    o->count = p->count;
    if (!stx__optim_check_rules(o) || !stx__optim_number_chunks(o)) return NULL;
    if (stx_params_trained_size(p) < stx_params_size(p) && !stx_params_grads(p, NULL))
        return NULL;
    if (x->group.ranks > 1 && !stx__make_buckets(o)) return NULL;
    p->in_use = 1;

    o->chunk = (stx_optim_chunk *)stx__zeroed_bytes(x, STX__STATE,
                                             stx_bytes_of(o->chunks, 1, sizeof *o->chunk));
    if (o->desc.kind == STX_LAMB) sums = 3;
    if (o->desc.kind == STX_MUON) sums = 2;
    o->squares = (double *)stx__zeroed_bytes(x, STX__STATE,
                                      stx_bytes_of(o->chunks, sums, sizeof *o->squares));
    chunk = o->chunk;
    if (stx__on_gpu(x))
        chunk = (stx_optim_chunk *)stx_block(x, stx_bytes_of(o->chunks, 1, sizeof *chunk));
    if (!o->chunk || !o->squares || !chunk || !stx__report_create(x)) return NULL;
    STX__NEED(x, x->report.optims < STX_MAX_OPTIMS, STX_ERR_ARG,
              "stx_optim_create: a context can have at most %d optimisers: use another context",
              (int)STX_MAX_OPTIMS);
    o->slot = x->report.optims++;
    o->lr = -1;
    stx__forget_steps(x);
    o->update = &x->report.device->update[o->slot];

    for (k = 0; k < states; k++)
        if (!stx__optim_make_state(o, k)) return NULL;
    if (!stx__optim_make_scratch(o)) return NULL;
    stx__optim_fill_chunks(o, chunk);
    if (chunk != o->chunk) {
        stx__put_bytes(x, o->chunk, chunk, o->chunks * sizeof *chunk);
        stx_block_free(x, chunk);
    }
    return o;
}

STX_DEF void stx_optim_set_lr(stx_optim *o, double lr) {
    STX__FP_SCOPE;
    stx_ctx *x = o ? o->params->ctx : NULL;
    if (!stx_ok(x)) return;
    if (!(lr >= 0 && stx__finite(lr))) {
        stx_bad_value(x, "stx_optim_set_lr or stx_optim_step", "learning rate", lr,
                      "a finite value of 0 or more");
        return;
    }
#ifdef SEQTX_CUDA
    if (stx__on_gpu(x)) {
        if (lr != o->lr) {
            stx__host_access(x, "the previous step set a new learning rate "
                                "(call stx_optim_set_lr before the step)");
            /* fails during a capture; the step is then not replayed */
            stx_cuda_set_f64(x, &o->update->lr, lr);
        }
        o->lr = lr;
        return;
    }
#endif
    o->lr = lr;
    o->update->lr = lr;
}

STX_DEF int stx_optim_sync(stx_optim *o) {
    stx_ctx *x = o ? o->params->ctx : NULL;
    const stx_update *u;
    if (!stx_ok(x)) return 0;
    stx__host_access(x, "the previous step waited for the GPU (stx_optim_sync)");
    if (!stx__report_sync(x)) return 0;
    u = &x->report.host->update[o->slot];
    o->step = u->step;
    o->skipped = u->skipped;
    o->grad_norm = u->norm;
    return u->ok || x->desc.dry;
}

/* Returns the scalars of an Adam, LAMB or Muon update. The betas of d must already be
   resolved (see stx__beta). */
static stx_adam_args stx__adam_args_of(const stx_optim_desc *d) {
    STX__FP_SCOPE;
    stx_adam_args a;
    a.beta1 = (stx_real)d->beta1;
    a.rest1 = (stx_real)(1 - d->beta1);
    a.beta2 = (stx_real)d->beta2;
    a.rest2 = (stx_real)(1 - d->beta2);
    a.eps = (stx_real)d->eps;
    a.decoupled = d->kind == STX_ADAMW || d->kind == STX_RADAM || d->kind == STX_MUON;
    return a;
}

/* Updates the parameters after stx_optim_prepare. The betas of d must already be
   resolved (see stx__beta). */
static void stx__optim_update(stx_optim *o, const stx_optim_desc *d) {
    stx_ctx *x = o->params->ctx;
    stx_adam_args a;
    double *squares;
    switch (d->kind) {
    case STX_SGD:
        STX_RUN(x, stx_sgd_update, (x, o->update, o->chunk, o->chunks, (stx_real)d->momentum));
        break;
    case STX_ADAGRAD:
        STX_RUN(x, stx_adagrad_update, (x, o->update, o->chunk, o->chunks, (stx_real)d->eps));
        break;
    case STX_LAMB:
        a = stx__adam_args_of(d);
        squares = o->squares + o->chunks;
        STX_RUN(x, stx_lamb_direction, (x, o->update, o->chunk, o->chunks, squares, &a));
        stx__sum_over_shards(x, squares, 2 * o->chunks);
        STX_RUN(x, stx_lamb_update, (x, o->update, o->chunk, o->chunks, squares, d->trust_max));
        break;
    case STX_MUON:
        a = stx__adam_args_of(d);
        stx__muon_step(o, d, &a);
        break;
    default:
        a = stx__adam_args_of(d);
        STX_RUN(x, stx_adam_update, (x, o->update, o->chunk, o->chunks, &a));
    }
}

STX_DEF int stx_optim_step(stx_optim *o, double lr) {
    STX__FP_SCOPE;
    stx_ctx *x = o ? o->params->ctx : NULL;
    stx_optim_desc d;
    size_t i;
    if (!stx_ok(x)) return 0;
    d = o->desc;
    d.beta1 = stx__beta(d.beta1);
    d.beta2 = stx__beta(d.beta2);
    if (o->params->count != o->count) {
        stx_fail(x, STX_ERR_ARG,
                 "stx_optim_step: the list has %zu parameters, but had %zu when the optimiser was "
                 "created: call stx_optim_create after the last stx_param",
                 o->params->count, o->count);
        return 0;
    }
    stx_optim_set_lr(o, lr);
    x->group.sending = NULL;
    if (!stx_ok(x) || !stx__state_complete(x, "stx_optim_step")) return 0;

    /* average the gradients over the ranks and clip their values */
    stx__mean_grads(o->params);
    if (!stx_ok(x)) return 0;
    for (i = 0; i < o->count; i++)
        if (o->params->tensor[i]->needs_grad) stx__param_written(x, o->params->tensor[i]->data);
    if (d.clip_value > 0)
        STX_RUN(x, stx_clip_values, (x, o->chunk, o->chunks, (stx_real)d.clip_value));

    /* compute the norms and decide whether to update */
    STX_RUN(x, stx_sum_squares, (x, o->squares, o->chunk, o->chunks));
    stx__sum_over_shards(x, o->squares, o->chunks);
    STX_RUN(x, stx_optim_prepare, (x, o->update, o->chunk, o->chunks, o->squares, &d));

    stx__optim_update(o, &d);
    stx__spread_params(o);
    o->params->grads_state = STX__GRADS_ZERO;
    return stx__on_gpu(x) ? stx_ok(x) : stx_optim_sync(o);
}
