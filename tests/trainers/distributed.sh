#!/bin/sh
# distributed.sh - tests docs/distributed.md. Its commands run in order in a copy of the
# tree with small texts and few steps, with mpicc and Open MPI's mpirun. Its program
# learns, and two ranks learn the same as one. Its SLURM script saves on a signal,
# requeues itself and resumes, with substitutes for srun and scontrol. Ranks on the same
# machine divide its processors. The line before a block says what it is:
#   <!-- run -->           commands
#   <!-- run: srun -->     the SLURM script
#   <!-- file: NAME -->    contents of a file
# Uses build/mpi/train_attn_span and the objects of the library that `make` has built.
cd "$(dirname "$0")/../.." || exit 1
. tests/limit.sh
root=$(pwd) page=docs/distributed.md
build=$(cd "${BUILD:-build}" && pwd)
work=$(mktemp -d "${TMPDIR:-/tmp}/seqtx-distributed.XXXXXX") || exit 1
[ -n "$KEEP" ] || trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1
passed=0 failed=0
check() {       # check WHAT COMMAND..
    what=$1; shift
    if "$@" > "$work/why" 2>&1; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        echo "FAILED $what"
        head -n 4 "$work/why"
    fi
}
open_mpi() { mpirun --version 2> /dev/null | grep -q 'Open MPI'; }
if ! open_mpi; then
    echo "no mpirun of Open MPI: nothing runs"
    echo "1 passed, 0 failed"
    exit 0
fi

blocks() {
    awk '
        /^```/ && !on { on = 1; n++; print "@ " n, mark; next } /^```/ { on = 0; mark = ""; next }
        on { print "  " $0; next }
        /^<!-- (run|file)/ { mark = $0; gsub(/^<!-- | -->$/, "", mark); next }
        NF { mark = "" }' $page
}
block() { blocks | awk -v n="$1" '/^@ / { on = $2 == n; next } on { print substr($0, 3) }'; }
tree=$work/tree
mkdir -p "$tree/build" "$work/bin"
ln -s "$build/mpi/train_attn_span" "$tree/build/"
cp seqtx*.h "$tree"
awk 'BEGIN { for (i = 0; i < 500; i++) print "the cat sat on mat " i % 7 " and the dog ran" }' > \
    "$tree/my.txt"
cat > "$work/bin/mpicc" <<END
#!/bin/sh
PATH='$PATH'
exec ${MPICC:-mpicc} -std=c99 -Wall -Wextra -Werror -DSEQTX_IMPLEMENTATION_DONE \\
    -DSTX_LOOPS_DONE -DSEQTX_ATTN_SPAN_IMPLEMENTATION_DONE "\$@" \\
    $build/lib_mpi/seqtx.o $build/lib_f32/seqtx_attn_span.o -lm -pthread $LDLIBS
END
# A substitute for srun that ignores its options. If the file `when` exists, it signals
# the ranks after a few training steps.
cat > "$work/bin/srun" <<END
#!/bin/sh
while case \$1 in -*) true ;; *) false ;; esac; do shift; done
mpirun -np 2 --bind-to none "\$@" &
pid=\$!
if [ -f '$work/when' ]; then
    . '$root/tests/limit.sh'
    wait_until grep -q -s '"event":"train"' runs/slurm/log.jsonl
    kill -USR1 \$pid
fi
wait \$pid
END
printf '#!/bin/sh\necho "$@" >> "%s/requeued"\n' "$work" > "$work/bin/scontrol"
chmod +x "$work/bin/"*
run() {         # run FILE: runs the commands of a block
    (cd "$tree" && unset MAKEFLAGS MAKELEVEL MFLAGS && STEPS=${STEPS:-20} MORE=30 \
        PATH=$work/bin:$PATH $limited sh "$@" > "$work/log" 2>&1 < /dev/null)
}
blocks | grep '^@' > "$work/list"
ran=0
while read -r at n mark; do
    block "$n" > "$work/block"
    case $mark in
    run)
        if run -e "$work/block"; then passed=$((passed + 1)); else
            failed=$((failed + 1))
            echo "FAILED $page, block $n, which begins '$(head -n 1 "$work/block")':"
            tail -n 4 "$work/log"
        fi
        ran=$((ran + 1)) ;;
    "run: srun") cp "$work/block" "$work/job.sh"; ran=$((ran + 1)) ;;
    "file: "*) cp "$work/block" "$tree/${mark#file: }"; ran=$((ran + 1)) ;;
    *) check "$page, block $n: the line before it does not say what it is" false ;;
    esac
done < "$work/list"
check "$page has $ran blocks, fewer than it had" [ "$ran" -ge 4 ]

cd "$tree" || exit 1
check "the run of two ranks did not resume with four" \
    grep -q '"event":"resume","step":20' runs/ranks/log.jsonl
# the program: losses and parameters of two ranks and of one process
$limited mpirun -np 2 --bind-to none ./prog > two 2> /dev/null
$limited ./prog > one
check "the program does not learn: $(tail -n 1 two)" \
    awk 'END { exit !(NR == 5 && $3 + 0 > 0 && $3 < 0.5) }' two
check "two ranks and one process learn different values: $(paste one two | tail -n 1)" \
    sh -c 'paste one two | awk "{ d = \$3 - \$9; if (d < 0) d = -d }
        d > 2e-3 * \$3 + 1.1e-4 { bad = 1 }
        END { exit bad || NR != 5 }"'
$limited mpirun -np 3 --bind-to none ./prog > out 2>&1
code=$?
check "three ranks and eight streams: exit code 2, got $code" [ $code -eq 2 ]
# the SLURM script: on a signal it saves and requeues itself; started again, it resumes
touch "$work/when"
STEPS=60
export SLURM_JOB_ID=7 SLURM_CPUS_PER_TASK=1
run "$work/job.sh"
code=$?
check "the script after a signal: exit code 138, got $code" [ $code -eq 138 ]
check "the script does not requeue itself" grep -q '^requeue 7$' "$work/requeued"
check "the signal did not end the run early" sh -c '! grep -q "\"step\":60," runs/slurm/log.jsonl'
rm "$work/when"
run "$work/job.sh"
code=$?
check "the restarted script: exit code 0, got $code" [ $code -eq 0 ]
check "the restarted script does not resume" grep -q '"event":"resume"' runs/slurm/log.jsonl
check "the restarted script does not finish the run" \
    grep -q '"event":"train","step":60,' runs/slurm/log.jsonl
check "the finished script requeues itself" [ "$(wc -l < "$work/requeued")" -eq 1 ]

# Thread indices are below stx_threads, for which scratch memory is allocated, also after
# the ranks have divided the processors.
cat > share.c <<'END'
#define SEQTX_IMPLEMENTATION
#include "seqtx.h"
#include <stdio.h>
static int bad;
static void part(const stx_share *s, const void *job) {
    volatile double sum = 0;
    int i;
    for (i = 0; i < 3000000; i++) sum += i;             /* long enough for every thread to get some */
    (void)job;
    if (s->thread >= (size_t)stx_threads(s->x)) bad = 1;
}
int main(void) {
    stx_ctx *x = stx_create(NULL);
    int all = stx_threads(x);
    double threads;
    stx_group_join(x, NULL);
    stx_parallel_units(x, 64, part, NULL);
    threads = stx_threads(x);
    stx_group_sum(x, &threads, 1);
    if (stx_rank(x) == 0) printf("%d ranks, %d processors, %.0f threads\n", stx_ranks(x), all, threads);
    if (!stx_ok(x) || bad || (int)threads > STX_MAX(all, stx_ranks(x))) { stx_group_abort(x, 3); return 3; }
    stx_group_leave(x);
    stx_destroy(x);
    return 0;
}
END
check "share.c does not compile" "$work/bin/mpicc" -O1 -D_POSIX_C_SOURCE=200809L share.c -o share
for np in 2 4; do
    check "$np ranks on the same processors: a thread index is not below stx_threads" \
        $limited mpirun -np $np --bind-to none ./share
done
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
