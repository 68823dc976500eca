# limit.sh - the one limit of all tests: LIMIT seconds, after which a program that hangs
# is ended (exit code 124). It decides nothing else, and is long enough for a machine that
# does twenty things at once. Scripts in tests/ source it.
LIMIT=${LIMIT:-1800}
export LIMIT
limited="timeout -k 60 $LIMIT"              # $limited PROGRAM..
command -v timeout > /dev/null 2>&1 || limited=
wait_until() { # COMMAND..: until it gives 0; gives 1 where that does not come
    polls=$((LIMIT * 20))
    until "$@"; do
        polls=$((polls - 1))
        [ "$polls" -gt 0 ] || return 1
        sleep 0.05
    done
}
