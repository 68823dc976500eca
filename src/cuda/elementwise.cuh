#pragma once
#include "common.cuh"
#include "sums.cuh"


// >>add, mul, scale

/* y (n) = a (n) + b (nb); b repeats n / nb times. A thread computes W adjacent
   elements at a time. */
template <int W>
STX__GLOBAL(256)
stx__add_kernel(stx__array y, stx__array a, stx__array b, size_t n, size_t nb) {
    STX__STEP(i, n, W) {
        float v[W], w[W];
        stx__getn<W>(v, a, i);
        stx__getn<W>(w, b, n == nb ? i : i % nb);
        for (int e = 0; e < W; e++) v[e] += w[e];
        stx__putn<W>(y, i, v);
    }
}

void stx_add_fwd_cuda(stx_ctx *x, stx_real *y, const stx_real *a, const stx_real *b, size_t n,
                      size_t nb) {
    stx__array Y = stx__array_of(x, y), A = stx__array_of(x, a), B = stx__array_of(x, b);
    const int four = nb % 4 == 0 && stx__aligned4(Y) && stx__aligned4(A) && stx__aligned4(B);
    if (n) STX__RUN_BY(x, "stx_add_fwd", four, stx__add_kernel, n, Y, A, B, n, nb);
}

/* y (n) = or += a (n) b (nb); b repeats n / nb times. In the backward pass, the kernel
   computes da = dy b and db = dy a. A thread computes W adjacent elements at a time. */
template <int W>
STX__GLOBAL(256)
stx__mul_kernel(stx__array y, stx__array a, stx__array b, size_t n, size_t nb, int accumulate) {
    STX__STEP(i, n, W) {
        float v[W], w[W];
        stx__getn<W>(v, a, i);
        stx__getn<W>(w, b, n == nb ? i : i % nb);
        for (int e = 0; e < W; e++) v[e] *= w[e];
        stx__addn<W>(y, i, v, accumulate);
    }
}

static void stx__mul_cuda(stx_ctx *x, const char *name, stx_real *y, const stx_real *a,
                          const stx_real *b, size_t n, size_t nb, int accumulate) {
    stx__array Y = stx__array_of(x, y), A = stx__array_of(x, a), B = stx__array_of(x, b);
    const int four = nb % 4 == 0 && stx__aligned4(Y) && stx__aligned4(A) && stx__aligned4(B);
    if (n) STX__RUN_BY(x, name, four, stx__mul_kernel, n, Y, A, B, n, nb, accumulate);
}

void stx_mul_fwd_cuda(stx_ctx *x, stx_real *y, const stx_real *a, const stx_real *b, size_t n,
                      size_t nb) {
    stx__mul_cuda(x, "stx_mul_fwd", y, a, b, n, nb, 0);
}

/* Gradients of y = a b:
       da = or += dy b
       db += dy a, summed over the repetitions of b (a column sum) */
void stx_mul_bwd_cuda(stx_ctx *x, const stx_mul_bwd_args *m) {
    static const char name[] = "stx_mul_bwd";
    const size_t n = m->n, nb = m->nb;
    if (m->da) stx__mul_cuda(x, name, m->da, m->dy, m->b, n, nb, m->accumulate);
    if (m->db && n == nb) {
        stx__mul_cuda(x, name, m->db, m->dy, m->a, n, n, 1);
    } else if (m->db && n) {
        stx__columns_args columns = stx__columns_init(m->db, m->dy, n / nb, nb);
        columns.f = m->a;
        stx__columns(x, name, &columns);
    }
}


// >>activations

/* expf, tanhf and normcdff are CUDA's accurate functions (1 to 5 ulp). NaN stays NaN.
   stx__phi is the CDF of the standard normal distribution. */
#ifdef CUDA_HOST
static inline float stx__phi(float v) {
    return (float)(0.5 * erfc(v * -0.70710678118654752440));
}
#else
static __device__ __forceinline__ float stx__phi(float v) {
    return normcdff(v);
}
#endif

static __device__ __forceinline__ float stx__act(float v, int act) {
    switch (act) {
    case STX_ACT_RELU: return v < 0 ? 0 : v;
    case STX_ACT_GELU: return v * stx__phi(v);
    case STX_ACT_TANH: return tanhf(v);
    case STX_ACT_SIGMOID: return 1 / (1 + expf(-v));
    default: return v;
    }
}

/* Returns g times act'(a), the slope at `a`. GELU reads `a`, and the other activations
   read y = act(a). */
static __device__ __forceinline__ float stx__act_slope(float g, float y, float a, int act) {
    switch (act) {
    case STX_ACT_RELU: return y > 0 ? g : 0;
    case STX_ACT_GELU:
        return g * fmaf(a, 0.39894228040143267794f * expf(-0.5f * a * a), stx__phi(a));
    case STX_ACT_TANH: return g * fmaf(-y, y, 1.0f);
    case STX_ACT_SIGMOID: return g * (y * (1 - y));
    default: return g;
    }
}

/* y (n) = act(a (n)); y may be `a`. A thread computes W adjacent elements at a time. */
template <int W>
STX__GLOBAL(256)
stx__act_fwd_kernel(stx__array y, stx__array a, size_t n, int act) {
    STX__STEP(i, n, W) {
        float v[W];
        stx__getn<W>(v, a, i);
        for (int e = 0; e < W; e++) v[e] = stx__act(v[e], act);
        stx__putn<W>(y, i, v);
    }
}

void stx_act_fwd_cuda(stx_ctx *x, stx_real *y, const stx_real *a, size_t n, int act) {
    stx__array Y = stx__array_of(x, y), A = stx__array_of(x, a);
    const int four = n % 4 == 0 && stx__aligned4(Y) && stx__aligned4(A);
    if (n) STX__RUN_BY(x, "stx_act_fwd", four, stx__act_fwd_kernel, n, Y, A, n, act);
}

/* Gradient of y = act(a): da (n) = or += dy act'(a). GELU reads `a`; the other
   activations read y. da may be dy. A thread computes W adjacent elements at a time. */
template <int W>
STX__GLOBAL(256)
stx__act_bwd_kernel(stx__array da, stx__array dy, stx__array y, stx__array a, size_t n, int act,
                    int accumulate) {
    STX__STEP(i, n, W) {
        float g[W], v[W] = {0}, u[W] = {0};
        stx__getn<W>(g, dy, i);
        if (act == STX_ACT_GELU)
            stx__getn<W>(u, a, i);
        else if (act)
            stx__getn<W>(v, y, i);
        for (int e = 0; e < W; e++) g[e] = stx__act_slope(g[e], v[e], u[e], act);
        stx__addn<W>(da, i, g, accumulate);
    }
}

void stx_act_bwd_cuda(stx_ctx *x, const stx_act_bwd_args *a) {
    const size_t n = a->n;
    stx__array D = stx__array_of(x, a->da), G = stx__array_of(x, a->dy), Y = stx__array_of(x, a->y),
               A = stx__array_of(x, a->act == STX_ACT_GELU ? a->a : NULL);
    const int four =
        n % 4 == 0 && stx__aligned4(D) && stx__aligned4(G) && stx__aligned4(Y) && stx__aligned4(A);
    if (n)
        STX__RUN_BY(x, "stx_act_bwd", four, stx__act_bwd_kernel, n, D, G, Y, A, n, a->act,
                    a->accumulate && a->da != a->dy);
}


// >>dropout

/* A dropout mask, bit-identical to the mask on the CPU. One Philox call returns 16 bits
   for each of 8 adjacent elements; an element is kept if its bits are below `keep`. */
typedef struct stx__dropout {
    uint64_t seed, stream;
    uint64_t first;         /* index of the Philox call for element 0 */
    const uint64_t *shift;  /* added to `stream`, see stx_gpu */
    uint32_t keep;          /* 65536 times the keep probability; 0: no dropout */
    float inv;              /* factor for kept elements, 65536 / keep */
} stx__dropout;

static stx__dropout stx__dropout_of(stx_ctx *x, stx_real p, uint64_t seed, uint64_t stream,
                                    uint64_t first) {
    stx__dropout d = {seed, stream, first, stx__gpu(x)->shift, 0, 1};
    if (p > 0) {
        double k = floor((1.0 - (double)p) * 65536.0 + 0.5);
        d.keep = (uint32_t)(k < 1 ? 1 : k);
        d.inv = (float)(65536.0 / d.keep);
    }
    return d;
}

static __device__ __forceinline__ uint64_t stx__dropout_stream(const stx__dropout &d) {
    return d.stream + *d.shift;
}

/* Returns the lower or upper half of a random word. */
static __device__ __forceinline__ uint32_t stx__half_word(uint32_t word, int upper) {
    return upper ? word >> 16 : word & 0xffffu;
}

/* Sets by[e] to the dropout factor of element i + e: 0 or d.inv. i is a multiple of W. */
template <int W>
static __device__ __forceinline__ void stx__dropout_mask(float (&by)[W], const stx__dropout &d,
                                                         uint64_t stream, size_t i) {
    uint4 r = stx__philox(d.seed, stream, d.first + (uint64_t)i / 8);
    uint32_t lo = i & 4 ? r.z : r.x, hi = i & 4 ? r.w : r.y;
    if constexpr (W == 4) {
        by[0] = (lo & 0xffffu) < d.keep ? d.inv : 0;
        by[1] = (lo >> 16) < d.keep ? d.inv : 0;
        by[2] = (hi & 0xffffu) < d.keep ? d.inv : 0;
        by[3] = (hi >> 16) < d.keep ? d.inv : 0;
    } else {
        uint32_t word = i & 2 ? hi : lo;
        by[0] = stx__half_word(word, i & 1) < d.keep ? d.inv : 0;
    }
}

/* y (n) = or += a (n) times the dropout factors, 0 or d.inv. A thread handles the 8
   elements of one Philox call, with W elements per memory access. */
template <int W>
STX__GLOBAL(256)
stx__dropout_kernel(stx__array y, stx__array a, size_t n, stx__dropout d, int accumulate) {
    uint64_t stream = stx__dropout_stream(d);
    STX__STEP(i, n, 8) {
        uint4 r = stx__philox(d.seed, stream, d.first + (uint64_t)i / 8);
        uint32_t bits[4] = {r.x, r.y, r.z, r.w};
#pragma unroll
        for (int e = 0; e < 8; e += W) {
            if (i + e < n) {
                float v[W];
                stx__getn<W>(v, a, i + e);
#pragma unroll
                for (int k = 0; k < W; k++) {
                    uint32_t word = stx__half_word(bits[(e + k) / 2], (e + k) & 1);
                    v[k] *= word < d.keep ? d.inv : 0;
                }
                stx__addn<W>(y, i + e, v, accumulate);
            }
        }
    }
}

void stx_dropout_fwd_cuda(stx_ctx *x, const stx_dropout_args *a) {
    const size_t n = a->n;
    stx__array Y = stx__array_of(x, a->y), A = stx__array_of(x, a->a);
    stx__dropout d = stx__dropout_of(x, a->p, a->seed, a->stream, a->first);
    const int four = n % 4 == 0 && stx__aligned4(Y) && stx__aligned4(A);
    if (!d.keep) d.keep = 65536; /* p = 0 keeps every element, as on the CPU */
    if (n)
        STX__CHOOSE(W, four ? 4 : 1, (1, 4),
                    STX__RUN_KERNEL(x, "stx_dropout_fwd", stx__dropout_kernel<W>,
                                    stx__grid(x, (n + 7) / 8), 256, 0, Y, A, n, d,
                                    a->accumulate));
}


// >>rezero

/* y (n) = h (n) + alpha (1) f (n), or alpha f if h.p is NULL. A thread computes W
   adjacent elements at a time. */
template <int W>
STX__GLOBAL(256)
stx__rezero_fwd_kernel(stx__array y, stx__array h, stx__array f, stx__array alpha, size_t n) {
    float s = stx__get(alpha, 0);
    STX__STEP(i, n, W) {
        float v[W] = {0}, w[W];
        if (h.p) stx__getn<W>(v, h, i);
        stx__getn<W>(w, f, i);
        for (int e = 0; e < W; e++) v[e] = fmaf(s, w[e], v[e]);
        stx__putn<W>(y, i, v);
    }
}

void stx_rezero_fwd_cuda(stx_ctx *x, stx_real *y, const stx_real *h, const stx_real *f,
                         const stx_real *alpha, size_t n) {
    stx__array Y = stx__array_of(x, y), H = stx__array_of(x, h), F = stx__array_of(x, f),
               A = stx__array_of(x, alpha);
    const int four = n % 4 == 0 && stx__aligned4(Y) && stx__aligned4(H) && stx__aligned4(F);
    if (n) STX__RUN_BY(x, "stx_rezero_fwd", four, stx__rezero_fwd_kernel, n, Y, H, F, A, n);
}

/* Gradient of y = h + alpha f: df (n) = or += alpha dy. stx__sum_cuda computes
   dalpha += sum of dy f. A thread computes W adjacent elements at a time. */
template <int W>
STX__GLOBAL(256)
stx__rezero_bwd_kernel(stx__array df, stx__array dy, stx__array alpha, size_t n, int accumulate) {
    float s = stx__get(alpha, 0);
    STX__STEP(i, n, W) {
        float v[W];
        stx__getn<W>(v, dy, i);
        for (int e = 0; e < W; e++) v[e] *= s;
        stx__addn<W>(df, i, v, accumulate);
    }
}

void stx_rezero_bwd_cuda(stx_ctx *x, const stx_rezero_bwd_args *r) {
    static const char name[] = "stx_rezero_bwd";
    const size_t n = r->n;
    stx__array D = stx__array_of(x, r->df), G = stx__array_of(x, r->dy),
               A = stx__array_of(x, r->alpha);
    const int four = n % 4 == 0 && stx__aligned4(D) && stx__aligned4(G);
    if (r->dalpha) stx__sum_cuda(x, name, STX__SUM_PRODUCTS, r->dalpha, r->dy, r->f, n, 1, 1);
    if (r->df && n)
        STX__RUN_BY(x, name, four, stx__rezero_bwd_kernel, n, D, G, A, n, r->accumulate);
}
