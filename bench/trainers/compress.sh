#!/bin/sh
# compress.sh [options] - is a compressed memory worth its cost? Trains one small model
# with each of nine memories on a text of books, with several seeds each. Prints a table:
# bits per byte of the validation text, overall and by the distance from an empty memory.
#
#     DATA=train.txt VALID=valid.txt sh bench/trainers/compress.sh       all runs, then the report
#     DATA=.. VALID=.. sh bench/trainers/compress.sh --only txl256,conv  some of the runs
#     sh bench/trainers/compress.sh --report [--record]                  report of finished runs
#
#     --steps N       steps per run, of 8 segments each (default 5000)
#     --seeds N       seeds 1 to N (default 3)
#     --only LIST     of none,txl128,txl256,conv,mean,max,used,dilated,autoencode
#     --threads N     threads per run (default: all)
#     --dim N         width of the model (default 256)
#     --segment N     length S of a segment (default 128)
#     --precision P   bf16 or f32 (default: bf16 if the processor supports it)
#     --out DIR       logs and results of one set of settings (default build/compress)
#     --keep          keep the models
#     --quick         a tiny model, 20 steps, two seeds: a one-minute test of this script
#     --record        also write the report to bench/results/
#
# Each run is one call of examples/train_compressive.c. It writes NAME.SEED.log, one line
# of JSON (NAME.SEED.json) and its progress (NAME.SEED.err) to DIR. An interrupted script
# resumes with the same command: finished runs are skipped, an unfinished one resumes from
# its last checkpoint. Scripts with the same settings and different --only lists can share
# a DIR. Times are processor seconds. Environment: CC (cc), CFLAGS (-O3), DATA, VALID.
#
# All runs have the same layers, segments, batch, steps, bytes, learning rate and relative
# positions of Transformer-XL, which need no more parameters for a longer memory. txl128
# and txl256 keep S and 2 S rows. The compressed memories keep S rows and compress the
# rows that leave, four to one, into another S rows. Their queries therefore see as many
# keys as those of txl256, for the same cost of attention and memory projection, but reach
# back 5 S instead of 2 S: txl256 is the baseline to beat. (The paper compares the same
# way: memory and compressed memory have half the length each.) txl128 and none show what
# a memory is worth. The table lists the cost of the compression itself.
set -eu
cd "$(dirname "$0")/../.."
CC=${CC:-cc}
layers=4 dim= heads=4 segment= batch=8 ratio=4 steps= seeds= document=8192 lr=0.001
only=none,txl128,txl256,conv,mean,max,used,dilated,autoencode
script=compress.sh out= threads=0 precision= keep= quick= report= record= \
    command="sh bench/trainers/compress.sh"
. bench/trainers/long.sh
while [ $# -gt 0 ]; do
    command="$command $1"
    case $1 in
    --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p;}' bench/trainers/compress.sh; exit 0 ;;
    --quick) quick=1 ;;
    --keep) keep=1 ;;
    --report) report=1 ;;
    --record) record=1 ;;
    --steps|--seeds|--threads|--dim|--segment)
        number "$1" "${2:-}"
        case $1 in
        --steps) steps=$2 ;;
        --seeds) seeds=$2 ;;
        --dim) dim=$2 ;;
        --segment) segment=$2 ;;
        *) threads=$2 ;;
        esac
        command="$command $2"; shift ;;
    --only|--out|--precision)
        word "$1" "${2:-}"
        case $1 in --only) only=$2 ;; --out) out=$2 ;; *) precision=$2 ;; esac
        command="$command $2"; shift ;;
    *) refuse "unknown option $1 (--help)" ;;
    esac
    shift
done
if [ -n "$quick" ]; then
    layers=2 dim=${dim:-32} heads=2 segment=${segment:-16} batch=2 steps=${steps:-20} \
        seeds=${seeds:-2} document=128
    out=${out:-build/compress-quick}
fi
steps=${steps:-5000} seeds=${seeds:-3} dim=${dim:-256} segment=${segment:-128} \
    out=${out:-build/compress}
precision=${precision:-$(usual_precision)}
case $precision in f32|bf16) ;; *) refuse "--precision $precision: f32 or bf16" ;; esac

# The memory of a configuration: sets M, C and options
memory() {
    M=$segment C=0 options="--compress none --aux none"
    case $1 in
    none) M=0; options="--compress none --aux none --memory-layers none" ;;
    txl128) ;;
    txl256) M=$((2 * segment)) ;;
    conv) C=$segment options="--compress conv --aux attention" ;;
    mean|max|used) C=$segment options="--compress $1 --aux none" ;;
    dilated) C=$segment options="--compress dilated --aux attention" ;;
    autoencode) C=$segment options="--compress conv --aux autoencode" ;;
    *) refuse "--only $1: there is no such memory (--help)" ;;
    esac
}
names=
for name in $(echo "$only" | tr , ' '); do
    memory "$name"
    case " $names " in *" $name "*) ;; *) names="$names $name" ;; esac
done
[ -n "$names" ] || refuse "--only $only: no memory is named (--help)"

if [ -z "$report" ]; then
    mkdir -p "$out"
    : "${DATA:=}" "${VALID:=}"
    if [ -n "$quick" ] && [ -z "$DATA$VALID" ]; then      # any text is good enough
        [ -s build/demo.txt ] || sh examples/demo_data.sh build/demo.txt
        head -c 200000 build/demo.txt >"$out/text.train"
        tail -c 20000 build/demo.txt >"$out/text.valid"
        DATA=$out/text.train VALID=$out/text.valid
    fi
    for f in "$DATA" "$VALID"; do
        [ -n "$f" ] && [ -r "$f" ] || refuse "set DATA=FILE (training text)" \
            "and VALID=FILE (validation text): '$f' cannot be read"
    done
    set -- --tokens bytes --nlayers $layers --hid-sz $dim --nheads $heads --block-sz $segment \
        --batch-sz $batch --ratio $ratio --positions xl \
        --recurrence none --final-norm --dropout 0 --optim adam --lr $lr --schedule cosine \
        --lr-warmup $((steps / 50 + 1)) --lr-start 0 --lr-min 0.00001 \
        --grad-clip 0.5 --update-every 1 --eval-every 0 --sample-every 0 --save-every \
        $((steps / 10 + 1)) --log-every 100 --steps "$steps" --precision "$precision"
    settle "$* --eval-positions $document; $(cksum <"$DATA"); $(cksum <"$VALID")"
    mkdir -p "$out/text"
    for f in "train=$DATA" "valid=$VALID"; do
        case ${f#*=} in /*) from=${f#*=} ;; *) from=$PWD/${f#*=} ;; esac
        ln -sf "$from" "$out/text/${f%%=*}.txt"
    done
    build train_compressive
    . bench/machine.sh
    seed=0
    # All configurations of a seed first, so that half of the runs make a useful report.
    while [ "$seed" -lt "$seeds" ]; do
        seed=$((seed + 1))
        for name in $names; do
            run=$out/$name.$seed
            if [ -s "$run.json" ]; then continue; fi
            memory "$name"
            echo "$(date +%H:%M) $name, seed $seed .."
            # The seed sets the initial parameters only: all runs read the same bytes.
            timed "$run" "$out/train_compressive" "$@" $options --dropout 0 --mem $M --cmem $C \
                --seed "$seed" --threads "$threads" --data "$out/text" \
                --checkpoint "$run.safetensors" --eval-positions $document --log "$run.log"
            read -r _ spent _ unknown <"$run.spent"
            log_lost=$(sed -n 's/.*"ratio":\[\([-+0-9.e,]*\)\].*/\1/p' "$run.log" | tail -n 1)
            # The trainer's last lines are "step N: valid bpb X (loss Y)" and the loss by
            # position. The compression loss of the last step is in the log. If the
            # processor time of any part of a run is unknown, so is the time of the run.
            awk -v name="$name" -v seed="$seed" -v steps="$steps" -v M="$M" -v C="$C" \
                -v seconds="$spent" -v unknown="$unknown" -v lost="$log_lost" \
                -v precision="$precision" -v commit="$commit" -v machine="$cpu, $cores cores" '
                / valid bp[bc] / { bpc = $5 }
                /^loss by tokens/ {
                    sub(/.*: /, ""); n = split($0, part, ", ")
                    for (i = 1; i <= n; i++) {
                        split(part[i], v, " ")
                        places = places (i > 1 ? "," : "") "\"" v[1] "\":"
                        places = places sprintf("%.5f", v[2] / log(2))
                    }
                }
                END {
                    if (bpc !~ /^[0-9.]+$/ || places == "") exit 1
                    time = unknown + 0 ? sprintf("\"unknown_times\":%d", unknown) \
                        : sprintf("\"seconds\":%d,\"seconds_per_100_steps\":%.2f", seconds,
                            seconds * 100 / steps)
                    printf "{\"memory\":\"%s\",\"seed\":%d,\"steps\":%d,\"M\":%d,\"C\":%d,",
                        name, seed, steps, M, C
                    printf "\"bpc\":%s,%s,\"precision\":\"%s\",\"commit\":\"%s\",", bpc, time,
                        precision, commit
                    printf "\"machine\":\"%s\",\"lost\":[%s],\"bpc_by_position\":{%s}}\n",
                        machine, lost, places
                }' "$run.txt" >"$run.json.new" || {
                rm -f "$run.json.new"
                echo "compress.sh: $run.txt does not contain the results of a run" >&2
                exit 1
            }
            mv "$run.json.new" "$run.json"
            rm -f "$run.spent"
            [ -n "$keep" ] || rm -f "$run.safetensors"
            sed 's/.*"bpc":\([0-9.]*\),"seconds":\([0-9]*\),"seconds_per_100_steps":\([0-9.]*\).*/'\
'      \1 bits per byte; \2 processor s with evaluation, \3 per 100 steps/
                s/^{.*"bpc":\([0-9.]*\).*/      \1 bits per byte; times incomplete/' "$run.json"
        done
    done
fi

. bench/machine.sh
[ -f "$out/settings" ] || refuse "there are no runs in $out"
# The sizes of the finished runs, whatever the options say.
setting() { sed -n 's/.*--'"$1"' \([0-9]*\) .*/\1/p' "$out/settings"; }
layers=$(setting nlayers) dim=$(setting hid-sz) segment=$(setting block-sz) \
    batch=$(setting batch-sz) ratio=$(setting ratio)
all=
for name in $names; do
    for f in "$out/$name".*.json; do if [ -s "$f" ]; then all="$all $f"; fi; done
done
[ -n "$all" ] || refuse "no run in $out is done"
{
    echo "# Memories of the same cost, $(date +%Y-%m-%d)"
    echo
    echo "- machine: $cpu, $cores cores, ${vector:-no vector flags known}"
    echo "- command: \`$command\`; commit: $commit"
    echo "- settings, checksums and sizes of training and validation text:" \
        "\`$(cat "$out/settings")\`"
    echo
    echo "Bits per byte of the validation text: mean over seeds, with standard deviation and" \
        "range. Keys: keys"
    echo "per query with a full memory; the segment itself counts by half. Attention: forward" \
        "multiply-adds"
    echo "per token for scores, positions and values, and for the keys, values and positions of" \
        "the memory."
    echo "Compression: multiply-adds for new rows, and for the loss that trains the compression."
    echo "Lost: (t - c)^2 / t^2 of the last step, mean over layers."
    echo
    awk -v D="$dim" -v L="$layers" -v S="$segment" -v r="$ratio" -v B="$batch" '
        function text(key) {
            return match($0, "\"" key "\":\"[^\"]*") \
                ? substr($0, RSTART + length(key) + 4, RLENGTH - length(key) - 4) : ""
        }
        function number(key) {
            return match($0, "\"" key "\":[0-9.]*") \
                ? substr($0, RSTART + length(key) + 3, RLENGTH - length(key) - 3) + 0 : 0
        }
        {
            name = text("memory")
            if (!(name in n)) order[++names] = name
            x = number("bpc"); k = ++n[name]
            sum[name] += x; square[name] += x * x; M[name] = number("M"); C[name] = number("C")
            if (/"seconds_per_100_steps"/) {
                time[name] += number("seconds_per_100_steps")
                timed[name]++
            }
            if (k == 1 || x < low[name]) low[name] = x
            if (k == 1 || x > high[name]) high[name] = x
            if (match($0, /"lost":\[[^]]*/)) {
                m = split(substr($0, RSTART + 8, RLENGTH - 8), part, ","); s = 0
                for (i = 1; i <= m; i++) s += part[i]
                if (m) { lost[name] += s / m; known[name]++ }
            }
            if (match($0, /"bpc_by_position":\{[^}]*/)) {
                m = split(substr($0, RSTART + 19, RLENGTH - 19), part, ",")
                for (i = 1; i <= m; i++) {
                    split(part[i], v, ":"); gsub(/"/, "", v[1])
                    if (!(v[1] in place)) { place[v[1]] = ++places; label[places] = v[1] }
                    at[name, v[1]] += v[2]; at2[name, v[1]] += v[2] * v[2]
                }
            }
        }
        function spread(s, q, k) {
            q = q / k - s * s / k / k
            return k > 1 && q > 0 ? sqrt(q * k / (k - 1)) : 0
        }
        END {
            base = "txl256"
            printf "| memory | M | C | reach per layer | keys | attention | compression | seeds |"
            printf " bits per byte | deviation | range | to txl256 | lost |"
            print " processor s per 100 steps |"
            printf "|--------|--:|--:|--------------:|-----:|----------:|------------:|------:|"
            print "------------:|----------:|------:|----------:|-----:|----------------:|"
            for (j = 1; j <= names; j++) {
                a = order[j]; k = n[a]; keys = M[a] + C[a] + S / 2; made = loss = 0
                if (a == "conv" || a == "autoencode") made = D * D
                if (a == "dilated") made = 7 * D * D
                if (a == "conv" || a == "dilated") loss = 2 * D * D / r + 2 * D * (S + S / r)
                if (a == "autoencode") loss = D * D
                attend = L * (3 * D * keys + (M[a] + C[a]) * (2 + 1 / B) * D * D / S) * 1e-6
                printf("| %s | %d | %d | %d | %d | %.2fM |", a, M[a], C[a],
                    M[a] + (C[a] ? r * C[a] : 0), keys, attend)
                printf(" %s | %d | %.4f |",
                    made ? sprintf("%.2fM + %.2fM", L * made * 1e-6, L * loss * 1e-6) : "0",
                    k, sum[a] / k)
                printf(" %s | %s |", k > 1 ? sprintf("%.4f", spread(sum[a], square[a], k)) : "-",
                    k > 1 ? sprintf("%.4f - %.4f", low[a], high[a]) : "-")
                against = (base in n) && a != base
                printf(" %s | %s | %s |\n",
                    against ? sprintf("%+.4f", sum[a] / k - sum[base] / n[base]) : "-",
                    known[a] ? sprintf("%.3f", lost[a] / known[a]) : "-",
                    timed[a] ? sprintf("%.1f", time[a] / timed[a]) : "-")
            }
            printf "\nBits per byte by the number of bytes since an empty memory"
            printf " (mean over seeds, +- deviation):\n\n| memory |"
            for (i = 1; i <= places; i++) printf " %s |", label[i]
            printf "\n|--------|"
            for (i = 1; i <= places; i++) printf "--:|"
            printf "\n"
            for (j = 1; j <= names; j++) {
                a = order[j]
                printf "| %s |", a
                for (i = 1; i <= places; i++) {
                    printf " %.4f", at[a, label[i]] / n[a]
                    if (n[a] > 1) printf " +- %.4f", spread(at[a, label[i]], at2[a, label[i]], n[a])
                    printf " |"
                }
                printf "\n"
            }
        }' $all
} >"$out/report.md"
cat "$out/report.md"
if [ -n "$record" ]; then
    target=$(free_result compress-).md
    cp "$out/report.md" "$target"
    cat $all >"${target%.md}.json"
    echo "written: $target, ${target%.md}.json"
fi
