#pragma once
#include "../api/config.h"
#include "../api/context.h"
#include "../api/ops.h"
#include "../core/loops.h"
#include "../core/platform.h"
#include "../core/context.h"


// >>gemm

/* Matrix multiplication, C = alpha op(A) op(B) + beta C with op(X) = X or X^T, after
   Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication" (2008).

   Letters used in all >>gemm sections
       M, N, K        C is (M,N), op(A) is (M,K), op(B) is (K,N)
       ta, tb         1 for op(A) = A^T and for op(B) = B^T
       lda, ldb, ldc  row strides of A, B and C in memory, in elements
       i, j, k        row of C, column of C, summation index
       MR, NR         rows and columns of C that a micro-kernel keeps in registers: a tile
       KR             k is padded to a multiple of KR in packed blocks: 1 in f32, 2 or 32
                      in bf16
       MC, KC, NC     capacity of a thread's scratch memory: MC KC units of op(A) and KC
                      NC units of op(B). A block with fewer than KC steps can have more
                      than NC columns: see stx__block_k and stx__block_n
       mc, kc, nc     size of the current block
       rs, ks         strides of a block of op(A), in elements of its type: the unit of
                      row i and step s is at a[i rs + s ks]
       unit           the data that a micro-kernel reads from each row of op(A) and each
                      column of op(B) in one step: one element or, in bf16, two elements
                      with adjacent k in 4 bytes. A unit has the size of stx_real, so
                      buffers of units are declared as stx_real *, in bf16 too
       step           one iteration of a micro-kernel, over one unit of k
       part           rows or columns of C that a thread computes at a time. A thread can
                      compute several parts

   The calls, down to the loops:

       stx__gemm_fused            the entry: stx_gemm and stx_linear_fwd call it
         stx__gemm_run            stx__gemm_plan_of chooses the path and the parts
           stx__gemm_parts        runs on every thread, for some of the parts
             stx__gemm_blocked    one part, by the loops below

   The loops of a part (stx__gemm_blocked):

       C = beta C, unless beta is 0
       for blocks of nc columns of C
           for blocks of kc
               pack op(B) (kc,nc) into strips of NR columns             stays in L3
               f32: multiply the packed op(B) by alpha
               for blocks of mc rows of C
                   pack op(A) (mc,kc), in a form listed below           stays in L2
                   for groups of strips of op(B)                        stay in L2
                       for strips of op(A)                              stays in L1
                           for strips of op(B) in the group
                               micro-kernel: one tile, in registers
                               bf16: multiply the tile by alpha
                               store the tile in C, or add it if beta is not 0 or this is
                               not the first block of k
                   epilogue, after the last block of k

   These cache levels apply to NR > 16. With a smaller NR, a group is a single strip of
   op(B), which stays in L1, and the block of op(A) stays in L2.

   Strips of op(B) are contiguous, so they are read in address order. A block of op(A)
   is stored in one of these forms:
       f32, A       in place, or copied if its rows collide in L1 (STX__L1_ALIAS)
       f32, A^T     strips (k,MR)
       bf16, A      rounded rows (m,k)
       bf16, A^T    rows of units (k/2,m) or, with KR = 32, pieces of 32 rows of 16 units

   C is split among the threads by rows, or by columns if C has more columns than rows.
   SKINNY and packed weights are always split by columns, and a batch only into its
   matrices. Column splits of blocked matmuls are at multiples of NR, so only the last
   strip of C is padded. The bits of C depend on this, because AMX adds up a padded strip
   in another order. Rows can be split anywhere, because a row is computed in the same way
   in a tile of any height. K is split identically for all parts. Therefore, the order of
   every sum, and hence every bit of C, depends only on what stx__gemm_plan_of lists, not
   on the number of threads.

   With bf16 (STX_PREC_BF16), operands are rounded while they are packed; sums and C are
   float. Matmuls of at most STX__GEMV_ROWS rows stay in f32.

   Packed operands are copies that every call writes to scratch memory. Packed weights,
   in contrast, are the bf16 or int8 copies made by stx_params_pack. GEMV reads packed
   weights in place.

   The above describes the general path, STX__GEMM_BLOCKED. There are other paths for
   few rows, for few columns, and for an op(B) that several parts share: see
   stx__gemm_path.

   The code is in this order: definition, micro-kernel interface, portable
   micro-kernels, packing, blocked matmul, matrix-vector kernels, transposed matmul,
   paths and plan, driver, instruction sets. >>loops explains the macros STX_EACH_ISA and
   STX_CALL and the parameter `fma`. */

/* The definition of the result, which the rest of the section computes faster. For
   matrix e of the batch,
       C[i][j] = alpha stx_gemm_plain(g, e, i, j) + beta C[i][j] */
STX_DEF double stx_gemm_plain(const stx_gemm_args *g, size_t e, size_t i, size_t j) {
    STX__FP_SCOPE;
    /* with sc = 0, all matmuls of the batch are summed in one C */
    size_t k, last = g->batch > 1 && !g->sc ? g->batch - 1 : e;
    double s = 0;
    for (; e <= last; e++) {
        const stx_real *A = g->A + e * g->sa;
        const stx_real *B = g->B + e * g->sb;
        for (k = 0; k < g->K; k++)
            s += (double)A[g->ta ? k * g->lda + i : i * g->lda + k]
                 * (double)B[g->tb ? j * g->ldb + k : k * g->ldb + j];
    }
    STX__FP_PIN(s);
    return s;
}

STX_DEF stx_gemm_args stx_gemm_init(int ta, int tb, size_t M, size_t N, size_t K, const stx_real *A,
                                    const stx_real *B, stx_real *C) {
    stx_gemm_args g;
    g.batch = 1;
    g.M = M;
    g.N = N;
    g.K = K;
    g.ta = ta;
    g.tb = tb;
    g.alpha = 1;
    g.beta = 0;
    g.A = A;
    g.B = B;
    g.C = C;
    g.lda = ta ? M : K;
    g.ldb = tb ? K : N;
    g.ldc = N;
    g.sa = M * K;
    g.sb = K * N;
    g.sc = M * N;
    return g;
}

/* Parameters of a micro-kernel. A call computes one tile, C (h,NR) = op(A) op(B), or
   C += op(A) op(B) if `add` is set, with 1 <= h <= MR.
       steps   number of steps, each over one unit of k
       av      op(A): the unit of row i and step s is at av[i rs + s ks]. With KR = 32
               and A^T, this is only true for s % 16 = 0; the 16 units that begin at such
               a step are contiguous. AMX reads a multiple of 16 rows: the rows after h
               must be readable, but can have any contents
       bv      op(B): the NR units of step s begin at unit s ldb. Here, ldb is the stride
               of the steps: NR if op(B) is packed in strips */
#define STX__MICRO_PARAMS \
  size_t h, size_t steps, const void *av, size_t rs, size_t ks, const void *bv, size_t ldb, \
      stx_real *c, size_t ldc, int add

/* A micro-kernel and related functions for the same instruction set. The functions
   after `run` are NULL if they are not needed or if the portable version is used. */
typedef struct stx__micro {
    const char *name;   /* the name that stx_backend returns */
    size_t mr, nr, kr;  /* MR <= STX__MR_MAX, NR <= STX__NR_MAX, KR */
    void (*run)(STX__MICRO_PARAMS);

    /* bf16: to_bf16 rounds n elements; pair rounds two rows to n units. If r1 is NULL,
       the second row is zero */
    void (*to_bf16)(uint16_t *to, const stx_real *from, size_t n);
    void (*pair)(uint32_t *to, const stx_real *r0, const stx_real *r1, size_t n);

    /* called before and after the micro-kernels of a part; NULL except for AMX */
    void (*enter)(void);
    void (*leave)(void);

    /* faster versions of stx__transpose, stx__pack_at (stx__pack_at_tiles if KR is 32)
       and stx__pack_strips. pack_strips also pads columns to NR and k to a whole unit */
    void (*transpose)(stx_real *to, const stx_real *B, size_t ldb, size_t n, size_t k);
    void (*pack_at)(stx_real *to, const stx_real *A, size_t lda, size_t m, size_t k);
    void (*pack_strips)(stx_real *to, size_t stride, const stx_real *B, size_t ldb, size_t k,
                        size_t n);

    /* runs the path STX__GEMM_SKINNY. NULL: stx__skinny_dots runs it in f32; in bf16, it
       is not used */
    void (*skinny)(const stx_gemm_args *g, stx_real *scratch);
} stx__micro;

enum { STX__MR_MAX = 32, STX__NR_MAX = 32 };

/* Initialises a micro-kernel without the optional functions. */
#define STX__MICRO(name, mr, nr, kr, run, to_bf16, pair) \
  {name, mr, nr, kr, run, to_bf16, pair, NULL, NULL, NULL, NULL, NULL, NULL}

/* Calls f(i, ..) for i = 0 .. n-1, where n is a constant. The calls are written out,
   and f is always inlined, so that a tile indexed by i stays in registers even at -O1.
   For example, STX__UNROLL6(2, f, s, b) is equivalent to f(0, s, b); f(1, s, b); */
#define STX__UNROLL6(n, f, ...) \
  do { \
    f(0, __VA_ARGS__); \
    if ((n) > 1) f(1, __VA_ARGS__); \
    if ((n) > 2) f(2, __VA_ARGS__); \
    if ((n) > 3) f(3, __VA_ARGS__); \
    if ((n) > 4) f(4, __VA_ARGS__); \
    if ((n) > 5) f(5, __VA_ARGS__); \
  } while (0)
#define STX__UNROLL8(n, f, ...) \
  do { \
    STX__UNROLL6(n, f, __VA_ARGS__); \
    if ((n) > 6) f(6, __VA_ARGS__); \
    if ((n) > 7) f(7, __VA_ARGS__); \
  } while (0)
#define STX__UNROLL14(n, f, ...) \
  do { \
    STX__UNROLL8(n, f, __VA_ARGS__); \
    if ((n) > 8) f(8, __VA_ARGS__); \
    if ((n) > 9) f(9, __VA_ARGS__); \
    if ((n) > 10) f(10, __VA_ARGS__); \
    if ((n) > 11) f(11, __VA_ARGS__); \
    if ((n) > 12) f(12, __VA_ARGS__); \
    if ((n) > 13) f(13, __VA_ARGS__); \
  } while (0)

/* Portable micro-kernel, 4 x 8. If h < 4, the missing rows repeat row 0, so a tile costs
   the same for every h; matmuls with few rows use stx__gemv instead. */
STX_INNER void stx__micro_plain(int fma, STX__MICRO_PARAMS) {
    const stx_real *STX_RESTRICT b = (const stx_real *)bv;
    const stx_real *STX_RESTRICT r0 = (const stx_real *)av;
    const stx_real *STX_RESTRICT r1 = r0 + (h > 1 ? rs : 0);
    const stx_real *STX_RESTRICT r2 = r0 + (h > 2 ? 2 * rs : 0);
    const stx_real *STX_RESTRICT r3 = r0 + (h > 3 ? 3 * rs : 0);
    stx_real s[4][8] = {{0}};
    size_t k, i, j;
    for (k = 0; k < steps; k++, r0 += ks, r1 += ks, r2 += ks, r3 += ks, b += ldb) {
        const stx_real a0 = *r0, a1 = *r1, a2 = *r2, a3 = *r3;
        for (j = 0; j < 8; j++) {
            s[0][j] = STX_FMA(fma, a0, b[j], s[0][j]);
            s[1][j] = STX_FMA(fma, a1, b[j], s[1][j]);
            s[2][j] = STX_FMA(fma, a2, b[j], s[2][j]);
            s[3][j] = STX_FMA(fma, a3, b[j], s[3][j]);
        }
    }
    for (i = 0; i < h; i++)
        for (j = 0; j < 8; j++) c[i * ldc + j] = add ? c[i * ldc + j] + s[i][j] : s[i][j];
}

#if defined(STX__X86) && !defined(SEQTX_DOUBLE)
STX_VECTOR static void stx__micro_plain_base(STX__MICRO_PARAMS) {
    stx__micro_plain(0, h, steps, av, rs, ks, bv, ldb, c, ldc, add);
}
#else
STX_EACH_ISA(stx__micro_plain, (STX__MICRO_PARAMS), h, steps, av, rs, ks, bv, ldb, c, ldc, add)
#endif

static const stx__micro stx__micro_generic =
    STX__MICRO("portable", 4, 8, 1, stx__micro_plain_base, NULL, NULL);

/* Returns v as bf16, the upper half of a float. Rounds to nearest even; NaN stays NaN. */
STX_INNER uint32_t stx__bf16(stx_real v) {
    float f = (float)v;
    uint32_t b;
    memcpy(&b, &f, 4);
    return (b & 0x7fffffffu) > 0x7f800000u ? b >> 16 | 0x40u : (b + 0x7fffu + (b >> 16 & 1u)) >> 16;
}

/* Returns the float with the given bits. */
STX_INNER stx_real stx__float_of_bits(uint32_t bits) {
    float f;
    memcpy(&f, &bits, 4);
    return (stx_real)f;
}

STX_INNER stx_real stx__from_bf16(uint16_t v) {
    return stx__float_of_bits((uint32_t)v << 16);
}

/* Interleaves two bf16 rows of adjacent k into a row of units. Used in >>attention. */
STX_INNER void stx__zip_rows(int fma, uint32_t *STX_RESTRICT to, const uint16_t *STX_RESTRICT r0,
                             const uint16_t *STX_RESTRICT r1, size_t n) {
    size_t i;
    (void)fma;
    for (i = 0; i < n; i++) to[i] = r0[i] | (uint32_t)r1[i] << 16;
}

STX_EACH_ISA(stx__zip_rows, (uint32_t * to, const uint16_t *r0, const uint16_t *r1, size_t n), to,
             r0, r1, n)

#ifndef SEQTX_DOUBLE

/* The portable versions of stx__micro.to_bf16 and stx__micro.pair. */
STX_INNER void stx__round_row(int fma, uint16_t *STX_RESTRICT to, const stx_real *STX_RESTRICT from,
                              size_t n) {
    size_t i;
    (void)fma;
    for (i = 0; i < n; i++) to[i] = (uint16_t)stx__bf16(from[i]);
}

STX_EACH_ISA(stx__round_row, (uint16_t * to, const stx_real *from, size_t n), to, from, n)

STX_INNER void stx__pair_rows(int fma, uint32_t *STX_RESTRICT to, const stx_real *STX_RESTRICT r0,
                              const stx_real *STX_RESTRICT r1, size_t n) {
    size_t i;
    (void)fma;
    if (!r1)
        for (i = 0; i < n; i++) to[i] = stx__bf16(r0[i]);
    else
        for (i = 0; i < n; i++) to[i] = stx__bf16(r0[i]) | stx__bf16(r1[i]) << 16;
}

STX_EACH_ISA(stx__pair_rows, (uint32_t * to, const stx_real *r0, const stx_real *r1, size_t n), to,
             r0, r1, n)

/* a b + c for bf16 values a and b. Their product is exact in float, so the sum is rounded
   once without stx__fma, too. */
STX_INNER stx_real stx__fma_bf16(int fma, stx_real a, stx_real b, stx_real c) {
#ifdef __FP_FAST_FMAF
    fma = 1;
#endif
    return fma ? STX_FMA(1, a, b, c) : a * b + c;
}

/* Portable bf16 micro-kernel, 4 x 16. Splits each unit into two floats and computes
   with floats. The results equal those of bf16 instructions, except for the order and
   rounding of sums and for denormals. This kernel is slower than the f32 kernel; it
   exists so that bf16 has the same meaning on every machine. */
STX_INNER void stx__micro_pairs(int fma, STX__MICRO_PARAMS) {
    stx_real s[4][16];
    size_t k, i, j;
    for (i = 0; i < 4; i++)
        for (j = 0; j < 16; j++) s[i][j] = 0;

    for (k = 0; k < steps; k++) {
        const uint32_t *b = (const uint32_t *)bv + k * ldb;
        for (i = 0; i < 4; i++) {
            const uint16_t *row = (const uint16_t *)av + (i < h ? i : h - 1) * rs;
            uint32_t a;
            stx_real lo, hi;
            memcpy(&a, row + k * ks, 4);
            lo = stx__float_of_bits(a << 16);
            hi = stx__float_of_bits(a & 0xffff0000u);
            for (j = 0; j < 16; j++)
                s[i][j] =
                    stx__fma_bf16(fma, hi, stx__float_of_bits(b[j] & 0xffff0000u),
                                  stx__fma_bf16(fma, lo, stx__float_of_bits(b[j] << 16), s[i][j]));
        }
    }
    for (i = 0; i < h; i++)
        for (j = 0; j < 16; j++) c[i * ldc + j] = add ? c[i * ldc + j] + s[i][j] : s[i][j];
}

STX_EACH_ISA(stx__micro_pairs, (STX__MICRO_PARAMS), h, steps, av, rs, ks, bv, ldb, c, ldc, add)

static const stx__micro stx__micro_generic_bf16 =
    STX__MICRO("portable, bf16 by float", 4, 16, 2, stx__micro_pairs_base, stx__round_row_base,
               stx__pair_rows_base);

#endif

/* Returns the micro-kernel that stx_create selected for a context. Without a context,
   returns the portable one. */
static const stx__micro *stx__micro_kernel(const stx_ctx *x) {
    return x ? x->micro : &stx__micro_generic;
}
