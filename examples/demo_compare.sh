#!/bin/sh
# demo_compare.sh LOG DATA - prints the last evaluation in a trainer's LOG and simple
# baselines for the same text, in bits per byte: the entropy of single bytes, and xz -9 if
# it is installed.
set -eu
log=$1 data=$2
out=${TMPDIR:-/tmp}/demo_compare.$$
trap 'rm -f "$out"' EXIT
# the trainer's validation part: 5 % before the last 5 %
if [ -d "$data" ]; then cat "$data/valid.txt" > "$out"; else
    size=$(wc -c < "$data")
    tail -c +$((size - size / 20 * 2 + 1)) "$data" | head -c $((size / 20 * 2 - size / 20)) > "$out"
fi
bytes=$(($(wc -c < "$out")))
bpb=$(sed -n 's/.*"event":"eval","split":"valid".*"bpb":\([0-9.e+-]*\).*/\1/p' "$log" | tail -n 1)
entropy=$(od -An -v -tu1 "$out" | awk '
    { for (i = 1; i <= NF; i++) { count[$i]++; n++ } }
    END { for (b in count) h -= count[b] / n * log(count[b] / n); printf "%.2f", h / log(2) }')
xz=
if command -v xz >/dev/null 2>&1; then
    xz=$(xz -9 -c "$out" | wc -c | awk -v n="$bytes" '{ printf ", xz -9 %.2f", 8 * $1 / n }')
fi
awk -v n="$bytes" -v m="${bpb:-0}" -v h="$entropy" -v x="$xz" 'BEGIN {
    printf "the %d held-out bytes, in bits per byte: this model %.2f, byte entropy %s%s\n", n, m, h,
        x }'
