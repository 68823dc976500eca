#!/bin/sh
# weights.sh [--record] [options] - compares generation with bf16 and int8 weights with
# the memory bandwidth of the machine. Takes two minutes and 4 GB. --record also writes
# bench/results/DATE-MACHINE-weights.md. Environment: CC (cc), CFLAGS (-O3). Options:
#   --threads N, --rounds N (9), --tokens N (16), --dim N (1024)
#   --mb N    size of the matrices, and of the plain read: more than the caches hold (400)
set -eu
cd "$(dirname "$0")/../.."
record= command="sh bench/models/weights.sh${1:+ $*}"
[ "${1:-}" != --record ] || { record=1; shift; }
. bench/machine.sh
CC=${CC:-cc} flags="-std=c99 ${CFLAGS:--O3}" work=build/bench
mkdir -p "$work"
$CC $flags -pthread bench/models/weights.c -o "$work/weights" -lm
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
