#!/bin/sh
# commands.sh - checks that every command in an indented line of README.md and docs/*.md
# works. Runs them in a copy of the tree with small texts: trainings are short, presets
# are only counted (--dry-run), and commands with mpirun or a GPU run as one process on
# the CPU. For make, the targets must exist. An unknown command fails. Blocks between ```
# are run by the tests that their pages name (tests/build/cookbook.sh, distributed.sh,
# convert.sh). Scripts and make targets that a sentence names in `..` must exist. The
# tables of docs/log.md must have every field of the log. Needs the programs of
# `make examples`.
cd "$(dirname "$0")/../.." || exit 1
. tests/limit.sh
root=$(pwd) build=$(cd "${BUILD:-build}" && pwd)
pages="README.md $(echo docs/*.md)"
work=$(mktemp -d "${TMPDIR:-/tmp}/seqtx-commands.XXXXXX") || exit 1
[ -n "$KEEP" ] || trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM
unset MAKEFLAGS MAKELEVEL MFLAGS
passed=0 failed=0
check() { # WHAT COMMAND..
    what=$1; shift
    if "$@" > "$work/log" 2>&1; then passed=$((passed + 1)); return; fi
    failed=$((failed + 1))
    echo "FAILED $what"; tail -n 4 "$work/log"
}

ln -s "$build" "$work/build"
mkdir "$work/enwik8"
awk 'BEGIN { for (i = 0; i < 500; i++) print "the cat sat on mat " i % 7 " and the dog ran" }' > \
    "$work/my.txt"
for f in mine.txt letter.txt enwik8/train.txt enwik8/valid.txt enwik8/test.txt; do
    cp "$work/my.txt" "$work/$f"
done
sed -n '/^```c$/,/^```$/p' README.md | sed '1d; /^```/,$d' > "$work/prog.c"  # the first program

has_target() { # GOAL
    case $1 in
    build/*) return 0 ;;
    *) sed -n '/^\.PHONY: /,/[^\\]$/p' Makefile | tr ' \t\\' '\n\n\n' | grep -qx -e "$1" ;;
    esac
}
targets() { # COMMAND of make
    for word in $1; do
        case $word in make | *=*) ;; *) has_target "$word" || return 1 ;; esac
    done
}
in_tree() { # COMMAND
    (cd "$work" && $limited sh -ec "$1" < /dev/null)
}
# Prints the lines that begin with a program, one per line, without trailing explanations.
commands() {
    awk '/^```/ { fenced = !fenced; next }
        fenced { next }
        more { sub(/^ */, ""); line = line " " $0; more = 0 }
        !more && line == "" && /^    (make|build\/|sh |cc |gcc |python3? |pip |tools\/)/ {
            line = substr($0, 5)
        }
        !more && line == "" && /^    (mpirun |torchrun |srun |cmake )/ { line = substr($0, 5) }
        line == "" { next }
        line ~ /\\$/ { sub(/ *\\$/, "", line); more = 1; next }
        { sub(/   *#.*/, "", line); print line; line = "" }' "$1"
}
# the benchmarks' scripts: their --help, and the sources that they compile
for script in run run_cuda learn claims trainers/compress trainers/curve \
    trainers/curve_comp trainers/curve_sru trainers/par trainers/wikitext2; do
    check "bench/$script.sh --help" \
        sh -c "said=\$(sh bench/$script.sh --help 2>&1) && [ \${#said} -gt 200 ]"
done
for source in $(grep -oh 'bench/[a-z_/$]*\.\([ch]\|py\)' bench/*.sh bench/*/*.sh |
    sed 's/\$name/sru/; /\$/d' | sort -u); do
    check "$source, which a script of bench/ names" [ -f "$source" ]
done
count=0
for page in $pages; do
    commands "$page" > "$work/commands"
    while IFS= read -r command; do
        count=$((count + 1))
        case $command in
        make*) check "$page: $command: no such target" targets "$command" ;;
        "tools/convert.py IN OUT "*) ;; # a usage line; tests/io/convert.sh has examples
        "gcc "*-muse-unaligned-vector-move*)
            if command -v x86_64-w64-mingw32-gcc > /dev/null 2>&1; then
                check "$page: $command" in_tree "x86_64-w64-mingw32-$command -fsyntax-only -I$root"
            fi ;;
        *build/train_* | *build/cuda/train_*)
            run=build/$(echo "${command#*build/}" |
                sed 's|^cuda/||; s|--device cuda||; s|--data FILE|--data my.txt|
                    s|--data enwik8 |--data enwik8/ |')
            case " $run " in
            *" --preset "* | *" --out runs/"*) run="$run --dry-run" ;;
            *" --data "*) run="$run --steps 20" ;;
            esac
            check "$page: $command" in_tree "$run" ;;
        build/plot*) check "$page: $command" in_tree "$command" ;;
        *) check "$page: $command: no test runs it" false ;;
        esac
    done < "$work/commands"
done
check "expected at least 20 commands in the pages, got $count" [ $count -ge 20 ]
for page in $pages; do
    case $page in
    docs/cookbook.md | docs/distributed.md | docs/convert.md | docs/pack.md) continue ;;
    esac
    check "$page has a block of commands that no test runs" sh -c "! grep -n '^\`\`\`sh' '$page'"
done
# scripts and targets that sentences name
for page in $pages CHANGELOG.md; do
    grep -o '`[^`]*`' "$page" | tr -d '`' > "$work/named"
    while IFS= read -r command; do
        case $command in
        "sh "[a-z]*.sh*)
            script=${command#sh }
            check "$page names $command, which does not exist" [ -f "${script%% *}" ] ;;
        "make "[a-z]*)
            word=${command#make }
            word=${word%% *}
            case $word in *=* | *.*) continue ;; esac
            [ "$page" = CHANGELOG.md ] ||
                check "$page names $command, which is not a target" has_target "$word" ;;
        esac
    done < "$work/named"
done
# docs/log.md: every field that the trainers write, and every curve, is in its tables
sources="$(ls examples/train/lm*.h examples/par/*.h examples/sru/*.h examples/compressive/*.h \
    examples/attn_span/*.h examples/train_*.c)"
# Prints "EVENT FIELD". Trainers add fields to the "train" line that tr_lm_log_due begins.
awk 'FNR == 1 { event = "train" }
    /^ *(if \(.*\) )?tr_log_begin\(/ {
        event = ""
        for (line = $0; match(line, /"[a-z]+"/); line = substr(line, RSTART + RLENGTH))
            event = event (event == "" ? "" : ", ") substr(line, RSTART + 1, RLENGTH - 2)
        next
    }
    /log_(int|num|str|json|list)\(.*;|log_(int|num|str)\([^"]*"/ {
        if (match($0, /log_[a-z]+\([^",]*, "[a-z_]+"/)) {
            field = substr($0, RSTART, RLENGTH)
            sub(/^[^"]*"/, "", field)
            print event ":" substr(field, 1, length(field) - 1)
        }
        else if ($0 ~ /tr_lm_unit\(t\)/) print event ":UNIT"
        else if ($0 ~ /way\[k\]/) print event ":WAY"
    }
    /tr_log_end\(/ { event = "train" }' $sources | sort -u > "$work/fields"
awk -F '|' '/^\| `[a-z, `]*` \| `[A-Za-z_]*` \|/ {
    gsub(/[` ]/, "", $3); gsub(/`/, "", $2); gsub(/^ | $/, "", $2); print $2 ":" $3
    }' docs/log.md | sort -u > "$work/documented"
check "docs/log.md has the fields of the log: $(comm -3 "$work/fields" "$work/documented" |
    tr -s '\t\n' ' ')" cmp "$work/fields" "$work/documented"
grep -h 'tr_lm_point(\|snprintf(tag\|snprintf(text, sizeof text, "[a-z]*/' $sources |
    grep -o '"[a-z%]*/[a-z_%]*"' | sed 's/"//g; s/%z*u*s*u*/%/g; s/%%$/%/; s/\(loss\|batches\)%$/\1/
        s/%_layer_%/loss_layer_%\ncompression\/ratio_layer_%/' | sort -u > "$work/curves"
sed -n '/^## TensorBoard/,$p' docs/log.md | grep -o '^| `.*` |' |
    grep -o '`[A-Za-z_]*/[A-Za-z_]*`' | sed 's/`//g; s/[A-Z][A-Z]*/%/g' | sort -u > "$work/documented"
check "docs/log.md has the curves of TensorBoard: $(comm -3 "$work/curves" "$work/documented" |
    tr -s '\t\n' ' ')" cmp "$work/curves" "$work/documented"
check "docs/log.md has at least 40 fields" [ "$(wc -l < "$work/fields")" -ge 40 ]
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
