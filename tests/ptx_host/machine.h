/* machine.h - the state of a launch: warps with their splits, the block's barriers,
   shared memory, and the access to rows of registers. */
#ifndef PTX_MACHINE_H
#define PTX_MACHINE_H
#include "memory.h"
#include "module.h"
#include <set>

namespace ptx {

enum { LANES = 32, BARRIERS = 16 };
const uint32_t ALL_LANES = 0xffffffffu;


// >>warps

enum split_state : uint8_t { READY, AT_COLLECTIVE, AT_BARRIER };

/* Lanes of a warp that execute together. */
struct split {
    uint32_t mask;
    int pc;
    int join;                   /* the innermost open reconvergence, or -1 */
    split_state state;
    uint8_t barrier;            /* of a split that is AT_BARRIER */
};

/* A divergent branch whose lanes meet again at pc, its immediate post-dominator. */
struct reconvergence {
    int pc;
    uint32_t expected, arrived;
    int outer;                  /* the join of the split that diverged */
};

/* A cp.async that has not landed. */
struct copy {
    uint32_t to;                /* in shared memory */
    uint32_t group;
    uint32_t pc;
    uint16_t thread;
    uint8_t size;
    unsigned char data[16];
};

struct warp {
    unsigned number;
    uint32_t exists, alive;
    uint32_t *rows;             /* the bank of registers */
    std::vector<split> splits;
    std::vector<reconvergence> joins;
    std::vector<copy> copies;
    uint32_t group[LANES];      /* cp.async groups that each lane has committed */
    uint32_t floor;             /* accesses with earlier stamps are ordered in the warp */
    /* After a bar.warp.sync of some lanes: known[l * 32 + k] is a floor for lane k's
       accesses, seen from lane l. Empty if there was none. */
    std::vector<uint32_t> known;
    std::vector<unsigned char> local, local_written;
};

struct barrier {
    unsigned arrived;           /* threads */
    unsigned count;             /* of threads whose predicate is true, for bar.red */
};


// >>the machine

/* A block, and the stamp at which it began. */
struct block_time {
    uint32_t start;
    unsigned block[3];
};

struct machine {
    const ptx_kernel *kernel;
    const ptx_launch *launch;
    uint32_t *bank[2];          /* rows of the current warp; rows of constants */
    ptx::warp *warp;

    /* The block. */
    unsigned block[3];
    unsigned threads, warp_count;
    std::vector<ptx::warp> warps;
    std::vector<uint32_t> storage;      /* of the warps' banks */
    barrier barriers[BARRIERS];
    std::vector<unsigned char> shared;
    size_t shared_bytes;
    ptx::shadow shared_shadow;
    std::vector<unsigned char> params;

    /* The clock of race.h, and the stamps at which the launch, the block and the interval
       since its last barrier began. */
    uint32_t now, launch_start, block_start, block_floor;
    std::vector<block_time> history;    /* of all blocks so far, for messages */

    allocation *hint[256];              /* the last allocation of an instruction */
    bool stop;                          /* a fault has ended the launch */
    size_t faults;
    std::set<uint64_t> reported;        /* kind and instruction */
    uint64_t random;
    uint64_t executed[CLASSES];
    uint64_t thread_instructions;
    ptx_counters count;                 /* memory classes and divergence */
    std::vector<uint64_t *> touched;    /* words of allocations in which the launch set bits */
};

inline uint32_t *row32(machine &m, operand o) { return m.bank[o >> 31] + (o & ROW_MASK); }

inline uint64_t *row64(machine &m, operand o) {
    return (uint64_t *)(void *)(m.bank[o >> 31] + (o & ROW_MASK));
}

/* The lanes in which a predicate is true. */
inline uint32_t predicate(machine &m, operand o) {
    uint32_t mask = *row32(m, o);
    return o & IS_NEGATED ? ~mask : mask;
}

inline void set_predicate(machine &m, operand o, uint32_t active, uint32_t value) {
    uint32_t *p = row32(m, o);
    *p = (*p & ~active) | (value & active);
}

/* The value of one lane of a row of either width, zero-extended. */
inline uint64_t lane_value(machine &m, operand o, int lane) {
    return o & IS_WIDE ? row64(m, o)[lane] : row32(m, o)[lane];
}

inline void set_lane_value(machine &m, operand o, int lane, uint64_t value) {
    if (o & IS_WIDE) row64(m, o)[lane] = value;
    else row32(m, o)[lane] = (uint32_t)value;
}

inline int lowest(uint32_t mask) { return __builtin_ctz(mask); }
inline unsigned count_bits(uint32_t mask) { return (unsigned)__builtin_popcount(mask); }

/* for (int lane : lanes{mask}) visits the lanes of a mask in ascending order. */
struct lanes {
    uint32_t mask;

    struct iterator {
        uint32_t left;
        int operator*() const { return lowest(left); }
        void operator++() { left &= left - 1; }
        bool operator!=(const iterator &other) const { return left != other.left; }
    };

    iterator begin() const { return {mask}; }
    iterator end() const { return {0}; }
};

uint64_t draw(machine &m, uint64_t n);  /* a random number below n */


// >>warp.cpp

/* Runs the warps of the current block until all exit or a fault ends the launch. */
void run_block(machine &m);


// >>faults.cpp

/* Where a fault happened; thread is the linear index in the block. */
struct place {
    const instruction *i;
    unsigned thread;
};

void fault(machine &m, ptx_fault_kind kind, place p, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
/* The same, and the launch ends. */
void fatal(machine &m, ptx_fault_kind kind, place p, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
/* "line 12 (file.cu:34)" of an instruction. */
std::string line_text(const ptx_kernel &k, size_t pc);

inline unsigned thread_of(const machine &m, int lane) {
    return m.warp->number * LANES + (unsigned)lane;
}

/* The number of an instruction as it is stored in shadow cells. */
inline uint32_t pc_of(const instruction &i) { return i.pc < UNKNOWN_PC ? i.pc : UNKNOWN_PC; }

} // namespace ptx
#endif
