/* test_float.cpp - tests of floating point, approximations and conversions. See
   test_rows.h. */
#include "test_rows.h"
#include <algorithm>

// >>floating point

template <class T> static T ptx_min(T a, T b) {
    if (a != a && b != b) return std::is_same<T, float>::value ? (T)float_of(0x7fffffff) : a;
    if (a != a) return b;
    if (b != b) return a;
    if (a == 0 && b == 0) return std::signbit(a) ? a : b; /* -0 is less than +0 */
    return a < b ? a : b;
}

template <class T> static T ptx_max(T a, T b) {
    if (a != a && b != b) return std::is_same<T, float>::value ? (T)float_of(0x7fffffff) : a;
    if (a != a) return b;
    if (b != b) return a;
    if (a == 0 && b == 0) return std::signbit(a) ? b : a;
    return a > b ? a : b;
}

/* Returns a b + c, rounded towards minus infinity. The product is exact in double, and
   s + e is the exact sum. */
static float fma_down(float a, float b, float c) {
    volatile double p = (double)a * b, s = p + c;
    if (!(fabs(s) <= 1e300)) return (float)s;
    volatile double from_c = s - p, from_p = s - from_c;
    volatile double e = (c - from_c) + (p - from_p);
    if (s == 0) /* a sum of zeros or of opposite values is -0 unless both are +0 */
        return p == 0 && c == 0 && !std::signbit(p) && !std::signbit(c) ? 0.0f : -0.0f;
    float f = (float)s;
    if ((double)f > s || ((double)f == s && e < 0)) f = nextafterf(f, -HUGE_VALF);
    return f;
}

static void test_arithmetic_of_floats(void) {
    row("add.f32", [](float a, float b) -> float { return a + b; });
    row("add.rn.f32", [](float a, float b) -> float { return a + b; });
    row("add.f64", [](double a, double b) -> double { return a + b; });
    row("add.rn.f64", [](double a, double b) -> double { return a + b; });
    row("sub.f32", [](float a, float b) -> float { return a - b; });
    row("sub.f64", [](double a, double b) -> double { return a - b; });
    row("mul.f32", [](float a, float b) -> float { return a * b; });
    row("mul.rn.f32", [](float a, float b) -> float { return a * b; });
    row("mul.f64", [](double a, double b) -> double { return a * b; });
    row("mul.rn.f64", [](double a, double b) -> double { return a * b; });
    row("fma.rn.f32", [](float a, float b, float c) -> float { return fmaf(a, b, c); });
    row("fma.rn.f64", [](double a, double b, double c) -> double { return fma(a, b, c); });
    row("fma.rm.f32", [](float a, float b, float c) -> float { return fma_down(a, b, c); });
    row("div.rn.f32", [](float a, float b) -> float { return a / b; });
    row("div.rn.f64", [](double a, double b) -> double { return a / b; });
    row("rcp.rn.f32", [](float a) -> float { return 1 / a; });
    row("rcp.rn.f64", [](double a) -> double { return 1 / a; });
    row("sqrt.rn.f32", [](float a) -> float { return sqrtf(a); });
    row("sqrt.rn.f64", [](double a) -> double { return sqrt(a); });
    row("abs.f32", [](float a) -> float { return fabsf(a); });
    row("abs.f64", [](double a) -> double { return fabs(a); });
    row("neg.f32", [](float a) -> float { return -a; });
    row("neg.f64", [](double a) -> double { return -a; });
    /* copysign: the sign of the first operand, the magnitude of the second. */
    row("copysign.f32", [](float a, float b) -> float {
        return float_of((bits(b) & 0x7fffffff) | (bits(a) & 0x80000000));
    });
    row("min.f32", [](float a, float b) -> float { return ptx_min(a, b); }, EXACT);
    row("max.f32", [](float a, float b) -> float { return ptx_max(a, b); }, EXACT);
    row("max.f64", [](double a, double b) -> double { return ptx_max(a, b); });
}


// >>approximations

static float flushed(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0.0f, x) : x; }

static double rcp_real(float a) { return 1.0 / (double)flushed(a); }

static float rcp_flushed(float a) { return flushed((float)rcp_real(a)); }

static double ex2_real(float a) { return (double)exp2l((long double)flushed(a)); }

static float ex2_flushed(float a) { return flushed((float)exp2l((long double)flushed(a))); }

/* Runs a unary form on many inputs and returns its results. */
template <class T>
static std::vector<T> results(const char *form, const std::vector<T> &in) {
    std::vector<T> out;
    test_module m(ptx_program(row_program(form, operand<T>::name, operand<T>::store,
                                          {operand<T>::name}, {operand<T>::load}).body));
    test_memory memory;
    memory.n = 0xffffffff;
    if (!m.kernel) return std::vector<T>(in.size());
    for (size_t from = 0; from < in.size(); from += 2048) {
        size_t n = in.size() - from < 2048 ? in.size() - from : 2048;
        for (size_t i = 0; i < n; i++) memcpy(memory.in.data + 24 * i, &in[from + i], sizeof(T));
        launch_shape s;
        s.grid = (unsigned)((n + 31) / 32);
        size_t faults = memory.run(m, s);
        CHECK(faults == 0, "%s: %zu faults", form, faults);
        for (size_t i = 0; i < n; i++) {
            T d;
            memcpy(&d, memory.out.data + 8 * i, sizeof d);
            out.push_back(d);
        }
    }
    return out;
}

/* The distance of a float from a real number, in units in the last place of it. */
static double ulps(float a, double real) { return fabs(a - real) / ldexp(1, ilogb(real) - 23); }

/* Mode 0 is exactly rounded. Mode 1 deviates from it by at most `limit` units, for some
   inputs, and always by the same for one input. The rounding of mode 0 adds half a
   unit. */
static void approximation(const char *form, float (*exact)(float), double (*real)(float),
                          double limit) {
    std::vector<float> in = edges<float>();
    for (int i = 0; i < 6000; i++) in.push_back((float)(test_rand() * 130));
    row(form, exact);
    ptx_approximate(1);
    std::vector<float> rough = results(form, in), again = results(form, in);
    ptx_approximate(0);
    std::vector<float> fine = results(form, in);
    size_t differ = 0, far = 0, changed = 0, wrong = 0;
    for (size_t i = 0; i < in.size(); i++) {
        float e = exact(in[i]);
        bool special = e != e || e == 0 || fabsf(e) == HUGE_VALF;
        bool both_nan = e != e && rough[i] != rough[i];
        if (bits(rough[i]) != bits(again[i])) changed++;
        if (bits(fine[i]) != bits(e) && !(e != e && fine[i] != fine[i])) wrong++;
        if (special ? bits(rough[i]) != bits(e) && !both_nan
                    : ulps(rough[i], real(in[i])) > limit + 0.5) {
            /* A result just above the smallest normal number may be flushed. */
            if (!(fabsf(e) < 0x1.00001p-126f && rough[i] == 0)) far++;
        }
        if (!special && bits(rough[i]) != bits(e)) differ++;
    }
    CHECK(far == 0, "%s: %zu results beyond %g units", form, far, limit);
    CHECK(changed == 0, "%s: %zu results differ between runs", form, changed);
    CHECK(wrong == 0, "%s: %zu results are not exact after mode 1", form, wrong);
    CHECK(differ > in.size() / 20, "%s: only %zu results deviate", form, differ);
}

/* rcp.approx.ftz.f64 uses and produces only the upper 32 bits. */
static void test_rcp_double(void) {
    std::vector<double> in = edges<double>();
    record_forms("rcp.approx.ftz.f64 %fd1, %fd2;");
    for (int i = 0; i < 3000; i++) in.push_back(test_rand() * pow(2, 1000 * test_rand()));
    for (int mode = 1; mode >= 0; mode--) {
        ptx_approximate(mode);
        std::vector<double> out = results("rcp.approx.ftz.f64", in);
        for (size_t i = 0; i < in.size(); i++) {
            double upper = double_of(bits(in[i]) & 0xffffffff00000000);
            bool tiny = fabs(upper) < 0x1p-1022;
            if (tiny) upper = copysign(0.0, upper);
            double e = 1 / upper;
            if (fabs(e) < 0x1p-1022) e = copysign(0.0, e);
            if ((bits(in[i]) & 0x7fffffff00000000) > 0x7ff0000000000000) {
                CHECK(bits(out[i]) == 0x7fffffff00000000, "NaN %a: %llx", in[i],
                      (unsigned long long)bits(out[i]));
                continue;
            }
            if ((bits(in[i]) & 0x7fffffffffffffff) > 0x7ff0000000000000) continue;
            CHECK((uint32_t)bits(out[i]) == 0, "1/%a: %a, low word", in[i], out[i]);
            if (e == 0 || std::isinf(e))
                CHECK(bits(out[i]) == bits(e), "1/%a: %a, expected %a", in[i], out[i], e);
            else if (fabs(e) > 0x1.001p-1022)
                CHECK(fabs(out[i] / e - 1) <= 0x1p-19, "1/%a: %a, expected %a", in[i], out[i], e);
        }
    }
}

static void test_approximations(void) {
    approximation("rcp.approx.ftz.f32", rcp_flushed, rcp_real, 1);
    approximation("ex2.approx.ftz.f32", ex2_flushed, ex2_real, 4);
    test_rcp_double();
}


// >>conversions

/* Converts to an integer by truncation and saturates; a NaN has its own result. */
template <class I, class F> static I truncated(F x, I nan) {
    if (x != x) return nan;
    if (x >= (F)std::numeric_limits<I>::max()) return std::numeric_limits<I>::max();
    if (x <= (F)std::numeric_limits<I>::min()) return std::numeric_limits<I>::min();
    return (I)x;
}

/* Rounds to 10 bits of mantissa, ties away from zero. The 13 lowest bits become 0. */
static u32 tf32_of(float x) {
    u32 b = bits(x);
    if (x != x) return 0x7fffffff;
    if ((b & 0x7fffffff) == 0x7f800000) return b;
    return (b + 0x1000) & ~0x1fffu;
}

static void test_convert(void) {
    row("cvt.s64.s32", [](s32 a) -> s64 { return a; });
    row("cvt.s64.s32", [](u64 a) -> s64 { return (s32)(u32)a; });
    row("cvt.u64.u32", [](u32 a) -> u64 { return a; });
    row("cvt.u64.u16", [](u16 a) -> u64 { return a; });
    row("cvt.u32.u16", [](u16 a) -> u32 { return a; });
    row("cvt.u32.u64", [](u64 a) -> u32 { return (u32)a; });
    row("cvt.u16.u32", [](u32 a) -> u16 { return (u16)a; });
    row("cvt.u16.u64", [](u64 a) -> u16 { return (u16)a; });
    row("cvt.s32.s16", [](u16 a) -> s32 { return (s16)a; });
    row("cvt.s16.s8", [](u16 a) -> u16 { return (u16)(int8_t)a; });
    row("cvt.s8.s32", [](u32 a) -> u16 { return (u16)(int8_t)a; });
    row("cvt.sat.s8.s32", [](s32 a) -> u16 { return (u16)std::min(std::max(a, -128), 127); });
    row("cvt.rn.f32.s32", [](s32 a) -> float { return (float)a; });
    row("cvt.rn.f32.s64", [](s64 a) -> float { return (float)a; });
    row("cvt.rn.f32.u64", [](u64 a) -> float { return (float)a; });
    row("cvt.rn.f64.s32", [](s32 a) -> double { return a; });
    row("cvt.rn.f64.u32", [](u32 a) -> double { return a; });
    row("cvt.rn.f64.s64", [](s64 a) -> double { return (double)a; });
    row("cvt.rn.f64.u64", [](u64 a) -> double { return (double)a; });
    row("cvt.f64.f32", [](float a) -> double { return a; });
    row("cvt.rn.f32.f64", [](double a) -> float { return (float)a; });
    row("cvt.rzi.f32.f32", [](float a) -> float { return truncf(a); });
    row("cvt.rmi.f32.f32", [](float a) -> float { return floorf(a); });
    row("cvt.rzi.f64.f64", [](double a) -> double { return trunc(a); });
    row("cvt.rpi.f64.f64", [](double a) -> double { return ceil(a); });
    /* A NaN becomes 0, or the smallest integer if a 64-bit type takes part. */
    row("cvt.rzi.s32.f32", [](float a) -> s32 { return truncated<s32>(a, 0); });
    row("cvt.rzi.s32.f64", [](double a) -> s32 { return truncated<s32>(a, INT32_MIN); });
    row("cvt.rzi.s64.f64", [](double a) -> s64 { return truncated<s64>(a, INT64_MIN); });
    row("cvt.sat.f32.f32", [](float a) -> std::optional<float> {
        if (bits(a) == 0x80000000) return std::nullopt; /* either zero */
        if (a != a || a < 0) return 0.0f;
        return a > 1 ? 1.0f : a;
    });
    row("cvt.f32.bf16", [](u16 a) -> float { return float_of_bf16(a); });
    row("cvt.rn.bf16.f32", [](float a) -> std::optional<u16> {
        if (a != a) return std::nullopt;
        return bf16_of(a);
    });
    row("cvt.rn.bf16.f32 $d, $a;\n    cvt.f32.bf16 %f40, $d;\n    setp.nan.f32 %p25, %f40, %f40;\n"
        "    selp.b32 %r40, 1, 0, %p25;\n    cvt.u16.u32 $d, %r40",
        [](float a) -> u16 { return a != a; });
    row("cvt.rn.bf16x2.f32", [](float a, float b) -> std::optional<u32> {
        if (a != a || b != b) return std::nullopt;
        return (u32)bf16_of(a) << 16 | bf16_of(b);
    });
    row("cvt.rna.tf32.f32", [](float a) -> std::optional<u32> {
        if (a != a) return std::nullopt;
        return tf32_of(a);
    });
    row("cvt.rna.tf32.f32 %r40, $a;\n    mov.b32 $d, %r40", [](float a) -> float {
        return float_of(tf32_of(a));
    });
}


// >>16-bit fma, rounded once

/* An exact number: m 2^e. */
struct exact {
    s64 m;
    int e;
};

static exact exact_of(u16 a) {
    int exponent = a >> 7 & 255, m = a & 127;
    if (exponent) m |= 128;
    return {a >> 15 ? -m : m, (exponent ? exponent : 1) - 134};
}

/* Rounds to bf16, to nearest even; of a number that is not 0. */
static u16 rounded_to_bf16(exact x) {
    u16 sign = x.m < 0 ? 0x8000 : 0;
    u64 m = (u64)(x.m < 0 ? -x.m : x.m);
    int length = 0;
    while (length < 64 && m >> length) length++;
    int shift = std::max(length - 8, -133 - x.e), e = x.e + shift;
    if (shift > 62) return sign;
    u64 q = m;
    if (shift <= 0) {
        q <<= -shift;
    } else {
        u64 half = (u64)1 << (shift - 1), rest = m & (2 * half - 1);
        q = m >> shift;
        if (rest > half || (rest == half && q & 1)) q++;
    }
    if (q == 256) {
        q = 128;
        e++;
    }
    if (q < 128) return (u16)(sign | (u16)q);
    return (u16)(sign | (e + 134 >= 255 ? 0x7f80 : (e + 134) << 7 | (int)(q & 127)));
}

/* a b + c. The lesser summand counts only by its sign if it is far below the last bit. */
static std::optional<u16> fma_bf16(u16 a, u16 b, u16 c) {
    const int FAR = 40;
    for (u16 x : {a, b, c})
        if ((x & 0x7f80) == 0x7f80) return std::nullopt;
    exact high = {exact_of(a).m * exact_of(b).m, exact_of(a).e + exact_of(b).e};
    exact low = exact_of(c);
    if (high.m == 0) high.e = low.e;
    if (low.m == 0) low.e = high.e;
    if (high.e < low.e) std::swap(high, low);
    int distance = high.e - low.e;
    if (distance > FAR && low.m) low = {low.m < 0 ? -1 : 1, high.e - FAR};
    distance = high.e - low.e;
    exact sum = {high.m * ((s64)1 << distance) + low.m, low.e};
    if (sum.m) return rounded_to_bf16(sum);
    bool negative = (a ^ b) >> 15 && c >> 15 && !high.m;
    return (u16)(negative ? 0x8000 : 0);
}

static void test_fma_of_halves(void) {
    row("fma.rn.bf16", fma_bf16);
    row("fma.rn.bf16x2", [](u32 a, u32 b, u32 c) -> std::optional<u32> {
        std::optional<u16> low = fma_bf16((u16)a, (u16)b, (u16)c);
        std::optional<u16> high = fma_bf16((u16)(a >> 16), (u16)(b >> 16), (u16)(c >> 16));
        if (!low || !high) return std::nullopt;
        return (u32)*high << 16 | *low;
    });
    /* The product is halfway between two numbers, and c is far below its last bit. */
    static const u16 cases[][4] = {
        /* a,    b,      c,      a b + c */
        {0x3fc0, 0x3f81, 0x0000, 0x3fc2}, {0x3fc0, 0x3f81, 0x0d80, 0x3fc2},
        {0x3fc0, 0x3f81, 0x8d80, 0x3fc1}, {0x3fc0, 0x3f83, 0x0000, 0x3fc4},
        {0x3fc0, 0x3f83, 0x0d80, 0x3fc5}, {0x3fc0, 0x3f83, 0x8d80, 0x3fc4},
        {0xbfc0, 0x3f83, 0x8001, 0xbfc5}, {0xbfc0, 0x3f81, 0x0001, 0xbfc1}};
    for (auto &c : cases) {
        std::string text = "fma.rn.bf16 %rs4, %rs1, %rs2, %rs3;\nst.global.u16 [%rd1], %rs4;\n";
        for (int k = 2; k >= 0; k--)
            text = "mov.u16 %rs" + std::to_string(k + 1) + ", " + std::to_string(c[k]) + ";\n"
                + text;
        test_memory memory;
        launch_shape one;
        one.block = 1;
        runs_clean("fma.rn.bf16 near a tie", ptx_program(text), one, memory, [&] {
            CHECK(fma_bf16(c[0], c[1], c[2]) == c[3], "the definition");
            CHECK(memory.out.as<u16>()[0] == c[3], "%04x * %04x + %04x: expected %04x, got %04x",
                  c[0], c[1], c[2], c[3], memory.out.as<u16>()[0]);
        });
    }
}


// >>all parts

void test_float(int argc, char **argv) {
    static const test_part parts[] = {
        {"float", test_arithmetic_of_floats},
        {"fma_of_halves", test_fma_of_halves},
        {"approximations", test_approximations},
        {"convert", test_convert},
    };
    test_run(parts, sizeof parts / sizeof *parts, argc, argv);
}
