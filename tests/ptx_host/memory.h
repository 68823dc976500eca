/* memory.h - memory spaces and their shadow state. The shadow of a space stores, for
   each byte, who wrote it last and who has read it since; race.h decides from this
   whether two accesses are ordered. */
#ifndef PTX_MEMORY_H
#define PTX_MEMORY_H
#include "module.h"

namespace ptx {


// >>shadow

/* One or several accesses to a cell. The stamp is the machine's clock at the time of the
   access: see race.h. `who` is the thread in the block, the flags below, and in the upper
   half the number of the instruction. */
struct access {
    uint32_t stamp, who;
};

enum : uint32_t {
    THREAD_MASK = 0x3ff,
    LEVEL_SHIFT = 10,
    LEVEL_MASK = 3 << LEVEL_SHIFT,
    ONE_THREAD = 0 << LEVEL_SHIFT,      /* who accessed the cell: one thread, .. */
    SOME_LANES = 1 << LEVEL_SHIFT,      /* several lanes of a warp, .. */
    SOME_WARPS = 2 << LEVEL_SHIFT,      /* several warps of a block, .. */
    SOME_BLOCKS = 3 << LEVEL_SHIFT,     /* or several blocks */
    ATOMIC = 1 << 12,
    PENDING = 1 << 13,                  /* by cp.async, without its wait */
    PC_SHIFT = 16,
    UNKNOWN_PC = 0xffff                 /* the number does not fit */
};

/* Cells that are side by side: their last write, and the reads since then. */
struct cells {
    uint32_t *write_stamp, *write_who, *read_stamp, *read_who;
    unsigned shift;             /* a cell covers 1 << shift bytes */
    unsigned count;
};

/* The cells of a page cover 4, 2 or 1 bytes each: as many as the smallest access to the
   page so far, so that accesses of every size are distinguished exactly. */
enum { SHADOW_PAGE = 1024 };

struct shadow_page {
    std::unique_ptr<uint32_t[]> words;  /* the four arrays of cells, one after another */
    unsigned shift = 2;

    void refine(unsigned finer);

    /* The cells of the bytes from `first` to `last` of the page. */
    cells between(size_t first, size_t last) {
        size_t n = SHADOW_PAGE >> shift, from = first >> shift;
        uint32_t *w = words.get() + from;
        unsigned count = (unsigned)((last >> shift) - from + 1);
        return {w, w + n, w + 2 * n, w + 3 * n, shift, count};
    }
};

struct shadow {
    std::vector<shadow_page> pages;

    void resize(size_t bytes) { pages.resize((bytes + SHADOW_PAGE - 1) / SHADOW_PAGE); }

    /* Calls f(cells, position) for the pages of `bytes` bytes from `at`, which are
       accessed `size` bytes at a time; position: of the first cell, from `at`. */
    template <class F> void for_cells(size_t at, size_t bytes, size_t size, F f) {
        unsigned shift = size % 4 ? (unsigned)(size % 2 == 0) : 2;
        for (size_t done = 0; done < bytes;) {
            size_t first = (at + done) % SHADOW_PAGE;
            size_t n = SHADOW_PAGE - first < bytes - done ? SHADOW_PAGE - first : bytes - done;
            shadow_page &p = pages[(at + done) / SHADOW_PAGE];
            if (!p.words || shift < p.shift) p.refine(shift);
            f(p.between(first, first + n - 1), (unsigned)done);
            done += n;
        }
    }
};


// >>global memory

/* Offsets in `written` and `shadow` are from `origin`: the base, rounded down so that
   aligned addresses have aligned offsets. */
struct allocation {
    unsigned char *base;
    size_t bytes;
    uint64_t origin;
    std::vector<uint64_t> written;      /* one bit per byte */
    /* One bit per 32-byte sector that the launch has read, and written. */
    std::vector<uint64_t> touched[2];
    ptx::shadow shadow;

    /* Whether an access is within the allocation. */
    bool contains(uint64_t address, size_t size) const {
        uint64_t offset = address - (uint64_t)(uintptr_t)base;
        return offset < bytes && size <= bytes - offset;
    }

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
