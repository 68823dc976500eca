#!/bin/sh
# ablate.sh [options] - which of the default settings help? Trains with the defaults, and
# with one setting changed at a time, on tinyshakespeare. Prints a table per trainer of the
# loss of the whole held-out text, in nats per byte: mean and standard deviation of the
# seeds, and the difference from the defaults.
#
#     DATA=FOLDER sh bench/ablate.sh             all missing runs, then the table
#     sh bench/ablate.sh --report [--record]     table of finished runs
#
#     --seconds N     processor seconds of a run (default 60)
#     --seeds N       seeds 1 to N (default 3)
#     --jobs N        concurrent runs, one thread each (default 1); leave a core to each
#     --out DIR       runs and report (default build/ablate)
#     --report        no runs
#     --record        also write bench/results/ablate.tsv and ablate.md
#
# A finished run is a line of DIR/runs.tsv. A repeated call runs only what is missing; to
# repeat a run, delete its line. FOLDER/tinyshakespeare/input.txt is the text of
# bench/learn.sh. Environment: DATA, PROGRAMS (a folder that contains the trainers; default:
# make builds them in BUILD, or in build).
set -eu
cd "$(dirname "$0")/.."
programs=${PROGRAMS:-${BUILD:-build}}
seconds=60 seeds=3 jobs=1 out=build/ablate report= record= one= script=ablate.sh
. bench/trainers/long.sh
while [ $# -gt 0 ]; do
    case $1 in
    --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p;}' bench/ablate.sh; exit 0 ;;
    --report) report=1 ;;
    --record) record=1 ;;
    --seconds) number "$1" "${2:-}"; seconds=$2; shift ;;
    --seeds) number "$1" "${2:-}"; seeds=$2; shift ;;
    --jobs) number "$1" "${2:-}"; jobs=$2; shift ;;
    --out) word "$1" "${2:-}"; out=$2; shift ;;
    --one) one="$2 $3"; shift 2 ;;      # NUMBER SEED: a single run, as this script starts it
    *) refuse "unknown option $1 (--help)" ;;
    esac
    shift
done

# number of the row, trainer, options, what they change
rows() {
    cat <<'END'
1|sru||the defaults
2|sru|--precision f32|float matmuls
3|sru|--optim radam --lr 0.02|RAdam instead of Muon
4|sru|--optim adamw --lr 0.005|AdamW instead of Muon
5|sru|--lr 0.005|half the learning rate
6|sru|--lr 0.02|twice the learning rate
7|sru|--weight-decay 0|no weight decay
8|sru|--weight-decay 0.1|ten times the weight decay
9|sru|--grad-clip 0|no clipping
10|sru|--lr-warmup 1|no warm-up
11|sru|--schedule constant|constant learning rate
12|sru|--streams 8|each step continues the same 8 streams
13|sru|--streams 1024|1024 streams
14|sru|--batch-sz 4|half the batch
15|sru|--batch-sz 16|twice the batch
16|sru|--block-sz 32 --batch-sz 16|shorter blocks, the same tokens per step
17|sru|--block-sz 128 --batch-sz 4|longer blocks, the same tokens per step
18|sru|--dropout 0.05|dropout 0.05
19|sru|--dropout 0.1|dropout 0.1
20|sru|--hid-sz 128|narrower
21|sru|--hid-sz 384|wider
22|sru|--nlayers 3|one layer less
23|sru|--nlayers 6|two layers more
24|sru|--tied|the embedding is also the output matrix
25|sru|--attention|attention in the last two layers
26|attn_span||the defaults
27|attn_span|--optim adam --lr 0.003|Adam instead of Muon
28|attn_span|--streams 8|each step continues the same 8 streams
29|attn_span|--adapt-span-init 0.5|spans begin at 128 tokens instead of 15
30|attn_span|--adapt-span-loss 0|no penalty for spans
31|attn_span|--adapt-span-init 0.5 --adapt-span-loss 0|spans begin at 128 tokens, no penalty
32|attn_span|--no-adapt-span --attn-span 32|fixed spans of 32 tokens
33|attn_span|--no-adapt-span --attn-span 128|fixed spans of 128 tokens
END
}

runs=$out/runs.tsv
mkdir -p "$out"
[ -s "$runs" ] || printf 'row\tseed\tseconds\tsteps\tparameters\tnats\tcommit\tmachine\tdate\n' \
    >"$runs"
if [ -n "$one" ]; then
    # shellcheck disable=SC2086     # two words
    set -- $one
    work=$out/run.$1.$2
    rm -rf "$work"
    mkdir "$work"
    : >"$work/err"
    trap 'echo "ablate.sh: row $1, seed $2 failed: $(tail -n 1 "$work/err")" >&2' EXIT
    trap 'exit 130' INT TERM
    trainer=$(rows | awk -F'|' -v row="$1" '$1 == row { print $2 }')
    options=$(rows | awk -F'|' -v row="$1" '$1 == row { print $3 }')
    # shellcheck disable=SC2086     # options
    "$programs/train_$trainer" --data "$out/text" --threads 1 --seed "$2" --log "$work/log" $options \
        --minutes "$(awk -v s="$seconds" 'BEGIN { print s / 60 }')" 2>"$work/err" >&2
    result=$(awk '
        function of(key) {
            if (!match($0, "\"" key "\":[-0-9.e+]*")) return ""
            return substr($0, RSTART + length(key) + 3, RLENGTH - length(key) - 3)
        }
        /"event":"start"/ { params = of("params") }
        /"event":"eval","split":"valid"/ { loss = of("loss"); step = of("step") }
        END { if (loss == "") exit 1; printf "%s\t%s\t%.5f", step, params, loss }' "$work/log")
    . bench/machine.sh
    printf '%s\t%s\t%s\t%s\t%s\t%s\t%s\n' "$1" "$2" "$seconds" "$result" "$commit" \
        "$cpu, $cores cores" "$(date +%Y-%m-%d)" >>"$runs"
    trap - EXIT
    rm -rf "$work"
    exit 0
fi

failed=
if [ -z "$report" ]; then
    text=${DATA:-}/tinyshakespeare/input.txt
    [ -r "$text" ] || refuse "set DATA=FOLDER with tinyshakespeare/input.txt (--help)"
    mkdir -p "$out/text"
    train=$(($(wc -c <"$text") * 9 / 10))
    head -c $train "$text" >"$out/text/train.txt"
    tail -c +$((train + 1)) "$text" >"$out/text/valid.txt"
    [ -n "${PROGRAMS:-}" ] ||
        make -s BUILD="$programs" "$programs/train_sru" "$programs/train_attn_span"
    seed=0
    while [ "$seed" -lt "$seeds" ]; do
        seed=$((seed + 1))
        rows | cut -d'|' -f1 | while read -r row; do
            grep -q "^$row	$seed	$seconds	" "$runs" || echo "$row $seed"
        done
    done >"$out/missing"
    echo "$(($(wc -l <"$out/missing"))) runs are missing" >&2
    [ ! -s "$out/missing" ] || xargs -P "$jobs" -L 1 sh bench/ablate.sh --out "$out" \
        --seconds "$seconds" --one <"$out/missing" || failed=1
fi

rows | awk -F'[|\t]' -v seconds="$seconds" '
    function add(list, x) { return index(list ";", " " x ";") ? list : list "; " x }
    FILENAME == "-" { trainer[$1] = $2; options[$1] = $3; what[$1] = $4; order[++count] = $1; next }
    $3 != seconds || !($1 in what) { next }
    {
        n[$1]++; sum[$1] += $6; squares[$1] += $6 * $6; steps[$1] += $4; params[$1] = $5
        machines = add(machines, $8); commits = add(commits, $7); dates = add(dates, $9)
    }
    END {
        for (i = 1; i <= count; i++) {
            r = order[i]
            if (options[r] == "" && n[r]) {
                base = sum[r] / n[r]
                printf "%s| `train_%s` | options | parameters | steps | nats per byte | difference |\n",
                    fewest ? "\n" : "", trainer[r]
                print "|---|---|--:|--:|--:|--:|"
            }
            if (!n[r]) continue
            if (!fewest || n[r] < fewest) fewest = n[r]
            if (n[r] > many) many = n[r]
            mean = sum[r] / n[r]
            printf "| %s | %s | %.2fM | %.0f | %.3f", what[r],
                options[r] == "" ? "" : "`" options[r] "`", params[r] / 1e6, steps[r] / n[r], mean
            square = squares[r] - sum[r] * mean
            if (n[r] > 1) printf " ± %.3f", sqrt(square > 0 ? square / (n[r] - 1) : 0)
            if (options[r] == "") print " | |"
            else printf " | %+.3f |\n", mean - base
        }
        if (!fewest) exit
        printf "\n%s processor seconds per run; seeds per row: %s; ± is their standard\n", seconds,
            fewest < many ? fewest " to " many : many
        printf "deviation. Machine: %s; commit: %s; date: %s.\n", substr(machines, 3),
            substr(commits, 3), substr(dates, 3)
    }' - "$runs" >"$out/ablate.md"
cat "$out/ablate.md"
if [ -n "$record" ]; then
    cp "$runs" bench/results/ablate.tsv
    cp "$out/ablate.md" bench/results/ablate.md
fi
[ -z "$failed" ] || { echo "ablate.sh: runs failed, see above" >&2; exit 1; }
