/* seqtx_par.h - v0.1 - Transformer-XL from blocks in any order, and PAR: a search for that order by Gumbel-softmax
   no warranty implied; MIT or public domain, your choice (end of seqtx.h)

   In ONE .c (or .cpp) file:              everywhere else:
       #define SEQTX_IMPLEMENTATION           #include "seqtx_par.h"
       #include "seqtx_par.h"
   It includes seqtx.h, which must stand beside it. Link -lm (and -pthread on older systems); compile with -O2.
   (SEQTX_PAR_IMPLEMENTATION compiles this header's part alone, when seqtx.h's is compiled elsewhere.)

   MANUAL
*/
#ifndef SEQTX_PAR_H
#define SEQTX_PAR_H

#include "seqtx.h"

#ifdef __cplusplus
extern "C" {
#endif

// >>api: model -----------------------------------------------------------------------------------------------------

enum { STX_PAR_SINES = 0, STX_PAR_LEARNED };                            /* stx_par_desc.positions */
enum { STX_PAR_SINES_BLOCK = 0, STX_PAR_SINES_REF };                    /* .sines */
enum { STX_PAR_POS_DIST = 0, STX_PAR_POS_FIXED, STX_PAR_POS_REF };      /* .pos_mode */
enum { STX_PAR_LOGITS = 0, STX_PAR_PI };                                /* .arch */
enum { STX_PAR_SOFT = 0, STX_PAR_ST };                                  /* .gate */
enum { STX_PAR_EVAL_ARGMAX = 0, STX_PAR_EVAL_SOFT, STX_PAR_EVAL_NOISE };        /* .gate_eval */
enum { STX_PAR_NOISE_STEP = 0, STX_PAR_NOISE_SEQUENCE, STX_PAR_NOISE_TOKENS };  /* .noise */
enum { STX_PAR_OUT_ADAPTIVE = 0, STX_PAR_OUT_PLAIN, STX_PAR_OUT_TIED, STX_PAR_OUT_REF };       /* .words_out */
enum { STX_PAR_TIE_NONE = 0, STX_PAR_TIE_ALL, STX_PAR_TIE_BUT_FIRST };  /* .tie_projs */
enum { STX_PAR_LATENCY_NONE = 0, STX_PAR_LATENCY_ADD, STX_PAR_LATENCY_HINGE, STX_PAR_LATENCY_FBNET };  /* .latency */
enum { STX_PAR_LATENCY_OF_P = 0, STX_PAR_LATENCY_OF_W };                /* .latency_w */
enum { STX_PAR_INIT_XL = 0, STX_PAR_INIT_REF };                         /* .init */
#define STX_PAR_NO_ROWS SIZE_MAX            /* stx_par_desc.mem, where 0 means a default */

typedef struct stx_par_desc {
    size_t vocab;           /* V; 0: no words, stx_par_segment alone (vectors in, vectors out) */
    size_t dim;             /* D; 0: 512 */
    size_t heads;           /* H; 0: 8 */
    size_t head_dim;        /* dh; 0: D / H. q, k and v are H dh wide */
    size_t inner;           /* F, of the feed-forward; 0: 4 D */
    size_t blocks;          /* L; 0: as many as the pattern has; without one 32 */
    const char *pattern;    /* the blocks from below: s attention, f feed-forward, i identity; also "(sfff)6f8", see stx_par_expand
                               (copied). NULL or "": a supernet, every block is a mixture of the three */
    size_t segment;         /* T, tokens of a call: what tables are made for; 0: 128. Calls may be shorter or longer */
    size_t mem;             /* M, rows of memory; 0: T. STX_PAR_NO_ROWS: none */
    int    positions;       /* STX_PAR_SINES; STX_PAR_LEARNED: a table of M + T distances for each attention */
    int    sines;           /* STX_PAR_SINES_BLOCK: sines, then cosines. _REF: interleaved, slowest first */
    int    pos_mode;        /* row of distance d. STX_PAR_POS_DIST: d. _FIXED: M + T - 1 - d. _REF: K - 1 - d with the K keys of this call.
                               The latter two with STX_PAR_SINES_REF */
    size_t clamp_len;       /* distances beyond it are as it; 0: none. With STX_PAR_POS_DIST */
    int    same_length;     /* a query sees M keys, its own among them, and no more */
    int    full_scale;      /* scores are divided by dh, not by its root */
    int    attn_relu;       /* relu after Wo */
    int    biases;          /* of Wq, Wkv, Wr, Wo. W1 and W2 always have them */
    int    own_uv;          /* u, v for each attention; else one pair for all */
    int    pre_norm;        /* x + branch(LN(x)), and a final norm; else LN(x + branch(x)) */
    double norm_eps;        /* 0: 1e-5 */
    double dropout;         /* of X_0 and of each branch's output */
    double attn_dropout;    /* attention weights */
    double inner_dropout;   /* inside the feed-forward */
    double pos_dropout;     /* sines, before Wr */
    double final_dropout;   /* last hidden states */
    int    arch;            /* gate parameters. STX_PAR_LOGITS: free logits. STX_PAR_PI: the reference's, clamped at 0 */
    double pi0[3];          /* first probabilities of attention, feed-forward, identity; 0, 0, 0: 0.33, 0.33, 0.34 */
    int    gate;            /* in training. STX_PAR_SOFT: w = y. STX_PAR_ST: one-hot with the gradient of y */
    int    gate_eval;       /* STX_PAR_EVAL_ARGMAX: the likeliest branch, alone. _SOFT: w = p. _NOISE: as in training */
    int    noise;           /* draws: STX_PAR_NOISE_STEP, one; _SEQUENCE: one for each stream; _TOKENS: for each run of noise_tokens */
    size_t noise_tokens;
    double tau;             /* first temperature; 0: 1. Then stx_par_set_tau */
    int    adaptive_in;     /* words in: adaptive, as the output, with its cutoffs; else a table (V,D) */
    int    words_out;       /* STX_PAR_OUT_ADAPTIVE: Transformer-XL's. _PLAIN: W (V,D) and a bias; _TIED: W is the table. _REF: see manual */
    double emb_scale;       /* of the embedding; 0: sqrt(D) */
    size_t emb;             /* E, width of the adaptive tables' first cluster; 0: D */
    size_t cutoff[STX_MAX_CLUSTERS - 1], cutoffs;      /* of adaptive words; none: one cluster */
    double div_val;         /* cluster i is floor(E / div_val^i) wide; 0: 1. ref: floor(D / div_val^i); 0: 4 */
    size_t proj_dims[STX_MAX_CLUSTERS - 1];     /* ref: width of each tail, where not 0 */
    int    tie_words;       /* adaptive tables of input and output are the same */
    int    tie_projs;       /* ... and projections */
    int    pads;            /* 1: targets that are pad_id have no loss */
    int32_t pad_id;
    int    divide_all;      /* the loss is divided by all B T targets; else by those that count */
    int    latency;         /* what is added to the loss for the time that the blocks take: see stx_par_total */
    int    latency_w;       /* of p, which has no noise, or of the sampled w */
    double cost[2];         /* c: time of an attention, a feed-forward; an identity takes none */
    double latency_weight;  /* lam, alpha of STX_PAR_LATENCY_FBNET */
    double latency_target;  /* of STX_PAR_LATENCY_HINGE */
    double latency_power;   /* beta; 0: 0.6 */
    int    init;            /* STX_PAR_INIT_XL: normal, 0.02. _REF: Glorot's */
    double init_std;        /* of STX_PAR_INIT_XL; 0: 0.02 */
    double proj_std;        /* ... of projections of words; 0: 0.01 */
    int    recompute;       /* drop each block's activations, make them again in backward */
} stx_par_desc;

/* Sets the switches in which the reference differs: see the column of the manual. Sizes stay. */
STX_DEF void stx_par_reference(stx_par_desc *d);

typedef struct stx_par_block {
    int    kind;                                /* 's', 'f', 'i', or 'g', a mixture: the supernet's */
    stx_tensor *attn_gain, *attn_shift;         /* (D) */
    stx_tensor *wq, *wkv, *wr, *wo;             /* (H dh,D) (2 H dh,D): keys first; (H dh,D) (D,H dh) */
    stx_tensor *bq, *bkv, *br, *bo;             /* with biases */
    stx_tensor *u, *v;                          /* (H,dh): its own, or those of all */
    stx_tensor *rel;                            /* (M + T,H dh), row d = distance d: STX_PAR_LEARNED */
    stx_tensor *ff_gain, *ff_shift, *w1, *b1, *w2, *b2;     /* (D) (D) (F,D) (F) (D,F) (D) */
    stx_tensor *gate;                           /* (3): attention, feed-forward, identity; in stx_par.arch */
} stx_par_block;

typedef struct stx_par {
    stx_ctx        *ctx;
    stx_par_desc    desc;                   /* resolved; its pattern is NULL */
    char           *pattern;                /* L letters; NULL: a supernet */
    stx_params     *params;                 /* the weights */
    stx_params     *arch;                   /* the gates' parameters, arch.<i>, for an optimiser of their own; NULL without a supernet */
    stx_words      *words;                  /* NULL without vocab */
    stx_par_block  *block;
    stx_tensor     *u, *v;                  /* (H,dh), unless own_uv */
    stx_tensor     *final_gain, *final_shift;
    stx_tensor     *sines;                  /* (rows,D), a constant. STX_PAR_POS_REF: row i is R's; else the last row is distance 0 */
    stx_ids        *far_first;              /* (1,rows): rows of the learned tables from the farthest distance to 0 */
    stx_tensor     *tau, *minus_one, *cost; /* scalars (1), and the table c (3) */
    double          tau_now;
    int             frozen;                 /* the gates learn nothing: set by stx_par_freeze */
    const stx_real *uniforms;               /* of the caller, see stx_par_set_uniforms */
    size_t          uniforms_count;
    stx_tensor     *latency;                /* (1), sum of all blocks, of the last forward; NULL: none */
} stx_par;

/* Fills in the defaults and checks: 1, or 0 and an error (if x) that names the field. to->pattern is from's. */
STX_DEF int stx_par_resolve(stx_ctx *x, const stx_par_desc *from, stx_par_desc *to);
/* Makes a model with fresh parameters in x; it lives as long as x. NULL and the context's error when the desc makes no sense. */
STX_DEF stx_par *stx_par_create(stx_ctx *x, const stx_par_desc *d);
STX_DEF stx_params *stx_par_params(stx_par *m);
/* Number of weights that a desc gives (tied ones once), without making them, and without the 3 L of a supernet's gates; 0 when it is not
   valid, SIZE_MAX: as many or more. */
STX_DEF size_t stx_par_count(const stx_par_desc *d);

// >>api: memory ----------------------------------------------------------------------------------------------------

/* What B streams remember: of each block with an attention its last inputs. Goes into a call and comes out of it. Training and
   evaluation each have their own. Empty at first. */
typedef struct stx_par_state {
    stx_par  *model;
    size_t    B, M;
    stx_rows *mem;          /* rows of block l, (B,n,D), oldest first */
    uint64_t  calls;        /* that moved it, since the reset */
} stx_par_state;

STX_DEF stx_par_state *stx_par_state_create(stx_par *m, size_t B);
/* The same with M rows instead of the model's (0: none). Distances beyond a learned table take its last row. */
STX_DEF stx_par_state *stx_par_state_create_sized(stx_par *m, size_t B, size_t M);
STX_DEF void stx_par_state_free(stx_par_state *s);
STX_DEF void stx_par_state_reset(stx_par_state *s);         /* forgets all. In error nothing */
STX_DEF void stx_par_state_reset_stream(stx_par_state *s, size_t b);    /* stream b alone: another text begins there */
/* n streams of `from`, from c on, become the streams from b on of `to`, which has the same model and M: splits a batch, joins parts,
   repeats a stream. 1, or 0 and an error. */
STX_DEF int stx_par_state_copy(stx_par_state *to, size_t b, const stx_par_state *from, size_t c, size_t n);
/* The memory of block l in the caller's hands, on the host: get writes its n = mem->layer[l].real rows (B,n,D); set replaces them, n <= M.
   1, or 0 and an error. */
STX_DEF int stx_par_state_get(const stx_par_state *s, size_t l, stx_real *out);
STX_DEF int stx_par_state_set(stx_par_state *s, size_t l, const stx_real *in, size_t n);
/* In a checkpoint: entries of stx_rows_save under "<prefix>mem.", and "<prefix>calls"; prefix at most 64 letters. load fills a state of the
   same B; 1, or 0 and an error (the state is then empty). */
STX_DEF int stx_par_state_save(stx_writer *w, const stx_par_state *s, const char *prefix);
STX_DEF int stx_par_state_load(stx_par_state *s, const stx_file *f, const char *prefix);

// >>api: forward ---------------------------------------------------------------------------------------------------

/* A segment of vectors: h (B,T,D), any T >= 1 -> last hidden states (B,T,D). pad (B,T): not 0 where h is padding (finite numbers), which
   nobody attends to, now or later; NULL: none. in: memory (NULL: empty); out: where the new memory goes (NULL: nowhere; may be in).
   Gradients reach h, and do not pass the memory. Not inside stx_recompute with out. */
STX_DEF stx_tensor *stx_par_segment(stx_par *m, stx_tensor *h, const stx_ids *pad, const stx_par_state *in, stx_par_state *out);
/* ids (B,T) -> X_0 (B,T,D): the embedding, scaled, with dropout */
STX_DEF stx_tensor *stx_par_embed(stx_par *m, const stx_ids *ids);
/* Both: ids (B,T) -> last hidden states (B,T,D) */
STX_DEF stx_tensor *stx_par_forward(stx_par *m, const stx_ids *ids, const stx_par_state *in, stx_par_state *out);
/* Logits (B,T,V) of hidden states, on the tape, where the output is plain or tied; and log p, of which no gradient passes. */
STX_DEF stx_tensor *stx_par_logits(stx_par *m, stx_tensor *h);
STX_DEF stx_tensor *stx_par_log_probs(stx_par *m, stx_tensor *h);
/* nll of targets (B,T), nats per token, over those that count: not negative, and not pad_id with pads; divided by their number, or with
   divide_all by B T -> (1); 0 if none counts. rows (NULL: not wanted): that of each, (B T), 0 where it does not count, a constant. */
STX_DEF stx_tensor *stx_par_nll(stx_par *m, stx_tensor *h, const stx_ids *targets, stx_tensor **rows);
/* The nll of a segment of tokens -> (1). */
STX_DEF stx_tensor *stx_par_loss(stx_par *m, const stx_ids *ids, const stx_ids *targets, const stx_par_state *in, stx_par_state *out);
/* What is minimised: nll, with the latency of the last forward, Lat = sum_l sum_k v_lk c_k, v = p or w (latency_w):
       ADD     nll + lam Lat                            HINGE   nll + lam max(0, Lat / target - 1)
       FBNET   nll lam ln(max(Lat, 1))^beta             choose a unit of time in which Lat is above 1
   nll itself in evaluation, without latency and without a supernet. */
STX_DEF stx_tensor *stx_par_total(stx_par *m, stx_tensor *nll);
/* A number for all that the host decides in a step of this model with these tokens and this memory (each NULL: none): the key of
   stx_step_run; salt: what else decides. */
STX_DEF uint64_t stx_par_key(const stx_par *m, const stx_ids *ids, const stx_ids *targets, const stx_par_state *s, uint64_t salt);

// >>api: search ----------------------------------------------------------------------------------------------------

/* The temperature of the next steps: a scalar on the device, which a replayed step reads (set it between steps). */
STX_DEF void stx_par_set_tau(stx_par *m, double tau);
/* tau after n updates:  FACTOR from to^(n / total), the reference's, where `to` is a factor;  TARGET from (to / from)^(n / total). n stops
   at total. */
enum { STX_PAR_TAU_TARGET = 0, STX_PAR_TAU_FACTOR };
typedef struct stx_par_anneal { int form; double from, to; uint64_t total; } stx_par_anneal;
STX_DEF double stx_par_tau(const stx_par_anneal *a, uint64_t n);
/* With 1 the gates' parameters are constants from the next forward on: nothing is spent on their gradients. */
STX_DEF void stx_par_freeze(stx_par *m, int frozen);
/* Uniform numbers in (0,1) of the caller in place of drawn ones, for tests: (draws,L,3) on the host, draws as desc.noise says for the next
   calls (stx_par_draws). They must stay until NULL is set. */
STX_DEF void stx_par_set_uniforms(stx_par *m, const stx_real *u, size_t count);
/* How many draws a call of B streams of T tokens makes for each block */
STX_DEF size_t stx_par_draws(const stx_par *m, size_t B, size_t T);
/* p (L,3) of the gates as they are now. 1; 0 in error and for a fixed network. */
STX_DEF int stx_par_probs(const stx_par *m, double *p);

/* Patterns. Each writes text with its 0 into out, which has room for `room` letters, and returns its length; 0 when there is no room or
   the arguments make no sense.
   expand: a letter s, f or i, or a group in parentheses, and how often: "(sfff)6f8" is six times sfff and then eight f. format: back.
   rule: PAR(L,p), floor(L / p) attentions evenly within the first two thirds.
   argmax: of the gates as they are now; sample: each block drawn from its p, a function of (seed, n). */
STX_DEF size_t stx_par_expand(char *out, size_t room, const char *pattern);
STX_DEF size_t stx_par_format(char *out, size_t room, const char *pattern);
STX_DEF size_t stx_par_rule(char *out, size_t room, size_t L, size_t p);
STX_DEF size_t stx_par_argmax(const stx_par *m, char *out, size_t room);
STX_DEF size_t stx_par_sample(const stx_par *m, uint64_t seed, uint64_t n, char *out, size_t room);
/* The weights of `from`, a supernet or not, for the branches that `to` has; they may be of two contexts. From a file: stx_params_load of
   to's params. 1, or 0 and an error: a weight that `from` lacks or has in another shape. */
STX_DEF int stx_par_inherit(stx_par *to, const stx_par *from);

// >>api: cuts ------------------------------------------------------------------------------------------------------

/* Cutoffs for adaptive words: N counts (in the order of ids; largest first is best, and sort does it) are cut in K clusters of the least
   cost, exactly. F_j = sum of the first j counts, c_0 < c_1 < .. < c_{K-1} = N the ends, K - 1 tails:
       REF    sum over clusters, also the first, of (size) (count)               the reference's: as if the head cost only its own tokens
       MACS   D (c_0 + K - 1) F_N + sum over tails k = 1.. of h_k (D + size_k) count_k         multiply-adds, h_k = proj_dims[k-1], or
              max(floor(D / factor^k), 1)
       TIME   time(c_0 + K - 1, D, 1) + sum of time(h_k, D, p_k) + time(size_k, h_k, p_k),     p_k = count_k / F_N
              exact if it is Monge, as max(c + a k0 n0, c + a k n), the form of 1609.04309, is
   Of cuts that cost the same the one whose last cutoffs are largest is taken, as the reference does. */
enum { STX_PAR_CUTS_REF = 0, STX_PAR_CUTS_MACS, STX_PAR_CUTS_TIME };
typedef struct stx_par_cuts_desc {
    size_t clusters;                /* K, 1 to 8 */
    int    cost;
    int    sort;                    /* 1: counts by falling size first */
    size_t dim;                     /* D: MACS, TIME */
    double factor;                  /* 0: 4 */
    const size_t *proj_dims;        /* (K - 1), or NULL */
    double (*time)(void *user, size_t columns, size_t inner, double share);    /* of a product for this share of the batch's rows */
    void  *user;
} stx_par_cuts_desc;
/* cut (K - 1) gets the cutoffs, as stx_par_desc.cutoff. total (NULL: not wanted): the cost. 1, or 0 and an error: a cluster would be empty
   (N < K), or sums that a 64-bit integer does not hold. */
STX_DEF int stx_par_cuts(stx_ctx *x, size_t *cut, double *total, const uint64_t *counts, size_t N, const stx_par_cuts_desc *d);

// >>api: generation ------------------------------------------------------------------------------------------------

/* Token by token, in evaluation, with projected keys and values kept: equal to whole segments of T, whatever the lengths of the steps are:
   memory is cut to M rows when a segment is full. Fixed networks, and supernets in STX_PAR_EVAL_ARGMAX and _SOFT. Make a new one, or
   reset it, when the parameters have changed. */
typedef struct stx_par_gen {
    stx_par   *model;
    size_t     B, M, T;
    size_t     at;              /* steps of this segment so far, below T */
    stx_cache *cache;           /* of each block with an attention: keys and values of memory and of this segment */
    stx_real **pos;             /* (M + T,H dh) of each: Wr's projection of the sines, or the learned table */
    char      *kind;            /* (L): what each block runs */
    size_t     rows;            /* of memory, at the start of this segment */
    int32_t   *pad;             /* (B,M + T), on the host: not 0 for rows before a stream's reset */
    int        masked, stale;   /* is one of them not 0; the caches' positions are to be made */
} stx_par_gen;

STX_DEF stx_par_gen *stx_par_gen_create(stx_par *m, size_t B);
/* With M rows of memory and segments of T instead of the model's. */
STX_DEF stx_par_gen *stx_par_gen_create_sized(stx_par *m, size_t B, size_t M, size_t T);
STX_DEF void stx_par_gen_free(stx_par_gen *g);
STX_DEF void stx_par_gen_reset(stx_par_gen *g);
STX_DEF void stx_par_gen_reset_stream(stx_par_gen *g, size_t b);        /* stream b begins anew where the others go on */
/* Begins with a segment after this memory (same model, B and M), which is read once. 1, or 0 and an error. */
STX_DEF int stx_par_gen_set(stx_par_gen *g, const stx_par_state *from);
/* h (B,t,D), any t >= 1, as stx_par_embed gives it -> last hidden states (B,t,D): the caller has called stx_begin(x, STX_EVAL). */
STX_DEF stx_tensor *stx_par_gen_step(stx_par_gen *g, stx_tensor *h);
/* Feeds ids (B,n), n >= 1, and returns logits, or log p, (B,V) of the token after the last of them, in host memory: what stx_sample wants.
   They stay until the next call. Calls stx_begin(x, STX_EVAL): not between a forward and its backward. */
STX_DEF const stx_real *stx_par_gen_feed(stx_par_gen *g, const int32_t *ids, size_t n);
/* The model for programs that take any family; window: rows of memory in evaluation, 0: M. params are the weights: the gates' list
   stx_par.arch is the program's own affair. All NULL for NULL, and for a model without words. */
STX_DEF stx_lm stx_par_lm(stx_par *m);

// >>api: kernels ---------------------------------------------------------------------------------------------------

/* Gates of one block for R draws. With ln q: kind LOGITS: log_softmax(al); PI: ln(max(al, 0) + 1e-5), and p = q / sum q:
       g = -ln(-ln U)     a = (ln q + g) / tau     y = softmax(a)     w = y, or with hard the one-hot of the first largest a
   With noisy = 0: g = 0 and tau = 1, y = p. U: number k of draw r is u[r ldu + k], or with u NULL
       ((bits >> 9) + 0.5) 2^-23 of bits = word k of stx_philox(seed, stream, r)
   which is never 0 or 1 and in float exact. lat (1) = before[0] + the mean over draws of sum_k v_k cost[k], v = p with latency 1 (which
   needs no mean), w with latency 2; latency 0: lat, before, cost are not read. Everything is made in double and rounded once.
   Backward, with y and the hard gate's w as constants, dw_k += dlat cost[k] / R where latency is 2:
       da_k = y_k (dw_k - sum_j y_j dw_j)      s_k = sum_r da_k / tau, r ascending
       LOGITS: dal_k += s_k - p_k sum s + dp_k      dp_k = dlat p_k (cost[k] - sum p cost), where latency is 1
       PI:     dal_k += s_k / (max(al_k, 0) + 1e-5) + dlat (cost[k] - sum p cost) / sum q, where al_k >= 0; else nothing
   and dbefore (1) += dlat. All are floats in every precision. */
typedef struct stx_par_gate_args {
    size_t R, ldu;
    int    kind, hard, noisy, latency;
    uint64_t seed, stream;
    const stx_real *al;             /* (3) */
    const stx_real *tau;            /* (1) */
    const stx_real *u;              /* (R,..) or NULL */
    const stx_real *cost, *before;  /* (3), (1); before NULL: 0 */
    stx_real *w, *y;                /* (R,3); y may be w, unless hard */
    stx_real *lat;                  /* (1) */
    const stx_real *dw, *dlat;      /* (R,3), (1); NULL: 0 */
    stx_real *dal, *dbefore;        /* (3), (1); NULL: not wanted */
} stx_par_gate_args;
STX_KERNEL(stx_par_gate_fwd, (stx_ctx *x, const stx_par_gate_args *a))
STX_KERNEL(stx_par_gate_bwd, (stx_ctx *x, const stx_par_gate_args *a))

/* The mixture of a block's branches, row by row:  y = w0 Y0 + w1 Y1 + w2 h,  Y0 = layernorm(h + b0), Y1 = layernorm(h + b1), each with its
   gain and shift; gain[0] NULL: Y0 = h + b0, Y1 = h + b1. A term whose weight is 0 is left out, so that a one-hot w gives the chosen
   branch's own bits: those of stx_residual_norm. The weights of row n are w + 3 r, r = n / T ceil(T / run) + n % T / run.
   Forward writes y and, with layer norms, mean and rstd. Backward, all from dy, s_i = h + b_i, xh_i = (s_i - mean_i) rstd_i:
       dw_0 += sum dy Y0, dw_1 += sum dy Y1, dw_2 += sum dy h      over the rows of a run, ascending, and their channels
       dgain_i += sum_n w_i dy xh_i      dshift_i += sum_n w_i dy
       ds_i = rstd_i (q - mean(q) - xh_i mean(q xh_i)), q = w_i dy gain_i;  without layer norm w_i dy
       db_i = or += ds_i      dh = or += w2 dy + ds_0 + ds_1                        NULL: not wanted */
typedef struct stx_par_mix_args {
    size_t N, C, T, run;            /* N rows in streams of T, of which `run` share their weights: draws (N / T) ceil(T / run) */
    stx_real eps;
    const stx_real *h, *b[2];       /* (N,C) */
    const stx_real *w;              /* (draws,3): floats in every precision, as are mean, rstd, gains, shifts, dw */
    const stx_real *gain[2], *shift[2];         /* (C) */
    stx_real *y;                    /* (N,C) */
    stx_real *mean[2], *rstd[2];    /* (N) */
    const stx_real *dy;             /* (N,C) */
    stx_real *dh, *db[2];           /* (N,C) */
    int    add_h, add[2];           /* +=, each */
    stx_real *dw, *dgain[2], *dshift[2];        /* (draws,3) (C) (C) */
    double *work;                   /* (N,3) on the device, backward: each row's dots */
} stx_par_mix_args;
STX_KERNEL(stx_par_mix_fwd, (stx_ctx *x, const stx_par_mix_args *a))
STX_KERNEL(stx_par_mix_bwd, (stx_ctx *x, const stx_par_mix_args *a))
/* What they compute, number by number and in double, in host memory: forward, and where dy is not NULL backward, which adds to every
   gradient (work, add_h and add are not read). For reading, and for tests. */
STX_DEF void stx_par_mix_plain(const stx_par_mix_args *a);

/* loss (1) from nll (1) and lat (1): see stx_par_total; kind STX_PAR_LATENCY_ADD .. _FBNET. Backward: dnll, dlat (1) +=, NULL: not wanted.
   In double, rounded once; lat at 1 and below: FBNET has loss 0 and no gradient. */
typedef struct stx_par_latency_args { int kind; double weight, target, power; } stx_par_latency_args;
STX_KERNEL(stx_par_latency_fwd, (stx_ctx *x, stx_real *loss, const stx_real *nll, const stx_real *lat, const stx_par_latency_args *a))
STX_KERNEL(stx_par_latency_bwd, (stx_ctx *x, stx_real *dnll, stx_real *dlat, const stx_real *dloss, const stx_real *nll, const stx_real *lat,
                                 const stx_par_latency_args *a))

#ifdef __cplusplus
}
#endif

/* Stop here if you only want the API. */
#endif /* SEQTX_PAR_H */

#if (defined(SEQTX_IMPLEMENTATION) || defined(SEQTX_PAR_IMPLEMENTATION)) && !defined(SEQTX_PAR_IMPLEMENTATION_DONE)
#define SEQTX_PAR_IMPLEMENTATION_DONE

#define STX_LOOPS
#include "seqtx.h"      /* once more, for the inner loops' macros */

#include <stdio.h>
#include <stdlib.h>
STX_STRICT_ON

// >>gate

static void stx__par_uniform(const stx_par_gate_args *a, size_t r, double *u) {
    uint32_t bits[4];
    int k;
    stx_philox(a->seed, a->stream, r, bits);
    for (k = 0; k < 3; k++) u[k] = a->u ? (double)a->u[r * a->ldu + (size_t)k] : ((double)(bits[k] >> 9) + 0.5) / 8388608;
}
/* q and p = q / sum q of the parameters; in lnq their logarithms */
static void stx__par_q(int kind, const stx_real *al, double *lnq, double *q, double *p) {
    double top = (double)al[0], sum = 0;
    int k;
    for (k = 1; k < 3; k++) if ((double)al[k] > top) top = (double)al[k];
    for (k = 0; k < 3; k++) {
        q[k] = kind == STX_PAR_PI ? (al[k] > 0 ? (double)al[k] : 0) + 1e-5 : exp((double)al[k] - top);
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
    double lnq[3], q[3], p[3], s[3] = {0, 0, 0}, all = 0, mean = 0, sum = 0, tau = a->noisy ? (double)a->tau[0] : 1;
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
            dw[k] = (a->dw ? (double)a->dw[3 * r + (size_t)k] : 0) + (a->latency == 2 ? dlat * (double)a->cost[k] / (double)a->R : 0);
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
        if (a->kind == STX_PAR_LOGITS) a->dal[k] += (stx_real)(s[k] - p[k] * all + p[k] * dp);
        else if (!(a->al[k] < 0)) a->dal[k] += (stx_real)(s[k] / q[k] + dp / sum);
    }
}

// >>mix

/* The weights of row n */
static size_t stx__par_draw(const stx_par_mix_args *a, size_t n) { return n / a->T * ((a->T + a->run - 1) / a->run) + n % a->T / a->run; }
/* The definition. z: what a branch's layer norm reads; with it or without, Y and what comes back through it. */
STX_DEF void stx_par_mix_plain(const stx_par_mix_args *a) {
    const size_t C = a->C;
    size_t n, c;
    int i;
    for (n = 0; n < a->N; n++) {
        const stx_real *h = a->h + n * C, *w = a->w + 3 * stx__par_draw(a, n), *dy = a->dy ? a->dy + n * C : NULL;
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
            for (c = 0; c < C; c++) v += ((double)h[c] + (double)b[c] - m) * ((double)h[c] + (double)b[c] - m) / (double)C;
            if (a->gain[i]) r = 1 / sqrt(v + (double)a->eps); else m = 0;
            if (a->gain[i] && !dy) { a->mean[i][n] = (stx_real)m; a->rstd[i][n] = (stx_real)r; }
            for (c = 0; c < C; c++) {
                double z = ((double)h[c] + (double)b[c] - m) * r, gain = a->gain[i] ? (double)a->gain[i][c] : 1;
                double y = z * gain + (a->gain[i] ? (double)a->shift[i][c] : 0), g;
                if (!dy) { a->y[n * C + c] += (stx_real)((double)w[i] * y); continue; }
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
        for (i = 0; dy && a->dw && i < 3; i++) a->dw[3 * stx__par_draw(a, n) + (size_t)i] += (stx_real)dw[i];
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
        a->rstd[i][n] = (stx_real)(1 / sqrt((double)(stx_fast_dot(fma, y, y, C) / (stx_real)C + eps)));
    }
    for (c0 = 0; c0 < C; c0 += STX__PAR_BLOCK) {        /* in arrays of the stack, which cannot be a's */
        const size_t k = STX_MIN(C - c0, (size_t)STX__PAR_BLOCK);
        stx_real o[STX__PAR_BLOCK] = {0}, t[STX__PAR_BLOCK];
        int any = 0;
        for (i = 0; i < 3; i++) {
            const stx_real wi = w[i];
            if (wi == 0) continue;
            if (i == 2) for (c = 0; c < k; c++) t[c] = h[c0 + c];
            else if (!a->gain[i]) for (c = 0; c < k; c++) t[c] = h[c0 + c] + a->b[i][n * C + c0 + c];
            else {
                const stx_real *b = a->b[i] + n * C + c0, *g = a->gain[i] + c0, *s = a->shift[i] + c0, m = a->mean[i][n], r = a->rstd[i][n];
                for (c = 0; c < k; c++) t[c] = STX_FMA(fma, (h[c0 + c] + b[c] - m) * r, g[c], s[c]);
            }
            if (any) for (c = 0; c < k; c++) o[c] = STX_FMA(fma, wi, t[c], o[c]);
            else for (c = 0; c < k; c++) o[c] = wi * t[c];
            any = 1;
        }
        memcpy(y + c0, o, k * sizeof *o);
    }
}
STX_EACH_ISA(stx__par_mix_row_any, (const stx_par_mix_args *a, size_t n), a, n)
static void stx__par_mix_part(const stx_share *s, const void *job) {
    size_t n;
    for (n = s->from; n < s->to; n++) STX_CALL(s->x, stx__par_mix_row_any, ((const stx_par_mix_args *)job, n));
}
STX_DEF void stx_par_mix_fwd(stx_ctx *x, const stx_par_mix_args *a) { stx_parallel(x, a->N, 14 * a->N * a->C, stx__par_mix_part, a); }

/* y = w0 Y0 + w1 Y1 + w2 h ;  Yi = xh_i gain_i + shift_i, so sum dy Yi = sum dy gain xh + sum dy shift, of which the first is also what
   the layer norm's way back needs */
STX_INNER void stx__par_mix_back_row_any(int fma, const stx_par_mix_args *a, size_t n) {
    const size_t C = a->C, at = n * C;
    const stx_real *h = a->h + at, *dy = a->dy + at, *w = a->w + 3 * stx__par_draw(a, n);
    stx_real k0[2] = {0, 0}, k1[2] = {0, 0};
    size_t c0, c, e;
    int i;
    for (i = 0; i < 2; i++) {
        const stx_real *b = a->b[i] + at, *g = a->gain[i], *s = a->shift[i], m = g ? a->mean[i][n] : 0, r = g ? a->rstd[i][n] : 1;
        stx_real q[16] = {0}, qx[16] = {0}, sh[16] = {0}, tx;
        if (!g) {       /* sum dy (h + b) */
            for (c = 0; c + 16 <= C; c += 16) for (e = 0; e < 16; e++) qx[e] = STX_FMA(fma, dy[c + e], h[c + e] + b[c + e], qx[e]);
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
                const stx_real *g = a->gain[i] + c0, m = a->mean[i][n], wr = wi * a->rstd[i][n], p0 = k0[i], p1 = k1[i];
                for (c = 0; c < k; c++) d[c] = wr * (STX_FMA(fma, dy[c0 + c], g[c], -p0) - (h[c0 + c] + b[c] - m) * p1);
            } else for (c = 0; c < k; c++) d[c] = wi * dy[c0 + c];
            for (c = 0; c < k; c++) dh[c] += d[c];
            if (!db) continue;
            if (a->add[i]) for (c = 0; c < k; c++) db[c] += d[c]; else memcpy(db, d, k * sizeof *d);
        }
        if (!a->dh) continue;
        if (a->add_h) for (c = 0; c < k; c++) a->dh[at + c0 + c] += dh[c]; else memcpy(a->dh + at + c0, dh, k * sizeof *dh);
    }
}
STX_EACH_ISA(stx__par_mix_back_row_any, (const stx_par_mix_args *a, size_t n), a, n)
static void stx__par_mix_back_part(const stx_share *s, const void *job) {
    size_t n;
    for (n = s->from; n < s->to; n++) STX_CALL(s->x, stx__par_mix_back_row_any, ((const stx_par_mix_args *)job, n));
}
/* dgain += sum_n w dy xh ; dshift += sum_n w dy: 64 channels or fewer, in blocks of 64 rows (less rounding than one long sum) */
STX_INNER void stx__par_mix_columns_any(int fma, const stx_par_mix_args *a, int i, size_t c0) {
    const size_t C = a->C, k = STX_MIN(C - c0, (size_t)STX__PAR_BLOCK);
    size_t n0, n, c;
    for (n0 = 0; n0 < a->N; n0 += 64) {
        stx_real sg[STX__PAR_BLOCK] = {0}, ss[STX__PAR_BLOCK] = {0};
        for (n = n0; n < STX_MIN(a->N, n0 + 64); n++) {
            const stx_real *h = a->h + n * C + c0, *b = a->b[i] + n * C + c0, *dy = a->dy + n * C + c0;
            const stx_real w = a->w[3 * stx__par_draw(a, n) + (size_t)i], m = a->mean[i][n], wr = w * a->rstd[i][n];
            for (c = 0; c < k; c++) {
                sg[c] = STX_FMA(fma, dy[c] * wr, h[c] + b[c] - m, sg[c]);
                ss[c] = STX_FMA(fma, dy[c], w, ss[c]);
            }
        }
        if (a->dgain[i]) for (c = 0; c < k; c++) a->dgain[i][c0 + c] += sg[c];
        if (a->dshift[i]) for (c = 0; c < k; c++) a->dshift[i][c0 + c] += ss[c];
    }
}
STX_EACH_ISA(stx__par_mix_columns_any, (const stx_par_mix_args *a, int i, size_t c0), a, i, c0)
static void stx__par_mix_columns_part(const stx_share *s, const void *job) {
    const stx_par_mix_args *a = (const stx_par_mix_args *)job;
    size_t k, blocks = (a->C + STX__PAR_BLOCK - 1) / STX__PAR_BLOCK;
    for (k = s->from; k < s->to; k++) STX_CALL(s->x, stx__par_mix_columns_any, (a, (int)(k / blocks), k % blocks * STX__PAR_BLOCK));
}
STX_DEF void stx_par_mix_bwd(stx_ctx *x, const stx_par_mix_args *a) {
    size_t n, blocks = (a->C + STX__PAR_BLOCK - 1) / STX__PAR_BLOCK;
    double sum[3] = {0, 0, 0};
    int i;
    stx_parallel(x, a->N, 24 * a->N * a->C, stx__par_mix_back_part, a);
    if (a->gain[0] && (a->dgain[0] || a->dshift[0] || a->dgain[1] || a->dshift[1]))
        stx_parallel(x, 2 * blocks, 10 * a->N * a->C, stx__par_mix_columns_part, a);
    for (n = 0; a->dw && n < a->N; n++) {
        for (i = 0; i < 3; i++) sum[i] += a->work[3 * n + (size_t)i];
        if (n + 1 < a->N && stx__par_draw(a, n + 1) == stx__par_draw(a, n)) continue;
        for (i = 0; i < 3; i++) { a->dw[3 * stx__par_draw(a, n) + (size_t)i] += (stx_real)sum[i]; sum[i] = 0; }
    }
}

// >>latency

STX_DEF void stx_par_latency_fwd(stx_ctx *x, stx_real *loss, const stx_real *nll, const stx_real *lat, const stx_par_latency_args *a) {
    double v = (double)lat[0], more = v / a->target - 1;
    (void)x;
    if (a->kind == STX_PAR_LATENCY_FBNET) v = (double)nll[0] * a->weight * (v > 1 ? pow(log(v), a->power) : v <= 1 ? 0 : v);
    else v = (double)nll[0] + a->weight * (a->kind == STX_PAR_LATENCY_ADD ? v : more < 0 ? 0 : more);
    *loss = (stx_real)v;
}
STX_DEF void stx_par_latency_bwd(stx_ctx *x, stx_real *dnll, stx_real *dlat, const stx_real *dloss, const stx_real *nll, const stx_real *lat,
                                 const stx_par_latency_args *a) {
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

STX_STRICT_OFF
#endif /* SEQTX_PAR_IMPLEMENTATION */
