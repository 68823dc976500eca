/* seqtx_par.h - v0.1 - Transformer-XL, and PAR: a search for the order of its blocks
   no warranty implied; MIT or public domain, your choice (see the end of seqtx.h)

   In ONE .c or .cpp file:                everywhere else:
       #define SEQTX_IMPLEMENTATION           #include "seqtx_par.h"
       #include "seqtx_par.h"

   Needs seqtx.h in the same directory. Compile with -O2 and link -lm (and -pthread on
   systems older than glibc 2.34). If another file already implements seqtx.h, define
   SEQTX_PAR_IMPLEMENTATION instead: it compiles only the part in this header.

   Contents: a language model that reads text segment by segment and remembers the inputs
   of its attention blocks. Attention and feed-forward blocks come in any order; strictly
   alternating ones are Transformer-XL. Optional: a supernet whose gates learn, in one
   training run, which kind of block to keep at each position, and adaptive input and
   output for large vocabularies.


   MANUAL

   Papers
       Transformer-XL: Attentive Language Models
           Beyond a Fixed-Length Context             Dai et al., 2019         1901.02860
       Pay Attention when Required (PAR)             Mandava et al., 2020     2009.04534
       Categorical Reparameterization with
           Gumbel-Softmax                            Jang et al., 2016        1611.01144
       FBNet (search with a table of latencies)      Wu et al., 2018          1812.03443
       Efficient Sparsely Activated Transformers
           (search with a target latency)            Latifi et al., 2022      2208.14580
       Efficient softmax approximation for GPUs
           (adaptive softmax)                        Grave et al., 2016       1609.04309
       Adaptive Input Representations                Baevski and Auli, 2018   1809.10853

   Letters used in this file
       B  streams (rows of a batch)          L  blocks; l is one of them
       T  tokens per stream and call         k  branch: 0 attention, 1 feed-forward,
       V  vocabulary size                       2 identity
       D  model dimension                    M  capacity of the memory, rows
       H  heads                              n  rows in the memory
       dh head dimension                     S  keys of a call, n + T
       F  feed-forward size                  i  a query;  j a key
       E  width of the embedding             t  distance n + i - j >= 0, in tokens
       J  tails (see Adaptive vocabulary)    u  content bias, (H,dh)
       N  rows of an elementwise kernel      v  position bias, (H,dh)
       C  channels of such a row             al parameters of a gate, (3)
       R  draws of a gate                    p  probabilities of its branches, (3)
                                             w  their weights in a mixture, (3)
   In the code, x is the context, m a model, d a desc, and a the arguments of a kernel.

   The model. Every attention block keeps its inputs from earlier segments and attends to
   them.

       tokens (B,T) -> emb_scale embedding -> h (B,T,D) -> blocks -> output head
                    -> logits (B,T,V)

   One block, with the names used in the code. s, f and i are the letters of patterns; a
   supernet has mixtures only.

       s        A = Wo attend(h)                  h' = Y0 = LN_a(h + A)
       f        G = W2 relu(W1 h + b1) + b2       h' = Y1 = LN_f(h + G)
       i                                          h' = h
       mixture  w = gate(al, noise, tau)          h' = w0 Y0 + w1 Y1 + w2 h

       memory (B,n,D)    h (B,T,D) ------------.--------------.
             |               |                 |              |
             '-> attention <-'           feed-forward         |
                     |                         |              |
                 Y0 (B,T,D)               Y1 (B,T,D)          |
                     |                         |              |
                     w0                        w1             w2
                     |                         |              |
                     '---------- sum ----------'--------------'
                                  |
                                  h', the input of the next block

       q = Wq h       k, value = Wkv [memory ; h]       r_t = Wr e_t
       s_ij     = ((q_i + u).k_j + (q_i + v).r_t) / sqrt(dh)         t = n + i - j
       attend_i = sum_j softmax_j(s_ij) value_j
       e_t      = [sin(t f_0) .. sin(t f_{D/2-1}), cos(t f_0) ..]    f_c = 10000^(-2c/D)

       With pre_norm              A = Wo attend(LN_a h), with LN_a of the memory, and
                                  Y0 = h + A; G is computed from LN_f h, and Y1 = h + G. A
                                  norm follows the last block unless no_final_norm.
       With STX_PAR_LEARNED       r_t is row t of a table. Each attention has its own;
                                  there is no Wr.
       With STX_PAR_LEARNED_BIAS  s_ij = ((q_i + u).k_j + q_i.r_t + b_t) / sqrt(dh), with
                                  a learned b (M + T,H).

   Memory. An attention block stores its inputs h, before any norm, up to M rows. They are
   constants: gradients reach Wkv (and LN_a with pre_norm) through them, but not what
   computed them. A query sees the n rows of memory, the earlier tokens of its segment and
   itself: n + i + 1 keys. Information travels back M tokens per attention block. If an
   evaluation has more memory than training had, set clamp_len: otherwise distances occur
   that no weight has been trained on.

   The gate. The choice of a branch is categorical and has no gradient; its relaxation has
   one. With U uniform in (0,1):

       pi_k = exp(al_k), or with STX_PAR_PI max(al_k, 0) + 1e-5
       p    = pi / sum pi
       g_k  = -ln(-ln U_k)               noise, a Gumbel variable
       y    = softmax((ln pi + g) / tau)

   For every tau, the largest element of y is at an exact sample of p (the Gumbel trick).
   y approaches the one-hot vector of that sample as tau -> 0, and (1/3, 1/3, 1/3) as
   tau -> infinity; between them the mean of y is in general not p. A soft gate mixes the
   branches: w = y. A straight-through gate runs one of them: w is the one-hot vector in
   the forward pass, with the gradient of y.

   Latency. cost[k] is the time of a branch on the target machine, and stx_par_total adds
   the expected time to the loss. examples/train_par.c measures it as the median over
   alternating steps of one block of each kind with a full memory, less the identity's.

   Why it works this way
       Why four terms in s_ij (1901.02860, section 3.3)? q.k is what a token looks for,
       u.k what all tokens look at, q.r_t how far back this token looks, and v.r_t how far
       back all look. r_t depends only on the distance, so a key in memory gets the same
       score as in one long text, and texts have no maximum length.

       How are the scores q.r_t moved to their keys? The rows r_t are stored with the
       largest distance first. A key at distance t from query i is at distance t + 1 from
       query i + 1, so in the matrix (q + v) r^T a key's column moves one to the left per
       query. The attention kernels give this matrix a row stride that is longer by one,
       and each score arrives in its key's column (>>attention in seqtx.h). The shifted
       matrix is never stored.

       Why noise in the gate? Without it the mixture can stay a mixture whose branches
       learn to work together. A network that keeps one branch of each block then lacks
       the others.

       Why does the temperature fall? At a high temperature all branches get gradients,
       but the average that is trained is never run. At a low temperature the network that
       will be run is trained, but the gradient is noisy, and a branch that is rarely
       drawn hardly learns. With p = (1/3, 1/3, 1/3) and dw = (1, 0, 0), the variance of
       dal_0 is 0.0059, 0.031, 0.10, 0.24, 0.54, 1.12 for tau = 1, 1/2, 1/4, .. 1/32: at
       low temperatures about proportional to 1 / tau. Hence stx_par_tau.

       Why are gates frozen at first (stx_par_freeze)? Comparing branches makes sense only
       once their weights have learned something.

       Which data do gates learn from? The reference trains gates and weights with one
       loss on the whole text. The paper updates the gates in a fifth of each epoch, after
       10,000 updates of the weights alone, with a separate optimiser. FBNet gives the
       gates a fifth of the data, which the weights do not see (train_par --arch-share).

   Gradients of the gate. dX is the gradient of h', the sums are over rows and channels:

       dw_0 = sum dX Y0       dw_1 = sum dX Y1       dw_2 = sum dX h
       d ln pi_k = y_k (dw_k - sum_k y_k dw_k) / tau
       dal_k     = d ln pi_k
       With STX_PAR_PI, dal_k = d ln pi_k / pi_k where al_k >= 0, and 0 where al_k < 0: a
       parameter below 0 stays there.

   Worked example. al = (ln 2, -ln 2, 0), so p = 4/7, 1/7, 2/7. Noise g = (0, ln 2, 0) and
   tau = 1; cost = (2, 1, 0); D = 2, h = (1,-1), A = (2,0), G = (-3,-1).

       e^(ln pi + g) = 2, 1, 1       w = y = 1/2, 1/4, 1/4        (tau = 1/2: 4, 1, 1 and
       latency = sum w cost = 5/4                                  w = 2/3, 1/6, 1/6)
       h + A = (3,-1),   Y0 = (1,-1)
       h + G = (-2,-2),  Y1 = (0,0)         h' = (3/4,-3/4)
       dX = (1,0):       dw = (1,0,1)
       dw = (1,0,0):     sum y dw = 1/2,    dal = (1/4,-1/8,-1/8)
       Straight-through: w = (1,0,0), h' = Y0, latency = 2, and dal as before

   From a search to a network. A supernet computes both branches of every block, forward
   and backward. stx_par_argmax and stx_par_sample return the pattern it found. Create a
   network with that pattern, and train it from the weights of the search
   (stx_par_inherit) or from new ones. The paper's rule is stx_par_rule: one attention in
   five blocks and none in the last third. An f instead of an s takes less time but has
   more parameters: 2 D F + F + 3 D instead of 5 D^2 + 2 D (H dh = D), or about 8 D^2
   instead of 5 D^2 if F = 4 D.

   Results. The paper reports 35 % less time than Transformer-XL at equal perplexity on
   WikiText-103, with 6 attention blocks in 32 instead of 16, and test perplexities of
   22.7 (base) and 18.4 (large). Here, at a small scale, fewer attention blocks cost 2.3
   to 2.7 % in perplexity for 19 to 26 % less time per step: no gain over Transformer-XL
   was shown (docs/results.md).

   Quick start (a test compiles and runs it): searches a network for "abcabc..", extracts
   it, and lets it continue the text.

   //>quickstart
       #define SEQTX_IMPLEMENTATION
       #include "seqtx_par.h"
       #include <stdio.h>

       int main(void) {
           stx_ctx *x = stx_create(NULL);
           stx_par_desc d = {0};
           d.vocab = 128;
           d.dim = 16;
           d.heads = 2;
           d.blocks = 3;
           d.segment = 12;
           stx_par *model = stx_par_create(x, &d);
           stx_optim *weights = stx_optim_create(stx_par_params(model), NULL);
           stx_optim *gates = stx_optim_create(model->arch, NULL);
           stx_par_state *memory = stx_par_state_create(model, 1);
           stx_par_anneal cooling = {STX_PAR_TAU_TARGET, 2, 0.3, 120};

           for (int step = 0; step < 120 && stx_ok(x); step++) {
               int32_t text[13];
               for (int i = 0; i < 13; i++) text[i] = "abc"[(step * 12 + i) % 3];
               stx_par_set_tau(model, stx_par_tau(&cooling, (uint64_t)step));
               stx_par_freeze(model, step < 30);
               stx_begin(x, STX_TRAIN);
               stx_ids *in = stx_tokens(x, text, 1, 12);
               stx_ids *next = stx_tokens(x, text + 1, 1, 12);
               stx_tensor *nll = stx_par_loss(model, in, next, memory, memory);
               stx_backward(x, stx_par_total(model, nll));
               if (step % 30 == 0) printf("step %d nll %.4f\n", step, stx_item(x, nll));
               stx_optim_step(weights, 0.02);
               if (step >= 30) stx_optim_step(gates, 0.02);
           }

           char pattern[8];
           stx_par_argmax(model, pattern, sizeof pattern);
           d.pattern = pattern;
           stx_par *found = stx_par_create(x, &d);
           stx_par_inherit(found, model);
           printf("%s: ", pattern);

           int32_t token = 'a';
           stx_par_gen *gen = stx_par_gen_create(found, 1);
           stx_sampling greedy = {0};
           for (int i = 0; i < 24 && stx_ok(x); i++) {
               const stx_real *logits = stx_par_gen_feed(gen, &token, 1);
               putchar(token);
               token = logits ? stx_sample(&greedy, 0, logits, 128, NULL) : 0;
           }
           printf("\n%s\n", stx_error(x));
           stx_destroy(x);
           return 0;
       }
   //<quickstart

   Patterns. A pattern lists the blocks in the order in which they run, beginning at the
   embedding: s is attention, f feed-forward, i identity. A count repeats the letter, or
   the group in parentheses, before it:

       s5f          5 attention, 1 feed-forward
       (sff)4f3     4 x (1 attention, 2 feed-forward), 3 feed-forward

   Configuration (stx_par_desc). The reference is PAR's program in TensorFlow, with its
   base_model.sh. Transformer-XL is the authors' program, with its scripts for enwik8 (12
   layers) and WikiText-103 (base).

       field              zero means        reference         Transformer-XL
       -----------------  ----------------  ----------------  -------------------------
       vocab (V)          vectors only      12000             205 / 267735
       pattern, blocks    supernet, 32      supernet, 6       (sf)12 / (sf)16
       dim, heads         512, 8            128, 4            512, 8 / 410, 10
       inner (F)          4 D               512               2048 / 2100
       segment, mem (M)   128, segment      32, 16            512, 512 / 150, 150
       positions, sines   sines, block      sines, reference  zero
       pos_mode           distance          reference         zero
       full_scale         1 / sqrt(dh)      1 / dh            zero
       attn_relu, biases  no                both              zero
       own_uv             one pair for all  a pair each       zero
       norm_eps           1e-5              1e-3              zero
       arch, gate         logits, soft      pi, soft          -
       gate_eval          argmax            noise             -
       tau                1, then set       1 to 0.1, FACTOR  -
       words_out          adaptive          reference, with   tied / adaptive, with
                                            250, 2500         20000, 40000, 200000,
                                                              adaptive_in and tie_words
       pads, divide_all   no                id 0, yes         zero
       init               N(0,0.02)         Glorot            zero
       dropout            0                 0.1               0.1, also inner_dropout,
                                                              pos_dropout, final_dropout

   The authors evaluate WikiText-103 with clamp_len 400, same_length 1 and M = 640, which
   are fields of the state. PAR trains with learning rate 0.01 for weights and gates, and
   weight decay 1e-4 and 5e-4.

   Adaptive vocabulary. The words are cut at the cutoffs into J + 1 clusters: cluster 0 is
   the head, the others are the tails. Each has a table (size,width) and a projection
   (D,width), where the width is floor(E / div_val^number). There are no projections if
   all widths are D. The logits of the words in a cluster are

       table (proj^T h) + bias

   The head has one more logit per tail, cluster.weight (proj^T h) + cluster.bias. The
   probability of a word in a tail is the probability of the tail in the head times that
   of the word in the tail. The logits of the tails follow the words of the head, the last
   tail first, as in the authors' code. With STX_PAR_OUT_REF the head has width D, the
   projections of the tails have biases, and the logit of the first tail comes first.
   stx_par_cuts finds good cutoffs.

   Cost of a block, forward, in multiply-adds per stream and call:

       s        Wq, Wo               2 T D H dh
                Wkv                  2 S D H dh
                Wr                   S D H dh, once for all streams
                scores and sums      3 H dh T (n + T / 2)
       f                             2 T D F
       mixture  both; the two norms and the sum take one pass over the rows

   With STX_PAR_LEARNED_BIAS a head costs as much as one with dh rounded up to the next
   multiple of 8 above it.

   A memory takes B M D elements per attention block, in a buffer half as long again (on a
   GPU, one segment longer). Generation stores keys and values instead, 2 B M H dh
   elements in a window of 2 M + 64 rows: about 4 B M H dh.

   Fidelity to the authors' Transformer-XL and to PAR's reference
       Identical to within 1e-10 in double (tested against independent float64 code):
       losses, the loss of every token, gates, memories, all gradients and training steps,
       of PAR with stx_par_reference, and of Transformer-XL with attn_type 0 and 1,
       post-norm and pre_lnorm, and plain, tied and adaptive vocabularies. The published
       parameter counts are reproduced.

       Corrected; fields of the desc restore the original behaviour:
           pos_mode    the reference counts rows of positions from the far end, so a
                       distance has another row in the first call than later
           gate_eval   the reference adds noise in evaluation
           tau         tau_end of the reference is a factor (STX_PAR_TAU_FACTOR)
           arch        gates of the reference that fall below 0 stay there
       Corrected always: U = 0 gave NaN; cutoffs were printed 2 too small.

       Different: the layout of tensors, matrices being (out,in), with the rows of keys
       before those of values. The reference has one kernel (D,3D) with columns Q, V, K.
       Padding stays hidden when it becomes memory. clip_value of an optimiser limits the
       sum of a word's gradients, not each of them.

       Omitted: Transformer-XL's attn_type 2 and 3, ext_len and sampled softmax; branches
       other than the three (experts); a learned temperature, which the reference does not
       learn either.

   Checkpoints of both programs can be converted in both directions; docs/convert.md lists
   the names of the tensors.

   Arguments of the originals and the fields of stx_par_desc

       Transformer-XL     field
       -----------------  -----------------------------------------------------------
       n_token            vocab
       n_layer            pattern "(sf)n_layer"
       n_head, d_head     heads, head_dim
       d_model, d_inner   dim, inner
       d_embed            emb, with adaptive_in; with div_val 1 also one_proj
       tgt_len, mem_len   segment, mem
       ext_len            none (0)
       dropout            dropout, inner_dropout, final_dropout, pos_dropout (sines)
       dropatt            attn_dropout
       tie_weight         words_out = STX_PAR_OUT_TIED; with cutoffs tie_words
       tie_projs          tie_projs: _NONE all False, _ALL all True, _BUT_FIRST
                          [False, True, ..]
       div_val, cutoffs   div_val, cutoff
       pre_lnorm          pre_norm and no_final_norm
       same_length        same_length
       clamp_len          clamp_len; with attn_type 1 clamp_len - 1
       attn_type 0        positions = STX_PAR_SINES
       attn_type 1        positions = STX_PAR_LEARNED_BIAS, and own_uv
       attn_type 2, 3     none (absolute positions)
       untie_r (HF)       own_uv
       sample_softmax     none
       init_std           init_std
       proj_init_std      proj_std

       PAR                  field
       -------------------  ---------------------------------------------------------
       vocab_size           vocab
       d_model, num_heads   dim, heads
       d_ffn, num_layers    inner, blocks
       max_position         none: the table has segment + mem rows
       seq_len, mem_len     segment, mem
       dropout_rate         dropout
       cutoffs              cutoff
       proj_factor          proj_factor
       proj_dims            proj_dims
       straight_through     gate = STX_PAR_ST
       tau_start, tau_end   stx_par_anneal {STX_PAR_TAU_FACTOR, tau_start, tau_end, ..}

   To train as Transformer-XL does, set the fields above and use STX_ADAM with clip 0.25,
   and stx_schedule with STX_LR_COSINE and literal = 1 (its learning rates differ
   otherwise). To train as PAR does, call stx_par_reference, use STX_ADAM with eps 1e-7
   and eps_hat = 1 for weights and gates, and STX_PAR_TAU_FACTOR. Its learning rate is the
   lower of a ramp from 0 and a cosine (train_par --schedule reference).

   Transformer-XL's tokens are (T,B) and its memories (n,B,D); here they are (B,T) and
   (B,n,D). Its list of memories ends with the output of the last layer, which no
   attention reads; here only the inputs of attention blocks are stored.

   Easy to get wrong
       - One w is shared by all rows of a step unless desc.noise says otherwise. One draw
         per stream costs no more and has less variance.
       - w is not p. Report p (stx_par_probs) and evaluate with argmax: the loss of a
         training step is that of a random network.
       - m->w[l] and m->latency are results of the last forward and are freed by the next
         stx_begin. w[l] is NULL in an evaluation with argmax and in a fixed network.
         stx_par_total uses the latency of the last forward.
       - The gates have a separate parameter list, m->arch, and need a separate optimiser.
         The params of stx_par_lm are the weights alone: save both lists.
       - A memory continues whatever text filled it. Reset it where a text begins, and use
         a separate state for evaluation.
       - same_length counts the query's own key: it sees M keys at distances 0 to M - 1.
       - STX_PAR_LATENCY_FBNET requires costs in a unit in which the latency exceeds 1.
       - Generation is equal to evaluation in calls of one token: each token sees the M
         rows before it. In a call of T tokens the last one sees M + T - 1 rows, so the
         losses differ.

   GPU. Set desc.device (see seqtx.h); nothing else changes. seqtx_cuda.cu compiles this
   header's kernels if it is in the same directory. To replay steps as a CUDA graph, write
   the step as a function (examples/train_par.c is a complete example):

       stx_tokens_set(x, in, ..);    stx_tokens_set(x, next, ..);
       stx_par_set_tau(model, tau);  stx_optim_rate(optim, lr);
       stx_step_run(x, stx_par_key(model, in, next, memory, 0), step, user);

   step() calls stx_begin .. stx_optim_step. A step is replayed once the memories are
   full. Call stx_par_set_tau, _set_cost and _set_uniforms between steps.

   Reading order: stx__par_run (a block), stx__par_attention, stx_par_segment (the loop
   over blocks and the memory), stx__par_gate_of (gates); then the kernels in >>gate and
   >>mix, from stx_par_mix_plain; stx__par_cut (cutoffs); stx__par_gen_part (generation).
   Compile-time options are those of seqtx.h.
*/
#define STX__LETTERS 1
#include "seqtx.h"      /* see there */
#ifndef SEQTX_PAR_H
#define SEQTX_PAR_H

#include "seqtx.h"

#ifdef __cplusplus
extern "C" {
#endif


// >>api: configuration ------------------------------------------------------------------

/* Values of the int fields of stx_par_desc */
enum { STX_PAR_SINES = 0, STX_PAR_LEARNED, STX_PAR_LEARNED_BIAS };      /* positions */
enum { STX_PAR_SINES_BLOCK = 0, STX_PAR_SINES_REF };                    /* sines */
enum { STX_PAR_POS_DIST = 0, STX_PAR_POS_FIXED, STX_PAR_POS_REF };      /* pos_mode */
enum { STX_PAR_LOGITS = 0, STX_PAR_PI };                                /* arch */
enum { STX_PAR_SOFT = 0, STX_PAR_ST };                                  /* gate */
enum {                                                                  /* gate_eval */
    STX_PAR_EVAL_ARGMAX = 0, STX_PAR_EVAL_SOFT, STX_PAR_EVAL_NOISE
};
enum {                                                                  /* noise */
    STX_PAR_NOISE_STEP = 0, STX_PAR_NOISE_SEQUENCE, STX_PAR_NOISE_TOKENS
};
enum {                                                                  /* words_out */
    STX_PAR_OUT_ADAPTIVE = 0, STX_PAR_OUT_PLAIN, STX_PAR_OUT_TIED, STX_PAR_OUT_REF
};
enum { STX_PAR_TIE_NONE = 0, STX_PAR_TIE_ALL, STX_PAR_TIE_BUT_FIRST };  /* tie_projs */
enum {                                                                  /* latency */
    STX_PAR_LATENCY_NONE = 0, STX_PAR_LATENCY_ADD, STX_PAR_LATENCY_HINGE, STX_PAR_LATENCY_FBNET
};
enum { STX_PAR_LATENCY_OF_P = 0, STX_PAR_LATENCY_OF_W };                /* latency_w */
enum { STX_PAR_INIT_XL = 0, STX_PAR_INIT_REF };                         /* init */

/* stx_par_desc.mem of a model without memory, because 0 selects a default */
#define STX_PAR_NO_ROWS SIZE_MAX

typedef struct stx_par_desc {
    size_t vocab;           /* V; 0: no embedding and no output, for stx_par_segment alone */
    size_t dim;             /* D; 0: 512 */
    size_t heads;           /* H, at most 256; 0: 8 */
    size_t head_dim;        /* dh; 0: D / H. q, k and value have width H dh */
    size_t inner;           /* F; 0: 4 D */
    size_t blocks;          /* L; 0: the length of the pattern, or 32 without a pattern */
    const char *pattern;    /* the blocks, such as "(sfff)6f8"; see Patterns in the manual. Copied.
                               NULL or "": a supernet, in which every block is a mixture */
    size_t segment;         /* tokens per call for which tables are made; 0: 128. Calls may be
                               shorter or longer */
    size_t mem;             /* M; 0: segment. STX_PAR_NO_ROWS: no memory */
    int    positions;       /* STX_PAR_SINES. _LEARNED: each attention has a table (M + segment,
                               H dh) by distance. _LEARNED_BIAS: and a bias (M + segment,H) by
                               distance and head instead of v.r_t */
    int    sines;           /* STX_PAR_SINES_BLOCK: sines, then cosines. _REF: interleaved, the
                               slowest first */
    int    pos_mode;        /* row of the sines for distance t. STX_PAR_POS_DIST: t. _FIXED:
                               M + segment - 1 - t. _REF: S - 1 - t, with the S keys of the call.
                               The latter two require STX_PAR_SINES_REF */
    size_t clamp_len;       /* larger distances count as this one; 0: none. Requires
                               STX_PAR_POS_DIST */
    int    same_length;     /* 1: every query sees at most M keys, including its own */
    int    full_scale;      /* 1: scores are divided by dh instead of sqrt(dh) */
    int    attn_relu;       /* 1: ReLU after Wo */
    int    biases;          /* 1: Wq, Wkv, Wr and Wo have biases. W1 and W2 always have */
    int    own_uv;          /* 1: each attention has a separate u and v; 0: all share one pair */
    int    pre_norm;        /* 1: h + branch(LN(h)), and a final norm; 0: LN(h + branch(h)) */
    int    no_final_norm;   /* 1: pre_norm without the norm after the last block */
    double norm_eps;        /* 0: 1e-5 */
    double dropout;         /* of the embedding and of the output of each branch, in [0,1) */
    double attn_dropout;    /* of attention weights, in [0,1) */
    double inner_dropout;   /* inside the feed-forward network, in [0,1) */
    double pos_dropout;     /* of the sines, before Wr, in [0,1) */
    double final_dropout;   /* of the last hidden states, in [0,1) */
    int    arch;            /* meaning of al. STX_PAR_LOGITS: logits. STX_PAR_PI: the reference's
                               weights, see The gate in the manual */
    double pi0[3];          /* initial probabilities of attention, feed-forward and identity;
                               0, 0, 0: 0.33, 0.33, 0.34 */
    int    gate;            /* in training. STX_PAR_SOFT: w = y. STX_PAR_ST: one-hot w with the
                               gradient of y */
    int    gate_eval;       /* STX_PAR_EVAL_ARGMAX: the most probable branch only. _SOFT: w = p.
                               _NOISE: as in training */
    int    noise;           /* draws per block. STX_PAR_NOISE_STEP: 1. _SEQUENCE: 1 per stream.
                               _TOKENS: 1 per noise_tokens of each stream */
    size_t noise_tokens;
    double tau;             /* initial temperature; 0: 1. Later changes: stx_par_set_tau */
    int    adaptive_in;     /* 1: adaptive embedding with the cutoffs of the output; 0: a table
                               (V,D) */
    int    words_out;       /* STX_PAR_OUT_ADAPTIVE: Transformer-XL's. _PLAIN: a matrix (V,D) and
                               a bias. _TIED: the matrix is the embedding. _REF: see the manual */
    double emb_scale;       /* of the embedding; 0: sqrt(D) */
    size_t emb;             /* E, width of the first cluster; 0: D */
    size_t cutoff[STX_MAX_CLUSTERS - 1], cutoffs;   /* ends of the clusters, rising, and their
                               number; 0: a single cluster */
    double div_val;         /* cluster c has width floor(E / div_val^c); 0: 1 */
    double proj_factor;     /* STX_PAR_OUT_REF: cluster c >= 1 has width
                               max(floor(D / proj_factor^c), 1); 0: 4 */
    size_t proj_dims[STX_MAX_CLUSTERS - 1];     /* widths that replace those, where not 0 */
    int    tie_words;       /* 1: adaptive input and output share tables */
    int    tie_projs;       /* adaptive input and output share all projections, or with
                               STX_PAR_TIE_BUT_FIRST those of the tails */
    int    one_proj;        /* 1: with div_val 1, all clusters of the input share one projection
                               (D,E), and so do those of the output with tied projections */
    int    pads;            /* 1: targets equal to pad_id have no loss */
    int32_t pad_id;
    int    divide_all;      /* 1: divide the loss by B T; 0: by the number of targets with a loss */
    int    latency;         /* what stx_par_total adds to the loss */
    int    latency_w;       /* the latency of p, which has no noise, or of w */
    double cost[2];         /* time of an attention and of a feed-forward; the identity has 0 */
    double latency_weight;
    double latency_target;  /* STX_PAR_LATENCY_HINGE only */
    double latency_power;   /* STX_PAR_LATENCY_FBNET only; 0: 0.6 */
    int    init;            /* STX_PAR_INIT_XL: N(0,init_std). STX_PAR_INIT_REF: Glorot */
    double init_std;        /* STX_PAR_INIT_XL: 0: 0.02 */
    double proj_std;        /* STX_PAR_INIT_XL: of projections of the vocabulary; 0: 0.01 */
    int    recompute;       /* 1: recompute all blocks in backward: 1/4 more time, less memory */
    size_t recompute_layers;        /* recompute the last n blocks only */
} stx_par_desc;

/* Sets the switches in which PAR's reference differs from the defaults: the column
   "reference" of the manual without its sizes. The reference counts padding if it has
   a single softmax: for that, set words_out to STX_PAR_OUT_PLAIN and pads to 0
   afterwards. */
STX_DEF void stx_par_reference(stx_par_desc *d);

typedef struct stx_par_block {
    int         kind;                       /* 's', 'f', 'i', or 'g' for a mixture */
    stx_tensor *attn_gain, *attn_shift;     /* (D): LN_a */
    stx_tensor *wq, *wkv, *wr, *wo;         /* (H dh,D) (2 H dh,D) (H dh,D) (D,H dh); keys first */
    stx_tensor *bq, *bkv, *br, *bo;         /* biases of these, or NULL */
    stx_tensor *u, *v;                      /* (H,dh), separate or shared; no v with rel_bias */
    stx_tensor *rel, *rel_bias;             /* learned positions (M + segment,H dh) and their bias
                                               (M + segment,H); row t is distance t */
    stx_tensor *ff_gain, *ff_shift, *w1, *b1, *w2, *b2;          /* (F,D) (F) (D,F) (D) */
    stx_tensor *gate;                       /* al (3), in stx_par.arch; mixtures only */
} stx_par_block;

/* Positions for distances up to rows - 1. Distances beyond clamp (0: none) count as
   clamp. */
typedef struct stx_par_positions {
    size_t      rows, clamp;
    stx_tensor *sines;      /* (rows,D), constant. The last row is distance 0; with
                               STX_PAR_POS_REF the first row is position 0. NULL before the first
                               forward, and with learned positions */
    stx_ids    *far_first;  /* (1,rows): rows of the learned tables; the last one is distance 0 */
} stx_par_positions;

typedef struct stx_par {
    stx_ctx       *ctx;
    stx_par_desc   desc;                /* resolved; pattern is NULL. gate and gate_eval may be
                                           changed between steps */
    char          *pattern;             /* L letters, or NULL for a supernet */
    stx_params    *params;              /* the weights */
    stx_params    *arch;                /* the gates, arch.<l>, for a separate optimiser; NULL for
                                           a fixed network */
    stx_words     *words;               /* embedding and output head; NULL without vocab */
    stx_par_block *block;               /* [L] */
    stx_tensor    *u, *v;               /* (H,dh), unless own_uv */
    stx_tensor    *final_gain, *final_shift;
    stx_par_positions pos[2];           /* for desc.clamp_len, and for that of an evaluation */
    stx_tensor    *tau;                 /* (1) */
    stx_real      *cost;                /* (3), on the device */
    stx_tensor    *shown;               /* (2,H dh'): zeros and ones, to hide padding */
    int            frozen;              /* see stx_par_freeze */
    stx_real      *uniforms;            /* the caller's U, on the device; stx_par_set_uniforms */
    size_t         uniforms_count, uniforms_room;   /* number; 0: U is drawn; capacity */
    stx_tensor   **w;                   /* [L]: (R,3) of the last forward, valid in its step. NULL
                                           if the block did not run as a mixture */
    stx_tensor    *latency;             /* (1), summed over the blocks of the last forward, valid in
                                           its step; or NULL */
} stx_par;

/* Copies a desc, fills in the defaults and checks it. The pattern stays the caller's.
   Returns 1, or 0 and, if x is not NULL, an error that names the field. */
STX_DEF int stx_par_resolve(stx_ctx *x, const stx_par_desc *from, stx_par_desc *to);

/* Creates a model with initialised parameters in x. It is freed with x. Returns NULL
   and sets the context's error if the desc is invalid. */
STX_DEF stx_par *stx_par_create(stx_ctx *x, const stx_par_desc *d);

STX_DEF stx_params *stx_par_params(stx_par *m);

/* Number of weights of such a model, tied ones counted once, without creating it and
   without the 3 L parameters of a supernet's gates. Returns 0 if the desc is invalid,
   SIZE_MAX if the number does not fit. */
STX_DEF size_t stx_par_count(const stx_par_desc *d);


// >>api: memory -------------------------------------------------------------------------

/* The memories of all attention blocks for B streams. A forward reads one state and
   writes one, which may be the same. Use separate states for training and evaluation.
   A new state is empty. */
typedef struct stx_par_state {
    stx_par  *model;
    size_t    B, M;
    size_t    clamp_len;    /* of calls that read this state: initially the model's. May be set,
                               for example to evaluate with a longer memory */
    int       same_length;  /* likewise; 1 requires M >= 2 */
    stx_rows *mem;          /* rows of block l, (B,n,D), oldest first */
    uint64_t  calls;        /* forwards that wrote this state since the last reset */
    int       training;     /* the last of them was a training step */
} stx_par_state;

STX_DEF stx_par_state *stx_par_state_create(stx_par *m, size_t B);

/* The same with M rows instead of the model's (0: no memory). Distances beyond a
   learned table use its last row. */
STX_DEF stx_par_state *stx_par_state_create_sized(stx_par *m, size_t B, size_t M);

STX_DEF void stx_par_state_free(stx_par_state *s);

/* Empties the memory. Does nothing after an error. */
STX_DEF void stx_par_state_reset(stx_par_state *s);

/* Empties the memory of stream b, for example because another text begins there. */
STX_DEF void stx_par_state_reset_stream(stx_par_state *s, size_t b);

/* Copies the memory of streams c .. c + n - 1 of from to streams b .. b + n - 1 of to,
   to regroup batches. Both states belong to the same model and have the same M.
   Returns 1, or 0 and an error. */
STX_DEF int stx_par_state_copy(stx_par_state *to, size_t b, const stx_par_state *from, size_t c,
                               size_t n);

/* Copies the memory of block l to and from host memory. get writes the
   n = mem->layer[l].real rows of each stream, (B,n,D), oldest first. set replaces the
   memory by n <= M rows per stream. Both return 1, or 0 and an error. */
STX_DEF int stx_par_state_get(const stx_par_state *s, size_t l, stx_real *out);
STX_DEF int stx_par_state_set(stx_par_state *s, size_t l, const stx_real *in, size_t n);

/* Saves the memory in a checkpoint, as "<prefix>calls" and the entries of
   stx_rows_save under "<prefix>mem.", and loads it into a state with the same B. A
   prefix has at most 64 bytes. Both return 1, or 0 and an error; a failed load leaves
   s empty. */
STX_DEF int stx_par_state_save(stx_writer *w, const stx_par_state *s, const char *prefix);
STX_DEF int stx_par_state_load(stx_par_state *s, const stx_file *f, const char *prefix);


// >>api: forward ------------------------------------------------------------------------

/* A segment of vectors h (B,T,D), T >= 1 -> last hidden states (B,T,D). pad (B,T), or
   NULL, is not 0 where h is padding: no query attends to it, now or later, but its
   values must be finite. in is the memory to read (NULL if empty), out the one to
   write (NULL to discard it); they may be the same. Gradients reach h but not the
   memory. With out it cannot be called inside stx_recompute. */
STX_DEF stx_tensor *stx_par_segment(stx_par *m, stx_tensor *h, const stx_ids *pad,
                                    const stx_par_state *in, stx_par_state *out);

/* ids (B,T) -> embedding (B,T,D), scaled, with dropout. */
STX_DEF stx_tensor *stx_par_embed(stx_par *m, const stx_ids *ids);

/* Both: ids (B,T) -> last hidden states (B,T,D). */
STX_DEF stx_tensor *stx_par_forward(stx_par *m, const stx_ids *ids, const stx_par_state *in,
                                    stx_par_state *out);

/* Hidden states (B,T,D) -> logits (B,T,V), differentiable. An error with an adaptive
   output, where each cluster has a separate softmax. */
STX_DEF stx_tensor *stx_par_logits(stx_par *m, stx_tensor *h);

/* Hidden states (B,T,D) -> log p (B,T,V), for every kind of output. Not
   differentiable. */
STX_DEF stx_tensor *stx_par_log_probs(stx_par *m, stx_tensor *h);

/* Negative log-likelihood of targets (B,T), in nats per token -> (1). Targets that are
   negative, or equal to pad_id with pads, have no loss. The sum is divided by the
   number of the others, or by B T with divide_all; it is 0 if there are none. If rows
   is not NULL, *rows is set to the loss of each target (B T), a constant, 0 where
   there is none. */
STX_DEF stx_tensor *stx_par_nll(stx_par *m, stx_tensor *h, const stx_ids *targets,
                                stx_tensor **rows);

/* Negative log-likelihood of a segment of tokens -> (1). */
STX_DEF stx_tensor *stx_par_loss(stx_par *m, const stx_ids *ids, const stx_ids *targets,
                                 const stx_par_state *in, stx_par_state *out);

/* nll (1) with the latency of the last forward, lat = sum_l sum_k p_lk cost_k (w_lk with
   STX_PAR_LATENCY_OF_W) -> (1), the tensor to call stx_backward on:

       ADD      nll + weight lat
       HINGE    nll + weight max(0, lat / target - 1)
       FBNET    nll weight ln(max(lat, 1))^power        choose units in which lat > 1

   weight, target and power are the desc's latency_ fields. Returns nll itself in
   evaluation, without latency, and for a fixed network. In a group of ranks, a rank
   knows the w of its own streams only: HINGE and FBNET then require
   STX_PAR_LATENCY_OF_P or STX_PAR_NOISE_STEP. */
STX_DEF stx_tensor *stx_par_total(stx_par *m, stx_tensor *nll);

/* The key of stx_step_run: a hash of everything the host decides in a step with these
   tokens and this memory (each NULL if there is none). salt is hashed too. For a step
   with several parts or memories, pass the key of one as the salt of the next.
   Evaluate with a memory that training does not use: if the last forward that wrote s
   was a training step, the key omits gate_eval and the values of the gates, which
   decide an evaluation, and a replayed step could run the wrong branches. */
STX_DEF uint64_t stx_par_key(const stx_par *m, const stx_ids *ids, const stx_ids *targets,
                             const stx_par_state *s, uint64_t salt);


// >>api: search -------------------------------------------------------------------------

/* Sets the temperature of the next steps. It is a scalar on the device that a replayed
   step reads: set it between steps. */
STX_DEF void stx_par_set_tau(stx_par *m, double tau);

/* Temperature after n updates; constant after total.

       TARGET    from (to / from)^(n / total)
       FACTOR    from to^(n / total), where to is a factor, as in PAR's reference */
enum { STX_PAR_TAU_TARGET = 0, STX_PAR_TAU_FACTOR };
typedef struct stx_par_anneal {
    int      form;
    double   from, to;
    uint64_t total;
} stx_par_anneal;
STX_DEF double stx_par_tau(const stx_par_anneal *a, uint64_t n);

/* Replaces the times cost[2] of an attention and a feed-forward, for example by
   measured ones. */
STX_DEF void stx_par_set_cost(stx_par *m, const double *cost);

/* frozen = 1: the parameters of the gates are constants from the next forward on, and
   their gradients are not computed. */
STX_DEF void stx_par_freeze(stx_par *m, int frozen);

/* Replaces the random U from the next call on by values u (R,L,3) in host memory, each
   above 0 and below 1, with R = stx_par_draws(m, B, T) for calls of B streams of T
   tokens. count is the number of values, 3 L R. u = NULL restores random draws. Sets
   an error and keeps the previous values if count is 0 or not a multiple of 3 L (with
   STX_PAR_NOISE_STEP: not 3 L), or if a value is out of range. A forward that needs
   another number of draws fails. The values are copied to the device, where a replayed
   step reads them: set them between steps. */
STX_DEF void stx_par_set_uniforms(stx_par *m, const stx_real *u, size_t count);

/* R, the number of draws per block in a call of B streams of T tokens. */
STX_DEF size_t stx_par_draws(const stx_par *m, size_t B, size_t T);

/* Writes p (L,3) of the gates as they are now. Returns 1; 0 after an error and for a
   fixed network. */
STX_DEF int stx_par_probs(const stx_par *m, double *p);

/* Patterns. Each function writes a string with its terminating 0 into out, which has
   capacity for `room` bytes, and returns its length; 0 if it does not fit or the
   arguments are invalid.

   expand    to one letter per block; see Patterns in the manual
   format    the inverse: a short form with counts
   rule      the paper's PAR: floor(L / every) attentions, evenly spaced within the first
             two thirds
   argmax    the most probable branch of each block, as the gates are now
   sample    each block drawn from its p, a function of (seed, n) */
STX_DEF size_t stx_par_expand(char *out, size_t room, const char *pattern);
STX_DEF size_t stx_par_format(char *out, size_t room, const char *pattern);
STX_DEF size_t stx_par_rule(char *out, size_t room, size_t L, size_t every);
STX_DEF size_t stx_par_argmax(const stx_par *m, char *out, size_t room);
STX_DEF size_t stx_par_sample(const stx_par *m, uint64_t seed, uint64_t n, char *out, size_t room);

/* Copies the weights of from, a supernet or a fixed network, for the branches that
   `to` has. The contexts may differ. (From a file, call stx_params_load on the params
   of `to`.) Returns 1, or 0 and an error if from lacks a weight or has it in another
   shape. */
STX_DEF int stx_par_inherit(stx_par *to, const stx_par *from);


// >>api: cuts ---------------------------------------------------------------------------

/* Finds the cutoffs of an adaptive vocabulary that minimise a cost, exactly, from the
   counts of V words in the order of their ids (falling counts give the best result; sort
   sorts them). cut_1 < .. < cut_J are the cutoffs, with cut_0 = 0 and cut_{J+1} = V.
   Cluster 0 is the head; tail k has size_k = cut_{k+1} - cut_k words, share_k of all
   counts, and width_k = proj_dims[k-1], or if that is 0 max(floor(D / factor^k), 1):

       REF     sum over all clusters of (size) (count), as in PAR's reference: as if only
               the tokens of the head paid for the head
       MACS    D (cut_1 + J) + sum_k share_k width_k (D + size_k), k = 1..J:
               multiply-adds per token
       TIME    time(cut_1 + J, D, 1)
                   + sum_k time(width_k, D, share_k) + time(size_k, width_k, share_k)

   The algorithm requires the cost of a cluster of the words i .. j - 1 to be Monge:
   cost(i,j) + cost(i2,j2) <= cost(i,j2) + cost(i2,j) for i <= i2 <= j <= j2. REF and
   MACS are. TIME is if time has the form of 1609.04309, max(t0 + t1 x0 y0,
   t0 + t1 x y) for x columns and y rows of the batch: a constant and a time per multiply-add, at
   least that of a matrix of x0 y0. With another form the result may not be optimal.
   Among cutoffs of equal cost, those whose last cutoffs are largest are chosen, as in
   the reference. */
enum { STX_PAR_CUTS_REF = 0, STX_PAR_CUTS_MACS, STX_PAR_CUTS_TIME };
typedef struct stx_par_cuts_desc {
    size_t clusters;            /* J + 1, 1 to 8 */
    int    cost;                /* STX_PAR_CUTS_REF, _MACS or _TIME */
    int    sort;                /* 1: sort the counts by falling size first */
    size_t dim;                 /* D, for MACS and TIME */
    double factor;              /* 0: 4 */
    const size_t *proj_dims;    /* (J), or NULL */
    /* TIME: of a GEMM for this share of the rows of a batch */
    double (*time)(void *user, size_t columns, size_t inner, double share);
    void  *user;
} stx_par_cuts_desc;

/* Writes cut_1 .. cut_J to cut (J), in the form of stx_par_desc.cutoff, and, if total
   is not NULL, the cost to *total. Returns 1, or 0 and an error if a cluster would be
   empty (V <= J) or a sum does not fit into 63 bits. */
STX_DEF int stx_par_cuts(stx_ctx *x, size_t *cut, double *total, const uint64_t *counts, size_t N,
                         const stx_par_cuts_desc *d);


// >>api: generation ---------------------------------------------------------------------

/* Generates token by token with a KV cache. Every token sees the M rows before it, as
   in an evaluation in calls of one token, however many tokens a call has. (In a
   forward of T tokens the last one sees M + T - 1.) For fixed networks, and for
   supernets with STX_PAR_EVAL_ARGMAX or _SOFT. Create a new one or reset it after the
   parameters change. */
typedef struct stx_par_gen {
    stx_par   *model;
    size_t     B, M;
    size_t     clamp_len;       /* initially the model's; may be set before the first step */
    int        same_length;     /* likewise */
    size_t     rows;            /* rows of memory so far, up to M */
    stx_cache *cache;           /* keys and values of each attention block */
    stx_real **pos;             /* [L]: r_t of each attention block, (M + 1,H dh') */
    char      *kind;            /* (L): what each block runs */
    int32_t   *pad;             /* (B,M), on the host, the newest row last: not 0 for rows before a
                                   stream's reset */
    int        masked, stale;   /* some element of pad is not 0; pos and kind must be recomputed */
} stx_par_gen;

STX_DEF stx_par_gen *stx_par_gen_create(stx_par *m, size_t B);

/* The same with M rows instead of the model's. */
STX_DEF stx_par_gen *stx_par_gen_create_sized(stx_par *m, size_t B, size_t M);

STX_DEF void stx_par_gen_free(stx_par_gen *g);
STX_DEF void stx_par_gen_reset(stx_par_gen *g);

/* Restarts stream b while the others continue. */
STX_DEF void stx_par_gen_reset_stream(stx_par_gen *g, size_t b);

/* Continues after a memory of the same model and B, which is read once, up to M of its
   rows. Calls stx_begin(x, STX_EVAL). Returns 1, or 0 and an error. */
STX_DEF int stx_par_gen_set(stx_par_gen *g, const stx_par_state *from);

/* Embeddings h (B,T,D), T >= 1 -> last hidden states (B,T,D). Call
   stx_begin(x, STX_EVAL) first. */
STX_DEF stx_tensor *stx_par_gen_step(stx_par_gen *g, stx_tensor *h);

/* Feeds n >= 1 tokens per stream, ids (B,n), and returns logits, or log p of an
   adaptive output, (B,V) of the token after the last one. The result is in host
   memory, for stx_sample, and valid until the next call. Calls stx_begin(x, STX_EVAL),
   so do not call it between a forward and its backward. */
STX_DEF const stx_real *stx_par_gen_feed(stx_par_gen *g, const int32_t *ids, size_t n);

/* The model as a table of functions, for programs that accept any family. window is
   the number of rows of memory in evaluation; 0 means M. params are the weights; the
   caller handles the gates, stx_par.arch. For NULL and for a model without vocab, all
   fields are NULL. */
STX_DEF stx_lm stx_par_lm(stx_par *m);


// >>api: kernels ------------------------------------------------------------------------

/* The gate of one block, for R draws. See The gate in the manual:

       y    = softmax((ln pi + g) / tau), g = -ln(-ln U); without noise g = 0 and tau = 1,
              so y = p
       w    = y, or with hard the one-hot vector of the first largest element of y
       lat  = before[0] + the mean over draws of sum_k p_k cost[k] (latency 1, which needs
              no mean) or w_k cost[k] (latency 2)

   U_k of a draw is u[draw * ldu + k], or if u is NULL

       ((bits >> 9) + 0.5) 2^-23, bits = word k of stx_philox(seed, stream, first + draw)

   which is never 0 or 1, and exact in float. Everything is computed in double and rounded
   once. In the backward, y and a hard w are constants, and with latency 2
   dw_k += dlat cost[k] / R:

       ds_k      = sum over draws of y_k (dw_k - sum_k y_k dw_k) / tau, in rising order
       dal_k    += ds_k - p_k sum ds + dp_k           with STX_PAR_LOGITS
       dp_k      = dlat p_k (cost[k] - sum p cost)    with latency 1, else 0
       dal_k    += ds_k / pi_k + dlat (cost[k] - sum p cost) / sum pi
                                                      with STX_PAR_PI, where al_k >= 0
       dbefore  += dlat

   All values are floats in every precision. */
typedef struct stx_par_gate_args {
    size_t R, ldu;
    int    kind, hard, noisy, latency;
    uint64_t seed, stream, first;
    const stx_real *al;             /* (3) */
    const stx_real *tau;            /* (1) */
    const stx_real *u;              /* (R,..), or NULL */
    const stx_real *cost, *before;  /* (3) (1); before NULL: 0 */
    stx_real *w, *y;                /* (R,3); y may be w, unless hard */
    stx_real *lat;                  /* (1) */
    const stx_real *dw, *dlat;      /* (R,3) (1), or NULL for 0 */
    stx_real *dal, *dbefore;        /* (3) (1), or NULL if not needed */
} stx_par_gate_args;
STX_KERNEL(stx_par_gate_fwd, (stx_ctx *x, const stx_par_gate_args *a))
STX_KERNEL(stx_par_gate_bwd, (stx_ctx *x, const stx_par_gate_args *a))

/* The mixture of a block's branches, row by row:

       y = w0 Y0 + w1 Y1 + w2 h       Y_k = layernorm(z_k), z_k = h + b_k, k = 0, 1

   each norm with its gain and shift; Y_k = z_k if gain[0] is NULL. A term whose weight is
   0 is omitted, so a one-hot w gives bit-exactly the result of the chosen branch alone
   (stx_residual_norm). A stream has T rows; each run of `run` rows in it shares one draw,
   so that the weights of row n are those of the draw

       floor(n / T) ceil(T / run) + floor((n mod T) / run)

   For one draw for all rows, T = run = N. The forward writes y and, with norms, mean and
   rstd. The backward, with xh_k = (z_k - mean_k) rstd_k:

       dw_k     += sum dy Y_k, dw_2 += sum dy h       over the rows of a draw, ascending,
                                                      and their channels
       dgain_k  += sum_n w_k dy xh_k                  dshift_k += sum_n w_k dy
       dz_k      = rstd_k (dxh - mean(dxh) - xh_k mean(dxh xh_k)), dxh = w_k dy gain_k
                   without norms w_k dy
       db_k      = or += dz_k
       dh        = or += w2 dy + dz_0 + dz_1

   A gradient that is NULL is not computed. */
typedef struct stx_par_mix_args {
    size_t N, C, T, run;            /* N rows of C channels, (N / T) ceil(T / run) draws */
    stx_real eps;
    const stx_real *h, *b[2];       /* (N,C) */
    const stx_real *w;              /* (draws,3): float in every precision, as are mean, rstd, gain,
                                       shift and dw */
    const stx_real *gain[2], *shift[2];         /* (C) */
    stx_real *y;                    /* (N,C) */
    stx_real *mean[2], *rstd[2];    /* (N) */
    const stx_real *dy;             /* (N,C) */
    stx_real *dh, *db[2];           /* (N,C) */
    int    add_h, add[2];           /* 1: += */
    stx_real *dw, *dgain[2], *dshift[2];        /* (draws,3) (C) (C) */
    double *work;                   /* (N,3) on the device, backward: dots of each row */
} stx_par_mix_args;
STX_KERNEL(stx_par_mix_fwd, (stx_ctx *x, const stx_par_mix_args *a))
STX_KERNEL(stx_par_mix_bwd, (stx_ctx *x, const stx_par_mix_args *a))

/* The definition of both, element by element and in double, in host memory: the
   forward, or if dy is not NULL the backward, which adds to every gradient (work,
   add_h and add are not read). For reading, and for tests. */
STX_DEF void stx_par_mix_plain(const stx_par_mix_args *a);

/* loss (1) from nll (1) and lat (1); see stx_par_total. kind is STX_PAR_LATENCY_ADD ..
   _FBNET. The backward adds to dnll and dlat (1) where they are not NULL. Computed in
   double and rounded once. FBNET has loss 0 and no gradient for lat <= 1. */
typedef struct stx_par_latency_args {
    int    kind;
    double weight, target, power;
} stx_par_latency_args;
STX_KERNEL(stx_par_latency_fwd, (stx_ctx *x, stx_real *loss, const stx_real *nll,
                                 const stx_real *lat, const stx_par_latency_args *a))
STX_KERNEL(stx_par_latency_bwd, (stx_ctx *x, stx_real *dnll, stx_real *dlat, const stx_real *dloss,
                                 const stx_real *nll, const stx_real *lat,
                                 const stx_par_latency_args *a))

#ifdef __cplusplus
}
#endif

/* Stop here if you only want the API. */
#endif /* SEQTX_PAR_H */

#if (defined(SEQTX_IMPLEMENTATION) || defined(SEQTX_PAR_IMPLEMENTATION)) \
    && !defined(SEQTX_PAR_IMPLEMENTATION_DONE)
#define SEQTX_PAR_IMPLEMENTATION_DONE

#define STX_LOOPS
#include "seqtx.h" /* once more, for the inner loops' macros */

#include <stdio.h>
#include <stdlib.h>
STX_STRICT_ON


// >>gate

static void stx__par_uniform(const stx_par_gate_args *a, size_t r, double *u) {
    uint32_t bits[4];
    int k;
    stx_philox(a->seed, a->stream, a->first + r, bits);
    for (k = 0; k < 3; k++)
        u[k] = a->u ? (double)a->u[r * a->ldu + (size_t)k]
                    : ((double)(bits[k] >> 9) + 0.5) / 8388608;
}

/* q and p = q / sum q of the parameters; in lnq their logarithms */
static void stx__par_q(int kind, const stx_real *al, double *lnq, double *q, double *p) {
    double top = (double)al[0], sum = 0;
    int k;
    for (k = 1; k < 3; k++)
        if ((double)al[k] > top) top = (double)al[k];
    for (k = 0; k < 3; k++) {
        q[k] = kind == STX_PAR_PI ? (al[k] > 0 ? (double)al[k] : 0) + 1e-5
                                  : exp((double)al[k] - top);
        if (al[k] != al[k]) q[k] = (double)al[k];
        sum += q[k];
    }
    for (k = 0; k < 3; k++) {
        lnq[k] = kind == STX_PAR_PI ? log(q[k]) : (double)al[k] - top - log(sum);
        p[k] = q[k] / sum;
    }
}

/* y of draw r; the first largest a */
static int stx__par_y(const stx_par_gate_args *a, size_t r, const double *lnq, double *y) {
    double u[3], v[3], sum = 0, tau = a->noisy ? (double)a->tau[0] : 1;
    int k, best = 0;
    if (a->noisy) stx__par_uniform(a, r, u);
    for (k = 0; k < 3; k++) {
        v[k] = (lnq[k] + (a->noisy ? -log(-log(u[k])) : 0)) / tau;
        if (v[k] > v[best]) best = k;
    }
    for (k = 0; k < 3; k++) sum += y[k] = exp(v[k] - v[best]);
    for (k = 0; k < 3; k++) y[k] /= sum;
    return best;
}

STX_DEF void stx_par_gate_fwd(stx_ctx *x, const stx_par_gate_args *a) {
    STX__FP_SCOPE;
    double lnq[3], q[3], p[3], y[3], lat = 0;
    size_t r;
    int k, best;
    (void)x;
    stx__par_q(a->kind, a->al, lnq, q, p);
    for (r = 0; r < a->R; r++) {
        best = stx__par_y(a, r, lnq, y);
        for (k = 0; k < 3; k++) {
            a->y[3 * r + (size_t)k] = (stx_real)y[k];
            if (a->hard) y[k] = y[k] == y[k] ? k == best : y[k];
            a->w[3 * r + (size_t)k] = (stx_real)y[k];
            if (a->latency == 2) lat += y[k] * (double)a->cost[k] / (double)a->R;
        }
    }
    for (k = 0; k < 3 && a->latency == 1; k++) lat += p[k] * (double)a->cost[k];
    if (a->latency) a->lat[0] = (stx_real)(lat + (a->before ? (double)a->before[0] : 0));
}

/* w = y = softmax((ln q + g) / tau) ;  lat = before + mean sum v cost */
STX_DEF void stx_par_gate_bwd(stx_ctx *x, const stx_par_gate_args *a) {
    STX__FP_SCOPE;
    double lnq[3], q[3], p[3], s[3] = {0, 0, 0}, all = 0, mean = 0, sum = 0,
                               tau = a->noisy ? (double)a->tau[0] : 1;
    double dlat = a->latency && a->dlat ? (double)a->dlat[0] : 0;
    size_t r;
    int k;
    (void)x;
    if (a->dbefore && a->latency) a->dbefore[0] += (stx_real)dlat;
    if (!a->dal) return;
    stx__par_q(a->kind, a->al, lnq, q, p);
    for (r = 0; r < a->R; r++) {
        double dw[3], dot = 0;
        for (k = 0; k < 3; k++) {
            dw[k] = (a->dw ? (double)a->dw[3 * r + (size_t)k] : 0)
                    + (a->latency == 2 ? dlat * (double)a->cost[k] / (double)a->R : 0);
            dot += (double)a->y[3 * r + (size_t)k] * dw[k];
        }
        for (k = 0; k < 3; k++) s[k] += (double)a->y[3 * r + (size_t)k] * (dw[k] - dot) / tau;
    }
    for (k = 0; k < 3; k++) {
        all += s[k];
        sum += q[k];
        if (a->latency == 1) mean += p[k] * (double)a->cost[k];
    }
    for (k = 0; k < 3; k++) {
        double dp = a->latency == 1 ? dlat * ((double)a->cost[k] - mean) : 0;
        if (a->kind == STX_PAR_LOGITS)
            a->dal[k] += (stx_real)(s[k] - p[k] * all + p[k] * dp);
        else if (!(a->al[k] < 0))
            a->dal[k] += (stx_real)(s[k] / q[k] + dp / sum);
    }
}


// >>mix

/* The weights of row n */
static size_t stx__par_draw(const stx_par_mix_args *a, size_t n) {
    return n / a->T * ((a->T + a->run - 1) / a->run) + n % a->T / a->run;
}

/* The definition. z: what a branch's layer norm reads; with it or without, Y and what comes back through it. */
STX_DEF void stx_par_mix_plain(const stx_par_mix_args *a) {
    STX__FP_SCOPE;
    const size_t C = a->C;
    size_t n, c;
    int i;
    for (n = 0; n < a->N; n++) {
        const stx_real *h = a->h + n * C, *w = a->w + 3 * stx__par_draw(a, n),
                       *dy = a->dy ? a->dy + n * C : NULL;
        double dw[3] = {0, 0, 0};
        for (c = 0; c < C; c++) {
            if (dy) dw[2] += (double)dy[c] * (double)h[c];
            if (dy && a->dh) a->dh[n * C + c] += w[2] * dy[c];
            if (!dy) a->y[n * C + c] = w[2] * h[c];
        }
        for (i = 0; i < 2; i++) {
            const stx_real *b = a->b[i] + n * C;
            double m = 0, v = 0, r = 1, mq = 0, mqx = 0;
            for (c = 0; c < C; c++) m += ((double)h[c] + (double)b[c]) / (double)C;
            for (c = 0; c < C; c++)
                v += ((double)h[c] + (double)b[c] - m) * ((double)h[c] + (double)b[c] - m)
                     / (double)C;
            if (a->gain[i])
                r = 1 / sqrt(v + (double)a->eps);
            else
                m = 0;
            if (a->gain[i] && !dy) {
                a->mean[i][n] = (stx_real)m;
                a->rstd[i][n] = (stx_real)r;
            }
            for (c = 0; c < C; c++) {
                double z = ((double)h[c] + (double)b[c] - m) * r,
                       gain = a->gain[i] ? (double)a->gain[i][c] : 1;
                double y = z * gain + (a->gain[i] ? (double)a->shift[i][c] : 0), g;
                if (!dy) {
                    a->y[n * C + c] += (stx_real)((double)w[i] * y);
                    continue;
                }
                g = (double)w[i] * (double)dy[c];
                dw[i] += (double)dy[c] * y;
                if (!a->gain[i]) continue;
                if (a->dgain[i]) a->dgain[i][c] += (stx_real)(g * z);
                if (a->dshift[i]) a->dshift[i][c] += (stx_real)g;
                mq += g * gain / (double)C;
                mqx += g * gain * z / (double)C;
            }
            for (c = 0; dy && c < C; c++) {
                double z = ((double)h[c] + (double)b[c] - m) * r, g = (double)w[i] * (double)dy[c];
                if (a->gain[i]) g = r * (g * (double)a->gain[i][c] - mq - z * mqx);
                if (a->db[i]) a->db[i][n * C + c] += (stx_real)g;
                if (a->dh) a->dh[n * C + c] += (stx_real)g;
            }
        }
        for (i = 0; dy && a->dw && i < 3; i++)
            a->dw[3 * stx__par_draw(a, n) + (size_t)i] += (stx_real)dw[i];
    }
}

enum { STX__PAR_BLOCK = 64 };

/* Row n. mean and rstd as in stx_layernorm, to the bit: its y is the scratch */
STX_INNER void stx__par_mix_row_any(int fma, const stx_par_mix_args *a, size_t n) {
    const size_t C = a->C;
    const stx_real *h = a->h + n * C, *w = a->w + 3 * stx__par_draw(a, n), eps = a->eps;
    stx_real *y = a->y + n * C;
    size_t c0, c;
    int i;
    for (i = 0; i < 2 && a->gain[i]; i++) {
        const stx_real *b = a->b[i] + n * C;
        stx_real m;
        for (c = 0; c < C; c++) y[c] = h[c] + b[c];
        m = stx_fast_sum(y, C) / (stx_real)C;
        for (c = 0; c < C; c++) y[c] -= m;
        a->mean[i][n] = m;
        a->rstd[i][n] =
            (stx_real)(1 / sqrt((double)(stx_fast_dot(fma, y, y, C) / (stx_real)C + eps)));
    }
    for (c0 = 0; c0 < C; c0 += STX__PAR_BLOCK) { /* in arrays of the stack, which cannot be a's */
        const size_t k = STX_MIN(C - c0, (size_t)STX__PAR_BLOCK);
        stx_real o[STX__PAR_BLOCK] = {0}, t[STX__PAR_BLOCK];
        int any = 0;
        for (i = 0; i < 3; i++) {
            const stx_real wi = w[i];
            if (wi == 0) continue;
            if (i == 2)
                for (c = 0; c < k; c++) t[c] = h[c0 + c];
            else if (!a->gain[i])
                for (c = 0; c < k; c++) t[c] = h[c0 + c] + a->b[i][n * C + c0 + c];
            else {
                const stx_real *b = a->b[i] + n * C + c0, *g = a->gain[i] + c0,
                               *s = a->shift[i] + c0, m = a->mean[i][n], r = a->rstd[i][n];
                for (c = 0; c < k; c++) t[c] = STX_FMA(fma, (h[c0 + c] + b[c] - m) * r, g[c], s[c]);
            }
            if (any)
                for (c = 0; c < k; c++) o[c] = STX_FMA(fma, wi, t[c], o[c]);
            else
                for (c = 0; c < k; c++) o[c] = wi * t[c];
            any = 1;
        }
        memcpy(y + c0, o, k * sizeof *o);
    }
}
STX_EACH_ISA(stx__par_mix_row_any, (const stx_par_mix_args *a, size_t n), a, n)

static void stx__par_mix_part(const stx_share *s, const void *job) {
    size_t n;
    for (n = s->from; n < s->to; n++)
        STX_CALL(s->x, stx__par_mix_row_any, ((const stx_par_mix_args *)job, n));
}

STX_DEF void stx_par_mix_fwd(stx_ctx *x, const stx_par_mix_args *a) {
    stx_parallel(x, a->N, 14 * a->N * a->C, stx__par_mix_part, a);
}

/* y = w0 Y0 + w1 Y1 + w2 h ;  Yi = xh_i gain_i + shift_i, so sum dy Yi = sum dy gain xh + sum dy shift, of which the first is also what
   the layer norm's way back needs */
STX_INNER void stx__par_mix_back_row_any(int fma, const stx_par_mix_args *a, size_t n) {
    const size_t C = a->C, at = n * C;
    const stx_real *h = a->h + at, *dy = a->dy + at, *w = a->w + 3 * stx__par_draw(a, n);
    stx_real k0[2] = {0, 0}, k1[2] = {0, 0};
    size_t c0, c, e;
    int i;
    for (i = 0; i < 2; i++) {
        const stx_real *b = a->b[i] + at, *g = a->gain[i], *s = a->shift[i],
                       m = g ? a->mean[i][n] : 0, r = g ? a->rstd[i][n] : 1;
        stx_real q[16] = {0}, qx[16] = {0}, sh[16] = {0}, tx;
        if (!g) { /* sum dy (h + b) */
            for (c = 0; c + 16 <= C; c += 16)
                for (e = 0; e < 16; e++)
                    qx[e] = STX_FMA(fma, dy[c + e], h[c + e] + b[c + e], qx[e]);
            for (; c < C; c++) qx[c % 16] += dy[c] * (h[c] + b[c]);
            if (a->dw) a->work[3 * n + (size_t)i] = (double)stx_fast_lanes(qx);
            continue;
        }
        for (c = 0; c + 16 <= C; c += 16)
            for (e = 0; e < 16; e++) {
                stx_real d = dy[c + e] * g[c + e];
                q[e] += d;
                qx[e] = STX_FMA(fma, d, h[c + e] + b[c + e] - m, qx[e]);
                sh[e] = STX_FMA(fma, dy[c + e], s[c + e], sh[e]);
            }
        for (; c < C; c++) {
            stx_real d = dy[c] * g[c];
            q[c % 16] += d;
            qx[c % 16] += d * (h[c] + b[c] - m);
            sh[c % 16] += dy[c] * s[c];
        }
        tx = stx_fast_lanes(qx);
        k0[i] = stx_fast_lanes(q) / (stx_real)C;
        k1[i] = tx * r * r / (stx_real)C;
        if (a->dw) a->work[3 * n + (size_t)i] = (double)(tx * r) + (double)stx_fast_lanes(sh);
    }
    if (a->dw) a->work[3 * n + 2] = (double)stx_fast_dot(fma, dy, h, C);
    for (c0 = 0; c0 < C; c0 += STX__PAR_BLOCK) {
        const size_t k = STX_MIN(C - c0, (size_t)STX__PAR_BLOCK);
        stx_real dh[STX__PAR_BLOCK], d[STX__PAR_BLOCK];
        for (c = 0; c < k; c++) dh[c] = w[2] * dy[c0 + c];
        for (i = 0; i < 2; i++) {
            const stx_real wi = w[i], *b = a->b[i] + at + c0;
            stx_real *db = a->db[i] ? a->db[i] + at + c0 : NULL;
            if (a->gain[i]) {
                const stx_real *g = a->gain[i] + c0, m = a->mean[i][n], wr = wi * a->rstd[i][n],
                               p0 = k0[i], p1 = k1[i];
                for (c = 0; c < k; c++)
                    d[c] = wr * (STX_FMA(fma, dy[c0 + c], g[c], -p0) - (h[c0 + c] + b[c] - m) * p1);
            } else
                for (c = 0; c < k; c++) d[c] = wi * dy[c0 + c];
            for (c = 0; c < k; c++) dh[c] += d[c];
            if (!db) continue;
            if (a->add[i])
                for (c = 0; c < k; c++) db[c] += d[c];
            else
                memcpy(db, d, k * sizeof *d);
        }
        if (!a->dh) continue;
        if (a->add_h)
            for (c = 0; c < k; c++) a->dh[at + c0 + c] += dh[c];
        else
            memcpy(a->dh + at + c0, dh, k * sizeof *dh);
    }
}
STX_EACH_ISA(stx__par_mix_back_row_any, (const stx_par_mix_args *a, size_t n), a, n)

static void stx__par_mix_back_part(const stx_share *s, const void *job) {
    size_t n;
    for (n = s->from; n < s->to; n++)
        STX_CALL(s->x, stx__par_mix_back_row_any, ((const stx_par_mix_args *)job, n));
}

/* dgain += sum_n w dy xh ; dshift += sum_n w dy: 64 channels or fewer, in blocks of 64 rows (less rounding than one long sum) */
STX_INNER void stx__par_mix_columns_any(int fma, const stx_par_mix_args *a, int i, size_t c0) {
    const size_t C = a->C, k = STX_MIN(C - c0, (size_t)STX__PAR_BLOCK);
    size_t n0, n, c;
    for (n0 = 0; n0 < a->N; n0 += 64) {
        stx_real sg[STX__PAR_BLOCK] = {0}, ss[STX__PAR_BLOCK] = {0};
        for (n = n0; n < STX_MIN(a->N, n0 + 64); n++) {
            const stx_real *h = a->h + n * C + c0, *b = a->b[i] + n * C + c0,
                           *dy = a->dy + n * C + c0;
            const stx_real w = a->w[3 * stx__par_draw(a, n) + (size_t)i], m = a->mean[i][n],
                           wr = w * a->rstd[i][n];
            for (c = 0; c < k; c++) {
                sg[c] = STX_FMA(fma, dy[c] * wr, h[c] + b[c] - m, sg[c]);
                ss[c] = STX_FMA(fma, dy[c], w, ss[c]);
            }
        }
        if (a->dgain[i])
            for (c = 0; c < k; c++) a->dgain[i][c0 + c] += sg[c];
        if (a->dshift[i])
            for (c = 0; c < k; c++) a->dshift[i][c0 + c] += ss[c];
    }
}
STX_EACH_ISA(stx__par_mix_columns_any, (const stx_par_mix_args *a, int i, size_t c0), a, i, c0)

static void stx__par_mix_columns_part(const stx_share *s, const void *job) {
    const stx_par_mix_args *a = (const stx_par_mix_args *)job;
    size_t k, blocks = (a->C + STX__PAR_BLOCK - 1) / STX__PAR_BLOCK;
    for (k = s->from; k < s->to; k++)
        STX_CALL(s->x, stx__par_mix_columns_any,
                 (a, (int)(k / blocks), k % blocks * STX__PAR_BLOCK));
}

STX_DEF void stx_par_mix_bwd(stx_ctx *x, const stx_par_mix_args *a) {
    STX__FP_SCOPE;
    size_t n, blocks = (a->C + STX__PAR_BLOCK - 1) / STX__PAR_BLOCK;
    double sum[3] = {0, 0, 0};
    int i;
    stx_parallel(x, a->N, 24 * a->N * a->C, stx__par_mix_back_part, a);
    if (a->gain[0] && (a->dgain[0] || a->dshift[0] || a->dgain[1] || a->dshift[1]))
        stx_parallel(x, 2 * blocks, 10 * a->N * a->C, stx__par_mix_columns_part, a);
    for (n = 0; a->dw && n < a->N; n++) {
        for (i = 0; i < 3; i++) sum[i] += a->work[3 * n + (size_t)i];
        if (n + 1 < a->N && stx__par_draw(a, n + 1) == stx__par_draw(a, n)) continue;
        for (i = 0; i < 3; i++) {
            a->dw[3 * stx__par_draw(a, n) + (size_t)i] += (stx_real)sum[i];
            sum[i] = 0;
        }
    }
}


// >>latency

STX_DEF void stx_par_latency_fwd(stx_ctx *x, stx_real *loss, const stx_real *nll,
                                 const stx_real *lat, const stx_par_latency_args *a) {
    STX__FP_SCOPE;
    double v = (double)lat[0], more = v / a->target - 1;
    (void)x;
    if (a->kind == STX_PAR_LATENCY_FBNET)
        v = (double)nll[0] * a->weight * (v > 1 ? pow(log(v), a->power) : v <= 1 ? 0 : v);
    else
        v = (double)nll[0] + a->weight * (a->kind == STX_PAR_LATENCY_ADD ? v : more < 0 ? 0 : more);
    *loss = (stx_real)v;
}

STX_DEF void stx_par_latency_bwd(stx_ctx *x, stx_real *dnll, stx_real *dlat, const stx_real *dloss,
                                 const stx_real *nll, const stx_real *lat,
                                 const stx_par_latency_args *a) {
    STX__FP_SCOPE;
    double v = (double)lat[0], d = (double)dloss[0], by_nll = 1, by_lat = a->weight;
    (void)x;
    if (a->kind == STX_PAR_LATENCY_HINGE) by_lat = v > a->target ? a->weight / a->target : 0;
    if (a->kind == STX_PAR_LATENCY_FBNET) {
        by_nll = v > 1 ? a->weight * pow(log(v), a->power) : 0;
        by_lat = v > 1 ? (double)nll[0] * a->weight * a->power * pow(log(v), a->power - 1) / v : 0;
    }
    if (dnll) dnll[0] += (stx_real)(d * by_nll);
    if (dlat) dlat[0] += (stx_real)(d * by_lat);
}


// >>ops

static void stx__par_mix_back(stx_ctx *x, stx_tensor *y, stx_tensor *const *in, void *save) {
    stx_par_mix_args *a = (stx_par_mix_args *)save;
    int fresh[3], i;
    a->dy = y->grad;
    a->dh = stx_grad(x, in[0], &fresh[0]);
    a->add_h = !fresh[0];
    for (i = 0; i < 2; i++) {
        a->db[i] = stx_grad(x, in[1 + i], &fresh[1 + i]);
        a->add[i] = !fresh[1 + i];
        a->dgain[i] = in[4] ? stx_grad(x, in[4 + 2 * i], NULL) : NULL;
        a->dshift[i] = in[4] ? stx_grad(x, in[5 + 2 * i], NULL) : NULL;
    }
    a->dw = stx_grad(x, in[3], NULL);
    a->work = (double *)stx_step_bytes(x, stx_bytes_of(a->N, 3, sizeof *a->work));
    if (a->work) STX_RUN(x, stx_par_mix_bwd, (x, a));
}

/* in: h, b0, b1 (B,T,D), w (draws,3), gain0, shift0, gain1, shift1 (D), or NULL four times. T, run: as in stx_par_mix_args */
static stx_tensor *stx__par_mix(stx_ctx *x, stx_tensor *const *in, size_t T, size_t run,
                                double eps) {
    stx_par_mix_args *a;
    stx_tensor *y;
    int i;
    if (!stx_ok(x) || !in[0] || !in[1] || !in[2] || !in[3]) return NULL;
    y = stx_new(x, in[0]->dim[0], in[0]->dim[1], in[0]->dim[2], 0);
    a = (stx_par_mix_args *)stx_step_alloc(x, sizeof *a);
    if (!y || !a) return NULL;
    memset(a, 0, sizeof *a);
    a->C = in[0]->dim[in[0]->ndim - 1];
    a->N = in[0]->size / a->C;
    a->T = T;
    a->run = run;
    a->eps = (stx_real)eps;
    a->h = in[0]->data;
    a->w = in[3]->data;
    a->y = y->data;
    for (i = 0; i < 2; i++) {
        a->b[i] = in[1 + i]->data;
        if (!in[4]) continue;
        a->gain[i] = in[4 + 2 * i]->data;
        a->shift[i] = in[5 + 2 * i]->data;
        a->mean[i] = (stx_real *)stx_step_bytes(x, stx_bytes_of(a->N, 2, sizeof *a->mean[i]));
        if (!a->mean[i]) return NULL;
        a->rstd[i] = a->mean[i] + a->N;
    }
    STX_RUN(x, stx_par_mix_fwd, (x, a));
    stx_record(x, y, in, 8, stx__par_mix_back, a);
    return y;
}

typedef struct stx__par_gate {
    stx_par_gate_args a;
    stx_tensor *w, *lat;
} stx__par_gate;

static void stx__par_gate_back(stx_ctx *x, stx_tensor *y, stx_tensor *const *in, void *save) {
    stx__par_gate *s = (stx__par_gate *)save;
    (void)y;
    s->a.dw = s->w->grad;
    s->a.dlat = s->lat ? s->lat->grad : NULL;
    s->a.dal = stx_grad(x, in[0], NULL);
    s->a.dbefore = s->lat ? stx_grad(x, in[1], NULL) : NULL;
    if (stx_ok(x)) STX_RUN(x, stx_par_gate_bwd, (x, &s->a));
}

/* w (R,3) of the parameters al (3). how: what stx_par_gate_args wants beside its tensors. lat: NULL, or where the latency of the blocks
   before is (NULL: none) and where it goes on */
static stx_tensor *stx__par_gate_op(stx_ctx *x, stx_tensor *al, const stx_par_gate_args *how,
                                    stx_tensor **lat) {
    stx__par_gate *s = (stx__par_gate *)stx_step_alloc(x, sizeof *s);
    stx_tensor *in[2], *made[2] = {NULL, NULL};
    if (!s || !al) return NULL;
    s->a = *how;
    in[0] = al;
    in[1] = lat ? *lat : NULL;
    s->w = made[0] = stx_new_full(x, how->R, 3, 0, 0);
    s->lat = NULL;
    if (lat) s->lat = made[1] = *lat = stx_new_full(x, 1, 0, 0, 0);
    s->a.y = how->hard ? (stx_real *)stx_step_bytes(x, stx_bytes_of(how->R, 3, sizeof *s->a.y))
             : s->w    ? s->w->data
                       : NULL;
    if (!stx_ok(x) || !s->a.y) return NULL;
    s->a.al = al->data;
    s->a.w = s->w->data;
    s->a.before = in[1] ? in[1]->data : NULL;
    s->a.lat = lat ? s->lat->data : NULL;
    STX_RUN(x, stx_par_gate_fwd, (x, &s->a));
    stx_record_results(x, made, lat ? 2 : 1, in, 2, stx__par_gate_back, s);
    return s->w;
}

static void stx__par_latency_back(stx_ctx *x, stx_tensor *y, stx_tensor *const *in, void *save) {
    stx_real *dnll = stx_grad(x, in[0], NULL), *dlat = stx_grad(x, in[1], NULL);
    if (stx_ok(x))
        STX_RUN(x, stx_par_latency_bwd,
                (x, dnll, dlat, y->grad, in[0]->data, in[1]->data,
                 (const stx_par_latency_args *)save));
}

static stx_tensor *stx__par_latency_op(stx_ctx *x, stx_tensor *nll, stx_tensor *lat,
                                       const stx_par_latency_args *how) {
    stx_par_latency_args *a = (stx_par_latency_args *)stx_step_alloc(x, sizeof *a);
    stx_tensor *y = stx_new_full(x, 1, 0, 0, 0), *in[2];
    if (!stx_ok(x) || !nll || !lat) return NULL;
    *a = *how;
    in[0] = nll;
    in[1] = lat;
    STX_RUN(x, stx_par_latency_fwd, (x, y->data, nll->data, lat->data, a));
    stx_record(x, y, in, 2, stx__par_latency_back, a);
    return y;
}


// >>patterns

enum { STX__PAR_MOST = 4096 };

/* Writes what p stands for up to a ')' or the end, from out[*n] on; returns where it stopped, NULL when it makes no sense */
static const char *stx__par_expand(char *out, size_t room, size_t *n, const char *p, int depth) {
    while (*p && *p != ')') {
        size_t from = *n, times = 1, unit, i;
        if (*p == '(') {
            p = depth < 8 ? stx__par_expand(out, room, n, p + 1, depth + 1) : NULL;
            if (!p || *p != ')' || *n == from) return NULL;
        } else if ((*p != 's' && *p != 'f' && *p != 'i') || *n + 1 >= room)
            return NULL;
        else
            out[(*n)++] = *p;
        p++;
        if (*p >= '0' && *p <= '9')
            for (times = 0; *p >= '0' && *p <= '9'; p++) {
                times = 10 * times + (size_t)(*p - '0');
                if (times > STX__PAR_MOST) return NULL;
            }
        unit = *n - from;
        if (!times || (times - 1) * unit >= room - *n) return NULL;
        for (i = (times - 1) * unit; i > 0; i--, (*n)++) out[*n] = out[*n - unit];
    }
    return p;
}

STX_DEF size_t stx_par_expand(char *out, size_t room, const char *pattern) {
    size_t n = 0;
    const char *end = pattern && out && room ? stx__par_expand(out, room, &n, pattern, 0) : NULL;
    if (!end || *end) n = 0;
    if (out && room) out[n] = 0;
    return n;
}

/* At each place the repetition that saves the most letters */
STX_DEF size_t stx_par_format(char *out, size_t room, const char *pattern) {
    size_t i = 0, n = 0, L = pattern ? strlen(pattern) : 0;
    char part[96];
    if (!out || !room) return 0;
    for (out[0] = 0; i < L && L <= STX__PAR_MOST;) {
        size_t unit, times, best = 1, often = 1, saved = 0, len;
        for (unit = 1; unit <= 64 && 2 * unit <= L - i; unit++) {
            for (times = 1; (times + 1) * unit <= L - i
                            && !memcmp(pattern + i, pattern + i + times * unit, unit);
                 times++) {
            }
            len = (size_t)snprintf(part, sizeof part, "%zu", times) + unit + (unit > 1 ? 2 : 0);
            if (times * unit > len && times * unit - len > saved) {
                best = unit;
                often = times;
                saved = times * unit - len;
            }
        }
        if (often > 1)
            len = (size_t)snprintf(part, sizeof part, best > 1 ? "(%.*s)%zu" : "%.*s%zu", (int)best,
                                   pattern + i, often);
        else
            len = (size_t)snprintf(part, sizeof part, "%c", pattern[i]);
        if (len >= room - n) {
            out[0] = 0;
            return 0;
        }
        memcpy(out + n, part, len + 1);
        n += len;
        i += best * often;
    }
    return n;
}

STX_DEF size_t stx_par_rule(char *out, size_t room, size_t L, size_t every) {
    size_t n = every ? L / every : 0, cut = L / 3 * 2 + L % 3 * 2 / 3;
    size_t width = n ? (cut + cut / n) / n : 0, i;
    if (!out || !room) return 0;
    out[0] = 0;
    if (!width || L > STX__PAR_MOST || L >= room) return 0;
    for (i = 0; i < L; i++) out[i] = i < n * width && i % width == 0 ? 's' : 'f';
    out[L] = 0;
    return L;
}

STX_DEF int stx_par_probs(const stx_par *m, double *p) {
    STX__FP_SCOPE;
    size_t l;
    double lnq[3], q[3];
    if (!m || !m->arch || !p || !stx_ok(m->ctx)) return 0;
    for (l = 0; l < m->desc.blocks; l++) {
        const stx_real *al = stx_watch(m->ctx, m->block[l].gate);
        if (!al) return 0;
        stx__par_q(m->desc.arch, al, lnq, q, p + 3 * l);
    }
    return 1;
}

/* The letter of block l: a fixed network's own; of a gate the likeliest, or with u in [0,1) one that is drawn. 0 in error */
static int stx__par_letter(const stx_par *m, size_t l, double u) {
    STX__FP_SCOPE;
    double lnq[3], q[3], p[3];
    const stx_real *al;
    int k, best = 0;
    if (!m->arch) return m->pattern[l];
    al = stx_watch(m->ctx, m->block[l].gate);
    if (!al) return 0;
    stx__par_q(m->desc.arch, al, lnq, q, p);
    for (k = 1; k < 3; k++)
        if (u < 0 ? p[k] > p[best] : u >= p[0] + (k > 1 ? p[1] : 0)) best = k;
    return "sfi"[best];
}

static size_t stx__par_choose(const stx_par *m, char *out, size_t room, int draw, uint64_t seed,
                              uint64_t n) {
    STX__FP_SCOPE;
    size_t l, L = m ? m->desc.blocks : 0;
    if (!out || !room) return 0;
    out[0] = 0;
    if (!L || L >= room || !stx_ok(m->ctx)) return 0;
    for (l = 0; l < L; l++) {
        uint32_t bits[4];
        stx_philox(seed, n, l, bits);
        out[l] = (char)stx__par_letter(m, l, draw ? ((double)bits[0] + 0.5) / 4294967296.0 : -1);
        if (!out[l]) {
            out[0] = 0;
            return 0;
        }
    }
    out[L] = 0;
    return L;
}

STX_DEF size_t stx_par_argmax(const stx_par *m, char *out, size_t room) {
    return stx__par_choose(m, out, room, 0, 0, 0);
}

STX_DEF size_t stx_par_sample(const stx_par *m, uint64_t seed, uint64_t n, char *out, size_t room) {
    return stx__par_choose(m, out, room, 1, seed, n);
}


// >>cuts

/* Costs of two kinds in one: whole numbers, which are exact, or times; the other one is 0 */
typedef struct stx__par_cost {
    uint64_t n;
    double t;
} stx__par_cost;

typedef struct stx__par_cutting {
    const stx_par_cuts_desc *d;
    const uint64_t *F; /* (N + 1) sums of counts */
    size_t N, k, h,
        D; /* the cluster that is added: number k = 1.., h wide; of REF h = 1 and D = 0 */
    const stx__par_cost *before; /* (N + 1): of the first j words in k clusters */
    stx__par_cost *cost;         /* ... in k + 1 */
    uint32_t *arg;               /* (N + 1): where the last of them begins */
} stx__par_cutting;

static size_t stx__par_tail_width(const stx_par_cuts_desc *d, size_t k) {
    size_t h = d->proj_dims && d->proj_dims[k - 1]
                   ? d->proj_dims[k - 1]
                   : (size_t)floor((double)d->dim / pow(d->factor, (double)k));
    return h ? h : 1;
}

/* before[i] and cluster k of the words i .. j-1; of cluster 0: i = 0 */
static stx__par_cost stx__par_cost_of(const stx__par_cutting *s, size_t i, size_t j) {
    const stx_par_cuts_desc *d = s->d;
    stx__par_cost c = {0, 0};
    if (s->before) c = s->before[i];
    if (d->cost == STX_PAR_CUTS_MACS && !s->before)
        c.n = (uint64_t)d->dim * (j + d->clusters - 1) * s->F[s->N];
    else if (d->cost != STX_PAR_CUTS_TIME)
        c.n += (uint64_t)s->h * (s->D + j - i) * (s->F[j] - s->F[i]);
    else if (!s->before)
        c.t = d->time(d->user, j + d->clusters - 1, d->dim, 1);
    else {
        double p = (double)(s->F[j] - s->F[i]) / (double)s->F[s->N];
        c.t += d->time(d->user, s->h, d->dim, p) + d->time(d->user, j - i, s->h, p);
    }
    return c;
}

/* For j in [j0,j1), whose best beginnings lie in [i0,i1] and do not fall as j rises: the middle one, then both sides */
static void stx__par_cut(const stx__par_cutting *s, size_t j0, size_t j1, size_t i0, size_t i1) {
    size_t j = j0 + (j1 - j0) / 2, i, best = SIZE_MAX;
    stx__par_cost least = {0, 0};
    if (j0 >= j1) return;
    i = STX_MAX(i0, s->k);
    if (s->d->cost
        != STX_PAR_CUTS_TIME) { /* stx__par_cost_of, in a loop that has nothing else in it */
        for (least.n = UINT64_MAX; i <= i1 && i < j; i++) {
            uint64_t n = s->before[i].n + (uint64_t)s->h * (s->D + j - i) * (s->F[j] - s->F[i]);
            if (n <= least.n) {
                least.n = n;
                best = i;
            }
        }
    }
    for (; i <= i1 && i < j; i++) {
        stx__par_cost c = stx__par_cost_of(s, i, j);
        if (best != SIZE_MAX && c.t > least.t) continue;
        least = c;
        best = i;
    }
    s->cost[j] = least;
    s->arg[j] = (uint32_t)best;
    stx__par_cut(s, j0, j, i0, best);
    stx__par_cut(s, j + 1, j1, best, i1);
}

static int stx__par_falling(const void *a, const void *b) {
    const uint64_t p = *(const uint64_t *)a, q = *(const uint64_t *)b;
    return p < q ? 1 : p > q ? -1 : 0;
}

static int stx__par_cuts_bad(stx_ctx *x, const char *field, double got, const char *expected) {
    return stx_bad_value(x, "stx_par_cuts", field, got, expected);
}

STX_DEF int stx_par_cuts(stx_ctx *x, size_t *cut, double *total, const uint64_t *counts, size_t N,
                         const stx_par_cuts_desc *desc) {
    STX__FP_SCOPE;
    stx__par_cutting s;
    stx_par_cuts_desc d;
    stx__par_cost *cost, last;
    uint64_t *F;
    size_t K, i, k, h = 0;
    if (!stx_ok(x)) return 0;
    if (!counts || !desc) {
        stx_fail(x, STX_ERR_ARG, "stx_par_cuts: no counts, or no desc");
        return 0;
    }
    d = *desc;
    K = d.clusters;
    if (d.factor == 0) d.factor = 4;
    if (!K || K > STX_MAX_CLUSTERS) return stx__par_cuts_bad(x, "clusters", (double)K, "1 to 8");
    if (K > 1 && !cut) return stx__par_cuts_bad(x, "cut", 0, "room for clusters - 1 numbers");
    if (N >= UINT32_MAX)
        return stx__par_cuts_bad(x, "the number of words", (double)N, "less than 2^32 - 1");
    if (N < K) {
        stx_fail(x, STX_ERR_ARG, "stx_par_cuts: %zu words cannot be cut in %zu clusters", N, K);
        return 0;
    }
    if (d.cost < 0 || d.cost > STX_PAR_CUTS_TIME)
        return stx__par_cuts_bad(x, "cost", d.cost, "one of STX_PAR_CUTS_REF .. _TIME");
    if (d.cost != STX_PAR_CUTS_REF && (!d.dim || d.dim > (size_t)1 << 29))
        return stx__par_cuts_bad(x, "dim", (double)d.dim, "1 to 2^29");
    if (!(d.factor >= 1 && d.factor < 1e6))
        return stx__par_cuts_bad(x, "factor", d.factor, "1 or more");
    if (d.cost == STX_PAR_CUTS_TIME && !d.time)
        return stx__par_cuts_bad(x, "time", 0, "a function for STX_PAR_CUTS_TIME");
    memset(&s, 0, sizeof s);
    F = (uint64_t *)stx_block(x, stx_bytes_of(N + 1, sizeof *F, 1));
    cost = (stx__par_cost *)stx_block(x, stx_bytes_of(N + 1, 2 * sizeof *cost, 1));
    s.arg = (uint32_t *)stx_block(x, stx_bytes_of(N + 1, K, sizeof *s.arg));
    if (stx_ok(x)) {
        memcpy(F + 1, counts, N * sizeof *F);
        if (d.sort) qsort(F + 1, N, sizeof *F, stx__par_falling);
        for (k = 1; k < K; k++)
            h = STX_MAX(h, d.cost == STX_PAR_CUTS_REF ? 1 : stx__par_tail_width(&d, k));
        for (i = 1; i <= N && F[i] <= INT64_MAX - F[i - 1]; i++) F[i] += F[i - 1];
        /* the most that sums may come to: (N) (sum), or ((D + h) (D + N + K)) (sum) */
        if (i <= N || !F[N]
            || (double)F[N]
                       * (d.cost == STX_PAR_CUTS_REF ? (double)N
                          : d.cost == STX_PAR_CUTS_TIME
                              ? 1
                              : (double)(d.dim + h) * (double)(d.dim + N + K))
                   >= 9.2e18)
            stx_fail(
                x, STX_ERR_ARG,
                i > N && !F[N]
                    ? "stx_par_cuts: counts of %zu words that are all 0: count a text"
                    : "stx_par_cuts: costs of counts of %zu words do not fit into 63 bits: divide the counts by a number",
                N);
    }
    if (stx_ok(x)) {
        uint32_t *arg = s.arg;
        s.d = &d;
        s.F = F;
        s.N = N;
        s.h = 1;
        if (d.cost != STX_PAR_CUTS_REF) s.D = d.dim;
        s.cost = cost;
        for (i = 1; i <= N; i++) cost[i] = stx__par_cost_of(&s, 0, i);
        for (k = 1; k < K; k++) {
            s.k = k;
            if (d.cost != STX_PAR_CUTS_REF) s.h = stx__par_tail_width(&d, k);
            s.before = s.cost;
            s.cost = cost + (k & 1) * (N + 1);
            s.arg = arg + k * (N + 1);
            stx__par_cut(&s, k + 1 == K ? N : k + 1, N + 1, k,
                         N); /* of the last one only all words matter */
        }
        last = s.cost[N];
        for (i = N, k = K - 1; k >= 1; k--) cut[k - 1] = i = arg[k * (N + 1) + i];
        if (total)
            *total = d.cost == STX_PAR_CUTS_TIME
                         ? last.t
                         : (double)last.n / (d.cost == STX_PAR_CUTS_MACS ? (double)F[N] : 1);
        s.arg = arg;
    }
    stx_block_free(x, F);
    stx_block_free(x, cost);
    stx_block_free(x, s.arg);
    return stx_ok(x);
}


// >>model: creation

static int stx__par_bad(stx_ctx *x, const char *field, double got, const char *expected) {
    return stx_bad_value(x, "stx_par_create", field, got, expected);
}

static int stx__par_upto(stx_ctx *x, const char *what, size_t got, size_t lo, int bits) {
    if (got >= lo && got <= (size_t)1 << bits) return 1;
    stx_fail(x, STX_ERR_ARG, "stx_par_create: %s: expected %zu to 2^%d, got %zu", what, lo, bits,
             got);
    return 0;
}

static int stx__par_among(stx_ctx *x, const char *what, int got, int last) {
    if (got >= 0 && got <= last) return 1;
    stx_fail(x, STX_ERR_ARG, "stx_par_create: %s: expected 0 to %d, got %d", what, last, got);
    return 0;
}

/* An option that only some models have */
static int stx__par_only(stx_ctx *x, const char *what, double got, int where, const char *want) {
    return got == 0 || where || stx__par_bad(x, what, got, want);
}

static int stx__par_number(stx_ctx *x, const char *what, double v, double lo, double below,
                           const char *want) {
    return (v >= lo && v < below) || stx__par_bad(x, what, v, want);
}

static int stx__par_ends_in_norm(const stx_par_desc *d) {
    return d->pre_norm && !d->no_final_norm;
}

static size_t stx__par_mem(const stx_par_desc *d) {
    return d->mem == STX_PAR_NO_ROWS ? 0 : d->mem;
}

static int stx__par_adaptive(const stx_par_desc *d) {
    return d->adaptive_in || d->words_out == STX_PAR_OUT_ADAPTIVE
           || d->words_out == STX_PAR_OUT_REF;
}

static int stx__par_projects(const stx_par_desc *d) {
    return d->div_val > 1 || d->emb != d->dim;
}

static stx_init stx__par_init(int kind, double a, int rule) {
    stx_init v;
    v.kind = kind;
    v.a = a;
    v.rule = rule;
    return v;
}

/* Embedding and output of a desc whose numbers are resolved */
static void stx__par_words(const stx_par_desc *d, stx_words_desc *w) {
    const int ref = d->words_out == STX_PAR_OUT_REF, xl = d->init == STX_PAR_INIT_XL;
    size_t i;
    memset(w, 0, sizeof *w);
    w->vocab = d->vocab;
    w->dim = w->emb = d->dim;
    w->in = d->adaptive_in ? STX_WORDS_ADAPTIVE : STX_WORDS_PLAIN;
    w->out = d->words_out == STX_PAR_OUT_PLAIN  ? STX_WORDS_PLAIN
             : d->words_out == STX_PAR_OUT_TIED ? STX_WORDS_TIED
                                                : STX_WORDS_ADAPTIVE;
    w->scale = d->emb_scale;
    w->cutoffs = d->cutoffs;
    w->no_cutoffs = !d->cutoffs;
    memcpy(w->cutoff, d->cutoff, sizeof w->cutoff);
    for (i = 0; i <= d->cutoffs; i++) {
        double tail = floor((double)d->dim / pow(d->proj_factor, (double)i));
        w->width[i] = (size_t)floor((double)d->emb / pow(d->div_val, (double)i));
        if (ref)
            w->out_width[i] = !i                    ? d->dim
                              : d->proj_dims[i - 1] ? d->proj_dims[i - 1]
                              : tail < 1            ? 1
                                                    : (size_t)tail;
    }
    if (!stx__par_projects(d)) w->no_projs = ref ? STX_WORDS_INPUT : STX_WORDS_BOTH;
    w->head_direct = ref ? STX_WORDS_OUTPUT : 0;
    w->proj_biases = w->forward_columns = ref;
    w->share_tables = d->tie_words;
    w->share_projs = d->tie_projs != STX_PAR_TIE_NONE;
    w->own_first = d->tie_projs == STX_PAR_TIE_BUT_FIRST;
    w->one_proj = d->one_proj;
    w->table = xl ? stx__par_init(STX_NORMAL, d->init_std, 0) : stx__par_init(STX_UNIFORM, 0.05, 0);
    w->out_table = w->cluster = xl ? w->table : stx__par_init(STX_UNIFORM, 1, STX_INIT_XAVIER);
    w->proj = xl ? stx__par_init(STX_NORMAL, d->proj_std, 0) : w->out_table;
}

static int stx__par_check_words(stx_ctx *x, stx_par_desc *d) {
    const int adaptive = stx__par_adaptive(d), ref = d->words_out == STX_PAR_OUT_REF;
    const int both = d->adaptive_in && d->words_out == STX_PAR_OUT_ADAPTIVE;
    stx_words_desc w;
    size_t i;
    if (!stx__par_among(x, "words_out", d->words_out, STX_PAR_OUT_REF)
        || !stx__par_among(x, "tie_projs", d->tie_projs, STX_PAR_TIE_BUT_FIRST)
        || !stx__par_upto(x, "emb", d->emb, 1, 29)
        || !stx__par_only(x, "emb", (double)d->emb,
                          d->emb == d->dim || d->adaptive_in
                              || d->words_out == STX_PAR_OUT_ADAPTIVE,
                          "dim without adaptive words")
        || !stx__par_only(x, "cutoffs", (double)d->cutoffs, adaptive, "0 without adaptive words")
        || !stx__par_number(x, "div_val", d->div_val, 1, 1e6, "1 or more")
        || !stx__par_number(x, "proj_factor", d->proj_factor, 1, 1e6, "1 or more")
        || !stx__par_only(x, "tie_words", d->tie_words, both,
                          "0 but for adaptive words on both sides")
        || !stx__par_only(x, "tie_projs", d->tie_projs, both && stx__par_projects(d),
                          "0 but for adaptive words with projections on both sides")
        || !stx__par_only(x, "one_proj", d->one_proj,
                          d->adaptive_in && d->div_val == 1 && d->emb != d->dim,
                          "0 but for an adaptive input with div_val 1 and an emb other than dim")
        || !stx__par_number(x, "emb_scale", d->emb_scale, -1e30, 1e30, "a number"))
        return 0;
    if (d->cutoffs > STX_MAX_CLUSTERS - 1)
        return stx__par_bad(x, "cutoffs", (double)d->cutoffs, "at most 7");
    if (floor((double)d->emb / pow(d->div_val, (double)d->cutoffs)) < 1)
        return stx__par_bad(x, "div_val", d->div_val,
                            "one that leaves the last cluster a width of 1");
    for (i = 0; i < STX_MAX_CLUSTERS - 1; i++)
        if (!stx__par_only(x, "a number of proj_dims", (double)d->proj_dims[i],
                           ref && i < d->cutoffs, "0 but for tails of STX_PAR_OUT_REF")
            || !stx__par_upto(x, "a number of proj_dims", d->proj_dims[i], 0, 29))
            return 0;
    if (!stx__par_only(x, "pads", d->pads, d->vocab > 0, "0 without vocab")
        || !stx__par_only(x, "pad_id", d->pad_id,
                          d->pads && d->pad_id > 0 && (size_t)d->pad_id < d->vocab,
                          "a word, with pads"))
        return 0;
    if (!d->vocab) return 1;
    stx__par_words(d, &w);
    return stx_words_resolve(x, "stx_par_create", &w, &w);
}

static int stx__par_check_search(stx_ctx *x, stx_par_desc *d) {
    int k, none = d->pi0[0] == 0 && d->pi0[1] == 0 && d->pi0[2] == 0;
    static const double first[3] = {0.33, 0.33, 0.34};
    if (!stx__par_among(x, "arch", d->arch, STX_PAR_PI)
        || !stx__par_among(x, "gate", d->gate, STX_PAR_ST)
        || !stx__par_among(x, "gate_eval", d->gate_eval, STX_PAR_EVAL_NOISE)
        || !stx__par_among(x, "noise", d->noise, STX_PAR_NOISE_TOKENS)
        || !stx__par_among(x, "latency", d->latency, STX_PAR_LATENCY_FBNET)
        || !stx__par_among(x, "latency_w", d->latency_w, STX_PAR_LATENCY_OF_W)
        || !stx__par_only(x, "noise_tokens", (double)d->noise_tokens,
                          d->noise == STX_PAR_NOISE_TOKENS, "0 but for STX_PAR_NOISE_TOKENS"))
        return 0;
    if (d->noise == STX_PAR_NOISE_TOKENS
        && !stx__par_upto(x, "noise_tokens", d->noise_tokens, 1, 31))
        return 0;
    for (k = 0; k < 3; k++) {
        if (none) d->pi0[k] = first[k];
        if (!(d->pi0[k] > (d->arch == STX_PAR_PI ? -1e30 : 0) && d->pi0[k] < 1e30))
            return stx__par_bad(x, "a number of pi0", d->pi0[k],
                                "a positive one, or a number for STX_PAR_PI");
    }
    if (d->tau == 0) d->tau = 1;
    if (!stx__par_number(x, "tau", d->tau, 1e-30, 1e30, "more than 0")) return 0;
    for (k = 0; k < 2; k++)
        if (!stx__par_number(x, "a number of cost", d->cost[k], 0, 1e30, "0 or more")) return 0;
    if (!stx__par_number(x, "latency_weight", d->latency_weight, -1e30, 1e30, "a number")
        || !stx__par_number(x, "latency_target", d->latency_target, 0, 1e30, "0 or more")
        || !stx__par_number(x, "latency_power", d->latency_power, -1e3, 1e3, "a number"))
        return 0;
    if (d->latency && d->cost[0] == 0 && d->cost[1] == 0)
        return stx__par_bad(x, "cost", 0, "the time of a branch, with latency");
    if (d->latency && d->latency_weight == 0)
        return stx__par_bad(x, "latency_weight", 0, "another number, with latency");
    if ((d->latency == STX_PAR_LATENCY_HINGE) != (d->latency_target > 0))
        return stx__par_bad(x, "latency_target", d->latency_target,
                            "more than 0 for STX_PAR_LATENCY_HINGE, 0 without");
    if (!stx__par_only(x, "latency_power", d->latency_power, d->latency == STX_PAR_LATENCY_FBNET,
                       "0 but for STX_PAR_LATENCY_FBNET"))
        return 0;
    if (d->latency == STX_PAR_LATENCY_FBNET && d->latency_power == 0) d->latency_power = 0.6;
    return 1;
}

STX_DEF void stx_par_reference(stx_par_desc *d) {
    if (!d) return;
    d->positions = STX_PAR_SINES;
    d->sines = STX_PAR_SINES_REF;
    d->pos_mode = STX_PAR_POS_REF;
    d->full_scale = d->attn_relu = d->biases = d->own_uv = 1;
    d->pre_norm = d->no_final_norm = d->one_proj = 0;
    d->norm_eps = 1e-3;
    d->arch = STX_PAR_PI;
    d->gate = STX_PAR_SOFT;
    d->gate_eval = STX_PAR_EVAL_NOISE;
    d->words_out = STX_PAR_OUT_REF;
    d->pads = d->divide_all = 1;
    d->pad_id = 0;
    d->init = STX_PAR_INIT_REF;
}

STX_DEF int stx_par_resolve(stx_ctx *x, const stx_par_desc *from, stx_par_desc *d) {
    STX__FP_SCOPE;
    char pattern[STX__PAR_MOST + 1];
    size_t L = 0;
    if (!from || !d) {
        stx_fail(x, STX_ERR_ARG, "stx_par_resolve: the desc is NULL");
        return 0;
    }
    *d = *from;
    if (d->pattern && !*d->pattern) d->pattern = NULL;
    if (d->pattern) {
        char q[STX_QUOTE];
        L = stx_par_expand(pattern, sizeof pattern, d->pattern);
        if (!L) {
            stx_fail(
                x, STX_ERR_ARG,
                "stx_par_create: pattern is \"%s\", want at most %d of the letters s, f, i, with groups and counts "
                "as in (sfff)6f8",
                stx_quote(q, d->pattern, strlen(d->pattern)), (int)STX__PAR_MOST);
            return 0;
        }
        if (d->blocks && d->blocks != L) {
            stx_fail(x, STX_ERR_ARG,
                     "stx_par_create: blocks: expected 0 or the pattern's %zu, got %zu", L,
                     d->blocks);
            return 0;
        }
    }
    if (!d->dim) d->dim = 512;
    if (!d->heads) d->heads = 8;
    if (!d->blocks) d->blocks = L ? L : 32;
    if (!d->segment) d->segment = 128;
    if (!d->mem) d->mem = d->segment;
    if (!d->emb) d->emb = d->dim;
    if (d->norm_eps == 0) d->norm_eps = 1e-5;
    if (d->div_val == 0) d->div_val = 1;
    if (d->proj_factor == 0) d->proj_factor = 4;
    if (d->emb_scale == 0) d->emb_scale = sqrt((double)d->dim);
    if (d->init_std == 0) d->init_std = 0.02;
    if (d->proj_std == 0) d->proj_std = 0.01;
    if (!stx__par_upto(x, "blocks", d->blocks, 1, 12) || !stx__par_upto(x, "dim", d->dim, 1, 29)
        || !stx__par_upto(x, "heads", d->heads, 1, 8)
        || !stx__par_upto(x, "segment", d->segment, 1, 30))
        return 0;
    if (d->mem != STX_PAR_NO_ROWS && !stx__par_upto(x, "mem", d->mem, 0, 30)) return 0;
    if (!d->head_dim && d->dim % d->heads) {
        stx_fail(
            x, STX_ERR_ARG,
            "stx_par_create: heads: expected a divisor of dim, or a head_dim, got %zu for dim %zu",
            d->heads, d->dim);
        return 0;
    }
    if (!d->head_dim) d->head_dim = d->dim / d->heads;
    if (!d->inner) d->inner = 4 * d->dim;
    if (!stx__par_upto(x, "head_dim", d->head_dim, 1, 20)
        || !stx__par_upto(x, "inner", d->inner, 1, 31)
        || !stx__par_among(x, "positions", d->positions, STX_PAR_LEARNED_BIAS)
        || !stx__par_among(x, "sines", d->sines, STX_PAR_SINES_REF)
        || !stx__par_among(x, "pos_mode", d->pos_mode, STX_PAR_POS_REF)
        || !stx__par_among(x, "init", d->init, STX_PAR_INIT_REF)
        || !stx__par_only(x, "sines", d->sines, !d->positions, "0 with learned positions")
        || !stx__par_only(x, "pos_mode", d->pos_mode, d->sines == STX_PAR_SINES_REF,
                          "0 but for STX_PAR_SINES_REF")
        || !stx__par_upto(x, "clamp_len", d->clamp_len, 0, 30)
        || !stx__par_only(x, "clamp_len", (double)d->clamp_len, d->pos_mode == STX_PAR_POS_DIST,
                          "0 but for STX_PAR_POS_DIST")
        || !stx__par_only(x, "same_length", d->same_length, stx__par_mem(d) > 1,
                          "0 without a memory of at least 2 rows")
        || !stx__par_only(x, "no_final_norm", d->no_final_norm, d->pre_norm, "0 without pre_norm")
        || !stx__par_number(x, "norm_eps", d->norm_eps, 1e-30, 1, "more than 0 and below 1")
        || !stx__par_number(x, "dropout", d->dropout, 0, 1, "0 <= p < 1")
        || !stx__par_number(x, "attn_dropout", d->attn_dropout, 0, 1, "0 <= p < 1")
        || !stx__par_number(x, "inner_dropout", d->inner_dropout, 0, 1, "0 <= p < 1")
        || !stx__par_number(x, "pos_dropout", d->pos_dropout, 0, 1, "0 <= p < 1")
        || !stx__par_number(x, "final_dropout", d->final_dropout, 0, 1, "0 <= p < 1")
        || !stx__par_only(x, "pos_dropout", d->pos_dropout, !d->positions,
                          "0 with learned positions")
        || !stx__par_number(x, "init_std", d->init_std, 0, 1e6, "0 or more")
        || !stx__par_number(x, "proj_std", d->proj_std, 0, 1e6, "0 or more"))
        return 0;
    if (d->positions == STX_PAR_SINES && d->sines == STX_PAR_SINES_BLOCK && d->dim % 2)
        return stx__par_bad(x, "dim", (double)d->dim, "an even one for STX_PAR_SINES_BLOCK");
    d->recompute_layers = d->recompute ? d->blocks : STX_MIN(d->recompute_layers, d->blocks);
    return stx__par_check_search(x, d) && stx__par_check_words(x, d);
}

/* The letters of a resolved desc's blocks; g: mixtures. In step or stack memory of at least blocks + 1 */
static void stx__par_kinds(const stx_par_desc *d, char *out) {
    if (!d->pattern)
        memset(out, 'g', d->blocks);
    else
        stx_par_expand(out, d->blocks + 1, d->pattern);
    out[d->blocks] = 0;
}

static int stx__par_attends(int kind) {
    return kind == 's' || kind == 'g';
}

static int stx__par_feeds(int kind) {
    return kind == 'f' || kind == 'g';
}

STX_DEF size_t stx_par_count(const stx_par_desc *desc) {
    STX__FP_SCOPE;
    char kind[STX__PAR_MOST + 1];
    stx_par_desc d;
    stx_words_desc words;
    size_t n = 0, l, attn, C, attentions = 0, rows, uv;
    if (!desc || !stx_par_resolve(NULL, desc, &d)) return 0;
    stx__par_kinds(&d, kind);
    C = d.heads * d.head_dim;
    rows = d.segment + stx__par_mem(&d);
    uv = d.positions == STX_PAR_LEARNED_BIAS ? 1 : 2;
    if (d.vocab) {
        stx__par_words(&d, &words);
        if (!stx_words_resolve(NULL, NULL, &words, &words)) return 0;
        n = stx_words_count(&words);
    }
    attn = stx_size_add(stx_size_add(2 * d.dim, 4 * d.dim, C), d.positions ? rows : d.dim, C);
    if (d.positions == STX_PAR_LEARNED_BIAS) attn = stx_size_add(attn, rows, d.heads);
    if (d.biases) attn = stx_size_add(attn + d.dim, d.positions ? 3 : 4, C);
    if (d.own_uv) attn = stx_size_add(attn, uv, C);
    for (l = 0; l < d.blocks; l++) {
        attentions += (size_t)stx__par_attends(kind[l]);
        if (stx__par_attends(kind[l])) n = stx_size_add(n, 1, attn);
        if (stx__par_feeds(kind[l]))
            n = stx_size_add(stx_size_add(n, d.inner, 2 * d.dim + 1), 3, d.dim);
    }
    if (attentions && !d.own_uv) n = stx_size_add(n, uv, C);
    return stx__par_ends_in_norm(&d) ? stx_size_add(n, 2, d.dim) : n;
}

static stx_tensor *stx__par_param(stx_par *m, size_t l, const char *name, int init, double a,
                                  size_t d0, size_t d1) {
    char full[96];
    snprintf(full, sizeof full, "layers.%zu.%s", l, name);
    return stx_param(m->params, init, a, full, d0, d1, 0, 0);
}

/* A matrix (d0,d1), whose product is a part of one with `outs` outputs */
static stx_tensor *stx__par_matrix(stx_par *m, size_t l, const char *name, size_t d0, size_t d1,
                                   size_t outs) {
    const int xl = m->desc.init == STX_PAR_INIT_XL;
    return stx__par_param(m, l, name, xl ? STX_NORMAL : STX_UNIFORM,
                          xl ? m->desc.init_std : sqrt(6 / (double)(outs + d1)), d0, d1);
}

static double stx__par_plus_one(void *user, size_t i, double was) {
    (void)user;
    (void)i;
    return 1 + was;
}

static void stx__par_norm(stx_par *m, const char *name, stx_tensor **gain, stx_tensor **shift) {
    const int xl = m->desc.init == STX_PAR_INIT_XL;
    char full[96];
    snprintf(full, sizeof full, "%s.weight", name);
    *gain = stx_param(m->params, xl ? STX_NORMAL : STX_CONSTANT, xl ? m->desc.init_std : 1, full,
                      m->desc.dim, 0, 0, 0);
    if (xl) stx_param_apply(m->ctx, *gain, stx__par_plus_one, NULL);
    snprintf(full, sizeof full, "%s.bias", name);
    *shift = stx_param(m->params, STX_ZEROS, 0, full, m->desc.dim, 0, 0, 0);
}

static void stx__par_uv(stx_par *m, const char *name, stx_tensor **u, stx_tensor **v) {
    const size_t H = m->desc.heads, dh = m->desc.head_dim;
    const int xl = m->desc.init == STX_PAR_INIT_XL;
    const double a = xl ? m->desc.init_std : sqrt(2 / (double)(H + H * dh)) / 0.87962566103423978;
    char full[96];
    snprintf(full, sizeof full, "%s.u", name);
    *u = stx_param(m->params, xl ? STX_NORMAL : STX_TRUNCATED, a, full, H, dh, 0, 0);
    if (m->desc.positions == STX_PAR_LEARNED_BIAS) return;
    snprintf(full, sizeof full, "%s.v", name);
    *v = stx_param(m->params, xl ? STX_NORMAL : STX_TRUNCATED, a, full, H, dh, 0, 0);
}

static void stx__par_block_params(stx_par *m, size_t l) {
    const stx_par_desc *d = &m->desc;
    stx_par_block *y = &m->block[l];
    const size_t D = d->dim, C = d->heads * d->head_dim, F = d->inner;
    char full[96];
    if (stx__par_attends(y->kind)) {
        snprintf(full, sizeof full, "layers.%zu.attn.norm", l);
        stx__par_norm(m, full, &y->attn_gain, &y->attn_shift);
        if (!stx_params_beside(m->params, 3 * C * D))
            return; /* queries, keys and values are one product */
        y->wq = stx__par_matrix(m, l, "attn.query.weight", C, D, 3 * C);
        y->wkv = stx__par_matrix(m, l, "attn.kv.weight", 2 * C, D, 3 * C);
        if (!d->positions)
            y->wr = stx__par_matrix(m, l, "attn.pos.weight", C, D, C);
        else
            y->rel = stx__par_matrix(m, l, "attn.rel.weight", d->segment + stx__par_mem(d), C, C);
        if (d->positions == STX_PAR_LEARNED_BIAS)
            y->rel_bias = stx__par_param(m, l, "attn.r_bias", STX_ZEROS, 0,
                                         d->segment + stx__par_mem(d), d->heads);
        y->wo = stx__par_matrix(m, l, "attn.out.weight", D, C, D);
        if (d->biases) {
            if (!stx_params_beside(m->params, 3 * C)) return;
            y->bq = stx__par_param(m, l, "attn.query.bias", STX_ZEROS, 0, C, 0);
            y->bkv = stx__par_param(m, l, "attn.kv.bias", STX_ZEROS, 0, 2 * C, 0);
            if (y->wr) y->br = stx__par_param(m, l, "attn.pos.bias", STX_ZEROS, 0, C, 0);
            y->bo = stx__par_param(m, l, "attn.out.bias", STX_ZEROS, 0, D, 0);
        }
        if (d->own_uv) {
            snprintf(full, sizeof full, "layers.%zu.attn", l);
            stx__par_uv(m, full, &y->u, &y->v);
        } else {
            if (!m->u) stx__par_uv(m, "attn", &m->u, &m->v);
            y->u = m->u;
            y->v = m->v;
        }
    }
    if (stx__par_feeds(y->kind)) {
        snprintf(full, sizeof full, "layers.%zu.ff.norm", l);
        stx__par_norm(m, full, &y->ff_gain, &y->ff_shift);
        y->w1 = stx__par_matrix(m, l, "ff.fc1.weight", F, D, F);
        y->b1 = stx__par_param(m, l, "ff.fc1.bias", STX_ZEROS, 0, F, 0);
        y->w2 = stx__par_matrix(m, l, "ff.fc2.weight", D, F, D);
        y->b2 = stx__par_param(m, l, "ff.fc2.bias", STX_ZEROS, 0, D, 0);
    }
}

/* The head of STX_PAR_OUT_REF is one matrix (c_0 + J,D) in Glorot's sense */
static void stx__par_head(stx_par *m) {
    const stx_adaptive *a = &m->words->out;
    double c0 = (double)a->end[0], J = (double)a->clusters - 1, D = (double)m->desc.dim;
    if (m->desc.init != STX_PAR_INIT_REF || !a->cluster_w) return;
    stx_param_scale(m->ctx, a->table[0], 0, a->table[0]->dim[0], sqrt((c0 + D) / (c0 + J + D)));
    stx_param_scale(m->ctx, a->cluster_w, 0, a->cluster_w->dim[0], sqrt((J + D) / (c0 + J + D)));
}

static void stx__par_gates(stx_par *m) {
    const stx_par_desc *d = &m->desc;
    stx_real first[3];
    char name[32];
    size_t l;
    int k;
    for (k = 0; k < 3; k++)
        first[k] = (stx_real)(d->arch == STX_PAR_PI ? d->pi0[k] : log(d->pi0[k]));
    m->arch = stx_params_create(m->ctx);
    for (l = 0; l < d->blocks && stx_ok(m->ctx); l++) {
        snprintf(name, sizeof name, "arch.%zu", l);
        m->block[l].gate = stx_param(m->arch, STX_ZEROS, 0, name, 3, 0, 0, 0);
        stx_set(m->ctx, m->block[l].gate, first);
    }
    m->tau = stx_scalar_create(m->ctx, d->tau);
    m->cost = stx_block_full(m->ctx, 3);
    stx_par_set_cost(m, d->cost);
}

STX_DEF stx_par *stx_par_create(stx_ctx *x, const stx_par_desc *desc) {
    STX__FP_SCOPE;
    stx_par *m;
    stx_par_desc *d;
    stx_words_desc words;
    char *kind;
    size_t l;
    if (!stx_ok(x)) return NULL;
    if (!desc) {
        stx_fail(x, STX_ERR_ARG, "stx_par_create: no desc; at least one of all zeros is needed");
        return NULL;
    }
    m = (stx_par *)stx_persist(x, sizeof *m);
    if (!m || !stx_par_resolve(x, desc, &m->desc)) return NULL;
    d = &m->desc;
    m->ctx = x;
    m->params = stx_params_create(x);
    m->block = (stx_par_block *)stx_persist(x, stx_bytes_of(d->blocks, sizeof *m->block, 1));
    m->w = (stx_tensor **)stx_persist(x, stx_bytes_of(d->blocks, sizeof *m->w, 1));
    kind = (char *)stx_persist(x, d->blocks + 1);
    if (!m->params || !m->block || !m->w || !kind) return NULL;
    stx__par_kinds(d, kind);
    if (d->pattern) m->pattern = kind;
    d->pattern = NULL;
    if (d->vocab) {
        stx__par_words(d, &words);
        m->words = stx_words_create(m->params, &words);
        if (m->words) stx__par_head(m);
    }
    for (l = 0; l < d->blocks && stx_ok(x); l++) {
        m->block[l].kind = kind[l];
        stx__par_block_params(m, l);
    }
    if (stx__par_ends_in_norm(d)) stx__par_norm(m, "final_norm", &m->final_gain, &m->final_shift);
    if (!m->pattern && stx_ok(x)) stx__par_gates(m);
    return stx_ok(x) ? m : NULL;
}

STX_DEF stx_params *stx_par_params(stx_par *m) {
    return m ? m->params : NULL;
}

STX_DEF int stx_par_inherit(stx_par *to, const stx_par *from) {
    size_t i, k;
    if (!to || !from || !stx_ok(to->ctx) || !stx_ok(from->ctx)) return 0;
    for (k = 0; k < 2; k++) /* first whether all is there */
        for (i = 0; i < to->params->count; i++) {
            stx_tensor *t = to->params->tensor[i],
                       *f = stx_params_find(from->params, to->params->name[i]);
            stx_real *v;
            if (!f || f->size != t->size || f->dim[0] != t->dim[0]) {
                stx_fail(
                    to->ctx, STX_ERR_SHAPE,
                    "stx_par_inherit: %s is %s: want a network with all branches of this one, and its sizes",
                    to->params->name[i], f ? "of another shape there" : "not there");
                return 0;
            }
            if (!k) continue;
            v = (stx_real *)stx_block(to->ctx, stx_bytes_of(t->size, sizeof *v, 1));
            if (!v) return 0;
            stx_get(from->ctx, f, v);
            stx_set(to->ctx, t, v);
            stx_block_free(to->ctx, v);
        }
    return stx_ok(to->ctx) && stx_ok(from->ctx);
}


// >>search

STX_DEF void stx_par_set_tau(stx_par *m, double tau) {
    STX__FP_SCOPE;
    if (!m || !m->tau || !stx_ok(m->ctx)) return;
    if (!(tau >= 1e-30 && tau <= 1e30)) {
        stx_fail(m->ctx, STX_ERR_ARG, "stx_par_set_tau: tau: expected 1e-30 to 1e30, got %g", tau);
        return;
    }
    stx_scalar_set(m->ctx, m->tau, tau);
}

STX_DEF void stx_par_set_cost(stx_par *m, const double *cost) {
    STX__FP_SCOPE;
    stx_real c[3] = {0, 0, 0};
    int k;
    if (!m || !m->cost || !cost || !stx_ok(m->ctx)) return;
    for (k = 0; k < 2; k++) {
        if (!(cost[k] >= 0 && cost[k] < 1e30)) {
            stx_fail(m->ctx, STX_ERR_ARG, "stx_par_set_cost: a cost: expected 0 or more, got %g",
                     cost[k]);
            return;
        }
        c[k] = (stx_real)(m->desc.cost[k] = cost[k]);
    }
    stx_put(m->ctx, m->cost, c, 3);
}

STX_DEF double stx_par_tau(const stx_par_anneal *a, uint64_t n) {
    STX__FP_SCOPE;
    double part = 1;
    if (!a) return part;
    if (a->total && n < a->total) part = (double)n / (double)a->total;
    part = a->from * pow(a->form == STX_PAR_TAU_FACTOR ? a->to : a->to / a->from, part);
    STX__FP_PIN(part);
    return part;
}

STX_DEF void stx_par_freeze(stx_par *m, int frozen) {
    if (m) m->frozen = frozen != 0;
}

STX_DEF void stx_par_set_uniforms(stx_par *m, const stx_real *u, size_t count) {
    STX__FP_SCOPE;
    size_t draw = m ? 3 * m->desc.blocks : 0, i;
    if (!m) return;
    if (!u) m->uniforms_count = 0;
    if (!m->arch || !u || !stx_ok(m->ctx)) return;
    if (!count || count % draw || (m->desc.noise == STX_PAR_NOISE_STEP && count != draw)) {
        stx_fail(
            m->ctx, STX_ERR_ARG,
            "stx_par_set_uniforms: expected %zu values, 3 for each of "
            "%zu blocks, for %s draw of a call, got %zu: count is the number of values, not of "
            "draws; u = NULL ends their use",
            draw, m->desc.blocks, m->desc.noise == STX_PAR_NOISE_STEP ? "the one" : "each", count);
        return;
    }
    for (i = 0; i < count && u[i] > 0 && u[i] < 1; i++) {
    }
    if (i < count) {
        stx_fail(m->ctx, STX_ERR_ARG,
                 "stx_par_set_uniforms: u[%zu] is %.9g, expected a value "
                 "above 0 and below 1 (a double that is nearly 1 rounds to 1 in float)",
                 i, (double)u[i]);
        return;
    }
    if (count > m->uniforms_room) {
        stx_real *larger = stx_block_full(m->ctx, count);
        if (!larger) return;
        stx_block_free(m->ctx, m->uniforms);
        m->uniforms = larger;
        m->uniforms_room = count;
    }
    stx_put(m->ctx, m->uniforms, u, count);
    m->uniforms_count = count;
}

STX_DEF size_t stx_par_draws(const stx_par *m, size_t B, size_t T) {
    if (!m || !m->arch) return 0;
    return m->desc.noise == STX_PAR_NOISE_STEP ? 1
           : m->desc.noise == STX_PAR_NOISE_SEQUENCE
               ? B
               : B * ((T + m->desc.noise_tokens - 1) / m->desc.noise_tokens);
}


// >>memory

STX_DEF stx_par_state *stx_par_state_create_sized(stx_par *m, size_t B, size_t M) {
    stx_ctx *x = m ? m->ctx : NULL;
    stx_par_state *s;
    stx_rows_desc d;
    size_t *width, l;
    if (!stx_ok(x)) return NULL;
    if (!B || M > (size_t)1 << 30) {
        stx_fail(
            x, STX_ERR_ARG,
            "stx_par_state_create: %zu streams of %zu rows, want at least one stream and at most 2^30 rows",
            B, M);
        return NULL;
    }
    s = (stx_par_state *)stx_block(x, sizeof *s);
    if (!s) return NULL;
    s->model = m;
    width = (size_t *)stx_block(x, stx_bytes_of(m->desc.blocks, sizeof *width, 1));
    if (width) {
        s->B = B;
        s->M = M;
        s->clamp_len = m->desc.clamp_len;
        s->same_length = m->desc.same_length;
        memset(&d, 0, sizeof d);
        d.layers = m->desc.blocks;
        d.B = B;
        d.most = M + !M;
        d.widths = width;
        for (l = 0; l < m->desc.blocks; l++)
            width[l] = M && stx__par_attends(m->block[l].kind) ? m->desc.dim : 0;
        s->mem = stx_rows_create(x, &d);
    }
    stx_block_free(x, width);
    if (stx_ok(x)) return s;
    stx_par_state_free(s);
    return NULL;
}

STX_DEF stx_par_state *stx_par_state_create(stx_par *m, size_t B) {
    return m ? stx_par_state_create_sized(m, B, stx__par_mem(&m->desc)) : NULL;
}

STX_DEF void stx_par_state_free(stx_par_state *s) {
    if (!s) return;
    stx_rows_free(s->mem);
    stx_block_free(s->model->ctx, s);
}

STX_DEF void stx_par_state_reset(stx_par_state *s) {
    if (!s || !stx_ok(s->model->ctx)) return;
    stx_rows_reset(s->mem);
    s->calls = 0;
}

STX_DEF void stx_par_state_reset_stream(stx_par_state *s, size_t b) {
    if (s) stx_rows_reset_stream(s->mem, b);
}

STX_DEF int stx_par_state_copy(stx_par_state *to, size_t b, const stx_par_state *from, size_t c,
                               size_t n) {
    if (!to || !stx_ok(to->model->ctx)) return 0;
    if (!from || from->model != to->model || from->M != to->M) {
        stx_fail(
            to->model->ctx, STX_ERR_ARG,
            "stx_par_state_copy: from is NULL, of another model, or has another number of rows");
        return 0;
    }
    if (!stx_rows_copy(to->mem, b, from->mem, c, n)) return 0;
    to->calls = n == to->B ? from->calls : STX_MAX(to->calls, from->calls);
    return 1;
}

STX_DEF int stx_par_state_get(const stx_par_state *s, size_t l, stx_real *out) {
    return s && stx_rows_get(s->mem, l, out);
}

STX_DEF int stx_par_state_set(stx_par_state *s, size_t l, const stx_real *in, size_t n) {
    if (!s || !stx_ok(s->model->ctx)) return 0;
    if (l >= s->model->desc.blocks || n > s->M || (n && !s->mem->layer[l].width)) {
        stx_fail(
            s->model->ctx, STX_ERR_ARG,
            "stx_par_state_set: block %zu with %zu rows, want a block with an attention, and at most "
            "%zu",
            l, n, s->M);
        return 0;
    }
    return stx_rows_set(s->mem, l, n, in, n);
}

STX_DEF int stx_par_state_save(stx_writer *w, const stx_par_state *s, const char *prefix) {
    char full[96];
    if (!s || !prefix || !stx_ok(s->model->ctx)) return 0;
    if (strlen(prefix) > 64) {
        stx_fail(s->model->ctx, STX_ERR_ARG,
                 "stx_par_state_save: a prefix of %zu letters, want at most 64", strlen(prefix));
        return 0;
    }
    snprintf(full, sizeof full, "%smem.", prefix);
    if (!stx_rows_save(w, s->mem, full)) return 0;
    snprintf(full, sizeof full, "%scalls", prefix);
    return stx_writer_meta_u64(w, full, s->calls);
}

STX_DEF int stx_par_state_load(stx_par_state *s, const stx_file *f, const char *prefix) {
    stx_ctx *x = s ? s->model->ctx : NULL;
    char full[96];
    uint64_t calls = 0;
    size_t l;
    if (!stx_ok(x) || !f || !prefix) return 0;
    stx_par_state_reset(s);
    snprintf(full, sizeof full, "%.64scalls", prefix);
    if (!stx_file_meta_u64(x, f, full, &calls)) return 0;
    snprintf(full, sizeof full, "%.64smem.", prefix);
    if (!stx_rows_load(s->mem, f, full)) return 0;
    for (l = 0; l < s->model->desc.blocks; l++)
        if (s->mem->layer[l].real > s->M) {
            stx_fail(
                x, STX_ERR_FORMAT,
                "memory \"%s\" of block %zu has %zu rows, want at most %zu: give the size that the file was made "
                "with",
                prefix, l, s->mem->layer[l].real, s->M);
            for (l = 0; l < s->model->desc.blocks; l++)
                s->mem->layer[l].real = s->mem->layer[l].rows = 0;
            return 0;
        }
    s->calls = calls;
    return 1;
}


// >>bias of distances

/* STX_PAR_LEARNED_BIAS. The attention kernels have no bias of a distance. Wider heads, of
   dh' > dh columns, express it. Beyond dh there is 1 in queries, keys and values, -1 in
   u, and in r'_d first b_d, then zeros:

       (q' + u').k' = (q + u).k + (1 - 1) 1        q'.r'_d = q.r_d + b_d        y' = [y, 1 ..]

   Wo does not read the columns that y' has beyond y. dh' is a multiple of 8, as a GPU's
   fused kernels need it; without the bias dh' = dh. In a segment the weights are widened
   (rows of zeros, with a bias of 1), which have fewer elements than the activations; in
   generation the activations are. */
static size_t stx__par_wide(const stx_par_desc *d) {
    return d->positions == STX_PAR_LEARNED_BIAS ? (d->head_dim + 8) / 8 * 8 : d->head_dim;
}

typedef struct stx__par_widening {
    size_t w, ld, rows[2];
} stx__par_widening;

static void stx__par_widen_back(stx_ctx *x, stx_tensor *y, stx_tensor *const *in, void *save) {
    const stx__par_widening *s = (const stx__par_widening *)save;
    size_t at = 0;
    int i, fresh;
    for (i = 0; i < 2; at += s->rows[i++] * s->ld) {
        stx_real *da = stx_grad(x, in[i], &fresh), *dy = da ? stx_at(x, y->grad, at) : NULL;
        if (da) STX_RUN(x, stx_copy2d, (x, da, s->w, dy, s->ld, s->rows[i], s->w, !fresh));
    }
}

/* The rows of a, of w elements each, and after them those of b (NULL: none), filled up
   with `fill` -> (rows,ld). full: float in every precision */
static stx_tensor *stx__par_widen(stx_ctx *x, stx_tensor *a, stx_tensor *b, size_t w, size_t ld,
                                  double fill, int full) {
    STX__FP_SCOPE;
    stx__par_widening *s = (stx__par_widening *)stx_step_alloc(x, sizeof *s);
    stx_tensor *in[2], *y;
    size_t at = 0, rows;
    int i;
    if (!s || !a) return NULL;
    in[0] = a;
    in[1] = b;
    s->w = w;
    s->ld = ld;
    for (i = 0; i < 2; i++) s->rows[i] = in[i] ? in[i]->size / w : 0;
    rows = s->rows[0] + s->rows[1];
    y = full ? stx_new_full(x, rows, ld, 0, 0) : stx_new(x, rows, ld, 0, 0);
    if (!y) return NULL;
    STX_RUN(x, stx_fill, (x, y->data, y->size, (stx_real)fill));
    for (i = 0; i < 2; at += s->rows[i++] * ld) {
        stx_real *to = stx_at(x, y->data, at);
        if (in[i]) STX_RUN(x, stx_copy2d, (x, to, ld, in[i]->data, w, s->rows[i], w, 0));
    }
    stx_record(x, y, in, 2, stx__par_widen_back, s);
    return y;
}

/* Heads of activations (B,t,n dh) -> (B,t,n dh'), and back */
static stx_tensor *stx__par_widen_heads(stx_ctx *x, const stx_par_desc *d, stx_tensor *t) {
    size_t wide = stx__par_wide(d);
    stx_tensor *y = stx__par_widen(x, t, NULL, d->head_dim, wide, 1, 0);
    return y ? stx_reshape(x, y, t->dim[0], t->dim[1], t->dim[2] / d->head_dim * wide, 0) : NULL;
}

static stx_tensor *stx__par_narrow_heads(stx_ctx *x, const stx_par_desc *d, stx_tensor *t) {
    size_t wide = stx__par_wide(d);
    stx_tensor *y;
    if (!t) return NULL;
    y = stx_reshape(x, t, t->size / wide, wide, 0, 0);
    y = stx_slice_channels(x, y, 0, d->head_dim);
    return stx_reshape(x, y, t->dim[0], t->dim[1], d->heads * d->head_dim, 0);
}

/* r (P,H dh) and b (P,H) -> r' (P,H dh') */
static stx_tensor *stx__par_biased(stx_ctx *x, const stx_par_desc *d, stx_tensor *r,
                                   stx_tensor *b) {
    size_t P = r->dim[0], H = d->heads, wide = stx__par_wide(d);
    stx_tensor *t;
    r = stx_reshape(x, r, P * H, d->head_dim, 0, 0);
    b = stx_reshape(x, b, P * H, 1, 0, 0);
    t = stx__par_widen(x, stx_concat_channels(x, r, b), NULL, d->head_dim + 1, wide, 0, 1);
    return t ? stx_reshape(x, t, P, H * wide, 0, 0) : NULL;
}

/* An attention's weights with wide heads. w[0], b[0]: of q, k and v together; w[1], b[1]:
   their part for k and v; wo. 0 in error */
static int stx__par_widen_weights(stx_ctx *x, const stx_par_desc *d, const stx_par_block *p,
                                  stx_tensor **w, stx_tensor **b, stx_tensor **wo) {
    const size_t H = d->heads, D = d->dim, dh = d->head_dim, wide = stx__par_wide(d), C = H * wide;
    stx_tensor *bq = p->bq;
    if (!bq) {
        bq = stx_new_full(x, 3 * H * dh, 0, 0, 0);
        if (bq) STX_RUN(x, stx_fill, (x, bq->data, bq->size, 0));
    }
    w[0] = stx__par_widen(x, p->wq, p->wkv, dh * D, wide * D, 0, 1);
    b[0] = stx__par_widen(x, bq, p->bkv, dh, wide, 1, 1);
    *wo = stx__par_widen(x, p->wo, NULL, dh, wide, 0, 1);
    if (!w[0] || !b[0] || !*wo) return 0;
    w[0] = stx_reshape(x, w[0], 3 * C, D, 0, 0);
    b[0] = stx_reshape(x, b[0], 3 * C, 1, 0, 0);
    *wo = stx_reshape(x, *wo, D, C, 0, 0);
    w[1] = stx_view_rows(x, w[0], C, 3 * C);
    b[1] = stx_view_rows(x, b[0], C, 3 * C);
    return stx_ok(x);
}


// >>positions

/* Number c of row p of the reference's table: the features of the usual interleaved one from behind */
static double stx__par_sine_ref(size_t D, size_t c, double p) {
    size_t f = D - 1 - c;
    double a = p * pow(1e-4, 2 * (double)(f / 2) / (double)D);
    return f % 2 ? sin(a) : cos(a);
}

static double stx__par_sine(size_t D, size_t c, double p) {
    double a = p * pow(10000, -2 * (double)(c % (D / 2)) / (double)D);
    return c < D / 2 ? sin(a) : cos(a);
}

/* Positions with room for n distances, for this clamp_len */
static const stx_par_positions *stx__par_reach(stx_par *m, size_t clamp, size_t n) {
    stx_ctx *x = m->ctx;
    const stx_par_desc *d = &m->desc;
    stx_par_positions *p = &m->pos[clamp != d->clamp_len], now;
    size_t i, c, D = d->dim, table = d->segment + stx__par_mem(d);
    if (p->rows >= n && p->clamp == clamp) return p;
    memset(&now, 0, sizeof now);
    now.rows = p->clamp == clamp && p->rows ? STX_MAX(n, p->rows + p->rows / 2) : STX_MAX(n, table);
    now.clamp = clamp;
    if (d->positions) {
        int32_t *idx = (int32_t *)stx_block(x, stx_bytes_of(now.rows, sizeof *idx, 1));
        for (i = 0; idx && i < now.rows; i++) {
            size_t far_ = now.rows - 1 - i;
            if (clamp) far_ = STX_MIN(far_, clamp);
            idx[i] = (int32_t)STX_MIN(far_, table - 1);
        }
        now.far_first = idx ? stx_tokens_create(x, 1, now.rows) : NULL;
        if (now.far_first) stx_tokens_set(x, now.far_first, idx);
        stx_block_free(x, idx);
    } else {
        stx_real *v = (stx_real *)stx_block(x, stx_bytes_of(now.rows, D, sizeof *v));
        for (i = 0; v && i < now.rows; i++) {
            size_t far_ = now.rows - 1 - i;
            double row = d->pos_mode == STX_PAR_POS_REF ? (double)i
                         : d->pos_mode == STX_PAR_POS_FIXED
                             ? (double)table - 1 - (double)far_
                             : (double)(clamp ? STX_MIN(far_, clamp) : far_);
            for (c = 0; c < D; c++)
                v[i * D + c] = (stx_real)(d->sines == STX_PAR_SINES_REF
                                              ? stx__par_sine_ref(D, c, row)
                                              : stx__par_sine(D, c, row));
        }
        if (v) now.sines = stx_constant_create(x, v, now.rows, D, 0, 0);
        stx_block_free(x, v);
    }
    if (!stx_ok(x)) return NULL;
    *p = now;
    return p;
}

/* The last K rows of a table whose last row is distance 0; of the reference's the first K */
static stx_tensor *stx__par_last(stx_par *m, stx_tensor *t, size_t K) {
    if (!t) return NULL;
    return m->desc.pos_mode == STX_PAR_POS_REF ? stx_view_rows(m->ctx, t, 0, K)
                                               : stx_view_rows(m->ctx, t, t->dim[0] - K, t->dim[0]);
}

/* What the queries of block l meet at K distances (K,H dh'), the last one 0. sines: of
   this call, or NULL */
static stx_tensor *stx__par_meets(stx_ctx *x, stx_par *m, size_t l, const stx_par_positions *p,
                                  stx_tensor *sines, size_t K) {
    const stx_par_block *y = &m->block[l];
    stx_tensor *t = y->rel;
    if (y->wr)
        return stx_linear(x, sines ? sines : stx__par_last(m, p->sines, K), y->wr, y->br,
                          STX_ACT_NONE);
    if (y->rel_bias) t = stx__par_biased(x, &m->desc, t, y->rel_bias);
    t = stx_embedding(x, t, p->far_first);
    return t ? stx__par_last(m, stx_reshape(x, t, t->dim[1], t->dim[2], 0, 0), K) : NULL;
}


// >>block

/* All that a block is told in a call */
typedef struct stx__par_job {
    stx_par *m;
    size_t l, n, span, T,
        run; /* rows of memory; the largest distance seen, 0: any; which rows share a gate: stx_par_mix_args */
    int kind, past, w; /* what it runs; which inputs the memory and the gate are, 0: none */
    stx_past view;     /* with pre_norm the memory is an input; else it is read where it stands */
    const stx_par_positions *pos;
    stx_tensor *sines;   /* (n + T,D), after dropout; NULL: none, or from pos */
    const stx_ids *mask; /* (B,n + T) keys that are missing */
    stx_tensor *shown;   /* (B,T,H dh): 0 at padding, else 1; NULL: no padding */
    stx_par_gen *gen;    /* keys and values of memory are kept there */
} stx__par_job;

/* Attention's output after Wo, of the queries of h (B,T,D); past (B,n,D) with pre_norm, or NULL. late: the sum that follows will
   add the bias */
static stx_tensor *stx__par_attention(stx_ctx *x, const stx__par_job *j, stx_tensor *h,
                                      stx_tensor *past, int late) {
    const stx_par_desc *d = &j->m->desc;
    const stx_par_block *p = &j->m->block[j->l];
    stx_attention_in a;
    stx_attention_desc ad;
    stx_tensor *y, *w[2], *b[2], *wo = p->wo;
    const size_t wide = stx__par_wide(d);
    if (!h) return NULL;
    memset(&a, 0, sizeof a);
    memset(&ad, 0, sizeof ad);
    w[0] = p->wq;
    w[1] = p->wkv;
    b[0] = p->bq;
    b[1] = p->bkv;
    if (!p->rel_bias)
        a.qkv = stx_linear_many(x, h, w, b, 2);
    else if (j->gen)
        a.qkv = stx__par_widen_heads(x, d, stx_linear_many(x, h, w, b, 2));
    else {
        if (!stx__par_widen_weights(x, d, p, w, b, &wo)) return NULL;
        a.qkv = stx_linear(x, h, w[0], b[0], STX_ACT_NONE);
    }
    if (past) {
        past = stx_layernorm(x, past, p->attn_gain, p->attn_shift, d->norm_eps);
        a.past[0] = stx_linear(x, past, w[1], b[1], STX_ACT_NONE);
    } else
        a.past[0] = stx_linear_past(x, &j->view, 1, h->dim[0], w + 1, b + 1, 1);
    a.u = p->u;
    if (p->rel_bias) a.u = stx__par_widen(x, p->u, NULL, d->head_dim, wide, -1, 1);
    a.vb = p->v;
    a.pad = j->mask;
    ad.heads = d->heads;
    ad.scale = 1 / (d->full_scale ? (double)d->head_dim : sqrt((double)d->head_dim));
    ad.span = j->span;
    ad.dropout = d->attn_dropout;
    if (j->gen) {
        a.pe = stx_new(x, 1, d->heads * wide, 0, 0);
        if (a.pe) {
            size_t K = d->pos_mode == STX_PAR_POS_REF ? j->n + 1 : j->gen->M + 1;
            a.pe->data = j->gen->pos[j->l];
            a.pe->dim[0] = K;
            a.pe->size = K * a.pe->dim[1];
        }
        y = a.pe ? stx_cache_attention(j->gen->cache, j->l, &a, &ad) : NULL;
        if (p->rel_bias) y = stx__par_narrow_heads(x, d, y);
    } else {
        a.pe = stx__par_meets(x, j->m, j->l, j->pos, j->sines, j->n + h->dim[1]);
        y = a.pe ? stx_attention(x, &a, &ad) : NULL;
    }
    if (j->shown) y = stx_mul(x, y, j->shown);
    return stx_linear(x, y, wo, late ? NULL : p->bo, d->attn_relu ? STX_ACT_RELU : STX_ACT_NONE);
}

static stx_tensor *stx__par_feed(stx_ctx *x, const stx__par_job *j, stx_tensor *h, int late) {
    const stx_par_block *p = &j->m->block[j->l];
    h = stx_dropout(x, stx_linear(x, h, p->w1, p->b1, STX_ACT_RELU), j->m->desc.inner_dropout);
    return stx_linear(x, h, p->w2, late ? NULL : p->b2, STX_ACT_NONE);
}

/* One block: in[0] = h (B,T,D), then the memory and the gate where there are any. This may run twice (stx_recompute). */
static stx_tensor *stx__par_run(stx_ctx *x, void *user, stx_tensor **in, stx_tensor **out) {
    STX__FP_SCOPE;
    const stx__par_job *j = (const stx__par_job *)user;
    const stx_par_desc *d = &j->m->desc;
    const stx_par_block *p = &j->m->block[j->l];
    const int pre = d->pre_norm, attends = stx__par_attends(j->kind),
              feeds = stx__par_feeds(j->kind);
    const int late = !pre && !(attends && feeds) && !(attends && d->attn_relu);
    stx_tensor *h = in[0], *a = NULL, *f = NULL, *mix[8] = {NULL};
    (void)out;
    if (attends)
        a = stx__par_attention(x, j,
                               pre ? stx_layernorm(x, h, p->attn_gain, p->attn_shift, d->norm_eps)
                                   : h,
                               j->past ? in[j->past] : NULL, late);
    if (feeds)
        f = stx__par_feed(x, j, pre ? stx_layernorm(x, h, p->ff_gain, p->ff_shift, d->norm_eps) : h,
                          late);
    if (!stx_ok(x)) return NULL;
    if (attends && feeds) {
        mix[0] = h;
        mix[1] = stx_dropout(x, a, d->dropout);
        mix[2] = stx_dropout(x, f, d->dropout);
        mix[3] = in[j->w];
        if (!pre) {
            mix[4] = p->attn_gain;
            mix[5] = p->attn_shift;
            mix[6] = p->ff_gain;
            mix[7] = p->ff_shift;
        }
        return stx__par_mix(x, mix, j->T, j->run, d->norm_eps);
    }
    if (!attends) a = f;
    if (pre) return stx_add(x, h, stx_dropout(x, a, d->dropout));
    return stx_residual_norm_bias(x, h, a,
                                  !late     ? NULL
                                  : attends ? p->bo
                                            : p->b2,
                                  d->dropout, attends ? p->attn_gain : p->ff_gain,
                                  attends ? p->attn_shift : p->ff_shift, d->norm_eps);
}


// >>forward

/* What block l runs in this mode: its own letter, or the likeliest one of a mixture. 0 in error */
static int stx__par_kind(const stx_par *m, size_t l) {
    const int mixed = stx_training(m->ctx) || m->desc.gate_eval != STX_PAR_EVAL_ARGMAX;
    return m->block[l].kind != 'g' || mixed ? m->block[l].kind : stx__par_letter(m, l, -1);
}

static int stx__par_noisy(const stx_par *m) {
    return stx_training(m->ctx) || m->desc.gate_eval == STX_PAR_EVAL_NOISE;
}

/* The gate of block l for B streams of T tokens; u: the caller's numbers on the device, or NULL; calls: of the memory. Fills in which rows
   share it */
static stx_tensor *stx__par_gate_of(stx_par *m, size_t l, size_t B, size_t T, const stx_real *u,
                                    uint64_t calls, stx__par_job *j) {
    stx_ctx *x = m->ctx;
    const stx_par_desc *d = &m->desc;
    const int latent = stx_training(x) && d->latency;
    stx_par_gate_args a;
    memset(&a, 0, sizeof a);
    a.noisy = stx__par_noisy(m);
    a.R = a.noisy ? stx_par_draws(m, B, T) : 1;
    a.kind = d->arch;
    a.hard = a.noisy && d->gate == STX_PAR_ST;
    a.latency = latent ? d->latency_w == STX_PAR_LATENCY_OF_P ? 1 : 2 : 0;
    a.seed = stx_ctx_desc(x)->seed;
    /* in evaluation, which draws no streams, by how much text was read: other noise in each call, the same for the same text */
    if (a.noisy && !u)
        a.stream = stx_training(x) ? stx_random_stream(x)
                                   : (uint64_t)1 << 62 | (calls & 0xffffffffffffu) << 12 | l;
    /* in a group a stream's draws are its own, those of a step are alike */
    if (stx_training(x) && d->noise != STX_PAR_NOISE_STEP) a.first = (uint64_t)stx_rank(x) * a.R;
    if (a.latency == 2 && stx_ranks(x) > 1 && d->noise != STX_PAR_NOISE_STEP
        && d->latency != STX_PAR_LATENCY_ADD) {
        stx_fail(
            x, STX_ERR_ARG,
            "stx_par_segment: the latency of w is a mean over all streams, and a rank has its own: in a group want "
            "noise STX_PAR_NOISE_STEP, latency_w STX_PAR_LATENCY_OF_P, or latency STX_PAR_LATENCY_ADD");
        return NULL;
    }
    a.tau = m->tau->data;
    a.u = u ? u + 3 * l : NULL;
    a.ldu = 3 * d->blocks;
    a.cost = m->cost;
    j->T = a.noisy && d->noise != STX_PAR_NOISE_STEP ? T : B * T;
    j->run = a.noisy && d->noise == STX_PAR_NOISE_TOKENS ? d->noise_tokens : j->T;
    return m->w[l] =
               stx__par_gate_op(x, m->frozen ? stx_detach(x, m->block[l].gate) : m->block[l].gate,
                                &a, latent ? &m->latency : NULL);
}

/* The caller's uniform numbers (draws,L,3); NULL: there are none, or an error */
static const stx_real *stx__par_given(stx_par *m, size_t draws) {
    if (!m->uniforms_count || !stx__par_noisy(m)) return NULL;
    if (m->uniforms_count == draws * m->desc.blocks * 3) return m->uniforms;
    stx_fail(
        m->ctx, STX_ERR_ARG,
        "stx_par_segment: stx_par_set_uniforms gave %zu numbers, want (%zu,%zu,3) for this call",
        m->uniforms_count, draws, m->desc.blocks);
    return NULL;
}

/* (B,T,H dh'): rows of zeros where pad is not 0, of ones elsewhere; NULL: nothing is padding */
static stx_tensor *stx__par_shown(stx_par *m, const stx_ids *pad) {
    stx_ctx *x = m->ctx;
    const size_t C = m->desc.heads * stx__par_wide(&m->desc), n = pad ? pad->B * pad->T : 0;
    int32_t *v, any = 0;
    size_t i;
    if (!pad) return NULL;
    v = (int32_t *)stx_step_alloc(x, stx_bytes_of(n, sizeof *v, 1));
    for (i = 0; v && i < n; i++) any |= v[i] = pad->data[i] != 0;
    if (!any) return NULL;
    if (!m->shown) {
        stx_real *two = (stx_real *)stx_block(x, stx_bytes_of(2 * C, sizeof *two, 1));
        for (i = 0; two && i < C; i++) two[i] = 1;
        if (two) m->shown = stx_constant_create(x, two, 2, C, 0, 0);
        stx_block_free(x, two);
    }
    return stx_embedding(x, m->shown, stx_tokens(x, v, pad->B, pad->T));
}

/* The largest distance that a query sees, 0: any */
static size_t stx__par_span(stx_ctx *x, const char *op, int same_length, size_t M) {
    if (same_length && M < 2)
        stx_fail(
            x, STX_ERR_ARG,
            "%s: same_length with a memory of %zu rows: want at least 2 rows, or same_length 0", op,
            M);
    return same_length && M > 1 ? M - 1 : 0;
}

STX_DEF stx_tensor *stx_par_segment(stx_par *m, stx_tensor *h, const stx_ids *pad,
                                    const stx_par_state *in, stx_par_state *out) {
    STX__FP_SCOPE;
    stx_ctx *x = m ? m->ctx : NULL;
    const stx_par_state *how = in ? in : out;
    const stx_par_desc *d;
    const stx_real *u;
    stx_tensor *shown, *sines = NULL;
    size_t l, B, T, reach, clamp, span;
    uint64_t calls;
    if (!stx_ok(x) || !h) return NULL;
    d = &m->desc;
    B = h->dim[0];
    T = h->ndim == 3 ? h->dim[1] : 0;
    if (!T || h->dim[2] != d->dim || (pad && (pad->B != B || pad->T != T))) {
        stx_fail(x, STX_ERR_SHAPE,
                 "stx_par_segment: %zu rows of %zu steps, %zu wide%s: want (B,T,%zu)%s", B, T,
                 h->ndim == 3 ? h->dim[2] : 0, pad ? " with padding" : "", d->dim,
                 pad ? ", and padding (B,T)" : "");
        return NULL;
    }
    if ((in && in->model != m) || (out && out->model != m)) {
        stx_fail(
            x, STX_ERR_ARG,
            "stx_par_segment: a memory of another model: want one by stx_par_state_create of this one");
        return NULL;
    }
    if ((in && in->B != B) || (out && out->B != B)) {
        stx_fail(
            x, STX_ERR_SHAPE,
            "stx_par_segment: %zu rows with a memory of %zu streams: want a state with B = %zu", B,
            in && in->B != B ? in->B : out->B, B);
        return NULL;
    }
    calls = in ? in->calls : 0;
    clamp = how ? how->clamp_len : d->clamp_len;
    span = stx__par_span(x, "stx_par_segment", how ? how->same_length : d->same_length,
                         how ? how->M : stx__par_mem(d));
    m->latency = NULL;
    memset(m->w, 0, d->blocks * sizeof *m->w);
    u = m->arch ? stx__par_given(m, stx_par_draws(m, B, T)) : NULL;
    shown = stx__par_shown(m, pad);
    if (!shown) pad = NULL;
    for (l = 0; l < d->blocks && h && stx_ok(x); l++) {
        stx__par_job *j = (stx__par_job *)stx_step_alloc(x, sizeof *j);
        stx_tensor *ins[3], *y = h;
        int count = 1;
        if (!j) return NULL;
        memset(j, 0, sizeof *j);
        j->m = m;
        j->l = l;
        j->kind = stx__par_kind(m, l);
        ins[0] = h;
        if (stx__par_attends(j->kind)) {
            j->n = in ? in->mem->layer[l].real : 0;
            if (j->n && d->pre_norm)
                ins[j->past = count++] = stx_rows_read(in->mem, l, j->n);
            else if (!stx_rows_past(in ? in->mem : NULL, l, j->n, &j->view))
                return NULL;
            j->mask = j->n ? stx_rows_mask(in->mem, l, j->n, pad, T) : pad;
            j->span = span;
            j->shown = shown;
            reach = j->n + T;
            j->pos = stx__par_reach(m, clamp, reach);
            if (!j->pos) return NULL;
            /* one dropout of positions for all blocks: of those that have as many rows */
            if (j->pos->sines && (!sines || sines->dim[0] != reach))
                sines = stx_dropout_alike(x, stx__par_last(m, j->pos->sines, reach),
                                          d->pos_dropout);
            j->sines = sines;
        }
        if (j->kind == 'g') ins[j->w = count++] = stx__par_gate_of(m, l, B, T, u, calls, j);
        if (!stx_ok(x)) return NULL;
        if (j->kind != 'i')
            y = d->blocks - l <= d->recompute_layers
                    ? stx_recompute(x, stx__par_run, j, ins, count, NULL, 0)
                    : stx__par_run(x, j, ins, NULL);
        if (out && out->mem->layer[l].width
            && !stx_rows_push(out->mem, in ? in->mem : NULL, l, out->M, h, pad))
            return NULL;
        h = y;
    }
    if (out) {
        out->calls = calls + 1;
        out->training = stx_training(x);
    }
    if (m->final_gain) h = stx_layernorm(x, h, m->final_gain, m->final_shift, d->norm_eps);
    return stx_dropout(x, h, d->final_dropout);
}

/* 1 and no error when the model has words */
static int stx__par_worded(const stx_par *m, const char *op) {
    if (!m || !stx_ok(m->ctx)) return 0;
    if (!m->words)
        stx_fail(m->ctx, STX_ERR_ARG,
                 "%s: the model has no words: make it with vocab, or use stx_par_segment", op);
    return m->words != NULL;
}

STX_DEF stx_tensor *stx_par_embed(stx_par *m, const stx_ids *ids) {
    return stx__par_worded(m, "stx_par_embed")
               ? stx_dropout(m->ctx, stx_words_embed(m->words, ids), m->desc.dropout)
               : NULL;
}

STX_DEF stx_tensor *stx_par_forward(stx_par *m, const stx_ids *ids, const stx_par_state *in,
                                    stx_par_state *out) {
    return stx_par_segment(m, stx_par_embed(m, ids), NULL, in, out);
}

STX_DEF stx_tensor *stx_par_logits(stx_par *m, stx_tensor *h) {
    return stx__par_worded(m, "stx_par_logits") ? stx_words_logits(m->words, h) : NULL;
}

STX_DEF stx_tensor *stx_par_log_probs(stx_par *m, stx_tensor *h) {
    return stx__par_worded(m, "stx_par_log_probs") ? stx_words_log_probs(m->words, h) : NULL;
}

/* What stx_words_loss is told. Returns which targets do not count: 0 none, 1 some that are how->ignored, 2 others too */
static int stx__par_how(const stx_par *m, const stx_ids *targets, stx_token_loss *how) {
    size_t i;
    int kind = m->desc.pads;
    memset(how, 0, sizeof *how);
    how->ignored = m->desc.pads ? m->desc.pad_id : -1;
    for (i = 0; targets && kind < 2 && i < targets->B * targets->T; i++)
        if (targets->data[i] < 0) kind = targets->data[i] == how->ignored ? 1 : 2;
    /* in a group other ranks may have such targets: all make the mean of those that count */
    how->ignore = kind > 0
                  || (!m->desc.divide_all && stx_ranks(m->ctx) > 1 && stx_training(m->ctx));
    how->mean = how->ignore && !m->desc.divide_all;
    return kind;
}

STX_DEF stx_tensor *stx_par_nll(stx_par *m, stx_tensor *h, const stx_ids *targets,
                                stx_tensor **rows) {
    stx_token_loss how;
    stx_tensor *y;
    int kind;
    if (rows) *rows = NULL;
    if (!stx__par_worded(m, "stx_par_nll") || !h || !targets) return NULL;
    kind = stx__par_how(m, targets, &how);
    if (!how.ignore && !rows) return stx_words_loss(m->words, h, targets, NULL);
    if (kind == 2) {
        size_t i, n = targets->B * targets->T;
        int32_t *v = (int32_t *)stx_step_alloc(m->ctx, stx_bytes_of(n, sizeof *v, 1));
        for (i = 0; v && i < n; i++) v[i] = targets->data[i] < 0 ? how.ignored : targets->data[i];
        targets = v ? stx_tokens(m->ctx, v, targets->B, targets->T) : NULL;
    }
    y = stx_words_loss(m->words, h, targets, &how);
    if (rows) *rows = how.nll;
    return y;
}

STX_DEF stx_tensor *stx_par_loss(stx_par *m, const stx_ids *ids, const stx_ids *targets,
                                 const stx_par_state *in, stx_par_state *out) {
    return stx_par_nll(m, stx_par_forward(m, ids, in, out), targets, NULL);
}

STX_DEF stx_tensor *stx_par_total(stx_par *m, stx_tensor *nll) {
    stx_par_latency_args a;
    if (!m || !nll || !m->latency) return nll;
    a.kind = m->desc.latency;
    a.weight = m->desc.latency_weight;
    a.target = m->desc.latency_target;
    a.power = m->desc.latency_power;
    return stx__par_latency_op(m->ctx, nll, m->latency, &a);
}

STX_DEF uint64_t stx_par_key(const stx_par *m, const stx_ids *ids, const stx_ids *targets,
                             const stx_par_state *s, uint64_t salt) {
    uint64_t h = stx_step_key(m, ids, targets, salt);
    stx_token_loss how;
    size_t l;
    if (!m || !stx_ok(m->ctx)) return h;
    h = stx_key_add(stx_key_add(h, m->desc.recompute_layers),
                    (uint64_t)stx__par_how(m, targets, &how));
    h = stx_words_key(m->words, h, ids, targets, how.ignore ? &how : NULL);
    h = stx_key_add(stx_key_add(h, (uint64_t)(m->frozen + 2 * m->desc.gate)),
                    m->uniforms_count ? (uint64_t)(uintptr_t)m->uniforms : 0);
    h = stx_key_add(h, m->uniforms_count);
    if (s) {
        h = stx_rows_key(s->mem, h);
        h = stx_key_add(stx_key_add(stx_key_add(h, s->M), s->clamp_len), (uint64_t)s->same_length);
    }
    /* what evaluation's gates are decided by; of a memory only seen in training nothing of it counts */
    if (!m->arch || (s && s->training)) return h;
    h = stx_key_add(h, (uint64_t)m->desc.gate_eval);
    if (m->desc.gate_eval == STX_PAR_EVAL_NOISE) return stx_key_add(h, s ? s->calls : 0);
    for (l = 0; m->desc.gate_eval == STX_PAR_EVAL_ARGMAX && l < m->desc.blocks; l++)
        h = stx_key_add(h, (uint64_t)stx__par_letter(m, l, -1));
    return h;
}


// >>generation

STX_DEF stx_par_gen *stx_par_gen_create_sized(stx_par *m, size_t B, size_t M) {
    stx_ctx *x = m ? m->ctx : NULL;
    const size_t L = m ? m->desc.blocks : 0, C = m ? m->desc.heads * stx__par_wide(&m->desc) : 0;
    stx_par_gen *g;
    size_t l;
    if (!stx_ok(x)) return NULL;
    if (!B || M > (size_t)1 << 30) {
        stx_fail(
            x, STX_ERR_ARG,
            "stx_par_gen_create: %zu streams of %zu rows, want at least one stream and at most 2^30 rows",
            B, M);
        return NULL;
    }
    if (m->arch && m->desc.gate_eval == STX_PAR_EVAL_NOISE) {
        stx_fail(
            x, STX_ERR_ARG,
            "stx_par_gen_create: gate_eval is STX_PAR_EVAL_NOISE, which would be another network for each token: want "
            "STX_PAR_EVAL_ARGMAX or _SOFT");
        return NULL;
    }
    g = (stx_par_gen *)stx_block(x, sizeof *g);
    if (!g) return NULL;
    g->model = m;
    g->B = B;
    g->M = M;
    g->clamp_len = m->desc.clamp_len;
    g->same_length = m->desc.same_length;
    g->stale = 1;
    g->cache = stx_cache_create(x, L, B, m->words ? m->desc.vocab : 1);
    g->pos = (stx_real **)stx_block(x, stx_bytes_of(L, sizeof *g->pos, 1));
    g->kind = (char *)stx_block(x, L + 1);
    g->pad = (int32_t *)stx_block(x, stx_bytes_of(B, M + 1, sizeof *g->pad));
    for (l = 0; stx_ok(x) && l < L; l++) {
        if (!stx__par_attends(m->block[l].kind)) continue;
        stx_cache_window(g->cache, l, M + !M, C, 1);
        g->pos[l] = stx_block_numbers(x, stx_bytes_of(M + 1, C, 1));
    }
    if (stx_ok(x)) return g;
    stx_par_gen_free(g);
    return NULL;
}

STX_DEF stx_par_gen *stx_par_gen_create(stx_par *m, size_t B) {
    return m ? stx_par_gen_create_sized(m, B, stx__par_mem(&m->desc)) : NULL;
}

STX_DEF void stx_par_gen_free(stx_par_gen *g) {
    stx_ctx *x = g ? g->model->ctx : NULL;
    size_t l;
    if (!g) return;
    for (l = 0; g->pos && l < g->model->desc.blocks; l++) stx_block_numbers_free(x, g->pos[l]);
    stx_block_free(x, g->pos);
    stx_block_free(x, g->kind);
    stx_block_free(x, g->pad);
    stx_cache_free(g->cache);
    stx_block_free(x, g);
}

STX_DEF void stx_par_gen_reset(stx_par_gen *g) {
    if (!g || !stx_ok(g->model->ctx)) return;
    stx_cache_reset(g->cache);
    g->rows = 0;
    g->masked = 0;
    g->stale = 1;
    memset(g->pad, 0, g->B * (g->M + 1) * sizeof *g->pad);
}

STX_DEF void stx_par_gen_reset_stream(stx_par_gen *g, size_t b) {
    size_t i;
    if (!g || !stx_ok(g->model->ctx)) return;
    if (b >= g->B) {
        stx_fail(g->model->ctx, STX_ERR_ARG,
                 "stx_par_gen_reset_stream: stream %zu, want less than %zu", b, g->B);
        return;
    }
    for (i = 0; i < g->rows; i++) g->pad[b * g->M + g->M - 1 - i] = g->masked = 1;
}

/* What may have changed with the parameters: positions as the queries meet them, and which branches run */
static int stx__par_gen_fill(stx_par_gen *g) {
    STX__FP_SCOPE;
    stx_par *m = g->model;
    stx_ctx *x = m->ctx;
    const size_t C = m->desc.heads * stx__par_wide(&m->desc);
    size_t l;
    for (l = 0; l < m->desc.blocks; l++) {
        const stx_par_positions *p;
        stx_tensor *t;
        g->kind[l] = (char)stx__par_kind(m, l);
        if (!g->pos[l]) continue;
        p = stx__par_reach(m, g->clamp_len, g->M + 1);
        t = p ? stx__par_meets(x, m, l, p, NULL, g->M + 1) : NULL;
        if (!t) return 0;
        STX_RUN(x, stx_copy2d, (x, g->pos[l], C, t->data, C, g->M + 1, C, 0));
    }
    g->stale = 0;
    return stx_ok(x);
}

STX_DEF int stx_par_gen_set(stx_par_gen *g, const stx_par_state *from) {
    stx_par *m = g ? g->model : NULL;
    stx_ctx *x = m ? m->ctx : NULL;
    const size_t C = m ? m->desc.heads * stx__par_wide(&m->desc) : 0;
    size_t l, b, n = SIZE_MAX;
    if (!stx_ok(x)) return 0;
    if (!from || from->model != m || from->B != g->B) {
        stx_fail(
            x, STX_ERR_ARG,
            "stx_par_gen_set: a memory that is NULL, of another model or of another number of streams than %zu",
            g->B);
        return 0;
    }
    stx_par_gen_reset(g);
    stx_begin(x, STX_EVAL);
    for (l = 0; l < m->desc.blocks; l++) {
        const stx_rows_layer *f = &from->mem->layer[l];
        const stx_par_block *p = &m->block[l];
        stx_cache_layer *y = &g->cache->layer[l];
        stx_tensor *t;
        if (!g->pos[l]) continue;
        if (n != SIZE_MAX && n != STX_MIN(f->real, g->M)) {
            stx_fail(
                x, STX_ERR_ARG,
                "stx_par_gen_set: block %zu remembers %zu rows and a block below %zu: want as many in each",
                l, f->real, n);
            return 0;
        }
        n = STX_MIN(f->real, g->M);
        t = n ? stx_rows_read(from->mem, l, n) : NULL;
        if (!t) continue;
        if (m->desc.pre_norm)
            t = stx_layernorm(x, t, p->attn_gain, p->attn_shift, m->desc.norm_eps);
        t = stx_linear(x, t, p->wkv, p->bkv, STX_ACT_NONE);
        if (p->rel_bias) t = stx__par_widen_heads(x, &m->desc, t);
        if (!t) return 0;
        STX_RUN(x, stx_copy2d,
                (x, y->k, y->capacity * y->width, t->data, n * 2 * C, g->B, n * 2 * C, 0));
        y->len = n;
        for (b = 0; f->masked && b < g->B; b++)
            memcpy(g->pad + b * g->M + g->M - n, f->pad + b * f->real + f->real - n,
                   n * sizeof *g->pad);
        g->masked |= f->masked;
    }
    g->rows = n == SIZE_MAX ? STX_MIN(stx_rows_most(from->mem), g->M) : n;
    return stx_ok(x);
}

/* t steps that the cache takes at once */
static stx_tensor *stx__par_gen_part(stx_par_gen *g, stx_tensor *h) {
    stx_par *m = g->model;
    stx_ctx *x = m->ctx;
    const size_t t = h->dim[1], n = g->rows, M = g->M, stay = t < M ? M - t : 0;
    const size_t span = stx__par_span(x, "stx_par_gen", g->same_length, M);
    const stx_ids *mask = NULL;
    size_t l, b;
    if (!stx_ok(x) || (g->stale && !stx__par_gen_fill(g))) return NULL;
    m->latency = NULL;
    if (g->masked) {
        int32_t *v = (int32_t *)stx_step_alloc(x, stx_bytes_of(g->B, n + t, sizeof *v)), any = 0;
        if (!v) return NULL;
        memset(v, 0, g->B * (n + t) * sizeof *v);
        for (b = 0; b < g->B; b++) memcpy(v + b * (n + t), g->pad + b * M + M - n, n * sizeof *v);
        mask = stx_tokens(x, v, g->B, n + t);
        for (b = 0; b < g->B; b++) {
            memmove(g->pad + b * M, g->pad + b * M + M - stay, stay * sizeof *v);
            memset(g->pad + b * M + stay, 0, (M - stay) * sizeof *v);
        }
        for (b = 0; b < g->B * M; b++) any |= g->pad[b];
        g->masked = any;
    }
    for (l = 0; l < m->desc.blocks && h; l++) {
        stx__par_job j;
        stx_tensor *in[2];
        if (g->kind[l] == 'i') continue;
        memset(&j, 0, sizeof j);
        j.m = m;
        j.l = l;
        j.n = n;
        j.kind = g->kind[l];
        j.span = span;
        j.mask = mask;
        j.gen = g;
        if (!M && g->pos[l]) g->cache->layer[l].len = 0;
        in[0] = h;
        if (j.kind == 'g') in[j.w = 1] = stx__par_gate_of(m, l, g->B, t, NULL, 0, &j);
        h = stx_ok(x) ? stx__par_run(x, &j, in, NULL) : NULL;
    }
    if (!h) return NULL;
    g->rows = STX_MIN(n + t, M);
    return m->final_gain ? stx_layernorm(x, h, m->final_gain, m->final_shift, m->desc.norm_eps) : h;
}

STX_DEF stx_tensor *stx_par_gen_step(stx_par_gen *g, stx_tensor *h) {
    stx_ctx *x = g ? g->model->ctx : NULL;
    stx_tensor *y = NULL, *part;
    size_t at, t, T;
    if (!stx_ok(x) || !h) return NULL;
    T = h->ndim == 3 ? h->dim[1] : 0;
    if (!T || h->dim[0] != g->B || h->dim[2] != g->model->desc.dim || stx_training(x)) {
        stx_fail(
            x, STX_ERR_SHAPE,
            "stx_par_gen_step: %zu streams of %zu steps%s: want (%zu,t,%zu) after stx_begin(x, STX_EVAL)",
            h->dim[0], T, stx_training(x) ? " in training" : "", g->B, g->model->desc.dim);
        return NULL;
    }
    for (at = 0; at < T; at += t) {
        t = STX_MIN(T - at, g->cache->chunk);
        if (g->model->desc.pos_mode == STX_PAR_POS_REF && g->rows < g->M)
            t = 1; /* rows of positions by how many keys there are */
        part = stx__par_gen_part(g, t < T ? stx_slice(x, h, at, at + t) : h);
        y = y ? stx_concat(x, y, part) : part;
        if (!stx_ok(x)) return NULL;
    }
    return y;
}

static stx_tensor *stx__par_gen_feed(void *user, const stx_ids *ids) {
    stx_par_gen *g = (stx_par_gen *)user;
    return stx_par_gen_step(g, stx_par_embed(g->model, ids));
}

STX_DEF const stx_real *stx_par_gen_feed(stx_par_gen *g, const int32_t *ids, size_t n) {
    if (!g || !stx__par_worded(g->model, "stx_par_gen_feed")) return NULL;
    return stx_cache_feed(g->cache, g->model->words, ids, n, 1, stx__par_gen_feed, g);
}


// >>model: for programs of any family

static stx_tensor *stx__par_lm_loss(void *m, const stx_ids *ids, const stx_ids *targets,
                                    const void *in, void *out) {
    return stx_par_loss((stx_par *)m, ids, targets, (const stx_par_state *)in,
                        (stx_par_state *)out);
}

static stx_tensor *stx__par_lm_total(void *m, stx_tensor *nll) {
    return stx_par_total((stx_par *)m, nll);
}

static void stx__par_lm_updated(void *m) {
    (void)m;
}

static size_t stx__par_lm_recompute(void *m, size_t n) {
    stx_par_desc *d = &((stx_par *)m)->desc;
    d->recompute = n >= d->blocks;
    return d->recompute_layers = STX_MIN(n, d->blocks);
}

static uint64_t stx__par_lm_key(const void *m, const stx_ids *ids, const stx_ids *targets,
                                const void *s, uint64_t salt) {
    return stx_par_key((const stx_par *)m, ids, targets, (const stx_par_state *)s, salt);
}

static void *stx__par_lm_state_create(void *m, size_t B, size_t window) {
    return window ? stx_par_state_create_sized((stx_par *)m, B, window)
                  : stx_par_state_create((stx_par *)m, B);
}

static void *stx__par_lm_gen_create(void *m, size_t B, size_t window) {
    return window ? stx_par_gen_create_sized((stx_par *)m, B, window)
                  : stx_par_gen_create((stx_par *)m, B);
}
STX_LM_STATES(par)

STX_DEF stx_lm stx_par_lm(stx_par *m) {
    stx_lm lm;
    memset(&lm, 0, sizeof lm);
    if (!m || !m->words) return lm;
    lm.model = m;
    lm.ctx = m->ctx;
    lm.params = m->params;
    lm.words = m->words;
    lm.loss = stx__par_lm_loss;
    lm.total = stx__par_lm_total;
    lm.updated = stx__par_lm_updated;
    lm.recompute = stx__par_lm_recompute;
    lm.key = stx__par_lm_key;
    lm.state_create = stx__par_lm_state_create;
    lm.gen_create = stx__par_lm_gen_create;
    stx__par_lm_states(&lm);
    return lm;
}

STX_STRICT_OFF
#endif /* SEQTX_PAR_IMPLEMENTATION */

#define STX__LETTERS 2
#include "seqtx.h"
