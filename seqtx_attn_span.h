/* seqtx_attn_span.h - v0.1 - Sequential Transformer: adaptive attention span, all-attention, adaptive input/output
   no warranty implied; MIT or public domain, your choice (end of seqtx.h)

   In ONE .c (or .cpp) file:              everywhere else:
       #define SEQTX_IMPLEMENTATION           #include "seqtx_attn_span.h"
       #include "seqtx_attn_span.h"
   It includes seqtx.h, which must stand beside it. Link -lm (and -pthread on older systems); compile with -O2.
   (SEQTX_ATTN_SPAN_IMPLEMENTATION compiles this header's part alone, when seqtx.h's is compiled elsewhere.)

   MANUAL

   The model. A Transformer that reads a text block by block. Each layer keeps its own inputs of the blocks before (the
   cache) and attends to them; how far back is learned for every head. Papers:
       Adaptive Attention Span in Transformers         Sukhbaatar, Grave, Bojanowski, Joulin, 2019    1905.07799
       Augmenting Self-attention with Persistent Memory (all-attention)    Sukhbaatar et al., 2019    1907.01470
       Adaptive Input Representations (adapt_io)                      Baevski and Auli, 2018          1809.10853

       tokens x (B,T) -> embedding -> h (B,T,d) -> layers -> h -> output layer -> log p (B,T,V)

   One layer, with the names that the code uses:

       cache             h ------------------------------.
         |               |                                \
         |       q, k, v = [Wq Wk Wv] h                    +--> LN1 --+---------------------.
         |               |                                 |          |                      \
       k, v = [Wk Wv] cache --> attention --> o = Wo y ----'      W2 relu(W1 h + b1) + b2 ---+--> LN2 --> h

       s_t = (q_i . k_{i-t} + q_i . E_t) / sqrt(D)            t = 1..S steps back; E is shared by all layers and heads
       m_t = clamp((1 - t + z L) / R + 1, 0, 1)                the span of a head: z in [0,1], L the largest, R the ramp
       a_t = m_t e^s_t / (sum m e^s + eps sum e^s)             with no_renorm: m_t e^s_t / sum e^s over t = 1..S
       y_i = sum_t a_t v_{i-t}
       loss = mean nll + lambda sum_layers L mean_h z          the penalty that keeps spans short

   The window S of a layer, and the rows C of its cache, by its longest head (stx_span_window, stx_span_cache):

       reach = min(L, ceil(L max_h z) + ceil(R))        no key further back has m > 0, whatever R is
       S = L - floor(min(L - 1, L - reach) / 64) 64      C = min(L, S + 64)
       L = 8192, R = 32:   z 0 -> S 64, C 128;   z 0.1 -> reach 852, S 896, C 960;   z 1 -> S = C = 8192

   With pers = N > 0 there is no feed-forward: every head attends to N learned keys and values besides (all-attention).

   Why it is so.
       A soft ramp. The loss must be able to feel the span: dm_t/dz = L / R on the ramp, and 0 elsewhere. As R goes to 0 the
       mask becomes a step, whose slope is 0 wherever it has one: z would learn from the penalty alone. Hence R >= 1.
       Spans begin at z = 0 and are not lost there. The ramp lies beyond the span: even at z = 0 a head sees t = 1..R with
       weights 1, 1 - 1/R, .., 1/R, and those keys pull at z with the slope L / R. The clamp to [0,1] comes after the update,
       where it cuts the value and not the gradient. Starting short is cheap, and a head that needs more asks for it.
       Weights are normalised again. Without it a head with a short span would also be a quiet one, for its weights would
       sum to less than 1, and the layer would have to tell short from weak. With it (and eps = 0) a head with the span Z is
       plain attention over the keys it sees: those with m = 0 need not be read, and time follows each head's own span.
       The gradient of a mask. With a_t = m_t e^s_t / n, n = sum m e^s and g = dL/dy:
           ds_t = a_t g.(v_t - y)        dm_t = (e^s_t / n) g.(v_t - y)        dz = sum_t dm_t L / R over the ramp
       The ramp's two ends belong to it, as in the authors' clamp: 0 <= 1 + (1 - t + z L) / R <= 1.
       Rows that were never written (the start of a text) do not exist. With
       STX_SPAN_LITERAL_MEMORY they are zeros: keys and values of zero, which give Wk and
       Wv no gradient, but their scores are q.E_t / sqrt(D), so that q, E and z learn from
       places where there is no text.
       One table E for all layers and heads. What a distance means is shared; which distances matter is said by q.

   By hand. One head, D = 1, L = 4, R = 2, z = 1/8, so z L = 1/2. Let e^s = 1, 4/3, 4, 5/3 and v = 6, 0, 9, 3 for t = 1..4:
       m = 1, 3/4, 1/4, 0        m e^s = 1, 1, 1, 0        a = 1/3, 1/3, 1/3, 0        y = 5
       dy/dz = L / R (e^s_2 (v_2 - y) + e^s_3 (v_3 - y)) / 3 = 2 (-20/3 + 16) / 3 = 56/9; t = 1 and t = 4 are off the ramp
       with no_renorm: sum e^s = 8, a = 1/8, 1/8, 1/8, 0, y = 15/8

   Quick start (compiles as it stands): learns "abcabc.." and prints it.

   //>quickstart
       #define SEQTX_IMPLEMENTATION
       #include "seqtx_attn_span.h"
       #include <stdio.h>
       int main(void) {
           stx_span_desc d = {0};
           stx_ctx *x = stx_create(NULL);
           d.vocab = 256; d.layers = 2; d.dim = 32; d.heads = 2; d.inner = 64; d.span = 32; d.adapt_span = 1;
           stx_span *model = stx_span_create(x, &d);
           stx_optim_desc od = {0};
           stx_optim *optim = stx_optim_create(stx_span_params(model), &od);
           stx_span_state *memory = stx_span_state_create(model, 1);
           for (int step = 0; step < 100 && stx_ok(x); step++) {
               int32_t text[17];
               for (int i = 0; i < 17; i++) text[i] = "abc"[(step * 16 + i) % 3];
               stx_begin(x, STX_TRAIN);
               stx_ids *in = stx_tokens(x, text, 1, 16), *next = stx_tokens(x, text + 1, 1, 16);
               stx_tensor *nll = stx_span_loss(model, in, next, memory, memory);
               stx_backward(x, stx_span_total(model, nll));
               if (step % 20 == 0) printf("step %d nll %.4f\n", step, stx_item(x, nll));
               if (stx_optim_step(optim, 0.01)) stx_span_clamp(model);
           }
           int32_t token = 'a';
           stx_span_gen *gen = stx_span_gen_create(model, 1);
           stx_sampling greedy = {0};
           for (int i = 0; i < 12 && stx_ok(x); i++) {
               const stx_real *log_p = stx_span_gen_feed(gen, &token, 1);
               putchar(token);
               token = log_p ? stx_sample(&greedy, 0, log_p, 256, NULL) : 0;
           }
           printf("\n%s\n", stx_error(x));
           stx_destroy(x);
           return 0;
       }
   //<quickstart

   Handing over a memory. stx_span_state_save and _load carry a state through a checkpoint; stx_span_state_get and
   _set through the caller's own memory, to another context, device or program of the same model. Here a text is read
   in two halves, the second with a state made from the first one's rows: the same loss, to the last bit.

   //>handover
       #define SEQTX_IMPLEMENTATION
       #include "seqtx_attn_span.h"
       #include <stdio.h>
       #include <stdlib.h>
       static double half(stx_span *model, const int32_t *text, stx_span_state *memory) {
           stx_ctx *x = model->ctx;
           stx_begin(x, STX_EVAL);
           return stx_item(x, stx_span_loss(model, stx_tokens(x, text, 1, 20), stx_tokens(x, text + 1, 1, 20), memory, memory));
       }
       int main(void) {
           stx_span_desc d = {0};
           stx_ctx *x = stx_create(NULL);
           d.vocab = 8; d.layers = 2; d.dim = 32; d.heads = 2; d.span = 100; d.adapt_span = 1;
           stx_span *model = stx_span_create(x, &d);
           stx_span_state *old = stx_span_state_create(model, 1), *other = stx_span_state_create(model, 1);
           int32_t text[41];
           for (int i = 0; i < 41; i++) text[i] = i * i % 7;
           half(model, text, old);
           for (size_t l = 0; stx_ok(x) && l < d.layers; l++) {
               size_t rows = old->rows->layer[l].rows, n = old->rows->layer[l].real;
               stx_real *row = (stx_real *)malloc(old->B * n * d.dim * sizeof *row);      // (B,n,dim): send it where it is wanted
               if (row && stx_span_state_get(old, l, row)) stx_span_state_set(other, l, rows, row, n);
               free(row);
           }
           double a = half(model, text + 20, old), b = half(model, text + 20, other);
           printf("nll %.6f, handed over %.6f %s\n", a, b, stx_error(x));
           int same = stx_ok(x) && a == b;
           stx_destroy(x);
           return !same;
       }
   //<handover

   Configuration (stx_span_desc)
       field            zero means        typical       enwik8 small / 12 layers / 24 layers / all-attention
       vocab            (required)        256           205 / 205 / 205 / 205
       layers           8                 8             8 / 12 / 24 / 18
       dim (d)          256               256           256 / 512 / 768 / 512
       heads (H)        4                 4             4 / 8 / 8 / 8
       inner (f)        4 d               1024          1024 / 2048 / 4096 / -
       span (L)         1024              1024          1024 / 8192 / 8192 / 8192
       adapt_span       fixed span        1             1
       ramp (R)         32                32            32
       span_init        0                 0             0
       span_loss        0                 2e-6          2e-6 / 5e-7 / 5e-7 / 1e-7
       pers (N)         feed-forward      0             0 / 0 / 0 / 1024
       dropout          0                 0.1           0 / 0.3 / 0.4 / 0.3        (attention weights, inside the feed-forward)
       emb_dropout      0                 0             0; wiki103_pers 0.1        (embedding, last hidden)
       no_renorm        renormalised      0             0                          fairseq's enwik8, otherwise as "12 layers": 1,
       span_per_layer   one a head        0             0                          0 or 1,
       fairseq_init     the authors'      0             0                          1
   The optimiser of the paper is Adagrad, lr 0.07, per-tensor clip 0.03, linear warm-up; clamp the spans after each update.
   adapt_io wants a vocabulary sorted by frequency because a cluster is a range of ids: the first holds the frequent words in
   full width and is computed for every token, the others rare words in narrow rows that few tokens touch.

   Cost of a layer, forward, multiply-adds a token (c cached rows used, S_h the span of head h):
       Wq, Wo 2 d^2 ; Wk, Wv 2 d^2 (c+T)/T ; attention 3 D sum_h S_h + 2 N d ; feed-forward 2 d f
   With learned spans c is a mean over heads: the cache is projected in up to three groups
   of heads, each as far back as its longest head sees (stx_head_groups_of), unless some
   streams lack rows, or with literal or no_renorm.
   Cache: B d sum_l C_l numbers, C_l = min(L, S_l + 64), in buffers half as long again (on a GPU:
   a segment longer). Generation keeps projected keys and values instead: 4 d sum_l S_l numbers a stream, and a new token costs 3 D
   sum_h S_h + 4 d^2 + 2 d f whatever was generated before.
   What binds generation is memory, not arithmetic: a token of one stream reads every weight of the layers and the output
   once, 4 (4 d^2 + 2 d f) bytes a layer and 4 V d, and 8 D sum_h S_h bytes of keys and values. B streams share the weights.
   With no_renorm, as with STX_SPAN_LITERAL_EPS, every key of the window is in the
   normaliser: S_h is the layer's S for every head. A layer with one long head and seven
   short ones then costs eight long ones.

   Fidelity, against the authors' implementation of 1905.07799 / 1907.01470
       reproduced   losses, caches, every gradient, windows, initialisers, optimisers, positions, presets: tested against
                    independent float64 code, to 1e-10
       corrected    accidental behaviour of the authors' code, restored by literal:
                    STX_SPAN_LITERAL_EPS: a_t = m_t p_t / (sum m p + 1e-8) with p the
                        softmax over the whole window: a key beyond a head's span counts
                        where its logit is by far the largest, for rows then sum to less
                        than 1. Needs adapt_span. Default: eps = 0, the paper's formula;
                        such keys do not exist, and cost nothing.
                    STX_SPAN_LITERAL_MEMORY: rows of an empty memory are attended to as
                        zeros. Default: they do not exist.
       as the original means: literal = STX_SPAN_LITERAL
       better       keys and values of rows outside the window are never projected; evaluation memories are separate
                    states; true bits per byte; everything is in the checkpoint.
       omitted      dynamic span (the paper's z that depends on the input).
   and against fairseq's examples/adaptive_span, another model after the same paper (weights do not carry over):
       reproduced   no_renorm        the mask multiplies the softmax over the window S; rows are not normalised again
                    span_per_layer   z has shape (1)
                    fairseq_init     projections n(0, 1/sqrt(d)) (Xavier-normal), W1 and W2 U(sqrt(6 / (d + f)))
                                     (Xavier-uniform), embedding n(0, 1/sqrt(d)); all else, and adaptive tables, as above
                    STX_SPAN_LITERAL_MEMORY  its empty memory is zero rows, too
       as fairseq means: adapt_span = no_renorm = fairseq_init = 1,
                    literal = STX_SPAN_LITERAL
       different    it clamps z at the start of a forward, when S and C have been computed; here stx_span_clamp does so
                    after the update. The numbers are the same, unless an update leaves every z of a layer below 0:
                    then its S may be 64 smaller, for one step. A z that it saves may lie outside [0,1].
       omitted      what its data loader does: the last token of a block is never a target though the divisor counts it,
                    so that its losses are low by the factor (T-1)/T; memories run from training into validation and
                    back; the vocabulary has four special symbols and is filled up to a multiple of 8.

   Arguments of the originals, their defaults, and fields of stx_span_desc:

       authors               field                                default
       hid-sz                dim                                  256
       inner-hid-sz          inner                                1024
       nlayers               layers                               8
       nheads                heads                                2
       attn-span             span                                 32
       block-sz              T of a call                          64
       dropout               dropout                              0.2
       emb-dropout           emb_dropout                          0
       adapt-span            adapt_span                           off
       adapt-span-loss       span_loss                            0
       adapt-span-ramp       ramp                                 32
       adapt-span-init       span_init                            0
       adapt-span-cache      full_cache, with the opposite sense  off
       pers-mem-size         pers                                 0
       adapt-io              adapt_io                             off
       adapt-io-tied         adapt_io_tied                        off
       adapt-io-divval       divval                               4
       adapt-io-cutoffs      cutoff, cutoffs                      20000, 40000, 200000

       fairseq               field                                default
       d_model               dim                                  256
       d_inner               inner                                1024
       n_layer               layers                               8
       n_head                heads                                4
       attn_span             span                                 1024
       dropout, emb_dropout  dropout, emb_dropout                 0
       adapt_span_ramp       ramp                                 32
       adapt_span_init       span_init                            0
       aux_loss_scaler       span_loss                            2e-6
       adapt_span_layer      span_per_layer                       false

   Easy to get wrong
       - The cache holds layer inputs, not keys: projected again by the current weights in every step, so that cached rows
         contribute to the gradients of Wk and Wv. Keys kept from step to step would be a different model.
       - The cache of a layer is made before the layer runs, from its input; layer 0's holds the embedding after dropout.
       - The current token is never attended to: t starts at 1.
       - The mask multiplies after the exponential and rows are normalised again: a ramp inside the softmax is not it.
       - The window S follows the LONGEST head of the layer, in steps of 64, and the cache is 64 rows longer, so that a
         growing span finds its rows. When spans grow faster the missing rows are simply not there.
       - z is clamped to [0,1] after the update, not in the forward.
       - no_renorm makes S part of the model: a key with m = 0 inside the window takes probability, one outside takes none.

   Names in other programs' checkpoints; tools/convert.py turns them into ours, and ours into them. V is the vocabulary, N is pers, f is
   inner, l a layer, i a cluster of adaptive words, K their cutoffs. Names of the authors begin with module., those of fairseq with
   decoder.model.; where no shape is said ours is the original's.

       original                                                                ours                               shape of the original
       key_pe                                                                  key_pe, (L,D)                      (1,D,L)
       in_emb.weight                                                           in_emb.weight                      (V,d)
       out_emb.weight                                                          out_emb.weight                     (V,d)
       out_emb.bias                                                            out_emb.bias                       (V)
       in_emb.emb_layers.i.weight                                              in_emb.tables.i                    (size i, width i)
       in_emb.emb_projs.i                                                      in_emb.projs.i                     (d, width i)
       out_emb.out_layers.i.weight                                             out_emb.tables.i; tied: not there  (size i, width i)
       out_emb.out_layers.i.bias                                               out_emb.biases.i                   (size i)
       out_emb.out_projs.i                                                     out_emb.projs.i; tied: not there   (d, width i)
       out_emb.cluster_proj.weight                                             out_emb.cluster.weight             (K,d)
       out_emb.cluster_proj.bias                                               out_emb.cluster.bias               (K)
       layers.l.attn.attn.adaptive_span._mask.current_val                      layers.l.attn.span, (H)            (H,1,1)
       layers.l.attn.attn.adaptive_span._mask.mask_template                    made anew: 1-L .. 0                (L)
       layers.l.attn.attn.persistent_memory.adaptive_span._mask.current_val    the same as the one above          (H,1,1)
       layers.l.attn.attn.persistent_memory.adaptive_span._mask.mask_template  made anew                          (L)
       layers.l.attn.attn.persistent_memory.key                                layers.l.attn.pers_key, (H,N,D)    (H,D,N)
       layers.l.attn.attn.persistent_memory.val                                layers.l.attn.pers_val             (H,N,D)
       layers.l.attn.proj_query.weight                                         layers.l.attn.wq                   (d,d)
       layers.l.attn.proj_out.weight                                           layers.l.attn.wo                   (d,d)
       layers.l.attn.proj_val.weight                                           layers.l.attn.wv                   (d,d)
       layers.l.attn.proj_key.weight                                           layers.l.attn.wk                   (d,d)
       layers.l.norm1.weight                                                   layers.l.norm1.weight              (d)
       layers.l.norm1.bias                                                     layers.l.norm1.bias                (d)
       layers.l.norm2.weight                                                   layers.l.norm2.weight              (d)
       layers.l.norm2.bias                                                     layers.l.norm2.bias                (d)
       layers.l.ff.fc1.weight                                                  layers.l.ff.fc1.weight             (f,d)
       layers.l.ff.fc1.bias                                                    layers.l.ff.fc1.bias               (f)
       layers.l.ff.fc2.weight                                                  layers.l.ff.fc2.weight             (d,f)
       layers.l.ff.fc2.bias                                                    layers.l.ff.fc2.bias               (d)

   Compile-time options: those of seqtx.h.
   GPU. Nothing changes in a program but desc.device (see seqtx.h), and that a step written as a function can be replayed:
       stx_tokens_set(x, in, ..); stx_tokens_set(x, out, ..); stx_optim_rate(optim, lr);
       stx_step_run(x, stx_span_key(model, in, out, memory, 0), step, user);      step: stx_begin .. stx_optim_step, stx_span_clamp
   (examples/train_attn_span.c). The fused kernel requires d/H of 8 to 128, a multiple of
   8, and neither no_renorm, span_per_layer nor literal; otherwise scores go through
   memory, piece by piece.

   Reading order: stx__span_layer (the layer), stx_span_forward (cache and loop), stx__span_window, stx_span_gen_feed.
*/
#ifndef SEQTX_ATTN_SPAN_H
#define SEQTX_ATTN_SPAN_H

#include "seqtx.h"

#ifdef __cplusplus
extern "C" {
#endif

// >>api: configuration ---------------------------------------------------------------------------------------------

/* stx_span_desc.literal: accidental behaviour of the authors' code, reproduced. See Fidelity. */
enum {
    STX_SPAN_LITERAL_EPS    = 1,            /* needs adapt_span without no_renorm */
    STX_SPAN_LITERAL_MEMORY = 2,
    STX_SPAN_LITERAL        = 1 << 30       /* all of those that the model can have */
};

typedef struct stx_span_desc {
    size_t vocab;           /* V, required */
    size_t layers;          /* 0: 8 */
    size_t dim;             /* d; 0: 256. A multiple of heads */
    size_t heads;           /* H; 0: 4 */
    size_t inner;           /* f; 0: 4 d. Not used with pers */
    size_t span;            /* L, the largest span; 0: 1024 */
    int    adapt_span;      /* learn a span per head; 0: all have L */
    int    full_cache;      /* keep L rows whatever the spans are; 0: as many as the longest head needs, and 64 */
    double ramp;            /* R; 0: 32 */
    double span_init;       /* first value of z, in [0,1] */
    double span_loss;       /* lambda */
    size_t pers;            /* N persistent vectors per head in place of the feed-forward */
    int    adapt_io;        /* adaptive input and output; the vocabulary must be sorted by falling frequency */
    int    adapt_io_tied;   /* ... sharing tables and projections */
    double divval;          /* ... width of cluster i is floor(d / divval^i); 0: 4 */
    size_t cutoff[STX_MAX_CLUSTERS - 1], cutoffs;   /* ... 0 cutoffs: those of 20000, 40000, 200000 that are below vocab */
    int    forward_columns; /* ... order of the head's cluster columns, see stx_adaptive */
    double dropout, emb_dropout;
    int    no_renorm;       /* a = m e^s / sum e^s over the layer's whole window: rows sum to less than 1. Needs adapt_span */
    int    span_per_layer;  /* one z a layer, shared by its heads. Needs adapt_span */
    int    fairseq_init;    /* fairseq's initialisers: see Fidelity */
    unsigned literal;       /* accidental behaviour of the authors' code: STX_SPAN_LITERAL_.., or
                               STX_SPAN_LITERAL. A flag that the model cannot have is refused.
                               stx_span.desc.literal has the flags in force. 0: none */
    int    recompute;       /* drop each layer's activations, make them again in backward: about 1/4 more time, far less memory */
    size_t recompute_layers;        /* the same of the last so many layers only */
} stx_span_desc;

typedef struct stx_span_layer {
    stx_tensor *z;                          /* (H), or (1) with span_per_layer; adapt_span only */
    stx_tensor *pers_key, *pers_val;        /* (H,N,D), N > 0 only */
    stx_tensor *wq, *wo, *wv, *wk;          /* (d,d) */
    stx_tensor *norm1_gain, *norm1_shift;   /* (d) */
    stx_tensor *w1, *b1, *w2, *b2, *norm2_gain, *norm2_shift;   /* (f,d) (f) (d,f) (d) (d) (d), N = 0 only */
} stx_span_layer;

typedef struct stx_span {
    stx_ctx        *ctx;
    stx_span_desc   desc;                   /* resolved */
    stx_params     *params;
    stx_tensor     *key_pe;                 /* (L,D): row L-t is E_t */
    stx_words      *words;                  /* embedding and output: words->in_emb, .. */
    stx_span_layer *layer;
    stx_picked     *spans;                  /* z of all layers; adapt_span only */
} stx_span;

/* Makes a model with fresh parameters in x; it lives as long as x. NULL and the context's error when the sizes make no
   sense. */
STX_DEF stx_span *stx_span_create(stx_ctx *x, const stx_span_desc *d);
STX_DEF stx_params *stx_span_params(stx_span *m);
/* Number of parameters that a desc gives (tied ones once), without making them; 0 when it is not valid, SIZE_MAX: as many or more. */
STX_DEF size_t stx_span_count(const stx_span_desc *d);

// >>api: memory ----------------------------------------------------------------------------------------------------

/* The caches of all layers for B streams: goes into a forward and comes out of it. Training and evaluation each have
   their own. Empty at first. */
typedef struct stx_span_state {
    stx_span  *model;
    size_t     B;
    stx_rows  *rows;        /* inputs of each layer, (B, real, d), real: those that were written. layer[l].rows: length of the
                               cache. It starts at C and follows the span; where the text is shorter, its oldest rows are zeros
                               with STX_SPAN_LITERAL_MEMORY, else they do not exist */
} stx_span_state;

STX_DEF stx_span_state *stx_span_state_create(stx_span *m, size_t B);
STX_DEF void stx_span_state_free(stx_span_state *s);
STX_DEF void stx_span_state_reset(stx_span_state *s);       /* forgets all; the sizes follow the spans of now. In error nothing */
STX_DEF void stx_span_state_reset_stream(stx_span_state *s, size_t b);      /* forgets stream b alone: another text begins there */
/* The memory of layer l in the caller's hands (see "Handing over a memory" in the manual). get: its s->rows->layer[l].real
   rows, (B, real, d), oldest first, to the host. set: replaces it by n such rows from the host, n <= rows <= L; rows: the
   other state's layer[l].rows, or stx_span_cache(m, l) for a memory made by hand. 1, or 0 and an error; the state is then as
   it was, or empty in layer l when there was no memory. Splitting and joining batches: stx_rows_copy. */
STX_DEF int stx_span_state_get(const stx_span_state *s, size_t l, stx_real *out);
STX_DEF int stx_span_state_set(stx_span_state *s, size_t l, size_t rows, const stx_real *in, size_t n);
/* In a checkpoint, see stx_rows_save. load fills a state of the same B; 1, or 0 and an error (the state is then empty). */
STX_DEF int stx_span_state_save(stx_writer *w, const stx_span_state *s, const char *prefix);
STX_DEF int stx_span_state_load(stx_span_state *s, const stx_file *f, const char *prefix);

// >>api: forward ---------------------------------------------------------------------------------------------------

/* ids (B,T) -> last hidden state (B,T,d). in: memory (NULL: empty); out: where the new memory goes (NULL: nowhere; may be
   in). Gradients do not pass the memory. */
STX_DEF stx_tensor *stx_span_forward(stx_span *m, const stx_ids *ids, const stx_span_state *in, stx_span_state *out);
/* Logits (B,T,V) of a hidden state, on the tape. With adapt_io there are none (each cluster has its own softmax): an error. */
STX_DEF stx_tensor *stx_span_logits(stx_span *m, stx_tensor *h);
/* log p (B,T,V) of a hidden state, of every model: rows of e^.. sum to 1. No gradient passes. */
STX_DEF stx_tensor *stx_span_log_probs(stx_span *m, stx_tensor *h);
/* Mean nll of targets (B,T), nats per token -> (1). */
STX_DEF stx_tensor *stx_span_loss(stx_span *m, const stx_ids *ids, const stx_ids *targets, const stx_span_state *in, stx_span_state *out);
/* nll + lambda sum_l L mean_h z; nll itself when there is no penalty. */
STX_DEF stx_tensor *stx_span_total(stx_span *m, stx_tensor *nll);
/* z into [0,1]: after every update. */
STX_DEF void stx_span_clamp(stx_span *m);
/* A number for all that the host decides in a step of this model with these tokens and this memory (each NULL: none): windows, sizes,
   addresses. The key of stx_step_run; salt: what else decides (for a batch in parts, the key of the part before; a step that
   reads or writes a second memory wants that one's key, too: stx_span_key(m, ids, targets, b, stx_span_key(m, ids, targets, a, 0))). With
   adapt_io it has how many tokens each cluster gets, in steps of 1/16 (stx_adaptive_key): set the tokens first. Waits for the last step's
   spans. */
STX_DEF uint64_t stx_span_key(const stx_span *m, const stx_ids *ids, const stx_ids *targets, const stx_span_state *s, uint64_t salt);

/* Span of head h of layer l, tokens: z L (L when fixed). */
STX_DEF double stx_span_of(const stx_span *m, size_t l, size_t h);
/* S, how many steps back layer l may look now: its longest head's span and ramp, rounded up so that L - S is a multiple of 64. And C, the
   rows that its cache keeps: S and 64, at most L. Both follow z from step to step. */
STX_DEF size_t stx_span_window(const stx_span *m, size_t l);
STX_DEF size_t stx_span_cache(const stx_span *m, size_t l);
/* As the reference logs them, with the ramp: mean over layers of ceil(mean z L) + ceil(R), and the largest ceil(max z L) + ceil(R). */
STX_DEF void stx_span_stats(const stx_span *m, double *avg, double *max);

// >>api: generation ------------------------------------------------------------------------------------------------

/* Token by token, with projected keys and values kept, in windows of the spans: the cost of a token does not depend on
   how many came before. Equal to stx_span_forward over the whole text. Make a new one, or reset it, when the
   parameters have changed. */
typedef struct stx_span_gen {
    stx_span  *model;
    size_t     B;
    stx_cache *cache;       /* of every layer, its window */
} stx_span_gen;

STX_DEF stx_span_gen *stx_span_gen_create(stx_span *m, size_t B);
STX_DEF void stx_span_gen_free(stx_span_gen *g);
STX_DEF void stx_span_gen_reset(stx_span_gen *g);           /* empty memory, spans of now */
/* Feeds ids (B,n), n >= 1, and returns log p (B,V) of the token after the last of them, in host memory: what stx_sample wants.
   They stay until the next call. Calls stx_begin(x, STX_EVAL): not between a forward and its backward. */
STX_DEF const stx_real *stx_span_gen_feed(stx_span_gen *g, const int32_t *ids, size_t n);
/* The model for programs that take any family; its windows are those of the spans, so that a window other than 0 is refused. All NULL
   for NULL. */
STX_DEF stx_lm stx_span_lm(stx_span *m);

#ifdef __cplusplus
}
#endif

/* Stop here if you only want the API. */
#endif /* SEQTX_ATTN_SPAN_H */

#if (defined(SEQTX_IMPLEMENTATION) || defined(SEQTX_ATTN_SPAN_IMPLEMENTATION)) && !defined(SEQTX_ATTN_SPAN_IMPLEMENTATION_DONE)
#define SEQTX_ATTN_SPAN_IMPLEMENTATION_DONE

#include <math.h>
#include <stdio.h>
#include <string.h>

// >>creation

static int stx__span_bad(stx_ctx *x, const char *what, double got, const char *want) {
    stx_fail(x, STX_ERR_ARG, "stx_span_create: %s is %g, want %s", what, got, want);
    return 0;
}

/* Replaces STX_SPAN_LITERAL by the flags that the model can have. 0 and an error for a flag
   that it cannot have. */
static int stx__span_check_literal(stx_ctx *x, stx_span_desc *d) {
    const unsigned all = STX_SPAN_LITERAL | STX_SPAN_LITERAL_EPS | STX_SPAN_LITERAL_MEMORY;
    unsigned can = STX_SPAN_LITERAL_MEMORY;

    if (d->adapt_span && !d->no_renorm) can |= STX_SPAN_LITERAL_EPS;
    if (d->literal & STX_SPAN_LITERAL_EPS & ~can) {
        stx_fail(x, STX_ERR_ARG, "stx_span_create: literal has STX_SPAN_LITERAL_EPS, which needs "
                 "adapt_span without no_renorm; STX_SPAN_LITERAL takes the forms that the model "
                 "can have");
        return 0;
    }
    if (d->literal & ~all)
        return stx__span_bad(x, "literal", (double)d->literal,
                             "STX_SPAN_LITERAL, or flags STX_SPAN_LITERAL_EPS, _MEMORY");
    if (d->literal & STX_SPAN_LITERAL) d->literal = can;
    return 1;
}

/* Initialisers of embedding and output: PyTorch's, n(0,1) for tables and U(1/sqrt(columns)) for all else */
static void stx__span_words(const stx_span_desc *d, stx_words_desc *w) {
    memset(w, 0, sizeof *w);
    w->vocab = d->vocab; w->dim = d->dim;
    w->in = w->out = d->adapt_io ? STX_WORDS_ADAPTIVE : STX_WORDS_PLAIN;
    w->share_tables = w->share_projs = d->adapt_io && d->adapt_io_tied;
    w->divval = d->divval; w->cutoffs = d->adapt_io ? d->cutoffs : 0; w->forward_columns = d->forward_columns;
    memcpy(w->cutoff, d->cutoff, sizeof w->cutoff);
    w->table.kind = STX_NORMAL;
    w->table.a = 1;
    if (d->fairseq_init && !d->adapt_io) w->table.rule = STX_INIT_FAN_IN;
    w->out_table.kind = STX_UNIFORM;
    w->out_table.a = 1;
    w->out_table.rule = STX_INIT_FAN_IN;
    w->proj = w->bias = w->cluster = w->cluster_bias = w->out_table;
}
/* Fills in the defaults and checks; 0 and an error (if x) when the desc makes no sense. */
static int stx__span_resolve(stx_ctx *x, const stx_span_desc *from, stx_span_desc *d, stx_words_desc *words) {
    const size_t most = (size_t)1 << 31;
    *d = *from;
    if (!d->layers) d->layers = 8;
    if (!d->dim) d->dim = 256;
    if (!d->heads) d->heads = 4;
    if (!d->inner) d->inner = d->dim < most ? 4 * d->dim : d->dim;
    if (!d->span) d->span = 1024;
    if (d->ramp == 0) d->ramp = 32;
    if (d->layers > 4096) return stx__span_bad(x, "layers", (double)d->layers, "1 to 4096");
    if (d->dim > most / 4) return stx__span_bad(x, "dim", (double)d->dim, "at most 2^29");
    if (d->heads > 256 || d->dim % d->heads) {
        stx_fail(x, STX_ERR_ARG, "stx_span_create: %zu heads do not divide dim %zu: choose heads (at most 256) that do", d->heads, d->dim);
        return 0;
    }
    if (d->inner > most) return stx__span_bad(x, "inner", (double)d->inner, "at most 2^31");
    if (d->span > most) return stx__span_bad(x, "span", (double)d->span, "at most 2^31");
    if (d->pers > most) return stx__span_bad(x, "pers", (double)d->pers, "at most 2^31");
    if (!(d->ramp >= 1 && d->ramp <= (double)most)) return stx__span_bad(x, "ramp", d->ramp, "1 or more");
    if (!(d->span_init >= 0 && d->span_init <= 1)) return stx__span_bad(x, "span_init", d->span_init, "0 to 1 (a fraction of span)");
    if (!(d->span_loss >= 0 && d->span_loss < 1e30)) return stx__span_bad(x, "span_loss", d->span_loss, "0 or more");
    if ((d->no_renorm || d->span_per_layer) && !d->adapt_span) {
        stx_fail(x, STX_ERR_ARG, "stx_span_create: %s without adapt_span: a fixed span has no mask, want adapt_span = 1",
                 d->no_renorm ? "no_renorm" : "span_per_layer");
        return 0;
    }
    if (!stx__span_check_literal(x, d)) return 0;
    if (!(d->dropout >= 0 && d->dropout < 1)) return stx__span_bad(x, "dropout", d->dropout, "0 <= p < 1");
    if (!(d->emb_dropout >= 0 && d->emb_dropout < 1)) return stx__span_bad(x, "emb_dropout", d->emb_dropout, "0 <= p < 1");
    stx__span_words(d, words);
    if (!stx_words_resolve(x, "stx_span_create", words, words)) return 0;
    d->divval = words->divval;
    d->cutoffs = words->cutoffs;
    memcpy(d->cutoff, words->cutoff, sizeof d->cutoff);
    d->recompute_layers = d->recompute ? d->layers : STX_MIN(d->recompute_layers, d->layers);
    return 1;
}

STX_DEF size_t stx_span_count(const stx_span_desc *desc) {
    stx_span_desc d;
    stx_words_desc words;
    size_t n, layer;
    if (!desc || !stx__span_resolve(NULL, desc, &d, &words)) return 0;
    n = stx_size_add(stx_words_count(&words), d.dim / d.heads, d.span);
    layer = stx_size_add(2 * d.dim + (!d.adapt_span ? 0 : d.span_per_layer ? 1 : d.heads), 4 * d.dim, d.dim);
    layer = d.pers ? stx_size_add(layer, 2 * d.pers, d.dim) : stx_size_add(stx_size_add(layer, 2 * d.dim + 1, d.inner), 3, d.dim);
    return stx_size_add(n, d.layers, layer);
}

static stx_tensor *stx__span_param(stx_span *m, size_t l, const char *name, int init, double a, size_t d0, size_t d1, size_t d2) {
    char full[96];
    snprintf(full, sizeof full, "layers.%zu.%s", l, name);
    return stx_param(m->params, init, a, full, d0, d1, d2, 0);
}
/* Initialisers: those of PyTorch's Linear, U(1/sqrt(columns)) for weight and bias, and Embedding (stx__span_words); persistent keys
   n(0, 1/sqrt(D)) and values n(0, 1/sqrt(N)). fairseq_init: the projections are Xavier-normal, the feed-forward's weights
   Xavier-uniform, the embedding n(0, 1/sqrt(d)). */
STX_DEF stx_span *stx_span_create(stx_ctx *x, const stx_span_desc *desc) {
    stx_span *m;
    stx_span_desc *d;
    stx_words_desc words;
    size_t l, D;
    double sd, sf, ff;
    int proj;
    if (!stx_ok(x)) return NULL;
    if (!desc) { stx_fail(x, STX_ERR_ARG, "stx_span_create: no desc; at least vocab is needed"); return NULL; }
    m = (stx_span *)stx_persist(x, sizeof *m);
    if (!m || !stx__span_resolve(x, desc, &m->desc, &words)) return NULL;
    d = &m->desc;
    m->ctx = x;
    m->params = stx_params_create(x);
    m->layer = (stx_span_layer *)stx_persist(x, d->layers * sizeof *m->layer);
    if (!m->params || !m->layer) return NULL;
    D = d->dim / d->heads;
    sd = 1 / sqrt((double)d->dim);
    sf = 1 / sqrt((double)d->inner);
    ff = sqrt(6 / ((double)d->dim + (double)d->inner));
    proj = d->fairseq_init ? STX_NORMAL : STX_UNIFORM;      /* Xavier: sqrt(2 / (d + d)), which is 1/sqrt(d) again */
    m->key_pe = stx_param(m->params, STX_NORMAL, 1, "key_pe", d->span, D, 0, 0);
    m->words = stx_words_create(m->params, &words);
    for (l = 0; l < d->layers; l++) {
        stx_span_layer *y = &m->layer[l];
        if (d->adapt_span) y->z = stx__span_param(m, l, "attn.span", STX_CONSTANT, d->span_init, d->span_per_layer ? 1 : d->heads, 0, 0);
        if (d->pers) {
            y->pers_key = stx__span_param(m, l, "attn.pers_key", STX_NORMAL, 1 / sqrt((double)D), d->heads, d->pers, D);
            y->pers_val = stx__span_param(m, l, "attn.pers_val", STX_NORMAL, 1 / sqrt((double)d->pers), d->heads, d->pers, D);
        }
        /* q, k and v are one product: their weights stand side by side, but are drawn in the order q, o, v, k */
        if (!stx_params_beside(m->params, 3 * d->dim * d->dim)) return NULL;
        y->wq = stx__span_param(m, l, "attn.wq", proj, sd, d->dim, d->dim, 0);
        stx_params_draw(m->params, 2);
        y->wk = stx__span_param(m, l, "attn.wk", proj, sd, d->dim, d->dim, 0);
        y->wv = stx__span_param(m, l, "attn.wv", proj, sd, d->dim, d->dim, 0);
        stx_params_draw(m->params, -2);
        y->wo = stx__span_param(m, l, "attn.wo", proj, sd, d->dim, d->dim, 0);
        y->norm1_gain = stx__span_param(m, l, "norm1.weight", STX_CONSTANT, 1, d->dim, 0, 0);
        y->norm1_shift = stx__span_param(m, l, "norm1.bias", STX_ZEROS, 0, d->dim, 0, 0);
        if (d->pers) continue;
        y->w1 = stx__span_param(m, l, "ff.fc1.weight", STX_UNIFORM, d->fairseq_init ? ff : sd, d->inner, d->dim, 0);
        y->b1 = stx__span_param(m, l, "ff.fc1.bias", STX_UNIFORM, sd, d->inner, 0, 0);
        y->w2 = stx__span_param(m, l, "ff.fc2.weight", STX_UNIFORM, d->fairseq_init ? ff : sf, d->dim, d->inner, 0);
        y->b2 = stx__span_param(m, l, "ff.fc2.bias", STX_UNIFORM, sf, d->dim, 0, 0);
        y->norm2_gain = stx__span_param(m, l, "norm2.weight", STX_CONSTANT, 1, d->dim, 0, 0);
        y->norm2_shift = stx__span_param(m, l, "norm2.bias", STX_ZEROS, 0, d->dim, 0, 0);
    }
    if (d->adapt_span) {
        stx_tensor **z = (stx_tensor **)stx_block(x, d->layers * sizeof *z);
        for (l = 0; z && l < d->layers; l++) z[l] = m->layer[l].z;
        m->spans = stx_pick_params(x, z, d->layers);
        stx_block_free(x, z);
    }
    return stx_ok(x) ? m : NULL;
}
STX_DEF stx_params *stx_span_params(stx_span *m) { return m ? m->params : NULL; }

// >>spans

static void stx__span_z(const stx_span *m, size_t l, double *mean, double *max) {
    const stx_tensor *z = m->layer[l].z;
    const stx_real *v = stx_watch(m->ctx, z);
    size_t h;
    *mean = 0;
    *max = 0;
    if (!v) return;
    for (h = 0; h < z->size; h++) {
        *mean += (double)v[h] / (double)z->size;
        if ((double)v[h] > *max) *max = (double)v[h];
    }
}
static size_t stx__span_reach(const stx_span_desc *d, double z) { return stx_attention_reach(z, (double)d->span, d->ramp, d->span); }
/* Window S and cache C of layer l, by its longest head. Trimming in steps of 64 never takes a key that has weight. */
static void stx__span_window(const stx_span *m, size_t l, size_t *S, size_t *C) {
    const stx_span_desc *d = &m->desc;
    size_t L = d->span, trim = 0;
    double mean, max;
    if (d->adapt_span) {
        stx__span_z(m, l, &mean, &max);
        trim = L - stx__span_reach(d, max);
        trim = (trim < L - 1 ? trim : L - 1) / 64 * 64;
    }
    *S = L - trim;
    *C = !d->adapt_span || d->full_cache || *S + 64 > L ? L : *S + 64;
}
/* Heads by their own windows over the m rows of layer l's cache that are projected: where each head has a span of its own, and keys beyond
   it count nowhere. masked: rows are missing in some streams, and a head may see none that there are. So many streams must save what
   weights in another order take, forward once and in backward as floats; then groups never take more memory than one window does */
static void stx__span_groups(const stx_span *m, size_t l, size_t B, size_t rows, int masked, stx_head_groups *g) {
    const stx_span_desc *d = &m->desc;
    const stx_real *z = NULL;
    size_t need[256], saved = 0, h;
    if (d->adapt_span && d->heads > 1 && !d->span_per_layer && !d->literal && !d->no_renorm
        && !masked && rows)
        z = stx_watch(m->ctx, m->layer[l].z);
    for (h = 0; h < d->heads; h++) need[h] = z ? stx__span_reach(d, (double)z[h]) + 1 : rows;
    stx_head_groups_of(need, d->heads, rows, g);
    for (h = 0; h < d->heads; h++) saved += rows - g->rows[g->of[h]];
    if (g->count > 1 && B * saved >= 3 * d->heads * d->dim) return;
    memset(g, 0, sizeof *g);
    g->count = 1;
    g->rows[0] = rows;
}
STX_DEF size_t stx_span_window(const stx_span *m, size_t l) {
    size_t S = 0, C;
    if (m && l < m->desc.layers) stx__span_window(m, l, &S, &C);
    return S;
}
STX_DEF size_t stx_span_cache(const stx_span *m, size_t l) {
    size_t S, C = 0;
    if (m && l < m->desc.layers) stx__span_window(m, l, &S, &C);
    return C;
}
STX_DEF uint64_t stx_span_key(const stx_span *m, const stx_ids *ids, const stx_ids *targets, const stx_span_state *s, uint64_t salt) {
    uint64_t h = stx_step_key(m, ids, targets, salt);
    stx_head_groups g;
    size_t l, S, C, k;
    if (!m || !stx_ok(m->ctx)) return h;
    for (l = 0; l < m->desc.layers; l++) {
        stx__span_window(m, l, &S, &C);
        h = stx_key_add(stx_key_add(h, S), C);
        if (!s) continue;
        stx__span_groups(m, l, s->B, STX_MIN(S, s->rows->layer[l].real), s->rows->layer[l].masked, &g);
        for (k = 0; k < g.count; k++) h = stx_key_add(h, g.rows[k]);
        for (k = 0; k < m->desc.heads; k++) h = stx_key_add(h, g.of[k]);
    }
    h = stx_words_key(m->words, stx_key_add(h, m->desc.recompute_layers), ids, targets, NULL);
    return s ? stx_rows_key(s->rows, h) : h;
}

STX_DEF double stx_span_of(const stx_span *m, size_t l, size_t h) {
    const stx_real *v;
    if (!m || l >= m->desc.layers || h >= m->desc.heads) return 0;
    if (!m->desc.adapt_span) return (double)m->desc.span;
    v = stx_watch(m->ctx, m->layer[l].z);
    return v ? (double)v[m->desc.span_per_layer ? 0 : h] * (double)m->desc.span : 0;
}
STX_DEF void stx_span_stats(const stx_span *m, double *avg, double *max) {
    size_t l;
    *avg = *max = 0;
    if (!m) return;
    for (l = 0; l < m->desc.layers; l++) {
        double zmean = 1, zmax = 1, r;
        if (m->desc.adapt_span) stx__span_z(m, l, &zmean, &zmax);
        r = (double)stx__span_reach(&m->desc, zmax);
        *avg += (double)stx__span_reach(&m->desc, zmean) / (double)m->desc.layers;
        if (r > *max) *max = r;
    }
}
STX_DEF void stx_span_clamp(stx_span *m) {
    if (m && stx_ok(m->ctx) && m->desc.adapt_span) stx_clamp_params(m->ctx, m->spans, 0, 1);
}

// >>memory

STX_DEF stx_span_state *stx_span_state_create(stx_span *m, size_t B) {
    stx_ctx *x = m ? m->ctx : NULL;
    stx_span_state *s;
    stx_rows_desc d;
    if (!stx_ok(x)) return NULL;
    if (!B) { stx_fail(x, STX_ERR_ARG, "stx_span_state_create: no streams, want B >= 1"); return NULL; }
    memset(&d, 0, sizeof d);
    d.layers = m->desc.layers; d.B = B; d.width = m->desc.dim;
    d.whole = 1;
    d.zeros = (m->desc.literal & STX_SPAN_LITERAL_MEMORY) != 0;
    d.most = m->desc.span;
    s = (stx_span_state *)stx_block(x, sizeof *s);
    if (!s) return NULL;
    s->model = m;
    s->B = B;
    s->rows = stx_rows_create(x, &d);
    stx_span_state_reset(s);
    return s->rows ? s : NULL;
}
STX_DEF void stx_span_state_free(stx_span_state *s) {
    if (!s) return;
    stx_rows_free(s->rows);
    stx_block_free(s->model->ctx, s);
}
STX_DEF void stx_span_state_reset(stx_span_state *s) {
    size_t l;
    if (!s || !stx_ok(s->model->ctx)) return;
    stx_rows_reset(s->rows);
    for (l = 0; l < s->model->desc.layers; l++) s->rows->layer[l].rows = stx_span_cache(s->model, l);
}
STX_DEF void stx_span_state_reset_stream(stx_span_state *s, size_t b) { if (s) stx_rows_reset_stream(s->rows, b); }
STX_DEF int stx_span_state_get(const stx_span_state *s, size_t l, stx_real *out) { return s && stx_rows_get(s->rows, l, out); }
STX_DEF int stx_span_state_set(stx_span_state *s, size_t l, size_t rows, const stx_real *in, size_t n) {
    return s && stx_rows_set(s->rows, l, rows, in, n);
}
STX_DEF int stx_span_state_save(stx_writer *w, const stx_span_state *s, const char *prefix) {
    return s && stx_rows_save(w, s->rows, prefix);
}
STX_DEF int stx_span_state_load(stx_span_state *s, const stx_file *f, const char *prefix) {
    if (!s || !stx_ok(s->model->ctx) || !f) return 0;
    stx_span_state_reset(s);
    return stx_rows_load(s->rows, f, prefix);
}

// >>layer and forward

typedef struct stx__span_job { stx_span *m; size_t l, S; stx_past past; stx_head_groups groups; const stx_ids *mask; } stx__span_job;

static void stx__span_attention(const stx_span *m, size_t S, stx_attention_desc *a) {
    const stx_span_desc *d = &m->desc;
    memset(a, 0, sizeof *a);
    a->heads = d->heads;
    a->span = S;
    a->delta_min = 1;
    a->max_span = (double)d->span;
    a->ramp = d->ramp;
    a->eps = d->literal & STX_SPAN_LITERAL_EPS ? 1e-8 : 0;
    a->no_renorm = d->no_renorm;
    a->dropout = d->dropout;
    a->first_key = d->literal & STX_SPAN_LITERAL_MEMORY ? -(ptrdiff_t)S : 0;
}
/* What it takes besides the past: queries, keys and values of h */
static void stx__span_attention_in(const stx_span *m, size_t l, stx_tensor *h, stx_attention_in *a) {
    const stx_span_layer *p = &m->layer[l];
    stx_tensor *w[3];
    memset(a, 0, sizeof *a);
    w[0] = p->wq; w[1] = p->wk; w[2] = p->wv;
    a->qkv = stx_linear_many(m->ctx, h, w, NULL, 3);
    a->pe = m->key_pe;
    a->z = p->z;
    a->pk = p->pers_key;
    a->pv = p->pers_val;
}
/* What follows the attention's output y: h' = LN1(h + Wo y), then LN2(h' + FF(h')) unless all-attention. */
static stx_tensor *stx__span_after(stx_span *m, size_t l, stx_tensor *h, stx_tensor *y) {
    stx_ctx *x = m->ctx;
    const stx_span_layer *p = &m->layer[l];
    stx_tensor *f;
    h = stx_residual_norm(x, h, stx_linear(x, y, p->wo, NULL, STX_ACT_NONE), 0, p->norm1_gain, p->norm1_shift, 1e-5);
    if (m->desc.pers) return h;
    f = stx_dropout(x, stx_linear(x, h, p->w1, p->b1, STX_ACT_RELU), m->desc.dropout);
    return stx_residual_norm_bias(x, h, stx_linear(x, f, p->w2, NULL, STX_ACT_NONE), p->b2, 0, p->norm2_gain, p->norm2_shift, 1e-5);
}
/* One layer: in[0] = h (B,T,d). */
static stx_tensor *stx__span_layer(stx_ctx *x, void *user, stx_tensor **in, stx_tensor **out) {
    const stx__span_job *job = (const stx__span_job *)user;
    stx_span *m = job->m;
    stx_tensor *w[2];
    stx_attention_in a;
    stx_attention_desc d;
    (void)out;
    stx__span_attention_in(m, job->l, in[0], &a);
    w[0] = m->layer[job->l].wk; w[1] = m->layer[job->l].wv;
    if (job->groups.count > 1) {            /* short heads have few keys */
        a.groups = &job->groups;
        stx_linear_heads(x, &job->past, in[0]->dim[0], w[0], w[1], m->desc.heads, a.groups, a.past);
    } else a.past[0] = stx_linear_past(x, &job->past, 1, in[0]->dim[0], w, NULL, 2);
    a.pad = job->mask;
    stx__span_attention(m, job->S, &d);
    return stx__span_after(m, job->l, in[0], stx_attention(x, &a, &d));
}
static stx_tensor *stx__span_embed(stx_span *m, const stx_ids *ids) {
    return stx_dropout(m->ctx, stx_words_embed(m->words, ids), m->desc.emb_dropout);
}

STX_DEF stx_tensor *stx_span_forward(stx_span *m, const stx_ids *ids, const stx_span_state *in, stx_span_state *out) {
    stx_ctx *x = m ? m->ctx : NULL;
    stx_tensor *h;
    size_t l, S, C;
    if (!stx_ok(x) || !ids) return NULL;
    if ((in && in->B != ids->B) || (out && out->B != ids->B) || (in && in->model != m) || (out && out->model != m)) {
        stx_fail(x, STX_ERR_SHAPE,
                 "stx_span_forward: %zu rows of tokens with a memory of %zu streams, or of another model: make the state with B = %zu",
                 ids->B, in ? in->B : out->B, ids->B);
        return NULL;
    }
    h = stx__span_embed(m, ids);
    for (l = 0; l < m->desc.layers && h; l++) {
        stx__span_job *job = (stx__span_job *)stx_step_alloc(x, sizeof *job);
        if (!job) return NULL;
        stx__span_window(m, l, &S, &C);
        if (!stx_rows_past(in ? in->rows : NULL, l, S, &job->past)) return NULL;       /* rows further back have no weight: not projected */
        job->mask = in ? stx_rows_mask(in->rows, l, S, NULL, ids->T) : NULL;
        stx__span_groups(m, l, ids->B, job->past.rows, in && in->rows->layer[l].masked, &job->groups);
        if (out && !stx_rows_push(out->rows, in ? in->rows : NULL, l, C, h, NULL)) return NULL;
        job->m = m; job->l = l; job->S = S;
        h = m->desc.layers - l <= m->desc.recompute_layers ? stx_recompute(x, stx__span_layer, job, &h, 1, NULL, 0)
            : stx__span_layer(x, job, &h, NULL);
    }
    return stx_dropout(x, h, m->desc.emb_dropout);
}
STX_DEF stx_tensor *stx_span_logits(stx_span *m, stx_tensor *h) { return m ? stx_words_logits(m->words, h) : NULL; }
STX_DEF stx_tensor *stx_span_log_probs(stx_span *m, stx_tensor *h) { return m ? stx_words_log_probs(m->words, h) : NULL; }
STX_DEF stx_tensor *stx_span_loss(stx_span *m, const stx_ids *ids, const stx_ids *targets, const stx_span_state *in, stx_span_state *out) {
    return m ? stx_words_loss(m->words, stx_span_forward(m, ids, in, out), targets, NULL) : NULL;
}
STX_DEF stx_tensor *stx_span_total(stx_span *m, stx_tensor *nll) {
    stx_tensor **z;
    size_t l;
    if (!m || !nll || !m->desc.adapt_span || m->desc.span_loss == 0) return nll;
    z = (stx_tensor **)stx_step_alloc(m->ctx, m->desc.layers * sizeof *z);
    for (l = 0; z && l < m->desc.layers; l++) z[l] = m->layer[l].z;
    return stx_add_means(m->ctx, nll, z, m->desc.layers, m->desc.span_loss * (double)m->desc.span);
}

// >>generation

STX_DEF stx_span_gen *stx_span_gen_create(stx_span *m, size_t B) {
    stx_ctx *x = m ? m->ctx : NULL;
    stx_span_gen *g;
    if (!stx_ok(x)) return NULL;
    if (!B) { stx_fail(x, STX_ERR_ARG, "stx_span_gen_create: no streams, want B >= 1"); return NULL; }
    g = (stx_span_gen *)stx_block(x, sizeof *g);
    if (!g) return NULL;
    g->model = m;
    g->B = B;
    g->cache = stx_cache_create(x, m->desc.layers, B, m->desc.vocab);
    stx_span_gen_reset(g);
    return stx_ok(x) ? g : NULL;
}
STX_DEF void stx_span_gen_free(stx_span_gen *g) {
    if (!g) return;
    stx_cache_free(g->cache);
    stx_block_free(g->model->ctx, g);
}
STX_DEF void stx_span_gen_reset(stx_span_gen *g) {
    size_t l;
    for (l = 0; g && l < g->model->desc.layers; l++)
        if (!stx_cache_window(g->cache, l, stx_span_window(g->model, l), g->model->desc.dim, 1)) return;
}
static stx_tensor *stx__span_gen_step(void *user, const stx_ids *ids) {
    stx_span_gen *g = (stx_span_gen *)user;
    stx_span *m = g->model;
    stx_tensor *h = stx__span_embed(m, ids);
    size_t l;
    for (l = 0; l < m->desc.layers && h; l++) {
        stx_attention_in a;
        stx_attention_desc d;
        stx__span_attention_in(m, l, h, &a);
        stx__span_attention(m, g->cache->layer[l].window, &d);
        h = stx__span_after(m, l, h, stx_cache_attention(g->cache, l, &a, &d));
    }
    return h;
}
STX_DEF const stx_real *stx_span_gen_feed(stx_span_gen *g, const int32_t *ids, size_t n) {
    return g ? stx_cache_feed(g->cache, g->model->words, ids, n, 0, stx__span_gen_step, g) : NULL;
}

// >>model: for programs of any family

static stx_tensor *stx__span_lm_loss(void *m, const stx_ids *ids, const stx_ids *targets, const void *in, void *out) {
    return stx_span_loss((stx_span *)m, ids, targets, (const stx_span_state *)in, (stx_span_state *)out);
}
static stx_tensor *stx__span_lm_total(void *m, stx_tensor *nll) { return stx_span_total((stx_span *)m, nll); }
static void stx__span_lm_updated(void *m) { stx_span_clamp((stx_span *)m); }
static size_t stx__span_lm_recompute(void *m, size_t n) {
    stx_span_desc *d = &((stx_span *)m)->desc;
    d->recompute = n >= d->layers;
    return d->recompute_layers = STX_MIN(n, d->layers);
}
static uint64_t stx__span_lm_key(const void *m, const stx_ids *ids, const stx_ids *targets, const void *s, uint64_t salt) {
    return stx_span_key((const stx_span *)m, ids, targets, (const stx_span_state *)s, salt);
}
static int stx__span_lm_no_window(stx_span *m, size_t window) {
    if (m && window) stx_fail(m->ctx, STX_ERR_ARG, "stx_span_lm: a window of %zu: it follows the spans here, want 0", window);
    return !window;
}
static void *stx__span_lm_state_create(void *m, size_t B, size_t window) {
    return stx__span_lm_no_window((stx_span *)m, window) ? stx_span_state_create((stx_span *)m, B) : NULL;
}
static void stx__span_lm_state_free(void *s) { stx_span_state_free((stx_span_state *)s); }
static void stx__span_lm_state_reset(void *s) { stx_span_state_reset((stx_span_state *)s); }
static void stx__span_lm_state_reset_stream(void *s, size_t b) { stx_span_state_reset_stream((stx_span_state *)s, b); }
static int stx__span_lm_state_copy(void *to, size_t b, const void *from, size_t c, size_t n) {
    const stx_span_state *s = (const stx_span_state *)from;
    return to && stx_rows_copy(((stx_span_state *)to)->rows, b, s ? s->rows : NULL, c, n);
}
static int stx__span_lm_state_save(stx_writer *w, const void *s, const char *prefix) {
    return stx_span_state_save(w, (const stx_span_state *)s, prefix);
}
static int stx__span_lm_state_load(void *s, const stx_file *f, const char *prefix) {
    return stx_span_state_load((stx_span_state *)s, f, prefix);
}
static void *stx__span_lm_gen_create(void *m, size_t B, size_t window) {
    return stx__span_lm_no_window((stx_span *)m, window) ? stx_span_gen_create((stx_span *)m, B) : NULL;
}
static void stx__span_lm_gen_free(void *g) { stx_span_gen_free((stx_span_gen *)g); }
static void stx__span_lm_gen_reset(void *g) { stx_span_gen_reset((stx_span_gen *)g); }
static const stx_real *stx__span_lm_gen_feed(void *g, const int32_t *ids, size_t n) { return stx_span_gen_feed((stx_span_gen *)g, ids, n); }
STX_DEF stx_lm stx_span_lm(stx_span *m) {
    stx_lm lm;
    memset(&lm, 0, sizeof lm);
    if (!m) return lm;
    lm.model = m;
    lm.ctx = m->ctx;
    lm.params = m->params;
    lm.words = m->words;
    lm.loss = stx__span_lm_loss;
    lm.total = stx__span_lm_total;
    lm.updated = stx__span_lm_updated;
    lm.recompute = stx__span_lm_recompute;
    lm.key = stx__span_lm_key;
    lm.state_create = stx__span_lm_state_create;
    lm.state_free = stx__span_lm_state_free;
    lm.state_reset = stx__span_lm_state_reset;
    lm.state_reset_stream = stx__span_lm_state_reset_stream;
    lm.state_copy = stx__span_lm_state_copy;
    lm.state_save = stx__span_lm_state_save;
    lm.state_load = stx__span_lm_state_load;
    lm.gen_create = stx__span_lm_gen_create;
    lm.gen_free = stx__span_lm_gen_free;
    lm.gen_reset = stx__span_lm_gen_reset;
    lm.gen_feed = stx__span_lm_gen_feed;
    return lm;
}

#endif /* SEQTX_ATTN_SPAN_IMPLEMENTATION */
