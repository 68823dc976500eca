#!/bin/sh
# trainer_sru.sh [BINARY] - tests the trainer of SRU and SRU++ from outside: sizes of the presets, resuming after kill -9, repeatability, bad
# input, full disks, signals, losses that are not finite, the log, evaluation and generation. What it shares with train_attn_span through
# examples/train.h is tested to the bottom by trainer.sh.
#
#     tests/trainer_sru.sh build/train_sru
#     TRAINER_SEED=1234 tests/trainer_sru.sh ...        the random moments of an earlier run again (it prints its seed)
#
# Needs and does what trainer.sh does. The last line is "N passed, N failed".

here=$(cd "$(dirname "$0")" && pwd)
bin=${1:-build/train_sru}
. "$here/trainer_lib.sh"

# Easy text, short enough for the streams to wrap.
awk 'BEGIN { for (i = 0; i < 90; i++) print "the cat sat on mat " i % 7 " and the dog ran" }' >t.txt
awk 'BEGIN { split("one two three four five six seven eight nine ten eleven twelve", w, " ")
    for (i = 0; i < 150; i++) { for (j = 0; j < 8; j++) printf "%s ", w[(i * j + i % 5) % 12 + 1]; print "x" i % 9 } }' >w.txt
tiny="--nlayers 2 --hid-sz 16 --proj-sz 8 --block-sz 16 --batch-sz 4 --threads 1"
srupp="$tiny --nheads 2 --dropout 0.2 --attn-dropout 0.1 --lr 0.01 --lr-warmup 20 --weight-decay 0.01"
flat="$srupp --schedule constant"                       # a rate that does not depend on --steps
plain="$tiny --cell sru --dropout 0.2 --rnn-dropout 0.1 --lr 0.01 --schedule constant --lr-warmup 20"
files="--data ../t.txt --checkpoint run.st --log log.jsonl"

# =====================================================================================================================
section "presets"

# the numbers of parameters that the papers give, in millions; those of the older models counted by hand from their shapes
while read -r preset want exact; do
    good "$preset" . --preset "$preset" --dry-run
    n=$(sed -n 's/^\([0-9]*\) parameters.*/\1/p' out)
    check "$preset has $want million parameters, not ${n:-0}" [ "$(echo "${n:-0}" | awk '{ printf "%.1f", $1 / 1e6 }')" = "$want" ]
    check "$preset has $exact parameters, not ${n:-0}" [ "${n:-0}" -eq "$exact" ]
done <<END2
enwik8-base 107.6 107566295
enwik8-large 190.6 190607575
enwik8-large-8to1 195.0 194993815
enwik8-fp32 42.3 42345815
wt103-base 147.7 147676036
wt103-large 231.7 231690116
wt103-large-8to1 233.7 233741476
wt103-large-k5 224.9 224884892
lm1b-base 328.3 328313803
lm1b-large-k5 465.3 465318339
enwik8-sru 16.8 16845046
enwik8-sru-8x1312 37.6 37577238
enwik8-sru-10x1152 37.1 37100918
enwik8-sru-8x3056 47.7 47717117
enwik8-sru-12x2048 48.8 48805325
ptb 24.0 24026720
END2
good "attention in layers 5 and 10" . --preset wt103-large-k5 --dry-run
check "it says so" grep -q '^10 layers, 2 with attention' out
good "the vocabulary of a text" . --data w.txt --tokens words $tiny --dry-run
check "22 words" grep -q 'vocabulary 22$' out
good "sizes that are given beside a preset" . --preset demo $tiny --dry-run
n=$(sed -n 's/^\([0-9]*\) parameters.*/\1/p' out)
mkdir count
good "are those of the run" count --preset demo $tiny --data ../t.txt --steps 2 --log log.jsonl
check "the run has $n parameters" [ "$(sed -n 's/.*"params":\([0-9]*\).*/\1/p' count/log.jsonl)" = "$n" ]

# =====================================================================================================================
section "resume after kill -9"

long="$files $srupp --best best.st --steps 200 --save-every 5 --eval-every 25 --eval-blocks 2 --log-every 1 --batch-split 2"
mkdir whole
t0=$(date +%s%N)
good "200 steps in one go" whole $long
whole_ms=$(ms_since "$t0")
check "epochs end" [ "$(meta whole/run.st data.wraps)" -ge 2 ]
check "the log has each step once" [ "$(steps_of whole/log.jsonl | tr '\n' ' ')" = "$(awk 'BEGIN { for (i = 1; i <= 200; i++) printf "%d ", i }')" ]
check "states and memories are in the checkpoint" [ "$(header whole/run.st | grep -o '"state\.[01]\.[a-z.0-9]*"' | sort -u | wc -l)" -ge 6 ]
i=0
while [ $i -lt 8 ]; do
    i=$((i + 1)); roll
    ms=$((whole_ms * rand / 10000))
    rm -rf kill; mkdir kill
    start kill $long
    nap $ms
    kill -9 "$running" 2>/dev/null; collect
    continued "kill $i, after $ms ms of $whole_ms" kill $long
    check "kill $i: the best as in the unbroken run" same_state whole/best.st kill/best.st
done
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
exact_kills count2 $long
if [ -n "$kills" ]; then
    i=0
    while [ $i -lt 10 ]; do
        i=$((i + 1)); roll
        at=$((1 + (calls - 1) * rand / 9999))
        rm -rf kill; mkdir kill
        (cd kill && TRAINER_DIE_AT=$at LD_PRELOAD=$T/kill.so exec "$bin" $long) >/dev/null 2>&1 &
        running=$!; collect
        check "killed by call $at" [ $rc -eq 137 ]
        find kill -name 'best.st*.tmp' -exec rm -f {} +
        continued "kill at call $at of $calls" kill $long
    done
else
    echo "left out: kills at exact calls (no C compiler, or a binary that takes no preloaded library)"
fi

# =====================================================================================================================
section "repeat and resume"

variant "sru++" --data ../t.txt $flat
for optim in sgd adam adamw; do
    variant $optim --data ../t.txt $flat --optim $optim --lr 0.003
done
variant "adagrad" --data ../t.txt $flat --optim adagrad --lr 0.07 --weight-decay 0
variant "radam that skips" --data ../t.txt $flat --radam-skip
variant "attention in every second layer" --data ../t.txt $flat --nlayers 4 --attention-every 2
variant "attention in the last layer" --data ../t.txt $flat --attention-last 1 --attn-norm-first --alpha-init 0.5
variant "no attention" --data ../t.txt $flat --no-attention --no-attn-norm
variant "norm before" --data ../t.txt $flat --norm before
variant "norm before, literal" --data ../t.txt $flat --norm before --literal
variant "norm after, rescale, tanh" --data ../t.txt $flat --norm after --rescale --tanh --highway-bias -1
variant "no highway" --data ../t.txt $flat --no-skip
variant "another width of the embedding" --data ../t.txt $flat --emb-sz 12
variant "... and a layer before all others" --data ../t.txt $flat --emb-sz 12 --input-first
variant "sru" --data ../t.txt $plain
variant "sru, projected, xavier" --data ../t.txt $plain --proj-sz 4 --init-xavier --v-init 0.5
variant "sru v1, tied" --data ../t.txt $plain --v1 --tied --proj-sz 0 --sum-loss --optim sgd --lr 0.1 --grad-clip 5 --lr-decay 0.9 --lr-decay-from 20 --lr-decay-every 5
variant "noam" --data ../t.txt $plain --schedule noam --lr 0.1
variant "adaptive words" --data ../w.txt $flat --tokens words --adapt-io --adapt-io-divval 2 --adapt-io-cutoffs 5,12 --emb-dropout 0.1
variant "adaptive words, projections of their own" --data ../w.txt $flat --tokens words --adapt-io --adapt-io-separate --emb-sz 12 --adapt-io-divval 2 --adapt-io-cutoffs 5,12
variant "characters" --data ../t.txt $flat --tokens chars
variant "compact bytes" --data ../t.txt $flat --tokens bytes-compact
variant "two blocks an update, in two parts" --data ../t.txt $flat --update-param-freq 2 --batch-split 2
variant "two threads" --data ../t.txt $flat --threads 2
variant "recompute" --data ../t.txt $flat --recompute
mkdir plain
good "without recompute" plain --checkpoint run.st --data ../t.txt $flat --steps 60
check "recompute changes no bit" same_state plain/run.st v1/run.st
mkdir bf16
run bf16 --checkpoint first.st --data ../t.txt $flat --steps 2 --precision bf16
if [ $rc -eq 2 ] && grep -q -e '--precision bf16.*not in this build' err; then
    echo "left out: --precision bf16 (the library refuses it)"
else
    variant "bf16" --data ../t.txt $flat --precision bf16
    check "bf16: in the checkpoint" [ "$(header v1/run.st | grep -c 'precision\\":\\"bf16')" -eq 1 ]
    run v1 --checkpoint run.st --data ../t.txt $flat --steps 90 --precision f32
    check "bf16: training does not go on in float: exit code 2, not $rc" [ $rc -eq 2 ]
fi
mkdir split
smooth="$tiny --nheads 2 --dropout 0 --attn-dropout 0 --schedule constant --log-every 1 --data ../t.txt"
losses_agree() { # FILE FILE N TOLERANCE: N losses each that differ by no more
    events "$1" | field loss >a; events "$2" | field loss >b
    [ "$(wc -l <a)" -eq "$3" ] && [ "$(wc -l <b)" -eq "$3" ] && paste a b | awk -v tol="$4" '{ e = $1 - $2; if (!(e <= tol && -e <= tol)) bad = 1 } END { exit bad }'
}
good "in one part" split $smooth --steps 40 --lr 0.01 --log one.jsonl
good "in four" split $smooth --steps 40 --lr 0.01 --log four.jsonl --batch-split 4
check "parts change the rounding only" losses_agree split/one.jsonl split/four.jsonl 40 1e-4
# rate 0: the mean losses of two blocks at a time are those of updates of two blocks
good "a block an update" split $smooth --steps 20 --lr 0 --weight-decay 0 --log freq1.jsonl
good "two blocks an update" split $smooth --steps 10 --lr 0 --weight-decay 0 --log freq2.jsonl --update-param-freq 2
events split/freq1.jsonl | field loss | awk '{ s += $1 } NR % 2 == 0 { printf "{\"event\":\"train\",\"loss\":%.17g}\n", s / 2; s = 0 }' >split/pairs.jsonl
check "an update of two blocks has the states of both" losses_agree split/pairs.jsonl split/freq2.jsonl 10 1e-5
good "sums in place of means" split $smooth --steps 10 --lr 0.01 --optim sgd --grad-clip 0 --weight-decay 0 --log mean.jsonl
good "... with a rate as much smaller" split $smooth --steps 10 --lr 0.000625 --optim sgd --grad-clip 0 --weight-decay 0 --sum-loss --log sum.jsonl
check "are the same" losses_agree split/mean.jsonl split/sum.jsonl 10 1e-4

rates() { events "$1" | field lr | tr '\n' ' '; }
mkdir rates
good "recursive" rates $smooth --steps 8 --lr 1 --schedule recursive --lr-warmup 4 --log r.jsonl
check "a quarter, a half, .. and down: $(rates rates/r.jsonl)" [ "$(events rates/r.jsonl | field lr | awk '{ printf "%.4f ", $1 }')" = "$(awk 'BEGIN { for (n = 0; n < 8; n++) { pi = atan2(0, -1); printf "%.4f ", n < 4 ? (n + 1) / 4 : (1 + cos(pi * n / 8)) / (1 + cos(pi * 3 / 8)) } }')" ]
good "recursive, first 0" rates $smooth --steps 4 --lr 1 --schedule recursive --lr-warmup 4 --lr-first-zero --log z.jsonl
check "0, a quarter, ..: $(rates rates/z.jsonl)" [ "$(rates rates/z.jsonl)" = "0 0.25 0.5 0.75 " ]
good "noam" rates $smooth --steps 8 --lr 2 --schedule noam --lr-warmup 4 --log n.jsonl
check "up to the fourth and down: $(rates rates/n.jsonl)" [ "$(events rates/n.jsonl | field lr | awk '{ printf "%.5f ", $1 }')" = "$(awk 'BEGIN { for (n = 1; n <= 8; n++) { a = n ^ -0.5; b = n * 4 ^ -1.5; printf "%.5f ", 2 / 4 * (a < b ? a : b) } }')" ]
good "decay" rates $smooth --steps 8 --lr 1 --lr-warmup 0 --lr-decay 0.5 --lr-decay-from 4 --lr-decay-every 2 --log d.jsonl
check "halved from the fifth on, every second: $(rates rates/d.jsonl)" [ "$(rates rates/d.jsonl)" = "1 1 1 1 0.5 0.5 0.25 0.25 " ]

# streams of 749 tokens: 46 blocks of 16, or 11 updates of four, then an epoch begins at the beginning
mkdir epoch
good "46 blocks and one" epoch $smooth --steps 47 --checkpoint one.st
check "an epoch begins at the beginning" [ "$(meta epoch/one.st data.wraps) $(meta epoch/one.st data.position)" = "1 16" ]
good "11 updates of four blocks and one" epoch $smooth --steps 12 --update-param-freq 4 --checkpoint four.st
check "... also when blocks are left that make no update" [ "$(meta epoch/four.st data.wraps) $(meta epoch/four.st data.position)" = "1 64" ]

# =====================================================================================================================
section "bad input"

mkdir bad bad/two
cp t.txt w.txt bad
cd bad || exit 1
good "a checkpoint for the bad" . --data t.txt $flat --steps 6 --checkpoint good.st
good "a checkpoint of characters" . --data t.txt $flat --steps 6 --checkpoint chars.st --tokens chars
head -c 70 t.txt >short70.txt       # training text: 64 tokens; four streams of blocks of 16 need 68
awk 'BEGIN { for (i = 0; i < 100; i++) print "quite another text, of another length " i }' >other.txt
awk '{ print NR % 2 ? toupper($0) : $0 }' t.txt >upper.txt
cp t.txt two/train.txt
new="--log L.jsonl --tensorboard TB --checkpoint C.st --steps 3"       # what must not appear
old="--log L.jsonl --tensorboard TB --steps 9"                         # with a checkpoint of its own
t="--data t.txt"

refused 'data' $tiny $new
refused 'nowhere.txt.*no such file' --data nowhere.txt $tiny $new
refused 'short70.txt' --data short70.txt $tiny $new
refused 't.txt\|--batch-sz' $t $tiny $new --batch-sz 4000
refused 'update-param-freq.*too short' $t $tiny $new --update-param-freq 1000
refused 'more parameters than can be counted' --cell sru --proj-sz 0 --nlayers 4096 --hid-sz 268435456 --dry-run
refused 'need a --checkpoint' $t --eval-only
refused 'C.st' $t --eval-only --checkpoint C.st $old
refused 'nodir' $t $tiny $old --checkpoint nodir/C.st
refused 'best.*cannot write' $t $tiny $new --eval-every 1 --best nodir/B.st
refused 'best.*no validation text' --data two $tiny $new --eval-every 1 --best B.st
refused 'best.*eval-every' $t $tiny $new --best B.st
refused 'same file' $t $tiny $new --eval-every 1 --best C.st
refused 'batch-split' $t $tiny $new --batch-split 3
refused 'nheads.*proj-sz' $t $tiny $new --nheads 3
refused 'one of them' $t $tiny $new --attention-every 2 --attention-last 1
refused 'tied.*adapt-io' $t $tiny $new --tied --adapt-io
refused 'tied.*emb-sz' $t $tiny $new --tied --emb-sz 8
refused 'noam.*lr-warmup' $t $tiny $new --schedule noam --lr-warmup 0
refused 'cutoffs' $t $tiny $new --adapt-io --adapt-io-cutoffs 5,x
refused 'cutoff' $t $tiny $new --adapt-io --adapt-io-cutoffs 12,5
refused 'cell' $t $tiny $new --cell lstm
refused 'norm' $t $tiny $new --norm between
refused 'dropout' $t $tiny $new --dropout 1
refused 'max-memory' $t $tiny $new --hid-sz 1024 --max-memory 0.01
refused 'max-memory' $t $tiny $new --hid-sz 268435456
refused 'max-memory' --preset lm1b-large-k5 $t $new --tokens bytes --no-adapt-io --max-memory 1
refused 'unknown option.*block-sz' $t $tiny $new --blok-sz 3
refused 'enwik8-base' $t $tiny $new --preset enwik8-bas
for name in nlayers hid-sz block-sz batch-sz batch-split update-param-freq nheads; do refused "$name" $t $tiny $new --$name 0; done
# a checkpoint decides the model
for option in "--cell sru" "--nlayers 3" "--hid-sz 32" "--proj-sz 4" "--emb-sz 8" "--nheads 4" "--attention-every 2" "--attention-last 1" "--no-attention" "--no-attn-norm" "--norm after" "--highway-bias -3" \
    "--no-skip" "--tanh" "--v1" "--rescale" "--tied" "--adapt-io" "--tokens chars" "--optim adam" "--radam-skip" "--batch-sz 8" "--block-sz 32" "--update-param-freq 2" "--precision bf16"; do
    name=${option%% *}; name=${name#--no-}; name=${name#--}
    refused "--$name is .* here .* in the checkpoint" $t $old --checkpoint good.st $option
done
refused 'seed' $t $old --checkpoint good.st --seed 2
refused 'data\|other.txt' --data other.txt $old --checkpoint good.st
refused 'upper.txt\|data' --data upper.txt $old --checkpoint good.st
refused 'vocab\|not in the' --data w.txt $old --checkpoint chars.st
refused 't.txt' $t $tiny $old --checkpoint t.txt
# what is no checkpoint of this program, or damaged
size=$(wc -c <good.st) head=$(header_size good.st)
for n in 1 8 $((head / 2)) $((8 + head)) $((size / 2)) $((size - 1)); do
    head -c $n good.st >x.st
    refused 'x.st' $t $old --checkpoint x.st
done
{ head -c $((size - 9)) good.st; printf '\377'; tail -c 8 good.st; } >x.st
refused 'x.st.*damaged' $t $old --checkpoint x.st
for script in 's/seqtx.sru\.1"/seqtx.sru.9"/' 's/\\"nlayers\\":2/\\"nlayers\\":3/' 's/\\"hid-sz\\":16/\\"hid-sz\\":24/' 's/"state\.0\.c"/"state.1.c"/' 's/"optim.kind":"[0-9]"/"optim.kind":"3"/' 's/\\"cell\\":\\"sru++\\"/\\"cell\\":\\"sru+-\\"/'; do
    head -c 8 good.st >x.st
    header good.st | sed "$script" >h
    [ "$(wc -c <h)" -eq "$head" ] && ! header good.st | cmp -s - h || fail "the script does not fit the header: $script"
    cat h >>x.st; tail -c +$((9 + head)) good.st >>x.st
    refused 'x.st\|checkpoint' $t $old --checkpoint x.st
done
i=0
while [ $i -lt 20 ]; do
    i=$((i + 1)); roll; at=$((8 + head * rand / 10000)); roll
    { head -c $at good.st; printf "\\$(printf %03o $((rand % 256)))"; tail -c +$((at + 2)) good.st; } >x.st
    run . --checkpoint x.st --no-train --generate 1 --threads 1
    if [ $rc -eq 0 ] || { [ $rc -eq 2 ] && [ "$(wc -l <"$T/err")" -eq 1 ]; }; then pass; else fail "byte $at of the checkpoint as $((rand % 256)): exit code $rc: $(head -c 200 "$T/err")"; fi
done
refused 'prompt' --no-train --generate 5 --checkpoint chars.st --prompt '#'
cd ..

# =====================================================================================================================
section "disk full"

mkdir full
good "10 steps" full --data ../t.txt --checkpoint run.st $flat --steps 10
cp full/run.st full.st
again="--data ../t.txt --checkpoint run.st $flat --steps 40 --save-every 20"
if [ -n "$kills" ]; then
    for at in 1 2 5; do
        (cd full && TRAINER_FULL_AT=$at LD_PRELOAD=$T/kill.so exec timeout -k 5 60 "$bin" $again) >out 2>err </dev/null
        check "no space from call $at: exit code 1" [ $? -eq 1 ]
        check "no space from call $at: told: $(head -c 200 err)" grep -q 'run.st.*[Nn]o space' err
        check "no space from call $at: the old checkpoint is as it was" cmp full.st full/run.st
        check "no space from call $at: no temporary file stays" [ "$(tmps full)" -eq 0 ]
    done
fi
good "with space again" full $again
mkdir straight
good "without the trouble" straight $again
check "with space again: as if nothing had been" cmp full/run.st straight/run.st

# =====================================================================================================================
section "signals"

stop="$files $flat --steps 1500 --log-every 1"
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
    check "SIG$sig: stopped before the end, and says where" [ "${at:-1500}" -lt 1500 ]
    check "SIG$sig: saved that step" [ "$(meta sig/run.st step)" = "$at" ]
    good "SIG$sig, resumed" sig $stop
    check "SIG$sig: as the unbroken run, bit for bit" cmp unbroken/run.st sig/run.st
    events unbroken/log.jsonl >want; events sig/log.jsonl >got
    check "SIG$sig: the log as the unbroken run's" cmp want got
done

# =====================================================================================================================
section "loss that is not finite"

mkdir wild
wild="$tiny --data ../t.txt --checkpoint run.st --log log.jsonl --log-every 1 --optim sgd --grad-clip 0 --dropout 0 --schedule constant --weight-decay 0"
good "a good start" wild $wild --steps 5
run wild $wild --lr 1e6 --lr-warmup 0 --steps 5000 --save-every 1
check "ends with an error, not $rc" [ $rc -eq 1 ]
check "skipped updates are reported" grep -q 'step [0-9]*: the .* is not finite' out
check "the end says what to change" grep -q '50 .*--lr' err
check "the checkpoint's numbers are finite" finite wild/run.st
check "the checkpoint loads" loads wild/run.st
check "the log counts them" [ "$(events wild/log.jsonl | tail -n 1 | field skipped)" -ge 40 ]

# =====================================================================================================================
section "log and terminal"

mkdir log
learn="--data ../t.txt $tiny --hid-sz 32 --proj-sz 16 --dropout 0 --attn-dropout 0 --lr 0.03 --lr-warmup 10"
good "learns" log $learn --checkpoint run.st --best best.st --log log.jsonl --log-every 1 --tensorboard deep/tb --steps 300 --eval-every 50
cp out said
check "the log is JSON" json log/log.jsonl
train_keys=event,step,loss,bpb,lr,grad_norm,tokens_per_s,peak_bytes,skipped
check "keys of train" only_keys log/log.jsonl train $train_keys
check "keys of eval" only_keys log/log.jsonl eval event,split,loss,bpb,step,tokens
check "300 lines of train" [ "$(events log/log.jsonl | wc -l)" -eq 300 ]
check "evaluations at 50, 100, .. 300" [ "$(events log/log.jsonl eval | field step | tr '\n' ' ')" = "50 100 150 200 250 300 " ]
check "the loss falls" awk -v a="$(events log/log.jsonl | head -n 1 | field loss)" -v b="$(events log/log.jsonl | tail -n 1 | field loss)" 'BEGIN { exit !(a > 4 && a < 8 && b > 0 && b < 1) }'
check "progress" grep -q 'step 300/300 .*bpb.*tok/s' said
check "alpha at the end" grep -q '^learned weight of attention: .*(layer 1), .*(layer 2)$' said
f=$(ls log/deep/tb/events.out.tfevents.* 2>/dev/null)
check "one event file" [ -f "$f" ]
check "its records fit" [ "$(frames "$f")" -ge 900 ]
check "tags" grep -q 'train/loss' "$f"
check "tags of the evaluation" grep -q 'valid/bpb' "$f"
least=$(events log/log.jsonl eval | field loss | sort -g | head -n 1)
at=$(events log/log.jsonl eval | grep -F "\"loss\":$least," | head -n 1 | field step)
check "the best checkpoint is of the best evaluation, step $at" [ "$(meta log/best.st step)" = "$at" ]
good "the best, evaluated" log --data ../t.txt --checkpoint best.st --eval-only --log best.jsonl --threads 1
check "has that loss" [ "$(head -n 1 log/best.jsonl | field loss)" = "$least" ]
good "words" log --data ../w.txt $tiny --tokens words --adapt-io --adapt-io-divval 2 --adapt-io-cutoffs 5,12 --steps 20 --log words.jsonl --checkpoint words.st --log-every 5
check "keys of train for words" only_keys log/words.jsonl train "$(echo $train_keys | sed s/bpb/ppl/)"
check "keys of eval for words" only_keys log/words.jsonl eval event,split,loss,ppl,step,tokens

# =====================================================================================================================
section "evaluation"

mkdir eval
good "training without evaluation" eval --data ../t.txt $flat --steps 100 --checkpoint never.st --log never.jsonl --log-every 1
good "training with many evaluations" eval --data ../t.txt $flat --steps 100 --checkpoint often.st --eval-every 7 --eval-blocks 3 --log often.jsonl --log-every 1
check "14 evaluations and the last" [ "$(events eval/often.jsonl eval | wc -l)" -eq 15 ]
check "evaluating changes no bit of the training" same_state eval/never.st eval/often.st
events eval/never.jsonl >want; events eval/often.jsonl >got
check "evaluating changes no loss" cmp want got
cp eval/often.st keep.st
for i in 1 2; do
    good "evaluation only" eval --data ../t.txt --checkpoint often.st --eval-only --log only$i.jsonl --threads 1
    check "keys" only_keys eval/only$i.jsonl eval event,split,loss,bpb,step,tokens
    check "validation and test" [ "$(grep -o '"split":"[a-z]*"' eval/only$i.jsonl | tr '\n' ' ')" = '"split":"valid" "split":"test" ' ]
done
check "evaluation twice: the same" cmp eval/only1.jsonl eval/only2.jsonl
check "evaluation after training is that of the training's end" [ "$(head -n 1 eval/only1.jsonl | field loss)" = "$(events eval/never.jsonl eval | tail -n 1 | field loss)" ]
check "evaluation does not touch the checkpoint" cmp keep.st eval/often.st
good "a window of 5" eval --data ../t.txt --checkpoint often.st --eval-only --eval-unroll 5 --log short.jsonl --threads 1
check "another window, another loss" [ "$(head -n 1 eval/short.jsonl | field loss)" != "$(head -n 1 eval/only1.jsonl | field loss)" ]
check "... of as many tokens but for the streams" [ "$(head -n 1 eval/short.jsonl | field tokens)" -ge "$(head -n 1 eval/only1.jsonl | field tokens)" ]
good "a stream, a window of its own" eval --data ../t.txt $flat --steps 20 --checkpoint own.st --eval-unroll 40 --eval-batch-sz 1 --log own.jsonl
good "... which the checkpoint remembers" eval --data ../t.txt --checkpoint own.st --eval-only --eval-batch-sz 1 --log own2.jsonl --threads 1
check "the same loss" [ "$(events eval/own.jsonl eval | tail -n 1 | field loss)" = "$(head -n 1 eval/own2.jsonl | field loss)" ]
mkdir eval/three
head -c 3000 t.txt >eval/three/train.txt; tail -c 900 t.txt >eval/three/valid.txt; tail -c 500 t.txt >eval/three/test.txt
good "a directory of three texts" eval --data three $tiny --steps 20 --checkpoint three.st
good "a directory of three texts, evaluated" eval --data three --checkpoint three.st --eval-only --log three.jsonl --threads 1
check "both parts of it" [ "$(events eval/three.jsonl eval | wc -l)" -eq 2 ]

# =====================================================================================================================
section "generation and help"

sample() { # FILE OPTIONS...: 40 tokens, without data
    to=$1; shift
    run log --checkpoint run.st --no-train --generate 40 --threads 1 "$@"
    if [ $rc -eq 0 ] && [ -s out ]; then pass; else fail "--generate $*: exit code $rc: $(head -c 300 err)"; fi
    grep -v '^learned weight' out >"$to"
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
check "it learnt" grep -q 'the cat sat' g5
good "generation of words" log --checkpoint words.st --no-train --generate 10 --prompt "one two" --threads 1
check "words are words" grep -q '^one two ' out
good "training, then a text" log $learn --steps 20 --generate 10 --prompt "the"
check "the text at the end" grep -q '^the' out
good "sru" log --data ../t.txt $plain --steps 20 --generate 10 --prompt "the"
check "says nothing of attention" [ "$(grep -c 'attention' out)" -eq 0 ]

good "help" . --help
cp out help
check "nothing on standard error" [ ! -s err ]
check "says what is not reproduced" grep -q 'Not reproduced' help
header log/run.st | sed 's/.*"config":"{//; s/}","step".*//' | tr ',' '\n' | sed -n 's/^\\"\([a-z][a-z0-9-]*\)\\":.*/\1/p' >names
check "the options stand in the checkpoint" [ "$(wc -l <names)" -gt 70 ]
while read -r name; do check "help has --$name" grep -q -e "^ *--$name\( \|$\)" help; done <names
for preset in demo enwik8-base enwik8-large enwik8-large-8to1 enwik8-fp32 wt103-base wt103-large wt103-large-8to1 wt103-large-k5 lm1b-base lm1b-large-k5 \
    enwik8-sru enwik8-sru-8x1312 enwik8-sru-10x1152 enwik8-sru-8x3056 enwik8-sru-12x2048 ptb; do
    check "help has $preset" grep -q "^ *$preset " help
    good "--preset $preset" . --preset $preset --help
    check "--preset $preset shows its values" differ help out
done
for preset in enwik8-base enwik8-sru-8x3056; do good "$preset, of the smallest size" log --preset $preset $tiny --emb-sz 0 --data ../t.txt --steps 4; done
for preset in wt103-base lm1b-base; do good "$preset, of the smallest size" log --preset $preset $tiny --emb-sz 8 --adapt-io-divval 2 --adapt-io-cutoffs 5,12 --data ../w.txt --steps 4; done
good "ptb, of the smallest size" log --preset ptb $tiny --data ../w.txt --steps 4

section "end"
echo "$passed passed, $failed failed"
[ $failed -eq 0 ] && [ $passed -gt 0 ]
