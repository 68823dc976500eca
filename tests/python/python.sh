#!/bin/sh
# python.sh - tests the Python module: builds its wheel, installs it with pip in a virtual
# environment, and runs test_seqtx.py and the examples of docs/python.md
#   python.sh --probe       exits with 0 if there is a Python 3.8 with numpy, venv and pip
#   python.sh               BUILD: directory of the trainers (default: build)
# PYTHON: a Python. Nothing is downloaded.
cd "$(dirname "$0")/../.." || exit 1
root=$(pwd)
. tests/limit.sh
python=
for p in ${PYTHON:-} python3 /usr/bin/python3; do
    "$p" -c 'import sys, numpy, venv, ensurepip; assert sys.version_info >= (3, 8)' \
        > /dev/null 2>&1 && python=$p && break
done
[ "$1" != --probe ] || { [ -n "$python" ]; exit; }
[ -n "$python" ] || { echo "no Python 3.8 with numpy, venv and pip: set PYTHON"; exit 1; }

build=${BUILD:-build}
case $build in /*) ;; *) build=$root/$build ;; esac
unset BUILD MAKEFLAGS MAKELEVEL MFLAGS CFLAGS CPPFLAGS LDFLAGS
unset SEQTX_LIBRARY SEQTX_INCLUDE PYTHONPATH PYTHONHOME
export PYTHONDONTWRITEBYTECODE=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INDEX=1
CC=${CC:-cc}
export CC CFLAGS=-O0    # compiles in a tenth of the time, and has the bits of the trainers' -O3
work=$(mktemp -d "${TMPDIR:-/tmp}/seqtx-py.XXXXXX") || exit 1
[ -n "$KEEP" ] || trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM
passed=0 failed=0
check() { # WHAT COMMAND
    if (cd "$work" && eval "$2") > "$work/log" 2>&1; then passed=$((passed + 1)); return; fi
    failed=$((failed + 1))
    echo "FAILED $1"
    tail -n 12 "$work/log"
}
add() { # LINE "N passed, N failed"
    p=$(echo "$1" | sed -n 's/^\([0-9]*\) passed, [0-9]* failed$/\1/p')
    f=$(echo "$1" | sed -n 's/^[0-9]* passed, \([0-9]*\) failed$/\1/p')
    passed=$((passed + ${p:-0})) failed=$((failed + ${f:-1}))
}

# what a wheel is built from, and nothing else
mkdir -p "$work/tree/docs" "$work/tree/python/seqtx"
cp pyproject.toml LICENSE seqtx*.h "$work/tree"
cp docs/python.md "$work/tree/docs"
cp python/seqtx_build.py "$work/tree/python"
cp python/seqtx/*.py python/seqtx/py.typed "$work/tree/python/seqtx"
cp -R "$work/tree" "$work/copy"

check "a virtual environment" "$python -m venv --system-site-packages env"
venv=$work/env/bin/python
check "a wheel" "$limited $venv -m pip wheel --no-deps -w wheels ./tree"
check "one for this platform and any Python" "ls wheels && [ \$(ls wheels | wc -l) = 1 ] &&
    ls wheels/seqtx-*-py3-none-linux_*.whl wheels/seqtx-*-py3-none-*[0-9].whl"
check "the source tree is unchanged" "diff -r copy tree"
check "pip install" "$venv -m pip install --no-deps wheels/*.whl &&
    $venv -m pip show -f seqtx > shown && grep -q 'seqtx/py.typed' shown &&
    grep -q '^Requires: numpy' shown"
check "the installed module" "$venv -c 'import seqtx; print(seqtx.__version__, seqtx.__file__)' |
    grep -q '^[0-9.]* $work/env/'"
# the backend, called as by PEP 517
check "a source archive has what a wheel needs" "cd tree && PYTHONPATH=python $venv -c '
import seqtx_build, tarfile
name = seqtx_build.build_sdist(\"$work\")
tarfile.open(\"$work/\" + name).extractall(\"$work/sdist\")
' && mv ../sdist/seqtx-*/PKG-INFO .. && diff -r ../sdist/seqtx-* ../copy"
requires="$venv -c 'import seqtx_build; print(seqtx_build.get_requires_for_build_wheel())'"
check "with a compiler, the build requires nothing" "cd tree/python && $requires | grep -Fx '[]'"
check "without a compiler, it requires ziglang" "cd tree/python && mkdir $work/none && unset CC &&
    PATH=$work/none $requires | grep -Fx \"['ziglang']\""
check "without either, the error says what to do" "cd tree/python && unset CC &&
    PATH=$work/none $venv -c 'import seqtx_build; seqtx_build.compile_library(\"x\")' 2>&1 |
        grep -q 'install one, name it with CC, or .pip install ziglang'"

limits="$limited $venv $root/tests/python/test_seqtx.py $build"
(cd "$work" && $limits) > "$work/tests" 2>&1
grep -v ' passed, ' "$work/tests"
add "$(tail -n 1 "$work/tests")"

# docs/python.md: the examples, in order, in one directory
mkdir "$work/docs"
head -n 100 README.md > "$work/docs/my.txt"
check "a checkpoint for the examples" "$build/train_attn_span --data docs/my.txt --steps 3 \
    --checkpoint docs/run.safetensors --threads 1"
awk -v to="$work/docs/" '
    /^```python$/ { n++; file = to n ".py"; next }
    /^```/ { file = "" }
    file { print > file }' docs/python.md
n=1
while [ -f "$work/docs/$n.py" ]; do
    check "example $n of docs/python.md" "cd docs && $limited $venv $n.py"
    cat "$work/log" >> "$work/said"
    n=$((n + 1))
done
check "there are examples" "[ $n -ge 6 ] && grep -q 'nats per byte; spans' said &&
    grep -q '^\[4.0, 5.0\] \[0.5' said &&
    grep -q 'a divisor of\|heads: expected' said"
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
