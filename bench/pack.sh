#!/bin/sh
# pack.sh [options] - how small does examples/pack.c make files, beside other compressors?
# Prints a table: bits per byte, and processor seconds to pack and unpack.
#
#     LOG=FILE JSON=FOLDER ENWIK8=FILE sh bench/pack.sh           all parts, then the report
#     sh bench/pack.sh --only check                               one part
#     sh bench/pack.sh --report [--record]                        report of finished parts
#
#     --only LIST     of log,json,code (records), files, check
#     --minutes N     processor minutes of training for each kind of record (default 10)
#     --sizes LIST    first bytes of ENWIK8 to pack (default 1000000,3000000)
#     --test BYTES    at most this much of the records (default 300000)
#     --tune          measure on the tuning records; DIR/tune.tsv gets the rows, no report
#     --out DIR       data, models and results (default build/pack)
#     --report        no runs
#     --record        also write bench/results/pack.md
#
# Records are blocks of 2048 bytes, each packed by itself. Each kind of text is divided into
# three parts that have nothing in common: the text for training, which their model and the
# dictionary of zstd see; tuning records, to choose the constants of pack.c; and the records
# of the report, which no choice may depend on:
#
#     log    LOG (default /var/log/dpkg.log): the first three fifths of the file are for
#            training, the fourth for the report, the last for tuning
#     json   files examples-1.json in the folder JSON, botocore/data of PyPI's botocore
#            1.43.11: of each ten files, the eighth is for the report, the last for tuning
#     code   the C and CUDA sources of this repository: a hash of a file's name decides; a
#            sixteenth for the report, another for tuning
#
# pack is measured with the model alone, and with the training text (the last five million
# bytes of it) as its dictionary. zstd's sizes are those without magic number and checksum.
# `files` packs the beginning of ENWIK8 without a model. `check` packs and unpacks each file
# of the repository, 1000 random files and, if there is an aarch64 compiler and qemu, unpacks
# on 64-bit ARM what was packed here. A model is trained again if DIR/KIND/trained is deleted.
# PROGRAMS: as in bench/learn.sh, with pack.
set -eu
cd "$(dirname "$0")/.."
only="log json code files check" minutes=10 sizes="1000000 3000000" test=300000
out=build/pack report= record= records=test script=pack.sh
programs=${PROGRAMS:-${BUILD:-build}/processor_time}
. bench/trainers/long.sh
while [ $# -gt 0 ]; do
    case $1 in
    --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p;}' bench/pack.sh; exit 0 ;;
    --report) report=1 ;;
    --record) record=1 ;;
    --tune) records=tune ;;
    --minutes | --test)
        number "$1" "${2:-}"
        if [ "$1" = --test ]; then test=$2; else minutes=$2; fi
        shift ;;
    --only | --sizes | --out)
        word "$1" "${2:-}"
        list=$(echo "$2" | tr , ' ')
        case $1 in
        --only) only=$list ;;
        --sizes) sizes=$list ;;
        --out) out=$2 ;;
        esac
        shift ;;
    *) refuse "unknown option $1 (--help)" ;;
    esac
    shift
done
pack=$programs/pack rows=$out/rows.tsv
[ $records = test ] || rows=$out/tune.tsv
mkdir -p "$out"
[ -s "$rows" ] || printf 'text\tsystem\tbytes\tpacked\tpack_s\tunpack_s\n' >"$rows"

# timed COMMAND..: sets spent to its processor seconds; 7z and zpaq print a lot
timed() {
    seconds
    began=$now
    "$@" >"$out/said" 2>&1 || refuse "$* failed: $(tail -n 1 "$out/said")"
    seconds
    spent=$(awk -v t=$((now - began)) 'BEGIN { printf "%.2f", t / 100 }')
}

# row TEXT SYSTEM BYTES PACKED PACK_S UNPACK_S: replaces the row of the same run
row() {
    awk -F'\t' -v t="$1" -v s="$2" '$1 != t || $2 != s' "$rows" >"$rows.new"
    printf '%s\t%s\t%s\t%s\t%s\t%s\n' "$@" >>"$rows.new"
    mv "$rows.new" "$rows"
}

size() { echo $(($(wc -c <"$1"))); }

# packed TEXT NAME OPTIONS..: a row of build/pack for the file $file
packed() {
    text=$1 name=$2
    shift 2
    timed "$pack" -f "$@" -o "$out/p" "$file"
    a=$spent
    timed "$pack" -d -f "$@" -o "$out/u" "$out/p"
    cmp "$file" "$out/u" || refuse "$name: $file is not the same after unpacking"
    row "$text" "$name" "$(size "$file")" "$(size "$out/p")" "$a" "$spent"
}

# split_text KIND: makes train.txt, tune.txt and test.txt in $out/KIND
split_text() {
    a=$out/$1
    mkdir -p "$a"
    case $1 in
    log)
        from=${LOG:-/var/log/dpkg.log}
        [ -r "$from" ] || refuse "set LOG=FILE: $from cannot be read"
        n=$(($(wc -c <"$from") / 5))
        head -c $((3 * n)) "$from" >"$a/train.txt"
        tail -c +$((3 * n + 1)) "$from" | head -c $n >"$a/test.txt"
        tail -c +$((4 * n + 1)) "$from" >"$a/tune.txt" ;;
    json)
        [ -n "${JSON:-}" ] || refuse "set JSON=FOLDER (--help)"
        find "$JSON" -name examples-1.json | sort | awk '{ print NR % 10, $0 }' >"$out/list"
        parts "$a" 8 0 ;;
    code)
        git ls-files '*.c' '*.h' '*.cu' '*.cuh' | grep -v '^seqtx.h\|^seqtx_cuda.cu' | awk '
            {
                h = 0
                for (i = 1; i <= length($0); i++)
                    h = (31 * h + index("abcdefghijklmnopqrstuvwxyz_./0123456789",
                                        substr($0, i, 1))) % 9973
                print h % 16, $0
            }' >"$out/list"
        parts "$a" 11 15 ;;
    esac
    [ -s "$a/train.txt" ] && [ -s "$a/tune.txt" ] && [ -s "$a/test.txt" ] \
        || refuse "$1: there is no text"
}

# parts DIR TEST TUNE: joins the files of $out/list, lines NUMBER FILE, by their numbers
parts() {
    awk -v a="$2" -v b="$3" '$1 != a && $1 != b { print $2 }' "$out/list" |
        xargs cat >"$1/train.txt"
    awk -v a="$2" '$1 == a { print $2 }' "$out/list" | xargs cat >"$1/test.txt"
    awk -v b="$3" '$1 == b { print $2 }' "$out/list" | xargs cat >"$1/tune.txt"
}

records() { # KIND
    [ -s "$out/$1/test.txt" ] || split_text "$1"
    compile train_sru pack
    model=$out/$1/run/model.best.safetensors file=$out/$1/records
    [ -e "$out/$1/trained" ] || "$programs/train_sru" --data "$out/$1/train.txt" --threads 1 \
        --minutes "$minutes" --nlayers 3 --hid-sz 384 --out "$out/$1/run" >"$out/$1/said" 2>&1 \
        || refuse "train_sru: $(tail -n 1 "$out/$1/said")"
    : >"$out/$1/trained"        # a repeated run uses the same model
    head -c "$test" "$out/$1/$records.txt" >"$file"
    tail -c 5000000 "$out/$1/train.txt" >"$out/$1/dictionary"
    packed "$1" pack -m "$model" --records 2048 -t 1
    packed "$1" "pack --dictionary" -m "$model" --dictionary "$out/$1/dictionary" \
        --records 2048 -t 1

    rm -rf "$out/blocks"
    mkdir "$out/blocks"
    split -b 2048 -a 4 "$out/$1/train.txt" "$out/blocks/t"
    zstd -q --train "$out/blocks/"t* --maxdict=112640 -f -o "$out/$1/zstd" 2>/dev/null
    rm "$out/blocks/"*
    split -b 2048 -a 4 "$file" "$out/blocks/b"
    n=$(find "$out/blocks" -type f | wc -l)
    for level in 3 19; do
        timed zstd -q -f -$level --no-check -D "$out/$1/zstd" "$out/blocks/"b????
        a=$spent sum=$(cat "$out/blocks/"*.zst | wc -c)
        timed zstd -q -d -f -D "$out/$1/zstd" "$out/blocks/"*.zst
        row "$1" "zstd -$level, dictionary" "$(size "$file")" $((sum - 4 * n)) "$a" "$spent"
    done
    for other in "xz -9e" "brotli -q 11"; do
        sum=0
        seconds
        began=$now
        for block in "$out/blocks/"b????; do sum=$((sum + $($other -c "$block" | wc -c))); done
        seconds
        row "$1" "$other" "$(size "$file")" $sum \
            "$(awk -v t=$((now - began)) 'BEGIN { printf "%.2f", t / 100 }')" -
    done
}

# other TEXT NAME PACK.. -- UNPACK..: a row for a compressor of whole files; {} is the file
other() {
    text=$1 name=$2
    rm -rf "$out/o"*
    timed sh -c "$3"
    a=$spent
    to=$(size "$out/o.z")
    timed sh -c "$4"
    cmp "$file" "$out/o" || refuse "$name: $file is not the same after unpacking"
    row "$text" "$name" "$(size "$file")" "$to" "$a" "$spent"
}

files() {
    [ -r "${ENWIK8:-}" ] || refuse "set ENWIK8=FILE: enwik8 or its beginning"
    compile pack
    for n in $sizes; do
        file=$out/enwik8.$n
        head -c "$n" "$ENWIK8" >"$file"
        o=$out/o
        other "enwik8, $n" "xz -9e" "xz -9e -c $file >$o.z" "xz -d -c $o.z >$o"
        other "enwik8, $n" "zstd -19" "zstd -q -19 $file -o $o.z" "zstd -q -d $o.z -o $o"
        other "enwik8, $n" "brotli -q 11" "brotli -q 11 -w 24 $file -o $o.z" \
            "brotli -d $o.z -o $o"
        other "enwik8, $n" "PPMd (7z)" "7z a -m0=PPMd:o=8:mem=256m $o.7z $file; mv $o.7z $o.z" \
            "7z e -so $o.z >$o"
        other "enwik8, $n" "zpaq -m5" "zpaq add $o.zpaq $file -m5 -t1; mv $o.zpaq $o.z" \
            "mv $o.z $o.zpaq; zpaq extract $o.zpaq $file -to $o -t1"
        packed "enwik8, $n" "pack --adapt" --adapt -t 1
    done
}

# The same bytes after packing and unpacking, for all files of the repository, 1000 random
# ones, and on another processor.
checks() {
    compile train_sru pack
    model=$out/check.safetensors
    [ -s "$model" ] || "$programs/train_sru" --data README.md --steps 100 --hid-sz 64 \
        --nlayers 2 --threads 1 --checkpoint "$model" >"$out/said" 2>&1
    mkdir -p "$out/random"
    awk 'BEGIN { for (i = 0; i < 1000; i++) print i, int(exp(i * 10 / 1000)) }' |
        while read -r i n; do head -c "$n" /dev/urandom >"$out/random/$i"; done
    arm=
    if command -v aarch64-linux-gnu-gcc >/dev/null && command -v qemu-aarch64-static >/dev/null
    then
        arm=$out/pack_aarch64
        [ -s "$arm" ] && [ -z "$(find examples/pack* -newer "$arm")" ] ||
            aarch64-linux-gnu-gcc -O2 -static examples/pack.c -lm -pthread -o "$arm"
    fi
    same=0 arms=0
    { git ls-files; find "$out/random" -type f; } >"$out/list"
    while read -r f; do
        "$pack" -f -m "$model" -t 1 -o "$out/p" "$f"
        "$pack" -d -f -m "$model" -t 2 -o "$out/u" "$out/p"
        cmp "$f" "$out/u" || refuse "$f is not the same after unpacking"
        same=$((same + 1))
        # every 50th file up to 20 KB on ARM, which qemu emulates slowly
        if [ -n "$arm" ] && [ $((same % 50)) = 0 ] && [ "$(size "$f")" -le 20000 ]; then
            qemu-aarch64-static "$arm" -d -f -m "$model" -o "$out/u" "$out/p"
            cmp "$f" "$out/u" || refuse "$f is not the same after unpacking on aarch64"
            arms=$((arms + 1))
        fi
    done <"$out/list"
    printf '%s\t%s\n' $same $arms >"$out/checked.tsv"
}

if [ -z "$report" ]; then
    for what in $only; do
        case $what in
        log | json | code) records $what ;;
        files) files ;;
        check) checks ;;
        *) refuse "--only $what: unknown (--help)" ;;
        esac
    done
fi

table() {
    . bench/machine.sh
    echo "# Packing with a model"
    echo
    echo "\`sh bench/pack.sh\`, commit $commit, one core of $cpu (${vector% }),"
    echo "$(date +%Y-%m-%d). Times are processor seconds. The models of records were trained"
    echo "for $minutes processor minutes each."
    awk -F'\t' '
        NR > 1 && $1 != text {
            text = $1
            printf "\n## %s, %d bytes\n\n", text, $3
            print "| compressor | bytes | bits per byte | s to pack | s to unpack |"
            print "|---|--:|--:|--:|--:|"
        }
        NR > 1 { printf "| %s | %d | %.3f | %s | %s |\n", $2, $4, 8 * $4 / $3, $5, $6 }' "$rows"
    [ ! -s "$out/checked.tsv" ] || awk -F'\t' '{
        print "\n" $1 " files were packed and unpacked, " $2 " of them on aarch64 (qemu)."
    }' "$out/checked.tsv"
}
[ $records = test ] || report='' record=
table
[ -z "$record" ] || table >bench/results/pack.md
