#!/bin/sh
# optimise.sh - prints how much slower the program of README.md is without -O2: its
# processor seconds (user) with -O0 and -O2, alternating, the minimum of ROUNDS (3) runs
# each. README.md and seqtx.h quote the factor.
cd "$(dirname "$0")/../.." || exit 1
work=$(mktemp -d "${TMPDIR:-/tmp}/seqtx-optimise.XXXXXX") || exit 1
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM
sed -n '/^```c$/,/^```$/p' README.md | sed '1d; /^```/,$d' > "$work/prog.c"    # the first program
for o in 0 2; do
    ${CC:-cc} -O$o -I. "$work/prog.c" -o "$work/prog$o" -lm -pthread || exit 1
done
seconds() { # PROGRAM: its processor seconds
    (
        "$1" > /dev/null || exit 1
        times > "$work/times"
    )
    awk 'NR == 2 { split($1, t, "m"); printf "%.3f\n", 60 * t[1] + t[2] }' "$work/times"
}
i=0
while [ $i -lt "${ROUNDS:-3}" ]; do
    for o in 0 2; do seconds "$work/prog$o" >> "$work/took$o"; done
    i=$((i + 1))
done
least() { sort -n "$1" | head -n 1; }
. bench/machine.sh
echo "$cpu, $(${CC:-cc} --version | head -n 1), commit $commit"
awk -v slow="$(least "$work/took0")" -v fast="$(least "$work/took2")" '
    BEGIN {
        printf "README program: -O0 %.2f s, -O2 %.2f s, %.0f times\n", slow, fast, slow / fast
    }'
