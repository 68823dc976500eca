/* symbols.h - names of functions of the running program. */
#ifndef SYMBOLS_H
#define SYMBOLS_H
#include <string>

/* Returns the demangled name of the function at an address, without its return type, such
   as "stx__add_kernel<4>(stx__array, unsigned long)". Returns "" if the symbol table of
   the program has no function that begins there. */
std::string symbol_name(const void *function);

/* Demangles a name and drops the return type. Returns "" if it is not a mangled name. */
std::string symbol_demangle(const char *mangled);
#endif
