/* exec_convert.cpp - cvt, comparisons, selections and moves. */
#include "exec.h"
#include <fenv.h>
#include <limits>

namespace ptx {

// >>integer to integer

template <class D, class A> static D convert_integer(A a) { return (D)a; }

/* A result of type s8 is extended to the width of its register, 16 or 32 bits. */
template <class A> static int32_t convert_to_s8(A a) { return (int8_t)a; }

template <class A> static execute *integer_from(type to) {
    switch (to) {
    case U8: return map<convert_integer<uint8_t, A>>;
    case U16: return map<convert_integer<uint16_t, A>>;
    case U32: return map<convert_integer<uint32_t, A>>;
    case U64: return map<convert_integer<uint64_t, A>>;
    case S8: return map<convert_to_s8<A>>;
    case S16: return map<convert_integer<int16_t, A>>;
    case S32: return map<convert_integer<int32_t, A>>;
    case S64: return map<convert_integer<int64_t, A>>;
    default: return nullptr;
    }
}

static execute *integer_to_integer(type to, type from) {
    switch (from) {
    case U8: return integer_from<uint8_t>(to);
    case U16: return integer_from<uint16_t>(to);
    case U32: return integer_from<uint32_t>(to);
    case U64: return integer_from<uint64_t>(to);
    case S8: return integer_from<int8_t>(to);
    case S16: return integer_from<int16_t>(to);
    case S32: return integer_from<int32_t>(to);
    case S64: return integer_from<int64_t>(to);
    default: return nullptr;
    }
}


// >>any conversion, lane by lane. The frequent ones have functions of their own below.

/* The least and greatest value of an integer type. */
static void integer_limits(type t, int128 *least, int128 *greatest) {
    unsigned bits = 8 * (unsigned)type_size(t);
    *greatest = ((int128)1 << (is_signed(t) ? bits - 1 : bits)) - 1;
    *least = is_signed(t) ? -*greatest - 1 : 0;
}

static int128 clamp(int128 v, type t) {
    int128 least, greatest;
    integer_limits(t, &least, &greatest);
    if (v < least) return least;
    return v > greatest ? greatest : v;
}

static double flush_subnormal(double d, type t, bool flush) {
    return flush && t == F32 && fabs(d) < 0x1p-126 ? copysign(0, d) : d;
}

static double read_float(uint64_t word, type t) {
    switch (t) {
    case F64: return from_word<double>(word);
    case F32: return (double)bits_to_float((uint32_t)word);
    case F16: return (double)to_float(half{(uint16_t)word});
    default: return (double)to_float(bfloat{(uint16_t)word});
    }
}

static int128 read_integer(uint64_t word, type t) {
    unsigned unused = 64 - 8 * (unsigned)type_size(t);
    if (is_signed(t)) return (int64_t)(word << unused) >> unused;
    return word << unused >> unused;
}

static double round_to_integer(double d, rounding r) {
    switch (r) {
    case INTEGER_EVEN: return nearbyint(d);
    case INTEGER_ZERO: return trunc(d);
    case INTEGER_DOWN: return floor(d);
    case INTEGER_UP: return ceil(d);
    default: return d;
    }
}

static int host_rounding(rounding r) {
    switch (r) {
    case TOWARD_ZERO: return FE_TOWARDZERO;
    case DOWN: return FE_DOWNWARD;
    case UP: return FE_UPWARD;
    default: return FE_TONEAREST;
    }
}

/* Rounds a value of type S to f32 or f64 in the host's rounding mode. The volatile copy
   keeps the compiler from moving the conversion out of that mode. */
template <class T, class S> static T round_now(S s, rounding r) {
    volatile S v = s;
    fesetround(host_rounding(r));
    volatile T t = (T)v;
    fesetround(FE_TONEAREST);
    return t;
}

static uint64_t write_float(double d, type t, rounding r) {
    switch (t) {
    case F64: return to_word(d);
    case F32: return d == d ? float_bits(round_now<float>(d, r)) : 0x7fffffffu;
    case F16: return to_half(d, r).bits;
    default: return to_bfloat(d, r).bits;
    }
}

/* Numbers outside the range of the type become its limits. NaN becomes 0; if one of the
   types has 64 bits, it becomes the value with only the highest bit set. */
static uint64_t float_to_integer(double d, type t, type from) {
    bool wide = type_size(t) == 8 || from == F64;
    if (d != d) return wide ? 1ull << (8 * type_size(t) - 1) : 0;
    int128 least, greatest;
    integer_limits(t, &least, &greatest);
    if (d <= (double)least) return (uint64_t)least;
    if (d >= (double)greatest) return (uint64_t)greatest;
    return (uint64_t)(int128)d;
}

/* Rounds an integer of 64 bits, signed or not. */
template <class T> static T round_integer(int128 v, rounding r) {
    return v < 0 ? round_now<T>((int64_t)v, r) : round_now<T>((uint64_t)v, r);
}

static uint64_t integer_to_float(int128 v, type t, rounding r) {
    switch (t) {
    case F64: return to_word(round_integer<double>(v, r));
    case F32: return float_bits(round_integer<float>(v, r));
    case F16: return to_half((double)v, r).bits;
    default: return to_bfloat((double)v, r).bits;
    }
}

static uint64_t truncate_to(uint64_t v, type t) {
    unsigned unused = 64 - 8 * (unsigned)type_size(t);
    return v << unused >> unused;
}

static uint64_t convert(uint64_t word, const form &f) {
    if (!is_float(f.from)) {
        int128 v = read_integer(word, f.from);
        if (is_float(f.to)) return integer_to_float(v, f.to, f.rounding);
        if (f.saturate) v = clamp(v, f.to);
        if (f.to == S8) return (uint32_t)convert_to_s8((int64_t)v);
        return truncate_to((uint64_t)v, f.to);
    }
    double d = flush_subnormal(read_float(word, f.from), f.from, f.flush);
    d = round_to_integer(d, f.rounding);
    if (!is_float(f.to)) return truncate_to(float_to_integer(d, f.to, f.from), f.to);
    if (f.saturate) d = d > 0 ? fmin(d, 1) : 0;
    d = flush_subnormal(d, f.to, f.flush);
    return write_float(d, f.to, f.rounding);
}

static void convert_lanes(machine &m, const instruction &i, uint32_t active) {
    for (int l : lanes{active})
        set_lane_value(m, i.o[0], l, convert(lane_value(m, i.o[1], l), *i.form));
}

/* cvt.rn.bf16x2.f32 d, a, b: a is the upper half. */
static void convert_pair(machine &m, const instruction &i, uint32_t active) {
    const form &f = *i.form;
    type t = f.to == BF16X2 ? BF16 : F16;
    uint32_t *d = row32(m, i.o[0]);
    const uint32_t *a = row32(m, i.o[1]), *b = row32(m, i.o[2]);
    for (int l : lanes{active}) {
        uint64_t high = write_float((double)bits_to_float(a[l]), t, f.rounding);
        uint64_t low = write_float((double)bits_to_float(b[l]), t, f.rounding);
        if (f.saturate && high & 0x8000) high = 0;      /* .relu */
        if (f.saturate && low & 0x8000) low = 0;
        d[l] = (uint32_t)(high << 16 | low);
    }
}


// >>frequent conversions

/* To 7 bits of mantissa, to nearest even. */
static uint16_t nearest_bfloat(uint32_t a) {
    uint32_t rounded = (a + 0x7fff + (a >> 16 & 1)) >> 16;
    return (uint16_t)((a & 0x7fffffffu) > 0x7f800000u ? 0x7fff : rounded);
}

static uint32_t nearest_bfloat_pair(uint32_t high, uint32_t low) {
    return (uint32_t)nearest_bfloat(high) << 16 | nearest_bfloat(low);
}

static uint32_t bfloat_to_float_bits(uint32_t a) { return a << 16; }

/* A rounded value, except for NaN and infinities. */
static uint32_t special_tf32(uint32_t a, uint32_t rounded) {
    uint32_t magnitude = a & 0x7fffffffu;
    if (magnitude == 0x7f800000u) return a;
    return magnitude > 0x7f800000u ? 0x7fffe000u : rounded;
}

/* To 10 bits of mantissa, ties away from zero. */
static uint32_t nearest_tf32(uint32_t a) {
    return special_tf32(a, (a + 0x1000) & 0xffffe000u);
}

static uint32_t nearest_even_tf32(uint32_t a) {
    return special_tf32(a, (a + 0xfff + (a >> 13 & 1)) & 0xffffe000u);
}

static double float_to_double(float a) { return (double)a; }
static float signed_to_float(int32_t a) { return (float)a; }
static double signed_to_double(int32_t a) { return (double)a; }
static float saturate_float(float a) { return a > 0 ? fminf(a, 1) : 0; }
static float floor_float(float a) { return a == a ? floorf(a) : bits_to_float(0x7fffffff); }

static execute *frequent_conversion(const form &f) {
    bool nearest = f.rounding == NEAREST_EVEN && !f.flush && !f.saturate;
    bool exact = f.rounding == NO_ROUNDING && !f.flush;
    if (f.to == BF16 && f.from == F32 && nearest) return map<nearest_bfloat>;
    if (f.to == BF16X2 && f.from == F32 && nearest) return map<nearest_bfloat_pair>;
    if (f.to == F32 && f.from == BF16 && exact && !f.saturate) return map<bfloat_to_float_bits>;
    if (f.to == F64 && f.from == F32 && exact && !f.saturate) return map<float_to_double>;
    if (f.to == F32 && f.from == F32 && exact && f.saturate) return map<saturate_float>;
    if (f.to == F32 && f.from == F32 && f.rounding == INTEGER_DOWN && !f.saturate && !f.flush)
        return map<floor_float>;
    if (f.to == F32 && f.from == S32 && nearest) return map<signed_to_float>;
    if (f.to == F64 && f.from == S32 && nearest) return map<signed_to_double>;
    return nullptr;
}


// >>decoding of cvt

/* The source of a conversion from a narrow integer may be in a 64-bit register. */
static const char *convert_operands(type to, type from) {
    bool wide_to = type_size(to) == 8;
    if (type_size(from) == 8) return wide_to ? "Ll" : "Wl";
    if (is_float(from)) return wide_to ? "Lw" : "Ww";
    return wide_to ? "Lx" : "Wx";
}

static bool valid_rounding(const form &f) {
    bool to_integer = f.rounding >= INTEGER_EVEN;
    if (f.rounding == NEAREST_AWAY) return false;
    if (!is_float(f.from)) return is_float(f.to) ? !to_integer && f.rounding : !f.rounding;
    if (!is_float(f.to)) return to_integer;
    bool narrows = type_size(f.to) < type_size(f.from);
    if (narrows || (type_size(f.to) == type_size(f.from) && f.to != f.from))
        return f.rounding && !to_integer;
    return f.rounding == NO_ROUNDING || (to_integer && f.to == f.from);
}

static bool valid_types(const form &f) {
    auto converts = [](type t) {
        return is_integer(t) || t == F16 || t == BF16 || t == F32 || t == F64;
    };
    if (!converts(f.to) || !converts(f.from)) return false;
    if (f.to == S8 && is_float(f.from)) return false;
    if (f.flush && f.to != F32 && f.from != F32) return false;
    return !f.saturate || is_float(f.from) || is_integer(f.to);
}

static bool decode_convert_tf32(opcode &o, form &f) {
    f.rounding = o.take_rounding();
    f.from = o.take_type();
    f.operands = "Ww";
    if (f.from != F32) return false;
    if (f.rounding == NEAREST_AWAY) f.run = map<nearest_tf32>;
    if (f.rounding == NEAREST_EVEN) f.run = map<nearest_even_tf32>;
    return true;
}

bool decode_convert(opcode &o, form &f) {
    f.counter = IN_CONVERSION;
    f.to = o.take_type();
    if (f.to == TF32) return decode_convert_tf32(o, f);
    f.from = o.take_type();
    f.flush = o.take("ftz");
    f.rounding = o.take_rounding();
    if (f.to == BF16X2 || f.to == F16X2) {
        f.saturate = o.take("relu");
        f.operands = "Www";
        f.run = frequent_conversion(f);
        if (!f.run) f.run = convert_pair;
        bool rounds = f.rounding == NEAREST_EVEN || f.rounding == TOWARD_ZERO;
        return f.from == F32 && rounds && !f.flush;
    }
    f.saturate = o.take("sat");
    if (!valid_types(f) || !valid_rounding(f)) return false;
    f.operands = convert_operands(f.to, f.from);
    f.run = frequent_conversion(f);
    if (!f.run && !f.saturate) f.run = integer_to_integer(f.to, f.from);
    if (!f.run) f.run = convert_lanes;
    f.inner = convert_lanes;
    return true;
}


// >>comparison

template <class T> static inline bool is_nan(T a) {
    if constexpr (std::is_floating_point<T>::value) return a != a;
    else return false;
}

/* Whether a comparison holds. Comparisons with U are true if an operand is NaN. */
template <compare C, class T> static inline bool compared(T a, T b) {
    bool unordered = is_nan(a) || is_nan(b);
    switch (C) {
    case EQ: return a == b && !unordered;
    case NE: return a != b && !unordered;
    case LT: return a < b;
    case LE: return a <= b;
    case GT: return a > b;
    case GE: return a >= b;
    case EQU: return a == b || unordered;
    case NEU: return a != b || unordered;
    case LTU: return a < b || unordered;
    case LEU: return a <= b || unordered;
    case GTU: return a > b || unordered;
    case GEU: return a >= b || unordered;
    case NUM: return !unordered;
    case NAN_: return unordered;
    }
    return false;
}

/* One bit for each lane. */
template <compare C, class T>
static uint32_t compare_rows(const word_of<T> *a, const word_of<T> *b) {
    uint32_t each[LANES];
    LANES_INDEPENDENT
    for (int l = 0; l < LANES; l++)
        each[l] = (uint32_t)compared<C, T>(from_word<T>(a[l]), from_word<T>(b[l])) << l;
    uint32_t mask = 0;
    for (int l = 0; l < LANES; l++) mask |= each[l];
    return mask;
}

static uint32_t combined(uint32_t result, uint32_t with, combine c) {
    switch (c) {
    case AND: return result & with;
    case OR: return result | with;
    case XOR: return result ^ with;
    default: return result;
    }
}

/* setp p|q, a, b, c: p combines the comparison with c, q its negation. */
template <compare C, class T> static void setp(machine &m, const instruction &i, uint32_t active) {
    uint32_t result = compare_rows<C, T>(row<T>(m, i.o[2]), row<T>(m, i.o[3]));
    if (i.form->combine == ALONE) {
        set_predicate(m, i.o[0], active, result);
        if (i.o[1] != NO_OPERAND) set_predicate(m, i.o[1], active, ~result);
        return;
    }
    uint32_t with = predicate(m, i.o[4]);
    set_predicate(m, i.o[0], active, combined(result, with, i.form->combine));
    if (i.o[1] != NO_OPERAND)
        set_predicate(m, i.o[1], active, combined(~result, with, i.form->combine));
}

/* set d, a, b: all ones, or 1.0f, if the comparison holds. */
template <compare C, class T>
static void set_value(machine &m, const instruction &i, uint32_t active) {
    uint32_t result = compare_rows<C, T>(row<T>(m, i.o[1]), row<T>(m, i.o[2]));
    uint32_t *d = row32(m, i.o[0]), yes = i.form->to == F32 ? 0x3f800000u : 0xffffffffu;
    for (int l : lanes{active}) d[l] = result >> l & 1 ? yes : 0;
}

template <class T, compare C> static execute *comparison_of(bool predicate_result) {
    return predicate_result ? setp<C, T> : set_value<C, T>;
}

template <class T> static execute *integer_comparison(compare c, bool p) {
    switch (c) {
    case EQ: return comparison_of<T, EQ>(p);
    case NE: return comparison_of<T, NE>(p);
    case LT: return comparison_of<T, LT>(p);
    case LE: return comparison_of<T, LE>(p);
    case GT: return comparison_of<T, GT>(p);
    case GE: return comparison_of<T, GE>(p);
    default: return nullptr;
    }
}

template <class T> static execute *float_comparison(compare c, bool p) {
    switch (c) {
    case EQU: return comparison_of<T, EQU>(p);
    case NEU: return comparison_of<T, NEU>(p);
    case LTU: return comparison_of<T, LTU>(p);
    case LEU: return comparison_of<T, LEU>(p);
    case GTU: return comparison_of<T, GTU>(p);
    case GEU: return comparison_of<T, GEU>(p);
    case NUM: return comparison_of<T, NUM>(p);
    case NAN_: return comparison_of<T, NAN_>(p);
    default: return integer_comparison<T>(c, p);
    }
}

static execute *comparison(type t, compare c, bool p) {
    switch (t) {
    case U16: case B16: return integer_comparison<uint16_t>(c, p);
    case U32: case B32: return integer_comparison<uint32_t>(c, p);
    case U64: case B64: return integer_comparison<uint64_t>(c, p);
    case S16: return integer_comparison<int16_t>(c, p);
    case S32: return integer_comparison<int32_t>(c, p);
    case S64: return integer_comparison<int64_t>(c, p);
    case F32: return float_comparison<float>(c, p);
    case F64: return float_comparison<double>(c, p);
    default: return nullptr;
    }
}

static bool take_compare(opcode &o, type t, compare *c) {
    static const std::pair<const char *, compare> names[] = {
        {"eq", EQ}, {"ne", NE}, {"lt", LT}, {"le", LE}, {"gt", GT}, {"ge", GE},
        {"equ", EQU}, {"neu", NEU}, {"ltu", LTU}, {"leu", LEU}, {"gtu", GTU}, {"geu", GEU},
        {"num", NUM}, {"nan", NAN_}, {"lo", LT}, {"ls", LE}, {"hi", GT}, {"hs", GE}};
    for (auto &n : names) {
        if (!o.take(n.first)) continue;
        *c = n.second;
        bool unsigned_only = n.first == std::string("lo") || n.first == std::string("ls") ||
                             n.first == std::string("hi") || n.first == std::string("hs");
        return !unsigned_only || (!is_signed(t) && !is_float(t));
    }
    return false;
}

static const char *compare_operands(bool p, bool wide, bool combines) {
    if (p && combines) return wide ? "P|Pllp" : "P|Pwwp";
    if (p) return wide ? "P|Pll" : "P|Pww";
    return wide ? "Wll" : "Www";
}

bool decode_compare(opcode &o, form &f) {
    bool p = o.name == "setp";
    f.to = p ? PRED : o.take_type();
    f.from = o.take_type();
    if (!take_compare(o, f.from, &f.compare)) return false;
    if (is_bits(f.from) && f.compare != EQ && f.compare != NE) return false;
    if (o.take("and")) f.combine = AND;
    else if (o.take("or")) f.combine = OR;
    else if (o.take("xor")) f.combine = XOR;
    bool valid_set = f.combine == ALONE && (f.to == U32 || f.to == S32 || f.to == F32);
    if (!p && !valid_set) return false;
    f.operands = compare_operands(p, type_size(f.from) == 8, f.combine != ALONE);
    f.run = comparison(f.from, f.compare, p);
    return true;
}


// >>selection

template <class T> static void selp(machine &m, const instruction &i, uint32_t active) {
    word_of<T> *d = row<T>(m, i.o[0]);
    const word_of<T> *a = row<T>(m, i.o[1]), *b = row<T>(m, i.o[2]);
    uint32_t p = predicate(m, i.o[3]);
    if (active == ALL_LANES) {
        LANES_INDEPENDENT
        for (int l = 0; l < LANES; l++) d[l] = p & 1u << l ? a[l] : b[l];
        return;
    }
    for (int l : lanes{active}) d[l] = p >> l & 1 ? a[l] : b[l];
}

/* slct d, a, b, c: a if c >= 0. */
template <class T, class C> static T select_by_sign(T a, T b, C c) { return c >= 0 ? a : b; }

bool decode_select(opcode &o, form &f) {
    f.to = o.take_type();
    bool wide = type_size(f.to) == 8;
    if (!is_basic(f.to) || type_size(f.to) < 2) return false;
    if (o.name == "selp") {
        f.selects = true;
        f.operands = by_size(f.to, "Hhhp", "Wwwp", "Lllp");
        f.run = wide ? selp<uint64_t> : selp<uint32_t>;
        return true;
    }
    f.from = o.take_type();
    f.operands = wide ? "Lllw" : "Wwww";
    if (f.from == S32)
        f.run = wide ? map<select_by_sign<uint64_t, int32_t>>
                     : map<select_by_sign<uint32_t, int32_t>>;
    if (f.from == F32)
        f.run = wide ? map<select_by_sign<uint64_t, float>>
                     : map<select_by_sign<uint32_t, float>>;
    return true;
}


// >>moves. With a vector operand, a mov is a pack or an unpack: see parse_code.cpp.

template <class T> static T same(T a) { return a; }

static void mov_pred(machine &m, const instruction &i, uint32_t active) {
    set_predicate(m, i.o[0], active, predicate(m, i.o[1]));
}

/* mov d, {a, b, ..}: the first element is the lowest. */
static void pack(machine &m, const instruction &i, uint32_t active) {
    unsigned n = i.form->count, bits = 8 * (unsigned)type_size(i.form->to) / n;
    for (int l : lanes{active}) {
        uint64_t v = 0;
        for (unsigned k = 0; k < n; k++)
            v |= (lane_value(m, i.o[1 + k], l) & (~0ull >> (64 - bits))) << (bits * k);
        set_lane_value(m, i.o[0], l, v);
    }
}

static void unpack(machine &m, const instruction &i, uint32_t active) {
    unsigned n = i.form->count, bits = 8 * (unsigned)type_size(i.form->to) / n;
    for (int l : lanes{active}) {
        uint64_t v = lane_value(m, i.o[n], l);
        for (unsigned k = 0; k < n; k++)
            set_lane_value(m, i.o[k], l, v >> (bits * k) & (~0ull >> (64 - bits)));
    }
}

/* The parser appends ".pack2" or ".unpack2" if an operand is a vector of 2. */
static bool decode_vector_move(opcode &o, form &f) {
    struct vector_move {
        const char *name;
        uint8_t count;
        bool packs;
        const char *narrow, *wide;      /* operands for 32 and 64 bits */
    };
    static const vector_move rows[] = {
        {"pack2", 2, true, "W{hh}", "L{ww}"},
        {"pack4", 4, true, "W{hhhh}", "L{hhhh}"},
        {"unpack2", 2, false, "{HH}w", "{WW}l"},
        {"unpack4", 4, false, "{HHHH}w", "{HHHH}l"}};
    for (auto &r : rows) {
        if (!o.take(r.name)) continue;
        f.count = r.count;
        f.run = r.packs ? pack : unpack;
        f.operands = type_size(f.to) == 8 ? r.wide : r.narrow;
        return f.to == B32 || f.to == B64;
    }
    return false;
}

bool decode_move(opcode &o, form &f) {
    f.to = o.take_type();
    if (f.to == NO_TYPE) return false;
    if (!o.modifiers.empty()) return decode_vector_move(o, f);
    f.copies = true;
    if (f.to == PRED) {
        f.run = mov_pred;
        f.operands = "Pp";
        return true;
    }
    f.operands = same_operands(f.to, 1);
    f.run = type_size(f.to) == 8 ? map<same<uint64_t>> : map<same<uint32_t>>;
    return is_basic(f.to) && type_size(f.to) >= 2;
}

} // namespace ptx
