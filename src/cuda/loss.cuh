#pragma once
#include "common.cuh"
#include "wait.cuh"
#include "sums.cuh"
#include "softmax.cuh"


// >>mean

void stx_mean_fwd_cuda(stx_ctx *x, stx_real *y, const stx_real *a, size_t n) {
    stx__sum_cuda(x, "stx_mean_fwd", STX__SUM, y, a, NULL, n, (double)n, 0);
}

void stx_sum_fwd_cuda(stx_ctx *x, stx_real *y, const stx_real *a, size_t n) {
    stx__sum_cuda(x, "stx_sum_fwd", STX__SUM, y, a, NULL, n, 1, 0);
}

/* da (n) += dy (1) / divisor. A thread handles W adjacent elements at a time. */
template <int W>
STX__GLOBAL(256)
stx__mean_bwd_kernel(stx__array da, stx__array dy, size_t n, float divisor) {
    float g = stx__get(dy, 0) / divisor;
    STX__STEP(i, n, W) {
        float v[W];
        for (int e = 0; e < W; e++) v[e] = g;
        stx__addn<W>(da, i, v, 1);
    }
}

static void stx__mean_bwd(stx_ctx *x, const char *name, stx_real *da, const stx_real *dy, size_t n,
                          float divisor) {
    stx__array D = stx__array_of(x, da), G = stx__array_of(x, dy);
    const int four = n % 4 == 0 && stx__aligned4(D);
    if (n) STX__RUN_BY(x, name, four, stx__mean_bwd_kernel, n, D, G, n, divisor);
}

void stx_mean_bwd_cuda(stx_ctx *x, stx_real *da, const stx_real *dy, size_t n) {
    stx__mean_bwd(x, "stx_mean_bwd", da, dy, n, (float)n);
}

void stx_sum_bwd_cuda(stx_ctx *x, stx_real *da, const stx_real *dy, size_t n) {
    stx__mean_bwd(x, "stx_sum_bwd", da, dy, n, 1.0f);
}

/* Kernel arguments derived from stx_means_args. In the backward pass, a[k] is da[k].
   Bit k of `overwrite` is set if da[k] is to be overwritten instead of incremented. */
struct stx__means_nums {
    stx__array a[STX_MEANS], y0, y, dy;
    size_t n[STX_MEANS];
    int count, overwrite;
    float s;
};

/* y (1) = y0 + s sum_k mean(a[k]), a[k] (n[k]). The arrays are small, so there is one
   block. Each thread adds every 256th element of each array in order, in double, then
   the threads' sums are added in a fixed tree. */
STX__GLOBAL(256) stx__add_means_fwd_kernel(stx__means_nums m) {
    STX__SHARED(double, sh, 32);
    double mean = 0;
    for (int k = 0; k < m.count; k++) {
        double sum = 0;
        for (size_t i = threadIdx.x; i < m.n[k]; i += 256) sum += stx__get(m.a[k], i);
        mean += sum / (double)m.n[k];
    }
    mean = stx__row_sum<256>(mean, sh);
    if (threadIdx.x == 0) stx__put(m.y, 0, (float)((double)stx__get(m.y0, 0) + (double)m.s * mean));
}

/* da[k] (n[k]) = or += s dy / n[k]. One block handles the arrays one after the other,
   because they may overlap. */
STX__GLOBAL(256) stx__add_means_bwd_kernel(stx__means_nums m) {
    const float g = m.s * stx__get(m.dy, 0);
    for (int k = 0; k < m.count; k++) {
        if (!m.a[k].p) continue;
        __syncthreads();
        for (size_t i = threadIdx.x; i < m.n[k]; i += 256)
            stx__add(m.a[k], i, g / (float)m.n[k], !(m.overwrite >> k & 1));
    }
}

static stx__means_nums stx__means_of(const stx_ctx *x, const stx_means_args *a, int backward) {
    stx__means_nums m;
    memset(&m, 0, sizeof m);
    m.count = (int)a->count;
    m.overwrite = a->overwrite;
    m.s = a->s;
    for (int k = 0; k < m.count; k++) {
        m.a[k] = stx__array_of(x, backward ? a->da[k] : a->a[k]);
        m.n[k] = a->n[k];
    }
    m.y0 = stx__array_of(x, a->y0);
    m.y = stx__array_of(x, a->y);
    m.dy = stx__array_of(x, a->dy);
    return m;
}

void stx_add_means_fwd_cuda(stx_ctx *x, const stx_means_args *a) {
    STX__RUN_KERNEL(x, "stx_add_means_fwd", stx__add_means_fwd_kernel, 1, 256, 0,
                    stx__means_of(x, a, 0));
}

void stx_add_means_bwd_cuda(stx_ctx *x, const stx_means_args *a) {
    STX__RUN_KERNEL(x, "stx_add_means_bwd", stx__add_means_bwd_kernel, 1, 256, 0,
                    stx__means_of(x, a, 1));
}


// >>cross_entropy

/* The weights of a loss over tokens, see stx__loss_weights_args. Sets w (N) to weights
   / divisor and `known` (N) to targets. In ignored rows, w is set to 0 and `known` to
   -1. If weights.p is NULL, all weights are 1. If divisor is 0, the divisor is N
   mean[0] or, if mean.p is NULL, the sum of the weights of the rows that are not
   ignored. One block computes that sum: each thread adds every 1024th row in order,
   then the threads' sums are added in a fixed tree. */
STX__GLOBAL(1024)
stx__loss_weights_kernel(stx__array w, int32_t *known, const int32_t *targets, stx__array weights,
                         size_t N, int ignore, int32_t ignored, double divisor, stx__array mean) {
    STX__SHARED(double, sh, 32);
    double s = 0;
    if (divisor == 0 && mean.p) {
        divisor = (double)stx__get(mean, 0) * (double)N;
    } else if (divisor == 0) {
        for (size_t n = threadIdx.x; n < N; n += 1024)
            if (!(ignore && targets[n] == ignored) && targets[n] >= 0)
                s += weights.p ? (double)stx__get(weights, n) : 1;
        divisor = stx__row_sum<1024>(s, sh);
    }
    for (size_t n = threadIdx.x; n < N; n += 1024) {
        int32_t id = ignore && targets[n] == ignored ? -1 : targets[n];
        float v = 0;
        if (id >= 0 && divisor != 0)
            v = (float)((weights.p ? (double)stx__get(weights, n) : 1) / divisor);
        known[n] = id;
        stx__put(w, n, v);
    }
}

void stx__loss_weights_cuda(stx_ctx *x, const stx__loss_weights_args *a) {
    stx__array W = stx__array_of(x, a->w), A = stx__array_of(x, a->weights),
               M = stx__array_of(x, a->mean);
    if (a->N)
        STX__RUN_KERNEL(x, "stx_cross_entropy_tokens", stx__loss_weights_kernel, 1, 1024, 0, W,
                        a->known, a->targets, A, a->N, a->ignore, a->ignored_id, a->divisor, M);
}

/* For each row n of logits (N,V), with row stride ld and target = targets[n]:

       row_max[n] = max_v logits[n,v]
       inv_sum[n] = 1 / sum_v e^(logits[n,v] - row_max[n])
       nll[n]     = row_max[n] - log inv_sum[n] - logits[n,target]
       loss[n]    = w[n] nll[n], in double

   nll.p and w.p may be NULL; without w, weights are 1. All four are 0 for rows with a
   negative target. T threads handle a row in one pass. stx__total_kernel then adds the
   losses in a fixed tree. */
template <int T>
STX__GLOBAL(STX__ROW_BLOCK(T))
stx__token_loss_fwd_kernel(double *loss, stx__array nll, stx__array row_max, stx__array inv_sum,
                           stx__array logits, const int32_t *targets, stx__array w, size_t N,
                           size_t V, size_t ld) {
    STX__SHARED(float, sh, 32);
    STX__EACH_ROW(n, N, T) {
        const int32_t target = targets[n];
        stx__lse l = {0, 0};
        if (target >= 0) l = stx__row_lse<T>(logits, n * ld, V, sh);
        if (threadIdx.x % T == 0) {
            double v = target < 0 ? 0
                                  : (double)l.max + log((double)l.sum)
                                        - (double)stx__get(logits, n * ld + (size_t)target);
            stx__put(row_max, n, l.max);
            stx__put(inv_sum, n, target < 0 ? 0 : 1 / l.sum);
            if (nll.p) stx__put(nll, n, (float)v);
            loss[n] = w.p && target >= 0 ? (double)stx__get(w, n) * v : v;
        }
    }
}

void stx_token_loss_fwd_cuda(stx_ctx *x, const stx_token_loss_args *a) {
    static const char name[] = "stx_token_loss_fwd";
    const size_t N = a->N, V = a->V;
    stx__array L = stx__array_of(x, a->loss), P = stx__array_of(x, a->nll),
               M = stx__array_of(x, a->row_max), I = stx__array_of(x, a->inv_sum),
               A = stx__array_of(x, a->logits), W = stx__array_of(x, a->weights);
    double *part;
    if (!N || !V || !(part = (double *)stx__scratch_of(x, N * sizeof *part, name))) return;
    STX__RUN_ROWS(x, name, N, V, stx__token_loss_fwd_kernel<T>, part, P, M, I, A, a->targets, W, N,
                  V, a->ld);
    STX__RUN_KERNEL(x, name, stx__total_kernel, 1, 1024, 0, L, part, N, a->divisor, 0);
}

/* T threads compute row n of dlogits (N,V):

       dlogits[n,v] = or += g (e^(logits[n,v] - row_max[n]) inv_sum[n] - [v = target])

   Without accumulate, dlogits may be logits, because each element is read and written
   by the same thread. The elements from V to ld are then set to 0. If `known` is 0, the
   row has no target: the caller passes target >= V and g = 0, and dlogits is 0 even if
   logits contains a NaN. */
template <int T>
static __device__ void stx__token_loss_row(stx__array dlogits, stx__array row_max,
                                           stx__array inv_sum, stx__array logits, size_t n,
                                           size_t V, size_t ld, size_t target, int known, float g,
                                           int accumulate) {
    const size_t start = n * ld, t = threadIdx.x % T;
    const size_t head = stx__same_head(dlogits, logits) ? stx__row_head(logits, start, V) : V,
                 fours = (V - head) / 4;
    const float m = stx__get(row_max, n), f = g * stx__get(inv_sum, n);
    for (size_t i = t; i < V - 4 * fours; i += T) {
        size_t v = stx__row_edge(i, head, fours);
        float d = known ? f * expf(stx__get(logits, start + v) - m) : 0,
              was = accumulate ? stx__get(dlogits, start + v) : 0;
        stx__put(dlogits, start + v, d + was - (v == target ? g : 0));
    }
#pragma unroll 2
    for (size_t q = t; q < fours; q += T) {
        size_t v = head + 4 * q;
        float d[4], was[4] = {0, 0, 0, 0};
        stx__getn<4>(d, logits, start + v);
        if (accumulate) stx__getn<4>(was, dlogits, start + v);
        for (int e = 0; e < 4; e++)
            d[e] = (known ? f * expf(d[e] - m) : 0) + was[e] - (v + e == target ? g : 0);
        stx__putn<4>(dlogits, start + v, d);
    }
    for (size_t v = V + t; v < ld && !accumulate; v += T) stx__put(dlogits, start + v, 0);
}

/* dlogits (N,V) = or += dloss w[n] / divisor times the gradient of the row's nll. If w.p
   is NULL, all weights are 1. A row with a negative target is set to 0, or with
   accumulate is left unchanged. T threads handle a row. The bound on blocks per
   multiprocessor keeps the compiler from spilling registers. */
template <int T>
STX__GLOBAL(STX__ROW_BLOCK(T), T > 256 ? 0 : 6)
stx__token_loss_bwd_kernel(stx__array dlogits, stx__array dloss, stx__array row_max,
                           stx__array inv_sum, stx__array logits, const int32_t *targets,
                           stx__array w, size_t N, size_t V, size_t ld, double divisor,
                           int accumulate) {
    const float scale = (float)((double)stx__get(dloss, 0) / divisor);
    STX__EACH_ROW(n, N, T) {
        const int known = targets[n] >= 0;
        const float g = w.p ? scale * stx__get(w, n) : scale;
        if (!known && accumulate) continue;
        stx__token_loss_row<T>(dlogits, row_max, inv_sum, logits, n, V, ld,
                               known ? (size_t)targets[n] : V, known, known ? g : 0, accumulate);
    }
}

void stx_token_loss_bwd_cuda(stx_ctx *x, const stx_token_loss_args *a) {
    const size_t N = a->N, V = a->V;
    stx__array D = stx__array_of(x, a->dlogits), G = stx__array_of(x, a->dloss),
               M = stx__array_of(x, a->row_max), I = stx__array_of(x, a->inv_sum),
               A = stx__array_of(x, a->logits), W = stx__array_of(x, a->weights);
    const int accumulate = a->accumulate && a->dlogits != a->logits;
    if (N && V)
        STX__RUN_ROWS(x, "stx_token_loss_bwd", N, V, stx__token_loss_bwd_kernel<T>, D, G, M, I, A,
                      a->targets, W, N, V, a->ld, a->divisor, accumulate);
}

/* Returns the column of the head's logits that the loss reads for an id in cluster c:
   the id itself in cluster 0, otherwise the column of its cluster. Without a head,
   returns the row r of the id in its cluster, or 0 if the id does not fit there. */
static __device__ __forceinline__ int32_t stx__cluster_at(const stx__cluster_sort_args &k, int K,
                                                          int c, int32_t id, size_t r, int fits) {
    if (!k.head) return fits ? (int32_t)r : 0;
    if (c == 0) return id;
    return (int32_t)(k.end[0] + (size_t)(k.forward_columns ? c - 1 : K - 1 - c));
}

/* Sorts the ids (n) by cluster with a stable sort, see stx__cluster_sort_args. A block
   handles STX__CLUSTER_IDS ids. The rank of an id in its cluster is the number of earlier
   ids in the same cluster: in earlier blocks (`earlier`), in earlier warps (`count`) and
   in earlier lanes (`before`). If there are several blocks, a first kernel counts the
   ids of each block.

   stx__cluster_votes returns the cluster of an id, or k.count if it has none. Each warp
   counts its ids per cluster with a ballot. */
enum { STX__CLUSTER_IDS = 256, STX__CLUSTER_WARPS = STX__CLUSTER_IDS / 32 };

static __device__ __forceinline__ int stx__cluster_votes(unsigned *count, unsigned &before,
                                                         int32_t id,
                                                         const stx__cluster_sort_args &k) {
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int K = (int)k.count;
    int c = id < 0 ? K : 0;
    before = 0;
    while (c < K && (size_t)id >= k.end[c]) c++;
    for (int e = 0; e < K; e++) {
        unsigned votes = __ballot_sync(STX__ALL, c == e);
        if (lane == 0) count[e * STX__CLUSTER_WARPS + warp] = (unsigned)__popc(votes);
        if (c == e) before = (unsigned)__popc(votes & ((1u << lane) - 1));
    }
    return c;
}

/* Returns the number of ids of cluster c in the first `warps` warps. */
static __device__ __forceinline__ unsigned stx__cluster_count(const unsigned *count, int c,
                                                              unsigned warps) {
    unsigned sum = 0;
    for (unsigned w = 0; w < STX__CLUSTER_WARPS; w++)
        sum += w < warps ? count[c * STX__CLUSTER_WARPS + w] : 0;
    return sum;
}

/* counts (K,blocks) = the number of ids of each cluster in each block. */
STX__GLOBAL(STX__CLUSTER_IDS)
stx__cluster_count_kernel(unsigned *counts, const int32_t *ids, size_t n,
                          const stx__cluster_sort_args k) {
    STX__SHARED(unsigned, count, STX_MAX_CLUSTERS *STX__CLUSTER_WARPS);
    const size_t i = (size_t)blockIdx.x * STX__CLUSTER_IDS + threadIdx.x;
    unsigned before;
    (void)stx__cluster_votes(count, before, i < n ? ids[i] : -1, k);
    __syncthreads();
    if (threadIdx.x < k.count)
        counts[threadIdx.x * gridDim.x + blockIdx.x] =
            stx__cluster_count(count, (int)threadIdx.x, STX__CLUSTER_WARPS);
}

/* Writes the results. Warp c adds the counts of cluster c: those of earlier blocks and
   those of all blocks. */
STX__GLOBAL(STX__CLUSTER_IDS)
stx__cluster_sort_kernel(int32_t *local, int32_t *place, int32_t *at, int32_t *over,
                         const unsigned *counts, const int32_t *ids, size_t n,
                         const stx__cluster_sort_args k) {
    STX__SHARED(unsigned, count, STX_MAX_CLUSTERS *STX__CLUSTER_WARPS);
    STX__SHARED(unsigned, earlier, STX_MAX_CLUSTERS);
    STX__SHARED(unsigned, total, STX_MAX_CLUSTERS);
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const size_t i = (size_t)blockIdx.x * STX__CLUSTER_IDS + threadIdx.x;
    const int32_t id = i < n ? ids[i] : -1;
    const int K = (int)k.count;
    unsigned before;
    const int c = stx__cluster_votes(count, before, id, k);
    static_assert((int)STX_MAX_CLUSTERS <= (int)STX__CLUSTER_WARPS, "a warp per cluster");
    __syncthreads();
    if ((int)warp < K) {
        unsigned some = 0, all = 0;
        for (unsigned b = lane; b < gridDim.x; b += 32) {
            unsigned m = gridDim.x > 1 ? counts[warp * gridDim.x + b]
                                       : stx__cluster_count(count, (int)warp, STX__CLUSTER_WARPS);
            all += m;
            if (b < blockIdx.x) some += m;
        }
        earlier[warp] = __reduce_add_sync(STX__ALL, some);
        total[warp] = __reduce_add_sync(STX__ALL, all);
    }
    __syncthreads();

    if (i < n && c == K) at[i] = -1;
    if (c < K) {
        size_t r = k.first[c] + earlier[c] + stx__cluster_count(count, c, warp) + before;
        int fits = r < k.first[c + 1];
        at[i] = stx__cluster_at(k, K, c, id, r, fits);
        if (fits) {
            local[r] = id - (c ? (int32_t)k.end[c - 1] : 0);
            place[r] = (int32_t)i;
        }
    }

    for (int e = 0; e < K; e++) /* unused slots */
        for (size_t r = k.first[e] + total[e] + i; r < k.first[e + 1];
             r += (size_t)gridDim.x * STX__CLUSTER_IDS) {
            local[r] = k.leftover;
            place[r] = 0;
        }
    if (i == 0) {
        int more = 0;
        for (int e = k.head ? 1 : 0; e < K; e++) more |= total[e] > k.first[e + 1] - k.first[e];
        *over = more;
    }
}

void stx__cluster_sort_cuda(stx_ctx *x, const stx__cluster_sort_args *k) {
    const char *name = "stx_adaptive_softmax, sort";
    const unsigned blocks = stx__blocks(k->n, STX__CLUSTER_IDS, (size_t)1 << 30);
    unsigned *counts = NULL; /* (K,blocks) */
    if (blocks > 1) {
        counts = (unsigned *)stx__scratch_of(x, k->count * blocks * sizeof *counts, name);
        if (!counts) return;
        STX__RUN_KERNEL(x, name, stx__cluster_count_kernel, blocks, STX__CLUSTER_IDS, 0, counts,
                        k->ids, k->n, *k);
    }
    STX__RUN_KERNEL(x, name, stx__cluster_sort_kernel, blocks, STX__CLUSTER_IDS, 0, k->local,
                    k->place, k->at, k->over, counts, k->ids, k->n, *k);
}

/* y (n) = NaN if flag[0] is not 0. A thread writes an element at a time. */
STX__GLOBAL(256) stx__nan_if_kernel(stx__array y, size_t n, const int32_t *flag) {
    if (*flag) STX__STEP(i, n, 1) stx__put(y, i, nanf(""));
}

void stx__nan_if_cuda(stx_ctx *x, stx_real *y, size_t n, const int32_t *flag) {
    stx__array Y = stx__array_of(x, y);
    if (n)
        STX__RUN_KERNEL(x, "stx__nan_if", stx__nan_if_kernel, stx__grid(x, n), 256, 0, Y, n, flag);
}


// >>mse

/* loss (1) = mean (a - b)^2, where a and b are (n) */
void stx_mse_fwd_cuda(stx_ctx *x, stx_real *loss, const stx_real *a, const stx_real *b, size_t n) {
    stx__sum_cuda(x, "stx_mse_fwd", STX__SUM_SQUARES, loss, a, b, n, (double)n, 0);
}

/* Gradients of loss = mean (a - b)^2:
       da (n) += 2 (a - b) dloss / n
       db (n) -= 2 (a - b) dloss / n
   da.p and db.p may be NULL. A thread handles W adjacent elements at a time. */
template <int W>
STX__GLOBAL(256)
stx__mse_bwd_kernel(stx__array da, stx__array db, stx__array dloss, stx__array a, stx__array b,
                    size_t n) {
    float g = 2 * stx__get(dloss, 0) / (float)n;
    STX__STEP(i, n, W) {
        float v[W], w[W];
        stx__getn<W>(v, a, i);
        stx__getn<W>(w, b, i);
        for (int e = 0; e < W; e++) {
            v[e] = g * (v[e] - w[e]);
            w[e] = -v[e];
        }
        if (da.p) stx__addn<W>(da, i, v, 1);
        if (db.p) stx__addn<W>(db, i, w, 1);
    }
}

void stx_mse_bwd_cuda(stx_ctx *x, stx_real *da, stx_real *db, const stx_real *dloss,
                      const stx_real *a, const stx_real *b, size_t n) {
    stx__array D = stx__array_of(x, da), E = stx__array_of(x, db), G = stx__array_of(x, dloss),
               A = stx__array_of(x, a), B = stx__array_of(x, b);
    const int four =
        n % 4 == 0 && stx__aligned4(D) && stx__aligned4(E) && stx__aligned4(A) && stx__aligned4(B);
    if (n) STX__RUN_BY(x, "stx_mse_bwd", four, stx__mse_bwd_kernel, n, D, E, G, A, B, n);
}
