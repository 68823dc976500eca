/* ptx.h - a PTX interpreter that runs on the host. It executes kernels that nvcc compiled
   to PTX, one warp instruction at a time, and reports data races, reads of memory that
   was never written, accesses out of bounds and other faults. README.md says what it
   models. C++17; the header is used by the host implementation of CUDA
   (../cuda_host) and by test_ptx.cpp. */
#ifndef PTX_H
#define PTX_H
#include <stddef.h>
#include <stdint.h>


// >>modules

struct ptx_module;
struct ptx_kernel;

/* Parses and decodes PTX text. Returns NULL and writes a message with the line number to
   error if the text is not valid, or contains an instruction that is not implemented; the
   message then names the instruction with its modifiers. */
ptx_module *ptx_load(const char *text, size_t length, char *error, size_t error_size);
void ptx_unload(ptx_module *m);

/* Returns the kernel (.entry) of this name, or NULL. */
const ptx_kernel *ptx_find(const ptx_module *m, const char *name);
size_t ptx_kernel_count(const ptx_module *m);
const ptx_kernel *ptx_kernel_at(const ptx_module *m, size_t i);
const char *ptx_target(const ptx_module *m);                /* such as "sm_90" */
const char *ptx_kernel_name(const ptx_kernel *k);
size_t ptx_param_count(const ptx_kernel *k);
size_t ptx_param_size(const ptx_kernel *k, size_t i);       /* bytes of parameter i */
size_t ptx_static_shared(const ptx_kernel *k);              /* bytes of static shared memory */
uint64_t ptx_launches(const ptx_kernel *k);                 /* launches so far */


// >>global memory. Kernels may access only registered ranges of host memory.

/* Registers a range as device memory. Its bytes count as unwritten. */
void ptx_memory_add(void *base, size_t bytes);
void ptx_memory_remove(void *base);
/* The host, or a library in place of a kernel, has written these bytes. Bytes outside of
   registered ranges are ignored. */
void ptx_memory_written(const void *base, size_t bytes);
/* These bytes count as unwritten from now on. */
void ptx_memory_unwritten(const void *base, size_t bytes);


// >>launches

/* The order in which blocks, and the warps of a block, run. */
enum ptx_order { PTX_ASCENDING, PTX_DESCENDING, PTX_RANDOM };

struct ptx_launch {
    const ptx_kernel *kernel;
    unsigned grid[3], block[3];
    size_t shared_bytes;            /* dynamic shared memory */
    const void *const *params;      /* one pointer per parameter, as for cudaLaunchKernel */
    ptx_order order;
    uint64_t seed;                  /* for PTX_RANDOM */
    unsigned registers = 0;         /* per thread, in the compiled kernel; 0: unknown */
};

/* Runs a kernel. Returns the number of faults that it caused; 0 means that all is well. A
   fault that leaves no defined result (such as an access out of bounds) ends the launch;
   others are recorded, once per kind and instruction of a launch, and the launch
   continues. */
size_t ptx_run(const ptx_launch *l);


// >>faults

enum ptx_fault_kind {
    PTX_SHARED_RACE,            /* no barrier or syncwarp orders two accesses */
    PTX_GLOBAL_RACE,            /* no barrier orders two accesses of a launch */
    PTX_UNWRITTEN_SHARED,       /* a read of shared memory that was not written */
    PTX_UNWRITTEN_GLOBAL,
    PTX_UNWRITTEN_REGISTER,
    PTX_OUT_OF_BOUNDS,          /* of an allocation, of shared, local or parameter memory */
    PTX_MISALIGNED,
    PTX_DIVERGED,               /* lanes of the mask missing at a collective or a barrier */
    PTX_DEADLOCK,               /* threads wait for others that have exited or wait elsewhere */
    PTX_COPY_NOT_AWAITED,       /* cp.async destination accessed before the wait */
    PTX_LAUNCH,                 /* more threads, shared memory or registers than allowed */
    PTX_FAULT_KINDS
};

struct ptx_fault {
    ptx_fault_kind kind;
    const char *kernel;
    int ptx_line;               /* line of the PTX text */
    const char *source;         /* source file by .loc, or "" */
    int source_line;            /* 0 if unknown */
    unsigned block[3], thread;  /* thread: linear index in the block */
    char text[700];             /* what happened, with address, both accesses and their lines */
};

size_t ptx_fault_count(void);                       /* since the last ptx_faults_clear */
const ptx_fault *ptx_fault_at(size_t i);
void ptx_faults_clear(void);
const char *ptx_fault_name(ptx_fault_kind kind);


// >>settings

/* 0 (the default): ex2.approx, rcp.approx and similar instructions are correctly rounded,
   and mma sums are exact in float. 1: results deviate by up to the documented error, as a
   function of the input, and mma sums are truncated. */
void ptx_approximate(int on);


// >>counters, of one kernel since the last ptx_counters_clear

struct ptx_counters {
    uint64_t launches, blocks, warps;
    uint64_t instructions;          /* executed warp instructions */
    uint64_t thread_instructions;   /* the same, times active lanes */
    /* Classes. `doubles` is arithmetic in f64; `moves` are mov, cvta and ld.param, most
       of which ptxas removes; `collective` is without shuffles. */
    uint64_t arithmetic, doubles, moves, special, conversion, control, collective, shuffles;
    uint64_t barrier, mma;
    uint64_t global_loads, global_stores, atomics, shared_loads, shared_stores, local;
    uint64_t global_bytes_read, global_bytes_written;   /* bytes that the threads request */
    uint64_t sectors_read, sectors_written;             /* 32-byte sectors per warp request */
    uint64_t ideal_read, ideal_written;     /* the same if the requested bytes were adjacent */
    uint64_t unique_read, unique_written;   /* sectors, each once per launch */
    uint64_t shared_wavefronts;     /* passes over the 32 banks */
    uint64_t shared_ideal;          /* passes without bank conflicts */
    uint64_t divergent_branches;
};

ptx_counters ptx_counters_of(const ptx_kernel *k);
void ptx_counters_clear(void);

/* What the executions of one instruction have accessed since the last clear. */
struct ptx_access {
    uint64_t requests;              /* of warps */
    uint64_t units, ideal;          /* sectors of global memory, passes over shared memory */
    const char *instruction;
    char place[300];                /* "file.cu:34", with " from 56" if it was inlined
                                       there, or "PTX line 12" */
};

/* Gets access i of a kernel. There are two per instruction, to global and to shared
   memory. Returns false after the last. */
bool ptx_access_at(const ptx_kernel *k, size_t i, ptx_access *a);
#endif
