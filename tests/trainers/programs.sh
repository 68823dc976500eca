# programs.sh - sourced by tests of programs: build is the folder of the programs, here that
# of the tests, T a new folder, which becomes the current one. With check.sh.
here=$(cd "$(dirname "$0")" && pwd)
build=${BUILD:-$here/../../build}
case $build in /*) ;; *) build=$PWD/$build ;; esac
LC_ALL=C; export LC_ALL
T=$(mktemp -d) || exit 1
trap 'cd / && rm -rf "$T"' EXIT
cd "$T" || exit 1
. "$here/check.sh"
