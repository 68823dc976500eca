/* machines.h - GPUs: rates of their resources from NVIDIA's documents, and the number of
   blocks that a multiprocessor can hold. */
#ifndef BENCH_MACHINES_H
#define BENCH_MACHINES_H
#include <stddef.h>

/* Multiprocessors, clock and bandwidth: the whitepapers "NVIDIA A100 Tensor Core GPU
   Architecture" and "NVIDIA H100 Tensor Core GPU Architecture", and the data sheets of
   the A100 (SXM, 80 GB), H100 (SXM) and H200. The clock of an H100 is the one of its 989
   TFLOP/s in bf16, which are 132 x 4096 x 1.83 GHz.

   Rates of a multiprocessor: the table "Throughput of Native Arithmetic Instructions" of
   the CUDA C++ Programming Guide (compute capability 8.0 and 9.0), in warp instructions
   per clock. Integers, 2 per clock, are counted together with floats, so they have no
   resource: a kernel of integers may take twice as long as `issue` says.

   mma.sync m16n8k16 in bf16 and m16n8k8 in tf32 take one clock of an H100 at its dense
   rate, and two of an A100. The rate of an H100 is that of wgmma, of which mma.sync
   reaches roughly 60 % (Luo et al., "Dissecting the NVIDIA Hopper Architecture through
   Microbenchmarking and Multiple Level Analysis", arXiv 2501.12084). */
enum { R_MEMORY, R_ISSUE, R_SHARED, R_SHUFFLE, R_DOUBLE, R_SPECIAL, R_MMA, RESOURCES };

static const char *const resource_name[RESOURCES] = {"mem", "issue", "smem", "shfl",
                                                     "f64", "sfu",   "mma"};

typedef struct machine {
    const char *name, *arch;       /* arch: that of its registers in cuda_regs.txt */
    double processors, ghz, bytes; /* multiprocessors, clock, bytes of memory per second */
    size_t shared_bytes;           /* of a multiprocessor */
    double rate[RESOURCES];        /* per clock and multiprocessor; 0 for memory */
} machine;

static const machine machines[] = {
    /* name, arch, SMs, GHz, bytes/s, shared memory; mem issue smem shfl f64 sfu mma */
    {"A100", "sm_80", 108, 1.41, 2.039e12, 164 << 10, {0, 4, 1, 1, 1, 0.5, 0.5}},
    {"H100", "sm_90", 132, 1.83, 3.35e12, 228 << 10, {0, 4, 1, 1, 2, 0.5, 1}},
    {"H200", "sm_90", 132, 1.83, 4.8e12, 228 << 10, {0, 4, 1, 1, 2, 0.5, 1}}};

enum { A100, H100, H200, MACHINES };

/* Bytes of memory per clock and multiprocessor. */
static inline double machine_bytes(const machine *m) {
    return m->bytes / (m->processors * m->ghz * 1e9);
}

/* Stores the clocks of a multiprocessor that amounts of each resource take: bytes of
   memory, warp instructions, passes over the banks of shared memory and so on. Returns
   the resource that takes most. */
static inline int machine_clocks(const machine *m, const double *amount, double *clocks) {
    int i, most = 0;
    for (i = 0; i < RESOURCES; i++) {
        clocks[i] = amount[i] / (i == R_MEMORY ? machine_bytes(m) : m->rate[i]);
        if (clocks[i] > clocks[most]) most = i;
    }
    return most;
}


// >>occupancy

typedef struct occupancy {
    int blocks, warps;
    const char *limit; /* what allows no more blocks */
} occupancy;

static inline void limit_blocks(occupancy *o, int blocks, const char *limit) {
    if (blocks >= o->blocks) return;
    o->blocks = blocks;
    o->limit = limit;
}

/* Returns how many blocks fit on a multiprocessor, by the rules of NVIDIA's
   cuda_occupancy.h for compute capability 8.0 and 9.0: 64 warps, 32 blocks, four
   partitions of 16384 registers, of which a warp takes units of 256, and shared memory in
   units of 128 bytes, with 1 KiB per block that is reserved. */
static inline occupancy occupancy_of(const machine *m, int threads, int registers, size_t shared) {
    const int warps = (threads + 31) / 32, per_warp = (32 * registers + 255) / 256 * 256;
    const size_t bytes = (shared + 1024 + 127) / 128 * 128;
    occupancy o = {32, 0, "blocks"};
    limit_blocks(&o, 64 / warps, "warps");
    if (per_warp) limit_blocks(&o, 16384 / per_warp * 4 / warps, "regs");
    limit_blocks(&o, (int)(m->shared_bytes / bytes), "smem");
    o.warps = o.blocks * warps;
    return o;
}
#endif
