/* test_mma.cpp - tests of mma.sync against the plain product of two matrices. The layouts
   of the fragments are those of the ISA: lane = 4 g + t, g of 0 .. 7 and t of 0 .. 3. */
#include "test_ptx.h"

struct position {
    int row, column;
};

/* One of the two forms. a, b and c return the place of element i of a lane's fragment. */
struct mma_form {
    const char *name;
    int k, a_count, b_count;    /* the inner dimension, elements of the fragments of a lane */
    bool bf16;
    position (*a)(int g, int t, int i), (*b)(int g, int t, int i);
};

static const mma_form BF16 = {
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", 16, 8, 4, true,
    [](int g, int t, int i) {
        return position{g + (i / 2 % 2 ? 8 : 0), 2 * t + i % 2 + (i >= 4 ? 8 : 0)};
    },
    [](int g, int t, int i) {
        return position{2 * t + i % 2 + (i >= 2 ? 8 : 0), g};
    }};

static const mma_form TF32 = {
    "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32", 8, 4, 2, false,
    [](int g, int t, int i) {
        return position{g + (i % 2 ? 8 : 0), t + (i >= 2 ? 4 : 0)};
    },
    [](int g, int t, int i) {
        return position{t + (i ? 4 : 0), g};
    }};

static position c_position(int g, int t, int i) {
    return {g + (i >= 2 ? 8 : 0), 2 * t + i % 2};
}

/* a (16, k), b (k, 8), c (16, 8); d = a b + c */
struct matrices {
    float a[16][16], b[16][8], c[16][8], d[16][8];
};

/* The kernel: each lane loads 4 registers of a, 2 of b and 4 of c, and stores 4 of d. */
static std::string mma_program(const mma_form &f, bool in_place) {
    std::string d = in_place ? "{%f10, %f11, %f12, %f13}" : "{%f20, %f21, %f22, %f23}";
    std::string op = std::string("    ") + f.name + " " + d
        + ", {%r10, %r11, %r12, %r13}, {%r20, %r21}, {%f10, %f11, %f12, %f13};\n";
    record_forms(op);
    return ptx_program(
        "    mul.wide.u32 %rd10, %r3, 64;\n"
        "    add.s64 %rd10, %rd2, %rd10;\n"
        "    mul.wide.u32 %rd11, %r3, 16;\n"
        "    add.s64 %rd11, %rd1, %rd11;\n"
        "    ld.global.v4.u32 {%r10, %r11, %r12, %r13}, [%rd10];\n"
        "    ld.global.v2.u32 {%r20, %r21}, [%rd10+16];\n"
        "    ld.global.v4.f32 {%f10, %f11, %f12, %f13}, [%rd10+32];\n" + op +
        "    st.global.v4.f32 [%rd11], " + d + ";\n");
}

/* Runs the form on m and sets m.d. `low_bits` are set in each tf32 operand. */
static void multiply(const mma_form &f, matrices &m, bool in_place, uint32_t low_bits = 0) {
    test_module module(mma_program(f, in_place));
    if (!module.kernel) return;
    test_memory memory;
    for (int l = 0; l < 32; l++) {
        int g = l / 4, t = l % 4;
        unsigned char *in = memory.in.data + 64 * l;
        for (int i = 0; i < f.a_count; i++) {
            position p = f.a(g, t, i);
            float x = m.a[p.row][p.column];
            uint16_t half = bf16_of(x);
            uint32_t word = bits(x) | low_bits;
            if (f.bf16)
                memcpy(in + 2 * i, &half, 2);
            else
                memcpy(in + 4 * i, &word, 4);
        }
        for (int i = 0; i < f.b_count; i++) {
            position p = f.b(g, t, i);
            float x = m.b[p.row][p.column];
            uint16_t half = bf16_of(x);
            uint32_t word = bits(x) | low_bits;
            if (f.bf16)
                memcpy(in + 16 + 2 * i, &half, 2);
            else
                memcpy(in + 16 + 4 * i, &word, 4);
        }
        for (int i = 0; i < 4; i++) {
            position p = c_position(g, t, i);
            memcpy(in + 32 + 4 * i, &m.c[p.row][p.column], 4);
        }
    }
    size_t faults = memory.run(module, {});
    CHECK(faults == 0, "%s: %zu faults", f.name, faults);
    print_faults(f.name);
    for (int l = 0; l < 32; l++)
        for (int i = 0; i < 4; i++) {
            position p = c_position(l / 4, l % 4, i);
            memcpy(&m.d[p.row][p.column], memory.out.data + 16 * l + 4 * i, 4);
        }
}

/* Fills m with values of f's type: small integers, or random values. */
static void fill(const mma_form &f, matrices &m, bool integers) {
    memset(&m, 0, sizeof m);
    auto value = [&](float scale) {
        float x = integers ? (float)(int)(test_rand() * 20) : (float)test_rand() * scale;
        return f.bf16 ? float_of_bf16(bf16_of(x)) : float_of(bits(x) & ~0x1fffu);
    };
    for (int i = 0; i < 16; i++)
        for (int k = 0; k < f.k; k++) m.a[i][k] = value(3);
    for (int k = 0; k < f.k; k++)
        for (int j = 0; j < 8; j++) m.b[k][j] = value(2);
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 8; j++)
            m.c[i][j] = integers ? (float)(int)(test_rand() * 1000) : (float)test_rand();
}

/* Returns element (i, j) of a b + c, and the sum of the magnitudes of its terms. */
static double exact(const mma_form &f, const matrices &m, int i, int j, double *size) {
    double sum = m.c[i][j];
    *size = fabs(sum);
    for (int k = 0; k < f.k; k++) {
        double product = (double)m.a[i][k] * m.b[k][j];
        sum += product;
        *size += fabs(product);
    }
    return sum;
}

static void integers_are_exact(const mma_form &f) {
    matrices m;
    for (int round = 0; round < 4; round++) {
        size_t wrong = 0;
        double size;
        fill(f, m, true);
        multiply(f, m, round % 2 == 0, round == 3 && !f.bf16 ? 0x1fff : 0);
        for (int i = 0; i < 16; i++)
            for (int j = 0; j < 8; j++)
                wrong += bits(m.d[i][j]) != bits((float)exact(f, m, i, j, &size))
                    && !(m.d[i][j] == 0 && exact(f, m, i, j, &size) == 0);
        CHECK(wrong == 0, "%s, round %d: %zu elements are wrong", f.name, round, wrong);
    }
}

/* One element of a and one of b are not zero, so that each product is seen alone. */
static void places_are_right(const mma_form &f) {
    matrices m;
    for (int i = 0; i < 16; i++)
        for (int k = 0; k < f.k; k++) {
            size_t wrong = 0;
            int j = (3 * i + 5 * k) % 8;
            memset(&m, 0, sizeof m);
            m.a[i][k] = 3;
            m.b[k][j] = 5;
            m.b[(k + 1) % f.k][j] = 7;
            multiply(f, m, false);
            for (int r = 0; r < 16; r++)
                for (int c = 0; c < 8; c++)
                    wrong += m.d[r][c] != (r == i && c == j ? 15.0f : 0.0f);
            CHECK(wrong == 0, "%s, a(%d,%d) b(%d,%d): %zu elements are wrong", f.name, i, k, k, j,
                  wrong);
        }
}

/* Mode 0 is accurate to the rounding of float; mode 1 truncates. */
static void rounding(const mma_form &f) {
    size_t differ = 0, far = 0, far_truncated = 0;
    for (int round = 0; round < 8; round++) {
        matrices m, truncated;
        fill(f, m, false);
        truncated = m;
        multiply(f, m, round % 2 == 0);
        ptx_approximate(1);
        multiply(f, truncated, round % 2 == 0);
        ptx_approximate(0);
        for (int i = 0; i < 16; i++)
            for (int j = 0; j < 8; j++) {
                double size, e = exact(f, m, i, j, &size);
                far += !(fabs(m.d[i][j] - e) <= size * f.k * 0x1p-24);
                far_truncated += !(fabs(truncated.d[i][j] - e) <= size * (f.k + 2) * 0x1p-23);
                differ += bits(m.d[i][j]) != bits(truncated.d[i][j]);
            }
    }
    CHECK(far == 0, "%s: %zu sums are inaccurate", f.name, far);
    CHECK(far_truncated == 0, "%s: %zu truncated sums are inaccurate", f.name, far_truncated);
    CHECK(differ > 50, "%s: only %zu sums differ between the modes", f.name, differ);
}

/* Infinities, NaNs and subnormal operands. */
static void special_values(const mma_form &f) {
    matrices m;
    memset(&m, 0, sizeof m);
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 8; j++) m.c[i][j] = 1;
    m.a[0][0] = HUGE_VALF;      /* row 0: inf * b(0,j) */
    m.a[1][1] = -HUGE_VALF;     /* row 1: -inf * b(1,j) */
    m.a[2][2] = NAN;            /* row 2 */
    m.a[3][3] = 0x1p-130f;      /* row 3: subnormal */
    m.a[4][4] = HUGE_VALF;      /* row 4: inf + -inf */
    m.a[4][5] = -HUGE_VALF;
    for (int j = 0; j < 8; j++) {
        m.b[0][j] = j == 0 ? 0.0f : 2.0f;
        m.b[1][j] = 3;
        m.b[2][j] = 1;
        m.b[3][j] = 0x1p127f;
        m.b[4][j] = m.b[5][j] = 1;
    }
    m.c[5][0] = HUGE_VALF;
    m.c[6][0] = NAN;
    multiply(f, m, false);
    for (int j = 0; j < 8; j++) {
        float x = m.d[0][j];
        CHECK(j == 0 ? x != x : x == HUGE_VALF, "%s: inf * b: %g", f.name, x);
        CHECK(m.d[1][j] == -HUGE_VALF, "%s: -inf * 3: %g", f.name, m.d[1][j]);
        CHECK(m.d[2][j] != m.d[2][j], "%s: NaN * 1: %g", f.name, m.d[2][j]);
        CHECK(m.d[3][j] == 1.125f, "%s: 2^-130 * 2^127 + 1: %g", f.name, m.d[3][j]);
        CHECK(m.d[4][j] != m.d[4][j], "%s: inf - inf: %g", f.name, m.d[4][j]);
        CHECK(m.d[7][j] == 1, "%s: an unaffected row: %g", f.name, m.d[7][j]);
    }
    CHECK(m.d[5][0] == HUGE_VALF && m.d[5][1] == 1, "%s: inf in c", f.name);
    CHECK(m.d[6][0] != m.d[6][0] && m.d[6][1] == 1, "%s: NaN in c", f.name);
}

static void test_bf16(void) {
    places_are_right(BF16);
    integers_are_exact(BF16);
    rounding(BF16);
    special_values(BF16);
}

static void test_tf32(void) {
    places_are_right(TF32);
    integers_are_exact(TF32);
    rounding(TF32);
    special_values(TF32);
}

void test_mma(int argc, char **argv) {
    static const test_part parts[] = {{"mma_bf16", test_bf16}, {"mma_tf32", test_tf32}};
    test_run(parts, sizeof parts / sizeof *parts, argc, argv);
}
