#!/bin/sh
# web.sh [STEPS [TURNS]] - speed of WebAssembly against native builds: processor time per
# training step of the page's medium models, one thread, in a table for docs/web.md. Runs
# alternate; the minimum of TURNS (3) runs counts, because a busy machine only increases
# times. Needs `make web`. Native builds: portable code that rounds products, as WebAssembly
# does, and the library's default, with fused multiply-adds, in three instruction sets.
# Environment: BUILD (build), CC, NODE.
set -eu
cd "$(dirname "$0")/../.."
steps=${1:-20} turns=${2:-3}
dir=${BUILD:-build}/web
cc=${CC:-cc} node=${NODE:-node}
$cc -std=gnu99 -O3 -pthread bench/web/native.c -o "$dir/native" -lm
$cc -std=gnu99 -O3 -pthread -DSEQTX_UNFUSED bench/web/native.c -o "$dir/unfused" -lm
# ms per step of one build
once() {
    case $1 in
    *.wasm) $node bench/web/web.js "$dir" "$family" 1 "$steps" "$dir/$1" ;;
    *) # shellcheck disable=SC2086
        "$dir/${1%.*}" "$dir/model" "$dir/text.txt" ${args%% *} "${1#*.}" "$steps" \
            ${args#* } ;;
    esac | cut -d' ' -f1
}
builds="seqtx.wasm unfused.0 native.0 native.1 native.2"
echo "| ms per step | WebAssembly | portable, rounded | portable, fused | AVX2 | AVX-512 |"
echo "|---|--:|--:|--:|--:|--:|"
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
