#pragma once
#include "../api/config.h"
#include "../api/context.h"
#include "../api/train.h"
#include "../api/cuda.h"
#include "../core/platform.h"
#include "../core/context.h"
#include "group.h"
#include "group_mpi.h"


// >>group: NCCL

#ifdef SEQTX_NCCL

static void stx__nccl_wait(stx_ctx *x, stx_real *means, size_t n) {
    (void)means;    /* NCCL has already computed the means */
    (void)n;
    stx_cuda_group_wait(x);
}

static void stx__nccl_abort(stx_ctx *x, int code) {
    (void)code;
    stx_cuda_group_abort(x);
}

static const stx__group_ops stx__nccl_ops = {
    stx_cuda_group_reduce, stx_cuda_group_broadcast, stx_cuda_group_send,
    stx_cuda_group_mean, stx_cuda_group_spread, stx__nccl_wait, stx_cuda_group_sum, NULL,
    stx__backward_begin, stx__backward_step,
    stx_cuda_group_leave, stx__nccl_abort, NULL
};

  #ifdef SEQTX_MPI

/* Leaves a group of MPI-started ranks with GPUs: NCCL exchanges device memory, and MPI
   exchanges host memory. */
static void stx__nccl_mpi_leave(stx_ctx *x) {
    stx_cuda_group_leave(x);
    stx__mpi_leave(x);
}

static void stx__nccl_mpi_abort(stx_ctx *x, int code) {
    stx_cuda_group_abort(x);
    stx__mpi_abort(x, code);
}

static const stx__group_ops stx__nccl_mpi_ops = {
    stx__mpi_reduce, stx__mpi_broadcast, stx__mpi_send,
    stx_cuda_group_mean, stx_cuda_group_spread, stx__nccl_wait, stx_cuda_group_sum, NULL,
    stx__backward_begin, stx__backward_step,
    stx__nccl_mpi_leave, stx__nccl_mpi_abort, stx__mpi_forget
};

  #endif

/* Joins the NCCL group of all ranks. The ranks are already connected through MPI, or
   another launcher has started them. */
static int stx__nccl_join(stx_ctx *x, const stx_launch_info *s) {
    unsigned char id[STX_NCCL_ID];
    const int with_mpi = x->group.engine != NULL;
    memset(id, 0, sizeof id);
    if (x->group.ranks < 2) {
        x->group.rank = s->rank;
        x->group.ranks = s->ranks;
    }

    /* With MPI, rank 0 creates the group's id and broadcasts it. Without MPI, all ranks
       derive the same id from rank 0's address. */
    if ((!with_mpi || !x->group.rank) && !stx_cuda_group_id(x, id, !with_mpi)) return 0;
    if (with_mpi && !x->group.ops->broadcast(x, id, sizeof id, 0)) return 0;
    x->group.ops = &stx__nccl_ops;
  #ifdef SEQTX_MPI
    if (with_mpi) x->group.ops = &stx__nccl_mpi_ops;
  #endif
    return stx_cuda_group_join(x, id, x->group.rank, x->group.ranks);
}

#endif
