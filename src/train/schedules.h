#pragma once
#include "../api/config.h"
#include "../api/context.h"
#include "../api/train.h"
#include "../core/loops.h"
#include "../core/functions.h"
#include "../core/platform.h"


// >>schedules

static const double stx__pi = 3.14159265358979323846;

/* Returns the learning rate of SRU++'s schedule for update k = 0, 1, .. */
static double stx__lr_recursive(const stx_schedule *s, double k) {
    STX__FP_SCOPE;
    const double W = (double)s->warmup, T = (double)s->total, last = STX_MAX(W, 1) - 1;
    const double top = W > 0 && s->literal ? s->lr * last / W : s->lr;
    if (k < last && s->literal) return s->lr * k / W;
    if (k < last) return s->lr_start + (s->lr - s->lr_start) * (k + 1) / W;
    if (!(T > last)) return top;
    return s->lr_min
           + (top - s->lr_min) * (1 + stx_math_cos(stx__pi * STX_MIN(k, T) / T))
                 / (1 + stx_math_cos(stx__pi * last / T));
}

/* Returns the learning rate of update k = 0, 1, .. as computed by Transformer-XL's code
   (1901.02860). Called only if s->literal is set. */
static double stx__lr_literal(const stx_schedule *s, double k) {
    STX__FP_SCOPE;
    const double W = (double)s->warmup, T = (double)s->total;
    if (s->kind == STX_LR_INV_SQRT) {
        if (k == 0) return W == 0 ? s->lr : 0;
        return k <= W ? s->lr * k / (W * sqrt(W)) : s->lr / sqrt(k);
    }
    if (k <= 0) return s->lr;
    if (k < W) return s->lr * k / W;
    if (s->kind == STX_LR_COSINE && T > 0)
        return s->lr_min + (s->lr - s->lr_min) * 0.5 * (1 + stx_math_cos(stx__pi * k / T));
    /* constant rate: the authors' code sets it only during the warm-up of W updates,
       and never if W = 1 */
    return W > 1 ? s->lr * (W - 1) / W : s->lr;
}

/* Returns the learning rate of update n = 1, 2, .. before s->decay is applied. */
static double stx__schedule_lr(const stx_schedule *s, uint64_t n) {
    STX__FP_SCOPE;
    const double u = (double)n, W = (double)s->warmup, T = (double)s->total;
    if (s->kind == STX_LR_NOAM) {
        const double k = STX_MAX(u, 1), rise = W > 0 ? k / (W * sqrt(W)) : HUGE_VAL;
        return s->lr / sqrt(s->dim > 0 ? s->dim : 1) * STX_MIN(1 / sqrt(k), rise);
    }
    if (s->kind == STX_LR_RECURSIVE) return stx__lr_recursive(s, STX_MAX(u, 1) - 1);
    if (s->literal) return stx__lr_literal(s, u - 1);

    if (u < W) return s->lr_start + (s->lr - s->lr_start) * u / W;
    if (s->kind == STX_LR_COSINE && T > W)
        return s->lr_min
               + (s->lr - s->lr_min) * 0.5
                     * (1 + stx_math_cos(stx__pi * STX_MIN(1, (u - W) / (T - W))));
    if (s->kind == STX_LR_INV_SQRT) return s->lr * sqrt(STX_MAX(W, 1) / STX_MAX(u, 1));
    return s->lr;
}

STX_DEF double stx_schedule_lr(const stx_schedule *s, uint64_t n) {
    STX__FP_SCOPE;
    double lr;
    if (!s) return 0;
    lr = stx__schedule_lr(s, n);
    if (s->decay != 0 && n > s->decay_from) {
        uint64_t more = s->decay_every ? (n - 1 - s->decay_from) / s->decay_every : 0;
        lr *= stx_math_pow(s->decay, 1 + (double)more);
    }
    STX__FP_PIN(lr);
    return lr;
}
