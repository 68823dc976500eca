#pragma once
#include "config.h"
#include "context.h"


// >>api: ops

/* An op returns a new tensor of this step, or NULL after an error. If an input is NULL,
   it returns NULL without setting an error. Ops are differentiable in all inputs that are
   tensors, unless the docstring says otherwise. The kernels of an op are declared below
   it; see >>api: kernels. */

/* a + b and a b, elementwise. b has the shape of `a`, or only its last dimensions and
   is then broadcast over the leading ones. */
STX_DEF stx_tensor *stx_add(stx_ctx *x, stx_tensor *a, stx_tensor *b);
STX_DEF stx_tensor *stx_mul(stx_ctx *x, stx_tensor *a, stx_tensor *b);

/* s times `a`, for a constant factor s */
STX_DEF stx_tensor *stx_scale(stx_ctx *x, stx_tensor *a, double s);

/* s[0] a, where s (1) can be a scalar set by the host (stx_scalar_create), a parameter or
   the result of an op. */
STX_DEF stx_tensor *stx_scale_by(stx_ctx *x, stx_tensor *a, stx_tensor *s);

/* stx_add_fwd: y = a + b; stx_mul_fwd: y = a b. y and a (n); b (nb) is repeated, and n
   is a multiple of nb. */
STX_KERNEL(stx_add_fwd, (stx_ctx *x, stx_real *y, const stx_real *a, const stx_real *b, size_t n,
                         size_t nb))
STX_KERNEL(stx_mul_fwd, (stx_ctx *x, stx_real *y, const stx_real *a, const stx_real *b, size_t n,
                         size_t nb))

/* da (n) = dy b, or += with accumulate; db (nb) += dy a, summed over the repetitions of
   b. da and db can be NULL. */
typedef struct stx_mul_bwd_args {
    size_t n, nb;
    int accumulate;
    const stx_real *a, *b, *dy;             /* a (n), b (nb), dy (n) */
    stx_real *da, *db;                      /* da (n), db (nb) */
} stx_mul_bwd_args;

STX_KERNEL(stx_mul_bwd, (stx_ctx *x, const stx_mul_bwd_args *m))

/* Elementwise activation functions. stx_gelu computes the exact form a Phi(a), not the
   tanh approximation (Hendrycks and Gimpel 2016, 1606.08415). */
enum { STX_ACT_NONE = 0, STX_ACT_RELU, STX_ACT_GELU, STX_ACT_TANH, STX_ACT_SIGMOID };

STX_DEF stx_tensor *stx_relu(stx_ctx *x, stx_tensor *a);
STX_DEF stx_tensor *stx_gelu(stx_ctx *x, stx_tensor *a);
STX_DEF stx_tensor *stx_tanh(stx_ctx *x, stx_tensor *a);
STX_DEF stx_tensor *stx_sigmoid(stx_ctx *x, stx_tensor *a);

/* y (n) = act(a), a (n); y can be the same array as a */
STX_KERNEL(stx_act_fwd, (stx_ctx *x, stx_real *y, const stx_real *a, size_t n, int act))

/* da (n) = dy act'(a), or += with accumulate */
typedef struct stx_act_bwd_args {
    size_t n;
    int act, accumulate;
    const stx_real *y, *a;                  /* (n); `a` is read for gelu only */
    const stx_real *dy;                     /* (n) */
    stx_real *da;                           /* (n); can be dy if accumulate is 0 */
} stx_act_bwd_args;

STX_KERNEL(stx_act_bwd, (stx_ctx *x, const stx_act_bwd_args *a))

/* Set elements to 0 with probability p and scale the others by 1 / (1 - p); in
   STX_EVAL, return the values of `a`. 0 <= p < 1, rounded to a multiple of 1/65536.
       stx_dropout                drops each element independently
       stx_dropout_variational    a (B,T,C), with one mask (B,C) for all time steps (Gal
                                  and Ghahramani 2016, 1512.05287)
       stx_dropout_replicated     the same mask in all ranks of a group, for tensors that
                                  all ranks share, such as positions. stx_dropout assumes
                                  that the first dimension is the rank's share of the
                                  batch */
STX_DEF stx_tensor *stx_dropout(stx_ctx *x, stx_tensor *a, double p);
STX_DEF stx_tensor *stx_dropout_variational(stx_ctx *x, stx_tensor *a, double p);
STX_DEF stx_tensor *stx_dropout_replicated(stx_ctx *x, stx_tensor *a, double p);

/* y (n) = a mask / (1 - p), or += with accumulate. The backward pass is the same call
   with dy as `a` and da as `y`. stx_philox(seed, stream, first + i) gives the mask of
   elements 8 i to 8 i + 7. */
typedef struct stx_dropout_args {
    size_t n;
    stx_real p;
    int accumulate;
    uint64_t seed, stream, first;
    const stx_real *a;                      /* (n) */
    stx_real *y;                            /* (n); can be the array `a` if accumulate is 0 */
} stx_dropout_args;

STX_KERNEL(stx_dropout_fwd, (stx_ctx *x, const stx_dropout_args *d))

/* ReZero (Bachlechner et al. 2020, 2003.04887): h + alpha[0] f, with h and f of the same
   shape and alpha (1) learned. */
STX_DEF stx_tensor *stx_rezero(stx_ctx *x, stx_tensor *h, stx_tensor *f, stx_tensor *alpha);

/* y (n) = h + alpha[0] f, or alpha[0] f if h is NULL */
STX_KERNEL(stx_rezero_fwd, (stx_ctx *x, stx_real *y, const stx_real *h, const stx_real *f,
                            const stx_real *alpha, size_t n))

/* df (n) = alpha dy, or += with accumulate; dalpha (1) += the sum of dy f over all
   elements. df and dalpha can be NULL. */
typedef struct stx_rezero_bwd_args {
    size_t n;
    int accumulate;
    const stx_real *f, *alpha, *dy;         /* f (n), alpha (1), dy (n) */
    stx_real *df, *dalpha;                  /* df (n), dalpha (1) */
} stx_rezero_bwd_args;

STX_KERNEL(stx_rezero_bwd, (stx_ctx *x, const stx_rezero_bwd_args *r))

/* Softmax and log-softmax over the last dimension. */
STX_DEF stx_tensor *stx_softmax(stx_ctx *x, stx_tensor *a);
STX_DEF stx_tensor *stx_log_softmax(stx_ctx *x, stx_tensor *a);

/* y (N,C) = softmax of each row of `a` (N,C). The gradient is da = y (dy - sum of dy y
   over the row), or += with accumulate. */
STX_KERNEL(stx_softmax_fwd, (stx_ctx *x, stx_real *y, const stx_real *a, size_t N, size_t C))
STX_KERNEL(stx_softmax_bwd, (stx_ctx *x, stx_real *da, const stx_real *dy, const stx_real *y,
                             size_t N, size_t C, int accumulate))

/* y (N,C) = a - log sum e^a, for each row of `a` (N,C). The gradient is da = dy - e^y
   (sum of dy over the row), or += with accumulate. */
STX_KERNEL(stx_log_softmax_fwd, (stx_ctx *x, stx_real *y, const stx_real *a, size_t N, size_t C))
STX_KERNEL(stx_log_softmax_bwd, (stx_ctx *x, stx_real *da, const stx_real *dy, const stx_real *y,
                                 size_t N, size_t C, int accumulate))

/* Layer normalisation over the last dimension (Ba et al. 2016, 1607.06450):
       y = (in - mean) / sqrt(var + eps) gain + shift
   with the biased variance, and with gain and shift of shape (C). eps 0 means 1e-5. */
STX_DEF stx_tensor *stx_layernorm(stx_ctx *x, stx_tensor *in, stx_tensor *gain, stx_tensor *shift,
                                  double eps);

/* layernorm(h + dropout(f, p)) in one pass, with h and f (..,C). p is the dropout
   probability; the other arguments are as in stx_layernorm. */
STX_DEF stx_tensor *stx_residual_norm(stx_ctx *x, stx_tensor *h, stx_tensor *f, double p,
                                      stx_tensor *gain, stx_tensor *shift, double eps);

/* layernorm(h + dropout(f + b, p)). b (C), or NULL, is the bias of the preceding linear
   layer, which must compute f without it. The backward kernel computes b's gradient
   together with the others. */
STX_DEF stx_tensor *stx_residual_norm_bias(stx_ctx *x, stx_tensor *h, stx_tensor *f, stx_tensor *b,
                                           double p, stx_tensor *gain, stx_tensor *shift,
                                           double eps);

/* Arguments of the stx_layernorm and stx_residual_norm kernels. The forward kernel
   computes s = h + dropout(f + bias), y = layernorm(s), mean and rstd. If f is NULL,
   y = layernorm(h), and s, bias and drop are not used. The backward kernel reads dy, s
   (h if f was NULL), mean, rstd and gain, and computes:
       ds = gradient of s, and thus of h; += with accumulate_ds
       df = dropout(gradient of s); += with accumulate_df
       dgain, dshift += their gradients; dbias += sum of the rows of df
   The gradients may be NULL. dbias requires a df that is not ds. accumulate_df must be 0
   if dbias is given, if accumulate_ds is 1, or if ds is NULL. */
typedef struct stx_residual_norm_args {
    size_t N, C;
    stx_real eps, drop;                     /* drop: dropout probability; 0: no dropout */
    uint64_t seed, stream, rng_first;       /* for dropout: seed, stream and first of
                                               stx_dropout_args */
    const stx_real *h, *f;                  /* (N,C) */
    const stx_real *gain, *shift, *bias;    /* (C); bias can be NULL */
    stx_real *y, *s;                        /* (N,C) */
    stx_real *mean, *rstd;                  /* (N), float in every precision */
    const stx_real *dy;                     /* (N,C) */
    stx_real *ds, *df;                      /* (N,C) */
    stx_real *dgain, *dshift, *dbias;       /* (C) */
    int accumulate_df, accumulate_ds;       /* 1: df +=, ds += */
    int deferred;                           /* 1: dgain, dshift and dbias are gradients
                                               of parameters; see stx_linear_bwd_args */
} stx_residual_norm_args;

STX_KERNEL(stx_residual_norm_fwd, (stx_ctx *x, const stx_residual_norm_args *a))
STX_KERNEL(stx_residual_norm_bwd, (stx_ctx *x, const stx_residual_norm_args *a))

/* Looks up rows of table (V,C): ids (B,T) -> (B,T,C). An id outside [0,V) is an error. */
STX_DEF stx_tensor *stx_embedding(stx_ctx *x, stx_tensor *table, const stx_ids *ids);

/* y[n] = table[ids[n]] and dtable[ids[n]] += dy[n], for rows of C elements. y and dy
   are (N,C), ids is (N), and table and dtable are (V,C). */
STX_KERNEL(stx_embedding_fwd, (stx_ctx *x, stx_real *y, const stx_real *table, const int32_t *ids,
                               size_t N, size_t C))
STX_KERNEL(stx_embedding_bwd, (stx_ctx *x, stx_real *dtable, const stx_real *dy, const int32_t *ids,
                               size_t N, size_t C))

/* Gathers rows idx[0], .., idx[n-1] of `a` (N,C) -> (n,C). The same row can occur
   several times in idx. */
STX_DEF stx_tensor *stx_gather(stx_ctx *x, stx_tensor *a, const int32_t *idx, size_t n);

/* Concatenate and slice tensors.
       stx_concat            over time: (B,Ta,C), (B,Tb,C) -> (B,Ta+Tb,C)
       stx_slice             rows [t0,t1) over time: (B,T,C) -> (B,t1-t0,C)
       stx_concat_channels   (..,Ca), (..,Cb) -> (..,Ca+Cb)
       stx_slice_channels    channels [c0,c1): (..,C) -> (..,c1-c0) */
STX_DEF stx_tensor *stx_concat(stx_ctx *x, stx_tensor *a, stx_tensor *b);
STX_DEF stx_tensor *stx_slice(stx_ctx *x, stx_tensor *a, size_t t0, size_t t1);
STX_DEF stx_tensor *stx_concat_channels(stx_ctx *x, stx_tensor *a, stx_tensor *b);
STX_DEF stx_tensor *stx_slice_channels(stx_ctx *x, stx_tensor *a, size_t c0, size_t c1);

/* Views, which share the memory of `a`.
       stx_view_rows   rows [r0,r1) of `a` (N,C) -> (r1-r0,C), such as a part of a table
       stx_reshape     the same elements in another shape of the same size
       stx_detach      the same tensor as a constant: no gradient reaches `a` */
STX_DEF stx_tensor *stx_view_rows(stx_ctx *x, stx_tensor *a, size_t r0, size_t r1);
STX_DEF stx_tensor *stx_reshape(stx_ctx *x, stx_tensor *a, size_t d0, size_t d1, size_t d2,
                                size_t d3);
STX_DEF stx_tensor *stx_detach(stx_ctx *x, stx_tensor *a);

/* op(a) op(b) -> (..,M,N); op transposes the last two dimensions if ta or tb is set.
   op(a) is (..,M,K) and op(b) is (..,K,N). Their leading dimensions are equal, or b has
   only two dimensions and is used for all matrices of `a`. */
STX_DEF stx_tensor *stx_matmul(stx_ctx *x, stx_tensor *a, stx_tensor *b, int ta, int tb);

/* A GEMM: C (M,N) = alpha op(A) op(B) + beta C, for each matrix of a batch. op
   transposes if ta or tb is set: A is (M,K), or (K,M) with ta; B is (K,N), or (N,K) with
   tb. stx_gemm_init fills in the struct. */
typedef struct stx_gemm_args {
    size_t batch, M, N, K;
    int ta, tb;
    stx_real alpha, beta;       /* beta 0: C is overwritten without being read */
    const stx_real *A, *B;
    stx_real *C;
    size_t lda, ldb, ldc;       /* row strides in memory */
    size_t sa, sb, sc;          /* strides between matrices. sa or sb 0: one matrix for the
                                   whole batch. sc 0: C is the sum over the batch. On a
                                   GPU, a bfloat16 C is then rounded after each matrix,
                                   unless ta is set and tb is not */
} stx_gemm_args;

/* Returns the arguments of C = op(A) op(B) for one matrix: alpha 1, beta 0, dense rows.
   The batch strides are set for dense matrices, so a dense batch requires only `batch`
   to be set. */
STX_DEF stx_gemm_args stx_gemm_init(int ta, int tb, size_t M, size_t N, size_t K,
                                    const stx_real *A, const stx_real *B, stx_real *C);
STX_KERNEL(stx_gemm, (stx_ctx *x, const stx_gemm_args *g))

/* The definition of stx_gemm, for readers and tests: returns element (i,j) of op(A) op(B)
   for matrix e of the batch, summed in double. With sc = 0, e must be 0, and the result
   is the sum over the batch. */
STX_DEF double stx_gemm_plain(const stx_gemm_args *g, size_t e, size_t i, size_t j);

/* act(in W^T + b): in (..,Ci), W (O,Ci), b (O) or NULL -> (..,O). act is STX_ACT_.. */
STX_DEF stx_tensor *stx_linear(stx_ctx *x, stx_tensor *in, stx_tensor *W, stx_tensor *b, int act);

/* y = act(in W^T + b), in one pass */
typedef struct stx_linear_args {
    size_t N, Ci, O;
    int act;
    const stx_real *in, *W, *b;             /* in (N,Ci), W (O,Ci), b (O) or NULL */
    stx_real *y, *pre;                      /* (N,O). If pre is not NULL, it receives the
                                               values before the activation */
} stx_linear_args;

STX_KERNEL(stx_linear_fwd, (stx_ctx *x, const stx_linear_args *a))

/* Arguments of stx_linear_bwd. It replaces da, which contains dy, with dy act', and
   computes the gradients that are not NULL:
       dx = da W, or += with accumulate
       dW += da^T in
       db += sum of the rows of da

   padding: the last `padding` of the O outputs are padding. da and W contain zeros
   there; dW and db do not include them.

   batch > 1: computes only dW, as the sum over `batch` pairs of matrices da (N,O) and
   `in` (N,Ci).

   deferred: db or dW is a parameter gradient, so the backward pass does not read it.
   During stx_backward, a GPU can defer the addition, to process many such sums in one
   launch before stx_backward returns. */
enum { STX_DEFER_DB = 1, STX_DEFER_DW = 2 };

typedef struct stx_linear_bwd_args {
    size_t N, Ci, O;
    size_t padding;
    int act, accumulate;
    stx_real *da;               /* (N,O) */
    const stx_real *y, *pre;    /* (N,O): y is read if act is set, and pre for gelu only */
    const stx_real *in, *W;     /* in (N,Ci), W (O,Ci) */
    stx_real *dx, *dW, *db;     /* dx (N,Ci), dW (O-padding,Ci), db (O-padding) */
    size_t batch, sda, sin;     /* batch: number of matrices; sda, sin: strides between
                                   the matrices of da and of `in` */
    int deferred;               /* STX_DEFER_DB | STX_DEFER_DW */
} stx_linear_bwd_args;

STX_KERNEL(stx_linear_bwd, (stx_ctx *x, const stx_linear_bwd_args *a))

/* y (N,C) = act(y + b), in place, with b (C) or NULL. pre (N,C), unless NULL, receives
   y + b. */
STX_KERNEL(stx_bias_act_fwd, (stx_ctx *x, stx_real *y, stx_real *pre, const stx_real *b, size_t N,
                              size_t C, int act))

/* X W^T + b, with X (B,S,Ci), W (O,Ci) and b (O) or NULL -> (B,S,O). The first S - T
   rows of X are memory, and the last T rows are a copy of h (B,T,Ci). Differentiable in
   h, W and b, but not in X. */
STX_DEF stx_tensor *stx_linear_memory(stx_ctx *x, stx_tensor *X, stx_tensor *h, stx_tensor *W,
                                      stx_tensor *b);

/* Several linear layers with the same input `in` (..,Ci) -> (..,O). Layer i < count has
   weights W[i] (O_i,Ci) and bias b[i] (O_i); b NULL: no biases. Each row of the result
   is the concatenation of in W[i]^T + b[i] for all i, so O is the sum of all O_i. Runs
   a single matmul if the weights are contiguous in memory and so are the biases
   (stx_params_make_contiguous); otherwise runs one matmul per layer and copies the
   results. */
STX_DEF stx_tensor *stx_linear_concat(stx_ctx *x, stx_tensor *in, stx_tensor *const *W,
                                      stx_tensor *const *b, int count);

/* Rows of B streams that are read in place, from a memory (stx_memory_view) or from a
   constant tensor (B,rows,width), whose stride is the product of rows and width. The
   rows are constants and must not change until stx_backward has run. */
typedef struct stx_cached_rows {
    const stx_real *data;       /* (B,rows,width) in device memory, dense rows */
    size_t rows, stride;        /* stride: elements from one stream to the next */
} stx_cached_rows;

/* Applies stx_linear_concat to cached rows: past[0], .., past[parts-1], concatenated over
   time -> (B,m,O), where m is their total number of rows. Each part has Ci channels, and
   parts is at most STX_MAX_CACHED. Differentiable in the weights and biases. Returns NULL
   without an error if m is 0. */
enum { STX_MAX_CACHED = 4 };

STX_DEF stx_tensor *stx_linear_cached(stx_ctx *x, const stx_cached_rows *past, int parts,
                                      size_t B, stx_tensor *const *W, stx_tensor *const *b,
                                      int count);

/* Groups of heads, each with a separate window over the cached rows, because a head
   with a short span needs no keys and values beyond it. */
enum { STX_HEAD_GROUPS = 3 };

typedef struct stx_head_groups {
    size_t count;                       /* number of groups, 1 to STX_HEAD_GROUPS */
    size_t rows[STX_HEAD_GROUPS];       /* number of newest rows that each group reads,
                                           decreasing; group 0 reads all rows */
    uint8_t of[256];                    /* group of each head; heads keep their order
                                           within a group */
} stx_head_groups;

/* Chooses the groups that minimise the number of projected elements, where head h needs
   the newest need[h] of m rows. Windows are rounded up to a multiple of 64 rows, so
   that the windows, and thus the step key, rarely change. A group is added only if it
   saves the projection of at least 64 rows for all heads, because it costs an
   additional matmul forward and backward. */
STX_DEF void stx_head_groups_choose(const size_t *need, size_t heads, size_t m, stx_head_groups *g);

/* Projects cached rows to keys and values, with one matmul per group of heads. out[g]
   (B,rows[g],2 D n_g) contains the keys, followed by the values, of the n_g heads of
   group g. It is computed from the newest rows[g] rows of past, which has at least
   rows[0] rows. The results have the format of stx_attention_in.cached. wk, wv (C,Ci), D
   = C / heads. Differentiable in wk and wv. Returns 1, or sets an error and returns 0. */
STX_DEF int stx_linear_heads(stx_ctx *x, const stx_cached_rows *past, size_t B, stx_tensor *wk,
                             stx_tensor *wv, size_t heads, const stx_head_groups *g,
                             stx_tensor **out);

/* Mean and sum of all elements -> (1). */
STX_DEF stx_tensor *stx_mean(stx_ctx *x, stx_tensor *a);
STX_DEF stx_tensor *stx_sum(stx_ctx *x, stx_tensor *a);

/* y (1) = mean of `a` (n); da (n) += dy[0] / n */
STX_KERNEL(stx_mean_fwd, (stx_ctx *x, stx_real *y, const stx_real *a, size_t n))
STX_KERNEL(stx_mean_bwd, (stx_ctx *x, stx_real *da, const stx_real *dy, size_t n))

/* y (1) = sum of `a` (n); da (n) += dy[0] */
STX_KERNEL(stx_sum_fwd, (stx_ctx *x, stx_real *y, const stx_real *a, size_t n))
STX_KERNEL(stx_sum_bwd, (stx_ctx *x, stx_real *da, const stx_real *dy, size_t n))

/* y + s sum_k mean(a[k]) over k < count, with y (1) -> (1). Adds a penalty on many
   small parameters to a loss y with few kernel launches. */
STX_DEF stx_tensor *stx_add_means(stx_ctx *x, stx_tensor *y, stx_tensor *const *a, size_t count,
                                  double s);

/* Arguments of the stx_add_means kernels, which process up to STX_MEANS tensors. If
   several da[k] are the same tensor, their terms are added in order of k. */
enum { STX_MEANS = 8 };

typedef struct stx_means_args {
    size_t count, n[STX_MEANS];
    stx_real s;
    const stx_real *a[STX_MEANS];       /* (n[k]) */
    const stx_real *y0, *dy;            /* (1) */
    stx_real *y;                        /* (1) = y0 + s sum_k mean(a[k]) */
    stx_real *da[STX_MEANS];            /* (n[k]) += s dy / n[k]; each can be NULL */
    int overwrite;                      /* bit k set: overwrite da[k] instead of adding */
} stx_means_args;

STX_KERNEL(stx_add_means_fwd, (stx_ctx *x, const stx_means_args *m))
STX_KERNEL(stx_add_means_bwd, (stx_ctx *x, const stx_means_args *m))

/* Sum of -log softmax(logits)[target] over the rows, in nats, divided by divisor -> (1).
   logits (..,V), one target per row. divisor 0: the number of rows, which gives the mean.
   A target outside [0,V) is an error. */
STX_DEF stx_tensor *stx_cross_entropy(stx_ctx *x, stx_tensor *logits, const stx_ids *targets,
                                      double divisor);

/* Like stx_cross_entropy, but the backward pass overwrites the logits with their
   gradient, so the logits must not be read afterwards. This saves memory if the logits
   were computed by stx_linear without activation, stx_matmul or stx_scale; after other
   ops, the function is identical to stx_cross_entropy. */
STX_DEF stx_tensor *stx_cross_entropy_inplace(stx_ctx *x, stx_tensor *logits,
                                              const stx_ids *targets, double divisor);

/* Options of a loss over tokens. All zero: the mean over all rows. */
typedef struct stx_token_loss {
    stx_tensor *weights;    /* (N), a constant weight per row; NULL: all 1 */
    int         ignore;     /* 1: rows with target ignored_id have no loss and no gradient.
                               This id may be outside [0,V) */
    int32_t     ignored_id;
    double      divisor;    /* divisor of the sum; 0: the number of rows, including
                               ignored ones */
    int         mean;       /* 1: the divisor is the sum of the weights of the rows that are
                               not ignored, computed on the device; if it is 0, the loss
                               is 0. Cannot be combined with divisor */
    stx_tensor *nll;        /* receives a tensor (N): -log p(target) of each row,
                               unweighted, 0 in ignored rows. It is a constant, float in
                               every precision */
} stx_token_loss;

/* Weighted sum of -log softmax(logits)[target] over the rows, divided by a divisor ->
   (1), with the options in `how`. logits (..,V), one target per row. */
STX_DEF stx_tensor *stx_cross_entropy_tokens(stx_ctx *x, stx_tensor *logits, const stx_ids *targets,
                                             stx_token_loss *how);

/* Arguments of the kernels of all token losses. The forward kernel writes loss, nll,
   row_max and inv_sum:
       nll[n] = log sum_v e^logits[n,v] - logits[n,targets[n]]
       loss = sum_n weights[n] nll[n] / divisor
   The backward kernel reads row_max, inv_sum and dloss, and computes dlogits. Rows with
   a negative target have nll = 0 and dlogits = 0. Elements between the rows (if ld > V)
   are not read; the backward kernel sets them to 0 unless accumulate is 1. */
typedef struct stx_token_loss_args {
    size_t N, V, ld;                        /* rows, classes, row stride >= V */
    double divisor;
    const stx_real *logits;                 /* (N,V) */
    const int32_t *targets;                 /* (N) */
    const stx_real *weights;                /* (N); NULL: 1 each */
    stx_real *loss;                         /* (1) */
    stx_real *nll;                          /* (N), or NULL */
    stx_real *row_max, *inv_sum;            /* (N): max_v logits[n,v] and
                                               1 / sum_v e^(logits[n,v] - row_max[n]) */
    const stx_real *dloss;                  /* (1) */
    stx_real *dlogits;                      /* (N,V); can be logits if accumulate is 0 */
    int accumulate;                         /* 1: add to dlogits; 0: overwrite it */
} stx_token_loss_args;

STX_KERNEL(stx_token_loss_fwd, (stx_ctx *x, const stx_token_loss_args *a))
STX_KERNEL(stx_token_loss_bwd, (stx_ctx *x, const stx_token_loss_args *a))

/* Mean of (a - b)^2 -> (1), for a and b of the same shape. */
STX_DEF stx_tensor *stx_mse(stx_ctx *x, stx_tensor *a, stx_tensor *b);

/* loss (1) = mean of (a - b)^2, with a and b (n). The backward kernel computes da (n)
   += g (a - b) and db (n) -= g (a - b), where g = 2 dloss[0] / n. */
STX_KERNEL(stx_mse_fwd, (stx_ctx *x, stx_real *loss, const stx_real *a, const stx_real *b,
                         size_t n))
STX_KERNEL(stx_mse_bwd, (stx_ctx *x, stx_real *da, stx_real *db, const stx_real *dloss,
                         const stx_real *a, const stx_real *b, size_t n))
