#!/bin/sh
# weights.sh [--record] [options] - what bf16 and int8 weights are worth in generation, beside the speed of memory. Two minutes and 4 GB.
# --record writes bench/results/DATE-MACHINE-weights.md as well. Options: --threads N, --rounds N (9), --tokens N (16), --mb N (400, of
# the matrices, and of what plain reading reads: more than the caches hold), --dim N (1024). Environment: CC (cc), CFLAGS (-O3).
set -eu
cd "$(dirname "$0")/.."
record= command="sh bench/weights.sh${1:+ $*}"
[ "${1:-}" != --record ] || { record=1; shift; }
. bench/machine.sh
CC=${CC:-cc} flags="-std=c99 ${CFLAGS:--O3}" work=build/bench
mkdir -p "$work"
$CC $flags -pthread bench/weights.c -o "$work/weights" -lm
rm -f "$work/weights.md"
{
    echo "# bf16 and int8 weights in generation, $(date +%Y-%m-%d)"
    echo
    echo "- machine: $cpu, $cores cores, $vector"
    echo "- compiler: $($CC --version | head -n 1); $flags"
    echo "- command: \`$command\`"
    echo "- commit: $commit"
    echo
} | tee "$work/weights.md"
"$work/weights" "$@" --append "$work/weights.md"
[ -n "$record" ] || exit 0
to=$(free_result "" -weights).md
cp "$work/weights.md" "$to"
echo "written: $to"
