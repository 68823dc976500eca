#pragma once
#include "../api/config.h"
#include "../api/context.h"
#include "../api/train.h"
#include "../core/platform.h"
#include "../core/context.h"
#include "../core/arena.h"
#include "../core/tape.h"


// >>group

/* Data-parallel training. Every rank is a process with the whole model and a share of
   each batch; the ranks average their gradients before an update.

   Back ends. x->group.ops is a table of functions that exchange data, or NULL in a
   context without a group. Contexts on a CPU use MPI (SEQTX_MPI), and contexts on a GPU
   use NCCL (SEQTX_NCCL). If MPI started the processes, contexts on a GPU exchange host
   memory through MPI and device memory through NCCL.

   Buckets. The gradients of a parameter list are one block (stx_params_grads), divided
   into buckets of consecutive elements. stx_backward visits the layers from last to
   first, so the last bucket is complete first:

       parameters    w0      w1     w2         w3           w4
       gradients   [         |            |           |           ]
       bucket           0          1            2           3
       sent           fourth     third       second       first

   Before stx_backward, stx__backward_begin walks the tape and finds for each bucket the
   last node that adds to it. After that node has run, stx__backward_step sends the
   bucket, while stx_backward computes the gradients of earlier layers. stx_optim_step
   sends the rest and waits.

   Results do not depend on timing. The buckets depend only on sizes. All ranks send
   them in the same order, from the last to the first, and at points that only the tape
   determines. The back end computes every sum in one reduction. The order of its
   additions depends only on the numbers of elements and ranks. The result is therefore
   bit-identical however early a bucket is sent. Sums that every rank needs are computed
   on one rank and broadcast.

   Sharded optimiser state (stx_group_desc.shard; ZeRO stage 1, Rajbhandari et al. 2020,
   1910.02054). Each bucket is owned by one rank. Only this rank receives the bucket's
   mean, stores the optimiser state of the bucket's parameters and updates these
   parameters. stx__spread_params then broadcasts the parameters. */

static int stx__env_int(const char *name, int missing) {
    const char *s = getenv(name);
    char *end;
    long v;
    if (!s) return missing;
    v = strtol(s, &end, 10);
    /* SLURM lists the task counts of all machines, for example "8(x2),4"; use the
       first */
    if (end == s || (*end && *end != '(' && *end != ',')) return missing;
    return v < 0 || v > 1 << 24 ? missing : (int)v;
}

STX_DEF stx_launch_info stx_get_launch_info(void) {
    /* columns: rank, number of ranks, local rank, number of local ranks */
    static const char *const names[][4] = {
        {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
         "OMPI_COMM_WORLD_LOCAL_SIZE"},
        {"MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK",
         "MV2_COMM_WORLD_LOCAL_SIZE"},
        {"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"},
        /* SLURM_NTASKS is not used, because it is also set for programs that an sbatch
           script starts without srun */
        {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"},
        {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"}};
    /* Another launcher may have started torchrun once per machine. The variables of that
       launcher are then still set, but torchrun, the inner launcher, takes precedence. */
    const size_t n = sizeof names / sizeof *names;
    const size_t first = getenv("TORCHELASTIC_RUN_ID") ? n - 1 : 0;
    stx_launch_info s;
    size_t k;
    memset(&s, 0, sizeof s);
    s.ranks = s.locals = 1;
    for (k = 0; k < n; k++) {
        const size_t i = (first + k) % n;
        const int rank = stx__env_int(names[i][0], -1), ranks = stx__env_int(names[i][1], 0);
        if (rank < 0 || rank >= ranks || ranks < 2) continue;
        s.rank = rank;
        s.ranks = ranks;
        s.by = names[i][1];
        s.local = stx__env_int(names[i][2], 0);
        s.locals = STX_MAX(1, stx__env_int(names[i][3], 1));
        break;
    }
    return s;
}

STX_DEF int stx_rank(const stx_ctx *x) {
    return x ? x->group.rank : 0;
}

STX_DEF int stx_ranks(const stx_ctx *x) {
    return x && x->group.ranks > 1 ? x->group.ranks : 1;
}


// >>group: shards of the optimiser state

/* The parameters of a list that are not frozen, in order, are divided into chunks of
   STX__OPTIM_CHUNK elements of one tensor; the last chunk of a tensor may be shorter. An
   update divides the chunks among the threads. With stx_group_desc.shard, the chunks are
   first divided among the ranks: of n chunks, rank r stores the optimiser state of chunks
   [n r / ranks, n (r + 1) / ranks). A matrix of STX_MUON is not divided: it belongs to
   the last rank whose chunks would begin in it, or to the rank that has all of it. */
enum { STX__OPTIM_CHUNK = 4096 };

static size_t stx__chunks_of(const stx_tensor *t) {
    return t->needs_grad ? (t->size + STX__OPTIM_CHUNK - 1) / STX__OPTIM_CHUNK : 0;
}

/* The range [begin, end) of a tensor's elements for which a rank stores the optimiser
   state. It is empty if the rank has none or the parameter is frozen. */
typedef struct stx__shard {
    size_t begin, end;
} stx__shard;

/* Returns the first element of parameter i that belongs to `rank` or a higher rank. */
static size_t stx__shard_begin(const stx_optim *o, size_t i, size_t rank, size_t ranks) {
    const size_t size = o->params->tensor[i]->size, first = o->first[i];
    const size_t chunk = o->chunks * rank / ranks;
    size_t at;
    if (o->first[i + 1] == first) return size; /* frozen */
    if (chunk <= first) return 0;
    at = STX_MIN(size, (chunk - first) * STX__OPTIM_CHUNK);
    return at < size && o->is_matrix && o->is_matrix[i] ? 0 : at;
}

/* Returns the shard of a rank in parameter i. */
static stx__shard stx__shard_of(const stx_optim *o, size_t i, size_t rank, size_t ranks) {
    stx__shard s;
    s.begin = stx__shard_begin(o, i, rank, ranks);
    s.end = stx__shard_begin(o, i, rank + 1, ranks);
    return s;
}

/* Returns the shard of this rank, which is the whole tensor unless the state is
   sharded. */
static stx__shard stx__own_shard(const stx_optim *o, size_t i) {
    const stx_ctx *x = o->params->ctx;
    if (!x->group.shard) return stx__shard_of(o, i, 0, 1);
    return stx__shard_of(o, i, (size_t)x->group.rank, (size_t)x->group.ranks);
}

/* Returns 0 and sets an error if the state is sharded and the context has left the
   group: the remaining shards are on the group's other ranks. */
static int stx__state_complete(stx_ctx *x, const char *op) {
    if (!x->group.shard || x->group.ranks > 1) return 1;
    stx_fail(x, STX_ERR_ARG,
             "%s: the optimiser's state is sharded (stx_group_desc.shard), and the context has "
             "left the group that holds the other shards: save it before stx_group_leave, and load "
             "it into an optimiser that is created afterwards", op);
    return 0;
}


// >>group: buckets of gradients

typedef struct stx__buckets {
    size_t count;
    size_t sent;        /* buckets `sent` .. count-1 have been sent */
    size_t *at;         /* (count + 1): first element of each bucket; the last entry is
                           the total size */
    size_t *until;      /* (count): number of nodes left on the tape when the bucket is complete */
    int *owner;         /* (count): rank that receives the bucket's mean if the state is sharded */
} stx__buckets;

/* Returns the index of the first gradient of rank r's shard. */
static size_t stx__shard_grad(const stx_optim *o, int r) {
    const stx_params *p = o->params;
    const size_t rank = (size_t)r, ranks = (size_t)p->ctx->group.ranks;
    size_t i;
    for (i = 0; i < p->count; i++) {
        const size_t begin = stx__shard_begin(o, i, rank, ranks);
        if (begin < p->tensor[i]->size) return (size_t)(p->tensor[i]->grad - p->grads) + begin;
    }
    return p->grads_size;
}

/* Divides the gradients of an optimiser's list into buckets. With sharded state, no
   bucket crosses a shard boundary. */
static int stx__make_buckets(const stx_optim *o) {
    stx_params *p = o->params;
    stx_ctx *x = p->ctx;
    const int shards = x->group.shard ? x->group.ranks : 1;
    size_t n, at, end, most;
    int r;
    stx__buckets *b;
    if (!stx_params_grads(p, &n)) return 0;
    most = (n + x->group.bucket - 1) / x->group.bucket + (size_t)shards;

    b = (stx__buckets *)stx_persist(x, sizeof *b);
    if (!b) return 0;
    b->at = (size_t *)stx_persist(x, (most + 1) * sizeof *b->at);
    b->until = (size_t *)stx_persist(x, most * sizeof *b->until);
    b->owner = (int *)stx_persist(x, most * sizeof *b->owner);
    if (!b->at || !b->until || !b->owner) return 0;

    for (r = 0, at = 0; r < shards; r++) {
        end = r + 1 < shards ? stx__shard_grad(o, r + 1) : n;
        for (; at < end; at = STX_MIN(end, at + x->group.bucket)) {
            b->at[b->count] = at;
            b->owner[b->count++] = r;
        }
    }
    b->at[b->count] = n;
    b->sent = b->count;
    p->buckets = b;
    return 1;
}

STX_DEF void stx_group_overlap(stx_optim *o) {
    stx_ctx *x = o ? o->params->ctx : NULL;
    if (stx_ok(x) && x->group.ranks > 1) x->group.sending = o->params;
}

/* Starts the reduction of the next bucket. */
static void stx__send_bucket(stx_params *p) {
    stx_ctx *x = p->ctx;
    const stx__buckets *b = p->buckets;
    const size_t k = --p->buckets->sent;
    x->group.in_flight++;
    stx__defer_sums(x, 0);
    if (p->aside)
        STX_RUN(x, stx_axpy, (x, p->grads + b->at[k], p->earlier + b->at[k],
                              b->at[k + 1] - b->at[k], 1, 1));
    x->group.ops->start_mean(x, p->grads + b->at[k], b->at[k + 1] - b->at[k],
                       x->group.shard ? b->owner[k] : -1);
}

/* Sends the remaining buckets of a list and waits for all of them. Replaces the list's
   gradients with their means over the ranks. */
static void stx__mean_grads(stx_params *p) {
    stx_ctx *x = p->ctx;
    stx__buckets *b = p->buckets;
    if (x->group.ranks < 2 || !stx_ok(x)) return;
    while (b->sent && stx_ok(x)) stx__send_bucket(p);
    p->aside = 0;
    x->group.ops->wait(x, p->grads, p->grads_size);
    x->group.in_flight -= b->count - b->sent;
    b->sent = b->count;
}

/* Completes pending reductions when no update will follow. */
static void stx__end_sending(stx_ctx *x) {
    stx_params *p;
    x->group.sending = NULL;
    for (p = x->lists; p; p = p->next)
        if (p->buckets && p->buckets->sent < p->buckets->count) stx__mean_grads(p);
}

/* With sharded state, each of the n sums covers only this rank's chunks. Adds the other
   ranks' values to each sum. */
static void stx__sum_over_shards(stx_ctx *x, double *sums, size_t n) {
    if (x->group.shard && stx_ok(x)) x->group.ops->sum_ranks(x, sums, n);
}

/* With sharded state, broadcasts the parameters that each rank has updated. Clears the
   gradients, because outside this rank's shard they are not averaged. */
static void stx__spread_params(stx_optim *o) {
    stx_params *p = o->params;
    stx_ctx *x = p->ctx;
    size_t i;
    int r;
    if (!x->group.shard) return;
    for (i = 0; i < p->count; i++) {
        stx_tensor *t = p->tensor[i];
        for (r = 0; r < x->group.ranks && stx_ok(x); r++) {
            stx__shard s = stx__shard_of(o, i, (size_t)r, (size_t)x->group.ranks);
            if (s.begin < s.end) x->group.ops->spread(x, t->data + s.begin, s.end - s.begin, r);
        }
    }
    x->group.ops->wait(x, NULL, 0);

    /* Kernels that write parameters also update the bf16 copies of these parameters, but
       a broadcast by the back end does not. Computing p = 1 * p updates the copies. Only
       a GPU stores bf16, and there the input of stx_axpy may be its output. */
    for (i = 0; i < p->count && stx__stores_bf16(x); i++) {
        const stx_tensor *t = p->tensor[i];
        if (t->needs_grad) STX_RUN(x, stx_axpy, (x, t->data, t->data, t->size, 1, 0));
    }
    STX_RUN(x, stx_fill, (x, p->grads, p->grads_size, 0));
}

#if defined(SEQTX_MPI) || defined(SEQTX_NCCL)

/* Records that node number `node` of the tape adds to the gradients [lo, hi). */
static void stx__bucket_used(const stx_params *p, const stx_real *lo, const stx_real *hi,
                             size_t node) {
    const stx__buckets *b = p->buckets;
    size_t k = 0, last = b->count, from, to;
    if (lo < p->grads) lo = p->grads;
    if (hi > p->grads + p->grads_size) hi = p->grads + p->grads_size;
    if (lo >= hi) return;
    from = (size_t)(lo - p->grads);
    to = (size_t)(hi - p->grads);

    /* binary search for the bucket that contains element `from` */
    while (last - k > 1) {
        const size_t mid = (k + last) / 2;
        if (b->at[mid] <= from)
            k = mid;
        else
            last = mid;
    }
    for (; k < b->count && b->at[k] < to; k++) b->until[k] = node;
}

/* Finds when each bucket will be complete, and returns the number of nodes on the tape.
   The walk starts at the newest node, so `until` is last set by the oldest node that
   adds to the bucket. stx_backward reaches that node last. */
static size_t stx__backward_begin(stx_ctx *x) {
    const stx_params *p = x->group.sending;
    size_t nodes = 0, k;
    const stx__node *node;
    int i;
    for (node = x->tape.last; node; node = node->prev) nodes++;
    for (k = 0; k < p->buckets->count; k++) p->buckets->until[k] = nodes;

    for (node = x->tape.last, k = nodes; node; node = node->prev) {
        k--;
        for (i = 0; i < STX__INS; i++)
            if (node->in[i] && node->in[i]->needs_grad && stx__has_param_grad(node->in[i])) {
                const stx_real *g = stx__param_grad(x, node->in[i]);
                stx__bucket_used(p, g, g + node->in[i]->size, k);
            }
        if (node->back == stx__recompute_back) {
            const stx__recompute_save *s = (const stx__recompute_save *)node->save;
            if (s->uses.lo) stx__bucket_used(p, s->uses.lo, s->uses.hi, k);
        }
    }
    return nodes;
}

/* Sends the buckets that are complete when `left` nodes are left on the tape. */
static void stx__backward_step(stx_ctx *x, size_t left) {
    stx_params *p = x->group.sending;
    const stx__buckets *b = p->buckets;
    while (b->sent && left <= b->until[b->sent - 1] && stx_ok(x)) stx__send_bucket(p);
    if (b->sent < b->count && x->group.ops->poll) x->group.ops->poll(x);
}

#endif
