#!/bin/sh
# turns.sh [--record] COMMIT [TURNS] - is this tree slower than COMMIT? Builds the
# benchmarks and the trainers of both trees (COMMIT in a clone under build/) and runs them
# alternately, TURNS times (9), with one thread: attention (bench.c), recurrence
# (bench_sru.c), and 60 steps of the trainers' demos in processor seconds. Prints the
# minimum of both for each value (a busy machine only increases values), their ratio, and
# the median of the ratios per turn. A ratio below 1 means that this tree is faster.
# --record writes bench/results/DATE-MACHINE-turns.md. Environment: DATA=FILE (text), CC
# (cc), CFLAGS (-O3).
set -eu
cd "$(dirname "$0")/.."
record=
[ "${1:-}" != --record ] || { record=1; shift; }
[ $# -ge 1 ] || { echo "usage: sh bench/turns.sh [--record] COMMIT [TURNS]" >&2; exit 2; }
. bench/machine.sh
here=$commit commit=$(git rev-parse --short "$1") turns=${2:-9}
CC=${CC:-cc} flags="-std=c99 ${CFLAGS:--O3}" work=$PWD/build/turns
rm -rf "$work"; mkdir -p "$work/here" "$work/base"
git clone -q . "$work/tree"
git -C "$work/tree" checkout -q "$commit"
data=${DATA:-$work/demo.txt}
[ -n "${DATA:-}" ] || sh examples/demo_data.sh "$data" > "$work/data.log"

for side in here base; do
    from=.; [ $side = here ] || from=$work/tree
    for p in bench bench_sru train_attn_span train_sru train_compressive train_par; do
        # in bench/ or, in later commits, in a folder of it
        for source in "$from"/bench/$p.c "$from"/bench/*/$p.c "$from"/examples/$p.c; do
            [ ! -f "$source" ] || break
        done
        $CC $flags -pthread "$source" -o "$work/$side/$p" -lm
    done
done

# Prints "what | number | ms" for each time in the tables of a benchmark: what is the text
# at the head of the row, number the head of the column.
numbers() {
    awk -F'|' '/^\|/ { for (i = 1; i <= NF; i++) gsub(/^ +| +$/, "", $i)
        if ($2 ~ /^[-: ]+$/) next
        ms = 0; for (i = 2; i < NF; i++) if ($i ~ /(^| )ms$/) ms = 1
        if (ms) {
            for (i in col) delete col[i]
            for (i = 2; i < NF; i++) if ($i ~ /(^| )ms$/) col[i] = $i
            on = 1
            next
        }
        if (!on || $2 !~ /[a-z(]/) next
        what = $2; if ($3 ~ /[a-z]/) what = what ", " $3
        for (i = 2; i < NF; i++) if ((i in col) && $i ~ /^[0-9.]+$/) print what "|" col[i] "|" $i
        next }
        NF { on = 0 }'
}
cpu() {
    awk '
        NR == 2 {
            for (i = 1; i <= 2; i++) {
                split($i, t, "m")
                s += 60 * t[1] + t[2]
            }
            printf "%.2f\n", s
        }'
}
one() {     # SIDE
    d=$work/$1
    "$d/bench" --only attention --quick --threads 1 | numbers | sed 's/^/attention: /'
    "$d/bench_sru" --only sru-recurrence --quick --threads 1 | numbers | sed 's/^/recurrence: /'
    for f in attn_span sru compressive par; do
        rm -f "$work/run.st"
        printf 'training: 60 steps of the demo, %s|processor s|' $f
        sh -c '"$0" --preset demo --data "$1" --steps 60 --threads 1 --checkpoint "$2" \
            > /dev/null 2>&1; times' "$d/train_$f" "$data" "$work/run.st" | cpu
    done
}
i=0
while [ $i -lt "$turns" ]; do
    i=$((i + 1))
    if [ $((i % 2)) -eq 1 ]; then order="here base"; else order="base here"; fi
    for side in $order; do one $side | sed "s/^/$side|$i|/" >> "$work/all"; done
done

{
    echo "# This tree ($here) and $commit, alternating"
    echo
    echo "\`sh bench/turns.sh $commit $turns\`, $(date +%Y-%m-%d), $cpu, $cores processors," \
        "load $(cut -d' ' -f1 /proc/loadavg 2>/dev/null || echo '?') at the end."
    echo
    echo "| what | number | $commit, least | here, least | ratio | median ratio per turn |"
    echo "|---|---|---:|---:|---:|---:|"
    awk -F'|' '
        {
            key = $3 "|" $4
            if (!(key in seen)) { seen[key] = 1; order[++n] = key }
            v[$1, $2, key] = $5
            if ($2 > turns) turns = $2
            if (!(($1, key) in least) || $5 < least[$1, key]) least[$1, key] = $5
        }
        END {
            for (k = 1; k <= n; k++) {
                key = order[k]
                m = 0
                for (t = 1; t <= turns; t++)
                    if (v["base", t, key] > 0 && v["here", t, key] > 0)
                        r[++m] = v["here", t, key] / v["base", t, key]
                for (a = 2; a <= m; a++)
                    for (b = a; b > 1 && r[b] < r[b - 1]; b--) {
                        x = r[b]
                        r[b] = r[b - 1]
                        r[b - 1] = x
                    }
                if (!m || !(("base", key) in least)) continue
                split(key, p, "|")
                printf "| %s | %s | %.2f | %.2f | %.3f | %.3f |\n", p[1], p[2],
                    least["base", key], least["here", key],
                    least["here", key] / least["base", key],
                    m % 2 ? r[(m + 1) / 2] : (r[m / 2] + r[m / 2 + 1]) / 2
            }
        }' "$work/all"
} > "$work/report.md"
cat "$work/report.md"
[ -z "$record" ] || {
    to=$(free_result "" -turns).md
    cp "$work/report.md" "$to"; echo "written: $to"
}
