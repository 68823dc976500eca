#pragma once
#include "common.cuh"
#include "wait.cuh"


// >>group: streams

/* The group code that the device layer and graph capture need: freeing a group, the fork,
   the join, and captures. Gradient exchanges run on the group's stream, so that the
   backward pass of earlier layers can continue meanwhile. The fork is an event after
   which an exchange may begin; the join is an event after which the context's stream may
   use the results. In a captured step, both are dependencies of the CUDA graph.

   No call blocks. The communicator is created with ncclConfig_t.blocking = 0, and
   pending work is polled (stx__group_wait_for) until it has finished, NCCL reports an
   error, or the other ranks do not answer within the timeout. In the last two cases the
   group is given up: ncclCommAbort ends kernels that wait for other ranks, and the
   context's error is set.

   NCCL documents captures and nonblocking communicators, but not their combination. If
   the first capture fails because of NCCL, steps are launched without a graph, with
   bit-identical results, and stx_step_replay_status reports the reason. If the failed
   capture broke the communicator, the ranks create another one, with an id that they
   exchanged when they joined. */
#ifdef SEQTX_NCCL

/* Waits for an NCCL call and checks its status. Returns 1, or sets an error and returns
   0. */
static int stx__nccl_ok(stx_ctx *x, stx_gpu *g, ncclResult_t r, const char *what) {
    if (r == ncclInProgress) return stx__group_wait_for(x, g, NULL, NULL, what);
    return r == ncclSuccess || stx__nccl_failed(x, g, r, what);
}

/* Creates the communicator. All ranks must call this together, with the same id. */
static int stx__group_connect(stx_ctx *x, stx_gpu *g, ncclUniqueId id, const char *what) {
    stx__group *c = g->group;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    return stx__nccl_ok(x, g, ncclCommInitRankConfig(&c->comm, c->ranks, id, c->rank, &config),
                        what);
}

static void stx__group_free(stx_gpu *g) {
    stx__group *c = g->group;
    if (!c) return;
    stx__group_give_up(g);
    if (c->stream) (void)cudaStreamSynchronize(c->stream);
    if (c->device) {
        (void)cudaStreamSynchronize(g->stream);
        (void)cudaFree(c->device);
        g->bytes -= STX__GROUP_BYTES;
    }
    if (c->pinned) (void)cudaFreeHost(c->pinned);
    if (c->ready) (void)cudaEventDestroy(c->ready);
    if (c->done) (void)cudaEventDestroy(c->done);
    if (c->stream) (void)cudaStreamDestroy(c->stream);
    free(c);
    g->group = NULL;
}

/* The fork: further work on the group's stream waits for the context's work so far.
   Returns 0 after an error, or if the step is being captured and NCCL cannot capture
   exchanges. */
static int stx__group_fork(stx_ctx *x, stx_gpu *g, const char *what) {
    stx__group *c = g->group;
    if (g->capturing && c->no_capture[0]) return 0;
    c->forked = 1;
    return stx__cuda_ok(x, g, cudaEventRecord(c->ready, g->stream), what)
           && stx__cuda_ok(x, g, cudaStreamWaitEvent(c->stream, c->ready, 0), what);
}

/* The join: further work on the context's stream waits for the group's work so far.
   Also required after an error, because streams that were forked in a capture must be
   joined. */
static cudaError_t stx__group_join_streams(stx_gpu *g) {
    stx__group *c = g->group;
    cudaError_t e;
    if (!c || !c->forked) return cudaSuccess;
    c->forked = 0;
    e = cudaEventRecord(c->done, c->stream);
    return e == cudaSuccess ? cudaStreamWaitEvent(g->stream, c->done, 0) : e;
}

/* Called before a capture. Returns 0 if steps of this group cannot be captured. Before
   the first capture, waits for all pending work, because the communicator may fail with
   the capture. */
static int stx__group_may_capture(stx_ctx *x, stx_gpu *g) {
    const stx__group *c = g->group;
    if (!stx__group_is_alive(g) || c->captured) return 1;
    if (!c->no_capture[0]) return stx__wait(x, g, g->stream, NULL, "stx_step_run");
    snprintf(g->graph_error, sizeof g->graph_error, "%s", c->no_capture);
    return 0;
}

/* Called after a capture. Ends the communicator if the group was given up during the
   capture, and replaces it if it failed in the first capture. */
static void stx__group_after_capture(stx_ctx *x, stx_gpu *g, int captured) {
    static const char what[] = "stx_step_run";
    stx__group *c = g->group;
    ncclResult_t state = ncclSuccess;
    if (!c) return;
    if (c->given_up) stx__group_give_up(g);
    if (captured) c->captured = 1;
    if (!c->comm || !c->no_capture[0]) return;

    snprintf(g->graph_error, sizeof g->graph_error, "%s", c->no_capture);
    if (ncclCommGetAsyncError(c->comm, &state) == ncclSuccess
        && (state == ncclSuccess || state == ncclInProgress))
        return;
    if (c->captured) { /* other graphs contain exchanges of this communicator */
        stx_fail(x, STX_ERR_DEVICE, "%s: rank %d of %d: %s: set desc.no_graph", what, c->rank,
                 c->ranks, c->no_capture);
        stx__group_give_up(g);
        return;
    }
    (void)ncclCommAbort(c->comm);
    c->comm = NULL;
    stx__group_connect(x, g, c->spare, what);
}
#else
static void stx__group_free(stx_gpu *g) {
    (void)g;
}

static cudaError_t stx__group_join_streams(stx_gpu *g) {
    (void)g;
    return cudaSuccess;
}

static int stx__group_may_capture(stx_ctx *x, stx_gpu *g) {
    (void)x;
    (void)g;
    return 1;
}

static void stx__group_after_capture(stx_ctx *x, stx_gpu *g, int captured) {
    (void)x;
    (void)g;
    (void)captured;
}
#endif /* SEQTX_NCCL */
