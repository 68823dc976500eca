#pragma once
#include "../api/config.h"
#include "../api/context.h"
#include "../api/train.h"
#include "../core/platform.h"
#include "../core/context.h"
#include "../core/threads.h"
#include "group.h"


// >>group: MPI

#ifdef SEQTX_MPI

typedef struct stx__mpi {
    MPI_Comm comm;
    MPI_Request *req;   /* (capacity): pending reductions and broadcasts */
    int reqs, capacity;
    long parent;        /* pid of the process that started this one: mpirun or its local daemon */
} stx__mpi;

/* Process-wide state, because a process can initialise MPI only once.
   stx__mpi_initialised is 1 if the library has initialised MPI; stx__mpi_joined is the
   number of contexts that have joined. */
static int stx__mpi_initialised, stx__mpi_joined;

static stx__mpi *stx__mpi_of(const stx_ctx *x) {
    return (stx__mpi *)x->group.engine;
}

static int stx__mpi_ok(stx_ctx *x, const char *what, int code) {
    char text[MPI_MAX_ERROR_STRING] = "";
    int n;
    if (code == MPI_SUCCESS) return 1;
    MPI_Error_string(code, text, &n);
    stx_fail(x, STX_ERR_DEVICE, "%s: rank %d: MPI reports: %.200s", what, x->group.rank, text);
    return 0;
}

static long stx__mpi_parent(void) {
  #ifdef _WIN32
    return 0;
  #else
    return (long)getppid();
  #endif
}

/* Waits for n requests. Polls for a few microseconds, then yields between polls, so
   that ranks can share a processor. Sets an error if the launcher has been killed,
   because nothing would then end this rank if another rank failed. */
static int stx__mpi_wait(stx_ctx *x, const char *what, int n, MPI_Request *req) {
    int done = 0, code = MPI_SUCCESS;
    unsigned polls = 0;
    while (code == MPI_SUCCESS && !done) {
        code = MPI_Testall(n, req, &done, MPI_STATUSES_IGNORE);
        if (done || ++polls < 200) continue;
  #ifdef _WIN32
        SwitchToThread();
  #else
        sched_yield();
  #endif
        if (polls % 4096 == 0 && stx__mpi_parent() != stx__mpi_of(x)->parent) {
            stx_fail(x, STX_ERR_DEVICE,
                     "%s: rank %d is waiting for the others, but the program that started them "
                     "(mpirun, srun) has ended", what, x->group.rank);
            return 0;
        }
    }
    return stx__mpi_ok(x, what, code);
}

/* Reduces to rank 0 and broadcasts the result. In an all-reduce, ranks could add in
   different orders, and their results could differ in the last bits. */
static int stx__mpi_reduce(stx_ctx *x, double *v, size_t n, int max) {
    const char *what = max ? "stx_group_max" : "stx_group_sum";
    stx__mpi *g = stx__mpi_of(x);
    MPI_Request req;
    const void *from = x->group.rank ? (const void *)v : MPI_IN_PLACE;
    if (n > INT_MAX) {
        stx_fail(x, STX_ERR_ARG, "%s: expected at most %d elements, got %zu", what, INT_MAX, n);
        return 0;
    }
    return stx__mpi_ok(x, what,
                       MPI_Ireduce(from, v, (int)n, MPI_DOUBLE, max ? MPI_MAX : MPI_SUM, 0,
                                   g->comm, &req))
           && stx__mpi_wait(x, what, 1, &req)
           && stx__mpi_ok(x, what, MPI_Ibcast(v, (int)n, MPI_DOUBLE, 0, g->comm, &req))
           && stx__mpi_wait(x, what, 1, &req);
}

enum { STX__MPI_MOST = 1 << 30 };   /* maximum elements per call; MPI counts are int */

static int stx__mpi_broadcast(stx_ctx *x, void *bytes, size_t n, int from) {
    const char *what = "stx_group_broadcast";
    stx__mpi *g = stx__mpi_of(x);
    char *at = (char *)bytes;
    size_t m;
    MPI_Request req;
    for (; n; at += m, n -= m) {
        m = STX_MIN((size_t)STX__MPI_MOST, n);
        if (!stx__mpi_ok(x, what, MPI_Ibcast(at, (int)m, MPI_BYTE, from, g->comm, &req))) return 0;
        if (!stx__mpi_wait(x, what, 1, &req)) return 0;
    }
    return 1;
}

static int stx__mpi_send(stx_ctx *x, void *bytes, size_t n, int from, int to) {
    const char *what = "stx_group_send_bytes";
    stx__mpi *g = stx__mpi_of(x);
    char *at = (char *)bytes;
    size_t m;
    int code;
    MPI_Request req;
    for (; n; at += m, n -= m) {
        m = STX_MIN((size_t)STX__MPI_MOST, n);
        if (x->group.rank == from)
            code = MPI_Isend(at, (int)m, MPI_BYTE, to, 0, g->comm, &req);
        else
            code = MPI_Irecv(at, (int)m, MPI_BYTE, from, 0, g->comm, &req);
        if (!stx__mpi_ok(x, what, code) || !stx__mpi_wait(x, what, 1, &req)) return 0;
    }
    return 1;
}

static const char stx__of_mean[] = "averaging the ranks' gradients";

/* Returns a slot for another request, or NULL after an error. */
static MPI_Request *stx__mpi_next(stx_ctx *x) {
    stx__mpi *g = stx__mpi_of(x);
    if (g->reqs == g->capacity) {
        if (!stx__mpi_wait(x, stx__of_mean, g->reqs, g->req)) return NULL;
        g->reqs = 0;
    }
    return g->req + g->reqs++;
}

static MPI_Datatype stx__mpi_real(void) {
    return sizeof(stx_real) == sizeof(float) ? MPI_FLOAT : MPI_DOUBLE;
}

static void stx__mpi_mean(stx_ctx *x, stx_real *p, size_t n, int owner) {
    stx__mpi *g = stx__mpi_of(x);
    MPI_Datatype type = stx__mpi_real();
    MPI_Request *req = stx__mpi_next(x);
    const void *from = owner == x->group.rank ? MPI_IN_PLACE : (const void *)p;
    int code;
    if (!req) return;
    if (owner < 0)
        code = MPI_Iallreduce(MPI_IN_PLACE, p, (int)n, type, MPI_SUM, g->comm, req);
    else
        code = MPI_Ireduce(from, p, (int)n, type, MPI_SUM, owner, g->comm, req);
    stx__mpi_ok(x, stx__of_mean, code);
}

static void stx__mpi_spread(stx_ctx *x, stx_real *p, size_t n, int owner) {
    stx__mpi *g = stx__mpi_of(x);
    MPI_Datatype type = stx__mpi_real();
    size_t m;
    for (; n; p += m, n -= m) {
        MPI_Request *req = stx__mpi_next(x);
        m = STX_MIN((size_t)STX__MPI_MOST, n);
        if (!req) return;
        if (!stx__mpi_ok(x, "broadcasting the ranks' parameters",
                         MPI_Ibcast(p, (int)m, type, owner, g->comm, req)))
            return;
    }
}

typedef struct stx__divide_job {
    stx_real *p, factor;
} stx__divide_job;

static void stx__divide_part(const stx_share *s, const void *job) {
    const stx__divide_job *j = (const stx__divide_job *)job;
    size_t i;
    for (i = s->begin; i < s->end; i++) j->p[i] *= j->factor;
}

/* Waits for all pending requests and divides the sums by the number of ranks. */
static void stx__mpi_end(stx_ctx *x, stx_real *means, size_t n) {
    stx__mpi *g = stx__mpi_of(x);
    stx__divide_job j;
    int ok = stx__mpi_wait(x, stx__of_mean, g->reqs, g->req);
    g->reqs = 0;
    j.p = means;
    j.factor = (stx_real)(1.0 / x->group.ranks);
    if (ok && n) stx_parallel(x, n, n, stx__divide_part, &j);
}

static void stx__mpi_sum(stx_ctx *x, double *v, size_t n) {
    stx__mpi_reduce(x, v, n, 0);
}

/* Lets MPI make progress, because MPI moves data only while one of its functions is
   running. */
static void stx__mpi_poll(stx_ctx *x) {
    stx__mpi *g = stx__mpi_of(x);
    int done;
    if (g->reqs)
        stx__mpi_ok(x, stx__of_mean, MPI_Testall(g->reqs, g->req, &done, MPI_STATUSES_IGNORE));
}

static void stx__mpi_leave(stx_ctx *x) {
    MPI_Comm_free(&stx__mpi_of(x)->comm);
    if (--stx__mpi_joined || !stx__mpi_initialised) return;
    MPI_Finalize();
    stx__mpi_initialised = 0;
}

static void stx__mpi_abort(stx_ctx *x, int code) {
    MPI_Abort(stx__mpi_of(x)->comm, code);
}

/* Leaves MPI initialised, so that other contexts can still join. The last context that
   leaves finalises MPI. */
static void stx__mpi_forget(stx_ctx *x) {
    (void)x;
    stx__mpi_joined--;
}

static const stx__group_ops stx__mpi_ops = {
    stx__mpi_reduce, stx__mpi_broadcast, stx__mpi_send,
    stx__mpi_mean, stx__mpi_spread, stx__mpi_end, stx__mpi_sum, stx__mpi_poll,
    stx__backward_begin, stx__backward_step,
    stx__mpi_leave, stx__mpi_abort, stx__mpi_forget
};

/* Returns a hash of the machine's name and the processors that this rank may use. */
static uint64_t stx__mpi_processors(void) {
    char name[MPI_MAX_PROCESSOR_NAME + 1] = "";
    uint64_t h = 14695981039346656037u, mask = 0;
    int n = 0, i;
    MPI_Get_processor_name(name, &n);
    for (i = 0; i < n; i++) h = stx_key_add(h, (unsigned char)name[i]);
  #if defined(STX__PTHREADS) || defined(STX__WIN_THREADS)
    stx__processors(&mask);
  #endif
    return stx_key_add(h, mask);
}

/* Divides the number of threads by the number of ranks that may use the same
   processors, unless the caller set the number of threads. */
static int stx__mpi_share_processors(stx_ctx *x) {
    const stx__mpi *g = stx__mpi_of(x);
    uint64_t own, *all = (uint64_t *)stx_block(x, (size_t)x->group.ranks * sizeof *all);
    int i, same = 0;
    if (!all) return 0;
    own = stx__mpi_processors();
    if (stx__mpi_ok(x, "stx_group_join",
                    MPI_Allgather(&own, 8, MPI_BYTE, all, 8, MPI_BYTE, g->comm)))
        for (i = 0; i < x->group.ranks; i++) same += all[i] == own;
    if (x->threads.automatic && same > 1) {
        x->desc.threads = STX_MAX(1, x->desc.threads / same);
        stx__pool_free(x);  /* the pool was created for more threads */
        stx__pool_make(x);
    }
    stx_block_free(x, all);
    return stx_ok(x);
}

/* Joins the group of ranks that MPI started. Returns 0 after an error, otherwise 1. If
   the process was started alone, x->group.ranks stays 0. */
static int stx__mpi_join(stx_ctx *x, const stx_launch_info *s) {
    stx__mpi *g;
    int on = 0, ended = 0, level;
    if (MPI_Initialized(&on) != MPI_SUCCESS) on = 0;
    if (MPI_Finalized(&ended) != MPI_SUCCESS) ended = 0;
    if ((!on || ended) && !s->by) return 1; /* started alone: MPI is not needed */
    if (ended) {
        stx_fail(x, STX_ERR_DEVICE,
                 "stx_group_join: MPI has been finalised, because the last context left the group, "
                 "and a process can initialise it only once: let every context join before the "
                 "last one leaves");
        return 0;
    }

    g = (stx__mpi *)stx_persist(x, sizeof *g);
    if (!g) return 0;
    if (!on
        && !stx__mpi_ok(x, "stx_group_join",
                        MPI_Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &level)))
        return 0;
    stx__mpi_initialised |= !on;
    if (!stx__mpi_ok(x, "stx_group_join", MPI_Comm_dup(MPI_COMM_WORLD, &g->comm))) return 0;
    MPI_Comm_set_errhandler(g->comm, MPI_ERRORS_RETURN);
    MPI_Comm_rank(g->comm, &x->group.rank);
    MPI_Comm_size(g->comm, &x->group.ranks);

    x->group.engine = g;
    x->group.ops = &stx__mpi_ops;
    stx__mpi_joined++;
    g->parent = stx__mpi_parent();
    g->capacity = 256;
    g->req = (MPI_Request *)stx_persist(x, (size_t)g->capacity * sizeof *g->req);
    return g->req && stx__mpi_share_processors(x);
}

#endif
