/* test_arithmetic.cpp - tests of integer arithmetic, logic, comparisons, selections and
   moves. See test_rows.h. */
#include "test_rows.h"


// >>integers

static void test_add_mul(void) {
    row("add.s16", [](u16 a, u16 b) -> u16 { return (u16)(a + b); });
    row("add.s32", [](u32 a, u32 b) -> u32 { return a + b; });
    row("add.s64", [](u64 a, u64 b) -> u64 { return a + b; });
    row("add.u64", [](u64 a, u64 b) -> u64 { return a + b; });
    row("sub.s16", [](u16 a, u16 b) -> u16 { return (u16)(a - b); });
    row("sub.s32", [](u32 a, u32 b) -> u32 { return a - b; });
    row("sub.s64", [](u64 a, u64 b) -> u64 { return a - b; });
    row("neg.s16", [](u16 a) -> u16 { return (u16)(0 - a); });
    row("neg.s32", [](u32 a) -> u32 { return 0 - a; });
    row("neg.s64", [](u64 a) -> u64 { return 0 - a; });
    row("mul.lo.s16", [](u16 a, u16 b) -> u16 { return (u16)((u32)a * b); });
    row("mul.lo.s32", [](u32 a, u32 b) -> u32 { return a * b; });
    row("mul.lo.s64", [](u64 a, u64 b) -> u64 { return a * b; });
    row("mul.hi.s32", [](s32 a, s32 b) -> s32 { return (s32)((s64)a * b >> 32); });
    row("mul.hi.u32", [](u32 a, u32 b) -> u32 { return (u32)((u64)a * b >> 32); });
    row("mul.hi.u16", [](u16 a, u16 b) -> u16 { return (u16)((u32)a * b >> 16); });
    row("mul.wide.s32", [](s32 a, s32 b) -> s64 { return (s64)a * b; });
    row("mul.wide.u32", [](u32 a, u32 b) -> u64 { return (u64)a * b; });
    row("mul.wide.s16", [](s16 a, s16 b) -> s32 { return (s32)a * b; });
    row("mul.wide.s16 $d, $a, 43", [](s16 a) -> s32 { return (s32)a * 43; });
    row("mul.wide.u16", [](u16 a, u16 b) -> u32 { return (u32)a * b; });
    row("mad.lo.s32", [](u32 a, u32 b, u32 c) -> u32 { return a * b + c; });
    row("mad.lo.s64", [](u64 a, u64 b, u64 c) -> u64 { return a * b + c; });
    optional_row("add.sat.s32", [](s32 a, s32 b) -> s32 {
        s64 s = (s64)a + b;
        if (s > INT32_MAX) return INT32_MAX;
        return s < INT32_MIN ? INT32_MIN : (s32)s;
    });
}

/* Division by zero, and the quotient that overflows, are unspecified. */
template <class T> static std::optional<T> quotient(T a, T b) {
    if (b == 0 || (std::is_signed<T>::value && a == std::numeric_limits<T>::min() && b == (T)-1))
        return std::nullopt;
    return (T)(a / b);
}

template <class T> static std::optional<T> remainder_of(T a, T b) {
    if (b == 0) return std::nullopt;
    return (T)(a % b);
}

static void test_divide(void) {
    row("div.s32", [](s32 a, s32 b) { return quotient(a, b); });
    row("div.s64", [](s64 a, s64 b) { return quotient(a, b); });
    row("div.u32", [](u32 a, u32 b) { return quotient(a, b); });
    row("div.u64", [](u64 a, u64 b) { return quotient(a, b); });
    row("rem.u32", [](u32 a, u32 b) { return remainder_of(a, b); });
    row("rem.u64", [](u64 a, u64 b) { return remainder_of(a, b); });
}

static void test_min_max(void) {
    row("min.s32", [](s32 a, s32 b) -> s32 { return a < b ? a : b; });
    row("min.s64", [](s64 a, s64 b) -> s64 { return a < b ? a : b; });
    row("min.u64", [](u64 a, u64 b) -> u64 { return a < b ? a : b; });
    row("max.s32", [](s32 a, s32 b) -> s32 { return a > b ? a : b; });
    row("max.s64", [](s64 a, s64 b) -> s64 { return a > b ? a : b; });
    row("max.u32", [](u32 a, u32 b) -> u32 { return a > b ? a : b; });
    row("max.u64", [](u64 a, u64 b) -> u64 { return a > b ? a : b; });
    optional_row("min.u32", [](u32 a, u32 b) -> u32 { return a < b ? a : b; });
}


// >>bits

/* Copies the `length` lowest bits of a into b at a position; both are modulo 256. */
static u64 inserted(u64 a, u64 b, u32 position, u32 length, u32 width) {
    position &= 255;
    length &= 255;
    for (u32 i = 0; i < length && position + i < width; i++) {
        u64 bit = 1ull << (position + i);
        b = a >> i & 1 ? b | bit : b & ~bit;
    }
    return b;
}

/* bfe: extracts a field; the sign bit of a signed field fills the rest. */
static u32 extracted(u32 a, u32 position, u32 length, bool is_signed) {
    u32 d = 0, sign;
    position &= 255;
    length &= 255;
    u32 last = position + length - 1 < 31 ? position + length - 1 : 31;
    sign = is_signed && length > 0 ? a >> last & 1 : 0;
    for (u32 i = 0; i < 32; i++)
        d |= (i < length && position + i < 32 ? a >> (position + i) & 1 : sign) << i;
    return d;
}

static u32 permuted(u32 a, u32 b, u32 selector) {
    u64 both = (u64)b << 32 | a;
    u32 d = 0;
    for (int i = 0; i < 4; i++) {
        u32 s = selector >> 4 * i & 15, byte = (u32)(both >> 8 * (s & 7)) & 255;
        if (s & 8) byte = byte & 128 ? 255 : 0;
        d |= byte << 8 * i;
    }
    return d;
}

static void test_logic(void) {
    row("and.b16", [](u16 a, u16 b) -> u16 { return a & b; });
    row("and.b32", [](u32 a, u32 b) -> u32 { return a & b; });
    row("and.b64", [](u64 a, u64 b) -> u64 { return a & b; });
    row("or.b32", [](u32 a, u32 b) -> u32 { return a | b; });
    row("or.b64", [](u64 a, u64 b) -> u64 { return a | b; });
    row("xor.b32", [](u32 a, u32 b) -> u32 { return a ^ b; });
    row("xor.b64", [](u64 a, u64 b) -> u64 { return a ^ b; });
    row("not.b32", [](u32 a) -> u32 { return ~a; });
    row("not.b64", [](u64 a) -> u64 { return ~a; });
    row("and.pred", [](bool a, bool b) -> bool { return a && b; });
    row("or.pred", [](bool a, bool b) -> bool { return a || b; });
    row("xor.pred", [](bool a, bool b) -> bool { return a != b; });
    row("not.pred", [](bool a) -> bool { return !a; });
    row("popc.b32", [](u32 a) -> u32 {
        u32 n = 0;
        for (int i = 0; i < 32; i++) n += a >> i & 1;
        return n;
    });
    row("brev.b32", [](u32 a) -> u32 {
        u32 d = 0;
        for (int i = 0; i < 32; i++) d |= (a >> i & 1) << (31 - i);
        return d;
    });
    row("bfind.shiftamt.u32", [](u32 a) -> u32 {
        for (u32 i = 0; i < 32; i++)
            if (a >> (31 - i) & 1) return i;
        return 0xffffffff;
    });
    row("bfi.b32 $d, $a, $b, $c, 5",
        [](u32 a, u32 b, u32 c) -> u32 { return (u32)inserted(a, b, c, 5, 32); });
    row("bfi.b32 $d, $a, $b, 3, $c",
        [](u32 a, u32 b, u32 c) -> u32 { return (u32)inserted(a, b, 3, c, 32); });
    row("bfi.b32 $d, $a, $b, 7, 25",
        [](u32 a, u32 b) -> u32 { return (u32)inserted(a, b, 7, 25, 32); });
    row("bfi.b64 $d, $a, $b, $c, 20",
        [](u64 a, u64 b, u32 c) -> u64 { return inserted(a, b, c, 20, 64); });
    row("bfi.b64 $d, $a, $b, 9, $c",
        [](u64 a, u64 b, u32 c) -> u64 { return inserted(a, b, 9, c, 64); });
    row("bfi.b64 $d, $a, $b, 1, 32",
        [](u64 a, u64 b) -> u64 { return inserted(a, b, 1, 32, 64); });
    optional_row("bfe.u32", [](u32 a, u32 b, u32 c) -> u32 { return extracted(a, b, c, false); });
    optional_row("bfe.s32", [](u32 a, u32 b, u32 c) -> u32 { return extracted(a, b, c, true); });
    optional_row("prmt.b32", [](u32 a, u32 b, u32 c) -> u32 { return permuted(a, b, c); });
    optional_row("lop3.b32 $d, $a, $b, $c, 0xCA",
                 [](u32 a, u32 b, u32 c) -> u32 { return (a & b) | (~a & c); });
    optional_row("lop3.b32 $d, $a, $b, $c, 0x96",
                 [](u32 a, u32 b, u32 c) -> u32 { return a ^ b ^ c; });
    optional_row("clz.b32", [](u32 a) -> u32 {
        u32 n = 0;
        while (n < 32 && !(a >> (31 - n) & 1)) n++;
        return n;
    });
}

/* The amount of a shift is a 32-bit value; amounts above the width are clamped to it. */
static void test_shifts(void) {
    row("shl.b16", [](u16 a, u32 b) -> u16 { return b > 15 ? 0 : (u16)(a << b); });
    row("shl.b32", [](u32 a, u32 b) -> u32 { return b > 31 ? 0 : a << b; });
    row("shl.b64", [](u64 a, u32 b) -> u64 { return b > 63 ? 0 : a << b; });
    row("shr.u16", [](u16 a, u32 b) -> u16 { return b > 15 ? 0 : (u16)(a >> b); });
    row("shr.u32", [](u32 a, u32 b) -> u32 { return b > 31 ? 0 : a >> b; });
    row("shr.u64", [](u64 a, u32 b) -> u64 { return b > 63 ? 0 : a >> b; });
    row("shr.s16", [](s16 a, u32 b) -> s16 { return (s16)(a >> (b > 15 ? 15 : b)); });
    row("shr.s16 $d, $a, 3", [](s16 a) -> s16 { return (s16)(a >> 3); });
    row("shr.s32", [](s32 a, u32 b) -> s32 { return a >> (b > 31 ? 31 : b); });
    row("shr.s64", [](s64 a, u32 b) -> s64 { return a >> (b > 63 ? 63 : b); });
    optional_row("shf.l.wrap.b32", [](u32 a, u32 b, u32 c) -> u32 {
        return (u32)((((u64)b << 32 | a) << (c & 31)) >> 32);
    });
    optional_row("shf.r.wrap.b32", [](u32 a, u32 b, u32 c) -> u32 {
        return (u32)(((u64)b << 32 | a) >> (c & 31));
    });
    optional_row("shf.l.clamp.b32", [](u32 a, u32 b, u32 c) -> u32 {
        return c >= 32 ? a : (u32)((((u64)b << 32 | a) << c) >> 32);
    });
    optional_row("shf.r.clamp.b32", [](u32 a, u32 b, u32 c) -> u32 {
        return c >= 32 ? b : (u32)(((u64)b << 32 | a) >> c);
    });
}


// >>comparisons

/* Relations of a and b: less, equal, greater or unordered. */
template <class T> static int relation(T a, T b) {
    if (a < b) return 1;
    if (a == b) return 2;
    if (a > b) return 4;
    return 8;
}

struct comparison {
    const char *name;
    int relations; /* those for which it is true */
};

static const comparison ordered[] = {{"eq", 2}, {"ne", 5}, {"lt", 1}, {"le", 3}, {"gt", 4},
                                     {"ge", 6}};

static const comparison unordered[] = {{"equ", 10}, {"neu", 13}, {"ltu", 9}, {"leu", 11},
                                       {"gtu", 12}, {"geu", 14}, {"num", 7}, {"nan", 8}};

template <class T> static void comparisons(const char *type, bool is_float) {
    for (const comparison &c : ordered)
        row(std::string("setp.") + c.name + "." + type,
            [c](T a, T b) -> bool { return c.relations & relation(a, b); });
    if (!is_float) return;
    for (const comparison &c : unordered)
        row(std::string("setp.") + c.name + "." + type,
            [c](T a, T b) -> bool { return c.relations & relation(a, b); });
}

static void test_setp(void) {
    comparisons<s16>("s16", false);
    comparisons<u16>("u16", false);
    comparisons<s32>("s32", false);
    comparisons<u32>("u32", false);
    comparisons<s64>("s64", false);
    comparisons<u64>("u64", false);
    comparisons<float>("f32", true);
    comparisons<double>("f64", true);
    row("setp.eq.b32", [](u32 a, u32 b) -> bool { return a == b; });
    row("setp.eq.b64", [](u64 a, u64 b) -> bool { return a == b; });
    optional_row("setp.lt.and.s32 $d, $a, $b, $c",
                 [](s32 a, s32 b, bool c) -> bool { return a < b && c; });
    optional_row("setp.lt.or.s32 $d, $a, $b, $c",
                 [](s32 a, s32 b, bool c) -> bool { return a < b || c; });
    optional_row("setp.lt.xor.s32 $d, $a, $b, !$c",
                 [](s32 a, s32 b, bool c) -> bool { return (a < b) != !c; });
    optional_row("setp.lt.s32 %p25|$d, $a, $b",
                 [](s32 a, s32 b) -> bool { return !(a < b); });
}

static void test_select(void) {
    row("selp.b32", [](u32 a, u32 b, bool c) -> u32 { return c ? a : b; });
    row("selp.u32", [](u32 a, u32 b, bool c) -> u32 { return c ? a : b; });
    row("selp.b64", [](u64 a, u64 b, bool c) -> u64 { return c ? a : b; });
    row("selp.u64", [](u64 a, u64 b, bool c) -> u64 { return c ? a : b; });
    row("selp.f32", [](float a, float b, bool c) -> float { return c ? a : b; }, EXACT);
    row("selp.f64", [](double a, double b, bool c) -> double { return c ? a : b; }, EXACT);
    row("mov.u32 $d, $b;\n    @$a mov.u32 $d, $c",
        [](bool a, u32 b, u32 c) -> u32 { return a ? c : b; });
    row("mov.u32 $d, $b;\n    @!$a mov.u32 $d, $c",
        [](bool a, u32 b, u32 c) -> u32 { return a ? b : c; });
    row("setp.lt.s32 %p25, $a, $b;\n    @%p25 add.s32 $a, $a, 3;\n    @!%p25 sub.s32 $b, $b, 5;\n"
        "    xor.b32 $d, $a, $b",
        [](s32 a, s32 b) -> u32 {
            return a < b ? (u32)((u32)a + 3) ^ (u32)b : (u32)a ^ ((u32)b - 5);
        });
}


// >>immediate operands, one per class

static void test_immediates(void) {
    row("add.s16 $d, $a, -1", [](u16 a) -> u16 { return (u16)(a - 1); });
    row("add.s32 $d, $a, -2147483648", [](u32 a) -> u32 { return a + 0x80000000; });
    row("sub.s32 $d, 31, $a", [](u32 a) -> u32 { return 31 - a; });
    row("and.b32 $d, $a, 2146435072", [](u32 a) -> u32 { return a & 0x7ff00000; });
    row("or.b32 $d, $a, 0x80000001", [](u32 a) -> u32 { return a | 0x80000001; });
    row("and.b64 $d, $a, -4096", [](u64 a) -> u64 { return a & ~4095ull; });
    row("and.b64 $d, $a, 4294967295", [](u64 a) -> u64 { return a & 0xffffffff; });
    row("add.s64 $d, $a, -9223372036854775808",
        [](u64 a) -> u64 { return a + 0x8000000000000000; });
    row("mul.hi.s32 $d, $a, 715827883",
        [](s32 a) -> s32 { return (s32)((s64)a * 715827883 >> 32); });
    row("mul.wide.s32 $d, $a, -24", [](s32 a) -> s64 { return (s64)a * -24; });
    row("mul.wide.u32 $d, $a, 4294967295", [](u32 a) -> u64 { return (u64)a * 4294967295u; });
    row("mul.wide.u16 $d, $a, 65535", [](u16 a) -> u32 { return (u32)a * 65535; });
    row("mad.lo.s32 $d, $a, 33, $b", [](u32 a, u32 b) -> u32 { return a * 33 + b; });
    row("mad.lo.s64 $d, $a, 33, -7", [](u64 a) -> u64 { return a * 33 - 7; });
    row("shl.b64 $d, $a, 64", [](u64) -> u64 { return 0; });
    row("shl.b64 $d, $a, 33", [](u64 a) -> u64 { return a << 33; });
    row("shr.s32 $d, $a, 40", [](s32 a) -> s32 { return a < 0 ? -1 : 0; });
    row("setp.gt.s16 $d, $a, -1", [](s16 a) -> bool { return a > -1; });
    row("setp.lt.u16 $d, $a, 2", [](u16 a) -> bool { return a < 2; });
    row("setp.gt.u32 $d, $a, -1", [](u32) -> bool { return false; });
    row("setp.lt.s64 $d, $a, -1", [](s64 a) -> bool { return a < -1; });
    row("setp.ge.f32 $d, $a, 0f41102CB4",
        [](float a) -> bool { return a >= float_of(0x41102cb4); });
    row("setp.le.f64 $d, $a, 0d7FEFFFFFFFFFFFFF",
        [](double a) -> bool { return a <= double_of(0x7fefffffffffffff); });
    row("selp.b32 $d, -1, 7, $a", [](bool a) -> u32 { return a ? 0xffffffff : 7; });
    row("selp.f32 $d, 0f7FFFFFFF, $b, $a",
        [](bool a, float b) -> float { return a ? float_of(0x7fffffff) : b; }, EXACT);
    row("selp.f64 $d, $b, 0dFFF0000000000000, $a",
        [](bool a, double b) -> double { return a ? b : -HUGE_VAL; }, EXACT);
    row("add.f32 $d, $a, 0fBF800000", [](float a) -> float { return a + -1.0f; });
    row("fma.rn.f32 $d, $a, 0f3F000000, 0f4B400000",
        [](float a) -> float { return fmaf(a, 0.5f, 12582912.0f); });
    row("fma.rn.f64 $d, $a, 0d3FE0000000000000, $b",
        [](double a, double b) -> double { return fma(a, 0.5, b); });
    row("mov.f32 $d, 0f7F800001", [](void) -> float { return float_of(0x7f800001); }, EXACT);
    row("mov.f64 $d, 0dC000000000000001",
        [](void) -> double { return double_of(0xc000000000000001); }, EXACT);
    row("mov.u32 $d, -559038737", [](void) -> u32 { return 0xdeadbeef; });
    row("mov.b32 $d, 3735928559", [](void) -> u32 { return 0xdeadbeef; });
    row("mov.u64 $d, 1311768467463790320", [](void) -> u64 { return 0x123456789abcdef0; });
    row("mov.b64 $d, -1", [](void) -> u64 { return ~0ull; });
    row("mov.pred $d, 0", [](void) -> bool { return false; });
    row("mov.pred $d, -1", [](void) -> bool { return true; });
    row("mov.pred $d, 1", [](void) -> bool { return true; });
}


// >>registers: copies, packed and unpacked pairs

static void test_mov(void) {
    row("mov.u16", [](u16 a) -> u16 { return a; });
    row("mov.u32", [](u32 a) -> u32 { return a; });
    row("mov.u64", [](u64 a) -> u64 { return a; });
    row("mov.f32", [](float a) -> float { return a; }, EXACT);
    row("mov.f64", [](double a) -> double { return a; }, EXACT);
    row("mov.pred", [](bool a) -> bool { return a; });
    row("mov.b32", [](float a) -> u32 { return bits(a); });
    row("mov.b32", [](u32 a) -> float { return float_of(a); }, EXACT);
    row("mov.b64", [](double a) -> u64 { return bits(a); });
    row("mov.b64", [](u64 a) -> double { return double_of(a); }, EXACT);
    row("mov.b32 $d, {$a, $b}", [](u16 a, u16 b) -> u32 { return (u32)b << 16 | a; });
    row("mov.b32 $d, {$a, $b}",
        [](u16 a, u16 b) -> float { return float_of((u32)b << 16 | a); }, EXACT);
    row("mov.b32 {$d, %rs40}, $a", [](u32 a) -> u16 { return (u16)a; });
    row("mov.b32 {%rs40, $d}, $a", [](u32 a) -> u16 { return (u16)(a >> 16); });
    row("mov.b32 {$d, %rs40}, $a", [](float a) -> u16 { return (u16)bits(a); });
    row("mov.b64 $d, {$a, $b}", [](u32 a, u32 b) -> u64 { return (u64)b << 32 | a; });
    row("mov.b64 $d, {$a, $b}",
        [](u32 a, u32 b) -> double { return double_of((u64)b << 32 | a); }, EXACT);
    row("mov.b64 {$d, %r40}, $a", [](double a) -> u32 { return (u32)bits(a); });
    row("mov.b64 {%r40, $d}, $a", [](double a) -> u32 { return (u32)(bits(a) >> 32); });
    row("mov.b64 {%r40, $d}, $a", [](u64 a) -> u32 { return (u32)(a >> 32); });
    /* The whole source is read before any part of the destination is written. */
    row("mov.b32 {%rs40, %rs41}, $a;\n    mov.b32 $a, {%rs41, %rs40};\n    mov.u32 $d, $a",
        [](u32 a) -> u32 { return a << 16 | a >> 16; });
    /* Registers of a block hide those of the same name around it. */
    row("mov.u32 %r50, $b;\n    {\n    .reg .b32 %r50;\n    .reg .b32 %temp;\n"
        "    mov.b64 {%temp, %r50}, $a;\n    add.s32 $d, %r50, 1;\n    }\n"
        "    {\n    .reg .b32 %temp;\n    mov.b64 {%r51, %temp}, $a;\n    }\n"
        "    {\n    .reg .b32 tmp;\n    mov.b64 {tmp, %r52}, $a;\n    add.s32 %r52, %r52, tmp;\n"
        "    }\n    xor.b32 $d, $d, %r50;\n    add.s32 $d, $d, %r51;\n    add.s32 $d, $d, %r52",
        [](double a, u32 b) -> u32 {
            u32 low = (u32)bits(a), high = (u32)(bits(a) >> 32);
            return ((high + 1) ^ b) + low + (low + high);
        });
}


// >>addresses without memory

static void test_cvta(void) {
    row("cvta.to.global.u64", [](u64 a) -> u64 { return a; });
}

void test_arithmetic(int argc, char **argv) {
    static const test_part parts[] = {
        {"add_mul", test_add_mul},       {"divide", test_divide}, {"min_max", test_min_max},
        {"logic", test_logic},           {"shifts", test_shifts}, {"setp", test_setp},
        {"select", test_select},         {"immediates", test_immediates},
        {"mov", test_mov},               {"cvta", test_cvta},
    };
    test_run(parts, sizeof parts / sizeof *parts, argc, argv);
}
