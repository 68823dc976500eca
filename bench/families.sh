#!/bin/sh
# families.sh [options] - which model family? Compares the default models of the four
# trainers for 2.5 minutes on 1 MB of text, with one thread: size, quality after equal
# processor time (from bench/results/learn.tsv, which learn.sh writes), speed of training,
# time per generated token, memory. Values are medians of interleaved rounds.
#
#     DATA=FOLDER sh bench/families.sh [--record]
#
#     --rounds N      rounds (default 3)
#     --out DIR       checkpoints and report (default build/families)
#     --record        also write bench/results/families.md
#
# FOLDER/tinyshakespeare/input.txt is the text of bench/learn.sh. Environment: DATA,
# PROGRAMS (a folder that contains the trainers, compiled with -DTR_PROCESSOR_TIME; default:
# make builds them in BUILD/processor_time; BUILD is build unless set).
set -eu
cd "$(dirname "$0")/.."
programs=${PROGRAMS:-${BUILD:-build}/processor_time}
rounds=3 out=build/families record= script=families.sh
. bench/trainers/long.sh
while [ $# -gt 0 ]; do
    case $1 in
    --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p;}' bench/families.sh; exit 0 ;;
    --record) record=1 ;;
    --rounds) number "$1" "${2:-}"; rounds=$2; shift ;;
    --out) word "$1" "${2:-}"; out=$2; shift ;;
    *) refuse "unknown option $1 (--help)" ;;
    esac
    shift
done
families="sru attn_span par compressive"
text=${DATA:-}/tinyshakespeare/input.txt
[ -r "$text" ] || refuse "set DATA=FOLDER with tinyshakespeare/input.txt (--help)"
mkdir -p "$out"
for family in $families; do
    [ -n "${PROGRAMS:-}" ] ||
        make -s BUILD="$programs" CPPFLAGS="${CPPFLAGS:-} -DTR_PROCESSOR_TIME" \
            "$programs/train_$family"
done

# generate FAMILY N: sets spent to the processor time, in hundredths of a second
generate() {
    seconds
    began=$now
    "$programs/train_$1" --checkpoint "$out/$1.safetensors" --threads 1 --no-train \
        --generate "$2" --prompt A >"$out/generated" 2>"$out/err"
    seconds
    spent=$((now - began))
}

# Each round trains 300 steps with the sizes of a run of 2.5 minutes, then generates.
: >"$out/values"
round=0
while [ $round -lt "$rounds" ]; do
    round=$((round + 1))
    for family in $families; do
        echo "round $round of $rounds: train_$family" >&2
        rm -f "$out/$family.safetensors" "$out/log"
        "$programs/train_$family" --data "$text" --threads 1 --minutes 2.5 --plan 0:300 \
            --eval-blocks 1 --checkpoint "$out/$family.safetensors" --log "$out/log" \
            >"$out/generated" 2>"$out/err" ||
            refuse "train_$family failed: $(tail -n 1 "$out/err")"
        generate $family 1000
        short=$spent
        generate $family 21000
        echo "$family $(field params "$out/log") $(field tokens_per_s "$out/log")" \
            "$(field peak_bytes "$out/log") $((spent - short))" >>"$out/values"
    done
done
for family in $families; do
    "$programs/train_$family" --data "$text" --threads 1 --minutes 2.5 --dry-run |
        sed -n "s/^\([0-9.]* [KM]\)iB for states and memories of \([0-9]*\) streams.*/\1 \2/p" |
        sed "s/^/stream $family /"
done >>"$out/values"

. bench/machine.sh
awk -v families="$families" '
    function median(list,   v, n, i, j, x) {
        n = split(list, v, " ")
        for (i = 2; i <= n; i++)
            for (j = i; j > 1 && v[j - 1] + 0 > v[j] + 0; j--) {
                x = v[j]; v[j] = v[j - 1]; v[j - 1] = x
            }
        return n % 2 ? v[(n + 1) / 2] : (v[n / 2] + v[n / 2 + 1]) / 2
    }
    function nats(family, budget,   k) {
        k = family SUBSEP budget
        return n[k] ? sprintf("%.3f", sum[k] / n[k]) : "-"
    }
    FILENAME ~ /learn.tsv$/ {
        if ($2 == "tinyshakespeare") { n[$1, $4]++; sum[$1, $4] += $8 }
        next
    }
    $1 == "stream" { stream[$2] = $3 * ($4 == "M" ? 1024 : 1) / $5; next }
    {
        params[$1] = $2
        speed[$1] = speed[$1] " " $3
        peak[$1] = peak[$1] " " $4
        token[$1] = token[$1] " " $5
    }
    END {
        count = split(families, family, " ")
        print "| trainer | parameters | nats per byte after 60 s | after 300 s |" \
            " training, tokens/s | generation, µs per token | training memory, MB |" \
            " memory of a stream, KB |"
        print "|---|--:|--:|--:|--:|--:|--:|--:|"
        for (i = 1; i <= count; i++) {
            f = family[i]
            printf "| `train_%s` | %.2fM | %s | %s | %.0f | %.0f | %.0f | %.0f |\n", f,
                params[f] / 1e6, nats(f, 60), nats(f, 300), median(speed[f]),
                median(token[f]) * 1e4 / 20000, median(peak[f]) / 1e6, stream[f] * 1.024
        }
    }' FS='\t' bench/results/learn.tsv FS=' ' "$out/values" >"$out/families.md"
printf '\nRounds: %s. Machine: %s, %s cores; commit: %s; date: %s.\n' "$rounds" "$cpu" "$cores" \
    "$commit" "$(date +%Y-%m-%d)" >>"$out/families.md"
cat "$out/families.md"
[ -z "$record" ] || cp "$out/families.md" bench/results/families.md
