#pragma once
#include "config.h"
#include "context.h"
#include "ops.h"
#include "attention.h"
#include "files.h"


// >>api: vocab_io

/* Input and output of a language model: ids -> embeddings, and hidden states ->
   probabilities of V ids. Each can be plain or adaptive (stx_adaptive); the output can
   also be tied to the input. */

/* An initialiser: `kind` and `a` as in stx_param. If all fields are 0, the values are
   zeros. `rule` determines how the argument of stx_param is computed from `a` and the
   size of the matrix (for a bias, of the matrix that it belongs to). */
enum {
    STX_INIT_AS_IS = 0,     /* `a`, unchanged */
    STX_INIT_FAN_IN,        /* a / sqrt(columns) */
    STX_INIT_XAVIER         /* a sqrt(6 / (rows + columns)), Glorot and Bengio 2010 */
};

typedef struct stx_init {
    int    kind;
    double a;
    int    rule;
} stx_init;

enum { STX_VOCAB_PLAIN = 0, STX_VOCAB_TIED, STX_VOCAB_ADAPTIVE };
enum { STX_VOCAB_BOTH = 1, STX_VOCAB_INPUT, STX_VOCAB_OUTPUT };

/* Configuration. C is dim, and C_i is the width of cluster i. The fields from cutoff to
   cluster_major apply to adaptive inputs and outputs. */
typedef struct stx_vocab_io_desc {
    size_t vocab;               /* V, required */
    size_t dim;                 /* C, required */
    size_t emb;                 /* channels of the embedding; 0: C. It must be C with an
                                   adaptive input or a tied output */
    int    in;                  /* STX_VOCAB_PLAIN: a table (V,emb); _ADAPTIVE: an
                                   adaptive input, which requires ids sorted by decreasing
                                   frequency */
    int    out;                 /* STX_VOCAB_PLAIN: W (V,C) and a bias; _TIED: W is the
                                   input table; _ADAPTIVE: an adaptive output, with any
                                   input */
    double scale;               /* factor applied to the embedding; 0: 1 if plain, sqrt(C)
                                   if adaptive */
    double dropout;             /* dropout probability in adaptive inputs and outputs;
                                   see stx_adaptive */

    size_t cutoff[STX_MAX_CLUSTERS - 1];    /* first ids of clusters 1, 2, .. */
    size_t cutoffs;             /* number of cutoffs; 0: the cutoffs are 20000, 40000 and
                                   200000, except those that are not below V */
    int    no_cutoffs;          /* 1: only one cluster */
    size_t width[STX_MAX_CLUSTERS];         /* C_i; 0: C for i = 0, else floor(C_0 / divval^i) */
    size_t out_width[STX_MAX_CLUSTERS];     /* C_i of the output; 0: width[i] */
    double divval;              /* 0: the default, 4 */
    int    direct_head;         /* where cluster 0 has C channels and no projection: in
                                   the input (STX_VOCAB_INPUT), the output (_OUTPUT) or
                                   both (_BOTH); 0: in neither */
    int    no_projections;      /* like direct_head, but for all clusters; with
                                   STX_VOCAB_BOTH, divval is not used */
    int    share_tables;        /* 1: adaptive input and output share their tables */
    int    share_projs;         /* 1: adaptive input and output share their
                                   projections */
    int    separate_first;      /* 1: share_projs does not apply to the first projection */
    int    one_proj;            /* 1: all input clusters, which must have the same width,
                                   use one projection, in_emb.projs.0. Output clusters
                                   that share projections use it too. Cannot be combined
                                   with cluster_major */
    int    proj_biases;         /* 1: output projections have biases,
                                   out_emb.proj_biases.<i> (C_i) */
    int    forward_columns;     /* order of the cluster columns, see stx_adaptive */
    int    cluster_major;       /* order of the parameters. 0: input, cluster columns,
                                   output; shared parameters are named in_emb.*. 1:
                                   cluster by cluster, then the cluster columns; shared
                                   parameters are named out_emb.* */

    stx_init table, out_table;          /* table: input tables; out_table: W or output tables */
    stx_init proj, bias;                /* proj: projections; bias: output biases */
    stx_init cluster, cluster_bias;     /* weights and biases of the cluster columns */
    stx_init proj_bias;
} stx_vocab_io_desc;

typedef struct stx_vocab_io {
    stx_ctx       *ctx;
    stx_vocab_io_desc desc;     /* with the defaults filled in */
    stx_tensor    *in_emb;      /* (V,emb); NULL with an adaptive input */
    stx_tensor    *out_w;       /* (V,C); NULL with an adaptive output */
    stx_tensor    *out_b;       /* (V); NULL with an adaptive output */
    stx_adaptive   in;          /* the input if it is adaptive */
    stx_adaptive   out;         /* the output if it is adaptive; otherwise out_w and out_b
                                   as one cluster */
} stx_vocab_io;

/* Copies `from` to `to` and fills in the defaults. Returns 1. If the desc is invalid,
   sets an error unless x is NULL, and returns 0. `who` is the name of the calling
   function, for the error text. */
STX_DEF int stx_vocab_io_resolve(stx_ctx *x, const char *who, const stx_vocab_io_desc *from,
                                 stx_vocab_io_desc *to);

/* Returns the number of parameter elements of a resolved desc, or SIZE_MAX if the number
   does not fit in size_t. Shared parameters are counted once. */
STX_DEF size_t stx_vocab_io_count(const stx_vocab_io_desc *d);

/* Adds the parameters of a desc to p:
       plain       in_emb.weight, out_emb.weight, out_emb.bias
       adaptive    in_emb.tables.<i>, in_emb.projs.<i>, out_emb.tables.<i>,
                   out_emb.projs.<i>, out_emb.proj_biases.<i>, out_emb.biases.<i>,
                   out_emb.cluster.weight, out_emb.cluster.bias
   The result is valid until stx_destroy. Returns NULL and sets an error if the desc is
   invalid or memory runs out. */
STX_DEF stx_vocab_io *stx_vocab_io_create(stx_params *p, const stx_vocab_io_desc *d);

/* Embeds ids (B,T) -> (B,T,emb). */
STX_DEF stx_tensor *stx_vocab_io_embed(const stx_vocab_io *w, const stx_ids *ids);

/* Hidden states (..,C) -> logits (..,V). It is an error to call this with an adaptive
   output, because each of its clusters has a separate softmax. */
STX_DEF stx_tensor *stx_vocab_io_logits(const stx_vocab_io *w, stx_tensor *h);

/* Hidden states (B,T,C) -> log p (B,T,V), or (N,C) -> (N,V), for all kinds of output.
   Not differentiable. */
STX_DEF stx_tensor *stx_vocab_io_log_probs(const stx_vocab_io *w, stx_tensor *h);

/* Returns scores for stx_sample in the form that costs least: logits, or log p if the
   output is adaptive. */
STX_DEF stx_tensor *stx_vocab_io_scores(const stx_vocab_io *w, stx_tensor *h);

/* Mean negative log-likelihood of targets, one per row of h (..,C), in nats -> (1).
   `how` contains the options of stx_cross_entropy_tokens. If `how` is NULL, the
   gradient of plain logits overwrites the logits (stx_cross_entropy_inplace). */
STX_DEF stx_tensor *stx_vocab_io_loss(const stx_vocab_io *w, stx_tensor *h, const stx_ids *targets,
                                      stx_token_loss *how);

/* Adds to the key of a step the host-side decisions that depend on these ids and targets,
   either of which can be NULL. See stx_adaptive_key. */
STX_DEF uint64_t stx_vocab_io_key(const stx_vocab_io *w, uint64_t key, const stx_ids *ids,
                                  const stx_ids *targets, const stx_token_loss *how);


// >>api: memory

/* A memory carries rows (B,rows,width) of each layer from step to step, such as a layer's
   inputs or a recurrent state. Rows are constants; no gradient passes from step to
   step. A step reads the rows of one memory and pushes new rows to the end of the same
   memory or of another one. The oldest rows are evicted. Rows can be missing in some of
   the B streams, because a stream was reset or part of a segment was padding. */
typedef struct stx_memory_desc {
    size_t layers, B;
    size_t width;               /* channels of a row, in all layers */
    const size_t *widths;       /* [layers], copied: separate widths, 0 for a layer
                                   without rows; NULL: all layers have `width` channels */
    int    is_state;            /* 1: a recurrent state, with one row per layer, initially
                                   zeros, float in every precision, in one block */
    int    shared_layout;       /* 1: all layers have rows for the same tokens, so that a
                                   checkpoint has one count and one mask for all */
    int    always_f32;          /* 1: float in every precision, as with is_state */
    int    count_unwritten;     /* 1: logical_count includes rows that were never written */
    int    missing_as_zeros;    /* 1: missing rows are rows of zeros; 0: they do not exist,
                                   see stx_memory_mask */
    size_t max_rows;            /* the maximum number of rows that stx_memory_set and
                                   _load accept. Buffers grow by half of their size, up
                                   to this maximum; 0: no limit, and buffers grow to the
                                   size needed */
} stx_memory_desc;

/* The rows of a layer. The fields are read-only; use the functions below to change
   them. */
typedef struct stx_memory_layer {
    size_t    width;
    size_t    count;            /* number of rows */
    size_t    logical_count;    /* count; with count_unwritten, the length of the memory
                                   including rows that were never written */
    stx_real *data;             /* (count,width) of the first stream, oldest first, in device
                                   memory; NULL before the first push */
    size_t    stride;           /* elements from one stream to the next */
    int       masked;           /* 1: rows are missing in some stream */
    int32_t  *pad;              /* (B,count) on the host, if masked; nonzero: the row is missing */
    size_t    pad_capacity;     /* elements allocated for pad */
    stx_real *base;             /* the buffer (B,capacity,width), see >>memory: arena */
    size_t    capacity, offset; /* capacity: rows in the buffer; offset: rows before `data` */
    size_t    pushed;           /* rows pushed in step pushed_step */
    size_t    max_pushed;       /* largest value of `pushed` in the last 32 to 64 steps */
    size_t    recent_max_pushed, recent_steps;  /* largest value of `pushed` in the last
                                                   recent_steps steps */
    uint64_t  pushed_step;      /* the last step that pushed rows */
    uint64_t  viewed_step;      /* the last step that read rows in place */
    int       viewed;           /* 1: stx_memory_view reads this layer */
} stx_memory_layer;

typedef struct stx_memory {
    stx_ctx        *ctx;
    stx_memory_desc   desc;
    size_t          B;
    stx_memory_layer *layer;    /* [layers] */
    stx_real       *all;        /* is_state: (layers,B,width), the data of all layers */
} stx_memory;

/* Creates an empty memory, valid until stx_memory_free or stx_destroy. Returns NULL and
   sets an error if layers or B is 0, is_state is combined with widths, or memory runs
   out. */
STX_DEF stx_memory *stx_memory_create(stx_ctx *x, const stx_memory_desc *d);
STX_DEF void stx_memory_free(stx_memory *s);

/* Return the whole memory, or only stream b, to its initial, empty state. Both do nothing
   after an error. */
STX_DEF void stx_memory_reset(stx_memory *s);
STX_DEF void stx_memory_reset_stream(stx_memory *s, size_t b);

/* Reserves space for this many rows in every layer, so that buffers keep their
   addresses. A layer that stx_memory_view reads needs space for the rows that it keeps
   and for those that a step pushes. If a step views rows and then replaces them, the
   replaced rows count again for each replacement. Returns 1, or sets an error and
   returns 0. */
STX_DEF int stx_memory_reserve(stx_memory *s, size_t rows);

/* Returns the largest number of rows in a layer. */
STX_DEF size_t stx_memory_max_rows(const stx_memory *s);

/* Appends h (B,T,width) to the rows of layer l of `in` and stores the last `keep` rows
   in layer l of `out`. If `in` is NULL, only h is stored; `in` and `out` may be the same
   memory. pad (B,T) is nonzero where h has no row; NULL: h has all rows. With is_state,
   h (B,width) replaces the row and keep is 1. Returns 1, or sets an error and returns
   0. */
STX_DEF int stx_memory_push(stx_memory *out, const stx_memory *in, size_t l, size_t keep,
                            const stx_tensor *h, const stx_ids *pad);

/* Returns a copy of the newest m = min(n, count) rows of layer l as a constant of this
   step, (B,m,width); with is_state (B,width). Returns NULL if there are no rows. */
STX_DEF stx_tensor *stx_memory_read(const stx_memory *s, size_t l, size_t n);

/* Like stx_memory_read, but without a copy, for ops that read stx_cached_rows. The rows
   keep their values until the next stx_begin, even if the memory is changed or freed.
   The call can move the rows within their buffer, to make space for later pushes, so a
   pointer that was read from layer[l].data earlier becomes invalid. out->rows is 0 if
   there are no rows or s is NULL. Returns 1, or sets an error and returns 0. Cannot be
   used with is_state. */
STX_DEF int stx_memory_view(const stx_memory *s, size_t l, size_t n, stx_cached_rows *out);

/* Returns the newest m = min(n, count) rows, followed by a copy of h (B,T,width), as a
   constant (B,m+T,width), for stx_linear_memory; or h itself if there are no rows. */
STX_DEF stx_tensor *stx_memory_concat(const stx_memory *s, size_t l, size_t n, stx_tensor *h);

/* Returns a mask (B,m+T) in the format of stx_attention_in.pad: nonzero where one of the
   newest m = min(n, count) rows or of the T new rows is missing. pad (B,T), or NULL, is
   the mask of the new rows. Returns NULL if no row is missing or after an error, and pad
   if s is NULL or has no rows. The mask is copied from the host, so a step with a mask is
   not replayed. */
STX_DEF const stx_ids *stx_memory_mask(const stx_memory *s, size_t l, size_t n, const stx_ids *pad,
                                       size_t T);

/* Returns the rows that stx_memory_push(.., s, l, keep, h, pad) will evict, as a
   constant (B,e,width), with e = count + T - keep, for example to compress them. If
   mask is not NULL, *mask receives the mask of the missing rows, or NULL. Returns NULL
   if no row is evicted. Cannot be used with is_state. */
STX_DEF stx_tensor *stx_memory_evicted(const stx_memory *s, size_t l, size_t keep,
                                       const stx_tensor *h, const stx_ids *pad,
                                       const stx_ids **mask);

/* Copies streams c .. c+n-1 of `from` to streams b .. b+n-1 of `to`, to regroup batches.
   Both memories must belong to the same context and have the same layers; if they are the
   same memory, the ranges must not overlap. The newest rows are aligned. If one memory
   has more rows than the other, older rows are missing in the streams that lack them.
   If all streams of `to` are replaced, it has exactly the rows of `from`. Returns 1, or
   sets an error and returns 0. */
STX_DEF int stx_memory_copy(stx_memory *to, size_t b, const stx_memory *from, size_t c, size_t n);

/* Copy layer l to and from host memory. stx_memory_get writes (B,count,width) to out,
   oldest row first. stx_memory_set replaces the rows with n rows per stream, none of
   them missing. `rows` is n or, with count_unwritten, the logical_count of the source,
   which is at least n. Return 1, or set an error and return 0. */
STX_DEF int stx_memory_get(const stx_memory *s, size_t l, stx_real *out);
STX_DEF int stx_memory_set(stx_memory *s, size_t l, size_t rows, const stx_real *in, size_t n);

/* Save the memory to a checkpoint and load it. Names begin with prefix, at most 80 bytes:
       entries "<prefix><l>" and, if rows are missing, "<prefix>pad.<l>"; metadata
           "<prefix>rows.<l>" and "<prefix>real.<l>"
       with shared_layout: "<prefix>memory.<l>", "<prefix>pad" and "<prefix>rows"
       with is_state: "<prefix>" (layers,B,width) only
   The memory must not change until stx_writer_finish. Loading validates everything first.
   Return 1, or set an error and return 0; a failed load leaves the memory empty. */
STX_DEF int stx_memory_save(stx_writer *w, const stx_memory *s, const char *prefix);
STX_DEF int stx_memory_load(stx_memory *s, const stx_file *f, const char *prefix);

/* Adds to the key of a step the host-side decisions that depend on this memory: row
   counts, addresses, and whether rows are missing. */
STX_DEF uint64_t stx_memory_key(const stx_memory *s, uint64_t key);


// >>api: cache

/* A KV cache for generation: the keys and values of the last `window` tokens of B
   streams, for each layer. The buffer of a layer has space for two windows and a chunk,
   so moving the rows back to the beginning of the buffer copies only one row per token
   on average. */
typedef struct stx_cache_layer {
    size_t    window;           /* number of newest rows that attention can read */
    size_t    capacity, len;    /* capacity: rows in the buffer; len: rows in use */
    size_t    width;            /* channels per row of k and of v */
    int       both;             /* 1: each row of k contains a key and a value, with
                                   `width` channels in total, as in stx_attention_in.kv; v
                                   is NULL */
    stx_real *k, *v;            /* (B,capacity,width), in device memory */
} stx_cache_layer;

/* The fields are read-only; use the functions below to change them. */
typedef struct stx_cache {
    stx_ctx         *ctx;
    size_t           B, V, layers;
    size_t           chunk;     /* largest number of tokens per stream and call */
    stx_cache_layer *layer;     /* [layers] */
    stx_real        *out;       /* (B,V), on the host: result of stx_cache_feed */
} stx_cache;

/* Creates a cache, valid until stx_cache_free or stx_destroy. Call stx_cache_window for
   each layer before using it. Returns NULL and sets an error if memory runs out. */
STX_DEF stx_cache *stx_cache_create(stx_ctx *x, size_t layers, size_t B, size_t V);
STX_DEF void stx_cache_free(stx_cache *c);

/* Empties the cache and keeps its buffers. */
STX_DEF void stx_cache_reset(stx_cache *c);

/* Empties layer l and allocates it for a window of this many rows, with C channels of
   keys and C of values. both = 1: each row contains a key followed by a value. Returns
   1, or sets an error and returns 0. */
STX_DEF int stx_cache_window(stx_cache *c, size_t l, size_t window, size_t C, int both);

/* Attention of T <= chunk new tokens to the cached rows of layer l and to themselves.
   Appends the new tokens' keys and values to the cache. `in` contains, for the new
   tokens, q, k and v (B,T,C), or q and kv, or qkv if the layer stores both. All other
   inputs of stx_attention except cached are allowed; pad covers the last min(len, window)
   rows and the new ones. d must be causal with first_key <= 0; keys beyond the window are
   not used. The step must have been started with STX_EVAL. Returns NULL after an error;
   the cache may then already contain the new rows, so call stx_cache_reset. */
STX_DEF stx_tensor *stx_cache_attention(stx_cache *c, size_t l, const stx_attention_in *in,
                                        const stx_attention_desc *d);

/* Feeds ids (B,n), n >= 1, to a model in chunks. Each chunk is a step in STX_EVAL, in
   which fn(user, ids) computes the final hidden states (B,T,C) of ids (B,T). Returns
   log p (B,V) of the token after the last id or, with scores = 1, the result of
   stx_vocab_io_scores for it. The result is c->out, valid until the next call. Returns
   NULL after an error. */
typedef stx_tensor *(*stx_feed_fn)(void *user, const stx_ids *ids);
STX_DEF const stx_real *stx_cache_feed(stx_cache *c, const stx_vocab_io *w, const int32_t *ids,
                                       size_t n, int scores, stx_feed_fn fn, void *user);


// >>api: lm

/* A language model of any family, as a table of functions. Code for training, evaluation
   and generation that calls these functions works with all families. stx_span_as_lm,
   stx_sru_as_lm, stx_comp_as_lm and stx_par_as_lm return the table. model, state and gen
   are pointers to the family's structs.

   `in` is the state to read (NULL: empty), and `out` is the state to write (NULL: none);
   they may be the same. Functions that return int return 1, or set an error and return
   0. */
typedef struct stx_family stx_family;

typedef struct stx_lm {
    void            *model;
    stx_ctx         *ctx;
    const stx_family *family;   /* for stx_model_save and stx_model_write */
    stx_params      *params;
    const stx_vocab_io *vocab_io;

    /* Mean negative log-likelihood of targets (B,T), in nats per token -> (1). */
    stx_tensor *(*loss)(void *model, const stx_ids *ids, const stx_ids *targets, const void *in,
                        void *out);

    /* The training objective: nll, which `loss` returned, plus penalties. Pass the
       result to stx_backward. */
    stx_tensor *(*total)(void *model, stx_tensor *nll);

    /* Must be called after each update. */
    void        (*updated)(void *model);

    /* Enables recomputation of the last n layers in the backward pass (stx_recompute),
       beginning with the next forward pass. Results are bit-identical. Returns n, or the
       number of layers if that is smaller. */
    size_t      (*recompute)(void *model, size_t n);

    /* The key of a step, for stx_step_run. */
    uint64_t    (*key)(const void *model, const stx_ids *ids, const stx_ids *targets,
                       const void *state, uint64_t salt);

    /* The attention weights of layer l < layers in stream b, of the last forward pass of
       this step: see stx_attention_map and stx_span_attention_map. NULL without an error
       if the layer runs no attention. */
    size_t      layers;
    const stx_attention_map *(*attention_map)(const void *model, size_t l, size_t b);

    /* The memory of B streams. `window` is the reach of attention in tokens for
       evaluation; 0: as in training. state_copy copies streams c .. c+n-1 of `from` to
       streams b .. b+n-1 of `to` (see stx_memory_copy). */
    void       *(*state_create)(void *model, size_t B, size_t window);
    void        (*state_free)(void *state);
    void        (*state_reset)(void *state);
    void        (*state_reset_stream)(void *state, size_t b);
    int         (*state_copy)(void *to, size_t b, const void *from, size_t c, size_t n);
    int         (*state_save)(stx_writer *w, const void *state, const char *prefix);
    int         (*state_load)(void *state, const stx_file *f, const char *prefix);

    /* Generation for B streams. `window` is the reach of attention (SRU) or the length of
       the memory (PAR) in tokens; 0: the default. The other families accept only 0.
       gen_feed takes ids (B,n) and returns log p (B,V) of the next token, up to a
       constant per row, for stx_sample. */
    void       *(*gen_create)(void *model, size_t B, size_t window);
    void        (*gen_free)(void *gen);
    void        (*gen_reset)(void *gen);
    const stx_real *(*gen_feed)(void *gen, const int32_t *ids, size_t n);
} stx_lm;

/* For family headers: defines stx__FAMILY_lm_states(lm), which fills in the functions
   for states and generation, except state_create and gen_create, with wrappers around
   the stx_FAMILY_state_* and stx_FAMILY_gen_* functions. */
#define STX_LM_STATES(family) \
    static void stx__##family##_lm_state_free(void *s) { \
        stx_##family##_state_free((stx_##family##_state *)s); \
    } \
    static void stx__##family##_lm_state_reset(void *s) { \
        stx_##family##_state_reset((stx_##family##_state *)s); \
    } \
    static void stx__##family##_lm_state_reset_stream(void *s, size_t stream) { \
        stx_##family##_state_reset_stream((stx_##family##_state *)s, stream); \
    } \
    static int stx__##family##_lm_state_copy(void *to, size_t b, const void *from, size_t c, \
                                             size_t n) { \
        return stx_##family##_state_copy((stx_##family##_state *)to, b, \
                                         (const stx_##family##_state *)from, c, n); \
    } \
    static int stx__##family##_lm_state_save(stx_writer *w, const void *s, const char *prefix) { \
        return stx_##family##_state_save(w, (const stx_##family##_state *)s, prefix); \
    } \
    static int stx__##family##_lm_state_load(void *s, const stx_file *f, const char *prefix) { \
        return stx_##family##_state_load((stx_##family##_state *)s, f, prefix); \
    } \
    static void stx__##family##_lm_gen_free(void *g) { \
        stx_##family##_gen_free((stx_##family##_gen *)g); \
    } \
    static void stx__##family##_lm_gen_reset(void *g) { \
        stx_##family##_gen_reset((stx_##family##_gen *)g); \
    } \
    static const stx_real *stx__##family##_lm_gen_feed(void *g, const int32_t *ids, size_t n) { \
        return stx_##family##_gen_feed((stx_##family##_gen *)g, ids, n); \
    } \
    static void stx__##family##_lm_states(stx_lm *lm) { \
        lm->state_free = stx__##family##_lm_state_free; \
        lm->state_reset = stx__##family##_lm_state_reset; \
        lm->state_reset_stream = stx__##family##_lm_state_reset_stream; \
        lm->state_copy = stx__##family##_lm_state_copy; \
        lm->state_save = stx__##family##_lm_state_save; \
        lm->state_load = stx__##family##_lm_state_load; \
        lm->gen_free = stx__##family##_lm_gen_free; \
        lm->gen_reset = stx__##family##_lm_gen_reset; \
        lm->gen_feed = stx__##family##_lm_gen_feed; \
    }
