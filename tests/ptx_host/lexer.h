/* lexer.h - words and numbers of PTX text. The lexer works on the text in place. */
#ifndef PTX_LEXER_H
#define PTX_LEXER_H
#include "module.h"
#include <ctype.h>
#include <stdexcept>
#include <string_view>

namespace ptx {

typedef std::string_view word;

struct parse_error : std::runtime_error {
    using std::runtime_error::runtime_error;
};

inline bool is_name_character(char c) {
    return isalnum((unsigned char)c) || c == '_' || c == '$' || c == '%';
}

struct lexer {
    const char *at, *end;
    unsigned line = 1;

    [[noreturn]] void fail(const char *format, ...) __attribute__((format(printf, 2, 3)));
    void skip_space();
    char peek();
    bool accept(char c);
    void expect(char c);
    word name();
    word dotted();
    word string();
    uint64_t number(type t);
    int64_t integer();
    void skip_past(char c);
};

} // namespace ptx
#endif
