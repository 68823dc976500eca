/* seqtx_compressive.h - v0.1 - Compressive Transformer, with GTrXL's gates
   no warranty implied; MIT or public domain, your choice (see the end of seqtx.h)

   In ONE .c or .cpp file:                everywhere else:
       #define SEQTX_IMPLEMENTATION           #include "seqtx_compressive.h"
       #include "seqtx_compressive.h"

   Needs seqtx.h in the same directory. Compile with -O2 and link -lm (and -pthread on
   systems older than glibc 2.34). If another file already implements seqtx.h, define
   SEQTX_COMPRESSIVE_IMPLEMENTATION instead: it compiles only the part in this header.

   Contents: a Transformer that reads text segment by segment. A memory layer keeps the
   rows of the last segments. Rows that the memory evicts are not discarded but
   compressed, r rows into one, and the compressed rows are kept for longer. Options: six
   kinds of compression, four losses to train it, two kinds of positions and seven gates.


   MANUAL

   Papers
       Compressive Transformers for Long-Range
           Sequence Modelling                        Rae et al., 2019          1911.05507
       Stabilizing Transformers for Reinforcement
           Learning (the gates)                      Parisotto et al., 2019    1910.06764
       Do Transformers Need Deep Long-Range Memory?  Rae and Razavi, 2020      2007.03356
       ERNIE-Doc (recurrence)                        Ding et al., 2020         2012.15688

   Letters used in this file
       B  streams (rows of a batch)       S  tokens per segment
       T  tokens per stream and call      M  capacity of the memory, rows
       V  vocabulary size                 n  rows in the memory
       E  width of the embedding          C  capacity of the compressed memory, rows
       D  model dimension                 c  rows in the compressed memory
       H  heads                           r  rows that are compressed into one
       hd head dimension D / H            e  rows evicted by a full segment
       F  feed-forward size               G  groups they form = new compressed rows
       L  layers                          A  layers with compressed memory
       l  a layer                         t  a tap, i.e. a row of a group
       b  a stream                        i  a query or row
       N  rows of an elementwise kernel   j  a key
       u  content bias (H,hd)             vb position bias (H,hd), the field v of a layer
   The fields of stx_attention_args are seqtx.h's: there, D is the head dimension, S the
   number of keys, and N the number of persistent vectors.

   The model. A layer attends to its compressed memory, its memory and the segment.

       tokens (B,T) -> embedding -> x (B,T,D) -> layers -> [norm] -> output head
                                                                  -> logits (B,T,V)

   One layer, with the names used in the code:

       comp (B,c,D)    mem (B,n,D)         x (B,T,D) ------------.
             \             |                   |                  \
              \            |                h = LN(x)              \
               \           |                 /     \                \
             k, v = Wkv [comp ; mem ; h]         q = Wq h            \
                           |                       |                  \
                           '----> attention <------'                   \
                                      |                                 \
                        o = Wo softmax(s) v + bo  --------------->  gate(x, o) = x'

       x' -> gate(x', W2 gelu(W1 LN(x') + b1) + b2) -> x of the next layer

       s_ij = (q_i.k_j + q_i.pos_dist) / sqrt(hd)       keys j = 0 .. c + n + T - 1,
                                                        oldest first;
                                                        dist = i + c + n - j >= 0
       with glu:         W2 (gelu(p_1) p_2), the two halves of p = W1 LN(x') + b1
       with norm_after:  h = x, and x' = LN(gate(x, o)); the feed-forward likewise
       with STX_COMP_XL: s_ij = ((q_i + u).k_j + (q_i + vb).(Wpos sine_dist)) / sqrt(hd)

       LN uses eps = 1e-5 and the biased variance; gelu(x) = x / 2 (1 + erf(x / sqrt(2))).
       u is what every query of a head looks for in the keys, whatever its content; vb is
       the same for distances.

   How the memory moves, for S = M = 4, C = 3 and r = 2. A full segment ends:

               compressed memory   memory             this segment
       before  c0 c1 c2            m0 m1  m2 m3       h0 h1 h2 h3     keys of h0 .. h3
                |  |               '-.-'  '-.-'        |  |  |  |
                |  |               conv   conv         |  |  |  |     e = 4 rows leave,
                v  v                 v      v          v  v  v  v     r to a group
       after    lost    c2          c3     c4         m0 m1 m2 m3

       e = max(0, n + S - M)       G = ceil(e / r)
       comp <- last C rows of [comp ; new]      mem <- last M rows of [mem ; h]

   Memory rows are constants. The language loss reaches Wkv through them (k = Wkv mem,
   projected with the current weights in every step), but not what computed them. h is not
   a constant in its own segment. The compression has its own loss, which does not reach
   the rows it reads. A call with T < S leaves the memory unchanged, except that
   STX_COMP_ROTATE moves the memories at the start of every call (see Fidelity).

   Compression of the evicted rows old[0 .. e). Group g has the rows g r .. g r + r - 1;
   the last group can be shorter, and a convolution reads zeros in place of its missing
   rows:

       conv       new_g = bias + sum_t W_t old[g r + t]      with overlap: t >= -overlap
       dilated    f = as many zero rows as the dilations add up to, then old. Each
                  dilation R makes f shorter by R rows:
                      f[i] <- relu(K0 f[i] + K1 f[i + R])
                  new = conv of the final f, as above. No biases
       max, mean  of the rows of a group, per channel
       used       no groups: the ceil(e / r) rows that received most attention, in order
                  of time. The usage of a row is its softmax weight, averaged over the
                  heads and over the queries of the segments while it was in the memory
       drop       none: evicted rows are discarded, as in Transformer-XL

   Losses of the compression, means over rows and channels. The total loss is
   nll + aux_weight / A sum_l aux_l.

       attention  att(rows) = softmax(q (Wk rows)^T / sqrt(hd)) Wv rows, with constant q,
                  Wk, Wv and old; no positions and no causal mask.
                      aux = mean (att(new) - att(old))^2
                  What attention reads from the new rows should equal what it read from
                  the old ones. With the weights a = softmax(s) of att(new) and the number
                  of elements compared, count:
                      datt = 2 (att(new) - att(old)) / count
                      dv = a^T datt             ds = a (datt v^T - sum_j a datt v^T)
                      dk = ds^T q / sqrt(hd)
                      dnew = dk Wk + dv Wv
                      dW_t = sum_g dnew_g old[g r + t]^T        dbias = sum_g dnew_g
       autoencode aux = mean (old - rec)^2, rec[g r + t] = Dec_t new_g
                      dnew_g = sum_t Dec_t^T drec[g r + t];     Dec is trained too
       bptt       no separate loss. The rows that were evicted in the last `bptt` segments
                  are kept and compressed again with the current weights. The results
                  replace the stored rows as keys and values, so the nll of this segment
                  has a gradient in W. The evicted rows are constants
       none       the compression keeps its initial weights

   ratio_l = sum (target - got)^2 / sum target^2 is the relative error of the compression:
   target is att(old) and got att(new), or old and rec. At 1 it is no better than zeros.

   Why it works this way
       Why does the language loss not train the compression? A compressed row lives for
       C r / S segments, but bptt sees only one or two of them. It learns what the next
       segment needs and forgets what later ones need. In the paper it is the worst method
       (0.996 bits per character on enwik8; max 0.986, mean 0.982, used 0.980, conv with
       the attention loss 0.973).

       Why does the compression's loss not train the network? Keys and values that are all
       equal compress perfectly. Hence q, Wkv and the rows are constants in that loss, and
       no weight between the two losses has to be tuned.

       Why the attention loss and not the autoencoder's? It recovers only what a query
       would read, not every element of a row.

       Why does a compressed row count as one step of distance? The largest distance is
       then M + C instead of M + C r.

       How far back does a model see? With STX_COMP_SAME a row is made by lower layers
       only, so L layers reach L (M + r C) tokens back. With STX_COMP_ERNIE a layer reads
       its own outputs of the previous segment, which had read those of the segment
       before, so there is no limit.

       How many layers need a memory? Few. 4 memory layers of 24, evenly spaced or at the
       top, did about as well as 24 (2007.03356).

       Why gates? Those that start as x -> x (gtrxl, and others with a positive bias) make
       deep stacks trainable when reward is the only training signal.

   Gates. x is the stream and y the output of a sublayer (after relu with gate_relu).
   w0 .. and b0, b1 are the fields w and b of stx_comp_gate. sig is the sigmoid. Backward,
   with g = dout and z' = z (1 - z); dp, dz, dreset and dcand are the gradients of the
   arguments of sig and tanh:

       residual   out = x + y
                      dx = dy = g
       input      z = sig(w0 x)                  out = z x + y
                      dp = g x z'                dx = g z + w0^T dp    dy = g
       output     z = sig(w0 x - b0)             out = x + z y
                      dp = g y z'                dx = g + w0^T dp      dy = g z
                      db0 = -dp
       highway    z = sig(w0 x + b0)             out = z x + (1 - z) y
                      dp = g (x - y) z'          dx = g z + w0^T dp    dy = g (1 - z)
                      db0 = dp
       sigtanh    z = sig(w0 y - b0), cand = tanh(w1 y)         out = x + z cand
                      dp = g cand z'             dcand = g z (1 - cand^2)
                      dx = g                     dy = w0^T dp + w1^T dcand
                      db0 = -dp
       gtrxl      reset = sig(w0 y + w1 x)       z = sig(w2 y + w3 x - b0)
                  cand = tanh(w4 y + w5 (reset x))              out = (1 - z) x + z cand
                      dcand = g z (1 - cand^2)   dz = g (cand - x) z (1 - z)
                      dreset = (w5^T dcand) x reset (1 - reset)
                      dx = g (1 - z) + (w5^T dcand) reset + w1^T dreset + w3^T dz
                      dy = w0^T dreset + w2^T dz + w4^T dcand   db0 = -dz
       gru        PyTorch's GRUCell. p0 = w0 y + b0 and p1 = w1 x + b1, in three blocks:
                  reset = sig(p0_reset + p1_reset)              z = sig(p0_z + p1_z)
                  cand = tanh(p0_cand + reset p1_cand)          out = (1 - z) cand + z x
                      dcand = g (1 - z) (1 - cand^2)         dz = g (x - cand) z (1 - z)
                      dreset = dcand p1_cand reset (1 - reset)
                      dp0 = (dreset, dz, dcand)  dp1 = (dreset, dz, reset dcand)
                      db0 = dp0                  db1 = dp1
                      dy = w0^T dp0              dx = g z + w1^T dp1
       mogrify    before a gru, five alternating updates with the newest values:
                  y = 2 sig(q1 q0 x) y    x = 2 sig(r1 r0 y) x    y = ..   x = ..   y = ..
                  The products have rank floor(D / 4); the gate gets these x and y

   Worked example of the attention loss. One channel, one head, Wq = Wk = Wv = 1, r = 2,
   taps 1/2 and 1/2, no bias. Old rows 0 and ln 3; one query q = 1:

       att(old): weights 1/4, 3/4, so att(old) = 3/4 ln 3 = 0.8240
       new = ln 3 / 2 = 0.5493 = att(new)
       aux = (0.5493 - 0.8240)^2 = 0.0754        ratio = (1/4)^2 / (3/4)^2 = 1/9
       dnew = 2 (0.5493 - 0.8240) = -0.5493 = dbias
       dW = -0.5493 (0, ln 3) = (0, -0.6035)

   Quick start (a test compiles and runs it): learns "abcabc.." and prints it.

   //>quickstart
       #define SEQTX_IMPLEMENTATION
       #include "seqtx_compressive.h"
       #include <stdio.h>

       int main(void) {
           stx_ctx *x = stx_create(NULL);
           stx_comp_desc d = {0};
           d.vocab = 256;
           d.layers = 2;
           d.dim = 32;
           d.heads = 2;
           d.segment = 16;
           d.mem = 16;
           d.ratio = 4;
           stx_comp *model = stx_comp_create(x, &d);
           stx_optim *optim = stx_optim_create(stx_comp_params(model), NULL);
           stx_comp_state *memory = stx_comp_state_create(model, 1);

           for (int step = 0; step < 100 && stx_ok(x); step++) {
               int32_t text[17];
               for (int i = 0; i < 17; i++) text[i] = "abc"[(step * 16 + i) % 3];
               stx_begin(x, STX_TRAIN);
               stx_ids *in = stx_tokens(x, text, 1, 16);
               stx_ids *next = stx_tokens(x, text + 1, 1, 16);
               stx_tensor *nll = stx_comp_loss(model, in, next, NULL, memory, memory);
               stx_backward(x, stx_comp_total(model, nll));
               if (step % 20 == 0) printf("step %d nll %.4f\n", step, stx_item(x, nll));
               stx_optim_step(optim, 0.01);
           }

           int32_t token = 'a';
           stx_comp_gen *gen = stx_comp_gen_create(model, 1);
           stx_sampling greedy = {0};
           for (int i = 0; i < 24 && stx_ok(x); i++) {
               const stx_real *logits = stx_comp_gen_feed(gen, &token, 1);
               putchar(token);
               token = logits ? stx_sample(&greedy, 0, logits, 256, NULL) : 0;
           }
           printf("\n%s\n", stx_error(x));
           stx_destroy(x);
           return 0;
       }
   //<quickstart

   Three interfaces
       Tokens          stx_comp_loss and stx_comp_logits.
       Vectors         stx_comp_segment, for speech, agents or classification. The model
                       needs no vocab; with one, stx_comp_nll and others are available
                       too.
       Step by step    stx_comp_gen_step and _feed, for generation and agents that act.
                       Equal to whole segments.
   stx_comp_state_reset_stream and stx_comp_gen_reset_stream empty the memory of one
   stream when another text begins in it.

   Padding. `pad` is nonzero where a position is padding, of tokens or of vectors. This is
   the opposite of the port's mask, which is true for real tokens. Generation takes no
   padding, because the streams of a batch advance together. To start with prompts of
   unequal length, align their ends: feed any tokens before the shorter ones and call
   stx_comp_gen_reset_stream(g, b) where the prompt of stream b begins.

   Configuration (stx_comp_desc). port and readme are the enwik8 example and the README of
   the PyTorch port; the other columns are the paper's. "-": not published.

       field            zero means     port     readme    enwik8  wikitext103  PG-19
       ---------------  -------------  -------  --------  ------  -----------  -----
       vocab (V)        no words       256      20000     256     adaptive     32000
       dim (D)          512            512      512       1024    1024         -
       emb (E)          D              512      128       1024    1024         -
       layers (L)       8              8        12        24      18           36
       heads (H)        8              8        8         8       16           -
       inner (F)        4 D            2048     2048      3072    4096         -
       glu              0              0        1         0       0            0
       segment (S)      512            512      1024      768     512          512
       mem (M)          S              512      1024      768     512          512
         in evaluation                                    768     500          -
       cmem (C)         floor(M / r)   128      256       1152    512          512
         in evaluation                                    3072    1500         -
       ratio (r)        4              4        4         3       4            2
       memory_layers    all            6, 7, 8  6 .. 12   all     all          all
       compress         conv           conv     conv      conv    conv         conv
       aux              attention      as zero  as zero   as zero as zero      as zero
       positions        learned        learned  learned   xl      xl           xl
       norm_after       before         0        0         1       1            1
       gate             x + y          gru      gru       0       0            0
       recurrence       own input      rotate   rotate    0       0            0
       dropouts         0              0        0.1 each  -       -            -

   The gate applies to both sublayers; GTrXL means gtrxl with gate_relu. The port means
   STX_COMP_ERNIE where it has STX_COMP_ROTATE. The paper trains with Adam and clips the
   gradient to norm 0.1. The learning rate rises from 1e-6 to 3e-4 in 4,000 updates
   (words: 16,000) and falls as a cosine in 100,000 (500,000). After 60,000 updates, only
   every fourth step updates, with the gradients of four: fewer and larger updates do
   better late in training, while a smaller learning rate does worse.

   Cost of a memory layer, forward, in multiply-adds per stream and full segment (T = S).
   keys = c + n + S and kv = kv_heads hd:

       Wq, Wo           2 S D^2
       Wkv              2 kv D keys
       attention        3 D S (c + n + S / 2)
       feed-forward     2 S D F                  3 S D F with glu
       compression      e D^2                    and 2 e D^2 for each dilation
       attention loss   2 G D kv + 2 S D (e + G)
       gates            gru, gtrxl 12 S D^2      sigtanh 4     input, output, highway 2
                        mogrify 5 S D^2          residual 0
       Wpos (xl)        keys D^2

   2 (c + n) D^2 of Wkv is for memory rows, and its gradient costs the same again. In
   stx_comp_gen it costs nothing, because keys and values are cached. A state takes
   B D sum_l (M_l + C_l) elements, a stx_comp_gen 4 B D sum_l (M_l + C_l + S) more.
   kv_heads < heads saves weights and their matmuls only: attention reads a copy of the
   keys and values for each head.

   Fidelity to the PyTorch port (compressive-transformer-pytorch 0.4.0) and to the paper
       Identical to within 1e-10 in double (tested against independent float64 code):
       logits, losses, memories and all gradients, with every option.

       Corrected; flags of `literal` restore accidental behaviour of the port:
           STX_COMP_LITERAL_ROWS    the row of the positional table for a distance is
                                    (S + n + c) - 1 - dist, with the current n and c.
                                    Default: (S + M + C) - 1 - dist. Both are equal once
                                    the memories are full.
           STX_COMP_LITERAL_PAD     e mod r rows of zeros are put before the e old rows,
                                    and G = floor((e + e mod r) / r), so the newest
                                    (e + e mod r) mod r rows are lost. (Where G is 0 the
                                    port fails; here all e rows are lost.) Default:
                                    G = ceil(e / r), zeros fill up the last group, and no
                                    row is lost.
           STX_COMP_LITERAL_TARGET  the aux loss compares att(new) with att of all n rows
                                    of the memory. Default: with att of the e rows that
                                    were compressed.
           STX_COMP_LITERAL_MASK    padding enters the memory, is attended to there like
                                    text, and counts in the means of the nll and the aux
                                    loss. A padded query sees only the memory; without
                                    memory it sees all keys of its segment with equal
                                    weight, including later ones. Default: padding is
                                    never a key, does not count, and the attention output
                                    of a padded query is 0.
           STX_COMP_LITERAL_FREEZE  Wkv of a layer stops learning at the layer's first aux
                                    loss. Default: it is constant in the aux loss only.
       So does one value of `recurrence`:
           STX_COMP_ROTATE          at the start of every stx_comp_segment, also with
                                    T < S, each memory layer takes over the memories of
                                    the next higher memory layer, and the top one those of
                                    the lowest. A row is then compressed by the
                                    convolution of whichever layer has it. stx_comp_gen
                                    rotates once per segment, the port at every token.
                                    stx_comp_state_get returns the memory as the last call
                                    left it. Default: memories stay (STX_COMP_SAME, the
                                    paper). In ERNIE-Doc, which the port follows, each
                                    layer reads its own last output: STX_COMP_ERNIE.
       As the port means: gate = STX_COMP_GRU, recurrence = STX_COMP_ROTATE and
       literal = STX_COMP_LITERAL.

       Always corrected: means are over the tokens that count (except with _MASK); the
       target of the aux loss has no dropout; layers without compressed memory have no
       convolution.

       Improved: M or C of 0; M < S; other M and C in evaluation; streams can be reset
       individually; generation caches keys and values.

       Different: layouts. Convolutions are (D,taps D), decoders (taps D,D), dilated ones
       (D,2 D) and key_pe is (rows,D); tools/convert.py permutes the port's (out,in,taps),
       (in,out,taps), (out,in,2) and (H,rows,hd). Where the paper is silent, these are our
       choices: usage, zeros before dilated convolutions, the shorter last group.

       Omitted: adaptive embedding and softmax (the paper's WikiText-103); the authors'
       separate projection and bias for positions of compressed rows; clamped positions;
       mogrifiers with biases.

   Checkpoints of the port can be converted in both directions; docs/convert.md lists the
   names of the tensors.

   Arguments of the port's constructor and the fields of stx_comp_desc

       argument                     field                             their default
       ---------------------------  --------------------------------  -------------------
       num_tokens                   vocab                             (required)
       dim                          dim                               (required)
       seq_len                      segment                           (required)
       depth                        layers                            (required)
       emb_dim                      emb                               dim
       memory_layers                memory_layers, memory_count       all
       enhanced_recurrence          recurrence: _ROTATE, or _SAME     true
       mem_len                      mem                               seq_len
       cmem_len                     cmem                              mem_len / cmem_ratio
       cmem_ratio                   ratio                             4
       heads                        heads                             8
       gru_gated_residual           gate: _GRU, or _RESIDUAL          true
       mogrify_gru                  mogrify                           false
       attn_dropout                 attn_dropout                      0
       ff_glu                       glu                               false
       ff_dropout                   ff_dropout                        0
       attn_layer_dropout           out_dropout                       0
       reconstruction_attn_dropout  aux_dropout                       0
       reconstruction_loss_weight   aux_weight                        1
       mask (of the call)           pad, with the opposite sense      all true

   Easy to get wrong
       - The memory stores h, normalised once, not keys: keys are projected with the
         current weights. With STX_COMP_ERNIE it stores layer outputs, which the layer
         normalises when it reads them, so its norm learns from them.
       - A segment attends to the compressed memory as it was before the call. The next
         segment is the first to see the rows that this one adds.
       - gru keeps x where z is near 1, gtrxl where z is near 0. The bias is subtracted in
         gtrxl, output and sigtanh, and added in highway.
       - The queries of the aux loss are q without u, without positions and without a
         causal mask.
       - stx_comp_total and stx_comp_aux belong to the last forward. m->aux and m->ratio
         are results of the step, invalid after the next stx_begin.
       - A call with T < S discards its tokens. Text that arrives in short pieces goes to
         stx_comp_gen, or waits until a segment is full.
       - Evaluation needs a separate state. With larger memories
         (stx_comp_state_create_sized), only STX_COMP_XL has positions for the additional
         distances.

   GPU. Set desc.device (see seqtx.h); nothing else changes. To replay steps as a CUDA
   graph, once the memories are full, write the step as a function
   (examples/train_compressive.c is a complete example):

       stx_tokens_set(x, in, ..);    stx_tokens_set(x, next, ..);
       stx_optim_rate(optim, lr);
       stx_step_run(x, stx_comp_key(model, in, next, memory, 0), step, user);

   step() calls stx_begin .. stx_optim_step. The kernels of this header are part of
   seqtx_cuda.cu if both files are in the same directory.

   Reading order: stx__comp_layer (a layer, and what its segment leaves), stx_comp_segment
   (the loop over layers and the memory), stx__comp_plan (what is evicted, what is
   missing), stx__comp_compress, stx__comp_aux, stx__comp_gate, the kernels from >>groups
   on, and stx__comp_gen_move (generation). Compile-time options are those of seqtx.h.
*/
#define STX__LETTERS 1
#include "seqtx.h"      /* see there */
#ifndef SEQTX_COMPRESSIVE_H
#define SEQTX_COMPRESSIVE_H

#include "seqtx.h"

#ifdef __cplusplus
extern "C" {
#endif


// >>api: configuration ------------------------------------------------------------------

/* stx_comp_desc.compress: what becomes of evicted rows */
enum {
    STX_COMP_CONV = 0,              /* strided convolution */
    STX_COMP_DILATED,               /* dilated convolutions, then a strided one */
    STX_COMP_MAX,
    STX_COMP_MEAN,
    STX_COMP_USED,                  /* the rows that received most attention are kept */
    STX_COMP_DROP                   /* evicted rows are discarded; no compressed memory */
};

/* stx_comp_desc.aux: what trains the compression */
enum {
    STX_COMP_AUX_AUTO = 0,          /* _ATTENTION with a convolution, else _NONE */
    STX_COMP_AUX_ATTENTION,
    STX_COMP_AUX_AUTOENCODE,
    STX_COMP_AUX_BPTT,
    STX_COMP_AUX_NONE
};

/* stx_comp_desc.positions */
enum {
    STX_COMP_LEARNED = 0,           /* a table for all layers, with a slice for each head */
    STX_COMP_XL                     /* Transformer-XL's projected sines */
};

/* stx_comp_desc.gate, up to STX_COMP_GTRXL. The last three are only kinds of
   stx_comp_gate_args. */
enum {
    STX_COMP_RESIDUAL = 0,
    STX_COMP_GRU,
    STX_COMP_INPUT,
    STX_COMP_OUTPUT,
    STX_COMP_HIGHWAY,
    STX_COMP_SIGTANH,
    STX_COMP_GTRXL,
    STX_COMP_GATES,                 /* number of gates */
    STX_COMP_RESET = STX_COMP_GATES,
    STX_COMP_MOGRIFY,
    STX_COMP_GLU
};

/* stx_comp_desc.recurrence: what the memory of a layer stores */
enum {
    STX_COMP_SAME = 0,              /* the layer's input */
    STX_COMP_ERNIE,                 /* its output, which it normalises when it reads it */
    STX_COMP_ROTATE                 /* its input; each call moves all memories down by one
                                       memory layer */
};

enum { STX_COMP_MAX_DILATIONS = 8 };

#define STX_COMP_NO_ROWS SIZE_MAX   /* stx_comp_desc.mem and cmem, where 0 means a default */

/* Flags of stx_comp_desc.literal: accidental behaviour of the port; see Fidelity. */
enum {
    STX_COMP_LITERAL_ROWS   = 1,        /* requires STX_COMP_LEARNED */
    STX_COMP_LITERAL_PAD    = 2,        /* requires STX_COMP_CONV */
    STX_COMP_LITERAL_TARGET = 4,        /* requires STX_COMP_AUX_ATTENTION */
    STX_COMP_LITERAL_MASK   = 8,        /* not with STX_COMP_USED */
    STX_COMP_LITERAL_FREEZE = 16,       /* requires STX_COMP_AUX_ATTENTION */
    STX_COMP_LITERAL        = 1 << 30   /* all that apply to the model */
};

typedef struct stx_comp_desc {
    /* sizes */
    size_t vocab;           /* V; 0: no embedding and output head, vectors in and out */
    size_t dim;             /* D; 0: 512 */
    size_t emb;             /* E; 0: D. If E != D, the model has two projections */
    size_t layers;          /* L; 0: 8 */
    size_t heads;           /* H, at most 256, divides D; 0: 8 */
    size_t kv_heads;        /* heads of keys and values, each shared by H / kv_heads
                               queries; 0: H */
    size_t inner;           /* F; 0: 4 D */
    size_t segment;         /* S; 0: 512 */

    /* memory */
    const size_t *memory_layers;    /* layers with a memory, counted from 1 (copied);
                                       NULL: all */
    size_t memory_count;    /* number of memory_layers */
    int    no_memory;       /* 1: no layer has a memory */
    size_t mem;             /* M; 0: S. STX_COMP_NO_ROWS: no memory rows */
    size_t cmem;            /* C; 0: floor(M / r). STX_COMP_NO_ROWS: no compressed memory */
    const size_t *mems, *cmems;     /* M and C of each of the L layers (copied), where 0 is
                                       0; those of layers without memory are ignored.
                                       NULL: mem and cmem for all */

    /* compression */
    size_t ratio;           /* r; 0: 4 */
    int    compress;        /* STX_COMP_CONV .. STX_COMP_DROP */
    size_t overlap;         /* conv: the kernel also sees this many older rows */
    int    conv_no_bias;    /* conv */
    size_t dilation[STX_COMP_MAX_DILATIONS], dilations;     /* dilated: the dilations and
                                                               their number; 0: 1, 2, 4 */
    int    aux;             /* STX_COMP_AUX_AUTO .. STX_COMP_AUX_NONE */
    double aux_weight;      /* weight of the aux loss; 0: 1 */
    size_t bptt;            /* STX_COMP_AUX_BPTT: number of later segments whose loss
                               reaches the compression; 0: 1 */

    /* layers */
    int    positions;       /* STX_COMP_LEARNED or STX_COMP_XL */
    int    norm_after;      /* 1: layer norm after each gate; 0: before each sublayer */
    int    final_norm;      /* 1: layer norm of the last hidden states */
    int    glu;             /* 1: gelu(p_1) p_2 in the feed-forward network */
    int    tied;            /* 1: the weight of the output head is the embedding */
    int    gate;            /* STX_COMP_RESIDUAL .. STX_COMP_GTRXL */
    int    gate_relu;       /* 1: relu before the gate (GTrXL) */
    double gate_bias;       /* initial b0; 0: 2 for gtrxl, 1 for output, highway and
                               sigtanh, 0 for gru, where it is added to the bias of z */
    int    no_gate_bias;    /* 1: b0 starts at 0 */
    int    mogrify;         /* gru: five mogrifier steps before it */
    int    recurrence;      /* STX_COMP_SAME, STX_COMP_ERNIE or STX_COMP_ROTATE */

    /* dropout probabilities in [0,1) */
    double attn_dropout;    /* of attention weights */
    double out_dropout;     /* of the attention's output after Wo */
    double ff_dropout;      /* inside the feed-forward network */
    double aux_dropout;     /* of attention weights over new rows in the aux loss */

    unsigned literal;       /* STX_COMP_LITERAL or flags; a flag that does not apply is an
                               error. In the resolved desc: the flags in force */
    int    recompute;       /* 1: recompute all layers in backward, to save memory */
    size_t recompute_layers;        /* recompute the last n layers only */
} stx_comp_desc;

/* Weights of a gate, by kind; see the manual. Those that a kind does not have are NULL.
   In checkpoints, their names are

       kind              w0 ..                     shape    b0, b1              shape
       gru               weight_ih, weight_hh      (3D,D)   bias_ih, bias_hh    (3D)
       input             w                         (D,D)
       output, highway   w                         (D,D)    b                   (D)
       sigtanh           w, u                      (D,D)    b                   (D)
       gtrxl             wr, ur, wz, uz, wg, ug    (D,D)    b                   (D)

   gru has three row blocks: reset, z and cand. */
typedef struct stx_comp_gate {
    stx_tensor *w[6], *b[2];
    stx_tensor *mogrify[4];     /* q0 (k,D), q1 (D,k), r0 (k,D), r1 (D,k); k = floor(D / 4) */
} stx_comp_gate;

typedef struct stx_comp_layer {
    int    memory;                          /* 1: a memory layer */
    size_t M, C;                            /* 0 in other layers */
    stx_tensor *attn_gain, *attn_shift;     /* (D) */
    stx_tensor *wq, *wkv, *wo, *bo;         /* (D,D) (2 kv_heads hd,D), keys first; (D,D) (D) */
    stx_tensor *wr, *u, *v;                 /* Wpos (D,D), u and vb (H,hd): STX_COMP_XL only */
    stx_tensor *conv, *conv_bias;           /* (D,taps D), column t D + channel; (D). This
                                               and the next two: only where C > 0 */
    stx_tensor *dilated[STX_COMP_MAX_DILATIONS];    /* (D,2 D): [K0 K1] */
    stx_tensor *decoder;                    /* Dec (taps D,D), row t D + channel:
                                               STX_COMP_AUX_AUTOENCODE only */
    stx_tensor *ff_gain, *ff_shift, *w1, *b1, *w2, *b2;     /* (D) (D) (F,D) (F) (D,F) (D);
                                                               w1, b1 with glu (2F,D) (2F) */
    stx_comp_gate attn_gate, ff_gate;
    int    frozen;      /* STX_COMP_LITERAL_FREEZE: 1: wkv no longer learns. Set by the first
                           training segment with an aux loss here, not stored in checkpoints:
                           a resumed run sets it. Set it to 0 to unfreeze wkv */
} stx_comp_layer;

typedef struct stx_comp {
    stx_ctx        *ctx;
    stx_comp_desc   desc;                   /* resolved; its pointers are NULL */
    stx_params     *params;
    stx_words      *words;                  /* embedding and output head, E wide; NULL
                                               without vocab */
    stx_tensor     *in_w, *in_b, *out_w, *out_b;        /* (D,E) (D) (E,D) (E), if E != D */
    stx_tensor     *key_pe;                 /* STX_COMP_LEARNED: (rows,D), rows = S + max M +
                                               max C. Row rows - 1 - dist; head h has the
                                               columns from h hd on */
    stx_tensor     *sines;                  /* STX_COMP_XL: (rows,D), constant, rows as in
                                               key_pe */
    stx_tensor     *final_gain, *final_shift;
    stx_comp_layer *layer;                  /* [layers] */
    size_t          taps, ahead;            /* rows per compressed row, r + overlap; rows
                                               that are read before a group */
    size_t          A;                      /* layers with C > 0 */
    stx_tensor    **aux, **ratio;           /* of each layer, (1) each: aux loss and relative
                                               error of the last forward, valid in this
                                               step. NULL if nothing was evicted, or in
                                               evaluation. In a process group, the ratio is
                                               that of this rank; the aux loss is scaled so
                                               that its mean over the ranks is the loss of
                                               the whole batch */
} stx_comp;

/* Creates a model with initialised parameters in x. It is freed with x. Returns NULL
   and sets the context's error if the desc is invalid. */
STX_DEF stx_comp *stx_comp_create(stx_ctx *x, const stx_comp_desc *d);

STX_DEF stx_params *stx_comp_params(stx_comp *m);

/* Number of parameter elements of such a model, tied ones counted once, without
   creating it. Returns 0 if the desc is invalid, SIZE_MAX if the number does not fit. */
STX_DEF size_t stx_comp_count(const stx_comp_desc *d);


// >>api: memory -------------------------------------------------------------------------

/* The memories of all layers for B streams. A forward reads one state and writes one,
   which may be the same. Use separate states for training and evaluation. A new state
   is empty. */
typedef struct stx_comp_state {
    stx_comp *model;
    size_t    B;
    size_t   *M, *C;        /* of each layer: the model's, or those passed to
                               stx_comp_state_create_sized */
    stx_rows *mem, *comp;   /* rows of layer l, (B,n,D) and (B,c,D), oldest first, with
                               n = mem->layer[l].real and c = comp->layer[l].real */
    stx_rows *usage;        /* STX_COMP_USED, else NULL: (B,n,2), for each row of mem the
                               attention it received, and the number of queries */
    stx_rows *source;       /* STX_COMP_AUX_BPTT, else NULL: the rows from which the newest
                               compressed rows were made */
    size_t   *seen;         /* (B): rows that each stream has pushed since its beginning,
                               counted up to `most`, beyond which nothing changes */
    size_t    most;
} stx_comp_state;

STX_DEF stx_comp_state *stx_comp_state_create(stx_comp *m, size_t B);

/* Creates a state with other capacities than the model's. mems and cmems have L elements
   each, or are NULL for the model's. Distances beyond a learned table use its last row;
   STX_COMP_XL has no limit. */
STX_DEF stx_comp_state *stx_comp_state_create_sized(stx_comp *m, size_t B, const size_t *mems,
                                                    const size_t *cmems);

STX_DEF void stx_comp_state_free(stx_comp_state *s);

/* Empties the memory. Does nothing after an error. */
STX_DEF void stx_comp_state_reset(stx_comp_state *s);

/* Empties the memory of stream b, for example because another text begins there. Its
   next segments equal those of an empty state, up to rounding. An error with
   STX_COMP_LITERAL_ROWS, _PAD and _MASK, which derive positions, padding and keys from
   one number of rows for all streams. */
STX_DEF void stx_comp_state_reset_stream(stx_comp_state *s, size_t b);

/* Copies the memory of streams c .. c + n - 1 of from to streams b .. b + n - 1 of to,
   to regroup batches. Both states have the same model and the same capacities. Returns
   1, or 0 and an error. */
STX_DEF int stx_comp_state_copy(stx_comp_state *to, size_t b, const stx_comp_state *from,
                                size_t c, size_t n);

/* Copies the memory of layer l to and from host memory. get writes its n =
   mem->layer[l].real rows (B,n,D) and its c = comp->layer[l].real compressed rows
   (B,c,D), oldest first; either pointer may be NULL. set replaces both, n <= M[l] and
   c <= C[l], and resets the usage. With STX_COMP_ROTATE, the rows are those that the
   last call moved to layer l. Both return 1, or 0 and an error. */
STX_DEF int stx_comp_state_get(const stx_comp_state *s, size_t l, stx_real *mem, stx_real *comp);
STX_DEF int stx_comp_state_set(stx_comp_state *s, size_t l, const stx_real *mem, size_t n,
                               const stx_real *comp, size_t c);

/* Saves the memory in a checkpoint under names that begin with prefix, which has at most
   64 characters, and loads it into a state with the same B. The entries are those of
   stx_rows_save under "<prefix>mem.", "<prefix>comp.", "<prefix>usage." and
   "<prefix>source.", and the metadata "<prefix>seen.<b>". Both return 1, or 0 and an error;
   a failed load leaves s empty. */
STX_DEF int stx_comp_state_save(stx_writer *w, const stx_comp_state *s, const char *prefix);
STX_DEF int stx_comp_state_load(stx_comp_state *s, const stx_file *f, const char *prefix);


// >>api: forward ------------------------------------------------------------------------

/* Vectors h (B,T,D), T <= S -> last hidden states (B,T,D).

   pad (B,T) is nonzero where h is padding, which is never attended to, here or in memory
   (except with STX_COMP_LITERAL_MASK); NULL if there is none. The port's mask has the
   opposite sense.

   in is the memory to read (NULL if empty), out the one to write; they may be the same.
   With out = NULL nothing is compressed, and there is no aux loss.

   If T = S, the segment enters the memory. If T < S, as at the end of a text, its rows
   are discarded and the memory is unchanged, except that STX_COMP_ROTATE moves the
   memories at the start of every call. For token by token, use stx_comp_gen.

   Gradients reach h but not the memory. With out, do not call it inside stx_recompute. */
STX_DEF stx_tensor *stx_comp_segment(stx_comp *m, stx_tensor *h, const stx_ids *pad,
                                     const stx_comp_state *in, stx_comp_state *out);

/* ids (B,T) -> vectors (B,T,D): embedding, and the input projection if E != D. */
STX_DEF stx_tensor *stx_comp_embed(stx_comp *m, const stx_ids *ids);

/* ids (B,T) -> last hidden states (B,T,D): stx_comp_embed and stx_comp_segment. */
STX_DEF stx_tensor *stx_comp_forward(stx_comp *m, const stx_ids *ids, const stx_ids *pad,
                                     const stx_comp_state *in, stx_comp_state *out);

/* Hidden states (B,T,D) -> logits (B,T,V), differentiable; and log p (B,T,V), not
   differentiable. */
STX_DEF stx_tensor *stx_comp_logits(stx_comp *m, stx_tensor *h);
STX_DEF stx_tensor *stx_comp_log_probs(stx_comp *m, stx_tensor *h);

/* Hidden states (B,T,D) and targets (B,T) -> (1): mean negative log-likelihood, in
   nats per token, of the targets that are neither negative nor padding (pad as in
   stx_comp_segment; with STX_COMP_LITERAL_MASK padding counts). 0 if none counts. */
STX_DEF stx_tensor *stx_comp_nll(stx_comp *m, stx_tensor *h, const stx_ids *targets,
                                 const stx_ids *pad);

/* ids (B,T) and targets (B,T) -> (1): stx_comp_forward and stx_comp_nll. */
STX_DEF stx_tensor *stx_comp_loss(stx_comp *m, const stx_ids *ids, const stx_ids *targets,
                                  const stx_ids *pad, const stx_comp_state *in,
                                  stx_comp_state *out);

/* The weighted aux loss of the last forward, aux_weight / A sum_l aux_l -> (1), with
   gradients into the compression only. 0 if nothing was compressed, and in evaluation. */
STX_DEF stx_tensor *stx_comp_aux(stx_comp *m);

/* Adds the weighted aux loss of the last forward to nll (1). Returns nll itself if
   there is none. This is the tensor to call stx_backward on. */
STX_DEF stx_tensor *stx_comp_total(stx_comp *m, stx_tensor *nll);

/* The key of stx_step_run: a hash of everything the host decides in a step with these
   tokens and this memory; each may be NULL. salt is hashed too. For a step with
   several parts or memories, pass the key of one as the salt of the next. Padding is
   not part of the key: do not replay steps with padding. */
STX_DEF uint64_t stx_comp_key(const stx_comp *m, const stx_ids *ids, const stx_ids *targets,
                              const stx_comp_state *s, uint64_t salt);


// >>api: generation ---------------------------------------------------------------------

/* Evaluates step by step with cached keys and values. Equal to whole segments,
   whatever the number of tokens per call. The memory moves when a segment is full,
   counted from the start; STX_COMP_ROTATE also rotates once per segment. There is no
   padding; see the manual. Create a new one or reset it after the parameters change. */
typedef struct stx_comp_gen {
    stx_comp       *model;
    size_t          B;
    stx_comp_state *state;      /* the memory at the start of this segment */
    size_t          at;         /* tokens of this segment so far, less than S */
    stx_cache      *cache;      /* of each layer: keys and values of compressed memory,
                                   memory and this segment */
    stx_real      **rows;       /* of each memory layer, (B,S,D): the rows that this segment
                                   adds to the memory */
    stx_real      **usage;      /* STX_COMP_USED: (B,M,2) */
    stx_real      **pe;         /* (reach,D), projected sines; or in pe[0], a learned table
                                   extended to `reach` rows */
    int32_t        *pad;        /* (B,S), on the host: nonzero for tokens before the reset
                                   of a stream */
    int             masked;     /* 1: an element of pad is nonzero */
    int             stale;      /* 1: the cache has to be recomputed from the state */
    size_t          reach;      /* rows of positions: S + max M + max C */
} stx_comp_gen;

STX_DEF stx_comp_gen *stx_comp_gen_create(stx_comp *m, size_t B);

/* With other capacities than the model's; see stx_comp_state_create_sized. */
STX_DEF stx_comp_gen *stx_comp_gen_create_sized(stx_comp *m, size_t B, const size_t *mems,
                                                const size_t *cmems);

STX_DEF void stx_comp_gen_free(stx_comp_gen *g);

/* Empties the memory and the cache. */
STX_DEF void stx_comp_gen_reset(stx_comp_gen *g);

/* Empties them for stream b only. The other streams continue. */
STX_DEF void stx_comp_gen_reset_stream(stx_comp_gen *g, size_t b);

/* Copies a memory of the same model, B and capacities, and starts a segment after it.
   Returns 1, or 0 and an error. */
STX_DEF int stx_comp_gen_set(stx_comp_gen *g, const stx_comp_state *from);

/* Vectors h (B,T,D), any T >= 1 -> last hidden states (B,T,D). Requires a previous
   stx_begin(x, STX_EVAL). */
STX_DEF stx_tensor *stx_comp_gen_step(stx_comp_gen *g, stx_tensor *h);

/* Feeds n >= 1 tokens per stream, ids (B,n), and returns the logits (B,V) of the token
   after the last one. The result is in host memory, for stx_sample, and valid until
   the next call. Calls stx_begin(x, STX_EVAL), so do not call it between a forward and
   its backward. */
STX_DEF const stx_real *stx_comp_gen_feed(stx_comp_gen *g, const int32_t *ids, size_t n);

/* The model as a table of functions, for programs that accept any family. Its window
   arguments must be 0: use stx_comp_state_create_sized for other memories in
   evaluation. For NULL, and for a model without vocab, all fields are NULL. */
STX_DEF stx_lm stx_comp_lm(stx_comp *m);


// >>api: kernels ------------------------------------------------------------------------

/* Cuts the rows (B,rows,D) of each stream into `groups` groups of `taps` rows, `step`
   rows apart. Tap t of group g of stream b is row base_b + g step + t, with

       base_b = at                                         if first is NULL
       base_b = at + first[b] - (groups - G_b) step        otherwise, with
       G_b    = ceil((rows - first[b]) / step)

   The second form is for streams that began later than others: the rows of stream b
   begin at first[b], its groups are counted from there, and its G_b groups are the
   last (newest) of the result. A row is missing if it is outside [0, rows), before
   first[b], or marked in pad. Missing rows are read as 0, or skipped. */
typedef struct stx_comp_groups {
    size_t B, rows, groups, taps, step, D;
    ptrdiff_t at;
    const int32_t *first;       /* (B), on the device, or NULL */
    const int32_t *pad;         /* (B,rows), on the device, nonzero: missing; or NULL */
    size_t stride;              /* elements between streams in the rows that unfold, pool and
                                   pick read; 0: rows D */
} stx_comp_groups;

/* y (B,groups,taps,D) = the tap rows of rows (B,rows,D), 0 where one is missing. Adds
   to y with accumulate. */
STX_KERNEL(stx_comp_unfold, (stx_ctx *x, stx_real *y, const stx_real *rows,
                             const stx_comp_groups *g, int accumulate))

/* rows (B,rows,D) = for each row the sum of the taps of y (B,groups,taps,D) that refer
   to it, in ascending order; 0 if there are none, and in missing rows. The derivative
   is stx_comp_unfold. */
STX_KERNEL(stx_comp_fold, (stx_ctx *x, stx_real *rows, const stx_real *y,
                           const stx_comp_groups *g))

/* y (B,groups,D) = mean (max 0) or maximum (max 1) of the rows of a group, per
   channel; 0 if all are missing. */
STX_KERNEL(stx_comp_pool, (stx_ctx *x, stx_real *y, const stx_real *rows,
                           const stx_comp_groups *g, int max))

/* y (B,groups,D) = the G_b most used rows of stream b from first[b] on (if first is
   NULL, from 0 on, and G_b = groups), in order of time, in the last G_b rows of y; the
   rows before them are 0. taps and at are not read. usage (B,ldu/2,2) has a stride of
   ldu elements between streams, in full precision. The usage of row j is
   usage[0] / usage[1], or 0 if usage[1] is 0; of equally used rows the newer is kept.
   Missing rows rank after all others, the older first, and are 0 in y. */
STX_KERNEL(stx_comp_pick, (stx_ctx *x, stx_real *y, const stx_real *rows, const stx_real *usage,
                           size_t ldu, const stx_comp_groups *g))

/* Adds to the usage of the n keys from `first` on, after the forward kernel of an
   attention has run with a (no learned span, eps or persistent vectors):

       usage[b][j][0] += 1/H sum_h sum_i softmax weight of key first + j for query i,
                         before dropout
       usage[b][j][1] += number of queries i

   The sums are over the queries whose own key is not padding (a->pad at S - T + i);
   all queries come after the n keys. usage (B,ldu/2,2) has a stride of ldu elements
   between streams, in full precision. */
STX_KERNEL(stx_comp_usage, (stx_ctx *x, stx_real *usage, size_t ldu, const stx_attention_args *a,
                            size_t first, size_t n))

/* loss (1) = sum (a - t)^2 / divisor and ratio (1) = sum (a - t)^2 / sum t^2 (0 if
   that sum is 0), over the rows of a, t (N,C) that skip (N) does not mark. skip is on
   the device, or NULL. work (N,2), on the device, receives the two sums of each row.
   Backward: da = 2 dloss (a - t) / divisor, 0 in marked rows. Adds to da with
   accumulate. */
STX_KERNEL(stx_comp_error_fwd, (stx_ctx *x, stx_real *loss, stx_real *ratio, double *work,
                                const stx_real *a, const stx_real *t, const int32_t *skip,
                                size_t N, size_t C, double divisor))
STX_KERNEL(stx_comp_error_bwd, (stx_ctx *x, stx_real *da, const stx_real *dloss,
                                const stx_real *a, const stx_real *t, const int32_t *skip,
                                size_t N, size_t C, double divisor, int accumulate))

/* The elementwise part of a gate. p0 .. p3 (fields p) are the results of its matmuls; sig
   is the sigmoid.

       STX_COMP_GRU      reset = sig(p0_reset + p1_reset), z = sig(p0_z + p1_z),
                         cand = tanh(p0_cand + reset p1_cand), out = (1 - z) cand + z x
       STX_COMP_INPUT    out = sig(p0) x + y
       STX_COMP_OUTPUT   out = x + sig(p0) y
       STX_COMP_HIGHWAY  out = sig(p0) x + (1 - sig(p0)) y
       STX_COMP_SIGTANH  out = x + sig(p0) tanh(p1)
       STX_COMP_GTRXL    z = sig(p0 + p1), cand = tanh(p2 + p3), out = (1 - z) x + z cand
       STX_COMP_RESET    out = sig(p0 + p1) x
       STX_COMP_MOGRIFY  out = 2 sig(p0) x
       STX_COMP_GLU      out = gelu(p0_1) p0_2 of the feed-forward network, without x

   p0 and p1 of gru (N,3D) have the blocks reset, z and cand; p0 of glu (N,2D) has two
   halves. Backward reads dout and the inputs, and writes the gradients of all inputs,
   or adds to them with accumulate. For gru and glu it also adds to the gradients of
   biases that were added to p0 and p1, db[k] += row sums of dp[k]; then dp[k] must not
   contain anything before. */
typedef struct stx_comp_gate_args {
    int    kind, accumulate;
    size_t N, D;
    const stx_real *x, *y;      /* (N,D); NULL if the kind has none */
    const stx_real *p[4];       /* (N,D), gru (N,3D), glu (N,2D); NULL if the kind has none */
    stx_real *out;              /* (N,D) */
    const stx_real *dout;       /* (N,D) */
    stx_real *dx, *dy, *dp[4];  /* as x, y, p */
    stx_real *db[2];            /* gru (3D) each, glu (2D) in db[0]; NULL if not needed */
    int late;                   /* 1: they belong to parameters; see stx_linear_bwd_args */
} stx_comp_gate_args;

STX_KERNEL(stx_comp_gate_fwd, (stx_ctx *x, const stx_comp_gate_args *a))
STX_KERNEL(stx_comp_gate_bwd, (stx_ctx *x, const stx_comp_gate_args *a))

/* The definition of what stx_comp_usage adds to usage[..][0], in double and in host
   memory: sum (B,n). For reading and for tests. work has 2 stx_attention_keys(a)
   elements. */
STX_DEF void stx_comp_usage_plain(double *sum, const stx_attention_args *a, size_t first,
                                  size_t n, double *work);

#ifdef __cplusplus
}
#endif

/* Stop here if you only want the API. */
#endif /* SEQTX_COMPRESSIVE_H */

#if (defined(SEQTX_IMPLEMENTATION) || defined(SEQTX_COMPRESSIVE_IMPLEMENTATION)) \
    && !defined(SEQTX_COMPRESSIVE_IMPLEMENTATION_DONE)
#define SEQTX_COMPRESSIVE_IMPLEMENTATION_DONE

#define STX_LOOPS
#include "seqtx.h" /* once more, for the inner loops' macros */

#include <stdio.h>
STX_STRICT_ON

// >>groups

static size_t stx__comp_groups_of(size_t rows, size_t step) {
    return rows / step + (rows % step != 0);
}

/* The row that tap t of a group of stream b meets; -1 if it is missing. first and pad are read where they are: on a GPU's host side they
   have to be the host's */
static ptrdiff_t stx__comp_row(const stx_comp_groups *g, size_t b, size_t group, size_t t) {
    ptrdiff_t first = g->first ? g->first[b] : 0, row = g->at + (ptrdiff_t)(group * g->step + t);
    if (g->first)
        row += first
               + ((ptrdiff_t)stx__comp_groups_of(g->rows - (size_t)first, g->step)
                  - (ptrdiff_t)g->groups)
                     * (ptrdiff_t)g->step;
    if (row < first || row >= (ptrdiff_t)g->rows || (g->pad && g->pad[b * g->rows + (size_t)row]))
        return -1;
    return row;
}

/* Row `row` of stream b */
static const stx_real *stx__comp_at(const stx_comp_groups *g, const stx_real *rows, size_t b,
                                    size_t row) {
    return rows + b * (g->stride ? g->stride : g->rows * g->D) + row * g->D;
}

typedef struct stx__comp_grouping {
    const stx_comp_groups *g;
    stx_real *y;
    const stx_real *rows, *usage;
    size_t ldu;
    int flag;
} stx__comp_grouping;

static void stx__comp_unfold_part(const stx_share *s, const void *job) {
    const stx__comp_grouping *j = (const stx__comp_grouping *)job;
    const stx_comp_groups *g = j->g;
    size_t n, c, D = g->D;
    for (n = s->from; n < s->to; n++) {
        size_t b = n / (g->groups * g->taps);
        ptrdiff_t row = stx__comp_row(g, b, n / g->taps % g->groups, n % g->taps);
        stx_real *y = j->y + n * D;
        const stx_real *r = stx__comp_at(g, j->rows, b, (size_t)(row < 0 ? 0 : row));
        if (row < 0) {
            if (!j->flag) memset(y, 0, D * sizeof *y);
        } else if (!j->flag)
            memcpy(y, r, D * sizeof *y);
        else
            for (c = 0; c < D; c++) y[c] += r[c];
    }
}

STX_DEF void stx_comp_unfold(stx_ctx *x, stx_real *y, const stx_real *rows,
                             const stx_comp_groups *g, int accumulate) {
    stx__comp_grouping j;
    j.g = g;
    j.y = y;
    j.rows = rows;
    j.flag = accumulate;
    j.usage = NULL;
    j.ldu = 0;
    stx_parallel(x, g->B * g->groups * g->taps, g->B * g->groups * g->taps * g->D,
                 stx__comp_unfold_part, &j);
}

static void stx__comp_fold_part(const stx_share *s, const void *job) {
    const stx__comp_grouping *j = (const stx__comp_grouping *)job;
    const stx_comp_groups *g = j->g;
    size_t n, i, c, D = g->D;
    for (n = s->from; n < s->to; n++) {
        size_t b = n / g->rows, row = n % g->rows;
        stx_real *r = j->y + n * D;
        memset(r, 0, D * sizeof *r);
        for (i = 0; i < g->groups * g->taps; i++) {
            const stx_real *y = j->rows + (b * g->groups * g->taps + i) * D;
            if (stx__comp_row(g, b, i / g->taps, i % g->taps) == (ptrdiff_t)row)
                for (c = 0; c < D; c++) r[c] += y[c];
        }
    }
}

STX_DEF void stx_comp_fold(stx_ctx *x, stx_real *rows, const stx_real *y,
                           const stx_comp_groups *g) {
    stx__comp_grouping j;
    j.g = g;
    j.y = rows;
    j.rows = y;
    j.flag = 0;
    j.usage = NULL;
    j.ldu = 0;
    stx_parallel(x, g->B * g->rows, g->B * g->groups * g->taps * g->D, stx__comp_fold_part, &j);
}

static void stx__comp_pool_part(const stx_share *s, const void *job) {
    const stx__comp_grouping *j = (const stx__comp_grouping *)job;
    const stx_comp_groups *g = j->g;
    size_t n, t, c, D = g->D;
    for (n = s->from; n < s->to; n++) {
        size_t b = n / g->groups, met = 0;
        stx_real *y = j->y + n * D;
        memset(y, 0, D * sizeof *y);
        for (t = 0; t < g->taps; t++) {
            ptrdiff_t row = stx__comp_row(g, b, n % g->groups, t);
            const stx_real *r = stx__comp_at(g, j->rows, b, (size_t)(row < 0 ? 0 : row));
            if (row < 0) continue;
            if (!met++)
                memcpy(y, r, D * sizeof *y);
            else if (j->flag)
                for (c = 0; c < D; c++) y[c] = r[c] > y[c] || r[c] != r[c] ? r[c] : y[c];
            else
                for (c = 0; c < D; c++) y[c] += r[c];
        }
        if (!j->flag && met > 1)
            for (c = 0; c < D; c++) y[c] /= (stx_real)met;
    }
}

STX_DEF void stx_comp_pool(stx_ctx *x, stx_real *y, const stx_real *rows, const stx_comp_groups *g,
                           int max) {
    stx__comp_grouping j;
    j.g = g;
    j.y = y;
    j.rows = rows;
    j.flag = max;
    j.usage = NULL;
    j.ldu = 0;
    stx_parallel(x, g->B * g->groups, g->B * g->groups * g->taps * g->D, stx__comp_pool_part, &j);
}

/* Does row i of a stream come before row k? */
static int stx__comp_before(const int32_t *pad, const stx_real *usage, size_t i, size_t k) {
    int lost = pad && pad[i];
    stx_real u, v;
    if (lost != (pad && pad[k])) return !lost;
    if (lost) return i < k;
    u = usage[2 * i + 1] > 0 ? usage[2 * i] / usage[2 * i + 1] : 0;
    v = usage[2 * k + 1] > 0 ? usage[2 * k] / usage[2 * k + 1] : 0;
    return u > v || (!(v > u) && i > k);
}

static void stx__comp_pick_part(const stx_share *s, const void *job) {
    const stx__comp_grouping *j = (const stx__comp_grouping *)job;
    const stx_comp_groups *g = j->g;
    size_t b, i, k, D = g->D;
    for (b = s->from; b < s->to; b++) {
        size_t first = g->first ? (size_t)g->first[b] : 0,
               keep = g->first ? stx__comp_groups_of(g->rows - first, g->step) : g->groups;
        size_t place = g->groups - keep;
        const int32_t *pad = g->pad ? g->pad + b * g->rows : NULL;
        stx_real *y = j->y + b * g->groups * D;
        memset(y, 0, g->groups * D * sizeof *y);
        for (i = first; i < g->rows && place < g->groups; i++) {
            size_t better = 0;
            for (k = first; k < g->rows; k++)
                better += k != i && stx__comp_before(pad, j->usage + b * j->ldu, k, i);
            if (better >= keep) continue;
            if (!pad || !pad[i])
                memcpy(y + place * D, stx__comp_at(g, j->rows, b, i), D * sizeof *y);
            place++;
        }
    }
}

STX_DEF void stx_comp_pick(stx_ctx *x, stx_real *y, const stx_real *rows, const stx_real *usage,
                           size_t ldu, const stx_comp_groups *g) {
    stx__comp_grouping j;
    j.g = g;
    j.y = y;
    j.rows = rows;
    j.flag = 0;
    j.usage = usage;
    j.ldu = ldu;
    stx_parallel(x, g->B, g->B * g->rows * g->rows * 4, stx__comp_pick_part, &j);
}

static stx_comp_groups stx__comp_grouped(size_t B, size_t rows, size_t groups, size_t taps,
                                         size_t step, size_t D) {
    stx_comp_groups g;
    memset(&g, 0, sizeof g);
    g.B = B;
    g.rows = rows;
    g.groups = groups;
    g.taps = taps;
    g.step = step;
    g.D = D;
    return g;
}

/* The way back of both ops below: zeroing some rows is its own transpose, and that of fold is unfold */
static void stx__comp_unfold_back(stx_ctx *x, stx_tensor *y, stx_tensor *const *in, void *save) {
    int fresh;
    stx_real *d = stx_grad(x, in[0], &fresh);
    if (d) STX_RUN(x, stx_comp_unfold, (x, d, y->grad, (const stx_comp_groups *)save, !fresh));
}

/* a (B,T,D) with zeros where pad (B,T) is not 0: one group of all rows. pad NULL: a */
static stx_tensor *stx__comp_zero(stx_ctx *x, stx_tensor *a, const stx_ids *pad) {
    stx_comp_groups *g;
    stx_tensor *y;
    if (!stx_ok(x) || !a || !pad) return a;
    y = stx_new(x, a->dim[0], a->dim[1], a->dim[2], 0);
    g = (stx_comp_groups *)stx_step_alloc(x, sizeof *g);
    if (!y || !g) return NULL;
    *g = stx__comp_grouped(a->dim[0], a->dim[1], 1, a->dim[1], a->dim[1], a->dim[2]);
    g->pad = pad->device;
    STX_RUN(x, stx_comp_unfold, (x, y->data, a->data, g, 0));
    stx_record(x, y, &a, 1, stx__comp_unfold_back, g);
    return y;
}

/* y (B,groups,taps D) -> rows (B,rows,D) */
static stx_tensor *stx__comp_folded(stx_ctx *x, stx_tensor *y, const stx_comp_groups *groups) {
    stx_comp_groups *g = (stx_comp_groups *)stx_step_alloc(x, sizeof *g);
    stx_tensor *rows = stx_new(x, groups->B, groups->rows, groups->D, 0);
    if (!stx_ok(x) || !y) return NULL;
    *g = *groups;
    STX_RUN(x, stx_comp_fold, (x, rows->data, y->data, g));
    stx_record(x, rows, &y, 1, stx__comp_unfold_back, g);
    return rows;
}

// >>usage

/* The definition: what a key got, from the softmax of each query. */
STX_DEF void stx_comp_usage_plain(double *sum, const stx_attention_args *a, size_t first, size_t n,
                                  double *work) {
    STX__FP_SCOPE;
    size_t b, h, i, j, keys = stx_attention_keys(a);
    for (b = 0; b < a->B; b++)
        for (j = 0; j < n; j++)
            for (sum[b * n + j] = 0, h = 0; h < a->H; h++)
                for (i = 0; i < a->T; i++) {
                    if (a->pad && a->pad[b * a->stpad + a->S - a->T + i]) continue;
                    stx_attention_weights(a, b, h, i, work, work + keys);
                    sum[b * n + j] += work[keys - a->N - a->S + first + j] / (double)a->H;
                }
}

/* s[j] = (q + u).k_j + (q + vb).pe_j for n keys, each in 16 sums; rows of k are ldk apart, those of pe (NULL: none) ldp */
STX_INNER void stx__comp_scores_any(int fma, stx_real *STX_RESTRICT s, const stx_attention_args *a,
                                    const stx_real *q, const stx_real *k, const stx_real *pe,
                                    size_t h, size_t n) {
    const stx_real *u = a->u ? a->u + h * a->D : NULL, *vb = a->vb ? a->vb + h * a->D : NULL;
    const size_t D = a->D, ldp = a->pe_heads > 1 ? a->H * D : D;
    size_t j, d, i;
    for (j = 0; j < n; j++) {
        const stx_real *kj = k + j * a->ldk, *pj = pe ? pe + j * ldp : NULL;
        stx_real sum[16] = {0};
        for (d = 0; d + 16 <= D; d += 16) {
            for (i = 0; i < 16; i++) sum[i] = STX_FMA(fma, q[d + i], kj[d + i], sum[i]);
            if (u)
                for (i = 0; i < 16; i++) sum[i] = STX_FMA(fma, u[d + i], kj[d + i], sum[i]);
            if (pj)
                for (i = 0; i < 16; i++) sum[i] = STX_FMA(fma, q[d + i], pj[d + i], sum[i]);
            if (vb)
                for (i = 0; i < 16; i++) sum[i] = STX_FMA(fma, vb[d + i], pj[d + i], sum[i]);
        }
        for (; d < D; d++)
            sum[d % 16] += (q[d] + (u ? u[d] : 0)) * kj[d]
                           + (pj ? (q[d] + (vb ? vb[d] : 0)) * pj[d] : 0);
        for (i = 0; i < 8; i++) sum[i] += sum[i + 8];
        for (i = 0; i < 4; i++) sum[i] += sum[i + 4];
        s[j] = (sum[0] + sum[2]) + (sum[1] + sum[3]);
    }
}
STX_EACH_ISA(stx__comp_scores_any,
             (stx_real * STX_RESTRICT s, const stx_attention_args *a, const stx_real *q,
              const stx_real *k, const stx_real *pe, size_t h, size_t n),
             s, a, q, k, pe, h, n)

typedef struct stx__comp_usage {
    const stx_attention_args *a;
    stx_real *usage;
    size_t ldu, first, n;
} stx__comp_usage;

/* A unit: 16 keys of a stream. Each weight is made again from its logit and the row's statistics. */
static void stx__comp_usage_part(const stx_share *s, const void *job) {
    const stx__comp_usage *u = (const stx__comp_usage *)job;
    const stx_attention_args *a = u->a;
    size_t unit, tiles = (u->n + 15) / 16;
    for (unit = s->from; unit < s->to; unit++) {
        size_t b = unit / tiles, j0 = unit % tiles * 16, j1 = STX_MIN(j0 + 16, u->n), h, i, j, p,
               queries = 0;
        stx_real logit[16];
        double sum[16] = {0};
        for (h = 0; h < a->H; h++)
            for (i = 0; i < a->T; i++) {
                size_t row = (b * a->H + h) * a->T + i, here = a->S - a->T + i;
                const stx_real *q = a->q + b * a->stq + i * a->ldq + h * a->D, *k, *pe;
                if (a->pad && a->pad[b * a->stpad + here]) continue;
                queries += h == 0;
                /* row p of pe is that of key j0: both rise by one from key to key. No positions lie beyond the span */
                p = a->P - 1 + (size_t)a->delta_min - (here - u->first - j0);
                j = here - u->first - j0 > a->span ? here - u->first - a->span : j0;
                k = a->k + b * a->stk + (u->first + j) * a->ldk + h * a->D;
                pe = !a->pe            ? NULL
                     : a->pe_heads > 1 ? a->pe + ((p + j - j0) * a->H + h) * a->D
                                       : a->pe + (p + j - j0) * a->D;
                if (j < j1)
                    STX_CALL(s->x, stx__comp_scores_any,
                             (logit + (j - j0), a, q, k, pe, h, j1 - j));
                for (; j < j1; j++)
                    if (!a->pad || !a->pad[b * a->stpad + u->first + j])
                        sum[j - j0] += (double)(stx_fast_exp(0,
                                                             logit[j - j0] * a->scale - a->top[row])
                                                * a->inv[row]);
            }
        for (j = j0; j < j1; j++) {
            stx_real *out = u->usage + b * u->ldu + 2 * j;
            out[0] += (stx_real)(sum[j - j0] / (double)a->H);
            out[1] += (stx_real)queries;
        }
    }
}

STX_DEF void stx_comp_usage(stx_ctx *x, stx_real *usage, size_t ldu, const stx_attention_args *a,
                            size_t first, size_t n) {
    stx__comp_usage u;
    u.a = a;
    u.usage = usage;
    u.ldu = ldu;
    u.first = first;
    u.n = n;
    stx_parallel(x, a->B * ((n + 15) / 16), a->B * n * a->T * a->H * a->D * 2, stx__comp_usage_part,
                 &u);
}

// >>error

typedef struct stx__comp_error {
    stx_real *da;
    const stx_real *a, *t;
    const int32_t *skip;
    double *work;
    size_t N, C;
    double divisor, scale;
    int accumulate;
} stx__comp_error;

static void stx__comp_error_part(const stx_share *s, const void *job) {
    const stx__comp_error *e = (const stx__comp_error *)job;
    size_t n, c;
    for (n = s->from; n < s->to; n++) {
        const stx_real *a = e->a + n * e->C, *t = e->t + n * e->C;
        double off = 0, all = 0;
        for (c = 0; c < e->C && !(e->skip && e->skip[n]); c++) {
            double d = (double)a[c] - (double)t[c];
            off += d * d;
            all += (double)t[c] * (double)t[c];
        }
        e->work[2 * n] = off;
        e->work[2 * n + 1] = all;
    }
}

STX_DEF void stx_comp_error_fwd(stx_ctx *x, stx_real *loss, stx_real *ratio, double *work,
                                const stx_real *a, const stx_real *t, const int32_t *skip, size_t N,
                                size_t C, double divisor) {
    STX__FP_SCOPE;
    stx__comp_error e;
    double off = 0, all = 0;
    size_t n;
    memset(&e, 0, sizeof e);
    e.a = a;
    e.t = t;
    e.skip = skip;
    e.work = work;
    e.N = N;
    e.C = C;
    stx_parallel(x, N, 4 * N * C, stx__comp_error_part, &e);
    for (n = 0; n < N; n++) {
        off += work[2 * n];
        all += work[2 * n + 1];
    }
    *loss = (stx_real)(off / divisor);
    *ratio = (stx_real)(all > 0 ? off / all : 0);
}

/* loss = sum (a - t)^2 / divisor:  da = or += dloss 2 (a - t) / divisor */
static void stx__comp_error_back_part(const stx_share *s, const void *job) {
    const stx__comp_error *e = (const stx__comp_error *)job;
    const stx_real scale = (stx_real)e->scale;
    size_t n, c;
    for (n = s->from; n < s->to; n++) {
        stx_real *da = e->da + n * e->C;
        const stx_real *a = e->a + n * e->C, *t = e->t + n * e->C;
        if (!e->accumulate) memset(da, 0, e->C * sizeof *da);
        for (c = 0; c < e->C && !(e->skip && e->skip[n]); c++) da[c] += scale * (a[c] - t[c]);
    }
}

STX_DEF void stx_comp_error_bwd(stx_ctx *x, stx_real *da, const stx_real *dloss, const stx_real *a,
                                const stx_real *t, const int32_t *skip, size_t N, size_t C,
                                double divisor, int accumulate) {
    STX__FP_SCOPE;
    stx__comp_error e;
    memset(&e, 0, sizeof e);
    e.da = da;
    e.a = a;
    e.t = t;
    e.skip = skip;
    e.N = N;
    e.C = C;
    e.accumulate = accumulate;
    e.scale = 2 * (double)dloss[0] / divisor;
    stx_parallel(x, N, 3 * N * C, stx__comp_error_back_part, &e);
}

typedef struct stx__comp_error_save {
    const int32_t *skip;
    double divisor;
} stx__comp_error_save;

static void stx__comp_error_back(stx_ctx *x, stx_tensor *y, stx_tensor *const *in, void *save) {
    const stx__comp_error_save *s = (const stx__comp_error_save *)save;
    size_t C = in[0]->dim[in[0]->ndim - 1];
    int fresh;
    stx_real *d = stx_grad(x, in[0], &fresh);
    if (d)
        STX_RUN(x, stx_comp_error_bwd,
                (x, d, y->grad, in[0]->data, in[1]->data, s->skip, in[0]->size / C, C, s->divisor,
                 !fresh));
}

/* Mean of (a - t)^2 over the rows of a (..,C) that skip leaves, `count` numbers -> (1); t is a constant. ratio: see stx_comp_error_fwd */
static stx_tensor *stx__comp_distance(stx_ctx *x, stx_tensor *a, stx_tensor *t, const stx_ids *skip,
                                      double count, stx_tensor **ratio) {
    stx_tensor *y = stx_new_full(x, 1, 0, 0, 0), *in[2];
    stx__comp_error_save *s = (stx__comp_error_save *)stx_step_alloc(x, sizeof *s);
    double *work;
    size_t C;
    *ratio = stx_new_full(x, 1, 0, 0, 0);
    if (!stx_ok(x) || !a || !t) return NULL;
    C = a->dim[a->ndim - 1];
    work = (double *)stx_step_bytes(x, stx_bytes_of(a->size / C, 2, sizeof *work));
    if (!work) return NULL;
    s->skip = skip ? skip->device : NULL;
    s->divisor = count;
    STX_RUN(x, stx_comp_error_fwd,
            (x, y->data, (*ratio)->data, work, a->data, t->data, s->skip, a->size / C, C, count));
    in[0] = a;
    in[1] = t;
    stx_record(x, y, in, 2, stx__comp_error_back, s);
    return y;
}

// >>gates

enum { STX__COMP_BLOCK = 64 };

/* Columns [c, c + n) of row r: all loops run over arrays of the stack, which cannot be the gate's own, so that they become vector code. */
STX_INNER void stx__comp_gate_any(int fma, const stx_comp_gate_args *a, size_t r, size_t c,
                                  size_t n) {
    const size_t D = a->D, at = r * D + c, wide = r * 3 * D + c;
    const stx_real *x = a->x ? a->x + at : NULL, *y = a->y ? a->y + at : NULL, *p[4];
    stx_real o[STX__COMP_BLOCK], density;
    size_t i;
    for (i = 0; i < 4; i++) p[i] = a->p[i] ? a->p[i] + at : NULL;
    switch (a->kind) {
    case STX_COMP_GRU: {
        const stx_real *gi = a->p[0] + wide, *gh = a->p[1] + wide;
        for (i = 0; i < n; i++) {
            stx_real rr = stx_fast_sigmoid(fma, gi[i] + gh[i]),
                     z = stx_fast_sigmoid(fma, gi[D + i] + gh[D + i]);
            stx_real m = stx_fast_tanh(fma, STX_FMA(fma, rr, gh[2 * D + i], gi[2 * D + i]));
            o[i] = STX_FMA(fma, z, x[i] - m, m);
        }
        break;
    }
    case STX_COMP_INPUT:
        for (i = 0; i < n; i++) o[i] = STX_FMA(fma, stx_fast_sigmoid(fma, p[0][i]), x[i], y[i]);
        break;
    case STX_COMP_OUTPUT:
        for (i = 0; i < n; i++) o[i] = STX_FMA(fma, stx_fast_sigmoid(fma, p[0][i]), y[i], x[i]);
        break;
    case STX_COMP_HIGHWAY:
        for (i = 0; i < n; i++)
            o[i] = STX_FMA(fma, stx_fast_sigmoid(fma, p[0][i]), x[i] - y[i], y[i]);
        break;
    case STX_COMP_SIGTANH:
        for (i = 0; i < n; i++)
            o[i] = STX_FMA(fma, stx_fast_sigmoid(fma, p[0][i]), stx_fast_tanh(fma, p[1][i]), x[i]);
        break;
    case STX_COMP_GTRXL:
        for (i = 0; i < n; i++)
            o[i] = STX_FMA(fma, stx_fast_sigmoid(fma, p[0][i] + p[1][i]),
                           stx_fast_tanh(fma, p[2][i] + p[3][i]) - x[i], x[i]);
        break;
    case STX_COMP_RESET:
        for (i = 0; i < n; i++) o[i] = stx_fast_sigmoid(fma, p[0][i] + p[1][i]) * x[i];
        break;
    case STX_COMP_GLU: {
        const stx_real *u = a->p[0] + r * 2 * D + c;
        for (i = 0; i < n; i++) o[i] = u[i] * stx_fast_phi(fma, u[i], &density) * u[D + i];
        break;
    }
    default:
        for (i = 0; i < n; i++) o[i] = 2 * stx_fast_sigmoid(fma, p[0][i]) * x[i];
    }
    memcpy(a->out + at, o, n * sizeof *o);
}

STX_INNER void stx__comp_gate_put(stx_real *to, const stx_real *v, size_t n, int accumulate) {
    size_t i;
    if (!to) return;
    if (accumulate)
        for (i = 0; i < n; i++) to[i] += v[i];
    else
        memcpy(to, v, n * sizeof *v);
}

/* With g = dout, s' = s (1 - s), and out as in stx_comp_gate_any. gru:
       dn = g (1 - z) (1 - n^2);   dz = g (x - n) z';   dr = dn gh_n r';   dgi = dr dz dn;   dgh = dr dz (r dn);   dx = g z */
STX_INNER void stx__comp_gate_back_any(int fma, const stx_comp_gate_args *a, size_t r, size_t c,
                                       size_t n) {
    const size_t D = a->D, at = r * D + c, wide = r * 3 * D + c;
    const stx_real *x = a->x ? a->x + at : NULL, *y = a->y ? a->y + at : NULL, *g = a->dout + at,
                   *p[4];
    stx_real dx[STX__COMP_BLOCK], dy[STX__COMP_BLOCK], d0[STX__COMP_BLOCK], d1[STX__COMP_BLOCK],
        d2[STX__COMP_BLOCK];
    size_t i;
    for (i = 0; i < 4; i++) p[i] = a->p[i] ? a->p[i] + at : NULL;
    switch (a->kind) {
    case STX_COMP_GRU: {
        const stx_real *gi = a->p[0] + wide, *gh = a->p[1] + wide;
        for (i = 0; i < n; i++) {
            stx_real rr = stx_fast_sigmoid(fma, gi[i] + gh[i]),
                     z = stx_fast_sigmoid(fma, gi[D + i] + gh[D + i]);
            stx_real m = stx_fast_tanh(fma, STX_FMA(fma, rr, gh[2 * D + i], gi[2 * D + i]));
            dx[i] = g[i] * z;
            d2[i] = g[i] * (1 - z) * STX_FMA(fma, -m, m, 1);
            d1[i] = g[i] * (x[i] - m) * z * (1 - z);
            d0[i] = d2[i] * gh[2 * D + i] * rr * (1 - rr);
            dy[i] = d2[i] * rr;
        }
        for (i = 0; i < 2; i++) {
            stx_real *to = a->dp[i] + wide;
            stx__comp_gate_put(to, d0, n, a->accumulate);
            stx__comp_gate_put(to + D, d1, n, a->accumulate);
            stx__comp_gate_put(to + 2 * D, i ? dy : d2, n, a->accumulate);
        }
        stx__comp_gate_put(a->dx + at, dx, n, a->accumulate);
        return;
    }
    case STX_COMP_INPUT:
        for (i = 0; i < n; i++) {
            stx_real s = stx_fast_sigmoid(fma, p[0][i]);
            dx[i] = g[i] * s;
            dy[i] = g[i];
            d0[i] = g[i] * x[i] * s * (1 - s);
        }
        break;
    case STX_COMP_OUTPUT:
        for (i = 0; i < n; i++) {
            stx_real s = stx_fast_sigmoid(fma, p[0][i]);
            dx[i] = g[i];
            dy[i] = g[i] * s;
            d0[i] = g[i] * y[i] * s * (1 - s);
        }
        break;
    case STX_COMP_HIGHWAY:
        for (i = 0; i < n; i++) {
            stx_real s = stx_fast_sigmoid(fma, p[0][i]);
            dx[i] = g[i] * s;
            dy[i] = g[i] * (1 - s);
            d0[i] = g[i] * (x[i] - y[i]) * s * (1 - s);
        }
        break;
    case STX_COMP_SIGTANH:
        for (i = 0; i < n; i++) {
            stx_real s = stx_fast_sigmoid(fma, p[0][i]), m = stx_fast_tanh(fma, p[1][i]);
            dx[i] = g[i];
            d0[i] = g[i] * m * s * (1 - s);
            d1[i] = g[i] * s * STX_FMA(fma, -m, m, 1);
        }
        break;
    case STX_COMP_GTRXL:
        for (i = 0; i < n; i++) {
            stx_real z = stx_fast_sigmoid(fma, p[0][i] + p[1][i]),
                     m = stx_fast_tanh(fma, p[2][i] + p[3][i]);
            dx[i] = g[i] * (1 - z);
            d0[i] = d1[i] = g[i] * (m - x[i]) * z * (1 - z);
            d2[i] = g[i] * z * STX_FMA(fma, -m, m, 1);
        }
        stx__comp_gate_put(a->dp[2] + at, d2, n, a->accumulate);
        stx__comp_gate_put(a->dp[3] + at, d2, n, a->accumulate);
        break;
    case STX_COMP_RESET:
        for (i = 0; i < n; i++) {
            stx_real s = stx_fast_sigmoid(fma, p[0][i] + p[1][i]);
            dx[i] = g[i] * s;
            d0[i] = d1[i] = g[i] * x[i] * s * (1 - s);
        }
        break;
    case STX_COMP_GLU: {
        const stx_real *u = a->p[0] + r * 2 * D + c;
        for (i = 0; i < n; i++) {
            stx_real density, phi = stx_fast_phi(fma, u[i], &density);
            d0[i] = g[i] * u[D + i] * STX_FMA(fma, u[i], density, phi);
            d1[i] = g[i] * u[i] * phi;
        }
        stx__comp_gate_put(a->dp[0] + r * 2 * D + c, d0, n, a->accumulate);
        stx__comp_gate_put(a->dp[0] + r * 2 * D + D + c, d1, n, a->accumulate);
        return;
    }
    default:
        for (i = 0; i < n; i++) {
            stx_real s = stx_fast_sigmoid(fma, p[0][i]);
            dx[i] = 2 * g[i] * s;
            d0[i] = 2 * g[i] * x[i] * s * (1 - s);
        }
    }
    stx__comp_gate_put(a->dx + at, dx, n, a->accumulate);
    stx__comp_gate_put(a->dp[0] + at, d0, n, a->accumulate);
    if (y) stx__comp_gate_put(a->dy + at, dy, n, a->accumulate);
    if (p[1]) stx__comp_gate_put(a->dp[1] + at, d1, n, a->accumulate);
}

STX_INNER void stx__comp_gate_row_any(int fma, const stx_comp_gate_args *a, size_t r, int back) {
    size_t c;
    for (c = 0; c < a->D; c += STX__COMP_BLOCK) {
        size_t n = STX_MIN(a->D - c, (size_t)STX__COMP_BLOCK);
        if (back)
            stx__comp_gate_back_any(fma, a, r, c, n);
        else
            stx__comp_gate_any(fma, a, r, c, n);
    }
}
STX_EACH_ISA(stx__comp_gate_row_any, (const stx_comp_gate_args *a, size_t r, int back), a, r, back)

static void stx__comp_gate_part(const stx_share *s, const void *job) {
    size_t r;
    for (r = s->from; r < s->to; r++)
        STX_CALL(s->x, stx__comp_gate_row_any, ((const stx_comp_gate_args *)job, r, 0));
}

static void stx__comp_gate_back_part(const stx_share *s, const void *job) {
    size_t r;
    for (r = s->from; r < s->to; r++)
        STX_CALL(s->x, stx__comp_gate_row_any, ((const stx_comp_gate_args *)job, r, 1));
}

STX_DEF void stx_comp_gate_fwd(stx_ctx *x, const stx_comp_gate_args *a) {
    stx_parallel(x, a->N, a->N * a->D * 20, stx__comp_gate_part, a);
}

STX_DEF void stx_comp_gate_bwd(stx_ctx *x, const stx_comp_gate_args *a) {
    stx_linear_bwd_args b;
    int i;
    stx_parallel(x, a->N, a->N * a->D * 40, stx__comp_gate_back_part, a);
    memset(&b, 0, sizeof b);
    b.N = a->N;
    b.O = a->D * (a->kind == STX_COMP_GLU ? 2 : 3);
    for (i = 0; i < 2; i++) {
        b.da = a->dp[i];
        b.db = a->db[i];
        if (b.db) stx_linear_bwd(x, &b);
    }
}

static void stx__comp_gate_back(stx_ctx *x, stx_tensor *out, stx_tensor *const *in, void *save) {
    stx_comp_gate_args *a = (stx_comp_gate_args *)save;
    stx_real *d[6] = {NULL};
    int fresh[6] = {0}, i;
    a->accumulate = 0;
    for (i = 0; i < 6; i++) {
        if (!in[i]) continue;
        d[i] = stx_grad(x, in[i], &fresh[i]);
        if (!d[i]) {
            d[i] = stx_step_numbers(x, in[i]->size);
            fresh[i] = 1;
        } /* nobody wants it */
        if (!fresh[i]) a->accumulate = 1;
    }
    if (!stx_ok(x)) return;
    for (i = 0; i < 6 && a->accumulate; i++)
        if (d[i] && fresh[i]) STX_RUN(x, stx_fill, (x, d[i], in[i]->size, 0));
    a->dout = out->grad;
    a->dx = d[0];
    a->dy = d[1];
    for (i = 0; i < 4; i++) a->dp[i] = d[2 + i];
    a->late = 1;
    for (i = 0; i < 2; i++) {
        a->db[i] = in[6 + i] ? stx_grad(x, in[6 + i], NULL) : NULL;
        if (a->db[i]) a->late = a->late && (in[6 + i]->is_param || in[6 + i]->of);
    }
    if (!stx_ok(x)) return;
    STX_RUN(x, stx_comp_gate_bwd, (x, a));
}

/* in: x, y, p0 .. p3, and the biases in p0 and p1 that get their gradients here (both, or none), those that the kind has none of NULL ->
   (B,T,D) */
static stx_tensor *stx__comp_gate_op(stx_ctx *x, int kind, stx_tensor *const *in) {
    stx_comp_gate_args *a;
    stx_tensor *out, *shape = in[kind == STX_COMP_GLU ? 2 : 0];
    size_t D;
    int i;
    if (!stx_ok(x) || !shape) return NULL;
    D = shape->dim[2] / (kind == STX_COMP_GLU ? 2 : 1);
    a = (stx_comp_gate_args *)stx_step_alloc(x, sizeof *a);
    out = stx_new(x, shape->dim[0], shape->dim[1], D, 0);
    if (!a || !out) return NULL;
    memset(a, 0, sizeof *a);
    a->kind = kind;
    a->D = D;
    a->N = shape->dim[0] * shape->dim[1];
    a->x = in[0] ? in[0]->data : NULL;
    a->y = in[1] ? in[1]->data : NULL;
    for (i = 0; i < 4; i++) a->p[i] = in[2 + i] ? in[2 + i]->data : NULL;
    a->out = out->data;
    STX_RUN(x, stx_comp_gate_fwd, (x, a));
    stx_record(x, out, in, 8, stx__comp_gate_back, a);
    return out;
}

// >>model: creation

static int stx__comp_bad(stx_ctx *x, const char *field, double got, const char *expected) {
    return stx_bad_value(x, "stx_comp_create", field, got, expected);
}

static int stx__comp_upto(stx_ctx *x, const char *what, size_t got, size_t lo, int bits) {
    if (got >= lo && got <= (size_t)1 << bits) return 1;
    stx_fail(x, STX_ERR_ARG, "stx_comp_create: %s: expected %zu to 2^%d, got %zu", what, lo, bits,
             got);
    return 0;
}

/* An option that only some models have */
static int stx__comp_only(stx_ctx *x, const char *what, double got, int where, const char *want) {
    return got == 0 || where || stx__comp_bad(x, what, got, want);
}

static int stx__comp_dropout(stx_ctx *x, const char *what, double p) {
    return (p >= 0 && p < 1) || stx__comp_bad(x, what, p, "0 <= p < 1");
}

/* M and C of layer l of a desc whose numbers are resolved; 0 when it is no memory layer */
static int stx__comp_sizes(const stx_comp_desc *d, size_t l, size_t *M, size_t *C) {
    size_t i, in = !d->no_memory && !d->memory_layers;
    for (i = 0; d->memory_layers && i < d->memory_count; i++) in |= d->memory_layers[i] == l + 1;
    *M = !in ? 0 : d->mems ? d->mems[l] : d->mem == STX_COMP_NO_ROWS ? 0 : d->mem;
    *C = !in || d->compress == STX_COMP_DROP ? 0
         : d->cmems                          ? d->cmems[l]
         : d->cmem == STX_COMP_NO_ROWS       ? 0
                                             : d->cmem;
    return in != 0;
}

static int stx__comp_learns(const stx_comp_desc *d) {
    return d->compress == STX_COMP_CONV || d->compress == STX_COMP_DILATED;
}

static int stx__comp_biased(int gate) {
    return gate != STX_COMP_RESIDUAL && gate != STX_COMP_INPUT;
}

/* The sum of the dilations: how many rows a dilated convolution sees before its group */
static size_t stx__comp_ahead(const stx_comp_desc *d) {
    size_t i, n = 0;
    for (i = 0; i < d->dilations; i++) n += d->dilation[i];
    return d->compress == STX_COMP_DILATED ? n : d->overlap;
}

static int stx__comp_check_memory(stx_ctx *x, const stx_comp_desc *d) {
    const size_t most = (size_t)1 << 31;
    size_t l, i, M, C, first = SIZE_MAX, M0 = 0, C0 = 0;
    if (!stx__comp_only(x, "no_memory with memory_layers", d->no_memory, !d->memory_layers,
                        "one of the two"))
        return 0;
    if (!d->memory_layers != !d->memory_count)
        return stx__comp_bad(x, "memory_count", (double)d->memory_count,
                             "how many memory_layers there are (none: no_memory)");
    for (l = 0; l < d->memory_count; l++) {
        if (!d->memory_layers[l] || d->memory_layers[l] > d->layers) {
            stx_fail(x, STX_ERR_ARG,
                     "stx_comp_create: memory_layers has %zu, want 1 to %zu (layers)",
                     d->memory_layers[l], d->layers);
            return 0;
        }
        for (i = 0; i < l; i++)
            if (d->memory_layers[i] == d->memory_layers[l])
                return stx__comp_bad(x, "twice in memory_layers", (double)d->memory_layers[l],
                                     "each layer once");
    }
    if (d->mem > most && d->mem != STX_COMP_NO_ROWS)
        return stx__comp_bad(x, "mem", (double)d->mem, "at most 2^31, or STX_COMP_NO_ROWS");
    if (d->cmem > most && d->cmem != STX_COMP_NO_ROWS)
        return stx__comp_bad(x, "cmem", (double)d->cmem, "at most 2^31, or STX_COMP_NO_ROWS");
    for (l = 0; l < d->layers; l++) {
        if (!stx__comp_sizes(d, l, &M, &C)) continue;
        if (!stx__comp_upto(x, "a number of mems", M, 0, 31)
            || !stx__comp_upto(x, "a number of cmems", C, 0, 31))
            return 0;
        if (first == SIZE_MAX) {
            first = l;
            M0 = M;
            C0 = C;
        }
        if (d->recurrence == STX_COMP_ROTATE && (M != M0 || C != C0))
            return stx__comp_bad(x, "recurrence with memories of several sizes", d->recurrence,
                                 "equal mems and cmems for STX_COMP_ROTATE");
    }
    return 1;
}

static int stx__comp_check_compress(stx_ctx *x, stx_comp_desc *d) {
    size_t i;
    const int conv = d->compress == STX_COMP_CONV, dilated = d->compress == STX_COMP_DILATED,
              learns = conv || dilated;
    if (d->compress < 0 || d->compress > STX_COMP_DROP)
        return stx__comp_bad(x, "compress", d->compress, "one of STX_COMP_CONV .. _DROP");
    if (d->aux < 0 || d->aux > STX_COMP_AUX_NONE)
        return stx__comp_bad(x, "aux", d->aux, "one of STX_COMP_AUX_AUTO .. _NONE");
    if (!stx__comp_upto(x, "ratio", d->ratio, 1, 20)
        || !stx__comp_upto(x, "overlap", d->overlap, 0, 20)
        || !stx__comp_upto(x, "dilations", d->dilations, 0, 3)
        || !stx__comp_upto(x, "bptt", d->bptt, 0, 10)
        || !stx__comp_only(x, "overlap", (double)d->overlap, conv, "0 but for STX_COMP_CONV")
        || !stx__comp_only(x, "conv_no_bias", d->conv_no_bias, conv, "0 but for STX_COMP_CONV")
        || !stx__comp_only(x, "dilations", (double)d->dilations, dilated,
                           "0 but for STX_COMP_DILATED")
        || !stx__comp_only(x, "bptt", (double)d->bptt, d->aux == STX_COMP_AUX_BPTT,
                           "0 but for STX_COMP_AUX_BPTT"))
        return 0;
    for (i = 0; i < d->dilations; i++)
        if (!stx__comp_upto(x, "a dilation", d->dilation[i], 1, 20)) return 0;
    if (dilated && !d->dilations) {
        d->dilations = 3;
        d->dilation[0] = 1;
        d->dilation[1] = 2;
        d->dilation[2] = 4;
    }
    if (d->aux == STX_COMP_AUX_AUTO) d->aux = learns ? STX_COMP_AUX_ATTENTION : STX_COMP_AUX_NONE;
    if (d->aux != STX_COMP_AUX_NONE && !learns)
        return stx__comp_bad(x, "aux", d->aux,
                             "STX_COMP_AUX_NONE: this compression has nothing to learn");
    if (!(d->aux_weight >= 0 && d->aux_weight < 1e30))
        return stx__comp_bad(x, "aux_weight", d->aux_weight, "0 (which means 1) or more");
    if (d->aux_weight == 0) d->aux_weight = 1;
    if (d->aux == STX_COMP_AUX_BPTT && d->recurrence == STX_COMP_ROTATE)
        return stx__comp_bad(x, "aux with STX_COMP_ROTATE", d->aux,
                             "another than STX_COMP_AUX_BPTT: rows leave the layer that made them");
    if (d->aux == STX_COMP_AUX_BPTT && !d->bptt) d->bptt = 1;
    i = d->aux == STX_COMP_AUX_ATTENTION;
    return stx__comp_only(x, "aux_dropout", d->aux_dropout, (int)i,
                          "0 but for STX_COMP_AUX_ATTENTION");
}

/* Replaces STX_COMP_LITERAL by the flags that the model can have. 0 and an error for a
   flag that it cannot have. */
static int stx__comp_check_literal(stx_ctx *x, stx_comp_desc *d) {
    static const struct {
        unsigned flag;
        const char *name, *needs;
    } form[5] = {{STX_COMP_LITERAL_ROWS, "_ROWS", "STX_COMP_LEARNED"},
                 {STX_COMP_LITERAL_PAD, "_PAD", "STX_COMP_CONV"},
                 {STX_COMP_LITERAL_TARGET, "_TARGET", "STX_COMP_AUX_ATTENTION"},
                 {STX_COMP_LITERAL_MASK, "_MASK", "another compression than STX_COMP_USED"},
                 {STX_COMP_LITERAL_FREEZE, "_FREEZE", "STX_COMP_AUX_ATTENTION"}};

    unsigned can = 0, all = STX_COMP_LITERAL;
    size_t i;

    if (d->positions == STX_COMP_LEARNED) can |= STX_COMP_LITERAL_ROWS;
    if (d->compress == STX_COMP_CONV) can |= STX_COMP_LITERAL_PAD;
    if (d->compress != STX_COMP_USED) can |= STX_COMP_LITERAL_MASK;
    if (d->aux == STX_COMP_AUX_ATTENTION) can |= STX_COMP_LITERAL_TARGET | STX_COMP_LITERAL_FREEZE;
    for (i = 0; i < 5; i++) {
        all |= form[i].flag;
        if (!(d->literal & form[i].flag & ~can)) continue;
        stx_fail(x, STX_ERR_ARG,
                 "stx_comp_create: literal has STX_COMP_LITERAL%s, which needs %s; "
                 "STX_COMP_LITERAL takes the forms that the model can have",
                 form[i].name, form[i].needs);
        return 0;
    }
    if (d->literal & ~all) {
        return stx__comp_bad(x, "literal", (double)d->literal,
                             "STX_COMP_LITERAL, or flags STX_COMP_LITERAL_ROWS .. _FREEZE");
    }
    if (d->literal & STX_COMP_LITERAL) d->literal = can;
    return 1;
}

static int stx__comp_check_gate(stx_ctx *x, stx_comp_desc *d) {
    int biased;
    if (d->gate < 0 || d->gate >= STX_COMP_GATES)
        return stx__comp_bad(x, "gate", d->gate, "one of STX_COMP_RESIDUAL .. _GTRXL");
    biased = stx__comp_biased(d->gate);
    if (!(d->gate_bias > -1e30 && d->gate_bias < 1e30))
        return stx__comp_bad(x, "gate_bias", d->gate_bias, "a number");
    if (!stx__comp_only(x, "gate_bias", d->gate_bias, biased, "0 for a gate without a bias")
        || !stx__comp_only(x, "no_gate_bias", d->no_gate_bias, biased,
                           "0 for a gate without a bias")
        || !stx__comp_only(x, "gate_bias with no_gate_bias", d->gate_bias, !d->no_gate_bias,
                           "one of the two")
        || !stx__comp_only(x, "mogrify", d->mogrify, d->gate == STX_COMP_GRU && d->dim >= 4,
                           "0 but for STX_COMP_GRU and dim >= 4"))
        return 0;
    if (d->gate_bias == 0 && !d->no_gate_bias && biased && d->gate != STX_COMP_GRU)
        d->gate_bias = d->gate == STX_COMP_GTRXL ? 2 : 1;
    return 1;
}

/* Initialisers of embedding and output: PyTorch's, n(0,1) and U(1/sqrt(columns)) */
static void stx__comp_words(const stx_comp_desc *d, stx_words_desc *w) {
    memset(w, 0, sizeof *w);
    w->vocab = d->vocab;
    w->dim = w->emb = d->emb;
    w->out = d->tied ? STX_WORDS_TIED : STX_WORDS_PLAIN;
    w->table.kind = STX_NORMAL;
    w->table.a = 1;
    w->out_table.kind = STX_UNIFORM;
    w->out_table.a = 1;
    w->out_table.rule = STX_INIT_FAN_IN;
    w->bias = w->out_table;
}

/* Fills in the defaults and checks; 0 and an error (if x) when the desc makes no sense. The lists stay the caller's. */
static int stx__comp_resolve(stx_ctx *x, const stx_comp_desc *from, stx_comp_desc *d,
                             stx_words_desc *words) {
    STX__FP_SCOPE;
    *d = *from;
    if (!d->dim) d->dim = 512;
    if (!d->emb) d->emb = d->dim;
    if (!d->layers) d->layers = 8;
    if (!d->heads) d->heads = 8;
    if (!d->kv_heads) d->kv_heads = d->heads;
    if (!d->segment) d->segment = 512;
    if (!d->ratio) d->ratio = 4;
    if (!stx__comp_upto(x, "layers", d->layers, 1, 12) || !stx__comp_upto(x, "dim", d->dim, 1, 29)
        || !stx__comp_upto(x, "emb", d->emb, 1, 29)
        || !stx__comp_upto(x, "segment", d->segment, 1, 31))
        return 0;
    if (!d->inner) d->inner = 4 * d->dim;
    if (!stx__comp_upto(x, "inner", d->inner, 1, 31)) return 0;
    if (d->heads > 256 || d->dim % d->heads) {
        stx_fail(
            x, STX_ERR_ARG,
            "stx_comp_create: %zu heads do not divide dim %zu: choose heads (at most 256) that do",
            d->heads, d->dim);
        return 0;
    }
    if (d->heads % d->kv_heads)
        return stx__comp_bad(x, "kv_heads", (double)d->kv_heads, "a divisor of heads");
    if (d->recurrence < 0 || d->recurrence > STX_COMP_ROTATE)
        return stx__comp_bad(x, "recurrence", d->recurrence, "STX_COMP_SAME, _ERNIE or _ROTATE");
    if (d->positions != STX_COMP_LEARNED && d->positions != STX_COMP_XL)
        return stx__comp_bad(x, "positions", d->positions, "STX_COMP_LEARNED or STX_COMP_XL");
    if (d->positions == STX_COMP_XL && d->dim % 2)
        return stx__comp_bad(x, "dim", (double)d->dim, "an even one for STX_COMP_XL");
    if (!d->mem) d->mem = d->segment;
    if (!d->cmem)
        d->cmem = d->mem == STX_COMP_NO_ROWS || d->mem < d->ratio ? STX_COMP_NO_ROWS
                                                                  : d->mem / d->ratio;
    if (!stx__comp_check_compress(x, d) || !stx__comp_check_memory(x, d)
        || !stx__comp_check_gate(x, d) || !stx__comp_check_literal(x, d)
        || !stx__comp_dropout(x, "attn_dropout", d->attn_dropout)
        || !stx__comp_dropout(x, "out_dropout", d->out_dropout)
        || !stx__comp_dropout(x, "ff_dropout", d->ff_dropout)
        || !stx__comp_dropout(x, "aux_dropout", d->aux_dropout)
        || !stx__comp_only(x, "tied", d->tied, d->vocab > 0, "0 without vocab")
        || (!d->vocab
            && !stx__comp_only(x, "emb", (double)d->emb, d->emb == d->dim, "0 without vocab")))
        return 0;
    d->recompute_layers = d->recompute ? d->layers : STX_MIN(d->recompute_layers, d->layers);
    if (!d->vocab) return 1;
    stx__comp_words(d, words);
    return stx_words_resolve(x, "stx_comp_create", words, words);
}

/* Parameters of one gate: how many matrices, biases, and numbers */
static size_t stx__comp_gate_size(const stx_comp_desc *d) {
    static const unsigned char matrices[STX_COMP_GATES] = {0, 6, 1, 1, 1, 2, 6};
    size_t D = d->dim, k = D / 4, n = stx_size_add(0, matrices[d->gate] * D, D);
    if (d->gate == STX_COMP_GRU)
        n = stx_size_add(n, 6, D);
    else if (stx__comp_biased(d->gate))
        n = stx_size_add(n, 1, D);
    return d->mogrify ? stx_size_add(n, 4 * k, D) : n;
}

STX_DEF size_t stx_comp_count(const stx_comp_desc *desc) {
    stx_comp_desc d;
    stx_words_desc words;
    size_t n = 0, l, D, M, C, reach = 0, Mmax = 0, layer;
    if (!desc || !stx__comp_resolve(NULL, desc, &d, &words)) return 0;
    D = d.dim;
    if (d.vocab) n = stx_words_count(&words);
    if (d.emb != D) n = stx_size_add(stx_size_add(n, 2 * d.emb, D), 1, D + d.emb);
    if (d.final_norm) n = stx_size_add(n, 2, D);
    layer = stx_size_add(6 * D + d.inner * (d.glu ? 2 : 1), D,
                         2 * D + 2 * (D / d.heads * d.kv_heads) + d.inner * (d.glu ? 3 : 2));
    layer = stx_size_add(layer, 2, stx__comp_gate_size(&d));
    if (d.positions == STX_COMP_XL) layer = stx_size_add(layer, D + 2, D);
    n = stx_size_add(n, d.layers, layer);
    for (l = 0; l < d.layers; l++) {
        size_t taps = d.ratio + (d.compress == STX_COMP_CONV ? d.overlap : 0);
        stx__comp_sizes(&d, l, &M, &C);
        Mmax = STX_MAX(Mmax, M);
        reach = STX_MAX(reach, C);
        if (!C || !stx__comp_learns(&d)) continue;
        n = stx_size_add(n, stx_size_add(taps, 2 * d.dilations, 1), D * D);
        if (d.compress == STX_COMP_CONV && !d.conv_no_bias) n = stx_size_add(n, 1, D);
        if (d.aux == STX_COMP_AUX_AUTOENCODE) n = stx_size_add(n, taps, D * D);
    }
    return d.positions == STX_COMP_XL ? n : stx_size_add(n, d.segment + Mmax + reach, D);
}

static stx_tensor *stx__comp_param(stx_comp *m, size_t l, const char *name, int init, double a,
                                   size_t d0, size_t d1) {
    char full[96];
    snprintf(full, sizeof full, "layers.%zu.%s", l, name);
    return stx_param(m->params, init, a, full, d0, d1, 0, 0);
}

static void stx__comp_gate_params(stx_comp *m, size_t l, const char *where, stx_comp_gate *g) {
    static const char *const name[STX_COMP_GATES][6] = {
        {NULL},     {"weight_ih", "weight_hh"},          {"w"}, {"w"}, {"w"},
        {"w", "u"}, {"wr", "ur", "wz", "uz", "wg", "ug"}};
    const stx_comp_desc *d = &m->desc;
    const size_t D = d->dim, k = D / 4;
    const double s = 1 / sqrt((double)D);
    const int gru = d->gate == STX_COMP_GRU;
    char full[64];
    size_t i;
    for (i = 0; i < 6 && name[d->gate][i]; i++) {
        snprintf(full, sizeof full, "%s.gate.%s", where, name[d->gate][i]);
        g->w[i] = stx__comp_param(m, l, full, STX_UNIFORM, s, gru ? 3 * D : D, D);
    }
    for (i = 0; i < 2 && gru; i++) {
        snprintf(full, sizeof full, "%s.gate.%s", where, i ? "bias_hh" : "bias_ih");
        g->b[i] = stx__comp_param(m, l, full, STX_UNIFORM, s, 3 * D, 0);
    }
    if (gru && d->gate_bias != 0 && stx_ok(m->ctx)) {
        stx_tensor *z = g->b[0];
        stx_real *v = (stx_real *)stx_block(m->ctx, stx_bytes_of(z->size, 1, sizeof *v));
        if (v) {
            stx_get(m->ctx, z, v);
            for (i = D; i < 2 * D; i++) v[i] = (stx_real)((double)v[i] + d->gate_bias);
            stx_set(m->ctx, z, v);
        }
        stx_block_free(m->ctx, v);
    }
    if (!gru && stx__comp_biased(d->gate)) {
        snprintf(full, sizeof full, "%s.gate.b", where);
        g->b[0] = stx__comp_param(m, l, full, STX_CONSTANT, d->gate_bias, D, 0);
    }
    for (i = 0; i < 4 && d->mogrify; i++) {
        snprintf(full, sizeof full, "%s.gate.mogrify.%s", where,
                 i == 0   ? "q0"
                 : i == 1 ? "q1"
                 : i == 2 ? "r0"
                          : "r1");
        g->mogrify[i] = stx__comp_param(m, l, full, STX_UNIFORM, i % 2 ? 1 / sqrt((double)k) : s,
                                        i % 2 ? D : k, i % 2 ? k : D);
    }
}

/* The farthest distance of memories of these sizes, and the row for it: S + max M + max C */
static size_t stx__comp_reach(const stx_comp *m, const size_t *M, const size_t *C) {
    size_t l, most = 0, cmost = 0;
    for (l = 0; l < m->desc.layers; l++) {
        most = STX_MAX(most, M ? M[l] : m->layer[l].M);
        cmost = STX_MAX(cmost, C ? C[l] : m->layer[l].C);
    }
    return m->desc.segment + most + cmost;
}

/* The sines and cosines of distances 0 .. n - 1, the farthest first */
static stx_tensor *stx__comp_sines(stx_comp *m, size_t n) {
    stx_ctx *x = m->ctx;
    const size_t D = m->desc.dim, half = D / 2;
    stx_real *v = (stx_real *)stx_block(x, stx_bytes_of(n, D, sizeof *v));
    stx_tensor *t;
    size_t i, k;
    if (!v) return NULL;
    for (i = 0; i < n; i++)
        for (k = 0; k < half; k++) {
            double a = (double)(n - 1 - i) * pow(10000, -2 * (double)k / (double)D);
            v[i * D + k] = (stx_real)sin(a);
            v[i * D + half + k] = (stx_real)cos(a);
        }
    t = stx_constant_create(x, v, n, D, 0, 0);
    stx_block_free(x, v);
    return t;
}

static void stx__comp_layer_params(stx_comp *m, size_t l) {
    const stx_comp_desc *d = &m->desc;
    stx_comp_layer *y = &m->layer[l];
    const size_t D = d->dim, kv = D / d->heads * d->kv_heads, F = d->inner;
    const double s = 1 / sqrt((double)D), sc = 1 / sqrt((double)D * (double)m->taps),
                 sf = 1 / sqrt((double)F);
    size_t i;
    char full[64];
    y->attn_gain = stx__comp_param(m, l, "attn.norm.weight", STX_CONSTANT, 1, D, 0);
    y->attn_shift = stx__comp_param(m, l, "attn.norm.bias", STX_ZEROS, 0, D, 0);
    if (!stx_params_beside(m->params, D * D + 2 * kv * D))
        return; /* queries, keys and values are one product */
    y->wq = stx__comp_param(m, l, "attn.query.weight", STX_UNIFORM, s, D, D);
    y->wkv = stx__comp_param(m, l, "attn.kv.weight", STX_UNIFORM, s, 2 * kv, D);
    y->wo = stx__comp_param(m, l, "attn.out.weight", STX_UNIFORM, s, D, D);
    y->bo = stx__comp_param(m, l, "attn.out.bias", STX_UNIFORM, s, D, 0);
    if (d->positions == STX_COMP_XL) {
        y->wr = stx__comp_param(m, l, "attn.pos.weight", STX_UNIFORM, s, D, D);
        y->u = stx__comp_param(m, l, "attn.u", STX_ZEROS, 0, d->heads, D / d->heads);
        y->v = stx__comp_param(m, l, "attn.v", STX_ZEROS, 0, d->heads, D / d->heads);
    }
    stx__comp_gate_params(m, l, "attn", &y->attn_gate);
    if (y->C && stx__comp_learns(d)) {
        for (i = 0; i < d->dilations; i++) {
            snprintf(full, sizeof full, "compress.dilated.%zu.weight", i);
            y->dilated[i] = stx__comp_param(m, l, full, STX_UNIFORM, 1 / sqrt(2 * (double)D), D,
                                            2 * D);
        }
        y->conv = stx__comp_param(m, l, "compress.weight", STX_UNIFORM, sc, D, m->taps * D);
        if (d->compress == STX_COMP_CONV && !d->conv_no_bias)
            y->conv_bias = stx__comp_param(m, l, "compress.bias", STX_UNIFORM, sc, D, 0);
        if (d->aux == STX_COMP_AUX_AUTOENCODE)
            y->decoder = stx__comp_param(m, l, "compress.decoder.weight", STX_UNIFORM, sc,
                                         m->taps * D, D);
    }
    y->ff_gain = stx__comp_param(m, l, "ff.norm.weight", STX_CONSTANT, 1, D, 0);
    y->ff_shift = stx__comp_param(m, l, "ff.norm.bias", STX_ZEROS, 0, D, 0);
    y->w1 = stx__comp_param(m, l, "ff.fc1.weight", STX_UNIFORM, s, d->glu ? 2 * F : F, D);
    y->b1 = stx__comp_param(m, l, "ff.fc1.bias", STX_UNIFORM, s, d->glu ? 2 * F : F, 0);
    y->w2 = stx__comp_param(m, l, "ff.fc2.weight", STX_UNIFORM, sf, D, F);
    y->b2 = stx__comp_param(m, l, "ff.fc2.bias", STX_UNIFORM, sf, D, 0);
    stx__comp_gate_params(m, l, "ff", &y->ff_gate);
}

/* Initialisers: those of PyTorch's modules, U(1/sqrt(fan in)) for weights and biases, n(0,1) for the embedding; u, v and the table of
   positions begin with zeros. */
STX_DEF stx_comp *stx_comp_create(stx_ctx *x, const stx_comp_desc *desc) {
    STX__FP_SCOPE;
    stx_comp *m;
    stx_comp_desc *d;
    stx_words_desc words;
    size_t l, D, E;
    if (!stx_ok(x)) return NULL;
    if (!desc) {
        stx_fail(x, STX_ERR_ARG, "stx_comp_create: no desc; at least one of all zeros is needed");
        return NULL;
    }
    m = (stx_comp *)stx_persist(x, sizeof *m);
    if (!m || !stx__comp_resolve(x, desc, &m->desc, &words)) return NULL;
    d = &m->desc;
    D = d->dim;
    E = d->emb;
    m->ctx = x;
    m->params = stx_params_create(x);
    m->layer = (stx_comp_layer *)stx_persist(x, stx_bytes_of(d->layers, sizeof *m->layer, 1));
    m->aux = (stx_tensor **)stx_persist(x, stx_bytes_of(d->layers, 2 * sizeof *m->aux, 1));
    if (!m->params || !m->layer || !m->aux) return NULL;
    m->ratio = m->aux + d->layers;
    m->taps = d->ratio + (d->compress == STX_COMP_CONV ? d->overlap : 0);
    m->ahead = stx__comp_ahead(d);
    for (l = 0; l < d->layers; l++) {
        m->layer[l].memory = stx__comp_sizes(d, l, &m->layer[l].M, &m->layer[l].C);
        m->A += m->layer[l].C > 0;
    }
    d->memory_layers = d->mems = d->cmems = NULL;
    if (d->positions == STX_COMP_LEARNED)
        m->key_pe = stx_param(m->params, STX_ZEROS, 0, "key_pe", stx__comp_reach(m, NULL, NULL), D,
                              0, 0);
    else
        m->sines = stx__comp_sines(m, stx__comp_reach(m, NULL, NULL));
    if (d->vocab) m->words = stx_words_create(m->params, &words);
    if (E != D) {
        m->in_w = stx_param(m->params, STX_UNIFORM, 1 / sqrt((double)E), "in_proj.weight", D, E, 0,
                            0);
        m->in_b = stx_param(m->params, STX_UNIFORM, 1 / sqrt((double)E), "in_proj.bias", D, 0, 0,
                            0);
        m->out_w = stx_param(m->params, STX_UNIFORM, 1 / sqrt((double)D), "out_proj.weight", E, D,
                             0, 0);
        m->out_b = stx_param(m->params, STX_UNIFORM, 1 / sqrt((double)D), "out_proj.bias", E, 0, 0,
                             0);
    }
    if (d->final_norm) {
        m->final_gain = stx_param(m->params, STX_CONSTANT, 1, "final_norm.weight", D, 0, 0, 0);
        m->final_shift = stx_param(m->params, STX_ZEROS, 0, "final_norm.bias", D, 0, 0, 0);
    }
    for (l = 0; l < d->layers && stx_ok(x); l++) stx__comp_layer_params(m, l);
    return stx_ok(x) ? m : NULL;
}

STX_DEF stx_params *stx_comp_params(stx_comp *m) {
    return m ? m->params : NULL;
}

// >>memory: state

static stx_rows *stx__comp_rows(const stx_comp_state *s, const size_t *widths, int usage,
                                size_t most) {
    stx_rows_desc d;
    memset(&d, 0, sizeof d);
    d.layers = s->model->desc.layers;
    d.B = s->B;
    d.widths = widths;
    d.full = d.zeros = usage;
    d.most = most;
    return stx_rows_create(s->model->ctx, &d);
}

/* The rows of a state, for what is done to each of them */
static int stx__comp_parts(const stx_comp_state *s, stx_rows **part, const char **name) {
    int n = 0;
    part[n] = s->mem;
    name[n++] = "mem.";
    part[n] = s->comp;
    name[n++] = "comp.";
    if (s->usage) {
        part[n] = s->usage;
        name[n++] = "usage.";
    }
    if (s->source) {
        part[n] = s->source;
        name[n++] = "source.";
    }
    return n;
}

STX_DEF stx_comp_state *stx_comp_state_create_sized(stx_comp *m, size_t B, const size_t *mems,
                                                    const size_t *cmems) {
    STX__FP_SCOPE;
    stx_ctx *x = m ? m->ctx : NULL;
    stx_comp_state *s;
    size_t l, L, *width, M = 0, C = 0, reach, k, first = SIZE_MAX;
    if (!stx_ok(x)) return NULL;
    L = m->desc.layers;
    if (!B) {
        stx_fail(x, STX_ERR_ARG, "stx_comp_state_create: no streams, want B >= 1");
        return NULL;
    }
    s = (stx_comp_state *)stx_block(x, sizeof *s);
    if (!s) return NULL;
    s->model = m;
    s->B = B;
    s->M = (size_t *)stx_block(x, stx_bytes_of(3 * L, sizeof *s->M, 1));
    s->seen = (size_t *)stx_block(x, stx_bytes_of(B, sizeof *s->seen, 1));
    if (!s->M || !s->seen) {
        stx_comp_state_free(s);
        return NULL;
    }
    s->C = s->M + L;
    width = s->C + L;
    for (l = 0; l < L; l++) {
        const stx_comp_layer *p = &m->layer[l];
        s->M[l] = !p->memory ? 0 : mems ? mems[l] : p->M;
        s->C[l] = !p->C ? 0 : cmems ? cmems[l] : p->C;
        if (s->M[l] > (size_t)1 << 31 || s->C[l] > (size_t)1 << 31
            || (p->memory && !p->C && cmems && cmems[l])) {
            stx_fail(
                x, STX_ERR_ARG,
                "stx_comp_state_create: layer %zu with %zu rows and %zu compressed rows, want at most 2^31, and "
                "none of these in a layer that was made without",
                l, s->M[l], cmems ? cmems[l] : s->C[l]);
            stx_comp_state_free(s);
            return NULL;
        }
        if (p->memory && first == SIZE_MAX) first = l;
        if (p->memory && m->desc.recurrence == STX_COMP_ROTATE
            && (s->M[l] != s->M[first] || s->C[l] != s->C[first])) {
            stx_fail(
                x, STX_ERR_ARG,
                "stx_comp_state_create: memories of several sizes, want equal ones with STX_COMP_ROTATE");
            stx_comp_state_free(s);
            return NULL;
        }
        M = STX_MAX(M, s->M[l]);
        C = STX_MAX(C, s->C[l]);
    }
    reach = m->desc.segment + M + C;
    if ((m->desc.literal & STX_COMP_LITERAL_ROWS) && reach > m->key_pe->dim[0]) {
        stx_fail(x, STX_ERR_ARG,
                 "stx_comp_state_create: %zu and %zu rows with "
                 "STX_COMP_LITERAL_ROWS: want no more than the model's",
                 M, C);
        stx_comp_state_free(s);
        return NULL;
    }
    if (m->sines && reach > m->sines->dim[0]) {
        stx_tensor *longer = stx__comp_sines(m, reach);
        if (longer) m->sines = longer;
    }
    s->most = M + m->desc.segment * (m->desc.bptt + 1);
    for (l = 0; l < L; l++) width[l] = m->layer[l].memory ? m->desc.dim : 0;
    s->mem = stx__comp_rows(s, width, 0, M + !M);
    for (l = 0; l < L; l++) width[l] = s->C[l] ? m->desc.dim : 0;
    s->comp = stx__comp_rows(s, width, 0, C + !C);
    k = (m->ahead + m->taps) * (m->desc.segment / m->desc.ratio + 1)
        + m->ahead; /* at most so many rows of source a segment */
    if (m->desc.aux == STX_COMP_AUX_BPTT) s->source = stx__comp_rows(s, width, 0, k * m->desc.bptt);
    for (l = 0; l < L; l++) width[l] = s->C[l] ? 2 : 0;
    if (m->desc.compress == STX_COMP_USED) s->usage = stx__comp_rows(s, width, 1, M + !M);
    if (stx_ok(x)) return s;
    stx_comp_state_free(s);
    return NULL;
}

STX_DEF stx_comp_state *stx_comp_state_create(stx_comp *m, size_t B) {
    return stx_comp_state_create_sized(m, B, NULL, NULL);
}

STX_DEF void stx_comp_state_free(stx_comp_state *s) {
    if (!s) return;
    stx_rows_free(s->mem);
    stx_rows_free(s->comp);
    stx_rows_free(s->usage);
    stx_rows_free(s->source);
    stx_block_free(s->model->ctx, s->M);
    stx_block_free(s->model->ctx, s->seen);
    stx_block_free(s->model->ctx, s);
}

STX_DEF void stx_comp_state_reset(stx_comp_state *s) {
    stx_rows *part[4];
    const char *name[4];
    int i, n;
    if (!s || !stx_ok(s->model->ctx)) return;
    for (i = 0, n = stx__comp_parts(s, part, name); i < n; i++) stx_rows_reset(part[i]);
    memset(s->seen, 0, s->B * sizeof *s->seen);
}

STX_DEF void stx_comp_state_reset_stream(stx_comp_state *s, size_t b) {
    const unsigned aged = STX_COMP_LITERAL_ROWS | STX_COMP_LITERAL_PAD | STX_COMP_LITERAL_MASK;
    stx_rows *part[4];
    const char *name[4];
    int i, n;
    if (!s || !stx_ok(s->model->ctx)) return;
    if (s->model->desc.literal & aged) {
        stx_fail(s->model->ctx, STX_ERR_ARG,
                 "stx_comp_state_reset_stream: STX_COMP_LITERAL_ROWS, "
                 "_PAD and _MASK know one age for all streams; use stx_comp_state_reset");
        return;
    }
    for (i = 0, n = stx__comp_parts(s, part, name); i < n; i++) stx_rows_reset_stream(part[i], b);
    if (stx_ok(s->model->ctx)) s->seen[b] = 0;
}

static size_t stx__comp_seen(const stx_comp_state *s) {
    size_t b, n = 0;
    for (b = 0; b < s->B; b++) n = STX_MAX(n, s->seen[b]);
    return n;
}

STX_DEF int stx_comp_state_copy(stx_comp_state *to, size_t b, const stx_comp_state *from, size_t c,
                                size_t n) {
    stx_ctx *x = to ? to->model->ctx : NULL;
    stx_rows *part[4], *other[4];
    const char *name[4];
    size_t l;
    int i, parts, apart;
    if (!stx_ok(x)) return 0;
    if (!from || from->model != to->model
        || memcmp(from->M, to->M, 2 * to->model->desc.layers * sizeof *to->M)) {
        stx_fail(
            x, STX_ERR_ARG,
            "stx_comp_state_copy: from is NULL, of another model, or has memories of other sizes");
        return 0;
    }
    apart = n < to->B && stx__comp_seen(from) != stx__comp_seen(to);
    for (l = 0; to->source && n < to->B && l < to->model->desc.layers; l++)
        apart |= from->source->layer[l].real != to->source->layer[l].real;
    parts = stx__comp_parts(to, part, name);
    stx__comp_parts(from, other, name);
    for (i = 0; i < parts; i++)
        if (!stx_rows_copy(part[i], b, other[i], c, n)) return 0;
    memmove(to->seen + b, from->seen + c, n * sizeof *to->seen);
    if (apart) stx_rows_reset(to->source); /* of segments that were cut in other groups */
    return 1;
}

STX_DEF int stx_comp_state_get(const stx_comp_state *s, size_t l, stx_real *mem, stx_real *comp) {
    return s && l < s->model->desc.layers && (!mem || stx_rows_get(s->mem, l, mem))
           && (!comp || stx_rows_get(s->comp, l, comp));
}

STX_DEF int stx_comp_state_set(stx_comp_state *s, size_t l, const stx_real *mem, size_t n,
                               const stx_real *comp, size_t c) {
    stx_ctx *x = s ? s->model->ctx : NULL;
    stx_real *zeros;
    size_t b;
    int good;
    if (!stx_ok(x)) return 0;
    if (l >= s->model->desc.layers || n > s->M[l] || c > s->C[l] || (n && !mem) || (c && !comp)) {
        stx_fail(
            x, STX_ERR_ARG,
            "stx_comp_state_set: layer %zu with %zu rows and %zu compressed rows%s: want a layer that there is, at "
            "most %zu and %zu rows, and numbers to read",
            l, n, c, (n && !mem) || (c && !comp) ? " from NULL" : "",
            l < s->model->desc.layers ? s->M[l] : 0, l < s->model->desc.layers ? s->C[l] : 0);
        return 0;
    }
    if (!stx_rows_set(s->mem, l, n, mem, n) || !stx_rows_set(s->comp, l, c, comp, c)) return 0;
    for (b = 0; b < s->B; b++) s->seen[b] = STX_MAX(s->seen[b], n);
    stx_rows_reset(s->source);
    if (!s->usage || !s->C[l]) return 1;
    zeros = (stx_real *)stx_block(x, stx_bytes_of(s->B * (n + !n), 2, sizeof *zeros));
    good = zeros && stx_rows_set(s->usage, l, n, zeros, n);
    stx_block_free(x, zeros);
    return good;
}

STX_DEF int stx_comp_state_save(stx_writer *w, const stx_comp_state *s, const char *prefix) {
    stx_rows *part[4];
    const char *name[4];
    char full[128];
    size_t b;
    int i, n, good = 1;
    if (!s || !prefix || !stx_ok(s->model->ctx)) return 0;
    if (strlen(prefix) > 64) {
        stx_fail(s->model->ctx, STX_ERR_ARG,
                 "stx_comp_state_save: a prefix of %zu letters, want at most 64", strlen(prefix));
        return 0;
    }
    for (i = 0, n = stx__comp_parts(s, part, name); good && i < n; i++) {
        snprintf(full, sizeof full, "%s%s", prefix, name[i]);
        good = stx_rows_save(w, part[i], full);
    }
    for (b = 0; good && b < s->B; b++) {
        snprintf(full, sizeof full, "%sseen.%zu", prefix, b);
        good = stx_writer_meta_u64(w, full, s->seen[b]);
    }
    return good;
}

STX_DEF int stx_comp_state_load(stx_comp_state *s, const stx_file *f, const char *prefix) {
    stx_ctx *x = s ? s->model->ctx : NULL;
    stx_rows *part[4];
    const char *name[4];
    char full[128];
    uint64_t seen = 0;
    size_t b, l;
    int i, n, good = 1;
    if (!stx_ok(x) || !f || !prefix) return 0;
    stx_comp_state_reset(s);
    for (i = 0, n = stx__comp_parts(s, part, name); good && i < n; i++) {
        snprintf(full, sizeof full, "%.64s%s", prefix, name[i]);
        good = stx_rows_load(part[i], f, full);
    }
    for (l = 0; good && l < s->model->desc.layers; l++)
        if (s->mem->layer[l].real > s->M[l] || s->comp->layer[l].real > s->C[l]) {
            stx_fail(
                x, STX_ERR_FORMAT,
                "memory \"%s\" of layer %zu has %zu and %zu rows, want at most mem %zu and cmem %zu: give the "
                "sizes that the file was made with",
                prefix, l, s->mem->layer[l].real, s->comp->layer[l].real, s->M[l], s->C[l]);
            good = 0;
        } else if (s->usage && s->C[l] && s->usage->layer[l].real != s->mem->layer[l].real) {
            stx_fail(
                x, STX_ERR_FORMAT,
                "memory \"%s\" of layer %zu has usage of %zu rows for %zu: the file is damaged",
                prefix, l, s->usage->layer[l].real, s->mem->layer[l].real);
            good = 0;
        }
    for (b = 0; good && b < s->B; b++) {
        snprintf(full, sizeof full, "%.64sseen.%zu", prefix, b);
        good = stx_file_meta_u64(x, f, full, &seen);
        if (good && seen > s->most) {
            stx_fail(
                x, STX_ERR_FORMAT,
                "metadata \"%s\" is %llu, more than the %zu that there can be: the file is damaged, or of a "
                "model of other sizes",
                full, (unsigned long long)seen, s->most);
            good = 0;
        }
        s->seen[b] = (size_t)seen;
    }
    if (!good) { /* nothing is remembered: the context is in error, so not by stx_comp_state_reset */
        for (i = 0; i < n; i++)
            for (l = 0; l < s->model->desc.layers; l++) {
                part[i]->layer[l].real = part[i]->layer[l].rows = 0;
                part[i]->layer[l].masked = 0;
            }
        memset(s->seen, 0, s->B * sizeof *s->seen);
    }
    return good;
}

// >>memory: what a segment does to it

/* All that the host knows of a layer in a segment. Masks are NULL where nothing is missing. */
typedef struct stx__comp_job {
    stx_comp *m;
    size_t l, B, T, n, c; /* rows of memory and of compressed memory that are attended to */
    size_t M, C, e,
        G; /* e rows fall out of the memory (0: none, or the segment is not full) and become G */
    size_t tot; /* STX_COMP_LITERAL_ROWS: S + n + c of the largest */
    int push;   /* the segment is full, and memory moves on */
    int frozen; /* the layer's, when this segment came */
    size_t made,
        *groups_of; /* STX_COMP_AUX_BPTT: so many evictions before, each of so many groups, are made again, oldest first */
    const stx_ids *mask, *pad, *unpad,
        *ahead; /* (B,c+n+T) keys that are missing; (B,T) padding, and its opposite; all of the segment */
    const stx_ids *old_pad, *comp_pad,
        *skip; /* (B,e), (B,G): missing rows; rows that do not count in the aux loss */
    stx_comp_groups groups;
    double count; /* numbers in the aux loss */
    int aux; /* is there one? Where nothing counts there is none; in a group all ranks have it, or none */
    int past, source, usage; /* which of the layer's inputs these are; 0: none */
} stx__comp_job;

static size_t stx__comp_evicted(size_t n, size_t S, size_t M) {
    return n + S > M ? n + S - M : 0;
}

/* How many groups e rows make. STX_COMP_LITERAL_PAD: e mod r rows of padding are in
   front of them, and only whole groups count. */
static size_t stx__comp_made(const stx_comp_desc *d, size_t e) {
    if (d->literal & STX_COMP_LITERAL_PAD) return (e + e % d->ratio) / d->ratio;
    return stx__comp_groups_of(e, d->ratio);
}

/* Rows of source that G groups are made of */
static size_t stx__comp_source(const stx_comp *m, size_t G) {
    return m->desc.compress == STX_COMP_DILATED ? m->ahead + G * m->desc.ratio : G * m->taps;
}

/* Is there a number other than 0? Then ids of it, else NULL */
static const stx_ids *stx__comp_ids(stx_ctx *x, const int32_t *v, size_t B, size_t n) {
    size_t i;
    for (i = 0; v && i < B * n; i++)
        if (v[i]) return stx_tokens(x, v, B, n);
    return NULL;
}

/* Which of the new compressed rows are missing */
static const stx_ids *stx__comp_lost(stx_ctx *x, const stx__comp_job *j, const stx_ids *first) {
    const size_t B = j->B, e = j->e, G = j->G;
    int32_t *v = (int32_t *)stx_step_alloc(x, stx_bytes_of(B, G, sizeof *v));
    stx_comp_groups g = j->groups;
    size_t b, i, t;
    if (!v || (!j->old_pad && !first)) return NULL;
    g.first = first ? first->data : NULL;
    g.pad = j->old_pad ? j->old_pad->data : NULL;
    for (b = 0; b < B; b++) {
        size_t z = first ? (size_t)first->data[b] : 0,
               keep = first ? stx__comp_groups_of(e - z, g.step) : G, there = 0, lost, place;
        if (j->m->desc.compress != STX_COMP_USED) {
            for (i = 0; i < G; i++) {
                v[b * G + i] = 1;
                for (t = 0; t < g.taps; t++)
                    if (stx__comp_row(&g, b, i, t) >= 0) v[b * G + i] = 0;
            }
            continue;
        }
        for (i = z; i < e; i++)
            there +=
                !g.pad
                || !g.pad[b * e + i]; /* all that are there come first, the order is that of time */
        lost = there < keep ? keep - there : 0;
        for (i = 0; i < G; i++) v[b * G + i] = i < G - keep;
        for (place = G - keep, i = z; i < e && lost; i++) {
            int is_lost = g.pad && g.pad[b * e + i];
            v[b * G + place++] = is_lost;
            lost -= (size_t)is_lost;
        }
    }
    return stx__comp_ids(x, v, B, G);
}

/* What the aux loss counts: rows that are no padding, of streams that have both an evicted row and a compressed one */
static void stx__comp_counted(stx_ctx *x, stx__comp_job *j) {
    STX__FP_SCOPE;
    const stx_comp_desc *d = &j->m->desc;
    const size_t B = j->B, T = j->T;
    int32_t *v;
    const int all = (d->literal & STX_COMP_LITERAL_TARGET) != 0;
    size_t b, i, counted = 0, target = all ? j->n : j->e, from = all ? j->c : 0;
    const stx_ids *pad = all ? j->mask : j->old_pad;
    const int group = stx_ranks(x) > 1;
    j->count = 0;
    if (d->aux == STX_COMP_AUX_AUTOENCODE) {
        for (i = 0; i < B * j->e; i++) counted += !j->old_pad || !j->old_pad->data[i];
        j->skip = j->old_pad;
        j->count = (double)counted * (double)d->dim;
        j->aux = group || counted > 0;
        return;
    }
    v = (int32_t *)stx_step_alloc(x, stx_bytes_of(B, T, sizeof *v));
    if (!v || !target) return;
    for (b = 0; b < B; b++) {
        int old = 0, comp = 0;
        for (i = 0; i < target; i++) old |= !pad || !pad->data[b * pad->T + from + i];
        for (i = 0; i < j->G; i++) comp |= !j->comp_pad || !j->comp_pad->data[b * j->G + i];
        for (i = 0; i < T; i++) {
            v[b * T + i] = !old || !comp
                           || (j->pad && !(d->literal & STX_COMP_LITERAL_MASK)
                               && j->pad->data[b * T + i]);
            counted += !v[b * T + i];
        }
    }
    j->skip = stx__comp_ids(x, v, B, T);
    j->count = (double)counted * (double)d->dim;
    j->aux = group || counted > 0;
}

/* STX_COMP_LITERAL_MASK: padding is no key for real queries, which see all of the
   memory. Padded queries see the memory alone. */
static int stx__comp_literal_masks(stx_ctx *x, stx__comp_job *j) {
    const size_t B = j->B, T = j->T, K = j->c + j->n + T;
    int32_t *v = (int32_t *)stx_step_alloc(x, stx_bytes_of(3 * B, K, sizeof *v));
    size_t b, i;
    if (!v) return 0;
    memset(v, 0, 3 * B * K * sizeof *v);
    for (b = 0; b < B; b++)
        for (i = 0; i < T; i++) {
            v[b * K + K - T + i] = j->pad->data[b * T + i];
            v[(B + b) * K + K - T + i] = 1;
            v[2 * B * K + b * T + i] = !j->pad->data[b * T + i];
        }
    j->mask = stx_tokens(x, v, B, K);
    j->ahead = stx_tokens(x, v + B * K, B, K);
    j->unpad = stx_tokens(x, v + 2 * B * K, B, T);
    return stx_ok(x);
}

/* STX_COMP_AUX_BPTT: the evictions of the segments before, as far as what they were made of is there; their sizes follow from how many rows
   the streams have seen */
static int stx__comp_past(stx_ctx *x, stx__comp_job *j, const stx_comp_state *s, size_t from) {
    const stx_comp_desc *d = &j->m->desc;
    size_t seen = stx__comp_seen(s), rows = s->source->layer[from].real, S = d->segment, *G, k;
    G = j->groups_of = (size_t *)stx_step_alloc(x, stx_bytes_of(d->bptt, sizeof *G, 1));
    if (!G) return 0;
    for (k = 1; k <= d->bptt && seen >= k * S; k++) {
        size_t g = stx__comp_made(d, stx__comp_evicted(STX_MIN(seen - k * S, j->M), S, j->M));
        if (!g || stx__comp_source(j->m, g) > rows) break;
        rows -= stx__comp_source(j->m, g);
        memmove(G + 1, G, j->made++ * sizeof *G); /* the oldest first */
        G[0] = g;
    }
    return 1;
}

/* Cuts the e rows that fall out in groups */
static int stx__comp_cut_groups(stx_ctx *x, stx__comp_job *j, const stx_comp_state *s) {
    const stx_comp_desc *d = &j->m->desc;
    const stx_ids *first = NULL;
    const size_t B = j->B, e = j->e;
    int32_t *v = (int32_t *)stx_step_alloc(x, stx_bytes_of(B, e, sizeof *v));
    size_t b;
    if (!v) return 0;
    j->G = stx__comp_made(d, e);
    j->groups = stx__comp_grouped(B, e, j->G, j->m->taps, d->ratio, d->dim);
    j->groups.at = -(ptrdiff_t)((d->compress == STX_COMP_CONV ? j->m->ahead : 0)
                                + (d->literal & STX_COMP_LITERAL_PAD ? e % d->ratio : 0));
    if (!j->G) {
        j->e = 0;
        return 1;
    }
    /* rows from before a stream's beginning */
    for (b = 0; s && !(d->literal & STX_COMP_LITERAL_PAD) && b < B; b++) {
        size_t own = STX_MIN(s->seen[b], j->n) + d->segment;
        v[b] = (int32_t)(e - (own > j->M ? STX_MIN(own - j->M, e) : 0));
    }
    if (s && !(d->literal & STX_COMP_LITERAL_PAD)) first = stx__comp_ids(x, v, B, 1);
    if (j->mask && !(d->literal & STX_COMP_LITERAL_MASK)) {
        for (b = 0; b < B; b++)
            memcpy(v + b * e, j->mask->data + b * j->mask->T + j->c, e * sizeof *v);
        j->old_pad = stx__comp_ids(x, v, B, e);
    }
    j->groups.first = first ? first->device : NULL;
    j->groups.pad = j->old_pad ? j->old_pad->device : NULL;
    j->comp_pad = stx__comp_lost(x, j, first);
    return stx_ok(x);
}

/* Fills in a job for layer l, whose memory stands in slot `from` of s (NULL: there is none). push: the segment is full. 0 in error */
static int stx__comp_plan(stx_comp *m, size_t l, const stx_comp_state *s, size_t from, size_t B,
                          size_t T, const stx_ids *pad, int push, stx__comp_job *j) {
    stx_ctx *x = m->ctx;
    const stx_comp_desc *d = &m->desc;
    const stx_comp_layer *p = &m->layer[l];
    memset(j, 0, sizeof *j);
    j->m = m;
    j->l = l;
    j->B = B;
    j->T = T;
    j->pad = pad;
    j->push = push;
    j->n = s && p->memory ? s->mem->layer[from].real : 0;
    j->c = s && p->memory ? s->comp->layer[from].real : 0;
    j->M = s ? s->M[l] : p->M;
    j->C = s ? s->C[l] : p->C;
    if (d->literal & STX_COMP_LITERAL_MASK) {
        if (pad && !stx__comp_literal_masks(x, j)) return 0;
    } else
        j->mask = !(j->n + j->c)
                      ? pad
                      : stx_rows_mask(s->comp, from, j->c,
                                      stx_rows_mask(s->mem, from, j->n, pad, T), j->n + T);
    if (j->c && d->aux == STX_COMP_AUX_BPTT && stx_training(x) && !stx__comp_past(x, j, s, from))
        return 0;
    j->e = push && j->C ? stx__comp_evicted(j->n, d->segment, j->M) : 0;
    if (j->e && !stx__comp_cut_groups(x, j, s)) return 0;
    if (j->e && stx_training(x)
        && (d->aux == STX_COMP_AUX_ATTENTION || d->aux == STX_COMP_AUX_AUTOENCODE))
        stx__comp_counted(x, j);
    return stx_ok(x);
}

/* a, then b; either may be NULL */
static stx_tensor *stx__comp_join(stx_ctx *x, stx_tensor *a, stx_tensor *b) {
    return a && b ? stx_concat(x, a, b) : a ? a : b;
}

/* Rows [t0,t1) of a; NULL when there are none */
static stx_tensor *stx__comp_cut(stx_ctx *x, stx_tensor *a, size_t t0, size_t t1) {
    return t0 == t1 || !a ? NULL : t0 == 0 && t1 == a->dim[1] ? a : stx_slice(x, a, t0, t1);
}

/* The e rows that fall out, oldest first: of memory, whose n rows are `held`, and then of the segment's, rows (B,T,D). They stay where they
   are unless they are of both. NULL: in error */
static stx_past stx__comp_old(stx_ctx *x, const stx__comp_job *j, stx_past held,
                              const stx_tensor *rows) {
    const size_t D = j->m->desc.dim, n = STX_MIN(j->e, j->n), own = j->e - n;
    stx_tensor *t;
    held.rows = j->e;
    if (!own) return held;
    if (!n || !rows) {
        held.data = rows ? rows->data : NULL;
        held.stride = j->T * D;
        return held;
    }
    t = stx_new(x, j->B, j->e, D, 0);
    if (t)
        STX_RUN(x, stx_concat2d,
                (x, t->data, held.data, held.stride, n * D, rows->data, j->T * D, own * D, j->B));
    held.data = t ? t->data : NULL;
    held.stride = j->e * D;
    return held;
}

/* What the convolutions read: the taps of each group (B,G taps,D); dilated: the rows of all groups and those before (B,ahead + G r,D) */
static stx_tensor *stx__comp_unfolded(stx_ctx *x, const stx__comp_job *j, const stx_past *old) {
    const stx_comp *m = j->m;
    stx_comp_groups g = j->groups;
    stx_tensor *y = stx_new(x, j->B, stx__comp_source(m, j->G), g.D, 0);
    if (!y) return NULL;
    g.stride = old->stride;
    if (m->desc.compress
        == STX_COMP_DILATED) { /* as one group, which is as long as all are together */
        g.at = -(ptrdiff_t)(m->ahead + (g.first ? (j->G - 1) * g.step : 0));
        g.groups = 1;
        g.taps = y->dim[1];
    }
    STX_RUN(x, stx_comp_unfold, (x, y->data, old->data, &g, 0));
    return y;
}

/* Strided convolution: a product over the taps of a group side by side. Dilated ones before it: u[i] = K0 z[i] + K1 z[i + R] */
static stx_tensor *stx__comp_convolve(stx_ctx *x, const stx_comp *m, size_t l, stx_tensor *z,
                                      size_t G) {
    const stx_comp_layer *p = &m->layer[l];
    size_t i;
    for (i = 0; z && m->desc.compress == STX_COMP_DILATED && i < m->desc.dilations; i++) {
        size_t R = m->desc.dilation[i], N = z->dim[1];
        z = stx_linear(x, stx_concat_channels(x, stx_slice(x, z, 0, N - R), stx_slice(x, z, R, N)),
                       p->dilated[i], NULL, STX_ACT_RELU);
    }
    z = z ? stx_reshape(x, z, z->dim[0], G, m->taps * m->desc.dim, 0) : NULL;
    return stx_linear(x, z, p->conv, p->conv_bias, STX_ACT_NONE);
}

/* The new compressed rows (B,G,D) of the rows old (B,e,D); source: what the convolutions read. usage: of the memory's rows */
static stx_tensor *stx__comp_compress(stx_ctx *x, const stx__comp_job *j, const stx_past *old,
                                      const stx_tensor *usage, stx_tensor **source) {
    const stx_comp_desc *d = &j->m->desc;
    stx_comp_groups g = j->groups;
    stx_tensor *y;
    *source = NULL;
    if (!old->data) return NULL;
    g.stride = old->stride;
    if (stx__comp_learns(d)) {
        *source = stx__comp_unfolded(x, j, old);
        y = stx__comp_convolve(x, j->m, j->l, *source, j->G);
    } else {
        y = stx_new(x, j->B, j->G, d->dim, 0);
        if (!y) return NULL;
        if (d->compress == STX_COMP_USED)
            STX_RUN(x, stx_comp_pick, (x, y->data, old->data, usage->data, usage->dim[1] * 2, &g));
        else
            STX_RUN(x, stx_comp_pool, (x, y->data, old->data, &g, d->compress == STX_COMP_MAX));
    }
    return stx__comp_zero(x, y, j->comp_pad);
}

/* Usage (B,n+T,2) of the memory's rows after this attention, and zeros for those of the segment */
static stx_tensor *stx__comp_used(stx_ctx *x, const stx__comp_job *j, const stx_tensor *usage,
                                  const stx_attention_args *a) {
    stx_tensor *y = stx_new_full(x, j->B, j->n + j->T, 2, 0);
    const size_t ldu = 2 * (j->n + j->T);
    if (!y) return NULL;
    STX_RUN(x, stx_fill, (x, y->data, y->size, 0));
    if (usage) STX_RUN(x, stx_copy2d, (x, y->data, ldu, usage->data, 2 * j->n, j->B, 2 * j->n, 0));
    if (usage && a) STX_RUN(x, stx_comp_usage, (x, y->data, ldu, a, j->c, j->n));
    return y;
}

/* Pushes a full segment's rows into slot l, and what was made of those that fall out */
static int stx__comp_push(stx_comp_state *s, const stx__comp_job *j, stx_tensor *rows,
                          stx_tensor *comp, stx_tensor *source, stx_tensor *usage) {
    const stx_comp *m = j->m;
    const size_t l = j->l;
    size_t i, keep;
    const stx_ids *pad = m->desc.literal & STX_COMP_LITERAL_MASK ? NULL : j->pad;
    if (!m->layer[l].memory) return 1;
    if (!stx_rows_push(s->mem, s->mem, l, j->M, rows, pad)) return 0;
    if (usage && j->C && !stx_rows_push(s->usage, NULL, l, j->M, usage, NULL)) return 0;
    if (!comp) return 1;
    if (!stx_rows_push(s->comp, s->comp, l, j->C, comp, j->comp_pad)) return 0;
    if (!s->source) return 1;
    keep = source->dim[1];
    for (i = j->made; i > 0 && i + m->desc.bptt > j->made + 1; i--)
        keep += stx__comp_source(m, j->groups_of[i - 1]);
    return stx_rows_push(s->source, s->source, l, keep, source, NULL);
}

static void stx__comp_count_rows(stx_comp_state *s) {
    size_t b;
    for (b = 0; b < s->B; b++) s->seen[b] = STX_MIN(s->seen[b] + s->model->desc.segment, s->most);
}

/* The memory layer that comes after l, cyclically */
static size_t stx__comp_next(const stx_comp *m, size_t l) {
    do l = (l + 1) % m->desc.layers;
    while (!m->layer[l].memory);
    return l;
}

/* STX_COMP_ROTATE: each memory goes to the memory layer below */
static void stx__comp_rotate(stx_comp_state *s) {
    const stx_comp *m = s->model;
    stx_rows *part[4];
    const char *name[4];
    int i, n = stx__comp_parts(s, part, name);
    size_t l, first;
    for (first = 0; first < m->desc.layers && !m->layer[first].memory; first++) {
    }
    if (first == m->desc.layers) return;
    for (i = 0; i < n; i++) {
        stx_rows_layer kept = part[i]->layer[first];
        for (l = first; stx__comp_next(m, l) != first; l = stx__comp_next(m, l))
            part[i]->layer[l] = part[i]->layer[stx__comp_next(m, l)];
        part[i]->layer[l] = kept;
    }
}

// >>layer

/* Keys or values (..,2 kv_heads hd) for all heads, each copied for the queries that share it */
typedef struct stx__comp_heads {
    size_t rows, hd, H, K;
} stx__comp_heads;

static void stx__comp_heads_back(stx_ctx *x, stx_tensor *y, stx_tensor *const *in, void *save) {
    const stx__comp_heads *s = (const stx__comp_heads *)save;
    stx_real *d = stx_grad(x, in[0], NULL);
    size_t h;
    for (h = 0; d && h < 2 * s->H; h++)
        STX_RUN(x, stx_copy2d,
                (x, stx_at(x, d, h * s->K / s->H * s->hd), 2 * s->K * s->hd,
                 stx_at(x, y->grad, h * s->hd), 2 * s->H * s->hd, s->rows, s->hd, 1));
}

static stx_tensor *stx__comp_all_heads(stx_ctx *x, const stx_comp_desc *d, stx_tensor *kv) {
    stx__comp_heads *s;
    stx_tensor *y;
    size_t h;
    if (!stx_ok(x) || !kv || d->kv_heads == d->heads) return kv;
    s = (stx__comp_heads *)stx_step_alloc(x, sizeof *s);
    y = stx_new(x, kv->dim[0], kv->dim[1], 2 * d->dim, 0);
    if (!s || !y) return NULL;
    s->rows = kv->dim[0] * kv->dim[1];
    s->hd = d->dim / d->heads;
    s->H = d->heads;
    s->K = d->kv_heads;
    for (h = 0; h < 2 * s->H; h++)
        STX_RUN(x, stx_copy2d,
                (x, stx_at(x, y->data, h * s->hd), 2 * s->H * s->hd,
                 stx_at(x, kv->data, h * s->K / s->H * s->hd), 2 * s->K * s->hd, s->rows, s->hd,
                 0));
    stx_record(x, y, &kv, 1, stx__comp_heads_back, s);
    return y;
}

/* x and a sublayer's output y meet; gain, shift: of the layer norm after, norm_after only */
static stx_tensor *stx__comp_gate(const stx_comp *m, const stx_comp_gate *g, stx_tensor *h,
                                  stx_tensor *y, stx_tensor *gain, stx_tensor *shift) {
    stx_ctx *x = m->ctx;
    const stx_comp_desc *d = &m->desc;
    stx_tensor *in[8] = {NULL}, *t, *b = d->gate == STX_COMP_HIGHWAY ? g->b[0] : NULL;
    int i;
    if (!stx_ok(x) || !h || !y) return NULL;
    if (d->gate == STX_COMP_RESIDUAL)
        return d->norm_after ? stx_residual_norm(x, h, y, 0, gain, shift, 1e-5) : stx_add(x, h, y);
    for (i = 0; i < 5 && d->mogrify; i++) { /* y by x, x by y, .. */
        t = i % 2 ? y : h;
        t = stx_linear(x, stx_linear(x, t, g->mogrify[i % 2 ? 2 : 0], NULL, STX_ACT_NONE),
                       g->mogrify[i % 2 ? 3 : 1], NULL, STX_ACT_NONE);
        in[0] = i % 2 ? h : y;
        in[2] = t;
        t = stx__comp_gate_op(x, STX_COMP_MOGRIFY, in);
        if (i % 2)
            h = t;
        else
            y = t;
    }
    if (d->gate != STX_COMP_GRU && stx__comp_biased(d->gate) && !b)
        b = stx_scale(x, g->b[0], -1); /* W x - b */
    in[0] = h;
    in[1] = d->gate == STX_COMP_INPUT || d->gate == STX_COMP_OUTPUT || d->gate == STX_COMP_HIGHWAY
                ? y
                : NULL;
    switch (d->gate) {
    case STX_COMP_GRU:
        in[2] = stx_linear(x, y, g->w[0], stx_detach(x, g->b[0]),
                           STX_ACT_NONE); /* the gate's kernel sums their gradients up */
        in[3] = stx_linear(x, h, g->w[1], stx_detach(x, g->b[1]), STX_ACT_NONE);
        in[6] = g->b[0];
        in[7] = g->b[1];
        break;
    case STX_COMP_SIGTANH:
        in[2] = stx_linear(x, y, g->w[0], b, STX_ACT_NONE);
        in[3] = stx_linear(x, y, g->w[1], NULL, STX_ACT_NONE);
        break;
    case STX_COMP_GTRXL:
        in[2] = stx_linear(x, y, g->w[0], NULL, STX_ACT_NONE);
        in[3] = stx_linear(x, h, g->w[1], NULL, STX_ACT_NONE);
        t = stx__comp_gate_op(x, STX_COMP_RESET, in);
        in[2] = stx_linear(x, y, g->w[2], NULL, STX_ACT_NONE);
        in[3] = stx_linear(x, h, g->w[3], b, STX_ACT_NONE);
        in[4] = stx_linear(x, y, g->w[4], NULL, STX_ACT_NONE);
        in[5] = stx_linear(x, t, g->w[5], NULL, STX_ACT_NONE);
        break;
    default: in[2] = stx_linear(x, h, g->w[0], b, STX_ACT_NONE);
    }
    t = stx__comp_gate_op(x, d->gate, in);
    return d->norm_after ? stx_layernorm(x, t, gain, shift, 1e-5) : t;
}

/* What follows the attention's output o: its gate, the feed-forward and that one's gate. xs: the stream */
static stx_tensor *stx__comp_after(const stx_comp *m, size_t l, stx_tensor *xs, stx_tensor *o) {
    stx_ctx *x = m->ctx;
    const stx_comp_desc *d = &m->desc;
    const stx_comp_layer *p = &m->layer[l];
    const int act = d->gate_relu ? STX_ACT_RELU : STX_ACT_NONE;
    stx_tensor *a, *f, *in[8] = {NULL};
    o = stx_dropout(x, stx_linear(x, o, p->wo, p->bo, act), d->out_dropout);
    a = stx__comp_gate(m, &p->attn_gate, xs, o, p->attn_gain, p->attn_shift);
    f = d->norm_after ? a : stx_layernorm(x, a, p->ff_gain, p->ff_shift, 1e-5);
    if (!d->glu)
        f = stx_linear(x, f, p->w1, p->b1, STX_ACT_GELU);
    else {
        in[2] = stx_linear(x, f, p->w1, stx_detach(x, p->b1), STX_ACT_NONE);
        in[6] = p->b1;
        f = stx__comp_gate_op(x, STX_COMP_GLU, in);
    }
    f = stx_linear(x, stx_dropout(x, f, d->ff_dropout), p->w2, p->b2, act);
    return stx__comp_gate(m, &p->ff_gate, a, f, p->ff_gain, p->ff_shift);
}

/* What the attention sees: Wkv, a constant once STX_COMP_LITERAL_FREEZE has struck */
static stx_tensor *stx__comp_wkv(const stx_comp *m, size_t l, int frozen) {
    return frozen ? stx_detach(m->ctx, m->layer[l].wkv) : m->layer[l].wkv;
}

/* All that slot l of s remembers, one constant (B,c+n,D), compressed rows first; NULL when there is nothing. One copy of both, for one
   product forward and one backward. They are not read where they stand (stx_linear_past): that makes two products each way, and on a GPU
   the weights' gradient wants the rows of all streams, and what comes back to them, put together first: six nodes a layer more, by count */
static stx_tensor *stx__comp_remembered(const stx_comp_state *s, size_t l) {
    const stx_rows_layer *c = &s->comp->layer[l], *n = &s->mem->layer[l];
    stx_ctx *x = s->model->ctx;
    stx_tensor *t;
    if (!c->real || !n->real)
        return c->real ? stx_rows_read(s->comp, l, c->real) : stx_rows_read(s->mem, l, n->real);
    t = stx_new(x, s->B, c->real + n->real, c->width, 0);
    if (t)
        STX_RUN(x, stx_concat2d,
                (x, t->data, c->data, c->stride, c->real * c->width, n->data, n->stride,
                 n->real * n->width, s->B));
    return t;
}

/* Memory rows as the layer reads them: STX_COMP_ERNIE before its own layer norm. still: its gain and shift are constants */
static stx_tensor *stx__comp_read(const stx_comp *m, size_t l, stx_tensor *rows, int still) {
    const stx_comp_layer *p = &m->layer[l];
    stx_ctx *x = m->ctx;
    if (m->desc.recurrence != STX_COMP_ERNIE || m->desc.norm_after || !rows) return rows;
    return still ? stx_layernorm(x, rows, stx_detach(x, p->attn_gain), stx_detach(x, p->attn_shift),
                                 1e-5)
                 : stx_layernorm(x, rows, p->attn_gain, p->attn_shift, 1e-5);
}

/* A learned table that ends with distance 0 and has rows for n of them: beyond its own farthest row that one again */
static stx_tensor *stx__comp_table(const stx_comp *m, size_t n) {
    stx_ctx *x = m->ctx;
    size_t P = m->key_pe->dim[0], i;
    int32_t *idx;
    if (n <= P) return m->key_pe;
    idx = (int32_t *)stx_step_alloc(x, stx_bytes_of(n, sizeof *idx, 1));
    for (i = 0; idx && i < n; i++) idx[i] = (int32_t)(i < n - P ? 0 : i - (n - P));
    return idx ? stx_gather(x, m->key_pe, idx, n) : NULL;
}

/* S + n + c of the fullest memory: what STX_COMP_LITERAL_ROWS counts from */
static size_t stx__comp_filled(const stx_comp *m, const stx_comp_state *s) {
    size_t l, n = 0;
    for (l = 0; s && l < m->desc.layers; l++)
        n = STX_MAX(n, s->mem->layer[l].real + s->comp->layer[l].real);
    return m->desc.segment + n;
}

/* Positions of K keys */
static stx_tensor *stx__comp_positions(stx_ctx *x, const stx__comp_job *j, size_t K) {
    const stx_comp *m = j->m;
    size_t R;
    if (m->desc.literal & STX_COMP_LITERAL_ROWS) return stx_view_rows(x, m->key_pe, 0, j->tot);
    if (!m->sines) return stx__comp_table(m, K);
    R = m->sines->dim[0];
    return stx_linear(x, stx_view_rows(x, m->sines, R - K, R), m->layer[j->l].wr, NULL,
                      STX_ACT_NONE);
}

static void stx__comp_attention(const stx_comp *m, size_t l, stx_attention_in *a,
                                stx_attention_desc *d) {
    memset(a, 0, sizeof *a);
    memset(d, 0, sizeof *d);
    d->heads = m->desc.heads;
    d->dropout = m->desc.attn_dropout;
    a->u = m->layer[l].u;
    a->vb = m->layer[l].v;
}

/* Queries, keys and values of the K rows that are seen, as stx_attention_in has them: q (B,T,D) and kv (B,K,2D), or qkv (B,T,3D) and kv of
   the rows before, past (B,K-T,2D) */
typedef struct stx__comp_qkv {
    stx_tensor *q, *kv, *qkv, *past;
    size_t K;
} stx__comp_qkv;

static stx__comp_qkv stx__comp_project(stx_ctx *x, const stx__comp_job *j, stx_tensor *src,
                                       stx_tensor *h) {
    const stx_comp_desc *d = &j->m->desc;
    stx_tensor *w[2], *wkv = stx__comp_wkv(j->m, j->l, j->frozen);
    stx__comp_qkv y;
    memset(&y, 0, sizeof y);
    w[0] = j->m->layer[j->l].wq;
    w[1] = wkv;
    y.K = h->dim[1] + (src ? src->dim[1] : 0);
    if (d->kv_heads == d->heads && d->compress != STX_COMP_USED && !j->ahead) {
        y.qkv = stx_linear_many(x, h, w, NULL, 2);
        y.past = stx_linear(x, src, wkv, NULL, STX_ACT_NONE); /* NULL of NULL */
        return y;
    }
    y.q = stx_linear(x, h, w[0], NULL, STX_ACT_NONE);
    if (src && src->needs_grad)
        y.kv = stx_linear(x, stx_concat(x, src, h), wkv, NULL, STX_ACT_NONE);
    else
        y.kv = stx_linear_memory(x, stx__comp_join(x, src, stx_detach(x, h)), h, wkv, NULL);
    y.kv = stx__comp_all_heads(x, d, y.kv);
    return y;
}

/* Rows [t0,t1) of keys and values side by side, as constants */
static stx_tensor *stx__comp_kv_rows(stx_ctx *x, const stx__comp_qkv *s, size_t t0, size_t t1) {
    size_t m = s->past ? s->past->dim[1] : 0;
    stx_tensor *y = NULL, *t;
    if (!s->qkv) return stx__comp_cut(x, stx_detach(x, s->kv), t0, t1);
    if (t0 < m) y = stx__comp_cut(x, stx_detach(x, s->past), t0, STX_MIN(t1, m));
    if (t1 <= m) return y;
    t = stx_slice_channels(x, stx_detach(x, s->qkv), s->qkv->dim[2] / 3, s->qkv->dim[2]);
    return stx__comp_join(x, y, stx__comp_cut(x, t, STX_MAX(t0, m) - m, t1 - m));
}

/* softmax(..) v of the queries; 0 at padding. made: what the kernel was given */
static stx_tensor *stx__comp_attend(stx_ctx *x, const stx__comp_job *j, const stx__comp_qkv *s,
                                    stx_attention_args **made) {
    stx_attention_in a;
    stx_attention_desc d;
    stx_tensor *y, *q = s->q;
    *made = NULL;
    if (!stx_ok(x)) return NULL;
    stx__comp_attention(j->m, j->l, &a, &d);
    a.q = q;
    a.kv = s->kv;
    a.qkv = s->qkv;
    a.past[0] = s->past;
    a.pe = stx__comp_positions(x, j, s->K);
    if (!a.pe) return NULL;
    a.pad = j->mask;
    a.made = made;
    y = stx__comp_zero(x, stx_attention(x, &a, &d), j->pad);
    if (!j->ahead) return y;
    /* STX_COMP_LITERAL_MASK: padding sees all of the memory; without memory, all keys equally */
    a.pad = j->ahead;
    a.made = NULL;
    if (!(j->n + j->c)) {
        a.pe = a.u = a.vb = NULL;
        a.pad = NULL;
        d.not_causal = 1;
        a.q = stx_new(x, q->dim[0], q->dim[1], q->dim[2], 0);
        if (a.q) STX_RUN(x, stx_fill, (x, a.q->data, a.q->size, 0));
    }
    return stx_add(x, y, stx__comp_zero(x, stx_attention(x, &a, &d), j->unpad));
}

/* Attention of the queries of s, constants, over rows of keys and values without order: both of the aux loss. rows 0: all of kv, else, of
   a constant kv, so many from `first` on */
static stx_tensor *stx__comp_look(const stx_comp *m, const stx__comp_qkv *s, stx_tensor *kv,
                                  size_t first, size_t rows, const stx_ids *pad, double dropout) {
    stx_attention_in a;
    stx_attention_desc d;
    memset(&a, 0, sizeof a);
    memset(&d, 0, sizeof d);
    a.q = stx_detach(m->ctx, s->q);
    a.qkv = stx_detach(m->ctx, s->qkv);
    a.kv = kv;
    a.kv_first = first;
    a.kv_rows = rows;
    a.pad = pad;
    d.heads = m->desc.heads;
    d.not_causal = 1;
    d.dropout = dropout;
    return stx_attention(m->ctx, &a, &d);
}

/* The aux loss (1) of the new compressed rows. s: of this call's attention. rows: what the segment leaves; old: what falls out */
static stx_tensor *stx__comp_aux(stx_ctx *x, const stx__comp_job *j, const stx__comp_qkv *s,
                                 stx_tensor *rows, const stx_past *old, stx_tensor *comp,
                                 stx_tensor **ratio) {
    STX__FP_SCOPE;
    const stx_comp *m = j->m;
    const stx_comp_desc *d = &m->desc;
    const stx_comp_layer *p = &m->layer[j->l];
    stx_tensor *wkv = stx_detach(x, p->wkv), *target, *k, *all = s->qkv ? s->past : s->kv;
    const int whole = (d->literal & STX_COMP_LITERAL_TARGET) != 0;
    size_t held = j->n + (d->recurrence == STX_COMP_ERNIE ? 0 : j->T);
    size_t in = whole ? j->n : STX_MIN(j->e, held), some = 0;
    const stx_ids *pad = j->old_pad;
    if (d->aux == STX_COMP_AUX_AUTOENCODE) {
        stx_comp_groups g = j->groups;
        g.pad = NULL;
        target = stx_new(x, j->B, j->e, d->dim, 0);
        if (target)
            STX_RUN(x, stx_copy2d,
                    (x, target->data, j->e * d->dim, old->data, old->stride, j->B, j->e * d->dim,
                     0));
        return stx__comp_distance(
            x, stx__comp_folded(x, stx_linear(x, comp, p->decoder, NULL, STX_ACT_NONE), &g), target,
            j->skip, STX_MAX(j->count, 1), ratio);
    }
    if (whole && j->mask && !(d->literal & STX_COMP_LITERAL_MASK)) {
        int32_t *v = (int32_t *)stx_step_alloc(x, stx_bytes_of(j->B, in, sizeof *v));
        size_t b;
        for (b = 0; v && b < j->B; b++)
            memcpy(v + b * in, j->mask->data + b * j->mask->T + j->c, in * sizeof *v);
        pad = stx__comp_ids(x, v, j->B, in);
    }
    if (all && j->c + in <= all->dim[1] && (whole || in == j->e)) { /* where they stand */
        target = stx_detach(x, all);
        some = in;
    } else
        target = stx__comp_kv_rows(x, s, j->c, j->c + in);
    if (!whole && in < j->e) { /* outputs of this segment, which were not keys in it */
        k = stx__comp_read(m, j->l, stx__comp_cut(x, rows, 0, j->e - in), 1);
        target = stx__comp_join(x, target,
                                stx__comp_all_heads(x, d,
                                                    stx_linear(x, k, wkv, NULL, STX_ACT_NONE)));
    }
    k = stx__comp_all_heads(x, d,
                            stx_linear(x, stx__comp_read(m, j->l, comp, 1), wkv, NULL,
                                       STX_ACT_NONE));
    return stx__comp_distance(x, stx__comp_look(m, s, k, 0, 0, j->comp_pad, d->aux_dropout),
                              stx_detach(x, stx__comp_look(m, s, target, some ? j->c : 0, some, pad,
                                                           0)),
                              j->skip, STX_MAX(j->count, 1), ratio);
}

/* One layer: in[0] = x (B,T,D), in[1] = h, what its attention reads (B,T,D), then past (B,c+n,D), source and usage where there are any.
   out: aux, or usage; ratio, or source; the new compressed rows. What is stored is read from the results alone: this may run twice. */
static stx_tensor *stx__comp_layer(stx_ctx *x, void *user, stx_tensor **in, stx_tensor **out) {
    const stx__comp_job *j = (const stx__comp_job *)user;
    stx_comp *m = j->m;
    const stx_comp_desc *d = &m->desc;
    stx_tensor *h = in[1], *past = j->past ? in[j->past] : NULL, *y, *rows, *src, *again = NULL;
    stx_past old;
    stx__comp_qkv s;
    stx_attention_args *made;
    size_t i, at = 0, mine;
    /* source may hold more, older ones: of streams that were reset or have left the batch since */
    for (i = 0; i < j->made; i++) at += stx__comp_source(m, j->groups_of[i]);
    at = j->made && in[j->source] ? in[j->source]->dim[1] - at : 0;
    for (i = 0; i < j->made;
         i++) { /* the newest compressed rows once more, with the weights of now */
        size_t n = stx__comp_source(m, j->groups_of[i]);
        again = stx__comp_join(x, again,
                               stx__comp_convolve(x, m, j->l,
                                                  stx__comp_cut(x, in[j->source], at, at + n),
                                                  j->groups_of[i]));
        at += n;
    }
    if (again) {
        mine = STX_MIN(again->dim[1], j->c);
        again = stx__comp_cut(x, again, again->dim[1] - mine, again->dim[1]);
        src = stx__comp_join(x, stx__comp_cut(x, past, 0, j->c - mine), again);
        src = stx__comp_join(x, src, stx__comp_cut(x, past, j->c, j->c + j->n));
    } else
        src = past;
    s = stx__comp_project(x, j, stx__comp_read(m, j->l, src, 0), h);
    y = stx__comp_after(m, j->l, in[0], stx__comp_attend(x, j, &s, &made));
    if (!y || (!j->e && !(j->push && j->C && d->compress == STX_COMP_USED))) return y;
    if (d->compress == STX_COMP_USED) {
        out[0] = stx__comp_used(x, j, j->usage ? in[j->usage] : NULL, made);
        if (!j->e || !out[0]) return y;
    }
    rows = stx_detach(x, d->recurrence == STX_COMP_ERNIE ? y : h);
    rows = stx__comp_zero(x, rows, d->literal & STX_COMP_LITERAL_MASK ? NULL : j->pad);
    memset(&old, 0, sizeof old);
    if (past) {
        old.data = stx_at(x, past->data, j->c * d->dim);
        old.stride = (j->c + j->n) * d->dim;
    }
    old = stx__comp_old(x, j, old, rows);
    out[2] = stx__comp_compress(x, j, &old, out[0], &src);
    if (d->aux == STX_COMP_AUX_BPTT)
        out[1] = src;
    else if (j->aux)
        out[0] = stx__comp_aux(x, j, &s, rows, &old, out[2], &out[1]);
    return y;
}

// >>forward

STX_DEF stx_tensor *stx_comp_segment(stx_comp *m, stx_tensor *h, const stx_ids *pad,
                                     const stx_comp_state *in, stx_comp_state *out) {
    stx_ctx *x = m ? m->ctx : NULL;
    const stx_comp_desc *d;
    size_t l, B, T, tot;
    int push, turned = 0;
    if (!stx_ok(x) || !h) return NULL;
    d = &m->desc;
    B = h->dim[0];
    T = h->ndim == 3 ? h->dim[1] : 0;
    if (!T || T > d->segment || h->dim[2] != d->dim || (pad && (pad->B != B || pad->T != T))) {
        stx_fail(
            x, STX_ERR_SHAPE,
            "stx_comp_segment: %zu rows of %zu steps, %zu wide%s: want (B,T,%zu), T at most segment (%zu)%s",
            B, T, h->ndim == 3 ? h->dim[2] : 0, pad ? " with padding" : "", d->dim, d->segment,
            pad ? ", and padding (B,T)" : "");
        return NULL;
    }
    if ((in && in->model != m) || (out && out->model != m)) {
        stx_fail(
            x, STX_ERR_ARG,
            "stx_comp_segment: a memory of another model: want one by stx_comp_state_create of this one");
        return NULL;
    }
    if ((in && in->B != B) || (out && out->B != B)) {
        stx_fail(
            x, STX_ERR_SHAPE,
            "stx_comp_segment: %zu rows with a memory of %zu streams: want a state with B = %zu", B,
            in && in->B != B ? in->B : out->B, B);
        return NULL;
    }
    memset(m->aux, 0, 2 * d->layers * sizeof *m->aux);
    push = T == d->segment && out;
    if (out && out != in) {
        if (!in)
            stx_comp_state_reset(out);
        else if (!stx_comp_state_copy(out, 0, in, 0, B))
            return NULL;
        if (in) in = out;
    }
    if (in && d->recurrence == STX_COMP_ROTATE) {
        if (out)
            stx__comp_rotate(out);
        else
            turned = 1;
    }
    tot = stx__comp_filled(m, in);
    for (l = 0; l < d->layers && h; l++) {
        const stx_comp_layer *p = &m->layer[l];
        stx__comp_job *j = (stx__comp_job *)stx_step_alloc(x, sizeof *j);
        stx_tensor *lay[5], *made[3] = {NULL, NULL, NULL}, *y, *t;
        size_t from = turned && p->memory ? stx__comp_next(m, l) : l;
        int count = 2;
        if (!j || !stx__comp_plan(m, l, in ? in : out, from, B, T, pad, push, j)) return NULL;
        j->tot = tot;
        lay[0] = h;
        lay[1] = d->norm_after ? h : stx_layernorm(x, h, p->attn_gain, p->attn_shift, 1e-5);
        if (j->n + j->c) lay[j->past = count++] = stx__comp_remembered(in, from);
        if (j->made) lay[j->source = count++] = stx_rows_read(in->source, from, SIZE_MAX);
        if (j->n && j->C && in->usage)
            lay[j->usage = count++] = stx_rows_read(in->usage, from, j->n);
        if (!stx_ok(x)) return NULL;
        if ((d->literal & STX_COMP_LITERAL_FREEZE) && j->aux) m->layer[l].frozen = 1;
        j->frozen = m->layer[l].frozen;
        y = d->layers - l <= d->recompute_layers
                ? stx_recompute(x, stx__comp_layer, j, lay, count, made, 3)
                : stx__comp_layer(x, j, lay, made);
        if (!y) return NULL;
        if (j->aux) {
            m->aux[l] = stx_ranks(x) > 1 ? stx_scale_by(x, made[0], stx_group_part(x, j->count))
                                         : made[0];
            m->ratio[l] = made[1];
        }
        if (push && p->memory) {
            t = stx_detach(x, d->recurrence == STX_COMP_ERNIE ? y : lay[1]);
            t = stx__comp_zero(x, t, d->literal & STX_COMP_LITERAL_MASK ? NULL : pad);
            if (!stx__comp_push(out, j, t, made[2], made[1],
                                d->compress == STX_COMP_USED ? made[0] : NULL))
                return NULL;
        }
        h = y;
    }
    if (push) stx__comp_count_rows(out);
    return d->final_norm ? stx_layernorm(x, h, m->final_gain, m->final_shift, 1e-5) : h;
}

/* 1 and no error when the model has words */
static int stx__comp_worded(const stx_comp *m, const char *op) {
    if (!m || !stx_ok(m->ctx)) return 0;
    if (!m->words)
        stx_fail(m->ctx, STX_ERR_ARG,
                 "%s: the model has no words: make it with vocab, or use stx_comp_segment", op);
    return m->words != NULL;
}

/* What the words' output reads, E wide */
static stx_tensor *stx__comp_out(const stx_comp *m, stx_tensor *h) {
    return m->out_w ? stx_linear(m->ctx, h, m->out_w, m->out_b, STX_ACT_NONE) : h;
}

STX_DEF stx_tensor *stx_comp_embed(stx_comp *m, const stx_ids *ids) {
    stx_tensor *h;
    if (!stx__comp_worded(m, "stx_comp_embed")) return NULL;
    h = stx_words_embed(m->words, ids);
    return m->in_w ? stx_linear(m->ctx, h, m->in_w, m->in_b, STX_ACT_NONE) : h;
}

STX_DEF stx_tensor *stx_comp_forward(stx_comp *m, const stx_ids *ids, const stx_ids *pad,
                                     const stx_comp_state *in, stx_comp_state *out) {
    return stx_comp_segment(m, stx_comp_embed(m, ids), pad, in, out);
}

STX_DEF stx_tensor *stx_comp_logits(stx_comp *m, stx_tensor *h) {
    return stx__comp_worded(m, "stx_comp_logits") ? stx_words_logits(m->words, stx__comp_out(m, h))
                                                  : NULL;
}

STX_DEF stx_tensor *stx_comp_log_probs(stx_comp *m, stx_tensor *h) {
    return stx__comp_worded(m, "stx_comp_log_probs")
               ? stx_words_log_probs(m->words, stx__comp_out(m, h))
               : NULL;
}

/* What targets are there that do not count: 0 none, 1 some that are -1, 2 others too */
static int stx__comp_ignored(const stx_ids *targets) {
    size_t i;
    int kind = 0;
    for (i = 0; targets && i < targets->B * targets->T; i++)
        if (targets->data[i] < 0) kind = STX_MAX(kind, targets->data[i] == -1 ? 1 : 2);
    return kind;
}

STX_DEF stx_tensor *stx_comp_nll(stx_comp *m, stx_tensor *h, const stx_ids *targets,
                                 const stx_ids *pad) {
    stx_token_loss how;
    stx_ctx *x;
    int kind;
    if (!stx__comp_worded(m, "stx_comp_nll") || !h || !targets) return NULL;
    x = m->ctx;
    if (m->desc.literal & STX_COMP_LITERAL_MASK) pad = NULL;
    if (pad && (pad->B != targets->B || pad->T != targets->T)) {
        stx_fail(x, STX_ERR_SHAPE,
                 "stx_comp_nll: padding (%zu,%zu), want that of the targets, (%zu,%zu)", pad->B,
                 pad->T, targets->B, targets->T);
        return NULL;
    }
    h = stx__comp_out(m, h);
    kind = stx__comp_ignored(targets);
    if (!kind && !pad && (stx_ranks(x) < 2 || !stx_training(x)))
        return stx_words_loss(m->words, h, targets, NULL);
    /* (in a group the other ranks may have such targets: all make the mean of those that count) */
    memset(&how, 0, sizeof how);
    how.ignore = how.mean = 1;
    how.ignored = -1;
    if (pad || kind == 2) {
        size_t i, n = targets->B * targets->T;
        int32_t *v = (int32_t *)stx_step_alloc(x, stx_bytes_of(n, sizeof *v, 1));
        for (i = 0; v && i < n; i++)
            v[i] = targets->data[i] < 0 || (pad && pad->data[i]) ? -1 : targets->data[i];
        targets = v ? stx_tokens(x, v, targets->B, targets->T) : NULL;
    }
    return stx_words_loss(m->words, h, targets, &how);
}

STX_DEF stx_tensor *stx_comp_loss(stx_comp *m, const stx_ids *ids, const stx_ids *targets,
                                  const stx_ids *pad, const stx_comp_state *in,
                                  stx_comp_state *out) {
    return stx_comp_nll(m, stx_comp_forward(m, ids, pad, in, out), targets, pad);
}

/* y + w / A times the sum of the aux losses of the last forward */
static stx_tensor *stx__comp_plus_aux(stx_comp *m, stx_tensor *y) {
    STX__FP_SCOPE;
    size_t l, n = 0;
    stx_tensor **aux;

    aux = (stx_tensor **)stx_step_alloc(m->ctx, stx_bytes_of(m->desc.layers, sizeof *aux, 1));

    for (l = 0; aux && l < m->desc.layers; l++)
        if (m->aux[l]) aux[n++] = m->aux[l];
    return n ? stx_add_means(m->ctx, y, aux, n, m->desc.aux_weight / (double)m->A) : y;
}

STX_DEF stx_tensor *stx_comp_aux(stx_comp *m) {
    stx_tensor *zero;

    if (!m) return NULL;
    zero = stx_new_full(m->ctx, 1, 0, 0, 0);
    if (!zero) return NULL;
    STX_RUN(m->ctx, stx_fill, (m->ctx, zero->data, 1, 0));
    return stx__comp_plus_aux(m, zero);
}

STX_DEF stx_tensor *stx_comp_total(stx_comp *m, stx_tensor *nll) {
    return m && nll ? stx__comp_plus_aux(m, nll) : nll;
}

STX_DEF uint64_t stx_comp_key(const stx_comp *m, const stx_ids *ids, const stx_ids *targets,
                              const stx_comp_state *s, uint64_t salt) {
    uint64_t h = stx_step_key(m, ids, targets, salt);
    stx_rows *part[4];
    const char *name[4];
    size_t b;
    int i, n;
    if (!m || !stx_ok(m->ctx)) return h;
    h = stx_words_key(m->words, stx_key_add(h, m->desc.recompute_layers), ids, targets, NULL);
    h = stx_key_add(h, (uint64_t)stx__comp_ignored(targets));
    for (i = 0, n = s ? stx__comp_parts(s, part, name) : 0; i < n; i++)
        h = stx_rows_key(part[i], h);
    for (b = 0; s && b < s->B; b++) h = stx_key_add(h, s->seen[b]);
    for (b = 0; (m->desc.literal & STX_COMP_LITERAL_FREEZE) && b < m->desc.layers; b++)
        h = stx_key_add(h, (uint64_t)m->layer[b].frozen);
    return h;
}

// >>generation

STX_DEF stx_comp_gen *stx_comp_gen_create_sized(stx_comp *m, size_t B, const size_t *mems,
                                                const size_t *cmems) {
    stx_ctx *x = m ? m->ctx : NULL;
    stx_comp_gen *g;
    size_t l, L, S, D;
    if (!stx_ok(x)) return NULL;
    if (!B) {
        stx_fail(x, STX_ERR_ARG, "stx_comp_gen_create: no streams, want B >= 1");
        return NULL;
    }
    L = m->desc.layers;
    S = m->desc.segment;
    D = m->desc.dim;
    g = (stx_comp_gen *)stx_block(x, sizeof *g);
    if (!g) return NULL;
    g->model = m;
    g->B = B;
    g->stale = 1;
    g->state = stx_comp_state_create_sized(m, B, mems, cmems);
    g->cache = stx_cache_create(x, L, B, m->words ? m->desc.vocab : 1);
    g->rows = (stx_real **)stx_block(x, stx_bytes_of(3 * L, sizeof *g->rows, 1));
    g->pad = (int32_t *)stx_block(x, stx_bytes_of(B, S, sizeof *g->pad));
    if (!stx_ok(x)) {
        stx_comp_gen_free(g);
        return NULL;
    }
    g->usage = g->rows + L;
    g->pe = g->usage + L;
    g->reach = stx__comp_reach(m, g->state->M, g->state->C);
    for (l = 0; l < L; l++) {
        size_t M = g->state->M[l], C = g->state->C[l];
        stx_cache_window(g->cache, l, C + M + S, D, 1);
        if (m->layer[l].memory) g->rows[l] = stx_block_numbers(x, stx_bytes_of(B, S, D));
        if (g->state->usage && M && C) g->usage[l] = stx_block_full(x, stx_bytes_of(B, M, 2));
        if (m->sines
            || (!l && !(m->desc.literal & STX_COMP_LITERAL_ROWS) && g->reach > m->key_pe->dim[0]))
            g->pe[l] = stx_block_numbers(x, stx_bytes_of(g->reach, D, 1));
    }
    if (stx_ok(x)) return g;
    stx_comp_gen_free(g);
    return NULL;
}

STX_DEF stx_comp_gen *stx_comp_gen_create(stx_comp *m, size_t B) {
    return stx_comp_gen_create_sized(m, B, NULL, NULL);
}

STX_DEF void stx_comp_gen_free(stx_comp_gen *g) {
    stx_ctx *x = g ? g->model->ctx : NULL;
    size_t l;
    if (!g) return;
    for (l = 0; g->rows && l < 3 * g->model->desc.layers; l++)
        stx_block_numbers_free(x, g->rows[l]);
    stx_block_free(x, g->rows);
    stx_block_free(x, g->pad);
    stx_cache_free(g->cache);
    stx_comp_state_free(g->state);
    stx_block_free(x, g);
}

/* A segment begins, after whatever the state holds */
static void stx__comp_gen_begin(stx_comp_gen *g, int stale) {
    g->at = 0;
    g->masked = 0;
    g->stale |= stale;
    memset(g->pad, 0, g->B * g->model->desc.segment * sizeof *g->pad);
}

STX_DEF void stx_comp_gen_reset(stx_comp_gen *g) {
    if (!g || !stx_ok(g->model->ctx)) return;
    stx_comp_state_reset(g->state);
    stx__comp_gen_begin(g, 1);
}

STX_DEF void stx_comp_gen_reset_stream(stx_comp_gen *g, size_t b) {
    stx_ctx *x = g ? g->model->ctx : NULL;
    const size_t S = g ? g->model->desc.segment : 0;
    size_t l, i;
    if (!stx_ok(x)) return;
    stx_comp_state_reset_stream(g->state, b);
    if (!stx_ok(x)) return;
    for (i = 0; i < g->at; i++) g->pad[b * S + i] = g->masked = 1;
    for (l = 0; l < g->model->desc.layers; l++) {
        const size_t M = g->state->M[l];
        if (g->usage[l]) STX_RUN(x, stx_fill, (x, g->usage[l] + 2 * b * M, 2 * M, 0));
    }
}

STX_DEF int stx_comp_gen_set(stx_comp_gen *g, const stx_comp_state *from) {
    if (!g || !stx_ok(g->model->ctx)) return 0;
    if (from && from->model == g->model && from->B != g->B) {
        stx_fail(g->model->ctx, STX_ERR_SHAPE,
                 "stx_comp_gen_set: a memory of %zu streams, want %zu", from->B, g->B);
        return 0;
    }
    if (!stx_comp_state_copy(g->state, 0, from, 0, g->B)) return 0;
    stx__comp_gen_begin(g, 1);
    return 1;
}

/* n rows of `from` (B,.,width), from row r0 of each stream on, become rows [r1, r1 + n) of `to`; rows: how many each of the two has */
static void stx__comp_rows_to(stx_ctx *x, stx_real *to, size_t rows1, size_t r1,
                              const stx_real *from, size_t rows0, size_t r0, size_t n, size_t B,
                              size_t width) {
    to = stx_at(x, to, r1 * width);
    from = stx_at(x, from, r0 * width);
    if (n) STX_RUN(x, stx_copy2d, (x, to, rows1 * width, from, rows0 * width, B, n * width, 0));
}

static stx_tensor *stx__comp_gen_kv(stx_comp_gen *g, size_t l, stx_tensor *rows) {
    stx_comp *m = g->model;
    return stx__comp_all_heads(m->ctx, &m->desc,
                               stx_linear(m->ctx, rows, m->layer[l].wkv, NULL, STX_ACT_NONE));
}

/* Keys and values of all that the state holds, positions, and usage as it stands there */
static int stx__comp_gen_fill(stx_comp_gen *g) {
    stx_comp *m = g->model;
    stx_ctx *x = m->ctx;
    const size_t D = m->desc.dim, B = g->B;
    size_t l;
    for (l = 0; l < m->desc.layers; l++) {
        stx_cache_layer *y = &g->cache->layer[l];
        size_t n = g->state->mem->layer[l].real, c = g->state->comp->layer[l].real;
        stx_tensor *t = stx__comp_remembered(g->state, l), *kv;
        y->len = 0;
        if (t) {
            kv = stx__comp_gen_kv(g, l, stx__comp_read(m, l, t, 1));
            if (!kv) return 0;
            stx__comp_rows_to(x, y->k, y->capacity, 0, kv->data, n + c, 0, n + c, B, 2 * D);
            y->len = n + c;
        }
        if (g->usage[l]) {
            t = stx_rows_read(g->state->usage, l, n);
            STX_RUN(x, stx_fill, (x, g->usage[l], 2 * B * g->state->M[l], 0));
            if (t) stx__comp_rows_to(x, g->usage[l], g->state->M[l], 0, t->data, n, 0, n, B, 2);
        }
        if (!g->pe[l]) continue;
        t = m->sines ? stx_linear(x,
                                  stx_view_rows(x, m->sines, m->sines->dim[0] - g->reach,
                                                m->sines->dim[0]),
                                  m->layer[l].wr, NULL, STX_ACT_NONE)
                     : stx__comp_table(m, g->reach);
        if (!t) return 0;
        STX_RUN(x, stx_copy2d, (x, g->pe[l], D, t->data, D, g->reach, D, 0));
    }
    g->stale = 0;
    return stx_ok(x);
}

static stx_tensor *stx__comp_gen_positions(stx_comp_gen *g, size_t l) {
    const stx_comp *m = g->model;
    const stx_real *pe = m->sines ? g->pe[l] : g->pe[0];
    stx_tensor *t;
    if (m->desc.literal & STX_COMP_LITERAL_ROWS)
        return stx_view_rows(m->ctx, m->key_pe, 0, stx__comp_filled(m, g->state));
    if (!pe) return m->key_pe;
    t = stx_new(m->ctx, 1, m->desc.dim, 0, 0);
    if (!t) return NULL;
    t->data = (stx_real *)(uintptr_t)pe;
    t->dim[0] = g->reach;
    t->size = g->reach * m->desc.dim;
    return t;
}

/* A full segment: memory moves on, and with it the keys and values that are known already */
static int stx__comp_gen_move(stx_comp_gen *g) {
    stx_comp *m = g->model;
    stx_ctx *x = m->ctx;
    const stx_comp_desc *d = &m->desc;
    const size_t S = d->segment, D = d->dim, B = g->B;
    const stx_ids *pad = g->masked ? stx_tokens(x, g->pad, B, S) : NULL;
    size_t l;
    for (l = 0; l < d->layers; l++) {
        stx_cache_layer *y = &g->cache->layer[l];
        stx_tensor *rows, *usage = NULL, *comp = NULL, *source = NULL, *kv, *t;
        stx__comp_job j;
        stx_past old;
        size_t n1, c1, own, kept, ckept, cnew;
        if (!m->layer[l].memory) {
            y->len = 0;
            continue;
        }
        if (!stx__comp_plan(m, l, g->state, l, B, S, pad, 1, &j)) return 0;
        rows = stx_new(x, B, S, D, 0);
        if (!rows) return 0;
        stx__comp_rows_to(x, rows->data, S, 0, g->rows[l], S, 0, S, B, D);
        rows = stx__comp_zero(x, rows, pad);
        if (g->state->usage && j.C) {
            t = j.n ? stx_new_full(x, B, j.n, 2, 0) : NULL;
            if (t) stx__comp_rows_to(x, t->data, j.n, 0, g->usage[l], j.M, 0, j.n, B, 2);
            usage = stx__comp_used(x, &j, t, NULL);
        }
        if (j.e) {
            old.data = g->state->mem->layer[l].data;
            old.stride = g->state->mem->layer[l].stride;
            old = stx__comp_old(x, &j, old, rows);
            comp = stx__comp_compress(x, &j, &old, usage, &source);
            if (!comp) return 0;
        }
        own = STX_MIN(j.M, S);
        kept = STX_MIN(j.n, j.M - own);
        n1 = kept + own;
        cnew = STX_MIN(j.G, j.C);
        ckept = STX_MIN(j.c, j.C - cnew);
        c1 = ckept + cnew;
        if (!stx__comp_push(g->state, &j, rows, comp, source, usage)) return 0;
        if (g->usage[l]) {
            STX_RUN(x, stx_fill, (x, g->usage[l], 2 * B * j.M, 0));
            stx__comp_rows_to(x, g->usage[l], j.M, 0, usage->data, j.n + S, j.n + S - n1, n1, B, 2);
        }
        if (d->recurrence == STX_COMP_ROTATE) continue;
        if (n1 + c1 == 0) {
            y->len = 0;
            continue;
        }
        kv = stx_new(x, B, c1 + n1, 2 * D, 0);
        if (!kv) return 0;
        stx__comp_rows_to(x, kv->data, c1 + n1, 0, y->k, y->capacity, j.c - ckept, ckept, B, 2 * D);
        if (cnew) {
            t = stx__comp_gen_kv(g, l,
                                 stx__comp_read(m, l, stx__comp_cut(x, comp, j.G - cnew, j.G), 1));
            if (!t) return 0;
            stx__comp_rows_to(x, kv->data, c1 + n1, ckept, t->data, cnew, 0, cnew, B, 2 * D);
        }
        if (d->recurrence == STX_COMP_ERNIE
            && own) { /* what is remembered was no key of this segment */
            t = stx__comp_gen_kv(g, l, stx__comp_read(m, l, stx__comp_cut(x, rows, S - own, S), 1));
            if (!t) return 0;
            stx__comp_rows_to(x, kv->data, c1 + n1, c1 + kept, t->data, own, 0, own, B, 2 * D);
            stx__comp_rows_to(x, kv->data, c1 + n1, c1, y->k, y->capacity, j.c + j.n - kept, kept,
                              B, 2 * D);
        } else
            stx__comp_rows_to(x, kv->data, c1 + n1, c1, y->k, y->capacity, j.c + j.n + S - n1, n1,
                              B, 2 * D);
        stx__comp_rows_to(x, y->k, y->capacity, 0, kv->data, c1 + n1, 0, c1 + n1, B, 2 * D);
        y->len = c1 + n1;
    }
    stx__comp_count_rows(g->state);
    if (!stx_ok(x)) return 0;
    stx__comp_gen_begin(g, 0);
    return 1;
}

/* t steps (B,t,D) that stay in the segment */
static stx_tensor *stx__comp_gen_part(stx_comp_gen *g, stx_tensor *h) {
    stx_comp *m = g->model;
    stx_ctx *x = m->ctx;
    const stx_comp_desc *d = &m->desc;
    const size_t S = d->segment, D = d->dim, B = g->B, t = h->dim[1], len = g->at + t;
    const stx_ids *pad = NULL;
    size_t l, b;
    if (!g->at && d->recurrence == STX_COMP_ROTATE) {
        stx__comp_rotate(g->state);
        g->stale = 1;
    }
    if (g->stale && !stx__comp_gen_fill(g)) return NULL;
    if (g->masked) {
        int32_t *v = (int32_t *)stx_step_alloc(x, stx_bytes_of(B, len, sizeof *v));
        if (!v) return NULL;
        for (b = 0; b < B; b++) memcpy(v + b * len, g->pad + b * S, len * sizeof *v);
        pad = stx_tokens(x, v, B, len);
    }
    for (l = 0; l < d->layers && h; l++) {
        const stx_comp_layer *p = &m->layer[l];
        size_t n = p->memory ? g->state->mem->layer[l].real : 0,
               c = p->memory ? g->state->comp->layer[l].real : 0;
        stx_tensor *r = d->norm_after ? h : stx_layernorm(x, h, p->attn_gain, p->attn_shift, 1e-5);
        stx_attention_args *made = NULL;
        stx_attention_in a;
        stx_attention_desc ad;
        stx__comp_attention(m, l, &a, &ad);
        a.q = stx_linear(x, r, p->wq, NULL, STX_ACT_NONE);
        a.kv = stx__comp_gen_kv(g, l, r);
        a.pe = stx__comp_gen_positions(g, l);
        a.pad = !n && !c ? pad
                         : stx_rows_mask(g->state->comp, l, c,
                                         stx_rows_mask(g->state->mem, l, n, pad, len), n + len);
        a.made = &made;
        h = stx__comp_after(m, l, h, a.pe ? stx_cache_attention(g->cache, l, &a, &ad) : NULL);
        if (!h) return NULL;
        if (g->usage[l] && n)
            STX_RUN(x, stx_comp_usage, (x, g->usage[l], 2 * g->state->M[l], made, c, n));
        if (p->memory)
            stx__comp_rows_to(x, g->rows[l], S, g->at,
                              (d->recurrence == STX_COMP_ERNIE ? h : r)->data, t, 0, t, B, D);
    }
    g->at = len;
    if (len == S && !stx__comp_gen_move(g)) return NULL;
    return d->final_norm ? stx_layernorm(x, h, m->final_gain, m->final_shift, 1e-5) : h;
}

STX_DEF stx_tensor *stx_comp_gen_step(stx_comp_gen *g, stx_tensor *h) {
    stx_ctx *x = g ? g->model->ctx : NULL;
    stx_tensor *y = NULL;
    size_t at, t, T;
    if (!stx_ok(x) || !h) return NULL;
    T = h->ndim == 3 ? h->dim[1] : 0;
    if (!T || h->dim[0] != g->B || h->dim[2] != g->model->desc.dim || stx_training(x)) {
        stx_fail(
            x, STX_ERR_SHAPE,
            "stx_comp_gen_step: %zu streams of %zu steps%s: want (%zu,t,%zu) after stx_begin(x, STX_EVAL)",
            h->dim[0], T, stx_training(x) ? " in training" : "", g->B, g->model->desc.dim);
        return NULL;
    }
    for (at = 0; at < T; at += t) {
        t = STX_MIN(STX_MIN(T - at, g->cache->chunk), g->model->desc.segment - g->at);
        y = stx__comp_join(x, y, stx__comp_gen_part(g, stx__comp_cut(x, h, at, at + t)));
        if (!stx_ok(x)) return NULL;
    }
    return y;
}

static stx_tensor *stx__comp_gen_feed(void *user, const stx_ids *ids) {
    stx_comp_gen *g = (stx_comp_gen *)user;
    stx_tensor *h = stx_comp_gen_step(g, stx_comp_embed(g->model, ids));
    return h ? stx__comp_out(g->model, h) : NULL;
}

STX_DEF const stx_real *stx_comp_gen_feed(stx_comp_gen *g, const int32_t *ids, size_t n) {
    if (!g || !stx__comp_worded(g->model, "stx_comp_gen_feed")) return NULL;
    return stx_cache_feed(g->cache, g->model->words, ids, n, 1, stx__comp_gen_feed, g);
}

// >>model: for programs of any family

static stx_tensor *stx__comp_lm_loss(void *m, const stx_ids *ids, const stx_ids *targets,
                                     const void *in, void *out) {
    return stx_comp_loss((stx_comp *)m, ids, targets, NULL, (const stx_comp_state *)in,
                         (stx_comp_state *)out);
}

static stx_tensor *stx__comp_lm_total(void *m, stx_tensor *nll) {
    return stx_comp_total((stx_comp *)m, nll);
}

static void stx__comp_lm_updated(void *m) {
    (void)m;
}

static size_t stx__comp_lm_recompute(void *m, size_t n) {
    stx_comp_desc *d = &((stx_comp *)m)->desc;
    d->recompute = n >= d->layers;
    return d->recompute_layers = STX_MIN(n, d->layers);
}

static uint64_t stx__comp_lm_key(const void *m, const stx_ids *ids, const stx_ids *targets,
                                 const void *s, uint64_t salt) {
    return stx_comp_key((const stx_comp *)m, ids, targets, (const stx_comp_state *)s, salt);
}

static int stx__comp_lm_no_window(stx_comp *m, size_t window) {
    if (m && window)
        stx_fail(m->ctx, STX_ERR_ARG,
                 "stx_comp_lm: a window of %zu, want 0: the memory's sizes are M and C", window);
    return !window;
}

static void *stx__comp_lm_state_create(void *m, size_t B, size_t window) {
    return stx__comp_lm_no_window((stx_comp *)m, window) ? stx_comp_state_create((stx_comp *)m, B)
                                                         : NULL;
}

static void *stx__comp_lm_gen_create(void *m, size_t B, size_t window) {
    return stx__comp_lm_no_window((stx_comp *)m, window) ? stx_comp_gen_create((stx_comp *)m, B)
                                                         : NULL;
}
STX_LM_STATES(comp)

STX_DEF stx_lm stx_comp_lm(stx_comp *m) {
    stx_lm lm;
    memset(&lm, 0, sizeof lm);
    if (!m || !m->words) return lm;
    lm.model = m;
    lm.ctx = m->ctx;
    lm.params = m->params;
    lm.words = m->words;
    lm.loss = stx__comp_lm_loss;
    lm.total = stx__comp_lm_total;
    lm.updated = stx__comp_lm_updated;
    lm.recompute = stx__comp_lm_recompute;
    lm.key = stx__comp_lm_key;
    lm.state_create = stx__comp_lm_state_create;
    lm.gen_create = stx__comp_lm_gen_create;
    stx__comp_lm_states(&lm);
    return lm;
}

STX_STRICT_OFF
#endif /* SEQTX_COMPRESSIVE_IMPLEMENTATION */

#define STX__LETTERS 2
#include "seqtx.h"
