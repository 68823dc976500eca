/* train.h - the parts that all trainers share: options, log, terminal, TensorBoard files,
   signals, clock

   The training loop is not in this file: each train_*.c contains its own. This header
   does not depend on seqtx.h and can be used in other programs. Only its last section,
   >>lm, depends on seqtx.h. That section is compiled only if TR_LM is defined.

   Use:      #include "train.h"     before all other includes, or define _POSIX_C_SOURCE
                                    as 200809L yourself
   Link:     nothing beyond the C library. C99 and POSIX.1-2008; also compiles as C++11.
   License:  MIT or public domain, your choice; see LICENSE.

   MANUAL

   Outline of a trainer

       static int      nlayers, adapt_span, optim;
       static uint64_t steps;
       static double   lr;
       static const char *log_file;

       static const tr_preset presets[] = {
           {"small", "four layers, for a quick test", "nlayers=4 lr=0.03 adapt-span"},
           TR_PRESET_END
       };

       tr_opt table[] = {
           TR_GROUP("Model"),
           TR_INT("nlayers", TR_MODEL, &nlayers, 1, 1000, "number of layers"),
           TR_FLAG("adapt-span", TR_MODEL, &adapt_span, "learn a span for each head"),
           TR_GROUP("Training"),
           TR_SIZE("steps", TR_FREE, &steps, 0, TR_INF, "number of steps"),
           TR_REAL_OPEN("lr", TR_FREE, &lr, TR_OPEN_MIN, 0, TR_INF, "learning rate"),
           TR_CHOICE("optim", TR_FIXED, &optim, "adagrad|sgd|adam", "optimiser"),
           TR_TEXT("log", TR_LOCAL, &log_file, "write JSON lines to this file"),
           TR_END
       };

       tr_options o = {"train_x", "Trains model X on bytes.", table, presets,
                       "nlayers=8 steps=1000 lr=0.07", NULL, ""};
       char err[TR_ERR];
       tr_log log;
       tr_term term;
       tr_rate rate;

       tr_standard_streams();                    // before any file is opened
       switch (tr_parse(&o, argc, argv, err, sizeof err)) {
       case 0: fprintf(stderr, "%s: %s\n", o.program, err); return 2;   // invalid options
       case 2: return 0;                                                // --help
       default: break;
       }
       if (!tr_log_open(&log, log_file, TR_KEEP_ALL, err, sizeof err)) { ... }
       tr_signals(0, err, sizeof err);
       tr_term_open(&term, stderr);              // standard output is for results
       tr_rate_start(&rate, tr_seconds());
       for (step = 1; step <= steps && !tr_stop_requested(); step++) {
           ... one step ...
           tr_rate_add(&rate, tr_seconds(), 1, tokens);
           tr_log_begin(&log, "train");
           tr_log_int(&log, "step", step);
           tr_log_num(&log, "loss", loss);
           if (!tr_log_end(&log)) tr_say(&term, "%s", log.err);
           tr_show(&term, &progress, step % log_every == 0);
       }
       tr_term_close(&term);

   Command line
       An option is written --name value or --name=value. A flag is written --name or
       --no-name. A set (TR_SET) is written --name, --name a,b or --no-name. Underscores
       in names are equivalent to dashes. A numeric value must be decimal, finite, within
       the option's range, and not surrounded by blanks or other characters. If an option
       is given twice, the last value counts. --preset NAME is applied before all other
       options, wherever it appears. A value that begins with two dashes must be written
       as --name=value.

   Precedence
       The command line overrides the preset, the preset overrides the checkpoint
       (tr_options_adopt, when a run resumes), and the checkpoint overrides the
       defaults. The field `from` of each option records where its value came from.
       Defaults and presets are written like a command line without the leading dashes,
       such as "nlayers=4 adapt-span no-fast". The code that parses the command line
       also parses defaults, presets and the options stored in a checkpoint.

   Resuming
       Each option has a class, given in the second column of the table, which determines
       how checkpoints treat the option:

       class      stored  value if the option is not given  if it is given, and differs
       ---------  ------  --------------------------------  ---------------------------
       TR_LOCAL   no      default                           (nothing to compare)
       TR_HINT    yes     from the checkpoint               accepted
       TR_FREE    yes     from the checkpoint               accepted and reported
       TR_FIXED   yes     from the checkpoint               error when training resumes;
                                                            accepted otherwise
       TR_MODEL   yes     from the checkpoint               error

       TR_LOCAL is for options of a single start: threads, device, log files. TR_HINT is
       for the location of the data. TR_FREE is for options that may change during a
       run. TR_MODEL is for options without which the stored weights have no meaning. A
       run that only starts from the weights of another run (TR_INIT) takes from the
       checkpoint the options of class TR_MODEL and all options with TR_KEPT added.

   Files
       tr_replace either replaces a whole file or leaves it unchanged; it is also used to
       trim logs. tr_claim_open gives a run the exclusive right to write a file. It locks
       FILE.lock in the same directory.

   Errors
       A function that can fail returns 0 and writes one sentence to err[TR_ERR], which
       says what was attempted, on which path, and why it failed. No function ends the
       process, with two exceptions: a second signal while the first is being handled, and
       the truncation of a watched text (tr_watch). A failing log or event file does not
       stop training: only the first failure is reported, the incomplete line is removed,
       and nothing more is written to that file.

   Sections, marked with >> in the code: buffer, json, options, files, log, formats,
   clock, terminal, board, signals, sampling, lm */

#ifndef SEQTX_EXAMPLES_TRAIN_H
#define SEQTX_EXAMPLES_TRAIN_H

#ifndef _POSIX_C_SOURCE
#define _POSIX_C_SOURCE 200809L
#endif
#if defined(__APPLE__) && !defined(_DARWIN_C_SOURCE)
/* _POSIX_C_SOURCE alone hides ru_maxrss, _SC_PHYS_PAGES and TIOCGWINSZ on macOS. */
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
#include <sys/resource.h>
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


// >>buffer: growing byte strings; a failed allocation sets oom --------------------------

typedef struct {
    char  *s;           /* NULL until something is appended; zero-terminated from then on */
    size_t n, capacity;     /* n: length in bytes; capacity: allocated bytes */
    int    oom;         /* an allocation failed: the content is incomplete */
} tr_buf;

TR_DEF void tr_buf_free(tr_buf *b) {
    free(b->s);
    memset(b, 0, sizeof *b);
}

/* Reserves space for n more bytes and a terminating zero. Returns 0 if memory runs
   out. */
TR_DEF int tr_buf_reserve(tr_buf *b, size_t n) {
    size_t capacity = b->capacity ? b->capacity : 128;
    char *s;
    while (capacity - b->n < n + 1) {       /* b->n is always less than capacity */
        if (capacity > SIZE_MAX / 2) b->oom = 1;
        if (b->oom) return 0;
        capacity *= 2;
    }
    if (capacity == b->capacity) return 1;
    s = (char *)realloc(b->s, capacity);
    b->oom = s == NULL;
    if (b->oom) return 0;
    b->s = s;
    b->capacity = capacity;
    return 1;
}

TR_DEF void tr_buf_put(tr_buf *b, const void *bytes, size_t n) {
    if (b->oom || !tr_buf_reserve(b, n)) return;
    memcpy(b->s + b->n, bytes, n);
    b->n += n;
    b->s[b->n] = 0;
}

TR_DEF void tr_buf_puts(tr_buf *b, const char *text) {
    tr_buf_put(b, text, strlen(text));
}

TR_DEF void tr_buf_fill(tr_buf *b, char c, size_t count) {
    while (count-- > 0) tr_buf_put(b, &c, 1);
}

/* Appends formatted text, as printf does. */
TR_DEF TR_PRINTF(2, 3) void tr_buf_printf(tr_buf *b, const char *fmt, ...) {
    va_list args;
    int n;
    va_start(args, fmt);
    n = vsnprintf(NULL, 0, fmt, args);
    va_end(args);
    if (n < 0) b->oom = 1;
    if (b->oom || !tr_buf_reserve(b, (size_t)n)) return;
    va_start(args, fmt);
    vsnprintf(b->s + b->n, (size_t)n + 1, fmt, args);
    va_end(args);
    b->n += (size_t)n;
}

/* Returns the plural ending of a noun for a count of n: "1 layer", "2 layers". */
TR_DEF const char *tr_s(uint64_t n) {
    return n == 1 ? "" : "s";
}

/* FNV-1a hash of a text that is passed in parts. h is the hash of the preceding parts,
   or TR_HASH_BEGIN for the first part. */
#define TR_HASH_BEGIN ((uint64_t)14695981039346656037u)

TR_DEF uint64_t tr_hash(uint64_t h, const char *s, size_t n) {
    while (n-- > 0) h = (h ^ (unsigned char)*s++) * 1099511628211u;
    return h;
}


// >>json: writes flat objects and reads values back from them

/* Writes the shortest decimal text that reads back as exactly x, or "null" if x is not
   finite, which JSON cannot represent. */
TR_DEF void tr_number(char out[32], double x) {
    int digits;
    if (!isfinite(x)) {
        strcpy(out, "null");
        return;
    }
    for (digits = 6; digits <= 17; digits++) {
        snprintf(out, 32, "%.*g", digits, x);
        if (strtod(out, NULL) == x) return;
    }
}

/* Returns the length of the well-formed UTF-8 sequence at s, or 0 if there is none. As
   in RFC 3629, overlong forms and surrogates are invalid. s must be zero-terminated:
   no continuation byte is zero, so nothing is read beyond the end. */
TR_DEF size_t tr_utf8(const unsigned char *s) {
    if (s[0] < 0x80) return 1;
    if (s[0] >= 0xC2 && s[0] <= 0xDF) return (s[1] & 0xC0) == 0x80 ? 2 : 0;
    if (s[0] >= 0xE0 && s[0] <= 0xEF) {
        if ((s[1] & 0xC0) != 0x80 || (s[2] & 0xC0) != 0x80) return 0;
        if (s[0] == 0xE0 && s[1] < 0xA0) return 0;
        if (s[0] == 0xED && s[1] > 0x9F) return 0;
        return 3;
    }
    if (s[0] >= 0xF0 && s[0] <= 0xF4) {
        if ((s[1] & 0xC0) != 0x80 || (s[2] & 0xC0) != 0x80 || (s[3] & 0xC0) != 0x80) return 0;
        if (s[0] == 0xF0 && s[1] < 0x90) return 0;
        if (s[0] == 0xF4 && s[1] > 0x8F) return 0;
        return 4;
    }
    return 0;
}

/* Appends text as a quoted JSON string, or null if text is NULL. A path can contain
   any bytes, but JSON must be UTF-8: each invalid byte becomes U+FFFD. */
TR_DEF void tr_json_string(tr_buf *b, const char *text) {
    static const char special[] = "\"\\\n\t\r", letter[] = "\"\\ntr";
    const unsigned char *s = (const unsigned char *)text;
    const char *at;
    if (text == NULL) {
        tr_buf_puts(b, "null");
        return;
    }
    tr_buf_puts(b, "\"");
    while (*s) {
        size_t n = tr_utf8(s);
        at = strchr(special, *s);
        if (n == 0) {
            tr_buf_puts(b, "\\ufffd");
            n = 1;
        } else if (at != NULL) {
            tr_buf_printf(b, "\\%c", letter[at - special]);
        } else if (*s < 0x20) {
            tr_buf_printf(b, "\\u%04x", (unsigned)*s);
        } else {
            tr_buf_put(b, s, n);
        }
        s += n;
    }
    tr_buf_puts(b, "\"");
}

TR_DEF const char *tr_json_blank(const char *p) {
    while (*p == ' ' || *p == '\t' || *p == '\r' || *p == '\n') p++;
    return p;
}

/* Returns the position after the string whose opening quote is at p, or NULL if there is
   no closing quote. */
TR_DEF const char *tr_json_past_string(const char *p) {
    for (p++; *p != '"'; p++) {
        if (*p == '\\' && p[1] != 0) p++;
        if (*p == 0) return NULL;
    }
    return p + 1;
}

/* Returns the position after the value at p, or NULL if the value is incomplete. Counts
   brackets, but does not check that the closing ones are of the right kind. */
TR_DEF const char *tr_json_past_value(const char *p) {
    size_t depth = 0, n;
    if (*p == '"') return tr_json_past_string(p);
    if (*p != '{' && *p != '[') {
        n = strcspn(p, ",]}{[:\" \t\r\n");
        return n > 0 ? p + n : NULL;
    }
    do {
        if (*p == 0) return NULL;
        if (*p == '"') {
            p = tr_json_past_string(p);
            if (p == NULL) return NULL;
            continue;
        }
        if (*p == '{' || *p == '[') depth++;
        if (*p == '}' || *p == ']') depth--;
        p++;
    } while (depth > 0);
    return p;
}

TR_DEF int tr_json_hex4(const char *p, unsigned long *out) {
    static const char digits[] = "0123456789abcdef0123456789ABCDEF";
    int i;
    for (*out = 0, i = 0; i < 4; i++) {
        const char *at = p[i] ? strchr(digits, p[i]) : NULL;
        if (at == NULL) return 0;
        *out = *out * 16 + (unsigned long)((at - digits) % 16);
    }
    return 1;
}

/* Encodes the code point c as UTF-8 in `out` and returns the length in bytes. */
TR_DEF size_t tr_utf8_encode(unsigned long c, char out[4]) {
    size_t len = 1, i;
    if (c < 0x80) {
        out[0] = (char)c;
    } else if (c < 0x800) {
        out[0] = (char)(0xC0 | (c >> 6));
        len = 2;
    } else if (c < 0x10000) {
        out[0] = (char)(0xE0 | (c >> 12));
        len = 3;
    } else {
        out[0] = (char)(0xF0 | (c >> 18));
        len = 4;
    }
    for (i = 1; i < len; i++) out[i] = (char)(0x80 | ((c >> (6 * (len - 1 - i))) & 0x3F));
    return len;
}

/* Decodes an escape sequence. p points just after its backslash. Stores the bytes in
   out and their number in *len. Returns the position after the sequence, or NULL if it
   is malformed. */
TR_DEF const char *tr_json_escape(const char *p, const char *end, char out[4], size_t *len) {
    const char *from = "\"\\/bfnrt", *to = "\"\\/\b\f\n\r\t", *at;
    unsigned long c, low;
    if (*p != 'u') {
        at = *p ? strchr(from, *p) : NULL;
        if (at == NULL) return NULL;
        out[0] = to[at - from];
        *len = 1;
        return p + 1;
    }
    if (end - p < 5 || !tr_json_hex4(p + 1, &c)) return NULL;
    p += 5;
    if (c == 0 || (c >= 0xDC00 && c <= 0xDFFF)) return NULL;
    if (c >= 0xD800 && c <= 0xDBFF) {           /* high surrogate */
        if (end - p < 6 || p[0] != '\\' || p[1] != 'u' || !tr_json_hex4(p + 2, &low)) return NULL;
        if (low < 0xDC00 || low > 0xDFFF) return NULL;
        c = 0x10000 + ((c - 0xD800) << 10) + (low - 0xDC00);
        p += 6;
    }
    *len = tr_utf8_encode(c, out);
    return p;
}

/* Decodes the content [p, end) of a JSON string. Returns 0 if it is malformed,
   contains U+0000, or does not fit in `out`. */
TR_DEF int tr_json_unescape(const char *p, const char *end, char *out, size_t size) {
    size_t n = 0, len;
    char bytes[4];
    while (p < end) {
        len = 1;
        bytes[0] = *p++;
        if (bytes[0] == '\\') p = tr_json_escape(p, end, bytes, &len);
        if (p == NULL || n + len >= size) return 0;
        memcpy(out + n, bytes, len);
        n += len;
    }
    if (n >= size) return 0;
    out[n] = 0;
    return 1;
}

/* Looks up a key among the top-level members of a JSON object and copies its value to
   out: a string without its quotes and with escapes decoded, any other value as
   written. If a key occurs twice, the first one counts. The whole object is always
   scanned. Returns 1 if the key was found, 0 if it is absent, and -1 if the object is
   malformed or the value does not fit. */
TR_DEF int tr_json_find(const char *json, const char *key, char *out, size_t size) {
    const char *p = tr_json_blank(json), *name, *value, *end;
    size_t key_len = strlen(key);
    int found = 0;
    if (*p++ != '{') return -1;
    p = tr_json_blank(p);
    if (*p == '}') return *tr_json_blank(p + 1) == 0 ? 0 : -1;

    for (;;) {
        p = tr_json_blank(p);
        if (*p != '"') return -1;
        name = p + 1;
        end = tr_json_past_string(p);
        if (end == NULL) return -1;
        p = tr_json_blank(end);
        if (*p != ':') return -1;
        value = tr_json_blank(p + 1);
        p = tr_json_past_value(value);
        if (p == NULL) return -1;
        if (!found && (size_t)(end - 1 - name) == key_len && memcmp(name, key, key_len) == 0) {
            found = 1;
            if (*value == '"') {
                if (!tr_json_unescape(value + 1, p - 1, out, size)) return -1;
            } else {
                if ((size_t)(p - value) >= size) return -1;
                memcpy(out, value, (size_t)(p - value));
                out[p - value] = 0;
            }
        }

        p = tr_json_blank(p);
        if (*p == '}') return *tr_json_blank(p + 1) == 0 ? found : -1;
        if (*p++ != ',') return -1;
    }
}


// >>options: one table for parsing, checking, help and configuration --------------------

enum {
    TR_T_END, TR_T_GROUP, TR_T_INT, TR_T_SIZE, TR_T_REAL, TR_T_TEXT, TR_T_FLAG, TR_T_CHOICE,
    TR_T_SET
};

/* Sources of a value, in increasing order of precedence. TR_FROM_TEXT: the value was
   derived from the size of the training text. */
enum { TR_FROM_DEFAULT, TR_FROM_TEXT, TR_FROM_CHECKPOINT, TR_FROM_PRESET, TR_FROM_ARGS };

/* Classes of options: see "Resuming" in the manual. The last two are flags that can be
   added to a class. */
enum {
    TR_LOCAL, TR_HINT, TR_FREE, TR_FIXED, TR_MODEL,
    TR_LATER = 8,       /* a checkpoint written before the option existed implies the default */
    TR_KEPT = 16        /* a TR_INIT run also takes this option from the checkpoint */
};

/* Why a checkpoint is opened. TR_LOOK: to evaluate or generate. TR_RESUME: to resume
   the run. TR_INIT: to start another run from its weights. */
enum { TR_LOOK, TR_RESUME, TR_INIT };

enum { TR_OPEN_MIN = 1, TR_OPEN_MAX = 2 };      /* the minimum or the maximum itself is excluded */
enum { TR_AS_FITS = -1, TR_ALL = INT_MAX };     /* "auto" and "on" as values of a TR_SOME */

/* Bits of the value of a TR_SET. TR_EVERY selects all names that apply, except name k if
   bit TR_REMOVED + k is set. A set has at most TR_REMOVED names. */
enum { TR_EVERY = 1 << 30, TR_REMOVED = 15 };

typedef struct {
    const char *name;       /* without leading dashes; for a group: its heading */
    int         type;       /* TR_T_... */
    void       *to;         /* variable that receives the value: int, uint64_t, double,
                               const char *. A flag, a choice (its index) and a set (its
                               bits) are int */
    const char *help;
    double      min, max;   /* inclusive bounds. Both 0: the range of the type; TR_INF:
                               unbounded. A flag with max > 0 is a TR_SOME */
    int         open;       /* TR_T_REAL: the excluded bounds, TR_OPEN_MIN, TR_OPEN_MAX or both.
                               TR_T_SET: the argument `training` of TR_SET */
    const char *choices;    /* choice and set: the names, such as "adagrad|sgd|adam"; other types:
                               alternative names of the option, or NULL */
    int         keep;       /* class: TR_LOCAL .. TR_MODEL, plus the flags TR_LATER and TR_KEPT */
    int         from;       /* out: source of the value, TR_FROM_... */
    char       *own;        /* out: copy of a text value; see tr_options_free */
} tr_opt;

#define TR_INF HUGE_VAL

/* Returns `to`. Does not compile unless `to` points to a `type`. */
#define TR_TO(type, to) ((void *)(1 ? (to) : (type *)NULL))

/* A row of the option table. The macros below fill in the fields that a type does not
   use. */
#define TR_ROW(name, type, to, help, min, max, open, choices, keep) \
    {name, type, to, help, min, max, open, choices, keep, 0, NULL}

#define TR_GROUP(title) TR_ROW(title, TR_T_GROUP, NULL, NULL, 0, 0, 0, NULL, 0)
#define TR_END TR_ROW(NULL, TR_T_END, NULL, NULL, 0, 0, 0, NULL, 0)

/* Options with alternative names in `also`, such as "d-model|n-embd". */
#define TR_SIZE_ALSO(name, also, keep, to, min, max, help) \
    TR_ROW(name, TR_T_SIZE, TR_TO(uint64_t, to), help, min, max, 0, also, keep)
#define TR_REAL_ALSO(name, also, keep, to, open, min, max, help) \
    TR_ROW(name, TR_T_REAL, TR_TO(double, to), help, min, max, open, also, keep)
#define TR_TEXT_ALSO(name, also, keep, to, help) \
    TR_ROW(name, TR_T_TEXT, TR_TO(const char *, to), help, 0, 0, 0, also, keep)

/* A comma-separated list. If the option is given several times on the command line, the
   values are joined. A max of 1 distinguishes a list from a text. */
#define TR_LIST_ALSO(name, also, keep, to, help) \
    TR_ROW(name, TR_T_TEXT, TR_TO(const char *, to), help, 0, 1, 0, also, keep)

#define TR_INT(name, keep, to, min, max, help) \
    TR_ROW(name, TR_T_INT, TR_TO(int, to), help, min, max, 0, NULL, keep)
#define TR_SIZE(name, keep, to, min, max, help) \
    TR_SIZE_ALSO(name, NULL, keep, to, min, max, help)
#define TR_REAL(name, keep, to, min, max, help) \
    TR_REAL_ALSO(name, NULL, keep, to, 0, min, max, help)
#define TR_REAL_OPEN(name, keep, to, open, min, max, help) \
    TR_REAL_ALSO(name, NULL, keep, to, open, min, max, help)
#define TR_TEXT(name, keep, to, help) \
    TR_TEXT_ALSO(name, NULL, keep, to, help)
#define TR_CHOICE(name, keep, to, choices, help) \
    TR_ROW(name, TR_T_CHOICE, TR_TO(int, to), help, 0, 0, 0, choices, keep)
#define TR_FLAG(name, keep, to, help) \
    TR_ROW(name, TR_T_FLAG, TR_TO(int, to), help, 0, 0, 0, NULL, keep)

/* A flag that also accepts a number. Its values are on (TR_ALL), off, 0 to max, and
   auto (TR_AS_FITS). */
#define TR_SOME(name, keep, to, max, help) \
    TR_ROW(name, TR_T_FLAG, TR_TO(int, to), help, 0, max, 0, NULL, keep)

/* --NAME a,c selects some of the names "a|b|c". The value is an int in which bit k
   represents name k. --NAME alone selects every name that applies, TR_EVERY. --NAME-a
   adds one name, and --no-NAME-a removes it; --NAME all,no-a selects all names except
   "a". `training` holds the bits that affect only training: in these bits, an
   evaluation or a run that starts from a checkpoint's weights may differ from the
   checkpoint. A set without names ("") cannot be switched on; its `help` says why. */
#define TR_SET(name, keep, to, names, training, help) \
    TR_ROW(name, TR_T_SET, TR_TO(int, to), help, 0, 0, training, names, keep)

typedef struct {
    const char *name, *about;       /* about: a one-line description */
    const char *set;                /* options separated by blanks, as in "name=value
                                       flag no-flag"; if an option occurs twice, the
                                       later value applies */
} tr_preset;

#define TR_PRESET_END {NULL, NULL, NULL}

typedef struct {
    const char      *program, *about;
    tr_opt          *opt;               /* terminated by TR_END */
    const tr_preset *preset;            /* terminated by TR_PRESET_END; NULL if there are none */
    const char      *defaults;          /* default values, in the form of tr_preset.set.
                                           An option that is not listed is 0, off, none or
                                           its first choice */
    const char      *after;             /* last paragraph of the help; may be NULL */
    char             preset_used[64];   /* out: name of the preset, or "" */
} tr_options;

/* Maps an underscore to a dash, because they are equivalent in names. */
TR_DEF char tr_dash(char c) {
    return c == '_' ? '-' : c;
}

/* Nonzero if the first n characters of two names are equal. */
TR_DEF int tr_same(const char *a, const char *b, size_t n) {
    size_t i;
    for (i = 0; i < n; i++) {
        if (tr_dash(a[i]) != tr_dash(b[i])) return 0;
        if (a[i] == 0) return 1;
    }
    return 1;
}

/* Nonzero if the n characters at `a` are the name b. */
TR_DEF int tr_same_name(const char *a, size_t n, const char *b) {
    return strlen(b) == n && tr_same(a, b, n);
}

/* Returns the k-th name in "a|b|c" and its length, or NULL if there are fewer names. */
TR_DEF const char *tr_choice(const char *choices, int k, size_t *len) {
    for (;; k--, choices += *len + 1) {
        *len = strcspn(choices, "|");
        if (k == 0) return *len > 0 ? choices : NULL;
        if (choices[*len] == 0) return NULL;
    }
}

/* Returns the index of a word of n characters in "a|b|c", or -1. choices may be NULL. */
TR_DEF int tr_choice_index(const char *choices, const char *word, size_t n) {
    const char *name;
    size_t len;
    int k;
    for (k = 0; choices != NULL && (name = tr_choice(choices, k, &len)) != NULL; k++)
        if (len == n && tr_same(word, name, n)) return k;
    return -1;
}

/* Returns the bit of a name in a TR_SET, or 0 if there is no such name. */
TR_DEF int tr_set_bit(const tr_opt *p, const char *name, size_t n) {
    int k = tr_choice_index(p->choices, name, n);
    return k < 0 ? 0 : 1 << k;
}

/* For a word that joins the name of the TR_SET p and one of its members, such as
   "literal-rows", returns the bit of the member. Otherwise, returns 0. */
TR_DEF int tr_set_member(const tr_opt *p, const char *word, size_t n) {
    size_t len = strlen(p->name);
    if (p->type != TR_T_SET || n < len + 2) return 0;
    if (!tr_same(word, p->name, len) || !tr_same(word + len, "-", 1)) return 0;
    return tr_set_bit(p, word + len + 1, n - len - 1);
}

/* Returns the bits of the names that are excluded from TR_EVERY. */
TR_DEF int tr_set_removed(int v) {
    return v & TR_EVERY ? v >> TR_REMOVED & ((1 << TR_REMOVED) - 1) : 0;
}

/* Returns the value without the bits that exclude names from TR_EVERY. */
TR_DEF int tr_set_given(int v) {
    return v & (TR_EVERY | ((1 << TR_REMOVED) - 1));
}

/* Returns the names that value v of the TR_SET selects, as bits. TR_EVERY selects all
   names except the removed ones, including names that do not apply. */
TR_DEF int tr_set_bits(const tr_opt *p, int v) {
    size_t len;
    int n = 0;
    if (!(v & TR_EVERY)) return v;
    while (tr_choice(p->choices, n, &len) != NULL) n++;
    return ((1 << n) - 1) & ~tr_set_removed(v);
}

/* Finds an option by its name, an alternative name, or the joined names of a set and
   one of its members, as in "literal-rows". Returns NULL if there is none. */
TR_DEF tr_opt *tr_find_option(const tr_options *o, const char *name, size_t n) {
    tr_opt *p;
    for (p = o->opt; p->type != TR_T_END; p++)
        if (p->type != TR_T_GROUP && tr_same_name(name, n, p->name)) return p;
    for (p = o->opt; p->type != TR_T_END; p++) {
        int also = p->type != TR_T_CHOICE && p->type != TR_T_SET;
        if (also && tr_choice_index(p->choices, name, n) >= 0) return p;
        if (tr_set_member(p, name, n)) return p;
    }
    return NULL;
}

/* Like tr_find_option, but also accepts "no-NAME". *no receives 1 for "no-NAME", and 0
   otherwise. */
TR_DEF tr_opt *tr_find_word(const tr_options *o, const char *word, size_t n, int *no) {
    tr_opt *p = tr_find_option(o, word, n);
    *no = 0;
    if (p != NULL || n < 4 || !tr_same(word, "no-", 3)) return p;
    p = tr_find_option(o, word + 3, n - 3);
    *no = p != NULL;
    return p;
}

TR_DEF const tr_preset *tr_find_preset(const tr_options *o, const char *name) {
    const tr_preset *p;
    for (p = o->preset; p != NULL && p->name != NULL; p++)
        if (tr_same_name(name, strlen(name), p->name)) return p;
    return NULL;
}

/* Nonzero if the option was given on the command line itself, not by a preset. */
TR_DEF int tr_given(const tr_options *o, const char *name) {
    const tr_opt *p = tr_find_option(o, name, strlen(name));
    return p != NULL && p->from == TR_FROM_ARGS;
}

/* Returns the Levenshtein distance of `a` and `b`: the least number of insertions,
   deletions and replacements that turn `a` into `b`. Only one row of the table is
   stored. If a name has more than 63 characters, the distance is infinite. */
TR_DEF size_t tr_distance(const char *a, size_t na, const char *b, size_t nb) {
    size_t row[64], i, j;
    if (na > 63 || nb > 63) return SIZE_MAX;
    for (j = 0; j <= nb; j++) row[j] = j;
    for (i = 1; i <= na; i++) {
        size_t diagonal = row[0];       /* row[i - 1][j - 1] */
        row[0] = i;
        for (j = 1; j <= nb; j++) {
            size_t best = diagonal + (tr_dash(a[i - 1]) != tr_dash(b[j - 1]));
            diagonal = row[j];
            if (row[j] + 1 < best) best = row[j] + 1;
            if (row[j - 1] + 1 < best) best = row[j - 1] + 1;
            row[j] = best;
        }
    }
    return row[nb];
}

/* The candidate with the nearest spelling, if it is near enough to explain a typing
   error. */
typedef struct {
    const char *name;
    size_t      len, distance;
} tr_nearest;

TR_DEF void tr_consider(tr_nearest *best, const char *got, size_t got_len, const char *name,
                        size_t len) {
    size_t d = tr_distance(got, got_len, name, len);
    if (d <= 1 + got_len / 3 && d < len && (best->name == NULL || d < best->distance)) {
        best->name = name;
        best->len = len;
        best->distance = d;
    }
}

/* Considers each name in "a|b|c" as a candidate. */
TR_DEF void tr_consider_choices(tr_nearest *best, const char *got, size_t n, const char *choices) {
    const char *name;
    size_t len;
    int k;
    for (k = 0; (name = tr_choice(choices, k, &len)) != NULL; k++)
        tr_consider(best, got, n, name, len);
}

/* The next three functions parse a word that must be a decimal number in range. The
   strto* functions alone would accept blanks, "0x10" and "nan", and would wrap "-1" to
   a huge unsigned number. Each returns 1, or returns 0 and leaves *out unchanged. */
TR_DEF int tr_read_int(const char *s, int *out) {
    const char *digits = s + (s[0] == '-');
    long long v;
    if (*digits == 0 || strspn(digits, "0123456789") != strlen(digits)) return 0;
    errno = 0;
    v = strtoll(s, NULL, 10);
    if (errno != 0 || v < INT_MIN || v > INT_MAX) return 0;
    *out = (int)v;
    return 1;
}

TR_DEF int tr_read_size(const char *s, uint64_t *out) {
    unsigned long long v;
    if (*s == 0 || strspn(s, "0123456789") != strlen(s)) return 0;
    errno = 0;
    v = strtoull(s, NULL, 10);
    if (errno != 0 || v > UINT64_MAX) return 0;
    *out = (uint64_t)v;
    return 1;
}

TR_DEF int tr_read_real(const char *s, double *out) {
    char *end;
    double v;
    if (*s == 0 || strspn(s, "0123456789+-.eE") != strlen(s)) return 0;
    errno = 0;
    v = strtod(s, &end);
    if (errno != 0 || *end != 0 || !isfinite(v)) return 0;
    *out = v;
    return 1;
}

/* Parses "3,5,8" into `out`, which has space for `capacity` numbers, and stores their
   count in *n. Blanks and empty items are errors. */
TR_DEF int tr_read_sizes(const char *s, size_t *out, size_t capacity, size_t *n) {
    char word[24];
    uint64_t v;
    for (*n = 0; *n < capacity; s++) {
        size_t len = strcspn(s, ",");
        if (len >= sizeof word) return 0;
        memcpy(word, s, len);
        word[len] = 0;
        if (!tr_read_size(word, &v) || v > SIZE_MAX) return 0;
        out[(*n)++] = (size_t)v;
        s += len;
        if (!*s) return 1;
    }
    return 0;
}

TR_DEF int tr_read_flag(const char *s, int *out) {
    static const char *const words[] = {"0", "1", "false", "true", "no", "yes", "off", "on"};
    size_t i;
    for (i = 0; i < sizeof words / sizeof *words; i++) {
        if (strcmp(s, words[i]) != 0) continue;
        *out = (int)(i & 1);
        return 1;
    }
    return 0;
}

/* Nonzero if the option is a TR_SOME. */
TR_DEF int tr_accepts_number(const tr_opt *p) {
    return p->type == TR_T_FLAG && p->max > 0;
}

TR_DEF int tr_read_flag_or_number(const char *s, double max, int *out) {
    int n;
    if (strcmp(s, "auto") == 0) {
        *out = TR_AS_FITS;
        return 1;
    }
    if (tr_read_int(s, &n)) {
        *out = n;
        return n >= 0 && n <= max;
    }
    if (!tr_read_flag(s, &n)) return 0;
    *out = n ? TR_ALL : 0;
    return 1;
}

/* Nonzero if the option can be given with or without a value in the next word. */
TR_DEF int tr_value_is_optional(const tr_opt *p) {
    return tr_accepts_number(p) || p->type == TR_T_SET;
}

/* Parses "a,c", "all,no-b", on or off as the value of a TR_SET. If a name is unknown,
   returns 0 and stores the nearest name in *best. */
TR_DEF int tr_read_set(const tr_opt *p, const char *s, int *out, tr_nearest *best) {
    size_t n;
    int v, bits = 0, bit;
    if (tr_read_flag(s, &v)) {
        *out = v ? TR_EVERY : 0;
        return 1;
    }
    for (;; s += n + 1) {
        n = strcspn(s, ",");
        if (!bits && tr_same_name(s, n, "all")) bit = TR_EVERY;
        else if (bits & TR_EVERY && n > 3 && tr_same(s, "no-", 3))
            bit = tr_set_bit(p, s + 3, n - 3) << TR_REMOVED;
        else bit = tr_set_bit(p, s, n);
        if (!bit) {
            tr_consider_choices(best, s, n, p->choices);
            return 0;
        }
        bits |= bit;
        if (!s[n]) break;
    }
    *out = bits;
    return 1;
}

TR_DEF int tr_in_range(const tr_opt *p, double v) {
    if (p->min == 0 && p->max == 0) return 1;
    if (!(v >= p->min && v <= p->max)) return 0;
    if ((p->open & TR_OPEN_MIN) && v == p->min) return 0;
    if ((p->open & TR_OPEN_MAX) && v == p->max) return 0;
    return 1;
}

/* Writes the values that a TR_T_REAL accepts, such as "a number above 0". */
TR_DEF void tr_expected_real(const tr_opt *p, char *out, size_t size) {
    int bounded = !(p->min == 0 && p->max == 0);
    int has_min = bounded && p->min >= -DBL_MAX, has_max = bounded && p->max <= DBL_MAX;
    const char *at_least = p->open & TR_OPEN_MIN ? "above" : "of at least";
    const char *at_most = p->open & TR_OPEN_MAX ? "below" : "of at most";
    char lo[32], hi[32];
    tr_number(lo, p->min);
    tr_number(hi, p->max);
    if (!has_min && !has_max) snprintf(out, size, "a number");
    else if (!has_max) snprintf(out, size, "a number %s %s", at_least, lo);
    else if (!has_min) snprintf(out, size, "a number %s %s", at_most, hi);
    else if (!p->open) snprintf(out, size, "a number from %s to %s", lo, hi);
    else snprintf(out, size, "a number %s %s and %s %s", at_least, lo, at_most, hi);
}

/* Writes what an option accepts, such as "a whole number from 1 to 1000". */
TR_DEF void tr_expected(const tr_opt *p, char *out, size_t size) {
    int bounded = !(p->min == 0 && p->max == 0), lo = INT_MIN, hi = INT_MAX;
    uint64_t least = 0, most = UINT64_MAX;
    const char *s;
    size_t n;
    switch (p->type) {
    case TR_T_INT:
        if (bounded && p->min > INT_MIN) lo = (int)p->min;
        if (bounded && p->max < INT_MAX) hi = (int)p->max;
        snprintf(out, size, "a whole number from %d to %d", lo, hi);
        break;
    case TR_T_SIZE:
        if (bounded && p->min > 0) least = (uint64_t)p->min;
        if (bounded && p->max < 18446744073709551615.0) most = (uint64_t)p->max;
        snprintf(out, size, "a whole number from %" PRIu64 " to %" PRIu64, least, most);
        break;
    case TR_T_REAL: tr_expected_real(p, out, size); break;
    case TR_T_FLAG:
        if (tr_accepts_number(p))
            snprintf(out, size, "on, off, auto or a whole number up to %d", (int)p->max);
        else
            snprintf(out, size, "on or off (also 1, 0, true, false, yes, no)");
        break;
    case TR_T_CHOICE:
    case TR_T_SET:
        n = (size_t)snprintf(out, size, p->type == TR_T_SET ? "on, off, or any of " : "one of ");
        for (s = p->choices; *s != 0 && n + 3 < size; s++) {
            out[n++] = *s == '|' ? ',' : *s;
            if (*s == '|') out[n++] = ' ';
        }
        out[n] = 0;
        break;
    default: snprintf(out, size, "a text"); break;
    }
}

/* Reports a value that an option does not accept. `best` is the nearest name, if any. */
TR_DEF int tr_refuse(const tr_opt *p, const char *value, const tr_nearest *best, char *err,
                     size_t size) {
    char expected[256], hint[96] = "";
    tr_expected(p, expected, sizeof expected);
    if (best->name != NULL)
        snprintf(hint, sizeof hint, " (did you mean %.*s?)", (int)best->len, best->name);
    return tr_fail(err, size, "--%s: expected %s, got '%.80s'%s", p->name, expected, value, hint);
}

/* Stores a copy of a text in the option. A list that was already given is extended. */
TR_DEF int tr_set_copy(tr_opt *p, const char *value, int from) {
    int extend = p->max > 0 && from == TR_FROM_ARGS && p->from == from && p->own && *p->own;
    size_t len = extend ? strlen(p->own) + 1 : 0;
    char *copy = (char *)malloc(len + strlen(value) + 1);
    if (copy == NULL) return 0;
    if (extend) snprintf(copy, len + 1, "%s,", p->own);
    strcpy(copy + len, value);
    free(p->own);
    p->own = copy;
    *(const char **)p->to = copy;
    return 1;
}

/* Parses a value, checks its range and stores it in the option. A text is copied; see
   tr_options_free. */
TR_DEF int tr_set(tr_opt *p, const char *value, int from, char *err, size_t size) {
    int ok = 0, i = 0;
    uint64_t u = 0;
    double d = 0;
    tr_nearest best = {NULL, 0, 0};
    switch (p->type) {
    case TR_T_INT:
        ok = tr_read_int(value, &i) && tr_in_range(p, (double)i);
        if (ok) *(int *)p->to = i;
        break;
    case TR_T_SIZE:
        ok = tr_read_size(value, &u) && tr_in_range(p, (double)u);
        if (ok) *(uint64_t *)p->to = u;
        break;
    case TR_T_REAL:
        ok = tr_read_real(value, &d) && tr_in_range(p, d);
        if (ok) *(double *)p->to = d;
        break;
    case TR_T_FLAG:
        ok = tr_accepts_number(p) ? tr_read_flag_or_number(value, p->max, &i)
                                  : tr_read_flag(value, &i);
        if (ok) *(int *)p->to = i;
        break;
    case TR_T_CHOICE:
        i = tr_choice_index(p->choices, value, strlen(value));
        ok = i >= 0;
        if (ok) *(int *)p->to = i;
        else tr_consider_choices(&best, value, strlen(value), p->choices);
        break;
    case TR_T_SET:
        ok = tr_read_set(p, value, &i, &best);
        if (*p->choices == 0 && (!ok || i)) return tr_fail(err, size, "--%s: %s", p->name, p->help);
        if (ok) *(int *)p->to = i;
        break;
    case TR_T_TEXT:
        ok = tr_set_copy(p, value, from);
        if (!ok) return tr_fail(err, size, "--%s: out of memory: cannot store the value", p->name);
        break;
    default: break;
    }
    if (!ok) return tr_refuse(p, value, &best, err, size);
    p->from = from;
    return 1;
}

/* Names that nanoGPT, the Hugging Face Trainer, llama.cpp and other programs use for our
   options. If a name is in several rows, the first row whose option exists in this
   program applies. */
static const struct {
    const char *ours, *theirs;
} tr_foreign[] TR_UNUSED = {
    {"batch-sz",           "b|batch-size|per-device-train-batch-size"},
    {"block-sz",           "block-size|bptt|c|context-length|context-size|ctx-size|max-seq-len|"
                           "max-seq-length|n-ctx|seq-len|seq-length|tgt-len"},
    {"checkpoint",         "ckpt|ckpt-path|load|m|model|model-path|resume|resume-from-checkpoint"},
    {"data",               "data-dir|data-path|dataset|file|input|train-data|train-file"},
    {"device",             "cuda|n-gpu-layers|ngl"},
    {"epochs",             "max-epochs|n-epochs|num-epochs|num-train-epochs"},
    {"eval-batch-sz",      "eval-batch-size|per-device-eval-batch-size"},
    {"eval-blocks",        "eval-iters"},
    {"eval-every",         "eval-interval|eval-steps"},
    {"eval-only",          "do-eval|ppl"},
    {"generate",           "length|max-length|max-new-tokens|max-tokens|n|n-predict|num-tokens|"
                           "sample"},
    {"grad-clip",          "clip|max-grad-norm"},
    {"hid-sz",             "d-model|embedding-dim|hidden-size|n-embd"},
    {"init-from",          "model-name-or-path"},
    {"inner-hid-sz",       "d-ff|d-inner|intermediate-size"},
    {"interactive",        "chat|cnv|conversation|i"},
    {"log-every",          "log-interval|logging-steps"},
    {"lr",                 "learning-rate"},
    {"lr-min",             "min-lr"},
    {"lr-warmup",          "warmup|warmup-iters|warmup-steps"},
    {"mem",                "mem-len"},
    {"nheads",             "heads|n-head|n-heads|num-attention-heads|num-heads"},
    {"nlayers",            "depth|layers|n-layer|n-layers|num-hidden-layers|num-layers"},
    {"optim",              "optimizer"},
    {"out",                "out-dir|output-dir"},
    {"pieces",             "tokenizer|vocab-file"},
    {"precision",          "bf16|dtype|fp16"},
    {"prompt",             "f|p"},
    {"recompute",          "gradient-checkpointing"},
    {"repetition-penalty", "repeat-penalty"},
    {"repetition-window",  "repeat-last-n"},
    {"save-every",         "save-interval|save-steps"},
    {"schedule",           "decay-lr|lr-decay|lr-scheduler-type|scheduler"},
    {"seed",               "s"},
    {"steps",              "epochs|iterations|max-epochs|max-iters|max-steps|n-epochs|num-epochs|"
                           "num-steps|num-train-epochs|train-iters"},
    {"temperature",        "temp"},
    {"tensorboard",        "log-dir|logdir|logging-dir"},
    {"threads",            "num-threads|t"},
    {"update-every",       "gradient-accumulation-steps"},
    {"batch-split",        "gradient-accumulation-steps"},
    {"vocab",              "vocab-size"},
    {"weight-decay",       "wd"},
    {"weights",            "quantize"}
};

/* Nonzero if exactly one of the names `got` and `name` is negated, that is, begins with
   "no-". If `name` is negated, a `got` that begins with "no" counts as negated, because
   it may be a misspelled "no-". */
TR_DEF int tr_is_opposite(const char *got, size_t n, const char *name) {
    if (tr_same(name, "no-", 3)) return !(n > 2 && tr_same(got, "no", 2));
    return n > 3 && tr_same(got, "no-", 3);
}

/* Returns the option that an unknown name probably means: the option that has this name
   in other programs, or else the shortest option that begins with the name, or else an
   option with nearly the same spelling, or else the longest option with which the name
   begins. Returns NULL if there is none. */
TR_DEF const char *tr_guess_option(const tr_options *o, const char *name, size_t n) {
    tr_nearest best = {NULL, 0, 0};
    const tr_opt *p;
    size_t i, len;
    for (i = 0; i < sizeof tr_foreign / sizeof *tr_foreign; i++) {
        if (tr_choice_index(tr_foreign[i].theirs, name, n) < 0) continue;
        p = tr_find_option(o, tr_foreign[i].ours, strlen(tr_foreign[i].ours));
        if (p != NULL) return p->name;
    }

    for (p = o->opt; n > 1 && p->type != TR_T_END; p++) {
        if (p->type == TR_T_GROUP) continue;
        len = strlen(p->name);
        if (len <= n || !tr_same(name, p->name, n) || (best.name && len >= best.len)) continue;
        best.name = p->name;
        best.len = len;
    }
    if (best.name != NULL) return best.name;

    tr_consider(&best, name, n, "help", 4);
    if (o->preset != NULL) tr_consider(&best, name, n, "preset", 6);
    for (p = o->opt; p->type != TR_T_END; p++)
        if (p->type != TR_T_GROUP && !tr_is_opposite(name, n, p->name))
            tr_consider(&best, name, n, p->name, strlen(p->name));
    if (best.name != NULL) return best.name;

    for (p = o->opt; p->type != TR_T_END; p++) {
        if (p->type == TR_T_GROUP) continue;
        len = strlen(p->name);
        if (len >= n || len <= best.len || tr_dash(name[len]) != '-') continue;
        if (!tr_same(name, p->name, len)) continue;
        best.name = p->name;
        best.len = len;
    }
    return best.name;
}

TR_DEF int tr_unknown_option(const tr_options *o, const char *name, size_t n, char *err,
                             size_t size) {
    tr_nearest best = {NULL, 0, 0};
    const char *meant = tr_guess_option(o, name, n), *no = "";
    const tr_opt *p;
    int len = (int)(n < 80 ? n : 80);
    if (meant == NULL && n > 3 && tr_same(name, "no-", 3)) {
        for (p = o->opt; p->type != TR_T_END; p++)
            if ((p->type == TR_T_FLAG || p->type == TR_T_SET) && !tr_same(p->name, "no-", 3))
                tr_consider(&best, name + 3, n - 3, p->name, strlen(p->name));
        meant = best.name;
        no = "no-";
    }
    if (meant == NULL)
        return tr_fail(err, size, "--%.*s: unknown option; --help lists all options", len, name);
    return tr_fail(err, size,
                   "--%.*s: unknown option (did you mean --%s%s?); --help lists all options", len,
                   name, no, meant);
}

/* Switches one name of a TR_SET on or off, according to value ("on", "off", ..). NULL
   means on. */
TR_DEF int tr_switch_name(tr_opt *p, const char *word, int bit, const char *value, int from,
                          char *err, size_t size) {
    int on = 1, *v = (int *)p->to;
    if (value != NULL && !tr_read_flag(value, &on))
        return tr_fail(err, size, "--%.*s: expected on or off, got '%.80s'",
                       (int)strcspn(word, "="), word, value);
    if (on) *v = (*v | bit) & ~(bit << TR_REMOVED);
    else *v &= ~bit;
    if (!on && *v & TR_EVERY) *v |= bit << TR_REMOVED;
    p->from = from;
    return 1;
}

/* Applies "no-NAME". value is the text after "=", or NULL. */
TR_DEF int tr_option_off(tr_opt *p, const char *word, size_t n, const char *value, int from,
                         char *err, size_t size) {
    int bit = tr_set_member(p, word + 3, n - 3);
    if (p->type != TR_T_FLAG && p->type != TR_T_SET)
        return tr_fail(err, size, "--%.*s: --%s is not a flag and cannot be switched off", (int)n,
                       word, p->name);
    if (value != NULL)
        return tr_fail(err, size, "--no-%s: expected no value, got '%.80s'", p->name, value);
    return bit ? tr_switch_name(p, word, bit, "off", from, err, size)
               : tr_set(p, "off", from, err, size);
}

/* Nonzero if word begins with two dashes. */
TR_DEF int tr_is_option(const char *word) {
    return word[0] == '-' && word[1] == '-';
}

/* Applies one option. `word` is "name", "name=value" or "no-name", and `next` is the
   following word, or NULL. Returns the number of words used (1 or 2), or 0 on error. */
TR_DEF int tr_option(const tr_options *o, const char *word, const char *next, int from, char *err,
                     size_t size) {
    size_t n = strcspn(word, "=");
    const char *value = word[n] == '=' ? word + n + 1 : NULL;
    char expected[256];
    int no, bit, flag;
    tr_opt *p = tr_find_word(o, word, n, &no);
    if (p == NULL) return tr_unknown_option(o, word, n, err, size);
    if (no) return tr_option_off(p, word, n, value, from, err, size);

    bit = tr_set_member(p, word, n);
    if (bit) return tr_switch_name(p, word, bit, value, from, err, size);
    if (value != NULL) return tr_set(p, value, from, err, size);

    flag = p->type == TR_T_FLAG || p->type == TR_T_SET;
    if (flag && (!tr_value_is_optional(p) || next == NULL || tr_is_option(next)))
        return tr_set(p, "on", from, err, size);
    if (next != NULL && !tr_is_option(next)) return tr_set(p, next, from, err, size) ? 2 : 0;

    tr_expected(p, expected, sizeof expected);
    if (next == NULL)
        return tr_fail(err, size, "--%s: expected %s, got nothing", p->name, expected);
    return tr_fail(err, size,
                   "--%s: expected %s, got the option '%.80s' (if that is the value, write "
                   "--%s=%.80s)", p->name, expected, next, p->name, next);
}

/* Copies the next word of a line "name=value flag no-flag" and advances *line past the
   word. Returns 0 at the end, and -1 with *line unchanged if the word is too long. */
TR_DEF int tr_next_word(const char **line, char *word, size_t size) {
    const char *at = *line != NULL ? *line + strspn(*line, " ") : "";
    size_t n = strcspn(at, " ");
    if (n == 0) return 0;
    if (n >= size) return -1;
    memcpy(word, at, n);
    word[n] = 0;
    *line = at + n;
    return 1;
}

/* Applies the options in a line "name=value flag no-flag". An option whose value comes
   from a source of higher precedence keeps that value. */
TR_DEF int tr_apply(const tr_options *o, const char *line, int from, char *err, size_t size) {
    char word[256];
    int more, no;
    while ((more = tr_next_word(&line, word, sizeof word)) > 0) {
        const tr_opt *p = tr_find_word(o, word, strcspn(word, "="), &no);
        if (p != NULL && p->from > from) continue;
        if (!tr_option(o, word, NULL, from, err, size)) return 0;
    }
    if (more < 0)
        return tr_fail(err, size, "expected words of at most %zu characters, got '%.60s..'",
                       sizeof word - 1, line + strspn(line, " "));
    return 1;
}

TR_DEF int tr_apply_preset(tr_options *o, const tr_preset *preset, char *err, size_t size) {
    char why[TR_ERR];
    if (!tr_apply(o, preset->set, TR_FROM_PRESET, why, sizeof why))
        return tr_fail(err, size, "preset %s: %.900s", preset->name, why);
    snprintf(o->preset_used, sizeof o->preset_used, "%s", preset->name);
    return 1;
}

/* Resets every option to its default. */
TR_DEF int tr_reset(tr_options *o, char *err, size_t size) {
    char why[TR_ERR];
    tr_opt *p;
    o->preset_used[0] = 0;
    for (p = o->opt; p->type != TR_T_END; p++) {
        p->from = TR_FROM_DEFAULT;
        switch (p->type) {
        case TR_T_INT:
        case TR_T_FLAG:
        case TR_T_CHOICE:
        case TR_T_SET: *(int *)p->to = 0; break;
        case TR_T_SIZE: *(uint64_t *)p->to = 0; break;
        case TR_T_REAL: *(double *)p->to = 0; break;
        case TR_T_TEXT:
            *(const char **)p->to = NULL;
            free(p->own);
            p->own = NULL;
            break;
        default: break;
        }
    }
    if (!tr_apply(o, o->defaults, TR_FROM_DEFAULT, why, sizeof why))
        return tr_fail(err, size, "option table: invalid default: %.900s", why);
    return 1;
}

/* Frees the copies of text values. */
TR_DEF void tr_options_free(tr_options *o) {
    tr_opt *p;
    for (p = o->opt; p->type != TR_T_END; p++) {
        if (p->own == NULL) continue;
        *(const char **)p->to = NULL;
        free(p->own);
        p->own = NULL;
    }
}

/* Applies the preset with this name. If there is none, the error lists all presets. */
TR_DEF int tr_select_preset(tr_options *o, const char *name, char *err, size_t size) {
    const tr_preset *p = tr_find_preset(o, name);
    tr_nearest best = {NULL, 0, 0};
    tr_buf names;
    if (p != NULL) return tr_apply_preset(o, p, err, size);
    if (o->preset == NULL || o->preset->name == NULL)
        return tr_fail(err, size, "--preset '%.80s': this program has no presets", name);

    memset(&names, 0, sizeof names);
    for (p = o->preset; p->name != NULL; p++) {
        tr_consider(&best, name, strlen(name), p->name, strlen(p->name));
        tr_buf_printf(&names, "%s%s", names.n ? ", " : "", p->name);
    }
    if (best.name != NULL)
        tr_fail(err, size, "--preset: expected one of %s, got '%.80s' (did you mean %s?)",
                names.oom ? "" : names.s, name, best.name);
    else
        tr_fail(err, size, "--preset: expected one of %s, got '%.80s'", names.oom ? "" : names.s,
                name);
    tr_buf_free(&names);
    return 0;
}

/* Writes the value of a TR_SET: "true", "false", a list of names, or "all,no-b". */
TR_DEF void tr_set_text(const tr_opt *p, char out[64]) {
    const char *name, *no = "";
    size_t len, at = 0;
    int k, v = *(int *)p->to;
    strcpy(out, v & TR_EVERY ? "true" : "false");
    if (v & TR_EVERY) {
        v = tr_set_removed(v);
        no = "no-";
        if (v) at = (size_t)snprintf(out, 64, "all");
    }
    for (k = 0; v && (name = tr_choice(p->choices, k, &len)) != NULL; k++) {
        if (!(v >> k & 1) || at + len + 5 > 64) continue;
        at += (size_t)snprintf(out + at, 64 - at, "%s%s%.*s", at ? "," : "", no, (int)len, name);
    }
}

/* Writes the current value in JSON form but without quotes. For a text option, writes
   "". */
TR_DEF void tr_value(const tr_opt *p, char out[64]) {
    size_t len = 0;
    const char *s;
    out[0] = 0;
    switch (p->type) {
    case TR_T_INT: snprintf(out, 64, "%d", *(int *)p->to); break;
    case TR_T_SIZE: snprintf(out, 64, "%" PRIu64, *(uint64_t *)p->to); break;
    case TR_T_REAL: tr_number(out, *(double *)p->to); break;
    case TR_T_FLAG:
        if (tr_accepts_number(p) && *(int *)p->to == TR_AS_FITS)
            strcpy(out, "auto");
        else if (tr_accepts_number(p) && *(int *)p->to && *(int *)p->to != TR_ALL)
            snprintf(out, 64, "%d", *(int *)p->to);
        else
            strcpy(out, *(int *)p->to ? "true" : "false");
        break;
    case TR_T_CHOICE:
        s = *(int *)p->to < 0 ? NULL : tr_choice(p->choices, *(int *)p->to, &len);
        if (s != NULL) snprintf(out, 64, "%.*s", (int)(len < 63 ? len : 63), s);
        break;
    case TR_T_SET: tr_set_text(p, out); break;
    default: break;
    }
}

/* Checks one row of the option table: its name and its default. */
TR_DEF int tr_check_row(const tr_opt *p, char *err, size_t size) {
    const size_t n = strlen(p->name);
    const tr_opt *q;
    char text[64];
    int ok = 1;
    if (tr_same_name(p->name, n, "help") || tr_same_name(p->name, n, "preset") || n == 0 || n > 63)
        return tr_fail(err, size, "option table: the name '%.80s' is reserved, empty or too long",
                       p->name);
    for (q = p + 1; q->type != TR_T_END; q++)
        if (q->type != TR_T_GROUP && tr_same_name(p->name, n, q->name))
            return tr_fail(err, size, "option table: --%s is declared twice", p->name);

    tr_value(p, text);
    if (p->type == TR_T_INT) ok = tr_in_range(p, (double)*(int *)p->to);
    if (p->type == TR_T_SIZE) ok = tr_in_range(p, (double)*(uint64_t *)p->to);
    if (p->type == TR_T_REAL) ok = isfinite(*(double *)p->to) && tr_in_range(p, *(double *)p->to);
    if (p->type == TR_T_CHOICE) ok = text[0] != 0;
    if (ok) return 1;
    return tr_fail(err, size, "option table: the default of --%s is out of range", p->name);
}

/* Parses one option of a preset without setting it. */
TR_DEF int tr_try_option(const tr_options *o, const char *word, char *err, size_t size) {
    union {
        int i;
        uint64_t u;
        double d;
        const char *s;
    } scratch;
    tr_opt row[2] = {TR_END, TR_END};
    tr_options only = *o;
    int no, ok;
    const size_t n = strcspn(word, "=");
    const tr_opt *p = tr_find_word(o, word, n, &no);
    if (p == NULL) return tr_unknown_option(o, word, n, err, size);
    memset(&scratch, 0, sizeof scratch);
    row[0] = *p;
    row[0].to = &scratch;
    row[0].own = NULL;
    row[0].from = TR_FROM_DEFAULT;
    only.opt = row;
    ok = tr_option(&only, word, NULL, TR_FROM_PRESET, err, size) != 0;
    free(row[0].own);
    return ok;
}

/* Checks the option table itself: no name occurs twice or is reserved, defaults are in
   range, and all presets can be parsed. tr_parse calls this first, so that a mistake in
   a table is found at the first start and not when a preset is used. */
TR_DEF int tr_check_table(const tr_options *o, char *err, size_t size) {
    const tr_opt *p;
    const tr_preset *preset;
    char word[256], why[TR_ERR];
    for (p = o->opt; p->type != TR_T_END; p++)
        if (p->type != TR_T_GROUP && !tr_check_row(p, err, size)) return 0;

    for (preset = o->preset; preset != NULL && preset->name != NULL; preset++) {
        const char *line = preset->set;
        int more;
        if (strlen(preset->name) >= sizeof o->preset_used)
            return tr_fail(err, size, "preset %.80s: the name is too long", preset->name);
        while ((more = tr_next_word(&line, word, sizeof word)) > 0)
            if (!tr_try_option(o, word, why, sizeof why))
                return tr_fail(err, size, "preset %s: %.900s", preset->name, why);
        if (more < 0)
            return tr_fail(err, size, "preset %s: expected words of at most %zu characters",
                           preset->name, sizeof word - 1);
    }
    return 1;
}

/* Appends text, wrapped at `width` columns. Continuation lines begin at column `at`,
   where the cursor must already be. */
TR_DEF void tr_wrap(tr_buf *b, const char *text, size_t at, size_t width) {
    size_t column = at, n;
    while (*(text += strspn(text, " ")) != 0) {
        n = strcspn(text, " ");
        if (column > at && column + 1 + n > width) {
            tr_buf_puts(b, "\n");
            tr_buf_fill(b, ' ', at);
            column = at;
        }
        if (column > at) {
            tr_buf_puts(b, " ");
            column++;
        }
        tr_buf_put(b, text, n);
        column += n;
        text += n;
    }
    tr_buf_puts(b, "\n");
}

/* Returns the number of columns of the terminal at a file descriptor, or 0 if it is
   not a terminal. */
TR_DEF size_t tr_columns(int fd) {
    struct winsize w;
    memset(&w, 0, sizeof w);
    if (!isatty(fd)) return 0;
    if (ioctl(fd, TIOCGWINSZ, &w) == 0 && w.ws_col > 0) return w.ws_col;
    return 80;
}

/* Maximum length of a value in the "default" column. After a longer value, the help
   text begins on the next line. */
#define TR_HELP_DEFAULT 12

/* Column widths of the help, and the width of the whole text. */
typedef struct {
    size_t name, value, width;
} tr_help_layout;

TR_DEF void tr_help_row(tr_buf *b, const tr_help_layout *c, const char *name, const char *value,
                        const char *text) {
    size_t at = 2 + c->name + 2 + c->value + 2;
    tr_buf_printf(b, "  %-*s  %s", (int)c->name, name, value);
    if (strlen(value) > c->value) {
        tr_buf_puts(b, "\n");
        tr_buf_fill(b, ' ', at);
    } else {
        tr_buf_fill(b, ' ', c->value - strlen(value) + 2);
    }
    tr_wrap(b, text, at, c->width);
}

/* Writes "--name" and the kind of value that an option takes. */
TR_DEF void tr_help_name(const tr_opt *p, char name[96]) {
    static const char *const word[] = {"", "", " N", " N", " X", " TEXT", "", " NAME", " [NAMES]"};
    const char *takes = tr_accepts_number(p) ? " [N]" : word[p->type];
    if (p->type == TR_T_SET && *p->choices == 0) takes = "";
    snprintf(name, 96, "--%s%s", p->name, takes);
}

/* Returns the current value for the default column. `value` is a buffer for it. */
TR_DEF const char *tr_help_value(const tr_opt *p, char value[64]) {
    const char *text = p->type == TR_T_TEXT ? *(const char **)p->to : NULL;
    if (p->type == TR_T_TEXT) return text != NULL && *text ? text : "-";
    tr_value(p, value);
    if (p->type != TR_T_FLAG && p->type != TR_T_SET) return value;
    if (strcmp(value, "true") == 0) return "on";
    return strcmp(value, "false") == 0 ? "off" : value;
}

/* Writes the description of an option: its help, its choices and how to switch it
   off. */
TR_DEF void tr_help_text(const tr_opt *p, tr_buf *text) {
    text->n = 0;
    tr_buf_puts(text, p->help != NULL ? p->help : "");
    if (p->type == TR_T_CHOICE) tr_buf_printf(text, " (%s)", p->choices);
    if (p->type == TR_T_SET && *p->choices != 0)
        tr_buf_printf(text, " (%s, separated by commas; without names, all that apply)",
                      p->choices);
    if ((p->type == TR_T_FLAG || p->type == TR_T_SET) && *(int *)p->to)
        tr_buf_printf(text, " (switch off: --no-%s)", p->name);
}

TR_DEF void tr_help_presets(const tr_preset *preset, tr_buf *b, size_t width) {
    const tr_preset *p;
    size_t column = 0;
    for (p = preset; p->name != NULL; p++)
        if (strlen(p->name) > column) column = strlen(p->name);
    tr_buf_puts(b, "\nPresets\n");
    for (p = preset; p->name != NULL; p++) {
        tr_buf_printf(b, "  %-*s  ", (int)column, p->name);
        tr_wrap(b, p->about != NULL ? p->about : "", column + 4, width);
    }
}

/* Appends the help text to b. The "default" column shows the current values, so that
   after --preset NAME it shows the preset's values. */
TR_DEF void tr_help(const tr_options *o, tr_buf *b, size_t width) {
    const char *head = o->preset_used[0] ? "value" : "default";
    const tr_opt *p;
    tr_help_layout c;
    char name[96], value[64];
    size_t n;
    tr_buf text;
    memset(&text, 0, sizeof text);
    c.name = strlen("--preset NAME");
    c.value = strlen(head);
    c.width = width;
    for (p = o->opt; p->type != TR_T_END; p++) {
        if (p->type == TR_T_GROUP) continue;
        tr_help_name(p, name);
        if (strlen(name) > c.name) c.name = strlen(name);
        n = strlen(tr_help_value(p, value));
        if (n > c.value && n <= TR_HELP_DEFAULT) c.value = n;
    }

    tr_buf_printf(b, "usage: %s%s [--option value ...]\n\n", o->program,
                  o->preset != NULL ? " [--preset NAME]" : "");
    if (o->about != NULL) {
        tr_wrap(b, o->about, 0, width);
        tr_buf_puts(b, "\n");
    }
    if (o->preset_used[0])
        tr_buf_printf(b, "Values are those of --preset %s.\n\n", o->preset_used);
    tr_help_row(b, &c, "option", head, "meaning");
    tr_help_row(b, &c, "--help", "",
                "print this help and exit; with --preset NAME, show that preset's values");
    if (o->preset != NULL)
        tr_help_row(b, &c, "--preset NAME", o->preset_used[0] ? "" : "-",
                    "start from the settings of a preset (listed below); other options override "
                    "them");

    for (p = o->opt; p->type != TR_T_END; p++) {
        if (p->type == TR_T_GROUP) {
            tr_buf_printf(b, "\n%s\n", p->name);
            continue;
        }
        tr_help_name(p, name);
        tr_help_text(p, &text);
        tr_help_row(b, &c, name, tr_help_value(p, value), text.s != NULL ? text.s : "");
    }

    if (o->preset != NULL && o->preset->name != NULL) tr_help_presets(o->preset, b, width);
    if (o->after != NULL) {
        tr_buf_puts(b, "\n");
        tr_wrap(b, o->after, 0, width);
    }
    if (text.oom) b->oom = 1;
    tr_buf_free(&text);
}

/* Prints the help to standard output. Returns 2, or 0 on error. */
TR_DEF int tr_print_help(const tr_options *o, char *err, size_t size) {
    size_t width = tr_columns(1);
    tr_buf b;
    int ok;
    if (width < 60) width = 100;
    if (width > 120) width = 120;
    memset(&b, 0, sizeof b);
    tr_help(o, &b, width);
    if (b.oom) errno = ENOMEM;
    ok = !b.oom && fwrite(b.s, 1, b.n, stdout) == b.n && fflush(stdout) == 0;
    tr_buf_free(&b);
    return ok ? 2 : tr_fail(err, size, "cannot print the help: %s", strerror(errno));
}

/* Reports a word that does not begin with two dashes. `flag` is the flag before it, or
   NULL. */
TR_DEF int tr_not_option(const tr_options *o, const char *word, const tr_opt *flag, char *err,
                         size_t size) {
    if (flag != NULL)
        return tr_fail(err, size,
                       "--%s: expected no value after a flag, got '%.80s' (write --%s, --no-%s or "
                       "--%s=off)",
                       flag->name, word, flag->name, flag->name, flag->name);
    if (word[0] == '-') {
        size_t n = strcspn(word + 1, "=");
        const tr_opt *p = tr_find_option(o, word + 1, n);
        const char *meant = p != NULL ? p->name : tr_guess_option(o, word + 1, n);
        if (meant != NULL)
            return tr_fail(err, size,
                           "%.80s: unknown option (did you mean --%s?); --help lists all options",
                           word, meant);
    }
    return tr_fail(err, size,
                   "expected an option, got '%.80s': options begin with --, and --help lists them",
                   word);
}

/* The first pass over the command line: finds --preset and --help, and reports words
   that are neither options nor values. */
TR_DEF int tr_scan(const tr_options *o, int argc, char **argv, const char **preset, int *help,
                   char *err, size_t size) {
    const tr_opt *p, *flag = NULL;
    int i, used, no;
    for (i = 1; i < argc; i += used) {
        const char *next = i + 1 < argc && !tr_is_option(argv[i + 1]) ? argv[i + 1] : NULL;
        const char *word, *value;
        size_t n;
        used = 1;
        if (strcmp(argv[i], "-h") == 0) {       /* the only short option, by convention */
            *help = 1;
            continue;
        }
        if (!tr_is_option(argv[i]) || argv[i][2] == 0)
            return tr_not_option(o, argv[i], flag, err, size);

        word = argv[i] + 2;
        n = strcspn(word, "=");
        value = word[n] == '=' ? word + n + 1 : NULL;
        flag = NULL;
        if (tr_same_name(word, n, "help")) {
            *help = 1;
        } else if (tr_same_name(word, n, "preset")) {
            *preset = value != NULL ? value : next;
            if (*preset == NULL)
                return tr_fail(err, size, "--preset: expected the name of a preset, got nothing; "
                               "--help lists them");
            if (value == NULL) used = 2;
        } else {
            p = tr_find_word(o, word, n, &no);
            if (p == NULL) return tr_unknown_option(o, word, n, err, size);
            if (no || value != NULL) continue;
            if (p->type == TR_T_FLAG && !tr_accepts_number(p)) flag = p;
            else if (next != NULL && !tr_set_member(p, word, n)) used = 2;
        }
    }
    return 1;
}

/* Parses the command line. Returns 1 if the program should continue. Returns 2 if the
   help was printed to standard output and the program should exit with status 0. On
   error, returns 0 with a message in err, which the program should print before it
   exits with status 2 (or 1 if ferror(stdout): the help could not be printed). */
TR_DEF int tr_parse(tr_options *o, int argc, char **argv, char *err, size_t size) {
    const char *preset = NULL;
    int i, used, help = 0;
    if (!tr_reset(o, err, size) || !tr_check_table(o, err, size)) return 0;
    if (!tr_scan(o, argc, argv, &preset, &help, err, size)) return 0;
    if (preset != NULL && !tr_select_preset(o, preset, err, size)) return 0;
    if (help) return tr_print_help(o, err, size);

    for (i = 1; i < argc; i += used) {
        const char *word = argv[i] + 2;
        if (tr_same_name(word, strcspn(word, "="), "preset")) {
            used = strchr(word, '=') != NULL ? 1 : 2;
            continue;
        }
        used = tr_option(o, word, i + 1 < argc ? argv[i + 1] : NULL, TR_FROM_ARGS, err, size);
        if (!used) return 0;
    }
    return 1;
}

/* An option that has an effect only under a condition. If the condition does not hold,
   giving the option is an error, unless its value is 0 or off. */
typedef struct tr_only {
    const char *name;
    int         counts;     /* nonzero if the condition holds */
    const char *with;       /* the condition in words, for the error */
} tr_only;

TR_DEF int tr_check_only(const tr_options *o, const tr_only *only, size_t n, char *err,
                         size_t size) {
    char value[64];
    size_t i;
    for (i = 0; i < n; i++) {
        const tr_opt *p = tr_find_option(o, only[i].name, strlen(only[i].name));
        int off;
        if (p == NULL || p->from != TR_FROM_ARGS || only[i].counts) continue;
        tr_value(p, value);
        off = strcmp(value, "0") == 0 || strcmp(value, "false") == 0;
        if (off && p->type != TR_T_TEXT && p->type != TR_T_CHOICE) continue;
        return tr_fail(err, size, "--%s has no effect: it applies only to %s", only[i].name,
                       only[i].with);
    }
    return 1;
}

/* Nonzero if this value, as written by tr_value, is a string in JSON. */
TR_DEF int tr_is_json_string(const tr_opt *p, const char *value) {
    if (p->type == TR_T_SET) return strcmp(value, "true") != 0 && strcmp(value, "false") != 0;
    return p->type == TR_T_TEXT || p->type == TR_T_CHOICE
           || (tr_accepts_number(p) && strcmp(value, "auto") == 0);
}

/* Appends the option's value as JSON. */
TR_DEF void tr_json_value(tr_buf *b, const tr_opt *p) {
    char value[64];
    tr_value(p, value);
    if (p->type == TR_T_TEXT) tr_json_string(b, *(const char **)p->to);
    else if (tr_is_json_string(p, value)) tr_json_string(b, value);
    else tr_buf_puts(b, value);
}

/* Returns one JSON object with the name of the preset and all options or, if kept is 1,
   only those that a checkpoint stores. The caller frees it. Returns NULL if memory runs
   out. */
TR_DEF char *tr_options_json(const tr_options *o, int kept) {
    tr_buf b;
    const tr_opt *p;
    memset(&b, 0, sizeof b);
    tr_buf_puts(&b, "{\"preset\":");
    tr_json_string(&b, o->preset_used[0] ? o->preset_used : NULL);
    for (p = o->opt; p->type != TR_T_END; p++) {
        if (p->type == TR_T_GROUP || (kept && p->keep == TR_LOCAL)) continue;
        tr_buf_puts(&b, ",");
        tr_json_string(&b, p->name);
        tr_buf_puts(&b, ":");
        tr_json_value(&b, p);
    }
    tr_buf_puts(&b, "}");
    if (b.oom) {
        tr_buf_free(&b);
        return NULL;
    }
    return b.s;
}

/* The results of tr_options_adopt: lists in text form, such as "--lr 0.03 (0.003),
   --steps 900 (800)". A list is empty if there is nothing to report. */
typedef struct {
    tr_buf changed;     /* TR_FREE options that were given and differ from the checkpoint,
                           each with the new value and, in parentheses, the checkpoint's
                           value */
    tr_buf json;        /* the same options in JSON form, with the checkpoint's value first:
                           {"lr":[0.003,0.03],..} */
    tr_buf given;       /* options that the checkpoint lacks and that were given */
    tr_buf missing;     /* options that the checkpoint lacks and that were not given:
                           training must not resume with their defaults */
} tr_adopted;

TR_DEF void tr_adopted_free(tr_adopted *a) {
    tr_buf_free(&a->changed);
    tr_buf_free(&a->json);
    tr_buf_free(&a->given);
    tr_buf_free(&a->missing);
}

/* Reads a TR_SET from a checkpoint that stores it as one flag per name, such as
   "literal-rows":true. Writes the names that are on, or "false", to `list`. Returns 1 on
   success, 0 if there is no such flag, or -1 if the checkpoint is malformed. */
TR_DEF int tr_find_flags(const tr_opt *p, const char *json, char *list, size_t size) {
    char key[160], text[16];
    const char *name;
    size_t len, at = 0;
    int k, found, some = 0, on;
    for (k = 0; (name = tr_choice(p->choices, k, &len)) != NULL; k++) {
        snprintf(key, sizeof key, "%.60s-%.*s", p->name, (int)len, name);
        found = tr_json_find(json, key, text, sizeof text);
        if (found < 0 || (found && !tr_read_flag(text, &on))) return -1;
        if (!found) continue;
        some = 1;
        if (on && at + len + 2 < size)
            at += (size_t)snprintf(list + at, size - at, "%s%.*s", at ? "," : "", (int)len, name);
    }
    if (some && !at) snprintf(list, size, "false");
    return some;
}

/* Nonzero if a TR_SET agrees with the checkpoint. If `all` is 0, bits that affect only
   training are not compared. */
TR_DEF int tr_set_agrees(const tr_opt *p, const char *saved, int all) {
    tr_nearest none = {NULL, 0, 0};
    int theirs, differ;
    if (!tr_read_set(p, saved, &theirs, &none)) return 0;
    differ = tr_set_bits(p, *(int *)p->to) ^ tr_set_bits(p, theirs);
    return (differ & ~(all ? 0 : p->open)) == 0;
}

/* Reports a value that differs from the checkpoint's and cannot be used. now and saved
   are NULL for a text option without a text. */
TR_DEF int tr_conflict(const tr_options *o, const tr_opt *p, const char *now, const char *saved,
                       int why_opened, char *err, size_t size) {
    int preset = p->from == TR_FROM_PRESET;
    return tr_fail(err, size,
                   "--%s is %.200s here (from %s%.80s) but %.200s in the checkpoint: leave %s out "
                   "to %s", p->name, now != NULL ? now : "none",
                   preset ? "--preset " : "the command line", preset ? o->preset_used : "",
                   saved != NULL ? saved : "none", preset ? "--preset" : "it",
                   why_opened == TR_INIT ? "start from its weights"
                                         : "resume that run, or name another checkpoint file");
}

/* Records that a TR_FREE option differs from the checkpoint. now and saved are NULL for
   a text option without a text. */
TR_DEF void tr_changed(const tr_opt *p, const char *now, const char *saved, tr_adopted *a) {
    tr_buf_printf(&a->changed, "%s--%s %s (%s)", a->changed.n ? ", " : "", p->name,
                  now != NULL ? now : "none", saved != NULL ? saved : "none");
    tr_buf_puts(&a->json, a->json.n ? "," : "{");
    tr_json_string(&a->json, p->name);
    tr_buf_puts(&a->json, ":[");
    if (saved == NULL || tr_is_json_string(p, saved)) tr_json_string(&a->json, saved);
    else tr_buf_puts(&a->json, saved);
    tr_buf_puts(&a->json, ",");
    tr_json_value(&a->json, p);
    tr_buf_puts(&a->json, "]");
}

/* Applies tr_options_adopt to one option. Returns 0 on error. */
TR_DEF int tr_adopt(const tr_options *o, tr_opt *p, const char *json, int why_opened,
                    tr_adopted *a, char *err, size_t size) {
    const int keep = p->keep & ~(TR_LATER | TR_KEPT), given = p->from >= TR_FROM_PRESET;
    char text[4096], value[64], why[TR_ERR];
    const char *saved = text, *now = value;
    int found;
    if (p->type == TR_T_GROUP || keep == TR_LOCAL) return 1;
    if (why_opened == TR_INIT && keep != TR_MODEL && !(p->keep & TR_KEPT)) return 1;

    found = tr_json_find(json, p->name, text, sizeof text);
    if (found == 0 && p->type == TR_T_SET) found = tr_find_flags(p, json, text, sizeof text);
    if (found < 0)
        return tr_fail(err, size, "the checkpoint's configuration is malformed: cannot read --%s",
                       p->name);
    if (found == 0) {
        tr_buf *list = given ? &a->given : &a->missing;
        if (keep != TR_HINT && !(p->keep & TR_LATER) && why_opened != TR_INIT)
            tr_buf_printf(list, "%s--%s", list->n ? ", " : "", p->name);
        return 1;
    }

    if (p->type == TR_T_TEXT && strcmp(text, "null") == 0) saved = NULL;
    if (!given && saved == NULL) {
        *(const char **)p->to = NULL;
        p->from = TR_FROM_CHECKPOINT;
        return 1;
    }
    if (!given) {
        if (tr_set(p, saved, TR_FROM_CHECKPOINT, why, sizeof why)) return 1;
        return tr_fail(err, size, "the checkpoint's configuration is invalid: %.900s", why);
    }

    /* accept a given value if it equals the checkpoint's or may differ from it */
    tr_value(p, value);
    if (p->type == TR_T_TEXT) now = *(const char **)p->to;
    if (now == NULL && saved == NULL) return 1;
    if (now != NULL && saved != NULL && strcmp(now, saved) == 0) return 1;
    if (p->type == TR_T_SET && tr_set_agrees(p, saved, why_opened == TR_RESUME)) return 1;
    if (keep == TR_HINT || (why_opened != TR_RESUME && keep != TR_MODEL)) return 1;
    if (keep != TR_FREE) return tr_conflict(o, p, now, saved, why_opened, err, size);
    tr_changed(p, now, saved, a);
    return 1;
}

/* Takes options from a checkpoint. json is the object written by tr_options_json;
   why_opened is TR_LOOK, TR_RESUME or TR_INIT. An option that is not TR_LOCAL takes the
   checkpoint's value, keeps the given value, or causes an error, depending on its
   class: see "Resuming" in the manual. An option that a preset sets counts as given. */
TR_DEF int tr_options_adopt(tr_options *o, const char *json, int why_opened, tr_adopted *a,
                            char *err, size_t size) {
    char preset[sizeof o->preset_used];
    tr_opt *p;
    int ok = 1;
    memset(a, 0, sizeof *a);
    for (p = o->opt; ok && p->type != TR_T_END; p++)
        ok = tr_adopt(o, p, json, why_opened, a, err, size);
    if (a->json.n) tr_buf_puts(&a->json, "}");
    if (ok && (a->changed.oom || a->json.oom || a->given.oom || a->missing.oom))
        ok = tr_fail(err, size, "out of memory: cannot read the checkpoint's options");
    if (!ok) {
        tr_adopted_free(a);
        return 0;
    }

    if (why_opened != TR_INIT && !o->preset_used[0]
        && tr_json_find(json, "preset", preset, sizeof preset) == 1
        && strcmp(preset, "null") != 0)
        strcpy(o->preset_used, preset);
    return 1;
}


// >>files: replacing whole files, exclusive access, appending, directories --------------

/* Calls write(2) until everything is written. Restarts after EINTR, because our signal
   handlers (without SA_RESTART) interrupt system calls; stdio would then lose data.
   Returns 0 with errno set on failure. */
TR_DEF int tr_write_all(int fd, const void *bytes, size_t n) {
    const char *p = (const char *)bytes;
    while (n > 0) {
        ssize_t k = write(fd, p, n);
        if (k < 0 && errno == EINTR) continue;
        if (k < 0) return 0;
        if (k == 0) {
            errno = ENOSPC;
            return 0;
        }
        p += k;
        n -= (size_t)k;
    }
    return 1;
}

/* Removes an open file. On POSIX, the file is removed before it is closed, so that no
   other process can lock it in between. Windows can remove only closed files. */
TR_DEF void tr_unlink_open(const char *path, int *fd) {
#ifdef _WIN32
    if (*fd >= 0) close(*fd);
    *fd = -1;
#else
    (void)fd;
#endif
    unlink(path);
}

/* Connects closed standard streams to /dev/null, so that the next file that is opened
   does not get one of their descriptors and receive the program's output. Reads and
   writes on these streams fail, so lost output is still reported as an error. Call this
   at the start of main. (Windows reserves the three descriptors.) */
TR_DEF void tr_standard_streams(void) {
#ifndef _WIN32
    int fd;
    for (fd = 0; fd < 3; fd++) {
        if (fcntl(fd, F_GETFD) >= 0 || errno != EBADF) continue;
        if (open("/dev/null", fd == 0 ? O_WRONLY : O_RDONLY) != fd) return;
    }
#endif
}

/* Returns the last component of path. */
TR_DEF const char *tr_name_of(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash != NULL ? slash + 1 : path;
}

/* Returns "dir/." for "dir/name", and "." for "name". The caller frees it. Returns NULL
   if memory runs out. */
TR_DEF char *tr_dir_of(const char *path) {
    size_t n = (size_t)(tr_name_of(path) - path);
    char *dir = (char *)malloc(n + 2);
    if (dir == NULL) return NULL;
    memcpy(dir, path, n);
    memcpy(dir + n, ".", 2);
    return dir;
}

/* Returns the maximum length of a file name in the directory of path. */
TR_DEF size_t tr_name_max(const char *path) {
    long n = -1;
#ifndef _WIN32
    char *dir = tr_dir_of(path);
    if (dir != NULL) n = pathconf(dir, _PC_NAME_MAX);
    free(dir);
#else
    (void)path;
#endif
    return n > 0 ? (size_t)n : 255;
}

/* Returns path with mark appended. If the file name would become too long, a hash
   replaces the end of the old name. The caller frees the result. Returns NULL if memory
   runs out. */
TR_DEF char *tr_path_next_to(const char *path, const char *mark) {
    const char *name = tr_name_of(path);
    size_t dir = (size_t)(name - path), n = strlen(name), k = strlen(mark);
    size_t most = tr_name_max(path), capacity = dir + n + k + 16;
    char hash[16] = "", *out = (char *)malloc(capacity);
    if (out == NULL) return NULL;
    if (n + k > most && most > k + 16) {
        snprintf(hash, sizeof hash, "~%08" PRIx32, (uint32_t)tr_hash(TR_HASH_BEGIN, name, n));
        n = most - k - strlen(hash);
        /* do not cut inside a UTF-8 sequence */
        while (n > 0 && ((unsigned char)name[n] & 0xC0) == 0x80) n--;
    }
    snprintf(out, capacity, "%.*s%s%s", (int)(dir + n), path, hash, mark);
    return out;
}

/* Returns the path at the end of a chain of symbolic links; the file need not exist.
   The caller frees it. Returns NULL with errno set on failure. (realpath is not in base
   POSIX.) */
TR_DEF char *tr_resolve_links(const char *path) {
    size_t capacity = strlen(path) + 4097, dir;
    char *here = (char *)malloc(capacity), *next;
    char link[4096];
    ssize_t n;
    int hops;
    if (here == NULL) return NULL;
    strcpy(here, path);
    for (hops = 0; hops < 40; hops++) {
        n = readlink(here, link, sizeof link - 1);
        if (n < 0 && (errno == EINVAL || errno == ENOENT)) return here;     /* not a link */
        if (n < 0) {
            free(here);
            return NULL;
        }

        /* a relative target starts from the directory of the link */
        link[n] = 0;
        dir = link[0] != '/' ? (size_t)(tr_name_of(here) - here) : 0;
        if (dir + (size_t)n >= capacity) {
            next = (char *)realloc(here, dir + sizeof link);
            if (next == NULL) {
                free(here);
                return NULL;
            }
            here = next;
            capacity = dir + sizeof link;
        }
        memcpy(here + dir, link, (size_t)n + 1);
    }
    free(here);
    errno = ELOOP;
    return NULL;
}

/* Locks an open file until this process closes any descriptor of the file, or ends.
   Returns 1 if the file is locked, 0 if another process holds the lock, and -1 if the
   file system does not support locks. *pid receives the process that holds the lock, or
   0 if it is unknown. */
TR_DEF int tr_lock(int fd, long *pid) {
#ifdef _WIN32
    *pid = 0;
    return tr_win_lock(fd);
#else
    struct flock l;
    *pid = 0;
    memset(&l, 0, sizeof l);
    l.l_type = F_WRLCK;
    l.l_whence = SEEK_SET;
    if (fcntl(fd, F_SETLK, &l) == 0) return 1;
    if (errno != EACCES && errno != EAGAIN) return -1;
    if (fcntl(fd, F_GETLK, &l) == 0 && l.l_type != F_UNLCK && l.l_pid > 0) *pid = (long)l.l_pid;
    return 0;
#endif
}

/* Like tr_lock, but for a file that was opened only for reading. The lock is shared,
   but the function also returns 0 if another process has a shared lock. */
TR_DEF int tr_lock_read_only(int fd, long *pid) {
#ifdef _WIN32
    (void)fd;
    *pid = 0;
    return -1;
#else
    struct flock l;
    int got;
    *pid = 0;
    memset(&l, 0, sizeof l);
    l.l_type = F_RDLCK;
    l.l_whence = SEEK_SET;
    got = fcntl(fd, F_SETLK, &l) == 0;
    if (!got && errno != EACCES && errno != EAGAIN) return -1;
    l.l_type = F_WRLCK;
    if (fcntl(fd, F_GETLK, &l) != 0) return -1;
    if (l.l_type != F_UNLCK && l.l_pid > 0) *pid = (long)l.l_pid;
    return got && l.l_type == F_UNLCK;
#endif
}

/* Creates a new file and locks it. Removes an existing regular file that no process has
   locked, because a killed process left it behind. Returns -1 with errno set on
   failure; EEXIST means that the name is in use. */
TR_DEF int tr_open_new(const char *path, int mode) {
    struct stat st;
    long pid;
    int fd, round, stale;
    for (round = 0; round < 3; round++) {
        fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, mode);
        if (fd >= 0) {
            /* if these checks fail, another process has locked and removed the new
               file: retry */
            if (tr_lock(fd, &pid) != 0 && fstat(fd, &st) == 0 && st.st_nlink > 0) return fd;
            close(fd);
            continue;
        }
        if (errno != EEXIST || lstat(path, &st) != 0 || !S_ISREG(st.st_mode)) return -1;
        fd = open(path, O_WRONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
        stale = fd >= 0 && tr_lock(fd, &pid) == 1;
        if (stale) tr_unlink_open(path, &fd);
        if (fd >= 0) close(fd);
        if (!stale) break;
    }
    errno = EEXIST;
    return -1;
}

/* Makes a rename durable if the system can flush directories. */
TR_DEF void tr_flush_dir_of(const char *path) {
#ifndef _WIN32
    char *dir = tr_dir_of(path);
    int fd = dir != NULL ? open(dir, O_RDONLY | O_CLOEXEC) : -1;
    if (fd >= 0) {
        if (fsync(fd) != 0) errno = 0;
        close(fd);
    }
    free(dir);
#else
    (void)path;
#endif
}

/* Creates a file or replaces its contents. After a kill, a full disk or an error, the
   file has either its old or its new contents. Symbolic links are followed, and the
   file mode is kept. The new contents are first written to NAME.<n>.tmp in the same
   directory. A file of this kind that a killed process left behind is removed. */
TR_DEF int tr_replace(const char *path, const void *bytes, size_t n, char *err, size_t size) {
    struct stat st;
    char mark[16], *real = tr_resolve_links(path), *temp = NULL;
    int fd = -1, k, there, ok, why;
    if (real == NULL) return tr_fail(err, size, "%s: %s", path, strerror(errno));
    there = stat(real, &st) == 0;
    for (k = 0; k < 100 && fd < 0; k++) {
        free(temp);
        snprintf(mark, sizeof mark, ".%d.tmp", k);
        temp = tr_path_next_to(real, mark);
        if (temp == NULL) break;
        fd = tr_open_new(temp, there ? 0600 : 0666);
        if (fd < 0 && errno != EEXIST) break;
    }

    ok = fd >= 0 && (!there || fchmod(fd, st.st_mode & 0777) == 0) && tr_write_all(fd, bytes, n)
         && fsync(fd) == 0;
    why = temp == NULL ? ENOMEM : errno;
#ifdef _WIN32
    if (ok && close(fd) != 0) {         /* Windows cannot rename an open file */
        ok = 0;
        why = errno;
    }
    if (ok) fd = -1;
#endif
    if (ok && rename(temp, real) != 0) {
        ok = 0;
        why = errno;
    }
    if (!ok && fd >= 0) tr_unlink_open(temp, &fd);
    if (fd >= 0) close(fd);     /* last, because closing the file releases the lock */

    if (ok)
        tr_flush_dir_of(real);
    else
        tr_fail(err, size, "%s: cannot write: %s", path, strerror(why));
    free(temp);
    free(real);
    return ok;
}

/* The exclusive right to write a file. It is a lock on FILE.lock in the same directory,
   because the file itself is replaced at each save. The lock is released when the
   process ends. A FILE.lock that a killed process left behind does not block other
   runs, and the next run removes it. */
typedef struct {
    int   fd;       /* -1 if nothing is claimed */
    char *path;     /* path of the lock file */
} tr_claim;

/* Returns the path of FILE.lock, after following links. Returns NULL with errno 0 if
   the file is a pipe or a device, which cannot be claimed. */
TR_DEF char *tr_claim_path(const char *path) {
    struct stat st;
    char *real, *lock;
    errno = 0;
    if (stat(path, &st) == 0 && !S_ISREG(st.st_mode)) return NULL;
    real = tr_resolve_links(path);
    if (real == NULL) return NULL;
    lock = tr_path_next_to(real, ".lock");
    free(real);
    errno = lock == NULL ? ENOMEM : 0;
    return lock;
}

TR_DEF int tr_refuse_claimed(const char *option, const char *path, long pid, char *err,
                             size_t size) {
    char who[64] = "";
    if (pid > 0) snprintf(who, sizeof who, " (process %ld)", pid);
    return tr_fail(err, size,
                   "--%s %.900s: another run%s is writing this file: wait until that run ends, or "
                   "name another file", option, path, who);
}

/* Nonzero if an open file can be a lock: an empty regular file. */
TR_DEF int tr_is_lock(int fd) {
    struct stat st;
    return fstat(fd, &st) == 0 && S_ISREG(st.st_mode) && st.st_size == 0;
}

TR_DEF int tr_refuse_not_lock(const char *option, const char *path, const char *lock, char *err,
                              size_t size) {
    return tr_fail(err, size,
                   "--%s %.400s: %.400s is not the lock file of a run: rename it, or name another "
                   "output file", option, path, lock);
}

/* Returns 1 if the file can be claimed. If another process has claimed it, or if
   FILE.lock is not a lock file, sets err and returns 0. Does not claim or write
   anything. */
TR_DEF int tr_unclaimed(const char *option, const char *path, char *err, size_t size) {
    const int flags = O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC;
    char *lock = tr_claim_path(path);
    long pid = 0;
    int fd = -1, ok = 1, reads;
    if (lock != NULL) fd = open(lock, O_RDWR | flags);
    reads = lock != NULL && fd < 0 && errno == EACCES;      /* another user's lock file */
    if (reads) fd = open(lock, O_RDONLY | flags);
    if (fd >= 0) {
        if (!tr_is_lock(fd)) ok = tr_refuse_not_lock(option, path, lock, err, size);
        else if ((reads ? tr_lock_read_only(fd, &pid) : tr_lock(fd, &pid)) == 0)
            ok = tr_refuse_claimed(option, path, pid, err, size);
        close(fd);
    }
    free(lock);
    return ok;
}

TR_DEF int tr_refuse_lock(const tr_claim *c, const char *option, int why, char *err, size_t size) {
    return tr_fail(err, size, "--%s: cannot create the lock file %.900s: %s", option, c->path,
                   strerror(why));
}

/* Removes a lock file that this process cannot write because it belongs to another
   user, if that user's run has ended. Returns -1 if it was removed; otherwise, sets err
   and returns 0. A shared lock prevents other runs from claiming the file in the
   meantime. */
TR_DEF int tr_claim_from_user(const tr_claim *c, const char *option, const char *path, char *err,
                              size_t size) {
    struct stat st;
    long pid = 0;
    int fd = open(c->path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC), why = errno, got = -1;
    if (fd < 0 && why == ENOENT) return tr_refuse_lock(c, option, EACCES, err, size);
    if (fd >= 0 && !tr_is_lock(fd)) {
        close(fd);
        return tr_refuse_not_lock(option, path, c->path, err, size);
    }
    if (fd >= 0) {
        got = tr_lock_read_only(fd, &pid);
        /* if st_nlink is 0, another run has already removed the file */
        if (got > 0 && fstat(fd, &st) == 0 && st.st_nlink > 0 && unlink(c->path) != 0) got = -1;
        why = errno;
        close(fd);
    }
    if (got > 0) return -1;
    if (got == 0) return tr_refuse_claimed(option, path, pid, err, size);
    return tr_fail(err, size,
                   "--%s: the lock file %.700s belongs to another user and cannot be removed (%s): "
                   "if that user's run has ended, ask the user to remove it, or name another file",
                   option, c->path, strerror(why));
}

/* Tries once to claim the file. Returns 1 on success, and 0 with err set if the file
   cannot be claimed. Returns -1 if the lock of a run that has ended was removed: try
   again. */
TR_DEF int tr_claim_try(tr_claim *c, const char *option, const char *path, char *err, size_t size) {
    struct stat st;
    long pid = 0;
    int got = 0;
    c->fd = open(c->path, O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0666);
    if (c->fd < 0 && errno == EACCES) return tr_claim_from_user(c, option, path, err, size);
    if (c->fd < 0) return tr_refuse_lock(c, option, errno, err, size);
    if (!tr_is_lock(c->fd)) {
        tr_refuse_not_lock(option, path, c->path, err, size);
    } else {
        got = tr_lock(c->fd, &pid);
        if (got < 0) return 1;      /* without lock support nothing can be claimed */
        if (got && fstat(c->fd, &st) == 0 && st.st_nlink > 0) return 1;
        if (!got) tr_refuse_claimed(option, path, pid, err, size);
    }
    close(c->fd);
    c->fd = -1;
    return got ? -1 : 0;
}

/* Claims a file; path may be NULL. On failure, sets err, returns 0, and claims
   nothing. */
TR_DEF int tr_claim_open(tr_claim *c, const char *option, const char *path, char *err,
                         size_t size) {
    int got = -1, round;
    c->fd = -1;
    c->path = path != NULL ? tr_claim_path(path) : NULL;
    if (c->path == NULL && (path == NULL || errno == 0)) return 1;
    if (c->path == NULL)
        return tr_fail(err, size, "--%s %.900s: %s", option, path, strerror(errno));

    for (round = 0; round < 100 && got < 0; round++)
        got = tr_claim_try(c, option, path, err, size);
    if (got > 0) return 1;
    if (got < 0) tr_refuse_lock(c, option, EAGAIN, err, size);
    free(c->path);
    c->path = NULL;
    return 0;
}

TR_DEF void tr_claim_close(tr_claim *c) {
    if (c->path != NULL) {
        tr_unlink_open(c->path, &c->fd);
        if (c->fd >= 0) close(c->fd);
    }
    free(c->path);
    c->path = NULL;
    c->fd = -1;
}

/* Creates a directory and its missing parents. */
TR_DEF int tr_mkdirs(const char *dir, char *err, size_t size) {
    size_t n = strlen(dir), i;
    struct stat st;
    char *path = (char *)malloc(n + 1);
    int why;
    if (path == NULL)
        return tr_fail(err, size, "%s: out of memory: cannot create the directory", dir);
    memcpy(path, dir, n + 1);
    if (n == 0) {
        free(path);
        return tr_fail(err, size, "expected the name of a directory, got ''");
    }

    for (i = 1; i <= n; i++) {
        if (path[i] != '/' && path[i] != 0) continue;
        path[i] = 0;
        why = mkdir(path, 0777) != 0 ? errno : 0;
        /* an existing directory is not an error */
        if (why && (stat(path, &st) != 0 || !S_ISDIR(st.st_mode))) {
            tr_fail(err, size, "%s: cannot create the directory %s: %s", dir, path,
                    strerror(why == EEXIST ? ENOTDIR : why));
            free(path);
            return 0;
        }
        path[i] = dir[i];
    }
    free(path);
    return 1;
}

/* Checks in advance that a file can be written, so that saving does not fail after
   hours of training. The directory must exist and be writable, and the path must be
   short enough for the names of temporary files. An existing file must be a regular
   file; if streams is 1, it can also be a pipe or a device. */
TR_DEF int tr_can_write(const char *option, const char *path, int streams, char *err, size_t size) {
    const size_t longest = 4096 - 64;           /* leaves space for suffixes such as .lock */
    struct stat link, target;
    char *dir;
    int why = 0;
    if (!*path) return tr_fail(err, size, "--%s: expected the name of a file, got ''", option);
    if (strlen(path) > longest)
        return tr_fail(err, size, "--%s: expected a path of at most %zu characters, got %zu",
                       option, longest, strlen(path));
    if (lstat(path, &link) == 0 && S_ISLNK(link.st_mode) && stat(path, &target) != 0)
        return tr_fail(err, size, "--%s %s is a symbolic link to a file that does not exist",
                       option, path);

    dir = tr_dir_of(path);
    if (dir == NULL)
        return tr_fail(err, size, "--%s %s: out of memory: cannot check the path", option, path);
    if (access(dir, W_OK | X_OK) != 0 || (access(path, W_OK) != 0 && errno != ENOENT)) why = errno;
    free(dir);
    if (why)
        return tr_fail(err, size, "--%s %s: cannot write to this file: %s", option, path,
                       strerror(why));

    if (stat(path, &target) != 0 || S_ISREG(target.st_mode)) return 1;
    if (S_ISDIR(target.st_mode))
        return tr_fail(err, size, "--%s %s: expected a file, got a directory", option, path);
    if (streams) return 1;
    return tr_fail(err, size, "--%s %s: expected a regular file, got a pipe or a device", option,
                   path);
}

/* Inserts mark before the extension: "dir/run.st" and ".best" give "dir/run.best.st".
   If the name has no extension, appends mark. The caller frees the result. Returns NULL
   if memory runs out. */
TR_DEF char *tr_path_with(const char *path, const char *mark) {
    size_t n = strlen(path), k = strlen(mark);
    const char *name = tr_name_of(path), *dot = strrchr(name, '.');
    char *out = (char *)malloc(n + k + 1);
    if (out == NULL) return NULL;
    /* a leading dot marks a hidden file, not an extension */
    if (dot == NULL || dot == name) dot = path + n;
    memcpy(out, path, (size_t)(dot - path));
    memcpy(out + (dot - path), mark, k);
    memcpy(out + (dot - path) + k, dot, (size_t)(path + n - dot) + 1);
    return out;
}

/* A file to which whole records are appended. If a record cannot be written completely
   (disk full), the part that was written is removed, so that the file remains readable,
   and nothing more is written. */
typedef struct {
    int   fd;           /* -1 if closed, unused or failed */
    int   regular;      /* 1: a regular file, from which a partial record can be removed */
    off_t end;
    char *path;
} tr_appender;

/* Appends a record. Returns 0 and sets err for the first record that cannot be written,
   and 1 otherwise. Later records are dropped. */
TR_DEF int tr_append(tr_appender *a, const void *bytes, size_t n, char *err, size_t size) {
    int why;
    if (a->fd < 0) return 1;
    if (tr_write_all(a->fd, bytes, n)) {
        a->end += (off_t)n;
        return 1;
    }
    why = errno;
    if (a->regular && ftruncate(a->fd, a->end) != 0)
        tr_fail(err, size, "%s: write failed (%s), and the partial record cannot be removed: %s",
                a->path, strerror(why), strerror(errno));
    else
        tr_fail(err, size, "%s: write failed, so later records are dropped: %s", a->path,
                strerror(why));
    close(a->fd);
    a->fd = -1;
    return 0;
}

TR_DEF int tr_append_open(tr_appender *a, const char *path, int flags, char *err, size_t size) {
    struct stat st;
    memset(a, 0, sizeof *a);
    a->fd = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC | flags, 0666);
    if (a->fd < 0) {
        int why = errno;
        tr_fail(err, size, "%s: cannot open for writing: %s", path, strerror(why));
        errno = why;        /* tr_board_open checks for EEXIST */
        return 0;
    }

    a->path = (char *)malloc(strlen(path) + 1);
    if (a->path == NULL || fstat(a->fd, &st) != 0) {
        tr_fail(err, size, "%s: cannot open for writing: %s", path, strerror(errno));
        close(a->fd);
        free(a->path);
        a->path = NULL;
        a->fd = -1;
        return 0;
    }
    strcpy(a->path, path);
    a->regular = S_ISREG(st.st_mode);
    a->end = st.st_size;
    return 1;
}

TR_DEF int tr_append_close(tr_appender *a, char *err, size_t size) {
    int ok = 1;
    /* NFS reports a full disk only when the file is closed. */
    if (a->fd >= 0 && close(a->fd) != 0 && errno != EINTR)
        ok = tr_fail(err, size, "%s: close failed: %s", a->path, strerror(errno));
    a->fd = -1;
    free(a->path);
    a->path = NULL;
    return ok;
}


// >>log: one JSON object per line -------------------------------------------------------

/* Usage:

       tr_log_begin(&log, "train");
       tr_log_int(&log, "step", 7);
       tr_log_num(&log, "loss", 1.5);
       tr_log_end(&log);

   writes {"event":"train","step":7,"loss":1.5}. If the log was opened without a path,
   the calls do nothing. */

#define TR_KEEP_ALL UINT64_MAX

typedef struct {
    tr_appender out;
    tr_buf      line;
    char        err[TR_ERR];    /* set when tr_log_end returns 0 */
} tr_log;

/* Nonzero if this line must be removed when a run resumes after `step`: its "step" is
   later, or the line is incomplete because the process was killed. Other lines are
   kept, even if they are not JSON objects. */
TR_DEF int tr_log_is_stale(const char *line, size_t n, uint64_t step) {
    char text[32];
    uint64_t at;
    if (n == 0 || line[n - 1] != '\n') return 1;
    if (strlen(line) != n || tr_json_find(line, "step", text, sizeof text) != 1) return 0;
    return tr_read_size(text, &at) && at > step;
}

TR_DEF int tr_log_unreadable(const char *path, char *err, size_t size) {
    return tr_fail(err, size, "%s: cannot read the existing log: %s", path, strerror(errno));
}

/* Rewrites the log without the lines that tr_log_is_stale selects. If there are none,
   the file is not changed. */
TR_DEF int tr_log_trim(const char *path, uint64_t step, char *err, size_t size) {
    struct stat st;
    FILE *in;
    char *line = NULL;
    size_t capacity = 0, dropped = 0;
    ssize_t n;
    tr_buf keep;
    int ok = 0;
    memset(&keep, 0, sizeof keep);
    if (stat(path, &st) != 0) return errno == ENOENT ? 1 : tr_log_unreadable(path, err, size);
    if (!S_ISREG(st.st_mode)) return 1;         /* a pipe or a device has no old lines */
    in = fopen(path, "rb");
    if (in == NULL) return tr_log_unreadable(path, err, size);

    while ((n = getline(&line, &capacity, in)) >= 0) {
        if (tr_log_is_stale(line, (size_t)n, step)) dropped++;
        else tr_buf_put(&keep, line, (size_t)n);
    }
    if (!feof(in)) tr_log_unreadable(path, err, size);      /* a read error, or out of memory */
    else if (keep.oom) tr_fail(err, size, "%s: out of memory: cannot read the existing log", path);
    else ok = 1;
    fclose(in);

    if (ok && dropped > 0) ok = tr_replace(path, keep.s != NULL ? keep.s : "", keep.n, err, size);
    free(line);
    tr_buf_free(&keep);
    return ok;
}

/* Returns 1 if the file is a log, empty or absent. Otherwise, sets err and returns 0. */
TR_DEF int tr_log_here(const char *path, char *err, size_t size) {
    static const char begin[] = "{\"event\":\"";
    char first[sizeof begin - 1];
    struct stat st;
    FILE *f = NULL;
    int is;
    if (stat(path, &st) == 0 && S_ISREG(st.st_mode) && st.st_size > 0) f = fopen(path, "rb");
    if (f == NULL) return 1;
    /* a short file may be the start of a log */
    is = memcmp(first, begin, fread(first, 1, sizeof first, f)) == 0;
    fclose(f);
    return is ? 1
              : tr_fail(err, size, "--log %s: expected a new file or the log of a run, got a file "
                        "that is not a log: choose another name", path);
}

/* Opens a log for appending. If path is NULL, nothing is logged. resume_step is the
   step after which the run resumes: lines of later steps are removed, because they will
   be written again. TR_KEEP_ALL keeps every complete line. */
TR_DEF int tr_log_open(tr_log *l, const char *path, uint64_t resume_step, char *err, size_t size) {
    memset(l, 0, sizeof *l);
    l->out.fd = -1;
    if (path == NULL) return 1;
    if (!tr_log_trim(path, resume_step, err, size)) return 0;
    return tr_append_open(&l->out, path, 0, err, size);
}

TR_DEF void tr_log_key(tr_log *l, const char *key) {
    tr_buf_puts(&l->line, l->line.n == 0 ? "{" : ",");
    tr_json_string(&l->line, key);
    tr_buf_puts(&l->line, ":");
}

TR_DEF void tr_log_str(tr_log *l, const char *key, const char *text) {
    if (l->out.fd < 0) return;
    tr_log_key(l, key);
    tr_json_string(&l->line, text);
}

TR_DEF void tr_log_num(tr_log *l, const char *key, double x) {
    char text[32];
    if (l->out.fd < 0) return;
    tr_log_key(l, key);
    tr_number(text, x);
    tr_buf_puts(&l->line, text);
}

TR_DEF void tr_log_int(tr_log *l, const char *key, uint64_t x) {
    char text[32];
    if (l->out.fd < 0) return;
    tr_log_key(l, key);
    snprintf(text, sizeof text, "%" PRIu64, x);
    tr_buf_puts(&l->line, text);
}

/* Adds a value that is already JSON, such as the result of tr_options_json. */
TR_DEF void tr_log_json(tr_log *l, const char *key, const char *json) {
    if (l->out.fd < 0) return;
    tr_log_key(l, key);
    tr_buf_puts(&l->line, json != NULL ? json : "null");
}

TR_DEF void tr_log_begin(tr_log *l, const char *event) {
    l->line.n = 0;
    l->line.oom = 0;
    tr_log_str(l, "event", event);
}

/* Writes the line in one call. Returns 0 once, when writing fails for the first time;
   l->err then says why. */
TR_DEF int tr_log_end(tr_log *l) {
    if (l->out.fd < 0) return 1;
    tr_buf_puts(&l->line, "}\n");
    if (l->line.oom)
        return tr_fail(l->err, sizeof l->err, "%s: out of memory: cannot write a record",
                       l->out.path);
    return tr_append(&l->out, l->line.s, l->line.n, l->err, sizeof l->err);
}

TR_DEF int tr_log_close(tr_log *l) {
    tr_buf_free(&l->line);
    return tr_append_close(&l->out, l->err, sizeof l->err);
}


// >>formats: human-readable numbers. Each function returns `out` ------------------------

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


// >>clock

/* Returns the time of a monotonic clock in seconds. Only differences are meaningful. */
TR_DEF double tr_seconds(void) {
    struct timespec t;
    if (clock_gettime(CLOCK_MONOTONIC, &t) != 0) return 0;
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Returns the peak memory use of this process in bytes, or 0 if it is unknown. */
TR_DEF uint64_t tr_peak_rss(void) {
    struct rusage u;
    if (getrusage(RUSAGE_SELF, &u) != 0 || u.ru_maxrss < 0) return 0;
#ifdef __APPLE__
    return (uint64_t)u.ru_maxrss;       /* bytes on macOS, KiB elsewhere */
#else
    return (uint64_t)u.ru_maxrss * 1024;
#endif
}


// >>terminal: one line that is redrawn; plain lines in pipes and files ------------------

/* Smoothed training speed. Time, steps and tokens decay with the same weight, so that
   their ratios are correct from the first step on and adapt to a new pace within about
   TR_RATE_MEMORY seconds. */
#define TR_RATE_MEMORY 20.0

typedef struct {
    double last, seconds, steps, tokens;
} tr_rate;

TR_DEF void tr_rate_start(tr_rate *r, double now) {
    memset(r, 0, sizeof *r);
    r->last = now;
}

/* Excludes the time since the last call of tr_rate_add or tr_rate_skip from the rate,
   for example the time of an evaluation or a save. */
TR_DEF void tr_rate_skip(tr_rate *r, double now) {
    r->last = now;
}

TR_DEF void tr_rate_add(tr_rate *r, double now, double steps, double tokens) {
    double dt = now - r->last, fade;
    if (!(dt >= 0)) dt = 0;
    fade = TR_RATE_MEMORY / (TR_RATE_MEMORY + dt);
    r->seconds = r->seconds * fade + dt;
    r->steps = r->steps * fade + steps;
    r->tokens = r->tokens * fade + tokens;
    r->last = now;
}

TR_DEF double tr_rate_tokens(const tr_rate *r) {
    return r->seconds > 0 ? r->tokens / r->seconds : 0;
}

/* Returns the estimated time that `steps` more steps will take, in seconds, or -1 if it
   is not yet known. */
TR_DEF double tr_rate_left(const tr_rate *r, uint64_t steps) {
    return r->seconds > 0 && r->steps > 0 ? (double)steps * r->seconds / r->steps : -1;
}

typedef struct {
    uint64_t    step, steps;    /* steps is 0 if the end is not known */
    double      loss;
    double      metric;         /* the step's loss, converted to `unit` */
    const char *unit;           /* "bpb" or "ppl"; NULL to omit the metric */
    double      best;           /* best validation result in `unit`; 0 or NaN: none */
    double      lr;
    double      tokens_per_s;
    double      left;           /* in seconds; negative to omit it */
    const char *extra;          /* ASCII text for the end of the line; may be NULL */
} tr_progress;

/* Writes a line for a pipe or a file:

       step 1200/5000  loss 1.234  1.780 bpb  lr 7.0e-02  12.3k tok/s  left 3m12s */
TR_DEF void tr_progress_line(char *out, size_t size, const tr_progress *p) {
    char loss[TR_TEXT_MAX], speed[TR_TEXT_MAX], text[TR_TEXT_MAX], total[TR_TEXT_MAX] = "";
    char metric[64] = "", left[64] = "";
    if (p->steps > 0) snprintf(total, sizeof total, "/%" PRIu64, p->steps);
    if (p->unit != NULL)
        snprintf(metric, sizeof metric, "  %s %.16s", tr_fixed(text, p->metric, 3), p->unit);
    if (p->left >= 0) snprintf(left, sizeof left, "  left %s", tr_duration(text, p->left));
    snprintf(out, size, "step %" PRIu64 "%s  loss %s%s  lr %.1e  %s tok/s%s%s%s", p->step, total,
             tr_fixed(loss, p->loss, 3), metric, p->lr, tr_count(speed, p->tokens_per_s), left,
             p->extra != NULL ? "  " : "", p->extra != NULL ? p->extra : "");
}

/* Parts of the line for a terminal, from left to right. An empty part is not shown. */
enum {
    TR_PART_STEP, TR_PART_BAR, TR_PART_DONE, TR_PART_LOSS, TR_PART_BEST, TR_PART_SPEED,
    TR_PART_LEFT, TR_PART_RATE, TR_PART_EXTRA, TR_PARTS
};

typedef char tr_part[96];

/* Writes the text of all parts. The bar is empty and has the minimum size of 5 cells. */
TR_DEF void tr_progress_parts(const tr_progress *p, double share, tr_part part[TR_PARTS]) {
    const size_t size = sizeof part[0];
    char text[TR_TEXT_MAX], total[TR_TEXT_MAX] = "";
    memset(part, 0, TR_PARTS * size);
    if (p->steps > 0) {
        snprintf(total, sizeof total, "/%" PRIu64, p->steps);
        snprintf(part[TR_PART_DONE], size, "%d%%", (int)(100 * share));
        strcpy(part[TR_PART_BAR], "[=====]");
    }
    snprintf(part[TR_PART_STEP], size, "step %" PRIu64 "%s", p->step, total);
    if (p->unit != NULL)
        snprintf(part[TR_PART_LOSS], size, "%s %.16s", tr_fixed(text, p->metric, 3), p->unit);
    else
        snprintf(part[TR_PART_LOSS], size, "loss %s", tr_fixed(text, p->loss, 3));
    if (p->best > 0) snprintf(part[TR_PART_BEST], size, "best %s", tr_fixed(text, p->best, 3));
    snprintf(part[TR_PART_SPEED], size, "%s tok/s", tr_count(text, p->tokens_per_s));
    if (p->left >= 0) snprintf(part[TR_PART_LEFT], size, "left %s", tr_duration(text, p->left));
    snprintf(part[TR_PART_RATE], size, "lr %.1e", p->lr);
    if (p->extra != NULL) snprintf(part[TR_PART_EXTRA], size, "%s", p->extra);
}

/* Returns the total number of columns of all parts, with two blanks between parts. */
TR_DEF size_t tr_progress_width(tr_part part[TR_PARTS]) {
    size_t need = 0, i;
    for (i = 0; i < TR_PARTS; i++)
        if (part[i][0]) need += strlen(part[i]) + (need > 0 ? 2 : 0);
    return need;
}

/* Draws a bar of the given number of cells. */
TR_DEF void tr_progress_bar(tr_part bar, double share, size_t cells) {
    size_t full = (size_t)(share * (double)cells), i;
    bar[0] = '[';
    for (i = 0; i < cells; i++) bar[1 + i] = i < full ? '=' : ' ';
    if (full < cells) bar[1 + full] = '>';
    strcpy(bar + 1 + cells, "]");
}

/* Writes the line for a terminal of `width` columns:

       step 1200/5000  [==>       ]  24%  1.780 bpb  best 1.812  12.3k tok/s  left 3m12s

   The bar fills the remaining columns, up to 30 cells. It has at least 5 cells, and at
   least 15 if the learning rate is shown too. In a narrow terminal, parts are omitted
   in the order of `first` below. The loss and the percentage are always shown. */
TR_DEF void tr_progress_live(char *out, size_t size, const tr_progress *p, size_t width) {
    static const int first[] = {
        TR_PART_EXTRA, TR_PART_RATE, TR_PART_STEP, TR_PART_BAR, TR_PART_SPEED, TR_PART_BEST,
        TR_PART_LEFT
    };
    const size_t omitted = sizeof first / sizeof *first;
    tr_part part[TR_PARTS];
    size_t need, i, k, cells, at = 0;
    double share = p->steps > 0 ? (double)p->step / (double)p->steps : 0;
    if (share > 1) share = 1;
    tr_progress_parts(p, share, part);
    for (k = 0;; k++) {
        size_t more = k < 2 && part[TR_PART_BAR][0] ? 10 : 0;
        need = tr_progress_width(part);
        if (need + more <= width || k == omitted) break;
        part[first[k]][0] = 0;
    }
    if (part[TR_PART_BAR][0]) {
        cells = width - need + 5;
        tr_progress_bar(part[TR_PART_BAR], share, cells < 30 ? cells : 30);
    }

    out[0] = 0;
    for (i = 0; i < TR_PARTS && at < size; i++)
        if (part[i][0])
            at += (size_t)snprintf(out + at, size - at, "%s%s", at > 0 ? "  " : "", part[i]);
    if (width < size) out[width] = 0;
}

/* Replaces blanks with newlines so that a terminal of `width` columns does not split
   words. Does nothing if width is 0 (not a terminal). */
TR_DEF void tr_fold(char *text, size_t width) {
    size_t column = 0;
    char *s, *blank = NULL, *after;
    for (s = text; width > 0 && *s; s++) {
        if (*s == '\n') {
            column = 0;
            blank = NULL;
            continue;
        }
        if (((unsigned char)*s & 0xC0) == 0x80) continue;       /* continuation byte */
        if (*s == ' ') blank = s;
        if (++column < width || blank == NULL || *s == ' ') continue;
        *blank = '\n';
        for (column = 0, after = blank + 1; after <= s; after++)
            column += ((unsigned char)*after & 0xC0) != 0x80;
        blank = NULL;
    }
}

typedef struct {
    FILE  *f;
    int    tty;
    int    shown;           /* 1: a progress line is on the screen, with the cursor after it */
    int    failed;          /* 1: a write failed, which was reported on standard error */
    double drawn;           /* time of the last drawing, in seconds */
    char   line[512];
} tr_term;

/* Prepares to show progress on f. If f is NULL, nothing is shown. */
TR_DEF void tr_term_open(tr_term *t, FILE *f) {
    const char *kind = getenv("TERM");
    memset(t, 0, sizeof *t);
    t->f = f;
    t->tty = f != NULL && isatty(fileno(f)) && !(kind != NULL && strcmp(kind, "dumb") == 0);
    t->drawn = -1;
}

TR_DEF void tr_term_write(tr_term *t, const char *text, size_t n) {
    if (t->failed || t->f == NULL) return;
    if (fflush(t->f) == 0 && tr_write_all(fileno(t->f), text, n)) return;
    t->failed = 1;
    fprintf(stderr, "cannot write progress: %s; continuing without it\n", strerror(errno));
}

/* Redraws the line, cut to the width of the terminal, because a wrapped line cannot be
   overwritten. */
TR_DEF void tr_term_draw(tr_term *t) {
    char text[sizeof t->line + 16];
    size_t width = tr_columns(fileno(t->f)), n = strlen(t->line);
    if (width == 0) width = 80;
    if (n > width - 1) n = width - 1;
    n = (size_t)snprintf(text, sizeof text, "\r%.*s\033[K", (int)n, t->line);
    tr_term_write(t, text, n);
    t->shown = 1;
}

/* Shows the progress. On a terminal, the line is redrawn at most ten times per second.
   Elsewhere, a line is written whenever `due` is set (at the log interval). */
TR_DEF void tr_show(tr_term *t, const tr_progress *p, int due) {
    double now = tr_seconds();
    if (!t->tty && !due) return;
    if (t->tty && !due && t->drawn >= 0 && now - t->drawn < 0.1) return;
    t->drawn = now;
    if (t->tty) {
        size_t width = tr_columns(fileno(t->f));
        width = width > 1 ? width - 1 : 79;     /* some terminals wrap after the last column */
        tr_progress_live(t->line, sizeof t->line, p, width);
        tr_term_draw(t);
        return;
    }
    tr_progress_line(t->line, sizeof t->line - 1, p);
    strcat(t->line, "\n");
    tr_term_write(t, t->line, strlen(t->line));
}

/* Prints a message on a separate line; fmt needs no newline. The progress line is
   erased and redrawn below it. */
TR_DEF TR_PRINTF(2, 3) void tr_say(tr_term *t, const char *fmt, ...) {
    char text[2048];
    va_list args;
    int n;
    va_start(args, fmt);
    n = vsnprintf(text, sizeof text - 1, fmt, args);
    va_end(args);
    if (n < 0) return;
    if (n > (int)sizeof text - 2) n = (int)sizeof text - 2;
    if (t->tty) tr_fold(text, tr_columns(fileno(t->f)));
    text[n++] = '\n';
    if (t->shown) tr_term_write(t, "\r\033[K", 4);
    tr_term_write(t, text, (size_t)n);
    if (t->shown) tr_term_draw(t);
}

/* Moves the cursor below the last progress line, which remains visible. tr_show and
   tr_say can still be called afterwards. */
TR_DEF void tr_term_close(tr_term *t) {
    if (t->shown) tr_term_write(t, "\n", 1);
    t->shown = 0;
}


// >>board: TensorBoard event files ------------------------------------------------------

/* An event file is a sequence of records. Their integers are little-endian:

       u64 length | u32 masked CRC of these 8 bytes | payload | u32 masked CRC of payload

   Each payload is a protocol buffer of type Event (tensorflow/core/util/event.proto):

       Event       1: double wall_time   2: int64 step   3: string file_version
                   5: Summary            7: SessionLog
       Summary     1: repeated Value, with 1: string tag   2: float simple_value
       SessionLog  1: status, with START = 1 */

/* CRC-32C (Castagnoli), with the reflected polynomial 0x82F63B78. Computed bit by bit,
   because the record of a scalar has only about sixty bytes. */
TR_DEF uint32_t tr_crc32c(const void *bytes, size_t n) {
    const unsigned char *p = (const unsigned char *)bytes;
    uint32_t crc = 0xFFFFFFFFu;
    int bit;
    while (n-- > 0) {
        crc ^= *p++;
        for (bit = 0; bit < 8; bit++) crc = (crc >> 1) ^ ((crc & 1) ? 0x82F63B78u : 0u);
    }
    return crc ^ 0xFFFFFFFFu;
}

/* Returns the CRC in the masked form of TFRecord files. The mask is needed because the
   data can itself contain CRCs. */
TR_DEF uint32_t tr_crc32c_masked(const void *bytes, size_t n) {
    uint32_t crc = tr_crc32c(bytes, n);
    return ((crc >> 15) | (crc << 17)) + 0xA282EAD8u;
}

TR_DEF void tr_put_le(tr_buf *b, uint64_t x, int bytes) {
    while (bytes-- > 0) {
        char c = (char)(x & 0xFF);
        tr_buf_put(b, &c, 1);
        x >>= 8;
    }
}

/* Appends a protocol-buffer varint: 7 bits per byte, lowest bits first. The high bit is
   set in all bytes but the last. */
TR_DEF void tr_put_varint(tr_buf *b, uint64_t x) {
    for (; x >= 0x80; x >>= 7) tr_put_le(b, (x & 0x7F) | 0x80, 1);
    tr_put_le(b, x, 1);
}

TR_DEF void tr_put_bytes(tr_buf *b, unsigned field, const void *bytes, size_t n) {
    tr_put_varint(b, field << 3 | 2);       /* wire type 2: length-delimited */
    tr_put_varint(b, n);
    if (n > 0) tr_buf_put(b, bytes, n);
}

typedef struct {
    tr_appender out;
    tr_buf      value, summary, event, record;
    char        err[TR_ERR];    /* set when tr_board_scalar returns 0 */
} tr_board;

TR_DEF void tr_board_event(tr_board *b, uint64_t step) {
    struct timespec t;
    double wall;
    uint64_t bits;
    clock_gettime(CLOCK_REALTIME, &t);
    wall = (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
    memcpy(&bits, &wall, sizeof bits);
    b->value.n = b->summary.n = b->event.n = b->record.n = 0;
    tr_put_varint(&b->event, 1 << 3 | 1);       /* wire type 1: eight bytes */
    tr_put_le(&b->event, bits, 8);
    tr_put_varint(&b->event, 2 << 3 | 0);       /* wire type 0: varint */
    tr_put_varint(&b->event, step > (uint64_t)INT64_MAX ? (uint64_t)INT64_MAX : step);
}

TR_DEF int tr_board_write(tr_board *b) {
    tr_buf *r = &b->record;
    if (b->event.oom)
        return tr_fail(b->err, sizeof b->err, "%s: out of memory: cannot write an event",
                       b->out.path);
    tr_put_le(r, b->event.n, 8);
    if (!r->oom) tr_put_le(r, tr_crc32c_masked(r->s, 8), 4);
    tr_buf_put(r, b->event.s, b->event.n);
    tr_put_le(r, tr_crc32c_masked(b->event.s, b->event.n), 4);
    if (b->value.oom || b->summary.oom || r->oom)
        return tr_fail(b->err, sizeof b->err, "%s: out of memory: cannot write an event",
                       b->out.path);
    return tr_append(&b->out, r->s, r->n, b->err, sizeof b->err);
}

TR_DEF int tr_board_close(tr_board *b) {
    tr_buf_free(&b->value);
    tr_buf_free(&b->summary);
    tr_buf_free(&b->event);
    tr_buf_free(&b->record);
    return tr_append_close(&b->out, b->err, sizeof b->err);
}

/* Opens a new event file in dir, which is created if necessary. If dir is NULL, no file
   is written. resume_step is the step after which a run resumes, or 0 for a new run.
   When a run resumes, TensorBoard ignores points after that step in earlier files of the
   directory. */
TR_DEF int tr_board_open(tr_board *b, const char *dir, uint64_t resume_step, char *err,
                         size_t size) {
    char host[256], *path, *c;
    size_t capacity;
    int i, ok = 0;
    memset(b, 0, sizeof *b);
    b->out.fd = -1;
    if (dir == NULL) return 1;
    if (!tr_mkdirs(dir, err, size)) return 0;
    if (gethostname(host, sizeof host) != 0) strcpy(host, "host");
    host[sizeof host - 1] = 0;
    for (c = host; *c; c++)
        if (*c == '/') *c = '-';

    capacity = strlen(dir) + sizeof host + 128;
    path = (char *)malloc(capacity);
    if (path == NULL)
        return tr_fail(err, size, "%s: out of memory: cannot create an event file", dir);
    /* if there is already a file from the same second, add a number to the name */
    for (i = 0; i < 1000; i++) {
        int n = snprintf(path, capacity, "%s/events.out.tfevents.%010lld.%s.%ld", dir,
                         (long long)time(NULL), host, (long)getpid());
        if (i > 0) snprintf(path + n, capacity - (size_t)n, ".%d", i);
        ok = tr_append_open(&b->out, path, O_EXCL, err, size);
        if (ok || errno != EEXIST) break;
    }
    free(path);
    if (!ok) return 0;

    tr_board_event(b, 0);
    tr_put_bytes(&b->event, 3, "brain.Event:2", 13);
    ok = tr_board_write(b);
    if (ok && resume_step > 0) {
        tr_board_event(b, resume_step < UINT64_MAX ? resume_step + 1 : resume_step);
        tr_put_bytes(&b->event, 7, "\010\001", 2);      /* SessionLog { status: START } */
        ok = tr_board_write(b);
    }
    if (!ok) {
        tr_fail(err, size, "%s", b->err);
        tr_board_close(b);
    }
    return ok;
}

/* Adds one point to the curve `tag`, such as "train/loss". The point is in the file
   when the function returns. If it cannot be written, returns 0 with the reason in
   b->err. After a failed write, later points are dropped and the function returns 1. */
TR_DEF int tr_board_scalar(tr_board *b, const char *tag, uint64_t step, double x) {
    float f = (float)HUGE_VAL;
    uint32_t bits;
    if (b->out.fd < 0) return 1;
    if (x < -FLT_MAX) f = -f;
    else if (!(x > FLT_MAX)) f = (float)x;      /* NaN stays NaN */
    memcpy(&bits, &f, sizeof bits);
    tr_board_event(b, step);
    tr_put_bytes(&b->value, 1, tag, strlen(tag));
    tr_put_varint(&b->value, 2 << 3 | 5);       /* wire type 5: four bytes */
    tr_put_le(&b->value, bits, 4);
    if (!b->value.oom) tr_put_bytes(&b->summary, 1, b->value.s, b->value.n);
    if (!b->summary.oom) tr_put_bytes(&b->event, 5, b->summary.s, b->summary.n);
    return tr_board_write(b);
}


// >>signals: an orderly stop

/* After the first SIGINT, SIGTERM or SIGHUP, the training loop finishes its step, saves
   and exits. A second signal ends the process immediately, with status 128 + its
   number. If stopping would lose the run (tr_signals with ask = 1), the first SIGINT
   only prints a warning, and a second one within TR_ASK_SECONDS requests the stop. */

#define TR_ASK_SECONDS 5

static volatile sig_atomic_t tr_stop_signal TR_UNUSED = 0;
static volatile sig_atomic_t tr_ask TR_UNUSED = 0;      /* 1: the first SIGINT only warns */
static struct timespec tr_asked TR_UNUSED;                /* time of the warning; 0 if none */

TR_DEF void tr_on_signal(int sig) {
    static const char warn[] =
        "\r\033[Knothing will be saved: press Ctrl-C again within 5 seconds to stop\n";
    struct timespec now;
    int why = errno;
    if (tr_stop_signal != 0) {
        if (sig == SIGHUP) return;      /* a closing terminal sends SIGHUP several times */
        _exit(128 + sig);
    }
    if (sig == SIGINT && tr_ask && clock_gettime(CLOCK_MONOTONIC, &now) == 0) {
        double since = (double)(now.tv_sec - tr_asked.tv_sec)
                       + 1e-9 * (double)(now.tv_nsec - tr_asked.tv_nsec);
        int first = (tr_asked.tv_sec == 0 && tr_asked.tv_nsec == 0) || since > TR_ASK_SECONDS;
        tr_asked = now;
        if (first && write(2, warn, sizeof warn - 1) > 0) {
            errno = why;
            return;
        }
    }
    tr_stop_signal = sig;
    errno = why;
}

/* Installs the handlers without SA_RESTART, so that a blocking read or wait returns
   with EINTR and the loop notices the request. Each handler blocks the other
   signals. */
TR_DEF int tr_signals(int ask, char *err, size_t size) {
#ifdef SIGUSR1
    /* mpirun forwards SIGUSR1, and srun --signal can send it */
    static const int which[] = {SIGINT, SIGTERM, SIGHUP, SIGUSR1};
#else
    static const int which[] = {SIGINT, SIGTERM, SIGHUP};
#endif
    const int count = (int)(sizeof which / sizeof *which);
    struct sigaction act, was;
    int i;
    memset(&act, 0, sizeof act);
    act.sa_handler = tr_on_signal;
    sigemptyset(&act.sa_mask);
    for (i = 0; i < count; i++) sigaddset(&act.sa_mask, which[i]);
    tr_ask = ask;
    for (i = 0; i < count; i++) {
        if (which[i] == SIGHUP && sigaction(SIGHUP, NULL, &was) == 0 && was.sa_handler == SIG_IGN)
            continue;       /* started by nohup */
        if (sigaction(which[i], &act, NULL) != 0)
            return tr_fail(err, size, "cannot install a signal handler: %s", strerror(errno));
    }
    return 1;
}

/* Returns the number of the signal that requested a stop, or 0. */
TR_DEF int tr_stop_requested(void) {
    return (int)tr_stop_signal;
}

/* Clears the request to stop, for a program that stops only the current operation and
   then continues. */
TR_DEF void tr_stop_done(void) {
    tr_stop_signal = 0;
}

/* Memory-mapped files, whose length must not change. If one is truncated, reads after
   its new end return zeros or raise SIGBUS. */
enum { TR_WATCHED = 3 };

static struct {
    const char *program, *path[TR_WATCHED];
    struct stat at[TR_WATCHED];     /* status of each file when watching began */
    int         n;
} tr_watched TR_UNUSED;

/* Returns the first watched file that has become shorter, or NULL. A new file of the
   same name is harmless, because the old one stays mapped. */
TR_DEF const char *tr_cut_short(void) {
    struct stat st;
    int i;
    for (i = 0; i < tr_watched.n; i++) {
        const struct stat *was = &tr_watched.at[i];
        if (stat(tr_watched.path[i], &st) != 0) continue;
        if (st.st_dev != was->st_dev || st.st_ino != was->st_ino) continue;
        if (st.st_size < was->st_size) return tr_watched.path[i];
    }
    return NULL;
}

#ifdef SIGBUS
/* Handles SIGBUS and calls only async-signal-safe functions. If no watched file was
   truncated, the signal ends the process as usual. */
TR_DEF void tr_on_bus(int sig) {
    const char *path = tr_cut_short();
    const char *const said[] = {
        "\n", tr_watched.program, ": the text ", path,
        " was truncated while it was being read; the last checkpoint is intact\n"
    };
    size_t i;
    if (path == NULL) {
        signal(sig, SIG_DFL);
        return;
    }
    for (i = 0; i < sizeof said / sizeof *said; i++)
        if (write(2, said[i], strlen(said[i])) < 0) break;
    _exit(1);
}
#endif

/* Watches a file for truncation. The string `path` is not copied. Sets err and returns 0
   on failure. */
TR_DEF int tr_watch(const char *program, const char *path, char *err, size_t size) {
#ifdef SIGBUS
    if (tr_watched.n == TR_WATCHED || stat(path, &tr_watched.at[tr_watched.n]) != 0)
        return tr_fail(err, size, "%s: %s", path, strerror(errno));
    tr_watched.program = program;
    tr_watched.path[tr_watched.n++] = path;
    signal(SIGBUS, tr_on_bus);
#else
    (void)program;          /* Windows refuses to truncate a mapped file */
    (void)path;
    (void)err;
    (void)size;
#endif
    return 1;
}


// >>sampling: the repetition penalty and the end of a generated text

/* Counts how often each token occurs among the last `window` tokens, or among all
   tokens if window is 0. */
typedef struct {
    uint32_t *count;                /* [vocab + 1] */
    int32_t  *ring;                 /* [window + 1], the last `window` tokens */
    size_t    vocab, window, n;     /* n: number of tokens so far */
} tr_recent;

TR_DEF int tr_recent_open(tr_recent *r, size_t vocab, size_t window) {
    memset(r, 0, sizeof *r);
    r->vocab = vocab;
    r->window = window;
    r->count = (uint32_t *)calloc(vocab + 1, sizeof *r->count);
    r->ring = (int32_t *)malloc((window + 1) * sizeof *r->ring);
    return r->count != NULL && r->ring != NULL;
}

TR_DEF void tr_recent_close(tr_recent *r) {
    free(r->count);
    free(r->ring);
    memset(r, 0, sizeof *r);
}

TR_DEF void tr_recent_clear(tr_recent *r) {
    memset(r->count, 0, r->vocab * sizeof *r->count);
    r->n = 0;
}

TR_DEF void tr_recent_add(tr_recent *r, int32_t token) {
    if (r->window > 0) {
        size_t at = r->n % r->window;
        if (r->n >= r->window) r->count[r->ring[at]]--;
        r->ring[at] = token;
    }
    r->count[token]++;
    r->n++;
}

/* Applies the repetition penalty of CTRL (arXiv:1909.05858, section 4.1). For each
   token with a count above 0, however large, a positive logit is divided by the
   penalty, and a negative one is multiplied by it. The result depends on the origin of
   the logits, which are defined only up to a constant; log-probabilities, for example,
   are all negative. Therefore the mean is subtracted first. (Training leaves the mean
   of the logits near its initial value of 0, so this hardly changes the logits of a
   plain output head.) */
TR_DEF void tr_penalise(double *x, const tr_recent *r, double penalty) {
    double mean = 0;
    size_t i, n = 0;
    for (i = 0; i < r->vocab; i++) {
        if (!isfinite(x[i])) continue;
        mean += x[i];
        n++;
    }
    if (n > 0) mean /= (double)n;
    for (i = 0; i < r->vocab; i++) {
        x[i] -= mean;
        if (r->count[i] > 0 && isfinite(x[i])) x[i] = x[i] > 0 ? x[i] / penalty : x[i] * penalty;
    }
}

/* Decodes \n, \t and \\ in the value of --stop, in place. */
TR_DEF void tr_unescape(char *s) {
    static const char letter[] = "nt\\", meaning[] = "\n\t\\";
    const char *at;
    char *out = s;
    for (; *s; s++) {
        at = *s == '\\' && s[1] ? strchr(letter, s[1]) : NULL;
        if (at != NULL) s++;
        *out++ = at != NULL ? meaning[at - letter] : *s;
    }
    *out = 0;
}

/* Nonzero if text contains an occurrence of `stop` that ends after the first `seen`
   bytes. */
TR_DEF int tr_stops(const tr_buf *text, size_t seen, const char *stop) {
    size_t k = strlen(stop), at = seen + 1 > k ? seen + 1 - k : 0;
    for (; k > 0 && at + k <= text->n; at++)
        if (memcmp(text->s + at, stop, k) == 0) return 1;
    return 0;
}


// >>lm: shared by trainers of language models

/* This section implements what trainers of language models share: options, context,
   text, checkpoint, evaluation, scores, generation and conversation. It is compiled
   only if TR_LM is defined before train.h is included. It requires seqtx.h and
   seqtx_text.h one directory up.

       B  text streams    T  tokens per stream in a block    V  vocabulary size */

#ifdef TR_LM
#include "../seqtx.h"
#include "../seqtx_text.h"

enum { TR_BYTES, TR_COMPACT, TR_CHARS, TR_WORDS, TR_SPM, TR_IDS };  /* tr_lm_opt.tokens */
enum { TR_AUTO, TR_BPC, TR_PPL, TR_WORD_PPL };                      /* tr_lm_opt.unit */
enum { TR_PASS_RANK0, TR_PASS_SHARED, TR_PASS_EACH };               /* tr_lm.share_pass */
enum { TR_BY_FILE, TR_BY_LINES, TR_BY_TEXTS, TR_BY_TOKENS };        /* tr_lm_opt.score_by */

/* Options that all trainers share. */
typedef struct {
    const char *data, *pieces, *checkpoint, *init_from, *score, *best;
    const char *log, *tensorboard, *out, *prompt, *stop;
    int         tokens, join_lines, reading, unit, score_by;
    int         eval_only, no_train, threads, precision, weights, device, tf32, no_graph, tune;
    int         dry_run, list_presets, version, keep_best, interactive, shard, recompute;
    uint64_t    seed, steps, min_count, eval_batch_sz, eval_every, eval_blocks;
    uint64_t    save_every, log_every, gpu, vocab, generate, top_k;
    uint64_t    update_every, update_after, random_segments;
    uint64_t    sample_every, sample_prime, sample_length, repetition_window;
    double      max_memory, temperature, top_p, repetition_penalty;
} tr_lm_opt;

/* The first part of every trainer's defaults. */
#define TR_LM_DEFAULTS \
    "seed=1 temperature=0.8 top-p=0.95 repetition-penalty=1 repetition-window=64 " \
    "sample-prime=256 sample-length=500 "

/* Rows of the option table. `o` is the trainer's tr_lm_opt. */
#define TR_LM_DATA(o) \
    TR_GROUP("Data"), \
    TR_TEXT("data", TR_HINT, &(o).data, \
        "a text file (its last 5 % are the test text, the 5 % before them the validation text), " \
        "or a directory with train.txt, valid.txt and test.txt. The checkpoint stores this path"), \
    TR_CHOICE("tokens", TR_MODEL, &(o).tokens, "bytes|bytes-compact|chars|words|spm|ids", \
        "what a token is. bytes-compact: only bytes that occur, with the newline as <eos>. " \
        "spm: pieces of a SentencePiece model. ids: the text consists of piece numbers, " \
        "separated by white space"), \
    TR_TEXT("pieces", TR_HINT | TR_LATER, &(o).pieces, \
        "spm: the .model file (in programs built with SENTENCEPIECE=1). ids: a .vocab file, one " \
        "piece per line. The checkpoint stores its contents"), \
    TR_FLAG("join-lines", TR_MODEL | TR_LATER, &(o).join_lines, \
        "with --tokens spm: newlines are not tokens (as in PAR's reference)"), \
    TR_SIZE("min-count", TR_MODEL, &(o).min_count, 0, TR_INF, \
        "words or characters that occur less often than this become <unk>. With 1, there is no " \
        "<unk>, and unknown ones are errors. Default: 2 if the validation or test text requires " \
        "an <unk>, otherwise 1"), \
    TR_CHOICE("data-unit", TR_FREE, &(o).unit, "auto|bpc|ppl|word-ppl", \
        "unit of the results: bits per byte, perplexity per token, or perplexity per word. auto: " \
        "perplexity per token if tokens are words or pieces, otherwise bits per byte")

/* Options for how the text is read and when parameters are updated, for trainers that
   call tr_lm_next and read t->share and t->update. */
#define TR_LM_PACE(o) \
    TR_SIZE("update-every", TR_FREE, &(o).update_every, 1, 1u << 20, \
        "number of steps per parameter update, which uses the mean of the steps' gradients"), \
    TR_SIZE("update-after", TR_FREE, &(o).update_after, 0, TR_INF, \
        "number of steps before --update-every applies; until then, every step is an update"), \
    TR_SIZE("random-segments", TR_FIXED, &(o).random_segments, 0, 1u << 20, \
        "read segments of this many blocks from random positions of the text, each starting with " \
        "an empty memory; 0: read the whole text in parallel streams")

/* Options for running and saving. The strings `zero` and `whole` complete the help:
   `zero` says what an interval of 0 steps between saves or evaluations means, and
   `whole` says what 0 evaluation blocks mean. */
#define TR_LM_SAVING(o, zero, whole) \
    TR_GROUP("Running"), \
    TR_TEXT("out", TR_LOCAL, &(o).out, \
        "output directory, created if necessary. Sets --checkpoint to DIR/model.safetensors and, " \
        "in training, --log to DIR/log.jsonl and --tensorboard to DIR/tb, unless they are given"), \
    TR_TEXT("checkpoint", TR_LOCAL, &(o).checkpoint, \
        "save to this safetensors file, and resume from it if it exists; it contains every " \
        "option that affects training"), \
    TR_TEXT("init-from", TR_LOCAL, &(o).init_from, \
        "start a new run with the weights of this checkpoint (fine-tuning), or of one made by " \
        "tools/convert.py. It determines the model's options and vocabulary; the optimiser, the " \
        "schedule and the memories start afresh"), \
    TR_SIZE("save-every", TR_FREE, &(o).save_every, 0, TR_INF, \
        "steps between saves; 0: " zero), \
    TR_TEXT("best", TR_LOCAL, &(o).best, \
        "also save to this file whenever an evaluation during training is the best so far"), \
    TR_FLAG("keep-best", TR_LOCAL, &(o).keep_best, \
        "like --best, with a file named after --checkpoint: run.best.safetensors for " \
        "run.safetensors"), \
    TR_SIZE("eval-every", TR_FREE, &(o).eval_every, 0, TR_INF, \
        "steps between evaluations; 0: " zero), \
    TR_SIZE("eval-blocks", TR_FREE, &(o).eval_blocks, 0, TR_INF, \
        "number of blocks per evaluation during training. If given on the command line, it also " \
        "applies to the final evaluation, which otherwise covers the whole text. 0: " whole), \
    TR_SIZE("eval-batch-sz", TR_FREE, &(o).eval_batch_sz, 0, 1u << 30, \
        "number of streams in an evaluation, reduced for a short text; 0: --batch-sz / " \
        "--batch-split"), \
    TR_SIZE("log-every", TR_FREE, &(o).log_every, 0, TR_INF, \
        "steps between log records; 0: 10"), \
    TR_TEXT("log", TR_LOCAL, &(o).log, \
        "append JSON lines to this file"), \
    TR_TEXT("tensorboard", TR_LOCAL, &(o).tensorboard, \
        "write TensorBoard event files to this directory")

#define TR_LM_RUNNING(o) \
    TR_FLAG("eval-only", TR_LOCAL, &(o).eval_only, \
        "evaluate on every token of the validation and test texts, then stop"), \
    TR_TEXT("score", TR_LOCAL, &(o).score, \
        "print a tab-separated table of the likelihood of this text file (-: standard input) " \
        "under the model of --checkpoint, then stop; nats are -ln of the probability. If the " \
        "last line has no newline, one is added, so that all lines are scored the same way"), \
    TR_CHOICE("score-by", TR_LOCAL, &(o).score_by, "file|lines|texts|tokens", \
        "rows of the table of --score. file: one row; lines: one per line; texts: one per line, " \
        "each read as a separate text with an empty memory; tokens: one per token. All except " \
        "file read token by token, as --generate does. If blocks see more of the past than " \
        "single tokens do (train_par), the rows add up to the score with --eval-block-sz 1"), \
    TR_FLAG("no-train", TR_LOCAL, &(o).no_train, \
        "do not train, only --generate"), \
    TR_INT("threads", TR_LOCAL, &(o).threads, 0, 4096, \
        "number of threads; 0: all"), \
    TR_FLAG("shard", TR_LOCAL, &(o).shard, \
        "with several ranks (mpirun, docs/distributed.md), each rank stores only its share of " \
        "the optimiser's state"), \
    TR_CHOICE("precision", TR_FIXED, &(o).precision, "f32|bf16", \
        "bf16 on a CPU: the inputs of matmuls are rounded to bfloat16, everything else is float. " \
        "On a GPU: activations are stored as bfloat16, parameters and sums as float"), \
    TR_CHOICE("device", TR_LOCAL, &(o).device, "cpu|cuda", \
        "device to run on; cuda requires a program built with CUDA (make cuda)"), \
    TR_SIZE("gpu", TR_LOCAL, &(o).gpu, 0, 1023, \
        "CUDA's number of the GPU, counted from 0"), \
    TR_FLAG("tf32", TR_FREE, &(o).tf32, \
        "with --device cuda and f32: use TF32 matmuls, which are faster and less accurate"), \
    TR_FLAG("tune", TR_LOCAL, &(o).tune, \
        "with --device cuda: time the algorithms of each matmul and keep the fastest; a repeated " \
        "run may differ in the last bits"), \
    TR_FLAG("no-graph", TR_LOCAL, &(o).no_graph, \
        "with --device cuda: launch every kernel of every step, instead of replaying steps as " \
        "CUDA graphs"), \
    TR_REAL("max-memory", TR_LOCAL, &(o).max_memory, 0, 1e9, \
        "limit on the use of device memory, in GiB; 0: 90 % of the machine's memory, or all of " \
        "the GPU's"), \
    TR_SOME("recompute", TR_FREE, &(o).recompute, 4096, \
        "recompute the activations of all layers, or of the last N, in the backward pass: uses " \
        "less memory and up to a third more time, with identical results. auto: the smallest N " \
        "with which training fits in --max-memory"), \
    TR_FLAG("dry-run", TR_LOCAL, &(o).dry_run, \
        "print the size of the model, then stop"), \
    TR_SIZE("vocab", TR_LOCAL, &(o).vocab, 0, 1u << 30, \
        "vocabulary size for --dry-run without --data; 0: 256"), \
    TR_FLAG("list-presets", TR_LOCAL, &(o).list_presets, \
        "print a tab-separated table of the presets, then stop: name, layers, d, vocabulary, " \
        "parameters"), \
    TR_FLAG("version", TR_LOCAL, &(o).version, \
        "print the version, then stop")

#define TR_LM_GENERATION(o) \
    TR_GROUP("Generation"), \
    TR_SIZE("generate", TR_LOCAL, &(o).generate, 0, TR_INF, \
        "generate this many tokens at the end. Only the prompt and these tokens are written to " \
        "standard output. With --interactive: the longest answer, in tokens; 0: 256"), \
    TR_FLAG("interactive", TR_LOCAL, &(o).interactive, \
        "talk to the model of --checkpoint: it continues each line of standard input, and " \
        "remembers the conversation until an empty line or /reset; /help lists the commands. " \
        "Ctrl-C stops an answer; the end of the input ends the program"), \
    TR_TEXT("prompt", TR_LOCAL, &(o).prompt, \
        "text to continue; -: standard input, without its final newline. With --interactive: the " \
        "beginning of each conversation"), \
    TR_REAL("temperature", TR_LOCAL, &(o).temperature, 0, 1000, \
        "temperature of sampling; 0: always the most likely token"), \
    TR_SIZE("top-k", TR_LOCAL, &(o).top_k, 0, TR_INF, \
        "sample from this many most likely tokens; 0: all"), \
    TR_REAL("top-p", TR_LOCAL, &(o).top_p, 0, 1, \
        "sample from the most likely tokens with this total probability; 0 or 1: all"), \
    TR_REAL("repetition-penalty", TR_LOCAL, &(o).repetition_penalty, 1, 100, \
        "divide the positive logits of recent tokens by this, and multiply the negative ones by " \
        "it, before the temperature applies (logits are measured from their mean). 1: off; 1.1 " \
        "to 1.3 is usual"), \
    TR_SIZE("repetition-window", TR_LOCAL, &(o).repetition_window, 0, 1u << 20, \
        "number of recent tokens for --repetition-penalty, including the prompt; 0: all"), \
    TR_CHOICE("weights", TR_LOCAL, &(o).weights, "f32|bf16|int8", \
        "without training: round the model's matrices to bfloat16, or to 8 bits with one scale " \
        "per 32 values. If the model is larger than the caches, this speeds up generation, which " \
        "then reads half or a quarter of the bytes; --eval-only measures the loss of accuracy"), \
    TR_TEXT("stop", TR_LOCAL, &(o).stop, \
        "end a text or an answer after this string, in which \\n, \\t and \\\\ are a newline, a " \
        "tab and a backslash. Without it, only --generate limits a text; <eos> does not end it")

/* Options for samples during training. */
#define TR_LM_SAMPLING(o) \
    TR_SIZE("sample-every", TR_FREE | TR_LATER, &(o).sample_every, 0, TR_INF, \
        "number of training steps between samples, which are written to standard error; 0: no " \
        "samples"), \
    TR_SIZE("sample-prime", TR_FREE | TR_LATER, &(o).sample_prime, 1, 1u << 30, \
        "a sample continues this many tokens of the validation text, from a random position"), \
    TR_SIZE("sample-length", TR_FREE | TR_LATER, &(o).sample_length, 1, TR_INF, \
        "length of a sample, in tokens")

/* The last paragraph of the help. */
#define TR_LM_AFTER \
    "To resume a run, repeat the command, or give --checkpoint alone: the file contains the " \
    "options that affect training, and they apply unless they are given again. The number of " \
    "steps, the learning rate, dropout, penalties and the intervals of saving, evaluation and " \
    "logging may change, and changes are reported; a different model, optimiser, batch, seed or " \
    "precision is refused. " \
    "Results and generated text are written to standard output, progress and everything else to " \
    "standard error; with --generate, results are also written to standard error. " \
    "Exit code: 0 success; 1 failed while running; 2 refused before anything was written; " \
    "130 stopped by Ctrl-C, 143 by SIGTERM, 129 by the end of its terminal. " \
    "The first Ctrl-C finishes the step and saves; without --checkpoint, on a terminal, it asks " \
    "for a second one."

typedef struct tr_lm tr_lm;

/* What the trainer of a model family provides. Functions return 1, or 0 with t->err or
   the context's error set. */
typedef struct {
    const char  *format;        /* format name of the family's checkpoints, such as "seqtx.sru.1" */
    const char  *states;        /* prefix of a state's entries in checkpoints, such as
                                   "state" */
    const int   *adapt_io;      /* the value of --adapt-io, or a constant 0. If 1, the
                                   sizes of a step depend on its tokens, so steps cannot
                                   be replayed */
    const char **cutoffs;       /* the value of --adapt-io-cutoffs; NULL: no such option */
    int          order, eos_first;      /* with --adapt-io: the fields of stx_vocab_desc
                                           that order the words. Without it, words are in
                                           the order of occurrence */
    const char  *sized[3];      /* changes to the defaults: for texts of up to 1e5 tokens, for
                                   texts of up to 2e6 tokens, and for longer texts */

    int        (*check)(tr_lm *t);      /* refuses incompatible options */
    void       (*plan)(tr_lm *t);       /* sets t->steps, t->schedule, and when and how to
                                           save and evaluate */
    size_t     (*count)(tr_lm *t, size_t vocab);        /* number of parameters; 0: see t->err */
    void       (*shape)(const tr_lm *t, char *line, size_t size, double *states);
                                        /* for --dry-run: writes the second line of the
                                           output to `line`. *states receives the number
                                           of elements in the states */
    int        (*make)(tr_lm *t);       /* creates t->lm and, for training, calls
                                           tr_lm_make */
    void       (*train)(tr_lm *t);      /* the training loop */
    void       (*learned)(const tr_lm *t, FILE *out);   /* prints what the model learned */
    size_t       size;          /* size of the trainer's struct, which begins with a tr_lm */
} tr_lm_kind;

/* Sizes of one text. Padding (--pad-id) is included only in `all`: it has no loss,
   bytes or words. */
typedef struct tr_lm_counts {
    double all, tokens, bytes, words;
} tr_lm_counts;

/* Results of an evaluation other than the mean loss. */
typedef struct tr_lm_scored {
    double tokens;              /* number of tokens with a loss */
    double batch_ppl;           /* mean of the batch perplexities, as TensorFlow reports it; with
                                   mean_of_all, padding is included in the losses of the
                                   batches */
} tr_lm_scored;

/* The state of a run. The trainer's struct begins with a tr_lm. */
struct tr_lm {
    tr_options       *options;
    const tr_lm_opt  *opt;
    const tr_lm_kind *kind;
    int          training;
    int          evaluating;    /* 1: this run only evaluates, on the whole texts */
    stx_ctx     *x;

    /* ranks */
    stx_launch_info start;      /* the rank of this process and the number of ranks: see >>api:
                                   group in seqtx.h */
    int          agreed;        /* the signal at which all ranks stop; 0: none */
    int          save_due;      /* 1: save after the next update */
    int          share_pass;    /* which ranks read which streams in tr_lm_pass. TR_PASS_RANK0:
                                   rank 0 reads all; TR_PASS_SHARED: each rank reads a
                                   share; TR_PASS_EACH: each rank reads all */
    int          whole_pass;    /* 1: an evaluation is not divided among the ranks, because
                                   its random values depend on the stream index. Set by
                                   kind->make */
    void       **gathered;      /* (gathered_count) the states of all ranks' streams, while a
                                   checkpoint is written */
    size_t       gathered_count;

    /* text and model */
    stx_vocab   *vocab;
    stx_corpus  *text[3];       /* training, validation and test text; NULL: no such text */
    char        *file[3];       /* paths of the memory-mapped texts; NULL for other texts */
    stx_lm       lm;            /* the model */
    stx_batches *batches;       /* batches of the training text */
    stx_optim   *optim;
    stx_schedule schedule;

    /* batches */
    size_t       parts;         /* number of parts of a batch (--batch-split) */
    size_t       pieces;        /* number of pieces of an update. Part p of block k is
                                   in[k * parts + p] and out[k * parts + p] */
    void       **state;         /* (parts) for each part, the memory of this rank's streams */
    stx_ids    **in, **out;     /* (pieces) tokens and targets for one update */
    int32_t     *tokens, *targets;      /* tokens and targets of all ranks, in host memory, one
                                           block after another, in the layout of
                                           stx_batches_next */

    /* evaluation and saving, set by plan */
    size_t       eval_block;    /* tokens per stream in an evaluation block */
    size_t       eval_window;   /* argument `window` for creating evaluation and
                                   generation states */
    int          eval_literal;  /* 1: evaluate like the reference code */
    int          blocks_see_more;       /* 1: a token attends to more of the past when
                                           it is read in a block than when it is read
                                           singly, as in generation */
    uint64_t     log_every, eval_every, save_every;     /* intervals in steps; 0: never */
    uint64_t     eval_blocks;   /* number of blocks in an evaluation; 0: the whole text */

    /* progress */
    uint64_t     logged;        /* updates since the last log record */
    uint64_t     saved;         /* step of the last save */
    size_t       bad_updates;   /* consecutive updates that were not finite */
    size_t       packed;        /* size of the rounded matrices in bytes (--weights) */
    int          unk_added;     /* 1: an <unk> was added because a text required one */
    double       sum;           /* sum of the losses since the last log record */
    double       loss;          /* loss of the last step */
    uint64_t     first, step, steps;    /* first: step at which this process began; step: current
                                           step; steps: last step of the run */
    double       lr;            /* learning rate of this step */

    /* --recompute */
    size_t       layers, recompute;     /* number of layers; the last `recompute` of them are
                                           recomputed */
    size_t       predicted;     /* with --recompute auto: predicted peak in bytes; otherwise 0 */
    size_t       overhead;      /* memory in the context that rehearsals do not include,
                                   in bytes */
    void        *before_make;   /* a copy of this struct, made before the call of kind->make */
    int          rehearsal;     /* number of ranks in a rehearsal (tr_lm_rehearse); 0: a
                                   real run */
    size_t       peak, settled; /* in a rehearsal: the peak in bytes, and the number of steps
                                   since it last rose */

    /* updates of several steps */
    int          update;        /* 1: this step updates the parameters */
    double       share;         /* factor of this step's gradient: 1 / steps per update */
    stx_real    *grads;         /* (grads_size) all gradients, if an update has several
                                   steps; otherwise NULL */
    size_t       grads_size;

    /* training text */
    uint64_t     fingerprint;
    size_t       use;           /* the weights are trained on this many tokens from the
                                   beginning of the training text; 0: all */

    /* set by the trainer's make or plan */
    int        (*save_more)(tr_lm *t, stx_writer *w);   /* writes further entries of the
                                                           checkpoint; may be NULL */
    int        (*load_more)(tr_lm *t, const stx_file *f);
    int          no_evaluation; /* 1: without training, only the output of kind->learned
                                   is printed */
    int          more_figures;  /* 1: with perplexity per token, also report the
                                   perplexity per word and the mean perplexity of the
                                   batches */
    int32_t      pad_id;        /* the token that has no loss; -1: none */
    int          mean_of_all;   /* 1: means of losses include padding tokens, with a loss
                                   of 0 */

    /* results */
    tr_lm_counts counts[3];     /* sizes of each text */
    int          unit;          /* TR_BPC, TR_PPL or TR_WORD_PPL */
    double       best;          /* lowest validation loss, for --best; NaN: none */
    double       best_seen;     /* lowest validation loss of any evaluation; NaN: none */
    uint64_t     evaluated, blocks;     /* step and number of blocks of the last evaluation */
    int          last;          /* 1: from now on, evaluations give the final results of the run */
    char         result[200];   /* the line that reports the last evaluation */
    int          not_replayed;  /* consecutive steps that ran without a CUDA graph */
    int          note_reported; /* 1: the reason for not_replayed was reported */

    /* files */
    int          lost;          /* 1: generated text could not be written */
    int          begun;         /* 1: log and event file are open. An error is then a failure of the
                                   run (exit code 1), not of its start (exit code 2) */
    tr_claim     claim[3];      /* claims on the files that tr_lm_output lists, once begun is 1 */
    char         found_seal[32];        /* checksum of the --checkpoint file when it was opened;
                                           "": no file */
    char        *config;        /* the options as JSON, for the checkpoint */
    char        *made_dir;      /* the directory of --out, if this run created it */
    char        *stop;          /* --stop with its escapes decoded */
    char        *prompt;        /* text of --prompt */
    size_t       prompt_len;
    tr_adopted   adopted;       /* result of tr_options_adopt */
    tr_buf       sized;         /* the options that were chosen for the size of the training
                                   text, as text */
    tr_log       log;
    tr_term      term;
    tr_board     board;
    tr_rate      rate;
    double       began;         /* time when training began */
    char         err[TR_ERR];
};


// >>lm: ranks

/* Returns the number of ranks. In a rehearsal, this is the number of ranks of the real
   run. */
TR_DEF int tr_lm_ranks(const tr_lm *t) {
    return t->rehearsal ? t->rehearsal : stx_ranks(t->x);
}

/* Returns the signal that stops the run, or 0. Several ranks stop at a signal on which
   they have agreed. A single process stops at the signal that it received. */
TR_DEF int tr_lm_stop(const tr_lm *t) {
    return tr_lm_ranks(t) > 1 ? t->agreed : tr_stop_requested();
}

/* Replaces the n values of v by their sums over all ranks, and informs all ranks of a
   signal that any rank received. Collective. Returns 0 on an error of the group. */
TR_DEF int tr_lm_agree(tr_lm *t, double *v, size_t n) {
    double sig = tr_stop_requested();
    if (tr_lm_ranks(t) < 2) return 1;
    if (!stx_group_sum(t->x, v, n) || !stx_group_max(t->x, &sig, 1)) return 0;
    t->agreed = (int)sig;
    return 1;
}

/* Prints why the program ends, and returns `code`. With several ranks, the message
   names the rank and the host, and the other ranks are aborted. Because bad input
   usually affects all ranks, the other ranks first wait 3 s for rank 0 to report it. */
TR_DEF int tr_lm_end(const tr_lm *t, const char *why, int code) {
    char host[256] = "", message[TR_ERR + 256];
    if (t->start.ranks < 2) {
        snprintf(message, sizeof message, "%s: %s", t->options->program, why);
        tr_fold(message, tr_columns(2));
        fprintf(stderr, "%s\n", message);
        return code;
    }

#ifndef _WIN32
    gethostname(host, sizeof host - 1);
    /* rank 0 normally reports the error; mpirun then ends this rank within a second or
       so */
    if (t->start.rank > 0) {
        struct timespec time = {3, 0};
        nanosleep(&time, NULL);
    }
#endif
    fprintf(stderr, "%s: rank %d of %d, on %s: %s\n", t->options->program, t->start.rank,
            t->start.ranks, host, why);
    fflush(stderr);
    stx_group_abort(t->x, code);
    return code;
}

/* Nonzero if text for standard output was lost: the exit code is then 1, whatever the
   program was printing. */
TR_DEF int tr_lm_lost(const tr_lm *t) {
    return t->lost || ferror(stdout);
}

/* Prints t->err and returns the exit code: 2 for invalid input, or 1 if output was
   lost. */
TR_DEF int tr_lm_refuse(const tr_lm *t) {
    return tr_lm_end(t, t->err, tr_lm_lost(t) ? 1 : 2);
}


// >>lm: errors of the library, in terms of the options

/* A phrase in the library's error messages, and its replacement in terms of the
   options. */
typedef struct tr_word {
    const char *from, *to;
} tr_word;

/* Copies text to `out` and replaces each `from` by its `to`. Skips entries whose `to` is
   the name of an option: only tr_lm_why_in applies them. `words` ends with a NULL entry.
   Of two entries with a common beginning, the longer one must come first. Returns the
   length of `out`. */
TR_DEF size_t tr_lm_reword(const tr_lm *t, char *out, size_t size, const char *text,
                           const tr_word *words) {
    const tr_word *w;
    size_t at = 0;
    while (*text && at + 1 < size) {
        for (w = words; w->from; w++)
            if (!strncmp(text, w->from, strlen(w->from))
                && !tr_find_option(t->options, w->to, strlen(w->to)))
                break;
        if (!w->from) {
            out[at++] = *text++;
            continue;
        }
        text += strlen(w->from);
        at += (size_t)snprintf(out + at, size - at, "%s", w->to);
    }
    if (at >= size) at = size - 1;
    out[at] = 0;
    return at;
}

/* Writes the context's error to t->err, in terms of the options. Returns 0. */
TR_DEF int tr_lm_why(tr_lm *t) {
    static const tr_word words[] = {
        {"raise desc.max_bytes", "raise it"},
        {"gpu: expected", "--gpu: expected"},
        {"the text to encode: ", ""},
        {"with min_count (--min-count) 2", "with --min-count 2"},
        {"or without compact", "or with --tokens bytes"},
        {"or use the kind bytes", "or use --tokens bytes"},
        {"use STX_CPU, or define SEQTX_CUDA and link seqtx_cuda.cu",
            "use --device cpu, or a trainer made by make cuda"},
        {"device: this build does not support device 1", "this build does not support CUDA"},
        {"precision: this build does not support precision 1",
            "this build does not support bf16"},
        {"STX_PREC_F32", "--precision f32"},
        {" or STX_PREC_BF16", ""},
        {"weight_decay: STX_ADAGRAD has no weight decay: set it to 0 or use STX_ADAMW",
            "--optim adagrad has no --weight-decay: set it to 0, or use --optim adamw"},
        {NULL, NULL}
    };
    char text[TR_ERR];
    const char *message = text;
    int code = stx_error_code(t->x), creating;
    tr_lm_reword(t, text, sizeof text, stx_error(t->x), words);
    creating = !strncmp(text, "stx_create: ", 12);
    if (creating) message += 12;
    else if (!strncmp(text, "stx_optim_create: ", 18)) message += 18;

    if (code == STX_ERR_DEVICE && creating)
        return tr_fail(t->err, TR_ERR, "--device %s --precision %s: %s",
                       t->opt->device ? "cuda" : "cpu", t->opt->precision ? "bf16" : "f32",
                       message);
    return tr_fail(t->err, TR_ERR, "%s%s", code == STX_ERR_MEMORY ? "--max-memory: " : "",
                   message);
}

/* For an option with named values (a choice or a flag), writes the name of a value to
   `out`. */
TR_DEF void tr_value_name(const tr_opt *o, int value, char *out, size_t size) {
    size_t len = 0;
    const char *name = NULL;
    if (o->type == TR_T_FLAG) {
        snprintf(out, size, "%s", value ? "on" : "off");
        return;
    }
    if (value >= 0) name = tr_choice(o->choices, value, &len);
    snprintf(out, size, "%.*s", name ? (int)len : 0, name ? name : "");
}

/* Returns the option that a message of the library is about, or NULL. The message begins
   with the name of a field, whose length is stored in *len. The option is the one to
   which `words` maps the field, or else the one with the same name. */
TR_DEF const tr_opt *tr_lm_field(const tr_lm *t, const char *text, const tr_word *words,
                                 size_t *len) {
    const tr_word *w;
    size_t n = strcspn(text, " :");
    for (w = words; w->from; w++) {
        const tr_opt *o = tr_find_option(t->options, w->to, strlen(w->to));
        int same;
        if (!o) continue;
        *len = strlen(w->from);
        if (strchr(w->from, ' ')) same = !strncmp(text, w->from, *len);
        else same = tr_same_name(text, n, w->from);
        if (same) return o;
    }
    *len = n;
    return tr_find_option(t->options, text, n);
}

/* Reports the library's error in terms of the options. The error has the form "WHO
   FIELD: expected Y, got X" (stx_bad_value). FIELD is replaced by the option that
   tr_lm_field finds. If the option's values have names, X is printed by name, and so is
   the 0 in "expected 0". Other phrases are replaced as in tr_lm_reword. */
TR_DEF int tr_lm_why_in(tr_lm *t, const char *who, const tr_word *words) {
    const char *text = stx_error(t->x), *got, *zero;
    char line[TR_ERR], part[TR_ERR], value_name[64];
    const tr_opt *o;
    size_t n, at;
    int value;
    if (stx_error_code(t->x) != STX_ERR_ARG || strncmp(text, who, strlen(who)) != 0)
        return tr_lm_why(t);

    /* the option's name */
    text += strlen(who);
    o = tr_lm_field(t, text, words, &n);
    if (!o) {
        tr_lm_reword(t, line, sizeof line, text, words);
        return tr_fail(t->err, TR_ERR, "%s", line);
    }
    text += n;
    at = (size_t)snprintf(line, sizeof line, "--%s", o->name);

    /* replace the value and an expected 0 by names */
    got = strstr(text, ", got ");
    if (got && (o->type == TR_T_CHOICE || o->type == TR_T_FLAG)
        && sscanf(got, ", got %d", &value) == 1) {
        zero = strstr(text, ": expected 0");
        if (zero && zero < got && (zero[12] == ' ' || zero[12] == ',')) {
            tr_value_name(o, 0, value_name, sizeof value_name);
            snprintf(part, sizeof part, "%.*s", (int)(zero - text), text);
            at += tr_lm_reword(t, line + at, sizeof line - at, part, words);
            at += (size_t)snprintf(line + at, sizeof line - at, ": expected %s", value_name);
            text = zero + 12;
        }
        snprintf(part, sizeof part, "%.*s", (int)(got - text), text);
        if (at < sizeof line) at += tr_lm_reword(t, line + at, sizeof line - at, part, words);
        tr_value_name(o, value, value_name, sizeof value_name);
        snprintf(part, sizeof part, ", got %s", value_name);
        text = part;
    }
    if (at < sizeof line) tr_lm_reword(t, line + at, sizeof line - at, text, words);
    return tr_fail(t->err, TR_ERR, "%s", line);
}


// >>lm: units of results

/* Returns how many of the n tokens have a loss. */
TR_DEF double tr_lm_counted(const tr_lm *t, const int32_t *ids, size_t n) {
    size_t i, m = 0;
    for (i = 0; i < n; i++) m += ids[i] != t->pad_id;
    return (double)m;
}

/* Returns the number of bytes in the padding tokens among the n tokens, without the
   spaces between words. */
TR_DEF double tr_lm_pad_bytes(const tr_lm *t, const int32_t *ids, size_t n) {
    double pads = t->pad_id >= 0 ? (double)n - tr_lm_counted(t, ids, n) : 0;
    size_t bytes;
    if (!(pads > 0)) return 0;
    bytes = stx_vocab_decode(t->vocab, &t->pad_id, 1, NULL, 0);
    if (stx_vocab_kind(t->vocab) == STX_TOK_WORDS && t->pad_id != stx_vocab_eos(t->vocab)) bytes--;
    return pads * (double)bytes;
}

/* Returns the perplexity per word of text `part` (0, 1, 2: training, validation, test).
   nll is the mean loss in nats per token that has a loss. */
TR_DEF double tr_lm_word_ppl(const tr_lm *t, int part, double nll) {
    return exp(nll * t->counts[part].tokens / t->counts[part].words);
}

/* Converts nll, a mean loss in nats, to the run's unit. A perplexity is the
   exponential of the mean loss, not a mean of exponentials. */
TR_DEF double tr_lm_metric(const tr_lm *t, int part, double nll) {
    if (t->unit == TR_PPL) return exp(nll);
    if (t->unit == TR_WORD_PPL) return tr_lm_word_ppl(t, part, nll);
    return nll / log(2.0) * t->counts[part].tokens / t->counts[part].bytes;
}

/* Converts `loss`, a mean training loss in nats, to the run's unit. */
TR_DEF double tr_lm_train_metric(const tr_lm *t, double loss) {
    const tr_lm_counts *c = &t->counts[0];
    return tr_lm_metric(t, 0, t->mean_of_all ? loss * c->all / c->tokens : loss);
}

TR_DEF const char *tr_lm_unit(const tr_lm *t) {
    if (t->unit == TR_BPC) return "bpb";
    return t->unit == TR_PPL ? "ppl" : "word_ppl";
}

/* Returns the number of words that begin in a piece of text. White space separates
   words. *inside is 1 if the preceding text ends inside a word, and is updated for the
   next piece. */
TR_DEF double tr_lm_words_in(const char *s, size_t len, int *inside) {
    double words = 0;
    size_t k;
    for (k = 0; k < len; k++) {
        int in = s[k] != ' ' && (s[k] < '\t' || s[k] > '\r');
        words += in && !*inside;
        *inside = in;
    }
    return words;
}

/* Returns the number of words in a text, for any kind of token. White space separates
   words. If the tokens are words or pieces, a word begins at each token that begins
   with U+2581 (SentencePiece's mark of a new word). If there are no such marks, every
   token except <eos> is a word. */
TR_DEF double tr_lm_word_count(const tr_lm *t, const stx_corpus *text) {
    const int by_token = stx_vocab_kind(t->vocab) >= STX_TOK_WORDS;
    const int32_t eos = stx_vocab_eos(t->vocab);
    size_t n = stx_corpus_size(text), at, i, m, len = 0;
    double words = 0, marked = 0;
    int32_t id[256];
    int inside = 0;
    for (at = 0; at < n; at += m) {
        m = n - at < 256 ? n - at : 256;
        if (!stx_corpus_read(text, at, m, id)) return 0;
        for (i = 0; i < m; i++) {
            const char *s = stx_vocab_piece(t->vocab, id[i], &len);
            if (id[i] == t->pad_id) {
                inside = 0;
            } else if (by_token) {
                words += id[i] != eos;
                marked += len >= 3 && !memcmp(s, "\xe2\x96\x81", 3);
            } else if (id[i] == eos) {
                if (len) inside = 0;
            } else {
                words += tr_lm_words_in(s, len, &inside);
            }
        }
    }
    return marked > 0 ? marked : words;
}

/* Returns the option that makes the model read token by token, or NULL. */
TR_DEF const char *tr_lm_by_token(const tr_lm *t) {
    const tr_lm_opt *o = t->opt;
    if (o->interactive) return "interactive";
    if (o->generate) return "generate";
    return o->score && o->score_by != TR_BY_FILE ? "score-by" : NULL;
}


// >>lm: context

/* Nonzero if the context agrees with the options, which a checkpoint may have changed. */
TR_DEF int tr_lm_fits_options(const tr_lm *t) {
    const stx_desc *d = stx_ctx_desc(t->x);
    return d->precision == t->opt->precision && d->tf32 == t->opt->tf32 && d->seed == t->opt->seed
           && (d->no_graph || !*t->kind->adapt_io);
}

/* Creates the context that the options describe, or keeps the current one if it already
   matches them. Without --max-memory, the limit is 90 % of the machine's memory on a
   CPU, and there is no limit on a GPU. */
TR_DEF int tr_lm_context(tr_lm *t) {
    const tr_lm_opt *o = t->opt;
    double bytes = 0;
    stx_desc d;
    if (t->x && tr_lm_fits_options(t)) return 1;
    if (o->max_memory > 0)
        bytes = o->max_memory * 1073741824.0;
    else if (o->device != STX_CUDA)
        bytes = (double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGESIZE) * 0.9;

    memset(&d, 0, sizeof d);
    d.threads = o->threads;
    d.precision = o->precision;
    d.device = o->device;
    d.gpu = tr_given(t->options, "gpu") ? (int)o->gpu : t->start.local;
    d.tf32 = o->tf32;
    d.tune = o->tune;
    d.no_graph = o->no_graph || *t->kind->adapt_io;
    d.seed = o->seed;
    d.max_bytes = (size_t)bytes;

    stx_destroy(t->x);
    t->x = stx_create(&d);
    if (!t->x) return tr_fail(t->err, TR_ERR, "out of memory: cannot create a context");
    return stx_ok(t->x) ? 1 : tr_lm_why(t);
}

/* Joins the group of ranks. The context must not be replaced afterwards. */
TR_DEF int tr_lm_join(tr_lm *t) {
    stx_group_desc g;
    if ((!t->training && !t->evaluating) || t->start.ranks < 2) return 1;
    memset(&g, 0, sizeof g);
    g.shard = t->opt->shard;
    return stx_group_join(t->x, &g) || tr_lm_why(t);
}

/* Checks that --max-memory suffices for four values per parameter: the parameter, its
   gradient and two optimiser states. */
TR_DEF int tr_lm_fits(tr_lm *t, double params) {
    double need = params * sizeof(stx_real) * 4, limit = (double)stx_ctx_desc(t->x)->max_bytes;
    if (limit > 0 && need > limit)
        return tr_fail(t->err, TR_ERR, "--max-memory: the model alone requires %.3g GiB, "
                       "but the limit is %.3g GiB: use a smaller model, or raise --max-memory",
                       need / (1 << 30), limit / (1 << 30));
    return 1;
}

/* Parses --adapt-io-cutoffs into cutoff[] and stores the number of cutoffs in *n. */
TR_DEF int tr_lm_cutoffs(tr_lm *t, size_t cutoff[STX_MAX_CLUSTERS - 1], size_t *n) {
    const char *text = *t->kind->cutoffs;
    size_t i;
    int ok;
    *n = 0;
    if (!text || !*text) return 1;
    ok = tr_read_sizes(text, cutoff, STX_MAX_CLUSTERS - 1, n);
    for (i = 0; i < *n; i++) ok = ok && cutoff[i];
    if (ok) return 1;
    return tr_fail(t->err, TR_ERR, "--adapt-io-cutoffs: expected up to %d increasing numbers, "
                   "separated by commas, such as 20000,40000,200000, got '%s'",
                   STX_MAX_CLUSTERS - 1, text);
}


// >>lm: options by name

/* Returns the value of an integer option, or `missing` if the trainer has no such
   option. */
TR_DEF uint64_t tr_lm_number(const tr_lm *t, const char *name, uint64_t missing) {
    const tr_opt *p = tr_find_option(t->options, name, strlen(name));
    return p ? *(uint64_t *)p->to : missing;
}

/* Nonzero if the checkpoint, a preset or the command line sets the option. */
TR_DEF int tr_lm_decided(const tr_lm *t, const char *name) {
    const tr_opt *p = tr_find_option(t->options, name, strlen(name));
    return p && p->from > TR_FROM_TEXT;
}

/* Sets an option to the value that the size of the text suggests, unless the option is
   already set. */
TR_DEF int tr_lm_suggest(tr_lm *t, const char *name, uint64_t value) {
    char word[96];
    if (!tr_find_option(t->options, name, strlen(name))) return 1;
    snprintf(word, sizeof word, "%s=%" PRIu64, name, value);
    return tr_apply(t->options, word, TR_FROM_TEXT, t->err, TR_ERR);
}


// >>lm: text

/* Returns the fingerprint of a text: a hash of up to 256 evenly spaced pieces. It
   distinguishes texts of the same length. */
TR_DEF uint64_t tr_lm_fingerprint(const stx_corpus *c) {
    size_t n = stx_corpus_size(c), step = n / 256 > 256 ? n / 256 : 256, at, i;
    uint64_t h = 14695981039346656037u;
    int32_t piece[256];
    for (at = 0; at < n; at += step) {
        size_t m = n - at < 256 ? n - at : 256;
        if (!stx_corpus_read(c, at, m, piece)) return 0;
        for (i = 0; i < m; i++) h = (h ^ (uint32_t)piece[i]) * 1099511628211u;
    }
    return h;
}

/* Refuses text in UTF-16 or UTF-32 unless --tokens was given. Such text contains many
   zero bytes and was probably not meant to be read as bytes. */
TR_DEF int tr_lm_check_encoding(tr_lm *t, const char *path) {
    const tr_lm_opt *o = t->opt;
    char first[4096];
    const char *wide = NULL;
    FILE *f;
    if (o->tokens > TR_COMPACT || tr_given(t->options, "tokens")) return 1;
    if (t->vocab && !o->init_from) return 1;        /* the run began with this text */
    f = fopen(path, "rb");
    if (f) {
        wide = stx_text_encoding(first, fread(first, 1, sizeof first, f));
        fclose(f);
    }
    if (!wide) return 1;
    return tr_fail(t->err, TR_ERR, "--data %.1000s: expected UTF-8, got %s: convert it with "
                   "iconv -f %s -t UTF-8 OLD > NEW, or read its bytes unchanged with --tokens %s",
                   path, wide, wide, o->tokens == TR_BYTES ? "bytes" : "bytes-compact");
}

/* Removes a byte-order mark from the start of a text, as the corpus reader does, unless
   the tokens are bytes. Returns the new length. */
TR_DEF size_t tr_lm_unmark(const tr_lm *t, char *text, size_t len) {
    if (stx_vocab_kind(t->vocab) == STX_TOK_BYTES) return len;
    if (len < 3 || memcmp(text, "\xEF\xBB\xBF", 3) != 0) return len;
    memmove(text, text + 3, len - 3);
    return len - 3;
}

/* Location of the training, validation and test texts: three files, or three byte
   ranges in one file. */
typedef struct tr_lm_source {
    char     path[3][4096];
    uint64_t begin[3], end[3];
    int      dir;               /* 1: --data is a directory */
} tr_lm_source;

/* Reports that --data is missing. Returns 0. */
TR_DEF int tr_lm_no_data(tr_lm *t) {
    const tr_lm_opt *o = t->opt;
    struct stat st;
    if (t->training && o->checkpoint && !o->init_from && stat(o->checkpoint, &st)
        && errno == ENOENT)
        return tr_fail(t->err, TR_ERR, "--checkpoint %.900s: %s; to start a new run, give --data",
                       o->checkpoint, strerror(ENOENT));
    return tr_fail(t->err, TR_ERR, "--data is missing: give a text file, or a directory with "
                   "train.txt, valid.txt and test.txt");
}

/* Locates the texts of --data. The last twentieth of a single file is the test text, and
   the twentieth before it is the validation text. */
TR_DEF int tr_lm_find_texts(tr_lm *t, tr_lm_source *from) {
    static const char *const names[3] = {"train.txt", "valid.txt", "test.txt"};
    const char *data = t->opt->data;
    struct stat st;
    uint64_t size;
    int part;
    memset(from, 0, sizeof *from);
    if (!data) return tr_lm_no_data(t);
    if (stat(data, &st)) {
        if (tr_find_option(t->options, "data", 4)->from == TR_FROM_CHECKPOINT)
            return tr_fail(t->err, TR_ERR, "the text of the checkpoint, %s: %s; if it was moved, "
                           "give its new path as --data", data, strerror(errno));
        return tr_fail(t->err, TR_ERR, "--data %s: %s", data, strerror(errno));
    }

    from->dir = S_ISDIR(st.st_mode);
    for (part = 0; part < 3; part++) {
        char *path = from->path[part];
        size_t most = sizeof from->path[part];
        int n = from->dir ? snprintf(path, most, "%s/%s", data, names[part])
                          : snprintf(path, most, "%s", data);
        if (n < 0 || (size_t)n >= most)
            return tr_fail(t->err, TR_ERR,
                           "--data: expected a path of fewer than %zu bytes, got %zu", most,
                           strlen(data));
    }
    if (from->dir) return 1;

    size = (uint64_t)st.st_size;
    if (!S_ISREG(st.st_mode))
        return tr_fail(t->err, TR_ERR, "--data %s: expected a regular file or a directory, got a "
                       "pipe or a device", data);
    if (size < 64)
        return tr_fail(t->err, TR_ERR, "--data %s: expected at least 64 bytes, got %llu", data,
                       (unsigned long long)size);
    from->end[0] = from->begin[1] = size - size / 20 * 2;
    from->end[1] = from->begin[2] = size - size / 20;
    from->end[2] = size;
    return 1;
}

/* Builds the vocabulary of the training text. */
TR_DEF int tr_lm_build_vocab(tr_lm *t, const tr_lm_source *from) {
    const tr_lm_opt *o = t->opt;
    stx_vocab_desc d;
    memset(&d, 0, sizeof d);
    d.kind = o->tokens >= TR_CHARS ? STX_TOK_CHARS + (o->tokens - TR_CHARS) : STX_TOK_BYTES;
    d.pieces = o->pieces;
    d.join_lines = o->join_lines;
    d.compact = o->tokens == TR_COMPACT;
    d.eos = o->tokens == TR_CHARS;
    d.min_count = o->min_count;
    d.order = *t->kind->adapt_io ? t->kind->order : STX_ORDER_FIRST;
    d.eos_first = *t->kind->adapt_io && o->tokens == TR_WORDS && t->kind->eos_first;
    t->vocab = stx_vocab_build(t->x, &d, from->path[0], from->begin[0], from->end[0]);
    return t->vocab ? 1 : tr_lm_why(t);
}

/* Opens the texts. Validation and test texts of a directory are optional. On error,
   sets t->err and returns 0, and *failed receives the index of the text that could not
   be opened. */
TR_DEF int tr_lm_open_texts(tr_lm *t, const tr_lm_source *from, int *failed) {
    struct stat st;
    int part;
    for (part = 0; part < 3; part++) {
        *failed = part;
        if (from->dir && part && stat(from->path[part], &st) && errno == ENOENT) continue;
        t->text[part] = stx_corpus_open(t->x, t->vocab, from->path[part], from->begin[part],
                                        from->end[part]);
        if (!t->text[part]) return tr_lm_why(t);
    }
    return 1;
}

/* Rebuilds the vocabulary with the <unk> that a validation or test text requires. */
TR_DEF int tr_lm_add_unk(tr_lm *t, const tr_lm_source *from) {
    int part;
    stx_clear_error(t->x);
    for (part = 0; part < 3; part++) {
        stx_corpus_close(t->text[part]);
        t->text[part] = NULL;
    }
    stx_vocab_free(t->vocab);
    t->vocab = NULL;
    t->unk_added = 1;
    return tr_lm_suggest(t, "min-count", 2) && tr_lm_build_vocab(t, from)
           && tr_lm_open_texts(t, from, &part);
}

/* Stores the paths of memory-mapped texts, and watches the files for truncation. */
TR_DEF int tr_lm_watch_texts(tr_lm *t, const tr_lm_source *from) {
    int part;
    if (stx_vocab_kind(t->vocab) != STX_TOK_BYTES) return 1;
    for (part = 0; part < 3; part++) {
        if (!t->text[part]) continue;
        t->file[part] = (char *)malloc(strlen(from->path[part]) + 1);
        if (!t->file[part])
            return tr_fail(t->err, TR_ERR, "out of memory: cannot store the path of a text");
        strcpy(t->file[part], from->path[part]);
        if (!tr_watch(t->options->program, t->file[part], t->err, TR_ERR)) return 0;
    }
    return 1;
}

/* Opens the three texts, and builds the vocabulary unless a checkpoint provided it. If
   the validation or test text has words or characters that the training text lacks, an
   <unk> is added to the vocabulary. */
TR_DEF int tr_lm_data(tr_lm *t) {
    static const char *const names[3] = {"training", "validation", "test"};
    const tr_lm_opt *o = t->opt;
    tr_lm_source from;
    int part, new_vocab, may_add_unk;
    if (!tr_lm_find_texts(t, &from)) return 0;
    for (part = 0; part < (from.dir ? 3 : 1); part++)
        if (!tr_lm_check_encoding(t, from.path[part])) return 0;

    new_vocab = !t->vocab;
    if (new_vocab && !tr_lm_build_vocab(t, &from)) return 0;
    if (!tr_lm_open_texts(t, &from, &part)) {
        may_add_unk = part && new_vocab && (o->tokens == TR_CHARS || o->tokens == TR_WORDS)
                      && !tr_lm_decided(t, "min-count");
        if (!may_add_unk || !tr_lm_add_unk(t, &from)) return 0;
    }

    for (part = 0; part < 3; part++)
        if (t->text[part] && stx_corpus_size(t->text[part]) < 2)
            return tr_fail(t->err, TR_ERR, "--data %s: the %s text is too short: expected at least "
                           "2 tokens, got %zu", o->data, names[part],
                           stx_corpus_size(t->text[part]));
    t->fingerprint = tr_lm_fingerprint(t->text[0]);
    return tr_lm_watch_texts(t, &from);
}

/* Returns 0 and sets an error if a text has been truncated since it was opened. The
   result of the step or evaluation that has just read it is then invalid. */
TR_DEF int tr_lm_texts_are_whole(const tr_lm *t) {
    const char *path = tr_cut_short();
    if (path)
        stx_fail(t->x, STX_ERR_IO, "the text %s was truncated while it was being read; the last "
                 "checkpoint is intact", path);
    return !path;
}

/* Cuts the training text into B streams, which are read in blocks of T tokens. If
   memory runs out, the context's error is set, but not t->err. */
TR_DEF int tr_lm_batches(tr_lm *t, uint64_t B, uint64_t T) {
    stx_batches_desc d;
    memset(&d, 0, sizeof d);
    d.B = B;
    d.T = T;
    d.seed = t->opt->seed;
    d.how = t->opt->reading;
    d.count = t->use;
    t->batches = stx_batches_create(t->x, t->text[0], &d);
    if (t->batches || stx_error_code(t->x) == STX_ERR_MEMORY) return 1;
    return tr_fail(t->err, TR_ERR, "--data %s, --batch-sz %llu, --block-sz %llu: %s", t->opt->data,
                   (unsigned long long)B, (unsigned long long)T, stx_error(t->x));
}


// >>lm: sizes without a preset

/* Repeatedly halves the number of streams and the block length, unless they were given,
   until n tokens are enough for four blocks per stream. */
TR_DEF int tr_lm_shrink_batch(tr_lm *t, double n) {
    const int any_B = !tr_lm_decided(t, "batch-sz") && !tr_lm_decided(t, "batch-split");
    const int any_T = !tr_lm_decided(t, "block-sz");
    for (;;) {
        uint64_t B = tr_lm_number(t, "batch-sz", 1), T = tr_lm_number(t, "block-sz", 1);
        int ok;
        if (n >= (double)B * 4.0 * (double)(T + 1)) return 1;
        if (any_B && B > 4) ok = tr_lm_suggest(t, "batch-sz", B / 2);
        else if (any_T && T > 8) ok = tr_lm_suggest(t, "block-sz", T / 2);
        else if (any_B && B > 1) ok = tr_lm_suggest(t, "batch-sz", B / 2);
        else return 1;
        if (!ok) return 0;
    }
}

/* Chooses the options that depend on the size of the text, unless a preset was given.
   For a short text, the model is smaller and dropout is higher. The text is read up to
   20 times, but no more than 5 million tokens in all. A longer text is read once, up to
   a total of 20 million tokens. */
TR_DEF int tr_lm_size(tr_lm *t) {
    static const char *const report[] = {
        "nlayers", "hid-sz", "dropout", "batch-sz", "block-sz", "steps"
    };
    const double n = (double)stx_corpus_size(t->text[0]);
    const char *sizes = t->kind->sized[2];
    double tokens = 20 * n < 5e6 ? 20 * n : 5e6;
    uint64_t steps;
    char value[64];
    size_t i;
    if (t->options->preset_used[0]) return 1;
    if (n <= 1e5) sizes = t->kind->sized[0];
    else if (n <= 2e6) sizes = t->kind->sized[1];
    if (n > 5e6) tokens = n < 2e7 ? n : 2e7;

    if (!tr_apply(t->options, sizes, TR_FROM_TEXT, t->err, TR_ERR)) return 0;
    if (!tr_lm_suggest(t, "inner-hid-sz", 4 * tr_lm_number(t, "hid-sz", 1))) return 0;
    if (!tr_lm_shrink_batch(t, n)) return 0;

    if (!tr_lm_decided(t, "steps") && !tr_lm_decided(t, "niter") && !tr_lm_decided(t, "epochs")) {
        double per_step = (double)tr_lm_number(t, "batch-sz", 1);
        per_step *= (double)tr_lm_number(t, "block-sz", 1);
        per_step *= (double)tr_lm_number(t, "update-param-freq", 1);
        steps = tokens / per_step < 100 ? 100 : (uint64_t)(tokens / per_step);
        if (!tr_lm_suggest(t, "steps", steps)) return 0;
    }
    steps = t->opt->steps;
    if (!steps) steps = tr_lm_number(t, "niter", 1) * tr_lm_number(t, "nbatches", 1000);
    if (!tr_lm_suggest(t, "lr-warmup", steps / 10 < 60 ? steps / 10 : 60)) return 0;
    if (!tr_lm_decided(t, "nbatches")
        && (!tr_lm_suggest(t, "save-every", (steps + 3) / 4)
            || !tr_lm_suggest(t, "eval-every", (steps + 3) / 4)))
        return 0;

    for (i = 0; i < sizeof report / sizeof *report; i++) {
        const tr_opt *p = tr_find_option(t->options, report[i], strlen(report[i]));
        if (!p || p->from > TR_FROM_TEXT) continue;
        tr_value(p, value);
        tr_buf_puts(&t->sized, " --");
        tr_buf_puts(&t->sized, report[i]);
        tr_buf_puts(&t->sized, " ");
        tr_buf_puts(&t->sized, value);
    }
    return 1;
}


// >>lm: training state

/* Checks that a stream is long enough for the `freq` blocks of an update, and that the
   text is long enough for one segment of --random-segments. */
TR_DEF int tr_lm_long_enough(tr_lm *t, uint64_t freq, uint64_t T) {
    const uint64_t segment = t->opt->random_segments;
    const size_t size = stx_corpus_size(t->text[0]);
    if (t->batches && freq > 1 && stx_batches_stream(t->batches) <= freq * T)
        return tr_fail(t->err, TR_ERR, "--update-param-freq %llu: expected streams of at least "
                       "%llu tokens for that many blocks of %llu tokens, got %zu",
                       (unsigned long long)freq, (unsigned long long)(freq * T + 1),
                       (unsigned long long)T, stx_batches_stream(t->batches));
    if (segment && segment >= size / T)
        return tr_fail(t->err, TR_ERR, "--random-segments %llu: expected a training text of at "
                       "least %llu tokens for that many blocks of %llu tokens, got %zu",
                       (unsigned long long)segment, (unsigned long long)((segment + 1) * T),
                       (unsigned long long)T, size);
    return 1;
}

/* Creates the objects that training requires, once t->lm exists: batches, the
   optimiser, a state for each part of the batch, and buffers for the `freq` blocks of
   an update. */
TR_DEF int tr_lm_make(tr_lm *t, const stx_optim_desc *od, uint64_t freq) {
    const uint64_t B = tr_lm_number(t, "batch-sz", 1), T = tr_lm_number(t, "block-sz", 1);
    const size_t tokens = (size_t)(freq * B * T);
    size_t k, rows;
    t->parts = (size_t)tr_lm_number(t, "batch-split", 1);
    t->pieces = t->parts * (size_t)freq;
    rows = (size_t)B / t->parts / (size_t)tr_lm_ranks(t);
    if (!tr_lm_batches(t, B, T) || !tr_lm_long_enough(t, freq, T)) return 0;

    if (t->opt->update_every > 1) t->grads = stx_params_grads(t->lm.params, &t->grads_size);
    t->optim = stx_optim_create(t->lm.params, od);
    t->state = (void **)stx_block(t->x, t->parts * sizeof *t->state);
    t->in = (stx_ids **)stx_block(t->x, 2 * t->pieces * sizeof *t->in);
    t->out = t->in + t->pieces;
    t->tokens = (int32_t *)malloc(2 * tokens * sizeof *t->tokens);
    t->targets = t->tokens + tokens;
    if (!t->tokens)
        stx_fail(t->x, STX_ERR_MEMORY, "out of memory: cannot allocate %zu tokens", tokens);
    for (k = 0; t->state && k < t->parts; k++)
        t->state[k] = t->lm.state_create(t->lm.model, rows, 0);
    for (k = 0; t->in && k < t->pieces; k++) {
        t->in[k] = stx_tokens_create(t->x, rows, (size_t)T);
        t->out[k] = stx_tokens_create(t->x, rows, (size_t)T);
    }
    t->layers = t->lm.recompute(t->lm.model, SIZE_MAX);
    t->recompute = t->lm.recompute(t->lm.model, t->recompute);
    return stx_ok(t->x) ? 1 : tr_lm_why(t);
}


// >>lm: checkpoint. One file contains parameters, optimiser, states, step, random state,
// position in the text, vocabulary and options.

/* Returns the number of steps since the last update. Their gradients are accumulated
   for the next update. */
TR_DEF uint64_t tr_lm_pending(const tr_lm *t) {
    const tr_lm_opt *o = t->opt;
    if (o->update_every < 2 || t->step <= o->update_after) return 0;
    return (t->step - o->update_after) % o->update_every;
}

/* Creates a writer and adds everything except the states and the vocabulary. Returns NULL
   on error. */
TR_DEF stx_writer *tr_lm_save_begin(tr_lm *t) {
    stx_writer *w = stx_writer_create(t->x);
    stx_batches_state pos = stx_batches_get(t->batches);
    char text[32];
    int ok = w != NULL;
    ok = ok && stx_writer_meta(w, "format", t->kind->format);
    ok = ok && stx_writer_meta(w, "config", t->config);
    ok = ok && stx_writer_meta_u64(w, "step", t->step);
    ok = ok && stx_writer_meta_u64(w, "tick", stx_step_index(t->x));
    ok = ok && stx_writer_meta_u64(w, "seed", t->opt->seed);
    ok = ok && stx_writer_meta_u64(w, "data.tokens", stx_corpus_size(t->text[0]));
    ok = ok && stx_writer_meta_u64(w, "data.print", t->fingerprint);
    ok = ok && stx_writer_meta_u64(w, "data.position", pos.p);
    ok = ok && stx_writer_meta_u64(w, "data.wraps", pos.wraps);
    ok = ok && stx_writer_meta_u64(w, "data.fresh", (uint64_t)pos.fresh);
    if (ok && !isnan(t->best)) {
        snprintf(text, sizeof text, "%.17g", t->best);
        ok = stx_writer_meta(w, "best", text);
    }
    if (ok && t->logged && isfinite(t->sum)) {  /* for the next log record */
        snprintf(text, sizeof text, "%.17g", t->sum);
        ok = stx_writer_meta(w, "log.sum", text);
        ok = ok && stx_writer_meta_u64(w, "log.steps", t->logged);
    }
    ok = ok && stx_params_save(w, t->lm.params, "") && stx_optim_save(w, t->optim);
    if (ok && tr_lm_pending(t)) {
        ok = stx_writer_meta_u64(w, "grads.pending", tr_lm_pending(t));
        ok = ok && stx_writer_meta_u64(w, "grads.every", t->opt->update_every);
        ok = ok && stx_writer_add_device(w, "grads", 1, &t->grads_size, t->grads);
    }
    if (ok) return w;
    if (w) stx_writer_free(w);
    return NULL;
}

/* Writes the prefix of the names of a state's tensors, such as "memory.0.". */
TR_DEF const char *tr_lm_prefix(const tr_lm *t, size_t part, char *prefix, size_t size) {
    snprintf(prefix, size, "%s.%zu.", t->kind->states, part);
    return prefix;
}

/* Sends this rank's state to rank 0. Collective. */
TR_DEF int tr_lm_send_state(tr_lm *t, const void *state) {
    stx_ctx *x = t->x;
    const int rank = stx_rank(x);
    stx_writer *w = stx_writer_create(x);
    size_t size = 0;
    uint64_t n;
    void *bytes = NULL;
    int ok;
    if (t->lm.state_save(w, state, "")) bytes = stx_writer_bytes(w, &size);
    else stx_writer_free(w);
    n = size;
    ok = bytes && stx_group_send_bytes(x, &n, sizeof n, rank, 0)
         && stx_group_send_bytes(x, bytes, size, rank, 0);
    stx_block_free(x, bytes);
    return ok;
}

/* Receives the state of rank r and stores it in rank r's rows of `whole`. Collective. */
TR_DEF int tr_lm_receive_state(tr_lm *t, void *whole, int r) {
    stx_ctx *x = t->x;
    const size_t rows = t->in[0]->B;
    uint64_t n = 0;
    void *bytes = NULL, *state;
    stx_file *f = NULL;
    int ok;
    if (stx_group_send_bytes(x, &n, sizeof n, r, 0)) bytes = stx_block(x, (size_t)n);
    state = t->lm.state_create(t->lm.model, rows, 0);
    if (bytes && stx_group_send_bytes(x, bytes, (size_t)n, r, 0))
        f = stx_file_in_memory(x, "another rank's state", bytes, (size_t)n);
    ok = f && state && t->lm.state_load(state, f, "")
         && t->lm.state_copy(whole, (size_t)r * rows, state, 0, rows);
    stx_file_close(f);
    if (state) t->lm.state_free(state);
    stx_block_free(x, bytes);
    return ok;
}

/* Collects the states of all ranks' streams in one state on rank 0. Collective.
   Returns NULL on the other ranks and on error. */
TR_DEF void *tr_lm_gather(tr_lm *t, const void *state) {
    const int ranks = tr_lm_ranks(t), rank = stx_rank(t->x);
    const size_t rows = t->in[0]->B;
    void *whole = NULL;
    int r, ok = 1;
    if (!rank) {
        whole = t->lm.state_create(t->lm.model, rows * (size_t)ranks, 0);
        ok = whole && t->lm.state_copy(whole, 0, state, 0, rows);
    }
    for (r = 1; ok && r < ranks; r++) {
        if (rank == r) ok = tr_lm_send_state(t, state);
        else if (!rank) ok = tr_lm_receive_state(t, whole, r);
    }
    if (ok) return whole;
    if (whole) t->lm.state_free(whole);
    return NULL;
}

/* Adds the state of one part of the batch, with the streams of all ranks, to rank 0's
   writer w. stx_writer_finish reads the state, so it is kept until then. Collective. */
TR_DEF int tr_lm_save_state(tr_lm *t, stx_writer *w, const void *state, const char *prefix) {
    void **list, *whole;
    if (tr_lm_ranks(t) < 2) return t->lm.state_save(w, state, prefix);
    whole = tr_lm_gather(t, state);
    if (stx_rank(t->x)) return stx_ok(t->x);
    if (!whole) return 0;
    list = (void **)realloc(t->gathered, (t->gathered_count + 1) * sizeof *list);
    if (!list) {
        stx_fail(t->x, STX_ERR_MEMORY, "out of memory: cannot save the states of all ranks");
        t->lm.state_free(whole);
        return 0;
    }
    t->gathered = list;
    list[t->gathered_count++] = whole;
    return t->lm.state_save(w, whole, prefix);
}

/* Loads this rank's streams from a state that tr_lm_save_state saved. */
TR_DEF int tr_lm_load_state(tr_lm *t, const stx_file *f, void *state, const char *prefix) {
    size_t rows = t->in[0]->B;
    void *whole;
    int ok;
    if (tr_lm_ranks(t) < 2) return t->lm.state_load(state, f, prefix);
    whole = t->lm.state_create(t->lm.model, rows * (size_t)tr_lm_ranks(t), 0);
    ok = whole && t->lm.state_load(whole, f, prefix)
         && t->lm.state_copy(state, 0, whole, rows * (size_t)stx_rank(t->x), rows);
    if (whole) t->lm.state_free(whole);
    return ok;
}

/* Sets an error and returns 0 if the parameters of the ranks differ, which a defective
   machine or network can cause. Collective. */
TR_DEF int tr_lm_ranks_are_equal(tr_lm *t) {
    const stx_params *p = t->lm.params;
    uint64_t h = TR_HASH_BEGIN;
    double v[2];
    size_t i;
    if (tr_lm_ranks(t) < 2) return 1;
    for (i = 0; i < p->count; i++) {
        size_t n = p->tensor[i]->size;
        stx_real *copy = (stx_real *)malloc(n * sizeof *copy);
        if (!copy) {
            stx_fail(t->x, STX_ERR_MEMORY,
                     "out of memory: cannot compare the parameters of the ranks");
            return 0;
        }
        stx_get(t->x, p->tensor[i], copy);
        h = tr_hash(h, (const char *)copy, n * sizeof *copy);
        free(copy);
    }

    /* the hashes are equal if their maximum equals their minimum */
    v[0] = (double)(h >> 32);
    v[1] = -v[0];
    if (!stx_group_max(t->x, v, 2)) return 0;
    if (v[0] == -v[1]) return 1;
    stx_fail(t->x, STX_ERR_DEVICE, "the parameters of the ranks differ after step %llu: a machine "
             "or the network corrupts data; nothing is saved, and the last checkpoint is intact",
             (unsigned long long)t->step);
    return 0;
}

/* Sends this rank's shard of the optimiser's state to rank 0, which saves it. Called on
   all ranks except rank 0. Does nothing without --shard. Collective. */
TR_DEF int tr_lm_save_optim(const tr_lm *t, const stx_optim *o, const char *prefix) {
    return !t->opt->shard || tr_lm_ranks(t) < 2 || stx_optim_save_as(NULL, o, prefix);
}

/* Replaces the accumulated gradients, which differ between the ranks, by their mean, so
   that it can be saved. Training continues with the mean on every rank. This does not
   change the next update, because averaging is linear: the mean of equal gradients,
   plus what each rank adds later, is the gradient of the whole batch. Collective. */
TR_DEF int tr_lm_average_grads(tr_lm *t) {
    size_t at, i, n;
    stx_real part[1024];
    double sum[1024];
    if (tr_lm_ranks(t) < 2 || !tr_lm_pending(t)) return 1;
    for (at = 0; at < t->grads_size; at += n) {
        n = t->grads_size - at < 1024 ? t->grads_size - at : 1024;
        stx_download(t->x, part, t->grads + at, n);
        for (i = 0; i < n; i++) sum[i] = (double)part[i];
        if (!stx_group_sum(t->x, sum, n)) return 0;
        for (i = 0; i < n; i++) part[i] = (stx_real)(sum[i] / tr_lm_ranks(t));
        stx_upload(t->x, t->grads + at, part, n);
    }
    return stx_ok(t->x);
}

/* Writes the checkpoint to path, completely or not at all. If path is NULL, does
   nothing. Collective; rank 0 writes. */
TR_DEF int tr_lm_save(tr_lm *t, const char *path) {
    size_t len = stx_vocab_save(t->vocab, NULL, 0), part;
    stx_writer *w = NULL;
    char prefix[64];
    void *vocab;
    int ok;
    if (!path) return 1;
    if (!tr_lm_ranks_are_equal(t) || !tr_lm_average_grads(t)) return 0;
    if (stx_rank(t->x)) {
        ok = tr_lm_save_optim(t, t->optim, "");
    } else {
        w = tr_lm_save_begin(t);
        ok = w != NULL;
    }
    for (part = 0; ok && part < t->parts; part++)
        ok = tr_lm_save_state(t, w, t->state[part], tr_lm_prefix(t, part, prefix, sizeof prefix));
    if (ok && t->save_more) ok = t->save_more(t, w);
    if (stx_rank(t->x)) return ok;

    vocab = malloc(len + 1);
    ok = ok && vocab && stx_vocab_save(t->vocab, vocab, len) == len
         && stx_writer_add(w, "vocab", STX_U8, 1, &len, vocab) && stx_writer_checksum(w);
    if (!vocab) stx_fail(t->x, STX_ERR_MEMORY, "out of memory: cannot save the vocabulary");
    if (ok) ok = stx_writer_finish(w, path);
    else stx_writer_free(w);
    while (t->gathered_count) t->lm.state_free(t->gathered[--t->gathered_count]);
    free(vocab);
    return ok;
}

/* Checks that the file is a checkpoint of this program and that this run can use it. */
TR_DEF int tr_lm_check_format(tr_lm *t, const stx_file *f, const char *path) {
    const char *format = stx_file_meta(f, "format"), *config = stx_file_meta(f, "config");
    const stx_entry *vocab = stx_file_find(f, "vocab");
    const int ours = format && !strcmp(format, t->kind->format);
    if (format && !ours && !strncmp(format, "seqtx.", 6) && config && vocab)
        return tr_fail(t->err, TR_ERR, "%.700s is a checkpoint of train_%.*s: use that program",
                       path, (int)strcspn(format + 6, "."), format + 6);
    if (!ours || !config || !vocab || vocab->dtype != STX_U8)
        return tr_fail(t->err, TR_ERR,
                       "%s is a safetensors file, but not a checkpoint that this "
                       "program wrote", path);
    if (!stx_file_verify(f)) return tr_lm_why(t);
    if (t->training && !t->opt->init_from && stx_file_meta(f, "converted.from"))
        return tr_fail(t->err, TR_ERR, "%.400s was converted from another program and has no "
                       "optimiser state, so it cannot be resumed: --init-from %.400s starts a new "
                       "run with its weights", path, path);
    return 1;
}

/* Adopts the options in the configuration of a checkpoint. */
TR_DEF int tr_lm_adopt(tr_lm *t, const char *config, const char *path) {
    const char *missing;
    int how = t->training ? TR_RESUME : TR_LOOK;
    if (t->opt->init_from) how = TR_INIT;
    if (!tr_options_adopt(t->options, config, how, &t->adopted, t->err, TR_ERR)) return 0;
    if (!t->training || !t->adopted.missing.n) return 1;
    missing = t->adopted.missing.s;
    return tr_fail(t->err, TR_ERR, "%.300s was written by an older version, which did not store "
                   "%.500s: to resume, give %s, or the --preset, that the run started with",
                   path, missing, strchr(missing, ',') ? "those options" : "that option");
}

/* Opens --init-from if it is given, otherwise --checkpoint. Checks the format, and
   adopts the options and the vocabulary. If they require a different context, creates
   one. *f receives the open file, or NULL if there is no checkpoint yet. */
TR_DEF int tr_lm_open_checkpoint(tr_lm *t, stx_file **f) {
    const char *own = t->opt->checkpoint, *from = t->opt->init_from, *path = from ? from : own;
    const stx_entry *vocab;
    struct stat st;
    *f = NULL;
    if (from && own && !stat(own, &st))
        return tr_fail(t->err, TR_ERR, "--init-from %.400s starts a new run, but --checkpoint "
                       "%.400s exists: leave --init-from out to resume it, or name another "
                       "--checkpoint", from, own);
    if (!path || (stat(path, &st) && errno == ENOENT)) {
        if (!from && (t->training || t->opt->dry_run)) return 1;
        return tr_fail(t->err, TR_ERR, "--%s %s: %s", from ? "init-from" : "checkpoint",
                       path ? path : "", strerror(ENOENT));
    }

    *f = stx_file_open(t->x, path);
    if (!*f) return tr_lm_why(t);
    if (!tr_lm_check_format(t, *f, path)) return 0;
    if (!from) snprintf(t->found_seal, sizeof t->found_seal, "%s", stx_file_meta(*f, "seal"));
    if (!tr_lm_adopt(t, stx_file_meta(*f, "config"), path)) return 0;

    if (!tr_lm_fits_options(t)) {       /* the file belongs to the old context */
        stx_file_close(*f);
        *f = NULL;
        if (!tr_lm_context(t)) return 0;
        *f = stx_file_open(t->x, path);
    }
    vocab = *f ? stx_file_find(*f, "vocab") : NULL;
    t->vocab = vocab ? stx_vocab_load(t->x, vocab->data, vocab->bytes) : NULL;
    return t->vocab ? 1 : tr_lm_why(t);
}

/* Loads gradients that were accumulated when the checkpoint was saved between two
   updates. */
TR_DEF int tr_lm_load_grads(tr_lm *t, const stx_file *f) {
    const stx_entry *e = stx_file_find(f, "grads");
    uint64_t pending = 0, every = 0;
    if (!e && !tr_lm_pending(t)) return 1;
    if (e && !stx_file_meta_u64(t->x, f, "grads.pending", &pending)) return 0;
    if (e && !stx_file_meta_u64(t->x, f, "grads.every", &every)) return 0;
    if (pending != tr_lm_pending(t) || every != t->opt->update_every) {
        stx_fail(t->x, STX_ERR_ARG, "the checkpoint contains the gradients of %llu of %llu steps, "
                 "but --update-every and --update-after require %llu of %llu: give the values that "
                 "the saved run used",
                 (unsigned long long)pending, (unsigned long long)(every ? every : 1),
                 (unsigned long long)tr_lm_pending(t), (unsigned long long)t->opt->update_every);
        return 0;
    }
    if (e->count != t->grads_size) {
        stx_fail(t->x, STX_ERR_FORMAT, "expected %zu gradients, got %zu: the file is damaged",
                 t->grads_size, e->count);
        return 0;
    }
    return stx_entry_upload(e, t->grads, e->count);
}

/* Reads a real number from the metadata, if the key exists. */
TR_DEF int tr_lm_meta_real(tr_lm *t, const stx_file *f, const char *key, double *v) {
    const char *text = stx_file_meta(f, key);
    if (!text || tr_read_real(text, v)) return 1;
    stx_fail(t->x, STX_ERR_FORMAT, "metadata \"%s\": expected a number, got '%.40s'", key, text);
    return 0;
}

/* Checks that the checkpoint was written with this seed and training text. */
TR_DEF int tr_lm_check_origin(tr_lm *t, const stx_file *f) {
    const char *data = t->opt->data;
    uint64_t seed, tokens, fingerprint;
    if (!stx_file_meta_u64(t->x, f, "seed", &seed)) return 0;
    if (!stx_file_meta_u64(t->x, f, "data.tokens", &tokens)) return 0;
    if (!stx_file_meta_u64(t->x, f, "data.print", &fingerprint)) return 0;
    if (seed != t->opt->seed) {
        stx_fail(t->x, STX_ERR_FORMAT, "the checkpoint contains two values for --seed, %llu and "
                 "%llu: the file is damaged", (unsigned long long)seed,
                 (unsigned long long)t->opt->seed);
        return 0;
    }
    if (tokens != stx_corpus_size(t->text[0])) {
        stx_fail(t->x, STX_ERR_ARG, "the training text of --data %s: expected %llu tokens, as in "
                 "the checkpoint, got %zu: give the text that the run started with, or another "
                 "--checkpoint for a new run",
                 data, (unsigned long long)tokens, stx_corpus_size(t->text[0]));
        return 0;
    }
    if (fingerprint != t->fingerprint) {
        stx_fail(t->x, STX_ERR_ARG, "the training text of --data %s differs from the text that the "
                 "run started with: give that text, or another --checkpoint for a new run", data);
        return 0;
    }
    return 1;
}

/* Loads the parameters and the step from an open checkpoint and, for training,
   everything else. For --init-from, loads only the parameters. */
TR_DEF int tr_lm_load(tr_lm *t, const stx_file *f) {
    stx_ctx *x = t->x;
    stx_batches_state pos;
    uint64_t tick, fresh;
    size_t part;
    char prefix[64];
    if (!stx_params_load(t->lm.params, f, "") || (t->load_more && !t->load_more(t, f))) return 0;
    if (t->opt->init_from) return 1;
    if (!stx_file_meta_u64(x, f, "step", &t->step)) return 0;
    t->first = t->step;
    if (!tr_lm_meta_real(t, f, "best", &t->best)) return 0;
    t->best_seen = t->best;
    if (!t->training) return 1;

    if (!tr_lm_meta_real(t, f, "log.sum", &t->sum)) return 0;
    if (stx_file_meta(f, "log.sum") && !stx_file_meta_u64(x, f, "log.steps", &t->logged)) return 0;
    if (!stx_file_meta_u64(x, f, "tick", &tick)) return 0;
    if (!stx_file_meta_u64(x, f, "data.position", &pos.p)) return 0;
    if (!stx_file_meta_u64(x, f, "data.wraps", &pos.wraps)) return 0;
    if (!stx_file_meta_u64(x, f, "data.fresh", &fresh)) return 0;
    pos.fresh = fresh != 0;
    if (!tr_lm_check_origin(t, f)) return 0;

    if (!stx_optim_load(t->optim, f) || !stx_batches_set(t->batches, pos)) return 0;
    if (!tr_lm_load_grads(t, f)) return 0;
    stx_set_step_index(x, tick);
    for (part = 0; part < t->parts; part++) {
        tr_lm_prefix(t, part, prefix, sizeof prefix);
        if (!tr_lm_load_state(t, f, t->state[part], prefix)) return 0;
    }
    return 1;
}


// >>lm: start and end of a run

/* Reads standard input to its end and drops the final newline. */
TR_DEF int tr_lm_read_stdin(tr_lm *t, tr_buf *b) {
    char piece[4096];
    size_t n;
    while ((n = fread(piece, 1, sizeof piece, stdin)) > 0) tr_buf_put(b, piece, n);
    if (ferror(stdin))
        return tr_fail(t->err, TR_ERR, "--prompt -: cannot read standard input: %s",
                       strerror(errno));
    if (b->n && b->s[b->n - 1] == '\n') b->n--;
    if (b->n && b->s[b->n - 1] == '\r') b->n--;
    return 1;
}

/* Stores the text of --prompt in t->prompt. For "-", reads it from standard input. */
TR_DEF int tr_lm_prompt(tr_lm *t) {
    const char *text = t->opt->prompt;
    char why[TR_ERR];
    tr_buf b;
    memset(&b, 0, sizeof b);
    if (!text || !*text) return 1;
    if (strcmp(text, "-") != 0) {
        tr_buf_puts(&b, text);
    } else if (!tr_lm_read_stdin(t, &b)) {
        tr_buf_free(&b);
        return 0;
    }
    if (b.oom) {
        tr_buf_free(&b);
        return tr_fail(t->err, TR_ERR, "--prompt: out of memory: cannot store the text");
    }
    t->prompt = b.s;
    if (b.n && stx_vocab_encode(t->vocab, b.s, b.n, NULL, 0) == STX_NPOS) {
        tr_lm_why(t);
        snprintf(why, sizeof why, "%s", t->err);
        return tr_fail(t->err, TR_ERR, "--prompt: %.1000s", why);
    }
    if (b.n) t->prompt_len = tr_lm_unmark(t, b.s, b.n);
    return 1;
}

/* Creates the directory of --out unless it exists. */
TR_DEF int tr_lm_make_out(tr_lm *t) {
    const char *dir = t->opt->out;
    struct stat st;
    char why[TR_ERR];
    int exists = stat(dir, &st) == 0;
    if (!tr_mkdirs(dir, why, sizeof why)) return tr_fail(t->err, TR_ERR, "--out %.900s", why);
    if (exists) return 1;
    t->made_dir = (char *)malloc(strlen(dir) + 1);
    if (!t->made_dir)
        return tr_fail(t->err, TR_ERR, "--out: out of memory: cannot store the path");
    strcpy(t->made_dir, dir);
    return 1;
}

/* Copies --stop to t->stop and decodes its escapes. */
TR_DEF int tr_lm_stop_text(tr_lm *t) {
    const char *text = t->opt->stop;
    if (!text) return 1;
    if (!*text) return tr_fail(t->err, TR_ERR, "--stop: expected a text, got ''");
    t->stop = (char *)malloc(strlen(text) + 1);
    if (!t->stop) return tr_fail(t->err, TR_ERR, "--stop: out of memory: cannot store the text");
    strcpy(t->stop, text);
    tr_unescape(t->stop);
    return 1;
}

/* Performs the last checks before the first step and installs the signal handlers.
   Creates a directory but no file. */
TR_DEF int tr_lm_open(tr_lm *t) {
    const tr_lm_opt *o = t->opt;
    char *err = t->err;
    struct stat st;
    if (!tr_lm_prompt(t) || !tr_lm_stop_text(t)) return 0;
    if (o->tensorboard && !stat(o->tensorboard, &st) && !S_ISDIR(st.st_mode))
        return tr_fail(err, TR_ERR, "--tensorboard %s: expected a directory, got a file",
                       o->tensorboard);
    t->config = tr_options_json(t->options, 1);
    if (!t->config) return tr_fail(err, TR_ERR, "out of memory: cannot write the options");
    if (stx_rank(t->x)) return tr_signals(0, err, TR_ERR);      /* rank 0 writes the files */

    if (t->training) {
        if (o->out && !tr_lm_make_out(t)) return 0;
        if (o->checkpoint && !tr_can_write("checkpoint", o->checkpoint, 0, err, TR_ERR)) return 0;
        if (o->best && !tr_can_write("best", o->best, 0, err, TR_ERR)) return 0;
    }
    if (o->log && strncmp(o->log, "/dev/", 5)) {
        if (!tr_can_write("log", o->log, 1, err, TR_ERR)) return 0;
        if (!tr_log_here(o->log, err, TR_ERR)) return 0;
    }
    return tr_signals(t->training && !o->checkpoint && isatty(2), err, TR_ERR);
}

/* Returns the name of the k-th option (0, 1, 2) that names an output file. *path
   receives the path of that file, or NULL if this run does not write it. */
TR_DEF const char *tr_lm_output(const tr_lm *t, int k, const char **path) {
    static const char *const name[3] = {"checkpoint", "best", "log"};
    const tr_lm_opt *o = t->opt;
    *path = NULL;
    if (t->training && k == 0) *path = o->checkpoint;
    if (t->training && k == 1) *path = o->best;
    if (k == 2) *path = o->log;
    return name[k];
}

/* Refuses files that another run is writing. Only rank 0 checks; nothing is claimed
   yet. */
TR_DEF int tr_lm_check_unclaimed(tr_lm *t) {
    const char *path, *name;
    int k;
    if (t->start.rank > 0) return 1;
    for (k = 0; k < 3; k++) {
        name = tr_lm_output(t, k, &path);
        if (path && !tr_unclaimed(name, path, t->err, TR_ERR)) return 0;
    }
    return 1;
}

/* Claims the output files. Refuses the checkpoint if another run has written to it
   since this run opened it, because saving would overwrite that run's progress. */
TR_DEF int tr_lm_claim(tr_lm *t) {
    const char *path, *name, *seal;
    struct stat st;
    stx_file *f;
    int k, same;
    for (k = 0; k < 3; k++) {
        name = tr_lm_output(t, k, &path);
        if (!tr_claim_open(&t->claim[k], name, path, t->err, TR_ERR)) return 0;
    }
    path = t->opt->checkpoint;
    if (!t->training || !path) return 1;

    same = !t->found_seal[0];
    if (stat(path, &st) == 0) {
        f = stx_file_open(t->x, path);
        if (!f) return tr_lm_why(t);
        seal = stx_file_meta(f, "seal");
        same = seal && !strcmp(seal, t->found_seal);
        stx_file_close(f);
    }
    if (same) return 1;
    return tr_fail(t->err, TR_ERR, "--checkpoint %.900s: another run has written this file since "
                   "this run started: repeat the command to resume from it", path);
}

/* Writes the first record of the log. */
TR_DEF void tr_lm_log_start(tr_lm *t) {
    char *config = tr_options_json(t->options, 0);
    tr_log_begin(&t->log, t->first ? "resume" : "start");
    if (t->first) tr_log_int(&t->log, "step", t->first);
    tr_log_json(&t->log, "config", config);
    tr_log_int(&t->log, "params", stx_params_size(t->lm.params));
    if (t->predicted) tr_log_int(&t->log, "recomputed", t->recompute);
    if (t->predicted) tr_log_int(&t->log, "predicted_bytes", t->predicted);
    if (t->first) tr_log_json(&t->log, "changed", t->adopted.json.n ? t->adopted.json.s : "{}");
    if (t->first && t->adopted.given.n)
        tr_log_str(&t->log, "not_in_checkpoint", t->adopted.given.s);
    free(config);
    if (!tr_log_end(&t->log)) tr_say(&t->term, "%s: %s", t->options->program, t->log.err);
}

/* Opens the log and the event file and writes the first record. Called after the first
   step or evaluation has succeeded, so that a run that fails earlier leaves no files.
   Later calls do nothing. Returns 0 and sets t->err on failure. */
TR_DEF int tr_lm_begin(tr_lm *t) {
    const tr_lm_opt *o = t->opt;
    const uint64_t resumed = t->training ? t->first : 0;
    int ok;
    if (t->begun || stx_rank(t->x)) {
        t->begun = 1;
        return 1;
    }
    /* lines of later steps are removed only if training resumes, because it writes them
       again */
    ok = tr_lm_claim(t);
    ok = ok && tr_board_open(&t->board, o->tensorboard, resumed, t->err, TR_ERR);
    ok = ok && tr_log_open(&t->log, o->log, resumed ? resumed : TR_KEEP_ALL, t->err, TR_ERR);
    if (!ok) {
        stx_fail(t->x, STX_ERR_IO, "%s", t->err);
        return 0;
    }
    t->begun = 1;
    if (t->training && !(t->first && t->first >= t->steps)) tr_lm_log_start(t);
    return 1;
}

/* Prints the first lines of a training run. */
TR_DEF void tr_lm_hello_training(tr_lm *t) {
    const tr_lm_opt *o = t->opt;
    char peak[TR_TEXT_MAX], limit[TR_TEXT_MAX];
    if (t->predicted) {
        tr_bytes(peak, (double)t->predicted);
        tr_bytes(limit, (double)stx_ctx_desc(t->x)->max_bytes);
        tr_say(&t->term, "recomputing %zu of %zu layers; predicted peak %s, limit %s",
               t->recompute, t->layers, peak, limit);
    }
    if (o->init_from)
        tr_say(&t->term, "weights of %.1000s; optimiser, schedule and memories start afresh",
               o->init_from);
    if (t->unk_added)
        tr_say(&t->term, "the validation or test text has %s that the training text lacks; they, "
               "and those that the training text contains only once, are read as <unk> "
               "(--min-count 2; --min-count 1 refuses such texts)",
               o->tokens == TR_WORDS ? "words" : "characters");
    if (t->sized.n) tr_say(&t->term, "no --preset; sized for the text:%s", t->sized.s);
    if (t->first && t->adopted.given.n)
        tr_say(&t->term, "not in the checkpoint, taken from the command line or preset: %.1500s",
               t->adopted.given.s);
    if (t->first && t->adopted.changed.n)
        tr_say(&t->term, "resuming with changed options (old values in brackets): %.1500s",
               t->adopted.changed.s);
    if (t->first && t->step >= t->steps)
        tr_say(&t->term, "the run is complete; a larger --steps continues it");
    else if (!o->checkpoint)
        tr_say(&t->term, "no --checkpoint: nothing will be saved; with --checkpoint FILE, the "
               "model is saved and the run can be resumed");
}

/* Prints the first lines of the run. */
TR_DEF void tr_lm_hello(tr_lm *t) {
    const tr_lm_opt *o = t->opt;
    const int threads = stx_threads(t->x);
    const char *precision = o->precision ? "bf16 matmuls" : "f32";
    char size[TR_TEXT_MAX], mem[TR_TEXT_MAX];
    tr_term_open(&t->term, stx_rank(t->x) ? NULL : stderr);
    if (tr_lm_ranks(t) > 1) tr_say(&t->term, "%d ranks; this is rank 0", tr_lm_ranks(t));

    tr_count(size, (double)stx_params_size(t->lm.params));
    tr_bytes(mem, (double)stx_bytes(t->x));
    if (o->device) {
        if (o->precision) precision = "bf16";
        else if (o->tf32) precision = "f32 (TF32 matmuls)";
        tr_say(&t->term, "%s parameters, vocabulary %zu, %s, %s, %s of its memory so far", size,
               stx_vocab_size(t->vocab), stx_backend(t->x), precision, mem);
    } else {
        tr_say(&t->term, "%s parameters, vocabulary %zu, %d thread%s, %s, %s of memory so far",
               size, stx_vocab_size(t->vocab), threads, tr_s((uint64_t)threads), precision, mem);
    }
    if (o->weights) {
        tr_bytes(size, (double)t->packed);
        tr_say(&t->term, "matrices rounded to %s; generation reads up to %s of them per token",
               o->weights == 1 ? "bf16" : "int8", size);
    }
    if (t->text[0]) {
        int stored = tr_find_option(t->options, "data", 4)->from == TR_FROM_CHECKPOINT;
        tr_bytes(size, (double)stx_corpus_bytes(t->text[0]));
        tr_say(&t->term, "training text%s%.1000s: %s, %zu tokens; step %llu of %llu",
               stored ? " of the checkpoint, " : "", stored ? o->data : "", size,
               stx_corpus_size(t->text[0]), (unsigned long long)t->step,
               (unsigned long long)t->steps);
    }
    if (t->training) tr_lm_hello_training(t);
}

TR_DEF void tr_lm_close(tr_lm *t) {
    int part;
    tr_watched.n = 0;
    for (part = 0; part < 3; part++) {
        stx_corpus_close(t->text[part]);
        free(t->file[part]);
    }
    stx_batches_free(t->batches);
    stx_vocab_free(t->vocab);
    tr_log_close(&t->log);
    tr_board_close(&t->board);
    tr_adopted_free(&t->adopted);
    tr_buf_free(&t->sized);
    tr_options_free(t->options);
    free(t->before_make);
    free(t->config);
    free(t->prompt);
    free(t->stop);
    for (part = 0; part < 3; part++) tr_claim_close(&t->claim[part]);
    if (t->made_dir && !t->begun) rmdir(t->made_dir);       /* nothing was written */
    free(t->made_dir);
    free(t->gathered);
    free(t->tokens);
    stx_destroy(t->x);
}


// >>lm: progress and log records

/* If ok is 0, prints why the log or the event file failed. The run continues. */
TR_DEF void tr_lm_note(tr_lm *t, const char *what, int ok) {
    if (!ok) tr_say(&t->term, "%s: %s", t->options->program, what);
}

/* Adds a point to a TensorBoard curve. */
TR_DEF void tr_lm_point(tr_lm *t, const char *tag, double x) {
    tr_lm_note(t, t->board.err, tr_board_scalar(&t->board, tag, t->step, x));
}

/* Shows progress. `loss` is the loss of this step. */
TR_DEF void tr_lm_show(tr_lm *t, double loss, int due) {
    tr_progress p;
    memset(&p, 0, sizeof p);
    p.step = t->step;
    p.steps = t->steps;
    p.loss = loss;
    p.unit = tr_lm_unit(t);
    p.metric = tr_lm_train_metric(t, loss);
    if (!isnan(t->best_seen)) p.best = tr_lm_metric(t, 1, t->best_seen);
    p.lr = t->lr;
    p.tokens_per_s = tr_rate_tokens(&t->rate);
    p.left = tr_rate_left(&t->rate, t->steps - t->step);
    tr_show(&t->term, &p, due);
}

/* This many consecutive steps without a CUDA graph are normal: the first steps of a run
   allocate memory, and the sizes of a step change while a memory fills. */
enum { TR_NOT_REPLAYED = 64 };

/* Runs a step with stx_step_run. If steps persistently run without a CUDA graph, reports
   the reason once. */
TR_DEF int tr_lm_step(tr_lm *t, uint64_t key, stx_step_fn step, void *user) {
    const char *note;
    if (!stx_step_run(t->x, key, step, user)) return 0;
    note = stx_step_replay_status(t->x);
    t->not_replayed = *note ? t->not_replayed + 1 : 0;
    if (t->not_replayed >= TR_NOT_REPLAYED && !t->note_reported) {
        t->note_reported = 1;
        tr_say(&t->term, "steps run without a CUDA graph, which is slower; %s", note);
        tr_log_begin(&t->log, "note");
        tr_log_int(&t->log, "step", t->step);
        tr_log_str(&t->log, "note", note);
        tr_lm_note(t, t->log.err, tr_log_end(&t->log));
    }
    return 1;
}

/* Begins a "train" record. loss is the mean since the previous record. The trainer adds
   its values and calls tr_lm_logged. "grad_norm" is null in a step without an update.
   "seconds" is the time since training began in this process, including evaluation and
   saving. */
TR_DEF void tr_lm_log_step(tr_lm *t, double loss) {
    const double metric = tr_lm_train_metric(t, loss), seconds = tr_seconds() - t->began;
    char tag[40];
    tr_log_begin(&t->log, "train");
    tr_log_int(&t->log, "step", t->step);
    tr_log_num(&t->log, "loss", loss);
    tr_log_num(&t->log, tr_lm_unit(t), metric);
    tr_log_num(&t->log, "lr", t->lr);
    tr_log_num(&t->log, "grad_norm", t->update ? t->optim->grad_norm : (double)NAN);
    tr_log_num(&t->log, "tokens_per_s", tr_rate_tokens(&t->rate));
    tr_log_num(&t->log, "seconds", floor(1000 * seconds) / 1000);
    tr_log_int(&t->log, "peak_bytes", stx_peak_bytes(t->x));

    tr_lm_point(t, "train/loss", loss);
    snprintf(tag, sizeof tag, "train/%s", tr_lm_unit(t));
    tr_lm_point(t, tag, metric);
    tr_lm_point(t, "train/lr", t->lr);
    if (t->update) tr_lm_point(t, "train/grad_norm", t->optim->grad_norm);
    tr_lm_point(t, "train/tokens_per_s", tr_rate_tokens(&t->rate));
}

/* Nonzero if this evaluation is the best so far; if so, also records it. An interrupted
   evaluation has the result NaN, which is never the best. */
TR_DEF int tr_lm_better(tr_lm *t, double nll) {
    if (!(isnan(t->best) ? !isnan(nll) : nll < t->best)) return 0;
    t->best = nll;
    return 1;
}

/* Saves the best model so far and reports it. Returns 0 on error. */
TR_DEF int tr_lm_save_best(tr_lm *t) {
    const char *path = t->opt->best;
    if (!tr_lm_save(t, path)) return 0;
    if (stx_rank(t->x)) return 1;
    tr_say(&t->term, "step %llu: best so far, saved in %.1000s", (unsigned long long)t->step,
           path);
    tr_log_begin(&t->log, "best");
    tr_log_int(&t->log, "step", t->step);
    tr_log_num(&t->log, "loss", t->best);
    tr_log_num(&t->log, tr_lm_unit(t), tr_lm_metric(t, 1, t->best));
    tr_log_str(&t->log, "file", path);
    tr_lm_note(t, t->log.err, tr_log_end(&t->log));
    return 1;
}


// >>lm: evaluation

/* Reduces the number of streams and the length of a block for a short text. */
TR_DEF void tr_lm_fit(const stx_corpus *text, size_t *B, size_t *T) {
    size_t n = stx_corpus_size(text);
    while (*B > 1 && n / *B < 2 * (*T + 1)) --*B;
    if (n < *T + 1) *T = n > 2 ? n - 2 : 1;
}

/* Nonzero if a signal ends the pass. */
TR_DEF int tr_lm_pass_stops(const tr_lm *t) {
    return t->share_pass == TR_PASS_RANK0 ? tr_stop_requested() : tr_lm_stop(t);
}

/* Evaluates one block of `rows` streams of n tokens each. v receives the sum of the
   losses, the number of tokens over which the mean is taken, and the number of tokens
   with a loss. Returns the mean loss. */
TR_DEF double tr_lm_pass_block(tr_lm *t, const int32_t *in, const int32_t *out, size_t rows,
                               size_t n, void *state, double v[3]) {
    stx_ids *ids, *targets;
    double nll;
    v[0] = v[1] = v[2] = 0;
    if (!rows) return 0;
    v[2] = tr_lm_counted(t, out, rows * n);
    v[1] = t->mean_of_all ? (double)(rows * n) : v[2];
    stx_begin(t->x, STX_EVAL);
    ids = stx_tokens(t->x, in, rows, n);
    targets = stx_tokens(t->x, out, rows, n);
    nll = stx_item(t->x, t->lm.loss(t->lm.model, ids, targets, state, state));
    if (v[1] > 0) v[0] = nll * v[1];
    return nll;
}

/* Returns the mean loss over a text, in nats per token that has a loss. Training is not
   affected, because the evaluation has a separate state. If blocks is 0, the whole text
   is evaluated. Returns NaN on error or when a signal ends the pass. */
TR_DEF double tr_lm_pass(tr_lm *t, const stx_corpus *text, size_t B, size_t T, uint64_t blocks,
                         tr_lm_scored *scored) {
    const int shared = t->share_pass == TR_PASS_SHARED;
    const size_t ranks = shared ? (size_t)tr_lm_ranks(t) : 1;
    const size_t rank = shared ? (size_t)stx_rank(t->x) : 0;
    const size_t first = B * rank / ranks;                      /* this rank's first stream */
    const size_t rows = B * (rank + 1) / ranks - first;         /* number of this rank's streams */
    const size_t size = stx_corpus_size(text);
    const size_t window = t->eval_window < size ? t->eval_window : size;
    int32_t *in = (int32_t *)malloc(B * T * sizeof *in);
    int32_t *out = (int32_t *)malloc(B * T * sizeof *out);
    void *state = t->lm.state_create(t->lm.model, rows + !rows, window);
    stx_batches_desc d;
    stx_batches *b;
    double sum = 0, count = 0, exps = 0, v[3], nll;
    uint64_t k = 0;
    size_t n;
    memset(&d, 0, sizeof d);
    d.B = B;
    d.T = T;
    if (t->opt->reading == STX_BATCH_RECORDS) d.how = STX_BATCH_RECORDS;
    b = stx_batches_create(t->x, text, &d);
    if (!in || !out)
        stx_fail(t->x, STX_ERR_MEMORY, "out of memory: cannot allocate a batch of %zu x %zu tokens",
                 B, T);
    else if (b)
        stx_batches_rewind(b, t->eval_literal ? STX_EVAL_LITERAL : STX_EVAL_ALL);

    for (; in && out && b && (!blocks || k < blocks); k++) {
        if (stx_batches_next_eval(b, in, out, &n) == STX_BATCH_END || tr_lm_pass_stops(t)) break;
        nll = tr_lm_pass_block(t, in + first * n, out + first * n, rows, n, state, v);
        if (ranks > 1) {
            if (!stx_ok(t->x) || !tr_lm_agree(t, v, 3)) break;
            nll = v[1] > 0 ? v[0] / v[1] : 0;
        }
        sum += v[0];
        exps += exp(nll);
        count += v[2];
    }
    scored->tokens = count;
    scored->batch_ppl = k ? exps / (double)k : (double)NAN;
    free(in);
    free(out);
    stx_batches_free(b);
    t->lm.state_free(state);
    return count > 0 && !tr_lm_pass_stops(t) ? sum / count : (double)NAN;
}

/* Returns the stream for results: standard output, or standard error if generated text is
   written to standard output. */
TR_DEF FILE *tr_lm_results(const tr_lm *t) {
    return t->opt->generate || t->opt->interactive ? stderr : stdout;
}

/* Logs the result of an evaluation. */
TR_DEF void tr_lm_log_eval(tr_lm *t, const char *split, double nll, double metric, int more,
                           double word_ppl, const tr_lm_scored *scored, uint64_t blocks) {
    const char *of_part = blocks ? "_of_part" : "";
    char tag[40];
    tr_log_begin(&t->log, "eval");
    tr_log_str(&t->log, "split", split);
    tr_log_num(&t->log, "loss", nll);
    tr_log_num(&t->log, tr_lm_unit(t), metric);
    if (more) {
        tr_log_num(&t->log, "word_ppl", word_ppl);
        tr_log_num(&t->log, "batch_ppl", scored->batch_ppl);
    }
    tr_log_int(&t->log, "step", t->step);
    tr_log_int(&t->log, "tokens", (uint64_t)scored->tokens);
    tr_lm_note(t, t->log.err, tr_log_end(&t->log));

    snprintf(tag, sizeof tag, "%s/%s%s", split, tr_lm_unit(t), of_part);
    tr_lm_point(t, tag, metric);
    snprintf(tag, sizeof tag, "%s/loss%s", split, of_part);
    tr_lm_point(t, tag, nll);
    if (!more) return;
    snprintf(tag, sizeof tag, "%s/ppl_of_batches%s", split, of_part);
    tr_lm_point(t, tag, scored->batch_ppl);
}

/* Prints and logs the result of an evaluation. Returns 0 if the evaluation failed. */
TR_DEF int tr_lm_report(tr_lm *t, int part, double nll, const tr_lm_scored *scored,
                        uint64_t blocks) {
    static const char *const split[3] = {"train", "valid", "test"};
    const int more = t->more_figures && t->unit == TR_PPL;
    double metric, word_ppl = 0;
    char figures[96] = "";
    if (tr_lm_stop(t)) return 1;
    if (!stx_ok(t->x) || !tr_lm_texts_are_whole(t) || !tr_lm_begin(t)) return 0;
    if (part == 1) {
        t->evaluated = t->step;
        t->blocks = blocks;
        if (isnan(t->best_seen) ? !isnan(nll) : nll < t->best_seen) t->best_seen = nll;
    }

    metric = tr_lm_metric(t, part, nll);
    if (more) {
        word_ppl = tr_lm_word_ppl(t, part, nll);
        snprintf(figures, sizeof figures, ", %.2f per word, mean of batches %.4f", word_ppl,
                 scored->batch_ppl);
    }
    snprintf(t->result, sizeof t->result, "step %llu: %s %s %.4f (loss %.4f%s%s)",
             (unsigned long long)t->step, split[part], tr_lm_unit(t), metric, nll, figures,
             blocks ? ", part of the text" : "");
    tr_term_close(&t->term);            /* keeps the progress line above the result */
    if (stx_rank(t->x)) return 1;
    if (t->last && tr_lm_results(t) == stdout) printf("%s\n", t->result);
    else tr_say(&t->term, "%s", t->result);
    fflush(stdout);
    tr_lm_log_eval(t, split[part], nll, metric, more, word_ppl, scored, blocks);
    return 1;
}

/* Returns the mean loss over text `part` (0, 1, 2: training, validation, test), as
   computed by tr_lm_pass. */
TR_DEF double tr_lm_nll(tr_lm *t, int part, uint64_t blocks, tr_lm_scored *scored) {
    size_t B = (size_t)t->opt->eval_batch_sz, T = t->eval_block;
    double nll;
    if (!B) B = (size_t)(tr_lm_number(t, "batch-sz", 1) / tr_lm_number(t, "batch-split", 1));
    tr_lm_fit(t->text[part], &B, &T);
    t->share_pass = t->whole_pass ? TR_PASS_EACH : TR_PASS_SHARED;
    nll = tr_lm_pass(t, t->text[part], B, T, blocks, scored);
    t->share_pass = TR_PASS_RANK0;
    return nll;
}

/* Evaluates text `part`, if it exists, and reports the result. *nll receives the mean
   loss, or NaN. */
TR_DEF int tr_lm_evaluate(tr_lm *t, int part, uint64_t blocks, double *nll) {
    tr_lm_scored scored;
    *nll = (double)NAN;
    if (!t->text[part]) return 1;
    *nll = tr_lm_nll(t, part, blocks, &scored);
    return tr_lm_report(t, part, *nll, &scored, blocks);
}


// >>lm: --recompute auto

enum {
    TR_SMALL            = 4096, /* maximum size of a parameter that is copied, in elements */
    TR_SETTLED          = 4,    /* steps without a new peak after which a rehearsal ends */
    TR_SETTLED_WORDS    = 64,   /* TR_SETTLED for an adaptive vocabulary */
    TR_REHEARSED        = 4096, /* maximum number of steps in a rehearsal */
    TR_REHEARSED_BLOCKS = 256   /* number of blocks in the evaluation of a rehearsal */
};

/* Records a step of a rehearsal. Returns 1 while the peak can still rise, because
   memories are filling or because, with an adaptive vocabulary, the peak depends on the
   tokens. */
TR_DEF int tr_lm_rehearsed(tr_lm *t) {
    const size_t settled = *t->kind->adapt_io ? TR_SETTLED_WORDS : TR_SETTLED;
    const size_t peak = stx_peak_bytes(t->x);
    t->settled = peak > t->peak ? 0 : t->settled + 1;
    t->peak = peak;
    t->step++;
    return stx_ok(t->x) && t->settled < settled && t->step - t->first < TR_REHEARSED;
}

/* Copies the small parameters in `from`, including all that determine sizes, to the
   model of the rehearsal. If widest is 1, sets all spans to their maximum. */
TR_DEF void tr_lm_rehearse_params(tr_lm *t, const stx_params *from, int widest) {
    stx_real v[TR_SMALL];
    size_t i, k;
    for (i = 0; i < from->count; i++) {
        size_t n = from->tensor[i]->size;
        if (n > TR_SMALL) continue;
        stx_get(from->ctx, from->tensor[i], v);
        if (widest && strstr(from->name[i], "attn.span"))
            for (k = 0; k < n; k++) v[k] = 1;
        stx_set(t->x, t->lm.params->tensor[i], v);
    }
}

/* Returns the peak memory in bytes of a training run that recomputes n layers. If the
   run does not fit in `limit` bytes (the value for desc.max_bytes) or an error occurs,
   returns 0 and writes the reason to `why` (TR_ERR bytes). Creates the model and the
   optimiser in a dry context, which only counts memory, then trains and evaluates on
   the text. *made receives the number of bytes reserved before the first step. If
   widest is 1, all spans have their maximum length. */
TR_DEF size_t tr_lm_rehearse(tr_lm *t, size_t n, size_t limit, int widest, size_t *made,
                             char *why) {
    const stx_params *params = t->lm.params;
    const uint64_t step = t->step;
    const int ranks = tr_lm_ranks(t);
    stx_desc d = *stx_ctx_desc(t->x);
    void *real_run = malloc(t->kind->size);
    tr_lm_scored scored;
    size_t peak;
    int ok;
    *why = 0;
    if (!real_run) {
        snprintf(why, TR_ERR, "out of memory");
        return 0;
    }
    d.dry = 1;
    d.max_bytes = limit;
    d.alloc = NULL;
    d.release = NULL;
    d.user = NULL;

    /* restore the state from before the model was created */
    memcpy(real_run, t, t->kind->size);
    memcpy(t, t->before_make, t->kind->size);
    t->rehearsal = ranks;
    t->recompute = n;
    t->first = t->step = step;
    t->steps = UINT64_MAX;

    t->x = stx_create(&d);
    ok = stx_ok(t->x) && t->kind->make(t);
    if (ok) {
        *made = stx_bytes(t->x);
        tr_lm_rehearse_params(t, params, widest);
        t->kind->train(t);
        if (t->text[1]) tr_lm_nll(t, 1, TR_REHEARSED_BLOCKS, &scored);
        if (t->opt->sample_every || t->opt->generate)
            t->lm.gen_free(t->lm.gen_create(t->lm.model, 1, t->eval_window));
    }
    peak = ok && stx_ok(t->x) ? stx_peak_bytes(t->x) : 0;
    if (!peak && t->x && !stx_ok(t->x)) snprintf(why, TR_ERR, "%s", stx_error(t->x));
    else if (!peak) snprintf(why, TR_ERR, "%s", *t->err ? t->err : "out of memory");

    free(t->tokens);
    stx_batches_free(t->batches);
    stx_destroy(t->x);
    memcpy(t, real_run, t->kind->size);
    free(real_run);
    return *t->kind->adapt_io ? peak + peak / 20 : peak;
}

/* Reports that training does not fit even if all layers are recomputed, and suggests a
   --max-memory that suffices. This limit is found by search, because more memory is
   reserved than used. Returns 0. */
TR_DEF int tr_lm_nothing_fits(tr_lm *t) {
    char has[TR_TEXT_MAX], needs[TR_TEXT_MAX], why[TR_ERR];
    size_t made = 0, n, peak = tr_lm_rehearse(t, t->layers, 0, 0, &made, why);
    if (!peak)
        return tr_fail(t->err, TR_ERR,
                       "--recompute auto: cannot predict the memory use of training: %.900s", why);
    for (n = 0; n < 64 && !tr_lm_rehearse(t, t->layers, peak, 0, &made, why); n++)
        peak += peak / 64;
    tr_bytes(needs, (double)(peak + peak / 31 + t->overhead));
    tr_bytes(has, (double)stx_ctx_desc(t->x)->max_bytes);
    return tr_fail(t->err, TR_ERR, "--recompute auto: training requires %s even if all %zu layers "
                   "are recomputed, but --max-memory is %s: use a smaller --batch-sz, --block-sz "
                   "or model, use a larger --batch-split, or raise --max-memory",
                   needs, t->layers, has);
}

/* --recompute auto: chooses the smallest number of recomputed layers with which
   training fits. If training never fits, sets t->err and returns 0. All ranks choose
   the same number, so that they send their gradients in the same order. */
TR_DEF int tr_lm_choose(tr_lm *t) {
    size_t limit = stx_ctx_desc(t->x)->max_bytes, from = 0, to = t->layers + 1, n, made = 0, peak;
    double best;
    char why[TR_ERR];
    if (!t->predicted) {
        tr_lm_rehearse(t, 0, 0, 0, &made, why);
        t->overhead = made && stx_bytes(t->x) > made ? stx_bytes(t->x) - made : 0;
    }
    /* reserve 1/32 for what a rehearsal does not include: saving and fragmentation */
    limit = limit > t->overhead ? (limit - t->overhead) - (limit - t->overhead) / 32 : 1;

    /* because spans can grow, find the number for the widest spans; if there is none,
       recompute all layers */
    for (n = 0; from < to; n = (from + to) / 2) {
        if (tr_lm_rehearse(t, n, limit, 1, &made, why)) to = n;
        else from = n + 1;
    }
    if (to == 1 && t->layers > 1) to = 2;       /* recomputing only one layer saves nothing */
    if (to > t->layers) to = t->layers;
    peak = tr_lm_rehearse(t, to, limit, 0, &made, why);

    best = (double)(peak ? to : t->layers + 1);
    if (!stx_group_max(t->x, &best, 1)) return tr_lm_why(t);
    if (best > (double)t->layers) return tr_lm_nothing_fits(t);
    if (best > (double)to) peak = tr_lm_rehearse(t, (size_t)best, 0, 0, &made, why);
    t->recompute = t->lm.recompute(t->lm.model, (size_t)best);
    t->predicted = peak + t->overhead;
    return 1;
}

/* Chooses again after a step that used more memory than predicted, because spans grew
   or words of other clusters occurred. This happens only a few times, because each new
   prediction is at least a twentieth above the peak, and the number of layers never
   falls. If no number of layers fits, the choice remains unchanged. */
TR_DEF void tr_lm_choose_again(tr_lm *t) {
    size_t before = t->recompute, peak = stx_peak_bytes(t->x);
    if (!t->predicted || peak <= t->predicted || tr_lm_ranks(t) > 1) return;
    if (!tr_lm_choose(t) || t->recompute < before)
        t->recompute = t->lm.recompute(t->lm.model, before);
    if (t->predicted < peak + peak / 20) t->predicted = peak + peak / 20;
    if (t->recompute > before)
        tr_say(&t->term, "step %llu: memory use has grown; now recomputing %zu of %zu layers "
               "instead of %zu", (unsigned long long)t->step, t->recompute, t->layers, before);
}


// >>lm: generating one text, at the end or as a sample during training

/* A text that is being read and generated: the model's memory of the text, and the
   state on which the draws depend. */
typedef struct tr_gen {
    void           *gen;
    const stx_real *logits;     /* logits of the next token; NULL: nothing was read yet */
    tr_recent       recent;     /* recent tokens for --repetition-penalty */
    double         *penalised;  /* (V) */
    stx_real       *work;       /* (2,V): logits to draw from, and work space of stx_sample */
    tr_buf          written;    /* for --stop: the text of the current answer so far */
    uint64_t        hash;       /* hash of everything read and written */
    char            end;        /* last byte read or written */
    int             failed;     /* errno of a failed write; 0: none failed */
} tr_gen;

/* Writes all bytes immediately. stdio would lose bytes if a signal interrupted it. */
TR_DEF void tr_gen_put(tr_gen *g, FILE *to, const void *bytes, size_t n) {
    if (g->failed || (fflush(to) == 0 && tr_write_all(fileno(to), bytes, n))) return;
    g->failed = errno ? errno : EIO;
}

/* Sets an error if generated text was lost. Returns 0 if the context has an error. */
TR_DEF int tr_gen_check(tr_lm *t, const tr_gen *g) {
    if (g->failed) {
        t->lost = 1;
        stx_fail(t->x, STX_ERR_IO, "the generated text cannot be written: %s",
                 strerror(g->failed));
    }
    return stx_ok(t->x);
}

TR_DEF void tr_gen_close(tr_lm *t, tr_gen *g) {
    if (g->gen) t->lm.gen_free(g->gen);
    tr_recent_close(&g->recent);
    tr_buf_free(&g->written);
    free(g->penalised);
    free(g->work);
}

/* Prepares generation. On failure, sets the context's error and returns 0. tr_gen_close
   must be called in both cases. */
TR_DEF int tr_gen_open(tr_lm *t, tr_gen *g) {
    const size_t V = stx_vocab_size(t->vocab);
    int ok;
    memset(g, 0, sizeof *g);
    g->hash = TR_HASH_BEGIN;
    g->end = '\n';
    g->gen = t->lm.gen_create(t->lm.model, 1, t->eval_window);
    g->penalised = (double *)malloc(V * sizeof *g->penalised);
    g->work = (stx_real *)malloc(2 * V * sizeof *g->work);
    ok = tr_recent_open(&g->recent, V, (size_t)t->opt->repetition_window);
    if (!ok || !g->penalised || !g->work)
        stx_fail(t->x, STX_ERR_MEMORY, "out of memory: cannot sample");
    return g->gen && stx_ok(t->x);
}

/* Resets g to its state before any text was read. */
TR_DEF void tr_gen_reset(tr_lm *t, tr_gen *g) {
    t->lm.gen_reset(g->gen);
    tr_recent_clear(&g->recent);
    g->logits = NULL;
    g->written.n = 0;
    g->hash = TR_HASH_BEGIN;
    g->end = '\n';
}

/* Feeds tokens to the model. Returns 0 on error. */
TR_DEF int tr_gen_read(tr_lm *t, tr_gen *g, const int32_t *ids, size_t n) {
    size_t i;
    for (i = 0; i < n; i++) tr_recent_add(&g->recent, ids[i]);
    g->logits = t->lm.gen_feed(g->gen, ids, n);
    return g->logits != NULL;
}

/* Writes tokens as text. Omits the leading space of a piece that begins a line. */
TR_DEF void tr_gen_write(tr_lm *t, tr_gen *g, FILE *to, const int32_t *ids, size_t n) {
    const int pieces = stx_vocab_kind(t->vocab) > STX_TOK_WORDS;
    char text[4096];
    size_t i;
    for (i = 0; i < n; i++) {
        size_t len = stx_vocab_decode(t->vocab, ids + i, 1, text, sizeof text), skip;
        if (len == STX_NPOS) return;
        if (len > sizeof text) len = sizeof text;
        if (!len) continue;
        skip = pieces && *text == ' ' && (g->end == '\n' || g->end == ' ');
        tr_gen_put(g, to, text + skip, len - skip);
        if (t->stop) tr_buf_put(&g->written, text + skip, len - skip);
        g->hash = tr_hash(g->hash, text + skip, len - skip);
        g->end = text[len - 1];
    }
}

/* Returns the logits to draw from, after --repetition-penalty. */
TR_DEF const stx_real *tr_gen_logits(tr_lm *t, tr_gen *g) {
    const size_t V = stx_vocab_size(t->vocab);
    size_t k;
    if (t->opt->repetition_penalty == 1) return g->logits;
    for (k = 0; k < V; k++) g->penalised[k] = (double)g->logits[k];
    tr_penalise(g->penalised, &g->recent, t->opt->repetition_penalty);
    for (k = 0; k < V; k++) g->work[k] = (stx_real)g->penalised[k];
    return g->work;
}

/* Draws up to n tokens. Each token is immediately written and fed to the model. Ends
   early once the text contains `stop`, which may be NULL. */
TR_DEF void tr_gen_draw(tr_lm *t, tr_gen *g, uint64_t n, uint64_t seed, FILE *to,
                        const char *stop) {
    const tr_lm_opt *o = t->opt;
    const size_t V = stx_vocab_size(t->vocab);
    stx_sampling sampling;
    uint64_t i;
    memset(&sampling, 0, sizeof sampling);
    sampling.temperature = o->temperature;
    sampling.top_k = o->top_k;
    sampling.top_p = o->top_p;
    sampling.seed = seed;
    g->written.n = 0;
    for (i = 0; i < n && g->logits && !g->failed && !tr_stop_requested(); i++) {
        const size_t before = g->written.n;
        int32_t token = stx_sample(&sampling, i, tr_gen_logits(t, g), V, g->work + V);
        if (token < 0) {
            stx_fail(t->x, STX_ERR_ARG, "cannot sample: the model's output is not finite");
            break;
        }
        tr_gen_write(t, g, to, &token, 1);
        tr_gen_read(t, g, &token, 1);
        if (stop && tr_stops(&g->written, before, stop)) break;
    }
    if (g->written.oom) stx_fail(t->x, STX_ERR_MEMORY, "out of memory: cannot look for --stop");
}


// >>lm: steps, in the order of the training loop

/* Nonzero if several ranks are between two updates and therefore have different
   gradients. Saving and stopping then wait for the update, so that the run resumes
   bit-exactly. The last step and the best model, which cannot wait, are saved with the
   mean of the gradients (tr_lm_average_grads). */
TR_DEF int tr_lm_between(const tr_lm *t) {
    return tr_lm_ranks(t) > 1 && tr_lm_pending(t) > 0;
}

/* Nonzero if training continues with another step. */
TR_DEF int tr_lm_more(const tr_lm *t) {
    return t->step < t->steps && (!tr_lm_stop(t) || tr_lm_between(t)) && stx_ok(t->x);
}

/* Reads the next block of every stream into t->tokens and t->targets. Returns the result
   of stx_batches_next. With --random-segments N, reads segments of N blocks. Their
   positions depend only on the seed and the step, so checkpoints need not store them. */
TR_DEF int tr_lm_next(tr_lm *t) {
    const uint64_t N = t->opt->random_segments, stream_key = 0x7069656365000000u;   /* "piece" */
    const size_t B = t->parts * t->in[0]->B * (size_t)tr_lm_ranks(t), T = t->in[0]->T;
    size_t b;
    if (!N) return stx_batches_next(t->batches, t->tokens, t->targets);
    for (b = 0; b < B; b++) {
        const uint64_t positions = stx_corpus_size(t->text[0]) - N * T;
        uint32_t r[4];
        size_t at;
        stx_philox(t->opt->seed, t->step / N, stream_key + b, r);
        at = (size_t)((r[0] | (uint64_t)r[1] << 32) % positions + t->step % N * T);
        if (!stx_corpus_read(t->text[0], at, T, t->tokens + b * T)) return STX_BATCH_END;
        if (!stx_corpus_read(t->text[0], at + 1, T, t->targets + b * T)) return STX_BATCH_END;
    }
    return t->step % N ? STX_BATCH_OK : STX_BATCH_FRESH;
}

/* Copies the blocks in t->tokens and t->targets to t->in and t->out. If fresh is 1,
   resets the states, because the blocks do not continue the previous ones. Decides
   whether the step updates the parameters. Returns the step's key. */
TR_DEF uint64_t tr_lm_batch(tr_lm *t, int fresh) {
    const uint64_t every = t->opt->update_every, after = t->opt->update_after;
    const int several = every > 1 && t->step >= after;
    uint64_t key = 0;
    size_t k;
    t->update = !several || (t->step + 1 - after) % every == 0;
    /* average the gradients, as in one larger batch, so that the same --grad-clip
       applies */
    t->share = several ? 1.0 / (double)every : 1;
    if (several) key = 1 + (uint64_t)t->update;
    for (k = 0; k < t->pieces; k++) {
        void *state = k < t->parts ? t->state[k] : NULL;        /* only for the first block */
        size_t n = t->in[k]->B * t->in[k]->T;
        size_t at = (k * (size_t)tr_lm_ranks(t) + (size_t)stx_rank(t->x)) * n;
        if (state && fresh) t->lm.state_reset(state);
        stx_tokens_set(t->x, t->in[k], t->tokens + at);
        stx_tokens_set(t->x, t->out[k], t->targets + at);
        key = t->lm.key(t->lm.model, t->in[k], t->out[k], state, key);
    }
    return key;
}

/* Reports a step whose loss or gradient is not finite. Resets the states, which may
   contain NaN. Returns 0 after too many consecutive steps of this kind. */
TR_DEF int tr_lm_skipped(tr_lm *t, double nll) {
    size_t k;
    tr_say(&t->term, "step %llu: the %s is not finite; this update is skipped and the memory is "
           "cleared", (unsigned long long)t->step, isfinite(nll) ? "gradient" : "loss");
    for (k = 0; k < t->parts; k++) t->lm.state_reset(t->state[k]);
    if (++t->bad_updates < 50) return 1;
    stx_fail(t->x, STX_ERR_ARG,
             "50 consecutive updates were not finite: use a smaller --lr or --grad-clip");
    return 0;
}

/* Records a step with mean loss nll, or reports that its update was skipped, and shows
   progress. Returns 0 if the run ends here. Opens the files after the first step, which
   has shown that training fits in memory. */
TR_DEF int tr_lm_stepped(tr_lm *t, double nll) {
    const double tokens = (double)(t->pieces * t->in[0]->B * t->in[0]->T);
    int done;
    if (t->rehearsal) return tr_lm_rehearsed(t);
    if (!tr_lm_texts_are_whole(t) || !tr_lm_agree(t, &nll, 1)) return 0;
    nll /= tr_lm_ranks(t);
    done = t->update ? stx_optim_sync(t->optim) : isfinite(nll);
    if (!stx_ok(t->x) || !tr_lm_begin(t)) return 0;

    t->step++;
    if (done) {
        t->sum += nll;
        t->logged++;
        t->loss = nll;
        t->bad_updates = 0;
    } else if (!tr_lm_skipped(t, nll)) {
        return 0;
    }
    tr_lm_choose_again(t);
    tr_rate_add(&t->rate, tr_seconds(), 1, tokens * tr_lm_ranks(t));
    tr_lm_show(t, t->loss, t->step % t->log_every == 0 || t->step == t->steps);
    return 1;
}

/* If a log record is due, begins it with the mean loss since the previous one and
   returns 1. The trainer adds its values and calls tr_lm_logged. */
TR_DEF int tr_lm_log_due(tr_lm *t) {
    if (t->rehearsal || (t->step % t->log_every && t->step != t->steps)) return 0;
    tr_lm_log_step(t, t->logged ? t->sum / (double)t->logged : (double)NAN);
    t->sum = 0;
    t->logged = 0;
    return 1;
}

TR_DEF void tr_lm_logged(tr_lm *t) {
    tr_lm_note(t, t->log.err, tr_log_end(&t->log));
}

/* --sample-every: writes an excerpt of a text and the model's continuation to standard
   error. The text is the validation text or, if there is none, the training text. */
TR_DEF int tr_lm_show_sample(tr_lm *t) {
    const tr_lm_opt *o = t->opt;
    const stx_corpus *text = t->text[1] ? t->text[1] : t->text[0];
    const size_t n = stx_corpus_size(text);
    const size_t prime = o->sample_prime < n ? (size_t)o->sample_prime : n;
    int32_t *ids = (int32_t *)malloc(prime * sizeof *ids);
    tr_gen g;
    uint32_t r[4];
    stx_philox(o->seed, t->step, 0x73616d706c65u, r);       /* "sample" */
    if (!ids) stx_fail(t->x, STX_ERR_MEMORY, "out of memory: cannot show a sample");
    if (tr_gen_open(t, &g) && ids && stx_corpus_read(text, r[0] % (n - prime + 1), prime, ids)) {
        tr_say(&t->term, "--- step %llu, the model continues held-out text at ==>",
               (unsigned long long)t->step);
        tr_gen_write(t, &g, stderr, ids, prime);
        fputs("==>", stderr);
        tr_gen_read(t, &g, ids, prime);
        tr_gen_draw(t, &g, o->sample_length, r[1], stderr, NULL);
        fputs("\n---\n", stderr);
    }
    tr_gen_close(t, &g);
    free(ids);
    return stx_ok(t->x);
}

/* Evaluates, and saves the best model. After an error, saves the checkpoint and sets an
   error that names the step. With several ranks, does not save, because ranks without an
   error would not take part. */
TR_DEF int tr_lm_evaluate_step(tr_lm *t) {
    const tr_lm_opt *o = t->opt;
    double nll;
    int ok = tr_lm_evaluate(t, 1, t->eval_blocks, &nll);
    if (ok && o->best && tr_lm_better(t, nll)) ok = tr_lm_save_best(t);
    if (ok || tr_lm_ranks(t) > 1) return ok;
    tr_lm_why(t);
    stx_clear_error(t->x);
    tr_lm_save(t, o->checkpoint);
    stx_fail(t->x, STX_ERR_ARG, "after step %llu: %s", (unsigned long long)t->step, t->err);
    return 0;
}

/* Evaluates, writes a sample and saves, each when it is due. If an error ends the run,
   saves what can be saved and returns 0. */
TR_DEF int tr_lm_evaluate_and_save(tr_lm *t) {
    const tr_lm_opt *o = t->opt;
    const int ends = t->step >= t->steps;
    if (t->rehearsal) return 1;
    if (t->eval_every && t->step % t->eval_every == 0 && (o->best || !ends)) {
        if (!tr_lm_evaluate_step(t)) return 0;
        tr_rate_skip(&t->rate, tr_seconds());
    }
    if (o->sample_every && t->step % o->sample_every == 0 && !stx_rank(t->x)) {
        if (!tr_lm_show_sample(t)) return 0;
        tr_rate_skip(&t->rate, tr_seconds());
    }
    t->save_due |= t->save_every && t->step % t->save_every == 0 && !ends;
    if (t->save_due && !tr_lm_between(t)) {
        t->save_due = 0;
        if (!tr_lm_save(t, o->checkpoint)) return 0;
        t->saved = t->step;
        tr_rate_skip(&t->rate, tr_seconds());
    }
    return 1;
}

/* Saves the final state after the training loop. */
TR_DEF int tr_lm_trained(tr_lm *t) {
    if (stx_ok(t->x) && t->step > t->saved) tr_lm_save(t, t->opt->checkpoint);
    return stx_ok(t->x);
}


// >>lm: --generate

/* Returns a random seed that is short enough to type. */
TR_DEF uint64_t tr_lm_random_seed(void) {
    uint64_t v = (uint64_t)time(NULL) * 1000003u + (uint64_t)getpid();
    FILE *f = fopen("/dev/urandom", "rb");
    if (f) {
        if (fread(&v, sizeof v, 1, f) != 1) v ^= (uint64_t)(tr_seconds() * 1e9);
        fclose(f);
    }
    return v % 1000000000;
}

/* Returns the seed of the draws: --seed if it was given, otherwise a random seed, which
   is also printed. */
TR_DEF uint64_t tr_lm_sampling_seed(tr_lm *t) {
    uint64_t seed = t->opt->seed;
    if (tr_given(t->options, "seed")) return seed;
    seed = tr_lm_random_seed();
    if (t->opt->temperature > 0)
        tr_say(&t->term, "--- sampled with --seed %llu", (unsigned long long)seed);
    return seed;
}

/* Returns the length of the first word, character or byte of text, depending on the kind
   of the vocabulary, or 1 for a space between words. */
TR_DEF size_t tr_lm_unit_length(const tr_lm *t, const char *text, size_t len) {
    static const char space[] = " \t\r\n\v\f";      /* a zero byte also counts as a space */
    const int kind = stx_vocab_kind(t->vocab);
    size_t n = 0;
    if (kind == STX_TOK_WORDS)
        while (n < len && !memchr(space, text[n], sizeof space)) n++;
    else if (kind != STX_TOK_BYTES)
        n = tr_utf8((const unsigned char *)text);
    return n == 0 || n > len ? 1 : n;
}

/* Reports up to eight words or characters of a text that were encoded as <unk>. */
TR_DEF void tr_lm_report_unknown(tr_lm *t, const char *text, size_t len) {
    const int words = stx_vocab_kind(t->vocab) == STX_TOK_WORDS;
    const int32_t unk = stx_vocab_unk(t->vocab);
    size_t at, n, m, i, named = 0, more = 0;
    char line[600] = "", quoted[STX_QUOTE];
    int32_t ids[8];
    for (at = 0; at < len; at += n) {
        n = tr_lm_unit_length(t, text + at, len - at);
        if (words && n == 1 && memchr(" \t\r\n\v\f", text[at], 7)) continue;
        if (n == 5 && !memcmp(text + at, "<unk>", 5)) continue;
        m = stx_vocab_encode_part(t->vocab, text + at, n, ids, 8);
        if (m == STX_NPOS) return;
        for (i = 0; i < m && i < 8 && ids[i] != unk; i++) {}
        if (i == m || i == 8) continue;
        if (named == 8) {
            more++;
            continue;
        }
        stx_quote(quoted, (const unsigned char *)text + at, n);
        snprintf(line + strlen(line), sizeof line - strlen(line), "%s'%.60s'",
                 named++ ? ", " : "", quoted);
    }
    if (more) snprintf(line + strlen(line), sizeof line - strlen(line), ", and %zu more", more);
    if (named) tr_say(&t->term, "not in the vocabulary, read as <unk>: %s", line);
}

/* Encodes a text and feeds it to the model. If echo is not NULL, also writes the text
   there. Returns 1; or 0 with the context's error set if the text cannot be encoded, in
   which case nothing is read; or -1 on other errors. */
TR_DEF int tr_gen_read_text(tr_lm *t, tr_gen *g, const char *text, size_t len, FILE *echo) {
    const int numbers = stx_vocab_kind(t->vocab) == STX_TOK_IDS;
    const int32_t unk = stx_vocab_unk(t->vocab);
    const uint64_t before = g->hash;
    size_t n = stx_vocab_encode_part(t->vocab, text, len, NULL, 0), i;
    int32_t *ids;
    int ok;
    if (n == STX_NPOS) return 0;
    if (!n) {
        stx_fail(t->x, STX_ERR_ARG, "the text has no tokens");
        return 0;
    }
    ids = (int32_t *)malloc(n * sizeof *ids);
    if (!ids) {
        stx_fail(t->x, STX_ERR_MEMORY, "out of memory: cannot allocate %zu tokens", n);
        return -1;
    }
    stx_vocab_encode_part(t->vocab, text, len, ids, n);
    for (i = 0; i < n && ids[i] != unk; i++) {}
    if (i < n && !numbers) tr_lm_report_unknown(t, text, len);

    ok = tr_gen_read(t, g, ids, n) ? 1 : -1;
    if (echo && numbers) {
        tr_gen_write(t, g, echo, ids, n);
    } else {
        if (echo) tr_gen_put(g, echo, text, len);
        g->end = text[len - 1];
    }
    g->hash = tr_hash(before, text, len);
    free(ids);
    return ok;
}

/* Returns the token that precedes a text: a newline, or the closest equivalent in the
   vocabulary. */
TR_DEF int32_t tr_lm_start_token(const tr_lm *t) {
    int32_t token = stx_vocab_eos(t->vocab);
    if (token < 0) token = stx_vocab_find(t->vocab, "\n", 1);
    if (token < 0) token = stx_vocab_find(t->vocab, "\xe2\x96\x81.", 4);
    return token < 0 ? 0 : token;
}

/* Writes the prompt, --generate tokens and a final newline to standard output. The draws
   depend on --seed and on the prompt, because with identical draws, texts from different
   prompts would converge. */
TR_DEF int tr_lm_generate(tr_lm *t) {
    uint64_t seed = tr_lm_sampling_seed(t);
    int32_t token;
    tr_gen g;
    int ok = tr_gen_open(t, &g);
    if (ok && t->prompt_len) {
        ok = tr_gen_read_text(t, &g, t->prompt, t->prompt_len, stdout) > 0;
        seed ^= g.hash;
        if (stx_vocab_kind(t->vocab) == STX_TOK_WORDS) tr_gen_put(&g, stdout, " ", 1);
    } else if (ok) {
        token = tr_lm_start_token(t);
        ok = tr_gen_read(t, &g, &token, 1);
    }
    if (ok) tr_gen_draw(t, &g, t->opt->generate, seed, stdout, t->stop);
    if (ok && g.end != '\n') tr_gen_put(&g, stdout, "\n", 1);
    ok = tr_gen_check(t, &g) && ok;
    tr_gen_close(t, &g);
    return ok;
}


// >>lm: --interactive. The model reads the conversation as it appears on the terminal:
// each line without its newline, the answer, and a newline before the next line. The
// draws of an answer depend on --seed and on all text before it, so --generate gives the
// same answer if that text is its --prompt.

/* Reads one line of standard input without its newline. If the line ends in a backslash,
   a newline replaces the backslash, and the next line is appended. Returns 0 if there is
   no line; *why receives the errno if reading failed before the end of the input. */
TR_DEF int tr_lm_read_line(tr_buf *line, int terminal, int *why) {
    char *text = NULL;
    size_t size = 0;
    ssize_t n;
    int more = 1, any = 0;
    line->n = 0;
    while (more) {
        if (terminal) fputs(any ? ".. " : "> ", stderr);
        do {
            clearerr(stdin);
            n = tr_stop_requested() ? -1 : getline(&text, &size, stdin);
            *why = errno;
        } while (n < 0 && ferror(stdin) && *why == EINTR && !tr_stop_requested());
        if (n < 0) break;
        any = 1;
        if (n > 0 && text[n - 1] == '\n') n--;
        if (n > 0 && text[n - 1] == '\r') n--;
        more = n > 0 && text[n - 1] == '\\';
        if (more) text[n - 1] = '\n';
        tr_buf_put(line, text, (size_t)n);
    }
    free(text);
    return any && !tr_stop_requested();
}

/* Nonzero if the line consists of this command. */
TR_DEF int tr_lm_is_command(const tr_buf *line, const char *command) {
    return line->n == strlen(command) && !memcmp(line->s, command, line->n);
}

TR_DEF void tr_lm_talk_help(void) {
    fputs("The model continues each line of text. A line that ends in a backslash continues on "
          "the next line.\n"
          "An empty line or /reset starts a new conversation. /help prints this text.\n"
          "Ctrl-C stops an answer; twice, or at the prompt, it ends the program. Ctrl-D ends the "
          "program.\n", stderr);
}

/* Starts a conversation, which begins with --prompt. Returns 0 on error. */
TR_DEF int tr_lm_talk_begin(tr_lm *t, tr_gen *g) {
    tr_gen_reset(t, g);
    return !t->prompt_len || tr_gen_read_text(t, g, t->prompt, t->prompt_len, NULL) > 0;
}

/* Feeds a line to the model, preceded by a newline if next is 1, and writes the answer.
   Returns 1; or 0 if the line cannot be encoded, which is reported; or -1 on other
   errors. */
TR_DEF int tr_lm_answer(tr_lm *t, tr_gen *g, const tr_buf *line, int next, uint64_t seed) {
    const uint64_t n = t->opt->generate ? t->opt->generate : 256;
    tr_buf text;
    int ok;
    memset(&text, 0, sizeof text);
    if (next) tr_buf_puts(&text, "\n");
    tr_buf_put(&text, line->s, line->n);
    if (text.oom || line->oom) {
        stx_fail(t->x, STX_ERR_MEMORY, "out of memory: cannot store a line");
        ok = -1;
    } else {
        ok = tr_gen_read_text(t, g, text.s, text.n, NULL);
    }
    tr_buf_free(&text);
    if (ok < 0) return -1;
    if (!ok) {
        tr_lm_why(t);
        stx_clear_error(t->x);
        tr_say(&t->term, "%s: %.1000s; the line is ignored", t->options->program, t->err);
        return 0;
    }

    seed ^= g->hash;
    if (stx_vocab_kind(t->vocab) == STX_TOK_WORDS && !strchr(" \t\n", g->end)) {
        g->hash = tr_hash(g->hash, " ", 1);
        g->end = ' ';
    }
    tr_gen_draw(t, g, n, seed, stdout, t->stop);
    if (g->end != '\n') tr_gen_put(g, stdout, "\n", 1);
    return tr_gen_check(t, g) ? 1 : -1;
}

/* Holds a conversation. Returns 1, or 0 with the context's error set. *refused receives
   the number of lines that could not be encoded. */
TR_DEF int tr_lm_talk(tr_lm *t, size_t *refused) {
    const int terminal = isatty(0);
    const uint64_t seed = tr_lm_sampling_seed(t);
    int32_t line_end = -1;
    const size_t n = stx_vocab_encode(t->vocab, "\n", 1, &line_end, 1);
    const int has_line_end = n == 1 && line_end != stx_vocab_unk(t->vocab);
    int why = 0, answer = 0, answered = 0, ok;
    uint64_t lines = 0;
    tr_buf line;
    tr_gen g;
    memset(&line, 0, sizeof line);
    *refused = 0;
    if (n == STX_NPOS) stx_clear_error(t->x);
    if (terminal) tr_say(&t->term, "--- /help explains the commands; Ctrl-D ends the program");

    ok = tr_gen_open(t, &g) && tr_lm_talk_begin(t, &g);
    while (ok && tr_lm_read_line(&line, terminal, &why)) {
        if (!lines++ && line.n) line.n = tr_lm_unmark(t, line.s, line.n);
        if (tr_lm_is_command(&line, "/help")) {
            tr_lm_talk_help();
        } else if (!line.n || tr_lm_is_command(&line, "/reset")) {
            ok = tr_lm_talk_begin(t, &g);
            answered = 0;
            if (terminal) fputs("--- new conversation\n", stderr);
        } else {
            answer = tr_lm_answer(t, &g, &line, answered && has_line_end && g.end != '\n', seed);
            ok = answer >= 0;
            if (answer) answered = 1;
            else ++*refused;
            /* Ctrl-C ends the answer, not the program */
            if (answer && terminal && tr_stop_requested() == SIGINT) tr_stop_done();
        }
    }
    if (terminal) fputs("\n", stderr);
    if (ok && !feof(stdin) && !tr_stop_requested()) {       /* a read error, or out of memory */
        stx_fail(t->x, STX_ERR_IO, "cannot read standard input: %s", strerror(why));
        ok = 0;
    }
    tr_gen_close(t, &g);
    tr_buf_free(&line);
    return ok;
}


// >>lm: --score. Every token is scored; the first one follows tr_lm_start_token. With
// --score-by file, the model reads blocks of one stream, as in evaluation. Otherwise, it
// reads token by token, as in generation, because a block has only one mean loss.

typedef struct tr_scorer {
    void           *state;              /* with --score-by file: the memory; otherwise NULL */
    void           *gen;                /* with --score-by file: NULL; otherwise the generator */
    const stx_real *scores;             /* (V): log p of the next token, up to a constant */
    int32_t        *in, *out;           /* with --score-by file: a block of T tokens, `held` of
                                           them filled */
    size_t          T, held;
    double          tokens, nats;       /* sums since the last printed row */
    uint64_t        read, unknown;      /* numbers of tokens read, and of <unk> among them */
} tr_scorer;

/* With --score-by file: evaluates the tokens in the block and empties it. */
TR_DEF int tr_lm_score_block(tr_lm *t, tr_scorer *s) {
    const size_t n = s->held;
    const double counted = tr_lm_counted(t, s->out, n);
    stx_ids *ids, *targets;
    double nll;
    if (!n) return stx_ok(t->x);
    stx_begin(t->x, STX_EVAL);
    ids = stx_tokens(t->x, s->in, 1, n);
    targets = stx_tokens(t->x, s->out, 1, n);
    nll = stx_item(t->x, t->lm.loss(t->lm.model, ids, targets, s->state, s->state));
    s->tokens += counted;
    s->nats += nll * (t->mean_of_all ? (double)n : counted);
    s->in[0] = s->out[n - 1];
    s->held = 0;
    return stx_ok(t->x);
}

/* Scores one token or, with --score-by file, adds it to the block. Returns 0 on error. */
TR_DEF int tr_lm_score_token(tr_lm *t, tr_scorer *s, int32_t id) {
    const size_t V = stx_vocab_size(t->vocab);
    const double counted = tr_lm_counted(t, &id, 1);
    double max = -HUGE_VAL, sum = 0;
    size_t i;
    if (s->state) {
        if (s->held) s->in[s->held] = s->out[s->held - 1];
        s->out[s->held++] = id;
        return s->held < s->T || tr_lm_score_block(t, s);
    }
    for (i = 0; i < V; i++)
        if ((double)s->scores[i] > max) max = (double)s->scores[i];
    for (i = 0; i < V; i++) sum += exp((double)s->scores[i] - max);
    s->tokens += counted;
    s->nats += counted * (max + log(sum) - (double)s->scores[id]);
    s->scores = t->lm.gen_feed(s->gen, &id, 1);
    return s->scores != NULL;
}

/* Begins a text: resets the memory and feeds only the token of tr_lm_start_token. */
TR_DEF int tr_lm_score_begin(tr_lm *t, tr_scorer *s) {
    int32_t start = tr_lm_start_token(t);
    if (s->state) {
        s->in[0] = start;
        return 1;
    }
    t->lm.gen_reset(s->gen);
    s->scores = t->lm.gen_feed(s->gen, &start, 1);
    return s->scores != NULL;
}

/* Prints the last columns of a row: tokens, bytes, nats, bits per byte and
   perplexity. */
TR_DEF void tr_lm_score_row(tr_scorer *s, double bytes) {
    printf("%.0f\t%.0f\t%.6f\t%.6f\t%.6f\n", s->tokens, bytes, s->nats,
           bytes > 0 ? s->nats / log(2.0) / bytes : 0,
           s->tokens > 0 ? exp(s->nats / s->tokens) : 1);
    s->tokens = s->nats = 0;
}

/* With --score-by tokens: prints the row of one token. In its text, newlines, tabs and
   backslashes are printed as \n, \t and \\, and other control characters in
   hexadecimal, such as \x0d. */
TR_DEF void tr_lm_score_piece(const tr_lm *t, tr_scorer *s, uint64_t line, int32_t id) {
    size_t len = 0, i;
    const char *text = stx_vocab_piece(t->vocab, id, &len);
    if (id == stx_vocab_eos(t->vocab)) {
        text = "\n";
        len = 1;
    }
    printf("%llu\t%.6f\t", (unsigned long long)line, s->nats);
    for (i = 0; text && i < len; i++) {
        int c = (unsigned char)text[i];
        if (c == '\n') fputs("\\n", stdout);
        else if (c == '\t') fputs("\\t", stdout);
        else if (c == '\\') fputs("\\\\", stdout);
        else if (c < 32 || c == 127) printf("\\x%02x", (unsigned)c);
        else putchar(c);
    }
    putchar('\n');
    s->tokens = s->nats = 0;
}

/* Scores one line, including its newline. *bytes receives the length of its text.
   Returns 0 on error. */
TR_DEF int tr_lm_score_line(tr_lm *t, tr_scorer *s, const char *text, size_t len, uint64_t line,
                            double *bytes) {
    int by = t->opt->score_by, ok = 1;
    size_t n = stx_vocab_encode_part(t->vocab, text, len, NULL, 0), i;
    int32_t *ids = n == STX_NPOS ? NULL : (int32_t *)malloc((n + 1) * sizeof *ids);
    if (!ids) {
        if (stx_ok(t->x))
            stx_fail(t->x, STX_ERR_MEMORY, "out of memory: cannot allocate %zu tokens", n);
        tr_lm_why(t);
        stx_clear_error(t->x);
        stx_fail(t->x, STX_ERR_ARG, "--score %.300s, line %llu: %.600s", t->opt->score,
                 (unsigned long long)line, t->err);
        return 0;
    }
    stx_vocab_encode_part(t->vocab, text, len, ids, n);
    if (stx_vocab_kind(t->vocab) == STX_TOK_IDS) len = stx_vocab_decode(t->vocab, ids, n, NULL, 0);
    *bytes = (double)len - tr_lm_pad_bytes(t, ids, n);
    if (by == TR_BY_TEXTS) ok = tr_lm_score_begin(t, s);
    for (i = 0; ok && i < n && !tr_stop_requested(); i++) {
        s->read++;
        s->unknown += ids[i] == stx_vocab_unk(t->vocab);
        ok = tr_lm_score_token(t, s, ids[i]);
        if (ok && by == TR_BY_TOKENS) tr_lm_score_piece(t, s, line, ids[i]);
    }
    free(ids);
    return ok;
}

/* Appends a newline (\r\n if crlf is 1) to a last line that has none, if the vocabulary
   contains newlines. A text then has the same number of tokens whether it is a separate
   file, a line of a file, or the last line. Returns 0 if memory runs out. */
TR_DEF int tr_lm_score_end(tr_lm *t, char **text, size_t *size, ssize_t *len, int crlf) {
    size_t n = (size_t)*len;
    if ((*text)[n - 1] == '\n') return 1;
    if (stx_vocab_encode(t->vocab, "\n", 1, NULL, 0) == STX_NPOS) {
        stx_clear_error(t->x);
        return 1;
    }
    if (*size < n + 3) {
        char *longer = (char *)realloc(*text, n + 3);
        if (!longer) return 0;
        *text = longer;
        *size = n + 3;
    }
    if (crlf && (*text)[n - 1] != '\r') (*text)[n++] = '\r';
    (*text)[n++] = '\n';
    *len = (ssize_t)n;
    return 1;
}

/* Reads a line including its newline, and removes a byte-order mark from the first
   line. Returns the length, 0 at the end of the text, or -1 on error, for example if a
   line does not fit in memory. */
TR_DEF ssize_t tr_lm_score_next(tr_lm *t, FILE *f, char **text, size_t *size, int *crlf,
                                uint64_t line) {
    ssize_t len = getline(text, size, f);
    int ok = len >= 0 || feof(f);
    if (len > 0 && line == 1) len = (ssize_t)tr_lm_unmark(t, *text, (size_t)len);
    if (len > 0) ok = tr_lm_score_end(t, text, size, &len, *crlf);
    *crlf = len > 1 && (*text)[len - 2] == '\r';
    if (ok) return len > 0 ? len : 0;
    if (!tr_stop_requested())
        stx_fail(t->x, line > 1 ? STX_ERR_ARG : STX_ERR_IO, "--score %s, line %llu: %s",
                 t->opt->score, (unsigned long long)line, strerror(errno));
    return -1;
}

/* Prepares scoring. On failure, sets the context's error and returns 0. tr_lm_score_close
   must be called in both cases. */
TR_DEF int tr_lm_score_open(tr_lm *t, tr_scorer *s) {
    memset(s, 0, sizeof *s);
    s->T = t->eval_block;
    if (t->opt->score_by == TR_BY_FILE)
        s->state = t->lm.state_create(t->lm.model, 1, t->eval_window);
    else
        s->gen = t->lm.gen_create(t->lm.model, 1, t->eval_window);
    s->in = (int32_t *)malloc(2 * s->T * sizeof *s->in);
    s->out = s->in ? s->in + s->T : NULL;
    if (!s->in)
        stx_fail(t->x, STX_ERR_MEMORY, "out of memory: cannot allocate a block of %zu tokens",
                 s->T);
    return stx_ok(t->x);
}

TR_DEF void tr_lm_score_close(tr_lm *t, tr_scorer *s) {
    if (s->gen) t->lm.gen_free(s->gen);
    if (s->state) t->lm.state_free(s->state);
    free(s->in);
}

/* Reads the first bytes of a regular file without moving the file position, and returns
   their number. Returns 0 for any other file. */
TR_DEF size_t tr_peek(FILE *f, char *out, size_t size) {
    struct stat st;
    size_t n;
    off_t at;
    if (fstat(fileno(f), &st) != 0 || !S_ISREG(st.st_mode)) return 0;
    at = ftello(f);
    n = fread(out, 1, size, f);
    return fseeko(f, at, SEEK_SET) == 0 ? n : 0;
}

/* Refuses a text that begins like UTF-16 or UTF-32, unless the tokens are bytes.
   Returns 0 with the context's error set if it is refused. */
TR_DEF int tr_lm_score_encoding(tr_lm *t, const char *text, size_t n) {
    const char *encoding = stx_text_encoding(text, n);
    if (!encoding) return 1;
    if (stx_vocab_kind(t->vocab) != STX_TOK_BYTES) {
        stx_fail(t->x, STX_ERR_FORMAT, "--score %.600s: expected UTF-8, got %s: convert it with "
                 "iconv -f %s -t UTF-8 OLD > NEW", t->opt->score, encoding, encoding);
        return 0;
    }
    tr_say(&t->term, "--score %.1000s: the text is in %s; its bytes are read unchanged",
           t->opt->score, encoding);
    return 1;
}

/* Reads the text and prints the table. Returns 0 on error. */
TR_DEF int tr_lm_score_text(tr_lm *t, tr_scorer *s, FILE *f) {
    static const char *const head[] = {     /* for --score-by file, lines, texts and tokens */
        "tokens\tbytes\tnats\tbpb\tppl", "line\ttokens\tbytes\tnats\tbpb\tppl",
        "line\ttokens\tbytes\tnats\tbpb\tppl", "line\tnats\ttext"
    };
    const int by = t->opt->score_by;
    uint64_t line = 0;
    double bytes = 0, all = 0;
    char *text = NULL, first[4096];
    size_t size = 0, peeked = tr_peek(f, first, sizeof first);
    int crlf = 0, ok = tr_lm_score_encoding(t, first, peeked) && tr_lm_score_begin(t, s);
    while (ok && !tr_stop_requested()) {
        ssize_t len = tr_lm_score_next(t, f, &text, &size, &crlf, line + 1);
        if (len < 0) ok = 0;
        else if (!line) puts(head[by]);
        if (len <= 0) break;
        /* in a pipe, only the first line is checked */
        if (!line && !peeked) ok = tr_lm_score_encoding(t, text, (size_t)len);
        ok = ok && tr_lm_score_line(t, s, text, (size_t)len, ++line, &bytes);
        all += bytes;
        if (ok && !tr_stop_requested() && (by == TR_BY_LINES || by == TR_BY_TEXTS)) {
            printf("%llu\t", (unsigned long long)line);
            tr_lm_score_row(s, bytes);
        }
    }
    free(text);
    if (!ok || by != TR_BY_FILE || tr_stop_requested()) return ok;
    if (!tr_lm_score_block(t, s)) return 0;
    tr_lm_score_row(s, all);
    return 1;
}

/* --score: prints the table. On failure, sets the context's error and returns 0. */
TR_DEF int tr_lm_score(tr_lm *t) {
    const tr_lm_opt *o = t->opt;
    FILE *f = strcmp(o->score, "-") ? fopen(o->score, "rb") : stdin;
    tr_scorer s;
    if (!f) {
        stx_fail(t->x, STX_ERR_IO, "--score %s: %s", o->score, strerror(errno));
        return 0;
    }
    if (tr_lm_score_open(t, &s)) {
        if (o->score_by != TR_BY_FILE && t->blocks_see_more && t->eval_block > 1)
            tr_say(&t->term, "tokens are read one at a time, as in generation: the rows add up to "
                   "the score of --score-by file with --eval-block-sz 1");
        tr_lm_score_text(t, &s, f);
        if (s.unknown)
            tr_say(&t->term, "%llu of %llu tokens are not in the vocabulary, read as <unk>; their "
                   "scores are those of <unk>, not of the words themselves",
                   (unsigned long long)s.unknown, (unsigned long long)s.read);
        if (fflush(stdout) || ferror(stdout))
            stx_fail(t->x, STX_ERR_IO, "the scores cannot be written: %s", strerror(errno));
    }
    tr_lm_score_close(t, &s);
    if (f != stdin) fclose(f);
    return stx_ok(t->x);
}


// >>lm: program

/* Returns a dry context. A model that is created in it allocates no memory, but its
   resolved desc can be read. */
TR_DEF stx_ctx *tr_lm_dry_context(void) {
    stx_desc d;
    memset(&d, 0, sizeof d);
    d.dry = 1;
    d.threads = 1;
    return stx_create(&d);
}

/* Sets *literal to the forms that --literal selects. `applied` points to the forms that
   TR_EVERY selects in a model created in x, or is NULL if that model could not be
   created. Frees x. On error, sets t->err and returns 0. */
TR_DEF int tr_lm_literal(tr_lm *t, int set, stx_ctx *x, const unsigned *applied,
                         unsigned *literal) {
    const int lacks_memory = !x || stx_error_code(x) == STX_ERR_MEMORY;
    if (applied) *literal = *applied & ~(unsigned)tr_set_removed(set);
    stx_destroy(x);
    if (applied || !lacks_memory) return 1;     /* creating the model reports the error */
    return tr_fail(t->err, TR_ERR,
                   "--literal: out of memory: cannot determine which forms apply: name them");
}

/* Returns the number of parameters of the model that the options describe. On error, sets
   t->err and returns 0. */
TR_DEF size_t tr_lm_count(tr_lm *t, size_t vocab) {
    size_t n = t->kind->count(t, vocab);
    if (n != SIZE_MAX) return n;
    tr_fail(t->err, TR_ERR, "the model has more parameters than can be counted: use a smaller "
            "--hid-sz, --nlayers or vocabulary");
    return 0;
}

/* Flushes standard output. On error, sets t->err and returns 0. */
TR_DEF int tr_lm_flush(tr_lm *t) {
    if (fflush(stdout) == 0) return 1;
    return tr_fail(t->err, TR_ERR, "cannot write to standard output: %s", strerror(errno));
}

TR_DEF int tr_lm_list_presets(tr_lm *t) {
    const tr_preset *p;
    printf("preset\tlayers\td\tvocabulary\tparameters\n");
    for (p = t->options->preset; p->name; p++) {
        size_t vocab, n;
        if (!tr_reset(t->options, t->err, TR_ERR)) return 0;
        if (!tr_apply_preset(t->options, p, t->err, TR_ERR) || !tr_lm_context(t)) return 0;
        vocab = t->opt->vocab ? (size_t)t->opt->vocab : 256;
        n = tr_lm_count(t, vocab);
        if (!n) return 0;
        printf("%s\t%llu\t%llu\t%zu\t%zu\n", p->name,
               (unsigned long long)tr_lm_number(t, "nlayers", 0),
               (unsigned long long)tr_lm_number(t, "hid-sz", 0), vocab, n);
    }
    return tr_lm_flush(t);
}

/* --dry-run: prints sizes without creating the model. */
TR_DEF int tr_lm_dry_run(tr_lm *t) {
    const tr_lm_opt *o = t->opt;
    stx_file *f = NULL;
    size_t vocab = o->vocab ? (size_t)o->vocab : 256, n;
    uint64_t streams;
    double states = 0;
    char count[TR_TEXT_MAX], training[TR_TEXT_MAX], memory[TR_TEXT_MAX], line[1000];
    int ok, resumes;
    if (!tr_lm_context(t)) return 0;
    ok = tr_lm_open_checkpoint(t, &f);
    resumes = f != NULL;
    stx_file_close(f);
    if (!ok || !t->kind->check(t)) return 0;
    if (tr_given(t->options, "data") && !resumes && (!tr_lm_data(t) || !tr_lm_size(t))) return 0;

    if (t->vocab) vocab = stx_vocab_size(t->vocab);
    n = tr_lm_count(t, vocab);
    if (!n) return 0;
    t->kind->shape(t, line, sizeof line, &states);
    tr_count(count, (double)n);
    tr_bytes(training, 4.0 * (double)n * sizeof(stx_real));
    tr_bytes(memory, states * sizeof(stx_real));
    streams = tr_lm_number(t, "batch-sz", 1);
    printf("%zu parameters (%s), vocabulary %zu\n%s\n", n, count, vocab, line);
    printf("%s for parameters, gradients and the optimiser; %s for states and memories of %llu "
           "stream%s, in float; plus activations\n", training, memory,
           (unsigned long long)streams, tr_s(streams));
    return tr_lm_flush(t);
}

/* Nonzero if two paths refer to the same file, or will do so once it is created. */
TR_DEF int tr_same_file(const char *a, const char *b) {
    const char *const path[2] = {a, b}, *name[2];
    char dir[2][4096];
    struct stat s, t;
    int i;
    if (!a || !b || !*a || !*b) return 0;
    if (!strcmp(a, b)) return 1;
    if (!stat(a, &s) && !stat(b, &t))
        return S_ISREG(s.st_mode) && s.st_dev == t.st_dev && s.st_ino == t.st_ino;

    /* at least one of them does not exist: compare names and directories */
    for (i = 0; i < 2; i++) {
        const char *slash = strrchr(path[i], '/');
        name[i] = slash ? slash + 1 : path[i];
        if ((size_t)(name[i] - path[i]) >= sizeof dir[i]) return 0;
        snprintf(dir[i], sizeof dir[i], "%.*s.", (int)(name[i] - path[i]), path[i]);
    }
    return !strcmp(name[0], name[1]) && !stat(dir[0], &s) && !stat(dir[1], &t)
           && s.st_dev == t.st_dev && s.st_ino == t.st_ino;
}

/* Nonzero if `file` is the lock file of `path`, or will be once it is created. */
TR_DEF int tr_is_lock_of(const char *file, const char *path) {
    char *lock = file && path && *path ? tr_claim_path(path) : NULL;
    const int same = tr_same_file(file, lock);
    free(lock);
    return same;
}

/* Checks that `path`, the output file of the option `name`, differs from the run's
   other files. If not, sets t->err and returns 0. */
TR_DEF int tr_lm_own_file(tr_lm *t, const char *name, const char *path) {
    static const char *const other[] = {
        "data", "checkpoint", "best", "log", "pieces", "inherit", "init-from", "score"
    };
    static const char *const part[3] = {"train.txt", "valid.txt", "test.txt"};
    char text[4096];
    size_t i;
    int k;
    for (i = 0; path && t->opt->data && i < 3; i++) {
        int n = snprintf(text, sizeof text, "%s/%s", t->opt->data, part[i]);
        if (n < (int)sizeof text && tr_same_file(path, text))
            return tr_fail(t->err, TR_ERR, "--%s and the text %s are the same file", name, text);
    }
    for (i = 0; i < sizeof other / sizeof *other; i++) {
        const tr_opt *p = tr_find_option(t->options, other[i], strlen(other[i]));
        if (p && strcmp(other[i], name) && tr_same_file(path, *(const char *const *)p->to))
            return tr_fail(t->err, TR_ERR, "--%s and --%s are the same file", name, other[i]);
    }
    for (k = 0; k < 3; k++) {
        const char *output, *locked = tr_lm_output(t, k, &output);
        if (tr_is_lock_of(path, output))
            return tr_fail(t->err, TR_ERR,
                           "--%s %.500s is the lock file of --%s: name another file", name, path,
                           locked);
    }
    return 1;
}

/* Refuses options that would have no effect. */
TR_DEF int tr_lm_check_useful(tr_lm *t) {
    static const char *const for_text = "--generate and --interactive";
    static const char *const for_log = "training and evaluation, not to --interactive and --score";
    const tr_lm_opt *o = t->opt;
    const int writes = o->generate || o->interactive, samples = writes || o->sample_every;
    const int logs = !o->interactive && !o->score;
    const tr_only only[] = {
        {"prompt", writes, for_text},
        {"stop", writes, for_text},
        {"temperature", samples, for_text},
        {"top-k", samples, for_text},
        {"top-p", samples, for_text},
        {"repetition-penalty", samples, for_text},
        {"repetition-window", o->repetition_penalty > 1, "--repetition-penalty above 1"},
        {"weights", !t->training,
            "generation and evaluation (--no-train, --interactive, --eval-only, --score)"},
        {"log", logs, for_log},
        {"tensorboard", logs, for_log},
        {"data", !o->score, "training and evaluation, not to --score, which names its text"},
        {"score-by", o->score != NULL, "--score"},
        {"eval-batch-sz", !o->score, "training and evaluation, not to --score"},
        {"eval-blocks", !o->score, "training and evaluation, not to --score"},
        {"no-train", !o->score, "--generate, not to --score, which never trains"},
        {"keep-best", t->training, "training"},
        {"best", t->training, "training"},
        {"sample-prime", o->sample_every > 0, "--sample-every"},
        {"sample-length", o->sample_every > 0, "--sample-every"},
        {"save-every", o->checkpoint != NULL, "runs with --checkpoint"},
        {"pieces", o->tokens == TR_SPM || o->tokens == TR_IDS, "--tokens spm and ids"},
        {"join-lines", o->tokens == TR_SPM, "--tokens spm"},
        {"gpu", o->device, "--device cuda"},
        {"shard", t->start.ranks > 1, "runs with several ranks"},
        {"tf32", o->device, "--device cuda"},
        {"tune", o->device, "--device cuda"},
        {"no-graph", o->device, "--device cuda"}
    };
    if (t->training && o->recompute == TR_AS_FITS && o->device)
        return tr_fail(t->err, TR_ERR, "--recompute auto and --device cuda cannot be combined: "
                       "auto predicts the memory use on a CPU; give a number of layers, or "
                       "--recompute on");
    if (o->weights && o->device)
        return tr_fail(t->err, TR_ERR, "--weights and --device cuda cannot be combined: on a GPU, "
                       "the --precision of the run applies");
    return tr_check_only(t->options, only, sizeof only / sizeof *only, t->err, TR_ERR);
}

/* Checks that the options are consistent with each other. */
TR_DEF int tr_lm_check(tr_lm *t) {
    const tr_lm_opt *o = t->opt;
    const uint64_t B = tr_lm_number(t, "batch-sz", 1), split = tr_lm_number(t, "batch-split", 1);
    if (B % split)
        return tr_fail(t->err, TR_ERR, "--batch-split: expected a divisor of --batch-sz %llu, got "
                       "%llu", (unsigned long long)B, (unsigned long long)split);
    if (t->training && B / split % (uint64_t)tr_lm_ranks(t))
        return tr_fail(t->err, TR_ERR, "%d ranks cannot share %llu streams (%s) equally: use a "
                       "number of ranks that divides them, or another --batch-sz",
                       tr_lm_ranks(t), (unsigned long long)(B / split),
                       split > 1 ? "--batch-sz / --batch-split" : "--batch-sz");
    if (o->update_after && o->update_every <= 1 && tr_given(t->options, "update-after"))
        return tr_fail(t->err, TR_ERR, "--update-after %llu requires --update-every 2 or "
                       "more", (unsigned long long)o->update_after);
    if (!tr_lm_check_useful(t) || !tr_lm_own_file(t, "log", o->log)) return 0;
    if (o->score && strcmp(o->score, "-") && access(o->score, R_OK))
        return tr_fail(t->err, TR_ERR, "--score %s: %s", o->score, strerror(errno));
    if (t->training && !tr_lm_own_file(t, "best", o->best)) return 0;
    if (t->training && !tr_lm_own_file(t, "checkpoint", o->checkpoint)) return 0;
    return t->kind->check(t);
}

/* Counts the tokens and bytes of each text and, if the run reports results per word,
   its words. */
TR_DEF int tr_lm_count_texts(tr_lm *t) {
    const int words = t->unit == TR_WORD_PPL || (t->unit == TR_PPL && t->more_figures);
    int32_t ids[4096];
    int part;
    for (part = 0; part < 3; part++) {
        const stx_corpus *text = t->text[part];
        tr_lm_counts *c = &t->counts[part];
        size_t n = text ? stx_corpus_size(text) : 0, at, m;
        if (!text) continue;
        c->all = c->tokens = (double)n;
        c->bytes = (double)stx_corpus_bytes(text);
        for (at = 0; t->pad_id >= 0 && at < n; at += m) {
            m = n - at < 4096 ? n - at : 4096;
            if (!stx_corpus_read(text, at, m, ids)) return tr_lm_why(t);
            c->tokens -= (double)m - tr_lm_counted(t, ids, m);
            c->bytes -= tr_lm_pad_bytes(t, ids, m);
        }
        if (!(c->tokens > 0))
            return tr_fail(t->err, TR_ERR, "--pad-id %ld: a text consists only of this token, so "
                           "it has no loss: give another text or id", (long)t->pad_id);
        if (words) c->words = tr_lm_word_count(t, text);
        if (t->unit == TR_WORD_PPL && !(c->words > 0))
            return tr_fail(t->err, TR_ERR, "--data-unit word-ppl: a text contains no words: use "
                           "another unit");
    }
    return 1;
}

/* Appends to b, one per line, the values that must be equal on all ranks before the
   ranks do anything else. If they are equal, all ranks perform the same operations in
   the same order. Returns 0 if memory runs out. */
TR_DEF int tr_lm_facts(const tr_lm *t, tr_buf *b) {
    const tr_lm_opt *o = t->opt;
    const tr_opt *p;
    const char *task = t->evaluating ? "evaluation" : "neither training nor evaluation";
    char line[200], value[64];
    snprintf(line, sizeof line, "version: %s\ntask: %s\n", STX_VERSION,
             t->training ? "training" : task);
    tr_buf_puts(b, line);
    snprintf(line, sizeof line, "--device: %s\n--shard: %s\n", o->device ? "cuda" : "cpu",
             o->shard ? "yes" : "no");
    tr_buf_puts(b, line);
    snprintf(line, sizeof line, "--checkpoint: %s\n--best: %s\n--init-from: %s\n",
             o->checkpoint ? "given" : "none", o->best ? "given" : "none",
             o->init_from ? "given" : "none");
    tr_buf_puts(b, line);
    for (p = t->options->opt; p->type != TR_T_END; p++) {
        int keep = p->keep & ~(TR_LATER | TR_KEPT);
        const char *text = value;
        if (p->type == TR_T_GROUP || keep == TR_LOCAL || keep == TR_HINT) continue;
        tr_value(p, value);
        if (p->type == TR_T_TEXT) text = *(const char *const *)p->to;
        tr_buf_puts(b, "--");
        tr_buf_puts(b, p->name);
        tr_buf_puts(b, ": ");
        tr_buf_puts(b, text ? text : "none");
        tr_buf_puts(b, "\n");
    }
    return !b->oom;
}

/* Appends to b the values that must be equal on all ranks after the texts have been
   read. The paths of the texts may differ, but not their contents. */
TR_DEF int tr_lm_more_facts(const tr_lm *t, tr_buf *b) {
    static const char *const name[3] = {"training", "validation", "test"};
    size_t len = stx_vocab_save(t->vocab, NULL, 0);
    char *vocab = (char *)malloc(len + 1);
    char line[160];
    int i;
    if (vocab && stx_vocab_save(t->vocab, vocab, len) == len) {
        snprintf(line, sizeof line, "vocabulary: %016" PRIx64 "\n",
                 tr_hash(TR_HASH_BEGIN, vocab, len));
        tr_buf_puts(b, line);
    }
    free(vocab);
    for (i = 0; i < 3; i++) {
        if (!t->text[i]) continue;
        snprintf(line, sizeof line, "%s text: %zu tokens, %016" PRIx64 "\n", name[i],
                 stx_corpus_size(t->text[i]), tr_lm_fingerprint(t->text[i]));
        tr_buf_puts(b, line);
    }
    snprintf(line, sizeof line, "checkpoint: step %" PRIu64 "\n", t->step);
    tr_buf_puts(b, line);
    return !b->oom;
}

/* Returns 1 if the two lists of facts are equal. Otherwise, returns 0 and reports the
   first difference in t->err. */
TR_DEF int tr_lm_same_facts(tr_lm *t, const char *here, const char *rank0) {
    const char *a = here, *b = rank0;
    size_t m, n, name;
    while ((*a || *b) && *a == *b) {
        m = strcspn(a, "\n");
        n = strcspn(b, "\n");
        if (m != n || memcmp(a, b, m) != 0) break;
        a += m + (a[m] != 0);
        b += n + (b[n] != 0);
    }
    if (!*a && !*b) return 1;

    m = strcspn(a, "\n");
    n = strcspn(b, "\n");
    name = strcspn(b, ":");
    if (name >= m || memcmp(a, b, name + 1) != 0)
        return tr_fail(t->err, TR_ERR, "this rank has \"%.*s\", but rank 0 has \"%.*s\": all ranks "
                       "require the same program, options and texts",
                       (int)(m < 300 ? m : 300), a, (int)(n < 300 ? n : 300), b);
    a += name + 1;
    b += name + 1;
    m -= name + 1;
    n -= name + 1;
    return tr_fail(t->err, TR_ERR, "%.*s is%.*s here, but%.*s on rank 0: all ranks require the "
                   "same program, options and texts", (int)name, b - name - 1,
                   (int)(m < 300 ? m : 300), a, (int)(n < 300 ? n : 300), b);
}

/* Refuses to run if this rank differs from rank 0, and reports the difference.
   Collective. */
TR_DEF int tr_lm_compare(tr_lm *t, int (*facts)(const tr_lm *t, tr_buf *b)) {
    tr_buf here;
    char *rank0 = NULL;
    uint64_t n;
    int ok;
    if (tr_lm_ranks(t) < 2) return 1;
    memset(&here, 0, sizeof here);
    ok = facts(t, &here) || tr_fail(t->err, TR_ERR, "out of memory: cannot compare the ranks");
    n = here.n;
    ok = ok && stx_group_broadcast(t->x, &n, sizeof n, 0);
    if (ok) {
        rank0 = (char *)calloc((size_t)n + 1, 1);
        if (!rank0) tr_fail(t->err, TR_ERR, "out of memory: cannot compare the ranks");
    }
    if (rank0 && !stx_rank(t->x)) memcpy(rank0, here.s, here.n);
    ok = rank0 && stx_group_broadcast(t->x, rank0, (size_t)n, 0);
    if (!ok && !stx_ok(t->x)) tr_lm_why(t);
    ok = ok && tr_lm_same_facts(t, here.s, rank0);
    tr_buf_free(&here);
    free(rank0);
    return ok;
}

/* Before a task that only rank 0 performs, checks that all ranks have this task: a rank
   that trained instead would wait for the others forever. Without a group engine, ranks
   never wait for each other, so nothing is checked. */
TR_DEF int tr_lm_agree_on_task(tr_lm *t) {
    stx_desc d;
    if (t->start.ranks < 2) return 1;
    memset(&d, 0, sizeof d);
    d.threads = 1;
    t->x = stx_create(&d);
    if (stx_group_join(t->x, NULL) && !tr_lm_compare(t, tr_lm_facts)) return 0;
    stx_group_leave(t->x);
    stx_destroy(t->x);
    t->x = NULL;
    return 1;
}

/* Sets t->err and returns 0 if the file's tensors have fewer elements than the model that
   the file's options describe. This is checked before the model is created, because the
   options of a damaged file can describe a model of any size. */
TR_DEF int tr_lm_file_fits(tr_lm *t, const stx_file *f, const char *path) {
    size_t params = tr_lm_count(t, stx_vocab_size(t->vocab)), elements = 0, i;
    for (i = 0; i < stx_file_count(f); i++) elements += stx_file_entry(f, i)->count;
    if (!params || params <= elements) return params > 0;
    return tr_fail(t->err, TR_ERR, "%.600s: its options describe a model of %zu parameters, but "
                   "its tensors have only %zu elements: the file is damaged; use another copy",
                   path, params, elements);
}

/* Opens the texts, and determines the run's sizes and plan. */
TR_DEF int tr_lm_prepare_text(tr_lm *t, int reads_text, int resumes) {
    const tr_lm_opt *o = t->opt;
    const char *best = o->keep_best ? "keep-best" : "best";
    if (reads_text && !tr_lm_data(t)) return 0;
    if (t->training && !resumes && (!tr_lm_size(t) || !tr_lm_check(t))) return 0;
    if (t->training && o->best && !t->text[1])
        return tr_fail(t->err, TR_ERR, "--%s requires a validation text", best);
    t->unit = o->unit;
    if (!t->unit) t->unit = o->tokens >= TR_WORDS ? TR_PPL : TR_BPC;
    t->kind->plan(t);
    if (t->training && o->best && !t->eval_every)
        return tr_fail(t->err, TR_ERR, "--%s requires --eval-every", best);
    return tr_lm_count_texts(t);
}

/* Creates the model, and loads the checkpoint at path if there is one. */
TR_DEF int tr_lm_prepare_model(tr_lm *t, const stx_file *f, const char *path) {
    const tr_lm_opt *o = t->opt;
    t->recompute = o->recompute > 0 ? (size_t)o->recompute : 0;
    if (t->training && o->recompute == TR_AS_FITS) {
        void *copy = malloc(t->kind->size);
        if (!copy)
            return tr_fail(t->err, TR_ERR, "--recompute auto: out of memory: cannot copy the run");
        memcpy(copy, t, t->kind->size);
        t->before_make = copy;
    }
    if (f && !tr_lm_file_fits(t, f, path)) return 0;
    if (!t->kind->make(t)) return 0;
    if (f && !tr_lm_load(t, f)) return tr_fail(t->err, TR_ERR, "%s: %s", path, stx_error(t->x));
    return 1;
}

/* Rounds the weight matrices to the format of --weights. */
TR_DEF int tr_lm_pack(tr_lm *t) {
    const int kind = t->opt->weights == 1 ? STX_WEIGHTS_BF16 : STX_WEIGHTS_INT8;
    if (!t->opt->weights) return 1;
    t->packed = stx_params_pack(t->lm.params, kind);
    if (!stx_ok(t->x)) return tr_fail(t->err, TR_ERR, "--weights: %s", stx_error(t->x));
    if (t->packed) return 1;
    return tr_fail(t->err, TR_ERR,
                   "--weights has no effect: the model has no matrix of %d x %d or larger",
                   STX_PACK_MIN, STX_PACK_MIN);
}

/* Reports every error that can be found before the first step, and before any file is
   written. Opens the checkpoint first, because it determines the model, the precision and
   the vocabulary. */
TR_DEF int tr_lm_prepare(tr_lm *t) {
    const tr_lm_opt *o = t->opt;
    const char *path = o->init_from ? o->init_from : o->checkpoint;
    int reads_text = t->training || !o->no_train || tr_given(t->options, "data"), ok;
    stx_file *f = NULL;
    if (!tr_lm_context(t)) return 0;
    if (!t->training && o->init_from)
        return tr_fail(t->err, TR_ERR, "--init-from %.400s is only for training: to evaluate, "
                       "score or sample, give the file as --checkpoint", o->init_from);
    if (!t->training && !o->checkpoint)
        return tr_fail(t->err, TR_ERR,
                       "evaluation and generation without training require --checkpoint");
    if (o->interactive || o->score) reads_text = 0;

    ok = tr_lm_check_unclaimed(t) && tr_lm_open_checkpoint(t, &f);
    ok = ok && tr_lm_join(t) && tr_lm_compare(t, tr_lm_facts) && tr_lm_check(t);
    ok = ok && tr_lm_prepare_text(t, reads_text, f && !o->init_from);
    ok = ok && tr_lm_prepare_model(t, f, path);
    stx_file_close(f);
    if (ok && t->before_make) ok = tr_lm_choose(t);
    ok = ok && tr_lm_pack(t);
    ok = ok && tr_lm_compare(t, tr_lm_facts) && tr_lm_compare(t, tr_lm_more_facts);
    if (ok && !stx_group_broadcast_params(t->lm.params)) ok = tr_lm_why(t);
    return ok && tr_lm_open(t);
}

/* Reports why the run failed and returns the exit code. */
TR_DEF int tr_lm_failed(tr_lm *t) {
    const int code = stx_error_code(t->x);
    const int early = !t->begun && (code == STX_ERR_MEMORY || code == STX_ERR_IO);
    tr_lm_why(t);
    return tr_lm_end(t, t->err, early && !tr_lm_lost(t) ? 2 : 1);
}

/* Reports how much of the training text (its first million tokens) is <unk> in the
   vocabulary of --init-from. */
TR_DEF void tr_lm_report_unknown_share(tr_lm *t) {
    const int32_t unk = stx_vocab_unk(t->vocab);
    int32_t ids[4096];
    uint64_t n = stx_corpus_size(t->text[0]), at, unknown = 0;
    size_t m, i;
    if (n > 1000000) n = 1000000;
    for (at = 0; unk >= 0 && at < n; at += m) {
        m = n - at < 4096 ? (size_t)(n - at) : 4096;
        if (!stx_corpus_read(t->text[0], at, m, ids)) return;       /* training reports the error */
        for (i = 0; i < m; i++) unknown += ids[i] == unk;
    }
    if (unknown)
        tr_say(&t->term, "%.1f %% of the training text is <unk>: words that the vocabulary of "
               "--init-from lacks", 100.0 * (double)unknown / (double)n);
}

/* Trains. With --init-from, first evaluates the model, because the model before
   fine-tuning may be the best one. Returns 0 on error. */
TR_DEF int tr_lm_run_training(tr_lm *t) {
    double nll;
    int ok = 1;
    t->saved = t->step;
    t->loss = (double)NAN;
    t->began = tr_seconds();
    if (t->opt->init_from) {
        tr_lm_report_unknown_share(t);
        ok = tr_lm_evaluate(t, 1, t->eval_blocks, &nll);
        if (ok && t->opt->best && tr_lm_better(t, nll)) ok = tr_lm_save_best(t);
    }
    tr_rate_start(&t->rate, tr_seconds());
    if (ok) t->kind->train(t);
    return tr_lm_trained(t);
}

/* Runs the evaluations that give the results of the run. If --best has just evaluated
   this step, prints that result instead. */
TR_DEF int tr_lm_run_evaluation(tr_lm *t) {
    uint64_t blocks = t->training && tr_given(t->options, "eval-blocks") ? t->opt->eval_blocks : 0;
    double nll;
    int ok = 1;
    t->last = 1;
    if (t->evaluated != t->step || t->blocks != blocks)
        ok = tr_lm_evaluate(t, 1, blocks, &nll);
    else if (tr_lm_results(t) == stdout && !stx_rank(t->x))
        printf("%s\n", t->result);
    if (ok && !t->training) ok = tr_lm_evaluate(t, 2, 0, &nll);
    return ok;
}

/* Prints what the model learned. If standard output cannot be written, reports this,
   and returns 0 unless the run has trained. */
TR_DEF int tr_lm_print_results(tr_lm *t) {
    const tr_lm_opt *o = t->opt;
    int ok = 1;
    if (!tr_lm_stop(t)) ok = tr_lm_begin(t);        /* no effect if a step already called it */
    if (ok && !tr_lm_stop(t) && !stx_rank(t->x)) {
        t->kind->learned(t, tr_lm_results(t));
        ok = stx_ok(t->x);
    }
    if (!ok || (!fflush(stdout) && !ferror(stdout))) return ok;
    if (t->training) {
        fprintf(stderr, "%s: the results cannot be written: %s\n",
                o->log ? o->log : t->options->program, strerror(errno));
    } else {
        stx_fail(t->x, STX_ERR_IO, "the results cannot be written: %s", strerror(errno));
        ok = 0;
    }
    clearerr(stdout);
    return ok;
}

/* Prints where the run stopped. */
TR_DEF void tr_lm_print_stopped(const tr_lm *t) {
    const char *saved = "";
    if (!t->training) {
        fprintf(stderr, "%s: stopped before the end\n", t->options->program);
        return;
    }
    if (!t->opt->checkpoint) saved = "; nothing is saved without --checkpoint";
    else if (t->step > t->first) saved = "; the checkpoint is saved, the same command resumes it";
    fprintf(stderr, "stopped at step %llu%s\n", (unsigned long long)t->step, saved);
}

/* Runs what the options request: training, evaluation, generation, a conversation or
   scoring. Returns the exit code. */
TR_DEF int tr_lm_run(tr_lm *t, int evaluating) {
    const tr_lm_opt *o = t->opt;
    size_t refused = 0;
    int ok = 1, stop;
    tr_lm_hello(t);
    if (o->interactive || o->score) {
        ok = o->interactive ? tr_lm_talk(t, &refused) : tr_lm_score(t);
        if (!ok) return tr_lm_failed(t);
        stop = tr_stop_requested();
        return stop ? 128 + stop : refused && !isatty(0);
    }

    if (t->training) ok = tr_lm_run_training(t);
    if (ok && !tr_lm_stop(t) && (t->training || (evaluating && !t->no_evaluation)))
        ok = tr_lm_run_evaluation(t);
    tr_term_close(&t->term);
    ok = ok && tr_lm_print_results(t);
    if (ok && !tr_lm_stop(t) && o->generate && !stx_rank(t->x)) ok = tr_lm_generate(t);
    if (!ok) return tr_lm_failed(t);

    stop = tr_lm_stop(t);
    /* a signal may have arrived while only rank 0 was running */
    if (!stop && !stx_rank(t->x)) stop = tr_stop_requested();
    if (stop && !stx_rank(t->x)) tr_lm_print_stopped(t);
    return stop ? 128 + stop : 0;
}

/* Sets an option to a path, as if it had been given on the command line. */
TR_DEF int tr_lm_set_path(tr_lm *t, const char *name, const char *path) {
    tr_opt *o = tr_find_option(t->options, name, strlen(name));
    if (!path) return tr_fail(t->err, TR_ERR, "out of memory: cannot store the path of a file");
    return tr_set(o, path, TR_FROM_ARGS, t->err, TR_ERR);
}

/* Replaces --out by --checkpoint and, in training, --log and --tensorboard. */
TR_DEF int tr_lm_expand_out(tr_lm *t) {
    static const char *const name[3] = {"checkpoint", "log", "tensorboard"};
    static const char *const file[3] = {"model.safetensors", "log.jsonl", "tb"};
    const char *out = t->opt->out;
    struct stat st;
    size_t n;
    int i, ok = 1;
    if (!out) return 1;
    n = strlen(out);
    if (!n) return tr_fail(t->err, TR_ERR, "--out: expected the name of a directory, got ''");
    if (stat(out, &st) == 0) {
        if (!S_ISDIR(st.st_mode))
            return tr_fail(t->err, TR_ERR, "--out %s: expected a directory, got a file", out);
    } else if (errno != ENOENT) {
        return tr_fail(t->err, TR_ERR, "--out %s: %s", out, strerror(errno));
    }
    for (i = 0; ok && i < (t->training ? 3 : 1); i++) {
        char *path;
        if (tr_given(t->options, name[i])) continue;
        path = (char *)malloc(n + 32);
        if (path) snprintf(path, n + 32, "%s%s%s", out, out[n - 1] == '/' ? "" : "/", file[i]);
        ok = tr_lm_set_path(t, name[i], path);
        free(path);
    }
    return ok;
}

/* Replaces --keep-best by --best. */
TR_DEF int tr_lm_expand_keep_best(tr_lm *t) {
    const tr_lm_opt *o = t->opt;
    char *path;
    int ok;
    if (!t->training || !o->keep_best) return 1;
    if (o->best) return tr_fail(t->err, TR_ERR, "--best and --keep-best cannot be combined");
    if (!o->checkpoint || !*o->checkpoint)
        return tr_fail(t->err, TR_ERR,
                       "--keep-best requires --checkpoint, from which the name of the best "
                       "model's file is derived");
    path = tr_path_with(o->checkpoint, ".best");
    ok = tr_lm_set_path(t, "best", path);
    free(path);
    return ok;
}

/* Refuses options that --interactive or --score would ignore, because either of the two
   excludes all other tasks. */
TR_DEF int tr_lm_check_alone(tr_lm *t, const char *name, int evaluating, const int *evaluate) {
    const tr_lm_opt *o = t->opt;
    const tr_opt *p;
    if (o->interactive && o->prompt && !strcmp(o->prompt, "-"))
        return tr_fail(t->err, TR_ERR, "--prompt - and --interactive cannot be combined: standard "
                       "input is used for the conversation; give the prompt on the command line");
    if (o->score && (o->interactive || o->generate))
        return tr_fail(t->err, TR_ERR, "--score and --%s cannot be combined",
                       o->interactive ? "interactive" : "generate");
    if (!evaluating) return 1;
    for (p = t->options->opt; p->type != TR_T_END; p++) {
        int requests = p->to == (const void *)&o->eval_only || p->to == (const void *)evaluate;
        if (p->type == TR_T_FLAG && requests && *(const int *)p->to)
            return tr_fail(t->err, TR_ERR, "--%s and --%s cannot be combined", name, p->name);
    }
    return tr_fail(t->err, TR_ERR, "--%s cannot be combined with an evaluation", name);
}

#ifdef _WIN32
#define TR_NOWHERE "NUL"
#else
#define TR_NOWHERE "/dev/null"
#endif

/* Dispatches to the task that the options request and returns the exit code. */
TR_DEF int tr_lm_do(tr_lm *t, const int *evaluate) {
    const tr_lm_opt *o = t->opt;
    const int evaluating = o->eval_only || (evaluate && *evaluate);
    const int prints = o->version || o->list_presets || o->dry_run;
    const int alone = o->interactive || o->score, other = prints || alone;
    t->training = !evaluating && !o->no_train && !other;
    t->evaluating = evaluating && !other;
    if (!t->training && !t->evaluating) {
        if (!tr_lm_agree_on_task(t)) return tr_lm_refuse(t);
        if (t->start.rank) return 0;
    }
    if (o->version) {
        printf("%s, seqtx %s\n", t->options->program, STX_VERSION);
        return tr_lm_flush(t) ? 0 : tr_lm_refuse(t);
    }
    if (!tr_lm_expand_out(t) || !tr_lm_expand_keep_best(t)) return tr_lm_refuse(t);
    if (alone && !tr_lm_check_alone(t, o->score ? "score" : "interactive", evaluating, evaluate))
        return tr_lm_refuse(t);
    if (o->list_presets) return tr_lm_list_presets(t) ? 0 : tr_lm_refuse(t);
    if (o->dry_run) return tr_lm_dry_run(t) ? 0 : tr_lm_refuse(t);
    return tr_lm_prepare(t) ? tr_lm_run(t, evaluating) : tr_lm_refuse(t);
}

/* Reads the command line, runs the program and returns the exit code. t is the first
   member of the trainer's struct, which must be zeroed. evaluate points to the trainer's
   option that requests evaluation without training, or is NULL. */
TR_DEF int tr_lm_main(tr_lm *t, const tr_lm_kind *kind, tr_options *options, const tr_lm_opt *opt,
                      const int *evaluate, int argc, char **argv) {
    int code = 0;
    t->options = options;
    t->opt = opt;
    t->kind = kind;
    t->start = stx_get_launch_info();
    /* only rank 0 prints results and help */
    if (t->start.rank > 0 && !freopen(TR_NOWHERE, "w", stdout)) return 1;
    t->best = t->best_seen = (double)NAN;
    t->evaluated = UINT64_MAX;
    t->pad_id = -1;
    t->log.out.fd = t->board.out.fd = -1;
    tr_standard_streams();

    switch (tr_parse(options, argc, argv, t->err, TR_ERR)) {
    case 0: code = tr_lm_refuse(t); break;
    case 2: code = tr_lm_agree_on_task(t) ? 0 : tr_lm_refuse(t); break;     /* --help */
    default: code = tr_lm_do(t, evaluate);
    }
    if (code != 1 && code != 2) stx_group_leave(t->x);      /* with codes 1 and 2, the group was
                                                               aborted */
    tr_lm_close(t);
    return code;
}

#endif /* TR_LM */

#endif /* SEQTX_EXAMPLES_TRAIN_H */
