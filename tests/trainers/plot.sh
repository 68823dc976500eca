#!/bin/sh
# plot.sh - tests build/plot: coordinates of tiny logs that are known by hand, resumed
# runs, several runs, all panels, bad input. Ends with "N passed, N failed".
. "$(dirname "$0")/programs.sh"
plot=$build/plot
draws() { # WHAT PICTURE ARGUMENTS...: it is drawn, without a word, and well-formed
    what=$1 picture=$2; shift 2
    rm -f "$picture"
    "$plot" "$@" -o "$picture" >out 2>err
    check "$what: drawn: $(cat err)" [ $? -eq 0 -a ! -s out -a ! -s err ]
    check "$what: well-formed" xml "$picture"
}
# FILE N: the points of the Nth line
line() { grep '<polyline' "$1" | sed -n "$2"'s/.*points="\([^"]*\)".*/\1/p'; }
has() { grep -q "$2" "$1"; }
train() { echo "{\"event\":\"train\",\"step\":$1,\"loss\":$2,\"bpb\":$2${3:+,\"seconds\":$3}}"; }
start='{"event":"start","config":{"preset":null,"nlayers":2,"batch-sz":2,"block-sz":10}'
start=$start',"params":3023658}'

# ---- coordinates computed by hand: steps 0 .. 400 are at 53 .. 885. The values 8, 6, 4, 3
# and a margin of a twentieth of 8 - 3 at either end: 2.75 .. 8.25 are at 308 .. 92
{ echo "$start"; train 100 8; train 200 6; train 300 4; train 400 3; } > four.jsonl
draws "four records" four.svg four.jsonl
check "the line" [ "$(line four.svg 1)" = "261,101.8 469,180.4 677,258.9 885,298.2" ]
check "exactly one line" [ "$(grep -c '<polyline' four.svg)" -eq 1 ]
check "no panel by time without times" [ "$(grep -c 'by time' four.svg)" -eq 0 ]
check "round ticks" \
    [ "$(sed -n 's/.*<text x="[0-9.]*" y="321">\(.*\)<.text>/\1/p' four.svg | tr '\n' ' ')" \
    = "0 100 200 300 400 " ]
check "the title names the run, its parameters and its last step" \
    has four.svg '>four.jsonl</tspan>, 3.02M parameters, step 400<'
check "the log may follow the options" "$plot" -o again.svg four.jsonl
check "the same picture" cmp four.svg again.svg
draws "a logarithmic axis" log.svg four.jsonl --log-x
# log 2 / log 4 is a half; log 3 / log 4 is 0.792
check "a logarithmic axis: points" \
    [ "$(line log.svg 1)" = "53,101.8 469,180.4 712.3,258.9 885,298.2" ]
# time of a run without a clock: 2 x 10 tokens per step and 10 per second make 2 seconds per
# step; 0 .. 8 seconds are at 500 .. 885
{ echo "$start"; for i in 1 2 3 4; do train $i $i |
    sed 's/}$/,"tokens_per_s":10}/'; done; } > rate.jsonl
draws "a rate" rate.svg rate.jsonl
check "time from the rate" \
    [ "$(line rate.svg 2 | tr ' ' '\n' | cut -d, -f1 | tr '\n' ' ')" = "596.3 692.5 788.8 885 " ]
check "the axis says so" has rate.svg 'seconds of wall time (from tokens per second)'
# means of three: 1 2 3 4 5 6 9 9 9 -> 1 2 3 4 5 6.67 8 9 9, of 0.6 .. 9.4
{ echo "$start"; i=0; for v in 1 2 3 4 5 6 9 9 9; do i=$((i + 1)); train $i $v; done; } > nine.jsonl
draws "means" means.svg nine.jsonl --smooth 3
check "faint records and their means" \
    [ "$(grep -c '<polyline.*stroke-opacity="0.3"' means.svg)" -eq 1 \
    -a "$(grep -c '<polyline' means.svg)" -eq 2 ]
check "means: points" \
    [ "$(line means.svg 2 | tr ' ' '\n' | sed -n '1p;6p;7p;8p' | tr '\n' ' ')" \
    = "145.4,298.2 607.7,159.1 700.1,126.4 792.6,101.8 " ]
# an outlier at the first of many steps is cut off: the axis ends far below 1000
{ echo "$start"; train 1 1000; i=1; while [ $i -lt 120 ]; do i=$((i + 1)); train $i \
    $((3 + i % 2)); done; } > wild.jsonl
draws "an outlier" wild.svg wild.jsonl --smooth 1
check "the outlier is cut off" \
    [ "$(line wild.svg 1 | cut -d' ' -f1 | cut -d, -f2 | cut -d. -f1)" -lt 0 ]
check "the rest fills the panel" \
    [ "$(line wild.svg 1 | tr ' ' '\n' | sed 1d | cut -d, -f2 | sort -u | tr '\n' ' ')" \
    = "101.8 298.2 " ]

# ---- one record is a dot; the names of other programs; logs without times or steps
{ echo "$start"; train 100 8; } > single.jsonl
draws "one record" single.svg single.jsonl
check "one record: a dot" [ "$(grep -c '<circle' single.svg)" -eq 1 ]
for name in val validation dev eval; do
    { cat four.jsonl; printf '{"event":"eval","split":"%s","loss":1,"bpb":5,"step":200}\n' $name
    } > named.jsonl
    draws "split $name" named.svg named.jsonl
    check "split $name: valid" has named.svg 'valid bits per byte 5'
done
"$plot" rate.jsonl four.jsonl -o untimed.svg 2> err
check "a log without times is named: $(cat err)" \
    [ "$(cat err)" = 'plot: four.jsonl: no "seconds", so it is not in the panel by time' ]
check "and counted" has untimed.svg '>seconds of wall time.*; without 1 run<'
sed 's/"step":[0-9]*,//' four.jsonl > stepless.jsonl
"$plot" stepless.jsonl -o stepless.svg 2> err
check "no steps: $(cat err)" \
    [ $? -eq 2 -a "$(grep -c 'stepless.jsonl: the training .* have no "step"' err)" -eq 1 ]
{ cat four.jsonl; sed -n 2p stepless.jsonl; } > lacks.jsonl
"$plot" lacks.jsonl -o lacks.svg 2> err
check "one line without a step: $(cat err)" \
    [ "$(cat err)" = 'plot: lacks.jsonl: skipped 1 line without a "step", the first is line 6' ]
for cell in '"sru++","attention":true' '"sru++","attention":false' '"sru"'; do
    sed "s/\"preset\":null/\"cell\":$cell/" four.jsonl > cell.jsonl
    draws "$cell" cell.svg cell.jsonl
    case $cell in *true) title='SRU++' ;; *) title='SRU' ;; esac
    check "$cell: $title" has cell.svg ">$title<"
done

# ---- resumed: after step 2 of 4; the clock restarts
{ echo "$start"; train 1 9 10; train 2 8 20; train 3 1 30; train 4 1 40
  echo '{"event":"resume","step":2,"config":{}}'
  train 3 7 5
  train 4 6 15
  train 5 5 25
  } > resumed.jsonl
draws "a resumed run" resumed.svg resumed.jsonl
check "each step once; repeated steps replace the earlier ones" \
    [ "$(line resumed.svg 1)" = "130,101.8 207,150.9 284,200 361,249.1 438,298.2" ]
check "time continues after the resumption" \
    [ "$(line resumed.svg 2 | tr ' ' '\n' | cut -d, -f1 | tr '\n' ' ')" \
    = "585.6 671.1 713.9 799.4 885 " ]
# the same without the record of the resumption
grep -v resume resumed.jsonl > lost.jsonl
draws "a lost resumption" lost.svg lost.jsonl
check "a lost resumption is detected by its steps and its clock" \
    [ "$(line lost.svg 1) $(line lost.svg 2)" = "$(line resumed.svg 1) $(line resumed.svg 2)" ]
{ cat four.jsonl; echo "$start"; train 100 5; train 200 4; } > twice.jsonl
draws "two beginnings" twice.svg twice.jsonl
check "two beginnings are two runs" [ "$(grep -c '<polyline' twice.svg)" -eq 2 ]
check "with two names" has twice.svg '>twice.jsonl (2)<'
{ echo "$start"; cat four.jsonl; } > retry.jsonl
draws "a beginning without a step" retry.svg retry.jsonl
check "a beginning without a step is no run" \
    [ "$(grep -c 'retry.jsonl' retry.svg)" -eq 1 -a "$(line retry.svg 1)" = "$(line four.svg 1)" ]

# ---- the log of another program, with losses in nats, and ours share a panel
other() { # STEP LOSS SECONDS
    echo "{\"event\":\"train\",\"step\":$1,\"loss\":$2,\"seconds\":$3}"
}
ours() {
    echo "{\"event\":\"train\",\"step\":$1,\"loss\":$2,\"bpb\":$3,\"seconds\":$4}"
}
{ other 100 3 1; other 200 2 2; } > other.jsonl
{ echo "$start"; ours 100 3 4.3281 1; ours 200 2 2.8854 2
  echo '{"event":"eval","split":"valid","loss":2.5,"bpb":3.6067,"step":200,"tokens":5}'
  } > ours.jsonl
draws "ours and another" shared.svg ours.jsonl other.jsonl
check "one panel by step, in nats" [ "$(grep -c '>loss, nats per token<' shared.svg)" -eq 1 ]
check "and none in bits" [ "$(grep -c '>bits per byte' shared.svg)" -eq 0 ]
check "the same curve" [ "$(line shared.svg 1)" = "$(line shared.svg 2)" ]
check "the evaluation, in nats" has shared.svg 'valid loss, nats per token 2.5'
draws "ours alone" alone.svg ours.jsonl
check "ours alone: in bits" has alone.svg '>bits per byte<'
{ echo "$start"; train 100 3 1 | sed 's/"loss":3,//'; train 200 2 2 | sed 's/"loss":2,//'
  } > bits.jsonl
draws "bits without losses" apart.svg bits.jsonl other.jsonl
check "bits without losses: their own panel" has apart.svg '>bits per byte<'

# ---- evaluations: dots at their steps. Of two at one step the later one counts; one that
# is logged late is drawn in order
evaluated() {
    echo "{\"event\":\"eval\",\"split\":\"$1\",\"loss\":1,\"bpb\":$3,\"step\":$2,\"tokens\":5}"
}
{
    cat four.jsonl
    evaluated valid 200 5
    evaluated valid 400 5
    evaluated valid 400 4
    evaluated test 400 3
    evaluated valid 300 4
} > evaluated.jsonl
draws "evaluations" evaluated.svg evaluated.jsonl
check "evaluations: points" [ "$(line evaluated.svg 2)" = "469,219.6 677,258.9 885,258.9" ]
check "one dot per evaluation" [ "$(grep -c '<circle' evaluated.svg)" -eq 3 ]
check "a diamond for the test" [ "$(grep -c 'l4 4 -4 4' evaluated.svg)" -eq 1 ]
check "the title has the last evaluation" \
    has evaluated.svg 'valid bits per byte 4, test bits per byte 3'
grep eval evaluated.jsonl > alone.jsonl
draws "evaluations alone" alone.svg alone.jsonl
check "evaluations alone: the last step" has alone.svg '>alone.jsonl</tspan>, step 400, valid'
check "evaluations alone: the caption" has alone.svg '>Evaluations only<tspan'
draws "steps that are seconds" axis.svg alone.jsonl --axis 'a < b seconds'
check "steps that are seconds: the axis" has axis.svg '^<text.*>a &lt; b seconds</text>'
check "steps that are seconds: the title" has axis.svg ', 400 a &lt; b seconds, valid'

# ---- all panels, several runs of different kinds
{ echo '{"event":"start","config":{"nlayers":2,"nheads":2,"adapt-span":true},"params":12}'
  for i in 1 2 3; do
      form='{"event":"train","step":%d,"loss":3,"bpb":4,"lr":0.1,"grad_norm":2,"tokens_per_s":7'
      form=$form',"seconds":%d,"span_avg":9,"spans":[0,16,32,%d]}\n'
      printf "$form" "$i" "$i" "$((16 * i))"
  done; } > span.jsonl
{ echo '{"event":"start","config":{"pattern":"search"}}'
  for i in 1 2 3; do
      form='{"event":"train","step":%d,"ppl":%d,"tau":0.%d,"latency":null'
      printf "$form"',"pi":[0.5,0.25,0.25,1,0,0]}\n' "$i" "$((300 / i))" "$i"
  done; } > par.jsonl
{ echo '{"event":"start","config":{"cmem":32,"nlayers":3,"memory-layers":"2,3"}}'
  for i in 1 2 3; do
      printf '{"event":"train","step":%d,"loss":3,"bpb":4,"aux":[0.1,0.2],"ratio":[0.4,0.%d]}\n' \
          "$i" "$i"
  done; } > comp.jsonl
draws "spans" span.svg span.jsonl
for panel in 'bits per byte<' 'bits per byte by time' 'learning rate' 'tokens per second' \
    'gradient norm' 'mean span' 'spans of the heads' '2 heads in each'; do
    check "a panel: $panel" has span.svg "$panel"
done
check "the highest span is yellow, the lowest violet: first head, whole width" \
    has span.svg 'stroke="#440154" d="M0 0.5h185'
check "the fourth head rises in thirds" has span.svg 'stroke="#fde725" d="M124 3.64h61'
draws "search" par.svg par.jsonl
check "perplexity" has par.svg '>perplexity<'
check "blocks" [ "$(grep -c '>block [12]<' par.svg)" -eq 2 ]
check "probabilities of a half and three quarters" \
    [ "$(sed -n 's/.*<polygon.* \([^ ]*\) [^ ]*"\/>/\1/p' par.svg | cut -d, -f2 | awk '
        NR == 1 { a = $1 } NR == 2 { print $1 - a }')" = 16 ]
draws "compression" comp.svg comp.jsonl
check "compression: layers" has comp.svg '>layer 2<.*>layer 3<\|>layer 3<'
check "compression: lines" [ "$(grep -c '<polyline' comp.svg)" -eq 5 ]
"$plot" span.jsonl par.jsonl comp.jsonl four.jsonl --title 'a < b & "c"' -o all.svg 2> err
check "all of them: only one has times" [ "$(grep -c 'no "seconds"' err)" -eq 3 ]
check "all of them: well-formed" xml all.svg
check "all panels" \
    [ "$(grep -c -e 'bits per byte<' -e '>perplexity<' -e 'spans of the heads' \
        -e 'probabilities of each block' -e 'compression by layer' all.svg)" -ge 5 ]
check "one colour per run" \
    [ "$(sed -n 's/^<path d="M14 .*stroke="\(#[0-9A-F]*\)".*<text.*/\1/p' all.svg | sort -u |
    wc -l)" -eq 4 ]
mkdir a b; cp span.jsonl a/run.jsonl; cp span.jsonl b/run.jsonl
draws "two of one name" names.svg a/run.jsonl b/run.jsonl
check "equal names get their directories" has names.svg '>a/run.jsonl<'
odd=$(printf 'x<&">\377\001.jsonl'); cp four.jsonl "$odd"
draws "an odd name" odd.svg "$odd"

# ---- pipes
"$plot" - -o pipe.svg < four.jsonl
check "from a pipe" \
    [ "$(sed 's/standard input/four.jsonl/' pipe.svg | cksum)" = "$(cksum < four.svg)" ]
"$plot" four.jsonl -o - > stdout.svg
check "to a pipe" cmp stdout.svg four.svg
"$plot" four.jsonl -o /dev/full 2>err; rc=$?
[ ! -e /dev/full ] || check "a full disk: $(cat err)" [ $rc -eq 2 -a "$(wc -l < err)" -eq 1 ]

# ---- damaged lines and values that are not numbers
{ sed 2q four.jsonl; echo 'no JSON'; echo '{"event":"train","step":150,"bpb":'; printf \
    'a\000b\n'; sed 1,2d four.jsonl; train 350 null; train 360 nan; train 370 1e999
  printf '{"event":"train","step":40'; } > damaged.jsonl
"$plot" damaged.jsonl -o damaged.svg >out 2>err; rc=$?
check "damaged lines are skipped" [ $rc -eq 0 -a "$(wc -l < err)" -eq 1 ]
check "their number and the first one: $(cat err)" \
    has err '^plot: damaged.jsonl: skipped 4 damaged lines, the first is line 3$'
sed '/"step":400/d' damaged.jsonl > less.jsonl; "$plot" less.jsonl -o less.svg 2>/dev/null
check "null, nan and 1e999 are not drawn" [ "$(line less.svg 1 | wc -w)" -eq 3 ]
check "well-formed" xml damaged.svg

{ printf '\357\273\277'; cat four.jsonl; } > marked.jsonl
"$plot" marked.jsonl -o marked.svg 2> err
check "a byte-order mark is ignored" \
    [ ! -s err -a "$(sed 's/marked.jsonl/four.jsonl/' marked.svg | cksum)" = "$(cksum < four.svg)" ]

# ---- bad input: one line, exit code 2, no picture, and older pictures unchanged
cp four.svg kept.svg
: > empty
echo 'A text' > text
echo "$start" > begun.jsonl
head -c 20000 "$plot" > binary
echo '{"a":1}' > other.json
{ echo "$start"; train 5 1e999; } > wild.jsonl
for bad in "" "four.jsonl" "-o x.svg" "none.jsonl -o x.svg" ". -o x.svg" "empty -o x.svg" \
    "text -o x.svg" "binary -o x.svg" "other.json -o x.svg" "begun.jsonl -o x.svg" \
    "wild.jsonl -o x.svg" "- - -o x.svg" \
        "four.jsonl none.jsonl -o kept.svg" "four.jsonl text -o kept.svg" \
        "four.jsonl -o none/x.svg" "four.jsonl -o ." "four.jsonl -o four.jsonl" \
        "four.jsonl -o text" \
        "four.jsonl -o x.svg --smooth -1" "four.jsonl -o x.svg --smooth" \
        "four.jsonl -o x.svg --smoth 3" "four.jsonl -o x.svg -q" "four.jsonl -o"; do
    cp four.jsonl before
    "$plot" $bad >out 2>err; rc=$?
    check "plot $bad: refused, in one line: $(cat err)" \
        [ $rc -eq 2 -a ! -s out -a "$(grep -c '^plot: ' err)" -eq 1 -a "$(wc -l < err)" -eq 1 ]
    check "plot $bad: nothing written" [ ! -e x.svg ]
    cmp -s four.jsonl before ||
        { check "plot $bad: the log is unchanged" false; cp before four.jsonl; }
done
check "the old picture is unchanged" cmp kept.svg four.svg
check "a text is unchanged" [ "$(cat text)" = 'A text' ]
check "no temporary file remains" [ "$(find . -name '*.tmp' | wc -l)" -eq 0 ]
ln -s kept.svg link.svg
check "the output is a link" "$plot" span.jsonl -o link.svg
check "the linked file is written, the link remains" \
    [ -L link.svg -a "$(cksum < kept.svg)" = "$(cksum < span.svg)" ]

# ---- files: a long name, links planted next to the picture, closed streams, a checkpoint
# instead of a log
long_name=$(awk 'BEGIN { while (i++ < 251) printf "n" }').svg
draws "a name of the greatest length" "$long_name" span.jsonl
check "no file remains next to it" [ "$(find . -name 'nnn*' | wc -l)" -eq 1 ]
echo precious >victim
sh -c 'for n in $$ 0 1 2; do ln -s victim shut.svg.$n.tmp; done; exec "$@"' sh "$plot" span.jsonl \
    -o shut.svg <&- >&- 2>&-
check "closed streams: drawn" [ $? -eq 0 ]
check "closed streams: the same picture" cmp shut.svg span.svg
check "planted links are not followed" [ "$(cat victim)" = precious -a ! -L shut.svg ]
echo half >kept.svg.0.tmp
draws "a temporary file of a killed process" kept.svg span.jsonl
check "the next picture removes it" [ ! -e kept.svg.0.tmp ]
"$plot" span.jsonl -o - 2>err >&-
check "closed output: an error message: $(cat err)" \
    [ $? -eq 2 -a "$(grep -c '^plot: -: ' err)" -eq 1 ]
{
    printf '\100\0\0\0\0\0\0\0{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    printf '      \n   \n\n\0\0\0\0'
} >model.safetensors
"$plot" model.safetensors -o none.svg >out 2>err
check "a checkpoint: refused" [ $? -eq 2 -a ! -e none.svg ]
check "the message asks for a log: $(cat err)" \
    grep -q '^plot: model.safetensors: expected a log, got a safetensors file' err

"$plot" --help > out 2>err
check "help" [ $? -eq 0 -a ! -s err -a "$(grep -c -- '--smooth N\|--log-x\|--out TEXT' out)" -eq 3 ]
check "help: it takes logs" grep -q '^usage: plot LOG.jsonl' out
check "version" \
    [ "$("$plot" --version)" \
    = "plot, seqtx $(sed -n 's/^.define STX_VERSION  *"\(.*\)"/\1/p' "$here/../../seqtx.h")" ]

# ---- a locale with a decimal comma, if there is one, in a program that uses it
cat > comma.c <<'C'
#include <locale.h>
#include <stdio.h>
int plot_main(int argc, char **argv);
int main(int argc, char **argv) {
    char text[16];
    if (!setlocale(LC_ALL, "")) return 77;
    snprintf(text, sizeof text, "%.1f", 0.5);
    return text[1] == ',' ? plot_main(argc, argv) : 77;
}
C
comma=$(locale -a 2>/dev/null | grep -m 1 '^\(de\|fr\|es\|it\|ru\)_')
[ -n "$comma" ] || { mkdir loc && localedef -i de_DE -f UTF-8 loc/de_DE.UTF-8 &&
    comma=de_DE.UTF-8 LOCPATH=$T/loc && export LOCPATH; } >/dev/null 2>&1
if [ -n "$comma" ]; then
    check "decimal comma: compiled" \
        ${CC:-cc} -std=c99 -Dmain=plot_main -c "$here/../../examples/plot.c" -o plot.o
    check "decimal comma: linked" ${CC:-cc} comma.c plot.o -o comma -lm
    LC_ALL=$comma ./comma span.jsonl par.jsonl comp.jsonl four.jsonl --title 'a < b & "c"' \
        -o comma.svg
    rc=$?
    [ $rc -eq 77 ] || check "a decimal comma changes nothing, rc $rc" cmp comma.svg all.svg
fi
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
