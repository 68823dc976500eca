#pragma once
#include "../api/config.h"
#include "../api/ops.h"
#include "loops.h"


// >>maths

STX_STRICT_ON

/* Functions for inner loops. They contain no calls and, thanks to stx__pick, no branches,
   so compilers vectorise loops over them. In builds with SEQTX_DOUBLE, they call libm. */
#ifdef SEQTX_DOUBLE

STX_INNER double stx_fast_exp(int fma, double v) {
    (void)fma;
    return exp(v);
}

STX_INNER double stx_fast_tanh(int fma, double v) {
    (void)fma;
    return tanh(v);
}

STX_INNER double stx_fast_sqrt(int fma, double v) {
    (void)fma;
    return sqrt(v);
}

STX_INNER double stx_fast_phi(int fma, double v, double *density) {
    (void)fma;
    *density = 0.39894228040143267794 * exp(-0.5 * v * v);
    return 0.5 * erfc(v * -0.70710678118654752440);
}

#else

/* yes ? a : b, computed on the bits; yes is 0 or 1. Compilers turn a conditional operator
   that contains sums into a branch, and then do not vectorise the loop. */
STX_INNER float stx__pick(int yes, float a, float b) {
    uint32_t mask = 0u - (uint32_t)yes, i, k;
    memcpy(&i, &a, 4);
    memcpy(&k, &b, 4);
    i = (i & mask) | (k & ~mask);
    memcpy(&a, &i, 4);
    return a;
}

/* e^v to 1 ulp; 0 below -87.33, infinity above 88.72, NaN for NaN. With v = n ln 2 + r
   and |r| <= ln 2 / 2, e^v = 2^n e^r, and e^r is a minimax polynomial with error 3e-9. */
STX_INNER float stx_fast_exp(int fma, float v) {
    /* Adding 1.5 2^23 rounds v / ln 2 to the integer n and puts n into the low bits of
       t. */
    float t = STX_FMA(fma, v, 1.44269504088896341f, 12582912.0f), n, r, p;
    uint32_t bits, power;
    memcpy(&power, &t, 4);
  #ifdef STX__EXACT_SUMS
    n = t - 12582912.0f;
  #else
    n = (float)(int32_t)(power - 0x4b400000u);      /* the same value, computed from the
                                                       bits, which is slower */
  #endif

    r = STX_FMA(fma, n, -0.693359375f, v);
    r = STX_FMA(fma, n, 2.12194440e-4f, r);
    p = STX_FMA(fma, 1.3814173990e-3f, r, 8.3689217968e-3f);
    p = STX_FMA(fma, p, r, 4.1668407976e-2f);
    p = STX_FMA(fma, p, r, 1.6666518939e-1f);
    p = STX_FMA(fma, p, r, 4.9999993333e-1f);
    p = STX_FMA(fma, p, r, 1.0f);
    p = STX_FMA(fma, p, r, 1.0f);

    memcpy(&bits, &p, 4);
    bits += power << 23;        /* times 2^n; valid even for n = 128, because then p < 1 */
    memcpy(&p, &bits, 4);
    return stx__pick(v < -87.33f, 0, stx__pick(v <= 88.72f, p, v + (float)HUGE_VALF));
}

/* tanh v to 1.5 ulp: a polynomial near 0 (Cephes), otherwise 1 - 2 / (e^2|v| + 1). */
STX_INNER float stx_fast_tanh(int fma, float v) {
    float a = stx__pick(v < 0, -v, v), z = v * v, p;
    float large = 1 - 2 / (stx_fast_exp(fma, 2 * a) + 1);
    p = STX_FMA(fma, -5.70498872745e-3f, z, 2.06390887954e-2f);
    p = STX_FMA(fma, p, z, -5.37397155531e-2f);
    p = STX_FMA(fma, p, z, 1.33314422036e-1f);
    p = STX_FMA(fma, p, z, -3.33332819422e-1f);
    p = STX_FMA(fma, p * z, v, v);
    return stx__pick(a < 0.625f, p, stx__pick(v < 0, -large, large));
}

/* The square root of v >= 0 to 1 ulp. (sqrtf can set errno, so compilers do not
   vectorise it.) 1 / sqrt(v) is first estimated from the bits of v, with a well-known
   constant, and improved by two Newton steps; a third step is applied to the root
   itself. For denormals, the result is close to 0 and too small. */
STX_INNER float stx_fast_sqrt(int fma, float v) {
    float y, h = 0.5f * v, s;
    uint32_t bits;
    memcpy(&bits, &v, 4);
    bits = 0x5f3759dfu - (bits >> 1);
    memcpy(&y, &bits, 4);
    y *= STX_FMA(fma, -h * y, y, 1.5f);
    y *= STX_FMA(fma, -h * y, y, 1.5f);
    s = v * y;
    s = STX_FMA(fma, STX_FMA(fma, -s, s, v), 0.5f * y, s);
    return stx__pick(v <= FLT_MAX, s, v);
}

/* The normal distribution Phi(v) and its density. With a = |v|, the tail 1 - Phi(a) is
   e^(-a^2/2) times a polynomial in a / (a + 1/0.33) that is 1/2 at 0 (similar to
   Abramowitz and Stegun 26.2.17; minimax, error 1e-8). This is accurate where 1 + erf
   would suffer from cancellation. */
STX_INNER float stx_fast_phi(int fma, float v, float *density) {
    float a = stx__pick(v < 0, -v, v), u, e, p;
    a = stx__pick(a > 15, 15, a);
    u = a / (a + 3.03030303f);
    e = stx_fast_exp(fma, -0.5f * a * a);
    p = STX_FMA(fma, 2.652815441e-2f, u, -8.680494655e-2f);
    p = STX_FMA(fma, p, u, 6.920907668e-2f);
    p = STX_FMA(fma, p, u, 1.867111309e-2f);
    p = STX_FMA(fma, p, u, 6.716024318e-2f);
    p = STX_FMA(fma, p, u, -1.548621056e-1f);
    p = STX_FMA(fma, p, u, -3.177386036e-1f);
    p = STX_FMA(fma, p, u, 1.086760542f);
    p = STX_FMA(fma, p, u, -1.208915990f);
    p = STX_FMA(fma, p, u, 0.5f) * e;
    *density = 0.39894228040143267794f * e;
    return stx__pick(v < 0, p, 1 - p);
}

#endif

STX_INNER stx_real stx_fast_sigmoid(int fma, stx_real v) {
    return 1 / (1 + stx_fast_exp(fma, -v));
}

/* Sums in 16 lanes, which compilers can vectorise without reordering. stx_fast_lanes
   adds the lanes, stx_fast_sum computes the sum of a[i], and stx_fast_dot computes the
   sum of a[i] b[i]. */
STX_INNER stx_real stx_fast_lanes(stx_real *s) {
    size_t e;
    for (e = 0; e < 8; e++) s[e] += s[e + 8];
    for (e = 0; e < 4; e++) s[e] += s[e + 4];
    return (s[0] + s[2]) + (s[1] + s[3]);
}

STX_INNER stx_real stx_fast_sum(const stx_real *a, size_t n) {
    stx_real s[16] = {0}, t = 0;
    size_t i, e;
    for (i = 0; i + 16 <= n; i += 16)
        for (e = 0; e < 16; e++) s[e] += a[i + e];
    for (; i < n; i++) t += a[i];
    return t + stx_fast_lanes(s);
}

STX_INNER stx_real stx_fast_dot(int fma, const stx_real *a, const stx_real *b, size_t n) {
    stx_real s[16] = {0}, t = 0;
    size_t i, e;
    for (i = 0; i + 16 <= n; i += 16)
        for (e = 0; e < 16; e++) s[e] = STX_FMA(fma, a[i + e], b[i + e], s[e]);
    for (; i < n; i++) t = STX_FMA(fma, a[i], b[i], t);
    return t + stx_fast_lanes(s);
}

/* Returns act(v), where act is STX_ACT_..; NaN stays NaN. */
STX_INNER stx_real stx__act_any(int fma, stx_real v, int act) {
    stx_real density;
    switch (act) {
    case STX_ACT_RELU: return v < 0 ? 0 : v;
    case STX_ACT_GELU: return v * stx_fast_phi(fma, v, &density);
    case STX_ACT_TANH: return stx_fast_tanh(fma, v);
    case STX_ACT_SIGMOID: return stx_fast_sigmoid(fma, v);
    default: return v;
    }
}

/* Returns g act'(a), given y = act(a) and, for gelu only, a. */
STX_INNER stx_real stx__act_slope_any(int fma, stx_real g, stx_real y, stx_real a, int act) {
    stx_real density, phi;
    switch (act) {
    case STX_ACT_RELU: return y > 0 ? g : 0;
    case STX_ACT_GELU:
        phi = stx_fast_phi(fma, a, &density);
        return g * STX_FMA(fma, a, density, phi);
    case STX_ACT_TANH: return g * STX_FMA(fma, -y, y, 1);
    case STX_ACT_SIGMOID: return g * (y * (1 - y));
    default: return g;
    }
}

STX_STRICT_OFF
