#!/bin/sh
# get_data.sh - fetches a language-modelling data set, checks it, splits it as in the
# papers
#
#     examples/get_data.sh enwik8|text8|wikitext-2|wikitext-103|wikitext-2-pieces DIR
#
# writes DIR/train.txt, DIR/valid.txt and DIR/test.txt:
#
#   data set      source                                       split
#   enwik8        mattmahoney.net/dc/enwik8.zip                90, 5 and 5 million bytes
#   text8         mattmahoney.net/dc/text8.zip                 the same
#   wikitext-2    wikitext.smerity.com/wikitext-2-v1.zip       wiki.{train,valid,test}.tokens
#   wikitext-103  wikitext.smerity.com/wikitext-103-v1.zip     the same
#
# wikitext-2-pieces is wikitext-2 with pieces made as in PAR's reference: DIR/pieces.model
# and DIR/pieces.vocab, a SentencePiece model of 12,000 pieces, and DIR/ids/train.txt,
# valid.txt, test.txt, the texts as ids of pieces, line by line.
#
#     build/train_par --preset reference --data DIR/ids --tokens ids \
#         --pieces DIR/pieces.vocab
#
# (The original source of WikiText, a bucket of MetaMind, is closed. Its author hosts the
# files at the address above.)
#
# enwik8 and text8 are checked by size and published MD5, WikiText by its published token
# counts: every word between blanks is a token, and every line end is one more (<eos>). A
# second run checks the files and fetches nothing. Existing files with other contents are
# never overwritten. Files are made in a temporary directory inside DIR and renamed at the
# end, so an interruption leaves no partial files.
#
# Needs curl or wget; unzip, bsdtar or python3; md5sum, md5, openssl or python3; for
# pieces spm_train and spm_encode of SentencePiece. Disk space: about twice the size of
# the data (enwik8, text8 240 MB; wikitext-2 20 MB; wikitext-103 750 MB).
#
# SEQTX_DATA_SOURCE=DIRECTORY: takes the archives (with the names above) from there
# instead of the network.
#
# Exit code: 0 success, 1 failure, 2 wrong arguments. No build or test of seqtx calls this
# script.

set -u
LC_ALL=C
export LC_ALL

say() { printf '%s\n' "get_data.sh: $*" >&2; }
die() { say "$*"; exit 1; }
usage() {
    printf '%s\n' "usage: get_data.sh enwik8|text8|wikitext-2|wikitext-103|wikitext-2-pieces DIR" \
                  "fetches a data set and writes DIR/train.txt, DIR/valid.txt and DIR/test.txt"
}
have() { command -v "$1" >/dev/null 2>&1; }

case "${1:-}" in -h|--help) usage; exit 0 ;; esac
if [ $# -ne 2 ] || [ -z "$2" ]; then usage >&2; exit 2; fi
name=$1
dir=$2
case $dir in -*) dir=./$dir ;; esac

pieces=
case $name in
*-pieces) [ "$name" != wikitext-2-pieces ] || { pieces=12000; name=wikitext-2; } ;;
esac
kind=bytes
case $name in
    enwik8)       url=https://mattmahoney.net/dc/enwik8.zip; md5=a1fa5ffddb56f4953e226637dabbb36a ;;
    text8)        url=https://mattmahoney.net/dc/text8.zip;  md5=3bea1919949baf155f99411df5fada7e ;;
    wikitext-2)   url=https://wikitext.smerity.com/wikitext-2-v1.zip; \
        kind=tokens; md5=542ccefacc6c27f945fb54453812b3cd; want="2088628 217646 245569" ;;
    wikitext-103)
        url=https://wikitext.smerity.com/wikitext-103-v1.zip kind=tokens
        md5=9ddaacaf6af0710eda8c456decff7832 want="103227021 217646 245569" ;;
    *)            say "unknown data set '$name'"; usage >&2; exit 2 ;;
esac
archive=${url##*/}

# ---- tools

fetcher=; unpacker=; hasher=; missing=
if [ -z "${SEQTX_DATA_SOURCE:-}" ]; then
    if have curl; then fetcher=curl; elif have \
        wget; then fetcher=wget; else missing="$missing curl (or wget)"; fi
fi
if have unzip; then unpacker=unzip; elif have bsdtar; then unpacker=bsdtar; elif have \
    python3; then unpacker=python3
else missing="$missing${missing:+,} unzip (or bsdtar, or python3)"; fi
if have md5sum; then hasher=md5sum; elif have md5; then hasher=md5; elif have \
    openssl; then hasher=openssl
elif have python3; then hasher=python3
else missing="$missing${missing:+,} md5sum (or md5, openssl, python3)"; fi
if [ -n "$pieces" ]; then
    for tool in spm_train spm_encode; do
        have $tool ||
            missing="$missing${missing:+,} $tool (of SentencePiece; Debian: sentencepiece)"
    done
fi
[ -z "$missing" ] || die "missing on this machine:$missing; install it and run again"

# unpack ARCHIVE MEMBER >FILE
unpack() {
    case $unpacker in
        unzip)   unzip -p "$1" "$2" ;;
        bsdtar)  bsdtar -xOf "$1" "$2" ;;
        python3) python3 -c '
import shutil, sys, zipfile
with zipfile.ZipFile(sys.argv[1]) as z, z.open(sys.argv[2]) as member:
    shutil.copyfileobj(member, sys.stdout.buffer, 1 << 20)' "$1" "$2" ;;
    esac
}

# MD5 of standard input
hash_of() {
    case $hasher in
        md5sum)  md5sum | cut -d' ' -f1 ;;
        md5)     md5 -q ;;
        openssl) openssl md5 | sed 's/.*[ =]//' ;;
        python3) python3 -c '
import hashlib, sys
h = hashlib.md5()
for piece in iter(lambda: sys.stdin.buffer.read(1 << 20), b""):
    h.update(piece)
print(h.hexdigest())' ;;
    esac
}

size_of() { wc -c <"$1" | tr -d ' '; }
tokens_of() { awk '{ n += NF + 1 } END { printf "%d\n", n }' "$1"; }

# check DIRECTORY: do its three files contain this data set? Otherwise sets `why`.
check() {
    why=
    if [ $kind = bytes ]; then
        for pair in train:90000000 valid:5000000 test:5000000; do
            got=$(size_of "$1/${pair%:*}.txt")
            [ "$got" = "${pair#*:}" ] ||
                { why="${pair%:*}.txt has $got bytes, not ${pair#*:}"; return 1; }
        done
        got=$(cat "$1/train.txt" "$1/valid.txt" "$1/test.txt" | hash_of)
        [ "$got" = "$md5" ] || { why="MD5 is $got, not $md5"; return 1; }
    else
        # shellcheck disable=SC2086     # three numbers, meant to be split
        set -- "$1" $want
        for part in train valid test; do
            got=$(tokens_of "$1/$part.txt")
            [ "$got" = "$2" ] || { why="$part.txt has $got tokens, not $2"; return 1; }
            dir_=$1; shift 2; set -- "$dir_" "$@"
        done
    fi
}

# Makes the pieces of the texts in DIR, unless they exist, in a separate directory that is
# renamed at the end.
make_pieces() {
    there=0
    for file in pieces.model pieces.vocab ids/train.txt ids/valid.txt ids/test.txt; do
        if [ -f "$dir/$file" ]; then there=$((there + 1)); fi
    done
    if [ $there -eq 5 ]; then
        got=$(wc -l <"$dir/pieces.vocab" | tr -d ' ')
        [ "$got" = $pieces ] || die "$dir/pieces.vocab has $got pieces, not $pieces: move it," \
            "pieces.model and ids away"
        for part in train valid test; do
            [ "$(wc -l <"$dir/ids/$part.txt")" = "$(wc -l <"$dir/$part.txt")" ] ||
                die "$dir/ids/$part.txt has not as many lines as $dir/$part.txt: move it," \
                    "pieces.model and pieces.vocab away"
        done
        say "its pieces are there, too"
        return 0
    fi
    [ $there -eq 0 ] || die "of pieces.model, pieces.vocab and ids/{train,valid,test}.txt only" \
        "some are in $dir: move them away"
    [ -d "${work:-}" ] || { work=$dir/.get_data.$$; mkdir "$work" || die "cannot make the" \
        "directory $work"; trap 'rm -rf "$work"' EXIT; }
    say "training a SentencePiece model of $pieces pieces: some minutes"
    ln -s ../train.txt "$work/text" || die "cannot make a link in $work"
    mkdir "$work/ids" || die "cannot make the directory $work/ids"
    # Relative names, without blanks or commas whatever DIR is. Options that are not given
    # here have the same defaults as in the reference.
    (cd "$work" && spm_train --input=text --model_prefix=pieces --vocab_size=$pieces \
        --model_type=unigram --normalization_rule_name=nfkc_cf \
        --user_defined_symbols=@-@ --pad_id=0 --bos_id=1 --eos_id=2 --unk_id=3 --pad_piece='[PAD]' \
        --bos_piece='[BOS]' \
        --eos_piece='[EOS]' --unk_piece='[UNK]' --minloglevel=1 >spm.log 2>&1) ||
        die "spm_train: $(tail -n 1 "$work/spm.log")"
    for part in train valid test; do
        spm_encode --model="$work/pieces.model" \
            --output_format=id <"$dir/$part.txt" >"$work/ids/$part.txt" ||
            die "spm_encode could not cut $part.txt"
    done
    mv "$work/ids" "$dir/ids" && mv "$work/pieces.vocab" "$dir/pieces.vocab" &&
        mv "$work/pieces.model" "$dir/pieces.model" ||
        die "cannot write into $dir"
    say "its pieces are ready: $dir/pieces.model, $dir/pieces.vocab, and their numbers in $dir/ids"
}

# ---- is it there already?

there=0
for part in train valid test; do
    if [ -f "$dir/$part.txt" ]; then there=$((there + 1)); fi
done
if [ $there -eq 3 ]; then
    if check "$dir"; then
        say "$name is in $dir already, and whole"
        [ -z "$pieces" ] || make_pieces
        exit 0
    fi
    die "$dir holds other files ($why): move them away or name another directory"
fi

# ---- fetch

mkdir -p "$dir" || die "cannot make the directory $dir"
work=$dir/.get_data.$$
mkdir "$work" || die "cannot make the directory $work"
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

if [ -n "${SEQTX_DATA_SOURCE:-}" ]; then
    zip=$SEQTX_DATA_SOURCE/$archive
    [ -r "$zip" ] || die "cannot read $zip (SEQTX_DATA_SOURCE is set: nothing is fetched)"
else
    zip=$work/$archive
    say "fetching $url"
    case $fetcher in
        curl) curl -fL --retry 3 -o "$zip.part" "$url" || die "curl could not fetch $url" ;;
        wget) wget -O "$zip.part" "$url" || die "wget could not fetch $url" ;;
    esac
    mv "$zip.part" "$zip" || die "cannot rename $zip.part"
fi

# ---- unpack and split

if [ $kind = bytes ]; then
    unpack "$zip" "$name" >"$work/whole" || die "cannot unpack $name from $zip (damaged archive," \
        "or disk full)"
    got=$(size_of "$work/whole")
    [ "$got" = 100000000 ] || die "$name in $zip has $got bytes, not 100000000"
    skip=0
    for pair in train:90 valid:5 test:5; do             # in millions of bytes
        dd if="$work/whole" of="$work/${pair%:*}.txt" bs=1000000 skip=$skip \
            count="${pair#*:}" 2>"$work/dd" ||
            die "cannot write ${pair%:*}.txt: $(cat "$work/dd")"
        skip=$((skip + ${pair#*:}))
    done
else
    # The MD5 is that of the original archive, which is no longer available. The texts are
    # always checked below.
    got=$(hash_of <"$zip")
    [ "$got" = "$md5" ] || say "note: the MD5 of $archive is $got, not the published $md5;" \
        "going by the texts' own counts"
    for part in train valid test; do
        unpack "$zip" "$name/wiki.$part.tokens" >"$work/$part.txt" ||
            die "cannot unpack $name/wiki.$part.tokens from $zip (damaged archive, or disk full)"
    done
fi
check "$work" || die "$zip is not $name as published: $why"

# ---- put in place; a file that an interrupted run left is the same file

for part in train valid test; do
    if [ -e "$dir/$part.txt" ] && ! cmp -s "$work/$part.txt" "$dir/$part.txt"; then
        die "$dir/$part.txt is there with other contents: move it away or name another directory"
    fi
done
for part in train valid test; do
    mv -f "$work/$part.txt" "$dir/$part.txt" || die "cannot write $dir/$part.txt"
done
say "$name is ready: $dir/train.txt, $dir/valid.txt, $dir/test.txt"
[ -z "$pieces" ] || make_pieces
