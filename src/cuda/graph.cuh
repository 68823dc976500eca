#pragma once
#include "common.cuh"
#include "wait.cuh"
#include "group_streams.cuh"
#include "device.cuh"


// >>graph

/* If e is an error, records it for stx_step_replay_status and returns 1. This does not
   set the context's error: without a graph, the step is relaunched, which is slower but
   equivalent. If the device itself has failed, the next launch reports it. */
static int stx__no_graph(stx_gpu *g, cudaError_t e, const char *what) {
    g->graph_error[0] = 0;
    if (e == cudaSuccess) return 0;
    (void)cudaGetLastError();
    snprintf(g->graph_error, sizeof g->graph_error, "CUDA %s: %s (%.60s)", what,
             cudaGetErrorName(e), cudaGetErrorString(e));
    return 1;
}

int stx_cuda_capturing(const stx_ctx *x) {
    return stx__gpu(x) && stx__gpu(x)->capturing;
}

int stx_cuda_capture_begin(stx_ctx *x) {
    stx_gpu *g = stx__use_gpu(x);
    cudaError_t e;
    if (!stx_ok(x) || g->capturing) return 0;
    /* pending exchanges are not part of the step */
    if (!stx__cuda_ok(x, g, stx__group_join_streams(g), "stx_step_run")) return 0;
    if (!stx__group_may_capture(x, g)) return 0;
    e = cudaStreamBeginCapture(g->stream, cudaStreamCaptureModeThreadLocal);
    if (stx__no_graph(g, e, "cannot capture the step")) return 0;
    g->capturing = g->repeatable = 1;
    return 1;
}

const char *stx_cuda_capture_error(const stx_ctx *x) {
    return stx__gpu(x)->graph_error;
}

/* Instantiates a captured graph. If that fails, sets g->graph_error and returns NULL. */
static stx_graph *stx__graph_make(stx_gpu *g, cudaGraph_t graph) {
    stx_graph *r = (stx_graph *)calloc(1, sizeof *r);
    if (!r) {
        snprintf(g->graph_error, sizeof g->graph_error, "out of host memory for a graph");
        return NULL;
    }
    if (stx__no_graph(g, cudaGraphInstantiate(&r->exec, graph, 0),
                      "cannot instantiate the graph")) {
        free(r);
        return NULL;
    }
    r->next = g->graphs;
    g->graphs = r;
    return r;
}

stx_graph *stx_cuda_capture_end(stx_ctx *x) {
    stx_gpu *g = stx__use_gpu(x);
    cudaGraph_t graph = NULL;
    stx_graph *r = NULL;
    int failed;
    /* a step that did not reach its update has not joined the streams yet */
    (void)stx__group_join_streams(g);
    failed = stx__no_graph(g, cudaStreamEndCapture(g->stream, &graph), "cannot capture the step");
    g->capturing = 0;
    if (!failed && !g->repeatable)
        snprintf(g->graph_error, sizeof g->graph_error,
                 "during its capture, the step transferred data between host and GPU, or freed "
                 "GPU memory");
    if (graph && !failed && g->repeatable && stx_ok(x)) r = stx__graph_make(g, graph);
    if (graph) (void)cudaGraphDestroy(graph);
    stx__group_after_capture(x, g, r != NULL);
    return r;
}

void stx_cuda_graph_launch(stx_ctx *x, stx_graph *r) {
    stx_gpu *g = stx__use_gpu(x);
    if (stx_ok(x) && r && !r->exec)
        stx_fail(x, STX_ERR_ARG,
                 "stx_step_run: the step was captured in a group that has ended");
    if (stx_ok(x) && r)
        stx__cuda_ok(x, g, cudaGraphLaunch(r->exec, g->stream),
                     "replaying a step (desc.no_graph and CUDA_LAUNCH_BLOCKING=1 show which op "
                     "fails)");
}

void stx_cuda_graph_free(stx_ctx *x, stx_graph *r) {
    stx_graph **at;
    if (!r) return;
    stx_cuda_sync(x);
    at = &stx__gpu(x)->graphs;
    while (*at && *at != r) at = &(*at)->next;
    if (*at) *at = r->next;
    if (r->exec) (void)cudaGraphExecDestroy(r->exec);
    free(r);
}
