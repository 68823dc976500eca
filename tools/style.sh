#!/bin/sh
# style.sh - measures the layout of C source. With --check, fails if a limit is exceeded.
#
#     sh tools/style.sh [FILE...]          a table, one row per file (default: all C and CUDA)
#     sh tools/style.sh --check [FILE...]  also prints violations as FILE:LINE: WHAT; exits
#                                          with 1 if there are any
#
# Columns of the table:
#     lines, blank %   all lines; share of blank ones
#     code>100         lines with code wider than 100 columns, unless marked "style: table"
#     text>90          lines that are only a comment and are wider than 90 columns
#     glued            definitions that start on the line below a closing brace in column 0
#     multi            lines with two or more statements. Not counted: a one-line function,
#                      struct or enum, "case X: statement; break;", and the semicolons of a for
#     nested           conditional operators inside the branch of another one
#     forward          static functions that are declared before they are defined
#     functions, median, p90, max    number of functions, and their lengths in lines
#
# A data table may be wider: "style: table" in a comment starts one, "style: end" ends it.
cd "$(dirname "$0")/.." || exit 1
check=0
[ "$1" = --check ] && { check=1; shift; }
[ $# -gt 0 ] || set -- seqtx*.h seqtx_cuda.cu examples/*.[ch] examples/*/*.[ch] \
    examples/*.cpp tests/*.[ch] tests/*/*.[ch] tests/*/*/*.[ch] tests/*/*.cpp bench/*.[ch] \
    bench/*/*.[ch]
printf '%-34s %6s %6s %8s %7s %5s %5s %6s %7s %9s %6s %4s %4s\n' \
    file lines blank 'code>100' 'text>90' glued multi nested forward functions median p90 max
code=0
for file in "$@"; do
    [ -f "$file" ] || continue
    awk -v file="$file" -v check=$check -f tools/style.awk "$file" || code=1
done
exit $code
