#!/bin/sh
# registers.sh PTX PROGRAM PART.. - checks that launches are compared with the registers of
# PTX_REGISTERS (executor.cpp): by a table in which one kernel of 1024 threads has a register
# too many, by one that lacks it, and without the file. PROGRAM PART.. launches the kernel.
# Ends with "N passed, N failed".
export PTX_FILE=$1 PTX_KERNEL=stx__optim_prepare_kernel
shift
table=tests/cuda/cuda_regs.txt passed=0 failed=0
work=$(mktemp -d "${TMPDIR:-/tmp}/seqtx-registers.XXXXXX") || exit 1
trap 'rm -rf "$work"' EXIT

# reported FILE TEXT PROGRAM..: PROGRAM must report TEXT, or nothing if it is empty
reported() {
    export PTX_REGISTERS=$1
    text=$2
    shift 2
    "$@" > "$work/out" 2>&1
    if [ -z "$text" ]; then ! grep -q ptx_host "$work/out"; else grep -q "$text" "$work/out"; fi
    if [ $? -eq 0 ]; then passed=$((passed + 1)); else
        failed=$((failed + 1))
        echo "FAILED: with $PTX_REGISTERS: expected '$text', got:"
        grep -m 3 ptx_host "$work/out"
    fi
}
sed "s/^\(.* $PTX_KERNEL\) [0-9]*/\1 65/" "$table" > "$work/many"
grep -v "$PTX_KERNEL" "$table" > "$work/without"
sed 's/^sm_[0-9]*/sm_1/' "$table" > "$work/others"
reported "$table" "" "$@"
reported "$work/many" "launch: 1024 threads with 65 registers need 73728 of the 65536" "$@"
reported "$work/without" "PTX_REGISTERS has no kernel $PTX_KERNEL" "$@"
reported "$work/others" "" "$@"
reported "$work/none" "cannot read PTX_REGISTERS" "$@"
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
