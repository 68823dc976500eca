#!/bin/sh
# ablate.sh [options] - which of train_sru's default settings help? Trains with the
# defaults, and with one setting changed at a time, on tinyshakespeare. Prints a table of
# the loss of the whole held-out text, in nats per byte: mean and standard deviation of the
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
# bench/learn.sh. Environment: DATA, PROGRAMS (a folder that contains train_sru; default:
# make builds it in BUILD, or in build).
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

# number of the row, options, what they change
rows() {
    cat <<'END'
1||the defaults
2|--precision f32|float matmuls
3|--optim radam --lr 0.02|RAdam instead of Muon
4|--optim adamw --lr 0.005|AdamW instead of Muon
5|--lr 0.005|half the learning rate
6|--lr 0.02|twice the learning rate
7|--weight-decay 0|no weight decay
8|--weight-decay 0.1|ten times the weight decay
9|--grad-clip 0|no clipping
10|--lr-warmup 1|no warm-up
11|--schedule constant|constant learning rate
12|--streams 8|each step continues the same 8 streams
13|--streams 1024|1024 streams
14|--batch-sz 4|half the batch
15|--batch-sz 16|twice the batch
16|--block-sz 32 --batch-sz 16|shorter blocks, the same tokens per step
17|--block-sz 128 --batch-sz 4|longer blocks, the same tokens per step
18|--dropout 0.05|dropout 0.05
19|--dropout 0.1|dropout 0.1
20|--hid-sz 128|narrower
21|--hid-sz 384|wider
22|--nlayers 3|one layer less
23|--nlayers 6|two layers more
24|--tied|the embedding is also the output matrix
25|--attention|attention in the last two layers
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
    options=$(rows | awk -F'|' -v row="$1" '$1 == row { print $2 }')
    # shellcheck disable=SC2086     # options
    "$programs/train_sru" --data "$out/text" --threads 1 --seed "$2" --log "$work/log" $options \
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
    [ -n "${PROGRAMS:-}" ] || make -s BUILD="$programs" "$programs/train_sru"
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
    FILENAME == "-" { options[$1] = $2; what[$1] = $3; order[++count] = $1; next }
    $3 != seconds || !($1 in what) { next }
    {
        n[$1]++; sum[$1] += $6; squares[$1] += $6 * $6; steps[$1] += $4; params[$1] = $5
        machines = add(machines, $8); commits = add(commits, $7); dates = add(dates, $9)
    }
    END {
        if (!n[1]) exit
        base = sum[1] / n[1]
        print "| change | options | parameters | steps | nats per byte | difference |"
        print "|---|---|--:|--:|--:|--:|"
        for (i = 1; i <= count; i++) {
            r = order[i]
            if (!n[r]) continue
            if (!fewest || n[r] < fewest) fewest = n[r]
            if (n[r] > many) many = n[r]
            mean = sum[r] / n[r]
            printf "| %s | %s | %.2fM | %.0f | %.3f", what[r],
                options[r] == "" ? "" : "`" options[r] "`", params[r] / 1e6, steps[r] / n[r], mean
            square = squares[r] - sum[r] * mean
            if (n[r] > 1) printf " ± %.3f", sqrt(square > 0 ? square / (n[r] - 1) : 0)
            if (r == 1) print " | |"
            else printf " | %+.3f |\n", mean - base
        }
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
