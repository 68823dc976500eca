#!/bin/sh
# coverage.sh PTX COUNTERS... - checks that the tests have run every kernel of a PTX file.
# COUNTERS: files that the environment variable PTX_COUNTERS named (executor.cpp). Prints
# the kernels that did not run, the totals, and "N passed, N failed". stx__probe_kernel is
# never launched: the library only asks whether the device has code for it.
ptx=$1
shift
filter=cat
command -v c++filt > /dev/null 2>&1 && filter=c++filt
cat "$@" | awk '
    FILENAME != "-" && /^(\.visible )?\.entry / {
        name = $0
        sub(/^.*\.entry /, "", name)
        sub(/\(.*/, "", name)
        if (name !~ /stx__probe_kernel/) kernel[name] = 1
    }
    FILENAME == "-" {
        for (i = 2; i < NF; i += 2) {
            if ($i == "launches") launches[$1] += $(i + 1)
            if ($i == "launches") all += $(i + 1)
            if ($i == "instructions") instructions += $(i + 1)
        }
    }
    END {
        for (k in kernel) {
            if (launches[k]) passed++
            else print "FAILED: did not run: " k
            n++
        }
        printf "%d of %d kernels in %d launches, %.0f million warp instructions\n",
            passed, n, all, instructions / 1e6
        printf "%d passed, %d failed\n", passed, n - passed + (n == 0)
    }' "$ptx" - | "$filter"
