/* access.h - what all instructions that access memory share: the addresses of lanes, runs
   of lanes whose accesses are side by side, the checks of addresses, and the counters. */
#ifndef PTX_ACCESS_H
#define PTX_ACCESS_H
#include "exec.h"
#include "race.h"

namespace ptx {


// >>addresses

/* Gets the addresses of all lanes from a pair of operands: base and offset. */
void gather_addresses(machine &m, const operand *o, uint64_t *address);

/* Active lanes, each of which accesses the bytes behind those of the lane before. */
struct run {
    int lane, count;
};

/* Finds the runs of an instruction, in ascending order. Returns their number. */
int find_runs(const uint64_t *address, uint32_t active, size_t size, run runs[LANES]);

/* The space of a generic address, by its upper byte. */
inline ptx::space space_of(uint64_t window) {
    if (window == SHARED_WINDOW) return SHARED;
    if (window == LOCAL_WINDOW) return LOCAL;
    return window == PARAM_WINDOW ? PARAM : GLOBAL;
}

/* Calls access(space, lanes) for each space that generic addresses are in. */
template <class F> void for_spaces(uint32_t active, uint64_t *address, F access) {
    while (active) {
        uint64_t window = address[lowest(active)] & WINDOW_MASK;
        uint32_t group = 0;
        for (int l : lanes{active})
            if ((address[l] & WINDOW_MASK) == window) group |= 1u << l;
        ptx::space s = space_of(window);
        if (s != GLOBAL)
            for (int l : lanes{group}) address[l] &= ~WINDOW_MASK;
        access(s, group);
        active &= ~group;
    }
}


// >>checks

/* Find the memory of a run of lanes. They return false after a fault. The addresses of
   global memory must be multiples of `align`. */
bool locate_global(machine &m, const instruction &i, run lanes, uint64_t address, size_t size,
                   size_t align, range *r, allocation **a);
bool locate_shared(machine &m, const instruction &i, run lanes, uint64_t address, size_t size,
                   range *r);
/* The same for local and parameter memory of one lane. They return NULL after a fault. */
unsigned char *locate_local(machine &m, const instruction &i, int lane, uint64_t address,
                            size_t size);
const unsigned char *locate_param(machine &m, const instruction &i, int lane, uint64_t address,
                                  size_t size);

/* Reports the lanes of a range that read bytes of global memory that were not written. */
void check_written(machine &m, const instruction &i, const range &r, const allocation &a);


// >>counters

/* Adds the 32-byte sectors that the active lanes access, and the sectors that as many
   different bytes need at least. */
void count_sectors(machine &m, const instruction &i, const uint64_t *address, uint32_t active,
                   size_t size, bool writes);
/* Counts the sectors of a range that the launch has not read (written) before. */
void count_unique(machine &m, allocation &a, const range &r, bool writes);
/* Counts the passes of an access to shared memory. */
void count_shared(machine &m, const instruction &i, const uint64_t *address, uint32_t active,
                  size_t size);


// >>decoding

/* Modifiers that change neither the value nor what is checked here: caching, ordering. */
void take_hints(opcode &o);

} // namespace ptx
#endif
