/* inner.h - gives tests access to private parts of the library. tests/inner/NAME
   contains NAME (the implementation of a header, or seqtx_cuda.cu) and the functions
   that are declared here. The Makefile compiles it once per configuration and links it
   to the test programs, which see only declarations. Include this header after the
   headers of the required families. */
#ifndef STX_TEST_INNER_H
#define STX_TEST_INNER_H
#ifdef __cplusplus
extern "C" {
#endif

/* seqtx.h */

/* A GEMM micro-kernel, with the instruction set of the loops that run with it. */
typedef struct inner_kernel {
    const char *name;
    int isa, bf16;
    int no_denormals; /* if set, the kernel rounds in hardware, which reads denormals as zero */
    int emulated;     /* if set, this is AMX emulated in C (TEST_AMX_EMULATED), which is slow */
    /* bf16 only. `round` rounds n values; `pair` rounds two rows and interleaves their
       values */
    void (*round)(uint16_t *to, const stx_real *from, size_t n);
    void (*pair)(uint32_t *to, const stx_real *r0, const stx_real *r1, size_t n);
    const void *micro;
} inner_kernel;

enum { INNER_F32S = 3, INNER_BF16S = 5 }; /* maximum numbers of kernels per precision */

/* Lists the kernels of a precision that this processor can run, slowest first, and
   returns their number. The list has a capacity of INNER_F32S or INNER_BF16S. A double
   build has no bf16 kernels. */
extern size_t inner_kernels(int bf16, inner_kernel *list);
/* Makes x compute GEMMs with kernel k. */
extern void inner_use(stx_ctx *x, const inner_kernel *k);
/* Returns the name of the library's kernel for x, even if another library computes its
   GEMMs. */
extern const char *inner_name(const stx_ctx *x);
/* Fills the GEMM scratch memory with NaN. */
extern void inner_poison(stx_ctx *x);
/* Returns the instruction set that the loops use. 0 is the baseline of the
   architecture. */
extern int inner_isa(const stx_ctx *x);
extern void inner_set_isa(stx_ctx *x, int isa);
/* Makes x use an instruction set in its loops and GEMMs, in f32. */
extern void inner_use_isa(stx_ctx *x, int isa);
/* Returns v in bfloat16, rounded by the library's scalar loop. */
extern uint32_t inner_bf16(stx_real v);
/* Returns the threshold of dropout with probability p: an element is kept if its 16
   random bits are below it. */
extern uint32_t inner_keep(stx_real p);
/* Returns the number of work units of an attention call or, if `back` is set, of its
   backward pass. */
extern size_t inner_attention_units(stx_ctx *x, const stx_attention_args *a, size_t threads,
                                    int back);

/* The CPU versions of private kernels. The CUDA versions are declared in seqtx.h. */
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

/* Returns pool.busy (see seqtx.h), which increases with each sign that the machine is
   busy with other work. 0 means that there were no recent signs. */
extern uint32_t inner_busy(const stx_ctx *x);

#ifdef SEQTX_CUDA
/* seqtx_cuda.cu */

/* Returns the number of GEMM plans of a context. */
extern size_t inner_plans(const stx_ctx *x);
/* Sets the algorithm for later plans: 0 is the heuristic's first choice, 1 is the
   fastest algorithm, -1 is this library's kernel, and -2 is the heuristic's first
   choice with bias and ReLU in a separate pass. */
extern void inner_tune(stx_ctx *x, int tune);
/* Sets the number of K slices for later GEMMs that can be split ("Split K" in
   seqtx_cuda.cu). If pieces is 0, the number depends on the size of the GEMM. */
extern void inner_pieces(stx_ctx *x, int pieces);
/* Returns the number of K slices used for a GEMM of this size. */
extern size_t inner_pieces_of(size_t M, size_t N, size_t K, int late);

/* A kernel of fused bf16 attention: its name as in tests/cuda/cuda_regs.txt, threads per
   block, bytes of dynamic shared memory, and the bytes that prefetching the next
   tile adds. */
enum { INNER_FUSED = 8 };

typedef struct inner_fused_kernel {
    char name[96];
    int threads;
    size_t shared, more;
} inner_fused_kernel;

/* Lists the kernels for heads of D channels, with both biases if `two` is set,
   otherwise without biases. Returns the number of kernels. The capacity of k must be
   INNER_FUSED. */
extern int inner_fused(stx_ctx *x, size_t D, int two, inner_fused_kernel *k);

/* Sets the number of seconds for which this rank waits for the others. Requires NCCL. */
extern void inner_group_timeout(stx_ctx *x, double seconds);
#endif

#ifdef SEQTX_ATTN_SPAN_H
/* *g receives the head groups of layer l for B streams. The groups' cache has `rows`
   projected rows. */
extern void inner_span_groups(const stx_span *m, size_t l, size_t B, size_t rows, int masked,
                              stx_head_groups *g);
#endif

#ifdef SEQTX_SRU_H
/* Returns U, the result of layer l's transform, for input h and memory M. `before`: the
   padding of the memory; `pad`: the padding of the input. */
extern stx_tensor *inner_sru_transform(stx_sru *m, size_t l, stx_tensor *h, stx_tensor *M,
                                       const stx_ids *before, const stx_ids *pad, size_t B,
                                       size_t Tm, size_t T, size_t window);
#endif

#ifdef SEQTX_COMPRESSIVE_H
/* The private ops of the family, in this order: a gate with the inputs `in` = {x, y, p0
   .. p3}; the mean squared difference; the sum of the overlapping taps of groups; zeros
   at padding; copies of keys and values for all heads of their group. */
extern stx_tensor *inner_comp_gate(stx_ctx *x, int kind, stx_tensor *const *in);
extern stx_tensor *inner_comp_distance(stx_ctx *x, stx_tensor *a, stx_tensor *t,
                                       const stx_ids *skip, double count, stx_tensor **rel_error);
extern stx_tensor *inner_comp_folded(stx_ctx *x, stx_tensor *y, const stx_comp_groups *g);
extern stx_tensor *inner_comp_zero(stx_ctx *x, stx_tensor *a, const stx_ids *pad);
extern stx_tensor *inner_comp_all_heads(stx_ctx *x, const stx_comp_desc *d, stx_tensor *kv);
#endif

#ifdef SEQTX_PAR_H
/* The private ops of the family, in this order: the mixture of `in` = {h, b0, b1, w,
   then gains and shifts or NULLs}; a gate; the latency penalty; rows of w elements
   widened to ld. */
extern stx_tensor *inner_par_mix(stx_ctx *x, stx_tensor *const *in, size_t period,
                                 size_t rows_per_draw, double eps);
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
