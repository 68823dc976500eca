#!/bin/sh
# run.sh - runs the tests that `make test` has built. make schedules them; this script
# runs one program and adds up all results.
#   run.sh NAME COMMAND...          runs a test program and keeps its output in
#                                   BUILD/ran/NAME.out; the last line of a test is
#                                   "N passed, N failed"
#   run.sh --skip NAME WHY          the test cannot run here
#   run.sh --time COMMAND...        runs a compiler and records its seconds
#   run.sh --sum [--quick] NAME...  prints one line per name, failures, seconds by part,
#                                   and at the end "N passed, N failed"
cd "$(dirname "$0")/.." || exit 1
# tests request too much memory on purpose
export ASAN_OPTIONS=allocator_may_return_null=1${ASAN_OPTIONS:+:$ASAN_OPTIONS}
. tests/limit.sh
ran=${BUILD:-build}/ran
mkdir -p "$ran"

# the processor time of a process that has ended, in seconds, from the output of `times`
# for children
cpu() { awk '
    NR == 2 {
        for (i = 1; i <= 2; i++) { split($i, t, "m"); s += 60 * t[1] + t[2] } printf "%.1f\n", s
    }' "$1"; rm -f "$1"; }

case $1 in
--time)
    shift
    "$@"
    code=$?
    times > "$ran/$$.times"
    target=
    while [ $# -gt 1 ]; do [ "$1" = -o ] && target=$2; shift; done
    echo "$target $(cpu "$ran/$$.times")" >> "$ran/compiled"
    exit $code ;;
--skip)
    printf '%-28s skipped: %s\n' "$2" "$3" | tee "$ran/$2.line"
    exit ;;
--sum) ;;
*)
    name=$1; shift
    start=$(date +%s)
    # scripts limit the programs that they run
    case $1 in sh | env) "$@" ;; *) $limited "$@" ;; esac > "$ran/$name.out" 2>&1
    code=$?
    times > "$ran/$name.times"
    line=$(tail -n 1 "$ran/$name.out")
    p=$(printf '%s\n' "$line" | sed -n 's/^\([0-9][0-9]*\) passed, \([0-9][0-9]*\) failed.*$/\1/p')
    f=$(printf '%s\n' "$line" | sed -n 's/^\([0-9][0-9]*\) passed, \([0-9][0-9]*\) failed.*$/\2/p')
    if [ -z "$p" ] || { [ "$code" -ne 0 ] && [ "$f" -eq 0 ]; } || [ "$((p + f))" -eq 0 ]; then
        p=${p:-0} f=$((${f:-0} + 1))
    fi
    echo "$p $f $code $(cpu "$ran/$name.times")" > "$ran/$name.count"
    printf '%-28s %6d passed %4d failed %4ds\n' "$name" "$p" "$f" "$(($(date +%s) - start))" |
        tee "$ran/$name.line"
    exit 0 ;;       # the other tests run, and --sum fails
esac

shift
quick=
[ "$1" = --quick ] && { quick=1; shift; }
echo
passed=0 failed=0 bad=
for name in "$@"; do
    if [ ! -f "$ran/$name.line" ]; then
        printf '%-28s did not run\n' "$name"
        failed=$((failed + 1))
        continue
    fi
    cat "$ran/$name.line"
    [ -f "$ran/$name.count" ] || continue
    read -r p f code seconds < "$ran/$name.count"
    passed=$((passed + p)) failed=$((failed + f))
    [ "$f" -eq 0 ] || bad="$bad $name"
done
# every existing test has run
[ -n "$quick" ] || for file in tests/*/test_*.c tests/*/test_*.cpp; do
    name=$(basename "${file%.c*}"); name=${name#test_}
    found=
    for n in "$@"; do
        case $n in "$name" | "$name"_f64 | "$name"_san | cuda_host) found=1;; esac
    done
    [ -n "$found" ] ||
        { echo "$file was not run: the Makefile does not know it"; failed=$((failed + 1)); }
done
# one time limit for all: a test with another limit depends on the load of the machine
[ -n "$quick" ] || for file in tests/*.sh tests/*/*.sh tests/*/*.py; do
    own=$(grep -n -e 'timeout  *[0-9]' -e 'timeout -k [0-9]* [0-9]' -e 'timeout=[0-9]' "$file" |
        head -n 1)
    [ -z "$own" ] || { echo "$file has a separate limit, not that of tests/limit.sh:" \
        "$own"; failed=$((failed + 1)); }
done
# seconds by part
for name in "$@"; do [ -f "$ran/$name.count" ] && echo "run:$name" \
    "$(sed 's/.* //' "$ran/$name.count")"; done | cat - "$ran/compiled" 2>/dev/null |
    awk -v began="$(cat "$ran/began" 2>/dev/null)" -v now="$(date +%s)" '
    { part = "compiling trainers"
      if ($1 ~ /^run:form/) part = "forms of the headers (form.sh)"
      else if ($1 ~ /^run:cuda_nvcc|^run:cuda_nccl/) part = "nvcc"
      else if ($1 ~ /^run:trainer|^run:cuda_trainer/) part = "tests of the trainers"
      else if ($1 ~ /^run:.*_san$/) part = "test programs, sanitizers"
      else if ($1 ~ /^run:cuda/) part = "test programs, CUDA on the host"
      else if ($1 ~ /^run:/) part = "test programs"
      else if ($1 ~ /lib_/) part = "compiling the library"
      else if ($1 ~ /cuda_kernels|cuda_host/) part = "compiling CUDA on the host"
      else if ($1 ~ /test_|fuzz/) part = "compiling test programs"
      if (!(part in sum)) order[++n] = part
      sum[part] += $2; all += $2 }
    END { printf "\nprocessor seconds by part\n"
          for (i = 1; i <= n; i++) printf "  %-34s %6.1f\n", order[i], sum[order[i]]
          printf "  %-34s %6.1f", "all", all
          if (began) printf ", %d by the clock", now - began
          printf "\n\n" }'
# failures come last, so that a truncated log shows them
for name in $bad; do
    read -r p f code seconds < "$ran/$name.count"
    echo "$name, $f failed, exit code $code:"
    {
        grep 'FAILED\|ERROR\|runtime error' "$ran/$name.out" ||
            grep -v ' passed, ' "$ran/$name.out" | tail -n 30
    } | head -n 30
    echo
done
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
