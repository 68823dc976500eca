#pragma once
#include "config.h"
#include "context.h"
#include "ops.h"


// >>api: optimisers

enum { STX_SGD = 1, STX_ADAGRAD, STX_ADAM, STX_ADAMW, STX_RADAM, STX_LAMB, STX_MUON };

/* Configuration of an optimiser. With theta a parameter, g its gradient, lr the
   learning rate and t = 1, 2, .. the update index:

       SGD      buf = momentum buf + g
                theta -= lr buf

       Adagrad  sum += g^2
                theta -= lr g / (sqrt(sum) + eps)

       Adam     (Kingma and Ba 2015, 1412.6980, algorithm 1)
                m = beta1 m + (1 - beta1) g
                v = beta2 v + (1 - beta2) g^2
                theta -= lr m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps)
                with eps_hat (end of section 2 of the paper):
                theta -= lr sqrt(1 - beta2^t) / (1 - beta1^t) m / (sqrt(v) + eps)

       AdamW    (Loshchilov and Hutter 2017, 1711.05101) Adam, and
                theta -= lr weight_decay theta

       RAdam    (Liu et al. 2019, 1908.03265) m and v as in Adam; skipped updates do not
                increase t
                rho_inf = 2 / (1 - beta2) - 1
                rho = rho_inf - 2 t beta2^t / (1 - beta2^t)
                r = sqrt((1 - beta2^t) (rho - 4) (rho - 2) rho_inf
                         / ((rho_inf - 4) (rho_inf - 2) rho))
                theta -= lr weight_decay theta
                rho >= 5:  theta -= lr r m / (1 - beta1^t) / (sqrt(v) + eps)
                rho < 5:   theta -= lr m / (1 - beta1^t)
                rho < 5 for t <= 5 with beta2 = 0.999; see radam_skip. r contains
                the bias correction of v

       LAMB     (You et al. 2020, 1904.00962, algorithm 2) m and v as in Adam; for each
                parameter tensor, with L2 norms of the whole tensor
                u = m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps)
                    + weight_decay theta
                phi = min(|theta|, trust_max) / |u|, or 1 if either norm is 0
                theta -= lr phi u

       Muon     (Jordan et al. 2024, kellerjordan.github.io/posts/muon; scale of the
                update: Liu et al. 2025, 2502.16982, equation 4) for each matrix
                (rows,cols) of a hidden layer
                buf = momentum buf + g
                u = g + momentum buf                    (Nesterov)
                theta -= lr weight_decay theta
                            + lr 0.2 sqrt(max(rows, cols)) orthogonalise(u)

                orthogonalise(u):  X = u / (|u|_F + 1e-7), transposed if rows > cols;
                five times         A = X X^T
                                   X = (a I + b A + c A A) X
                with a = 3.4445, b = -4.7750, c = 2.0315

                All other parameters are updated by AdamW with the same lr, weight_decay,
                beta1, beta2 and eps: vectors, tensors with three or more dimensions,
                matrices with one row or column, and parameters that
                stx_param_elementwise declares not to be hidden matrices (embeddings,
                output matrices, position tables)

   Why Muon orthogonalises. Adam treats a matrix as a list of numbers. A layer uses it
   as a linear map, and an update changes the output by at most the largest singular
   value of the update (times the length of the input). Of all updates with the same
   largest singular value, the steepest descent is U V^T, where u = U S V^T is the
   singular value decomposition: it moves all directions equally far, while u itself
   moves mostly along the few directions with large singular values. No decomposition
   is computed: an odd polynomial of X changes the singular values s and leaves U and
   V, and five times a s + b s^3 + c s^5 maps every s from 0.005 to 1 to between 0.68
   and 1.16. (Coefficients that converge to exactly 1 would lift small s more slowly.)
   The elements of U V^T have a root mean square of 1 / sqrt(max(rows, cols)), so those
   of the update have about 0.2, as is usual for AdamW: one lr and one weight_decay
   serve both kinds of parameters. A matrix that stacks several maps of one input, such
   as the gates of SRU, or keys and values, is orthogonalised as a whole.

   Groups. stx_params_set_rule gives parameters a factor of lr, a weight_decay, or none,
   and freezes parameters. In the formulas, lr is then the product with the factor.
   decay_matrices is the usual rule for Transformers: no decay of biases and gains, as in
   GPT (Radford et al. 2018, section 4.1), nor of embeddings and other sets of vectors.

   Clipping. clip_value limits each element of the gradient; clip then limits a norm. For
   Adagrad, this is the norm of each tensor, and the factor scales the step but not the
   accumulated squares, as in the authors' code of 1905.07799. (A factor in both would
   cancel, because Adagrad divides by the root of the sum of squares.) For all other
   optimisers, it is the norm of all gradients together, and the factor is
   clip / (norm + 1e-6) if that is less than 1. */
typedef struct stx_optim_desc {
    int    kind;            /* STX_SGD ..; 0: STX_ADAM */
    double momentum;        /* SGD; 0: none. Muon; 0: 0.95 */
    double beta1, beta2;    /* Adam, RAdam, LAMB, Muon. 0: 0.9 and 0.999. -1: a beta of 0,
                               no averaging */
    double eps;             /* 0: 1e-8 for Adam, RAdam and Muon, 1e-6 for LAMB, 1e-10 for
                               Adagrad. A true 0 is not possible: the update would
                               divide by 0 where all gradients were 0. Use a very small
                               value */
    double weight_decay;    /* SGD, Adam: added to the gradient as weight_decay theta.
                               AdamW, RAdam, LAMB, Muon: as above. Adagrad: must be 0.
                               A parameter's stx_param_rule.weight_decay replaces it */
    double clip;            /* largest norm of the gradient; 0: no limit */
    int    radam_skip;      /* RAdam with rho < 5. 1: update m and v only, without weight
                               decay, as in the authors' package since July 2021. 0: the
                               formula above, as in earlier versions of the package */
    int    eps_hat;         /* Adam, AdamW. 1: the form with eps_hat, as in TensorFlow and
                               Keras */
    double clip_value;      /* limits elements of the gradient to [-clip_value, clip_value],
                               except infinities and NaN; 0: no limit */
    double trust_max;       /* LAMB: limit on |theta| in phi, 10 in NVIDIA's code; 0: no limit */
    int    no_correction;   /* LAMB. 1: do not divide by 1 - beta^t, as in NVIDIA's
                               Transformer-XL */
    int    decay_matrices;  /* 1: weight_decay applies to the matrices that Muon would
                               orthogonalise, and to no other parameters: not to biases,
                               normalisation, recurrent vectors, embeddings, output
                               matrices and position tables */
} stx_optim_desc;

/* A chunk of at most 4096 elements of a parameter. The kernels process parameters in
   such chunks. */
typedef struct stx_optim_chunk {
    stx_real *p, *g;        /* (n): parameter and gradient */
    stx_real *s[2];         /* (n): state, see stx_optim.state; NULL if unused */
    size_t    n, tensor;    /* n: number of elements; tensor: index of the parameter in the list */
    stx_real  lr_factor;    /* see stx_param_rule */
    stx_real  decay;        /* weight decay */
    stx_real  lr;           /* learning rate of this update, including all factors */
} stx_optim_chunk;

/* The state of an optimiser's updates, in device memory. The device decides whether to
   apply an update, so the host need not wait for the gradient norm. */
typedef struct stx_update {
    double   lr;                        /* learning rate of the next update */
    double   norm;                      /* L2 norm of the last gradient, before clipping */
    uint64_t step, skipped;             /* step: updates applied; skipped: updates skipped
                                           because a gradient was not finite */
    int      ok;                        /* 1: the last update was applied */
    stx_real factor;                    /* clipping factor of the gradient */
    stx_real correction1, correction2;  /* divisors of m and v. Adam: 1 - beta^t; RAdam:
                                           (1 - beta1^t) / r for m, 1 for v */
    int      plain;                     /* 1: the update does not divide by sqrt(v)
                                           (RAdam with rho < 5) */
} stx_update;

/* An optimiser, owned by the context. On a GPU, the fields step, skipped and grad_norm
   are current as of the last stx_optim_sync; on a CPU, they are always current. */
typedef struct stx_optim {
    stx_params    *params;
    stx_optim_desc desc;        /* with the defaults filled in */
    size_t         count;       /* number of parameters */
    stx_tensor   **state[2];    /* [count]: momentum (SGD), sum of squares (Adagrad), or
                                   m and v; NULL where unused and for frozen parameters.
                                   Muon: momentum and NULL for a matrix. With
                                   stx_group_desc.shard, each tensor (n) contains only
                                   this rank's share, or is NULL if the rank has none */
    uint8_t       *is_matrix;   /* [count]: 1: STX_MUON orthogonalises the update of this
                                   parameter; NULL for other optimisers */
    uint64_t       step;        /* updates applied */
    uint64_t       skipped;     /* updates skipped because a gradient was not finite */
    double         grad_norm;   /* L2 norm of the last gradient, before clipping */
    size_t         chunks;      /* total number of chunks of all parameters */
    size_t        *first;       /* [count + 1]: index of each parameter's first chunk; the
                                   last entry is `chunks`. A frozen parameter has none */
    stx_optim_chunk *chunk;     /* [chunks], in parameter order, on the device. With
                                   stx_group_desc.shard, chunks of other ranks have
                                   n = 0 */
    double        *squares;     /* on the device, (chunks): the sum of g^2 of each chunk.
                                   For LAMB, the sums of theta^2 and u^2, (chunks,2),
                                   follow; for Muon, the sums of u^2, (chunks) */
    stx_real      *scratch[4];  /* Muon: on the device, like activations: X, the next X, A,
                                   and a I + b A + c A A of the largest matrix */
    stx_update    *update;      /* on the device */
    int            slot;        /* index of the optimiser in the context */
    double         lr;          /* learning rate that was set most recently */
} stx_optim;

/* Creates an optimiser for the parameters of the list that are not frozen, valid until
   stx_destroy. The desc is copied; NULL means Adam with defaults. If parameters are added
   later, stx_optim_step fails. Returns NULL and sets an error if the desc is invalid, all
   parameters are frozen, or memory runs out. */
STX_DEF stx_optim *stx_optim_create(stx_params *p, const stx_optim_desc *d);

/* Updates the parameters from their gradients with learning rate lr >= 0, then zeroes the
   gradients. Returns 1. If a gradient is not finite, skips the update, zeroes the
   gradients and returns 0. Returns 0 after an error. On a GPU, 1 only means that the
   update was launched: the device decides whether to skip it; see stx_optim_sync. */
STX_DEF int stx_optim_step(stx_optim *o, double lr);

/* Sets the learning rate for steps that stx_step_run replays, which do not call
   stx_optim_step. */
STX_DEF void stx_optim_set_lr(stx_optim *o, double lr);

/* Waits for the last update, makes o->step, o->skipped and o->grad_norm current, and
   returns what stx_optim_step would have returned on a CPU. */
STX_DEF int stx_optim_sync(stx_optim *o);

/* One update runs these kernels, in this order, on `count` chunks:

       stx_clip_values      limits g to [-c, c]; only with clip_value
       stx_sum_squares      out (count) = sum of g^2 of each chunk
       stx_optim_prepare    computes the fields of u from `squares`, and `lr` of each
                            chunk, which includes lr_factor. For Adagrad, `lr` also
                            includes the clipping factor of the tensor, whose chunks are
                            contiguous; `lr` is 0 if radam_skip applies
       stx_.._update        updates p and the state if u->ok is 1; always zeroes g

   LAMB and Muon run other kernels before their update, see below. */
STX_KERNEL(stx_clip_values, (stx_ctx *x, const stx_optim_chunk *chunk, size_t count, stx_real c))
STX_KERNEL(stx_sum_squares, (stx_ctx *x, double *out, const stx_optim_chunk *chunk, size_t count))
STX_KERNEL(stx_optim_prepare, (stx_ctx *x, stx_update *u, stx_optim_chunk *chunk, size_t count,
                               const double *squares, const stx_optim_desc *d))
STX_KERNEL(stx_sgd_update, (stx_ctx *x, const stx_update *u, const stx_optim_chunk *chunk,
                            size_t count, stx_real momentum))
STX_KERNEL(stx_adagrad_update, (stx_ctx *x, const stx_update *u, const stx_optim_chunk *chunk,
                                size_t count, stx_real eps))

/* Scalars of Adam, AdamW, RAdam, LAMB and Muon. */
typedef struct stx_adam_args {
    stx_real beta1, rest1;  /* rest1 = 1 - beta1, computed in double: in float, 1 - 0.999f
                               has a relative error of 1e-5 */
    stx_real beta2, rest2;  /* rest2 = 1 - beta2 */
    stx_real eps;
    int      decoupled;     /* 1: the weight decay acts on the parameter (AdamW, RAdam,
                               Muon); 0: it is added to the gradient (Adam) or to u
                               (LAMB) */
} stx_adam_args;

/* Update kernel of Adam, AdamW and RAdam. */
STX_KERNEL(stx_adam_update, (stx_ctx *x, const stx_update *u, const stx_optim_chunk *chunk,
                             size_t count, const stx_adam_args *a))

/* LAMB has two kernels. The first updates m and v, replaces g with u, and writes the
   sums of theta^2 and u^2 of each chunk to squares (count,2). The second computes phi of
   each tensor from these sums, multiplies `lr` of the tensor's chunks by phi, and
   updates p. */
STX_KERNEL(stx_lamb_direction, (stx_ctx *x, const stx_update *u, const stx_optim_chunk *chunk,
                                size_t count, double *squares, const stx_adam_args *a))
STX_KERNEL(stx_lamb_update, (stx_ctx *x, const stx_update *u, stx_optim_chunk *chunk, size_t count,
                             const double *squares, double trust_max))

/* The kernels of Muon. A chunk of a matrix is one with s[1] NULL.
       stx_muon_direction   updates buf of the matrices, replaces their g with u, and sets
                            squares (count) to the sums of u^2 of their chunks. Does
                            nothing if the update is skipped
       stx_muon_normalise   X (n) = u / (|u|_F + 1e-7) for one matrix; squares (count):
                            the sums of its chunks
       stx_muon_symmetric   a GEMM whose result C (n,n) is symmetric
       stx_muon_polynomial  B (n,n) = a I + b A; A (n,n)
       stx_muon_update      p -= lr (g + decay p) for matrices, whose g is now the
                            orthogonalised and scaled direction; AdamW for other chunks */
STX_KERNEL(stx_muon_direction, (stx_ctx *x, const stx_update *u, const stx_optim_chunk *chunk,
                                size_t count, double *squares, stx_real momentum))
STX_KERNEL(stx_muon_normalise, (stx_ctx *x, stx_real *X, const stx_real *u, size_t n,
                                const double *squares, size_t count))
STX_KERNEL(stx_muon_symmetric, (stx_ctx *x, const stx_gemm_args *g))
STX_KERNEL(stx_muon_polynomial, (stx_ctx *x, stx_real *B, const stx_real *A, size_t n, stx_real a,
                                 stx_real b))
STX_KERNEL(stx_muon_update, (stx_ctx *x, const stx_update *u, const stx_optim_chunk *chunk,
                             size_t count, const stx_adam_args *a))

/* A list of parameters to clamp, valid until stx_destroy. stx_params_subset creates it
   and must be called before the first step. It returns NULL and sets an error if a
   tensor is not a parameter or memory runs out. stx_clamp_params limits all elements to
   [lo, hi]. */
typedef struct stx_param_subset stx_param_subset;

STX_DEF stx_param_subset *stx_params_subset(stx_ctx *x, stx_tensor *const *t, size_t count);
STX_DEF void stx_clamp_params(stx_ctx *x, const stx_param_subset *p, double lo, double hi);

/* Limits the parameter elements of each chunk to [lo, hi]. */
STX_KERNEL(stx_clamp, (stx_ctx *x, const stx_optim_chunk *chunk, size_t count, stx_real lo,
                       stx_real hi))


// >>api: steps

/* Metrics. On a GPU, a step that waits for a result stalls, because the host can no
   longer launch kernels ahead of the device. Instead, a step can store scalars:
   stx_metric_set enqueues metric[slot] = s t[0], or += if add is 1, in double. After
   the step, stx_metric_get waits for the device and returns the value, or NaN after an
   error. slot must be below STX_MAX_METRICS. A context can have up to STX_MAX_OPTIMS
   optimisers. */
enum { STX_MAX_METRICS = 128, STX_MAX_OPTIMS = 64 };

STX_DEF void stx_metric_set(stx_ctx *x, int slot, const stx_tensor *t, double s, int add);
STX_DEF double stx_metric_get(stx_ctx *x, int slot);

/* Waits for the last step and returns a host copy of a small parameter whose values the
   host needs between steps, such as learned spans. A context can mirror at most 512
   tensors with a total of 8192 elements. Returns NULL after an error. */
STX_DEF const stx_real *stx_param_mirror(stx_ctx *x, const stx_tensor *t);

/* Runs one step, fn(user), which makes all calls from stx_begin to stx_optim_step. On a
   GPU, repeated steps are captured as a CUDA graph and then replayed: the host starts
   the whole step with one launch, without calling fn. Returns stx_ok(x).

   key identifies everything that the host decides in fn: shapes, sizes and addresses of
   memories, branches. If two steps have the same key, fn must perform the same work in
   both. See stx_step_key.

   A step is captured if the previous step had the same key and transferred no data
   between host and device; fn is then called while its work is recorded. Alternating
   steps, such as one that reads memory `a` and writes `b` followed by one that reads
   `b` and writes `a`, are not captured, because a replay changes nothing on the host:
   perform both in one fn.

   Only these may differ between replays: tokens (stx_tokens_set), learning rates
   (stx_optim_set_lr), scalars (stx_scalar_set) and random numbers, which continue as if
   fn had run. A step that reads anything else from the host (stx_input, stx_tokens,
   stx_set, a learning rate not set by stx_optim_set_lr, a changed scalar), copies to it
   (stx_get, stx_item, stx_metric_get, stx_optim_sync) or allocates memory is not
   replayed. New parameters and optimisers discard all captured steps. */
typedef void (*stx_step_fn)(void *user);
STX_DEF int stx_step_run(stx_ctx *x, uint64_t key, stx_step_fn fn, void *user);

/* Returns why the last step of stx_step_run was neither captured nor replayed as a CUDA
   graph: "not captured: " and the first reason, with the CUDA or NCCL error if there was
   one. Such a step gives the same results but is slower. Returns "" if the step was
   captured or replayed, before the first step, on a CPU, and with desc.no_graph. The
   first steps allocate memory, and keys differ while a memory fills, so a reason matters
   only if it persists. The text belongs to x and is valid until the next step. New
   parameters and optimisers clear it. */
STX_DEF const char *stx_step_replay_status(const stx_ctx *x);

/* Keys are FNV-1a hashes. stx_step_key hashes salt, the address of the model, and the
   shapes and addresses of the tokens; each pointer can be NULL. stx_key_add adds a
   value: call it for every other decision that the host makes. */
STX_DEF uint64_t stx_step_key(const void *model, const stx_ids *ids, const stx_ids *targets,
                              uint64_t salt);
STX_DEF uint64_t stx_key_add(uint64_t key, uint64_t value);


// >>api: group

/* Data-parallel training. A program is started N times, as ranks 0 .. N-1 of a group, on
   one or several machines. All ranks have the same model. Rank r computes its share of
   every batch, the streams [r B/N, (r+1) B/N) of B. In a group:
     - a loss is the mean over the rows of this rank. stx_optim_step first computes the
       mean of the gradients of all ranks, so clipping, skipped updates and the update
       itself correspond to the whole batch and are identical in all ranks. A loss that
       ignores rows (stx_token_loss.mean) divides by the mean number of rows per rank, so
       that the mean of the ranks' losses is the mean over all rows;
     - random numbers are the same as in one process with the whole batch: dropout masks
       belong to streams, and each rank draws the masks of its streams (see
       stx_dropout_replicated for the exception);
     - the same seed gives the same initial parameters in all ranks. After loading or
       changing parameters in one rank, call stx_group_broadcast_params;
     - with STX_EVAL, nothing is exchanged: each rank can evaluate a part of the data, or
       one rank can evaluate all of it.
   N ranks therefore compute the same results as one process with the whole batch, up to
   the order of sums. Repeated runs with the same N are bit-identical.

   Collective calls. Functions that are marked (all ranks) must be called by every rank,
   in the same order and with equal sizes; if one rank does not, the others wait for it.
   Errors are local: each rank must check stx_ok. If a rank exits without stx_group_leave
   or is killed, mpirun terminates the others and reports which rank on which host failed.

   With SEQTX_MPI, groups use MPI and run on CPUs. With SEQTX_NCCL, they use NCCL and run
   on GPUs; the processes are started by MPI, or by torchrun or srun, whose environment
   variables are read. Without either, a group can only have one rank. docs/distributed.md
   is a guide. */

/* How this process was started, according to the environment variables that mpirun, srun
   and torchrun set (OMPI_COMM_WORLD_*, PMI_*, SLURM_*, RANK with WORLD_SIZE). */
typedef struct stx_launch_info {
    int rank, ranks;        /* this rank, and the number of ranks in the job; 0 and 1 if
                               started alone */
    int local, locals;      /* this rank's index among the ranks on this machine, and
                               their number */
    const char *by;         /* name of the environment variable that was found; NULL if
                               started alone */
} stx_launch_info;

STX_DEF stx_launch_info stx_get_launch_info(void);

/* Configuration of a group. Zero means the default. */
typedef struct stx_group_desc {
    size_t bucket;      /* gradient elements per all-reduce, at most 2^28; 0: 1048576, or
                           4194304 on a GPU. Large buckets need fewer messages; small ones
                           are sent earlier */
    int    shard;       /* 1: each rank stores optimiser state for its share of the
                           parameters only, updates this share and sends it to the others
                           (ZeRO stage 1, Rajbhandari et al. 2020, 1910.02054). Takes less
                           memory and sends the same number of bytes. A matrix that
                           STX_MUON orthogonalises belongs to one rank */
} stx_group_desc;

/* Joins the group in which the process was started (all ranks). Call it before the first
   stx_params_create. d NULL: defaults. A process that was started alone becomes a group
   of one. MPI is initialised unless the program has already done so. If desc.threads is
   0, ranks that share processors divide them equally. Returns 1; or sets an error, which
   says how the process was started and what this build supports, and returns 0. */
STX_DEF int stx_group_join(stx_ctx *x, const stx_group_desc *d);

/* Leaves the group at the end of the program (all ranks). When the last context leaves,
   MPI is finalised if stx_group_join initialised it; no context can join afterwards. */
STX_DEF void stx_group_leave(stx_ctx *x);

/* Aborts the group; for use by a rank that cannot continue. With MPI, this ends the
   processes of all ranks immediately, including this one. With NCCL alone, this process
   must then exit with an error, and the launcher (torchrun, srun --kill-on-bad-exit=1)
   ends the others. Does nothing without a group. */
STX_DEF void stx_group_abort(stx_ctx *x, int code);

/* Return the rank of this process and the number of ranks; 0 and 1 without a group. */
STX_DEF int stx_rank(const stx_ctx *x);
STX_DEF int stx_ranks(const stx_ctx *x);

/* Exchange host memory (all ranks). Return 1, or set an error and return 0. Without a
   group, the data is unchanged.
       stx_group_sum           v (n) = sum over the ranks, bit-identical in all of them
       stx_group_max           v (n) = maximum over the ranks; NaN if any rank has NaN
       stx_group_broadcast     copies n bytes of rank `from` to all ranks
       stx_group_send_bytes    copies n bytes of rank `from` to rank `to`; other ranks do
                               nothing */
STX_DEF int stx_group_sum(stx_ctx *x, double *v, size_t n);
STX_DEF int stx_group_max(stx_ctx *x, double *v, size_t n);
STX_DEF int stx_group_broadcast(stx_ctx *x, void *bytes, size_t n, int from);
STX_DEF int stx_group_send_bytes(stx_ctx *x, void *bytes, size_t n, int from, int to);

/* Copies the parameters of rank 0 to all ranks (all ranks). Returns 1, or 0 after an
   error. */
STX_DEF int stx_group_broadcast_params(stx_params *p);

/* Returns a scalar (1) on the device: n divided by the mean of n over the ranks. It is
   1 without a group, and 0 if n is 0 in every rank. Must be called in STX_TRAIN (all
   ranks). If a loss is a mean over n elements of this rank, multiply it by this factor:
   the mean of the ranks' losses is then the mean over all elements. stx_token_loss.mean
   already includes this factor. */
STX_DEF stx_tensor *stx_group_loss_scale(stx_ctx *x, double n);

/* Overlaps the gradient exchange with the backward pass. Call it before the last
   stx_backward of an update (all ranks): the gradients of the optimiser's parameters
   are then sent while the gradients of earlier layers are being computed, instead of in
   stx_optim_step. Only one optimiser can do this at a time. */
STX_DEF void stx_group_overlap(stx_optim *o);


// >>api: schedules

/* Learning rate schedules: the rate at update n = 1, 2, .., with W = warmup. All kinds
   except STX_LR_NOAM begin with a linear warm-up from lr_start to lr: lr_start +
   (lr - lr_start) n / W. */
enum {
    STX_LR_CONSTANT = 0,    /* lr */
    STX_LR_COSINE,          /* lr_min + (lr - lr_min)
                               (1 + cos(pi (n - W) / (total - W))) / 2 */
    STX_LR_INV_SQRT,        /* lr sqrt(W / n) */
    STX_LR_RECURSIVE,       /* lr_min + (lr - lr_min) (1 + cos(pi (n - 1) / total))
                                                     / (1 + cos(pi (W - 1) / total)):
                               SRU++, a cosine over all updates, scaled so that it is lr
                               at the end of the warm-up */
    STX_LR_NOAM             /* lr / sqrt(dim) min(n^-0.5, n W^-1.5), Vaswani et al. 2017,
                               1706.03762, section 5.3 */
};

typedef struct stx_schedule {
    int      kind;
    double   lr;            /* peak learning rate */
    double   lr_start;      /* rate at n = 0, where the warm-up begins */
    double   lr_min;        /* final rate of a cosine */
    uint64_t warmup;        /* W, number of warm-up updates */
    uint64_t total;         /* a cosine reaches lr_min at n = total (RECURSIVE: at
                               n = total + 1) and stays there; 0: no cosine */
    int      literal;       /* 1: formulas of the original code, see below */
    double   dim;           /* STX_LR_NOAM: model width; 0: 1 */
    double   decay;         /* all kinds: the rate is multiplied by this after decay_from
                               updates, and again after every decay_every updates; 0:
                               never */
    uint64_t decay_from, decay_every;   /* decay_every 0: multiply only once */
} stx_schedule;

/* Returns the learning rate at update n, or 0 if s is NULL. literal = 1 reproduces
   accidental behaviour of the original code:
       Transformer-XL    with k = n - 1: the first update has the full lr; the warm-up is
                         lr k / W; the cosine is not shifted by the warm-up, cos(pi k /
                         total); a constant rate remains at lr (W - 1) / W; the inverse
                         square root is lr k / W^1.5 and then lr / sqrt(k)
       STX_LR_RECURSIVE  the warm-up is lr k / W, as in SRU++ for words: the first update
                         has rate 0 and the cosine starts at lr (W - 1) / W
       STX_LR_NOAM       no effect */
STX_DEF double stx_schedule_lr(const stx_schedule *s, uint64_t n);


// >>api: sampling

/* Options for sampling a token from softmax(logits / temperature). The repetition penalty
   of CTRL (Keskar et al. 2019, 1909.05858, section 4.1) applies first: it divides the
   positive logits of the tokens in `recent`, and multiplies the negative ones. */
typedef struct stx_sampling {
    double temperature;     /* 0: always the most likely token */
    double top_p;           /* keep the smallest set of tokens whose total probability is at
                               least top_p; 0 or 1: all. Applied after top_k */
    size_t top_k;           /* keep the top_k most likely tokens; 0: all */
    uint64_t seed;
    double repetition_penalty;      /* 0 or 1: off; 1.1 to 1.3 is usual */
    const int32_t *recent;  /* (recent_count) ids in any order, such as the last 64 tokens; how
                               often an id occurs does not matter */
    size_t recent_count;
} stx_sampling;

/* Samples a token from logits or log-probabilities (V); adding a constant to all of
   them has no effect. The result depends on the arguments only, so pass a different
   counter for each token. If s is NULL, returns the most likely token. work is scratch
   memory of V elements, not needed at temperature 0 without a penalty. Logits of
   -infinity have probability 0. Returns -1 if V is 0, if logits is NULL or contains NaN
   or +infinity, if work is NULL and needed, or if the penalty is on and s->recent is NULL
   or contains an id out of range. */
STX_DEF int32_t stx_sample(const stx_sampling *s, uint64_t counter, const stx_real *logits,
                           size_t V, stx_real *work);
