#!/bin/sh
# single.sh [DIR] - writes the files that users copy, seqtx.h and seqtx_cuda.cu, from their
# parts in src/, to DIR (default: the top level). A part is inserted where it is first
# included. Later includes of the same part and "#pragma once" are dropped, so the result
# is what a compiler reads. Includes of other files stay. DIR is relative to the top level.
# The second line of the result says where it comes from.
set -eu
cd "$(dirname "$0")/.."
to=${1:-.}

single() {      # ROOT: prints the file with all its parts
    awk -v root="$1" '
        # Returns path without "folder/../".
        function normal(path) {
            while (match(path, /[^\/]+\/\.\.\//))
                path = substr(path, 1, RSTART - 1) substr(path, RSTART + RLENGTH)
            return path
        }

        function is_file(path,    line, found) {
            found = (getline line < path) >= 0
            close(path)
            return found
        }

        function fail(why) {
            print "single.sh: " why > "/dev/stderr"
            exit 1
        }

        # Prints a line. At most two blank lines in a row remain.
        function put(line) {
            blank = line == "" ? blank + 1 : 0
            if (blank < 3) print line
        }

        function insert(path,    line, part, folder, begun) {
            inserted[path] = 1
            folder = path
            sub(/[^\/]*$/, "", folder)
            while ((getline line < path) > 0) {
                sub(/\r$/, "", line)
                if (line == "#pragma once") continue
                if (line ~ /^[ \t]*#[ \t]*include[ \t]*"/) {
                    split(line, piece, "\"")
                    part = normal(folder piece[2])
                    if (part != root && is_file(part)) {
                        if (!(part in inserted)) insert(part)
                        continue
                    }
                    if (piece[2] ~ /\//) fail(path ": " part " does not exist")
                }
                if (path != root && !begun) {
                    if (line == "") continue
                    begun = 1
                    put("")
                    put("")
                    put("/* ---- " path " ---- */")
                }
                put(line)
                if (path == root && !begun++)
                    put("   Generated from " root " and its parts. Edit those, then run make single.")
            }
            close(path)
        }

        BEGIN {
            if (!is_file(root)) fail(root " does not exist")
            insert(root)
        }'
}

for root in src/seqtx.h src/cuda/seqtx_cuda.cu; do
    file=$to/${root##*/}
    single $root > "$file.new"
    cmp -s "$file.new" "$file" && rm "$file.new" || mv "$file.new" "$file"
done
