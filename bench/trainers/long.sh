# long.sh - sourced by learn.sh, ablate.sh, claims.sh, compress.sh, wikitext2.sh and par.sh
# in the repository's root: long runs that resume after an interruption, and their texts.
# The caller sets script (its name) and out (the directory of its runs), and before
# compile, programs. The names run, running, now and began are reserved for this file.

LC_ALL=C        # decimal points
export LC_ALL
refuse() {
    echo "$script: $*" >&2
    exit 2
}

# number OPTION VALUE: VALUE must be a whole number above 0
number() {
    case ${2:-} in
    ''|*[!0-9]*|0*) refuse "$1: expected a whole number above 0" ;;
    esac
}

# word OPTION VALUE: VALUE must be usable as a file name or a list
word() {
    case ${2:-} in
    ''|-*|*[!A-Za-z0-9_./,-]*) refuse "$1: expected a value of letters, digits and _ . / , -" ;;
    esac
}

# bf16 if the processor has bf16 instructions, otherwise f32
usual_precision() {
    if grep -Eq 'avx512_bf16|amx_bf16' /proc/cpuinfo 2>/dev/null; then
        echo bf16
    else
        echo f32
    fi
}

# compile PROGRAM..: makes them in $programs, where --minutes is processor time, unless the
# user names a folder of PROGRAMS
compile() {
    [ -z "${PROGRAMS:-}" ] || return 0
    targets=
    for target in "$@"; do targets="$targets $programs/$target"; done
    # shellcheck disable=SC2086     # words
    make -s BUILD="$programs" CPPFLAGS="${CPPFLAGS:-} -DTR_PROCESSOR_TIME" $targets
}

# learn_text NAME: makes $out/text/NAME/train.txt and valid.txt from $DATA. learn.sh
# describes the texts
learn_text() {
    to=$out/text/$1
    if [ -s "$to/valid.txt" ]; then return; fi
    mkdir -p "$to"
    case $1 in
    tinyshakespeare) from=$DATA/tinyshakespeare/input.txt ;;
    enwik8)
        from=$DATA/enwik8/train.txt
        for f in "$DATA"/enwik/enwik8*; do [ -f "$from" ] || [ ! -f "$f" ] || from=$f; done ;;
    books) from=$DATA/books/train.txt ;;
    esac
    [ -r "$from" ] || refuse "$from cannot be read: see --help for the texts"
    case $1 in
    books) cat "$from" >"$to/train.txt" && cat "$DATA/books/valid.txt" >"$to/valid.txt" ;;
    *)
        size=$(($(wc -c <"$from")))
        [ "$1" != enwik8 ] || size=4000000
        [ "$size" -le $(($(wc -c <"$from"))) ] || refuse "$from has less than $size bytes"
        train=$((size * 9 / 10))
        head -c $train "$from" >"$to/train.txt"
        head -c "$size" "$from" | tail -c +$((train + 1)) >"$to/valid.txt" ;;
    esac
}

# Sets now: processor time of all children that have ended, in hundredths of a second.
# Must not be called in a subshell, which has other children.
seconds() {
    times >"$out/times.$$"
    now=$(awk '
        NR == 2 {
            for (i = 1; i <= 2; i++) { split($i, t, "m"); s += 60 * t[1] + t[2] }
            printf "%.0f\n", 100 * s
        }' "$out/times.$$")
    rm -f "$out/times.$$"
}

# Adds the cost of the run since it began to RUN.spent: wall-clock seconds, processor
# seconds, number of stops, and number of ends after which the processor seconds are
# unknown.
account() {
    seconds
    echo $((wall + $(date +%s) - since)) $((spent + (now - began + 50) / 100)) $((stops + $1)) \
        $unknown >"$run.spent"
    rm -f "$run.began"
}

# At the end of the script: stops a run that is still active, which saves, and keeps its
# time. A run has received Ctrl-C itself, and a second signal would end it without saving.
signal=
stopped() {
    [ -n "$running" ] || return 0
    waited=0
    while [ "$signal" = INT ] && [ $waited -lt 60 ] && kill -0 "$running" 2>/dev/null; do
        sleep 1
        waited=$((waited + 1))
    done
    kill "$running" 2>/dev/null || :
    wait "$running" || :
    account 1
    echo "$script: stopped; the same command resumes from the last checkpoint" >&2
}

# timed RUN COMMAND...: writes stdout to RUN.txt and stderr to RUN.err. Adds to RUN.spent
# if RUN.safetensors is left from an interrupted run.
running=
timed() {
    run=$1 wall=0 spent=0 stops=0 unknown=0 code=0
    shift
    if [ -f "$run.safetensors" ]; then
        [ ! -f "$run.spent" ] || read -r wall spent stops unknown <"$run.spent"
        [ ! -f "$run.began" ] || unknown=$((unknown + 1))
    fi
    seconds
    began=$now since=$(date +%s)
    echo "$since" >"$run.began"
    trap stopped EXIT
    trap 'signal=INT; exit 130' INT
    trap 'signal=TERM; exit 143' TERM
    "$@" >"$run.txt" 2>>"$run.err" &
    running=$!
    wait "$running" || code=$?
    running=
    account $((code != 0))
    [ "$code" = 0 ] ||
        { echo "$script: $run ended with $code: $(tail -n 1 "$run.err")" >&2; exit "$code"; }
}

# settle SETTINGS: a directory holds runs of one set of settings. A run that has begun has
# a .txt
settle() {
    begun=
    for file in "$out"/*.txt; do [ ! -f "$file" ] || begun=1; done
    if [ -n "$begun" ] && [ -f "$out/settings" ] && [ "$1" != "$(cat "$out/settings")" ]; then
        {
            echo "$script: $out contains runs with other settings or texts: give another --out"
            cat "$out/settings"
            echo "$1"
        } >&2
        exit 2
    fi
    echo "$1" >"$out/settings"
}

# build TRAINER: compiles it as its head describes
build() {
    $CC -std=c99 ${CFLAGS:--O3} -pthread "examples/$1.c" -o "$out/$1.$$" -lm
    mv "$out/$1.$$" "$out/$1"
}

# same NAME FILE..: refuses files that differ from those that the runs in out began with.
# Must be called before any link to the files is made.
same() {
    name=$1
    shift
    sums=$(sum "$@")
    if [ -f "$out/text/$name" ] && [ "$sums" != "$(cat "$out/text/$name")" ]; then
        refuse "$out contains runs on other texts than $DATA: give another --out"
    fi
    echo "$sums" >"$out/text/$name"
}

# texts: links out/text/{train,valid,test}.txt to the files of DATA
texts() {
    for part in train valid test; do
        [ -r "${DATA:-}/$part.txt" ] ||
            refuse "set DATA=DIRECTORY with train.txt, valid.txt, test.txt:" \
                "'${DATA:-}/$part.txt' cannot be read"
    done
    DATA=$(cd "$DATA" && pwd -P)
    mkdir -p "$out/text"
    [ "$DATA" != "$(cd "$out/text" && pwd -P)" ] ||
        refuse "$DATA is the output of this script: give another --out"
    same sums "$DATA/train.txt" "$DATA/valid.txt" "$DATA/test.txt"
    for part in train valid test; do ln -sf "$DATA/$part.txt" "$out/text/$part.txt"; done
}

# pieces N [OPTION..]: makes out/text/pieces.vocab and out/text/ids/, the texts as ids of
# N pieces, with SentencePiece's library. If own_ids is set, links those of DATA instead.
pieces() {
    count=$1
    shift
    if [ -n "$own_ids" ]; then
        for file in pieces.vocab ids/train.txt ids/valid.txt ids/test.txt; do
            [ -r "$DATA/$file" ] || refuse "--ids: $DATA/$file cannot be read" \
                "(examples/get_data.sh wikitext-2-pieces makes it)"
        done
        same sums-of-ids "$DATA/pieces.vocab" "$DATA/ids/train.txt" "$DATA/ids/valid.txt" \
            "$DATA/ids/test.txt"
        ln -sf "$DATA/pieces.vocab" "$out/text/pieces.vocab"
        mkdir -p "$out/text/ids"
        for part in train valid test; do
            ln -sf "$DATA/ids/$part.txt" "$out/text/ids/$part.txt"
        done
        return 0
    fi
    if [ -f "$out/text/ids/test.txt" ]; then return 0; fi
    work=$out/text/pieces.$$
    mkdir "$work"
    ${CXX:-c++} -O1 -std=c++17 -c examples/spm.cpp -o "$work/spm.o" 2>"$work/err" &&
        $CC -std=c99 -O1 -pthread -DSEQTX_SENTENCEPIECE examples/spm_train.c "$work/spm.o" \
            -o "$work/spm_train" ${SENTENCEPIECE_LIBS:--lsentencepiece_train -lsentencepiece} \
            -lstdc++ -lm 2>>"$work/err" || {
        why=$(grep -m 1 'error\|cannot find' "$work/err" || echo "see examples/spm_train.c")
        rm -rf "$work"
        refuse "SentencePiece's library cannot be used ($why):" \
            "install it (Debian: libsentencepiece-dev), or give --ids"
    }
    echo "$(date +%H:%M) $count pieces of the training text .."
    "$work/spm_train" --text "$out/text/train.txt" --model "$work/pieces" --vocab "$count" "$@" ||
        exit 2
    mkdir "$work/ids"
    for part in train valid test; do
        "$work/spm_train" --model "$work/pieces" --encode \
            "$out/text/$part.txt" >"$work/ids/$part.txt" || exit 1
    done
    if [ ! -d "$out/text/ids" ]; then           # unless another script was faster
        mv "$work/pieces.model" "$work/pieces.vocab" "$out/text/"
        mv "$work/ids" "$out/text/ids"
    fi
    rm -rf "$work"
}

# sum FILE..: one checksum; tokens FILE: number of words and line ends; ids FILE: number
# of ids
sum() { cat "$@" | cksum | tr ' ' -; }
tokens() { awk '{ n += NF + 1 } END { printf "%d\n", n }' "$1"; }
ids() { awk '{ n += NF } END { printf "%d\n", n }' "$1"; }

# field KEY FILE, text KEY FILE: the number, the string of KEY in the last line that has
# it
field() { sed -n 's/.*"'"$1"'":\([-+0-9.e]*\)[,}].*/\1/p' "$2" | tail -n 1; }

# held_out LOG: the steps, the parameters and the last held-out loss of a run, separated by
# tabs; fails if the log lacks one of them
held_out() {
    grep '"event":"eval","split":"valid"' "$1" >"$1.eval" || return 1
    set -- "$(field step "$1.eval")" "$(field params "$1")" "$(field loss "$1.eval")"
    [ -n "$1" ] && [ -n "$2" ] && [ -n "$3" ] || return 1
    printf '%s\t%s\t%.5f' "$1" "$2" "$3"
}
text() { sed -n 's/.*"'"$1"'":"\([^"]*\)".*/\1/p' "$2" | tail -n 1; }

# demo_text: sets DATA to a small text for a trial, made from the files of this repository
demo_text() {
    [ -s build/demo.txt ] || sh examples/demo_data.sh build/demo.txt
    DATA=$out/demo
    mkdir -p "$DATA"
    head -c 200000 build/demo.txt >"$DATA/train.txt"
    tail -c 40000 build/demo.txt | head -c 20000 >"$DATA/valid.txt"
    tail -c 20000 build/demo.txt >"$DATA/test.txt"
}

# record NAME FILE..: copies the report and the concatenated files to bench/results/
record() {
    target=$(free_result "$1-")
    shift
    cp "$out/report.md" "$target.md"
    cat "$@" >"$target.json"
    echo "written: $target.md, $target.json"
}
