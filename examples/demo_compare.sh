#!/bin/sh
# demo_compare.sh LOG DATA - prints the last evaluation in a trainer's LOG, and what other
# methods need for the same held-out text, in bits per byte: the entropy of single bytes,
# and xz and PPMd (7z), if they are installed. The compressors know the training text, too:
# the figure is what the held-out text adds to the size of the compressed training text.
set -eu
LC_ALL=C        # decimal points
export LC_ALL
log=$1 data=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
train=$work/train both=$work/both held=$work/held
if [ -d "$data" ]; then
    cat "$data/train.txt" >"$train"
    cat "$data/valid.txt" >"$held"
else    # the trainer's parts: the last 5 % are the test text, 5 % before them validation
    size=$(($(wc -c <"$data"))) part=$(($(wc -c <"$data") / 20))
    head -c $((size - 2 * part)) "$data" >"$train"
    tail -c +$((size - 2 * part + 1)) "$data" | head -c $part >"$held"
fi
cat "$train" "$held" >"$both"
bytes=$(($(wc -c <"$held")))
bpb=$(sed -n 's/.*"event":"eval","split":"valid".*"bpb":\([0-9.e+-]*\).*/\1/p' "$log" | tail -n 1)
entropy=$(od -An -v -tu1 "$held" | awk '
    { for (i = 1; i <= NF; i++) { count[$i]++; n++ } }
    END { for (b in count) h -= count[b] / n * log(count[b] / n); printf "%.2f", h / log(2) }')

# added SIZE1 SIZE2: bits per held-out byte
added() { awk -v a="$1" -v b="$2" -v n="$bytes" 'BEGIN { printf "%.2f", 8 * (b - a) / n }'; }
others=
if command -v xz >/dev/null 2>&1; then
    others=", xz -9e $(added "$(xz -9e -c "$train" | wc -c)" "$(xz -9e -c "$both" | wc -c)")"
fi
for seven in 7z 7zz 7za; do
    if command -v $seven >/dev/null 2>&1; then
        ppmd() { $seven a -m0=PPMd:o=8:mem=256m "$1.7z" "$1" >/dev/null 2>&1; }
        if ppmd "$train" && ppmd "$both"; then
            others="$others, PPMd $(added "$(wc -c <"$train.7z")" "$(wc -c <"$both.7z")")"
        fi
        break
    fi
done
echo "the $bytes held-out bytes, in bits per byte: this model $(printf %.2f "${bpb:-0}"), byte" \
    "entropy $entropy$others"
