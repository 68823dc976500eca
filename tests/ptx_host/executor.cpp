/* executor.cpp - lets programs that use tests/cuda_host run kernels by the PTX that nvcc
   made of them. A program needs no change: it is linked with this file, and the
   environment selects what happens.

       PTX_FILE=FILE         the PTX; without it, the host's code runs the kernels
       PTX_KERNEL=TEXT       interprets only kernels whose name contains TEXT; the
                             host's code runs the others
       PTX_APPROXIMATE=1     with the errors of the hardware's approximations (ptx.h)
       PTX_COUNTERS=FILE     writes one line per kernel at the end of the program
       PTX_REGISTERS=FILE    the registers of the compiled kernels, as cuda_regs.txt: a
                             launch that needs more than there are is a fault
       PTX_LAUNCHES=FILE     writes one line per launch, and one per instruction that
                             accesses memory, for bench/cuda/count_kernels.c

   Faults become violations of cuda_host, which the tests check. */
#include "ptx.h"
#include "symbols.h"
#include "../cuda_host/cuda_host.h"
#include "cuda_runtime.h"
#include <fstream>
#include <map>
#include <sstream>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <string>
#include <unistd.h>
#include <vector>

struct compiled {
    const ptx_kernel *ptx;      /* NULL: the host's code runs it */
    unsigned registers;         /* per thread; 0: unknown */
};

static struct {
    ptx_module *module;
    const char *counters;                               /* PTX_COUNTERS */
    FILE *launches;                                     /* PTX_LAUNCHES */
    const char *only;                                   /* PTX_KERNEL */
    std::map<std::string, const ptx_kernel *> by_name;  /* by demangled name */
    std::map<const void *, compiled> by_function;
    std::map<std::string, unsigned> registers;          /* by name without parameters */
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

/* Reads the lines "ARCHITECTURE KERNEL REGISTERS .." of the target. The names in the file
   have no blanks. */
static bool load_registers(const char *path) {
    std::ifstream file(path);
    std::string line, architecture, kernel;
    unsigned registers;
    while (std::getline(file, line)) {
        std::istringstream fields(line);
        if (fields >> architecture >> kernel >> registers && architecture == ptx_target(E.module))
            E.registers[kernel] = registers;
    }
    if (file.eof()) return true;
    cuda_host_report((std::string("ptx_host: cannot read PTX_REGISTERS ") + path).c_str());
    return false;
}

/* The registers of a kernel, 0 if they are unknown. A file that has other kernels of the
   target must have this one. */
static unsigned registers_of(const std::string &name) {
    std::string key;
    for (char c : name.substr(0, name.find('(')))
        if (c != ' ') key += c;
    auto found = E.registers.find(key);
    if (found != E.registers.end()) return found->second;
    if (!E.registers.empty())
        cuda_host_report(("ptx_host: PTX_REGISTERS has no kernel " + key).c_str());
    return 0;
}

/* Finds the PTX of a kernel; none if PTX_KERNEL excludes it, or after a report. */
static compiled compiled_of(const cuda_host_kernel &k) {
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
    return E.by_function[k.function] = {kernel, kernel ? registers_of(name) : 0};
}


// >>counters

/* The names of the counters in the files. */
static const struct {
    const char *name;
    uint64_t ptx_counters::*value;
} counter_names[] = {
    {"launches", &ptx_counters::launches},
    {"blocks", &ptx_counters::blocks},
    {"warps", &ptx_counters::warps},
    {"instructions", &ptx_counters::instructions},
    {"threads", &ptx_counters::thread_instructions},
    {"arithmetic", &ptx_counters::arithmetic},
    {"doubles", &ptx_counters::doubles},
    {"moves", &ptx_counters::moves},
    {"special", &ptx_counters::special},
    {"conversion", &ptx_counters::conversion},
    {"control", &ptx_counters::control},
    {"collective", &ptx_counters::collective},
    {"shuffles", &ptx_counters::shuffles},
    {"barrier", &ptx_counters::barrier},
    {"mma", &ptx_counters::mma},
    {"global_loads", &ptx_counters::global_loads},
    {"global_stores", &ptx_counters::global_stores},
    {"atomics", &ptx_counters::atomics},
    {"shared_loads", &ptx_counters::shared_loads},
    {"shared_stores", &ptx_counters::shared_stores},
    {"local", &ptx_counters::local},
    {"bytes_read", &ptx_counters::global_bytes_read},
    {"bytes_written", &ptx_counters::global_bytes_written},
    {"sectors_read", &ptx_counters::sectors_read},
    {"sectors_written", &ptx_counters::sectors_written},
    {"ideal_read", &ptx_counters::ideal_read},
    {"ideal_written", &ptx_counters::ideal_written},
    {"unique_read", &ptx_counters::unique_read},
    {"unique_written", &ptx_counters::unique_written},
    {"wavefronts", &ptx_counters::shared_wavefronts},
    {"ideal_wavefronts", &ptx_counters::shared_ideal},
    {"divergent", &ptx_counters::divergent_branches},
};

static void write_values(FILE *f, const ptx_counters &c) {
    for (const auto &n : counter_names)
        fprintf(f, " %s %llu", n.name, (unsigned long long)(c.*n.value));
    fputs("\n", f);
}

/* Writes the name of a kernel as in tests/cuda/cuda_regs.txt, without blanks and
   parameters. */
static void write_name(FILE *f, const ptx_kernel *k) {
    std::string name = symbol_demangle(ptx_kernel_name(k));
    for (char c : name.substr(0, name.find('(')))
        if (c != ' ') fputc(c, f);
}

/* Writes what each instruction has accessed: the kernel, requests, sectors or passes, the
   fewest of them, and the instruction with its place in the source. */
static void write_accesses(FILE *f) {
    for (size_t n = 0; n < ptx_kernel_count(E.module); n++) {
        const ptx_kernel *k = ptx_kernel_at(E.module, n);
        ptx_access a;
        for (size_t i = 0; ptx_access_at(k, i, &a); i++) {
            if (!a.requests) continue;
            fputs("access ", f);
            write_name(f, k);
            fprintf(f, " %llu %llu %llu %s %s\n", (unsigned long long)a.requests,
                    (unsigned long long)a.units, (unsigned long long)a.ideal, a.instruction,
                    a.place);
        }
    }
}

/* Writes the shape of a launch and what it adds to the counters of its kernel. */
static void write_launch(const ptx_launch &l, const ptx_counters &before) {
    ptx_counters c = ptx_counters_of(l.kernel);
    for (const auto &n : counter_names) c.*n.value -= before.*n.value;
    write_name(E.launches, l.kernel);
    fprintf(E.launches, " grid %ux%ux%u block %u static %zu dynamic %zu", l.grid[0], l.grid[1],
            l.grid[2], l.block[0] * l.block[1] * l.block[2], ptx_static_shared(l.kernel),
            l.shared_bytes);
    write_values(E.launches, c);
}

/* For bench/cuda/step_cuda.c: forgets the launches so far. */
extern "C" void ptx_launches_restart(void) {
    if (!E.launches) return;
    ptx_counters_clear();
    rewind(E.launches);
    if (ftruncate(fileno(E.launches), 0)) cuda_host_report("ptx_host: cannot truncate a file");
}


// >>launches

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
    const compiled found = compiled_of(k);
    const ptx_kernel *kernel = found.ptx;
    const void *params[64];
    size_t bytes[64], count = k.arguments(params, bytes);
    if (!kernel) return run_by_host(params, bytes, count);
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
    l.registers = found.registers;
    ptx_counters before = ptx_counters_of(kernel);
    if (ptx_run(&l)) report_faults();
    if (E.launches) write_launch(l, before);
    cuda_host_add_mmas((long)(ptx_counters_of(kernel).mma - before.mma));
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
    FILE *f = fopen(E.counters, "w");
    if (!f) return;
    for (size_t i = 0; i < ptx_kernel_count(E.module); i++) {
        const ptx_kernel *k = ptx_kernel_at(E.module, i);
        fputs(ptx_kernel_name(k), f);
        write_values(f, ptx_counters_of(k));
    }
    fclose(f);
}

static struct start_and_end {
    start_and_end() {
        const char *path = getenv("PTX_FILE");
        const char *approximate = getenv("PTX_APPROXIMATE"), *registers = getenv("PTX_REGISTERS");
        if (!path || !*path) return;
        E.counters = getenv("PTX_COUNTERS");
        E.only = getenv("PTX_KERNEL");
        if (getenv("PTX_LAUNCHES")) E.launches = fopen(getenv("PTX_LAUNCHES"), "w");
        ptx_approximate(approximate && atoi(approximate));
        if (load(path) && (!registers || !*registers || load_registers(registers)))
            cuda_host_execute_by(&executor);
    }

    ~start_and_end() {
        if (!E.module) return;
        if (E.counters) write_counters();
        if (E.launches) {
            write_accesses(E.launches);
            fclose(E.launches);
        }
        cuda_host_execute_by(NULL);
        ptx_unload(E.module);
    }
} start_and_end;
