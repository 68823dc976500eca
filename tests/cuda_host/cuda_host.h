/* cuda_host.h - settings and counters of the host implementation of CUDA, for tests in C
   and C++. See README.md. */
#ifndef CUDA_HOST_H
#define CUDA_HOST_H
#include <stddef.h>
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif

/* The order in which the threads of a block run between two synchronisations, and that
   of the blocks of a grid. With ASCENDING and DESCENDING each warp runs until it waits at
   a barrier of the block. INTERLEAVED runs lane 0 of every warp, then lane 1 and so on,
   and alternates between warps at each collective. RANDOM chooses a thread at every
   switch. */
enum {
    CUDA_HOST_ASCENDING,
    CUDA_HOST_DESCENDING,
    CUDA_HOST_RANDOM,
    CUDA_HOST_INTERLEAVED,
    CUDA_HOST_ORDERS
};

void cuda_host_order(int thread_order, int block_order, uint64_t seed);

/* The content of new device memory, of shared memory at the start of a block and of
   cp.async destinations before the wait: a byte (default 0xFF, which is NaN in every
   float type) or CUDA_HOST_FILL_RANDOM. */
enum { CUDA_HOST_FILL_NAN = 0xFF, CUDA_HOST_FILL_RANDOM = 0x100 };

void cuda_host_fill(int pattern);

/* The n-th cudaMalloc from now (1: the next) returns cudaErrorMemoryAllocation; 0: none
   does. */
void cuda_host_fail_alloc(long n);
/* The n-th kernel that runs from now fails with cudaErrorLaunchFailure, a sticky error;
   0: none does. */
void cuda_host_fail_launch(long n);

/* The n-th such call from now fails: with cudaErrorStreamCaptureUnsupported,
   cudaErrorStreamCaptureInvalidated and cudaErrorMemoryAllocation, in this order; 0: none
   does. */
enum {
    CUDA_HOST_BEGIN_CAPTURE,
    CUDA_HOST_END_CAPTURE,
    CUDA_HOST_INSTANTIATE,
    CUDA_HOST_GRAPH_CALLS
};

void cuda_host_fail_graph(int call, long n);
/* Clears the sticky error, the last error and the counters above. */
void cuda_host_reset_errors(void);

/* Number of identical devices, default 1, at most 16. 0: every call returns
   cudaErrorNoDevice. */
void cuda_host_devices(int n);
void cuda_host_arch(int major, int minor); /* default 9.0 */
/* Multiprocessors, default 4. Only reported, for kernels that choose their grid by it. */
void cuda_host_sms(int n);
/* Registers per thread of every kernel, default 255. Used only for the occupancy: the
   host compiler does not know the number. */
void cuda_host_registers(int n);
/* Size of device memory; default 8 GiB, at most 64 GiB */
void cuda_host_memory(size_t bytes);
/* Are page-locked host pointers legal arguments of kernels, as in CUDA? default 1 */
void cuda_host_allow_pinned(int yes);
/* If the host accesses device memory, print where and call _exit(99); default 1 */
void cuda_host_trap(int yes);
/* Stack size of each thread, default 65536; only before the first launch */
void cuda_host_stack(size_t bytes);

/* Number of violations so far. The first 40 are printed to stderr. */
long cuda_host_reports(void);
void cuda_host_clear_reports(void);
const char *cuda_host_last_report(void); /* its text, "" if there is none */
/* 1: reports are counted, but not printed; for tests that provoke them */
void cuda_host_quiet(int yes);
/* Checks the canaries around device memory now. Synchronisations and cudaFree also do. */
void cuda_host_check(void);

long cuda_host_launches(void); /* kernels that ran, including those of graphs */
long cuda_host_mmas(void);     /* mma instructions of warps */
/* Total bytes of dynamic shared memory of all kernels that ran */
size_t cuda_host_shared_requested(void);
long cuda_host_allocs(void);   /* successful calls of cudaMalloc */
/* Waits of the host: stream, device and event synchronisation, blocking copies, and
   cudaMemset */
long cuda_host_syncs(void);
long cuda_host_graph_launches(void);
/* Calls of cublasLtMatmul: all (a captured call counts once, when it is captured), those
   with a batch, and those in which rows of an operand begin or end at addresses that are
   not multiples of 16 bytes */
long cuda_host_matmuls(void);
long cuda_host_batches(void);
long cuda_host_unaligned(void);

/* Makes cuBLASLt refuse matmuls: the heuristic finds no algorithm for batches (PLANS), or
   finds one and the call fails (CALLS); the same for all matmuls (ALL_PLANS, ALL_CALLS);
   calls with an epilogue fail (EPILOGUES). */
enum {
    CUDA_HOST_REFUSE_NOTHING,
    CUDA_HOST_REFUSE_PLANS,
    CUDA_HOST_REFUSE_CALLS,
    CUDA_HOST_REFUSE_ALL_PLANS,
    CUDA_HOST_REFUSE_ALL_CALLS,
    CUDA_HOST_REFUSE_EPILOGUES
};

void cuda_host_refuse(int what);
/* The cublasStatus_t of a refusal; 0: the default, CUBLAS_STATUS_NOT_SUPPORTED */
void cuda_host_refuse_with(int status);
/* The graph that was instantiated last: the number of its nodes, and the text of node i:
   "kernel, grid, .." as in its launch, "a matmul", "a memset", "a copy" or "a host
   function"; "" for an exchange */
long cuda_host_graph_nodes(void);
const char *cuda_host_graph_node(long i);
size_t cuda_host_bytes_in_use(void);    /* device memory */
size_t cuda_host_pinned_in_use(void);   /* cudaMallocHost, cudaHostAlloc */
int cuda_host_is_device(const void *p); /* is p in the address range of the device? */

/* The next query of a communicator's state finds this ncclResult_t; 0: no effect. */
void cuda_host_nccl_fail(int state);
/* Each exchange on a capturing stream fails with this ncclResult_t, until the setting is
   changed; 0: no effect. later 0: the call returns state and has no other effect. later
   1: the call succeeds; afterwards the capture is invalid, and the communicator is in
   this state until it is destroyed. */
void cuda_host_nccl_fail_captured(int state, int later);
/* Finished exchanges of NCCL, including those of graphs */
long cuda_host_exchanges(void);
long cuda_host_comms(void); /* existing communicators */

#ifdef __cplusplus
}
#endif
#endif
