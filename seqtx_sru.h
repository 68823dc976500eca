/* seqtx_sru.h - v0.1 - SRU and SRU++: simple recurrent units, and attention where a product stood
   no warranty implied; MIT or public domain, your choice (end of seqtx.h)

   In ONE .c (or .cpp) file:              everywhere else:
       #define SEQTX_IMPLEMENTATION           #include "seqtx_sru.h"
       #include "seqtx_sru.h"
   It includes seqtx.h, which must stand beside it. Link -lm; add -fopenmp for all cores.
   (SEQTX_SRU_IMPLEMENTATION compiles this header's part alone, when seqtx.h's is compiled elsewhere.)

   MANUAL_HERE
*/
#ifndef SEQTX_SRU_H
#define SEQTX_SRU_H

#include "seqtx.h"

#ifdef __cplusplus
extern "C" {
#endif

// >>stack: configuration -------------------------------------------------------------------------------------------

enum { STX_SRU_LINEAR = 0, STX_SRU_ATTENTION };                                /* stx_sru_desc.transform */
enum { STX_SRU_NORM_NONE = 0, STX_SRU_NORM_BEFORE, STX_SRU_NORM_AFTER };       /* stx_sru_desc.norm */

/* A transform of your own (the reference's custom modules): from the layer's input x (B,T,I), after layer norm and dropout, the
   products U (B,T,k,O), planes as in stx_sru_args, and, if it wants gate vectors that depend on the input, V (B,T,2,O), which is added
   to v. Returns 1; or 0, in error. Called in every forward. */
typedef int (*stx_sru_transform)(stx_ctx *x, void *user, size_t layer, stx_tensor *in, stx_tensor **U, stx_tensor **V);

typedef struct stx_sru_desc {
    size_t input;           /* features of x, required */
    size_t hidden;          /* H, units per direction; 0: input */
    size_t layers;          /* 0: 2 */
    int    bidirectional;   /* D = 2: a second direction from the end to the beginning. Output O = D H */
    int    transform;       /* STX_SRU_LINEAR: U = W3 x, or W3 W1 x with proj. STX_SRU_ATTENTION: SRU++ */
    size_t proj;            /* P, width between W1 and W3; 0: no W1 (SRU++: input / 4) */
    const size_t *projs;    /* P of each layer (layers numbers, copied); NULL: proj for all */
    int    tanh;            /* g(c) = tanh c in place of c */
    int    no_skip;         /* no highway term */
    int    rescale;         /* the highway input is multiplied by alpha = sqrt(1 + 2 e^highway_bias) */
    double highway_bias;    /* first value of the reset gate's bias; 0: 0, but in SRU++ -2, */
    int    no_highway_bias; /* unless this is set */
    int    v1;              /* gate vectors v are zero and stay it (SRU of 2017): forward is a parallel scan */
    int    norm;            /* layer norm in every cell: before the transform, or after the recurrence */
    double dropout;         /* one draw for all times, on g(c) - x in every layer but the last; SRU++ also before W3, drawn for each time */
    double rnn_dropout;     /* one draw for all times, on the input of every transform */
    int    input_first;     /* W x first when input is not O: then all layers are alike */
    int    init_xavier;     /* STX_SRU_LINEAR: Xavier's initialisers (3.0 of the reference) in place of 2.6's. SRU++ has them always */
    double v_init;          /* v in U(-v_init, v_init); 0: sqrt(3/2); with Xavier's 1 */
    stx_sru_transform custom;   /* in place of transform; user goes to it */
    void  *user;
    /* SRU++ */
    size_t heads;           /* n; 0: 1. They divide P */
    double attn_dropout;
    size_t attention_every; /* layers every, 2 every, .. (from 1) have attention, the others project only; 0: 1 */
    size_t attention_last;  /* the last ones have; 0: not so. Not together with attention_every */
    int    no_attention;    /* none has */
    int    no_attn_norm;    /* no layer norm in the transform */
    int    attn_norm_first; /* ... before q, k and v in place of after the sum */
    double alpha_init;      /* first value of alpha; 0: attention is learned from nothing (ReZero) */
    int    not_causal;      /* every time sees every time */
    /* The reference's own form, where it differs */
    int    literal_norm;    /* Q12: with STX_SRU_NORM_BEFORE the memory is not normalised, so that segments are not one whole */
    int    literal_mask;    /* Q11: a time whose keys are all padding attends to the future (or, when all is padding, to nothing) */
    int    zero_pads;       /* Q3: [FIX] the output of padding is 0 also after a layer norm, whose shift it is otherwise */
} stx_sru_desc;

typedef struct stx_sru_layer {
    size_t I, P, k;                         /* features in, width between (0: none), planes of U */
    int    attends, xr_k3;                  /* has attention; has a highway from its raw input */
    stx_real alpha;                         /* scale of the highway */
    stx_tensor *w1, *wk, *wv, *w3;          /* (P,I) (P,P) (P,P) (k O, P or I); NULL where there is none */
    stx_tensor *alpha_attn;                 /* (1) */
    stx_tensor *attn_gain, *attn_shift;     /* (P) */
    stx_tensor *gain, *shift;               /* (I), or (O) with STX_SRU_NORM_AFTER */
    stx_tensor *v, *bias;                   /* (2,O): forget gate's, reset gate's. v NULL with v1 */
} stx_sru_layer;

typedef struct stx_sru {
    stx_ctx       *ctx;
    stx_sru_desc   desc;                    /* resolved */
    size_t         O;                       /* D H */
    stx_tensor    *w_input;                 /* (O,input), input_first only */
    stx_sru_layer *layer;
} stx_sru;

/* Makes a stack whose parameters are added to p under prefix ("" or "encoder."); it lives as long as p's context. NULL and the
   context's error when the sizes make no sense. */
STX_DEF stx_sru *stx_sru_create(stx_params *p, const char *prefix, const stx_sru_desc *d);
/* Number of parameters that a desc gives; 0 when it is not valid. */
STX_DEF size_t stx_sru_count(const stx_sru_desc *d);

// >>stack: forward -------------------------------------------------------------------------------------------------

/* What goes into a pass besides x, and comes out besides h. Arrays have one entry a layer; NULL, or NULL entries: none. */
typedef struct stx_sru_io {
    stx_tensor *const *c0;      /* (B,O) states before; zero if none */
    stx_tensor *const *memory;  /* (B,M,I_l) inputs of the layers that attend, of the times before; one M for all */
    const stx_ids *pad;         /* (B,T), not 0: padding. Its h is 0, the state passes it by, nobody attends to it */
    const stx_ids *memory_pad;  /* (B,M) */
    size_t window;              /* attention reaches so far back; 0: over all that is there */
    stx_tensor **last;          /* out: (B,O) the states after: of the last time forward, of the first backward */
    stx_tensor **inputs;        /* out: (B,T,I_l): memory for the next segment */
} stx_sru_io;

/* x (B,T,input) -> h (B,T,O). Gradients reach x, c0 and memory where they are not constants. */
STX_DEF stx_tensor *stx_sru_forward(stx_sru *m, stx_tensor *x, stx_sru_io *io);
/* Padding (B,T) for sequences of these lengths. */
STX_DEF stx_ids *stx_sru_lengths(stx_ctx *x, const size_t *length, size_t B, size_t T);

// >>stack: state ---------------------------------------------------------------------------------------------------

/* States and memories of B streams: go into a segment and come out of it. Training and evaluation each have their own. At first
   all zero, and no memory. */
typedef struct stx_sru_state {
    stx_sru   *model;
    size_t     B;
    size_t     keep;        /* rows of memory that are kept: the last `keep` (for evaluation); 0: those of the last segment, as in training */
    size_t     window;      /* see stx_sru_io */
    size_t     rows;        /* of memory there are */
    size_t     capacity;    /* ... there is room for */
    stx_real  *c;           /* (layers,B,O), on the device, float in every precision */
    stx_real **memory;      /* per layer: (B,rows,I_l), on the device; NULL for those that do not attend */
    int32_t   *pad;         /* (B,rows), on the host; all 0 unless padded */
} stx_sru_state;

STX_DEF stx_sru_state *stx_sru_state_create(stx_sru *m, size_t B);
STX_DEF void stx_sru_state_free(stx_sru_state *s);
STX_DEF void stx_sru_state_reset(stx_sru_state *s);
/* In a checkpoint: entries "<prefix>c" and "<prefix>memory.<l>". load fills a state of the same B; 1, or 0 and an error (the state is
   then empty). */
STX_DEF int stx_sru_state_save(stx_writer *w, const stx_sru_state *s, const char *prefix);
STX_DEF int stx_sru_state_load(stx_sru_state *s, const stx_file *f, const char *prefix);
/* The states in PyTorch's shape of an RNN, (layers D, B, H), in host memory: get and set are each other's inverse. */
STX_DEF void stx_sru_state_get_nn(const stx_sru_state *s, stx_real *out);
STX_DEF void stx_sru_state_set_nn(stx_sru_state *s, const stx_real *in);

/* A segment: state in (NULL: zero), state out (NULL: nowhere; may be in). Gradients do not pass the state. pad (B,T) or NULL. */
STX_DEF stx_tensor *stx_sru_segment(stx_sru *m, stx_tensor *x, const stx_ids *pad, const stx_sru_state *in, stx_sru_state *out);

// >>language model -------------------------------------------------------------------------------------------------

typedef struct stx_sru_lm_desc {
    size_t vocab;           /* V, required */
    size_t dim;             /* d = O of the stack; 0: 512. The stack's input, hidden and O follow from it */
    size_t emb;             /* width of the embedding; 0: d */
    stx_sru_desc sru;       /* the stack; input, hidden and dropout are filled in */
    double dropout;         /* of embedding, stack and output */
    double emb_dropout;     /* inside the adaptive embedding and softmax */
    int    tied;            /* the output's matrix is the embedding's (emb = d) */
    int    adapt_io;        /* adaptive embedding and softmax, which share their tables; the vocabulary is sorted by falling frequency */
    size_t emb_adaptive;    /* ... width of cluster 0; 0: d */
    double divval;          /* ... of cluster i: floor(width / divval^i); 0: 4 */
    size_t cutoff[STX_MAX_CLUSTERS - 1], cutoffs;   /* ... 0 cutoffs: those of 20000, 40000, 200000 that are below vocab */
    int    separate_projs;  /* ... the embedding has projections of its own */
    int    forward_columns; /* ... order of the head's cluster columns, see stx_adaptive; 0 is the reference's */
} stx_sru_lm_desc;

typedef struct stx_sru_lm {
    stx_ctx        *ctx;
    stx_sru_lm_desc desc;                   /* resolved */
    stx_params     *params;
    stx_sru        *sru;
    stx_tensor     *in_emb, *out_w, *out_b; /* (V,emb) (V,d) (V); NULL with adapt_io */
    stx_adaptive    in, out;                /* adapt_io only */
} stx_sru_lm;

STX_DEF stx_sru_lm *stx_sru_lm_create(stx_ctx *x, const stx_sru_lm_desc *d);
STX_DEF stx_params *stx_sru_lm_params(stx_sru_lm *m);
STX_DEF size_t stx_sru_lm_count(const stx_sru_lm_desc *d);      /* parameters, shared ones once; 0: not valid */
/* ids (B,T) -> last hidden state (B,T,d); state as in stx_sru_segment (of m->sru) */
STX_DEF stx_tensor *stx_sru_lm_forward(stx_sru_lm *m, const stx_ids *ids, const stx_sru_state *in, stx_sru_state *out);
/* Logits (B,T,V) of a hidden state; with adapt_io log-probabilities, without a tape. */
STX_DEF stx_tensor *stx_sru_lm_logits(stx_sru_lm *m, stx_tensor *h);
/* Mean nll of targets (B,T), nats per token -> (1). */
STX_DEF stx_tensor *stx_sru_lm_loss(stx_sru_lm *m, const stx_ids *ids, const stx_ids *targets, const stx_sru_state *in, stx_sru_state *out);
/* A number for all that the host decides in a step of this model with these tokens and this state (each NULL: none): the key of
   stx_step_run. salt: what else decides. With adapt_io sizes depend on the tokens: such steps must not be repeated. */
STX_DEF uint64_t stx_sru_lm_key(const stx_sru_lm *m, const stx_ids *ids, const stx_ids *targets, const stx_sru_state *s, uint64_t salt);

/* Token by token. SRU keeps c alone; SRU++ also the projected keys and values of the last `window` times. Equal to one segment over
   the whole text with that window. Make a new one, or reset it, when the parameters have changed. */
typedef struct stx_sru_gen {
    stx_sru_lm    *model;
    size_t         B, window, chunk;
    size_t         capacity, len;   /* rows of room, rows used in keys and values */
    stx_real     **keys, **values;  /* per layer: (B,capacity,P), on the device; NULL for those that do not attend */
    stx_sru_state *state;           /* c */
    stx_real      *out;             /* (B,V), on the host */
} stx_sru_gen;

/* window: how far attention reaches back; 0: 1024 */
STX_DEF stx_sru_gen *stx_sru_gen_create(stx_sru_lm *m, size_t B, size_t window);
STX_DEF void stx_sru_gen_free(stx_sru_gen *g);
STX_DEF void stx_sru_gen_reset(stx_sru_gen *g);
/* Feeds ids (B,n), n >= 1, and returns the logits (B,V) after the last of them, in host memory; log-probabilities with adapt_io.
   They stay until the next call. Calls stx_begin(x, STX_EVAL): not between a forward and its backward. */
STX_DEF const stx_real *stx_sru_gen_feed(stx_sru_gen *g, const int32_t *ids, size_t n);

// >>recurrence: op -------------------------------------------------------------------------------------------------

/* The recurrence alone, as an op; shapes and formulas: stx_sru_args. Inputs that are not there are NULL. */
typedef struct stx_sru_cell {
    stx_tensor *u;          /* (B,T,k,O) */
    stx_tensor *xr;         /* (B,T,O), k = 3 only: the highway */
    stx_tensor *v, *bias;   /* (2,O); v NULL: zero */
    stx_tensor *V;          /* (B,T,2,O), added to v */
    stx_tensor *c0;         /* (B,O) */
    stx_tensor *mask;       /* (B,O): m, a constant */
    const stx_ids *pad;     /* (B,T) */
    size_t directions;      /* D; 0: 1 */
    double alpha;           /* 0: 1 */
    int    tanh;
} stx_sru_cell;
/* -> h (B,T,O); last (NULL: not wanted) gets the states after (B,O). */
STX_DEF stx_tensor *stx_sru_recurrence(stx_ctx *x, const stx_sru_cell *in, stx_tensor **last);

// >>recurrence: kernels --------------------------------------------------------------------------------------------

/* For each batch row b and unit o = s H + j of direction s, t running 0 .. T-1 for s = 0 and T-1 .. 0 for s = 1, from c = c0:
       f  = sigmoid(u1 + vf c + bf)
       r  = sigmoid(u2 + vr c + br)         both of the state before
       c' = u0 + (c - u0) f
       xt = alpha xr  (k = 3)  |  u3  (k = 4)  |  0  (k = 3, xr NULL)
       h  = xt + (g(c') - xt) m r           g(c) = c, or tanh c
   Where pad is not 0: c' = c, h = 0. Activations as the context stores them; v, bias, states and their gradients floats. */
typedef struct stx_sru_args {
    size_t B, T, H, D, k;           /* O = D H */
    int    tanh;
    stx_real alpha;
    const stx_real *u, *xr;         /* (B,T,k,O); (B,T,O) or NULL */
    const stx_real *v, *bias;       /* (2,O): vf, vr (NULL: zero); bf, br */
    const stx_real *V;              /* (B,T,2,O) or NULL: vf, vr of a time are v's and these */
    const stx_real *c0;             /* (B,O) or NULL: zero */
    const stx_real *m;              /* (B,O) floats or NULL: one */
    const int32_t  *pad;            /* (B,T) or NULL */
    stx_real *h, *last;             /* (B,T,O); (B,O) */
    stx_real *c;                    /* (B,tiles,O), saved: the state before each tile of STX_SRU_TILE steps, in the order of the direction;
                                       NULL: no backward will come. Backward makes the others again from these */
    const stx_real *dh, *dlast;     /* as h and last; NULL: zero */
    stx_real *du, *dV;              /* as u, V: written */
    stx_real *dxr;                  /* as xr: written, or added to with add_xr */
    stx_real *dv, *dbias, *dc0;     /* as v, bias, c0: added to. Each gradient but du NULL if not wanted */
    int add_xr;
    void *work;                     /* stx_sru_work bytes, for the call only */
} stx_sru_args;
enum { STX_SRU_TILE = 32 };
static inline size_t stx_sru_tiles(const stx_sru_args *a) { return (a->T + STX_SRU_TILE - 1) / STX_SRU_TILE; }
STX_DEF size_t stx_sru_work(stx_ctx *x, const stx_sru_args *a, int backward);
#ifdef SEQTX_CUDA
extern size_t stx_sru_work_cuda(stx_ctx *x, const stx_sru_args *a, int backward);
#endif
STX_KERNEL(stx_sru_fwd, (stx_ctx *x, const stx_sru_args *a))
STX_KERNEL(stx_sru_bwd, (stx_ctx *x, const stx_sru_args *a))

#ifdef __cplusplus
}
#endif

/* Stop here if you only want the API. */
#endif /* SEQTX_SRU_H */
