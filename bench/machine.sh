# machine.sh - sourced by run.sh and other scripts in the repository's root. Sets cpu,
# cores, vector, class (for file names) and commit for a report; free_result returns a
# file name.
cpu=$(sed -n 's/^model name[^:]*: *//p' /proc/cpuinfo 2>/dev/null | head -n 1)
[ -n "$cpu" ] || cpu=$(sysctl -n machdep.cpu.brand_string 2>/dev/null || uname -m)
cores=$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1)
vector=$(sed -n 's/^flags[^:]*: *//p' /proc/cpuinfo 2>/dev/null | head -n 1 | tr ' ' '\n' |
    grep -E '^(avx2|avx512f|avx512_bf16|amx_tile|amx_bf16)$' | tr '\n' ' ')
class=$(printf '%s-%sc' "$cpu" "$cores" | tr '[:upper:]' '[:lower:]' |
    sed 's/([^)]*)//g; s/@.*-/-/; s/[^a-z0-9]\{1,\}/-/g; s/^-//')
commit=$(git rev-parse --short HEAD 2>/dev/null || echo unknown)
git diff --quiet HEAD -- '*.h' 'bench/*.c' bench/peers examples 2>/dev/null ||
    commit="$commit, with uncommitted changes"

# free_result [WHAT-] [-KIND]: prints bench/results/WHAT-DATE-MACHINE-KIND without .md.
# Adds -2, -3 .. if there already is a report of that name.
free_result() {
    mkdir -p bench/results
    base=bench/results/$1$(date +%Y-%m-%d)-$class${2:-} again=1
    while [ -e "$base$([ $again = 1 ] || echo "-$again").md" ]; do again=$((again + 1)); done
    echo "$base$([ $again = 1 ] || echo "-$again")"
}
