#!/bin/sh
# man.sh DIR PROGRAM... - makes the manual pages DIR/NAME.1 from the --help all of
# each program; that of plot is seqtx-plot.1. Programs that do not run here (built for another
# system) get no page.
set -eu
dir=$1
shift
mkdir -p "$dir"
version=$(sed -n 's/^.define STX_VERSION  *"\(.*\)"/\1/p' seqtx.h)
for program; do
    name=$(basename "$program" .exe)
    [ "$name" != plot ] || name=seqtx-plot
    if "$program" --help all > "$dir/help" 2> /dev/null; then
        awk -v name="$name" -v version="$version" -f package/man.awk "$dir/help" > "$dir/$name.1"
    else
        echo "  no $name.1: $program does not run here"
    fi
done
rm -f "$dir/help"
