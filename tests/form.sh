#!/bin/sh
# form.sh - the form of every public header (./seqtx*.h): each alone, as C99, C11, C++11 and C++17, the implementation as C and
# as C++, declarations only, static in two units, implementation and use in different units, twice included, the macro on the
# command line, with and without OpenMP, float and double; what must not link does not; the quick starts of the manuals
# compile and run; objects export stx_ names only and never exit, abort or print; every op of seqtx.h has a row in
# test_grad.c. Needs one C compiler; g++ and clang are used where they are.
#   CC, CXX: compilers to try besides gcc, clang, g++, clang++.   KEEP=1 keeps the work directory.
cd "$(dirname "$0")/.." || exit 1
root=$(pwd)
work=$(mktemp -d "${TMPDIR:-/tmp}/seqtx-form.XXXXXX") || exit 1
[ -n "$KEEP" ] || trap 'rm -rf "$work"' EXIT
trap 'exit 1' INT TERM
W="-Wall -Wextra -Wpedantic -Wshadow -Werror"
jobs=$(nproc 2>/dev/null || echo 2)
n=0

compilers() {       # those of the words that work for language $1, each real program once
    lang=$1; shift
    seen=
    for c in "$@"; do
        [ -n "$c" ] || continue
        printf 'int main(void) { return 0; }\n' | $c -x "$lang" - -o "$work/probe" 2>/dev/null || continue
        id=$($c --version 2>/dev/null | head -n 1 | sed 's/^[^ ]* //')
        case "$seen" in *"|$id|"*) continue;; esac
        seen="$seen|$id|"
        printf '%s\n' "$c"
    done
}
CCS=$(compilers c gcc clang "$CC" cc)
CXXS=$(compilers c++ g++ clang++ "$CXX" c++)
[ -n "$CCS" ] || { echo "no C compiler found"; echo "0 passed, 1 failed"; exit 1; }
echo "C compilers:" $CCS
if [ -n "$CXXS" ]; then echo "C++ compilers:" $CXXS; else echo "no C++ compiler found: the C++ forms are skipped"; fi
case " $(echo $CCS) " in *" clang "*) ;; *) echo "clang not found: its forms are skipped";; esac

# job WANT NAME COMMAND: WANT pass or fail (a link that must not work). Jobs run in their own directories, some at a time.
job() {
    want=$1 name=$2 command=$3
    n=$((n + 1))
    mkdir "$work/$n"
    (
        cd "$work/$n" || exit 1
        sh -c "$command" > log 2>&1
        code=$?
        if { [ "$want" = pass ] && [ $code -eq 0 ]; } || { [ "$want" = fail ] && [ $code -ne 0 ]; }; then : > ok
        elif [ "$want" = fail ]; then echo "it works, and must not" >> log; fi
        echo "$name" > name
        rm -f a.out ./*.o
    ) &
    [ $((n % jobs)) -eq 0 ] && wait
}

for h in seqtx*.h; do
    # a function of this header that takes one pointer
    call=$(sed -n 's/^STX_DEF [a-z_ ]*[ *]\(stx_[a-z0-9_]*\)(\(const \)\{0,1\}stx_[a-z0-9_]* \*[a-z]*);.*/\1/p' "$h" | head -n 1)
    [ -n "$call" ] || call="no_function_with_one_pointer_found_in_$h"
    short=$(echo "$h" | sed 's/^seqtx_*//; s/\.h$//' | tr a-z A-Z)
    main="$root/tests/form_main.c" other="$root/tests/form_other.c"
    base="$W -I$root -DFORM_HEADER='\"$h\"' -DFORM_CALL=$call"
    # forms that only the core can get wrong are tried with the core: a family header has all of it inside
    whole=:; [ "$h" = seqtx.h ] || whole=false

    for cc in $CCS; do
        omp=
        printf 'int main(void) { return 0; }\n' | $cc -fopenmp -x c - -o "$work/probe" 2>/dev/null && omp=-fopenmp
        [ -n "$omp" ] || echo "$cc has no OpenMP: those forms are skipped"
        for std in c99 c11; do
            [ "$std" = c99 ] || $whole || continue
            job pass "$h $cc $std: implementation" "$cc -std=$std $base -DFORM_IMPLEMENT $main -lm && ./a.out"
            job pass "$h $cc $std: declarations only" "$cc -std=$std $base -c $main"
        done
        c="$cc -std=c99 $base"
        job pass "$h $cc: optimised" "$c -O2 -DFORM_IMPLEMENT $main -lm && ./a.out"
        job pass "$h $cc: double" "$c -DSEQTX_DOUBLE -DFORM_IMPLEMENT $main -lm && ./a.out"
        [ -n "$omp" ] && job pass "$h $cc: OpenMP" "$c $omp -DFORM_IMPLEMENT $main -lm && ./a.out"
        [ -n "$omp" ] && $whole && job pass "$h $cc: OpenMP, double, optimised" "$c -O2 $omp -DSEQTX_DOUBLE -DFORM_IMPLEMENT $main -lm && ./a.out"
        job pass "$h $cc: macro on the command line" "$c -DSEQTX_IMPLEMENTATION $main -lm && ./a.out"
        job pass "$h $cc: static in two units" "$c -DSEQTX_STATIC -DSEQTX_IMPLEMENTATION -DFORM_OTHER $main $other -lm && ./a.out"
        job pass "$h $cc: implementation in one unit, use in another" "$c -DFORM_OTHER -c $main -o main.o && $c -DFORM_ONLY_IMPLEMENT -c $other -o other.o && $cc main.o other.o -lm && ./a.out"
        $whole && job pass "$h $cc: the same, double" "$c -DSEQTX_DOUBLE -DFORM_OTHER -c $main -o main.o && $c -DSEQTX_DOUBLE -DFORM_ONLY_IMPLEMENT -c $other -o other.o && $cc main.o other.o -lm && ./a.out"
        # compile first, so that what fails is the link
        job pass "$h $cc: the units of the next two compile" "$c -c $main -o main.o && $c -DSEQTX_DOUBLE -DFORM_ONLY_IMPLEMENT -c $other -o other.o && $c -DFORM_IMPLEMENT -c $main -o impl.o && $cc impl.o -lm && ./a.out"
        job fail "$h $cc: no implementation links" "$c -c $main -o main.o || exit 0; $cc main.o -lm"
        job fail "$h $cc: float use and double implementation link" "$c -c $main -o main.o || exit 0; $c -DSEQTX_DOUBLE -DFORM_ONLY_IMPLEMENT -c $other -o other.o || exit 0; $cc main.o other.o -lm"
        job fail "$h $cc: double use and float implementation link" "$c -DSEQTX_DOUBLE -c $main -o main.o || exit 0; $c -DFORM_ONLY_IMPLEMENT -c $other -o other.o || exit 0; $cc main.o other.o -lm"
        if [ "$h" != seqtx.h ]; then
            core="-DFORM_HEADER='\"seqtx.h\"' -DFORM_CALL=stx_create"
            job pass "$h $cc: core and family implemented in different units" "$c -DSEQTX_${short}_IMPLEMENTATION -DFORM_OTHER -c $main -o main.o && $cc -std=c99 $W -I$root $core -DFORM_ONLY_IMPLEMENT -c $other -o other.o && $cc main.o other.o -lm && ./a.out"
            job fail "$h $cc: the family's macro alone implements the core" "$c -DSEQTX_${short}_IMPLEMENTATION -c $main -o main.o || exit 0; $cc main.o -lm"
        fi
        for real in "" -DSEQTX_DOUBLE; do
            job pass "$h $cc: exported symbols $real" "$c $real -DFORM_ONLY_IMPLEMENT -Dform_other=stx_form_other -c $other -o o.o && nm -g o.o > all && grep -q ' T stx_' all &&
                if grep ' [A-TV-Z] ' all | grep -v ' [A-Z] _*stx_'; then echo 'exported without stx_'; exit 1; fi
                if grep -E ' U _*(_?exit|_Exit|quick_exit|abort|v?f?printf|f?puts|f?putc|putchar|perror|assert_fail)(_chk|_unlocked)?\$' all; then echo 'exits, aborts or prints'; exit 1; fi"
        done
        sed -n '/\/\/>quickstart/,/\/\/<quickstart/p' "$h" | sed '1d;$d; s/^ \{1,7\}//' > "$work/quick.$h.c"
        # as the manual gives it: strict C99, and with what it says to link
        job pass "$h $cc: quick start" "grep -q main $work/quick.$h.c && $cc -std=c99 -Wall -Wextra -Werror -O1 -I$root $work/quick.$h.c -lm && ./a.out"
        if grep -q '//>handover' "$h"; then
            sed -n '/\/\/>handover/,/\/\/<handover/p' "$h" | sed '1d;$d; s/^ \{1,7\}//' > "$work/handover.$h.c"
            job pass "$h $cc: handing over a memory" "grep -q main $work/handover.$h.c && $cc -std=c99 -Wall -Wextra -Werror -O1 -I$root $work/handover.$h.c -lm && ./a.out"
        fi
    done
    for cxx in $CXXS; do
        stds="c++11 c++17"
        printf 'int main() { return 0; }\n' | $cxx -std=c++20 -x c++ - -o "$work/probe20" 2>/dev/null && stds="$stds c++20"
        $whole || stds="c++11 ${stds##* }"
        for std in $stds; do
            job pass "$h $cxx $std: implementation" "$cxx -std=$std $base -x c++ -DFORM_IMPLEMENT $main -lm && ./a.out"
            job pass "$h $cxx $std: declarations only" "$cxx -std=$std $base -x c++ -c $main"
        done
        p="$cxx -std=c++11 $base -x c++"
        $whole && job pass "$h $cxx: optimised, double" "$p -O2 -DSEQTX_DOUBLE -DFORM_IMPLEMENT $main -lm && ./a.out"
        printf 'int main(void) { return 0; }\n' | $cxx -fopenmp -x c++ - -o "$work/probe" 2>/dev/null &&
            job pass "$h $cxx: OpenMP" "$p -fopenmp -DFORM_IMPLEMENT $main -lm && ./a.out"
        $whole && job pass "$h $cxx: static in two units" "$p -DSEQTX_STATIC -DSEQTX_IMPLEMENTATION -DFORM_OTHER $main $other -lm && ./a.out"
        cc1=$(echo $CCS | cut -d' ' -f1)
        c="$cc1 -std=c99 $base"
        job pass "$h $cxx: used from C, implemented in C++" "$c -DFORM_OTHER -c $main -o main.o && $p -DFORM_ONLY_IMPLEMENT -c $other -o other.o && $cxx main.o other.o -lm && ./a.out"
        job pass "$h $cxx: used from C++, implemented in C" "$p -DFORM_OTHER -c $main -o main.o && $c -DFORM_ONLY_IMPLEMENT -c $other -o other.o && $cxx main.o other.o -lm && ./a.out"
    done
done
wait

# every op has a row in test_grad.c
for op in $(sed -n '/^\/\/ >>ops --/,/^\/\/ >>optimisers --/p' seqtx.h | sed -n 's/^STX_DEF stx_tensor \*\(stx_[a-z0-9_]*\)(.*/\1/p'); do
    job pass "test_grad.c has no row for $op" "grep -q '{\"$op\", row_' $root/tests/test_grad.c"
done
job pass "no ops found in seqtx.h" "[ \$(grep -c '{\"stx_[a-z_]*\", row_' $root/tests/test_grad.c) -ge 27 ] && sed -n '/^\/\/ >>ops --/,/^\/\/ >>optimisers --/p' $root/seqtx.h | grep -q 'stx_tensor \*stx_attention('"
wait

passed=0 failed=0 i=0
while [ $i -lt $n ]; do
    i=$((i + 1))
    if [ -f "$work/$i/ok" ]; then passed=$((passed + 1))
    else
        failed=$((failed + 1))
        echo "FAILED $(cat "$work/$i/name")"
        head -n 12 "$work/$i/log"
    fi
done
echo "$passed passed, $failed failed"
[ $failed -eq 0 ] && [ $passed -gt 0 ]
