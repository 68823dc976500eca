#!/bin/sh
# convert.sh - tests tools/convert.py: runs test_convert.py with a Python that has
# torch (PYTHON, or the first one found)
#   convert.sh --probe      exits with 0 if there is one
#   convert.sh [BUILD]      BUILD: directory of the trainers
cd "$(dirname "$0")/../.." || exit 1
. tests/limit.sh
for python in ${PYTHON:-} python3 python /usr/bin/python3; do
    command -v "$python" > /dev/null 2>&1 || continue
    "$python" -c 'import torch, numpy; assert "weights_only" in torch.load.__code__.co_varnames' > \
        /dev/null 2>&1 || continue
    [ "$1" = --probe ] && exit 0
    exec "$python" tests/io/test_convert.py "${1:-${BUILD:-build}}"
done
[ "$1" = --probe ] || echo "no Python with torch 1.13 or newer: set PYTHON"
exit 1
