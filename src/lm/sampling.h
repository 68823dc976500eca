#pragma once
#include "../api/config.h"
#include "../api/context.h"
#include "../api/train.h"
#include "../core/loops.h"
#include "../core/functions.h"
#include "../core/platform.h"


// >>sampling

/* Returns the largest v >= `least` such that the number of weights >= v (if `count` is
   1) or the sum of these weights (if `count` is 0) is at least `goal`. Bisects over bit
   patterns, which sort in the same order as the non-negative values they encode, in at
   most 32 passes for float or 64 for double. */
static stx_real stx__weight_at(const stx_real *w, size_t V, stx_real least, double goal,
                               int count) {
#ifdef SEQTX_DOUBLE
    uint64_t lo, hi, mid;
#else
    uint32_t lo, hi, mid;
#endif
    stx_real top = 0, v = least;
    size_t i;
    for (i = 0; i < V; i++)
        if (w[i] > top) top = w[i];
    memcpy(&lo, &least, sizeof lo);
    memcpy(&hi, &top, sizeof hi);
    while (lo < hi) {
        double reached = 0;
        mid = hi - (hi - lo) / 2;
        memcpy(&v, &mid, sizeof v);
        for (i = 0; i < V; i++)
            if (w[i] >= v) reached += count ? 1 : (double)w[i];
        if (reached >= goal)
            lo = mid;
        else
            hi = mid - 1;
    }
    memcpy(&v, &lo, sizeof v);
    return v;
}

static int stx__minus_infinity(double v) {
    uint64_t bits;
    memcpy(&bits, &v, 8);
    return bits == (uint64_t)0xfff << 52;
}

/* Returns the index of the largest logit, or -1 if any logit is NaN or +inf or if all
   of them are -inf. A logit of -inf gives its token probability 0. */
static int32_t stx__best_token(const stx_real *logits, size_t V) {
    size_t i, best = 0;
    for (i = 0; i < V; i++) {
        const double l = (double)logits[i];
        if (!stx__finite(l) && !stx__minus_infinity(l)) return -1;
        if (logits[i] > logits[best]) best = i;
    }
    return stx__finite((double)logits[best]) ? (int32_t)best : -1;
}

static double stx__sum_from(const stx_real *w, size_t V, stx_real least) {
    double sum = 0;
    size_t i;
    for (i = 0; i < V; i++)
        if (w[i] >= least) sum += (double)w[i];
    return sum;
}

/* Writes the logits after the repetition penalty to y (V). The penalty depends on the
   origin of the logits, which are defined only up to a constant; log-probabilities, for
   example, are all negative. Therefore the mean is subtracted first. (Training leaves the
   mean of the logits near its initial value of 0, so this hardly changes the logits of a
   plain output head.) Returns 0 if an id is out of range. */
static int stx__penalise(const stx_sampling *s, const stx_real *logits, size_t V, stx_real *y) {
    const double penalty = s->repetition_penalty;
    double mean = 0, v;
    size_t i, n = 0;
    for (i = 0; i < V; i++) {
        if (!stx__finite((double)logits[i])) continue;
        mean += (double)logits[i];
        n++;
    }
    if (n) mean /= (double)n;
    for (i = 0; i < V; i++) y[i] = (stx_real)((double)logits[i] - mean);
    for (i = 0; i < s->recent_count; i++) {
        const int32_t id = s->recent[i];
        if (id < 0 || (size_t)id >= V) return 0;
        v = (double)logits[id] - mean;
        if (stx__finite(v)) y[id] = (stx_real)(v > 0 ? v / penalty : v * penalty);
    }
    return 1;
}

STX_DEF int32_t stx_sample(const stx_sampling *s, uint64_t counter, const stx_real *logits,
                           size_t V, stx_real *work) {
    STX__FP_SCOPE;
    size_t i;
    int32_t token;
    double sum, u, best;
    uint32_t r[4];
    stx_real least = 0;
    if (!logits || !V || V > INT32_MAX) return -1;
    if (s && s->recent_count && s->repetition_penalty > 0 && s->repetition_penalty != 1) {
        if (!work || !s->recent || !stx__penalise(s, logits, V, work)) return -1;
        logits = work;
    }
    token = stx__best_token(logits, V);
    if (token < 0 || !s || s->temperature <= 0) return token;
    if (!work) return -1;
    best = (double)logits[token];
    for (i = 0; i < V; i++)
        work[i] = (stx_real)stx_math_exp(((double)logits[i] - best) / s->temperature);

    /* top_k and top_p both keep the tokens whose weight reaches a threshold. For top_k,
       the threshold is the k-th largest weight. For top_p, it is the largest threshold
       that keeps at least the fraction top_p of the weight that remains after top_k.
       Tokens of equal weight are kept or dropped together, so the choice does not
       depend on the order of the vocabulary. */
    if (s->top_k && s->top_k < V) least = stx__weight_at(work, V, 0, (double)s->top_k, 1);
    sum = stx__sum_from(work, V, least);
    if (s->top_p > 0 && s->top_p < 1) {
        least = stx__weight_at(work, V, least, s->top_p * sum, 0);
        sum = stx__sum_from(work, V, least);
    }

    stx_philox(s->seed, counter, 0x73616d706c65u, r);   /* "sample" in ASCII */
    u = ((double)r[0] + ((double)r[1] + 0.5) / 4294967296.0) / 4294967296.0 * sum;
    for (i = 0; i < V; i++)
        if (work[i] >= least && work[i] > 0) {
            token = (int32_t)i;
            u -= (double)work[i];
            if (u < 0) break;
        }
    return token;
}
