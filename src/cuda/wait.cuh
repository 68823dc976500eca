#pragma once
#include "common.cuh"


// >>waiting

/* Returns 1 if e is not an error. Otherwise sets the context's error and returns 0. An
   error inside a running kernel is reported by the next call that waits. */
static int stx__cuda_ok(stx_ctx *x, stx_gpu *g, cudaError_t e, const char *what) {
    const int named = g && g->name[0];
    if (e == cudaSuccess || stx__capture_lost(g)) return 1;
    (void)cudaGetLastError(); /* clears the error, so that the next launch does not report it */
    stx_fail(x, e == cudaErrorMemoryAllocation ? STX_ERR_MEMORY : STX_ERR_DEVICE,
             "%s: CUDA error \"%s\" (%s)%s%s", what, cudaGetErrorString(e), cudaGetErrorName(e),
             named ? " on " : "", named ? g->name : "");
    return 0;
}

struct stx_graph {
    cudaGraphExec_t exec;   /* NULL once the group in which it was captured has ended */
    stx_graph *next;
};

#ifdef SEQTX_NCCL
  #if NCCL_VERSION_CODE < NCCL_VERSION(2, 14, 0)
    #error "SEQTX_NCCL requires NCCL 2.14 or newer (ncclCommInitRankConfig, ncclCommFinalize)"
  #endif

/* A group of ranks, see >>group: one process and one GPU per rank. The struct is
   declared here because every wait depends on it: if another rank has exited, work that
   needs data from that rank never finishes. */
typedef struct stx__group {
    ncclComm_t comm;        /* NULL before the rank has joined and after the group has ended */
    int rank, ranks;
    double timeout;         /* seconds that this rank waits for the others */
    cudaStream_t stream;    /* runs gradient exchanges */
    cudaEvent_t ready, done;
    int forked;             /* nonzero if the context's stream does not yet wait for all
                               enqueued exchanges */
    int given_up;           /* 1: comm must be aborted when the current capture ends */
    int captured;           /* 1: a capture with exchanges has succeeded */
    char no_capture[112];   /* why NCCL exchanges cannot be captured; "" while no capture
                               has failed */
    ncclUniqueId spare;     /* id for a second communicator, in case this one fails in
                               the first capture */
    char *pinned, *device;  /* buffers of STX__GROUP_BYTES each, for exchanges of host memory */
} stx__group;

enum { STX__GROUP_BYTES = 1 << 20 };

/* Destroys all graphs, because NCCL cannot end a communicator while a graph contains its
   kernels. A graph that is running finishes first. */
static void stx__graphs_end(stx_gpu *g) {
    for (stx_graph *r = g->graphs; r; r = r->next) {
        if (r->exec) (void)cudaGraphExecDestroy(r->exec);
        r->exec = NULL;
    }
}

/* Ends this rank's group. During a capture, stx__group_after_capture does this later,
   because the graph being captured also contains kernels of `comm`. */
static void stx__group_give_up(stx_gpu *g) {
    stx__group *c = g->group;
    if (!c || !c->comm) return;
    if (g->capturing) {
        c->given_up = 1;
        return;
    }
    stx__graphs_end(g);
    (void)ncclCommAbort(c->comm);
    c->comm = NULL;
}

static int stx__group_is_alive(const stx_gpu *g) {
    return g->group && g->group->comm && !g->group->given_up;
}

/* Returns a hint about the probable cause of an NCCL error, or "" if there is none. */
static const char *stx__nccl_advice(ncclResult_t r) {
    if (r == ncclInvalidUsage)
        return ": each rank requires a separate GPU: set desc.gpu = stx_get_launch_info().local";
    if (r == ncclRemoteError || r == ncclSystemError)
        return ": another rank may have exited; set NCCL_DEBUG=WARN to print details";
    return "";
}

/* Sets the context's error after an NCCL error, and ends the group. During a capture,
   the error may only mean that NCCL calls cannot be captured. In that case no error is
   set, and the step is launched without a graph. Returns 0. */
static int stx__nccl_failed(stx_ctx *x, stx_gpu *g, ncclResult_t r, const char *what) {
    stx__group *c = g->group;
    if (g->capturing && r != ncclRemoteError && r != ncclSystemError) {
        snprintf(c->no_capture, sizeof c->no_capture, "NCCL cannot capture an exchange: %s (%.40s)",
                 ncclGetErrorString(r), ncclGetLastError(c->comm));
        g->repeatable = 0;
        return 0;
    }
    stx_fail(x, STX_ERR_DEVICE, "%s: rank %d of %d: NCCL error \"%s\" (%.200s)%s", what, c->rank,
             c->ranks, ncclGetErrorString(r), ncclGetLastError(c->comm), stx__nccl_advice(r));
    stx__group_give_up(g);
    return 0;
}

/* Waits for the event, for the stream if event is NULL, or for the last NCCL call if both
   are NULL. Returns 1 after the wait. Sets an error and returns 0 if NCCL reports an
   error or the other ranks do not answer in time. NCCL can only be polled. After 10 ms
   the thread sleeps between polls, for a small fraction of the time waited so far. */
static int stx__group_wait_for(stx_ctx *x, stx_gpu *g, cudaStream_t stream, cudaEvent_t event,
                               const char *what) {
    typedef std::chrono::steady_clock watch;
    typedef std::chrono::duration<double> duration;
    const watch::time_point begin = watch::now();
    const stx__group *c = g->group;
    for (;;) {
        ncclResult_t state = ncclSuccess, r;
        double seconds;
        if (event || stream) {
            cudaError_t e = event ? cudaEventQuery(event) : cudaStreamQuery(stream);
            if (e != cudaErrorNotReady) return stx__cuda_ok(x, g, e, what);
            (void)cudaGetLastError(); /* "not ready" is not an error */
        }

        r = ncclCommGetAsyncError(c->comm, &state);
        if (r != ncclSuccess || (state != ncclSuccess && state != ncclInProgress))
            return stx__nccl_failed(x, g, r != ncclSuccess ? r : state, what);
        if (!event && !stream && state == ncclSuccess) return 1;

        seconds = duration(watch::now() - begin).count();
        if (seconds > c->timeout) break;
        if (seconds < 0.01)
            std::this_thread::yield();
        else
            std::this_thread::sleep_for(duration(seconds < 1 ? seconds / 200 : 0.005));
    }
    stx_fail(x, STX_ERR_DEVICE,
             "%s: rank %d of %d: the other ranks did not answer within %g s: one of them may have "
             "exited (SEQTX_GROUP_TIMEOUT sets the limit, in seconds)",
             what, c->rank, c->ranks, c->timeout);
    stx__group_give_up(g);
    return 0;
}
#endif /* SEQTX_NCCL */

/* Waits for the event, or for the stream if event is NULL. Returns 1, or sets an error
   and returns 0. Every wait for the GPU goes through this function, because in a group
   the GPU itself may be waiting for ranks that have ended. */
static int stx__wait(stx_ctx *x, stx_gpu *g, cudaStream_t stream, cudaEvent_t event,
                     const char *what) {
    cudaError_t e;
#ifdef SEQTX_NCCL
    if (stx__group_is_alive(g)) return stx__group_wait_for(x, g, stream, event, what);
#endif
    e = event ? cudaEventSynchronize(event) : cudaStreamSynchronize(stream);
    return stx__cuda_ok(x, g, e, what);
}

/* Adds an allocation to the list. Returns 0 if the host is out of memory. */
static int stx__range_add(stx_gpu *g, void *base, size_t bytes, int kind, void *twin) {
    stx__range *r = (stx__range *)calloc(1, sizeof *r);
    if (!r) return 0;
    r->base = (char *)base;
    r->bytes = bytes;
    r->kind = kind;
    r->twin = (stx__bf16 *)twin;
    r->next = g->ranges;
    g->ranges = r;
    g->bytes += bytes + (twin ? bytes / 2 : 0);
    return 1;
}

/* Replaces the scratch buffer with a larger one. The old buffer is kept until the
   device is closed, because a captured step may use its address. */
static int stx__scratch_grow(stx_ctx *x, stx_gpu *g, size_t bytes, const char *what) {
    const size_t least = (size_t)1 << 20;
    size_t size = bytes < least ? least : bytes + bytes / 4;
    void *p = NULL;
    if (g->capturing) {
        stx_fail(x, STX_ERR_MEMORY,
                 "%s: the captured step needs %zu bytes of scratch memory, more than the earlier "
                 "step with the same key: the key must include everything that array sizes "
                 "depend on",
                 what, bytes);
        return 0;
    }

    if (cudaMalloc(&p, size) != cudaSuccess) {
        (void)cudaGetLastError();
        size = bytes;
        if (cudaMalloc(&p, size) != cudaSuccess) {
            (void)cudaGetLastError();
            stx_fail(x, STX_ERR_MEMORY,
                     "%s: out of GPU memory: cannot allocate %zu bytes of scratch memory: use a "
                     "smaller batch, block or model",
                     what, bytes);
            return 0;
        }
    }
    if (g->scratch && !stx__range_add(g, g->scratch, g->scratch_bytes, STX_MEM_BYTES, NULL)) {
        (void)cudaFree(p);
        stx_fail(x, STX_ERR_MEMORY, "%s: out of host memory", what);
        return 0;
    }
    g->scratch = (char *)p;
    g->scratch_bytes = size;
    return 1;
}

/* Returns `bytes` bytes of device scratch memory for the kernels of one launcher, or
   sets an error and returns NULL. The next launcher may use the same memory, because
   its kernels run later in the stream. */
static void *stx__scratch_of(stx_ctx *x, size_t bytes, const char *what) {
    stx_gpu *g = stx__use_gpu(x);
    if (!stx_ok(x)) return NULL;
    if (bytes > g->scratch_bytes && !stx__scratch_grow(x, g, bytes, what)) return NULL;
    return g->scratch;
}

/* Returns 1 if host and device may exchange data now. Transfers are not allowed during
   a capture, because every replay would transfer the same data. In that case, marks the
   step as not repeatable and returns 0. */
static int stx__host_copy_allowed(stx_gpu *g) {
    if (g->capturing) g->repeatable = 0;
    return !g->capturing;
}
