#pragma once
#include "../api/config.h"
#include "../api/context.h"
#include "../api/train.h"
#include "../api/files.h"
#include "platform.h"


// >>text

STX_DEF int stx_bad_value(stx_ctx *x, const char *op, const char *field, double got,
                          const char *expected) {
    stx_fail(x, STX_ERR_ARG, "%s: %s: expected %s, got %g", op, field, expected, got);
    return 0;
}

/* Nonzero unless c is a control character, or one that cannot be seen or that reorders
   the text around it, such as a byte-order mark. */
static int stx__visible(uint32_t c) {
    static const uint32_t hidden[][2] = {
        {0, 0x1F},        {0x7F, 0x9F},     {0xAD, 0xAD},     {0x61C, 0x61C},
        {0x180E, 0x180E}, {0x200B, 0x200F}, {0x2028, 0x202E}, {0x2060, 0x206F},
        {0xFEFF, 0xFEFF}, {0xFFF9, 0xFFFB}, {0xE0000, 0xE0FFF}};
    size_t i;
    for (i = 0; i < sizeof hidden / sizeof *hidden; i++)
        if (c >= hidden[i][0] && c <= hidden[i][1]) return 0;
    return 1;
}

STX_DEF const char *stx_quote(char *q, const void *s, size_t n) {
    const unsigned char *p = (const unsigned char *)s;
    size_t i, k, o = 0;
    uint32_t c;
    for (i = 0; i < n && i < 60; i += k) {
        k = stx_utf8(p + i, n - i, &c);
        if (k == 0 || !stx__visible(c)) {
            snprintf(q + o, 5, "\\x%02X", (unsigned)p[i]);
            k = 1;
            o += 4;
        } else if (i + k <= 60) {
            memcpy(q + o, p + i, k);
            o += k;
        } else {
            break;
        }
    }
    strcpy(q + o, i < n ? "..." : "");
    return q;
}

/* Ensures that the array p, which has n elements of `each` bytes and capacity *cap, can
   hold one more element. Returns the array, which may have moved. If memory runs out,
   sets an error, returns NULL and leaves p unchanged. */
static void *stx__grow(stx_ctx *x, void *p, size_t n, size_t *cap, size_t each) {
    size_t more = *cap ? *cap * 2 : 16;
    void *q;
    if (n < *cap) return p;
    if (*cap > SIZE_MAX / 2 / each) {
        stx_fail(x, STX_ERR_MEMORY,
                 "out of memory: an array of %zu elements of %zu bytes each cannot grow", *cap,
                 each);
        return NULL;
    }
    q = stx_block(x, more * each);
    if (!q) return NULL;
    if (n) memcpy(q, p, n * each);
    stx_block_free(x, p);
    *cap = more;
    return q;
}

static char *stx__copy(stx_ctx *x, const char *s) {
    size_t n = strlen(s) + 1;
    char *p = (char *)stx_block(x, n);
    if (p) memcpy(p, s, n);
    return p;
}

/* Writes strings a and b, one after the other, to buf, which has n bytes. Returns buf,
   or NULL if the result does not fit. */
static const char *stx__join(char *buf, size_t n, const char *a, const char *b) {
    int len = snprintf(buf, n, "%s%s", a, b);
    return len >= 0 && (size_t)len < n ? buf : NULL;
}

STX_DEF size_t stx_utf8(const void *text, size_t n, uint32_t *cp) {
    const unsigned char *s = (const unsigned char *)text;
    uint32_t c = n ? s[0] : 0;
    size_t i, len = 2;
    *cp = c;
    if (!n) return 0;
    if (c < 0x80) return 1;
    if (c < 0xC2 || c > 0xF4) return 0;
    if (c >= 0xE0) len = c < 0xF0 ? 3 : 4;
    if (n < len) return 0;
    c &= 0x7Fu >> len;
    for (i = 1; i < len; i++) {
        if ((s[i] & 0xC0) != 0x80) return 0;
        c = c << 6 | (s[i] & 0x3Fu);
    }
    *cp = c;
    if (len == 3 && (c < 0x800 || (c >= 0xD800 && c <= 0xDFFF))) return 0;
    if (len == 4 && (c < 0x10000 || c > 0x10FFFF)) return 0;
    return len;
}

/* Writes code point c to o as UTF-8 and returns its length, 1 to 4. */
static size_t stx__utf8_put(char *o, uint32_t c) {
    static const unsigned char first[4] = {0, 0xC0, 0xE0, 0xF0};
    const size_t more = (size_t)(c >= 0x80) + (c >= 0x800) + (c >= 0x10000);
    size_t i;
    o[0] = (char)(first[more] | c >> 6 * more);
    for (i = 1; i <= more; i++) o[i] = (char)(0x80 | (c >> 6 * (more - i) & 0x3F));
    return more + 1;
}

static int stx__utf8_valid(const char *s) {
    size_t i, k, n = strlen(s);
    uint32_t c;
    for (i = 0; i < n; i += k) {
        k = stx_utf8(s + i, n - i, &c);
        if (!k) return 0;
    }
    return 1;
}

/* A growable string of n bytes. A failed allocation sets `bad`; the string then stays
   unchanged. */
typedef struct stx__text {
    stx_ctx *x;
    char *s;
    size_t n, cap;
    int bad;
} stx__text;

static void stx__text_add(stx__text *t, const char *s, size_t n) {
    size_t cap = t->cap ? t->cap : 1024;
    if (t->bad || !n) return;
    while (cap - t->n < n && cap <= SIZE_MAX / 2) cap *= 2;
    if (cap != t->cap) {
        char *p = cap - t->n < n ? NULL : (char *)stx_block(t->x, cap);
        if (!p) {
            t->bad = 1;
            return;
        }
        if (t->n) memcpy(p, t->s, t->n);
        stx_block_free(t->x, t->s);
        t->s = p;
        t->cap = cap;
    }
    memcpy(t->s + t->n, s, n);
    t->n += n;
}

static void stx__text_add_str(stx__text *t, const char *s) {
    stx__text_add(t, s, strlen(s));
}

static void stx__text_add_size(stx__text *t, size_t v) {
    char b[32];
    stx__text_add(t, b, (size_t)snprintf(b, sizeof b, "%zu", v));
}

/* Appends s as a JSON string, quoted and escaped. */
static void stx__text_add_json(stx__text *t, const char *s) {
    char b[8];
    stx__text_add_str(t, "\"");
    for (; *s; s++) {
        unsigned char c = (unsigned char)*s;
        if (c == '"' || c == '\\') {
            b[0] = '\\';
            b[1] = *s;
            stx__text_add(t, b, 2);
        } else if (c < 0x20)
            stx__text_add(t, b, (size_t)snprintf(b, sizeof b, "\\u%04x", (unsigned)c));
        else
            stx__text_add(t, s, 1);
    }
    stx__text_add_str(t, "\"");
}

STX_DEF uint64_t stx_key_add(uint64_t key, uint64_t value) {
    int i;
    for (i = 0; i < 8; i++) key = (key ^ ((value >> (8 * i)) & 255)) * 1099511628211u;
    return key;
}
