/* seqtx_attn_span.h - v0.2 - Sequential Transformer with adaptive attention span
   no warranty implied; MIT or public domain, your choice (see the end of seqtx.h)

   In ONE .c or .cpp file:                everywhere else:
       #define SEQTX_IMPLEMENTATION           #include "seqtx_attn_span.h"
       #include "seqtx_attn_span.h"

   Needs seqtx.h in the same directory. Compile with -O2 and link with -lm (and with
   -pthread if glibc is older than 2.34). If another file already implements seqtx.h,
   define SEQTX_ATTN_SPAN_IMPLEMENTATION instead, which compiles only the implementation
   in this header.

   Contents: a character- or word-level language model that reads text segment by segment.
   Each attention head learns how far back to look, and attention is computed no further
   back than that. Optional: all-attention layers without a feed-forward network, and
   adaptive input and output for large vocabularies.


   MANUAL

   Papers
       Adaptive Attention Span in Transformers    Sukhbaatar et al. 2019  arXiv:1905.07799
       Augmenting Self-attention with Persistent
           Memory (all-attention)                 Sukhbaatar et al. 2019  arXiv:1907.01470
       Adaptive Input Representations (adapt_io)  Baevski and Auli 2018   arXiv:1809.10853

   Letters used in this file
       B  streams (rows of a batch)        d  model dimension        L  largest span
       T  tokens per stream and call       f  feed-forward size      R  length of the ramp
       V  vocabulary size                  H  heads                  S  window of a layer
       N  persistent vectors per head      D  head dimension d / H   C  cache length
       z  learned span, a fraction of L    h  hidden state           l  index of a layer
       i  position of a query              t  distance from the query to a key
       E  position embedding, key_pe in the code
   Spans, ramps, windows and distances are in tokens.

   The model. Every layer caches its inputs from earlier segments and attends to them and
   to the current segment.

       tokens (B,T) -> embedding -> h (B,T,d) -> layers -> output head -> logits (B,T,V)

   One layer, with the names used in the code:

       cache (B,C,d)       h (B,T,d) -----------.
           |                   |                 \
           |         q, k, v = [Wq Wk Wv] h       \
           |                   |                   \
       k, v = [Wk Wv] cache -> attention -> y -> Wo y + h -> LN1 -> h'

       h' -> W2 relu(W1 h' + b1) + b2 + h' -> LN2 -> h of the next layer

       s_t = (q_i . k_{i-t} + q_i . E_t) / sqrt(D)      t = 1..S; E (L,D) is shared by all
                                                        layers and heads
       m_t = clamp(1 + (1 - t + z L) / R, 0, 1)         soft mask: one z in [0,1] per head
       a_t = m_t exp(s_t) / sum_u m_u exp(s_u)          masked weights, renormalised
       y_i = sum_t a_t v_{i-t}
       loss = mean nll + span_loss sum_l L mean_heads z

   The mask, the attention weights and the penalty follow 1905.07799, except that the
   mask extends one token further (see Fidelity). The persistent vectors and the layer
   without a feed-forward network follow 1907.01470. The position term of s_t, the
   window S and the cache length C follow the authors' code. With fixed spans, m = 1 for
   t = 1..L.

   With pers = N > 0, a layer has no feed-forward network and no LN2. Every head also
   attends to N learned key-value pairs (all-attention), with keys sqrt(D) pers_key and
   values sqrt(N) pers_val. These have no position embedding, and m = 1.

   The window S of a layer and the length C of its cache depend on the longest span among
   the layer's heads. With fixed spans, S = C = L.

       reach = min(L, ceil(L max z) + ceil(R))   no key further back has m > 0
       S = L - 64 floor((L - reach) / 64)        trimmed in steps of 64
       C = min(L, S + 64)                        64 spare rows, for spans that grow;
                                                 with full_cache, C = L

       L = 8192, R = 32:   z = 0:    reach   32, S   64, C  128
                           z = 0.1:  reach  852, S  896, C  960
                           z = 1:    reach 8192, S 8192, C 8192

   Why it works this way
       Why a soft ramp? The loss must depend continuously on the span, with a slope that z
       can learn from: dm_t/dz = L / R on the ramp and 0 elsewhere. As R approaches 0, m
       approaches a step function, and z would learn from the penalty alone. With R >= 1,
       the ramp contains a key unless z L > L - 1. In that case, m = 1 for all L keys, and
       z receives only the gradient of the penalty.

       Why do spans that start at z = 0 grow? The ramp extends beyond the span. Even at z
       = 0, a head sees t = 1..R with mask values 1, 1 - 1/R, .., 1/R, and the keys on the
       ramp contribute to the gradient of z. z is clamped after the update, so the clamp
       limits the value but not the gradient. Short initial spans are cheap, and only
       heads that need more context increase theirs.

       Why renormalise? Otherwise the weights of a head with a short span would sum to
       less than 1, and such a head would contribute less. With renormalisation, a head
       performs ordinary attention over the keys it sees, weighted by m on the ramp. Keys
       beyond the ramp need not be read, so a head takes time proportional to its span
       plus R.

       Why cache layer inputs and not keys? Keys depend on Wk, which changes at every
       step. Projecting the cached inputs with the current weights keeps old and new keys
       consistent, and lets the cached rows contribute to the gradients of Wk and Wv.

   Gradients of one head without dropout, derived from the formulas above. Let g be the
   gradient of the loss with respect to y_i, and let norm = sum_u m_u exp(s_u). Sums over
   u include the persistent vectors, with m = 1. Below, v_t stands for v_{i-t} and y for
   y_i. Then

       ds_t = a_t g.(v_t - y)
       dm_t = (exp(s_t) / norm) g.(v_t - y)
       dz   = (L / R) sum dm_t over all queries and over t = 1..S on the ramp, where
              0 <= 1 + (1 - t + z L) / R <= 1. Both ends belong to the ramp, as in the
              authors' code.

   The penalty adds span_loss L / H to dz (span_loss L with span_per_layer). With
   no_renorm, let p_t = exp(s_t) / sum_u exp(s_u). Then dm_t = p_t g.v_t and
   ds_t = p_t g.(m_t v_t - y).

   Worked example. Take one head with D = 1, L = 4, R = 2 and z = 1/8, so that z L = 1/2.
   For t = 1..4, let exp(s) = 1, 4/3, 4, 5/3 and v = 6, 0, 9, 3:

       m        = 1, 3/4, 1/4, 0
       m exp(s) = 1, 1, 1, 0, so a = 1/3, 1/3, 1/3, 0 and y = 5
       dy/dz    = (L / R) (exp(s_2) (v_2 - y) + exp(s_3) (v_3 - y)) / 3
                = 2 (-20/3 + 16) / 3 = 56/9     (t = 1 and t = 4 are not on the ramp)
       With no_renorm: sum exp(s) = 8, a = 1/8, 1/8, 1/8, 0 and y = 15/8

   Quick start. This program learns to continue "abcabc.." and prints the continuation. A
   test extracts, compiles and runs it.

   //>quickstart
       #define SEQTX_IMPLEMENTATION
       #include "seqtx_attn_span.h"
       #include <stdio.h>

       int main(void) {
           stx_ctx *x = stx_create(NULL);
           stx_span_desc d = {0};
           d.vocab = 256;
           d.layers = 2;
           d.dim = 32;
           d.heads = 2;
           d.inner = 64;
           d.span = 32;
           d.adapt_span = 1;
           stx_span *model = stx_span_create(x, &d);
           stx_optim *optim = stx_optim_create(stx_span_params(model), NULL);
           stx_span_state *memory = stx_span_state_create(model, 1);

           for (int step = 0; step < 100 && stx_ok(x); step++) {
               int32_t text[17];
               for (int i = 0; i < 17; i++) text[i] = "abc"[(step * 16 + i) % 3];
               stx_begin(x, STX_TRAIN);
               stx_ids *ids = stx_tokens(x, text, 1, 16);
               stx_ids *targets = stx_tokens(x, text + 1, 1, 16);
               stx_tensor *nll = stx_span_loss(model, ids, targets, memory, memory);
               stx_backward(x, stx_span_total(model, nll));
               if (step % 20 == 0) printf("step %d nll %.4f\n", step, stx_item(x, nll));
               stx_optim_step(optim, 0.01);
               stx_span_clamp(model);
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
           int failed = !stx_ok(x);
           stx_destroy(x);
           return failed;
       }
   //<quickstart

   stx_span_save(model, path) saves the model to a file, and stx_span_open(x, path)
   creates it again in another program. stx_span_open also opens checkpoints of
   train_attn_span; stx_vocab_open in seqtx_text.h returns their vocabulary.

   Copying a memory. stx_span_state_save saves a memory to a checkpoint and
   stx_span_state_load loads it. stx_span_state_get and _set copy it through a host
   buffer, for example to another context, device or process that runs the same model. The
   program below reads the second half of a text twice: once with the original memory and
   once with a copy. The losses are identical.

   //>handover
       #define SEQTX_IMPLEMENTATION
       #include "seqtx_attn_span.h"
       #include <stdio.h>
       #include <stdlib.h>

       static double loss_of(stx_ctx *x, stx_span *model, const int32_t *text,
                             stx_span_state *mem) {
           stx_begin(x, STX_EVAL);
           stx_ids *ids = stx_tokens(x, text, 1, 20);
           stx_ids *targets = stx_tokens(x, text + 1, 1, 20);
           return stx_item(x, stx_span_loss(model, ids, targets, mem, mem));
       }

       int main(void) {
           stx_ctx *x = stx_create(NULL);
           stx_span_desc d = {0};
           d.vocab = 8;
           d.layers = 2;
           d.dim = 32;
           d.heads = 2;
           d.span = 100;
           d.adapt_span = 1;
           stx_span *model = stx_span_create(x, &d);
           stx_span_state *old = stx_span_state_create(model, 1);
           stx_span_state *copy = stx_span_state_create(model, 1);

           int32_t text[41];
           for (int i = 0; i < 41; i++) text[i] = i * i % 7;
           loss_of(x, model, text, old);

           int copied = stx_ok(x);
           for (size_t l = 0; copied && l < d.layers; l++) {
               size_t cache_length = old->memory->layer[l].logical_count;
               size_t n = old->memory->layer[l].count;
               size_t bytes = old->B * n * d.dim * sizeof(stx_real);      // (B,n,d)
               stx_real *data = (stx_real *)malloc(bytes ? bytes : 1);
               copied = data && stx_span_state_get(old, l, data)
                   && stx_span_state_set(copy, l, cache_length, data, n);
               free(data);
           }

           double a = loss_of(x, model, text + 20, old);
           double b = loss_of(x, model, text + 20, copy);
           printf("nll %.6f, with the copy %.6f %s\n", a, b, stx_error(x));
           int same = stx_ok(x) && copied && a == b;
           stx_destroy(x);
           return !same;
       }
   //<handover

   Configuration (stx_span_desc). The last four columns are presets of
   examples/train_attn_span.c. The struct documents all fields.

       field            zero means    enwik8_small  enwik8      enwik8_large  enwik8_pers
       ---------------  ------------  ------------  ----------  ------------  -----------
       vocab (V)        (required)    205           205         205           205
       layers           8             8             12          24            36
       dim (d)          256           256           512         768           512
       heads (H)        4             4             8           8             8
       inner (f)        4 d           1024          2048        4096          -
       span (L)         1024          1024          8192        8192          8192
       adapt_span       fixed span    1             1           1             1
       ramp (R)         32            32            32          32            32
       span_init        0             0             0           0             0
       span_loss        0             2e-6          5e-7        5e-7          1e-7
       pers (N)         feed-forward  0             0           0             2048
       dropout          0             0             0.3         0.4           0.4
       emb_dropout      0             0             0           0             0

   dropout acts on attention weights and inside the feed-forward network; emb_dropout acts
   on the embedding and the last hidden state. The papers train their character-level
   models with Adagrad, at a learning rate of 0.07 after a linear warm-up. The gradient of
   each tensor is clipped to norm 0.03 for the step, but not for Adagrad's sum of squares
   (see stx_optim_desc).

   adapt_io requires a vocabulary sorted by decreasing frequency, because a cluster is a
   range of ids. The first cluster holds the frequent words at full width and is computed
   for every token. The other clusters hold rare words in narrower rows, and are computed
   only for the few tokens that need them.

   Forward cost of a layer, in multiply-adds per token. c is the number of cached rows
   that are projected, and S_head is the span of a head including its ramp:

       Wq, Wo          2 d^2
       Wk, Wv          2 d^2 (c + T) / T
       attention       3 D sum_heads S_head
       feed-forward    2 d f, or 2 N d for the persistent vectors

   With learned spans, the heads are sorted into at most three groups
   (stx_head_groups_choose). For each group, the cache is projected only as far back as
   the group's longest span reaches; c is then a mean over the heads. There is only one
   group if span_per_layer, no_renorm or literal is set, if some streams have fewer
   cached rows than others, or if grouping would save too little. With no_renorm or
   STX_SPAN_LITERAL_EPS, every key of the window is part of the normaliser, so S_head =
   S. A layer with one long span and seven short ones then costs as much as a layer with
   eight long ones.

   The cached rows of all layers take B d sum_l C_l elements. If each step reads and
   writes the same memory, the buffer of a layer also has spare rows: min(T, C_l) on a
   GPU, max(C_l / 2, min(T, C_l)) on a CPU. While C_l < L, there are up to min(C_l / 2,
   L - C_l) additional spare rows on either device. Generation caches keys and values
   instead, in buffers of 2 S_l + 64 rows, which take 2 d sum_l (2 S_l + 64) elements
   per stream. Buffers grow with the spans but never shrink, not even in a reset, so
   these sizes follow the largest C_l and S_l so far. To release the memory, free the
   memory or the generator and create a new one.

   A new token costs 3 D sum_heads S_head + 4 d^2 + 2 d f multiply-adds per layer,
   however long the text is. The speed of generation is limited by memory bandwidth. With
   one stream and f32 weights, each token reads 4 (4 d^2 + 2 d f) bytes of weights per
   layer, 4 V d bytes for the output head, and 8 D sum_heads S_head bytes of keys and
   values per layer. With several streams, the weights are read once for all of them.

   Fidelity to the authors' code for 1905.07799 and 1907.01470 (github.com/
   facebookresearch/adaptive-span, commit 27b815f)
       In double precision, losses, caches, all gradients and optimiser updates agree to
       within 1e-10 with an independent float64 implementation. Windows, initialisers,
       positions and presets match the authors' code. Weights and biases of linear
       layers are uniform in [-1/sqrt(columns), 1/sqrt(columns)]. The embedding and
       key_pe are normal with standard deviation 1, persistent keys with 1/sqrt(D) and
       persistent values with 1/sqrt(N). As in the authors' code, the mask m_t is the
       paper's m_z(t - 1), with m_z(x) = clamp((R + z - x) / R, 0, 1). A span therefore
       reaches one token further than in the paper. The paper's z is z L here.

       Corrected. Flags in `literal` restore the accidental behaviour of the authors'
       code:
           STX_SPAN_LITERAL_EPS      a_t = m_t p_t / (sum_u m_u p_u + 1e-8), where p is
                                     the softmax over the whole window and the
                                     persistent vectors. A key beyond a head's span then
                                     reduces all weights if its score is by far the
                                     largest. Default: eps = 0, as in the paper's
                                     formula, so such keys have no effect.
           STX_SPAN_LITERAL_MEMORY   unwritten memory rows act as keys and values of zero.
                                     They contribute no gradient to Wk and Wv, but their
                                     scores are q.E_t / sqrt(D), so q, E and z learn from
                                     positions without text. Default: rows that were never
                                     written are ignored.
       To reproduce the authors' code, set literal = STX_SPAN_LITERAL. If that code runs
       without --adapt-span-cache, also set full_cache = 1.

       Improved: rows outside the window are never projected. In the trainer: evaluation
       uses a separate memory; bits per byte are computed from the bytes of the text;
       checkpoints contain all data needed to resume bit-exactly.

       Omitted: dynamic spans, where z depends on the input.

   Fidelity to fairseq's examples/adaptive_span (commit 3d262bb). It is a different
   model based on the same paper, 1905.07799. The weights of the two models are not
   interchangeable.
       Supported:
           no_renorm         the mask multiplies the softmax over the window, without
                             renormalisation: a_t = m_t exp(s_t) / sum_{u=1..S} exp(s_u).
                             With pers, which fairseq lacks, the sum includes the
                             persistent vectors
           span_per_layer    all heads of a layer share one z, of shape (1)
           fairseq_init      projections and, without adapt_io, the embedding are normal
                             with standard deviation 1/sqrt(d); W1 and W2 are uniform
                             in [-r, r] with r = sqrt(6 / (d + f)); the rest is as in
                             the authors' code
           STX_SPAN_LITERAL_MEMORY   fairseq, too, reads unwritten rows as zeros
       To reproduce fairseq, set adapt_span = no_renorm = fairseq_init = 1 and literal =
       STX_SPAN_LITERAL.

       Different: fairseq clamps z at the start of a forward pass, after S and C have been
       computed. Here, stx_span_clamp clamps z after the update. If an update makes
       every z of a layer negative, fairseq's S and C are smaller than ours for one
       step, by up to R rounded up to a multiple of 64. z in a fairseq checkpoint can be
       outside [0,1].

       Omitted: in fairseq's data loader, the last position of a block has no target but
       is included in the divisor, so fairseq's losses are (T - 1) / T of the true
       values. Its memories carry over from training into validation and back. Its
       vocabulary has four extra special symbols and is padded to a multiple of 8.

   Checkpoints of the authors' code and of fairseq can be converted to seqtx checkpoints
   and back; docs/convert.md lists the names of the tensors.

   Options of the authors' code and of fairseq, and the corresponding fields of
   stx_span_desc

       authors' code       field                           authors' default
       ------------------  ------------------------------  ----------------
       hid-sz              dim                             256
       inner-hid-sz        inner                           1024
       nlayers             layers                          8
       nheads              heads                           2
       attn-span           span                            32
       block-sz            T of each call                  64
       dropout             dropout                         0.2
       emb-dropout         emb_dropout                     0
       adapt-span          adapt_span                      off
       adapt-span-loss     span_loss                       0
       adapt-span-ramp     ramp                            32
       adapt-span-init     span_init                       0
       adapt-span-cache    full_cache, inverted            off
       pers-mem-size       pers                            0
       adapt-io            adapt_io                        off
       adapt-io-tied       adapt_io_tied                   off
       adapt-io-divval     divval                          4
       adapt-io-cutoffs    cutoff, cutoffs                 20000, 40000, 200000

       fairseq             field                           fairseq's default
       ------------------  ------------------------------  -----------------
       d_model             dim                             256
       d_inner             inner                           1024
       n_layer             layers                          8
       n_head              heads                           4
       attn_span           span                            1024
       dropout             dropout                         0
       emb_dropout         emb_dropout                     0
       adapt_span_ramp     ramp                            32
       adapt_span_init     span_init                       0
       aux_loss_scaler     span_loss                       2e-6
       adapt_span_layer    span_per_layer                  false

   Easy to get wrong
       - The cache stores layer inputs, not keys. These inputs are projected with the
         current weights in every step and contribute to the gradients of Wk and Wv.
         Caching the keys instead would define a different model.
       - A layer's cache is written from the layer's input, before the layer runs. The
         cache of layer 0 stores the embedding after dropout.
       - A token does not attend to itself: t starts at 1. Without persistent vectors,
         the first token of a text has no key, and its y is 0.
       - The mask multiplies exp(s) and the weights are renormalised. Adding the ramp to
         the scores is not equivalent.
       - The window S follows the longest span of the layer's heads, in steps of 64.
         The cache is 64 rows longer, so that it still holds the rows that a growing span
         needs. If a span outgrows the cached rows, the missing rows are ignored (with
         STX_SPAN_LITERAL_MEMORY, they are read as zeros).
       - z is clamped to [0,1] after the update, not in the forward pass.
       - With no_renorm, S is part of the model: keys inside the window with m = 0
         contribute to the normaliser; keys outside do not.

   GPU. Build with SEQTX_CUDA and link seqtx_cuda.cu (see "GPU" in seqtx.h), and set
   desc.device to STX_CUDA for stx_create. Calls to this header stay the same. To replay
   steps as a CUDA graph, create ids and targets once with stx_tokens_create, write the
   step as a function, and run it as follows (examples/train_attn_span.c is a complete
   example):

       stx_tokens_set(x, ids, ..);
       stx_tokens_set(x, targets, ..);
       stx_optim_set_lr(optim, lr);
       stx_step_run(x, stx_span_key(model, ids, targets, memory, 0), step, user);

   step() must make every call from stx_begin to stx_optim_step and then call
   stx_span_clamp. It must not call stx_tokens or stx_item: store the loss with
   stx_metric_set, and read it with stx_metric_get after the step.
   The fused attention kernels require D to be a multiple of 8 and at most 128, and
   no_renorm, span_per_layer and literal to be 0. Otherwise, the scores are written to
   device memory, one chunk at a time.

   The compile-time options are described in seqtx.h.

   Reading order: stx__span_layer (a layer; stx_attention in seqtx.h computes the
   formulas above), stx_span_forward (the loop over layers and the memory),
   stx__span_sizes (spans), stx__span_gen_step (generation).
*/
#define STX__LETTERS 1
#include "seqtx.h"      /* hides single-letter macros; see the end of seqtx.h */
#ifndef SEQTX_ATTN_SPAN_H
#define SEQTX_ATTN_SPAN_H

#include "seqtx.h"

#ifdef __cplusplus
extern "C" {
#endif


// >>api: configuration

/* Flags of stx_span_desc.literal. Each restores an accidental behaviour of the authors'
   code; see "Fidelity" in the manual. */
enum {
    STX_SPAN_LITERAL_EPS    = 1,        /* requires adapt_span; incompatible with
                                           no_renorm */
    STX_SPAN_LITERAL_MEMORY = 2,
    STX_SPAN_LITERAL        = 1 << 30   /* all flags that apply to the model */
};

/* Configuration of a model. Zero means the default, which is given after "0:". */
typedef struct stx_span_desc {
    size_t vocab;           /* V, the vocabulary size; required */
    size_t layers;          /* number of layers, at most 4096; 0: 8. On a GPU, all models
                               with adapt_span in one context can have at most 512
                               layers and 8192 values of z in total */
    size_t dim;             /* d, the model dimension, a multiple of heads; 0: 256 */
    size_t heads;           /* H, the number of heads, at most 256; 0: 4 */
    size_t inner;           /* f, the feed-forward size; 0: 4 d. Ignored with pers */
    size_t span;            /* L, the largest span in tokens, at most 2^30; 0: 1024 */

    int    adapt_span;      /* 1: learn a span per head; 0: every head sees L tokens */
    int    full_cache;      /* 1: C = L; 0: C = min(L, S + 64) */
    double ramp;            /* R >= 1, in tokens; 0: 32 */
    double span_init;       /* initial z, in [0,1]; ignored without adapt_span */
    double span_loss;       /* weight of the span penalty, lambda in the paper; ignored
                               without adapt_span */
    int    span_per_layer;  /* 1: all heads of a layer share one z. Requires adapt_span */
    int    no_renorm;       /* 1: a = m exp(s) / sum exp(s). Requires adapt_span */
    int    fairseq_init;    /* 1: fairseq's initialisers; see the manual */
    unsigned literal;       /* STX_SPAN_LITERAL, or individual flags. A flag that does not apply is
                               an error. After creation, the model's desc has the flags
                               in effect */

    size_t pers;            /* N persistent vectors per head, which replace the
                               feed-forward network; 0: none */

    int    adapt_io;        /* 1: adaptive input and output. Token ids must be sorted by
                               decreasing frequency. The following fields, up to
                               forward_columns, apply only with adapt_io */
    int    adapt_io_tied;   /* 1: input and output share tables and projections */
    double divval;          /* above 1; 0: 4. Cluster i has width floor(d / divval^i) */
    size_t cutoff[STX_MAX_CLUSTERS - 1];    /* first ids of the second, third, .. cluster; in
                                               increasing order, below vocab */
    size_t cutoffs;         /* number of cutoffs; 0: those of 20000, 40000 and 200000 that are
                               below vocab */
    int    forward_columns; /* order of the cluster logits in the output head. 0: last
                               cluster first, as in the authors' code and in
                               Transformer-XL for PyTorch; 1: cluster 1 first, as in
                               Transformer-XL for TensorFlow */

    double dropout;         /* dropout probability, in [0,1), of attention weights and feed-forward
                               activations */
    double emb_dropout;     /* dropout probability, in [0,1), of the embedding and the last hidden
                               state */

    size_t recompute_layers;    /* number of layers to recompute in the backward pass,
                                   counted from the last; SIZE_MAX: all. Recomputing all
                                   takes about 25 % more time and much less memory */
} stx_span_desc;

/* Parameters of a layer. */
typedef struct stx_span_layer {
    stx_tensor *z;                          /* learned spans, as fractions of L: (H), or (1) with
                                               span_per_layer; NULL if spans are
                                               fixed */
    stx_tensor *pers_key, *pers_val;        /* (H,N,D); NULL without pers */
    stx_tensor *wq, *wk, *wv, *wo;          /* (d,d); wq, wk, wv are adjacent in memory */
    stx_tensor *norm1_gain, *norm1_shift;   /* (d) */
    stx_tensor *w1, *b1;                    /* w1 (f,d); b1 (f). w1 to norm2_shift are NULL with
                                               pers */
    stx_tensor *w2, *b2;                    /* w2 (d,f); b2 (d) */
    stx_tensor *norm2_gain, *norm2_shift;   /* (d) */
} stx_span_layer;

/* A model. The context owns it and its parameters. The fields are read-only, except
   desc.recompute_layers, desc.span_loss (>= 0) and desc.ramp (>= 1), which can be changed
   between steps. */
typedef struct stx_span {
    stx_ctx          *ctx;
    stx_span_desc     desc;     /* with the defaults filled in */
    stx_params       *params;
    stx_tensor       *key_pe;   /* (L,D): row L - t is E_t */
    stx_vocab_io     *vocab_io; /* embedding and output head */
    stx_span_layer   *layer;    /* [layers] */
    stx_tensor      **z;        /* [layers], z of each layer; NULL if spans are fixed */
    stx_param_subset *spans;    /* z of all layers, for stx_clamp_params */
    stx_attention_record *attended; /* [layers], for stx_span_attention_map */
} stx_span;

/* Creates a model with initialised parameters in context x, which owns it. The desc is
   copied. Returns NULL and sets an error if the desc is NULL or invalid, or if memory
   runs out. */
STX_DEF stx_span *stx_span_create(stx_ctx *x, const stx_span_desc *desc);

/* stx_span_open creates the model in a file of stx_span_save or in a checkpoint of
   train_attn_span, in context x, which owns it. Returns NULL after an error.
   stx_span_save writes the model to a file, atomically; returns 1, or 0 after an error.
   stx_span_family is for files that contain more than a model, and for programs that
   accept any family. See stx_model_open, stx_model_write and stx_lm_open in seqtx.h. */
STX_DEF stx_span *stx_span_open(stx_ctx *x, const char *path);
STX_DEF int stx_span_save(stx_span *m, const char *path);
STX_DEF const stx_family *stx_span_family(void);

/* The model's parameters, owned by the context; NULL if m is NULL. */
STX_DEF stx_params *stx_span_params(stx_span *m);

/* Returns the number of parameter elements of a model with this desc, without creating
   it. Tied parameters are counted once. Returns 0, without setting an error, if the
   desc is invalid, and SIZE_MAX if the number does not fit in size_t. */
STX_DEF size_t stx_span_count(const stx_span_desc *desc);


// >>api: memory

/* A memory: one cache per layer for B streams. A forward pass reads one memory and
   writes another, or the same one. Use separate memories for training and evaluation. A
   new memory is empty. Generation uses a separate KV cache. */
typedef struct stx_span_state {
    stx_span   *model;
    size_t      B;
    stx_memory *memory; /* storage: n = layer[l].count rows of layer inputs, (B,n,d),
                           oldest first. layer[l].logical_count is the cache length, as
                           in the authors' code: C, or less while the cache refills after
                           a span has grown. It affects only step keys, copies and
                           checkpoints, not results. Rows of the window that are not
                           stored are ignored; with STX_SPAN_LITERAL_MEMORY, they are
                           read as zeros */
} stx_span_state;

/* Creates an empty memory for B >= 1 streams. Returns NULL and sets an error if B is 0
   or an allocation fails. Free the result with stx_span_state_free; otherwise it is freed
   with the context. */
STX_DEF stx_span_state *stx_span_state_create(stx_span *m, size_t B);
STX_DEF void stx_span_state_free(stx_span_state *s);

/* Empties the memory and sets the cache length of each layer from the current spans.
   Does nothing after an error. */
STX_DEF void stx_span_state_reset(stx_span_state *s);

/* Empties the memory of one stream, for example when a new text begins in it. Until the
   emptied rows have moved out of the cache, each layer uses a single group of heads,
   and a GPU does not replay steps. Sets an error if stream >= B. */
STX_DEF void stx_span_state_reset_stream(stx_span_state *s, size_t stream);

/* stx_span_state_get copies the memory of layer l to host memory, and stx_span_state_set
   copies it back; see "Copying a memory" in the manual. stx_span_state_get writes
   (B,n,d) values to out, oldest row first, with n = s->memory->layer[l].count rows per
   stream. It fails while rows are missing in some stream, after
   stx_span_state_reset_stream or stx_span_state_copy. stx_span_state_set replaces the
   layer's memory with n rows per stream and sets its cache length to cache_length, where
   n <= cache_length <= L. Pass layer[l].logical_count of the source memory, or
   stx_span_cache_length(s->model, l) if the data does not come from a memory. Both
   return 1, or set an error and return 0. A set with invalid arguments leaves the memory
   unchanged; if an allocation or the copy fails, layer l is empty. */
STX_DEF int stx_span_state_get(const stx_span_state *s, size_t l, stx_real *out);
STX_DEF int stx_span_state_set(stx_span_state *s, size_t l, size_t cache_length,
                               const stx_real *in, size_t n);

/* Copies the memory of n consecutive streams of `from`, beginning at from_stream, to n
   streams of `to`, beginning at to_stream, for example to regroup batches. Both
   memories must belong to the same context, and their models must have the same layers,
   d, span and STX_SPAN_LITERAL_MEMORY flag. If they are the same memory, the ranges must
   not overlap. The newest rows are aligned. If all streams of `to` are replaced, `to` has
   exactly the rows of `from`. Otherwise, if the memories have different numbers of rows,
   the older rows are missing in the streams that have fewer, as after
   stx_span_state_reset_stream. Returns 1, or sets an error and returns 0. */
STX_DEF int stx_span_state_copy(stx_span_state *to, size_t to_stream,
                                const stx_span_state *from, size_t from_stream, size_t n);

/* stx_span_state_save saves the memory to a checkpoint, under names that begin with
   prefix (at most 80 bytes). The memory must not change until stx_writer_finish
   returns. stx_span_state_load loads it into a memory with the same B. Both return 1,
   or set an error and return 0; a failed load leaves the memory empty. After an earlier
   error, they do nothing and return 0. */
STX_DEF int stx_span_state_save(stx_writer *w, const stx_span_state *s, const char *prefix);
STX_DEF int stx_span_state_load(stx_span_state *s, const stx_file *f, const char *prefix);


// >>api: forward

/* ids (B,T) -> last hidden state (B,T,d). `in` is the memory to read (NULL: an empty
   one), and `out` the memory to write (NULL: none). They may be the same memory.
   Gradients do not reach the memory. Returns NULL and sets an error if a memory belongs
   to another model or its B differs from the B of ids. After an error, `out` may be
   partly written: call stx_clear_error, then stx_span_state_reset. */
STX_DEF stx_tensor *stx_span_forward(stx_span *m, const stx_ids *ids, const stx_span_state *in,
                                     stx_span_state *out);

/* Hidden state (B,T,d) -> logits (B,T,V), which are differentiable. With adapt_io, this
   is an error, because each cluster has a separate softmax. Returns NULL after an
   error. */
STX_DEF stx_tensor *stx_span_logits(stx_span *m, stx_tensor *h);

/* Hidden state (B,T,d) -> log p (B,T,V), which is not differentiable. Works with and
   without adapt_io. Returns NULL after an error. */
STX_DEF stx_tensor *stx_span_log_probs(stx_span *m, stx_tensor *h);

/* Runs stx_span_forward on ids (B,T) with memories `in` and `out`, and returns the mean
   negative log-likelihood (1) of targets (B,T), in nats per token. Returns NULL after
   an error. */
STX_DEF stx_tensor *stx_span_loss(stx_span *m, const stx_ids *ids, const stx_ids *targets,
                                  const stx_span_state *in, stx_span_state *out);

/* Adds the span penalty, span_loss sum_l L mean_heads z, to nll (1). Returns nll
   itself if spans are fixed or span_loss is 0. Call stx_backward on the result. */
STX_DEF stx_tensor *stx_span_total(stx_span *m, stx_tensor *nll);

/* Clamps all z to [0,1]. Call it after every update. Does nothing if spans are fixed. */
STX_DEF void stx_span_clamp(stx_span *m);

/* Returns the key for stx_step_run: a hash of all host-side decisions in a step with
   these tokens and this memory, including windows, sizes and addresses. s is the memory
   that the step reads or writes; ids, targets and s may be NULL. With adapt_io, the key
   also depends on the number of tokens per cluster (see stx_adaptive_key), so set the
   tokens first. salt is included in the hash: for a step with several parts or memories,
   pass the key of each one as the salt of the next. Sets an error if s belongs to
   another model. Waits until the spans of the previous step are known. */
STX_DEF uint64_t stx_span_key(const stx_span *m, const stx_ids *ids, const stx_ids *targets,
                              const stx_span_state *s, uint64_t salt);

/* Returns the span of one head in tokens, z L, without the ramp. Returns L if spans are
   fixed, and 0 if l or head is out of range or after an error. On a GPU, this and the
   next four functions wait until the spans of the previous step are known. After an
   error, the window, the cache length and the statistics are those of z = 0. */
STX_DEF double stx_span_head_span(const stx_span *m, size_t l, size_t head);

/* Return S, the number of tokens that layer l can look back, and C, the length of its
   cache in rows. Both change with z from step to step; see the manual. Both functions
   return 0 if l is out of range. */
STX_DEF size_t stx_span_window(const stx_span *m, size_t l);
STX_DEF size_t stx_span_cache_length(const stx_span *m, size_t l);

/* Writes the span of every head in tokens, as stx_span_head_span returns it, to spans
   (layers,heads). Writes zeros after an error. */
STX_DEF void stx_span_head_spans(const stx_span *m, double *spans);

/* Computes spans including the ramp, in tokens, as the authors' code logs them. *avg
   receives the mean of the layers' reaches, each computed from the mean z of the
   layer's heads. *max receives the largest reach of any head. With fixed spans, both
   values are L. If m is NULL, both are 0. Either pointer can be NULL. */
STX_DEF void stx_span_stats(const stx_span *m, double *avg, double *max);

/* Returns the attention weights of layer l in stream b, of the last forward pass of this
   step, with the learned spans of the heads (see stx_attention_map). The keys are, in
   this order: with STX_SPAN_LITERAL_MEMORY, unwritten rows of the window, which are read
   as zeros; the cached rows of the window; the segment; the persistent vectors. Rows
   beyond the span of a head have weight 0. Call it before the next stx_begin and before
   the parameters change. On a GPU, it copies from the device, like stx_get. Returns NULL
   and sets an error if there was no forward pass, if l or b is out of range, or if the
   layer is recomputed (recompute_layers with STX_TRAIN). */
STX_DEF const stx_attention_map *stx_span_attention_map(const stx_span *m, size_t l, size_t b);


// >>api: generation

/* A generator: runs the model on new tokens only, with one KV cache per layer. A cache
   covers the layer's window, so the cost of a token does not grow with the length of the
   text. Up to rounding, the results are the same as with stx_span_forward over the whole
   text. After the parameters change, reset the generator or create a new one. */
typedef struct stx_span_gen {
    stx_span  *model;
    size_t     B;
    stx_cache *cache;
} stx_span_gen;

/* Creates a generator for B >= 1 streams. Returns NULL and sets an error if B is 0 or
   memory runs out. Free the result with stx_span_gen_free; otherwise it is freed with
   the context. */
STX_DEF stx_span_gen *stx_span_gen_create(stx_span *m, size_t B);
STX_DEF void stx_span_gen_free(stx_span_gen *g);

/* Empties the cache and sets the window of each layer from the current spans. Does
   nothing after an error. */
STX_DEF void stx_span_gen_reset(stx_span_gen *g);

/* Feeds n >= 1 tokens per stream, ids (B,n), and returns log p (B,V) of the next
   token, or NULL after an error. The result is in host memory, ready for stx_sample,
   and valid until the next call. Calls stx_begin(x, STX_EVAL), so do not call it
   between a forward pass and its backward pass. After an error, the cache may already
   contain some of the new tokens: call stx_clear_error, then stx_span_gen_reset. */
STX_DEF const stx_real *stx_span_gen_feed(stx_span_gen *g, const int32_t *ids, size_t n);

/* Returns the model as a table of functions, for programs that accept any model family.
   The spans determine the windows, so the window arguments of state_create and
   gen_create must be 0. If m is NULL, all fields are NULL. */
STX_DEF stx_lm stx_span_as_lm(stx_span *m);

#ifdef __cplusplus
}
#endif

/* Stop reading here if you only want the API. */
#endif /* SEQTX_ATTN_SPAN_H */

#if (defined(SEQTX_IMPLEMENTATION) || defined(SEQTX_ATTN_SPAN_IMPLEMENTATION)) \
    && !defined(SEQTX_ATTN_SPAN_IMPLEMENTATION_DONE)
#define SEQTX_ATTN_SPAN_IMPLEMENTATION_DONE

#define STX_LOOPS
#include "seqtx.h"      /* included again for STX__FP_SCOPE, which sets the library's
                           floating-point environment in a function; see STX_LOOPS */

#include <math.h>
#include <stdio.h>
#include <string.h>


// >>creation

/* S is trimmed in steps of this many tokens, and a cache has this many spare rows, as
   in the authors' code. */
enum { STX__SPAN_STEP = 64 };

/* The limit on heads is the length of stx_head_groups.of. The limit on layers guards
   against typos and is far above the number of layers of any published model. */
enum { STX__SPAN_MAX_LAYERS = 4096, STX__SPAN_MAX_HEADS = 256 };

#define STX__SPAN_NORM_EPS 1e-5     /* epsilon of the layer norms, as in PyTorch */

static int stx__span_bad(stx_ctx *x, const char *field, double got, const char *expected) {
    return stx_bad_value(x, "stx_span_create", field, got, expected);
}

static int stx__span_too_large(stx_ctx *x, const char *field, size_t got, size_t most) {
    stx_fail(x, STX_ERR_ARG, "stx_span_create: %s: expected at most %zu, got %zu", field, most,
             got);
    return 0;
}

/* Replaces STX_SPAN_LITERAL with the flags that apply to the model. Returns 0 and sets
   an error if a flag that was set individually does not apply or is unknown. */
static int stx__span_resolve_literal(stx_ctx *x, stx_span_desc *d) {
    const unsigned all = STX_SPAN_LITERAL | STX_SPAN_LITERAL_EPS | STX_SPAN_LITERAL_MEMORY;
    unsigned apply = STX_SPAN_LITERAL_MEMORY;
    if (d->adapt_span && !d->no_renorm) apply |= STX_SPAN_LITERAL_EPS;
    if (d->literal & STX_SPAN_LITERAL_EPS & ~apply) {
        stx_fail(x, STX_ERR_ARG,
                 "stx_span_create: literal: STX_SPAN_LITERAL_EPS requires adapt_span without "
                 "no_renorm; STX_SPAN_LITERAL selects the flags that apply");
        return 0;
    }
    if (d->literal & ~all) {
        stx_fail(x, STX_ERR_ARG,
                 "stx_span_create: literal: expected STX_SPAN_LITERAL, or one or both "
                 "of STX_SPAN_LITERAL_EPS and STX_SPAN_LITERAL_MEMORY, got 0x%x", d->literal);
        return 0;
    }
    if (d->literal & STX_SPAN_LITERAL) d->literal = apply;
    return 1;
}

/* Describes the embedding and the output head. Initialisers are as in PyTorch. Embedding
   tables are normal with standard deviation 1, or 1/sqrt(d) with fairseq_init and without
   adapt_io. Everything else is uniform in [-1/sqrt(columns), 1/sqrt(columns)]. */
static void stx__span_describe_vocab_io(const stx_span_desc *d, stx_vocab_io_desc *w) {
    memset(w, 0, sizeof *w);
    w->vocab = d->vocab;
    w->dim = d->dim;
    w->in = w->out = d->adapt_io ? STX_VOCAB_ADAPTIVE : STX_VOCAB_PLAIN;
    w->share_tables = w->share_projs = d->adapt_io && d->adapt_io_tied;
    w->divval = d->divval;
    w->cutoffs = d->adapt_io ? d->cutoffs : 0;
    w->forward_columns = d->forward_columns;
    memcpy(w->cutoff, d->cutoff, sizeof w->cutoff);

    w->table.kind = STX_NORMAL;
    w->table.a = 1;
    if (d->fairseq_init && !d->adapt_io) w->table.rule = STX_INIT_FAN_IN;
    w->out_table.kind = STX_UNIFORM;
    w->out_table.a = 1;
    w->out_table.rule = STX_INIT_FAN_IN;
    w->proj = w->bias = w->cluster = w->cluster_bias = w->out_table;
}

/* Copies `from` to *d, fills in the defaults, checks the result, and derives *vocab_io,
   the desc of the embedding and the output head. If the desc is invalid, returns 0 and,
   unless x is NULL, sets an error. */
static int stx__span_resolve(stx_ctx *x, const stx_span_desc *from, stx_span_desc *d,
                             stx_vocab_io_desc *vocab_io) {
    STX__FP_SCOPE;
    /* With these limits, no product of two sizes overflows 64 bits, and the default of
       `inner`, 4 dim, never exceeds most_inner. */
    const size_t most = (size_t)1 << 30, most_dim = most / 2, most_inner = 2 * most;
    *d = *from;
    if (!d->layers) d->layers = 8;
    if (!d->dim) d->dim = 256;
    if (!d->heads) d->heads = 4;
    if (!d->span) d->span = 1024;
    if (d->ramp == 0) d->ramp = 32;

    if (d->layers > STX__SPAN_MAX_LAYERS)
        return stx__span_too_large(x, "layers", d->layers, STX__SPAN_MAX_LAYERS);
    if (d->dim > most_dim) return stx__span_too_large(x, "dim", d->dim, most_dim);
    if (!d->inner) d->inner = 4 * d->dim;
    if (d->heads > STX__SPAN_MAX_HEADS || d->dim % d->heads) {
        stx_fail(x, STX_ERR_ARG,
                 "stx_span_create: heads: expected a divisor of dim (%zu) that is at most %d, "
                 "got %zu", d->dim, STX__SPAN_MAX_HEADS, d->heads);
        return 0;
    }
    if (d->span > most) return stx__span_too_large(x, "span", d->span, most);
    if (d->pers > most) return stx__span_too_large(x, "pers", d->pers, most);
    if (!d->pers && d->inner > most_inner)
        return stx__span_too_large(x, "inner", d->inner, most_inner);
    if (!(d->ramp >= 1 && d->ramp <= (double)most))
        return stx__span_bad(x, "ramp", d->ramp, "1 to 2^30");
    if (!(d->span_init >= 0 && d->span_init <= 1))
        return stx__span_bad(x, "span_init", d->span_init, "a fraction of span from 0 to 1");
    if (!(d->span_loss >= 0 && d->span_loss < 1e30))
        return stx__span_bad(x, "span_loss", d->span_loss, "0 to 1e30");
    if (!(d->dropout >= 0 && d->dropout < 1))
        return stx__span_bad(x, "dropout", d->dropout, "at least 0 and below 1");
    if (!(d->emb_dropout >= 0 && d->emb_dropout < 1))
        return stx__span_bad(x, "emb_dropout", d->emb_dropout, "at least 0 and below 1");
    if ((d->no_renorm || d->span_per_layer) && !d->adapt_span) {
        stx_fail(x, STX_ERR_ARG,
                 "stx_span_create: %s requires adapt_span = 1; a fixed span has no mask",
                 d->no_renorm ? "no_renorm" : "span_per_layer");
        return 0;
    }
    if (!stx__span_resolve_literal(x, d)) return 0;

    stx__span_describe_vocab_io(d, vocab_io);
    if (!stx_vocab_io_resolve(x, "stx_span_create", vocab_io, vocab_io)) return 0;
    d->divval = vocab_io->divval;
    d->cutoffs = vocab_io->cutoffs;
    memcpy(d->cutoff, vocab_io->cutoff, sizeof d->cutoff);
    d->recompute_layers = STX_MIN(d->recompute_layers, d->layers);
    return 1;
}

STX_DEF size_t stx_span_count(const stx_span_desc *desc) {
    stx_span_desc d;
    stx_vocab_io_desc vocab_io;
    size_t n, layer, spans;
    if (!desc || !stx__span_resolve(NULL, desc, &d, &vocab_io)) return 0;

    spans = d.span_per_layer ? 1 : d.heads;
    layer = 2 * d.dim + (d.adapt_span ? spans : 0);         /* norm1, z */
    layer = stx_size_add(layer, 4 * d.dim, d.dim);          /* wq, wk, wv, wo */
    if (d.pers) {
        layer = stx_size_add(layer, d.pers, 2 * d.dim);     /* pers_key, pers_val */
    } else {
        layer = stx_size_add(layer, 2 * d.dim + 1, d.inner);    /* w1, w2, b1 */
        layer = stx_size_add(layer, 3, d.dim);              /* b2, norm2 */
    }
    /* embedding, output head and key_pe */
    n = stx_size_add(stx_vocab_io_count(&vocab_io), d.dim / d.heads, d.span);
    return stx_size_add(n, d.layers, layer);
}

static stx_tensor *stx__span_param(stx_span *m, size_t l, const char *name, int init, double a,
                                   size_t d0, size_t d1, size_t d2) {
    char full[96];
    snprintf(full, sizeof full, "layers.%zu.%s", l, name);
    return stx_param(m->params, init, a, full, d0, d1, d2, 0);
}

/* Creates the parameters of one layer. Weights and biases are initialised as in
   PyTorch's Linear: uniform in [-1/sqrt(columns), 1/sqrt(columns)]. Persistent keys are
   normal with standard deviation 1/sqrt(D), and persistent values with 1/sqrt(N). With
   fairseq_init, the projections are Xavier-normal, with standard deviation 1/sqrt(d), and
   the feed-forward weights are Xavier-uniform. */
static void stx__span_create_layer(stx_span *m, size_t l) {
    const stx_span_desc *d = &m->desc;
    stx_span_layer *p = &m->layer[l];
    const size_t D = d->dim / d->heads;
    const double scale_d = 1 / sqrt((double)d->dim);    /* bound or standard deviation of weights */
    const double scale_f = 1 / sqrt((double)d->inner);
    const double xavier = sqrt(6 / ((double)d->dim + (double)d->inner));
    const int proj = d->fairseq_init ? STX_NORMAL : STX_UNIFORM;

    if (d->adapt_span)
        p->z = stx__span_param(m, l, "attn.span", STX_CONSTANT, d->span_init,
                               d->span_per_layer ? 1 : d->heads, 0, 0);
    if (d->pers) {
        p->pers_key = stx__span_param(m, l, "attn.pers_key", STX_NORMAL, 1 / sqrt((double)D),
                                      d->heads, d->pers, D);
        p->pers_val = stx__span_param(m, l, "attn.pers_val", STX_NORMAL,
                                      1 / sqrt((double)d->pers), d->heads, d->pers, D);
    }

    /* Wq, Wk and Wv are adjacent in memory so that one GEMM computes q, k and v. The
       random numbers are drawn in the order q, o, v, k, as in the authors' code. Each
       stx_params_rng_offset call affects only the next parameter. */
    if (!stx_params_make_contiguous(m->params, stx_bytes_of(3, d->dim, d->dim))) return;
    p->wq = stx__span_param(m, l, "attn.wq", proj, scale_d, d->dim, d->dim, 0);
    stx_params_rng_offset(m->params, 2);
    p->wk = stx__span_param(m, l, "attn.wk", proj, scale_d, d->dim, d->dim, 0);
    p->wv = stx__span_param(m, l, "attn.wv", proj, scale_d, d->dim, d->dim, 0);
    stx_params_rng_offset(m->params, -2);
    p->wo = stx__span_param(m, l, "attn.wo", proj, scale_d, d->dim, d->dim, 0);
    p->norm1_gain = stx__span_param(m, l, "norm1.weight", STX_CONSTANT, 1, d->dim, 0, 0);
    p->norm1_shift = stx__span_param(m, l, "norm1.bias", STX_ZEROS, 0, d->dim, 0, 0);
    if (d->pers) return;

    p->w1 = stx__span_param(m, l, "ff.fc1.weight", STX_UNIFORM, d->fairseq_init ? xavier : scale_d,
                            d->inner, d->dim, 0);
    p->b1 = stx__span_param(m, l, "ff.fc1.bias", STX_UNIFORM, scale_d, d->inner, 0, 0);
    p->w2 = stx__span_param(m, l, "ff.fc2.weight", STX_UNIFORM, d->fairseq_init ? xavier : scale_f,
                            d->dim, d->inner, 0);
    p->b2 = stx__span_param(m, l, "ff.fc2.bias", STX_UNIFORM, scale_f, d->dim, 0, 0);
    p->norm2_gain = stx__span_param(m, l, "norm2.weight", STX_CONSTANT, 1, d->dim, 0, 0);
    p->norm2_shift = stx__span_param(m, l, "norm2.bias", STX_ZEROS, 0, d->dim, 0, 0);
}

STX_DEF stx_span *stx_span_create(stx_ctx *x, const stx_span_desc *desc) {
    STX__FP_SCOPE;
    stx_span *m;
    stx_span_desc *d;
    stx_vocab_io_desc vocab_io;
    size_t l;
    if (!stx_ok(x)) return NULL;
    if (!desc) {
        stx_fail(x, STX_ERR_ARG,
                 "stx_span_create: expected a desc with at least vocab set, got NULL");
        return NULL;
    }
    m = (stx_span *)stx_persist(x, sizeof *m);
    if (!m || !stx__span_resolve(x, desc, &m->desc, &vocab_io)) return NULL;
    d = &m->desc;
    m->ctx = x;
    m->params = stx_params_create(x);
    m->layer = (stx_span_layer *)stx_persist(x, d->layers * sizeof *m->layer);
    m->attended = (stx_attention_record *)stx_persist(x, d->layers * sizeof *m->attended);
    if (!m->params || !m->layer || !m->attended) return NULL;

    m->key_pe = stx_param(m->params, STX_NORMAL, 1, "key_pe", d->span, d->dim / d->heads, 0, 0);
    stx_param_elementwise(m->key_pe);
    m->vocab_io = stx_vocab_io_create(m->params, &vocab_io);
    for (l = 0; l < d->layers; l++) stx__span_create_layer(m, l);

    if (d->adapt_span) {
        m->z = (stx_tensor **)stx_persist(x, d->layers * sizeof *m->z);
        for (l = 0; m->z && l < d->layers; l++) m->z[l] = m->layer[l].z;
        m->spans = stx_params_subset(x, m->z, d->layers);
    }
    return stx_ok(x) ? m : NULL;
}

STX_DEF stx_params *stx_span_params(stx_span *m) {
    return m ? m->params : NULL;
}


// >>spans

/* Computes the mean and the maximum of z over the heads of layer l. */
static void stx__span_z(const stx_span *m, size_t l, double *mean, double *max) {
    STX__FP_SCOPE;
    const stx_tensor *z = m->layer[l].z;
    const stx_real *v = stx_param_mirror(m->ctx, z);
    size_t head;
    *mean = 0;
    *max = 0;
    if (!v) return;
    for (head = 0; head < z->size; head++) {
        *mean += (double)v[head] / (double)z->size;
        if ((double)v[head] > *max) *max = (double)v[head];
    }
}

/* Returns reach = min(L, ceil(z L) + ceil(R)), or slightly more where f32 cannot
   represent every distance. No key beyond this distance has m > 0. */
static size_t stx__span_reach(const stx_span_desc *d, double z) {
    return stx_attention_reach(z, (double)d->span, d->ramp, d->span);
}

/* Computes the window S and the cache length C of layer l from its longest span:
       S = L - 64 floor((L - reach) / 64)        C = min(L, S + 64) */
static void stx__span_sizes(const stx_span *m, size_t l, size_t *S, size_t *C) {
    const stx_span_desc *d = &m->desc;
    const size_t L = d->span;
    double mean, max;
    *S = L;
    if (d->adapt_span) {
        stx__span_z(m, l, &mean, &max);
        *S -= (L - stx__span_reach(d, max)) / STX__SPAN_STEP * STX__SPAN_STEP;
    }
    *C = d->full_cache ? L : STX_MIN(L, *S + STX__SPAN_STEP);
}

/* Sorts the heads of layer l into groups with separate windows, for the projection of
   `rows` cached rows. There is a single group in each of these cases:
   - All heads have the same window: fixed spans, one head or span_per_layer.
   - Keys beyond a head's span affect the result: no_renorm or STX_SPAN_LITERAL_EPS.
   - Zero keys precede the cached rows: STX_SPAN_LITERAL_MEMORY. stx_attention does not
     support such keys together with groups.
   - Streams have different numbers of cached rows (masked). This ends when the emptied
     rows have moved out of the cache.
   - Grouping would save too few rows to pay for reordering the weights, which happens
     once in the forward pass and once in the backward pass.
   Measured gain: 14 % of a training step (enwik8_small on Zen 4, one head per layer with
   a span of 1024, three with 51). */
static void stx__span_groups(const stx_span *m, size_t l, size_t B, size_t rows, int masked,
                             stx_head_groups *g) {
    const stx_span_desc *d = &m->desc;
    const stx_real *z;
    stx_head_groups several;
    size_t need[STX__SPAN_MAX_HEADS] = {0}, saved = 0, head;
    memset(g, 0, sizeof *g);
    g->count = 1;
    g->rows[0] = rows;
    if (!d->adapt_span || d->heads == 1 || d->span_per_layer) return;
    if (d->no_renorm || d->literal || masked || !rows) return;
    z = stx_param_mirror(m->ctx, m->layer[l].z);
    if (!z) return;

    /* one more row than the reach, because the first key with m = 0 is still on the
       ramp */
    for (head = 0; head < d->heads; head++)
        need[head] = stx__span_reach(d, (double)z[head]) + 1;
    stx_head_groups_choose(need, d->heads, rows, &several);

    /* Rule of thumb: for each row in `saved`, grouping avoids computing B D elements of
       k and B D elements of v. However, it reorders Wk and Wv in both passes and adds
       up their gradients, which moves about 3 d^2 elements per matrix. Therefore, group
       only if B D saved >= 3 d^2, with d = H D. */
    for (head = 0; head < d->heads; head++) saved += rows - several.rows[several.of[head]];
    if (several.count > 1 && B * saved >= 3 * d->heads * d->dim) *g = several;
}

STX_DEF size_t stx_span_window(const stx_span *m, size_t l) {
    size_t S = 0, C;
    if (m && l < m->desc.layers) stx__span_sizes(m, l, &S, &C);
    return S;
}

STX_DEF size_t stx_span_cache_length(const stx_span *m, size_t l) {
    size_t S, C = 0;
    if (m && l < m->desc.layers) stx__span_sizes(m, l, &S, &C);
    return C;
}

STX_DEF uint64_t stx_span_key(const stx_span *m, const stx_ids *ids, const stx_ids *targets,
                              const stx_span_state *s, uint64_t salt) {
    uint64_t key = stx_step_key(m, ids, targets, salt), bits;
    stx_head_groups g;
    size_t l, S, C, k;
    if (!m || !stx_ok(m->ctx)) return key;
    if (s && s->model != m) {
        stx_fail(m->ctx, STX_ERR_ARG,
                 "stx_span_key: expected a memory of this model, got one of another model");
        return key;
    }

    for (l = 0; l < m->desc.layers; l++) {
        stx__span_sizes(m, l, &S, &C);
        key = stx_key_add(stx_key_add(key, S), C);
        if (!s) continue;
        stx__span_groups(m, l, s->B, STX_MIN(S, s->memory->layer[l].count),
                         s->memory->layer[l].masked, &g);
        for (k = 0; k < g.count; k++) key = stx_key_add(key, g.rows[k]);
        for (k = 0; k < m->desc.heads; k++) key = stx_key_add(key, g.of[k]);
    }

    key = stx_key_add(key, m->desc.recompute_layers);
    memcpy(&bits, &m->desc.span_loss, 8);
    key = stx_key_add(key, bits);
    memcpy(&bits, &m->desc.ramp, 8);
    key = stx_key_add(key, bits);
    key = stx_vocab_io_key(m->vocab_io, key, ids, targets, NULL);
    return s ? stx_memory_key(s->memory, key) : key;
}

STX_DEF double stx_span_head_span(const stx_span *m, size_t l, size_t head) {
    STX__FP_SCOPE;
    const stx_real *z;
    if (!m || l >= m->desc.layers || head >= m->desc.heads) return 0;
    if (!m->desc.adapt_span) return (double)m->desc.span;
    if (m->desc.span_per_layer) head = 0;
    z = stx_param_mirror(m->ctx, m->layer[l].z);
    return z ? (double)z[head] * (double)m->desc.span : 0;
}

STX_DEF void stx_span_head_spans(const stx_span *m, double *spans) {
    size_t l, head;
    for (l = 0; m && l < m->desc.layers; l++)
        for (head = 0; head < m->desc.heads; head++) *spans++ = stx_span_head_span(m, l, head);
}

STX_DEF void stx_span_stats(const stx_span *m, double *avg, double *max) {
    STX__FP_SCOPE;
    double ignored;
    size_t l;
    if (!avg) avg = &ignored;
    if (!max) max = &ignored;
    *avg = *max = 0;
    if (!m) return;
    for (l = 0; l < m->desc.layers; l++) {
        double mean_z = 1, max_z = 1, reach;
        if (m->desc.adapt_span) stx__span_z(m, l, &mean_z, &max_z);
        reach = (double)stx__span_reach(&m->desc, max_z);
        *avg += (double)stx__span_reach(&m->desc, mean_z) / (double)m->desc.layers;
        if (reach > *max) *max = reach;
    }
}

STX_DEF void stx_span_clamp(stx_span *m) {
    if (m && stx_ok(m->ctx) && m->desc.adapt_span) stx_clamp_params(m->ctx, m->spans, 0, 1);
}


// >>memory

STX_DEF stx_span_state *stx_span_state_create(stx_span *m, size_t B) {
    stx_ctx *x = m ? m->ctx : NULL;
    stx_span_state *s;
    stx_memory_desc d;
    if (!stx_ok(x)) return NULL;
    if (!B) {
        stx_fail(x, STX_ERR_ARG, "stx_span_state_create: expected B >= 1 streams, got 0");
        return NULL;
    }
    memset(&d, 0, sizeof d);
    d.layers = m->desc.layers;
    d.B = B;
    d.width = m->desc.dim;
    d.count_unwritten = 1; /* lengths include unwritten rows, as in the authors' code */
    d.missing_as_zeros = (m->desc.literal & STX_SPAN_LITERAL_MEMORY) != 0;
    d.max_rows = m->desc.span; /* the length of the longest cache */
    s = (stx_span_state *)stx_block(x, sizeof *s);
    if (!s) return NULL;
    s->model = m;
    s->B = B;
    s->memory = stx_memory_create(x, &d);
    stx_span_state_reset(s);
    if (stx_ok(x)) return s;
    stx_span_state_free(s);
    return NULL;
}

STX_DEF void stx_span_state_free(stx_span_state *s) {
    if (!s) return;
    stx_memory_free(s->memory);
    stx_block_free(s->model->ctx, s);
}

STX_DEF void stx_span_state_reset(stx_span_state *s) {
    size_t l;
    if (!s || !stx_ok(s->model->ctx)) return;
    stx_memory_reset(s->memory);
    for (l = 0; l < s->model->desc.layers; l++)
        s->memory->layer[l].logical_count = stx_span_cache_length(s->model, l);
}

STX_DEF void stx_span_state_reset_stream(stx_span_state *s, size_t stream) {
    if (s) stx_memory_reset_stream(s->memory, stream);
}

STX_DEF int stx_span_state_get(const stx_span_state *s, size_t l, stx_real *out) {
    if (!s || !stx_ok(s->model->ctx)) return 0;
    if (l < s->model->desc.layers && s->memory->layer[l].masked) {
        stx_fail(s->model->ctx, STX_ERR_ARG,
                 "stx_span_state_get: some streams lack rows in layer %zu after a reset or a "
                 "copy; use stx_span_state_save or stx_span_state_copy instead", l);
        return 0;
    }
    return stx_memory_get(s->memory, l, out);
}

STX_DEF int stx_span_state_set(stx_span_state *s, size_t l, size_t cache_length,
                               const stx_real *in, size_t n) {
    return s && stx_memory_set(s->memory, l, cache_length, in, n);
}

STX_DEF int stx_span_state_copy(stx_span_state *to, size_t to_stream,
                                const stx_span_state *from, size_t from_stream, size_t n) {
    const stx_memory *memory = from ? from->memory : NULL;
    if (to && from && stx_ok(to->model->ctx)) {
        const stx_span_desc *a = &to->model->desc, *b = &from->model->desc;
        const unsigned flag = STX_SPAN_LITERAL_MEMORY;
        if (a->span != b->span || (a->literal & flag) != (b->literal & flag)) {
            stx_fail(to->model->ctx, STX_ERR_ARG,
                     "stx_span_state_copy: expected models with the same span and the same "
                     "STX_SPAN_LITERAL_MEMORY flag, got span %zu and %zu, flag %d and %d", a->span,
                     b->span, (a->literal & flag) != 0, (b->literal & flag) != 0);
            return 0;
        }
    }
    return to && stx_memory_copy(to->memory, to_stream, memory, from_stream, n);
}

STX_DEF int stx_span_state_save(stx_writer *w, const stx_span_state *s, const char *prefix) {
    return s && stx_memory_save(w, s->memory, prefix);
}

STX_DEF int stx_span_state_load(stx_span_state *s, const stx_file *f, const char *prefix) {
    if (!s || !stx_ok(s->model->ctx)) return 0;
    stx_span_state_reset(s);
    if (!f) {
        stx_fail(s->model->ctx, STX_ERR_ARG,
                 "stx_span_state_load: expected a file from stx_file_open, got NULL");
        return 0;
    }
    return stx_memory_load(s->memory, f, prefix);
}


// >>layer and forward

/* Arguments of stx__span_layer other than h. They are in the step arena because
   stx_recompute calls the layer again in the backward pass. */
typedef struct stx__span_job {
    stx_span        *m;
    size_t           l, S;
    stx_cached_rows  past;      /* cached rows in the window */
    stx_head_groups  groups;
    const stx_ids   *pad;       /* (B,rows + T): nonzero where a row is missing; or NULL */
} stx__span_job;

static void stx__span_attention_desc(const stx_span *m, size_t S, stx_attention_desc *attn) {
    const stx_span_desc *d = &m->desc;
    memset(attn, 0, sizeof *attn);
    attn->heads = d->heads;
    attn->span = S;
    attn->delta_min = 1;        /* a token does not attend to itself */
    attn->max_span = (double)d->span;
    attn->ramp = d->ramp;
    attn->eps = d->literal & STX_SPAN_LITERAL_EPS ? 1e-8 : 0;
    attn->no_renorm = d->no_renorm;
    attn->dropout = d->dropout;
    /* with STX_SPAN_LITERAL_MEMORY, zero keys extend back to the start of the window */
    attn->first_key = d->literal & STX_SPAN_LITERAL_MEMORY ? -(ptrdiff_t)S : 0;
}

/* Sets the inputs of the attention other than the cached rows: q, k, v = [Wq Wk Wv] h,
   positions, z and persistent vectors. */
static void stx__span_attention_in(const stx_span *m, size_t l, stx_tensor *h,
                                   stx_attention_in *in) {
    const stx_span_layer *p = &m->layer[l];
    stx_tensor *w[3];
    memset(in, 0, sizeof *in);
    w[0] = p->wq;
    w[1] = p->wk;
    w[2] = p->wv;
    in->qkv = stx_linear_concat(m->ctx, h, w, NULL, 3);
    in->pe = m->key_pe;
    in->span_fraction = p->z;
    in->persistent_k = p->pers_key; /* stx_attention scales keys by sqrt(D) and values by sqrt(N) */
    in->persistent_v = p->pers_val;
}

/* Runs the part of a layer after attention, from the attention output y:
       h'  = LN1(h + Wo y)
       h'' = LN2(h' + W2 dropout(relu(W1 h' + b1)) + b2)    omitted with pers
   There is no other dropout on the residual branches. */
static stx_tensor *stx__span_tail(stx_span *m, size_t l, stx_tensor *h, stx_tensor *y) {
    stx_ctx *x = m->ctx;
    const stx_span_layer *p = &m->layer[l];
    stx_tensor *f;
    y = stx_linear(x, y, p->wo, NULL, STX_ACT_NONE);
    h = stx_residual_norm(x, h, y, 0 /* dropout */, p->norm1_gain, p->norm1_shift,
                          STX__SPAN_NORM_EPS);
    if (m->desc.pers) return h;
    f = stx_linear(x, h, p->w1, p->b1, STX_ACT_RELU);
    f = stx_dropout(x, f, m->desc.dropout);
    f = stx_linear(x, f, p->w2, NULL, STX_ACT_NONE);
    return stx_residual_norm_bias(x, h, f, p->b2, 0 /* dropout */, p->norm2_gain,
                                  p->norm2_shift, STX__SPAN_NORM_EPS);
}

/* One layer, as a function that stx_recompute can call. in[0] is h (B,T,d). Returns the
   h that the next layer reads. */
static stx_tensor *stx__span_layer(stx_ctx *x, void *user, stx_tensor **in, stx_tensor **out) {
    const stx__span_job *job = (const stx__span_job *)user;
    stx_span *m = job->m;
    const stx_span_layer *p = &m->layer[job->l];
    const size_t B = in[0]->dim[0];
    stx_attention_in a;
    stx_attention_desc attn;
    (void)out;

    stx__span_attention_in(m, job->l, in[0], &a);
    if (job->groups.count > 1) {
        a.groups = &job->groups;
        stx_linear_heads(x, &job->past, B, p->wk, p->wv, m->desc.heads, a.groups, a.cached);
    } else {
        stx_tensor *w[2];
        w[0] = p->wk;
        w[1] = p->wv;
        a.cached[0] = stx_linear_cached(x, &job->past, 1, B, w, NULL, 2);
    }
    a.pad = job->pad;
    a.record = &m->attended[job->l];
    stx__span_attention_desc(m, job->S, &attn);
    return stx__span_tail(m, job->l, in[0], stx_attention(x, &a, &attn));
}

/* ids (B,T) -> embedding (B,T,d) after emb_dropout. */
static stx_tensor *stx__span_embed(stx_span *m, const stx_ids *ids) {
    return stx_dropout(m->ctx, stx_vocab_io_embed(m->vocab_io, ids), m->desc.emb_dropout);
}

/* Checks that a memory fits the model and the batch size of the tokens. */
static int stx__span_state_fits(const stx_span *m, const stx_ids *ids, const stx_span_state *s) {
    if (!s || (s->B == ids->B && s->model == m)) return 1;
    if (s->model != m)
        stx_fail(m->ctx, STX_ERR_ARG,
                 "stx_span_forward: expected a memory of this model, got one of another model");
    else
        stx_fail(m->ctx, STX_ERR_SHAPE,
                 "stx_span_forward: expected a memory with B = %zu streams, to match the "
                 "tokens, got %zu; create it with stx_span_state_create(model, B)", ids->B, s->B);
    return 0;
}

STX_DEF stx_tensor *stx_span_forward(stx_span *m, const stx_ids *ids, const stx_span_state *in,
                                     stx_span_state *out) {
    stx_ctx *x = m ? m->ctx : NULL;
    const stx_memory *memory = in ? in->memory : NULL;
    stx_tensor *h;
    size_t l, C;
    if (!stx_ok(x)) return NULL;
    if (!ids) {
        stx_fail(x, STX_ERR_ARG, "stx_span_forward: ids: expected tokens (B,T), got NULL");
        return NULL;
    }
    if (!stx__span_state_fits(m, ids, in) || !stx__span_state_fits(m, ids, out)) return NULL;

    h = stx__span_embed(m, ids);
    for (l = 0; l < m->desc.layers && h; l++) {
        stx__span_job *job = (stx__span_job *)stx_step_host_bytes(x, sizeof *job);
        if (!job) return NULL;
        job->m = m;
        job->l = l;

        /* read the memory; rows beyond the window have no weight and are not
           projected */
        stx__span_sizes(m, l, &job->S, &C);
        if (!stx_memory_view(memory, l, job->S, &job->past)) return NULL;
        job->pad = memory ? stx_memory_mask(memory, l, job->S, NULL, ids->T) : NULL;
        stx__span_groups(m, l, ids->B, job->past.rows, memory && memory->layer[l].masked,
                         &job->groups);

        /* write the layer's input h to the memory, before the layer runs */
        if (out && !stx_memory_push(out->memory, memory, l, C, h, NULL)) return NULL;

        /* the last recompute_layers layers are recomputed in the backward pass */
        if (m->desc.layers - l <= m->desc.recompute_layers)
            h = stx_recompute(x, stx__span_layer, job, &h, 1, NULL, 0);
        else
            h = stx__span_layer(x, job, &h, NULL);
    }
    return stx_dropout(x, h, m->desc.emb_dropout);
}

STX_DEF stx_tensor *stx_span_logits(stx_span *m, stx_tensor *h) {
    return m ? stx_vocab_io_logits(m->vocab_io, h) : NULL;
}

STX_DEF stx_tensor *stx_span_log_probs(stx_span *m, stx_tensor *h) {
    return m ? stx_vocab_io_log_probs(m->vocab_io, h) : NULL;
}

STX_DEF stx_tensor *stx_span_loss(stx_span *m, const stx_ids *ids, const stx_ids *targets,
                                  const stx_span_state *in, stx_span_state *out) {
    if (!m || !stx_ok(m->ctx)) return NULL;
    if (!targets) {
        stx_fail(m->ctx, STX_ERR_ARG, "stx_span_loss: targets: expected tokens (B,T), got NULL");
        return NULL;
    }
    return stx_vocab_io_loss(m->vocab_io, stx_span_forward(m, ids, in, out), targets, NULL);
}

STX_DEF stx_tensor *stx_span_total(stx_span *m, stx_tensor *nll) {
    STX__FP_SCOPE;
    if (!m || !nll || !m->desc.adapt_span || m->desc.span_loss == 0) return nll;
    return stx_add_means(m->ctx, nll, m->z, m->desc.layers,
                         m->desc.span_loss * (double)m->desc.span);
}

STX_DEF const stx_attention_map *stx_span_attention_map(const stx_span *m, size_t l, size_t b) {
    if (!m || !stx_ok(m->ctx)) return NULL;
    if (l >= m->desc.layers) {
        stx_fail(m->ctx, STX_ERR_ARG,
                 "stx_span_attention_map: expected a layer below %zu, got %zu", m->desc.layers, l);
        return NULL;
    }
    return stx_attention_map_of(m->ctx, "stx_span_attention_map", &m->attended[l], b);
}


// >>generation

STX_DEF stx_span_gen *stx_span_gen_create(stx_span *m, size_t B) {
    stx_ctx *x = m ? m->ctx : NULL;
    stx_span_gen *g;
    if (!stx_ok(x)) return NULL;
    if (!B) {
        stx_fail(x, STX_ERR_ARG, "stx_span_gen_create: expected B >= 1 streams, got 0");
        return NULL;
    }
    g = (stx_span_gen *)stx_block(x, sizeof *g);
    if (!g) return NULL;
    g->model = m;
    g->B = B;
    g->cache = stx_cache_create(x, m->desc.layers, B, m->desc.vocab);
    stx_span_gen_reset(g);
    if (stx_ok(x)) return g;
    stx_span_gen_free(g);
    return NULL;
}

STX_DEF void stx_span_gen_free(stx_span_gen *g) {
    if (!g) return;
    stx_cache_free(g->cache);
    stx_block_free(g->model->ctx, g);
}

STX_DEF void stx_span_gen_reset(stx_span_gen *g) {
    size_t l;
    if (!g) return;
    for (l = 0; l < g->model->desc.layers; l++) {
        size_t window = stx_span_window(g->model, l);
        if (!stx_cache_window(g->cache, l, window, g->model->desc.dim, 1 /* both k and v */))
            return;
    }
}

/* ids (B,T) -> hidden states (B,T,d). Runs the loop of stx_span_forward, with KV caches
   instead of the memory. */
static stx_tensor *stx__span_gen_step(void *user, const stx_ids *ids) {
    stx_span_gen *g = (stx_span_gen *)user;
    stx_span *m = g->model;
    stx_tensor *h = stx__span_embed(m, ids);
    size_t l;
    for (l = 0; l < m->desc.layers && h; l++) {
        stx_attention_in in;
        stx_attention_desc attn;
        stx__span_attention_in(m, l, h, &in);
        stx__span_attention_desc(m, g->cache->layer[l].window, &attn);
        h = stx__span_tail(m, l, h, stx_cache_attention(g->cache, l, &in, &attn));
    }
    return h;
}

STX_DEF const stx_real *stx_span_gen_feed(stx_span_gen *g, const int32_t *ids, size_t n) {
    if (!g) return NULL;
    return stx_cache_feed(g->cache, g->model->vocab_io, ids, n, 0 /* log p, not scores */,
                          stx__span_gen_step, g);
}


// >>model: the table of functions for programs that accept any model family

static stx_tensor *stx__span_lm_loss(void *m, const stx_ids *ids, const stx_ids *targets,
                                     const void *in, void *out) {
    return stx_span_loss((stx_span *)m, ids, targets, (const stx_span_state *)in,
                         (stx_span_state *)out);
}

static stx_tensor *stx__span_lm_total(void *m, stx_tensor *nll) {
    return stx_span_total((stx_span *)m, nll);
}

static void stx__span_lm_updated(void *m) {
    stx_span_clamp((stx_span *)m);
}

static size_t stx__span_lm_recompute(void *m, size_t n) {
    stx_span_desc *d = &((stx_span *)m)->desc;
    d->recompute_layers = STX_MIN(n, d->layers);
    return d->recompute_layers;
}

static uint64_t stx__span_lm_key(const void *m, const stx_ids *ids, const stx_ids *targets,
                                 const void *s, uint64_t salt) {
    return stx_span_key((const stx_span *)m, ids, targets, (const stx_span_state *)s, salt);
}

static const stx_attention_map *stx__span_lm_attention_map(const void *m, size_t l, size_t b) {
    return stx_span_attention_map((const stx_span *)m, l, b);
}

static int stx__span_lm_window_ok(stx_span *m, const char *op, size_t window) {
    if (m && window)
        stx_fail(m->ctx, STX_ERR_ARG,
                 "%s: expected window = 0, got %zu; the spans determine the windows", op, window);
    return !window;
}

static void *stx__span_lm_state_create(void *m, size_t B, size_t window) {
    if (!stx__span_lm_window_ok((stx_span *)m, "stx_lm.state_create", window)) return NULL;
    return stx_span_state_create((stx_span *)m, B);
}

static void *stx__span_lm_gen_create(void *m, size_t B, size_t window) {
    if (!stx__span_lm_window_ok((stx_span *)m, "stx_lm.gen_create", window)) return NULL;
    return stx_span_gen_create((stx_span *)m, B);
}

/* Defines stx__span_lm_states, which sets the fields state_* and gen_*, except
   state_create and gen_create. */
STX_LM_STATES(span)

STX_DEF stx_lm stx_span_as_lm(stx_span *m) {
    stx_lm lm;
    memset(&lm, 0, sizeof lm);
    if (!m) return lm;
    lm.model = m;
    lm.ctx = m->ctx;
    lm.family = stx_span_family();
    lm.params = m->params;
    lm.vocab_io = m->vocab_io;
    lm.loss = stx__span_lm_loss;
    lm.total = stx__span_lm_total;
    lm.updated = stx__span_lm_updated;
    lm.recompute = stx__span_lm_recompute;
    lm.key = stx__span_lm_key;
    lm.layers = m->desc.layers;
    lm.attention_map = stx__span_lm_attention_map;
    lm.state_create = stx__span_lm_state_create;
    lm.gen_create = stx__span_lm_gen_create;
    stx__span_lm_states(&lm);
    return lm;
}


// >>files

static void *stx__span_family_create(stx_ctx *x, const void *desc) {
    return stx_span_create(x, (const stx_span_desc *)desc);
}

static const void *stx__span_family_desc(const void *m) {
    return &((const stx_span *)m)->desc;
}

static stx_params *stx__span_family_params(void *m, int k) {
    return k ? NULL : ((stx_span *)m)->params;
}

static stx_lm stx__span_family_as_lm(void *m) {
    return stx_span_as_lm((stx_span *)m);
}

STX_DEF const stx_family *stx_span_family(void) {
    static const stx_field field[] = {
        STX_FIELD(stx_span_desc, SIZE, vocab),
        STX_FIELD(stx_span_desc, SIZE, layers),
        STX_FIELD(stx_span_desc, SIZE, dim),
        STX_FIELD(stx_span_desc, SIZE, heads),
        STX_FIELD(stx_span_desc, SIZE, inner),
        STX_FIELD(stx_span_desc, SIZE, span),
        STX_FIELD(stx_span_desc, INT, adapt_span),
        STX_FIELD(stx_span_desc, INT, full_cache),
        STX_FIELD(stx_span_desc, REAL, ramp),
        STX_FIELD(stx_span_desc, REAL, span_init),
        STX_FIELD(stx_span_desc, REAL, span_loss),
        STX_FIELD(stx_span_desc, INT, span_per_layer),
        STX_FIELD(stx_span_desc, INT, no_renorm),
        STX_FIELD(stx_span_desc, INT, fairseq_init),
        STX_FIELD(stx_span_desc, UNSIGNED, literal),
        STX_FIELD(stx_span_desc, SIZE, pers),
        STX_FIELD(stx_span_desc, INT, adapt_io),
        STX_FIELD(stx_span_desc, INT, adapt_io_tied),
        STX_FIELD(stx_span_desc, REAL, divval),
        STX_FIELD_ARRAY(stx_span_desc, SIZE, cutoff),
        STX_FIELD(stx_span_desc, SIZE, cutoffs),
        STX_FIELD(stx_span_desc, INT, forward_columns),
        STX_FIELD(stx_span_desc, REAL, dropout),
        STX_FIELD(stx_span_desc, REAL, emb_dropout),
        STX_FIELD(stx_span_desc, SETTING, recompute_layers)
    };
    static const stx_family family = {
        "attn_span", sizeof(stx_span_desc), field, sizeof field / sizeof *field,
        stx__span_family_create, stx__span_family_desc, stx__span_family_params,
        stx__span_family_as_lm
    };
    return &family;
}

STX_DEF stx_span *stx_span_open(stx_ctx *x, const char *path) {
    return (stx_span *)stx_model_open(x, stx_span_family(), path);
}

STX_DEF int stx_span_save(stx_span *m, const char *path) {
    return stx_model_save(stx_span_family(), m, path);
}

#endif /* SEQTX_ATTN_SPAN_IMPLEMENTATION */

#define STX__LETTERS 2
#include "seqtx.h"      /* restores the single-letter macros */
