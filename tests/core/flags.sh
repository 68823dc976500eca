#!/bin/sh
# flags.sh - compiles test_flags.c with options that relax floating-point arithmetic:
# -ffast-math, x87. If the implementation cannot be correct with an option, it must not
# compile, and the error must name the option. FULL=1 adds single parts of -ffast-math,
# -Ofast, other levels and 32 bits (five minutes). Skips compilers and 32 bits that are
# not installed.
cd "$(dirname "$0")/../.." || exit 1
work=$(mktemp -d "${TMPDIR:-/tmp}/seqtx-flags.XXXXXX") || exit 1
trap 'rm -rf "$work"' EXIT
trap 'exit 1' INT TERM
passed=0 failed=0

try() {     # try COMPILER FLAGS..; what the program does not use is not compiled (SEQTX_STATIC)
    printf '#include <errno.h>\nint main(void) { return errno; }\n' > "$work/probe.c"
    if ! { "$@" "$work/probe.c" -o "$work/probe" && "$work/probe"; } > /dev/null 2>&1; then
        # Debian's 32-bit libraries next to a cross compiler: the kernel headers are in
        # the 64-bit directory.
        case " $* " in *" -m32 "*) set -- "$@" -idirafter /usr/include/x86_64-linux-gnu ;; esac
        if ! { "$@" "$work/probe.c" -o "$work/probe" && "$work/probe"; } > /dev/null 2>&1; then
            echo "skipped: $*"
            return
        fi
    fi
    if ! "$@" -Wall -Wextra -Wno-unknown-warning-option -Wno-unused-function \
        -DSEQTX_STATIC tests/core/test_flags.c -o "$work/a" -lm > "$work/log" 2>&1; then
        echo "does not compile: $*"; head -n 12 "$work/log"; failed=$((failed + 1)); return
    fi
    "$work/a" > "$work/log" 2>&1
    code=$?
    p=$(sed -n '$s/^\([0-9][0-9]*\) passed, [0-9][0-9]* failed$/\1/p' "$work/log")
    f=$(sed -n '$s/^[0-9][0-9]* passed, \([0-9][0-9]*\) failed$/\1/p' "$work/log")
    [ -n "$f" ] && { [ "$code" -eq 0 ] || [ "$f" -gt 0 ]; } || f=$((${f:-0} + 1))
    passed=$((passed + ${p:-0})) failed=$((failed + f))
    echo "$*: ${p:-0} passed, $f failed"
    [ "$f" -eq 0 ] || grep -v ' passed, ' "$work/log" | head -n 6
}
# Headers of other processors are rarely installed, and the preprocessor does not need
# their contents: empty files replace all headers that seqtx.h includes.
for header in $(sed -n 's/^ *# *include <\(.*\)>.*/\1/p' seqtx.h); do
    mkdir -p "$work/empty/$(dirname "$header")"
    : > "$work/empty/$header"
done
# refuse TEXT COMPILER FLAGS..: the implementation must not compile, with an error that
# contains TEXT
refuse() {
    text=$1; shift
    if ! command -v "$1" > /dev/null 2>&1; then echo "skipped: $*"; return; fi
    if ! "$@" -E -x c /dev/null > /dev/null 2>&1; then echo "skipped: $*"; return; fi
    if ! "$@" -ffreestanding -E -x c -DSEQTX_IMPLEMENTATION seqtx.h 2>&1 > /dev/null |
        grep -q "error:.*$text"; then
        echo "not refused: $*"; failed=$((failed + 1)); return
    fi
    # and without the option there is no error
    if "$@" -fno-fast-math -fno-finite-math-only -U_M_FP_FAST -ffreestanding -E -x c \
        -DSEQTX_IMPLEMENTATION seqtx.h 2>&1 > /dev/null | grep -q "error:.*$text"; then
        echo "refused without reason: $*"; failed=$((failed + 1)); return
    fi
    passed=$((passed + 1))
}

try clang -std=gnu99 -O2 -ffast-math
try gcc ${FULL:+-O1} -DSEQTX_UNFUSED
try gcc -std=gnu99 -O1 -m32 -mfpmath=387
if [ -n "$FULL" ]; then
    try gcc -std=gnu99 -O1 -ffast-math -fno-finite-math-only
    try clang -std=gnu99 -O1 -m32 -mno-sse
    for cc in "gcc -fno-finite-math-only" clang; do
        for flags in -O0 "-O2" "-O3 -ffast-math -march=native" \
            -Ofast "-O2 -ffinite-math-only" "-O2 -funsafe-math-optimizations" "-O0 -ffast-math" \
                     "-O2 -m32" "-O2 -m32 -ffast-math" "-O2 -m32 -msse2 -mfpmath=sse" \
                     "-O3 -std=c99 -ffp-contract=fast"; do
            # shellcheck disable=SC2086
            try ${cc%% *} $flags $(case $cc in *\ *) echo "${cc#* }";; esac)
        done
    done
    try gcc -O2 -m32 -mfpmath=387 -Ofast -fno-finite-math-only
    try gcc -O2 -m32 -msse2 -mfpmath=both
    try clang -O2 -m32 -mno-sse -ffast-math
fi
for option in -ffast-math -Ofast -ffinite-math-only; do
    refuse "-ffinite-math-only" clang --target=aarch64-linux-gnu -nostdinc -I"$work/empty" $option
    refuse "-ffinite-math-only" gcc $option
done
refuse "/fp:fast" gcc -D_M_FP_FAST
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
