# check.sh - sourced by tests of programs and scripts. check counts in passed and failed.
passed=0 failed=0
check() { # WHAT COMMAND...
    what=$1; shift
    if "$@" >/dev/null 2>&1; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        echo "FAILED $what: $*"
    fi
}

# xml FILE: well-formed? By xmllint, else by Python, else by a check that every element
# which begins on a line ends there, or is one that contains others.
if command -v xmllint >/dev/null; then xml() { xmllint --noout "$1"; }
elif command -v python3 >/dev/null; then xml() { python3 \
    -c 'import sys, xml.dom.minidom as m; m.parse(sys.argv[1])' "$1"; }
else xml() { [ "$(head -c 5 "$1")" = '<svg ' ] && [ "$(tail -n 1 "$1")" = '</svg>' ] &&
    [ "$(grep -c '<g[ >]' "$1")" -eq "$(grep -c '</g>' "$1")" ]; }
fi
