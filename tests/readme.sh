#!/bin/sh
# readme.sh - the C program of the README compiles as it stands and learns; its table of lines is true.
cd "$(dirname "$0")/.." || exit 1
passed=0 failed=0
check() { if [ "$1" -eq 0 ]; then passed=$((passed + 1)); else failed=$((failed + 1)); echo "FAILED: $2"; fi; }
sed -n '/^```c$/,/^```$/p' README.md | grep -v '^```' > build/readme.c
${CC:-cc} -std=c99 -O2 -Wall -Wextra -Wpedantic -Werror -I. build/readme.c -o build/readme -lm
check $? "the README's program does not compile"
build/readme > build/readme.txt
check $? "the README's program fails"
loss=$(sed -n 's/^step 200: \([0-9.]*\) nats.*/\1/p' build/readme.txt)
awk -v l="${loss:-9}" 'BEGIN { exit !(l < 0.1) }'
check $? "the README's program does not learn: '$loss'"
for f in seqtx.h seqtx_attn_span.h seqtx_sru.h seqtx_cuda.cu; do
    lines=$(wc -l < $f)
    awk -F'|' -v f="\`$f\`" -v n="$lines" 'index($2, f) { gsub(/[ ,]/, "", $5); ok = $5 > n * 0.95 && $5 < n * 1.05 } END { exit !ok }' README.md
    check $? "README: the lines of $f ($lines) are not what the table says"
done
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
