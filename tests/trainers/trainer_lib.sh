# trainer_lib.sh - functions of trainer.sh: running a trainer, reading its files,
# and checks that several parts use. The caller sets $here (this directory) and $bin (the
# trainer) and sources this file, which changes to $T, a temporary directory that is
# removed at the end.

LC_ALL=C OMP_WAIT_POLICY=passive
export LC_ALL OMP_WAIT_POLICY
. "$here/../limit.sh"
unset LD_PRELOAD TRAINER_COUNT TRAINER_DIE_AT TRAINER_FULL_AT TRAINER_FILE
case $bin in /*) ;; *) bin=$PWD/$bin ;; esac
passed=0 failed=0 running=

T=$(mktemp -d) || exit 1
finish() {
    if [ -n "$running" ]; then
        kill -9 "$running" 2>/dev/null
        wait "$running" 2>/dev/null
        running=
    fi
    cd / && chmod -R u+rwx "$T" 2>/dev/null; rm -rf "$T"
}
trap finish EXIT
trap 'exit 129' HUP; trap 'exit 130' INT; trap 'exit 143' TERM
cd "$T" || exit 1

# ---- counting ----

pass() { passed=$((passed + 1)); }
fail() {
    failed=$((failed + 1))
    echo "FAILED [$part] $*"
}
check() { # WHAT COMMAND...: passes if the command succeeds
    what=$1; shift
    if "$@" >/dev/null 2>&1; then pass; else fail "$what: $*"; fi
}
part=
section() {
    now=$(date +%s)
    [ -z "$part" ] || echo "  $part: $((now - since)) s"
    part=$1 since=$now
}

# ---- running ----

run() { # DIR OPTIONS...: runs the trainer there; leaves $rc, $T/out, $T/err
    dir=$1; shift
    (cd "$dir" && exec $limited "$bin" "$@") >"$T/out" 2>"$T/err" </dev/null
    rc=$?
}
good() { # WHAT DIR OPTIONS...: must succeed
    what=$1; shift
    run "$@"
    if [ $rc -eq 0 ]; then pass; else fail "$what: exit code $rc: $(head -c 300 "$T/err")"; fi
}
start() { # DIR OPTIONS...: the same in the background, as $running
    dir=$1; shift
    (cd "$dir" && exec "$bin" "$@") >"$T/bg.out" 2>"$T/bg.err" </dev/null &
    running=$!
}
collect() { # waits for $running; leaves $rc
    wait "$running" 2>/dev/null
    rc=$?
    running=
}
loads() { run "${1%/*}" --checkpoint "${1##*/}" --no-train --threads 1; [ $rc -eq 0 ]; }
tmps() { find "$1" -name '*.tmp' | wc -l; }
nap() { sleep "$(($1 / 1000)).$(printf %03d $(($1 % 1000)))"; }        # MILLISECONDS
ms_since() { echo $((($(date +%s%N) - $1) / 1000000)); }

# ---- looking into files ----

header_size() {
    od -An -tu1 -N8 "$1" | awk '{ n = $1 + 256 * ($2 + 256 * ($3 + 256 * $4)) } END { print n + 0 }'
}
header() { tail -c +9 "$1" | head -c "$(header_size "$1")"; }
# FILE NAME: the bytes of a tensor
bytes_of() {
    set -- "$1" $(header "$1" |
        sed -n 's/.*"'"$2"'":{[^}]*"data_offsets":\[\([0-9]*\),\([0-9]*\)\].*/\1 \2/p')
    [ $# -eq 3 ] && tail -c +$((9 + $(header_size "$1") + $2)) "$1" | head -c $(($3 - $2))
}
# FILE KEY: a value of the metadata outside of the configuration
meta() { header "$1" | sed 's/.*"'"$2"'":"\([^"]*\)".*/\1/'; }
# Everything in a checkpoint except the options of its run: names, shapes, step,
# positions, and the bytes of all tensors.
state() {
    header "$1" | sed 's/"config":.*","step":/"step":/; s/"seal":"[0-9]*"//; s/ *$//'
    tail -c +$((9 + $(header_size "$1"))) "$1"
}
same_state() {
    [ -s "$1" ] && [ -s "$2" ] && state "$1" >"$T/state1" && state "$2" >"$T/state2" &&
        cmp "$T/state1" "$T/state2"
}
differ() { [ -s "$1" ] && [ -s "$2" ] && ! cmp -s "$1" "$2"; }
# All F32 tensors are finite, and there is at least one. Tensors begin at multiples of
# four bytes.
finite() {
    header "$1" | sed 's/},"/}\
"/g' | sed -n 's/.*"dtype":"F32".*"data_offsets":\[\([0-9]*\),\([0-9]*\)\].*/\1 \2/p' |
        sort -n >"$T/ranges"
    [ -s "$T/ranges" ] || return 1
    tail -c +$((9 + $(header_size "$1"))) "$1" | od -An -v -tf4 | awk '
        FNR == NR { from[++ranges] = $1; to[ranges] = $2; if ($1 % 4) exit bad = 1; next }
        {
            for (i = 1; i <= NF; i++) {
                while (r < ranges && at >= to[r]) r++
                if (at >= from[r] && at < to[r]) { n++; if ($i ~ /[nN]/) bad = 1 }
                at += 4
            }
        }
        END { exit bad || !n }' "$T/ranges" -
}
# FILE [EVENT]: the lines of an event (train) in a log, without values that depend on the
# clock
events() {
    grep '"event":"'"${2:-train}"'"' "$1" |
        sed 's/"tokens_per_s":[^,]*,//; s/"seconds":[^,]*,//; s/"peak_bytes":[^,]*,//'
}
steps_of() { events "$1" | sed 's/.*"step":\([0-9]*\).*/\1/'; }
field() { sed -n 's/.*"'"$1"'":\([^,}]*\).*/\1/p'; }
# Reads JSON lines and prints the keys of each. Exits with 1 at the first line that is not
# a JSON object.
cat >json.awk <<'END'
function eat(re) { if (match(s, re) != 1) return 0; s = substr(s, RLENGTH + 1); return 1 }
function string() { return eat("^\"([^\"\\\\]|\\\\.)*\"") }
function value() {
    if (substr(s, 1, 1) == "{") return object(0)
    if (substr(s, 1, 1) == "\"") return string()
    if (substr(s, 1, 1) == "[") return array()
    if (eat("^(true|false|null)")) return 1
    return eat("^-?(0|[1-9][0-9]*)(\\.[0-9]+)?([eE][-+]?[0-9]+)?")
}
function array() {
    if (!eat("^\\[")) return 0
    if (eat("^\\]")) return 1
    for (;;) {
        if (!value()) return 0
        if (eat("^\\]")) return 1
        if (!eat("^,")) return 0
    }
}
function object(top, before) {
    if (!eat("^{")) return 0
    if (eat("^}")) return 1
    for (;;) {
        before = s
        if (!string()) return 0
        if (top && keys != "") keys = keys ","
        if (top) keys = keys substr(before, 2, length(before) - length(s) - 2)
        if (!eat("^:") || !value()) return 0
        if (eat("^}")) return 1
        if (!eat("^,")) return 0
    }
}
{ s = $0; keys = ""; if (!object(1) || s != "") { print "not JSON: " $0; exit 1 } print keys }
END
json() { [ -s "$1" ] && awk -f "$T/json.awk" "$1" >"$T/keys"; }
only_keys() { # FILE EVENT KEYS: all lines of that event have exactly these keys
    grep '"event":"'"$2"'"' "$1" >"$T/lines" && awk -f "$T/json.awk" "$T/lines" |
        awk -v want="$3" '$0 != want { bad = 1 } END { exit bad || !NR }'
}
# FILE: checks TensorBoard's framing (u64 length, u32, payload, u32) up to the exact end.
# Prints the number of records.
frames() {
    od -An -v -tu1 "$1" | awk '
        { for (i = 1; i <= NF; i++) byte[n++] = $i }
        END {
            at = 0
            while (at < n) {
                if (at + 12 > n) exit 1
                len = byte[at] + 256 * (byte[at + 1] + 256 * (byte[at + 2] + 256 * byte[at + 3]))
                for (i = 4; i < 8; i++) if (byte[at + i]) exit 1
                if (!len) exit 1
                at += 12 + len + 4
                records++
            }
            if (at != n || !records) exit 1
            print records
        }'
}

if [ ! -x "$bin" ]; then
    part=start; fail "$bin does not exist: build it first, or give its path"
    echo "$passed passed, $failed failed"; exit 1
fi
seed=${TRAINER_SEED:-$(od -An -N2 -tu2 /dev/urandom | tr -d ' ')}
echo "random times: TRAINER_SEED=$seed"
awk -v seed="$seed" '
    BEGIN { srand(seed); for (i = 0; i < 400; i++) print int(rand() * 10000) }' >random
rolls=0
# leaves $rand in 0..9999
roll() { rolls=$((rolls + 1)); rand=$(sed -n "${rolls}p" "$T/random"); }

# ---- checks that several parts make; each works in $T ----

# WHAT DIR OPTIONS...: continues a killed run in DIR to its end and checks the result
continued() {
    where=$1 dir=$2; shift 2
    n=$(tmps "$dir")
    if [ "$n" -le 1 ]; then pass; else fail "$where: $n temporary files"; fi
    if [ ! -e "$dir/run.st" ] || loads "$dir/run.st"; then
        pass
    else
        fail "$where: the checkpoint does not load: $(head -c 300 "$T/err")"
    fi
    good "$where, resumed" "$dir" "$@"
    check "$where: bit-identical to the uninterrupted run" cmp whole/run.st "$dir/run.st"
    check "$where: no temporary checkpoint is left" \
        [ "$(find "$dir" -name 'run.st.*.tmp' | wc -l)" -eq 0 ]
    # A run that was killed before its first save starts again, with another "start" in
    # the log. The lines before it are kept.
    awk '/"event":"start"/ { kept = "" } { kept = kept $0 "\n" } END { printf "%s", kept }' \
        "$dir/log.jsonl" >last.jsonl
    events whole/log.jsonl >want; events last.jsonl >got
    check "$where: the log equals that of the uninterrupted run, no step twice" cmp want got
    events whole/log.jsonl eval >want; events "$dir/log.jsonl" eval | awk '!seen[$0]++' >got
    check "$where: evaluations equal those of the uninterrupted run" cmp want got
}

# Builds the library that kills at exact calls, and runs the trainer with OPTIONS in DIR
# to count the calls. Leaves $calls, and $kills if everything works.
exact_kills() { # DIR OPTIONS...
    dir=$1; shift
    kills= calls=0
    ${CC:-cc} -shared -fPIC "$here/trainer_kill.c" -o "$T/kill.so" -ldl >/dev/null 2>&1 || return
    mkdir "$dir"
    (cd "$dir" && TRAINER_COUNT=$T/calls LD_PRELOAD=$T/kill.so exec "$bin" "$@") >/dev/null 2>&1
    if [ -s "$T/calls" ] && [ "$(cat "$T/calls")" -gt 100 ]; then
        kills=1 calls=$(cat "$T/calls")
    fi
}

# NAME OPTIONS...: a run repeats bit-exactly, and 25 + 25 steps equal 50. One epoch is
# about 46 steps.
variant() {
    name=$1; shift
    rm -rf v1 v2 v3; mkdir v1 v2 v3
    good "$name" v1 --checkpoint run.st "$@" --steps 50
    good "$name, again" v2 --checkpoint run.st "$@" --steps 50
    check "$name: a run repeats bit-exactly" cmp v1/run.st v2/run.st
    check "$name: finite" finite v1/run.st
    good "$name, 25 steps" v3 --checkpoint run.st "$@" --steps 25
    check "$name: 25 steps differ" differ v1/run.st v3/run.st
    good "$name, 25 more" v3 --checkpoint run.st "$@" --steps 50
    check "$name: 25 + 25 steps equal 50, bit-exactly" cmp v1/run.st v3/run.st
}

# All files here with name, type, size and change time, to the tick of the kernel clock:
# any write is visible.
files_now() { find . -printf '%p %i %y %m %n %s %T@ %C@\n' 2>/dev/null; }
# PATTERN OPTIONS...: expects exit code 2, one line on standard error with PATTERN,
# nothing on standard output, and no file written or changed
refused() {
    pattern=$1; shift
    files_now >"$T/before"
    run . "$@"
    files_now >"$T/after"
    told=$(head -c 400 "$T/err")
    [ $rc -eq 2 ] && pass || fail "exit code $rc instead of 2: $* ($told)"
    [ "$(wc -l <"$T/err")" -eq 1 ] && [ ! -s "$T/out" ] && pass ||
        fail "expected one line on standard error and no other output: $* ($told)"
    grep -qi -e "$pattern" "$T/err" && pass ||
        fail "the message does not have '$pattern': $* ($told)"
    if [ -s "$T/before" ] && cmp -s "$T/before" "$T/after"; then pass; else
        fail "something was written: $*: $(diff "$T/before" "$T/after" | grep '^[<>]' | head -n 3)"
        rm -rf L.jsonl TB C.st
    fi
}
