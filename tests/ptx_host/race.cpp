/* race.cpp - records accesses in cells and reports those that race. See race.h. */
#include "race.h"
#include <algorithm>
#include <stdio.h>
#include <string.h>

namespace ptx {

// >>order

/* The accesses that a thread now makes to one space. */
struct accessor {
    unsigned thread;
    uint16_t pc;
    uint32_t horizon;           /* accesses with earlier stamps do not count */
    bool collective;            /* not only this thread */
};

static bool same_warp(unsigned a, unsigned b) { return a / LANES == b / LANES; }

/* Whether the access of another thread of this block is ordered before the current one by
   a synchronisation of some lanes or warps. */
static bool ordered_partially(const machine &m, const access &a, unsigned thread) {
    unsigned other = a.who & THREAD_MASK;
    if (same_warp(other, thread)) {
        const std::vector<uint32_t> &known = m.warp->known;
        return !known.empty() && a.stamp < known[thread % LANES * LANES + other % LANES];
    }
    return !m.known.empty() && a.stamp < m.known[thread / LANES * MAX_WARPS + other / LANES];
}

/* Whether all accesses that `a` stands for are ordered before the current one. */
static inline bool ordered(const machine &m, const access &a, const accessor &by) {
    if (a.stamp < m.block_start) return false;      /* another block of the launch */
    uint16_t level = a.who & LEVEL_MASK;
    if (level == SOME_BLOCKS) return false;
    if (a.stamp < m.block_floor) return true;

    unsigned other = a.who & THREAD_MASK;
    bool in_warp = same_warp(other, by.thread);
    if (level == ONE_THREAD && other == by.thread && !by.collective) return true;
    if (level != SOME_WARPS && in_warp && a.stamp < m.warp->floor) return true;
    return ordered_partially(m, a, by.thread);
}

/* Adds an access to those that `a` stands for: reads, or atomic accesses. Of accesses
   that are ordered before the new one, only the new one matters. */
static inline void add(const machine &m, access &a, const accessor &by, uint16_t flags) {
    unsigned other = a.who & THREAD_MASK;
    uint16_t level = a.who & LEVEL_MASK;
    if (a.stamp < by.horizon) level = ONE_THREAD;
    else if (a.stamp < m.block_start) level = SOME_BLOCKS;
    else if (level == SOME_BLOCKS) level = SOME_BLOCKS;
    else if (a.stamp < m.block_floor) level = ONE_THREAD;
    else if (!same_warp(other, by.thread)) level = SOME_WARPS;
    else if (level == SOME_WARPS) level = SOME_WARPS;
    else if (a.stamp < m.warp->floor) level = ONE_THREAD;
    else if (other != by.thread) level = SOME_LANES;
    if (level == ONE_THREAD && by.collective) level = SOME_LANES;
    a = {m.now, by.pc, (uint16_t)(by.thread | level | flags)};
}


// >>reports

static const char *space_text(ptx::space s) { return s == SHARED ? "shared" : "global"; }

/* "thread 3 of block 0,0,0", or "several warps, the last one .." */
static std::string accessor_text(const machine &m, const access &a) {
    static const char *several[] = {"", "several lanes, last ", "several warps, last ",
                                    "several blocks, last "};
    char text[120];
    auto later = [](uint32_t stamp, const block_time &b) { return stamp < b.start; };
    auto found = std::upper_bound(m.history.begin(), m.history.end(), a.stamp, later);
    const unsigned *b = found == m.history.begin() ? m.block : found[-1].block;
    snprintf(text, sizeof text, "%sthread %u of block %u,%u,%u",
             several[(a.who & LEVEL_MASK) >> LEVEL_SHIFT], a.who & THREAD_MASK, b[0], b[1], b[2]);
    return text;
}

static std::string other_line(const machine &m, const access &a) {
    return a.pc == UNKNOWN_PC ? "an unknown line" : line_text(*m.kernel, a.pc);
}

__attribute__((noinline))
static void report_race(machine &m, const instruction &i, int lane, const range &r,
                        const char *what, const access &a, const char *other) {
    fault(m, r.space == SHARED ? PTX_SHARED_RACE : PTX_GLOBAL_RACE, {&i, thread_of(m, lane)},
          "%s of %zu bytes at %s address 0x%llx is not ordered with the %s%s by %s at %s", what,
          r.size, space_text(r.space), (unsigned long long)r.address,
          a.who & ATOMIC ? "atomic " : "", other, accessor_text(m, a).c_str(),
          other_line(m, a).c_str());
}

__attribute__((noinline))
static void report_pending(machine &m, const instruction &i, int lane, const range &r,
                           const char *what, const access &a) {
    fault(m, PTX_COPY_NOT_AWAITED, {&i, thread_of(m, lane)},
          "%s of %zu bytes at shared address 0x%llx, which the cp.async of thread %u at %s "
          "writes: no cp.async.wait_group came before",
          what, r.size, (unsigned long long)r.address, a.who & THREAD_MASK,
          other_line(m, a).c_str());
}

__attribute__((noinline))
static void report_unwritten(machine &m, const instruction &i, int lane, const range &r) {
    fault(m, PTX_UNWRITTEN_SHARED, {&i, thread_of(m, lane)},
          "read of %zu bytes at shared address 0x%llx, of which some were never written", r.size,
          (unsigned long long)r.address);
}


// >>accesses

/* Calls f for the cells of a range. */
template <class F> static inline void for_cells(const range &r, F f) {
    shadow_page &p = r.shadow->page(r.at, r.size);
    size_t in_page = r.at % SHADOW_PAGE;
    size_t first = in_page >> p.shift, last = (in_page + r.size - 1) >> p.shift;
    for (size_t c = first; c <= last; c++) f(p.cells[c]);
}

static accessor accessor_of(const machine &m, const instruction &i, int lane, const range &r) {
    uint32_t horizon = r.space == SHARED ? m.block_start : m.launch_start;
    return {thread_of(m, lane), pc_of(i), horizon, r.collective};
}

void note_read(machine &m, const instruction &i, int lane, const range &r) {
    accessor by = accessor_of(m, i, lane, r);
    const uint16_t who = (uint16_t)(by.thread | (r.collective ? SOME_LANES : ONE_THREAD));
    for_cells(r, [&](cell &c) {
        /* The same read as before: a write in between would have erased it. */
        if (c.read.stamp == m.now && c.read.pc == by.pc && c.read.who == who) return;
        if (c.write.stamp >= by.horizon) {
            if (c.write.who & PENDING) report_pending(m, i, lane, r, "read", c.write);
            else if (!ordered(m, c.write, by))
                report_race(m, i, lane, r, "read", c.write, "write");
        } else if (r.space == SHARED) {
            report_unwritten(m, i, lane, r);
        }
        add(m, c.read, by, 0);
    });
}

/* Whether an earlier lane of the same instruction has written the same value to this
   place. If it has, the order of both does not matter. */
static bool same_value(const machine &m, const instruction &i, int lane, const range &r,
                       const access &a, const lane_values *v) {
    if (!v || a.stamp != m.now || a.pc != pc_of(i)) return false;
    if (!same_warp(a.who & THREAD_MASK, thread_of(m, lane))) return false;

    uint64_t mine = v->address[lane];
    for (int l : lanes{v->active & ((1u << lane) - 1)}) {
        if (v->address[l] >= mine + r.size || mine >= v->address[l] + r.size) continue;
        return !memcmp(r.bytes, v->value + v->stride * (size_t)lane, r.size);
    }
    return false;
}

void note_write(machine &m, const instruction &i, int lane, const range &r, bool atomic,
                const lane_values *values) {
    accessor by = accessor_of(m, i, lane, r);
    uint16_t flags = atomic ? ATOMIC : 0;
    const char *what = atomic ? "atomic access" : "write";
    for_cells(r, [&](cell &c) {
        bool written = c.write.stamp >= by.horizon;
        bool both_atomic = atomic && written && (c.write.who & ATOMIC);
        if (written && (c.write.who & PENDING)) {
            report_pending(m, i, lane, r, what, c.write);
        } else if (written && !both_atomic && !ordered(m, c.write, by)) {
            if (!same_value(m, i, lane, r, c.write, values))
                report_race(m, i, lane, r, what, c.write, "write");
        }
        if (c.read.stamp >= by.horizon && !ordered(m, c.read, by))
            report_race(m, i, lane, r, what, c.read, "read");

        if (both_atomic) add(m, c.write, by, flags);
        else c.write = {m.now, by.pc, (uint16_t)(by.thread | flags)};
        c.read = {};
    });
}

void note_copy_begin(machine &m, const instruction &i, int lane, const range &r) {
    note_write(m, i, lane, r, false, nullptr);
    for_cells(r, [](cell &c) { c.write.who |= PENDING; });
}

/* From now on the copy counts as a write that its thread made just now. */
void note_copy_end(machine &m, const copy &c) {
    range r = {SHARED, &m.shared_shadow, c.to, c.size, c.to, nullptr};
    for_cells(r, [&](cell &x) {
        bool mine = (x.write.who & PENDING) && (x.write.who & THREAD_MASK) == c.thread;
        if (mine) x.write = {m.now, c.pc, c.thread};
    });
}


// >>synchronisation

void synchronise_block(machine &m) {
    m.block_floor = ++m.now;
    m.known.clear();
    for (warp &w : m.warps) w.known.clear();
}

/* Every member of a group learns what the others know, and that their accesses up to now
   came before. `known` has one row of n floors for each member. */
static void share_knowledge(std::vector<uint32_t> &known, unsigned n, uint32_t group,
                            uint32_t now) {
    if (known.empty()) known.resize(n * n);
    std::vector<uint32_t> all(n);
    for (unsigned k = 0; k < n; k++) {
        for (int l : lanes{group}) all[k] = std::max(all[k], known[(unsigned)l * n + k]);
        if (group >> k & 1) all[k] = now;
    }
    for (int l : lanes{group}) std::copy(all.begin(), all.end(), &known[(unsigned)l * n]);
}

void synchronise_warps(machine &m, uint32_t warps) {
    m.now++;
    share_knowledge(m.known, MAX_WARPS, warps, m.now);
    for (warp &w : m.warps)
        if (warps >> w.number & 1) w.floor = m.now;
}

void synchronise_lanes(machine &m, uint32_t group) {
    warp &w = *m.warp;
    m.now++;
    if ((w.exists & ~group) == 0) {
        w.floor = m.now;
        w.known.clear();
    } else {
        share_knowledge(w.known, LANES, group & w.exists, m.now);
    }
}

} // namespace ptx
