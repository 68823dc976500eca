#!/bin/sh
# install.sh install | install-headers | uninstall - installs the files of `make install`,
# or removes them. Called by the Makefile in the top directory, which sets
#   prefix, bindir, libdir, includedir, datarootdir, mandir, docdir    absolute paths
#   DESTDIR                          prepended to all of them
#   BUILD, PROGRAMS, SHARED, LINKS   the trainers, the shared library and links to it
#   VERSION, LIBS                    for seqtx.pc and the CMake package
set -eu
action=$1
prefix=${prefix%/}
for name in prefix bindir libdir includedir datarootdir mandir docdir; do
    eval "dir=\$$name"
    case ${dir:-/} in
    /*) ;;
    *)
        echo "$name=$dir: give an absolute path, as in $name=$PWD/there" >&2
        exit 2 ;;
    esac
done
headers=$includedir/seqtx pc=$datarootdir/pkgconfig libpc=$libdir/pkgconfig
cmake=$datarootdir/cmake/seqtx man1=$mandir/man1 man7=$mandir/man7

put() { # MODE FILE DIRECTORY [NAME]: installs or removes FILE
    to=$DESTDIR$3/${4:-${2##*/}}
    if [ "$action" = uninstall ]; then
        rm -f "$to"
        return
    fi
    ${INSTALL:-install} -d "$DESTDIR$3"
    ${INSTALL:-install} -m "$1" "$2" "$to"
    echo "  $to"
}
link() { # TARGET DIRECTORY NAME
    to=$DESTDIR$2/$3
    rm -f "$to"
    [ "$action" = uninstall ] || ln -s "$1" "$to"
}
# BASE DIR TARGET: prints the path of TARGET. Relative to BASE, the notation for DIR, if
# both are below prefix, so that the installation can be moved.
path() {
    case $2 in "$prefix"/*) ;; *) echo "$3"; return ;; esac
    case $3 in "$prefix"/*) ;; *) echo "$3"; return ;; esac
    echo "$1$(echo "${2#"$prefix"}" | sed 's|/[^/][^/]*|/..|g')${3#"$prefix"}"
}
quoted() { printf '%s' "$1" | sed 's/[\\|&]/\\&/g'; }       # for the replacement of s|||
filled() { # FILE INCLUDEDIR LIBDIR: prints FILE with its @NAMES@ replaced
    sed "s|@VERSION@|$VERSION|g; s|@INCLUDEDIR@|$(quoted "$2")|g; s|@LIBDIR@|$(quoted "$3")|g
         s|@LIBS@|$(quoted "$(echo $LIBS)")|g" "$1"
}
blanks() { printf '%s' "$1" | sed 's/ /\\ /g'; }            # as in .pc files

work=$(mktemp -d "${TMPDIR:-/tmp}/seqtx-install.XXXXXX")
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM
here='${pcfiledir}'
filled package/seqtx.pc.in "$(blanks "$(path "$here" "$pc" "$headers")")" '' > "$work/seqtx.pc"
filled package/libseqtx.pc.in '' "$(blanks "$(path "$here" "$libpc" "$libdir")")" \
    > "$work/libseqtx.pc"
here='${CMAKE_CURRENT_LIST_DIR}'
filled package/seqtx-config.cmake.in "$(path "$here" "$cmake" "$headers")" \
    "$(path "$here" "$cmake" "$libdir")" > "$work/seqtx-config.cmake"
filled package/seqtx-config-version.cmake.in '' '' > "$work/seqtx-config-version.cmake"

for f in seqtx*.h seqtx_cuda.cu; do put 644 "$f" "$headers"; done
put 644 "$work/seqtx.pc" "$pc"
put 644 "$work/seqtx-config.cmake" "$cmake"
put 644 "$work/seqtx-config-version.cmake" "$cmake"
put 644 LICENSE "$docdir"
if [ "$action" != install-headers ]; then
    case $SHARED in
    *.dll)
        put 755 "$SHARED" "$bindir"
        put 644 "$SHARED.a" "$libdir"
        exe=.exe ;;
    *)
        put 755 "$SHARED" "$libdir"
        for l in $LINKS; do link "${SHARED##*/}" "$libdir" "$l"; done
        exe= ;;
    esac
    put 644 "$BUILD/libseqtx.a" "$libdir"
    put 644 "$work/libseqtx.pc" "$libpc"
    for f in $PROGRAMS; do put 755 "$f$exe" "$bindir"; done
    put 755 "$BUILD/plot$exe" "$bindir" "seqtx-plot$exe"
    put 755 tools/convert.py "$bindir" seqtx-convert
    put 644 package/seqtx.7 "$man7"
    put 644 package/seqtx-convert.1 "$man1"
    for f in $PROGRAMS "$BUILD/seqtx-plot"; do
        page=$BUILD/man/${f##*/}.1
        if [ -f "$page" ] || [ "$action" = uninstall ]; then put 644 "$page" "$man1"; fi
    done
    for f in README.md CHANGELOG.md; do put 644 "$f" "$docdir"; done
    for f in docs/*; do put 644 "$f" "$docdir/docs"; done
fi
if [ "$action" = uninstall ]; then
    for d in "$headers" "$cmake" "$docdir/docs" "$docdir"; do
        rmdir "$DESTDIR$d" 2> /dev/null || true
    done
fi
