#!/bin/sh
# ranks.sh [--record] [options] - measures what MPI ranks gain on this machine. Trains a
# model of each family as one process with one thread, as one process with all threads,
# and as ranks with one thread each. The runs are interleaved. Prints the median tokens
# per second from the logs. Takes three minutes per family on two cores.
#
#   --ways "1x1 1x2 2x1"   ranks x threads (default: 1x1, 1 x all cores, all cores x 1)
#   --rounds N             rounds; each way runs once per round (default 7)
#   --steps N              steps per run; the first third is not timed (default 15)
#   --only FAMILY,..       of attn_span, sru, compressive, par
#   --count                print the counted model of GPUs instead (ranks_model.c)
#   --record               also write bench/results/ranks-DATE-MACHINE.md, with --count
#                          bench/results/ranks-model.md
#
# Environment: DATA (a text; default: from examples/demo_data.sh), MPICC (mpicc), MPIRUN
# (mpirun --bind-to none --oversubscribe), CC (cc), CFLAGS (-O3).
set -eu
cd "$(dirname "$0")/../.."
command="sh bench/trainers/ranks.sh${1:+ $*}"
refuse() { echo "ranks.sh: $*" >&2; exit 2; }
. bench/machine.sh
record= count= ways="1x1 1x$cores ${cores}x1" rounds=7 steps=15 only=attn_span,sru,compressive,par
[ "$cores" -gt 1 ] || ways="1x1 2x1"
while [ $# -gt 0 ]; do
    case $1 in
    --record) record=1 ;;
    --count) count=1 ;;
    --ways | --rounds | --steps | --only)
        [ $# -gt 1 ] || refuse "$1: expected a value"
        case $1 in
        --ways) ways=$2 ;;
        --rounds) rounds=$2 ;;
        --steps) steps=$2 ;;
        --only) only=$2 ;;
        esac
        shift ;;
    *) sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
    esac
    shift
done
for n in "$rounds" "$steps"; do
    case $n in
    '' | *[!0-9]* | 0) refuse "--rounds, --steps: expected a whole number above 0, got '$n'" ;;
    esac
done
[ "$steps" -ge 3 ] || refuse "--steps: expected at least 3, got $steps"
for way in $ways; do
    case $way in
    *[!0-9x]* | x* | *x | *x*x* | 0x* | *x0)
        refuse "--ways: expected RANKSxTHREADS, as in 2x1, got '$way'" ;;
    *x*) ;;
    *) refuse "--ways: expected RANKSxTHREADS, as in 2x1, got '$way'" ;;
    esac
done
CC=${CC:-cc} MPICC=${MPICC:-mpicc} work=build/ranks
flags="-std=c99 ${CFLAGS:--O3}"
mkdir -p "$work"

if [ -n "$count" ]; then
    $CC -std=c99 -O2 bench/trainers/ranks_model.c -o "$work/ranks_model" -lm
    $CC $flags -pthread examples/train_attn_span.c -o "$work/train_attn_span" -lm
    {
        echo "# Data parallel training on GPUs, counted, $(date +%Y-%m-%d)"
        echo
        echo "- nothing was measured: no GPU and no network were used"
        echo "- command: \`$command\`"
        echo "- commit: $commit"
        echo
        "$work/ranks_model" --trainer "$work/train_attn_span"
    } > "$work/model.md"
    cat "$work/model.md"
    if [ -n "$record" ]; then
        cp "$work/model.md" bench/results/ranks-model.md
        echo "written: bench/results/ranks-model.md"
    fi
    exit 0
fi

command -v "$MPICC" > /dev/null 2>&1 ||
    refuse "there is no $MPICC: set MPICC, or install an MPI (Debian: libopenmpi-dev, openmpi-bin)"
MPIRUN=${MPIRUN:-mpirun --bind-to none --oversubscribe}
data=${DATA:-$work/demo.txt}
[ -n "${DATA:-}" ] || [ -s "$data" ] || sh examples/demo_data.sh "$data"
[ -r "$data" ] || refuse "DATA: $data cannot be read"

# options FAMILY: a model whose step takes a few tenths of a second on one core
options() {
    case $1 in
    attn_span) echo --preset enwik8_small --batch-sz 4 --block-sz 128 ;;
    sru) echo --preset reference --batch-sz 4 ;;
    compressive) echo --preset demo --batch-sz 64 ;;
    par) echo --preset demo-found --batch-sz 48 ;;
    *) refuse "--only: there is no family '$1': attn_span, sru, compressive, par" ;;
    esac
}
families=$(echo "$only" | tr , ' ')
for f in $families; do
    options "$f" > /dev/null
    OMPI_CC=$CC MPICH_CC=$CC $MPICC $flags -DSEQTX_MPI -pthread "examples/train_$f.c" \
        -o "$work/train_$f" -lm
done
# number KEY: prints the number of KEY in the first line of the log
number() { head -n 1 "$log" | sed -n 's/.*"'"$1"'":\([-+0-9.e]*\)[,}].*/\1/p'; }
third=$((steps / 3))
# one FAMILY WAY: prints tokens/s, loss of the last step, parameters, tokens per step
one() {
    log=$work/log.jsonl ranks=${2%x*} threads=${2#*x}
    rm -f "$log"
    run="$work/train_$1 $(options "$1") --data $data --threads $threads --steps $steps"
    run="$run --log-every 1 --eval-every 1000000 --eval-blocks 1 --log $log"
    [ "$ranks" = 1 ] || run="$MPIRUN -np $ranks $run"
    $run > "$work/out" 2>&1 < /dev/null ||
        { tail -n 5 "$work/out" >&2; echo "ranks.sh: failed: $run" >&2; exit 1; }
    B=$(number batch-sz) T=$(number block-sz)
    grep '"event":"train"' "$log" |
        awk -v from="$third" -v to="$steps" -v each="$((B * T))" -v params="$(number params)" '
        function get(key) {
            return match($0, "\"" key "\":[-+0-9.e]+") \
                ? substr($0, RSTART + length(key) + 3, RLENGTH - length(key) - 3) + 0 : "?"
        }
        get("step") == from { began = get("seconds") }
        get("step") == to {
            if (get("seconds") > began)
                print each * (to - from) / (get("seconds") - began), get("loss"), params, each
        }'
}
rm -f "$work/all"
round=0
while [ "$round" -lt "$rounds" ]; do
    round=$((round + 1))
    for f in $families; do
        order=$ways
        [ $((round % 2)) = 1 ] ||
            order=$(for way in $ways; do echo "$way"; done | sed '1!G;h;$!d' | tr '\n' ' ')
        for way in $order; do
            got=$(one "$f" "$way")
            [ -n "$got" ] || { echo "ranks.sh: no times in the log of $f, $way" >&2; exit 1; }
            echo "$f $way $got" >> "$work/all"
            echo "round $round of $rounds: $f $way: $got" >&2
        done
    done
done

{
    echo "# Ranks and threads, $(date +%Y-%m-%d)"
    echo
    echo "- machine: $cpu, $cores cores, $vector"
    echo "- compiler: $($CC --version | head -n 1); $flags;" \
        "$(mpirun --version 2>/dev/null | head -n 1)"
    echo "- command: \`$command\`; load $(cut -d' ' -f1 /proc/loadavg 2>/dev/null || echo '?')" \
        "at the end"
    echo "- commit: $commit"
    echo
    echo "Training tokens per second in f32 over the last two thirds of $steps steps, medians of" \
        "$rounds interleaved rounds."
    echo "Against one: the median of the rounds' ratios to the first way. Loss: of the last step;" \
        "ranks sum in another order."
    echo "A way is void if its loss differs from that of the first way by more than 1e-3."
    echo
    echo "| model | options | parameters | tokens per step | ranks x threads | tokens/s | least |" \
        "most | against one | loss |"
    echo "|---|---|--:|--:|---|--:|--:|--:|--:|--:|"
    for f in $families; do
        first=1
        for way in $ways; do
            awk -v f="$f" -v way="$way" -v base="${ways%% *}" \
                -v name="$([ -z "$first" ] || echo "$f | \`$(options "$f")\`")" '
                function median(v, n,    a, b, x) {
                    for (a = 2; a <= n; a++) for (b = a; b > 1 && v[b] < v[b - 1]; b--) {
                        x = v[b]
                        v[b] = v[b - 1]
                        v[b - 1] = x
                    }
                    return n % 2 ? v[(n + 1) / 2] : (v[n / 2] + v[n / 2 + 1]) / 2
                }
                $1 != f { next }
                $2 == base { one[++m] = $3; truth = $4 }
                $2 == way { v[++n] = $3; loss = $4; params = $5; each = $6 }
                END { for (i = 1; i <= n; i++) r[i] = v[i] / one[i]
                    mid = median(v, n); far = loss > truth ? loss - truth : truth - loss
                    printf "| %s | %s | %s | %s | %.0f | %.0f | %.0f | %.2f | %.5f%s |\n",
                        name == "" ? " | " : name, name == "" ? "" : params, name == "" ? "" : each,
                        way, mid, v[1], v[n],
                        median(r, n), loss, (far > 1e-3 ? ", void" : "") }' "$work/all"
            first=
        done
    done
} > "$work/report.md"
cat "$work/report.md"
[ -n "$record" ] || exit 0
to=$(free_result ranks-).md
cp "$work/report.md" "$to"
echo "written: $to"
