#pragma once
#include "../api/config.h"
#include "../api/context.h"
#include "../api/train.h"
#include "../core/loops.h"
#include "../core/maths.h"
#include "../core/functions.h"
#include "../core/platform.h"
#include "../core/context.h"


// >>optimisers: kernels

/* Returns the number of elements in all chunks. */
static size_t stx__chunks_size(const stx_optim_chunk *chunk, size_t count) {
    size_t k, n = 0;
    for (k = 0; k < count; k++) n += chunk[k].n;
    return n;
}

STX_INNER void stx__squares_n(int fma, double *sum, const stx_real *a, size_t n) {
    double s[16] = {0}, t = 0;
    size_t i, e;
    (void)fma;
    for (i = 0; i + 16 <= n; i += 16)
        for (e = 0; e < 16; e++) s[e] += (double)a[i + e] * (double)a[i + e];
    for (; i < n; i++) t += (double)a[i] * (double)a[i];
    for (e = 0; e < 16; e++) t += s[e];
    *sum = t;
}

STX_EACH_ISA(stx__squares_n, (double *sum, const stx_real *a, size_t n), sum, a, n)

/* Arguments of the loops over chunks. Each loop reads only the members that it needs. */
typedef struct stx__chunks_job {
    const stx_update *u;
    const stx_optim_chunk *chunk;
    const stx_adam_args *adam;
    double *out;
    stx_real momentum, eps, lo, hi;
} stx__chunks_job;

/* Runs one parallel loop over the chunks of all parameters. A chunk is never split, so
   the result does not depend on the number of threads. */
static void stx__each_chunk(stx_ctx *x, const stx_optim_chunk *chunk, size_t count, stx_part part,
                            stx__chunks_job *j) {
    j->chunk = chunk;
    stx_parallel(x, count, stx__chunks_size(chunk, count), part, j);
}

static void stx__squares_part(const stx_share *s, const void *job) {
    const stx__chunks_job *j = (const stx__chunks_job *)job;
    size_t k;
    for (k = s->begin; k < s->end; k++)
        STX_CALL(s->x, stx__squares_n, (j->out + k, j->chunk[k].g, j->chunk[k].n));
}

STX_DEF void stx_sum_squares(stx_ctx *x, double *out, const stx_optim_chunk *chunk, size_t count) {
    stx__chunks_job j;
    j.out = out;
    stx__each_chunk(x, chunk, count, stx__squares_part, &j);
}

/* Sets the bias corrections for update number u->step. Returns the learning rate, or 0
   for the first updates of RAdam if radam_skip is set. */
static double stx__optim_corrections(stx_update *u, const stx_optim_desc *d) {
    STX__FP_SCOPE;
    const double beta1 = d->beta1, beta2 = d->beta2, step = (double)u->step;
    double lr = u->lr, rectify = 1;
    u->plain = 0;
    if (d->kind == STX_RADAM) {
        const double power = stx_math_pow(beta2, step), rho_inf = 2 / (1 - beta2) - 1;
        const double rho = rho_inf - 2 * step * power / (1 - power);
        u->plain = !(rho >= 5);
        if (!u->plain)
            rectify = sqrt((1 - power) * (rho - 4) * (rho - 2) * rho_inf
                           / ((rho_inf - 4) * (rho_inf - 2) * rho));
        else if (d->radam_skip)
            lr = 0;
    }
    if (d->eps_hat) rectify = sqrt(1 - stx_math_pow(beta2, step));
    u->correction1 = (stx_real)(d->no_correction ? 1 : (1 - stx_math_pow(beta1, step)) / rectify);
    u->correction2 = 1;
    if (d->kind != STX_RADAM && !d->eps_hat && !d->no_correction)
        u->correction2 = (stx_real)(1 - stx_math_pow(beta2, step));
    STX__FP_PIN(lr);
    return lr;
}

STX_DEF void stx_optim_prepare(stx_ctx *x, stx_update *u, stx_optim_chunk *chunk, size_t count,
                               const double *squares, const stx_optim_desc *d) {
    STX__FP_SCOPE;
    const double clip = d->clip;
    const int per_tensor = clip > 0 && d->kind == STX_ADAGRAD;
    double total = 0, lr;
    size_t k, end;
    (void)x;
    for (k = 0; k < count; k++) total += squares[k];
    u->norm = sqrt(total);
    u->ok = stx__finite(u->norm);
    if (!u->ok) {
        u->skipped++;
        return;
    }
    u->step++;
    u->factor = 1;
    if (clip > 0 && !per_tensor) u->factor = (stx_real)STX_MIN(1, clip / (u->norm + 1e-6));
    lr = stx__optim_corrections(u, d);

    /* set the learning rate of each tensor; the chunks of a tensor are adjacent */
    for (k = 0; k < count; k = end) {
        double sum = 0, tensor_lr = lr;
        for (end = k; end < count && chunk[end].tensor == chunk[k].tensor; end++)
            sum += squares[end];
        if (per_tensor && sqrt(sum) > clip) tensor_lr = lr * clip / (sqrt(sum) + 1e-10);
        for (; k < end; k++) chunk[k].lr = (stx_real)(tensor_lr * (double)chunk[k].lr_factor);
    }
}

static void stx__clear_grads_part(const stx_share *s, const void *job) {
    const stx_optim_chunk *chunk = ((const stx__chunks_job *)job)->chunk;
    size_t k;
    for (k = s->begin; k < s->end; k++) memset(chunk[k].g, 0, chunk[k].n * sizeof *chunk[k].g);
}

/* If the update is skipped, clears the gradients and returns 1. */
static int stx__update_skipped(stx_ctx *x, const stx_update *u, const stx_optim_chunk *chunk,
                               size_t count) {
    stx__chunks_job j;
    if (u->ok) return 0;
    stx__each_chunk(x, chunk, count, stx__clear_grads_part, &j);
    return 1;
}

typedef struct stx__sgd {
    stx_real lr, factor, momentum, decay;
} stx__sgd;

/* SGD with momentum:

       g'  = factor g + decay p
       buf = momentum buf + g'
       p   = p - lr buf, g = 0

   Without a buffer, p = p - lr g'. */
STX_INNER void stx__sgd_n(int fma, stx_real *p, stx_real *buf, stx_real *g, size_t n,
                          const stx__sgd *k) {
    const stx_real lr = k->lr, factor = k->factor, momentum = k->momentum, decay = k->decay;
    size_t i;
    for (i = 0; i < n; i++) g[i] = STX_FMA(fma, factor, g[i], decay * p[i]);
    if (buf)
        for (i = 0; i < n; i++) g[i] = buf[i] = STX_FMA(fma, momentum, buf[i], g[i]);
    for (i = 0; i < n; i++) {
        p[i] = STX_FMA(fma, -lr, g[i], p[i]);
        g[i] = 0;
    }
}

STX_EACH_ISA(stx__sgd_n,
             (stx_real * STX_RESTRICT p, stx_real *STX_RESTRICT buf, stx_real *STX_RESTRICT g,
              size_t n, const stx__sgd *k),
             p, buf, g, n, k)

static void stx__sgd_part(const stx_share *s, const void *job) {
    const stx__chunks_job *j = (const stx__chunks_job *)job;
    const stx_optim_chunk *c = j->chunk + s->begin, *end = j->chunk + s->end;
    stx__sgd k;
    k.factor = j->u->factor;
    k.momentum = j->momentum;
    for (; c < end; c++) {
        k.lr = c->lr;
        k.decay = c->decay;
        STX_CALL(s->x, stx__sgd_n, (c->p, c->s[0], c->g, c->n, &k));
    }
}

STX_DEF void stx_sgd_update(stx_ctx *x, const stx_update *u, const stx_optim_chunk *chunk,
                            size_t count, stx_real momentum) {
    stx__chunks_job j;
    if (stx__update_skipped(x, u, chunk, count)) return;
    j.u = u;
    j.momentum = momentum;
    stx__each_chunk(x, chunk, count, stx__sgd_part, &j);
}

/* Adagrad: sum = sum + g^2, p = p - lr g / (sqrt(sum) + eps), g = 0 */
STX_INNER void stx__adagrad_n(int fma, stx_real *p, stx_real *sum, stx_real *g, size_t n,
                              stx_real lr, stx_real eps) {
    size_t i;
    for (i = 0; i < n; i++) {
        stx_real s = STX_FMA(fma, g[i], g[i], sum[i]);
        sum[i] = s;
        p[i] -= lr * g[i] / (stx_fast_sqrt(fma, s) + eps);
        g[i] = 0;
    }
}

STX_EACH_ISA(stx__adagrad_n,
             (stx_real * STX_RESTRICT p, stx_real *STX_RESTRICT sum, stx_real *STX_RESTRICT g,
              size_t n, stx_real lr, stx_real eps),
             p, sum, g, n, lr, eps)

static void stx__adagrad_part(const stx_share *s, const void *job) {
    const stx__chunks_job *j = (const stx__chunks_job *)job;
    const stx_optim_chunk *c = j->chunk + s->begin, *end = j->chunk + s->end;
    for (; c < end; c++)
        STX_CALL(s->x, stx__adagrad_n, (c->p, c->s[0], c->g, c->n, c->lr, j->eps));
}

STX_DEF void stx_adagrad_update(stx_ctx *x, const stx_update *u, const stx_optim_chunk *chunk,
                                size_t count, stx_real eps) {
    stx__chunks_job j;
    if (stx__update_skipped(x, u, chunk, count)) return;
    j.eps = eps;
    stx__each_chunk(x, chunk, count, stx__adagrad_part, &j);
}

/* Scalars of the inner loops of Adam and LAMB for one chunk. decay is the weight decay
   that is added to the gradient (or to the direction), decoupled that of the parameter;
   one of them is 0. */
typedef struct stx__adam {
    stx_real factor, beta1, rest1, beta2, rest2, eps, decay, decoupled, correction1, correction2;
    int plain;
} stx__adam;

static stx__adam stx__adam_of(const stx_adam_args *a, const stx_update *u,
                              const stx_optim_chunk *c) {
    stx__adam k;
    k.factor = u->factor;
    k.beta1 = a->beta1;
    k.rest1 = a->rest1;
    k.beta2 = a->beta2;
    k.rest2 = a->rest2;
    k.eps = a->eps;
    k.decay = a->decoupled ? 0 : c->decay;
    k.decoupled = a->decoupled ? c->decay : 0;
    k.correction1 = u->correction1;
    k.correction2 = u->correction2;
    k.plain = u->plain;
    return k;
}

/* Adam, AdamW and RAdam, with c1 = correction1 and c2 = correction2 of stx_update:

       g' = factor g + decay p
       m  = beta1 m + rest1 g'
       v  = beta2 v + rest2 g'^2
       p  = (1 - lr decoupled) p - lr (m / c1) / (sqrt(v / c2) + eps), g = 0
   If `plain` is set, p = (1 - lr decoupled) p - lr m / c1. */
STX_INNER void stx__adam_n(int fma, stx_real *p, stx_real *m, stx_real *v, stx_real *g, size_t n,
                           stx_real lr, const stx__adam *k) {
    const stx_real factor = k->factor, beta1 = k->beta1, rest1 = k->rest1, beta2 = k->beta2;
    const stx_real rest2 = k->rest2, eps = k->eps, decay = k->decay;
    const stx_real keep = 1 - lr * k->decoupled;
    const stx_real rate = lr / k->correction1, unbias = 1 / k->correction2;
    size_t i = 0;
    if (!k->plain)
        for (; i < n; i++) {
            stx_real d = STX_FMA(fma, factor, g[i], decay * p[i]);
            stx_real a = STX_FMA(fma, beta1, m[i], rest1 * d);
            stx_real s = STX_FMA(fma, beta2, v[i], rest2 * d * d);
            m[i] = a;
            v[i] = s;
            p[i] = keep * p[i] - rate * a / (stx_fast_sqrt(fma, s * unbias) + eps);
            g[i] = 0;
        }

    /* a separate loop for `plain`, because gcc does not vectorise a square root under a
       condition */
    for (; i < n; i++) {
        stx_real d = STX_FMA(fma, factor, g[i], decay * p[i]);
        stx_real a = STX_FMA(fma, beta1, m[i], rest1 * d);
        m[i] = a;
        v[i] = STX_FMA(fma, beta2, v[i], rest2 * d * d);
        p[i] = keep * p[i] - rate * a;
        g[i] = 0;
    }
}

STX_EACH_ISA(stx__adam_n,
             (stx_real * STX_RESTRICT p, stx_real *STX_RESTRICT m, stx_real *STX_RESTRICT v,
              stx_real *STX_RESTRICT g, size_t n, stx_real lr, const stx__adam *k),
             p, m, v, g, n, lr, k)

static void stx__adam_part(const stx_share *s, const void *job) {
    const stx__chunks_job *j = (const stx__chunks_job *)job;
    const stx_optim_chunk *c = j->chunk + s->begin, *end = j->chunk + s->end;
    for (; c < end; c++) {
        const stx__adam k = stx__adam_of(j->adam, j->u, c);
        STX_CALL(s->x, stx__adam_n, (c->p, c->s[0], c->s[1], c->g, c->n, c->lr, &k));
    }
}

STX_DEF void stx_adam_update(stx_ctx *x, const stx_update *u, const stx_optim_chunk *chunk,
                             size_t count, const stx_adam_args *a) {
    stx__chunks_job j;
    if (stx__update_skipped(x, u, chunk, count)) return;
    j.u = u;
    j.adam = a;
    stx__each_chunk(x, chunk, count, stx__adam_part, &j);
}

/* Computes the update direction of LAMB and stores it in g, with c1 = correction1 and
   c2 = correction2 of stx_update:

       d = factor g
       m = beta1 m + rest1 d
       v = beta2 v + rest2 d^2
       g = (m / c1) / (sqrt(v / c2) + eps) + decay p */
STX_INNER void stx__lamb_n(int fma, const stx_real *p, stx_real *m, stx_real *v, stx_real *g,
                           size_t n, const stx__adam *k) {
    const stx_real factor = k->factor, beta1 = k->beta1, rest1 = k->rest1, beta2 = k->beta2;
    const stx_real rest2 = k->rest2, eps = k->eps, decay = k->decay;
    const stx_real rate = 1 / k->correction1, unbias = 1 / k->correction2;
    size_t i;
    for (i = 0; i < n; i++) {
        stx_real d = factor * g[i];
        stx_real a = STX_FMA(fma, beta1, m[i], rest1 * d);
        stx_real s = STX_FMA(fma, beta2, v[i], rest2 * d * d);
        m[i] = a;
        v[i] = s;
        g[i] = STX_FMA(fma, decay, p[i], rate * a / (stx_fast_sqrt(fma, s * unbias) + eps));
    }
}

STX_EACH_ISA(stx__lamb_n,
             (const stx_real *STX_RESTRICT p, stx_real *STX_RESTRICT m, stx_real *STX_RESTRICT v,
              stx_real *STX_RESTRICT g, size_t n, const stx__adam *k),
             p, m, v, g, n, k)

/* Computes the update directions of LAMB. For each chunk, out (count,2) receives the
   sum of p^2 and the sum of the squared direction. */
static void stx__lamb_direction_part(const stx_share *s, const void *job) {
    const stx__chunks_job *j = (const stx__chunks_job *)job;
    size_t i;
    for (i = s->begin; i < s->end; i++) {
        const stx_optim_chunk *c = j->chunk + i;
        const stx__adam k = stx__adam_of(j->adam, j->u, c);
        STX_CALL(s->x, stx__lamb_n, (c->p, c->s[0], c->s[1], c->g, c->n, &k));
        STX_CALL(s->x, stx__squares_n, (j->out + 2 * i, c->p, c->n));
        STX_CALL(s->x, stx__squares_n, (j->out + 2 * i + 1, c->g, c->n));
    }
}

STX_DEF void stx_lamb_direction(stx_ctx *x, const stx_update *u, const stx_optim_chunk *chunk,
                                size_t count, double *squares, const stx_adam_args *a) {
    stx__chunks_job j;
    if (!u->ok) return;
    j.u = u;
    j.out = squares;
    j.adam = a;
    stx__each_chunk(x, chunk, count, stx__lamb_direction_part, &j);
}

/* Computes p = p - lr g, where g holds the update direction, and sets g to 0. */
static void stx__lamb_update_part(const stx_share *s, const void *job) {
    const stx__chunks_job *j = (const stx__chunks_job *)job;
    const stx_optim_chunk *c = j->chunk + s->begin, *end = j->chunk + s->end;
    stx__sgd k;
    k.factor = 1;
    k.momentum = k.decay = 0;
    for (; c < end; c++) {
        k.lr = c->lr;
        STX_CALL(s->x, stx__sgd_n, (c->p, NULL, c->g, c->n, &k));
    }
}

STX_DEF void stx_lamb_update(stx_ctx *x, const stx_update *u, stx_optim_chunk *chunk, size_t count,
                             const double *squares, double trust_max) {
    STX__FP_SCOPE;
    stx__chunks_job j;
    size_t k, end;
    if (stx__update_skipped(x, u, chunk, count)) return;

    /* multiply each tensor's learning rate by min(|p|, trust_max) / |direction| */
    for (k = 0; k < count; k = end) {
        double p = 0, g = 0;
        for (end = k; end < count && chunk[end].tensor == chunk[k].tensor; end++) {
            p += squares[2 * end];
            g += squares[2 * end + 1];
        }
        p = sqrt(p);
        if (trust_max > 0) p = STX_MIN(p, trust_max);
        if (p > 0 && g > 0)
            for (; k < end; k++) chunk[k].lr = (stx_real)((double)chunk[k].lr * p / sqrt(g));
    }
    stx__each_chunk(x, chunk, count, stx__lamb_update_part, &j);
}

static void stx__clip_part(const stx_share *s, const void *job) {
    const stx__chunks_job *j = (const stx__chunks_job *)job;
    size_t k, i;
    for (k = s->begin; k < s->end; k++) {
        stx_real *g = j->chunk[k].g;
        for (i = 0; i < j->chunk[k].n; i++)
            if ((g[i] < j->lo || g[i] > j->hi) && stx__finite((double)g[i]))
                g[i] = g[i] < 0 ? j->lo : j->hi;
    }
}

STX_DEF void stx_clip_values(stx_ctx *x, const stx_optim_chunk *chunk, size_t count, stx_real c) {
    stx__chunks_job j;
    j.lo = -c;
    j.hi = c;
    stx__each_chunk(x, chunk, count, stx__clip_part, &j);
}

static void stx__clamp_part(const stx_share *s, const void *job) {
    const stx__chunks_job *j = (const stx__chunks_job *)job;
    size_t k, i;
    for (k = s->begin; k < s->end; k++) {
        stx_real *p = j->chunk[k].p;
        for (i = 0; i < j->chunk[k].n; i++) {
            if (p[i] < j->lo)
                p[i] = j->lo;
            else if (p[i] > j->hi)
                p[i] = j->hi;
        }
    }
}

STX_DEF void stx_clamp(stx_ctx *x, const stx_optim_chunk *chunk, size_t count, stx_real lo,
                       stx_real hi) {
    stx__chunks_job j;
    j.lo = lo;
    j.hi = hi;
    stx__each_chunk(x, chunk, count, stx__clamp_part, &j);
}
