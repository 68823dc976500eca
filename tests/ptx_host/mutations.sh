#!/bin/sh
# mutations.sh - shows what each layer of tests sees of a fault in a kernel. Each mutation
# in the table below is applied to a copy of src/cuda. The part that launches the kernel
# is then compiled for the host shim (g++) and to PTX (nvcc), and the parts of a test
# program that use the kernel run by the shim and by the interpreter of PTX.
#   mutations.sh [NAME ..]    runs all mutations, or those whose names are given
# It prints one line per mutation, and "N passed, N failed". These are the checks: the
# mutation changes the source; without it, the tests pass in both layers; with it, each
# layer sees what the table states.
# Environment: BUILD, CXX, NVCC, LIBS; MADE=1: the test programs have been built; KEEP=1:
# keep the temporary directory and print its name.
cd "$(dirname "$0")/../.." || exit 1
. tests/limit.sh
build=${BUILD:-build} cxx=${CXX:-g++} nvcc=${NVCC:-nvcc}
work=$(mktemp -d "${TMPDIR:-/tmp}/seqtx-mutations.XXXXXX") || exit 1
if [ -n "$KEEP" ]; then echo "$work"; else trap 'rm -rf "$work"' EXIT; fi
trap 'exit 1' INT TERM
passed=0 failed=0
all=" $* "

if ! command -v "$nvcc" > /dev/null 2>&1; then
    echo "mutations.sh: no nvcc"
    exit 1
fi
fma=
grep -qm 1 '^flags.* fma ' /proc/cpuinfo 2> /dev/null && fma="-mfma -ffp-contract=off"
[ -n "$MADE" ] || make -s BUILD="$build" "$build/test_cuda_sru_ptx" "$build/test_cuda_ops_ptx" \
    "$build/test_cuda_comp_ptx" "$build/test_cuda_par_ptx" "$build/test_cuda_attention_ptx" ||
    exit 1


# >>building and running

# check OK TEXT: counts a check
check() {
    if [ "$1" = 1 ]; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        echo "FAILED $name: $2"
    fi
}

# build DIR UNIT TEST: compiles the part UNIT of DIR/src and links a test program with it.
# Its definitions take precedence over those of the complete library. Parts of attention
# are compiled with the launcher of one direction only, which takes half the time.
build() {
    case $3 in
    attention)
        other=bwd unused=attention_bwd.cuh
        if [ "$2" = attention_bwd ]; then
            other=fwd unused="no part"      # attention_fwd.cuh without its kernels
            sed '/^static.* stx__attn_fwd_choose(/,/^}/d; / stx__attn_fwd_choose((/d
                /^static void stx__attn_fused_fwd(/,/^}/d' src/cuda/attention_fwd.cuh \
                > "$1/src/attention_fwd.cuh"
        fi
        sed "/$unused/d; /^extern.* stx_attention_work_cuda/,/^}/d
            /^extern.* stx_attention_${other}_cuda/,/^}/d
            /^extern.* stx_cuda_attention/,/^}/d" src/cuda/attention.cuh > "$1/src/unit.cu"
        ;;
    *) echo "#include \"$2.cuh\"" > "$1/src/unit.cu" ;;
    esac
    "$nvcc" -ptx -std=c++17 -O3 -lineinfo -arch=sm_90 -w -I. "$1/src/unit.cu" -o "$1/ptx" &&
        "$cxx" -std=c++17 -O1 $fma -w -DSEQTX_CUDA -DSEQTX_CUDA_HOST -DSEQTX_NCCL \
            -Itests/cuda_host -I. -x c++ -c "$1/src/unit.cu" -o "$1/unit.o" &&
        "$cxx" -Wl,-z,muldefs "$1/unit.o" "$build/test_cuda_$3.o" "$build"/lib_cuda/*.o \
            "$build/cuda_kernels.o" "$build/cuda_host.o" \
            $(ls "$build"/ptx_host/*.o | grep -v '/test_[^/]*$') -o "$1/test" -lm -lpthread $LIBS
} > "$1/build.log" 2>&1

# run_layer DIR LAYER PARTS: runs the parts of the test. Sets `values` to "equal", or to
# "differ" if a check of results failed, `reports` to the number of reports (at most 40
# per part), `ended` to "" or how the program ended, and writes reports to DIR/LAYER.
run_layer() {
    : > "$1/$2"
    : > "$1/$2.out"
    ended= values=equal short=
    [ "$test" = sru ] && short=short
    for part in $3; do
        $limited "$1/test" $part $short >> "$1/$2.out" 2>> "$1/$2"
        code=$?
        case $code in
        0 | 1) ;;
        124) ended=hang ;;
        *) ended="exit $code" ;;
        esac
    done
    grep FAILED "$1/$2.out" | grep -qv 'cuda_host_reports\|the shim reports' && values=differ
    grep -q ' passed, ' "$1/$2.out" || [ -n "$ended" ] || ended="no result"
    reports=$(grep -vc '^cuda_host: further' "$1/$2")
}

# kinds DIR: the kinds of the interpreter's reports, separated by ", "
kinds() {
    sed -n 's/.*ptx_host: \([a-z ]*\): .*/\1/p' "$1/ptx.reports" | sort -u | paste -s -d , - |
        sed 's/,/, /g'
}


# >>mutations

# Builds the unmutated source of a unit, once for each set of tests.
baseline() {
    base=$work/base.$unit.$test
    if [ ! -d "$base" ]; then
        mkdir -p "$base/src"
        cp src/cuda/*.cuh "$base/src"
        build "$base" "$unit" "$test" || cat "$base/build.log"
    fi
    for part in $parts; do
        [ ! -f "$base/done.$kernel.$part" ] || continue
        : > "$base/done.$kernel.$part"
        run_layer "$base" shim "$part"
        [ "$values$ended$reports" = equal0 ] && ok=1 || ok=0
        check $ok "the unmutated source fails in the shim"
        export PTX_FILE="$base/ptx" PTX_KERNEL="$kernel" PTX_COUNTERS="$base/counters"
        run_layer "$base" ptx.reports "$part"
        unset PTX_FILE PTX_KERNEL PTX_COUNTERS
        [ "$values$ended$reports" = equal0 ] && ok=1 || ok=0
        check $ok "the unmutated source fails by PTX: $values $(head -n 1 "$base/ptx.reports")"
    done
    grep -q "${kernel%<}.* launches [1-9]" "$base/counters" && ok=1 || ok=0
    check $ok "no launch of $kernel"
}

# seen EXPECTED VALUES REPORTS ENDED KINDS: whether a layer sees what is expected:
# "values", "reports", "any", a kind of the interpreter's reports, or "-" for nothing
seen() {
    case $1 in
    -) [ "$2$3$4" = equal0 ] ;;
    any) [ "$2$3$4" != equal0 ] ;;
    values) [ "$2" = differ ] ;;
    reports) [ "$3" -gt 0 ] ;;
    *) case ", $5," in *", $1,"*) true ;; *) false ;; esac ;;
    esac
}

# mutate: applies a mutation, runs both layers, prints its line
mutate() {
    dir=$work/$name
    mkdir -p "$dir/src"
    cp src/cuda/*.cuh "$dir/src"
    sed "$edit" "src/cuda/$mutated.cuh" > "$dir/src/$mutated.cuh"
    cmp -s "src/cuda/$mutated.cuh" "$dir/src/$mutated.cuh" && ok=0 || ok=1
    check $ok "the mutation does not apply to $mutated.cuh"
    [ $ok = 1 ] || return
    baseline
    if ! build "$dir" "$unit" "$test"; then
        cat "$dir/build.log"
        check 0 "the mutated source does not compile"
        return
    fi

    run_layer "$dir" shim "$parts"
    seen "$shim" "$values" "$reports" "$ended" "" && ok=1 || ok=0
    check $ok "the shim sees [$values, $reports reports $ended], expected [$shim]"
    line="$values $ended | $reports"
    export PTX_FILE="$dir/ptx" PTX_KERNEL="$kernel"
    run_layer "$dir" ptx.reports "$parts"
    unset PTX_FILE PTX_KERNEL
    kinds=$(kinds "$dir")
    seen "$ptx" "$values" "$reports" "$ended" "$kinds" && ok=1 || ok=0
    check $ok "the interpreter sees [$values, $kinds $ended], expected [$ptx]"
    echo "| $name | \`$kernel\` | $fault | $line | $values $ended | ${kinds:--} |" |
        sed 's/  */ /g'
    [ -n "$KEEP" ] || rm -rf "$dir"
}

# mutation NAME PART UNIT KERNEL "TEST PARTS" SHIM PTX FAULT: reads a sed script for
# src/cuda/PART.cuh from standard input. UNIT is the part that launches the kernel. SHIM
# and PTX state what the layers see, see seen().
mutation() {
    name=$1 mutated=$2 unit=$3 kernel=$4 test=${5%% *} parts=${5#* } shim=$6 ptx=$7 fault=$8
    edit=$(cat)
    case $all in "  " | *" $name "*) mutate ;; esac
}

echo "| mutation | kernel | fault | shim: values | shim: reports | PTX: values | PTX: reports |"
echo "|---|---|---|---|---|---|---|"

mutation exchange_barrier sru sru stx__sru_scan_kernel "sru bits" values "shared race" \
    "no __syncthreads between the store and the loads of an exchange" << 'END'
/void stx__sru_exchange/,/^}/s/__syncthreads();//
END
mutation ring_syncwarp sru sru stx__sru_fwd_kernel "sru options bits" values "shared race" \
    "no __syncwarp after the wait for a stage of the ring" << 'END'
/ stx__sru_fwd_kernel(stx__sru p) {/,/^}/s/__syncwarp();//
END
mutation ring_wait sru sru stx__sru_fwd_kernel "sru options bits" values "copy not awaited" \
    "the wait for cp.async leaves one group more in flight" << 'END'
/ stx__sru_fwd_kernel(stx__sru p) {/,/^}/s/stx__cp_wait<STAGES - 2>/stx__cp_wait<STAGES - 1>/
END
mutation ring_early sru sru stx__sru_fwd_kernel "sru options bits" - "shared race" \
    "a stage is refilled before the barrier that ends its use" << 'END'
/ stx__sru_fwd_kernel(stx__sru p) {/,/^}/{
/__syncwarp();/d
/from.fetch(ring + (at/s/$/ __syncwarp();/
}
END
mutation tile_early sru sru stx__sru_bwd_kernel "sru options bits" any "shared race" \
    "a tile is refilled without a __syncwarp after the previous tile" << 'END'
/^stx__sru_bwd_kernel/,/^}/{
/__syncwarp();/{
N
/from.fetch(first/s/__syncwarp();//
}
}
END
mutation half_early sru sru stx__sru_bwd_kernel "sru wide" any "shared race" \
    "half a tile is refilled without a __syncwarp after the walk" << 'END'
/^stx__sru_bwd_kernel/,/^}/s/__syncwarp(); \/\* no lane still reads the second half.*//
END
mutation ring_unaligned sru sru stx__sru_fwd_kernel "sru options sizes" any misaligned \
    "rows of 8 bytes are copied in pieces of 16" << 'END'
/int stx__sru_is_uniform/,/^}/s/p.u.half ? 8 : 4/p.u.half ? 4 : 4/
END
mutation tile_bound embedding embedding stx__embedding_tile "ops embedding sums" any \
    "out of bounds" "no bound of the last tile" << 'END'
s/const int n = (int)(N - lo < .*/const int n = STX__ID_TILE;/
END
mutation tile_store_beyond embedding embedding stx__embedding_tile "ops embedding sums" \
    reports "out of bounds" "a store past the end of a shared array, into the next one" << 'END'
/^stx__embedding_tile_kernel/,/^}/s/i < n + 2; i += blockDim.x/i < n + 3; i += blockDim.x/
END
mutation run_unwritten embedding embedding stx__embedding_ "ops embedding sums" any \
    "unwritten global memory" "a partial sum that the other kernel has not stored" << 'END'
/^stx__embedding_run_kernel/,/^}/s/part\[(2 \* tile + !whole)/part[(2 * tile + 1)/
END
mutation vector_unaligned embedding embedding stx__embedding_tile "ops embedding sums" \
    - misaligned "16-byte loads of an array with any alignment" << 'END'
/^void stx_embedding_bwd_cuda/,/^}/s/four = C % 4 == 0 && .*/four = C % 4 == 0;/
END
mutation rank_order embedding embedding stx__embedding_rank "ops embedding sums" values \
    values "equal ids of later chunks come first" << 'END'
/^stx__embedding_rank_kernel/,/^}/s/me + (j < own)/me + (j > own)/
END
mutation total_unset loss loss stx__cluster_sort "ops losses" any "unwritten shared memory" \
    "the counts of the last cluster are not added" << 'END'
/^stx__cluster_sort_kernel/,/^}/s/if ((int)warp < K) {/if ((int)warp + 1 < K) {/
END
mutation count_barrier loss loss stx__cluster_count "ops losses" values "shared race" \
    "no __syncthreads between the counts of the warps and their sum" << 'END'
/^stx__cluster_count_kernel/,/^}/s/__syncthreads();//
END
mutation sort_ballot loss loss stx__cluster_sort "ops losses" reports diverged \
    "a ballot of all lanes that lanes skip before a barrier" << 'END'
s/unsigned votes = __ballot_sync/unsigned votes = 0; if (id >= 0) votes = __ballot_sync/
END
mutation chunk_bound sums loss stx__sum_kernel "ops flat sums" any "out of bounds" \
    "the last chunk of a sum is as long as the others" << 'END'
/^stx__sum_kernel/,/^}/s/hi = lo + each < n ? lo + each : n,/hi = lo + each,/
END
mutation too_many_warps sums loss stx__sum_kernel "ops flat sums" any "unwritten shared memory" \
    "a sum over more warps than the block has" << 'END'
s/v = threadIdx.x % 32 < T \/ 32 ? sh\[threadIdx.x % 32\] : 0;/v = sh[threadIdx.x % 32];/
END
mutation too_few_warps sums loss stx__sum_kernel "ops flat sums" values values \
    "a sum over half of the block's warps" << 'END'
s/v = threadIdx.x % 32 < T \/ 32 ? /v = threadIdx.x % 32 < T \/ 64 ? /
END
mutation means_barrier loss loss stx__add_means_bwd "ops flat" - "global race" \
    "no __syncthreads between updates of arrays that overlap" << 'END'
/stx__add_means_bwd_kernel/,/^}/s/__syncthreads();//
END
mutation twin_barrier optim optim stx__adam "ops optimisers" - "shared race" \
    "no __syncthreads between the reset and the store of a shared pointer" << 'END'
/ stx__chunk_num(/,/^}/{
/= NULL;$/{
N
s/__syncthreads();//
}
}
END
mutation plain_barrier optim optim stx__optim_prepare "ops optimisers" - "global race" \
    "no __syncthreads before the load of a flag that thread 0 stored" << 'END'
s/__syncthreads(); \/\* u->plain.*//
END
mutation warp_barrier optim optim stx__optim_prepare "ops optimisers" reports deadlock \
    "__syncthreads in a branch of one whole warp" << 'END'
s/__syncthreads(); \/\* u->plain.*/if (threadIdx.x < 32) __syncthreads();/
END
mutation rank_early comp comp stx__comp_rank "comp pick bits" any "shared race" \
    "the next 256 values are stored before all threads have read the last ones" << 'END'
/^stx__comp_rank_kernel/,/^}/{
/^            }$/{
N
s/__syncthreads();//
}
}
END
mutation pick_ballot comp comp stx__comp_pick "comp pick bits" reports values \
    "a ballot of all lanes that lanes skip before they exit" << 'END'
/^stx__comp_pick_kernel/,/^}/{
s/uint32_t some = __ballot/uint32_t some = 0; if (k0 + lane < g.rows) some = __ballot/
}
END
mutation unfold_beyond comp comp stx__comp_unfold "comp groups bits" values values \
    "an index into global memory is one vector too large" << 'END'
/^stx__comp_unfold_kernel/,/^}/s/n \* g.D + c, v, acc/n * g.D + c + W, v, acc/
END
mutation mix_overlap sums par_mix stx__par_mix_bwd_kernel "par mix bits" any "shared race" \
    "the elements of adjacent lanes overlap in shared memory" << 'END'
/void stx__column_sums_of_warps/,/^}/s/128 + 4 \* lane + e/128 + 3 * lane + e/
END
mutation blocks_overlap sums par_mix stx__par_mix_bwd_kernel "par mix bits" any "global race" \
    "two blocks store the same partial sums" << 'END'
/void stx__column_sums_of_warps/,/^}/s/(P \* (size_t)blockIdx.x + i)/(P * (size_t)(blockIdx.x \/ 2) + i)/
END
mutation attention_barrier attention_fwd attention_fwd "stx__attn_fwd<" "attention 2 3" values \
    "shared race" "no __syncthreads after the wait for a tile" << 'END'
/^stx__attn_fwd(/,/^}/{
/stx__cp_wait<0>();/{
N
s/__syncthreads();//
}
}
END
mutation ramp_syncwarp attention_fwd attention_fwd "stx__attn_fwd<" "attention 2 3" - \
    "shared race" "no __syncwarp between the store and the loads of the ramp" << 'END'
/min_delta + e));$/{
N
s/__syncwarp();//
}
END
mutation keys_barrier attention_bwd_keys attention_bwd stx__attn_bwd_keys "attention 2 3" \
    any "shared race" "no __syncthreads after the wait for a tile of queries" << 'END'
/ stx__attn_bwd_key_walk(/,/^}/{
/stx__cp_wait<0>();/{
N
s/__syncthreads();//
}
}
END
mutation keys_row attention_bwd_keys attention_bwd stx__attn_bwd_keys "attention 2 3" values \
    values "the gradients are stored one key too far" << 'END'
/ void stx__attn_bwd_key_store(/,/^}/s/row = j0 + group \* 16;/row = j0 + group * 16 + 1;/
END
mutation diagonals_barrier attention_bwd_diagonals attention_bwd stx__attn_bwd_diagonals \
    "attention 5" any "shared race" "no barrier between dR and its sums" << 'END'
/ stx__attn_bwd_diagonal_head(/,/^}/s/all = __syncthreads_and(all);//
END

echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
