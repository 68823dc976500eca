#!/bin/sh
# package.sh - tests what packagers and users of other makes rely on. Flags of the
# environment and of the command line reach every command and replace none of the
# Makefile's own, with every feature; short command lines; make -B; builds outside of a
# source tree, which stays unchanged; the files and places of an installation, and what
# remains after removal; the library with pkg-config and CMake; manual pages; the trainers
# by CMake; the recipes in package/; BSD make prints an instruction. Flags are observed with
# compilers that only record how they were called. Skips what is not installed. FULL=1
# builds the Debian packages, too. Three blocks of commands are from docs/cookbook.md.
cd "$(dirname "$0")/../.." || exit 1
root=$(pwd)
. tests/limit.sh
work=$(mktemp -d "${TMPDIR:-/tmp}/seqtx-package.XXXXXX") || exit 1
[ -n "$KEEP" ] || trap 'chmod -R u+w "$work"; rm -rf "$work"' EXIT
trap 'exit 130' INT TERM
unset MAKEFLAGS MAKELEVEL MFLAGS T BUILD DEV V CBLAS MPI SENTENCEPIECE NCCL ARCH THREADS
unset CPPFLAGS CFLAGS CXXFLAGS LDFLAGS LDLIBS AR PREFIX DESTDIR
unset CBLAS_LIBS SENTENCEPIECE_LIBS
CC=${CC:-cc}
make=${MAKE:-make}
passed=0 failed=0
check() { # WHAT COMMAND..
    what=$1; shift
    if "$@" > "$work/log" 2>&1; then passed=$((passed + 1)); return; fi
    failed=$((failed + 1))
    echo "FAILED $what"; tail -n 12 "$work/log"
}
there() { command -v "$1" > /dev/null 2>&1 || { echo "skipped: $2, no $1"; false; }; }
files() { (cd "$1" && find . ! -type d | LC_ALL=C sort); }
state() { (cd "$1" && find . -type f -exec cksum {} + | LC_ALL=C sort); }

# a copy of the tree: nothing is written to it from here on
src=$work/src
mkdir "$src"
cp -R Makefile CMakeLists.txt meson.build LICENSE README.md CHANGELOG.md seqtx*.h seqtx_cuda.cu \
    docs examples package python tests tools "$src"
chmod -R a-w "$src"
state "$src" > "$work/before"

# ---- flags, observed by compilers that record how they are called ----

bin=$work/bin
mkdir "$bin"
for name in cc c++ mpicc; do
    cat > "$bin/$name" <<END
#!/bin/sh
case " \$* " in
*' -dumpmachine '*) echo "\${MACHINE:-x86_64-linux-gnu}"; exit ;;
*' - '*) exit ;; # a compiler reports its macros
esac
echo "$name \$*" >> '$work/calls'
while [ \$# -gt 0 ]; do
    case \$1 in -o) echo 'exit 0' > "\$2"; chmod +x "\$2" ;; esac
    shift
done
END
done
printf '#!/bin/sh\n[ "$1" != rcs ] || echo > "$2"\n' > "$bin/ar"
chmod +x "$bin"/*
# calls ENVIRONMENT.. -- ARGUMENTS of make..: records each command in $work/calls and the
# output of make in $work/said
calls() {
    rm -rf "$work/calls" "$work/b"
    n=$#
    while [ "$1" != -- ]; do
        set -- "$@" "$1"
        shift
        n=$((n - 1))
    done
    shift
    # now the arguments of make, then the environment
    more=
    while [ "$n" -gt 1 ]; do
        more="$more '$1'"
        shift
        n=$((n - 1))
    done
    (cd "$src" && PATH=$bin:$PATH && eval \
        "env CC=cc CXX=c++ MPICC=mpicc \"\$@\" $make BUILD='$work/b' $more") > "$work/said" 2>&1
}
programs="examples shared static man"
compiles() { grep -e '\.[ch]p* ' "$work/calls"; }
has_all() { # PATTERN..: every call that compiles has it
    for p; do
        compiles > "$work/compiles"
        [ -s "$work/compiles" ] && ! grep -v -e "$p" "$work/compiles" || return 1
    done
}
links() { grep -e ' -o [^ ]*/\(train_[a-z_]*\|hello\|libseqtx[^ ]*\) ' "$work/calls"; }
links_have() { # PATTERN..
    for p; do
        links > "$work/links"
        [ -s "$work/links" ] && ! grep -v -e "$p" "$work/links" || return 1
    done
}
flags="CPPFLAGS=-DMY_CPP CFLAGS=-DMY_C LDFLAGS=-Lmy_ld LDLIBS=-lmy_lib"
for feature in "" CBLAS=1/-DSEQTX_CBLAS/-lopenblas MPI=1/-DSEQTX_MPI/-lm \
    THREADS=-DSEQTX_NO_THREADS/-DSEQTX_NO_THREADS/-lm \
    SENTENCEPIECE=1/-DSEQTX_SENTENCEPIECE/-lsentencepiece; do
    set=${feature%%/*} rest=${feature#*/} c=
    define=${rest%%/*} library=${rest#*/}
    case $set in SENTENCEPIECE*) ;; *) c=' ' ;; esac
    for way in environment "command line"; do
        # shellcheck disable=SC2086
        case $way in
        environment) check "$set, flags of the environment" calls $flags -- $set $programs ;;
        *) check "$set, flags of the command line" calls -- $flags $set $programs ;;
        esac
        if [ -z "$c" ]; then # C++ has separate flags, and the library no SentencePiece
            grep '^cc .*examples/' "$work/calls" > "$work/some"
            mv "$work/some" "$work/calls"
        fi
        check "$set, $way: CPPFLAGS, CFLAGS, ours and the feature's, in each compilation" \
            has_all ' -DMY_CPP' ' -DMY_C\b' ' -std=c99' "${define:- }"
        check "$set, $way: LDFLAGS, LDLIBS and the feature's, in each link" \
            links_have ' -Lmy_ld' ' -lmy_lib' "${library:- }"
    done
done
so=$(sed -n 's/^.define STX_VERSION  *"\(.*\)"/\1/p' seqtx.h)
check "macOS" calls MACHINE=arm64-apple-darwin23 -- shared libdir=/opt/lib
check "macOS: name and versions of the library" \
    grep -q -e "-dynamiclib -install_name /opt/lib/libseqtx.0.dylib -compatibility_version ""\
${so%.*} -current_version $so .* -o $work/b/libseqtx.$so.dylib " "$work/calls"
check "macOS: links to it" \
    [ "$(readlink "$work/b/libseqtx.dylib") $(readlink "$work/b/libseqtx.0.dylib")" \
    = "libseqtx.$so.dylib libseqtx.$so.dylib" ]
check "Windows" calls MACHINE=x86_64-w64-mingw32 -- shared
check "Windows: a DLL and what links it" \
    grep -q -e "-shared -Wl,--out-implib,$work/b/libseqtx.dll.a .* -o $work/b/libseqtx.dll " \
    "$work/calls"
check "CXXFLAGS" calls CXXFLAGS=-DMY_CXX CPPFLAGS=-DMY_CPP -- SENTENCEPIECE=1 "$work/b/spm.o"
check "CXXFLAGS in C++" grep -q '^c++ .*-DMY_CPP .*-DMY_CXX' "$work/calls"
check "the user's -O" calls CFLAGS=-Og -- "$work/b/hello"
check "the user's -O comes last" \
    sh -c "! sed 's/-Og.*//' '$work/calls' | grep -v ' -O3 ' &&
        ! sed 's/.*-Og//' '$work/calls' | grep ' -O'"
check "CC of the environment" sh -c "! grep -v '^cc ' '$work/calls'"
check "warnings are not errors" sh -c "! grep -e -Werror '$work/calls'"
check "short lines" \
    sh -c "grep -qx '  CC   $work/b/hello' '$work/said' && ! grep -e -std '$work/said'"
check "DEV=1" calls -- DEV=1 "$work/b/hello"
check "DEV=1: warnings are errors" has_all ' -Werror'
check "V=1" calls -- V=1 "$work/b/hello"
check "V=1: the commands" grep -q '^cc -std=c99 .*examples/hello.c ' "$work/said"
check "make -s" calls -- -s "$work/b/hello"
check "make -s prints nothing" [ ! -s "$work/said" ]
check "make -B" calls -- -B "$work/b/hello"
check "make -B builds it" [ -f "$work/b/hello" ]
(cd "$src" && PATH=$bin:$PATH CC=cc $make BUILD="$work/b" "$work/b/hello" > /dev/null 2>&1; rm \
    "$work/calls"
    PATH=$bin:$PATH CC=cc $make BUILD="$work/b" "$work/b/hello" > /dev/null 2>&1)
check "existing files are not rebuilt" [ ! -f "$work/calls" ]

# ---- blanks in paths ----

mkdir "$work/a b"
check "BUILD with a blank is refused" \
    sh -c "! $make -n -C '$src' BUILD='$work/a b/build' hello > /dev/null 2> '$work/said' &&
        grep -q 'expected a directory whose path has no blanks' '$work/said'"
check "make -f in a directory with a blank is refused" \
    sh -c "cd '$work/a b' && ! $make -n -f '$src/Makefile' hello > /dev/null 2> '$work/said' &&
        grep -q 'needs paths without blanks' '$work/said'"

# ---- make demo ----

for target in demo demo-sru demo-compressive demo-par; do
    plan() { $make -s -n -C "$src" BUILD="$work/b" $target "$@" > "$work/plan" 2>&1; }
    has() { grep -q -e "$1" "$work/plan"; }
    check "make $target" plan
    check "make $target: the sample has a prompt" has '--generate 500 --prompt "Returns "'
    check "make $target DATA=.." plan DATA="a text.txt"
    check "make $target DATA=..: uses that text" has '--data "a text.txt"'
    check "make $target DATA=..: no prompt" sh -c "! grep -e '--prompt' -e 'demo.txt' '$work/plan'"
done

# ---- from another directory ----

mkdir "$work/there"
check "make -f from another directory" \
    sh -c "cd '$work/there' && PATH='$bin:$PATH' CC=cc $make -f '$src/Makefile' build/hello static"
check "it builds there" [ -f "$work/there/build/hello" -a -f "$work/there/build/libseqtx.a" ]

# ---- other makes ----

if there bmake "BSD make"; then
    check "BSD make reports that GNU make is required" \
        sh -c "! bmake -C '$src' 2> '$work/said' && grep -q 'needs GNU make: gmake' '$work/said' &&
            [ \$(wc -l < '$work/said') -lt 6 ]"
fi

# ---- a real build, installed ----

real() { $make -C "$src" CC="$CC" CFLAGS=-O0 BUILD="$work/real" "$@"; }
check "everything, outside of the tree" real -s all
check "a test outside of the tree" \
    sh -c "$make -s -C '$src' CC='$CC' CFLAGS=-O0 BUILD='$work/real' run-train_h |
        grep -q ' [1-9][0-9]* passed  *0 failed'"
soname=libseqtx.so.0
if [ -f "$work/real/libseqtx.so.$so" ]; then
    check "links to the library" \
        [ "$(readlink "$work/real/libseqtx.so") $(readlink "$work/real/$soname")" \
        = "libseqtx.so.$so libseqtx.so.$so" ]
    ! there readelf SONAME ||
        check "SONAME" sh -c "readelf -d '$work/real/libseqtx.so' | grep -q 'soname: \[$soname\]'"
else
    check "there is no libseqtx.so.$so" false
fi

cat > "$work/use.c" <<'END'
#include "seqtx_attn_span.h"
#include "seqtx_text.h"
#include <stdio.h>
int main(void) {
    stx_ctx *x = stx_create(NULL);
    stx_vocab *v = stx_vocab_build(x, NULL, NULL, 0, 0);
    printf("%s %d\n", stx_version(), (int)stx_vocab_size(v));
    return !stx_ok(x);
}
END
listed() { # the files that an installation has, by GNU names of directories
    for f in seqtx*.h seqtx_cuda.cu; do echo "./i n/seqtx/$f"; done
    for f in examples/train_*.c; do
        f=${f##*/}; echo "./x/bin/${f%.c}"; echo "./d a/man/man1/${f%.c}.1"
    done
    for f in docs/*; do echo "./the docs/$f"; done
    echo "./x/bin/seqtx-plot
./x/bin/seqtx-convert
./l/libseqtx.a
./l/libseqtx.so
./l/$soname
./l/libseqtx.so.$so
./l/pkgconfig/libseqtx.pc
./d a/man/man1/seqtx-plot.1
./d a/man/man1/seqtx-convert.1
./d a/man/man7/seqtx.7
./d a/pkgconfig/seqtx.pc
./d a/cmake/seqtx/seqtx-config.cmake
./d a/cmake/seqtx/seqtx-config-version.cmake
./the docs/LICENSE
./the docs/README.md
./the docs/CHANGELOG.md"
}
# every directory set separately, with spaces; below the prefix and DESTDIR
p="$work/a prefix" d="$work/a stage"
gnu() {
    real "prefix=$p" "exec_prefix=$p/x" "libdir=$p/l" "includedir=$p/i n" "datarootdir=$p/d a" \
        "docdir=$p/the docs" "$@"
}
listed | LC_ALL=C sort > "$work/expected"
check "make install by GNU's directories" gnu install
check "the installed files" \
    sh -c "(cd '$p' && find . ! -type d | LC_ALL=C sort) | diff '$work/expected' -"
check "make install, DESTDIR" gnu install DESTDIR="$d"
check "DESTDIR changes only the place" diff -r "$p" "$d$p"
check "no @NAME@ is left" sh -c "! grep -rn '@[A-Z]*@' '$p/d a' '$p/l/pkgconfig'"
echo mine > "$d$p/i n/seqtx/other.h"
check "make uninstall, DESTDIR" gnu uninstall DESTDIR="$d"
check "... removes what was installed" [ "$(files "$d$p")" = "./i n/seqtx/other.h" ]
check "... and directories that became empty" \
    [ ! -d "$d$p/the docs" -a ! -d "$d$p/d a/cmake/seqtx" ]
check "a relative PREFIX is refused" \
    sh -c "! $make -s -C '$src' BUILD='$work/real' install-headers PREFIX=out 2> '$work/said' &&
        grep -q 'prefix=out: give an absolute path' '$work/said'"
check "PREFIX of the environment" \
    sh -c "PREFIX='$work/env' $make -s -C '$src' install-headers &&
        [ -f '$work/env/include/seqtx/seqtx.h' -a ! -e '$work/env/lib' ]"

check "an installed trainer" sh -c "'$p/x/bin/train_sru' --version | grep -q 'seqtx $so'"
check "an installed plot" sh -c "'$p/x/bin/seqtx-plot' --version | grep -q '$so'"
if there pkg-config "the library by pkg-config"; then
    PKG_CONFIG_PATH="$p/l/pkgconfig:$p/d a/pkgconfig"
    export PKG_CONFIG_PATH
    check "pkg-config, shared" \
        sh -c "cd '$work' && eval $CC use.c \$(pkg-config --cflags --libs libseqtx) -o shared &&
            LD_LIBRARY_PATH='$p/l' ./shared | grep -qx '$so 256'"
    ! there readelf "the library that a program requires" ||
        check "a program requires $soname" sh \
            -c "readelf -d '$work/shared' | grep -q 'NEEDED.*\[$soname\]'"
    check "pkg-config, static" \
        sh -c "cd '$work' && eval $CC use.c \$(pkg-config --cflags libseqtx) '\"$p/l/libseqtx.a\"' \
            -lm -pthread -o static && ./static | grep -qx '$so 256'"
    mv "$p" "$work/moved"
    PKG_CONFIG_PATH="$work/moved/l/pkgconfig:$work/moved/d a/pkgconfig"
    check "pkg-config, a moved installation" \
        sh -c "cd '$work' && eval $CC use.c \$(pkg-config --cflags --libs libseqtx) \
            -o moved_program"
    mv "$work/moved" "$p"
fi
if there cmake "the library by CMake"; then
    mkdir "$work/project"
    cp "$work/use.c" "$work/project"
    cat > "$work/project/CMakeLists.txt" <<'END'
cmake_minimum_required(VERSION 3.18)
project(use LANGUAGES C)
find_package(seqtx REQUIRED COMPONENTS core shared static)
foreach(kind shared static)
    add_executable(use_${kind} use.c)
    target_link_libraries(use_${kind} PRIVATE seqtx::${kind})
endforeach()
END
    check "CMake, shared and static" \
        sh -c "cd '$work' && cmake -S project -B by_cmake -DCMAKE_C_COMPILER='$CC' \
            -Dseqtx_DIR='$p/d a/cmake/seqtx' > said && cmake --build by_cmake >> said &&
            for k in shared static; do by_cmake/use_\$k | grep -qx '$so 256' || exit 1; done"
fi
if there groff "the format of manual pages"; then
    for page in "$p/d a"/man/man*/*; do
        check "${page##*/}: groff -ww has warnings" \
            sh -c "groff -ww -man -Tutf8 -P-cbu '$page' 2>&1 > '$work/page' | tee '$work/said' &&
                [ ! -s '$work/said' ] && grep -q '^NAME' '$work/page'"
    done
fi
if there man "manual pages"; then
    for page in "$p/d a"/man/man*/*; do
        check "${page##*/} has warnings" \
            sh -c "LC_ALL=C.UTF-8 man --warnings -E UTF-8 \
                -l '$page' > '$work/page' 2> '$work/said' && [ ! -s '$work/said' ] &&
                [ -s '$work/page' ]"
    done
    check "a manual page has every option" \
        sh -c "'$p/x/bin/train_par' --help all |
            sed -n 's/^  \(-[a-z], \)*\(--[a-z0-9-]*\) .*/\2/p' |
            while read -r o; do LC_ALL=C.UTF-8 man -l '$p/d a/man/man1/train_par.1' |
            grep -q -e \"\$o\" || { echo \"\$o\"; exit 1; }; done"
fi

# ---- recipes in package/, in a copy of the tree that can be written ----

cp -R "$src" "$work/tree"
chmod -R u+w "$work/tree"
for n in 1 2 3; do
    sh tests/build/cookbook.sh --print tests/build/package.sh $n > "$work/block$n"
done
# A compiler that links the objects of the real build instead of compiling the library
# again. (readme.sh compiles each trainer as one unit.)
cat > "$work/linked" <<END
#!/bin/sh
for word; do case \$word in -c | -E | -) exec $CC $(for h in seqtx*.h; do
    basename "$h" .h | tr a-z A-Z | sed 's/.*/-D&_IMPLEMENTATION_DONE/'
done | tr '\n' ' ')-DSTX_LOOPS_DONE "\$@" ;; esac; done
exec $CC "\$@" $work/real/lib_f32/*.o -lm -pthread
END
chmod +x "$work/linked"
if there cmake "the trainers by CMake, and the vcpkg port"; then
    # CMake 3.22 and later read CMAKE_BUILD_TYPE; earlier versions optimise.
    check "the trainers by CMake, as in docs/cookbook.md" \
        sh -c "cd '$work/tree' && export CC='$work/linked' CMAKE_BUILD_TYPE=Debug &&
            export HOME='$work/home' && sh -e '$work/block1'"
    for f in train_attn_span train_compressive train_par train_sru seqtx-plot; do
        check "$f" sh -c "'$work/home/.local/bin/$f' --version | grep -q 'seqtx.* $so$'"
    done
    # vcpkg's functions, as far as the port calls them without a feature
    cat > "$work/vcpkg.cmake" <<'END'
cmake_minimum_required(VERSION 3.18)
set(PORT seqtx)
set(CURRENT_PACKAGES_DIR "${OUT}")
function(vcpkg_check_features)
endfunction()
function(vcpkg_cmake_configure)
    cmake_parse_arguments(a "" "SOURCE_PATH" "OPTIONS" ${ARGN})
    execute_process(COMMAND ${CMAKE_COMMAND} -S "${a_SOURCE_PATH}" -B "${OUT}-build"
        "-DCMAKE_INSTALL_PREFIX=${OUT}" ${a_OPTIONS})
endfunction()
function(vcpkg_cmake_install)
    execute_process(COMMAND ${CMAKE_COMMAND} --install "${OUT}-build")
endfunction()
function(vcpkg_install_copyright)
    cmake_parse_arguments(a "" "" "FILE_LIST" ${ARGN})
    configure_file("${a_FILE_LIST}" "${OUT}/share/seqtx/copyright" COPYONLY)
endfunction()
include("${PORTFILE}")
END
    check "the vcpkg port" \
        env CC="$CC" cmake -DOUT="$work/port" -DPORTFILE="$src/package/vcpkg/seqtx/portfile.cmake" \
        -P "$work/vcpkg.cmake"
    check "its files" [ "$(files "$work/port" | grep -v '^./include' | tr '\n' ' ')" = "\
./share/pkgconfig/seqtx.pc ./share/seqtx/copyright ./share/seqtx/seqtx-config-version.cmake \
./share/seqtx/seqtx-config.cmake ./share/seqtx/usage " ]
    printf '%s\n' 'cmake_minimum_required(VERSION 3.18)' 'project(port LANGUAGES C)' \
        'find_package(seqtx REQUIRED)' 'get_target_property(at seqtx::core' \
        'INTERFACE_INCLUDE_DIRECTORIES)' 'message(STATUS "at ${at}")' \
        > "$work/project/CMakeLists.txt"
    check "its package for CMake" \
        sh -c "cd '$work' && cmake -S project -B by_port -DCMAKE_C_COMPILER='$CC' \
            -DCMAKE_PREFIX_PATH='$work/port' | grep -q 'at $work/port/include/seqtx$'"
fi
check "the versions in package/" \
    sh -c "grep -q '\"version-semver\": \"$so\"' package/vcpkg/seqtx/vcpkg.json &&
        grep -q '^seqtx ($so-[0-9]*) ' package/debian/changelog &&
        grep -q '^Package: ${soname%.so.*}${soname##*.}$' package/debian/control"
if there conan "the Conan recipe"; then
    # Conan refuses to detect a compiler that CC calls cc.
    check "the Conan recipe, as in docs/cookbook.md" \
        sh -c "cd '$work/tree' && export CONAN_HOME='$work/conan' CC='$CC' &&
            (unset CC && conan profile detect) &&
            sed 's/$/ -s build_type=Debug/' '$work/block3' | sh -e"
fi
if there meson "the Meson project"; then
    mkdir -p "$work/meson/subprojects"
    ln -s "$work/tree" "$work/meson/subprojects/seqtx"
    cat > "$work/meson/meson.build" <<'END'
project('prog', 'c')
executable('prog', 'prog.c', dependencies: dependency('seqtx', version: '>=0.2'))
END
    cat > "$work/meson/prog.c" <<'END'
#define SEQTX_IMPLEMENTATION
#include "seqtx.h"
#include <stdio.h>

int main(void) {
    puts(stx_version());
    return 0;
}
END
    check "the Meson project" \
        sh -c "cd '$work/meson' && CC='$CC' meson setup b > said && meson compile -C b >> said &&
            grep -q 'seqtx found: YES $so' said && b/prog | grep -qx '$so'"
fi
if [ -z "$FULL" ]; then
    echo "skipped: the Debian packages, without FULL=1"
elif there dpkg-buildpackage "the Debian packages" && there dh "the Debian packages"; then
    check "the Debian packages, as in docs/cookbook.md" \
        sh -c "cd '$work/tree' && unset CC && rm -rf build &&
            DEB_BUILD_OPTIONS='noopt parallel=2' sh -e '$work/block2'"
    for name in libseqtx0 libseqtx-dev seqtx-tools python3-seqtx; do
        check "$name" sh -c "dpkg -x '$work/$name'_*.deb '$work/root'"
    done
    check "a program of the packages" \
        sh -c "'$work/root/usr/bin/train_sru' --version | grep -q '$so'"
    if /usr/bin/python3 -c 'import numpy' 2> /dev/null; then
        check "python3-seqtx" env PYTHONPATH="$work/root/usr/lib/python3/dist-packages" \
            LD_LIBRARY_PATH="$(echo "$work"/root/usr/lib/*-linux-*)" /usr/bin/python3 -c "
import seqtx
m = seqtx.AttnSpan(9, layers=1, dim=8, heads=1, span=8)
assert m.evaluate([1, 2], [2, 3]) > 0 and seqtx.lib._dll._name == 'libseqtx.so.0'"
    fi
    ! there lintian "the format of the Debian packages" || check \
        "lintian, except for the maintainer" \
        sh -c "lintian '$work'/*.changes > '$work/said'; ! grep '^[EW]' '$work/said' |
            grep -v -e bogus-mail-host -e initial-upload-closes-no-bugs"
fi

check "make uninstall" gnu uninstall
check "... leaves nothing" [ -z "$(files "$p")" ]

state "$src" > "$work/after"
check "the source tree is unchanged" cmp "$work/before" "$work/after"
check "the copy of the tree has no build/" [ ! -e "$src/build" ]
cd "$root" || exit 1
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
