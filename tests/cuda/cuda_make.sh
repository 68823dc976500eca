#!/bin/sh
# cuda_make.sh - tests `make cuda` and `make check-cuda` without a GPU and without a CUDA
# Toolkit: which libraries are linked and found, which programs are built, and how
# check_cuda.sh runs them. Substitutes for nvcc, the tests and compute-sanitizer are in a
# separate directory. Ends with "N passed, N failed".
cd "$(dirname "$0")/../.." || exit 1
work=$(mktemp -d "${TMPDIR:-/tmp}/seqtx-cuda-make.XXXXXX") || exit 1
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM
work=$(cd -P "$work" && pwd -P)
unset BUILD
passed=0 failed=0
check() {   # check WHAT COMMAND...
    what=$1; shift
    if "$@"; then passed=$((passed + 1)); return; fi
    failed=$((failed + 1))
    echo "tests/cuda/cuda_make.sh: FAILED: $what"
}
has() { grep -q -e "$1" "$2"; }
has_not() { ! grep -q -e "$1" "$2"; }

# a program from standard input
program() {
    mkdir -p "$(dirname "$1")"
    { echo '#!/bin/sh'; cat; } > "$1"
    chmod +x "$1"
}

# >>toolkit: nvcc is in toolkit/bin, and links to it are elsewhere
program "$work/the toolkit/bin/nvcc" <<'END'
case $1 in --list-gpu-code) echo sm_80; echo sm_90 ;; esac
END
ln -s "the toolkit" "$work/toolkit"
mkdir -p "$work/first" "$work/second" "$work/third"
ln -s ../toolkit/bin/nvcc "$work/first/nvcc"
ln -s "$work/first/nvcc" "$work/second/nvcc"
ln -s loop "$work/third/loop"
dir() { sh tests/cuda/cuda_dir.sh "$@"; }
check "the toolkit of nvcc itself" [ "$(dir "$work/the toolkit/bin/nvcc")" = "$work/the toolkit" ]
check "the toolkit of a link" [ "$(dir "$work/first/nvcc")" = "$work/the toolkit" ]
check "the toolkit of a link to a link" [ "$(dir "$work/second/nvcc")" = "$work/the toolkit" ]
check "the toolkit of an nvcc on the PATH" \
    [ "$(PATH=$work/second:$PATH; dir nvcc)" = "$work/the toolkit" ]
check "no toolkit" [ -z "$(dir "$work/no/nvcc")$(dir "$work/third/loop")" ]

# >>make: what it would do
rm "$work/toolkit" "$work/first/nvcc"
mv "$work/the toolkit" "$work/toolkit"
ln -s ../toolkit/bin/nvcc "$work/first/nvcc"
dry_run() {
    ${MAKE:-make} -n BUILD=build MAKEFLAGS= MAKELEVEL= T= NVCC="$work/second/nvcc" CUDA_ARCH=sm_90 \
        "$@" 2>&1;
}
dry_run cuda > "$work/cuda"
dry_run check-cuda > "$work/check"
dry_run cuda NCCL=1 NCCL_LIBS="-L/opt/nccl/lib -lnccl" > "$work/nccl"
check "make cuda links a trainer" has '-o build/cuda/train_attn_span ' "$work/cuda"
check "with the toolkit's libraries" \
    has "-o build/cuda/train_attn_span .*-L$work/toolkit/lib64 .*-lcublasLt" "$work/cuda"
check "and finds them when it runs" \
    has "-o build/cuda/train_attn_span .*-Wl,-rpath,$work/toolkit/lib64" "$work/cuda"
check "and NCCL's" has "-Wl,-rpath,/opt/nccl/lib .*-L/opt/nccl/lib -lnccl" "$work/nccl"
check "make cuda builds no tests" has_not 'build/cuda/test_cuda_' "$work/cuda"
check "make check-cuda builds the trainers" has '-o build/cuda/train_attn_span ' "$work/check"
check "and the tests" has '-o build/cuda/test_cuda_ops ' "$work/check"
check "and runs them" has 'tests/cuda/check_cuda.sh .*ops' "$work/check"

# >>check_cuda.sh, with a copy of it where its programs are
mkdir -p "$work/root/tests/cuda" "$work/root/tests/trainers" "$work/root/build/cuda"
cp tests/cuda/check_cuda.sh "$work/root/tests/cuda"
echo 'echo "2 passed, 0 failed"' > "$work/root/tests/trainers/trainer_cuda.sh"
for t in ops sru comp par gemm attention; do
    echo 'echo "1 passed, 0 failed"' | program "$work/root/build/cuda/test_cuda_$t"
done
mkdir -p "$work/none"
for tool in sh dirname sed tail grep rm cat timeout sleep; do
    at=$(command -v "$tool") && ln -s "$at" "$work/none/$tool"
done
run_checks() { PATH=$1 sh "$work/root/tests/cuda/check_cuda.sh" ops comp > "$work/log" 2>&1; }
ends_with() { [ "$(tail -n 1 "$work/log")" = "$1" ]; }
check "the tests, without compute-sanitizer" run_checks "$work/none"
check "their sum" ends_with "10 passed, 0 failed"
check "it is told that there is no compute-sanitizer" has "not installed: skipped" "$work/log"

# records its arguments and runs the program
program "$work/tools/compute-sanitizer" <<END
if [ "\$1" = --help ]; then cat "$work/help"; exit; fi
echo "\$@" >> "$work/calls"
while [ "\$1" != short ]; do prog=\$1; shift; done
"\$prog"
END
ln -s "$work"/none/* "$work/tools"
echo "  --kernel-name arg" > "$work/help"
: > "$work/calls"
check "under an older compute-sanitizer" run_checks "$work/tools"
check "their sum under three tools and initcheck" ends_with "31 passed, 0 failed"
check "memcheck looks at all kernels" \
    has "--tool memcheck --error-exitcode 9 build/cuda/test_cuda_gemm short" "$work/calls"
check "initcheck looks at our kernels" \
    has "--tool initcheck --kernel-name kns=stx__ --error-exitcode 9 .*_sru short" "$work/calls"
check "not at all, if cublasLt writes what they read" \
    has_not "initcheck .*test_cuda_comp" "$work/calls"
check "and this is told" has "initcheck comp, par.*skipped" "$work/log"
echo "  --initcheck-track-filtered-global-memory arg (=yes)" >> "$work/help"
check "under a newer compute-sanitizer" run_checks "$work/tools"
check "their sum under three tools and initcheck of all" ends_with "33 passed, 0 failed"
check "initcheck of what multiplies matrices" \
    has "initcheck --kernel-name kns=stx__ .*test_cuda_comp" "$work/calls"

# another BUILD
mv "$work/root/build" "$work/elsewhere"
BUILD=$work/elsewhere; export BUILD
check "the tests in another directory" run_checks "$work/none"
check "their sum is the same" ends_with "10 passed, 0 failed"
check "no directory is made in the tree" [ ! -e "$work/root/build" ]
unset BUILD
mv "$work/elsewhere" "$work/root/build"

# A test that hangs is stopped, and the others run.
if command -v timeout > /dev/null 2>&1; then
    echo 'sleep 100000' | program "$work/root/build/cuda/test_cuda_ops"
    export CHECK_LIMIT=10 CHECK_TOOL_LIMIT=10
    run_checks "$work/none"
    check "a test that hangs fails" [ $? -ne 0 ]
    check "and is named" has "ops was ended after 10 seconds" "$work/log"
    check "and the others pass" ends_with "9 passed, 1 failed"
fi
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
