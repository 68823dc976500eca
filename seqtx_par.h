/* seqtx_par.h - v0.2 - Transformer-XL, and PAR: a search for the order of its blocks
   no warranty implied; MIT or public domain, your choice (see the end of seqtx.h)

   In ONE .c or .cpp file:                everywhere else:
       #define SEQTX_IMPLEMENTATION           #include "seqtx_par.h"
       #include "seqtx_par.h"

   Needs seqtx.h in the same directory. Compile with -O2 and link with -lm (and with
   -pthread if glibc is older than 2.34). If another file already implements seqtx.h,
   define SEQTX_PAR_IMPLEMENTATION instead, which compiles only the implementation in this
   header.

   Contents: a language model that reads text segment by segment and remembers the
   inputs of its attention blocks. Attention and feed-forward blocks, and block types of
   your program, can be in any order; if the first two alternate, the model is
   Transformer-XL. Optional: a supernet whose gates learn, in one training run, which
   kind of block to keep at each position, and adaptive input and output for large
   vocabularies.


   MANUAL

   Papers
       Transformer-XL: Attentive Language Models
           Beyond a Fixed-Length Context         Dai et al. 2019         arXiv:1901.02860
       Pay Attention when Required (PAR)         Mandava et al. 2020     arXiv:2009.04534
       Categorical Reparameterization with
           Gumbel-Softmax                        Jang et al. 2016        arXiv:1611.01144
       FBNet (search with a latency table)       Wu et al. 2018          arXiv:1812.03443
       Efficient Sparsely Activated
           Transformers (latency target)         Latifi et al. 2022      arXiv:2208.14580
       Efficient softmax approximation for GPUs
           (adaptive softmax)                    Grave et al. 2016       arXiv:1609.04309
       Adaptive Input Representations            Baevski and Auli 2018   arXiv:1809.10853

   Letters used in this file
       B  streams (rows of a batch)          L  blocks; l is one of them
       T  tokens per stream and call         k  branch: 0 attention, 1 feed-forward,
       V  vocabulary size                       2 identity, 3 + t own type t
       D  model dimension                    K  branches, 3 + desc.types
       H  heads                              M  capacity of the memory, rows
       dh head dimension                     n  rows in the memory
       dh' dh, or more with a bias per       S  keys of a call, n + T
          distance; see >>position bias      i  a query;  j a key
       F  feed-forward size                  t  distance n + i - j >= 0, in tokens
       E  width of the embedding             u  content bias, (H,dh)
       J  tails (see Adaptive vocabulary)    v  position bias, (H,dh)
       N  rows of an elementwise kernel      al parameters of a gate, (K)
       C  channels of an elementwise kernel  p  probabilities of the branches, (K)
       R  draws per gate                     w  weights of the branches, (K)
   In the code, x is the context, m a model, d a desc, and a the arguments of a kernel.

   The model. Every attention block keeps its inputs from earlier segments and attends to
   them.

       tokens (B,T) -> emb_scale embedding -> h (B,T,D) -> blocks -> output head
                    -> logits (B,T,V)

   One block, with the names used in the code. 's', 'f' and 'i' are the letters used in
   patterns. In a supernet, every block is a mixture.

       's'      A = Wo attend(h)                  h' = Y0 = LN_a(h + A)
       'f'      G = W2 relu(W1 h + b1) + b2       h' = Y1 = LN_f(h + G)
       'i'                                        h' = h
       own      forward(h), of your program       h' = Y3 = LN(h + forward(h))
       mixture  w = gate(al, noise, tau)          h' = w0 Y0 + w1 Y1 + w2 h + w3 Y3 ..

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

       With pre_norm              A = Wo attend(LN_a h), where LN_a also normalises the
                                  memory, and Y0 = h + A. G is computed from LN_f h, and
                                  Y1 = h + G. A norm follows the last block unless
                                  no_final_norm is set.
       With STX_PAR_LEARNED       r_t is row t of a learned table. Each attention block
                                  has a separate table, and there is no Wr.
       With STX_PAR_LEARNED_BIAS  s_ij = ((q_i + u).k_j + q_i.r_t + b_t) / sqrt(dh), with
                                  a learned bias b (M + segment,H).

   Memory. An attention block stores up to M rows of its inputs h, before any norm. They
   are constants: gradients reach Wkv (and LN_a with pre_norm) through them, but not the
   blocks that computed them. A query sees the n rows of memory, the earlier tokens of
   its segment and itself: n + i + 1 keys. Each attention block extends the context by M
   tokens. If an evaluation has more memory than training had, set clamp_len; otherwise,
   distances occur that never occurred in training.

   Worked example of attention. One head with dh = 1, n = 1, T = 2, u = 1 and v = 2. Let
   q = 0, -1; k = 0, ln 2, 5; value = 6, 0, 12; and r_0, r_1, r_2 = 0, ln 2, ln 3:

       i = 0: t = 1, 0       exp(s) = 4, 2       attend = (4 6 + 2 0) / 6 = 4
       i = 1: t = 2, 1, 0    exp(s) = 3, 2, 1    attend = (3 6 + 2 0 + 1 12) / 6 = 5

   The second query has q + u = 0, so its scores depend only on the distances. If g = 1 is
   the gradient of its result, ds_j = a_j g (value_j - 5) = 1/2, -5/3, 7/6. These are also
   the gradients of r_2, r_1 and r_0, because q + v = 1.

   The gate. The choice of a branch is categorical and has no gradient, but its continuous
   relaxation (Jang et al. 2016) has one. With U uniform in (0,1):

       pi_k = exp(al_k), or with STX_PAR_FORM_PI  max(al_k, 0) + 1e-5
       p    = pi / sum pi
       g_k  = -ln(-ln U_k)               noise, a Gumbel variable
       y    = softmax((ln pi + g) / tau)

   For every tau, the index of the largest element of y is distributed exactly as p (the
   Gumbel-max trick). y approaches the one-hot vector of that index as tau -> 0, and
   (1/3, 1/3, 1/3) as tau -> infinity. Between these limits, the mean of y is in general
   not p. A soft gate mixes the branches: w = y. A straight-through gate selects one of
   them: w is one-hot in the forward pass, and the backward pass uses the gradient of y.

   Latency. cost[k] is the time of branch k on the target machine, and stx_par_total adds
   the expected time to the loss. To measure the costs, examples/par/timing.h alternates
   between three models of a single block (attention, feed-forward, identity) with full
   memories, and subtracts the identity's median time per step from that of the other two.

   Why four terms in s_ij (1901.02860, section 3.3)? q.k scores what this token looks
       for, u.k what every token looks at, q.r_t how far back this token looks, and
       v.r_t how far back every token looks. r_t depends only on the distance, so a key
       in memory gets the same score as in one long text, and texts have no maximum
       length.

       How are the scores q.r_t moved to their keys? The rows r_t are stored with the
       largest distance first. A key at distance t from query i is at distance t + 1
       from query i + 1, so in the matrix (q + v) r^T a key's column moves one to the
       left per query. The attention kernels use a row stride that is longer by one for
       this matrix, which puts each score into its key's column (>>attention in
       seqtx.h). The shifted matrix is never stored.

       Why noise in the gate? Without noise, the branches of a block can learn to work
       together as a mixture. A network that keeps only one branch per block then lacks
       the others.

       Why does the temperature fall? At a high temperature, all branches get gradients,
       but they train an average that is never used. At a low temperature, the network
       that will be used is trained, but the gradient is noisy, and a branch that is
       rarely drawn hardly learns. With p = (1/3, 1/3, 1/3) and dw = (1, 0, 0), the
       variance of dal_0 is 0.0059, 0.031, 0.10, 0.25, 0.54, 1.13 for tau = 1, 1/2, 1/4,
       .. 1/32. At low temperatures, it is about proportional to 1 / tau. Hence
       stx_par_tau lowers tau gradually.

       Why are gates frozen at first (stx_par_freeze)? Comparing branches makes sense only
       once their weights have learned something.

       Which data do the gates learn from? The reference trains gates and weights with one
       loss on the whole text. The paper updates the gates in a fifth of each epoch, after
       10,000 updates of the weights alone, with a separate optimiser. FBNet gives the
       gates a fifth of the data, which the weights do not see (train_par --arch-share).

   Gradients of the gate. dX is the gradient of h', the sums are over rows and channels:

       dw_0 = sum dX Y0       dw_1 = sum dX Y1       dw_2 = sum dX h
       d ln pi_k = y_k (dw_k - y.dw) / tau
       dal_k     = d ln pi_k
       With STX_PAR_FORM_PI, dal_k = d ln pi_k / pi_k where al_k >= 0, and 0 where
       al_k < 0. A parameter below 0 therefore gets no further gradient: only weight decay
       and momentum can still move it.

   Worked example of a gate. al = (ln 2, -ln 2, 0), so p = (4/7, 1/7, 2/7). Noise g = (0,
   ln 2, 0) and tau = 1; cost = (2, 1, 0); D = 2, h = (1,-1), A = (2,0), G = (-3,-1).

       e^(ln pi + g) = 2, 1, 1       w = y = (1/2, 1/4, 1/4)
       with tau = 1/2: 4, 1, 1       w = y = (2/3, 1/6, 1/6), not used below
       latency of w = 5/4            latency of p = 9/7
       h + A = (3,-1),  Y0 = (1,-1)                                   (eps = 0)
       h + G = (-2,-2), Y1 = (0,0)   h' = (3/4,-3/4)
       dX = (1,0)                    dw = (1,0,1), y.dw = 3/4, dal = (1/8,-3/16,1/16)
       Straight-through: w = (1,0,0), h' = Y0, latency of w = 2, and the same dw and dal

   From a search to a network. A supernet computes both branches of every block, forward
   and backward. stx_par_argmax and stx_par_sample return the pattern that the search
   found. Create a network with that pattern, and train it from the weights of the
   search (stx_par_inherit) or from new ones. stx_par_rule implements the paper's rule:
   one block in five is attention, and none in the last third. An 'f' takes less time
   than an 's' but has more parameters: 2 D F + F + 3 D, which is about 8 D^2 if
   F = 4 D. An 's' has 5 D^2 + 2 D (if H dh = D).

   Results. The paper reports 35 % less time than Transformer-XL at equal perplexity on
   WikiText-103, with 6 attention blocks in 32 instead of 16, and test perplexities of
   22.7 (base) and 18.4 (large). In our small-scale runs, fewer attention blocks raised
   the perplexity by 2.3 to 2.7 % and reduced the time per step by 19 to 26 %, so no
   gain over Transformer-XL was shown (docs/results.md).

   Quick start. The program searches for a network for "abcabc..", extracts it, and prints
   how it continues the text. A test compiles and runs it.

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
           stx_optim *gates = stx_optim_create(model->gates, NULL);
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
           int failed = !stx_ok(x);
           stx_destroy(x);
           return failed;
       }
   //<quickstart

   stx_par_save(model, path) saves the model to a file, and stx_par_open(x, path) creates
   it again in another program. stx_par_open also opens checkpoints of train_par;
   stx_vocab_open in seqtx_text.h returns their vocabulary.

   Patterns. A pattern lists the blocks in the order in which they run, beginning at the
   embedding: s is attention, f feed-forward, i identity. A count repeats the letter, or
   the group in parentheses, before it:

       s5f          5 attention, 1 feed-forward
       (sff)4f3     4 x (1 attention, 2 feed-forward), 3 feed-forward

   Own block types. desc.type is a list of up to three types (stx_par_type). Each has a
   letter for patterns and two functions. `weights` describes the parameters of a block,
   and `forward` computes the branch with stx_ operators. A type that depends on earlier
   tokens also has a memory: `rows` rows of `width` channels, which forward reads as
   in->past, and to which it appends *state. A causal convolution over k tokens stores its
   input, with rows = k - 1; a recurrent block stores its state, with rows = 1.

       stx_tensor *forward(stx_ctx *x, void *user, const stx_par_branch *in,
                           stx_tensor **state) {
           stx_tensor *rows = stx_concat(x, in->past, in->h);      // (B,k - 1 + T,D)
           *state = in->h;
           ..                                  // the result is (B,T,D)
       }
       stx_par_type conv = {'c', "conv", weights, forward, NULL, 2, 0, cost, 0};
       d.type = &conv;
       d.types = 1;
       d.pattern = "(cf)4s";                   // or NULL: the search has K = 4 branches

   The model adds the residual connection, the norm, dropout and, in a search, the gate.
   Everything else works as for the other branches: shares and latency, stx_par_argmax
   and _sample, stx_par_inherit, stx_par_count, checkpoints, recomputation, generation,
   and memories that are saved, copied or reset. A search computes every branch of every
   block, so each type makes it slower. examples/own_block.c is a complete program.

   Configuration (stx_par_desc). The "reference" column describes PAR's TensorFlow
   program with its base_model.sh. The "Transformer-XL" column describes the authors'
   program with its scripts for enwik8 (12 layers) and WikiText-103 (base); "zero" means
   that the field is 0.

       field              zero means        reference         Transformer-XL
       -----------------  ----------------  ----------------  -------------------------
       vocab (V)          vectors only      12000             205 / 267735
       pattern, blocks    supernet, 32      supernet, 6       (sf)12 / (sf)16
       type, types        none              none              none
       dim, heads         512, 8            128, 4            512, 8 / 410, 10
       inner (F)          4 D               512               2048 / 2100
       segment, mem (M)   128, segment      32, 16            512, 512 / 150, 150
       positions, sines   sines, split      sines, reference  zero
       pos_mode           distance          reference         zero
       full_scale         1 / sqrt(dh)      1 / dh            zero
       attn_relu, biases  no                both              zero
       own_uv             one pair for all  a pair each       zero
       norm_eps           1e-5              1e-3              zero
       gate_form, gate    logits, soft      pi, soft          -
       gate_eval          argmax            noise             -
       tau                1, then set       1 to 0.1, FACTOR  -
       words_out          adaptive          reference, with   tied / adaptive, with
                                            250, 2500         20000, 40000, 200000,
                                                              adaptive_in and tie_words
       pads, divide_all   no                id 0, yes         zero
       init               N(0,0.02)         Glorot            zero
       dropout            0                 0.1               0.1, also inner_dropout,
                                                              pos_dropout, final_dropout

   Transformer-XL's authors evaluate WikiText-103 with M = 640
   (stx_par_state_create_sized), and with clamp_len 400 and same_length 1, which are
   fields of stx_par_state. PAR trains weights and gates with learning rate 0.01; the
   weight decay is 1e-4 for weights and 5e-4 for gates.

   Adaptive vocabulary. The cutoffs divide the words into J + 1 clusters: cluster 0 is the
   head, the others are the tails. Cluster c has a table (size,width) and a projection
   (D,width) with width = floor(E / div_val^c). There are no projections if all widths are
   D. The logits of the words in a cluster are

       table (proj^T h) + bias

   The head also has one logit per tail: these J cluster logits are cluster.weight
   (proj^T h) + cluster.bias. The probability of a word in a tail is the probability of
   the tail in the head times that of the word in the tail. The cluster logits are
   stored after the logits of the head's words, the last tail first, as in the authors'
   code. With STX_PAR_OUT_REF, the head has width D, the tail projections have biases,
   and the first tail comes first. stx_par_cuts finds good cutoffs.

   Forward cost of a block, in multiply-adds per stream and call:

       's'      Wq, Wo               2 T D H dh
                Wkv                  2 S D H dh
                Wr                   S D H dh, once for all streams
                scores and sums      3 H dh T (n + T / 2)
       'f'      W1, W2               2 T D F
       mixture  both branches, and one pass over the rows for two norms and the mixing

   With STX_PAR_LEARNED_BIAS, a head costs as much as one of dh' columns, where dh' is
   the smallest multiple of 8 above dh.

   A memory takes B M D elements per attention block. Its buffers have space for 1.5 M
   rows (on a GPU, for M + T rows). Generation caches keys and values instead, which
   take 2 B M H dh elements per attention block. The cache's buffers have 2 M + 64 rows,
   or about 4 B M H dh elements.

   Fidelity to the authors' Transformer-XL and to PAR's reference
       Tested against independent float64 code, to 1e-10 in double: losses, per-token
       losses, gates, memories, all gradients and training steps. This covers PAR with
       stx_par_reference, and Transformer-XL with attn_type 0 and 1, post-norm and
       pre_lnorm, and plain, tied and adaptive vocabularies. The published parameter
       counts are reproduced.

       Corrected. A field of the desc restores the reference's behaviour:
           pos_mode    the reference numbers positions from the oldest key, so the row
                       of a distance changes while the memory fills
           gate_eval   the reference adds noise in evaluation
           gate_form   in the reference, gate parameters that fall below 0 get no
                       further gradient
       Corrected without a field: in the reference, U = 0 results in NaN, and the printed
       cutoffs are too small by 2. Its tau_end is a factor, as with STX_PAR_TAU_FACTOR.

       Different: matrices are (out,in), with the rows of keys before those of values;
       the reference has one kernel (D,3D) with columns Q, V, K. Padding stays hidden
       after it enters the memory. An optimiser's clip_value limits the summed gradient
       of a word; in the reference, it limits each summand.

       Omitted: Transformer-XL's attn_type 2 and 3, ext_len and sampled softmax; experts;
       a learned temperature, which the reference does not learn either.

       To reproduce Transformer-XL, set the fields below, use STX_ADAM with clip 0.25, and
       stx_schedule with STX_LR_COSINE and literal = 1 (otherwise, the learning rates
       differ). To reproduce PAR, call stx_par_reference, use STX_ADAM with eps 1e-7 and
       eps_hat = 1 for weights and gates, and STX_PAR_TAU_FACTOR. PAR's learning rate is
       the lower of a ramp from 0 and a cosine (train_par --schedule reference).

       Transformer-XL's tokens are (T,B) and its memories (n,B,D); here they are (B,T) and
       (B,n,D). Its list of memories ends with the output of the last layer, which no
       attention reads; here only the inputs of attention blocks are stored.

   Checkpoints of both programs can be converted in both directions; docs/convert.md lists
   the tensor names.

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

   Easy to get wrong
       - All rows of a step share one w unless desc.noise selects more draws. One draw per
         stream costs no more and has less variance.
       - `pads` affects only the loss. stx_par_forward and stx_par_loss attend to
         padding in the input. To hide it, call stx_par_embed, then stx_par_segment with
         pad, then stx_par_nll.
       - w is not p. Report p (stx_par_probs) and evaluate with argmax, because a training
         step computes the loss of a randomly drawn network.
       - m->w[l] and m->latency are results of the last forward pass, and the next
         stx_begin frees them. w[l] is NULL in an evaluation with argmax and in a fixed
         network. stx_par_total uses the latency of the last forward pass.
       - The gates are a separate parameter list, m->gates, and need a separate optimiser.
         The params of stx_par_as_lm contain only the weights, so save both lists.
       - A memory cannot detect where a text begins, so reset it there. Use a separate
         memory for evaluation.
       - same_length counts the query's own key: a query sees M keys, at distances 0
         to M - 1.
       - STX_PAR_LATENCY_FBNET requires costs in a unit in which the latency exceeds 1.
       - Generation equals evaluation with one token per call: each token sees the M rows
         before it. In a call with T tokens, the last one sees M + T - 1 rows, so the
         losses differ.

   GPU. Set the device in the desc passed to stx_create (see seqtx.h); nothing else
   changes. seqtx_cuda.cu includes the kernels of this header if both files are in the
   same directory. To replay steps as a CUDA graph, write the step as a function, as
   examples/train_par.c does:

       stx_tokens_set(x, ids, ..);    stx_tokens_set(x, targets, ..);
       stx_par_set_tau(model, tau);   stx_optim_set_lr(optim, lr);
       stx_step_run(x, stx_par_key(model, ids, targets, memory, 0), step, user);

   step() must make every call from stx_begin to stx_optim_step. Steps are replayed once
   the memories are full. Call stx_par_set_tau, _set_cost and _set_uniforms between
   steps.

   The compile-time options are described in seqtx.h.

   Reading order: stx__par_run (a block), stx__par_attention, stx_par_segment (the loop
   over blocks and the memory), stx__par_gate_of (gates); then the kernels in >>gate and
   >>mix, first stx_par_mix_plain; stx__par_cut (cutoffs); stx__par_gen_part (generation).
*/
#define STX__LETTERS 1
#include "seqtx.h"      /* hides single-letter macros; see the end of seqtx.h */
#ifndef SEQTX_PAR_H
#define SEQTX_PAR_H

#include "seqtx.h"

#ifdef __cplusplus
extern "C" {
#endif


// >>api: configuration

/* Values of stx_par_desc fields, one enum per field. The comments on the fields give
   the meanings. */

/* values of stx_par_desc.positions */
enum { STX_PAR_SINES = 0, STX_PAR_LEARNED, STX_PAR_LEARNED_BIAS };

/* values of stx_par_desc.sines */
enum { STX_PAR_SINES_SPLIT = 0, STX_PAR_SINES_REF };

/* values of stx_par_desc.pos_mode */
enum { STX_PAR_POS_DIST = 0, STX_PAR_POS_FIXED, STX_PAR_POS_REF };

/* values of stx_par_desc.gate_form */
enum { STX_PAR_FORM_LOGITS = 0, STX_PAR_FORM_PI };

/* values of stx_par_desc.gate */
enum { STX_PAR_SOFT = 0, STX_PAR_ST };

/* values of stx_par_desc.gate_eval */
enum { STX_PAR_EVAL_ARGMAX = 0, STX_PAR_EVAL_SOFT, STX_PAR_EVAL_NOISE };

/* values of stx_par_desc.noise */
enum { STX_PAR_NOISE_STEP = 0, STX_PAR_NOISE_SEQUENCE, STX_PAR_NOISE_TOKENS };

/* values of stx_par_desc.words_out */
enum { STX_PAR_OUT_ADAPTIVE = 0, STX_PAR_OUT_PLAIN, STX_PAR_OUT_TIED, STX_PAR_OUT_REF };

/* values of stx_par_desc.tie_projs */
enum { STX_PAR_TIE_NONE = 0, STX_PAR_TIE_ALL, STX_PAR_TIE_BUT_FIRST };

/* values of stx_par_desc.latency */
enum {
    STX_PAR_LATENCY_NONE = 0, STX_PAR_LATENCY_ADD, STX_PAR_LATENCY_HINGE, STX_PAR_LATENCY_FBNET
};

/* values of stx_par_desc.latency_w */
enum { STX_PAR_LATENCY_OF_P = 0, STX_PAR_LATENCY_OF_W };

/* values of stx_par_desc.init */
enum { STX_PAR_INIT_XL = 0, STX_PAR_INIT_REF };

/* Value of stx_par_desc.mem for a model without memory (0 selects the default) */
#define STX_PAR_NO_ROWS SIZE_MAX

/* Block types of the program, in addition to 's', 'f' and 'i': at most
   STX_PAR_MAX_TYPES. K, the number of branches of a mixture, is 3 + desc.types. */
enum { STX_PAR_MAX_TYPES = 3, STX_PAR_MAX_BRANCHES = 3 + STX_PAR_MAX_TYPES };

/* What a block type reads. */
typedef struct stx_par_branch {
    const struct stx_par_desc *desc;    /* with the defaults filled in */
    size_t l;                           /* the block */
    stx_tensor *const *w;               /* the block's weights, in the order in which the
                                           type describes them */
    stx_tensor *h;                      /* (B,T,D): the input, normalised with pre_norm.
                                           Rows of padding are 0 */
    stx_tensor *past;                   /* (B,rows,width): the newest rows of the block's
                                           memory, oldest first, as constants. Rows from
                                           before a text are 0. NULL if the type has no
                                           memory */
    const stx_ids *pad;                 /* (B,T): nonzero where h is padding; NULL without
                                           padding */
} stx_par_branch;

/* A block type of the program. A block computes LN(h + forward(h)), or h + forward(LN(h))
   with pre_norm; the model has the norm, dropout, gate and memory. See Own block types in
   the manual.

   weights   describes the weights of block l: fills in w[0 .. n), which are zeros at
             first, and returns n, at most STX_MAX_WEIGHTS. d has the defaults filled in.
             The parameters are named layers.<l>.<name>.<weight>. NULL: no weights
   forward   returns (B,T,D), computed by operators from in->h, in->past, in->w and
             constants. If `rows` is not 0, it also sets *state to a tensor (B,n,width),
             n >= 1, whose rows are appended to the block's memory. Returns NULL if it
             fails. It is called in training, evaluation and generation (with any T >= 1),
             and again in the backward pass if the block is recomputed, so it must have no
             side effects */
typedef struct stx_par_type {
    char        letter;         /* in patterns: a letter other than s, f, i and g */
    const char *name;           /* part of the parameters' names, such as "conv"; must be
                                   valid as long as the model */
    size_t    (*weights)(void *user, const struct stx_par_desc *d, size_t l, stx_weight *w);
    stx_tensor *(*forward)(stx_ctx *x, void *user, const stx_par_branch *in, stx_tensor **state);
    void       *user;           /* passed to both functions */
    size_t      rows, width;    /* memory: number of rows that forward reads, and their
                                   channels; width 0: D */
    double      cost;           /* time of a block, as in stx_par_desc.cost */
    double      pi0;            /* initial probability, as in stx_par_desc.pi0; 0: 1 / K */
} stx_par_type;

/* Configuration of a model. Zero means the default, which is given after "0:". */
typedef struct stx_par_desc {
    size_t vocab;           /* V; 0: no embedding or output head; use stx_par_segment */
    size_t dim;             /* D; 0: 512 */
    size_t heads;           /* H, at most 256; 0: 8 */
    size_t head_dim;        /* dh; 0: D / H. q, k and value have width H dh */
    size_t inner;           /* F; 0: 4 D */
    size_t blocks;          /* L; 0: the length of the pattern, or 32 without a pattern */
    const char *pattern;    /* the blocks, such as "(sfff)6f8"; see Patterns in the
                               manual. Copied. NULL or "": a supernet, in which every
                               block is a mixture */
    const stx_par_type *type;   /* block types of the program; copied */
    size_t types;           /* number of elements in `type`, at most STX_PAR_MAX_TYPES */

    size_t segment;         /* expected number of tokens per call, which determines the
                               table sizes; 0: 128. Calls may be shorter or longer */
    size_t mem;             /* M; 0: segment. STX_PAR_NO_ROWS: no memory */

    int    positions;       /* the position vectors. STX_PAR_SINES: sinusoids. _LEARNED:
                               each attention block has a table (M + segment,H dh),
                               indexed by distance. _LEARNED_BIAS: in addition, a bias per
                               distance and head, (M + segment,H), instead of v.r_t */
    int    sines;           /* order of the columns in the sinusoid table.
                               STX_PAR_SINES_SPLIT: sines, then cosines. _REF:
                               interleaved, the lowest frequency first */
    int    pos_mode;        /* which row of the sinusoid table is used for distance t.
                               STX_PAR_POS_DIST: t. _FIXED: M + segment - 1 - t. _REF:
                               S - 1 - t, where S is the number of keys in the call. The
                               last two require STX_PAR_SINES_REF */
    size_t clamp_len;       /* the largest distance, to which greater distances are
                               clamped; 0: no limit. Requires STX_PAR_POS_DIST */
    int    same_length;     /* 1: every query sees at most M keys, including its own */
    int    full_scale;      /* 1: scores are divided by dh instead of sqrt(dh) */
    int    attn_relu;       /* 1: a ReLU follows Wo */
    int    biases;          /* 1: Wq, Wkv, Wr and Wo have biases. W1 and W2 always have them */
    int    own_uv;          /* 1: each attention block has a separate u and v; 0: all share one
                               pair */
    int    pre_norm;        /* 1: blocks compute h + branch(LN(h)), and a norm follows the
                               last block; 0: blocks compute LN(h + branch(h)) */
    int    no_final_norm;   /* 1: no norm after the last block; pre_norm only */
    double norm_eps;        /* epsilon of the layer norms; 0: 1e-5 */

    double dropout;         /* dropout probability, in [0,1), of the embedding and of each branch's
                               output */
    double attn_dropout;    /* dropout probability, in [0,1), of attention weights */
    double inner_dropout;   /* dropout probability, in [0,1), inside the feed-forward network */
    double pos_dropout;     /* dropout probability, in [0,1), of the sines, before Wr */
    double final_dropout;   /* dropout probability, in [0,1), of the last hidden states */

    int    gate_form;       /* meaning of al. STX_PAR_FORM_LOGITS: logits. STX_PAR_FORM_PI:
                               unnormalised probabilities, as in the reference; see The
                               gate in the manual */
    double pi0[3];          /* initial probabilities of attention, feed-forward and
                               identity; if all are 0: 0.33, 0.33, 0.34, or 1 / K each
                               with types */
    int    gate;            /* the gate in training. STX_PAR_SOFT: w = y. STX_PAR_ST: one-hot w
                               with the gradient of y */
    int    gate_eval;       /* the gate in evaluation. STX_PAR_EVAL_ARGMAX: only the most probable
                               branch runs. _SOFT: w = p. _NOISE: as in training */
    int    noise;           /* number of draws per block. STX_PAR_NOISE_STEP: 1. _SEQUENCE: 1 per
                               stream. _TOKENS: 1 per noise_tokens of each stream */
    size_t noise_tokens;    /* number of tokens per draw; STX_PAR_NOISE_TOKENS only */
    double tau;             /* initial temperature; 0: 1. stx_par_set_tau changes it */

    int    adaptive_in;     /* 1: adaptive embedding with the output's cutoffs; 0: an
                               embedding table (V,D) */
    int    words_out;       /* the output layer. STX_PAR_OUT_ADAPTIVE: Transformer-XL's
                               adaptive softmax. _PLAIN: a matrix (V,D) and a bias. _TIED:
                               the matrix is the embedding. _REF: see Adaptive vocabulary
                               in the manual */
    double emb_scale;       /* factor applied to the embedding; 0: sqrt(D) */
    size_t emb;             /* E, width of the first cluster; 0: D */
    size_t cutoff[STX_MAX_CLUSTERS - 1], cutoffs;   /* cutoff: first ids of the tails, in
                                                       increasing order. cutoffs: number
                                                       of tails; 0: one cluster */
    double div_val;         /* cluster c has width floor(E / div_val^c); 0: 1 */
    double proj_factor;     /* STX_PAR_OUT_REF: cluster c >= 1 has width
                               max(floor(D / proj_factor^c), 1); 0: 4 */
    size_t proj_dims[STX_MAX_CLUSTERS - 1];     /* width of each tail; 0: the width that
                                                   proj_factor gives. STX_PAR_OUT_REF
                                                   only */
    int    tie_words;       /* 1: adaptive input and output share tables */
    int    tie_projs;       /* which projections adaptive input and output share: none
                               (STX_PAR_TIE_NONE), all (_ALL), or all but the first
                               (_BUT_FIRST) */
    int    one_proj;        /* 1: with div_val 1, all input clusters share one projection (D,E).
                               With tied projections, the output clusters share it too */

    int    pads;            /* 1: targets equal to pad_id have no loss. Padding in the input is
                               still attended to; see Easy to get wrong */
    int32_t pad_id;         /* id of padding, below vocab */
    int    divide_all;      /* 1: divide the loss by B T; 0: by the number of targets with a loss */

    int    latency;         /* how the latency affects the loss; see stx_par_total */
    int    latency_w;       /* the latency in the loss. STX_PAR_LATENCY_OF_P: the expected
                               latency under p, without noise. _OF_W: the latency of w */
    double cost[2];         /* times of an attention block, cost[0], and of a feed-forward
                               block, cost[1]. An identity takes 0 */
    double latency_weight;
    double latency_target;  /* target; STX_PAR_LATENCY_HINGE only */
    double latency_power;   /* exponent; STX_PAR_LATENCY_FBNET only; 0: 0.6 */

    int    init;            /* how matrices are initialised. STX_PAR_INIT_XL:
                               N(0,init_std). STX_PAR_INIT_REF: Glorot */
    double init_std;        /* standard deviation with STX_PAR_INIT_XL; 0: 0.02 */
    double proj_std;        /* standard deviation of the initial vocabulary projections
                               with STX_PAR_INIT_XL; 0: 0.01 */

    size_t recompute_layers;    /* number of blocks to recompute in the backward pass,
                                   counted from the last; SIZE_MAX: all. Recomputing all
                                   takes about 25 % more time and much less memory */
} stx_par_desc;

/* Sets the options in which PAR's reference implementation differs from the defaults,
   except for the sizes; see the "reference" column in the manual. With a single
   softmax, the reference's loss includes padding; to reproduce this, set words_out to
   STX_PAR_OUT_PLAIN and pads to 0 afterwards. */
STX_DEF void stx_par_reference(stx_par_desc *d);

/* The parameters of a block type of the program, in one block. */
typedef struct stx_par_own {
    stx_tensor *gain, *shift;               /* (D) each: the norm */
    stx_tensor *w[STX_MAX_WEIGHTS];         /* its weights, see stx_par_type */
} stx_par_own;

/* A block and its parameters. */
typedef struct stx_par_block {
    int         kind;                       /* what the block runs: 's', 'f', 'i', the letter
                                               of a type, or 'g' for a mixture */
    stx_tensor *attn_gain, *attn_shift;     /* (D) each: LN_a */
    stx_tensor *wq, *wkv, *wr, *wo;         /* wq and wr (H dh,D), wkv (2 H dh,D) with the
                                               rows of the keys first, wo (D,H dh) */
    stx_tensor *bq, *bkv, *br, *bo;         /* biases of wq, wkv, wr and wo, or NULL */
    stx_tensor *u, *v;                      /* (H,dh) each, separate or shared by all
                                               blocks; v is NULL with rel_bias */
    stx_tensor *rel, *rel_bias;             /* learned positions: rel (M + segment,H dh)
                                               and biases rel_bias (M + segment,H). Row t
                                               is for distance t */
    stx_tensor *ff_gain, *ff_shift;         /* (D) each: LN_f */
    stx_tensor *w1, *b1, *w2, *b2;          /* w1 (F,D), b1 (F), w2 (D,F), b2 (D) */
    stx_par_own own[STX_PAR_MAX_TYPES];     /* parameters of desc.type[t]; NULL if the block
                                               does not run it */
    stx_tensor *al;                         /* (K): the gate's parameters, owned by
                                               stx_par.gates; mixtures only */
} stx_par_block;

/* Positions for distances up to rows - 1. Distances beyond `clamp` are treated as
   `clamp`; 0 means no limit. */
typedef struct stx_par_positions {
    size_t      rows, clamp;
    stx_tensor *sines;      /* (rows,D), constant. The last row is for distance 0; with
                               STX_PAR_POS_REF, the first row is for position 0. NULL
                               before the first forward pass, and with learned
                               positions */
    stx_ids    *far_first;  /* (1,rows): row ids in the learned tables; the last one is for
                               distance 0 */
} stx_par_positions;

/* A model. The context owns it and its parameters. */
typedef struct stx_par {
    stx_ctx       *ctx;
    stx_par_desc   desc;                /* with the defaults filled in; desc.pattern is
                                           `pattern`, and desc.type is the model's copy.
                                           tau and cost are the current values. `gate` and
                                           gate_eval may be changed between steps */
    char          *pattern;             /* L letters, or NULL for a supernet */
    stx_params    *params;              /* the weights */
    stx_params    *gates;               /* `al` of each block, named arch.<l>, for a separate
                                           optimiser; NULL for a fixed network */
    stx_vocab_io  *vocab_io;            /* embedding and output head; NULL without vocab */
    stx_par_block *block;               /* [L]: the blocks */
    stx_tensor    *u, *v;               /* (H,dh), shared by all attention blocks; NULL with
                                           own_uv */
    stx_tensor    *final_gain, *final_shift;
    stx_par_positions pos[2];           /* position tables: pos[0] for desc.clamp_len,
                                           pos[1] for the most recently used other
                                           clamp_len */
    stx_tensor    *tau;                 /* (1), the temperature */
    stx_par_type  *own;                 /* [desc.types], desc.type for writing */
    stx_real      *cost;                /* (K), on the device: the time of each branch */
    stx_tensor    *keep[2];             /* (2,H dh') and (2,D): a row of ones and a row of
                                           zeros, from which stx__par_keep builds the
                                           factors that zero rows of padding in outputs of
                                           attention and in inputs of own types. NULL
                                           until padding occurs */
    int            frozen;              /* 1: the gates are constants; see stx_par_freeze */
    stx_real      *uniforms;            /* the caller's U, on the device; see
                                           stx_par_set_uniforms */
    size_t         uniforms_count;      /* number of values in uniforms; 0: U is drawn at random */
    size_t         uniforms_capacity;   /* number of values that uniforms has space for */
    stx_tensor   **w;                   /* [L]: w (R,K) of the last forward pass, valid until
                                           the next stx_begin. NULL if the block did not
                                           run as a mixture */
    stx_tensor    *latency;             /* (1), total latency of all blocks in the last forward
                                           pass, valid until the next stx_begin; or
                                           NULL */
    stx_attention_record *attended;     /* [L], for stx_par_attention_map */
} stx_par;

/* Copies `from` to `to`, fills in the defaults and checks the result. The pattern
   string is shared, not copied. Returns 1. If the desc is invalid, returns 0 and,
   unless x is NULL, sets an error that names the field. */
STX_DEF int stx_par_resolve(stx_ctx *x, const stx_par_desc *from, stx_par_desc *to);

/* Creates a model with initialised parameters in context x, which owns it. The desc is
   copied. Returns NULL and sets an error if the desc is NULL or invalid, or if memory
   runs out. */
STX_DEF stx_par *stx_par_create(stx_ctx *x, const stx_par_desc *d);

/* stx_par_open creates the model in a file of stx_par_save or in a checkpoint of
   train_par, in context x, which owns it. Returns NULL after an error. stx_par_save
   writes the model to a file, atomically; returns 1, or 0 after an error. The gates of
   a supernet are included. stx_par_family is for files that contain more than a model,
   and for programs that accept any family. See stx_model_open, stx_model_write and
   stx_lm_open in seqtx.h. */
STX_DEF stx_par *stx_par_open(stx_ctx *x, const char *path);
STX_DEF int stx_par_save(stx_par *m, const char *path);
STX_DEF const stx_family *stx_par_family(void);

/* The model's weights, owned by the context; NULL if m is NULL. */
STX_DEF stx_params *stx_par_params(stx_par *m);

/* Returns the number of weights of a model with this desc, without creating it. Tied
   weights are counted once. The K L parameters of a supernet's gates are not included.
   Returns 0, without setting an error, if the desc is invalid, and SIZE_MAX if the
   number does not fit in size_t. */
STX_DEF size_t stx_par_count(const stx_par_desc *d);


// >>api: memory

/* A memory: the past inputs of all attention blocks for B streams. A forward pass
   reads one memory and writes another, or the same one. Use separate memories for
   training and evaluation. A new memory is empty. The KV cache of generation is
   separate. */
typedef struct stx_par_state {
    stx_par  *model;
    size_t    B, M;
    size_t    clamp_len;    /* applies to forward passes that read this memory, and to
                               passes that write this memory and read none. Initially
                               the model's clamp_len; may be set, for example to
                               evaluate with a longer memory */
    int       same_length;  /* 1: every query sees at most M keys, including its own;
                               requires M >= 2. Applies to the same passes as clamp_len */
    stx_memory *mem;        /* for each attention block (B,n,D), oldest row first */
    stx_memory *own;        /* the memory of block l for desc.type[t] in layer l types + t; NULL
                               if no type has a memory */
    uint64_t  calls;        /* number of forward passes since a reset: a pass that writes
                               this memory sets it to 1 plus the `calls` of the memory
                               that it read, or to 1 if it read none */
    int       training;     /* 1: the last forward pass that wrote this memory was a
                               training step */
} stx_par_state;

/* Creates an empty memory for B >= 1 streams. Returns NULL and sets an error if B is 0
   or memory runs out. It is freed by stx_par_state_free, or with the context. */
STX_DEF stx_par_state *stx_par_state_create(stx_par *m, size_t B);

/* Like stx_par_state_create, but with a capacity of M rows instead of the model's
   capacity. M = 0 means no memory. Distances beyond the end of a learned position table
   use its last row. */
STX_DEF stx_par_state *stx_par_state_create_sized(stx_par *m, size_t B, size_t M);

STX_DEF void stx_par_state_free(stx_par_state *s);

/* Empties the memory. Does nothing after an error. */
STX_DEF void stx_par_state_reset(stx_par_state *s);

/* Empties the memory of stream b, for example when a new text begins in it. */
STX_DEF void stx_par_state_reset_stream(stx_par_state *s, size_t b);

/* Copies the memory of streams c .. c + n - 1 of `from` to streams b .. b + n - 1 of
   `to`, for example to regroup batches. Both must belong to the same model and have the
   same M. Returns 1, or sets an error and returns 0. */
STX_DEF int stx_par_state_copy(stx_par_state *to, size_t b, const stx_par_state *from, size_t c,
                               size_t n);

/* Copy the memory of block l to or from host memory. stx_par_state_get writes (B,n,D)
   values to out, oldest row first, where n = s->mem->layer[l].count is the number of rows
   per stream. stx_par_state_set replaces the block's memory with n <= M rows per stream.
   stx_par_state_get fails while a stream lacks rows (after stx_par_state_reset_stream or
   because of padding), because plain values cannot mark rows as missing. The memories of
   own block types are not included. Both return 1, or set an error and return 0. */
STX_DEF int stx_par_state_get(const stx_par_state *s, size_t l, stx_real *out);
STX_DEF int stx_par_state_set(stx_par_state *s, size_t l, const stx_real *in, size_t n);

/* stx_par_state_save saves the memory to a checkpoint. The entries are "<prefix>calls"
   and those that stx_memory_save writes under "<prefix>mem." and, with own block types,
   "<prefix>own."; the prefix can have at most 64 bytes. stx_par_state_load loads it into
   a memory with the same B. Both return 1, or set an error and return 0; a failed load
   leaves s empty. */
STX_DEF int stx_par_state_save(stx_writer *w, const stx_par_state *s, const char *prefix);
STX_DEF int stx_par_state_load(stx_par_state *s, const stx_file *f, const char *prefix);


// >>api: forward

/* Runs h (B,T,D), a segment of T >= 1 vectors per stream, and returns the last hidden
   states (B,T,D). pad (B,T) is nonzero where h is padding; NULL means no padding. No
   query attends to padding, in this call or later, but padded elements of h must be
   finite. `in` is the memory to read (NULL if empty), and `out` the memory to write
   (NULL to write none); they may be the same. Gradients reach h but not the memory.
   Inside stx_recompute, `out` must be NULL. Returns NULL and sets an error if the
   shapes do not match or a memory belongs to another model. After an error, `out` may
   be partly written: reset it. */
STX_DEF stx_tensor *stx_par_segment(stx_par *m, stx_tensor *h, const stx_ids *pad,
                                    const stx_par_state *in, stx_par_state *out);

/* ids (B,T) -> embedding (B,T,D), scaled, with dropout. NULL after an error. */
STX_DEF stx_tensor *stx_par_embed(stx_par *m, const stx_ids *ids);

/* ids (B,T) -> last hidden states (B,T,D): stx_par_embed, then stx_par_segment. */
STX_DEF stx_tensor *stx_par_forward(stx_par *m, const stx_ids *ids, const stx_par_state *in,
                                    stx_par_state *out);

/* Hidden states (B,T,D) -> logits (B,T,V), which are differentiable. With an adaptive
   output, this is an error, because each cluster has a separate softmax. NULL after an
   error. */
STX_DEF stx_tensor *stx_par_logits(stx_par *m, stx_tensor *h);

/* Hidden states (B,T,D) -> log p (B,T,V), which is not differentiable. Works with every
   kind of output. NULL after an error. */
STX_DEF stx_tensor *stx_par_log_probs(stx_par *m, stx_tensor *h);

/* Negative log-likelihood (1) of targets (B,T), given hidden states h (B,T,D), in nats
   per token. Targets that are negative, or equal to pad_id with pads, have no loss. The
   sum over the other targets is divided by their number, or by B T with divide_all; it
   is 0 if there are none. If rows is not NULL, *rows receives the loss of each target,
   (B T), which is 0 for targets without a loss and is not differentiable. NULL after an
   error. */
STX_DEF stx_tensor *stx_par_nll(stx_par *m, stx_tensor *h, const stx_ids *targets,
                                stx_tensor **rows);

/* Runs stx_par_forward on ids (B,T) with memories `in` and `out`, and returns the
   negative log-likelihood (1) of targets (B,T), as stx_par_nll does. NULL after an
   error. */
STX_DEF stx_tensor *stx_par_loss(stx_par *m, const stx_ids *ids, const stx_ids *targets,
                                 const stx_par_state *in, stx_par_state *out);

/* Combines nll (1) with the latency of the last forward pass, lat = sum of p_lk cost_k
   over blocks l and branches k (or of w_lk cost_k with STX_PAR_LATENCY_OF_W). weight,
   target and power are the desc's latency_weight, latency_target and latency_power:

       ADD      nll + weight lat
       HINGE    nll + weight max(0, lat / target - 1)
       FBNET    nll weight ln(max(lat, 1))^power        choose units in which lat > 1

   Returns nll itself in evaluation, with STX_PAR_LATENCY_NONE and for a fixed network.
   Call stx_backward on the result. In a process group, a rank knows w only for its own
   streams, so HINGE and FBNET require STX_PAR_LATENCY_OF_P or STX_PAR_NOISE_STEP. */
STX_DEF stx_tensor *stx_par_total(stx_par *m, stx_tensor *nll);

/* Returns the key for stx_step_run: a hash of all host-side decisions in a step with
   ids, targets and memory s, each of which may be NULL. The hash includes salt: for a
   step with several parts or memories, pass the key of one as the salt of the next.
   Evaluate with a memory that training does not use: if the last forward pass that
   wrote s was a training step, the key omits gate_eval and the values of the gates. An
   evaluation depends on them, so a replayed step could run the wrong branches. */
STX_DEF uint64_t stx_par_key(const stx_par *m, const stx_ids *ids, const stx_ids *targets,
                             const stx_par_state *s, uint64_t salt);

/* Returns the attention weights of block l in stream b, of the last forward pass of this
   step (see stx_attention_map). The keys are the rows of the memory and the tokens of
   the segment. In a mixture, the gate multiplies what these weights give. Rows of padded
   queries have no effect: the model sets their attention output to 0. Call it before the
   next stx_begin and before the parameters change. On a GPU, it copies from the device,
   like stx_get. Returns NULL without an error if the block runs no attention in this
   step. Returns NULL and sets an error if there was no forward pass, if l or b is out of
   range, or if the block is recomputed (recompute_layers with STX_TRAIN). */
STX_DEF const stx_attention_map *stx_par_attention_map(const stx_par *m, size_t l, size_t b);


// >>api: search

/* Sets the temperature of the following steps. It is a scalar on the device that
   replayed steps read, so set it between steps. */
STX_DEF void stx_par_set_tau(stx_par *m, double tau);

/* Returns the temperature after n updates, which is constant after `total` updates.
   Returns 1 if `a` is NULL. In terms of the fields of `a`:

       TARGET    from (to / from)^(n / total)
       FACTOR    from to^(n / total), where `to` is a factor, as in PAR's reference */
enum { STX_PAR_TAU_TARGET = 0, STX_PAR_TAU_FACTOR };

typedef struct stx_par_anneal {
    int      form;
    double   from, to;
    uint64_t total;
} stx_par_anneal;

STX_DEF double stx_par_tau(const stx_par_anneal *a, uint64_t n);

/* Sets the times of an attention block (cost[0]), of a feed-forward block (cost[1]) and
   of the own types (cost[2] ..), for example to measured times. */
STX_DEF void stx_par_set_cost(stx_par *m, const double *cost);

/* If frozen is 1, the parameters of the gates become constants at the next forward pass,
   and their gradients are not computed. If frozen is 0, they become trainable again. */
STX_DEF void stx_par_freeze(stx_par *m, int frozen);

/* Makes the following calls use the values u (R,L,K) instead of a random U. u is in
   host memory, and each value must be above 0 and below 1. R = stx_par_draws(m, B, T)
   for calls with B streams of T tokens, and count is the number of values, K L R.
   u = NULL restores random draws. Sets an error and keeps the previous values if count
   is 0 or not a multiple of K L (with STX_PAR_NOISE_STEP: not K L), or if a value is
   out of range. A forward pass that needs a different number of draws fails. The values
   are copied to the device, where replayed steps read them, so set them between steps. */
STX_DEF void stx_par_set_uniforms(stx_par *m, const stx_real *u, size_t count);

/* Returns R, the number of draws per block in a call with B streams of T tokens. */
STX_DEF size_t stx_par_draws(const stx_par *m, size_t B, size_t T);

/* Writes the current branch probabilities of all gates to p (L,K). Returns 1, or 0
   after an error or for a fixed network. */
STX_DEF int stx_par_probs(const stx_par *m, double *p);

/* Patterns. Each function writes a string with its terminating 0 into out, which has
   space for `capacity` bytes, and returns its length, or 0 if it does not fit or the
   arguments are invalid.

   expand    a pattern with one letter per block; see Patterns in the manual. Accepts
             only s, f and i; stx_par_create also accepts the letters of desc.type
   format    the inverse of expand: a short form with counts
   rule      the paper's rule: floor(L / every) attention blocks, evenly spaced within the
             first two thirds
   argmax    the currently most probable branch of each block
   sample    a branch of each block, drawn from its p; depends only on p, seed and n */
STX_DEF size_t stx_par_expand(char *out, size_t capacity, const char *pattern);
STX_DEF size_t stx_par_format(char *out, size_t capacity, const char *pattern);
STX_DEF size_t stx_par_rule(char *out, size_t capacity, size_t L, size_t every);
STX_DEF size_t stx_par_argmax(const stx_par *m, char *out, size_t capacity);
STX_DEF size_t stx_par_sample(const stx_par *m, uint64_t seed, uint64_t n, char *out,
                              size_t capacity);

/* Copies the weights of all branches of `to` from `from`, a supernet or a fixed
   network. The contexts may differ. (To load weights from a file instead, call
   stx_params_load on the params of `to`.) Returns 1. If `from` lacks a weight or has it
   in another shape, sets an error and returns 0. */
STX_DEF int stx_par_inherit(stx_par *to, const stx_par *from);


// >>api: cuts

/* Finds cutoffs of an adaptive vocabulary that minimise a cost exactly, given the
   counts of V words in the order of their ids. Descending counts give the best result;
   set `sort` to sort them. cut_1 < .. < cut_J are the cutoffs, with cut_0 = 0 and
   cut_{J+1} = V. Cluster 0 is the head; tail k has size_k = cut_{k+1} - cut_k words,
   share_k of all counts, and width_k = proj_dims[k-1], or, if that is 0, max(floor(D /
   factor^k), 1). The costs are:

       REF     sum over all clusters of size times count, as in PAR's reference, which
               charges the head only for the tokens in the head
       MACS    D (cut_1 + J) + sum_k share_k width_k (D + size_k), k = 1..J:
               multiply-adds per token
       TIME    time(cut_1 + J, D, 1)
                   + sum_k time(width_k, D, share_k) + time(size_k, width_k, share_k)

   The algorithm requires the cost of a cluster of the words i .. j - 1 to be Monge:
   cost(i,j) + cost(i2,j2) <= cost(i,j2) + cost(i2,j) for i <= i2 <= j <= j2. REF and
   MACS satisfy this. TIME does if the time for x columns and y rows of the batch has
   the form of 1609.04309, max(t0 + t1 x0 y0, t0 + t1 x y): a constant plus a time per
   multiply-add, and no less than for x0 columns and y0 rows. Otherwise, the result may
   not be optimal. Ties are resolved in favour of larger last cutoffs, as in the
   reference. */
enum { STX_PAR_CUTS_REF = 0, STX_PAR_CUTS_MACS, STX_PAR_CUTS_TIME };

typedef struct stx_par_cuts_desc {
    size_t clusters;            /* J + 1, 1 to 8 */
    int    cost;                /* STX_PAR_CUTS_REF, _MACS or _TIME */
    int    sort;                /* 1: first sort the counts in descending order */
    size_t dim;                 /* D, for MACS and TIME */
    double factor;              /* see width_k above; 0: 4 */
    const size_t *proj_dims;    /* (J), or NULL */
    /* STX_PAR_CUTS_TIME: returns the time of a GEMM with `columns` output columns and
       inner dimension `inner`, on the fraction `share` of a batch's rows */
    double (*time)(void *user, size_t columns, size_t inner, double share);
    void  *user;
} stx_par_cuts_desc;

/* Writes cut_1 .. cut_J to cut (J), in the form of stx_par_desc.cutoff, and the cost to
   *total unless total is NULL. Returns 1. If a cluster would be empty (V <= J) or a sum
   does not fit in 63 bits, sets an error and returns 0. */
STX_DEF int stx_par_cuts(stx_ctx *x, size_t *cut, double *total, const uint64_t *counts, size_t V,
                         const stx_par_cuts_desc *d);


// >>api: generation

/* A generator, which processes text token by token with a KV cache. Every token sees
   the M rows before it, as in an evaluation with one token per call, regardless of how
   many tokens each call feeds. (In a forward pass over T tokens, the last one sees
   M + T - 1 rows.) Works for fixed networks, and for supernets with STX_PAR_EVAL_ARGMAX
   or _SOFT. After the parameters change, reset the generator or create a new one. */
typedef struct stx_par_gen {
    stx_par   *model;
    size_t     B, M;
    size_t     clamp_len;       /* initially the model's clamp_len; may be set before
                                   the first step */
    int        same_length;     /* initially the model's same_length; may be set before
                                   the first step. See stx_par_state */
    size_t     rows;            /* number of cached rows so far, up to M */
    stx_cache *cache;           /* keys and values of each attention block */
    stx_real **pos;             /* [L]: r_t of each attention block, (M + 1,H dh') */
    stx_memory *own;            /* memories of own block types, as in stx_par_state */
    char      *kind;            /* (L): what each block runs: s, f, i, the letter of a type,
                                   or g for a mixture */
    int32_t   *pad;             /* (B,M), on the host, the newest row last: nonzero for rows from
                                   before a stream's reset */
    int        masked;          /* 1: an element of pad is nonzero */
    int        stale;           /* 1: pos and kind must be recomputed */
} stx_par_gen;

STX_DEF stx_par_gen *stx_par_gen_create(stx_par *m, size_t B);

/* Like stx_par_gen_create, but with M rows of memory instead of the number that the
   model has. */
STX_DEF stx_par_gen *stx_par_gen_create_sized(stx_par *m, size_t B, size_t M);

STX_DEF void stx_par_gen_free(stx_par_gen *g);
STX_DEF void stx_par_gen_reset(stx_par_gen *g);

/* Empties the memory and the cache of stream b. The other streams continue. */
STX_DEF void stx_par_gen_reset_stream(stx_par_gen *g, size_t b);

/* Resets the generator and continues from a memory with the same model and B, of which
   up to M rows are copied. Calls stx_begin(x, STX_EVAL). Returns 1, or sets an error
   and returns 0. */
STX_DEF int stx_par_gen_set(stx_par_gen *g, const stx_par_state *from);

/* Embeddings h (B,T,D), T >= 1 -> last hidden states (B,T,D). Call
   stx_begin(x, STX_EVAL) first. */
STX_DEF stx_tensor *stx_par_gen_step(stx_par_gen *g, stx_tensor *h);

/* Feeds n >= 1 tokens per stream, ids (B,n), and returns logits (B,V) of the next
   token, or log p with an adaptive output. Returns NULL after an error. The result is
   in host memory, ready for stx_sample, and valid until the next call. Calls
   stx_begin(x, STX_EVAL), so do not call it between a forward pass and its backward
   pass. */
STX_DEF const stx_real *stx_par_gen_feed(stx_par_gen *g, const int32_t *ids, size_t n);

/* Returns the model as a table of functions, for programs that accept any model family.
   The window argument is the number of memory rows in evaluation; 0 means M. The
   table's params field contains only the weights; the caller must save and train the
   gates (stx_par.gates) separately. If m is NULL or has no vocab, all fields are NULL. */
STX_DEF stx_lm stx_par_as_lm(stx_par *m);


// >>api: kernels

/* The gate of one block, for R draws. See The gate in the manual:

       y    = softmax((ln pi + g) / tau), g = -ln(-ln U); without noise g = 0 and tau = 1,
              so y = p
       w    = y, or, if hard, the one-hot vector of the first largest element of y
       lat  = before[0] + sum_k p_k cost[k] (latency_w = STX_PAR_LATENCY_OF_P), or
              before[0] + the mean over draws of sum_k w_k cost[k] (_OF_W)

   U_k of a draw is uniforms[draw * uniforms_stride + k], or if uniforms is NULL

       ((bits >> 9) + 0.5) 2^-23, bits = word k of stx_philox(seed, stream, first + draw),
                                  or word k - 4 with stream + 2^61 if k >= 4

   which is never 0 or 1, and is exact in float. All results are computed in double and
   rounded once. The backward kernel reads y but not w, so a hard gate has the gradient
   of y. With STX_PAR_LATENCY_OF_W, it first adds dlat cost[k] / R to dw_k. Then:

       ds_k      = sum over draws of y_k (dw_k - y.dw) / tau, in ascending order
       c_k       = dlat (cost[k] - sum p cost) with the latency of p, else 0
       dal_k    += ds_k - p_k sum ds + p_k c_k    with STX_PAR_FORM_LOGITS; sum ds is 0
                                                  except for the rounding of y
       dal_k    += ds_k / pi_k + c_k / sum pi     with STX_PAR_FORM_PI, where al_k >= 0
       dbefore  += dlat

   All values are floats in every precision. */
typedef struct stx_par_gate_args {
    size_t R, uniforms_stride;
    int    branches;                /* K, at most STX_PAR_MAX_BRANCHES; 0: 3 */
    int    form;                    /* STX_PAR_FORM_LOGITS or STX_PAR_FORM_PI */
    int    hard, noisy;
    int    latency_w;               /* STX_PAR_LATENCY_OF_P or _OF_W */
    uint64_t seed, stream, first;
    const stx_real *al;             /* (K): parameters of the gate */
    const stx_real *tau;            /* (1): temperature */
    const stx_real *uniforms;       /* (R,..), or NULL */
    const stx_real *cost, *before;  /* cost (K) and before (1); before = NULL means 0 */
    stx_real *w, *y;                /* (R,K); y may alias w unless hard is set */
    stx_real *lat;                  /* (1), the latency. If it is NULL in both kernels, no
                                       latency is computed, and cost, before, dlat and
                                       dbefore are not used */
    const stx_real *dw, *dlat;      /* dw (R,K) and dlat (1); NULL means 0 */
    stx_real *dal, *dbefore;        /* dal (K) and dbefore (1); NULL if not needed */
} stx_par_gate_args;

STX_KERNEL(stx_par_gate_fwd, (stx_ctx *x, const stx_par_gate_args *a))
STX_KERNEL(stx_par_gate_bwd, (stx_ctx *x, const stx_par_gate_args *a))

/* The mixture of a block's branches, row by row:

       y = w0 Y0 + w1 Y1 + w2 h       Y_k = layernorm(z_k), z_k = h + branch_k, k = 0, 1

   Each norm has a gain and a shift. If gain[0] is NULL, there are no norms: Y_k = z_k.
   A term whose weight is 0 is omitted, so a one-hot w gives bit-exactly the result of
   the chosen branch alone (stx_residual_norm). The rows are divided into periods: the T
   rows of a stream, or all N rows if they share one draw. Each period is divided into
   runs of rows_per_draw rows, the last of which may be shorter. Each run has one draw,
   so the index of row n's draw is

       floor(n / period) ceil(period / rows_per_draw)
           + floor((n mod period) / rows_per_draw)

   The forward kernel writes y and, with norms, mean and rstd. The backward kernel
   computes, with xh_k = (z_k - mean_k) rstd_k:

       dw_k     += sum dy Y_k, dw_2 += sum dy h       over the rows of a draw, ascending,
                                                      and their channels
       dgain_k  += sum_n w_k dy xh_k                  dshift_k += sum_n w_k dy
       dz_k      = rstd_k (dxh - mean(dxh) - xh_k mean(dxh xh_k)), dxh = w_k dy gain_k
                   without norms w_k dy
       dbranch_k = or += dz_k
       dh        = or += w2 dy + dz_0 + dz_1

   A gradient that is NULL is not computed. */
typedef struct stx_par_mix_args {
    size_t N, C;                    /* N rows of C channels */
    size_t period, rows_per_draw;   /* which rows share a draw. There are (N / period)
                                       ceil(period / rows_per_draw) draws */
    stx_real eps;
    const stx_real *h, *branch[2];  /* (N,C) */
    const stx_real *w;              /* (draws,3): float in every precision, as are mean, rstd, gain,
                                       shift and dw */
    const stx_real *gain[2], *shift[2];         /* (C) each */
    stx_real *y;                    /* (N,C) */
    stx_real *mean[2], *rstd[2];    /* (N) each */
    const stx_real *dy;             /* (N,C) */
    stx_real *dh, *dbranch[2];      /* (N,C) */
    int    add_h, add[2];           /* 1: add to dh or dbranch[k] instead of overwriting it */
    stx_real *dw, *dgain[2], *dshift[2];        /* dw (draws,3), dgain[k] and dshift[k] (C) */
    double *work;                   /* (N,3) on the device, scratch memory of the backward
                                       kernel */
} stx_par_mix_args;

STX_KERNEL(stx_par_mix_fwd, (stx_ctx *x, const stx_par_mix_args *a))
STX_KERNEL(stx_par_mix_bwd, (stx_ctx *x, const stx_par_mix_args *a))

/* A plain definition of stx_par_mix_fwd and stx_par_mix_bwd, element by element in host
   memory, for readers and tests. Computes the forward pass, or the backward pass if dy
   is not NULL. The backward pass adds to every gradient, and does not read work, add_h
   or add. Each term is computed in double; gradients accumulate in stx_real. Terms of
   weight 0 are not omitted. */
STX_DEF void stx_par_mix_plain(const stx_par_mix_args *a);

/* Computes the loss (1) from nll (1) and lat (1); see stx_par_total. kind is
   STX_PAR_LATENCY_ADD .. _FBNET. The backward kernel adds to dnll and dlat (1) if they
   are not NULL. Results are computed in double and rounded once. For lat <= 1, FBNET
   has loss 0 and no gradient. */
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

/* Stop reading here if you only want the API. */
#endif /* SEQTX_PAR_H */

#if (defined(SEQTX_IMPLEMENTATION) || defined(SEQTX_PAR_IMPLEMENTATION)) \
    && !defined(SEQTX_PAR_IMPLEMENTATION_DONE)
#define SEQTX_PAR_IMPLEMENTATION_DONE

#define STX_LOOPS
#include "seqtx.h"      /* included again for the inner-loop macros */

#include <stdio.h>
#include <stdlib.h>
STX_STRICT_ON


// >>gate

/* Returns K, the number of branches. */
static int stx__par_gate_branches(const stx_par_gate_args *a) {
    return a->branches ? a->branches : 3;
}

/* Computes the uniforms U (K) of one draw; see stx_par_gate_args. */
static void stx__par_uniform(const stx_par_gate_args *a, size_t draw, double *U) {
    const int K = stx__par_gate_branches(a);
    uint32_t bits[8];
    int k;
    stx_philox(a->seed, a->stream, a->first + draw, bits);
    if (K > 4) stx_philox(a->seed, a->stream + ((uint64_t)1 << 61), a->first + draw, bits + 4);
    for (k = 0; k < K; k++) {
        if (a->uniforms)
            U[k] = (double)a->uniforms[draw * a->uniforms_stride + (size_t)k];
        else
            U[k] = ((double)(bits[k] >> 9) + 0.5) / 8388608;
    }
}

/* Computes pi, p = pi / sum pi, and ln pi. With STX_PAR_FORM_LOGITS, pi is divided by
   its largest element, and ln_pi receives ln p, which differs from ln pi by a
   constant. */
static void stx__par_probabilities(int form, int K, const stx_real *al, double *ln_pi, double *pi,
                                   double *p) {
    double max = (double)al[0], sum = 0;
    int k;
    for (k = 1; k < K; k++)
        if ((double)al[k] > max) max = (double)al[k];

    for (k = 0; k < K; k++) {
        if (form == STX_PAR_FORM_PI)
            pi[k] = (al[k] > 0 ? (double)al[k] : 0) + 1e-5;
        else
            pi[k] = stx_math_exp((double)al[k] - max);
        if (al[k] != al[k]) pi[k] = (double)al[k];      /* keep a NaN, even with STX_PAR_FORM_PI */
        sum += pi[k];
    }
    for (k = 0; k < K; k++) {
        ln_pi[k] = form == STX_PAR_FORM_PI ? stx_math_log(pi[k])
                                           : (double)al[k] - max - stx_math_log(sum);
        p[k] = pi[k] / sum;
    }
}

/* Computes y = softmax((ln pi + g) / tau) of one draw. Returns the index of the first
   largest element. */
static int stx__par_sample_gate(const stx_par_gate_args *a, size_t draw, const double *ln_pi,
                                double *y) {
    const int K = stx__par_gate_branches(a);
    double U[STX_PAR_MAX_BRANCHES], v[STX_PAR_MAX_BRANCHES], sum = 0;
    const double tau = a->noisy ? (double)a->tau[0] : 1;
    int k, best = 0;
    if (a->noisy) stx__par_uniform(a, draw, U);
    for (k = 0; k < K; k++) {
        v[k] = (ln_pi[k] + (a->noisy ? -stx_math_log(-stx_math_log(U[k])) : 0)) / tau;
        if (v[k] > v[best]) best = k;
    }
    for (k = 0; k < K; k++) sum += y[k] = stx_math_exp(v[k] - v[best]);
    for (k = 0; k < K; k++) y[k] /= sum;
    return best;
}

STX_DEF void stx_par_gate_fwd(stx_ctx *x, const stx_par_gate_args *a) {
    STX__FP_SCOPE;
    const int of_p = a->lat && a->latency_w == STX_PAR_LATENCY_OF_P;
    const int of_w = a->lat && a->latency_w == STX_PAR_LATENCY_OF_W;
    const int K = stx__par_gate_branches(a);
    double ln_pi[STX_PAR_MAX_BRANCHES], pi[STX_PAR_MAX_BRANCHES], p[STX_PAR_MAX_BRANCHES];
    double y[STX_PAR_MAX_BRANCHES], lat = 0;
    size_t draw, at = 0;
    int k, best;
    (void)x;
    stx__par_probabilities(a->form, K, a->al, ln_pi, pi, p);
    for (draw = 0; draw < a->R; draw++) {
        best = stx__par_sample_gate(a, draw, ln_pi, y);
        for (k = 0; k < K; k++, at++) {
            a->y[at] = (stx_real)y[k];
            if (a->hard && y[k] == y[k]) y[k] = k == best;      /* keeps a NaN */
            a->w[at] = (stx_real)y[k];
            if (of_w) lat += y[k] * (double)a->cost[k] / (double)a->R;
        }
    }
    for (k = 0; k < K && of_p; k++) lat += p[k] * (double)a->cost[k];
    if (a->lat) a->lat[0] = (stx_real)(lat + (a->before ? (double)a->before[0] : 0));
}

/* The backward kernel of y = softmax((ln pi + g) / tau) and lat = before + the mean
   over draws of sum_k p_k cost_k (or of sum_k w_k cost_k). See stx_par_gate_args. */
STX_DEF void stx_par_gate_bwd(stx_ctx *x, const stx_par_gate_args *a) {
    STX__FP_SCOPE;
    const int of_p = a->lat && a->latency_w == STX_PAR_LATENCY_OF_P;
    const int of_w = a->lat && a->latency_w == STX_PAR_LATENCY_OF_W;
    const double tau = a->noisy ? (double)a->tau[0] : 1;
    const double dlat = a->lat && a->dlat ? (double)a->dlat[0] : 0;
    const int K = stx__par_gate_branches(a);
    double ln_pi[STX_PAR_MAX_BRANCHES], pi[STX_PAR_MAX_BRANCHES], p[STX_PAR_MAX_BRANCHES];
    double ds[STX_PAR_MAX_BRANCHES] = {0}, ds_sum = 0, pi_sum = 0, mean_cost = 0;
    size_t draw;
    int k;
    (void)x;
    if (a->dbefore && a->lat) a->dbefore[0] += (stx_real)dlat;
    if (!a->dal) return;
    stx__par_probabilities(a->form, K, a->al, ln_pi, pi, p);

    /* backpropagate through the softmax of each draw */
    for (draw = 0; draw < a->R; draw++) {
        const stx_real *y = a->y + (size_t)K * draw;
        double dw[STX_PAR_MAX_BRANCHES], dot = 0;
        for (k = 0; k < K; k++) {
            dw[k] = (a->dw ? (double)a->dw[(size_t)K * draw + (size_t)k] : 0)
                    + (of_w ? dlat * (double)a->cost[k] / (double)a->R : 0);
            dot += (double)y[k] * dw[k];
        }
        for (k = 0; k < K; k++) ds[k] += (double)y[k] * (dw[k] - dot) / tau;
    }

    /* compute the gradients of the parameters, with the part from the latency of p */
    for (k = 0; k < K; k++) {
        ds_sum += ds[k];
        pi_sum += pi[k];
        if (of_p) mean_cost += p[k] * (double)a->cost[k];
    }
    for (k = 0; k < K; k++) {
        double c = of_p ? dlat * ((double)a->cost[k] - mean_cost) : 0;
        if (a->form == STX_PAR_FORM_LOGITS)
            a->dal[k] += (stx_real)(ds[k] - p[k] * ds_sum + p[k] * c);
        else if (!(a->al[k] < 0))
            a->dal[k] += (stx_real)(ds[k] / pi[k] + c / pi_sum);
    }
}


// >>mix

static size_t stx__par_draw_of_row(const stx_par_mix_args *a, size_t n) {
    const size_t draws_per_period = (a->period + a->rows_per_draw - 1) / a->rows_per_draw;
    return n / a->period * draws_per_period + n % a->period / a->rows_per_draw;
}

/* Returns z_k = h + branch_k of row n, channel c. */
static double stx__par_plain_z(const stx_par_mix_args *a, int k, size_t n, size_t c) {
    return (double)a->h[n * a->C + c] + (double)a->branch[k][n * a->C + c];
}

/* Computes the mean of z_k in row n, and rstd = 1 / sqrt(variance + eps). Without
   norms, the mean is 0 and rstd is 1. */
static void stx__par_plain_norm(const stx_par_mix_args *a, int k, size_t n, double *mean,
                                double *rstd) {
    const double C = (double)a->C;
    double var = 0;
    size_t c;
    *mean = 0;
    *rstd = 1;
    if (!a->gain[k]) return;
    for (c = 0; c < a->C; c++) *mean += stx__par_plain_z(a, k, n, c) / C;
    for (c = 0; c < a->C; c++) {
        double from_mean = stx__par_plain_z(a, k, n, c) - *mean;
        var += from_mean * from_mean / C;
    }
    *rstd = 1 / sqrt(var + (double)a->eps);
}

/* Computes y = w0 Y_0 + w1 Y_1 + w2 h in row n. */
static void stx__par_plain_fwd(const stx_par_mix_args *a, size_t n) {
    const stx_real *h = a->h + n * a->C, *w = a->w + 3 * stx__par_draw_of_row(a, n);
    double mean[2], rstd[2];
    size_t c;
    int k;
    for (k = 0; k < 2; k++) {
        stx__par_plain_norm(a, k, n, &mean[k], &rstd[k]);
        if (!a->gain[k]) continue;
        a->mean[k][n] = (stx_real)mean[k];
        a->rstd[k][n] = (stx_real)rstd[k];
    }
    for (c = 0; c < a->C; c++) {
        double sum = (double)w[2] * (double)h[c];
        for (k = 0; k < 2; k++) {
            double Y = (stx__par_plain_z(a, k, n, c) - mean[k]) * rstd[k];
            if (a->gain[k]) Y = Y * (double)a->gain[k][c] + (double)a->shift[k][c];
            sum += (double)w[k] * Y;
        }
        a->y[n * a->C + c] = (stx_real)sum;
    }
}

/* Adds the gradients of branch k in row n to dgain, dshift, dbranch and dh. Returns the
   row's part of dw_k. */
static double stx__par_plain_branch_bwd(const stx_par_mix_args *a, int k, size_t n) {
    const size_t C = a->C;
    const double w = (double)a->w[3 * stx__par_draw_of_row(a, n) + (size_t)k];
    const stx_real *dy = a->dy + n * C;
    double mean, rstd, dw = 0, mean_dxh = 0, mean_dxh_xh = 0;
    size_t c;
    stx__par_plain_norm(a, k, n, &mean, &rstd);

    for (c = 0; c < C; c++) {
        double xh = (stx__par_plain_z(a, k, n, c) - mean) * rstd, Y = xh, dY = w * (double)dy[c];
        if (a->gain[k]) {
            Y = xh * (double)a->gain[k][c] + (double)a->shift[k][c];
            if (a->dgain[k]) a->dgain[k][c] += (stx_real)(dY * xh);
            if (a->dshift[k]) a->dshift[k][c] += (stx_real)dY;
            mean_dxh += dY * (double)a->gain[k][c] / (double)C;
            mean_dxh_xh += dY * (double)a->gain[k][c] * xh / (double)C;
        }
        dw += (double)dy[c] * Y;
    }
    for (c = 0; c < C; c++) {
        double xh = (stx__par_plain_z(a, k, n, c) - mean) * rstd, dz = w * (double)dy[c];
        if (a->gain[k]) dz = rstd * (dz * (double)a->gain[k][c] - mean_dxh - xh * mean_dxh_xh);
        if (a->dbranch[k]) a->dbranch[k][n * C + c] += (stx_real)dz;
        if (a->dh) a->dh[n * C + c] += (stx_real)dz;
    }
    return dw;
}

static void stx__par_plain_bwd(const stx_par_mix_args *a, size_t n) {
    const stx_real *h = a->h + n * a->C, *dy = a->dy + n * a->C;
    const size_t draw = stx__par_draw_of_row(a, n);
    double dw[3] = {0, 0, 0};
    size_t c;
    int k;
    for (c = 0; c < a->C; c++) {
        dw[2] += (double)dy[c] * (double)h[c];
        if (a->dh) a->dh[n * a->C + c] += a->w[3 * draw + 2] * dy[c];
    }
    for (k = 0; k < 2; k++) dw[k] = stx__par_plain_branch_bwd(a, k, n);
    for (k = 0; a->dw && k < 3; k++) a->dw[3 * draw + (size_t)k] += (stx_real)dw[k];
}

STX_DEF void stx_par_mix_plain(const stx_par_mix_args *a) {
    STX__FP_SCOPE;
    size_t n;
    for (n = 0; n < a->N; n++) {
        if (a->dy)
            stx__par_plain_bwd(a, n);
        else
            stx__par_plain_fwd(a, n);
    }
}

/* Number of channels processed at a time in local arrays. The compiler knows that these
   arrays do not overlap the buffers of `a`. */
enum { STX__PAR_CHANNELS = 64 };

/* Rows per partial sum of dgain and dshift. Partial sums have smaller rounding errors
   than one long sum. */
enum { STX__PAR_ROWS = 64 };

/* Estimated operations per input element, from which stx_parallel chooses the number of
   threads. The backward kernel has two passes: BWD is for the one that computes dh and
   dbranch, and COLUMNS for the one that computes dgain and dshift. */
enum { STX__PAR_MIX_FWD_OPS = 14, STX__PAR_MIX_BWD_OPS = 24, STX__PAR_MIX_COLUMNS_OPS = 10 };

/* Computes mean and rstd of row n bit-exactly as stx_layernorm does. Row n of y is
   scratch memory. */
STX_INNER void stx__par_mix_norm_any(int fma, const stx_par_mix_args *a, size_t n) {
    const size_t C = a->C;
    const stx_real *h = a->h + n * C, eps = a->eps;
    stx_real *y = a->y + n * C;
    size_t c;
    int k;
    for (k = 0; k < 2 && a->gain[k]; k++) {
        const stx_real *b = a->branch[k] + n * C;
        stx_real mean, var;
        for (c = 0; c < C; c++) y[c] = h[c] + b[c];
        mean = stx_fast_sum(y, C) / (stx_real)C;
        for (c = 0; c < C; c++) y[c] -= mean;
        var = stx_fast_dot(fma, y, y, C) / (stx_real)C;
        a->mean[k][n] = mean;
        a->rstd[k][n] = (stx_real)(1 / sqrt((double)(var + eps)));
    }
}

/* Computes Y of branch k in row n, channels c0 .. c0 + count - 1. For k = 2, Y is h. */
STX_INNER void stx__par_mix_branch_any(int fma, const stx_par_mix_args *a, int k, size_t n,
                                       size_t c0, size_t count, stx_real *Y) {
    const stx_real *h = a->h + n * a->C + c0;
    size_t c;
    if (k == 2) {
        for (c = 0; c < count; c++) Y[c] = h[c];
    } else if (!a->gain[k]) {
        const stx_real *b = a->branch[k] + n * a->C + c0;
        for (c = 0; c < count; c++) Y[c] = h[c] + b[c];
    } else {
        const stx_real *b = a->branch[k] + n * a->C + c0;
        const stx_real *gain = a->gain[k] + c0, *shift = a->shift[k] + c0;
        const stx_real mean = a->mean[k][n], rstd = a->rstd[k][n];
        for (c = 0; c < count; c++)
            Y[c] = STX_FMA(fma, (h[c] + b[c] - mean) * rstd, gain[c], shift[c]);
    }
}

STX_INNER void stx__par_mix_row_any(int fma, const stx_par_mix_args *a, size_t n) {
    const stx_real *w = a->w + 3 * stx__par_draw_of_row(a, n);
    size_t c0, c;
    int k;
    stx__par_mix_norm_any(fma, a, n);
    for (c0 = 0; c0 < a->C; c0 += STX__PAR_CHANNELS) {
        const size_t count = STX_MIN(a->C - c0, (size_t)STX__PAR_CHANNELS);
        stx_real sum[STX__PAR_CHANNELS] = {0}, Y[STX__PAR_CHANNELS];
        int any = 0;
        for (k = 0; k < 3; k++) {
            const stx_real wk = w[k];
            if (wk == 0) continue;
            stx__par_mix_branch_any(fma, a, k, n, c0, count, Y);
            /* assign the first term, because adding it to 0 would turn -0 into 0 */
            if (any) {
                for (c = 0; c < count; c++) sum[c] = STX_FMA(fma, wk, Y[c], sum[c]);
            } else {
                for (c = 0; c < count; c++) sum[c] = wk * Y[c];
            }
            any = 1;
        }
        memcpy(a->y + n * a->C + c0, sum, count * sizeof *sum);
    }
}

STX_EACH_ISA(stx__par_mix_row_any, (const stx_par_mix_args *a, size_t n), a, n)

static void stx__par_mix_part(const stx_share *s, const void *job) {
    const stx_par_mix_args *a = (const stx_par_mix_args *)job;
    size_t n;
    for (n = s->begin; n < s->end; n++) STX_CALL(s->x, stx__par_mix_row_any, (a, n));
}

STX_DEF void stx_par_mix_fwd(stx_ctx *x, const stx_par_mix_args *a) {
    stx_parallel(x, a->N, STX__PAR_MIX_FWD_OPS * a->N * a->C, stx__par_mix_part, a);
}

/* For a branch without a norm, stores row n's part of dw_k in `work`:
   sum dy (h + branch_k). */
STX_INNER void stx__par_mix_dot_any(int fma, const stx_par_mix_args *a, int k, size_t n) {
    const size_t C = a->C;
    const stx_real *h = a->h + n * C, *dy = a->dy + n * C, *b = a->branch[k] + n * C;
    stx_real sum[16] = {0};
    size_t c, lane;
    for (c = 0; c + 16 <= C; c += 16)
        for (lane = 0; lane < 16; lane++)
            sum[lane] = STX_FMA(fma, dy[c + lane], h[c + lane] + b[c + lane], sum[lane]);
    for (; c < C; c++) sum[c % 16] += dy[c] * (h[c] + b[c]);
    if (a->dw) a->work[3 * n + (size_t)k] = (double)stx_fast_lanes(sum);
}

/* Computes sums over row n of a branch with a norm, where z = h + branch_k:
       mean_g = mean(dy gain)        slope = rstd^2 mean(dy gain (z - mean))
   The row's part of dw_k is sum dy Y_k = rstd sum dy gain (z - mean) + sum dy shift. */
STX_INNER void stx__par_mix_sums_any(int fma, const stx_par_mix_args *a, int k, size_t n,
                                     stx_real *mean_g, stx_real *slope) {
    const size_t C = a->C;
    const stx_real *h = a->h + n * C, *dy = a->dy + n * C, *b = a->branch[k] + n * C;
    const stx_real *gain = a->gain[k], *shift = a->shift[k];
    const stx_real mean = a->mean[k][n], rstd = a->rstd[k][n];
    stx_real g[16] = {0}, gz[16] = {0}, dshift[16] = {0}, gz_sum;
    size_t c, lane;

    for (c = 0; c + 16 <= C; c += 16) {
        for (lane = 0; lane < 16; lane++) {
            stx_real dy_gain = dy[c + lane] * gain[c + lane];
            g[lane] += dy_gain;
            gz[lane] = STX_FMA(fma, dy_gain, h[c + lane] + b[c + lane] - mean, gz[lane]);
            dshift[lane] = STX_FMA(fma, dy[c + lane], shift[c + lane], dshift[lane]);
        }
    }
    for (; c < C; c++) {
        stx_real dy_gain = dy[c] * gain[c];
        g[c % 16] += dy_gain;
        gz[c % 16] += dy_gain * (h[c] + b[c] - mean);
        dshift[c % 16] += dy[c] * shift[c];
    }

    gz_sum = stx_fast_lanes(gz);
    *mean_g = stx_fast_lanes(g) / (stx_real)C;
    *slope = gz_sum * rstd * rstd / (stx_real)C;
    if (a->dw)
        a->work[3 * n + (size_t)k] = (double)(gz_sum * rstd) + (double)stx_fast_lanes(dshift);
}

/* Computes dz of branch k in row n, channels c0 .. c0 + count - 1:
       w_k rstd (dy gain - mean_g - (z - mean) slope), or w_k dy without a norm */
STX_INNER void stx__par_mix_dz_any(int fma, const stx_par_mix_args *a, int k, size_t n, size_t c0,
                                   size_t count, stx_real wk, stx_real mean_g, stx_real slope,
                                   stx_real *dz) {
    const size_t at = n * a->C + c0;
    const stx_real *h = a->h + at, *dy = a->dy + at, *b = a->branch[k] + at;
    size_t c;
    if (a->gain[k]) {
        const stx_real *gain = a->gain[k] + c0;
        const stx_real mean = a->mean[k][n], scale = wk * a->rstd[k][n];
        for (c = 0; c < count; c++)
            dz[c] = scale * (STX_FMA(fma, dy[c], gain[c], -mean_g) - (h[c] + b[c] - mean) * slope);
    } else {
        for (c = 0; c < count; c++) dz[c] = wk * dy[c];
    }
}

/* Stores `from` in `to`, or adds it to `to` if add is 1. */
STX_INNER void stx__par_store(stx_real *to, const stx_real *from, size_t count, int add) {
    size_t c;
    if (add) {
        for (c = 0; c < count; c++) to[c] += from[c];
    } else {
        memcpy(to, from, count * sizeof *to);
    }
}

/* The backward kernel of y = w0 Y_0 + w1 Y_1 + w2 h for row n: computes dbranch and dh,
   and stores the row's parts of dw in work. */
STX_INNER void stx__par_mix_back_row_any(int fma, const stx_par_mix_args *a, size_t n) {
    const size_t C = a->C, at = n * C;
    const stx_real *h = a->h + at, *dy = a->dy + at, *w = a->w + 3 * stx__par_draw_of_row(a, n);
    stx_real mean_g[2] = {0, 0}, slope[2] = {0, 0};
    size_t c0, c;
    int k;
    for (k = 0; k < 2; k++) {
        if (a->gain[k])
            stx__par_mix_sums_any(fma, a, k, n, &mean_g[k], &slope[k]);
        else
            stx__par_mix_dot_any(fma, a, k, n);
    }
    if (a->dw) a->work[3 * n + 2] = (double)stx_fast_dot(fma, dy, h, C);

    for (c0 = 0; c0 < C; c0 += STX__PAR_CHANNELS) {
        const size_t count = STX_MIN(C - c0, (size_t)STX__PAR_CHANNELS);
        stx_real dh[STX__PAR_CHANNELS], dz[STX__PAR_CHANNELS];
        for (c = 0; c < count; c++) dh[c] = w[2] * dy[c0 + c];
        for (k = 0; k < 2; k++) {
            stx__par_mix_dz_any(fma, a, k, n, c0, count, w[k], mean_g[k], slope[k], dz);
            for (c = 0; c < count; c++) dh[c] += dz[c];
            if (a->dbranch[k]) stx__par_store(a->dbranch[k] + at + c0, dz, count, a->add[k]);
        }
        if (a->dh) stx__par_store(a->dh + at + c0, dh, count, a->add_h);
    }
}

STX_EACH_ISA(stx__par_mix_back_row_any, (const stx_par_mix_args *a, size_t n), a, n)

static void stx__par_mix_back_part(const stx_share *s, const void *job) {
    const stx_par_mix_args *a = (const stx_par_mix_args *)job;
    size_t n;
    for (n = s->begin; n < s->end; n++) STX_CALL(s->x, stx__par_mix_back_row_any, (a, n));
}

/* Computes dgain += sum_n w dy xh and dshift += sum_n w dy of branch k, for at most
   STX__PAR_CHANNELS channels, starting at c0. For xh, see stx_par_mix_args. */
STX_INNER void stx__par_mix_columns_any(int fma, const stx_par_mix_args *a, int k, size_t c0) {
    const size_t C = a->C, count = STX_MIN(C - c0, (size_t)STX__PAR_CHANNELS);
    size_t n0, n, c;
    for (n0 = 0; n0 < a->N; n0 += STX__PAR_ROWS) {
        stx_real dgain[STX__PAR_CHANNELS] = {0}, dshift[STX__PAR_CHANNELS] = {0};
        for (n = n0; n < STX_MIN(a->N, n0 + STX__PAR_ROWS); n++) {
            const size_t at = n * C + c0;
            const stx_real *h = a->h + at, *b = a->branch[k] + at, *dy = a->dy + at;
            const stx_real wk = a->w[3 * stx__par_draw_of_row(a, n) + (size_t)k];
            const stx_real mean = a->mean[k][n], scale = wk * a->rstd[k][n];
            for (c = 0; c < count; c++) {
                dgain[c] = STX_FMA(fma, dy[c] * scale, h[c] + b[c] - mean, dgain[c]);
                dshift[c] = STX_FMA(fma, dy[c], wk, dshift[c]);
            }
        }
        if (a->dgain[k]) stx__par_store(a->dgain[k] + c0, dgain, count, 1);
        if (a->dshift[k]) stx__par_store(a->dshift[k] + c0, dshift, count, 1);
    }
}

STX_EACH_ISA(stx__par_mix_columns_any, (const stx_par_mix_args *a, int k, size_t c0), a, k, c0)

static void stx__par_mix_columns_part(const stx_share *s, const void *job) {
    const stx_par_mix_args *a = (const stx_par_mix_args *)job;
    size_t i, blocks = (a->C + STX__PAR_CHANNELS - 1) / STX__PAR_CHANNELS;
    for (i = s->begin; i < s->end; i++) {
        int k = (int)(i / blocks);
        STX_CALL(s->x, stx__par_mix_columns_any, (a, k, i % blocks * STX__PAR_CHANNELS));
    }
}

STX_DEF void stx_par_mix_bwd(stx_ctx *x, const stx_par_mix_args *a) {
    STX__FP_SCOPE;
    const size_t blocks = (a->C + STX__PAR_CHANNELS - 1) / STX__PAR_CHANNELS;
    double sum[3] = {0, 0, 0};
    size_t n;
    int k;
    stx_parallel(x, a->N, STX__PAR_MIX_BWD_OPS * a->N * a->C, stx__par_mix_back_part, a);
    if (a->gain[0] && (a->dgain[0] || a->dshift[0] || a->dgain[1] || a->dshift[1]))
        stx_parallel(x, 2 * blocks, STX__PAR_MIX_COLUMNS_OPS * a->N * a->C,
                     stx__par_mix_columns_part, a);

    /* sum the rows' parts of dw per draw; the rows of a draw are adjacent */
    for (n = 0; a->dw && n < a->N; n++) {
        const size_t draw = stx__par_draw_of_row(a, n);
        for (k = 0; k < 3; k++) sum[k] += a->work[3 * n + (size_t)k];
        if (n + 1 < a->N && stx__par_draw_of_row(a, n + 1) == draw) continue;
        for (k = 0; k < 3; k++) {
            a->dw[3 * draw + (size_t)k] += (stx_real)sum[k];
            sum[k] = 0;
        }
    }
}


// >>latency

/* Computes the loss from nll and the latency; see stx_par_total. */
STX_DEF void stx_par_latency_fwd(stx_ctx *x, stx_real *loss, const stx_real *nll,
                                 const stx_real *lat, const stx_par_latency_args *a) {
    STX__FP_SCOPE;
    const double v = (double)lat[0];
    (void)x;
    if (a->kind == STX_PAR_LATENCY_FBNET) {
        double factor = v;      /* keeps a NaN */
        if (v > 1) factor = stx_math_pow(stx_math_log(v), a->power);
        if (v <= 1) factor = 0;
        *loss = (stx_real)((double)nll[0] * a->weight * factor);
    } else {
        double term = v;
        if (a->kind == STX_PAR_LATENCY_HINGE) {
            term = v / a->target - 1;
            if (term < 0) term = 0;
        }
        *loss = (stx_real)((double)nll[0] + a->weight * term);
    }
}

STX_DEF void stx_par_latency_bwd(stx_ctx *x, stx_real *dnll, stx_real *dlat, const stx_real *dloss,
                                 const stx_real *nll, const stx_real *lat,
                                 const stx_par_latency_args *a) {
    STX__FP_SCOPE;
    double v = (double)lat[0], d = (double)dloss[0], by_nll = 1, by_lat = a->weight;
    (void)x;
    if (a->kind == STX_PAR_LATENCY_HINGE) by_lat = v > a->target ? a->weight / a->target : 0;
    if (a->kind == STX_PAR_LATENCY_FBNET) {
        const double ln = v > 1 ? stx_math_log(v) : 0;
        by_nll = v > 1 ? a->weight * stx_math_pow(ln, a->power) : 0;
        by_lat = v > 1 ? (double)nll[0] * a->weight * a->power * stx_math_pow(ln, a->power - 1) / v
                       : 0;
    }
    if (dnll) dnll[0] += (stx_real)(d * by_nll);
    if (dlat) dlat[0] += (stx_real)(d * by_lat);
}


// >>ops

static void stx__par_mix_back(stx_ctx *x, stx_tensor *y, stx_tensor *const *in, void *save) {
    stx_par_mix_args *a = (stx_par_mix_args *)save;
    int fresh, k;
    a->dy = y->grad;
    a->dh = stx_grad(x, in[0], &fresh);
    a->add_h = !fresh;
    for (k = 0; k < 2; k++) {
        a->dbranch[k] = stx_grad(x, in[1 + k], &fresh);
        a->add[k] = !fresh;
        a->dgain[k] = in[4] ? stx_grad(x, in[4 + 2 * k], NULL) : NULL;
        a->dshift[k] = in[4] ? stx_grad(x, in[5 + 2 * k], NULL) : NULL;
    }
    a->dw = stx_grad(x, in[3], NULL);
    a->work = (double *)stx_step_device_bytes(x, stx_bytes_of(a->N, 3, sizeof *a->work));
    if (a->work) STX_RUN(x, stx_par_mix_bwd, (x, a));
}

/* Returns the mixture of a block's branches (B,T,D), as an op. in[] holds h, branch_0,
   branch_1 (B,T,D), w (draws,3), and gain_0, shift_0, gain_1, shift_1 (D) or four
   NULLs. For period and rows_per_draw, see stx_par_mix_args. */
static stx_tensor *stx__par_mix(stx_ctx *x, stx_tensor *const *in, size_t period,
                                size_t rows_per_draw, double eps) {
    stx_par_mix_args *a;
    stx_tensor *y;
    int k;
    if (!stx_ok(x) || !in[0] || !in[1] || !in[2] || !in[3]) return NULL;
    y = stx_new(x, in[0]->dim[0], in[0]->dim[1], in[0]->dim[2], 0);
    a = (stx_par_mix_args *)stx_step_host_bytes(x, sizeof *a);
    if (!y || !a) return NULL;
    memset(a, 0, sizeof *a);
    a->C = in[0]->dim[in[0]->ndim - 1];
    a->N = in[0]->size / a->C;
    a->period = period;
    a->rows_per_draw = rows_per_draw;
    a->eps = (stx_real)eps;
    a->h = in[0]->data;
    a->w = in[3]->data;
    a->y = y->data;
    for (k = 0; k < 2; k++) {
        a->branch[k] = in[1 + k]->data;
        if (!in[4]) continue;
        a->gain[k] = in[4 + 2 * k]->data;
        a->shift[k] = in[5 + 2 * k]->data;
        a->mean[k] = (stx_real *)stx_step_device_bytes(
            x, stx_bytes_of(a->N, 2, sizeof *a->mean[k]));
        if (!a->mean[k]) return NULL;
        a->rstd[k] = a->mean[k] + a->N;
    }
    STX_RUN(x, stx_par_mix_fwd, (x, a));
    stx_record(x, y, in, 8, stx__par_mix_back, a);
    return y;
}

/* Sizes of stx__par_columns: columns [first, first + n) of w (R,K) */
typedef struct stx__par_column {
    size_t R, K, first, n;
} stx__par_column;

static void stx__par_columns_back(stx_ctx *x, stx_tensor *y, stx_tensor *const *in, void *save) {
    const stx__par_column *s = (const stx__par_column *)save;
    stx_real *dw = stx_grad(x, in[0], NULL);
    if (!dw) return;
    dw = stx_offset_ptr(x, dw, s->first);
    STX_RUN(x, stx_copy2d, (x, dw, s->K, y->grad, 3, s->R, s->n, 1));
}

/* Returns n <= 3 columns of w (R,K), followed by zeros, as weights (R,3) for
   stx__par_mix. */
static stx_tensor *stx__par_columns(stx_ctx *x, stx_tensor *w, size_t first, size_t n) {
    stx__par_column *s = (stx__par_column *)stx_step_host_bytes(x, sizeof *s);
    stx_tensor *y = w ? stx_new_f32(x, w->dim[0], 3, 0, 0) : NULL;
    if (!s || !y) return NULL;
    s->R = w->dim[0];
    s->K = w->dim[1];
    s->first = first;
    s->n = n;
    STX_RUN(x, stx_fill, (x, y->data, y->size, 0));
    STX_RUN(x, stx_copy2d,
            (x, y->data, 3, stx_offset_ptr(x, w->data, first), s->K, s->R, n, 0));
    stx_record(x, y, &w, 1, stx__par_columns_back, s);
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

/* Returns the weights w (R,K) of a block's gate with parameters al (K), as an op. `how`
   holds the kernel's arguments except al, w, y, lat and before. If lat is not NULL,
   *lat is the total latency of the preceding blocks (NULL if there are none), and is
   replaced by the total including this block. */
static stx_tensor *stx__par_gate_op(stx_ctx *x, stx_tensor *al, const stx_par_gate_args *how,
                                    stx_tensor **lat) {
    stx__par_gate *s = (stx__par_gate *)stx_step_host_bytes(x, sizeof *s);
    stx_tensor *in[2], *made[2] = {NULL, NULL};
    const size_t K = (size_t)stx__par_gate_branches(how);
    if (!s || !al) return NULL;
    s->a = *how;
    in[0] = al;
    in[1] = lat ? *lat : NULL;
    s->w = made[0] = stx_new_f32(x, how->R, K, 0, 0);
    s->lat = NULL;
    if (lat) s->lat = made[1] = *lat = stx_new_f32(x, 1, 0, 0, 0);
    s->a.y = s->w ? s->w->data : NULL;
    if (how->hard)
        s->a.y = (stx_real *)stx_step_device_bytes(x, stx_bytes_of(how->R, K, sizeof *s->a.y));
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
    const stx_par_latency_args *a = (const stx_par_latency_args *)save;
    stx_real *dnll = stx_grad(x, in[0], NULL), *dlat = stx_grad(x, in[1], NULL);
    if (!stx_ok(x)) return;
    STX_RUN(x, stx_par_latency_bwd, (x, dnll, dlat, y->grad, in[0]->data, in[1]->data, a));
}

/* Returns the loss (1) that combines nll (1) with lat (1), as an op; see
   stx_par_total. */
static stx_tensor *stx__par_latency_op(stx_ctx *x, stx_tensor *nll, stx_tensor *lat,
                                       const stx_par_latency_args *how) {
    stx_par_latency_args *a = (stx_par_latency_args *)stx_step_host_bytes(x, sizeof *a);
    stx_tensor *y = stx_new_f32(x, 1, 0, 0, 0), *in[2];
    if (!stx_ok(x) || !nll || !lat) return NULL;
    *a = *how;
    in[0] = nll;
    in[1] = lat;
    STX_RUN(x, stx_par_latency_fwd, (x, y->data, nll->data, lat->data, a));
    stx_record(x, y, in, 2, stx__par_latency_back, a);
    return y;
}


// >>patterns

enum { STX__PAR_MAX_BLOCKS = 4096 };

/* Reads and returns the count at *p, or 1 if there is none. Returns 0 if the count is 0
   or above STX__PAR_MAX_BLOCKS. */
static size_t stx__par_times(const char **p) {
    size_t times = 0;
    if (**p < '0' || **p > '9') return 1;
    for (; **p >= '0' && **p <= '9'; (*p)++) {
        times = 10 * times + (size_t)(**p - '0');
        if (times > STX__PAR_MAX_BLOCKS) return 0;
    }
    return times;
}

/* Expands the pattern at p, up to a ')' or the end, and appends the result to the *n
   letters already in out. `letters` are those that a pattern can have. Returns the
   position where it stopped, or NULL if the pattern is invalid. */
static const char *stx__par_expand(char *out, size_t capacity, size_t *n, const char *p,
                                   const char *letters, int depth) {
    while (*p && *p != ')') {
        size_t from = *n, times, unit, i;
        if (*p == '(') {
            p = depth < 8 ? stx__par_expand(out, capacity, n, p + 1, letters, depth + 1) : NULL;
            if (!p || *p != ')' || *n == from) return NULL;
        } else {
            if (!strchr(letters, *p) || *n + 1 >= capacity) return NULL;
            out[(*n)++] = *p;
        }
        p++;
        times = stx__par_times(&p);
        unit = *n - from;
        if (!times || (times - 1) * unit >= capacity - *n) return NULL;
        for (i = (times - 1) * unit; i > 0; i--, (*n)++) out[*n] = out[*n - unit];
    }
    return p;
}

/* Implements stx_par_expand, for patterns with the given letters. */
static size_t stx__par_expand_all(char *out, size_t capacity, const char *pattern,
                                  const char *letters) {
    const char *end = NULL;
    size_t n = 0;
    if (pattern && out && capacity) end = stx__par_expand(out, capacity, &n, pattern, letters, 0);
    if (!end || *end) n = 0;
    if (out && capacity) out[n] = 0;
    return n;
}

STX_DEF size_t stx_par_expand(char *out, size_t capacity, const char *pattern) {
    return stx__par_expand_all(out, capacity, pattern, "sfi");
}

/* Writes the letter of each branch, in the order of the gates, to out. */
static void stx__par_letters(const stx_par_desc *d, char out[STX_PAR_MAX_BRANCHES + 1]) {
    size_t t;
    strcpy(out, "sfi");
    for (t = 0; t < STX_PAR_MAX_TYPES; t++) out[3 + t] = t < d->types ? d->type[t].letter : 0;
    out[3 + t] = 0;
}

/* Length of the longest group that stx_par_format recognises. This limit bounds the
   running time. */
enum { STX__PAR_MAX_UNIT = 64 };

/* Finds the repetition at the start of p (`left` letters long) that saves the most
   letters in the short form. Returns the length of the repeated unit; *times receives
   the number of repetitions. Both are 1 if no repetition saves any. */
static size_t stx__par_repetition(const char *p, size_t left, size_t *times) {
    size_t unit, best = 1, saved = 0;
    char count[32];
    *times = 1;
    for (unit = 1; unit <= STX__PAR_MAX_UNIT && 2 * unit <= left; unit++) {
        size_t n = 1, length;
        while ((n + 1) * unit <= left && !memcmp(p, p + n * unit, unit)) n++;
        length = (size_t)snprintf(count, sizeof count, "%zu", n) + unit + (unit > 1 ? 2 : 0);
        if (n * unit <= length || n * unit - length <= saved) continue;
        best = unit;
        *times = n;
        saved = n * unit - length;
    }
    return best;
}

STX_DEF size_t stx_par_format(char *out, size_t capacity, const char *pattern) {
    size_t i, n = 0, L = pattern ? strlen(pattern) : 0, unit, times;
    char part[96];
    if (!out || !capacity) return 0;
    out[0] = 0;
    if (L > STX__PAR_MAX_BLOCKS) return 0;
    for (i = 0; i < L; i += unit * times) {
        int length;
        unit = stx__par_repetition(pattern + i, L - i, &times);
        if (times == 1)
            length = snprintf(part, sizeof part, "%c", pattern[i]);
        else if (unit == 1)
            length = snprintf(part, sizeof part, "%c%zu", pattern[i], times);
        else
            length = snprintf(part, sizeof part, "(%.*s)%zu", (int)unit, pattern + i, times);
        if ((size_t)length >= capacity - n) {
            out[0] = 0;
            return 0;
        }
        memcpy(out + n, part, (size_t)length + 1);
        n += (size_t)length;
    }
    return n;
}

STX_DEF size_t stx_par_rule(char *out, size_t capacity, size_t L, size_t every) {
    size_t attentions = every ? L / every : 0, two_thirds, stride, i;
    if (!out || !capacity) return 0;
    out[0] = 0;
    if (!attentions || L > STX__PAR_MAX_BLOCKS || L >= capacity) return 0;

    /* choose the stride so that the last attention block is within the first two thirds
       of the blocks */
    two_thirds = 2 * L / 3;
    stride = (two_thirds + two_thirds / attentions) / attentions;
    if (!stride) return 0;
    for (i = 0; i < L; i++) out[i] = i < attentions * stride && i % stride == 0 ? 's' : 'f';
    out[L] = 0;
    return L;
}

/* Returns K, the number of branches of a mixture. */
static size_t stx__par_branches(const stx_par *m) {
    return 3 + m->desc.types;
}

/* Computes p (K) of the gate of block l. Returns 0 after an error. */
static int stx__par_block_probs(const stx_par *m, size_t l, double *p) {
    const stx_real *al = stx_param_mirror(m->ctx, m->block[l].al);
    double ln_pi[STX_PAR_MAX_BRANCHES], pi[STX_PAR_MAX_BRANCHES];
    if (al)
        stx__par_probabilities(m->desc.gate_form, (int)stx__par_branches(m), al, ln_pi, pi, p);
    return al != NULL;
}

STX_DEF int stx_par_probs(const stx_par *m, double *p) {
    STX__FP_SCOPE;
    size_t l;
    if (!m || !m->gates || !p || !stx_ok(m->ctx)) return 0;
    for (l = 0; l < m->desc.blocks; l++)
        if (!stx__par_block_probs(m, l, p + stx__par_branches(m) * l)) return 0;
    return 1;
}

/* Returns the letter of block l. In a supernet, that is the letter of the branch that
   *U in [0,1) selects, or, if U is NULL, of the most probable branch. Returns 0 after
   an error. */
static int stx__par_letter(const stx_par *m, size_t l, const double *U) {
    STX__FP_SCOPE;
    const size_t K = stx__par_branches(m);
    double p[STX_PAR_MAX_BRANCHES], sum;
    char letters[STX_PAR_MAX_BRANCHES + 1];
    size_t k, best = 0;
    if (!m->gates) return m->pattern[l];
    if (!stx__par_block_probs(m, l, p)) return 0;
    sum = p[0];
    for (k = 1; k < K; k++) {
        if (U ? *U >= sum : p[k] > p[best]) best = k;
        sum += p[k];
    }
    stx__par_letters(&m->desc, letters);
    return letters[best];
}

static size_t stx__par_choose(const stx_par *m, char *out, size_t capacity, int draw, uint64_t seed,
                              uint64_t n) {
    STX__FP_SCOPE;
    size_t l, L = m ? m->desc.blocks : 0;
    if (!out || !capacity) return 0;
    out[0] = 0;
    if (!L || L >= capacity || !stx_ok(m->ctx)) return 0;
    for (l = 0; l < L; l++) {
        if (draw) {
            uint32_t bits[4];
            double U;
            stx_philox(seed, n, l, bits);
            U = ((double)bits[0] + 0.5) / 4294967296.0;
            out[l] = (char)stx__par_letter(m, l, &U);
        } else {
            out[l] = (char)stx__par_letter(m, l, NULL);
        }
        if (!out[l]) {
            out[0] = 0;
            return 0;
        }
    }
    out[L] = 0;
    return L;
}

STX_DEF size_t stx_par_argmax(const stx_par *m, char *out, size_t capacity) {
    return stx__par_choose(m, out, capacity, 0, 0, 0);
}

STX_DEF size_t stx_par_sample(const stx_par *m, uint64_t seed, uint64_t n, char *out,
                              size_t capacity) {
    return stx__par_choose(m, out, capacity, 1, seed, n);
}


// >>cuts

/* The cost of one or several clusters: an exact integer (REF, MACS) or a time (TIME).
   The unused field is 0. */
typedef struct stx__par_cost {
    uint64_t exact;
    double   time;
} stx__par_cost;

/* One step of the dynamic program, which appends tail k >= 1 to the preceding clusters
   or, if k is 0, places the head. */
typedef struct stx__par_cutting {
    const stx_par_cuts_desc *d;
    size_t V, k;
    const uint64_t *sum;            /* (V + 1): sum[j] is the sum of the first j counts */
    size_t width, dim;              /* width: width of tail k. dim: D. With
                                       STX_PAR_CUTS_REF, they are 1 and 0 */
    const stx__par_cost *before;    /* (V + 1): before[j] is the least cost of the first j words in
                                       k clusters; NULL for the head */
    stx__par_cost *cost;            /* (V + 1): cost[j] is the least cost of the first j words in
                                       k + 1 clusters */
    uint32_t *start;                /* (V + 1): start[j] is the first word of the last of these
                                       clusters */
} stx__par_cutting;

/* Returns max(floor(D / factor^k), 1), the width of tail k. */
static size_t stx__par_divided_width(size_t D, double factor, size_t k) {
    double width = floor((double)D / stx_math_pow(factor, (double)k));
    return width < 1 ? 1 : (size_t)width;
}

static size_t stx__par_tail_width(const stx_par_cuts_desc *d, size_t k) {
    if (d->proj_dims && d->proj_dims[k - 1]) return d->proj_dims[k - 1];
    return stx__par_divided_width(d->dim, d->factor, k);
}

/* Returns the least cost of the words before i, plus the cost of one cluster of the
   words i .. j - 1. For the head, i = 0. */
static stx__par_cost stx__par_cost_of(const stx__par_cutting *s, size_t i, size_t j) {
    const stx_par_cuts_desc *d = s->d;
    const size_t head_rows = j + d->clusters - 1;
    stx__par_cost c = {0, 0};
    if (s->before) c = s->before[i];
    if (d->cost == STX_PAR_CUTS_TIME) {
        double share = (double)(s->sum[j] - s->sum[i]) / (double)s->sum[s->V];
        if (s->before)
            c.time += d->time(d->user, s->width, d->dim, share)
                      + d->time(d->user, j - i, s->width, share);
        else
            c.time = d->time(d->user, head_rows, d->dim, 1);
    } else if (d->cost == STX_PAR_CUTS_MACS && !s->before) {
        c.exact = (uint64_t)d->dim * head_rows * s->sum[s->V];
    } else {
        c.exact += (uint64_t)s->width * (s->dim + j - i) * (s->sum[j] - s->sum[i]);
    }
    return c;
}

/* Fills cost[j] and start[j] for j in [j0,j1). The best starts are in [i0,i1] and never
   decrease as j rises, so the middle j is solved first, and then both halves. Of starts
   with equal costs, the largest is used. */
static void stx__par_cut(const stx__par_cutting *s, size_t j0, size_t j1, size_t i0, size_t i1) {
    /* the preceding k clusters have at least k words, and the last cluster has at least
       one */
    const size_t j = j0 + (j1 - j0) / 2, first = STX_MAX(i0, s->k), end = i1 < j ? i1 + 1 : j;
    size_t i, best = SIZE_MAX;
    stx__par_cost least = {0, 0};
    if (j0 >= j1) return;
    if (s->d->cost == STX_PAR_CUTS_TIME) {
        for (i = first; i < end; i++) {
            stx__par_cost c = stx__par_cost_of(s, i, j);
            if (i > first && c.time > least.time) continue;
            least = c;
            best = i;
        }
    } else {
        /* stx__par_cost_of, written inline to keep the loop short */
        least.exact = UINT64_MAX;
        for (i = first; i < end; i++) {
            uint64_t exact = s->before[i].exact
                             + (uint64_t)s->width * (s->dim + j - i) * (s->sum[j] - s->sum[i]);
            if (exact > least.exact) continue;
            least.exact = exact;
            best = i;
        }
    }
    s->cost[j] = least;
    s->start[j] = (uint32_t)best;
    stx__par_cut(s, j0, j, i0, best);
    stx__par_cut(s, j + 1, j1, best, i1);
}

static int stx__par_falling(const void *a, const void *b) {
    const uint64_t p = *(const uint64_t *)a, q = *(const uint64_t *)b;
    return (p < q) - (p > q);
}

static int stx__par_cuts_bad(stx_ctx *x, const char *field, double got, const char *expected) {
    return stx_bad_value(x, "stx_par_cuts", field, got, expected);
}

static int stx__par_cuts_check(stx_ctx *x, const size_t *cut, size_t V,
                               const stx_par_cuts_desc *d) {
    const size_t clusters = d->clusters;
    if (!clusters || clusters > STX_MAX_CLUSTERS)
        return stx__par_cuts_bad(x, "clusters", (double)clusters, "1 to 8");
    if (clusters > 1 && !cut) {
        stx_fail(x, STX_ERR_ARG,
                 "stx_par_cuts: cut: expected an array of length %zu (clusters - 1), got NULL",
                 clusters - 1);
        return 0;
    }
    if (V >= UINT32_MAX)
        return stx__par_cuts_bad(x, "V", (double)V, "fewer than 2^32 - 1 words");
    if (V < clusters) {
        stx_fail(x, STX_ERR_ARG,
                 "stx_par_cuts: clusters: expected at most the number of words (%zu), got %zu",
                 V, clusters);
        return 0;
    }
    if (d->cost < 0 || d->cost > STX_PAR_CUTS_TIME)
        return stx__par_cuts_bad(x, "cost", d->cost, "STX_PAR_CUTS_REF, _MACS or _TIME");
    if (d->cost != STX_PAR_CUTS_REF && (!d->dim || d->dim > (size_t)1 << 29))
        return stx__par_cuts_bad(x, "dim", (double)d->dim, "1 to 2^29");
    if (!(d->factor >= 1 && d->factor < 1e6))
        return stx__par_cuts_bad(x, "factor", d->factor, "1 or more and less than 1e6");
    if (d->cost == STX_PAR_CUTS_TIME && !d->time) {
        stx_fail(x, STX_ERR_ARG,
                 "stx_par_cuts: time: STX_PAR_CUTS_TIME requires a function, got NULL");
        return 0;
    }
    return 1;
}

/* Computes the cumulative sums (V + 1) of the counts. Returns 0 and sets an error if a
   cost might not fit into 63 bits. */
static int stx__par_cuts_sums(stx_ctx *x, uint64_t *sum, const uint64_t *counts, size_t V,
                              const stx_par_cuts_desc *d) {
    size_t i, k, width = 0;
    double factor = 1;      /* the largest cost is at most sum[V] times this */
    memcpy(sum + 1, counts, V * sizeof *sum);
    if (d->sort) qsort(sum + 1, V, sizeof *sum, stx__par_falling);
    for (i = 1; i <= V && sum[i] <= INT64_MAX - sum[i - 1]; i++) sum[i] += sum[i - 1];

    if (d->cost == STX_PAR_CUTS_REF) factor = (double)V;
    if (d->cost == STX_PAR_CUTS_MACS) {
        for (k = 1; k < d->clusters; k++) width = STX_MAX(width, stx__par_tail_width(d, k));
        factor = (double)(d->dim + width) * (double)(d->dim + V + d->clusters);
    }
    if (i <= V || (double)sum[V] * factor >= 9.2e18) {
        stx_fail(x, STX_ERR_ARG,
                 "stx_par_cuts: the costs for %zu words do not fit into 63 bits; "
                 "divide all counts by a constant", V);
        return 0;
    }
    if (!sum[V]) {
        stx_fail(x, STX_ERR_ARG,
                 "stx_par_cuts: the counts of all %zu words are 0; count the words of a text", V);
        return 0;
    }
    return 1;
}

/* Runs the dynamic program over clusters. cost (2,V + 1) and start (clusters,V + 1) are
   scratch memory. */
static void stx__par_cuts_solve(const stx_par_cuts_desc *d, const uint64_t *sum, size_t V,
                                stx__par_cost *cost, uint32_t *start, size_t *cut, double *total) {
    stx__par_cutting s;
    size_t i, k;
    memset(&s, 0, sizeof s);
    s.d = d;
    s.sum = sum;
    s.V = V;
    s.width = 1;
    if (d->cost != STX_PAR_CUTS_REF) s.dim = d->dim;
    s.cost = cost;
    for (i = 1; i <= V; i++) cost[i] = stx__par_cost_of(&s, 0, i);

    for (k = 1; k < d->clusters; k++) {
        s.k = k;
        if (d->cost != STX_PAR_CUTS_REF) s.width = stx__par_tail_width(d, k);
        s.before = s.cost;
        s.cost = cost + (k & 1) * (V + 1);
        s.start = start + k * (V + 1);
        /* the last cluster must end with the last word */
        stx__par_cut(&s, k + 1 == d->clusters ? V : k + 1, V + 1, k, V);
    }

    for (i = V, k = d->clusters - 1; k >= 1; k--) cut[k - 1] = i = start[k * (V + 1) + i];
    if (!total) return;
    *total = d->cost == STX_PAR_CUTS_TIME ? s.cost[V].time : (double)s.cost[V].exact;
    if (d->cost == STX_PAR_CUTS_MACS) *total /= (double)sum[V];
}

STX_DEF int stx_par_cuts(stx_ctx *x, size_t *cut, double *total, const uint64_t *counts, size_t V,
                         const stx_par_cuts_desc *desc) {
    STX__FP_SCOPE;
    stx_par_cuts_desc d;
    stx__par_cost *cost;
    uint64_t *sum;
    uint32_t *start;
    if (!stx_ok(x)) return 0;
    if (!counts || !desc) {
        stx_fail(x, STX_ERR_ARG, "stx_par_cuts: %s: expected a pointer, got NULL",
                 counts ? "d" : "counts");
        return 0;
    }
    d = *desc;
    if (d.factor == 0) d.factor = 4;
    if (!stx__par_cuts_check(x, cut, V, &d)) return 0;

    sum = (uint64_t *)stx_block(x, stx_bytes_of(V + 1, sizeof *sum, 1));
    cost = (stx__par_cost *)stx_block(x, stx_bytes_of(V + 1, 2 * sizeof *cost, 1));
    start = (uint32_t *)stx_block(x, stx_bytes_of(V + 1, d.clusters, sizeof *start));
    if (stx_ok(x) && stx__par_cuts_sums(x, sum, counts, V, &d))
        stx__par_cuts_solve(&d, sum, V, cost, start, cut, total);
    stx_block_free(x, sum);
    stx_block_free(x, cost);
    stx_block_free(x, start);
    return stx_ok(x);
}


// >>creation

static int stx__par_bad(stx_ctx *x, const char *field, double got, const char *expected) {
    return stx_bad_value(x, "stx_par_create", field, got, expected);
}

/* Each of the next five functions checks one field and returns 1, or sets an error and
   returns 0. */

static int stx__par_in_range(stx_ctx *x, const char *field, size_t got, size_t least, int bits) {
    if (got >= least && got <= (size_t)1 << bits) return 1;
    stx_fail(x, STX_ERR_ARG, "stx_par_create: %s: expected %zu to 2^%d, got %zu", field, least,
             bits, got);
    return 0;
}

static int stx__par_one_of(stx_ctx *x, const char *field, int got, int last) {
    if (got >= 0 && got <= last) return 1;
    stx_fail(x, STX_ERR_ARG, "stx_par_create: %s: expected 0 to %d, got %d", field, last, got);
    return 0;
}

/* Accepts 0, or any value if the field applies. */
static int stx__par_allowed_if(stx_ctx *x, const char *field, double got, int applies,
                               const char *expected) {
    return got == 0 || applies || stx__par_bad(x, field, got, expected);
}

static int stx__par_number(stx_ctx *x, const char *field, double got, double least, double below,
                           const char *expected) {
    return (got >= least && got < below) || stx__par_bad(x, field, got, expected);
}

static int stx__par_probability(stx_ctx *x, const char *field, double got) {
    return stx__par_number(x, field, got, 0, 1, "0 or more and less than 1");
}

static int stx__par_ends_in_norm(const stx_par_desc *d) {
    return d->pre_norm && !d->no_final_norm;
}

/* Returns M, the capacity of the model's memory. */
static size_t stx__par_mem(const stx_par_desc *d) {
    return d->mem == STX_PAR_NO_ROWS ? 0 : d->mem;
}

/* Describes the weights of the program's type t in block l in w (STX_MAX_WEIGHTS).
   Returns their number. */
static size_t stx__par_weights(const stx_par_desc *d, size_t t, size_t l, stx_weight *w) {
    memset(w, 0, STX_MAX_WEIGHTS * sizeof *w);
    return d->type[t].weights ? d->type[t].weights(d->type[t].user, d, l, w) : 0;
}

/* Returns the number of rows of a learned position table. */
static size_t stx__par_table_rows(const stx_par_desc *d) {
    return d->segment + stx__par_mem(d);
}

static int stx__par_adaptive(const stx_par_desc *d) {
    return d->adaptive_in || d->words_out == STX_PAR_OUT_ADAPTIVE
           || d->words_out == STX_PAR_OUT_REF;
}

static int stx__par_projects(const stx_par_desc *d) {
    return d->div_val > 1 || d->emb != d->dim;
}

static stx_init stx__par_init(int kind, double a, int rule) {
    stx_init init;
    init.kind = kind;
    init.a = a;
    init.rule = rule;
    return init;
}

/* Returns the width of output cluster c in a model with STX_PAR_OUT_REF. */
static size_t stx__par_ref_width(const stx_par_desc *d, size_t c) {
    if (!c) return d->dim;
    if (d->proj_dims[c - 1]) return d->proj_dims[c - 1];
    return stx__par_divided_width(d->dim, d->proj_factor, c);
}

/* Fills in the description of the embedding and the output head from a resolved desc. */
static void stx__par_vocab_desc(const stx_par_desc *d, stx_vocab_io_desc *w) {
    const int ref = d->words_out == STX_PAR_OUT_REF, xl = d->init == STX_PAR_INIT_XL;
    size_t c;
    memset(w, 0, sizeof *w);
    w->vocab = d->vocab;
    w->dim = w->emb = d->dim;
    w->in = d->adaptive_in ? STX_VOCAB_ADAPTIVE : STX_VOCAB_PLAIN;
    w->out = STX_VOCAB_ADAPTIVE;
    if (d->words_out == STX_PAR_OUT_PLAIN) w->out = STX_VOCAB_PLAIN;
    if (d->words_out == STX_PAR_OUT_TIED) w->out = STX_VOCAB_TIED;
    w->scale = d->emb_scale;

    w->cutoffs = d->cutoffs;
    w->no_cutoffs = !d->cutoffs;
    memcpy(w->cutoff, d->cutoff, sizeof w->cutoff);
    for (c = 0; c <= d->cutoffs; c++) {
        w->width[c] = (size_t)floor((double)d->emb / stx_math_pow(d->div_val, (double)c));
        if (ref) w->out_width[c] = stx__par_ref_width(d, c);
    }

    if (!stx__par_projects(d)) w->no_projections = ref ? STX_VOCAB_INPUT : STX_VOCAB_BOTH;
    w->direct_head = ref ? STX_VOCAB_OUTPUT : 0;
    w->proj_biases = w->forward_columns = ref;
    w->share_tables = d->tie_words;
    w->share_projs = d->tie_projs != STX_PAR_TIE_NONE;
    w->separate_first = d->tie_projs == STX_PAR_TIE_BUT_FIRST;
    w->one_proj = d->one_proj;

    w->table = stx__par_init(STX_UNIFORM, 0.05, 0);
    w->out_table = w->cluster = w->proj = stx__par_init(STX_UNIFORM, 1, STX_INIT_XAVIER);
    if (xl) {
        w->table = w->out_table = w->cluster = stx__par_init(STX_NORMAL, d->init_std, 0);
        w->proj = stx__par_init(STX_NORMAL, d->proj_std, 0);
    }
}

static int stx__par_check_padding(stx_ctx *x, const stx_par_desc *d) {
    const int valid = d->pads && d->pad_id > 0 && (size_t)d->pad_id < d->vocab;
    return stx__par_allowed_if(x, "pads", d->pads, d->vocab > 0, "0 if vocab is 0")
        && stx__par_allowed_if(x, "pad_id", d->pad_id, valid,
                               "an id below vocab if pads is set, otherwise 0");
}

static int stx__par_check_vocab(stx_ctx *x, stx_par_desc *d) {
    const int adaptive = stx__par_adaptive(d), ref = d->words_out == STX_PAR_OUT_REF;
    const int out_adaptive = d->words_out == STX_PAR_OUT_ADAPTIVE;
    const int both = d->adaptive_in && out_adaptive;
    const int same_width = d->emb == d->dim;
    const int one_proj = d->adaptive_in && d->div_val == 1 && !same_width;
    stx_vocab_io_desc w;
    size_t i;
    if (!stx__par_one_of(x, "words_out", d->words_out, STX_PAR_OUT_REF)
        || !stx__par_one_of(x, "tie_projs", d->tie_projs, STX_PAR_TIE_BUT_FIRST)
        || !stx__par_in_range(x, "emb", d->emb, 1, 29)
        || !stx__par_allowed_if(x, "emb", (double)d->emb,
                                same_width || d->adaptive_in || out_adaptive,
                                "dim unless the input or the output is adaptive")
        || !stx__par_allowed_if(x, "cutoffs", (double)d->cutoffs, adaptive,
                                "0 unless the input or the output is adaptive")
        || !stx__par_number(x, "div_val", d->div_val, 1, 1e6, "1 or more and less than 1e6")
        || !stx__par_number(x, "proj_factor", d->proj_factor, 1, 1e6, "1 or more and less than 1e6")
        || !stx__par_allowed_if(x, "tie_words", d->tie_words, both,
                                "0 unless input and output are adaptive")
        || !stx__par_allowed_if(x, "tie_projs", d->tie_projs, both && stx__par_projects(d),
                                "0 unless input and output are adaptive and have projections")
        || !stx__par_allowed_if(x, "one_proj", d->one_proj, one_proj,
                                "0 unless adaptive_in is set, div_val is 1 and emb differs "
                                "from dim")
        || !stx__par_number(x, "emb_scale", d->emb_scale, -1e30, 1e30, "a finite number"))
        return 0;

    if (d->cutoffs > STX_MAX_CLUSTERS - 1)
        return stx__par_bad(x, "cutoffs", (double)d->cutoffs, "at most 7");
    if (floor((double)d->emb / stx_math_pow(d->div_val, (double)d->cutoffs)) < 1)
        return stx__par_bad(x, "div_val", d->div_val,
                            "a divisor that leaves the last cluster a width of at least 1");
    for (i = 0; i < STX_MAX_CLUSTERS - 1; i++) {
        if (!stx__par_allowed_if(x, "proj_dims", (double)d->proj_dims[i], ref && i < d->cutoffs,
                                 "0 except for the tails of words_out = STX_PAR_OUT_REF")
            || !stx__par_in_range(x, "proj_dims", d->proj_dims[i], 0, 29))
            return 0;
    }
    if (!stx__par_check_padding(x, d)) return 0;
    if (!d->vocab) return 1;
    stx__par_vocab_desc(d, &w);
    return stx_vocab_io_resolve(x, "stx_par_create", &w, &w);
}

static int stx__par_check_latency(stx_ctx *x, stx_par_desc *d) {
    const int hinge = d->latency == STX_PAR_LATENCY_HINGE;
    const int fbnet = d->latency == STX_PAR_LATENCY_FBNET;
    int k, any = d->cost[0] > 0 || d->cost[1] > 0;
    size_t t;
    if (!stx__par_one_of(x, "latency", d->latency, STX_PAR_LATENCY_FBNET)
        || !stx__par_one_of(x, "latency_w", d->latency_w, STX_PAR_LATENCY_OF_W))
        return 0;
    for (k = 0; k < 2; k++)
        if (!stx__par_number(x, "cost", d->cost[k], 0, 1e30, "0 or more")) return 0;
    if (!stx__par_number(x, "latency_weight", d->latency_weight, -1e30, 1e30, "a finite number")
        || !stx__par_number(x, "latency_target", d->latency_target, 0, 1e30, "0 or more")
        || !stx__par_number(x, "latency_power", d->latency_power, -1e3, 1e3, "-1000 to 1000"))
        return 0;

    for (t = 0; t < d->types; t++) any |= d->type[t].cost > 0;
    if (d->latency && !any)
        return stx__par_bad(x, "cost", 0, "a time above 0 if latency is set");
    if (d->latency && d->latency_weight == 0)
        return stx__par_bad(x, "latency_weight", 0, "a number other than 0 if latency is set");
    if (hinge != (d->latency_target > 0))
        return stx__par_bad(x, "latency_target", d->latency_target,
                            "more than 0 with latency = STX_PAR_LATENCY_HINGE, otherwise 0");
    if (!stx__par_allowed_if(x, "latency_power", d->latency_power, fbnet,
                             "0 unless latency = STX_PAR_LATENCY_FBNET"))
        return 0;
    if (fbnet && d->latency_power == 0) d->latency_power = 0.6;
    return 1;
}

static int stx__par_check_search(stx_ctx *x, stx_par_desc *d) {
    static const double equal[3] = {0.33, 0.33, 0.34};
    const int none = d->pi0[0] == 0 && d->pi0[1] == 0 && d->pi0[2] == 0;
    const int by_token = d->noise == STX_PAR_NOISE_TOKENS;
    const double above = d->gate_form == STX_PAR_FORM_PI ? -1e30 : 0;
    int k;
    if (!stx__par_one_of(x, "gate_form", d->gate_form, STX_PAR_FORM_PI)
        || !stx__par_one_of(x, "gate", d->gate, STX_PAR_ST)
        || !stx__par_one_of(x, "gate_eval", d->gate_eval, STX_PAR_EVAL_NOISE)
        || !stx__par_one_of(x, "noise", d->noise, STX_PAR_NOISE_TOKENS)
        || !stx__par_allowed_if(x, "noise_tokens", (double)d->noise_tokens, by_token,
                                "0 unless noise = STX_PAR_NOISE_TOKENS"))
        return 0;
    if (by_token && !stx__par_in_range(x, "noise_tokens", d->noise_tokens, 1, 31)) return 0;
    for (k = 0; k < 3; k++) {
        if (none) d->pi0[k] = d->types ? 1 / (3 + (double)d->types) : equal[k];
        if (!(d->pi0[k] > above && d->pi0[k] < 1e30))
            return stx__par_bad(x, "pi0", d->pi0[k],
                                "positive probabilities, or finite weights with STX_PAR_FORM_PI");
    }
    if (d->tau == 0) d->tau = 1;
    if (!stx__par_number(x, "tau", d->tau, 1e-30, 1e30, "at least 1e-30 and below 1e30")) return 0;
    return stx__par_check_latency(x, d);
}

STX_DEF void stx_par_reference(stx_par_desc *d) {
    if (!d) return;
    d->positions = STX_PAR_SINES;
    d->sines = STX_PAR_SINES_REF;
    d->pos_mode = STX_PAR_POS_REF;
    d->full_scale = d->attn_relu = d->biases = d->own_uv = 1;
    d->pre_norm = d->no_final_norm = d->one_proj = 0;
    d->norm_eps = 1e-3;
    d->gate_form = STX_PAR_FORM_PI;
    d->gate = STX_PAR_SOFT;
    d->gate_eval = STX_PAR_EVAL_NOISE;
    d->words_out = STX_PAR_OUT_REF;
    d->pads = d->divide_all = 1;
    d->pad_id = 0;
    d->init = STX_PAR_INIT_REF;
}

static int stx__par_bad_type(stx_ctx *x, size_t t, const char *field, double got,
                             const char *expected) {
    char full[48];
    snprintf(full, sizeof full, "type[%zu].%s", t, field);
    return stx__par_bad(x, full, got, expected);
}

/* Checks the letter and the name of type t, which must differ from those before it. */
static int stx__par_check_names(stx_ctx *x, const stx_par_type *type, size_t t) {
    const char letter = type[t].letter, *name = type[t].name ? type[t].name : "";
    const char lower = (char)(letter | 32);
    int letter_taken = letter && strchr("sfig", letter);
    int name_taken = !strcmp(name, "attn") || !strcmp(name, "ff");
    size_t i;
    for (i = 0; i < t; i++) {
        letter_taken |= type[i].letter == letter;
        name_taken |= !strcmp(type[i].name, name);
    }
    if (lower < 'a' || lower > 'z' || letter_taken) {
        stx_fail(x, STX_ERR_ARG,
                 "stx_par_create: type[%zu].letter: expected a letter other than s, f, i and g, "
                 "which are built in, and those of other types, got '%c'", t,
                 letter > ' ' && letter < 127 ? letter : '?');
        return 0;
    }
    if (!*name || strlen(name) > 32 || name_taken) {
        stx_fail(x, STX_ERR_ARG,
                 "stx_par_create: type[%zu].name: expected 1 to 32 bytes other than \"attn\", "
                 "\"ff\" and the names of other types, got \"%.32s\"", t, name);
        return 0;
    }
    return 1;
}

/* Checks the types of the program, except for their weights. */
static int stx__par_check_types(stx_ctx *x, const stx_par_desc *d) {
    size_t t;
    if (d->types > STX_PAR_MAX_TYPES || (d->types && !d->type))
        return stx__par_bad(x, "types", (double)d->types,
                            "the number of elements in `type`, at most STX_PAR_MAX_TYPES (3)");
    for (t = 0; t < d->types; t++) {
        const stx_par_type *type = &d->type[t];
        if (!stx__par_check_names(x, d->type, t)) return 0;
        if (!type->forward) {
            stx_fail(x, STX_ERR_ARG, "stx_par_create: type[%zu].forward: expected a function that "
                                     "returns (B,T,D), got NULL", t);
            return 0;
        }
        if (type->rows > (size_t)1 << 30)
            return stx__par_bad_type(x, t, "rows", (double)type->rows, "at most 2^30");
        if (type->width > (size_t)1 << 29 || (type->width && !type->rows))
            return stx__par_bad_type(x, t, "width", (double)type->width,
                                     "at most 2^29, and 0 unless `rows` is set");
        if (!(type->cost >= 0 && type->cost < 1e30))
            return stx__par_bad_type(x, t, "cost", type->cost, "0 or more");
        if (!(type->pi0 >= 0 && type->pi0 < 1e30))
            return stx__par_bad_type(x, t, "pi0", type->pi0, "0 or more (0 means 1 / K)");
    }
    return 1;
}

/* Checks the weights of the types. */
static int stx__par_check_weights(stx_ctx *x, const stx_par_desc *d) {
    char op[64];
    stx_weight w[STX_MAX_WEIGHTS];
    size_t t, l;
    for (t = 0; t < d->types; t++) {
        snprintf(op, sizeof op, "stx_par_create: type[%zu]", t);
        for (l = 0; l < d->blocks; l++)
            if (!stx_weights_check(x, op, w, stx__par_weights(d, t, l, w))) return 0;
    }
    return 1;
}

/* Checks the pattern, if there is one, and fills in the number of blocks. */
static int stx__par_check_blocks(stx_ctx *x, stx_par_desc *d) {
    char pattern[STX__PAR_MAX_BLOCKS + 1], quoted[STX_QUOTE], letters[STX_PAR_MAX_BRANCHES + 1];
    size_t L;
    stx__par_letters(d, letters);
    if (d->pattern && !*d->pattern) d->pattern = NULL;
    if (!d->pattern) {
        if (!d->blocks) d->blocks = 32;
        return 1;
    }
    L = stx__par_expand_all(pattern, sizeof pattern, d->pattern, letters);
    if (!L) {
        stx_fail(x, STX_ERR_ARG,
                 "stx_par_create: pattern: expected at most %d of the letters s, f and i%s%s%s, "
                 "with groups and counts such as (sfff)6f8, got \"%s\"", (int)STX__PAR_MAX_BLOCKS,
                 d->types ? " and of desc.type (" : "", letters + 3, d->types ? ")" : "",
                 stx_quote(quoted, d->pattern, strlen(d->pattern)));
        return 0;
    }
    if (d->blocks && d->blocks != L) {
        stx_fail(x, STX_ERR_ARG,
                 "stx_par_create: blocks: expected 0 or %zu, the number of blocks in the pattern, "
                 "got %zu", L, d->blocks);
        return 0;
    }
    d->blocks = L;
    return 1;
}

/* Fills in most defaults. The check functions fill in the others: blocks, head_dim,
   inner and the search options. */
static void stx__par_defaults(stx_par_desc *d) {
    if (!d->dim) d->dim = 512;
    if (!d->heads) d->heads = 8;
    if (!d->segment) d->segment = 128;
    if (!d->mem) d->mem = d->segment;
    if (!d->emb) d->emb = d->dim;
    if (d->norm_eps == 0) d->norm_eps = 1e-5;
    if (d->div_val == 0) d->div_val = 1;
    if (d->proj_factor == 0) d->proj_factor = 4;
    if (d->emb_scale == 0) d->emb_scale = sqrt((double)d->dim);
    if (d->init_std == 0) d->init_std = 0.02;
    if (d->proj_std == 0) d->proj_std = 0.01;
}

static int stx__par_check_sizes(stx_ctx *x, stx_par_desc *d) {
    if (!stx__par_in_range(x, "blocks", d->blocks, 1, 12)
        || !stx__par_in_range(x, "dim", d->dim, 1, 29)
        || !stx__par_in_range(x, "heads", d->heads, 1, 8)
        || !stx__par_in_range(x, "segment", d->segment, 1, 30))
        return 0;
    if (d->mem != STX_PAR_NO_ROWS && !stx__par_in_range(x, "mem", d->mem, 0, 30)) return 0;
    if (!d->head_dim && d->dim % d->heads) {
        stx_fail(x, STX_ERR_ARG,
                 "stx_par_create: heads: expected a divisor of dim %zu (or set head_dim), got %zu",
                 d->dim, d->heads);
        return 0;
    }
    if (!d->head_dim) d->head_dim = d->dim / d->heads;
    if (!d->inner) d->inner = 4 * d->dim;
    return stx__par_in_range(x, "head_dim", d->head_dim, 1, 20)
        && stx__par_in_range(x, "inner", d->inner, 1, 31);
}

static int stx__par_check_positions(stx_ctx *x, const stx_par_desc *d) {
    const int by_sines = d->positions == STX_PAR_SINES;
    if (!stx__par_one_of(x, "positions", d->positions, STX_PAR_LEARNED_BIAS)
        || !stx__par_one_of(x, "sines", d->sines, STX_PAR_SINES_REF)
        || !stx__par_one_of(x, "pos_mode", d->pos_mode, STX_PAR_POS_REF)
        || !stx__par_allowed_if(x, "sines", d->sines, by_sines,
                                "0 unless positions = STX_PAR_SINES")
        || !stx__par_allowed_if(x, "pos_mode", d->pos_mode, d->sines == STX_PAR_SINES_REF,
                                "0 unless sines = STX_PAR_SINES_REF")
        || !stx__par_in_range(x, "clamp_len", d->clamp_len, 0, 30)
        || !stx__par_allowed_if(x, "clamp_len", (double)d->clamp_len,
                                d->pos_mode == STX_PAR_POS_DIST,
                                "0 unless pos_mode = STX_PAR_POS_DIST")
        || !stx__par_allowed_if(x, "same_length", d->same_length, stx__par_mem(d) > 1,
                                "0 unless mem is 2 or more"))
        return 0;
    if (by_sines && d->sines == STX_PAR_SINES_SPLIT && d->dim % 2)
        return stx__par_bad(x, "dim", (double)d->dim,
                            "an even number with sines = STX_PAR_SINES_SPLIT");
    return stx__par_probability(x, "pos_dropout", d->pos_dropout)
        && stx__par_allowed_if(x, "pos_dropout", d->pos_dropout, by_sines,
                               "0 unless positions = STX_PAR_SINES");
}

STX_DEF int stx_par_resolve(stx_ctx *x, const stx_par_desc *from, stx_par_desc *d) {
    STX__FP_SCOPE;
    if (!from || !d) {
        stx_fail(x, STX_ERR_ARG, "stx_par_resolve: expected a desc, got NULL");
        return 0;
    }
    *d = *from;
    if (!stx__par_check_types(x, d) || !stx__par_check_blocks(x, d)) return 0;
    stx__par_defaults(d);
    if (!stx__par_check_sizes(x, d) || !stx__par_check_positions(x, d)) return 0;
    if (!stx__par_allowed_if(x, "no_final_norm", d->no_final_norm, d->pre_norm,
                             "0 unless pre_norm = 1")
        || !stx__par_number(x, "norm_eps", d->norm_eps, 1e-30, 1, "more than 0 and less than 1")
        || !stx__par_probability(x, "dropout", d->dropout)
        || !stx__par_probability(x, "attn_dropout", d->attn_dropout)
        || !stx__par_probability(x, "inner_dropout", d->inner_dropout)
        || !stx__par_probability(x, "final_dropout", d->final_dropout)
        || !stx__par_one_of(x, "init", d->init, STX_PAR_INIT_REF)
        || !stx__par_number(x, "init_std", d->init_std, 0, 1e6, "0 or more")
        || !stx__par_number(x, "proj_std", d->proj_std, 0, 1e6, "0 or more"))
        return 0;
    d->recompute_layers = STX_MIN(d->recompute_layers, d->blocks);
    return stx__par_check_search(x, d) && stx__par_check_weights(x, d)
        && stx__par_check_vocab(x, d);
}

/* Writes the letters of a resolved desc's blocks, with a terminating 0, to kind
   (L + 1). In a supernet, each letter is 'g'. */
static void stx__par_kinds(const stx_par_desc *d, char *kind) {
    char letters[STX_PAR_MAX_BRANCHES + 1];
    stx__par_letters(d, letters);
    if (d->pattern)
        stx__par_expand_all(kind, d->blocks + 1, d->pattern, letters);
    else
        memset(kind, 'g', d->blocks);
}

static int stx__par_attends(int kind) {
    return kind == 's' || kind == 'g';
}

static int stx__par_feeds(int kind) {
    return kind == 'f' || kind == 'g';
}

/* Returns 1 if a block of this kind runs type t of the program. */
static int stx__par_runs(const stx_par_desc *d, int kind, size_t t) {
    return kind == 'g' || kind == d->type[t].letter;
}

STX_DEF size_t stx_par_count(const stx_par_desc *desc) {
    STX__FP_SCOPE;
    char kind[STX__PAR_MAX_BLOCKS + 1];
    stx_par_desc d;
    stx_vocab_io_desc vocab;
    stx_weight w[STX_MAX_WEIGHTS];
    size_t n = 0, l, t, attn, ff, own, width, rows, uv, attentions = 0;
    if (!desc || !stx_par_resolve(NULL, desc, &d)) return 0;
    if (d.vocab) {
        stx__par_vocab_desc(&d, &vocab);
        if (!stx_vocab_io_resolve(NULL, NULL, &vocab, &vocab)) return 0;
        n = stx_vocab_io_count(&vocab);
    }

    /* size of an attention block: LN_a, Wq, Wkv and Wo, positions, biases, u and v */
    width = d.heads * d.head_dim;
    rows = stx__par_table_rows(&d);
    uv = d.positions == STX_PAR_LEARNED_BIAS ? 1 : 2;
    attn = stx_size_add(2 * d.dim, 4 * d.dim, width);
    attn = stx_size_add(attn, d.positions ? rows : d.dim, width);
    if (d.positions == STX_PAR_LEARNED_BIAS) attn = stx_size_add(attn, rows, d.heads);
    if (d.biases) attn = stx_size_add(attn + d.dim, d.positions ? 3 : 4, width);
    if (d.own_uv) attn = stx_size_add(attn, uv, width);

    /* size of a feed-forward block: LN_f, W1 and W2 with biases */
    ff = stx_size_add(3 * d.dim, d.inner, 2 * d.dim + 1);

    stx__par_kinds(&d, kind);
    for (l = 0; l < d.blocks; l++) {
        for (t = 0; t < d.types; t++) {
            if (!stx__par_runs(&d, kind[l], t)) continue;
            own = stx_weights_size(w, stx__par_weights(&d, t, l, w));
            n = stx_size_add(stx_size_add(n, 2, d.dim), 1, own);
        }
        attentions += (size_t)stx__par_attends(kind[l]);
        if (stx__par_attends(kind[l])) n = stx_size_add(n, 1, attn);
        if (stx__par_feeds(kind[l])) n = stx_size_add(n, 1, ff);
    }
    if (attentions && !d.own_uv) n = stx_size_add(n, uv, width);
    return stx__par_ends_in_norm(&d) ? stx_size_add(n, 2, d.dim) : n;
}

static stx_tensor *stx__par_param(stx_par *m, size_t l, const char *name, int init, double a,
                                  size_t d0, size_t d1) {
    char full[96];
    snprintf(full, sizeof full, "layers.%zu.%s", l, name);
    return stx_param(m->params, init, a, full, d0, d1, 0, 0);
}

/* Creates a matrix (d0,d1). outs is the number of outputs in Glorot's formula. This
   number exceeds d0 if one matrix of the reference corresponds to several matrices
   here. */
static stx_tensor *stx__par_matrix(stx_par *m, size_t l, const char *name, size_t d0, size_t d1,
                                   size_t outs) {
    if (m->desc.init == STX_PAR_INIT_XL)
        return stx__par_param(m, l, name, STX_NORMAL, m->desc.init_std, d0, d1);
    return stx__par_param(m, l, name, STX_UNIFORM, sqrt(6 / (double)(outs + d1)), d0, d1);
}

static stx_tensor *stx__par_zeros(stx_par *m, size_t l, const char *name, size_t d0, size_t d1) {
    return stx__par_param(m, l, name, STX_ZEROS, 0, d0, d1);
}

static double stx__par_plus_one(void *user, size_t i, double value) {
    (void)user;
    (void)i;
    return 1 + value;
}

/* Creates the parameters of a norm: gain 1, or N(1,init_std) with STX_PAR_INIT_XL, and
   shift 0. */
static void stx__par_norm_params(stx_par *m, const char *name, stx_tensor **gain,
                                 stx_tensor **shift) {
    const int xl = m->desc.init == STX_PAR_INIT_XL;
    char full[96];
    snprintf(full, sizeof full, "%s.weight", name);
    *gain = stx_param(m->params, xl ? STX_NORMAL : STX_CONSTANT, xl ? m->desc.init_std : 1, full,
                      m->desc.dim, 0, 0, 0);
    if (xl) stx_param_apply(m->ctx, *gain, stx__par_plus_one, NULL);
    snprintf(full, sizeof full, "%s.bias", name);
    *shift = stx_param(m->params, STX_ZEROS, 0, full, m->desc.dim, 0, 0, 0);
}

/* Creates u and v. STX_PAR_INIT_REF uses Keras' Glorot-normal initialiser for a tensor
   (1,H,1,dh): a normal distribution truncated at two standard deviations and rescaled.
   0.8796.. is the standard deviation of N(0,1) truncated at 2. */
static void stx__par_uv_params(stx_par *m, const char *name, stx_tensor **u, stx_tensor **v) {
    const size_t H = m->desc.heads, dh = m->desc.head_dim;
    const int xl = m->desc.init == STX_PAR_INIT_XL, kind = xl ? STX_NORMAL : STX_TRUNCATED;
    const double glorot = sqrt(2 / (double)(H + H * dh)) / 0.87962566103423978;
    const double std = xl ? m->desc.init_std : glorot;
    char full[96];
    snprintf(full, sizeof full, "%s.u", name);
    *u = stx_param_elementwise(stx_param(m->params, kind, std, full, H, dh, 0, 0));
    if (m->desc.positions == STX_PAR_LEARNED_BIAS) return;
    snprintf(full, sizeof full, "%s.v", name);
    *v = stx_param_elementwise(stx_param(m->params, kind, std, full, H, dh, 0, 0));
}

static int stx__par_attention_params(stx_par *m, size_t l) {
    const stx_par_desc *d = &m->desc;
    stx_par_block *block = &m->block[l];
    const size_t D = d->dim, width = d->heads * d->head_dim, rows = stx__par_table_rows(d);
    char full[96];
    snprintf(full, sizeof full, "layers.%zu.attn.norm", l);
    stx__par_norm_params(m, full, &block->attn_gain, &block->attn_shift);

    /* store the weights adjacently, so that one GEMM computes queries, keys and
       values */
    if (!stx_params_make_contiguous(m->params, 3 * width * D)) return 0;
    block->wq = stx__par_matrix(m, l, "attn.query.weight", width, D, 3 * width);
    block->wkv = stx__par_matrix(m, l, "attn.kv.weight", 2 * width, D, 3 * width);
    if (d->positions)
        block->rel = stx__par_matrix(m, l, "attn.rel.weight", rows, width, width);
    else
        block->wr = stx__par_matrix(m, l, "attn.pos.weight", width, D, width);
    if (d->positions == STX_PAR_LEARNED_BIAS)
        block->rel_bias = stx__par_zeros(m, l, "attn.r_bias", rows, d->heads);
    stx_param_elementwise(block->rel);
    stx_param_elementwise(block->rel_bias);
    block->wo = stx__par_matrix(m, l, "attn.out.weight", D, width, D);

    if (d->biases) {
        if (!stx_params_make_contiguous(m->params, 3 * width)) return 0;
        block->bq = stx__par_zeros(m, l, "attn.query.bias", width, 0);
        block->bkv = stx__par_zeros(m, l, "attn.kv.bias", 2 * width, 0);
        if (block->wr) block->br = stx__par_zeros(m, l, "attn.pos.bias", width, 0);
        block->bo = stx__par_zeros(m, l, "attn.out.bias", D, 0);
    }

    if (d->own_uv) {
        snprintf(full, sizeof full, "layers.%zu.attn", l);
        stx__par_uv_params(m, full, &block->u, &block->v);
    } else {
        if (!m->u) stx__par_uv_params(m, "attn", &m->u, &m->v);
        block->u = m->u;
        block->v = m->v;
    }
    return 1;
}

static void stx__par_feed_params(stx_par *m, size_t l) {
    stx_par_block *block = &m->block[l];
    const size_t D = m->desc.dim, F = m->desc.inner;
    char full[96];
    snprintf(full, sizeof full, "layers.%zu.ff.norm", l);
    stx__par_norm_params(m, full, &block->ff_gain, &block->ff_shift);
    block->w1 = stx__par_matrix(m, l, "ff.fc1.weight", F, D, F);
    block->b1 = stx__par_zeros(m, l, "ff.fc1.bias", F, 0);
    block->w2 = stx__par_matrix(m, l, "ff.fc2.weight", D, F, D);
    block->b2 = stx__par_zeros(m, l, "ff.fc2.bias", D, 0);
}

/* Creates the norm and the weights of the program's type t in block l. */
static void stx__par_own_params(stx_par *m, size_t l, size_t t) {
    stx_par_block *block = &m->block[l];
    stx_weight w[STX_MAX_WEIGHTS];
    const size_t n = stx__par_weights(&m->desc, t, l, w);
    char full[96];
    snprintf(full, sizeof full, "layers.%zu.%.32s.norm", l, m->own[t].name);
    stx__par_norm_params(m, full, &block->own[t].gain, &block->own[t].shift);
    snprintf(full, sizeof full, "layers.%zu.%.32s.", l, m->own[t].name);
    stx_weights_create(m->params, full, w, n, block->own[t].w);
}

/* Rescales the head of STX_PAR_OUT_REF. In the reference, the head's words and the
   tails are rows of one matrix, and Glorot's formula uses the size of that matrix. */
static void stx__par_scale_ref_head(stx_par *m) {
    const stx_adaptive *head = &m->vocab_io->out;
    const double words = (double)head->end[0], tails = (double)head->clusters - 1;
    const double D = (double)m->desc.dim, all = words + tails + D;
    if (m->desc.init != STX_PAR_INIT_REF || !head->cluster_w) return;
    stx_param_scale(m->ctx, head->table[0], 0, head->table[0]->dim[0], sqrt((words + D) / all));
    stx_param_scale(m->ctx, head->cluster_w, 0, head->cluster_w->dim[0], sqrt((tails + D) / all));
}

static void stx__par_gate_params(stx_par *m) {
    const stx_par_desc *d = &m->desc;
    const size_t K = stx__par_branches(m);
    double cost[STX_PAR_MAX_BRANCHES - 1];
    stx_real al[STX_PAR_MAX_BRANCHES];
    char name[32];
    size_t l, k;
    for (k = 0; k < K; k++) {
        const double pi0 = k < 3 ? d->pi0[k] : m->own[k - 3].pi0;
        al[k] = (stx_real)(d->gate_form == STX_PAR_FORM_PI ? pi0 : stx_math_log(pi0));
    }
    for (k = 0; k + 1 < K; k++) cost[k] = k < 2 ? d->cost[k] : m->own[k - 2].cost;
    m->gates = stx_params_create(m->ctx);
    for (l = 0; l < d->blocks && stx_ok(m->ctx); l++) {
        snprintf(name, sizeof name, "arch.%zu", l);
        m->block[l].al = stx_param(m->gates, STX_ZEROS, 0, name, K, 0, 0, 0);
        stx_set(m->ctx, m->block[l].al, al);
    }
    m->tau = stx_scalar_create(m->ctx, d->tau);
    m->cost = stx_block_f32(m->ctx, K);
    stx_par_set_cost(m, cost);
}

STX_DEF stx_par *stx_par_create(stx_ctx *x, const stx_par_desc *desc) {
    STX__FP_SCOPE;
    stx_par *m;
    stx_par_desc *d;
    stx_vocab_io_desc vocab;
    char *kind;
    size_t l, t;
    if (!stx_ok(x)) return NULL;
    if (!desc) {
        stx_fail(x, STX_ERR_ARG, "stx_par_create: expected a desc (all zeros is valid), got NULL");
        return NULL;
    }
    m = (stx_par *)stx_persist(x, sizeof *m);
    if (!m || !stx_par_resolve(x, desc, &m->desc)) return NULL;
    d = &m->desc;
    m->ctx = x;
    m->params = stx_params_create(x);
    m->block = (stx_par_block *)stx_persist(x, stx_bytes_of(d->blocks, sizeof *m->block, 1));
    m->w = (stx_tensor **)stx_persist(x, stx_bytes_of(d->blocks, sizeof *m->w, 1));
    m->attended = (stx_attention_record *)stx_persist(x, d->blocks * sizeof *m->attended);
    kind = (char *)stx_persist(x, d->blocks + 1);
    m->own = (stx_par_type *)stx_persist(x, stx_bytes_of(d->types + 1, sizeof *m->own, 1));
    if (!m->params || !m->block || !m->w || !m->attended || !kind || !m->own) return NULL;
    for (t = 0; t < d->types; t++) {
        m->own[t] = d->type[t];
        if (m->own[t].pi0 == 0) m->own[t].pi0 = 1 / (3 + (double)d->types);
        if (m->own[t].rows && !m->own[t].width) m->own[t].width = d->dim;
    }
    d->type = d->types ? m->own : NULL;
    stx__par_kinds(d, kind);
    if (d->pattern) m->pattern = kind;
    d->pattern = m->pattern;

    if (d->vocab) {
        stx__par_vocab_desc(d, &vocab);
        m->vocab_io = stx_vocab_io_create(m->params, &vocab);
        if (m->vocab_io) stx__par_scale_ref_head(m);
    }
    for (l = 0; l < d->blocks && stx_ok(x); l++) {
        m->block[l].kind = kind[l];
        if (stx__par_attends(kind[l]) && !stx__par_attention_params(m, l)) return NULL;
        if (stx__par_feeds(kind[l])) stx__par_feed_params(m, l);
        for (t = 0; t < d->types; t++)
            if (stx__par_runs(d, kind[l], t)) stx__par_own_params(m, l, t);
    }
    if (stx__par_ends_in_norm(d))
        stx__par_norm_params(m, "final_norm", &m->final_gain, &m->final_shift);
    if (!m->pattern && stx_ok(x)) stx__par_gate_params(m);
    return stx_ok(x) ? m : NULL;
}

STX_DEF stx_params *stx_par_params(stx_par *m) {
    return m ? m->params : NULL;
}

/* Returns the weight in `from` that corresponds to parameter i of `to`, or sets an
   error and returns NULL. */
static stx_tensor *stx__par_counterpart(stx_par *to, const stx_par *from, size_t i) {
    const char *name = to->params->name[i];
    const stx_tensor *t = to->params->tensor[i];
    stx_tensor *f = stx_params_find(from->params, name);
    if (f && f->size == t->size && f->dim[0] == t->dim[0]) return f;
    stx_fail(to->ctx, STX_ERR_SHAPE,
             "stx_par_inherit: %s: expected a weight of the same shape in the source network, "
             "got %s; the source must have the target's sizes and all of its branches",
             name, f ? "another shape" : "none");
    return NULL;
}

STX_DEF int stx_par_inherit(stx_par *to, const stx_par *from) {
    size_t i;
    if (!to || !from || !stx_ok(to->ctx) || !stx_ok(from->ctx)) return 0;
    for (i = 0; i < to->params->count; i++)
        if (!stx__par_counterpart(to, from, i)) return 0;

    for (i = 0; i < to->params->count; i++) {
        stx_tensor *t = to->params->tensor[i];
        stx_real *values = (stx_real *)stx_block(to->ctx, stx_bytes_of(t->size, sizeof *values, 1));
        if (!values) return 0;
        stx_get(from->ctx, stx__par_counterpart(to, from, i), values);
        stx_set(to->ctx, t, values);
        stx_block_free(to->ctx, values);
    }
    return stx_ok(to->ctx) && stx_ok(from->ctx);
}


// >>search

STX_DEF void stx_par_set_tau(stx_par *m, double tau) {
    STX__FP_SCOPE;
    if (!m || !m->tau || !stx_ok(m->ctx)) return;
    if (!(tau >= 1e-30 && tau < 1e30)) {
        stx_bad_value(m->ctx, "stx_par_set_tau", "tau", tau, "at least 1e-30 and below 1e30");
        return;
    }
    m->desc.tau = tau;
    stx_scalar_set(m->ctx, m->tau, tau);
}

STX_DEF void stx_par_set_cost(stx_par *m, const double *cost) {
    STX__FP_SCOPE;
    stx_real c[STX_PAR_MAX_BRANCHES] = {0};
    size_t k, n;
    if (!m || !m->cost || !cost || !stx_ok(m->ctx)) return;
    n = stx__par_branches(m) - 1;       /* all branches but the identity, which takes 0 */
    for (k = 0; k < n; k++) {
        if (cost[k] >= 0 && cost[k] < 1e30) continue;
        stx_bad_value(m->ctx, "stx_par_set_cost", "cost", cost[k], "0 or more");
        return;
    }
    for (k = 0; k < n; k++) {
        if (k < 2) m->desc.cost[k] = cost[k];
        else m->own[k - 2].cost = cost[k];
        c[k < 2 ? k : k + 1] = (stx_real)cost[k];
    }
    stx_upload(m->ctx, m->cost, c, n + 1);
}

STX_DEF double stx_par_tau(const stx_par_anneal *a, uint64_t n) {
    STX__FP_SCOPE;
    double part = 1, tau;
    if (!a) return 1;
    if (a->total && n < a->total) part = (double)n / (double)a->total;
    tau = a->from * stx_math_pow(a->form == STX_PAR_TAU_FACTOR ? a->to : a->to / a->from, part);
    STX__FP_PIN(tau);
    return tau;
}

STX_DEF void stx_par_freeze(stx_par *m, int frozen) {
    if (m) m->frozen = frozen != 0;
}

STX_DEF void stx_par_set_uniforms(stx_par *m, const stx_real *u, size_t count) {
    STX__FP_SCOPE;
    const int one_draw = m && m->desc.noise == STX_PAR_NOISE_STEP;
    size_t per_draw, i;
    if (!m) return;
    if (!u) m->uniforms_count = 0;
    if (!m->gates || !u || !stx_ok(m->ctx)) return;
    per_draw = stx__par_branches(m) * m->desc.blocks;
    if (!count || count % per_draw || (one_draw && count != per_draw)) {
        stx_fail(m->ctx, STX_ERR_ARG,
                 "stx_par_set_uniforms: count: expected %s%zu values (%zu per block), got %zu; "
                 "count is the number of values, not of draws",
                 one_draw ? "" : "a multiple of ", per_draw, stx__par_branches(m), count);
        return;
    }
    for (i = 0; i < count && u[i] > 0 && u[i] < 1; i++) {}
    if (i < count) {
        stx_fail(m->ctx, STX_ERR_ARG,
                 "stx_par_set_uniforms: u[%zu]: expected a value above 0 and below 1, got %.9g%s",
                 i, (double)u[i],
                 u[i] == 1 ? " (a double that is nearly 1 rounds to 1 in float)" : "");
        return;
    }
    if (count > m->uniforms_capacity) {
        stx_real *larger = stx_block_f32(m->ctx, count);
        if (!larger) return;
        stx_block_free(m->ctx, m->uniforms);
        m->uniforms = larger;
        m->uniforms_capacity = count;
    }
    stx_upload(m->ctx, m->uniforms, u, count);
    m->uniforms_count = count;
}

STX_DEF size_t stx_par_draws(const stx_par *m, size_t B, size_t T) {
    if (!m || !m->gates) return 0;
    if (m->desc.noise == STX_PAR_NOISE_STEP) return 1;
    if (m->desc.noise == STX_PAR_NOISE_SEQUENCE) return B;
    return B * ((T + m->desc.noise_tokens - 1) / m->desc.noise_tokens);
}


// >>memory

/* Creates an empty memory for the program's block types, or returns NULL if none has
   one. */
static stx_memory *stx__par_own_memory(const stx_par *m, size_t B) {
    stx_ctx *x = m->ctx;
    const stx_par_desc *d = &m->desc;
    stx_memory *own = NULL;
    stx_memory_desc md;
    size_t *widths, l, t, rows = 0;
    for (t = 0; t < d->types; t++) rows = STX_MAX(rows, d->type[t].rows);
    if (!rows) return NULL;
    widths = (size_t *)stx_block(x, stx_bytes_of(d->blocks, d->types, sizeof *widths));
    if (widths) {
        for (l = 0; l < d->blocks; l++)
            for (t = 0; t < d->types; t++)
                widths[l * d->types + t] =
                    stx__par_runs(d, m->block[l].kind, t) ? d->type[t].width : 0;
        memset(&md, 0, sizeof md);
        md.layers = d->blocks * d->types;
        md.B = B;
        md.max_rows = rows;
        md.missing_as_zeros = 1;
        md.widths = widths;
        own = stx_memory_create(x, &md);
    }
    stx_block_free(x, widths);
    return own;
}

/* Returns the memory (B,rows,width) of type t in block l, with zeros before its oldest
   row. `own` may be NULL. Returns NULL if the type has no memory. */
static stx_tensor *stx__par_own_past(const stx_par *m, const stx_memory *own, size_t l, size_t t,
                                     size_t B) {
    stx_ctx *x = m->ctx;
    const stx_par_type *type = &m->desc.type[t];
    stx_tensor *past = own ? stx_memory_read(own, l * m->desc.types + t, type->rows) : NULL, *zeros;
    const size_t n = past ? past->dim[1] : 0;
    if (n == type->rows) return past;
    zeros = stx_new(x, B, type->rows - n, type->width, 0);
    if (zeros) STX_RUN(x, stx_fill, (x, zeros->data, zeros->size, 0));
    return past ? stx_concat(x, zeros, past) : zeros;
}

/* Appends `state` to the memory of type t in block l. in may be `out` or NULL. If state
   is NULL, the block did not run the type, and its memory is emptied. */
static int stx__par_own_push(const stx_par *m, stx_memory *out, const stx_memory *in, size_t l,
                             size_t t, const stx_tensor *state) {
    const size_t at = l * m->desc.types + t, rows = m->desc.type[t].rows;
    stx_memory_layer *layer = out ? &out->layer[at] : NULL;
    if (!layer || !layer->width) return 1;
    if (state) return stx_memory_push(out, in, at, rows, state, NULL);
    layer->count = layer->logical_count = 0;
    layer->masked = 0;
    return 1;
}

STX_DEF stx_par_state *stx_par_state_create_sized(stx_par *m, size_t B, size_t M) {
    stx_ctx *x = m ? m->ctx : NULL;
    stx_par_state *s;
    stx_memory_desc d;
    size_t *widths, l;
    if (!stx_ok(x)) return NULL;
    if (!B || M > (size_t)1 << 30) {
        stx_fail(x, STX_ERR_ARG,
                 "stx_par_state_create: expected B >= 1 streams and M <= 2^30 rows, "
                 "got B = %zu and M = %zu", B, M);
        return NULL;
    }
    s = (stx_par_state *)stx_block(x, sizeof *s);
    if (!s) return NULL;
    s->model = m;
    s->B = B;
    s->M = M;
    s->clamp_len = m->desc.clamp_len;
    s->same_length = m->desc.same_length;

    widths = (size_t *)stx_block(x, stx_bytes_of(m->desc.blocks, sizeof *widths, 1));
    if (widths) {
        for (l = 0; l < m->desc.blocks; l++)
            widths[l] = M && stx__par_attends(m->block[l].kind) ? m->desc.dim : 0;
        memset(&d, 0, sizeof d);
        d.layers = m->desc.blocks;
        d.B = B;
        d.max_rows = STX_MAX(M, 1);
        d.widths = widths;
        s->mem = stx_memory_create(x, &d);
    }
    stx_block_free(x, widths);
    s->own = stx__par_own_memory(m, B);
    if (stx_ok(x)) return s;
    stx_par_state_free(s);
    return NULL;
}

STX_DEF stx_par_state *stx_par_state_create(stx_par *m, size_t B) {
    return m ? stx_par_state_create_sized(m, B, stx__par_mem(&m->desc)) : NULL;
}

STX_DEF void stx_par_state_free(stx_par_state *s) {
    if (!s) return;
    stx_memory_free(s->mem);
    stx_memory_free(s->own);
    stx_block_free(s->model->ctx, s);
}

STX_DEF void stx_par_state_reset(stx_par_state *s) {
    if (!s || !stx_ok(s->model->ctx)) return;
    stx_memory_reset(s->mem);
    stx_memory_reset(s->own);
    s->calls = 0;
}

STX_DEF void stx_par_state_reset_stream(stx_par_state *s, size_t b) {
    if (!s) return;
    stx_memory_reset_stream(s->mem, b);
    stx_memory_reset_stream(s->own, b);
}

STX_DEF int stx_par_state_copy(stx_par_state *to, size_t b, const stx_par_state *from, size_t c,
                               size_t n) {
    stx_ctx *x = to ? to->model->ctx : NULL;
    if (!stx_ok(x)) return 0;
    if (!from || from->model != to->model) {
        stx_fail(x, STX_ERR_ARG, "stx_par_state_copy: expected a memory of the same model, got %s",
                 from ? "one of another model" : "NULL");
        return 0;
    }
    if (from->M != to->M) {
        stx_fail(x, STX_ERR_ARG, "stx_par_state_copy: expected a memory with M = %zu rows, got %zu",
                 to->M, from->M);
        return 0;
    }
    if (!stx_memory_copy(to->mem, b, from->mem, c, n)) return 0;
    if (to->own && !stx_memory_copy(to->own, b, from->own, c, n)) return 0;
    to->calls = n == to->B ? from->calls : STX_MAX(to->calls, from->calls);
    return 1;
}

STX_DEF int stx_par_state_get(const stx_par_state *s, size_t l, stx_real *out) {
    if (!s || !stx_ok(s->model->ctx)) return 0;
    if (l < s->model->desc.blocks && s->mem->layer[l].masked) {
        stx_fail(s->model->ctx, STX_ERR_ARG,
                 "stx_par_state_get: some streams lack rows in block %zu, because they were "
                 "reset or had padding; use stx_par_state_save or stx_par_state_copy instead",
                 l);
        return 0;
    }
    return stx_memory_get(s->mem, l, out);
}

STX_DEF int stx_par_state_set(stx_par_state *s, size_t l, const stx_real *in, size_t n) {
    if (!s || !stx_ok(s->model->ctx)) return 0;
    if (l >= s->model->desc.blocks || n > s->M || (n && !s->mem->layer[l].width)) {
        stx_fail(s->model->ctx, STX_ERR_ARG,
                 "stx_par_state_set: expected an attention block and at most M = %zu rows, got "
                 "block %zu and %zu rows", s->M, l, n);
        return 0;
    }
    return stx_memory_set(s->mem, l, n, in, n);
}

STX_DEF int stx_par_state_save(stx_writer *w, const stx_par_state *s, const char *prefix) {
    char full[96];
    if (!s || !prefix || !stx_ok(s->model->ctx)) return 0;
    if (strlen(prefix) > 64) {
        stx_fail(s->model->ctx, STX_ERR_ARG,
                 "stx_par_state_save: prefix: expected at most 64 bytes, got %zu", strlen(prefix));
        return 0;
    }
    snprintf(full, sizeof full, "%smem.", prefix);
    if (!stx_memory_save(w, s->mem, full)) return 0;
    snprintf(full, sizeof full, "%sown.", prefix);
    if (s->own && !stx_memory_save(w, s->own, full)) return 0;
    snprintf(full, sizeof full, "%scalls", prefix);
    return stx_writer_meta_u64(w, full, s->calls);
}

/* Empties a memory, or does nothing if s is NULL. Unlike stx_memory_reset, it also works
   after an error. */
static void stx__par_empty(stx_memory *s) {
    size_t l;
    for (l = 0; s && l < s->desc.layers; l++) {
        s->layer[l].count = s->layer[l].logical_count = 0;
        s->layer[l].masked = 0;
    }
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
    if (!stx_memory_load(s->mem, f, full)) return 0;
    snprintf(full, sizeof full, "%.64sown.", prefix);
    if (s->own && !stx_memory_load(s->own, f, full)) {
        stx__par_empty(s->mem);
        return 0;
    }
    for (l = 0; l < s->model->desc.blocks; l++) {
        if (s->mem->layer[l].count <= s->M) continue;
        stx_fail(x, STX_ERR_FORMAT,
                 "memory \"%s\": block %zu: expected at most %zu rows, got %zu; create the "
                 "memory with as many rows as the file has",
                 prefix, l, s->M, s->mem->layer[l].count);
        stx__par_empty(s->mem);
        stx__par_empty(s->own);
        return 0;
    }
    s->calls = calls;
    return 1;
}


// >>position bias

/* Returns dh', the head dimension of the kernels. The attention kernels do not support
   a bias per distance. STX_PAR_LEARNED_BIAS therefore expresses the bias with extra
   columns, and dh' > dh. The extra columns are 1 in queries, keys and values, and -1 in
   u. In r'_t, the first extra column is b_t, and the others are 0:

       (q' + u').k' = (q + u).k + (1 - 1) 1     q'.r'_t = q.r_t + b_t     y' = [y, 1 ..]

   Wo does not read the extra columns of y'. dh' is a multiple of 8, which the fused
   kernels of a GPU require; without the bias, dh' = dh. In a segment, the weights are
   widened (by rows of zeros with a bias of 1), because they have fewer elements than
   the activations. In generation, the activations are widened. */
static size_t stx__par_wide_head_dim(const stx_par_desc *d) {
    return d->positions == STX_PAR_LEARNED_BIAS ? (d->head_dim + 8) / 8 * 8 : d->head_dim;
}

/* Sizes of an op that widens rows of w elements to ld elements; rows[] are the row
   counts of its two inputs */
typedef struct stx__par_widening {
    size_t w, ld, rows[2];
} stx__par_widening;

static void stx__par_widen_back(stx_ctx *x, stx_tensor *y, stx_tensor *const *in, void *save) {
    const stx__par_widening *s = (const stx__par_widening *)save;
    size_t at = 0;
    int i, fresh;
    for (i = 0; i < 2; i++) {
        stx_real *da = stx_grad(x, in[i], &fresh), *dy = da ? stx_offset_ptr(x, y->grad, at) : NULL;
        if (da) STX_RUN(x, stx_copy2d, (x, da, s->w, dy, s->ld, s->rows[i], s->w, !fresh));
        at += s->rows[i] * s->ld;
    }
}

/* Returns the rows of `a` followed by those of `b` (NULL if there are none), as a
   tensor (rows,ld). Each row is padded from w to ld elements with `fill`. If full is 1,
   the result is float in every precision. */
static stx_tensor *stx__par_widen(stx_ctx *x, stx_tensor *a, stx_tensor *b, size_t w, size_t ld,
                                  double fill, int full) {
    STX__FP_SCOPE;
    stx__par_widening *s = (stx__par_widening *)stx_step_host_bytes(x, sizeof *s);
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
    y = full ? stx_new_f32(x, rows, ld, 0, 0) : stx_new(x, rows, ld, 0, 0);
    if (!y) return NULL;
    STX_RUN(x, stx_fill, (x, y->data, y->size, (stx_real)fill));
    for (i = 0; i < 2; i++) {
        stx_real *to = stx_offset_ptr(x, y->data, at);
        if (in[i]) STX_RUN(x, stx_copy2d, (x, to, ld, in[i]->data, w, s->rows[i], w, 0));
        at += s->rows[i] * ld;
    }
    stx_record(x, y, in, 2, stx__par_widen_back, s);
    return y;
}

/* Widens the n heads of activations: (B,T,n dh) -> (B,T,n dh') */
static stx_tensor *stx__par_widen_heads(stx_ctx *x, const stx_par_desc *d, stx_tensor *t) {
    size_t wide = stx__par_wide_head_dim(d);
    stx_tensor *y = stx__par_widen(x, t, NULL, d->head_dim, wide, 1, 0);
    return y ? stx_reshape(x, y, t->dim[0], t->dim[1], t->dim[2] / d->head_dim * wide, 0) : NULL;
}

/* Removes the extra columns of widened heads: (B,T,H dh') -> (B,T,H dh) */
static stx_tensor *stx__par_narrow_heads(stx_ctx *x, const stx_par_desc *d, stx_tensor *t) {
    size_t wide = stx__par_wide_head_dim(d);
    stx_tensor *y;
    if (!t) return NULL;
    y = stx_reshape(x, t, t->size / wide, wide, 0, 0);
    y = stx_slice_channels(x, y, 0, d->head_dim);
    return stx_reshape(x, y, t->dim[0], t->dim[1], d->heads * d->head_dim, 0);
}

/* Widens positions: r (rows,H dh) and their biases b (rows,H) -> r' (rows,H dh') */
static stx_tensor *stx__par_biased(stx_ctx *x, const stx_par_desc *d, stx_tensor *r,
                                   stx_tensor *b) {
    size_t rows = r->dim[0], H = d->heads, wide = stx__par_wide_head_dim(d);
    stx_tensor *t;
    r = stx_reshape(x, r, rows * H, d->head_dim, 0, 0);
    b = stx_reshape(x, b, rows * H, 1, 0, 0);
    t = stx__par_widen(x, stx_concat_channels(x, r, b), NULL, d->head_dim + 1, wide, 0, 1);
    return t ? stx_reshape(x, t, rows, H * wide, 0, 0) : NULL;
}

/* Computes the projections of an attention block with widened heads: matrix w[0] and
   bias b[0] for queries, keys and values, w[1] and b[1] for keys and values only, and
   *wo for the output. Returns 0 after an error. */
static int stx__par_widen_weights(stx_ctx *x, const stx_par_desc *d, const stx_par_block *block,
                                  stx_tensor **w, stx_tensor **b, stx_tensor **wo) {
    const size_t D = d->dim, dh = d->head_dim;
    const size_t wide = stx__par_wide_head_dim(d), width = d->heads * wide;
    stx_tensor *bq = block->bq;
    if (!bq) {
        bq = stx_new_f32(x, 3 * d->heads * dh, 0, 0, 0);
        if (bq) STX_RUN(x, stx_fill, (x, bq->data, bq->size, 0));
    }
    w[0] = stx__par_widen(x, block->wq, block->wkv, dh * D, wide * D, 0, 1);
    b[0] = stx__par_widen(x, bq, block->bkv, dh, wide, 1, 1);
    *wo = stx__par_widen(x, block->wo, NULL, dh, wide, 0, 1);
    if (!w[0] || !b[0] || !*wo) return 0;
    w[0] = stx_reshape(x, w[0], 3 * width, D, 0, 0);
    b[0] = stx_reshape(x, b[0], 3 * width, 1, 0, 0);
    *wo = stx_reshape(x, *wo, D, width, 0, 0);
    w[1] = stx_view_rows(x, w[0], width, 3 * width);
    b[1] = stx_view_rows(x, b[0], width, 3 * width);
    return stx_ok(x);
}


// >>positions

/* Returns column c of the sinusoidal encoding of position t. The first D / 2 columns
   are sines, and the others are cosines. */
static double stx__par_sine(size_t D, size_t c, double t) {
    double angle = t * stx_math_pow(10000, -2 * (double)(c % (D / 2)) / (double)D);
    return c < D / 2 ? stx_math_sin(angle) : stx_math_cos(angle);
}

/* Returns column c of position t in the reference's table. Its columns are the usual
   interleaved sines and cosines in reverse order. */
static double stx__par_sine_ref(size_t D, size_t c, double t) {
    size_t f = D - 1 - c;
    double angle = t * stx_math_pow(1e-4, 2 * (double)(f / 2) / (double)D);
    return f % 2 ? stx_math_sin(angle) : stx_math_cos(angle);
}

/* Returns the row ids in a learned table for distances rows - 1 .. 0. */
static stx_ids *stx__par_far_first(stx_par *m, size_t rows, size_t clamp) {
    stx_ctx *x = m->ctx;
    const size_t last = stx__par_table_rows(&m->desc) - 1;
    int32_t *row = (int32_t *)stx_block(x, stx_bytes_of(rows, sizeof *row, 1));
    stx_ids *ids;
    size_t i;
    if (!row) return NULL;
    for (i = 0; i < rows; i++) {
        size_t distance = rows - 1 - i;
        if (clamp) distance = STX_MIN(distance, clamp);
        row[i] = (int32_t)STX_MIN(distance, last);
    }
    ids = stx_tokens_create(x, 1, rows);
    if (ids) stx_tokens_set(x, ids, row);
    stx_block_free(x, row);
    return ids;
}

/* Returns the sinusoidal encodings (rows,D) of distances rows - 1 .. 0, or, with
   STX_PAR_POS_REF, of positions 0 .. rows - 1. */
static stx_tensor *stx__par_sines(stx_par *m, size_t rows, size_t clamp) {
    stx_ctx *x = m->ctx;
    const stx_par_desc *d = &m->desc;
    const size_t D = d->dim;
    stx_real *v = (stx_real *)stx_block(x, stx_bytes_of(rows, D, sizeof *v));
    stx_tensor *sines;
    size_t i, c;
    if (!v) return NULL;
    for (i = 0; i < rows; i++) {
        size_t distance = rows - 1 - i;
        double t = (double)(clamp ? STX_MIN(distance, clamp) : distance);
        if (d->pos_mode == STX_PAR_POS_REF) t = (double)i;
        if (d->pos_mode == STX_PAR_POS_FIXED)
            t = (double)stx__par_table_rows(d) - 1 - (double)distance;
        for (c = 0; c < D; c++) {
            if (d->sines == STX_PAR_SINES_REF)
                v[i * D + c] = (stx_real)stx__par_sine_ref(D, c, t);
            else
                v[i * D + c] = (stx_real)stx__par_sine(D, c, t);
        }
    }
    sines = stx_constant_create(x, v, rows, D, 0, 0);
    stx_block_free(x, v);
    return sines;
}

/* Returns a position table for at least n distances, with clamp_len `clamp`. The model
   keeps two tables: one for desc.clamp_len, and one for the most recent other value. A
   table that is too short is replaced by one that is at least 1.5 times as long. */
static const stx_par_positions *stx__par_positions_for(stx_par *m, size_t clamp, size_t n) {
    stx_par_positions *p = &m->pos[clamp != m->desc.clamp_len], larger;
    const int same_clamp = p->rows && p->clamp == clamp;
    if (same_clamp && p->rows >= n) return p;
    memset(&larger, 0, sizeof larger);
    larger.rows = STX_MAX(n, same_clamp ? p->rows + p->rows / 2 : stx__par_table_rows(&m->desc));
    larger.clamp = clamp;
    if (m->desc.positions)
        larger.far_first = stx__par_far_first(m, larger.rows, clamp);
    else
        larger.sines = stx__par_sines(m, larger.rows, clamp);
    if (!stx_ok(m->ctx)) return NULL;
    *p = larger;
    return p;
}

/* Returns the rows of t for distances n - 1 .. 0: the last n rows, or the first n with
   STX_PAR_POS_REF. */
static stx_tensor *stx__par_position_rows(stx_par *m, stx_tensor *t, size_t n) {
    size_t first = 0;
    if (!t) return NULL;
    if (m->desc.pos_mode != STX_PAR_POS_REF) first = t->dim[0] - n;
    return stx_view_rows(m->ctx, t, first, first + n);
}

/* Returns r_t (n,H dh') of block l for distances n - 1 .. 0. `sines` holds the
   sinusoidal encodings of these distances after dropout; if it is NULL, they are taken
   from p. */
static stx_tensor *stx__par_relative(stx_ctx *x, stx_par *m, size_t l, const stx_par_positions *p,
                                     stx_tensor *sines, size_t n) {
    const stx_par_block *block = &m->block[l];
    stx_tensor *t = block->rel;
    if (block->wr) {
        if (!sines) sines = stx__par_position_rows(m, p->sines, n);
        return stx_linear(x, sines, block->wr, block->br, STX_ACT_NONE);
    }
    if (block->rel_bias) t = stx__par_biased(x, &m->desc, t, block->rel_bias);
    t = stx_embedding(x, t, p->far_first);
    return t ? stx__par_position_rows(m, stx_reshape(x, t, t->dim[1], t->dim[2], 0, 0), n) : NULL;
}


// >>block

/* Arguments of stx__par_run other than its inputs in[] */
typedef struct stx__par_job {
    stx_par  *m;
    size_t    l;
    size_t    n;                /* number of rows in the memory, or, in generation, in the cache */
    int       kind;             /* what the block runs: 's', 'f' or 'g' */
    int       past_input;       /* index of the memory (B,n,D) in in[]; 0: it is not an input */
    int       gate_input;       /* index of the gate's w (R,K) in in[]; 0: no gate */
    int       own_input[STX_PAR_MAX_TYPES];     /* index of the memory (B,rows,width) of the
                                                   program's type t in in[]; 0: none */
    const stx_ids *pad;         /* (B,T), or NULL; nonzero for padding */
    stx_tensor    *keep_rows;   /* (B,T,D): 0 at padding, else 1; NULL without padding */
    stx_cached_rows view;       /* the memory, unless it is an input */
    size_t    span;             /* the largest distance that a query sees; 0: no limit */
    const stx_par_positions *pos;
    stx_tensor    *sines;       /* sinusoidal encodings (n + T,D), after dropout; NULL:
                                   taken from pos, if it has any */
    const stx_ids *mask;        /* (B,n + T), or NULL; nonzero for missing keys */
    stx_tensor    *keep;        /* (B,T,H dh'): 0 at padding, else 1; NULL without padding */
    stx_par_gen   *gen;         /* the generator, which caches keys and values; NULL
                                   outside generation */
    size_t    period, rows_per_draw;    /* which rows share a draw; see stx_par_mix_args */
} stx__par_job;

/* Computes queries, keys and values of h (B,T,D) and of the memory. past is the memory
   (B,n,D) if it is an input (pre_norm), else NULL. *wo is replaced if the heads are
   widened. Returns 0 after an error. */
static int stx__par_attention_in(stx_ctx *x, const stx__par_job *job, stx_tensor *h,
                                 stx_tensor *past, stx_attention_in *a, stx_tensor **wo) {
    const stx_par_desc *d = &job->m->desc;
    const stx_par_block *block = &job->m->block[job->l];
    stx_tensor *w[2], *b[2];
    w[0] = block->wq;
    w[1] = block->wkv;
    b[0] = block->bq;
    b[1] = block->bkv;
    if (block->rel_bias && !job->gen) {
        if (!stx__par_widen_weights(x, d, block, w, b, wo)) return 0;
        a->qkv = stx_linear(x, h, w[0], b[0], STX_ACT_NONE);
    } else {
        a->qkv = stx_linear_concat(x, h, w, b, 2);
        if (block->rel_bias) a->qkv = stx__par_widen_heads(x, d, a->qkv);
    }
    if (past) {
        past = stx_layernorm(x, past, block->attn_gain, block->attn_shift, d->norm_eps);
        a->cached[0] = stx_linear(x, past, w[1], b[1], STX_ACT_NONE);
    } else {
        a->cached[0] = stx_linear_cached(x, &job->view, 1, h->dim[0], w + 1, b + 1, 1);
    }

    a->content_bias = block->u;
    if (block->rel_bias)
        a->content_bias = stx__par_widen(x, block->u, NULL, d->head_dim,
                                         stx__par_wide_head_dim(d), -1, 1);
    a->position_bias = block->v;
    a->pad = job->mask;
    return 1;
}

/* Returns the cached positions of a generator's block as a tensor (M + 1,H dh'), or
   (n + 1,H dh') with STX_PAR_POS_REF. The tensor is created with one row and then made
   to refer to the generator's rows. */
static stx_tensor *stx__par_cached_positions(stx_ctx *x, const stx__par_job *job) {
    const stx_par_desc *d = &job->m->desc;
    stx_tensor *pe = stx_new(x, 1, d->heads * stx__par_wide_head_dim(d), 0, 0);
    if (!pe) return NULL;
    pe->data = job->gen->pos[job->l];
    pe->dim[0] = d->pos_mode == STX_PAR_POS_REF ? job->n + 1 : job->gen->M + 1;
    pe->size = pe->dim[0] * pe->dim[1];
    return pe;
}

/* Computes A = Wo attend(h) for h (B,T,D). past is as in stx__par_attention_in. If
   no_bias is 1, the caller adds the bias of Wo. */
static stx_tensor *stx__par_attention(stx_ctx *x, const stx__par_job *job, stx_tensor *h,
                                      stx_tensor *past, int no_bias) {
    const stx_par_desc *d = &job->m->desc;
    const stx_par_block *block = &job->m->block[job->l];
    const double dh = (double)d->head_dim;
    stx_attention_in a;
    stx_attention_desc settings;
    stx_tensor *y = NULL, *wo = block->wo;
    if (!h) return NULL;
    memset(&a, 0, sizeof a);
    if (!stx__par_attention_in(x, job, h, past, &a, &wo)) return NULL;
    memset(&settings, 0, sizeof settings);
    settings.heads = d->heads;
    settings.scale = 1 / (d->full_scale ? dh : sqrt(dh));
    settings.span = job->span;
    settings.dropout = d->attn_dropout;

    if (job->gen) {
        a.pe = stx__par_cached_positions(x, job);
        if (a.pe) y = stx_cache_attention(job->gen->cache, job->l, &a, &settings);
        if (block->rel_bias) y = stx__par_narrow_heads(x, d, y);
    } else {
        a.pe = stx__par_relative(x, job->m, job->l, job->pos, job->sines, job->n + h->dim[1]);
        a.record = &job->m->attended[job->l];
        if (a.pe) y = stx_attention(x, &a, &settings);
    }
    if (job->keep) y = stx_mul(x, y, job->keep);
    return stx_linear(x, y, wo, no_bias ? NULL : block->bo,
                      d->attn_relu ? STX_ACT_RELU : STX_ACT_NONE);
}

/* Computes G = W2 relu(W1 h + b1) + b2. If no_bias is 1, the caller adds b2. */
static stx_tensor *stx__par_feed(stx_ctx *x, const stx__par_job *job, stx_tensor *h, int no_bias) {
    const stx_par_block *block = &job->m->block[job->l];
    h = stx_linear(x, h, block->w1, block->b1, STX_ACT_RELU);
    h = stx_dropout(x, h, job->m->desc.inner_dropout);
    return stx_linear(x, h, block->w2, no_bias ? NULL : block->b2, STX_ACT_NONE);
}

/* Returns y, or NULL and an error if it does not have the shape (B,T,C) of h, or any T
   with any_rows. `what` names it. */
static stx_tensor *stx__par_checked(stx_ctx *x, const stx__par_job *job, size_t t, const char *what,
                                    stx_tensor *y, const stx_tensor *h, size_t C, int any_rows) {
    const stx_par_type *type = &job->m->desc.type[t];
    const int fits = y && y->ndim == 3 && y->dim[0] == h->dim[0] && y->dim[2] == C
                     && (any_rows || y->dim[1] == h->dim[1]);
    char rows[32] = "n", got[80] = "NULL";
    if (!stx_ok(x)) return NULL;
    if (fits) return y;
    if (!any_rows) snprintf(rows, sizeof rows, "%zu", h->dim[1]);
    if (y)
        snprintf(got, sizeof got, "%d dimensions, (%zu,%zu,%zu)", y->ndim, y->dim[0],
                 y->ndim > 1 ? y->dim[1] : 0, y->ndim > 2 ? y->dim[2] : 0);
    stx_fail(x, STX_ERR_SHAPE,
             "stx_par_segment: block %zu, type '%c' (%s): %s: expected (%zu,%s,%zu), got %s",
             job->l, type->letter, type->name, what, h->dim[0], rows, C, got);
    return NULL;
}

/* Computes the branch of the program's type t, for h (B,T,D), normalised with pre_norm.
   past (B,rows,width) is its memory; *state receives the rows to append to it. */
static stx_tensor *stx__par_own(stx_ctx *x, const stx__par_job *job, size_t t, stx_tensor *h,
                                stx_tensor *past, stx_tensor **state) {
    const stx_par_desc *d = &job->m->desc;
    const stx_par_type *type = &d->type[t];
    stx_par_branch in;
    stx_tensor *y;
    memset(&in, 0, sizeof in);
    in.desc = d;
    in.l = job->l;
    in.w = job->m->block[job->l].own[t].w;
    in.h = job->keep_rows ? stx_mul(x, h, job->keep_rows) : h;
    in.past = past;
    in.pad = job->pad;
    *state = NULL;
    if (!stx_ok(x) || !in.h) return NULL;
    y = type->forward(x, type->user, &in, state);
    y = stx__par_checked(x, job, t, "result", y, h, d->dim, 0);
    if (type->rows && y) *state = stx__par_checked(x, job, t, "*state", *state, h, type->width, 1);
    return stx_ok(x) ? y : NULL;
}

/* Returns the mixture of all branches, before dropout: branch[k] with norm gain[k],
   shift[k]. A kernel mixes attention, feed-forward and identity; the program's types
   follow in pairs, with the identity's weight replaced by 0. */
static stx_tensor *stx__par_mixture(stx_ctx *x, const stx__par_job *job, stx_tensor *h,
                                    stx_tensor *w, stx_tensor *const *branch,
                                    stx_tensor *const *gain, stx_tensor *const *shift) {
    const stx_par_desc *d = &job->m->desc;
    stx_tensor *y = NULL;
    size_t first, i;
    for (first = 0; first == 0 || first < 3 + d->types; first += first ? 2 : 3) {
        const size_t n = first ? STX_MIN(3 + d->types - first, (size_t)2) : 3;
        stx_tensor *mix[8] = {NULL}, *part;
        mix[0] = h;
        mix[1] = stx_dropout(x, branch[first], d->dropout);
        /* an odd branch at the end is paired with itself, with weight 0 */
        mix[2] = n > 1 ? stx_dropout(x, branch[first + 1], d->dropout) : stx_detach(x, mix[1]);
        mix[3] = d->types ? stx__par_columns(x, w, first, n) : w;
        for (i = 0; i < 2 && !d->pre_norm; i++) {
            const size_t k = n > 1 ? first + i : first;
            mix[4 + 2 * i] = n > 1 || !i ? gain[k] : stx_detach(x, gain[k]);
            mix[5 + 2 * i] = n > 1 || !i ? shift[k] : stx_detach(x, shift[k]);
        }
        part = stx__par_mix(x, mix, job->period, job->rows_per_draw, d->norm_eps);
        y = y ? stx_add(x, y, part) : part;
    }
    return y;
}

/* One block, as a function that stx_recompute can call. in[0] is h (B,T,D), followed by
   the memory, the gate's w and the memories of the program's types if they are inputs.
   out[t] receives the state of type t. */
static stx_tensor *stx__par_run(stx_ctx *x, void *user, stx_tensor **in, stx_tensor **out) {
    STX__FP_SCOPE;
    const stx__par_job *job = (const stx__par_job *)user;
    const stx_par_desc *d = &job->m->desc;
    const stx_par_block *block = &job->m->block[job->l];
    const int attends = stx__par_attends(job->kind), feeds = stx__par_feeds(job->kind);
    const int mixed = job->kind == 'g', pre = d->pre_norm;
    /* stx_residual_norm_bias adds the last bias of a single branch, unless a ReLU
       follows it */
    const int no_bias = !pre && !mixed && !(attends && d->attn_relu);
    stx_tensor *h = in[0], *branch[STX_PAR_MAX_BRANCHES] = {NULL}, *past, *a, *bias = NULL;
    stx_tensor *gain[STX_PAR_MAX_BRANCHES] = {NULL}, *shift[STX_PAR_MAX_BRANCHES] = {NULL};
    size_t t, k = 0;

    gain[0] = block->attn_gain;
    shift[0] = block->attn_shift;
    gain[1] = block->ff_gain;
    shift[1] = block->ff_shift;
    if (attends) {
        past = job->past_input ? in[job->past_input] : NULL;
        a = pre ? stx_layernorm(x, h, gain[0], shift[0], d->norm_eps) : h;
        branch[0] = stx__par_attention(x, job, a, past, no_bias);
    }
    if (feeds) {
        k = 1;
        a = pre ? stx_layernorm(x, h, gain[1], shift[1], d->norm_eps) : h;
        branch[1] = stx__par_feed(x, job, a, no_bias);
    }
    for (t = 0; t < d->types; t++) {
        if (!stx__par_runs(d, job->kind, t)) continue;
        k = 3 + t;
        gain[k] = block->own[t].gain;
        shift[k] = block->own[t].shift;
        past = job->own_input[t] ? in[job->own_input[t]] : NULL;
        a = pre ? stx_layernorm(x, h, gain[k], shift[k], d->norm_eps) : h;
        branch[k] = stx__par_own(x, job, t, a, past, &out[t]);
    }
    if (!stx_ok(x)) return NULL;

    if (mixed) return stx__par_mixture(x, job, h, in[job->gate_input], branch, gain, shift);
    if (pre) return stx_add(x, h, stx_dropout(x, branch[k], d->dropout));
    if (no_bias && k < 2) bias = attends ? block->bo : block->b2;
    return stx_residual_norm_bias(x, h, branch[k], bias, d->dropout, gain[k], shift[k],
                                  d->norm_eps);
}


// >>forward

/* Returns what block l runs in this step, as a letter: the block's own letter, or, for
   a mixture evaluated by argmax, the letter of its most probable branch. Returns 0
   after an error. */
static int stx__par_kind(const stx_par *m, size_t l) {
    const int mixed = stx_training(m->ctx) || m->desc.gate_eval != STX_PAR_EVAL_ARGMAX;
    if (m->block[l].kind != 'g' || mixed) return m->block[l].kind;
    return stx__par_letter(m, l, NULL);
}

static int stx__par_noisy(const stx_par *m) {
    return stx_training(m->ctx) || m->desc.gate_eval == STX_PAR_EVAL_NOISE;
}

/* Sets an error and returns 0 if the latency would need the w of other ranks'
   streams. */
static int stx__par_latency_fits_group(stx_ctx *x, const stx_par_desc *d) {
    if (d->latency_w == STX_PAR_LATENCY_OF_P || stx_ranks(x) == 1) return 1;
    if (d->noise == STX_PAR_NOISE_STEP || d->latency == STX_PAR_LATENCY_ADD) return 1;
    stx_fail(x, STX_ERR_ARG,
             "stx_par_segment: the latency of the gate weights w needs the streams of all ranks, "
             "but each rank has only some of them; use latency_w = STX_PAR_LATENCY_OF_P, "
             "noise = STX_PAR_NOISE_STEP or latency = STX_PAR_LATENCY_ADD");
    return 0;
}

/* Returns w of block l's gate for B streams of T tokens. u points to the caller's
   uniforms on the device, or is NULL. calls is the `calls` field of the memory that is
   read, or 0 in generation. Sets job->period and job->rows_per_draw. */
static stx_tensor *stx__par_gate_of(stx_par *m, size_t l, size_t B, size_t T, const stx_real *u,
                                    uint64_t calls, stx__par_job *job) {
    stx_ctx *x = m->ctx;
    const stx_par_desc *d = &m->desc;
    const int training = stx_training(x), noisy = stx__par_noisy(m);
    const int one_draw = !noisy || d->noise == STX_PAR_NOISE_STEP;
    const int has_latency = training && d->latency;
    stx_tensor *al = m->block[l].al;
    stx_par_gate_args a;
    memset(&a, 0, sizeof a);
    a.branches = (int)stx__par_branches(m);
    a.noisy = noisy;
    a.R = noisy ? stx_par_draws(m, B, T) : 1;
    a.form = d->gate_form;
    a.hard = noisy && d->gate == STX_PAR_ST;
    a.latency_w = d->latency_w;
    if (has_latency && !stx__par_latency_fits_group(x, d)) return NULL;

    /* The noise of an evaluation is reproducible: it depends on the seed, the block and
       the `calls` field of the memory that is read. In a.stream, bit 62 separates
       evaluations from the streams of stx_random_stream, bits 0 to 11 are l (at most
       4096 blocks), and bits 12 to 59 are the calls. In a process group, each stream
       has separate draws, but all ranks use the same draw with STX_PAR_NOISE_STEP. */
    a.seed = stx_ctx_desc(x)->seed;
    if (noisy && !u && training) a.stream = stx_random_stream(x);
    if (noisy && !u && !training)
        a.stream = (uint64_t)1 << 62 | (calls & 0xffffffffffffu) << 12 | l;
    if (training && d->noise != STX_PAR_NOISE_STEP) a.first = (uint64_t)stx_batch_share(x) * a.R;

    a.tau = m->tau->data;
    a.uniforms = u ? u + stx__par_branches(m) * l : NULL;
    a.uniforms_stride = stx__par_branches(m) * d->blocks;
    a.cost = m->cost;
    job->period = one_draw ? B * T : T;
    job->rows_per_draw = noisy && d->noise == STX_PAR_NOISE_TOKENS ? d->noise_tokens : job->period;
    if (m->frozen) al = stx_detach(x, al);
    m->w[l] = stx__par_gate_op(x, al, &a, has_latency ? &m->latency : NULL);
    return m->w[l];
}

/* Returns the caller's uniforms (R,L,K) for R draws, on the device. Returns NULL if
   there are none, or after an error. */
static const stx_real *stx__par_caller_uniforms(stx_par *m, size_t R) {
    if (!m->uniforms_count || !stx__par_noisy(m)) return NULL;
    if (m->uniforms_count == R * m->desc.blocks * stx__par_branches(m)) return m->uniforms;
    stx_fail(m->ctx, STX_ERR_ARG,
             "stx_par_segment: expected (%zu,%zu,%zu) values from stx_par_set_uniforms for this "
             "call, got %zu values", R, m->desc.blocks, stx__par_branches(m), m->uniforms_count);
    return NULL;
}

/* Returns a factor (B,T,H dh') that zeroes the attention's outputs for padded tokens, or
   NULL if there is no padding. No query attends to padded tokens, but they are queries
   themselves: without the factor, their hidden states, and the gradients through them,
   would depend on earlier tokens. With own = 1, returns a factor (B,T,D) for the inputs
   of the program's block types. */
static stx_tensor *stx__par_keep(stx_par *m, const stx_ids *pad, int own) {
    stx_ctx *x = m->ctx;
    const size_t attn_width = m->desc.heads * stx__par_wide_head_dim(&m->desc);
    const size_t width = own ? m->desc.dim : attn_width;
    const size_t n = pad ? pad->B * pad->T : 0;
    int32_t *hidden, any = 0;
    size_t i;
    if (!pad) return NULL;
    hidden = (int32_t *)stx_step_host_bytes(x, stx_bytes_of(n, sizeof *hidden, 1));
    for (i = 0; hidden && i < n; i++) {
        hidden[i] = pad->data[i] != 0;
        any |= hidden[i];
    }
    if (!any) return NULL;
    if (!m->keep[own]) {
        stx_real *table = (stx_real *)stx_block(x, stx_bytes_of(2 * width, sizeof *table, 1));
        for (i = 0; table && i < width; i++) table[i] = 1;
        if (table) m->keep[own] = stx_constant_create(x, table, 2, width, 0, 0);
        stx_block_free(x, table);
    }
    return stx_embedding(x, m->keep[own], stx_tokens(x, hidden, pad->B, pad->T));
}

/* Returns the largest distance that a query sees; 0 if there is no limit, or after an
   error. */
static size_t stx__par_span(stx_ctx *x, const char *op, int same_length, size_t M) {
    if (!same_length) return 0;
    if (M > 1) return M - 1;
    stx_fail(x, STX_ERR_ARG, "%s: same_length: expected a memory of 2 rows or more, got %zu",
             op, M);
    return 0;
}

/* Checks the shapes and memories of a forward pass. */
static int stx__par_segment_fits(const stx_par *m, const stx_tensor *h, const stx_ids *pad,
                                 const stx_par_state *in, const stx_par_state *out) {
    stx_ctx *x = m->ctx;
    const size_t B = h->dim[0], T = h->ndim == 3 ? h->dim[1] : 0, D = T ? h->dim[2] : 0;
    const stx_par_state *other = in && in->B != B ? in : out;
    if (h->ndim != 3) {
        stx_fail(x, STX_ERR_SHAPE,
                 "stx_par_segment: h: expected three dimensions, (B,T,%zu), got %d", m->desc.dim,
                 (int)h->ndim);
        return 0;
    }
    if (!T || D != m->desc.dim) {
        stx_fail(x, STX_ERR_SHAPE, "stx_par_segment: expected h (B,T,%zu), got (%zu,%zu,%zu)",
                 m->desc.dim, B, T, h->dim[2]);
        return 0;
    }
    if (pad && (pad->B != B || pad->T != T)) {
        stx_fail(x, STX_ERR_SHAPE,
                 "stx_par_segment: expected pad (%zu,%zu), as in h, got (%zu,%zu)",
                 B, T, pad->B, pad->T);
        return 0;
    }
    if ((in && in->model != m) || (out && out->model != m)) {
        stx_fail(x, STX_ERR_ARG,
                 "stx_par_segment: expected a memory of this model, got one of another model");
        return 0;
    }
    if (other && other->B != B) {
        stx_fail(x, STX_ERR_SHAPE,
                 "stx_par_segment: expected a memory with B = %zu streams, as in h, got %zu",
                 B, other->B);
        return 0;
    }
    return 1;
}

/* State shared by the blocks of a forward pass */
typedef struct stx__par_call {
    size_t         B, T, span, clamp;
    uint64_t       calls;       /* the `calls` field of the memory that is read */
    const stx_ids *pad;
    stx_tensor    *keep;        /* (B,T,H dh') or NULL; see stx__par_job */
    stx_tensor    *sines;       /* sinusoidal encodings after dropout, as most recently
                                   computed for a block; NULL if not computed yet */
    const stx_real *u;          /* the caller's uniforms, on the device, or NULL */
    const stx_memory *memory;   /* memory to read, or NULL */
    const stx_memory *own;      /* the same for the program's block types */
    stx_tensor    *keep_rows;   /* (B,T,D) or NULL; see stx__par_job */
    stx_tensor    *state[STX_PAR_MAX_TYPES];    /* of the block that ran last */
} stx__par_call;

/* Prepares the attention of a block: its memory, its mask and its positions. If the
   memory is an input of stx__par_run, appends it to in[] and increments *count. Returns
   0 after an error. */
static int stx__par_prepare_attention(stx_par *m, stx__par_call *call, stx__par_job *job,
                                      stx_tensor **in, int *count) {
    stx_ctx *x = m->ctx;
    size_t keys;
    job->n = call->memory ? call->memory->layer[job->l].count : 0;
    keys = job->n + call->T;

    /* With pre_norm, LN_a normalises the memory first, so its rows are gathered into a
       tensor. Otherwise, keys and values are computed from a view of the memory. */
    if (job->n && m->desc.pre_norm) {
        job->past_input = (*count)++;
        in[job->past_input] = stx_memory_read(call->memory, job->l, job->n);
    } else if (!stx_memory_view(call->memory, job->l, job->n, &job->view)) {
        return 0;
    }
    job->mask = call->pad;
    if (job->n) job->mask = stx_memory_mask(call->memory, job->l, job->n, call->pad, call->T);
    job->span = call->span;
    job->keep = call->keep;
    job->pos = stx__par_positions_for(m, call->clamp, keys);
    if (!job->pos) return 0;

    /* blocks with the same number of keys share one dropout mask of the positions */
    if (job->pos->sines && (!call->sines || call->sines->dim[0] != keys)) {
        stx_tensor *sines = stx__par_position_rows(m, job->pos->sines, keys);
        call->sines = stx_dropout_replicated(x, sines, m->desc.pos_dropout);
    }
    job->sines = call->sines;
    return 1;
}

/* Appends the memories of the program's types that the block runs to in[]. */
static void stx__par_prepare_own(stx_par *m, const stx_memory *own, size_t B, stx__par_job *job,
                                 stx_tensor **in, int *count) {
    const stx_par_desc *d = &m->desc;
    size_t t;
    for (t = 0; t < d->types; t++) {
        if (!d->type[t].rows || !stx__par_runs(d, job->kind, t)) continue;
        job->own_input[t] = (*count)++;
        in[job->own_input[t]] = stx__par_own_past(m, own, job->l, t, B);
    }
}

/* Runs block l on h (B,T,D). Returns the input of the next block (B,T,D), and sets
   call->state. */
static stx_tensor *stx__par_block_of(stx_par *m, size_t l, stx_tensor *h, stx__par_call *call) {
    stx_ctx *x = m->ctx;
    const stx_par_desc *d = &m->desc;
    stx__par_job *job = (stx__par_job *)stx_step_host_bytes(x, sizeof *job);
    stx_tensor *in[3 + STX_PAR_MAX_TYPES];
    int count = 1;
    memset(call->state, 0, sizeof call->state);
    if (!job) return NULL;
    memset(job, 0, sizeof *job);
    job->m = m;
    job->l = l;
    job->kind = stx__par_kind(m, l);
    in[0] = h;
    if (stx__par_attends(job->kind) && !stx__par_prepare_attention(m, call, job, in, &count))
        return NULL;
    if (job->kind == 'g') {
        job->gate_input = count++;
        in[job->gate_input] = stx__par_gate_of(m, l, call->B, call->T, call->u, call->calls, job);
    }
    job->pad = call->pad;
    job->keep_rows = call->keep_rows;
    stx__par_prepare_own(m, call->own, call->B, job, in, &count);
    if (!stx_ok(x)) return NULL;
    if (job->kind == 'i') return h;
    if (d->blocks - l <= d->recompute_layers)
        return stx_recompute(x, stx__par_run, job, in, count, call->state, (int)d->types);
    return stx__par_run(x, job, in, call->state);
}

STX_DEF stx_tensor *stx_par_segment(stx_par *m, stx_tensor *h, const stx_ids *pad,
                                    const stx_par_state *in, stx_par_state *out) {
    STX__FP_SCOPE;
    stx_ctx *x = m ? m->ctx : NULL;
    const stx_par_state *settings = in ? in : out;
    const stx_par_desc *d;
    stx__par_call call;
    size_t l, t, M;
    int same_length;
    if (!stx_ok(x) || !h || !stx__par_segment_fits(m, h, pad, in, out)) return NULL;
    d = &m->desc;
    M = settings ? settings->M : stx__par_mem(d);
    same_length = settings ? settings->same_length : d->same_length;
    memset(&call, 0, sizeof call);
    call.B = h->dim[0];
    call.T = h->dim[1];
    call.calls = in ? in->calls : 0;
    call.memory = in ? in->mem : NULL;
    call.own = in ? in->own : NULL;
    call.clamp = settings ? settings->clamp_len : d->clamp_len;
    call.span = stx__par_span(x, "stx_par_segment", same_length, M);
    m->latency = NULL;
    memset(m->w, 0, d->blocks * sizeof *m->w);
    if (m->gates) call.u = stx__par_caller_uniforms(m, stx_par_draws(m, call.B, call.T));
    call.keep = stx__par_keep(m, pad, 0);
    call.pad = call.keep ? pad : NULL;
    if (call.pad && d->types) call.keep_rows = stx__par_keep(m, pad, 1);

    for (l = 0; l < d->blocks && h && stx_ok(x); l++) {
        stx_tensor *next = stx__par_block_of(m, l, h, &call);
        if (!next) return NULL;
        if (out && out->mem->layer[l].width
            && !stx_memory_push(out->mem, call.memory, l, out->M, h, call.pad))
            return NULL;
        for (t = 0; out && t < d->types; t++)
            if (!stx__par_own_push(m, out->own, call.own, l, t, call.state[t])) return NULL;
        h = next;
    }
    if (out) {
        out->calls = call.calls + 1;
        out->training = stx_training(x);
    }
    if (m->final_gain) h = stx_layernorm(x, h, m->final_gain, m->final_shift, d->norm_eps);
    return stx_dropout(x, h, d->final_dropout);
}

STX_DEF const stx_attention_map *stx_par_attention_map(const stx_par *m, size_t l, size_t b) {
    if (!m || !stx_ok(m->ctx)) return NULL;
    if (l >= m->desc.blocks) {
        stx_fail(m->ctx, STX_ERR_ARG,
                 "stx_par_attention_map: expected a block below %zu, got %zu", m->desc.blocks, l);
        return NULL;
    }
    if (!stx__par_attends(stx__par_kind(m, l))) return NULL;
    return stx_attention_map_of(m->ctx, "stx_par_attention_map", &m->attended[l], b);
}

/* Checks that the model has an embedding and an output head. */
static int stx__par_has_vocab(const stx_par *m, const char *op) {
    if (!m || !stx_ok(m->ctx)) return 0;
    if (!m->vocab_io)
        stx_fail(m->ctx, STX_ERR_ARG,
                 "%s: the model has no vocabulary; set vocab in stx_par_desc, or use "
                 "stx_par_segment", op);
    return m->vocab_io != NULL;
}

STX_DEF stx_tensor *stx_par_embed(stx_par *m, const stx_ids *ids) {
    if (!stx__par_has_vocab(m, "stx_par_embed")) return NULL;
    return stx_dropout(m->ctx, stx_vocab_io_embed(m->vocab_io, ids), m->desc.dropout);
}

STX_DEF stx_tensor *stx_par_forward(stx_par *m, const stx_ids *ids, const stx_par_state *in,
                                    stx_par_state *out) {
    return stx_par_segment(m, stx_par_embed(m, ids), NULL, in, out);
}

STX_DEF stx_tensor *stx_par_logits(stx_par *m, stx_tensor *h) {
    return stx__par_has_vocab(m, "stx_par_logits") ? stx_vocab_io_logits(m->vocab_io, h) : NULL;
}

STX_DEF stx_tensor *stx_par_log_probs(stx_par *m, stx_tensor *h) {
    return stx__par_has_vocab(m, "stx_par_log_probs") ? stx_vocab_io_log_probs(m->vocab_io, h)
                                                      : NULL;
}

/* Ways to mark targets without a loss for stx_vocab_io_loss, which ignores only one id.
   See stx__par_loss_args. */
enum { STX__PAR_ALL_COUNT = 0, STX__PAR_IGNORED = 1, STX__PAR_REMAPPED = 2 };

/* Fills in the arguments of stx_vocab_io_loss. The ignored id is pad_id with pads, else
   -1. Returns STX__PAR_ALL_COUNT if every target has a loss, _IGNORED if only targets
   equal to how->ignored_id can have none, and _REMAPPED if there are other negative
   targets, which the caller must replace by how->ignored_id. */
static int stx__par_loss_args(const stx_par *m, const stx_ids *targets, stx_token_loss *how) {
    const size_t n = targets ? targets->B * targets->T : 0;
    int kind = m->desc.pads ? STX__PAR_IGNORED : STX__PAR_ALL_COUNT;
    size_t i;
    memset(how, 0, sizeof *how);
    how->ignored_id = m->desc.pads ? m->desc.pad_id : -1;
    for (i = 0; i < n && kind < STX__PAR_REMAPPED; i++) {
        if (targets->data[i] >= 0) continue;
        kind = targets->data[i] == how->ignored_id ? STX__PAR_IGNORED : STX__PAR_REMAPPED;
    }
    /* in a process group, any rank can have targets without a loss, so all ranks divide
       by the number of targets that have one */
    how->ignore = kind != STX__PAR_ALL_COUNT
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
    if (!stx__par_has_vocab(m, "stx_par_nll") || !h || !targets) return NULL;
    kind = stx__par_loss_args(m, targets, &how);
    if (!how.ignore && !rows) return stx_vocab_io_loss(m->vocab_io, h, targets, NULL);

    if (kind == STX__PAR_REMAPPED) {
        size_t i, n = targets->B * targets->T;
        int32_t *v = (int32_t *)stx_step_host_bytes(m->ctx, stx_bytes_of(n, sizeof *v, 1));
        if (!v) return NULL;
        for (i = 0; i < n; i++) v[i] = targets->data[i] < 0 ? how.ignored_id : targets->data[i];
        targets = stx_tokens(m->ctx, v, targets->B, targets->T);
    }
    y = stx_vocab_io_loss(m->vocab_io, h, targets, &how);
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
    uint64_t key = stx_step_key(m, ids, targets, salt);
    stx_token_loss how;
    size_t l;
    if (!m || !stx_ok(m->ctx)) return key;
    if (s && s->model != m) {
        stx_fail(m->ctx, STX_ERR_ARG,
                 "stx_par_key: expected a memory of this model, got one of another model");
        return key;
    }

    key = stx_key_add(key, m->desc.recompute_layers);
    key = stx_key_add(key, (uint64_t)stx__par_loss_args(m, targets, &how));
    key = stx_vocab_io_key(m->vocab_io, key, ids, targets, how.ignore ? &how : NULL);
    key = stx_key_add(key, (uint64_t)(m->frozen + 2 * m->desc.gate));
    key = stx_key_add(key, m->uniforms_count ? (uint64_t)(uintptr_t)m->uniforms : 0);
    key = stx_key_add(key, m->uniforms_count);
    if (s) {
        key = stx_memory_key(s->mem, key);
        key = stx_memory_key(s->own, key);
        key = stx_key_add(key, s->M);
        key = stx_key_add(key, s->clamp_len);
        key = stx_key_add(key, (uint64_t)s->same_length);
    }

    /* an evaluation also depends on gate_eval and the gates; omit them if a training
       step was the last to write the memory */
    if (!m->gates || (s && s->training)) return key;
    key = stx_key_add(key, (uint64_t)m->desc.gate_eval);
    if (m->desc.gate_eval == STX_PAR_EVAL_NOISE) return stx_key_add(key, s ? s->calls : 0);
    for (l = 0; m->desc.gate_eval == STX_PAR_EVAL_ARGMAX && l < m->desc.blocks; l++)
        key = stx_key_add(key, (uint64_t)stx__par_letter(m, l, NULL));
    return key;
}


// >>generation

STX_DEF stx_par_gen *stx_par_gen_create_sized(stx_par *m, size_t B, size_t M) {
    stx_ctx *x = m ? m->ctx : NULL;
    stx_par_gen *g;
    size_t l, L, width;
    if (!stx_ok(x)) return NULL;
    if (!B || M > (size_t)1 << 30) {
        stx_fail(x, STX_ERR_ARG,
                 "stx_par_gen_create: expected B >= 1 streams and M <= 2^30 rows, got B = %zu and "
                 "M = %zu", B, M);
        return NULL;
    }
    if (m->gates && m->desc.gate_eval == STX_PAR_EVAL_NOISE) {
        stx_fail(x, STX_ERR_ARG,
                 "stx_par_gen_create: gate_eval: expected STX_PAR_EVAL_ARGMAX or _SOFT, "
                 "got _NOISE, which would run a different network for each token");
        return NULL;
    }
    g = (stx_par_gen *)stx_block(x, sizeof *g);
    if (!g) return NULL;
    L = m->desc.blocks;
    width = m->desc.heads * stx__par_wide_head_dim(&m->desc);
    g->model = m;
    g->B = B;
    g->M = M;
    g->clamp_len = m->desc.clamp_len;
    g->same_length = m->desc.same_length;
    g->stale = 1;
    g->cache = stx_cache_create(x, L, B, m->vocab_io ? m->desc.vocab : 1);
    g->own = stx__par_own_memory(m, B);
    g->pos = (stx_real **)stx_block(x, stx_bytes_of(L, sizeof *g->pos, 1));
    g->kind = (char *)stx_block(x, L + 1);
    /* M + 1 rows, so that the buffer is not empty if M = 0 */
    g->pad = (int32_t *)stx_block(x, stx_bytes_of(B, M + 1, sizeof *g->pad));
    for (l = 0; stx_ok(x) && l < L; l++) {
        if (!stx__par_attends(m->block[l].kind)) continue;
        stx_cache_window(g->cache, l, STX_MAX(M, 1), width, 1);
        g->pos[l] = stx_block_activations(x, stx_bytes_of(M + 1, width, 1));
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
    for (l = 0; g->pos && l < g->model->desc.blocks; l++) stx_block_device_free(x, g->pos[l]);
    stx_block_free(x, g->pos);
    stx_block_free(x, g->kind);
    stx_block_free(x, g->pad);
    stx_cache_free(g->cache);
    stx_memory_free(g->own);
    stx_block_free(x, g);
}

STX_DEF void stx_par_gen_reset(stx_par_gen *g) {
    if (!g || !stx_ok(g->model->ctx)) return;
    stx_cache_reset(g->cache);
    stx_memory_reset(g->own);
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
                 "stx_par_gen_reset_stream: stream: expected less than %zu, got %zu", g->B, b);
        return;
    }
    for (i = 0; i < g->rows; i++) g->pad[b * g->M + g->M - 1 - i] = g->masked = 1;
    stx_memory_reset_stream(g->own, b);
}

/* Recomputes the positions and the branches to run, which depend on the parameters. */
static int stx__par_gen_fill(stx_par_gen *g) {
    STX__FP_SCOPE;
    stx_par *m = g->model;
    stx_ctx *x = m->ctx;
    const size_t width = m->desc.heads * stx__par_wide_head_dim(&m->desc), rows = g->M + 1;
    size_t l;
    for (l = 0; l < m->desc.blocks; l++) {
        const stx_par_positions *p;
        stx_tensor *t = NULL;
        g->kind[l] = (char)stx__par_kind(m, l);
        if (!g->pos[l]) continue;
        p = stx__par_positions_for(m, g->clamp_len, rows);
        if (p) t = stx__par_relative(x, m, l, p, NULL, rows);
        if (!t) return 0;
        STX_RUN(x, stx_copy2d, (x, g->pos[l], width, t->data, width, rows, width, 0));
    }
    g->stale = 0;
    return stx_ok(x);
}

/* Fills the cache of block l from the last n rows of a memory. */
static int stx__par_gen_fill_cache(stx_par_gen *g, const stx_memory *memory, size_t l, size_t n) {
    stx_par *m = g->model;
    stx_ctx *x = m->ctx;
    const stx_par_desc *d = &m->desc;
    const stx_par_block *block = &m->block[l];
    const stx_memory_layer *from = &memory->layer[l];
    const size_t values = n * 2 * d->heads * stx__par_wide_head_dim(d);
    stx_cache_layer *cache = &g->cache->layer[l];
    stx_tensor *t = stx_memory_read(memory, l, n);
    size_t b;
    if (t && d->pre_norm)
        t = stx_layernorm(x, t, block->attn_gain, block->attn_shift, d->norm_eps);
    t = stx_linear(x, t, block->wkv, block->bkv, STX_ACT_NONE);
    if (block->rel_bias) t = stx__par_widen_heads(x, d, t);
    if (!t) return 0;
    STX_RUN(x, stx_copy2d, (x, cache->k, cache->capacity * cache->width, t->data, values, g->B,
                            values, 0));
    cache->len = n;
    for (b = 0; from->masked && b < g->B; b++)
        memcpy(g->pad + b * g->M + g->M - n, from->pad + b * from->count + from->count - n,
               n * sizeof *g->pad);
    g->masked |= from->masked;
    return 1;
}

STX_DEF int stx_par_gen_set(stx_par_gen *g, const stx_par_state *from) {
    stx_par *m = g ? g->model : NULL;
    stx_ctx *x = m ? m->ctx : NULL;
    size_t l, rows = SIZE_MAX;
    if (!stx_ok(x)) return 0;
    if (!from || from->model != m) {
        stx_fail(x, STX_ERR_ARG, "stx_par_gen_set: expected a memory of the same model, got %s",
                 from ? "one of another model" : "NULL");
        return 0;
    }
    if (from->B != g->B) {
        stx_fail(x, STX_ERR_ARG, "stx_par_gen_set: expected a memory with B = %zu streams, got %zu",
                 g->B, from->B);
        return 0;
    }
    stx_par_gen_reset(g);
    stx_begin(x, STX_EVAL);
    for (l = 0; l < m->desc.blocks; l++) {
        const size_t n = STX_MIN(from->mem->layer[l].count, g->M);
        if (!g->pos[l]) continue;
        if (rows != SIZE_MAX && n != rows) {
            stx_fail(x, STX_ERR_ARG,
                     "stx_par_gen_set: expected the same number of rows in all blocks, got %zu in "
                     "block %zu, but %zu in earlier blocks", n, l, rows);
            return 0;
        }
        rows = n;
        if (n && !stx__par_gen_fill_cache(g, from->mem, l, n)) return 0;
    }
    if (g->own && !stx_memory_copy(g->own, 0, from->own, 0, g->B)) return 0;
    g->rows = rows == SIZE_MAX ? STX_MIN(stx_memory_max_rows(from->mem), g->M) : rows;
    return stx_ok(x);
}

/* Returns the mask (B,n + T) of a call with T new tokens: nonzero for cached rows from
   before a stream's reset. Also shifts g->pad by T rows. NULL after an error. */
static const stx_ids *stx__par_gen_mask(stx_par_gen *g, size_t T) {
    stx_ctx *x = g->model->ctx;
    const size_t n = g->rows, M = g->M, stay = T < M ? M - T : 0;
    int32_t *hidden = (int32_t *)stx_step_host_bytes(x, stx_bytes_of(g->B, n + T, sizeof *hidden));
    const stx_ids *mask;
    size_t b, i;
    if (!hidden) return NULL;
    memset(hidden, 0, g->B * (n + T) * sizeof *hidden);
    for (b = 0; b < g->B; b++)
        memcpy(hidden + b * (n + T), g->pad + b * M + M - n, n * sizeof *hidden);
    mask = stx_tokens(x, hidden, g->B, n + T);

    for (b = 0; b < g->B; b++) {
        memmove(g->pad + b * M, g->pad + b * M + M - stay, stay * sizeof *hidden);
        memset(g->pad + b * M + stay, 0, (M - stay) * sizeof *hidden);
    }
    g->masked = 0;
    for (i = 0; i < g->B * M; i++) g->masked |= g->pad[i];
    return mask;
}

/* Runs T tokens, at most g->cache->chunk: h (B,T,D) -> last hidden states (B,T,D). NULL
   after an error. */
static stx_tensor *stx__par_gen_part(stx_par_gen *g, stx_tensor *h) {
    stx_par *m = g->model;
    stx_ctx *x = m->ctx;
    const size_t T = h->dim[1], n = g->rows, M = g->M;
    const size_t span = stx__par_span(x, "stx_par_gen_step", g->same_length, M);
    const stx_ids *mask = NULL;
    size_t l, t;
    if (!stx_ok(x) || (g->stale && !stx__par_gen_fill(g))) return NULL;
    m->latency = NULL;
    if (g->masked) {
        mask = stx__par_gen_mask(g, T);
        if (!mask) return NULL;
    }

    for (l = 0; l < m->desc.blocks && h; l++) {
        stx__par_job job;
        stx_tensor *in[2 + STX_PAR_MAX_TYPES], *state[STX_PAR_MAX_TYPES] = {NULL};
        int count = 1;
        if (g->kind[l] == 'i') continue;
        memset(&job, 0, sizeof job);
        job.m = m;
        job.l = l;
        job.n = n;
        job.kind = g->kind[l];
        job.span = span;
        job.mask = mask;
        job.gen = g;
        if (!M && g->pos[l]) g->cache->layer[l].len = 0;    /* the layer holds one row
                                                               even if M = 0: discard
                                                               it */
        in[0] = h;
        if (job.kind == 'g') {
            job.gate_input = count++;
            in[1] = stx__par_gate_of(m, l, g->B, T, NULL, 0, &job);
        }
        stx__par_prepare_own(m, g->own, g->B, &job, in, &count);
        h = stx_ok(x) ? stx__par_run(x, &job, in, state) : NULL;
        for (t = 0; h && t < m->desc.types; t++)
            if (!stx__par_own_push(m, g->own, g->own, l, t, state[t])) return NULL;
    }
    if (!h) return NULL;
    g->rows = STX_MIN(n + T, M);
    if (!m->final_gain) return h;
    return stx_layernorm(x, h, m->final_gain, m->final_shift, m->desc.norm_eps);
}

STX_DEF stx_tensor *stx_par_gen_step(stx_par_gen *g, stx_tensor *h) {
    stx_ctx *x = g ? g->model->ctx : NULL;
    stx_tensor *y = NULL, *part;
    size_t at, count, T, D;
    if (!stx_ok(x) || !h) return NULL;
    T = h->ndim == 3 ? h->dim[1] : 0;
    D = g->model->desc.dim;
    if (stx_training(x)) {
        stx_fail(x, STX_ERR_ARG,
                 "stx_par_gen_step: expected a step that began with stx_begin(x, STX_EVAL), got a "
                 "training step");
        return NULL;
    }
    if (h->ndim != 3) {
        stx_fail(x, STX_ERR_SHAPE,
                 "stx_par_gen_step: h: expected three dimensions, (%zu,T,%zu), got %d", g->B, D,
                 (int)h->ndim);
        return NULL;
    }
    if (!T || h->dim[0] != g->B || h->dim[2] != D) {
        stx_fail(x, STX_ERR_SHAPE, "stx_par_gen_step: expected h (%zu,T,%zu), got (%zu,%zu,%zu)",
                 g->B, D, h->dim[0], T, h->dim[2]);
        return NULL;
    }
    for (at = 0; at < T; at += count) {
        count = STX_MIN(T - at, g->cache->chunk);
        /* STX_PAR_POS_REF numbers positions from the first key, so each token needs
           different rows while the memory grows: run the tokens one by one */
        if (g->model->desc.pos_mode == STX_PAR_POS_REF && g->rows < g->M) count = 1;
        part = stx__par_gen_part(g, count < T ? stx_slice(x, h, at, at + count) : h);
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
    if (!g || !stx__par_has_vocab(g->model, "stx_par_gen_feed")) return NULL;
    return stx_cache_feed(g->cache, g->model->vocab_io, ids, n, 1, stx__par_gen_feed, g);
}


// >>model: the table of functions for programs that accept any family

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
    return d->recompute_layers = STX_MIN(n, d->blocks);
}

static uint64_t stx__par_lm_key(const void *m, const stx_ids *ids, const stx_ids *targets,
                                const void *s, uint64_t salt) {
    return stx_par_key((const stx_par *)m, ids, targets, (const stx_par_state *)s, salt);
}

static const stx_attention_map *stx__par_lm_attention_map(const void *m, size_t l, size_t b) {
    return stx_par_attention_map((const stx_par *)m, l, b);
}

static void *stx__par_lm_state_create(void *m, size_t B, size_t window) {
    if (window) return stx_par_state_create_sized((stx_par *)m, B, window);
    return stx_par_state_create((stx_par *)m, B);
}

static void *stx__par_lm_gen_create(void *m, size_t B, size_t window) {
    if (window) return stx_par_gen_create_sized((stx_par *)m, B, window);
    return stx_par_gen_create((stx_par *)m, B);
}

STX_LM_STATES(par)

STX_DEF stx_lm stx_par_as_lm(stx_par *m) {
    stx_lm lm;
    memset(&lm, 0, sizeof lm);
    if (!m || !m->vocab_io) return lm;
    lm.model = m;
    lm.ctx = m->ctx;
    lm.family = stx_par_family();
    lm.params = m->params;
    lm.vocab_io = m->vocab_io;
    lm.loss = stx__par_lm_loss;
    lm.total = stx__par_lm_total;
    lm.updated = stx__par_lm_updated;
    lm.recompute = stx__par_lm_recompute;
    lm.key = stx__par_lm_key;
    lm.layers = m->desc.blocks;
    lm.attention_map = stx__par_lm_attention_map;
    lm.state_create = stx__par_lm_state_create;
    lm.gen_create = stx__par_lm_gen_create;
    stx__par_lm_states(&lm);
    return lm;
}


// >>files

static void *stx__par_family_create(stx_ctx *x, const void *desc) {
    return stx_par_create(x, (const stx_par_desc *)desc);
}

static const void *stx__par_family_desc(const void *m) {
    return &((const stx_par *)m)->desc;
}

static stx_params *stx__par_family_params(void *m, int k) {
    if (!k) return ((stx_par *)m)->params;
    return k == 1 ? ((stx_par *)m)->gates : NULL;
}

static stx_lm stx__par_family_as_lm(void *m) {
    return stx_par_as_lm((stx_par *)m);
}

STX_DEF const stx_family *stx_par_family(void) {
    static const stx_field field[] = {
        STX_FIELD(stx_par_desc, SIZE, vocab),
        STX_FIELD(stx_par_desc, SIZE, dim),
        STX_FIELD(stx_par_desc, SIZE, heads),
        STX_FIELD(stx_par_desc, SIZE, head_dim),
        STX_FIELD(stx_par_desc, SIZE, inner),
        STX_FIELD(stx_par_desc, SIZE, blocks),
        STX_FIELD(stx_par_desc, TEXT, pattern),
        STX_FIELD(stx_par_desc, CODE, type),
        STX_FIELD(stx_par_desc, SIZE, types),
        STX_FIELD(stx_par_desc, SIZE, segment),
        STX_FIELD(stx_par_desc, SIZE, mem),
        STX_FIELD(stx_par_desc, INT, positions),
        STX_FIELD(stx_par_desc, INT, sines),
        STX_FIELD(stx_par_desc, INT, pos_mode),
        STX_FIELD(stx_par_desc, SIZE, clamp_len),
        STX_FIELD(stx_par_desc, INT, same_length),
        STX_FIELD(stx_par_desc, INT, full_scale),
        STX_FIELD(stx_par_desc, INT, attn_relu),
        STX_FIELD(stx_par_desc, INT, biases),
        STX_FIELD(stx_par_desc, INT, own_uv),
        STX_FIELD(stx_par_desc, INT, pre_norm),
        STX_FIELD(stx_par_desc, INT, no_final_norm),
        STX_FIELD(stx_par_desc, REAL, norm_eps),
        STX_FIELD(stx_par_desc, REAL, dropout),
        STX_FIELD(stx_par_desc, REAL, attn_dropout),
        STX_FIELD(stx_par_desc, REAL, inner_dropout),
        STX_FIELD(stx_par_desc, REAL, pos_dropout),
        STX_FIELD(stx_par_desc, REAL, final_dropout),
        STX_FIELD(stx_par_desc, INT, gate_form),
        STX_FIELD_ARRAY(stx_par_desc, REAL, pi0),
        STX_FIELD(stx_par_desc, INT, gate),
        STX_FIELD(stx_par_desc, INT, gate_eval),
        STX_FIELD(stx_par_desc, INT, noise),
        STX_FIELD(stx_par_desc, SIZE, noise_tokens),
        STX_FIELD(stx_par_desc, REAL, tau),
        STX_FIELD(stx_par_desc, INT, adaptive_in),
        STX_FIELD(stx_par_desc, INT, words_out),
        STX_FIELD(stx_par_desc, REAL, emb_scale),
        STX_FIELD(stx_par_desc, SIZE, emb),
        STX_FIELD_ARRAY(stx_par_desc, SIZE, cutoff),
        STX_FIELD(stx_par_desc, SIZE, cutoffs),
        STX_FIELD(stx_par_desc, REAL, div_val),
        STX_FIELD(stx_par_desc, REAL, proj_factor),
        STX_FIELD_ARRAY(stx_par_desc, SIZE, proj_dims),
        STX_FIELD(stx_par_desc, INT, tie_words),
        STX_FIELD(stx_par_desc, INT, tie_projs),
        STX_FIELD(stx_par_desc, INT, one_proj),
        STX_FIELD(stx_par_desc, INT, pads),
        STX_FIELD(stx_par_desc, INT32, pad_id),
        STX_FIELD(stx_par_desc, INT, divide_all),
        STX_FIELD(stx_par_desc, INT, latency),
        STX_FIELD(stx_par_desc, INT, latency_w),
        STX_FIELD_ARRAY(stx_par_desc, REAL, cost),
        STX_FIELD(stx_par_desc, REAL, latency_weight),
        STX_FIELD(stx_par_desc, REAL, latency_target),
        STX_FIELD(stx_par_desc, REAL, latency_power),
        STX_FIELD(stx_par_desc, INT, init),
        STX_FIELD(stx_par_desc, REAL, init_std),
        STX_FIELD(stx_par_desc, REAL, proj_std),
        STX_FIELD(stx_par_desc, SETTING, recompute_layers)
    };
    static const stx_family family = {
        "par", sizeof(stx_par_desc), field, sizeof field / sizeof *field,
        stx__par_family_create, stx__par_family_desc, stx__par_family_params,
        stx__par_family_as_lm
    };
    return &family;
}

STX_DEF stx_par *stx_par_open(stx_ctx *x, const char *path) {
    return (stx_par *)stx_model_open(x, stx_par_family(), path);
}

STX_DEF int stx_par_save(stx_par *m, const char *path) {
    return stx_model_save(stx_par_family(), m, path);
}

STX_STRICT_OFF
#endif /* SEQTX_PAR_IMPLEMENTATION */

#define STX__LETTERS 2
#include "seqtx.h"      /* restores the single-letter macros */
