#!/bin/sh
# readme.sh - tests what README.md and other pages claim. The C programs of README.md
# compile; the first learns, and the second opens a trainer's checkpoint. The parts of README.md, docs/results.md, docs/trainers.md and
# docs/distributed.md between "<!-- made: NAME -->" and "<!-- end -->" equal what this
# script generates from other files: line counts, presets, benchmark results. Each program
# in examples/ compiles by the command in its head. All linked files exist.
#   readme.sh --write    regenerates these parts
cd "$(dirname "$0")/../.." || exit 1
build=${BUILD:-build}
mkdir -p "$build"
passed=0 failed=0

check() { # STATUS MESSAGE: counts a check that ended with STATUS
    if [ "$1" -eq 0 ]; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        echo "FAILED: $2"
    fi
}

lines() {
    echo '| file | lines |'
    echo '|---|--:|'
    for f in seqtx.h seqtx_attn_span.h seqtx_sru.h seqtx_compressive.h seqtx_par.h seqtx_cuda.cu \
        seqtx_text.h; do
        printf '| `%s` | about %d |\n' $f "$((($(wc -l < $f) + 50) / 100 * 100))"
    done
}

# presets TRAINER PUBLISHED [LAYERS]: a table of the output of --list-presets and the
# published results, "PRESET=RESULT;..". LAYERS: title of the column that counts the
# layers
presets() {
    echo "| preset | ${3:-layers} | width | parameters | published |"
    echo '|---|--:|--:|--:|---|'
    "$build/$1" --list-presets | awk -F'\t' -v known="$2" '
        BEGIN {
            n = split(known, a, ";")
            for (i = 1; i <= n; i++) { split(a[i], b, "="); said[b[1]] = b[2] }
        }
        NR > 1 {
            size = $5 >= 99.5e6 ? sprintf("%.0fM", $5 / 1e6) : sprintf("%.1fM", $5 / 1e6)
            printf "| `%s` | %s | %s | %s | %s |\n", $1, $2, $3, size, said[$1]
        }'
}

# results REPORT TITLES: tokens/s of all contenders, one column per training table of a
# report. The fastest value of each precision is bold.
results() {
    file=$1; shift
    awk -F'|' -v titles="$*" '
        function trim(s) { gsub(/^ +| +$/, "", s); return s }
        $2 ~ /^ contender/ { on = $3 ~ /tokens/; tables += on }
        on && $2 ~ /^ (seqtx (f32|bf16)|PyTorch [a-z].*) *$/ &&
            $2 !~ /CBLAS|literal|segment again/ {
            name = trim($2); sub(/, recurrence by autograd/, "", name)
            if (!(name in row)) { row[name] = ++rows; order[rows] = name }
            v[name, tables] = trim($3) + 0
            half = name ~ /bf16/
            if (v[name, tables] > most[half, tables]) most[half, tables] = v[name, tables]
        }
        END {
            n = split(titles, title, ",")
            printf "| tokens/s |"; for (t = 1; t <= n; t++) printf " %s |", title[t]
            printf "\n|---|"; for (t = 1; t <= n; t++) printf "--:|"; printf "\n"
            for (half = 0; half < 2; half++)
                for (i = 1; i <= rows; i++) {
                    name = order[i]
                    if ((name ~ /bf16/) != half) continue
                    for (t = 1; t <= n && !v[name, t]; t++) {}
                    if (t > n) continue
                    printf "| %s |", name
                    for (t = 1; t <= n; t++) {
                        x = v[name, t]
                        printf " %s |", !x ? "-" : x == most[half, t] ? "**" x "**" : x
                    }
                    printf "\n"
                }
        }' "$file"
}

# range: reads a table of results and prints the smallest and largest speedup of seqtx
# over the fastest PyTorch of the same precision
range() {
    tr -d '*' | awk -F'|' '
        function key(i) { return ($2 ~ /bf16/) "," i }
        $2 ~ /seqtx/ { for (i = 3; i < NF; i++) ours[key(i)] = $i + 0 }
        $2 ~ /PyTorch/ {
            for (i = 3; i < NF; i++)
                if ($i + 0 > best[key(i)]) best[key(i)] = $i + 0
        }
        END {
            for (k in ours) {
                r = ours[k] / best[k]
                if (!n++ || r < least) least = r
                if (r > most) most = r
            }
            printf "%.2f to %.2f", least, most
        }'
}
headline() {
    echo '| training | speedup over PyTorch, all sizes and precisions | two cores of | commit |'
    echo '|---|---|---|---|'
    echo "| Sequential Transformer | $(make_part results_attn_span | range) | Zen 5 | 01d3511 |"
    echo "| SRU and SRU++ | $(make_part results_sru | range) | Zen 5 | d29ef75 |"
    echo "| Compressive Transformer | $(make_part results_comp | range) | Xeon with AMX | 0644760 |"
    echo "| Transformer-XL and PAR | $(make_part results_par | range)" \
        "| Xeon without AMX | 3a48185 |"
}
make_part() {
    case $1 in
    lines) lines ;;
    headline) headline ;;
    presets_attn_span)
        known='enwik8_small=dev about 1.3 bpc;enwik8=test 1.02 bpc;text8=test 1.11 bpc'
        known="$known;enwik8_large=test 0.98 bpc;text8_large=test 1.07 bpc"
        known="$known;enwik8_pers_small=test 1.01 bpc;enwik8_pers=test 0.98 bpc"
        known="$known;wiki103_pers=test 19.7 ppl;enwik8_fairseq=test about 1.03 bpc"
        presets train_attn_span "$known" ;;
    presets_sru)
        known='enwik8-base=test 0.974 bpc;enwik8-large=test 0.96 bpc'
        known="$known;enwik8-large-8to1=test 0.953 bpc;wt103-base=test 18.3 ppl"
        known="$known;wt103-large=test 17.4 ppl;wt103-large-8to1=test 17.1 ppl"
        known="$known;wt103-large-k5=test 17.3 ppl;lm1b-base=test 25.1 ppl"
        known="$known;lm1b-large-k5=test 23.5 ppl"
        presets train_sru "$known" ;;
    presets_compressive)
        known='enwik8=test 0.97 bpc;wikitext103=test 17.1 ppl;pg19=test 33.6 ppl'
        presets train_compressive "$known" ;;
    presets_par)
        known='reference=valid 39.4 ppl;enwik8=test 1.06 bpc;enwik8-large=test 0.99 bpc'
        known="$known;text8=test 1.08 bpc;wt103-base=test 24.0 ppl;wt103-large=test 18.3 ppl"
        known="$known;lm1b-large=test 21.8 ppl;par-base=test 22.7 ppl;par-large=test 18.4 ppl"
        known="$known;par-enwik8=test 1.11 bpc;par-text8=test 1.18 bpc"
        presets train_par "$known" blocks ;;
    results_attn_span) results bench/results/2026-11-24-amd-epyc-2c.md \
        'all spans 1024,learned-like spans,short spans' ;;
    results_sru) results bench/results/2026-11-23-amd-epyc-2c-sru.md \
        'SRU++ d 256,SRU++ d 512,`enwik8-fp32-small`,`enwik8-base`,SRU d 1024' ;;
    results_comp) results bench/results/2026-11-22-intel-xeon-processor-2c-comp.md \
        'small,example' ;;
    results_par) results bench/results/2026-11-23-intel-xeon-processor-2c-par.md \
        'par-base,enwik8,wt103' ;;
    ranks_model)
        # the training rows with 8 streams per GPU
        echo '| model | GPUs | network | whole batch | step alone ms | exchange ms | hidden' \
            '| efficiency | speed | efficiency, 4 Mi | speed, 4 Mi |'
        echo '|---|--:|---|--:|--:|--:|--:|--:|--:|--:|--:|'
        awk -F'|' -v OFS='|' '
            /^## / { model = substr($0, 4); on = 0 }
            /^\| GPUs \|.*network/ { on = 1; next }
            on && $4 + 0 == 8 {
                for (i = 2; i <= NF; i++) gsub(/^ +| +$/, " ", $i)
                print "| " model " ", $2, $3, $5, $6, $7, $8, $10, $11, $13, $14, ""
            }' bench/results/ranks-model.md ;;
    results_claim)
        echo '| network | attention | parameters | perplexity per piece, valid | test | step' \
            '| evaluation | token |'
        echo '|---|--:|--:|--:|--:|--:|--:|--:|'
        awk -F'|' -v OFS='|' '
            /^\| (found|xl|par) / {
                gsub(/^ +| +$/, "", $2)
                gsub(/^ +| +$/, "", $3)
                gsub(/\+-/, "±")
                printf "| %s, `%s` |%s|%s|%s|%s|%s|%s|%s|\n", $2, $3, $4, $5, $7, $8, $12, $13, $15
            }' bench/results/par-2026-11-23-intel-xeon-processor-2c.md ;;
    results_orders)
        echo '| report | found | blocks |'
        echo '|---|---|---|'
        for f in bench/results/wikitext2-*.md; do
            found=$(sed -n 's/.*; architecture: \([sfi0-9()]*\).*/\1/p' "$f")
            words=$("$build/train_par" --pattern "$found" --dry-run |
                sed -n 's/^[0-9]* blocks [^:]*: \([^;]*\);.*/\1/p')
            : "${words:?this table needs build/train_par: make examples}"
            echo "| [\`$(basename "$f" .md)\`](../$f) | \`$found\` | $words |"
        done ;;
    results_families) grep '^|' bench/results/families.md ;;
    results_ablate) sed '/^[0-9]/,$d' bench/results/ablate.md ;;
    results_learn_*) grep '^|' "bench/results/learn-${1#results_learn_}.md" ;;
    results_claim_*) cat "bench/results/claim-${1#results_claim_}.md" ;;
    results_weights)
        echo '| ms per token | f32 | bf16 | int8 |'
        echo '|---|--:|--:|--:|'
        awk -F'|' '
            /^## Tokens/ { on = 1 }
            on && $4 ~ /f32|bf16|int8/ {
                gsub(/^ +| +$/, "", $2)
                gsub(/ /, "", $5)
                if ($2) printf "| %s, %.0fM parameters", $2, $3
                printf " | %s", $5
                if ($4 ~ /int8/) print " |"
            }' bench/results/2026-11-24-amd-epyc-zen4-2c-weights.md ;;
    *) echo "no such part: $1" ;;
    esac
}
pages="README.md docs/results.md docs/quality.md docs/trainers.md docs/distributed.md"
parts=0
for page in $pages; do
    for part in $(awk '/^<!-- made: /{ print $3 }' $page); do
        parts=$((parts + 1))
        make_part "$part" > "$build/readme_now.txt"
        awk -v part="$part" '
            /^<!-- end -->/ { on = 0 }
            on { print }
            $0 ~ "^<!-- made: " part " -->" { on = 1 }' $page > "$build/readme_was.txt"
        if [ "$1" = --write ]; then
            awk -v part="$part" -v now="$build/readme_now.txt" '
                /^<!-- end -->/ { on = 0 }
                !on { print }
                $0 ~ "^<!-- made: " part " -->" {
                    on = 1
                    while ((getline line < now) > 0) print line
                }' $page > "$build/readme_new.md"
            cp "$build/readme_new.md" $page
        else
            cmp -s "$build/readme_now.txt" "$build/readme_was.txt"
            same=$?
            differences=$(diff "$build/readme_was.txt" "$build/readme_now.txt" | head -n 6)
            check $same "$page, part $part: differs from what --write makes: $differences"
        fi
    done
done
check "$([ "$parts" -ge 13 ]; echo $?)" "expected at least 13 made parts in the pages, got $parts"
[ "$1" != --write ] || exit 0

# program N: the N-th program of README.md
program() {
    awk -v n="$1" '/^```/ { on = $0 == "```c" && ++seen == n; next } on { print }' README.md
}
done=-DSTX_LOOPS_DONE
for h in seqtx*.h; do
    done="$done -D$(basename "$h" .h | tr a-z A-Z)_IMPLEMENTATION_DONE"
done
for n in 1 2; do
    name=$build/readme_$n
    program $n > "$name.c"
    check "$([ -s "$name.c" ]; echo $?)" "README.md has no program $n"
    # The first is compiled as README.md says. -O1 compiles in a third of the time of -O2, and
    # the program is as fast. The second links the objects of the library.
    objects=
    [ $n -eq 1 ] || objects="$done $build/lib_f32/seqtx*.o $LDLIBS"
    # shellcheck disable=SC2086
    ${CC:-cc} -std=c99 -O1 -Wall -Wextra -Wpedantic -Werror -I. "$name.c" $objects -o "$name" -lm
    check $? "program $n of the README does not compile"
    for cc in gcc clang; do
        command -v $cc > /dev/null 2>&1 ||
            { echo "skipped: the README's programs, no $cc"; continue; }
        warnings="-std=c99 -Wall -Wextra -Wpedantic -Wshadow -Werror -fsyntax-only -I."
        # static: a function that is used but not defined causes a warning
        # shellcheck disable=SC2086
        $cc $warnings -DSEQTX_STATIC -Wno-unused-function "$name.c"
        check $? "program $n of the README does not compile with $cc"
        # the implementation may be in a separate file
        # shellcheck disable=SC2086
        grep -v SEQTX_IMPLEMENTATION "$name.c" | $cc $warnings -x c -
        check $? "program $n of the README does not compile with $cc without the implementation"
    done
done
# in a separate directory: the programs save and open files
rm -rf "$build/readme_run"
mkdir "$build/readme_run"
absolute=$(cd "$build" && pwd)
in_run() { (cd "$build/readme_run" && "$@"); }
in_run "$absolute/readme_1" > "$build/readme.txt"
check $? "the README's program fails"
loss=$(sed -n 's/^step 200: \([0-9.]*\) nats.*/\1/p' "$build/readme.txt")
awk -v l="${loss:-9}" 'BEGIN { exit !(l < 0.1) }'
check $? "the README's program does not learn: '$loss'"
in_run "$absolute/generate" cat.safetensors x > "$build/readme.txt" 2>&1
grep -q 'cat.safetensors: expected a vocabulary' "$build/readme.txt"
check $? "the README's program does not save its model: $(cat "$build/readme.txt")"
# both return 1 and print the error: a directory cannot be written, and a file is missing
rm "$build/readme_run/cat.safetensors"
mkdir "$build/readme_run/cat.safetensors"
for n in 1 2; do
    in_run "$absolute/readme_$n" > "$build/readme.txt" 2> "$build/readme_err.txt"
    [ $? -eq 1 ] && grep -q '[tn].safetensors' "$build/readme_err.txt"
    check $? "program $n of the README fails without an error: $(cat "$build/readme_err.txt")"
done
# the second program continues the text of a trainer's checkpoint, as generate.c does
cp README.md "$build/readme_run/text"
in_run "$absolute/train_attn_span" --data text --checkpoint run.safetensors --steps 30 \
    > /dev/null 2>&1
check $? "the trainer fails"
in_run "$absolute/readme_2" > "$build/readme.txt"
check $? "the README's second program fails"
{ printf 'The '; cat "$build/readme.txt"; } > "$build/readme_2.txt"
in_run "$absolute/generate" run.safetensors "" 20 > "$build/readme.txt"
check $? "examples/generate.c fails without a prompt: $(cat "$build/readme.txt")"
in_run "$absolute/generate" run.safetensors 'The ' 500 0 > "$build/readme.txt"
cmp -s "$build/readme.txt" "$build/readme_2.txt"
check $? "the README's second program continues a text unlike examples/generate.c"
check "$([ "$(wc -c < "$build/readme_2.txt")" -ge 500 ]; echo $?)" \
    "the README's second program writes too little"

# Compiles each example by the command in its head, in a copy of the tree, or next to the
# headers if its head says so; the Makefile links the objects of the library instead. -O0,
# because the same library is optimised in those objects and in the README's program.
# Commands that differ only in the program's name and in the order of their options are
# linked once: in a static library, a function that is used but not defined already causes a
# warning.
linked=
mkdir -p "$build/alone" "$build/flat"
cp seqtx*.h "$build/alone"
cp -R examples "$build/alone"
cp seqtx*.h "$build/flat"
chmod -R u+w "$build/alone" "$build/flat"
for f in examples/*.c; do
    name=$(basename "$f" .c)
    [ "$name" != spm_train ] || continue        # needs another library
    options=$(sed -n "s/^ *cc \(-O[0-9] .*$name\.c .*-o $name\).*/\1/p" "$f" | head -n 1 |
        sed "s/-O[0-9]/-O0/")
    check "$([ -n "$options" ]; echo $?)" "$f does not say how to compile it"
    from=$build/alone/examples
    if grep -q '^#include "seqtx' "$f"; then
        from=$build/flat
        cp "$f" "$from"
        chmod u+w "$from/${f##*/}"
    fi
    form=$(echo "$options" | sed "s/$name/NAME/g" | tr ' ' '\n' | sort | tr '\n' ' ')
    case $linked in
    *"|$form|"*) whole="-DSEQTX_STATIC -Wno-unused-function -fsyntax-only" run=$build/$name ;;
    *) whole='' run=$from/$name linked="$linked|$form|" ;;
    esac
    # shellcheck disable=SC2086
    (cd "$from" && ${CC:-cc} -Wall -Wextra -Werror $whole $options)
    check $? "$f does not compile by the command in its head: $options"
    case $name in
    train_*)
        "$run" --version | grep -q "^$name, seqtx"
        check $? "$f, compiled alone, does not run" ;;
    esac
done

# every file that a page links exists
for page in README.md CHANGELOG.md docs/*.md bench/README.md; do
    for f in $(grep -o '](\([^)h#][^)]*\))' $page | sed 's/^](//; s/)$//; s/#.*//'); do
        [ -e "$(dirname $page)/$f" ]
        check $? "$page links to $f, which does not exist"
    done
done
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
