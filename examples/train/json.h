#pragma once
#include "base.h"
#include "buffer.h"


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
    size_t n = 1 + (size_t)(s[0] >= 0xC2) + (s[0] >= 0xE0) + (s[0] >= 0xF0), i;
    if (s[0] < 0x80) return 1;
    if (n == 1 || s[0] > 0xF4) return 0;
    for (i = 1; i < n; i++)
        if ((s[i] & 0xC0) != 0x80) return 0;
    if ((s[0] == 0xE0 && s[1] < 0xA0) || (s[0] == 0xED && s[1] > 0x9F)) return 0;
    if ((s[0] == 0xF0 && s[1] < 0x90) || (s[0] == 0xF4 && s[1] > 0x8F)) return 0;
    return n;
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
    static const unsigned char first[4] = {0, 0xC0, 0xE0, 0xF0};
    size_t more = (size_t)(c >= 0x80) + (c >= 0x800) + (c >= 0x10000), i;
    out[0] = (char)(first[more] | c >> 6 * more);
    for (i = 1; i <= more; i++) out[i] = (char)(0x80 | (c >> 6 * (more - i) & 0x3F));
    return more + 1;
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

/* A member of a JSON object. To iterate over the members, initialise with {object, NULL,
   NULL, 0} and call tr_json_next. */
typedef struct {
    const char *p;              /* position after the value */
    const char *key, *value;    /* key: its first character, after the quote */
    size_t      key_len;
} tr_json_member;

/* Moves to the next member. Returns 1; or 0 after the last member, with m->p after the
   closing bracket; or -1 if the object is malformed. */
TR_DEF int tr_json_next(tr_json_member *m) {
    const char *p = tr_json_blank(m->p);
    const int first = m->key == NULL;
    if (first && *p++ != '{') return -1;
    p = tr_json_blank(p);
    if (*p == '}') {
        m->p = p + 1;
        return 0;
    }
    if (!first && *p++ != ',') return -1;
    p = tr_json_blank(p);
    if (*p != '"') return -1;
    m->key = p + 1;
    p = tr_json_past_string(p);
    if (p == NULL) return -1;
    m->key_len = (size_t)(p - 1 - m->key);
    p = tr_json_blank(p);
    if (*p != ':') return -1;
    m->value = tr_json_blank(p + 1);
    m->p = tr_json_past_value(m->value);
    return m->p != NULL ? 1 : -1;
}

TR_DEF int tr_json_is_key(const tr_json_member *m, const char *key) {
    return strlen(key) == m->key_len && memcmp(m->key, key, m->key_len) == 0;
}

/* Looks up a key among the top-level members of a JSON object and copies its value to
   out: a string without its quotes and with escapes decoded, any other value as
   written. If a key occurs twice, the first one counts. The whole object is always
   scanned. Returns 1 if the key was found, 0 if it is absent, and -1 if the object is
   malformed or the value does not fit. */
TR_DEF int tr_json_find(const char *json, const char *key, char *out, size_t size) {
    tr_json_member m = {json, NULL, NULL, 0};
    int found = 0, more;
    while ((more = tr_json_next(&m)) > 0) {
        const size_t n = (size_t)(m.p - m.value);
        if (found || !tr_json_is_key(&m, key)) continue;
        found = 1;
        if (*m.value == '"') {
            if (!tr_json_unescape(m.value + 1, m.p - 1, out, size)) return -1;
            continue;
        }
        if (n >= size) return -1;
        memcpy(out, m.value, n);
        out[n] = 0;
    }
    return more < 0 || *tr_json_blank(m.p) != 0 ? -1 : found;
}
