#!/bin/sh
# nccl.sh - compiles SEQTX_NCCL with NCCL itself: seqtx_cuda.cu for sm_90 against nccl.h
# without a warning, and a trainer linked with it and libnccl that prints its --help. The
# behaviour is tested without NCCL (test_cuda_group.c with tests/cuda_host) and, on
# machines with several GPUs, by `make check-cuda NCCL=1`.
#   nccl.sh --probe   exits with 0 if there are nvcc and NCCL 2.14 or newer
# Environment: NVCC, CC; NCCL_FLAGS (-I..) and NCCL_LIBS (-L.. -lnccl) if NCCL is not in a
# standard place. Also finds nvidia-nccl of a Python (PYTHON).
cd "$(dirname "$0")/../.." || exit 1
nvcc=${NVCC:-nvcc}
work=$(mktemp -d "${TMPDIR:-/tmp}/seqtx-nccl.XXXXXX") || exit 1
trap 'rm -rf "$work"' EXIT
trap 'exit 1' INT TERM
command -v "$nvcc" > /dev/null 2>&1 || exit 1
lib=$(sh tests/cuda/cuda_dir.sh "$nvcc")/lib64
cat > "$work/probe.cu" <<'END'
#include <nccl.h>
#include <stdio.h>
#if NCCL_VERSION_CODE < NCCL_VERSION(2, 14, 0)
  #error "too old"
#endif
int main(void) { int v = 0; return ncclGetVersion(&v) != ncclSuccess || printf("%d\n", v) < 0; }
END
# probe FLAGS LIBS PATH
probe() {
    "$nvcc" -std=c++17 $1 "$work/probe.cu" -o "$work/probe" -L"$lib" $2 > /dev/null 2>&1 &&
        LD_LIBRARY_PATH=$3:$lib:$LD_LIBRARY_PATH "$work/probe" > "$work/version" 2>/dev/null
}
found=
if probe "$NCCL_FLAGS" "${NCCL_LIBS:--lnccl}" ''; then
    found=1 flags=$NCCL_FLAGS libs=${NCCL_LIBS:--lnccl} path=
fi
for python in ${PYTHON:-} python3 python; do
    [ -z "$found" ] || break
    at=$("$python" -c 'import nvidia.nccl as n; print(list(n.__path__)[0])' 2>/dev/null) || continue
    mkdir -p "$work/lib"
    ln -sf "$at/lib/libnccl.so.2" "$work/lib/libnccl.so"
    if probe "-I$at/include" "-L$work/lib -lnccl" "$at/lib"; then
        found=1 flags=-I$at/include libs="-L$work/lib -lnccl" path=$at/lib
    fi
done
if [ "$1" = --probe ]; then [ -n "$found" ]; exit; fi
[ -n "$found" ] || { echo "no nccl.h of NCCL 2.14 or newer: NCCL_FLAGS," \
    "NCCL_LIBS"; echo "0 passed, 1 failed"; exit 1; }

echo "NCCL $(cat "$work/version")"
passed=0 failed=0
check() {   # check WHAT COMMAND...
    what=$1; shift
    if "$@" > "$work/log" 2>&1; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        echo "tests/cuda/nccl.sh: FAILED: $what"
        head -n 20 "$work/log"
    fi
}
# what nvcc would optimise is the same without NCCL (tests/cuda/cuda_regs.sh)
check "nvcc compiles seqtx_cuda.cu" \
    "$nvcc" -std=c++17 -gencode arch=compute_90,code=compute_90 -Xcicc -O0 -DSEQTX_NCCL $flags \
    -Werror all-warnings -Xcompiler -Wall,-Wextra,-Werror -c seqtx_cuda.cu -o "$work/seqtx_cuda.o"
check "a trainer links with it" \
    ${CC:-cc} -std=c99 -DSEQTX_CUDA -DSEQTX_NCCL examples/train_attn_span.c "$work/seqtx_cuda.o" \
    -o "$work/train" -L"$lib" $libs \
    -lcublasLt -lcudart -lstdc++ -lm
check "and runs" \
    sh -c "LD_LIBRARY_PATH=$path:$lib:\$LD_LIBRARY_PATH '$work/train' --help all |
        grep -q -- --device"
check "and has NCCL in it" \
    sh -c "LD_LIBRARY_PATH=$path:$lib:\$LD_LIBRARY_PATH ldd '$work/train' | grep -q 'libnccl.*=> /'"
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
