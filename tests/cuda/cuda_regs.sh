#!/bin/sh
# cuda_regs.sh - compiles seqtx_cuda.cu with nvcc, links it with a trainer, and compares
# registers, stack, spills and launch bound of every kernel with cuda_regs.txt. The
# table must contain exactly these kernels. The registers of a block of launch-bound size
# must fit into the 65536 of a multiprocessor, otherwise every launch of such a block
# fails. Needs nvcc (NVCC, or in the PATH) and no GPU. Ends with "N passed, N failed".
#
#   cuda_regs.sh [ARCH...]            compares (default: sm_80 sm_90)
#   cuda_regs.sh --record [ARCH...]   writes the table
#   cuda_regs.sh --shared sm_80 sm_90    compares, in half the time: run by `make test`
#   cuda_regs.sh --count [FILE]       counts instructions, see below
#   cuda_regs.sh --table [FILE]       a table of the attention kernels, see below
#
# --shared. Half of nvcc's time is spent on PTX, and the PTX of compute_90 differs from
# that of compute_80 in one instruction: cuda_bf16.h converts a bfloat16 to float with
# cvt.f32.bf16, before sm_90 with a move. --shared therefore makes PTX once, inserts that
# instruction for sm_90, and leaves the rest to ptxas: the registers are exactly those of
# the table. Without --shared each architecture is compiled from the source, which checks
# this claim. Host code is not optimised.
#
# The table also contains a checksum of itself, of this script, of the preprocessed source
# with CUDA's headers, and of the version of nvcc. nvcc is deterministic: if --shared
# finds this checksum, the registers are known, and it only compiles and links without
# optimisation, in a tenth of the time. After a change of the code the registers are
# compared until --record writes a new table.
#
# --count prints the number of instructions of each fused attention kernel with matmuls:
# in total, in its main loop, and in one iteration of the loop (a tile inside of the
# window; then, if these are a loop, a group of 16 keys of a tile that the window cuts).
# Reads the code for sm_90 with cuobjdump (CUOBJDUMP, or in the PATH). FILE: another
# version of seqtx_cuda.cu.
#
# --table prints the properties of each fused attention kernel in bfloat16 without u and
# vb: registers and spills (from cuda_regs.txt), threads and shared memory (from
# BUILD/test_cuda_attention, which is built), blocks per multiprocessor of sm_90,
# instructions (--count), tiles per step of two configurations (cuda_model.h), and
# the time of these instructions if four schedulers of 132 multiprocessors issue one per
# clock at 1.755 GHz. FILE: measurements on a GPU for one configuration, by `nsys stats
# --report cuda_gpu_kern_sum --format csv`, of STEPS steps (1).
cd "$(dirname "$0")/../.." || exit 1
build=${BUILD:-build} nvcc=${NVCC:-nvcc} table=tests/cuda/cuda_regs.txt record= passed=0 failed=0
shared=
if [ "$1" = --shared ]; then shared=1; shift; fi
if [ "$1" = --record ]; then record=1; set --; fi      # the table has all of them
if [ "$1" = --count ]; then
    out=$build/cuda_regs/count
    mkdir -p "$out"
    sass=${CUOBJDUMP:-cuobjdump} source=${2:-seqtx_cuda.cu} filter=cat
    command -v "$sass" >/dev/null 2>&1 ||
        { echo "cuda_regs.sh: no cuobjdump: set CUOBJDUMP" >&2; exit 2; }
    command -v "${NVCC:-nvcc}" >/dev/null 2>&1 ||
        { echo "cuda_regs.sh: no nvcc: set NVCC" >&2; exit 2; }
    command -v c++filt >/dev/null 2>&1 && filter=c++filt
    "$nvcc" -std=c++17 -arch=sm_90 -I. -cubin "$source" -o "$out/sm_90.cubin" &&
        "$sass" -sass "$out/sm_90.cubin" > "$out/sm_90.sass" || exit 1
    echo "| kernel | instructions | in the main loop | branches there | of a tile | HMMA | LDSM" \
        "| LDGSTS | SHFL | MUFU | branches | of a group of an edge | HMMA |"
    echo "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|"
    awk -f tests/cuda/cuda_count.awk "$out/sm_90.sass" | "$filter" |
        sed -n 's/^| void \(stx__a[tbf][^(]*\)([^|]*|/| \1 |/p' | sed 's/ *> */>/g' | sort
    exit
fi
if [ "$1" = --table ]; then
    out=$build/cuda_regs/table measured=${2:-/dev/null}
    mkdir -p "$out"
    [ -r "$measured" ] || { echo "cuda_regs.sh: cannot read $measured" >&2; exit 2; }
    sh tests/cuda/cuda_regs.sh --count > "$out/count" || exit 1
    ${MAKE:-make} -s "$build/test_cuda_attention" > "$out/log" 2>&1 ||
        { cat "$out/log" >&2; exit 1; }
    "$build/test_cuda_attention" kernels > "$out/kernels" || exit 1
    ${CC:-cc} -std=c99 -O2 bench/cuda/count_cuda.c -o "$out/count_cuda" -lm &&
        "$out/count_cuda" --sweeps > "$out/sweeps" || exit 1
    awk -v steps="${STEPS:-1}" '
        function floor(v) { return v - v % 1 }
        FILENAME ~ /regs.txt$/ {
            if ($1 == "sm_90") { regs[$2] = $3; spills[$2] = $5 + $6; fixed[$2] = $7 }
            next
        }
        FILENAME ~ /count$/ {
            n = split($0, f, /[|]/)
            gsub(/ /, "", f[2])
            tile[f[2]] = f[6] + 0
            group[f[2]] = n > 13 ? f[13] + 0 : 0
            next
        }
        FILENAME ~ /sweeps$/ {
            if ($1 == "12x512" || $1 == "24x768") { of[$2, $3, $4] = $1; tiles[$2, $3, $4] = $5 }
            next
        }
        FILENAME !~ /kernels$/ {        # Time (%),Total Time (ns),Instances,..,Name
            name = $0; sub(/^([^,]*,)+ *"?(void )?/, "", name)
            if ($0 ~ /"/) { name = $0; sub(/^[^"]*"(void )?/, "", name) }
            sub(/\(.*/, "", name); gsub(/[ "]|\([a-z]*\)/, "", name)
            split($0, f, ","); took[name] += f[2] / 1e6 / steps
            next
        }
        FNR == 1 {
            printf "| kernel | channels | threads | registers | spilled bytes | shared KiB |"
            printf " with the next tile | blocks | instructions per tile | per 16 keys of an edge |"
            print " tiles per warp | of | planned ms | measured ms |"
            print "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|---|--:|--:|"
        }
        $3 == 0 {
            what = $1; sub(/<.*/, "", what); sub(/^stx__attn_(bwd_)?/, "", what)
            split($1, f, /[<>,]/)
            wide = what == "fwd" && f[5] == 2
            key = $2 SUBSEP (wide ? 32 : 16) SUBSEP what
            shared = fixed[$1] + $5 + $6; few = fixed[$1] + $5
            by_regs = floor(65536 / (floor((regs[$1] * 32 + 255) / 256) * 256 * $4 / 32))
            more = floor(228 * 1024 / (shared + 1024)); less = floor(228 * 1024 / (few + 1024))
            ahead = $6 && more >= by_regs; blocks = ahead || by_regs < less ? by_regs : less
            printf "| %s%s | %d | %d | %d | %d | %.1f | %s | %d | %d | %s | %s | %s | %s | %s |\n",
                what, wide ? ", two strips a warp" : "", $2, $4, regs[$1],
                spills[$1], few / 1024,
                $6 ? sprintf("%.1f%s", shared / 1024, ahead ? "" : " (not taken)") : "", blocks,
                tile[$1], group[$1] ? group[$1] : "",
                key in tiles ? tiles[key] : "", key in tiles ? of[key] : "",
                key in tiles ? sprintf("%.2f", tiles[key] * tile[$1] / (132 * 4 * 1.755e6)) : "",
                $1 in took ? sprintf("%.3f", took[$1]) : ""
        }' tests/cuda/cuda_regs.txt "$out/count" "$out/sweeps" "$measured" "$out/kernels"
    exit
fi
archs=${*:-sm_80 sm_90}
out=$build/cuda_regs/$(echo $archs | tr ' ' -)
mkdir -p "$out"
check() {   # check WHAT CONDITION...
    what=$1; shift
    if "$@"; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        echo "tests/cuda/cuda_regs.sh: FAILED: $what"
    fi
}
demangle=cat
command -v c++filt >/dev/null 2>&1 && demangle=c++filt
version=$("$nvcc" --version | sed -n 's/.*release \([0-9.]*\).*/\1/p')
# checksum ROWS: neither the place of the source nor a comment changes it
checksum() {
    { "$nvcc" --version; for a in sm_80 sm_90; do "$nvcc" -std=c++17 -arch="$a" -E -Xcompiler \
        -P seqtx_cuda.cu || echo "failed $$"; done
      cat tests/cuda/cuda_regs.sh; grep -v '^#' "$1"; } | sha256sum 2>/dev/null | cut -d' ' -f1
}
known=
[ -n "$shared" ] && sum=$(checksum "$table") && [ ${#sum} -eq 64 ] &&
    grep -qx "# checksum $sum" "$table" && known=1
: > "$out/now.txt"
for a in $archs; do
    if [ -n "$known" ] && [ "$a" != "${archs%% *}" ]; then continue
    elif [ -n "$known" ]; then
        "$nvcc" -std=c++17 -gencode arch=compute_80,code=compute_80 -Xcicc -O0 -c seqtx_cuda.cu \
            -o "$out/$a.o" > "$out/$a.log" 2>&1
    elif [ -n "$shared" ] && [ "$a" = sm_90 ]; then
        sed 's/^\.target sm_80/.target sm_90/
            s/mov\.b32 \(%f[0-9]*\), {0,\(%rs[0-9]*\)}/cvt.f32.bf16 \1, \2/' \
            "$out/seqtx_cuda.ptx" > "$out/sm_90.ptx"
        "$(sh tests/cuda/cuda_dir.sh "$nvcc")/bin/ptxas" -O3 -v -arch=sm_90 "$out/sm_90.ptx" \
            -o "$out/sm_90.cubin" > "$out/$a.log" 2>&1
    else
        "$nvcc" -std=c++17 -arch="$a" -Xptxas -v --keep --keep-dir "$out" -c seqtx_cuda.cu \
            -o "$out/$a.o" > "$out/$a.log" 2>&1
    fi
    echo $? > "$out/$a.code"
    check "$a: nvcc compiles seqtx_cuda.cu: $(grep -m 3 -i 'error' "$out/$a.log")" \
        [ "$(cat "$out/$a.code")" -eq 0 ]
    check "$a: nvcc warns: $(grep -m 3 'warning' "$out/$a.log")" \
        [ "$(grep -c 'warning' "$out/$a.log")" -eq 0 ]
    # Prints one line per kernel: architecture, name with template arguments, registers,
    # stack, spilled bytes written and read, static shared memory, and the launch bound of
    # the PTX (0 if there is none).
    [ -z "$known" ] || continue
    { sed -n 's/^[^ ]*\.entry \([^ (]*\).*/E \1/p; s/^\.entry \([^ (]*\).*/E \1/p
          s/^\.maxntid \([0-9]*\).*/B \1/p' "$out/seqtx_cuda.ptx"
      number='\([0-9]*\) bytes'
      sed -n "s/^ptxas info *: Compiling entry function .\([^']*\). for .*/K \1/p
          s/^ *$number stack frame, $number spill stores, $number spill loads/S \1 \2 \3/p
          s/^ptxas info *: Used \([0-9]*\) registers\(.*\)/R \1 \2/p" "$out/$a.log"
    } | awk '
        $1 == "E" { entry = $2 }
        $1 == "B" { bound[entry] = $2 }
        $1 == "K" { name = $2 }
        $1 == "S" { stack = $2; stores = $3; loads = $4 }
        $1 == "R" {
            shared = 0
            for (i = 3; i < NF; i++) if ($(i + 1) == "bytes" && $(i + 2) ~ /smem/) shared = $i
            print $2, stack, stores, loads, shared, bound[name] + 0, name
        }' | "$demangle" | awk -v arch="$a" '{
            numbers = $1 " " $2 " " $3 " " $4 " " $5 " " $6
            for (i = 0; i < 6; i++) sub(/^[0-9]* /, "")
            sub(/^void /, "")
            sub(/\(.*/, "")
            gsub(/ /, "")
            print arch, $0, numbers
        }' >> "$out/now.txt"
done
if [ -n "$shared" ] && [ -z "$known" ]; then
    check "the PTX of sm_80 is there, and has the move that is rewritten" \
        grep -q '{0,%rs' "$out/seqtx_cuda.ptx"
    check "seqtx_cuda.cu has code of one architecture: --shared is not enough" \
        [ "$(grep -c '__CUDA_ARCH__' seqtx_cuda.cu)" \
        -eq "$(grep -c '__CUDA_ARCH__ < 800' seqtx_cuda.cu)" ]
fi
sort "$out/now.txt" -o "$out/now.txt"
if [ -n "$record" ]; then
    { echo "# architecture, kernel, registers, stack, spill stores, spill loads, static shared" \
        "memory (bytes) and launch bound (threads) by nvcc $version;" \
        "tests/cuda/cuda_regs.sh --record"
      cat "$out/now.txt"; } > "$table"
fi
if [ -n "$known" ]; then echo "registers are those of $table, which is of the same code and nvcc"
else check "there are kernels" [ -s "$out/now.txt" ]; fi
# Spills must not increase. With another nvcc than that of the table, registers may
# increase by 8.
slack=8; grep -q "nvcc $version;" "$table" && slack=0
awk -v slack="$slack" -v table="$table" -v counts="$out/counts.txt" -v known="$known" '
    function check(ok, what) {
        if (ok) { passed++; return }
        failed++
        print "tests/cuda/cuda_regs.sh: FAILED: " what
    }
    # Registers are allocated per warp in units of 256.
    function fits(registers, bound) {
        return int((registers + 7) / 8) * 8 * int((bound + 31) / 32) * 32 <= 65536
    }
    function may_be_launched(which, registers, bound) {
        check(bound > 0, which " has no launch bound")
        check(fits(registers, bound), which " needs " registers " registers for each of " bound \
              " threads, and a multiprocessor has 65536: lower the launch bound or the registers")
    }
    /^#/ { next }
    FILENAME == table {
        if (known) may_be_launched($1 " " $2, $3, $8)
        row[$1, $2] = $0
        next
    }
    {
        which = $1 " " $2
        compiled[$1] = 1
        now[$1, $2] = 1
        may_be_launched(which, $3, $8)
        check(($1, $2) in row,
            which " is not in " table ": run tests/cuda/cuda_regs.sh --record and check the diff")
        if (!(($1, $2) in row)) next
        split(row[$1, $2], want)
        check($3 <= want[3] + slack, which " uses " $3 " registers, " want[3] " are recorded")
        check($4 <= want[4] && $5 <= want[5] && $6 <= want[6],
            which " spills " $5 " and " $6 " bytes, stack " $4 \
              "; recorded are " want[5] ", " want[6] " and " want[4])
        check($8 == want[8], which " has a launch bound of " $8 ", " want[8] " is recorded")
    }
    END {
        # The table must not contain removed kernels of an architecture that was compiled.
        for (k in row) {
            split(k, part, SUBSEP)
            if (part[1] in compiled)
                check(k in now, part[1] " " part[2] " is in " table " but not in seqtx_cuda.cu:" \
                      " run tests/cuda/cuda_regs.sh --record and check the diff")
        }
        print passed + 0, failed + 0 > counts
    }' "$table" "$out/now.txt"
read -r p f < "$out/counts.txt"
passed=$((passed + p)) failed=$((failed + f))
lib=$(sh tests/cuda/cuda_dir.sh "$nvcc")/lib64
check "the trainer links with it" \
    ${CC:-cc} -std=c99 -DSEQTX_CUDA examples/train_attn_span.c "$out/${archs%% *}.o" \
    -o "$out/train" -L"$lib" -lcublasLt -lcudart -lstdc++ -lm
check "and says that there is no GPU, or trains" \
    sh -c "LD_LIBRARY_PATH=$lib '$out/train' --help all | grep -q -- --device"
if [ -n "$record" ] && [ "$failed" -eq 0 ]; then
    echo "# checksum $(checksum "$table")" >> "$table"
fi
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
