#!/bin/sh
# claims.sh - tests bench/claims.sh: the tables of a made-up list of runs, and which runs it
# starts, with programs that only pretend to train. Ends with "N passed, N failed".
cd "$(dirname "$0")/../.." || exit 1
LC_ALL=C; export LC_ALL
T=$(mktemp -d) || exit 1
trap 'rm -rf "$T"' EXIT
. tests/trainers/check.sh
has() { grep -q -e "$2" "$1"; }
# OPTIONS...: runs the script; its output is in $T/out and $T/err
claims() { sh bench/claims.sh --out "$T/runs" "$@" >"$T/out" 2>"$T/err" </dev/null; }
mkdir "$T/runs" "$T/bin" "$T/data" "$T/data/enwik8"
PROGRAMS=$T/bin; export PROGRAMS

# ---- the tables of runs whose means and standard deviations are known by hand: 1.5 and 1.7
# have a deviation of 0.2 / sqrt(2), and ln 2 nats are a bit. Attention takes 3 x 3 x 64
# multiply-adds per token of its mean span
span='attn_span --nlayers 3 --hid-sz 64'
fixed="$span --no-adapt-span --attn-span 512"
sru='sru --nlayers 6 --hid-sz 256'
{
    echo 'run:length:seed:seconds:steps:parameters:nats:span:longest:commit:machine:date'
    echo "$fixed:7000 steps:1:140:7000:9:1.5:512:512:aaa:one:2026-01-01"
    echo "$fixed:7000 steps:2:150:7000:9:1.7:512:512:aaa:one:2026-01-01"
    echo "$fixed:60 seconds:1:59:2300:9:1.8:512:512:aaa:one:2026-01-01"
    echo "$fixed:9 seconds:1:99:1300:9:9.9:512:512:ddd:one:2026-01-01"
    echo "$span --attn-span 512:7000 steps:1:70:7000:9:1.5:40:200:aaa:one:2026-01-02"
    echo "$span --attn-span 512:7000 steps:2:70:7000:9:1.5:60:300:aaa:one:2026-01-02"
    echo "$sru --no-attention:20 seconds:1:50:3000:530000:1.3862944:-:-:bbb:one:2026-01-02"
    echo "$sru --attention-every 3:20 seconds:1:60:600:540000:0.69314718:-:-:bbb:one:2026-01-02"
    echo "$sru --attention-every 3:150 seconds:1:299:2990:540000:0.6:-:-:bbb:one:2026-01-02"
    echo "$sru --attention-every 3:150 seconds:2:301:3010:540000:0.6:-:-:ccc:two:2026-01-02"
} | tr : '\t' >"$T/runs/runs.tsv"
cat >"$T/want" <<'END'
span:

| spans | nats per byte after 7000 steps | processor seconds | mean span | longest | attention | nats per byte after 60 seconds | steps |
|---|--:|--:|--:|--:|--:|--:|--:|
| learned, at most 512 | 1.500 ± 0.000 | 70 | 50 | 250 | 29 | - | - |
| fixed, 512 | 1.600 ± 0.141 | 145 | 512 | 512 | 295 | 1.800 | 2300 |

Spans, in tokens, include the ramp of 32 tokens. Attention: thousands of
multiply-adds per token, 3 x width x the sum of the mean spans of the layers.
The rest of the model takes 164.

Seeds per value: 1 to 2; ± is their standard deviation.
Machine: one; commit: aaa; date: 2026-01-01; 2026-01-02.

sru:

| bits per byte after .. processor seconds | parameters | 20 | 60 | 150 | steps per second |
|---|--:|--:|--:|--:|--:|
| SRU, no attention | 0.530M | 2.000 | - | - | 60.0 |
| SRU++, attention in 2 of 6 layers | 0.540M | 1.000 | - | 0.866 ± 0.000 | 10.0 |

Seeds per value: 1 to 2; ± is their standard deviation.
Machine: one; two; commit: bbb; ccc; date: 2026-01-02.

END
claims --report
check "report: $(cat "$T/err")" [ $? -eq 0 ]
check "the tables: $(diff "$T/want" "$T/out")" cmp "$T/want" "$T/out"
claims --report --only sru
check "one table" [ "$(grep -c : "$T/out") $(grep -c '^span' "$T/out")" = "4 0" ]

# ---- runs. A trainer without spans and one with, which fails for the third seed
cat >"$T/bin/train_sru" <<END
#!/bin/sh
echo "\${0##*/} \$*" >>'$T/calls'
case \$0 in *attn_span) spans=',"span_avg":33.5,"span_max":40' ;; esac
while [ \$# -gt 0 ]; do
    case \$1 in
    --seed) if [ \$2 = 3 ]; then echo broken >&2; exit 1; fi ;;
    --log) log=\$2 ;;
    esac
    shift
done
cat >"\$log" <<LOG
{"event":"start","params":41}
{"event":"train","step":10,"loss":2.6,"seconds":1.25\$spans}
{"event":"train","step":12,"loss":2.5,"seconds":1.5\$spans}
{"event":"eval","split":"valid","loss":2.5,"bpb":3.6,"step":12,"tokens":3}
LOG
END
chmod +x "$T/bin/train_sru"
cp "$T/bin/train_sru" "$T/bin/train_attn_span"
cp "$T/bin/train_sru" "$T/bin/train_par"
awk 'BEGIN { for (i = 0; i < 399999; i++) print "abcdefghi" }' >"$T/data/enwik8/train.txt"
DATA=$T/data; export DATA
claims --seeds 1
check "a short text: refused: $(cat "$T/err")" \
    [ $? -eq 2 -a "$(grep -c 'less than 4000000' "$T/err")" -eq 1 ]
awk 'BEGIN { for (i = 0; i < 2; i++) print "abcdefghi" }' >>"$T/data/enwik8/train.txt"
claims --seeds 1 --jobs 2
check "runs: $(cat "$T/err")" [ $? -eq 0 ]
check "existing runs are not repeated" [ "$(wc -l <"$T/calls")" -eq 26 ]
text=$T/runs/text/enwik8
check "the text" \
    [ "$(wc -c <"$text/train.txt") $(wc -c <"$text/valid.txt")" = "3600000 400000" ]
check "equal steps" has "$T/calls" "^train_attn_span --data .*/text/enwik8 --threads 1 --seed 1 \
--log .*/log --nlayers 3 --hid-sz 64 --attn-span 128 --steps 7000 --eval-every 7000"
check "equal time" has "$T/calls" \
    "^train_par .* --pattern (sf)4 --hid-sz 96 --mem 64 --minutes 1\$"
check "a result with spans" has "$T/runs/runs.tsv" \
    "^$span --no-adapt-span --attn-span 32	7000 steps	1	1.50	12	41	2.50000	33.5	40	"
check "a result without" has "$T/runs/runs.tsv" \
    "^$sru --attention-every 1	60 seconds	1	1.50	12	41	2.50000	-	-	"
rm "$T/calls"
claims --seeds 1
check "nothing is missing" [ "$(cat "$T/err")" = "0 runs are missing" -a ! -e "$T/calls" ]
sed -i.bak '/^par.*150 seconds/d' "$T/runs/runs.tsv"
claims --seeds 1 --only sru
check "only the missing run" [ "$(wc -l <"$T/calls")" -eq 1 ]
check "the missing run" has "$T/calls" '^train_par .* --minutes 2.5$'
cp "$T/runs/runs.tsv" "$T/before"
claims --seeds 3 --only span
check "runs that fail: exit code and message" \
    [ $? -eq 1 -a "$(grep -c '^claims.sh: 3 .* failed: broken$' "$T/err")" -eq 14 ]
check "runs that fail are not added" [ "$(grep -c '	3	' "$T/runs/runs.tsv")" -eq 0 ]
check "the others are" \
    [ $(($(wc -l <"$T/runs/runs.tsv") - $(wc -l <"$T/before"))) -eq 12 ]

# ---- refused
for bad in "--only sr" "--seeds 0" "--seeds x" "--jobs" "--out -x" "--what"; do
    claims $bad
    check "$bad: refused" [ $? -eq 2 -a "$(grep -c '^claims.sh: ' "$T/err")" -eq 1 ]
done
DATA= claims
check "no DATA: refused" [ $? -eq 2 ]
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
