#pragma once
#include "base.h"


// >>buffer: growing byte strings; a failed allocation sets oom

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

/* Nonzero if the text contains an occurrence of `stop` that ends after the first `seen`
   bytes. */
TR_DEF int tr_stops(const tr_buf *text, size_t seen, const char *stop) {
    size_t k = strlen(stop), at = seen + 1 > k ? seen + 1 - k : 0;
    for (; k > 0 && at + k <= text->n; at++)
        if (memcmp(text->s + at, stop, k) == 0) return 1;
    return 0;
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
