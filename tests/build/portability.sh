#!/bin/sh
# portability.sh - tests the headers in unusual environments: after <complex.h>, which
# defines a macro I; with MinGW, whose printf differs; in a shared library that hides all
# symbols except the API. FULL=1 adds clang's undefined-behaviour sanitizer, which detects
# errors that gcc's does not. Skips compilers that are not installed.
cd "$(dirname "$0")/../.." || exit 1
work=$(mktemp -d "${TMPDIR:-/tmp}/seqtx-portability.XXXXXX") || exit 1
trap 'rm -rf "$work"' EXIT
trap 'exit 1' INT TERM
W="-Wall -Wextra -Wpedantic -Wshadow -Werror"
passed=0 failed=0
check() {     # check NAME COMMAND: skipped when its first word is no command
    if ! command -v "${2%% *}" > /dev/null 2>&1; then echo "skipped: $1: no ${2%% *}"; return; fi
    if sh -c "$2" > "$work/log" 2>&1; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        echo "FAILED $1"
        head -n 12 "$work/log"
    fi
}

# For a family header only its own implementation, by its own macro: that of the core is
# compiled with seqtx.h.
for h in seqtx*.h; do
    name=$(basename "$h" .h)
    macro=SEQTX_$(echo "$name" | sed 's/^seqtx_*//; s/.$/&_/' | tr a-z A-Z)IMPLEMENTATION
    printf '#include <complex.h>\n#include "%s"\nint main(void) { return 0; }\n' "$h" > \
        "$work/complex.$name.c"
    printf '#include "%s"\nint main(void) { return 0; }\n' "$h" > "$work/plain.$name.c"
    for cc in gcc clang; do
        for std in c99 c11 c17; do
            check "$h after <complex.h>, $cc $std: declarations" \
                "$cc -std=$std $W -I. -fsyntax-only $work/complex.$name.c"
        done
        check "$h after <complex.h>, $cc: implementation" \
            "$cc -std=c99 $W -I. -fsyntax-only -D$macro $work/complex.$name.c"
    done
    for std in c99 gnu17; do
        check "$h MinGW $std" \
            "x86_64-w64-mingw32-gcc -std=$std $W -I. -fsyntax-only -D$macro $work/plain.$name.c"
    done
    check "$h MinGW C++" \
        "x86_64-w64-mingw32-g++ -std=c++11 $W -I. -fsyntax-only -x c++ -D$macro $work/plain.$name.c"
done

# a shared library that exports only the API, from C and from C++: each language by one
# compiler, each compiler with one language
cat > "$work/lib.c" <<'C'
#define SEQTX_IMPLEMENTATION
#include "seqtx.h"
#include "seqtx_text.h"
int hidden_(void);
int hidden_(void) { return 1; }
C
cat > "$work/use.c" <<'C'
#include "seqtx.h"
int main(void) {
    stx_ctx *x = stx_create(NULL);
    int ok = stx_ok(x);
    stx_destroy(x);
    return !ok;
}
C
export_api="-DSEQTX_API='__attribute__((visibility(\"default\")))'"
if command -v clang++ > /dev/null 2>&1; then cxx=clang++; else cxx=g++; fi
for cc in "gcc -std=c99" "$cxx -std=c++11 -x c++"; do
    check "only the API is exported: $cc" \
        "$cc -I. $W -fPIC -fvisibility=hidden $export_api -c $work/lib.c -o $work/lib.o &&
        ${cc%% *} -shared $work/lib.o -o $work/libstx.so -lm &&
        nm -D --defined-only $work/libstx.so > $work/names &&
        [ \$(grep -c ' T stx_[a-z]' $work/names) -ge 180 ] && ! grep ' stx__' $work/names &&
        ! grep hidden_ $work/names &&
        ${cc%% *} -I. $(case "$cc" in *c++*) echo "-x c++";;
        esac) $work/use.c -x none $work/libstx.so -Wl,-rpath,$work -o $work/use && $work/use"
done
check "SEQTX_STATIC and SEQTX_API cannot be combined" \
    "gcc -I. -fsyntax-only -DSEQTX_STATIC -DSEQTX_API=extern $work/use.c 2>&1 |
    grep 'SEQTX_API.*SEQTX_STATIC'"

# clang's sanitizer: pointer arithmetic. It checks object sizes only in optimised code,
# which takes seven times as long; the runs with the address sanitizer cover them. With
# SEQTX_STATIC, unused functions are not compiled. All quick starts are in one unit, each
# main under a separate name.
for header in seqtx_attn_span seqtx_sru seqtx_compressive seqtx_par; do
    echo "#define main ${header}_main"
    sed -n '/\/\/>quickstart/,/\/\/<quickstart/p' $header.h | sed '1d;$d; s/^ \{1,7\}//'
    echo "#undef main"
done > "$work/quick.c"
# and a W whose number of rows is not a multiple of four
cat >> "$work/quick.c" <<'C'
static int few_rows(void) {
    stx_ctx *x = stx_create(NULL);
    stx_real a[100] = {1}, b[500] = {2}, c[5] = {0};
    stx_gemm_args g = stx_gemm_init(0, 1, 1, 5, 100, a, b, c);
    stx_gemm(x, &g);
    stx_destroy(x);
    return c[0] == 2 && c[4] == 0 ? 0 : 1;
}
int main(void) {
    return few_rows() + seqtx_attn_span_main() + seqtx_sru_main() + seqtx_compressive_main()
        + seqtx_par_main();
}
C
[ -z "$FULL" ] || check "clang's undefined-behaviour sanitizer" \
    "clang -std=c99 -I. -Iexamples -O0 -DSEQTX_STATIC -Wno-unused-function -fsanitize=undefined \
        -fno-sanitize-recover=all $work/quick.c -lm -o $work/quick && $work/quick"
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
