#pragma once
#include "../api/config.h"
#include "../api/context.h"
#include "../api/private.h"
#include "../api/train.h"
#include "../core/loops.h"
#include "../core/platform.h"
#include "../core/context.h"
#include "../core/arena.h"
#include "../core/tensors.h"
#include "../ops/cross_entropy.h"
#include "group.h"
#include "group_mpi.h"
#include "group_nccl.h"


// >>group: membership and exchange

/* Joins the group through the context's back end. If the process was started alone,
   x->group.ranks stays below 2. */
static int stx__join_group(stx_ctx *x, const stx_launch_info *s) {
#ifdef SEQTX_MPI
    if (!stx__mpi_join(x, s)) return 0;
#endif
#ifdef SEQTX_NCCL
    if (stx__on_gpu(x) && (x->group.ranks > 1 || s->by)) return stx__nccl_join(x, s);
#endif
    if (stx__on_gpu(x) && (x->group.ranks > 1 || s->by))
        stx_fail(x, STX_ERR_DEVICE,
                 "stx_group_join: ranks with GPUs require NCCL: define SEQTX_NCCL (make cuda "
                 "NCCL=1), or create the context with STX_CPU");
    else if (s->by && x->group.ranks < 2)
        stx_fail(x, STX_ERR_DEVICE,
                 "stx_group_join: %s is %d, but %s, or start the process alone", s->by, s->ranks,
#ifdef SEQTX_MPI
                 "MPI reports a single rank: start the program with the mpirun of its MPI "
                 "library, or with srun --mpi=pmix"
#else
                 "this build has no MPI: define SEQTX_MPI and link an MPI library (make MPI=1)"
#endif
        );
    return stx_ok(x);
}

STX_DEF int stx_group_join(stx_ctx *x, const stx_group_desc *d) {
    const size_t most = (size_t)1 << 28;
    stx_launch_info s = stx_get_launch_info();
    if (!stx_ok(x)) return 0;
    if (x->group.ranks || x->lists) {
        stx_fail(x, STX_ERR_ARG,
                 "stx_group_join: the context %s; it can join a group only once, and only before "
                 "its first parameter list is created",
                 x->group.ranks ? "is already in a group" : "already has parameters");
        return 0;
    }
    x->group.bucket = (size_t)1 << (stx__on_gpu(x) ? 22 : 20);
    if (d && d->bucket) x->group.bucket = d->bucket;
    x->group.shard = d && d->shard;
    if (x->group.bucket > most) {
        stx_fail(x, STX_ERR_ARG, "stx_group_join: bucket: expected at most %zu elements, got %zu",
                 most, x->group.bucket);
        return 0;
    }
    if (!stx__join_group(x, &s) || !stx_ok(x)) return 0;
    if (x->group.ranks < 2) {
        x->group.shard = 0;
        return 1;
    }
    x->zero_id = stx_tokens_create(x, 1, 1);
    return x->zero_id != NULL;
}

STX_DEF void stx_group_leave(stx_ctx *x) {
    if (!x || x->group.ranks < 1) return;
    stx__end_sending(x);
    if (x->group.ops) x->group.ops->leave(x);
    x->group.ops = NULL;
    x->group.engine = NULL;
    x->group.rank = x->group.ranks = 0;
    x->group.in_flight = 0;
    stx__forget_steps(x);   /* captured steps contain the group's exchanges */
}

STX_DEF void stx_group_abort(stx_ctx *x, int code) {
    if (x && x->group.ops) x->group.ops->abort(x, code);
}

/* Returns 1 if there are other ranks and the arguments are valid. */
static int stx__exchanges(stx_ctx *x, const char *op, const void *p, size_t n, int from, int to) {
    const int ranks = x ? x->group.ranks : 0;
    const int bad = from < 0 || from >= ranks ? from : to;
    if (!stx_ok(x) || ranks < 2) return 0;
    if (!p && n)
        stx_fail(x, STX_ERR_ARG, "%s: expected a buffer for n = %zu, got NULL", op, n);
    else if (bad < 0 || bad >= ranks)
        stx_fail(x, STX_ERR_ARG, "%s: expected a rank below %d, got %d", op, ranks, bad);
    return stx_ok(x);
}

STX_DEF int stx_group_sum(stx_ctx *x, double *v, size_t n) {
    if (!stx__exchanges(x, "stx_group_sum", v, n, 0, 0)) return stx_ok(x);
    return x->group.ops->reduce(x, v, n, 0);
}

STX_DEF int stx_group_max(stx_ctx *x, double *v, size_t n) {
    STX__FP_SCOPE;
    size_t i;
    double *nans;
    int ok;
    if (!stx__exchanges(x, "stx_group_max", v, n, 0, 0)) return stx_ok(x);

    /* The maximum of values that include a NaN is undefined in MPI and NCCL, so NaNs
       are counted separately. */
    nans = (double *)stx_block(x, stx_bytes_of(n, sizeof *nans, 1));
    if (!nans) return 0;
    for (i = 0; i < n; i++) {
        nans[i] = stx__finite(v[i]) || v[i] >= HUGE_VAL || v[i] <= -HUGE_VAL ? 0 : 1;
        if (nans[i] > 0) v[i] = -HUGE_VAL;
    }
    ok = x->group.ops->reduce(x, nans, n, 0) && x->group.ops->reduce(x, v, n, 1);
    for (i = 0; i < n; i++)
        if (nans[i] > 0) v[i] = (double)NAN;
    stx_block_free(x, nans);
    return ok;
}

STX_DEF int stx_group_broadcast(stx_ctx *x, void *bytes, size_t n, int from) {
    if (!stx__exchanges(x, "stx_group_broadcast", bytes, n, from, 0)) return stx_ok(x);
    return x->group.ops->broadcast(x, bytes, n, from);
}

STX_DEF int stx_group_send_bytes(stx_ctx *x, void *bytes, size_t n, int from, int to) {
    const int takes_part = x && (x->group.rank == from || x->group.rank == to);
    const void *memory = takes_part ? bytes : x;    /* other ranks need no buffer: any
                                                       non-NULL pointer will do */
    if (!stx__exchanges(x, "stx_group_send_bytes", memory, n, from, to)) return stx_ok(x);
    if (!takes_part || from == to) return 1;
    return x->group.ops->send(x, bytes, n, from, to);
}

STX_DEF int stx_group_broadcast_params(stx_params *p) {
    stx_ctx *x = p ? p->ctx : NULL;
    size_t i, n;
    if (!stx_ok(x)) return 0;
    for (i = 0; x->group.ranks > 1 && i < p->count; i++) {
        stx_tensor *t = p->tensor[i];
        stx_real *copy;
        n = t->size;
        if (!stx__on_gpu(x)) {
            stx__param_written(x, t->data);
            if (!x->group.ops->broadcast(x, t->data, n * sizeof *t->data, 0)) return 0;
            continue;
        }
        copy = (stx_real *)stx_block(x, n * sizeof *copy);
        if (copy && !x->group.rank) stx_download(x, copy, t->data, n);
        if (!copy || !x->group.ops->broadcast(x, copy, n * sizeof *copy, 0)) return 0;
        if (x->group.rank) stx_upload(x, t->data, copy, n);
        stx_block_free(x, copy);
    }
    return stx_ok(x);
}

STX_DEF stx_tensor *stx_group_loss_scale(stx_ctx *x, double n) {
    STX__FP_SCOPE;
    stx_tensor *y = stx_new_f32(x, 1, 0, 0, 0), *own, *mean;
    stx__loss_weights_args a;
    int32_t *known;
    if (!y) return NULL;
    STX_RUN(x, stx_fill, (x, y->data, 1, 1));
    if (x->group.ranks < 2) return y;
    own = stx_new_f32(x, 1, 0, 0, 0);
    mean = stx_new_f32(x, 1, 0, 0, 0);
    known = (int32_t *)stx_step_device_bytes(x, sizeof *known);
    if (!own || !mean || !known) return NULL;
    STX_RUN(x, stx_fill, (x, own->data, 1, (stx_real)n));
    STX_RUN(x, stx_fill, (x, mean->data, 1, (stx_real)n));
    stx__group_mean(x, mean->data, 1);

    /* y = own / mean, or 0 if the mean is 0. stx__loss_weights computes this as the
       loss weight of a single row */
    memset(&a, 0, sizeof a);
    a.N = 1;
    a.mean = mean->data;
    a.targets = x->zero_id->device;
    a.weights = own->data;
    a.w = y->data;
    a.known = known;
    STX_RUN(x, stx__loss_weights, (x, &a));
    return stx_ok(x) ? y : NULL;
}
