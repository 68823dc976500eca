/* lexer.cpp - see lexer.h. */
#include "lexer.h"
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

namespace ptx {

void lexer::fail(const char *format, ...) {
    char text[400], message[440];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    snprintf(message, sizeof message, "line %u: %s", line, text);
    throw parse_error(message);
}

/* Skips blanks and comments. */
void lexer::skip_space() {
    for (; at < end; at++) {
        if (*at == '\n') {
            line++;
        } else if (*at == '/' && at + 1 < end && at[1] == '/') {
            const void *eol = memchr(at, '\n', (size_t)(end - at));
            at = eol ? (const char *)eol - 1 : end - 1;
        } else if (*at == '/' && at + 1 < end && at[1] == '*') {
            for (at += 2; at + 1 < end && !(*at == '*' && at[1] == '/'); at++)
                if (*at == '\n') line++;
            at++;
        } else if (*at != ' ' && *at != '\t' && *at != '\r') {
            return;
        }
    }
    at = end;
}

/* Returns the next character that is not blank, or 0 at the end. */
char lexer::peek() {
    skip_space();
    return at < end ? *at : '\0';
}

bool lexer::accept(char c) {
    if (peek() != c) return false;
    at++;
    return true;
}

void lexer::expect(char c) {
    if (!accept(c)) fail("expected '%c', got '%c'", c, peek());
}

/* A name without dots. */
word lexer::name() {
    skip_space();
    const char *start = at;
    while (at < end && is_name_character(*at)) at++;
    if (at == start) fail("expected a name, got '%c'", peek());
    return word(start, (size_t)(at - start));
}

/* A directive, an opcode with its modifiers, or a special register. */
word lexer::dotted() {
    skip_space();
    const char *start = at;
    while (at < end) {
        if (at[0] == ':' && at + 1 < end && at[1] == ':') at += 2;
        else if (is_name_character(*at) || *at == '.') at++;
        else break;
    }
    if (at == start) fail("unexpected '%c'", peek());
    return word(start, (size_t)(at - start));
}

word lexer::string() {
    expect('"');
    const char *start = at;
    while (at < end && *at != '"') at++;
    word s(start, (size_t)(at - start));
    expect('"');
    return s;
}

int64_t lexer::integer() { return (int64_t)number(S64); }

/* A number as the bits of type t. Hexadecimal floats are 0f3F800000 or 0d3FF0..; an
   integer may have the suffix U. */
uint64_t lexer::number(type t) {
    skip_space();
    bool minus = false;
    while (at < end && (*at == '-' || *at == '+')) {
        if (*at == '-') minus = !minus;
        at++;
        skip_space();
    }
    char buffer[80];
    size_t n = 0;
    while (at < end && n + 1 < sizeof buffer && (isalnum((unsigned char)*at) || *at == '.'))
        buffer[n++] = *at++;
    buffer[n] = '\0';
    if (!n || !isdigit((unsigned char)buffer[0])) fail("expected a number, got '%c'", peek());

    char *stop;
    uint64_t bits;
    bool hex_float = buffer[0] == '0' && strchr("fFdD", buffer[1]) && n > 2;
    if (hex_float) {
        bits = strtoull(buffer + 2, &stop, 16);
        bool wide = buffer[1] == 'd' || buffer[1] == 'D';
        if (wide && (t == F32 || t == B32)) {
            double d;
            memcpy(&d, &bits, 8);
            float f = (float)d;
            uint32_t narrow;
            memcpy(&narrow, &f, 4);
            bits = narrow;
        } else if (!wide && t == F64) {
            uint32_t narrow = (uint32_t)bits;
            float f;
            memcpy(&f, &narrow, 4);
            double d = f;
            memcpy(&bits, &d, 8);
        }
        if (minus) bits ^= type_size(t) == 8 ? 1ull << 63 : 1ull << 31;
    } else if (strchr(buffer, '.')) {
        double d = strtod(buffer, &stop);
        if (minus) d = -d;
        float f = (float)d;
        uint32_t narrow;
        memcpy(&narrow, &f, 4);
        memcpy(&bits, &d, 8);
        if (type_size(t) == 4) bits = narrow;
    } else {
        bits = buffer[1] == 'b' || buffer[1] == 'B' ? strtoull(buffer + 2, &stop, 2)
                                                    : strtoull(buffer, &stop, 0);
        if (*stop == 'U') stop++;
        if (minus) bits = 0 - bits;
    }
    if (*stop) fail("not a number: %s", buffer);
    return bits;
}

void lexer::skip_past(char c) {
    while (peek() != c) {
        if (at >= end) fail("expected '%c', got the end of the text", c);
        at++;
    }
    at++;
}

} // namespace ptx
