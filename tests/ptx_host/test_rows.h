/* test_rows.h - rows of tests of instructions that compute a register from registers. A
   row names a form and gives its definition in C++. It is executed for all combinations
   of edge cases and for random operands, by full warps and by warps in which some lanes
   are inactive. Results are compared bit by bit; an unspecified NaN matches any NaN. */
#ifndef TEST_ROWS_H
#define TEST_ROWS_H
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
template <class T> std::vector<T> integers() {
    std::set<T> values;
    for (u64 x : integer_edges) values.insert((T)x);
    return std::vector<T>(values.begin(), values.end());
}

template <> inline std::vector<s16> edges() { return integers<s16>(); }
template <> inline std::vector<u16> edges() { return integers<u16>(); }
template <> inline std::vector<s32> edges() { return integers<s32>(); }
template <> inline std::vector<u32> edges() { return integers<u32>(); }
template <> inline std::vector<s64> edges() { return integers<s64>(); }
template <> inline std::vector<u64> edges() { return integers<u64>(); }
template <> inline std::vector<bool> edges() { return {false, true}; }

template <> inline std::vector<float> edges() {
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

template <> inline std::vector<double> edges() {
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

inline u64 random_bits(void) {
    return (u64)((test_rand() + 1) * 2147483648.0) << 32
        ^ (u64)((test_rand() + 1) * 2147483648.0);
}

/* Returns random bits, or a value of moderate size if T is a floating-point type. */
template <class T> T random_value(int i) {
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

template <class T> u64 as_bits(T x) {
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
inline row_text row_program(const std::string &form, const char *d, const char *store,
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
inline bool same_result(u64 got, u64 expected, char type, nan_rule rule) {
    if (rule == ANY_NAN && type == 'f' && float_of((u32)expected) != float_of((u32)expected))
        return float_of((u32)got) != float_of((u32)got);
    if (rule == ANY_NAN && type == 'g' && double_of(expected) != double_of(expected))
        return double_of(got) != double_of(got);
    return got == expected;
}

inline void run_cases(const row_text &r, const std::vector<row_case> &cases, size_t width,
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
void run_row(const std::string &form, const std::function<D(A...)> &f, nan_rule rule,
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
void row(const std::string &form, F f, nan_rule rule = ANY_NAN, presence p = REQUIRED) {
    run_row(form, std::function(f), rule, p);
}

template <class F> void optional_row(const std::string &form, F f) {
    row(form, f, ANY_NAN, OPTIONAL);
}
#endif
