#!/bin/sh
# check_cuda.sh NAME... - the tests build/cuda/test_cuda_NAME of the side of the GPU, on a GPU, then some once more under the tools of
# compute-sanitizer where it is installed. Run by `make check-cuda`. Ends with "N passed, N failed".
cd "$(dirname "$0")/.." || exit 1
passed=0 failed=0
out=build/cuda/check-output.txt
run() {     # run NAME COMMAND...
    name=$1; shift
    "$@" > "$out" 2>&1
    code=$?
    p=$(sed -n 's/^\([0-9][0-9]*\) passed, \([0-9][0-9]*\) failed$/\1/p' "$out" | tail -n 1)
    f=$(sed -n 's/^\([0-9][0-9]*\) passed, \([0-9][0-9]*\) failed$/\2/p' "$out" | tail -n 1)
    if [ -z "$p" ] || { [ "$code" -ne 0 ] && [ "${f:-0}" -eq 0 ]; }; then f=$((${f:-0} + 1)); fi
    passed=$((passed + ${p:-0})) failed=$((failed + f))
    printf '%-36s %6d passed %4d failed\n' "$name" "${p:-0}" "$f"
    [ "$f" -eq 0 ] || { grep -v ' passed, ' "$out" | tail -n 40; echo "($name ended with exit code $code)"; }
}
command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
[ $# -gt 0 ] || { echo "check_cuda.sh: which tests? (make check-cuda)"; echo "0 passed, 1 failed"; exit 1; }
for t in "$@"; do run "$t" "build/cuda/test_cuda_$t"; done
run trainer sh tests/trainer_cuda.sh attn_span build/cuda/train_attn_span
for f in sru compressive par; do run "trainer_$f" sh tests/trainer_cuda.sh "$f" "build/cuda/train_$f"; done
if command -v compute-sanitizer >/dev/null 2>&1; then
    for tool in memcheck racecheck synccheck; do
        for t in ops sru comp par gemm attention; do run "$tool $t" compute-sanitizer --tool "$tool" --error-exitcode 9 "build/cuda/test_cuda_$t" short; done
    done
    for t in ops sru comp par attention; do run "initcheck $t" compute-sanitizer --tool initcheck --error-exitcode 9 "build/cuda/test_cuda_$t" short; done   # cublas is not ours
else
    echo "compute-sanitizer                    not installed: skipped"
fi
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
