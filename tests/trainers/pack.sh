#!/bin/sh
# pack.sh - tests build/pack with a small model of each family: round trips of files and
# records, the same bytes with any number of threads, --adapt, and everything that must be
# refused: damage, other models, wrong options. Ends with "N passed, N failed".
. "$(dirname "$0")/programs.sh"
pack=$build/pack

awk 'BEGIN { srand(1); for (i = 0; i < 200; i++)
    print "line " i ": the cat sat on mat " int(rand() * 7) " and ran" }' > text
: > empty
printf x > one
awk 'BEGIN { for (i = 0; i < 256; i++) printf "%c", i }' > bytes
head -c 3000 "$pack" > binary
printf 'a line\r\n\r\n\n\ncaf\303\251 \377\nno end' > lines
printf 'one\0\0two\0three' > nuls
train() { # FAMILY NAME OPTIONS..
    family=$1 name=$2; shift 2
    "$build/train_$family" --data text --steps 4 --batch-sz 2 --block-sz 16 --hid-sz 16 \
        --threads 1 --eval-blocks 1 --checkpoint "$name" "$@" > out 2> err \
        || { echo "train_$family: $(cat err)"; exit 1; }
}
train sru sru.st --nlayers 2
train sru other.st --nlayers 2 --seed 9
train attn_span attn_span.st --nlayers 2
train compressive compressive.st --nlayers 2
train par par.st
train sru chars.st --nlayers 1 --tokens chars
train sru compact.st --nlayers 1 --tokens bytes-compact
train sru words.st --nlayers 1 --tokens words

# round FILE OPTIONS..: packs FILE as p and unpacks it as u
round() {
    file=$1; shift
    "$pack" -f "$@" -o p "$file" && "$pack" -d -f "$@" -o u p && cmp "$file" u
}
for family in sru attn_span compressive par chars compact; do
    for file in text empty one bytes binary lines; do
        check "$family: $file" round $file -m $family.st
    done
    check "$family: lines" round lines -m $family.st --records lines
    check "$family: blocks" round text -m $family.st --records 100 --lanes 7
done
check "records that end with a zero byte" round nuls -m sru.st --records nul
check "a prompt" round lines -m sru.st --records lines --prompt 'the cat'
check "no prompt" round text -m sru.st --prompt ''
for family in sru attn_span compressive par chars compact; do
    check "$family: a dictionary" round text -m $family.st --records 100 --dictionary text
done
check "a dictionary, a file" round lines -m sru.st --dictionary text
check "a dictionary, --adapt" round lines -m sru.st --adapt --dictionary text
check "an empty dictionary" round lines -m sru.st --records lines --dictionary empty
check "a short dictionary" round lines -m sru.st --records lines --dictionary one
check "binary records, a dictionary" round binary -m chars.st --records 300 --dictionary lines
round text -m sru.st --records 100 --dictionary text
dictionary=$(wc -c < p)
round text -m sru.st --records 100
check "a dictionary helps" [ $((dictionary * 2)) -lt "$(wc -c < p)" ]

# single records
"$pack" -f -m sru.st --records lines --lanes 5 -o p text
for n in 1 77 200; do
    "$pack" -d -f -m sru.st --record $n -o u p
    check "record $n" [ "$(cat u)" = "$(sed -n ${n}p text)" ]
done

# the same bytes
for n in 1 2 3; do
    "$pack" -f -m sru.st -t $n -o t$n text
    head -c 4000 text | "$pack" -f --adapt -m attn_span.st --lanes 2 -t $n -o a$n -
done
check "1 and 2 threads" cmp t1 t2
check "1 and 3 threads" cmp t1 t3
for n in 1 2 3; do
    "$pack" -f -m sru.st -t $n --records lines --dictionary text -o d$n lines
done
check "a dictionary, 1 and 2 threads" cmp d1 d2
check "a dictionary, 1 and 3 threads" cmp d1 d3
"$pack" -f -m sru.st -o whole text
check "mixing: $(wc -c < whole) bytes of $(wc -c < text)" \
    [ $(($(wc -c < whole) * 10)) -lt "$(wc -c < text)" ]
check "--adapt, 1 and 2 threads" cmp a1 a2
check "--adapt, 1 and 3 threads" cmp a1 a3
head -c 4000 text > short
"$pack" -d -m attn_span.st -t 2 -o - a1 > u
check "--adapt, unpacked" cmp short u
# a letter follows from the one three before, which counts learn slowly and a model fast
awk 'BEGIN { srand(3); for (i = 0; i < 10000; i++) {
    s[i] = rand() < 0.9 ? (s[i - 3] + 1) % 26 : int(26 * rand()); printf "%c", 97 + s[i] } }' > third
"$pack" -f --adapt --lanes 8 -o a4 third
"$pack" -f -m sru.st --lanes 8 -o p third
check "--adapt learns: $(wc -c < a4) bytes, without $(wc -c < p)" \
    [ "$(wc -c < a4)" -lt $(($(wc -c < p) * 85 / 100)) ]
check "--adapt with records" round text -m sru.st --adapt --records lines
head -c 1500 text > short
"$pack" -f --adapt -o p short && "$pack" -d -f -o u p
check "--adapt without a model" cmp short u

# damage: each byte changed, each length cut
"$pack" -f -m sru.st --records lines -o good lines
n=$(($(wc -c < good))) i=0 accepted=
while [ $i -lt $n ]; do
    byte=$(od -An -tu1 -j $i -N 1 good | tr -d ' ')
    { head -c $i good; printf "\\$(printf %o $((byte ^ (1 << i % 8))))"; tail -c +$((i + 2)) good; } > bad
    "$pack" -d -f -m sru.st -o u2 bad 2> err && accepted="$accepted $i"
    head -c $i good > bad
    "$pack" -d -f -m sru.st -o u2 bad 2> err && accepted="$accepted cut:$i"
    i=$((i + 1))
done
check "changed or cut at$accepted" [ -z "$accepted" ]
check "damaged: no output" [ ! -e u2 ]
cp good bad; printf x >> bad

# refuse TEXT OPTIONS..: must fail with TEXT in the error, and without output
refuse() {
    text=$1; shift
    rm -f u2
    ! "$pack" -o u2 "$@" 2> err && grep -q -e "$text" err && [ ! -e u2 ] && [ ! -e u2.tmp ]
}
check "too long: $(cat err)" refuse 'damaged' -d -m sru.st bad
check "another model" refuse 'another model' -d -m other.st good
check "another dictionary" refuse 'another model' -d -m sru.st --dictionary text good
check "no model" refuse 'needs -m' -d good
check "no model, no --adapt" refuse 'needs -m' text
check "words" refuse '--tokens bytes' -m words.st text
check "not a model" refuse 'safetensors' -m text text
check "not packed" refuse 'not a packed file' -d -m sru.st text
check "no such record" refuse 'has 6 records' -d -m sru.st --record 7 good
check "a part of a file" refuse 'depend on each other' -d -m sru.st --record 1 whole
check "one record of --adapt" refuse 'depend on each other' -d -m attn_span.st --record 1 a1
check "missing file" refuse 'cannot be opened' -m sru.st missing
check "two files" refuse 'one file' -m sru.st text lines
check "unknown option" refuse 'unknown option' --bogus 1 text
check "not a number" refuse 'expected a number' -t 1x text
check "unknown records" refuse '--records: expected' -m sru.st --records words text
printf old > u
check "an existing file: refused" sh -c '! "$1" -m sru.st -o u text 2> err' - "$pack"
check "an existing file: kept" [ "$(cat u)" = old ]
cp text named; "$pack" -m sru.st named && rm named && "$pack" -d -m sru.st named.pack
check "the names of files" cmp named text
"$pack" --help > out
check "--help" grep -q -e '--records' out
check "--help: 80 columns" sh -c '! grep -q "^.\{81\}" out'

# the commands of docs/pack.md, with programs that are built and few steps
mkdir page; ln -s "$build" page/build
cp text page/my.txt; cp text page/new.txt; cp lines page/new.log
sed -n '/^```sh/,/^```/{/^```/d;/^make /d;s/--minutes 10/--steps 4/;p;}' \
    "$here/../../docs/pack.md" > page/commands
check "docs/pack.md has commands" [ "$(wc -l < page/commands)" -ge 4 ]
check "the commands of docs/pack.md" sh -c 'cd page && sh -e ./commands > out 2> err'
check "... write the same text again" cmp text page/again.txt
check "... and pack each line" [ -s page/new.log.pack ]

echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
