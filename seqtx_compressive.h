/* seqtx_compressive.h - v0.2 - Compressive Transformer, with GTrXL's gates
   no warranty implied; MIT or public domain, your choice (see the end of seqtx.h)

   In ONE .c or .cpp file:                everywhere else:
       #define SEQTX_IMPLEMENTATION           #include "seqtx_compressive.h"
       #include "seqtx_compressive.h"

   Needs seqtx.h in the same directory. Compile with -O2 and link with -lm (and with
   -pthread if glibc is older than 2.34). If another file already implements seqtx.h,
   define SEQTX_COMPRESSIVE_IMPLEMENTATION instead, which compiles only the implementation
   in this header.

   Contents: a Transformer that reads text segment by segment. A memory layer keeps one
   vector, called a row, for each of the most recent tokens. Rows that the memory evicts
   are compressed, r rows into one, and the compressed rows are kept for longer.
   Options: six ways to compress and those of your program, three ways to train the
   compression, two kinds of positions and seven gates.


   MANUAL

   Papers
       Compressive Transformers for Long-Range
           Sequence Modelling                     Rae et al. 2019         arXiv:1911.05507
       Stabilizing Transformers for Reinforcement
           Learning (the gates)                   Parisotto et al. 2019   arXiv:1910.06764
       Do Transformers Need Deep Long-Range
           Memory?                                Rae and Razavi 2020     arXiv:2007.03356
       ERNIE-Doc (recurrence)                     Ding et al. 2020        arXiv:2012.15688

   Letters used in this file
       B  streams (rows of a batch)       S  tokens per segment
       T  tokens per stream and call      M  capacity of the memory, rows
       V  vocabulary size                 n  rows in the memory
       E  width of the embedding          C  capacity of the compressed memory, rows
       D  model dimension                 c  rows in the compressed memory
       H  heads                           r  rows that are compressed into one
       hd head dimension D / H            e  rows evicted by a full segment
       F  feed-forward size               G  new compressed rows, one per group
       L  layers                          A  layers with compressed memory
       l  a layer                         t  a tap, i.e. a row of a group
       b  a stream                        i  a query or row
       N  rows of an elementwise kernel   j  a key
       u  content bias (H,hd)             vb position bias (H,hd)
   The fields of stx_attention_args have the meanings given in seqtx.h: D is the head
   dimension, S the number of keys and N the number of persistent vectors. Outside the
   gate kernels, the context is named x and the residual stream xs. m is the model, d
   its desc and p the parameters of a layer. In kernels, c is a channel and r a row.

   The model. A layer attends to its compressed memory, its memory and its segment.

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
       with norm_after:  h = x, and x' = LN(gate(x, o)); the same in the feed-forward
       with STX_COMP_POSITIONS_XL:
                         s_ij = ((q_i + u).k_j + (q_i + vb).(Wpos sine_dist)) / sqrt(hd)

       LN uses eps = 1e-5 and the biased variance; gelu(x) = x / 2 (1 + erf(x / sqrt(2))).
       The bias u is added to every query of a head when the query is compared with keys,
       and vb when it is compared with positions.

   How rows move at the end of a full segment, with S = M = 4, C = 3 and r = 2:

               compressed memory   memory             this segment
       before  c0 c1 c2            m0 m1  m2 m3       h0 h1 h2 h3     keys of h0 .. h3
                |  |               '-.-'  '-.-'        |  |  |  |
                |  |               conv   conv         |  |  |  |     e = 4 rows leave
                v  v                 v      v          v  v  v  v     in groups of r
       after    lost    c2          c3     c4         m0 m1 m2 m3

       e = max(0, n + S - M)       G = ceil(e / r)
       comp <- last C rows of [comp ; new]      mem <- last M rows of [mem ; h]

   Memory rows are constants. They are projected with the current weights in every step
   (k = Wkv mem), so the language loss trains Wkv through them, but not the layers that
   computed them. Within the current segment, gradients flow through h. The compression
   has a separate loss, which sends no gradient to the rows it reads. A call with T < S
   leaves the memory unchanged, except that STX_COMP_STORE_ROTATE moves the memories at
   the start of every call (see Fidelity).

   Compression of the evicted rows old[0 .. e). Group g consists of rows g r .. g r + r
   - 1. The last group can be shorter; a convolution then reads zeros instead of its
   missing rows:

       conv       new_g = bias + sum_t W_t old[g r + t]      with overlap: t >= -overlap
       dilated    f is initially old, preceded by as many zero rows as the sum of all
                  dilations. Each dilation R then shortens f by R rows:
                      f[i] <- relu(K0 f[i] + K1 f[i + R])
                  new = conv of the final f, as above, without biases
       max, mean  the maximum or mean of the rows of a group, per channel
       used       keeps the ceil(e / r) rows that received the most attention, in
                  chronological order. The usage of a row is its softmax weight, averaged
                  over the heads and over all queries while the row was in the memory
       drop       discards evicted rows, as Transformer-XL does
       custom     a function of your program; see Own compression

   Compression losses (aux). Each is a mean over rows and channels, and the total loss is
   nll + aux_weight / A sum_l aux_l.

       attention  att(rows) = softmax(q (Wk rows)^T / sqrt(hd)) Wv rows, where q, Wk, Wv
                  and old are constants. There are no positions and no causal mask.
                      aux = mean (att(new) - att(old))^2
                  Attention should read the same from the new rows as from the old ones.
                  Gradients, where a = softmax(s) are the attention weights of att(new)
                  and count is the number of compared elements:
                      datt = 2 (att(new) - att(old)) / count
                      dv = a^T datt             da = datt v^T
                      ds_ij = a_ij (da_ij - sum_j a_ij da_ij)
                      dk = ds^T q / sqrt(hd)
                      dnew = dk Wk + dv Wv
                      dW_t = sum_g dnew_g old[g r + t]^T        dbias = sum_g dnew_g
       autoencode aux = mean (old - rec)^2, where rec[i] is the sum of Dec_t new_g over
                  all g and t with g r + t = i (one term without overlap)
                      dnew_g = sum_t Dec_t^T drec[g r + t];     Dec is trained too
       bptt       no separate loss. The rows evicted in the last `bptt` segments are kept
                  and compressed again with the current weights. Attention reads these
                  results instead of the stored compressed rows, so the nll of this
                  segment also trains W. The evicted rows are constants
       none       the compression weights keep their initial values

   rel_error_l = sum (target - got)^2 / sum target^2 is the relative squared error of the
   compression. target is att(old) and got is att(new); with autoencode, they are old and
   rec. An output of all zeros has a rel_error of 1.

   Why does the language loss not train the compression? A compressed row lives for
       C r / S segments, but bptt sees only one or two of them. It therefore learns to
       keep what the next segment needs, not what later ones need. In the paper, bptt is
       the worst method: 0.996 bits per character on enwik8, against 0.986 for max, 0.982
       for mean, 0.980 for used, and 0.973 for conv with the attention loss.

       Why does the compression loss not train the rest of the network? It would make
       all keys and values equal, because equal rows compress perfectly. Hence q, Wkv
       and the rows are constants in that loss, and the relative weight of the two
       losses needs no tuning.

       Why the attention loss rather than the autoencoder's? The compression only has to
       preserve what queries read, whereas an autoencoder has to preserve every element
       of a row.

       Why does a compressed row count as one step of distance? The largest distance is
       then M + C instead of M + C r.

       How far back does a model see? With STX_COMP_STORE_INPUT, memory rows are
       computed only by lower layers, so L layers reach L (M + r C) tokens back. With
       STX_COMP_STORE_OUTPUT, a layer reads the outputs that it computed in the previous
       segment, which depend on its outputs in the segment before that, so there is no
       limit.

       How many layers need a memory? Few. In a model of 24 layers, 4 memory layers,
       evenly spaced or at the top, did about as well as 24 (Rae and Razavi 2020).

       Why gates? Gates that initially pass x through unchanged (gtrxl, and others with
       a positive bias) make deep stacks trainable when reward is the only training
       signal.

   Gates. x is the residual stream and y the output of a sublayer (after a ReLU if
   gate_relu is set). w0 .. w5 and b0, b1 are the fields w and b of stx_comp_gate. sig
   is the sigmoid. In the backward formulas, g = dout and z' = z (1 - z), and dp, dz,
   dreset and dcand are the gradients with respect to the arguments of sig and tanh:

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
       gru        PyTorch's GRUCell. p0 = w0 y + b0 and p1 = w1 x + b1 have three blocks:
                  reset = sig(p0_reset + p1_reset)              z = sig(p0_z + p1_z)
                  cand = tanh(p0_cand + reset p1_cand)          out = (1 - z) cand + z x
                      dcand = g (1 - z) (1 - cand^2)         dz = g (x - cand) z (1 - z)
                      dreset = dcand p1_cand reset (1 - reset)
                      dp0 = (dreset, dz, dcand)  dp1 = (dreset, dz, reset dcand)
                      db0 = dp0                  db1 = dp1
                      dy = w0^T dp0              dx = g z + w1^T dp1
       mogrify    five alternating updates before a gru, each with the latest x and y:
                  y = 2 sig(q1 q0 x) y    x = 2 sig(r1 r0 y) x    y = ..   x = ..   y = ..
                  q1 q0 and r1 r0 have rank floor(D / 4). The gru reads the final x and y

   Worked example of the attention loss. One channel, one head, Wq = Wk = Wv = 1, r = 2,
   taps 1/2 and 1/2, no bias. Old rows 0 and ln 3; one query q = 1:

       att(old): weights 1/4, 3/4, so att(old) = 3/4 ln 3 = 0.8240
       new = ln 3 / 2 = 0.5493 = att(new)
       aux = (0.5493 - 0.8240)^2 = 0.0754        rel_error = (1/4)^2 / (3/4)^2 = 1/9
       dnew = 2 (0.5493 - 0.8240) = -0.5493 = dbias
       dW = -0.5493 (0, ln 3) = (0, -0.6035)

   Quick start. The program learns "abcabc.." and prints it. A test compiles and runs it.

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
           int failed = !stx_ok(x);
           stx_destroy(x);
           return failed;
       }
   //<quickstart

   stx_comp_save(model, path) saves the model to a file, and stx_comp_open(x, path)
   creates it again in another program. stx_comp_open also opens checkpoints of
   train_compressive; stx_vocab_open in seqtx_text.h returns their vocabulary.

   Three interfaces
       Tokens          stx_comp_loss and stx_comp_logits.
       Vectors         stx_comp_segment, for speech, agents or classification. The model
                       needs no vocab, but functions such as stx_comp_nll require one.
       Step by step    stx_comp_gen_step and _feed, for generation and for agents that
                       act. The results equal those of whole segments.
   When a new text begins in a stream, stx_comp_state_reset_stream and
   stx_comp_gen_reset_stream empty the memory of that stream.

   Padding. `pad` is nonzero where a token or a vector is padding. This is the opposite
   of the port's mask, which is true for real tokens. Generation does not support
   padding, because the streams of a batch advance together. To start with prompts of
   unequal length, align their ends: feed arbitrary tokens before the shorter prompts,
   and call stx_comp_gen_reset_stream(g, b) just before the prompt of stream b begins.

   Own compression. desc.custom points to a stx_comp_method with two functions. `weights`
   describes the parameters of a layer. `forward` computes the new rows (B,G,D) from the
   evicted rows with stx_ operators:

       size_t weights(void *user, const stx_comp_desc *d, size_t l, stx_weight *w) {
           w[0].name = "gate.weight";          // layers.<l>.compress.gate.weight, zeros
           w[0].rows = w[0].columns = d->dim;
           return 1;
       }
       stx_tensor *forward(stx_ctx *x, void *user, const stx_comp_evicted *e) {
           stx_tensor *gate = stx_linear(x, e->rows, e->w[0], NULL, STX_ACT_SIGMOID);
           ..                                  // e->rows (B,G taps,D), taps = r + overlap
       }

   Everything else is the same as for the built-in methods, which are functions of this
   form too: all losses of `aux` train the parameters, stx_comp_count includes them, and
   checkpoints, recomputation and generation work. examples/own_compression.c is a
   complete program. Missing rows are 0. A method that must tell them from rows of zeros
   reads e->missing. If e is not a multiple of r, the last group lacks rows, so that
   e->missing is set in every step, and steps are not replayed on a GPU.

   Configuration (stx_comp_desc). The "port" and "readme" columns are taken from the
   PyTorch port's enwik8 example and README; the others are from the paper. "-" means
   that the value was not published.

       field            zero means     port     readme    enwik8  wikitext103  PG-19
       ---------------  -------------  -------  --------  ------  -----------  -----
       vocab (V)        no vocabulary  256      20000     256     adaptive     32000
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
       compress         conv           all: the default
       custom           none           all: the default
       aux              attention      all: the default
       positions        learned        learned  learned   xl      xl           xl
       norm_after       before         0        0         1       1            1
       gate             x + y          gru      gru       0       0            0
       recurrence       own input      rotate   rotate    0       0            0
       dropouts         0              0        0.1 each  -       -            -

   The gate applies to both sublayers. For GTrXL, use STX_COMP_GATE_GTRXL with
   gate_relu. The port behaves like STX_COMP_STORE_ROTATE, although
   STX_COMP_STORE_OUTPUT was intended. The paper trains with Adam and clips the gradient
   to norm 0.1. The learning rate rises from 1e-6 to 3e-4 over 4,000 updates (16,000 for
   word-level models) and then decays along a cosine over 100,000 (500,000). After
   60,000 updates, the weights are updated only every fourth step, with the accumulated
   gradients of four steps. Late in training, fewer and larger updates improve the
   result, whereas a smaller learning rate harms it.

   Cost of the forward pass of a memory layer, in multiply-adds per stream and full
   segment (T = S), with keys = c + n + S and kv = kv_heads hd:

       Wq, Wo           2 S D^2
       Wkv              2 kv D keys
       attention        3 D S (c + n + S / 2)
       feed-forward     2 S D F                  3 S D F with glu
       compression      e D^2                    and 2 e D^2 for each dilation
       attention loss   2 G D kv + 2 S D (e + G)
       gates            gru, gtrxl 12 S D^2      sigtanh 4     input, output, highway 2
                        mogrify 5 S D^2          residual 0
       Wpos (xl)        keys D^2

   Of the cost of Wkv, 2 kv D (c + n) is for memory rows, and computing the gradient of
   Wkv from these rows costs the same again. stx_comp_gen avoids this cost by caching
   keys and values. A state holds B D sum_l (M_l + C_l) elements, and a stx_comp_gen
   holds 4 B D sum_l (M_l + C_l + S) more. kv_heads < heads saves only weights and their
   matmuls, because attention reads a copy of the keys and values for each head.

   Fidelity to the PyTorch port (compressive-transformer-pytorch 0.4.0) and to the paper
       In double, with every option, logits, losses, memories and all gradients agree to
       within 1e-10 (tested against independent float64 code).

       Corrected. Flags of `literal` restore these accidental behaviours of the port:
           STX_COMP_LITERAL_ROWS    the row of the positional table for a distance is
                                    (S + n + c) - 1 - dist, with the current n and c.
                                    Default: (S + M + C) - 1 - dist. Both are equal once
                                    the memories are full.
           STX_COMP_LITERAL_PAD     e mod r rows of zeros precede the e old rows, and
                                    G = floor((e + e mod r) / r), so the newest
                                    (e + e mod r) mod r rows are lost. (If G is 0, the
                                    port fails, and seqtx discards all e rows.) Default:
                                    G = ceil(e / r), zeros fill up the last group, and no
                                    row is lost.
           STX_COMP_LITERAL_TARGET  the aux loss compares att(new) with attention to all n
                                    rows of the memory. Default: with attention to the e
                                    rows that were compressed.
           STX_COMP_LITERAL_MASK    padding enters the memory, is attended to there like
                                    text, and counts in the means of the nll and the aux
                                    loss. A padded query sees only the memory. If the
                                    memory is empty, the query sees all keys of its
                                    segment, including later ones, with equal weight.
                                    Default: padding is never a key and does not count in
                                    means, and the attention output of padded queries
                                    is 0.
           STX_COMP_LITERAL_FREEZE  Wkv of a layer stops learning at the layer's first aux
                                    loss. Default: Wkv is constant in the aux loss only.
       Another accidental behaviour is selected by `recurrence`:
           STX_COMP_STORE_ROTATE    at the start of every stx_comp_segment, even with
                                    T < S, each memory layer takes over the memories of
                                    the next higher memory layer, and the top layer takes
                                    over those of the lowest. A row is compressed by the
                                    convolution of the layer that evicts it. stx_comp_gen
                                    rotates once per segment, but the port at every token.
                                    stx_comp_state_get returns the memory as the last call
                                    left it. Default: each layer keeps its memories, as in
                                    the paper (STX_COMP_STORE_INPUT). In ERNIE-Doc, which
                                    the port follows, each layer reads its outputs for the
                                    previous segment (STX_COMP_STORE_OUTPUT).
       To reproduce the port, set gate = STX_COMP_GATE_GRU, recurrence =
       STX_COMP_STORE_ROTATE and literal = STX_COMP_LITERAL.

       Always corrected: padding does not count in means (except with _MASK), the target
       of the aux loss has no dropout, and layers without compressed memory have no
       convolution.

       Improved: M and C can be 0, M can be less than S, evaluation can use other M and
       C, streams can be reset individually, and generation caches keys and values.

       Different: tensor layouts. Convolutions are (D,taps D), dilated convolutions
       (D,2 D), decoders (taps D,D) and key_pe (rows,D); tools/convert.py permutes the
       port's (out,in,taps), (out,in,2), (in,out,taps) and (H,rows,hd). The paper does
       not specify how usage is measured, how many zeros precede a dilated convolution,
       or that the last group may be shorter; these are our choices.

       Omitted: adaptive embedding and softmax (the paper's WikiText-103); the authors'
       separate projection and bias for positions of compressed rows; clamped positions;
       mogrifiers with biases.

   Checkpoints of the port can be converted to and from seqtx; docs/convert.md lists the
   tensor names.

   Arguments of the port's constructor and the corresponding fields of stx_comp_desc

       argument                     field                             its default
       ---------------------------  --------------------------------  -------------------
       num_tokens                   vocab                             (required)
       dim                          dim                               (required)
       seq_len                      segment                           (required)
       depth                        layers                            (required)
       emb_dim                      emb                               dim
       memory_layers                memory_layers, memory_count       all
       enhanced_recurrence          recurrence: _STORE_ROTATE, or     true
                                    _STORE_INPUT
       mem_len                      mem                               seq_len
       cmem_len                     cmem                              mem_len / cmem_ratio
       cmem_ratio                   ratio                             4
       heads                        heads                             8
       gru_gated_residual           gate: _GATE_GRU, or               true
                                    _GATE_RESIDUAL
       mogrify_gru                  mogrify                           false
       attn_dropout                 attn_dropout                      0
       ff_glu                       glu                               false
       ff_dropout                   ff_dropout                        0
       attn_layer_dropout           out_dropout                       0
       reconstruction_attn_dropout  aux_dropout                       0
       reconstruction_loss_weight   aux_weight                        1
       mask (of the call)           pad, inverted                     all true

   Easy to get wrong
       - The memory stores h, already normalised. It does not store keys, which are
         computed with the current weights in every step. With STX_COMP_STORE_OUTPUT, it
         stores layer outputs. The layer normalises them on every read, so they train
         the layer's norm.
       - A segment attends to the compressed memory as it was before the call. The next
         segment is the first to see the rows that this one adds.
       - gru keeps x where z is near 1, gtrxl where z is near 0. The bias is subtracted in
         gtrxl, output and sigtanh, and added in highway.
       - In the aux loss, attention uses q without u, and neither positions nor a causal
         mask.
       - stx_comp_total and stx_comp_aux refer to the last forward pass. m->aux and
         m->rel_error become invalid at the next stx_begin.
       - A call with T < S discards its tokens. If text arrives in short pieces, feed it
         to stx_comp_gen, or collect a full segment first.
       - Evaluation needs a separate state. With larger memories
         (stx_comp_state_create_sized), only STX_COMP_POSITIONS_XL has positions for the
         additional distances.

   GPU. Set the device in the desc passed to stx_create (see seqtx.h); nothing else
   changes. Once the memories are full, steps can be replayed as a CUDA graph. For this,
   write the step as a function, as examples/train_compressive.c does:

       stx_tokens_set(x, in, ..);    stx_tokens_set(x, next, ..);
       stx_optim_set_lr(optim, lr);
       stx_step_run(x, stx_comp_key(model, in, next, memory, 0), step, user);

   step() must make every call from stx_begin to stx_optim_step. seqtx_cuda.cu includes
   the kernels of this header if both files are in the same directory.

   The compile-time options are described in seqtx.h.

   Reading order: stx__comp_layer_fwd (one layer and the rows it adds to the memories),
   stx_comp_segment (the loop over layers and the memory), stx__comp_plan (which rows are
   evicted or missing), stx__comp_compress and >>compression methods, stx__comp_layer_aux,
   stx__comp_apply_gate, the kernels in >>groups and the sections after it, and
   stx__comp_gen_move (generation).
*/
#define STX__LETTERS 1
#include "seqtx.h"      /* hides single-letter macros; see the end of seqtx.h */
#ifndef SEQTX_COMPRESSIVE_H
#define SEQTX_COMPRESSIVE_H

#include "seqtx.h"

#ifdef __cplusplus
extern "C" {
#endif


// >>api: configuration

/* stx_comp_desc.compress: what happens to evicted rows */
enum {
    STX_COMP_COMPRESS_CONV = 0,     /* strided convolution */
    STX_COMP_COMPRESS_DILATED,      /* dilated convolutions, then a strided one */
    STX_COMP_COMPRESS_MAX,
    STX_COMP_COMPRESS_MEAN,
    STX_COMP_COMPRESS_USED,         /* the rows that received the most attention are kept */
    STX_COMP_COMPRESS_DROP,         /* evicted rows are discarded; no compressed memory */
    STX_COMP_COMPRESS_CUSTOM        /* stx_comp_desc.custom, which selects this value */
};

/* stx_comp_desc.aux: what trains the compression */
enum {
    STX_COMP_AUX_AUTO = 0,          /* _ATTENTION if there is a convolution, else _NONE */
    STX_COMP_AUX_ATTENTION,
    STX_COMP_AUX_AUTOENCODE,
    STX_COMP_AUX_BPTT,
    STX_COMP_AUX_NONE
};

/* stx_comp_desc.positions: how distances enter the attention scores */
enum {
    STX_COMP_POSITIONS_LEARNED = 0, /* one table for all layers, with a slice per head */
    STX_COMP_POSITIONS_XL           /* Transformer-XL's projected sines */
};

/* Values of stx_comp_desc.gate (up to STX_COMP_GATE_GTRXL) and of
   stx_comp_gate_args.kind (all of them). */
enum {
    STX_COMP_GATE_RESIDUAL = 0,
    STX_COMP_GATE_GRU,
    STX_COMP_GATE_INPUT,
    STX_COMP_GATE_OUTPUT,
    STX_COMP_GATE_HIGHWAY,
    STX_COMP_GATE_SIGTANH,
    STX_COMP_GATE_GTRXL,
    STX_COMP_GATES,                 /* number of kinds above */
    STX_COMP_GATE_RESET = STX_COMP_GATES,
    STX_COMP_GATE_MOGRIFY,
    STX_COMP_GATE_GLU
};

/* stx_comp_desc.recurrence: what the memory of a layer stores */
enum {
    STX_COMP_STORE_INPUT = 0,       /* h, the layer's normalised input */
    STX_COMP_STORE_OUTPUT,          /* the layer's output, normalised when it is read */
    STX_COMP_STORE_ROTATE           /* h; each call moves every memory down one memory layer, and
                                       the lowest one to the top */
};

enum { STX_COMP_MAX_DILATIONS = 8 };

#define STX_COMP_NO_ROWS SIZE_MAX   /* a value of stx_comp_desc.mem or cmem: no rows */

/* Flags of stx_comp_desc.literal. Each restores an accidental behaviour; see Fidelity. */
enum {
    STX_COMP_LITERAL_ROWS   = 1,        /* requires STX_COMP_POSITIONS_LEARNED */
    STX_COMP_LITERAL_PAD    = 2,        /* requires STX_COMP_COMPRESS_CONV */
    STX_COMP_LITERAL_TARGET = 4,        /* requires STX_COMP_AUX_ATTENTION */
    STX_COMP_LITERAL_MASK   = 8,        /* incompatible with STX_COMP_COMPRESS_USED */
    STX_COMP_LITERAL_FREEZE = 16,       /* requires STX_COMP_AUX_ATTENTION */
    STX_COMP_LITERAL        = 1 << 30   /* all flags that apply to the model */
};

/* Describes how the rows (B,rows,D) of each stream are cut into `groups` groups of
   `taps` rows. Successive groups start `step` rows apart. Tap t of group g of stream b
   is row base_b + g step + t, with

       base_b = at                                         if first is NULL
       base_b = at + first[b] - (groups - G_b) step        otherwise, with
       G_b    = ceil((rows - first[b]) / step)

   The second form is for streams that began later than others: the rows of stream b
   begin at first[b], its groups start there, and its G_b groups are the last (newest)
   of the result. A row is missing if it is outside [0, rows), before first[b], or
   marked in pad. Kernels skip missing rows or read them as 0. */
typedef struct stx_comp_groups {
    size_t B, rows, groups, taps, step, D;
    ptrdiff_t at;
    const int32_t *first;       /* (B), on the device, or NULL; see above */
    const int32_t *pad;         /* (B,rows), on the device, or NULL; nonzero marks missing rows */
    size_t stride;              /* stride between streams, in elements, of the rows that
                                   stx_comp_unfold, _pool and _pick read; 0: rows D */
} stx_comp_groups;

/* stx_comp_method.layout: how `forward` receives the evicted rows */
enum {
    STX_COMP_ROWS_GROUPED = 0,      /* `rows` is (B,G taps,D): the taps of one group after the
                                       other */
    STX_COMP_ROWS_CONSECUTIVE,      /* `rows` is (B,before + G r,D): all rows once. Group g
                                       begins at row before + g r */
    STX_COMP_ROWS_IN_PLACE          /* `rows` is NULL: a kernel reads `old` (B,e,D), which
                                       `groups` cuts into groups */
};

/* What a compression method reads. Rows are constants. Missing rows are 0: those that
   the last group lacks, padding, and rows from before a stream's reset. */
typedef struct stx_comp_evicted {
    const struct stx_comp_desc *desc;       /* with the defaults filled in */
    size_t l;                               /* the layer */
    size_t B, G, D;                         /* G: number of groups, i.e. of new rows */
    size_t taps, before;                    /* as in stx_comp */
    stx_tensor *const *w;                   /* the layer's weights, in the order in which
                                               the method describes them */
    stx_tensor *rows;                       /* see the layouts above */
    const stx_ids *missing;                 /* shape (B,..) of `rows`, nonzero where a row is
                                               missing; NULL: none is. Only with
                                               STX_COMP_COMPRESS_CUSTOM */
    stx_cached_rows old;                    /* STX_COMP_ROWS_IN_PLACE only, as are the
                                               fields below */
    stx_comp_groups groups;
    const stx_tensor *usage;                /* STX_COMP_COMPRESS_USED only: (B,..,2), the
                                               usage of the old rows */
} stx_comp_evicted;

/* A compression method: how the rows of a group become one row. The built-in methods
   have this form; stx_comp_desc.custom adds another one. See Own compression in the
   manual.

   weights   describes the weights of layer l: fills in w[0 .. n), which are zeros at
             first, and returns n, at most STX_MAX_WEIGHTS. d has the defaults filled in.
             The parameters are named layers.<l>.compress.<name>. NULL: the method has no
             weights
   forward   returns the new rows (B,G,D), computed by operators from e->rows, e->w and
             constants. Returns NULL if it fails. It is called in training, evaluation
             and generation, and again in the backward pass if the layer is recomputed, so
             it must have no side effects */
typedef struct stx_comp_method {
    const char *name;       /* for error messages; NULL: "custom" */
    size_t (*weights)(void *user, const struct stx_comp_desc *d, size_t l, stx_weight *w);
    stx_tensor *(*forward)(stx_ctx *x, void *user, const stx_comp_evicted *e);
    void  *user;            /* passed to both functions */
    int    layout;          /* STX_COMP_ROWS_GROUPED, _CONSECUTIVE or _IN_PLACE */
} stx_comp_method;

/* Configuration of a model. Zero means the default, which is given after "0:". */
typedef struct stx_comp_desc {
    /* sizes */
    size_t vocab;           /* V; 0: no embedding or output head; inputs and outputs are vectors */
    size_t dim;             /* D; 0: 512 */
    size_t emb;             /* E; 0: D. If E != D, the model projects E to D and back */
    size_t layers;          /* L; 0: 8 */
    size_t heads;           /* H, at most 256 and a divisor of D; 0: 8 */
    size_t kv_heads;        /* heads of keys and values, each shared by H / kv_heads
                               query heads; 0: H */
    size_t inner;           /* F; 0: 4 D */
    size_t segment;         /* S; 0: 512 */

    /* memory */
    const size_t *memory_layers;    /* numbers of the layers that have a memory, counted
                                       from 1 (copied); NULL: all layers */
    size_t memory_count;    /* number of elements in memory_layers */
    int    no_memory;       /* 1: no layer has a memory */
    size_t mem;             /* M; 0: S. STX_COMP_NO_ROWS: no memory rows */
    size_t cmem;            /* C; 0: floor(M / r). STX_COMP_NO_ROWS: no compressed memory */
    const size_t *mems, *cmems;     /* M and C per layer, L elements each (copied); 0
                                       means no rows. Values for layers without memory are
                                       ignored. NULL: `mem` or `cmem` applies to all
                                       layers */

    /* compression */
    size_t ratio;           /* r; 0: 4 */
    int    compress;        /* what happens to evicted rows: STX_COMP_COMPRESS_CONV .. _DROP */
    const stx_comp_method *custom;  /* a compression method of the program, in place of
                                       `compress`; copied. NULL: none */
    size_t overlap;         /* STX_COMP_COMPRESS_CONV and custom: number of rows before a
                               group that the compression also reads */
    int    conv_no_bias;    /* 1: the convolution has no bias; STX_COMP_COMPRESS_CONV only */
    size_t dilation[STX_COMP_MAX_DILATIONS], dilations;     /* STX_COMP_COMPRESS_DILATED
                                                               only: `dilation` has
                                                               `dilations` elements.
                                                               dilations = 0: {1, 2, 4} */
    int    aux;             /* what trains the compression: STX_COMP_AUX_AUTO .. _NONE */
    double aux_weight;      /* weight of the aux loss; 0: 1 */
    size_t bptt;            /* STX_COMP_AUX_BPTT: number of later segments whose loss
                               trains the compression; 0: 1 */

    /* layers */
    int    positions;       /* kind of positions: STX_COMP_POSITIONS_LEARNED or _XL */
    int    norm_after;      /* 1: layer norm after each gate; 0: before each sublayer */
    int    final_norm;      /* 1: layer norm after the last layer */
    int    glu;             /* 1: gated feed-forward network, gelu(p_1) p_2, where p_1 and
                               p_2 are the halves of W1's output */
    int    tied;            /* 1: the output head uses the embedding as its weight */
    int    gate;            /* kind of the gates: STX_COMP_GATE_RESIDUAL .. _GTRXL */
    int    gate_relu;       /* 1: a ReLU precedes the gate (GTrXL) */
    double gate_bias;       /* initial value of the gate's bias b0. 0: the default, which
                               is 2 for gtrxl and 1 for output, highway and sigtanh. With
                               gru, gate_bias is added to the z block of the initial
                               bias_ih, and 0 adds nothing */
    int    zero_gate_bias;  /* 1: gate_bias is 0 instead of its default */
    int    mogrify;         /* 1: five mogrifier steps before the gate, which must be gru */
    int    recurrence;      /* what a memory stores: STX_COMP_STORE_INPUT, _OUTPUT or _ROTATE */

    /* dropout probabilities, in [0,1) */
    double attn_dropout;    /* dropout of attention weights */
    double out_dropout;     /* dropout of the attention's output, after Wo */
    double ff_dropout;      /* dropout inside the feed-forward network */
    double aux_dropout;     /* dropout of attention weights over new rows in the aux loss */

    unsigned literal;       /* STX_COMP_LITERAL, or individual flags, all of which must
                               apply to the model. After creation, the model's desc has
                               the flags in effect */
    size_t recompute_layers;    /* number of layers to recompute in the backward pass,
                                   counted from the last, to save memory; SIZE_MAX: all */
} stx_comp_desc;

/* Weights of a gate; see Gates in the manual. Weights that the gate's kind does not use
   are NULL. The checkpoint names are:

       kind              w0 ..                     shape    b0, b1              shape
       gru               weight_ih, weight_hh      (3D,D)   bias_ih, bias_hh    (3D)
       input             w                         (D,D)
       output, highway   w                         (D,D)    b                   (D)
       sigtanh           w, u                      (D,D)    b                   (D)
       gtrxl             wr, ur, wz, uz, wg, ug    (D,D)    b                   (D)

   The tensors of gru have three row blocks: reset, z and cand. */
typedef struct stx_comp_gate {
    stx_tensor *w[6], *b[2];
    stx_tensor *mogrify[4];     /* q0 (k,D), q1 (D,k), r0 (k,D) and r1 (D,k), with
                                   k = floor(D / 4) */
} stx_comp_gate;

/* Parameters of a layer. */
typedef struct stx_comp_layer {
    int    memory;                          /* 1: the layer has a memory */
    size_t M, C;                            /* capacities of the memory and the compressed
                                               memory, in rows; 0 without memory */
    stx_tensor *attn_gain, *attn_shift;     /* (D) each: layer norm of the attention sublayer */
    stx_tensor *wq, *wkv, *wo, *bo;         /* wq (D,D), wkv (2 kv_heads hd,D) with the
                                               rows of the keys first, wo (D,D), bo (D) */
    stx_tensor *wpos, *u, *vb;              /* wpos (D,D), u and vb (H,hd);
                                               STX_COMP_POSITIONS_XL only */
    stx_tensor *compress[STX_MAX_WEIGHTS];  /* weights of the compression; NULL if C is 0.
                                               conv: (D,taps D), column t D + c is tap t
                                               of channel c, and (D), the bias. dilated:
                                               first (D,2 D) for each dilation, the
                                               columns of K0, then those of K1 */
    stx_tensor *decoder;                    /* Dec (taps D,D): row t D + c is tap t of channel c;
                                               STX_COMP_AUX_AUTOENCODE only */
    stx_tensor *ff_gain, *ff_shift, *w1, *b1, *w2, *b2;     /* ff_gain and ff_shift (D),
                                                               w1 (F,D), b1 (F), w2 (D,F),
                                                               b2 (D). With glu, w1 (2F,D)
                                                               and b1 (2F) */
    stx_comp_gate attn_gate, ff_gate;
    int    frozen;      /* 1: wkv is no longer trained (STX_COMP_LITERAL_FREEZE). Set by
                           the first training segment with an aux loss in this layer. Not
                           stored in checkpoints; a resumed run sets it again. Set it to 0
                           to unfreeze wkv */
} stx_comp_layer;

/* What stx_comp_attention_map needs of a layer in the last forward pass. */
typedef struct stx_comp_attended {
    stx_attention_record call;
    size_t c, M;                /* rows in the compressed memory; capacity of the memory */
    size_t pushed_max;          /* the state's */
    const size_t *pushed;       /* (B): the state's, before the segment entered the memory;
                                   NULL without a state */
} stx_comp_attended;

/* A model. The context owns it and its parameters. */
typedef struct stx_comp {
    stx_ctx        *ctx;
    stx_comp_desc   desc;                   /* with the defaults filled in; its lists are
                                               copies, as is `custom` */
    const stx_comp_method *method;          /* the compression, built-in or custom */
    stx_params     *params;
    stx_vocab_io   *vocab_io;               /* embedding and output head, E wide; NULL
                                               without vocab */
    stx_tensor     *in_w, *in_b, *out_w, *out_b;        /* in_w (D,E), in_b (D), out_w
                                                           (E,D) and out_b (E); NULL if
                                                           E = D */
    stx_tensor     *key_pe;                 /* STX_COMP_POSITIONS_LEARNED: (rows,D), rows =
                                               S + max M + max C. Distance dist is in row
                                               rows - 1 - dist, and head h has the hd
                                               columns that start at h hd */
    stx_tensor     *sines;                  /* STX_COMP_POSITIONS_XL: (rows,D), constant, with rows
                                               as in key_pe */
    stx_tensor     *final_gain, *final_shift;
    stx_comp_layer *layer;                  /* [L]: the layers */
    size_t          taps, before;           /* taps: number of rows from which a
                                               compressed row is computed, r + overlap.
                                               before: number of rows before a group that
                                               its convolutions also read */
    size_t          A;                      /* number of layers with C > 0 */
    stx_tensor    **aux, **rel_error;       /* [L], (1) each: aux loss and relative
                                               squared error of the last forward pass,
                                               valid until the next stx_begin. NULL if
                                               nothing was evicted, or in evaluation. In a
                                               process group, rel_error covers only this
                                               rank, and aux is scaled so that its mean
                                               over all ranks is the aux loss of the
                                               batch */
    stx_comp_attended *attended;            /* [L], for stx_comp_attention_map */
} stx_comp;

/* Creates a model with initialised parameters in context x, which owns it. The desc and
   its lists are copied. Returns NULL and sets an error if the desc is NULL or invalid, or
   if memory runs out. */
STX_DEF stx_comp *stx_comp_create(stx_ctx *x, const stx_comp_desc *desc);

/* stx_comp_open creates the model in a file of stx_comp_save or in a checkpoint of
   train_compressive, in context x, which owns it. Returns NULL after an error.
   stx_comp_save writes the model to a file, atomically; returns 1, or 0 after an error.
   stx_comp_family is for files that contain more than a model, and for programs that
   accept any family. See stx_model_open, stx_model_write and stx_lm_open in seqtx.h. */
STX_DEF stx_comp *stx_comp_open(stx_ctx *x, const char *path);
STX_DEF int stx_comp_save(stx_comp *m, const char *path);
STX_DEF const stx_family *stx_comp_family(void);

/* The model's parameters, owned by the context; NULL if m is NULL. */
STX_DEF stx_params *stx_comp_params(stx_comp *m);

/* Returns the number of parameter elements of a model with this desc, without creating
   it. Tied parameters are counted once. Returns 0, without setting an error, if the
   desc is invalid, and SIZE_MAX if the number does not fit in size_t. */
STX_DEF size_t stx_comp_count(const stx_comp_desc *desc);


// >>api: memory

/* The memories of all layers for B streams. A forward pass reads one state and writes
   another, or the same one. Use separate states for training and evaluation. A new
   state is empty. */
typedef struct stx_comp_state {
    stx_comp *model;
    size_t    B;
    size_t   *M, *C;        /* capacities of the memory and the compressed memory of each
                               layer: the model's, or those passed to
                               stx_comp_state_create_sized */
    stx_memory *mem, *comp; /* memory and compressed memory. Layer l has rows mem (B,n,D)
                               and comp (B,c,D), oldest first, with
                               n = mem->layer[l].count and c = comp->layer[l].count */
    stx_memory *usage;      /* STX_COMP_COMPRESS_USED, else NULL: (B,n,2) per layer, with
                               two values for each row of mem: the attention that it
                               received, and the number of queries that could attend to
                               it */
    stx_memory *source;     /* STX_COMP_AUX_BPTT, else NULL: the rows from which the newest
                               compressed rows were made */
    size_t   *pushed;       /* (B): number of rows that each stream has pushed into the
                               memory since the stream began; capped at pushed_max,
                               because larger counts make no difference */
    size_t    pushed_max;
} stx_comp_state;

/* Creates an empty state for B >= 1 streams. Returns NULL and sets an error if B is 0
   or memory runs out. Free the result with stx_comp_state_free; otherwise it is freed
   with the context. */
STX_DEF stx_comp_state *stx_comp_state_create(stx_comp *m, size_t B);

/* Like stx_comp_state_create, but with capacities that can differ from the model's.
   mems and cmems have L elements each; NULL means the model's capacities. Values for
   layers without memory are ignored. cmems must be 0 in memory layers without
   compressed memory. Distances that a learned position table does not cover use the row
   of its largest distance; STX_COMP_POSITIONS_XL has no limit. */
STX_DEF stx_comp_state *stx_comp_state_create_sized(stx_comp *m, size_t B, const size_t *mems,
                                                    const size_t *cmems);

STX_DEF void stx_comp_state_free(stx_comp_state *s);

/* Empties the memory. Does nothing after an error. */
STX_DEF void stx_comp_state_reset(stx_comp_state *s);

/* Empties the memory of stream b, for example when a new text begins in it. The
   stream's next segments then give the same results as from an empty state, up to
   rounding. Sets an error if b >= B, or with STX_COMP_LITERAL_ROWS, _PAD or _MASK,
   which derive positions, padding and keys from a row count shared by all streams. */
STX_DEF void stx_comp_state_reset_stream(stx_comp_state *s, size_t b);

/* Copies the memory of streams from_b .. from_b + streams - 1 of `from` to streams b ..
   b + streams - 1 of `to`, for example to regroup batches. Both states must have the
   same model and the same capacities. Returns 1, or sets an error and returns 0. */
STX_DEF int stx_comp_state_copy(stx_comp_state *to, size_t b, const stx_comp_state *from,
                                size_t from_b, size_t streams);

/* Copy the memory of layer l to or from host memory. stx_comp_state_get writes the n =
   mem->layer[l].count memory rows (B,n,D) and the c = comp->layer[l].count compressed
   rows (B,c,D), oldest first; either pointer may be NULL. stx_comp_state_set replaces
   both memories (n <= M[l], c <= C[l]) and resets the usage. With STX_COMP_STORE_ROTATE,
   l is the layer that holds the memory after the last call's rotation. stx_comp_state_get
   fails while a stream lacks rows (after a reset or because of padding): plain values
   cannot mark a row as missing. Both return 1, or set an error and return 0. */
STX_DEF int stx_comp_state_get(const stx_comp_state *s, size_t l, stx_real *mem, stx_real *comp);
STX_DEF int stx_comp_state_set(stx_comp_state *s, size_t l, const stx_real *mem, size_t n,
                               const stx_real *comp, size_t c);

/* stx_comp_state_save saves the memory to a checkpoint, under names that begin with
   `prefix`, which can have at most 64 characters. stx_comp_state_load loads it into a
   state with the same B. The entries are those that stx_memory_save writes under
   "<prefix>mem.", "<prefix>comp.", "<prefix>usage." and "<prefix>source.", plus the
   metadata "<prefix>seen.<b>". Both return 1, or set an error and return 0; a failed
   load leaves s empty. After an earlier error, and if an argument is NULL, they do
   nothing and return 0. */
STX_DEF int stx_comp_state_save(stx_writer *w, const stx_comp_state *s, const char *prefix);
STX_DEF int stx_comp_state_load(stx_comp_state *s, const stx_file *f, const char *prefix);


// >>api: forward

/* Vectors h (B,T,D), T <= S -> last hidden states (B,T,D).

   pad (B,T) is nonzero where h is padding; NULL means no padding. Padding is never
   attended to, in this call or in memory, except with STX_COMP_LITERAL_MASK. The port's
   mask has the opposite sense.

   `in` is the memory to read (NULL if empty), and `out` the memory to write (NULL to
   write none); they may be the same. Without `out`, nothing is compressed, and there is
   no aux loss.

   If T = S, the segment enters the memory. If T < S, as at the end of a text, its rows
   are discarded and the memory is unchanged, except that STX_COMP_STORE_ROTATE moves
   the memories at the start of every call. To run token by token, use stx_comp_gen.

   Gradients reach h but not the memory. Inside stx_recompute, `out` must be NULL.
   Returns NULL and sets an error if the shapes do not match or a memory belongs to
   another model. */
STX_DEF stx_tensor *stx_comp_segment(stx_comp *m, stx_tensor *h, const stx_ids *pad,
                                     const stx_comp_state *in, stx_comp_state *out);

/* ids (B,T) -> vectors (B,T,D): embedding, and the input projection if E != D. */
STX_DEF stx_tensor *stx_comp_embed(stx_comp *m, const stx_ids *ids);

/* ids (B,T) -> last hidden states (B,T,D): stx_comp_embed, then stx_comp_segment. */
STX_DEF stx_tensor *stx_comp_forward(stx_comp *m, const stx_ids *ids, const stx_ids *pad,
                                     const stx_comp_state *in, stx_comp_state *out);

/* Hidden states (B,T,D) -> logits (B,T,V), which are differentiable, or log
   probabilities (B,T,V), which are not. Both functions return NULL after an error. */
STX_DEF stx_tensor *stx_comp_logits(stx_comp *m, stx_tensor *h);
STX_DEF stx_tensor *stx_comp_log_probs(stx_comp *m, stx_tensor *h);

/* Hidden states (B,T,D) and targets (B,T) -> (1): mean negative log-likelihood, in nats
   per token. Negative targets are ignored. Padding (see stx_comp_segment) is also
   ignored, except with STX_COMP_LITERAL_MASK. The result is 0 if all targets are
   ignored. */
STX_DEF stx_tensor *stx_comp_nll(stx_comp *m, stx_tensor *h, const stx_ids *targets,
                                 const stx_ids *pad);

/* ids (B,T) and targets (B,T) -> nll (1): stx_comp_forward, then stx_comp_nll. */
STX_DEF stx_tensor *stx_comp_loss(stx_comp *m, const stx_ids *ids, const stx_ids *targets,
                                  const stx_ids *pad, const stx_comp_state *in,
                                  stx_comp_state *out);

/* The weighted aux loss (1) of the last forward pass, aux_weight / A sum_l aux_l. Its
   gradients reach only the compression. It is 0 in evaluation, and if nothing was
   compressed. */
STX_DEF stx_tensor *stx_comp_aux(stx_comp *m);

/* Adds the weighted aux loss of the last forward pass to nll (1). Returns nll itself if
   there is no aux loss. Call stx_backward on the result. */
STX_DEF stx_tensor *stx_comp_total(stx_comp *m, stx_tensor *nll);

/* Returns the key for stx_step_run: a hash of all host-side decisions in a step with
   ids, targets and memory s, each of which may be NULL. The hash includes salt: for a
   step with several parts or memories, pass the key of one as the salt of the next.
   Padding is not part of the key, so do not replay steps with padding. */
STX_DEF uint64_t stx_comp_key(const stx_comp *m, const stx_ids *ids, const stx_ids *targets,
                              const stx_comp_state *s, uint64_t salt);

/* Returns the attention weights of layer l in stream b, of the last forward pass of this
   step (see stx_attention_map). The keys are the rows of the compressed memory and of
   the memory, and the tokens of the segment. A compressed row stands for the tokens of
   its group; a convolution with overlap or dilations also reads earlier ones. The tokens
   are not known (`tokens` is 0) with STX_COMP_COMPRESS_USED, for rows of
   stx_comp_state_set, and in a long text, if S does not divide M, for all but the newest
   rows. Positions count padding. Rows of padded queries have no effect: the model sets
   their attention output to 0 or, with STX_COMP_LITERAL_MASK, computes it from other
   keys. Call it before the next stx_begin and before the parameters change. On a GPU, it
   copies from the device, like stx_get. Returns NULL and sets an error if there was no
   forward pass, if l or b is out of range, or if the layer is recomputed
   (recompute_layers with STX_TRAIN). */
STX_DEF const stx_attention_map *stx_comp_attention_map(const stx_comp *m, size_t l, size_t b);


// >>api: generation

/* A generator, which evaluates step by step with cached keys and values. Up to
   rounding, the results are the same as with stx_comp_segment over whole segments,
   regardless of the number of tokens per call. Rows enter the memory when a segment is
   full, that is, after every S tokens; STX_COMP_STORE_ROTATE also rotates once per
   segment. Padding is not supported; see the manual. After the parameters change, reset
   the generator or create a new one. */
typedef struct stx_comp_gen {
    stx_comp       *model;
    size_t          B;
    stx_comp_state *state;      /* the memory at the start of this segment */
    size_t          at;         /* number of tokens of this segment so far, less than S */
    stx_cache      *cache;      /* each layer's keys and values for the compressed
                                   memory, the memory and this segment */
    stx_real      **rows;       /* [L]: rows (B,S,D) that this segment adds to the memory
                                   of a layer; NULL for layers without memory */
    stx_real      **usage;      /* STX_COMP_COMPRESS_USED: [L], (B,M,2), the usage of the
                                   memory rows, laid out as in stx_comp_state */
    stx_real      **pe;         /* [L]: projected sines (reach,D) of each layer. With a
                                   learned table, only pe[0]: the table, extended to
                                   `reach` rows */
    int32_t        *pad;        /* (B,S), on the host: nonzero for tokens fed before their stream
                                   was reset */
    int             masked;     /* 1: an element of pad is nonzero */
    int             stale;      /* 1: the cache must be recomputed from the state */
    size_t          reach;      /* number of distances: S + max M + max C */
} stx_comp_gen;

/* Creates a generator for B >= 1 streams. Returns NULL and sets an error if B is 0 or
   memory runs out. Free the result with stx_comp_gen_free; otherwise it is freed with
   the context. */
STX_DEF stx_comp_gen *stx_comp_gen_create(stx_comp *m, size_t B);

/* Like stx_comp_gen_create, but with capacities that can differ from the model's; see
   stx_comp_state_create_sized. */
STX_DEF stx_comp_gen *stx_comp_gen_create_sized(stx_comp *m, size_t B, const size_t *mems,
                                                const size_t *cmems);

STX_DEF void stx_comp_gen_free(stx_comp_gen *g);

/* Empties the memory and the cache. */
STX_DEF void stx_comp_gen_reset(stx_comp_gen *g);

/* Empties the memory and the cache of stream b. The other streams continue. */
STX_DEF void stx_comp_gen_reset_stream(stx_comp_gen *g, size_t b);

/* Copies a memory with the same model, B and capacities into the generator, and starts
   a new segment. Returns 1, or sets an error and returns 0. */
STX_DEF int stx_comp_gen_set(stx_comp_gen *g, const stx_comp_state *from);

/* Vectors h (B,T,D), any T >= 1 -> last hidden states (B,T,D). Call
   stx_begin(x, STX_EVAL) first. */
STX_DEF stx_tensor *stx_comp_gen_step(stx_comp_gen *g, stx_tensor *h);

/* Feeds n >= 1 tokens per stream, ids (B,n), and returns the logits (B,V) of the next
   token, or NULL after an error. The result is in host memory, ready for stx_sample, and
   valid until the next call. Calls stx_begin(x, STX_EVAL), so do not call it between a
   forward pass and its backward pass. */
STX_DEF const stx_real *stx_comp_gen_feed(stx_comp_gen *g, const int32_t *ids, size_t n);

/* Returns the model as a table of functions, for programs that accept any model family.
   Its state_create and gen_create accept only window = 0; to evaluate with other
   capacities, use stx_comp_state_create_sized. If m is NULL or has no vocab, all fields
   are NULL. */
STX_DEF stx_lm stx_comp_as_lm(stx_comp *m);


// >>api: kernels

/* Copies the row of each tap from `rows` (B,rows,D) to y (B,groups,taps,D), with 0 for
   missing rows. If accumulate is set, adds to y instead. */
STX_KERNEL(stx_comp_unfold, (stx_ctx *x, stx_real *y, const stx_real *rows,
                             const stx_comp_groups *g, int accumulate))

/* Sets each row of `rows` (B,rows,D) to the sum, in ascending order, of the taps of y
   (B,groups,taps,D) that refer to it. Missing rows, and rows without taps, are 0. The
   backward kernel is stx_comp_unfold. */
STX_KERNEL(stx_comp_fold, (stx_ctx *x, stx_real *rows, const stx_real *y,
                           const stx_comp_groups *g))

/* Sets y (B,groups,D) to the mean (if max is 0) or the maximum (if max is 1) of the rows
   of each group, per channel. Missing rows are skipped; if all are missing, y is 0. */
STX_KERNEL(stx_comp_pool, (stx_ctx *x, stx_real *y, const stx_real *rows,
                           const stx_comp_groups *g, int max))

/* Selects the G_b most used rows of each stream b among rows first[b] .. rows - 1.
   Copies them, in chronological order, to the last G_b rows of y (B,groups,D). The
   other rows of y are 0. If first is NULL, first[b] is 0 and G_b = groups. taps and at
   are not read. usage (B,rows,2), in full precision, has a stride of usage_batch_stride
   elements between streams. The usage of a row is its first value divided by its
   second, or 0 if the second is 0. Of equally used rows, the newer ranks first. Missing
   rows rank last, oldest first, and are 0 in y. */
STX_KERNEL(stx_comp_pick, (stx_ctx *x, stx_real *y, const stx_real *rows, const stx_real *usage,
                           size_t usage_batch_stride, const stx_comp_groups *g))

/* Adds the usage of keys first .. first + n - 1 in one attention. Call it after the
   attention's forward kernel, with the same arguments `a`. The attention must not use a
   learned span, eps or persistent vectors:

       usage[b][j][0] += 1/H sum_h sum_i softmax weight of key first + j for query i,
                         before dropout
       usage[b][j][1] += number of queries i

   Padded queries (marked in a->pad at S - T + i) are ignored. All queries must come
   after the n keys. usage (B,n,2), in full precision, has a stride of
   usage_batch_stride elements between streams. */
STX_KERNEL(stx_comp_usage, (stx_ctx *x, stx_real *usage, size_t usage_batch_stride,
                            const stx_attention_args *a, size_t first, size_t n))

/* Arguments of the squared error between `a` and target, over the rows not marked in
   skip:

       loss = sum (a - target)^2 / count
       rel_error = sum (a - target)^2 / sum target^2       0 if sum target^2 is 0

   The backward kernel computes da = 2 dloss (a - target) / count, which is 0 in marked
   rows. It adds to da if accumulate is set. */
typedef struct stx_comp_error_args {
    size_t N, D;
    double count;                   /* divisor; for a mean, the number of compared elements */
    const stx_real *a, *target;     /* (N,D) */
    const int32_t  *skip;           /* (N), on the device, or NULL; nonzero: the row is
                                       not compared */
    stx_real       *loss, *rel_error;   /* (1) each; forward only */
    double         *work;           /* (N,2), on the device, receives the two sums of each row;
                                       forward only */
    const stx_real *dloss;          /* (1); this and the following fields: backward only */
    stx_real       *da;             /* (N,D) */
    int             accumulate;
} stx_comp_error_args;

STX_KERNEL(stx_comp_error_fwd, (stx_ctx *x, const stx_comp_error_args *e))
STX_KERNEL(stx_comp_error_bwd, (stx_ctx *x, const stx_comp_error_args *e))

/* The elementwise part of a gate. p0 .. p3 (in the field p) are the results of its
   matmuls; sig is the sigmoid.

       STX_COMP_GATE_GRU      reset = sig(p0_reset + p1_reset), z = sig(p0_z + p1_z),
                              cand = tanh(p0_cand + reset p1_cand),
                              out = (1 - z) cand + z x
       STX_COMP_GATE_INPUT    out = sig(p0) x + y
       STX_COMP_GATE_OUTPUT   out = x + sig(p0) y
       STX_COMP_GATE_HIGHWAY  out = sig(p0) x + (1 - sig(p0)) y
       STX_COMP_GATE_SIGTANH  out = x + sig(p0) tanh(p1)
       STX_COMP_GATE_GTRXL    z = sig(p0 + p1), cand = tanh(p2 + p3),
                              out = (1 - z) x + z cand
       STX_COMP_GATE_RESET    out = sig(p0 + p1) x
       STX_COMP_GATE_MOGRIFY  out = 2 sig(p0) x
       STX_COMP_GATE_GLU      out = gelu(p0_1) p0_2, in the feed-forward network; no x

   For gru, p0 and p1 (N,3D) consist of the blocks reset, z and cand; for glu, p0 (N,2D)
   consists of two halves. The backward kernel reads dout and the inputs, and writes the
   gradients of all inputs, or adds to them if accumulate is set. For gru and glu, it
   also computes the gradient of the bias that was added to p[k]: it adds the sum of all
   rows of dp[k] to db[k]. In that case, dp[k] must be 0 before the call if accumulate
   is set. */
typedef struct stx_comp_gate_args {
    int    kind, accumulate;
    size_t N, D;
    const stx_real *x, *y;      /* (N,D); NULL if the kind has none */
    const stx_real *p[4];       /* (N,D); with gru (N,3D), with glu (N,2D). NULL if the
                                   kind has none */
    stx_real *out;              /* (N,D) */
    const stx_real *dout;       /* (N,D) */
    stx_real *dx, *dy, *dp[4];  /* shaped like x, y and p */
    stx_real *db[2];            /* gru: (3D) each; glu: db[0] (2D). NULL if not needed */
    int defer_db;               /* 1: db belongs to parameters, so the sums may be added later; see
                                   stx_linear_bwd_args. Not read on the CPU */
} stx_comp_gate_args;

STX_KERNEL(stx_comp_gate_fwd, (stx_ctx *x, const stx_comp_gate_args *a))
STX_KERNEL(stx_comp_gate_bwd, (stx_ctx *x, const stx_comp_gate_args *a))

/* Computes in double, in host memory, what stx_comp_usage adds to usage[..][0], and
   stores it in sum (B,n). This is a plain definition for readers, and the reference in
   tests. work has 2 stx_attention_keys(a) elements. */
STX_DEF void stx_comp_usage_plain(double *sum, const stx_attention_args *a, size_t first,
                                  size_t n, double *work);

#ifdef __cplusplus
}
#endif

/* Stop reading here if you only want the API. */
#endif /* SEQTX_COMPRESSIVE_H */

#if (defined(SEQTX_IMPLEMENTATION) || defined(SEQTX_COMPRESSIVE_IMPLEMENTATION)) \
    && !defined(SEQTX_COMPRESSIVE_IMPLEMENTATION_DONE)
#define SEQTX_COMPRESSIVE_IMPLEMENTATION_DONE

#define STX_LOOPS
#include "seqtx.h"      /* included again for the inner-loop macros */

#include <stdio.h>
STX_STRICT_ON


// >>groups

/* Returns the number of groups that `rows` rows form if a group begins every `step`
   rows. The last group can be shorter. */
static size_t stx__comp_group_count(size_t rows, size_t step) {
    return rows / step + (rows % step != 0);
}

/* Returns the row of tap t of a group of stream b, or -1 if it is missing. Reads
   g->first and g->pad, which must be in host memory. */
static ptrdiff_t stx__comp_tap_row(const stx_comp_groups *g, size_t b, size_t group, size_t t) {
    const ptrdiff_t first = g->first ? g->first[b] : 0;
    ptrdiff_t row = g->at + (ptrdiff_t)(group * g->step + t);
    if (g->first) {
        size_t own = stx__comp_group_count(g->rows - (size_t)first, g->step);
        row += first + ((ptrdiff_t)own - (ptrdiff_t)g->groups) * (ptrdiff_t)g->step;
    }
    if (row < first || row >= (ptrdiff_t)g->rows) return -1;
    return g->pad && g->pad[b * g->rows + (size_t)row] ? -1 : row;
}

static const stx_real *stx__comp_row_ptr(const stx_comp_groups *g, const stx_real *rows, size_t b,
                                         size_t row) {
    return rows + b * (g->stride ? g->stride : g->rows * g->D) + row * g->D;
}

/* Arguments of stx__comp_unfold_part, _fold_part, _pool_part and _pick_part, which
   stx_parallel runs on several threads. */
typedef struct stx__comp_group_job {
    const stx_comp_groups *g;
    stx_real       *to;
    const stx_real *from;
    int             accumulate;     /* unfold only */
    int             max;            /* pool only */
    const stx_real *usage;          /* pick only, as is usage_batch_stride */
    size_t          usage_batch_stride;
} stx__comp_group_job;

static stx__comp_group_job stx__comp_group_job_of(const stx_comp_groups *g, stx_real *to,
                                                  const stx_real *from) {
    stx__comp_group_job j;
    memset(&j, 0, sizeof j);
    j.g = g;
    j.to = to;
    j.from = from;
    return j;
}

static void stx__comp_unfold_part(const stx_share *s, const void *job) {
    const stx__comp_group_job *j = (const stx__comp_group_job *)job;
    const stx_comp_groups *g = j->g;
    const size_t D = g->D;
    size_t n, c;
    for (n = s->begin; n < s->end; n++) {
        size_t b = n / (g->groups * g->taps);
        ptrdiff_t row = stx__comp_tap_row(g, b, n / g->taps % g->groups, n % g->taps);
        stx_real *y = j->to + n * D;
        const stx_real *from;
        if (row < 0) {
            if (!j->accumulate) memset(y, 0, D * sizeof *y);
            continue;
        }
        from = stx__comp_row_ptr(g, j->from, b, (size_t)row);
        if (j->accumulate)
            for (c = 0; c < D; c++) y[c] += from[c];
        else
            memcpy(y, from, D * sizeof *y);
    }
}

STX_DEF void stx_comp_unfold(stx_ctx *x, stx_real *y, const stx_real *rows,
                             const stx_comp_groups *g, int accumulate) {
    stx__comp_group_job j = stx__comp_group_job_of(g, y, rows);
    const size_t n = g->B * g->groups * g->taps;
    j.accumulate = accumulate;
    stx_parallel(x, n, n * g->D, stx__comp_unfold_part, &j);
}

static void stx__comp_fold_part(const stx_share *s, const void *job) {
    const stx__comp_group_job *j = (const stx__comp_group_job *)job;
    const stx_comp_groups *g = j->g;
    const size_t D = g->D;
    size_t n, i, c;
    for (n = s->begin; n < s->end; n++) {
        size_t b = n / g->rows, row = n % g->rows;
        stx_real *sum = j->to + n * D;
        memset(sum, 0, D * sizeof *sum);
        for (i = 0; i < g->groups * g->taps; i++) {
            const stx_real *y = j->from + (b * g->groups * g->taps + i) * D;
            if (stx__comp_tap_row(g, b, i / g->taps, i % g->taps) == (ptrdiff_t)row)
                for (c = 0; c < D; c++) sum[c] += y[c];
        }
    }
}

STX_DEF void stx_comp_fold(stx_ctx *x, stx_real *rows, const stx_real *y,
                           const stx_comp_groups *g) {
    stx__comp_group_job j = stx__comp_group_job_of(g, rows, y);
    stx_parallel(x, g->B * g->rows, g->B * g->groups * g->taps * g->D, stx__comp_fold_part, &j);
}

static void stx__comp_pool_part(const stx_share *s, const void *job) {
    const stx__comp_group_job *j = (const stx__comp_group_job *)job;
    const stx_comp_groups *g = j->g;
    const size_t D = g->D;
    size_t n, t, c;
    for (n = s->begin; n < s->end; n++) {
        size_t b = n / g->groups, found = 0;
        stx_real *y = j->to + n * D;
        memset(y, 0, D * sizeof *y);
        for (t = 0; t < g->taps; t++) {
            ptrdiff_t row = stx__comp_tap_row(g, b, n % g->groups, t);
            const stx_real *r;
            if (row < 0) continue;
            r = stx__comp_row_ptr(g, j->from, b, (size_t)row);
            if (!found++)
                memcpy(y, r, D * sizeof *y);
            else if (j->max)        /* NaN propagates */
                for (c = 0; c < D; c++) y[c] = r[c] > y[c] || r[c] != r[c] ? r[c] : y[c];
            else
                for (c = 0; c < D; c++) y[c] += r[c];
        }
        if (!j->max && found > 1)
            for (c = 0; c < D; c++) y[c] /= (stx_real)found;
    }
}

STX_DEF void stx_comp_pool(stx_ctx *x, stx_real *y, const stx_real *rows, const stx_comp_groups *g,
                           int max) {
    stx__comp_group_job j = stx__comp_group_job_of(g, y, rows);
    j.max = max;
    stx_parallel(x, g->B * g->groups, g->B * g->groups * g->taps * g->D, stx__comp_pool_part, &j);
}

/* Returns 1 if row i of a stream ranks before row k; see stx_comp_pick. */
static int stx__comp_more_used(const int32_t *pad, const stx_real *usage, size_t i, size_t k) {
    const int missing = pad && pad[i];
    stx_real use_i, use_k;
    if (missing != (pad && pad[k])) return !missing;
    if (missing) return i < k;
    use_i = usage[2 * i + 1] > 0 ? usage[2 * i] / usage[2 * i + 1] : 0;
    use_k = usage[2 * k + 1] > 0 ? usage[2 * k] / usage[2 * k + 1] : 0;
    return use_i > use_k || (!(use_k > use_i) && i > k);
}

static void stx__comp_pick_part(const stx_share *s, const void *job) {
    const stx__comp_group_job *j = (const stx__comp_group_job *)job;
    const stx_comp_groups *g = j->g;
    const size_t D = g->D;
    size_t b, i, k;
    for (b = s->begin; b < s->end; b++) {
        const size_t first = g->first ? (size_t)g->first[b] : 0;
        const size_t keep = g->first ? stx__comp_group_count(g->rows - first, g->step) : g->groups;
        const int32_t *pad = g->pad ? g->pad + b * g->rows : NULL;
        const stx_real *usage = j->usage + b * j->usage_batch_stride;
        size_t slot = g->groups - keep;
        stx_real *y = j->to + b * g->groups * D;
        memset(y, 0, g->groups * D * sizeof *y);
        for (i = first; i < g->rows && slot < g->groups; i++) {
            size_t rank = 0;
            for (k = first; k < g->rows; k++)
                rank += k != i && stx__comp_more_used(pad, usage, k, i);
            if (rank >= keep) continue;
            if (!pad || !pad[i])
                memcpy(y + slot * D, stx__comp_row_ptr(g, j->from, b, i), D * sizeof *y);
            slot++;
        }
    }
}

STX_DEF void stx_comp_pick(stx_ctx *x, stx_real *y, const stx_real *rows, const stx_real *usage,
                           size_t usage_batch_stride, const stx_comp_groups *g) {
    stx__comp_group_job j = stx__comp_group_job_of(g, y, rows);
    j.usage = usage;
    j.usage_batch_stride = usage_batch_stride;
    stx_parallel(x, g->B, g->B * g->rows * g->rows * 4, stx__comp_pick_part, &j);
}

static stx_comp_groups stx__comp_groups_of(size_t B, size_t rows, size_t groups, size_t taps,
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

/* Backward function of stx__comp_zero_rows and stx__comp_fold_op: zeroing rows is its
   own transpose, and the transpose of fold is unfold. */
static void stx__comp_back_by_unfold(stx_ctx *x, stx_tensor *y, stx_tensor *const *in, void *save) {
    const stx_comp_groups *g = (const stx_comp_groups *)save;
    int fresh;
    stx_real *d = stx_grad(x, in[0], &fresh);
    if (d) STX_RUN(x, stx_comp_unfold, (x, d, y->grad, g, !fresh));
}

/* Returns `a` (B,T,D) with zeros where pad (B,T) is nonzero, or `a` itself if pad is
   NULL. Uses stx_comp_unfold, with all rows of a stream as one group. */
static stx_tensor *stx__comp_zero_rows(stx_ctx *x, stx_tensor *a, const stx_ids *pad) {
    stx_comp_groups *g;
    stx_tensor *y;
    if (!stx_ok(x) || !a || !pad) return a;
    y = stx_new(x, a->dim[0], a->dim[1], a->dim[2], 0);
    g = (stx_comp_groups *)stx_step_host_bytes(x, sizeof *g);
    if (!y || !g) return NULL;
    *g = stx__comp_groups_of(a->dim[0], a->dim[1], 1, a->dim[1], a->dim[1], a->dim[2]);
    g->pad = pad->device;
    STX_RUN(x, stx_comp_unfold, (x, y->data, a->data, g, 0));
    stx_record(x, y, &a, 1, stx__comp_back_by_unfold, g);
    return y;
}

/* stx_comp_fold as an op: y (B,groups,taps D) -> rows (B,rows,D) */
static stx_tensor *stx__comp_fold_op(stx_ctx *x, stx_tensor *y, const stx_comp_groups *groups) {
    stx_comp_groups *g = (stx_comp_groups *)stx_step_host_bytes(x, sizeof *g);
    stx_tensor *rows = stx_new(x, groups->B, groups->rows, groups->D, 0);
    if (!stx_ok(x) || !y) return NULL;
    *g = *groups;
    STX_RUN(x, stx_comp_fold, (x, rows->data, y->data, g));
    stx_record(x, rows, &y, 1, stx__comp_back_by_unfold, g);
    return rows;
}


// >>usage

/* Sums the softmax weights of each key over all queries and averages the sums over the
   heads. */
STX_DEF void stx_comp_usage_plain(double *sum, const stx_attention_args *a, size_t first,
                                  size_t n, double *work) {
    STX__FP_SCOPE;
    const size_t keys = stx_attention_keys(a);
    size_t b, h, i, j;
    for (b = 0; b < a->B; b++) {
        for (j = 0; j < n; j++) {
            double *got = sum + b * n + j;
            *got = 0;
            for (h = 0; h < a->H; h++) {
                for (i = 0; i < a->T; i++) {
                    if (a->pad && a->pad[b * a->pad_batch_stride + a->S - a->T + i]) continue;
                    stx_attention_weights(a, b, h, i, work, work + keys);
                    *got += work[keys - a->N - a->S + first + j] / (double)a->H;
                }
            }
        }
    }
}

/* Computes score[j] = (q + u).k_j + (q + vb).pe_j for n keys. Dot products are summed
   in 16 lanes. Rows of k have a stride of a->kv_row_stride elements; pe can be NULL. */
STX_INNER void stx__comp_scores_any(int fma, stx_real *STX_RESTRICT score,
                                    const stx_attention_args *a, const stx_real *q,
                                    const stx_real *k, const stx_real *pe, size_t h, size_t n) {
    const size_t hd = a->D, pe_row_stride = a->pe_heads > 1 ? a->H * hd : hd;
    const stx_real *u = a->content_bias ? a->content_bias + h * hd : NULL;
    const stx_real *vb = a->position_bias ? a->position_bias + h * hd : NULL;
    size_t j, d, i;
    for (j = 0; j < n; j++) {
        const stx_real *kj = k + j * a->kv_row_stride, *pj = pe ? pe + j * pe_row_stride : NULL;
        stx_real sum[16] = {0};
        for (d = 0; d + 16 <= hd; d += 16) {
            for (i = 0; i < 16; i++) sum[i] = STX_FMA(fma, q[d + i], kj[d + i], sum[i]);
            if (u)
                for (i = 0; i < 16; i++) sum[i] = STX_FMA(fma, u[d + i], kj[d + i], sum[i]);
            if (pj)
                for (i = 0; i < 16; i++) sum[i] = STX_FMA(fma, q[d + i], pj[d + i], sum[i]);
            if (vb)
                for (i = 0; i < 16; i++) sum[i] = STX_FMA(fma, vb[d + i], pj[d + i], sum[i]);
        }
        for (; d < hd; d++) {
            stx_real qu = q[d] + (u ? u[d] : 0), qv = q[d] + (vb ? vb[d] : 0);
            sum[d % 16] += qu * kj[d] + (pj ? qv * pj[d] : 0);
        }
        for (i = 0; i < 8; i++) sum[i] += sum[i + 8];
        for (i = 0; i < 4; i++) sum[i] += sum[i + 4];
        score[j] = (sum[0] + sum[2]) + (sum[1] + sum[3]);
    }
}

STX_EACH_ISA(stx__comp_scores_any,
             (stx_real *STX_RESTRICT score, const stx_attention_args *a, const stx_real *q,
              const stx_real *k, const stx_real *pe, size_t h, size_t n),
             score, a, q, k, pe, h, n)

enum { STX__COMP_KEYS = 16 };       /* keys per work unit */

typedef struct stx__comp_usage_job {
    const stx_attention_args *a;
    stx_real *usage;
    size_t    usage_batch_stride, first, n;
} stx__comp_usage_job;

/* Adds to `sum` the softmax weights of keys j0 .. j1 - 1 for query i of head h. Each
   weight is recomputed from its score and the statistics of the softmax row. */
static void stx__comp_usage_query(stx_ctx *x, const stx__comp_usage_job *u, size_t b, size_t h,
                                  size_t i, size_t j0, size_t j1, double *sum) {
    const stx_attention_args *a = u->a;
    const size_t row = (b * a->H + h) * a->T + i;
    const size_t distance = a->S - a->T + i - u->first - j0;       /* from query i to key j0 */
    const stx_real *q = a->q + b * a->q_batch_stride + i * a->q_row_stride + h * a->D;
    const stx_real *k, *pe = NULL;
    stx_real score[STX__COMP_KEYS];
    size_t j = j0, p;
    if (a->pad && a->pad[b * a->pad_batch_stride + a->S - a->T + i]) return;

    if (distance > a->span) j += distance - a->span;    /* skip keys beyond the span */
    k = a->k + b * a->kv_batch_stride + (u->first + j) * a->kv_row_stride + h * a->D;
    /* row i of pe encodes distance P - 1 - i + delta_min; row p is the one for key j */
    p = a->P - 1 + (size_t)a->delta_min - distance + (j - j0);
    if (a->pe) pe = a->pe_heads > 1 ? a->pe + (p * a->H + h) * a->D : a->pe + p * a->D;
    if (j < j1) STX_CALL(x, stx__comp_scores_any, (score + (j - j0), a, q, k, pe, h, j1 - j));

    for (; j < j1; j++) {
        stx_real s = score[j - j0] * a->scale - a->row_max[row];
        if (a->pad && a->pad[b * a->pad_batch_stride + u->first + j]) continue;
        sum[j - j0] += (double)(stx_fast_exp(0, s) * a->inv_sum[row]);
    }
}

static void stx__comp_usage_part(const stx_share *s, const void *job) {
    const stx__comp_usage_job *u = (const stx__comp_usage_job *)job;
    const stx_attention_args *a = u->a;
    const size_t tiles = (u->n + STX__COMP_KEYS - 1) / STX__COMP_KEYS;
    size_t unit, h, i, j;
    for (unit = s->begin; unit < s->end; unit++) {
        const size_t b = unit / tiles, j0 = unit % tiles * STX__COMP_KEYS;
        const size_t j1 = STX_MIN(j0 + STX__COMP_KEYS, u->n);
        double sum[STX__COMP_KEYS] = {0};
        size_t queries = 0;
        for (i = 0; i < a->T; i++)
            queries += !a->pad || !a->pad[b * a->pad_batch_stride + a->S - a->T + i];
        for (h = 0; h < a->H; h++)
            for (i = 0; i < a->T; i++) stx__comp_usage_query(s->x, u, b, h, i, j0, j1, sum);
        for (j = j0; j < j1; j++) {
            stx_real *out = u->usage + b * u->usage_batch_stride + 2 * j;
            out[0] += (stx_real)(sum[j - j0] / (double)a->H);
            out[1] += (stx_real)queries;
        }
    }
}

STX_DEF void stx_comp_usage(stx_ctx *x, stx_real *usage, size_t usage_batch_stride,
                            const stx_attention_args *a, size_t first, size_t n) {
    stx__comp_usage_job u;
    const size_t tiles = (n + STX__COMP_KEYS - 1) / STX__COMP_KEYS;
    u.a = a;
    u.usage = usage;
    u.usage_batch_stride = usage_batch_stride;
    u.first = first;
    u.n = n;
    stx_parallel(x, a->B * tiles, a->B * n * a->T * a->H * a->D * 2, stx__comp_usage_part, &u);
}


// >>error

static void stx__comp_error_part(const stx_share *s, const void *job) {
    const stx_comp_error_args *e = (const stx_comp_error_args *)job;
    size_t n, c;
    for (n = s->begin; n < s->end; n++) {
        const stx_real *a = e->a + n * e->D, *target = e->target + n * e->D;
        double error = 0, square = 0;
        for (c = 0; c < e->D && !(e->skip && e->skip[n]); c++) {
            double diff = (double)a[c] - (double)target[c];
            error += diff * diff;
            square += (double)target[c] * (double)target[c];
        }
        e->work[2 * n] = error;
        e->work[2 * n + 1] = square;
    }
}

/* Computes loss = sum (a - target)^2 / count, and rel_error. */
STX_DEF void stx_comp_error_fwd(stx_ctx *x, const stx_comp_error_args *e) {
    STX__FP_SCOPE;
    double error = 0, square = 0;
    size_t n;
    stx_parallel(x, e->N, 4 * e->N * e->D, stx__comp_error_part, e);
    for (n = 0; n < e->N; n++) {
        error += e->work[2 * n];
        square += e->work[2 * n + 1];
    }
    *e->loss = (stx_real)(error / e->count);
    *e->rel_error = (stx_real)(square > 0 ? error / square : 0);
}

static void stx__comp_error_back_part(const stx_share *s, const void *job) {
    const stx_comp_error_args *e = (const stx_comp_error_args *)job;
    const stx_real scale = (stx_real)(2 * (double)e->dloss[0] / e->count);
    size_t n, c;
    for (n = s->begin; n < s->end; n++) {
        stx_real *da = e->da + n * e->D;
        const stx_real *a = e->a + n * e->D, *target = e->target + n * e->D;
        if (!e->accumulate) memset(da, 0, e->D * sizeof *da);
        for (c = 0; c < e->D && !(e->skip && e->skip[n]); c++)
            da[c] += scale * (a[c] - target[c]);
    }
}

/* Computes da = 2 dloss (a - target) / count. */
STX_DEF void stx_comp_error_bwd(stx_ctx *x, const stx_comp_error_args *e) {
    stx_parallel(x, e->N, 3 * e->N * e->D, stx__comp_error_back_part, e);
}

static void stx__comp_error_back(stx_ctx *x, stx_tensor *y, stx_tensor *const *in, void *save) {
    stx_comp_error_args *e = (stx_comp_error_args *)save;
    int fresh;
    e->da = stx_grad(x, in[0], &fresh);
    e->dloss = y->grad;
    e->accumulate = !fresh;
    if (e->da) STX_RUN(x, stx_comp_error_bwd, (x, e));
}

/* Returns the mean (1) of (a - target)^2 over the rows of `a` (..,D) that are not
   marked in skip. These rows have `count` elements in total. target is a constant.
   *rel_error receives the rel_error of stx_comp_error_fwd. */
static stx_tensor *stx__comp_error_op(stx_ctx *x, stx_tensor *a, stx_tensor *target,
                                      const stx_ids *skip, double count, stx_tensor **rel_error) {
    stx_tensor *y = stx_new_f32(x, 1, 0, 0, 0), *in[2];
    stx_comp_error_args *e = (stx_comp_error_args *)stx_step_host_bytes(x, sizeof *e);
    *rel_error = stx_new_f32(x, 1, 0, 0, 0);
    if (!stx_ok(x) || !a || !target) return NULL;
    memset(e, 0, sizeof *e);
    e->D = a->dim[a->ndim - 1];
    e->N = a->size / e->D;
    e->count = count;
    e->a = a->data;
    e->target = target->data;
    e->skip = skip ? skip->device : NULL;
    e->loss = y->data;
    e->rel_error = (*rel_error)->data;
    e->work = (double *)stx_step_device_bytes(x, stx_bytes_of(e->N, 2, sizeof *e->work));
    if (!e->work) return NULL;
    STX_RUN(x, stx_comp_error_fwd, (x, e));
    in[0] = a;
    in[1] = target;
    stx_record(x, y, in, 2, stx__comp_error_back, e);
    return y;
}


// >>gates

/* Gates are computed in blocks of columns. Each block is first computed into arrays on
   the stack, which cannot overlap the gate's arrays, so the compiler can vectorise the
   loops. */
enum { STX__COMP_BLOCK = 256 };

/* One block of columns in one row of a gate's arrays. In p, the three blocks of gru and
   the two halves of glu are D columns apart. */
typedef struct stx__comp_gate_block {
    const stx_real *x, *y, *p[4];       /* the row's inputs; NULL if the kind has none */
    size_t at, p_at;                    /* at: offset of the block in x, y and out. p_at:
                                           its offset in p */
} stx__comp_gate_block;

/* Gradients of a block. */
typedef struct stx__comp_gate_grads {
    stx_real dx[STX__COMP_BLOCK], dy[STX__COMP_BLOCK];
    stx_real dp0[STX__COMP_BLOCK], dp1[STX__COMP_BLOCK], dp2[STX__COMP_BLOCK];
} stx__comp_gate_grads;

STX_INNER stx__comp_gate_block stx__comp_gate_block_of(const stx_comp_gate_args *a, size_t r,
                                                       size_t c) {
    stx__comp_gate_block b;
    size_t width = a->D, k;
    if (a->kind == STX_COMP_GATE_GRU) width = 3 * a->D;
    if (a->kind == STX_COMP_GATE_GLU) width = 2 * a->D;
    b.at = r * a->D + c;
    b.p_at = r * width + c;
    b.x = a->x ? a->x + b.at : NULL;
    b.y = a->y ? a->y + b.at : NULL;
    for (k = 0; k < 4; k++) b.p[k] = a->p[k] ? a->p[k] + b.p_at : NULL;
    return b;
}

/* The activations of a block, n values each. z: the sigmoid; of glu, phi(p0), where phi
   is the standard normal distribution function. reset: of gru only, the second sigmoid.
   cand: the tanh, if there is one; of glu, phi's derivative. */
typedef struct stx__comp_gate_values {
    stx_real *reset;                    /* z + n */
    stx_real z[2 * STX__COMP_BLOCK], cand[STX__COMP_BLOCK];
} stx__comp_gate_values;

/* Computes *v. Each activation has one loop for all kinds of gate: without fused
   multiply-adds, its code is long (STX_FMA). */
STX_INNER void stx__comp_gate_values_any(int fma, const stx_comp_gate_args *a,
                                         const stx__comp_gate_block *b, size_t n,
                                         stx__comp_gate_values *v) {
    const stx_real *p0 = b->p[0], *p1 = b->p[1], *p2 = b->p[2], *p3 = b->p[3];
    const int gru = a->kind == STX_COMP_GATE_GRU;
    const size_t D = a->D, second = gru ? D : 0;
    size_t i;
    v->reset = v->z + n;
    if (a->kind == STX_COMP_GATE_GLU) {
        for (i = 0; i < n; i++) v->z[i] = stx_fast_phi(fma, p0[i], &v->cand[i]);
        return;
    }
    if (gru || a->kind == STX_COMP_GATE_GTRXL || a->kind == STX_COMP_GATE_RESET)
        for (i = 0; i < n; i++) v->z[i] = p0[second + i] + p1[second + i];
    else
        memcpy(v->z, p0, n * sizeof *v->z);
    for (i = 0; gru && i < n; i++) v->reset[i] = p0[i] + p1[i];
    for (i = 0; i < (gru ? 2 * n : n); i++) v->z[i] = stx_fast_sigmoid(fma, v->z[i]);
    switch (a->kind) {
    case STX_COMP_GATE_GRU:
        for (i = 0; i < n; i++)
            v->cand[i] = STX_FMA(fma, v->reset[i], p1[2 * D + i], p0[2 * D + i]);
        break;
    case STX_COMP_GATE_SIGTANH: memcpy(v->cand, p1, n * sizeof *v->cand); break;
    case STX_COMP_GATE_GTRXL:
        for (i = 0; i < n; i++) v->cand[i] = p2[i] + p3[i];
        break;
    default: return;
    }
    for (i = 0; i < n; i++) v->cand[i] = stx_fast_tanh(fma, v->cand[i]);
}

/* The forward pass, by the formulas of stx_comp_gate_args. */
STX_INNER void stx__comp_gate_fwd_any(int fma, const stx_comp_gate_args *a,
                                      const stx__comp_gate_block *b, size_t n,
                                      const stx__comp_gate_values *v) {
    const stx_real *x = b->x, *y = b->y, *p0 = b->p[0], *z = v->z, *cand = v->cand;
    stx_real out[STX__COMP_BLOCK];
    size_t i;
    switch (a->kind) {
    case STX_COMP_GATE_GRU:
        for (i = 0; i < n; i++) out[i] = STX_FMA(fma, z[i], x[i] - cand[i], cand[i]);
        break;
    case STX_COMP_GATE_INPUT:
        for (i = 0; i < n; i++) out[i] = STX_FMA(fma, z[i], x[i], y[i]);
        break;
    case STX_COMP_GATE_OUTPUT:
        for (i = 0; i < n; i++) out[i] = STX_FMA(fma, z[i], y[i], x[i]);
        break;
    case STX_COMP_GATE_HIGHWAY:
        for (i = 0; i < n; i++) out[i] = STX_FMA(fma, z[i], x[i] - y[i], y[i]);
        break;
    case STX_COMP_GATE_SIGTANH:
        for (i = 0; i < n; i++) out[i] = STX_FMA(fma, z[i], cand[i], x[i]);
        break;
    case STX_COMP_GATE_GTRXL:
        for (i = 0; i < n; i++) out[i] = STX_FMA(fma, z[i], cand[i] - x[i], x[i]);
        break;
    case STX_COMP_GATE_RESET:
        for (i = 0; i < n; i++) out[i] = z[i] * x[i];
        break;
    case STX_COMP_GATE_GLU:
        for (i = 0; i < n; i++) out[i] = p0[i] * z[i] * p0[a->D + i];
        break;
    default:    /* STX_COMP_GATE_MOGRIFY */
        for (i = 0; i < n; i++) out[i] = 2 * z[i] * x[i];
    }
    memcpy(a->out + b->at, out, n * sizeof *out);
}

STX_INNER void stx__comp_gate_put(stx_real *to, const stx_real *v, size_t n, int accumulate) {
    size_t i;
    if (!to) return;
    if (accumulate)
        for (i = 0; i < n; i++) to[i] += v[i];
    else
        memcpy(to, v, n * sizeof *v);
}

/* The backward pass of gru, with g = dout:
       dcand = g (1 - z) (1 - cand^2)     dz = g (x - cand) z (1 - z)
       dreset = dcand p1_cand reset (1 - reset)
       dp0 = (dreset, dz, dcand)          dp1 = (dreset, dz, reset dcand)      dx = g z */
STX_INNER void stx__comp_gru_back_any(int fma, const stx_comp_gate_args *a,
                                      const stx__comp_gate_block *b, size_t n,
                                      const stx__comp_gate_values *v) {
    const size_t D = a->D;
    const stx_real *x = b->x, *g = a->dout + b->at, *p1 = b->p[1];
    stx_real dx[STX__COMP_BLOCK], dreset[STX__COMP_BLOCK], dz[STX__COMP_BLOCK];
    stx_real dcand[STX__COMP_BLOCK], dcand1[STX__COMP_BLOCK];
    size_t i, k;
    for (i = 0; i < n; i++) {
        const stx_real reset = v->reset[i], z = v->z[i], cand = v->cand[i];
        dx[i] = g[i] * z;
        dcand[i] = g[i] * (1 - z) * STX_FMA(fma, -cand, cand, 1);
        dz[i] = g[i] * (x[i] - cand) * z * (1 - z);
        dreset[i] = dcand[i] * p1[2 * D + i] * reset * (1 - reset);
        dcand1[i] = dcand[i] * reset;
    }
    for (k = 0; k < 2; k++) {
        stx_real *dp = a->dp[k] + b->p_at;
        stx__comp_gate_put(dp, dreset, n, a->accumulate);
        stx__comp_gate_put(dp + D, dz, n, a->accumulate);
        stx__comp_gate_put(dp + 2 * D, k ? dcand1 : dcand, n, a->accumulate);
    }
    stx__comp_gate_put(a->dx + b->at, dx, n, a->accumulate);
}

/* The backward pass of glu, with g = dout:
       dp0_1 = g p0_2 (phi + p0_1 density)      dp0_2 = g p0_1 phi */
STX_INNER void stx__comp_glu_back_any(int fma, const stx_comp_gate_args *a,
                                      const stx__comp_gate_block *b, size_t n,
                                      const stx__comp_gate_values *v) {
    const stx_real *g = a->dout + b->at, *p0 = b->p[0], *phi = v->z;
    stx_real d1[STX__COMP_BLOCK], d2[STX__COMP_BLOCK];
    size_t i;
    for (i = 0; i < n; i++) {
        d1[i] = g[i] * p0[a->D + i] * STX_FMA(fma, p0[i], v->cand[i], phi[i]);
        d2[i] = g[i] * p0[i] * phi[i];
    }
    stx__comp_gate_put(a->dp[0] + b->p_at, d1, n, a->accumulate);
    stx__comp_gate_put(a->dp[0] + b->p_at + a->D, d2, n, a->accumulate);
}

/* The backward pass of the other kinds, where g = dout and z' = z (1 - z):
       input     dx = g z          dy = g            dp0 = g x z'
       output    dx = g            dy = g z          dp0 = g y z'
       highway   dx = g z          dy = g (1 - z)    dp0 = g (x - y) z'
       mogrify   dx = 2 g z                          dp0 = 2 g x z'
       sigtanh   dx = g            dp0 = g cand z'                dp1 = g z (1 - cand^2)
       gtrxl     dx = g (1 - z)    dp0 = dp1 = g (cand - x) z'
                                   dp2 = dp3 = g z (1 - cand^2)
       reset     dx = g z          dp0 = dp1 = g x z' */
STX_INNER void stx__comp_gate_grads_any(int fma, int kind, const stx__comp_gate_block *b,
                                        const stx_real *g, size_t n,
                                        const stx__comp_gate_values *v, stx__comp_gate_grads *d) {
    const stx_real *x = b->x, *y = b->y, *cand = v->cand;
    size_t i;
    switch (kind) {
    case STX_COMP_GATE_INPUT:
        for (i = 0; i < n; i++) {
            const stx_real z = v->z[i];
            d->dx[i] = g[i] * z;
            d->dy[i] = g[i];
            d->dp0[i] = g[i] * x[i] * z * (1 - z);
        }
        break;
    case STX_COMP_GATE_OUTPUT:
        for (i = 0; i < n; i++) {
            const stx_real z = v->z[i];
            d->dx[i] = g[i];
            d->dy[i] = g[i] * z;
            d->dp0[i] = g[i] * y[i] * z * (1 - z);
        }
        break;
    case STX_COMP_GATE_HIGHWAY:
        for (i = 0; i < n; i++) {
            const stx_real z = v->z[i];
            d->dx[i] = g[i] * z;
            d->dy[i] = g[i] * (1 - z);
            d->dp0[i] = g[i] * (x[i] - y[i]) * z * (1 - z);
        }
        break;
    case STX_COMP_GATE_SIGTANH:
        for (i = 0; i < n; i++) {
            const stx_real z = v->z[i];
            d->dx[i] = g[i];
            d->dp0[i] = g[i] * cand[i] * z * (1 - z);
            d->dp1[i] = g[i] * z * STX_FMA(fma, -cand[i], cand[i], 1);
        }
        break;
    case STX_COMP_GATE_GTRXL:
        for (i = 0; i < n; i++) {
            const stx_real z = v->z[i];
            d->dx[i] = g[i] * (1 - z);
            d->dp0[i] = d->dp1[i] = g[i] * (cand[i] - x[i]) * z * (1 - z);
            d->dp2[i] = g[i] * z * STX_FMA(fma, -cand[i], cand[i], 1);
        }
        break;
    case STX_COMP_GATE_RESET:
        for (i = 0; i < n; i++) {
            const stx_real z = v->z[i];
            d->dx[i] = g[i] * z;
            d->dp0[i] = d->dp1[i] = g[i] * x[i] * z * (1 - z);
        }
        break;
    default:    /* STX_COMP_GATE_MOGRIFY */
        for (i = 0; i < n; i++) {
            const stx_real z = v->z[i];
            d->dx[i] = 2 * g[i] * z;
            d->dp0[i] = 2 * g[i] * x[i] * z * (1 - z);
        }
    }
}

STX_INNER void stx__comp_gate_back_any(int fma, const stx_comp_gate_args *a,
                                       const stx__comp_gate_block *b, size_t n,
                                       const stx__comp_gate_values *v) {
    const int add = a->accumulate;
    stx__comp_gate_grads d;
    if (a->kind == STX_COMP_GATE_GRU) {
        stx__comp_gru_back_any(fma, a, b, n, v);
        return;
    }
    if (a->kind == STX_COMP_GATE_GLU) {
        stx__comp_glu_back_any(fma, a, b, n, v);
        return;
    }
    stx__comp_gate_grads_any(fma, a->kind, b, a->dout + b->at, n, v, &d);
    stx__comp_gate_put(a->dx + b->at, d.dx, n, add);
    stx__comp_gate_put(a->dp[0] + b->p_at, d.dp0, n, add);
    if (b->y) stx__comp_gate_put(a->dy + b->at, d.dy, n, add);
    if (b->p[1]) stx__comp_gate_put(a->dp[1] + b->p_at, d.dp1, n, add);
    if (b->p[2]) stx__comp_gate_put(a->dp[2] + b->p_at, d.dp2, n, add);
    if (b->p[3]) stx__comp_gate_put(a->dp[3] + b->p_at, d.dp2, n, add);
}

STX_INNER void stx__comp_gate_row_any(int fma, const stx_comp_gate_args *a, size_t r, int back) {
    size_t c;
    for (c = 0; c < a->D; c += STX__COMP_BLOCK) {
        const size_t n = STX_MIN(a->D - c, (size_t)STX__COMP_BLOCK);
        const stx__comp_gate_block b = stx__comp_gate_block_of(a, r, c);
        stx__comp_gate_values v;
        stx__comp_gate_values_any(fma, a, &b, n, &v);
        if (back)
            stx__comp_gate_back_any(fma, a, &b, n, &v);
        else
            stx__comp_gate_fwd_any(fma, a, &b, n, &v);
    }
}

STX_EACH_ISA(stx__comp_gate_row_any, (const stx_comp_gate_args *a, size_t r, int back), a, r, back)

static void stx__comp_gate_part(const stx_share *s, const void *job) {
    const stx_comp_gate_args *a = (const stx_comp_gate_args *)job;
    size_t r;
    for (r = s->begin; r < s->end; r++) STX_CALL(s->x, stx__comp_gate_row_any, (a, r, 0));
}

static void stx__comp_gate_back_part(const stx_share *s, const void *job) {
    const stx_comp_gate_args *a = (const stx_comp_gate_args *)job;
    size_t r;
    for (r = s->begin; r < s->end; r++) STX_CALL(s->x, stx__comp_gate_row_any, (a, r, 1));
}

STX_DEF void stx_comp_gate_fwd(stx_ctx *x, const stx_comp_gate_args *a) {
    stx_parallel(x, a->N, a->N * a->D * 20, stx__comp_gate_part, a);
}

STX_DEF void stx_comp_gate_bwd(stx_ctx *x, const stx_comp_gate_args *a) {
    stx_linear_bwd_args b;
    int k;
    stx_parallel(x, a->N, a->N * a->D * 40, stx__comp_gate_back_part, a);

    memset(&b, 0, sizeof b);
    b.N = a->N;
    b.O = a->D * (a->kind == STX_COMP_GATE_GLU ? 2 : 3);
    for (k = 0; k < 2; k++) {
        b.da = a->dp[k];
        b.db = a->db[k];
        if (b.db) stx_linear_bwd(x, &b);
    }
}

/* Inputs of the gate op: x, y, p0 .. p3, and, for kinds whose kernel computes the bias
   gradients, the biases that were added to p0 and p1. Inputs that the kind does not use
   are NULL. */
enum {
    STX__COMP_IN_X    = 0,
    STX__COMP_IN_Y    = 1,
    STX__COMP_IN_P    = 2,
    STX__COMP_IN_BIAS = 6,
    STX__COMP_INPUTS  = 8
};

static void stx__comp_gate_back(stx_ctx *x, stx_tensor *out, stx_tensor *const *in, void *save) {
    stx_comp_gate_args *a = (stx_comp_gate_args *)save;
    stx_real *d[STX__COMP_IN_BIAS] = {NULL};
    int fresh[STX__COMP_IN_BIAS] = {0}, i;

    /* `accumulate` applies to all gradients: if the kernel must add to one of them, the
       others are set to 0 first */
    a->accumulate = 0;
    for (i = 0; i < STX__COMP_IN_BIAS; i++) {
        if (!in[i]) continue;
        d[i] = stx_grad(x, in[i], &fresh[i]);
        if (!d[i]) {            /* this gradient is not required, so compute it into
                                   scratch memory */
            d[i] = stx_step_activations(x, in[i]->size);
            fresh[i] = 1;
        }
        if (!fresh[i]) a->accumulate = 1;
    }
    if (!stx_ok(x)) return;
    for (i = 0; i < STX__COMP_IN_BIAS && a->accumulate; i++)
        if (d[i] && fresh[i]) STX_RUN(x, stx_fill, (x, d[i], in[i]->size, 0));

    a->dout = out->grad;
    a->dx = d[STX__COMP_IN_X];
    a->dy = d[STX__COMP_IN_Y];
    for (i = 0; i < 4; i++) a->dp[i] = d[STX__COMP_IN_P + i];
    a->defer_db = 1;
    for (i = 0; i < 2; i++) {
        const stx_tensor *bias = in[STX__COMP_IN_BIAS + i];
        a->db[i] = bias ? stx_grad(x, in[STX__COMP_IN_BIAS + i], NULL) : NULL;
        if (a->db[i]) a->defer_db = a->defer_db && (bias->is_param || bias->view_of);
    }
    if (!stx_ok(x)) return;
    STX_RUN(x, stx_comp_gate_bwd, (x, a));
}

/* Creates the op for the elementwise part of a gate and returns its output (B,T,D).
   in[] is indexed by STX__COMP_IN_X etc. */
static stx_tensor *stx__comp_gate_op(stx_ctx *x, int kind, stx_tensor *const *in) {
    const stx_tensor *shape = in[kind == STX_COMP_GATE_GLU ? STX__COMP_IN_P : STX__COMP_IN_X];
    stx_comp_gate_args *a;
    stx_tensor *out;
    size_t D;
    int i;
    if (!stx_ok(x) || !shape) return NULL;
    D = shape->dim[2] / (kind == STX_COMP_GATE_GLU ? 2 : 1);
    a = (stx_comp_gate_args *)stx_step_host_bytes(x, sizeof *a);
    out = stx_new(x, shape->dim[0], shape->dim[1], D, 0);
    if (!a || !out) return NULL;

    memset(a, 0, sizeof *a);
    a->kind = kind;
    a->D = D;
    a->N = shape->dim[0] * shape->dim[1];
    a->x = in[STX__COMP_IN_X] ? in[STX__COMP_IN_X]->data : NULL;
    a->y = in[STX__COMP_IN_Y] ? in[STX__COMP_IN_Y]->data : NULL;
    for (i = 0; i < 4; i++) {
        const stx_tensor *p = in[STX__COMP_IN_P + i];
        a->p[i] = p ? p->data : NULL;
    }
    a->out = out->data;
    STX_RUN(x, stx_comp_gate_fwd, (x, a));
    stx_record(x, out, in, STX__COMP_INPUTS, stx__comp_gate_back, a);
    return out;
}


// >>compression methods

/* conv: new_g = bias + sum_t W_t old[g r + t]. The taps of a group are adjacent, so the
   convolution is a matmul. `rows` holds G groups of e->taps rows. */
static stx_tensor *stx__comp_strided(stx_ctx *x, const stx_comp_evicted *e, stx_tensor *rows,
                                     stx_tensor *w, stx_tensor *bias) {
    stx_tensor *f = rows ? stx_reshape(x, rows, e->B, e->G, e->taps * e->D, 0) : NULL;
    return stx_linear(x, f, w, bias, STX_ACT_NONE);
}

static size_t stx__comp_conv_weights(void *user, const stx_comp_desc *d, size_t l, stx_weight *w) {
    const size_t taps = d->ratio + d->overlap;
    const double bound = 1 / sqrt((double)d->dim * (double)taps);
    const stx_weight weight = {"weight", d->dim, taps * d->dim, STX_UNIFORM, bound, 0};
    const stx_weight bias = {"bias", d->dim, 0, STX_UNIFORM, bound, 0};
    (void)user;
    (void)l;
    w[0] = weight;
    if (!d->conv_no_bias) w[1] = bias;
    return d->conv_no_bias ? 1 : 2;
}

static stx_tensor *stx__comp_conv(stx_ctx *x, void *user, const stx_comp_evicted *e) {
    (void)user;
    return stx__comp_strided(x, e, e->rows, e->w[0], e->desc->conv_no_bias ? NULL : e->w[1]);
}

static size_t stx__comp_dilated_weights(void *user, const stx_comp_desc *d, size_t l,
                                        stx_weight *w) {
    static const char *const name[STX_COMP_MAX_DILATIONS] = {
        "dilated.0.weight", "dilated.1.weight", "dilated.2.weight", "dilated.3.weight",
        "dilated.4.weight", "dilated.5.weight", "dilated.6.weight", "dilated.7.weight"
    };
    const size_t D = d->dim, r = d->ratio;
    const stx_weight last = {"weight", D, r * D, STX_UNIFORM, 1 / sqrt((double)D * (double)r), 0};
    size_t i;
    (void)user;
    (void)l;
    for (i = 0; i < d->dilations; i++) {
        const stx_weight weight = {name[i], D, 2 * D, STX_UNIFORM, 1 / sqrt(2 * (double)D), 0};
        w[i] = weight;
    }
    w[i] = last;
    return d->dilations + 1;
}

/* dilated: f[i] <- relu(K0 f[i] + K1 f[i + dilation]) for each dilation, then conv */
static stx_tensor *stx__comp_dilated(stx_ctx *x, void *user, const stx_comp_evicted *e) {
    const stx_comp_desc *d = e->desc;
    stx_tensor *f = e->rows;
    size_t k;
    (void)user;
    for (k = 0; f && k < d->dilations; k++) {
        const size_t rows = f->dim[1];
        stx_tensor *shifted = stx_slice(x, f, d->dilation[k], rows);
        stx_tensor *pair = stx_slice(x, f, 0, rows - d->dilation[k]);
        pair = stx_concat_channels(x, pair, shifted);
        f = stx_linear(x, pair, e->w[k], NULL, STX_ACT_RELU);
    }
    return stx__comp_strided(x, e, f, e->w[d->dilations], NULL);
}

static stx_tensor *stx__comp_pooled(stx_ctx *x, const stx_comp_evicted *e, int max) {
    stx_tensor *y = stx_new(x, e->B, e->G, e->D, 0);
    if (y) STX_RUN(x, stx_comp_pool, (x, y->data, e->old.data, &e->groups, max));
    return y;
}

static stx_tensor *stx__comp_max(stx_ctx *x, void *user, const stx_comp_evicted *e) {
    (void)user;
    return stx__comp_pooled(x, e, 1);
}

static stx_tensor *stx__comp_mean(stx_ctx *x, void *user, const stx_comp_evicted *e) {
    (void)user;
    return stx__comp_pooled(x, e, 0);
}

static stx_tensor *stx__comp_used(stx_ctx *x, void *user, const stx_comp_evicted *e) {
    stx_tensor *y = stx_new(x, e->B, e->G, e->D, 0);
    const size_t usage_batch_stride = 2 * e->usage->dim[1];
    (void)user;
    if (y)
        STX_RUN(x, stx_comp_pick,
                (x, y->data, e->old.data, e->usage->data, usage_batch_stride, &e->groups));
    return y;
}

/* The built-in methods, in the order of STX_COMP_COMPRESS_CONV .. _DROP */
static const stx_comp_method stx__comp_methods[STX_COMP_COMPRESS_CUSTOM] = {
    {"conv", stx__comp_conv_weights, stx__comp_conv, NULL, STX_COMP_ROWS_GROUPED},
    {"dilated", stx__comp_dilated_weights, stx__comp_dilated, NULL, STX_COMP_ROWS_CONSECUTIVE},
    {"max", NULL, stx__comp_max, NULL, STX_COMP_ROWS_IN_PLACE},
    {"mean", NULL, stx__comp_mean, NULL, STX_COMP_ROWS_IN_PLACE},
    {"used", NULL, stx__comp_used, NULL, STX_COMP_ROWS_IN_PLACE},
    {"drop", NULL, NULL, NULL, STX_COMP_ROWS_IN_PLACE}
};

/* Returns the method that a desc with a valid `compress` selects. */
static const stx_comp_method *stx__comp_method_of(const stx_comp_desc *d) {
    return d->custom ? d->custom : &stx__comp_methods[d->compress];
}

/* Describes the weights of layer l in w (STX_MAX_WEIGHTS). Returns their number. */
static size_t stx__comp_weights(const stx_comp_desc *d, size_t l, stx_weight *w) {
    const stx_comp_method *method = stx__comp_method_of(d);
    memset(w, 0, STX_MAX_WEIGHTS * sizeof *w);
    return method->weights ? method->weights(method->user, d, l, w) : 0;
}


// >>creation

static int stx__comp_bad(stx_ctx *x, const char *field, double got, const char *expected) {
    return stx_bad_value(x, "stx_comp_create", field, got, expected);
}

static int stx__comp_in_range(stx_ctx *x, const char *field, size_t got, size_t least, int bits) {
    if (got >= least && got <= (size_t)1 << bits) return 1;
    stx_fail(x, STX_ERR_ARG, "stx_comp_create: %s: expected %zu to 2^%d, got %zu", field, least,
             bits, got);
    return 0;
}

/* Returns 1 if the field's value `got` is 0, or if the model allows other values.
   Otherwise, sets an error and returns 0. */
static int stx__comp_allowed(stx_ctx *x, const char *field, double got, int allowed,
                             const char *expected) {
    return got == 0 || allowed || stx__comp_bad(x, field, got, expected);
}

static int stx__comp_dropout(stx_ctx *x, const char *field, double p) {
    return (p >= 0 && p < 1) || stx__comp_bad(x, field, p, "at least 0 and below 1");
}

/* Computes M and C of layer l from a desc with the default sizes filled in. Returns 1
   if the layer has a memory. */
static int stx__comp_sizes(const stx_comp_desc *d, size_t l, size_t *M, size_t *C) {
    int memory = !d->no_memory && !d->memory_layers;
    size_t i;
    for (i = 0; d->memory_layers && i < d->memory_count; i++)
        memory |= d->memory_layers[i] == l + 1;
    *M = *C = 0;
    if (!memory) return 0;

    if (d->mems)
        *M = d->mems[l];
    else if (d->mem != STX_COMP_NO_ROWS)
        *M = d->mem;
    if (d->compress == STX_COMP_COMPRESS_DROP) return 1;
    if (d->cmems)
        *C = d->cmems[l];
    else if (d->cmem != STX_COMP_NO_ROWS)
        *C = d->cmem;
    return 1;
}

static int stx__comp_gate_has_bias(int gate) {
    return gate != STX_COMP_GATE_RESIDUAL && gate != STX_COMP_GATE_INPUT;
}

static size_t stx__comp_taps(const stx_comp_desc *d) {
    const int consecutive = stx__comp_method_of(d)->layout == STX_COMP_ROWS_CONSECUTIVE;
    return d->ratio + (consecutive ? 0 : d->overlap);
}

/* Returns the number of rows before a group that the compression also reads. */
static size_t stx__comp_rows_before(const stx_comp_desc *d) {
    size_t i, n = 0;
    for (i = 0; i < d->dilations; i++) n += d->dilation[i];
    return d->compress == STX_COMP_COMPRESS_DILATED ? n : d->overlap;
}

static int stx__comp_check_sizes(stx_ctx *x, stx_comp_desc *d) {
    if (!stx__comp_in_range(x, "layers", d->layers, 1, 12)) return 0;
    if (!stx__comp_in_range(x, "dim", d->dim, 1, 29)) return 0;
    if (!stx__comp_in_range(x, "emb", d->emb, 1, 29)) return 0;
    if (!stx__comp_in_range(x, "segment", d->segment, 1, 31)) return 0;
    if (!d->inner) d->inner = 4 * d->dim;
    if (!stx__comp_in_range(x, "inner", d->inner, 1, 31)) return 0;

    if (d->heads > 256 || d->dim % d->heads) {
        stx_fail(x, STX_ERR_ARG,
                 "stx_comp_create: heads: expected a divisor of dim (%zu) that is at most 256, "
                 "got %zu", d->dim, d->heads);
        return 0;
    }
    if (d->heads % d->kv_heads)
        return stx__comp_bad(x, "kv_heads", (double)d->kv_heads, "a divisor of heads");
    if (d->recurrence < 0 || d->recurrence > STX_COMP_STORE_ROTATE)
        return stx__comp_bad(x, "recurrence", d->recurrence,
                             "STX_COMP_STORE_INPUT, _OUTPUT or _ROTATE");
    if (d->positions != STX_COMP_POSITIONS_LEARNED && d->positions != STX_COMP_POSITIONS_XL)
        return stx__comp_bad(x, "positions", d->positions, "STX_COMP_POSITIONS_LEARNED or _XL");
    if (d->positions == STX_COMP_POSITIONS_XL && d->dim % 2)
        return stx__comp_bad(x, "dim", (double)d->dim, "an even number with STX_COMP_POSITIONS_XL");
    return 1;
}

/* Checks that memory_layers contains distinct layer numbers from 1 to `layers`. */
static int stx__comp_check_layers(stx_ctx *x, const stx_comp_desc *d) {
    size_t i, k;
    if (d->no_memory && d->memory_layers)
        return stx__comp_bad(x, "no_memory", d->no_memory, "0 if memory_layers is set");
    if (!d->memory_layers != !d->memory_count)
        return stx__comp_bad(x, "memory_count", (double)d->memory_count,
                             "the number of elements in memory_layers "
                             "(for a model without memory, set no_memory)");
    for (i = 0; i < d->memory_count; i++) {
        const size_t layer = d->memory_layers[i];
        if (!layer || layer > d->layers) {
            stx_fail(x, STX_ERR_ARG,
                     "stx_comp_create: memory_layers: expected layers from 1 to %zu, got %zu",
                     d->layers, layer);
            return 0;
        }
        for (k = 0; k < i; k++) {
            if (d->memory_layers[k] != layer) continue;
            stx_fail(x, STX_ERR_ARG,
                     "stx_comp_create: memory_layers: expected each layer at most once, "
                     "got %zu twice", layer);
            return 0;
        }
    }
    return 1;
}

static int stx__comp_check_memory(stx_ctx *x, const stx_comp_desc *d) {
    const size_t most = (size_t)1 << 31;
    size_t l, M, C, first = SIZE_MAX, first_M = 0, first_C = 0;
    if (!stx__comp_check_layers(x, d)) return 0;
    if (d->mem > most && d->mem != STX_COMP_NO_ROWS)
        return stx__comp_bad(x, "mem", (double)d->mem, "at most 2^31, or STX_COMP_NO_ROWS");
    if (d->cmem > most && d->cmem != STX_COMP_NO_ROWS)
        return stx__comp_bad(x, "cmem", (double)d->cmem, "at most 2^31, or STX_COMP_NO_ROWS");

    for (l = 0; l < d->layers; l++) {
        if (!stx__comp_sizes(d, l, &M, &C)) continue;
        if (!stx__comp_in_range(x, "mems", M, 0, 31)) return 0;
        if (!stx__comp_in_range(x, "cmems", C, 0, 31)) return 0;
        if (first == SIZE_MAX) {
            first = l;
            first_M = M;
            first_C = C;
        }
        if (d->recurrence == STX_COMP_STORE_ROTATE && (M != first_M || C != first_C)) {
            stx_fail(x, STX_ERR_ARG,
                     "stx_comp_create: mems, cmems: expected equal sizes for all memory layers "
                     "with STX_COMP_STORE_ROTATE, got M = %zu and C = %zu in layer %zu, "
                     "but M = %zu and C = %zu in layer %zu (layers counted from 1)",
                     first_M, first_C, first + 1, M, C, l + 1);
            return 0;
        }
    }
    return 1;
}

/* Checks a custom method, which selects STX_COMP_COMPRESS_CUSTOM. */
static int stx__comp_check_custom(stx_ctx *x, stx_comp_desc *d) {
    if (d->compress != 0 && d->compress != STX_COMP_COMPRESS_CUSTOM)
        return stx__comp_bad(x, "compress", d->compress, "0 if custom is set");
    d->compress = STX_COMP_COMPRESS_CUSTOM;
    if (!d->custom->forward) {
        stx_fail(x, STX_ERR_ARG, "stx_comp_create: custom: forward: expected a function that "
                                 "returns the new rows (B,G,D), got NULL");
        return 0;
    }
    if (d->custom->layout < 0 || d->custom->layout > STX_COMP_ROWS_IN_PLACE)
        return stx__comp_bad(x, "custom: layout", d->custom->layout,
                             "STX_COMP_ROWS_GROUPED, _CONSECUTIVE or _IN_PLACE");
    return 1;
}

/* Checks the weights of a custom method in all layers with compressed memory. */
static int stx__comp_check_weights(stx_ctx *x, const stx_comp_desc *d) {
    stx_weight w[STX_MAX_WEIGHTS];
    size_t l, M, C;
    for (l = 0; d->custom && l < d->layers; l++) {
        stx__comp_sizes(d, l, &M, &C);
        if (C && !stx_weights_check(x, "stx_comp_create: custom", w, stx__comp_weights(d, l, w)))
            return 0;
    }
    return 1;
}

static int stx__comp_check_compress(stx_ctx *x, stx_comp_desc *d) {
    const int conv = d->compress == STX_COMP_COMPRESS_CONV && !d->custom;
    const int dilated = d->compress == STX_COMP_COMPRESS_DILATED;
    size_t i;
    if (d->custom && !stx__comp_check_custom(x, d)) return 0;
    if (d->compress < 0 || (d->compress > STX_COMP_COMPRESS_DROP && !d->custom))
        return stx__comp_bad(x, "compress", d->compress,
                             "STX_COMP_COMPRESS_CONV to _DROP, unless custom is set");
    if (d->aux < 0 || d->aux > STX_COMP_AUX_NONE)
        return stx__comp_bad(x, "aux", d->aux, "STX_COMP_AUX_AUTO to _NONE");
    if (!stx__comp_in_range(x, "ratio", d->ratio, 1, 20)) return 0;
    if (!stx__comp_in_range(x, "overlap", d->overlap, 0, 20)) return 0;
    if (!stx__comp_in_range(x, "dilations", d->dilations, 0, 3)) return 0;
    if (!stx__comp_in_range(x, "bptt", d->bptt, 0, 10)) return 0;
    if (!stx__comp_allowed(x, "overlap", (double)d->overlap, conv || d->custom,
                           "0 unless compress is STX_COMP_COMPRESS_CONV")) return 0;
    if (!stx__comp_allowed(x, "conv_no_bias", d->conv_no_bias, conv,
                           "0 unless compress is STX_COMP_COMPRESS_CONV")) return 0;
    if (!stx__comp_allowed(x, "dilations", (double)d->dilations, dilated,
                           "0 unless compress is STX_COMP_COMPRESS_DILATED")) return 0;
    if (!stx__comp_allowed(x, "bptt", (double)d->bptt, d->aux == STX_COMP_AUX_BPTT,
                           "0 unless aux is STX_COMP_AUX_BPTT")) return 0;
    for (i = 0; i < d->dilations; i++)
        if (!stx__comp_in_range(x, "dilation", d->dilation[i], 1, 20)) return 0;
    return 1;
}

static int stx__comp_resolve_compress(stx_ctx *x, stx_comp_desc *d) {
    const stx_comp_method *method = stx__comp_method_of(d);
    const int learns = method->weights != NULL;
    if (d->compress == STX_COMP_COMPRESS_DILATED && !d->dilations) {
        d->dilations = 3;
        d->dilation[0] = 1;
        d->dilation[1] = 2;
        d->dilation[2] = 4;
    }
    if (d->aux == STX_COMP_AUX_AUTO) d->aux = learns ? STX_COMP_AUX_ATTENTION : STX_COMP_AUX_NONE;
    if (d->aux != STX_COMP_AUX_NONE && !learns)
        return stx__comp_bad(x, "aux", d->aux,
                             "STX_COMP_AUX_NONE, because this compression has no parameters");
    if (d->aux == STX_COMP_AUX_BPTT && method->layout == STX_COMP_ROWS_IN_PLACE)
        return stx__comp_bad(x, "aux", d->aux,
                             "a loss other than STX_COMP_AUX_BPTT with STX_COMP_ROWS_IN_PLACE");
    if (!(d->aux_weight >= 0 && d->aux_weight < 1e30))
        return stx__comp_bad(x, "aux_weight", d->aux_weight, "0 or more (0 means 1)");
    if (d->aux_weight == 0) d->aux_weight = 1;
    if (d->aux == STX_COMP_AUX_BPTT && d->recurrence == STX_COMP_STORE_ROTATE)
        return stx__comp_bad(x, "aux", d->aux,
                             "a loss other than STX_COMP_AUX_BPTT, because STX_COMP_STORE_ROTATE "
                             "moves rows away from the layer that compressed them");
    if (d->aux == STX_COMP_AUX_BPTT && !d->bptt) d->bptt = 1;
    return stx__comp_allowed(x, "aux_dropout", d->aux_dropout, d->aux == STX_COMP_AUX_ATTENTION,
                             "0 unless aux is STX_COMP_AUX_ATTENTION");
}

/* Replaces STX_COMP_LITERAL with the flags that apply to the model. Returns 0 and sets
   an error if a flag that was set individually does not apply or is unknown. */
static int stx__comp_check_literal(stx_ctx *x, stx_comp_desc *d) {
    static const struct {
        unsigned flag;
        const char *name, *condition;
    } form[5] = {
        {STX_COMP_LITERAL_ROWS,   "_ROWS",   "STX_COMP_POSITIONS_LEARNED"},
        {STX_COMP_LITERAL_PAD,    "_PAD",    "STX_COMP_COMPRESS_CONV"},
        {STX_COMP_LITERAL_TARGET, "_TARGET", "STX_COMP_AUX_ATTENTION"},
        {STX_COMP_LITERAL_MASK,   "_MASK",   "a compression other than STX_COMP_COMPRESS_USED"},
        {STX_COMP_LITERAL_FREEZE, "_FREEZE", "STX_COMP_AUX_ATTENTION"}
    };
    unsigned apply = 0, all = STX_COMP_LITERAL;
    size_t i;
    if (d->positions == STX_COMP_POSITIONS_LEARNED) apply |= STX_COMP_LITERAL_ROWS;
    if (d->compress == STX_COMP_COMPRESS_CONV) apply |= STX_COMP_LITERAL_PAD;
    if (d->compress != STX_COMP_COMPRESS_USED) apply |= STX_COMP_LITERAL_MASK;
    if (d->aux == STX_COMP_AUX_ATTENTION)
        apply |= STX_COMP_LITERAL_TARGET | STX_COMP_LITERAL_FREEZE;

    for (i = 0; i < 5; i++) {
        all |= form[i].flag;
        if (!(d->literal & form[i].flag & ~apply)) continue;
        stx_fail(x, STX_ERR_ARG,
                 "stx_comp_create: literal: STX_COMP_LITERAL%s requires %s; "
                 "STX_COMP_LITERAL selects all flags that apply",
                 form[i].name, form[i].condition);
        return 0;
    }
    if (d->literal & ~all)
        return stx__comp_bad(x, "literal", (double)d->literal,
                             "STX_COMP_LITERAL, or a combination of the flags "
                             "STX_COMP_LITERAL_ROWS to _FREEZE");
    if (d->literal & STX_COMP_LITERAL) d->literal = apply;
    return 1;
}

static int stx__comp_check_gate(stx_ctx *x, stx_comp_desc *d) {
    const int mogrify = d->gate == STX_COMP_GATE_GRU && d->dim >= 4;
    int bias;
    if (d->gate < 0 || d->gate >= STX_COMP_GATES)
        return stx__comp_bad(x, "gate", d->gate, "STX_COMP_GATE_RESIDUAL to _GTRXL");
    bias = stx__comp_gate_has_bias(d->gate);
    if (!(d->gate_bias > -1e30 && d->gate_bias < 1e30))
        return stx__comp_bad(x, "gate_bias", d->gate_bias, "a finite number");
    if (!stx__comp_allowed(x, "gate_bias", d->gate_bias, bias,
                           "0, because this gate has no bias")) return 0;
    if (!stx__comp_allowed(x, "zero_gate_bias", d->zero_gate_bias, bias,
                           "0, because this gate has no bias")) return 0;
    if (!stx__comp_allowed(x, "gate_bias", d->gate_bias, !d->zero_gate_bias,
                           "0 with zero_gate_bias")) return 0;
    if (!stx__comp_allowed(x, "mogrify", d->mogrify, mogrify,
                           "0 unless gate is STX_COMP_GATE_GRU and dim is 4 or more")) return 0;
    if (d->gate_bias == 0 && !d->zero_gate_bias && bias && d->gate != STX_COMP_GATE_GRU)
        d->gate_bias = d->gate == STX_COMP_GATE_GTRXL ? 2 : 1;
    return 1;
}

/* Describes the embedding and the output head. The initialisers are PyTorch's: normal
   with standard deviation 1 for the embedding, and uniform in [-1/sqrt(columns),
   1/sqrt(columns)] for the rest. */
static void stx__comp_describe_vocab_io(const stx_comp_desc *d, stx_vocab_io_desc *w) {
    memset(w, 0, sizeof *w);
    w->vocab = d->vocab;
    w->dim = w->emb = d->emb;
    w->out = d->tied ? STX_VOCAB_TIED : STX_VOCAB_PLAIN;
    w->table.kind = STX_NORMAL;
    w->table.a = 1;
    w->out_table.kind = STX_UNIFORM;
    w->out_table.a = 1;
    w->out_table.rule = STX_INIT_FAN_IN;
    w->bias = w->out_table;
}

/* Copies the desc to d (its lists are not copied), fills in the defaults, checks it and
   derives vocab_desc from it. If the desc is invalid, returns 0 and, unless x is NULL,
   sets an error. */
static int stx__comp_resolve(stx_ctx *x, const stx_comp_desc *from, stx_comp_desc *d,
                             stx_vocab_io_desc *vocab_desc) {
    STX__FP_SCOPE;
    *d = *from;
    if (!d->dim) d->dim = 512;
    if (!d->emb) d->emb = d->dim;
    if (!d->layers) d->layers = 8;
    if (!d->heads) d->heads = 8;
    if (!d->kv_heads) d->kv_heads = d->heads;
    if (!d->segment) d->segment = 512;
    if (!d->ratio) d->ratio = 4;
    if (!stx__comp_check_sizes(x, d)) return 0;

    if (!d->mem) d->mem = d->segment;
    if (!d->cmem) {
        const int none = d->mem == STX_COMP_NO_ROWS || d->mem < d->ratio;
        d->cmem = none ? STX_COMP_NO_ROWS : d->mem / d->ratio;
    }
    if (!stx__comp_check_compress(x, d)) return 0;
    if (!stx__comp_resolve_compress(x, d)) return 0;
    if (!stx__comp_check_memory(x, d)) return 0;
    if (!stx__comp_check_weights(x, d)) return 0;
    if (!stx__comp_check_gate(x, d)) return 0;
    if (!stx__comp_check_literal(x, d)) return 0;
    if (!stx__comp_dropout(x, "attn_dropout", d->attn_dropout)) return 0;
    if (!stx__comp_dropout(x, "out_dropout", d->out_dropout)) return 0;
    if (!stx__comp_dropout(x, "ff_dropout", d->ff_dropout)) return 0;
    if (!stx__comp_dropout(x, "aux_dropout", d->aux_dropout)) return 0;
    if (!d->vocab && d->tied) return stx__comp_bad(x, "tied", d->tied, "0 if vocab is 0");
    if (!d->vocab && d->emb != d->dim)
        return stx__comp_bad(x, "emb", (double)d->emb, "0 or dim if vocab is 0");

    d->recompute_layers = STX_MIN(d->recompute_layers, d->layers);
    if (!d->vocab) return 1;
    stx__comp_describe_vocab_io(d, vocab_desc);
    return stx_vocab_io_resolve(x, "stx_comp_create", vocab_desc, vocab_desc);
}

/* Returns the number of parameter elements of a gate. */
static size_t stx__comp_gate_size(const stx_comp_desc *d) {
    static const unsigned char matrices[STX_COMP_GATES] = {0, 6, 1, 1, 1, 2, 6};
    const size_t D = d->dim, rank = D / 4;
    size_t n = stx_size_add(0, matrices[d->gate] * D, D);
    if (d->gate == STX_COMP_GATE_GRU)
        n = stx_size_add(n, 6, D);
    else if (stx__comp_gate_has_bias(d->gate))
        n = stx_size_add(n, 1, D);
    return d->mogrify ? stx_size_add(n, 4 * rank, D) : n;
}

/* Returns the number of parameter elements of the compression and decoder in layer l. */
static size_t stx__comp_compress_size(const stx_comp_desc *d, size_t l) {
    stx_weight w[STX_MAX_WEIGHTS];
    const size_t n = stx_weights_size(w, stx__comp_weights(d, l, w));
    if (d->aux != STX_COMP_AUX_AUTOENCODE) return n;
    return stx_size_add(n, stx__comp_taps(d), d->dim * d->dim);
}

STX_DEF size_t stx_comp_count(const stx_comp_desc *desc) {
    stx_comp_desc d;
    stx_vocab_io_desc vocab_desc;
    size_t n = 0, l, D, kv, F, layer, M, C, most_M = 0, most_C = 0;
    if (!desc || !stx__comp_resolve(NULL, desc, &d, &vocab_desc)) return 0;
    D = d.dim;
    kv = D / d.heads * d.kv_heads;
    F = d.inner;

    if (d.vocab) n = stx_vocab_io_count(&vocab_desc);
    if (d.emb != D) n = stx_size_add(stx_size_add(n, 2 * d.emb, D), 1, D + d.emb);
    if (d.final_norm) n = stx_size_add(n, 2, D);

    layer = stx_size_add(6 * D + F * (d.glu ? 2 : 1), D, 2 * D + 2 * kv + F * (d.glu ? 3 : 2));
    layer = stx_size_add(layer, 2, stx__comp_gate_size(&d));
    if (d.positions == STX_COMP_POSITIONS_XL) layer = stx_size_add(layer, D + 2, D);
    n = stx_size_add(n, d.layers, layer);

    for (l = 0; l < d.layers; l++) {
        stx__comp_sizes(&d, l, &M, &C);
        most_M = STX_MAX(most_M, M);
        most_C = STX_MAX(most_C, C);
        if (C) n = stx_size_add(n, 1, stx__comp_compress_size(&d, l));
    }
    if (d.positions == STX_COMP_POSITIONS_XL) return n;
    return stx_size_add(n, d.segment + most_M + most_C, D);
}

static stx_tensor *stx__comp_param(stx_comp *m, size_t l, const char *name, int init, double a,
                                   size_t d0, size_t d1) {
    char full[96];
    snprintf(full, sizeof full, "layers.%zu.%s", l, name);
    return stx_param(m->params, init, a, full, d0, d1, 0, 0);
}

/* Adds gate_bias to the z block of gru's first bias, after its initialisation. */
static void stx__comp_gru_bias(stx_comp *m, stx_tensor *bias) {
    const size_t D = m->desc.dim;
    stx_real *v;
    size_t i;
    if (m->desc.gate_bias == 0 || !stx_ok(m->ctx)) return;
    v = (stx_real *)stx_block(m->ctx, stx_bytes_of(bias->size, 1, sizeof *v));
    if (v) {
        stx_get(m->ctx, bias, v);
        for (i = D; i < 2 * D; i++) v[i] = (stx_real)((double)v[i] + m->desc.gate_bias);
        stx_set(m->ctx, bias, v);
    }
    stx_block_free(m->ctx, v);
}

/* Creates the parameters of a gate. `where` is "attn" or "ff". */
static void stx__comp_gate_params(stx_comp *m, size_t l, const char *where, stx_comp_gate *g) {
    static const char *const weight[STX_COMP_GATES][6] = {
        {NULL}, {"weight_ih", "weight_hh"}, {"w"}, {"w"}, {"w"}, {"w", "u"},
        {"wr", "ur", "wz", "uz", "wg", "ug"}
    };
    static const char *const mogrify[4] = {"q0", "q1", "r0", "r1"};
    const stx_comp_desc *d = &m->desc;
    const size_t D = d->dim, rank = D / 4;
    const double bound = 1 / sqrt((double)D);
    const int gru = d->gate == STX_COMP_GATE_GRU;
    char full[64];
    size_t i;
    for (i = 0; i < 6 && weight[d->gate][i]; i++) {
        snprintf(full, sizeof full, "%s.gate.%s", where, weight[d->gate][i]);
        g->w[i] = stx__comp_param(m, l, full, STX_UNIFORM, bound, gru ? 3 * D : D, D);
    }
    for (i = 0; i < 2 && gru; i++) {
        snprintf(full, sizeof full, "%s.gate.%s", where, i ? "bias_hh" : "bias_ih");
        g->b[i] = stx__comp_param(m, l, full, STX_UNIFORM, bound, 3 * D, 0);
    }
    if (gru) stx__comp_gru_bias(m, g->b[0]);
    if (!gru && stx__comp_gate_has_bias(d->gate)) {
        snprintf(full, sizeof full, "%s.gate.b", where);
        g->b[0] = stx__comp_param(m, l, full, STX_CONSTANT, d->gate_bias, D, 0);
    }
    for (i = 0; i < 4 && d->mogrify; i++) {     /* shapes alternate between (rank,D) and
                                                   (D,rank) */
        const int up = i % 2;
        snprintf(full, sizeof full, "%s.gate.mogrify.%s", where, mogrify[i]);
        g->mogrify[i] = stx__comp_param(m, l, full, STX_UNIFORM,
                                        up ? 1 / sqrt((double)rank) : bound,
                                        up ? D : rank, up ? rank : D);
    }
}

/* Returns S + max M + max C, which is one more than the largest distance. M and C list
   the capacities of all layers; if NULL, the model's capacities are used. */
static size_t stx__comp_reach(const stx_comp *m, const size_t *M, const size_t *C) {
    size_t l, most_M = 0, most_C = 0;
    for (l = 0; l < m->desc.layers; l++) {
        most_M = STX_MAX(most_M, M ? M[l] : m->layer[l].M);
        most_C = STX_MAX(most_C, C ? C[l] : m->layer[l].C);
    }
    return m->desc.segment + most_M + most_C;
}

/* Returns a constant (n,D): the sines and cosines of distances n - 1 .. 0. */
static stx_tensor *stx__comp_sines(stx_comp *m, size_t n) {
    stx_ctx *x = m->ctx;
    const size_t D = m->desc.dim, half = D / 2;
    stx_real *v = (stx_real *)stx_block(x, stx_bytes_of(n, D, sizeof *v));
    stx_tensor *t;
    size_t i, k;
    if (!v) return NULL;
    for (i = 0; i < n; i++) {
        for (k = 0; k < half; k++) {
            double angle = (double)(n - 1 - i) * stx_math_pow(10000, -2 * (double)k / (double)D);
            v[i * D + k] = (stx_real)stx_math_sin(angle);
            v[i * D + half + k] = (stx_real)stx_math_cos(angle);
        }
    }
    t = stx_constant_create(x, v, n, D, 0, 0);
    stx_block_free(x, v);
    return t;
}

static int stx__comp_attn_params(stx_comp *m, size_t l) {
    const stx_comp_desc *d = &m->desc;
    const size_t D = d->dim, H = d->heads, hd = D / H, kv = hd * d->kv_heads;
    const double bound = 1 / sqrt((double)D);
    stx_comp_layer *p = &m->layer[l];
    p->attn_gain = stx__comp_param(m, l, "attn.norm.weight", STX_CONSTANT, 1, D, 0);
    p->attn_shift = stx__comp_param(m, l, "attn.norm.bias", STX_ZEROS, 0, D, 0);

    /* store Wq and Wkv adjacently, so that one GEMM computes q, k and v */
    if (!stx_params_make_contiguous(m->params, D * D + 2 * kv * D)) return 0;
    p->wq = stx__comp_param(m, l, "attn.query.weight", STX_UNIFORM, bound, D, D);
    p->wkv = stx__comp_param(m, l, "attn.kv.weight", STX_UNIFORM, bound, 2 * kv, D);
    p->wo = stx__comp_param(m, l, "attn.out.weight", STX_UNIFORM, bound, D, D);
    p->bo = stx__comp_param(m, l, "attn.out.bias", STX_UNIFORM, bound, D, 0);
    if (d->positions == STX_COMP_POSITIONS_XL) {
        p->wpos = stx__comp_param(m, l, "attn.pos.weight", STX_UNIFORM, bound, D, D);
        p->u = stx__comp_param(m, l, "attn.u", STX_ZEROS, 0, H, hd);
        p->vb = stx__comp_param(m, l, "attn.v", STX_ZEROS, 0, H, hd);
        stx_param_elementwise(p->u);
        stx_param_elementwise(p->vb);
    }
    stx__comp_gate_params(m, l, "attn", &p->attn_gate);
    return 1;
}

static void stx__comp_compress_params(stx_comp *m, size_t l) {
    const stx_comp_desc *d = &m->desc;
    const size_t D = d->dim;
    const double bound = 1 / sqrt((double)D * (double)m->taps);
    stx_comp_layer *p = &m->layer[l];
    stx_weight w[STX_MAX_WEIGHTS];
    char prefix[64];
    if (!p->C) return;
    snprintf(prefix, sizeof prefix, "layers.%zu.compress.", l);
    if (!stx_weights_create(m->params, prefix, w, stx__comp_weights(d, l, w), p->compress)) return;
    if (d->aux == STX_COMP_AUX_AUTOENCODE)
        p->decoder = stx__comp_param(m, l, "compress.decoder.weight", STX_UNIFORM, bound,
                                     m->taps * D, D);
}

static void stx__comp_ff_params(stx_comp *m, size_t l) {
    const size_t D = m->desc.dim, F = m->desc.inner, F1 = m->desc.glu ? 2 * F : F;
    const double bound_D = 1 / sqrt((double)D), bound_F = 1 / sqrt((double)F);
    stx_comp_layer *p = &m->layer[l];
    p->ff_gain = stx__comp_param(m, l, "ff.norm.weight", STX_CONSTANT, 1, D, 0);
    p->ff_shift = stx__comp_param(m, l, "ff.norm.bias", STX_ZEROS, 0, D, 0);
    p->w1 = stx__comp_param(m, l, "ff.fc1.weight", STX_UNIFORM, bound_D, F1, D);
    p->b1 = stx__comp_param(m, l, "ff.fc1.bias", STX_UNIFORM, bound_D, F1, 0);
    p->w2 = stx__comp_param(m, l, "ff.fc2.weight", STX_UNIFORM, bound_F, D, F);
    p->b2 = stx__comp_param(m, l, "ff.fc2.bias", STX_UNIFORM, bound_F, D, 0);
    stx__comp_gate_params(m, l, "ff", &p->ff_gate);
}

/* Creates the parameters that do not belong to a layer. */
static void stx__comp_model_params(stx_comp *m, const stx_vocab_io_desc *vocab_desc) {
    const stx_comp_desc *d = &m->desc;
    const size_t D = d->dim, E = d->emb, reach = stx__comp_reach(m, NULL, NULL);
    const double bound_E = 1 / sqrt((double)E), bound_D = 1 / sqrt((double)D);
    stx_params *p = m->params;
    if (d->positions == STX_COMP_POSITIONS_LEARNED)
        m->key_pe = stx_param_elementwise(stx_param(p, STX_ZEROS, 0, "key_pe", reach, D, 0, 0));
    else
        m->sines = stx__comp_sines(m, reach);
    if (d->vocab) m->vocab_io = stx_vocab_io_create(p, vocab_desc);
    if (E != D) {
        m->in_w = stx_param(p, STX_UNIFORM, bound_E, "in_proj.weight", D, E, 0, 0);
        m->in_b = stx_param(p, STX_UNIFORM, bound_E, "in_proj.bias", D, 0, 0, 0);
        m->out_w = stx_param(p, STX_UNIFORM, bound_D, "out_proj.weight", E, D, 0, 0);
        m->out_b = stx_param(p, STX_UNIFORM, bound_D, "out_proj.bias", E, 0, 0, 0);
        stx_param_elementwise(m->in_w);
        stx_param_elementwise(m->out_w);
    }
    if (d->final_norm) {
        m->final_gain = stx_param(p, STX_CONSTANT, 1, "final_norm.weight", D, 0, 0, 0);
        m->final_shift = stx_param(p, STX_ZEROS, 0, "final_norm.bias", D, 0, 0, 0);
    }
}

/* Returns a copy of a list, which may be NULL. The context owns the copy. */
static const size_t *stx__comp_copy(stx_ctx *x, const size_t *list, size_t n) {
    size_t *copy = list ? (size_t *)stx_persist(x, n * sizeof *copy) : NULL;
    if (copy) memcpy(copy, list, n * sizeof *copy);
    return copy;
}

/* Weights and biases are initialised as in PyTorch's modules, uniform in
   [-1/sqrt(columns), 1/sqrt(columns)]. u, vb and key_pe start at 0. */
STX_DEF stx_comp *stx_comp_create(stx_ctx *x, const stx_comp_desc *desc) {
    STX__FP_SCOPE;
    stx_comp *m;
    stx_comp_desc *d;
    stx_vocab_io_desc vocab_desc;
    size_t l;
    if (!stx_ok(x)) return NULL;
    if (!desc) {
        stx_fail(x, STX_ERR_ARG, "stx_comp_create: expected a desc (all zeros is valid), got NULL");
        return NULL;
    }
    m = (stx_comp *)stx_persist(x, sizeof *m);
    if (!m || !stx__comp_resolve(x, desc, &m->desc, &vocab_desc)) return NULL;
    d = &m->desc;
    m->ctx = x;
    m->params = stx_params_create(x);
    m->layer = (stx_comp_layer *)stx_persist(x, stx_bytes_of(d->layers, sizeof *m->layer, 1));
    m->aux = (stx_tensor **)stx_persist(x, stx_bytes_of(d->layers, 2 * sizeof *m->aux, 1));
    m->attended = (stx_comp_attended *)stx_persist(x, stx_bytes_of(d->layers,
                                                                   sizeof *m->attended, 1));
    if (!m->params || !m->layer || !m->aux || !m->attended) return NULL;
    m->rel_error = m->aux + d->layers;
    m->method = stx__comp_method_of(d);
    if (d->custom) {
        stx_comp_method *copy = (stx_comp_method *)stx_persist(x, sizeof *copy);
        if (!copy) return NULL;
        *copy = *d->custom;
        m->method = d->custom = copy;
    }
    m->taps = stx__comp_taps(d);
    m->before = stx__comp_rows_before(d);
    for (l = 0; l < d->layers; l++) {
        m->layer[l].memory = stx__comp_sizes(d, l, &m->layer[l].M, &m->layer[l].C);
        m->A += m->layer[l].C > 0;
    }
    d->memory_layers = stx__comp_copy(x, d->memory_layers, d->memory_count);
    d->mems = stx__comp_copy(x, d->mems, d->layers);
    d->cmems = stx__comp_copy(x, d->cmems, d->layers);
    if (!stx_ok(x)) return NULL;

    stx__comp_model_params(m, &vocab_desc);
    for (l = 0; l < d->layers && stx_ok(x); l++) {
        if (!stx__comp_attn_params(m, l)) return NULL;
        stx__comp_compress_params(m, l);
        stx__comp_ff_params(m, l);
    }
    return stx_ok(x) ? m : NULL;
}

STX_DEF stx_params *stx_comp_params(stx_comp *m) {
    return m ? m->params : NULL;
}


// >>memory: state

static stx_memory *stx__comp_rows_create(const stx_comp_state *s, const size_t *widths, int usage,
                                         size_t most) {
    stx_memory_desc d;
    memset(&d, 0, sizeof d);
    d.layers = s->model->desc.layers;
    d.B = s->B;
    d.widths = widths;
    d.always_f32 = d.missing_as_zeros = usage;
    d.max_rows = most;
    return stx_memory_create(s->model->ctx, &d);
}

enum { STX__COMP_PARTS = 4 };

/* Checkpoint names of the parts of a state. Each is appended to the caller's prefix. */
static const char *const stx__comp_part_name[STX__COMP_PARTS] = {"mem.", "comp.", "usage.",
                                                                 "source."};

/* Stores the parts of a state in part[]. Parts that the model does not need are NULL. */
static void stx__comp_parts(const stx_comp_state *s, stx_memory **part) {
    part[0] = s->mem;
    part[1] = s->comp;
    part[2] = s->usage;
    part[3] = s->source;
}

/* Sets and checks the capacities of a new state. */
static int stx__comp_state_sizes(stx_comp_state *s, const size_t *mems, const size_t *cmems) {
    const stx_comp *m = s->model;
    const size_t most = (size_t)1 << 31;
    size_t l, first = SIZE_MAX;
    for (l = 0; l < m->desc.layers; l++) {
        const stx_comp_layer *p = &m->layer[l];
        if (p->memory) s->M[l] = mems ? mems[l] : p->M;
        if (p->C) s->C[l] = cmems ? cmems[l] : p->C;
        if (s->M[l] > most || s->C[l] > most) {
            stx_fail(m->ctx, STX_ERR_ARG,
                     "stx_comp_state_create: layer %zu (counted from 0): expected at most "
                     "2^31 rows of memory and of compressed memory, got %zu and %zu",
                     l, s->M[l], s->C[l]);
            return 0;
        }
        if (p->memory && !p->C && cmems && cmems[l]) {
            stx_fail(m->ctx, STX_ERR_ARG,
                     "stx_comp_state_create: layer %zu (counted from 0): expected 0 "
                     "compressed rows, because the model has no compressed memory in this "
                     "layer, got %zu", l, cmems[l]);
            return 0;
        }
        if (!p->memory || m->desc.recurrence != STX_COMP_STORE_ROTATE) continue;
        if (first == SIZE_MAX) first = l;
        if (s->M[l] != s->M[first] || s->C[l] != s->C[first]) {
            stx_fail(m->ctx, STX_ERR_ARG,
                     "stx_comp_state_create: expected equal sizes for all memory layers "
                     "with STX_COMP_STORE_ROTATE, got M = %zu and C = %zu in layer %zu, "
                     "but M = %zu and C = %zu in layer %zu (layers counted from 0)",
                     s->M[first], s->C[first], first, s->M[l], s->C[l], l);
            return 0;
        }
    }
    return 1;
}

/* Extends the model's table of sines if a new state can have larger distances. With
   STX_COMP_LITERAL_ROWS, sets an error if the state is too large for the model's
   table. */
static int stx__comp_state_positions(const stx_comp_state *s) {
    stx_comp *m = s->model;
    const size_t reach = stx__comp_reach(m, s->M, s->C);
    if ((m->desc.literal & STX_COMP_LITERAL_ROWS) && reach > m->key_pe->dim[0]) {
        stx_fail(m->ctx, STX_ERR_ARG,
                 "stx_comp_state_create: with STX_COMP_LITERAL_ROWS, expected memories no larger "
                 "than the model's, got %zu rows in total, but the model has %zu",
                 reach - m->desc.segment, m->key_pe->dim[0] - m->desc.segment);
        return 0;
    }
    if (m->sines && reach > m->sines->dim[0]) {
        stx_tensor *longer = stx__comp_sines(m, reach);
        if (longer) m->sines = longer;
    }
    return stx_ok(m->ctx);
}

static size_t stx__comp_largest(const size_t *v, size_t n) {
    size_t i, most = 0;
    for (i = 0; i < n; i++) most = STX_MAX(most, v[i]);
    return most;
}

/* Returns the number of rows that the compression of G groups reads. */
static size_t stx__comp_source_rows(const stx_comp *m, size_t G) {
    if (m->method->layout == STX_COMP_ROWS_CONSECUTIVE) return m->before + G * m->desc.ratio;
    return G * m->taps;
}

/* Creates the memories of a new state. width is scratch memory for L elements. */
static void stx__comp_state_rows(stx_comp_state *s, size_t *width) {
    const stx_comp *m = s->model;
    const stx_comp_desc *d = &m->desc;
    const size_t M = stx__comp_largest(s->M, d->layers), C = stx__comp_largest(s->C, d->layers);
    size_t l;
    for (l = 0; l < d->layers; l++) width[l] = m->layer[l].memory ? d->dim : 0;
    s->mem = stx__comp_rows_create(s, width, 0, STX_MAX(M, (size_t)1));

    for (l = 0; l < d->layers; l++) width[l] = s->C[l] ? d->dim : 0;
    s->comp = stx__comp_rows_create(s, width, 0, STX_MAX(C, (size_t)1));
    if (d->aux == STX_COMP_AUX_BPTT) {      /* a segment evicts at most S rows */
        const size_t G = stx__comp_group_count(d->segment, d->ratio);
        s->source = stx__comp_rows_create(s, width, 0, stx__comp_source_rows(m, G) * d->bptt);
    }

    for (l = 0; l < d->layers; l++) width[l] = s->C[l] ? 2 : 0;
    if (d->compress == STX_COMP_COMPRESS_USED)
        s->usage = stx__comp_rows_create(s, width, 1, STX_MAX(M, (size_t)1));
}

STX_DEF stx_comp_state *stx_comp_state_create_sized(stx_comp *m, size_t B, const size_t *mems,
                                                    const size_t *cmems) {
    STX__FP_SCOPE;
    stx_ctx *x = m ? m->ctx : NULL;
    stx_comp_state *s;
    size_t L;
    if (!stx_ok(x)) return NULL;
    if (!B) {
        stx_fail(x, STX_ERR_ARG, "stx_comp_state_create: expected B >= 1 streams, got 0");
        return NULL;
    }
    L = m->desc.layers;
    s = (stx_comp_state *)stx_block(x, sizeof *s);
    if (!s) return NULL;
    s->model = m;
    s->B = B;
    s->M = (size_t *)stx_block(x, stx_bytes_of(3 * L, sizeof *s->M, 1));     /* M, C, row widths */
    s->pushed = (size_t *)stx_block(x, stx_bytes_of(B, sizeof *s->pushed, 1));
    if (s->M && s->pushed) {
        s->C = s->M + L;
        if (stx__comp_state_sizes(s, mems, cmems) && stx__comp_state_positions(s)) {
            /* recomputing an eviction of k <= bptt segments ago requires only
               min(pushed - k S, M), so counts can stop at max M + bptt S; one more
               segment is a safety margin */
            s->pushed_max = stx__comp_largest(s->M, L) + m->desc.segment * (m->desc.bptt + 1);
            stx__comp_state_rows(s, s->C + L);
        }
    }
    if (stx_ok(x)) return s;
    stx_comp_state_free(s);
    return NULL;
}

STX_DEF stx_comp_state *stx_comp_state_create(stx_comp *m, size_t B) {
    return stx_comp_state_create_sized(m, B, NULL, NULL);
}

STX_DEF void stx_comp_state_free(stx_comp_state *s) {
    if (!s) return;
    stx_memory_free(s->mem);
    stx_memory_free(s->comp);
    stx_memory_free(s->usage);
    stx_memory_free(s->source);
    stx_block_free(s->model->ctx, s->M);
    stx_block_free(s->model->ctx, s->pushed);
    stx_block_free(s->model->ctx, s);
}

STX_DEF void stx_comp_state_reset(stx_comp_state *s) {
    stx_memory *part[STX__COMP_PARTS];
    int i;
    if (!s || !stx_ok(s->model->ctx)) return;
    stx__comp_parts(s, part);
    for (i = 0; i < STX__COMP_PARTS; i++) stx_memory_reset(part[i]);
    memset(s->pushed, 0, s->B * sizeof *s->pushed);
}

STX_DEF void stx_comp_state_reset_stream(stx_comp_state *s, size_t b) {
    const unsigned one_age = STX_COMP_LITERAL_ROWS | STX_COMP_LITERAL_PAD | STX_COMP_LITERAL_MASK;
    stx_memory *part[STX__COMP_PARTS];
    int i;
    if (!s || !stx_ok(s->model->ctx)) return;
    if (s->model->desc.literal & one_age) {
        stx_fail(s->model->ctx, STX_ERR_ARG,
                 "stx_comp_state_reset_stream: individual streams cannot be reset with "
                 "STX_COMP_LITERAL_ROWS, _PAD or _MASK; use stx_comp_state_reset");
        return;
    }
    stx__comp_parts(s, part);
    for (i = 0; i < STX__COMP_PARTS; i++) stx_memory_reset_stream(part[i], b);
    if (stx_ok(s->model->ctx)) s->pushed[b] = 0;
}

/* Returns the largest number of rows that a stream has pushed. */
static size_t stx__comp_most_pushed(const stx_comp_state *s) {
    return stx__comp_largest(s->pushed, s->B);
}

/* Checks that the state `from` can be copied to the state `to`. */
static int stx__comp_state_like(const stx_comp_state *to, const stx_comp_state *from) {
    const size_t sizes = 2 * to->model->desc.layers * sizeof *to->M;       /* bytes of M and C */
    const char *got = NULL;
    if (!from)
        got = "NULL";
    else if (from->model != to->model)
        got = "one of another model";
    else if (memcmp(from->M, to->M, sizes) != 0)
        got = "one with other sizes";
    if (!got) return 1;
    stx_fail(to->model->ctx, STX_ERR_ARG,
             "stx_comp_state_copy: from: expected a state of the same model and sizes, got %s",
             got);
    return 0;
}

STX_DEF int stx_comp_state_copy(stx_comp_state *to, size_t b, const stx_comp_state *from,
                                size_t from_b, size_t streams) {
    stx_ctx *x = to ? to->model->ctx : NULL;
    stx_memory *part[STX__COMP_PARTS], *other[STX__COMP_PARTS];
    size_t l;
    int i, discard_sources;
    if (!stx_ok(x) || !stx__comp_state_like(to, from)) return 0;

    /* All streams of a state must have sources that are cut into the same groups. If
       the sources of `from` are cut differently, discard all sources, so that no
       earlier eviction is recompressed. */
    discard_sources = streams < to->B && stx__comp_most_pushed(from) != stx__comp_most_pushed(to);
    for (l = 0; to->source && streams < to->B && l < to->model->desc.layers; l++)
        discard_sources |= from->source->layer[l].count != to->source->layer[l].count;

    stx__comp_parts(to, part);
    stx__comp_parts(from, other);
    for (i = 0; i < STX__COMP_PARTS; i++)
        if (part[i] && !stx_memory_copy(part[i], b, other[i], from_b, streams)) return 0;
    memmove(to->pushed + b, from->pushed + from_b, streams * sizeof *to->pushed);
    if (discard_sources) stx_memory_reset(to->source);
    return 1;
}

/* Returns 1 if l is a layer of the model. Otherwise, sets an error and returns 0. */
static int stx__comp_has_layer(const stx_comp_state *s, size_t l, const char *op) {
    const size_t layers = s->model->desc.layers;
    if (l >= layers)
        stx_fail(s->model->ctx, STX_ERR_ARG, "%s: layer: expected less than %zu, got %zu", op,
                 layers, l);
    return l < layers;
}

STX_DEF int stx_comp_state_get(const stx_comp_state *s, size_t l, stx_real *mem, stx_real *comp) {
    stx_ctx *x = s ? s->model->ctx : NULL;
    if (!stx_ok(x) || !stx__comp_has_layer(s, l, "stx_comp_state_get")) return 0;
    if ((mem && s->mem->layer[l].masked) || (comp && s->comp->layer[l].masked)) {
        stx_fail(x, STX_ERR_ARG,
                 "stx_comp_state_get: some streams lack rows in layer %zu, because they were "
                 "reset or had padding; use stx_comp_state_save or stx_comp_state_copy instead",
                 l);
        return 0;
    }
    if (mem && !stx_memory_get(s->mem, l, mem)) return 0;
    return !comp || stx_memory_get(s->comp, l, comp);
}

static int stx__comp_state_settable(const stx_comp_state *s, size_t l, const stx_real *mem,
                                    size_t n, const stx_real *comp, size_t c) {
    stx_ctx *x = s->model->ctx;
    if (!stx__comp_has_layer(s, l, "stx_comp_state_set")) return 0;
    if (n > s->M[l] || c > s->C[l])
        stx_fail(x, STX_ERR_ARG,
                 "stx_comp_state_set: layer %zu: expected at most %zu rows and %zu compressed "
                 "rows, got %zu and %zu", l, s->M[l], s->C[l], n, c);
    else if ((n && !mem) || (c && !comp))
        stx_fail(x, STX_ERR_ARG, "stx_comp_state_set: layer %zu: expected %s, got NULL", l,
                 n && !mem ? "rows in mem" : "compressed rows in comp");
    return stx_ok(x);
}

STX_DEF int stx_comp_state_set(stx_comp_state *s, size_t l, const stx_real *mem, size_t n,
                               const stx_real *comp, size_t c) {
    stx_ctx *x = s ? s->model->ctx : NULL;
    stx_real *zeros;
    size_t b;
    int good;
    if (!stx_ok(x) || !stx__comp_state_settable(s, l, mem, n, comp, c)) return 0;
    if (!stx_memory_set(s->mem, l, n, mem, n) || !stx_memory_set(s->comp, l, c, comp, c)) return 0;
    for (b = 0; b < s->B; b++) s->pushed[b] = STX_MAX(s->pushed[b], n);
    stx_memory_reset(s->source);
    if (!s->usage || !s->C[l]) return 1;
    zeros = (stx_real *)stx_block(x, stx_bytes_of(s->B * STX_MAX(n, (size_t)1), 2, sizeof *zeros));
    good = zeros && stx_memory_set(s->usage, l, n, zeros, n);
    stx_block_free(x, zeros);
    return good;
}

STX_DEF int stx_comp_state_save(stx_writer *w, const stx_comp_state *s, const char *prefix) {
    stx_memory *part[STX__COMP_PARTS];
    char full[128];
    size_t b;
    int i, good = 1;
    if (!s || !prefix || !stx_ok(s->model->ctx)) return 0;
    if (strlen(prefix) > 64) {
        stx_fail(s->model->ctx, STX_ERR_ARG,
                 "stx_comp_state_save: prefix: expected at most 64 bytes, got %zu",
                 strlen(prefix));
        return 0;
    }
    stx__comp_parts(s, part);
    for (i = 0; good && i < STX__COMP_PARTS; i++) {
        if (!part[i]) continue;
        snprintf(full, sizeof full, "%s%s", prefix, stx__comp_part_name[i]);
        good = stx_memory_save(w, part[i], full);
    }
    for (b = 0; good && b < s->B; b++) {
        snprintf(full, sizeof full, "%sseen.%zu", prefix, b);
        good = stx_writer_meta_u64(w, full, s->pushed[b]);
    }
    return good;
}

/* Checks the row counts that were loaded for layer l. */
static int stx__comp_loaded_fits(const stx_comp_state *s, const char *prefix, size_t l) {
    stx_ctx *x = s->model->ctx;
    const size_t n = s->mem->layer[l].count, c = s->comp->layer[l].count;
    if (n > s->M[l] || c > s->C[l]) {
        stx_fail(x, STX_ERR_FORMAT,
                 "memory \"%s\": layer %zu: expected at most %zu rows and %zu compressed rows, got "
                 "%zu and %zu; use the memory sizes that the file was saved with",
                 prefix, l, s->M[l], s->C[l], n, c);
        return 0;
    }
    if (s->usage && s->C[l] && s->usage->layer[l].count != n) {
        stx_fail(x, STX_ERR_FORMAT,
                 "memory \"%s\": layer %zu: expected usage values for %zu rows, got %zu; "
                 "the file is damaged",
                 prefix, l, n, s->usage->layer[l].count);
        return 0;
    }
    return 1;
}

static int stx__comp_load_pushed(stx_comp_state *s, const stx_file *f, const char *prefix) {
    stx_ctx *x = s->model->ctx;
    char full[128];
    uint64_t pushed = 0;
    size_t b;
    for (b = 0; b < s->B; b++) {
        snprintf(full, sizeof full, "%.64sseen.%zu", prefix, b);
        if (!stx_file_meta_u64(x, f, full, &pushed)) return 0;
        if (pushed > s->pushed_max) {
            stx_fail(x, STX_ERR_FORMAT,
                     "metadata \"%s\": expected at most %zu, got %llu; the file is damaged, or "
                     "the model's sizes differ", full, s->pushed_max, (unsigned long long)pushed);
            return 0;
        }
        s->pushed[b] = (size_t)pushed;
    }
    return 1;
}

STX_DEF int stx_comp_state_load(stx_comp_state *s, const stx_file *f, const char *prefix) {
    stx_ctx *x = s ? s->model->ctx : NULL;
    stx_memory *part[STX__COMP_PARTS];
    char full[128];
    size_t l;
    int i, good = 1;
    if (!stx_ok(x) || !f || !prefix) return 0;
    stx_comp_state_reset(s);
    stx__comp_parts(s, part);
    for (i = 0; good && i < STX__COMP_PARTS; i++) {
        if (!part[i]) continue;
        snprintf(full, sizeof full, "%.64s%s", prefix, stx__comp_part_name[i]);
        good = stx_memory_load(part[i], f, full);
    }
    for (l = 0; good && l < s->model->desc.layers; l++)
        good = stx__comp_loaded_fits(s, prefix, l);
    if (good && stx__comp_load_pushed(s, f, prefix)) return 1;

    /* empty the state here, because stx_comp_state_reset does nothing after an error */
    for (i = 0; i < STX__COMP_PARTS; i++) {
        for (l = 0; part[i] && l < s->model->desc.layers; l++) {
            part[i]->layer[l].count = part[i]->layer[l].logical_count = 0;
            part[i]->layer[l].masked = 0;
        }
    }
    memset(s->pushed, 0, s->B * sizeof *s->pushed);
    return 0;
}


// >>memory: what a segment does to it

/* The plan for a layer in one segment, made on the host. Masks are nonzero for missing
   rows, and NULL if no row is missing. */
typedef struct stx__comp_layer_plan {
    stx_comp *m;
    size_t l, B, T;
    size_t n, c;            /* number of rows in the memory and in the compressed memory */
    size_t M, C;            /* capacities of the memory and of the compressed memory */
    size_t e, G;            /* e: number of evicted rows to compress; 0 unless the segment
                               is full, C > 0 and G > 0. G: number of groups that they
                               form */
    size_t table_rows;      /* STX_COMP_LITERAL_ROWS: the largest S + n + c of any layer */
    int    push;            /* 1: the segment is full and enters the memory */
    int    frozen;          /* 1: Wkv is a constant in this segment */

    /* STX_COMP_AUX_BPTT: `recent` evictions are compressed again. recent_groups holds
       the number of groups of each, newest first, and recent_missing the mask of its
       source rows */
    size_t recent, *recent_groups;
    const stx_ids **recent_missing;

    const stx_ids *key_pad;         /* (B,c+n+T): mask of the keys */
    const stx_ids *pad;             /* (B,T): mask of the segment's tokens */
    const stx_ids *old_pad;         /* (B,e): mask of the evicted rows */
    const stx_ids *new_pad;         /* (B,G): mask of the new compressed rows */
    const stx_ids *missing;         /* custom method: mask of the rows that it reads */
    const stx_ids *not_pad;         /* STX_COMP_LITERAL_MASK: (B,T), the logical negation of pad */
    const stx_ids *segment_pad;     /* STX_COMP_LITERAL_MASK: (B,c+n+T), nonzero for all keys of
                                       the segment */

    stx_comp_groups groups;         /* how the evicted rows are cut into groups */
    int    aux;             /* 1: there is an aux loss. In a process group, either all ranks have
                               one, or none do */
    double aux_elements;    /* number of elements that the aux loss compares */
    const stx_ids *aux_skip;        /* (B,..): nonzero for rows that the aux loss does not
                                       compare */

    int in_past, in_source, in_usage;       /* indices of optional inputs in in[]; 0: absent */
} stx__comp_layer_plan;

/* Returns e, the number of rows by which n + S exceeds the capacity M. */
static size_t stx__comp_evicted(size_t n, size_t S, size_t M) {
    return n + S > M ? n + S - M : 0;
}

/* Returns G, the number of compressed rows made from e rows. With STX_COMP_LITERAL_PAD,
   e mod r rows of padding precede the e rows, and only full groups count. */
static size_t stx__comp_new_rows(const stx_comp_desc *d, size_t e) {
    if (d->literal & STX_COMP_LITERAL_PAD) return (e + e % d->ratio) / d->ratio;
    return stx__comp_group_count(e, d->ratio);
}

/* Returns v (B,n) as ids, or NULL if all its elements are 0. */
static const stx_ids *stx__comp_mask(stx_ctx *x, const int32_t *v, size_t B, size_t n) {
    size_t i;
    for (i = 0; v && i < B * n; i++)
        if (v[i]) return stx_tokens(x, v, B, n);
    return NULL;
}

/* Returns columns [at, at + n) of a mask (B,..) as a mask (B,n). */
static const stx_ids *stx__comp_mask_part(stx_ctx *x, const stx_ids *mask, size_t at, size_t n) {
    const size_t B = mask->B;
    int32_t *v = (int32_t *)stx_step_host_bytes(x, stx_bytes_of(B, n, sizeof *v));
    size_t b;
    for (b = 0; v && b < B; b++) memcpy(v + b * n, mask->data + b * mask->T + at, n * sizeof *v);
    return stx__comp_mask(x, v, B, n);
}

/* STX_COMP_COMPRESS_USED: for each i < G, sets missing[i] to 1 if the i-th row that
   stx_comp_pick returns for stream b is missing. stx_comp_pick prefers rows that exist,
   and returns rows in chronological order. */
static void stx__comp_missing_picked(const stx_comp_groups *g, size_t b, int32_t *missing) {
    const size_t first = g->first ? (size_t)g->first[b] : 0;
    const size_t keep = g->first ? stx__comp_group_count(g->rows - first, g->step) : g->groups;
    const int32_t *pad = g->pad ? g->pad + b * g->rows : NULL;
    size_t i, slot = g->groups - keep, exist = 0, lack;
    for (i = first; i < g->rows; i++) exist += !pad || !pad[i];
    lack = exist < keep ? keep - exist : 0;
    for (i = 0; i < g->groups; i++) missing[i] = i < slot;
    for (i = first; i < g->rows && lack; i++) {
        const int is_missing = pad && pad[i];
        missing[slot++] = is_missing;
        lack -= (size_t)is_missing;
    }
}

/* Returns a mask (B,G) of the missing new compressed rows, or NULL if none are missing.
   first (B) holds the index of each stream's first evicted row; NULL if all are 0. */
static const stx_ids *stx__comp_missing(stx_ctx *x, const stx__comp_layer_plan *plan,
                                        const stx_ids *first) {
    const size_t G = plan->G;
    int32_t *v = (int32_t *)stx_step_host_bytes(x, stx_bytes_of(plan->B, G, sizeof *v));
    stx_comp_groups g = plan->groups;
    size_t b, i, t;
    if (!v || (!plan->old_pad && !first)) return NULL;
    g.first = first ? first->data : NULL;           /* host copies of first and pad */
    g.pad = plan->old_pad ? plan->old_pad->data : NULL;
    for (b = 0; b < plan->B; b++) {
        if (plan->m->desc.compress == STX_COMP_COMPRESS_USED) {
            stx__comp_missing_picked(&g, b, v + b * G);
            continue;
        }
        for (i = 0; i < G; i++) {
            v[b * G + i] = 1;
            for (t = 0; t < g.taps; t++)
                if (stx__comp_tap_row(&g, b, i, t) >= 0) v[b * G + i] = 0;
        }
    }
    return stx__comp_mask(x, v, plan->B, G);
}

/* Returns how the evicted rows are copied for the method: as the taps of each group, or,
   with STX_COMP_ROWS_CONSECUTIVE, as one group of all rows. */
static stx_comp_groups stx__comp_source_groups(const stx__comp_layer_plan *plan) {
    const stx_comp *m = plan->m;
    stx_comp_groups g = plan->groups;
    if (m->method->layout != STX_COMP_ROWS_CONSECUTIVE) return g;
    g.at = -(ptrdiff_t)(m->before + (g.first ? (plan->G - 1) * g.step : 0));
    g.groups = 1;
    g.taps = stx__comp_source_rows(m, plan->G);
    return g;
}

/* Custom method: returns the mask of the rows that it reads, or NULL if none are missing.
   `first` is as in stx__comp_missing. */
static const stx_ids *stx__comp_missing_rows(stx_ctx *x, const stx__comp_layer_plan *plan,
                                             const stx_ids *first) {
    stx_comp_groups g = stx__comp_source_groups(plan);
    const size_t n = g.groups * g.taps;
    int32_t *v;
    size_t b, i;
    if (!plan->m->desc.custom) return NULL;
    v = (int32_t *)stx_step_host_bytes(x, stx_bytes_of(plan->B, n, sizeof *v));
    g.first = first ? first->data : NULL;           /* host copies of first and pad */
    g.pad = plan->old_pad ? plan->old_pad->data : NULL;
    for (b = 0; v && b < plan->B; b++)
        for (i = 0; i < n; i++)
            v[b * n + i] = stx__comp_tap_row(&g, b, i / g.taps, i % g.taps) < 0;
    return stx__comp_mask(x, v, plan->B, n);
}

/* Adds to *counted the number of queries that the attention loss compares, and marks
   the others in aux_skip: padding (except with STX_COMP_LITERAL_MASK), and all queries
   of streams that have no evicted row or no new compressed row. */
static int stx__comp_count_queries(stx_ctx *x, stx__comp_layer_plan *plan, size_t *counted) {
    const unsigned literal = plan->m->desc.literal;
    const int whole = (literal & STX_COMP_LITERAL_TARGET) != 0;
    const size_t B = plan->B, T = plan->T;
    const size_t target = whole ? plan->n : plan->e, from = whole ? plan->c : 0;
    const stx_ids *old_pad = whole ? plan->key_pad : plan->old_pad;
    const stx_ids *query_pad = literal & STX_COMP_LITERAL_MASK ? NULL : plan->pad;
    int32_t *skip = (int32_t *)stx_step_host_bytes(x, stx_bytes_of(B, T, sizeof *skip));
    size_t b, i;
    if (!skip || !target) return 0;
    for (b = 0; b < B; b++) {
        int has_old = 0, has_new = 0;
        for (i = 0; i < target; i++)
            has_old |= !old_pad || !old_pad->data[b * old_pad->T + from + i];
        for (i = 0; i < plan->G; i++)
            has_new |= !plan->new_pad || !plan->new_pad->data[b * plan->G + i];
        for (i = 0; i < T; i++) {
            const int padding = query_pad && query_pad->data[b * T + i];
            skip[b * T + i] = !has_old || !has_new || padding;
            *counted += !skip[b * T + i];
        }
    }
    plan->aux_skip = stx__comp_mask(x, skip, B, T);
    return 1;
}

/* Decides whether there is an aux loss, and counts the elements that it compares. */
static void stx__comp_count_aux(stx_ctx *x, stx__comp_layer_plan *plan) {
    STX__FP_SCOPE;
    const stx_comp_desc *d = &plan->m->desc;
    size_t i, counted = 0;
    if (d->aux == STX_COMP_AUX_AUTOENCODE) {
        for (i = 0; i < plan->B * plan->e; i++)
            counted += !plan->old_pad || !plan->old_pad->data[i];
        plan->aux_skip = plan->old_pad;
    } else if (!stx__comp_count_queries(x, plan, &counted)) {
        return;
    }
    plan->aux_elements = (double)counted * (double)d->dim;
    plan->aux = stx_ranks(x) > 1 || counted > 0;
}

/* STX_COMP_LITERAL_MASK: creates the masks. Real queries see the whole memory, and no
   padding in the segment. Padded queries see only the memory. */
static int stx__comp_literal_masks(stx_ctx *x, stx__comp_layer_plan *plan) {
    const size_t B = plan->B, T = plan->T, keys = plan->c + plan->n + T;
    int32_t *v = (int32_t *)stx_step_host_bytes(x, stx_bytes_of(3 * B, keys, sizeof *v));
    int32_t *key_pad, *segment_pad, *not_pad;
    size_t b, i;
    if (!v) return 0;
    memset(v, 0, 3 * B * keys * sizeof *v);
    key_pad = v;
    segment_pad = v + B * keys;
    not_pad = v + 2 * B * keys;
    for (b = 0; b < B; b++) {
        for (i = 0; i < T; i++) {
            const size_t key = b * keys + keys - T + i;
            const int32_t pad = plan->pad->data[b * T + i];
            key_pad[key] = pad;
            segment_pad[key] = 1;
            not_pad[b * T + i] = !pad;
        }
    }
    plan->key_pad = stx_tokens(x, key_pad, B, keys);
    plan->segment_pad = stx_tokens(x, segment_pad, B, keys);
    plan->not_pad = stx_tokens(x, not_pad, B, T);
    return stx_ok(x);
}

/* STX_COMP_AUX_BPTT: lists the previous evictions for which slot `from` still has the
   source rows. The sizes of these evictions follow from the largest number of rows that
   a stream has pushed. */
static int stx__comp_plan_bptt(stx_ctx *x, stx__comp_layer_plan *plan, const stx_comp_state *s,
                               size_t from) {
    const stx_comp_desc *d = &plan->m->desc;
    const size_t S = d->segment, pushed = stx__comp_most_pushed(s);
    const stx_ids *missing = NULL;
    size_t left = s->source->layer[from].count, k;
    size_t *groups = (size_t *)stx_step_host_bytes(x, stx_bytes_of(d->bptt, sizeof *groups, 1));
    plan->recent_groups = groups;
    plan->recent_missing = (const stx_ids **)stx_step_host_bytes(
        x, stx_bytes_of(d->bptt, sizeof *plan->recent_missing, 1));
    if (!groups || !plan->recent_missing) return 0;
    if (d->custom) missing = stx_memory_mask(s->source, from, left, NULL, 0);
    for (k = 1; k <= d->bptt && pushed >= k * S; k++) {
        const size_t n = STX_MIN(pushed - k * S, plan->M);      /* number of rows in the
                                                                   memory at that time */
        const size_t G = stx__comp_new_rows(d, stx__comp_evicted(n, S, plan->M));
        const size_t rows = stx__comp_source_rows(plan->m, G);
        if (!G || rows > left) break;
        left -= rows;
        plan->recent_missing[k - 1] = missing ? stx__comp_mask_part(x, missing, left, rows) : NULL;
        groups[plan->recent++] = G;
    }
    return 1;
}

/* Returns the index of each stream's first evicted row (B,1), or NULL if all indices
   are 0. Rows before that index date from before the stream's reset. */
static const stx_ids *stx__comp_first_rows(stx_ctx *x, const stx__comp_layer_plan *plan,
                                           const stx_comp_state *s) {
    const stx_comp_desc *d = &plan->m->desc;
    int32_t *v;
    size_t b;
    if (!s || (d->literal & STX_COMP_LITERAL_PAD)) return NULL;
    v = (int32_t *)stx_step_host_bytes(x, stx_bytes_of(plan->B, 1, sizeof *v));
    for (b = 0; v && b < plan->B; b++) {
        const size_t own = stx__comp_evicted(STX_MIN(s->pushed[b], plan->n), d->segment, plan->M);
        v[b] = (int32_t)(plan->e - STX_MIN(own, plan->e));
    }
    return stx__comp_mask(x, v, plan->B, 1);
}

/* Cuts the e evicted rows into groups. */
static int stx__comp_plan_groups(stx_ctx *x, stx__comp_layer_plan *plan, const stx_comp_state *s) {
    const stx_comp_desc *d = &plan->m->desc;
    const stx_ids *first;
    const int consecutive = plan->m->method->layout == STX_COMP_ROWS_CONSECUTIVE;
    size_t before = consecutive ? 0 : plan->m->before;
    if (d->literal & STX_COMP_LITERAL_PAD) before += plan->e % d->ratio;
    plan->G = stx__comp_new_rows(d, plan->e);
    plan->groups = stx__comp_groups_of(plan->B, plan->e, plan->G, plan->m->taps, d->ratio, d->dim);
    plan->groups.at = -(ptrdiff_t)before;
    if (!plan->G) {
        plan->e = 0;
        return stx_ok(x);
    }
    first = stx__comp_first_rows(x, plan, s);
    if (plan->key_pad && !(d->literal & STX_COMP_LITERAL_MASK))
        plan->old_pad = stx__comp_mask_part(x, plan->key_pad, plan->c, plan->e);
    plan->groups.first = first ? first->device : NULL;
    plan->groups.pad = plan->old_pad ? plan->old_pad->device : NULL;
    plan->new_pad = stx__comp_missing(x, plan, first);
    plan->missing = stx__comp_missing_rows(x, plan, first);
    return stx_ok(x);
}

/* Creates the key mask from the padding in slot `from` of s and in the segment. */
static int stx__comp_plan_masks(stx_ctx *x, stx__comp_layer_plan *plan, const stx_comp_state *s,
                                size_t from) {
    const stx_ids *pad = plan->pad;
    if (plan->m->desc.literal & STX_COMP_LITERAL_MASK)
        return !pad || stx__comp_literal_masks(x, plan);
    if (plan->n + plan->c) {
        pad = stx_memory_mask(s->mem, from, plan->n, pad, plan->T);
        pad = stx_memory_mask(s->comp, from, plan->c, pad, plan->n + plan->T);
    }
    plan->key_pad = pad;
    return 1;
}

/* Fills in the plan of layer l. Its memory is in slot `from` of s; s is NULL if there
   is no memory. push is 1 if the segment is full and enters the memory. Returns 0 and
   sets an error if an allocation fails. */
static int stx__comp_plan(stx_comp *m, size_t l, const stx_comp_state *s, size_t from, size_t B,
                          size_t T, const stx_ids *pad, int push, stx__comp_layer_plan *plan) {
    stx_ctx *x = m->ctx;
    const stx_comp_desc *d = &m->desc;
    const stx_comp_layer *p = &m->layer[l];
    const int training = stx_training(x);
    const int compares = d->aux == STX_COMP_AUX_ATTENTION || d->aux == STX_COMP_AUX_AUTOENCODE;
    memset(plan, 0, sizeof *plan);
    plan->m = m;
    plan->l = l;
    plan->B = B;
    plan->T = T;
    plan->pad = pad;
    plan->push = push;
    plan->n = s && p->memory ? s->mem->layer[from].count : 0;
    plan->c = s && p->memory ? s->comp->layer[from].count : 0;
    plan->M = s ? s->M[l] : p->M;
    plan->C = s ? s->C[l] : p->C;
    if (!stx__comp_plan_masks(x, plan, s, from)) return 0;
    if (plan->c && training && d->aux == STX_COMP_AUX_BPTT)
        if (!stx__comp_plan_bptt(x, plan, s, from)) return 0;

    plan->e = push && plan->C ? stx__comp_evicted(plan->n, d->segment, plan->M) : 0;
    if (!plan->e) return stx_ok(x);
    if (!stx__comp_plan_groups(x, plan, s)) return 0;
    if (plan->e && training && compares) stx__comp_count_aux(x, plan);
    return stx_ok(x);
}

/* Returns the rows of `a` followed by those of `b`. Either can be NULL. */
static stx_tensor *stx__comp_concat(stx_ctx *x, stx_tensor *a, stx_tensor *b) {
    if (a && b) return stx_concat(x, a, b);
    return a ? a : b;
}

/* Returns rows [begin, end) of `a`, or NULL if there are none. */
static stx_tensor *stx__comp_slice(stx_ctx *x, stx_tensor *a, size_t begin, size_t end) {
    if (begin == end || !a) return NULL;
    return begin == 0 && end == a->dim[1] ? a : stx_slice(x, a, begin, end);
}

/* Returns the e evicted rows, oldest first. They come from the n memory rows `held` and
   then from the segment's rows (B,T,D), and are copied only if they come from both. The
   result's data is NULL after an error. */
static stx_cached_rows stx__comp_old_rows(stx_ctx *x, const stx__comp_layer_plan *plan,
                                          stx_cached_rows held, const stx_tensor *rows) {
    const size_t D = plan->m->desc.dim, n = STX_MIN(plan->e, plan->n), own = plan->e - n;
    stx_tensor *t;
    held.rows = plan->e;
    if (!own) return held;
    if (!n || !rows) {
        held.data = rows ? rows->data : NULL;
        held.stride = plan->T * D;
        return held;
    }
    t = stx_new(x, plan->B, plan->e, D, 0);
    if (t)
        STX_RUN(x, stx_concat2d, (x, t->data, held.data, held.stride, n * D, rows->data,
                                  plan->T * D, own * D, plan->B));
    held.data = t ? t->data : NULL;
    held.stride = plan->e * D;
    return held;
}

/* Returns a copy of the evicted rows as the method reads them: the taps of each group
   (B,G taps,D), or all rows (B,before + G r,D). NULL with STX_COMP_ROWS_IN_PLACE. */
static stx_tensor *stx__comp_source(stx_ctx *x, const stx__comp_layer_plan *plan,
                                    const stx_cached_rows *old) {
    const stx_comp *m = plan->m;
    stx_comp_groups g = stx__comp_source_groups(plan);
    stx_tensor *y;
    if (m->method->layout == STX_COMP_ROWS_IN_PLACE) return NULL;
    y = stx_new(x, plan->B, stx__comp_source_rows(m, plan->G), g.D, 0);
    g.stride = old->stride;
    if (y) STX_RUN(x, stx_comp_unfold, (x, y->data, old->data, &g, 0));
    return y;
}

/* Runs the method on G groups: source (B,..,D) -> (B,G,D). `in` has the fields that only
   some methods read; this function sets the others. */
static stx_tensor *stx__comp_apply(stx_ctx *x, const stx_comp *m, size_t l, stx_comp_evicted *in,
                                   stx_tensor *source, size_t B, size_t G) {
    const stx_comp_method *method = m->method;
    const char *name = method->name ? method->name : "custom";
    stx_tensor *y;
    in->desc = &m->desc;
    in->l = l;
    in->B = B;
    in->G = G;
    in->D = m->desc.dim;
    in->taps = m->taps;
    in->before = m->before;
    in->w = m->layer[l].compress;
    in->rows = source;
    if (!stx_ok(x)) return NULL;
    y = method->forward(x, method->user, in);
    if (!stx_ok(x)) return NULL;
    if (y && y->ndim == 3 && y->dim[0] == B && y->dim[1] == G && y->dim[2] == in->D) return y;
    if (y)
        stx_fail(x, STX_ERR_SHAPE,
                 "stx_comp_segment: compression \"%s\" of layer %zu: expected new rows "
                 "(B,G,D) = (%zu,%zu,%zu), got %d dimensions, (%zu,%zu,%zu)",
                 name, l, B, G, in->D, y->ndim, y->dim[0], y->ndim > 1 ? y->dim[1] : 0,
                 y->ndim > 2 ? y->dim[2] : 0);
    else
        stx_fail(x, STX_ERR_ARG,
                 "stx_comp_segment: compression \"%s\" of layer %zu: expected new rows "
                 "(%zu,%zu,%zu), got NULL: the function failed", name, l, B, G, in->D);
    return NULL;
}

/* Compresses the evicted rows old (B,e,D) to new rows (B,G,D). *source receives the copy
   of the rows that the method read, or NULL. usage (B,..,2) is the usage of the old
   rows. */
static stx_tensor *stx__comp_compress(stx_ctx *x, const stx__comp_layer_plan *plan,
                                      const stx_cached_rows *old, const stx_tensor *usage,
                                      stx_tensor **source) {
    stx_comp_evicted in;
    stx_tensor *y;
    *source = NULL;
    if (!old->data) return NULL;
    memset(&in, 0, sizeof in);
    in.old = *old;
    in.groups = plan->groups;
    in.groups.stride = old->stride;
    in.usage = usage;
    in.missing = plan->missing;
    *source = stx__comp_source(x, plan, old);
    y = stx__comp_apply(x, plan->m, plan->l, &in, *source, plan->B, plan->G);
    return stx__comp_zero_rows(x, y, plan->new_pad);
}

/* Returns the usage (B,n+T,2) of the rows of the memory and of the segment. For memory
   rows, adds the attention with arguments `a` to `usage`, which is NULL if the memory
   is empty. `a` is NULL if `usage` already includes this attention. The usage of
   segment rows is 0. */
static stx_tensor *stx__comp_next_usage(stx_ctx *x, const stx__comp_layer_plan *plan,
                                        const stx_tensor *usage, const stx_attention_args *a) {
    stx_tensor *y = stx_new_f32(x, plan->B, plan->n + plan->T, 2, 0);
    const size_t usage_batch_stride = 2 * (plan->n + plan->T);
    if (!y) return NULL;
    STX_RUN(x, stx_fill, (x, y->data, y->size, 0));
    if (!usage) return y;
    STX_RUN(x, stx_copy2d,
            (x, y->data, usage_batch_stride, usage->data, 2 * plan->n, plan->B, 2 * plan->n, 0));
    if (a) STX_RUN(x, stx_comp_usage, (x, y->data, usage_batch_stride, a, plan->c, plan->n));
    return y;
}

/* Pushes the rows of a full segment into the memory of layer l, and the new compressed
   rows comp (NULL if nothing was evicted) into the layer's compressed memory. */
static int stx__comp_push(stx_comp_state *s, const stx__comp_layer_plan *plan, stx_tensor *rows,
                          stx_tensor *comp, stx_tensor *source, stx_tensor *usage) {
    const stx_comp *m = plan->m;
    const size_t l = plan->l;
    const stx_ids *pad = m->desc.literal & STX_COMP_LITERAL_MASK ? NULL : plan->pad;
    size_t i, keep;
    if (!m->layer[l].memory) return 1;
    if (!stx_memory_push(s->mem, s->mem, l, plan->M, rows, pad)) return 0;
    if (usage && plan->C && !stx_memory_push(s->usage, NULL, l, plan->M, usage, NULL)) return 0;
    if (!comp) return 1;
    if (!stx_memory_push(s->comp, s->comp, l, plan->C, comp, plan->new_pad)) return 0;
    if (!s->source) return 1;

    /* keep the sources of the last bptt evictions, including this one */
    keep = source->dim[1];
    for (i = 0; i < plan->recent && i + 1 < m->desc.bptt; i++)
        keep += stx__comp_source_rows(m, plan->recent_groups[i]);
    return stx_memory_push(s->source, s->source, l, keep, source, plan->missing);
}

static void stx__comp_count_segment(stx_comp_state *s) {
    size_t b;
    for (b = 0; b < s->B; b++)
        s->pushed[b] = STX_MIN(s->pushed[b] + s->model->desc.segment, s->pushed_max);
}

/* Returns the next memory layer above l, wrapping around at the top. */
static size_t stx__comp_layer_above(const stx_comp *m, size_t l) {
    do {
        l = (l + 1) % m->desc.layers;
    } while (!m->layer[l].memory);
    return l;
}

/* STX_COMP_STORE_ROTATE: moves each memory to the next lower memory layer, and the
   lowest layer's memory to the top one. */
static void stx__comp_rotate(stx_comp_state *s) {
    const stx_comp *m = s->model;
    stx_memory *part[STX__COMP_PARTS];
    size_t l, above, first = 0;
    int i;
    while (first < m->desc.layers && !m->layer[first].memory) first++;
    if (first == m->desc.layers) return;
    stx__comp_parts(s, part);
    for (i = 0; i < STX__COMP_PARTS; i++) {
        stx_memory_layer *row, lowest;
        if (!part[i]) continue;
        row = part[i]->layer;
        lowest = row[first];
        for (l = first; (above = stx__comp_layer_above(m, l)) != first; l = above)
            row[l] = row[above];
        row[l] = lowest;
    }
}


// >>layer

/* Sizes of an op that copies keys and values (..,2 kv_heads hd) to all heads (..,2 D):
   each kv head is shared by H / kv_heads query heads. */
typedef struct stx__comp_heads {
    size_t rows, hd, H, kv_heads;
} stx__comp_heads;

static void stx__comp_heads_back(stx_ctx *x, stx_tensor *y, stx_tensor *const *in, void *save) {
    const stx__comp_heads *s = (const stx__comp_heads *)save;
    stx_real *d = stx_grad(x, in[0], NULL);
    size_t h;
    for (h = 0; d && h < 2 * s->H; h++) {
        stx_real *to = stx_offset_ptr(x, d, h / (s->H / s->kv_heads) * s->hd);
        STX_RUN(x, stx_copy2d,
                (x, to, 2 * s->kv_heads * s->hd, stx_offset_ptr(x, y->grad, h * s->hd),
                 2 * s->H * s->hd, s->rows, s->hd, 1));
    }
}

static stx_tensor *stx__comp_all_heads(stx_ctx *x, const stx_comp_desc *d, stx_tensor *kv) {
    stx__comp_heads *s;
    stx_tensor *y;
    size_t h;
    if (!stx_ok(x) || !kv || d->kv_heads == d->heads) return kv;
    s = (stx__comp_heads *)stx_step_host_bytes(x, sizeof *s);
    y = stx_new(x, kv->dim[0], kv->dim[1], 2 * d->dim, 0);
    if (!s || !y) return NULL;
    s->rows = kv->dim[0] * kv->dim[1];
    s->hd = d->dim / d->heads;
    s->H = d->heads;
    s->kv_heads = d->kv_heads;
    for (h = 0; h < 2 * s->H; h++) {
        const stx_real *from = stx_offset_ptr(x, kv->data, h / (s->H / s->kv_heads) * s->hd);
        STX_RUN(x, stx_copy2d,
                (x, stx_offset_ptr(x, y->data, h * s->hd), 2 * s->H * s->hd, from,
                 2 * s->kv_heads * s->hd, s->rows, s->hd, 0));
    }
    stx_record(x, y, &kv, 1, stx__comp_heads_back, s);
    return y;
}

/* Applies five alternating updates, y = 2 sig(q1 q0 x) y and x = 2 sig(r1 r0 y) x. */
static void stx__comp_mogrify(const stx_comp *m, const stx_comp_gate *g, stx_tensor **xs,
                              stx_tensor **y) {
    stx_ctx *x = m->ctx;
    int i;
    for (i = 0; i < 5; i++) {
        stx_tensor *const *w = g->mogrify + (i % 2 ? 2 : 0);
        stx_tensor **changed = i % 2 ? xs : y;
        stx_tensor *in[STX__COMP_INPUTS] = {NULL}, *t = i % 2 ? *y : *xs;
        t = stx_linear(x, t, w[0], NULL, STX_ACT_NONE);
        in[STX__COMP_IN_P] = stx_linear(x, t, w[1], NULL, STX_ACT_NONE);
        in[STX__COMP_IN_X] = *changed;
        *changed = stx__comp_gate_op(x, STX_COMP_GATE_MOGRIFY, in);
    }
}

/* Computes any gate except residual from the residual stream xs and the sublayer output
   y; see the manual. Does not apply the layer norm. */
static stx_tensor *stx__comp_gate_matmuls(const stx_comp *m, const stx_comp_gate *g, stx_tensor *xs,
                                          stx_tensor *y) {
    stx_ctx *x = m->ctx;
    const int kind = m->desc.gate;
    stx_tensor *in[STX__COMP_INPUTS] = {NULL}, **p = in + STX__COMP_IN_P, *bias = NULL, *reset;
    if (kind == STX_COMP_GATE_HIGHWAY)
        bias = g->b[0];
    else if (kind != STX_COMP_GATE_GRU && stx__comp_gate_has_bias(kind))
        bias = stx_scale(x, g->b[0], -1);       /* the gate subtracts the bias */

    in[STX__COMP_IN_X] = xs;
    switch (kind) {
    case STX_COMP_GATE_GRU:      /* the gate's kernel computes the bias gradients */
        p[0] = stx_linear(x, y, g->w[0], stx_detach(x, g->b[0]), STX_ACT_NONE);
        p[1] = stx_linear(x, xs, g->w[1], stx_detach(x, g->b[1]), STX_ACT_NONE);
        in[STX__COMP_IN_BIAS] = g->b[0];
        in[STX__COMP_IN_BIAS + 1] = g->b[1];
        break;
    case STX_COMP_GATE_SIGTANH:
        p[0] = stx_linear(x, y, g->w[0], bias, STX_ACT_NONE);
        p[1] = stx_linear(x, y, g->w[1], NULL, STX_ACT_NONE);
        break;
    case STX_COMP_GATE_GTRXL:
        p[0] = stx_linear(x, y, g->w[0], NULL, STX_ACT_NONE);
        p[1] = stx_linear(x, xs, g->w[1], NULL, STX_ACT_NONE);
        reset = stx__comp_gate_op(x, STX_COMP_GATE_RESET, in);
        p[0] = stx_linear(x, y, g->w[2], NULL, STX_ACT_NONE);
        p[1] = stx_linear(x, xs, g->w[3], bias, STX_ACT_NONE);
        p[2] = stx_linear(x, y, g->w[4], NULL, STX_ACT_NONE);
        p[3] = stx_linear(x, reset, g->w[5], NULL, STX_ACT_NONE);
        break;
    default:                /* input, output and highway */
        in[STX__COMP_IN_Y] = y;
        p[0] = stx_linear(x, xs, g->w[0], bias, STX_ACT_NONE);
    }
    return stx__comp_gate_op(x, kind, in);
}

/* Returns gate(x, y), or LN(gate(x, y)) with norm_after. xs is the residual stream,
   called x in the formulas. */
static stx_tensor *stx__comp_apply_gate(const stx_comp *m, const stx_comp_gate *g, stx_tensor *xs,
                                        stx_tensor *y, stx_tensor *gain, stx_tensor *shift) {
    stx_ctx *x = m->ctx;
    const stx_comp_desc *d = &m->desc;
    stx_tensor *out;
    if (!stx_ok(x) || !xs || !y) return NULL;
    if (d->gate == STX_COMP_GATE_RESIDUAL) {
        if (d->norm_after) return stx_residual_norm(x, xs, y, 0, gain, shift, 1e-5);
        return stx_add(x, xs, y);
    }
    if (d->mogrify) stx__comp_mogrify(m, g, &xs, &y);
    out = stx__comp_gate_matmuls(m, g, xs, y);
    return d->norm_after ? stx_layernorm(x, out, gain, shift, 1e-5) : out;
}

/* The part of a layer that follows the attention, whose output is o. xs is the residual
   stream, called x in the formulas:
       x' = gate(x, Wo o + bo)
       x  = gate(x', W2 gelu(W1 LN(x') + b1) + b2) */
static stx_tensor *stx__comp_after(const stx_comp *m, size_t l, stx_tensor *xs, stx_tensor *o) {
    stx_ctx *x = m->ctx;
    const stx_comp_desc *d = &m->desc;
    const stx_comp_layer *p = &m->layer[l];
    const int act = d->gate_relu ? STX_ACT_RELU : STX_ACT_NONE;
    stx_tensor *f;
    o = stx_dropout(x, stx_linear(x, o, p->wo, p->bo, act), d->out_dropout);
    xs = stx__comp_apply_gate(m, &p->attn_gate, xs, o, p->attn_gain, p->attn_shift);

    f = d->norm_after ? xs : stx_layernorm(x, xs, p->ff_gain, p->ff_shift, 1e-5);
    if (d->glu) {
        stx_tensor *in[STX__COMP_INPUTS] = {NULL};
        in[STX__COMP_IN_P] = stx_linear(x, f, p->w1, stx_detach(x, p->b1), STX_ACT_NONE);
        in[STX__COMP_IN_BIAS] = p->b1;
        f = stx__comp_gate_op(x, STX_COMP_GATE_GLU, in);
    } else {
        f = stx_linear(x, f, p->w1, p->b1, STX_ACT_GELU);
    }
    f = stx_linear(x, stx_dropout(x, f, d->ff_dropout), p->w2, p->b2, act);
    return stx__comp_apply_gate(m, &p->ff_gate, xs, f, p->ff_gain, p->ff_shift);
}

/* Returns Wkv for the attention, as a constant if STX_COMP_LITERAL_FREEZE has frozen
   it. */
static stx_tensor *stx__comp_wkv(const stx_comp *m, size_t l, int frozen) {
    return frozen ? stx_detach(m->ctx, m->layer[l].wkv) : m->layer[l].wkv;
}

/* Returns [comp ; mem] of slot l of s (B,c+n,D) as a constant, or NULL if both are
   empty. The rows are copied into one tensor, so that the forward and the backward pass
   require only one matmul each. Reading the rows in place (stx_linear_cached) would
   require two each. On a GPU, it would also add six graph nodes per layer to gather
   rows and gradients for Wkv's gradient. */
static stx_tensor *stx__comp_memory_rows(const stx_comp_state *s, size_t l) {
    const stx_memory_layer *c = &s->comp->layer[l], *n = &s->mem->layer[l];
    stx_ctx *x = s->model->ctx;
    stx_tensor *t;
    if (!n->count && c->count) return stx_memory_read(s->comp, l, c->count);
    if (!c->count) return stx_memory_read(s->mem, l, n->count);
    t = stx_new(x, s->B, c->count + n->count, c->width, 0);
    if (t)
        STX_RUN(x, stx_concat2d,
                (x, t->data, c->data, c->stride, c->count * c->width, n->data, n->stride,
                 n->count * n->width, s->B));
    return t;
}

/* Returns memory rows as the layer reads them. With STX_COMP_STORE_OUTPUT, they are
   layer outputs and are normalised here. If constant is 1, gain and shift receive no
   gradient. */
static stx_tensor *stx__comp_norm_memory(const stx_comp *m, size_t l, stx_tensor *rows,
                                         int constant) {
    stx_ctx *x = m->ctx;
    stx_tensor *gain = m->layer[l].attn_gain, *shift = m->layer[l].attn_shift;
    if (m->desc.recurrence != STX_COMP_STORE_OUTPUT || m->desc.norm_after || !rows) return rows;
    if (constant) {
        gain = stx_detach(x, gain);
        shift = stx_detach(x, shift);
    }
    return stx_layernorm(x, rows, gain, shift, 1e-5);
}

/* Returns the learned table, extended to at least n distances. Its last row is for
   distance 0. Distances beyond the table use its first row. */
static stx_tensor *stx__comp_extended_table(const stx_comp *m, size_t n) {
    stx_ctx *x = m->ctx;
    const size_t rows = m->key_pe->dim[0];
    int32_t *index;
    size_t i;
    if (n <= rows) return m->key_pe;
    index = (int32_t *)stx_step_host_bytes(x, stx_bytes_of(n, sizeof *index, 1));
    for (i = 0; index && i < n; i++) index[i] = (int32_t)(i < n - rows ? 0 : i - (n - rows));
    return index ? stx_gather(x, m->key_pe, index, n) : NULL;
}

/* Returns the largest S + n + c of any layer. With STX_COMP_LITERAL_ROWS, every layer
   uses this number of rows of the position table. */
static size_t stx__comp_rows_in_use(const stx_comp *m, const stx_comp_state *s) {
    size_t l, n = 0;
    for (l = 0; s && l < m->desc.layers; l++)
        n = STX_MAX(n, s->mem->layer[l].count + s->comp->layer[l].count);
    return m->desc.segment + n;
}

/* Returns position vectors (rows,D), rows >= keys. The last `keys` rows are for
   distances keys - 1 .. 0. */
static stx_tensor *stx__comp_positions(stx_ctx *x, const stx__comp_layer_plan *plan, size_t keys) {
    const stx_comp *m = plan->m;
    stx_tensor *sines;
    size_t rows;
    if (m->desc.literal & STX_COMP_LITERAL_ROWS)
        return stx_view_rows(x, m->key_pe, 0, plan->table_rows);
    if (!m->sines) return stx__comp_extended_table(m, keys);
    rows = m->sines->dim[0];
    sines = stx_view_rows(x, m->sines, rows - keys, rows);
    return stx_linear(x, sines, m->layer[plan->l].wpos, NULL, STX_ACT_NONE);
}

static void stx__comp_attention_desc(const stx_comp *m, size_t l, stx_attention_in *a,
                                     stx_attention_desc *d) {
    memset(a, 0, sizeof *a);
    memset(d, 0, sizeof *d);
    d->heads = m->desc.heads;
    d->dropout = m->desc.attn_dropout;
    a->content_bias = m->layer[l].u;
    a->position_bias = m->layer[l].vb;
}

/* Queries, keys and values in one of the two forms that stx_attention_in accepts: q
   (B,T,D) and kv (B,keys,2D), or qkv (B,T,3D) for the segment and past (B,keys-T,2D)
   for the memory. */
typedef struct stx__comp_qkv {
    stx_tensor *q, *kv, *qkv, *past;
    size_t      keys;
} stx__comp_qkv;

/* Computes q, k and v. src is the memory (B,c+n,D), or NULL, and h (B,T,D) is the
   normalised segment. One matmul computes q, k and v of the segment, except in three
   cases: if q, k and v differ in width, if stx_comp_usage needs all keys in one array,
   and if STX_COMP_LITERAL_MASK needs a second attention for padded queries. */
static stx__comp_qkv stx__comp_project(stx_ctx *x, const stx__comp_layer_plan *plan,
                                       stx_tensor *src, stx_tensor *h) {
    const stx_comp_desc *d = &plan->m->desc;
    const int one_matmul = d->kv_heads == d->heads && d->compress != STX_COMP_COMPRESS_USED
                           && !plan->segment_pad;
    stx_tensor *w[2], *wkv = stx__comp_wkv(plan->m, plan->l, plan->frozen);
    stx__comp_qkv y;
    memset(&y, 0, sizeof y);
    w[0] = plan->m->layer[plan->l].wq;
    w[1] = wkv;
    y.keys = h->dim[1] + (src ? src->dim[1] : 0);
    if (one_matmul) {
        y.qkv = stx_linear_concat(x, h, w, NULL, 2);
        y.past = stx_linear(x, src, wkv, NULL, STX_ACT_NONE);       /* NULL if src is NULL */
        return y;
    }
    y.q = stx_linear(x, h, w[0], NULL, STX_ACT_NONE);
    if (src && src->needs_grad) {       /* src was recompressed, or normalised by this layer */
        y.kv = stx_linear(x, stx_concat(x, src, h), wkv, NULL, STX_ACT_NONE);
    } else {
        stx_tensor *rows = stx__comp_concat(x, src, stx_detach(x, h));
        y.kv = stx_linear_memory(x, rows, h, wkv, NULL);
    }
    y.kv = stx__comp_all_heads(x, d, y.kv);
    return y;
}

/* Returns the keys and values of rows [begin, end) as constants in one tensor. */
static stx_tensor *stx__comp_kv_rows(stx_ctx *x, const stx__comp_qkv *proj, size_t begin,
                                     size_t end) {
    const size_t past = proj->past ? proj->past->dim[1] : 0;
    stx_tensor *y = NULL, *t;
    if (!proj->qkv) return stx__comp_slice(x, stx_detach(x, proj->kv), begin, end);
    if (begin < past)
        y = stx__comp_slice(x, stx_detach(x, proj->past), begin, STX_MIN(end, past));
    if (end <= past) return y;
    t = stx_detach(x, proj->qkv);
    t = stx_slice_channels(x, t, t->dim[2] / 3, t->dim[2]);
    t = stx__comp_slice(x, t, STX_MAX(begin, past) - past, end - past);
    return stx__comp_concat(x, y, t);
}

/* Returns the attention output softmax(s) v (B,T,D), where s are the scores. It is 0
   for padded queries. *attn_args receives the kernel's arguments. */
static stx_tensor *stx__comp_attend(stx_ctx *x, const stx__comp_layer_plan *plan,
                                    const stx__comp_qkv *proj, stx_attention_args **attn_args) {
    stx_attention_in a;
    stx_attention_desc d;
    stx_tensor *y;
    *attn_args = NULL;
    if (!stx_ok(x)) return NULL;
    stx__comp_attention_desc(plan->m, plan->l, &a, &d);
    a.q = proj->q;
    a.kv = proj->kv;
    a.qkv = proj->qkv;
    a.cached[0] = proj->past;
    a.pe = stx__comp_positions(x, plan, proj->keys);
    if (!a.pe) return NULL;
    a.pad = plan->key_pad;
    a.args_out = attn_args;
    a.record = &plan->m->attended[plan->l].call;
    y = stx__comp_zero_rows(x, stx_attention(x, &a, &d), plan->pad);
    if (!plan->segment_pad) return y;

    /* STX_COMP_LITERAL_MASK: padded queries see all of the memory, or, if it is empty,
       all keys of the segment with equal weight */
    a.pad = plan->segment_pad;
    a.args_out = NULL;
    a.record = NULL;
    if (!(plan->n + plan->c)) {
        a.pe = a.content_bias = a.position_bias = NULL;
        a.pad = NULL;
        d.not_causal = 1;
        a.q = stx_new(x, proj->q->dim[0], proj->q->dim[1], proj->q->dim[2], 0);
        if (a.q) STX_RUN(x, stx_fill, (x, a.q->data, a.q->size, 0));
    }
    return stx_add(x, y, stx__comp_zero_rows(x, stx_attention(x, &a, &d), plan->not_pad));
}

/* Returns att(rows) of the aux loss: the queries of proj attend to `rows` rows of kv,
   starting at row `first`, without positions and without a causal mask. rows = 0 means
   all rows. The queries are constants. */
static stx_tensor *stx__comp_attend_rows(const stx_comp *m, const stx__comp_qkv *proj,
                                         stx_tensor *kv, size_t first, size_t rows,
                                         const stx_ids *pad, double dropout) {
    stx_attention_in a;
    stx_attention_desc d;
    memset(&a, 0, sizeof a);
    memset(&d, 0, sizeof d);
    a.q = stx_detach(m->ctx, proj->q);
    a.qkv = stx_detach(m->ctx, proj->qkv);
    a.kv = kv;
    a.kv_first = first;
    a.kv_rows = rows;
    a.pad = pad;
    d.heads = m->desc.heads;
    d.not_causal = 1;
    d.dropout = dropout;
    return stx_attention(m->ctx, &a, &d);
}

/* Returns the keys and values of rows (B,..,D) for all heads, computed with a constant
   Wkv. */
static stx_tensor *stx__comp_constant_kv(const stx_comp *m, size_t l, stx_tensor *rows) {
    stx_tensor *wkv = stx_detach(m->ctx, m->layer[l].wkv);
    rows = stx_linear(m->ctx, stx__comp_norm_memory(m, l, rows, 1), wkv, NULL, STX_ACT_NONE);
    return stx__comp_all_heads(m->ctx, &m->desc, rows);
}

/* Returns the autoencoder's aux loss, mean (old - rec)^2, where rec[i] is the sum of
   Dec_t new_g over all groups g and taps t with g r + t = i. comp holds the new rows. */
static stx_tensor *stx__comp_aux_autoencode(stx_ctx *x, const stx__comp_layer_plan *plan,
                                            const stx_cached_rows *old, stx_tensor *comp,
                                            stx_tensor **rel_error) {
    const size_t D = plan->m->desc.dim;
    stx_comp_groups g = plan->groups;
    stx_tensor *target = stx_new(x, plan->B, plan->e, D, 0), *rec;
    g.pad = NULL;
    if (target)
        STX_RUN(x, stx_copy2d,
                (x, target->data, plan->e * D, old->data, old->stride, plan->B, plan->e * D, 0));
    rec = stx_linear(x, comp, plan->m->layer[plan->l].decoder, NULL, STX_ACT_NONE);
    rec = stx__comp_fold_op(x, rec, &g);
    return stx__comp_error_op(x, rec, target, plan->aux_skip, STX_MAX(plan->aux_elements, 1),
                              rel_error);
}

/* Returns att(old) of the aux loss. old is the e evicted rows or, with
   STX_COMP_LITERAL_TARGET, all n rows of the memory. rows (B,T,D) are the rows that the
   segment adds to the memory. */
static stx_tensor *stx__comp_aux_target(stx_ctx *x, const stx__comp_layer_plan *plan,
                                        const stx__comp_qkv *proj, stx_tensor *rows) {
    const stx_comp *m = plan->m;
    const stx_comp_desc *d = &m->desc;
    const int whole = (d->literal & STX_COMP_LITERAL_TARGET) != 0;
    /* number of rows whose keys this layer's attention has computed. With
       STX_COMP_STORE_OUTPUT, the rows that the segment stores are not among them */
    const size_t held = plan->n + (d->recurrence == STX_COMP_STORE_OUTPUT ? 0 : plan->T);
    const size_t count = whole ? plan->n : STX_MIN(plan->e, held);
    const stx_ids *pad = plan->old_pad;
    stx_tensor *all = proj->qkv ? proj->past : proj->kv, *kv;
    if (whole && plan->key_pad && !(d->literal & STX_COMP_LITERAL_MASK))
        pad = stx__comp_mask_part(x, plan->key_pad, plan->c, count);

    if (all && plan->c + count <= all->dim[1] && (whole || count == plan->e)) {
        all = stx_detach(x, all);       /* read in place, not copied */
        return stx__comp_attend_rows(m, proj, all, plan->c, count, pad, 0);
    }
    kv = stx__comp_kv_rows(x, proj, plan->c, plan->c + count);
    if (!whole && count < plan->e) {
        stx_tensor *rest = stx__comp_slice(x, rows, 0, plan->e - count);
        kv = stx__comp_concat(x, kv, stx__comp_constant_kv(m, plan->l, rest));
    }
    return stx__comp_attend_rows(m, proj, kv, 0, 0, pad, 0);
}

/* Returns the aux loss (1) of the new compressed rows comp (B,G,D). proj holds the
   queries, keys and values of this layer's attention, rows (B,T,D) are the rows that
   the segment adds to the memory, and `old` are the evicted rows. */
static stx_tensor *stx__comp_layer_aux(stx_ctx *x, const stx__comp_layer_plan *plan,
                                       const stx__comp_qkv *proj, stx_tensor *rows,
                                       const stx_cached_rows *old, stx_tensor *comp,
                                       stx_tensor **rel_error) {
    STX__FP_SCOPE;
    const stx_comp_desc *d = &plan->m->desc;
    stx_tensor *target, *got;
    if (d->aux == STX_COMP_AUX_AUTOENCODE)
        return stx__comp_aux_autoencode(x, plan, old, comp, rel_error);
    target = stx_detach(x, stx__comp_aux_target(x, plan, proj, rows));
    got = stx__comp_constant_kv(plan->m, plan->l, comp);
    got = stx__comp_attend_rows(plan->m, proj, got, 0, 0, plan->new_pad, d->aux_dropout);
    return stx__comp_error_op(x, got, target, plan->aux_skip, STX_MAX(plan->aux_elements, 1),
                              rel_error);
}

/* STX_COMP_AUX_BPTT: returns `past` (B,c+n,D) with the newest compressed rows
   recomputed from source with the current weights. source can begin with extra rows,
   left by streams that have since been reset or have left the batch. */
static stx_tensor *stx__comp_recompress(stx_ctx *x, const stx__comp_layer_plan *plan,
                                        stx_tensor *past, stx_tensor *source) {
    stx_tensor *again = NULL, *y;
    size_t i, rows = 0, at, count;
    if (!plan->recent) return past;
    for (i = 0; i < plan->recent; i++)
        rows += stx__comp_source_rows(plan->m, plan->recent_groups[i]);
    at = source ? source->dim[1] - rows : 0;
    for (i = plan->recent; i-- > 0;) {      /* oldest first */
        const size_t n = stx__comp_source_rows(plan->m, plan->recent_groups[i]);
        stx_comp_evicted in;
        memset(&in, 0, sizeof in);
        in.missing = plan->recent_missing[i];
        y = stx__comp_slice(x, source, at, at + n);
        y = stx__comp_apply(x, plan->m, plan->l, &in, y, plan->B, plan->recent_groups[i]);
        again = stx__comp_concat(x, again, y);
        at += n;
    }
    if (!again) return past;
    count = STX_MIN(again->dim[1], plan->c);
    again = stx__comp_slice(x, again, again->dim[1] - count, again->dim[1]);
    y = stx__comp_concat(x, stx__comp_slice(x, past, 0, plan->c - count), again);
    return stx__comp_concat(x, y, stx__comp_slice(x, past, plan->c, plan->c + plan->n));
}

/* Returns the rows that a segment adds to the memory, as constants: the layer's input
   h, or, with STX_COMP_STORE_OUTPUT, its output y. Padded rows are 0. */
static stx_tensor *stx__comp_added_rows(const stx__comp_layer_plan *plan, stx_tensor *h,
                                        stx_tensor *y) {
    const stx_comp_desc *d = &plan->m->desc;
    stx_ctx *x = plan->m->ctx;
    stx_tensor *rows = stx_detach(x, d->recurrence == STX_COMP_STORE_OUTPUT ? y : h);
    return stx__comp_zero_rows(x, rows, d->literal & STX_COMP_LITERAL_MASK ? NULL : plan->pad);
}

/* Returns an optional input of stx__comp_layer_fwd, or NULL if it is absent. */
static stx_tensor *stx__comp_input(stx_tensor **in, int index) {
    return index ? in[index] : NULL;
}

/* Indices of the additional results of stx__comp_layer_fwd in out[]. There are at most
   STX_MAX_MORE, so results that never occur together share an index: with compression
   by usage or BPTT, there is no aux loss. */
enum {
    STX__COMP_OUT_AUX    = 0,   /* the aux loss (1); the next result is its rel_error (1) */
    STX__COMP_OUT_ERROR  = 1,
    STX__COMP_OUT_USAGE  = 0,   /* STX_COMP_COMPRESS_USED: usage of all rows (B,n+T,2) */
    STX__COMP_OUT_SOURCE = 1,   /* STX_COMP_AUX_BPTT: the rows that the method read */
    STX__COMP_OUT_NEW    = 2,   /* the new compressed rows (B,G,D) */
    STX__COMP_OUTPUTS    = 3
};

/* One layer, as a function that stx_recompute can call. It does not change the state,
   because recomputation runs it a second time. in[] holds x (B,T,D), h (B,T,D) and, if
   the plan needs them, the memory rows (B,c+n,D), the source rows and the usage. out[]
   is indexed by STX__COMP_OUT_AUX etc.; results that do not exist stay NULL. */
static stx_tensor *stx__comp_layer_fwd(stx_ctx *x, void *user, stx_tensor **in, stx_tensor **out) {
    const stx__comp_layer_plan *plan = (const stx__comp_layer_plan *)user;
    const stx_comp_desc *d = &plan->m->desc;
    const int used = d->compress == STX_COMP_COMPRESS_USED;
    stx_tensor *h = in[1], *past = stx__comp_input(in, plan->in_past), *y, *rows, *src;
    stx_tensor *source;
    stx_attention_args *attn_args;
    stx__comp_qkv proj;
    stx_cached_rows old;
    src = stx__comp_recompress(x, plan, past, stx__comp_input(in, plan->in_source));
    proj = stx__comp_project(x, plan, stx__comp_norm_memory(plan->m, plan->l, src, 0), h);
    y = stx__comp_attend(x, plan, &proj, &attn_args);
    y = stx__comp_after(plan->m, plan->l, in[0], y);
    if (!y) return NULL;

    if (used && plan->push && plan->C) {
        stx_tensor *usage = stx__comp_input(in, plan->in_usage);
        out[STX__COMP_OUT_USAGE] = stx__comp_next_usage(x, plan, usage, attn_args);
        if (!out[STX__COMP_OUT_USAGE]) return y;
    }
    if (!plan->e) return y;
    rows = stx__comp_added_rows(plan, h, y);
    memset(&old, 0, sizeof old);
    if (past) {
        old.data = stx_offset_ptr(x, past->data, plan->c * d->dim);
        old.stride = (plan->c + plan->n) * d->dim;
    }
    old = stx__comp_old_rows(x, plan, old, rows);
    out[STX__COMP_OUT_NEW] = stx__comp_compress(x, plan, &old, out[STX__COMP_OUT_USAGE], &source);
    if (d->aux == STX_COMP_AUX_BPTT)
        out[STX__COMP_OUT_SOURCE] = source;
    else if (plan->aux)
        out[STX__COMP_OUT_AUX] = stx__comp_layer_aux(x, plan, &proj, rows, &old,
                                                     out[STX__COMP_OUT_NEW],
                                                     &out[STX__COMP_OUT_ERROR]);
    return y;
}


// >>forward

static int stx__comp_segment_fits(const stx_comp *m, const stx_tensor *h, const stx_ids *pad,
                                  const stx_comp_state *in, const stx_comp_state *out) {
    stx_ctx *x = m->ctx;
    const size_t S = m->desc.segment, D = m->desc.dim, B = h->dim[0];
    const stx_comp_state *state = in && in->B != B ? in : out;
    if (h->ndim != 3)
        stx_fail(x, STX_ERR_SHAPE,
                 "stx_comp_segment: h: expected three dimensions, (B,T,%zu), got %d", D,
                 (int)h->ndim);
    else if (!h->dim[1] || h->dim[1] > S || h->dim[2] != D)
        stx_fail(x, STX_ERR_SHAPE,
                 "stx_comp_segment: h: expected (B,T,%zu) with T from 1 to segment (%zu), got "
                 "(%zu,%zu,%zu)", D, S, B, h->dim[1], h->dim[2]);
    else if (pad && (pad->B != B || pad->T != h->dim[1]))
        stx_fail(x, STX_ERR_SHAPE,
                 "stx_comp_segment: pad: expected (%zu,%zu), as in h, got (%zu,%zu)", B, h->dim[1],
                 pad->B, pad->T);
    else if ((in && in->model != m) || (out && out->model != m))
        stx_fail(x, STX_ERR_ARG,
                 "stx_comp_segment: expected a memory of this model, got one of another model");
    else if (state && state->B != B)
        stx_fail(x, STX_ERR_SHAPE,
                 "stx_comp_segment: expected a memory with B = %zu streams, as in h, got %zu", B,
                 state->B);
    return stx_ok(x);
}

/* Runs the plan's layer l on x (B,T,D) with the memory in slot `from` of `in`, and
   writes the memory in slot l of `out`. Returns x for the next layer. */
static stx_tensor *stx__comp_run_layer(stx__comp_layer_plan *plan, stx_tensor *xs,
                                       const stx_comp_state *in, size_t from, stx_comp_state *out) {
    stx_comp *m = plan->m;
    stx_ctx *x = m->ctx;
    const stx_comp_desc *d = &m->desc;
    const size_t l = plan->l;
    stx_comp_layer *p = &m->layer[l];
    stx_tensor *inputs[5], *outputs[STX__COMP_OUTPUTS] = {NULL}, *y;
    int count = 2;
    inputs[0] = xs;
    inputs[1] = d->norm_after ? xs : stx_layernorm(x, xs, p->attn_gain, p->attn_shift, 1e-5);
    if (plan->n + plan->c) inputs[plan->in_past = count++] = stx__comp_memory_rows(in, from);
    if (plan->recent)
        inputs[plan->in_source = count++] = stx_memory_read(in->source, from, SIZE_MAX);
    if (plan->n && plan->C && in->usage)
        inputs[plan->in_usage = count++] = stx_memory_read(in->usage, from, plan->n);
    if (!stx_ok(x)) return NULL;

    if ((d->literal & STX_COMP_LITERAL_FREEZE) && plan->aux) p->frozen = 1;
    plan->frozen = p->frozen;
    if (d->layers - l <= d->recompute_layers)
        y = stx_recompute(x, stx__comp_layer_fwd, plan, inputs, count, outputs, STX__COMP_OUTPUTS);
    else
        y = stx__comp_layer_fwd(x, plan, inputs, outputs);
    if (!y) return NULL;

    if (plan->aux) {
        const int group = stx_ranks(x) > 1;
        m->aux[l] = outputs[STX__COMP_OUT_AUX];
        if (group)
            m->aux[l] = stx_scale_by(x, m->aux[l], stx_group_loss_scale(x, plan->aux_elements));
        m->rel_error[l] = outputs[STX__COMP_OUT_ERROR];
    }
    if (plan->push && p->memory) {
        stx_tensor *rows = stx__comp_added_rows(plan, inputs[1], y);
        const int used = d->compress == STX_COMP_COMPRESS_USED;
        stx_tensor *usage = used ? outputs[STX__COMP_OUT_USAGE] : NULL;
        if (!stx__comp_push(out, plan, rows, outputs[STX__COMP_OUT_NEW],
                            outputs[STX__COMP_OUT_SOURCE], usage)) return NULL;
    }
    return y;
}

STX_DEF stx_tensor *stx_comp_segment(stx_comp *m, stx_tensor *h, const stx_ids *pad,
                                     const stx_comp_state *in, stx_comp_state *out) {
    stx_ctx *x = m ? m->ctx : NULL;
    const stx_comp_desc *d;
    const stx_comp_state *read;
    size_t l, B, T, rows, *pushed = NULL;
    int push, rotated;
    if (!stx_ok(x) || !h || !stx__comp_segment_fits(m, h, pad, in, out)) return NULL;
    d = &m->desc;
    B = h->dim[0];
    T = h->dim[1];
    push = T == d->segment && out;
    memset(m->aux, 0, 2 * d->layers * sizeof *m->aux);      /* also clears m->rel_error,
                                                               which follows m->aux */

    if (out && !in) stx_comp_state_reset(out);
    if (out && in && out != in) {
        if (!stx_comp_state_copy(out, 0, in, 0, B)) return NULL;
        in = out;
    }
    /* without an output state, memories are not moved: the slots of `in` are read in
       rotated order instead */
    rotated = in && !out && d->recurrence == STX_COMP_STORE_ROTATE;
    if (in && out && d->recurrence == STX_COMP_STORE_ROTATE) stx__comp_rotate(out);

    rows = stx__comp_rows_in_use(m, in);
    read = in ? in : out;
    if (read) {
        pushed = (size_t *)stx_step_host_bytes(x, B * sizeof *pushed);
        if (!pushed) return NULL;
        memcpy(pushed, read->pushed, B * sizeof *pushed);
    }
    for (l = 0; l < d->layers && h; l++) {
        const size_t from = rotated && m->layer[l].memory ? stx__comp_layer_above(m, l) : l;
        stx__comp_layer_plan *plan = (stx__comp_layer_plan *)stx_step_host_bytes(x, sizeof *plan);
        if (!plan || !stx__comp_plan(m, l, read, from, B, T, pad, push, plan)) return NULL;
        plan->table_rows = rows;
        m->attended[l].c = plan->c;
        m->attended[l].M = plan->M;
        m->attended[l].pushed = pushed;
        m->attended[l].pushed_max = read ? read->pushed_max : 0;
        h = stx__comp_run_layer(plan, h, in, from, out);
    }
    if (!h) return NULL;
    if (push) stx__comp_count_segment(out);
    return d->final_norm ? stx_layernorm(x, h, m->final_gain, m->final_shift, 1e-5) : h;
}

/* Sets the tokens of the compressed rows key[0 .. c), from the newest to the oldest. The
   last n tokens before the segment are in the memory. The k-th last full segment found
   min(pushed - k S, M) rows there, where `pushed` counts the rows of the stream. At
   pushed_max, the count has stopped, but if S divides M, every eviction was of S rows. */
static void stx__comp_map_tokens(const stx_comp *m, const stx_comp_attended *seen, size_t b,
                                 size_t n, stx_attention_key *key) {
    const stx_comp_desc *d = &m->desc;
    const size_t S = d->segment, M = seen->M, pushed = seen->pushed[b];
    const int stopped = pushed == seen->pushed_max;
    ptrdiff_t end = -(ptrdiff_t)n;      /* the token after the evicted ones */
    size_t left = seen->c, k, g;
    if (d->compress == STX_COMP_COMPRESS_USED) return;
    for (k = 1; left; k++) {
        const int counted = pushed >= k * S + (stopped ? M : 0);
        const size_t before = counted ? STX_MIN(pushed - k * S, M) : M;
        const size_t e = stx__comp_evicted(before, S, M);
        const size_t zeros = d->literal & STX_COMP_LITERAL_PAD ? e % d->ratio : 0;
        if (!e || (!counted && (!stopped || M % S))) return;
        for (g = stx__comp_new_rows(d, e); g-- > 0 && left;) {
            const size_t to = STX_MIN((g + 1) * d->ratio - zeros, e);
            const size_t from = g ? g * d->ratio - zeros : 0;
            left--;
            if (key[left].missing) continue;    /* from before the stream began, or padding */
            key[left].first = end - (ptrdiff_t)(e - from);
            key[left].tokens = to - from;
        }
        end -= (ptrdiff_t)e;
    }
}

STX_DEF const stx_attention_map *stx_comp_attention_map(const stx_comp *m, size_t l, size_t b) {
    const stx_comp_attended *seen;
    stx_attention_map *map;
    stx_attention_key *key;
    size_t j;
    if (!m || !stx_ok(m->ctx)) return NULL;
    if (l >= m->desc.layers) {
        stx_fail(m->ctx, STX_ERR_ARG,
                 "stx_comp_attention_map: expected a layer below %zu, got %zu", m->desc.layers, l);
        return NULL;
    }
    seen = &m->attended[l];
    map = stx_attention_map_of(m->ctx, "stx_comp_attention_map", &seen->call, b);
    if (!map || !seen->c) return map;

    key = (stx_attention_key *)(uintptr_t)map->key;
    map->count[STX_KEY_COMPRESSED] = seen->c;
    map->count[STX_KEY_MEMORY] -= seen->c;
    for (j = 0; j < seen->c; j++) {
        key[j].kind = STX_KEY_COMPRESSED;
        key[j].first = 0;
        key[j].tokens = 0;
    }
    stx__comp_map_tokens(m, seen, b, map->count[STX_KEY_MEMORY], key);
    return map;
}

/* Returns 1 if the model has a vocabulary. Otherwise, sets an error and returns 0. */
static int stx__comp_has_vocab(const stx_comp *m, const char *op) {
    if (!m || !stx_ok(m->ctx)) return 0;
    if (!m->vocab_io)
        stx_fail(m->ctx, STX_ERR_ARG,
                 "%s: the model has no vocabulary; set vocab in stx_comp_desc, or use "
                 "stx_comp_segment", op);
    return m->vocab_io != NULL;
}

/* Hidden states (B,T,D) -> (B,T,E), the input of the output head. */
static stx_tensor *stx__comp_project_out(const stx_comp *m, stx_tensor *h) {
    return m->out_w ? stx_linear(m->ctx, h, m->out_w, m->out_b, STX_ACT_NONE) : h;
}

STX_DEF stx_tensor *stx_comp_embed(stx_comp *m, const stx_ids *ids) {
    stx_tensor *h;
    if (!stx__comp_has_vocab(m, "stx_comp_embed")) return NULL;
    h = stx_vocab_io_embed(m->vocab_io, ids);
    return m->in_w ? stx_linear(m->ctx, h, m->in_w, m->in_b, STX_ACT_NONE) : h;
}

STX_DEF stx_tensor *stx_comp_forward(stx_comp *m, const stx_ids *ids, const stx_ids *pad,
                                     const stx_comp_state *in, stx_comp_state *out) {
    return stx_comp_segment(m, stx_comp_embed(m, ids), pad, in, out);
}

STX_DEF stx_tensor *stx_comp_logits(stx_comp *m, stx_tensor *h) {
    if (!stx__comp_has_vocab(m, "stx_comp_logits")) return NULL;
    return stx_vocab_io_logits(m->vocab_io, stx__comp_project_out(m, h));
}

STX_DEF stx_tensor *stx_comp_log_probs(stx_comp *m, stx_tensor *h) {
    if (!stx__comp_has_vocab(m, "stx_comp_log_probs")) return NULL;
    return stx_vocab_io_log_probs(m->vocab_io, stx__comp_project_out(m, h));
}

/* Returns 0 if no target is negative, 1 if all negative targets are -1, and 2 if there
   are other negative values. */
static int stx__comp_ignored(const stx_ids *targets) {
    size_t i;
    int kind = 0;
    for (i = 0; targets && i < targets->B * targets->T; i++)
        if (targets->data[i] < 0) kind = STX_MAX(kind, targets->data[i] == -1 ? 1 : 2);
    return kind;
}

/* Returns the targets, with -1 where a target is negative or padding. */
static const stx_ids *stx__comp_mark_ignored(stx_ctx *x, const stx_ids *targets,
                                             const stx_ids *pad) {
    const size_t n = targets->B * targets->T;
    int32_t *v = (int32_t *)stx_step_host_bytes(x, stx_bytes_of(n, sizeof *v, 1));
    size_t i;
    for (i = 0; v && i < n; i++) {
        const int ignored = targets->data[i] < 0 || (pad && pad->data[i]);
        v[i] = ignored ? -1 : targets->data[i];
    }
    return v ? stx_tokens(x, v, targets->B, targets->T) : NULL;
}

STX_DEF stx_tensor *stx_comp_nll(stx_comp *m, stx_tensor *h, const stx_ids *targets,
                                 const stx_ids *pad) {
    stx_token_loss how;
    stx_ctx *x;
    int ignored, group;
    if (!stx__comp_has_vocab(m, "stx_comp_nll") || !h || !targets) return NULL;
    x = m->ctx;
    if (m->desc.literal & STX_COMP_LITERAL_MASK) pad = NULL;
    if (pad && (pad->B != targets->B || pad->T != targets->T)) {
        stx_fail(x, STX_ERR_SHAPE,
                 "stx_comp_nll: pad: expected (%zu,%zu), as in the targets, got (%zu,%zu)",
                 targets->B, targets->T, pad->B, pad->T);
        return NULL;
    }
    h = stx__comp_project_out(m, h);

    /* in a process group, any rank can have ignored targets, so all ranks compute the
       mean over the targets that are not ignored */
    ignored = stx__comp_ignored(targets);
    group = stx_ranks(x) > 1 && stx_training(x);
    if (!ignored && !pad && !group) return stx_vocab_io_loss(m->vocab_io, h, targets, NULL);
    if (pad || ignored == 2) targets = stx__comp_mark_ignored(x, targets, pad);
    memset(&how, 0, sizeof how);
    how.ignore = how.mean = 1;
    how.ignored_id = -1;
    return stx_vocab_io_loss(m->vocab_io, h, targets, &how);
}

STX_DEF stx_tensor *stx_comp_loss(stx_comp *m, const stx_ids *ids, const stx_ids *targets,
                                  const stx_ids *pad, const stx_comp_state *in,
                                  stx_comp_state *out) {
    return stx_comp_nll(m, stx_comp_forward(m, ids, pad, in, out), targets, pad);
}

/* Returns y plus the weighted aux loss of the last forward pass, aux_weight / A sum_l
   aux_l. */
static stx_tensor *stx__comp_plus_aux(stx_comp *m, stx_tensor *y) {
    STX__FP_SCOPE;
    const size_t bytes = stx_bytes_of(m->desc.layers, sizeof(stx_tensor *), 1);
    stx_tensor **aux = (stx_tensor **)stx_step_host_bytes(m->ctx, bytes);
    size_t l, n = 0;
    for (l = 0; aux && l < m->desc.layers; l++)
        if (m->aux[l]) aux[n++] = m->aux[l];
    return n ? stx_add_means(m->ctx, y, aux, n, m->desc.aux_weight / (double)m->A) : y;
}

STX_DEF stx_tensor *stx_comp_aux(stx_comp *m) {
    stx_tensor *zero;
    if (!m) return NULL;
    zero = stx_new_f32(m->ctx, 1, 0, 0, 0);
    if (!zero) return NULL;
    STX_RUN(m->ctx, stx_fill, (m->ctx, zero->data, 1, 0));
    return stx__comp_plus_aux(m, zero);
}

STX_DEF stx_tensor *stx_comp_total(stx_comp *m, stx_tensor *nll) {
    return m && nll ? stx__comp_plus_aux(m, nll) : nll;
}

STX_DEF uint64_t stx_comp_key(const stx_comp *m, const stx_ids *ids, const stx_ids *targets,
                              const stx_comp_state *s, uint64_t salt) {
    uint64_t key = stx_step_key(m, ids, targets, salt);
    stx_memory *part[STX__COMP_PARTS];
    size_t b, l;
    int i;
    if (!m || !stx_ok(m->ctx)) return key;
    if (s && s->model != m) {
        stx_fail(m->ctx, STX_ERR_ARG,
                 "stx_comp_key: expected a memory of this model, got one of another model");
        return key;
    }

    key = stx_key_add(key, m->desc.recompute_layers);
    key = stx_vocab_io_key(m->vocab_io, key, ids, targets, NULL);
    key = stx_key_add(key, (uint64_t)stx__comp_ignored(targets));
    if (s) stx__comp_parts(s, part);
    for (i = 0; s && i < STX__COMP_PARTS; i++) key = stx_memory_key(part[i], key);
    for (b = 0; s && b < s->B; b++) key = stx_key_add(key, s->pushed[b]);
    if (m->desc.literal & STX_COMP_LITERAL_FREEZE)
        for (l = 0; l < m->desc.layers; l++) key = stx_key_add(key, (uint64_t)m->layer[l].frozen);
    return key;
}


// >>generation

/* Allocates the buffers of a new generator. */
static void stx__comp_gen_buffers(stx_comp_gen *g) {
    const stx_comp *m = g->model;
    stx_ctx *x = m->ctx;
    const size_t B = g->B, S = m->desc.segment, D = m->desc.dim;
    const int literal_rows = (m->desc.literal & STX_COMP_LITERAL_ROWS) != 0;
    const int extended = !m->sines && !literal_rows && g->reach > m->key_pe->dim[0];
    size_t l;
    for (l = 0; l < m->desc.layers; l++) {
        const size_t M = g->state->M[l], C = g->state->C[l];
        stx_cache_window(g->cache, l, C + M + S, D, 1);
        if (m->layer[l].memory) g->rows[l] = stx_block_activations(x, stx_bytes_of(B, S, D));
        if (g->state->usage && M && C) g->usage[l] = stx_block_f32(x, stx_bytes_of(B, M, 2));
        if (m->sines || (extended && !l))
            g->pe[l] = stx_block_activations(x, stx_bytes_of(g->reach, D, 1));
    }
}

STX_DEF stx_comp_gen *stx_comp_gen_create_sized(stx_comp *m, size_t B, const size_t *mems,
                                                const size_t *cmems) {
    stx_ctx *x = m ? m->ctx : NULL;
    stx_comp_gen *g;
    size_t L, S;
    if (!stx_ok(x)) return NULL;
    if (!B) {
        stx_fail(x, STX_ERR_ARG, "stx_comp_gen_create: expected B >= 1 streams, got 0");
        return NULL;
    }
    L = m->desc.layers;
    S = m->desc.segment;
    g = (stx_comp_gen *)stx_block(x, sizeof *g);
    if (!g) return NULL;
    g->model = m;
    g->B = B;
    g->stale = 1;
    g->state = stx_comp_state_create_sized(m, B, mems, cmems);
    g->cache = stx_cache_create(x, L, B, m->vocab_io ? m->desc.vocab : 1);
    g->rows = (stx_real **)stx_block(x, stx_bytes_of(3 * L, sizeof *g->rows, 1));
    g->pad = (int32_t *)stx_block(x, stx_bytes_of(B, S, sizeof *g->pad));
    if (stx_ok(x)) {
        g->usage = g->rows + L;
        g->pe = g->usage + L;
        g->reach = stx__comp_reach(m, g->state->M, g->state->C);
        stx__comp_gen_buffers(g);
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
    size_t i;
    if (!g) return;
    for (i = 0; g->rows && i < 3 * g->model->desc.layers; i++)      /* all buffers in
                                                                       g->rows, g->usage
                                                                       and g->pe */
        stx_block_device_free(x, g->rows[i]);
    stx_block_free(x, g->rows);
    stx_block_free(x, g->pad);
    stx_cache_free(g->cache);
    stx_comp_state_free(g->state);
    stx_block_free(x, g);
}

/* Starts a new segment, which follows the rows in the state's memory. stale is 1 if the
   cache must be recomputed from that memory. */
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
                 "stx_comp_gen_set: expected a memory with B = %zu streams, got %zu", g->B,
                 from->B);
        return 0;
    }
    if (!stx_comp_state_copy(g->state, 0, from, 0, g->B)) return 0;
    stx__comp_gen_begin(g, 1);
    return 1;
}

/* A position in a buffer with `rows` rows per stream: row `at` of each stream. */
typedef struct stx__comp_place {
    stx_real *data;
    size_t    rows, at;
} stx__comp_place;

static stx__comp_place stx__comp_rows_at(stx_real *data, size_t rows, size_t at) {
    stx__comp_place p;
    p.data = data;
    p.rows = rows;
    p.at = at;
    return p;
}

/* Copies n rows of `width` elements for each of B streams. */
static void stx__comp_copy_rows(stx_ctx *x, stx__comp_place to, stx__comp_place from, size_t n,
                                size_t B, size_t width) {
    if (n)
        STX_RUN(x, stx_copy2d,
                (x, stx_offset_ptr(x, to.data, to.at * width), to.rows * width,
                 stx_offset_ptr(x, from.data, from.at * width), from.rows * width, B, n * width,
                 0));
}

/* Returns the keys and values of rows (B,..,D) for all heads. */
static stx_tensor *stx__comp_gen_kv(stx_comp_gen *g, size_t l, stx_tensor *rows) {
    stx_comp *m = g->model;
    rows = stx_linear(m->ctx, rows, m->layer[l].wkv, NULL, STX_ACT_NONE);
    return stx__comp_all_heads(m->ctx, &m->desc, rows);
}

/* Fills the position buffer (reach,D) of layer l, if there is one. */
static int stx__comp_gen_fill_positions(stx_comp_gen *g, size_t l) {
    stx_comp *m = g->model;
    stx_ctx *x = m->ctx;
    const size_t D = m->desc.dim;
    stx_tensor *t;
    if (!g->pe[l]) return 1;
    if (m->sines) {
        const size_t rows = m->sines->dim[0];
        t = stx_view_rows(x, m->sines, rows - g->reach, rows);
        t = stx_linear(x, t, m->layer[l].wpos, NULL, STX_ACT_NONE);
    } else {
        t = stx__comp_extended_table(m, g->reach);
    }
    if (!t) return 0;
    STX_RUN(x, stx_copy2d, (x, g->pe[l], D, t->data, D, g->reach, D, 0));
    return 1;
}

/* Computes the cache from the state: the keys and values of the state's rows, the
   usage, and the positions. */
static int stx__comp_gen_fill(stx_comp_gen *g) {
    stx_comp *m = g->model;
    stx_ctx *x = m->ctx;
    const size_t D = m->desc.dim, B = g->B;
    size_t l;
    for (l = 0; l < m->desc.layers; l++) {
        stx_cache_layer *cache = &g->cache->layer[l];
        const size_t n = g->state->mem->layer[l].count, c = g->state->comp->layer[l].count;
        const size_t M = g->state->M[l];
        stx_tensor *t = stx__comp_memory_rows(g->state, l);
        cache->len = 0;
        if (t) {
            t = stx__comp_gen_kv(g, l, stx__comp_norm_memory(m, l, t, 1));
            if (!t) return 0;
            stx__comp_copy_rows(x, stx__comp_rows_at(cache->k, cache->capacity, 0),
                                stx__comp_rows_at(t->data, n + c, 0), n + c, B, 2 * D);
            cache->len = n + c;
        }
        if (g->usage[l]) {
            t = stx_memory_read(g->state->usage, l, n);
            STX_RUN(x, stx_fill, (x, g->usage[l], 2 * B * M, 0));
            if (t)
                stx__comp_copy_rows(x, stx__comp_rows_at(g->usage[l], M, 0),
                                    stx__comp_rows_at(t->data, n, 0), n, B, 2);
        }
        if (!stx__comp_gen_fill_positions(g, l)) return 0;
    }
    g->stale = 0;
    return stx_ok(x);
}

static stx_tensor *stx__comp_gen_positions(stx_comp_gen *g, size_t l) {
    const stx_comp *m = g->model;
    const stx_real *pe = m->sines ? g->pe[l] : g->pe[0];
    stx_tensor *t;
    if (m->desc.literal & STX_COMP_LITERAL_ROWS)
        return stx_view_rows(m->ctx, m->key_pe, 0, stx__comp_rows_in_use(m, g->state));
    if (!pe) return m->key_pe;
    t = stx_new(m->ctx, 1, m->desc.dim, 0, 0);
    if (!t) return NULL;
    t->data = (stx_real *)(uintptr_t)pe;
    t->dim[0] = g->reach;
    t->size = g->reach * m->desc.dim;
    return t;
}

/* Advances the cache of a layer to the next segment: it keeps the keys and values of
   the rows that remain in comp and mem, and adds the keys and values of the new rows.
   rows (B,S,D) are the rows that the segment added to mem, and comp (B,G,D) the new
   compressed rows, or NULL. */
static int stx__comp_gen_move_cache(stx_comp_gen *g, const stx__comp_layer_plan *plan,
                                    stx_tensor *rows, stx_tensor *comp) {
    stx_comp *m = g->model;
    stx_ctx *x = m->ctx;
    const size_t l = plan->l, n = plan->n, c = plan->c;
    const size_t S = m->desc.segment, W = 2 * m->desc.dim, B = g->B;
    const size_t own = STX_MIN(plan->M, S), kept = STX_MIN(n, plan->M - own);
    const size_t new_c = STX_MIN(plan->G, plan->C), kept_c = STX_MIN(c, plan->C - new_c);
    const size_t n1 = kept + own, c1 = kept_c + new_c, len = n1 + c1;
    const int stores_output = m->desc.recurrence == STX_COMP_STORE_OUTPUT;
    stx_cache_layer *cache = &g->cache->layer[l];
    const size_t cap = cache->capacity;
    stx_tensor *kv, *t;
    cache->len = 0;
    if (!len) return 1;
    kv = stx_new(x, B, len, W, 0);
    if (!kv) return 0;
    stx__comp_copy_rows(x, stx__comp_rows_at(kv->data, len, 0),
                        stx__comp_rows_at(cache->k, cap, c - kept_c), kept_c, B, W);
    if (new_c) {
        t = stx__comp_slice(x, comp, plan->G - new_c, plan->G);
        t = stx__comp_gen_kv(g, l, stx__comp_norm_memory(m, l, t, 1));
        if (!t) return 0;
        stx__comp_copy_rows(x, stx__comp_rows_at(kv->data, len, kept_c),
                            stx__comp_rows_at(t->data, new_c, 0), new_c, B, W);
    }
    if (stores_output && own) {         /* this segment's outputs have no keys yet */
        t = stx__comp_slice(x, rows, S - own, S);
        t = stx__comp_gen_kv(g, l, stx__comp_norm_memory(m, l, t, 1));
        if (!t) return 0;
        stx__comp_copy_rows(x, stx__comp_rows_at(kv->data, len, c1 + kept),
                            stx__comp_rows_at(t->data, own, 0), own, B, W);
        stx__comp_copy_rows(x, stx__comp_rows_at(kv->data, len, c1),
                            stx__comp_rows_at(cache->k, cap, c + n - kept), kept, B, W);
    } else {
        stx__comp_copy_rows(x, stx__comp_rows_at(kv->data, len, c1),
                            stx__comp_rows_at(cache->k, cap, c + n + S - n1), n1, B, W);
    }
    stx__comp_copy_rows(x, stx__comp_rows_at(cache->k, cap, 0),
                        stx__comp_rows_at(kv->data, len, 0), len, B, W);
    cache->len = len;
    return 1;
}

/* Updates the memory and the cache of layer l after a full segment. */
static int stx__comp_gen_move_layer(stx_comp_gen *g, size_t l, const stx_ids *pad) {
    stx_comp *m = g->model;
    stx_ctx *x = m->ctx;
    const size_t S = m->desc.segment, D = m->desc.dim, B = g->B;
    stx_tensor *rows, *usage = NULL, *comp = NULL, *source = NULL;
    stx__comp_layer_plan plan;
    stx_cached_rows old;
    if (!stx__comp_plan(m, l, g->state, l, B, S, pad, 1, &plan)) return 0;
    rows = stx_new(x, B, S, D, 0);
    if (!rows) return 0;
    stx__comp_copy_rows(x, stx__comp_rows_at(rows->data, S, 0),
                        stx__comp_rows_at(g->rows[l], S, 0), S, B, D);
    rows = stx__comp_zero_rows(x, rows, pad);
    if (g->state->usage && plan.C) {
        stx_tensor *t = plan.n ? stx_new_f32(x, B, plan.n, 2, 0) : NULL;
        if (t)
            stx__comp_copy_rows(x, stx__comp_rows_at(t->data, plan.n, 0),
                                stx__comp_rows_at(g->usage[l], plan.M, 0), plan.n, B, 2);
        usage = stx__comp_next_usage(x, &plan, t, NULL);
    }
    if (plan.e) {
        memset(&old, 0, sizeof old);
        old.data = g->state->mem->layer[l].data;
        old.stride = g->state->mem->layer[l].stride;
        old = stx__comp_old_rows(x, &plan, old, rows);
        comp = stx__comp_compress(x, &plan, &old, usage, &source);
        if (!comp) return 0;
    }
    if (!stx__comp_push(g->state, &plan, rows, comp, source, usage)) return 0;
    if (g->usage[l]) {
        const size_t n1 = STX_MIN(plan.n + S, plan.M);
        STX_RUN(x, stx_fill, (x, g->usage[l], 2 * B * plan.M, 0));
        stx__comp_copy_rows(x, stx__comp_rows_at(g->usage[l], plan.M, 0),
                            stx__comp_rows_at(usage->data, plan.n + S, plan.n + S - n1), n1, B, 2);
    }
    if (m->desc.recurrence == STX_COMP_STORE_ROTATE) return 1;  /* the whole cache is
                                                                   recomputed later */
    return stx__comp_gen_move_cache(g, &plan, rows, comp);
}

/* Updates the memory and the cache after a full segment. */
static int stx__comp_gen_move(stx_comp_gen *g) {
    stx_comp *m = g->model;
    stx_ctx *x = m->ctx;
    const stx_ids *pad = g->masked ? stx_tokens(x, g->pad, g->B, m->desc.segment) : NULL;
    size_t l;
    for (l = 0; l < m->desc.layers; l++) {
        if (!m->layer[l].memory)
            g->cache->layer[l].len = 0;
        else if (!stx__comp_gen_move_layer(g, l, pad))
            return 0;
    }
    stx__comp_count_segment(g->state);
    if (!stx_ok(x)) return 0;
    stx__comp_gen_begin(g, 0);
    return 1;
}

/* Runs layer l on xs (B,T,D). pad (B,g->at + T) marks missing tokens of this segment. */
static stx_tensor *stx__comp_gen_layer(stx_comp_gen *g, size_t l, stx_tensor *xs,
                                       const stx_ids *pad) {
    stx_comp *m = g->model;
    stx_ctx *x = m->ctx;
    const stx_comp_desc *d = &m->desc;
    const stx_comp_layer *p = &m->layer[l];
    const stx_comp_state *s = g->state;
    const size_t T = xs->dim[1], len = g->at + T;
    const size_t n = p->memory ? s->mem->layer[l].count : 0;
    const size_t c = p->memory ? s->comp->layer[l].count : 0;
    stx_tensor *h = d->norm_after ? xs : stx_layernorm(x, xs, p->attn_gain, p->attn_shift, 1e-5);
    stx_attention_args *attn_args = NULL;
    stx_attention_in a;
    stx_attention_desc ad;
    stx__comp_attention_desc(m, l, &a, &ad);
    a.q = stx_linear(x, h, p->wq, NULL, STX_ACT_NONE);
    a.kv = stx__comp_gen_kv(g, l, h);
    a.pe = stx__comp_gen_positions(g, l);
    a.pad = pad;
    if (n + c) {
        a.pad = stx_memory_mask(s->mem, l, n, a.pad, len);
        a.pad = stx_memory_mask(s->comp, l, c, a.pad, n + len);
    }
    a.args_out = &attn_args;
    xs = stx__comp_after(m, l, xs, a.pe ? stx_cache_attention(g->cache, l, &a, &ad) : NULL);
    if (!xs) return NULL;

    if (g->usage[l] && n)
        STX_RUN(x, stx_comp_usage, (x, g->usage[l], 2 * s->M[l], attn_args, c, n));
    if (p->memory) {
        const stx_tensor *rows = d->recurrence == STX_COMP_STORE_OUTPUT ? xs : h;
        stx__comp_copy_rows(x, stx__comp_rows_at(g->rows[l], d->segment, g->at),
                            stx__comp_rows_at(rows->data, T, 0), T, g->B, d->dim);
    }
    return xs;
}

/* Runs T tokens of one segment: h (B,T,D) -> last hidden states (B,T,D). T must not
   exceed the number of tokens left in the segment. */
static stx_tensor *stx__comp_gen_part(stx_comp_gen *g, stx_tensor *h) {
    stx_comp *m = g->model;
    stx_ctx *x = m->ctx;
    const stx_comp_desc *d = &m->desc;
    const size_t S = d->segment, B = g->B, len = g->at + h->dim[1];
    const stx_ids *pad = NULL;
    size_t l, b;
    if (!g->at && d->recurrence == STX_COMP_STORE_ROTATE) {
        stx__comp_rotate(g->state);
        g->stale = 1;
    }
    if (g->stale && !stx__comp_gen_fill(g)) return NULL;
    if (g->masked) {
        int32_t *v = (int32_t *)stx_step_host_bytes(x, stx_bytes_of(B, len, sizeof *v));
        if (!v) return NULL;
        for (b = 0; b < B; b++) memcpy(v + b * len, g->pad + b * S, len * sizeof *v);
        pad = stx_tokens(x, v, B, len);
    }
    for (l = 0; l < d->layers && h; l++) h = stx__comp_gen_layer(g, l, h, pad);
    if (!h) return NULL;
    g->at = len;
    if (len == S && !stx__comp_gen_move(g)) return NULL;
    return d->final_norm ? stx_layernorm(x, h, m->final_gain, m->final_shift, 1e-5) : h;
}

STX_DEF stx_tensor *stx_comp_gen_step(stx_comp_gen *g, stx_tensor *h) {
    stx_ctx *x = g ? g->model->ctx : NULL;
    stx_tensor *y = NULL;
    size_t at, n, T, D;
    if (!stx_ok(x) || !h) return NULL;
    T = h->ndim == 3 ? h->dim[1] : 0;
    D = h->ndim == 3 ? h->dim[2] : 0;
    if (stx_training(x)) {
        stx_fail(x, STX_ERR_SHAPE,
                 "stx_comp_gen_step: expected a step that began with stx_begin(x, STX_EVAL), got a "
                 "training step");
        return NULL;
    }
    if (h->ndim != 3) {
        stx_fail(x, STX_ERR_SHAPE,
                 "stx_comp_gen_step: h: expected three dimensions, (%zu,T,%zu), got %d", g->B,
                 g->model->desc.dim, (int)h->ndim);
        return NULL;
    }
    if (!T || h->dim[0] != g->B || D != g->model->desc.dim) {
        stx_fail(x, STX_ERR_SHAPE, "stx_comp_gen_step: h: expected (%zu,T,%zu), got (%zu,%zu,%zu)",
                 g->B, g->model->desc.dim, h->dim[0], T, D);
        return NULL;
    }
    for (at = 0; at < T; at += n) {
        n = STX_MIN(STX_MIN(T - at, g->cache->chunk), g->model->desc.segment - g->at);
        y = stx__comp_concat(x, y, stx__comp_gen_part(g, stx__comp_slice(x, h, at, at + n)));
        if (!stx_ok(x)) return NULL;
    }
    return y;
}

static stx_tensor *stx__comp_gen_hidden(void *user, const stx_ids *ids) {
    stx_comp_gen *g = (stx_comp_gen *)user;
    stx_tensor *h = stx_comp_gen_step(g, stx_comp_embed(g->model, ids));
    return h ? stx__comp_project_out(g->model, h) : NULL;
}

STX_DEF const stx_real *stx_comp_gen_feed(stx_comp_gen *g, const int32_t *ids, size_t n) {
    if (!g || !stx__comp_has_vocab(g->model, "stx_comp_gen_feed")) return NULL;
    return stx_cache_feed(g->cache, g->model->vocab_io, ids, n, 1, stx__comp_gen_hidden, g);
}


// >>model: the table of functions for programs that accept any model family

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
    return d->recompute_layers = STX_MIN(n, d->layers);
}

static uint64_t stx__comp_lm_key(const void *m, const stx_ids *ids, const stx_ids *targets,
                                 const void *s, uint64_t salt) {
    return stx_comp_key((const stx_comp *)m, ids, targets, (const stx_comp_state *)s, salt);
}

static int stx__comp_lm_window_ok(stx_comp *m, const char *op, size_t window) {
    if (m && window)
        stx_fail(m->ctx, STX_ERR_ARG,
                 "%s: expected window = 0, got %zu; mem and cmem determine the memory sizes", op,
                 window);
    return !window;
}

static const stx_attention_map *stx__comp_lm_attention_map(const void *m, size_t l, size_t b) {
    return stx_comp_attention_map((const stx_comp *)m, l, b);
}

static void *stx__comp_lm_state_create(void *m, size_t B, size_t window) {
    if (!stx__comp_lm_window_ok((stx_comp *)m, "stx_lm.state_create", window)) return NULL;
    return stx_comp_state_create((stx_comp *)m, B);
}

static void *stx__comp_lm_gen_create(void *m, size_t B, size_t window) {
    if (!stx__comp_lm_window_ok((stx_comp *)m, "stx_lm.gen_create", window)) return NULL;
    return stx_comp_gen_create((stx_comp *)m, B);
}

STX_LM_STATES(comp)

STX_DEF stx_lm stx_comp_as_lm(stx_comp *m) {
    stx_lm lm;
    memset(&lm, 0, sizeof lm);
    if (!m || !m->vocab_io) return lm;
    lm.model = m;
    lm.ctx = m->ctx;
    lm.family = stx_comp_family();
    lm.params = m->params;
    lm.vocab_io = m->vocab_io;
    lm.loss = stx__comp_lm_loss;
    lm.total = stx__comp_lm_total;
    lm.updated = stx__comp_lm_updated;
    lm.recompute = stx__comp_lm_recompute;
    lm.key = stx__comp_lm_key;
    lm.layers = m->desc.layers;
    lm.attention_map = stx__comp_lm_attention_map;
    lm.state_create = stx__comp_lm_state_create;
    lm.gen_create = stx__comp_lm_gen_create;
    stx__comp_lm_states(&lm);
    return lm;
}


// >>files

static void *stx__comp_family_create(stx_ctx *x, const void *desc) {
    return stx_comp_create(x, (const stx_comp_desc *)desc);
}

static const void *stx__comp_family_desc(const void *m) {
    return &((const stx_comp *)m)->desc;
}

static stx_params *stx__comp_family_params(void *m, int k) {
    return k ? NULL : ((stx_comp *)m)->params;
}

static stx_lm stx__comp_family_as_lm(void *m) {
    return stx_comp_as_lm((stx_comp *)m);
}

STX_DEF const stx_family *stx_comp_family(void) {
    static const stx_field field[] = {
        STX_FIELD(stx_comp_desc, SIZE, vocab),
        STX_FIELD(stx_comp_desc, SIZE, dim),
        STX_FIELD(stx_comp_desc, SIZE, emb),
        STX_FIELD(stx_comp_desc, SIZE, layers),
        STX_FIELD(stx_comp_desc, SIZE, heads),
        STX_FIELD(stx_comp_desc, SIZE, kv_heads),
        STX_FIELD(stx_comp_desc, SIZE, inner),
        STX_FIELD(stx_comp_desc, SIZE, segment),
        STX_FIELD(stx_comp_desc, SIZE, memory_count),
        STX_FIELD_LIST_OF(stx_comp_desc, memory_layers, memory_count),
        STX_FIELD(stx_comp_desc, INT, no_memory),
        STX_FIELD(stx_comp_desc, SIZE, mem),
        STX_FIELD(stx_comp_desc, SIZE, cmem),
        STX_FIELD_LIST_OF(stx_comp_desc, mems, layers),
        STX_FIELD_LIST_OF(stx_comp_desc, cmems, layers),
        STX_FIELD(stx_comp_desc, SIZE, ratio),
        STX_FIELD(stx_comp_desc, INT, compress),
        STX_FIELD(stx_comp_desc, CODE, custom),
        STX_FIELD(stx_comp_desc, SIZE, overlap),
        STX_FIELD(stx_comp_desc, INT, conv_no_bias),
        STX_FIELD_ARRAY(stx_comp_desc, SIZE, dilation),
        STX_FIELD(stx_comp_desc, SIZE, dilations),
        STX_FIELD(stx_comp_desc, INT, aux),
        STX_FIELD(stx_comp_desc, REAL, aux_weight),
        STX_FIELD(stx_comp_desc, SIZE, bptt),
        STX_FIELD(stx_comp_desc, INT, positions),
        STX_FIELD(stx_comp_desc, INT, norm_after),
        STX_FIELD(stx_comp_desc, INT, final_norm),
        STX_FIELD(stx_comp_desc, INT, glu),
        STX_FIELD(stx_comp_desc, INT, tied),
        STX_FIELD(stx_comp_desc, INT, gate),
        STX_FIELD(stx_comp_desc, INT, gate_relu),
        STX_FIELD(stx_comp_desc, REAL, gate_bias),
        STX_FIELD(stx_comp_desc, INT, zero_gate_bias),
        STX_FIELD(stx_comp_desc, INT, mogrify),
        STX_FIELD(stx_comp_desc, INT, recurrence),
        STX_FIELD(stx_comp_desc, REAL, attn_dropout),
        STX_FIELD(stx_comp_desc, REAL, out_dropout),
        STX_FIELD(stx_comp_desc, REAL, ff_dropout),
        STX_FIELD(stx_comp_desc, REAL, aux_dropout),
        STX_FIELD(stx_comp_desc, UNSIGNED, literal),
        STX_FIELD(stx_comp_desc, SETTING, recompute_layers)
    };
    static const stx_family family = {
        "compressive", sizeof(stx_comp_desc), field, sizeof field / sizeof *field,
        stx__comp_family_create, stx__comp_family_desc, stx__comp_family_params,
        stx__comp_family_as_lm
    };
    return &family;
}

STX_DEF stx_comp *stx_comp_open(stx_ctx *x, const char *path) {
    return (stx_comp *)stx_model_open(x, stx_comp_family(), path);
}

STX_DEF int stx_comp_save(stx_comp *m, const char *path) {
    return stx_model_save(stx_comp_family(), m, path);
}

STX_STRICT_OFF
#endif /* SEQTX_COMPRESSIVE_IMPLEMENTATION */

#define STX__LETTERS 2
#include "seqtx.h"      /* restores the single-letter macros */
