/* cuda_host.h - settings and counters of the host implementation of CUDA, for tests in C
   and C++. See README.md. */
#ifndef CUDA_HOST_H
#define CUDA_HOST_H
#include <stddef.h>
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif

/* The order of a block's threads between two synchronisations, and of a grid's blocks.
   With ASCENDING and DESCENDING, each warp runs until it waits at a barrier of the
   block. INTERLEAVED runs lane 0 of every warp, then lane 1 and so on, and switches to
   another warp at each collective. RANDOM chooses a thread at every switch. */
enum {
    CUDA_HOST_ASCENDING,
    CUDA_HOST_DESCENDING,
    CUDA_HOST_RANDOM,
    CUDA_HOST_INTERLEAVED,
    CUDA_HOST_ORDERS
};

void cuda_host_order(int thread_order, int block_order, uint64_t seed);

/* The byte with which new device memory, shared memory at the start of a block, and
   cp.async destinations before the wait are filled: by default 0xFF, which is NaN in
   every float type. CUDA_HOST_FILL_RANDOM fills them with random bytes. */
enum { CUDA_HOST_FILL_NAN = 0xFF, CUDA_HOST_FILL_RANDOM = 0x100 };

void cuda_host_fill(int pattern);

/* The n-th cudaMalloc from now on (1: the next one) returns cudaErrorMemoryAllocation.
   With 0, none fails. */
void cuda_host_fail_alloc(long n);
/* The n-th kernel from now on fails with cudaErrorLaunchFailure, a sticky error. With
   0, none fails. */
void cuda_host_fail_launch(long n);

/* The n-th call of a kind from now on fails. The kinds below fail with
   cudaErrorStreamCaptureUnsupported, cudaErrorStreamCaptureInvalidated and
   cudaErrorMemoryAllocation, in this order. With 0, none fails. */
enum {
    CUDA_HOST_BEGIN_CAPTURE,
    CUDA_HOST_END_CAPTURE,
    CUDA_HOST_INSTANTIATE,
    CUDA_HOST_GRAPH_CALLS
};

void cuda_host_fail_graph(int call, long n);
/* Clears the sticky error, the last error and the counters above. */
void cuda_host_reset_errors(void);

/* The number of identical devices, by default 1, at most 16. With 0, every call returns
   cudaErrorNoDevice. */
void cuda_host_devices(int n);
void cuda_host_arch(int major, int minor); /* default 9.0 */
/* The number of multiprocessors that the device reports, by default 4. Some kernels
   derive their grid from it. */
void cuda_host_sms(int n);
/* The number of registers per thread of every kernel, by default 255, because the host
   compiler cannot determine it. It affects only the occupancy. */
void cuda_host_registers(int n);
/* The size of device memory, by default 8 GiB, at most 64 GiB. */
void cuda_host_memory(size_t bytes);
/* Whether kernels accept page-locked host pointers as arguments, as in CUDA. Default
   1. */
void cuda_host_allow_pinned(int yes);
/* Whether a host access to device memory prints a message and ends the process with
   _exit(99). Default 1. */
void cuda_host_trap(int yes);
/* The stack size of each thread, by default 65536. Must be set before the first
   launch. */
void cuda_host_stack(size_t bytes);

/* Returns the number of violations so far. The first 40 are printed to stderr. */
long cuda_host_reports(void);
void cuda_host_clear_reports(void);
const char *cuda_host_last_report(void); /* returns "" if there has been no report */
/* With 1, reports are counted but not printed, for tests that provoke them. */
void cuda_host_quiet(int yes);
/* Checks the canaries around device memory now, as synchronisations and cudaFree do. */
void cuda_host_check(void);

long cuda_host_launches(void); /* number of kernels that ran, including those of graphs */
long cuda_host_mmas(void);     /* number of mma instructions, one per warp */
/* Returns the total dynamic shared memory of all kernels that ran, in bytes. */
size_t cuda_host_shared_requested(void);
long cuda_host_allocs(void);   /* number of successful calls of cudaMalloc */
/* Returns the number of times that the host waited: stream, device and event
   synchronisations, blocking copies, and cudaMemset. */
long cuda_host_syncs(void);
long cuda_host_graph_launches(void);
/* The numbers of cublasLtMatmul calls: all calls (a captured call counts once, when it
   is captured), calls with a batch, and calls in which rows of an operand begin or end
   at addresses that are not multiples of 16 bytes. */
long cuda_host_matmuls(void);
long cuda_host_batches(void);
long cuda_host_unaligned(void);

/* Makes cuBLASLt refuse matmuls. For batches, either the heuristic finds no algorithm
   (PLANS), or it finds one and the call fails (CALLS). ALL_PLANS and ALL_CALLS apply
   the same refusals to all matmuls. With EPILOGUES, calls with an epilogue fail. */
enum {
    CUDA_HOST_REFUSE_NOTHING,
    CUDA_HOST_REFUSE_PLANS,
    CUDA_HOST_REFUSE_CALLS,
    CUDA_HOST_REFUSE_ALL_PLANS,
    CUDA_HOST_REFUSE_ALL_CALLS,
    CUDA_HOST_REFUSE_EPILOGUES
};

void cuda_host_refuse(int what);
/* Sets the cublasStatus_t of a refusal. 0 selects the default,
   CUBLAS_STATUS_NOT_SUPPORTED. */
void cuda_host_refuse_with(int status);
/* The number of nodes of the last instantiated graph, and a description of node i:
   "kernel, grid, .." as in its launch, "a matmul", "a memset", "a copy" or "a host
   function"; "" for an exchange. */
long cuda_host_graph_nodes(void);
const char *cuda_host_graph_node(long i);
size_t cuda_host_bytes_in_use(void);    /* bytes of device memory */
size_t cuda_host_pinned_in_use(void);   /* bytes from cudaMallocHost and cudaHostAlloc */
int cuda_host_is_device(const void *p); /* 1: p is in the range of device addresses */

/* Makes the next query of a communicator's state return this ncclResult_t. 0 has no
   effect. */
void cuda_host_nccl_fail(int state);
/* Until the setting is changed, each exchange on a capturing stream fails with the
   ncclResult_t `state`. A `state` of 0 has no effect. If `later` is 0, the call returns
   `state` and has no other effect. If `later` is 1, the call succeeds, but then the
   capture is invalid, and the communicator remains in this state until it is
   destroyed. */
void cuda_host_nccl_fail_captured(int state, int later);
/* Returns the number of finished NCCL exchanges, including those of graphs. */
long cuda_host_exchanges(void);
long cuda_host_comms(void); /* number of live communicators */

#ifdef __cplusplus
}
#endif
#endif
