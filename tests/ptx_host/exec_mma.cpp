/* exec_mma.cpp - matrix multiplication by warps, and ldmatrix. The fragments are those of
   the PTX ISA. A warp computes D (16,8) = A (16,K) B (K,8) + C (16,8). A lane is number
   4 * g + t, and holds:

     C, D                 register r: row g + 8 * (r / 2), column 2 t + r % 2
     16 bits, K 8 or 16   A register r: row g + 8 * (r % 2), columns 2 t + 8 * (r / 2) ..
                          B register r: rows 2 t + 8 r .., column g; each two elements
     tf32, K 4 or 8       A register r: row g + 8 * (r % 2), column t + 4 * (r / 2)
                          B register r: row t + 4 r, column g */
#include "access.h"

namespace ptx {

// >>mma

enum { ROWS = 16, COLUMNS = 8, MAX_DEPTH = 16 };

struct matrices {
    double a[ROWS][MAX_DEPTH], b[MAX_DEPTH][COLUMNS], c[ROWS][COLUMNS];
};

/* The 32 words of a register hold 8 rows of 8 elements of 16 bits, one after another. */
static double element16(const uint32_t *words, int n, type t) {
    uint16_t bits = (uint16_t)(words[n / 2] >> (16 * (n % 2)));
    return (double)(t == BF16 ? to_float(bfloat{bits}) : to_float(half{bits}));
}

static void gather16(machine &m, const operand *a, const operand *b, int depth, type t,
                     matrices &x) {
    for (int r = 0; r < depth / 4; r++) {
        const uint32_t *words = row32(m, a[r]);
        for (int g = 0; g < 8; g++)
            for (int e = 0; e < 8; e++)
                x.a[g + 8 * (r % 2)][e + 8 * (r / 2)] = element16(words, 8 * g + e, t);
    }
    for (int r = 0; r < depth / 8; r++) {
        const uint32_t *words = row32(m, b[r]);
        for (int g = 0; g < 8; g++)
            for (int e = 0; e < 8; e++) x.b[e + 8 * r][g] = element16(words, 8 * g + e, t);
    }
}

/* The hardware ignores the lower 13 bits of a tf32 operand. */
static double element_tf32(uint32_t word) { return (double)bits_to_float(word & 0xffffe000u); }

static void gather_tf32(machine &m, const operand *a, const operand *b, int depth, matrices &x) {
    for (int r = 0; r < depth / 2; r++) {
        const uint32_t *words = row32(m, a[r]);
        for (int lane = 0; lane < LANES; lane++)
            x.a[lane / 4 + 8 * (r % 2)][lane % 4 + 4 * (r / 2)] = element_tf32(words[lane]);
    }
    for (int r = 0; r < depth / 4; r++) {
        const uint32_t *words = row32(m, b[r]);
        for (int lane = 0; lane < LANES; lane++)
            x.b[lane % 4 + 4 * r][lane / 4] = element_tf32(words[lane]);
    }
}

/* C += A B. The elements of a row of C are summed side by side, each in order of k. */
static void multiply(matrices &x, int depth) {
    for (int row = 0; row < ROWS; row++) {
        double sum[COLUMNS];
        memcpy(sum, x.c[row], sizeof sum);
        for (int k = 0; k < depth; k++)
            for (int column = 0; column < COLUMNS; column++)
                sum[column] += x.a[row][k] * x.b[k][column];
        memcpy(x.c[row], sum, sizeof sum);
    }
}

/* Rounds a sum to float: to nearest, or towards zero as the hardware's adders cut off. */
static float rounded_sum(double sum, bool cuts_off) {
    float f = (float)sum;
    if (cuts_off && isfinite(f) && fabs((double)f) > fabs(sum))
        f = bits_to_float(float_bits(f) - 1);
    return f == f ? f : bits_to_float(0x7fffffff);
}

static double &c_element(matrices &x, int lane, int r) {
    return x.c[lane / 4 + 8 * (r / 2)][2 * (lane % 4) + r % 2];
}

/* mma {d0..d3}, {a..}, {b..}, {c0..c3}; count holds the depth K. */
static void mma(machine &m, const instruction &i, uint32_t) {
    const form &f = *i.form;
    const int depth = f.count, a_count = f.from == TF32 ? depth / 2 : depth / 4;
    const operand *a = i.o + 4, *b = a + a_count, *c = b + a_count / 2;
    const bool cuts_off = approximate();
    matrices x;
    if (f.from == TF32) gather_tf32(m, a, b, depth, x);
    else gather16(m, a, b, depth, f.from, x);

    for (int r = 0; r < 4; r++) {
        const uint32_t *words = row32(m, c[r]);
        for (int lane = 0; lane < LANES; lane++)
            c_element(x, lane, r) = (double)bits_to_float(words[lane]);
    }
    multiply(x, depth);
    for (int r = 0; r < 4; r++) {
        uint32_t *words = row32(m, i.o[r]);
        for (int lane = 0; lane < LANES; lane++)
            words[lane] = float_bits(rounded_sum(c_element(x, lane, r), cuts_off));
    }
}

/* mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 and the like. */
bool decode_mma(opcode &o, form &f) {
    struct shape_row {
        const char *shape;
        uint8_t depth;
        bool tf32;
        const char *operands;
    };
    static const shape_row rows[] = {
        {"m16n8k16", 16, false, "{WWWW}{wwww}{ww}{wwww}"},
        {"m16n8k8",  8,  false, "{WWWW}{ww}{w}{wwww}"},
        {"m16n8k8",  8,  true,  "{WWWW}{wwww}{ww}{wwww}"},
        {"m16n8k4",  4,  true,  "{WWWW}{ww}{w}{wwww}"}};

    bool prefix = o.take("sync") && o.take("aligned") && o.take("row") && o.take("col");
    f.to = o.take_type();
    f.from = o.take_type();
    type b = o.take_type(), c = o.take_type();
    if (!prefix || f.to != F32 || c != F32 || f.from != b) return false;
    if (f.from != BF16 && f.from != F16 && f.from != TF32) return false;
    f.counter = IN_MMA;
    f.control = ALIGNED;
    for (auto &r : rows) {
        if (r.tf32 != (f.from == TF32) || !o.take(r.shape)) continue;
        f.count = r.depth;
        f.operands = r.operands;
        f.run = mma;
        return true;
    }
    return false;
}


// >>ldmatrix

/* Matrix k of 8 rows of 16 bytes. Lane 8 k + r holds the address of row r; register k of
   a lane gets elements 2 t and 2 t + 1 of row g, or with .trans of column g. */
static void ldmatrix(machine &m, const instruction &i, uint32_t) {
    const form &f = *i.form;
    int rows = 8 * f.count;
    uint32_t reading = rows == LANES ? ALL_LANES : (1u << rows) - 1;
    uint64_t address[LANES];
    uint16_t element[LANES][8];
    const operand *o = i.o + f.count;
    for (int l = 0; l < LANES; l++) address[l] = lane_value(m, o[0], l) + (uint64_t)(int32_t)o[1];
    if (o[0] & IS_WIDE)
        for (uint64_t &a : address) a &= ~WINDOW_MASK;

    m.count.shared_loads++;
    count_shared(m, i, address, reading, sizeof element[0]);
    for (int l : lanes{reading}) {
        range r;
        if (!locate_shared(m, i, {l, 1}, address[l], sizeof element[0], &r)) return;
        r.collective = true;
        note_read(m, i, r);
        memcpy(element[l], r.bytes, sizeof element[0]);
    }
    for (int k = 0; k < f.count; k++) {
        uint32_t *d = row32(m, i.o[k]);
        for (int l = 0; l < LANES; l++) {
            int g = l / 4, t = l % 4;
            const uint16_t (*matrix)[8] = element + 8 * k;
            uint16_t low = f.variant ? matrix[2 * t][g] : matrix[g][2 * t];
            uint16_t high = f.variant ? matrix[2 * t + 1][g] : matrix[g][2 * t + 1];
            d[l] = (uint32_t)high << 16 | low;
        }
    }
}

bool decode_ldmatrix(opcode &o, form &f) {
    bool prefix = o.take("sync") && o.take("aligned") && o.take("m8n8");
    f.count = 0;
    if (o.take("x1")) f.count = 1;
    if (o.take("x2")) f.count = 2;
    if (o.take("x4")) f.count = 4;
    f.variant = o.take("trans");
    f.space = o.take_space();
    f.to = o.take_type();
    f.control = ALIGNED;
    f.counter = IN_MEMORY;
    static const char *operands[] = {"", "{W}m", "{WW}m", "", "{WWWW}m"};
    f.operands = operands[f.count];
    f.run = ldmatrix;
    return prefix && f.count && f.to == B16 && (f.space == SHARED || f.space == GENERIC);
}

} // namespace ptx
