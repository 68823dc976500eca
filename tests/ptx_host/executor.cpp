/* executor.cpp - lets programs that use tests/cuda_host run kernels by the PTX that nvcc
   made of them. A program needs no change: it is linked with this file, and the
   environment selects what happens.

       PTX_FILE=FILE         the PTX; without it, the host's code runs the kernels
       PTX_EVERY=N           interprets the first 3 launches of each kernel and shape, and
                             then every Nth; the host's code runs the others (default 1)
       PTX_KERNEL=TEXT       interprets only kernels whose name contains TEXT; the
                             host's code runs the others
       PTX_APPROXIMATE=1     with the errors of the hardware's approximations (ptx.h)
       PTX_COUNTERS=FILE     appends one line per kernel at the end of the program

   Faults become violations of cuda_host, which the tests check. */
#include "ptx.h"
#include "symbols.h"
#include "../cuda_host/cuda_host.h"
#include "cuda_runtime.h"
#include <map>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <string>
#include <tuple>
#include <vector>

/* kernel, grid, block: launches with the same shape */
typedef std::tuple<const ptx_kernel *, unsigned, unsigned, unsigned, unsigned> launch_shape;

static struct {
    ptx_module *module;
    const char *counters;                               /* PTX_COUNTERS */
    const char *only;                                   /* PTX_KERNEL */
    unsigned long every;
    std::map<std::string, const ptx_kernel *> by_name;  /* by demangled name */
    std::map<const void *, const ptx_kernel *> by_function;
    std::map<launch_shape, unsigned long> launches;
    std::map<uintptr_t, size_t> memory;                 /* bytes of each allocation */
} E;


// >>loading

static bool read_text(const char *path, std::string *text) {
    FILE *f = fopen(path, "rb");
    char part[1 << 16];
    size_t n;
    if (!f) return false;
    while ((n = fread(part, 1, sizeof part, f)) > 0) text->append(part, n);
    bool ok = !ferror(f);
    fclose(f);
    return ok;
}

static bool load(const char *path) {
    std::string text;
    char error[1000];
    if (!read_text(path, &text)) {
        snprintf(error, sizeof error, "ptx_host: cannot read PTX_FILE %s", path);
        cuda_host_report(error);
        return false;
    }
    E.module = ptx_load(text.data(), text.size(), error, sizeof error);
    if (!E.module) {
        cuda_host_report((std::string("ptx_host: ") + path + ": " + error).c_str());
        return false;
    }
    for (size_t i = 0; i < ptx_kernel_count(E.module); i++) {
        const ptx_kernel *k = ptx_kernel_at(E.module, i);
        E.by_name[symbol_demangle(ptx_kernel_name(k))] = k;
    }
    return true;
}

/* Returns the PTX of a kernel, or NULL if PTX_KERNEL excludes it or after a report. */
static const ptx_kernel *kernel_of(const cuda_host_kernel &k) {
    auto known = E.by_function.find(k.function);
    if (known != E.by_function.end()) return known->second;
    std::string name = symbol_name(k.function);
    auto named = E.by_name.find(name);
    bool wanted = !E.only || name.find(E.only) != std::string::npos;
    const ptx_kernel *kernel = !wanted || named == E.by_name.end() ? NULL : named->second;
    if (wanted && !kernel) {
        std::string text = "ptx_host: PTX_FILE has no kernel " + name + " (" + k.text + ")";
        cuda_host_report(text.c_str());
    }
    E.by_function[k.function] = kernel;
    return kernel;
}


// >>launches

/* Returns whether PTX_EVERY selects this launch. */
static bool selected(const ptx_kernel *kernel, const cuda_host_kernel &k) {
    unsigned long n = E.launches[launch_shape(kernel, k.grid.x, k.grid.y, k.grid.z, k.block.x)]++;
    return n < 3 || n % E.every == 0;
}

static void report_faults(void) {
    for (size_t i = 0; i < ptx_fault_count(); i++) {
        const ptx_fault *f = ptx_fault_at(i);
        std::string text = std::string("ptx_host: ") + ptx_fault_name(f->kind) + ": " + f->text;
        cuda_host_report(text.c_str());
    }
    ptx_faults_clear();
}

static ptx_order order_of(int block_order) {
    if (block_order == CUDA_HOST_RANDOM) return PTX_RANDOM;
    return block_order == CUDA_HOST_DESCENDING ? PTX_DESCENDING : PTX_ASCENDING;
}

/* A kernel that the host's code runs may write all allocations to which its parameters
   point. */
static int run_by_host(const void *const *params, const size_t *bytes, size_t count) {
    for (size_t i = 0; i < count; i++)
        for (size_t at = 0; at + sizeof(uintptr_t) <= bytes[i]; at += sizeof(uintptr_t)) {
            uintptr_t word;
            memcpy(&word, (const char *)params[i] + at, sizeof word);
            auto m = E.memory.upper_bound(word);
            if (m == E.memory.begin()) continue;
            m--;
            if (word - m->first < m->second) ptx_memory_written((void *)m->first, m->second);
        }
    return 0;
}

static int run(const cuda_host_kernel &k, int block_order, uint64_t seed) {
    const ptx_kernel *kernel = kernel_of(k);
    const void *params[64];
    size_t bytes[64], count = k.arguments(params, bytes);
    if (!kernel || !selected(kernel, k)) return run_by_host(params, bytes, count);
    bool same = count == ptx_param_count(kernel);
    for (size_t i = 0; same && i < count; i++) same = bytes[i] == ptx_param_size(kernel, i);
    if (!same) {
        std::string text = std::string("ptx_host: other parameters than in the PTX: ") + k.text;
        cuda_host_report(text.c_str());
        return 0;
    }

    ptx_launch l = {};
    l.kernel = kernel;
    l.grid[0] = k.grid.x;
    l.grid[1] = k.grid.y;
    l.grid[2] = k.grid.z;
    l.block[0] = k.block.x;
    l.block[1] = k.block.y;
    l.block[2] = k.block.z;
    l.shared_bytes = k.smem;
    l.params = params;
    l.order = order_of(block_order);
    l.seed = seed;
    uint64_t mmas = ptx_counters_of(kernel).mma;
    if (ptx_run(&l)) report_faults();
    cuda_host_add_mmas((long)(ptx_counters_of(kernel).mma - mmas));
    return 1;
}


// >>start and end of the program

static void allocated(void *p, size_t bytes) {
    E.memory[(uintptr_t)p] = bytes;
    ptx_memory_add(p, bytes);
}

static void freed(void *p) {
    E.memory.erase((uintptr_t)p);
    ptx_memory_remove(p);
}

static const cuda_host_executor executor = {run, allocated, freed, ptx_memory_written};

static void write_counters(void) {
    FILE *f = fopen(E.counters, "a");
    if (!f) return;
    for (size_t i = 0; i < ptx_kernel_count(E.module); i++) {
        const ptx_kernel *k = ptx_kernel_at(E.module, i);
        ptx_counters c = ptx_counters_of(k);
        fprintf(f,
                "%s launches %llu blocks %llu warps %llu instructions %llu threads %llu "
                "arithmetic %llu special %llu conversion %llu control %llu collective %llu "
                "barrier %llu mma %llu global_loads %llu global_stores %llu atomics %llu "
                "shared_loads %llu shared_stores %llu local %llu bytes_read %llu "
                "bytes_written %llu sectors_read %llu sectors_written %llu wavefronts %llu "
                "ideal_wavefronts %llu divergent %llu\n",
                ptx_kernel_name(k), (unsigned long long)c.launches, (unsigned long long)c.blocks,
                (unsigned long long)c.warps, (unsigned long long)c.instructions,
                (unsigned long long)c.thread_instructions, (unsigned long long)c.arithmetic,
                (unsigned long long)c.special, (unsigned long long)c.conversion,
                (unsigned long long)c.control, (unsigned long long)c.collective,
                (unsigned long long)c.barrier, (unsigned long long)c.mma,
                (unsigned long long)c.global_loads, (unsigned long long)c.global_stores,
                (unsigned long long)c.atomics, (unsigned long long)c.shared_loads,
                (unsigned long long)c.shared_stores, (unsigned long long)c.local,
                (unsigned long long)c.global_bytes_read, (unsigned long long)c.global_bytes_written,
                (unsigned long long)c.sectors_read, (unsigned long long)c.sectors_written,
                (unsigned long long)c.shared_wavefronts, (unsigned long long)c.shared_ideal,
                (unsigned long long)c.divergent_branches);
    }
    fclose(f);
}

static struct start_and_end {
    start_and_end() {
        const char *path = getenv("PTX_FILE"), *every = getenv("PTX_EVERY");
        const char *approximate = getenv("PTX_APPROXIMATE");
        if (!path || !*path) return;
        E.every = every ? strtoul(every, NULL, 10) : 1;
        if (!E.every) E.every = 1;
        E.counters = getenv("PTX_COUNTERS");
        E.only = getenv("PTX_KERNEL");
        ptx_approximate(approximate && atoi(approximate));
        if (load(path)) cuda_host_execute_by(&executor);
    }

    ~start_and_end() {
        if (!E.module) return;
        if (E.counters) write_counters();
        cuda_host_execute_by(NULL);
        ptx_unload(E.module);
    }
} start_and_end;
