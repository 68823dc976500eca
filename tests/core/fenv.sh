#!/bin/sh
# fenv.sh - checks that every public function that computes outside of loops uses the
# library's floating-point environment: it, or a function that it calls on the way to the
# arithmetic, has an STX__FP_SCOPE. Reads the code of an unoptimised build, in which every
# function and call remains. Loops (stx_parallel) and backward functions are called by
# address and have their scope there. test_fenv.c tests the effect. Skipped if the
# object code is not for x86-64 or there is no objdump.
cd "$(dirname "$0")/../.." || exit 1
work=$(mktemp -d "${TMPDIR:-/tmp}/seqtx-fenv.XXXXXX") || exit 1
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM
CC=${CC:-cc}
passed=0 failed=0

{ echo '#define SEQTX_IMPLEMENTATION'; for h in seqtx*.h; do echo "#include" \
    "\"$h\""; done; } > "$work/all.c"
if ! $CC -std=c99 -O0 -w -I. -c "$work/all.c" -o "$work/all.o"; then
    echo "FAILED the headers do not compile"; echo "0 passed, 1 failed"; exit 1
fi
if ! objdump -dr --no-show-raw-insn "$work/all.o" 2> /dev/null | tr -d '\r' > "$work/all.s" ||
    ! grep -q 'file format elf64-x86-64' "$work/all.s"; then
    echo "skipped: no objdump, or not x86-64"; echo "1 passed, 0 failed"; exit 0
fi
nm "$work/all.o" | sed -n 's/.* T //p' > "$work/public"
# Prints one line per fact: "calls F G", "computes F". A register added to itself ends a
# conversion from size_t and is not counted.
awk '
    /^[0-9a-f]+ <.*>:$/ { f = $2; gsub(/[<>:]/, "", f); next }
    / R_X86_64_/ && call {
        g = $3; sub(/[-+]0x.*/, "", g); print "calls", f, g; call = 0
        if (g ~ /^(exp|log|pow|sqrt|sin|cos|tanh|erfc?|log1p|expm1|ldexp)f?$/) print "computes", f
        next
    }
    { call = $2 ~ /^call/ }
    call && $0 ~ /<stx/ && $NF !~ /\+/ { g = $NF; gsub(/[<>]/, "", g); print "calls", f, g }
    $2 ~ /^(add|sub|mul|div|sqrt|min|max|comi)s[sd]$/ || $2 ~ /^cvt(sd2ss|si2ss|tt?s[sd]2si)/ {
        split($3, r, ","); if (!($2 ~ /^add/ && r[1] == r[2])) print "computes", f }
' "$work/all.s" | sort -u > "$work/facts"
# Follows the calls of each public function, up to functions with a scope.
awk '
    NR == FNR && $1 == "computes" { computes[$2] = 1; next }
    NR == FNR {
        calls[$2] = calls[$2] " " $3
        if ($3 == "stx__fp_enter") scope[$2] = 1
        next
    }
    { list[++n] = $1; from[$1] = $1 }
    END {
        for (i = 1; i <= n; i++) {
            f = list[i]
            if (f in scope) { scopes++; continue }
            if (f in computes) print f ", reached from " from[f]
            m = split(calls[f], to, " ")
            for (k = 1; k <= m; k++)
                if (!(to[k] in from)) { from[to[k]] = from[f]; list[++n] = to[k] }
        }
        print "scopes", scopes + 0, "functions", n
    }' "$work/facts" "$work/public" > "$work/found"
if grep ', reached from' "$work/found"; then
    echo "FAILED these compute in the caller's environment: begin them with STX__FP_SCOPE"
    failed=$((failed + 1))
else passed=$((passed + 1)); fi
# The method works only if there are scopes, and functions besides the public ones.
if tail -n 1 "$work/found" |
    awk '{ exit !($2 > 50 && $4 > 500) }'; then passed=$((passed + 1)); else
    failed=$((failed + 1))
    echo "FAILED $(tail -n 1 "$work/found"): too few, the code was not understood"
fi
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
