# curve_peer.sh - sourced by curve_sru.sh and curve_comp.sh in the repository's root.
# Trains a small model with bench_NAME.c and with its PyTorch peer, from the same
# parameters on the same bytes, and compares their losses. The caller sets name, title,
# peer, model (options) and note.
CC=${CC:-cc}
work=build/bench
mkdir -p "$work"
record= steps=2000 every=100 command="sh bench/trainers/curve_$name.sh" extra=
while [ $# -gt 0 ]; do
    command="$command $1"
    case $1 in
    --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p;}' "bench/trainers/curve_$name.sh"; exit 0 ;;
    --record) record=1 ;;
    --quick) steps=120 every=20 ;;
    --steps|--every)
        case ${2:-} in
        ''|*[!0-9]*|0) echo "curve_$name.sh: $1: expected a whole number above 0" >&2; exit 2 ;;
        esac
        if [ "$1" = --steps ]; then steps=$2; else every=$2; fi
        command="$command $2"; shift ;;
    *[!A-Za-z0-9_./,=+-]*)
        echo "curve_$name.sh: unexpected characters in the option $1" >&2
        exit 2 ;;
    *) extra="$extra $1" ;;
    esac
    shift
done

bin=$work/bench_$name
flags="-std=c99 ${CFLAGS:--O3}"
$CC $flags -pthread "bench/models/bench_$name.c" -o "$bin" -lm
data=${DATA:-build/demo.txt}
if [ -z "${DATA:-}" ] && [ ! -s "$data" ]; then sh examples/demo_data.sh "$data"; fi
[ -r "$data" ] || { echo "curve_$name.sh: DATA=$data cannot be read" >&2; exit 2; }
python= torch=
for p in ${PYTHON:-} python3 /usr/bin/python3; do
    if torch=$("$p" -c 'import torch; print(torch.__version__)' 2>/dev/null); then
        python=$p
        break
    fi
done
[ -n "$python" ] || { echo "curve_$name.sh: no python3 with torch: set PYTHON" >&2; exit 2; }
. bench/machine.sh

threads=$((cores / 2)); [ "$threads" -gt 0 ] || threads=1
warmup=100; [ "$steps" -gt 200 ] || warmup=$((steps / 4 + 1))
model="$model --schedule cosine --lr-warmup $warmup --max-iter $steps"
start=$work/curve_$name.safetensors
"$bin" --worker $model $extra --seed 1 --save "$start"
running=
trap 'for p in $running; do kill "$p" 2>/dev/null || :; done' EXIT
trap 'exit 130' INT TERM
rm -f "$work/curve_$name.seqtx.txt" "$work/curve_$name.torch.txt"
"$bin" --worker $model $extra --threads "$threads" --data "$data" --load "$start" \
    --train "$steps" --curve "$work/curve_$name.seqtx.txt" \
    >"$work/curve_$name.seqtx.log" 2>&1 &
running="$running $!"
GOMP_SPINCOUNT=0 "$python" "bench/peers/$peer" $model $extra --threads "$threads" --data "$data" \
    --load "$start" --train "$steps" --curve "$work/curve_$name.torch.txt" \
    >"$work/curve_$name.torch.log" 2>&1 &
running="$running $!"
for who in seqtx torch; do
    running=${running# }
    if ! wait "${running%% *}"; then
        echo "curve_$name.sh: the run of $who failed: $(tail -n 1 "$work/curve_$name.$who.log")" >&2
        exit 1
    fi
    case $running in *' '*) running=${running#* } ;; *) running= ;; esac
done
rm -f "$start"
paste -d ' ' "$work/curve_$name.seqtx.txt" "$work/curve_$name.torch.txt" >"$work/curve_$name.txt"
{
    echo "# Training curves of $title, seqtx and PyTorch, $(date +%Y-%m-%d)"
    echo
    echo "- machine: $cpu, $cores cores, ${vector:-no vector flags known};" \
        "$threads thread$([ "$threads" = 1 ] || echo s) per run"
    echo "- peer: PyTorch $torch, bench/peers/$peer, eager f32"
    echo "- command: \`$command\`"
    echo "- commit: $commit"
    [ -z "${DATA:-}" ] && echo "- data: the English of this repository (examples/demo_data.sh)," \
        "$(wc -c <"$data") bytes" || echo "- data: $(basename "$data"), $(wc -c <"$data") bytes"
    echo "- model and optimiser: \`$model$extra\`"
    echo
    echo "Training loss in nats per byte: of the step, and the mean of the steps since the" \
        "previous row."
    echo "Both have the same initial parameters$note, bytes and steps."
    echo
} >"$work/curve_$name.md"
failed=0
awk -v every="$every" -v steps="$steps" '
    function size(x) { return x < 0 ? -x : x }
    BEGIN {
        limit = 0.001; window = steps < 100 ? steps : 100
        printf "| step | seqtx | PyTorch | difference | seqtx, mean | PyTorch, mean |"
        print " difference | largest difference of a step |"
        printf "|-----:|------:|--------:|-----------:|------------:|--------------:|"
        print "-----------:|-----------------------------:|"
    }
    NF != 4 || $1 != NR || $3 != NR || $2 !~ /^[0-9.]+$/ || $4 !~ /^[0-9.]+$/ { bad = NR; exit 1 }
    {
        d[NR] = $2 - $4; a += $2; b += $4; n++; sum += d[NR]
        if (NR > window) sum -= d[NR - window]
        if (NR <= window && size(d[NR]) > early) { early = size(d[NR]); early_at = NR }
        if (NR >= window && size(sum / window) > mean) { mean = size(sum / window); mean_at = NR }
        if (size(d[NR]) > here) here = size(d[NR])
        if (here > most) { most = here; most_at = NR }
        if (NR == 1 || NR % every == 0 || NR == steps) {
            printf "| %d | %.5f | %.5f | %+.1e | %.5f | %.5f | %+.1e | %.1e |\n", NR, $2, $4, d[NR],
                a / n, b / n, (a - b) / n, here
            a = b = n = here = 0
        }
    }
    END {
        if (bad || NR != steps) {
            printf "\nFAILED: the logs do not match, or a loss is not a number, at step %d.\n",
                bad ? bad : NR + 1
            exit 1
        }
        printf "\nLargest difference over the first %d steps: %.1e (step %d);", window, early,
            early_at
        printf " limit %.0e: %s.\n", limit, early <= limit ? "met" : "FAILED"
        printf "Over all %d steps: of one step %.1e (step %d),", steps, most, most_at
        printf " of the running mean of %d steps %.1e (step %d).\n", window, mean, mean_at
        exit !(early <= limit)
    }' "$work/curve_$name.txt" >>"$work/curve_$name.md" || failed=1
cat "$work/curve_$name.md"
if [ -n "$record" ]; then
    target=$(free_result "curve-$name-").md
    cp "$work/curve_$name.md" "$target"
    echo "written: $target"
fi
exit "$failed"
