/* cuda_host.h - what tests turn and read in the CUDA-on-CPU shim. See README.md. C and
   C++. */
#ifndef CUDA_HOST_H
#define CUDA_HOST_H
#include <stddef.h>
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif

/* Order in which the threads of a block run between two synchronisations, and the
   blocks of a grid. ASCENDING and DESCENDING let each warp run ahead until the barrier
   of the block stops it; INTERLEAVED takes lane 0 of every warp, then lane 1, and
   warps take turns at each collective; RANDOM draws again at every switch. */
enum {
    CUDA_HOST_ASCENDING,
    CUDA_HOST_DESCENDING,
    CUDA_HOST_RANDOM,
    CUDA_HOST_INTERLEAVED,
    CUDA_HOST_ORDERS
};

void cuda_host_order(int thread_order, int block_order, uint64_t seed);

/* What fresh device memory, shared memory at the start of a block and cp.async
   destinations before their wait hold: a byte (0xFF: NaN in every float type, the
   default), or CUDA_HOST_FILL_RANDOM. */
enum { CUDA_HOST_FILL_NAN = 0xFF, CUDA_HOST_FILL_RANDOM = 0x100 };

void cuda_host_fill(int pattern);

/* the n-th cudaMalloc from now (1: the next) returns cudaErrorMemoryAllocation; 0:
   none */
void cuda_host_fail_alloc(long n);
/* the n-th kernel that runs from now ends in cudaErrorLaunchFailure, which sticks; 0:
   none */
void cuda_host_fail_launch(long n);

/* the n-th such call from now fails, with cudaErrorStreamCaptureUnsupported,
   .._Invalidated or cudaErrorMemoryAllocation; 0: none */
enum {
    CUDA_HOST_BEGIN_CAPTURE,
    CUDA_HOST_END_CAPTURE,
    CUDA_HOST_INSTANTIATE,
    CUDA_HOST_GRAPH_CALLS
};

void cuda_host_fail_graph(int call, long n);
/* forgets the sticky error, the last error and the counts above */
void cuda_host_reset_errors(void);

/* 0: every call returns cudaErrorNoDevice; default 1, at most 16, all alike */
void cuda_host_devices(int n);
void cuda_host_arch(int major, int minor); /* default 9.0 */
/* multiprocessors, default 4: what a kernel makes of them is its own affair */
void cuda_host_sms(int n);
/* of a thread of every kernel, for the occupancy alone, default 255: the host compiler
   cannot tell */
void cuda_host_registers(int n);
void cuda_host_memory(size_t bytes); /* of the device; default 8 GiB, at most 64 GiB */
/* may kernels get pointers from cudaMallocHost (CUDA allows it)? default 1 */
void cuda_host_allow_pinned(int yes);
/* on a host access to device memory print what was hit and _exit(99); default 1 */
void cuda_host_trap(int yes);
/* stack of each thread, default 65536; only before the first launch */
void cuda_host_stack(size_t bytes);

/* violations so far; each is printed to stderr (the first 40 of them) */
long cuda_host_reports(void);
void cuda_host_clear_reports(void);
const char *cuda_host_last_report(void); /* its text, "" if none */
/* 1: reports are counted, not printed: for tests that provoke them */
void cuda_host_quiet(int yes);
/* verifies the canaries around device memory now (synchronisations and cudaFree do
   too) */
void cuda_host_check(void);

long cuda_host_launches(void); /* kernels that ran, those of graphs included */
long cuda_host_products(void); /* mma instructions of warps */
/* bytes of dynamic shared memory, of all kernels that ran together */
size_t cuda_host_shared_asked(void);
long cuda_host_allocs(void); /* successful cudaMalloc */
/* host waits: stream, device and event synchronisation, blocking copies and cudaMemset */
long cuda_host_syncs(void);
long cuda_host_graph_launches(void);
/* cublasLtMatmul: calls (of a capture once, when it is captured), those of a batch,
   and those of which an operand's rows begin or end elsewhere than on multiples of 16
   bytes */
long cuda_host_matmuls(void);
long cuda_host_batches(void);
long cuda_host_unaligned(void);

/* cuBLASLt as it may be. It has no algorithm for batches (PLANS), or has one and
   refuses the call (CALLS); the same for all products (ALL_PLANS, ALL_CALLS); it
   refuses calls with an epilogue. */
enum {
    CUDA_HOST_REFUSE_NOTHING,
    CUDA_HOST_REFUSE_PLANS,
    CUDA_HOST_REFUSE_CALLS,
    CUDA_HOST_REFUSE_ALL_PLANS,
    CUDA_HOST_REFUSE_ALL_CALLS,
    CUDA_HOST_REFUSE_EPILOGUES
};

void cuda_host_refuse(int what);
/* The cublasStatus_t that a refusal has; 0: CUBLAS_STATUS_NOT_SUPPORTED, as at the
   beginning */
void cuda_host_refuse_with(int status);
/* The graph that was made last: how many nodes it has, products and copies included,
   and what node i is: "kernel, grid, .." as its launch has it, "a product", "a
   memset", "a copy"; "" of an exchange */
long cuda_host_graph_nodes(void);
const char *cuda_host_graph_node(long i);
size_t cuda_host_bytes_in_use(void);    /* device memory */
size_t cuda_host_pinned_in_use(void);   /* cudaMallocHost, cudaHostAlloc */
int cuda_host_is_device(const void *p); /* does p lie in the device's address range? */

/* a ncclResult_t: what the next look at a communicator's state finds; 0: nothing */
void cuda_host_nccl_fail(int state);
/* The same for each exchange on a stream that captures, until it is told otherwise.
   ends 0: the call returns state and nothing else happens. 1: the call goes on; later
   the capture is invalid, and the communicator has state until it ends. */
void cuda_host_nccl_fail_captured(int state, int ends);
/* NCCL's exchanges that are done, those of graphs included */
long cuda_host_exchanges(void);
long cuda_host_comms(void); /* communicators that there are */

#ifdef __cplusplus
}
#endif
#endif
