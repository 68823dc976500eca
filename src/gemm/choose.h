#pragma once
#include "../api/config.h"
#include "../api/context.h"
#include "../api/cuda.h"
#include "../core/loops.h"
#include "../core/context.h"
#include "micro.h"
#include "x86.h"
#include "x86_bf16.h"
#include "arm.h"
#include "wasm.h"


// >>gemm: choice of the micro-kernel

/* Returns the micro-kernel that uses bfloat16 instructions, or NULL if this CPU has
   none. */
static const stx__micro *stx__bf16_instructions(int isa) {
    (void)isa;
#ifndef SEQTX_DOUBLE
  #ifdef STX__AMX
    if (isa == STX__ISA_AVX512 && stx__has_amx()) return &stx__micro_amx;
  #endif
  #ifdef STX__BF16
    if (isa == STX__ISA_AVX512 && __builtin_cpu_supports("avx512bf16"))
        return &stx__micro_avx512_bf16;
  #endif
  #ifdef STX__HAS_BFDOT
    if (stx__has_bfdot()) return &stx__micro_bfdot;
  #endif
#endif
    return NULL;
}

/* Returns the micro-kernel for a precision and an instruction set (STX__ISA_*). */
static const stx__micro *stx__choose_micro(int precision, int isa) {
    const stx__micro *native = stx__bf16_instructions(isa);
    (void)native;
    (void)precision;
#ifndef SEQTX_DOUBLE
    if (precision == STX_PREC_BF16) {
        if (native) return native;
  #ifdef STX__X86
        if (isa == STX__ISA_AVX512) return &stx__micro_generic_bf16_avx512;
        if (isa == STX__ISA_AVX2) return &stx__micro_generic_bf16_avx2;
  #endif
        return &stx__micro_generic_bf16;
    }
#endif
#ifdef STX__X86
    if (isa == STX__ISA_AVX512) return &stx__micro_avx512;
    if (isa == STX__ISA_AVX2) return &stx__micro_avx2;
#endif
#if defined(STX__NEON) && !defined(SEQTX_DOUBLE)
    return &stx__micro_neon;
#elif defined(STX__WASM)
    return &stx__micro_wasm;
#else
    return &stx__micro_generic;
#endif
}

STX_DEF int stx_cpu_has_bf16(void) {
    return stx__bf16_instructions(stx_isa(NULL)) != NULL;
}

STX_DEF const char *stx_backend(const stx_ctx *x) {
#ifdef SEQTX_CUDA
    if (x && x->gpu) return stx_cuda_name(x);
#endif
#ifdef SEQTX_CBLAS
    if (!x || x->desc.precision == STX_PREC_F32) return "cblas";
#endif
    return stx__micro_kernel(x)->name;
}
