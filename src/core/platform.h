#pragma once
#include "../api/config.h"


// >>platform

#include <errno.h>
#include <float.h>
#include <limits.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if (defined(__unix__) || defined(__APPLE__)) && !defined(SEQTX_STDIO_FILES)
  #define STX__POSIX 1
  #include <dirent.h>
  #include <fcntl.h>
  #include <sys/mman.h>
  #include <sys/stat.h>
  #include <sys/types.h>
  #include <time.h>
  #include <unistd.h>
  #if defined(__STRICT_ANSI__) && !defined(__cplusplus) \
      && !(defined(__GLIBC__) && defined(__USE_XOPEN2K8))
/* These functions exist, but -std=c99 hides their declarations if a system header was
   included before this file. */
int fsync(int fd);
int fchmod(int fd, mode_t mode);
int fchown(int fd, uid_t owner, gid_t group);
ssize_t readlink(const char *path, char *buf, size_t n);
  #endif
  #if defined(__linux__)
    #define STX__HUGE ((size_t)2 << 20) /* size of a huge page */
    #if !defined(__cplusplus) && !defined(__USE_MISC)
int madvise(void *p, size_t n, int advice);
    #endif
  #endif
#elif defined(_WIN32)
  #include <fcntl.h>
  #include <io.h>
  #include <process.h>
  #include <sys/stat.h>
  #ifndef WIN32_LEAN_AND_MEAN
    #define WIN32_LEAN_AND_MEAN
  #endif
  #ifndef NOMINMAX
    #define NOMINMAX
  #endif
  #include <windows.h>
#endif

#if defined(SEQTX_NCCL) && !defined(SEQTX_CUDA)
  #error "SEQTX_NCCL requires SEQTX_CUDA"
#endif

#ifdef SEQTX_MPI
  #define OMPI_SKIP_MPICXX  1 /* omit Open MPI's old C++ interface */
  #define MPICH_SKIP_MPICXX 1
  #include <mpi.h>
  #ifndef _WIN32
    #include <sched.h>
    #include <unistd.h>
  #endif
#endif

#if !defined(SEQTX_NO_THREADS) && (defined(__GNUC__) || defined(__clang__)) \
    && (defined(__unix__) || defined(__APPLE__)) \
    && !(defined(__EMSCRIPTEN__) && !defined(__EMSCRIPTEN_PTHREADS__))
  #define STX__PTHREADS 1
  #include <pthread.h>
  #include <signal.h>
  #include <sys/select.h> /* sigset_t, which -std=c99 hides in signal.h */
  #include <sys/time.h>
  #include <time.h>
  #include <unistd.h>
  #if defined(__linux__)
    #include <sched.h>
    #include <sys/resource.h>
  #endif
  #if defined(__STRICT_ANSI__) && !defined(__cplusplus) && !defined(__APPLE__) \
      && !(defined(__GLIBC__) && defined(__USE_POSIX199506))
/* -std=c99 also hides these declarations. macOS does not hide them and has macros with
   these names. */
int sigfillset(sigset_t *set);
int sigdelset(sigset_t *set, int number);
int pthread_sigmask(int how, const sigset_t *set, sigset_t *old);
  #endif
#elif !defined(SEQTX_NO_THREADS) && defined(_WIN32)
  #define STX__WIN_THREADS 1
#endif

#ifdef SEQTX_CBLAS
  #ifdef __APPLE__
    /* Accelerate. Its header is not included, because its declarations depend on the
       macro ACCELERATE_NEW_LAPACK, which the program may have set differently. macOS
       13.3 added a newer CBLAS with different symbol names. SEQTX_CBLAS=2 selects the
       old names, which other BLAS libraries also use. */
    #ifdef SEQTX_DOUBLE
      #define STX__CBLAS_NAME "_cblas_dgemm"
    #else
      #define STX__CBLAS_NAME "_cblas_sgemm"
    #endif
    #if SEQTX_CBLAS + 0 != 2 && defined(__ENVIRONMENT_MAC_OS_X_VERSION_MIN_REQUIRED__) \
        && __ENVIRONMENT_MAC_OS_X_VERSION_MIN_REQUIRED__ >= 130300
      #define STX__CBLAS_SYMBOL STX__CBLAS_NAME "$NEWLAPACK"
    #else
      #define STX__CBLAS_SYMBOL STX__CBLAS_NAME
    #endif
    #ifdef __cplusplus
extern "C"
    #endif
void stx__cblas_gemm(int order, int ta, int tb, int m, int n, int k, stx_real alpha,
                     const stx_real *a, int lda, const stx_real *b, int ldb, stx_real beta,
                     stx_real *c, int ldc) __asm__(STX__CBLAS_SYMBOL);
    #define STX__CBLAS_ROWS     101
    #define STX__CBLAS_TRANS(t) ((t) ? 112 : 111)
  #else
    #include <cblas.h>
    #ifdef SEQTX_DOUBLE
      #define stx__cblas_gemm cblas_dgemm
    #else
      #define stx__cblas_gemm cblas_sgemm
    #endif
    #define STX__CBLAS_ROWS     CblasRowMajor
    #define STX__CBLAS_TRANS(t) ((t) ? CblasTrans : CblasNoTrans)
  #endif
#endif
