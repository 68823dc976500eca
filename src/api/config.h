#pragma once


#include <stddef.h>
#include <stdint.h>

#define STX_VERSION_MAJOR 0
#define STX_VERSION_MINOR 2
#define STX_VERSION_PATCH 0
#define STX_VERSION       "0.2.0"
#define STX_VERSION_AT_LEAST(major, minor, patch) \
    (STX_VERSION_MAJOR * 1000000 + STX_VERSION_MINOR * 1000 + STX_VERSION_PATCH \
     >= (major) * 1000000 + (minor) * 1000 + (patch))

#ifdef SEQTX_STATIC
  #ifdef SEQTX_API
    #error "SEQTX_API and SEQTX_STATIC cannot be combined: a static build exports nothing"
  #endif
  #if defined(__GNUC__) || defined(__clang__)
    #define STX_DEF static __attribute__((unused))
  #else
    #define STX_DEF static
  #endif
#else
  #ifndef SEQTX_API
    #define SEQTX_API
  #endif
  #ifdef __cplusplus
    #define STX_DEF extern "C" SEQTX_API
  #else
    #define STX_DEF extern SEQTX_API
  #endif
#endif

#if defined(__MINGW32__) && defined(__GNUC__) && !defined(__clang__)
  #define STX_PRINTF(f, a) __attribute__((format(gnu_printf, f, a)))
#elif defined(__GNUC__) || defined(__clang__)
  #define STX_PRINTF(f, a) __attribute__((format(printf, f, a)))
#else
  #define STX_PRINTF(f, a)
#endif

#if defined(SEQTX_CUDA) && defined(SEQTX_DOUBLE)
  #error "SEQTX_CUDA and SEQTX_DOUBLE cannot be combined: the kernels of seqtx_cuda.cu are float"
#endif
#if defined(SEQTX_CUDA) && defined(SEQTX_STATIC)
  #error "SEQTX_CUDA and SEQTX_STATIC cannot be combined: seqtx_cuda.cu links with this file"
#endif

#ifdef SEQTX_DOUBLE
typedef double stx_real;
  #define stx_create stx_create_f64     /* prevents linking float files with double files */
#else
typedef float stx_real;
#endif
