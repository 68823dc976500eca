/* test_arithmetic.cpp - tests of the instructions that compute a register from registers.
   A row names a form and gives its definition in C++. It is executed for all
   combinations of edge cases and for random operands, by full warps and by warps in
   which some lanes are inactive. Results are compared bit by bit; an unspecified NaN
   matches any NaN. */
#include "test_ptx.h"
#include <limits>
#include <optional>

typedef int16_t s16;
typedef int32_t s32;
typedef int64_t s64;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;


// >>operands

template <class T> struct operand;

#define OPERAND(T, class_, load_, store_) \
  template <> struct operand<T> { \
      static constexpr const char *name = class_; \
      static constexpr const char *load = load_; \
      static constexpr const char *store = store_; \
  };
OPERAND(s16, "%rs", "ld.global.u16", "st.global.u16")
OPERAND(u16, "%rs", "ld.global.u16", "st.global.u16")
OPERAND(s32, "%r", "ld.global.u32", "st.global.u32")
OPERAND(u32, "%r", "ld.global.u32", "st.global.u32")
OPERAND(s64, "%rd", "ld.global.u64", "st.global.u64")
OPERAND(u64, "%rd", "ld.global.u64", "st.global.u64")
OPERAND(float, "%f", "ld.global.f32", "st.global.f32")
OPERAND(double, "%fd", "ld.global.f64", "st.global.f64")
OPERAND(bool, "%p", "", "")
#undef OPERAND

template <class T> std::vector<T> edges();

static const u64 integer_edges[] = {
    0, 1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 255, 256, 257, 0x7fff,
    0x8000, 0x8001, 0xfffe, 0xffff, 0x10000, 0x00ffffff, 0x01000001, 0x12345678, 0x7fffffff,
    0x80000000, 0x80000001, 0xdeadbeef, 0xfffffffe, 0xffffffff, 0x100000000, 0x100000001,
    0x001fffffffffffff, 0x0020000000000001, 0x123456789abcdef0, 0x7fffffffffffffff,
    0x8000000000000000, 0x8000000000000001, 0xfedcba9876543210, 0xffffffff00000000,
    0xffffffff80000000, 0xfffffffffffffffe, 0xffffffffffffffff};

/* Returns the different values that the list has after a conversion to T. */
template <class T> static std::vector<T> integers() {
    std::set<T> values;
    for (u64 x : integer_edges) values.insert((T)x);
    return std::vector<T>(values.begin(), values.end());
}

template <> std::vector<s16> edges() { return integers<s16>(); }
template <> std::vector<u16> edges() { return integers<u16>(); }
template <> std::vector<s32> edges() { return integers<s32>(); }
template <> std::vector<u32> edges() { return integers<u32>(); }
template <> std::vector<s64> edges() { return integers<s64>(); }
template <> std::vector<u64> edges() { return integers<u64>(); }
template <> std::vector<bool> edges() { return {false, true}; }

template <> std::vector<float> edges() {
    static const u32 patterns[] = {
        0x00000000, 0x00000001, 0x00000002, 0x00400000, 0x007fffff, /* 0 and subnormals */
        0x00800000, 0x00800001, 0x01000000, 0x33800000, 0x34000000, /* small */
        0x3e800000, 0x3effffff, 0x3f000000, 0x3f000001, 0x3f7fffff, /* about 0.25, 0.5, 1 */
        0x3f800000, 0x3f800001, 0x3f801000, 0x3f803000, 0x3f808000, /* ties of tf32 and bf16 */
        0x3f818000, 0x3fc00000, 0x40200000, 0x40490fdb, 0x40600000, /* 1.5, 2.5, pi, 3.5 */
        0x42fe0000, 0x42fe0001, 0x43000000, 0x4affffff, 0x4b000001, /* 127, 128, 2^23 */
        0x4b7fffff, 0x4b800001, 0x4effffff, 0x4f000000, 0x5effffff, /* limits of integers */
        0x5f000000, 0x7e800000, 0x7e800001, 0x7f000000, 0x7f7f8000, /* large */
        0x7f7fffff, 0x7f800000, 0x7f800001, 0x7fc00000, 0x7fffffff}; /* infinity and NaN */
    std::vector<float> values;
    for (u32 p : patterns) {
        values.push_back(float_of(p));
        values.push_back(float_of(p | 0x80000000));
    }
    return values;
}

template <> std::vector<double> edges() {
    static const u64 patterns[] = {
        0, 1, 0x000fffffffffffff, 0x0010000000000000, 0x0010000000000001, 0x0020000000000000,
        0x36a0000000000000, 0x380fffffffffffff, 0x3810000000000000, 0x3ca0000000000000,
        0x3fe0000000000000, 0x3fe0000000000001, 0x3fefffffffffffff, 0x3ff0000000000000,
        0x3ff0000000000001, 0x3ff0000010000000, 0x3ff0000030000000, 0x3ff8000000000000,
        0x4004000000000000, 0x400921fb54442d18, 0x41dfffffffc00000, 0x41dfffffffe00000,
        0x41e0000000000000, 0x43dfffffffffffff, 0x43e0000000000000, 0x47efffffe0000000,
        0x47effffff0000000, 0x7fd0000000000000, 0x7fefffffffffffff, 0x7ff0000000000000,
        0x7ff0000000000001, 0x7ff8000000000000, 0x7fffffffffffffff};
    std::vector<double> values;
    for (u64 p : patterns) {
        values.push_back(double_of(p));
        values.push_back(double_of(p | 0x8000000000000000));
    }
    return values;
}

static u64 random_bits(void) {
    return (u64)((test_rand() + 1) * 2147483648.0) << 32
        ^ (u64)((test_rand() + 1) * 2147483648.0);
}

/* Returns random bits, or a value of moderate size if T is a floating-point type. */
template <class T> static T random_value(int i) {
    u64 b = random_bits();
    if constexpr (std::is_same<T, float>::value) {
        if (i % 2) return (float)(test_rand() * 100);
        return float_of((u32)b);
    } else if constexpr (std::is_same<T, double>::value) {
        if (i % 2) return test_rand() * 100;
        return double_of(b);
    } else if constexpr (std::is_same<T, bool>::value)
        return b & 1;
    else
        return (T)b;
}

template <class T> static u64 as_bits(T x) {
    if constexpr (std::is_same<T, float>::value)
        return bits(x);
    else if constexpr (std::is_same<T, double>::value)
        return bits(x);
    else
        return (u64)(typename std::make_unsigned<
                     typename std::conditional<std::is_same<T, bool>::value, u32, T>::type>::type)x;
}


// >>rows

enum nan_rule {
    ANY_NAN,    /* the ISA does not specify which NaN */
    EXACT       /* also NaNs are compared bit by bit */
};

enum presence {
    REQUIRED,
    OPTIONAL    /* nvcc does not emit it today: the interpreter may refuse it by its name */
};

struct row_case {
    u64 in[3];
    bool defined;
    u64 expected;
};

struct row_text {
    std::string form, body, op;
};

/* Builds the kernel of one form. Operands are "$d" and "$a" to "$c"; a form without
   operands gets all of them. */
static row_text row_program(const std::string &form, const char *d, const char *store,
                            const std::vector<const char *> &in,
                            const std::vector<const char *> &load) {
    static const char *const names[] = {"$a", "$b", "$c"};
    std::string op = form, body;
    if (form.find('$') == std::string::npos) {
        op += " $d";
        for (size_t i = 0; i < in.size(); i++) op += std::string(", ") + names[i];
    }
    op += ";\n";
    body =
        "    shr.u32 %r10, %r1, %r3;\n"
        "    and.b32 %r10, %r10, 1;\n"
        "    setp.eq.s32 %p31, %r10, 0;\n"
        "    @%p31 bra $L_end;\n"
        "    shl.b32 %r11, %r4, 5;\n"
        "    add.s32 %r11, %r11, %r2;\n"
        "    mul.wide.u32 %rd10, %r11, 24;\n"
        "    add.s64 %rd10, %rd2, %rd10;\n"
        "    mul.wide.u32 %rd11, %r11, 8;\n"
        "    add.s64 %rd11, %rd1, %rd11;\n";
    for (size_t i = 0; i < in.size(); i++) {
        std::string reg = in[i] + std::to_string(20 + i), at = std::to_string(8 * i);
        if (!strcmp(in[i], "%p"))
            body += "    ld.global.u32 %r12, [%rd10+" + at + "];\n    setp.ne.s32 " + reg
                + ", %r12, 0;\n";
        else
            body += std::string("    ") + load[i] + " " + reg + ", [%rd10+" + at + "];\n";
        op = replaced(op, names[i], reg);
    }
    std::string reg = std::string(d) + "30";
    op = replaced(op, "$d", reg);
    body += "    " + op;
    if (!strcmp(d, "%p"))
        body += "    selp.u32 %r13, 1, 0, " + reg + ";\n    st.global.u32 [%rd11], %r13;\n";
    else
        body += std::string("    ") + store + " [%rd11], " + reg + ";\n";
    return {form, body + "$L_end:\n", op};
}

/* Returns whether two results of `width` bytes are equal. */
static bool same_result(u64 got, u64 expected, char type, nan_rule rule) {
    if (rule == ANY_NAN && type == 'f' && float_of((u32)expected) != float_of((u32)expected))
        return float_of((u32)got) != float_of((u32)got);
    if (rule == ANY_NAN && type == 'g' && double_of(expected) != double_of(expected))
        return double_of(got) != double_of(got);
    return got == expected;
}

static void run_cases(const row_text &r, const std::vector<row_case> &cases, size_t width,
                      char type, nan_rule rule, presence p) {
    static const u32 masks[] = {0xffffffff, 0xa5f00f31};
    const size_t CHUNK = 2048;
    std::string text = ptx_program(r.body);
    if (p == OPTIONAL) {
        char error[512] = "";
        ptx_module *m = ptx_load(text.c_str(), text.size(), error, sizeof error);
        std::string name = r.form.substr(0, r.form.find(' '));
        CHECK(m || strstr(error, name.c_str()), "%s: %s", r.form.c_str(), error);
        if (!m) return;
        ptx_unload(m);
    }
    record_forms(r.op);
    test_module m(text);
    if (!m.kernel) return;
    test_memory memory;
    size_t wrong = 0, touched = 0, faults = 0;
    std::string first;
    for (u32 mask : masks)
        for (size_t from = 0; from < cases.size(); from += CHUNK) {
            size_t n = cases.size() - from < CHUNK ? cases.size() - from : CHUNK;
            size_t blocks = (n + 31) / 32;
            u64 *in = memory.in.as<u64>();
            memset(memory.out.data, 0xee, memory.out.bytes);
            for (size_t i = 0; i < blocks * 32; i++)
                memcpy(in + 3 * i, cases[from + (i < n ? i : 0)].in, 24);
            memory.n = mask;
            launch_shape s;
            s.grid = (unsigned)blocks;
            faults += memory.run(m, s);
            for (size_t i = 0; i < blocks * 32; i++) {
                const row_case &c = cases[from + (i < n ? i : 0)];
                u64 got = 0, rest = 0;
                memcpy(&got, memory.out.data + 8 * i, width);
                memcpy(&rest, memory.out.data + 8 * i + width, 8 - width);
                if (rest != (width < 8 ? 0xeeeeeeeeeeeeeeee >> 8 * width : 0)) touched++;
                if (!(mask >> i % 32 & 1)) {
                    if (got != 0xeeeeeeeeeeeeeeee >> (64 - 8 * width)) touched++;
                } else if (c.defined && !same_result(got, c.expected, type, rule) && wrong++ < 3) {
                    char line[200];
                    snprintf(line, sizeof line, "\n  (%llx, %llx, %llx): %llx, expected %llx",
                             (unsigned long long)c.in[0], (unsigned long long)c.in[1],
                             (unsigned long long)c.in[2], (unsigned long long)got,
                             (unsigned long long)c.expected);
                    first += line;
                }
            }
        }
    CHECK(wrong == 0, "%s: %zu of %zu results are wrong:%s", r.form.c_str(), wrong,
          2 * cases.size(), first.c_str());
    CHECK(touched == 0, "%s: %zu bytes of inactive lanes or neighbours", r.form.c_str(), touched);
    CHECK(faults == 0, "%s: %zu faults", r.form.c_str(), faults);
    print_faults(r.form.c_str());
}

template <class T> struct result_of {
    typedef T type;
    static bool defined(const T &) { return true; }
    static T value(const T &x) { return x; }
};

template <class T> struct result_of<std::optional<T>> {
    typedef T type;
    static bool defined(const std::optional<T> &x) { return x.has_value(); }
    static T value(const std::optional<T> &x) { return x.value_or(T()); }
};

template <class D, class... A>
static void run_row(const std::string &form, const std::function<D(A...)> &f, nan_rule rule,
                    presence p) {
    typedef typename result_of<D>::type R;
    std::vector<row_case> cases;
    auto add = [&](A... a) {
        D d = f(a...);
        u64 in[] = {as_bits(a)..., 0, 0, 0};
        u64 e = as_bits((R)result_of<D>::value(d));
        cases.push_back({{in[0], in[1], in[2]}, result_of<D>::defined(d), e});
    };
    if constexpr (sizeof...(A) == 0)
        add();
    else if constexpr (sizeof...(A) == 1) {
        for (auto a : edges<A...>()) add(a);
    } else {
        /* All pairs of edge cases for the first two operands, and for the second and
           third; all triples would take too long. */
        std::vector<std::vector<u64>> lists = {[] {
            std::vector<u64> l;
            for (auto x : edges<A>()) l.push_back(as_bits((A)x));
            return l;
        }()...};
        auto call = [&](const std::vector<u64> &x) {
            size_t i = sizeof...(A);
            std::tuple<A...> t{[&] {
                A a{};
                u64 b = x[sizeof...(A) - i--];
                if constexpr (std::is_same<A, bool>::value)
                    a = b != 0;
                else
                    memcpy(&a, &b, sizeof a);
                return a;
            }()...};
            std::apply(add, t);
        };
        size_t count = lists.size();
        for (size_t i = 0; i < lists[0].size(); i++)
            for (size_t k = 0; k < lists[1].size(); k++) {
                size_t third = count > 2 ? (7 * i + 13 * k) % lists[2].size() : 0;
                std::vector<u64> x = {lists[0][i], lists[1][k]};
                if (count > 2) x.push_back(lists[2][third]);
                call(x);
            }
        for (size_t k = 0; count > 2 && k < lists[1].size(); k++)
            for (size_t j = 0; j < lists[2].size(); j++)
                call({lists[0][(5 * k + 11 * j) % lists[0].size()], lists[1][k], lists[2][j]});
    }
    for (int i = 0; i < (sizeof...(A) ? 512 : 0); i++) add(random_value<A>(i)...);
    char type = std::is_same<R, float>::value ? 'f' : std::is_same<R, double>::value ? 'g' : 'i';
    run_cases(row_program(form, operand<R>::name, operand<R>::store, {operand<A>::name...},
                          {operand<A>::load...}),
              cases, std::is_same<R, bool>::value ? 4 : sizeof(R), type, rule, p);
}

/* Tests one form against its definition f. */
template <class F>
static void row(const std::string &form, F f, nan_rule rule = ANY_NAN, presence p = REQUIRED) {
    run_row(form, std::function(f), rule, p);
}

template <class F> static void optional_row(const std::string &form, F f) {
    row(form, f, ANY_NAN, OPTIONAL);
}


// >>integers

static void test_add_mul(void) {
    row("add.s16", [](u16 a, u16 b) -> u16 { return (u16)(a + b); });
    row("add.s32", [](u32 a, u32 b) -> u32 { return a + b; });
    row("add.s64", [](u64 a, u64 b) -> u64 { return a + b; });
    row("add.u64", [](u64 a, u64 b) -> u64 { return a + b; });
    row("sub.s16", [](u16 a, u16 b) -> u16 { return (u16)(a - b); });
    row("sub.s32", [](u32 a, u32 b) -> u32 { return a - b; });
    row("sub.s64", [](u64 a, u64 b) -> u64 { return a - b; });
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
    row("mul.wide.u16", [](u16 a, u16 b) -> u32 { return (u32)a * b; });
    row("mad.lo.s32", [](u32 a, u32 b, u32 c) -> u32 { return a * b + c; });
    row("mad.lo.s64", [](u64 a, u64 b, u64 c) -> u64 { return a * b + c; });
    optional_row("add.sat.s32", [](s32 a, s32 b) -> s32 {
        s64 s = (s64)a + b;
        return s > INT32_MAX ? INT32_MAX : s < INT32_MIN ? INT32_MIN : (s32)s;
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

/* Copies the `length` lowest bits of a into b at a position; both are taken modulo 256. */
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

static void test_float(void) {
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

/* The distance of a float from a real number, in units in the last place of that number. */
static double ulps(float a, double real) { return fabs(a - real) / ldexp(1, ilogb(real) - 23); }

/* Mode 0 is exactly rounded. Mode 1 deviates from it by at most `limit` units, for some
   inputs, and always by the same for one input. The rounding of mode 0 adds half a unit. */
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
        return a != a || a < 0 ? 0.0f : a > 1 ? 1.0f : a;
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


// >>addresses without memory

static void test_cvta(void) {
    row("cvta.to.global.u64", [](u64 a) -> u64 { return a; });
}

void test_arithmetic(int argc, char **argv) {
    static const test_part parts[] = {
        {"add_mul", test_add_mul},       {"divide", test_divide}, {"min_max", test_min_max},
        {"logic", test_logic},           {"shifts", test_shifts}, {"setp", test_setp},
        {"select", test_select},         {"immediates", test_immediates},
        {"mov", test_mov},               {"float", test_float},
        {"approximations", test_approximations},
        {"convert", test_convert},       {"cvta", test_cvta},
    };
    test_run(parts, sizeof parts / sizeof *parts, argc, argv);
}
