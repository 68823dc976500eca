/* exec_float.cpp - floating-point arithmetic. Compile with -ffp-contract=off: mul and add
   are rounded separately, and only fma is fused. */
#include "exec.h"
#include <fenv.h>
#include <limits>

namespace ptx {

// >>16-bit floats

/* The bits of d, rounded to a format with the given mantissa bits and exponents. */
static uint32_t narrow(double d, int mantissa, int min_exponent, int max_exponent, rounding r) {
    int exponent_bits = 15 - mantissa;
    uint32_t sign = signbit(d) ? 0x8000 : 0;
    uint32_t infinity = ((1u << exponent_bits) - 1) << mantissa;
    if (d != d) return 0x7fff;
    if (d == 0) return sign;
    if (isinf(d)) return sign | infinity;

    double magnitude = fabs(d);
    int e = ilogb(magnitude);
    if (e < min_exponent) e = min_exponent;
    double scaled = ldexp(magnitude, mantissa - e);     /* below 2^(mantissa + 1) */
    double whole = floor(scaled), rest = scaled - whole;
    bool up = false;
    switch (r) {
    case TOWARD_ZERO: break;
    case DOWN: up = sign && rest > 0; break;
    case UP: up = !sign && rest > 0; break;
    case NEAREST_AWAY: up = rest >= 0.5; break;
    default: up = rest > 0.5 || (rest == 0.5 && fmod(whole, 2) == 1); break;
    }
    if (up) whole += 1;
    if (whole >= ldexp(1, mantissa + 1)) {
        whole /= 2;
        e++;
    }
    if (e > max_exponent) {
        bool to_infinity = r != TOWARD_ZERO && !(r == DOWN && !sign) && !(r == UP && sign);
        return sign | (to_infinity ? infinity : infinity - 1);
    }
    uint32_t bits = (uint32_t)whole;
    bool normal = bits >> mantissa;
    if (normal) bits += (uint32_t)(e - min_exponent) << mantissa;
    return sign | bits;
}

half to_half(double d, rounding r) { return {(uint16_t)narrow(d, 10, -14, 15, r)}; }
bfloat to_bfloat(double d, rounding r) { return {(uint16_t)narrow(d, 7, -126, 127, r)}; }

float to_float(half h) {
    uint32_t sign = (uint32_t)(h.bits & 0x8000) << 16;
    uint32_t exponent = h.bits >> 10 & 31, mantissa = h.bits & 0x3ff;
    if (exponent == 31) return bits_to_float(sign | 0x7f800000 | mantissa << 13);
    float magnitude = exponent ? ldexpf((float)(mantissa | 0x400), (int)exponent - 25)
                               : ldexpf((float)mantissa, -24);
    return sign ? -magnitude : magnitude;
}


// >>f32 and f64

/* The NaN that single-precision instructions return. */
static inline float canonical(float f) { return f == f ? f : bits_to_float(0x7fffffff); }
static inline double canonical(double d) { return d; }

/* .ftz: subnormal numbers become zeros with their sign. */
template <bool FLUSH> static inline float flushed(float f) {
    if (!FLUSH) return f;
    return fabsf(f) < 0x1p-126f ? bits_to_float(float_bits(f) & 0x80000000u) : f;
}

template <bool FLUSH> static inline double flushed(double d) { return d; }

template <class T> static inline T saturated(T x) {
    T upper = x < 1 ? x : 1;
    return x > 0 ? upper : 0;
}

/* Operations on T. In an Op<T, FLUSH>, results and operands are flushed if FLUSH. */
#define FLOAT_OPERATION_2(name, expression)                                             \
    template <class T, bool FLUSH> struct name {                                        \
        static T of(T a, T b) {                                                         \
            a = flushed<FLUSH>(a);                                                      \
            b = flushed<FLUSH>(b);                                                      \
            return flushed<FLUSH>(canonical((T)(expression)));                          \
        }                                                                               \
    }

FLOAT_OPERATION_2(float_add, a + b);
FLOAT_OPERATION_2(float_sub, a - b);
FLOAT_OPERATION_2(float_mul, a * b);
FLOAT_OPERATION_2(float_div, a / b);
FLOAT_OPERATION_2(float_add_sat, saturated(a + b));
FLOAT_OPERATION_2(float_sub_sat, saturated(a - b));
FLOAT_OPERATION_2(float_mul_sat, saturated(a * b));

static inline float fused(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
static inline double fused(double a, double b, double c) { return __builtin_fma(a, b, c); }

template <class T, bool FLUSH> struct float_fma {
    static T of(T a, T b, T c) {
        T sum = fused(flushed<FLUSH>(a), flushed<FLUSH>(b), flushed<FLUSH>(c));
        return flushed<FLUSH>(canonical(sum));
    }
};

template <class T, bool FLUSH> struct float_fma_sat {
    static T of(T a, T b, T c) { return saturated(float_fma<T, FLUSH>::of(a, b, c)); }
};

/* Of a number and a NaN, the number; -0 is less than +0. */
template <class T, bool FLUSH> struct float_min {
    static T of(T a, T b) {
        a = flushed<FLUSH>(a);
        b = flushed<FLUSH>(b);
        T less = a < b ? a : b;
        if (a == b) less = signbit(a) ? a : b;
        T number = b != b ? a : less;
        return a != a ? canonical(b) : number;
    }
};

template <class T, bool FLUSH> struct float_max {
    static T of(T a, T b) {
        a = flushed<FLUSH>(a);
        b = flushed<FLUSH>(b);
        T more = a > b ? a : b;
        if (a == b) more = signbit(a) ? b : a;
        T number = b != b ? a : more;
        return a != a ? canonical(b) : number;
    }
};

/* min.NaN and max.NaN return NaN if one operand is NaN. */
template <class T, bool FLUSH> struct float_min_nan {
    static T of(T a, T b) {
        return a != a || b != b ? canonical(a + b) : float_min<T, FLUSH>::of(a, b);
    }
};

template <class T, bool FLUSH> struct float_max_nan {
    static T of(T a, T b) {
        return a != a || b != b ? canonical(a + b) : float_max<T, FLUSH>::of(a, b);
    }
};

template <class T, bool FLUSH> struct float_abs {
    static T of(T a) { return flushed<FLUSH>((T)__builtin_copysign(a, 1.0)); }
};

template <class T, bool FLUSH> struct float_neg {
    static T of(T a) { return flushed<FLUSH>(-a); }
};

template <> float float_abs<float, false>::of(float a) {
    return bits_to_float(float_bits(a) & 0x7fffffffu);
}


// >>16-bit arithmetic, computed in double. Where a result in double is not exact, this
// does not change how it is rounded to 16 bits, except for fma: a bf16 product can be
// halfway between two numbers, and then an addend of any size decides.

/* a * b + c for an exact product: if the sum is not exact, its neighbour in double whose
   last bit is 1. Rounded again to fewer bits, this is the sum rounded once. */
static double fused_to_odd(double a, double b, double c) {
    double p = a * b, s = p + c, part = s - p;
    double error = (p - (s - part)) + (c - part);
    uint64_t bits = to_word(s);
    if (!isfinite(s) || error == 0 || bits & 1) return s;
    return from_word<double>((error > 0) == (s > 0) ? bits + 1 : bits - 1);
}

static inline double widen(half h) { return (double)to_float(h); }
static inline double widen(bfloat b) { return (double)to_float(b); }
template <class T> static T rounded_to(double d);
template <> half rounded_to<half>(double d) { return to_half(d, NEAREST_EVEN); }
template <> bfloat rounded_to<bfloat>(double d) { return to_bfloat(d, NEAREST_EVEN); }

/* One value, or two packed into 32 bits. */
template <class T, template <class, bool> class Op> struct small {
    static T one(T a, T b) { return rounded_to<T>(Op<double, false>::of(widen(a), widen(b))); }
    static T one(T a) { return rounded_to<T>(Op<double, false>::of(widen(a))); }

    static T low(uint32_t a) { return {(uint16_t)a}; }
    static T high(uint32_t a) { return {(uint16_t)(a >> 16)}; }
    template <class... A> static uint32_t both(A... a) {
        return (uint32_t)one(high(a)...).bits << 16 | one(low(a)...).bits;
    }
    static uint32_t pair1(uint32_t a) { return both(a); }
    static uint32_t pair2(uint32_t a, uint32_t b) { return both(a, b); }
    static T one1(T a) { return one(a); }
    static T one2(T a, T b) { return one(a, b); }
};

template <class T> static T small_fma(T a, T b, T c) {
    return rounded_to<T>(fused_to_odd(widen(a), widen(b), widen(c)));
}

template <class T> static uint32_t small_fma_pair(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t result = 0;
    for (unsigned shift : {0, 16}) {
        T r = small_fma<T>({(uint16_t)(a >> shift)}, {(uint16_t)(b >> shift)},
                           {(uint16_t)(c >> shift)});
        result |= (uint32_t)r.bits << shift;
    }
    return result;
}

template <template <class, bool> class Op> static execute *small_unary(type t) {
    if (t == F16) return map<small<half, Op>::one1>;
    if (t == BF16) return map<small<bfloat, Op>::one1>;
    return t == F16X2 ? map<small<half, Op>::pair1> : map<small<bfloat, Op>::pair1>;
}

template <template <class, bool> class Op> static execute *small_binary(type t) {
    if (t == F16) return map<small<half, Op>::one2>;
    if (t == BF16) return map<small<bfloat, Op>::one2>;
    return t == F16X2 ? map<small<half, Op>::pair2> : map<small<bfloat, Op>::pair2>;
}

template <template <class, bool> class Op> static execute *unary(type t, bool flush) {
    if (t == F64) return map<Op<double, false>::of>;
    if (t == F32) return flush ? map<Op<float, true>::of> : map<Op<float, false>::of>;
    return small_unary<Op>(t);
}

template <template <class, bool> class Op> static execute *binary(type t, bool flush) {
    if (t == F64) return map<Op<double, false>::of>;
    if (t == F32) return flush ? map<Op<float, true>::of> : map<Op<float, false>::of>;
    return small_binary<Op>(t);
}

static execute *fma_of(type t, bool flush) {
    switch (t) {
    case F64: return map<float_fma<double, false>::of>;
    case F32: return flush ? map<float_fma<float, true>::of> : map<float_fma<float, false>::of>;
    case F16: return map<small_fma<half>>;
    case BF16: return map<small_fma<bfloat>>;
    case F16X2: return map<small_fma_pair<half>>;
    default: return map<small_fma_pair<bfloat>>;
    }
}


// >>rounding modes

/* Runs the form's inner function in another rounding mode of the host. */
static void with_rounding(machine &m, const instruction &i, uint32_t active) {
    int mode = fegetround();
    switch (i.form->rounding) {
    case TOWARD_ZERO: fesetround(FE_TOWARDZERO); break;
    case DOWN: fesetround(FE_DOWNWARD); break;
    case UP: fesetround(FE_UPWARD); break;
    default: break;
    }
    i.form->inner(m, i, active);
    fesetround(mode);
}

/* Chooses the rounding mode of an operation that has been decoded into f.run. */
static bool apply_rounding(form &f) {
    bool directed = f.rounding == TOWARD_ZERO || f.rounding == DOWN || f.rounding == UP;
    if (!directed) return f.rounding == NO_ROUNDING || f.rounding == NEAREST_EVEN;
    if (f.to != F32 && f.to != F64) return false;
    f.inner = f.run;
    f.run = with_rounding;
    return true;
}


// >>division that may be approximate

/* div.approx and div.full have an error of up to 2 ulp. */
template <bool FLUSH> struct approximate_div {
    static float of(float a, float b) {
        float q = float_div<float, FLUSH>::of(a, b);
        if (!approximate() || !isfinite(q)) return q;
        double exact = (double)flushed<FLUSH>(a) / (double)flushed<FLUSH>(b);
        return flushed<FLUSH>((float)deviated(exact, float_bits(a) ^ float_bits(b), 2));
    }
};

static bool decode_division(opcode &o, form &f) {
    bool fast = o.take("approx");
    fast |= o.take("full");
    if (fast == (f.rounding != NO_ROUNDING)) return false;
    if (fast) {
        if (f.to != F32) return false;
        f.run = f.flush ? map<approximate_div<true>::of> : map<approximate_div<false>::of>;
    } else {
        f.run = f.to == F32 || f.to == F64 ? binary<float_div>(f.to, f.flush) : nullptr;
    }
    return f.run && apply_rounding(f);
}


// >>decoding

static bool decode_min_max(opcode &o, form &f) {
    bool nan = o.take("NaN"), min = o.name == "min";
    if (nan && f.to == F64) return false;
    if (min) f.run = nan ? binary<float_min_nan>(f.to, f.flush) : binary<float_min>(f.to, f.flush);
    else f.run = nan ? binary<float_max_nan>(f.to, f.flush) : binary<float_max>(f.to, f.flush);
    return true;
}

static uint32_t copy_sign32(uint32_t sign, uint32_t a) {
    return (sign & 0x80000000u) | (a & 0x7fffffffu);
}

static uint64_t copy_sign64(uint64_t sign, uint64_t a) {
    return (sign & 1ull << 63) | (a & ~(1ull << 63));
}

/* testp: properties of a float. */
static void test_property(machine &m, const instruction &i, uint32_t active) {
    uint32_t result = 0;
    for (int l : lanes{active}) {
        double d = i.form->to == F64 ? from_word<double>(row64(m, i.o[1])[l])
                                     : (double)bits_to_float(row32(m, i.o[1])[l]);
        double least = i.form->to == F64 ? 0x1p-1022 : 0x1p-126;
        bool is = false;
        switch (i.form->variant) {
        case 0: is = isfinite(d); break;
        case 1: is = isinf(d); break;
        case 2: is = d == d; break;
        case 3: is = d != d; break;
        case 4: is = isfinite(d) && fabs(d) >= least; break;
        case 5: is = d != 0 && fabs(d) < least; break;
        }
        result |= (uint32_t)is << l;
    }
    set_predicate(m, i.o[0], active, result);
}

static bool decode_property(opcode &o, form &f) {
    static const char *names[] = {"finite", "infinite", "number", "notanumber", "normal",
                                  "subnormal"};
    for (uint8_t v = 0; v < 6; v++) {
        if (!o.take(names[v])) continue;
        f.variant = v;
        f.run = test_property;
        f.operands = f.to == F64 ? "Pl" : "Pw";
        return true;
    }
    return false;
}

bool decode_float(opcode &o, form &f) {
    if (f.to == NO_TYPE) f.to = o.take_type();
    f.flush = o.take("ftz");
    f.saturate = o.take("sat");
    f.rounding = o.take_rounding();
    bool single = f.to == F32 || f.to == F64;
    if (!is_float(f.to) || f.to == TF32) return false;
    if ((f.saturate || f.flush) && f.to != F32) return false;

    const std::string &n = o.name;
    bool one = n == "abs" || n == "neg", three = n == "fma" || n == "mad";
    bool adds = n == "add" || n == "sub" || n == "mul" || three;
    if (f.saturate && !adds) return false;
    if (f.rounding && !adds && n != "div") return false;
    if (three && (f.rounding == NO_ROUNDING || (n == "mad" && !single))) return false;
    f.operands = same_operands(f.to, 2 - one + three);
    if (n == "copysign") {
        if (f.flush) return false;
        if (f.to == F64) f.run = map<copy_sign64>;
        if (f.to == F32) f.run = map<copy_sign32>;
        return true;
    }
    if (n == "testp") return single && !f.flush && decode_property(o, f);
    if (n == "div") return decode_division(o, f);
    if (n == "min" || n == "max") return decode_min_max(o, f);
    if (n == "abs") f.run = unary<float_abs>(f.to, f.flush);
    if (n == "neg") f.run = unary<float_neg>(f.to, f.flush);
    if (three) f.run = fma_of(f.to, f.flush);
    if (n == "add") f.run = binary<float_add>(f.to, f.flush);
    if (n == "sub") f.run = binary<float_sub>(f.to, f.flush);
    if (n == "mul") f.run = binary<float_mul>(f.to, f.flush);
    if (f.saturate) {
        if (three)
            f.run = f.flush ? map<float_fma_sat<float, true>::of>
                            : map<float_fma_sat<float, false>::of>;
        if (n == "add") f.run = binary<float_add_sat>(f.to, f.flush);
        if (n == "sub") f.run = binary<float_sub_sat>(f.to, f.flush);
        if (n == "mul") f.run = binary<float_mul_sat>(f.to, f.flush);
    }
    return f.run && apply_rounding(f);
}

/* add, sub, .. of integers or floats. */
bool decode_arithmetic(opcode &o, form &f) {
    f.to = o.take_type();
    return is_float(f.to) ? decode_float(o, f) : decode_integer(o, f);
}


// >>approximate functions

static bool approximations;

bool approximate() { return approximations; }

/* A number in -1..1. */
static double noise(uint32_t input) {
    input *= 2654435761u;
    input ^= input >> 15;
    input *= 2246822519u;
    input ^= input >> 13;
    return (int32_t)input * 0x1p-31;
}

double deviated(double exact, uint32_t input, double units) {
    if (!isfinite(exact) || exact == 0) return exact;
    return exact + noise(input) * (units - 0.5) * ldexp(1, ilogb(exact) - 23);
}

/* Rounds the exact result of an .approx instruction, or deviates by up to `units` in the
   last place. */
static float approximated(double exact, float input, double units) {
    if (approximations) exact = deviated(exact, float_bits(input), units);
    return canonical((float)exact);
}

static double reciprocal(double x) { return 1 / x; }
static double reciprocal_root(double x) { return 1 / sqrt(x); }

/* UNITS is the maximum error by the PTX ISA. Where the ISA has a relative error of
   2^-n, this is 2^(23 - n) units in the last place, which is never more. The errors of
   lg2, sin and cos are absolute near the zeros of the functions; those here are
   smaller. */
template <double (*F)(double), int UNITS, bool FLUSH> struct approximation {
    static float of(float x) {
        x = flushed<FLUSH>(x);
        return flushed<FLUSH>(approximated(F((double)x), x, UNITS));
    }
};

template <double (*F)(double), int UNITS> static execute *approximate_function(bool flush) {
    return flush ? map<approximation<F, UNITS, true>::of>
                 : map<approximation<F, UNITS, false>::of>;
}

/* rcp.approx.ftz.f64 and rsqrt.approx.ftz.f64 use and return the upper 32 bits only. */
template <double (*F)(double)> struct upper_half {
    static uint64_t of(uint64_t x) {
        double d = from_word<double>(x & 0xffffffff00000000u);
        if (fabs(d) < 0x1p-1022) d = copysign(0, d);
        if (d != d) return 0x7fffffff00000000u;
        double r = F(d);
        if (fabs(r) < 0x1p-1022) r = copysign(0, r);
        return to_word(r) & 0xffffffff00000000u;
    }
};

template <bool FLUSH> struct single_sqrt {
    static float of(float x) { return flushed<FLUSH>(canonical(sqrtf(flushed<FLUSH>(x)))); }
};

template <bool FLUSH> struct single_rcp {
    static float of(float x) { return flushed<FLUSH>(canonical(1 / flushed<FLUSH>(x))); }
};

static double double_sqrt(double x) { return sqrt(x); }

static bool decode_rounded(opcode &o, form &f) {
    f.rounding = o.take_rounding();
    if (f.rounding == NO_ROUNDING || (f.flush && f.to != F32)) return false;
    if (o.name == "sqrt" && f.to == F64) f.run = map<double_sqrt>;
    else if (o.name == "rcp" && f.to == F64) f.run = map<reciprocal>;
    else if (o.name == "sqrt" && f.to == F32)
        f.run = f.flush ? map<single_sqrt<true>::of> : map<single_sqrt<false>::of>;
    else if (o.name == "rcp" && f.to == F32)
        f.run = f.flush ? map<single_rcp<true>::of> : map<single_rcp<false>::of>;
    return f.run && apply_rounding(f);
}

bool decode_approximate(opcode &o, form &f) {
    f.to = o.take_type();
    f.flush = o.take("ftz");
    f.counter = IN_SPECIAL;
    f.operands = same_operands(f.to, 1);
    if (!o.take("approx")) return decode_rounded(o, f);

    const std::string &n = o.name;
    if (f.to == F64) {
        if (!f.flush) return false;
        if (n == "rcp") f.run = map<upper_half<reciprocal>::of>;
        if (n == "rsqrt") f.run = map<upper_half<reciprocal_root>::of>;
        return true;
    }
    if (f.to != F32) return false;
    if (n == "rcp") f.run = approximate_function<reciprocal, 1>(f.flush);
    if (n == "sqrt") f.run = approximate_function<sqrt, 1>(f.flush);
    if (n == "rsqrt") f.run = approximate_function<reciprocal_root, 2>(f.flush);
    if (n == "ex2") f.run = approximate_function<exp2, 2>(f.flush);
    if (n == "lg2") f.run = approximate_function<log2, 2>(f.flush);
    if (n == "sin") f.run = approximate_function<sin, 4>(f.flush);
    if (n == "cos") f.run = approximate_function<cos, 4>(f.flush);
    if (n == "tanh") f.run = approximate_function<tanh, 4096>(f.flush);
    return true;
}

} // namespace ptx


// >>the API

void ptx_approximate(int on) { ptx::approximations = on != 0; }
