#!/bin/sh
# claims.sh [options] - do results of two papers hold for small models and minutes of
# training? Trains on the first 4 MB of enwik8, of which the last tenth is held out. Prints
# a table per paper: means and standard deviations of the seeds.
#
#     span   adaptive attention span (arXiv 1905.07799): learned and fixed spans, after equal
#            numbers of steps and after equal processor time
#     sru    SRU++ (arXiv 2102.12459): attention in no layer, in some and in all of them, and
#            Transformer-XL with as many parameters, by processor time
#
#     DATA=FOLDER sh bench/claims.sh             all missing runs, then the tables
#     DATA=FOLDER sh bench/claims.sh --only span --seeds 1
#     sh bench/claims.sh --report [--record]     tables of finished runs
#
#     --only LIST     of span,sru
#     --seeds N       seeds 1 to N (default 3)
#     --jobs N        concurrent runs, one thread each (default 1); leave a core to each
#     --out DIR       runs and tables (default build/claims)
#     --report        no runs
#     --record        also write bench/results/claims.tsv and claim-span.md, claim-sru.md
#
# A finished run is a line of DIR/runs.tsv. A repeated call runs only what is missing; to
# repeat a run, delete its line. An interrupted run begins again. All runs of span take an
# hour on one core, all runs of sru 70 minutes. The text is FOLDER/enwik8/train.txt or
# FOLDER/enwik/enwik8*, as in bench/learn.sh. Environment: DATA, PROGRAMS (a folder that
# contains the trainers, compiled with -DTR_PROCESSOR_TIME; default: make builds them in
# BUILD/processor_time; BUILD is build unless set).
set -eu
cd "$(dirname "$0")/.."
programs=${PROGRAMS:-${BUILD:-build}/processor_time}
claims="span sru" seeds=3 jobs=1 out=build/claims report= record= one= script=claims.sh
only=$claims
. bench/trainers/long.sh
while [ $# -gt 0 ]; do
    case $1 in
    --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p;}' bench/claims.sh; exit 0 ;;
    --report) report=1 ;;
    --record) record=1 ;;
    --only) word "$1" "${2:-}"; only=$(echo "$2" | tr , ' '); shift ;;
    --seeds) number "$1" "${2:-}"; seeds=$2; shift ;;
    --jobs) number "$1" "${2:-}"; jobs=$2; shift ;;
    --out) word "$1" "${2:-}"; out=$2; shift ;;
    --one)      # SEED LENGTH UNIT TRAINER OPTIONS..: a single run, as this script starts it
        shift
        one=$*
        break ;;
    *) refuse "unknown option $1 (--help)" ;;
    esac
    shift
done
for name in $only; do
    case " $claims " in *" $name "*) ;; *) refuse "--only $name: unknown (--help)" ;; esac
done

# rows CLAIM: trainer and options, what they are. The other settings are the trainers'
# defaults for this text
rows() {
    case $1 in
    span)
        for span in 512 128; do
            echo "attn_span $span_size --attn-span $span|learned, at most $span"
        done
        for span in 512 256 128 64 32; do
            echo "attn_span $span_size --no-adapt-span --attn-span $span|fixed, $span"
        done ;;
    sru)
        echo "sru $sru_size --no-attention|SRU, no attention"
        for every in 6 3 2 1; do
            echo "sru $sru_size --attention-every $every|SRU++, attention in" \
                "$((6 / every)) of 6 layers"
        done
        echo "par --pattern (sf)4 --hid-sz 96 --mem 64|Transformer-XL, 4 layers" ;;
    esac
}
layers=3 width=64      # of span
span_size="--nlayers $layers --hid-sz $width" sru_size="--nlayers 6 --hid-sz 256"

# lengths CLAIM: lengths of its runs
lengths() {
    case $1 in
    span) printf '%s\n' "7000 steps" "60 seconds" ;;
    sru) printf '%s\n' "20 seconds" "60 seconds" "150 seconds" ;;
    esac
}

runs=$out/runs.tsv
mkdir -p "$out"
[ -s "$runs" ] || echo run length seed seconds steps parameters nats span longest commit \
    machine date | tr ' ' '\t' >"$runs"
if [ -n "$one" ]; then
    # shellcheck disable=SC2086     # words
    set -- $one
    seed=$1 length="$2 $3" trainer=$4
    if [ "$3" = steps ]; then
        limit="--steps $2 --eval-every $2"
    else
        limit="--minutes $(awk -v s="$2" 'BEGIN { print s / 60 }')"
    fi
    shift 4
    work=$out/run.$$
    mkdir "$work"
    : >"$work/err"
    trap 'echo "claims.sh: $one failed: $(tail -n 1 "$work/err")" >&2' EXIT
    trap 'exit 130' INT TERM
    # shellcheck disable=SC2086     # options
    "$programs/train_$trainer" --data "$out/text/enwik8" --threads 1 --seed "$seed" \
        --log "$work/log" "$@" $limit 2>"$work/err" >&2
    result=$(held_out "$work/log")
    spent=$(field seconds "$work/log") mean=$(field span_avg "$work/log")
    : "${spent:?the log has no time}"
    result=$(printf '%.2f\t%s\t%s\t%s' "$spent" "$result" "${mean:--}" \
        "$(field span_max "$work/log" | grep . || echo -)")
    . bench/machine.sh
    printf '%s\t%s\t%s\t%s\t%s\t%s\t%s\n' "$trainer $*" "$length" "$seed" "$result" "$commit" \
        "$cpu, $cores cores" "$(date +%Y-%m-%d)" >>"$runs"
    trap - EXIT
    rm -rf "$work"
    exit 0
fi

failed=
if [ -z "$report" ]; then
    [ -n "${DATA:-}" ] || refuse "set DATA=FOLDER with enwik8/train.txt (--help)"
    learn_text enwik8
    for claim in $only; do
        case $claim in
        span) compile train_attn_span ;;
        sru) compile train_sru train_par ;;
        esac
    done
    seed=0
    # All runs of a seed first, the short ones before the long ones.
    while [ "$seed" -lt "$seeds" ]; do
        seed=$((seed + 1))
        for claim in $only; do
            lengths "$claim" | while read -r length; do
                rows "$claim" | cut -d'|' -f1 | while IFS= read -r run; do
                    grep -q "^$run	$length	$seed	" "$runs" || echo "$seed $length $run"
                done
            done
        done
    done >"$out/missing"
    echo "$(($(wc -l <"$out/missing"))) runs are missing" >&2
    [ ! -s "$out/missing" ] ||
        xargs -P "$jobs" -L 1 sh bench/claims.sh --out "$out" --one <"$out/missing" || failed=1
fi

# table CLAIM: the table in Markdown
table() {
    rows "$1" | awk -F'[|\t]' -v claim="$1" -v lengths="$(lengths "$1" | tr '\n' ,)" \
        -v layers=$layers -v width=$width '
        function add(list, x) { return index(list ";", " " x ";") ? list : list "; " x }
        function mean(r, l, column) { return sum[r, l, column] / n[r, l] }
        # means, of losses also their standard deviation
        function cell(r, l, column, scale, digits,    square, deviation) {
            if (!n[r, l]) return " - |"
            if (column == NATS && n[r, l] > 1) {
                square = squares[r, l] - sum[r, l, NATS] * mean(r, l, NATS)
                deviation = square > 0 ? scale * sqrt(square / (n[r, l] - 1)) : 0
                deviation = sprintf(" ± %." digits "f", deviation)
            }
            return sprintf(" %." digits "f%s |", scale * mean(r, l, column), deviation)
        }
        BEGIN { SECONDS = 4; STEPS = 5; PARAMETERS = 6; NATS = 7; SPAN = 8; LONGEST = 9 }
        FILENAME == "-" { order[++rows] = $1; what[$1] = $2; next }
        !($1 in what) || !index("," lengths, "," $2 ",") { next }
        {
            n[$1, $2]++
            for (i = SECONDS; i <= LONGEST; i++) sum[$1, $2, i] += $i
            squares[$1, $2] += $NATS * $NATS
            found[$1] = 1
            machines = add(machines, $11); commits = add(commits, $10); dates = add(dates, $12)
        }
        END {
            if (!machines) exit
            count = split(lengths, l, ",") - 1
            if (claim == "span") {
                printf "| spans | nats per byte after %s | processor seconds | mean span |", l[1]
                printf " longest | attention | nats per byte after %s | steps |\n", l[2]
                print "|---|--:|--:|--:|--:|--:|--:|--:|"
            } else {
                printf "| bits per byte after .. processor seconds | parameters |"
                for (i = 1; i <= count; i++) printf " %d |", l[i]
                printf " steps per second |\n|---|--:|"
                for (i = 1; i <= count; i++) printf "--:|"
                print "--:|"
            }
            for (k = 1; k <= rows; k++) {
                r = order[k]
                if (!found[r]) continue
                printf "| %s |", what[r]
                for (i = 1; i <= count; i++) {
                    if (!n[r, l[i]]) continue
                    if (!fewest || n[r, l[i]] < fewest) fewest = n[r, l[i]]
                    if (n[r, l[i]] > many) many = n[r, l[i]]
                    last = l[i]
                }
                if (claim == "span") {
                    printf "%s%s", cell(r, l[1], NATS, 1, 3), cell(r, l[1], SECONDS, 1, 0)
                    printf "%s%s", cell(r, l[1], SPAN, 1, 0), cell(r, l[1], LONGEST, 1, 0)
                    printf "%s", cell(r, l[1], SPAN, 3 * layers * width / 1000, 0)
                    printf "%s%s\n", cell(r, l[2], NATS, 1, 3), cell(r, l[2], STEPS, 1, 0)
                } else {
                    printf " %.3fM |", mean(r, last, PARAMETERS) / 1e6
                    for (i = 1; i <= count; i++) printf "%s", cell(r, l[i], NATS, 1 / log(2), 3)
                    printf " %.1f |\n", mean(r, last, STEPS) / mean(r, last, SECONDS)
                }
            }
            if (claim == "span") {
                print "\nSpans, in tokens, include the ramp of 32 tokens. Attention: thousands of"
                print "multiply-adds per token, 3 x width x the sum of the mean spans of the layers."
                printf "The rest of the model takes %.0f.\n",
                    (12 * layers * width * width + 256 * width) / 1000
            }
            printf "\nSeeds per value: %s%s.\n", fewest < many ? fewest " to " many : many,
                (many > 1) ? "; ± is their standard deviation" : ""
            printf "Machine: %s; commit: %s; date: %s.\n", substr(machines, 3),
                substr(commits, 3), substr(dates, 3)
        }' - "$runs"
}
for claim in $only; do
    table "$claim" >"$out/claim-$claim.md"
    [ -s "$out/claim-$claim.md" ] || continue
    printf '%s\n\n' "$claim:"
    cat "$out/claim-$claim.md"
    echo
    [ -z "$record" ] || cp "$out/claim-$claim.md" bench/results/
done
[ -z "$record" ] || cp "$runs" bench/results/claims.tsv
[ -z "$failed" ] || { echo "claims.sh: runs failed, see above" >&2; exit 1; }
