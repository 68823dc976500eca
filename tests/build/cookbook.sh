#!/bin/sh
# cookbook.sh - runs the commands of docs/cookbook.md, block by block, in a copy of the
# tree with small texts and few steps. The line before a block says how it is run:
#   <!-- run: small -->           here, with STEPS, MORE and MINUTES set to small values
#   <!-- run: PROGRAM -->         here, if PROGRAM is installed
#   <!-- run by: tests/FILE -->   by that test, which takes the commands from --print
#   <!-- run: FILE.c -->          is saved as this file, for the blocks that follow
# Uses the programs of build/ that `make` has built; cc links the objects of the library
# instead of compiling them again. (readme.sh runs the commands in the heads of the
# examples.) All other blocks of C must be in examples/own_family.c, line by line.
#   cookbook.sh                   LDLIBS: what the objects of the library were linked with
#   cookbook.sh --print FILE N    prints the N-th block that FILE runs
cd "$(dirname "$0")/../.." || exit 1
. tests/limit.sh
root=$(pwd) page=docs/cookbook.md
# Prints the fenced blocks: number of the block, language, the mark before it, then its
# lines.
blocks() {
    awk '
        /^```/ && !on { on = 1; n++; print "@ " n, substr($0, 4), mark; next }
        /^```/ { on = 0; mark = ""; next } on { print "  " $0; next }
        /^<!-- run/ { mark = $0; gsub(/^<!-- | -->$/, "", mark); next } NF { mark = "" }' $page
}
block() { blocks | awk -v n="$1" '/^@ / { on = $2 == n; next } on { print substr($0, 3) }'; }
if [ "$1" = --print ]; then
    n=$(blocks | grep "^@ [0-9]* sh run by: $2\$" | sed -n "$3p" | cut -d ' ' -f 2)
    [ -n "$n" ] && block "$n"
    exit
fi
build=$(cd "${BUILD:-build}" && pwd)
unset BUILD # in the copy of the tree it is build
work=$(mktemp -d "${TMPDIR:-/tmp}/seqtx-cookbook.XXXXXX") || exit 1
[ -n "$KEEP" ] || trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM
passed=0 failed=0
check() {       # check WHAT COMMAND..
    what=$1; shift
    if "$@" > /dev/null 2>&1; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        echo "FAILED $what"
    fi
}

mkdir "$work/tree" "$work/tree/build" "$work/bin" "$work/home"
tree=$work/tree
cp -R Makefile LICENSE seqtx*.h seqtx_cuda.cu README.md examples package tools "$tree"
chmod -R u+w "$tree"
for program in "$build"/train_* "$build/plot" "$build/attention_map"; do
    [ -x "$program" ] || continue
    case ${program##*/} in
    *.*) ;;
    *) ln -s "$program" "$tree/build/" ;;
    esac
done
awk 'BEGIN { for (i = 0; i < 500; i++) print "the cat sat on mat " i % 7 " and the dog ran" }' > \
    "$tree/my.txt"
awk 'BEGIN { for (i = 0; i < 200; i++) print "the dog sat on mat " i % 5 " and then it ran" }' > \
    "$tree/mine.txt"
cat > "$work/bin/cc" <<END
#!/bin/sh
PATH='$PATH' lib=$build/lib_f32
for word; do case \$word in
    -DSEQTX_DOUBLE) lib=$build/lib_f64 ;;
    -x) exec ${CC:-cc} "\$@" ;;         # the Makefile probes the compiler
esac; done
exec ${CC:-cc} -DSEQTX_IMPLEMENTATION_DONE -DSTX_LOOPS_DONE \\
    -DSEQTX_ATTN_SPAN_IMPLEMENTATION_DONE -DSEQTX_TEXT_IMPLEMENTATION_DONE \\
    -DSEQTX_SRU_IMPLEMENTATION_DONE -DSEQTX_COMPRESSIVE_IMPLEMENTATION_DONE \\
    -DSEQTX_PAR_IMPLEMENTATION_DONE "\$@" \$lib/seqtx*.o -lm -pthread $LDLIBS
END
chmod +x "$work/bin/cc"
commands() {    # commands FILE: runs them in order until one fails
    cd "$tree" || return 1
    unset MAKEFLAGS MAKELEVEL MFLAGS
    STEPS=20 MORE=30 MINUTES=0.02 HOME=$work/home PATH=$work/bin:$PATH T='' $limited sh -e "$1" > \
        "$work/log" 2>&1 < /dev/null
}

blocks | grep '^@' > "$work/list"
last=0
while read -r at n language mark; do
    block "$n" > "$work/block"
    case $language/$mark in
    c/"run: "*) cp "$work/block" "$tree/${mark#run: }" ;;
    c/*)            # after the lines of the last such block, or before them
        while read -r line; do
            [ -z "$line" ] || check "$page, block $n: examples/own_family.c has no line '$line'" \
                grep -qF -- "$line" examples/own_family.c
        done < "$work/block" ;;
    sh/"run by: "*)
        check "$page, block $n: ${mark#run by: } does not run it" \
            grep -q 'cookbook' "${mark#run by: }" ;;
    sh/"run: "*)
        need=${mark#run: }
        if [ "$need" != small ] && ! command -v "$need" > /dev/null 2>&1; then
            echo "skipped: block $n, no $need"
            continue
        fi
        if (commands "$work/block"); then passed=$((passed + 1)); else
            failed=$((failed + 1))
            echo "FAILED $page, block $n, which begins '$(head -n 1 "$work/block")':"
            tail -n 4 "$work/log"
        fi ;;
    *)
        failed=$((failed + 1))
        echo "FAILED $page, block $n: the line before it does not say who runs it" ;;
    esac
    last=$n
done < "$work/list"
check "$page has only $last blocks" [ "$last" -ge 18 ]

# files that the commands write
for f in runs/first/log.svg runs/first/model.best.safetensors runs/tuned/model.safetensors \
    scores.jsonl answer.txt build/memory.safetensors first.svg spans.svg map.svg map.tsv \
    model.safetensors whole.safetensors; do
    check "there is no $f" [ -s "$tree/$f" ]
done
check "the run did not resume" grep -q '"event":"resume","step":20' "$tree/runs/first/log.jsonl"
check "the fine-tuning does not start with an evaluation" \
    grep -q '"event":"eval","split":"valid",.*"step":0,' "$tree/runs/tuned/log.jsonl"
check "not a row for each line" [ "$(wc -l < "$tree/lines.tsv")" -eq 201 ]

# A restored memory equals that of a process that never stopped: same answers, same file.
cd "$tree" || exit 1
printf 'the cat sat\nand the dog\nthe mat\nand\n' > all
remember() { build/remember build/mind.safetensors "$1"; }
remember whole.st < all > whole
head -n 1 all | remember parts.st > parts
sed -n 2,3p all | remember parts.st >> parts
sed -n 4p all | remember parts.st >> parts
check "remember: four lines" [ "$(grep -c '^[0-9.]*	.' whole)" -eq 4 ]
check "remember: started three times, other answers" cmp whole parts
check "remember: started three times, another memory" cmp whole.st parts.st
remember forgets.st < all > again
tail -n 1 all | remember new.st > alone
check "remember: repeated, other answers" cmp whole again
check "remember: a new memory gives the same answer" [ "$(tail -n 1 whole)" != "$(cat alone)" ]
head -c 300 whole.st > cut.st
remember cut.st < all > out 2> err
check "remember: a damaged memory is accepted" \
    [ $? -eq 1 -a ! -s out -a "$(grep -c '^remember: .*cut.st' err)" -eq 1 ]
build/remember build/other.safetensors other.st my.txt 3 < all > out
cp other.st kept.st
remember other.st < all > out 2> err
check "remember: the memory of another model is accepted" [ $? -eq 1 -a ! -s out ]
check "remember: no message says so" \
    grep -q '^remember: other.st is the memory of another model' err
check "remember: that memory was changed" cmp other.st kept.st

echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
