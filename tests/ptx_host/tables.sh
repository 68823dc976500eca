#!/bin/sh
# tables.sh - checks the tables of bench/cuda/count_kernels.c against values computed by
# hand, for two kernels whose counters are known:
#
#   copy       y[i] = x[i] for float4, 8 blocks of 256 threads. A warp executes 15
#              instructions, 6 of them moves. A block moves 256 x 16 x 2 = 8192 bytes, which
#              are 591 clocks of an H100 (13.868 bytes per clock); its 8 x 9 instructions
#              are 18. A request of a warp is 512 bytes, which are 16 sectors.
#   conflict   a[8 i] = x[i], a barrier and y[i] = a[8 (127 - i)] in shared memory, 16
#              blocks of 128 threads. A warp executes 26 instructions, 8 of them moves, and
#              2 accesses of 8 passes instead of 1. A block takes 64 clocks for these, 18
#              for the instructions, and for 1024 bytes 74 clocks of an H100, 76 of an A100
#              and 52 of an H200.
cd "$(dirname "$0")/../.." || exit 1
out=$(mktemp -d "${TMPDIR:-/tmp}/seqtx-tables.XXXXXX") || exit 1
trap 'rm -rf "$out"' EXIT
passed=0 failed=0
${CC:-cc} -std=c99 -O1 bench/cuda/count_kernels.c -o "$out/count_kernels" -lm || exit 1
cat > "$out/launches" <<'EOF'
copy grid 8x1x1 block 256 static 0 dynamic 0 blocks 8 warps 64 instructions 960 threads 30720 arithmetic 320 moves 384 conversion 64 control 64 global_loads 64 global_stores 64 sectors_read 1024 sectors_written 1024 ideal_read 1024 ideal_written 1024 unique_read 1024 unique_written 1024
conflict grid 16x1x1 block 128 static 4096 dynamic 0 blocks 16 warps 64 instructions 1664 threads 53248 arithmetic 704 moves 512 conversion 64 control 64 barrier 64 global_loads 64 global_stores 64 sectors_read 256 sectors_written 256 ideal_read 256 ideal_written 256 unique_read 256 unique_written 256 wavefronts 1024 ideal_wavefronts 128 divergent 0
access copy 64 1024 1024 ld.global.v4.u32 x.cu:3
access conflict 64 512 64 st.shared.f32 x.cu:8
EOF
for arch in sm_80 sm_90; do printf '%s copy 12\n%s conflict 168\n' $arch $arch; done > "$out/regs"
"$out/count_kernels" --regs "$out/regs" --title hand "$out/launches" |
    sed 's/  */ /g' > "$out/tables"
while IFS= read -r row; do
    if grep -qxF "$row" "$out/tables"; then passed=$((passed + 1)); continue; fi
    failed=$((failed + 1))
    echo "FAILED no row $row"
done <<'EOF'
## hand
| copy | 80.0 | 1 | 8 | 591 | mem | mem | mem |
| conflict | 20.0 | 1 | 16 | 74 | mem | mem | smem |
| copy | 100 | 3 | - | - | - | - | - | 32.0 | 0.0 |
| conflict | 100 | 24 | 87 | - | - | - | - | 32.0 | 0.0 |
| copy | 256 | 0 | 12 | 8 x 8 | warps | 12 | 8 x 8 | warps |
| conflict | 128 | 4096 | 168 | 3 x 4 | regs | 168 | 3 x 4 | regs |
| copy | 9 | 56 | - | - | 11 | 11 | - | - | 22 | - |
| conflict | 18 | 61 | - | - | 6 | 6 | - | 6 | 22 | - |
| copy | 16.0 | 1.00 | 16.0 | 1.00 | 66 | 33 | 33 | - |
| conflict | 4.0 | 1.00 | 4.0 | 1.00 | 16 | 8 | 8 | 8.00 |
| conflict | st.shared.f32 | 64 | 512 | 8.00 | x.cu:8 |
EOF
if grep -q "x.cu:3" "$out/tables"; then
    failed=$((failed + 1))
    echo "FAILED an access with the fewest sectors is listed"
else passed=$((passed + 1)); fi
[ "$failed" -eq 0 ] || cat "$out/tables"
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
