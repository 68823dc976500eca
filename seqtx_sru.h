/* seqtx_sru.h - v0.1 - SRU and SRU++: simple recurrent units, optionally with attention
   no warranty implied; MIT or public domain, your choice (see the end of seqtx.h)

   In ONE .c or .cpp file:                everywhere else:
       #define SEQTX_IMPLEMENTATION           #include "seqtx_sru.h"
       #include "seqtx_sru.h"

   Needs seqtx.h in the same directory. Compile with -O2 and link -lm (and -pthread on
   systems older than glibc 2.34). If another file already implements seqtx.h, define
   SEQTX_SRU_IMPLEMENTATION instead: it compiles only the part in this header.

   Contents, as four layers that can each be used on their own:
       stx_sru_fwd, stx_sru_bwd    the recurrence, on raw pointers
       stx_sru_recurrence          the recurrence as an op
       stx_sru                     a stack of layers inside another model: stx_sru_forward
                                   with tensors, stx_sru_segment with a state
       stx_sru_lm                  a language model: training, states, generation


   MANUAL

   Papers
       Simple Recurrent Units for Highly
           Parallelizable Recurrence (SRU)           Lei et al., 2018          1709.02755
       When Attention Meets Fast Recurrence (SRU++)  Lei, 2021                 2102.12459

   Letters used in this file
       B  streams (rows of a batch)          x  input of a layer, (B,T,Ci)
       T  times (tokens) per call            h  output of a layer, (B,T,O)
       H  units per direction                c  state before a time; c' after it
       D  directions, 1 or 2                 U  (B,T,k,O), planes u0 .. u2 or u3
       O  D H, the columns                   f  forget gate;  vf, bf its vector and bias
       k  planes of U, 3 or 4                r  reset gate;   vr, br its vector and bias
       Ci features of a layer's input        v  (2,O): vf and vr
       P  SRU++: width of the projection     V  (B,T,2,O), added to v at each time
       M  SRU++: rows of memory              m  (B,O), dropout mask
       b  row of the batch                   g  the identity, or tanh
       s  direction, 0 or 1                  xt highway input;  alpha its scale
       o  column, s H + unit                 e  gradient of c' from later times
       t  time                               J, Q  slope and offset of the affine map of e
       p  step: t in the direction's order   z, a  SRU++: projection, attention output

   In the code, x is the context and m a model, except inside the recurrence.

   The model. An LSTM multiplies its last output by a matrix at every time. An SRU
   multiplies all inputs at once, U = W3 x, and what remains from one time to the next is
   elementwise. SRU++ replaces this matmul by attention.

          x (B,T,Ci) --+--> U = W3 x --> for t: f, r, c', h --> h (B,T,O)
                       '------ highway -----------^

   The cell, for one column and one time:

       u0, u1, u2 (, u3) = U                     k = 4 if Ci differs from O, else 3
       f  = sigmoid(u1 + vf c + bf)              forget gate
       r  = sigmoid(u2 + vr c + br)              reset gate, of the state BEFORE t
       c' = u0 + (c - u0) f
       xt = alpha x  (k = 3)  or  u3  (k = 4)    highway
       h  = xt + (g(c') - xt) m r                g(c) = c, or tanh c; m is drawn once for
                                                 all times

   Gradients. dh = dL/dh; e is the part of dL/dc' that comes from later times.

       dzr = dh (g - xt) m r (1-r)               gradient of r's argument
       dc' = dh m r g' + e                       everything that reaches c'
       dzf = dc' (c - u0) f (1-f)                gradient of f's argument
       du0 = dc' (1-f)     du1 = dzf     du2 = dzr     dxt = dh (1 - m r)
       dvf += dzf c        dvr += dzr c          dbf += dzf      dbr += dzr
       e   <- dc' f + dzf vf + dzr vr            for the time before; before the first
                                                 time it is dL/dc0
       k = 3: dx += alpha dxt                    k = 4: du3 = dxt

   At padding all of them are 0 and e does not change.

   Why it runs in parallel. Substitute dc' in the last line:

       e <- J e + Q        J = f + vf (c - u0) f (1-f)        Q = dh m r g' J + dzr vr

   J and Q depend on c but not on e, so backward is affine in e, and affine maps compose:
   (J1,Q1) followed by (J2,Q2) is (J2 J1, J2 Q1 + Q2). Time is cut into chunks. Each chunk
   computes its map in parallel, a short loop over the chunks finds the e that enters each
   of them, and then all chunks run at once. This holds for every v and for tanh. The
   forward recurrence c' = f c + (1-f) u0 is affine only if f does not depend on c, that
   is with vf = 0 (v1). Otherwise forward is sequential in time, and parallel over the B O
   columns.

   SRU++. W3 x becomes W3 y. P is the width of the projection W1, and the memory (B,M,Ci)
   contains the layer's inputs at earlier times:

       z = W1 [memory ; x]
       [key | val] = W2 z                        keys and values come from z; the query is
                                                 z itself
       a = softmax(z key^T / sqrt(P/heads)) val  causal, over a window or all keys
       y = LN(z + alpha_attn a)                  alpha_attn starts at 0 (ReZero), so the
                                                 model starts without attention
       U = W3 dropout(y)

   There are no position encodings: the recurrence represents the order. The memory stores
   raw inputs. They are projected in each step with the current W1 and contribute to its
   gradient. Gradients, with ds the gradient of the sum z + alpha_attn a:

       dy = W3^T dU, times the dropout mask; ds follows from dy through LN
       da = alpha_attn ds                        dalpha_attn = sum over elements of ds a
       (dz, dkey, dval) from da, by the attention's backward
       dz += ds + W2^T [dkey | dval]             also for the rows of the memory
       dW2 = [dkey | dval]^T z                   dW1 = dz^T [memory ; x]
       dx = W1^T dz                              the memory is a constant

   While alpha_attn is 0, da is 0 too: the first update changes only alpha_attn, and the
   weights of the attention follow.

   Why it works this way
       Why a negative highway_bias? r starts near sigmoid(highway_bias): 0.12 for -2, 0.05
       for -3. Then h is nearly x, a deep stack starts close to the identity, and
       gradients reach its first layer undiminished.

       Why alpha = sqrt(1 + 2 exp(highway_bias)) with rescale? Let c and x be independent
       with equal variance, and let r be sigmoid(highway_bias). Then
           Var h = (r^2 + (1-r)^2 alpha^2) Var x
       and this alpha makes it equal to Var x: the signal does not fade from layer to
       layer.

       Why sqrt(1/2) in the initial gate weights? A gate's argument is a sum of two terms,
       u1 from the matmul and vf c. With variance 1/2 each, the sum has variance 1.
       U(-sqrt(3/2), sqrt(3/2)) has variance 1/2.

       Can a state overflow? No: c' is between c and u0, so |c| <= max(|c0|, max |u0|) for
       any number of times. Gradients can grow: J <= 1 is certain only while the product
       |vf (c - u0)| is at most 1. A negative highway_bias and gradient clipping help.

       Why does bf start at 0? Then f is about 1/2 and a unit remembers a few times.
       Longer memories are learned, unit by unit.

       Why are few columns slow? Each time waits for the previous one: a multiply-add, a
       sigmoid and another multiply-add. This latency is constant until B O columns fill
       the vectors and threads, so up to that point more streams or units cost nothing.

   Worked example. One unit with v = 0; u1, u2 and the biases are 0, so f = r = 1/2. Also
   alpha = 1 and c0 = 0. Two times with x = 1, 3 and u0 = 4, 8:

       c = 2, 5        h = 1 + (2 - 1)/2 = 1.5,  3 + (5 - 3)/2 = 4

   Backward from dh = 0, 1 (only the second h is in the loss):

       t = 2: dzr = 2/4 = 0.5   dc' = 0.5    dzf = 0.5 (2 - 8)/4 = -0.75    du0 = 0.25
              dx = 0.5          e = 0.25
       t = 1: dzr = 0           dc' = 0.25   dzf = 0.25 (0 - 4)/4 = -0.25   du0 = 0.125
              dx = 0            dc0 = 0.125

   Quick start (a test compiles and runs it): learns "abcabc.." and prints it.

   //>quickstart
       #define SEQTX_IMPLEMENTATION
       #include "seqtx_sru.h"
       #include <stdio.h>

       int main(void) {
           stx_ctx *x = stx_create(NULL);
           stx_sru_lm_desc d = {0};
           d.vocab = 256;
           d.dim = 32;
           d.sru.layers = 2;
           d.sru.transform = STX_SRU_ATTENTION;
           d.sru.proj = 16;
           d.sru.highway_bias = -2;
           stx_sru_lm *model = stx_sru_lm_create(x, &d);
           stx_optim *optim = stx_optim_create(stx_sru_lm_params(model), NULL);
           stx_sru_state *state = stx_sru_state_create(model->sru, 1);

           for (int step = 0; step < 100 && stx_ok(x); step++) {
               int32_t text[17];
               for (int i = 0; i < 17; i++) text[i] = "abc"[(step * 16 + i) % 3];
               stx_begin(x, STX_TRAIN);
               stx_ids *in = stx_tokens(x, text, 1, 16);
               stx_ids *next = stx_tokens(x, text + 1, 1, 16);
               stx_tensor *nll = stx_sru_lm_loss(model, in, next, state, state);
               stx_backward(x, nll);
               if (step % 20 == 0) printf("step %d nll %.4f\n", step, stx_item(x, nll));
               stx_optim_step(optim, 0.01);
           }

           int32_t token = 'a';
           stx_sru_gen *gen = stx_sru_gen_create(model, 1, 0);
           stx_sampling greedy = {0};
           for (int i = 0; i < 12 && stx_ok(x); i++) {
               const stx_real *logits = stx_sru_gen_feed(gen, &token, 1);
               putchar(token);
               token = logits ? stx_sample(&greedy, 0, logits, 256, NULL) : 0;
           }
           printf("\n%s\n", stx_error(x));
           stx_destroy(x);
           return 0;
       }
   //<quickstart

   Configuration (stx_sru_desc, in stx_sru_lm_desc.sru; fields of stx_sru_lm_desc: lm)

       field            zero means        enwik8 base  wt103 base             older SRU
       ---------------  ----------------  -----------  ---------------------  ---------
       dim (lm, O)      512               3072         3072                   1024
       layers           2                 10           10                     6
       transform        STX_SRU_LINEAR    ATTENTION    ATTENTION              LINEAR
       proj (P)         none; SRU++: O/4  768          768                    0
       heads            1                 1            1                      -
       dropout (lm)     0                 0.22         0.15                   0.2
       attn_dropout     0                 0.22         0.15                   -
       highway_bias     0                 -2           -2                     -3
       norm             none              none         none                   none
       cutoffs (lm)     -                 -            19997, 39997, 199997   -

   "older SRU" is the original's first enwik8 trainer. dropout acts on the embedding,
   between layers, before W3 (SRU++) and on the last hidden state. highway_bias is used as
   it is; no other value replaces 0. The SRU++ paper trains with RAdam (STX_RADAM) at
   learning rate 3e-4, weight decay 0.1, clip 1, and STX_LR_RECURSIVE with 16000 updates
   of warm-up.

   Cost of a layer, forward, in multiply-adds per token:

       SRU                 k Ci O; with a projection Ci P + k P O
       SRU++, W1 and W2    (Ci P + 2 P^2) (M + T) / T
       SRU++, attention    2 P for each key that is seen
       SRU++, W3           k P O

   The recurrence is limited by memory bandwidth: per column and time, forward reads u0,
   u1, u2 and x and writes h (5 elements), backward transfers 9.

   Backward needs the following elements of each layer. One state in STX_SRU_TILE is
   stored (c), and the input of a layer is the h of the layer before:

       SRU                 B T (k + 1) O                       U, h
       SRU++, in addition  3 P B (M + T) + 4 P B T + Ci B M    z, keys, values; z of the
                                                               segment, a, the sum, y;
                                                               memory

   With recompute, these exist for one layer at a time, and each layer keeps its input and
   its memory, B T O + Ci B M.

   Generation stores B O elements per layer, and in SRU++ also 2 P (2 window + 64) per
   stream. A token costs as much as in a forward pass over a text. Its time is limited by
   memory bandwidth: with one stream, each token reads all weights once, 4 bytes each, and
   8 P bytes of keys and values per row of the window and attending layer. Several streams
   share the reads of the weights.

   Fidelity to the authors' implementation (version 2.6, and the development version 3.0,
   which has SRU++)
       Identical to within 1e-10 in double (tested against independent float64 code):
       cell, stack and SRU++ with every option, the initialisers of both versions,
       adaptive embedding and softmax, optimisers, schedules.

       Corrected; a flag of `literal` restores accidental behaviour of the authors' code:
           STX_SRU_LITERAL_NORM   with a norm before the transform, the memory bypasses
                                  the norm: z = W1 memory, not W1 LN(memory). Default: the
                                  memory is normalised like the segment, so a text that is
                                  cut into segments gives the same result as the whole
                                  text.
       As the original means: literal = STX_SRU_LITERAL, and highway_bias = -2 for SRU++.

       Corrected, without a flag: the original masks by adding -10000, so a padded time
       whose keys are all padding attends to the future. Here it attends to nothing. No
       output, state or gradient differs; see stx__sru_attend.

       Kept: after STX_SRU_NORM_AFTER the output of padding is the shift of the norm, not
       0; zero_pads makes it 0. With k = 4 the forward pass does not scale the highway by
       alpha.

       Different: tensors are batch first, (B,T,.). Row i O + s H + unit of W3 is plane i,
       direction s; the original's row is (s H + unit) k + i. A custom V is stored in
       planes too, where the original stores pairs. highway_bias is 0 unless set; the
       original's SRU++ stack has -2.

       Improved: states are float in every precision. States in the shape of PyTorch's
       RNNs can be read and written, and other shapes are refused. Inference supports
       every k, direction and V.

       Omitted: the streams of sentences of the Billion Word trainer (supply the corpus
       yourself); second derivatives; streaming with look-ahead; attention masks of any
       form. Attention is causal, has a window or, with not_causal, sees everything. The
       original sees everything if it gets no mask, so encoders set not_causal.
       Projections are never ignored (2.6 ignores those that do not make a layer
       narrower). The last layer of a stack has no dropout; for a single cell with
       dropout, use stx_sru_recurrence with a mask.

   Checkpoints can be converted in both directions; docs/convert.md lists the names of the
   tensors.

   Arguments of the original's stacks and the fields of stx_sru_desc

       original                      field                              its default
       ----------------------------  ---------------------------------  ------------
       input_size, hidden_size       input, hidden                      (required)
       num_layers                    layers                             2
       dropout, rnn_dropout          dropout, rnn_dropout               0
       bidirectional                 bidirectional                      False
       projection_size, n_proj       proj, projs                        0
       use_tanh                      tanh                               False
       highway_bias                  highway_bias                       0; SRU++: -2
       has_skip_term                 no_skip, with inverse sense        True
       layer_norm                    norm: _BEFORE, or _NONE            False
       layer_norm, normalize_after   norm: _AFTER                       False
       rescale                       rescale                            False
       v1                            v1                                 False
       custom_m, transform_module    custom, user                       None
       weight_c_init                 v_init                             None; 3.0: 1
       nn_rnn_compatible_return      stx_sru_state_get_nn               False
       proj_input_to_hidden_first    input_first                        False
       mask_pad (of the call)        pad                                none

       original, SRU++               field                              its default
       ----------------------------  ---------------------------------  ------------
       proj_size                     proj                               (required)
       attn_dropout                  attn_dropout                       0
       num_heads                     heads                              1
       attn_layer_norm               no_attn_norm, with inverse sense   True
       attention_every_n_layers      attention_every                    1
       attention_last_n_layers       attention_last                     -1: off
       rezero_init_alpha             alpha_init                         0
       normalize_after (attention)   attn_norm_first, inverse sense     True

   SRU is transform = STX_SRU_LINEAR, with init_xavier = 1 for version 3.0. SRU++ is
   transform = STX_SRU_ATTENTION.

   Easy to get wrong
       - r uses the state before t, as f does, not the new one.
       - With two directions and k = 3, the highway of a direction is its half of x, not
         all of x.
       - The state after a call is that of the last time for the first direction and of
         the first time for the second.
       - m multiplies (g - xt) r. A dropped unit outputs xt, and m is drawn once for all
         times.
       - There is no activation and no bias between W1, W2 and W3. Only the gates have
         biases.
       - In training, a query sees the whole previous segment and its own up to t: T + 1
         to 2 T keys. Evaluation uses a window: stx_sru_state.window and keep.
       - The state and the memory that a segment reads are constants: gradients stop at
         its start.

   GPU. Set desc.device (see seqtx.h); nothing else changes. seqtx_cuda.cu contains the
   kernels of the recurrence if this header is in the same directory. To replay steps as a
   CUDA graph, write the step as a function (examples/train_sru.c is a complete example):

       stx_step_run(x, stx_sru_lm_key(model, in, next, state, 0), step, user);

   The fused attention kernels need a head dimension P / heads of at most 128 that is a
   multiple of 8. Otherwise the scores are stored in memory, part by part.

   Reading order: stx_sru_args (the recurrence), stx_sru_fwd_plain and stx_sru_bwd_plain
   (forward and backward, time by time), stx__sru_steps_as and stx__sru_back_as (the same
   for many columns at once), stx_sru_bwd (chunks of time), stx__sru_transform (SRU++),
   stx__sru_layer and stx_sru_forward (the stack), stx_sru_segment (states),
   stx_sru_gen_feed (generation). Compile-time options are those of seqtx.h.
*/
#ifndef SEQTX_SRU_H
#define SEQTX_SRU_H

#include "seqtx.h"

#ifdef __cplusplus
extern "C" {
#endif


// >>api: configuration ------------------------------------------------------------------

enum { STX_SRU_LINEAR = 0, STX_SRU_ATTENTION };                            /* desc.transform */

enum { STX_SRU_NORM_NONE = 0, STX_SRU_NORM_BEFORE, STX_SRU_NORM_AFTER };   /* desc.norm */

/* A custom transform (custom_m and transform_module of the original). in (B,T,Ci) is
   the layer's input after layer norm and dropout. It sets *U to (B,T,k,O), in the
   planes of stx_sru_args, and, for gate vectors that depend on the input, *V to
   (B,T,2,O), which is added to v. k is 4 if the layer has a highway and Ci differs
   from O, else 3. Such layers have no memory. Returns 1, or 0 if it fails. It is
   called in every forward, and with recompute again in backward: then it may depend
   only on in, user and parameters, must not change anything, and user must be valid
   until stx_backward returns. */
typedef int (*stx_sru_transform)(stx_ctx *x, void *user, size_t layer, stx_tensor *in,
                                 stx_tensor **U, stx_tensor **V);

/* Flags of stx_sru_desc.literal: accidental behaviour of the authors' code; see
   Fidelity. */
enum {
    STX_SRU_LITERAL_NORM = 1,       /* requires STX_SRU_ATTENTION with STX_SRU_NORM_BEFORE */
    STX_SRU_LITERAL      = 1 << 30  /* all that apply to the model */
};

typedef struct stx_sru_desc {
    size_t input;               /* features of x, required */
    size_t hidden;              /* H; 0: input, with two directions input / 2 */
    size_t layers;              /* 0: 2 */
    int    bidirectional;       /* 1: D = 2, the second direction runs from the last time
                                   to the first */
    int    transform;           /* STX_SRU_LINEAR: U = W3 x, or W3 W1 x with proj.
                                   STX_SRU_ATTENTION: SRU++ */
    size_t proj;                /* P; 0: no W1 (SRU++: O / 4) */
    const size_t *projs;        /* P of each layer, (layers), copied. NULL: proj for all */
    int    tanh;                /* 1: g is tanh */
    int    no_skip;             /* 1: no highway, xt = 0 */
    int    rescale;             /* 1: alpha = sqrt(1 + 2 exp(highway_bias)) if k = 3; 0: 1 */
    double highway_bias;        /* initial br, in [-80,80]; 0 means 0. Published SRU++
                                   models use -2 (the original's default for them), SRU
                                   language models -3 */
    int    v1;                  /* 1: v is 0 and not a parameter (SRU of 2017); forward is
                                   then a parallel scan */
    int    norm;                /* layer norm: STX_SRU_NORM_BEFORE the transform, or
                                   _AFTER the recurrence */
    double dropout;             /* in [0,1), of g(c') - xt in all layers but the last, one
                                   draw for all times. SRU++: also before W3, one draw
                                   per time */
    double rnn_dropout;         /* of the input of every transform, one draw for all times */
    int    input_first;         /* 1: if input differs from O, a matrix maps x to O first,
                                   so that every layer has k = 3 */
    int    init_xavier;         /* STX_SRU_LINEAR: 1: Xavier initialisers, as version 3.0
                                   of the original; 0: those of 2.6. SRU++ always has the
                                   former */
    double v_init;              /* initial v in U(-v_init, v_init). 0: sqrt(3/2), or 1
                                   with Xavier. -1: zeros, but learned */
    stx_sru_transform custom;   /* replaces transform; user is passed to it */
    void  *user;
    int    recompute;           /* 1: recompute all layers in backward: about 1/3 more
                                   time, less memory (docs/speed.md) */
    size_t recompute_layers;    /* recompute the last n layers only */

    /* SRU++ */
    size_t heads;               /* must divide P, at most 256; 0: 1 */
    double attn_dropout;        /* of attention weights, in [0,1) */
    size_t attention_every;     /* layers n, 2 n, .. (from 1) attend, the others only
                                   project; 0: 1 */
    size_t attention_last;      /* the last n layers attend; cannot be combined with
                                   attention_every. 0: not used */
    int    no_attention;        /* 1: no layer attends */
    int    no_attn_norm;        /* 1: no layer norm in the transform */
    int    attn_norm_first;     /* 1: this layer norm is before query, keys and values,
                                   not after the sum */
    double alpha_init;          /* initial alpha_attn; 0: ReZero */
    int    not_causal;          /* 1: every time attends to every time */

    /* differences from the original */
    unsigned literal;           /* STX_SRU_LITERAL or flags; a flag that does not apply is
                                   an error. In the resolved desc: the flags in force */
    int    zero_pads;           /* 1: the output of padding is 0 after STX_SRU_NORM_AFTER too;
                                   0: it is the norm's shift */
} stx_sru_desc;

typedef struct stx_sru_layer {
    size_t Ci, P, k;                        /* P is 0 without W1 */
    int    attends, highway;                /* has attention; k = 3 and xt = alpha x */
    stx_real alpha;
    stx_tensor *w1, *w2, *w3;               /* (P,Ci) (2P,P) (k O, P or Ci); NULL if absent */
    stx_tensor *alpha_attn;                 /* (1); its name in a checkpoint is "alpha" */
    stx_tensor *attn_gain, *attn_shift;     /* (P) */
    stx_tensor *gain, *shift;               /* (Ci), or (O) with STX_SRU_NORM_AFTER */
    stx_tensor *v, *bias;                   /* (2,O): vf, vr; bf, br. v is NULL with v1 */
} stx_sru_layer;

typedef struct stx_sru {
    stx_ctx       *ctx;
    stx_sru_desc   desc;        /* resolved */
    size_t         O;
    stx_tensor    *w_input;     /* (O,input), input_first only */
    stx_sru_layer *layer;       /* [layers] */
} stx_sru;

/* Creates a stack and adds its parameters to p, with names that begin with prefix (""
   or "encoder.", at most 96 bytes). It is freed with the context of p. Returns NULL
   and sets the context's error if the desc is invalid. */
STX_DEF stx_sru *stx_sru_create(stx_params *p, const char *prefix, const stx_sru_desc *d);

/* Number of parameter elements of such a stack, without creating it. Returns 0 if the
   desc is invalid, SIZE_MAX if the number does not fit. */
STX_DEF size_t stx_sru_count(const stx_sru_desc *d);


// >>api: forward ------------------------------------------------------------------------

/* Inputs of a forward besides x, and its outputs besides h. Arrays have one entry per
   layer; an array or an entry that is NULL is absent. */
typedef struct stx_sru_io {
    stx_tensor *const *c0;      /* (B,O) initial states; absent: 0 */
    stx_tensor *const *memory;  /* (B,M,Ci) of the layers that attend: their inputs at
                                   earlier times. M is equal in all layers */
    const stx_ids *pad;         /* (B,T), nonzero: padding. Its h is 0, the state does not
                                   change, and no query attends to it */
    const stx_ids *memory_pad;  /* (B,M) */
    size_t window;              /* attention sees the last n times; 0: all */
    stx_tensor **last;          /* out: (B,O) final states: after the last time in the first
                                   direction, after the first time in the second */
    stx_tensor **inputs;        /* out: (B,T,Ci), memory for the next segment */
} stx_sru_io;

/* x (B,T,input) -> h (B,T,O). io may be NULL. Gradients reach x, c0 and memory unless
   they are constants. */
STX_DEF stx_tensor *stx_sru_forward(stx_sru *m, stx_tensor *x, stx_sru_io *io);

/* lengths (B) -> padding (B,T): nonzero from time length[b] on. A length above T is an
   error. */
STX_DEF stx_ids *stx_sru_lengths(stx_ctx *x, const size_t *length, size_t B, size_t T);


// >>api: state --------------------------------------------------------------------------

/* States and memories of B streams. A segment reads one state and writes one, which
   may be the same. Use separate states for training and evaluation. A new state is
   zero and has no memory. */
typedef struct stx_sru_state {
    stx_sru   *model;
    size_t     B;
    size_t     keep;        /* when written: keep the last n rows of memory, in a buffer
                               that is allocated at once (for evaluation); 0: the rows of
                               the last segment, as in training */
    size_t     window;      /* when read: attention sees the last n times; 0: all. A segment
                               without an input state uses that of its output state */
    stx_rows  *states;      /* c of each layer, (B,O) */
    stx_rows  *memory;      /* inputs of the layers that attend, (B,rows,Ci), of the same
                               times in all layers; rows is stx_rows_most(memory) */
    stx_real  *c;           /* states->all: (layers,B,O) on the device, always float */
} stx_sru_state;

STX_DEF stx_sru_state *stx_sru_state_create(stx_sru *m, size_t B);
STX_DEF void stx_sru_state_free(stx_sru_state *s);

/* Sets the state to zero and empties the memory, of all streams or of one, for example
   because another text begins there. Does nothing after an error. */
STX_DEF void stx_sru_state_reset(stx_sru_state *s);
STX_DEF void stx_sru_state_reset_stream(stx_sru_state *s, size_t b);

/* Copies streams c .. c + n - 1 of from to streams b .. b + n - 1 of to, to regroup
   batches. Both states belong to the same model, and the ranges must not overlap in
   one state. Returns 1, or 0 and an error. */
STX_DEF int stx_sru_state_copy(stx_sru_state *to, size_t b, const stx_sru_state *from, size_t c,
                               size_t n);

/* Saves the state in a checkpoint, as "<prefix>c" and the entries of stx_rows_save,
   and loads it into a state with the same B. prefix has at most 64 bytes. The state
   must not change until stx_writer_finish. Both return 1, or 0 and an error; after a
   failed load, clear the error and reset the state. */
STX_DEF int stx_sru_state_save(stx_writer *w, const stx_sru_state *s, const char *prefix);
STX_DEF int stx_sru_state_load(stx_sru_state *s, const stx_file *f, const char *prefix);

/* Copies c to and from host memory in the shape of PyTorch's RNNs, (layers D, B, H): row
   l D + s is direction s of layer l. The state itself stores (layers, B, D H), which with
   two directions is another order of the same elements. set therefore takes the shape
   (d0,d1,d2) of its argument and refuses any other than (layers D, B, H). It returns 1,
   or 0 and an error with the state unchanged. For elements in the order of the state, use
   stx_put(x, s->c, ..). */
STX_DEF void stx_sru_state_get_nn(const stx_sru_state *s, stx_real *out);
STX_DEF int stx_sru_state_set_nn(stx_sru_state *s, const stx_real *in, size_t d0, size_t d1,
                                 size_t d2);

/* One segment of a text: x (B,T,input) -> h (B,T,O). in is the state to read (NULL:
   zero), out the one to write (NULL to discard it); they may be the same. pad is (B,T)
   or NULL. Gradients do not reach the state. Inside stx_recompute out must be NULL:
   the segment runs twice, and the state must not change in between. */
STX_DEF stx_tensor *stx_sru_segment(stx_sru *m, stx_tensor *x, const stx_ids *pad,
                                    const stx_sru_state *in, stx_sru_state *out);


// >>api: language model -----------------------------------------------------------------

typedef struct stx_sru_lm_desc {
    size_t vocab;           /* required */
    size_t dim;             /* O of the stack; 0: 512 */
    size_t emb;             /* width of the embedding; 0: dim */
    stx_sru_desc sru;       /* the stack; its input, hidden and dropout are set from this desc */
    double dropout;         /* of embedding, stack and last hidden state, in [0,1) */
    double io_dropout;      /* of embedding and last hidden state; 0: dropout, negative: none */
    double emb_dropout;     /* inside the adaptive embedding and softmax, in [0,1) */
    int    tied;            /* 1: the embedding is also the output matrix; requires emb = dim */
    int    adapt_io;        /* 1: adaptive embedding and softmax, which share their
                               tables: sort the vocabulary by falling frequency */
    size_t emb_adaptive;    /* adapt_io: width of cluster 0; 0: dim */
    double divval;          /* adapt_io: cluster i has width floor(emb_adaptive / divval^i); 0: 4 */
    size_t cutoff[STX_MAX_CLUSTERS - 1], cutoffs;   /* adapt_io: ends of the clusters, rising, and
                               the number of them; 0: those of 20000, 40000, 200000 below
                               vocab */
    int    separate_projs;  /* adapt_io: 1: the embedding has separate projections */
    int    forward_columns; /* adapt_io: order of the cluster columns, see stx_adaptive; 0: the
                               original's */
} stx_sru_lm_desc;

typedef struct stx_sru_lm {
    stx_ctx        *ctx;
    stx_sru_lm_desc desc;       /* resolved */
    stx_params     *params;
    stx_sru        *sru;
    stx_words      *words;      /* embedding and output head */
} stx_sru_lm;

/* Creates a model with initialised parameters in x. It is freed with x. Returns NULL
   and sets the context's error if the desc is invalid. */
STX_DEF stx_sru_lm *stx_sru_lm_create(stx_ctx *x, const stx_sru_lm_desc *d);

STX_DEF stx_params *stx_sru_lm_params(stx_sru_lm *m);

/* Number of parameter elements of such a model, shared ones counted once, without
   creating it. Returns 0 if the desc is invalid, SIZE_MAX if the number does not fit. */
STX_DEF size_t stx_sru_lm_count(const stx_sru_lm_desc *d);

/* ids (B,T) -> last hidden state (B,T,dim). in and out are states of m->sru, as in
   stx_sru_segment. */
STX_DEF stx_tensor *stx_sru_lm_forward(stx_sru_lm *m, const stx_ids *ids, const stx_sru_state *in,
                                       stx_sru_state *out);

/* Hidden state (B,T,dim) -> logits (B,T,vocab), differentiable. An error with
   adapt_io, where each cluster has a separate softmax. */
STX_DEF stx_tensor *stx_sru_lm_logits(stx_sru_lm *m, stx_tensor *h);

/* Hidden state (B,T,dim) -> log p (B,T,vocab), with and without adapt_io. Not
   differentiable. */
STX_DEF stx_tensor *stx_sru_lm_log_probs(stx_sru_lm *m, stx_tensor *h);

/* Mean negative log-likelihood of targets (B,T) -> (1), in nats per token. */
STX_DEF stx_tensor *stx_sru_lm_loss(stx_sru_lm *m, const stx_ids *ids, const stx_ids *targets,
                                    const stx_sru_state *in, stx_sru_state *out);

/* The key of stx_step_run: a hash of everything the host decides in a step with these
   tokens and this state (each may be NULL): sizes, addresses, and with adapt_io the
   number of tokens per cluster (see stx_adaptive_key), so set the tokens first. salt
   is hashed too. For a step with several parts or states, pass the key of one as the
   salt of the next. */
STX_DEF uint64_t stx_sru_lm_key(const stx_sru_lm *m, const stx_ids *ids, const stx_ids *targets,
                                const stx_sru_state *s, uint64_t salt);


// >>api: generation ---------------------------------------------------------------------

/* Generates token by token. SRU stores only c; SRU++ also the keys and values of the
   last `window` times. Equal to one segment over the whole text with that window.
   Create a new one or reset it after the parameters change. */
typedef struct stx_sru_gen {
    stx_sru_lm    *model;
    size_t         B, window;
    stx_cache     *cache;           /* keys and values of the layers that attend */
    stx_sru_state *state;           /* c */
} stx_sru_gen;

/* window: how many times attention looks back, at most 2^31. 0 means 1024, not all as
   in stx_sru_io, because the cache is allocated at once. */
STX_DEF stx_sru_gen *stx_sru_gen_create(stx_sru_lm *m, size_t B, size_t window);
STX_DEF void stx_sru_gen_free(stx_sru_gen *g);

/* Sets the state to zero and empties the cache. Does nothing after an error: clear the
   error first, and reset after a feed that failed. */
STX_DEF void stx_sru_gen_reset(stx_sru_gen *g);

/* Feeds n >= 1 tokens per stream, ids (B,n), and returns the logits (B,vocab) of the
   token after the last one, or log p with adapt_io. The result is in host memory, for
   stx_sample, and valid until the next call. Calls stx_begin(x, STX_EVAL), so do not
   call it between a forward and its backward. */
STX_DEF const stx_real *stx_sru_gen_feed(stx_sru_gen *g, const int32_t *ids, size_t n);

/* The model as a table of functions, for programs that accept any family. A state that
   is created with a window also keeps that many rows of memory. For NULL, all fields
   are NULL. */
STX_DEF stx_lm stx_sru_lm_of(stx_sru_lm *m);


// >>api: recurrence ---------------------------------------------------------------------

/* The recurrence as an op. Formulas: stx_sru_args. u and bias are required, the others
   may be NULL. */
typedef struct stx_sru_recurrence_in {
    stx_tensor *u;          /* (B,T,k,O) */
    stx_tensor *xr;         /* (B,T,O), the highway; k = 3 only */
    stx_tensor *v, *bias;   /* (2,O); v NULL: 0 */
    stx_tensor *V;          /* (B,T,2,O), added to v */
    stx_tensor *c0;         /* (B,O) */
    stx_tensor *mask;       /* (B,O): m, a constant */
    const stx_ids *pad;     /* (B,T) */
    size_t directions;      /* D; 0: 1 */
    double alpha;           /* 0: 1 */
    int    tanh;
} stx_sru_recurrence_in;

/* -> h (B,T,O). *last, unless last is NULL, becomes the final states (B,O). */
STX_DEF stx_tensor *stx_sru_recurrence(stx_ctx *x, const stx_sru_recurrence_in *in,
                                       stx_tensor **last);

/* Arguments of the kernels (1709.02755, section 2). For each batch row b and column o = s
   H + unit of direction s, t runs 0 .. T-1 for s = 0 and T-1 .. 0 for s = 1, from c = c0:
       f  = sigmoid(u1 + vf c + bf)
       r  = sigmoid(u2 + vr c + br)
       c' = u0 + (c - u0) f
       xt = alpha xr (k = 3), u3 (k = 4), or 0 (k = 3 and xr NULL)
       h  = xt + (g(c') - xt) m r           g(c) = c, or tanh c
   Where pad is nonzero, c' = c and h = 0. Activations have the context's precision; v,
   bias, states and their gradients are always float. Backward adds to gradients that are
   not NULL, except those marked as written. */
typedef struct stx_sru_args {
    size_t B, T, H, D, k;           /* O = D H; D is 1 or 2 */
    int    tanh;
    stx_real alpha;                 /* used as it is: 0 removes the highway of k = 3 */
    const stx_real *u, *xr;         /* (B,T,k,O); (B,T,O) or NULL */
    const stx_real *v, *bias;       /* (2,O): vf, vr (NULL: 0); bf, br */
    const stx_real *V;              /* (B,T,2,O) or NULL: added to vf, vr at each time */
    const stx_real *c0;             /* (B,O) or NULL: 0 */
    const stx_real *m;              /* (B,O) or NULL: 1. Always float */
    const int32_t  *pad;            /* (B,T) or NULL */
    stx_real *h, *last;             /* (B,T,O); (B,O) or NULL */
    stx_real *c;                    /* (B,tiles,O), saved: the state before each tile of
                                       STX_SRU_TILE steps, in the order of the direction.
                                       Backward recomputes the others. NULL: no backward
                                       follows */
    const stx_real *dh, *dlast;     /* like h and last; NULL: 0 */
    stx_real *du, *dV;              /* like u and V: written. Required (dV if V is given) */
    stx_real *dxr;                  /* like xr: written, or added to with add_xr; or NULL */
    stx_real *dv, *dbias, *dc0;     /* like v, bias, c0; or NULL */
    int add_xr;
    void *work;                     /* stx_sru_work bytes, for this call only */
} stx_sru_args;

enum { STX_SRU_TILE = 32 };

static inline size_t stx_sru_tiles(const stx_sru_args *a) {
    return (a->T + STX_SRU_TILE - 1) / STX_SRU_TILE;
}

/* Size of args.work in bytes, on the CPU and on the GPU. */
STX_DEF size_t stx_sru_work(stx_ctx *x, const stx_sru_args *a, int backward);
#ifdef SEQTX_CUDA
extern size_t stx_sru_work_cuda(stx_ctx *x, const stx_sru_args *a, int backward);
#endif
STX_KERNEL(stx_sru_fwd, (stx_ctx *x, const stx_sru_args *a))
STX_KERNEL(stx_sru_bwd, (stx_ctx *x, const stx_sru_args *a))

/* The definition of both, column by column and step by step, in double. For reading,
   and the reference of the tests. a is in host memory; state holds T + 1 elements. */
STX_DEF void stx_sru_fwd_plain(const stx_sru_args *a, double *state);
STX_DEF void stx_sru_bwd_plain(const stx_sru_args *a, double *state);

#ifdef __cplusplus
}
#endif

/* Stop here if you only want the API. */
#endif /* SEQTX_SRU_H */

#if (defined(SEQTX_IMPLEMENTATION) || defined(SEQTX_SRU_IMPLEMENTATION)) \
    && !defined(SEQTX_SRU_IMPLEMENTATION_DONE)
#define SEQTX_SRU_IMPLEMENTATION_DONE

#define STX_LOOPS
#include "seqtx.h" /* once more, for the inner loops' macros */

#include <stdio.h>
STX_STRICT_ON

// >>recurrence

typedef struct stx__sru_save {
    stx_sru_args a;
    stx_tensor *last;
} stx__sru_save;

static size_t stx__sru_room(stx_ctx *x, const stx_sru_args *a, int backward) {
#ifdef SEQTX_CUDA
    if (stx_ctx_desc(x)->device == STX_CUDA) return stx_sru_work_cuda(x, a, backward);
#endif
    return stx_sru_work(x, a, backward);
}

/* Room for a gradient that the kernel writes: t's own when nothing is in it yet, else
   (or when nobody wants it) some of the step's */
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
    a->dh = stx_grad(x, y, NULL); /* of zeros where only the states after have one */
    a->dlast = s->last ? s->last->grad : NULL;
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

static stx_tensor *stx__sru_bad(stx_ctx *x, const char *what) {
    stx_fail(x, STX_ERR_SHAPE, "stx_sru_recurrence: %s", what);
    return NULL;
}

STX_DEF stx_tensor *stx_sru_recurrence(stx_ctx *x, const stx_sru_recurrence_in *in,
                                       stx_tensor **last) {
    stx_tensor *y[2], *ins[6];
    stx__sru_save *s;
    stx_sru_args *a;
    size_t B, T, O, k, D;
    if (last) *last = NULL;
    if (!stx_ok(x) || !in || !in->u) return NULL;
    if (!in->bias) return stx__sru_bad(x, "no bias: it has to be there");
    if (in->u->ndim != 4)
        return stx__sru_bad(x, "u wants the shape (B,T,k,O): stx_reshape the product");
    B = in->u->dim[0];
    T = in->u->dim[1];
    k = in->u->dim[2];
    O = in->u->dim[3];
    D = in->directions ? in->directions : 1;
    if (k != 3 && k != 4) return stx__sru_bad(x, "u has neither 3 nor 4 planes");
    if (D > 2 || O % D) return stx__sru_bad(x, "1 or 2 directions, which divide O");
    if (in->xr
        && (k == 4 || in->xr->ndim != 3 || in->xr->dim[0] != B || in->xr->dim[1] != T
            || in->xr->dim[2] != O))
        return stx__sru_bad(x, "xr wants the shape (B,T,O), and u 3 planes");
    if ((in->v && in->v->size != 2 * O) || in->bias->size != 2 * O)
        return stx__sru_bad(x, "v and bias want 2 O numbers");
    if (in->V && in->V->size != B * T * 2 * O)
        return stx__sru_bad(x, "V wants the shape (B,T,2,O)");
    if ((in->c0 && in->c0->size != B * O) || (in->mask && in->mask->size != B * O))
        return stx__sru_bad(x, "c0 and mask want B O numbers");
    if (in->pad && (in->pad->B != B || in->pad->T != T))
        return stx__sru_bad(x, "pad wants the shape (B,T)");
    y[0] = stx_new(x, B, T, O, 0);
    s = (stx__sru_save *)stx_step_alloc(x, sizeof *s);
    if (!y[0] || !s) return NULL;
    memset(s, 0, sizeof *s);
    a = &s->a;
    a->B = B;
    a->T = T;
    a->D = D;
    a->H = O / D;
    a->k = k;
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
    a->h = y[0]->data;
    ins[0] = in->u;
    ins[1] = in->xr;
    ins[2] = in->v;
    ins[3] = in->bias;
    ins[4] = in->V;
    ins[5] = in->c0;
    if (last) {
        *last = s->last = y[1] = stx_new_full(x, B, O, 0, 0);
        if (!y[1]) return NULL;
        a->last = y[1]->data;
    }
    if (stx_record_results(x, y, last ? 2 : 1, ins, 6, stx__sru_back_op, s))
        a->c = (stx_real *)stx_step_bytes(x,
                                          stx_bytes_of(B * O, stx_sru_tiles(a), sizeof(stx_real)));
    a->work = stx_step_bytes(x, stx__sru_room(x, a, 0));
    if (!stx_ok(x)) return NULL;
    STX_RUN(x, stx_sru_fwd, (x, a));
    return y[0];
}

// >>recurrence: plain definition

/* One step of column o (unit and direction) of batch row b at time t, from state c:
   the formulas of stx_sru_args. */
typedef struct stx__sru_step {
    double vf, vr, f, r, c, g, x, m;
    int padded;
} stx__sru_step;

static stx__sru_step stx__sru_step_of(const stx_sru_args *a, size_t b, size_t o, size_t t,
                                      double c) {
    const size_t O = a->D * a->H, row = b * a->T + t;
    const stx_real *u = a->u + row * a->k * O + o, *V = a->V ? a->V + row * 2 * O + o : NULL;
    stx__sru_step s;
    memset(&s, 0, sizeof s);
    s.padded = a->pad && a->pad[row];
    s.c = c;
    if (s.padded) return s;
    s.vf = (a->v ? (double)a->v[o] : 0) + (V ? (double)V[0] : 0);
    s.vr = (a->v ? (double)a->v[O + o] : 0) + (V ? (double)V[O] : 0);
    s.f = 1 / (1 + exp(-((double)u[O] + s.vf * c + (double)a->bias[o])));
    s.r = 1 / (1 + exp(-((double)u[2 * O] + s.vr * c + (double)a->bias[O + o])));
    s.c = (double)u[0] + (c - (double)u[0]) * s.f;
    s.g = a->tanh ? tanh(s.c) : s.c;
    s.x = a->k == 4 ? (double)u[3 * O] : a->xr ? (double)a->alpha * (double)a->xr[row * O + o] : 0;
    s.m = a->m ? (double)a->m[b * O + o] : 1;
    return s;
}

/* h, last and the states that are saved. Direction s = 1 (o >= H) walks from the end;
   p counts its steps. */
STX_DEF void stx_sru_fwd_plain(const stx_sru_args *a, double *state) {
    const size_t O = a->D * a->H, T = a->T;
    size_t b, o, p;
    for (b = 0; b < a->B; b++)
        for (o = 0; o < O; o++) {
            state[0] = a->c0 ? (double)a->c0[b * O + o] : 0;
            for (p = 0; p < T; p++) {
                size_t t = o < a->H ? p : T - 1 - p;
                stx__sru_step s = stx__sru_step_of(a, b, o, t, state[p]);
                if (a->c && p % STX_SRU_TILE == 0)
                    a->c[(b * stx_sru_tiles(a) + p / STX_SRU_TILE) * O + o] = (stx_real)state[p];
                if (a->h)
                    a->h[(b * T + t) * O + o] =
                        (stx_real)(s.x + (s.g - s.x) * s.m * s.r); /* padded: 0 */
                state[p + 1] = s.c;
            }
            if (a->last) a->last[b * O + o] = (stx_real)state[T];
        }
}

/* e: the adjoint of the state, walked back; da, dzf, dzr: those of c', and of f and r
   before their sigmoids. Nothing comes of padding. */
STX_DEF void stx_sru_bwd_plain(const stx_sru_args *a, double *state) {
    const size_t O = a->D * a->H, T = a->T;
    size_t o, b, p;
    for (o = 0; o < O; o++) {
        double dvf = 0, dvr = 0, dbf = 0, dbr = 0;
        for (b = 0; b < a->B; b++) {
            double e = a->dlast ? (double)a->dlast[b * O + o] : 0;
            state[0] = a->c0 ? (double)a->c0[b * O + o] : 0;
            for (p = 0; p < T; p++)
                state[p + 1] = stx__sru_step_of(a, b, o, o < a->H ? p : T - 1 - p, state[p]).c;
            for (p = T; p-- > 0;) {
                size_t t = o < a->H ? p : T - 1 - p, row = b * T + t;
                double c = state[p], dh = a->dh ? (double)a->dh[row * O + o] : 0, da = 0, dx = 0,
                       dzf = 0, dzr = 0;
                stx__sru_step s = stx__sru_step_of(a, b, o, t, c);
                stx_real *du = a->du + row * a->k * O + o,
                         *dxr = a->dxr ? a->dxr + row * O + o : NULL;
                if (!s.padded) {
                    dx = dh * (1 - s.m * s.r);
                    dzr = dh * (s.g - s.x) * s.m * s.r * (1 - s.r);
                    da = dh * s.m * s.r * (a->tanh ? 1 - s.g * s.g : 1) + e;
                    dzf = da * (c - (double)a->u[row * a->k * O + o]) * s.f * (1 - s.f);
                    e = da * s.f + dzf * s.vf + dzr * s.vr;
                    dvf += dzf * c;
                    dvr += dzr * c;
                    dbf += dzf;
                    dbr += dzr;
                }
                du[0] = (stx_real)(da * (1 - s.f));
                du[O] = (stx_real)dzf;
                du[2 * O] = (stx_real)dzr;
                if (a->k == 4) du[3 * O] = (stx_real)dx;
                if (dxr) *dxr = (stx_real)((double)a->alpha * dx + (a->add_xr ? (double)*dxr : 0));
                if (a->V) {
                    a->dV[row * 2 * O + o] = (stx_real)(dzf * c);
                    a->dV[row * 2 * O + O + o] = (stx_real)(dzr * c);
                }
            }
            if (a->dc0) a->dc0[b * O + o] += (stx_real)e;
        }
        if (a->dv) {
            a->dv[o] += (stx_real)dvf;
            a->dv[O + o] += (stx_real)dvr;
        }
        if (a->dbias) {
            a->dbias[o] += (stx_real)dbf;
            a->dbias[O + o] += (stx_real)dbr;
        }
    }
}

// >>recurrence: what a unit of work needs

/* Columns are independent of each other and times are not: vectors lie across columns. A
   unit of work is a block of columns of one batch row and direction; it walks over time
   tile by tile. h and states stream through; what a block needs of constants (v, bias,
   mask) and its state stay in the first cache. Index p counts steps in the order of the
   direction; t is the time of step p.

   Nothing but the state before each tile is kept for backward, which makes the states and
   forget gates of a tile again, in the caches, before it walks the tile backwards: a
   fifth less traffic than keeping every c, and (B,T,O) less memory.

   When there are fewer blocks than threads, time is cut as well. Backward is affine in e,
   the adjoint of the state:
       e_{t-1} = J e_t + q,   J = f + vf (c_{t-1} - u0) f (1-f),   q = dh m r g' J + dzr vr
   so chunks of time first find the product of their J and their offset, in parallel;
   the adjoints at the chunks' ends follow by a short walk over the chunks; then all
   chunks run at once. Forward is affine in c only if f does not depend on it: v zero. */

/* Columns of a block: rows of a few KB, so that the streams run through whole pages,
   while its constants and state stay in the first cache and, in backward, its tile of
   states in the second. Fewer when there are too few blocks for the threads. */
enum {
    STX__SRU_FAR = 8 << 20
}; /* bytes of h that are too much for the caches, with all that belongs to them */

enum { STX__SRU_WIDE = 4096 / sizeof(stx_real), STX__SRU_NARROW = 16 };

static int stx__sru_any(const stx_sru_args *a) {
    return a->B && a->H && a->D;
} /* is there a column? */

typedef struct stx__sru_plan {
    size_t O, W, blocks, units, tiles, chunks, each, ldu, scratch, carries;
} stx__sru_plan;

/* each: tiles of a chunk; scratch: numbers that each thread has for itself, carries:
   those of the chunks */
static void stx__sru_plan_of(stx__sru_plan *p, const stx_sru_args *a, size_t threads,
                             int backward) {
    p->O = a->D * a->H;
    p->tiles = stx_sru_tiles(a);
    p->ldu = a->k * p->O;
    for (p->W = STX__SRU_WIDE;; p->W /= 2) {
        p->blocks = (a->H + p->W - 1) / p->W;
        p->units = a->B * a->D * p->blocks;
        if (p->W <= STX__SRU_NARROW || p->units >= threads * (p->W > 128 ? 4 : 1)
            || (p->units >= threads && p->units % threads == 0))
            break;
    }
    p->chunks = 1;
    if (3 * p->units <= threads
        && (backward
            || (!a->v && !a->V))) { /* two passes, the first 0.7 of the second: with two threads
                                                                            hardly a gain */
        p->chunks = STX_MIN(2 * threads / p->units, p->tiles / 2);
        if (!p->chunks) p->chunks = 1;
    }
    p->each = (p->tiles + p->chunks - 1) / p->chunks;
    p->chunks = p->each ? (p->tiles + p->each - 1) / p->each : 1;
    p->scratch = p->W * (backward ? 3 * STX_SRU_TILE + 13 : 3);
    p->carries = p->chunks > 1 ? 2 * a->B * p->chunks * p->O : 0;
}

/* Work: product and offset of each chunk, (B,chunks,2,O); in backward the sums of dv
   and of dbias, (B chunks,2,O) each; scratch. */
STX_DEF size_t stx_sru_work(stx_ctx *x, const stx_sru_args *a, int backward) {
    stx__sru_plan p;
    if (!stx__sru_any(a)) return 0;
    stx__sru_plan_of(&p, a, (size_t)stx_threads(x), backward);
    return (p.carries + (backward ? 4 * a->B * p.chunks * p.O : 0)
            + (size_t)stx_threads(x) * p.scratch)
           * sizeof(stx_real);
}

/* One block of columns: where its numbers stand, constants filled in */
typedef struct stx__sru_block {
    const stx_sru_args *a;
    size_t b, s, o, n, O, ldu;
    int far_;
    ptrdiff_t step; /* 1, or -1 in the second direction */
    const stx_real *vf, *vr, *bf, *br, *m;
    stx_real *c, *none, *ones, *rest; /* (n) each; scratch */
} stx__sru_block;

static void stx__sru_open(stx__sru_block *k, const stx_sru_args *a, const stx__sru_plan *p,
                          stx_real *scratch, size_t unit) {
    size_t j, at;
    k->c = scratch;
    k->none = k->c + p->W;
    k->ones = k->none + p->W;
    k->rest = k->ones + p->W;
    k->a = a;
    k->O = p->O;
    k->ldu = p->ldu;
    k->far_ = a->B * a->T * p->O * sizeof(stx_real) > STX__SRU_FAR;
    k->b = unit / (a->D * p->blocks);
    k->s = unit / p->blocks % a->D;
    at = unit % p->blocks * p->W;
    k->n = STX_MIN(p->W, a->H - at);
    k->o = k->s * a->H + at;
    k->step = k->s ? -1 : 1;
    for (j = 0; j < k->n; j++) {
        k->none[j] = 0;
        k->ones[j] = 1;
    }
    k->vf = a->v ? a->v + k->o : k->none;
    k->vr = a->v ? a->v + p->O + k->o : k->none;
    k->bf = a->bias + k->o;
    k->br = a->bias + p->O + k->o;
    k->m = a->m ? a->m + k->b * p->O + k->o : k->ones;
}

/* of step p, in (B,T) */
static size_t stx__sru_row(const stx__sru_block *k, size_t p) {
    return k->b * k->a->T + (k->s ? k->a->T - 1 - p : p);
}

static int stx__sru_padded(const stx__sru_block *k, size_t p) {
    return k->a->pad && k->a->pad[stx__sru_row(k, p)];
}

/* The end of the run of steps that are not padding, from p on */
static size_t stx__sru_run(const stx__sru_block *k, size_t p, size_t end) {
    while (p < end && !stx__sru_padded(k, p)) p++;
    return p;
}

/* Plane i of u; the highway's input and the distance of its rows */
static const stx_real *stx__sru_u(const stx__sru_block *k, size_t row, size_t i) {
    return k->a->u + row * k->ldu + i * k->O + k->o;
}

static const stx_real *stx__sru_x(const stx__sru_block *k, size_t row, ptrdiff_t *ld) {
    *ld = k->a->k == 4 ? k->step * (ptrdiff_t)k->ldu : k->a->xr ? k->step * (ptrdiff_t)k->O : 0;
    return k->a->k == 4 ? stx__sru_u(k, row, 3) : k->a->xr ? k->a->xr + row * k->O + k->o : k->none;
}

static stx_real stx__sru_alpha(const stx_sru_args *a) {
    return a->k == 4 ? 1 : a->alpha;
}

/* A row is walked in pieces; before each one the same columns of the row that comes
   next are asked for: rows are many pages apart, which is more than the processor's
   own prefetching sees. */
enum { STX__SRU_PIECE = 128 };

#define STX__SRU_AHEAD(row, from, to) stx_prefetch((row) + (from), (to) - (from))

/* What a piece gives is made in the first cache and then put where it belongs. When
   all of it together is more than the caches hold, past them (stream): an ordinary
   store would first read from memory the line that it is about to overwrite. */
#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__)) && !defined(SEQTX_DOUBLE)
static inline void stx__sru_put(stx_real *to, const stx_real *from, size_t n, int stream) {
    size_t j = 0;
    if (stream && (uintptr_t)to % 16 == 0)
        for (; j + 4 <= n; j += 4) _mm_stream_ps(to + j, _mm_loadu_ps(from + j));
    memcpy(to + j, from + j, (n - j) * sizeof *to);
}

static inline void stx__sru_settle(int stream) {
    if (stream) _mm_sfence();
} /* before anybody else reads it */
#else
static inline void stx__sru_put(stx_real *to, const stx_real *from, size_t n, int stream) {
    (void)stream;
    memcpy(to, from, n * sizeof *to);
}

static inline void stx__sru_settle(int stream) {
    (void)stream;
}
#endif

// >>recurrence: forward

#define STX__SRU_R const stx_real *STX_RESTRICT
#define STX__SRU_W stx_real *STX_RESTRICT

/* What the loops over steps read: `steps` steps of n columns, rows ld* apart
   (backward: the first one is the last step, and they are walked towards lower
   addresses). Nothing that the loops write is read through it. gcc makes vectors of
   these loops only if it knows that: what is written are arguments with STX_RESTRICT,
   these fields have it, and so must the pointer to the struct in every function. vf,
   vr have V's rows added if gates. */
typedef struct stx__sru_rows {
    STX__SRU_R u0;
    STX__SRU_R u1;
    STX__SRU_R u2;
    STX__SRU_R xt;
    STX__SRU_R V; /* planes of u, the highway's input, gates' addition */
    ptrdiff_t ldu, ldx, ldv;
    STX__SRU_R vf;
    STX__SRU_R vr;
    STX__SRU_R bf;
    STX__SRU_R br;
    STX__SRU_R m; /* (n): one row for all steps */
    /* backward: dh; states before each step (and after the last) and forget gates,
       rows W apart */
    STX__SRU_R dh;
    STX__SRU_R cs;
    STX__SRU_R fs;
    ptrdiff_t ldh, ldd;    /* rows of h or dh; of dx */
    size_t O, W, steps, n; /* O: from plane to plane */
    stx_real alpha;
    int far_, tanh_, gates;
} stx__sru_rows;

/* Steps p to end - 1 of block k, which stand at `row` and before or behind it */
static void stx__sru_rows_of(stx__sru_rows *r, const stx__sru_block *k, size_t row, size_t steps) {
    const stx_sru_args *a = k->a;
    memset(r, 0, sizeof *r);
    r->u0 = stx__sru_u(k, row, 0);
    r->u1 = stx__sru_u(k, row, 1);
    r->u2 = stx__sru_u(k, row, 2);
    r->ldu = k->step * (ptrdiff_t)k->ldu;
    r->xt = stx__sru_x(k, row, &r->ldx);
    r->V = a->V ? a->V + row * 2 * k->O + k->o : k->none;
    r->ldv = a->V ? 2 * k->step * (ptrdiff_t)k->O : 0;
    r->vf = k->vf;
    r->vr = k->vr;
    r->bf = k->bf;
    r->br = k->br;
    r->m = k->m;
    r->O = k->O;
    r->steps = steps;
    r->n = k->n;
    r->alpha = stx__sru_alpha(a);
    r->far_ = k->far_;
    r->tanh_ = a->tanh;
    r->gates = a->V != NULL;
}

STX_INNER void stx__sru_steps_as(int fma, STX__SRU_W h, STX__SRU_W c,
                                 const stx__sru_rows *STX_RESTRICT k, int tanh_, int gates) {
    const stx_real *u0 = k->u0, *u1 = k->u1, *u2 = k->u2, *xt = k->xt, *V = k->V, *vf = k->vf,
                   *vr = k->vr, *bf = k->bf, *br = k->br, *m = k->m;
    const ptrdiff_t ldh = k->ldh, ldu = k->ldu, ldx = k->ldx, ldv = k->ldv;
    const size_t O = k->O, steps = k->steps, n = k->n;
    const stx_real alpha = k->alpha;
    const int far_ = k->far_;
    size_t p, j, j0, j1;
    stx_real out[STX__SRU_PIECE];
    for (p = 0; p < steps; p++, h += ldh, u0 += ldu, u1 += ldu, u2 += ldu, xt += ldx, V += ldv)
        for (j0 = 0; j0 < n; j0 = j1) {
            j1 = STX_MIN(n, j0 + STX__SRU_PIECE);
            if (far_) {
                STX__SRU_AHEAD(u0 + ldu, j0, j1);
                STX__SRU_AHEAD(u1 + ldu, j0, j1);
                STX__SRU_AHEAD(u2 + ldu, j0, j1);
                STX__SRU_AHEAD(xt + ldx, j0, j1);
            }
            for (j = j0; j < j1; j++) {
                stx_real cp = c[j], f, r, cn, g, xv = alpha * xt[j];
                f = stx_fast_sigmoid(fma,
                                     STX_FMA(fma, gates ? vf[j] + V[j] : vf[j], cp, u1[j] + bf[j]));
                r = stx_fast_sigmoid(fma, STX_FMA(fma, gates ? vr[j] + V[O + j] : vr[j], cp,
                                                  u2[j] + br[j]));
                cn = STX_FMA(fma, cp - u0[j], f, u0[j]);
                g = tanh_ ? stx_fast_tanh(fma, cn) : cn;
                c[j] = cn;
                out[j - j0] = STX_FMA(fma, (g - xv) * m[j], r, xv);
            }
            stx__sru_put(h + j0, out, j1 - j0, far_);
        }
}

STX_INNER void stx__sru_steps(int fma, STX__SRU_W h, STX__SRU_W c,
                              const stx__sru_rows *STX_RESTRICT k) {
    if (k->tanh_ && k->gates)
        stx__sru_steps_as(fma, h, c, k, 1, 1);
    else if (k->tanh_)
        stx__sru_steps_as(fma, h, c, k, 1, 0);
    else if (k->gates)
        stx__sru_steps_as(fma, h, c, k, 0, 1);
    else
        stx__sru_steps_as(fma, h, c, k, 0, 0);
}
STX_EACH_ISA(stx__sru_steps, (STX__SRU_W h, STX__SRU_W c, const stx__sru_rows *STX_RESTRICT k), h,
             c, k)

/* Steps [p0, p1) of a block, whose state before them is k->c */
static void stx__sru_fwd_range(stx_ctx *x, stx__sru_block *k, const stx__sru_plan *plan, size_t p0,
                               size_t p1) {
    const stx_sru_args *a = k->a;
    size_t p = p0, end, row;
    while (p < p1) {
        if (p % STX_SRU_TILE == 0 && a->c)
            memcpy(a->c + (k->b * plan->tiles + p / STX_SRU_TILE) * k->O + k->o, k->c,
                   k->n * sizeof *k->c);
        row = stx__sru_row(k, p);
        end = stx__sru_run(k, p, STX_MIN(p1, (p / STX_SRU_TILE + 1) * STX_SRU_TILE));
        if (end == p) {
            memset(a->h + row * k->O + k->o, 0, k->n * sizeof *a->h);
            p++;
        } else {
            stx__sru_rows r;
            stx__sru_rows_of(&r, k, row, end - p);
            r.ldh = k->step * (ptrdiff_t)k->O;
            STX_CALL(x, stx__sru_steps, (a->h + row * k->O + k->o, k->c, &r));
            p = end;
        }
    }
}

/* v zero: c_end = P c_begin + Q over steps that are not padding */
STX_INNER void stx__sru_scan(int fma, STX__SRU_W P, STX__SRU_W Q, STX__SRU_R u0, STX__SRU_R u1,
                             ptrdiff_t ldu, STX__SRU_R bf, size_t steps, size_t n) {
    size_t p, j;
    for (p = 0; p < steps; p++, u0 += ldu, u1 += ldu)
        for (j = 0; j < n; j++) {
            stx_real f = stx_fast_sigmoid(fma, u1[j] + bf[j]);
            P[j] *= f;
            Q[j] = STX_FMA(fma, Q[j] - u0[j], f, u0[j]);
        }
}
STX_EACH_ISA(stx__sru_scan,
             (STX__SRU_W P, STX__SRU_W Q, STX__SRU_R u0, STX__SRU_R u1, ptrdiff_t ldu,
              STX__SRU_R bf, size_t steps, size_t n),
             P, Q, u0, u1, ldu, bf, steps, n)

static void stx__sru_state_in(stx__sru_block *k) {
    if (k->a->c0)
        memcpy(k->c, k->a->c0 + k->b * k->O + k->o, k->n * sizeof *k->c);
    else
        memcpy(k->c, k->none, k->n * sizeof *k->c);
}

/* Product and offset of chunk q of batch row b stand at work + ((b chunks + q) 2 + 0
   or 1) O */
static stx_real *stx__sru_carry(const stx_sru_args *a, const stx__sru_plan *p, size_t b, size_t q) {
    return (stx_real *)a->work + (b * p->chunks + q) * 2 * p->O;
}

/* The loops over all chunks of all units (blocks of columns), chunks of one unit side
   by side */
typedef struct stx__sru_loop {
    const stx_sru_args *a;
    stx__sru_plan plan;
    stx_real *scratch, *sums_v,
        *sums_b; /* a piece each thread; (B chunks,2,O) twice, in backward */
} stx__sru_loop;

static void stx__sru_run_all(stx_ctx *x, stx_part part, const stx__sru_loop *j) {
    stx_parallel(x, j->plan.units * j->plan.chunks, j->a->B * j->a->T * j->a->D * j->a->H * 16,
                 part, j);
}

static void stx__sru_scan_part(const stx_share *s, const void *job) {
    const stx__sru_loop *w = (const stx__sru_loop *)job;
    const stx__sru_plan *plan = &w->plan;
    size_t i;
    for (i = s->from; i < s->to; i++) {
        stx__sru_block k;
        size_t q = i % plan->chunks, p = q * plan->each * STX_SRU_TILE,
               last = STX_MIN(w->a->T, p + plan->each * STX_SRU_TILE), j;
        stx_real *P, *Q;
        stx__sru_open(&k, w->a, plan, w->scratch + s->thread * plan->scratch, i / plan->chunks);
        P = stx__sru_carry(w->a, plan, k.b, q) + k.o;
        Q = P + k.O;
        for (j = 0; j < k.n; j++) {
            P[j] = 1;
            Q[j] = 0;
        }
        while (p < last) {
            size_t end = stx__sru_run(&k, p, last), row = stx__sru_row(&k, p);
            const stx_real *u0 = stx__sru_u(&k, row, 0), *u1 = stx__sru_u(&k, row, 1);
            if (end > p)
                STX_CALL(s->x, stx__sru_scan,
                         (P, Q, u0, u1, k.step * (ptrdiff_t)k.ldu, k.bf, end - p, k.n));
            p = end + 1;
        }
    }
}

static void stx__sru_fwd_part(const stx_share *s, const void *job) {
    const stx__sru_loop *w = (const stx__sru_loop *)job;
    const stx_sru_args *a = w->a;
    const stx__sru_plan *plan = &w->plan;
    size_t i;
    for (i = s->from; i < s->to; i++) {
        stx__sru_block k;
        size_t q = i % plan->chunks, p0 = q * plan->each * STX_SRU_TILE,
               p1 = STX_MIN(a->T, p0 + plan->each * STX_SRU_TILE), e, j;
        stx__sru_open(&k, a, plan, w->scratch + s->thread * plan->scratch, i / plan->chunks);
        stx__sru_state_in(&k);
        for (e = 0; e < q; e++) { /* the chunks before, short: nobody waits for another one */
            const stx_real *P = stx__sru_carry(a, plan, k.b, e) + k.o, *Q = P + k.O;
            for (j = 0; j < k.n; j++) k.c[j] = P[j] * k.c[j] + Q[j];
        }
        stx__sru_fwd_range(s->x, &k, plan, p0, p1);
        stx__sru_settle(k.far_);
        if (a->last && q + 1 == plan->chunks)
            memcpy(a->last + k.b * k.O + k.o, k.c, k.n * sizeof *k.c);
    }
}

STX_DEF void stx_sru_fwd(stx_ctx *x, const stx_sru_args *a) {
    stx__sru_loop j;
    if (!stx__sru_any(a)) return;
    j.a = a;
    stx__sru_plan_of(&j.plan, a, (size_t)stx_threads(x), 0);
    j.scratch = (stx_real *)a->work + j.plan.carries;
    j.sums_v = j.sums_b = NULL;
    if (j.plan.chunks > 1) stx__sru_run_all(x, stx__sru_scan_part, &j);
    stx__sru_run_all(x, stx__sru_fwd_part, &j);
}

// >>recurrence: backward

/* Backward. The states of a tile again: cs (steps+1,n), whose first row is there, and fs
   (steps,n), rows W apart:
       f = sigmoid(u1 + vf c + bf) ; c' = u0 + (c - u0) f */
STX_INNER void stx__sru_again_as(int fma, STX__SRU_W cs, STX__SRU_W fs,
                                 const stx__sru_rows *STX_RESTRICT k, int gates) {
    const stx_real *u0 = k->u0, *u1 = k->u1, *V = k->V, *vf = k->vf, *bf = k->bf;
    const ptrdiff_t ldu = k->ldu, ldv = k->ldv;
    const size_t W = k->W, steps = k->steps, n = k->n;
    const int far_ = k->far_;
    size_t p, j, j0, j1;
    for (p = 0; p < steps; p++, cs += W, fs += W, u0 += ldu, u1 += ldu, V += ldv)
        for (j0 = 0; j0 < n; j0 = j1) {
            j1 = STX_MIN(n, j0 + STX__SRU_PIECE);
            if (far_) {
                STX__SRU_AHEAD(u0 + ldu, j0, j1);
                STX__SRU_AHEAD(u1 + ldu, j0, j1);
            }
            for (j = j0; j < j1; j++) {
                stx_real f = stx_fast_sigmoid(fma, STX_FMA(fma, gates ? vf[j] + V[j] : vf[j], cs[j],
                                                           u1[j] + bf[j]));
                fs[j] = f;
                cs[W + j] = STX_FMA(fma, cs[j] - u0[j], f, u0[j]);
            }
        }
}

STX_INNER void stx__sru_again(int fma, STX__SRU_W cs, STX__SRU_W fs,
                              const stx__sru_rows *STX_RESTRICT k) {
    if (k->gates)
        stx__sru_again_as(fma, cs, fs, k, 1);
    else
        stx__sru_again_as(fma, cs, fs, k, 0);
}
STX_EACH_ISA(stx__sru_again, (STX__SRU_W cs, STX__SRU_W fs, const stx__sru_rows *STX_RESTRICT k),
             cs, fs, k)

/* One step back, for one column:
       h  = xt + (g(c') - xt) m r        dzr = dh (g - xt) m r (1-r) ;  a = dh m r g' + e ;  dxt = dh (1 - m r)
       c' = u0 + (c - u0) f              dzf = a (c - u0) f (1-f) ;  du0 = a (1-f)
       e  <- a f + dzf vf + dzr vr */
typedef struct stx__sru_slopes {
    stx_real r, dzr, in, df;
} stx__sru_slopes; /* a = in + e, dzf = a df */

STX_INNER stx__sru_slopes stx__sru_slopes_of(int fma, int tanh_, stx_real cp, stx_real f,
                                             stx_real c, stx_real u0, stx_real zr, stx_real xv,
                                             stx_real wr, stx_real gm) {
    stx__sru_slopes s;
    stx_real g = tanh_ ? stx_fast_tanh(fma, c) : c, slope = tanh_ ? 1 - g * g : 1;
    s.r = stx_fast_sigmoid(fma, STX_FMA(fma, wr, cp, zr));
    s.dzr = gm * (g - xv) * (s.r - s.r * s.r);
    s.in = gm * s.r * slope;
    s.df = (cp - u0) * (f - f * f);
    return s;
}

/* Where the gradients go: du, its planes O apart, and dx with rows ldd apart; dV as V;
   gvf, gvr, gbf, gbr (n): sums over the steps of dvf and so on. All pointers at the
   last step; rows before it by ld*. */
STX_INNER void stx__sru_back_as(int fma, STX__SRU_W du, STX__SRU_W dx, STX__SRU_W dV, STX__SRU_W e,
                                STX__SRU_W gvf, STX__SRU_W gvr, STX__SRU_W gbf, STX__SRU_W gbr,
                                const stx__sru_rows *STX_RESTRICT k, int tanh_, int gates) {
    const stx_real *u0 = k->u0, *u2 = k->u2, *xt = k->xt, *V = k->V, *vf = k->vf, *vr = k->vr,
                   *br = k->br, *m = k->m;
    const stx_real *dh = k->dh, *cs = k->cs, *fs = k->fs;
    const ptrdiff_t ldh = k->ldh, ldu = k->ldu, ldx = k->ldx, ldv = k->ldv, ldd = k->ldd;
    const size_t O = k->O, W = k->W, steps = k->steps, n = k->n;
    const stx_real alpha = k->alpha;
    const int far_ = k->far_;
    size_t p, j, j0, j1;
    stx_real out[6][STX__SRU_PIECE];
    for (p = 0; p < steps; p++, u0 -= ldu, u2 -= ldu, du -= ldu, xt -= ldx, dx -= ldd, V -= ldv,
        dV -= ldv, dh -= ldh, cs -= W, fs -= W)
        for (j0 = 0; j0 < n; j0 = j1) {
            j1 = STX_MIN(n, j0 + STX__SRU_PIECE);
            if (far_) {
                STX__SRU_AHEAD(u2 - ldu, j0, j1);
                STX__SRU_AHEAD(xt - ldx, j0, j1);
                STX__SRU_AHEAD(dh - ldh, j0, j1);
            }
            for (j = j0; j < j1; j++) {
                stx_real cp = cs[j], f = fs[j], gm = dh[j] * m[j],
                         wf = gates ? vf[j] + V[j] : vf[j], wr = gates ? vr[j] + V[O + j] : vr[j];
                stx__sru_slopes s = stx__sru_slopes_of(fma, tanh_, cp, f, cs[W + j], u0[j],
                                                       u2[j] + br[j], alpha * xt[j], wr, gm);
                stx_real a = s.in + e[j], dzf = a * s.df, dzr = s.dzr;
                out[0][j - j0] = a - a * f;
                out[1][j - j0] = dzf;
                out[2][j - j0] = dzr;
                out[3][j - j0] = alpha * STX_FMA(fma, -gm, s.r, dh[j]);
                if (gates) {
                    out[4][j - j0] = dzf * cp;
                    out[5][j - j0] = dzr * cp;
                }
                gvf[j] = STX_FMA(fma, dzf, cp, gvf[j]);
                gvr[j] = STX_FMA(fma, dzr, cp, gvr[j]);
                gbf[j] += dzf;
                gbr[j] += dzr;
                e[j] = STX_FMA(fma, dzr, wr, STX_FMA(fma, dzf, wf, a * f));
            }
            for (j = 0; j < 3; j++) stx__sru_put(du + j * O + j0, out[j], j1 - j0, far_);
            stx__sru_put(dx + j0, out[3], j1 - j0, far_);
            if (gates)
                for (j = 0; j < 2; j++) stx__sru_put(dV + j * O + j0, out[4 + j], j1 - j0, far_);
        }
}

STX_INNER void stx__sru_back(int fma, STX__SRU_W du, STX__SRU_W dx, STX__SRU_W dV, STX__SRU_W e,
                             STX__SRU_W gvf, STX__SRU_W gvr, STX__SRU_W gbf, STX__SRU_W gbr,
                             const stx__sru_rows *STX_RESTRICT k) {
    if (k->tanh_ && k->gates)
        stx__sru_back_as(fma, du, dx, dV, e, gvf, gvr, gbf, gbr, k, 1, 1);
    else if (k->tanh_)
        stx__sru_back_as(fma, du, dx, dV, e, gvf, gvr, gbf, gbr, k, 1, 0);
    else if (k->gates)
        stx__sru_back_as(fma, du, dx, dV, e, gvf, gvr, gbf, gbr, k, 0, 1);
    else
        stx__sru_back_as(fma, du, dx, dV, e, gvf, gvr, gbf, gbr, k, 0, 0);
}
STX_EACH_ISA(stx__sru_back,
             (STX__SRU_W du, STX__SRU_W dx, STX__SRU_W dV, STX__SRU_W e, STX__SRU_W gvf,
              STX__SRU_W gvr, STX__SRU_W gbf, STX__SRU_W gbr, const stx__sru_rows *STX_RESTRICT k),
             du, dx, dV, e, gvf, gvr, gbf, gbr, k)

/* The affine map of these steps for e, after those of the steps behind them: Q <- J Q
   + q, P <- J P */
STX_INNER void stx__sru_affine_as(int fma, STX__SRU_W P, STX__SRU_W Q,
                                  const stx__sru_rows *STX_RESTRICT k, int tanh_, int gates) {
    const stx_real *u0 = k->u0, *u2 = k->u2, *xt = k->xt, *V = k->V, *vf = k->vf, *vr = k->vr,
                   *br = k->br, *m = k->m;
    const stx_real *dh = k->dh, *cs = k->cs, *fs = k->fs;
    const ptrdiff_t ldh = k->ldh, ldu = k->ldu, ldx = k->ldx, ldv = k->ldv;
    const size_t O = k->O, W = k->W, steps = k->steps, n = k->n;
    const stx_real alpha = k->alpha;
    size_t p, j;
    for (p = 0; p < steps;
         p++, u0 -= ldu, u2 -= ldu, xt -= ldx, V -= ldv, dh -= ldh, cs -= W, fs -= W)
        for (j = 0; j < n; j++) {
            stx_real cp = cs[j], f = fs[j], gm = dh[j] * m[j], wf = gates ? vf[j] + V[j] : vf[j],
                     wr = gates ? vr[j] + V[O + j] : vr[j];
            stx__sru_slopes s = stx__sru_slopes_of(fma, tanh_, cp, f, cs[W + j], u0[j],
                                                   u2[j] + br[j], alpha * xt[j], wr, gm);
            stx_real J = STX_FMA(fma, wf, s.df, f);
            Q[j] = STX_FMA(fma, Q[j] + s.in, J, s.dzr * wr);
            P[j] *= J;
        }
}

STX_INNER void stx__sru_affine(int fma, STX__SRU_W P, STX__SRU_W Q,
                               const stx__sru_rows *STX_RESTRICT k) {
    stx__sru_affine_as(fma, P, Q, k, k->tanh_, k->gates);
}
STX_EACH_ISA(stx__sru_affine, (STX__SRU_W P, STX__SRU_W Q, const stx__sru_rows *STX_RESTRICT k), P,
             Q, k)

/* A tile on the way back: states and gates again, then its steps, last first. With P:
   only the map of e into P and Q. */
typedef struct stx__sru_tile {
    stx_real *cs, *fs, *dx, *sums, *total, *e;
} stx__sru_tile;

static void stx__sru_tile_in(stx__sru_tile *w, const stx__sru_block *k, size_t W) {
    w->cs = k->rest; /* (33,W): the states before the tile's first step and after each */
    w->fs = w->cs + (STX_SRU_TILE + 1) * W; /* (32,W): forget gates */
    w->dx = w->fs + STX_SRU_TILE * W; /* (32,W): where dx and dV go when their place is not free */
    w->sums = w->dx + STX_SRU_TILE * W; /* (4,W): of a tile */
    w->total =
        w->sums
        + 4 * W; /* (4,W): of all: sums of tiles, then their sum, so that fewer digits are lost */
    w->e = w->total + 4 * W; /* (W) */
}

static void stx__sru_bwd_tile(stx_ctx *x, stx__sru_block *k, const stx__sru_plan *plan,
                              stx__sru_tile *w, size_t tile, stx_real *P, stx_real *Q) {
    const stx_sru_args *a = k->a;
    size_t first = tile * STX_SRU_TILE, last = STX_MIN(a->T, first + STX_SRU_TILE), p, end, row, j;
    stx__sru_rows r;
    const size_t W = plan->W;
    memcpy(w->cs, a->c + (k->b * plan->tiles + tile) * k->O + k->o, k->n * sizeof *w->cs);
    for (p = first; p < last; p = end) {
        stx_real *at = w->cs + (p - first) * W;
        end = stx__sru_run(k, p, last);
        row = stx__sru_row(k, p);
        if (end == p) {
            memcpy(at + W, at, k->n * sizeof *at);
            end++;
        } /* padding: the state passes by */
        else {
            stx__sru_rows_of(&r, k, row, end - p);
            r.W = W;
            STX_CALL(x, stx__sru_again, (at, w->fs + (p - first) * W, &r));
        }
    }
    for (end = last; end > first; end = p) {
        for (p = end; p > first && !stx__sru_padded(k, p - 1); p--) {
        }
        row = stx__sru_row(k, end - 1);
        if (p == end) {
            p--;
            if (P) continue;
            for (j = 0; j < a->k; j++)
                memset(a->du + row * k->ldu + j * k->O + k->o, 0, k->n * sizeof *a->du);
            if (a->dxr && !a->add_xr) memset(a->dxr + row * k->O + k->o, 0, k->n * sizeof *a->dxr);
            if (a->dV)
                for (j = 0; j < 2; j++)
                    memset(a->dV + (row * 2 + j) * k->O + k->o, 0, k->n * sizeof *a->dV);
            continue;
        }
        stx__sru_rows_of(&r, k, row, end - p);
        r.W = W;
        r.dh = a->dh ? a->dh + row * k->O + k->o : k->none;
        r.ldh = a->dh ? k->step * (ptrdiff_t)k->O : 0;
        r.cs = w->cs + (end - 1 - first) * W;
        r.fs = w->fs + (end - 1 - first) * W;
        if (P)
            STX_CALL(x, stx__sru_affine, (P, Q, &r));
        else {
            stx_real *du = a->du + row * k->ldu + k->o, *dx = w->dx + (end - 1 - first) * W,
                     *dV = w->dx;
            int direct = 1;
            r.ldd = (ptrdiff_t)W;
            if (a->k == 4) {
                dx = du + 3 * k->O;
                r.ldd = r.ldu;
            } else if (a->dxr && !a->add_xr) {
                dx = a->dxr + row * k->O + k->o;
                r.ldd = k->step * (ptrdiff_t)k->O;
            } else
                direct = !a->dxr;
            if (a->dV) dV = a->dV + row * 2 * k->O + k->o;
            STX_CALL(x, stx__sru_back,
                     (du, dx, dV, w->e, w->sums, w->sums + W, w->sums + 2 * W, w->sums + 3 * W,
                      &r));
            for (; !direct && end > p; end--) {
                stx_real *to = a->dxr + stx__sru_row(k, end - 1) * k->O + k->o;
                for (j = 0; j < k->n; j++) to[j] += w->dx[(end - 1 - first) * W + j];
            }
        }
    }
}

static void stx__sru_affine_part(const stx_share *s, const void *job) {
    const stx__sru_loop *w = (const stx__sru_loop *)job;
    const stx__sru_plan *plan = &w->plan;
    size_t i;
    for (i = s->from; i < s->to; i++) {
        stx__sru_block k;
        stx__sru_tile t;
        size_t q = i % plan->chunks, tile, j;
        stx_real *P, *Q;
        if (!q) continue; /* nobody asks for the map of the first one */
        stx__sru_open(&k, w->a, plan, w->scratch + s->thread * plan->scratch, i / plan->chunks);
        stx__sru_tile_in(&t, &k, plan->W);
        P = stx__sru_carry(w->a, plan, k.b, q) + k.o;
        Q = P + k.O;
        for (j = 0; j < k.n; j++) {
            P[j] = 1;
            Q[j] = 0;
        }
        for (tile = STX_MIN(plan->tiles, (q + 1) * plan->each); tile-- > q * plan->each;)
            stx__sru_bwd_tile(s->x, &k, plan, &t, tile, P, Q);
    }
}

static void stx__sru_bwd_part(const stx_share *s, const void *job) {
    const stx__sru_loop *w = (const stx__sru_loop *)job;
    const stx_sru_args *a = w->a;
    const stx__sru_plan *plan = &w->plan;
    size_t i;
    for (i = s->from; i < s->to; i++) {
        stx__sru_block k;
        stx__sru_tile t;
        size_t q = i % plan->chunks, tile, behind, j, g;
        stx__sru_open(&k, a, plan, w->scratch + s->thread * plan->scratch, i / plan->chunks);
        stx__sru_tile_in(&t, &k, plan->W);
        for (j = 0; j < k.n; j++) t.e[j] = a->dlast ? a->dlast[k.b * k.O + k.o + j] : 0;
        for (behind = plan->chunks; --behind > q;) {
            const stx_real *P = stx__sru_carry(a, plan, k.b, behind) + k.o, *Q = P + k.O;
            for (j = 0; j < k.n; j++) t.e[j] = P[j] * t.e[j] + Q[j];
        }
        for (j = 0; j < 4 * plan->W; j++) t.total[j] = 0;
        for (tile = STX_MIN(plan->tiles, (q + 1) * plan->each); tile-- > q * plan->each;) {
            for (j = 0; j < 4 * plan->W; j++) t.sums[j] = 0;
            stx__sru_bwd_tile(s->x, &k, plan, &t, tile, NULL, NULL);
            for (j = 0; j < 4 * plan->W; j++) t.total[j] += t.sums[j];
        }
        stx__sru_settle(k.far_);
        for (g = 0; g < 4; g++) {
            stx_real *sums = g < 2 ? w->sums_v : w->sums_b;
            memcpy(sums + ((k.b * plan->chunks + q) * 2 + g % 2) * k.O + k.o, t.total + g * plan->W,
                   k.n * sizeof *sums);
        }
        if (a->dc0 && !q)
            for (j = 0; j < k.n; j++) a->dc0[k.b * k.O + k.o + j] += t.e[j];
    }
}

STX_DEF void stx_sru_bwd(stx_ctx *x, const stx_sru_args *a) {
    stx__sru_loop j;
    size_t rows;
    if (!stx__sru_any(a)) return;
    j.a = a;
    stx__sru_plan_of(&j.plan, a, (size_t)stx_threads(x), 1);
    rows = a->B * j.plan.chunks;
    j.sums_v = (stx_real *)a->work + j.plan.carries; /* (B chunks, 2, O) twice */
    j.sums_b = j.sums_v + 2 * rows * j.plan.O;
    j.scratch = j.sums_b + 2 * rows * j.plan.O;
    if (j.plan.chunks > 1) stx__sru_run_all(x, stx__sru_affine_part, &j);
    stx__sru_run_all(x, stx__sru_bwd_part, &j);
    if (a->dv) stx_sum_rows(x, a->dv, j.sums_v, rows, 2 * j.plan.O);
    if (a->dbias) stx_sum_rows(x, a->dbias, j.sums_b, rows, 2 * j.plan.O);
}

// >>stack: creation

static int stx__sru_wrong(stx_ctx *x, const char *field, double got, const char *expected) {
    return stx_bad_value(x, "stx_sru_create", field, got, expected);
}

static size_t stx__sru_proj(const stx_sru_desc *d, size_t l) {
    return d->projs ? d->projs[l] : d->proj;
}

static size_t stx__sru_input(const stx_sru_desc *d, size_t l) { /* Ci of layer l */
    size_t O = d->hidden * (d->bidirectional ? 2 : 1);
    return l || (d->input_first && d->input != O) ? O : d->input;
}

/* Does layer l (from 0) attend? The reference counts layers from 1: with
   attention_every = 5 layers 5, 10, .. do. */
static int stx__sru_attends(const stx_sru_desc *d, size_t l) {
    if (d->transform != STX_SRU_ATTENTION || d->custom || d->no_attention) return 0;
    return d->attention_last ? d->layers - l <= d->attention_last
                             : (l + 1) % d->attention_every == 0;
}

/* Replaces STX_SRU_LITERAL by the flag that the model can have. 0 and an error for a
   flag that it cannot have. */
static int stx__sru_check_literal(stx_ctx *x, stx_sru_desc *d) {
    const int attends = d->transform == STX_SRU_ATTENTION && !d->custom && !d->no_attention;
    unsigned can = 0;

    if (attends && d->norm == STX_SRU_NORM_BEFORE) can = STX_SRU_LITERAL_NORM;
    if (d->literal & STX_SRU_LITERAL_NORM & ~can) {
        stx_fail(x, STX_ERR_ARG,
                 "stx_sru_create: literal has STX_SRU_LITERAL_NORM, which needs "
                 "STX_SRU_ATTENTION with STX_SRU_NORM_BEFORE; STX_SRU_LITERAL takes the forms that "
                 "the model can have");
        return 0;
    }
    if (d->literal & ~(unsigned)(STX_SRU_LITERAL | STX_SRU_LITERAL_NORM))
        return stx__sru_wrong(x, "literal", (double)d->literal,
                              "STX_SRU_LITERAL or STX_SRU_LITERAL_NORM");
    if (d->literal & STX_SRU_LITERAL) d->literal = can;
    return 1;
}

/* Fills in the defaults and checks; 0 and an error (if x) when the desc makes no
   sense. */
static int stx__sru_resolve(stx_ctx *x, const stx_sru_desc *from, stx_sru_desc *d) {
    const size_t most = (size_t)1 << 28;
    size_t l, P;
    int plus;
    *d = *from;
    plus = d->transform == STX_SRU_ATTENTION && !d->custom;
    if (d->transform != STX_SRU_LINEAR && d->transform != STX_SRU_ATTENTION)
        return stx__sru_wrong(x, "transform", d->transform, "STX_SRU_LINEAR or STX_SRU_ATTENTION");
    if (!d->hidden) d->hidden = d->bidirectional ? d->input / 2 : d->input;
    if (!d->layers) d->layers = 2;
    if (!d->heads) d->heads = 1;
    if (!d->input || d->input > most)
        return stx__sru_wrong(x, "input", (double)d->input, "1 to 2^28");
    if (!d->hidden || d->hidden > most)
        return stx__sru_wrong(x, "hidden", (double)d->hidden, "1 to 2^28");
    if (d->layers > 4096) return stx__sru_wrong(x, "layers", (double)d->layers, "1 to 4096");
    if (plus && !d->proj && !d->projs)
        d->proj = d->hidden * (d->bidirectional ? 2 : 1) / 4
                  + (d->hidden * (d->bidirectional ? 2 : 1) < 4);
    if (plus) d->init_xavier = 1;
    if (d->v_init == 0) d->v_init = d->init_xavier ? 1 : sqrt(1.5);
    if (d->norm < STX_SRU_NORM_NONE || d->norm > STX_SRU_NORM_AFTER)
        return stx__sru_wrong(x, "norm", d->norm, "STX_SRU_NORM_NONE, _BEFORE or _AFTER");
    if (!stx__sru_check_literal(x, d)) return 0;
    if (!(d->dropout >= 0 && d->dropout < 1))
        return stx__sru_wrong(x, "dropout", d->dropout, "0 <= p < 1");
    if (!(d->rnn_dropout >= 0 && d->rnn_dropout < 1))
        return stx__sru_wrong(x, "rnn_dropout", d->rnn_dropout, "0 <= p < 1");
    if (!(d->attn_dropout >= 0 && d->attn_dropout < 1))
        return stx__sru_wrong(x, "attn_dropout", d->attn_dropout, "0 <= p < 1");
    if (!(fabs(d->highway_bias) <= 80))
        return stx__sru_wrong(x, "highway_bias", d->highway_bias, "between -80 and 80");
    if (!(d->v_init > 0 && d->v_init < 1e6) && d->v_init != -1)
        return stx__sru_wrong(x, "v_init", d->v_init, "more than 0; or -1, for zeros");
    if (!(fabs(d->alpha_init) < 1e6))
        return stx__sru_wrong(x, "alpha_init", d->alpha_init, "a small number");
    if (plus && d->attention_every && d->attention_last) {
        stx_fail(x, STX_ERR_ARG,
                 "stx_sru_create: attention_every %zu and attention_last %zu: give one of them",
                 d->attention_every, d->attention_last);
        return 0;
    }
    if (!d->attention_every && !d->attention_last)
        d->attention_every = 1; /* resolving twice changes nothing */
    if (plus && d->attention_every > d->layers)
        return stx__sru_wrong(x, "attention_every", (double)d->attention_every,
                              "at most the number of layers; no_attention for none");
    if (d->attention_last > d->layers)
        return stx__sru_wrong(x, "attention_last", (double)d->attention_last,
                              "at most the number of layers");
    for (l = 0; l < d->layers; l++) {
        P = stx__sru_proj(d, l);
        if (P > most) return stx__sru_wrong(x, "proj", (double)P, "at most 2^28");
        if (plus && !P)
            return stx__sru_wrong(x, "proj of a layer of SRU++", (double)P, "1 or more");
        if (stx__sru_attends(d, l) && (P % d->heads || d->heads > 256)) {
            stx_fail(
                x, STX_ERR_ARG,
                "stx_sru_create: %zu heads do not divide the projection %zu of layer %zu: choose heads (at most "
                "256) that do",
                d->heads, P, l);
            return 0;
        }
    }
    d->recompute_layers = d->recompute ? d->layers : STX_MIN(d->recompute_layers, d->layers);
    return 1;
}

static size_t stx__sru_planes(const stx_sru_desc *d, size_t l) {
    return !d->no_skip && stx__sru_input(d, l) != d->hidden * (d->bidirectional ? 2 : 1) ? 4 : 3;
}

STX_DEF size_t stx_sru_count(const stx_sru_desc *desc) {
    stx_sru_desc d;
    size_t l, n = 0, O;
    if (!desc || !stx__sru_resolve(NULL, desc, &d)) return 0;
    O = d.hidden * (d.bidirectional ? 2 : 1);
    if (d.input_first && d.input != O) n = stx_size_add(n, d.input, O);
    for (l = 0; l < d.layers; l++) {
        size_t Ci = stx__sru_input(&d, l), P = d.custom ? 0 : stx__sru_proj(&d, l);
        n = stx_size_add(n, d.v1 ? 2 : 4, O);
        if (d.norm != STX_SRU_NORM_NONE)
            n = stx_size_add(n, 2, d.norm == STX_SRU_NORM_BEFORE ? Ci : O);
        if (d.custom) continue;
        n = stx_size_add(n, P, Ci);
        n = stx_size_add(n, stx__sru_planes(&d, l) * O, P ? P : Ci);
        if (d.transform == STX_SRU_ATTENTION && !d.no_attn_norm) n = stx_size_add(n, 2, P);
        if (stx__sru_attends(&d, l)) n = stx_size_add(stx_size_add(n, 2 * P, P), 1, 1);
    }
    return n;
}

static stx_tensor *stx__sru_param(stx_params *p, const char *prefix, size_t l, const char *name,
                                  int init, double a, size_t d0, size_t d1) {
    char full[160];
    snprintf(full, sizeof full, "%slayers.%zu.%s", prefix, l, name);
    return stx_param(p, init, a, full, d0, d1, 0, 0);
}

/* Initialisers: W1 and W3 as in 1709.02755, section 3.2 (variance 1 / fan in), with the reference's factors for dropout, norm and gates;
   those of SRU++ are Xavier's (Glorot and Bengio, 2010), alpha 0 as in ReZero (2003.04887) */
STX_DEF stx_sru *stx_sru_create(stx_params *p, const char *prefix, const stx_sru_desc *desc) {
    stx_ctx *x = p ? p->ctx : NULL;
    stx_sru *m;
    stx_sru_desc *d;
    size_t l, O, *projs = NULL;
    char full[160];
    if (!stx_ok(x)) return NULL;
    if (!desc) {
        stx_fail(x, STX_ERR_ARG, "stx_sru_create: no desc; at least input is needed");
        return NULL;
    }
    if (!prefix) prefix = "";
    if (strlen(prefix) > 96) {
        stx_fail(x, STX_ERR_ARG, "stx_sru_create: a prefix of %zu letters, want at most 96",
                 strlen(prefix));
        return NULL;
    }
    m = (stx_sru *)stx_persist(x, sizeof *m);
    if (!m || !stx__sru_resolve(x, desc, &m->desc)) return NULL;
    d = &m->desc;
    m->ctx = x;
    m->O = O = d->hidden * (d->bidirectional ? 2 : 1);
    m->layer = (stx_sru_layer *)stx_persist(x, d->layers * sizeof *m->layer);
    if (d->projs) {
        projs = (size_t *)stx_persist(x, d->layers * sizeof *projs);
        if (projs) memcpy(projs, d->projs, d->layers * sizeof *projs);
        d->projs = projs;
    }
    if (!stx_ok(x)) return NULL;
    if (d->input_first && d->input != O) {
        snprintf(full, sizeof full, "%sinput.weight", prefix);
        m->w_input = stx_param(p, STX_UNIFORM,
                               d->transform == STX_SRU_ATTENTION
                                   ? sqrt(6.0 / (double)(d->input + O))
                                   : 1 / sqrt((double)d->input),
                               full, O, d->input, 0, 0);
    }
    for (l = 0; l < d->layers && stx_ok(x); l++) {
        stx_sru_layer *y = &m->layer[l];
        size_t Ci, P, fan, i;
        double drop = l + 1 < d->layers ? d->dropout : 0,
               highway = sqrt(1 + 2 * exp(d->highway_bias));
        y->Ci = Ci = stx__sru_input(d, l);
        y->P = P = d->custom ? 0 : stx__sru_proj(d, l);
        y->k = stx__sru_planes(d, l);
        y->attends = stx__sru_attends(d, l);
        y->highway = !d->no_skip && y->k == 3;
        y->alpha = (stx_real)(d->rescale && y->highway ? highway : 1);
        fan = P ? P : Ci;
        if (P)
            y->w1 = stx__sru_param(p, prefix, l, "w1", STX_UNIFORM,
                                   d->init_xavier ? sqrt(6.0 / (double)(Ci + P))
                                                  : sqrt(3.0 / (double)Ci),
                                   P, Ci);
        if (y->attends) {
            y->w2 = stx__sru_param(p, prefix, l, "w2", STX_UNIFORM, sqrt(2.0 / (double)P), 2 * P,
                                   P);
            y->alpha_attn = stx__sru_param(p, prefix, l, "alpha", STX_CONSTANT, d->alpha_init, 1,
                                           0);
        }
        if (P && d->transform == STX_SRU_ATTENTION && !d->no_attn_norm) {
            y->attn_gain = stx__sru_param(p, prefix, l, "attn_norm.weight", STX_CONSTANT, 1, P, 0);
            y->attn_shift = stx__sru_param(p, prefix, l, "attn_norm.bias", STX_ZEROS, 0, P, 0);
        }
        if (!d->custom) {
            y->w3 = stx__sru_param(p, prefix, l, "w3", STX_UNIFORM,
                                   d->init_xavier ? sqrt(6.0 / (double)(fan + y->k * O))
                                                  : sqrt(3.0 / (double)fan),
                                   y->k * O, fan);
            if (d->transform == STX_SRU_ATTENTION)
                stx_param_scale(x, y->w3, 0, y->k * O, sqrt(1 - d->dropout));
            else if (!d->init_xavier) {
                double all = sqrt(1 - d->rnn_dropout) * (d->norm ? 0.1 : 1);
                for (i = 0; i < y->k; i++) {
                    double s = i == 0   ? sqrt(1 - drop)
                               : i == 3 ? (d->rescale ? highway : 1)
                               : d->v1  ? 1
                                        : sqrt(0.5);
                    stx_param_scale(x, y->w3, i * O, (i + 1) * O, all * s);
                }
            }
        }
        if (!d->v1)
            y->v = stx__sru_param(p, prefix, l, "v", d->v_init > 0 ? STX_UNIFORM : STX_ZEROS,
                                  d->v_init, 2, O);
        y->bias = stx__sru_param(p, prefix, l, "bias", STX_ZEROS, 0, 2, O);
        if (d->highway_bias != 0) stx_param_fill(x, y->bias, 1, 2, d->highway_bias);
        if (d->norm) {
            y->gain = stx__sru_param(p, prefix, l, "norm.weight", STX_CONSTANT, 1,
                                     d->norm == STX_SRU_NORM_BEFORE ? Ci : O, 0);
            y->shift = stx__sru_param(p, prefix, l, "norm.bias", STX_ZEROS, 0,
                                      d->norm == STX_SRU_NORM_BEFORE ? Ci : O, 0);
        }
    }
    return stx_ok(x) ? m : NULL;
}

// >>stack: forward

STX_DEF stx_ids *stx_sru_lengths(stx_ctx *x, const size_t *length, size_t B, size_t T) {
    stx_ids *pad;
    int32_t *v;
    size_t b, t;
    if (!stx_ok(x)) return NULL;
    if (!length || !B || !T || T > SIZE_MAX / sizeof *v / B) {
        stx_fail(x, STX_ERR_ARG, "stx_sru_lengths: no lengths, or %zu x %zu times", B, T);
        return NULL;
    }
    for (b = 0; b < B; b++)
        if (length[b] > T) {
            stx_fail(x, STX_ERR_ARG,
                     "stx_sru_lengths: sequence %zu has %zu times, more than the %zu there are", b,
                     length[b], T);
            return NULL;
        }
    v = (int32_t *)stx_step_alloc(x, B * T * sizeof *v);
    if (!v) return NULL;
    for (b = 0; b < B; b++)
        for (t = 0; t < T; t++) v[b * T + t] = t >= length[b];
    pad = stx_tokens(x, v, B, T);
    return pad;
}

/* Rows of y (B,T,C) where drop (B,T, host) is not 0 become 0: for what is rare, by a
   product with a mask */
static stx_tensor *stx__sru_zero(stx_ctx *x, stx_tensor *y, const unsigned char *drop) {
    size_t rows = y ? y->dim[0] * y->dim[1] : 0, C = y ? y->dim[2] : 0, i, j;
    stx_real *v;
    if (!y) return NULL;
    v = (stx_real *)stx_step_alloc(x, stx_bytes_of(rows, C, sizeof *v));
    if (!v) return NULL;
    for (i = 0; i < rows; i++)
        for (j = 0; j < C; j++) v[i * C + j] = (stx_real)(drop[i] == 0);
    return stx_mul(x, y, stx_input(x, v, y->dim[0], y->dim[1], C, 0));
}

/* q (B,T,P), kv (B,M+T,2P) -> o (B,T,P), with the masks of io. A query all of whose
   keys are padding has o = 0. It is padding itself, since every query sees its own
   time, and the recurrence does not look at U there: what it attends to reaches
   nothing. */
static stx_tensor *stx__sru_attend(stx_sru *m, stx_tensor *q, stx_tensor *kv, const stx_ids *pad,
                                   size_t window) {
    stx_ctx *x = m->ctx;
    stx_attention_in a;
    stx_attention_desc d;
    if (!q || !kv) return NULL;
    memset(&a, 0, sizeof a);
    memset(&d, 0, sizeof d);
    a.q = q;
    a.kv = kv;
    a.pad = pad;
    d.heads = m->desc.heads;
    d.span = window;
    d.not_causal = m->desc.not_causal;
    d.dropout = m->desc.attn_dropout;
    return stx_attention(x, &a, &d);
}

/* What follows the attention's o: y = LN(z + alpha o), dropout, U = W3 y */
static stx_tensor *stx__sru_after(stx_sru *m, const stx_sru_layer *p, stx_tensor *z,
                                  stx_tensor *o) {
    stx_ctx *x = m->ctx;
    stx_tensor *y = p->attends ? stx_rezero(x, z, o, p->alpha_attn) : z;
    if (p->attn_gain && (!p->attends || !m->desc.attn_norm_first))
        y = stx_layernorm(x, y, p->attn_gain, p->attn_shift, 1e-5);
    if (m->desc.transform == STX_SRU_ATTENTION) y = stx_dropout(x, y, m->desc.dropout);
    return stx_linear(x, y, p->w3, NULL, STX_ACT_NONE);
}

/* U (B,T,k O) of layer l, from its input h, normalised and dropped, and memory M,
   normalised (B,M,Ci) or NULL (2102.12459, section 3) */
static stx_tensor *stx__sru_transform(stx_sru *m, size_t l, stx_tensor *h, stx_tensor *M,
                                      const stx_ids *pad, size_t window) {
    stx_ctx *x = m->ctx;
    const stx_sru_layer *p = &m->layer[l];
    stx_tensor *z, *zn, *q;
    size_t S, T;
    if (!h) return NULL;
    if (!p->w1) return stx_linear(x, h, p->w3, NULL, STX_ACT_NONE);
    z = stx_linear(x, h, p->w1, NULL, STX_ACT_NONE);
    if (!p->attends) return stx__sru_after(m, p, z, NULL);
    zn = M ? stx_concat(x, stx_linear(x, M, p->w1, NULL, STX_ACT_NONE), z) : z;
    if (p->attn_gain && m->desc.attn_norm_first)
        zn = stx_layernorm(x, zn, p->attn_gain, p->attn_shift, 1e-5);
    if (!zn) return NULL;
    S = zn->dim[1];
    T = h->dim[1];
    q = S > T ? (p->attn_gain && m->desc.attn_norm_first ? stx_slice(x, zn, S - T, S) : z) : zn;
    return stx__sru_after(m, p, z,
                          stx__sru_attend(m, q, stx_linear(x, zn, p->w2, NULL, STX_ACT_NONE), pad,
                                          window));
}

/* The padding of all keys, memory's first */
static const stx_ids *stx__sru_pads(stx_ctx *x, const stx_ids *before, const stx_ids *pad, size_t B,
                                    size_t M, size_t T) {
    int32_t *v;
    size_t b;
    if (!before && !pad) return NULL;
    if (!M) return pad;
    v = (int32_t *)stx_step_alloc(x, B * (M + T) * sizeof *v);
    if (!v) return NULL;
    for (b = 0; b < B; b++) {
        if (before)
            memcpy(v + b * (M + T), before->data + b * M, M * sizeof *v);
        else
            memset(v + b * (M + T), 0, M * sizeof *v);
        if (pad)
            memcpy(v + b * (M + T) + M, pad->data + b * T, T * sizeof *v);
        else
            memset(v + b * (M + T) + M, 0, T * sizeof *v);
    }
    return stx_tokens(x, v, B, M + T);
}

static stx_tensor *stx__sru_no(stx_ctx *x, const char *what) {
    stx_fail(x, STX_ERR_SHAPE, "stx_sru_forward: %s", what);
    return NULL;
}

/* One layer: given[0] = h (B,T,Ci), then its memory and its state before, where they
   are there. out[0] gets the states after, if wanted */
typedef struct stx__sru_job {
    stx_sru *m;
    const stx_ids *pad, *pads; /* pads: of the memory and x */
    const unsigned char *padded;
    size_t l, window;
    int memory, c0, last;
} stx__sru_job;

static stx_tensor *stx__sru_layer(stx_ctx *x, void *user, stx_tensor **given, stx_tensor **out) {
    stx__sru_job *job = (stx__sru_job *)user;
    stx_sru *m = job->m;
    const stx_sru_desc *d = &m->desc;
    const size_t l = job->l;
    stx_sru_layer *p = &m->layer[l];
    stx_sru_recurrence_in cell;
    stx_tensor *h = given[0], *in = h, *mem = job->memory ? given[1] : NULL, *U, *V = NULL;
    size_t B = h->dim[0], T = h->dim[1];
    memset(&cell, 0, sizeof cell);
    if (d->norm == STX_SRU_NORM_BEFORE) {
        in = stx_layernorm(x, in, p->gain, p->shift, 1e-5);
        if (mem && !(d->literal & STX_SRU_LITERAL_NORM))
            mem = stx_layernorm(x, mem, p->gain, p->shift, 1e-5);
    }
    in = stx_dropout_time(x, in, d->rnn_dropout);
    if (d->dropout > 0 && l + 1 < d->layers && stx_training(x)) {
        stx_tensor *ones = stx_new_full(x, B, m->O, 0, 0);
        if (!ones) return NULL;
        STX_RUN(x, stx_fill, (x, ones->data, ones->size, 1));
        cell.mask = stx_dropout(x, ones, d->dropout);
    }
    if (d->custom) {
        U = NULL;
        if (in && !d->custom(x, d->user, l, in, &U, &V)) {
            stx_fail(x, STX_ERR_ARG, "stx_sru_forward: the transform of layer %zu failed", l);
            return NULL;
        }
        if (!U || U->size != B * T * p->k * m->O) {
            stx_fail(x, STX_ERR_SHAPE,
                     "stx_sru_forward: the transform of layer %zu gave %zu numbers, want B T %zu O",
                     l, U ? U->size : 0, p->k);
            return NULL;
        }
    } else
        U = stx__sru_transform(m, l, in, mem, job->pads, job->window);
    if (!U) return NULL;
    cell.u = stx_reshape(x, U, B, T, p->k, m->O);
    cell.xr = p->highway ? h : NULL;
    cell.v = p->v;
    cell.bias = p->bias;
    cell.V = V;
    cell.c0 = job->c0 ? given[1 + job->memory] : NULL;
    cell.pad = job->pad;
    cell.directions = d->bidirectional ? 2 : 1;
    cell.alpha = (double)p->alpha;
    cell.tanh = d->tanh;
    h = stx_sru_recurrence(x, &cell, job->last ? out : NULL);
    if (d->norm == STX_SRU_NORM_AFTER) h = stx_layernorm(x, h, p->gain, p->shift, 1e-5);
    return job->padded ? stx__sru_zero(x, h, job->padded) : h;
}

STX_DEF stx_tensor *stx_sru_forward(stx_sru *m, stx_tensor *h, stx_sru_io *io) {
    stx_sru_io none;
    stx_ctx *x = m ? m->ctx : NULL;
    const stx_sru_desc *d;
    const stx_ids *pads = NULL;
    unsigned char *padded = NULL;
    size_t l, B, T, M = 0, i;
    int seen = 0;
    if (!stx_ok(x) || !h) return NULL;
    memset(&none, 0, sizeof none);
    if (!io) io = &none;
    d = &m->desc;
    if (h->ndim != 3 || h->dim[2] != d->input) {
        stx_fail(x, STX_ERR_SHAPE, "stx_sru_forward: x wants the shape (B,T,%zu), the desc's input",
                 d->input);
        return NULL;
    }
    B = h->dim[0];
    T = h->dim[1];
    if (io->pad && (io->pad->B != B || io->pad->T != T))
        return stx__sru_no(x, "pad wants the shape (B,T) of x");
    if (io->window && d->not_causal)
        return stx__sru_no(x, "a window needs causal attention: set window to 0");
    for (l = 0; l < d->layers; l++) {
        const stx_tensor *M_l = io->memory ? io->memory[l] : NULL, *c = io->c0 ? io->c0[l] : NULL;
        if (c && c->size != B * m->O) return stx__sru_no(x, "states want B O numbers a layer");
        if (!m->layer[l].attends) continue;
        if (M_l && (M_l->ndim != 3 || M_l->dim[0] != B || M_l->dim[2] != m->layer[l].Ci))
            return stx__sru_no(x, "memory wants the shape (B,M,Ci) of its layer's input");
        if (seen && M != (M_l ? M_l->dim[1] : 0))
            return stx__sru_no(x, "all memories want the same number of rows, for one mask is for "
                                  "all");
        M = M_l ? M_l->dim[1] : 0;
        seen = 1;
    }
    if (io->memory_pad && (io->memory_pad->B != B || io->memory_pad->T != M))
        return stx__sru_no(x, "memory_pad wants the shape (B,M) of "
                              "the memories");
    if (seen) pads = stx__sru_pads(x, M ? io->memory_pad : NULL, io->pad, B, M, T);
    if (d->zero_pads && io->pad && d->norm == STX_SRU_NORM_AFTER) {
        padded = (unsigned char *)stx_step_alloc(x, B * T);
        for (i = 0; padded && i < B * T; i++) padded[i] = io->pad->data[i] != 0;
    }
    if (m->w_input) h = stx_linear(x, h, m->w_input, NULL, STX_ACT_NONE);
    for (l = 0; l < d->layers && h; l++) {
        stx__sru_job *job = (stx__sru_job *)stx_step_alloc(x, sizeof *job);
        stx_tensor *in[3], **last;
        int n = 0;
        if (!job) return NULL;
        if (io->inputs) io->inputs[l] = h;
        memset(job, 0, sizeof *job);
        job->m = m;
        job->l = l;
        job->pad = io->pad;
        job->pads = pads;
        job->padded = padded;
        job->window = io->window;
        in[n++] = h;
        if (m->layer[l].attends && io->memory && io->memory[l]) {
            in[n++] = io->memory[l];
            job->memory = 1;
        }
        if (io->c0 && io->c0[l]) {
            in[n++] = io->c0[l];
            job->c0 = 1;
        }
        job->last = io->last != NULL;
        last = io->last ? &io->last[l] : NULL;
        h = d->layers - l <= d->recompute_layers
                ? stx_recompute(x, stx__sru_layer, job, in, n, last, job->last)
                : stx__sru_layer(x, job, in, last);
    }
    return h;
}

// >>stack: state

STX_DEF stx_sru_state *stx_sru_state_create(stx_sru *m, size_t B) {
    stx_ctx *x = m ? m->ctx : NULL;
    stx_sru_state *s;
    stx_rows_desc d;
    size_t *widths, l;
    if (!stx_ok(x)) return NULL;
    if (!B) {
        stx_fail(x, STX_ERR_ARG, "stx_sru_state_create: no streams, want B >= 1");
        return NULL;
    }
    s = (stx_sru_state *)stx_block(x, sizeof *s);
    widths = (size_t *)stx_block(x, m->desc.layers * sizeof *widths);
    if (!s || !widths) return NULL;
    s->model = m;
    s->B = B;
    memset(&d, 0, sizeof d);
    d.layers = m->desc.layers;
    d.B = B;
    d.width = m->O;
    d.fixed = 1;
    s->states = stx_rows_create(x, &d);
    for (l = 0; l < d.layers; l++) widths[l] = m->layer[l].attends ? m->layer[l].Ci : 0;
    d.widths = widths;
    d.fixed = 0;
    d.as_one = 1;
    s->memory = stx_rows_create(x, &d);
    stx_block_free(x, widths);
    if (!s->memory) return NULL;
    s->c = s->states->all;
    return s;
}

STX_DEF void stx_sru_state_free(stx_sru_state *s) {
    if (!s) return;
    stx_rows_free(s->memory);
    stx_rows_free(s->states);
    stx_block_free(s->model->ctx, s);
}

STX_DEF void stx_sru_state_reset(stx_sru_state *s) {
    if (!s) return;
    stx_rows_reset(s->states);
    stx_rows_reset(s->memory);
}

STX_DEF void stx_sru_state_reset_stream(stx_sru_state *s, size_t b) {
    if (!s) return;
    stx_rows_reset_stream(s->states, b);
    stx_rows_reset_stream(s->memory, b);
}

STX_DEF stx_tensor *stx_sru_segment(stx_sru *m, stx_tensor *h, const stx_ids *pad,
                                    const stx_sru_state *in, stx_sru_state *out) {
    stx_ctx *x = m ? m->ctx : NULL;
    stx_sru_io io;
    stx_tensor **c0, **memory, **last, **inputs;
    size_t l, n, T, M, keep;
    if (!stx_ok(x) || !h) return NULL;
    for (l = 0; l < 2; l++) {
        const stx_sru_state *s = l ? out : in;
        if (s && s->model != m) {
            stx_fail(x, STX_ERR_ARG, "stx_sru_segment: the state %s is of another model",
                     l ? "out" : "in");
            return NULL;
        }
        if (s && s->B != h->dim[0]) {
            stx_fail(
                x, STX_ERR_SHAPE,
                "stx_sru_segment: %zu streams with a state %s of %zu: make the state with B = %zu",
                h->dim[0], l ? "out" : "in", s->B, h->dim[0]);
            return NULL;
        }
    }
    if (h->ndim != 3) return stx__sru_no(x, "x wants the shape (B,T,Ci)");
    n = m->desc.layers;
    T = h->dim[1];
    M = in ? stx_rows_most(in->memory) : 0;
    memset(&io, 0, sizeof io);
    c0 = (stx_tensor **)stx_step_alloc(x, 4 * n * sizeof *c0);
    if (!c0) return NULL;
    memset(c0, 0, 4 * n * sizeof *c0);
    memory = c0 + n;
    last = memory + n;
    inputs = last + n;
    for (l = 0; in && l < n;
         l++) { /* copies: backward needs them when the state holds something else */
        c0[l] = stx_rows_read(in->states, l, 1);
        memory[l] = stx_rows_read(in->memory, l, M);
        if (m->layer[l].attends && !io.memory_pad)
            io.memory_pad = stx_rows_mask(in->memory, l, M, NULL, 0);
    }
    io.c0 = c0;
    io.memory = memory;
    io.last = last;
    io.inputs = inputs;
    io.pad = pad;
    io.window = in ? in->window : out ? out->window : 0;
    h = stx_sru_forward(m, h, &io);
    if (!h || !out) return h;
    keep = out->keep ? out->keep : T;
    if (out->keep && !stx_rows_reserve(out->memory, keep)) return NULL;
    for (l = 0; l < n; l++) {
        if (!stx_rows_push(out->states, NULL, l, 1, last[l], NULL)) return NULL;
        if (m->layer[l].attends
            && !stx_rows_push(out->memory, in ? in->memory : NULL, l, keep, inputs[l], pad))
            return NULL;
    }
    return h;
}

static const char *stx__sru_entry(char *name, size_t room, const char *prefix) {
    snprintf(name, room, "%.80sc", prefix);
    return name;
}

STX_DEF int stx_sru_state_copy(stx_sru_state *to, size_t b, const stx_sru_state *from, size_t c,
                               size_t n) {
    if (!to || !stx_ok(to->model->ctx)) return 0;
    if (!from || from->model != to->model) {
        stx_fail(to->model->ctx, STX_ERR_ARG,
                 "stx_sru_state_copy: from is NULL or of another model");
        return 0;
    }
    return stx_rows_copy(to->states, b, from->states, c, n)
           && (!to->memory || stx_rows_copy(to->memory, b, from->memory, c, n));
}

STX_DEF int stx_sru_state_save(stx_writer *w, const stx_sru_state *s, const char *prefix) {
    char name[96];
    return s && stx_rows_save(w, s->states, stx__sru_entry(name, sizeof name, prefix))
           && stx_rows_save(w, s->memory, prefix);
}

STX_DEF int stx_sru_state_load(stx_sru_state *s, const stx_file *f, const char *prefix) {
    char name[96];
    if (!s || !stx_ok(s->model->ctx) || !f) return 0;
    stx_sru_state_reset(s);
    return stx_rows_load(s->states, f, stx__sru_entry(name, sizeof name, prefix))
           && (!s->keep || stx_rows_reserve(s->memory, s->keep))
           && stx_rows_load(s->memory, f, prefix);
}

/* (layers,B,D,H) here, (layers D,B,H) there */
static void stx__sru_nn(const stx_sru *m, size_t B, stx_real *nn, stx_real *own, int out) {
    size_t D = m->desc.bidirectional ? 2 : 1, H = m->desc.hidden, l, b, s;
    for (l = 0; l < m->desc.layers; l++)
        for (b = 0; b < B; b++)
            for (s = 0; s < D; s++) {
                stx_real *p = nn + ((l * D + s) * B + b) * H, *q = own + ((l * B + b) * D + s) * H;
                memcpy(out ? p : q, out ? q : p, H * sizeof *p);
            }
}

STX_DEF void stx_sru_state_get_nn(const stx_sru_state *s, stx_real *out) {
    stx_ctx *x = s ? s->model->ctx : NULL;
    stx_real *own;
    size_t n;
    if (!stx_ok(x) || !out) return;
    n = s->model->desc.layers * s->B * s->model->O;
    own = (stx_real *)stx_block(x, n * sizeof *own);
    if (!own) return;
    stx_fetch(x, own, s->c, n);
    stx__sru_nn(s->model, s->B, out, own, 1);
    stx_block_free(x, own);
}

STX_DEF int stx_sru_state_set_nn(stx_sru_state *s, const stx_real *in, size_t d0, size_t d1,
                                 size_t d2) {
    stx_ctx *x = s ? s->model->ctx : NULL;
    stx_real *own, *copy;
    size_t n, rows;
    if (!stx_ok(x) || !in) return 0;
    rows = s->model->desc.layers * (s->model->desc.bidirectional ? 2 : 1);
    if (d0 != rows || d1 != s->B || d2 != s->model->desc.hidden) {
        stx_fail(
            x, STX_ERR_SHAPE,
            "stx_sru_state_set_nn: states of shape (%zu,%zu,%zu), want (%zu,%zu,%zu): layers times directions, "
            "B, H; another shape would be another order of the numbers",
            d0, d1, d2, rows, s->B, s->model->desc.hidden);
        return 0;
    }
    n = s->model->desc.layers * s->B * s->model->O;
    own = (stx_real *)stx_block(x, 2 * n * sizeof *own);
    if (!own) return 0;
    copy = own + n;
    memcpy(copy, in, n * sizeof *copy);
    stx__sru_nn(s->model, s->B, copy, own, 0);
    stx_put(x, s->c, own, n);
    stx_block_free(x, own);
    return stx_ok(x);
}

// >>language model

static int stx__sru_lm_wrong(stx_ctx *x, const char *field, double got, const char *expected) {
    return stx_bad_value(x, "stx_sru_lm_create", field, got, expected);
}

/* Initialisers of embedding and output, as in the reference's trainers: tables in
   U(-sqrt(3/d), sqrt(3/d)), projections Xavier's, biases 0 */
static void stx__sru_lm_words(const stx_sru_lm_desc *d, stx_words_desc *w) {
    memset(w, 0, sizeof *w);
    w->vocab = d->vocab;
    w->dim = d->dim;
    w->emb = d->emb;
    w->in = d->adapt_io ? STX_WORDS_ADAPTIVE : STX_WORDS_PLAIN;
    w->out = d->adapt_io ? STX_WORDS_ADAPTIVE : d->tied ? STX_WORDS_TIED : STX_WORDS_PLAIN;
    w->scale = 1;
    w->dropout = d->emb_dropout;
    w->width[0] = d->emb_adaptive;
    w->share_tables = d->adapt_io;
    w->share_projs = d->adapt_io && !d->separate_projs;
    w->divval = d->divval;
    w->cutoffs = d->adapt_io ? d->cutoffs : 0;
    w->forward_columns = d->forward_columns;
    memcpy(w->cutoff, d->cutoff, sizeof w->cutoff);
    w->by_cluster = 1;
    w->table.kind = w->out_table.kind = w->cluster.kind = w->proj.kind = STX_UNIFORM;
    w->table.a = sqrt(3 / (double)d->emb);
    w->out_table.a = w->cluster.a = sqrt(3 / (double)d->dim);
    w->proj.a = 1;
    w->proj.rule = STX_INIT_XAVIER;
}

static int stx__sru_lm_resolve(stx_ctx *x, const stx_sru_lm_desc *from, stx_sru_lm_desc *d,
                               stx_words_desc *words) {
    const size_t most = (size_t)1 << 28;
    stx_sru_desc s;
    *d = *from;
    if (!d->dim) d->dim = 512;
    if (!d->emb) d->emb = d->dim;
    if (!d->emb_adaptive) d->emb_adaptive = d->dim;
    if (d->dim > most || d->emb > most || d->emb_adaptive > most)
        return stx__sru_lm_wrong(x, "dim, emb or emb_adaptive", (double)d->dim, "at most 2^28");
    if (d->sru.bidirectional || d->sru.not_causal) {
        stx_fail(
            x, STX_ERR_ARG,
            "stx_sru_lm_create: a language model must not see what it predicts: bidirectional and not_causal stay 0");
        return 0;
    }
    if (!(d->dropout >= 0 && d->dropout < 1))
        return stx__sru_lm_wrong(x, "dropout", d->dropout, "0 <= p < 1");
    if (!(d->io_dropout < 1)) return stx__sru_lm_wrong(x, "io_dropout", d->io_dropout, "p < 1");
    if (d->io_dropout == 0) d->io_dropout = d->dropout > 0 ? d->dropout : -1;
    if (!(d->emb_dropout >= 0 && d->emb_dropout < 1))
        return stx__sru_lm_wrong(x, "emb_dropout", d->emb_dropout, "0 <= p < 1");
    if (d->tied && (d->emb != d->dim || d->adapt_io)) {
        stx_fail(
            x, STX_ERR_ARG,
            "stx_sru_lm_create: tied with %s: want emb equal to dim %zu, and adapt_io 0 (its tables are always "
            "shared)",
            d->adapt_io ? "adapt_io" : "another emb", d->dim);
        return 0;
    }
    if (d->adapt_io && d->emb != d->dim)
        return stx__sru_lm_wrong(x, "emb with adapt_io", (double)d->emb,
                                 "dim: the embedding's projections lead there");
    d->sru.input = d->emb;
    d->sru.hidden = d->dim;
    d->sru.dropout = d->dropout;
    stx__sru_lm_words(d, words);
    if (!stx_words_resolve(x, "stx_sru_lm_create", words, words)) return 0;
    d->divval = words->divval;
    d->cutoffs = words->cutoffs;
    memcpy(d->cutoff, words->cutoff, sizeof d->cutoff);
    if (!stx__sru_resolve(x, &d->sru, &s)) return 0;
    d->sru = s;
    return 1;
}

STX_DEF size_t stx_sru_lm_count(const stx_sru_lm_desc *desc) {
    stx_sru_lm_desc d;
    stx_words_desc words;
    if (!desc || !stx__sru_lm_resolve(NULL, desc, &d, &words)) return 0;
    return stx_size_add(stx_sru_count(&d.sru), stx_words_count(&words), 1);
}

STX_DEF stx_sru_lm *stx_sru_lm_create(stx_ctx *x, const stx_sru_lm_desc *desc) {
    stx_words_desc words;
    stx_sru_lm *m;
    if (!stx_ok(x)) return NULL;
    if (!desc) {
        stx_fail(x, STX_ERR_ARG, "stx_sru_lm_create: no desc; at least vocab is needed");
        return NULL;
    }
    m = (stx_sru_lm *)stx_persist(x, sizeof *m);
    if (!m || !stx__sru_lm_resolve(x, desc, &m->desc, &words)) return NULL;
    m->ctx = x;
    m->params = stx_params_create(x);
    m->words = stx_words_create(m->params, &words);
    m->sru = m->words ? stx_sru_create(m->params, "", &m->desc.sru) : NULL;
    if (!m->sru) return NULL;
    m->desc.sru = m->sru->desc;
    return stx_ok(x) ? m : NULL;
}

STX_DEF stx_params *stx_sru_lm_params(stx_sru_lm *m) {
    return m ? m->params : NULL;
}

static stx_tensor *stx__sru_lm_embed(stx_sru_lm *m, const stx_ids *ids) {
    return stx_dropout(m->ctx, stx_words_embed(m->words, ids), STX_MAX(m->desc.io_dropout, 0));
}

STX_DEF stx_tensor *stx_sru_lm_forward(stx_sru_lm *m, const stx_ids *ids, const stx_sru_state *in,
                                       stx_sru_state *out) {
    if (!m || !ids) return NULL;
    return stx_dropout(m->ctx, stx_sru_segment(m->sru, stx__sru_lm_embed(m, ids), NULL, in, out),
                       STX_MAX(m->desc.io_dropout, 0));
}

STX_DEF stx_tensor *stx_sru_lm_logits(stx_sru_lm *m, stx_tensor *h) {
    return m ? stx_words_logits(m->words, h) : NULL;
}

STX_DEF stx_tensor *stx_sru_lm_log_probs(stx_sru_lm *m, stx_tensor *h) {
    return m ? stx_words_log_probs(m->words, h) : NULL;
}

STX_DEF stx_tensor *stx_sru_lm_loss(stx_sru_lm *m, const stx_ids *ids, const stx_ids *targets,
                                    const stx_sru_state *in, stx_sru_state *out) {
    return m ? stx_words_loss(m->words, stx_sru_lm_forward(m, ids, in, out), targets, NULL) : NULL;
}

STX_DEF uint64_t stx_sru_lm_key(const stx_sru_lm *m, const stx_ids *ids, const stx_ids *targets,
                                const stx_sru_state *s, uint64_t salt) {
    uint64_t h = stx_step_key(m, ids, targets, salt);
    if (m)
        h = stx_words_key(m->words, stx_key_add(h, m->sru->desc.recompute_layers), ids, targets,
                          NULL);
    return m && s ? stx_rows_key(s->memory,
                                 stx_rows_key(s->states,
                                              stx_key_add(stx_key_add(h, s->keep), s->window)))
                  : h;
}

// >>generation

STX_DEF stx_sru_gen *stx_sru_gen_create(stx_sru_lm *m, size_t B, size_t window) {
    stx_ctx *x = m ? m->ctx : NULL;
    stx_sru_gen *g;
    size_t n, l;
    if (!stx_ok(x)) return NULL;
    if (!B) {
        stx_fail(x, STX_ERR_ARG, "stx_sru_gen_create: no streams, want B >= 1");
        return NULL;
    }
    if (window > (size_t)1 << 31) {
        stx_fail(x, STX_ERR_ARG,
                 "stx_sru_gen_create: a window of %zu, want at most 2^31: its rows are reserved",
                 window);
        return NULL;
    }
    n = m->sru->desc.layers;
    if (m->sru->desc.literal & STX_SRU_LITERAL_NORM) {
        stx_fail(x, STX_ERR_ARG,
                 "stx_sru_gen_create: with STX_SRU_LITERAL_NORM a key depends on "
                 "where its segment began; use stx_sru_segment, or a model without it");
        return NULL;
    }
    g = (stx_sru_gen *)stx_block(x, sizeof *g);
    if (!g) return NULL;
    g->model = m;
    g->B = B;
    g->window = window ? window : 1024;
    g->state = stx_sru_state_create(m->sru, B);
    g->cache = stx_cache_create(x, n, B, m->desc.vocab);
    for (l = 0; l < n && stx_ok(x); l++)
        if (m->sru->layer[l].attends)
            stx_cache_window(g->cache, l, g->window, m->sru->layer[l].P, 1);
    return stx_ok(x) ? g : NULL;
}

STX_DEF void stx_sru_gen_free(stx_sru_gen *g) {
    if (!g) return;
    stx_cache_free(g->cache);
    stx_sru_state_free(g->state);
    stx_block_free(g->model->ctx, g);
}

STX_DEF void stx_sru_gen_reset(stx_sru_gen *g) {
    if (!g || !stx_ok(g->model->ctx)) return;
    stx_sru_state_reset(g->state);
    stx_cache_reset(g->cache);
}

/* Attention of new times over the window, whose keys and values are kept (2102.12459,
   section 3) */
static stx_tensor *stx__sru_gen_transform(stx_sru_gen *g, size_t l, stx_tensor *h) {
    stx_sru *m = g->model->sru;
    stx_ctx *x = m->ctx;
    const stx_sru_layer *p = &m->layer[l];
    stx_attention_in a;
    stx_attention_desc d;
    stx_tensor *z;
    if (!p->attends) return stx__sru_transform(m, l, h, NULL, NULL, 0);
    memset(&a, 0, sizeof a);
    memset(&d, 0, sizeof d);
    z = a.q = stx_linear(x, h, p->w1, NULL, STX_ACT_NONE);
    if (p->attn_gain && m->desc.attn_norm_first)
        a.q = stx_layernorm(x, z, p->attn_gain, p->attn_shift, 1e-5);
    a.kv = stx_linear(x, a.q, p->w2, NULL, STX_ACT_NONE);
    d.heads = m->desc.heads;
    return stx__sru_after(m, p, z, stx_cache_attention(g->cache, l, &a, &d));
}

static stx_tensor *stx__sru_gen_step(void *user, const stx_ids *ids) {
    stx_sru_gen *g = (stx_sru_gen *)user;
    stx_sru *m = g->model->sru;
    stx_ctx *x = m->ctx;
    stx_tensor *h = stx__sru_lm_embed(g->model, ids);
    size_t l;
    if (m->w_input) h = stx_linear(x, h, m->w_input, NULL, STX_ACT_NONE);
    for (l = 0; l < m->desc.layers && h; l++) {
        const stx_sru_layer *p = &m->layer[l];
        stx_tensor *in = h, *last;
        stx_sru_recurrence_in cell;
        memset(&cell, 0, sizeof cell);
        if (m->desc.norm == STX_SRU_NORM_BEFORE) in = stx_layernorm(x, in, p->gain, p->shift, 1e-5);
        in = stx__sru_gen_transform(g, l, in);
        cell.u = stx_reshape(x, in, ids->B, ids->T, p->k, m->O);
        cell.xr = p->highway ? h : NULL;
        cell.v = p->v;
        cell.bias = p->bias;
        cell.c0 = stx_rows_read(g->state->states, l, 1);
        cell.alpha = (double)p->alpha;
        cell.tanh = m->desc.tanh;
        h = stx_sru_recurrence(x, &cell, &last);
        if (!h || !stx_rows_push(g->state->states, NULL, l, 1, last, NULL)) return NULL;
        if (m->desc.norm == STX_SRU_NORM_AFTER) h = stx_layernorm(x, h, p->gain, p->shift, 1e-5);
    }
    return h;
}

STX_DEF const stx_real *stx_sru_gen_feed(stx_sru_gen *g, const int32_t *ids, size_t n) {
    if (!g || !stx_ok(g->model->ctx)) return NULL;
    if (g->model->sru->desc.custom) {
        stx_fail(
            g->model->ctx, STX_ERR_ARG,
            "stx_sru_gen_feed: a transform of your own may look at other times, so it cannot be fed token by token: "
            "use stx_sru_segment");
        return NULL;
    }
    return stx_cache_feed(g->cache, g->model->words, ids, n, 1, stx__sru_gen_step, g);
}

// >>language model: for programs of any family

static stx_tensor *stx__sru_lm_loss(void *m, const stx_ids *ids, const stx_ids *targets,
                                    const void *in, void *out) {
    return stx_sru_lm_loss((stx_sru_lm *)m, ids, targets, (const stx_sru_state *)in,
                           (stx_sru_state *)out);
}

static stx_tensor *stx__sru_lm_total(void *m, stx_tensor *nll) {
    (void)m;
    return nll;
} /* no penalties */

static void stx__sru_lm_updated(void *m) {
    (void)m;
}

static size_t stx__sru_lm_recompute(void *m, size_t n) {
    stx_sru_desc *d = &((stx_sru_lm *)m)->sru->desc;
    d->recompute = n >= d->layers;
    return d->recompute_layers = STX_MIN(n, d->layers);
}

static uint64_t stx__sru_lm_key(const void *m, const stx_ids *ids, const stx_ids *targets,
                                const void *s, uint64_t salt) {
    return stx_sru_lm_key((const stx_sru_lm *)m, ids, targets, (const stx_sru_state *)s, salt);
}

static void *stx__sru_lm_state_create(void *m, size_t B, size_t window) {
    stx_sru_state *s = m ? stx_sru_state_create(((stx_sru_lm *)m)->sru, B) : NULL;
    if (s) s->keep = s->window = window;
    return s;
}

static void *stx__sru_lm_gen_create(void *m, size_t B, size_t window) {
    return stx_sru_gen_create((stx_sru_lm *)m, B, window);
}
STX_LM_STATES(sru)

STX_DEF stx_lm stx_sru_lm_of(stx_sru_lm *m) {
    stx_lm lm;
    memset(&lm, 0, sizeof lm);
    if (!m) return lm;
    lm.model = m;
    lm.ctx = m->ctx;
    lm.params = m->params;
    lm.words = m->words;
    lm.loss = stx__sru_lm_loss;
    lm.total = stx__sru_lm_total;
    lm.updated = stx__sru_lm_updated;
    lm.recompute = stx__sru_lm_recompute;
    lm.key = stx__sru_lm_key;
    lm.state_create = stx__sru_lm_state_create;
    lm.gen_create = stx__sru_lm_gen_create;
    stx__sru_lm_states(&lm);
    return lm;
}

STX_STRICT_OFF
#endif /* SEQTX_SRU_IMPLEMENTATION */
