#!/bin/sh
# curve.sh [options] [trainer options] - does bfloat16 cost quality? Trains a small model
# on DATA three times: in float, in bfloat16 with the same seed, and in float with another
# seed. The effect of the seed is the yardstick for the effect of the precision. Prints a
# table of training and validation losses.
#
#     DATA=enwik8 sh bench/trainers/curve.sh --record       2,000 steps; a file or a directory
#     sh bench/trainers/curve.sh --quick                    60 steps, text of examples/demo_data.sh
#     sh bench/trainers/curve.sh --steps 5000 --hid-sz 512  another length, another model
#
#     --steps N, --every N    length of a run; a row of the table every N steps
#     --record                also write the table to bench/results/
#
# The three runs are concurrent, each with its share of the cores, because only losses are
# compared. Needs a build of the library with bf16. Also draws build/bench/curve.png if
# there is a python3 with matplotlib. Environment: CC (cc), CFLAGS (-O3), DATA, PYTHON
# (for the picture).
set -eu
cd "$(dirname "$0")/../.."
CC=${CC:-cc}
work=build/bench
mkdir -p "$work"
record= steps=2000 every= blocks=100 command="sh bench/trainers/curve.sh" extra=
while [ $# -gt 0 ]; do
    command="$command $1"
    case $1 in
    --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p;}' bench/trainers/curve.sh; exit 0 ;;
    --record) record=1 ;;
    --quick) steps=60 every=20 blocks=10 ;;
    --steps|--every)
        case ${2:-} in
        ''|*[!0-9]*|0) echo "curve.sh: $1: expected a whole number above 0" >&2; exit 2 ;;
        esac
        if [ "$1" = --steps ]; then steps=$2; else every=$2; fi
        command="$command $2"; shift ;;
    *[!A-Za-z0-9_./,=+-]*) echo "curve.sh: unexpected characters in the option $1" >&2; exit 2 ;;
    *) extra="$extra $1" ;;
    esac
    shift
done
every=${every:-$(((steps + 9) / 10))}

bin=$work/train_attn_span
flags="-std=c99 ${CFLAGS:--O3}"
$CC $flags -pthread examples/train_attn_span.c -o "$bin" -lm
data=${DATA:-build/demo.txt}
if [ -z "${DATA:-}" ] && [ ! -s "$data" ]; then sh examples/demo_data.sh "$data"; fi
[ -r "$data" ] || { echo "curve.sh: DATA=$data cannot be read" >&2; exit 2; }
. bench/machine.sh

threads=$((cores / 3)); [ "$threads" -gt 0 ] || threads=1
model="--tokens bytes --nlayers 4 --hid-sz 256 --inner-hid-sz 1024 --nheads 4 --attn-span 512"
model="$model --block-sz 128 --batch-sz 8 --dropout 0 --adapt-span --adapt-span-loss 0.000002"
model="$model --adapt-span-init 0.06 --optim adam --lr 0.001 --schedule cosine --lr-warmup 100"
model="$model --grad-clip 1"
running=
trap 'for p in $running; do kill "$p" 2>/dev/null || :; done' EXIT
trap 'exit 130' INT TERM
start() {       # NAME OPTIONS..
    name=$1; shift
    rm -f "$work/curve.$name.jsonl"
    "$bin" --data "$data" $model $extra --steps "$steps" --log "$work/curve.$name.jsonl" \
        --log-every "$every" --eval-every "$every" \
        --eval-blocks "$blocks" --threads "$threads" "$@" >"$work/curve.$name.out" 2>&1 &
    running="$running $!" names="${names:-} $name"
}
start f32 --precision f32 --seed 1
start bf16 --precision bf16 --seed 1
start seed2 --precision f32 --seed 2
for name in $names; do
    running=${running# }
    if ! wait "${running%% *}"; then
        echo "curve.sh: the run \"$name\" failed: $(tail -n 1 "$work/curve.$name.out")" >&2
        exit 1
    fi
    case $running in *' '*) running=${running#* } ;; *) running= ;; esac
done

losses() {      # NAME: step, mean training loss since the step before, validation loss
    awk -v FS='[,:{}"]+' '
        function of(key, i) {
            for (i = 1; i < NF; i++)
                if ($i == key) return $(i + 1)
            return ""
        }
        of("event") == "train" { train[of("step")] = of("loss") }
        of("event") == "eval" && of("split") == "valid" {
            step = of("step")
            if (step in train) print step, train[step], of("loss")
        }' "$work/curve.$1.jsonl"
}
for name in f32 bf16 seed2; do losses $name >"$work/curve.$name.txt"; done
paste -d ' ' "$work/curve.f32.txt" "$work/curve.bf16.txt" "$work/curve.seed2.txt" >"$work/curve.txt"
awk 'NF != 9 || $1 != $4 || $1 != $7 { exit 1 } END { exit !NR }' "$work/curve.txt" ||
    { echo "curve.sh: the logs of the runs do not match ($work/curve.*.jsonl)" >&2; exit 1; }
{
    echo "# Training curves in float and bfloat16, $(date +%Y-%m-%d)"
    echo
    echo "- machine: $cpu, $cores cores, ${vector:-no vector flags known};" \
        "$threads thread$([ "$threads" = 1 ] || echo s) per run"
    echo "- command: \`$command\`"
    echo "- commit: $commit"
    [ -z "${DATA:-}" ] && echo "- data: the English of this repository (examples/demo_data.sh)," \
        "$(wc -c <"$data") bytes" ||
        echo "- data: $(basename "$data"), $(find "$data" -type f -exec cat {} + | wc -c) bytes"
    echo "- model and optimiser: \`$model$extra\`"
    echo
    echo "Mean loss in nats per token. Training: mean of the steps since the previous row." \
        "Validation: the same $blocks blocks in every row."
    echo "bf16 has the seed of the first float run, so the precision alone causes its" \
        "difference; \"seed\" is a float run with another seed."
    echo
    awk '
        function size(x) { return x < 0 ? -x : x }
        BEGIN {
            printf "| step | f32 train | bf16 train | bf16 - f32 | seed - f32 |"
            print " f32 valid | bf16 valid | bf16 - f32 | seed - f32 |"
            printf "|-----:|----------:|-----------:|-----------:|-----------:|"
            print "----------:|-----------:|-----------:|-----------:|"
        }
        {
            printf "| %d | %.4f | %.4f | %+.4f | %+.4f | %.4f | %.4f | %+.4f | %+.4f |\n", $1, $2,
                $5, $5 - $2, $8 - $2, $3, $6, $6 - $3, $9 - $3
            if (size($6 - $3) > bf) bf = size($6 - $3)
            if (size($9 - $3) > sd) sd = size($9 - $3)
            end = $6 - $3; other = $9 - $3; last = $1
        }
        END {
            printf "\nValidation: bf16 differs from float by at most %.4f, by %+.4f at step %d;",
                bf, end, last
            printf " another seed by at most %.4f, by %+.4f at that step.\n", sd, other
        }' "$work/curve.txt"
} >"$work/curve.md"
cat "$work/curve.md"
for p in ${PYTHON:-} python3 /usr/bin/python3; do
    "$p" -c 'import matplotlib' 2>/dev/null || continue
    "$p" - "$work/curve.txt" "$work/curve.png" <<'END' && echo "drawn: $work/curve.png"
import sys
import matplotlib
matplotlib.use("Agg")
import matplotlib.pyplot as plt
rows = [[float(v) for v in line.split()] for line in open(sys.argv[1])]
plt.figure(figsize=(6, 4), dpi=80)
curves = (2, "float", "-"), (5, "bfloat16", "--"), (8, "float, another seed", ":")
for column, name, style in curves:
    plt.plot([r[0] for r in rows], [r[column] for r in rows], style, label=name)
plt.xlabel("step")
plt.ylabel("validation loss, nats")
plt.legend()
plt.tight_layout()
plt.savefig(sys.argv[2])
END
    break
done
if [ -n "$record" ]; then
    target=$(free_result curve-).md
    cp "$work/curve.md" "$target"
    echo "written: $target"
fi
