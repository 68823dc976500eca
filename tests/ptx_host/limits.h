/* limits.h - what a launch may use on an architecture, and how its hardware allocates
   registers. The rules are those of cuda_occupancy.h of the CUDA toolkit. */
#ifndef PTX_LIMITS_H
#define PTX_LIMITS_H
#include <stddef.h>

namespace ptx {

enum {
    MAX_BLOCK_THREADS = 1024,
    MAX_BLOCK_REGISTERS = 65536,    /* as many as a multiprocessor has */
    REGISTER_UNIT = 256,            /* a warp gets a multiple of these, .. */
    SM_PARTS = 4                    /* in one of the parts of a multiprocessor */
};

/* The registers that a warp occupies, for a number of registers per thread. */
inline size_t warp_registers(unsigned per_thread) {
    return ((size_t)per_thread * 32 + REGISTER_UNIT - 1) / REGISTER_UNIT * REGISTER_UNIT;
}

/* The registers that must be available for a block. The hardware assumes that its warps
   are spread evenly over the parts of the multiprocessor. */
inline size_t block_registers(unsigned threads, unsigned per_thread) {
    size_t warps = (threads + 31) / 32;
    return (warps + SM_PARTS - 1) / SM_PARTS * SM_PARTS * warp_registers(per_thread);
}

/* Bytes of shared memory that a block may have, by compute capability. */
inline size_t max_block_shared(unsigned architecture) {
    switch (architecture) {
    case 80: case 87: return 163 << 10;
    case 86: case 89: case 120: case 121: return 99 << 10;
    case 70: return 96 << 10;
    case 75: return 64 << 10;
    default: return architecture >= 90 ? 227 << 10 : 48 << 10;
    }
}

} // namespace ptx
#endif
