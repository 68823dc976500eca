#!/bin/sh
# form.sh [HEADER...] [together] [tests] [style] - checks the form of the public headers.
# Without arguments: all of ./seqtx*.h, together, tests and style.
#
#   HEADER     the header alone, as C99 and C++11 (FULL=1: also C11, C++17, C++20);
#              implementation as C and C++; declarations only; static; implementation
#              and use in different units and languages; included twice; the macro on the
#              command line; with or without threads; float and double. Wrong combinations
#              must not link. The quick start of the manual compiles and runs. Objects
#              export only stx_ names and never exit, abort or print.
#   together   all headers in one unit of C++
#   tests      every op of seqtx.h has a row in test_grad.c, every family a golden test
#   style      all files keep the limits of tools/style.sh and avoid tools/words.txt
#
# Environment: CC, CXX (further compilers; gcc, clang, g++ and clang++ are used if
# installed), FULL=1 (optimised C++, more standards), KEEP=1 (keeps the work directory). Ends with
# "N passed, N failed".
#
# Every compiler checks all forms with -fsyntax-only, except those that the first compiler
# makes objects of. It checks "static" for all families together; the others check each
# alone, too. The last C compiler builds the quick start. Linking is tested with the first
# compiler of each language, and across languages. The objects of the core are made once and
# shared by the families. Warnings of optimised builds are covered by the Makefile (gcc),
# flags.sh (clang, -O2), readme.sh (one unit, -O1) and, for the core with g++ -O1 (FULL=1),
# by this script.
cd "$(dirname "$0")/../.." || exit 1
root=$(pwd)
work=$(mktemp -d "${TMPDIR:-/tmp}/seqtx-form.XXXXXX") || exit 1
[ -n "$KEEP" ] || trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM
W="-Wall -Wextra -Wpedantic -Wshadow -Werror"
passed=0 failed=0

compilers() {  # LANGUAGE COMPILER..: those that work, each real program once
    lang=$1; shift
    seen=
    for c in "$@"; do
        [ -n "$c" ] || continue
        printf 'int main(void) { return 0; }\n' | $c -x "$lang" - -o "$work/probe" 2>/dev/null ||
            continue
        id=$($c --version 2>/dev/null | head -n 1 | sed 's/^[^ ]* //')
        case "$seen" in *"|$id|"*) continue;; esac
        seen="$seen|$id|"
        printf '%s\n' "$c"
    done
}
CCS=$(compilers c gcc clang "$CC" cc)
for last in $CCS; do :; done
CXXS=$(compilers c++ g++ clang++ "$CXX" c++)
for lastxx in $CXXS; do :; done
[ -n "$CCS" ] || { echo "no C compiler found"; echo "0 passed, 1 failed"; exit 1; }
echo "C compilers:" $CCS
if [ -n "$CXXS" ]; then
    echo "C++ compilers:" $CXXS
else
    echo "no C++ compiler found: the C++ forms are skipped"
fi
case " $(echo $CCS) " in *" clang "*) ;; *) echo "clang not found: its forms are skipped";; esac

# job pass|fail NAME COMMAND: the command must succeed or fail (a link). Jobs of one
# compiler share a directory.
job() {
    ( cd "$dir" && sh -c "$3" ) > "$work/log" 2>&1
    code=$?
    if { [ "$1" = pass ] && [ $code -eq 0 ]; } || { [ "$1" = fail ] && [ $code -ne 0 ]; }; then
        passed=$((passed + 1))
        return
    fi
    failed=$((failed + 1))
    echo "FAILED $2"
    [ "$1" = pass ] || echo "expected a failure, but the command succeeded"
    head -n 12 "$work/log"
}
# links pass|fail NAME OBJECTS...: a missing object is always a failure
links() {
    want=$1 name=$2; shift 2
    for f in "$@"; do
        [ -f "$dir/$f" ] || { failed=$((failed + 1)); echo "FAILED $name: no $f"; return; }
    done
    if [ "$want" = pass ]; then
        job pass "$name" "$link $* -o prog -lm && ./prog"
    else
        job fail "$name" "$link $* -o prog -lm"
    fi
}

# core NAME COMMAND: the object of the core, for the families. Made once per compiler,
# unless the forms of seqtx.h have left one.
core() {
    [ -f "$work/core.$1.o" ] ||
        $2 -I"$root" -DSEQTX_IMPLEMENTATION -c "$root/seqtx.h" -o "$work/core.$1.o" > \
        "$work/log" 2>&1 || head -n 12 "$work/log"
    cp "$work/core.$1.o" "$dir/core.$1.o"
}
exits='_?exit|_Exit|quick_exit|abort|v?f?printf|f?puts|f?putc|putchar|perror|assert_fail'
exported='nm -g OBJECT > all && grep -q " T stx_" all &&
    if grep " [A-TV-Z] " all | grep -v " [A-Z] _*stx_"; then
        echo "exported without stx_"
        exit 1
    fi
    if grep -E " U _*('$exits')(_chk|_unlocked)?$" all; then
        echo "exits, aborts or prints"
        exit 1
    fi'

forms() {  # HEADER
    h=$1
    # a function of this header with one pointer as its only parameter
    argument='\(const \)\{0,1\}stx_[a-z0-9_]* \*[a-z]*'
    call=$(sed -n "s/^STX_DEF [a-z_ ]*[ *]\(stx_[a-z0-9_]*\)($argument);.*/\1/p" "$h" |
        head -n 1)
    [ -n "$call" ] || call="no_function_with_one_pointer_found_in_$h"
    family=$(basename "$h" .h | sed 's/^seqtx_*//' | tr a-z A-Z)
    main="$root/tests/build/form_main.c" other="$root/tests/build/form_other.c"
    base="$W -I$root -DFORM_HEADER='\"$h\"' -DFORM_CALL=$call -Dform_other=stx_form_other"
    whole=:; [ "$h" = seqtx.h ] || whole=false
    first=:

    for cc in $CCS; do
        dir=$work/$(echo "$h.$cc" | tr -c 'a-zA-Z0-9_.\n' _); mkdir "$dir"
        link=$cc
        for std in c99 ${FULL:+c11}; do
            s="$cc -std=$std $base -fsyntax-only"
            job pass "$h $cc $std: declarations only" "$s $main && $s -DSEQTX_DOUBLE $main"
            # in C99, the first compiler builds it below
            $whole && { ! $first || [ "$std" != c99 ]; } &&
                job pass "$h $cc $std: implementation" "$s -DFORM_IMPLEMENT $main"
            $whole && job pass "$h $cc $std: double" "$s -DFORM_IMPLEMENT -DSEQTX_DOUBLE $main"
            # The implementation of the family without the core; both in one unit are
            # checked by "static". The first compiler builds it below.
            if ! $whole && ! $first && [ "$std" = c99 ]; then
                job pass "$h $cc $std: implementation" "$s -DSEQTX_${family}_IMPLEMENTATION $main"
                job pass "$h $cc $std: double" \
                    "$s -DSEQTX_${family}_IMPLEMENTATION -DSEQTX_DOUBLE $main"
            fi
        done
        $whole && job pass "$h $cc: system headers that show all" \
            "$cc -std=gnu11 -D_GNU_SOURCE $base -fsyntax-only -DFORM_IMPLEMENT $main"
        own=-DFORM_IMPLEMENT; $whole || own=-DSEQTX_${family}_IMPLEMENTATION
        s="$cc -std=c99 $base -fsyntax-only"
        $whole && ! $first && job pass "$h $cc: without threads, double" \
            "$s -DSEQTX_NO_THREADS -DSEQTX_DOUBLE -DFORM_IMPLEMENT $main"
        # Macros concern the preprocessor, so one compiler checks the implementation. After
        # those of hostile.h it is the last: clang takes half the time of gcc.
        for rude in tgmath.h "$root/tests/build/hostile.h"; do
            after="$h $cc: after the macros of ${rude##*/}"
            job pass "$after, declarations" "$s -include $rude $main"
            case $rude in tgmath.h) $first ;; *) [ "$cc" = "$last" ] ;; esac &&
                job pass "$after, implementation" "$s -include $rude $own $main"
        done
        if $whole || ! $first || [ "$cc" = "$last" ]; then
            job pass "$h $cc: static" \
                "$s -Wmissing-prototypes -DSEQTX_STATIC -DSEQTX_IMPLEMENTATION $main"
        fi
        $first || continue
        first=false
        # The preprocessor decides what links, so one compiler without optimisation is
        # enough.
        c="$cc -std=c99 $base"
        job pass "$h $cc: macro on the command line" \
            "$c -E -P -DFORM_IMPLEMENT $main > defined.i &&
            $c -E -P -DSEQTX_IMPLEMENTATION $main > given.i &&
            [ -s given.i ] && cmp defined.i given.i"
        if $whole; then
            job pass "$h $cc: the units compile" \
                "$c -DFORM_OTHER -c $main -o use.o && $c -c $main -o alone.o &&
                $c -DFORM_ONLY_IMPLEMENT -c $other -o impl.o"
            job pass "$h $cc: and in double" \
                "$c -DSEQTX_DOUBLE -DFORM_OTHER -c $main -o use_f64.o &&
                $c -DSEQTX_NO_THREADS -DSEQTX_DOUBLE -DFORM_ONLY_IMPLEMENT -c $other -o impl_f64.o"
            links pass "$h $cc: implementation in one unit, use in another" use.o impl.o
            links pass "$h $cc: the same, double, without threads" use_f64.o impl_f64.o
            links fail "$h $cc: no implementation" alone.o
            links fail "$h $cc: float use and double implementation" use.o impl_f64.o
            links fail "$h $cc: double use and float implementation" use_f64.o impl.o
            for object in impl.o impl_f64.o; do
                job pass "$h $cc: exported symbols of $object" \
                    "$(echo "$exported" | sed "s/OBJECT/$object/")"
            done
            # A unit that neither exports nor imports functions links with every other
            # unit.
            job pass "$h $cc: static, a unit that exports nothing" \
                "$c -DSEQTX_STATIC -DSEQTX_DOUBLE -DSEQTX_IMPLEMENTATION -c $main -o static.o &&
                nm -g static.o > all && grep -q ' T _*main' all && ! grep stx_ all"
            links pass "$h $cc: and links with another implementation" static.o impl.o
            cp "$dir/impl.o" "$work/core.c.o"       # for the families
            cp "$dir/impl_f64.o" "$work/core.c_f64.o"
        else
            core c "$cc -std=c99 -x c"
            core c_f64 "$cc -std=c99 -x c -DSEQTX_DOUBLE"
            own="$c -DSEQTX_${family}_IMPLEMENTATION -x c -c $root/$h"
            job pass "$h $cc: the units compile" "$c -c $main -o use.o && $own -o impl.o"
            job pass "$h $cc: and in double" \
                "$c -DSEQTX_DOUBLE -c $main -o use_f64.o && $own -DSEQTX_DOUBLE -o impl_f64.o"
            links pass "$h $cc: use, family and core in three units" use.o impl.o core.c.o
            links fail "$h $cc: the family's macro alone implements the core" use.o impl.o
            links fail "$h $cc: no implementation of the family" use.o core.c.o
            for object in impl.o impl_f64.o; do
                job pass "$h $cc: exported symbols of $object" \
                    "$(echo "$exported" | sed "s/OBJECT/$object/")"
            done
        fi
        c_dir=$dir
        rm -f "$dir/prog"
    done
    # The quick start as in the manual: strict C99, linked with what it names. The core is
    # linked in by the last compiler: unoptimised code of gcc takes ten times as long to
    # run.
    there=-DSEQTX_IMPLEMENTATION_DONE
    for cc in $CCS; do
        dir=$work/$(echo "$h.$cc" | tr -c 'a-zA-Z0-9_.\n' _)
        quick="$cc -std=c99 -Wall -Wextra -Werror -I$root -I$root/examples"
        for name in quickstart handover own_op; do
            [ $name = quickstart ] || grep -q "//>$name" "$h" || continue
            sed -n "/\/\/>$name/,/\/\/<$name/p" "$h" | sed '1d;$d; s/^ \{1,7\}//' > "$dir/$name.c"
            runs="-o prog -lm && ./prog"
            if [ "$cc" != "$last" ]; then
                job pass "$h $cc: $name compiles, and returns whether it failed" \
                    "grep -q main $name.c && ! grep 'return 0' $name.c &&
                        $quick $there -fsyntax-only $name.c"
            elif $whole && [ $name = quickstart ]; then
                job pass "$h $cc: $name, in one unit" \
                    "grep -q main $name.c && $quick $name.c $runs"
            else
                core last "$last -std=c99 -x c"
                job pass "$h $cc: $name" \
                    "grep -q main $name.c && $quick $there $name.c core.last.o $runs"
            fi
        done
        rm -f "$dir/prog"
    done
    first=:
    for cxx in $CXXS; do
        dir=$work/$(echo "$h.$cxx" | tr -c 'a-zA-Z0-9_.\n' _); mkdir "$dir"
        link=$cxx
        stds="c++11${FULL:+ c++17}"
        [ -n "$FULL" ] && printf 'int main() { return 0; }\n' |
            $cxx -std=c++20 -x c++ - -o "$work/probe20" 2>/dev/null && stds="$stds c++20"
        $whole || stds=c++11  # later standards: see "together"
        for std in $stds; do
            s="$cxx -std=$std $base -x c++ -fsyntax-only"
            # The implementation of the family without the core.
            macro=-DFORM_IMPLEMENT; $whole || macro=-DSEQTX_${family}_IMPLEMENTATION
            # in C++11, the first compiler builds it below
            { $first && [ "$std" = c++11 ]; } ||
                job pass "$h $cxx $std: implementation" "$s $macro $main"
            job pass "$h $cxx $std: declarations only" "$s $main"
        done
        rude=$root/tests/build/hostile.h
        [ "$cxx" != "$lastxx" ] ||
            job pass "$h $cxx: after the macros of hostile.h" "$s -include $rude $macro $main"
        $first || continue
        first=false
        p="$cxx -std=c++11 $base -x c++"
        cp "$c_dir/impl.o" "$dir/c_impl.o"; cp "$c_dir/use.o" "$dir/c_use.o"
        if $whole; then
            # Only float has kernels for specific processors, whose attributes matter for
            # code generation. -O1 has more warnings.
            optimised=${FULL:+-O1}
            job pass "$h $cxx: the units compile" \
                "$p -DFORM_OTHER -c $main -o use.o &&
                $p $optimised -DFORM_ONLY_IMPLEMENT -c $other -o impl.o"
            links pass "$h $cxx: used from C, implemented in C++" c_use.o impl.o
            links pass "$h $cxx: used from C++, implemented in C" use.o c_impl.o
            cp "$dir/impl.o" "$work/core.cxx.o"
        else
            core cxx "$cxx -std=c++11 -x c++"
            cp "$work/core.c.o" "$dir"
            job pass "$h $cxx: the units compile" \
                "$p -c $main -o use.o && $p -DSEQTX_${family}_IMPLEMENTATION -c $root/$h -o impl.o"
            links pass "$h $cxx: used from C, implemented in C++" c_use.o impl.o core.cxx.o
            links pass "$h $cxx: used from C++, implemented in C" use.o c_impl.o core.c.o
        fi
        rm -f "$dir/prog"
    done
}

together() {
    dir=$work
    {
        echo '#define SEQTX_IMPLEMENTATION'
        for h in seqtx*.h; do echo "#include \"$h\""; done
        echo 'int main() { return 0; }'
    } > "$work/together.cpp"
    cp "$work/together.cpp" "$work/together.c"
    sed -i.bak 's/main()/main(void)/' "$work/together.c"
    for cc in $CCS; do
        job pass "$cc: all headers in one unit, static" \
            "$cc -std=c99 $W -Wmissing-prototypes -I$root -DSEQTX_STATIC -fsyntax-only together.c"
    done
    for cxx in $CXXS; do
        for std in c++11 ${FULL:+c++17} c++20; do
            printf 'int main() { return 0; }\n' |
                $cxx -std=$std -x c++ - -o "$work/probe_std" 2>/dev/null || continue
            job pass "$cxx $std: all headers in one unit" \
                "$cxx -std=$std $W -I$root -fsyntax-only together.cpp"
        done
    done
}

# Every op and every header must have its tests.
tests() {
    dir=$work
    n=0
    for op in $(sed -n '/^\/\/ >>api: ops$/,/^\/\/ >>api: optimisers/p' seqtx.h |
        sed -n 's/^STX_DEF stx_tensor \*\(stx_[a-z0-9_]*\)(.*/\1/p'); do
        job pass "test_grad.c has no row for $op" \
            "grep -q '{\"$op\", row_' $root/tests/ops/test_grad.c"
        n=$((n + 1))
    done
    job pass "expected at least 27 ops in seqtx.h, got $n" \
        "[ $n -ge 27 ] &&
        sed -n '/^\/\/ >>api: ops$/,/^\/\/ >>api: optimisers/p' $root/seqtx.h |
            grep -q 'stx_tensor \*stx_attention('"
    # Every kernel has a launch bound, and every launch uses the one macro that checks it.
    cu=$root/seqtx_cuda.cu
    job pass "seqtx_cuda.cu: only STX__GLOBAL uses __global__ and __launch_bounds__" \
        "! grep -n '__global__\|__launch_bounds__' $cu |
            grep -v '#define STX__GLOBAL(\.\.\.) ' &&
        grep -q '^ *#define STX__GLOBAL(' $cu"
    job pass "seqtx_cuda.cu: <<<..>>> in STX__LAUNCH only, STX__LAUNCH in STX__RUN_KERNEL only" \
        "! grep -n '<<<[^>]*>>>\|STX__LAUNCH(' $cu |
            grep -v -e '#define STX__LAUNCH(' -e 'STX__LAUNCH(kernel, grid, block, smem, ' \
                -e '^[0-9]*: *kernel<<<grid, block, smem, stream>>>(__VA_ARGS__)'"
    for h in seqtx?*.h; do
        [ "$h" != seqtx_text.h ] || continue  #  not a family
        job pass "no test_golden_*.c includes $h" \
            "grep -q 'include \"../../$h\"' $root/tests/*/test_golden_*.c"
        job pass "only test_golden_*.c include $h" \
            "ls $root/tests/*/test_*.c | grep -v test_golden |
                xargs grep -q 'include \"../../$h\"'"
    done
}

# Layout and English of all files: no violation of a limit of tools/style.sh, and none of
# the terms in tools/words.txt.
SOURCES=$(ls seqtx*.h seqtx_cuda.cu examples/*.[ch] examples/*/*.[ch] tests/*.[ch] \
    tests/*/*.[ch] tests/*/*/*.[ch] tests/*/*.cu tests/*/*.cpp bench/*.[ch] bench/*/*.[ch])
TEXTS="README.md CHANGELOG.md CONTRIBUTING.md bench/README.md docs/cookbook.md docs/cuda.md \
    docs/convert.md docs/design.md docs/distributed.md docs/python.md docs/results.md \
    docs/speed.md docs/trainers.md docs/web.md tests/README.md tests/*_host/README.md \
    tests/golden/README*.md \
    $(echo tests/golden/*.py tools/*.py bench/peers/*.py python/*.py python/seqtx/*.py)"
style() {
    dir=$work
    for f in $SOURCES; do
        job pass "$f: layout" "sh $root/tools/style.sh --check $f"
    done
    for f in $SOURCES $TEXTS; do
        job pass "$f: private terms" "! grep -Ein -f $root/tools/words.txt $root/$f"
    done
}

[ $# -gt 0 ] || set -- seqtx*.h together tests style
for what in "$@"; do
    case $what in tests | together | style) $what ;; *) forms "$what" ;; esac
done
echo "$passed passed, $failed failed"
[ $failed -eq 0 ] && [ $passed -gt 0 ]
