#pragma once
#include "config.h"


/* Letters used in this file

       B   streams (rows of a batch)            V   vocabulary size, or classes
       T   query length: tokens per call        L   layers
       S   key length                           N   rows: leading dimensions, flattened
       C   channels: the last dimension         Ci  input channels
       H   heads                                O   output channels
       D   head dimension, C / H                P   rows of a table of relative positions

   n is a number of elements, d0 to d3 are dimensions, and ld.. is a row stride in
   elements. dx is the gradient of x. "(..,C)" is a tensor with any leading dimensions.
   Exceptions: in stx_gemm_args, A, B, C, M, N and K have their BLAS meanings, and in
   stx_attention_args, N is the number of persistent vectors per head. */


// >>api: version

/* Returns the version string of the implementation. A program that loads a shared
   library should compare the string with STX_VERSION, because struct layouts can differ
   if MAJOR or MINOR differs. In #if, use STX_VERSION_AT_LEAST(0, 2, 0). */
STX_DEF const char *stx_version(void);


// >>api: context

enum { STX_CPU = 0, STX_CUDA = 1 };                 /* stx_desc.device */
enum { STX_PREC_F32 = 0, STX_PREC_BF16 = 1 };       /* stx_desc.precision */
enum { STX_EVAL = 0, STX_TRAIN = 1 };               /* mode of stx_begin */

/* Error codes. */
enum {
    STX_OK = 0,
    STX_ERR_ARG,        /* an argument or an option has a bad value */
    STX_ERR_SHAPE,      /* shapes do not match */
    STX_ERR_MEMORY,     /* out of memory, or max_bytes exceeded */
    STX_ERR_IO,         /* a file could not be read or written */
    STX_ERR_FORMAT,     /* a file's contents are invalid or unexpected */
    STX_ERR_DEVICE      /* the device failed, or is not part of this build */
};

/* Configuration of a context. Zero means the default. stx_ctx_desc returns the desc with
   the defaults filled in.

   precision = STX_PREC_BF16. On a CPU, the inputs of matmuls with more than 3 rows and of
   attention are rounded to bfloat16; sums and everything else are float. This is fast on
   processors with AVX512-BF16, AMX or BFDOT (ARM) and slower than f32 on others; see
   stx_backend. On a GPU, activations and their gradients are stored as bfloat16;
   parameters and their gradients, optimiser state, statistics, scalars and all sums are
   float.

   dry = 1. Calls check their arguments and allocate memory as usual, but no kernel runs,
   nothing is initialised with random values, and little memory is written. A dry step
   takes milliseconds; stx_peak_bytes then returns the memory that a step needs, and
   max_bytes tests whether a limit is sufficient. Results are undefined, except for
   parameters with constant initial values and tensors written by stx_set. */
typedef struct stx_desc {
    int      device;        /* STX_CPU, or STX_CUDA in builds with SEQTX_CUDA */
    int      precision;     /* STX_PREC_F32 or STX_PREC_BF16 */

    int      gpu;           /* CUDA device index of the GPU */
    int      tf32;          /* 1: f32 matmuls on a GPU use TF32 inputs (10 mantissa bits),
                               which is several times faster */
    int      no_graph;      /* 1: stx_step_run never replays a step as a CUDA graph */
    int      tune;          /* 1: for each shape of a GPU matmul, time up to 8 algorithms and
                               keep the fastest. The choice, and thus the last bits of
                               results, can differ between processes */

    int      threads;       /* 1 to 4096; 0: one per processor that the process may use.
                               Worker threads are started by the first large loop and
                               sleep when idle. 1: only the calling thread, as with
                               SEQTX_NO_THREADS */
    uint64_t seed;          /* seed of all random numbers */
    size_t   max_bytes;     /* limit on the context's memory (with a GPU: on its device
                               memory only); 0: no limit */
    size_t   chunk_bytes;   /* arenas grow by at least this many bytes; 0: 1 MiB */
    int      dry;           /* 1: measure memory without computing; CPU only */

    void  *(*alloc)(void *user, size_t bytes);      /* NULL: malloc */
    void   (*release)(void *user, void *p);         /* NULL: free */
    void    *user;                                  /* first argument of alloc and
                                                       release */
} stx_desc;

typedef struct stx_ctx stx_ctx;

/* Creates a context. The desc is copied; NULL means all defaults. Returns NULL only if
   there is no memory for the context itself. Any other problem, such as a missing device,
   sets a sticky error in the returned context. Free it with stx_destroy. */
STX_DEF stx_ctx *stx_create(const stx_desc *desc);

/* Frees the context and everything that was created in it. x may be NULL. */
STX_DEF void stx_destroy(stx_ctx *x);

/* Returns the desc with the defaults filled in. */
STX_DEF const stx_desc *stx_ctx_desc(const stx_ctx *x);

/* Returns the name of the matmul implementation, such as "avx512", "avx512 bf16" or
   "cblas", or of the GPU. */
STX_DEF const char *stx_backend(const stx_ctx *x);

/* Returns 1 if matmuls with STX_PREC_BF16 use bfloat16 instructions on this CPU. If it
   returns 0, they compute with float and are not faster than STX_PREC_F32. */
STX_DEF int stx_cpu_has_bf16(void);

/* stx_ok returns 1 if no error has occurred, stx_error_code returns STX_OK or an
   STX_ERR_ code, and stx_error returns the text of the first error, or "". */
STX_DEF int stx_ok(const stx_ctx *x);
STX_DEF int stx_error_code(const stx_ctx *x);
STX_DEF const char *stx_error(const stx_ctx *x);

/* Clears the error. The current step is incomplete, so continue with stx_begin. */
STX_DEF void stx_clear_error(stx_ctx *x);

/* Sets the sticky error unless one is already set. Intended for model families and new
   ops. */
STX_DEF void stx_fail(stx_ctx *x, int code, const char *fmt, ...) STX_PRINTF(3, 4);

/* Sets the error "OP: FIELD: expected EXPECTED, got GOT", with code STX_ERR_ARG. Returns
   0. */
STX_DEF int stx_bad_value(stx_ctx *x, const char *op, const char *field, double got,
                          const char *expected);

/* Makes bytes printable for an error text: writes the first 60 of the n bytes at s to q,
   followed by "..." if there are more. Invisible characters, and bytes that are not
   UTF-8, are written as \xNN. q must have STX_QUOTE bytes. Returns q. */
#define STX_QUOTE 256
STX_DEF const char *stx_quote(char *q, const void *s, size_t n);

/* Starts a step: rewinds the step arena, which invalidates all tensors that ops returned
   since the last stx_begin, and clears the tape. With STX_TRAIN, ops are recorded,
   dropout is applied and the step index is incremented; with STX_EVAL, none of this
   happens. */
STX_DEF void stx_begin(stx_ctx *x, int mode);

/* Like stx_begin(x, STX_TRAIN), for a batch that is processed in equal parts, one after
   another, because it does not fit in memory: part 0 first. The parts of a batch have
   one step index, and the random numbers of a part are those that its streams would have
   if the batch were not divided. In a group, each rank has a share of each part. N ranks
   with one part each compute the same bits as one process with N parts, if the loss of
   each of these parts is divided by N (docs/bits.md; on a CPU). */
STX_DEF void stx_begin_part(stx_ctx *x, size_t part);

/* For new ops with random numbers: the index of the streams of this step among the equal
   shares of the batch, part * stx_ranks + stx_rank. 0 if the batch is not divided. */
STX_DEF size_t stx_batch_share(const stx_ctx *x);

/* Returns 1 if the current step was started with STX_TRAIN. */
STX_DEF int stx_training(const stx_ctx *x);

/* The step index is the number of steps started with STX_TRAIN. All random numbers depend
   on it: save it in checkpoints and restore it to resume. */
STX_DEF uint64_t stx_step_index(const stx_ctx *x);
STX_DEF void stx_set_step_index(stx_ctx *x, uint64_t index);

/* Memory in bytes. stx_bytes returns the amount currently reserved; stx_peak_bytes
   returns the largest amount in use at any time, in arenas and blocks. */
STX_DEF size_t stx_bytes(const stx_ctx *x);
STX_DEF size_t stx_peak_bytes(const stx_ctx *x);

/* Allocate host memory, aligned to 64 bytes, regardless of the context's device. All
   three return NULL and set an error if memory runs out.
       stx_persist            zeroed, valid until stx_destroy
       stx_step_host_bytes    not zeroed, valid until the next stx_begin
       stx_block              zeroed, valid until stx_block_free or stx_destroy */
STX_DEF void *stx_persist(stx_ctx *x, size_t bytes);
STX_DEF void *stx_step_host_bytes(stx_ctx *x, size_t bytes);
STX_DEF void *stx_block(stx_ctx *x, size_t bytes);
STX_DEF void stx_block_free(stx_ctx *x, void *p);       /* p may be NULL */

/* Allocate device memory for the elements of tensors. On a CPU it is host memory. On a
   GPU, only kernels may access it, and an activation takes 2 bytes in STX_PREC_BF16, so
   the address of element i is stx_offset_ptr(x, p, i) and not p + i.
       stx_step_activations     n activations, valid until the next stx_begin
       stx_step_device_bytes    other data (statistics, scratch), valid until the next
                                stx_begin
       stx_block_activations    n activations, zeroed, valid until freed by
                                stx_block_device_free, or until stx_destroy
       stx_block_f32            like stx_block_activations, but n floats in every
                                precision */
STX_DEF stx_real *stx_step_activations(stx_ctx *x, size_t n);
STX_DEF void *stx_step_device_bytes(stx_ctx *x, size_t bytes);
STX_DEF stx_real *stx_block_activations(stx_ctx *x, size_t n);
STX_DEF stx_real *stx_block_f32(stx_ctx *x, size_t n);
STX_DEF void stx_block_device_free(stx_ctx *x, stx_real *p);       /* p may be NULL */
STX_DEF stx_real *stx_offset_ptr(const stx_ctx *x, const stx_real *p, size_t i);

/* stx_upload copies n elements from host to device memory; stx_download copies them
   back, and waits for the device. */
STX_DEF void stx_upload(stx_ctx *x, stx_real *to, const stx_real *host, size_t n);
STX_DEF void stx_download(stx_ctx *x, stx_real *host, const stx_real *from, size_t n);

/* stx_bytes_of returns the product a b c, and stx_size_add returns n + a b. Both return
   SIZE_MAX on overflow. An allocation of SIZE_MAX bytes fails with an error. */
STX_DEF size_t stx_bytes_of(size_t a, size_t b, size_t c);
STX_DEF size_t stx_size_add(size_t n, size_t a, size_t b);

/* Writes 128 random bits to out, computed with Philox4x32-10 (Salmon et al. 2011,
   "Parallel random numbers: as easy as 1, 2, 3"). They are a pure function of the key
   (seed) and the counter (hi, lo). */
STX_DEF void stx_philox(uint64_t seed, uint64_t hi, uint64_t lo, uint32_t out[4]);


// >>api: tensors

#define STX_MAX_DIM 4

/* A dense row-major tensor. The fields are read-only. On a CPU, data and grad may be
   accessed directly; on a GPU, only kernels may access them. */
typedef struct stx_tensor {
    stx_real *data;         /* `size` elements */
    stx_real *grad;         /* gradient, same shape, or NULL. A parameter has one unless
                               it is frozen; a variable keeps it until the next stx_begin.
                               The result of an op has one only during the backward pass,
                               until the backward function of the op has run */
    int       ndim;
    size_t    dim[STX_MAX_DIM];
    size_t    size;         /* product of the dimensions */
    int       needs_grad;   /* 1: stx_backward computes its gradient. 0 for a frozen
                               parameter (stx_param_rule) */
    int       is_param;     /* 1: made by stx_param */
    int       is_leaf;      /* 1: a parameter, a view of one, or a variable */
    int       is_f32;       /* 1: float even in STX_PREC_BF16 on a GPU, like parameters,
                               scalars and results computed only from them */
    const struct stx_tensor *view_of;   /* the parameter whose elements this tensor
                                           shares, or NULL. grad is a view of the
                                           parameter's gradient */
    size_t    view_offset;  /* index in `view_of` of this view's first element */
    size_t    padding;      /* number of zeros stored after the elements of a parameter.
                               Kernels read them but never write them; see "Padded logits"
                               in >>adaptive input and output */
    int       op_removed;   /* 1: a backward pass has removed from the tape the op that
                               computed this tensor */
    int       elementwise;  /* 1: see stx_param_elementwise */
} stx_tensor;

/* Token ids (B,T): `data` is on the host, and `device` is on the device; on a CPU, both
   are the same memory. Ops check ids on the host. */
typedef struct stx_ids {
    int32_t *data, *device;
    size_t   B, T;
    size_t   id_limit;      /* all ids must be below this: the smallest number of rows or
                               classes among the ops that have used them; 0: no op has
                               used them yet */
    int      ignores;       /* 1: all ops that have used the ids ignore `ignored_id`,
                               which may then be out of range; -1: at least one op does
                               not; 0: no op has used them yet */
    int32_t  ignored_id;
} stx_ids;

/* Create tensors from host memory, which is copied. Dimensions end at the first 0, and
   d0 must not be 0. All three return NULL and set an error if data is NULL or memory
   runs out.
       stx_input              a constant of this step
       stx_variable           an input with a gradient: read t->grad after stx_backward
       stx_constant_create    a constant that is valid until stx_destroy, so steps that
                              read it can be replayed (stx_step_run); stored like an
                              activation */
STX_DEF stx_tensor *stx_input(stx_ctx *x, const stx_real *data, size_t d0, size_t d1, size_t d2,
                              size_t d3);
STX_DEF stx_tensor *stx_variable(stx_ctx *x, const stx_real *data, size_t d0, size_t d1, size_t d2,
                                 size_t d3);
STX_DEF stx_tensor *stx_constant_create(stx_ctx *x, const stx_real *data, size_t d0, size_t d1,
                                        size_t d2, size_t d3);

/* A scalar (1) that the host changes between steps, such as a temperature, a noise
   level or the weight of a loss. It is a constant, float in every precision, and valid
   until stx_destroy. Ops read it on the device (stx_scale_by), so a replayed step uses
   the value that was set last. Call stx_scalar_set before the step: a step that sets a
   new value itself is not replayed. */
STX_DEF stx_tensor *stx_scalar_create(stx_ctx *x, double value);
STX_DEF void stx_scalar_set(stx_ctx *x, stx_tensor *scalar, double value);

/* Creates token ids of this step from B T values in host memory, which are copied.
   Returns NULL and sets an error if data is NULL, B or T is 0, or memory runs out. */
STX_DEF stx_ids *stx_tokens(stx_ctx *x, const int32_t *data, size_t B, size_t T);

/* stx_tokens_create returns token ids that are valid until stx_destroy, initially zeros.
   stx_tokens_set replaces them; a replayed step reads the new ids. It is an error if a
   new id is out of range for an op that has used these ids. */
STX_DEF stx_ids *stx_tokens_create(stx_ctx *x, size_t B, size_t T);
STX_DEF void stx_tokens_set(stx_ctx *x, stx_ids *ids, const int32_t *data);

/* Create an uninitialised tensor of this step, for use in new ops. stx_new_f32 creates
   a tensor that is float in every precision; use it for states and statistics. */
STX_DEF stx_tensor *stx_new(stx_ctx *x, size_t d0, size_t d1, size_t d2, size_t d3);
STX_DEF stx_tensor *stx_new_f32(stx_ctx *x, size_t d0, size_t d1, size_t d2, size_t d3);

/* stx_get copies the t->size elements of t to host memory, and stx_set copies them from
   host memory. */
STX_DEF void stx_get(stx_ctx *x, const stx_tensor *t, stx_real *out);
STX_DEF void stx_set(stx_ctx *x, stx_tensor *t, const stx_real *in);

/* Returns the first element of t, or NaN if t is NULL or an error is set. */
STX_DEF double stx_item(stx_ctx *x, const stx_tensor *t);

/* Copies the gradient of a parameter or variable (t->size elements) to host memory, after
   stx_backward. Returns 1. If no gradient reached t, or if t is the result of an op,
   writes zeros and returns 0. Returns 0 after an error. */
STX_DEF int stx_get_grad(stx_ctx *x, const stx_tensor *t, stx_real *out);

/* Initialisers for stx_param. `a` is the argument `a` of stx_param. */
enum {
    STX_ZEROS = 0,
    STX_CONSTANT,       /* every element is `a` */
    STX_NORMAL,         /* mean 0, standard deviation `a` */
    STX_UNIFORM,        /* uniform in [-a, a] */
    STX_TRUNCATED       /* normal with standard deviation `a`, redrawn until in [-2a, 2a].
                           Standard deviation of the result: 0.87962566103423978 a */
};

/* How a parameter is trained; see stx_params_set_rule. Zero means the default. */
typedef struct stx_param_rule {
    int    freeze;          /* 1: the parameter is frozen, that is, not trained. -1: it is
                               trained, for parameters that an earlier call froze */
    double lr;              /* factor of the learning rate; 0: 1 */
    double weight_decay;    /* in place of stx_optim_desc.weight_decay; -1: none */
} stx_param_rule;

/* A list of named parameters, for optimisers and checkpoints. Programs may read ctx,
   count, tensor, name and rule; the other fields are private. */
typedef struct stx_params {
    stx_ctx     *ctx;
    size_t       count, capacity;       /* count: number of parameters; capacity: slots in
                                           `tensor`, `name` and `rule` */
    stx_tensor **tensor;                /* [count] */
    const char **name;                  /* [count] */
    stx_param_rule *rule;               /* [count] */
    stx_real    *grads;                 /* block returned by stx_params_grads, or NULL */
    size_t       grads_size, grads_count;
    struct stx__arena *grads_arena;     /* arena that contains the gradients */
    stx_real    *earlier;               /* (earlier_size): gradients of earlier passes, or
                                           NULL; see stx__put_grads_aside */
    size_t       earlier_size;
    int          grads_state, aside;    /* STX__GRADS_..; aside: `earlier` has to be added */
    int          in_use;                /* 1: an optimiser holds gradient addresses */
    struct stx__buckets *buckets;       /* progress of the gradient exchange, see >>group */
    struct stx_params *next;            /* the context's next parameter list */
    /* Memory reserved by stx_params_make_contiguous: `reserve` and `reserve_grads` are
       the unused parts of the blocks for elements and gradients, and reserve_left is
       the number of elements in each. reserve_next is the size of the blocks that the
       next parameter will allocate. */
    stx_real    *reserve, *reserve_grads;
    size_t       reserve_left, reserve_next;
    ptrdiff_t    rng_offset;            /* see stx_params_rng_offset */
} stx_params;

/* Creates an empty list, valid until stx_destroy. Returns NULL and sets an error if
   memory runs out. */
STX_DEF stx_params *stx_params_create(stx_ctx *x);

/* Adds a parameter and its gradient, which is zeroed. Random initial values depend on the
   seed and on the number of parameters that the context already has. name is copied; it
   must be unique and is dotted by convention ("layers.0.ff.fc1.weight"). Dimensions end
   at the first 0. Returns the parameter, or sets an error and returns NULL. */
STX_DEF stx_tensor *stx_param(stx_params *p, int init, double a, const char *name, size_t d0,
                              size_t d1, size_t d2, size_t d3);

/* Reserves a block for the list's next parameters, n elements in total, and another for
   their gradients. stx_linear_concat can then use weight matrices with the same input as
   a single matrix. A parameter whose size is not a multiple of 64, or that does not fit,
   is allocated separately and ends the reservation. Returns 1, or 0 after an error. */
STX_DEF int stx_params_make_contiguous(stx_params *p, size_t n);

/* Draws the initial values of the next parameter as if `ahead` more parameters
   (negative: fewer) had been created before it. This preserves initial values if the
   order of the parameters changes. */
STX_DEF void stx_params_rng_offset(stx_params *p, ptrdiff_t ahead);

/* Change a parameter after its creation, for custom initial values. stx_param_scale
   multiplies rows [r0,r1) of the first dimension by s, in double; stx_param_fill sets
   them to v; stx_param_apply sets each element i to fn(user, i, old value). On a GPU,
   each call copies the parameter to the host and back. */
typedef double (*stx_init_fn)(void *user, size_t i, double was);
STX_DEF void stx_param_scale(stx_ctx *x, stx_tensor *param, size_t r0, size_t r1, double s);
STX_DEF void stx_param_fill(stx_ctx *x, stx_tensor *param, size_t r0, size_t r1, double v);
STX_DEF void stx_param_apply(stx_ctx *x, stx_tensor *param, stx_init_fn fn, void *user);

/* Declares that a parameter with two dimensions is not the matrix of a hidden layer:
   STX_MUON then updates it with AdamW. Call it before stx_optim_create for embeddings
   and output matrices, whose rows belong to separate tokens, for the first and last
   projection of a model, and for sets of vectors such as position tables. The models of
   this library have done so. See also stx_optim_desc.decay_matrices. Returns param, which
   can be NULL. */
STX_DEF stx_tensor *stx_param_elementwise(stx_tensor *param);

/* Parameter groups. Sets the rule of the parameters that `patterns` selects, which is a
   list of patterns for names, separated by commas:
       *         any characters, also dots, or none
       ?         any character
       [2-11]    a number from 2 to 11
       !         at the beginning of a pattern: its parameters are not selected, although
                 an earlier pattern selects them
   All other characters match themselves. For example, to train the output of a model and
   its layers from 8 on, the latter with a tenth of the learning rate:

       stx_param_rule frozen = {0}, slow = {0};
       frozen.freeze = 1;
       slow.lr = 0.1;
       stx_params_set_rule(p, "*,!layers.[8-99].*,!out.*", &frozen);
       stx_params_set_rule(p, "layers.*", &slow);

   Fields of the rule that are 0 leave the parameters as they are, so several calls can
   set different fields. Call it after the last stx_param and before stx_optim_create. It
   returns the number of selected parameters; or sets an error, changes nothing and
   returns 0, also if one of the patterns matches no parameter.

   A frozen parameter is a constant. No gradient is computed for it, and the backward pass
   ends at the first op that depends on a parameter which is trained. It does not
   contribute to the norm of the gradient. stx_optim_create and stx_params_grads free its
   gradient, an optimiser has no state for it, and ranks do not exchange its gradient. */
STX_DEF size_t stx_params_set_rule(stx_params *p, const char *patterns, const stx_param_rule *rule);

/* A weight of a function that a program adds to a model family, such as a compression
   method (stx_comp_method) or a block type (stx_par_type). The program describes its
   weights; the family counts them and creates them among its own parameters. */
typedef struct stx_weight {
    const char *name;       /* last part of the parameter's name, such as "gate.weight" */
    size_t rows, columns;   /* shape (rows,columns), or (rows) if columns is 0 */
    int    init;            /* initialiser and its argument, as in stx_param */
    double a;
    int    elementwise;     /* 1: see stx_param_elementwise */
} stx_weight;

enum { STX_MAX_WEIGHTS = 16 };

/* For model families. stx_weights_check returns 1 if the n weights are valid; otherwise,
   it returns 0 and, unless x is NULL, sets an error that begins with `op`.
   stx_weights_size returns their number of elements, or SIZE_MAX on overflow.
   stx_weights_create adds them to a list, under their names with `prefix` (at most 64
   bytes) before them, and stores them in t (n). It returns 1, or 0 after an error. */
STX_DEF int stx_weights_check(stx_ctx *x, const char *op, const stx_weight *w, size_t n);
STX_DEF size_t stx_weights_size(const stx_weight *w, size_t n);
STX_DEF int stx_weights_create(stx_params *p, const char *prefix, const stx_weight *w, size_t n,
                               stx_tensor **t);

STX_DEF stx_tensor *stx_params_find(const stx_params *p, const char *name); /* NULL: not found */
STX_DEF size_t stx_params_size(const stx_params *p);    /* total number of elements */
STX_DEF size_t stx_params_trained_size(const stx_params *p);    /* without frozen ones */
STX_DEF void stx_params_zero_grad(stx_params *p);

/* Packs the weights for generation, which reads all weights for every token. Matrices
   of the list with two dimensions of at least STX_PACK_MIN are rounded in place, and a
   packed copy is kept for the matmuls x W^T and x W if x has up to 3 rows. All other
   calls read the rounded matrix, which has the same values as the copy.
       STX_WEIGHTS_BF16    bfloat16, 2 bytes per element
       STX_WEIGHTS_INT8    1.125 bytes per element: 32 adjacent elements of a row are
                           stored as integers in [-127, 127] with a common float scale,
                           which is 1/127 of their largest magnitude
       STX_WEIGHTS_F32     frees the packed copies; the matrices remain rounded
   The copy of a matrix is freed when the library writes to the matrix (an optimiser
   step, stx_set, loading a file). If you write to it yourself, call stx_params_pack
   again. Returns the size in bytes of all packed copies in the context. On failure,
   sets an error, changes nothing and returns 0. Not available on a GPU. */
enum { STX_WEIGHTS_F32 = 0, STX_WEIGHTS_BF16 = 1, STX_WEIGHTS_INT8 = 2 };
enum { STX_PACK_MIN = 32 };

STX_DEF size_t stx_params_pack(stx_params *p, int kind);

/* Returns all gradients of the list as one block of *n floats in device memory, for a
   norm or an all-reduce. They are in list order, each aligned to 64 elements, with
   zeros in between; frozen parameters have none. The first call moves the gradients into
   the block: call it after the last stx_param and before stx_optim_create. A call after
   another stx_param, or after a change of the frozen parameters, allocates a new block
   and frees the old one. A call that moves gradients ends a reservation made by
   stx_params_make_contiguous. Returns NULL after an error. */
STX_DEF stx_real *stx_params_grads(stx_params *p, size_t *n);


// >>api: tape

/* Computes gradients by walking the tape backwards from y, and adds them to the gradients
   of all parameters and variables.
       stx_backward         from the scalar loss (1)
       stx_backward_from    from any tensor y, given dL/dy (y->size elements in host
                            memory; NULL: ones): a vector-Jacobian product
       stx_backward_many    from several tensors in one walk: the gradient of
                            sum_i sum(y[i] dy[i]). dy NULL: all ones. Tensors that are
                            NULL or require no gradient are skipped, but skipping all of
                            them is an error

   Gradients of variables add up over the passes of a step. Those of parameters also add
   up over steps, until stx_optim_step or stx_params_zero_grad zeroes them. On a CPU, a
   later pass computes its gradients from zero and then adds the earlier ones, which need
   a second block of memory. The pass itself is not recorded, so there are no second
   derivatives.

   A backward pass empties the tape. A later pass in the same step covers only the ops
   recorded since then; it is an error if a gradient would have to pass through an earlier
   op. To differentiate several losses, add them with stx_add or use stx_backward_many. */
STX_DEF void stx_backward(stx_ctx *x, stx_tensor *loss);
STX_DEF void stx_backward_from(stx_ctx *x, stx_tensor *y, const stx_real *dy);
STX_DEF void stx_backward_many(stx_ctx *x, stx_tensor *const *y, const stx_real *const *dy,
                               int count);

/* Records a new op on the tape: y, made by stx_new, is a function of in[0..count), at
   most STX_MAX_INS tensors, some of which may be NULL. Once y->grad is complete,
   stx_backward calls the function `back`, which adds to the gradients that stx_grad
   returns. If no gradient reaches y, `back` is not called. `save` is passed to `back`;
   allocate it from the step arena. Returns 1, or 0 after an error or if no gradient will
   be needed; `save` then need not be filled in. */
enum { STX_MAX_INS = 9 };

typedef void (*stx_back_fn)(stx_ctx *x, stx_tensor *y, stx_tensor *const *in, void *save);
STX_DEF int stx_record(stx_ctx *x, stx_tensor *y, stx_tensor *const *in, int count,
                       stx_back_fn back, void *save);

/* Like stx_record, for an op with several results y[0..results), at most 1 +
   STX_MAX_MORE. `back` receives y[0] and can find the other results through `save`. It
   is called once, when the gradients of all results are complete, unless no result has
   a gradient. If only some results have gradients, y[i]->grad is NULL for the others,
   and stx_grad returns zeros for them. */
STX_DEF int stx_record_results(stx_ctx *x, stx_tensor *const *y, int results,
                               stx_tensor *const *in, int count, stx_back_fn back, void *save);

/* For use in the function `back` only. Returns the buffer of t's gradient, or NULL if t
   requires none or after an error. If `fresh` is NULL, `back` must add to the buffer,
   which is zeroed when it is created. Otherwise, *fresh receives 1 if the buffer is
   uninitialised and `back` must overwrite it, or 0 if `back` must add to it. If a tensor
   is two inputs of the op, both calls return the same buffer, and only the first call can
   set *fresh to 1. `back` must then overwrite the buffer before it adds to it. */
STX_DEF stx_real *stx_grad(stx_ctx *x, stx_tensor *t, int *fresh);

/* Returns the index of a random stream for an op; see stx_dropout_args.stream. Each
   call in a step returns a different stream. */
STX_DEF uint64_t stx_random_stream(stx_ctx *x);

/* Recomputation, or gradient checkpointing (Chen et al. 2016, 1604.06174): returns
   fn(user, in). The memory that fn used is freed, and fn runs again in the backward pass,
   with the same random numbers. Where ops are not recorded, as in STX_EVAL, this is a
   plain call of fn, and nothing is freed. `in` has at most STX_MAX_RECOMPUTE_INS tensors.
   What `user` points to must stay valid and unchanged until stx_backward returns.

   fn must depend only on user, `in` and the parameters, and must not change any state. If
   it reads any other tensor that requires a gradient, pass the tensor in `in`, or use
   stx_detach. Otherwise, the backward pass fails, unless an op recorded after
   stx_recompute has already given the tensor a gradient.

   fn can return `more` additional results, at most STX_MAX_MORE. It stores them in
   out[0 .. more-1], which are initially NULL and may remain NULL; stx_recompute copies
   them to its own argument `out`. Gradients pass through all results. With more = 0,
   `out` may be NULL.

   The model families support recomputation per layer: see recompute_layers in their descs
   and stx_lm.recompute. */
enum { STX_MAX_MORE = 3, STX_MAX_RECOMPUTE_INS = 8 };

typedef stx_tensor *(*stx_recompute_fn)(stx_ctx *x, void *user, stx_tensor **in,
                                        stx_tensor **out);
STX_DEF stx_tensor *stx_recompute(stx_ctx *x, stx_recompute_fn fn, void *user, stx_tensor **in,
                                  int count, stx_tensor **out, int more);


// >>api: kernels

/* Kernels are functions on raw pointers, without checks. The kernels of an op are
   declared next to it; the others are in this section. Their arguments are, in this
   order: context, outputs, saved values, inputs, sizes, scalars. A NULL context means
   one thread and no scratch memory; attention requires a context. A kernel with more
   than six arguments in addition to the context, unless it copies rows, takes them in a
   struct, whose unused fields must be zero.

   Backward kernels add to the gradients dx and skip gradients that are NULL. If a
   kernel has an argument `accumulate` and it is 0, the kernel overwrites da, din or
   dlogits, which can then be uninitialised.

   STX_KERNEL declares the CPU version of a kernel (stem, defined in this file) and its
   CUDA version (stem_cuda, defined in seqtx_cuda.cu). A missing version fails to link; a
   mismatched signature fails to compile. STX_RUN(x, stx_fill, (x, y, n, 0)) calls the
   version for the context's device, or nothing with desc.dry. */
#ifdef SEQTX_CUDA
  #define STX_KERNEL(stem, args) STX_DEF void stem args; extern void stem##_cuda args;
  #define STX_RUN(x, stem, args) \
    do { \
        if (stx_ctx_desc(x)->device == STX_CUDA) stem##_cuda args; \
        else if (!stx_ctx_desc(x)->dry) stem args; \
    } while (0)
#else
  #define STX_KERNEL(stem, args) STX_DEF void stem args;
  #define STX_RUN(x, stem, args) do { if (!stx_ctx_desc(x)->dry) stem args; } while (0)
#endif

#define STX_MIN(a, b) ((a) < (b) ? (a) : (b))
#define STX_MAX(a, b) ((a) > (b) ? (a) : (b))

/* Returns desc.threads, the largest number of threads that run a loop, including the
   calling thread; 1 if x is NULL. In a context on a GPU, the calling thread alone runs
   all loops of the host. */
STX_DEF int stx_threads(const stx_ctx *x);

/* Returns the instruction set that inner loops use on this processor; see STX_CALL. */
STX_DEF int stx_isa(const stx_ctx *x);

/* One chunk of a parallel loop: the iterations [begin, end). */
typedef struct stx_share {
    stx_ctx *x;             /* can be NULL, as in any kernel */
    size_t   begin, end;
    size_t   thread;        /* index below stx_threads(x), to select per-thread scratch
                               memory; 0 is the thread that called stx_parallel */
} stx_share;

/* Runs one chunk. It is called once per chunk, so several times per thread, and must
   accept any range that is not empty. `job` is the pointer passed to stx_parallel. Each
   iteration must write a separate part of the output, so that results do not depend on
   which thread runs it. Results depend on the number of threads only if n or the job
   does, as in the backward pass of attention.

   A part may read the context, but must not allocate memory from it, set an error, or
   call ops or kernels. */
typedef void (*stx_part)(const stx_share *s, const void *job);

/* Runs `part` for all iterations [0, n) and returns when the loop is complete. `work` is
   the approximate cost of the whole loop: 1 for each multiply-add or copied element,
   about 8 for an exponential. With work < 32768, or with one thread, part runs [0, n) in
   one call. Otherwise, each thread starts with a contiguous range, and idle threads take
   over chunks from others. Loops with equal n and work have equal ranges, so that each
   thread finds its rows in its caches.

   Does not check for errors, desc.dry or the device; see STX_RUN. Must not be called
   from within `part`. */
STX_DEF void stx_parallel(stx_ctx *x, size_t n, size_t work, stx_part part, const void *job);

/* Like stx_parallel, for a few iterations of unequal cost; put the longest ones first.
   Threads take the iterations in order, one at a time (several if n > 65535), and
   sleeping threads are always woken. With one thread, part runs [0, n) in one call. */
STX_DEF void stx_parallel_units(stx_ctx *x, size_t n, stx_part part, const void *job);

/* Declares a kernel that only the library calls. Its CPU version is static. */
#ifdef SEQTX_CUDA
  #define STX__KERNEL(stem, args) extern void stem##_cuda args;
#else
  #define STX__KERNEL(stem, args)
#endif

/* y (n) = value */
STX_KERNEL(stx_fill, (stx_ctx *x, stx_real *y, size_t n, stx_real value))

/* y (n) = s a, or y += s a with accumulate. On a CPU, `a` must not overlap y. */
STX_KERNEL(stx_axpy, (stx_ctx *x, stx_real *y, const stx_real *a, size_t n, stx_real s,
                      int accumulate))

/* y (rows,cols) = a (rows,cols), or y += a with accumulate, with row strides ldy and
   lda. `a` must not overlap y. */
STX_KERNEL(stx_copy2d, (stx_ctx *x, stx_real *y, size_t ldy, const stx_real *a, size_t lda,
                        size_t rows, size_t cols, int accumulate))

/* y (rows,wa+wb) = [a b], a (rows,wa) and b (rows,wb) with row strides lda and ldb.
   Neither `a` nor b may overlap y. */
STX_KERNEL(stx_concat2d, (stx_ctx *x, stx_real *y, const stx_real *a, size_t lda, size_t wa,
                          const stx_real *b, size_t ldb, size_t wb, size_t rows))

/* db (C) += the sum of the rows of dy (N,C) */
STX_KERNEL(stx_sum_rows, (stx_ctx *x, stx_real *db, const stx_real *dy, size_t N, size_t C))
