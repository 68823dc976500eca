#pragma once
#include "../api/config.h"
#include "../api/context.h"
#include "../api/ops.h"
#include "../api/cuda.h"
#include "../core/loops.h"
#include "../core/platform.h"
#include "../core/context.h"
#include "../core/arena.h"
#include "../core/tensors.h"
#include "../core/tape.h"
#include "../core/sums.h"


// >>mean

static stx_tensor *stx__scalar_new(stx_ctx *x) {
    const size_t one = 1;
    return stx__tensor(x, STX__STEP_F32, 1, &one);
}

typedef struct stx__scalar {
    stx_tensor t;
    double value;
    struct stx__scalar *next;
} stx__scalar;

STX_DEF stx_tensor *stx_scalar_create(stx_ctx *x, double value) {
    stx__scalar *s = (stx__scalar *)stx_persist(x, sizeof *s);
    if (!s) return NULL;
    s->t.ndim = 1;
    s->t.dim[0] = s->t.size = 1;
    s->t.is_f32 = 1;
    s->t.data = (stx_real *)stx__zeroed_bytes(x, STX__STATE, sizeof(stx_real));
    if (!s->t.data) return NULL;
    s->next = x->scalars;
    x->scalars = s;
    stx_scalar_set(x, &s->t, value);
    return stx_ok(x) ? &s->t : NULL;
}

STX_DEF void stx_scalar_set(stx_ctx *x, stx_tensor *scalar, double value) {
    STX__FP_SCOPE;
    stx__scalar *s;
    if (!stx_ok(x) || !scalar) return;
    for (s = x->scalars; s && &s->t != scalar; s = s->next) {
    }
    if (!s) {
        stx_fail(x, STX_ERR_ARG,
                 "stx_scalar_set: expected a scalar from stx_scalar_create of this context, got "
                 "another tensor");
        return;
    }
    if (!stx__finite(value)) {
        stx_bad_value(x, "stx_scalar_set", "value", value, "a finite number");
        return;
    }
#ifdef SEQTX_CUDA
    if (stx__on_gpu(x)) {
        if (value != s->value) {
            stx__host_access(x, "the previous step set a scalar to a new value "
                                "(call stx_scalar_set before the step)");
            stx_cuda_set_f32(x, s->t.data, (float)value);
        }
        s->value = value;
        return;
    }
#endif
    s->value = value;
    s->t.data[0] = (stx_real)value;
}

static void stx__mean_back(stx_ctx *x, stx__node *n) {
    stx_real *da = stx__grad(x, n->in[0]);
    if (da) STX_RUN(x, stx_mean_bwd, (x, da, n->y->grad, n->in[0]->size));
}

STX_DEF stx_tensor *stx_mean(stx_ctx *x, stx_tensor *a) {
    stx_tensor *y;
    if (!stx_ok(x) || !a) return NULL;
    y = stx__scalar_new(x);
    if (!y) return NULL;
    STX_RUN(x, stx_mean_fwd, (x, y->data, a->data, a->size));
    stx__record1(x, y, stx__mean_back, a);
    return y;
}

static void stx__sum_back(stx_ctx *x, stx__node *n) {
    stx_real *da = stx__grad(x, n->in[0]);
    if (da) STX_RUN(x, stx_sum_bwd, (x, da, n->y->grad, n->in[0]->size));
}

STX_DEF stx_tensor *stx_sum(stx_ctx *x, stx_tensor *a) {
    stx_tensor *y;
    if (!stx_ok(x) || !a) return NULL;
    y = stx__scalar_new(x);
    if (!y) return NULL;
    STX_RUN(x, stx_sum_fwd, (x, y->data, a->data, a->size));
    stx__record1(x, y, stx__sum_back, a);
    return y;
}

/* y = sum a / n */
STX_DEF void stx_mean_fwd(stx_ctx *x, stx_real *y, const stx_real *a, size_t n) {
    STX__FP_SCOPE;
    *y = (stx_real)(stx__sum_arrays(x, stx__sum_loop_run, a, NULL, n) / (double)n);
}

STX_DEF void stx_sum_fwd(stx_ctx *x, stx_real *y, const stx_real *a, size_t n) {
    STX__FP_SCOPE;
    *y = (stx_real)stx__sum_arrays(x, stx__sum_loop_run, a, NULL, n);
}

typedef struct stx__increase_job {
    size_t n;
    stx_real *y, by;
} stx__increase_job;

STX_INNER void stx__increase_loop(int fma, const stx_share *s, const void *job) {
    const stx__increase_job *j = (const stx__increase_job *)job;
    size_t first, n = stx__share_of(s, j->n, &first), i;
    stx_real *y = j->y + first;
    const stx_real by = j->by;
    (void)fma;
    for (i = 0; i < n; i++) y[i] += by;
}

STX_LOOP(stx__increase_loop)

/* Adds `by` to each element of y (n). */
static void stx__increase(stx_ctx *x, stx_real *y, size_t n, stx_real by) {
    stx__increase_job j;
    j.n = n;
    j.y = y;
    j.by = by;
    stx__for_elements(x, n, n, stx__increase_loop_run, &j);
}

STX_DEF void stx_mean_bwd(stx_ctx *x, stx_real *da, const stx_real *dy, size_t n) {
    STX__FP_SCOPE;
    stx__increase(x, da, n, dy[0] / (stx_real)n);
}

STX_DEF void stx_sum_bwd(stx_ctx *x, stx_real *da, const stx_real *dy, size_t n) {
    stx__increase(x, da, n, dy[0]);
}

static void stx__add_means_back(stx_ctx *x, stx__node *n) {
    stx_means_args *m = (stx_means_args *)n->save;
    size_t k;
    int fresh;
    m->overwrite = 0;
    for (k = 0; k < m->count; k++) {
        m->da[k] = stx__grad_fresh(x, n->in[1 + k], &fresh);
        m->overwrite |= fresh << k;
    }
    if (x->error.code) return;
    m->dy = n->y->grad;
    STX_RUN(x, stx_add_means_bwd, (x, m));
    stx__grad_dy(x, n, n->in[0], 1);
}

/* Returns y + s sum_i mean(a[i]) for i < count, where count is at most STX_MEANS. */
static stx_tensor *stx__add_means(stx_ctx *x, stx_tensor *y, stx_tensor *const *a, size_t count,
                                  stx_real s) {
    stx_tensor *sum = stx__scalar_new(x), *in[1 + STX_MEANS];
    stx_means_args m;
    stx__node *node;
    size_t k;
    if (!sum) return NULL;
    memset(&m, 0, sizeof m);
    m.count = count;
    m.s = s;
    m.y0 = y->data;
    m.y = sum->data;
    in[0] = y;
    for (k = 0; k < count; k++) {
        in[1 + k] = a[k];
        m.a[k] = a[k]->data;
        m.n[k] = a[k]->size;
    }
    STX_RUN(x, stx_add_means_fwd, (x, &m));
    node = stx__record(x, sum, stx__add_means_back, in, 1 + (int)count);
    return stx__save(x, node, &m, sizeof m) ? sum : NULL;
}

STX_DEF stx_tensor *stx_add_means(stx_ctx *x, stx_tensor *y, stx_tensor *const *a, size_t count,
                                  double s) {
    STX__FP_SCOPE;
    size_t k;
    char t[96];
    if (!stx_ok(x) || !y || (count && !a)) return NULL;
    for (k = 0; k < count; k++)
        if (!a[k]) return NULL;
    STX__NEED(x, y->size == 1, STX_ERR_SHAPE,
              "stx_add_means: y: expected one element, got shape %s", stx__shape(y, t));
    for (k = 0; y && k < count; k += STX_MEANS)
        y = stx__add_means(x, y, a + k, STX_MIN(count - k, (size_t)STX_MEANS), (stx_real)s);
    return y;
}

STX_DEF void stx_add_means_fwd(stx_ctx *x, const stx_means_args *m) {
    STX__FP_SCOPE;
    double means = 0;
    size_t k;
    for (k = 0; k < m->count; k++)
        means += stx__sum_arrays(x, stx__sum_loop_run, m->a[k], NULL, m->n[k]) / (double)m->n[k];
    *m->y = (stx_real)((double)*m->y0 + (double)m->s * means);
}

STX_DEF void stx_add_means_bwd(stx_ctx *x, const stx_means_args *m) {
    STX__FP_SCOPE;
    size_t k;
    for (k = 0; k < m->count; k++) {
        if (!m->da[k]) continue;
        if (m->overwrite >> k & 1) memset(m->da[k], 0, m->n[k] * sizeof(stx_real));
        stx__increase(x, m->da[k], m->n[k], m->s * *m->dy / (stx_real)m->n[k]);
    }
}
