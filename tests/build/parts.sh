#!/bin/sh
# parts.sh [--graph] - tests the parts in src/, what tools/single.sh makes of them, the
# parts of examples/train.h, and the parts of programs, such as those of train_sru.c in
# examples/sru/ and those of pack.c in examples/pack/:
#
#   - seqtx.h and seqtx_cuda.cu are up to date
#   - a part directly includes each part whose names it uses, and no other (tools/parts.awk)
#   - no folder uses a folder above it (`may` below), and no parts include each other
#   - every part compiles alone, in C (by clang if there is one: two thirds of the time) or,
#     for CUDA, as C++ with tests/cuda_host. With gcc, src/cuda/common.cuh is precompiled and
#     included first: a third of the time
#   - no part has more than 800 lines, no trainer more than 250, and pack.c not
#     more than 350
#
# Then breaks each rule in a copy, which must be detected. --graph only prints the folders,
# their sizes, and the number of includes from folder to folder.
cd "$(dirname "$0")/../.." || exit 1
root=$(pwd)
work=$(mktemp -d "${TMPDIR:-/tmp}/seqtx-parts.XXXXXX") || exit 1
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM
CC=${CC:-cc} CXX=${CXX:-c++}
! command -v clang > /dev/null 2>&1 || CC=clang
cxx="$CXX -std=c++17 -w -I. -DSEQTX_CUDA -DSEQTX_NCCL -DCUDA_HOST"
passed=0 failed=0

# Which folders each folder may use, besides api.
may="core: gemm:core ops:gemm,core train:ops,gemm,core io:train,core lm:ops,io,core top:io,gemm,core"

# The programs that have parts.
programs="examples/train_*.c examples/pack.c"

# The parts in the order in which the root includes them. $1: a directory with src/.
parts() {
    sed -n 's|^#include "\(.*/.*\.h\)"$|src/\1|p; s|^#include "\([a-z]*\.h\)"$|src/\1|p' \
        "$1/src/seqtx.h"
}
cuda_parts() {
    sed -n 's|^#include "\(.*\.cuh\)"$|src/cuda/\1|p' "$1/src/cuda/seqtx_cuda.cu"
}
train_parts() {
    sed -n 's|^#include "\(train/.*\.h\)"$|examples/\1|p' "$1/examples/train.h"
}
trainer_parts() {       # FILE..: the parts of these trainers
    sed -n 's|^#include "\([a-z_]*/.*\.h\)"$|examples/\1|p' "$@"
}
trainer_facts() {       # their names have no prefix: includes of own parts are not checked
    for f in $programs; do
        own=$(trainer_parts "$f")
        [ -z "$own" ] || awk -v prefixes="tr|TR" -f "$root/tools/parts.awk" $(train_parts .) $own |
            sed -e '/^[a-z]* examples\/train\//d' -e '/includes examples\/train\//b' \
                -e '/uses nothing/d'
    done
}
facts() {       # DIR: what tools/parts.awk says about its parts
    ( cd "$1" && awk -v may="$may" -f "$root/tools/parts.awk" $(parts .) &&
        awk -v given=src/api/ -f "$root/tools/parts.awk" src/api/*.h $(cuda_parts .) &&
        awk -v prefixes="tr|TR" -f "$root/tools/parts.awk" $(train_parts .) &&
        trainer_facts )
}

check() {       # NAME COMMAND..
    name=$1; shift
    if "$@" > "$work/log" 2>&1; then passed=$((passed + 1)); return; fi
    failed=$((failed + 1))
    echo "FAILED $name"
    tail -n 12 "$work/log"
}

up_to_date() {  # DIR: the generated files equal those of its parts
    rm -rf "$work/made" && mkdir "$work/made" &&
        sh "$1/tools/single.sh" "$work/made" &&
        cmp "$work/made/seqtx.h" "$1/seqtx.h" &&
        cmp "$work/made/seqtx_cuda.cu" "$1/seqtx_cuda.cu"
}
own_folders() {         # the folders of the trainers' parts
    trainer_parts $programs | sed 's|/[^/]*$||' | sort -u
}
listed() {      # DIR: every file is a part, so that it is in the generated files
    { parts "$1"; cuda_parts "$1"; train_parts "$1"; ( cd "$1" && trainer_parts $programs )
        echo src/seqtx.h; echo src/cuda/seqtx_cuda.cu; echo examples/train/win.h; } |
        sort > "$work/a"
    ( cd "$1" && find src examples/train $(own_folders) -type f ) | sort > "$work/b"
    diff "$work/a" "$work/b"
}
exact() {       # DIR: the includes are exactly what is used, and no arrow goes upwards
    facts "$1" > "$work/facts" &&
    grep -q '^edge' "$work/facts" && ! grep '^error' "$work/facts"
}
acyclic() {     # DIR
    facts "$1" | sed -n 's/^edge //p' | tsort > "$work/sorted" 2> "$work/cycles"
    cat "$work/cycles"
    [ -s "$work/sorted" ] && [ ! -s "$work/cycles" ]
}
sizes() {       # DIR: lines and name of each part
    ( cd "$1" && wc -l $(parts .) $(cuda_parts .) $(train_parts .) \
        $(trainer_parts $programs) ) | sed '/ total$/d'
}
small() {       # DIR
    sizes "$1" | awk '$1 > 800 { print; bad = 1 } END { exit bad }'
}
short() {       # DIR
    ( cd "$1" && wc -l $programs ) |
        awk '$2 != "total" && $1 > ($2 ~ /pack/ ? 350 : 250) { print; bad = 1 } END { exit bad }'
}
alone() {       # DIR PART [FLAG]
    case $2 in
    *.cuh)
        printf '#include "%s"\n' src/cuda/common.cuh "$2" |
            ( cd "$1" && export CPLUS_INCLUDE_PATH="$root:$root/tests/cuda_host" &&
                $cxx -fsyntax-only -x c++ - ) ;;
    *)
        echo "#include \"$2\"" | ( cd "$1" && $CC -std=c99 $3 -fsyntax-only -I. -Wall -Wextra \
            -Werror -Wno-unused-function -Wno-unused-variable -D_POSIX_C_SOURCE=200809L -x c - ) ;;
    esac
}
refused() {     # WHAT COMMAND..: the command must fail and say WHAT
    what=$1; shift
    ! "$@" > "$work/said" 2>&1 && grep -q "$what" "$work/said"
}

if [ "${1:-}" = --graph ]; then
    { sizes . | sed 's/^/lines /'; facts .; } | awk -v own="$(own_folders | tr '\n' ' ')" '
        function folder(part,    piece) {
            if (part ~ /^examples/) return substr(part, 1, match(part, /\/[^\/]*$/) - 1)
            return split(part, piece, "/") > 2 ? piece[2] : "top"
        }
        $1 == "lines" { f = folder($3); lines[f] += $2; count[f]++ }
        $1 == "lines" && $2 > largest[f] { largest[f] = $2 }
        $1 == "edge" && folder($2) != folder($3) { edges[folder($2), folder($3)]++ }
        END {
            n = split("api core gemm ops train io lm top cuda examples/train " own, name, " ")
            for (i = 1; i <= n; i++) {
                f = name[i]
                printf "%-18s %2d parts, %5d lines, at most %3d;  includes", f, count[f],
                    lines[f], largest[f]
                none = 1
                for (k = 1; k <= n; k++)
                    if ((f, name[k]) in edges) {
                        printf "%s %s %d", none ? "" : ",", name[k], edges[f, name[k]]
                        none = 0
                    }
                print none ? " nothing" : ""
            }
        }'
    exit 0
fi

check "seqtx.h and seqtx_cuda.cu are made from src/ (if not: make single)" up_to_date "$root"
check "every file in src/, examples/train/ and the folders of programs is included" listed .
check "includes are exactly what is used" exact "$root"
check "no parts include each other" acyclic "$root"
check "no part has more than 800 lines" small .
check "no trainer has more than 250 lines, nor pack.c more than 350" short .
mkdir "$work/tree" && cp -R src examples seqtx*.h "$work/tree"
chmod -R u+w "$work/tree"
CPLUS_INCLUDE_PATH="$root:$root/tests/cuda_host" $cxx -x c++-header src/cuda/common.cuh \
    -o "$work/tree/src/cuda/common.cuh.gch" 2> "$work/log"
for part in $(parts .) $(cuda_parts .) $(train_parts .) $(trainer_parts $programs); do
    check "$part alone" alone "$work/tree" "$part"
done
for part in $(grep -l SEQTX_CUDA $(parts .)) src/train/report.h; do
    check "$part alone, with CUDA" alone "$work/tree" "$part" -DSEQTX_CUDA
done

# Broken rules. `broken` changes FILE in a copy of the tree with a script for sed; COMMAND
# must then fail and say WHAT.
copy() {        # FILE SED-SCRIPT
    rm -rf "$work/copy" && mkdir "$work/copy" &&
        cp -R src tools examples seqtx*.h seqtx_cuda.cu "$work/copy" &&
        chmod -R u+w "$work/copy" &&
        sed "$2" "$1" > "$work/copy/$1" && ! cmp -s "$1" "$work/copy/$1"
}
broken() {      # NAME FILE SED-SCRIPT WHAT COMMAND..
    rule=$1
    check "$rule: the change" copy "$2" "$3"
    shift 3
    check "$rule" refused "$@"
}
there=$work/copy
first='s|^// >>tape|'           # inserts before the section mark of src/core/tape.h

broken "a change that is not in seqtx.h" src/ops/softmax.h 's/stx_softmax/stx_softmax2/' \
    differ up_to_date "$there"
broken "a missing include" src/ops/softmax.h '/core\/tape.h/d' \
    "softmax.h: uses stx__.*, but does not include src/core/tape.h" exact "$there"
broken "an unused include" src/ops/softmax.h 's|^#pragma once|&\n#include "rezero.h"|' \
    "softmax.h: includes src/ops/rezero.h but uses nothing" exact "$there"
broken "an arrow upwards" src/core/tape.h \
    "$first"'#include "../ops/mean.h"\nstatic void *stx__up = (void *)stx__scalar_new;\n&|' \
    "tape.h: includes src/ops/mean.h, but core/ may not use ops/" exact "$there"
broken "a public call upwards" src/core/tape.h \
    "$first"'static void stx__up(stx_ctx *x) { stx_softmax(x, NULL); }\n&|' \
    "tape.h: uses stx_softmax, but core/ may not use ops/" exact "$there"
broken "parts that include each other" src/core/context.h \
    's|^// >>context|#include "tape.h"\n&|' "src/core/context.h" acyclic "$there"
broken "a private kernel without its declaration" src/train/report.h '/api\/private.h/d' \
    "report.h: defines stx__metric_accumulate, but does not include" exact "$there"
broken "the value of an enumerator" src/ops/mse.h \
    's|^// >>mse|enum { STX__ZZ = STX__MAX_HEADS };\n&|' \
    "mse.h: uses STX__MAX_HEADS, but does not include src/ops/attention.h" exact "$there"
broken "a part that is missing" src/core/tape.h "$first"'#include "../core/no.h"\n&|' \
    "src/core/no.h does not exist" sh "$there/tools/single.sh"
broken "a part that does not compile alone" src/ops/softmax.h '/^#include/d' \
    error alone "$there" src/ops/softmax.h
broken "a part that is not included" src/seqtx.h '/ops\/mse.h/d' "src/ops/mse.h" listed "$there"
broken "a long part" src/ops/mse.h '1s/^/\n\n\n\n\n\n\n\n/;s/$/\n\n\n\n\n\n\n\n\n/' \
    "src/ops/mse.h" small "$there"

broken "a trainer's part that lacks an include" examples/sru/checks.h '/lm_results/d' \
    "uses tr_lm_by_token, but does not include examples/train/lm_results.h" exact "$there"
broken "a trainer's part with an unused include" examples/sru/checks.h \
    's|^#include "../train/lm.h"|&\n#include "../train/json.h"|' \
    "includes examples/train/json.h but uses nothing" exact "$there"
broken "a trainer's part that is not included" examples/train_sru.c '/checks\.h/d' \
    "examples/sru/checks.h" listed "$there"
broken "a long trainer" examples/train_sru.c 's/$/\n/' "examples/train_sru.c" short "$there"

check "an include in a condition: the change" copy src/core/tape.h \
    's|^#include "tensors.h"|#ifdef STX__X\n  #include "tensors.h"\n#endif|'
check "it is joined as well" sh "$there/tools/single.sh"
check "and is not left in the file" sh -c '! grep "include \"tensors.h" "$0"' "$there/seqtx.h"

echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
