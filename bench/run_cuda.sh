#!/bin/sh
# run_cuda.sh [--record] [--count | --formulas] [options] - runs the GPU benchmarks of
# bench/README.md; make bench-cuda builds them. --record also appends the report to
# bench/results/DATE-GPU.md, with --count to DATE-cuda-kernels.md, and with --formulas to
# DATE-cuda-counted.md.
#   --count [--model LIST] [--kernel TEXT] [--shapes]   what the kernels of training steps
#       do, and which resource bounds each: counted, in about five minutes, with nvcc and
#       without a GPU. --model: some of span,all-attention,xl,search,compressive,
#       compressive-used,compressive-pool,sru,sru++ (default: all); --kernel: only kernels
#       whose names contain TEXT; --shapes: every shape of launches, not one per kernel
#   --formulas [--kernels] [--tiny]   operations and bytes of whole steps; needs no GPU
# Environment: PYTHON (a python3 with torch), BUILD (default: build), BENCH_CUDA (the
# program; default: BUILD/cuda/bench_cuda), CC (for --count and --formulas), COMMIT
# (outside of a git clone).
set -eu

cd "$(dirname "$0")/.."
work=${BUILD:-build}/bench_cuda
mkdir -p "$work"
record= count= command="sh bench/run_cuda.sh" args=
for a in "$@"; do
    command="$command $a"
    case $a in
    --record) record=1 ;;
    --count | --formulas) count=${a#--} ;;
    --help)
        sed -n '2,15s/^# //p' "$0"
        sh bench/usage.sh bench/cuda/bench_cuda.c
        exit 0 ;;
    *[!A-Za-z0-9_./,=+-]*) echo "run_cuda.sh: unexpected characters in the option $a" >&2; exit 2 ;;
    *) args="$args $a" ;;
    esac
done
. bench/machine.sh
[ -z "${COMMIT:-}" ] || commit=$COMMIT

finish() { # NAME: appends the report to the one of today
    [ -n "$record" ] || return 0
    mkdir -p bench/results
    target=bench/results/$(date +%Y-%m-%d)-$1.md
    [ ! -s "$target" ] || echo >>"$target"
    cat "$work/report.md" >>"$target"
    echo "written: $target"
}

begin() { # TITLE: the head of a report of what was counted
    {
        echo "# seqtx on a GPU: $1, $(date +%Y-%m-%d)"
        echo
        echo "- nothing was measured: no GPU was used"
        echo "- command: \`$command\`"
        echo "- commit: $commit"
        echo
    } >"$work/report.md"
    cat "$work/report.md"
}

if [ "$count" = formulas ]; then
    ${CC:-cc} -std=c99 -O2 bench/cuda/count_cuda.c -o "$work/count_cuda" -lm
    begin "counted work"
    "$work/count_cuda" --append "$work/report.md" $args
    finish cuda-counted
    exit 0
fi

if [ "$count" = count ]; then
    build=${BUILD:-build} models= options=
    set -- $args
    while [ $# -gt 0 ]; do
        case $1 in
        --model) models=$(echo "${2:-}" | tr , ' '); shift ;;
        *) options="$options $1" ;;
        esac
        shift
    done
    ${CC:-cc} -std=c99 -O2 bench/cuda/count_kernels.c -o "$work/count_kernels" -lm
    make -s "$build/step_cuda_ptx" "$build/seqtx_cuda_sm_90.ptx"
    export PTX_FILE="$build/seqtx_cuda_sm_90.ptx"
    begin "counted kernels"
    set -- --append "$work/report.md" $options --meaning
    for m in ${models:-$("$build/step_cuda_ptx")}; do
        echo "run_cuda.sh: counting $m" >&2
        what=$(PTX_LAUNCHES="$work/$m.launches" "$build/step_cuda_ptx" "$m")
        set -- "$@" --title "$what" "$work/$m.launches"
    done
    "$work/count_kernels" "$@"
    finish cuda-kernels
    exit 0
fi

bench=${BENCH_CUDA:-${BUILD:-build}/cuda/bench_cuda}
[ -x "$bench" ] ||
    { echo "run_cuda.sh: $bench is not built: make bench-cuda CUDA_ARCH=sm_90" >&2; exit 2; }
about=$("$bench" --about)
gpu=$(printf '%s' "$about" | sed 's/,.*//')
driver=
if command -v nvidia-smi >/dev/null 2>&1; then
    driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null |
        head -n 1 || true)
fi

python= torch="none found: no comparison"
for p in ${PYTHON:-} python3 /usr/bin/python3; do
    version=$("$p" -c 'import torch
print(torch.__version__, "with CUDA", torch.version.cuda)' 2>/dev/null) || version=
    if [ -n "$version" ]; then
        torch="PyTorch $version"
        {
            echo '#!/bin/sh'
            echo "export TORCHINDUCTOR_CACHE_DIR='$PWD/$work/inductor'" \
                "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
            echo "exec '$p' \"\$@\""
        } >"$work/python"
        chmod +x "$work/python"
        python="--python $work/python --peer bench/peers/attn_span_torch_cuda.py"
        break
    fi
done

{
    echo "# seqtx on a GPU, $(date +%Y-%m-%d)"
    echo
    echo "- GPU: $about"
    echo "- driver: ${driver:-unknown}"
    echo "- peer: $torch"
    echo "- host: $cpu, $cores cores"
    echo "- command: \`$command\`"
    echo "- commit: $commit"
    echo
} >"$work/report.md"
cat "$work/report.md"
"$bench" --work "$work" --append "$work/report.md" $python $args
finish "$(printf '%s' "$gpu" | tr '[:upper:]' '[:lower:]' | sed 's/[^a-z0-9]\{1,\}/-/g')"
