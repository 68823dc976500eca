#pragma once
#include "config.h"
#include "context.h"
#include "ops.h"


// >>api: attention

/* Causal multi-head attention with relative positions, windows, learned spans, persistent
   vectors and biases, in one fused op. The T queries belong to the last T of the S keys,
   so the distance from query i to key j is delta = S - T + i - j.

       s_ij = scale ((q_i + content_bias) . k_j + (q_i + position_bias) . pe_p)
              p = P - 1 + delta_min - delta
       m_ij = clamp((z max_span + ramp + 1 - delta) / ramp, 0, 1)
              z = span_fraction, learned per head (Sukhbaatar et al. 2019, 1905.07799)
       a_ij = m_ij e^s_ij / (sum_j m_ij e^s_ij + eps sum_j e^s_ij)
       y_i  = sum_j a_ij v_j

   j runs over the keys with delta_min <= delta <= span and over N persistent vectors
   (Sukhbaatar et al. 2019, 1907.01470) with keys sqrt(D) persistent_k, values sqrt(N)
   persistent_v, m = 1, no biases and no position term. The biases and pe follow
   Transformer-XL (Dai et al. 2019, 1901.02860). With no_renorm, the mask is not part of
   the normaliser, as in fairseq's version of the adaptive span:

       a_ij = m_ij e^s_ij / sum_j e^s_ij       sum over all keys within span

   A key that is marked in pad does not exist for its stream: its contents are ignored,
   and its gradients are exactly zero. A query without any key has y = 0 and no gradient.

   Scores are computed tile by tile with a running softmax (Milakov and Gimelshein 2018,
   1805.02867) and are never stored; the backward pass recomputes the tiles. Keys that the
   span of a head does not reach are skipped. */
typedef struct stx_attention_desc {
    size_t heads;           /* H, 1 to 256; C = H D */
    size_t span;            /* largest distance of a key, for all heads; 0: no limit. pe
                               limits it to P - 1 + delta_min, the distance of row 0 */
    int    delta_min;       /* 0: a query attends to its own key; 1: only to earlier ones,
                               as in 1905.07799. Ignored with not_causal */
    int    not_causal;      /* 1: every query attends to every key. Cannot be combined with
                               span, learned spans or positions */
    double scale;           /* 0: 1 / sqrt(D) */
    double max_span, ramp;  /* max_span: upper limit of learned spans; ramp: width of the
                               ramp of m. Both are in tokens and required with
                               span_fraction */
    double eps;             /* 0: keys beyond the learned span of a head are skipped. > 0:
                               every key within span is part of the normaliser, even if
                               m = 0, and must be computed. The authors' code uses 1e-8.
                               Without span_fraction, m = 1 in the formula */
    int    no_renorm;       /* 1: the mask is not part of the normaliser (see above).
                               Every key within span must be computed. Cannot be
                               combined with eps. No effect without span_fraction */
    double dropout;         /* dropout probability of the normalised weights, in
                               [0,1) */
    ptrdiff_t first_key;    /* > 0: keys before this one do not exist. < 0: zero keys with
                               zero values are added at positions first_key to -1 */
} stx_attention_desc;

/* Receives what stx_attention_map_of needs of a call of stx_attention. Zeros: no call. */
typedef struct stx_attention_record {
    const struct stx_attention_args *args;  /* valid until the next stx_begin */
    uint64_t step;          /* counts the calls of stx_begin */
    int      recomputed;    /* 1: the call was inside stx_recompute: `args` is not valid */
} stx_attention_record;

/* Inputs of stx_attention. Unused ones are NULL. Queries, keys and values are given in
   one of three ways:
       q, k, v     separate tensors
       q, kv       each row of kv contains a key and a value, as a single matmul computes
                   them. kv_first and kv_rows select rows of a constant kv
       qkv         each row contains all three, for the T new rows. Keys and values of the
                   m earlier rows are in cached, so that S = m + T. If kv is also given,
                   only the queries of qkv are used, and qkv must be a constant

   With groups, cached[g] contains only the n_g heads of group g, as computed by
   stx_linear_heads, for the newest m_g of the m rows, where m is the largest m_g.
   cached[g] must contain every key that these heads can reach and one more, at which
   the ramp is 0. groups->rows is not read. */
typedef struct stx_attention_in {
    stx_tensor *q, *k, *v;              /* (B,T,C), (B,S,C), (B,S,C) */
    stx_tensor *kv;                     /* (B,S,2C) */
    size_t kv_first, kv_rows;           /* rows of kv to use; both 0: all rows */
    stx_tensor *qkv;                    /* (B,T,3C) */
    stx_tensor *cached[STX_HEAD_GROUPS];    /* (B,m,2C); with groups: (B,m_g,2 D n_g) */
    const stx_head_groups *groups;      /* NULL: cached[0] has all heads */
    stx_tensor *pe;                     /* (P,D), shared by the heads, or (P,C) */
    stx_tensor *content_bias;           /* (C), r_w_bias of 1901.02860 */
    stx_tensor *position_bias;          /* (C), r_r_bias; requires pe */
    stx_tensor *span_fraction;          /* (H), or (1) for all heads: z, the learned span as a
                                           fraction of max_span */
    stx_tensor *persistent_k, *persistent_v;    /* (H,N,D); set both or neither */
    const stx_ids *pad;                 /* (B,S), nonzero where a key does not exist; must
                                           not change until stx_backward has run. Zero
                                           keys and persistent vectors always exist */
    struct stx_attention_args **args_out;   /* if not NULL, receives the arguments of the
                                           forward kernel, with row_max and inv_sum, for
                                           ops that need the attention weights. Valid
                                           until the next stx_begin (inside stx_recompute,
                                           until fn returns) */
    stx_attention_record *record;       /* if not NULL, receives this call for
                                           stx_attention_map_of */
} stx_attention_in;

/* Attention -> (B,T,C). Differentiable in all inputs except pad. Returns NULL after an
   error. */
STX_DEF stx_tensor *stx_attention(stx_ctx *x, const stx_attention_in *in,
                                  const stx_attention_desc *d);

/* Returns the distance beyond which m = 0 for a head with span z max_span, allowing for
   rounding errors of the kernels: ceil(z max_span) + ceil(ramp), limited to `most`. It
   exceeds the distance of the last key with m > 0 by at most 1. */
STX_DEF size_t stx_attention_reach(double z, double max_span, double ramp, size_t most);

/* Cached keys and values of a group of heads, stored separately from k and v of
   stx_attention_args. All four buffers have the same strides. */
typedef struct stx_attention_kv {
    const stx_real *k, *v;      /* (B,rows,D n): the newest rows of the n heads in the group */
    stx_real *dk, *dv;          /* gradients of k and v, or NULL */
    size_t rows, row_stride, batch_stride;
} stx_attention_kv;

/* Bits of stx_attention_args.overwrite. */
enum {
    STX_OVERWRITE_DQ = 1,
    STX_OVERWRITE_DK = 2,
    STX_OVERWRITE_DV = 4,
    STX_OVERWRITE_CACHED = 8    /* shifted left by g: dk and dv of cached[g] */
};

/* Arguments of the attention kernels. Strides are in elements, so that q, k and v can be
   parts of larger buffers.

   Keys 0 .. cached_rows-1 are in cached[], and k, v, dk and dv start with key
   cached_rows. If cached_rows is 0, all keys are in k and v. With groups > 1, the heads
   of group g are in cached[g]; otherwise all heads are in cached[0].

   The forward kernel writes y, row_max and inv_sum. The backward kernel adds to the
   gradients that are not NULL, or overwrites those selected by `overwrite`.

   stx_attention sets all fields. A caller that sets them itself must ensure S >= T,
   unless not_causal is set, and limit span as stated below. The kernels do not check
   this, and no field, such as scale, has a default. */
typedef struct stx_attention_args {
    size_t B, T, S, H, D;
    size_t P, N;                            /* P: rows of pe (0: none); N: number of
                                               persistent vectors per head */
    int    pe_heads;                        /* 1: pe is (P,D), shared; H: (P,H D) */
    int    span_shared;                     /* 1: span_fraction has one element instead of H */
    size_t q_row_stride, kv_row_stride;     /* row strides of q and dq, and of k, v, dk and dv */
    size_t q_batch_stride, kv_batch_stride;
    size_t cached_rows, groups;
    stx_attention_kv cached[STX_HEAD_GROUPS];
    uint8_t head_group[256], head_index[256];   /* if groups > 1: the group of each head,
                                                   and the head's index in its group */
    int overwrite;                          /* STX_OVERWRITE_.. */
    size_t span;                            /* largest distance of a key, at most S plus the
                                               number of zero keys and, with pe, at most
                                               P - 1 + delta_min. Unlike in the desc, 0
                                               does not mean unlimited */
    int    delta_min, not_causal, no_renorm;
    ptrdiff_t first_key;
    stx_real scale, max_span, ramp, eps, drop;
    uint64_t seed, stream, rng_first;       /* for dropout with probability `drop`.
                                               rng_first: index of this rank's first
                                               Philox call */
    const stx_real *q, *k, *v;              /* q (B,T,H D); k and v (B,S - cached_rows,H D) */
    const stx_real *pe;                     /* (P,D) or (P,H D); NULL: no positions */
    const stx_real *content_bias, *position_bias;   /* (H D), or NULL */
    const stx_real *span_fraction;          /* (H) or (1); NULL: no learned spans */
    const stx_real *persistent_k, *persistent_v;    /* (H,N,D), or NULL */
    const int32_t *pad;                     /* (B,S) on the device; NULL: all keys exist */
    size_t pad_batch_stride;
    stx_real *y;                            /* (B,T,H D) */
    stx_real *row_max, *inv_sum;            /* (B,H,T). row_max: the largest score of a
                                               query over the keys in its normaliser, or
                                               -inf without keys. inv_sum: 1 / normaliser,
                                               which is a sum of e^(s - row_max), or 0
                                               without keys */
    const stx_real *dy;                     /* (B,T,H D) */
    stx_real *dq, *dk, *dv;                 /* gradients, with the shapes of the inputs */
    stx_real *dpe, *dcontent_bias, *dposition_bias, *dspan_fraction;
    stx_real *dpersistent_k, *dpersistent_v;
    void *work;                             /* scratch memory; stx_attention_work returns
                                               its size */
} stx_attention_args;

/* Returns the size in bytes of the scratch memory that the forward or backward kernel
   requires. *a must be complete, except for `work`. The size depends on the shapes and
   options, the values of span_fraction, the number of threads and, for backward, on
   which gradients are not NULL. */
STX_DEF size_t stx_attention_work(stx_ctx *x, const stx_attention_args *a, int backward);
#ifdef SEQTX_CUDA
extern size_t stx_attention_work_cuda(stx_ctx *x, const stx_attention_args *a, int backward);
#endif

STX_KERNEL(stx_attention_fwd, (stx_ctx *x, const stx_attention_args *a))
STX_KERNEL(stx_attention_bwd, (stx_ctx *x, const stx_attention_args *a))

/* Runs the forward kernel for the context's device, with scratch memory from the step
   arena. */
STX_DEF void stx_attention_run(stx_ctx *x, stx_attention_args *a);

/* The definition of attention, for readers and tests. The arrays in `a` must be in host
   memory.

   stx_attention_keys returns the total number of zero keys, keys (S) and persistent
   vectors. The index n below runs over all of these, in this order.

   stx_attention_weights computes the softmax of query i of head h in stream b, before
   the mask and dropout: w[n] = e^s / normaliser, or 0 if the query does not attend to
   the key; raw_m[n] = m before it is clamped to [0, 1], or 2 without learned spans, for
   persistent vectors and for keys that do not exist or are not within span.

   stx_attention_plain computes y in double; work has 2 stx_attention_keys elements. */
STX_DEF size_t stx_attention_keys(const stx_attention_args *a);
STX_DEF void stx_attention_weights(const stx_attention_args *a, size_t b, size_t h, size_t i,
                                   double *w, double *raw_m);
STX_DEF void stx_attention_plain(const stx_attention_args *a, double *work);


// >>api: attention maps

/* The fused kernels never store the weights of an attention. The functions here compute
   those of one row of a batch again, for pictures and analysis. The model families have
   functions for their layers, such as stx_span_attention_map. */

/* Kinds of keys, in the order in which a map lists them. */
enum {
    STX_KEY_ZERO,           /* a key of zeros, before all rows that were written */
    STX_KEY_COMPRESSED,     /* a row of the compressed memory */
    STX_KEY_MEMORY,         /* a row of the memory */
    STX_KEY_SEGMENT,        /* a token of the segment */
    STX_KEY_PERSISTENT,     /* a persistent vector */
    STX_KEY_KINDS           /* the number of kinds */
};

typedef struct stx_attention_key {
    int       kind;         /* STX_KEY_ZERO .. STX_KEY_PERSISTENT */
    int       missing;      /* 1: the stream has no such row; its weights are 0 */
    ptrdiff_t first;        /* position of the first token that the key stands for: 0 is the
                               first token of the segment, -1 the token before it */
    size_t    tokens;       /* number of these tokens: 1, or up to `ratio` in compressed rows;
                               0: none (zero keys, persistent vectors), or not known */
} stx_attention_key;

/* The weights of one attention in one row of a batch. Query i is token i of the segment.
   The attention output of a head is y_i = sum_j weight_ij v_j, with the values of the
   kernel: sqrt(N) persistent_v for persistent vectors, and 0 for zero keys. The weights
   of a query sum to 1, or to 0 if it sees no key, with these exceptions: with no_renorm
   or eps > 0 the sum is smaller, and in a training step with dropout the weights include
   the dropout, so that the sum is 1 only on average. */
typedef struct stx_attention_map {
    size_t heads, queries, keys;            /* H, T, K */
    size_t count[STX_KEY_KINDS];            /* number of keys of each kind; the sum is K */
    const stx_attention_key *key;           /* [K] */
    const double *weight;                   /* (H,T,K) */
    const double *span;                     /* [H]: learned spans in tokens, without the ramp;
                                               NULL: none */
    double ramp;                            /* width of the ramp in tokens, with `span` */
} stx_attention_map;

/* Returns the arguments of an attention for row b alone (B = 1), with q, k, v, y and all
   other inputs in host memory, for stx_attention_weights and stx_attention_plain. On a
   GPU, copies them, like stx_get. row_max, inv_sum, gradients and work are NULL. The
   result is valid as long as *a. Returns NULL after an error. */
STX_DEF const stx_attention_args *stx_attention_host(stx_ctx *x, const stx_attention_args *a,
                                                     size_t b);

/* For model families: computes the map of row b from the record of a layer's attention
   in this step. All rows before those of the segment have the kind STX_KEY_MEMORY. Error
   texts begin with `op`. The parameters must not have changed since the call. The result
   is valid until the next stx_begin. Returns NULL and sets an error if the layer has not
   attended in this step or was recomputed, if b is out of range, or if memory runs out.
   In a dry run, all weights are 0. */
STX_DEF stx_attention_map *stx_attention_map_of(stx_ctx *x, const char *op,
                                                const stx_attention_record *record, size_t b);


// >>api: adaptive input and output

/* Adaptive input (Baevski and Auli 2018, 1809.10853) and adaptive softmax (Grave et al.
   2016, 1609.04309), for large vocabularies sorted by decreasing frequency. A cluster is
   a range of ids. Cluster 0 contains the most frequent words, and later clusters contain
   rarer words in narrower tables.

   Letters: cluster i has V_i ids, starts at id start_i and has C_i channels. T_i, P_i,
   p_i and b_i are its table, projection and biases. D is dropout.

       input      scale P_i D(T_i[id - start_i])
       logits     T_i D(P_i^T h + p_i) + b_i

   The head is the softmax of cluster 0, with one more column for each of the other
   clusters. log p of an id in another cluster is the sum of log p of the cluster in the
   head and log p of the id within the cluster. The columns for the clusters have the same
   input D(P_0^T h + p_0) as cluster 0. */
#define STX_MAX_CLUSTERS 8

typedef struct stx_adaptive {
    size_t clusters;                            /* 1 to STX_MAX_CLUSTERS */
    size_t end[STX_MAX_CLUSTERS];               /* end of each cluster's id range
                                                   (exclusive); the last is V */
    stx_tensor *table[STX_MAX_CLUSTERS];        /* (V_i,C_i) */
    stx_tensor *proj[STX_MAX_CLUSTERS];         /* (C,C_i); NULL: none, requires C_i = C */
    stx_tensor *bias[STX_MAX_CLUSTERS];         /* (V_i), output only */
    stx_tensor *cluster_w, *cluster_b;          /* cluster_w (clusters-1,C_0) and
                                                   cluster_b (clusters-1): weights and
                                                   biases of the columns for the clusters,
                                                   output only */
    int forward_columns;                        /* 0: the columns start with the last
                                                   cluster, as in Transformer-XL for
                                                   PyTorch; 1: with cluster 1, as in
                                                   Transformer-XL for TensorFlow and in
                                                   Hugging Face */
    double scale;                               /* factor applied to the input; 0: sqrt(C) */
    double dropout;                             /* probability of the dropout D, see stx_dropout */
    stx_tensor *proj_bias[STX_MAX_CLUSTERS];    /* (C_i), p_i; NULL: none. Output only,
                                                   requires proj */
} stx_adaptive;

/* Embeds ids (B,T) -> (B,T,C). */
STX_DEF stx_tensor *stx_adaptive_input(stx_ctx *x, const stx_adaptive *a, const stx_ids *ids);

/* Mean of -log p(target) over the rows of h (..,C) -> (1), in nats. targets has one id
   per row. */
STX_DEF stx_tensor *stx_adaptive_softmax(stx_ctx *x, const stx_adaptive *a, stx_tensor *h,
                                         const stx_ids *targets);

/* Like stx_adaptive_softmax, with the options of stx_cross_entropy_tokens. */
STX_DEF stx_tensor *stx_adaptive_softmax_tokens(stx_ctx *x, const stx_adaptive *a, stx_tensor *h,
                                                const stx_ids *targets, stx_token_loss *how);

/* log p of every id, without dropout: h (..,C) -> (N,V). Not differentiable. */
STX_DEF stx_tensor *stx_adaptive_log_probs(stx_ctx *x, const stx_adaptive *a, stx_tensor *h);

/* Adds the host-side decisions that depend on these ids to `key`, the key of a step
   (stx_step_run), and returns the new key. The decisions are those of
   stx_adaptive_input or, with output = 1, of stx_adaptive_softmax_tokens with the
   options `how`. On a GPU, the matmuls of a cluster are captured for a capacity, which
   is the number of ids in the cluster, rounded up to a multiple of 1/16 of all ids. The
   step can be replayed while all capacities stay the same. Without this key, a replayed
   step whose ids exceed a capacity computes NaN, and its update is skipped. On a CPU,
   returns the key unchanged. */
STX_DEF uint64_t stx_adaptive_key(uint64_t key, const stx_adaptive *a, const stx_ids *ids,
                                  int output, const stx_token_loss *how);
