#!/bin/sh
# group.sh - compares a trainer as MPI ranks with the same trainer in one process: equal
# values, repeatable bits, checkpoints for another number of ranks, signals, kills,
# failures of one rank, refusals.
#
#   group.sh FAMILY PROGRAM ALONE    PROGRAM: built with MPI; ALONE: built without it
#   group.sh --core PROGRAM          runs test_group.c as 1, 2 and 3 ranks; with
#                                    FULL=1, also as 4
#   TRAINER_SEED=1234 group.sh ..    repeats the random times of an earlier run
#
# Needs mpirun (MPIRUN), the usual small tools and a C compiler (${CC:-cc}, for
# group_cmp.c). Kills of a single rank need /proc; otherwise they are skipped, with
# a message. The last line is "N passed, N failed".

mpirun=${MPIRUN:-mpirun}
OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export OMPI_ALLOW_RUN_AS_ROOT OMPI_ALLOW_RUN_AS_ROOT_CONFIRM
# Open MPI needs flags for more ranks than processors, and to let ranks share them.
flags=
here=$(cd "$(dirname "$0")" && pwd)
. "$here/../limit.sh"
for f in --oversubscribe "--bind-to none"; do
    $limited $mpirun $f -np 1 true >/dev/null 2>&1 </dev/null && flags="$flags $f"
done

if [ "$1" = --core ]; then
    passed=0 failed=0
    for n in 1 2 3 ${FULL:+4}; do
        said=$($limited $mpirun $flags -np $n "$2" 2>&1 </dev/null)
        rc=$?
        line=$(printf '%s\n' "$said" | grep '^[0-9][0-9]* passed, [0-9][0-9]* failed')
        p=${line%% *} f=${line#*, } f=${f%% *}
        if [ "$(printf '%s\n' "$line" | grep -c .)" -ne 1 ] || [ "$p" -eq 0 ] ||
            { [ $rc -ne 0 ] && [ "$f" -eq 0 ]; }; then
            p=0 f=1
            echo "FAILED: $n ranks: exit code $rc, and not one line with what passed"
        fi
        [ "$f" -eq 0 ] || printf '%s\n' "$said" | tail -n 30
        passed=$((passed + p)) failed=$((failed + f))
    done
    echo "$passed passed, $failed failed"
    [ "$failed" -eq 0 ]
    exit
fi

family=$1
mpi=$2 bin=$3
case $mpi in /*) ;; *) mpi=$PWD/$mpi ;; esac
. "$here/trainer_lib.sh"
prog=train_$family
host=$(uname -n)
# the messages of Open MPI about a killed rank are known
openmpi=$($mpirun --version 2>/dev/null | grep -i 'open mpi\|openrte')

# ---- running ----

# mpirun ends its ranks on SIGTERM, but not when it is killed.
finish() {
    if [ -n "$running" ]; then
        kill "$running" 2>/dev/null
        wait "$running" 2>/dev/null
        running=
    fi
    cd / && rm -rf "$T"
}
# As in trainer_lib.sh, with $ranks ranks; 0: the build without MPI as one process. All
# processes of a run have GROUP_TEST in their environment.
run() { # DIR OPTIONS...
    dir=$1; shift
    if [ "$ranks" -eq 0 ]; then
        set -- "$bin" "$@"
    else
        set -- $mpirun $flags -np "$ranks" "$mpi" "$@"
    fi
    (cd "$dir" && GROUP_TEST=$T exec $limited "$@") >"$T/out" 2>"$T/err" </dev/null
    rc=$?
}
start() {
    dir=$1; shift
    (cd "$dir" && GROUP_TEST=$T exec $limited $mpirun $flags -np "$ranks" "$mpi" \
        "$@") >"$T/out" 2>"$T/err" </dev/null &
    running=$!
}
several() { # DIR ARGUMENTS of mpirun...: ranks whose options differ
    dir=$1; shift
    (cd "$dir" && GROUP_TEST=$T exec $limited $mpirun $flags "$@") >"$T/out" 2>"$T/err" </dev/null
    rc=$?
}
loads() { # the checkpoint, without MPI
    had=$ranks ranks=0
    run "${1%/*}" --checkpoint "${1##*/}" --no-train --threads 1
    ranks=$had
    [ $rc -eq 0 ]
}
processes() { grep -ls "GROUP_TEST=$T" /proc/[0-9]*/environ | sed 's|/environ||'; }
no_process() { [ -z "$(processes)" ]; }
nothing_left() { wait_until no_process; } # killed processes take a moment to end
pid_of() { # RANK: leaves $pid, or "" if there is no such rank
    pid=
    for p in $(processes); do
        tr '\0' '\n' <"$p/environ" 2>/dev/null | grep -qx \
            "\(OMPI_COMM_WORLD_RANK\|PMI_RANK\)=$1" &&
            case $(readlink "$p/exe") in "$mpi") pid=${p#/proc/};; esac
    done
}
has_ended() { ! kill -0 "$running" 2>/dev/null; }
wait_for() { # COMMAND...: until it succeeds, or the run has ended
    wait_until either "$@"
}
either() { "$@" || has_ended; }
has_rank() { pid_of "$1"; [ -n "$pid" ]; }
has_step() { grep -q '"event":"train"' "$1/log.jsonl" 2>/dev/null; }
procs=
[ -r /proc/self/environ ] && [ -e /proc/self/exe ] && procs=1
[ -n "$procs" ] || echo "  no /proc here: ranks are not killed one by one, nor stopped by signals"

# ---- checks ----

if ! ${CC:-cc} -std=c99 -O1 "$here/group_cmp.c" -o "$T/group_cmp" -lm; then
    part=start; fail "group_cmp.c does not compile"
    echo "$passed passed, $failed failed"; exit 1
fi
# N ranks and one process differ only in the order of sums. Measured in float: losses by
# 1e-7, the last bit; parameters by 6e-8 of the norm of the list; a tensor by 3e-6 of its
# largest element; states of streams and optimisers by 4e-6. The bounds are about ten
# times larger, because another processor sums in another order: losses and parameters
# 1e-6, a tensor 3e-5, states 1e-4. Real errors (no mean, other dropout, rows of other
# streams) change the losses of the first twenty steps by 1e-5 or more. No bound holds if
# rounding decides a branch: a ReLU whose input is zero except for rounding, or Adam with
# such a gradient. Runs of 200 steps therefore use models without ReLU and, except for
# SRU++, SGD. Models with ReLU, and Adam, run for twenty steps, never both.
like() { # WHAT A B: directories of runs
    if said=$("$T/group_cmp" 1e-6 1e-6 1e-4 "$2/run.st" "$3/run.st" "$2/log.jsonl" \
        "$3/log.jsonl"); then
        pass
    else
        fail "$1: $said"
    fi
    [ -z "$GROUP_SHOW" ] || echo "$1: $said"
}
same_bits() { check "$1: bit-exactly" cmp "$2/run.st" "$3/run.st"; }
whole_run() { # WHAT N DIR OPTIONS...: a new run of N ranks in DIR
    what=$1 ranks=$2 dir=$3; shift 3
    mkdir -p "$dir"
    good "$what, $ranks ranks" "$dir" $files "$@"
}
setting() { # NAME "N.." OPTIONS...: one process and N.. ranks, from the beginning
    name=$1 ns=$2; shift 2
    rm -rf s0 s1
    whole_run "$name" 0 s0 "$@"
    for n in $ns; do
        rm -rf s1
        whole_run "$name" $n s1 "$@"
        like "$name, $n ranks" s0 s1
    done
}

# Two texts that take a while to learn, yet are short enough for the streams to wrap:
# t.txt, and w.txt for --tokens words.
awk 'BEGIN { r = 1
    for (i = 0; i < 900; i++) {
        for (j = 0; j < 4; j++) {
            r = (r * 1103515 + 12345) % 2147483648; printf "%c", 97 + int(r / 65536) % 13
            if (j == 1 && int(r / 1048576) % 2) break
        }
        printf i % 7 ? " " : "\n"
    } }' >t.txt
awk 'BEGIN { r = 1
    for (i = 0; i < 4000; i++) {
        r = (r * 1103515 + 12345) % 2147483648
        printf "w%d%s", int(sqrt(int(r / 65536) % 400)), i % 9 ? " " : "\n"
    }
}' >w.txt
files="--data ../t.txt --checkpoint run.st --log log.jsonl"
words="--data ../w.txt --tokens words --min-count 1"
batch="--batch-sz 12 --threads 1 --log-every 1 --schedule constant"
short="--steps 20 --eval-every 0 --save-every 0"
# evaluations whose streams cannot be divided evenly among the ranks
long="--steps 200 --eval-every 50 --eval-batch-sz 5 --eval-blocks 3 --save-every 20 --best best.st"
case $family in
attn_span)
    short="--steps 20"
    model="--preset reference --nlayers 2 --hid-sz 32 --nheads 2 --attn-span 32 --block-sz 16"
    model="$model --dropout 0.2 --emb-dropout 0.1 $batch"
    spans="--adapt-span --adapt-span-loss 0.0001 --adapt-span-init 0.5 --adapt-span-ramp 8"
    smooth="--pers-mem-size 16 --inner-hid-sz 1"
    trained="$spans $smooth --optim sgd --lr 0.03 --grad-clip 0.3"
    ;;
sru)
    short="--steps 20"
    model="--preset reference --nlayers 2 --hid-sz 32 --proj-sz 16 --nheads 2 --block-sz 16"
    model="$model --dropout 0.2 --attn-dropout 0.1 $batch"
    trained="--lr 0.003 --weight-decay 0.01"
    ;;
compressive)
    model="--preset reference --nlayers 2 --hid-sz 32 --inner-hid-sz 64 --nheads 2 --block-sz 16"
    model="$model --mem 16 --cmem 8 --memory-layers all --gate residual --batch-split 1"
    model="$model --random-segments 0 --sample-every 0 --dropout 0.2 $batch"
    trained="--optim sgd --lr 0.02"
    ;;
par)
    model="--preset demo --nlayers 4 --hid-sz 32 --inner-hid-sz 64 --nheads 2 --block-sz 16"
    model="$model --mem 16 --batch-split 1 --sample-every 0 --dropout 0.2 --attn-dropout 0.1 $batch"
    trained="--pattern ssss --optim sgd --lr 0.03"
    search="--latency-table 2,1 --tau-steps 100 --arch-from 5"
    ;;
*)
    part=start; fail "no family $family"
    echo "$passed passed, $failed failed"; exit 1 ;;
esac
options="$model $trained $long"

# ========================================================================================
section "equal numbers"

whole_run "200 steps" 0 one $options
for n in 2 3 4; do
    whole_run "200 steps" $n "n$n" $options
    like "200 steps, $n ranks" one "n$n"
done
check "the log has each step once" \
    [ "$(steps_of n4/log.jsonl | tr '\n' ' ')" \
    = "$(awk 'BEGIN { for (i = 1; i <= 200; i++) printf "%d ", i }')" ]
check "the log has 4 evaluations" [ "$(events n4/log.jsonl eval | wc -l)" -eq 4 ]
check "the best of three ranks and of one process" \
    "$T/group_cmp" 1e-6 1e-6 1e-4 one/best.st n3/best.st one/log.jsonl n3/log.jsonl
whole_run "again" 4 again $options
same_bits "4 ranks again" n4 again
check "the best repeats bit-exactly" cmp n4/best.st again/best.st
whole_run "--shard" 3 shard $options --shard
same_bits "--shard, 3 ranks" n3 shard
# Two ranks compute the bits of one process with two parts.
tensors() { header "$1" | grep -o '"[^"]*":{"dtype"' | sed 's/":{.*//; s/"//'; }
same_tensors() { # A B: checkpoints; all tensors except the states of streams
    for name in $(tensors "$1" | grep -v '^state\.\|memory\.'); do
        bytes_of "$1" "$name" >bytes1 && bytes_of "$2" "$name" >bytes2 || return 1
        [ -s bytes1 ] && cmp bytes1 bytes2 || return 1
    done
}
whole_run "--batch-split 2" 0 parts $model $trained $short --batch-split 2
whole_run "--batch-split 1" 2 shares $model $trained $short --batch-split 1
# A group's losses of targets that may be ignored are weighted sums, not means: the last
# digits of the loss can differ, but not its gradient.
case $family in
compressive | par) unequal='s/"loss":[^,]*,"bpb":[^,]*,//; s/"ratio":.*//' ;;
*) unequal= ;;
esac
for d in parts shares; do events $d/log.jsonl | sed "$unequal" >$d.events; done
check "2 ranks have the losses and gradients of 2 parts" cmp parts.events shares.events
check "2 ranks have the parameters of 2 parts" same_tensors parts/run.st shares/run.st
# Output is printed once, as by one process: the same lines, except for times and one line
# with the number of ranks.
cp -R n2 end2; cp -R one end1
ranks=2; run end2 $files $options
check "a run that is complete" [ $rc -eq 0 ]
check "the result is printed once" [ "$(grep -c '^step 200: valid' out)" -eq 1 ]
check "the sizes are printed once" [ "$(grep -c 'parameters, vocabulary' err)" -eq 1 ]
check "the number of ranks is printed once" [ "$(grep -c '^2 ranks; this is rank 0$' err)" -eq 1 ]
cp out out2; ranks=0; run end1 $files $options
check "the results are those of one process" cmp out out2

# rank 0 measures the time, and all ranks follow its plan
timed="$model $trained --eval-every 0 --eval-batch-sz 5"
whole_run "--minutes" 2 timed $timed --minutes 0.02
whole_run "--plan" 2 planned $timed --plan "$(meta timed/run.st plan)"
check "two ranks repeat a run of a given time" same_state timed/run.st planned/run.st

case $family in
attn_span)
    setting "ReLU" "3" $model $short --inner-hid-sz 32 --no-adapt-span --optim sgd --lr 0.01
    setting "Adam" "2" $model $short $spans $smooth --optim adam --lr 0.003
    setting "Adagrad" "4" $model $short $spans $smooth --optim adagrad --lr 0.03
    setting "words" "3" $model $short $smooth $words --adapt-io --adapt-io-divval 2 \
        --adapt-io-cutoffs 5,12 --optim sgd --lr 0.03
    setting "--batch-split 2" "2 3" $model $short $spans $smooth --optim sgd --lr 0.03 \
        --batch-split 2
    setting "groups of streams" "2" $model $short $spans $smooth --optim sgd --lr 0.03 \
        --streams 36
    ;;
sru)
    setting "SRU by Adam" "3" $model $short --cell sru --nheads 1 --attn-dropout 0 \
        --rnn-dropout 0.1 --optim adam --lr 0.003
    setting "words" "2" $model $short $words --emb-dropout 0.2 --adapt-io --adapt-io-divval 2 \
        --adapt-io-cutoffs 5,12 --optim sgd --lr 0.03 --lr-warmup 0
    setting "--update-param-freq 2" "2" $model $short --lr 0.01 --lr-warmup 5 --update-param-freq 2
    setting "--batch-split 2" "2 3" $model $short --lr 0.01 --lr-warmup 5 --batch-split 2
    ;;
compressive)
    setting "Adam" "3" $model $short --optim adam --lr 0.001
    setting "random pieces" "4" $model $short $trained --random-segments 4
    setting "--batch-split 2" "2 3" $model $short $trained --batch-split 2
    ;;
par)
    setting "ReLU" "3" $model $short --pattern sfsf --optim sgd --lr 0.01
    setting "words" "2" $model $short $words --pattern sss --words-out adaptive --adaptive-in \
        --tied --tie-projs all --cutoffs 5,12 --div-val 2 --optim sgd --lr 0.03
    setting "--batch-split 2" "2 3" $model $short $trained --batch-split 2
    setting "a search with a separate text" "2 3" $model $short $search --optim sgd --lr 0.01 \
        --arch-share 0.2 --arch-every 3 --noise sequence
    rm -rf shard
    whole_run "a search with --shard" 3 shard $model $short $search --optim sgd --lr 0.01 \
        --arch-share 0.2 --arch-every 3 --noise sequence --shard
    same_bits "a search with --shard, 3 ranks" s1 shard
    setting "noise for pieces of each stream" "2" $model --steps 20 --eval-every 10 \
        --eval-batch-sz 5 --eval-blocks 3 $search --optim sgd --lr 0.01 --noise tokens \
        --noise-tokens 5 --gate-eval noise --latency add --latency-of w
    ranks=2
    run . $model $search --data t.txt --steps 2 --noise sequence --latency hinge \
        --latency-target 0.6 --latency-of w
    check "a latency of separate draws per stream is refused" [ $rc -eq 2 ]
    check "the message has the reason" \
        [ "$(grep -c 'rank 0 of 2.*--latency-of p or --noise step' err)" -eq 1 ]
    ;;
esac

# ========================================================================================
section "resuming"

whole_run "to step 100" 4 first $options --steps 100
check "100 steps differ from 200" differ first/run.st n4/run.st
cp -R first then4; cp -R first then1
whole_run "4 ranks, then 2" 2 first $options
like "4 ranks, then 2" one first
whole_run "4 ranks, then 4" 4 then4 $options
same_bits "4 ranks, then 4" n4 then4
whole_run "4 ranks, then one process" 0 then1 $options
like "4 ranks, then one process" one then1
whole_run "one process" 0 then3 $options --steps 100
whole_run "one process, then 3 ranks" 3 then3 $options
like "one process, then 3 ranks" one then3

case $family in
compressive | par)
    # twenty updates of three steps each, saved after steps 10, 20, 30 .., but not between
    # two updates
    held="$model $trained --update-every 3 --steps 60 --save-every 10 --eval-every 0"
    whole_run "--update-every 3" 0 u0 $held
    whole_run "--update-every 3" 2 u2 $held
    like "--update-every 3, 2 ranks" u0 u2
    # A run that ends between two updates saves the mean of the gradients of all ranks.
    whole_run "31 steps" 2 u31 $held --steps 31
    check "step 31: the gradient of one step is stored" \
        [ "$(meta u31/run.st step) $(meta u31/run.st grads.pending)" = "31 1" ]
    whole_run "31 steps" 0 u31one $held --steps 31
    like "gradients that wait" u31one u31
    cp -R u31 u31b
    whole_run "from step 31" 3 u31 $held
    whole_run "from step 31" 0 u31b $held
    for d in u0 u31 u31b; do
        events $d/log.jsonl >lines
        cp lines $d/log.jsonl
    done      # the first ended with an evaluation
    like "2 ranks to step 31, then 3" u0 u31
    like "2 ranks to step 31, then one process" u0 u31b
    ;;
esac

for n in "0 --eval-batch-sz 5" "3 --eval-batch-sz 5" "0 --eval-batch-sz 2" "3 --eval-batch-sz 2"; do
    ranks=${n%% *}
    good "--eval-only, $n" one --checkpoint run.st --data ../t.txt --eval-only --threads 1 ${n#* }
    cp out "eval.$ranks"
    check "--eval-only prints results" grep -q '^step 200: test' out
    [ "$ranks" -eq 0 ] || check "--eval-only $n: the output of one process" cmp eval.0 eval.3
done

# ========================================================================================
section "signals"

# SIGNAL N DIR OPTIONS..: sends SIGNAL to rank N - 1 during training; leaves $rc
stop_one() {
    sig=$1 ranks=$2 dir=$3; shift 3
    tries=0 rc=0
    while [ $rc -eq 0 ] && [ $tries -lt 100 ]; do
        tries=$((tries + 1))
        rm -rf "$dir"; mkdir "$dir"
        start "$dir" $files "$@"
        wait_for has_step "$dir"
        pid_of $((ranks - 1))
        [ -n "$pid" ] && kill -"$sig" "$pid" 2>/dev/null
        collect
    done
}
if [ -n "$procs" ]; then
    stop_one TERM 3 stop $options
    check "SIGTERM to rank 2: exit code 143, got $rc" [ $rc -eq 143 ]
    check "the signal is reported once" \
        [ "$(grep -c '^stopped at step [0-9]*; the checkpoint is saved' err)" -eq 1 ]
    check "the run was interrupted" [ "$(meta stop/run.st step)" -lt 200 ]
    check "no process is left" nothing_left
    check "no temporary file" [ "$(tmps stop)" -eq 0 ]
    whole_run "SIGTERM, then on" 3 stop $options
    same_bits "SIGTERM, then on" n3 stop
    stop_one USR1 2 stop $options
    check "SIGUSR1 to rank 1: exit code 138, got $rc" [ $rc -eq 138 ]
    whole_run "SIGUSR1, then on" 2 stop $options
    same_bits "SIGUSR1, then on" n2 stop
    case $family in
    compressive | par)
        held="$model $trained --update-every 50 --steps 600 --save-every 20 --eval-every 0"
        stop_one TERM 2 stop $held
        step=$(meta stop/run.st step)
        check "SIGTERM between two updates: saved after an update, got step $step" \
            [ $rc -eq 143 -a $((step % 50)) -eq 0 ]
        more=$((step + 30))
        whole_run "then on to step $more" 2 stop $held --steps $more
        rm -rf unbroken
        whole_run "$more steps" 2 unbroken $held --steps $more
        same_bits "$more steps" unbroken stop
        rm -rf stop; mkdir stop
        start stop $files $held
        wait_for [ -e stop/run.st ]
        pid_of 1; kill -9 "$pid" 2>/dev/null; collect
        check "a save between two updates waits for the next" \
            [ $(($(meta stop/run.st step) % 50)) -eq 0 ]
        ;;
    esac
fi

# ========================================================================================
section "kill -9"

ln -s n3 whole      # what `continued` compares with
i=0
while [ -n "$procs" ] && [ $i -lt 5 ]; do
    i=$((i + 1)); roll
    ranks=3 r=$((rand % 3)) tries=0 rc=0
    roll
    while [ $rc -eq 0 ] && [ $tries -lt 100 ]; do # again, and sooner, where the run had ended
        rm -rf kill; mkdir kill
        start kill $files $options
        wait_for has_rank $r; victim=$pid
        ms=$((rand / 10 / (1 + tries))) tries=$((tries + 1))
        nap $ms
        kill -9 "$victim" 2>/dev/null
        collect
    done
    where="kill $i, of rank $r after $ms ms"
    check "$where: the run ends by itself with an error: $rc" [ $rc -ne 0 -a $rc -ne 124 ]
    [ -z "$openmpi" ] ||
        check "$where: the message has rank and host" grep -q "rank $r .*${host%%.*}" err
    check "$where: no process is left" nothing_left
    rm -f kill/best.st.*.tmp
    continued "$where" kill $files $options
done

# ========================================================================================
section "one rank fails"

# a full disk on rank 0 of 2 when it saves, from step 100 on
if ${CC:-cc} -shared -fPIC "$here/trainer_kill.c" -o "$T/kill.so" -ldl >/dev/null 2>&1; then
    mkdir full; whole_run "to step 100" 2 full $options --steps 100
    cp full/run.st good.st
    several full -np 1 env LD_PRELOAD="$T/kill.so" TRAINER_FILE=run.st TRAINER_FULL_AT=1 "$mpi" \
        $files $options : -np 1 "$mpi" $files $options
    check "a full disk: exit code 1, got $rc" [ $rc -eq 1 ]
    check "one message with rank, host and reason" \
        [ "$(grep -c "^$prog: rank 0 of 2, on $host: .*run.st.*: No space left" err)" -eq 1 ]
    check "the old checkpoint is unchanged" cmp full/run.st good.st
    check "no temporary file" [ "$(tmps full)" -eq 0 ]
    [ -z "$procs" ] || check "no process is left" nothing_left
    whole_run "then on" 2 full $options
    same_bits "a full disk, then on" n2 full
fi
# enough memory for training, but not for the evaluation after step 20, on rank 1 of 2
case $family in
attn_span)
    for copy in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16; do cat w.txt; done >long.txt
    # Memory is allocated in megabytes.
    hungry="$model $trained --data ../long.txt --steps 40 --eval-every 20 --eval-batch-sz 400"
    hungry="$hungry --save-every 10"
    whole_run "memory" 2 memory $hungry
    between=$(grep '"event":"train"' memory/log.jsonl | awk -F '"peak_bytes":' '
        { split($2, b, /[,}]/); p[NR] = b[1] }
        END { if (p[21] > 1.1 * p[20]) printf "%.9f", (p[20] + p[21]) / 2 / 1073741824 }')
    check "the evaluation needs more memory than a step" [ -n "$between" ]
    rm -rf memory; mkdir memory
    several memory -np 1 "$mpi" $files $hungry : -np 1 "$mpi" $files $hungry --max-memory "$between"
    check "an evaluation that fails at one rank: exit code 1, got $rc" [ $rc -eq 1 ]
    check "the message has rank, host and the option" \
        [ "$(grep -c "^$prog: rank 1 of 2, on $host: .*--max-memory" err)" -eq 1 ]
    check "no other rank prints a message" [ "$(grep -c "^$prog: rank" err)" -eq 1 ]
    check "the checkpoint before it is valid" loads memory/run.st
    check "it is of step 10" [ "$(meta memory/run.st step)" -eq 10 ]
    [ -z "$procs" ] || check "no process is left" nothing_left
    ;;
esac

# ========================================================================================
# identical in all families
if [ "$family" = attn_span ]; then
section "refusals"

# PATTERN TIMES ARGUMENTS of mpirun..: expects exit code 2, TIMES lines of the program with
# PATTERN, no file in `no`
not_so() {
    pattern=$1 times=$2; shift 2
    rm -rf no; mkdir no
    [ -z "$kept" ] || cp "$kept" no/run.st
    find no >"$T/before"
    several no "$@"
    check "$pattern: exit code 2, got $rc" [ $rc -eq 2 ]
    n=$(grep -c "^$prog: " err)
    check "$pattern: $times lines of the program, got $n" [ "$n" -eq "$times" ]
    if grep -q "^$prog: .*$pattern" err; then
        pass
    else
        fail "the message does not have '$pattern': $(grep "^$prog" err | head -n 3)"
    fi
    find no >"$T/after"
    check "$pattern: nothing is written" cmp "$T/before" "$T/after"
    check "$pattern: nothing on standard output" [ "$(grep -c . out)" -eq 0 ]
}
kept=
all="$files $options"
tr a b <t.txt >other.txt
not_so "rank 1 of 2, on $host: --lr is 0.02 here, but 0.03 on rank 0" 1 -np 1 "$mpi" $all : -np 1 \
    "$mpi" $all --lr 0.02
not_so "rank 1 of 3, on $host: --dropout is 0.1 here, but 0.2 on rank 0" 1 -np 1 "$mpi" $all : \
    -np 1 "$mpi" $all --dropout 0.1 : -np 1 "$mpi" $all
not_so "rank 1 of 2, on $host: training text is .* tokens, .* here, but .* on rank 0" 1 -np 1 \
    "$mpi" $all : -np 1 "$mpi" $all --data ../other.txt
kept=first/run.st
not_so "rank 1 of 2, on $host: checkpoint is step 0 here, but step 200 on rank 0" 1 -np 1 "$mpi" \
    $all --steps 300 : -np 1 "$mpi" $all --steps 300 --checkpoint other.st
kept=
not_so "rank 0 of 5, on $host: 5 ranks .*12.*--batch-sz" 1 -np 5 "$mpi" $all
not_so "rank 0 of 4, on $host: 4 ranks .*6.*--batch-split" 1 -np 4 "$mpi" $all --batch-split 2
not_so "rank 1 of 2, on $host: --shard is yes here, but no on rank 0" 1 -np 1 "$mpi" $all : -np 1 \
    "$mpi" $all --shard
other="task is neither training nor evaluation here, but training on rank 0"
not_so "rank 1 of 2, on $host: $other" 1 -np 1 "$mpi" $all : -np 1 "$mpi" $all --no-train
not_so "rank 1 of 2, on $host: $other" 1 -np 1 "$mpi" $all : -np 1 "$mpi" --help
not_so "rank 1 of 2, on $host: --checkpoint is none here, but given on rank 0" 1 -np 1 "$mpi" \
    $all : -np 1 "$mpi" $options --data ../t.txt
not_so "no-such-option" 1 -np 3 "$mpi" $all --no-such-option
not_so "rank 1 of 2, on $host: .*no-such-option" 1 -np 1 "$mpi" $all : -np 1 "$mpi" $all \
    --no-such-option
not_so "[A-Z]_SIZE is 2, .*make MPI=1" 1 -np 2 "$bin" $all

section "options of the file"
# These need another context than the open one.
rm -rf seeded; mkdir seeded
ranks=2
good "another seed" seeded $all --seed 3 --steps 5
good "another seed: resumes from its checkpoint alone, all ranks end with 0" seeded \
    --checkpoint run.st --steps 10 --threads 1
section "printed once"

ranks=3
good "--version" . --version
check "--version once" [ "$(grep -c "^$prog, seqtx" out)" -eq 1 ]
good "--dry-run" . --dry-run --data t.txt $options
check "--dry-run once" [ "$(grep -c '^[0-9]* parameters' out)" -eq 1 ]
good "--help" . --help all
check "--help once" [ "$(grep -c -e '^  --batch-sz' out)" -eq 1 ]
good "--list-presets" . --list-presets
check "--list-presets once" [ "$(grep -c '^reference' out)" -eq 1 ]
good "--score" one --checkpoint run.st --score ../t.txt --score-by lines --threads 1
cp out score.3; ranks=0
good "--score" one --checkpoint run.st --score ../t.txt --score-by lines --threads 1
check "--score once" cmp out score.3
ranks=2
good "--generate" one --checkpoint run.st --no-train --generate 20 --temperature 0 --prompt a \
    --threads 1
cp out generated.2; ranks=0
good "--generate" one --checkpoint run.st --no-train --generate 20 --temperature 0 --prompt a \
    --threads 1
check "--generate once" cmp out generated.2
fi

section end
echo "$passed passed, $failed failed"
[ $failed -eq 0 ]
