#pragma once
#include "common.cuh"
#include "wait.cuh"
#include "sums.cuh"


// >>gate

#ifdef SEQTX_PAR_H
/* Kernels for seqtx_par.h. The gate of a network block has a value per branch, or one
   per branch and draw. They are computed in double, as on the CPU, and stay on the device
   from the noise to the parameter gradients. The kernels have arrays of N branches: N is
   3 for gates with three branches, otherwise STX_PAR_MAX_BRANCHES. */
typedef struct stx__par_gate {
    size_t R, uniforms_stride;
    int branches, form, hard, noisy, latency_w;
    uint64_t seed, stream, first;
    const uint64_t *shift;
    stx__array al, tau, uniforms, cost, before, w, y, lat, dw, dlat, dal, dbefore;
} stx__par_gate;

static stx__par_gate stx__par_gate_of(stx_ctx *x, const stx_par_gate_args *a) {
    stx__par_gate g;
    memset(&g, 0, sizeof g);
    g.R = a->R;
    g.uniforms_stride = a->uniforms_stride;
    g.branches = a->branches ? a->branches : 3;
    g.form = a->form;
    g.hard = a->hard;
    g.noisy = a->noisy;
    g.latency_w = a->latency_w;
    g.seed = a->seed;
    g.stream = a->stream;
    g.first = a->first;
    g.shift = stx__gpu(x)->shift;
    g.al = stx__array_of(x, a->al);
    g.tau = stx__array_of(x, a->tau);
    g.uniforms = stx__array_of(x, a->uniforms);
    g.cost = stx__array_of(x, a->cost);
    g.before = stx__array_of(x, a->before);
    g.w = stx__array_of(x, a->w);
    g.y = stx__array_of(x, a->y);
    g.lat = stx__array_of(x, a->lat);
    g.dw = stx__array_of(x, a->dw);
    g.dlat = stx__array_of(x, a->dlat);
    g.dal = stx__array_of(x, a->dal);
    g.dbefore = stx__array_of(x, a->dbefore);
    return g;
}

/* Returns whether the gate has branch k. */
template <int N> static __device__ __forceinline__ int stx__par_has(const stx__par_gate &a, int k) {
    return N == 3 || k < a.branches;
}

/* Returns the number of branches. */
template <int N> static __device__ __forceinline__ size_t stx__par_count(const stx__par_gate &a) {
    return N == 3 ? 3 : (size_t)a.branches;
}

/* Computes pi, ln_pi (ln p or, with STX_PAR_FORM_PI, ln pi) and p = pi / sum pi, like
   the CPU function stx__par_probabilities. Returns sum pi. */
template <int N>
static __device__ __forceinline__ double stx__par_probabilities(const stx__par_gate &a,
                                                                double (&ln_pi)[N], double (&pi)[N],
                                                                double (&p)[N]) {
    double al[N], top, sum = 0;
    for (int k = 0; k < N; k++)
        al[k] = stx__par_has<N>(a, k) ? (double)stx__get(a.al, (size_t)k) : 0;
    top = al[0];
    for (int k = 1; k < N; k++)
        if (stx__par_has<N>(a, k) && al[k] > top) top = al[k];
    for (int k = 0; k < N; k++) {
        pi[k] = 0;
        if (!stx__par_has<N>(a, k)) continue;
        if (al[k] != al[k])
            pi[k] = al[k];
        else if (a.form == STX_PAR_FORM_PI)
            pi[k] = (al[k] > 0 ? al[k] : 0) + 1e-5;
        else
            pi[k] = exp(al[k] - top);
        sum += pi[k];
    }
    for (int k = 0; k < N; k++) {
        ln_pi[k] = a.form == STX_PAR_FORM_PI ? log(pi[k]) : al[k] - top - log(sum);
        p[k] = pi[k] / sum;
    }
    return sum;
}

/* Returns whether the latency is computed from p. */
static __device__ __forceinline__ int stx__par_of_p(const stx__par_gate &a) {
    return a.lat.p && a.latency_w == STX_PAR_LATENCY_OF_P;
}

/* Returns whether the latency is computed from w. */
static __device__ __forceinline__ int stx__par_of_w(const stx__par_gate &a) {
    return a.lat.p && a.latency_w == STX_PAR_LATENCY_OF_W;
}

/* Sets lat to the latency of this network block plus the latency of the preceding
   blocks. */
static __device__ __forceinline__ void stx__par_gate_set_latency(const stx__par_gate &a,
                                                                 double lat) {
    stx__put(a.lat, 0, (float)(lat + (a.before.p ? (double)stx__get(a.before, 0) : 0)));
}

/* Computes y and w of each draw, and the latency. One thread per draw, T draws per
   block. If the latency is computed from w and there are several blocks, each block
   stores its sum over draws in `part` (blocks). The launch bound is T threads and one
   block per multiprocessor, because double arithmetic uses many registers. */
template <int T, int N>
STX__GLOBAL(T, 1)
stx__par_gate_fwd_kernel(stx__par_gate a, double *part) {
    STX__SHARED(double, sh, 32);
    const size_t r = (size_t)blockIdx.x * T + threadIdx.x, K = stx__par_count<N>(a);
    double ln_pi[N], pi[N], p[N], v[N], lat = 0;
    (void)stx__par_probabilities(a, ln_pi, pi, p);
    if (r < a.R) {
        const double tau = a.noisy ? (double)stx__get(a.tau, 0) : 1;
        double sum = 0, top;
        int best = 0;
        uint4 bits = make_uint4(0, 0, 0, 0), more = bits;
        if (a.noisy && !a.uniforms.p) {
            bits = stx__philox(a.seed, a.stream + *a.shift, a.first + (uint64_t)r);
            if (N > 4 && K > 4)
                more = stx__philox(a.seed, a.stream + *a.shift + ((uint64_t)1 << 61),
                                   a.first + (uint64_t)r);
        }
        const uint32_t word[8] = {bits.x, bits.y, bits.z, bits.w, more.x, more.y, more.z, more.w};
  #pragma unroll
        for (int k = 0; k < N; k++) {
            double u;
            v[k] = 0;       /* compared below before stx__par_has is known */
            if (!stx__par_has<N>(a, k)) continue;
            if (a.noisy && a.uniforms.p)
                u = (double)stx__get(a.uniforms, r * a.uniforms_stride + (size_t)k);
            else
                u = ((double)(word[k] >> 9) + 0.5) / 8388608;
            v[k] = (ln_pi[k] + (a.noisy ? -log(-log(u)) : 0)) / tau;
        }
        top = v[0];
  #pragma unroll
        for (int k = 1; k < N; k++)
            if (stx__par_has<N>(a, k) && v[k] > top) {
                top = v[k];
                best = k;
            }
  #pragma unroll
        for (int k = 0; k < N; k++)
            if (stx__par_has<N>(a, k)) sum += v[k] = exp(v[k] - top);
  #pragma unroll
        for (int k = 0; k < N; k++) {
            double y;
            if (!stx__par_has<N>(a, k)) continue;
            y = v[k] / sum;
            stx__put(a.y, K * r + (size_t)k, (float)y);
            if (a.hard && y == y) y = k == best;
            stx__put(a.w, K * r + (size_t)k, (float)y);
            if (stx__par_of_w(a)) lat += y * (double)stx__get(a.cost, (size_t)k) / (double)a.R;
        }
    }
    if (stx__par_of_w(a)) {
        lat = stx__row_sum<T>(lat, sh);
        if (part && threadIdx.x == 0) part[blockIdx.x] = lat;
    } else {
        for (int k = 0; k < N && a.lat.p && stx__par_has<N>(a, k); k++)
            lat += p[k] * (double)stx__get(a.cost, (size_t)k);
    }
    if (a.lat.p && !part && blockIdx.x == 0 && threadIdx.x == 0)
        stx__par_gate_set_latency(a, lat);
}

/* Adds the sums of the blocks. One block: a thread adds every 256th sum, then a fixed
   tree adds the threads' sums. */
STX__GLOBAL(256) stx__par_gate_lat_kernel(stx__par_gate a, const double *part, size_t blocks) {
    STX__SHARED(double, sh, 32);
    double lat = 0;
    for (size_t i = threadIdx.x; i < blocks; i += 256) lat += part[i];
    lat = stx__row_sum<256>(lat, sh);
    if (threadIdx.x == 0) stx__par_gate_set_latency(a, lat);
}

/* Rejects a call with more than 2^36 draws. The limit keeps the grid below 2^31 blocks.
   Returns nonzero after an error. */
static int stx__par_gate_refused(stx_ctx *x, const stx_par_gate_args *a, const char *what) {
    if (stx_ok(x) && a->R > (size_t)1 << 36)
        stx_fail(x, STX_ERR_SHAPE, "%s: R: expected at most 2^36 draws, got %zu", what, a->R);
    return !stx_ok(x);
}

void stx_par_gate_fwd_cuda(stx_ctx *x, const stx_par_gate_args *a) {
    const size_t blocks = a->R ? (a->R + 255) / 256 : 1;
    double *part = NULL;
    stx__par_gate g;
    if (stx__par_gate_refused(x, a, "stx_par_gate_fwd")) return;
    g = stx__par_gate_of(x, a);
    if (blocks > 1 && a->lat && a->latency_w == STX_PAR_LATENCY_OF_W
        && !(part = (double *)stx__scratch_of(x, blocks * sizeof *part, "stx_par_gate_fwd")))
        return;
    if (a->R <= 32)
        STX__CHOOSE(N, g.branches, (3, STX_PAR_MAX_BRANCHES),
                    STX__RUN_KERNEL(x, "stx_par_gate_fwd", (stx__par_gate_fwd_kernel<32, N>), 1, 32,
                                    0, g, part));
    else
        STX__CHOOSE(N, g.branches, (3, STX_PAR_MAX_BRANCHES),
                    STX__RUN_KERNEL(x, "stx_par_gate_fwd", (stx__par_gate_fwd_kernel<256, N>),
                                    (unsigned)blocks, 256, 0, g, part));
    if (part)
        STX__RUN_KERNEL(x, "stx_par_gate_fwd", stx__par_gate_lat_kernel, 1, 256, 0, g, part,
                        blocks);
}

/* Adds the parameter gradients, in one thread. Forward: w = y =
   softmax((ln pi + noise) / tau), and lat = before + sum_k p_k cost_k or, from w,
   before + the mean over draws of sum_k w_k cost_k. With ds and c_k as in
   stx_par_gate_args:

       LOGITS   dal_k += ds_k - p_k sum ds + p_k c_k
       PI       dal_k += ds_k / pi_k + c_k / sum pi, where al_k >= 0 */
template <int N>
static __device__ __forceinline__ void stx__par_gate_add_grads(const stx__par_gate &a,
                                                               const double (&ds)[N],
                                                               double dlat) {
    double ln_pi[N], pi[N], p[N], mean_cost = 0, ds_sum = ds[0];
    const double pi_sum = stx__par_probabilities(a, ln_pi, pi, p);
    for (int k = 1; k < N; k++) ds_sum += ds[k];
    for (int k = 0; k < N && stx__par_of_p(a) && stx__par_has<N>(a, k); k++)
        mean_cost += p[k] * (double)stx__get(a.cost, (size_t)k);
    for (int k = 0; k < N && stx__par_has<N>(a, k); k++) {
        double c = 0;
        if (stx__par_of_p(a)) c = dlat * ((double)stx__get(a.cost, (size_t)k) - mean_cost);
        if (a.form == STX_PAR_FORM_LOGITS)
            stx__add(a.dal, (size_t)k, (float)(ds[k] - p[k] * ds_sum + p[k] * c), 1);
        else if (!(stx__get(a.al, (size_t)k) < 0))
            stx__add(a.dal, (size_t)k, (float)(ds[k] / pi[k] + c / pi_sum), 1);
    }
}

static __device__ __forceinline__ double stx__par_gate_dlat(const stx__par_gate &a) {
    return a.lat.p && a.dlat.p ? (double)stx__get(a.dlat, 0) : 0;
}

/* Backward. A block sums over `each` draws, a thread over every T-th of them. If there
   are several blocks, each stores its sums in `part` (blocks,N), and
   stx__par_gate_sum_kernel adds them. */
template <int T, int N>
STX__GLOBAL(T)
stx__par_gate_bwd_kernel(stx__par_gate a, double *part, size_t each) {
    STX__SHARED(double, sh, 32);
    const size_t lo = (size_t)blockIdx.x * each, hi = lo + each < a.R ? lo + each : a.R;
    const double dlat = stx__par_gate_dlat(a),
                 tau = a.noisy && a.dal.p ? (double)stx__get(a.tau, 0) : 1;
    const size_t K = stx__par_count<N>(a);
    double s[N] = {0};
    if (a.dal.p)
        for (size_t r = lo + threadIdx.x; r < hi; r += T) {
            double y[N] = {0}, dw[N] = {0}, dot = 0;
  #pragma unroll
            for (int k = 0; k < N; k++) {
                if (!stx__par_has<N>(a, k)) continue;
                y[k] = (double)stx__get(a.y, K * r + (size_t)k);
                dw[k] = a.dw.p ? (double)stx__get(a.dw, K * r + (size_t)k) : 0;
                if (stx__par_of_w(a))
                    dw[k] += dlat * (double)stx__get(a.cost, (size_t)k) / (double)a.R;
                dot += y[k] * dw[k];
            }
  #pragma unroll
            for (int k = 0; k < N; k++) s[k] += y[k] * (dw[k] - dot) / tau;
        }
  #pragma unroll
    for (int k = 0; k < N; k++) {
        s[k] = stx__row_sum<T>(s[k], sh);
        if (part && threadIdx.x == 0) part[N * (size_t)blockIdx.x + (size_t)k] = s[k];
    }
    if (threadIdx.x || blockIdx.x) return;
    if (a.dbefore.p && a.lat.p) stx__add(a.dbefore, 0, (float)dlat, 1);
    if (a.dal.p && !part) stx__par_gate_add_grads(a, s, dlat);
}

template <int N>
STX__GLOBAL(256)
stx__par_gate_sum_kernel(stx__par_gate a, const double *part, size_t blocks) {
    STX__SHARED(double, sh, 32);
    double s[N] = {0};
    for (size_t i = threadIdx.x; i < blocks; i += 256)
        for (int k = 0; k < N; k++) s[k] += part[N * i + (size_t)k];
    for (int k = 0; k < N; k++) s[k] = stx__row_sum<256>(s[k], sh);
    if (threadIdx.x == 0) stx__par_gate_add_grads(a, s, stx__par_gate_dlat(a));
}

void stx_par_gate_bwd_cuda(stx_ctx *x, const stx_par_gate_args *a) {
    const size_t each = stx__chunk(a->R, 1024, 1024), blocks = a->R ? (a->R + each - 1) / each : 1;
    double *part = NULL;
    stx__par_gate g;
    if (stx__par_gate_refused(x, a, "stx_par_gate_bwd")) return;
    g = stx__par_gate_of(x, a);
    if (blocks > 1 && a->dal
        && !(part = (double *)stx__scratch_of(x, STX_PAR_MAX_BRANCHES * blocks * sizeof *part,
                                              "stx_par_gate_bwd")))
        return;
    if (a->R <= 32)
        STX__CHOOSE(N, g.branches, (3, STX_PAR_MAX_BRANCHES),
                    STX__RUN_KERNEL(x, "stx_par_gate_bwd", (stx__par_gate_bwd_kernel<32, N>), 1, 32,
                                    0, g, part, each));
    else
        STX__CHOOSE(N, g.branches, (3, STX_PAR_MAX_BRANCHES),
                    STX__RUN_KERNEL(x, "stx_par_gate_bwd", (stx__par_gate_bwd_kernel<256, N>),
                                    (unsigned)blocks, 256, 0, g, part, each));
    if (part)
        STX__CHOOSE(N, g.branches, (3, STX_PAR_MAX_BRANCHES),
                    STX__RUN_KERNEL(x, "stx_par_gate_bwd", stx__par_gate_sum_kernel<N>, 1, 256, 0,
                                    g, part, blocks));
}
#endif /* SEQTX_PAR_H */
