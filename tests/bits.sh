#!/bin/sh
# bits.sh [PATTERN] - builds test_bits.c (tests/models) for other compilers, options,
# systems and processors, runs it there, and prints a table for docs/bits.md. Then a
# journey: each trainer makes 20 steps with the instructions of this processor, 20 on
# 64-bit ARM and 20 with AVX2, and its checkpoint is compared with that of a run that
# stays here. PATTERN (for grep -E) selects rows; the journey is the row "journey". Rows
# whose compiler or emulator is not installed are skipped, with a message. Not part of
# `make test`; takes minutes. Debian: clang gcc-multilib musl-tools gcc-aarch64-linux-gnu
# gcc-riscv64-linux-gnu gcc-mingw-w64-x86-64 wine64 qemu-user-static
cd "$(dirname "$0")/.." || exit 1
only=${1:-.} failed=0
work=$(mktemp -d "${TMPDIR:-/tmp}/seqtx-bits.XXXXXX") || exit 1
export WINEPREFIX="$work/wine" WINEDEBUG=-all WINEDLLOVERRIDES='winemenubuilder.exe,mscoree,mshtml='
export BUILD="$work"
trap '[ ! -d "$WINEPREFIX" ] || wineserver -k 2> /dev/null; rm -rf "$work"' EXIT
trap 'exit 130' INT TERM
headers="seqtx seqtx_attn_span seqtx_compressive seqtx_par seqtx_sru"
macro() { echo "SEQTX_$(echo "$1" | sed 's/^seqtx_*//; s/.$/&_/' | tr a-z A-Z)IMPLEMENTATION"; }
selected() { printf '%s\n' "$*" | grep -qE -- "$only"; }
# COMPILER..: 1 if it can build a program; the flags count, as -m32 needs libraries
can() { echo 'int main(void) { return 0; }' | "$@" -x c - -o "$work/can" -lm 2> "$work/log"; }

# row SYSTEM "EMULATOR" COMPILER AND OPTIONS: a row of the table
row() {
    system=$1 emulator=$2; shift 2
    selected "$system | $*" || return 0
    for tool in "$1" $(echo "$emulator" | sed 's/ .*//'); do
        command -v "$tool" > /dev/null 2>&1 && continue
        echo "skipped: $system, $*: no $tool"
        return 0
    done
    can "$@" || { echo "skipped: $system, $*: $(tail -n 1 "$work/log")"; return 0; }
    version=$("$1" -dumpfullversion 2> /dev/null || "$1" -dumpversion)
    rm -f "$work"/*.o "$work/bits" "$work/bits.exe"
    began=$(date +%s)
    {
        for h in $headers; do
            "$@" -I. -D"$(macro "$h")" -x c -c "tests/inner/$h.c" -o "$work/$h.o"
        done
        "$@" -I. tests/models/test_bits.c "$work"/*.o -o "$work/bits" -lm
    } 2> "$work/log" || tail -n 3 "$work/log"
    [ ! -f "$work/bits.exe" ] || mv "$work/bits.exe" "$work/bits"
    # One thread, and the fastest instructions; `make test` has the others.
    # shellcheck disable=SC2086
    $emulator "$work/bits" one < /dev/null > "$work/out" 2> "$work/log"
    last=$(tr -d '\r' < "$work/out" | sed -n '$p')
    case $last in
    *' passed, 0 failed') said=yes ;;
    *' failed')
        said="no: $(grep -c 'is not the digest' "$work/out") of 10 digests differ"
        case $system in *x87) said="$said, not promised" ;; *) failed=1 ;; esac
        ;;
    *)
        said="did not run"
        failed=1
        tail -n 3 "$work/log"
        ;;
    esac
    seconds=$(($(date +%s) - began))
    echo "| $system${emulator:+, $emulator} | \`$*\` | $version | $said | $seconds s |"
}

echo "$(date -u +%Y-%m-%d), commit $(git rev-parse --short HEAD 2> /dev/null)"
echo
echo "| system | compiler and options | version | the same bits | |"
echo "|---|---|---|---|--:|"
threads=-pthread
# the kernel's headers, which gcc-12-multilib does not find by itself
asm="-idirafter /usr/include/x86_64-linux-gnu"
for cc in gcc clang; do
    for o in -O0 -O1 -O2 -O3; do row "Linux x86-64" "" $cc -std=c99 $o $threads; done
    row "Linux x86-64" "" $cc -std=gnu11 -O3 -march=native $threads
    row "Linux x86, 32 bits" "" $cc -std=c99 -O2 -m32 -msse2 -mfpmath=sse $threads $asm
    row "Linux x86, 32 bits, x87" "" $cc -std=c99 -O2 -m32 -mno-sse $threads $asm
done
row "Linux x86-64, musl" "" musl-gcc -std=c99 -O2 -static
for cpu in Haswell Nehalem; do
    row "Linux x86-64" "qemu-x86_64-static -cpu $cpu" gcc -std=c99 -O2 -static $threads
done
row "Linux aarch64" qemu-aarch64-static aarch64-linux-gnu-gcc -std=c99 -O2 -static $threads
row "Linux aarch64" qemu-aarch64-static clang --target=aarch64-linux-gnu -std=c99 -O2 -static \
    $threads
row "Linux riscv64" qemu-riscv64-static riscv64-linux-gnu-gcc -std=c99 -O2 -static $threads
win=x86_64-w64-mingw32-gcc
row "Windows x86-64" wine $win -std=c99 -O2 -static -Wa,-muse-unaligned-vector-move
row "Windows x86-64, no vectors" wine $win -std=c99 -O2 -static

# The journey of a run. --steps ends each part; the run that stays here has the same
# parts.
here=gcc there=aarch64-linux-gnu-gcc arm=qemu-aarch64-static avx2="qemu-x86_64-static -cpu Haswell"
for tool in $here $there $arm qemu-x86_64-static; do
    command -v $tool > /dev/null 2>&1 && continue
    echo "skipped: the journey, no $tool"
    exit $failed
done
selected journey || exit $failed
# trainers DIR COMPILER..: builds them; the library is compiled once
trainers() {
    to=$work/$1 done=-DSTX_LOOPS_DONE; shift
    mkdir -p "$to"
    for h in $headers seqtx_text; do
        "$@" -I. -D"$(macro $h)" -x c -c $h.h -o "$to/$h.o" || return
        done="$done -D$(macro $h)_DONE"
    done
    for family in $families; do
        # shellcheck disable=SC2086
        "$@" -I. $done examples/train_$family.c "$to"/*.o -o "$to/train_$family" -lm || return
    done
}
families="attn_span compressive par sru"
trainers here $here -std=c99 -O2 -pthread && trainers there $there -std=c99 -O2 -static -pthread ||
    exit 1
seq 1 3000 | sed 's/$/ the cat sat on the mat and the dog ran/' > "$work/t.txt"
for family in $families; do
    x86=./here/train_$family
    sizes="--data t.txt --precision f32 --threads 1 --batch-sz 2 --block-sz 16 --dropout 0.1"
    case $family in
    attn_span) sizes="$sizes --nlayers 2 --hid-sz 32 --nheads 2 --attn-span 32 --adapt-span" ;;
    compressive) sizes="$sizes --nlayers 2 --hid-sz 32 --nheads 2 --mem 16" ;;
    par) sizes="$sizes --nlayers 4 --hid-sz 32 --nheads 2 --mem 16" ;;
    sru) sizes="$sizes --nlayers 2 --hid-sz 32 --proj-sz 16 --nheads 2" ;;
    esac
    run() { # FILE "EMULATOR" PROGRAM STEPS [OPTIONS]
        file=$1 emulator=$2 program=$3 steps=$4; shift 4
        # shellcheck disable=SC2086
        (cd "$work" && $emulator "$program" --checkpoint "$file" --steps "$steps" "$@") \
            > "$work/log" 2>&1 < /dev/null || { tail -n 3 "$work/log"; failed=1; }
    }
    # shellcheck disable=SC2086
    {
        run whole.st "" "$x86" 20 $sizes
        run whole.st "" "$x86" 40
        run whole.st "" "$x86" 60
        run parts.st "" "$x86" 20 $sizes
        run parts.st $arm "./there/train_$family" 40
        run parts.st "$avx2" "$x86" 60
    }
    said=yes
    cmp "$work/whole.st" "$work/parts.st" > /dev/null 2>&1 || { said=no; failed=1; }
    echo "| this processor, $arm, $avx2 | train_$family, 3 times 20 steps | | $said | |"
    rm -f "$work"/*.st
done
exit $failed
