#!/bin/sh
# demo_data.sh OUT - writes the text of the demos, about 1 MB: the English of this
# repository. It consists of the documentation, without tables and code, and of the longer
# comments in the sources, without formulas. The files are in a fixed shuffled order, so
# that the held-out end of the text resembles the rest. Another text: make demo DATA=FILE.
set -eu
out=$1 new=$1.tmp.$$        # another program may be making it, too
root=$(cd "$(dirname "$0")/.." && pwd)
case $out in /*) ;; *) out=$PWD/$out new=$PWD/$new ;; esac
cd "$root"
# a fixed shuffle: sorted by a checksum of the name
find README.md CHANGELOG.md CONTRIBUTING.md docs bench tests examples tools src seqtx_*.h \
    -type f \( -name '*.md' -o -name '*.[ch]' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' \) \
    ! -path 'bench/results/*' ! -name seqtx_cuda.cu 2>/dev/null |
    while IFS= read -r f; do
        sum=$(printf '%s' "$f" | cksum)
        printf '%010d %s\n' "${sum%% *}" "$f"
    done | LC_ALL=C sort | cut -c12- |
    while IFS= read -r f; do
        case $f in
        *.md) LC_ALL=C awk '
            /^ *```/ { code = !code; next }
            code || /^    / || /^ *[|<]/ { next }
            NF || before { print }
            { before = NF }' "$f" ;;
        *) LC_ALL=C awk '
            function end() {
                if (length(text) > 80) print text "\n"
                text = ""
                on = 0
            }
            !on && /^ *\/\*/ { on = 1; match($0, /^ */); indent = RLENGTH + 3 }
            on {
                line = $0
                last = index(line, "*/")
                if (last) line = substr(line, 1, last - 1)
                match(line, /^ */)
                formula = RLENGTH > indent + 2
                sub(/^ *(\/\*)? */, "", line)
                sub(/ *$/, "", line)
                if (line != "" && !formula) text = text (text == "" ? "" : "\n") line
                if (last) end()
            }' "$f" ;;
        esac
    done >"$new" || true
[ -s "$new" ] || {
    echo "demo_data.sh: the documentation could not be read: give a text, as in:" \
        "make demo DATA=FILE" >&2
    rm -f "$new"
    exit 1
}
mv "$new" "$out"
