/* race.cpp - records accesses in cells and reports those that race. See race.h. */
#include "race.h"
#include "exec.h"
#include <algorithm>
#include <stdio.h>
#include <string.h>

namespace ptx {

// >>order. These functions are without branches, so that loops over cells become vectors.

/* An instruction that accesses memory. */
struct accessor {
    uint32_t now, horizon;      /* accesses with stamps before the horizon do not count */
    uint32_t block_start, block_floor, warp_floor;
    uint32_t flags;             /* PENDING or ATOMIC, and its number */
    bool collective;            /* by more than one thread */
};

static bool same_warp(uint32_t a, uint32_t b) { return (a ^ b) < LANES; }

/* Whether all accesses that `a` stands for are ordered before that of a thread, except by
   a synchronisation of some lanes. */
static inline bool ordered_fully(access a, uint32_t thread, const accessor &by) {
    uint32_t level = a.who & LEVEL_MASK, other = a.who & THREAD_MASK;
    bool in_block = (a.stamp >= by.block_start) & (level != SOME_BLOCKS);
    bool own = (other == thread) & (level == ONE_THREAD) & !by.collective;
    bool in_warp = same_warp(other, thread) & (level != SOME_WARPS) & (a.stamp < by.warp_floor);
    return (a.stamp < by.horizon) | (in_block & (own | in_warp | (a.stamp < by.block_floor)));
}

/* Whether a synchronisation of some lanes orders the access of another thread of this
   block before the current one. */
static bool ordered_partially(const machine &m, access a, uint32_t thread) {
    uint32_t other = a.who & THREAD_MASK;
    const std::vector<uint32_t> &known = m.warp->known;
    if (known.empty() || !same_warp(other, thread)) return false;
    if (a.stamp < m.block_start || (a.who & LEVEL_MASK) >= SOME_WARPS) return false;
    return a.stamp < known[thread % LANES * LANES + other % LANES];
}

static bool ordered(const machine &m, access a, uint32_t thread, const accessor &by) {
    return ordered_fully(a, thread, by) || ordered_partially(m, a, thread);
}

/* The access of a thread together with those that `a` stands for: reads, or atomic
   accesses. Of accesses that are ordered before the new one, only the new one matters. */
static inline access joined(access a, uint32_t thread, const accessor &by) {
    uint32_t level = a.who & LEVEL_MASK, other = a.who & THREAD_MASK;
    bool warps = (level == SOME_WARPS) | !same_warp(other, thread);
    bool blocks = (level == SOME_BLOCKS) | (a.stamp < by.block_start);
    uint32_t result = other != thread ? (uint32_t)SOME_LANES : level;
    result = a.stamp < by.warp_floor ? (uint32_t)ONE_THREAD : result;
    result = warps ? (uint32_t)SOME_WARPS : result;
    result = a.stamp < by.block_floor ? (uint32_t)ONE_THREAD : result;
    result = blocks ? (uint32_t)SOME_BLOCKS : result;
    result = a.stamp < by.horizon ? (uint32_t)ONE_THREAD : result;
    uint32_t least = by.collective ? SOME_LANES : ONE_THREAD;
    result = result < least ? least : result;
    return {by.now, thread | result | by.flags};
}


// >>reports

static const char *space_text(ptx::space s) { return s == SHARED ? "shared" : "global"; }

static bool begins_later(uint32_t stamp, const block_time &b) { return stamp < b.start; }

/* "thread 3 of block 0,0,0", or "several warps, the last one .." */
static std::string accessor_text(const machine &m, access a) {
    static const char *several[] = {"", "several lanes, last ", "several warps, last ",
                                    "several blocks, last "};
    char text[120];
    auto found = std::upper_bound(m.history.begin(), m.history.end(), a.stamp, begins_later);
    const unsigned *b = found == m.history.begin() ? m.block : found[-1].block;
    snprintf(text, sizeof text, "%sthread %u of block %u,%u,%u",
             several[(a.who & LEVEL_MASK) >> LEVEL_SHIFT], a.who & THREAD_MASK, b[0], b[1], b[2]);
    return text;
}

static std::string other_line(const machine &m, access a) {
    uint32_t pc = a.who >> PC_SHIFT;
    return pc == UNKNOWN_PC ? "an unknown line" : line_text(*m.kernel, pc);
}

/* The lane whose access begins at a position of a range, and its address. */
static int lane_at(const range &r, size_t position) { return r.lane + (int)(position / r.size); }

static unsigned long long address_at(const range &r, size_t position) {
    return r.address + position / r.size * r.size;
}

static void report_race(machine &m, const instruction &i, const range &r, size_t position,
                        const char *what, access a, const char *other) {
    fault(m, r.space == SHARED ? PTX_SHARED_RACE : PTX_GLOBAL_RACE,
          {&i, thread_of(m, lane_at(r, position))},
          "%s of %zu bytes at %s address 0x%llx is not ordered with the %s%s by %s at %s", what,
          r.size, space_text(r.space), address_at(r, position), a.who & ATOMIC ? "atomic " : "",
          other, accessor_text(m, a).c_str(), other_line(m, a).c_str());
}

static void report_pending(machine &m, const instruction &i, const range &r, size_t position,
                           const char *what, access a) {
    fault(m, PTX_COPY_NOT_AWAITED, {&i, thread_of(m, lane_at(r, position))},
          "%s of %zu bytes at shared address 0x%llx, which the cp.async of thread %u at %s "
          "writes: no cp.async.wait_group came before",
          what, r.size, address_at(r, position), a.who & THREAD_MASK, other_line(m, a).c_str());
}

static void report_unwritten(machine &m, const instruction &i, const range &r, size_t position) {
    fault(m, PTX_UNWRITTEN_SHARED, {&i, thread_of(m, lane_at(r, position))},
          "read of %zu bytes at shared address 0x%llx, of which some were never written", r.size,
          address_at(r, position));
}


// >>accesses

static accessor accessor_of(const machine &m, const instruction &i, const range &r,
                            uint32_t flags) {
    uint32_t horizon = r.space == SHARED ? m.block_start : m.launch_start;
    return {m.now, horizon, m.block_start, m.block_floor, m.warp->floor,
            pc_of(i) << PC_SHIFT | flags, r.collective};
}

/* The part of a range that is in one page of the shadow. */
struct part {
    ptx::cells cells;
    unsigned start;             /* the offset of the first cell in the range */
    unsigned size_shift;
    uint32_t first;             /* thread of the range's first lane */

    /* Of cell c: its offset in the range, the thread that accesses it, its accesses. */
    unsigned position(unsigned c) const { return start + (c << cells.shift); }
    uint32_t thread(unsigned c) const { return first + (position(c) >> size_shift); }
    access write(unsigned c) const { return {cells.write_stamp[c], cells.write_who[c]}; }
    access read(unsigned c) const { return {cells.read_stamp[c], cells.read_who[c]}; }
};

/* Calls f for the parts of a range. */
template <class F> static inline void for_parts(const machine &m, const range &r, F f) {
    unsigned size_shift = r.count == 1 ? 31 : (unsigned)__builtin_ctzll(r.size);
    uint32_t first = thread_of(m, r.lane);
    size_t bytes = r.size * (size_t)r.count;
    r.shadow->for_cells(r.at, bytes, r.size, [&](const cells &c, unsigned start) {
        f(part{c, start, size_shift, first});
    });
}

/* Reports what is wrong with the read of a cell. */
__attribute__((noinline))
static void check_read(machine &m, const instruction &i, const range &r, const part &p, unsigned c,
                       const accessor &by) {
    access w = p.write(c);
    if (w.stamp < by.horizon) {
        if (r.space == SHARED) report_unwritten(m, i, r, p.position(c));
    } else if (w.who & PENDING) {
        report_pending(m, i, r, p.position(c), "read", w);
    } else if (!ordered(m, w, p.thread(c), by)) {
        report_race(m, i, r, p.position(c), "read", w, "write");
    }
}

void note_read(machine &m, const instruction &i, const range &r) {
    const accessor by = accessor_of(m, i, r, 0);
    /* Shared memory must have been written in this block. */
    const uint32_t written = r.space == SHARED ? m.block_start : 0;
    for_parts(m, r, [&](const part &p) {
        uint32_t doubtful = 0;
        for (unsigned c = 0; c < p.cells.count; c++) {
            access w = p.write(c);
            bool fine = ordered_fully(w, p.thread(c), by) & (w.stamp >= written);
            doubtful |= (uint32_t)!fine | (w.who & PENDING);
        }
        for (unsigned c = 0; doubtful && c < p.cells.count; c++) check_read(m, i, r, p, c, by);
        LANES_INDEPENDENT
        for (unsigned c = 0; c < p.cells.count; c++) {
            access a = joined(p.read(c), p.thread(c), by);
            p.cells.read_stamp[c] = a.stamp;
            p.cells.read_who[c] = a.who;
        }
    });
}

/* Whether the write `a` of a cell is by another lane of the same instruction, with the
   same value. If it is, the order of both does not matter. */
static bool same_value(const machine &m, const instruction &i, const range &r, const part &p,
                       unsigned c, access a, const lane_values *v) {
    if (!v || a.stamp != m.now || a.who >> PC_SHIFT != pc_of(i)) return false;
    const unsigned other = a.who & THREAD_MASK, mine = p.thread(c);
    if (!same_warp(other, mine)) return false;

    const size_t k = mine % LANES, l = other % LANES, size = (size_t)1 << p.cells.shift;
    const uint64_t cell = v->address[r.lane] + p.position(c);
    if (cell - v->address[l] + size > r.size) return false;
    return !memcmp(v->value + v->stride * k + (cell - v->address[k]),
                   v->value + v->stride * l + (cell - v->address[l]), size);
}

/* Reports what is wrong with the write of a cell. */
__attribute__((noinline))
static void check_write(machine &m, const instruction &i, const range &r, const part &p, unsigned c,
                        const accessor &by, const lane_values *values) {
    access w = p.write(c), read = p.read(c);
    uint32_t thread = p.thread(c);
    const char *what = by.flags & ATOMIC ? "atomic access" : "write";
    bool both_atomic = by.flags & w.who & ATOMIC;
    if (w.stamp >= by.horizon && (w.who & PENDING)) {
        report_pending(m, i, r, p.position(c), what, w);
    } else if (!both_atomic && !ordered(m, w, thread, by)) {
        if (!same_value(m, i, r, p, c, w, values))
            report_race(m, i, r, p.position(c), what, w, "write");
    }
    if (!ordered(m, read, thread, by))
        report_race(m, i, r, p.position(c), what, read, "read");
}

static void note_writing(machine &m, const instruction &i, const range &r, uint32_t flags,
                         const lane_values *values) {
    const accessor by = accessor_of(m, i, r, flags);
    for_parts(m, r, [&](const part &p) {
        uint32_t doubtful = 0;
        for (unsigned c = 0; c < p.cells.count; c++) {
            access w = p.write(c);
            bool fine = ordered_fully(w, p.thread(c), by) &
                        ordered_fully(p.read(c), p.thread(c), by);
            doubtful |= (uint32_t)!fine | (w.who & PENDING);
        }
        for (unsigned c = 0; doubtful && c < p.cells.count; c++)
            check_write(m, i, r, p, c, by, values);
        LANES_INDEPENDENT
        for (unsigned c = 0; c < p.cells.count; c++) {
            access w = p.write(c), mine = {by.now, p.thread(c) | by.flags};
            if (w.who & flags & ATOMIC) mine = joined(w, p.thread(c), by);
            p.cells.write_stamp[c] = mine.stamp;
            p.cells.write_who[c] = mine.who;
            p.cells.read_stamp[c] = p.cells.read_who[c] = 0;
        }
    });
}

void note_write(machine &m, const instruction &i, const range &r, const lane_values *values) {
    note_writing(m, i, r, 0, values);
}

void note_atomic(machine &m, const instruction &i, const range &r) {
    note_writing(m, i, r, ATOMIC, nullptr);
}

bool written_in_block(const machine &m, const range &r) {
    bool all = true;
    for_parts(m, r, [&](const part &p) {
        for (unsigned c = 0; c < p.cells.count; c++) all &= p.write(c).stamp >= m.block_start;
    });
    return all;
}

void note_copy_begin(machine &m, const instruction &i, const range &r) {
    note_writing(m, i, r, PENDING, nullptr);
}

/* From now on the copy counts as a write that its thread made just now. */
void note_copy_end(machine &m, const copy &c) {
    m.shared_shadow.for_cells(c.to, c.size, c.size, [&](const cells &x, unsigned) {
        for (unsigned n = 0; n < x.count; n++) {
            uint32_t who = x.write_who[n];
            if (!(who & PENDING) || (who & THREAD_MASK) != c.thread) continue;
            x.write_stamp[n] = m.now;
            x.write_who[n] = c.pc << PC_SHIFT | c.thread;
        }
    });
}


// >>synchronisation

void synchronise_block(machine &m) {
    m.block_floor = ++m.now;
    for (warp &w : m.warps) w.known.clear();
}

/* Every lane of a group learns what the others know, and that their accesses up to now
   came before. */
void synchronise_lanes(machine &m, uint32_t group) {
    warp &w = *m.warp;
    m.now++;
    if ((w.exists & ~group) == 0) {
        w.floor = m.now;
        w.known.clear();
        return;
    }
    group &= w.exists;
    if (w.known.empty()) w.known.resize(LANES * LANES);
    uint32_t all[LANES] = {};
    for (int k = 0; k < LANES; k++) {
        for (int l : lanes{group}) all[k] = std::max(all[k], w.known[(size_t)(l * LANES + k)]);
        if (group >> k & 1) all[k] = m.now;
    }
    for (int l : lanes{group}) std::copy(all, all + LANES, &w.known[(size_t)(l * LANES)]);
}

} // namespace ptx
