#pragma once
#include "base.h"


// >>formats: human-readable numbers. Each function returns `out`

#define TR_TEXT_MAX 32

/* Writes a duration: 4.2s  42s  3m12s  2h05m  3d04h */
TR_DEF const char *tr_duration(char out[TR_TEXT_MAX], double seconds) {
    uint64_t s;
    if (!(seconds >= 0) || seconds > 8.64e9) {
        strcpy(out, "?");
        return out;
    }
    s = (uint64_t)(seconds + 0.5);
    if (seconds < 9.95)
        snprintf(out, TR_TEXT_MAX, "%.1fs", seconds);
    else if (s < 60)
        snprintf(out, TR_TEXT_MAX, "%" PRIu64 "s", s);
    else if (s < 3600)
        snprintf(out, TR_TEXT_MAX, "%" PRIu64 "m%02" PRIu64 "s", s / 60, s % 60);
    else if (s < 86400)
        snprintf(out, TR_TEXT_MAX, "%" PRIu64 "h%02" PRIu64 "m", s / 3600, s / 60 % 60);
    else
        snprintf(out, TR_TEXT_MAX, "%" PRIu64 "d%02" PRIu64 "h", s / 86400, s / 3600 % 24);
    return out;
}

/* Writes x divided by base^k, followed by suffix[k]. If k is 0, x is rounded to a whole
   number. The result 999.96k is written as 1.0M instead of 1000.0k. */
TR_DEF const char *tr_scaled(char out[TR_TEXT_MAX], double x, double base,
                             const char *const suffix[7]) {
    int k = 0;
    if (!(x >= 0) || x > DBL_MAX) {
        strcpy(out, "?");
        return out;
    }
    while (k < 6 && x >= (k == 0 ? base - 0.5 : base - 0.05)) {
        x /= base;
        k++;
    }
    if (x > 99999)
        snprintf(out, TR_TEXT_MAX, "%.1e%s", x, suffix[k]);
    else
        snprintf(out, TR_TEXT_MAX, k == 0 ? "%.0f%s" : "%.1f%s", x, suffix[k]);
    return out;
}

/* Writes a number of bytes: 512 B  1.5 KiB  3.2 GiB */
TR_DEF const char *tr_bytes(char out[TR_TEXT_MAX], double x) {
    static const char *const suffix[7] = {" B", " KiB", " MiB", " GiB", " TiB", " PiB", " EiB"};
    return tr_scaled(out, x, 1024, suffix);
}

/* Writes a count: 950  12.3k  4.6M  1.2G */
TR_DEF const char *tr_count(char out[TR_TEXT_MAX], double x) {
    static const char *const suffix[7] = {"", "k", "M", "G", "T", "P", "E"};
    return tr_scaled(out, x, 1000, suffix);
}

/* Writes x with a fixed number of decimals, or "nan", "inf" or "-inf" on all systems. */
TR_DEF const char *tr_fixed(char out[TR_TEXT_MAX], double x, int decimals) {
    if (isnan(x))
        strcpy(out, "nan");
    else if (!isfinite(x))
        strcpy(out, x > 0 ? "inf" : "-inf");
    else if (x > 99999 || x < -99999)
        snprintf(out, TR_TEXT_MAX, "%.3e", x);
    else
        snprintf(out, TR_TEXT_MAX, "%.*f", decimals, x);
    return out;
}
