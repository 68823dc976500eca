#!/bin/sh
# trainer.sh FAMILY [BINARY] - tests a trainer from outside: sizes of presets, resuming
# after kill -9 and from the checkpoint alone, repeatability, bad input, full disks,
# signals, losses that are not finite, the log, evaluation and generation.
#
#     tests/trainers/trainer.sh attn_span build/train_attn_span
#     TRAINER_SEED=1234 tests/trainers/trainer.sh ...   repeats the random times of an
#                                                       earlier run
#
# This file contains the checks of all families; trainer_FAMILY.sh contains the
# options, presets and checks of one. Needs sh, the usual small tools and a C compiler
# (${CC:-cc}, for a library that kills at a chosen system call; otherwise those checks are
# skipped, with a message). Works in a temporary directory, which it removes. The last
# line is "N passed, N failed".

family=${1:-attn_span}
here=$(cd "$(dirname "$0")" && pwd)
bin=${2:-build/train_$family}
. "$here/trainer_lib.sh"
. "$here/trainer_$family.sh"
prog=train_$family
tiny="--preset ${base_preset:-reference} $sizes"
one_layer=
[ "$family" != par ] || one_layer="--pattern s"
[ "$family" != sru ] || one_layer="--attention-last 1"
full="$tiny $trained"

# Easy text, short enough for the streams to wrap.
awk 'BEGIN { for (i = 0; i < 90; i++) print "the cat sat on mat " i % 7 " and the dog ran" }' >t.txt
awk 'BEGIN { split("one two three four five six seven eight nine ten eleven twelve", w, " ")
    for (i = 0; i < 150; i++) { for (j = 0; j < 8; j++) printf "%s ",
        w[(i * j + i % 5) % 12 + 1]; print "x" i % 9 } }' >w.txt
files="--data ../t.txt --checkpoint run.st --log log.jsonl"
# where the family has it: adapts=yes
adaptive="--tokens words --adapt-io --adapt-io-divval 2 --adapt-io-cutoffs 5,12"
# FILE: one line of it is the program's, the others are progress
one_complaint() { [ "$(grep -c "^$prog: " "$1")" -eq 1 ]; }
has_a_step() { # DIR: its run has logged a step or has ended
    grep -q '"event":"train"' "$1/log.jsonl" 2>/dev/null || ! kill -0 "$running" 2>/dev/null
}
wait_for_a_step() { wait_until has_a_step "$1"; }
wait_for() { wait_until [ -s "$1" ]; } # FILE: until it is not empty
# SIGNAL STEPS DIR OPTIONS..: interrupts a run of STEPS in a new DIR; leaves $rc and $at,
# the step at which it stopped. Repeats if the run came to its last step first.
stop_in_the_midst() {
    sig=$1 total=$2; shift 2
    tries=0 rc=0
    while { [ $rc -eq 0 ] || [ "${at:-0}" -ge "$total" ]; } && [ $tries -lt 100 ]; do
        tries=$((tries + 1))
        rm -rf "$1"; mkdir "$1"
        start "$@"
        wait_for_a_step "$1"
        kill -"$sig" "$running" 2>/dev/null; collect
        at=$(sed -n 's/.*stopped at step \([0-9]*\); the checkpoint is saved.*/\1/p' bg.err)
    done
}
above() { # NUMBER COMMAND..: it prints a larger number
    least=$1; shift
    [ "$("$@")" -gt "$least" ]
}

# ========================================================================================
section "presets"

# number of parameters: published, in millions, and exact; for older models counted by
# hand from their shapes
presets >table
good "--list-presets" . --list-presets
cp out listed
check "nothing on standard error" [ ! -s err ]
check "one header line, and one line per preset" [ "$(wc -l <listed)" -eq $(($(wc -l <table) + 1)) ]
check "the header line" \
    [ "$(head -n 1 listed)" = "$(printf 'preset\tlayers\td\tvocabulary\tparameters')" ]
while read -r preset millions exact layers d; do
    run . --preset "$preset" --dry-run
    check "--preset $preset --dry-run" [ $rc -eq 0 ]
    n=$(sed -n 's/^\([0-9]*\) parameters.*/\1/p' out)
    check "$preset has $millions million parameters, got ${n:-0}" \
        [ "$(echo "${n:-0}" | awk '{ printf "%.1f", $1 / 1e6 }')" = "$millions" ]
    check "$preset has $exact parameters, got ${n:-0}" [ "${n:-0}" -eq "$exact" ]
    check "$preset is listed with these values" \
        grep -q "^$preset	$layers	$d	[1-9][0-9]*	$exact\$" listed
done <table
good "the vocabulary of a text" . --data w.txt --tokens words $tiny --dry-run
check "22 words" grep -q 'vocabulary 22$' out
good "a given vocabulary size" . $tiny --dry-run --vocab 1000
check "1000 tokens" grep -q 'vocabulary 1000$' out
good "one of each" . --preset demo $sizes --batch-sz 1 --nheads 1 --nlayers 1 $one_layer --dry-run
check "no plural: $(tr '\n' ';' <out)" [ "$(grep -c '\<1 [a-z]*s\>' out)" -eq 0 ]
good "sizes in addition to a preset" . --preset demo $sizes --dry-run
n=$(sed -n 's/^\([0-9]*\) parameters.*/\1/p' out)
mkdir count
good "a run with these sizes" count --preset demo $sizes --data ../t.txt --steps 2 --log log.jsonl
check "the run has $n parameters" \
    [ "$(sed -n 's/.*"params":\([0-9]*\).*/\1/p' count/log.jsonl)" = "$n" ]
good "--version" . --version
check "the version" grep -q "^$prog, seqtx [0-9]" out
family_presets

# without a preset: optimiser and sizes are chosen for the text and the time
mkdir sized
good "no preset" sized --data ../t.txt --threads 1 --log log.jsonl --steps 4
check "the message says so" grep -q '^no --preset; chosen for the text and the time: --nlayers' err
check "a short text: dropout" \
    [ "$(sed -n 's/.*"event":"start".*"dropout":\([0-9.]*\),.*/\1/p' sized/log.jsonl)" = 0.3 ]
check "the optimiser" \
    [ "$(sed -n 's/.*"event":"start".*"optim":"\([a-z]*\)".*/\1/p' sized/log.jsonl)" = muon ]
good "no preset, one size given" sized --data ../t.txt --threads 1 --log given.jsonl --steps 4 \
    --nlayers 1
check "it is kept" grep -q '"event":"start".*"nlayers":1,' sized/given.jsonl
check "and not in the message" \
    grep -q '^no --preset; chosen for the text and the time: --hid-sz' err
# options of the user agree with those that were chosen
started() { sed -n "s/.*\"event\":\"start\".*\"$1\":\"*\([^,\"]*\).*/\1/p" sized/$2.jsonl; }
good "another optimiser" sized --data ../t.txt --threads 1 --log adamw.jsonl --steps 2 --optim adamw
check "its learning rate is not Muon's: $(started lr log), $(started lr adamw)" \
    [ "$(started lr log)" != "$(started lr adamw)" ]
good "momentum of Muon, and a batch in 16 parts" sized --data ../t.txt --threads 1 \
    --log parts.jsonl --steps 2 --momentum 0.9 --batch-split 16
check "the batch fits" [ "$(started batch-sz parts)" = 16 ]
good "streams" sized --data ../t.txt --threads 1 --log streams.jsonl --steps 2 --streams 6
check "the batch is a divisor" [ "$(started batch-sz streams)" = 6 ]
if [ "$(uname -sm)" = "Linux x86_64" ]; then
    precision=f32
    if grep -qE 'avx512_bf16|amx_bf16' /proc/cpuinfo; then precision=bf16; fi
    check "the precision is that of the processor" [ "$(started precision log)" = $precision ]
fi
parameters() { sed -n 's/^\([0-9]*\) parameters.*/\1/p' out; }
awk 'BEGIN { for (i = 0; i < 80000; i++) print "a line of the text, number " 7919 * i }' >long.txt
small=0
for minutes in 0.2 3 60; do
    good "sizes for $minutes minutes" . --data long.txt --threads 1 --dry-run --minutes $minutes
    check "a longer run has a larger model: $small, $(parameters)" [ "$(parameters)" -gt $small ]
    small=$(parameters)
done
good "sizes for a shorter text" . --data t.txt --threads 1 --dry-run --minutes 60
check "a shorter text has a smaller model: $small, $(parameters)" [ "$(parameters)" -lt $small ]
rm long.txt
good "what would be trained" . --data t.txt --dry-run
check "in at most 80 columns" [ "$(awk 'length > 80' out | wc -l)" -eq 0 ]
n=$(sed -n 's/^\([0-9]*\) parameters.*/\1/p' out)
check "is what is trained" [ "$(sed -n 's/.*"params":\([0-9]*\).*/\1/p' sized/log.jsonl)" = "$n" ]
head -c 200 t.txt >tiny.txt
good "a text of 200 bytes" sized --data ../tiny.txt --threads 1 --steps 4
good "a preset, nothing sized" sized $tiny --data ../t.txt --steps 2
check "no message" [ "$(grep -c 'chosen for' err)" -eq 0 ]

# ========================================================================================
section "resume after kill -9"

long="$files $full --best best.st --steps 120 --save-every 5"
long="$long --eval-blocks 2 --log-every 1 $long_more"
mkdir whole
t0=$(date +%s%N)
good "120 steps in one go" whole $long
whole_ms=$(ms_since "$t0")
check "epochs end" [ "$(meta whole/run.st data.wraps)" -ge 2 ]
check "the log has each step once" \
    [ "$(steps_of whole/log.jsonl | tr '\n' ' ')" \
    = "$(awk 'BEGIN { for (i = 1; i <= 120; i++) printf "%d ", i }')" ]
check "states are in the checkpoint" \
    [ "$(header whole/run.st | grep -o "$state_names" | sort -u | wc -l)" -ge "$states" ]

mkdir half
good "50 steps" half $long --steps 50
check "50 steps differ from 120" differ half/run.st whole/run.st
check "step 50" [ "$(meta half/run.st step)" = 50 ]
start half $long
nap $((whole_ms / 4))
kill -9 "$running" 2>/dev/null; collect
[ "$steps_matter" = yes ] || continued "50 steps, kill -9, to 120" half $long

i=0
while [ $i -lt $kills_at_times ]; do
    i=$((i + 1)); roll
    ms=$((whole_ms * rand / 10000))
    rm -rf kill; mkdir kill
    start kill $long
    nap $ms
    kill -9 "$running" 2>/dev/null; collect
    continued "kill $i, after $ms ms of $whole_ms" kill $long
    check "kill $i: the best equals that of the uninterrupted run" \
        same_state whole/best.st kill/best.st
done

# one run that is killed repeatedly until it is finished
rm -rf kill; mkdir kill
i=0 rc=137
while [ $i -lt 12 ] && [ $rc -ne 0 ]; do
    i=$((i + 1)); roll
    ms=$((whole_ms / 4 + whole_ms * rand / 40000))
    start kill $long
    nap $ms
    kill -9 "$running" 2>/dev/null; collect
    find kill -name 'log.jsonl.*.tmp' -exec rm -f {} +
    check "at most one temporary file of each target" \
        [ "$(find kill -name 'run.st.*.tmp' | wc -l)" -le 1 \
        -a "$(find kill -name 'best.st.*.tmp' | wc -l)" -le 1 ]
done
find kill -name 'best.st.*.tmp' -exec rm -f {} +
continued "$i kills in one run" kill $long

# kills at exact system calls: during a write, before a flush, before the rename
exact_kills exact $long
if [ -n "$kills" ]; then
    i=0 left=0
    while [ $i -lt $kills_at_calls ]; do
        i=$((i + 1)); roll
        at=$((1 + (calls - 1) * rand / 9999))
        rm -rf kill; mkdir kill
        (cd kill && TRAINER_DIE_AT=$at LD_PRELOAD=$T/kill.so exec "$bin" $long) >/dev/null 2>&1 &
        running=$!; collect
        check "killed by call $at" [ $rc -eq 137 ]
        find kill -name 'best.st*.tmp' -exec rm -f {} +
        continued "kill at call $at of $calls" kill $long
    done
    # a kill during a save: the next save removes the temporary file, and nothing else
    at=$calls
    while [ $at -gt 1 ] && [ $left -eq 0 ]; do
        at=$((at - 1))
        rm -rf kill; mkdir kill
        (cd kill && TRAINER_DIE_AT=$at LD_PRELOAD=$T/kill.so exec "$bin" $long) >/dev/null 2>&1 &
        running=$!; collect
        left=$(find kill -name 'run.st.*.tmp' | wc -l)
    done
    check "a kill in a save leaves a temporary file" [ "$left" -eq 1 ]
    : >kill/run.st.mine.tmp
    good "after it" kill $long
    check "which the next save takes away" \
        [ "$(find kill -name 'run.st.*.tmp')" = kill/run.st.mine.tmp ]
else
    echo "left out: kills at exact calls (no C compiler," \
        "or a binary that takes no preloaded library)"
fi

# ========================================================================================
section "other processes"

# Two runs with the same checkpoint or log: the second is refused and writes nothing.
mkdir pair
start pair $files $full --steps 100000000 --save-every 1 --log-every 1
wait_for_a_step pair
wait_for pair/run.st
second() { # WHAT FILE OPTIONS..
    what=$1 file=$2; shift 2
    run pair "$@"
    check "$what: exit code 2, got $rc" [ $rc -eq 2 ]
    check "$what: the message names the file and the process: $(tail -n 1 err)" \
        grep -q -e "$file: another run (process $running) is writing this file" err
}
second "the same command" "--checkpoint run.st" $files $full --steps 100000000
second "one checkpoint" "--checkpoint run.st" --data ../t.txt --checkpoint run.st --threads 1
second "a best as its checkpoint" "--best ./run.st" --data ../t.txt $full --best ./run.st \
    --eval-every 1
second "one log" "--log ../pair/log.jsonl" --data ../t.txt --checkpoint own.st \
    --log ../pair/log.jsonl $full
second "the log of an evaluation" "--log log.jsonl" --data ../t.txt --checkpoint run.st \
    --eval-only --log log.jsonl --threads 1
check "they left no file" [ ! -e pair/own.st ]
good "it can be read: generation" pair --checkpoint run.st --no-train --generate 5 --threads 1
good "it can be read: evaluation" pair --checkpoint run.st --data ../t.txt --eval-only --threads 1
good "it can be read: a score" pair --checkpoint run.st --score ../t.txt --threads 1
printf 'the cat\n' |
    (cd pair && exec $limited "$bin" --checkpoint run.st --interactive --generate 3 \
    --threads 1) >out 2>err
check "it can be read: a conversation" [ $? -eq 0 -a -s out ]
kill -9 "$running" 2>/dev/null; collect
check "a kill leaves the locks" [ "$(find pair -name '*.lock' | wc -l)" -eq 2 ]
good "which do not block a new run" pair $files $full \
    --steps $(($(meta pair/run.st step) + 3)) --log-every 1
check "and are removed at the end: $(ls pair)" \
    [ "$(find pair -name '*.lock' -o -name '*.tmp' | wc -l)" -eq 0 ]
steps_of pair/log.jsonl >x
check "the log has each step once" [ "$(sort -n x | uniq -d | wc -l)" -eq 0 ]
# The lock that another user's run left behind, too. Only root can test this.
as_nobody() { # DIR OPTIONS..: runs the trainer there without rights of root; leaves $rc
    dir=$1; shift
    (cd "$dir" && exec setpriv --reuid 65534 --regid 65534 --clear-groups "$T/train" "$@") \
        >"$T/out" 2>"$T/err" </dev/null
    rc=$?
}
mkdir shared && chmod 711 "$T" && chmod 777 shared && cp "$bin" train && chmod 755 train
if [ "$(id -u)" -eq 0 ] && as_nobody shared --version && [ $rc -eq 0 ]; then
    theirs="--data ../t.txt $full --steps 3 --checkpoint run.st"
    (umask 022; : >shared/run.st.lock)
    as_nobody shared $theirs
    check "another user's lock: exit code $rc: $(tail -n 1 err)" [ $rc -eq 0 -a -s shared/run.st ]
    check "is removed" [ ! -e shared/run.st.lock ]
    echo precious >shared/run.st.lock
    as_nobody shared $theirs --steps 4
    check "another user's file is no lock: $(tail -n 1 err)" \
        [ $rc -eq 2 -a "$(grep -c 'run.st.lock is not the lock file of a run' err)" -eq 1 ]
    check "and stays" [ "$(cat shared/run.st.lock)" = precious ]
    # closed to others, or in a directory where only the owner can remove it
    rm shared/run.st.lock; (umask 077; : >shared/run.st.lock)
    as_nobody shared $theirs --steps 4
    check "a lock that cannot be read: $(tail -n 1 err)" [ $rc -eq 2 -a "$(grep -c \
        'run.st.lock belongs to another user and cannot be removed (Permission denied): if that' \
        err)" -eq 1 ]
    chmod 644 shared/run.st.lock; chmod 1777 shared
    as_nobody shared $theirs --steps 4
    check "a lock in a sticky directory: $(tail -n 1 err)" [ $rc -eq 2 -a "$(grep -c \
        'run.st.lock belongs to another user and cannot be removed (Operation not permitted): ' \
        err)" -eq 1 ]
    rm -rf shared; mkdir shared; chmod 777 shared
    mask=$(umask); umask 022
    start shared $files $full --steps 100000000 --save-every 1 --log-every 1
    umask "$mask"
    wait_for_a_step shared
    as_nobody shared $theirs
    check "another user's run: $(tail -n 1 err)" [ $rc -eq 2 -a "$(grep -c \
        "run.st: another run (process $running) is writing this file" err)" -eq 1 ]
    kill -9 "$running" 2>/dev/null; collect
else
    echo "left out: locks of another user (not root, or no setpriv)"
fi
# two runs started at the same time
rm -rf pair; mkdir pair
start pair $files $full --steps 100000000; one=$running
start pair $files $full --steps 100000000; two=$running
one_has_ended() { ! kill -0 "$one" 2>/dev/null || ! kill -0 "$two" 2>/dev/null; }
wait_until one_has_ended
if kill -0 "$one" 2>/dev/null; then lost=$two won=$one; else lost=$one won=$two; fi
running=$won; kill -9 "$running" 2>/dev/null; collect
running=$lost; kill -9 "$running" 2>/dev/null; collect
check "one of two runs is refused: exit code 2, got $rc" [ $rc -eq 2 ]

# closed standard streams: no file gets their descriptor
mkdir shut
for shut in '<&-' '>&-' '2>&-' '<&- >&- 2>&-'; do
    rm -f shut/*
    short="--steps 12 --log-every 1 --generate 20"
    (cd shut && eval "exec \$limited \"\$bin\" \$files \$full \$short $shut") >out 2>err
    rc=$?
    case $shut in
    *'>&-'*'2>'* | '<&-' | '2>&-') ;;
    *) check "$shut: lost text is an error, got $rc" [ $rc -eq 1 ]
       check "$shut: which is reported: $(tail -n 1 err)" grep -q 'cannot be written' err ;;
    esac
    check "$shut: the log is JSON" json shut/log.jsonl
    check "$shut: the checkpoint is whole" loads shut/run.st
done

# A link that is planted in place of the trimmed log is not followed. File names can have
# the maximal length.
mkdir plant
good "12 steps" plant $files $full --steps 12
echo precious >plant/victim
echo '{"event":"train","step":999999,"loss":1}' >>plant/log.jsonl
(
    cd plant && exec sh -c 'for n in $$ 0 1 2; do ln -s victim log.jsonl.$n.tmp; done; exec "$@"' \
        sh "$bin" $files $full --steps 14
) >out 2>err
check "a planted link: the run continues" [ $? -eq 0 ]
check "a planted link: its target is unchanged" [ "$(cat plant/victim)" = precious ]
check "a planted link: the log is no link, and trimmed" \
    [ ! -L plant/log.jsonl -a "$(grep -c 999999 plant/log.jsonl)" -eq 0 ]
long_name=$(awk 'BEGIN { while (i++ < 249) printf "n" }').jsonl
cp plant/log.jsonl "plant/$long_name"
echo '{"event":"train","step":999999,"loss":1}' >>"plant/$long_name"
good "a log with a long name" plant --data ../t.txt --checkpoint run.st --log "$long_name" \
    --steps 16 --threads 1
check "is trimmed" [ "$(grep -c 999999 "plant/$long_name")" -eq 0 ]
check "with no other file left" [ "$(find plant -name 'nnn*' | wc -l)" -eq 1 ]

# the text is truncated while it is being read
for size in 0 100; do
    rm -rf cut; mkdir cut; cp t.txt cut/text
    start cut --data text --checkpoint run.st --log log.jsonl $full --steps 100000000 \
        --save-every 1 --log-every 1
    wait_for_a_step cut
    wait_for cut/run.st
    if [ $size -eq 0 ]; then
        : >cut/text
    else
        head -c $size t.txt >cut/short
        cat cut/short >cut/text
    fi
    collect
    check "a text cut to $size bytes: exit code 1, got $rc" [ $rc -eq 1 ]
    check "a text cut to $size bytes: it is reported" \
        grep -q "^$prog: the text text was truncated while it was being read" bg.err
    check "a text cut to $size bytes: the last checkpoint is valid" loads cut/run.st
done

# messages that lead to an existing run
mkdir led
cd led
touch t.txt
none="no such checkpoint: none.st; check the name after --checkpoint, or"
refused "$none give --data to start a new run$" --checkpoint none.st --threads 1
for task in "--no-train --generate 1" --eval-only --interactive "--score t.txt"; do
    refused "$none train a model first$" --checkpoint none.st $task
done
refused "no such checkpoint: none/model.safetensors; check the name after --out, or train" \
    --out none --no-train --generate 1
cd ..
for other in attn_span sru compressive par; do
    [ $other != "$family" ] || continue
    run led --checkpoint "$here/old/$other.safetensors" --no-train --generate 1 --threads 1
    check "a checkpoint of another family: $(tail -n 1 err)" \
        grep -q "is a checkpoint of train_$other: use that program" err
done
while read -r theirs ours; do
    run led $theirs 3
    check "$theirs is suggested as --$ours: $(tail -n 1 err)" grep -q -e "did you mean --$ours?" err
done <<'END'
--repeat_penalty repetition-penalty
--ctx-size block-sz
--output_dir out
--num_train_epochs epochs
--n_layers nlayers
-c block-sz
--save_steps save-every
--per_device_train_batch_size batch-sz
--max_length generate
--threads_batch threads
--prompt_file prompt
END
[ "$family" = sru ] || run led --lr_decay 3       # train_sru has such an option
[ "$family" = sru ] || check "--lr_decay: $(tail -n 1 err)" grep -q 'did you mean --schedule?' err
run led --do_train 1
check "--do_train is not answered with its opposite: $(tail -n 1 err)" \
    grep -q -e '--do_train: unknown option; --help' err

# names of nanoGPT and of one letter are the same options
mkdir aka aka/ours aka/theirs
good "our names" aka/ours $tiny --lr 0.01 --steps 6 --eval-every 3 \
    --eval-blocks 1 --threads 1 --checkpoint a.st --data ../../t.txt
theirs=$(echo " $tiny" | sed 's/ --nlayers/ --n_layer/; s/ --hid-sz/ --n_embd/
    s/ --nheads/ --n_head/; s/ --block-sz/ --block_size/; s/ --batch-sz/ --batch_size/
    s/ --eval-every/ --eval_interval/; s/ --eval-blocks/ --eval_iters/')
check "sizes by nanoGPT's names: $theirs" [ "$(echo "$theirs" | grep -o -e --n_ | wc -l)" -ge 2 ]
good "nanoGPT's names" aka/theirs $theirs --learning_rate 0.01 --max_iters 6 \
    --eval_interval 3 --eval_iters 1 -o a.st --data ../../t.txt
check "the same checkpoint" cmp aka/ours/a.st aka/theirs/a.st
good "ours, a text" aka/ours --checkpoint a.st --no-train --prompt "the cat" --generate 9 \
    --seed 3 --temperature 0.7 --threads 1
cp out text
for way in "-m a.st -n 9 -s 3 -t 1" "--model a.st --max_new_tokens=9 -s=3 -t=1"; do
    good "$way" aka/theirs --no-train --temp 0.7 -p "the cat" $way
    check "$way: the same text" cmp text out
done
run aka/ours --resume a.st -m a.st --no-train -n 1
check "two names of an option are refused: exit code 2, got $rc" [ $rc -eq 2 ]
check "two names of an option: the message: $(cat err)" \
    grep -q "^$prog: --resume and -m are the same option: give one of them" err
run aka
check "without arguments: exit code 2, got $rc" [ $rc -eq 2 ]
check "without arguments: five lines, of at most 80 columns" \
    [ "$(wc -l <err)" -eq 5 -a "$(awk 'length > 80' err | wc -l)" -eq 0 -a ! -s out ]

# ========================================================================================
section "options on resume"

# The checkpoint provides all options, except its own path, without a preset.
mkdir opt
begun="--preset demo $sizes --data ../t.txt --dropout 0.1 --steps 200 --save-every 10"
begun="$begun --eval-every 50 --eval-blocks 1 --log-every 1"
good "a run of the preset" opt $begun --checkpoint whole.st
same_end() { # WHAT OPTIONS..: continues opt/at.st to the end of the uninterrupted run
    what=$1; shift
    cp opt/at.st opt/run.st
    good "$what" opt --checkpoint run.st --threads 1 --log "l$#.jsonl" "$@"
    check "$what: bit-identical to the uninterrupted run" cmp opt/whole.st opt/run.st
    check "$what: no changed options are reported" [ "$(grep -c 'changed options' err)" -eq 0 ]
}
stop_in_the_midst TERM 200 midst $begun --checkpoint at.st --log log.jsonl
mv midst/at.st opt
check "stopped before the end" [ "$(meta opt/at.st step)" -lt 200 ]
same_end "the same command" $begun
same_end "--checkpoint and --data alone" --data ../t.txt
same_end "--checkpoint alone"
check "the message says where the text is" grep -q '^training text of the checkpoint, ../t.txt' err
cp t.txt moved.txt
cp opt/at.st opt/run.st
good "the text moved" opt --checkpoint run.st --threads 1 --data ../moved.txt
check "the text moved: the same run" same_state opt/whole.st opt/run.st

# options that can change: reported in one line and in the log
cp opt/at.st opt/run.st
good "another rate" opt --checkpoint run.st --data ../t.txt --threads 1 --lr 0.0001 --dropout 0 \
    --steps 300 --log new.jsonl
check "it is reported in one line" [ "$(grep -c 'changed options' err)" -eq 1 ]
check "with both values: $(grep 'changed options' err)" \
    grep -q -e 'changed options.*--dropout 0 (0.1).*--lr 0.0001 ([0-9.]*).*--steps 300 (200)' err
changed='{"dropout":\[0.1,0\],"lr":\[[0-9.]*,0.0001\],"steps":\[200,300\]}'
check "and in the log" \
    grep -q "^{\"event\":\"resume\",\"step\":[0-9]*,\"config\":{.*\"changed\":$changed}\$" opt/new.jsonl
check "the rate is the new one" \
    [ "$(events opt/new.jsonl | head -n 1 | field lr | awk '{ print ($1 <= 0.0001) }')" = 1 ]
check "the checkpoint has it now" [ "$(header opt/run.st | grep -c '\\"steps\\":300')" -eq 1 ]
good "the end of the run" opt --checkpoint run.st --threads 1
check "the message says that the run is complete" \
    grep -q 'the run is complete; more --steps' err
cp opt/at.st opt/run.st
cd opt
refused "--[a-z-]* is .* here (from --preset reference) but .* in the checkpoint: leave --preset out" \
    --checkpoint run.st --data ../t.txt --preset reference $sizes --steps 500
refused "the training text of --data ../w.txt" --checkpoint run.st --data ../w.txt
cd ..
mkdir opt/far && cp opt/at.st opt/far/far.st
cd opt/far
refused "the text of the checkpoint, ../t.txt: No such file.*give its new path as --data" \
    --checkpoint far.st --steps 500
cd ../..
good "generation needs no text" opt/far --checkpoint far.st --no-train --generate 5

# checkpoints of the first version, which contain the training options
mkdir old && cp t.txt old && cp "$here/old/$family.safetensors" old/run.st
good "an old checkpoint, evaluated" old --checkpoint run.st --data t.txt --eval-only --threads 1
good "an old checkpoint, resumed" old --checkpoint run.st --data t.txt --steps 60 --log log.jsonl \
    --threads 1
check "with the options it contains" \
    grep -q "\"event\":\"resume\",\"step\":30,.*$old_options" old/log.jsonl
check "to the same loss as in the first version" \
    awk -v got="$(events old/log.jsonl eval | tail -n 1 | field loss)" \
    -v want="$old_loss" 'BEGIN { e = got - want; exit !(e < 0.01 && -e < 0.01) }'
# A program opens a checkpoint (examples/generate.c): the same text as --generate, whose
# first token is the end of a line. It cannot open a checkpoint of the first version, but
# says how to convert it: --export writes a file that it can, with the same weights.
opens() { "$(dirname "$bin")/generate" "$1" '
' 40 7 >out 2>err; }
sampled() { # WHAT CHECKPOINT FILE: the program with FILE, the trainer with CHECKPOINT
    good "$1: the trainer generates" old --checkpoint "$2" --no-train --generate 40 --seed 7 \
        --threads 1
    cp out want
    check "$1: it opens: $(opens "old/$3"; cat err)" opens "old/$3"
    check "$1: the program generates the same" [ "$(cat out)" = "
$(cat want)" ]
}
sampled "a resumed checkpoint" run.st run.st
cp "$here/old/$family.safetensors" old/first.st
opens old/first.st
check "a checkpoint of the first version cannot be opened: $(cat err)" [ $? -ne 0 -a ! -s out ]
check "the message says what to do: $(cat err)" grep -q \
    "^generate: old/first.st: .*: train_$family --checkpoint OLD --no-train --export NEW writes" err
good "--export" old --checkpoint first.st --no-train --export new.st --threads 1
sampled "an exported model" first.st new.st
sampled "an exported model, in the trainer" new.st new.st
check "it is smaller" [ "$(wc -c <old/new.st)" -lt "$(wc -c <old/first.st)" ]
good "--export again" old --checkpoint new.st --no-train --export again.st --threads 1
check "changes nothing" cmp old/new.st old/again.st
good "--export, --init-from" old --init-from new.st --data t.txt --steps 2 --batch-sz 2 \
    --block-sz 8 --export tuned.st --threads 1
sampled "exported after training" tuned.st tuned.st
cd old
refused "new.st was written by --export and has no optimiser state, so it cannot be resumed" \
    --checkpoint new.st --data t.txt --steps 60
refused "--export and --checkpoint are the same file" --checkpoint new.st --no-train \
    --export new.st
refused "--export no/new.st: the directory does not exist" --checkpoint new.st --no-train \
    --export no/new.st
refused "--export has no effect" --checkpoint new.st --score t.txt --export x.st
cd ..

# A checkpoint without some of them (old_given lists them; some families have none) does
# not train with defaults.
if [ -n "$old_given" ]; then
    cp "$here/old/${family}_bare.safetensors" old/bare.st
    cd old
    refused "bare.st.*did not store --dropout,.*--lr,.*--grad-clip.*give those options, or the --preset" \
        --checkpoint bare.st --data t.txt --steps 60 --threads 1
    refused "bare.st.*did not store --dropout,.*--grad-clip.*give those options, or the --preset" \
        --checkpoint bare.st --data t.txt --steps 60 --threads 1 --lr 0.001
    cd ..
    good "a bare checkpoint, evaluated" old --checkpoint bare.st --data t.txt --eval-only \
        --threads 1
    good "a bare checkpoint, sampled" old --checkpoint bare.st --no-train --generate 5 --threads 1
    good "a bare checkpoint with the options" old --checkpoint bare.st --data t.txt --steps 60 \
        --threads 1 --log bare.jsonl $old_given
    check "missing options are reported" \
        grep -q '^not in the checkpoint, taken from the command line or preset: --dropout,.*--grad-clip' err
    check "and logged" grep -q '"event":"resume".*"not_in_checkpoint":"--dropout,' old/bare.jsonl
    check "the result is the same" \
        [ "$(events old/bare.jsonl eval | tail -n 1 | field loss)" \
        = "$(events old/log.jsonl eval | tail -n 1 | field loss)" ]
fi

# ========================================================================================
section "repeat and resume"

family_variants
[ "$adapts" = no ] || variant "adaptive words" --data ../w.txt $full $adaptive
variant "characters" --data ../t.txt $full --tokens chars
variant "compact bytes" --data ../t.txt $full --tokens bytes-compact
variant "two threads" --data ../t.txt $full --threads 2
[ "$family" = par ] || variant "groups of streams" --data ../t.txt $full --streams 16
variant "recompute" --data ../t.txt $full --recompute
mkdir plain
good "without recompute" plain --checkpoint run.st --data ../t.txt $full --steps 50
check "recompute changes no bit" same_state plain/run.st v1/run.st
# bfloat16 matmuls: recorded in the checkpoint, and a run keeps its precision
mkdir bf16
run bf16 --checkpoint first.st --data ../t.txt $full --steps 2 --precision bf16
if [ $rc -eq 2 ] && grep -q -e '--precision bf16.*does not support bf16' err; then
    echo "left out: --precision bf16 (the library refuses it)"
else
    variant "bf16" --data ../t.txt $full --precision bf16
    check "bf16: in the checkpoint" [ "$(header v1/run.st | grep -c 'precision\\":\\"bf16')" -eq 1 ]
    good "bf16: 25 steps" bf16 --checkpoint run.st --data ../t.txt $full --steps 25 \
        --precision bf16 --log log.jsonl
    check "bf16: in the first record of the log" \
        [ "$(head -n 1 bf16/log.jsonl | grep -c '"precision":"bf16"')" -eq 1 ]
    good "bf16: evaluated in bf16" bf16 --checkpoint run.st --data ../t.txt --eval-only \
        --log bf16.jsonl --threads 1
    good "bf16: evaluated in float" bf16 --checkpoint run.st --data ../t.txt --eval-only \
        --log f32.jsonl --threads 1 --precision f32
    check "bf16: the two evaluations agree to 0.02" \
        awk -v a="$(head -n 1 bf16/bf16.jsonl | field loss)" \
        -v b="$(head -n 1 bf16/f32.jsonl | field loss)" \
        'BEGIN { exit !(a > 0 && b > 0 && a - b < 0.02 && b - a < 0.02) }'
    cp bf16/run.st keep.st
    run bf16 --checkpoint run.st --data ../t.txt $full --steps 50 --precision f32
    check "bf16: training does not continue in float: exit code 2, got $rc" [ $rc -eq 2 ]
    check "bf16: the message says why: $(cat err)" \
        grep -q -e '--precision is f32 here.*bf16 in the checkpoint' err
    check "bf16: the checkpoint is unchanged" cmp keep.st bf16/run.st
    good "bf16: resumed without the option" bf16 --checkpoint run.st --data ../t.txt $full \
        --steps 50
    check "bf16: with the same result" cmp v1/run.st bf16/run.st
fi
mkdir other
good "another seed" other --checkpoint run.st --data ../t.txt $full --steps 50 --seed 2
check "another seed gives another run" differ plain/run.st other/run.st
good "another seed, resumed without it" other --checkpoint run.st --data ../t.txt --steps 55 \
    --threads 1
check "the checkpoint stores the seed" [ "$(meta other/run.st seed)" = 2 ]
family_more

# ========================================================================================
section "memory"

i=0; while [ $i -lt 24 ]; do cat t.txt; i=$((i + 1)); done >big.txt
wide="--data ../big.txt $tiny --threads 1 --nlayers 4 --hid-sz 64 --batch-sz 32 --batch-split 1
    --block-sz 64 --steps 8 --log-every 1
    --eval-every 4 --eval-blocks 2"
peak() { sed -n 's/.*"peak_bytes":\([0-9]*\).*/\1/p' "$1" | sort -n | tail -n 1; }
gib() { awk -v b="$1" 'BEGIN { printf "%.9f", b / 1073741824 }'; }
for n in 0 1 3 all auto; do mkdir "m$n"; done
good "no layer recomputed" m0 --checkpoint run.st --log log.jsonl $wide --no-recompute
good "one layer" m1 --checkpoint run.st --log log.jsonl $wide --recompute=1
good "three layers" m3 --checkpoint run.st --log log.jsonl $wide --recompute 3
good "all layers" mall --checkpoint run.st --log log.jsonl $wide --recompute
for n in 1 3 all; do
    check "$n layers recomputed: the same bits" same_state m0/run.st m$n/run.st
done
most=$(peak m0/log.jsonl) least=$(peak mall/log.jsonl)
check "more layers need less memory" \
    [ "$most" -gt "$(peak m3/log.jsonl)" -a "$(peak m3/log.jsonl)" -ge "$least" ]
good "auto, with enough memory" mauto --checkpoint run.st --log all.jsonl $wide --recompute auto
check "the message: $(head -n 2 err)" \
    grep -q '^recomputing 0 of 4 layers; predicted peak [0-9.]* MiB, limit ' err
foretold() { # LOG: the prediction is an upper bound and close
    awk -v p="$(head -n 1 "$1" | field predicted_bytes)" \
        -v m="$(peak "$1")" 'BEGIN { exit !(m > 0 && p >= m && p <= 1.04 * m) }'
}
check "its prediction: $(head -n 1 mauto/all.jsonl |
    field predicted_bytes), and $(peak mauto/all.jsonl)" \
    foretold mauto/all.jsonl
rm mauto/run.st
run mauto $wide --recompute auto --max-memory "$(gib $((least * 3 / 4)))"
check "three quarters of the minimum is refused: exit code $rc" [ $rc -eq 2 ]
even="requires [0-9.]* MiB even if all 4 layers are recomputed"
check "the message says what would fit: $(cat err)" \
    grep -q "$even, but --max-memory is [0-9.]* MiB: use a smaller --batch-sz, .* --batch-split" err
wants=$(sed -n 's/.*training requires \([0-9.]*\) MiB.*/\1/p' err)
check "slightly more than it uses: $wants MiB" \
    awk -v w="$wants" -v m="$least" \
    'BEGIN { exit !(w > 0 && w * 1048576 > 0.99 * m && w * 1048576 < 1.7 * m) }'
limit=$(awk -v w="$wants" 'BEGIN { printf "%.9f", 1.02 * w / 1024 }')
good "auto, in less" mauto --checkpoint run.st --log log.jsonl $wide --recompute auto --max-memory \
    "$limit"
n=$(head -n 1 mauto/log.jsonl | field recomputed)
check "$n layers" [ "$n" -gt 0 -a "$n" -le 4 ]
check "the same bits" same_state m0/run.st mauto/run.st
good "resumed with auto from the checkpoint, and more memory" mauto --checkpoint run.st --steps 10 \
    --threads 1 --log more.jsonl --max-memory 2
check "now none: $(head -n 1 mauto/more.jsonl)" \
    [ "$(head -n 1 mauto/more.jsonl | field recomputed)" = 0 ]
mkdir fewer
run fewer $wide --recompute $((n / 2)) --max-memory "$limit"
check "as few layers as the limit allows: half of them fail with $rc" [ $rc -ne 0 ]
case $family in
attn_span)
    good "the limit holds while spans grow" fewer --checkpoint grow.st $wide --attn-span 400 \
    --adapt-span --adapt-span-init 0.02 --adapt-span-loss 0 --lr 0.05 --steps 40 \
    --recompute auto --max-memory 0.056 ;;
par) good "the limit holds for the evaluation of other gates" fewer --checkpoint grow.st $wide \
    --pattern search --steps 6 --recompute auto --max-memory 0.25 ;;
esac

# ========================================================================================
section "bad input"

mkdir bad bad/dir bad/three
cp t.txt w.txt bad
cd bad || exit 1
good "a checkpoint for bad input" . --data t.txt $full --steps 6 --checkpoint good.st
good "a checkpoint of characters" . --data t.txt $full --steps 6 --checkpoint chars.st \
    --tokens chars
: >empty.txt
echo "a few words" >short.txt
head -c 70 t.txt >short70.txt     # 64 training tokens; four streams with blocks of 16 need 68
{ cat t.txt; printf 'caf\351 \377\376\n'; } >latin.txt
{ printf 'caf\351 \377\376\n'; cat t.txt t.txt; } >latin1.txt
awk '
    BEGIN { for (i = 0; i < 100; i++) print "quite another text, of another length " i }' >other.txt
cp t.txt three/train.txt; : >three/valid.txt

new="--log L.jsonl --tensorboard TB --checkpoint C.st --steps 3"       # files that must not appear
# for an existing checkpoint
old="--log L.jsonl --tensorboard TB --steps 9"

# data
refused 'data' $tiny $new
refused 'nowhere.txt.*no such file' --data nowhere.txt $tiny $new
refused 'empty.txt' --data empty.txt $tiny $new
refused 'short.txt: expected at least 64 bytes, got 12' --data short.txt $tiny $new
refused 'empty.txt is empty; expected a .vocab file' --data t.txt $tiny $new --tokens ids --pieces empty.txt
refused 'short70.txt' --data short70.txt $tiny $new
refused 't.txt\|--batch-sz' --data t.txt $tiny $new --batch-sz 4000
refused 't.txt\|--block-sz' --data t.txt $tiny $new --block-sz 100000
refused 'data dir: the directory has no train.txt' --data dir $tiny $new
refused 'three/valid.txt' --data three $tiny $new
refused '/dev/null' --data /dev/null $tiny $new
mkdir one && cp t.txt one/train.txt && printf x >one/valid.txt
refused 'one: the validation text is too short: expected at least 2 tokens, got 1' --data one $tiny $new
# damage within a valid file format: a bit of the last tensor, and a number of the
# metadata
size=$(wc -c <good.st)
{ head -c $((size - 9)) good.st; printf '\377'; tail -c 8 good.st; } >bit.st
sed 's/"step":"6"/"step":"7"/' good.st >step.st
refused 'bit.st.*damaged' --data t.txt $full --checkpoint bit.st --steps 12
refused 'step.st.*damaged' --data t.txt $full --checkpoint step.st --steps 12
# Unknown words of the held-out text are read as <unk>. With --min-count 1 they are
# refused, and the message names the option.
awk '
    BEGIN {
        for (i = 0; i < 400; i++) print "the same words again and again"
        for (i = 0; i < 60; i++) print "fresh" i
    }' >new.txt
refused 'fresh.*--min-count' --data new.txt $tiny $new --tokens words --min-count 1
good "words with --min-count" . --data new.txt $tiny --tokens words --min-count 2 --steps 2 \
    --checkpoint min2.st
good "unknown words" . --data new.txt $tiny --tokens words --steps 2 --checkpoint unsaid.st
check "it is reported" \
    grep -q '^the validation or test text has words that the training text lacks;.*--min-count 2;' \
    "$T/err"
check "the same as with the option" same_state min2.st unsaid.st
good "resumes" . --checkpoint unsaid.st --steps 3
check "the option is in the file" \
    [ "$(header unsaid.st |
    grep -c 'min-count[^0-9]*2,')$(grep -c 'validation or test text has words' "$T/err")" = 10 ]
good "the largest seed" . --data t.txt $full --steps 2 --checkpoint seed.st \
    --seed 18446744073709551615
good "the largest seed, resumed" . --data t.txt $full --steps 3 --checkpoint seed.st \
    --seed 18446744073709551615
ln -s nowhere/at/all lost.st
refused 'lost.st.*symbolic link' --data t.txt $tiny --steps 3 --checkpoint lost.st
# A UTF-16 text is refused with its encoding, unless --tokens bytes requests its bytes.
awk '{ gsub(/./, "&@"); printf "%s\n@", $0 }' t.txt | tr @ '\000' >wide.txt
{ printf '\377\376'; cat wide.txt; } >marked.txt
mkdir widevalid; cp t.txt widevalid/train.txt; cp wide.txt widevalid/valid.txt
refused 'wide.txt: expected UTF-8, got UTF-16LE: .* iconv -f UTF-16LE .* --tokens bytes$' \
    --data wide.txt $tiny $new
refused 'marked.txt: expected UTF-8, got UTF-16: .* iconv -f UTF-16 ' --data marked.txt $tiny $new
refused 'valid.txt: expected UTF-8, got UTF-16LE: ' --data widevalid $tiny $new
for tokens in chars words; do
    refused 'wide.txt is UTF-16LE, not UTF-8; .* iconv -f UTF-16LE' \
        --data wide.txt $tiny $new --tokens $tokens
done
refused 'wide.txt: expected UTF-8, got UTF-16LE' --data wide.txt --init-from good.st --steps 3
good "--tokens bytes" . --data wide.txt $full --tokens bytes --steps 3 --checkpoint wide.st
good "and resumed from the checkpoint" . --checkpoint wide.st --steps 4
rm -f wide.st
# In Japanese, few units of UTF-16 have a zero byte: those of line ends. Two lines of 81
# characters are repeated.
sentence='\345\145\054\147\236\212\156\060\207\145\340\172\147\060\131\060\002\060'
for n in 1 2 3 4 5 6 7 8 9; do printf "$sentence"; done >japanese
printf '\012\000' >>japanese
for n in 1 2 3 4 5 6 7 8; do cat japanese japanese; done >ja16le.txt
dd if=ja16le.txt of=ja16be.txt conv=swab 2>/dev/null
for order in LE BE; do
    text=ja16$(echo $order | tr LEB leb).txt
    refused "$text: expected UTF-8, got UTF-16$order: .* iconv -f UTF-16$order .* --tokens bytes\$" \
        --data $text $tiny $new
    refused "$text is UTF-16$order, not UTF-8; .* iconv -f UTF-16$order" \
        --data $text $tiny $new --tokens chars
    run . --checkpoint chars.st --threads 1 --score $text
    check "UTF-16$order is not scored: exit code $rc: $(tail -n 1 "$T/err")" \
        [ $rc -eq 1 -a "$(grep -c "$text: expected UTF-8, got UTF-16$order: .*iconv" \
        "$T/err")" -eq 1 ]
    run . --checkpoint good.st --threads 1 --score $text
    check "bytes of UTF-16$order are scored, which is reported: $(tail -n 1 "$T/err")" \
        grep -q "$text: the text is in UTF-16$order; its bytes are read unchanged" "$T/err"
done
# What is no UTF-16 is read as bytes: an unpaired surrogate, a program, zeros in odd and
# even places, and other encodings, which have no zeros.
{ cat ja16le.txt; printf '\000\330'; cat ja16le.txt; } >unpaired
head -c 20000 "$bin" >program
{ cat ja16le.txt; printf '\000x'; cat ja16le.txt; } >zeros
for n in 1 2 3 4 5 6 7 8 9; do
    printf '\223\372\226{\214\352\202\314\225\266\217\315\n'
done >shift-jis
for n in 1 2 3 4 5 6 7 8 9; do printf '\310\325\261\276\3238\2136\n'; done >gb18030
for text in unpaired program zeros shift-jis gb18030 latin1.txt; do
    [ "$(wc -c <$text)" -gt 300 ] || { cat $text $text $text $text $text >x.txt; mv x.txt $text; }
    good "bytes: $text" . --data $text $tiny --steps 1 --batch-sz 1 --block-sz 8 --eval-batch-sz 1
done
{ printf '\357\273\277'; cat t.txt; } >mark.txt
good "a byte-order mark" . --data mark.txt $full --tokens chars --steps 6 --checkpoint mark.st
check "has no token for it" [ "$(meta mark.st data.tokens)" = "$(meta chars.st data.tokens)" ]
rm -f mark.st
refused 'latin.txt.*utf-8' --data latin.txt $tiny $new --tokens chars
refused 'latin1.txt.*utf-8' --data latin1.txt $tiny $new --tokens chars
if [ "$(id -u)" -ne 0 ]; then
    cp t.txt secret.txt; chmod 000 secret.txt
    refused 'secret.txt.*denied' --data secret.txt $tiny $new
    cp good.st secret.st; chmod 000 secret.st
    refused 'secret.st.*denied' --data t.txt $tiny $old --checkpoint secret.st
    chmod 444 secret.st         # readable, but the training cannot save
    refused 'secret.st' --data t.txt $old --checkpoint secret.st
    mkdir locked; chmod 555 locked
    refused 'locked' --data t.txt $tiny $old --checkpoint locked/C.st
fi

# checkpoints
refused 'C.st' --data t.txt --eval-only --checkpoint C.st $old
refused 'C.st' --no-train --generate 5 --checkpoint C.st $old
refused 'checkpoint' --data t.txt --eval-only $old
refused 'evaluation and generation without training require --checkpoint' \
    --data t.txt --no-train --generate 5
refused 'dir' --data t.txt $tiny $old --checkpoint dir
refused 'nodir' --data t.txt $tiny $old --checkpoint nodir/C.st
refused 't.txt' --data t.txt $tiny $old --checkpoint t.txt
refused 'checkpoint' --data t.txt $tiny $old --checkpoint=
cp empty.txt x.st
refused 'x.st' --data t.txt $old --checkpoint x.st
size=$(wc -c <good.st) head=$(header_size good.st)
for n in 1 7 8 9 $((head / 2)) $((8 + head - 1)) $((8 + head)) $((8 + head + 1)) $((size / 2)) \
    $((size - 1)); do
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
spoil() { # SED-SCRIPT: makes x.st, a checkpoint with a changed header of the same length
    head -c 8 good.st >x.st
    header good.st | sed "$1" | head -c "$head" >h
    [ "$(wc -c <h)" -eq "$head" ] && ! header good.st | cmp -s - h ||
        fail "the script does not fit the header: $1"
    cat h >>x.st
    tail -c +$((9 + head)) good.st >>x.st
}
spoils >scripts
while read -r script; do
    spoil "$script"
    refused 'x.st\|checkpoint\|--nheads' --data t.txt $old --checkpoint x.st
done <scripts
v=$((9 + head + $(header good.st | sed 's/.*"vocab":{[^}]*"data_offsets":\[\([0-9]*\),.*/\1/')))
{
    head -c $((v - 1)) good.st
    printf '\377\377\377\377\377\377\377\377'
    tail -c +$((v + 8)) good.st
} >x.st
refused 'x.st\|vocab' --data t.txt $old --checkpoint x.st
# random bytes of the header: refused or accepted, but never a crash
i=0
while [ $i -lt $spoiled_bytes ]; do
    i=$((i + 1)); roll; at=$((8 + head * rand / 10000)); roll
    [ $i -gt 5 ] || at=$((i - 1))
    {
        head -c $at good.st
        printf "\\$(printf %03o $((rand % 256)))"
        tail -c +$((at + 2)) good.st
    } >x.st
    run . --checkpoint x.st --no-train --generate 1 --threads 1
    if [ $rc -eq 0 ] || { [ $rc -eq 2 ] && [ "$(wc -l <"$T/err")" -eq 1 ]; }; then
        pass
    else
        fail "byte $at of the checkpoint as $((rand % 256)): exit code $rc: $(head -c 200 "$T/err")"
    fi
done
printf '\070\0\0\0\0\0\0\0{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}  \0\0\200\077' >x.st
refused 'x.st' --data t.txt $tiny $old --checkpoint x.st
refused 'x.st' --data t.txt --eval-only --checkpoint x.st --log L.jsonl --tensorboard TB
fixed_options >options
while read -r option; do
    name=${option%% *}; name=${name#--no-}; name=${name#--}
    refused "--\(no-\)*$name is .* here .* in the checkpoint" \
        --data t.txt $old --checkpoint good.st $option
done <options
refused 'layers.*--preset' --data t.txt $old --checkpoint good.st --preset $another_preset
refused 'seed' --data t.txt $old --checkpoint good.st --seed 2
refused 'other.txt\|data' --data other.txt $old --checkpoint good.st
awk '{ print NR % 2 ? toupper($0) : $0 }' t.txt >upper.txt
refused 'upper.txt\|data' --data upper.txt $old --checkpoint good.st
refused 'data\|other.txt\|vocab' --data other.txt $old --checkpoint chars.st

# sizes
t="--data t.txt"
for name in $sizes_above_0; do
    refused "$name" $t $tiny $new --$name 0
    refused "$name" $t $tiny $new --$name -4
    refused "$name" $t $tiny $new --$name 999999999999999999999
    refused "$name" $t $tiny $new --$name=
done
refused 'steps' $t $tiny $new --steps -1
refused 'threads' $t $tiny $new --threads -1
refused 't.txt\|--batch-sz\|max-memory' $t $tiny $new --batch-sz 1073741824 --block-sz 1073741824
refused 'max-memory' $t $tiny $new --hid-sz 1024 --max-memory 0.01
refused 'max-memory' $t $tiny $new --max-memory 0.00001
refused 'max-memory' $t $tiny $new --max-memory 0.0009
# The memory of a step is known in the first step, before anything is written.
run . $t $tiny $new $too_much
check "no memory for a step: refused, exit code 2 and not $rc" [ $rc -eq 2 ]
check "no memory for a step: one error message" one_complaint "$T/err"
check "no memory for a step: the message names the option and the sizes: $(tail -n 1 "$T/err")" \
    grep -q -e "^$prog: --max-memory: .*[0-9] more bytes would exceed the limit of [0-9]" "$T/err"
check "no memory for a step: no checkpoint, no log, no events" \
    [ ! -e C.st -a ! -e L.jsonl -a ! -e TB ]
rm -rf L.jsonl TB C.st
run . $t --checkpoint good.st --eval-only --threads 1 --log L.jsonl $too_much_eval
check "no memory for an evaluation: refused, exit code 2 and not $rc" [ $rc -eq 2 ]
check "no memory for an evaluation: $(tail -n 1 "$T/err")" \
    grep -q -e "^$prog: --max-memory: " "$T/err"
check "no memory for an evaluation: no log" [ ! -e L.jsonl ]
refused 'batch-split' $t $tiny $new --batch-split 3
refused 'batch-split' $t $tiny $new --batch-split 8
refused '--batch-sz: expected a divisor of --streams 6, got 4' $t $tiny $new --streams 6

# options
refused 'nlayers' $t $tiny $new --nlayer 3
refused 'checkpoint' $t $tiny $new --chekpoint x
refused 'frobnicate' $t $tiny $new --frobnicate
refused 'enwik9' $t $tiny $new --preset enwik9
refused "$another_preset" $t $tiny $new --preset ${another_preset%?}
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
refused '--precision: expected one of f32, bf16, got .f16.' $t $tiny $new --precision f16
refused 'precision' $t $tiny $new --precision=
refused 'precision' $t $tiny $new --precision
refused 'recompute' $t $tiny $new --recompute=maybe
refused 'recompute.*auto or a whole number' $t $tiny $new --recompute -1
refused 'recompute' $t $tiny $new --recompute 5000
if [ "$adapts" != no ]; then
    refused 'cutoffs' $t $tiny $new --adapt-io --adapt-io-cutoffs 5,x
    refused 'cutoff' $t $tiny $new --adapt-io --adapt-io-cutoffs 12,5
    refused 'cutoffs' $t $tiny $new --adapt-io --adapt-io-cutoffs 5,,12
    refused 'cutoffs' $t $tiny $new --adapt-io --adapt-io-cutoffs 0,12
fi
refused 'stray' $t $tiny $new stray
refused 'x' $t $tiny $new -x
refused 'prompt\|snowman\|character' \
    $old --no-train --generate 5 --checkpoint chars.st --prompt 'the ☃'
refused 'TB\|t.txt' $t $tiny --steps 3 --checkpoint C.st --log L.jsonl --tensorboard t.txt
refused 'nodir' $t $tiny --steps 3 --checkpoint C.st --tensorboard TB --log nodir/L.jsonl
refused 'best nodir/B.st: the directory does not exist' $t $tiny $new --eval-every 1 \
    --best nodir/B.st
mkdir two && cp t.txt two/train.txt
refused 'best requires a validation text' --data two $tiny $new --eval-every 1 --best B.st
refused 'same file' $t $tiny $new --eval-every 1 --best C.st
refused 'same file' $t $tiny --steps 3 --log C.st --checkpoint C.st
refused 'same file' $t $tiny --steps 3 --log ./t.txt
refused 'same file' $t $tiny --steps 3 --checkpoint Z.st --log ./Z.st
refused '--log ./Z.st.lock is the lock file of --checkpoint' \
    $t $tiny --steps 3 --checkpoint Z.st --log ./Z.st.lock
refused '--checkpoint Z.jsonl.lock is the lock file of --log' \
    $t $tiny --steps 3 --checkpoint Z.jsonl.lock --log Z.jsonl
refused '--best C.st.lock is the lock file of --checkpoint' \
    $t $tiny $new --eval-every 1 --best C.st.lock
echo precious >Z.st.lock
refused '--checkpoint Z.st: Z.st.lock is not the lock file of a run: rename it' \
    $t $tiny --steps 3 --checkpoint Z.st
refused '--log Z.st: Z.st.lock is not the lock file of a run' $t $tiny --steps 3 --log Z.st
check "the file is unchanged" [ "$(cat Z.st.lock)" = precious ]
cp t.txt two/valid.txt
refused 'same file' --data two $tiny $new --eval-every 1 --best two/valid.txt
rm two/valid.txt
printf '{ "mine": [1, 2, 3] }' >mine.txt; cp mine.txt kept.txt
refused 'mine.txt: expected a new file or the log of a run' $t $tiny --steps 3 --log mine.txt
check "a file that is not a log is unchanged" cmp mine.txt kept.txt
family_bad
cd ..

# ========================================================================================
section "disk full"

mkdir full
good "10 steps" full --data ../t.txt --checkpoint run.st $full --steps 10
cp full/run.st full.st
bytes=$(wc -c <full.st)
again="--data ../t.txt --checkpoint run.st $full --steps 40 --save-every 20"
# NAME PATTERN: after a run that could not save; uses $rc, err and full/run.st
unsaved() {
    [ $rc -gt 0 ] && [ $rc -lt 124 ] && pass || fail "$1: exit code $rc"
    grep -q "run.st.*$2" err && pass ||
        fail "$1: expected '$2' and the file name in: $(head -c 300 err)"
    check "$1: one error message" one_complaint err
    check "$1: the old checkpoint is unchanged" cmp full.st full/run.st
    check "$1: no temporary file is left" [ "$(tmps full)" -eq 0 ]
    check "$1: the old checkpoint loads" loads full/run.st
}
# (a) a small file system in a private mount namespace, which ends with its shell
mkdir mnt
cat >mount.sh <<'END'
mount -t tmpfs -o size=$1k none "$2" || exit 99
cp full.st "$2/run.st" || exit 98
shift
cd "$1"; shift
timeout -k 60 "$LIMIT" "$@" >../out 2>../err </dev/null
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
# (b) a file size limit with the signal ignored: writes fail
rm -f full/*; cp full.st full/run.st
(
    trap '' XFSZ
    ulimit -f $((bytes / 2048))
    cd full && exec $limited "$bin" $again
) >out 2>err </dev/null
rc=$?
unsaved "limited files" "[Ff]ile.*large"
# with the signal not ignored the process ends, and the checkpoint remains
(ulimit -f $((bytes / 2048)); ulimit -c 0; cd full && exec "$bin" $again) >out 2>err </dev/null &
running=$!; collect
check "SIGXFSZ: ended by it" [ $rc -gt 128 ]
check "SIGXFSZ: the old checkpoint is unchanged" cmp full.st full/run.st
check "SIGXFSZ: at most one temporary file" [ "$(tmps full)" -le 1 ]
rm -f full/*.tmp
# (c) a full disk at an exact call
if [ -n "$kills" ]; then
    for at in 1 2 5; do
        (cd full && TRAINER_FULL_AT=$at exec $limited env LD_PRELOAD="$T/kill.so" "$bin" \
            $again) >out 2>err </dev/null
        rc=$?
        unsaved "no space from call $at" "[Nn]o space"
    done
fi
good "with space again" full $again
mkdir straight
good "without an interruption" straight $again
check "with space again: the same result" cmp full/run.st straight/run.st
# a log that cannot be written does not end a training
if [ -w /dev/full ]; then
    mkdir dev
    good "a log that cannot be written" dev --data ../t.txt --checkpoint run.st $full --steps 40 \
        --log /dev/full
    cat out err >said
    check "a log that cannot be written is reported" grep -q '/dev/full' said
    check "a log that cannot be written is reported once" [ "$(grep -c '/dev/full' said)" -eq 1 ]
    (cd dev && exec $limited "$bin" --data ../t.txt --checkpoint 2.st $full \
        --steps 40 >/dev/full) 2>err </dev/null
    check "output that cannot be written does not end a training" [ $? -eq 0 ]
    check "the same training" same_state dev/run.st dev/2.st
    (cd dev && exec $limited "$bin" --data ../t.txt --checkpoint 3.st $full \
        --steps 40 2>/dev/full) >out </dev/null
    check "progress that cannot be written does not end a training" [ $? -eq 0 ]
    check "the same training again" same_state dev/run.st dev/3.st
    # whatever is lost, the exit code is 1
    for what in "--data ../t.txt --checkpoint 3.st --eval-only" \
        "--checkpoint run.st --no-train --generate 20" \
        "--checkpoint run.st --score ../t.txt" "--checkpoint run.st --interactive" \
        "--checkpoint run.st --score ../t.txt --score-by tokens" \
        --help "--preset demo --help" --version --list-presets --dry-run; do
        echo "the cat" | (cd dev && exec $limited "$bin" $what >/dev/full) 2>err
        rc=$?
        check "$what: output that cannot be written: exit code 1, got $rc: $(tail -n 1 err)" \
            [ $rc -eq 1 -a "$(grep -c "^$prog: .*\(written\|write\|print\)" err)" -eq 1 ]
    done
fi

# ========================================================================================
section "signals"

stop="$files $full --steps 1500 $no_cadence --log-every 1"
mkdir unbroken
good "the uninterrupted run" unbroken $stop
# Under nohup, SIGHUP is ignored here and in the trainers.
hup=HUP
[ "$(sh -c 'kill -HUP $$; echo ignored')" != ignored ] || hup=
for sig in INT TERM $hup; do
    stop_in_the_midst $sig 1500 sig $stop
    case $sig in INT) want=130 ;; TERM) want=143 ;; HUP) want=129 ;; esac
    check "SIG$sig: exit code $want, got $rc" [ $rc -eq $want ]
    check "SIG$sig: says where it stopped" [ -n "$at" ]
    check "SIG$sig: stopped before the end" [ "${at:-1500}" -lt 1500 ]
    check "SIG$sig: saved that step" [ "$(meta sig/run.st step)" = "$at" ]
    check "SIG$sig: logged that step" [ "$(steps_of sig/log.jsonl | tail -n 1)" = "$at" ]
    check "SIG$sig: no error message" [ "$(grep -c "^$prog:" bg.err)" -eq 0 ]
    check "SIG$sig: no result" [ ! -s bg.out ]
    check "SIG$sig: no temporary file" [ "$(tmps sig)" -eq 0 ]
    good "SIG$sig, resumed" sig $stop
    check "SIG$sig: bit-identical to the uninterrupted run" cmp unbroken/run.st sig/run.st
    events unbroken/log.jsonl >want; events sig/log.jsonl >got
    check "SIG$sig: the log equals that of the uninterrupted run" cmp want got
done
# a terminal that closes sends SIGHUP more than once
rm -rf sig; mkdir sig
start sig $stop --steps 1000000
wait_for_a_step sig
kill -HUP "$running"; nap 2; kill -HUP "$running" 2>/dev/null
want=129
[ -n "$hup" ] || { want=143; kill -TERM "$running"; }
collect
check "two SIGHUP: exit code $want, got $rc" [ $rc -eq $want ]
check "two SIGHUP: saved" [ -s sig/run.st ]
# Without a checkpoint: reported at the start. A signal that does not come from a terminal
# stops the run at once.
for sig in INT TERM; do
    rm -rf sig; mkdir sig
    start sig $tiny --data ../t.txt --steps 1000000 --log log.jsonl --log-every 1
    wait_for_a_step sig
    kill -$sig "$running"; collect
    [ $sig = INT ] && want=130 || want=143
    check "SIG$sig without a checkpoint: exit code $want, got $rc" [ $rc -eq $want ]
    check "SIG$sig without a checkpoint: reported at the start" \
        grep -q '^no --checkpoint: nothing will be saved' bg.err
    check "SIG$sig without a checkpoint: reported at the end" \
        grep -q '^stopped at step [0-9]*; nothing is saved' bg.err
done
# on a terminal, the first Ctrl-C asks for confirmation
if script -qec true /dev/null >/dev/null 2>&1 </dev/null; then
    rm -rf tty; mkdir tty
    cat >tty.sh <<END2
cd "$T/tty" || exit 1
sh -c 'echo \$\$ >pid
exec "$bin" $tiny --data ../t.txt --steps 100000000 --log log.jsonl --log-every 1'
echo \$? >rc
END2
    mkfifo tty/input        # input that never ends
    TERM=xterm script -qc "sh $T/tty.sh" /dev/null >tty.out 2>&1 <>tty/input &
    running=$!
    wait_for_a_step tty
    # only the end of the log: on a busy machine, it can grow faster than a pipe reads it
    last_step() {
        tail -c 1000 tty/log.jsonl | head -c 1000 | sed -n 's/.*"step":\([0-9]*\),.*/\1/p' |
            tail -n 1
    }
    questions() { grep -o 'press Ctrl-C again within 5 seconds' tty.out | wc -l; }
    kill -INT "$(cat tty/pid)"
    check "Ctrl-C at a terminal: it asks for a second one" wait_until above 0 questions
    check "Ctrl-C at a terminal: the run continues" wait_until above "$(last_step)" last_step
    # the second Ctrl-C; after five seconds it asks again
    answered() { ! kill -0 "$(cat tty/pid)" 2>/dev/null || above "$asked" questions; }
    while kill -0 "$(cat tty/pid)" 2>/dev/null; do
        asked=$(questions)
        kill -INT "$(cat tty/pid)" 2>/dev/null
        wait_until answered || break
    done
    collect
    rc=$(cat tty/rc)
    check "the second Ctrl-C: exit code 130, got $rc" [ "$rc" = 130 ]
    check "the message is on a separate line below the progress" \
        awk '/^stopped at step [0-9]*; nothing is saved/ { n++ } END { exit n != 1 }' tty.out
else
    echo "left out: Ctrl-C at a terminal (no script program)"
fi

# ========================================================================================
section "runs of a given time"

timed="$files $full --lr 0.001 --schedule cosine --lr-warmup 2 $no_cadence --eval-every 0"
timed="$timed --log-every 1"
rm -rf timed planned cut; mkdir timed planned cut
good "--minutes" timed $timed --minutes 0.02
steps=$(meta timed/run.st step) plan=$(meta timed/run.st plan)
# three steps are measured before the time can be over, and one more ends the run
check "it trains" [ "${steps:-0}" -ge 4 ]
check "the plan begins with a guess, got $plan" [ "${plan#0:1000,}" != "$plan" ]
check "the plan ends with the last step" [ "${plan##*:}" = "$steps" ]
# it changes at most 200 times before the time is over, and a few times at the end
check "the run ends with its time" [ "$(echo "$plan" | tr , '\n' | wc -l)" -le 220 ]
check "the log has the entries of the plan" [ "$(grep -c '"event":"plan"' timed/log.jsonl)" -ge 1 ]
check "the learning rate ends at 0: $(grep over-fits err)" \
    [ "$(events timed/log.jsonl | field lr | tail -n 1 | awk '{ print $1 < 1e-9 }')" = 1 ]
good "--plan" planned $timed --plan "$plan"
check "--plan repeats the run bit for bit" same_state timed/run.st planned/run.st
if [ "${steps:-0}" -ge 20 ]; then
    check "evaluates during the run" [ "$(grep -c '"event":"eval"' timed/log.jsonl)" -ge 2 ]
    stop_in_the_midst INT "$steps" cut $timed --plan "$plan"
    good "--plan, resumed" cut --checkpoint run.st
    check "the resumed run is bit-identical" same_state planned/run.st cut/run.st
fi
stop_in_the_midst INT 1000000 cut $timed --minutes 100
before=$(meta cut/run.st plan)
[ "$at" -lt 4 ] ||
    check "the first steps replace the guess, got $before" [ "${before#0:1000,3:}" != "$before" ]
good "--minutes, resumed with less time" cut --checkpoint run.st --minutes 0.000001
check "it ends at once" [ "$(meta cut/run.st step)" -le $((at + 1)) ]
good "--minutes, resumed with more steps" cut --checkpoint run.st --steps $((at + 5))
check "--steps replaces --minutes" [ "$(meta cut/run.st step)" = $((at + 5)) ]
good "the same, resumed" cut --checkpoint run.st
check "--minutes does not return" [ "$(meta cut/run.st step)" = $((at + 5)) ]
good "--plan, resumed with more steps" planned --checkpoint run.st --steps $((steps + 5))
check "--steps replaces --plan" [ "$(meta planned/run.st step)" = $((steps + 5)) ]
good "--minutes after --steps" planned --checkpoint run.st --minutes 0.01
check "--minutes replaces --steps" [ "$(meta planned/run.st step)" -ge $((steps + 8)) ]
# without a preset, --minutes also determines the sizes
rm -rf timed2 planned2; mkdir timed2 planned2
good "--minutes without a preset" timed2 $files --threads 1 --minutes 0.03
good "--plan without a preset" planned2 $files --threads 1 --minutes 0.03 \
    --plan "$(meta timed2/run.st plan)"
check "--plan repeats the run bit for bit" same_state timed2/run.st planned2/run.st
# the validation text consists of letters that the training text lacks, so its loss rises
mkdir over over/text
awk 'BEGIN { for (i = 0; i < 800; i++) print "abababab" }' >over/text/train.txt
awk 'BEGIN { for (i = 0; i < 100; i++) print "xyzxyzx" }' >over/text/valid.txt
# which takes a number of steps, not a time: the machine may be slow
good "an over-fitting run" over --data text $full --lr 0.003 --schedule constant \
    --eval-every 25 --minutes 3 --checkpoint run.st
check "it reports that the validation loss no longer falls" \
    grep -q 'no better for 3 evaluations: .* bpb .* at step [0-9]*, saved in run.best.st' err
check "it ends early" grep -q 'the model over-fits: the run ends after .* of 3 minutes' err
check "the best model is older" \
    [ "$(meta over/run.best.st step)" -lt "$(meta over/run.st step)" ]
good "the same, repeated" over --data text --minutes 3 --checkpoint run.st
check "an ended run does not continue" grep -q 'the run is complete' err

# --epochs: (n / streams - 1) / T blocks of a stream, rounded down, make a pass
size=$(($(wc -c <t.txt)))
size=$((size - size / 20 * 2))
number() { echo "$tiny" | sed "s/.*--$1 \([0-9]*\).*/\1/"; }
rows=$(number batch-sz) block=$(number block-sz)
pass=$(((size / rows - 1) / block))
mkdir epochs
good "--epochs" epochs $files $tiny --epochs 2 --eval-every 0 --save-every 0
check "two epochs of $pass steps" [ "$(meta epochs/run.st step)" -eq $((2 * pass)) ]
check "an evaluation after each" \
    [ "$(events epochs/log.jsonl eval | field step | tr '\n' ' ')" = "$pass $((2 * pass)) " ]
good "--epochs, resumed with more" epochs $files --epochs 2.5
check "two epochs and a half" [ "$(meta epochs/run.st step)" -eq $(((5 * pass + 1) / 2)) ]
good "--steps replaces --epochs" epochs $files --steps $((3 * pass))
check "three epochs" [ "$(meta epochs/run.st step)" -eq $((3 * pass)) ]
rm -f epochs/*
good "--epochs with --streams" epochs $files $tiny --streams $((4 * rows)) --epochs 0.5
check "half an epoch" \
    [ "$(meta epochs/run.st step)" -eq $(((4 * ((size / 4 / rows - 1) / block) + 1) / 2)) ]
rm -f epochs/*
good "--epochs without a preset" epochs $files --threads 1 --epochs 0.1
check "steps are not chosen for the text" \
    [ "$(grep -c 'chosen for the text.*--batch-sz' err) $(grep -c -e '--steps' err)" = "1 0" ]

cd timed || exit 1
refused '--epochs and --minutes\|--minutes and --epochs' --data ../t.txt $full --epochs 1 --minutes 1
refused '--steps and --epochs cannot be combined' --data ../t.txt $full --epochs 1 --steps 5
refused '--minutes and --steps cannot be combined' --data ../t.txt $full --minutes 1 --steps 5
refused '--plan and --steps cannot be combined' --data ../t.txt $full --plan 0:5 --steps 5
for length in steps epochs minutes; do
    refused "--$length: expected more than 0 to train" --data ../t.txt $full --$length 0
done
for bad in 5 0:0 1:5 0:5,3:2 0:5,0:6 0:5, a; do
    refused '--plan: expected increasing steps' --data ../t.txt $full --plan $bad
done
cd .. || exit 1

# ========================================================================================
section "loss that is not finite"

mkdir wild
wild="$tiny --data ../t.txt --checkpoint run.st --log log.jsonl --log-every 1"
wild="$wild --optim sgd --grad-clip 0 --dropout 0 $wild_more"
good "a good start" wild $wild --steps 5
for every in 1 1000; do
    rm -rf wild2; cp -r wild wild2
    run wild2 $wild --lr 1e6 --steps 5000 --save-every $every
    check "exit code 1, got $rc" [ $rc -eq 1 ]
    check "skipped updates are reported" grep -q 'step [0-9]*: the .* is not finite' err
    check "the end says what to change" grep -q "^$prog: .*50 .*--lr" err
    check "one error message" one_complaint err
    check "50 reports to the end" [ "$(grep -c 'is not finite' err)" -ge 50 ]
    check "the checkpoint is finite" finite wild2/run.st
    check "the checkpoint loads" loads wild2/run.st
    check "the log is JSON" json wild2/log.jsonl
    [ $every -ne 1000 ] ||
        check "without a save the checkpoint is unchanged" cmp wild/run.st wild2/run.st
done

# ========================================================================================
section "log and terminal"

mkdir log
learn="--data ../t.txt $tiny $learning"
good "learns" log $learn --checkpoint run.st --best best.st --log log.jsonl --log-every 1 \
    --tensorboard deep/tb --steps 300 --eval-every 50 --eval-blocks 2
cp out said; cp err told
check "the log is JSON" json log/log.jsonl
check "keys of train" only_keys log/log.jsonl train $train_keys
check "keys of eval" only_keys log/log.jsonl eval event,split,loss,bpb,step,tokens
check "300 lines of train" [ "$(events log/log.jsonl | wc -l)" -eq 300 ]
check "evaluations at 50, 100, .. 300" \
    [ "$(events log/log.jsonl eval | field step | tr '\n' ' ')" = "50 100 150 200 250 300 " ]
check "evaluations of the validation text" \
    [ "$(events log/log.jsonl eval | grep -c '"split":"valid"')" -eq 6 ]
check "the loss falls" \
    awk -v a="$(events log/log.jsonl | head -n 1 | field loss)" \
    -v b="$(events log/log.jsonl | tail -n 1 | field loss)" \
    'BEGIN { exit !(a > 4 && a < 8 && b > 0 && b < 1) }'
grep -E '"event":"(train|eval)"' log/log.jsonl |
    sed 's/.*"loss":\([^,]*\),"bpb":\([^,]*\),.*/\1 \2/' >pairs
check "bpb is loss / ln 2" \
    awk '
        { e = $2 - $1 / log(2); if (!($2 > 0) || !(e * e <= 1e-18 * $2 * $2)) bad = 1 }
        END { exit bad || NR < 300 }' pairs
check "tokens/s, peak and norm are present" \
    awk '
        !/"tokens_per_s":[0-9.]*[1-9]/ || !/"peak_bytes":[1-9]/ || !/"grad_norm":[0-9.e-]*[1-9]/ {
            if (/"event":"train"/) exit 1
        }' log/log.jsonl
check "the time increases" \
    awk -v all="$(sed -n 's/.*"event":"train".*"seconds":\([0-9.]*\),.*/\1/p' log/log.jsonl |
    tr '\n' ' ')" '
        BEGIN {
            n = split(all, t, " ")
            for (i = 2; i <= n; i++) if (t[i] < t[i-1]) exit 1
            exit !(n == 300 && t[n] > 0)
        }'
check "plain lines in a pipe: no carriage return" \
    [ "$(cat said told | tr -dc '\r\033' | wc -c)" -eq 0 ]
check "plain lines in a pipe: progress, on standard error" grep -q 'step 300/300 .*bpb.*tok/s' told
check "results, and nothing else, on standard output" \
    [ "$(grep -vc "^step 300: valid bpb\|$learned" said)" -eq 0 ]
check "the last evaluation is a result" grep -q '^step 300: valid bpb' said
check "what was learned is a result" grep -q "$learned" said
check "the start event" grep -q '"event":"start"' log/log.jsonl
f=$(ls log/deep/tb/events.out.tfevents.* 2>/dev/null)
check "one event file" [ -f "$f" ]
n1=$(frames "$f"); size1=$(wc -c <"$f")
check "the framing is valid" [ -n "$n1" ]
check "one record per value" [ "${n1:-0}" -ge 1500 ]
for tag in train/loss train/bpb train/tokens_per_s valid/bpb valid/loss; do
    check "tag $tag" grep -q "$tag" "$f"
done
least=$(events log/log.jsonl eval | field loss | sort -g | head -n 1)
at=$(events log/log.jsonl eval | grep -F "\"loss\":$least," | head -n 1 | field step)
[ "$at" = 300 ] || check "the best checkpoint is of the best evaluation, step $at" \
    [ "$(meta log/best.st step)" = "$at" ]
good "the best checkpoint, on the whole text" log --data ../t.txt --checkpoint best.st --eval-only \
    --log best.jsonl --threads 1
good "resumes" log $learn --checkpoint run.st --log log.jsonl --log-every 1 --tensorboard deep/tb \
    --steps 310
check "the first event file is unchanged" [ "$(wc -c <"$f")" -eq "$size1" ]
check "a resumed run begins another event file" [ "$(ls log/deep/tb | wc -l)" -eq 2 ]
for f in log/deep/tb/*; do check "framing of $f" frames "$f"; done
# saved between two records of the log
between="--steps 11 --log-every 4 --eval-every 6"
good "a run that is saved at step 6" log $learn $between --best mid.st --log mid.jsonl
check "the checkpoint is of step 6" [ "$(meta log/mid.st step)" = 6 ]
good "resumed from there" log $learn $between --checkpoint mid.st --log rest.jsonl
events log/mid.jsonl | tail -n 2 >want; events log/rest.jsonl >got
check "the next records equal those of the uninterrupted run" cmp want got
# with evaluations of the whole text, the best is the last that improved
good "the best of whole evaluations" log $learn --steps 90 --eval-every 30 --eval-blocks 0 \
    --best best2.st --checkpoint best0.st --log best2.jsonl $whole_evaluations
least=$(events log/best2.jsonl eval | field loss | sort -g | head -n 1)
check "has the lowest loss" \
    [ "$(header log/best2.st | sed 's/.*"best":"\([^"]*\)".*/\1/' | awk -v want="$least" '
        { e = $1 - want; print (e < 1e-9 && -e < 1e-9) }')" = 1 ]
rm -rf grow; mkdir grow
start grow $learn --log log.jsonl --log-every 1 --tensorboard tb --steps 100000
wait_for_a_step grow
event_bytes() { cat grow/tb/* | wc -c; }
check "the event file grows while the run continues" wait_until above "$(event_bytes)" event_bytes
kill -TERM "$running"; collect
check "without a checkpoint a signal stops the run cleanly" [ $rc -eq 143 ]
check "framing after a signal" frames grow/tb/*
good "words" log --data ../w.txt $tiny $words_more --tokens words --steps 20 --log words.jsonl \
    --checkpoint words.st --log-every 5
check "keys of train for words" \
    only_keys log/words.jsonl train "$(echo $train_keys | sed s/bpb/ppl/)"
check "keys of eval for words" \
    only_keys log/words.jsonl eval event,split,loss,ppl,${words_figures:-}step,tokens
grep -E '"event":"(train|eval)"' log/words.jsonl |
    sed 's/.*"loss":\([^,]*\),"ppl":\([^,]*\),.*/\1 \2/' >pairs
check "ppl is exp(loss)" \
    awk '
        { e = $2 - exp($1); if (!($2 > 1) || !(e * e <= 1e-18 * $2 * $2)) bad = 1 }
        END { exit bad || NR < 5 }' pairs
if script -qec true /dev/null >/dev/null 2>&1 </dev/null; then
    TERM=xterm script -qec "$bin --data t.txt $tiny --steps 40 --eval-every 20" \
        /dev/null >tty.out 2>/dev/null </dev/null
    check "on a terminal one line is redrawn" \
        [ "$(tr -dc '\033' <tty.out | wc -c)" -ge 1 ]
    check "on a terminal reports do not add lines" \
        [ "$(tr '\r' ' ' <tty.out | grep -c 'step [0-9]*/40')" -le 3 ]
    # the final contents of each line: the text after its last carriage return
    tr -d '\033' <tty.out | sed 's/\r$//; s/.*\r//; s/\[K//g' >screen
    check "an evaluation is below the progress, the last after a sample: $(tr '\n' '|' <screen)" \
        awk '
            /^step 20\/40 .*tok\/s/ { a = NR } /^step 20: valid/ { b = NR }
            /^step 40\/40 .*tok\/s/ { c = NR } /^step 40: valid/ { d = NR }
            END { exit !(a && b == a + 1 && c > b && d > c) }' screen
fi

# ========================================================================================
section "evaluation"

mkdir eval
good "training without evaluation" eval --data ../t.txt $full --steps 100 --checkpoint never.st \
    $no_evaluation --log never.jsonl --log-every 1
good "training with many evaluations" eval --data ../t.txt $full --steps 100 --checkpoint often.st \
    --eval-every 7 --eval-blocks 3 --log often.jsonl --log-every 1
check "14 evaluations and the last" [ "$(events eval/often.jsonl eval | wc -l)" -eq 15 ]
check "evaluating changes no bit of the training" same_state eval/never.st eval/often.st
events eval/never.jsonl >want; events eval/often.jsonl >got
check "evaluating changes no loss" cmp want got
cp eval/often.st keep.st; cp eval/often.jsonl keep.jsonl
for i in 1 2; do
    good "evaluation only" eval --data ../t.txt --checkpoint often.st --eval-only \
        --log only$i.jsonl --threads 1
    check "it is JSON" json eval/only$i.jsonl
    check "keys" only_keys eval/only$i.jsonl eval event,split,loss,bpb,step,tokens
    check "validation and test" \
        [ "$(grep -o '"split":"[a-z]*"' eval/only$i.jsonl | tr '\n' ' ')" \
        = '"split":"valid" "split":"test" ' ]
    check "the step is the checkpoint's" \
        [ "$(events eval/only$i.jsonl eval | field step | tr '\n' ' ')" = "100 100 " ]
done
check "evaluation twice: the same" cmp eval/only1.jsonl eval/only2.jsonl
check "the evaluation equals the last one of the training" \
    [ "$(events eval/only1.jsonl eval | head -n 1 | field loss)" \
    = "$(events eval/never.jsonl eval | tail -n 1 | field loss)" ]
good "into the log of the training" eval --data ../t.txt --checkpoint often.st --eval-only \
    --log often.jsonl --threads 1
head -n "$(wc -l <keep.jsonl)" eval/often.jsonl >x
check "evaluation only appends to the log of the training" cmp keep.jsonl x
# number of log lines, without events of single families
common() { grep -vc '"event":"\(gates\|architecture\)"' "$1"; }
check "two more lines" [ "$(common eval/often.jsonl)" -eq $(($(common keep.jsonl) + 2)) ]
check "evaluation does not touch the checkpoint" cmp keep.st eval/often.st
mkdir eval/three
head -c 3000 t.txt >eval/three/train.txt
tail -c 900 t.txt >eval/three/valid.txt
tail -c 500 t.txt >eval/three/test.txt
good "a directory of three texts" eval --data three $tiny --steps 20 --checkpoint three.st
good "a directory of three texts, evaluated" eval --data three --checkpoint three.st --eval-only \
    --log three.jsonl --threads 1
check "both parts of it" [ "$(events eval/three.jsonl eval | wc -l)" -eq 2 ]
cp eval/only1.jsonl x
good "a run without a checkpoint, into an old log" eval --data ../t.txt $tiny --steps 20 \
    --log only1.jsonl
head -n "$(wc -l <x)" eval/only1.jsonl >y
check "it appends" cmp x y
cp eval/only1.jsonl x
good "another into the same log" eval --data ../t.txt $tiny --steps 20 --log only1.jsonl
head -n "$(wc -l <x)" eval/only1.jsonl >y
check "it removes nothing" cmp x y
good "another text than in training" eval --data ../w.txt --checkpoint never.st \
    --eval-only --threads 1

good "without --data: the text of the checkpoint" eval --checkpoint often.st --eval-only \
    --log told.jsonl --threads 1
check "the result is the same" cmp eval/only2.jsonl eval/told.jsonl
check "the results are on standard output" \
    [ "$(grep -c '^step 100: \(valid\|test\) bpb' out)" -eq 2 ]
family_evaluation

# ========================================================================================
section "scores and other runs' weights"

# --score equals an evaluation of the text after a line end, in one stream. Finer tables
# add up to coarser ones.
mkdir score score/d
head -n 12 t.txt >score/text
cp t.txt score/d/train.txt; { echo; cat score/text; } >score/d/test.txt
good "--score" score --checkpoint ../eval/never.st --threads 1 --score text $token_by_token
cp out score/file
check "one header line and one row" \
    [ "$(head -n 1 out)" = "$(printf 'tokens\tbytes\tnats\tbpb\tppl')" -a "$(wc -l <out)" -eq 2 ]
good "an evaluation of it" score --checkpoint ../eval/never.st --threads 1 $token_by_token \
    --data d --eval-only --eval-batch-sz 1 --log only.jsonl
check "the result is the same" \
    awk -v loss="$(grep '"split":"test"' score/only.jsonl | field loss)" \
    -v bpb="$(grep '"split":"test"' score/only.jsonl | field bpb)" '
    function is(a, b) { return a - b < 1e-5 && b - a < 1e-5 }
    NR == 2 {
        exit !($2 > 400 && $1 == $2 && is($3 / $1, loss) && is($4, bpb) && is(log($5), loss))
    }' score/file
for by in lines tokens texts; do
    good "--score-by $by" score --checkpoint ../eval/never.st --threads 1 --score text --score-by \
        $by
    cp out score/$by; cp err score/said
done
check "one row per line; the rows add up to the file" \
    awk -F'\t' 'FNR == 1 { next } FILENAME ~ /file/ { t = $1; b = $2; n = $3; next }
    { if ($1 != ++rows) bad = 1; t -= $2; b -= $3; n -= $4 }
    END { exit bad || rows != 12 || t || b || n > 1e-2 || n < -1e-2 }' score/file score/lines
check "one row per token; the rows add up to the lines" \
    awk -F'\t' 'FNR == 1 { next } FILENAME ~ /lines/ { t += $2; n[$1] = $4; next }
    { t--; n[$1] -= $2; text = text $3 }
    END {
        for (i in n) if (n[i] > 1e-3 || n[i] < -1e-3) bad = 1
        exit bad || t || text !~ /^the cat sat on mat 0 and the dog ran\\nthe cat/
    }' score/lines score/tokens
# If a block sees more of its past than a token in generation, a message says what the
# rows add up to.
if [ -n "$token_by_token" ]; then
    check "reported: $(tail -n 1 score/said)" \
        grep -q "add up to the score of --score-by file with $token_by_token" score/said
    good "a memory of one length for each token" score --data ../t.txt $tiny --pattern "(sf)2" \
        --same-length --steps 20 --checkpoint same.st
    for by in file tokens; do
        good "... by $by" score --checkpoint same.st --threads 1 --score text --score-by $by
        cp out score/same_$by
    done
    check "no such message" [ "$(grep -c 'add up' err)" -eq 0 ]
    check "its rows add up" \
        awk -F'\t' 'FNR == 1 { next } FILENAME ~ /file/ { n = $3; next } { n -= $2 }
        END { exit !(n < 1e-2 && n > -1e-2) }' score/same_file score/same_tokens
fi
check "equal rows for equal texts" \
    [ "$(sed -n 2p score/texts | cut -f 2-)" = "$(sed -n 9p score/texts | cut -f 2-)" ]
(cd score && exec "$bin" --checkpoint ../eval/never.st --threads 1 --score - \
    --score-by lines <text) >x 2>err
check "from standard input" cmp score/lines x
good "words" score --checkpoint ../log/words.st --threads 1 --score ../w.txt --score-by texts
check "150 lines of nine words and a line end" [ "$(awk 'NR > 1 && $2 == 10' out | wc -l)" -eq 150 ]
cp out x
good "of one text" score --checkpoint ../log/words.st --threads 1 --score ../w.txt --score-by lines
check "the first line is the same, later ones differ" \
    [ "$(sed -n 2p out)" = "$(sed -n 2p x)" -a "$(sed -n 3p out)" != "$(sed -n 3p x)" ]
# a last line without a line end counts like the others: by file, by line and by text
while read -r from line end; do
    model="--checkpoint ../$from --threads 1"
    printf "%s$end%s" "$line" "$line" >score/open
    printf "%s$end%s$end" "$line" "$line" >score/whole
    printf %s "$line" >score/one
    for by in file lines texts tokens; do
        good "lines of $from by $by" score $model --score whole --score-by $by
        cp out score/want
        good "... without the last line end" score $model --score open --score-by $by
        check "$from, $by: the same: $(tail -n 1 out) | $(tail -n 1 score/want)" \
            cmp score/want out
        [ $by = texts ] || continue
        sed -n 2p out | cut -f 2-4 >score/row
        check "$from: equal candidates have equal rows" \
            [ "$(sed -n 3p out | cut -f 2-4)" = "$(cat score/row)" ]
    done
    [ "$end" = '\n' ] || continue
    good "a line of $from, a file by itself" score $model --score one --score-by texts
    check "$from: has the same row as a candidate" \
        [ "$(sed -n 2p out | cut -f 2-4)" = "$(cat score/row)" ]
    good "a line of $from, by file" score $model --score one $token_by_token
    sed -n 2p out | cut -f 1-3 | paste score/row - >both
    check "$from: and the same values by file: $(cat both)" \
        awk '{ exit !($1 == $4 && $2 == $5 && ($3 - $6) ^ 2 < 1e-6) }' both
done <<'END'
eval/never.st aa \n
eval/never.st aa \r\n
log/words.st two \n
bad/chars.st the \n
END
# A byte-order mark is neither a token nor a byte of a text.
mark='\357\273\277'
while read -r from text; do
    { printf "$mark"; cat "$text"; } >score/marked
    for by in file lines; do
        model="--checkpoint ../$from --threads 1 --score-by $by"
        good "a text for $from by $by" score $model --score "../$text"
        cp out score/want
        good "... with a byte-order mark" score $model --score marked
        check "$from, $by: the same: $(tail -n 1 out) | $(tail -n 1 score/want)" \
            cmp score/want out
    done
    (cd score && cat marked | "$bin" $model --score -) >x 2>err
    check "$from: the same from a pipe" cmp score/want x
done <<'END'
log/words.st w.txt
bad/chars.st t.txt
END
printf "$mark" >score/marked
good "a text that is only a mark" score --checkpoint ../bad/chars.st --threads 1 --score marked
check "has no tokens: $(tail -n 1 out)" [ "$(sed -n 2p out | cut -f 1-2)" = "$(printf '0\t0')" ]
# At the start of a later line, where files were joined, U+FEFF is a character.
mkdir score/joined
sed "s/^/$(printf "$mark")/" t.txt >score/joined/valid.txt
tail -c +4 score/joined/valid.txt >score/joined/train.txt
for tokens in chars words; do
    good "a text with U+FEFF, $tokens" score --data joined $tiny --tokens $tokens --steps 1 \
        --checkpoint joined-$tokens.st
    for text in train valid; do
        good "is scored" score --checkpoint joined-$tokens.st --threads 1 \
            --score joined/$text.txt
        sed -n 2p out | cut -f 1-2 >score/row
        echo "$(meta score/joined-$tokens.st data.tokens)	$(wc -c <score/joined/train.txt)" >want
        check "$tokens: as many tokens as in training: $(cat score/row)" cmp score/row want
    done
done
printf 'the cat\nthe Ü\n' >score/odd
run score --checkpoint ../bad/chars.st --threads 1 --score odd
check "an unknown character: exit code 1, with the line" \
    [ $rc -eq 1 -a "$(grep -c -e "--score odd, line 2: .*'Ü'" err)" -eq 1 ]

# A line that does not fit into memory is an error, not the end of the input. A directory
# cannot be scored.
if (ulimit -v 250000) 2>/dev/null; then
    (
        cd score && { cat text; head -c 300000000 /dev/zero | tr '\0' x; } |
            (ulimit -v 250000; exec "$bin" --checkpoint ../eval/never.st --threads 1 --score -)
    ) >out 2>err
    rc=$?
    check "no memory for a line: exit code $rc, $(head -c 200 err)" \
        [ $rc -eq 1 -a "$(grep -c "^$prog: --score -, line $(($(wc -l <score/text) + 1)): " err)" \
        -eq 1 ]
fi
printf 'a\rb\033\n' >score/control
good "more threads than processors" score --checkpoint ../eval/never.st --score text \
    --threads $(($(getconf _NPROCESSORS_ONLN) + 1))
check "a note says so" grep -q '^--threads [0-9]*, but [0-9]* processor' err
good "control characters" score --checkpoint ../eval/never.st --threads 1 --score control \
    --score-by tokens
check "are escaped: $(cut -f 3 out | tr '\n' ' ')" \
    [ "$(cut -f 3 out | tr '\n' ' ')" = 'text a \x0d b \x1b \n ' ]
# --init-from: the first loss equals the evaluation, and then the run is like any other
mkdir tune
tuned="--init-from ../eval/never.st --data ../t.txt --checkpoint new.st --threads 1 --batch-sz 4"
tuned="$tuned --precision f32 --eval-batch-sz 2 --schedule constant --lr-warmup 0 $tune_more"
good "evaluation only" tune --checkpoint ../eval/never.st --data ../t.txt --threads 1 --eval-only \
    --eval-batch-sz 2 --log only.jsonl
good "fine-tuning" tune $tuned --steps 10 --log log.jsonl
check "the message says so" \
    grep -q '^weights of ../eval/never.st; optimiser, schedule and memories start afresh' err
check "the first loss equals the evaluation" \
    [ -n "$(grep '"step":0,' tune/log.jsonl | field loss)" \
    -a "$(grep '"step":0,' tune/log.jsonl | field loss)" \
    = "$(head -n 1 tune/only.jsonl | field loss)" ]
check "and training continues" differ tune/new.st eval/never.st
check "from step 0, with a new optimiser" \
    [ "$(meta tune/new.st step)" = 10 -a "$(meta tune/new.st optim.step)" -le 10 ]
mv tune/new.st tune/ten.st
good "five steps" tune $tuned --steps 5
good "and five more" tune --checkpoint new.st --steps 10 --threads 1
check "5 + 5 steps equal 10, bit-exactly" same_state tune/ten.st tune/new.st
good "without a checkpoint" tune --init-from ten.st --data ../t.txt --threads 1 --steps 2
good "a dry run" tune --init-from ten.st --dry-run
n=$(sed -n 's/^\([0-9]*\) parameters.*/\1/p' out)
check "the number of parameters is the same" \
    [ "$(grep '"start"' tune/log.jsonl | field params)" = "$n" ]
cd tune
refused "--init-from ten.st starts a new run, but --checkpoint new.st exists: leave --init-from out to resume it" \
    --init-from ten.st --data ../t.txt --checkpoint new.st
refused "--hid-sz is 8 here .* but [0-9]* in the checkpoint: leave it out to start from its weights" \
    --init-from ten.st --data ../t.txt --hid-sz 8
refused "--tokens is chars here .* but bytes in the checkpoint" \
    --init-from ten.st --data ../t.txt --tokens chars
refused "--[a-z-]* is .* here (from --preset $another_preset) but .* in the checkpoint: leave --preset out to start" \
    --init-from ten.st --data ../t.txt --preset $another_preset
refused "--init-from none.st: No such file" --init-from none.st --data ../t.txt
refused "got '../t.txt': give a text as --data ../t.txt" ../t.txt
refused "--init-from resume: there is no file of this name. A run resumes if" \
    --init-from resume --data ../t.txt
refused "--data is missing" --init-from ten.st
refused "w.txt.*'" --init-from ../bad/chars.st --data ../w.txt
refused "--init-from ten.st is only for training: .*give the file as --checkpoint" \
    --init-from ten.st --data ../t.txt --eval-only
refused "--log and --init-from are the same file\|it is no log" \
    --init-from ten.st --data ../t.txt --log ten.st
refused "--score and --generate cannot be combined" \
    --checkpoint ten.st --score ../t.txt --generate 5
refused "--score and --eval-only cannot be combined" \
    --checkpoint ten.st --score ../t.txt --eval-only
refused "--data has no effect" --checkpoint ten.st --score ../t.txt --data ../t.txt
refused "--score-by has no effect" --checkpoint ten.st --score-by lines --no-train
refused "--score none: No such file" --checkpoint ten.st --score none
refused "--score .: expected a text file, got a directory" --checkpoint ten.st --score .
refused "evaluation and generation without training require --checkpoint" --score ../t.txt
cd ..
rm -f tune/new.st
good "the start can be the best" tune $tuned --steps 4 --lr 50 --grad-clip 0 --eval-every 2 \
    --keep-best --log worse.jsonl
check "and is kept: $(events tune/worse.jsonl best | field step | tr '\n' ' ')" \
    [ "$(meta tune/new.best.st step) $(events tune/worse.jsonl best | head -n 1 | field step)" \
    = "0 0" ]
rm -f tune/new.st
good "the weights of a checkpoint of the first version" tune --init-from ../old/run.st \
    --data ../t.txt --threads 1 --steps 2

# ========================================================================================
section "growing a vocabulary"

# 22 words of w.txt; n.txt lacks some of them and has 7 others, one of them only once
awk 'BEGIN { split("one two three zebra yak four five emu", w, " ")
    for (i = 0; i < 150; i++) { for (j = 0; j < 8; j++) printf "%s ",
        w[(i * j + i % 5) % 8 + 1]; print "y" i % 3; if (i == 50) print "once" } }' >n.txt
tensor() { # FILE NAME: its bytes
    header "$1" | sed 's/.*"'"$2"'":{[^}]*"data_offsets":\[\([0-9]*\),\([0-9]*\)\]}.*/\1 \2/' \
        >"$T/range"
    read -r from to <"$T/range"
    tail -c +$((9 + $(header_size "$1") + from)) "$1" | head -c $((to - from))
}
# FILE: the names of its parameters, which are the tensors with an optimiser state
parameters() {
    header "$1" | sed 's/},"/}\
/g' | sed -n 's/^optim\.0\.\([^"]*\)":{"dtype.*/\1/p'
}
# OLD NEW: every parameter of NEW begins with that of OLD, bit for bit. Prints the number
# of those that have grown, by rows that are not all zero except in biases.
rows_kept() {
    grew=0
    parameters "$1" >"$T/parameters"
    [ -s "$T/parameters" ] || return 1
    while read -r name; do
        tensor "$1" "$name" >"$T/smaller"; tensor "$2" "$name" >"$T/larger"
        size=$(wc -c <"$T/smaller")
        cmp -s -n "$size" "$T/smaller" "$T/larger" || { echo "$name"; return 1; }
        [ "$(wc -c <"$T/larger")" -gt "$size" ] || continue
        grew=$((grew + 1))
        case $name in *bias*) continue ;; esac
        tail -c +$((size + 1)) "$T/larger" | tr -d '\0' | grep -q . ||
            { echo "$name: zeros"; return 1; }
    done <"$T/parameters"
    echo $grew
}
# OLD NEW: the pieces of OLD have the same ids in NEW
ids_kept() {
    tensor "$1" vocab >"$T/smaller"; tensor "$2" vocab >"$T/larger"
    cmp -i 16 -n $(($(wc -c <"$T/smaller") - 16)) "$T/smaller" "$T/larger"
}
# NAME TEXT NEW-TEXT WORDS TENSORS OPTIONS...: grows by WORDS, which makes TENSORS grow
grows() {
    name=$1 first=$2 second=$3 words=$4 tensors=$5; shift 5
    rm -rf grow; mkdir grow
    good "$name" grow --data ../$first $tiny --precision f32 "$@" --steps 4 --checkpoint old.st
    again="--init-from old.st --grow-vocab --data ../$second --threads 1 --batch-sz 4 $tune_more"
    again="$again --precision f32 --schedule constant --lr-warmup 0 --checkpoint new.st"
    good "$name, grown" grow $again --steps 4 --lr 50 --grad-clip 0 --eval-every 2 --keep-best
    check "$name: the message says so: $(grep grow err)" \
        grep -q "^--grow-vocab: $words .* appended to the [0-9]* of the vocabulary" err
    check "$name: the best is the start" [ "$(meta grow/new.best.st step)" = 0 ]
    got=$(rows_kept grow/old.st grow/new.best.st)
    check "$name: all old rows are kept, and $tensors tensors have more: $got" [ "$got" = $tensors ]
    check "$name: all old ids are kept" ids_kept grow/old.st grow/new.best.st
    rm grow/new.st
    good "$name, ten steps" grow $again --steps 10
    check "$name: finite" finite grow/new.st
    mv grow/new.st grow/ten.st
    good "$name, five steps" grow $again --steps 5
    good "$name, and five more" grow --checkpoint new.st --steps 10 --threads 1
    check "$name: 5 + 5 steps equal 10, bit-exactly" same_state grow/ten.st grow/new.st
}
grows "grown words" w.txt n.txt 7 3 --tokens words
good "a dry run" grow --init-from old.st --grow-vocab --data ../n.txt --dry-run
check "has the grown vocabulary" grep -q 'vocabulary 29$' out
good "a new word in a prompt" grow --checkpoint ten.st --no-train --generate 3 --threads 1 \
    --prompt "zebra yak"
good "with --min-count 2" grow --init-from old.st --grow-vocab --data ../n.txt --min-count 2 \
    --steps 1 --threads 1
check "one word is <unk>, which is appended, too" grep -q '^--grow-vocab: 7 words appended' err
check "and one token in about 1500: $(grep unk err)" grep -q '^0.1 % .* is <unk>.*--min-count' err
good "nothing new" grow --init-from ten.st --grow-vocab --data ../n.txt --steps 1 --threads 1
check "is reported" grep -q '^--grow-vocab: the text has no new words for the vocabulary' err
grows "grown characters" t.txt w.txt 9 3 --tokens chars
family_grows
good "bytes" grow --data ../t.txt $tiny --steps 1 --checkpoint bytes.st
cd grow
refused "--grow-vocab requires --init-from" --grow-vocab --data ../n.txt --tokens words
refused "--grow-vocab requires --init-from, .*: leave it out to resume" --grow-vocab \
    --checkpoint new.st --steps 20
refused "--grow-vocab extends .* the tokens of bytes.st are bytes: all 256" --grow-vocab \
    --init-from bytes.st --data ../n.txt
refused "--grow-vocab and --vocab cannot be combined" --grow-vocab --init-from old.st --vocab 99 \
    --data ../n.txt
refused "--min-count is 3 here .* but 0 in the checkpoint" --init-from old.st --min-count 3 \
    --data ../w.txt
refused "n.txt: the word 'y0' .*: --grow-vocab appends it and all others that the training" \
    --init-from old.st --data ../n.txt
cd ..

# ========================================================================================
section "parameter groups"

mkdir rules
groups="--init-from ../eval/never.st --data ../t.txt --threads 1 --batch-sz 4 --precision f32"
groups="$groups --optim adam --schedule constant --lr-warmup 0 $tune_more"
first=$(header eval/never.st | grep -o '"layers\.0\.[^"]*"' | head -n 1 | tr -d '"')
good "frozen parameters" rules $groups --freeze '*,!layers.0.*' --steps 4 --checkpoint four.st \
    --log log.jsonl
bytes_of eval/never.st in_emb.weight >x
bytes_of rules/four.st in_emb.weight >y
check "are unchanged" [ -s x -a -s y ]
check "are unchanged, bit-exactly" cmp x y
bytes_of eval/never.st "$first" >x
bytes_of rules/four.st "$first" >y
check "others are trained: $first" differ x y
header rules/four.st | tr '{' '\n' | grep -o '"optim.0.[^"]*"' >x
check "have no state: $(head -n 3 x | tr '\n' ' ')" \
    [ "$(grep -vc '"optim.0.layers.0' x)" -eq 0 -a -s x ]
check "the log counts the others" \
    [ "$(grep '"start"' rules/log.jsonl | field trained)" -lt \
    "$(grep '"start"' rules/log.jsonl | field params)" ]
check "and so does the first message" \
    grep -q '^.* parameters are trained, the others are frozen' err
good "two steps" rules $groups --freeze '*,!layers.0.*' --steps 2 --checkpoint two.st
good "and two more" rules --checkpoint two.st --steps 4 --threads 1
check "2 + 2 steps equal 4, bit-exactly" same_state rules/four.st rules/two.st
good "half of the rate" rules $groups --lr 0.01 --lr-of '*=9,*=0.5' --steps 3 --checkpoint of.st
good "the same rate" rules $groups --lr 0.005 --steps 3 --checkpoint half.st
check "are the same, bit-exactly" same_state rules/of.st rules/half.st
good "resuming with other rates" rules --checkpoint of.st --steps 5 --threads 1 \
    --lr-of 'in_emb.*=0.1'
check "reports the change" grep -q -e '--lr-of' err
good "no decay" rules $groups --weight-decay 0.3 --no-decay 'default,layers.*' --steps 3 \
    --checkpoint none.st
good "no weight decay" rules $groups --weight-decay 0 --steps 3 --checkpoint zero.st
check "is the same, bit-exactly" same_state rules/none.st rules/zero.st
good "decay of matrices" rules $groups --weight-decay 0.3 --no-decay default --steps 3 \
    --checkpoint default.st
check "is not" differ rules/default.st rules/zero.st
cd rules
fresh="--data ../t.txt --threads 1"
refused "--freeze is .* here .* in the checkpoint" --checkpoint four.st --steps 9 \
    --freeze 'in_emb.*'
wrong="--freeze: expected patterns that select parameters, got 'layer.0'"
refused "$wrong. Their names, with \* for numbers: .*in_emb.weight.*layers\.\*\." $fresh \
    --freeze 'in_emb.*,layer.0'
refused "--freeze: expected patterns" $fresh --freeze '!layers.*'
refused "--freeze \*: no parameter is left to train" $fresh --freeze '*'
refused "--lr-of: expected PATTERN=FACTOR .* got 'in_emb.weight'" $fresh --lr-of in_emb.weight
refused "--lr-of: .*use --freeze" $fresh --lr-of 'layers.*=2,in_emb.weight=0'
refused "--lr-of: expected patterns" $fresh --lr-of 'none=2'
refused "--no-decay has no effect: it applies only to runs with --weight-decay" $fresh \
    --no-decay default --weight-decay 0
refused "--no-decay: expected patterns" $fresh --no-decay default,none --weight-decay 1
refused "did you mean --freeze" $fresh --freez 'in_emb.*'
cd ..

# ========================================================================================
section "generation and help"

sample() { # FILE OPTIONS...: 40 tokens without data; standard output has only the text
    to=$1; shift
    run log --checkpoint run.st --no-train --generate 40 --threads 1 "$@"
    if [ $rc -eq 0 ] && [ -s out ]; then
        pass
    else
        fail "--generate $*: exit code $rc: $(head -c 300 err)"
    fi
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
check "a seed is repeatable" cmp g1 g2
check "another seed differs" differ g3 g4
check "temperature 0 does not depend on the seed" cmp g5 g6
check "top-k 1 equals temperature 0" cmp g5 g7
check "the text begins with the prompt" grep -q '^the cat' g1
check "the text continues" [ "$(grep -o '^the cat.*' g5 | head -c 100 | wc -c)" -gt 12 ]
check "it has learnt the text" grep -q 'the cat sat' g5
for g in g1 g3 g5; do
    check "$g: only the prompt, 40 bytes and at most a line end" \
        [ "$(wc -c <$g)" -ge 47 -a "$(wc -c <$g)" -le 48 ]
done
check "40 bytes without a prompt" [ "$(wc -c <g8)" -ge 40 -a "$(wc -c <g8)" -le 41 ]
# without a seed the texts differ, and the seed is reported
sample g9 --prompt "the cat" --temperature 3 --top-p 0
drawn=$(sed -n 's/.*sampled with --seed \([0-9]*\)$/\1/p' err)
check "the seed is reported" [ -n "$drawn" ]
sample g10 --prompt "the cat" --temperature 3 --top-p 0
check "another text" differ g9 g10
sample g11 --prompt "the cat" --temperature 3 --top-p 0 --seed "$drawn"
check "the seed reproduces the text" cmp g9 g11
# one seed, two prompts: the samples differ
sample g12 --prompt "the dog" --temperature 1000 --top-p 0 --seed 1
sample g13 --prompt "the cat" --temperature 1000 --top-p 0 --seed 1
tail -c +8 g12 >a; tail -c +8 g13 >b
check "two prompts, two texts" differ a b
printf 'the cat\n' |
    (cd log && exec "$bin" --checkpoint run.st --no-train --generate 40 --threads 1 --seed 1 \
    --prompt -) >g14 2>err
check "a prompt from standard input" cmp g1 g14
check "generating writes nothing" [ "$(tmps log)" -eq 0 ]
good "generation of words" log --checkpoint words.st --no-train --generate 10 --prompt "one two" \
    --threads 1
check "words are separated" grep -q '^one two ' out
good "training, then a text" log $learn --steps 20 --generate 10 --prompt "the"
check "only the text is on standard output" grep -q '^the' out
check "no results among the text" [ "$(grep -c "valid\|$learned" out)" -eq 0 ]
check "the results are on standard error" [ "$(grep -c "^step 20: valid\|$learned" err)" -ge 2 ]
# a checkpoint alone only generates; an option for training resumes first
cp log/run.st log/more.st
good "a text of a checkpoint" log --checkpoint more.st --generate 40 --threads 1 --seed 1 -p "the cat"
check "the same text as with --no-train" cmp g1 out
check "nothing is trained" cmp log/run.st log/more.st
check "which is reported" grep -q '^only generates, as with --no-train' err
check "without results" [ "$(grep -c "valid\|$learned" err)" -eq 0 ]
last=$(meta log/more.st step)
good "more steps, then a text" log --checkpoint more.st --steps $((last + 1)) --generate 4
check "are trained" [ "$(meta log/more.st step)" -eq $((last + 1)) ]
rm -f log/more.st*
good "evaluations of a part" log --data ../t.txt $tiny --steps 2 --eval-every 1 --eval-blocks 1 \
    --eval-batch-sz 1
check "report its size: $(grep valid err)" grep -q '^step 1: valid .*, [0-9.]* % of the text)' err
run bad --checkpoint chars.st --no-train --generate 5 --prompt 'the cat' --threads 1
check "known characters" [ $rc -eq 0 ]
run bad --checkpoint chars.st --no-train --generate 5 --prompt '#' --threads 1
check "a prompt with an unknown character: exit code 2, got $rc" [ $rc -eq 2 ]
check "a prompt with an unknown character: the message" grep -q -e '--prompt' err

good "help" . --help all
cp out help
check "nothing on standard error" [ ! -s err ]
check "help: at most 80 columns" [ "$(awk 'length > 80' help | wc -l)" -eq 0 ]
good "short help" . --help
check "short help: a screen of 24 lines, with the next prompt" [ "$(wc -l <out)" -le 23 ]
check "short help: at most 80 columns" [ "$(awk 'length > 80' out | wc -l)" -eq 0 ]
check "exit codes" \
    [ "$(tr -s '\n ' ' ' <help |
    grep -c 'Exit code: 0 success; 1 failed .* 130 stopped by Ctrl-C, 143 by SIGTERM')" -eq 1 ]
# Every option is either local to a start and a machine, or in the checkpoint; --help all
# lists all.
sed -n 's/^  \(-[a-z], \)*--\([a-z][a-z0-9-]*\)\( .*\|\)$/\2/p' help |
    grep -v '^help$\|^preset$' | sort >all
header log/run.st | sed 's/.*"config":"{//; s/}","step".*//' | tr ',' '\n' |
    sed -n 's/^\\"\([a-z][a-z0-9-]*\)\\":.*/\1/p' >names
{ echo; for name in $local_options; do echo "$name"; done; } >>names
grep -v '^$\|^preset$' names | sort -u >x
check "the checkpoint contains all options that are not local: $(comm -3 all x |
    tr '\n' ' ')" \
    cmp all x
for preset in $(tail -n +2 listed | cut -f 1); do
    check "help has $preset" grep -q "^ *$preset " help
    good "--preset $preset" . --preset $preset --help
    check "--preset $preset shows its values" differ help out
done
family_small_presets

# ========================================================================================
section "watch and talk"

# FILE CHECKPOINT LINES OPTIONS..: pipes LINES (a printf format) to a conversation; leaves
# $rc, $T/err, and the answers in FILE
talk() {
    to=$1 from=$2 lines=$3; shift 3
    printf "$lines" | (cd log &&
        exec $limited "$bin" --checkpoint "$from" --interactive --threads 1 "$@") >"$to" 2>err
    rc=$?
}
talks() { talk "$@"; if [ $rc -eq 0 ]; then pass; else fail "talk $*: exit code $rc:" \
    "$(head -c 300 err)"; fi; }
talks t1 run.st 'the cat\n' --seed 1 --generate 40
tail -c +8 g1 >want
check "an answer equals the text of --generate" cmp want t1
check "no prompt without a terminal" [ "$(grep -c '^>' err)" -eq 0 ]
talks t2 run.st 'the cat' --seed 1 --generate 40
check "a last line without a line end" cmp t1 t2
talks t2 run.st 'the \\\ncat\n' --seed 1 --generate 5
sample t3 --seed 1 --generate 5 --prompt 'the 
cat'
check "a backslash joins lines" [ "$(printf 'the \ncat'; cat t2)" = "$(cat t3)" ]
# The conversation is remembered: the second answer continues the whole text.
conversation() {
    talks a1 "$1" "$2\n" --seed 5 --generate 12
    talks t3 "$1" "$2\n$3\n" --seed 5 --generate 12
    head -c "$(wc -c <a1)" t3 >x
    check "$1: the first answer" cmp a1 x
    whole=$(printf %s "$2$4"; cat a1; printf %s "$3")
    run log --checkpoint "$1" --no-train --seed 5 --generate 12 --threads 1 --prompt "$whole"
    { printf %s "$whole$4"; tail -c +$((1 + $(wc -c <a1))) t3; } >want
    check "$1: the second answer continues the whole text" cmp want out
    talks t4 "$1" "$2\n$3\n\n$2\n$3\n/reset\n$2\n" --seed 5 --generate 12
    cat t3 t3 a1 >want
    check "$1: an empty line and /reset start over" cmp want t4
    talks t4 "$1" "$3\n" --seed 5 --generate 12 --prompt "$2$4"
    talks t5 "$1" "$2\n\n$3\n" --seed 5 --generate 12 --prompt "$2$4"
    run log --checkpoint "$1" --no-train --seed 5 --generate 12 --threads 1 --prompt "$2$4$3"
    { printf %s "$2$4$3$4"; cat t4; } >want
    check "$1: --prompt begins a conversation" cmp want out
    tail -c "$(wc -c <t4)" t5 >x
    check "$1: each one" cmp t4 x
}
conversation run.st "the cat" "the dog" ""
good "words with <unk>" log --data ../w.txt $tiny $words_more --tokens words --min-count 2 \
    --steps 5 --checkpoint unk.st
conversation unk.st "one two" "three" " "
cp bad/chars.st log
conversation chars.st "the cat" "the dog" ""
talks t1 run.st '/help\n'
check "help is not on standard output" [ ! -s t1 ]
check "help" grep -q '^An empty line or /reset' err
talk t1 run.st '/foo\n /foo\n' --generate 5 --seed 1
check "an unknown command is refused: exit code 1, got $rc" [ $rc -eq 1 ]
check "and reported: $(cat err)" grep -q '^/foo: unknown command; the commands are /help' err
talks t2 run.st ' /foo\n' --generate 5 --seed 1
check "after a space, it is text" cmp t1 t2
talks t1 run.st 'the cat\n'
check "a random seed is reported" grep -q -e '--- sampled with --seed [0-9]*$' err
drawn=$(sed -n 's/.*sampled with --seed \([0-9]*\)$/\1/p' err)
talks t2 run.st 'the cat\n' --seed "$drawn"
check "and gives the same answer, of 256 tokens" cmp t1 t2
check "of 256 bytes: $(wc -c <t1)" [ "$(wc -c <t1)" -ge 256 -a "$(wc -c <t1)" -le 257 ]
# Unknown words are reported. Without <unk> the line is refused, and the conversation
# continues.
talks t1 unk.st 'one zebra two yak\n' --generate 3 --seed 1
check "unknown words are reported" \
    grep -q "^not in the vocabulary, read as <unk>: 'zebra', 'yak'$" err
check "and the line is answered" [ -s t1 ]
good "unknown words of a prompt" log --checkpoint unk.st --no-train --generate 3 \
    --prompt "one zebra" --threads 1
check "are reported" grep -q "^not in the vocabulary, read as <unk>: 'zebra'$" err
printf 'one zebra two yak\n' >log/zebra
good "unknown words of a scored text" log --checkpoint unk.st --score zebra --threads 1
check "are counted" grep -q '^2 of 5 tokens are not in the vocabulary, read as <unk>' err
awk 'BEGIN { for (i = 0; i < 300; i++) print "one two zebra" }' >log/zebras
good "unknown words with --init-from" log --init-from unk.st --data zebras --steps 1 --threads 1 \
    --batch-sz 2 --eval-batch-sz 1
check "are reported: $(grep unk err)" grep -q '^2[0-9].[0-9] % of the training text is <unk>' err
talk t1 words.st 'zebra\none\n' --generate 3 --seed 1
check "a line that cannot be encoded: exit code 1, got $rc" [ $rc -eq 1 ]
check "the message names the word" \
    grep -q "^$prog: the word 'zebra' at byte 0 is not in the vocabulary.*the line is ignored$" err
talks t2 words.st 'one\n' --generate 3 --seed 1
check "the next line is answered" cmp t1 t2
talk t1 chars.st '#\nthe cat\n' --generate 3
check "an unknown character is named" \
    grep -q "the character '#' at byte 0 is not in the vocabulary" err
# the end of a text
talks t1 run.st 'the cat\nthe cat\n' --temperature 0 --stop at
check "--stop ends an answer: $(cat t1)" \
    [ "$(awk '
        !/at$/ || !/at/ { bad = 1 } { s = $0; if (gsub(/at/, "", s) != 1) bad = 1 }
        END { print bad + 0, NR }' t1)" = "0 2" ]
sample t2 --temperature 0 --prompt "the cat" --generate 400 --stop 'at'
check "and --stop ends a text" [ "$(cat t2)" = "the cat$(head -n 1 t1)" ]
talks t1 run.st 'the cat\n' --temperature 0 --generate 400 --stop '\n'
check "a line end ends an answer" [ "$(wc -l <t1)" -eq 1 ]
# --repetition-penalty: a large one never repeats a byte; with a window of 1 never twice
# in a row
sample t1 --temperature 0 --prompt "the" --generate 8 --repetition-penalty 100 --repetition-window 0
check "a large penalty: no repeated byte: $(cat t1)" \
    [ -z "$(head -c 11 t1 | od -An -v -tx1 | tr -s ' ' '\n' | grep . | sort | uniq -d)" ]
sample t2 --temperature 0 --prompt "the" --generate 60 --repetition-penalty 100 \
    --repetition-window 1
check "a window of one: not twice in a row: $(cat t2)" \
    [ -z "$(head -c 63 t2 | od -An -v -tx1 | tr -s ' ' '\n' | grep . | uniq -d)" ]
check "but repeated later" \
    [ -n "$(head -c 63 t2 | od -An -v -tx1 | tr -s ' ' '\n' | grep . | sort | uniq -d)" ]
sample t2 --temperature 0 --prompt "the" --generate 60 --repetition-penalty 100 \
    --repetition-window 3
check "a window of three: no byte is one of the three before it: $(cat t2)" \
    [ "$(head -c 63 t2 | od -An -v -tx1 | tr -s ' ' '\n' | grep . | awk '
        $1 == a || $1 == b || $1 == c { bad++ } { c = b; b = a; a = $1 }
        END { print bad + 0, NR }')" = "0 63" ]
sample t1 --temperature 0 --prompt "the" --repetition-penalty 1
sample t2 --temperature 0 --prompt "the"
check "a penalty of 1 has no effect" cmp t1 t2
# a byte-order mark before a prompt and before a conversation, and U+FEFF later
printf "$mark"'the cat\n' | (cd log && exec "$bin" --checkpoint chars.st --prompt - --no-train \
    --generate 9 --seed 5 --threads 1) >t1 2>err
good "a prompt" log --checkpoint chars.st --prompt "the cat" --no-train --generate 9 --seed 5 \
    --threads 1
check "a mark before a prompt is skipped" cmp t1 out
talks t1 chars.st "$mark"'the cat\n' --generate 9 --seed 5
talks t2 chars.st 'the cat\n' --generate 9 --seed 5
check "a mark before a conversation is skipped" cmp t1 t2
talk t1 chars.st 'the cat\n\n'"$mark"'the cat\n' --generate 9 --seed 5
check "U+FEFF later is a character" \
    grep -q "the character '.xEF.xBB.xBF' at byte 0 is not in the vocabulary" err
# samples during training
good "samples during training" log $learn --steps 20 --sample-every 10 --sample-prime 20 \
    --sample-length 30 --temperature 0 --log sampled.jsonl --checkpoint sampled.st
check "two samples, on standard error" \
    [ "$(grep -c '^--- step [12]0, the model continues' err)" -eq 2 ]
check "a part of the held-out text and 30 bytes" \
    [ "$(tr '\n' ' ' <err | grep -o '==> .\{20\}==>.\{30\} ---' | wc -l)" -eq 2 ]
check "only results on standard output" \
    [ "$(grep -vc "^step 20: valid bpb\|$learned" out)" -eq 0 ]
good "without samples" log $learn --steps 20 --log plain.jsonl --checkpoint plain.st
check "the run is the same" same_state log/sampled.st log/plain.st
# samples at evaluations
watched="--sample-every auto --sample-prime 0 --sample-length 30"
watched="$watched --steps 20 --eval-every 5 --eval-blocks 1"
good "without a terminal" log $learn $watched --checkpoint unseen.st
check "no samples" [ "$(grep -c '^---' err)" -eq 0 ]
good "--sample-every on" log $learn $watched --sample-every on --checkpoint seen.st
check "four samples of 30 bytes" \
    [ "$(tr '\n' ' ' <err | grep -o -- '--- step [0-9]*, a sample .\{29,31\}---' | wc -l)" -eq 4 ]
check "the run is the same" same_state log/unseen.st log/seen.st
if command -v script >/dev/null && script -qec true /dev/null >/dev/null 2>&1; then
    terminal() { # OPTIONS..: runs the trainer with a terminal; leaves $T/seen
        words=$(printf " '%s'" "$@")
        (cd log && TERM=vt100 script -qec "stty cols 80; exec '$bin'$words" /dev/null) \
            </dev/null 2>&1 | tr -d '\r' >seen
    }
    terminal $learn $watched --checkpoint half.st --steps 10
    check "samples on a terminal" grep -q '^--- step 5, a sample' seen
    terminal $learn $watched --checkpoint half.st
    check "also after a resumption" grep -q '^--- step 15, a sample' seen
    check "stopped, resumed and with samples: the run is the same" \
        same_state log/unseen.st log/half.st
    terminal $learn $watched --checkpoint none.st --no-sample-every
    check "--no-sample-every: none" [ "$(grep -c 'a sample' seen)" -eq 0 ]
else
    echo "skipped: samples on a terminal (no script)"
fi
# --weights: a model with matrices that are large enough
wide=$(echo "$learn" | sed 's/--hid-sz 16/--hid-sz 64/; s/--inner-hid-sz 32/--inner-hid-sz 64/')
good "a wider model" log $wide --steps 40 --checkpoint wide.st --threads 1
for weights in f32 bf16 int8; do
    good "--weights $weights" log --checkpoint wide.st --eval-only --data ../t.txt --log \
        "$weights.jsonl" --weights $weights --threads 1
    check "the message of $weights" \
        [ "$(grep -c "^matrices rounded to $weights; generation reads up to [0-9.]* [KM]i*B of them per token" err)" \
        = "$([ $weights = f32 ] && echo 0 || echo 1)" ]
done
losses=$(for weights in f32 bf16 int8; do grep '"split":"valid"' log/$weights.jsonl |
    field loss; done | tr '\n' ' ')
check "small rounding errors: $losses" \
    awk -v l="$losses" '
        BEGIN {
            split(l, a)
            for (i = 2; i <= 3; i++) { d = a[i] - a[1]; if (!(d > -0.02 && d < 0.02) ||
                d == 0) exit 1 } exit a[2] == a[3]
        }'
good "generation" log --checkpoint wide.st --no-train --generate 40 --temperature 0 --weights int8 \
    --threads 1
cp out t1
good "with more threads" log --checkpoint wide.st --no-train --generate 40 --temperature 0 \
    --weights int8 --threads 2
check "the result is the same" cmp out t1
check "40 bytes" [ "$(wc -c <t1)" -ge 40 ]
# the best and the last
best="$learn --steps 90 --eval-every 30 --eval-blocks 0 $whole_evaluations --threads 1"
good "--keep-best" log $best --keep-best --checkpoint keep.st --log keep.jsonl
check "equals --best" same_state log/best2.st log/keep.best.st
check "the message names the step" \
    grep -q "^step $(meta log/keep.best.st step): best so far, saved in keep.best.st$" err
check "and in the log" \
    [ "$(events log/keep.jsonl best | tail -n 1 | field step)" = "$(meta log/keep.best.st step)" ]
check "the log is JSON" json log/keep.jsonl
cp log/keep.best.st kept.st
good "a run that does not improve" log $best --keep-best --checkpoint keep.st --steps 92 --lr 0 \
    --eval-every 1
check "keeps its best" cmp kept.st log/keep.best.st
check "the end names both files: $(tail -n 1 err)" \
    [ "$(tail -n 1 err)" = "saved in keep.st; the best evaluated model is in keep.best.st" ]
check "the last state is newer" [ "$(meta log/keep.st step)" = 92 ]
cp kept.st log/goes.st
good "the best is resumed" log --checkpoint goes.st --steps 95 --threads 1
check "to its end" [ "$(meta log/goes.st step)" = 95 ]
# --out
good "--out" . --data t.txt $tiny --steps 4 --out new/run
check "checkpoint, log, curves" \
    [ -s new/run/model.safetensors -a -s new/run/log.jsonl -a "$(ls new/run/tb | wc -l)" = 1 ]
good "--out again, with another log" . --data t.txt --steps 6 --out new/run \
    --log new/own.jsonl --threads 1
check "resumes" [ "$(meta new/run/model.safetensors step)" = 6 ]
check "the given log is used" grep -q '"event":"resume","step":4' new/own.jsonl
cp new/run/log.jsonl x
good "--out and generation" . --out new/run --no-train --generate 3 --threads 1
check "writes nothing" [ "$(ls new/run/tb | wc -l)" = 2 ]
check "the log is unchanged" cmp x new/run/log.jsonl
good "--keep-best with --out" . --data t.txt $tiny --steps 4 --eval-every 2 --eval-blocks 1 \
    --out new/best --keep-best
check "the name of the best" [ -s new/best/model.best.safetensors ]
# refused options
cd bad || exit 1
refused 'evaluation and generation without training require --checkpoint' --interactive
refused '--interactive and --eval-only cannot be combined' \
    --interactive --eval-only --checkpoint good.st
refused '--prompt - and --interactive cannot be combined' \
    --interactive --prompt - --checkpoint good.st
refused '--log has no effect' --interactive --checkpoint good.st --log L.jsonl
refused '--keep-best requires --checkpoint' $t $tiny --steps 3 --keep-best
refused '--best and --keep-best cannot be combined' \
    $t $tiny $new --eval-every 1 --best B.st --keep-best
refused '--out t.txt' $t $tiny --steps 3 --out t.txt
refused '--out t.txt/x' $t $tiny --steps 3 --out t.txt/x
refused "--out: expected the name of a directory, got ''" $t $tiny --steps 3 --out=
refused 'no such checkpoint: new/model.safetensors; check the name after --out, or give --data' \
    $tiny --steps 3 --out new
refused 'dir/model.safetensors\|--checkpoint' --out dir --no-train --generate 3
run . $t $tiny --steps 3 --out lost $too_much
check "no memory for a step: no directory of --out" [ $rc -eq 2 -a ! -e lost ]
refused "--stop: expected a text, got ''" --no-train --generate 3 --checkpoint good.st --stop=
for more in "prompt x" "stop x" "temperature 1" "top-k 3" "top-p 0.5" "repetition-penalty 1.1"; do
    refused "--${more% *} has no effect: it applies only to --generate.* --interactive" \
        $t $tiny $new --$more
done
for more in "repetition-window 3 --generate 3" "gpu 1" tf32 tune no-graph join-lines; do
    refused "--${more%% *} has no effect: it applies only to" $t $tiny $new --$more
done
refused '--weights has no effect: it applies only to generation and evaluation' \
    $t $tiny $new --weights int8
refused '--weights has no effect: the model has no matrix of 32 x 32' \
    --checkpoint good.st --no-train --generate 3 --weights bf16
refused "--weights: expected one of .*, got 'q4'" \
    --checkpoint good.st --no-train --generate 3 --weights q4
refused '--save-every has no effect' $t $tiny --steps 3 --save-every 2
useless >options
while read -r option; do
    name=${option%% *}
    refused "$name has no effect: it applies only to" $t $tiny $new $option
done <options
refused '--repetition-penalty: expected .*, got .0.5.' \
    --no-train --generate 3 --checkpoint good.st --repetition-penalty 0.5
cd ..
if script -qec true /dev/null >/dev/null 2>&1 </dev/null; then
    # Ctrl-C stops an answer; at the prompt it ends the program
    rm -f tty.in; mkfifo tty.in
    cat >tty.sh <<END2
cd "$T/log" && echo \$\$ >pid &&
exec "$bin" --checkpoint run.st --interactive --generate 100000000 --threads 1 --seed 1
END2
    rm -f log/pid
    TERM=xterm script -qec "sh $T/tty.sh" /dev/null >tty.out 2>&1 <tty.in &
    running=$!
    exec 3>tty.in
    signs() { tr '\r' '\n' <tty.out | grep -c '^> '; }
    bytes() { wc -c <tty.out; }
    check "a prompt on a terminal" wait_until above 0 signs
    printf 'the cat\n' >&3
    # more than the first lines and the typed text
    check "an answer is printed while it is generated" wait_until above 600 bytes
    kill -INT "$(cat log/pid)"
    check "Ctrl-C stops the answer only" wait_until above 1 signs
    kill -INT "$(cat log/pid)"
    collect
    exec 3>&-
    check "Ctrl-C at the prompt: exit code 130, got $rc" [ $rc -eq 130 ]
    # the progress line fits the terminal
    for width in 100 80 30; do
        TERM=xterm script -qec \
            "stty cols $width; $bin --data t.txt $tiny --steps 40 --eval-every 20" \
            /dev/null >tty.out 2>/dev/null </dev/null
        tr '\r' '\n' <tty.out | sed -n 's/\x1b\[K$//p' >screen
        check "$width columns: redrawn, never wider: $(tail -n 1 screen)" \
            awk -v w=$width 'length($0) >= w { bad = 1 } END { exit bad || NR < 2 }' screen
        [ $width -lt 80 ] ||
            check "$width columns: the whole line" \
            grep -q '^step 40/40  \[=*\]  100%  [0-9.]* bpb  best [0-9.]*  [0-9.k]* tok/s  left 0.0s' screen
        check "$width columns: the progress" grep -q '100%  [0-9.]* bpb' screen
    done
fi

section "end"
echo "$passed passed, $failed failed"
[ $failed -eq 0 ] && [ $passed -gt 0 ]
