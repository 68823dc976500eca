#pragma once
#include "../core/loops.h"
#include "../core/platform.h"
#include "micro.h"
#include "x86.h"


// >>gemm: arm

#if defined(STX__NEON) && !defined(SEQTX_DOUBLE)

  #ifdef __clang__
    #define STX__SIMD "neon"
  #else
    #define STX__SIMD "simd"
  #endif

/* The NEON micro-kernel, 6 x 16: row i of the tile is s[i], four vectors. Together with
   four vectors of op(B), the tile takes 28 of the 32 registers. As in the AVX2 kernel,
   each pointer reaches three rows of op(A). */
STX_INNER void stx__neon_zero(size_t i, float32x4_t (*s)[4]) {
    s[i][0] = s[i][1] = s[i][2] = s[i][3] = vdupq_n_f32(0);
}

STX_INNER void stx__neon_step(size_t i, float32x4_t (*s)[4], const float *const *r, size_t rs,
                              const float32x4_t *b) {
    float a = r[i / 3][i % 3 * rs];
    s[i][0] = vfmaq_n_f32(s[i][0], b[0], a);
    s[i][1] = vfmaq_n_f32(s[i][1], b[1], a);
    s[i][2] = vfmaq_n_f32(s[i][2], b[2], a);
    s[i][3] = vfmaq_n_f32(s[i][3], b[3], a);
    /* without this statement, gcc loads all six elements of op(A) first and runs out of
       registers */
    if (i == 2) __asm__ volatile("" : : : "memory");
}

STX_INNER void stx__neon_add(size_t i, float32x4_t (*s)[4], const float *c, size_t ldc) {
    s[i][0] = vaddq_f32(vld1q_f32(c + i * ldc), s[i][0]);
    s[i][1] = vaddq_f32(vld1q_f32(c + i * ldc + 4), s[i][1]);
    s[i][2] = vaddq_f32(vld1q_f32(c + i * ldc + 8), s[i][2]);
    s[i][3] = vaddq_f32(vld1q_f32(c + i * ldc + 12), s[i][3]);
}

STX_INNER void stx__neon_store(size_t i, float32x4_t (*s)[4], float *c, size_t ldc) {
    vst1q_f32(c + i * ldc, s[i][0]);
    vst1q_f32(c + i * ldc + 4, s[i][1]);
    vst1q_f32(c + i * ldc + 8, s[i][2]);
    vst1q_f32(c + i * ldc + 12, s[i][3]);
}

STX_INNER void stx__micro_neon_rows(size_t n, size_t steps, const float *a, size_t rs, size_t ks,
                                    const float *b, size_t ldb, float *c, size_t ldc, int add) {
    const float *r[2];
    float32x4_t s[6][4];
    r[0] = a;
    r[1] = a + 3 * rs;
    STX__UNROLL6(n, stx__neon_zero, s);
    for (; steps; steps--, b += ldb, r[0] += ks, r[1] += ks) {
        float32x4_t v[4];
        v[0] = vld1q_f32(b);
        v[1] = vld1q_f32(b + 4);
        v[2] = vld1q_f32(b + 8);
        v[3] = vld1q_f32(b + 12);
        STX__UNROLL6(n, stx__neon_step, s, r, rs, v);
    }
    if (add) STX__UNROLL6(n, stx__neon_add, s, c, ldc);
    STX__UNROLL6(n, stx__neon_store, s, c, ldc);
}

STX__MICRO_RUN6(stx__micro_neon, STX__SIMD, float, float)

static const stx__micro stx__micro_neon =
    STX__MICRO("neon", 6, 16, 1, stx__micro_neon_run, NULL, NULL);

  /* The BFDOT micro-kernel, 6 x 16. The instruction adds the two products of a unit to
     each of four sums. The kernel uses inline assembly, because compilers provide the
     intrinsic only if the whole file may use the instruction. Like AVX512-BF16, BFDOT
     treats denormals as zero, but it rounds twice, to odd. The layout of a unit
     requires a little-endian processor. */
  #if !defined(__AARCH64EB__) && (defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 10)
    #define STX__HAS_BFDOT 1
    #define STX__BFDOT(sum, b, a) \
      __asm__("bfdot %0.4s, %1.8h, %2.2h[0]" : "+w"(sum) : "w"(b), "w"(a))

STX__INLINE_FOR("bf16")
void stx__bfdot_step(size_t i, float32x4_t (*s)[4], const uint16_t *const *r, size_t rs,
                     const uint32x4_t *b) {
    float a; /* the bits of a unit */
    memcpy(&a, r[i / 3] + i % 3 * rs, 4);
    STX__BFDOT(s[i][0], b[0], a);
    STX__BFDOT(s[i][1], b[1], a);
    STX__BFDOT(s[i][2], b[2], a);
    STX__BFDOT(s[i][3], b[3], a);
}

STX__INLINE_FOR("bf16")
void stx__micro_bfdot_rows(size_t n, size_t steps, const uint16_t *a, size_t rs, size_t ks,
                           const uint32_t *b, size_t ldb, float *c, size_t ldc, int add) {
    const uint16_t *r[2];
    float32x4_t s[6][4];
    r[0] = a;
    r[1] = a + 3 * rs;
    STX__UNROLL6(n, stx__neon_zero, s);
    for (; steps; steps--, b += ldb, r[0] += ks, r[1] += ks) {
        uint32x4_t v[4];
        v[0] = vld1q_u32(b);
        v[1] = vld1q_u32(b + 4);
        v[2] = vld1q_u32(b + 8);
        v[3] = vld1q_u32(b + 12);
        STX__UNROLL6(n, stx__bfdot_step, s, r, rs, v);
    }
    if (add) STX__UNROLL6(n, stx__neon_add, s, c, ldc);
    STX__UNROLL6(n, stx__neon_store, s, c, ldc);
}

STX__MICRO_RUN6(stx__micro_bfdot, "bf16", uint16_t, uint32_t)

static const stx__micro stx__micro_bfdot =
    STX__MICRO("neon bf16", 6, 16, 2, stx__micro_bfdot_run, stx__round_row_base,
               stx__pair_rows_base);

    #ifdef __linux__
      #include <sys/auxv.h>

/* AT_HWCAP2 is 26 and HWCAP2_BF16 is bit 14; older headers lack the names. */
static int stx__has_bfdot(void) {
    return (getauxval(26) >> 14 & 1) != 0;
}
    #elif defined(__APPLE__)
      #ifdef __cplusplus
extern "C" {
      #endif
/* In strict C mode, <sys/sysctl.h> does not declare sysctlbyname. */
extern int sysctlbyname(const char *, void *, size_t *, void *, size_t);
      #ifdef __cplusplus
}
      #endif
static int stx__has_bfdot(void) {
    int has = 0;
    size_t size = sizeof has;
    return !sysctlbyname("hw.optional.arm.FEAT_BF16", &has, &size, NULL, 0) && has;
}
    #else
static int stx__has_bfdot(void) {
    return 0;
}
    #endif
  #endif
#endif
