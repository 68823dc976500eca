#!/bin/sh
# trainer.sh [BINARY] - tests the trainer from outside: resuming after kill -9, repeatability, bad input, full disks,
# signals, losses that are not finite, the log, evaluation and generation.
#
#     tests/trainer.sh build/train_attn_span
#     TRAINER_SEED=1234 tests/trainer.sh ...        the random moments of an earlier run again (it prints its seed)
#
# Needs sh, the usual small tools and a C compiler (${CC:-cc}, for a library that kills at a chosen system call; without
# one those checks are left out, and a line says so). Works in a directory of its own, which it removes.
# Each check counts; the last line is "N passed, N failed".

here=$(cd "$(dirname "$0")" && pwd)
bin=${1:-build/train_attn_span}
. "$here/trainer_lib.sh"

# Easy text, short enough for the streams to wrap.
awk 'BEGIN { for (i = 0; i < 90; i++) print "the cat sat on mat " i % 7 " and the dog ran" }' >t.txt
tiny="--nlayers 2 --hid-sz 16 --inner-hid-sz 32 --nheads 2 --attn-span 32 --block-sz 16 --batch-sz 4 --threads 1"
span="$tiny --batch-split 2 --adapt-span --adapt-span-loss 0.0001 --adapt-span-init 0.5 --adapt-span-ramp 8 --dropout 0.2 --emb-dropout 0.1 --optim adagrad --lr 0.07 --grad-clip 0.3 --lr-warmup 20"
files="--data ../t.txt --checkpoint run.st --log log.jsonl"

# =====================================================================================================================
section "resume after kill -9"

long="$files $span --steps 200 --save-every 5 --eval-every 50 --eval-blocks 2 --log-every 1"
mkdir whole
t0=$(date +%s%N)
good "200 steps in one go" whole $long
whole_ms=$(ms_since "$t0")
check "the streams wrap" [ "$(meta whole/run.st data.wraps)" -ge 2 ]
check "the log has each step once" [ "$(steps_of whole/log.jsonl | tr '\n' ' ')" = "$(awk 'BEGIN { for (i = 1; i <= 200; i++) printf "%d ", i }')" ]

mkdir half
good "100 steps" half $files $span --steps 100 --eval-every 50 --eval-blocks 2 --log-every 1
check "100 steps differ from 200" differ half/run.st whole/run.st
check "step 100" [ "$(meta half/run.st step)" = 100 ]
start half $long
nap $((whole_ms / 4))
kill -9 "$running" 2>/dev/null; collect
continued "100 steps, kill -9, to 200" half $long

i=0
while [ $i -lt 20 ]; do
    i=$((i + 1)); roll
    ms=$((whole_ms * rand / 10000))
    rm -rf kill; mkdir kill
    start kill $long
    nap $ms
    kill -9 "$running" 2>/dev/null; collect
    continued "kill $i, after $ms ms of $whole_ms" kill $long
done

# one run, killed again and again until it is done
rm -rf kill; mkdir kill
i=0 rc=137
while [ $i -lt 12 ] && [ $rc -ne 0 ]; do
    i=$((i + 1)); roll
    ms=$((whole_ms / 4 + whole_ms * rand / 40000))
    start kill $long
    nap $ms
    kill -9 "$running" 2>/dev/null; collect
    find kill -name '*.tmp' -exec rm -f {} +
done
continued "$i kills in one run" kill $long

# the same at exact places: in the midst of a write, before a flush, before the rename
exact_kills count $long
if [ -n "$kills" ]; then
    i=0
    while [ $i -lt 20 ]; do
        i=$((i + 1)); roll
        at=$((1 + (calls - 1) * rand / 9999))
        rm -rf kill; mkdir kill
        (cd kill && TRAINER_DIE_AT=$at LD_PRELOAD=$T/kill.so exec "$bin" $long) >/dev/null 2>&1 &
        running=$!; collect
        check "killed by call $at" [ $rc -eq 137 ]
        continued "kill at call $at of $calls" kill $long
    done
else
    echo "left out: kills at exact calls (no C compiler, or a binary that takes no preloaded library)"
fi

# =====================================================================================================================
section "repeat and resume"

awk 'BEGIN { split("one two three four five six seven eight nine ten eleven twelve", w, " ")
    for (i = 0; i < 150; i++) { for (j = 0; j < 8; j++) printf "%s ", w[(i * j + i % 5) % 12 + 1]; print "x" i % 9 } }' >w.txt

variant "adagrad" --data ../t.txt $span
for optim in sgd adam adamw; do
    variant $optim --data ../t.txt $span --optim $optim --lr 0.003 --weight-decay 0.01
done
variant "fixed span" --data ../t.txt $tiny --optim adam --lr 0.003 --no-adapt-span
variant "whole cache" --data ../t.txt $span --no-adapt-span-cache
variant "persistent vectors" --data ../t.txt $span --pers-mem-size 8
variant "literal" --data ../t.txt $span --literal
variant "adaptive words, tied" --data ../w.txt $span --tokens words --adapt-io --adapt-io-tied --adapt-io-divval 2 --adapt-io-cutoffs 5,12
variant "adaptive words" --data ../w.txt $span --tokens words --adapt-io --adapt-io-divval 2 --adapt-io-cutoffs 5,12
variant "characters" --data ../t.txt $span --tokens chars
variant "compact bytes" --data ../t.txt $span --tokens bytes-compact
variant "inverse square root" --data ../t.txt $span --schedule inv-sqrt --batch-split 4
variant "two threads" --data ../t.txt $span --threads 2
variant "recompute" --data ../t.txt $span --recompute
mkdir plain
good "without recompute" plain --checkpoint run.st --data ../t.txt $span --steps 60
check "recompute changes no bit" same_state plain/run.st v1/run.st
# bfloat16 products: the checkpoint says so, and a run goes on as it began
mkdir bf16
run bf16 --checkpoint first.st --data ../t.txt $span --steps 2 --precision bf16
if [ $rc -eq 2 ] && grep -q -e '--precision bf16.*not in this build' err; then
    echo "left out: --precision bf16 (the library refuses it)"
else
    variant "bf16" --data ../t.txt $span --precision bf16
    check "bf16: in the checkpoint" [ "$(header v1/run.st | grep -c 'precision\\":\\"bf16')" -eq 1 ]
    good "bf16: 30 steps" bf16 --checkpoint run.st --data ../t.txt $span --steps 30 --precision bf16 --log log.jsonl
    check "bf16: in the first record of the log" [ "$(head -n 1 bf16/log.jsonl | grep -c '"precision":"bf16"')" -eq 1 ]
    good "bf16: evaluated as it is" bf16 --checkpoint run.st --data ../t.txt --eval-only --log bf16.jsonl --threads 1
    good "bf16: evaluated in float" bf16 --checkpoint run.st --data ../t.txt --eval-only --log f32.jsonl --threads 1 --precision f32
    check "bf16: the two evaluations agree to 0.02" awk -v a="$(head -n 1 bf16/bf16.jsonl | field loss)" -v b="$(head -n 1 bf16/f32.jsonl | field loss)" 'BEGIN { exit !(a > 0 && b > 0 && a - b < 0.02 && b - a < 0.02) }'
    cp bf16/run.st keep.st
    run bf16 --checkpoint run.st --data ../t.txt $span --steps 60 --precision f32
    check "bf16: training does not go on in float: exit code 2, not $rc" [ $rc -eq 2 ]
    check "bf16: the message says why: $(cat err)" grep -q -e '--precision is f32 here.*bf16 in the checkpoint' err
    check "bf16: the checkpoint is as it was" cmp keep.st bf16/run.st
    good "bf16: goes on without the option" bf16 --checkpoint run.st --data ../t.txt $span --steps 60
    check "bf16: as it would have" cmp v1/run.st bf16/run.st
fi
mkdir other
good "another seed" other --checkpoint run.st --data ../t.txt $span --steps 60 --seed 2
check "another seed gives another run" differ plain/run.st other/run.st

# =====================================================================================================================
section "bad input"

mkdir bad bad/dir bad/three
cp t.txt w.txt bad
cd bad || exit 1
good "a checkpoint for the bad" . --data t.txt $span --steps 6 --checkpoint good.st
good "a checkpoint of characters" . --data t.txt $span --steps 6 --checkpoint chars.st --tokens chars
: >empty.txt
echo "a few words" >short.txt
head -c 70 t.txt >short70.txt       # training text: 64 tokens; four streams of blocks of 16 need 68
{ cat t.txt; printf 'caf\351 \377\376\n'; } >latin.txt
{ printf 'caf\351 \377\376\n'; cat t.txt t.txt; } >latin1.txt
awk 'BEGIN { for (i = 0; i < 100; i++) print "quite another text, of another length " i }' >other.txt
cp t.txt three/train.txt; : >three/valid.txt

new="--log L.jsonl --tensorboard TB --checkpoint C.st --steps 3"       # what must not appear
old="--log L.jsonl --tensorboard TB --steps 9"                         # with a checkpoint of its own

# data
refused 'data' $tiny $new
refused 'nowhere.txt.*no such file' --data nowhere.txt $tiny $new
refused 'empty.txt' --data empty.txt $tiny $new
refused 'short.txt' --data short.txt $tiny $new
refused 'short70.txt' --data short70.txt $tiny $new
refused 't.txt\|--batch-sz' --data t.txt $tiny $new --batch-sz 4000
refused 't.txt\|--block-sz' --data t.txt $tiny $new --block-sz 100000
refused 'dir/train.txt.*no such file' --data dir $tiny $new
refused 'three/valid.txt' --data three $tiny $new
refused '/dev/null' --data /dev/null $tiny $new
mkdir one && cp t.txt one/train.txt && printf x >one/valid.txt
refused 'one.*validation text has fewer than two' --data one $tiny $new
# damage that leaves the form of the file whole: a bit of the last tensor, and of a number in the metadata
size=$(wc -c <good.st)
{ head -c $((size - 9)) good.st; printf '\377'; tail -c 8 good.st; } >bit.st
sed 's/"step":"6"/"step":"7"/' good.st >step.st
refused 'bit.st.*damaged' --data t.txt $span --checkpoint bit.st --steps 12
refused 'step.st.*damaged' --data t.txt $span --checkpoint step.st --steps 12
# words: held-out ones that are new are refused with the option that helps, and accepted with it
awk 'BEGIN { for (i = 0; i < 400; i++) print "the same words again and again"; for (i = 0; i < 60; i++) print "fresh" i }' >new.txt
refused 'fresh.*--min-count' --data new.txt $tiny $new --tokens words
good "words with --min-count" . --data new.txt $tiny --tokens words --min-count 2 --steps 2
good "the largest seed" . --data t.txt $span --steps 2 --checkpoint seed.st --seed 18446744073709551615
good "the largest seed, resumed" . --data t.txt $span --steps 3 --checkpoint seed.st --seed 18446744073709551615
ln -s nowhere/at/all lost.st
refused 'lost.st.*symbolic link' --data t.txt $tiny --steps 3 --checkpoint lost.st
refused 'latin.txt.*utf-8' --data latin.txt $tiny $new --tokens chars
refused 'latin1.txt.*utf-8' --data latin1.txt $tiny $new --tokens chars
if [ "$(id -u)" -ne 0 ]; then
    cp t.txt secret.txt; chmod 000 secret.txt
    refused 'secret.txt.*denied' --data secret.txt $tiny $new
    cp good.st secret.st; chmod 000 secret.st
    refused 'secret.st.*denied' --data t.txt $tiny $old --checkpoint secret.st
    chmod 444 secret.st         # can be read, but the training could not save
    refused 'secret.st' --data t.txt $old --checkpoint secret.st
    mkdir locked; chmod 555 locked
    refused 'locked' --data t.txt $tiny $old --checkpoint locked/C.st
fi

# checkpoints
refused 'C.st' --data t.txt --eval-only --checkpoint C.st $old
refused 'C.st' --data t.txt --full-eval-mode --checkpoint C.st $old
refused 'C.st' --no-train --generate 5 --checkpoint C.st $old
refused 'checkpoint' --data t.txt --eval-only $old
refused 'dir' --data t.txt $tiny $old --checkpoint dir
refused 'nodir' --data t.txt $tiny $old --checkpoint nodir/C.st
refused 't.txt' --data t.txt $tiny $old --checkpoint t.txt
refused 'checkpoint' --data t.txt $tiny $old --checkpoint=
cp empty.txt x.st
refused 'x.st' --data t.txt $old --checkpoint x.st
size=$(wc -c <good.st) head=$(header_size good.st)
for n in 1 7 8 9 $((head / 2)) $((8 + head - 1)) $((8 + head)) $((8 + head + 1)) $((size / 2)) $((size - 1)); do
    head -c $n good.st >x.st
    refused 'x.st' --data t.txt $old --checkpoint x.st
    refused 'x.st' --eval-only --data t.txt --checkpoint x.st --log L.jsonl --tensorboard TB
done
{ cat good.st; printf x; } >x.st
refused 'x.st' --data t.txt $old --checkpoint x.st
{ printf '\377\377\377\377\377\377\377\177'; tail -c +9 good.st; } >x.st
refused 'x.st' --data t.txt $old --checkpoint x.st
{ printf '\0\0\0\0\0\0\0\0'; tail -c +9 good.st; } >x.st
refused 'x.st' --data t.txt $old --checkpoint x.st
spoil() { # SED-SCRIPT that keeps the length: a checkpoint x.st, changed in its header
    head -c 8 good.st >x.st
    header good.st | sed "$1" | head -c "$head" >h
    [ "$(wc -c <h)" -eq "$head" ] && ! header good.st | cmp -s - h || fail "the script does not fit the header: $1"
    cat h >>x.st
    tail -c +$((9 + head)) good.st >>x.st
}
for script in 's/^{/[/' 's/"__metadata__"/"__metadatb__"/' 's/attn_span\.1"/attn_span.9"/' 's/"F32"/"F33"/' 's/"F32"/"F16"/' 's/"shape":\[32,/"shape":[33,/' \
    's/"data_offsets":\[0,/"data_offsets":[4,/' 's/"step":"6"/"step":"x"/' 's/"data.position":"/"data.positiom":"/' 's/"tick":"/"tick":"-/; s/"tick":"-\(.*\)[0-9]"/"tick":"-\1"/' \
    's/"optim.kind":"[0-9]"/"optim.kind":"7"/' 's/"in_emb/"in_enb/' 's/"config":"{/"config":"[/' 's/\\"nlayers\\":2/\\"nlayers\\":0/' 's/\\"nlayers\\":2/\\"nlayers\\":3/' 's/\\"hid-sz\\":16/\\"hid-sz\\":24/' \
    's/\\"nheads\\":2/\\"nheads\\":3/' 's/\\"nheads\\":2/\\"nheads\\":x/' 's/\\"tokens\\":\\"bytes\\"/\\"tokens\\":\\"bytez\\"/' 's/\\"batch-sz\\":4/\\"batch-sz\\":8/' 's/\\"block-sz\\":16/\\"block-sz\\":00/' \
    's/"memory.0.rows.0":"[0-9]/"memory.0.rows.0":"9/' 's/"vocab":{"dtype":"U8"/"vocab":{"dtype":"U9"/' 's/"vocab"/"vocaa"/' 's/.$/]/'; do
    spoil "$script"
    refused 'x.st\|checkpoint\|--nheads' --data t.txt $old --checkpoint x.st
done
v=$((9 + head + $(header good.st | sed 's/.*"vocab":{[^}]*"data_offsets":\[\([0-9]*\),.*/\1/')))
{ head -c $((v - 1)) good.st; printf '\377\377\377\377\377\377\377\377'; tail -c +$((v + 8)) good.st; } >x.st
refused 'x.st\|vocab' --data t.txt $old --checkpoint x.st
# any byte of the header, at random: refused or taken, but never a crash
i=0
while [ $i -lt 40 ]; do
    i=$((i + 1)); roll; at=$((8 + head * rand / 10000)); roll
    [ $i -gt 5 ] || at=$((i - 1))
    { head -c $at good.st; printf "\\$(printf %03o $((rand % 256)))"; tail -c +$((at + 2)) good.st; } >x.st
    run . --checkpoint x.st --no-train --generate 1 --threads 1
    if [ $rc -eq 0 ] || { [ $rc -eq 2 ] && [ "$(wc -l <"$T/err")" -eq 1 ]; }; then pass; else fail "byte $at of the checkpoint as $((rand % 256)): exit code $rc: $(head -c 200 "$T/err")"; fi
done
printf '\070\0\0\0\0\0\0\0{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}  \0\0\200\077' >x.st
refused 'x.st' --data t.txt $tiny $old --checkpoint x.st
refused 'x.st' --data t.txt --eval-only --checkpoint x.st --log L.jsonl --tensorboard TB
for option in "--precision bf16" "--nlayers 3" "--hid-sz 32" "--inner-hid-sz 64" "--nheads 4" "--attn-span 64" "--tokens chars" "--optim adam" "--batch-sz 8" "--block-sz 32" "--pers-mem-size 4" "--no-adapt-span" "--literal"; do
    name=${option%% *}; name=${name#--no-}; name=${name#--}
    refused "$name" --data t.txt $old --checkpoint good.st $option
done
refused 'layers' --data t.txt $old --checkpoint good.st --preset enwik8_small
refused 'seed' --data t.txt $old --checkpoint good.st --seed 2
refused 'other.txt\|data' --data other.txt $old --checkpoint good.st
awk '{ print NR % 2 ? toupper($0) : $0 }' t.txt >upper.txt
refused 'upper.txt\|data' --data upper.txt $old --checkpoint good.st
refused 'data\|other.txt\|vocab' --data other.txt $old --checkpoint chars.st

# sizes
t="--data t.txt"
refused 'nheads' $t $tiny $new --nheads 3
for name in nlayers hid-sz inner-hid-sz nheads attn-span block-sz batch-sz batch-split niter nbatches; do
    refused "$name" $t $tiny $new --$name 0
    refused "$name" $t $tiny $new --$name -4
    refused "$name" $t $tiny $new --$name 999999999999999999999
    refused "$name" $t $tiny $new --$name=
done
refused 'steps' $t $tiny $new --steps -1
refused 'threads' $t $tiny $new --threads -1
refused 'max-memory' $t $tiny $new --hid-sz 536870912 --inner-hid-sz 1073741824
refused 'max-memory' $t $tiny $new --attn-span 1073741824 --hid-sz 536870912
refused 't.txt\|--batch-sz\|max-memory' $t $tiny $new --batch-sz 1073741824 --block-sz 1073741824
refused 'max-memory' $t $tiny $new --pers-mem-size 1073741824 --nlayers 4096 --nheads 16
refused 'max-memory' $t $tiny $new --nlayers 4096 --hid-sz 536870912 --nheads 256
refused 'max-memory' $t $tiny $new --hid-sz 1024 --max-memory 0.01
refused 'max-memory' $t $tiny $new --max-memory 0.00001
refused 'max-memory' $t $tiny $new --max-memory 0.0009
refused 'max-memory' $t $tiny $new --attn-span 65536 --max-memory 0.005
# what a step needs shows in the first step only: then it is an error of the run, but a clear one
run . $t $tiny $new --block-sz 512 --max-memory 0.006
check "no memory for a step: an error, not $rc" [ $rc -eq 1 -o $rc -eq 2 ]
check "no memory for a step: one line" [ "$(wc -l <"$T/err")" -eq 1 ]
check "no memory for a step: the option is named: $(cat "$T/err")" grep -q -e '--max-memory' "$T/err"
check "no memory for a step: no checkpoint" [ ! -e C.st ]
rm -rf L.jsonl TB C.st
refused 'batch-split' $t $tiny $new --batch-split 3
refused 'batch-split' $t $tiny $new --batch-split 8

# options
refused 'nlayers' $t $tiny $new --nlayer 3
refused 'checkpoint' $t $tiny $new --chekpoint x
refused 'frobnicate' $t $tiny $new --frobnicate
refused 'enwik9' $t $tiny $new --preset enwik9
refused 'enwik8_small' $t $tiny $new --preset enwik8_smal
refused 'preset' $t $tiny $new --preset
refused 'lr' $t $tiny $new --lr
refused 'lr' $t $tiny --lr $new
refused 'data' $tiny $new --data
refused 'lr' $t $tiny $new --lr 0.1x
refused 'lr' $t $tiny $new --lr nan
refused 'lr' $t $tiny $new --lr -1
refused 'lr' $t $tiny $new --lr 1e999
refused 'hid-sz' $t $tiny $new --hid-sz 16.5
refused 'hid-sz' $t $tiny $new --hid-sz 0x10
refused 'dropout' $t $tiny $new --dropout 1
refused 'dropout' $t $tiny $new --dropout -0.1
refused 'optim' $t $tiny $new --optim adamm
refused 'tokens' $t $tiny $new --tokens letters
refused '--precision.*f16.*f32.*bf16' $t $tiny $new --precision f16
refused 'precision' $t $tiny $new --precision=
refused 'precision' $t $tiny $new --precision
refused 'adapt-span' $t $tiny $new --adapt-span=maybe
refused 'cutoffs' $t $tiny $new --adapt-io --adapt-io-cutoffs 5,x
refused 'cutoff' $t $tiny $new --adapt-io --adapt-io-cutoffs 12,5
refused 'stray' $t $tiny $new stray
refused 'x' $t $tiny $new -x
refused 'prompt\|snowman\|character' $old --no-train --generate 5 --checkpoint chars.st --prompt 'the ☃'
refused 'TB\|t.txt' $t $tiny --steps 3 --checkpoint C.st --log L.jsonl --tensorboard t.txt
refused 'nodir' $t $tiny --steps 3 --checkpoint C.st --tensorboard TB --log nodir/L.jsonl
cd ..

# =====================================================================================================================
section "disk full"

mkdir full
good "10 steps" full --data ../t.txt --checkpoint run.st $span --steps 10
cp full/run.st full.st
bytes=$(wc -c <full.st)
again="--data ../t.txt --checkpoint run.st $span --steps 40 --save-every 20"
# after the run that could not save: $rc, err, and the directory's run.st
unsaved() {
    [ $rc -gt 0 ] && [ $rc -lt 124 ] && pass || fail "$1: exit code $rc"
    grep -q "run.st.*$2" err && pass || fail "$1: '$2' and the file are wanted in: $(head -c 300 err)"
    check "$1: one line" [ "$(wc -l <err)" -eq 1 ]
    check "$1: the old checkpoint is as it was" cmp full.st full/run.st
    check "$1: no temporary file stays" [ "$(tmps full)" -eq 0 ]
    check "$1: the old checkpoint loads" loads full/run.st
}
# (a) a file system of its own, in a name space of its own: it goes when the shell in it ends
mkdir mnt
cat >mount.sh <<'END'
mount -t tmpfs -o size=$1k none "$2" || exit 99
cp full.st "$2/run.st" || exit 98
shift
cd "$1"; shift
timeout -k 5 60 "$@" >../out 2>../err </dev/null
echo $? >../full.rc
cp run.st ../full/run.st
for f in *.tmp; do [ ! -e "$f" ] || cp "$f" ../full; done
END
rm -f full.rc
for how in "unshare -m" "unshare -r -m"; do
    [ -s full.rc ] || $how sh mount.sh $((bytes * 3 / 2048)) mnt "$bin" $again >/dev/null 2>&1
done
if [ -s full.rc ]; then
    rc=$(cat full.rc)
    unsaved "full file system" "[Nn]o space"
else
    echo "left out: a full file system (cannot mount one)"
fi
# (b) a limit on the size of files, its signal ignored: writing gives an error
rm -f full/*; cp full.st full/run.st
(trap '' XFSZ; ulimit -f $((bytes / 2048)); cd full && exec timeout -k 5 60 "$bin" $again) >out 2>err </dev/null
rc=$?
unsaved "limited files" "[Ff]ile.*large"
# its signal not ignored: the process ends, the checkpoint stays
(ulimit -f $((bytes / 2048)); ulimit -c 0; cd full && exec "$bin" $again) >out 2>err </dev/null &
running=$!; collect
check "SIGXFSZ: ended by it" [ $rc -gt 128 ]
check "SIGXFSZ: the old checkpoint is as it was" cmp full.st full/run.st
check "SIGXFSZ: at most one temporary file" [ "$(tmps full)" -le 1 ]
rm -f full/*.tmp
# (c) at an exact call
if [ -n "$kills" ]; then
    for at in 1 2 5; do
        (cd full && TRAINER_FULL_AT=$at LD_PRELOAD=$T/kill.so exec timeout -k 5 60 "$bin" $again) >out 2>err </dev/null
        rc=$?
        unsaved "no space from call $at" "[Nn]o space"
    done
fi
good "with space again" full $again
mkdir straight
good "without the trouble" straight $again
check "with space again: as if nothing had been" cmp full/run.st straight/run.st
# the log is not worth a training
if [ -w /dev/full ]; then
    mkdir dev
    good "a log that cannot be written" dev --data ../t.txt --checkpoint run.st $span --steps 40 --log /dev/full
    cat out err >said
    check "a log that cannot be written is reported" grep -q '/dev/full' said
    check "a log that cannot be written is reported once" [ "$(grep -c '/dev/full' said)" -eq 1 ]
    (cd dev && exec timeout 60 "$bin" --data ../t.txt --checkpoint 2.st $span --steps 40 >/dev/full) 2>err </dev/null
    check "output that cannot be written ends no training" [ $? -eq 0 ]
    check "the same training" same_state dev/run.st dev/2.st
    (cd dev && exec timeout 60 "$bin" --checkpoint run.st --no-train --generate 20 >/dev/full) 2>err </dev/null
    check "a generated text that cannot be written is an error" [ $? -ne 0 ]
fi

# =====================================================================================================================
section "signals"

stop="$files $span --steps 1500 --nbatches 100000 --log-every 1"
mkdir unbroken
good "the unbroken run" unbroken $stop
for sig in INT TERM; do
    rm -rf sig; mkdir sig
    start sig $stop
    i=0
    until [ $i -ge 1000 ] || grep -q '"event":"train"' sig/log.jsonl 2>/dev/null; do i=$((i + 1)); sleep 0.01; done
    kill -$sig "$running"; collect
    check "SIG$sig: exit code 0, not $rc" [ $rc -eq 0 ]
    at=$(sed -n 's/.*stopped at step \([0-9]*\).*/\1/p' bg.out)
    check "SIG$sig: says where it stopped" [ -n "$at" ]
    check "SIG$sig: stopped before the end" [ "${at:-1500}" -lt 1500 ]
    check "SIG$sig: saved that step" [ "$(meta sig/run.st step)" = "$at" ]
    check "SIG$sig: logged that step" [ "$(steps_of sig/log.jsonl | tail -n 1)" = "$at" ]
    check "SIG$sig: no message on standard error" [ ! -s bg.err ]
    check "SIG$sig: no temporary file" [ "$(tmps sig)" -eq 0 ]
    good "SIG$sig, resumed" sig $stop
    check "SIG$sig: as the unbroken run, bit for bit" cmp unbroken/run.st sig/run.st
    events unbroken/log.jsonl >want; events sig/log.jsonl >got
    check "SIG$sig: the log as the unbroken run's" cmp want got
done

# =====================================================================================================================
section "loss that is not finite"

mkdir wild
wild="$tiny --data ../t.txt --checkpoint run.st --log log.jsonl --log-every 1 --optim sgd --grad-clip 0 --dropout 0"
good "a good start" wild $wild --steps 5
for every in 1 1000; do
    rm -rf wild2; cp -r wild wild2
    run wild2 $wild --lr 1e6 --steps 5000 --save-every $every
    check "ends with an error, not $rc" [ $rc -eq 1 ]
    check "skipped updates are reported" grep -q 'step [0-9]*: the .* is not finite' out
    check "the end says what to change" grep -q '50 .*--lr' err
    check "one line on standard error" [ "$(wc -l <err)" -eq 1 ]
    check "50 reports to the end" [ "$(grep -c 'is not finite' out)" -ge 50 ]
    check "the checkpoint's numbers are finite" finite wild2/run.st
    check "the checkpoint loads" loads wild2/run.st
    check "the log is JSON" json wild2/log.jsonl
    [ $every -ne 1000 ] || check "without a save the checkpoint is as it was" cmp wild/run.st wild2/run.st
done

# =====================================================================================================================
section "log and terminal"

mkdir log
learn="--data ../t.txt $tiny --adapt-span --optim adam --lr 0.005 --dropout 0 --grad-clip 1"
good "learns" log $learn --checkpoint run.st --log log.jsonl --log-every 1 --tensorboard deep/tb --steps 300 --eval-every 100 --eval-blocks 2
cp out said
train_keys=event,step,loss,bpb,lr,grad_norm,tokens_per_s,peak_bytes,span_avg,span_max
check "the log is JSON" json log/log.jsonl
check "keys of train" only_keys log/log.jsonl train $train_keys
check "keys of eval" only_keys log/log.jsonl eval event,split,loss,bpb,step,tokens
check "300 lines of train" [ "$(events log/log.jsonl | wc -l)" -eq 300 ]
check "evaluations at 100, 200, 300" [ "$(events log/log.jsonl eval | field step | tr '\n' ' ')" = "100 200 300 " ]
check "evaluations of the validation text" [ "$(events log/log.jsonl eval | grep -c '"split":"valid"')" -eq 3 ]
check "the loss falls" awk -v a="$(events log/log.jsonl | head -n 1 | field loss)" -v b="$(events log/log.jsonl | tail -n 1 | field loss)" 'BEGIN { exit !(a > 4 && a < 8 && b > 0 && b < 1) }'
grep -E '"event":"(train|eval)"' log/log.jsonl | sed 's/.*"loss":\([^,]*\),"bpb":\([^,]*\),.*/\1 \2/' >pairs
check "bpb is loss / ln 2" awk '{ e = $2 - $1 / log(2); if (!($2 > 0) || !(e * e <= 1e-18 * $2 * $2)) bad = 1 } END { exit bad || NR < 300 }' pairs
check "tokens a second, peak, norm are there" awk '!/"tokens_per_s":[0-9.]*[1-9]/ || !/"peak_bytes":[1-9]/ || !/"grad_norm":[0-9.e-]*[1-9]/ { if (/"event":"train"/) exit 1 }' log/log.jsonl
check "plain lines in a pipe: no carriage return" [ "$(tr -dc '\r\033' <said | wc -c)" -eq 0 ]
check "plain lines in a pipe: progress" grep -q 'step 300/300 .*bpb.*tok/s' said
check "the start event" grep -q '"event":"start"' log/log.jsonl
f=$(ls log/deep/tb/events.out.tfevents.* 2>/dev/null)
check "one event file" [ -f "$f" ]
n1=$(frames "$f"); size1=$(wc -c <"$f")
check "its records fit" [ -n "$n1" ]
check "a record for each number" [ "${n1:-0}" -ge 1500 ]
check "tags" grep -q 'train/loss' "$f"
check "tags of the evaluation" grep -q 'valid/bpb' "$f"
good "goes on" log $learn --checkpoint run.st --log log.jsonl --log-every 1 --tensorboard deep/tb --steps 310
check "going on leaves the first event file alone" [ "$(wc -c <"$f")" -eq "$size1" ]
check "going on begins another" [ "$(ls log/deep/tb | wc -l)" -eq 2 ]
for f in log/deep/tb/*; do check "framing of $f" frames "$f"; done
rm -rf grow; mkdir grow
start grow $learn --log log.jsonl --log-every 1 --tensorboard tb --steps 100000
i=0
until [ $i -ge 1000 ] || grep -q '"event":"train"' grow/log.jsonl 2>/dev/null; do i=$((i + 1)); sleep 0.01; done
size1=$(cat grow/tb/* | wc -c)
sleep 0.2
size2=$(cat grow/tb/* | wc -c)
kill -TERM "$running"; collect
check "the event file grows while the run goes on ($size1, $size2)" [ "$size2" -gt "$size1" ]
check "without a checkpoint a signal ends well too" [ $rc -eq 0 ]
check "framing after a signal" frames grow/tb/*
good "words" log --data ../w.txt $tiny --tokens words --steps 20 --log words.jsonl --checkpoint words.st --log-every 5
check "keys of train for words" only_keys log/words.jsonl train "$(echo $train_keys | sed s/bpb/ppl/)"
check "keys of eval for words" only_keys log/words.jsonl eval event,split,loss,ppl,step,tokens
grep -E '"event":"(train|eval)"' log/words.jsonl | sed 's/.*"loss":\([^,]*\),"ppl":\([^,]*\),.*/\1 \2/' >pairs
check "ppl is exp(loss)" awk '{ e = $2 - exp($1); if (!($2 > 1) || !(e * e <= 1e-18 * $2 * $2)) bad = 1 } END { exit bad || NR < 5 }' pairs
if script -qec true /dev/null >/dev/null 2>&1 </dev/null; then
    TERM=xterm script -qec "$bin --data t.txt $tiny --steps 40" /dev/null >tty.out 2>/dev/null </dev/null
    check "one line drawn again and again on a terminal" [ "$(tr -dc '\033' <tty.out | wc -c)" -ge 1 ]
    check "not a line for each report on a terminal" [ "$(tr '\r' ' ' <tty.out | grep -c 'step [0-9]*/40')" -le 2 ]
fi

# =====================================================================================================================
section "evaluation"

mkdir eval
good "training without evaluation" eval --data ../t.txt $span --steps 100 --checkpoint never.st --eval-every 100000 --log never.jsonl --log-every 1
good "training with many evaluations" eval --data ../t.txt $span --steps 100 --checkpoint often.st --eval-every 7 --eval-blocks 3 --log often.jsonl --log-every 1
check "14 evaluations and the last" [ "$(events eval/often.jsonl eval | wc -l)" -eq 15 ]
check "evaluating changes no bit of the training" same_state eval/never.st eval/often.st
events eval/never.jsonl >want; events eval/often.jsonl >got
check "evaluating changes no loss" cmp want got
cp eval/often.st keep.st; cp eval/often.jsonl keep.jsonl
for i in 1 2; do
    good "evaluation only" eval --data ../t.txt --checkpoint often.st --eval-only --log only$i.jsonl --threads 1
    check "it is JSON" json eval/only$i.jsonl
    check "keys" only_keys eval/only$i.jsonl eval event,split,loss,bpb,step,tokens
    check "validation and test" [ "$(grep -o '"split":"[a-z]*"' eval/only$i.jsonl | tr '\n' ' ')" = '"split":"valid" "split":"test" ' ]
    check "the step is the checkpoint's" [ "$(events eval/only$i.jsonl eval | field step | tr '\n' ' ')" = "100 100 " ]
done
check "evaluation twice: the same" cmp eval/only1.jsonl eval/only2.jsonl
check "evaluation after training is that of the training's end" [ "$(events eval/only1.jsonl eval | head -n 1 | field loss)" = "$(events eval/never.jsonl eval | tail -n 1 | field loss)" ]
good "into the log of the training" eval --data ../t.txt --checkpoint often.st --eval-only --log often.jsonl --threads 1
head -n "$(wc -l <keep.jsonl)" eval/often.jsonl >x
check "evaluation only appends to the log of the training" cmp keep.jsonl x
check "two lines more" [ "$(wc -l <eval/often.jsonl)" -eq $(($(wc -l <keep.jsonl) + 2)) ]
check "evaluation does not touch the checkpoint" cmp keep.st eval/often.st
good "as the reference counts" eval --data ../t.txt --checkpoint often.st --full-eval-mode --log ref.jsonl --threads 1
check "keys of it" only_keys eval/ref.jsonl eval event,split,loss,bpb,step,tokens
mkdir eval/three
head -c 3000 t.txt >eval/three/train.txt; tail -c 900 t.txt >eval/three/valid.txt; tail -c 500 t.txt >eval/three/test.txt
good "a directory of three texts" eval --data three $tiny --steps 20 --checkpoint three.st
good "a directory of three texts, evaluated" eval --data three --checkpoint three.st --eval-only --log three.jsonl --threads 1
check "both parts of it" [ "$(events eval/three.jsonl eval | wc -l)" -eq 2 ]
cp eval/only1.jsonl x
good "a run without a checkpoint, into an old log" eval --data ../t.txt $tiny --steps 20 --log only1.jsonl
head -n 2 eval/only1.jsonl >y
check "it appends" cmp x y
cp eval/only1.jsonl x
good "another into the same log" eval --data ../t.txt $tiny --steps 20 --log only1.jsonl
head -n "$(wc -l <x)" eval/only1.jsonl >y
check "it takes nothing away" cmp x y
good "another text than that of the training" eval --data ../w.txt --checkpoint never.st --eval-only --threads 1

# =====================================================================================================================
section "generation and help"

sample() { # FILE OPTIONS...: 40 tokens, without data
    to=$1; shift
    run log --checkpoint run.st --no-train --generate 40 --threads 1 "$@"
    if [ $rc -eq 0 ] && [ -s out ]; then pass; else fail "--generate $*: exit code $rc: $(head -c 300 err)"; fi
    cp out "$to"
}
sample g1 --seed 1 --prompt "the cat"
sample g2 --seed 1 --prompt "the cat"
sample g3 --seed 2 --prompt "the cat" --temperature 1.5 --top-p 0
sample g4 --seed 1 --prompt "the cat" --temperature 1.5 --top-p 0
sample g5 --seed 1 --prompt "the cat" --temperature 0
sample g6 --seed 2 --prompt "the cat" --temperature 0
sample g7 --seed 3 --prompt "the cat" --top-k 1
sample g8 --seed 1
check "a seed repeats" cmp g1 g2
check "another seed differs" differ g3 g4
check "temperature 0 knows no seed" cmp g5 g6
check "the likeliest alone is temperature 0" cmp g5 g7
check "the prompt stands in front" grep -q '^the cat' g1
check "the text goes on" [ "$(grep -o '^the cat.*' g5 | head -c 100 | wc -c)" -gt 12 ]
check "it learnt" grep -q 'the cat sat' g5
check "generating writes nothing" [ "$(tmps log)" -eq 0 ]
good "generation of words" log --checkpoint words.st --no-train --generate 10 --prompt "one two" --threads 1
check "words are words" grep -q '^one two ' out
good "training, then a text" log $learn --steps 20 --generate 10 --prompt "the"
check "the text at the end" grep -q '^the' out
run bad --checkpoint chars.st --no-train --generate 5 --prompt 'the cat' --threads 1
check "characters that are known" [ $rc -eq 0 ]
run bad --checkpoint chars.st --no-train --generate 5 --prompt '#' --threads 1
check "a prompt with an unknown character: exit code 2, not $rc" [ $rc -eq 2 ]
check "a prompt with an unknown character: the message" grep -q -e '--prompt' err

good "help" . --help
cp out help
check "nothing on standard error" [ ! -s err ]
for name in help preset nlayers hid-sz inner-hid-sz nheads attn-span block-sz precision adapt-span adapt-span-loss adapt-span-ramp adapt-span-init adapt-span-cache \
    pers-mem-size adapt-io dropout emb-dropout lr lr-warmup optim grad-clip batch-sz batch-split niter nbatches full-eval-mode data steps seed threads \
    checkpoint log tensorboard eval-only generate prompt; do
    check "help has --$name" grep -q -e "^ *--$name\( \|$\)" help
done
header log/run.st | sed 's/.*"config":"{//; s/}","step".*//' | tr ',' '\n' | sed -n 's/^\\"\([a-z][a-z-]*\)\\":.*/\1/p' >names
check "the options stand in the checkpoint" [ "$(wc -l <names)" -gt 40 ]
while read -r name; do check "help has --$name" grep -q -e "^ *--$name\( \|$\)" help; done <names
for preset in enwik8_small enwik8 enwik8_large text8 text8_large enwik8_pers_small enwik8_pers wiki103_pers; do
    check "help has $preset" grep -q "^ *$preset " help
    good "--preset $preset" . --preset $preset --help
    check "--preset $preset shows its values" differ help out
done
good "a preset of the smallest size" log --preset enwik8_small $tiny --data ../t.txt --steps 4

section "end"
echo "$passed passed, $failed failed"
[ $failed -eq 0 ] && [ $passed -gt 0 ]
