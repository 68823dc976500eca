#!/bin/sh
# learn.sh [options] - what quality does one thread reach in N processor seconds? Trains
# the models of the four trainers with their defaults, and peers in PyTorch, on three
# texts. Each time is a run with a schedule that fits. Prints a table per text: nats per
# byte of the whole held-out text, mean and standard deviation of the seeds.
#
#     DATA=FOLDER sh bench/learn.sh                          all missing runs, then the report
#     DATA=FOLDER sh bench/learn.sh --only sru,lstm --budgets 20,60 --texts books --seeds 1
#     sh bench/learn.sh --report [--record]                  report of finished runs
#
#     --only LIST     of attn_span,compressive,par,sru,nanogpt-cpu,nanogpt-gpu,lstm
#     --texts LIST    of tinyshakespeare,enwik8,books
#     --budgets LIST  processor seconds of training (default 20,60,150,300,600)
#     --seeds N       seeds 1 to N (default 3)
#     --jobs N        concurrent runs, one thread each (default 1); leave a core to each
#     --out DIR       runs and report (default build/learn)
#     --report        no runs; with the lists above, only these rows, columns and texts
#     --record        also write bench/results/learn.tsv, learn-TEXT.md and learn-TEXT.svg
#
# A finished run is a line of DIR/runs.tsv. A repeated call runs only what is missing; to
# repeat a run, delete its line. An interrupted run begins again. All runs take 20 hours on
# one core, and their evaluation some hours more. The texts:
#
#     FOLDER/tinyshakespeare/input.txt   from github.com/karpathy/char-rnn, data/tinyshakespeare;
#                                        split as in nanoGPT: the last 10 % are held out
#     FOLDER/enwik8/train.txt            sh examples/get_data.sh enwik8 FOLDER/enwik8; only the
#                                        first 4 MB are used, the last 10 % of them are held
#                                        out. Or FOLDER/enwik/enwik8*, the beginning of enwik8
#     FOLDER/books/train.txt, valid.txt  any books; valid.txt is held out
#
# Environment: DATA, PYTHON (a python3 with torch), PROGRAMS (a folder that contains the
# trainers and plot, compiled with -DTR_PROCESSOR_TIME; default: make builds them in
# BUILD/processor_time; BUILD is build unless set).
set -eu
cd "$(dirname "$0")/.."
trainers="attn_span compressive par sru" peers="nanogpt-cpu nanogpt-gpu lstm"
all_texts="tinyshakespeare enwik8 books" programs=${PROGRAMS:-${BUILD:-build}/processor_time}
only="$trainers $peers" texts=$all_texts budgets="20 60 150 300 600"
seeds=3 jobs=1 out=build/learn report= record= one= script=learn.sh
. bench/trainers/long.sh
while [ $# -gt 0 ]; do
    case $1 in
    --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p;}' bench/learn.sh; exit 0 ;;
    --report) report=1 ;;
    --record) record=1 ;;
    --seeds | --jobs)
        number "$1" "${2:-}"
        if [ "$1" = --seeds ]; then seeds=$2; else jobs=$2; fi
        shift ;;
    --only | --texts | --budgets | --out)
        word "$1" "${2:-}"
        list=$(echo "$2" | tr , ' ')
        case $1 in
        --only) only=$list ;;
        --texts) texts=$list ;;
        --budgets) budgets=$list ;;
        --out) out=$2 ;;
        esac
        shift ;;
    --one)      # SYSTEM TEXT SEED BUDGET: a single run, as this script starts it
        one="$2 $3 $4 $5"; shift 4 ;;
    *) refuse "unknown option $1 (--help)" ;;
    esac
    shift
done
for name in $only; do
    case " $trainers $peers " in *" $name "*) ;; *) refuse "--only $name: unknown (--help)" ;; esac
done
for name in $texts; do
    case " $all_texts " in *" $name "*) ;; *) refuse "--texts $name: unknown (--help)" ;; esac
done
for name in $budgets; do number --budgets "$name"; done
runs=$out/runs.tsv
mkdir -p "$out/plot"
[ -s "$runs" ] || echo system text seed budget seconds steps parameters nats eval_seconds commit \
    machine date | tr ' ' '\t' >"$runs"

# fit SYSTEM TEXT BUDGET: sets length, the options that let a trainer run for about BUDGET
# processor seconds
fit() {
    if "$programs/train_$1" --help | grep -q '^  --minutes '; then
        length="--minutes $(awk -v s="$3" 'BEGIN { print s / 60 }')"
        return
    fi
    # The difference of two short runs is free of the start of the program.
    for n in 10 40; do
        seconds
        began=$now
        "$programs/train_$1" --data "$out/text/$2" --threads 1 --steps $n --eval-blocks 1 \
            2>"$work/err" >&2
        seconds
        [ $n = 40 ] || short=$((now - began))
    done
    steps30=$((now - began - short))
    [ "$steps30" -gt 0 ] || steps30=1
    length="--steps $((3000 * $3 / steps30))"
}

# One run: adds a line to $runs.
if [ -n "$one" ]; then
    # shellcheck disable=SC2086     # four words
    set -- $one
    work=$out/run.$1.$2.$3.$4
    rm -rf "$work"
    mkdir "$work"
    : >"$work/err"
    with=
    trap 'echo "learn.sh: $one failed: $(tail -n 1 "$work/err")" >&2' EXIT
    trap 'exit 130' INT TERM
    case " $trainers " in
    *" $1 "*)
        fit "$1" "$2" "$4"
        model="--threads 1 --checkpoint $work/model.safetensors --log $work/log"
        seconds
        began=$now
        # shellcheck disable=SC2086     # options
        "$programs/train_$1" --data "$out/text/$2" --seed "$3" $length $model --eval-blocks 1 \
            2>"$work/err" >&2
        seconds
        spent=$((now - began)) began=$now
        # shellcheck disable=SC2086
        "$programs/train_$1" $model --eval-only --eval-batch-sz 4 2>"$work/err" >&2
        seconds
        eval=$((now - began))
        result=$(held_out "$work/log")
        result=$(awk -v spent=$spent -v result="$result" -v eval=$eval \
            'BEGIN { printf "%.2f\t%s\t%.2f", spent / 100, result, eval / 100 }') ;;
    *)
        result=$("$PYTHON" bench/peers/learn.py --peer "$1" --train "$out/text/$2/train.txt" \
            --valid "$out/text/$2/valid.txt" --seconds "$4" --seed "$3" 2>"$work/err")
        with=", PyTorch $("$PYTHON" -c 'import torch; print(torch.__version__)')" ;;
    esac
    . bench/machine.sh
    printf '%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n' "$1" "$2" "$3" "$4" "$result" "$commit" \
        "$cpu, $cores cores$with" "$(date +%Y-%m-%d)" >>"$runs"
    trap - EXIT
    rm -rf "$work"
    exit 0
fi

failed=
if [ -z "$report" ]; then
    [ -n "${DATA:-}" ] || refuse "set DATA=FOLDER: see --help for the texts"
    for name in $texts; do learn_text "$name"; done
    for name in $only; do
        case " $trainers " in
        *" $name "*) compile "train_$name" ;;
        *)
            for p in ${PYTHON:-} python3 /usr/bin/python3; do
                if "$p" -c 'import torch' 2>/dev/null; then break; fi
                p=
            done
            [ -n "$p" ] || refuse "--only $name: no python3 with torch: set PYTHON"
            # as in bench/run.sh: AVX-512 on AMD, and malloc that keeps its memory
            export PYTHON="$p" MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=1099511627776 \
                MALLOC_ARENA_MAX=1
            if grep -q AuthenticAMD /proc/cpuinfo 2>/dev/null &&
                grep -q avx512f /proc/cpuinfo; then
                export OPENBLAS_CORETYPE=SkylakeX
            fi ;;
        esac
    done
    seed=0
    # All systems of a seed first, the short runs before the long ones.
    while [ "$seed" -lt "$seeds" ]; do
        seed=$((seed + 1))
        for budget in $budgets; do
            for name in $texts; do
                for system in $only; do
                    run=$(printf '%s\t%s\t%s\t%s' "$system" "$name" $seed "$budget")
                    grep -q "^$run	" "$runs" || echo "$run"
                done
            done
        done
    done >"$out/missing"
    echo "$(($(wc -l <"$out/missing"))) runs are missing" >&2
    [ ! -s "$out/missing" ] ||
        xargs -P "$jobs" -L 1 sh bench/learn.sh --out "$out" --one <"$out/missing" || failed=1
fi

# table TEXT: the table in Markdown. Also writes the curves to $out/plot, a file per system,
# without the values that are more than half a nat above the best of their column: they
# would leave little height to the others
table() {
    rm -f "$out/plot/"*
    awk -F'\t' -v text="$1" -v only="$only" -v budgets="$budgets" -v plot="$out/plot" '
        function add(list, x) { return index(list ";", " " x ";") ? list : list "; " x }
        BEGIN {
            systems = split(only, row, " "); columns = split(budgets, budget, " ")
            for (s = 1; s <= systems; s++) title[row[s]] = "`train_" row[s] "`"
            title["nanogpt-cpu"] = "nanoGPT, CPU recipe"
            title["nanogpt-gpu"] = "nanoGPT, GPU recipe"
            title["lstm"] = "LSTM in PyTorch"
            start = "{\"event\":\"start\",\"params\":%d}"
            point = "{\"event\":\"eval\",\"split\":\"valid\",\"step\":%.2f,\"loss\":%.5f}"
            for (s = 1; s <= systems; s++) wanted[row[s]] = 1
            for (b = 1; b <= columns; b++) wanted[budget[b]] = 1
        }
        NR == 1 || $2 != text || !wanted[$1] || !wanted[$4] { next }
        {
            k = $1 SUBSEP $4; n[k]++; sum[k] += $8; squares[k] += $8 * $8; used[k] += $5
            if (!params[$1] || $7 < params[$1]) params[$1] = $7
            if ($7 > largest[$1]) largest[$1] = $7
            rows++
            share = $5 / $4
            if (rows == 1 || share < least) least = share
            if (rows == 1 || share > most) most = share
            machines = add(machines, $11); commits = add(commits, $10); dates = add(dates, $12)
        }
        END {
            if (!rows) exit
            printf "| nats per byte after .. processor seconds | parameters |"
            for (b = 1; b <= columns; b++) printf " %s |", budget[b]
            printf "\n|---|--:|"; for (b = 1; b <= columns; b++) printf "--:|"; printf "\n"
            fewest = 99
            for (k in n) {
                split(k, part, SUBSEP); mean[k] = sum[k] / n[k]
                if (n[k] < fewest) fewest = n[k]
                if (n[k] > many) many = n[k]
                if (!(part[2] in best) || mean[k] < best[part[2]]) best[part[2]] = mean[k]
            }
            for (s = 1; s <= systems; s++) {
                if (!params[row[s]]) continue
                size = sprintf("%.2fM", params[row[s]] / 1e6)
                if (largest[row[s]] > params[row[s]])
                    size = sprintf("%.2f to %.2fM", params[row[s]] / 1e6, largest[row[s]] / 1e6)
                printf "| %s | %s |", title[row[s]], size
                name = title[row[s]]; gsub(/`/, "", name)
                file = plot "/" name; drawn = 0
                for (b = 1; b <= columns; b++) {
                    k = row[s] SUBSEP budget[b]
                    if (!n[k]) { printf " - |"; continue }
                    mark = mean[k] == best[budget[b]] ? "**" : ""
                    printf " %s%.3f%s", mark, mean[k], mark
                    square = squares[k] - sum[k] * mean[k]
                    if (square < 0) square = 0
                    if (n[k] > 1) printf " ± %.3f", sqrt(square / (n[k] - 1))
                    printf " |"
                    if (mean[k] > best[budget[b]] + 0.5) continue
                    if (!drawn++) printf start "\n", largest[row[s]] >file
                    printf point "\n", used[k] / n[k], mean[k] >file
                }
                printf "\n"
            }
            seeds = fewest < many ? fewest " to " many : many
            if (many > 1) seeds = seeds "; ± is their standard deviation"
            printf "\nSeeds per value: %s. The runs used ", seeds
            printf "%.2f to %.2f of\ntheir processor seconds. ", least, most
            printf "Machine: %s; commit: %s; date: %s.\n", substr(machines, 3), substr(commits, 3),
                substr(dates, 3)
        }' "$runs"
}
compile plot
for name in $texts; do
    table "$name" >"$out/$name.md"
    [ -s "$out/$name.md" ] || continue
    printf '%s\n\n' "$name:"
    cat "$out/$name.md"
    echo
    "$programs/plot" "$out/plot/"* -o "$out/$name.svg" --log-x --axis 'processor seconds' \
        --title "$name: the held-out text after training"
    [ -z "$record" ] || for kind in md svg; do
        cp "$out/$name.$kind" "bench/results/learn-$name.$kind"
    done
done
[ -z "$record" ] || cp "$runs" bench/results/learn.tsv
[ -z "$failed" ] || { echo "learn.sh: runs failed, see above" >&2; exit 1; }
