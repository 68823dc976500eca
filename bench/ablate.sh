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
# bench/learn.sh. Environment: DATA, PROGRAMS (a folder that contains the trainers, compiled
# with -DTR_PROCESSOR_TIME; default: make builds them in BUILD/processor_time; BUILD is
# build unless set).
set -eu
cd "$(dirname "$0")/.."
programs=${PROGRAMS:-${BUILD:-build}/processor_time}
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
    --one)      # SEED TRAINER OPTIONS..: a single run, as this script starts it
        shift
        one=$*
        break ;;
    *) refuse "unknown option $1 (--help)" ;;
    esac
    shift
done

# trainer and options, what they change
rows() {
    cat <<'END'
sru|the defaults
sru --precision f32|float matmuls
sru --optim radam --lr 0.02|RAdam instead of Muon
sru --optim adamw --lr 0.005|AdamW instead of Muon
sru --lr 0.005|half the learning rate
sru --lr 0.02|twice the learning rate
sru --weight-decay 0|no weight decay
sru --weight-decay 0.1|ten times the weight decay
sru --grad-clip 0|no clipping
sru --lr-warmup 1|no warm-up
sru --schedule constant|constant learning rate
sru --streams 8|each step continues the same 8 streams
sru --streams 1024|1024 streams
sru --batch-sz 4|half the batch
sru --batch-sz 16|twice the batch
sru --block-sz 32 --batch-sz 16|shorter blocks, the same tokens per step
sru --block-sz 128 --batch-sz 4|longer blocks, the same tokens per step
sru --dropout 0.05|dropout 0.05
sru --dropout 0.1|dropout 0.1
sru --hid-sz 128|narrower
sru --hid-sz 384|wider
sru --nlayers 3|one layer fewer
sru --nlayers 6|two layers more
sru --tied|the embedding is also the output matrix
sru --attention|attention in the last two layers
attn_span|the defaults
attn_span --optim adam --lr 0.003|Adam instead of Muon
attn_span --streams 8|each step continues the same 8 streams
attn_span --adapt-span-init 0.5|spans begin at 128 tokens instead of 15
attn_span --adapt-span-loss 0|no penalty for spans
attn_span --adapt-span-init 0.5 --adapt-span-loss 0|spans begin at 128 tokens, no penalty
attn_span --no-adapt-span --attn-span 32|fixed spans of 32 tokens
attn_span --no-adapt-span --attn-span 128|fixed spans of 128 tokens
END
}

runs=$out/runs.tsv
mkdir -p "$out"
[ -s "$runs" ] || printf 'run\tseed\tseconds\tsteps\tparameters\tnats\tcommit\tmachine\tdate\n' \
    >"$runs"
if [ -n "$one" ]; then
    seed=${one%% *} run=${one#* }
    trainer=${run%% *} options=${run#"${run%% *}"}
    work=$out/run.$$
    mkdir "$work"
    : >"$work/err"
    trap 'echo "ablate.sh: $run, seed $seed failed: $(tail -n 1 "$work/err")" >&2' EXIT
    trap 'exit 130' INT TERM
    # shellcheck disable=SC2086     # options
    "$programs/train_$trainer" --data "$out/text" --threads 1 --seed "$seed" --log "$work/log" \
        $options --minutes "$(awk -v s="$seconds" 'BEGIN { print s / 60 }')" 2>"$work/err" >&2
    result=$(held_out "$work/log")
    . bench/machine.sh
    printf '%s\t%s\t%s\t%s\t%s\t%s\t%s\n' "$run" "$seed" "$seconds" "$result" "$commit" \
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
    compile train_sru train_attn_span
    seed=0
    while [ "$seed" -lt "$seeds" ]; do
        seed=$((seed + 1))
        rows | cut -d'|' -f1 | while IFS= read -r run; do
            grep -qF "$run	$seed	$seconds	" "$runs" || echo "$seed $run"
        done
    done >"$out/missing"
    echo "$(($(wc -l <"$out/missing"))) runs are missing" >&2
    [ ! -s "$out/missing" ] || xargs -P "$jobs" -L 1 sh bench/ablate.sh --out "$out" \
        --seconds "$seconds" --one <"$out/missing" || failed=1
fi

rows | awk -F'[|\t]' -v seconds="$seconds" '
    function add(list, x) { return index(list ";", " " x ";") ? list : list "; " x }
    FILENAME == "-" {
        order[++count] = $1
        what[$1] = $2
        trainer[$1] = options[$1] = $1
        sub(/ .*/, "", trainer[$1])
        sub(/^[^ ]* ?/, "", options[$1])
        next
    }
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
                printf "%s| `train_%s` | options | parameters |", fewest ? "\n" : "", trainer[r]
                print " steps | nats per byte | difference |"
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
