#!/bin/sh
# trainer_cuda.sh FAMILY TRAINER - a trainer with --device cuda: the losses of the CPU,
# replays, checkpoints that change the device, refusals. TRAINER is built with CUDA, or
# with tests/cuda_host in its place; trainer_FAMILY.sh has the model. Ends with "N
# passed, N failed".
cd "$(dirname "$0")/../.." || exit 1
. "tests/trainers/trainer_$1.sh"
t=$2 d=$(mktemp -d) passed=0 failed=0
trap 'rm -rf "$d"' EXIT
check() { what=$1; shift; if "$@"; then passed=$((passed + 1)); else failed=$((failed + 1)); echo \
    "tests/trainers/trainer_cuda.sh: FAILED: $what"; fi; }
i=0
while [ $i -lt 400 ]; do
    echo "line $i of a text that a small model can learn, $((i * i % 97)) times"
    i=$((i + 1))
done > "$d/text"
model="--preset ${base_preset:-reference} $cuda_model --batch-sz 4 --block-sz 16 --log-every 1"
model="$model --eval-blocks 2 --threads 1"
more=$cuda_more
run() {
    name=$1
    shift
    "$t" --data "$d/text" $model $more "$@" --log "$d/$name.log" > "$d/$name.out" 2>&1
}
losses() {
    sed -n 's/.*"type":"train".*"loss":\([0-9.e+-]*\).*/\1/p
        s/.*"event":"train".*"loss":\([0-9.e+-]*\).*/\1/p' "$d/$1.log"
}
# the two logs have N losses each, and the relative difference of each pair is at most TOL
same() {
    losses "$1" > "$d/a"; losses "$2" > "$d/b"
    [ "$(wc -l < "$d/a")" -eq "$3" ] && [ "$(wc -l < "$d/b")" -eq "$3" ] && paste "$d/a" "$d/b" |
        awk -v tol="$4" '
            { e = ($1 - $2) / $1; if (e < 0) e = -e; if (!(e <= tol)) bad = 1 } END { exit bad }'
}
run cpu --steps 14
check "the CPU trains: $(tail -n 1 "$d/cpu.out")" grep -q "step 14" "$d/cpu.out"
run cuda --device cuda --steps 14
check "the GPU trains: $(tail -n 1 "$d/cuda.out")" grep -q "sm_" "$d/cuda.out"
check "the GPU has the losses of the CPU" same cpu cuda 14 1e-4
run plain --device cuda --no-graph --steps 14
check "replayed steps equal launched ones" same cuda plain 14 0
run split --device cuda --batch-split 2 --steps 6
run split_cpu --batch-split 2 --steps 6
check "a batch in two parts" same split_cpu split 6 1e-4
if [ -n "$cuda_note" ]; then      # steps that cannot be replayed: said once, and logged
    more=
    run note --device cuda $cuda_note
    more=$cuda_more
    check "the reason why steps are not replayed is printed once: $(cat "$d/note.out")" \
        [ "$(grep -c 'without a CUDA graph.*; not captured: the key' "$d/note.out")" -eq 1 ]
    check "the reason is in the log" \
        [ "$(grep -c '"event":"note","step":[0-9]*,"note":"not captured: the key' "$d/note.log")" \
        -eq 1 ]
    check "replayed steps: no message" \
        sh -c "! grep -q 'not captured' '$d/cuda.out' '$d/plain.out'"
fi
run half --device cuda --precision bf16 --steps 14
check "bf16 is close to float" same cpu half 14 5e-2
run first --steps 7 --checkpoint "$d/c" --generate 0
run second --device cuda --steps 14 --checkpoint "$d/c"
check "the GPU resumes from a checkpoint of the CPU: $(tail -n 1 "$d/second.out")" \
    [ "$(losses second | wc -l)" -eq 7 ]
losses cpu | tail -n 7 > "$d/x"; losses second > "$d/y"
check "the resumed run has the losses of the CPU" \
    sh -c "paste '$d/x' '$d/y' | awk '{ e = (\$1 - \$2) / \$1; if (e < 0) e = -e; if (!(e <= 1e-4)) bad = 1 }
        END { exit bad }'"
"$t" --data "$d/text" $model $more --checkpoint "$d/c" --eval-only > "$d/eval_cpu" 2>&1
"$t" --data "$d/text" $model $more --checkpoint "$d/c" --eval-only --device cuda \
    > "$d/eval_gpu" 2>&1
check "equal evaluations: $(grep valid "$d/eval_cpu"); $(grep valid "$d/eval_gpu")" \
    [ "$(grep -o 'valid bpb [0-9.]*' "$d/eval_cpu" | cut -c1-13)" \
    = "$(grep -o 'valid bpb [0-9.]*' "$d/eval_gpu" | cut -c1-13)" ]
sample="--no-train --generate 40 --temperature 0 --prompt line"
"$t" $model $more --checkpoint "$d/c" $sample > "$d/gen_cpu" 2>&1
"$t" $model $more --checkpoint "$d/c" $sample --device cuda > "$d/gen_gpu" 2>&1
check "both generate the same text" \
    sh -c "tail -n 1 '$d/gen_cpu' > '$d/x'; tail -n 1 '$d/gen_gpu' | cmp -s - '$d/x'"
"$t" --data "$d/text" $model $more --device cuda --gpu 77 --steps 1 > "$d/refused" 2>&1
check "no such GPU: $(cat "$d/refused")" grep -q -e "--gpu: expected .* got 77" "$d/refused"
"$t" --data "$d/text" $model $more --device cuda --max-memory 0.001 --steps 1 > "$d/refused" 2>&1
check "too little memory: $(cat "$d/refused")" grep -q -e "--max-memory" "$d/refused"
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
