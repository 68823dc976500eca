/* seqtx_compressive.h - v0.1 - Compressive Transformer: a memory that is not thrown away but compressed; GTrXL's gates
   no warranty implied; MIT or public domain, your choice (end of seqtx.h)

   In ONE .c (or .cpp) file:              everywhere else:
       #define SEQTX_IMPLEMENTATION           #include "seqtx_compressive.h"
       #include "seqtx_compressive.h"
   It includes seqtx.h, which must stand beside it. Link -lm (and -pthread on older systems); compile with -O2.
   (SEQTX_COMPRESSIVE_IMPLEMENTATION compiles this header's part alone, when seqtx.h's is compiled elsewhere.)
*/
#ifndef SEQTX_COMPRESSIVE_H
#define SEQTX_COMPRESSIVE_H

#include "seqtx.h"

#ifdef __cplusplus
extern "C" {
#endif

// >>api: model -----------------------------------------------------------------------------------------------------

enum { STX_COMP_CONV = 0, STX_COMP_DILATED, STX_COMP_MAX, STX_COMP_MEAN, STX_COMP_USED, STX_COMP_DROP };     /* stx_comp_desc.compress */
enum { STX_COMP_AUX_AUTO = 0, STX_COMP_AUX_ATTENTION, STX_COMP_AUX_AUTOENCODE, STX_COMP_AUX_BPTT, STX_COMP_AUX_NONE };      /* .aux */
enum { STX_COMP_LEARNED = 0, STX_COMP_XL };                                                                  /* .positions */
enum { STX_COMP_RESIDUAL = 0, STX_COMP_GRU, STX_COMP_INPUT, STX_COMP_OUTPUT, STX_COMP_HIGHWAY, STX_COMP_SIGTANH, STX_COMP_GTRXL,
       STX_COMP_GATES, STX_COMP_RESET = STX_COMP_GATES, STX_COMP_MOGRIFY };     /* .gate; the last two are steps of gates (kernels) */
enum { STX_COMP_SAME = 0, STX_COMP_ERNIE, STX_COMP_ROTATE };                                                 /* .recurrence */
enum { STX_COMP_MAX_DILATIONS = 8 };
#define STX_COMP_NO_ROWS SIZE_MAX           /* stx_comp_desc.mem and cmem, where 0 means a default */

typedef struct stx_comp_desc {
    size_t vocab;           /* V; 0: no words, stx_comp_segment alone (vectors in, vectors out) */
    size_t dim;             /* D; 0: 512 */
    size_t emb;             /* E, width of the embedding; 0: D. Else a projection in and one out */
    size_t layers;          /* L; 0: 8 */
    size_t heads;           /* H; 0: 8 */
    size_t kv_heads;        /* heads of keys and values, of which H / kv_heads queries share one; 0: H */
    size_t inner;           /* F, of the feed-forward; 0: 4 D */
    size_t segment;         /* S; 0: 512 */
    const size_t *memory_layers;    /* layers that have a memory, from 1 on (copied); NULL: all */
    size_t memory_count;    /* ... how many they are */
    int    no_memory;       /* none has */
    size_t mem;             /* M, rows of memory; 0: S. STX_COMP_NO_ROWS: none */
    size_t cmem;            /* C, rows of compressed memory; 0: floor(M / r). STX_COMP_NO_ROWS: none */
    const size_t *mems, *cmems;     /* M and C of each of the L layers (copied), 0 is 0; NULL: mem and cmem for all. Those of layers
                                       without memory do not count */
    size_t ratio;           /* r, rows that become one; 0: 4 */
    int    compress;        /* STX_COMP_CONV .. _USED; STX_COMP_DROP: what leaves the memory is lost (cmem is none then) */
    size_t overlap;         /* conv: the kernel sees so many older rows besides its r */
    int    conv_no_bias;    /* conv */
    size_t dilation[STX_COMP_MAX_DILATIONS], dilations;     /* dilated; 0 dilations: 1, 2, 4 */
    int    aux;             /* what trains the compression; 0: the attention loss where there is something to train, else none */
    double aux_weight;      /* w; 0: 1 */
    size_t bptt;            /* STX_COMP_AUX_BPTT: how many segments later the language loss still reaches it; 0: 1 */
    int    positions;       /* STX_COMP_LEARNED: a table for all layers, a slice a head. STX_COMP_XL: Transformer-XL's */
    int    norm_after;      /* layer norm after each sublayer's gate, not before the sublayer */
    int    final_norm;      /* a layer norm on the last hidden states */
    int    glu;             /* gelu(u1) u2, both F wide, in the feed-forward */
    int    tied;            /* the output's weight is the embedding */
    int    gate;            /* where a sublayer meets the stream; 0: x + y */
    int    gate_relu;       /* relu before the gate (GTrXL) */
    double gate_bias;       /* first value of b; 0: 2 for gtrxl, 1 for output, highway and sigtanh, 0 for gru (added to z's bias) */
    int    no_gate_bias;    /* b begins with 0 */
    int    mogrify;         /* gru: five steps of mogrifier before it */
    int    recurrence;      /* what a layer remembers. STX_COMP_SAME: its own input. _ERNIE: its own output, which it normalises when it
                               reads it. _ROTATE: its input, and each call hands all memories one memory layer down */
    double attn_dropout;    /* attention weights */
    double out_dropout;     /* attention's output after Wo */
    double ff_dropout;      /* inside the feed-forward */
    double aux_dropout;     /* attention weights over compressed rows in the aux loss */
    int    literal_rows, literal_pad, literal_target, literal_mask, literal_freeze;      /* see Fidelity */
    int    recompute;       /* drop each layer's activations, make them again in backward */
} stx_comp_desc;

/* Weights of a gate, by kind (see the manual); those that it does not have are NULL.
       gru      w: weight_ih, weight_hh (3D,D); b: bias_ih, bias_hh (3D); row blocks r, z, n
       input    w: w (D,D)                          output, highway    w: w; b: b (D)
       sigtanh  w: w, u; b: b                       gtrxl              w: wr, ur, wz, uz, wg, ug; b: b */
typedef struct stx_comp_gate {
    stx_tensor *w[6], *b[2];
    stx_tensor *mogrify[4];                 /* q0 (k,D), q1 (D,k), r0 (k,D), r1 (D,k); k = floor(D / 4) */
} stx_comp_gate;

typedef struct stx_comp_layer {
    int    memory;                          /* is it a memory layer? */
    size_t M, C;                            /* of it, 0 in others */
    stx_tensor *attn_gain, *attn_shift;     /* (D) */
    stx_tensor *wq, *wkv, *wo, *bo;         /* (D,D) (2 kv_heads hd,D): keys first; (D,D) (D) */
    stx_tensor *wr, *u, *v;                 /* (D,D) (H,hd) (H,hd): STX_COMP_XL */
    stx_tensor *conv, *conv_bias;           /* (D,taps D), column t D + i: tap t, channel i; (D). C > 0 only, as all that follows */
    stx_tensor *dilated[STX_COMP_MAX_DILATIONS];    /* (D,2 D) */
    stx_tensor *decoder;                    /* (taps D,D), row t D + o: STX_COMP_AUX_AUTOENCODE */
    stx_tensor *ff_gain, *ff_shift, *w1, *b1, *w2, *b2;     /* (D) (D) (F,D) (F), with glu (2F,D) (2F); (D,F) (D) */
    stx_comp_gate attn_gate, ff_gate;
    int    frozen;                          /* literal_freeze: wkv learns no more */
} stx_comp_layer;

typedef struct stx_comp {
    stx_ctx        *ctx;
    stx_comp_desc   desc;                   /* resolved; its pointers are NULL */
    stx_params     *params;
    stx_words      *words;                  /* embedding and output, E wide; NULL without vocab */
    stx_tensor     *in_w, *in_b, *out_w, *out_b;        /* (D,E) (D) (E,D) (E): E != D only */
    stx_tensor     *key_pe;                 /* (P,D), P = S + max M + max C: row P-1-dist, columns of head h from h hd on. Learned */
    stx_tensor     *sines;                  /* (rows,D), row rows-1-dist: STX_COMP_XL, a constant */
    stx_tensor     *final_gain, *final_shift;
    stx_comp_layer *layer;
    size_t          taps, ahead;            /* rows of one compression: r, r + overlap; how many of them stand before its group */
    size_t          A;                      /* memory layers; those with C > 0 unless literal_target: what the aux loss is divided by */
    stx_tensor    **aux, **ratio;           /* results of the last forward, of each layer, (1) each, of this step: the aux loss, and
                                               sum (t-c)^2 / sum t^2. NULL: none (no eviction, evaluation) */
} stx_comp;

/* Makes a model with fresh parameters in x; it lives as long as x. NULL and the context's error when the desc makes no sense. */
STX_DEF stx_comp *stx_comp_create(stx_ctx *x, const stx_comp_desc *d);
STX_DEF stx_params *stx_comp_params(stx_comp *m);
/* Number of parameters that a desc gives (tied ones once), without making them; 0 when it is not valid, SIZE_MAX: as many or more. */
STX_DEF size_t stx_comp_count(const stx_comp_desc *d);

// >>api: memory ----------------------------------------------------------------------------------------------------

/* What B streams remember, of each memory layer: goes into a segment and comes out of it. Training and evaluation each have
   their own. Empty at first. */
typedef struct stx_comp_state {
    stx_comp *model;
    size_t    B;
    size_t   *M, *C;        /* of each layer: the model's, or what stx_comp_state_create_sized was given */
    stx_rows *mem, *comp;   /* rows of layer l, (B,n,D) and (B,c,D), oldest first: n = mem->layer[l].real, c = comp->layer[l].real */
    stx_rows *usage;        /* STX_COMP_USED: (B,n,2), attention that each row of memory got, and from how many queries. Else NULL */
    stx_rows *source;       /* STX_COMP_AUX_BPTT: the rows that the newest compressed ones were made of. Else NULL */
    size_t   *seen;         /* (B): rows that each stream has pushed since its beginning, up to `most`, where nothing changes any more */
    size_t    most;
} stx_comp_state;

STX_DEF stx_comp_state *stx_comp_state_create(stx_comp *m, size_t B);
/* The same with memories of other sizes than the model was made with: mems, cmems have a number for each of the L layers; NULL: the
   model's. Distances beyond a learned table take its last row; STX_COMP_XL has no end. */
STX_DEF stx_comp_state *stx_comp_state_create_sized(stx_comp *m, size_t B, const size_t *mems, const size_t *cmems);
STX_DEF void stx_comp_state_free(stx_comp_state *s);
STX_DEF void stx_comp_state_reset(stx_comp_state *s);       /* forgets all. In error nothing */
STX_DEF void stx_comp_state_reset_stream(stx_comp_state *s, size_t b);      /* stream b alone: another text begins there. Its next segments
                                                                               are as those of a fresh state, to rounding */
/* n streams of `from`, from c on, become the streams from b on of `to`, which has the same model and sizes: splits a batch, joins
   parts, repeats a stream. 1, or 0 and an error. */
STX_DEF int stx_comp_state_copy(stx_comp_state *to, size_t b, const stx_comp_state *from, size_t c, size_t n);
/* The memory of layer l in the caller's hands, on the host: get writes its n rows (B,n,D) and c compressed rows (B,c,D) (either may be
   NULL: not wanted); set replaces both, n <= M and c <= C. What else there is (usage) begins anew. 1, or 0 and an error. */
STX_DEF int stx_comp_state_get(const stx_comp_state *s, size_t l, stx_real *mem, stx_real *comp);
STX_DEF int stx_comp_state_set(stx_comp_state *s, size_t l, const stx_real *mem, size_t n, const stx_real *comp, size_t c);
/* In a checkpoint: entries of stx_rows_save under "<prefix>mem.", "<prefix>comp.", "<prefix>usage.", "<prefix>source.", and
   "<prefix>seen"; prefix at most 64 letters. load fills a state of the same B; 1, or 0 and an error (the state is then empty). */
STX_DEF int stx_comp_state_save(stx_writer *w, const stx_comp_state *s, const char *prefix);
STX_DEF int stx_comp_state_load(stx_comp_state *s, const stx_file *f, const char *prefix);

// >>api: forward ---------------------------------------------------------------------------------------------------

/* A segment of vectors: h (B,T,D), T <= S -> last hidden states (B,T,D). pad (B,T): not 0 where h is padding, which nobody attends to, now
   or later; NULL: none. in: memory (NULL: empty); out: where the new memory goes (NULL: nowhere; may be in). With T = S memory moves on;
   with T < S it does not, and those T rows are not remembered: a short last segment of a text. (Token by token: stx_comp_gen.) Gradients
   reach h, and do not pass the memory. Not inside stx_recompute with out. */
STX_DEF stx_tensor *stx_comp_segment(stx_comp *m, stx_tensor *h, const stx_ids *pad, const stx_comp_state *in, stx_comp_state *out);
/* ids (B,T) -> their vectors (B,T,D): embedding, and the projection in where E != D */
STX_DEF stx_tensor *stx_comp_embed(stx_comp *m, const stx_ids *ids);
/* Both: ids (B,T) -> last hidden states (B,T,D) */
STX_DEF stx_tensor *stx_comp_forward(stx_comp *m, const stx_ids *ids, const stx_comp_state *in, stx_comp_state *out);
/* Logits (B,T,V) of hidden states, on the tape; and log p, of which no gradient passes. */
STX_DEF stx_tensor *stx_comp_logits(stx_comp *m, stx_tensor *h);
STX_DEF stx_tensor *stx_comp_log_probs(stx_comp *m, stx_tensor *h);
/* Mean nll of targets (B,T), nats per token, over those that are not negative and not padding (pad as above; with literal_mask padding
   counts) -> (1); 0 if none counts. */
STX_DEF stx_tensor *stx_comp_nll(stx_comp *m, stx_tensor *h, const stx_ids *targets, const stx_ids *pad);
/* The nll of a segment of tokens -> (1). */
STX_DEF stx_tensor *stx_comp_loss(stx_comp *m, const stx_ids *ids, const stx_ids *targets, const stx_comp_state *in, stx_comp_state *out);
/* What is minimised: nll + w / A sum_l aux_l of the last forward; nll itself when there is none. */
STX_DEF stx_tensor *stx_comp_total(stx_comp *m, stx_tensor *nll);
/* A number for all that the host decides in a step of this model with these tokens and this memory (each NULL: none): the key of
   stx_step_run; salt: what else decides. */
STX_DEF uint64_t stx_comp_key(const stx_comp *m, const stx_ids *ids, const stx_ids *targets, const stx_comp_state *s, uint64_t salt);

// >>api: generation ------------------------------------------------------------------------------------------------

/* Step by step, in evaluation, with projected keys and values kept: equal to whole segments, whatever the lengths of the steps are. Memory
   moves when a segment is full, counted from the start. Make a new one, or reset it, when the parameters have changed. */
typedef struct stx_comp_gen {
    stx_comp       *model;
    size_t          B;
    stx_comp_state *state;      /* the memory at the start of this segment */
    size_t          at;         /* steps of this segment so far, below S */
    stx_cache      *cache;      /* of each layer: keys and values of compressed memory, memory, and this segment */
    stx_real      **rows;       /* (B,S,D) of each memory layer: what this segment will leave */
    stx_real      **usage;      /* (B,M,2): STX_COMP_USED */
    stx_real      **pe;         /* Wr's projection of the sines: STX_COMP_XL */
    int32_t        *pad;        /* (B,S), on the host: not 0 for steps before a stream's reset */
    int             masked;     /* is one of them not 0? */
    int             stale;      /* the cache is to be made from the state */
} stx_comp_gen;

STX_DEF stx_comp_gen *stx_comp_gen_create(stx_comp *m, size_t B);
/* With memories of other sizes: as stx_comp_state_create_sized. */
STX_DEF stx_comp_gen *stx_comp_gen_create_sized(stx_comp *m, size_t B, const size_t *mems, const size_t *cmems);
STX_DEF void stx_comp_gen_free(stx_comp_gen *g);
STX_DEF void stx_comp_gen_reset(stx_comp_gen *g);
/* Stream b forgets all and begins anew where the others go on. */
STX_DEF void stx_comp_gen_reset_stream(stx_comp_gen *g, size_t b);
/* Begins with a segment after this memory (same model, B and sizes), which is copied. 1, or 0 and an error. */
STX_DEF int stx_comp_gen_set(stx_comp_gen *g, const stx_comp_state *from);
/* h (B,t,D), any t >= 1 -> last hidden states (B,t,D): the caller has called stx_begin(x, STX_EVAL). */
STX_DEF stx_tensor *stx_comp_gen_step(stx_comp_gen *g, stx_tensor *h);
/* Feeds ids (B,n), n >= 1, and returns logits, or log p, (B,V) of the token after the last of them, in host memory: what stx_sample wants.
   They stay until the next call. Calls stx_begin(x, STX_EVAL): not between a forward and its backward. */
STX_DEF const stx_real *stx_comp_gen_feed(stx_comp_gen *g, const int32_t *ids, size_t n);
/* The model for programs that take any family. A window other than 0 is refused: evaluation with other memories is
   stx_comp_state_create_sized. All NULL for NULL, and for a model without words. */
STX_DEF stx_lm stx_comp_lm(stx_comp *m);

// >>api: kernels ---------------------------------------------------------------------------------------------------

/* Groups of rows that become one. Tap t of group g of stream b meets row  base_b + g step + t,  where
       base_b = at                                           first NULL
       base_b = at + first[b] - (groups - G_b) step          else, G_b = ceil((rows - first[b]) / step)
   first[b] <= rows: where the stream's own rows begin, whose groups are counted from there and stand newest in the result. A row outside
   [0, rows), before first[b], or that pad marks is missing. */
typedef struct stx_comp_groups {
    size_t B, rows, groups, taps, step, D;
    ptrdiff_t at;
    const int32_t *first;       /* (B), on the device, or NULL */
    const int32_t *pad;         /* (B,rows), on the device, not 0: missing; or NULL */
} stx_comp_groups;
/* y (B,groups,taps,D) = or += the rows (B,rows,D) that the taps meet, 0 where one is missing */
STX_KERNEL(stx_comp_unfold, (stx_ctx *x, stx_real *y, const stx_real *rows, const stx_comp_groups *g, int accumulate))
/* rows (B,rows,D) = the sum of the taps of y (B,groups,taps,D) that meet a row, g ascending; 0 where none does, and in missing rows. Its
   derivative is stx_comp_unfold. */
STX_KERNEL(stx_comp_fold, (stx_ctx *x, stx_real *rows, const stx_real *y, const stx_comp_groups *g))
/* y (B,groups,D) = the mean (max 0) or the largest (max 1), channel by channel, of the rows that a group meets; 0 where all are missing */
STX_KERNEL(stx_comp_pool, (stx_ctx *x, stx_real *y, const stx_real *rows, const stx_comp_groups *g, int max))
/* y (B,groups,D) = the G_b rows of stream b, from first[b] on, that were used most (first NULL: from 0 on, G_b = groups), in the order of
   time, in the last G_b places; the places before are 0. taps and at are not read. usage (B,ldu/2,2), ldu numbers from stream to stream,
   floats: row j has usage[0] / usage[1], 0 if usage[1] is 0. Among equals the newer is kept. Missing rows come after all others, the older
   first, and are 0 in y. */
STX_KERNEL(stx_comp_pick, (stx_ctx *x, stx_real *y, const stx_real *rows, const stx_real *usage, size_t ldu, const stx_comp_groups *g))
/* What n keys from `first` on got of an attention whose forward kernel has run with a (no learned span, eps or persistent vectors):
       usage[b][j][0] += 1/H sum_h sum_i softmax weight of key first + j for query i       before dropout
       usage[b][j][1] += how many queries i there are
   over the queries whose own key exists (a->pad at S-T+i). usage (B,ldu/2,2), ldu numbers from stream to stream, floats. Sums over
   queries, then heads, in order. */
STX_KERNEL(stx_comp_usage, (stx_ctx *x, stx_real *usage, size_t ldu, const stx_attention_args *a, size_t first, size_t n))
/* loss (1) = sum (a - t)^2 / divisor, ratio (1) = sum (a - t)^2 / sum t^2 (0 if that is 0), over rows of a, t (N,C) that skip (N), on the
   device or NULL, does not mark. work: (N,2), on the device, where the two sums of each row go. Backward: da += dloss 2 (a - t) / divisor */
STX_KERNEL(stx_comp_error_fwd, (stx_ctx *x, stx_real *loss, stx_real *ratio, double *work, const stx_real *a, const stx_real *t,
                                const int32_t *skip, size_t N, size_t C, double divisor))
STX_KERNEL(stx_comp_error_bwd, (stx_ctx *x, stx_real *da, const stx_real *dloss, const stx_real *a, const stx_real *t, const int32_t *skip,
                                size_t N, size_t C, double divisor))
/* What of a gate is not a product, s = sigmoid, number by number:
       STX_COMP_GRU      r = s(p0_r + p1_r), z = s(p0_z + p1_z), n = tanh(p0_n + r p1_n): out = (1 - z) n + z x       p0, p1 (N,3D): r, z, n
       STX_COMP_INPUT    out = s(p0) x + y                       STX_COMP_OUTPUT     out = x + s(p0) y
       STX_COMP_HIGHWAY  out = s(p0) x + (1 - s(p0)) y           STX_COMP_SIGTANH    out = x + s(p0) tanh(p1)
       STX_COMP_GTRXL    z = s(p0 + p1), n = tanh(p2 + p3): out = (1 - z) x + z n
       STX_COMP_RESET    out = s(p0 + p1) x                      STX_COMP_MOGRIFY    out = 2 s(p0) x
   Backward reads dout and the inputs. What is NULL is not wanted; fresh[i] of dx, dy, dp[0..3] in this order: 1 writes, 0 adds. */
typedef struct stx_comp_gate_args {
    int    kind;
    size_t N, D;
    const stx_real *x, *y;      /* (N,D); y NULL where there is none */
    const stx_real *p[4];       /* (N,D), for gru (N,3D) */
    stx_real *out;              /* (N,D) */
    const stx_real *dout;       /* (N,D) */
    stx_real *dx, *dy, *dp[4];  /* as x, y, p */
    int    fresh[6];
} stx_comp_gate_args;
STX_KERNEL(stx_comp_gate_fwd, (stx_ctx *x, const stx_comp_gate_args *a))
STX_KERNEL(stx_comp_gate_bwd, (stx_ctx *x, const stx_comp_gate_args *a))
/* What stx_comp_usage adds, number by number and in double, a in host memory: sum (B,n). For reading, and for tests. work: two numbers for
   each of stx_attention_keys. */
STX_DEF void stx_comp_usage_plain(double *sum, const stx_attention_args *a, size_t first, size_t n, double *work);

#ifdef __cplusplus
}
#endif

/* Stop here if you only want the API. */
#endif /* SEQTX_COMPRESSIVE_H */
