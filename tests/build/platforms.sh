#!/bin/sh
# platforms.sh - tests other systems with cross compilers, wine and qemu: Microsoft's
# dialect of C and C++; the programs of examples/ with MinGW, and that their vector code
# is selected; with wine the golden vectors and a trainer that resumes; macOS with zig
# (pip install ziglang); riscv64 with qemu. Skips what is not installed, with a message.
#   platforms.sh --probe   exits with 0 if there is something to test
cd "$(dirname "$0")/../.." || exit 1
root=$(pwd)
have() { command -v "$1" > /dev/null 2>&1; }
win=x86_64-w64-mingw32-gcc risc=riscv64-linux-gnu-gcc
if have zig; then zig="zig cc"; elif python3 \
    -m ziglang version > /dev/null 2>&1; then zig="python3 -m ziglang cc"; else zig=; fi
if [ "$1" = --probe ]; then have clang || have $win || [ -n "$zig" ] || have $risc; exit; fi
work=$(mktemp -d "${TMPDIR:-/tmp}/seqtx-platforms.XXXXXX") || exit 1
export WINEPREFIX="$work/wine" WINEDEBUG=-all WINEDLLOVERRIDES='winemenubuilder.exe,mscoree,mshtml='
trap '[ ! -d "$WINEPREFIX" ] || wineserver -k 2> /dev/null; rm -rf "$work"' EXIT
trap 'exit 130' INT TERM
W="-Wall -Wextra -Wpedantic -Wshadow -Werror"
passed=0 failed=0
check() {       # check NAME COMMAND: in the work directory
    if ( cd "$work" && eval "$2" ) > "$work/log" 2>&1; then passed=$((passed + 1)); return; fi
    failed=$((failed + 1))
    echo "FAILED $1"; tail -n 12 "$work/log"
    false
}
macro() {
    echo "SEQTX_$(basename "$1" .h | sed 's/^seqtx_*//; s/.$/&_/' | tr a-z A-Z)IMPLEMENTATION"
}
count() { # count NAME: adds what the program said on the last line of NAME.out, or a failure
    set -- "$1" $(tr -d '\r' < "$work/$1.out" |
        sed -n '$s/^\([0-9]*\) passed, \([0-9]*\) failed$/\1 \2/p')
    passed=$((passed + ${2:-0})) failed=$((failed + ${3:-1}))
    [ "${3:-1}" -eq 0 ] || { echo "FAILED $1"; tail -n 12 "$work/$1.out"; }
}

# Microsoft's dialect: the headers as its compiler would read them, without extensions of
# gcc and clang; msvc/system.h replaces its system headers. Neither the C library nor
# the compiler is Microsoft's, so this finds wrong names and constructs only.
if have clang; then
    mkdir -p "$work/msvc/sys"
    extensions='__attribute|__builtin|__asm|__typeof|__extension__|__restrict__|__inline__'
    extensions="$extensions|__atomic|__sync_|_Pragma"
    for h in $(sed -n 's/^ *# *include *<\(.*\)>.*/\1/p' seqtx*.h | sort -u); do
        case $h in */*) mkdir -p "$work/msvc/${h%/*}" ;; esac
        echo '#include "system.h"' > "$work/msvc/$h"
    done
    for h in seqtx*.h; do echo "#include \"$h\""; done > "$work/all.c"
    for lang in c c++; do
        case $lang in c) std=c11 ;; *) std=c++14 ;; esac
        for cpu in x86_64 i686; do
            cl="clang --target=$cpu-pc-windows-msvc -fms-compatibility-version=19.39 -U__clang__"
            cl="$cl -U__GNUC__ -U__GNUG__ -x $lang -std=$std -nostdinc -Imsvc -I$root"
            cl="$cl -I$root/tests/build/msvc"
            for real in "" -DSEQTX_DOUBLE; do
                check "Microsoft's dialect of $lang, $cpu $real" \
                    "$cl -Wall -Wextra -Wpedantic -Wgnu -Wno-unused-function -Werror $real \
                        -DSEQTX_IMPLEMENTATION -fsyntax-only all.c"
            done
        done
        check "no extensions of gcc and clang in Microsoft's dialect of $lang" \
            "$cl -E -P -DSEQTX_IMPLEMENTATION all.c > all.i && [ \$(wc -l < all.i) -gt 9000 ] &&
            ! grep -nE '$extensions|\\(\\{' all.i"
    done
else
    echo "skipped: Microsoft's dialect, no clang"
fi

# MinGW
flag=-Wa,-muse-unaligned-vector-move
dump=x86_64-w64-mingw32-objdump
if have $win; then
    for f in examples/*.c; do
        case $f in */spm_train.c) continue ;; esac
        check "$f by MinGW" "$win -std=c99 $W -O1 -I$root -fsyntax-only $root/$f"
    done
    # gcc's vector code: with the option all moves to or from memory are unaligned, and the
    # library detects that it can run the code; without the option it cannot
    {
        printf '#define STX_LOOPS\n#include "seqtx.h"\n'
        printf 'int main(void) { return STX__VECTORS_SAFE ? 21 : 20; }\n'
    } > "$work/see.c"
    aligned='vmov(ap[sd]|dqa|dqa32|dqa64|nt[a-z]*) .*\(%'
    check "MinGW without $flag: vector code is detected as unsafe" \
        "$win -std=c99 -O1 -I$root -c see.c -o see.o && $dump -d see.o | grep -E '$aligned' &&
        $dump -d see.o | grep -q 'cmpb *\\\$0x11,0x2(%'"
    if echo 'int stx;' | $win $flag -x c -c - -o "$work/x.o" 2> /dev/null; then
        check "MinGW with $flag: the library compiles" \
            "$win -std=c99 -O1 $W $flag -I$root -DSEQTX_IMPLEMENTATION -x c -c $root/seqtx.h \
                -o seqtx.o"
        check "MinGW with $flag: no aligned moves of vectors" \
            "$dump -d seqtx.o > seqtx.s &&
            [ \$(grep -cE 'vmovup[sd] .*[yz]mm.*\\(%rsp' seqtx.s) -ge 1 ] &&
            [ \$(grep -cE 'vfmadd.*zmm' seqtx.s) -ge 100 ] && ! grep -E '$aligned' seqtx.s"
    else
        echo "skipped: MinGW's vector code, its assembler has no ${flag#-Wa,}"; flag=
        check "MinGW: the library compiles" \
            "$win -std=c99 -O1 $W -I$root -DSEQTX_IMPLEMENTATION -x c -c $root/seqtx.h -o seqtx.o"
    fi
else
    echo "skipped: Windows, no $win"
fi

# wine: the golden vectors of a family, and a run that is stopped and resumed
if have $win && have wine && have wineserver; then
    for h in seqtx_attn_span.h seqtx_text.h; do
        check "$h by MinGW" \
            "$win -std=c99 -O1 $W -I$root -D$(macro $h) -x c -c $root/$h -o $(basename $h .h).o"
    done
    done="-DSEQTX_IMPLEMENTATION_DONE -DSEQTX_ATTN_SPAN_IMPLEMENTATION_DONE"
    done="$done -DSEQTX_TEXT_IMPLEMENTATION_DONE -DSTX_LOOPS_DONE"
    check "the golden vectors by MinGW" \
        "$win -std=c99 -O1 $W $root/tests/models/test_golden_span.c seqtx.o seqtx_attn_span.o \
            -o golden.exe -lm"
    check "train_attn_span by MinGW" \
        "$win -std=c99 -O1 $W $done $root/examples/train_attn_span.c \
            seqtx.o seqtx_attn_span.o seqtx_text.o -o train.exe -lm"
    check "plot by MinGW" "$win -std=c99 -O1 $W $root/examples/plot.c -o plot.exe -lm"
    for f in "" $flag; do
        check "see.c by MinGW $f" "$win -std=c99 -O1 $W $f -I$root see.c -o see$f.exe"
    done
    if check "wine" "wine plot.exe --help < /dev/null | grep -q '^usage'"; then
        wine "$work/golden.exe" tests/golden < /dev/null > "$work/golden.out" 2>&1
        count golden
        awk '
            BEGIN {
                for (i = 0; i < 90; i++) print "the cat sat on mat " i % 7 " and the dog ran"
            }' > "$work/t.txt"
        run="wine train.exe --data t.txt --preset reference --nlayers 2 --hid-sz 32"
        run="$run --inner-hid-sz 64 --nheads 4 --attn-span 32 --block-sz 16 --batch-sz 4"
        run="$run --nbatches 5 --adapt-span"
        check "wine: without the assembler's option the vector code does not run" \
            "wine see.exe; [ \$? -eq 20 ]"
        [ -z "$flag" ] || check "wine: with $flag it runs" "wine see$flag.exe; [ \$? -eq 21 ]"
        check "wine: a run of 20 steps" \
            "$run --steps 20 --checkpoint a.st --log a.jsonl --tensorboard board < /dev/null &&
            [ \$(grep -c '\"event\":\"' a.jsonl) -ge 4 ] &&
            ! grep -q \$(printf '\\r') a.jsonl && ls board/events*"
        check "wine: 10 steps, then 10 more from the checkpoint alone" \
            "$run --steps 10 --checkpoint b.st < /dev/null &&
            wine train.exe --checkpoint b.st --steps 20 < /dev/null && cmp a.st b.st"
        check "wine: generation writes raw bytes" \
            "wine train.exe --checkpoint a.st --no-train --generate 40 --prompt 'the ' --seed 1 \
                < /dev/null > said && [ \$(wc -c < said) -ge 44 ] &&
            ! grep -q \$(printf '\\r') said"
        check "wine: bad arguments are refused" \
            "! wine train.exe --data none.txt --checkpoint c.st < /dev/null 2> said &&
            grep -q 'No such file' said;
            ! wine train.exe --data t.txt --log t.txt --steps 5 < /dev/null 2> said &&
            grep -q 'are the same file' said"
        check "wine: plot replaces an older picture" \
            "echo '<svg/>' > a.svg && wine plot.exe a.jsonl -o a.svg && grep -q '</svg>' a.svg &&
            ! wine plot.exe a.jsonl -o a.jsonl"
    fi
else
    echo "skipped: programs of Windows, no wine or no $win"
fi

# macOS: clang and Apple's C headers accept the code, and a program requires only system
# libraries. Nothing runs. (Takes a minute: zig builds its own library first.)
if [ -n "$zig" ]; then
    export ZIG_GLOBAL_CACHE_DIR="$work/zig" ZIG_LOCAL_CACHE_DIR="$work/zig"
    mac="$zig -std=c99 -O0 $W -I$root"
    arm="$mac -target aarch64-macos"
    check "macOS x86_64: the core" \
        "$mac -target x86_64-macos -DSEQTX_IMPLEMENTATION -x c -c $root/seqtx.h -o intel.o"
    check "macOS: Accelerate's names" \
        "for v in 12.0 13.3; do $mac -target aarch64-macos.\$v -DSEQTX_CBLAS \
            -DSEQTX_IMPLEMENTATION -x c -c $root/seqtx.h -o cblas.o && strings -a cblas.o ||
            exit 1; done > names &&
        grep -o 'cblas_sgemm.*' names | sort -u | tr '\n' ' ' |
        grep -qxF 'cblas_sgemm cblas_sgemm\$NEWLAPACK '"
    for h in seqtx.h seqtx_attn_span.h seqtx_text.h; do
        check "macOS: $h" "$arm -D$(macro $h) -x c -c $root/$h -o mac_$(basename $h .h).o"
    done
    check "macOS: a trainer" \
        "$arm -DSEQTX_IMPLEMENTATION_DONE -DSEQTX_ATTN_SPAN_IMPLEMENTATION_DONE \
            -DSEQTX_TEXT_IMPLEMENTATION_DONE -DSTX_LOOPS_DONE \
                $root/examples/train_attn_span.c mac_*.o -o mac_train"
    check "macOS: it has threads, and requires the system's C library only" \
        "strings -a mac_seqtx.o | grep -q pthread_create && strings -a mac_train > names &&
        grep -q '/usr/lib/libSystem.B.dylib' names && [ \$(grep -c 'dylib\$' names) -eq 1 ]"
else
    echo "skipped: macOS, no zig (pip install ziglang)"
fi

# riscv64: portable kernels, another order of evaluation, other NaNs
for qemu in qemu-riscv64-static qemu-riscv64 ''; do have "$qemu" && break; done
if have $risc && [ -n "$qemu" ]; then
    check "riscv64: it compiles" \
        "$risc -std=c99 -O1 $W -pthread -static -I$root -DSEQTX_IMPLEMENTATION \
            $root/tests/ops/test_golden_ops.c -o golden_ops -lm"
    $qemu "$work/golden_ops" tests/golden > "$work/golden_ops.out" 2>&1
    count golden_ops
else
    echo "skipped: riscv64, no $risc or no qemu-riscv64"
fi
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
