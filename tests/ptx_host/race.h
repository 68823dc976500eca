/* race.h - whether accesses to memory are ordered.

   The machine has a clock that advances whenever threads synchronise: at a barrier and at
   a bar.warp.sync. Each access is stamped with the clock. Two accesses of different
   threads are ordered if the later one knows that the earlier one came before a
   synchronisation of both threads:

     same thread                     always
     same warp                       stamp < warp.floor (the warp's last synchronisation),
                                     or < warp.known[..] if only some lanes synchronised
     same block                      stamp < block_floor (the block's last barrier)
     different blocks of a launch    never
     different launches              always: the stamp is before launch_start

   The clock runs on from block to block and from launch to launch. So cells with old
   stamps count as never accessed, and nothing has to be cleared. */
#ifndef PTX_RACE_H
#define PTX_RACE_H
#include "machine.h"

namespace ptx {

/* The bytes that neighbouring lanes access, without gaps: `count` lanes from `lane`, with
   `size` bytes each. */
struct range {
    ptx::space space;           /* GLOBAL or SHARED */
    ptx::shadow *shadow;
    size_t at;                  /* offset in the shadow */
    size_t size;
    uint64_t address;           /* for messages */
    unsigned char *bytes;       /* the memory */
    int lane, count;
    bool collective;            /* all lanes get the data, as by ldmatrix */
};

/* The addresses and values of a store, to recognise lanes of one instruction that write
   the same value to the same place. */
struct lane_values {
    const uint64_t *address;
    const unsigned char *value; /* of lane 0 */
    size_t stride;
    uint32_t active;
};

/* Record an access and report it if it races with earlier ones. note_atomic is for atom
   and red; `values` may be NULL. A read of shared memory also reports bytes that were not
   written. */
void note_read(machine &m, const instruction &i, const range &r);
void note_write(machine &m, const instruction &i, const range &r, const lane_values *values);
void note_atomic(machine &m, const instruction &i, const range &r);
/* Whether the bytes of shared memory were written since the block began. */
bool written_in_block(const machine &m, const range &r);
/* A cp.async begins to write, and its data has landed. */
void note_copy_begin(machine &m, const instruction &i, const range &r);
void note_copy_end(machine &m, const copy &c);

/* All threads of the block, or some lanes of the current warp synchronise. */
void synchronise_block(machine &m);
void synchronise_lanes(machine &m, uint32_t lanes);

} // namespace ptx
#endif
