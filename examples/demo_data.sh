#!/bin/sh
# demo_data.sh OUT - writes real text that every machine with a C compiler has: up to 6 MB
# of the headers under /usr/include. The files are in a fixed shuffled order, so that the
# held-out end of the text resembles the rest. Runs of blanks and of empty lines are
# merged, because text with long runs is easy to predict and dull to read. Another text:
# make demo DATA=FILE.
set -eu
out=$1 new=$1.tmp.$$        # another program may be making it, too
dir=${2:-/usr/include}
list=$(for d in "$dir" "$dir/linux" "$dir/asm-generic" "$dir/$(uname -m)-linux-gnu"; do
    [ -d "$d" ] || continue
    if [ "$d" = "$dir" ]; then find "$d/" -maxdepth 1 -type f -name '*.h'; else find "$d/" -type f \
        -name '*.h'; fi
done)
[ -n "$list" ] || { echo "demo_data.sh: no headers under $dir: give a text, as in:" \
    "make demo DATA=FILE" >&2; exit 1; }
# a fixed shuffle: sorted by a checksum of the name
printf '%s\n' "$list" | while IFS= read -r f; do
    sum=$(printf '%s' "${f#"$dir"}" | cksum); printf '%010d %s\n' "${sum%% *}" "$f"
done | LC_ALL=C sort | cut -c12- | while IFS= read -r f; do cat "$f"; done |
    tr '\t' ' ' | tr -s ' ' | sed 's/ $//' | awk 'NF || before { print } { before = NF }' |
    head -c 6000000 > "$new" || true
[ -s "$new" ] || {
    echo "demo_data.sh: the headers under $dir could not be read: give a text, as in:" \
        "make demo DATA=FILE" >&2
    rm -f "$new"
    exit 1
}
mv "$new" "$out"
