#!/bin/sh
# run.sh - runs every test program that `make test` has built and adds up their last lines, "N passed, N failed".
cd "$(dirname "$0")/.." || exit 1
export ASAN_OPTIONS=allocator_may_return_null=1${ASAN_OPTIONS:+:$ASAN_OPTIONS}     # tests ask for too much on purpose
export OMP_WAIT_POLICY=passive     # tests are small: spinning threads would only be in each other's way
passed=0 failed=0
out=build/test-output.txt

run() {     # run NAME COMMAND...
    name=$1; shift
    start=$(date +%s)
    "$@" > "$out" 2>&1
    code=$?
    line=$(tail -n 1 "$out")
    p=$(printf '%s\n' "$line" | sed -n 's/^\([0-9][0-9]*\) passed, \([0-9][0-9]*\) failed.*$/\1/p')
    f=$(printf '%s\n' "$line" | sed -n 's/^\([0-9][0-9]*\) passed, \([0-9][0-9]*\) failed.*$/\2/p')
    if [ -z "$p" ] || { [ "$code" -ne 0 ] && [ "$f" -eq 0 ]; } || [ "$((p + f))" -eq 0 ]; then
        p=${p:-0} f=$((${f:-0} + 1))
    fi
    passed=$((passed + p)) failed=$((failed + f))
    printf '%-24s %6d passed %4d failed  %3ds\n' "$name" "$p" "$f" "$(($(date +%s) - start))"
    if [ "$f" -ne 0 ]; then
        grep -v ' passed, ' "$out" | tail -n 60
        echo "($name ended with exit code $code)"
    fi
}

# the slowest one, mostly compilers at work, beside the others
( sh tests/form.sh > build/form-output.txt 2>&1; echo $? > build/form-code.txt ) &
form=$!

run api            build/test_api
run io             build/test_io
run train.h        build/test_train_h
run golden_ops     build/test_golden_ops tests/golden
run golden_span    build/test_golden_span tests/golden
run span           build/test_span
run bf16           build/test_bf16
run sru            build/test_sru
run golden_sru     build/test_golden_sru tests/golden
run grad_f64       build/test_grad
run golden_ops_f64 build/test_golden_ops_f64 tests/golden
run golden_span_f64 build/test_golden_span_f64 tests/golden
run bf16_f64       build/test_bf16_f64
run sru_f64        build/test_sru_f64
run golden_sru_f64 build/test_golden_sru_f64 tests/golden
run api_san        build/test_api_san
run io_san         build/test_io_san
run span_san       build/test_span_san
run golden_ops_san build/test_golden_ops_san tests/golden
run golden_span_san build/test_golden_span_san tests/golden
run bf16_san       build/test_bf16_san
run sru_san        build/test_sru_san
run golden_sru_san build/test_golden_sru_san tests/golden
run fuzz_io_san    build/fuzz_io_san
run cuda_host      build/test_shim
run cuda_ops       build/test_cuda_ops
run cuda_sru       build/test_cuda_sru
run cuda_gemm      build/test_cuda_gemm
run cuda_attention build/test_cuda_attention
run cuda_golden_ops build/test_cuda_golden_ops tests/golden
run cuda_golden_span build/test_cuda_golden_span tests/golden
run cuda_golden_sru build/test_cuda_golden_sru tests/golden
run cuda_model     build/test_cuda_model
run cuda_host_san  build/test_shim_san
run cuda_ops_san   build/test_cuda_ops_san short
run cuda_sru_san   build/test_cuda_sru_san short
run cuda_gemm_san  build/test_cuda_gemm_san short
run cuda_attention_san build/test_cuda_attention_san short
run cuda_trainer   sh tests/trainer_cuda.sh build/train_shim
run cuda_trainer_sru sh tests/trainer_sru_cuda.sh build/train_sru_shim
if command -v "${NVCC:-nvcc}" >/dev/null 2>&1; then run cuda_nvcc sh tests/cuda_regs.sh; else echo "cuda_nvcc                skipped: no nvcc"; fi
run readme         sh tests/readme.sh
run flags          sh tests/flags.sh
run portability    sh tests/portability.sh
wait "$form"
run form           sh -c 'cat build/form-output.txt; exit "$(cat build/form-code.txt)"'
if sh tests/onednn.sh --probe; then run onednn sh tests/onednn.sh; else echo "onednn                   skipped: no dnnl.h, or no libdnnl (ONEDNN_FLAGS, ONEDNN_LIBS)"; fi
run trainer        sh tests/trainer.sh build/train_attn_span
run trainer_sru    sh tests/trainer_sru.sh build/train_sru
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
