/* seqtx_sru.h - v0.2 - SRU and SRU++: simple recurrent units, optionally with attention
   no warranty implied; MIT or public domain, your choice (see the end of seqtx.h)

   In ONE .c or .cpp file:                everywhere else:
       #define SEQTX_IMPLEMENTATION           #include "seqtx_sru.h"
       #include "seqtx_sru.h"

   Needs seqtx.h in the same directory. Compile with -O2 and link with -lm (and with
   -pthread if glibc is older than 2.34). If another file already implements seqtx.h,
   define SEQTX_SRU_IMPLEMENTATION instead, which compiles only the implementation in this
   header.

   Contents, in four levels, each of which can be used alone:
       stx_sru_fwd, stx_sru_bwd    the recurrence, on raw pointers
       stx_sru_recurrence          the recurrence as an op
       stx_sru                     a stack of layers inside another model: stx_sru_forward
                                   with tensors, stx_sru_segment with a state
       stx_sru_lm                  a language model: training, states, generation


   MANUAL

   Papers
       Simple Recurrent Units for Highly
           Parallelizable Recurrence (SRU)           Lei et al. 2018     arXiv:1709.02755
       When Attention Meets Fast Recurrence (SRU++)  Lei 2021            arXiv:2102.12459

   Letters used in this file
       B  streams (rows of a batch)          x  input of a layer, (B,T,Ci)
       T  times (tokens) per call            h  output of a layer, (B,T,O)
       H  units per direction                c  state before time t; c' after it
       D  directions, 1 or 2                 U  (B,T,k,O), planes u0 .. u2 or u3
       O  D H, the columns                   f  forget gate;  vf, bf its vector and bias
       k  planes of U, 3 or 4                r  reset gate;   vr, br its vector and bias
       Ci features of a layer's input        v  (2,O): vf and vr
       P  SRU++: width of the projection     V  (B,T,2,O), added to v at each time
       M  SRU++: rows of memory              m  (B,O), dropout mask
       b  row of the batch                   g  the identity, or tanh
       s  direction, 0 or 1                  xr x in the highway (k = 3); alpha its scale
       o  column, s H + unit                 xt highway: alpha xr, u3 or 0
       t  time                               e  gradient of c' from later times
       p  step: t in the direction's order   J, Q  slope and offset of the affine map of e
       l  layer, from 0                      z, a  SRU++: projection, attention output

   In the code, x is the context, except in the prototypes of the stack, where x is the
   input. Outside the recurrence, m is a model, p a layer and h the input or output of a
   layer.

   The model. An LSTM multiplies its previous output by a matrix at every time step. An
   SRU multiplies the inputs of all time steps in one matmul, U = W3 x, and its
   recurrence is elementwise. SRU++ keeps W3 but puts a projection W1 and attention (W2)
   in front of it.

          x (B,T,Ci) --+--> U = W3 x --> for t: f, r, c', h --> h (B,T,O)
                       '------ highway -----------^

   The cell, for one column and one time:

       u0, u1, u2 (, u3) = U                     k = 4 with a highway if Ci != O, else 3
       f  = sigmoid(u1 + vf c + bf)              forget gate
       r  = sigmoid(u2 + vr c + br)              reset gate, from the state BEFORE t
       c' = u0 + (c - u0) f
       xt = alpha x  (k = 3)  or  u3  (k = 4)    highway
       h  = xt + (g(c') - xt) m r                g(c) = c, or tanh c; m is drawn once for
                                                 all times

   Gradients. Let dh be the gradient of the loss with respect to h, and e the part of the
   gradient of c' that comes from later times. Then

       dzr = dh (g - xt) m r (1-r)               gradient of r's argument
       dc' = dh m r g' + e                       total gradient of c'
       dzf = dc' (c - u0) f (1-f)                gradient of f's argument
       du0 = dc' (1-f)     du1 = dzf     du2 = dzr     dxt = dh (1 - m r)
       dvf += dzf c        dvr += dzr c          dbf += dzf      dbr += dzr
       e   <- dc' f + dzf vf + dzr vr            for the previous time; after the first
                                                 time, e is dc0
       k = 3: dx += alpha dxt                    k = 4: du3 = dxt
       dV  = (dzf c, dzr c)                      in all formulas, vf and vr include V

   At padding, all of these gradients are 0, and e does not change.

   What runs in parallel. The B O columns are independent of each other. Time is
   sequential on a CPU, where the forward pass also has to wait for c in every gate.
   Given all c, the backward pass is affine in e:

       e <- J e + Q        J = f + vf (c - u0) f (1-f)        Q = dh m r g' J + dzr vr

   and so is the forward pass in c, c' = f c + (1-f) u0, if f does not depend on c, that
   is, if vf = 0 (v1 without V). Affine maps compose: (J1,Q1) followed by (J2,Q2) is
   (J2 J1, J2 Q1 + Q2). Parts of time could therefore be computed in parallel and joined
   by their maps. On a GPU, the forward pass of v1 does so. On a CPU, the number of parts
   would depend on that of the threads, and with it the last bits of the results.

   SRU++. W3 x becomes W3 y: W1 projects x to width P, and attention of this width
   computes y. The memory (B,M,Ci) contains the layer's inputs at earlier times:

       z = W1 [memory ; x]
       [key | val] = W2 z                        keys and values come from z; the query is
                                                 z itself
       a = softmax(z key^T / sqrt(P/heads)) val  causal, over a window or all keys
       y = LN(z + alpha_attn a)                  alpha_attn starts at 0 (ReZero), so the
                                                 model starts without attention
       U = W3 dropout(y)

   There are no position encodings: the recurrence represents the order. The memory
   stores raw inputs. They are projected in each step with the current W1 and contribute
   to its gradient. attn_norm_first moves the LN in front of W2 and the attention; the
   rest of this section is about the default. Let ds be the gradient of the sum
   z + alpha_attn a. For the column vectors of one time, the gradients are as follows;
   weight gradients are summed over b and t:

       dy = W3^T dU, times the dropout mask; ds follows from dy through LN
       dW3 = sum dU dropout(y)^T
       da = alpha_attn ds                        dalpha_attn = sum over elements of ds a
       (dz, dkey, dval) from da, by the attention's backward
       dz += ds + W2^T [dkey | dval]             also for the rows of the memory
       dW2 = sum [dkey | dval] z^T               dW1 = sum dz [memory ; x]^T
       dx = W1^T dz, plus the highway's part

   Gradients also reach the memory in stx_sru_forward, but not in stx_sru_segment.

   While alpha_attn is 0, da is 0 too, so alpha_attn is the only attention parameter
   that the first update changes. W2 learns from the second update on.

   Why it works this way
       Why a negative highway_bias? r starts near sigmoid(highway_bias): 0.12 for -2, 0.05
       for -3. Then h is nearly x, a deep stack starts close to the identity, and
       gradients reach its first layer undiminished.

       Why alpha = sqrt(1 + 2 exp(highway_bias)) with rescale? Let c and x be
       independent with equal variance, and let r be sigmoid(highway_bias). Then
           Var h = (r^2 + (1-r)^2 alpha^2) Var x
       and this alpha makes Var h equal to Var x, so the signal does not fade from layer
       to layer.

       Why sqrt(1/2) in the initial gate weights? A gate's argument is the sum of u1,
       from the matmul, and vf c. If each has variance 1/2, the sum has variance 1. A
       uniform distribution in [-sqrt(3/2), sqrt(3/2)] has variance 1/2.

       Can a state overflow? No: c' is between c and u0, so |c| <= max(|c0|, max |u0|),
       however long the text is. Gradients can grow, however, because J <= 1 is
       guaranteed only while |vf (c - u0)| is at most 1. Gradient clipping helps.

       Why does bf start at 0? It makes f about 1/2, so a unit initially remembers a few
       time steps. Longer memories are learned, unit by unit.

       Why is a small layer not faster? Each time step waits for the previous one: a
       multiply-add, a sigmoid and another multiply-add. This latency stays the same
       until the B O columns fill the SIMD lanes of all threads. Up to that point, more
       streams or units cost nothing.

   Worked example. Take one unit with v = 0, and let u1, u2 and the biases be 0, so that f
   and r are 1/2. Let alpha = 1, c0 = 0, and at two times x = 1, 3 and u0 = 4, 8:

       c = 2, 5        h = 1 + (2 - 1)/2 = 1.5,  3 + (5 - 3)/2 = 4

   The backward pass from dh = 0, 1 (only the second h is in the loss):

       t = 2: dzr = 2/4 = 0.5   dc' = 0.5    dzf = 0.5 (2 - 8)/4 = -0.75    du0 = 0.25
              dx = 0.5          e = 0.25
       t = 1: dzr = 0           dc' = 0.25   dzf = 0.25 (0 - 4)/4 = -0.25   du0 = 0.125
              dx = 0            dc0 = 0.125

   Quick start. The program learns "abcabc.." and prints it. A test compiles and runs it.

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
           int failed = !stx_ok(x);
           stx_destroy(x);
           return failed;
       }
   //<quickstart

   stx_sru_lm_save(model, path) saves the model to a file, and stx_sru_lm_open(x, path)
   creates it again in another program. stx_sru_lm_open also opens checkpoints of
   train_sru; stx_vocab_open in seqtx_text.h returns their vocabulary.

   Configuration (stx_sru_desc, in stx_sru_lm_desc.sru; fields marked lm are in
   stx_sru_lm_desc itself). The last three columns are the presets enwik8-base, wt103-base
   and enwik8-sru of examples/train_sru.c.

       field            zero means        enwik8-base  wt103-base             enwik8-sru
       ---------------  ----------------  -----------  ---------------------  ----------
       dim (lm, O)      512               3072         3072                   1024
       layers           2                 10           10                     6
       transform        STX_SRU_LINEAR    ATTENTION    ATTENTION              LINEAR
       proj (P)         none; SRU++: O/4  768          768                    0
       heads            1                 1            1                      -
       dropout (lm)     0                 0.22         0.15                   0.2
       attn_dropout     0                 0.22         0.15                   -
       highway_bias     0                 -2           -2                     -3
       norm             none              none         none                   none
       adapt_io (lm)    0                 0            1                      0
       cutoffs (lm)     see its comment   -            19997, 39997, 199997   -

   dropout acts on the embedding, on g(c') - xt in all layers but the last, before W3 in
   all layers of SRU++, and on the last hidden state. highway_bias = 0 is the value 0
   and does not select another default. The SRU++ paper trains with RAdam (STX_RADAM) at
   a learning rate of 3e-4, weight decay 0.1, clipping to norm 1, and STX_LR_RECURSIVE
   with a warm-up of 16000 updates.

   Forward cost of a layer, in multiply-adds per token:

       SRU                 k Ci O; with a projection Ci P + k P O
       SRU++, W1 and W2    (Ci P + 2 P^2) (M + T) / T
       SRU++, attention    2 P per key
       SRU++, W3           k P O

   The recurrence is limited by memory bandwidth. Per column and time step, the forward
   pass transfers 5 elements (it reads u0, u1, u2 and x, and writes h), and the backward
   pass transfers 9.

   For the backward pass, each layer saves the following elements, and one state per
   STX_SRU_TILE time steps. The input of a layer is the h of the previous layer:

       SRU                 B T (k + 1) O                   U, h
       SRU++, in addition  P B (4 M + 7 T) + Ci B M        z of the memory, z of the
                                                           segment, both in one tensor,
                                                           keys, values, a, the sum, y;
                                                           memory

   Some options add more: every layer norm except that of y saves its output,
   rnn_dropout a copy of the layer's input, and dropout in SRU++ the input of W3. A
   layer that only projects saves z (P B T elements) and, with SRU++, y.

   With recomputation, these elements exist for only one recomputed layer at a time.
   Each recomputed layer stores only its input and its memory, B T O + Ci B M elements.

   Generation stores B O elements per layer, and for SRU++ also 2 P (2 window + 64)
   elements per stream and attending layer. Each token costs as many operations as in a
   forward pass over a text. The speed of generation is limited by memory bandwidth.
   With one stream and f32 weights, each token reads 4 bytes per weight and, in each
   attending layer, 8 P bytes of keys and values per row of the window. With several
   streams, the weights are read once for all of them.

   Fidelity to the authors' code (version 2.6, and the development version 3.0, which has
   SRU++)
       Tested against independent float64 code, to 1e-10 in double: cell, stack and SRU++
       with every option, the initialisers of both versions, adaptive embedding and
       softmax, optimisers, schedules.

       Corrected. A flag in `literal` restores the accidental behaviour of the authors'
       code:
           STX_SRU_LITERAL_NORM   with a norm before the transform, the memory bypasses
                                  the norm: z = W1 memory, not W1 LN(memory). Default: the
                                  memory is normalised like the segment, so that a text
                                  gives the same result in segments and as a whole.
       To reproduce the authors' code, set literal = STX_SRU_LITERAL, and for SRU++
       highway_bias = -2.

       Corrected, without a flag: the authors' code masks by adding -10000, so a padded
       time that sees only padded keys attends to the future. Here it attends to
       nothing. This changes no output, state or gradient; see stx__sru_attend.

       Kept: with STX_SRU_NORM_AFTER, the output of padding is the shift of the norm;
       zero_pads makes it 0. With k = 4, the forward pass does not scale the highway by
       alpha.

       Different: tensors are batch first, (B,T,.). Row i O + s H + unit of W3 is plane
       i, direction s; in the authors' code, it is row (s H + unit) k + i. A custom V is
       also stored in planes instead of pairs. highway_bias defaults to 0; in the
       authors' SRU++ stack, it defaults to -2.

       Improved: states are float in every precision. States in the shape of PyTorch's
       RNNs can be read and written, and arrays of other shapes are refused. Forward
       passes without gradients support every k, direction and V. Generation
       (stx_sru_gen) needs one direction, no custom transform and not
       STX_SRU_LITERAL_NORM.

       Omitted: the Billion Word trainer's sentence streams (supply the corpus
       yourself), second derivatives, streaming with look-ahead, and arbitrary attention
       masks. Attention is causal, optionally with a window, or sees all times with
       not_causal. Without a mask, the authors' attention sees all times, so set
       not_causal for encoders. Projections are never ignored (version 2.6 ignores a
       projection that does not make a layer narrower). The recurrence of the last layer
       has no dropout mask; for a single cell with dropout, use stx_sru_recurrence with
       a mask.

   Checkpoints can be converted to and from seqtx; docs/convert.md lists the names of the
   tensors.

   Arguments of the authors' stacks and the corresponding fields of stx_sru_desc

       authors' code                 field                              authors' default
       ----------------------------  ---------------------------------  ------------
       input_size, hidden_size       input, hidden                      (required)
       num_layers                    layers                             2
       dropout, rnn_dropout          dropout, rnn_dropout               0
       bidirectional                 bidirectional                      False
       projection_size, n_proj       proj, projs                        0
       use_tanh                      tanh                               False
       highway_bias                  highway_bias                       0; SRU++: -2
       has_skip_term                 no_skip, inverted                  True
       layer_norm                    norm: _BEFORE, or _NONE            False
       layer_norm, normalize_after   norm: _AFTER                       False
       rescale                       rescale                            False
       v1                            v1                                 False
       custom_m, transform_module    custom, user                       None
       weight_c_init                 v_init                             None; 3.0: 1
       nn_rnn_compatible_return      stx_sru_state_get_nn               False
       proj_input_to_hidden_first    input_first                        False
       mask_pad (of the call)        pad                                none

       authors' code, SRU++          field                              authors' default
       ----------------------------  ---------------------------------  ------------
       proj_size                     proj                               (required)
       attn_dropout                  attn_dropout                       0
       num_heads                     heads                              1
       attn_layer_norm               no_attn_norm, inverted             True
       attention_every_n_layers      attention_every                    1
       attention_last_n_layers       attention_last                     -1: off
       rezero_init_alpha             alpha_init                         0
       normalize_after (attention)   attn_norm_first, inverted          True

   For SRU, set transform = STX_SRU_LINEAR, and init_xavier = 1 to match version 3.0. For
   SRU++, set transform = STX_SRU_ATTENTION.

   Easy to get wrong
       - Like f, r uses the state before t.
       - With two directions and k = 3, the highway of each direction is one half of x.
       - A call returns the state after the last time step of the first direction, but
         after time step 0 of the second direction, which runs backward.
       - m multiplies (g - xt) r. A dropped unit outputs xt, and m is drawn once for all
         time steps.
       - There is no activation and no bias between W1, W2 and W3. Only the gates have
         biases.
       - In training, a query sees the whole previous segment and its own segment up to t:
         T + 1 to 2 T keys. Evaluation uses a window: stx_sru_state.window and keep.
       - The state and the memory that a segment reads are constants: gradients stop at
         the start of the segment.

   GPU. Set the device in the desc passed to stx_create (see seqtx.h); nothing else
   changes. seqtx_cuda.cu includes the kernels of the recurrence if both files are in
   the same directory. To replay steps as a CUDA graph, write the step as a function, as
   examples/train_sru.c does:

       stx_step_run(x, stx_sru_lm_key(model, in, next, state, 0), step, user);

   The fused attention kernels require that P / heads is a multiple of 8 and at most
   128. Otherwise, the scores are computed in parts and stored in device memory. This is
   the case for the authors' SRU++ presets, all of which have one head of 480 or more
   channels.

   The compile-time options are described in seqtx.h.

   Reading order: stx_sru_args (the recurrence), stx_sru_fwd_plain and stx_sru_bwd_plain
   (forward and backward, time by time), "work units" (blocks and tiles),
   stx__sru_fwd_steps_as and stx__sru_bwd_steps_as (the same for many columns at once),
   stx__sru_bwd_part (tiles in reverse), stx__sru_transform (SRU++), stx__sru_create_layer
   (initialisation), stx__sru_layer and stx_sru_forward (the stack), stx_sru_segment
   (states), stx_sru_gen_feed (generation).
*/
#define STX__LETTERS 1
#include "seqtx.h"      /* hides single-letter macros; see the end of seqtx.h */
#ifndef SEQTX_SRU_H
#define SEQTX_SRU_H

#include "seqtx.h"

#ifdef __cplusplus
extern "C" {
#endif


// >>api: configuration

enum { STX_SRU_LINEAR = 0, STX_SRU_ATTENTION };                            /* for `transform` */

enum { STX_SRU_NORM_NONE = 0, STX_SRU_NORM_BEFORE, STX_SRU_NORM_AFTER };   /* for `norm` */

/* A custom transform (custom_m and transform_module of the authors' code). `in`
   (B,T,Ci) is the layer's input after layer norm and dropout. The function sets *U to a
   tensor (B,T,k,O), with planes in the order of stx_sru_args. For gate vectors that
   depend on the input, it also sets *V to a tensor (B,T,2,O), which is added to v. k is
   4 if the layer has a highway and Ci differs from O, else 3. Layers with a custom
   transform have no memory. Returns 1, or 0 if it fails. The function is called in
   every forward pass, and again in the backward pass if the layer is recomputed. In
   that case, it must depend only on `in`, `user` and the parameters and must have no
   side effects, and `user` must be valid until stx_backward returns. */
typedef int (*stx_sru_transform)(stx_ctx *x, void *user, size_t layer, stx_tensor *in,
                                 stx_tensor **U, stx_tensor **V);

/* Flags of stx_sru_desc.literal. Each restores an accidental behaviour of the authors'
   code; see "Fidelity" in the manual. */
enum {
    STX_SRU_LITERAL_NORM = 1,       /* requires STX_SRU_ATTENTION with STX_SRU_NORM_BEFORE,
                                       neither custom nor no_attention */
    STX_SRU_LITERAL      = 1 << 30  /* all flags that apply to the model */
};

/* Configuration of a stack of layers. Zero means the default, which is given after
   "0:". */
typedef struct stx_sru_desc {
    size_t input;               /* number of features of x; required */
    size_t hidden;              /* H, units per direction; 0: input, or input / 2 with two
                                   directions */
    size_t layers;              /* number of layers; 0: 2 */
    int    bidirectional;       /* 1: D = 2; the second direction runs from the last time step
                                   to the first */
    int    transform;           /* STX_SRU_LINEAR: U = W3 x, or W3 W1 x with proj.
                                   STX_SRU_ATTENTION: SRU++ */
    size_t proj;                /* P, width of the projection; 0: no W1 (SRU++: O / 4) */
    const size_t *projs;        /* P of each layer, an array of `layers` elements, which is
                                   copied. NULL: proj for all layers */
    int    tanh;                /* 1: g is tanh; 0: g is the identity */
    int    no_skip;             /* 1: no highway, xt = 0 */
    int    rescale;             /* 1: alpha = sqrt(1 + 2 exp(highway_bias)) if k = 3. 0:
                                   alpha = 1 */
    double highway_bias;        /* initial br, in [-80,80]; 0 means 0. Published models use -2 for
                                   SRU++ (the default of the authors' code) and -3 for
                                   SRU language models */
    int    v1;                  /* 1: v is 0 and not a parameter (SRU of 2017). The
                                   forward pass on a GPU then runs in parallel over
                                   time, unless a custom transform sets V */
    int    norm;                /* layer norm: STX_SRU_NORM_BEFORE the transform, or
                                   _AFTER the recurrence */
    double dropout;             /* probability, in [0,1), of dropping g(c') - xt in all layers but
                                   the last, with one mask for all time steps. SRU++
                                   also drops inputs of W3, with a separate mask for
                                   each time step */
    double rnn_dropout;         /* probability, in [0,1), of dropping the input of every transform,
                                   with one mask for all time steps */
    int    input_first;         /* 1: if input differs from O, a matrix first maps x to
                                   O features, so that every layer has k = 3 */
    int    init_xavier;         /* for STX_SRU_LINEAR. 1: Xavier initialisers, as in version 3.0
                                   of the authors' code; 0: as in version 2.6. SRU++
                                   always uses Xavier initialisers */
    double v_init;              /* the initial v is uniform in [-v_init, v_init]. 0: sqrt(3/2), or
                                   1 with Xavier. -1: v starts at 0 and is learned */
    stx_sru_transform custom;   /* replaces `transform`; `user` is its second argument */
    void  *user;
    size_t recompute_layers;    /* number of layers to recompute in the backward pass,
                                   counted from the last; SIZE_MAX: all. Recomputing all
                                   layers saves memory but takes about a third more time
                                   (docs/speed.md) */

    /* SRU++ */
    size_t heads;               /* number of attention heads, a divisor of P, at most 256; 0: 1 */
    double attn_dropout;        /* probability, in [0,1), of dropping attention weights */
    size_t attention_every;     /* n: layers n, 2 n, .. (counted from 1) attend, and the others
                                   only project; 0: n = 1 */
    size_t attention_last;      /* number of layers that attend, counted from the last; cannot be
                                   combined with attention_every. 0: not used */
    int    no_attention;        /* 1: no layer attends */
    int    no_attn_norm;        /* 1: no layer norm in the transform */
    int    attn_norm_first;     /* 1: query, keys and values come from LN(z), and
                                   y = z + alpha_attn a has no norm. In layers that only
                                   project, y = LN(z) either way */
    double alpha_init;          /* initial alpha_attn; 0 means 0 (ReZero) */
    int    not_causal;          /* 1: each time step attends to all time steps */

    /* differences from the authors' code */
    unsigned literal;           /* STX_SRU_LITERAL, or individual flags. A flag that does not apply
                                   is an error. After creation, the model's desc has the
                                   flags in effect */
    int    zero_pads;           /* 1: with STX_SRU_NORM_AFTER, the output of padding is 0; 0: it is
                                   the norm's shift */
} stx_sru_desc;

/* Parameters and shapes of a layer. */
typedef struct stx_sru_layer {
    size_t Ci, P, k;                        /* Ci: input features. P: width of the projection, or
                                               0 without W1. k: planes of U, 3 or 4 */
    int    attends, highway;                /* attends: 1 if the layer has attention. highway: 1
                                               if xt = alpha x; 0 without a highway, or
                                               with k = 4 (xt = u3) */
    stx_real alpha;
    stx_tensor *w1, *w2, *w3;               /* w1 (P,Ci); w2 (2P,P); w3 (k O,P), or (k O,Ci)
                                               without w1. NULL if absent */
    stx_tensor *alpha_attn;                 /* (1); its name in a checkpoint is "alpha" */
    stx_tensor *attn_gain, *attn_shift;     /* (P): layer norm of the transform */
    stx_tensor *gain, *shift;               /* layer norm (desc.norm): (Ci), or (O) with
                                               STX_SRU_NORM_AFTER */
    stx_tensor *v, *bias;                   /* (2,O) each. v: vf, vr, or NULL with v1; bias: bf,
                                               br */
} stx_sru_layer;

/* A stack of layers. The context owns it and its parameters. */
typedef struct stx_sru {
    stx_ctx       *ctx;
    stx_sru_desc   desc;        /* with the defaults filled in */
    size_t         O;
    stx_tensor    *w_input;     /* (O,input): the matrix of input_first, or NULL if there is none */
    stx_sru_layer *layer;       /* [layers] */
    stx_attention_record *attended; /* [layers], for stx_sru_attention_map */
} stx_sru;

/* Creates a stack and adds its parameters to params, with names that begin with prefix
   (for example "" or "encoder."; at most 96 bytes). The context of params owns the
   stack, and the desc is copied. Returns NULL and sets an error if the desc is NULL or
   invalid, or if memory runs out. */
STX_DEF stx_sru *stx_sru_create(stx_params *params, const char *prefix, const stx_sru_desc *d);

/* Number of parameter elements of a stack with this desc. Nothing is created. Returns
   0, without setting an error, if the desc is invalid, and SIZE_MAX if the number does
   not fit in size_t. */
STX_DEF size_t stx_sru_count(const stx_sru_desc *d);


// >>api: forward

/* Inputs of a forward pass other than x, and its outputs other than h. Arrays have one
   entry per layer. Any array can be NULL, which means absent, and so can entries of c0
   and memory. The entries of last and inputs are written for all layers. */
typedef struct stx_sru_io {
    stx_tensor *const *c0;      /* (B,O) initial states; absent: 0 */
    stx_tensor *const *memory;  /* (B,M,Ci) for layers that attend: their inputs at earlier time
                                   steps. M is the same for all of them. Entries of other
                                   layers are ignored */
    const stx_ids *pad;         /* (B,T), nonzero: padding. It does not change the state and is
                                   not a key for any query, and its h is 0 (with
                                   STX_SRU_NORM_AFTER, the norm's shift unless zero_pads
                                   is set) */
    const stx_ids *memory_pad;  /* (B,M), nonzero: padding in memory */
    size_t window;              /* number of time steps before its own that a query sees; 0: all */
    stx_tensor **last;          /* out: final states (B,O), after the last time step in the
                                   first direction and after the first time step in the
                                   second */
    stx_tensor **inputs;        /* out: (B,T,Ci), memory for the next segment */
} stx_sru_io;

/* x (B,T,input) -> h (B,T,O). io may be NULL. Gradients reach x, c0 and memory unless
   they are constants. Returns NULL and sets an error if a shape is wrong. */
STX_DEF stx_tensor *stx_sru_forward(stx_sru *m, stx_tensor *x, stx_sru_io *io);

/* Returns the padding (B,T) of B rows with the given lengths, as ids of this step: row
   b is 0 before time length[b], and 1 from then on. A length above T is an error. */
STX_DEF stx_ids *stx_sru_lengths(stx_ctx *x, const size_t *length, size_t B, size_t T);


// >>api: state

/* States and memories of B streams. A segment reads one state and writes another, or
   the same one. Use separate states for training and evaluation. A new state is zero
   and has no memory. */
typedef struct stx_sru_state {
    stx_sru   *model;
    size_t     B;
    size_t     keep;        /* used when the state is written: number of memory rows to keep (for
                               evaluation), in a buffer that is fully allocated at first
                               use; 0: keep the rows of the last segment, as in
                               training */
    size_t     window;      /* used when the state is read: as stx_sru_io.window. Set keep to at
                               least window, because attention sees no rows beyond the
                               memory. A segment without an input state uses the window
                               of its output state */
    stx_memory *states;     /* c of each layer, (B,O) */
    stx_memory *memory;     /* inputs of the attending layers, (B,rows,Ci), for the same
                               time steps in all layers; rows is
                               stx_memory_max_rows(memory) */
    stx_real   *c;          /* states->all: (layers,B,O) on the device, never bf16 */
} stx_sru_state;

/* Creates a state for B >= 1 streams. Returns NULL and sets an error if B is 0 or
   memory runs out. It is freed by stx_sru_state_free, or with the context. */
STX_DEF stx_sru_state *stx_sru_state_create(stx_sru *m, size_t B);
STX_DEF void stx_sru_state_free(stx_sru_state *s);

/* Set the state to zero and empty the memory, for all streams or only for stream b, for
   example when a new text begins in it. Do nothing after an error. */
STX_DEF void stx_sru_state_reset(stx_sru_state *s);
STX_DEF void stx_sru_state_reset_stream(stx_sru_state *s, size_t b);

/* Copies streams first .. first + n - 1 of `from` to streams b .. b + n - 1 of `to`,
   for example to regroup batches. Both states must belong to the same model. If they
   are the same state, the ranges must not overlap. Returns 1, or sets an error and
   returns 0. */
STX_DEF int stx_sru_state_copy(stx_sru_state *to, size_t b, const stx_sru_state *from,
                               size_t first, size_t n);

/* stx_sru_state_save saves the state to a checkpoint, as "<prefix>c" and the entries of
   stx_memory_save. prefix can have at most 64 bytes; NULL is an error. The state must
   not change until stx_writer_finish. stx_sru_state_load loads it into a state with the
   same B. Both return 1, or set an error and return 0. After a failed load, clear the
   error and reset the state. */
STX_DEF int stx_sru_state_save(stx_writer *w, const stx_sru_state *s, const char *prefix);
STX_DEF int stx_sru_state_load(stx_sru_state *s, const stx_file *f, const char *prefix);

/* Copies layer l to host memory: its states c (B,O), and the rows (B,rows,Ci) of its
   memory, oldest first, with rows = s->memory->layer[l].count, which is 0 in layers
   without attention. Either pointer may be NULL. Returns 1, or sets an error and returns
   0: l is out of range, or the memory is requested while a stream lacks rows (after
   stx_sru_state_reset_stream or because of padding), which plain values cannot mark. */
STX_DEF int stx_sru_state_get(const stx_sru_state *s, size_t l, stx_real *c, stx_real *memory);

/* Copy the states c to or from host memory in the state shape of PyTorch's RNNs,
   (layers D, B, H), in which row l D + s is direction s of layer l. The state itself
   has the shape (layers, B, D H), which orders the elements differently if there are
   two directions. Therefore, stx_sru_state_set_nn takes the shape (d0,d1,d2) of `in`
   and rejects any other than (layers D, B, H). It returns 1, or sets an error, returns
   0 and leaves the state unchanged. For elements in the order of the state, use
   stx_upload(x, s->c, ..). */
STX_DEF void stx_sru_state_get_nn(const stx_sru_state *s, stx_real *out);
STX_DEF int stx_sru_state_set_nn(stx_sru_state *s, const stx_real *in, size_t d0, size_t d1,
                                 size_t d2);

/* Runs one segment of a text: x (B,T,input) -> h (B,T,O). `in` is the state to read
   (NULL: zero), and `out` the state to write (NULL: none); they may be the same. `out`
   is written during the call, before any backward pass, and can be partly written if
   the call fails. pad is (B,T) or NULL. Gradients do not reach the state. Inside
   stx_recompute, `out` must be NULL, because the segment runs twice and the state must
   not change in between. Returns NULL and sets an error if a state belongs to another
   model or its B differs from the B of x. */
STX_DEF stx_tensor *stx_sru_segment(stx_sru *m, stx_tensor *x, const stx_ids *pad,
                                    const stx_sru_state *in, stx_sru_state *out);

/* Returns the attention weights of layer l in stream b, of the last forward pass of this
   step (see stx_attention_map). The keys are the rows of the memory and the time steps
   of the segment. alpha_attn of the layer multiplies what these weights give. Rows of
   padded queries have no effect. Call it before the next stx_begin and before the
   parameters change. On a GPU, it copies from the device, like stx_get. Returns NULL
   without an error if the layer has no attention. Returns NULL and sets an error if
   there was no forward pass, if l or b is out of range, or if the layer is recomputed
   (recompute_layers with STX_TRAIN). */
STX_DEF const stx_attention_map *stx_sru_attention_map(const stx_sru *m, size_t l, size_t b);


// >>api: language model

/* Configuration of a language model. Zero means the default, which is given after
   "0:". */
typedef struct stx_sru_lm_desc {
    size_t vocab;           /* number of token ids; required */
    size_t dim;             /* O of the stack; 0: 512 */
    size_t emb;             /* width of the embedding; 0: dim. tied and adapt_io require
                               emb = dim */
    stx_sru_desc sru;       /* the stack; its input, hidden and dropout are set from this desc, and
                               its bidirectional and not_causal must be 0 */
    double dropout;         /* dropout probability, in [0,1), of the embedding, the stack and the
                               last hidden state */
    double io_dropout;      /* replaces `dropout` for the embedding and the last hidden state; 0:
                               same as `dropout`, negative: no dropout */
    double emb_dropout;     /* dropout probability inside the adaptive embedding and softmax */
    int    tied;            /* 1: the embedding is also the output matrix */

    int    adapt_io;        /* 1: adaptive embedding and softmax, which share their tables. Token
                               ids must be sorted by decreasing frequency. The following
                               fields apply only to adapt_io */
    size_t emb_adaptive;    /* width of the first cluster; 0: dim */
    double divval;          /* cluster i has width floor(emb_adaptive / divval^i); 0: 4 */
    size_t cutoff[STX_MAX_CLUSTERS - 1];    /* first ids of the second, third, .. cluster */
    size_t cutoffs;         /* number of cutoffs; 0: the values below vocab among 20000,
                               40000 and 200000 */
    int    separate_projs;  /* 1: the embedding does not share the output's projections */
    int    forward_columns; /* order of the head's cluster logits; see stx_adaptive. 0: as in the
                               authors' code */
} stx_sru_lm_desc;

/* A language model. The context owns it and its parameters. */
typedef struct stx_sru_lm {
    stx_ctx        *ctx;
    stx_sru_lm_desc desc;       /* with the defaults filled in; later changes of the stack
                                   (recompute_layers) are only in sru->desc */
    stx_params     *params;
    stx_sru        *sru;
    stx_vocab_io   *vocab_io;   /* embedding and output head */
} stx_sru_lm;

/* Creates a model with initialised parameters in context x, which owns it. The desc is
   copied. Returns NULL and sets an error if the desc is NULL or invalid, or if memory
   runs out. */
STX_DEF stx_sru_lm *stx_sru_lm_create(stx_ctx *x, const stx_sru_lm_desc *d);

/* stx_sru_lm_open creates the model in a file of stx_sru_lm_save or in a checkpoint of
   train_sru, in context x, which owns it. Returns NULL after an error. stx_sru_lm_save
   writes the model to a file, atomically; returns 1, or 0 after an error. A model with
   a custom transform cannot be saved. stx_sru_family is for files that contain more
   than a model, and for programs that accept any family. See stx_model_open,
   stx_model_write and stx_lm_open in seqtx.h. */
STX_DEF stx_sru_lm *stx_sru_lm_open(stx_ctx *x, const char *path);
STX_DEF int stx_sru_lm_save(stx_sru_lm *m, const char *path);
STX_DEF const stx_family *stx_sru_family(void);

/* The model's parameters, owned by the context; NULL if m is NULL. */
STX_DEF stx_params *stx_sru_lm_params(stx_sru_lm *m);

/* Number of parameter elements of a model with this desc. Shared parameters count
   once. Nothing is created. Returns 0, without setting an error, if the desc is
   invalid, and SIZE_MAX if the number does not fit in size_t. */
STX_DEF size_t stx_sru_lm_count(const stx_sru_lm_desc *d);

/* ids (B,T) -> last hidden state (B,T,dim). `in` and `out` are states of m->sru, as in
   stx_sru_segment. */
STX_DEF stx_tensor *stx_sru_lm_forward(stx_sru_lm *m, const stx_ids *ids, const stx_sru_state *in,
                                       stx_sru_state *out);

/* Hidden state (B,T,dim) -> logits (B,T,vocab), which are differentiable. With
   adapt_io, this is an error, because each cluster has a separate softmax. */
STX_DEF stx_tensor *stx_sru_lm_logits(stx_sru_lm *m, stx_tensor *h);

/* Hidden state (B,T,dim) -> log p (B,T,vocab), which is not differentiable. Works with
   and without adapt_io. */
STX_DEF stx_tensor *stx_sru_lm_log_probs(stx_sru_lm *m, stx_tensor *h);

/* Runs stx_sru_lm_forward on ids (B,T) with states `in` and `out`, and returns the mean
   negative log-likelihood (1) of targets (B,T), in nats per token. */
STX_DEF stx_tensor *stx_sru_lm_loss(stx_sru_lm *m, const stx_ids *ids, const stx_ids *targets,
                                    const stx_sru_state *in, stx_sru_state *out);

/* Returns the key for stx_step_run: a hash of all host-side decisions in a step with
   these tokens and this state (each may be NULL), including sizes and addresses. With
   adapt_io, the key also depends on the number of tokens per cluster (see
   stx_adaptive_key), so set the tokens first. salt is included in the hash: for a step
   with several parts or states, pass the key of each one as the salt of the next. */
STX_DEF uint64_t stx_sru_lm_key(const stx_sru_lm *m, const stx_ids *ids, const stx_ids *targets,
                                const stx_sru_state *s, uint64_t salt);


// >>api: generation

/* A generator, which processes text token by token. SRU stores only c, and SRU++ also
   stores the keys and values of the last `window` time steps. Up to rounding, the
   results are the same as for one segment over the whole text with that window. After
   the parameters change, reset the generator or create a new one. */
typedef struct stx_sru_gen {
    stx_sru_lm    *model;
    size_t         B, window;
    stx_cache     *cache;           /* keys and values of the layers that attend */
    stx_sru_state *state;           /* the states c */
} stx_sru_gen;

/* Creates a generator for B >= 1 streams. `window` is the number of time steps that
   attention looks back, as in stx_sru_io, and at most 2^31. But 0 means 1024, because
   the whole cache is allocated at creation. Returns NULL after an error. A model with a
   custom transform or STX_SRU_LITERAL_NORM cannot generate, which is an error. */
STX_DEF stx_sru_gen *stx_sru_gen_create(stx_sru_lm *m, size_t B, size_t window);
STX_DEF void stx_sru_gen_free(stx_sru_gen *g);

/* Sets the state to zero and empties the cache. Does nothing after an error: if a feed
   has failed, clear the error before you reset. */
STX_DEF void stx_sru_gen_reset(stx_sru_gen *g);

/* Feeds n >= 1 tokens per stream, ids (B,n), and returns the logits (B,vocab) of the
   next token, or log p with adapt_io. The result is in host memory, ready for
   stx_sample, and valid until the next call. Returns NULL after an error. Calls
   stx_begin(x, STX_EVAL), so do not call it between a forward pass and its backward
   pass. */
STX_DEF const stx_real *stx_sru_gen_feed(stx_sru_gen *g, const int32_t *ids, size_t n);

/* Returns the model as a table of functions, for programs that accept any model family.
   A state created with a window also keeps that many rows of memory. If m is NULL, all
   fields are NULL. */
STX_DEF stx_lm stx_sru_as_lm(stx_sru_lm *m);


// >>api: recurrence

/* Inputs of the recurrence as an op; see stx_sru_args for the formulas. u and bias are
   required. All other pointers may be NULL. */
typedef struct stx_sru_recurrence_in {
    stx_tensor *u;          /* (B,T,k,O) */
    stx_tensor *xr;         /* (B,T,O), the highway input; k = 3 only. NULL: xt = 0 */
    stx_tensor *v, *bias;   /* (2,O) each. v: vf and vr (NULL: 0); bias: bf and br */
    stx_tensor *V;          /* (B,T,2,O), added to v */
    stx_tensor *c0;         /* (B,O), the initial states; NULL: 0 */
    stx_tensor *mask;       /* (B,O): m, a constant */
    const stx_ids *pad;     /* (B,T), nonzero: padding */
    size_t directions;      /* D, 1 or 2; 0: 1 */
    double alpha;           /* scale of xr; 0: 1 */
    int    tanh;
} stx_sru_recurrence_in;

/* Runs the recurrence and returns h (B,T,O), or NULL after an error. Unless last is NULL,
   *last receives the final states (B,O). */
STX_DEF stx_tensor *stx_sru_recurrence(stx_ctx *x, const stx_sru_recurrence_in *in,
                                       stx_tensor **last);

/* Arguments of the kernels (1709.02755, section 2). For each batch row b and column
   o = s H + unit of direction s, t runs 0 .. T-1 for s = 0 and T-1 .. 0 for s = 1, from
   c = c0:
       f  = sigmoid(u1 + vf c + bf)
       r  = sigmoid(u2 + vr c + br)
       c' = u0 + (c - u0) f
       xt = alpha xr (k = 3), u3 (k = 4), or 0 (k = 3 and xr NULL)
       h  = xt + (g(c') - xt) m r           g(c) = c, or tanh c
   Where pad is nonzero, c' = c and h = 0. Activations (u, xr, V, h and their gradients)
   have the context's precision: on a GPU, an stx_real pointer can refer to bf16. The
   gate vectors v, bias, m, states and their gradients are always stx_real. The backward
   pass overwrites the gradients marked "written" and adds to all others that are not
   NULL. */
typedef struct stx_sru_args {
    size_t B, T, H, D, k;           /* O = D H; D is 1 or 2 */
    int    tanh;
    stx_real alpha;                 /* has no default: 0 removes the highway of k = 3 */
    const stx_real *u, *xr;         /* u (B,T,k,O); xr (B,T,O), or NULL */
    const stx_real *v, *bias;       /* (2,O) each. v: vf, vr (NULL: 0); bias: bf, br */
    const stx_real *V;              /* (B,T,2,O) or NULL: added to vf, vr at each time */
    const stx_real *c0;             /* (B,O) or NULL: 0 */
    const stx_real *m;              /* (B,O) or NULL: 1 */
    const int32_t  *pad;            /* (B,T) or NULL */
    stx_real *h, *last;             /* h (B,T,O); may be NULL in stx_sru_fwd_plain only. last
                                       (B,O), or NULL */
    stx_real *c;                    /* (B,tiles,O), saved for the backward pass, which recomputes
                                       the other states: the state before each tile of
                                       STX_SRU_TILE steps, in the order of the
                                       direction. NULL: no backward pass follows.
                                       stx_sru_bwd_plain does not read it */
    const stx_real *dh, *dlast;     /* gradients of h and last; NULL: 0 */
    stx_real *du, *dV;              /* gradients of u and V: written. du is required, and so is dV
                                       if V is given */
    stx_real *dxr;                  /* gradient of xr: written, or added to if add_xr is 1; or
                                       NULL */
    stx_real *dv, *dbias, *dc0;     /* gradients of v, bias and c0: added to; or NULL */
    int add_xr;
    void *work;                     /* stx_sru_work bytes, used only during the call */
} stx_sru_args;

enum { STX_SRU_TILE = 32 };

static inline size_t stx_sru_tiles(const stx_sru_args *a) {
    return (a->T + STX_SRU_TILE - 1) / STX_SRU_TILE;
}

/* Returns the size of args.work in bytes: stx_sru_work for the CPU, stx_sru_work_cuda
   for the GPU. Reads only the sizes in *a and whether v and V are NULL. */
STX_DEF size_t stx_sru_work(stx_ctx *x, const stx_sru_args *a, int backward);
#ifdef SEQTX_CUDA
extern size_t stx_sru_work_cuda(stx_ctx *x, const stx_sru_args *a, int backward);
#endif
STX_KERNEL(stx_sru_fwd, (stx_ctx *x, const stx_sru_args *a))
STX_KERNEL(stx_sru_bwd, (stx_ctx *x, const stx_sru_args *a))

/* Compute both passes directly from the formulas, column by column and step by step in
   double, for readers and as the reference in tests. The arrays of *a are in host
   memory, and `state` has T + 1 elements. */
STX_DEF void stx_sru_fwd_plain(const stx_sru_args *a, double *state);
STX_DEF void stx_sru_bwd_plain(const stx_sru_args *a, double *state);

#ifdef __cplusplus
}
#endif

/* Stop reading here if you only want the API. */
#endif /* SEQTX_SRU_H */

#if (defined(SEQTX_IMPLEMENTATION) || defined(SEQTX_SRU_IMPLEMENTATION)) \
    && !defined(SEQTX_SRU_IMPLEMENTATION_DONE)
#define SEQTX_SRU_IMPLEMENTATION_DONE

#define STX_LOOPS
#include "seqtx.h"      /* included again for the inner-loop macros */

#include <stdio.h>

STX_STRICT_ON


// >>recurrence

/* Sets the error "OP: FIELD: expected shape EXPECTED, got (..)". Returns 0. */
static int stx__sru_bad_shape(stx_ctx *x, const char *op, const char *field, const char *expected,
                              const stx_tensor *t) {
    char got[96] = "";
    size_t at = 0;
    int i;
    for (i = 0; i < t->ndim; i++)
        at += (size_t)snprintf(got + at, sizeof got - at, i ? ",%zu" : "%zu", t->dim[i]);
    stx_fail(x, STX_ERR_SHAPE, "%s: %s: expected shape %s, got (%s)", op, field, expected, got);
    return 0;
}

/* Checks the number of elements of t, unless t is NULL. If it is wrong, sets an error
   and returns 0. */
static int stx__sru_check_size(stx_ctx *x, const char *field, const char *shape,
                               const stx_tensor *t, size_t size) {
    if (!t || t->size == size) return 1;
    return stx__sru_bad_shape(x, "stx_sru_recurrence", field, shape, t);
}

/* Checks the shape of ids, unless ids is NULL. */
static int stx__sru_check_ids(stx_ctx *x, const char *op, const char *field, const stx_ids *ids,
                              size_t B, size_t T) {
    if (!ids || (ids->B == B && ids->T == T)) return 1;
    stx_fail(x, STX_ERR_SHAPE, "%s: %s: expected shape (%zu,%zu), got (%zu,%zu)", op, field, B, T,
             ids->B, ids->T);
    return 0;
}

static int stx__sru_check_recurrence(stx_ctx *x, const stx_sru_recurrence_in *in) {
    const char *op = "stx_sru_recurrence";
    const stx_tensor *u = in->u, *xr = in->xr;
    const size_t D = in->directions ? in->directions : 1;
    size_t B, T, k, O;
    if (u->ndim != 4 || (u->dim[2] != 3 && u->dim[2] != 4))
        return stx__sru_bad_shape(x, op, "u", "(B,T,k,O) with k = 3 or 4 (use stx_reshape)", u);
    B = u->dim[0];
    T = u->dim[1];
    k = u->dim[2];
    O = u->dim[3];

    if (D > 2 || O % D) {
        stx_fail(x, STX_ERR_SHAPE,
                 "%s: directions: expected 1, or 2 with an even O, got %zu with O = %zu", op, D, O);
        return 0;
    }
    if (!in->bias) {
        stx_fail(x, STX_ERR_SHAPE, "%s: bias: expected shape (2,O), got NULL", op);
        return 0;
    }
    if (xr && k == 4) {
        stx_fail(x, STX_ERR_SHAPE,
                 "%s: xr: expected NULL with k = 4, got a tensor: u3 is the highway input", op);
        return 0;
    }
    if (xr && (xr->ndim != 3 || xr->dim[0] != B || xr->dim[1] != T || xr->dim[2] != O))
        return stx__sru_bad_shape(x, op, "xr", "(B,T,O) like u", xr);
    return stx__sru_check_size(x, "v", "(2,O)", in->v, 2 * O)
        && stx__sru_check_size(x, "bias", "(2,O)", in->bias, 2 * O)
        && stx__sru_check_size(x, "V", "(B,T,2,O)", in->V, B * T * 2 * O)
        && stx__sru_check_size(x, "c0", "(B,O)", in->c0, B * O)
        && stx__sru_check_size(x, "mask", "(B,O)", in->mask, B * O)
        && stx__sru_check_ids(x, op, "pad", in->pad, B, T);
}

typedef struct stx__sru_save {
    stx_sru_args a;
    stx_tensor  *last;      /* final states, or NULL */
} stx__sru_save;

static size_t stx__sru_work_bytes(stx_ctx *x, const stx_sru_args *a, int backward) {
#ifdef SEQTX_CUDA
    if (stx_ctx_desc(x)->device == STX_CUDA) return stx_sru_work_cuda(x, a, backward);
#endif
    return stx_sru_work(x, a, backward);
}

/* Returns the buffer into which the kernel writes the gradient of t. *direct receives 1
   if the buffer is t's gradient itself, to which nothing has been added yet. It
   receives 0 if the buffer is temporary; stx__sru_grad_add then adds it to the
   gradient, if t requires one. */
static stx_real *stx__sru_grad_buffer(stx_ctx *x, stx_tensor *t, int *direct) {
    stx_real *g;
    *direct = 0;
    g = stx_grad(x, t, direct);
    return g && *direct ? g : stx_step_activations(x, t->size);
}

static void stx__sru_grad_add(stx_ctx *x, stx_tensor *t, const stx_real *g, int direct) {
    stx_real *d = direct ? NULL : stx_grad(x, t, NULL);
    if (d) STX_RUN(x, stx_axpy, (x, d, g, t->size, 1, 1));
}

static void stx__sru_recurrence_bwd(stx_ctx *x, stx_tensor *y, stx_tensor *const *in, void *save) {
    stx__sru_save *s = (stx__sru_save *)save;
    stx_sru_args *a = &s->a;
    int direct_u, direct_V = 1, fresh = 0;
    a->dh = stx_grad(x, y, NULL);       /* zeros if only the final states have a gradient */
    a->dlast = s->last ? s->last->grad : NULL;
    a->du = stx__sru_grad_buffer(x, in[0], &direct_u);
    a->dxr = in[1] ? stx_grad(x, in[1], &fresh) : NULL;
    a->add_xr = !fresh;
    a->dv = in[2] ? stx_grad(x, in[2], NULL) : NULL;
    a->dbias = stx_grad(x, in[3], NULL);
    a->dV = in[4] ? stx__sru_grad_buffer(x, in[4], &direct_V) : NULL;
    a->dc0 = in[5] ? stx_grad(x, in[5], NULL) : NULL;
    a->work = stx_step_device_bytes(x, stx__sru_work_bytes(x, a, 1));
    if (!stx_ok(x)) return;
    STX_RUN(x, stx_sru_bwd, (x, a));
    stx__sru_grad_add(x, in[0], a->du, direct_u);
    if (in[4]) stx__sru_grad_add(x, in[4], a->dV, direct_V);
}

static void stx__sru_set_args(stx_sru_args *a, const stx_sru_recurrence_in *in) {
    a->B = in->u->dim[0];
    a->T = in->u->dim[1];
    a->k = in->u->dim[2];
    a->D = in->directions ? in->directions : 1;
    a->H = in->u->dim[3] / a->D;
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
}

STX_DEF stx_tensor *stx_sru_recurrence(stx_ctx *x, const stx_sru_recurrence_in *in,
                                       stx_tensor **last) {
    STX__FP_SCOPE;
    stx_tensor *y[2], *inputs[6];
    stx__sru_save *s;
    stx_sru_args *a;
    size_t B, O;
    if (last) *last = NULL;
    if (!stx_ok(x) || !in || !in->u) return NULL;
    if (!stx__sru_check_recurrence(x, in)) return NULL;
    B = in->u->dim[0];
    O = in->u->dim[3];

    y[0] = stx_new(x, B, in->u->dim[1], O, 0);
    s = (stx__sru_save *)stx_step_host_bytes(x, sizeof *s);
    if (!y[0] || !s) return NULL;
    memset(s, 0, sizeof *s);
    a = &s->a;
    stx__sru_set_args(a, in);
    a->h = y[0]->data;
    if (last) {
        *last = s->last = y[1] = stx_new_f32(x, B, O, 0, 0);
        if (!y[1]) return NULL;
        a->last = y[1]->data;
    }

    inputs[0] = in->u;
    inputs[1] = in->xr;
    inputs[2] = in->v;
    inputs[3] = in->bias;
    inputs[4] = in->V;
    inputs[5] = in->c0;
    if (stx_record_results(x, y, last ? 2 : 1, inputs, 6, stx__sru_recurrence_bwd, s)) {
        size_t bytes = stx_bytes_of(B * O, stx_sru_tiles(a), sizeof(stx_real));
        a->c = (stx_real *)stx_step_device_bytes(x, bytes);
    }
    a->work = stx_step_device_bytes(x, stx__sru_work_bytes(x, a, 0));
    if (!stx_ok(x)) return NULL;
    STX_RUN(x, stx_sru_fwd, (x, a));
    return y[0];
}


// >>recurrence: plain definition

/* The values of one step. c is c', the state after the step. At padding, c equals the
   state before the step, and all other values are 0. */
typedef struct stx__sru_step {
    double vf, vr, f, r, c, g, xt, m;
    int padded;
} stx__sru_step;

static stx__sru_step stx__sru_step_of(const stx_sru_args *a, size_t b, size_t o, size_t t,
                                      double c) {
    const size_t O = a->D * a->H, row = b * a->T + t;
    const stx_real *u = a->u + row * a->k * O + o;
    const stx_real *V = a->V ? a->V + row * 2 * O + o : NULL;
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
    if (a->k == 4) s.xt = (double)u[3 * O];
    else if (a->xr) s.xt = (double)a->alpha * (double)a->xr[row * O + o];
    s.m = a->m ? (double)a->m[b * O + o] : 1;
    return s;
}

/* Returns the time t of step p in column o. The second direction starts at the last
   time step. */
static size_t stx__sru_time(const stx_sru_args *a, size_t o, size_t p) {
    return o < a->H ? p : a->T - 1 - p;
}

STX_DEF void stx_sru_fwd_plain(const stx_sru_args *a, double *state) {
    STX__FP_SCOPE;
    const size_t O = a->D * a->H, T = a->T;
    size_t b, o, p;
    for (b = 0; b < a->B; b++) {
        for (o = 0; o < O; o++) {
            state[0] = a->c0 ? (double)a->c0[b * O + o] : 0;
            for (p = 0; p < T; p++) {
                size_t t = stx__sru_time(a, o, p);
                stx__sru_step s = stx__sru_step_of(a, b, o, t, state[p]);
                if (a->c && p % STX_SRU_TILE == 0) {
                    size_t tile = b * stx_sru_tiles(a) + p / STX_SRU_TILE;
                    a->c[tile * O + o] = (stx_real)state[p];
                }
                /* at padding, h is 0, because all terms are 0 */
                if (a->h)
                    a->h[(b * T + t) * O + o] = (stx_real)(s.xt + (s.g - s.xt) * s.m * s.r);
                state[p + 1] = s.c;
            }
            if (a->last) a->last[b * O + o] = (stx_real)state[T];
        }
    }
}

/* Implements the formulas under "Gradients" in the manual. The variable dc is dc'. */
STX_DEF void stx_sru_bwd_plain(const stx_sru_args *a, double *state) {
    STX__FP_SCOPE;
    const size_t O = a->D * a->H, T = a->T;
    size_t o, b, p;
    for (o = 0; o < O; o++) {
        double dvf = 0, dvr = 0, dbf = 0, dbr = 0;
        for (b = 0; b < a->B; b++) {
            double e = a->dlast ? (double)a->dlast[b * O + o] : 0;
            state[0] = a->c0 ? (double)a->c0[b * O + o] : 0;
            for (p = 0; p < T; p++)
                state[p + 1] = stx__sru_step_of(a, b, o, stx__sru_time(a, o, p), state[p]).c;

            for (p = T; p-- > 0;) {
                size_t t = stx__sru_time(a, o, p), row = b * T + t;
                double c = state[p], dh = a->dh ? (double)a->dh[row * O + o] : 0;
                double dc = 0, dxt = 0, dzf = 0, dzr = 0;
                stx__sru_step s = stx__sru_step_of(a, b, o, t, c);
                stx_real *du = a->du + row * a->k * O + o;
                stx_real *dxr = a->dxr ? a->dxr + row * O + o : NULL;
                if (!s.padded) {
                    dxt = dh * (1 - s.m * s.r);
                    dzr = dh * (s.g - s.xt) * s.m * s.r * (1 - s.r);
                    dc = dh * s.m * s.r * (a->tanh ? 1 - s.g * s.g : 1) + e;
                    dzf = dc * (c - (double)a->u[row * a->k * O + o]) * s.f * (1 - s.f);
                    e = dc * s.f + dzf * s.vf + dzr * s.vr;
                    dvf += dzf * c;
                    dvr += dzr * c;
                    dbf += dzf;
                    dbr += dzr;
                }
                du[0] = (stx_real)(dc * (1 - s.f));
                du[O] = (stx_real)dzf;
                du[2 * O] = (stx_real)dzr;
                if (a->k == 4) du[3 * O] = (stx_real)dxt;
                if (dxr) *dxr = (stx_real)((double)a->alpha * dxt + (a->add_xr ? (double)*dxr : 0));
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


// >>recurrence: work units

/* Columns are independent, but time steps are not, so loops are vectorised over
   columns. A work unit is a block of columns of one batch row and direction. Its time
   steps are processed tile by tile. U and h are streamed, while the block's constants (v,
   bias, mask) and its state stay in the L1 cache.

   The forward pass stores only the state before each tile. The backward pass recomputes
   the states and forget gates of a tile in the caches before it processes the tile in
   reverse. The two passes together transfer 14 elements per column and time step.
   Storing every c would increase this to 16, and memory by B T O elements. */

enum {
    STX__SRU_LARGE     = 8 << 20,                   /* size of h in bytes above which a
                                                       call does not fit in the caches */
    STX__SRU_MAX_WIDTH = 4096 / sizeof(stx_real),   /* columns per block */
    STX__SRU_MIN_WIDTH = 16
};

/* The division of a call into work units. */
typedef struct stx__sru_plan {
    size_t O;               /* D H, the number of columns */
    size_t ldu;             /* k O, the stride between rows of u */
    size_t width;           /* columns per block */
    size_t blocks;          /* blocks per direction */
    size_t units;           /* blocks of all batch rows and directions */
    size_t tiles;           /* number of tiles into which the T time steps are
                               divided */
    size_t scratch;         /* elements of scratch memory per thread */
} stx__sru_plan;

/* Returns 1 if there is nothing to compute. T = 0 does not count as empty, because
   `last` receives c0. */
static int stx__sru_is_empty(const stx_sru_args *a) {
    return !a->B || !a->H || !a->D;
}

/* Divides a call into work units. Rows of a block have up to 4 KB: long enough to
   stream through whole pages, and short enough that the block's constants and state fit
   in the L1 cache and, in the backward pass, a tile of states in the L2 cache. Blocks
   are narrower if the threads need more of them. */
static void stx__sru_make_plan(stx__sru_plan *plan, const stx_sru_args *a, size_t threads,
                               int backward) {
    plan->O = a->D * a->H;
    plan->ldu = a->k * plan->O;
    plan->tiles = stx_sru_tiles(a);
    for (plan->width = STX__SRU_MAX_WIDTH;; plan->width /= 2) {
        plan->blocks = (a->H + plan->width - 1) / plan->width;
        plan->units = a->B * a->D * plan->blocks;
        if (plan->width <= STX__SRU_MIN_WIDTH) break;
        /* with wide blocks, load balance requires at least 4 units per thread, or a
           number of units that is a multiple of the number of threads */
        if (plan->units >= threads * (plan->width > 128 ? 4 : 1)) break;
        if (plan->units >= threads && plan->units % threads == 0) break;
    }
    /* rows for c, zeros and ones; in the backward pass, also those of stx__sru_scratch */
    plan->scratch = plan->width * (backward ? 3 * STX_SRU_TILE + 13 : 3);
}

/* Layout of the work memory: in the backward pass, the sums of dv and of dbias, each
   (B,2,O); then the scratch memory */
STX_DEF size_t stx_sru_work(stx_ctx *x, const stx_sru_args *a, int backward) {
    stx__sru_plan plan;
    size_t n;
    if (stx__sru_is_empty(a)) return 0;
    stx__sru_make_plan(&plan, a, (size_t)stx_threads(x), backward);
    n = (size_t)stx_threads(x) * plan.scratch;
    if (backward) n += 4 * a->B * plan.O;
    return n * sizeof(stx_real);
}

/* A block of columns: its position, constants and scratch memory. */
typedef struct stx__sru_block {
    const stx_sru_args *a;
    size_t    b, s;                             /* b: batch row; s: direction */
    size_t    o, n;                             /* o: first column; n: number of columns */
    size_t    O, ldu;
    int       large;                            /* 1: the call does not fit in the caches */
    ptrdiff_t sign;                             /* 1 in the first direction, -1 in the second */
    const stx_real *vf, *vr, *bf, *br, *m;      /* (n) each: gate vectors, biases, dropout mask */
    stx_real *c;                                /* (n), the current state */
    stx_real *zeros, *ones;                     /* (n) each, filled with 0 and with 1 */
    stx_real *scratch;                          /* rest of the scratch memory */
} stx__sru_block;

static void stx__sru_block_init(stx__sru_block *block, const stx_sru_args *a,
                                const stx__sru_plan *plan, stx_real *scratch, size_t unit) {
    const size_t first = unit % plan->blocks * plan->width;
    size_t j;
    block->a = a;
    block->O = plan->O;
    block->ldu = plan->ldu;
    block->large = a->B * a->T * plan->O * sizeof(stx_real) > STX__SRU_LARGE;
    block->b = unit / (a->D * plan->blocks);
    block->s = unit / plan->blocks % a->D;
    block->n = STX_MIN(plan->width, a->H - first);
    block->o = block->s * a->H + first;
    block->sign = block->s ? -1 : 1;

    block->c = scratch;
    block->zeros = block->c + plan->width;
    block->ones = block->zeros + plan->width;
    block->scratch = block->ones + plan->width;
    for (j = 0; j < block->n; j++) {
        block->zeros[j] = 0;
        block->ones[j] = 1;
    }
    block->vf = a->v ? a->v + block->o : block->zeros;
    block->vr = a->v ? a->v + plan->O + block->o : block->zeros;
    block->bf = a->bias + block->o;
    block->br = a->bias + plan->O + block->o;
    block->m = a->m ? a->m + block->b * plan->O + block->o : block->ones;
}

/* Returns the row of step p in (B,T). */
static size_t stx__sru_row(const stx__sru_block *block, size_t p) {
    return block->b * block->a->T + (block->s ? block->a->T - 1 - p : p);
}

static int stx__sru_padded(const stx__sru_block *block, size_t p) {
    return block->a->pad && block->a->pad[stx__sru_row(block, p)];
}

/* A run is a sequence of steps without padding. Returns the end of the run that starts
   at p, at most `last`. */
static size_t stx__sru_run_end(const stx__sru_block *block, size_t p, size_t last) {
    while (p < last && !stx__sru_padded(block, p)) p++;
    return p;
}

/* Returns the start of the run that ends before `end`, at least `first`. */
static size_t stx__sru_run_start(const stx__sru_block *block, size_t end, size_t first) {
    while (end > first && !stx__sru_padded(block, end - 1)) end--;
    return end;
}

/* Returns the block's part of plane i of u. */
static const stx_real *stx__sru_plane(const stx__sru_block *block, size_t row, size_t i) {
    return block->a->u + row * block->ldu + i * block->O + block->o;
}

/* Returns xr or u3, not yet multiplied by alpha, or zeros without a highway. *ld
   receives the stride between steps. */
static const stx_real *stx__sru_highway(const stx__sru_block *block, size_t row, ptrdiff_t *ld) {
    const stx_sru_args *a = block->a;
    if (a->k == 4) {
        *ld = block->sign * (ptrdiff_t)block->ldu;
        return stx__sru_plane(block, row, 3);
    }
    if (a->xr) {
        *ld = block->sign * (ptrdiff_t)block->O;
        return a->xr + row * block->O + block->o;
    }
    *ld = 0;
    return block->zeros;
}

/* Rows are processed in pieces of this many columns. Before each piece, the same
   columns of the next row are prefetched, because rows are many pages apart, beyond the
   reach of hardware prefetchers. */
enum { STX__SRU_PIECE = 128 };

#define STX__SRU_PREFETCH(row, from, to) stx_prefetch((row) + (from), (to) - (from))

/* Stores a piece of results that was computed in the L1 cache. If `stream` is 1, the
   results of the call do not fit in the caches, and non-temporal stores are used,
   because an ordinary store would first read the line that it overwrites. A temporary
   dx (see stx__sru_bwd_run) is stored in the same way, although it is read again or
   discarded. */
#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__)) && !defined(SEQTX_DOUBLE)
static inline void stx__sru_store(stx_real *to, const stx_real *from, size_t n, int stream) {
    size_t j = 0;
    if (stream && (uintptr_t)to % 16 == 0)
        for (; j + 4 <= n; j += 4) _mm_stream_ps(to + j, _mm_loadu_ps(from + j));
    memcpy(to + j, from + j, (n - j) * sizeof *to);
}

/* Must be called before another thread reads streamed results. */
static inline void stx__sru_fence(int stream) {
    if (stream) _mm_sfence();
}
#else
static inline void stx__sru_store(stx_real *to, const stx_real *from, size_t n, int stream) {
    (void)stream;
    memcpy(to, from, n * sizeof *to);
}

static inline void stx__sru_fence(int stream) {
    (void)stream;
}
#endif


// >>recurrence: forward

#define STX__SRU_IN const stx_real *STX_RESTRICT
#define STX__SRU_OUT stx_real *STX_RESTRICT

/* Inputs of the loops over the steps of a run. ld* are the strides between rows. In the
   backward pass, the pointers refer to the last step, and the loops run in reverse. The
   loops never write to memory that they read through this struct. gcc must know this to
   vectorise them. Therefore, STX_RESTRICT is required on these fields, on all
   parameters that are written through, and on the pointer to the struct in every
   function. */
typedef struct stx__sru_rows {
    STX__SRU_IN u0;                             /* planes of u */
    STX__SRU_IN u1;
    STX__SRU_IN u2;
    STX__SRU_IN skip;                           /* xr or u3, not multiplied by alpha; or zeros */
    STX__SRU_IN V;                              /* added to vf and vr if `gates` is 1 */
    ptrdiff_t ldu, ldx, ldv;
    STX__SRU_IN vf;                             /* vf, vr, bf, br and m: (n), the same for all
                                                   steps */
    STX__SRU_IN vr;
    STX__SRU_IN bf;
    STX__SRU_IN br;
    STX__SRU_IN m;
    STX__SRU_IN dh;                             /* backward: gradient of h */
    STX__SRU_IN cs;                             /* backward: states before each step and after the
                                                   last, with stride `width` */
    STX__SRU_IN fs;                             /* backward: forget gates, with stride `width` */
    ptrdiff_t ldh, ldd;                         /* ldh: stride of h or dh; ldd: stride of dx */
    size_t O, width, steps, n;                  /* O is the stride between planes */
    stx_real alpha;                             /* scale of skip; 1 if k = 4 */
    int large, tanh_, gates;
} stx__sru_rows;

/* Describes `steps` steps of a block. `row` is the row in which the loop starts: the
   first step's row in the forward pass, or the last step's row in the backward pass,
   which runs in reverse. */
static void stx__sru_set_rows(stx__sru_rows *r, const stx__sru_block *block, size_t row,
                              size_t steps) {
    const stx_sru_args *a = block->a;
    memset(r, 0, sizeof *r);
    r->u0 = stx__sru_plane(block, row, 0);
    r->u1 = stx__sru_plane(block, row, 1);
    r->u2 = stx__sru_plane(block, row, 2);
    r->ldu = block->sign * (ptrdiff_t)block->ldu;
    r->skip = stx__sru_highway(block, row, &r->ldx);
    r->V = a->V ? a->V + row * 2 * block->O + block->o : block->zeros;
    r->ldv = a->V ? 2 * block->sign * (ptrdiff_t)block->O : 0;
    r->vf = block->vf;
    r->vr = block->vr;
    r->bf = block->bf;
    r->br = block->br;
    r->m = block->m;
    r->O = block->O;
    r->steps = steps;
    r->n = block->n;
    r->alpha = a->k == 4 ? 1 : a->alpha;
    r->large = block->large;
    r->tanh_ = a->tanh;
    r->gates = a->V != NULL;
}

/* Computes the steps of a run: writes h (steps,n) and updates the state c (n). In the
   loop, cp is c of the previous step, and cn is c':
       f  = sigmoid(u1 + vf c + bf)       c' = u0 + (c - u0) f
       r  = sigmoid(u2 + vr c + br)       h  = xt + (g(c') - xt) m r */
STX_INNER void stx__sru_fwd_steps_as(int fma, STX__SRU_OUT h, STX__SRU_OUT c,
                                     const stx__sru_rows *STX_RESTRICT in, int tanh_, int gates) {
    const stx_real *u0 = in->u0, *u1 = in->u1, *u2 = in->u2, *skip = in->skip, *V = in->V;
    const stx_real *vf = in->vf, *vr = in->vr, *bf = in->bf, *br = in->br, *m = in->m;
    const ptrdiff_t ldh = in->ldh, ldu = in->ldu, ldx = in->ldx, ldv = in->ldv;
    const size_t O = in->O, steps = in->steps, n = in->n;
    const stx_real alpha = in->alpha;
    const int large = in->large;
    size_t p, j, j0, j1;
    stx_real out[STX__SRU_PIECE];
    for (p = 0; p < steps; p++, h += ldh, u0 += ldu, u1 += ldu, u2 += ldu, skip += ldx, V += ldv) {
        for (j0 = 0; j0 < n; j0 = j1) {
            j1 = STX_MIN(n, j0 + STX__SRU_PIECE);
            if (large) {
                STX__SRU_PREFETCH(u0 + ldu, j0, j1);
                STX__SRU_PREFETCH(u1 + ldu, j0, j1);
                STX__SRU_PREFETCH(u2 + ldu, j0, j1);
                STX__SRU_PREFETCH(skip + ldx, j0, j1);
            }
            for (j = j0; j < j1; j++) {
                stx_real cp = c[j], f, r, cn, g, xt = alpha * skip[j];
                stx_real wf = gates ? vf[j] + V[j] : vf[j];
                stx_real wr = gates ? vr[j] + V[O + j] : vr[j];
                f = stx_fast_sigmoid(fma, STX_FMA(fma, wf, cp, u1[j] + bf[j]));
                r = stx_fast_sigmoid(fma, STX_FMA(fma, wr, cp, u2[j] + br[j]));
                cn = STX_FMA(fma, cp - u0[j], f, u0[j]);
                g = tanh_ ? stx_fast_tanh(fma, cn) : cn;
                c[j] = cn;
                out[j - j0] = STX_FMA(fma, (g - xt) * m[j], r, xt);
            }
            stx__sru_store(h + j0, out, j1 - j0, large);
        }
    }
}

STX_INNER void stx__sru_fwd_steps(int fma, STX__SRU_OUT h, STX__SRU_OUT c,
                                  const stx__sru_rows *STX_RESTRICT in) {
    if (in->tanh_ && in->gates) stx__sru_fwd_steps_as(fma, h, c, in, 1, 1);
    else if (in->tanh_) stx__sru_fwd_steps_as(fma, h, c, in, 1, 0);
    else if (in->gates) stx__sru_fwd_steps_as(fma, h, c, in, 0, 1);
    else stx__sru_fwd_steps_as(fma, h, c, in, 0, 0);
}

STX_EACH_ISA(stx__sru_fwd_steps,
             (STX__SRU_OUT h, STX__SRU_OUT c, const stx__sru_rows *STX_RESTRICT in),
             h, c, in)

/* Runs all steps of a block from the state block->c. */
static void stx__sru_fwd_unit(stx_ctx *x, stx__sru_block *block, const stx__sru_plan *plan) {
    const stx_sru_args *a = block->a;
    const size_t bytes = block->n * sizeof *block->c;
    size_t p = 0, end;
    while (p < a->T) {
        const size_t tile = p / STX_SRU_TILE, row = stx__sru_row(block, p);
        stx_real *h = a->h + row * block->O + block->o;
        if (p % STX_SRU_TILE == 0 && a->c)
            memcpy(a->c + (block->b * plan->tiles + tile) * block->O + block->o, block->c, bytes);
        end = stx__sru_run_end(block, p, STX_MIN(a->T, (tile + 1) * STX_SRU_TILE));
        if (end == p) {
            memset(h, 0, bytes);
            p++;
        } else {
            stx__sru_rows r;
            stx__sru_set_rows(&r, block, row, end - p);
            r.ldh = block->sign * (ptrdiff_t)block->O;
            STX_CALL(x, stx__sru_fwd_steps, (h, block->c, &r));
            p = end;
        }
    }
}

/* A parallel loop over all units. */
typedef struct stx__sru_loop {
    const stx_sru_args *a;
    stx__sru_plan plan;
    stx_real *scratch;              /* (threads,plan.scratch): scratch memory of each thread */
    stx_real *sums_v, *sums_b;      /* backward: sums of dv and of dbias, (B,2,O) each */
} stx__sru_loop;

static void stx__sru_run_loop(stx_ctx *x, stx_part part, const stx__sru_loop *loop) {
    const stx_sru_args *a = loop->a;
    stx_parallel(x, loop->plan.units, a->B * a->T * a->D * a->H * 16, part, loop);
}

/* Prepares the block of a unit. */
static void stx__sru_loop_unit(const stx__sru_loop *loop, const stx_share *share, size_t unit,
                               stx__sru_block *block) {
    stx_real *scratch = loop->scratch + share->thread * loop->plan.scratch;
    stx__sru_block_init(block, loop->a, &loop->plan, scratch, unit);
}

static void stx__sru_fwd_part(const stx_share *share, const void *job) {
    const stx__sru_loop *loop = (const stx__sru_loop *)job;
    const stx_sru_args *a = loop->a;
    const stx__sru_plan *plan = &loop->plan;
    size_t i;
    for (i = share->begin; i < share->end; i++) {
        stx__sru_block block;
        size_t bytes;
        stx__sru_loop_unit(loop, share, i, &block);
        bytes = block.n * sizeof *block.c;
        memcpy(block.c, a->c0 ? a->c0 + block.b * block.O + block.o : block.zeros, bytes);
        stx__sru_fwd_unit(share->x, &block, plan);
        stx__sru_fence(block.large);
        if (a->last)
            memcpy(a->last + block.b * block.O + block.o, block.c, bytes);
    }
}

STX_DEF void stx_sru_fwd(stx_ctx *x, const stx_sru_args *a) {
    stx__sru_loop loop;
    if (stx__sru_is_empty(a)) return;
    loop.a = a;
    stx__sru_make_plan(&loop.plan, a, (size_t)stx_threads(x), 0);
    loop.scratch = (stx_real *)a->work;
    loop.sums_v = loop.sums_b = NULL;
    stx__sru_run_loop(x, stx__sru_fwd_part, &loop);
}


// >>recurrence: backward

/* Recomputes the states cs (steps+1,n) and forget gates fs (steps,n) of a run. Both
   have stride `width`, and the first row of cs is an input:
       f = sigmoid(u1 + vf c + bf)        c' = u0 + (c - u0) f */
STX_INNER void stx__sru_states_as(int fma, STX__SRU_OUT cs, STX__SRU_OUT fs,
                                  const stx__sru_rows *STX_RESTRICT in, int gates) {
    const stx_real *u0 = in->u0, *u1 = in->u1, *V = in->V, *vf = in->vf, *bf = in->bf;
    const ptrdiff_t ldu = in->ldu, ldv = in->ldv;
    const size_t width = in->width, steps = in->steps, n = in->n;
    const int large = in->large;
    size_t p, j, j0, j1;
    for (p = 0; p < steps; p++, cs += width, fs += width, u0 += ldu, u1 += ldu, V += ldv) {
        for (j0 = 0; j0 < n; j0 = j1) {
            j1 = STX_MIN(n, j0 + STX__SRU_PIECE);
            if (large) {
                STX__SRU_PREFETCH(u0 + ldu, j0, j1);
                STX__SRU_PREFETCH(u1 + ldu, j0, j1);
            }
            for (j = j0; j < j1; j++) {
                stx_real wf = gates ? vf[j] + V[j] : vf[j];
                stx_real f = stx_fast_sigmoid(fma, STX_FMA(fma, wf, cs[j], u1[j] + bf[j]));
                fs[j] = f;
                cs[width + j] = STX_FMA(fma, cs[j] - u0[j], f, u0[j]);
            }
        }
    }
}

STX_INNER void stx__sru_states(int fma, STX__SRU_OUT cs, STX__SRU_OUT fs,
                               const stx__sru_rows *STX_RESTRICT in) {
    if (in->gates) stx__sru_states_as(fma, cs, fs, in, 1);
    else stx__sru_states_as(fma, cs, fs, in, 0);
}

STX_EACH_ISA(stx__sru_states,
             (STX__SRU_OUT cs, STX__SRU_OUT fs, const stx__sru_rows *STX_RESTRICT in),
             cs, fs, in)

/* The values of a backward step that do not depend on e, for one column. With dhm = dh m:
       h  = xt + (g(c') - xt) m r         dzr = dhm (g - xt) r (1-r)
                                          dc' = dhm r g' + e = dc_h + e
       c' = u0 + (c - u0) f               dzf = dc' (c - u0) f (1-f) = dc' df
   df is not the gradient of f, but the derivative of c' with respect to f's argument. */
typedef struct stx__sru_partials {
    stx_real r, dzr, dc_h, df;
} stx__sru_partials;

STX_INNER stx__sru_partials stx__sru_partials_of(int fma, int tanh_, stx_real cp, stx_real f,
                                                 stx_real cn, stx_real u0, stx_real zr,
                                                 stx_real xt, stx_real wr, stx_real dhm) {
    stx__sru_partials s;
    stx_real g = tanh_ ? stx_fast_tanh(fma, cn) : cn;
    stx_real slope = tanh_ ? 1 - g * g : 1;
    s.r = stx_fast_sigmoid(fma, STX_FMA(fma, wr, cp, zr));
    s.dzr = dhm * (g - xt) * (s.r - s.r * s.r);
    s.dc_h = dhm * s.r * slope;
    s.df = (cp - u0) * (f - f * f);
    return s;
}

/* Runs the steps of a run in reverse:
       du0 = dc' (1-f)    du1 = dzf    du2 = dzr    dx = alpha (dh - dh m r)
       e  <- dc' f + dzf vf + dzr vr
   Writes du (with a stride of O between planes), dx (stride ldd) and dV =
   (dzf c, dzr c), with the strides of V. gvf, gvr, gbf and gbr (n) accumulate dvf, dvr,
   dbf and dbr. All pointers refer to the last step. */
STX_INNER void stx__sru_bwd_steps_as(int fma, STX__SRU_OUT du, STX__SRU_OUT dx, STX__SRU_OUT dV,
                                     STX__SRU_OUT e, STX__SRU_OUT gvf, STX__SRU_OUT gvr,
                                     STX__SRU_OUT gbf, STX__SRU_OUT gbr,
                                     const stx__sru_rows *STX_RESTRICT in, int tanh_, int gates) {
    const stx_real *u0 = in->u0, *u2 = in->u2, *skip = in->skip, *V = in->V;
    const stx_real *vf = in->vf, *vr = in->vr, *br = in->br, *m = in->m;
    const stx_real *dh = in->dh, *cs = in->cs, *fs = in->fs;
    const ptrdiff_t ldh = in->ldh, ldu = in->ldu, ldx = in->ldx, ldv = in->ldv, ldd = in->ldd;
    const size_t O = in->O, width = in->width, steps = in->steps, n = in->n;
    const stx_real alpha = in->alpha;
    const int large = in->large;
    size_t p, j, j0, j1;
    stx_real out[6][STX__SRU_PIECE];
    for (p = 0; p < steps; p++, u0 -= ldu, u2 -= ldu, du -= ldu, skip -= ldx, dx -= ldd,
                           V -= ldv, dV -= ldv, dh -= ldh, cs -= width, fs -= width) {
        for (j0 = 0; j0 < n; j0 = j1) {
            j1 = STX_MIN(n, j0 + STX__SRU_PIECE);
            if (large) {
                STX__SRU_PREFETCH(u2 - ldu, j0, j1);
                STX__SRU_PREFETCH(skip - ldx, j0, j1);
                STX__SRU_PREFETCH(dh - ldh, j0, j1);
            }
            for (j = j0; j < j1; j++) {
                stx_real cp = cs[j], f = fs[j], dhm = dh[j] * m[j];
                stx_real wf = gates ? vf[j] + V[j] : vf[j];
                stx_real wr = gates ? vr[j] + V[O + j] : vr[j];
                stx__sru_partials s =
                    stx__sru_partials_of(fma, tanh_, cp, f, cs[width + j], u0[j], u2[j] + br[j],
                                         alpha * skip[j], wr, dhm);
                stx_real dc = s.dc_h + e[j], dzf = dc * s.df, dzr = s.dzr;
                out[0][j - j0] = dc - dc * f;
                out[1][j - j0] = dzf;
                out[2][j - j0] = dzr;
                out[3][j - j0] = alpha * STX_FMA(fma, -dhm, s.r, dh[j]);
                if (gates) {
                    out[4][j - j0] = dzf * cp;
                    out[5][j - j0] = dzr * cp;
                }
                gvf[j] = STX_FMA(fma, dzf, cp, gvf[j]);
                gvr[j] = STX_FMA(fma, dzr, cp, gvr[j]);
                gbf[j] += dzf;
                gbr[j] += dzr;
                e[j] = STX_FMA(fma, dzr, wr, STX_FMA(fma, dzf, wf, dc * f));
            }
            for (j = 0; j < 3; j++) stx__sru_store(du + j * O + j0, out[j], j1 - j0, large);
            stx__sru_store(dx + j0, out[3], j1 - j0, large);
            if (gates)
                for (j = 0; j < 2; j++) stx__sru_store(dV + j * O + j0, out[4 + j], j1 - j0, large);
        }
    }
}

STX_INNER void stx__sru_bwd_steps(int fma, STX__SRU_OUT du, STX__SRU_OUT dx, STX__SRU_OUT dV,
                                  STX__SRU_OUT e, STX__SRU_OUT gvf, STX__SRU_OUT gvr,
                                  STX__SRU_OUT gbf, STX__SRU_OUT gbr,
                                  const stx__sru_rows *STX_RESTRICT in) {
    if (in->tanh_ && in->gates)
        stx__sru_bwd_steps_as(fma, du, dx, dV, e, gvf, gvr, gbf, gbr, in, 1, 1);
    else if (in->tanh_)
        stx__sru_bwd_steps_as(fma, du, dx, dV, e, gvf, gvr, gbf, gbr, in, 1, 0);
    else if (in->gates)
        stx__sru_bwd_steps_as(fma, du, dx, dV, e, gvf, gvr, gbf, gbr, in, 0, 1);
    else
        stx__sru_bwd_steps_as(fma, du, dx, dV, e, gvf, gvr, gbf, gbr, in, 0, 0);
}

STX_EACH_ISA(stx__sru_bwd_steps,
             (STX__SRU_OUT du, STX__SRU_OUT dx, STX__SRU_OUT dV, STX__SRU_OUT e, STX__SRU_OUT gvf,
              STX__SRU_OUT gvr, STX__SRU_OUT gbf, STX__SRU_OUT gbr,
              const stx__sru_rows *STX_RESTRICT in),
             du, dx, dV, e, gvf, gvr, gbf, gbr, in)

/* Scratch memory of the backward pass, in rows of plan.width. Sums are accumulated per
   tile and then over the tiles, which reduces rounding errors. */
typedef struct stx__sru_scratch {
    stx_real *cs;       /* STX_SRU_TILE + 1 rows: states before the first step and after each
                           step */
    stx_real *fs;       /* STX_SRU_TILE rows: forget gates */
    stx_real *dx;       /* STX_SRU_TILE rows: dx, if it cannot be written directly */
    stx_real *sums;     /* 4 rows: dvf, dvr, dbf, dbr of a tile */
    stx_real *total;    /* 4 rows: sums over all tiles */
    stx_real *e;        /* 1 row: gradient of c' from later times */
} stx__sru_scratch;

static void stx__sru_scratch_init(stx__sru_scratch *w, const stx__sru_block *block, size_t width) {
    w->cs = block->scratch;
    w->fs = w->cs + (STX_SRU_TILE + 1) * width;
    w->dx = w->fs + STX_SRU_TILE * width;
    w->sums = w->dx + STX_SRU_TILE * width;
    w->total = w->sums + 4 * width;
    w->e = w->total + 4 * width;
}

/* Recomputes the states and forget gates of one tile, steps first .. last - 1. */
static void stx__sru_tile_states(stx_ctx *x, const stx__sru_block *block,
                                 const stx__sru_plan *plan, stx__sru_scratch *w, size_t first,
                                 size_t last) {
    const size_t tile = block->b * plan->tiles + first / STX_SRU_TILE;
    const size_t width = plan->width, bytes = block->n * sizeof *w->cs;
    stx__sru_rows r;
    size_t p, end;
    memcpy(w->cs, block->a->c + tile * block->O + block->o, bytes);
    for (p = first; p < last; p = end) {
        stx_real *c = w->cs + (p - first) * width;
        end = stx__sru_run_end(block, p, last);
        if (end == p) {     /* padding does not change the state */
            memcpy(c + width, c, bytes);
            end++;
        } else {
            stx__sru_set_rows(&r, block, stx__sru_row(block, p), end - p);
            r.width = width;
            STX_CALL(x, stx__sru_states, (c, w->fs + (p - first) * width, &r));
        }
    }
}

/* Sets the gradients of a padded row to 0. */
static void stx__sru_bwd_padding(const stx__sru_block *block, size_t row) {
    const stx_sru_args *a = block->a;
    const size_t O = block->O, o = block->o, bytes = block->n * sizeof *a->du;
    size_t i;
    for (i = 0; i < a->k; i++) memset(a->du + row * block->ldu + i * O + o, 0, bytes);
    if (a->dxr && !a->add_xr) memset(a->dxr + row * O + o, 0, bytes);
    if (a->dV)
        for (i = 0; i < 2; i++) memset(a->dV + (row * 2 + i) * O + o, 0, bytes);
}

/* Runs the backward pass of the run p .. end - 1, in the tile that begins at step
   `first`. */
static void stx__sru_bwd_run(stx_ctx *x, const stx__sru_block *block, size_t width,
                             stx__sru_scratch *w, stx__sru_rows *r, size_t first, size_t p,
                             size_t end) {
    const stx_sru_args *a = block->a;
    const size_t O = block->O, o = block->o, row = stx__sru_row(block, end - 1);
    stx_real *du = a->du + row * block->ldu + o;
    stx_real *dV = w->dx; /* never written if there is no V */
    stx_real *dx = w->dx + (end - 1 - first) * width;
    int add = 0;
    size_t j;

    /* dx is written to plane 3 of du, to dxr, or to a temporary buffer, which is then
       added to dxr or discarded */
    r->ldd = (ptrdiff_t)width;
    if (a->k == 4) {
        dx = du + 3 * O;
        r->ldd = r->ldu;
    } else if (a->dxr && !a->add_xr) {
        dx = a->dxr + row * O + o;
        r->ldd = block->sign * (ptrdiff_t)O;
    } else {
        add = a->dxr != NULL;
    }
    if (a->dV) dV = a->dV + row * 2 * O + o;
    STX_CALL(x, stx__sru_bwd_steps,
             (du, dx, dV, w->e, w->sums, w->sums + width, w->sums + 2 * width, w->sums + 3 * width,
              r));
    for (; add && end > p; end--) {
        const stx_real *from = w->dx + (end - 1 - first) * width;
        stx_real *to = a->dxr + stx__sru_row(block, end - 1) * O + o;
        for (j = 0; j < block->n; j++) to[j] += from[j];
    }
}

/* Runs the backward pass of a tile. */
static void stx__sru_bwd_tile(stx_ctx *x, const stx__sru_block *block, const stx__sru_plan *plan,
                              stx__sru_scratch *w, size_t tile) {
    const stx_sru_args *a = block->a;
    const size_t first = tile * STX_SRU_TILE, last = STX_MIN(a->T, first + STX_SRU_TILE);
    size_t p, end;
    stx__sru_tile_states(x, block, plan, w, first, last);
    for (end = last; end > first; end = p) {
        const size_t row = stx__sru_row(block, end - 1);
        stx__sru_rows r;
        p = stx__sru_run_start(block, end, first);
        if (p == end) {
            p--;
            stx__sru_bwd_padding(block, row);
            continue;
        }
        stx__sru_set_rows(&r, block, row, end - p);
        r.width = plan->width;
        r.dh = a->dh ? a->dh + row * block->O + block->o : block->zeros;
        r.ldh = a->dh ? block->sign * (ptrdiff_t)block->O : 0;
        r.cs = w->cs + (end - 1 - first) * plan->width;
        r.fs = w->fs + (end - 1 - first) * plan->width;
        stx__sru_bwd_run(x, block, plan->width, w, &r, first, p, end);
    }
}

static void stx__sru_bwd_part(const stx_share *share, const void *job) {
    const stx__sru_loop *loop = (const stx__sru_loop *)job;
    const stx_sru_args *a = loop->a;
    const stx__sru_plan *plan = &loop->plan;
    size_t i;
    for (i = share->begin; i < share->end; i++) {
        stx__sru_block block;
        stx__sru_scratch w;
        size_t tile, at, j, g;
        stx__sru_loop_unit(loop, share, i, &block);
        at = block.b * block.O + block.o;       /* the block's offset in (B,O) */
        stx__sru_scratch_init(&w, &block, plan->width);
        for (j = 0; j < block.n; j++) w.e[j] = a->dlast ? a->dlast[at + j] : 0;
        for (j = 0; j < 4 * plan->width; j++) w.total[j] = 0;
        for (tile = plan->tiles; tile-- > 0;) {
            for (j = 0; j < 4 * plan->width; j++) w.sums[j] = 0;
            stx__sru_bwd_tile(share->x, &block, plan, &w, tile);
            for (j = 0; j < 4 * plan->width; j++) w.total[j] += w.sums[j];
        }
        stx__sru_fence(block.large);

        for (g = 0; g < 4; g++) {
            stx_real *sums = g < 2 ? loop->sums_v : loop->sums_b;
            const size_t row = block.b * 2 + g % 2;
            memcpy(sums + row * block.O + block.o, w.total + g * plan->width,
                   block.n * sizeof *sums);
        }
        if (a->dc0)
            for (j = 0; j < block.n; j++) a->dc0[at + j] += w.e[j];
    }
}

STX_DEF void stx_sru_bwd(stx_ctx *x, const stx_sru_args *a) {
    stx__sru_loop loop;
    size_t O;
    if (stx__sru_is_empty(a)) return;
    loop.a = a;
    stx__sru_make_plan(&loop.plan, a, (size_t)stx_threads(x), 1);
    O = loop.plan.O;
    loop.sums_v = (stx_real *)a->work;
    loop.sums_b = loop.sums_v + 2 * a->B * O;
    loop.scratch = loop.sums_b + 2 * a->B * O;
    stx__sru_run_loop(x, stx__sru_bwd_part, &loop);
    if (a->dv) stx_sum_rows(x, a->dv, loop.sums_v, a->B, 2 * O);
    if (a->dbias) stx_sum_rows(x, a->dbias, loop.sums_b, a->B, 2 * O);
}


// >>stack: creation

static int stx__sru_bad(stx_ctx *x, const char *field, double got, const char *expected) {
    return stx_bad_value(x, "stx_sru_create", field, got, expected);
}

/* Returns O, the number of columns. */
static size_t stx__sru_columns(const stx_sru_desc *d) {
    return d->hidden * (d->bidirectional ? 2 : 1);
}

/* Returns P of layer l, the width of its projection. */
static size_t stx__sru_proj(const stx_sru_desc *d, size_t l) {
    return d->projs ? d->projs[l] : d->proj;
}

/* Returns Ci of layer l, its number of input features. */
static size_t stx__sru_inputs(const stx_sru_desc *d, size_t l) {
    const size_t O = stx__sru_columns(d);
    return l || (d->input_first && d->input != O) ? O : d->input;
}

/* Returns k of layer l, its number of planes. */
static size_t stx__sru_planes(const stx_sru_desc *d, size_t l) {
    return !d->no_skip && stx__sru_inputs(d, l) != stx__sru_columns(d) ? 4 : 3;
}

static int stx__sru_is_srupp(const stx_sru_desc *d) {
    return d->transform == STX_SRU_ATTENTION && !d->custom;
}

/* Returns 1 if layer l (counted from 0) attends. The authors' code counts layers from
   1: with attention_every = 5, layers 5, 10, .. attend. */
static int stx__sru_attends(const stx_sru_desc *d, size_t l) {
    if (!stx__sru_is_srupp(d) || d->no_attention) return 0;
    if (d->attention_last) return d->layers - l <= d->attention_last;
    return (l + 1) % d->attention_every == 0;
}

/* Replaces STX_SRU_LITERAL with the flags that apply to the model. Returns 0 and sets
   an error if a flag that was set individually does not apply or is unknown. */
static int stx__sru_check_literal(stx_ctx *x, stx_sru_desc *d) {
    const unsigned all = (unsigned)STX_SRU_LITERAL | STX_SRU_LITERAL_NORM;
    unsigned apply = 0;
    if (stx__sru_is_srupp(d) && !d->no_attention && d->norm == STX_SRU_NORM_BEFORE)
        apply = STX_SRU_LITERAL_NORM;
    if (d->literal & STX_SRU_LITERAL_NORM & ~apply) {
        stx_fail(x, STX_ERR_ARG,
                 "stx_sru_create: literal: STX_SRU_LITERAL_NORM requires STX_SRU_ATTENTION with "
                 "STX_SRU_NORM_BEFORE; STX_SRU_LITERAL selects the flags that apply");
        return 0;
    }
    if (d->literal & ~all)
        return stx__sru_bad(x, "literal", (double)d->literal,
                            "STX_SRU_LITERAL or STX_SRU_LITERAL_NORM");
    if (d->literal & STX_SRU_LITERAL) d->literal = apply;
    return 1;
}

static int stx__sru_check_attention(stx_ctx *x, stx_sru_desc *d) {
    const size_t most = (size_t)1 << 28;
    const int srupp = stx__sru_is_srupp(d);
    size_t l;
    if (srupp && d->attention_every && d->attention_last) {
        stx_fail(x, STX_ERR_ARG,
                 "stx_sru_create: attention_last: expected 0 with attention_every = %zu, got %zu",
                 d->attention_every, d->attention_last);
        return 0;
    }
    /* with attention_last, attention_every stays 0, so that a resolved desc is valid
       when resolved again */
    if (!d->attention_every && !d->attention_last) d->attention_every = 1;
    if (srupp && d->attention_every > d->layers)
        return stx__sru_bad(x, "attention_every", (double)d->attention_every,
                            "at most the number of layers (for no attention, set no_attention)");
    if (d->attention_last > d->layers)
        return stx__sru_bad(x, "attention_last", (double)d->attention_last,
                            "at most the number of layers");

    for (l = 0; l < d->layers; l++) {
        const size_t P = stx__sru_proj(d, l);
        if (P > most)
            return stx__sru_bad(x, "proj", (double)P, "at most 2^28");
        if (srupp && !P)
            return stx__sru_bad(x, "projs", 0, "1 or more in every layer of SRU++");
        if (stx__sru_attends(d, l) && (P % d->heads || d->heads > 256)) {
            stx_fail(x, STX_ERR_ARG,
                     "stx_sru_create: heads: expected a divisor of proj %zu in layer %zu that is "
                     "at most 256, got %zu", P, l, d->heads);
            return 0;
        }
    }
    return 1;
}

/* Copies the desc, fills in the defaults and checks it. If it is invalid, returns 0
   and, unless x is NULL, sets an error. */
static int stx__sru_resolve(stx_ctx *x, const stx_sru_desc *from, stx_sru_desc *d) {
    STX__FP_SCOPE;
    const size_t most = (size_t)1 << 28;
    *d = *from;
    if (d->transform != STX_SRU_LINEAR && d->transform != STX_SRU_ATTENTION)
        return stx__sru_bad(x, "transform", d->transform, "STX_SRU_LINEAR or STX_SRU_ATTENTION");
    if (!d->hidden) d->hidden = d->bidirectional ? d->input / 2 : d->input;
    if (!d->layers) d->layers = 2;
    if (!d->heads) d->heads = 1;

    if (!d->input || d->input > most)
        return stx__sru_bad(x, "input", (double)d->input, "1 to 2^28");
    if (!d->hidden || d->hidden > most)
        return stx__sru_bad(x, "hidden", (double)d->hidden, "1 to 2^28");
    if (d->layers > 4096)
        return stx__sru_bad(x, "layers", (double)d->layers, "1 to 4096");
    if (stx__sru_is_srupp(d)) {
        if (!d->proj && !d->projs) d->proj = STX_MAX(stx__sru_columns(d) / 4, 1);
        d->init_xavier = 1;
    }
    if (d->v_init == 0) d->v_init = d->init_xavier ? 1 : sqrt(1.5);

    if (d->norm < STX_SRU_NORM_NONE || d->norm > STX_SRU_NORM_AFTER)
        return stx__sru_bad(x, "norm", d->norm, "STX_SRU_NORM_NONE, _BEFORE or _AFTER");
    if (!stx__sru_check_literal(x, d)) return 0;
    if (!(d->dropout >= 0 && d->dropout < 1))
        return stx__sru_bad(x, "dropout", d->dropout, "at least 0 and below 1");
    if (!(d->rnn_dropout >= 0 && d->rnn_dropout < 1))
        return stx__sru_bad(x, "rnn_dropout", d->rnn_dropout, "at least 0 and below 1");
    if (!(d->attn_dropout >= 0 && d->attn_dropout < 1))
        return stx__sru_bad(x, "attn_dropout", d->attn_dropout, "at least 0 and below 1");
    if (!(fabs(d->highway_bias) <= 80))
        return stx__sru_bad(x, "highway_bias", d->highway_bias, "-80 to 80");
    if (!(d->v_init > 0 && d->v_init < 1e6) && d->v_init != -1)
        return stx__sru_bad(x, "v_init", d->v_init, "more than 0, or -1 for zeros");
    if (!(fabs(d->alpha_init) < 1e6))
        return stx__sru_bad(x, "alpha_init", d->alpha_init, "-1e6 to 1e6");
    if (!stx__sru_check_attention(x, d)) return 0;

    d->recompute_layers = STX_MIN(d->recompute_layers, d->layers);
    return 1;
}

STX_DEF size_t stx_sru_count(const stx_sru_desc *desc) {
    stx_sru_desc d;
    size_t l, n = 0, O;
    if (!desc || !stx__sru_resolve(NULL, desc, &d)) return 0;
    O = stx__sru_columns(&d);
    if (d.input_first && d.input != O) n = stx_size_add(n, d.input, O);
    for (l = 0; l < d.layers; l++) {
        const size_t Ci = stx__sru_inputs(&d, l), P = stx__sru_proj(&d, l);
        n = stx_size_add(n, d.v1 ? 2 : 4, O);
        if (d.norm) n = stx_size_add(n, 2, d.norm == STX_SRU_NORM_BEFORE ? Ci : O);
        if (d.custom) continue;
        n = stx_size_add(n, P, Ci);
        n = stx_size_add(n, stx__sru_planes(&d, l) * O, P ? P : Ci);
        if (d.transform == STX_SRU_ATTENTION && !d.no_attn_norm) n = stx_size_add(n, 2, P);
        if (stx__sru_attends(&d, l)) n = stx_size_add(stx_size_add(n, 2 * P, P), 1, 1);
    }
    return n;
}

static stx_tensor *stx__sru_param(stx_params *params, const char *prefix, size_t l,
                                  const char *name, int init, double a, size_t d0, size_t d1) {
    char full[160];
    snprintf(full, sizeof full, "%slayers.%zu.%s", prefix, l, name);
    return stx_param(params, init, a, full, d0, d1, 0, 0);
}

/* Scales the initial W3 as the authors' code does. With SRU++, the scale depends on the
   dropout before W3. Version 2.6 scales all planes for rnn_dropout and norm, and plane
   0 for dropout. It scales planes 1 and 2 to variance 1/2, because v c adds the other
   half. With rescale, it multiplies plane 3 by alpha, because the cell multiplies the
   highway by alpha only if k = 3. */
static void stx__sru_scale_w3(stx_ctx *x, const stx_sru_desc *d, size_t l,
                              const stx_sru_layer *p) {
    const size_t O = stx__sru_columns(d);
    double plane[4], all;
    size_t i;
    if (d->transform == STX_SRU_ATTENTION) {
        stx_param_scale(x, p->w3, 0, p->k * O, sqrt(1 - d->dropout));
        return;
    }
    if (d->init_xavier) return;
    all = sqrt(1 - d->rnn_dropout) * (d->norm ? 0.1 : 1);
    plane[0] = sqrt(1 - (l + 1 < d->layers ? d->dropout : 0));
    plane[1] = plane[2] = d->v1 ? 1 : sqrt(0.5);
    plane[3] = d->rescale ? sqrt(1 + 2 * stx_math_exp(d->highway_bias)) : 1;
    for (i = 0; i < p->k; i++) stx_param_scale(x, p->w3, i * O, (i + 1) * O, all * plane[i]);
}

/* Creates the parameters of one layer. W1 and W3 have variance 1 / fan in (1709.02755,
   section 3.2); with SRU++ or init_xavier, they are Xavier-uniform (Glorot and Bengio,
   2010). By default, alpha_attn starts at 0, as in ReZero (2003.04887). */
static void stx__sru_create_layer(stx_params *params, const char *prefix, const stx_sru_desc *d,
                                  size_t l, stx_sru_layer *p) {
    stx_ctx *x = params->ctx;
    const size_t O = stx__sru_columns(d), Ci = stx__sru_inputs(d, l);
    const size_t P = d->custom ? 0 : stx__sru_proj(d, l), fan = P ? P : Ci;
    const size_t norm = d->norm == STX_SRU_NORM_BEFORE ? Ci : O;
    double bound;
    p->Ci = Ci;
    p->P = P;
    p->k = stx__sru_planes(d, l);
    p->attends = stx__sru_attends(d, l);
    p->highway = !d->no_skip && p->k == 3;
    p->alpha = 1;
    if (d->rescale && p->highway) p->alpha = (stx_real)sqrt(1 + 2 * stx_math_exp(d->highway_bias));

    if (P) {
        bound = d->init_xavier ? sqrt(6.0 / (double)(Ci + P)) : sqrt(3.0 / (double)Ci);
        p->w1 = stx__sru_param(params, prefix, l, "w1", STX_UNIFORM, bound, P, Ci);
    }
    if (p->attends) {
        bound = sqrt(2.0 / (double)P);      /* Xavier: sqrt(6 / (P + 2 P)) */
        p->w2 = stx__sru_param(params, prefix, l, "w2", STX_UNIFORM, bound, 2 * P, P);
        p->alpha_attn = stx__sru_param(params, prefix, l, "alpha", STX_CONSTANT, d->alpha_init,
                                       1, 0);
    }
    if (P && d->transform == STX_SRU_ATTENTION && !d->no_attn_norm) {
        p->attn_gain = stx__sru_param(params, prefix, l, "attn_norm.weight", STX_CONSTANT, 1,
                                      P, 0);
        p->attn_shift = stx__sru_param(params, prefix, l, "attn_norm.bias", STX_ZEROS, 0, P, 0);
    }
    if (!d->custom) {
        const size_t rows = p->k * O;
        bound = d->init_xavier ? sqrt(6.0 / (double)(fan + rows)) : sqrt(3.0 / (double)fan);
        p->w3 = stx__sru_param(params, prefix, l, "w3", STX_UNIFORM, bound, rows, fan);
        stx__sru_scale_w3(x, d, l, p);
    }

    if (!d->v1)
        p->v = stx__sru_param(params, prefix, l, "v", d->v_init > 0 ? STX_UNIFORM : STX_ZEROS,
                              d->v_init, 2, O);
    p->bias = stx__sru_param(params, prefix, l, "bias", STX_ZEROS, 0, 2, O);
    stx_param_elementwise(p->v);
    stx_param_elementwise(p->bias);
    if (d->highway_bias != 0) stx_param_fill(x, p->bias, 1, 2, d->highway_bias);
    if (d->norm) {
        p->gain = stx__sru_param(params, prefix, l, "norm.weight", STX_CONSTANT, 1, norm, 0);
        p->shift = stx__sru_param(params, prefix, l, "norm.bias", STX_ZEROS, 0, norm, 0);
    }
}

STX_DEF stx_sru *stx_sru_create(stx_params *params, const char *prefix, const stx_sru_desc *desc) {
    STX__FP_SCOPE;
    stx_ctx *x = params ? params->ctx : NULL;
    stx_sru *m;
    stx_sru_desc *d;
    size_t l;
    if (!stx_ok(x)) return NULL;
    if (!desc) {
        stx_fail(x, STX_ERR_ARG,
                 "stx_sru_create: expected a desc with at least input set, got NULL");
        return NULL;
    }
    if (!prefix) prefix = "";
    if (strlen(prefix) > 96) {
        stx_fail(x, STX_ERR_ARG, "stx_sru_create: prefix: expected at most 96 bytes, got %zu",
                 strlen(prefix));
        return NULL;
    }
    m = (stx_sru *)stx_persist(x, sizeof *m);
    if (!m || !stx__sru_resolve(x, desc, &m->desc)) return NULL;
    d = &m->desc;
    m->ctx = x;
    m->O = stx__sru_columns(d);
    m->layer = (stx_sru_layer *)stx_persist(x, d->layers * sizeof *m->layer);
    m->attended = (stx_attention_record *)stx_persist(x, d->layers * sizeof *m->attended);
    if (d->projs) {
        size_t *projs = (size_t *)stx_persist(x, d->layers * sizeof *projs);
        if (projs) memcpy(projs, d->projs, d->layers * sizeof *projs);
        d->projs = projs;
    }
    if (!stx_ok(x)) return NULL;

    if (d->input_first && d->input != m->O) {
        char name[160];
        /* SRU: as in PyTorch's Linear, even with init_xavier; SRU++: Xavier */
        double bound = 1 / sqrt((double)d->input);
        if (d->transform == STX_SRU_ATTENTION) bound = sqrt(6.0 / (double)(d->input + m->O));
        snprintf(name, sizeof name, "%sinput.weight", prefix);
        m->w_input = stx_param(params, STX_UNIFORM, bound, name, m->O, d->input, 0, 0);
        stx_param_elementwise(m->w_input);
    }
    for (l = 0; l < d->layers && stx_ok(x); l++)
        stx__sru_create_layer(params, prefix, d, l, &m->layer[l]);
    return stx_ok(x) ? m : NULL;
}


// >>stack: forward

STX_DEF stx_ids *stx_sru_lengths(stx_ctx *x, const size_t *length, size_t B, size_t T) {
    int32_t *pad;
    size_t b, t;
    if (!stx_ok(x)) return NULL;
    if (!length || !B || !T || T > SIZE_MAX / sizeof *pad / B) {
        stx_fail(x, STX_ERR_ARG,
                 "stx_sru_lengths: expected lengths, B >= 1 and T >= 1, got %s, B = %zu and "
                 "T = %zu", length ? "lengths" : "NULL", B, T);
        return NULL;
    }
    for (b = 0; b < B; b++) {
        if (length[b] <= T) continue;
        stx_fail(x, STX_ERR_ARG, "stx_sru_lengths: length of row %zu: expected at most T = %zu, "
                 "got %zu", b, T, length[b]);
        return NULL;
    }
    pad = (int32_t *)stx_step_host_bytes(x, B * T * sizeof *pad);
    if (!pad) return NULL;
    for (b = 0; b < B; b++)
        for (t = 0; t < T; t++) pad[b * T + t] = t >= length[b];
    return stx_tokens(x, pad, B, T);
}

/* Sets the rows of h (B,T,O) to 0 where `padded` (B,T), an array in host memory, is
   nonzero. This case is rare, so the function simply multiplies by a mask. */
static stx_tensor *stx__sru_zero_rows(stx_ctx *x, stx_tensor *h, const unsigned char *padded) {
    size_t rows, O, i, o;
    stx_real *mask;
    if (!h) return NULL;
    rows = h->dim[0] * h->dim[1];
    O = h->dim[2];
    mask = (stx_real *)stx_step_host_bytes(x, stx_bytes_of(rows, O, sizeof *mask));
    if (!mask) return NULL;
    for (i = 0; i < rows; i++)
        for (o = 0; o < O; o++) mask[i * O + o] = (stx_real)(padded[i] == 0);
    return stx_mul(x, h, stx_input(x, mask, h->dim[0], h->dim[1], O, 0));
}

/* query (B,T,P), kv (B,M+T,2P) -> attention output (B,T,P). If all keys that a query
   sees are padding, its output is 0. Such a query is padding too, because it sees
   itself. The recurrence does not read U at padding, so the value has no effect. */
static stx_tensor *stx__sru_attend(stx_sru *m, size_t l, stx_tensor *query, stx_tensor *kv,
                                   const stx_ids *pad, size_t window) {
    stx_attention_in a;
    stx_attention_desc d;
    if (!query || !kv) return NULL;
    memset(&a, 0, sizeof a);
    memset(&d, 0, sizeof d);
    a.q = query;
    a.kv = kv;
    a.pad = pad;
    a.record = &m->attended[l];
    d.heads = m->desc.heads;
    d.span = window;
    d.not_causal = m->desc.not_causal;
    d.dropout = m->desc.attn_dropout;
    return stx_attention(m->ctx, &a, &d);
}

/* Runs the part of a transform after attention. `a` is the attention output, or NULL in
   layers that only project:
       y = LN(z + alpha_attn a)        U = W3 dropout(y)
   With attn_norm_first, the y of a layer that attends has no LN. */
static stx_tensor *stx__sru_after(stx_sru *m, const stx_sru_layer *p, stx_tensor *z,
                                  stx_tensor *a) {
    stx_ctx *x = m->ctx;
    stx_tensor *y = p->attends ? stx_rezero(x, z, a, p->alpha_attn) : z;
    if (p->attn_gain && (!p->attends || !m->desc.attn_norm_first))
        y = stx_layernorm(x, y, p->attn_gain, p->attn_shift, 1e-5);
    if (m->desc.transform == STX_SRU_ATTENTION) y = stx_dropout(x, y, m->desc.dropout);
    return stx_linear(x, y, p->w3, NULL, STX_ACT_NONE);
}

/* Returns U (B,T,k O) of layer l (2102.12459, section 3). h (B,T,Ci) is the layer's
   input, and memory (B,M,Ci) is its memory or NULL, both after layer norm. pad is the
   padding (B,M+T) of all keys. */
static stx_tensor *stx__sru_transform(stx_sru *m, size_t l, stx_tensor *h, stx_tensor *memory,
                                      const stx_ids *pad, size_t window) {
    stx_ctx *x = m->ctx;
    const stx_sru_layer *p = &m->layer[l];
    const int norm_first = p->attn_gain && m->desc.attn_norm_first;
    stx_tensor *z, *all, *query, *kv;
    size_t T, MT;
    if (!h) return NULL;
    if (!p->w1) return stx_linear(x, h, p->w3, NULL, STX_ACT_NONE);
    z = stx_linear(x, h, p->w1, NULL, STX_ACT_NONE);
    if (!p->attends) return stx__sru_after(m, p, z, NULL);

    all = z;
    if (memory) all = stx_concat(x, stx_linear(x, memory, p->w1, NULL, STX_ACT_NONE), z);
    if (norm_first) all = stx_layernorm(x, all, p->attn_gain, p->attn_shift, 1e-5);
    if (!all) return NULL;

    /* Queries are the rows of the segment, the last T of `all`. stx__sru_after adds z
       to the attention output, before the norm. */
    T = h->dim[1];
    MT = all->dim[1];
    query = all;
    if (MT > T) query = norm_first ? stx_slice(x, all, MT - T, MT) : z;
    kv = stx_linear(x, all, p->w2, NULL, STX_ACT_NONE);
    return stx__sru_after(m, p, z, stx__sru_attend(m, l, query, kv, pad, window));
}

/* Returns the padding (B,M+T) of all keys: `before` (B,M), followed by `pad` (B,T).
   Either may be NULL. */
static const stx_ids *stx__sru_key_pad(stx_ctx *x, const stx_ids *before, const stx_ids *pad,
                                       size_t B, size_t M, size_t T) {
    int32_t *all;
    size_t b;
    if (!before && !pad) return NULL;
    if (!M) return pad;
    all = (int32_t *)stx_step_host_bytes(x, B * (M + T) * sizeof *all);
    if (!all) return NULL;
    memset(all, 0, B * (M + T) * sizeof *all);
    for (b = 0; b < B; b++) {
        int32_t *row = all + b * (M + T);
        if (before) memcpy(row, before->data + b * M, M * sizeof *row);
        if (pad) memcpy(row + M, pad->data + b * T, T * sizeof *row);
    }
    return stx_tokens(x, all, B, M + T);
}

/* Arguments of stx__sru_layer other than its tensors. */
typedef struct stx__sru_job {
    stx_sru *m;
    size_t   l, window;
    const stx_ids *pad;             /* (B,T): padding of the segment */
    const stx_ids *key_pad;         /* (B,M+T): padding of all keys */
    const unsigned char *padded;    /* (B,T) in host memory with zero_pads, else NULL */
    int memory, c0, last;           /* 1 for each optional tensor that is present */
} stx__sru_job;

/* *mask receives a dropout mask (B,O) for all time steps, or NULL if nothing is
   dropped. Returns 0 after an error. */
static int stx__sru_mask(stx_sru *m, size_t l, size_t B, stx_tensor **mask) {
    stx_ctx *x = m->ctx;
    stx_tensor *ones;
    *mask = NULL;
    if (!(m->desc.dropout > 0) || l + 1 >= m->desc.layers || !stx_training(x)) return 1;
    ones = stx_new_f32(x, B, m->O, 0, 0);
    if (!ones) return 0;
    STX_RUN(x, stx_fill, (x, ones->data, ones->size, 1));
    *mask = stx_dropout(x, ones, m->desc.dropout);
    return 1;
}

/* Returns U of a custom transform. *V receives the transform's V, if it has one. */
static stx_tensor *stx__sru_custom(stx_sru *m, size_t l, stx_tensor *in, size_t size,
                                   stx_tensor **V) {
    const char *op = "stx_sru_forward";
    stx_tensor *U = NULL;
    if (in && !m->desc.custom(m->ctx, m->desc.user, l, in, &U, V)) {
        stx_fail(m->ctx, STX_ERR_ARG, "%s: the custom transform of layer %zu failed", op, l);
        return NULL;
    }
    if (U && U->size == size) return U;
    stx_fail(m->ctx, STX_ERR_SHAPE,
             "%s: custom transform of layer %zu: expected U of shape (B,T,%zu,%zu) with %zu "
             "elements, got %zu", op, l, m->layer[l].k, m->O, size, U ? U->size : 0);
    return NULL;
}

/* One layer, as a function that stx_recompute can call. given[0] is h (B,T,Ci),
   followed by the memory and the initial state if they are present. Returns the layer's
   output (B,T,O); out[0] receives the final state. */
static stx_tensor *stx__sru_layer(stx_ctx *x, void *user, stx_tensor **given, stx_tensor **out) {
    STX__FP_SCOPE;
    const stx__sru_job *job = (const stx__sru_job *)user;
    stx_sru *m = job->m;
    const stx_sru_desc *d = &m->desc;
    const stx_sru_layer *p = &m->layer[job->l];
    stx_tensor *h = given[0], *in = h, *memory = job->memory ? given[1] : NULL, *U, *V = NULL;
    const size_t B = h->dim[0], T = h->dim[1];
    stx_sru_recurrence_in cell;
    memset(&cell, 0, sizeof cell);

    if (d->norm == STX_SRU_NORM_BEFORE) {
        in = stx_layernorm(x, in, p->gain, p->shift, 1e-5);
        if (memory && !(d->literal & STX_SRU_LITERAL_NORM))
            memory = stx_layernorm(x, memory, p->gain, p->shift, 1e-5);
    }
    in = stx_dropout_variational(x, in, d->rnn_dropout); /* no dropout on the memory */
    if (!stx__sru_mask(m, job->l, B, &cell.mask)) return NULL;
    if (d->custom) U = stx__sru_custom(m, job->l, in, B * T * p->k * m->O, &V);
    else U = stx__sru_transform(m, job->l, in, memory, job->key_pad, job->window);
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
    return job->padded ? stx__sru_zero_rows(x, h, job->padded) : h;
}

/* Checks h and io. *M receives the number of rows of memory. */
static int stx__sru_check_io(const stx_sru *m, const stx_tensor *h, const stx_sru_io *io,
                             size_t *M) {
    const char *op = "stx_sru_forward";
    stx_ctx *x = m->ctx;
    char shape[64];
    size_t l, B;
    int first = 1;
    *M = 0;
    if (h->ndim != 3 || h->dim[2] != m->desc.input) {
        snprintf(shape, sizeof shape, "(B,T,%zu), that is (B,T,input)", m->desc.input);
        return stx__sru_bad_shape(x, op, "x", shape, h);
    }
    B = h->dim[0];
    if (!stx__sru_check_ids(x, op, "pad", io->pad, B, h->dim[1])) return 0;
    if (io->window && m->desc.not_causal) {
        stx_fail(x, STX_ERR_SHAPE, "%s: window: expected 0 if not_causal is set, got %zu", op,
                 io->window);
        return 0;
    }

    for (l = 0; l < m->desc.layers; l++) {
        const stx_tensor *memory = io->memory ? io->memory[l] : NULL;
        const stx_tensor *c0 = io->c0 ? io->c0[l] : NULL;
        const size_t Ci = m->layer[l].Ci, rows = memory ? memory->dim[1] : 0;
        if (c0 && c0->size != B * m->O) {
            snprintf(shape, sizeof shape, "(%zu,%zu), that is (B,O)", B, m->O);
            return stx__sru_bad_shape(x, op, "c0", shape, c0);
        }
        if (!m->layer[l].attends) continue;
        if (memory && (memory->ndim != 3 || memory->dim[0] != B || memory->dim[2] != Ci)) {
            snprintf(shape, sizeof shape, "(%zu,M,%zu), that is (B,M,Ci)", B, Ci);
            return stx__sru_bad_shape(x, op, "memory", shape, memory);
        }
        if (!first && *M != rows) {
            stx_fail(x, STX_ERR_SHAPE,
                     "%s: memory of layer %zu: expected %zu rows, as in the layers before it, "
                     "got %zu", op, l, *M, rows);
            return 0;
        }
        *M = rows;
        first = 0;
    }
    return stx__sru_check_ids(x, op, "memory_pad", io->memory_pad, B, *M);
}

STX_DEF stx_tensor *stx_sru_forward(stx_sru *m, stx_tensor *h, stx_sru_io *io) {
    stx_ctx *x = m ? m->ctx : NULL;
    const stx_sru_desc *d;
    const stx_ids *key_pad = NULL;
    unsigned char *padded = NULL;
    stx_sru_io none;
    size_t l, B, T, M, i;
    int attends = 0;
    if (!stx_ok(x) || !h) return NULL;
    memset(&none, 0, sizeof none);
    if (!io) io = &none;
    if (!stx__sru_check_io(m, h, io, &M)) return NULL;
    d = &m->desc;
    B = h->dim[0];
    T = h->dim[1];

    for (l = 0; l < d->layers; l++) attends |= m->layer[l].attends;
    if (attends) key_pad = stx__sru_key_pad(x, M ? io->memory_pad : NULL, io->pad, B, M, T);
    if (d->zero_pads && io->pad && d->norm == STX_SRU_NORM_AFTER) {
        padded = (unsigned char *)stx_step_host_bytes(x, B * T);
        for (i = 0; padded && i < B * T; i++) padded[i] = io->pad->data[i] != 0;
    }

    if (m->w_input) h = stx_linear(x, h, m->w_input, NULL, STX_ACT_NONE);
    for (l = 0; l < d->layers && h; l++) {
        stx__sru_job *job = (stx__sru_job *)stx_step_host_bytes(x, sizeof *job);
        stx_tensor *given[3], **last = io->last ? &io->last[l] : NULL;
        int count = 0;
        if (!job) return NULL;
        memset(job, 0, sizeof *job);
        job->m = m;
        job->l = l;
        job->window = io->window;
        job->pad = io->pad;
        job->key_pad = key_pad;
        job->padded = padded;
        job->memory = m->layer[l].attends && io->memory && io->memory[l];
        job->c0 = io->c0 && io->c0[l];
        job->last = io->last != NULL;

        given[count++] = h;
        if (job->memory) given[count++] = io->memory[l];
        if (job->c0) given[count++] = io->c0[l];
        if (io->inputs) io->inputs[l] = h;
        if (d->layers - l <= d->recompute_layers)
            h = stx_recompute(x, stx__sru_layer, job, given, count, last, job->last);
        else
            h = stx__sru_layer(x, job, given, last);
    }
    return h;
}


// >>stack: state

STX_DEF stx_sru_state *stx_sru_state_create(stx_sru *m, size_t B) {
    stx_ctx *x = m ? m->ctx : NULL;
    stx_sru_state *s;
    stx_memory_desc d;
    size_t *widths, l;
    if (!stx_ok(x)) return NULL;
    if (!B) {
        stx_fail(x, STX_ERR_ARG, "stx_sru_state_create: expected B >= 1 streams, got 0");
        return NULL;
    }
    s = (stx_sru_state *)stx_block(x, sizeof *s);
    widths = (size_t *)stx_block(x, m->desc.layers * sizeof *widths);
    if (!s || !widths) {
        stx_block_free(x, s);
        stx_block_free(x, widths);
        return NULL;
    }
    s->model = m;
    s->B = B;

    memset(&d, 0, sizeof d);
    d.layers = m->desc.layers;
    d.B = B;
    d.width = m->O;
    d.is_state = 1;
    s->states = stx_memory_create(x, &d);

    for (l = 0; l < d.layers; l++) widths[l] = m->layer[l].attends ? m->layer[l].Ci : 0;
    d.widths = widths;
    d.is_state = 0;
    d.shared_layout = 1;
    s->memory = stx_memory_create(x, &d);
    stx_block_free(x, widths);
    if (!s->states || !s->memory) {
        stx_sru_state_free(s);
        return NULL;
    }
    s->c = s->states->all;
    return s;
}

STX_DEF void stx_sru_state_free(stx_sru_state *s) {
    if (!s) return;
    stx_memory_free(s->memory);
    stx_memory_free(s->states);
    stx_block_free(s->model->ctx, s);
}

STX_DEF void stx_sru_state_reset(stx_sru_state *s) {
    if (!s) return;
    stx_memory_reset(s->states);
    stx_memory_reset(s->memory);
}

STX_DEF void stx_sru_state_reset_stream(stx_sru_state *s, size_t b) {
    if (!s) return;
    stx_memory_reset_stream(s->states, b);
    stx_memory_reset_stream(s->memory, b);
}

/* Checks that the state passed to a segment as `which` ("in" or "out") fits the model
   and the number of streams. */
static int stx__sru_state_fits(const stx_sru *m, const stx_tensor *h, const stx_sru_state *s,
                               const char *which) {
    if (!s || (s->model == m && s->B == h->dim[0])) return 1;
    if (s->model != m)
        stx_fail(m->ctx, STX_ERR_ARG,
                 "stx_sru_segment: %s: expected a state of this model, got one of another model",
                 which);
    else
        stx_fail(m->ctx, STX_ERR_SHAPE,
                 "stx_sru_segment: %s: expected B = %zu streams, as in x, got %zu", which,
                 h->dim[0], s->B);
    return 0;
}

STX_DEF stx_tensor *stx_sru_segment(stx_sru *m, stx_tensor *h, const stx_ids *pad,
                                    const stx_sru_state *in, stx_sru_state *out) {
    stx_ctx *x = m ? m->ctx : NULL;
    stx_sru_io io;
    stx_tensor **c0, **memory, **last, **inputs;
    size_t l, layers, M, keep;
    if (!stx_ok(x) || !h) return NULL;
    if (!stx__sru_state_fits(m, h, in, "in") || !stx__sru_state_fits(m, h, out, "out"))
        return NULL;
    if (h->ndim != 3) {
        stx__sru_bad_shape(x, "stx_sru_segment", "x", "(B,T,input)", h);
        return NULL;
    }
    layers = m->desc.layers;
    M = in ? stx_memory_max_rows(in->memory) : 0;
    keep = out && out->keep ? out->keep : h->dim[1];
    c0 = (stx_tensor **)stx_step_host_bytes(x, 4 * layers * sizeof *c0);
    if (!c0) return NULL;
    memset(c0, 0, 4 * layers * sizeof *c0);
    memory = c0 + layers;
    last = memory + layers;
    inputs = last + layers;
    memset(&io, 0, sizeof io);
    io.c0 = c0;
    io.memory = memory;
    io.last = last;
    io.inputs = inputs;
    io.pad = pad;
    if (in) io.window = in->window;
    else if (out) io.window = out->window;

    /* copy the state, because it can change before the backward pass reads it */
    for (l = 0; in && l < layers; l++) {
        c0[l] = stx_memory_read(in->states, l, 1);
        memory[l] = stx_memory_read(in->memory, l, M);
        if (m->layer[l].attends && !io.memory_pad)
            io.memory_pad = stx_memory_mask(in->memory, l, M, NULL, 0);
    }
    h = stx_sru_forward(m, h, &io);
    if (!h || !out) return h;

    /* write the state */
    if (out->keep && !stx_memory_reserve(out->memory, keep)) return NULL;
    for (l = 0; l < layers; l++) {
        const stx_memory *before = in ? in->memory : NULL;
        if (!stx_memory_push(out->states, NULL, l, 1, last[l], NULL)) return NULL;
        if (!m->layer[l].attends) continue;
        if (!stx_memory_push(out->memory, before, l, keep, inputs[l], pad)) return NULL;
    }
    return h;
}

STX_DEF int stx_sru_state_copy(stx_sru_state *to, size_t b, const stx_sru_state *from,
                               size_t first, size_t n) {
    if (!to || !stx_ok(to->model->ctx)) return 0;
    if (!from || from->model != to->model) {
        stx_fail(to->model->ctx, STX_ERR_ARG,
                 "stx_sru_state_copy: from: expected a state of the same model, got %s",
                 from ? "one of another model" : "NULL");
        return 0;
    }
    return stx_memory_copy(to->states, b, from->states, first, n)
           && stx_memory_copy(to->memory, b, from->memory, first, n);
}

/* Writes the name of the states in a checkpoint to name: the prefix followed by "c". If
   the prefix is NULL or too long, returns 0 and sets an error. */
static int stx__sru_entry(stx_ctx *x, const char *op, const char *prefix, char *name,
                          size_t size) {
    if (!prefix) {
        stx_fail(x, STX_ERR_ARG, "%s: prefix: expected a string of at most 64 bytes, got NULL", op);
        return 0;
    }
    if (strlen(prefix) > 64) {
        stx_fail(x, STX_ERR_ARG, "%s: prefix: expected at most 64 bytes, got %zu", op,
                 strlen(prefix));
        return 0;
    }
    snprintf(name, size, "%sc", prefix);
    return 1;
}

STX_DEF int stx_sru_state_save(stx_writer *w, const stx_sru_state *s, const char *prefix) {
    char name[96];
    if (!s || !stx_ok(s->model->ctx)) return 0;
    return stx__sru_entry(s->model->ctx, "stx_sru_state_save", prefix, name, sizeof name)
           && stx_memory_save(w, s->states, name) && stx_memory_save(w, s->memory, prefix);
}

STX_DEF int stx_sru_state_load(stx_sru_state *s, const stx_file *f, const char *prefix) {
    stx_ctx *x = s ? s->model->ctx : NULL;
    char name[96];
    if (!stx_ok(x) || !f) return 0;
    if (!stx__sru_entry(x, "stx_sru_state_load", prefix, name, sizeof name)) return 0;
    stx_sru_state_reset(s);
    return stx_memory_load(s->states, f, name)
           && (!s->keep || stx_memory_reserve(s->memory, s->keep))
           && stx_memory_load(s->memory, f, prefix);
}

/* Copies states from `own` (layers,B,D,H) to `nn` (layers,D,B,H), which has PyTorch's
   order, if `get` is 1, and from `nn` to `own` if it is 0. */
static void stx__sru_nn(const stx_sru *m, size_t B, stx_real *nn, stx_real *own, int get) {
    const size_t D = m->desc.bidirectional ? 2 : 1, H = m->desc.hidden;
    size_t l, b, s;
    for (l = 0; l < m->desc.layers; l++)
        for (b = 0; b < B; b++)
            for (s = 0; s < D; s++) {
                stx_real *theirs = nn + ((l * D + s) * B + b) * H;
                stx_real *ours = own + ((l * B + b) * D + s) * H;
                memcpy(get ? theirs : ours, get ? ours : theirs, H * sizeof *ours);
            }
}

STX_DEF int stx_sru_state_get(const stx_sru_state *s, size_t l, stx_real *c, stx_real *memory) {
    stx_ctx *x = s ? s->model->ctx : NULL;
    if (!stx_ok(x)) return 0;
    if (l >= s->model->desc.layers) {
        stx_fail(x, STX_ERR_ARG, "stx_sru_state_get: expected a layer below %zu, got %zu",
                 s->model->desc.layers, l);
        return 0;
    }
    if (memory && s->memory->layer[l].masked) {
        stx_fail(x, STX_ERR_ARG,
                 "stx_sru_state_get: some streams lack rows in layer %zu, because they were reset "
                 "or padded; use stx_sru_state_save or stx_sru_state_copy instead", l);
        return 0;
    }
    if (c && !stx_memory_get(s->states, l, c)) return 0;
    return !memory || !s->memory->layer[l].count || stx_memory_get(s->memory, l, memory);
}

STX_DEF void stx_sru_state_get_nn(const stx_sru_state *s, stx_real *out) {
    stx_ctx *x = s ? s->model->ctx : NULL;
    stx_real *own;
    size_t n;
    if (!stx_ok(x) || !out) return;
    n = s->model->desc.layers * s->B * s->model->O;
    own = (stx_real *)stx_block(x, n * sizeof *own);
    if (!own) return;
    stx_download(x, own, s->c, n);
    stx__sru_nn(s->model, s->B, out, own, 1);
    stx_block_free(x, own);
}

STX_DEF int stx_sru_state_set_nn(stx_sru_state *s, const stx_real *in, size_t d0, size_t d1,
                                 size_t d2) {
    stx_ctx *x = s ? s->model->ctx : NULL;
    const stx_sru_desc *d;
    stx_real *own, *copy;
    size_t n, rows;
    if (!stx_ok(x) || !in) return 0;
    d = &s->model->desc;
    rows = d->layers * (d->bidirectional ? 2 : 1);
    if (d0 != rows || d1 != s->B || d2 != d->hidden) {
        stx_fail(x, STX_ERR_SHAPE,
                 "stx_sru_state_set_nn: expected shape (%zu,%zu,%zu), that is "
                 "(layers x directions, B, hidden), got (%zu,%zu,%zu); transpose an array whose "
                 "dimensions are in another order",
                 rows, s->B, d->hidden, d0, d1, d2);
        return 0;
    }
    n = d->layers * s->B * s->model->O;
    own = (stx_real *)stx_block(x, 2 * n * sizeof *own);
    if (!own) return 0;
    copy = own + n;
    memcpy(copy, in, n * sizeof *copy);
    stx__sru_nn(s->model, s->B, copy, own, 0);
    stx_upload(x, s->c, own, n);
    stx_block_free(x, own);
    return stx_ok(x);
}

STX_DEF const stx_attention_map *stx_sru_attention_map(const stx_sru *m, size_t l, size_t b) {
    if (!m || !stx_ok(m->ctx)) return NULL;
    if (l >= m->desc.layers) {
        stx_fail(m->ctx, STX_ERR_ARG,
                 "stx_sru_attention_map: expected a layer below %zu, got %zu", m->desc.layers, l);
        return NULL;
    }
    if (!m->layer[l].attends) return NULL;
    return stx_attention_map_of(m->ctx, "stx_sru_attention_map", &m->attended[l], b);
}


// >>language model

static int stx__sru_lm_bad(stx_ctx *x, const char *field, double got, const char *expected) {
    return stx_bad_value(x, "stx_sru_lm_create", field, got, expected);
}

/* Describes the embedding and the output head. Initialisers are as in the authors'
   trainers: tables are uniform in [-sqrt(3/width), sqrt(3/width)], where width is emb
   for the embedding and dim for the output head; projections are Xavier-uniform; biases
   are 0. */
static void stx__sru_lm_words(const stx_sru_lm_desc *d, stx_vocab_io_desc *w) {
    memset(w, 0, sizeof *w);
    w->vocab = d->vocab;
    w->dim = d->dim;
    w->emb = d->emb;
    w->in = w->out = d->adapt_io ? STX_VOCAB_ADAPTIVE : STX_VOCAB_PLAIN;
    if (!d->adapt_io && d->tied) w->out = STX_VOCAB_TIED;
    w->scale = 1;
    w->dropout = d->emb_dropout;
    w->width[0] = d->emb_adaptive;
    w->share_tables = d->adapt_io;
    w->share_projs = d->adapt_io && !d->separate_projs;
    w->divval = d->divval;
    w->cutoffs = d->adapt_io ? d->cutoffs : 0;
    w->forward_columns = d->forward_columns;
    memcpy(w->cutoff, d->cutoff, sizeof w->cutoff);
    w->cluster_major = 1;

    w->table.kind = w->out_table.kind = w->cluster.kind = w->proj.kind = STX_UNIFORM;
    w->table.a = sqrt(3 / (double)d->emb);
    w->out_table.a = w->cluster.a = sqrt(3 / (double)d->dim);
    w->proj.a = 1;
    w->proj.rule = STX_INIT_XAVIER;
}

static int stx__sru_lm_check(stx_ctx *x, const stx_sru_lm_desc *d) {
    const size_t most = (size_t)1 << 28;
    if (d->dim > most)
        return stx__sru_lm_bad(x, "dim", (double)d->dim, "at most 2^28");
    if (d->emb > most)
        return stx__sru_lm_bad(x, "emb", (double)d->emb, "at most 2^28");
    if (d->emb_adaptive > most)
        return stx__sru_lm_bad(x, "emb_adaptive", (double)d->emb_adaptive, "at most 2^28");
    if (d->sru.bidirectional || d->sru.not_causal) {
        stx_fail(x, STX_ERR_ARG,
                 "stx_sru_lm_create: %s: expected 0, because a language model must not see "
                 "what it predicts, got %d", d->sru.bidirectional ? "bidirectional" : "not_causal",
                 d->sru.bidirectional ? d->sru.bidirectional : d->sru.not_causal);
        return 0;
    }
    if (!(d->dropout >= 0 && d->dropout < 1))
        return stx__sru_lm_bad(x, "dropout", d->dropout, "at least 0 and below 1");
    if (!(d->io_dropout < 1))
        return stx__sru_lm_bad(x, "io_dropout", d->io_dropout, "less than 1");
    if (!(d->emb_dropout >= 0 && d->emb_dropout < 1))
        return stx__sru_lm_bad(x, "emb_dropout", d->emb_dropout, "at least 0 and below 1");
    if (d->tied && d->adapt_io)
        return stx__sru_lm_bad(x, "tied", d->tied,
                               "0 with adapt_io, which always shares its tables");
    if (d->emb != d->dim && (d->tied || d->adapt_io)) {
        stx_fail(x, STX_ERR_ARG, "stx_sru_lm_create: emb: expected dim %zu with %s, got %zu",
                 d->dim, d->tied ? "tied" : "adapt_io, whose projections map to dim", d->emb);
        return 0;
    }
    return 1;
}

static int stx__sru_lm_resolve(stx_ctx *x, const stx_sru_lm_desc *from, stx_sru_lm_desc *d,
                               stx_vocab_io_desc *words) {
    STX__FP_SCOPE;
    stx_sru_desc stack;
    *d = *from;
    if (!d->dim) d->dim = 512;
    if (!d->emb) d->emb = d->dim;
    if (!d->emb_adaptive) d->emb_adaptive = d->dim;
    if (!stx__sru_lm_check(x, d)) return 0;
    if (d->io_dropout == 0) d->io_dropout = d->dropout > 0 ? d->dropout : -1;

    stx__sru_lm_words(d, words);
    if (!stx_vocab_io_resolve(x, "stx_sru_lm_create", words, words)) return 0;
    d->divval = words->divval;
    d->cutoffs = words->cutoffs;
    memcpy(d->cutoff, words->cutoff, sizeof d->cutoff);

    d->sru.input = d->emb;
    d->sru.hidden = d->dim;
    d->sru.dropout = d->dropout;
    if (!stx__sru_resolve(x, &d->sru, &stack)) return 0;
    d->sru = stack;
    return 1;
}

STX_DEF size_t stx_sru_lm_count(const stx_sru_lm_desc *desc) {
    stx_sru_lm_desc d;
    stx_vocab_io_desc words;
    if (!desc || !stx__sru_lm_resolve(NULL, desc, &d, &words)) return 0;
    return stx_size_add(stx_sru_count(&d.sru), stx_vocab_io_count(&words), 1);
}

STX_DEF stx_sru_lm *stx_sru_lm_create(stx_ctx *x, const stx_sru_lm_desc *desc) {
    stx_vocab_io_desc words;
    stx_sru_lm *m;
    if (!stx_ok(x)) return NULL;
    if (!desc) {
        stx_fail(x, STX_ERR_ARG,
                 "stx_sru_lm_create: expected a desc with at least vocab set, got NULL");
        return NULL;
    }
    m = (stx_sru_lm *)stx_persist(x, sizeof *m);
    if (!m || !stx__sru_lm_resolve(x, desc, &m->desc, &words)) return NULL;
    m->ctx = x;
    m->params = stx_params_create(x);
    m->vocab_io = stx_vocab_io_create(m->params, &words);
    m->sru = m->vocab_io ? stx_sru_create(m->params, "", &m->desc.sru) : NULL;
    if (!m->sru) return NULL;
    m->desc.sru = m->sru->desc;
    return stx_ok(x) ? m : NULL;
}

STX_DEF stx_params *stx_sru_lm_params(stx_sru_lm *m) {
    return m ? m->params : NULL;
}

static stx_tensor *stx__sru_lm_dropout(stx_sru_lm *m, stx_tensor *h) {
    return stx_dropout(m->ctx, h, STX_MAX(m->desc.io_dropout, 0));
}

static stx_tensor *stx__sru_lm_embed(stx_sru_lm *m, const stx_ids *ids) {
    STX__FP_SCOPE;
    return stx__sru_lm_dropout(m, stx_vocab_io_embed(m->vocab_io, ids));
}

STX_DEF stx_tensor *stx_sru_lm_forward(stx_sru_lm *m, const stx_ids *ids, const stx_sru_state *in,
                                       stx_sru_state *out) {
    STX__FP_SCOPE;
    if (!m) return NULL;
    return stx__sru_lm_dropout(
        m, stx_sru_segment(m->sru, stx__sru_lm_embed(m, ids), NULL, in, out));
}

STX_DEF stx_tensor *stx_sru_lm_logits(stx_sru_lm *m, stx_tensor *h) {
    return m ? stx_vocab_io_logits(m->vocab_io, h) : NULL;
}

STX_DEF stx_tensor *stx_sru_lm_log_probs(stx_sru_lm *m, stx_tensor *h) {
    return m ? stx_vocab_io_log_probs(m->vocab_io, h) : NULL;
}

STX_DEF stx_tensor *stx_sru_lm_loss(stx_sru_lm *m, const stx_ids *ids, const stx_ids *targets,
                                    const stx_sru_state *in, stx_sru_state *out) {
    return m ? stx_vocab_io_loss(m->vocab_io, stx_sru_lm_forward(m, ids, in, out), targets, NULL)
             : NULL;
}

STX_DEF uint64_t stx_sru_lm_key(const stx_sru_lm *m, const stx_ids *ids, const stx_ids *targets,
                                const stx_sru_state *s, uint64_t salt) {
    uint64_t key = stx_step_key(m, ids, targets, salt);
    if (!m || !stx_ok(m->ctx)) return key;
    if (s && s->model != m->sru) {
        stx_fail(m->ctx, STX_ERR_ARG,
                 "stx_sru_lm_key: expected a state of this model, got one of another model");
        return key;
    }

    key = stx_key_add(key, m->sru->desc.recompute_layers);
    key = stx_vocab_io_key(m->vocab_io, key, ids, targets, NULL);
    if (!s) return key;
    key = stx_key_add(key, s->keep);
    key = stx_key_add(key, s->window);
    key = stx_memory_key(s->states, key);
    return stx_memory_key(s->memory, key);
}


// >>generation

STX_DEF stx_sru_gen *stx_sru_gen_create(stx_sru_lm *m, size_t B, size_t window) {
    stx_ctx *x = m ? m->ctx : NULL;
    stx_sru_gen *g;
    size_t layers, l;
    if (!stx_ok(x)) return NULL;
    if (!B) {
        stx_fail(x, STX_ERR_ARG, "stx_sru_gen_create: expected B >= 1 streams, got 0");
        return NULL;
    }
    if (window > (size_t)1 << 31) {
        stx_fail(x, STX_ERR_ARG,
                 "stx_sru_gen_create: window: expected at most 2^31 rows, because all are "
                 "allocated immediately, got %zu", window);
        return NULL;
    }
    if (m->sru->desc.literal & STX_SRU_LITERAL_NORM) {
        stx_fail(x, STX_ERR_ARG,
                 "stx_sru_gen_create: cannot generate with STX_SRU_LITERAL_NORM, because keys "
                 "depend on where segments begin; use stx_sru_segment, or clear the flag");
        return NULL;
    }
    if (m->sru->desc.custom) {
        stx_fail(x, STX_ERR_ARG,
                 "stx_sru_gen_create: cannot generate with a custom transform, because it can "
                 "depend on other time steps; use stx_sru_segment");
        return NULL;
    }
    layers = m->sru->desc.layers;
    g = (stx_sru_gen *)stx_block(x, sizeof *g);
    if (!g) return NULL;
    g->model = m;
    g->B = B;
    g->window = window ? window : 1024;
    g->state = stx_sru_state_create(m->sru, B);
    g->cache = stx_cache_create(x, layers, B, m->desc.vocab);
    for (l = 0; l < layers && stx_ok(x); l++)
        if (m->sru->layer[l].attends)
            stx_cache_window(g->cache, l, g->window, m->sru->layer[l].P, 1);
    if (stx_ok(x)) return g;
    stx_sru_gen_free(g);
    return NULL;
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

/* Like stx__sru_transform, but for new time steps: appends their keys and values to the
   cache and attends to its rows. */
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
        stx_tensor *in = h, *U, *last;
        stx_sru_recurrence_in cell;
        memset(&cell, 0, sizeof cell);
        if (m->desc.norm == STX_SRU_NORM_BEFORE)
            in = stx_layernorm(x, in, p->gain, p->shift, 1e-5);
        U = stx__sru_gen_transform(g, l, in);
        cell.u = stx_reshape(x, U, ids->B, ids->T, p->k, m->O);
        cell.xr = p->highway ? h : NULL;
        cell.v = p->v;
        cell.bias = p->bias;
        cell.c0 = stx_memory_read(g->state->states, l, 1);
        cell.alpha = (double)p->alpha;
        cell.tanh = m->desc.tanh;
        h = stx_sru_recurrence(x, &cell, &last);
        if (!h || !stx_memory_push(g->state->states, NULL, l, 1, last, NULL)) return NULL;
        if (m->desc.norm == STX_SRU_NORM_AFTER) h = stx_layernorm(x, h, p->gain, p->shift, 1e-5);
    }
    return h;
}

STX_DEF const stx_real *stx_sru_gen_feed(stx_sru_gen *g, const int32_t *ids, size_t n) {
    if (!g || !stx_ok(g->model->ctx)) return NULL;
    return stx_cache_feed(g->cache, g->model->vocab_io, ids, n, 1, stx__sru_gen_step, g);
}


// >>model: the table of functions for programs that accept any model family

static stx_tensor *stx__sru_lm_loss(void *m, const stx_ids *ids, const stx_ids *targets,
                                    const void *in, void *out) {
    return stx_sru_lm_loss((stx_sru_lm *)m, ids, targets, (const stx_sru_state *)in,
                           (stx_sru_state *)out);
}

/* The model adds no penalty to the loss. */
static stx_tensor *stx__sru_lm_total(void *m, stx_tensor *nll) {
    (void)m;
    return nll;
}

static void stx__sru_lm_updated(void *m) {
    (void)m;
}

static size_t stx__sru_lm_recompute(void *m, size_t n) {
    stx_sru_desc *d = &((stx_sru_lm *)m)->sru->desc;
    return d->recompute_layers = STX_MIN(n, d->layers);
}

static uint64_t stx__sru_lm_key(const void *m, const stx_ids *ids, const stx_ids *targets,
                                const void *s, uint64_t salt) {
    return stx_sru_lm_key((const stx_sru_lm *)m, ids, targets, (const stx_sru_state *)s, salt);
}

static const stx_attention_map *stx__sru_lm_attention_map(const void *m, size_t l, size_t b) {
    return stx_sru_attention_map(((const stx_sru_lm *)m)->sru, l, b);
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

STX_DEF stx_lm stx_sru_as_lm(stx_sru_lm *m) {
    stx_lm lm;
    memset(&lm, 0, sizeof lm);
    if (!m) return lm;
    lm.model = m;
    lm.ctx = m->ctx;
    lm.family = stx_sru_family();
    lm.params = m->params;
    lm.vocab_io = m->vocab_io;
    lm.loss = stx__sru_lm_loss;
    lm.total = stx__sru_lm_total;
    lm.updated = stx__sru_lm_updated;
    lm.recompute = stx__sru_lm_recompute;
    lm.key = stx__sru_lm_key;
    lm.layers = m->sru->desc.layers;
    lm.attention_map = stx__sru_lm_attention_map;
    lm.state_create = stx__sru_lm_state_create;
    lm.gen_create = stx__sru_lm_gen_create;
    stx__sru_lm_states(&lm);
    return lm;
}


// >>files

static void *stx__sru_family_create(stx_ctx *x, const void *desc) {
    return stx_sru_lm_create(x, (const stx_sru_lm_desc *)desc);
}

static const void *stx__sru_family_desc(const void *m) {
    return &((const stx_sru_lm *)m)->desc;
}

static stx_params *stx__sru_family_params(void *m, int k) {
    return k ? NULL : ((stx_sru_lm *)m)->params;
}

static stx_lm stx__sru_family_as_lm(void *m) {
    return stx_sru_as_lm((stx_sru_lm *)m);
}

STX_DEF const stx_family *stx_sru_family(void) {
    static const stx_field field[] = {
        STX_FIELD(stx_sru_lm_desc, SIZE, vocab),
        STX_FIELD(stx_sru_lm_desc, SIZE, dim),
        STX_FIELD(stx_sru_lm_desc, SIZE, emb),
        STX_FIELD(stx_sru_lm_desc, SIZE, sru.input),
        STX_FIELD(stx_sru_lm_desc, SIZE, sru.hidden),
        STX_FIELD(stx_sru_lm_desc, SIZE, sru.layers),
        STX_FIELD(stx_sru_lm_desc, INT, sru.bidirectional),
        STX_FIELD(stx_sru_lm_desc, INT, sru.transform),
        STX_FIELD(stx_sru_lm_desc, SIZE, sru.proj),
        STX_FIELD_LIST_OF(stx_sru_lm_desc, sru.projs, sru.layers),
        STX_FIELD(stx_sru_lm_desc, INT, sru.tanh),
        STX_FIELD(stx_sru_lm_desc, INT, sru.no_skip),
        STX_FIELD(stx_sru_lm_desc, INT, sru.rescale),
        STX_FIELD(stx_sru_lm_desc, REAL, sru.highway_bias),
        STX_FIELD(stx_sru_lm_desc, INT, sru.v1),
        STX_FIELD(stx_sru_lm_desc, INT, sru.norm),
        STX_FIELD(stx_sru_lm_desc, REAL, sru.dropout),
        STX_FIELD(stx_sru_lm_desc, REAL, sru.rnn_dropout),
        STX_FIELD(stx_sru_lm_desc, INT, sru.input_first),
        STX_FIELD(stx_sru_lm_desc, INT, sru.init_xavier),
        STX_FIELD(stx_sru_lm_desc, REAL, sru.v_init),
        STX_FIELD(stx_sru_lm_desc, CODE, sru.custom),
        STX_FIELD(stx_sru_lm_desc, CODE, sru.user),
        STX_FIELD(stx_sru_lm_desc, SETTING, sru.recompute_layers),
        STX_FIELD(stx_sru_lm_desc, SIZE, sru.heads),
        STX_FIELD(stx_sru_lm_desc, REAL, sru.attn_dropout),
        STX_FIELD(stx_sru_lm_desc, SIZE, sru.attention_every),
        STX_FIELD(stx_sru_lm_desc, SIZE, sru.attention_last),
        STX_FIELD(stx_sru_lm_desc, INT, sru.no_attention),
        STX_FIELD(stx_sru_lm_desc, INT, sru.no_attn_norm),
        STX_FIELD(stx_sru_lm_desc, INT, sru.attn_norm_first),
        STX_FIELD(stx_sru_lm_desc, REAL, sru.alpha_init),
        STX_FIELD(stx_sru_lm_desc, INT, sru.not_causal),
        STX_FIELD(stx_sru_lm_desc, UNSIGNED, sru.literal),
        STX_FIELD(stx_sru_lm_desc, INT, sru.zero_pads),
        STX_FIELD(stx_sru_lm_desc, REAL, dropout),
        STX_FIELD(stx_sru_lm_desc, REAL, io_dropout),
        STX_FIELD(stx_sru_lm_desc, REAL, emb_dropout),
        STX_FIELD(stx_sru_lm_desc, INT, tied),
        STX_FIELD(stx_sru_lm_desc, INT, adapt_io),
        STX_FIELD(stx_sru_lm_desc, SIZE, emb_adaptive),
        STX_FIELD(stx_sru_lm_desc, REAL, divval),
        STX_FIELD_ARRAY(stx_sru_lm_desc, SIZE, cutoff),
        STX_FIELD(stx_sru_lm_desc, SIZE, cutoffs),
        STX_FIELD(stx_sru_lm_desc, INT, separate_projs),
        STX_FIELD(stx_sru_lm_desc, INT, forward_columns)
    };
    static const stx_family family = {
        "sru", sizeof(stx_sru_lm_desc), field, sizeof field / sizeof *field,
        stx__sru_family_create, stx__sru_family_desc, stx__sru_family_params,
        stx__sru_family_as_lm
    };
    return &family;
}

STX_DEF stx_sru_lm *stx_sru_lm_open(stx_ctx *x, const char *path) {
    return (stx_sru_lm *)stx_model_open(x, stx_sru_family(), path);
}

STX_DEF int stx_sru_lm_save(stx_sru_lm *m, const char *path) {
    return stx_model_save(stx_sru_family(), m, path);
}

STX_STRICT_OFF
#endif /* SEQTX_SRU_IMPLEMENTATION */

#define STX__LETTERS 2
#include "seqtx.h"      /* restores the single-letter macros */
