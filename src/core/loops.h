#pragma once
#include "../api/config.h"
#include "../api/context.h"


#include <float.h>
#include <math.h>
#include <string.h>


// >>loops

#if defined(__GNUC__) || defined(__clang__)
  #define STX_RESTRICT __restrict__
#elif defined(_MSC_VER)
  #define STX_RESTRICT __restrict
#else
  #define STX_RESTRICT
#endif

/* Options like -ffast-math let compilers reorder sums and assume that there are no
   infinities and no NaN. This library uses infinities as masks, detects failed runs by
   NaN, and computes e^v with sums in a fixed order. Between STX_STRICT_ON and
   STX_STRICT_OFF, compilers do not fuse a product and a sum unless the code says so
   (STX_FMA), and clang follows the C standard. gcc does not reorder sums in the functions
   of STX_EACH_ISA (see STX_VECTOR), but no pragma or attribute of gcc 12 restores
   comparisons with NaN, so -ffinite-math-only is an error there. stx__finite always
   works.

   STX__EXACT_SUMS is defined if (t + c) - c rounds t, which requires that sums are not
   reordered and that values are not kept in a wider format than float (x87). */
#if defined(FLT_EVAL_METHOD) && FLT_EVAL_METHOD == 0 && !defined(__FAST_MATH__) \
    && !defined(__ASSOCIATIVE_MATH__) && defined(__GNUC__) \
    && (!defined(__clang__) || defined(__x86_64__) || defined(__i386__))
  #define STX__EXACT_SUMS 1
#endif
#if defined(__clang__) && __clang_major__ >= 12 && (defined(__x86_64__) || defined(__i386__))
  #define STX_STRICT_ON \
      _Pragma("float_control(precise, on, push)") _Pragma("clang fp contract(off)")
  #define STX_STRICT_OFF _Pragma("float_control(pop)")
#else
  #if defined(__clang__)
    #define STX_STRICT_ON  _Pragma("STDC FP_CONTRACT OFF")
    #define STX_STRICT_OFF _Pragma("STDC FP_CONTRACT DEFAULT")
  #elif defined(__GNUC__)
    #define STX_STRICT_ON \
        _Pragma("GCC push_options") _Pragma("GCC optimize(\"fp-contract=off\")")
    #define STX_STRICT_OFF _Pragma("GCC pop_options")
  #else
    #define STX_STRICT_ON
    #define STX_STRICT_OFF
  #endif
  #if defined(__clang__) && __clang_major__ < 12
    #undef STX__EXACT_SUMS
  #endif
  #if (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__ + 0 > 0) \
      || (defined(__FAST_MATH__) && !defined(__FINITE_MATH_ONLY__))
    #error "seqtx does not work with -ffinite-math-only (-ffast-math): add -fno-finite-math-only"
  #endif
  #ifdef _M_FP_FAST
    #error "seqtx does not work with /fp:fast: compile its implementation with /fp:precise"
  #endif
#endif

/* Returns 0 for infinities and NaN. Tests the bits, so it is independent of compiler
   options. */
static inline int stx__finite(double v) {
    uint64_t bits;
    memcpy(&bits, &v, 8);
    return (bits >> 52 & 2047) != 2047;
}

/* The library computes in its own floating-point environment: it rounds to nearest and
   masks all exceptions. The caller's environment, including the status flags, is restored
   when a function returns. Results are therefore independent of the caller's rounding
   mode and of the thread, and the library never triggers floating-point traps. Loops also
   flush denormals to zero, because a denormal can cost a hundred cycles.

   A function that computes outside of loops begins with STX__FP_SCOPE; tests/core/fenv.sh
   finds functions that do not. STX__FP_PIN(v) prevents the compiler from moving the
   computation of a returned value past the end of the scope.

   stx__fp_enter enters the environment (flush = 1: with denormals flushed) and returns
   the previous one; stx__fp_leave restores it. */
#if (defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))) \
    || (defined(_MSC_VER) && defined(_M_X64))

  /* With optimisation, g++ 12 warns about its own header. */
  #if defined(__cplusplus) && defined(__GNUC__) && !defined(__clang__)
    #pragma GCC diagnostic push
    #pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
    #pragma GCC diagnostic ignored "-Wuninitialized"
  #endif
  #include <immintrin.h>
  #if defined(__cplusplus) && defined(__GNUC__) && !defined(__clang__)
    #pragma GCC diagnostic pop
  #endif

typedef unsigned stx__fp;   /* MXCSR, which includes the status flags */

static inline stx__fp stx__fp_enter(int flush) {
    stx__fp was = _mm_getcsr();
    _mm_setcsr(flush ? 0x9fc0u : 0x1f80u);  /* masks all exceptions; 0x9fc0 also sets FTZ
                                               and DAZ */
    return was;
}

static inline void stx__fp_leave(const stx__fp *was) {
    _mm_setcsr(*was);
}

#elif defined(__aarch64__) && (defined(__GNUC__) || defined(__clang__))

typedef struct stx__fp {
    uint64_t control, status;
} stx__fp;

static inline stx__fp stx__fp_enter(int flush) {
    stx__fp was;
    __asm__ volatile("mrs %0, fpcr" : "=r"(was.control) : : "memory");
    __asm__ volatile("mrs %0, fpsr" : "=r"(was.status));
    __asm__ volatile("msr fpcr, %0" : : "r"((uint64_t)(flush != 0) << 24) : "memory");
    return was;
}

static inline void stx__fp_leave(const stx__fp *was) {
    __asm__ volatile("msr fpcr, %0" : : "r"(was->control) : "memory");
    __asm__ volatile("msr fpsr, %0" : : "r"(was->status));
}

#else
  #include <fenv.h>

typedef fenv_t stx__fp;

static inline stx__fp stx__fp_enter(int flush) {
    stx__fp was;
    (void)flush;
    (void)fegetenv(&was);
    (void)fesetenv(FE_DFL_ENV);
    return was;
}

static inline void stx__fp_leave(const stx__fp *was) {
    (void)fesetenv(was);
}
#endif

#if defined(__GNUC__) || defined(__clang__)

static inline void stx__fp_end(stx__fp *was) {
    stx__fp_leave(was);
}

  #define STX__FP_SCOPE \
      stx__fp stx__fp_was __attribute__((cleanup(stx__fp_end), unused)) = stx__fp_enter(0)
  #define STX__FP_PIN(v) __asm__ volatile("" : "+m"(v) : : "memory")

#elif defined(__cplusplus)

struct stx__fp_scope {
    stx__fp was;

    stx__fp_scope() : was(stx__fp_enter(0)) {}

    ~stx__fp_scope() {
        stx__fp_leave(&was);
    }
};

  #define STX__FP_SCOPE  stx__fp_scope stx__fp_was
  #define STX__FP_PIN(v) (void)(v)

#else   /* C without cleanup attributes: only loops use the environment */

  #define STX__FP_SCOPE  (void)0
  #define STX__FP_PIN(v) (void)(v)

#endif

/* Inner loops are plain C in STX_INNER functions, which are compiled for each instruction
   set. STX_EACH_ISA(fn, (parameters), arguments) defines fn_base, fn_avx2 and fn_avx512,
   and STX_CALL(x, fn, (arguments)) calls the version for this processor. Neither -march
   nor -O3 is needed: gcc at -O2 vectorises only loops of known length, but STX_VECTOR
   enables vectorisation of all loops. The first argument of fn, `fma`, is added by
   STX_EACH_ISA. It is 1 if the processor has fused multiply-adds; see STX_FMA. Pointers
   that do not alias are marked with STX_RESTRICT in the parameters of STX_EACH_ISA. In
   an STX_LOOP, which gets its pointers from the job, they are marked in the parameters
   of an inlined function; see >>shares.

   Without -O, nothing is forced inline: this would only make compilation six times
   slower. */
#if (defined(__GNUC__) || defined(__clang__)) && defined(__OPTIMIZE__)
  #define STX_INNER static inline __attribute__((always_inline))
#else
  #define STX_INNER static inline
#endif
#if defined(__GNUC__) || defined(__clang__)
  #define STX__PREFETCHES
#endif

/* Prefetches n elements that will be read soon. */
STX_INNER void stx_prefetch(const stx_real *a, size_t n) {
#ifdef STX__PREFETCHES
    size_t i;
    for (i = 0; i < n; i += 64 / sizeof *a) __builtin_prefetch(a + i);
#else
    (void)a;
    (void)n;
#endif
}

#if defined(__GNUC__) && !defined(__clang__)
  #define STX_VECTOR \
      __attribute__((optimize("O2", "tree-vectorize", "vect-cost-model=dynamic", \
                              "no-unsafe-math-optimizations", "no-associative-math", \
                              "no-reciprocal-math", "no-finite-math-only", "signed-zeros")))
#else
  #define STX_VECTOR
#endif

enum { STX__ISA_BASE, STX__ISA_AVX2, STX__ISA_AVX512 };

/* All 64-bit ARM processors have NEON and fused multiply-adds. */
#if defined(__aarch64__) && (defined(__GNUC__) || defined(__clang__)) && !defined(_WIN32)
  #define STX__NEON 1
  #include <arm_neon.h>
#endif

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
  #define STX__X86 1
  #include <immintrin.h>
  #define STX__AVX2 __attribute__((target("avx2,fma")))
  #ifdef __clang__
    #define STX__AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")))
  #else
    #define STX__AVX512 \
        __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma," \
                              "prefer-vector-width=512")))
  #endif

  #if defined(_WIN32) && !defined(__clang__)

/* gcc spills vectors to the stack with aligned moves, but on Windows the stack is only
   aligned to 16 bytes (gcc bug 54412), so some runs would crash. With
   -Wa,-muse-unaligned-vector-move (binutils 2.38), the assembler makes all moves
   unaligned. This function returns 1 if this file was assembled with that option. It
   contains a move instruction that is never executed. The third byte of this instruction
   is 0x11 with the option and 0x29 without it. If the function returns 0, no vector
   code runs. */
STX_INNER int stx__moves_unaligned(void) {
    const unsigned char *code;
    __asm__("jmp .Lstx_after%=\n"
            ".Lstx_move%=:\n"
            "\tvmovaps {%%ymm0, (%%rax)|YMMWORD PTR [rax], ymm0}\n"
            ".Lstx_after%=:\n"
            "\tlea {.Lstx_move%=(%%rip), %0|%0, .Lstx_move%=[rip]}"
            : "=r"(code));
    return code[2] == 0x11;
}

    #define STX__VECTORS_SAFE stx__moves_unaligned()
  #else
    #define STX__VECTORS_SAFE 1
  #endif

  #define STX_EACH_ISA(fn, params, ...) \
      STX_VECTOR static void fn##_base params { \
          fn(0, __VA_ARGS__); \
      } \
      STX__AVX2 STX_VECTOR static void fn##_avx2 params { \
          fn(1, __VA_ARGS__); \
      } \
      STX__AVX512 STX_VECTOR static void fn##_avx512 params { \
          fn(1, __VA_ARGS__); \
      }
  #define STX_CALL(x, fn, args) \
      do { \
          switch (STX__VECTORS_SAFE ? stx_isa(x) : STX__ISA_BASE) { \
          case STX__ISA_AVX512: fn##_avx512 args; break; \
          case STX__ISA_AVX2: fn##_avx2 args; break; \
          default: fn##_base args; \
          } \
      } while (0)
#else
  #ifdef STX__NEON
    #define STX_EACH_ISA(fn, params, ...) \
        STX_VECTOR static void fn##_base params { \
            fn(1, __VA_ARGS__); \
        }
  #else
    #define STX_EACH_ISA(fn, params, ...) \
        STX_VECTOR static void fn##_base params { \
            fn(0, __VA_ARGS__); \
        }
  #endif
  #define STX_CALL(x, fn, args) \
      do { \
          (void)(x); \
          fn##_base args; \
      } while (0)
#endif

/* A parallel loop whose body is compiled for each instruction set. Define
       STX_INNER void fn(int fma, const stx_share *s, const void *job)
   which runs the iterations [s->begin, s->end). STX_LOOP(fn) then defines fn_run, a
   stx_part for stx_parallel. */
#define STX_LOOP(fn) \
    STX_EACH_ISA(fn, (const stx_share *s, const void *job), s, job) \
    static void fn##_run(const stx_share *s, const void *job) { \
        STX_CALL(s->x, fn, (s, job)); \
    }

/* a b + c. In f32 it is rounded once: by an instruction if fma is 1 or the compiler's
   target has one, otherwise by stx__fma, so that all processors compute the same bits. In
   double, it is rounded once only if fma is 1. */
#ifdef SEQTX_DOUBLE
  #if defined(__GNUC__) || defined(__clang__)
    #define STX_FMA(fma, a, b, c) ((fma) ? __builtin_fma(a, b, c) : (a) * (b) + (c))
  #else
    #define STX_FMA(fma, a, b, c) ((void)(fma), (a) * (b) + (c))
  #endif
#else

/* a b + c, rounded once. The product of two floats is exact in double. The sum is rounded
   to odd (Boldo and Melquiond 2008, "Emulation of FMA and correctly rounded sums"): if it
   is inexact, of the two neighbouring doubles the one whose last bit is 1. Rounding that
   to float is then correct, while a sum rounded to nearest could be rounded to the middle
   between two floats, and from there in the wrong direction. */
STX_INNER float stx__fma(float a, float b, float c) {
    const double p = (double)a * (double)b, s = p + (double)c, t = s - p;
    const double error = (p - (s - t)) + ((double)c - t);   /* p + c - s, exactly */
    uint64_t bits, error_bits, step;
    double odd;
    memcpy(&bits, &s, 8);
    memcpy(&error_bits, &error, 8);
    /* the neighbour in the direction of the error: away from 0 if the signs are equal */
    step = 1 - ((bits ^ error_bits) >> 63 << 1);
    step = fabs(error) > 0 ? step : 0;      /* exact, or error is NaN */
    bits += step & ((bits & 1) - 1);        /* only if the last bit is 0 */
    memcpy(&odd, &bits, 8);
    return (float)odd;
}

  #if defined(SEQTX_UNFUSED) && (defined(__GNUC__) || defined(__clang__))
    #define STX_FMA(fma, a, b, c) ((fma) ? __builtin_fmaf(a, b, c) : (a) * (b) + (c))
  #elif defined(SEQTX_UNFUSED)
    #define STX_FMA(fma, a, b, c) ((void)(fma), (a) * (b) + (c))
  #elif defined(__FP_FAST_FMAF)
    #define STX_FMA(fma, a, b, c) ((void)(fma), __builtin_fmaf(a, b, c))
  #elif defined(__GNUC__) || defined(__clang__)
    #define STX_FMA(fma, a, b, c) ((fma) ? __builtin_fmaf(a, b, c) : stx__fma(a, b, c))
  #else
    #define STX_FMA(fma, a, b, c) ((void)(fma), stx__fma(a, b, c))
  #endif
#endif
