#!/bin/sh
# arm.sh - golden vectors (operators and Sequential Transformer) and matmul kernels on
# 64-bit ARM: NEON, and BFDOT for bf16. On another processor with a cross compiler and
# the user mode of qemu (Debian: gcc-aarch64-linux-gnu libc6-dev-arm64-cross
# qemu-user-static); skipped if they are not installed.
# FULL=1 adds the golden vectors of the other families, attention with all its options,
# and other floating-point environments.
#   arm.sh --probe   exits with 0 if the tests can run
cd "$(dirname "$0")/../.." || exit 1
for n in '' -15 -14 -13 -12 -11 -10; do
    cc=aarch64-linux-gnu-gcc$n
    command -v $cc > /dev/null 2>&1 && break
done
for qemu in qemu-aarch64-static qemu-aarch64 ''; do
    command -v "$qemu" > /dev/null 2>&1 && break
done
ready() { [ -n "$qemu" ] && printf 'int main(void) { return 7; }\n' |
    $cc -x c - -static -o "$1" 2> /dev/null && { $qemu "$1"; [ $? -eq 7 ]; }; }
work=$(mktemp -d "${TMPDIR:-/tmp}/seqtx-arm.XXXXXX") || exit 1
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM
ready "$work/probe"; can=$?
[ "$1" != --probe ] || exit $can
passed=0 failed=0
check() { if [ "$1" -eq 0 ]; then passed=$((passed + 1)); else failed=$((failed + 1)); echo \
    "FAILED: $2"; fi; }
W="-Wall -Wextra -Wpedantic -Wshadow -Werror"
mkdir -p "${BUILD:-build}" # the tests write there

# Without FULL, no test below runs the other families.
others=${FULL:+-O1} others=${others:--fsyntax-only}
for h in seqtx*.h; do
    name=$(basename "$h" .h)
    from=tests/inner/$name.c; [ -f "$from" ] || from=$h
    macro=SEQTX_$(echo "$name" | sed 's/^seqtx_*//; s/$/_/; s/^_//' | tr a-z A-Z)IMPLEMENTATION
    # The core with -O2: at -O1, gcc does not hoist the loads that the checks of the
    # kernel loops look for.
    case $name in
    seqtx) level=-O2 ;;
    seqtx_attn_span) level=-O1 ;;
    *) level=$others ;;
    esac
    $cc -std=c99 $level $W -pthread -I. -D"$macro" -x c -c "$from" -o "$work/$name.o"
    check $? "$h does not compile"
done
# run NAME CPU [ARGUMENTS]: runs a test program and adds up its counts
run() {
    name=$1 cpu=$2; shift 2
    $qemu -cpu "$cpu" "$work/$name" "$@" > "$work/$name.out" 2>&1
    code=$?
    set -- $(sed -n '$s/^\([0-9]*\) passed, \([0-9]*\) failed$/\1 \2/p' "$work/$name.out")
    passed=$((passed + ${1:-0})) failed=$((failed + ${2:-1}))
    [ $code -eq 0 ] && [ "${2:-1}" -eq 0 ] ||
        { echo "FAILED: $name on $cpu"; grep -v ' passed, ' "$work/$name.out" | tail -n 12; }
    [ $code -eq 0 ] || [ "${2:-0}" -gt 0 ] || failed=$((failed + 1))
}
if clang --target=aarch64-linux-gnu -std=c99 -fsyntax-only -x c /dev/null 2> /dev/null; then
    clang --target=aarch64-linux-gnu -O0 -std=c99 $W -S -o /dev/null -DSEQTX_IMPLEMENTATION \
        -x c seqtx.h
    # generates code, because the assembler of the kernels is checked only then
    check $? "clang does not compile it"
fi
for test in tests/*/test_golden_*.c; do
    name=$(basename "$test" .c)
    case $name in *_ops | *_span) ;; *) [ -n "$FULL" ] || continue ;; esac
    $cc -std=c99 -O1 $W -pthread -static "$test" "$work"/seqtx*.o -o "$work/$name" -lm
    check $? "$test does not compile"
    run "$name" max tests/golden
done
if [ -n "$FULL" ]; then
    # training and generation give the bits of other processors
    $cc -std=c99 -O1 $W -pthread -static tests/models/test_bits.c "$work"/seqtx*.o \
        -o "$work/test_bits" -lm
    check $? "tests/models/test_bits.c does not compile"
    run test_bits max
    $cc -std=c99 -O1 $W -pthread -static tests/core/test_fenv.c "$work"/seqtx*.o \
        -o "$work/test_fenv" -lm
    check $? "tests/core/test_fenv.c does not compile"
    run test_fenv max short
fi
$cc -std=c99 -O1 $W -pthread -static -DTEST_FEW tests/ops/test_bf16.c "$work"/seqtx*.o \
    -o "$work/test_bf16" -lm
check $? "tests/ops/test_bf16.c does not compile"
# shellcheck disable=SC2046
run test_bf16 max creation rounding products $([ -z "$FULL" ] || echo attention) \
    attention_margins red_zones
check "$(head -n 1 "$work/test_bf16.out" | grep -q '; neon;.*; neon bf16$'; echo $?)" \
    "the kernels of a processor with BFDOT: $(head -n 1 "$work/test_bf16.out")"
# A processor without BFDOT selects another kernel and never executes the instruction.
run test_bf16 cortex-a57 creation attention_margins
check "$(head -n 1 "$work/test_bf16.out" | grep -q '; neon; portable, bf16 by float$'; echo $?)" \
    "the kernels of a processor without BFDOT: $(head -n 1 "$work/test_bf16.out")"
# The sums of a tile stay in registers: the kernel loops contain no stores.
for kernel in neon bfdot; do
    aarch64-linux-gnu-objdump -d --no-show-raw-insn "$work/seqtx.o" |
        awk -v k="<stx__micro_${kernel}_(6|run)" '
        $0 ~ k { on = 1 }
        /^$/ { on = 0 }
        on { line[++n] = $0 }
        END {
            for (i = 1; i <= n; i++)
                if (line[i] ~ /\t(fmla|bfdot)\t/) {
                    run++
                    if (!first) first = i
                    last = i
                } else if (line[i] ~ /\t(b\.[a-z]*|cbnz)\t/ && run >= 24) {
                    for (j = first; j <= last; j++)
                        if (line[j] ~ /\tst[rp]\t/ || line[j] ~ /\[sp/) bad++
                    whole++
                    run = first = 0
                } else if (line[i] ~ /\t(b|b\.[a-z]*|cbn?z|ret)(\t|$)/) {
                    run = first = 0
                }
            exit !(whole >= 1 && !bad)
        }'
    check $? "the $kernel kernel's loop keeps sums in memory, or was not found"
done
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
