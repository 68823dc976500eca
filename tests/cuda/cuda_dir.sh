#!/bin/sh
# cuda_dir.sh [NVCC] - prints the directory of the CUDA Toolkit that this nvcc belongs to;
# nothing if there is no such nvcc. Follows links: /usr/local/bin/nvcc can be a link to
# /usr/local/cuda/bin/nvcc, and the libraries are next to the latter. (readlink -f is not
# portable.)
nvcc=$(command -v "${1:-nvcc}" 2>/dev/null)
[ -n "$nvcc" ] || exit 0
links=0
while [ -L "$nvcc" ] && [ "$links" -lt 40 ]; do
    to=$(ls -ld "$nvcc" | sed 's/^.* -> //')
    case $to in
        /*) nvcc=$to ;;
        *) nvcc=$(dirname "$nvcc")/$to ;;
    esac
    links=$((links + 1))
done
cd -P "$(dirname "$nvcc")/.." 2>/dev/null && pwd -P
