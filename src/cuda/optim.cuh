#pragma once
#include "common.cuh"
#include "sums.cuh"
#include "gemm.cuh"


// >>report

/* Sets *metric to s a[0] or, with accumulate, adds s a[0] to it, in double. One
   thread. */
STX__GLOBAL(32) stx__metric_kernel(double *metric, stx__array a, double s, int accumulate) {
    *metric = (accumulate ? *metric : 0) + s * (double)stx__get(a, 0);
}

void stx__metric_accumulate_cuda(stx_ctx *x, double *metric, const stx_real *a, double s,
                                 int accumulate) {
    STX__RUN_KERNEL(x, "stx_metric_set", stx__metric_kernel, 1, 1, 0, metric, stx__array_of(x, a),
                    s, accumulate);
}


// >>optimisers

/* A table of parameter twins. Kernels look up the twin of a chunk by the chunk's
   address. If there are more allocations than the table holds, stx__twin_kernel sets
   the other twins after the parameter update, one table at a time. */
enum { STX__TWINS = 64 };

typedef struct stx__twins {
    const char *base[STX__TWINS];
    size_t bytes[STX__TWINS];
    stx__bf16 *twin[STX__TWINS];
    int n;
} stx__twins;

/* Fills the table t from the list of allocations r. Returns the first allocation whose
   twin did not fit, or NULL. */
static const stx__range *stx__twins_from(const stx__range *r, stx__twins *t) {
    memset(t, 0, sizeof *t);
    for (; r && t->n < STX__TWINS; r = r->next)
        if (r->twin) {
            t->base[t->n] = r->base;
            t->bytes[t->n] = r->bytes;
            t->twin[t->n++] = r->twin;
        }
    while (r && !r->twin) r = r->next;
    return r;
}

/* Returns the array at p with its twin. The whole block searches for the twin: thread i
   checks allocation i. */
static __device__ __forceinline__ stx__array stx__chunk_num(const stx__twins &t, float *p,
                                                          stx__bf16 **sh) {
    stx__array a = {p, NULL, 0};
    if (!t.n) return a;
    __syncthreads();
    if (threadIdx.x == 0) *sh = NULL;
    __syncthreads();
    if ((int)threadIdx.x < t.n && (const char *)p >= t.base[threadIdx.x]
        && (const char *)p < t.base[threadIdx.x] + t.bytes[threadIdx.x])
        *sh = t.twin[threadIdx.x] + (p - (const float *)(const void *)t.base[threadIdx.x]);
    __syncthreads();
    a.twin = *sh;
    return a;
}

static __device__ __forceinline__ int stx__aligned(const void *p, size_t to) {
    return (uintptr_t)p % to == 0;
}

/* The loop over chunks of a kernel with blocks of 256 threads. A block processes one
   chunk at a time. */
#define STX__EACH_CHUNK(k, count) for (size_t k = blockIdx.x; k < count; k += gridDim.x)

static unsigned stx__chunk_blocks(size_t count) {
    return stx__blocks(count, 1, (size_t)1 << 20);
}

/* Calls `update(p, g, s0, s1)` for elements [lo,hi) of a chunk, then sets g to 0.
   States that the chunk does not have are passed as 0 and are not stored. */
template <int W, class F>
static __device__ __forceinline__ void stx__update_range(const stx_optim_chunk &q,
                                                         const stx__array &p, size_t lo, size_t hi,
                                                         F update) {
    const stx__array g = {q.g, NULL, 0}, s0 = {q.s[0], NULL, 0}, s1 = {q.s[1], NULL, 0};
    const float zero[W] = {0};
    for (size_t i = lo + (size_t)threadIdx.x * W; i < hi; i += 256 * W) {
        float vp[W], vg[W], v0[W] = {0}, v1[W] = {0};
        stx__getn<W>(vp, p, i);
        stx__getn<W>(vg, g, i);
        if (s0.p) stx__getn<W>(v0, s0, i);
        if (s1.p) stx__getn<W>(v1, s1, i);
        for (int e = 0; e < W; e++) update(vp[e], vg[e], v0[e], v1[e]);
        stx__putn<W>(p, i, vp);
        stx__putn<W>(g, i, zero);
        if (s0.p) stx__putn<W>(s0, i, v0);
        if (s1.p) stx__putn<W>(s1, i, v1);
    }
}

/* Calls `update` for all elements of a chunk, in groups of 4 if the arrays are aligned.
   If `ok` is 0, skips the update and only sets g to 0. */
template <class F>
static __device__ __forceinline__ void stx__update_chunk(const stx_optim_chunk &q,
                                                         const stx__array &p, int ok, F update) {
    size_t fours = stx__aligned(q.p, 16) && stx__aligned(q.g, 16) && stx__aligned(q.s[0], 16)
                           && stx__aligned(q.s[1], 16) && stx__aligned(p.twin, 8)
                       ? q.n / 4 * 4
                       : 0;
    if (!ok) {
        for (size_t i = threadIdx.x; i < q.n; i += 256) q.g[i] = 0;
        return;
    }
    stx__update_range<4>(q, p, 0, fours, update);
    stx__update_range<1>(q, p, fours, q.n, update);
}

/* Copies the parameters of the allocations in t to their twins. Used for allocations
   that did not fit in the table of the update kernel. A block processes one chunk at a
   time. */
STX__GLOBAL(256)
stx__twin_kernel(const stx_optim_chunk *chunk, size_t count, const stx__twins t) {
    STX__SHARED(stx__bf16 *, sh, 1);
    STX__EACH_CHUNK(k, count) {
        stx__array p = stx__chunk_num(t, chunk[k].p, sh);
        if (p.twin)
            for (size_t i = threadIdx.x; i < chunk[k].n; i += 256)
                p.twin[i] = __float2bfloat16(((const float *)p.p)[i]);
    }
}

/* Launches `kernel(chunk, count, twins, ..)`, then stx__twin_kernel for twins that did
   not fit in the table. */
#define STX__RUN_CHUNKS(x, name, kernel, chunk, count, ...) \
  do { \
    stx__twins twins; \
    const stx__range *rest = stx__twins_from(stx__gpu(x)->ranges, &twins); \
    STX__RUN_KERNEL(x, name, kernel, stx__chunk_blocks(count), 256, 0, chunk, count, twins, \
                    __VA_ARGS__); \
    while (rest) { \
      rest = stx__twins_from(rest, &twins); \
      STX__RUN_KERNEL(x, name, stx__twin_kernel, stx__chunk_blocks(count), 256, 0, chunk, count, \
                      twins); \
    } \
  } while (0)

/* Sets `out` (count) to the sum of g^2 over each chunk, in double. A block processes
   one chunk at a time: a thread adds every 256th group of 4 in order, then a fixed tree
   adds the threads' sums. */
STX__GLOBAL(256) stx__sum_squares_kernel(double *out, const stx_optim_chunk *chunk, size_t count) {
    STX__SHARED(double, sh, 32);
    STX__EACH_CHUNK(k, count) {
        const stx__array g = {chunk[k].g, NULL, 0};
        size_t n = chunk[k].n, fours = stx__aligned(g.p, 16) ? n / 4 * 4 : 0;
        double s = 0;
        for (size_t i = 4 * (size_t)threadIdx.x; i < fours; i += 1024) {
            float4 v = stx__get4(g, i);
            s += ((double)v.x * v.x + (double)v.y * v.y) + ((double)v.z * v.z + (double)v.w * v.w);
        }
        for (size_t i = fours + threadIdx.x; i < n; i += 256)
            s += (double)chunk[k].g[i] * chunk[k].g[i];
        s = stx__row_sum<256>(s, sh);
        if (threadIdx.x == 0) out[k] = s;
    }
}

void stx_sum_squares_cuda(stx_ctx *x, double *out, const stx_optim_chunk *chunk, size_t count) {
    if (count)
        STX__RUN_KERNEL(x, "stx_sum_squares", stx__sum_squares_kernel, stx__chunk_blocks(count),
                        256, 0, out, chunk, count);
}

/* Calls `of(first, end, lane)` for the chunks [first,end) of each tensor, in a block of
   1024 threads. Each warp checks 32 chunks at a time and makes the calls for the
   tensors that begin there. Since the chunks of a tensor are adjacent, binary search
   finds the last one. */
template <class F>
static __device__ __forceinline__ void stx__each_tensor(const stx_optim_chunk *chunk, size_t count,
                                                        F of) {
    const unsigned lane = threadIdx.x % 32;
    for (size_t base = threadIdx.x - lane; base < count; base += 1024) {
        size_t k = base + lane;
        unsigned begins = __ballot_sync(STX__ALL,
                                        k < count
                                            && (k == 0 || chunk[k - 1].tensor != chunk[k].tensor));
        for (; begins; begins &= begins - 1) {
            size_t first = base + (size_t)(__ffs((int)begins) - 1), tensor = chunk[first].tensor,
                   end = first + 1, above = count;
            while (end < above) {
                size_t mid = end + (above - end) / 2;
                if (chunk[mid].tensor == tensor)
                    end = mid + 1;
                else
                    above = mid;
            }
            of(first, end, lane);
        }
    }
}

/* The fields of stx_optim_desc that stx__optim_prepare_kernel reads. The struct must
   have no padding bytes: they would be uninitialised, and tests/cuda_host searches
   kernel arguments for host addresses. */
typedef struct stx__prepare_rule {
    int kind, eps_hat, radam_skip, no_correction;
    double clip, beta1, beta2;
} stx__prepare_rule;

/* Increments u->step and sets the global clipping factor and the bias corrections of
   the Adam family for this update, as described in stx_optim_desc. Called by thread 0.
   With power = beta2^step, RAdam (Liu et al. 2020, arXiv:1908.03265) multiplies the
   update by r if rho >= 5; otherwise u->plain is set, and the update does not use v:

       most = 2 / (1 - beta2) - 1         rho = most - 2 step power / (1 - power)
       r    = sqrt((1 - power) (rho-4) (rho-2) most / ((most-4) (most-2) rho)) */
static __device__ __forceinline__ void stx__optim_decide(stx_update *u, double norm,
                                                         const stx__prepare_rule &d) {
    double step = (double)++u->step, power = pow(d.beta2, step), rectify = 1;
    u->plain = 0;
    u->correction2 = (float)(1 - power);
    if (d.kind == STX_RADAM) {
        double most = 2 / (1 - d.beta2) - 1, rho = most - 2 * step * power / (1 - power);
        u->plain = !(rho >= 5);
        u->correction2 = 1;
        if (rho >= 5)
            rectify = sqrt((1 - power) * (rho - 4) * (rho - 2) * most
                           / ((most - 4) * (most - 2) * rho));
    }
    u->factor = (float)(d.clip > 0 && d.kind != STX_ADAGRAD && d.clip / (norm + 1e-6) < 1
                            ? d.clip / (norm + 1e-6)
                            : 1);
    if (d.eps_hat) {
        rectify = sqrt(1 - power);
        u->correction2 = 1;
    }
    u->correction1 = (float)((1 - pow(d.beta1, step)) / rectify);
    if (d.no_correction) u->correction1 = u->correction2 = 1;
}

/* Computes the norm of the gradient from `squares` (count), the sum of g^2 over each
   chunk. Then decides whether to update, and sets the lr of each chunk. The update is
   skipped if the norm is not finite. For Adagrad, each tensor is clipped by its own
   norm. One block: a thread adds every 1024th chunk, then a fixed tree adds the
   threads' sums. The CPU adds in order, so its norm differs by rounding errors.
 */
STX__GLOBAL(1024, 1)
stx__optim_prepare_kernel(stx_update *u, stx_optim_chunk *chunk, size_t count,
                          const double *squares, const stx__prepare_rule d) {
    STX__SHARED(double, sh, 32);
    const double clip = d.clip;
    double lr = u->lr, total = 0, norm;
#pragma unroll 8
    for (size_t k = threadIdx.x; k < count; k += 1024) total += squares[k];
    norm = sqrt(stx__row_sum<1024>(total, sh));
    if (threadIdx.x == 0) {
        u->norm = norm;
        u->ok = norm <= DBL_MAX; /* false for NaN as well */
        if (u->ok)
            stx__optim_decide(u, norm, d);
        else
            u->skipped++;
    }
    if (!(norm <= DBL_MAX)) return;

    if (d.radam_skip) {
        __syncthreads(); /* u->plain was written by thread 0 */
        if (u->plain) lr = 0;
    }
    if (!(clip > 0 && d.kind == STX_ADAGRAD)) {
        for (size_t k = threadIdx.x; k < count; k += 1024)
            chunk[k].lr = (float)(lr * (double)chunk[k].lr_factor);
        return;
    }
    stx__each_tensor(chunk, count, [=](size_t first, size_t end, unsigned lane) {
        double sq = 0, eta = lr;
#pragma unroll 8
        for (size_t i = first + lane; i < end; i += 32) sq += squares[i];
        sq = sqrt(stx__warp_sum_f64(sq));
        if (sq > clip) eta = lr * clip / (sq + 1e-10);
        for (size_t i = first + lane; i < end; i += 32)
            chunk[i].lr = (float)(eta * (double)chunk[i].lr_factor);
    });
}

void stx_optim_prepare_cuda(stx_ctx *x, stx_update *u, stx_optim_chunk *chunk, size_t count,
                            const double *squares, const stx_optim_desc *d) {
    const stx__prepare_rule rule = {d->kind, d->eps_hat, d->radam_skip, d->no_correction,
                                    d->clip, d->beta1,   d->beta2};
    STX__RUN_KERNEL(x, "stx_optim_prepare", stx__optim_prepare_kernel, 1, 1024, 0, u, chunk, count,
                    squares, rule);
}

/* SGD with momentum:

       g'  = factor g + decay p
       buf = momentum buf + g'           if there is a buffer
       p   = p - lr buf, g = 0           (p - lr g' without a buffer)

   A block processes one chunk at a time, a thread 4 adjacent elements at a time. This
   also holds for the update kernels below. */
STX__GLOBAL(256)
stx__sgd_kernel(const stx_optim_chunk *chunk, size_t count, const stx__twins t, const stx_update *u,
                float momentum) {
    STX__SHARED(stx__bf16 *, sh, 1);
    const float factor = u->factor;
    STX__EACH_CHUNK(k, count) {
        const stx_optim_chunk q = chunk[k];
        const stx__array p = stx__chunk_num(t, q.p, sh);
        const int has_buffer = q.s[0] != NULL;
        stx__update_chunk(q, p, u->ok, [=](float &v, float g, float &buf, float &) {
            g = fmaf(factor, g, q.decay * v);
            if (has_buffer) g = buf = fmaf(momentum, buf, g);
            v = fmaf(-q.lr, g, v);
        });
    }
}

void stx_sgd_update_cuda(stx_ctx *x, const stx_update *u, const stx_optim_chunk *chunk,
                         size_t count, stx_real momentum) {
    if (count) STX__RUN_CHUNKS(x, "stx_sgd_update", stx__sgd_kernel, chunk, count, u, momentum);
}

/* Adagrad: sum = sum + g^2 ; p = p - lr g / (sqrt(sum) + eps) ; g = 0 */
STX__GLOBAL(256)
stx__adagrad_kernel(const stx_optim_chunk *chunk, size_t count, const stx__twins t,
                    const stx_update *u, float eps) {
    STX__SHARED(stx__bf16 *, sh, 1);
    STX__EACH_CHUNK(k, count) {
        const stx_optim_chunk q = chunk[k];
        const stx__array p = stx__chunk_num(t, q.p, sh);
        stx__update_chunk(q, p, u->ok, [=](float &v, float g, float &sum, float &) {
            sum = fmaf(g, g, sum);
            v -= q.lr * g / (sqrtf(sum) + eps);
        });
    }
}

void stx_adagrad_update_cuda(stx_ctx *x, const stx_update *u, const stx_optim_chunk *chunk,
                             size_t count, stx_real eps) {
    if (count) STX__RUN_CHUNKS(x, "stx_adagrad_update", stx__adagrad_kernel, chunk, count, u, eps);
}

/* Adam, AdamW and RAdam, with the corrections c1 and c2 of u, rest1 = 1 - beta1 and
   rest2 = 1 - beta2. The chunk's weight decay is `decoupled` or, if a.decoupled is 0,
   `decay`; the other one is 0:

       g' = factor g + decay p
       m  = beta1 m + rest1 g'
       v  = beta2 v + rest2 g'^2
       p  = (1 - lr decoupled) p - lr (m / c1) / (sqrt(v / c2) + eps), g = 0
   If u->plain, p = (1 - lr decoupled) p - lr m / c1. */
static __device__ __forceinline__ void stx__adam_chunk(const stx_optim_chunk &q,
                                                       const stx__array &p, const stx_update *u,
                                                       const stx_adam_args &a) {
    const float factor = u->factor, unbias = 1 / u->correction2;
    const float keep = 1 - q.lr * (a.decoupled ? q.decay : 0), rate = q.lr / u->correction1;
    const float decay = a.decoupled ? 0 : q.decay;
    const int plain = u->plain;
    stx__update_chunk(q, p, u->ok, [=](float &w, float g, float &m, float &v) {
        float d = fmaf(factor, g, decay * w);
        m = fmaf(a.beta1, m, a.rest1 * d);
        v = fmaf(a.beta2, v, a.rest2 * d * d);
        w = keep * w - rate * m / (plain ? 1 : sqrtf(v * unbias) + a.eps);
    });
}

STX__GLOBAL(256)
stx__adam_kernel(const stx_optim_chunk *chunk, size_t count, const stx__twins t,
                 const stx_update *u, const stx_adam_args a) {
    STX__SHARED(stx__bf16 *, sh, 1);
    STX__EACH_CHUNK(k, count) {
        const stx_optim_chunk q = chunk[k];
        stx__adam_chunk(q, stx__chunk_num(t, q.p, sh), u, a);
    }
}

void stx_adam_update_cuda(stx_ctx *x, const stx_update *u, const stx_optim_chunk *chunk,
                          size_t count, const stx_adam_args *a) {
    if (count) STX__RUN_CHUNKS(x, "stx_adam_update", stx__adam_kernel, chunk, count, u, *a);
}

/* LAMB, first kernel. Replaces g with the direction of each element (rest1 and rest2
   are 1 - beta1 and 1 - beta2):

       d = factor g
       m = beta1 m + rest1 d
       v = beta2 v + rest2 d^2
       g = (m / c1) / (sqrt(v / c2) + eps) + decay p

   Sets `squares` (count,2) to the sums of p^2 and of the new g^2 over each chunk, in
   double. A block processes one chunk at a time: a thread adds every 256th element in
   order, then a fixed tree adds the threads' sums. */
STX__GLOBAL(256)
stx__lamb_direction_kernel(const stx_optim_chunk *chunk, size_t count, const stx_update *u,
                           double *squares, const stx_adam_args a) {
    STX__SHARED(double, sh, 32);
    if (!u->ok) return;
    const float factor = u->factor, rate = 1 / u->correction1, unbias = 1 / u->correction2;
    STX__EACH_CHUNK(k, count) {
        const stx_optim_chunk q = chunk[k];
        double pp = 0, gg = 0;
        for (size_t i = threadIdx.x; i < q.n; i += 256) {
            float p = q.p[i], d = factor * q.g[i];
            float m = fmaf(a.beta1, q.s[0][i], a.rest1 * d);
            float v = fmaf(a.beta2, q.s[1][i], a.rest2 * d * d);
            float r = fmaf(q.decay, p, rate * m / (sqrtf(v * unbias) + a.eps));
            q.s[0][i] = m;
            q.s[1][i] = v;
            q.g[i] = r;
            pp += (double)p * p;
            gg += (double)r * r;
        }
        pp = stx__row_sum<256>(pp, sh);
        gg = stx__row_sum<256>(gg, sh);
        if (threadIdx.x == 0) {
            squares[2 * k] = pp;
            squares[2 * k + 1] = gg;
        }
    }
}

void stx_lamb_direction_cuda(stx_ctx *x, const stx_update *u, const stx_optim_chunk *chunk,
                             size_t count, double *squares, const stx_adam_args *a) {
    if (count)
        STX__RUN_KERNEL(x, "stx_lamb_direction", stx__lamb_direction_kernel,
                        stx__chunk_blocks(count), 256, 0, chunk, count, u, squares, *a);
}

/* LAMB, second kernel. Multiplies the lr of each tensor's chunks by its trust ratio,
   min(|p|, trust_max) / |g|, or 1 if one of the norms is 0. One block; one warp per
   tensor. */
STX__GLOBAL(1024)
stx__lamb_trust_kernel(const stx_update *u, stx_optim_chunk *chunk, size_t count,
                       const double *squares, double trust_max) {
    if (!u->ok) return;
    stx__each_tensor(chunk, count, [=](size_t first, size_t end, unsigned lane) {
        double p = 0, g = 0;
        for (size_t i = first + lane; i < end; i += 32) {
            p += squares[2 * i];
            g += squares[2 * i + 1];
        }
        p = sqrt(stx__warp_sum_f64(p));
        g = stx__warp_sum_f64(g);
        if (trust_max > 0 && p > trust_max) p = trust_max;
        if (p > 0 && g > 0)
            for (size_t i = first + lane; i < end; i += 32)
                chunk[i].lr = (float)((double)chunk[i].lr * p / sqrt(g));
    });
}

/* LAMB, third kernel: p = p - lr g ; g = 0. The first kernel has already updated m and
   v. */
STX__GLOBAL(256)
stx__lamb_update_kernel(const stx_optim_chunk *chunk, size_t count, const stx__twins t,
                        const stx_update *u) {
    STX__SHARED(stx__bf16 *, sh, 1);
    STX__EACH_CHUNK(k, count) {
        stx_optim_chunk q = chunk[k];
        const stx__array p = stx__chunk_num(t, q.p, sh);
        q.s[0] = q.s[1] = NULL;
        stx__update_chunk(q, p, u->ok,
                          [=](float &w, float g, float &, float &) { w = fmaf(-q.lr, g, w); });
    }
}

void stx_lamb_update_cuda(stx_ctx *x, const stx_update *u, stx_optim_chunk *chunk, size_t count,
                          const double *squares, double trust_max) {
    if (!count) return;
    STX__RUN_KERNEL(x, "stx_lamb_update", stx__lamb_trust_kernel, 1, 1024, 0, u, chunk, count,
                    squares, trust_max);
    STX__RUN_CHUNKS(x, "stx_lamb_update", stx__lamb_update_kernel, chunk, count, u);
}

/* Muon, first kernel. For matrices, whose chunks have no s[1], with buf = s[0]:

       d   = factor g
       buf = momentum buf + d
       g   = d + momentum buf

   Sets `squares` (count) to the sums of the new g^2 over their chunks, in double, as
   stx__lamb_direction_kernel does. */
STX__GLOBAL(256)
stx__muon_direction_kernel(const stx_optim_chunk *chunk, size_t count, const stx_update *u,
                           double *squares, float momentum) {
    STX__SHARED(double, sh, 32);
    if (!u->ok) return;
    const float factor = u->factor;
    STX__EACH_CHUNK(k, count) {
        const stx_optim_chunk q = chunk[k];
        double gg = 0;
        if (q.s[1]) continue;
        for (size_t i = threadIdx.x; i < q.n; i += 256) {
            float d = factor * q.g[i], m = fmaf(momentum, q.s[0][i], d);
            float g = fmaf(momentum, m, d);
            q.s[0][i] = m;
            q.g[i] = g;
            gg += (double)g * g;
        }
        gg = stx__row_sum<256>(gg, sh);
        if (threadIdx.x == 0) squares[k] = gg;
    }
}

void stx_muon_direction_cuda(stx_ctx *x, const stx_update *u, const stx_optim_chunk *chunk,
                             size_t count, double *squares, stx_real momentum) {
    if (count)
        STX__RUN_KERNEL(x, "stx_muon_direction", stx__muon_direction_kernel,
                        stx__chunk_blocks(count), 256, 0, chunk, count, u, squares, momentum);
}

/* Muon: X (n) = u / (|u|_F + 1e-7) for one matrix, whose chunks have the sums of squares
   `squares` (count). Each block adds all of them, in the order of
   stx__optim_prepare_kernel. A thread computes one element at a time. */
STX__GLOBAL(256)
stx__muon_normalise_kernel(stx__array X, const float *u, size_t n, const double *squares,
                           size_t count) {
    STX__SHARED(double, sh, 32);
    double s = 0;
    for (size_t k = threadIdx.x; k < count; k += 256) s += squares[k];
    const float scale = (float)(1 / (sqrt(stx__row_sum<256>(s, sh)) + 1e-7));
    for (size_t i = blockIdx.x * (size_t)256 + threadIdx.x; i < n; i += (size_t)gridDim.x * 256)
        stx__put(X, i, scale * u[i]);
}

void stx_muon_normalise_cuda(stx_ctx *x, stx_real *X, const stx_real *u, size_t n,
                             const double *squares, size_t count) {
    STX__RUN_KERNEL(x, "stx_muon_normalise", stx__muon_normalise_kernel, stx__blocks(n, 256, 1024),
                    256, 0, stx__array_of(x, X), u, n, squares, count);
}

/* Muon: a GEMM with a symmetric result. Computing only half of it would need more
   launches. */
void stx_muon_symmetric_cuda(stx_ctx *x, const stx_gemm_args *g) {
    stx_gemm_cuda(x, g);
}

/* Muon: B (n,n) = a I + b A. A thread computes one element at a time. */
STX__GLOBAL(256)
stx__muon_polynomial_kernel(stx__array B, stx__array A, size_t n, float a, float b) {
    for (size_t i = blockIdx.x * (size_t)256 + threadIdx.x; i < n * n;
         i += (size_t)gridDim.x * 256)
        stx__put(B, i, fmaf(b, stx__get(A, i), i % (n + 1) ? 0 : a)); /* i = row n + row */
}

void stx_muon_polynomial_cuda(stx_ctx *x, stx_real *B, const stx_real *A, size_t n, stx_real a,
                              stx_real b) {
    STX__RUN_KERNEL(x, "stx_muon_polynomial", stx__muon_polynomial_kernel,
                    stx__blocks(n * n, 256, 1024), 256, 0, stx__array_of(x, B),
                    stx__array_of(x, A), n, a, b);
}

/* Muon, last kernel. For matrices, p = p - lr (g + decay p), where g is the scaled
   orthogonalised direction; AdamW for other chunks. g = 0. */
STX__GLOBAL(256)
stx__muon_update_kernel(const stx_optim_chunk *chunk, size_t count, const stx__twins t,
                        const stx_update *u, const stx_adam_args a) {
    STX__SHARED(stx__bf16 *, sh, 1);
    STX__EACH_CHUNK(k, count) {
        stx_optim_chunk q = chunk[k];
        const stx__array p = stx__chunk_num(t, q.p, sh);
        if (q.s[1]) {
            stx__adam_chunk(q, p, u, a);
            continue;
        }
        q.s[0] = NULL; /* updated by the first kernel */
        stx__update_chunk(q, p, u->ok, [=](float &w, float g, float &, float &) {
            w = fmaf(-q.lr, fmaf(q.decay, w, g), w);
        });
    }
}

void stx_muon_update_cuda(stx_ctx *x, const stx_update *u, const stx_optim_chunk *chunk,
                          size_t count, const stx_adam_args *a) {
    if (count) STX__RUN_CHUNKS(x, "stx_muon_update", stx__muon_update_kernel, chunk, count, u, *a);
}

/* Clips the gradients g of each chunk to [-c,c]. Infinities and NaN are left unchanged.
   A block processes one chunk at a time. */
STX__GLOBAL(256) stx__clip_values_kernel(const stx_optim_chunk *chunk, size_t count, float c) {
    STX__EACH_CHUNK(k, count)
    for (size_t i = threadIdx.x; i < chunk[k].n; i += 256) {
        float v = chunk[k].g[i];
        if (fabsf(v) > c && fabsf(v) <= FLT_MAX) chunk[k].g[i] = v < 0 ? -c : c;
    }
}

void stx_clip_values_cuda(stx_ctx *x, const stx_optim_chunk *chunk, size_t count, stx_real c) {
    if (count)
        STX__RUN_KERNEL(x, "stx_clip_values", stx__clip_values_kernel, stx__chunk_blocks(count),
                        256, 0, chunk, count, c);
}

/* Clamps the parameters p of each chunk to [lo,hi]. NaN is left unchanged. A block
   processes one chunk at a time. */
STX__GLOBAL(256)
stx__clamp_kernel(const stx_optim_chunk *chunk, size_t count, const stx__twins t, float lo,
                  float hi) {
    STX__SHARED(stx__bf16 *, sh, 1);
    STX__EACH_CHUNK(k, count) {
        const stx__array p = stx__chunk_num(t, chunk[k].p, sh);
        for (size_t i = threadIdx.x; i < chunk[k].n; i += 256) {
            float v = stx__get(p, i), above = v > hi ? hi : v;
            stx__put(p, i, v < lo ? lo : above);
        }
    }
}

void stx_clamp_cuda(stx_ctx *x, const stx_optim_chunk *chunk, size_t count, stx_real lo,
                    stx_real hi) {
    if (count) STX__RUN_CHUNKS(x, "stx_clamp", stx__clamp_kernel, chunk, count, lo, hi);
}
