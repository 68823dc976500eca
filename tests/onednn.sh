#!/bin/sh
# onednn.sh - SEQTX_ONEDNN: compiles the header as C99 and C++11 and test_onednn.c with each compiler that there is, and runs that of the
# first. --probe: does a program with dnnl.h compile, link and run?
#   CC, CXX; ONEDNN_FLAGS (-I..) and ONEDNN_LIBS (-L.. -Wl,-rpath,.. -ldnnl) where oneDNN is not in the usual places.
cd "$(dirname "$0")/.." || exit 1
work=$(mktemp -d "${TMPDIR:-/tmp}/seqtx-onednn.XXXXXX") || exit 1
trap 'rm -rf "$work"' EXIT
trap 'exit 1' INT TERM
W="-Wall -Wextra -Wpedantic -Wshadow -Werror"
libs=${ONEDNN_LIBS:--ldnnl}
omp=
printf 'int main(void) { return 0; }\n' | ${CC:-cc} -fopenmp -x c - -o "$work/probe" 2>/dev/null && omp=-fopenmp
probe() { printf '#include <dnnl.h>\nint main(void) { return !dnnl_version(); }\n' | $1 -x c $ONEDNN_FLAGS - -o "$work/probe" $libs 2>/dev/null && "$work/probe"; }
if [ "$1" = --probe ]; then probe "${CC:-cc}"; exit; fi

passed=0 failed=0
count() {       # count NAME COMMAND...: one check
    name=$1; shift
    if "$@" > "$work/log" 2>&1; then passed=$((passed + 1)); else failed=$((failed + 1)); echo "FAILED $name"; head -n 20 "$work/log"; fi
}
printf '#include "seqtx.h"\nint main(void) { return 0; }\n' > "$work/use.c"
# test_onednn.c at -O1, which takes half as long to compile as -O2; the rest without making code (of other compilers everything but the calls
# of oneDNN runs in flags.sh and form.sh)
ran=
for cc in "${CC:-cc}" gcc clang; do
    probe "$cc" || continue
    id=$($cc --version | head -n 1 | sed 's/^[^ ]* //')
    case "$seen" in *"|$id|"*) continue;; esac
    seen="$seen|$id|"
    count "$cc: without OpenMP, for double" $cc -std=c99 $W -I. $ONEDNN_FLAGS -DSEQTX_ONEDNN -DSEQTX_DOUBLE -DSEQTX_IMPLEMENTATION -fsyntax-only -x c "$work/use.c"
    if [ -n "$ran" ]; then count "$cc: test_onednn.c" $cc -std=c99 -fsyntax-only $W -I. $ONEDNN_FLAGS tests/test_onednn.c; continue; fi
    ran=1
    count "$cc: test_onednn.c" $cc -std=c99 -O1 $W $omp -I. $ONEDNN_FLAGS tests/test_onednn.c -o "$work/test" -lm $libs
    "$work/test" > "$work/out" 2>&1
    grep -v ' passed, ' "$work/out" | head -n 40
    p=$(sed -n 's/^\([0-9]*\) passed, .*/\1/p' "$work/out") f=$(sed -n 's/.* passed, \([0-9]*\) failed/\1/p' "$work/out")
    passed=$((passed + ${p:-0})) failed=$((failed + ${f:-1}))
done
for cxx in "${CXX:-c++}" g++ clang++; do
    printf 'int main() { return 0; }\n' | $cxx -x c++ - -o "$work/probe" 2>/dev/null || continue
    id=c++$($cxx --version | head -n 1 | sed 's/^[^ ]* //')
    case "$seen" in *"|$id|"*) continue;; esac
    seen="$seen|$id|"
    count "$cxx: C++11" $cxx -std=c++11 $W -I. $ONEDNN_FLAGS -DSEQTX_ONEDNN -DSEQTX_IMPLEMENTATION -fsyntax-only -x c++ "$work/use.c"
done
echo "$passed passed, $failed failed"
[ $failed -eq 0 ] && [ $passed -gt 0 ]
