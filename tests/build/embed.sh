#!/bin/sh
# embed.sh - tests seqtx in other builds: several C files, an installed copy with
# pkg-config and CMake, the source tree with CMake, a shared library from Python. Skips
# what is not installed (cmake, pkg-config, python3). Compiles without optimisation. Two
# blocks of commands are from docs/cookbook.md.
cd "$(dirname "$0")/../.." || exit 1
root=$(pwd)
unset BUILD MAKEFLAGS MAKELEVEL MFLAGS # not as part of the make that runs this
work=$(mktemp -d "${TMPDIR:-/tmp}/seqtx-embed.XXXXXX") || exit 1
[ -n "$KEEP" ] || trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM
CC=${CC:-cc} CXX=${CXX:-c++}
W="-Wall -Wextra -Wpedantic -Wshadow -Werror"
passed=0 failed=0
check() {       # check NAME COMMAND
    if ( cd "$work" && eval "$2" ) > "$work/log" 2>&1; then passed=$((passed + 1)); return; fi
    failed=$((failed + 1))
    echo "FAILED $1"; tail -n 12 "$work/log"
}
there() { command -v "$1" > /dev/null 2>&1 || { echo "skipped: $2, no $1"; false; }; }
embed=$root/examples/embed
make="make -s -C $root T="

# several files, one with the implementation
check "the implementation, in its own file" "$CC -std=c99 $W -I$root -c $embed/seqtx.c -o seqtx.o"
for cc in gcc clang; do
    command -v $cc > /dev/null 2>&1 || { echo "skipped: several files, no $cc"; continue; }
    check "several files, $cc" \
        "$cc -std=c99 $W -I$root $embed/main.c $embed/predictor.c seqtx.o -lm -pthread -o several &&
        ./several 8 > out &&
        grep -q '^pass 8: [0-6]\..* bits per byte' out && grep -q '^the cat|' out"
done

# an installed copy (tests/build/package.sh checks all installed files)
prefix="$work/a prefix"
check "make install-headers" \
    "$make install-headers PREFIX='$prefix' && cmp '$prefix/include/seqtx/seqtx.h' $root/seqtx.h"
version=$(sed -n 's/^.define STX_VERSION  *"\(.*\)"/\1/p' seqtx.h)
check "all files have one version" \
    "[ '$version' = \"\$(sed -n 's/^Version: //p' '$prefix/share/pkgconfig/seqtx.pc')\" ] &&
    grep -q '\"$version\"' '$prefix'/share/cmake/seqtx/seqtx-config-version.cmake &&
    for n in MAJOR MINOR PATCH; do sed -n \"s/^.define STX_VERSION_\$n //p\" $root/seqtx.h; done |
    paste -sd. | grep -qx '$version' &&
    for h in $root/seqtx*.h; do head -n 1 \$h | grep -q ' - v${version%.*} - ' || exit 1; done"
if there pkg-config "the installed copy by pkg-config"; then
    check "pkg-config" \
        "export PKG_CONFIG_PATH='$prefix/share/pkgconfig' &&
        [ \$(pkg-config --modversion seqtx) = $version ] &&
        eval $CC -std=c99 $W \$(pkg-config --cflags seqtx) $embed/main.c \
            $embed/predictor.c seqtx.o \$(pkg-config --libs seqtx) -o by_pc &&
            ./by_pc 1 | grep -q '^the cat|'"
fi

if there cmake "CMake's targets"; then
    debug="-DCMAKE_BUILD_TYPE=Debug -DCMAKE_C_COMPILER=$CC -DCMAKE_CXX_COMPILER=$CXX"
    mkdir -p "$work/project/examples" && cp -R "$embed" "$work/project/examples/embed" &&
        chmod -R u+w "$work/project"
    sh tests/build/cookbook.sh --print tests/build/embed.sh 1 > "$work/by_cmake"
    # A copy of the project without the source tree. CMake 3.22 and later read
    # CMAKE_BUILD_TYPE; earlier versions optimise.
    check "CMake, the installed package, as in docs/cookbook.md" \
        "cd project && export CMAKE_PREFIX_PATH='$prefix' CMAKE_BUILD_TYPE=Debug &&
        export CC='$CC' CXX='$CXX' CXXFLAGS='$W' STEPS=8 &&
        sh -e ../by_cmake > said && cat said && grep -q '^step 8: [0-7]\.' said"
    # The source tree adds its own flags.
    check "CMake, the source tree" \
        "cmake -S $embed -B by_tree $debug -DCMAKE_DISABLE_FIND_PACKAGE_seqtx=1 &&
        make -C by_tree app.o && make -C by_tree predictor.o 2>&1 | grep -q 'No rule'"
    check "CMake's own install is make install-headers" \
        "cmake -S $root -B by_self -DCMAKE_C_COMPILER=$CC > /dev/null &&
        cmake --install by_self --prefix again > /dev/null && diff -r again '$prefix'"
    try() {
        {
            printf 'cmake_minimum_required(VERSION 3.18)\nproject(t LANGUAGES C)\n'
            printf 'find_package(seqtx %s)\n' "$1"
            printf 'message(STATUS "found ${seqtx_FOUND} ${seqtx_VERSION}")\n'
        } > "$work/project/CMakeLists.txt"
    }
    found="rm -rf by_try; cmake -S project -B by_try -DCMAKE_C_COMPILER=$CC"
    found="$found -DCMAKE_PREFIX_PATH='$prefix'"
    try "${version%.*} REQUIRED COMPONENTS core sru"
    check "CMake: version ${version%.*}, components" "$found | grep -q 'found [1T].* $version'"
    try "0.0...<${version%%.*}.999"
    check "CMake: a range of versions" "$found 2>&1 | grep -q 'found 1'"
    try "0.0.1...<$version"
    check "CMake: a range that ends before it" "$found 2>&1 | grep -q 'found 0'"
    try "${version%%.*}.999"
    check "CMake: a later version is not found" "$found 2>&1 | grep -q 'found 0'"
    try "REQUIRED COMPONENTS cuda"
    check "CMake: CUDA where its language is not enabled" \
        "$found 2>&1 | tr -s ' \n' ' ' |
        grep -q 'no component cuda: .* where the CUDA language is enabled'"
fi

# A shared library, built by the Makefile in a copy of the tree. From Python, its structs
# are parsed from the headers.
if there python3 "Python by ctypes"; then
    mkdir -p "$work/tree/examples" "$work/tree/tests" "$work/bin"
    cp Makefile README.md seqtx.h seqtx_attn_span.h seqtx_text.h "$work/tree"
    cp -R examples/*.[ch] examples/train examples/*.py "$work/tree/examples"
    cp -R python "$work/tree"
    chmod -R u+w "$work/tree"
    printf '#!/bin/sh\nPATH="%s"\nexec make -s "$@" T= CC="%s" CFLAGS=-O0\n' "$PATH" "$CC" > \
        "$work/bin/make"
    chmod +x "$work/bin/make"
    sh tests/build/cookbook.sh --print tests/build/embed.sh 2 > "$work/by_python"
    check "make shared, and Python by ctypes, as in docs/cookbook.md" \
        "cd tree && PATH='$work/bin:$PATH' STEPS=3 sh -e ../by_python > ../out &&
        grep -q '^step 3: [4-8]\.[0-9]* bits per byte' ../out && [ \$(wc -c < ../out) -gt 45 ]"
    if python3 -c 'import ziglang' 2> /dev/null; then
        printf '#!/bin/sh\n' > "$work/bin/pip"; chmod +x "$work/bin/pip"        # it is installed
        sh tests/build/cookbook.sh --print tests/build/embed.sh 3 |
            sed 's/-O2/-O0/' > "$work/by_zig"
        check "Python by ctypes, the library by zig" \
            "cp -R tree zig && cp $root/seqtx_*.h zig && rm -rf zig/build && cd zig &&
            PATH='$work/bin:$PATH' STEPS=3 sh -e ../by_zig > ../out &&
            grep -q '^step 3: [4-8]\.[0-9]* bits per byte' ../out"
    else
        echo "skipped: the library by zig, no ziglang"
    fi
    check "it exports functions of the API, and nothing else" \
        "nm -D --defined-only tree/build/libseqtx.so > names &&
        [ \$(grep -c ' T stx_[a-z]' names) -ge 250 ] && ! grep -v ' T stx_[a-z]' names"
    check "Python: headers of another version" \
        "sed 's/VERSION  *\"$version\"/VERSION \"9.9.9\"/' $root/seqtx.h > seqtx.h &&
        cp $root/seqtx_attn_span.h . &&
        ! SEQTX_INCLUDE=\$(pwd) python3 tree/examples/ctypes_demo.py 2> said &&
        grep -q 'is seqtx $version, the declarations are those of 9.9.9' said"
    cat > "$work/sizes.py" <<'P'
import ctypes
import sys
sys.path.insert(0, "tree/python/seqtx")
from _library import Library, read_api
lib = Library("tree/build/libseqtx.so", read_api(sys.argv[1]))
names = lib._api["structs"]
headers = "".join(f'#include "{h}"\n' for h in sys.argv[2:])
lines = "".join(f'    printf("{n} %zu\\n", sizeof({n}));\n' for n in names)
with open("sizes.c", "w") as f:
    f.write(f"#include <stdio.h>\n{headers}int main(void) {{\n{lines}    return 0;\n}}\n")
open("sizes", "w").write("".join(f"{n} {ctypes.sizeof(getattr(lib, n))}\n" for n in names))
P
    check "Python's structs are C's" \
        "python3 sizes.py $root $(cd "$root" && echo seqtx_*.h) &&
            $CC -I$root sizes.c -o sizes_c && ./sizes_c | cmp - sizes &&
            [ \$(wc -l < sizes) -ge 75 ]"
fi
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
