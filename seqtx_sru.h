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
    stx_real *dv, *dbias, *dc0;     /* as v, bias, c0: added to. Each NULL if not wanted, but du and, with V, dV */
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

#if (defined(SEQTX_IMPLEMENTATION) || defined(SEQTX_SRU_IMPLEMENTATION)) && !defined(SEQTX_SRU_IMPLEMENTATION_DONE)
#define SEQTX_SRU_IMPLEMENTATION_DONE

#define STX__LOOPS
#include "seqtx.h"      /* once more, for the inner loops' macros */

#include <stdio.h>

// >>recurrence: kernels
/* Columns are independent of each other and times are not: vectors lie across columns. A unit of work is a block of columns of one
   batch row and direction; it walks over time tile by tile. h and states stream through; what a block needs of constants (v, bias,
   mask) and its state stay in the first cache. Index p counts steps in the order of the direction; t is the time of step p.

   Nothing but the state before each tile is kept for backward, which makes the states and forget gates of a tile again, in the first
   cache, before it walks the tile backwards: a fifth less traffic than keeping every c, and (B,T,O) less memory.

   When there are fewer blocks than threads, time is cut as well. Backward is affine in e, the adjoint of the state:
       e_{t-1} = J e_t + q,   J = f + vf (c_{t-1} - u0) f (1-f),   q = dh m r g' J + dzr vr
   so chunks of time first find the product of their J and their offset, in parallel; the adjoints at the chunks' ends follow by a short
   walk over the chunks; then all chunks run at once. Forward is affine in c only if f does not depend on it: v zero. */

enum { STX__SRU_W = sizeof(stx_real) == 4 ? 128 : 64 };      /* columns of a block: a tile of them is 50 KB on the stack */

typedef struct stx__sru_plan { size_t O, blocks, units, tiles, chunks, each, ldu; } stx__sru_plan;      /* each: tiles of a chunk */
static void stx__sru_plan_of(stx__sru_plan *p, const stx_sru_args *a, size_t threads, int backward) {
    p->O = a->D * a->H;
    p->blocks = (a->H + STX__SRU_W - 1) / STX__SRU_W;
    p->units = a->B * a->D * p->blocks;
    p->tiles = stx_sru_tiles(a);
    p->ldu = a->k * p->O;
    p->chunks = 1;
    if (p->units < threads && (backward || (!a->v && !a->V))) {     /* two passes have to pay: two threads and more for one block */
        size_t want = 2 * threads / p->units;
        p->chunks = want < p->tiles / 2 ? want : p->tiles / 2;
        if (!p->chunks || threads < 2 * p->units) p->chunks = 1;
    }
    p->each = (p->tiles + p->chunks - 1) / p->chunks;
    p->chunks = p->each ? (p->tiles + p->each - 1) / p->each : 1;
}
/* Work: forward (chunks > 1): product and offset of each chunk; backward also the four sums of dv and dbias. (B,chunks,O) each. */
STX_DEF size_t stx_sru_work(stx_ctx *x, const stx_sru_args *a, int backward) {
    stx__sru_plan p;
    stx__sru_plan_of(&p, a, (size_t)stx_threads(x), backward);
    return stx_bytes_of(a->B * p.chunks, p.O, ((p.chunks > 1 ? 2 : 0) + (backward ? 4 : 0)) * sizeof(stx_real));
}

/* One block of columns: where its numbers stand, constants filled in */
typedef struct stx__sru_block {
    const stx_sru_args *a;
    size_t b, s, o, n, O, ldu;
    ptrdiff_t step;                         /* 1, or -1 in the second direction */
    const stx_real *vf, *vr, *bf, *br, *m;
    stx_real c[STX__SRU_W], none[STX__SRU_W], ones[STX__SRU_W];
} stx__sru_block;
static void stx__sru_open(stx__sru_block *k, const stx_sru_args *a, const stx__sru_plan *p, size_t unit) {
    size_t j, at;
    k->a = a;
    k->O = p->O;
    k->ldu = p->ldu;
    k->b = unit / (a->D * p->blocks);
    k->s = unit / p->blocks % a->D;
    at = unit % p->blocks * STX__SRU_W;
    k->n = STX__MIN((size_t)STX__SRU_W, a->H - at);
    k->o = k->s * a->H + at;
    k->step = k->s ? -1 : 1;
    for (j = 0; j < k->n; j++) { k->none[j] = 0; k->ones[j] = 1; }
    k->vf = a->v ? a->v + k->o : k->none;
    k->vr = a->v ? a->v + p->O + k->o : k->none;
    k->bf = a->bias + k->o;
    k->br = a->bias + p->O + k->o;
    k->m = a->m ? a->m + k->b * p->O + k->o : k->ones;
}
static size_t stx__sru_row(const stx__sru_block *k, size_t p) { return k->b * k->a->T + (k->s ? k->a->T - 1 - p : p); }      /* of step p, in (B,T) */
static int stx__sru_padded(const stx__sru_block *k, size_t p) { return k->a->pad && k->a->pad[stx__sru_row(k, p)]; }
/* The end of the run of steps that are not padding, from p on */
static size_t stx__sru_run(const stx__sru_block *k, size_t p, size_t end) {
    while (p < end && !stx__sru_padded(k, p)) p++;
    return p;
}
/* Plane i of u; the highway's input and the distance of its rows */
static const stx_real *stx__sru_u(const stx__sru_block *k, size_t row, size_t i) { return k->a->u + row * k->ldu + i * k->O + k->o; }
static const stx_real *stx__sru_x(const stx__sru_block *k, size_t row, ptrdiff_t *ld) {
    *ld = k->a->k == 4 ? k->step * (ptrdiff_t)k->ldu : k->a->xr ? k->step * (ptrdiff_t)k->O : 0;
    return k->a->k == 4 ? stx__sru_u(k, row, 3) : k->a->xr ? k->a->xr + row * k->O + k->o : k->none;
}
static stx_real stx__sru_alpha(const stx_sru_args *a) { return a->k == 4 ? 1 : a->alpha; }

/* `steps` steps of n columns, rows ld* apart; vf, vr have V's rows added if gates */
#define STX__SRU_IN const stx_real *STX__RESTRICT u0, const stx_real *STX__RESTRICT u2, ptrdiff_t ldu, const stx_real *STX__RESTRICT xt, ptrdiff_t ldx, \
    const stx_real *STX__RESTRICT V, ptrdiff_t ldv, size_t O, const stx_real *STX__RESTRICT vf, const stx_real *STX__RESTRICT vr, const stx_real *STX__RESTRICT br, \
    const stx_real *STX__RESTRICT m, stx_real alpha, size_t steps, size_t n
#define STX__SRU_ARGS u0, u2, ldu, xt, ldx, V, ldv, O, vf, vr, br, m, alpha, steps, n

STX__INNER void stx__sru_steps_as(int fma, stx_real *h, ptrdiff_t ldh, stx_real *c, const stx_real *u1, const stx_real *bf, STX__SRU_IN, int tanh_, int gates) {
    size_t p, j;
    for (p = 0; p < steps; p++, h += ldh, u0 += ldu, u1 += ldu, u2 += ldu, xt += ldx, V += ldv)
        for (j = 0; j < n; j++) {
            stx_real cp = c[j], f, r, cn, g, xv = alpha * xt[j];
            f = stx__sigmoid_any(fma, STX__FMA(fma, gates ? vf[j] + V[j] : vf[j], cp, u1[j] + bf[j]));
            r = stx__sigmoid_any(fma, STX__FMA(fma, gates ? vr[j] + V[O + j] : vr[j], cp, u2[j] + br[j]));
            cn = STX__FMA(fma, cp - u0[j], f, u0[j]);
            g = tanh_ ? stx__tanh_any(fma, cn) : cn;
            c[j] = cn;
            h[j] = STX__FMA(fma, (g - xv) * m[j], r, xv);
        }
}
STX__INNER void stx__sru_steps(int fma, stx_real *h, ptrdiff_t ldh, stx_real *c, const stx_real *u1, const stx_real *bf, STX__SRU_IN, int tanh_, int gates) {
    if (tanh_) { if (gates) stx__sru_steps_as(fma, h, ldh, c, u1, bf, STX__SRU_ARGS, 1, 1); else stx__sru_steps_as(fma, h, ldh, c, u1, bf, STX__SRU_ARGS, 1, 0); }
    else if (gates) stx__sru_steps_as(fma, h, ldh, c, u1, bf, STX__SRU_ARGS, 0, 1);
    else stx__sru_steps_as(fma, h, ldh, c, u1, bf, STX__SRU_ARGS, 0, 0);
}
STX__EACH_ISA(stx__sru_steps, (stx_real *STX__RESTRICT h, ptrdiff_t ldh, stx_real *STX__RESTRICT c, const stx_real *STX__RESTRICT u1, const stx_real *STX__RESTRICT bf, STX__SRU_IN, int tanh_, int gates),
              h, ldh, c, u1, bf, STX__SRU_ARGS, tanh_, gates)

/* Steps [p0, p1) of a block, whose state before them is k->c */
static void stx__sru_fwd_range(stx_ctx *x, stx__sru_block *k, const stx__sru_plan *plan, size_t p0, size_t p1) {
    const stx_sru_args *a = k->a;
    size_t p = p0, end, row;
    while (p < p1) {
        if (p % STX_SRU_TILE == 0 && a->c) memcpy(a->c + (k->b * plan->tiles + p / STX_SRU_TILE) * k->O + k->o, k->c, k->n * sizeof *k->c);
        row = stx__sru_row(k, p);
        end = stx__sru_run(k, p, STX__MIN(p1, (p / STX_SRU_TILE + 1) * STX_SRU_TILE));
        if (end == p) {
            memset(a->h + row * k->O + k->o, 0, k->n * sizeof *a->h);
            p++;
        } else {
            ptrdiff_t ldx;
            const stx_real *xt = stx__sru_x(k, row, &ldx), *V = a->V ? a->V + row * 2 * k->O + k->o : k->none;
            STX__CALL(x, stx__sru_steps, (a->h + row * k->O + k->o, k->step * (ptrdiff_t)k->O, k->c, stx__sru_u(k, row, 1), k->bf, stx__sru_u(k, row, 0), stx__sru_u(k, row, 2),
                                          k->step * (ptrdiff_t)k->ldu, xt, ldx, V, a->V ? k->step * 2 * (ptrdiff_t)k->O : 0, k->O, k->vf, k->vr, k->br, k->m,
                                          stx__sru_alpha(a), end - p, k->n, a->tanh, a->V != NULL));
            p = end;
        }
    }
}
/* v zero: c_end = P c_begin + Q over steps that are not padding */
STX__INNER void stx__sru_scan(int fma, stx_real *P, stx_real *Q, const stx_real *u0, const stx_real *u1, ptrdiff_t ldu, const stx_real *bf, size_t steps, size_t n) {
    size_t p, j;
    for (p = 0; p < steps; p++, u0 += ldu, u1 += ldu)
        for (j = 0; j < n; j++) {
            stx_real f = stx__sigmoid_any(fma, u1[j] + bf[j]);
            P[j] *= f;
            Q[j] = STX__FMA(fma, Q[j] - u0[j], f, u0[j]);
        }
}
STX__EACH_ISA(stx__sru_scan, (stx_real *STX__RESTRICT P, stx_real *STX__RESTRICT Q, const stx_real *STX__RESTRICT u0, const stx_real *STX__RESTRICT u1, ptrdiff_t ldu, const stx_real *STX__RESTRICT bf, size_t steps, size_t n),
              P, Q, u0, u1, ldu, bf, steps, n)

static void stx__sru_state_in(stx__sru_block *k) {
    if (k->a->c0) memcpy(k->c, k->a->c0 + k->b * k->O + k->o, k->n * sizeof *k->c);
    else memcpy(k->c, k->none, k->n * sizeof *k->c);
}
/* Product and offset of chunk q of batch row b stand at work + ((b chunks + q) 2 + 0 or 1) O */
static stx_real *stx__sru_carry(const stx_sru_args *a, const stx__sru_plan *p, size_t b, size_t q) { return (stx_real *)a->work + (b * p->chunks + q) * 2 * p->O; }

STX_DEF void stx_sru_fwd(stx_ctx *x, const stx_sru_args *a) {
    stx__sru_plan plan;
    size_t work = a->B * a->T * a->D * a->H * 16;
    ptrdiff_t i;
    stx__sru_plan_of(&plan, a, (size_t)stx_threads(x), 0);
    if (plan.chunks > 1) {
        STX__FOR(x, work)
        for (i = 0; i < (ptrdiff_t)(plan.units * plan.chunks); i++) {
            stx__sru_block k;
            size_t q = (size_t)i % plan.chunks, p = q * plan.each * STX_SRU_TILE, last = STX__MIN(a->T, p + plan.each * STX_SRU_TILE), j;
            stx_real *P, *Q;
            stx__sru_open(&k, a, &plan, (size_t)i / plan.chunks);
            P = stx__sru_carry(a, &plan, k.b, q) + k.o;
            Q = P + k.O;
            for (j = 0; j < k.n; j++) { P[j] = 1; Q[j] = 0; }
            while (p < last) {
                size_t end = stx__sru_run(&k, p, last), row = stx__sru_row(&k, p);
                if (end > p) STX__CALL(x, stx__sru_scan, (P, Q, stx__sru_u(&k, row, 0), stx__sru_u(&k, row, 1), k.step * (ptrdiff_t)k.ldu, k.bf, end - p, k.n));
                p = end + 1;
            }
        }
    }
    STX__FOR(x, work)
    for (i = 0; i < (ptrdiff_t)(plan.units * plan.chunks); i++) {
        stx__sru_block k;
        size_t q = (size_t)i % plan.chunks, p0 = q * plan.each * STX_SRU_TILE, p1 = STX__MIN(a->T, p0 + plan.each * STX_SRU_TILE), e, j;
        stx__sru_open(&k, a, &plan, (size_t)i / plan.chunks);
        stx__sru_state_in(&k);
        for (e = 0; e < q; e++) {       /* the chunks before, short: nobody waits for another one */
            const stx_real *P = stx__sru_carry(a, &plan, k.b, e) + k.o, *Q = P + k.O;
            for (j = 0; j < k.n; j++) k.c[j] = P[j] * k.c[j] + Q[j];
        }
        stx__sru_fwd_range(x, &k, &plan, p0, p1);
        if (a->last && q + 1 == plan.chunks) memcpy(a->last + k.b * k.O + k.o, k.c, k.n * sizeof *k.c);
    }
}

/* Backward. The states of a tile again: cs (steps+1,n), whose first row is there, and fs (steps,n), both rows W apart:
       f = sigmoid(u1 + vf c + bf) ; c' = u0 + (c - u0) f */
STX__INNER void stx__sru_again_as(int fma, stx_real *cs, stx_real *fs, const stx_real *u0, const stx_real *u1, ptrdiff_t ldu, const stx_real *V, ptrdiff_t ldv, const stx_real *vf, const stx_real *bf,
                                  size_t steps, size_t n, int gates) {
    size_t p, j;
    for (p = 0; p < steps; p++, cs += STX__SRU_W, fs += STX__SRU_W, u0 += ldu, u1 += ldu, V += ldv)
        for (j = 0; j < n; j++) {
            stx_real f = stx__sigmoid_any(fma, STX__FMA(fma, gates ? vf[j] + V[j] : vf[j], cs[j], u1[j] + bf[j]));
            fs[j] = f;
            cs[STX__SRU_W + j] = STX__FMA(fma, cs[j] - u0[j], f, u0[j]);
        }
}
STX__INNER void stx__sru_again(int fma, stx_real *cs, stx_real *fs, const stx_real *u0, const stx_real *u1, ptrdiff_t ldu, const stx_real *V, ptrdiff_t ldv, const stx_real *vf, const stx_real *bf,
                               size_t steps, size_t n, int gates) {
    if (gates) stx__sru_again_as(fma, cs, fs, u0, u1, ldu, V, ldv, vf, bf, steps, n, 1);
    else stx__sru_again_as(fma, cs, fs, u0, u1, ldu, V, ldv, vf, bf, steps, n, 0);
}
STX__EACH_ISA(stx__sru_again, (stx_real *cs, stx_real *STX__RESTRICT fs, const stx_real *STX__RESTRICT u0, const stx_real *STX__RESTRICT u1, ptrdiff_t ldu, const stx_real *STX__RESTRICT V, ptrdiff_t ldv,
                               const stx_real *STX__RESTRICT vf, const stx_real *STX__RESTRICT bf, size_t steps, size_t n, int gates), cs, fs, u0, u1, ldu, V, ldv, vf, bf, steps, n, gates)

/* One step back, for one column:
       h  = xt + (g(c') - xt) m r        dzr = dh (g - xt) m r (1-r) ;  a = dh m r g' + e ;  dxt = dh (1 - m r)
       c' = u0 + (c - u0) f              dzf = a (c - u0) f (1-f) ;  du0 = a (1-f)
       e  <- a f + dzf vf + dzr vr */
#define STX__SRU_BACK \
    stx_real cp = cs[j], f = fs[j], xv = alpha * xt[j], gm = dh[j] * m[j], wf = gates ? vf[j] + V[j] : vf[j], wr = gates ? vr[j] + V[O + j] : vr[j]; \
    stx_real r = stx__sigmoid_any(fma, STX__FMA(fma, wr, cp, u2[j] + br[j])), g = tanh_ ? stx__tanh_any(fma, cs[STX__SRU_W + j]) : cs[STX__SRU_W + j]; \
    stx_real slope = tanh_ ? 1 - g * g : 1, dzr = gm * (g - xv) * (r - r * r), in = gm * r * slope, df = (cp - u0[j]) * (f - f * f)

/* Where the gradients go: du, its planes O apart, and dx with rows ldd apart; dV as V; sums (4,n), W apart, of dvf, dvr, dbf, dbr. All
   pointers at the last step; rows before it by ld*. */
STX__INNER void stx__sru_back_as(int fma, stx_real *du, stx_real *dx, ptrdiff_t ldd, stx_real *dV, stx_real *e, stx_real *sums, const stx_real *dh, ptrdiff_t ldh,
                                 const stx_real *cs, const stx_real *fs, STX__SRU_IN, int tanh_, int gates) {
    size_t p, j;
    for (p = 0; p < steps; p++, u0 -= ldu, u2 -= ldu, du -= ldu, xt -= ldx, dx -= ldd, V -= ldv, dV -= ldv, dh -= ldh, cs -= STX__SRU_W, fs -= STX__SRU_W)
        for (j = 0; j < n; j++) {
            STX__SRU_BACK;
            stx_real a = in + e[j], dzf = a * df;
            du[j] = a - a * f;
            du[O + j] = dzf;
            du[2 * O + j] = dzr;
            dx[j] = alpha * STX__FMA(fma, -gm, r, dh[j]);
            if (gates) { dV[j] = dzf * cp; dV[O + j] = dzr * cp; }
            sums[j] = STX__FMA(fma, dzf, cp, sums[j]);
            sums[STX__SRU_W + j] = STX__FMA(fma, dzr, cp, sums[STX__SRU_W + j]);
            sums[2 * STX__SRU_W + j] += dzf;
            sums[3 * STX__SRU_W + j] += dzr;
            e[j] = STX__FMA(fma, dzr, wr, STX__FMA(fma, dzf, wf, a * f));
        }
}
STX__INNER void stx__sru_back(int fma, stx_real *du, stx_real *dx, ptrdiff_t ldd, stx_real *dV, stx_real *e, stx_real *sums, const stx_real *dh, ptrdiff_t ldh,
                              const stx_real *cs, const stx_real *fs, STX__SRU_IN, int tanh_, int gates) {
    if (tanh_) {
        if (gates) stx__sru_back_as(fma, du, dx, ldd, dV, e, sums, dh, ldh, cs, fs, STX__SRU_ARGS, 1, 1);
        else stx__sru_back_as(fma, du, dx, ldd, dV, e, sums, dh, ldh, cs, fs, STX__SRU_ARGS, 1, 0);
    } else if (gates) stx__sru_back_as(fma, du, dx, ldd, dV, e, sums, dh, ldh, cs, fs, STX__SRU_ARGS, 0, 1);
    else stx__sru_back_as(fma, du, dx, ldd, dV, e, sums, dh, ldh, cs, fs, STX__SRU_ARGS, 0, 0);
}
STX__EACH_ISA(stx__sru_back, (stx_real *STX__RESTRICT du, stx_real *STX__RESTRICT dx, ptrdiff_t ldd, stx_real *STX__RESTRICT dV, stx_real *STX__RESTRICT e, stx_real *STX__RESTRICT sums,
                              const stx_real *STX__RESTRICT dh, ptrdiff_t ldh, const stx_real *STX__RESTRICT cs, const stx_real *STX__RESTRICT fs, STX__SRU_IN, int tanh_, int gates),
              du, dx, ldd, dV, e, sums, dh, ldh, cs, fs, STX__SRU_ARGS, tanh_, gates)
/* The affine map of these steps for e, after those of the steps behind them: Q <- J Q + q, P <- J P */
STX__INNER void stx__sru_affine(int fma, stx_real *P, stx_real *Q, const stx_real *dh, ptrdiff_t ldh, const stx_real *cs, const stx_real *fs, STX__SRU_IN, int tanh_, int gates) {
    size_t p, j;
    for (p = 0; p < steps; p++, u0 -= ldu, u2 -= ldu, xt -= ldx, V -= ldv, dh -= ldh, cs -= STX__SRU_W, fs -= STX__SRU_W)
        for (j = 0; j < n; j++) {
            STX__SRU_BACK;
            stx_real J = STX__FMA(fma, wf, df, f);
            Q[j] = STX__FMA(fma, Q[j] + in, J, dzr * wr);
            P[j] *= J;
        }
}
STX__EACH_ISA(stx__sru_affine, (stx_real *STX__RESTRICT P, stx_real *STX__RESTRICT Q, const stx_real *STX__RESTRICT dh, ptrdiff_t ldh, const stx_real *STX__RESTRICT cs, const stx_real *STX__RESTRICT fs,
                                STX__SRU_IN, int tanh_, int gates), P, Q, dh, ldh, cs, fs, STX__SRU_ARGS, tanh_, gates)

/* A tile on the way back: states and gates again, then its steps, last first. With P: only the map of e into P and Q. */
typedef struct stx__sru_tile {
    stx_real cs[(STX_SRU_TILE + 1) * STX__SRU_W], fs[STX_SRU_TILE * STX__SRU_W], dx[STX_SRU_TILE * STX__SRU_W], sums[4 * STX__SRU_W];
} stx__sru_tile;
static void stx__sru_bwd_tile(stx_ctx *x, stx__sru_block *k, const stx__sru_plan *plan, stx__sru_tile *w, size_t tile, stx_real *e, stx_real *P, stx_real *Q) {
    const stx_sru_args *a = k->a;
    size_t first = tile * STX_SRU_TILE, last = STX__MIN(a->T, first + STX_SRU_TILE), p, end, row, j;
    ptrdiff_t ldu = k->step * (ptrdiff_t)k->ldu, ldO = k->step * (ptrdiff_t)k->O, ldv = a->V ? 2 * ldO : 0, ldx;
    memcpy(w->cs, a->c + (k->b * plan->tiles + tile) * k->O + k->o, k->n * sizeof *w->cs);
    for (p = first; p < last; p = end) {
        stx_real *at = w->cs + (p - first) * STX__SRU_W;
        end = stx__sru_run(k, p, last);
        row = stx__sru_row(k, p);
        if (end == p) { memcpy(at + STX__SRU_W, at, k->n * sizeof *at); end++; }      /* padding: the state passes by */
        else STX__CALL(x, stx__sru_again, (at, w->fs + (p - first) * STX__SRU_W, stx__sru_u(k, row, 0), stx__sru_u(k, row, 1), ldu, a->V ? a->V + row * 2 * k->O + k->o : k->none, ldv, k->vf, k->bf, end - p, k->n, a->V != NULL));
    }
    for (end = last; end > first; end = p) {
        const stx_real *xt, *V, *dh, *cs, *fs;
        for (p = end; p > first && !stx__sru_padded(k, p - 1); p--) {}
        row = stx__sru_row(k, end - 1);
        if (p == end) {
            p--;
            if (P) continue;
            for (j = 0; j < a->k; j++) memset(a->du + row * k->ldu + j * k->O + k->o, 0, k->n * sizeof *a->du);
            if (a->dxr && !a->add_xr) memset(a->dxr + row * k->O + k->o, 0, k->n * sizeof *a->dxr);
            if (a->dV) for (j = 0; j < 2; j++) memset(a->dV + (row * 2 + j) * k->O + k->o, 0, k->n * sizeof *a->dV);
            continue;
        }
        xt = stx__sru_x(k, row, &ldx);
        V = a->V ? a->V + row * 2 * k->O + k->o : k->none;
        dh = a->dh ? a->dh + row * k->O + k->o : k->none;
        cs = w->cs + (end - 1 - first) * STX__SRU_W;
        fs = w->fs + (end - 1 - first) * STX__SRU_W;
        if (P) STX__CALL(x, stx__sru_affine, (P, Q, dh, a->dh ? ldO : 0, cs, fs, stx__sru_u(k, row, 0), stx__sru_u(k, row, 2), ldu, xt, ldx, V, ldv, k->O, k->vf, k->vr, k->br, k->m, stx__sru_alpha(a), end - p, k->n, a->tanh, a->V != NULL));
        else {
            stx_real *du = a->du + row * k->ldu + k->o, *dx = w->dx + (end - 1 - first) * STX__SRU_W, *dV = w->dx;
            ptrdiff_t ldd = STX__SRU_W;
            int direct = 1;
            if (a->k == 4) { dx = du + 3 * k->O; ldd = ldu; }
            else if (a->dxr && !a->add_xr) { dx = a->dxr + row * k->O + k->o; ldd = ldO; }
            else direct = !a->dxr;
            if (a->dV) dV = a->dV + row * 2 * k->O + k->o;
            STX__CALL(x, stx__sru_back, (du, dx, ldd, dV, e, w->sums, dh, a->dh ? ldO : 0, cs, fs, stx__sru_u(k, row, 0), stx__sru_u(k, row, 2), ldu, xt, ldx, V, ldv, k->O, k->vf, k->vr, k->br, k->m, stx__sru_alpha(a), end - p, k->n, a->tanh, a->V != NULL));
            for (; !direct && end > p; end--) {
                stx_real *to = a->dxr + stx__sru_row(k, end - 1) * k->O + k->o;
                for (j = 0; j < k->n; j++) to[j] += w->dx[(end - 1 - first) * STX__SRU_W + j];
            }
        }
    }
}

STX_DEF void stx_sru_bwd(stx_ctx *x, const stx_sru_args *a) {
    stx__sru_plan plan;
    size_t work = a->B * a->T * a->D * a->H * 32, rows;
    stx_real *sums_v, *sums_b;
    ptrdiff_t i;
    stx__sru_plan_of(&plan, a, (size_t)stx_threads(x), 1);
    rows = a->B * plan.chunks;
    sums_v = (stx_real *)a->work + (plan.chunks > 1 ? 2 * rows * plan.O : 0);      /* (B chunks, 2, O) twice */
    sums_b = sums_v + 2 * rows * plan.O;
    if (plan.chunks > 1) {
        STX__FOR(x, work)
        for (i = 0; i < (ptrdiff_t)(plan.units * plan.chunks); i++) {
            stx__sru_block k;
            stx__sru_tile w;
            size_t q = (size_t)i % plan.chunks, tile, j;
            stx_real *P, *Q;
            if (!q) continue;           /* nobody asks for the map of the first one */
            stx__sru_open(&k, a, &plan, (size_t)i / plan.chunks);
            P = stx__sru_carry(a, &plan, k.b, q) + k.o;
            Q = P + k.O;
            for (j = 0; j < k.n; j++) { P[j] = 1; Q[j] = 0; }
            for (tile = STX__MIN(plan.tiles, (q + 1) * plan.each); tile-- > q * plan.each;) stx__sru_bwd_tile(x, &k, &plan, &w, tile, NULL, P, Q);
        }
    }
    STX__FOR(x, work)
    for (i = 0; i < (ptrdiff_t)(plan.units * plan.chunks); i++) {
        stx__sru_block k;
        stx__sru_tile w;
        stx_real e[STX__SRU_W], total[4 * STX__SRU_W];
        size_t q = (size_t)i % plan.chunks, tile, behind, j, g;
        stx__sru_open(&k, a, &plan, (size_t)i / plan.chunks);
        for (j = 0; j < k.n; j++) e[j] = a->dlast ? a->dlast[k.b * k.O + k.o + j] : 0;
        for (behind = plan.chunks; --behind > q;) {
            const stx_real *P = stx__sru_carry(a, &plan, k.b, behind) + k.o, *Q = P + k.O;
            for (j = 0; j < k.n; j++) e[j] = P[j] * e[j] + Q[j];
        }
        memset(total, 0, sizeof total);
        for (tile = STX__MIN(plan.tiles, (q + 1) * plan.each); tile-- > q * plan.each;) {
            memset(w.sums, 0, sizeof w.sums);
            stx__sru_bwd_tile(x, &k, &plan, &w, tile, e, NULL, NULL);
            for (j = 0; j < 4 * STX__SRU_W; j++) total[j] += w.sums[j];      /* sums of tiles, then their sum: fewer digits are lost */
        }
        for (g = 0; g < 4; g++)
            memcpy((g < 2 ? sums_v : sums_b) + ((k.b * plan.chunks + q) * 2 + g % 2) * k.O + k.o, total + g * STX__SRU_W, k.n * sizeof *total);
        if (a->dc0 && !q) for (j = 0; j < k.n; j++) a->dc0[k.b * k.O + k.o + j] += e[j];
    }
    if (a->dv) stx_sum_rows(x, a->dv, sums_v, rows, 2 * plan.O);
    if (a->dbias) stx_sum_rows(x, a->dbias, sums_b, rows, 2 * plan.O);
}

// >>recurrence: op

typedef struct stx__sru_save { stx_sru_args a; stx_real *dlast; } stx__sru_save;

static size_t stx__sru_room(stx_ctx *x, const stx_sru_args *a, int backward) {
#ifdef SEQTX_CUDA
    if (stx_ctx_desc(x)->device == STX_CUDA) return stx_sru_work_cuda(x, a, backward);
#endif
    return stx_sru_work(x, a, backward);
}
/* Room for a gradient that the kernel writes: t's own when nothing is in it yet, else (or when nobody wants it) some of the step's */
static stx_real *stx__sru_grad(stx_ctx *x, stx_tensor *t, int *own) {
    stx_real *g;
    *own = 0;
    g = stx_grad(x, t, own);
    return g && *own ? g : stx_step_numbers(x, t->size);
}
static void stx__sru_grad_add(stx_ctx *x, stx_tensor *t, const stx_real *g, int own) {
    stx_real *d = own ? NULL : stx_grad(x, t, NULL);
    if (d) STX_RUN(x, stx_axpy, (x, d, g, t->size, 1, 1));
}
static void stx__sru_back_op(stx_ctx *x, stx_tensor *y, stx_tensor *const *in, void *save) {
    stx__sru_save *s = (stx__sru_save *)save;
    stx_sru_args *a = &s->a;
    int own_u, own_V = 1, fresh = 0;
    a->dh = y->grad;
    a->dlast = s->dlast;
    a->du = stx__sru_grad(x, in[0], &own_u);
    a->dxr = in[1] ? stx_grad(x, in[1], &fresh) : NULL;
    a->add_xr = !fresh;
    a->dv = in[2] ? stx_grad(x, in[2], NULL) : NULL;
    a->dbias = stx_grad(x, in[3], NULL);
    a->dV = in[4] ? stx__sru_grad(x, in[4], &own_V) : NULL;
    a->dc0 = in[5] ? stx_grad(x, in[5], NULL) : NULL;
    a->work = stx_step_bytes(x, stx__sru_room(x, a, 1));
    if (!stx_ok(x)) return;
    STX_RUN(x, stx_sru_bwd, (x, a));
    stx__sru_grad_add(x, in[0], a->du, own_u);
    if (in[4]) stx__sru_grad_add(x, in[4], a->dV, own_V);
}
/* The states after are a second result of the same op: their gradient waits for h's, which it makes sure there is. */
static void stx__sru_last_back(stx_ctx *x, stx_tensor *y, stx_tensor *const *in, void *save) {
    stx__sru_save *s = (stx__sru_save *)save;
    s->dlast = (stx_real *)stx_step_bytes(x, y->size * sizeof(stx_real));
    if (!s->dlast || !stx_grad(x, in[0], NULL)) return;
    STX_RUN(x, stx_axpy, (x, s->dlast, y->grad, y->size, 1, 0));
}
static stx_tensor *stx__sru_bad(stx_ctx *x, const char *what) { stx_fail(x, STX_ERR_SHAPE, "stx_sru_recurrence: %s", what); return NULL; }
STX_DEF stx_tensor *stx_sru_recurrence(stx_ctx *x, const stx_sru_cell *in, stx_tensor **last) {
    stx_tensor *y, *ins[6];
    stx__sru_save *s;
    stx_sru_args *a;
    size_t B, T, O, k, D;
    if (last) *last = NULL;
    if (!stx_ok(x) || !in || !in->u || !in->bias) return NULL;
    if (in->u->ndim != 4) return stx__sru_bad(x, "u wants the shape (B,T,k,O): stx_reshape the product");
    B = in->u->dim[0]; T = in->u->dim[1]; k = in->u->dim[2]; O = in->u->dim[3];
    D = in->directions ? in->directions : 1;
    if (k != 3 && k != 4) return stx__sru_bad(x, "u has neither 3 nor 4 planes");
    if (D > 2 || O % D) return stx__sru_bad(x, "1 or 2 directions, which divide O");
    if (in->xr && (k == 4 || in->xr->ndim != 3 || in->xr->dim[0] != B || in->xr->dim[1] != T || in->xr->dim[2] != O)) return stx__sru_bad(x, "xr wants the shape (B,T,O), and u 3 planes");
    if ((in->v && in->v->size != 2 * O) || in->bias->size != 2 * O) return stx__sru_bad(x, "v and bias want 2 O numbers");
    if (in->V && in->V->size != B * T * 2 * O) return stx__sru_bad(x, "V wants the shape (B,T,2,O)");
    if ((in->c0 && in->c0->size != B * O) || (in->mask && in->mask->size != B * O)) return stx__sru_bad(x, "c0 and mask want B O numbers");
    if (in->pad && (in->pad->B != B || in->pad->T != T)) return stx__sru_bad(x, "pad wants the shape (B,T)");
    y = stx_new(x, B, T, O, 0);
    s = (stx__sru_save *)stx_step_alloc(x, sizeof *s);
    if (!y || !s) return NULL;
    memset(s, 0, sizeof *s);
    a = &s->a;
    a->B = B; a->T = T; a->D = D; a->H = O / D; a->k = k;
    a->tanh = in->tanh;
    a->alpha = (stx_real)(in->alpha != 0 ? in->alpha : 1);
    a->u = in->u->data;
    a->xr = in->xr ? in->xr->data : NULL;
    a->v = in->v ? in->v->data : NULL;
    a->bias = in->bias->data;
    a->V = in->V ? in->V->data : NULL;
    a->c0 = in->c0 ? in->c0->data : NULL;
    a->m = in->mask ? in->mask->data : NULL;
    a->pad = in->pad ? in->pad->device : NULL;
    a->h = y->data;
    ins[0] = in->u; ins[1] = in->xr; ins[2] = in->v; ins[3] = in->bias; ins[4] = in->V; ins[5] = in->c0;
    if (stx_record(x, y, ins, 6, stx__sru_back_op, s)) a->c = (stx_real *)stx_step_bytes(x, stx_bytes_of(B * O, stx_sru_tiles(a), sizeof(stx_real)));
    if (last) {
        stx_tensor *e = stx_new_full(x, B, O, 0, 0);
        if (!e) return NULL;
        a->last = e->data;
        stx_record(x, e, &y, 1, stx__sru_last_back, s);
        *last = e;
    }
    a->work = stx_step_bytes(x, stx__sru_room(x, a, 0));
    if (!stx_ok(x)) return NULL;
    STX_RUN(x, stx_sru_fwd, (x, a));
    return y;
}

#endif /* SEQTX_SRU_IMPLEMENTATION */
