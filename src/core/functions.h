#pragma once
#include "loops.h"


// >>functions

STX_STRICT_ON

/* exp, log, pow, sin and cos in double, for scalar code: losses, schedules, positions,
   initial values, sampling. Those of C libraries differ in their last bits. These use
   only sums, products and quotients, which IEEE 754 defines to the last bit, so that
   results are the same on every machine. Errors: exp and log 1 ulp, sin and cos 2.5 ulp;
   see pow below.

   A constant of more than 53 bits, such as ln 2, is a sum, high + low. The high part ends
   in zeros, so that its product with an integer n is exact. */
static const double stx__ln2_high = 6.93147180369123816490e-01;
static const double stx__ln2_low = 1.90821492927058770002e-10;

/* The double with the given bits. */
static inline double stx__double_of_bits(uint64_t bits) {
    double v;
    memcpy(&v, &bits, 8);
    return v;
}

static inline uint64_t stx__bits_of_double(double v) {
    uint64_t bits;
    memcpy(&bits, &v, 8);
    return bits;
}

/* v 2^n for -2044 <= n <= 1024 and 1/2 < v < 2, in two steps, because 2^n alone need not
   be a double. */
static inline double stx__scale_by_power(double v, int n) {
    const int half = n / 2, rest = n - half;
    v *= stx__double_of_bits((uint64_t)(1023 + half) << 52);
    return v * stx__double_of_bits((uint64_t)(1023 + rest) << 52);
}

/* e^v: with v = n ln 2 + r and |r| <= ln 2 / 2, e^v = 2^n e^r, and e^r by its Taylor
   series. */
static inline double stx_math_exp(double v) {
    double n, r, e = 0;
    int k;
    if (!(v < 709.79)) return v > 0 ? HUGE_VAL : v;     /* NaN stays NaN */
    if (v < -745.2) return 0;
    n = floor(v * 1.44269504088896340736 + 0.5);
    r = v - n * stx__ln2_high - n * stx__ln2_low;
    for (k = 14; k > 2; k--) e = (e + 1) * r / k;
    /* the largest terms last: 1 + (r + r^2 / 2 (1 + ..)) */
    e = 1 + (r + r * r * 0.5 * (e + 1));
    return stx__scale_by_power(e, (int)n);
}

/* log v: with v = 2^n m, sqrt(1/2) <= m < sqrt(2), f = m - 1 and s = f / (2 + f),
   log v = n ln 2 + log(1 + f), and
       log(1 + f) = 2 atanh s = 2 s + s R,  R = 2/3 s^2 + 2/5 s^4 + ..
   2 s = f - s f, and f is exact. */
static inline double stx_math_log(double v) {
    double n = 0, f, s, z, half_square, R = 0;
    uint64_t bits;
    int k;
    if (v < 2.2250738585072014e-308 && v > 0) {     /* denormal */
        v *= 18014398509481984.0;                   /* 2^54 */
        n = -54;
    }
    if (!(v > 0)) return v == 0 ? -HUGE_VAL : (double)NAN;
    if (v > DBL_MAX) return v;
    bits = stx__bits_of_double(v);
    /* this addition carries into the exponent if m would be sqrt(2) or more */
    bits += 0x3ff0000000000000u - 0x3fe6a09e667f3bcdu;
    n += (double)((int)(bits >> 52) - 1023);
    f = stx__double_of_bits((bits & 0xfffffffffffffu) + 0x3fe6a09e667f3bcdu) - 1;
    s = f / (2 + f);
    z = s * s;
    for (k = 23; k >= 3; k -= 2) R = z * (R + 2.0 / k);
    half_square = 0.5 * f * f;
    return n * stx__ln2_high
           - ((half_square - (s * (half_square + R) + n * stx__ln2_low)) - f);
}

/* a^b. If b is an integer of at most 31 bits, by repeated squaring, which is exact if the
   result and all squares are; otherwise e^(b log a), with a relative error of about
   |b log a| 2^-53. */
static inline double stx_math_pow(double a, double b) {
    double power = a, v = 1;
    uint32_t k;
    if (!(fabs(b) < 2147483648.0) || floor(b) != b)
        return a == 0 && b > 0 ? 0 : stx_math_exp(b * stx_math_log(a));
    for (k = (uint32_t)fabs(b); k; k >>= 1) {
        if (k & 1) v *= power;
        power *= power;
    }
    return b < 0 ? 1 / v : v;
}

/* sin v if shift is 0, cos v if it is 1: with v = n pi/2 + r and |r| <= pi/4, the sine or
   cosine of r by its Taylor series, depending on the quadrant n. From v = 2^20 pi/2 =
   1.6 million on, r would lose bits, and the C library computes the result. */
static inline double stx__sine(double v, int shift) {
    const double n = floor(v * 0.63661977236758134308 + 0.5);
    double r, z, sum = 0;
    int k, quadrant;
    if (!(fabs(n) <= 1048576)) return shift ? cos(v) : sin(v);
    /* pi/2 in three parts, two of them of 33 bits */
    r = v - n * 1.57079632673412561417e+00;
    r = (r - n * 6.07710050630396597660e-11) - n * 2.02226624879595063154e-21;
    z = r * r;
    quadrant = ((int)n + shift) & 3;
    if (quadrant & 1) {
        for (k = 18; k > 2; k -= 2) sum = -z * (sum + 1) / (k * (k - 1));
        sum = 1 - 0.5 * z * (sum + 1);
    } else {
        for (k = 19; k > 3; k -= 2) sum = -z * (sum + 1) / (k * (k - 1));
        sum = r - r * z / 6 * (sum + 1);
    }
    return quadrant & 2 ? -sum : sum;
}

static inline double stx_math_sin(double v) {
    return stx__sine(v, 0);
}

static inline double stx_math_cos(double v) {
    return stx__sine(v, 1);
}

STX_STRICT_OFF
