#!/bin/sh
# web.sh [STEPS [TURNS]] - speed of WebAssembly against native builds: processor time per
# training step of the page's medium models, one thread, in a table for docs/web.md. Runs
# alternate; the minimum of TURNS (3) runs counts, because a busy machine only increases
# times. Also compiles the WebAssembly with fused multiply-adds and without SIMD. Needs
# `make web`. Environment: BUILD (build), CC, EMCC, NODE.
set -eu
cd "$(dirname "$0")/../.."
steps=${1:-20} turns=${2:-3}
dir=${BUILD:-build}/web
cc=${CC:-cc} emcc=${EMCC:-emcc} node=${NODE:-node}
export NODE_PATH="${NODE_PATH:-/usr/share/nodejs}"
$cc -std=gnu99 -O3 -pthread bench/web/native.c -o "$dir/native" -lm
$cc -std=gnu99 -O3 -pthread -DSEQTX_UNFUSED bench/web/native.c -o "$dir/unfused" -lm
# $(wasm NAME OPTIONS): another build of web.c
wasm() {
    name=$1; shift
    [ "$dir/$name.wasm" -nt examples/web/web.c ] ||
        $emcc -std=gnu99 -O3 -DSEQTX_NO_THREADS "$@" -sMAXIMUM_MEMORY=1073741824 \
            -sTOTAL_STACK=1048576 -sERROR_ON_UNDEFINED_SYMBOLS=0 --no-entry \
            -sALLOW_MEMORY_GROWTH=1 examples/web/web.c -o "$dir/$name.wasm"
}
wasm fused -msimd128
wasm scalar -DSEQTX_UNFUSED

# ms per step of one build
once() {
    case $1 in
    *.wasm) $node bench/web/web.js "$dir" "$family" 1 "$steps" "$dir/$1" ;;
    *) # shellcheck disable=SC2086
        "$dir/${1%.*}" "$dir/model" "$dir/text.txt" ${args%% *} "${1#*.}" "$steps" \
            ${args#* } ;;
    esac | cut -d' ' -f1
}
builds="seqtx.wasm fused.wasm scalar.wasm native.0 unfused.0 native.1 native.2"
echo "| ms per step | WebAssembly | fused | without SIMD | native, portable | and unfused \
| AVX2 | AVX-512 |"
echo "|---|--:|--:|--:|--:|--:|--:|--:|"
for family in attn_span sru compressive par; do
    args=$($node bench/web/web.js "$dir" $family 1 "$steps")
    for build in $builds; do : > "$dir/times.$build"; done
    turn=0
    while [ "$turn" -lt "$turns" ]; do
        for build in $builds; do once "$build" >> "$dir/times.$build"; done
        turn=$((turn + 1))
    done
    row="| \`train_$family\`"
    for build in $builds; do
        row="$row | $(sort -n "$dir/times.$build" | awk 'NR == 1 { printf "%.1f", $1 }')"
    done
    echo "$row |"
done
rm -f "$dir"/times.* "$dir/model"
