#!/bin/sh
# run.sh [--record] [--quick] [options of bench.c and bench_*.c] - builds and runs the
# benchmarks of bench/README.md: bench.c, bench_sru.c, bench_comp.c and bench_par.c. Each
# prints its own report. --only selects benchmarks or their sections; --help lists all
# options. --record also writes bench/results/DATE-MACHINE.md, -sru.md, -comp.md and
# -par.md. Training curves are made by bench/trainers/curve.sh, bench/trainers/curve_sru.sh and
# bench/trainers/curve_comp.sh.
#
# Environment:
#   CC (cc), CFLAGS (-O3)
#   DATA=FILE       a text (default: from examples/demo_data.sh)
#   PYTHON          a python3 with torch
#   CBLAS           none, or link flags (default: first of -lopenblas, -lcblas, -lblas)
#   ONEDNN_LIBS     none, or link flags for oneDNN's matmuls (default: -ldnnl)
#   ONEDNN_FLAGS    compiler flags for its header
#   MKL             none, or a shared library that contains MKL (default: PyTorch's
#                   libtorch_cpu.so, else a libmkl_rt.so)
set -eu

# For PyTorch: by default the threads of GNU OpenMP spin for milliseconds and slow down
# PyTorch's BLAS threads. With this setting PyTorch was 1.6 to 2.7 times as fast. seqtx
# has its own threads.
export GOMP_SPINCOUNT="${GOMP_SPINCOUNT:-20000}"

cd "$(dirname "$0")/.."
CC=${CC:-cc}
flags="-std=c99 ${CFLAGS:--O3}"
work=build/bench
mkdir -p "$work"
record= command="sh bench/run.sh"
args= only=all last=
for a in "$@"; do
    command="$command $a"
    if [ "$a" = --record ]; then record=1; continue; fi
    case $a in
    --help)
        echo "sh bench/run.sh [--record] [options]; --record writes" \
            "bench/results/DATE-MACHINE.md, and -sru.md, -comp.md, -par.md"
        for f in ops/bench.c models/bench_sru.c models/bench_comp.c models/bench_par.c lm.h cpu.h
        do
            sh bench/usage.sh bench/$f
        done
        exit 0 ;;
    *[!A-Za-z0-9_./,=+-]*) echo "run.sh: unexpected characters in the option $a" >&2; exit 2 ;;
    esac
    if [ "$last" = --only ]; then only=$a; elif [ "$a" != --only ]; then args="$args $a"; fi
    last=$a
done
# The selected sections of bench.c, bench_sru.c, bench_comp.c, bench_par.c, each after a
# comma
attn= sru= comp= par=
[ "$only" != all ] || only=gemm,attention,context,training,generation,sru,comp,par
for a in $(echo "$only" | tr , ' '); do
    case $a in
    gemm|attention|context|training|generation) attn="$attn,$a" ;;
    sru|sru-recurrence|sru-attention|sru-training|sru-generation) sru="$sru,$a" ;;
    comp|comp-training|comp-generation) comp="$comp,$a" ;;
    par|par-training|par-generation) par="$par,$a" ;;
    *) echo "run.sh: --only $a: there is no such section (--help)" >&2; exit 2 ;;
    esac
done

compile() {     # SOURCE OUTPUT FLAGS..
    source=$1 out=$2; shift 2
    $CC $flags -pthread "$@" "$source" -o "$out" $libs -lm
}
dl=
[ "$(uname)" != Linux ] || dl=-ldl
libs=$dl
[ -z "$attn" ] || compile bench/ops/bench.c "$work/bench"
[ -z "$sru" ] || compile bench/models/bench_sru.c "$work/bench_sru"
[ -z "$comp" ] || compile bench/models/bench_comp.c "$work/bench_comp"
[ -z "$par" ] || compile bench/models/bench_par.c "$work/bench_par"

# CBLAS, if an optimised one is installed. Old versions of OpenBLAS do not detect AVX-512
# on new AMD processors. Contenders run with their best kernels, here and in PyTorch; the
# report names the kernels.
if grep -q AuthenticAMD /proc/cpuinfo 2>/dev/null && grep -q avx512f /proc/cpuinfo; then
    OPENBLAS_CORETYPE=SkylakeX; export OPENBLAS_CORETYPE
fi
blas="none" cblas= with= with_libs=
if [ -n "$attn" ] && [ "${CBLAS:-}" != none ]; then
    for try in ${CBLAS:-} -lopenblas -lcblas -lblas; do
        libs="$try $dl"
        compile bench/ops/bench.c "$work/bench_with" -DBENCH_CBLAS 2>"$work/cc.log" || continue
        if name=$("$work/bench_with" --cblas-check); then
            blas="$name"
            compile bench/ops/bench.c "$work/bench_cblas" -DSEQTX_CBLAS
            mv "$work/bench_with" "$work/bench"
            cblas="--cblas $work/bench_cblas" with=-DBENCH_CBLAS with_libs=$try
            break
        fi
        [ "$blas" != none ] ||
            blas="not used: $try is $name, not optimised (Debian: apt install libopenblas-dev)"
    done
fi
[ "$blas" != none ] || blas="none found: no comparison (Debian: apt install libopenblas-dev)"

# oneDNN and MKL, for matmuls. MKL uses slower kernels on AMD processors unless a one-line
# function overrides its check.
onednn= mkl= mkl_name= mkl_amd=
if grep -q AuthenticAMD /proc/cpuinfo 2>/dev/null; then
    echo 'int mkl_serv_intel_cpu_true(void) { return 1; }' >"$work/mkl_amd.c"
    if $CC -shared -fPIC "$work/mkl_amd.c" -o "$work/mkl_amd.so" 2>/dev/null; then
        mkl_amd=$PWD/$work/mkl_amd.so
    fi
fi
matmuls=$(case "$attn," in *,gemm,*) echo 1 ;; esac)
if [ -n "$matmuls" ] && [ "${ONEDNN_LIBS:-}" != none ]; then
    libs="$with_libs ${ONEDNN_LIBS:--ldnnl} $dl"
    if compile bench/ops/bench.c "$work/bench_with" $with -DBENCH_DNNL \
        ${ONEDNN_FLAGS:-} 2>"$work/cc.log" &&
       onednn=$("$work/bench_with" --onednn-check); then
        mv "$work/bench_with" "$work/bench"
    fi
fi
rm -f "$work/bench_with"
if [ -n "$matmuls" ] && [ "${MKL:-}" != none ]; then
    torch_libs=$(for p in ${PYTHON:-} python3 /usr/bin/python3; do
        "$p" -c 'import glob, importlib.util, sys
torch = importlib.util.find_spec("torch")
for d in torch.submodule_search_locations if torch else []: print(d + "/lib/libtorch_cpu.so")
for f in sorted(glob.glob(sys.prefix + "/lib/libmkl_rt.so*")): print(f)' 2>/dev/null || true
    done)
    for try in ${MKL:-} $torch_libs libmkl_rt.so libmkl_rt.so.3 libmkl_rt.so.2; do
        plain=$("$work/bench" --mkl "$try" --mkl-check 2>/dev/null) || continue
        mkl="--mkl $try" mkl_name=${plain#* }
        told=0
        [ -z "$mkl_amd" ] ||
            told=$("$work/bench" --mkl "$try" --mkl-amd "$mkl_amd" --mkl-check 2>/dev/null) ||
            told=0
        if [ "${told%% *}" -gt 0 ]; then
            mkl="$mkl --mkl-amd $mkl_amd"
            mkl_name="$mkl_name, forced to use its AVX-512 kernels on AMD (1024x1024x256:"
            mkl_name="$mkl_name ${told%% *} GFLOP/s, without ${plain%% *})"
        fi
        break
    done
fi

data=${DATA:-build/demo.txt}
if [ -z "${DATA:-}" ] && [ ! -s "$data" ]; then sh examples/demo_data.sh "$data"; fi
[ -r "$data" ] || { echo "run.sh: DATA=$data cannot be read" >&2; exit 2; }

# PyTorch with the settings of its tuning guide. malloc keeps memory instead of mapping
# and zeroing it for every temporary (a third of the full-span step). MKL is forced to use
# its best kernels on AMD processors if they are faster (a factor of two on the first test
# machine).
python= torch="none found: no comparison"
for p in ${PYTHON:-} python3 /usr/bin/python3; do
    if version=$("$p" -c 'import torch; print(torch.__version__)' 2>/dev/null); then
        torch="PyTorch $version; malloc keeps its memory, except in rows \"as installed\""
        preload=
        if [ -n "$mkl_amd" ] &&
            "$p" -c 'import sys, torch
sys.exit(not torch.backends.mkl.is_available())' 2>/dev/null; then
            plain=$("$p" bench/peers/attn_span_torch.py --probe 2>/dev/null || echo 0)
            told=$(LD_PRELOAD=$mkl_amd "$p" bench/peers/attn_span_torch.py --probe 2>/dev/null ||
                echo 0)
            if [ "$told" -gt "$plain" ]; then
                preload=$mkl_amd
                torch="$torch, MKL forced to use its AVX-512 kernels on AMD"
                torch="$torch (2048x1024x256: $told GFLOP/s instead of $plain)"
            fi
        fi
        {
            echo '#!/bin/sh'
            echo 'export MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=1099511627776 MALLOC_ARENA_MAX=1'
            echo "export TORCHINDUCTOR_CACHE_DIR='$PWD/$work/inductor'" \
                "TORCHINDUCTOR_COMPILE_THREADS=1"
            [ -z "$preload" ] || echo "export LD_PRELOAD='$preload'"
            echo "exec '$p' \"\$@\""
        } >"$work/python"
        # PyTorch as installed, without these settings
        grep -v 'MALLOC_\|LD_PRELOAD' "$work/python" >"$work/python-plain"
        chmod +x "$work/python" "$work/python-plain"
        python=1
        break
    fi
done

. bench/machine.sh
report() {      # PROGRAM WHAT RESULTS ARGUMENTS..
    program=$1 what=$2 name=$3; shift 3
    md=$work/report$name.md
    {
        echo "# seqtx benchmarks$what, $(date +%Y-%m-%d)"
        echo
        echo "- machine: $cpu, $cores cores, ${vector:-no vector flags known}"
        echo "- compiler: $($CC --version | head -n 1); $flags -pthread"
        [ -n "$name" ] || echo "- CBLAS: $blas"
        if [ -z "$name" ] && [ -n "$matmuls" ]; then
            no_mkl="none found: left out (a PyTorch that contains it, or pip install mkl; MKL=FILE)"
            no_onednn="none found: left out (Debian: apt install libdnnl-dev; ONEDNN_FLAGS,"
            no_onednn="$no_onednn ONEDNN_LIBS)"
            echo "- MKL: ${mkl_name:-$no_mkl}"
            echo "- oneDNN: ${onednn:-$no_onednn}"
        fi
        echo "- peer: $torch"
        echo "- command: \`$command\`"
        echo "- commit: $commit"
        echo "- GOMP_SPINCOUNT of PyTorch: $GOMP_SPINCOUNT"
        [ -z "${DATA:-}" ] &&
            echo "- data: the English of this repository (examples/demo_data.sh)," \
                "$(wc -c <"$data") bytes" || echo "- data: a file of $(wc -c <"$data") bytes"
        echo
    } >"$md"
    cat "$md"
    "$program" --data "$data" --work "$work" --append "$md" "$@" $args
    [ -n "$record" ] || return 0
    target=$(free_result "" "$name").md
    cp "$md" "$target"
    echo "written: $target"
}
if [ -n "$attn" ]; then
    report "$work/bench" "" "" --only "${attn#,}" $cblas $mkl \
        ${python:+--python "$work/python" --python-plain "$work/python-plain"} \
        ${python:+--peer bench/peers/attn_span_torch.py}
fi
if [ -n "$sru" ]; then
    report "$work/bench_sru" " of SRU" -sru --only "${sru#,}" \
        ${python:+--python "$work/python" --python-plain "$work/python-plain"} \
        ${python:+--peer bench/peers/sru_torch.py}
fi
if [ -n "$comp" ]; then
    report "$work/bench_comp" " of the Compressive Transformer" -comp --only "${comp#,}" \
        ${python:+--python "$work/python" --python-plain "$work/python-plain"} \
        ${python:+--peer bench/peers/compressive_torch.py}
fi
if [ -n "$par" ]; then
    report "$work/bench_par" " of Transformer-XL and PAR" -par --only "${par#,}" \
        ${python:+--python "$work/python" --python-plain "$work/python-plain"} \
        ${python:+--peer bench/peers/par_torch.py}
fi
