#!/bin/sh
# cuda_arch.sh NVCC ARCH... - checks that `make cuda` can build for these architectures.
# Prints what is missing and exits with 1 if it cannot.
nvcc=$1
shift
command -v "$nvcc" >/dev/null 2>&1 || { echo "make cuda: there is no nvcc (the CUDA Toolkit):" \
    "install it, or give NVCC=/path/to/nvcc. Everything else builds without it." >&2; exit 1; }
[ $# -gt 0 ] || { echo \
    'make cuda: for which GPU? CUDA_ARCH=sm_80 (A100), sm_86 (RTX 30), sm_89 (RTX 40, L4), sm_90 (H100, H200), sm_100 (B200), .. or several: CUDA_ARCH="sm_80 sm_90"' >&2; exit 1; }
for a in "$@"; do
    n=${a#sm_}
    case $n in
    ''|*[!0-9]*) echo "make cuda: CUDA_ARCH=$a: want sm_ and a number, as sm_90" >&2; exit 1 ;;
    esac
    [ "$n" -ge 80 ] || { echo "make cuda: CUDA_ARCH=$a: sm_80 or newer is needed (bfloat16" \
        "tensor cores, cp.async)" >&2; exit 1; }
    "$nvcc" --list-gpu-code 2>/dev/null | grep -qx "$a" || { echo "make cuda: CUDA_ARCH=$a:" \
        "this nvcc does not know it; it knows $("$nvcc" --list-gpu-code 2>/dev/null |
        tr '\n' ' ')" >&2; exit 1; }
done
