#pragma once
#include "common.cuh"
#include "wait.cuh"
#include "group_streams.cuh"


// >>group

#ifdef SEQTX_NCCL

/* Returns nonzero if the context is in a group that has not ended. Otherwise sets an
   error and returns 0. */
static int stx__group_check(stx_ctx *x, const stx_gpu *g, const char *what) {
    if (!stx_ok(x)) return 0;
    if (stx__group_is_alive(g)) return 1;
    stx_fail(x, STX_ERR_DEVICE, "%s: the context is not in a group, or its group has ended", what);
    return 0;
}

/* Extracts the first host of a SLURM host list: gpu03 from "gpu[03-05,9]", gpu03-ib from
   "gpu03-ib,gpu07". Returns 0 if the host name is empty or does not fit in `out`. */
static int stx__first_host(char *out, size_t size, const char *list) {
    size_t n = 0;
    int in = 0, first = 1; /* `in`: inside brackets; `first`: in the first number of the
                              brackets */
    for (; *list && (in || *list != ','); list++) {
        if (*list == '[' || *list == ']') {
            in = *list == '[';
            first = 1;
            continue;
        }
        if (in && (*list == '-' || *list == ',')) first = 0;
        if (in && !first) continue;
        if (n + 1 >= size) return 0;
        out[n++] = *list;
    }
    out[n] = 0;
    return n > 0;
}

/* Sets NCCL_COMM_ID to the address at which rank 0 listens: MASTER_ADDR, or the first
   host of SLURM's list, with port MASTER_PORT + 1. ncclGetUniqueId then returns the
   same id on all ranks. Returns 1, or sets an error and returns 0. */
static int stx__group_address(stx_ctx *x) {
    const char *addr = getenv("MASTER_ADDR"), *port = getenv("MASTER_PORT"),
               *list = getenv("SLURM_STEP_NODELIST"), *format;
    char host[256], id[300], *end;
    long n = 29500;
    if (getenv("NCCL_COMM_ID") && *getenv("NCCL_COMM_ID")) return 1;
    if (!list || !*list) list = getenv("SLURM_JOB_NODELIST");
    if (!addr || !*addr) {
        if (!list || !*list) {
            stx_fail(x, STX_ERR_DEVICE,
                     "stx_group_join: the address of rank 0 is unknown: set MASTER_ADDR (and "
                     "MASTER_PORT), as torchrun does, set NCCL_COMM_ID=host:port, or start the "
                     "ranks with srun, which sets SLURM_STEP_NODELIST");
            return 0;
        }
        addr = stx__first_host(host, sizeof host, list) ? host : NULL;
    }
    if (port && *port) {
        n = strtol(port, &end, 10);
        if (*end) n = 0;
    }
    if (!addr || strlen(addr) >= sizeof host || n < 1 || n > 65534) {
        stx_fail(x, STX_ERR_DEVICE,
                 "stx_group_join: expected the host of rank 0 and a port from 1 to 65534, got "
                 "MASTER_ADDR %.80s, MASTER_PORT %.40s and SLURM host list %.80s",
                 addr ? addr : "missing", port ? port : "missing", list ? list : "missing");
        return 0;
    }
    /* an IPv6 address is written in brackets */
    format = strchr(addr, ':') && addr[0] != '[' ? "[%s]:%ld" : "%s:%ld";
    snprintf(id, sizeof id, format, addr, n + 1);
    if (setenv("NCCL_COMM_ID", id, 1) == 0) return 1;
    stx_fail(x, STX_ERR_MEMORY, "stx_group_join: out of host memory");
    return 0;
}

int stx_cuda_group_id(stx_ctx *x, void *id, int by_address) {
    ncclUniqueId u;
    ncclResult_t r;
    static_assert(sizeof u == STX_NCCL_ID, "STX_NCCL_ID must be the size of ncclUniqueId");
    if (!stx__use_gpu(x) || !stx_ok(x) || (by_address && !stx__group_address(x))) return 0;
    memset(&u, 0, sizeof u);
    r = ncclGetUniqueId(&u);
    if (r != ncclSuccess)
        stx_fail(x, STX_ERR_DEVICE, "stx_group_join: NCCL error \"%s\" (%.200s)%s%.80s",
                 ncclGetErrorString(r), ncclGetLastError(NULL),
                 by_address ? ": NCCL_COMM_ID is " : "", by_address ? getenv("NCCL_COMM_ID") : "");
    memcpy(id, &u, sizeof u);
    return stx_ok(x);
}

/* Creates the stream, events and buffers of a group. */
static int stx__group_open(stx_ctx *x, stx_gpu *g, const char *what) {
    stx__group *c = g->group;
    if (!stx__cuda_ok(x, g, cudaStreamCreateWithFlags(&c->stream, cudaStreamNonBlocking), what)
        || !stx__cuda_ok(x, g, cudaEventCreateWithFlags(&c->ready, cudaEventDisableTiming), what)
        || !stx__cuda_ok(x, g, cudaEventCreateWithFlags(&c->done, cudaEventDisableTiming), what)
        || !stx__cuda_ok(x, g, cudaMallocHost((void **)&c->pinned, STX__GROUP_BYTES), what)
        || !stx__cuda_ok(x, g, cudaMalloc((void **)&c->device, STX__GROUP_BYTES), what))
        return 0;
    g->bytes += STX__GROUP_BYTES;
    return 1;
}

int stx_cuda_group_join(stx_ctx *x, const void *id, int rank, int ranks) {
    static const char what[] = "stx_group_join";
    stx_gpu *g = stx__use_gpu(x);
    const char *seconds = getenv("SEQTX_GROUP_TIMEOUT");
    ncclUniqueId u;
    stx__group *c;
    int version = 0;
    if (!g || !stx_ok(x)) return 0;
    if (g->group) {
        stx_fail(x, STX_ERR_ARG, "%s: the context is already in a group; it can join only once",
                 what);
        return 0;
    }
    if (ncclGetVersion(&version) != ncclSuccess || version < NCCL_VERSION(2, 14, 0)) {
        stx_fail(x, STX_ERR_DEVICE,
                 "%s: expected NCCL 2.14 (code %d) or newer, got version code %d", what,
                 NCCL_VERSION(2, 14, 0), version);
        return 0;
    }
    c = (stx__group *)calloc(1, sizeof *c);
    if (!c) {
        stx_fail(x, STX_ERR_MEMORY, "%s: out of host memory", what);
        return 0;
    }
    g->group = c;
    c->rank = rank;
    c->ranks = ranks;
    c->timeout = seconds ? strtod(seconds, NULL) : 0;
    if (!(c->timeout > 0)) c->timeout = 600;
    memcpy(&u, id, sizeof u);
    /* rank 0 creates the id of the spare communicator and broadcasts it */
    if (stx__group_open(x, g, what) && stx__group_connect(x, g, u, what)
        && (rank || stx__nccl_ok(x, g, ncclGetUniqueId(&c->spare), what)))
        stx_cuda_group_broadcast(x, &c->spare, sizeof c->spare, 0);
    if (!stx_ok(x)) stx__group_free(g);
    return stx_ok(x);
}

static const char stx__mean_of_gradients[] = "averaging the ranks' gradients";

void stx_cuda_group_mean(stx_ctx *x, stx_real *p, size_t n, int owner) {
    static const char *const what = stx__mean_of_gradients;
    stx_gpu *g = stx__use_gpu(x);
    stx__group *c = g->group;
    ncclResult_t r;
    if (!n || !stx__group_check(x, g, what) || !stx__group_fork(x, g, what)) return;
    if (owner < 0)
        r = ncclAllReduce(p, p, n, ncclFloat, ncclAvg, c->comm, c->stream);
    else
        r = ncclReduce(p, p, n, ncclFloat, ncclAvg, owner, c->comm, c->stream);
    stx__nccl_ok(x, g, r, what);
}

void stx_cuda_group_spread(stx_ctx *x, stx_real *p, size_t n, int owner) {
    static const char what[] = "broadcasting the ranks' parameters";
    stx_gpu *g = stx__use_gpu(x);
    stx__group *c = g->group;
    if (!n || !stx__group_check(x, g, what) || !stx__group_fork(x, g, what)) return;
    stx__nccl_ok(x, g, ncclBroadcast(p, p, n, ncclFloat, owner, c->comm, c->stream), what);
}

void stx_cuda_group_wait(stx_ctx *x) {
    stx_gpu *g = stx__use_gpu(x);
    if (stx_ok(x)) stx__cuda_ok(x, g, stx__group_join_streams(g), stx__mean_of_gradients);
}

void stx_cuda_group_sum(stx_ctx *x, double *p, size_t n) {
    static const char what[] = "summing over the ranks' parameters";
    stx_gpu *g = stx__use_gpu(x);
    stx__group *c = g->group;
    if (!n || !stx__group_check(x, g, what) || !stx__group_fork(x, g, what)) return;
    stx__nccl_ok(x, g, ncclAllReduce(p, p, n, ncclDouble, ncclSum, c->comm, c->stream), what);
    stx_cuda_group_wait(x);
}

/* Exchanges of host memory pass through the buffers of the group, in parts of at most
   STX__GROUP_BYTES. Callers call stx__group_begin once, then stx__group_put, an NCCL
   call and stx__group_end for each part. An exchange waits for all earlier work, even
   for work whose results it does not need: all ranks must enqueue the exchanges of a
   communicator in the same order, and replayed steps contain exchanges too. */
static int stx__group_begin(stx_ctx *x, stx_gpu *g, const char *what) {
    /* a step that exchanges host memory cannot be replayed: instead, the step is
       launched again, and the exchange runs then */
    return stx__group_check(x, g, what) && stx__host_copy_allowed(g) && stx__group_fork(x, g, what);
}

static int stx__group_put(stx_ctx *x, stx_gpu *g, const void *part, size_t bytes,
                          const char *what) {
    stx__group *c = g->group;
    cudaError_t e;
    memcpy(c->pinned, part, bytes);
    e = cudaMemcpyAsync(c->device, c->pinned, bytes, cudaMemcpyHostToDevice, c->stream);
    return stx__cuda_ok(x, g, e, what);
}

/* Copies a part of an exchange from the device to `to`, unless `to` is NULL. Waits in
   both cases, because the next part uses the same memory. */
static int stx__group_end(stx_ctx *x, stx_gpu *g, void *to, size_t bytes, const char *what) {
    stx__group *c = g->group;
    if (to) {
        cudaError_t e = cudaMemcpyAsync(c->pinned, c->device, bytes, cudaMemcpyDeviceToHost,
                                        c->stream);
        if (!stx__cuda_ok(x, g, e, what)) return 0;
    }
    if (!stx__wait(x, g, c->stream, NULL, what)) return 0;
    if (to) memcpy(to, c->pinned, bytes);
    return 1;
}

/* Reduces n doubles on the device to rank 0 and broadcasts the result. If each rank
   reduced them separately, the last bits might differ between ranks. */
static int stx__group_reduce_part(stx_ctx *x, stx_gpu *g, size_t n, ncclRedOp_t op,
                                  const char *what) {
    stx__group *c = g->group;
    char *p = c->device;
    return stx__nccl_ok(x, g, ncclReduce(p, p, n, ncclDouble, op, 0, c->comm, c->stream), what)
           && stx__nccl_ok(x, g, ncclBroadcast(p, p, n, ncclDouble, 0, c->comm, c->stream), what);
}

int stx_cuda_group_reduce(stx_ctx *x, double *v, size_t n, int most) {
    static const char what[] = "stx_group_sum";
    const ncclRedOp_t op = most ? ncclMax : ncclSum;
    stx_gpu *g = stx__use_gpu(x);
    size_t m, bytes;
    int ok = n && stx__group_begin(x, g, what);
    for (; ok && n; v += m, n -= m) {
        m = STX_MIN(n, STX__GROUP_BYTES / sizeof *v);
        bytes = m * sizeof *v;
        ok = stx__group_put(x, g, v, bytes, what) && stx__group_reduce_part(x, g, m, op, what)
             && stx__group_end(x, g, v, bytes, what);
    }
    return stx_ok(x);
}

int stx_cuda_group_broadcast(stx_ctx *x, void *bytes, size_t n, int from) {
    static const char what[] = "stx_group_broadcast";
    stx_gpu *g = stx__use_gpu(x);
    stx__group *c;
    char *at = (char *)bytes;
    size_t m;
    int ok = n && stx__group_begin(x, g, what);
    for (c = g->group; ok && n; at += m, n -= m) {
        ncclResult_t r;
        m = STX_MIN(n, (size_t)STX__GROUP_BYTES);
        if (c->rank == from && !stx__group_put(x, g, at, m, what)) break;
        r = ncclBroadcast(c->device, c->device, m, ncclUint8, from, c->comm, c->stream);
        ok = stx__nccl_ok(x, g, r, what)
             && stx__group_end(x, g, c->rank == from ? NULL : at, m, what);
    }
    return stx_ok(x);
}

int stx_cuda_group_send(stx_ctx *x, void *bytes, size_t n, int from, int to) {
    static const char what[] = "stx_group_send_bytes";
    stx_gpu *g = stx__use_gpu(x);
    stx__group *c;
    char *at = (char *)bytes;
    size_t m;
    int ok = n && stx__group_begin(x, g, what);
    for (c = g->group; ok && n; at += m, n -= m) {
        ncclResult_t r;
        m = STX_MIN(n, (size_t)STX__GROUP_BYTES);
        if (c->rank == from) {
            if (!stx__group_put(x, g, at, m, what)) break;
            r = ncclSend(c->device, m, ncclUint8, to, c->comm, c->stream);
            ok = stx__nccl_ok(x, g, r, what) && stx__group_end(x, g, NULL, m, what);
        } else if (c->rank == to) {
            r = ncclRecv(c->device, m, ncclUint8, from, c->comm, c->stream);
            ok = stx__nccl_ok(x, g, r, what) && stx__group_end(x, g, at, m, what);
        } else {
            break;
        }
    }
    return stx_ok(x);
}

void stx_cuda_group_leave(stx_ctx *x) {
    static const char what[] = "stx_group_leave";
    stx_gpu *g = stx__use_gpu(x);
    stx__group *c = g ? g->group : NULL;
    if (!c) return;
    /* finalise together with the other ranks. This is skipped after an error, because
       the other ranks may have ended then */
    if (stx_ok(x) && c->comm && stx__cuda_ok(x, g, stx__group_join_streams(g), what)
        && stx__wait(x, g, g->stream, NULL, what)) {
        stx__graphs_end(g);
        if (stx__nccl_ok(x, g, ncclCommFinalize(c->comm), what)) {
            (void)ncclCommDestroy(c->comm);
            c->comm = NULL;
        }
    }
    stx__group_free(g);
}

void stx_cuda_group_abort(stx_ctx *x) {
    stx_gpu *g = stx__use_gpu(x);
    if (g) stx__group_give_up(g);
}
#endif /* SEQTX_NCCL */
