#pragma once
#include "config.h"
#include "context.h"
#include "ops.h"
#include "attention.h"


// >>api: private kernels

/* Arguments of the stx_linear_heads kernels. The forward kernel gathers blocks of n
   elements: block i of y is block `of[i]` of `a` if of[i] < half, and otherwise block
   `of[i] - half` of `b`; `a` and `b` have `half` blocks each. It also copies rows:
   to[k] (B,len[k]) = the rows at from[k], `stride` elements apart. The backward kernel
   adds blocks of dy to da and db, either of which may be NULL. */
typedef struct stx__heads_args {
    size_t n, count, half;
    const stx_real *a, *b, *dy;
    stx_real *y, *da, *db;
    uint16_t of[512];
    size_t B, stride, len[STX_HEAD_GROUPS];     /* len 0: nothing to copy */
    const stx_real *from[STX_HEAD_GROUPS];
    stx_real *to[STX_HEAD_GROUPS];
} stx__heads_args;

STX__KERNEL(stx__heads_fwd, (stx_ctx *x, const stx__heads_args *h))
STX__KERNEL(stx__heads_bwd, (stx_ctx *x, const stx__heads_args *h))

/* Computes log p of the ids of cluster c from the logits (N,w) of the cluster. There
   are K clusters. For c = 0, columns size .. w-1 of the logits belong to the other
   clusters: cluster i has column size+K-1-i, or size+i-1 if `forward` is 1. The log p
   of these columns is written to gate (N,K). For c > 0, gate[n,c] is added to the log p
   of row n. */
typedef struct stx__cluster_log_probs_args {
    size_t N, V, w, K, c;
    size_t start, size;                     /* ids of the cluster: start .. start+size-1 */
    int forward;
    const stx_real *logits;                 /* (N,w) */
    stx_real *out;                          /* (N,V): columns start .. start+size-1 are written */
    stx_real *gate;                         /* (N,K) */
} stx__cluster_log_probs_args;

STX__KERNEL(stx__cluster_log_probs, (stx_ctx *x, const stx__cluster_log_probs_args *a))

/* Sorts ids by cluster and keeps their order within a cluster. The ids of cluster c
   occupy slots first[c] .. first[c+1]-1. With head = 1, `at` contains the class of each
   id in the head instead of its slot: the id itself in cluster 0, otherwise the column
   of its cluster; cluster 0 then needs no slots. Negative ids are skipped: their `at` is
   -1. */
typedef struct stx__cluster_sort_args {
    size_t count, end[STX_MAX_CLUSTERS];    /* count: number of clusters; end: end of each
                                               cluster's id range (exclusive) */
    size_t first[STX_MAX_CLUSTERS + 1];     /* first slot of each cluster, then the end of
                                               the last cluster's slots */
    int head, forward_columns;
    int32_t leftover;                       /* value of `local` in unused slots */
    size_t n;
    const int32_t *ids;                     /* (n) */
    int32_t *at;                            /* (n): slot of each id */
    int32_t *local, *place;                 /* for each slot, local is the id's index in
                                               its cluster, and place is its index in
                                               `ids` (0 in unused slots) */
    int32_t *over;                          /* (1): 1 if a cluster has more ids than slots */
} stx__cluster_sort_args;

STX__KERNEL(stx__cluster_sort, (stx_ctx *x, const stx__cluster_sort_args *k))

/* y (n) = NaN if flag[0] is not 0 */
STX__KERNEL(stx__nan_if, (stx_ctx *x, stx_real *y, size_t n, const int32_t *flag))

/* metric[0] = s a[0], or += with accumulate, in double */
STX__KERNEL(stx__metric_accumulate, (stx_ctx *x, double *metric, const stx_real *a, double s,
                                     int accumulate))

/* Shifts each row of y (rows,n) left by w <= n elements, which discards the first w,
   and fills the end with a row of `a` (rows,w). If `a` is NULL, the last w elements
   keep their values. The row strides are ldy and lda. */
STX__KERNEL(stx__shift2d, (stx_ctx *x, stx_real *y, size_t ldy, size_t n, const stx_real *a,
                           size_t lda, size_t w, size_t rows))

/* Prepares the inputs of stx_token_loss_fwd: w (N) = weights / divisor and known (N) =
   targets; in ignored rows, w = 0 and known = -1. If divisor is 0, N mean[0] is used
   instead or, if mean is NULL, the sum of the weights of the rows that are not ignored
   (if that is 0, w = 0). */
typedef struct stx__loss_weights_args {
    size_t N;
    int ignore;                             /* 1: rows with target ignored_id are ignored */
    int32_t ignored_id;
    double divisor;
    const stx_real *mean;                   /* (1), or NULL */
    const int32_t *targets;                 /* (N) */
    const stx_real *weights;                /* (N); NULL: 1 each */
    stx_real *w;                            /* (N) */
    int32_t *known;                         /* (N) */
} stx__loss_weights_args;

STX__KERNEL(stx__loss_weights, (stx_ctx *x, const stx__loss_weights_args *a))
