#!/bin/sh
# names.sh - the tables of names in the headers' manuals (other programs' checkpoints, and ours) are those of docs/convert.md, which
# tests/test_convert.py compares with what tools/convert.py does.
#   names.sh --write    makes them anew
cd "$(dirname "$0")/.." || exit 1
passed=0 failed=0
work=$(mktemp -d "${TMPDIR:-/tmp}/seqtx-names.XXXXXX") || exit 1
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM

# table SECTION: its rows with the columns aligned, long cells in several lines, none of which is longer than 140 columns
table() {
    awk -F ' *[|] *' -v section="## $1" '
        function most(a, b) { return a > b ? a : b }
        # text, cut at blanks that follow `end`, into part[1 ..] of about width letters; returns how many
        function wrap(text, end, width, part,    n, word, i, k) {
            k = split(text, word, end " "); n = 1; part[1] = word[1]
            for (i = 2; i <= k; i++) {
                part[n] = part[n] end
                if (length(part[n]) + 1 + length(word[i]) > width) part[++n] = word[i]
                else part[n] = part[n] " " word[i]
            }
            return n
        }
        /^## / { on = $0 == section }
        on && /^[|]/ && !/^[|]-/ { gsub(/`/, ""); rows++; for (c = 1; c <= 3; c++) { cell[rows, c] = $(c + 1); w[c] = most(w[c], length($(c + 1))) } }
        END {
            if (w[2] > 46) w[2] = 46
            if (w[3] > 28) w[3] = 28
            for (r = 1; r <= rows; r++) {
                split("", ours); split("", shape)
                n = most(wrap(cell[r, 2], "", w[2], ours), wrap(cell[r, 3], ";", w[3], shape))
                for (i = 1; i <= n; i++) {
                    line = sprintf("       %-" w[1] "s  %-" w[2] "s  %s", i == 1 ? cell[r, 1] : "", ours[i], shape[i])
                    sub(/ +$/, "", line)
                    print line
                }
            }
        }' docs/convert.md
}
# in_header FILE K: the K-th table of a header, from its head to the next empty line
head='^       original  +ours  +shape of the original$'
in_header() { awk -v head="$head" -v k="$2" '$0 ~ head { on = ++n == k } /^$/ { on = 0 } on' "$1"; }

while read -r file k section; do
    table "$section" > "$work/want"
    if [ "$1" = --write ]; then
        awk -v head="$head" -v k="$k" -v table="$work/want" '$0 ~ head { on = ++n == k; if (on) while ((getline line < table) > 0) print line }
            /^$/ { on = 0 } !on' "$file" > "$work/header" && cat "$work/header" > "$file"
        continue
    fi
    in_header "$file" "$k" > "$work/have"
    if [ "$(wc -l < "$work/want")" -gt 20 ] && cmp -s "$work/want" "$work/have"; then passed=$((passed + 1)); else
        failed=$((failed + 1))
        echo "FAILED $file: its table of names is not that of docs/convert.md, $section (tests/names.sh --write makes it so)"
        diff "$work/want" "$work/have" | head -n 6
    fi
done <<END
seqtx_par.h 1 Transformer-XL
seqtx_par.h 2 PAR
END
[ "$1" != --write ] || exit 0
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
