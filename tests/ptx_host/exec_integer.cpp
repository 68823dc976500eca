/* exec_integer.cpp - integer arithmetic, logic, shifts and bit fields. */
#include "exec.h"
#include <limits>

namespace ptx {

template <class T> using unsigned_of = typename std::make_unsigned<T>::type;

/* 64-bit types for the exact product of two values of type T; 128 bits for 64. */
template <class T> struct wider;
template <> struct wider<uint16_t> {
    typedef uint32_t type;
};

template <> struct wider<int16_t> {
    typedef int32_t type;
};

template <> struct wider<uint32_t> {
    typedef uint64_t type;
};

template <> struct wider<int32_t> {
    typedef int64_t type;
};

template <> struct wider<uint64_t> {
    typedef uint128 type;
};

template <> struct wider<int64_t> {
    typedef int128 type;
};

template <class T> using wider_of = typename wider<T>::type;

template <class T> constexpr unsigned bits_of() { return 8 * sizeof(T); }


// >>arithmetic. Overflow wraps around, so everything is computed without a sign.

/* Additions of 16-bit types would otherwise happen in int. */
template <class T> using wrap = typename std::conditional<sizeof(T) == 8, uint64_t, uint32_t>::type;

template <class T> struct add {
    static T of(T a, T b) { return (T)((wrap<T>)a + (wrap<T>)b); }
};

template <class T> struct sub {
    static T of(T a, T b) { return (T)((wrap<T>)a - (wrap<T>)b); }
};

template <class T> struct mul_lo {
    static T of(T a, T b) { return (T)((wrap<T>)a * (wrap<T>)b); }
};

template <class T> struct neg {
    static T of(T a) { return (T)(0 - (wrap<T>)a); }
};

template <class T> struct mad_lo {
    static T of(T a, T b, T c) { return (T)((wrap<T>)a * (wrap<T>)b + (wrap<T>)c); }
};

template <class T> struct mul_hi {
    static T of(T a, T b) { return (T)((wider_of<T>)a * (wider_of<T>)b >> bits_of<T>()); }
};

template <class T> struct mad_hi {
    static T of(T a, T b, T c) { return add<T>::of(mul_hi<T>::of(a, b), c); }
};

template <class T> struct mul_wide {
    static wider_of<T> of(T a, T b) { return (wider_of<T>)a * (wider_of<T>)b; }
};

template <class T> struct mad_wide {
    static wider_of<T> of(T a, T b, wider_of<T> c) {
        return add<wider_of<T>>::of(mul_wide<T>::of(a, b), c);
    }
};

/* Division by zero is undefined in PTX; GPUs return all ones. */
template <class T> struct divide {
    static T of(T a, T b) {
        if (b == 0) return (T)~(T)0;
        if (std::is_signed<T>::value && b == (T)-1) return neg<T>::of(a);
        return (T)(a / b);
    }
};

template <class T> struct remainder {
    static T of(T a, T b) {
        if (b == 0) return a;
        if (std::is_signed<T>::value && b == (T)-1) return 0;
        return (T)(a % b);
    }
};

template <class T> struct minimum {
    static T of(T a, T b) { return a < b ? a : b; }
};

template <class T> struct maximum {
    static T of(T a, T b) { return a > b ? a : b; }
};

template <class T> struct absolute {
    static T of(T a) { return a < 0 ? neg<T>::of(a) : a; }
};

template <class T> struct sum_of_difference {
    static T of(T a, T b, T c) {
        return add<T>::of(c, a < b ? sub<T>::of(b, a) : sub<T>::of(a, b));
    }
};

template <class T> struct add_saturated {
    static T of(T a, T b) {
        T sum;
        if (!__builtin_add_overflow(a, b, &sum)) return sum;
        return a < 0 ? std::numeric_limits<T>::min() : std::numeric_limits<T>::max();
    }
};

template <class T> struct sub_saturated {
    static T of(T a, T b) {
        T difference;
        if (!__builtin_sub_overflow(a, b, &difference)) return difference;
        return a < 0 ? std::numeric_limits<T>::min() : std::numeric_limits<T>::max();
    }
};

/* The types that can be multiplied to twice their width. */
template <template <class> class Op> static execute *for_widening(type t) {
    switch (t) {
    case U16: return map<Op<uint16_t>::of>;
    case U32: return map<Op<uint32_t>::of>;
    case S16: return map<Op<int16_t>::of>;
    case S32: return map<Op<int32_t>::of>;
    default: return nullptr;
    }
}

static int32_t signed24(int32_t a) { return (int32_t)((uint32_t)a << 8) >> 8; }

static uint32_t mul24_lo_unsigned(uint32_t a, uint32_t b) {
    return (a & 0xffffff) * (b & 0xffffff);
}

static int32_t mul24_lo_signed(int32_t a, int32_t b) {
    return (int32_t)((int64_t)signed24(a) * signed24(b));
}

static bool decode_multiply(opcode &o, form &f, bool add_third) {
    type t = f.to;
    if (o.take("wide")) {
        f.run = add_third ? for_widening<mad_wide>(t) : for_widening<mul_wide>(t);
        if (type_size(t) == 4) f.operands = add_third ? "Lwwl" : "Lww";
        else f.operands = add_third ? "Whhw" : "Whh";
        return true;
    }
    f.operands = same_operands(t, add_third ? 3 : 2);
    if (o.take("hi")) f.run = add_third ? for_integers<mad_hi>(t) : for_integers<mul_hi>(t);
    else if (o.take("lo")) f.run = add_third ? for_integers<mad_lo>(t) : for_integers<mul_lo>(t);
    return f.run != nullptr;
}

static bool decode_mul24(opcode &o, form &f) {
    if (!o.take("lo")) return false;
    f.operands = "Www";
    if (f.to == U32) f.run = map<mul24_lo_unsigned>;
    if (f.to == S32) f.run = map<mul24_lo_signed>;
    return true;
}

bool decode_integer(opcode &o, form &f) {
    type t = f.to;
    if (t < U8) return false;           /* .pred and .b32 are not types of arithmetic */
    if (o.name == "mul" || o.name == "mad") return decode_multiply(o, f, o.name == "mad");
    if (o.name == "mul24") return decode_mul24(o, f);
    bool one = o.name == "abs" || o.name == "neg";
    if (one && !is_signed(t)) return false;
    f.operands = same_operands(t, 2 - one + (o.name == "sad"));

    if (o.take("sat")) {
        if (t != S32) return false;
        if (o.name == "add") f.run = map<add_saturated<int32_t>::of>;
        if (o.name == "sub") f.run = map<sub_saturated<int32_t>::of>;
        return true;
    }
    if (o.name == "add") f.run = for_integers<add>(t);
    if (o.name == "sub") f.run = for_integers<sub>(t);
    if (o.name == "div") f.run = for_integers<divide>(t);
    if (o.name == "rem") f.run = for_integers<remainder>(t);
    if (o.name == "min") f.run = for_integers<minimum>(t);
    if (o.name == "max") f.run = for_integers<maximum>(t);
    if (o.name == "abs") f.run = for_integers<absolute>(t);
    if (o.name == "neg") f.run = for_integers<neg>(t);
    if (o.name == "sad") f.run = for_integers<sum_of_difference>(t);
    return true;
}


// >>logic

template <class T> struct bit_and {
    static T of(T a, T b) { return (T)(a & b); }
};

template <class T> struct bit_or {
    static T of(T a, T b) { return (T)(a | b); }
};

template <class T> struct bit_xor {
    static T of(T a, T b) { return (T)(a ^ b); }
};

template <class T> struct bit_not {
    static T of(T a) { return (T)~a; }
};

template <class T> struct is_zero {
    static T of(T a) { return a == 0; }
};

static void pred_and(machine &m, const instruction &i, uint32_t active) {
    set_predicate(m, i.o[0], active, predicate(m, i.o[1]) & predicate(m, i.o[2]));
}

static void pred_or(machine &m, const instruction &i, uint32_t active) {
    set_predicate(m, i.o[0], active, predicate(m, i.o[1]) | predicate(m, i.o[2]));
}

static void pred_xor(machine &m, const instruction &i, uint32_t active) {
    set_predicate(m, i.o[0], active, predicate(m, i.o[1]) ^ predicate(m, i.o[2]));
}

static void pred_not(machine &m, const instruction &i, uint32_t active) {
    set_predicate(m, i.o[0], active, ~predicate(m, i.o[1]));
}

/* lop3: bit k of the table is the result for inputs a, b, c = bits 2, 1, 0 of k. */
static void lop3(machine &m, const instruction &i, uint32_t active) {
    uint32_t *d = row32(m, i.o[0]);
    const uint32_t *a = row32(m, i.o[1]), *b = row32(m, i.o[2]), *c = row32(m, i.o[3]);
    for (int l : lanes{active}) {
        uint32_t result = 0;
        for (unsigned k = 0; k < 8; k++) {
            if (!(i.o[4] >> k & 1)) continue;
            result |= (k & 4 ? a[l] : ~a[l]) & (k & 2 ? b[l] : ~b[l]) & (k & 1 ? c[l] : ~c[l]);
        }
        d[l] = result;
    }
}

bool decode_logic(opcode &o, form &f) {
    type t = f.to = o.take_type();
    if (o.name == "lop3") {
        f.run = t == B32 ? lop3 : nullptr;
        f.operands = "Wwwwi";
        return true;
    }
    bool one = o.name == "not" || o.name == "cnot";
    if (t == PRED) {
        f.operands = one ? "Pp" : "Ppp";
        if (o.name == "and") f.run = pred_and;
        if (o.name == "or") f.run = pred_or;
        if (o.name == "xor") f.run = pred_xor;
        if (o.name == "not") f.run = pred_not;
        return true;
    }
    if (t != B16 && t != B32 && t != B64) return false;
    f.operands = same_operands(t, one ? 1 : 2);
    if (o.name == "and") f.run = for_integers<bit_and>(t);
    if (o.name == "or") f.run = for_integers<bit_or>(t);
    if (o.name == "xor") f.run = for_integers<bit_xor>(t);
    if (o.name == "not") f.run = for_integers<bit_not>(t);
    if (o.name == "cnot") f.run = for_integers<is_zero>(t);
    return true;
}


// >>shifts. Amounts above the width count as the width.

template <class T> struct shift_left {
    static T of(T a, uint32_t n) { return n >= bits_of<T>() ? 0 : (T)((wrap<T>)a << n); }
};

template <class T> struct shift_right {
    static T of(T a, uint32_t n) {
        if (n >= bits_of<T>()) n = std::is_signed<T>::value ? bits_of<T>() - 1 : bits_of<T>();
        return n == bits_of<T>() ? 0 : (T)(a >> n);
    }
};

/* Funnel shifts of b:a, with the amount wrapped or clamped to 32. */
template <bool LEFT, bool WRAP> struct funnel {
    static uint32_t of(uint32_t a, uint32_t b, uint32_t n) {
        uint32_t clamped = n > 32 ? 32 : n;
        n = WRAP ? n & 31 : clamped;
        uint64_t both = (uint64_t)b << 32 | a;
        return LEFT ? (uint32_t)(both << n >> 32) : (uint32_t)(both >> n);
    }
};

static bool decode_funnel(opcode &o, form &f) {
    bool left = o.take("l");
    if (!left && !o.take("r")) return false;
    bool wraps = o.take("wrap");
    if ((!wraps && !o.take("clamp")) || f.to != B32) return false;
    f.operands = "Wwww";
    if (left) f.run = wraps ? map<funnel<true, true>::of> : map<funnel<true, false>::of>;
    else f.run = wraps ? map<funnel<false, true>::of> : map<funnel<false, false>::of>;
    return true;
}

bool decode_shift(opcode &o, form &f) {
    type t = f.to = o.take_type();
    f.from = U32;
    if (o.name == "shf") return decode_funnel(o, f);
    if (o.name == "shl" && !is_bits(t)) return false;
    f.operands = by_size(t, "Hhw", "Www", "Llw");
    f.run = o.name == "shl" ? for_integers<shift_left>(t) : for_integers<shift_right>(t);
    return true;
}


// >>bit fields

static uint32_t popc32(uint32_t a) { return (uint32_t)__builtin_popcount(a); }
static uint32_t popc64(uint64_t a) { return (uint32_t)__builtin_popcountll(a); }
static uint32_t clz32(uint32_t a) { return a ? (uint32_t)__builtin_clz(a) : 32; }
static uint32_t clz64(uint64_t a) { return a ? (uint32_t)__builtin_clzll(a) : 64; }

/* The position of the highest bit that differs from the sign. SHIFT: the distance by
   which it would have to be shifted to the top. */
template <class T, bool SHIFT> struct find_bit {
    static uint32_t of(T value) {
        unsigned_of<T> a = (unsigned_of<T>)(value < 0 ? ~value : value);
        if (!a) return 0xffffffffu;
        uint32_t zeros = sizeof(T) == 8 ? clz64(a) : clz32((uint32_t)a);
        return SHIFT ? zeros : bits_of<T>() - 1 - zeros;
    }
};

template <class T> struct reverse_bits {
    static T of(T a) {
        T r = 0;
        for (unsigned k = 0; k < bits_of<T>(); k++) r = (T)(r << 1 | (a >> k & 1));
        return r;
    }
};

/* Inserts the low bits of a into b. */
template <class T> struct insert_field {
    static T of(T a, T b, uint32_t position, uint32_t length) {
        position &= 0xff;
        length &= 0xff;
        if (position >= bits_of<T>() || !length) return b;
        T field = length >= bits_of<T>() ? (T)~(T)0 : (T)(((T)1 << length) - 1);
        field = (T)(field << position);
        return (T)((b & ~field) | (a << position & field));
    }
};

template <class T> struct extract_field {
    static T of(T a, uint32_t position, uint32_t length) {
        const uint32_t top = bits_of<T>() - 1;
        position &= 0xff;
        length &= 0xff;
        uint32_t sign_at = position + length - 1 < top ? position + length - 1 : top;
        bool sign = std::is_signed<T>::value && length && (a >> sign_at & 1);
        unsigned_of<T> r = 0;
        for (uint32_t k = 0; k <= top; k++) {
            bool in_field = k < length && position + k <= top;
            bool bit = in_field ? (a >> (position + k) & 1) : sign;
            r |= (unsigned_of<T>)bit << k;
        }
        return (T)r;
    }
};

/* Byte k of the result is byte selector[k] of b:a; bit 3 of a selector replicates the
   sign of the byte. */
static uint32_t permute(uint32_t a, uint32_t b, uint32_t selectors) {
    uint64_t both = (uint64_t)b << 32 | a;
    uint32_t r = 0;
    for (unsigned k = 0; k < 4; k++) {
        uint32_t s = selectors >> (4 * k) & 15;
        uint32_t byte = (uint32_t)(both >> (8 * (s & 7))) & 0xff;
        if (s & 8) byte = byte & 0x80 ? 0xff : 0;
        r |= byte << (8 * k);
    }
    return r;
}

template <bool SHIFT> static execute *find_bit_of(type t) {
    switch (t) {
    case U32: return map<find_bit<uint32_t, SHIFT>::of>;
    case S32: return map<find_bit<int32_t, SHIFT>::of>;
    case U64: return map<find_bit<uint64_t, SHIFT>::of>;
    case S64: return map<find_bit<int64_t, SHIFT>::of>;
    default: return nullptr;
    }
}

static bool decode_find_bit(opcode &o, form &f) {
    bool shift = o.take("shiftamt");
    f.operands = type_size(f.to) == 8 ? "Wl" : "Ww";
    f.run = shift ? find_bit_of<true>(f.to) : find_bit_of<false>(f.to);
    return true;
}

bool decode_bits(opcode &o, form &f) {
    type t = f.to = o.take_type();
    bool wide = type_size(t) == 8;
    bool of_integers = o.name == "bfe" || o.name == "bfind";
    if (type_size(t) < 4 || !(of_integers ? is_integer(t) : is_bits(t))) return false;
    if (o.name == "prmt" && wide) return false;
    if (o.name == "bfind") return decode_find_bit(o, f);
    if (o.name == "popc") {
        f.run = wide ? map<popc64> : map<popc32>;
        f.operands = wide ? "Wl" : "Ww";
    } else if (o.name == "clz") {
        f.run = wide ? map<clz64> : map<clz32>;
        f.operands = wide ? "Wl" : "Ww";
    } else if (o.name == "brev") {
        f.run = wide ? map<reverse_bits<uint64_t>::of> : map<reverse_bits<uint32_t>::of>;
        f.operands = wide ? "Ll" : "Ww";
    } else if (o.name == "bfi") {
        f.run = wide ? map<insert_field<uint64_t>::of> : map<insert_field<uint32_t>::of>;
        f.operands = wide ? "Lllww" : "Wwwww";
    } else if (o.name == "bfe") {
        f.run = for_integers<extract_field>(t); /* of 32 and 64 bits */
        f.operands = wide ? "Llww" : "Wwww";
    } else if (o.name == "prmt") {
        f.run = map<permute>;
        f.operands = "Wwww";
    }
    return true;
}

} // namespace ptx
