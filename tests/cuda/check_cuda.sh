#!/bin/sh
# check_cuda.sh NAME... - runs the tests BUILD/cuda/test_cuda_NAME on a GPU, then some of
# them with the tools of compute-sanitizer if it is installed. Run by `make check-cuda`.
# BUILD is build unless the environment sets it.
# If there is a `timeout`, a test is stopped after CHECK_LIMIT seconds (half an hour),
# with a tool after CHECK_TOOL_LIMIT (two hours). Ends with "N passed, N failed".
cd "$(dirname "$0")/../.." || exit 1
passed=0 failed=0
dir=${BUILD:-build}/cuda
out=$dir/check-output.txt
limit=${CHECK_LIMIT:-1800}
# at_most SECONDS COMMAND...: exit code 124 or 137 at the limit
if command -v timeout >/dev/null 2>&1; then at_most() { timeout -k 60 "$@"; }
else at_most() { shift; "$@"; }; fi
run() {     # run NAME COMMAND...
    name=$1; shift
    at_most "$limit" "$@" > "$out" 2>&1
    code=$?
    p=$(sed -n 's/^\([0-9][0-9]*\) passed, \([0-9][0-9]*\) failed$/\1/p' "$out" | tail -n 1)
    f=$(sed -n 's/^\([0-9][0-9]*\) passed, \([0-9][0-9]*\) failed$/\2/p' "$out" | tail -n 1)
    if [ -z "$p" ] || { [ "$code" -ne 0 ] && [ "${f:-0}" -eq 0 ]; }; then f=$((${f:-0} + 1)); fi
    passed=$((passed + ${p:-0})) failed=$((failed + f))
    printf '%-36s %6d passed %4d failed\n' "$name" "${p:-0}" "$f"
    [ "$f" -eq 0 ] && return
    grep -v ' passed, ' "$out" | tail -n 40
    case $code in
        124|137) echo "($name was ended after $limit seconds: it hangs," \
            "or needs a larger CHECK_LIMIT or CHECK_TOOL_LIMIT)" ;;
        *) echo "($name ended with exit code $code)" ;;
    esac
}
command -v nvidia-smi >/dev/null 2>&1 &&
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
[ $# -gt 0 ] ||
    { echo "check_cuda.sh: which tests? (make check-cuda)"; echo "0 passed, 1 failed"; exit 1; }
for t in "$@"; do run "$t" "$dir/test_cuda_$t"; done
run trainer sh tests/trainers/trainer_cuda.sh attn_span "$dir/train_attn_span"
for f in sru compressive par; do
    run "trainer_$f" sh tests/trainers/trainer_cuda.sh "$f" "$dir/train_$f"
done
# check_by TOOL TEST [OPTION..]
check_by() {
    tool=$1 t=$2; shift 2
    run "$tool $t" compute-sanitizer --tool "$tool" "$@" \
        --error-exitcode 9 "$dir/test_cuda_$t" short
}
if command -v compute-sanitizer >/dev/null 2>&1; then
    limit=${CHECK_TOOL_LIMIT:-7200}
    for tool in memcheck racecheck synccheck; do
        for t in ops sru comp par gemm attention; do check_by "$tool" "$t"; done
    done
    # Only our kernels: those of cublasLt may read uninitialised workspace. Tools that do
    # not see the writes of excluded kernels would report all their results, so tests with
    # matmuls are skipped there.
    initcheck="ops sru attention"
    if compute-sanitizer --help 2>&1 | grep -q -- --initcheck-track-filtered-global-memory; then
        initcheck="$initcheck comp par"
    else
        echo "initcheck comp, par                  skipped:" \
            "compute-sanitizer of CUDA 13.5 or newer is needed"
    fi
    for t in $initcheck; do check_by initcheck "$t" --kernel-name kns=stx__; done
else
    echo "compute-sanitizer                    not installed: skipped"
fi
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
