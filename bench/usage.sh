#!/bin/sh
# usage.sh FILE - prints the options in the C source of a benchmark without compiling it:
# the string literals of "static const char ..usage[]" and "#define LM_USAGE".
awk '
    /^static const char [a-z_]*usage\[\]|^#define LM_USAGE/ { on = 1; next }
    on {
        if ($0 !~ /^ *"/) { on = 0; next }
        ends = /;$/
        sub(/^ *"/, "")
        sub(/"[^"]*$/, "")
        text = text $0
        if (ends) on = 0
    }
    END {
        gsub(/\\n/, "\n", text)
        printf "%s", text
    }' "$1"
