#pragma once
#include "common.cuh"
#include "sums.cuh"
#include "elementwise.cuh"
#include "comp.cuh"


// >>error

#ifdef SEQTX_COMPRESSIVE_H
/* Computes loss (1) = sum (a - t)^2 / count and rel_error (1) = sum (a - t)^2 / sum t^2
   (0 if sum t^2 is 0), over the rows of `a` and t (N,C) that are not marked in `skip`.
   The first kernel stores the two sums of each row in `work` (N,2). One warp per row. */
template <int W>
STX__GLOBAL(256)
stx__comp_error_kernel(double *work, stx__array a, stx__array t, const int32_t *skip, size_t N,
                       size_t C) {
    STX__WARPS(n, N) {
        double off = 0, all = 0;
        if (!skip || !skip[n])
            for (size_t c = threadIdx.x % 32 * W; c < C; c += 32 * W) {
                float v[W], w[W];
                stx__getn<W>(v, a, n * C + c);
                stx__getn<W>(w, t, n * C + c);
                for (int e = 0; e < W; e++) {
                    double d = (double)v[e] - (double)w[e];
                    off += d * d;
                    all += (double)w[e] * (double)w[e];
                }
            }
        off = stx__warp_sum_f64(off);
        all = stx__warp_sum_f64(all);
        if (threadIdx.x % 32 == 0) {
            work[2 * n] = off;
            work[2 * n + 1] = all;
        }
    }
}

/* The second kernel sums over all rows. One block: a thread adds every 1024th row, then
   a fixed tree adds the threads' sums. */
STX__GLOBAL(1024)
stx__comp_error_sum_kernel(stx__array loss, stx__array rel_error, const double *work, size_t N,
                           double count) {
    STX__SHARED(double, sh, 32);
    double off = 0, all = 0;
  #pragma unroll 4
    for (size_t n = threadIdx.x; n < N; n += 1024) {
        off += work[2 * n];
        all += work[2 * n + 1];
    }
    off = stx__row_sum<1024>(off, sh);
    all = stx__row_sum<1024>(all, sh);
    if (threadIdx.x) return;
    stx__put(loss, 0, (float)(off / count));
    stx__put(rel_error, 0, (float)(all > 0 ? off / all : 0));
}

void stx_comp_error_fwd_cuda(stx_ctx *x, const stx_comp_error_args *e) {
    stx__array A = stx__array_of(x, e->a), T = stx__array_of(x, e->target);
    int four = e->D % 4 == 0 && stx__aligned4(A) && stx__aligned4(T);
    if (e->N)
        STX__RUN_WARPS(x, "stx_comp_error_fwd", four, stx__comp_error_kernel, e->N, e->work, A, T,
                       e->skip, e->N, e->D);
    STX__RUN_KERNEL(x, "stx_comp_error_fwd", stx__comp_error_sum_kernel, 1, 1024, 0,
                    stx__array_of(x, e->loss), stx__array_of(x, e->rel_error), e->work, e->N,
                    e->count);
}

/* Gradient of loss = sum (a - t)^2 / count: da = or += 2 (a - t) dloss / count, or 0 in
   rows marked in `skip`. One warp per row. */
template <int W>
STX__GLOBAL(256)
stx__comp_error_bwd_kernel(stx__array da, stx__array dloss, stx__array a, stx__array t,
                           const int32_t *skip, size_t N, size_t C, double count,
                           int accumulate) {
    const float scale = (float)(2 * (double)stx__get(dloss, 0) / count);
    STX__WARPS(n, N) {
        const int out = skip && skip[n];
        if (out && accumulate) continue;
        for (size_t c = threadIdx.x % 32 * W; c < C; c += 32 * W) {
            float v[W] = {0}, w[W];
            if (!out) {
                stx__getn<W>(v, a, n * C + c);
                stx__getn<W>(w, t, n * C + c);
                for (int e = 0; e < W; e++) v[e] = scale * (v[e] - w[e]);
            }
            stx__addn<W>(da, n * C + c, v, accumulate);
        }
    }
}

void stx_comp_error_bwd_cuda(stx_ctx *x, const stx_comp_error_args *e) {
    stx__array D = stx__array_of(x, e->da), G = stx__array_of(x, e->dloss),
               A = stx__array_of(x, e->a), T = stx__array_of(x, e->target);
    int four = e->D % 4 == 0 && stx__aligned4(D) && stx__aligned4(A) && stx__aligned4(T);
    if (e->N && e->D)
        STX__RUN_WARPS(x, "stx_comp_error_bwd", four, stx__comp_error_bwd_kernel, e->N, D, G, A, T,
                       e->skip, e->N, e->D, e->count, e->accumulate);
}


// >>gates

/* The elementwise part of a gate (see stx_comp_gate_args). A thread processes W = 4 or
   1 adjacent elements at a time. The kind is selected outside the loop, so that each
   kind has a separate loop. */
typedef struct stx__comp_gate {
    int kind, accumulate;
    size_t n, D;
    stx__array x, y, p[4], out, dout, dx, dy, dp[4];
} stx__comp_gate;

/* Returns the number of planes of a gate kind. A plane has rows of D elements; p[0] and
   p[1] may each hold several planes side by side. GRU has r, z, n in p[0] and again in
   p[1]. In stx__comp_kind, X and Y are 1 if the kind uses x and y. */
static constexpr __host__ __device__ int stx__comp_planes(int kind) {
    switch (kind) {
    case STX_COMP_GATE_GRU: return 6;
    case STX_COMP_GATE_GTRXL: return 4;
    case STX_COMP_GATE_SIGTANH:
    case STX_COMP_GATE_RESET:
    case STX_COMP_GATE_GLU: return 2;
    default: return 1;
    }
}

template <int K> struct stx__comp_kind {
    static constexpr int P = stx__comp_planes(K);
    static constexpr int X = K != STX_COMP_GATE_GLU;
    static constexpr int Y = K == STX_COMP_GATE_INPUT || K == STX_COMP_GATE_OUTPUT
                             || K == STX_COMP_GATE_HIGHWAY;
    /* number of planes side by side in each p[i] */
    static constexpr int side = P == 6 ? 3 : 1 + (K == STX_COMP_GATE_GLU);
};

static __device__ __forceinline__ float stx__comp_sigmoid(float v) {
    return 1 / (1 + expf(-v));
}

/* These functions return the array that holds plane k, and the index of element i of
   the plane in this array. */
template <int K>
static __device__ __forceinline__ const stx__array &stx__comp_plane(const stx__array (&p)[4],
                                                                    int k) {
    return p[k / stx__comp_kind<K>::side];
}

template <int K>
static __device__ __forceinline__ size_t stx__comp_plane_at(const stx__comp_gate &a, size_t i,
                                                            int k) {
    constexpr int side = stx__comp_kind<K>::side;
    return side > 1 ? i + (side - 1) * a.D * (i / a.D) + (size_t)(k % side) * a.D : i;
}

template <int W, int K>
static __device__ __forceinline__ void stx__comp_gate_get(const stx__comp_gate &a, size_t i,
                                                          float (&x)[W], float (&y)[W],
                                                          float (&p)[6][W]) {
    if (stx__comp_kind<K>::X) stx__getn<W>(x, a.x, i);
    if (stx__comp_kind<K>::Y) stx__getn<W>(y, a.y, i);
  #pragma unroll
    for (int k = 0; k < stx__comp_kind<K>::P; k++)
        stx__getn<W>(p[k], stx__comp_plane<K>(a.p, k), stx__comp_plane_at<K>(a, i, k));
}

template <int W, int K>
static __device__ __forceinline__ void stx__comp_gate_forward(const stx__comp_gate &a) {
    STX__STEP(i, a.n, W) {
        float x[W] = {0}, y[W] = {0}, p[6][W];
        stx__comp_gate_get<W, K>(a, i, x, y, p);
  #pragma unroll
        for (int e = 0; e < W; e++) {
            if constexpr (K == STX_COMP_GATE_GRU) {
                float r = stx__comp_sigmoid(p[0][e] + p[3][e]),
                      z = stx__comp_sigmoid(p[1][e] + p[4][e]);
                float n = tanhf(fmaf(r, p[5][e], p[2][e]));
                x[e] = fmaf(z, x[e] - n, n);
            } else if constexpr (K == STX_COMP_GATE_GTRXL) {
                x[e] = fmaf(stx__comp_sigmoid(p[0][e] + p[1][e]), tanhf(p[2][e] + p[3][e]) - x[e],
                            x[e]);
            } else if constexpr (K == STX_COMP_GATE_RESET) {
                x[e] = stx__comp_sigmoid(p[0][e] + p[1][e]) * x[e];
            } else if constexpr (K == STX_COMP_GATE_GLU) {
                x[e] = p[0][e] * stx__phi(p[0][e]) * p[1][e];
            } else {
                float s = stx__comp_sigmoid(p[0][e]);
                if constexpr (K == STX_COMP_GATE_INPUT)
                    x[e] = fmaf(s, x[e], y[e]);
                else if constexpr (K == STX_COMP_GATE_OUTPUT)
                    x[e] = fmaf(s, y[e], x[e]);
                else if constexpr (K == STX_COMP_GATE_HIGHWAY)
                    x[e] = fmaf(s, x[e] - y[e], y[e]);
                else if constexpr (K == STX_COMP_GATE_SIGTANH)
                    x[e] = fmaf(s, tanhf(p[1][e]), x[e]);
                else
                    x[e] = 2 * s * x[e];
            }
        }
        stx__putn<W>(a.out, i, x);
    }
}

/* The values of W adjacent elements from which the gradients are computed */
template <int W> struct stx__comp_gate_values {
    float x[W], y[W], g[W], p[6][W];
};

template <int W, int K>
static __device__ __forceinline__ stx__comp_gate_values<W>
stx__comp_gate_values_at(const stx__comp_gate &a, size_t i) {
    stx__comp_gate_values<W> v = {};
    stx__getn<W>(v.g, a.dout, i);
    stx__comp_gate_get<W, K>(a, i, v.x, v.y, v.p);
    return v;
}

/* Computes the gradients of elements i .. i+W-1. Replaces v.p with the gradients of the
   planes. With g = dout, s' = s (1 - s) and out as in stx__comp_gate_forward, the
   gradients of GRU are (p_n is plane n of p[1]):

       dn = g (1 - z) (1 - n^2)    dz = g (x - n) z'    dr = dn p_n r'    dx = g z
       gradients of p[0]: dr, dz, dn; of p[1]: dr, dz, r dn */
template <int W, int K>
static __device__ __forceinline__ void stx__comp_gate_grads(const stx__comp_gate &a, size_t i,
                                                            stx__comp_gate_values<W> &v) {
    float(&x)[W] = v.x, (&y)[W] = v.y, (&g)[W] = v.g, (&p)[6][W] = v.p;
  #pragma unroll
    /* each value is replaced by its gradient */
    for (int e = 0; e < W; e++) {
        if constexpr (K == STX_COMP_GATE_GRU) {
            float r = stx__comp_sigmoid(p[0][e] + p[3][e]),
                  z = stx__comp_sigmoid(p[1][e] + p[4][e]);
            float n = tanhf(fmaf(r, p[5][e], p[2][e])), dn = g[e] * (1 - z) * fmaf(-n, n, 1.0f);
            p[0][e] = p[3][e] = dn * p[5][e] * r * (1 - r);
            p[1][e] = p[4][e] = g[e] * (x[e] - n) * z * (1 - z);
            p[2][e] = dn;
            p[5][e] = dn * r;
            x[e] = g[e] * z;
        } else if constexpr (K == STX_COMP_GATE_GTRXL) {
            float z = stx__comp_sigmoid(p[0][e] + p[1][e]), n = tanhf(p[2][e] + p[3][e]);
            p[0][e] = p[1][e] = g[e] * (n - x[e]) * z * (1 - z);
            p[2][e] = p[3][e] = g[e] * z * fmaf(-n, n, 1.0f);
            x[e] = g[e] * (1 - z);
        } else if constexpr (K == STX_COMP_GATE_RESET) {
            float s = stx__comp_sigmoid(p[0][e] + p[1][e]);
            p[0][e] = p[1][e] = g[e] * x[e] * s * (1 - s);
            x[e] = g[e] * s;
        } else if constexpr (K == STX_COMP_GATE_SIGTANH) {
            float s = stx__comp_sigmoid(p[0][e]), n = tanhf(p[1][e]);
            p[0][e] = g[e] * n * s * (1 - s);
            p[1][e] = g[e] * s * fmaf(-n, n, 1.0f);
            x[e] = g[e];
        } else if constexpr (K == STX_COMP_GATE_MOGRIFY) {
            float s = stx__comp_sigmoid(p[0][e]);
            p[0][e] = 2 * g[e] * x[e] * s * (1 - s);
            x[e] = 2 * g[e] * s;
        } else if constexpr (K == STX_COMP_GATE_GLU) {
            float u = p[0][e], phi = stx__phi(u);
            p[0][e] = g[e] * p[1][e] * fmaf(u, 0.39894228040143267794f * expf(-0.5f * u * u), phi);
            p[1][e] = g[e] * u * phi;
        } else if constexpr (K == STX_COMP_GATE_INPUT) {
            float s = stx__comp_sigmoid(p[0][e]);
            p[0][e] = g[e] * x[e] * s * (1 - s);
            x[e] = g[e] * s;
            y[e] = g[e];
        } else if constexpr (K == STX_COMP_GATE_OUTPUT) {
            float s = stx__comp_sigmoid(p[0][e]);
            p[0][e] = g[e] * y[e] * s * (1 - s);
            x[e] = g[e];
            y[e] = g[e] * s;
        } else {
            float s = stx__comp_sigmoid(p[0][e]);
            p[0][e] = g[e] * (x[e] - y[e]) * s * (1 - s);
            x[e] = g[e] * s;
            y[e] = g[e] * (1 - s);
        }
    }
    if (stx__comp_kind<K>::X) stx__addn<W>(a.dx, i, x, a.accumulate);
    if (stx__comp_kind<K>::Y) stx__addn<W>(a.dy, i, y, a.accumulate);
  #pragma unroll
    for (int k = 0; k < stx__comp_kind<K>::P; k++)
        stx__addn<W>(stx__comp_plane<K>(a.dp, k), stx__comp_plane_at<K>(a, i, k), p[k],
                     a.accumulate);
}

template <int W, int K>
static __device__ __forceinline__ void stx__comp_gate_backward(const stx__comp_gate &a) {
    STX__STEP(i, a.n, W) {
        stx__comp_gate_values<W> v = stx__comp_gate_values_at<W, K>(a, i);
        stx__comp_gate_grads<W, K>(a, i, v);
    }
}

/* Runs the loop for one kind, forward or backward. stx__comp_gate_of_kind selects the
   kind. */
template <int W, int K, int BACKWARD>
static __device__ __forceinline__ void stx__comp_gate_pass(const stx__comp_gate &a) {
    if constexpr (BACKWARD)
        stx__comp_gate_backward<W, K>(a);
    else
        stx__comp_gate_forward<W, K>(a);
}

template <int W, int BACKWARD>
static __device__ __forceinline__ void stx__comp_gate_of_kind(const stx__comp_gate &a) {
    switch (a.kind) {
    case STX_COMP_GATE_GRU: stx__comp_gate_pass<W, STX_COMP_GATE_GRU, BACKWARD>(a); break;
    case STX_COMP_GATE_INPUT: stx__comp_gate_pass<W, STX_COMP_GATE_INPUT, BACKWARD>(a); break;
    case STX_COMP_GATE_OUTPUT: stx__comp_gate_pass<W, STX_COMP_GATE_OUTPUT, BACKWARD>(a); break;
    case STX_COMP_GATE_HIGHWAY: stx__comp_gate_pass<W, STX_COMP_GATE_HIGHWAY, BACKWARD>(a); break;
    case STX_COMP_GATE_SIGTANH: stx__comp_gate_pass<W, STX_COMP_GATE_SIGTANH, BACKWARD>(a); break;
    case STX_COMP_GATE_GTRXL: stx__comp_gate_pass<W, STX_COMP_GATE_GTRXL, BACKWARD>(a); break;
    case STX_COMP_GATE_RESET: stx__comp_gate_pass<W, STX_COMP_GATE_RESET, BACKWARD>(a); break;
    case STX_COMP_GATE_GLU: stx__comp_gate_pass<W, STX_COMP_GATE_GLU, BACKWARD>(a); break;
    default: stx__comp_gate_pass<W, STX_COMP_GATE_MOGRIFY, BACKWARD>(a);
    }
}

template <int W> STX__GLOBAL(256) stx__comp_gate_fwd_kernel(stx__comp_gate a) {
    stx__comp_gate_of_kind<W, 0>(a);
}

template <int W> STX__GLOBAL(256) stx__comp_gate_bwd_kernel(stx__comp_gate a) {
    stx__comp_gate_of_kind<W, 1>(a);
}

/* Backward pass that also computes `part` (chunks,P D): the sums of the planes' gradients
   over `rows` rows per chunk. */
template <int S, int K>
STX__GLOBAL(256)
stx__comp_gate_sums_kernel(stx__comp_gate a, float *part, size_t rows) {
    constexpr int W = stx__width<S>, P = stx__comp_kind<K>::P;
    STX__SHARED(float, sh, 8 * 32 * W);
    a.x = stx__stored<S>(a.x);
    a.dx = stx__stored<S>(a.dx);
    a.dout = stx__stored<S>(a.dout);
  #pragma unroll
    for (int k = 0; k < 4; k++) {
        a.p[k] = stx__stored<S>(a.p[k]);
        a.dp[k] = stx__stored<S>(a.dp[k]);
    }
    stx__column_sums<P, W, 1>(
        part, P * a.D, a.n / a.D, a.D, rows, sh,
        [&](size_t n, size_t c) { return stx__comp_gate_values_at<W, K>(a, n * a.D + c); },
        [&](float (&s)[P][W], stx__comp_gate_values<W> &v, size_t n, size_t c) {
            stx__comp_gate_grads<W, K>(a, n * a.D + c, v);
  #pragma unroll
            for (int k = 0; k < P; k++)
                for (int e = 0; e < W; e++) s[k][e] += v.p[k][e];
        });
}

template <int K>
static void stx__comp_gate_bwd_sums(stx_ctx *x, const stx_comp_gate_args *a,
                                    const stx__comp_gate *p) {
    const char *what = "stx_comp_gate_bwd, sums";
    const size_t P = stx__comp_kind<K>::P;
    const int count = K == STX_COMP_GATE_GRU ? 2 : 1,
              access = stx__access(a->D, {p->x, p->dx, p->dout, p->p[0], p->p[1], p->dp[0],
                                          p->dp[1]}, {});
    const stx__column_launch l =
        stx__column_launch_of(x, what, a->N, a->D, P, access, a->defer_db);
    if (!l.part) return;
    STX__CHOOSE(S, access, (STX__FLOATS, STX__HALVES, STX__MIXED),
                STX__RUN_KERNEL(x, what, (stx__comp_gate_sums_kernel<S, K>), l.grid, 256, 0, *p,
                                l.part, l.rows));
    stx__column_launch_end(x, &l, a->db, count, P / (size_t)count * a->D);
}

/* Sets the arguments of the kernels and sets *four to 1 if all arrays can be accessed
   four elements at a time, otherwise to 0. Returns 0 if there is nothing to do or after
   an error. */
static int stx__comp_gate_of(stx_ctx *x, const stx_comp_gate_args *a, int backward,
                             stx__comp_gate *p, int *four) {
    const char *what = backward ? "stx_comp_gate_bwd" : "stx_comp_gate_fwd";
    int i;
    if (!stx_ok(x) || !a->N || !a->D) return 0;
    if (a->kind < STX_COMP_GATE_GRU || a->kind > STX_COMP_GATE_GLU) {
        stx_fail(x, STX_ERR_ARG, "%s: kind: expected one of STX_COMP_GATE_GRU .. _GLU, got %d",
                 what, a->kind);
        return 0;
    }
    memset(p, 0, sizeof *p);
    p->kind = a->kind;
    p->accumulate = a->accumulate;
    p->n = a->N * a->D;
    p->D = a->D;
    p->x = stx__array_of(x, a->x);
    p->y = stx__array_of(x, a->y);
    p->out = stx__array_of(x, backward ? NULL : a->out);
    p->dout = stx__array_of(x, backward ? a->dout : NULL);
    p->dx = stx__array_of(x, backward ? a->dx : NULL);
    p->dy = stx__array_of(x, backward ? a->dy : NULL);
    *four = a->D % 4 == 0 && stx__aligned4(p->x) && stx__aligned4(p->y) && stx__aligned4(p->out)
            && stx__aligned4(p->dout) && stx__aligned4(p->dx) && stx__aligned4(p->dy);
    for (i = 0; i < 4; i++) {
        p->p[i] = stx__array_of(x, a->p[i]);
        p->dp[i] = stx__array_of(x, backward ? a->dp[i] : NULL);
        *four = *four && stx__aligned4(p->p[i]) && stx__aligned4(p->dp[i]);
    }
    return 1;
}

void stx_comp_gate_fwd_cuda(stx_ctx *x, const stx_comp_gate_args *a) {
    stx__comp_gate p;
    int four;
    if (stx__comp_gate_of(x, a, 0, &p, &four))
        STX__RUN_BY(x, "stx_comp_gate_fwd", four, stx__comp_gate_fwd_kernel, p.n, p);
}

void stx_comp_gate_bwd_cuda(stx_ctx *x, const stx_comp_gate_args *a) {
    stx__comp_gate p;
    int four;
    if (!stx__comp_gate_of(x, a, 1, &p, &four)) return;
    if ((a->db[0] || a->db[1]) && a->kind == STX_COMP_GATE_GRU)
        stx__comp_gate_bwd_sums<STX_COMP_GATE_GRU>(x, a, &p);
    else if (a->db[0] && a->kind == STX_COMP_GATE_GLU)
        stx__comp_gate_bwd_sums<STX_COMP_GATE_GLU>(x, a, &p);
    else
        STX__RUN_BY(x, "stx_comp_gate_bwd", four, stx__comp_gate_bwd_kernel, p.n, p);
}
#endif /* SEQTX_COMPRESSIVE_H */
