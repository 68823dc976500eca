/* memory.h - memory spaces and their shadow state. The shadow of a space stores, for
   each byte, who wrote it last and who has read it since; race.h decides from this
   whether two accesses are ordered. */
#ifndef PTX_MEMORY_H
#define PTX_MEMORY_H
#include "module.h"

namespace ptx {


// >>shadow

/* One or several accesses to a cell. The stamp is the machine's clock at the time of the
   access: see race.h. `who` is the thread in the block and the flags below. */
struct access {
    uint32_t stamp;
    uint16_t pc;                /* instruction; UNKNOWN_PC if it does not fit */
    uint16_t who;
};

enum : uint16_t {
    THREAD_MASK = 0x3ff,
    LEVEL_SHIFT = 10,
    LEVEL_MASK = 3 << LEVEL_SHIFT,
    ONE_THREAD = 0 << LEVEL_SHIFT,      /* who accessed the cell: one thread, .. */
    SOME_LANES = 1 << LEVEL_SHIFT,      /* several lanes of a warp, .. */
    SOME_WARPS = 2 << LEVEL_SHIFT,      /* several warps of a block, .. */
    SOME_BLOCKS = 3 << LEVEL_SHIFT,     /* or several blocks */
    ATOMIC = 1 << 12,
    PENDING = 1 << 13,                  /* by cp.async, without its wait */
    UNKNOWN_PC = 0xffff
};

struct cell {
    access write, read;
};

/* The cells of a page cover 4, 2 or 1 bytes each: as many as the smallest access to the
   page so far, so that accesses of every size are distinguished exactly. */
enum { SHADOW_PAGE = 1024 };

struct shadow_page {
    std::unique_ptr<cell[]> cells;
    unsigned shift = 2;
};

struct shadow {
    std::vector<shadow_page> pages;

    void resize(size_t bytes) { pages.resize((bytes + SHADOW_PAGE - 1) / SHADOW_PAGE); }
    void refine(shadow_page &p, unsigned shift);

    /* Returns the page of an access that is aligned to the lowest bit of its size. */
    shadow_page &page(size_t at, size_t size) {
        shadow_page &p = pages[at / SHADOW_PAGE];
        unsigned shift = size & 1 ? 0 : size & 2 ? 1 : 2;
        if (!p.cells || shift < p.shift) refine(p, shift);
        return p;
    }
};


// >>global memory

struct allocation {
    unsigned char *base;
    size_t bytes;
    std::vector<uint64_t> written;      /* one bit per byte */
    ptx::shadow shadow;

    bool all_written(size_t at, size_t size) const;
    void set_written(size_t at, size_t size, bool value);
};

/* Returns the allocation that contains an address, or NULL. */
allocation *find_allocation(uint64_t address);
/* Forgets all accesses, when the clock starts again. */
void clear_global_shadow();


// >>generic addresses

/* Generic addresses of shared, local and parameter memory have a number in the upper
   byte, which no address of the host has. */
const uint64_t WINDOW_MASK = 0xffull << 56;
const uint64_t SHARED_WINDOW = 1ull << 56;
const uint64_t LOCAL_WINDOW = 2ull << 56;
const uint64_t PARAM_WINDOW = 3ull << 56;

} // namespace ptx
#endif
