#pragma once


#ifndef _POSIX_C_SOURCE
#define _POSIX_C_SOURCE 200809L
#endif
#if defined(__APPLE__) && !defined(_DARWIN_C_SOURCE)
/* _POSIX_C_SOURCE alone hides _SC_PHYS_PAGES and TIOCGWINSZ on macOS. */
#define _DARWIN_C_SOURCE
#endif
#if defined(_WIN32) && !defined(_FILE_OFFSET_BITS)
#define _FILE_OFFSET_BITS 64    /* 64-bit off_t */
#endif

#include <errno.h>
#include <fcntl.h>
#include <float.h>
#include <inttypes.h>
#include <limits.h>
#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <time.h>
#ifndef _WIN32
#include <sys/ioctl.h>
#include <unistd.h>
#endif

#if defined(__GNUC__) || defined(__clang__)
#define TR_UNUSED __attribute__((unused))
#if defined(__MINGW32__) && !defined(__clang__)
#define TR_PRINTF(fmt, args) __attribute__((format(gnu_printf, fmt, args)))
#else
#define TR_PRINTF(fmt, args) __attribute__((format(printf, fmt, args)))
#endif
#else
#define TR_UNUSED
#define TR_PRINTF(fmt, args)
#endif
#define TR_DEF static TR_UNUSED
#ifdef _WIN32
#include "win.h"
#endif

#define TR_ERR 1024     /* size of an error buffer; long enough for a path */

/* Writes a message to err, which may be NULL. Always returns 0, so that callers can
   write `return tr_fail(...)`. */
TR_DEF TR_PRINTF(3, 4) int tr_fail(char *err, size_t size, const char *fmt, ...) {
    va_list args;
    if (err == NULL || size == 0) return 0;
    va_start(args, fmt);
    vsnprintf(err, size, fmt, args);
    va_end(args);
    return 0;
}
