#pragma once
#include "config.h"
#include "context.h"
#include "train.h"


// >>api: the CUDA device

/* Kinds of device memory, which determine how the elements at an address are stored. */
enum {
    STX_MEM_BYTES = 0,          /* floats or other data */
    STX_MEM_ACTIVATIONS,        /* bfloat16 in STX_PREC_BF16, otherwise float */
    STX_MEM_PARAMS              /* float; in STX_PREC_BF16 also a bfloat16 copy, which every
                                   kernel that writes a parameter updates */
};

#ifdef SEQTX_CUDA
/* The interface between this file and CUDA, implemented in seqtx_cuda.cu. All work of a
   context is enqueued in order on one CUDA stream. Errors are set in the context
   (STX_ERR_DEVICE, STX_ERR_MEMORY). */
typedef struct stx_gpu stx_gpu;

/* stx_cuda_open returns NULL and sets an error if there is no device that can run this
   build. stx_cuda_close waits for all work and frees all memory. */
extern stx_gpu *stx_cuda_open(stx_ctx *x);
extern void     stx_cuda_close(stx_gpu *g);

/* Device memory.
       stx_cuda_alloc      allocates memory of kind STX_MEM_.., aligned to 256 bytes.
                           Returns NULL without an error if memory runs out
       stx_cuda_free       frees p once the work that uses it is complete
       stx_cuda_bytes      returns the bytes in use, including copies of parameters,
                           scratch memory and the cublasLt workspace
       stx_cuda_is_bf16    returns 1 if elements at p are stored as bfloat16 */
extern void  *stx_cuda_alloc(stx_ctx *x, size_t bytes, int kind);
extern void   stx_cuda_free(stx_ctx *x, void *p);
extern size_t stx_cuda_bytes(const stx_ctx *x);
extern int    stx_cuda_is_bf16(const stx_ctx *x, const void *p);

/* Copies. After an upload returns, the host memory can be reused; a download waits for
   the device. The functions for activations convert between n floats on the host and the
   device format. stx_cuda_copy copies from device to device; the ranges must not
   overlap. */
extern void stx_cuda_upload(stx_ctx *x, void *to, const void *host, size_t bytes);
extern void stx_cuda_download(stx_ctx *x, void *host, const void *from, size_t bytes);
extern void stx_cuda_upload_activations(stx_ctx *x, stx_real *to, const stx_real *host, size_t n);
extern void stx_cuda_download_activations(stx_ctx *x, stx_real *host, const stx_real *from,
                                          size_t n);
extern void stx_cuda_zero(stx_ctx *x, void *p, size_t bytes);
extern void stx_cuda_copy(stx_ctx *x, void *to, const void *from, size_t bytes);
extern void stx_cuda_sync(stx_ctx *x);      /* waits for all work */

/* Between a call with by = 1 and one with by = -1, additions to parameter gradients can
   be deferred. Pairs of calls can be nested. The end of the outermost pair completes all
   deferred additions, as does a call with by = 0. */
extern void stx_cuda_defer_sums(stx_ctx *x, int by);

extern void *stx_cuda_stream(const stx_ctx *x);         /* the cudaStream_t */
extern const char *stx_cuda_name(const stx_ctx *x);     /* such as "NVIDIA H200, sm_90" */

/* Enqueue a write of v to *p and return without waiting. */
extern void stx_cuda_set_f64(stx_ctx *x, double *p, double v);
extern void stx_cuda_set_f32(stx_ctx *x, float *p, float v);

/* Adds `shift` to the stream of every random number, so that replays draw different
   numbers. */
extern void stx_cuda_rng_shift(stx_ctx *x, uint64_t shift);

/* stx_cuda_gather concatenates the parameter elements of all chunks as floats at `to`.
   stx_cuda_report enqueues a copy of a report to the host; stx_cuda_report_wait waits
   for the last copy and returns its host address. */
extern void stx_cuda_gather(stx_ctx *x, stx_real *to, const stx_optim_chunk *chunk, size_t count);
extern void stx_cuda_report(stx_ctx *x, const void *report, size_t bytes);
extern const void *stx_cuda_report_wait(stx_ctx *x);

/* Work enqueued between capture_begin and capture_end is recorded but does not run.
   capture_end returns NULL if the step cannot be replayed, and capture_error returns why
   the last begin or end failed, or "". graph_launch runs the graph. */
typedef struct stx_graph stx_graph;
extern int    stx_cuda_capture_begin(stx_ctx *x);
extern stx_graph *stx_cuda_capture_end(stx_ctx *x);
extern void   stx_cuda_graph_launch(stx_ctx *x, stx_graph *graph);
extern void   stx_cuda_graph_free(stx_ctx *x, stx_graph *graph);
extern int    stx_cuda_capturing(const stx_ctx *x);
extern const char *stx_cuda_capture_error(const stx_ctx *x);

#ifdef SEQTX_NCCL
/* A group of GPUs, one per rank. id identifies the group: rank 0 creates its STX_NCCL_ID
   bytes, and all ranks need them. With by_address = 1, ranks find the group at the
   address in NCCL_COMM_ID or, if that is not set, at MASTER_ADDR (in SLURM, the first
   node of the step) and port MASTER_PORT + 1. group_id and group_join return 1, or set
   an error and return 0. stx_cuda_close also leaves the group. */
enum { STX_NCCL_ID = 128 };

extern int  stx_cuda_group_id(stx_ctx *x, void *id, int by_address);
extern int  stx_cuda_group_join(stx_ctx *x, const void *id, int rank, int ranks);
extern void stx_cuda_group_leave(stx_ctx *x);
extern void stx_cuda_group_abort(stx_ctx *x);

/* Exchange n elements of device memory, after the work enqueued so far. `mean` and
   `spread` run on a separate stream, and later work waits for them only after a call to
   group_wait. Later work always waits for `sum`. Exchanges can be captured.
       mean      p (floats) = mean over the ranks, in all ranks; if owner >= 0, only in
                 that rank, and p is undefined in the others
       spread    p (floats) of the owner is copied to all ranks; bfloat16 copies are not
                 updated
       sum       p (doubles) = sum over the ranks, in all ranks */
extern void stx_cuda_group_mean(stx_ctx *x, stx_real *p, size_t n, int owner);
extern void stx_cuda_group_spread(stx_ctx *x, stx_real *p, size_t n, int owner);
extern void stx_cuda_group_wait(stx_ctx *x);
extern void stx_cuda_group_sum(stx_ctx *x, double *p, size_t n);

/* Exchange host memory, like stx_group_sum (most = 0), stx_group_max (most = 1),
   stx_group_broadcast and stx_group_send_bytes. They wait until the exchange is
   complete; if a rank does not respond in time, the others set an error. */
extern int  stx_cuda_group_reduce(stx_ctx *x, double *v, size_t n, int most);
extern int  stx_cuda_group_broadcast(stx_ctx *x, void *bytes, size_t n, int from);
extern int  stx_cuda_group_send(stx_ctx *x, void *bytes, size_t n, int from, int to);
#endif

/* Selects the implementation of attention, for tests. Must not be called between a
   forward pass and its backward pass.
       0, 2    fused kernels where possible (the default)
       1       GEMMs, and between them a kernel that processes rows of scores
       3       like 1, split into the smallest parts, as if memory were scarce
       4       like 0, with tiles of 128 queries for all sizes (bf16, heads of at most 64
               channels)
       5, 6    like 0, with no memory (5), or half of the required memory (6), for the
               gradients of the position scores (bf16, relative positions) */
extern void stx_cuda_attention(stx_ctx *x, int version);
#endif

/* Returns the stx_gpu of a context on a GPU, or NULL on a CPU. */
STX_DEF void *stx_ctx_gpu(const stx_ctx *x);
