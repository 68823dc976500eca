#pragma once
#include "common.cuh"
#include "sums.cuh"


// >>softmax

/* Launches a kernel for N rows of C elements. `kernel` is an expression in T, the
   number of threads per row: 32, 256 or 1024, depending on C. */
#define STX__RUN_ROWS(x, name, N, C, kernel, ...) \
  STX__CHOOSE(T, stx__row_threads(C), (32, 256, 1024), \
              STX__RUN_KERNEL(x, name, kernel, \
                              stx__blocks(N, STX__ROW_BLOCK(T) / T, (size_t)1 << 30), \
                              STX__ROW_BLOCK(T), 0, __VA_ARGS__))

static int stx__row_threads(size_t C) {
    if (C <= 512) return 32;
    return C <= 32768 ? 256 : 1024;
}

/* The length of a row, such as a vocabulary size, need not be a multiple of 4. The
   elements [0, head) precede the first aligned group of 4; the elements after the last
   group are the tail. Returns `head` for the row of n elements at a[start]. */
static __device__ __forceinline__ size_t stx__row_head(const stx__array &a, size_t start,
                                                       size_t n) {
    size_t h = (size_t)(0 - ((uintptr_t)a.p / (a.half ? 2 : 4) + start)) & 3;
    return h < n ? h : n;
}

/* Returns nonzero if the rows of `a` and b have the same head, so that groups of 4 can
   be accessed in both. If not, kernels treat the whole row as the head. */
static __device__ __forceinline__ int stx__same_head(const stx__array &a, const stx__array &b) {
    return (((uintptr_t)a.p / (a.half ? 2 : 4)) & 3) == (((uintptr_t)b.p / (b.half ? 2 : 4)) & 3);
}

/* Elements of the head and the tail are numbered consecutively. Returns the position of
   element number i in the row. The row has `fours` groups of 4 between head and tail. */
static __device__ __forceinline__ size_t stx__row_edge(size_t i, size_t head, size_t fours) {
    return i < head ? i : i + 4 * fours;
}

/* Running maximum of the elements v seen so far, and the sum of e^(v - max) over them. A
   NaN does not become the maximum, but makes the sum NaN. */
typedef struct stx__lse {
    float max, sum;
} stx__lse;

template <int K>
static __device__ __forceinline__ void stx__lse_add(stx__lse &l, const float (&v)[K]) {
    float max = v[0];
#pragma unroll
    for (int e = 1; e < K; e++) max = fmaxf(max, v[e]);
    if (max > l.max) {
        l.sum *= expf(l.max - max);
        l.max = max;
    }
#pragma unroll
    for (int e = 0; e < K; e++) l.sum += v[e] == -HUGE_VALF ? 0 : expf(v[e] - l.max);
}

/* Computes the maximum and the sum of e^(v - max) of the n elements at a[start] in one
   pass. Returns the result in all T threads of the row. A thread loads four groups of 4
   before it uses the first. The threads' sums are rescaled to the common maximum and
   added in a fixed tree. If all elements are -infinity, the sum is NaN, because
   e^(v - max) is NaN. */
template <int T>
static __device__ __forceinline__ stx__lse stx__row_lse(const stx__array &a, size_t start, size_t n,
                                                        float *sh) {
    const size_t t = threadIdx.x % T, head = stx__row_head(a, start, n), fours = (n - head) / 4,
                 body = start + head;
    stx__lse l = {-HUGE_VALF, 0};
    float v[16], one[1], max;
    size_t i, q;
    if (t < head) {
        one[0] = stx__get(a, start + t);
        stx__lse_add(l, one);
    }

    for (q = t; q + 3 * T < fours; q += 4 * T) {
        float4 u[4];
#pragma unroll
        for (int e = 0; e < 4; e++) u[e] = stx__get4(a, body + 4 * (q + e * T));
#pragma unroll
        for (int e = 0; e < 4; e++) {
            v[4 * e] = u[e].x;
            v[4 * e + 1] = u[e].y;
            v[4 * e + 2] = u[e].z;
            v[4 * e + 3] = u[e].w;
        }
        stx__lse_add(l, v);
    }
    for (; q < fours; q += T) {
        float w[4];
        stx__getn<4>(w, a, body + 4 * q);
        stx__lse_add(l, w);
    }
    i = head + 4 * fours + t;
    if (i < n) {
        one[0] = stx__get(a, start + i);
        stx__lse_add(l, one);
    }

    max = stx__row_max<T>(l.max, sh);
    l.sum = stx__row_sum<T>(l.max == max ? l.sum : l.sum * expf(l.max - max), sh);
    if (max == -HUGE_VALF) l.sum = max - max;
    l.max = max;
    return l;
}

/* Returns one element of the result: e^(v - max) z, where z = 1 / sum. With LOG,
   returns v - max - z, where z = log(sum). */
template <int LOG>
static __device__ __forceinline__ float stx__softmax_of(float v, float max, float z) {
    return LOG ? v - max - z : expf(v - max) * z;
}

/* y (N,C) = softmax over the C elements of each row of a (N,C), or with LOG, its
   logarithm. y may be `a`. T threads handle a row in two passes: the first computes the
   maximum and the sum, the second the result. */
template <int T, int LOG>
STX__GLOBAL(STX__ROW_BLOCK(T))
stx__softmax_fwd_kernel(stx__array y, stx__array a, size_t N, size_t C) {
    STX__SHARED(float, sh, 32);
    STX__EACH_ROW(n, N, T) {
        const size_t start = n * C, t = threadIdx.x % T;
        stx__lse l = stx__row_lse<T>(a, start, C, sh);
        const size_t head = stx__same_head(y, a) ? stx__row_head(a, start, C) : C,
                     fours = (C - head) / 4;
        const float z = LOG ? logf(l.sum) : 1 / l.sum;
        for (size_t i = t; i < C - 4 * fours; i += T) {
            size_t j = start + stx__row_edge(i, head, fours);
            stx__put(y, j, stx__softmax_of<LOG>(stx__get(a, j), l.max, z));
        }
        for (size_t q = t; q < fours; q += T) {
            float v[4];
            stx__getn<4>(v, a, start + head + 4 * q);
            for (int e = 0; e < 4; e++) v[e] = stx__softmax_of<LOG>(v[e], l.max, z);
            stx__putn<4>(y, start + head + 4 * q, v);
        }
    }
}

void stx_softmax_fwd_cuda(stx_ctx *x, stx_real *y, const stx_real *a, size_t N, size_t C) {
    stx__array Y = stx__array_of(x, y), A = stx__array_of(x, a);
    if (N && C)
        STX__RUN_ROWS(x, "stx_softmax_fwd", N, C, (stx__softmax_fwd_kernel<T, 0>), Y, A, N, C);
}

void stx_log_softmax_fwd_cuda(stx_ctx *x, stx_real *y, const stx_real *a, size_t N, size_t C) {
    stx__array Y = stx__array_of(x, y), A = stx__array_of(x, a);
    if (N && C)
        STX__RUN_ROWS(x, "stx_log_softmax_fwd", N, C, (stx__softmax_fwd_kernel<T, 1>), Y, A, N, C);
}

/* Gradients of softmax and log_softmax:
   y = softmax(a):       da (N,C) = or += y (dy - sum_c y dy)
   y = log_softmax(a):   da (N,C) = or += dy - e^y sum_c dy                        (LOG)
   T threads handle a row in two passes: the first computes the sum, the second the
   result. Each thread adds in a fixed order, then the threads' sums are added in a
   fixed tree. With LOG and small blocks, the bound on blocks per multiprocessor keeps
   the compiler from spilling registers. */
template <int T, int LOG>
STX__GLOBAL(STX__ROW_BLOCK(T), LOG && T <= 256 ? 5 : 0)
stx__softmax_bwd_kernel(stx__array da, stx__array dy, stx__array y, size_t N, size_t C,
                        int accumulate) {
    STX__SHARED(float, sh, 32);
    STX__EACH_ROW(n, N, T) {
        const size_t start = n * C, t = threadIdx.x % T;
        const size_t head = stx__same_head(da, dy) && stx__same_head(da, y)
                                ? stx__row_head(y, start, C)
                                : C;
        const size_t fours = (C - head) / 4;
        float s = 0;
        for (size_t i = t; i < C - 4 * fours; i += T) {
            size_t j = start + stx__row_edge(i, head, fours);
            if constexpr (LOG)
                s += stx__get(dy, j);
            else
                s = fmaf(stx__get(dy, j), stx__get(y, j), s);
        }
        for (size_t q = t; q < fours; q += T) {
            float v[4], w[4];
            stx__getn<4>(v, dy, start + head + 4 * q);
            if constexpr (LOG) {
                s += (v[0] + v[1]) + (v[2] + v[3]);
            } else {
                stx__getn<4>(w, y, start + head + 4 * q);
                for (int e = 0; e < 4; e++) s = fmaf(v[e], w[e], s);
            }
        }
        s = stx__row_sum<T>(s, sh);

        for (size_t i = t; i < C - 4 * fours; i += T) {
            size_t j = start + stx__row_edge(i, head, fours);
            if constexpr (LOG)
                stx__add(da, j, fmaf(-s, expf(stx__get(y, j)), stx__get(dy, j)), accumulate);
            else
                stx__add(da, j, stx__get(y, j) * (stx__get(dy, j) - s), accumulate);
        }
        for (size_t q = t; q < fours; q += T) {
            float v[4], w[4];
            stx__getn<4>(v, dy, start + head + 4 * q);
            stx__getn<4>(w, y, start + head + 4 * q);
            for (int e = 0; e < 4; e++)
                v[e] = LOG ? fmaf(-s, expf(w[e]), v[e]) : w[e] * (v[e] - s);
            stx__addn<4>(da, start + head + 4 * q, v, accumulate);
        }
    }
}

void stx_softmax_bwd_cuda(stx_ctx *x, stx_real *da, const stx_real *dy, const stx_real *y, size_t N,
                          size_t C, int accumulate) {
    stx__array D = stx__array_of(x, da), G = stx__array_of(x, dy), Y = stx__array_of(x, y);
    if (N && C)
        STX__RUN_ROWS(x, "stx_softmax_bwd", N, C, (stx__softmax_bwd_kernel<T, 0>), D, G, Y, N, C,
                      accumulate);
}

void stx_log_softmax_bwd_cuda(stx_ctx *x, stx_real *da, const stx_real *dy, const stx_real *y,
                              size_t N, size_t C, int accumulate) {
    stx__array D = stx__array_of(x, da), G = stx__array_of(x, dy), Y = stx__array_of(x, y);
    if (N && C)
        STX__RUN_ROWS(x, "stx_log_softmax_bwd", N, C, (stx__softmax_bwd_kernel<T, 1>), D, G, Y, N,
                      C, accumulate);
}
