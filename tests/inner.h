/* inner.h - what tests look at inside the library. tests/inner/NAME is NAME (a
   header's implementation, or seqtx_cuda.cu) with these functions after it: the
   Makefile compiles it once for each configuration, and the test programs, which have
   only declarations, link it. Include after the headers whose part is wanted. */
#ifndef STX_TEST_INNER_H
#define STX_TEST_INNER_H
#ifdef __cplusplus
extern "C" {
#endif

/* seqtx.h */

/* A kernel of the matrix product, with the instruction set of the loops that go beside
   it */
typedef struct inner_kernel {
    const char *name;
    int isa, bf16;
    int no_denormals; /* rounds by the processor, which takes denormals as zero */
    int emulated;     /* AMX in C (TEST_AMX_EMULATED): slow */
    /* of bf16: numbers to bfloat16, */
    void (*round)(uint16_t *to, const stx_real *from, size_t n);
    /* and two rows to pairs */
    void (*pair)(uint32_t *to, const stx_real *r0, const stx_real *r1, size_t n);
    const void *micro;
} inner_kernel;

enum { INNER_F32S = 3, INNER_BF16S = 5 }; /* at most */

/* Those of a precision that this processor can run, slowest first; list has room for
   all. Returns how many. In double: only for f32 */
extern size_t inner_kernels(int bf16, inner_kernel *list);
extern void inner_use(stx_ctx *x, const inner_kernel *k); /* from now on x computes with k */
/* of the kernel of x, whatever library makes its products */
extern const char *inner_name(const stx_ctx *x);
/* not-a-number in the scratch of its products */
extern void inner_poison(stx_ctx *x);
/* 0 the processor's least, and more */
extern int inner_isa(const stx_ctx *x);
extern void inner_set_isa(stx_ctx *x, int isa);
/* v in bfloat16, by the library's plain loops */
extern uint32_t inner_bf16(stx_real v);
/* dropout with probability p keeps what is below this, of 65536 */
extern uint32_t inner_keep(stx_real p);
extern size_t inner_attention_units(stx_ctx *x, const stx_attention_args *a, size_t threads,
                                    int back); /* into how many units it cuts
                                                                                                               the
                                                                                                               call
                                                                                                               */

/* CPU twins of private kernels; the CUDA twins are declared in seqtx.h */
extern void inner_shift2d(stx_ctx *x, stx_real *y, size_t ldy, size_t n, const stx_real *a,
                          size_t lda, size_t w, size_t rows);
extern void inner_loss_weights(stx_ctx *x, const stx__loss_weights_args *a);
extern void inner_cluster_sort(stx_ctx *x, const stx__cluster_sort_args *k);
extern void inner_cluster_log_probs(stx_ctx *x, const stx__cluster_log_probs_args *a);
extern void inner_metric_accumulate(stx_ctx *x, double *metric, const stx_real *a, double s,
                                    int accumulate);
#define inner_shift2d_cuda           stx__shift2d_cuda
#define inner_loss_weights_cuda      stx__loss_weights_cuda
#define inner_cluster_sort_cuda      stx__cluster_sort_cuda
#define inner_cluster_log_probs_cuda stx__cluster_log_probs_cuda
#define inner_metric_accumulate_cuda stx__metric_accumulate_cuda

/* signs of other work that its threads saw of late; 0: none */
extern uint32_t inner_busy(const stx_ctx *x);

#ifdef SEQTX_CUDA
/* seqtx_cuda.cu: how many kinds of product a context knows; of the next new one: 0 the
   heuristic's first algorithm, 1 the fastest, -1 our own kernel, -2 as 0 but bias and
   relu by a pass of their own */
extern size_t inner_plans(const stx_ctx *x);
extern void inner_tune(stx_ctx *x, int tune);
/* Sets the number of slices of K of later GEMMs that can be split ("Split K" in
   seqtx_cuda.cu; 0: chosen by sizes), and returns the number that sizes give */
extern void inner_pieces(stx_ctx *x, int pieces);
extern size_t inner_pieces_of(size_t M, size_t N, size_t K, int late);

/* The kernels of the fused attention in bfloat16, of heads of D channels, with u and
   vb (two) or without: name as in tests/cuda_regs.txt, threads of a block, bytes of
   dynamic shared memory, and how many more with the next tile. k: room for
   INNER_FUSED; their number */
enum { INNER_FUSED = 8 };

typedef struct inner_fused_kernel {
    char name[96];
    int threads;
    size_t shared, more;
} inner_fused_kernel;

extern int inner_fused(stx_ctx *x, size_t D, int two, inner_fused_kernel *k);

/* With NCCL: from now on this rank waits so many seconds for the others. */
extern void inner_group_timeout(stx_ctx *x, double seconds);
#endif

#ifdef SEQTX_ATTN_SPAN_H
/* Groups of heads of layer l for B streams of so many projected rows of its cache */
extern void inner_span_groups(const stx_span *m, size_t l, size_t B, size_t rows, int masked,
                              stx_head_groups *g);
#endif

#ifdef SEQTX_SRU_H
/* U of layer l of input h and memory M; before and pad are what is padded of them */
extern stx_tensor *inner_sru_transform(stx_sru *m, size_t l, stx_tensor *h, stx_tensor *M,
                                       const stx_ids *before, const stx_ids *pad, size_t B,
                                       size_t Tm, size_t T, size_t window);
#endif

#ifdef SEQTX_COMPRESSIVE_H
/* The ops: a gate of x, y, p0 .. p3; mean of squares; rows of the groups' taps; zeros
   at padding; keys and values for all heads */
extern stx_tensor *inner_comp_gate(stx_ctx *x, int kind, stx_tensor *const *in);
extern stx_tensor *inner_comp_distance(stx_ctx *x, stx_tensor *a, stx_tensor *t,
                                       const stx_ids *skip, double count, stx_tensor **ratio);
extern stx_tensor *inner_comp_folded(stx_ctx *x, stx_tensor *y, const stx_comp_groups *g);
extern stx_tensor *inner_comp_zero(stx_ctx *x, stx_tensor *a, const stx_ids *pad);
extern stx_tensor *inner_comp_all_heads(stx_ctx *x, const stx_comp_desc *d, stx_tensor *kv);
#endif

#ifdef SEQTX_PAR_H
/* The ops: a mixture of h, b0, b1, w, and gains and shifts or NULLs; a gate; a
   penalty; rows of w elements as rows of ld */
extern stx_tensor *inner_par_mix(stx_ctx *x, stx_tensor *const *in, size_t T, size_t run,
                                 double eps);
extern stx_tensor *inner_par_gate(stx_ctx *x, stx_tensor *al, const stx_par_gate_args *how,
                                  stx_tensor **lat);
extern stx_tensor *inner_par_latency(stx_ctx *x, stx_tensor *nll, stx_tensor *lat,
                                     const stx_par_latency_args *how);
extern stx_tensor *inner_par_widen(stx_ctx *x, stx_tensor *a, stx_tensor *b, size_t w, size_t ld,
                                   double fill, int full);
#endif

#ifdef __cplusplus
}
#endif
#endif
