#!/bin/sh
# cuda_arch.sh NVCC ARCH... - checks that `make cuda` can build for these architectures.
# Prints what is missing and exits with 1 if it cannot.
nvcc=$1
shift
refuse() {
    echo "make cuda: $*" >&2
    exit 1
}
command -v "$nvcc" >/dev/null 2>&1 ||
    refuse "there is no nvcc (the CUDA Toolkit): install it, or give NVCC=/path/to/nvcc." \
        "Everything else builds without it."
[ $# -gt 0 ] ||
    refuse "for which GPU? CUDA_ARCH=sm_80 (A100), sm_86 (RTX 30), sm_89 (RTX 40, L4)," \
        'sm_90 (H100, H200), sm_100 (B200), .. or several: CUDA_ARCH="sm_80 sm_90"'
for a in "$@"; do
    n=${a#sm_}
    case $n in
    ''|*[!0-9]*) refuse "CUDA_ARCH=$a: expected sm_ and a number, as in sm_90" ;;
    esac
    [ "$n" -ge 80 ] ||
        refuse "CUDA_ARCH=$a: sm_80 or newer is required (bfloat16 tensor cores, cp.async)"
    known=$("$nvcc" --list-gpu-code 2>/dev/null)
    echo "$known" | grep -qx "$a" ||
        refuse "CUDA_ARCH=$a: this nvcc does not support it; it supports" $known
done
