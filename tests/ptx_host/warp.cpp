/* warp.cpp - runs the warps of a block. A warp is a set of splits: lanes that are at the
   same instruction. A divergent branch makes two splits of one; they become one again at
   the branch's immediate post-dominator. As on GPUs since Volta, splits make progress
   independently of each other: a .sync instruction waits until all lanes of its
   membermask have arrived, wherever they come from. */
#include "exec.h"
#include "race.h"
#include <algorithm>

namespace ptx {

// >>undefined registers

/* An undefined address or branch leaves nothing to continue with. */
static bool must_be_defined(const instruction &i, uint32_t position) {
    if (position == GUARD_POSITION) return i.control == BRANCH;
    bool address = false;
    for_operands(*i.form, [&](uint32_t p, char kind) { address |= kind == 'm' && p == position; });
    return address;
}

static void report_undefined(machine &m, const instruction &i, uint32_t mask, const tracked &t) {
    auto report = must_be_defined(i, t.position) ? fatal : fault;
    report(m, PTX_UNWRITTEN_REGISTER, {&i, thread_of(m, lowest(mask))},
           "register %s has no value (lanes 0x%08x)", register_text(*m.kernel, t.reg).c_str(),
           mask);
}

/* The lanes that use an operand: selp uses only one of its sources. */
static uint32_t lanes_of_use(machine &m, const instruction &i, const tracked &t, uint32_t active) {
    if (!i.form->selects || t.position == GUARD_POSITION) return active;
    uint32_t first = predicate(m, i.o[3]);
    if (t.position == 1) return active & first;
    return t.position == 2 ? active & ~first : active;
}

/* Checks the operands of an instruction that may be undefined. Copying an undefined value
   is not a fault; the copy is undefined. */
static void check_tracked(machine &m, const instruction &i, uint32_t mask, uint32_t active) {
    const tracked_use &t = m.kernel->tracked.at((int)i.pc);
    uint32_t valid = ALL_LANES;
    for (const tracked &u : t.uses) {
        uint32_t *defined = row32(m, u.defined);
        uint32_t users = u.position == GUARD_POSITION ? mask : lanes_of_use(m, i, u, active);
        uint32_t missing = users & ~*defined;
        bool copied = i.form->copies && u.position != GUARD_POSITION;
        if (copied) valid &= *defined;
        else if (missing) report_undefined(m, i, missing, u);
    }
    for (const tracked &d : t.defs) {
        uint32_t *defined = row32(m, d.defined);
        *defined = (*defined & ~active) | (active & valid);
    }
}


// >>reconvergence

/* Adds a split. Lanes that are at the end of their join wait for the others there. */
static void check_join(warp &w, int n);

static void add_split(warp &w, split s) {
    if (s.join >= 0 && w.joins[(size_t)s.join].pc == s.pc) {
        w.joins[(size_t)s.join].arrived |= s.mask;
        check_join(w, s.join);
        return;
    }
    w.splits.push_back(s);
}

/* If all expected lanes have arrived, they continue as one split. */
static void check_join(warp &w, int n) {
    reconvergence j = w.joins[(size_t)n];
    if (!j.expected || j.arrived != j.expected) return;
    w.joins[(size_t)n] = {};
    add_split(w, {j.arrived, j.pc, j.outer, READY, 0});
}

static int add_join(warp &w, int pc, uint32_t expected, int outer) {
    size_t n = 0;
    while (n < w.joins.size() && w.joins[n].expected) n++;
    if (n == w.joins.size()) w.joins.push_back({});
    w.joins[n] = {pc, expected, 0, outer};
    return (int)n;
}

static void exit_lanes(warp &w, uint32_t mask) {
    w.alive &= ~mask;
    for (size_t n = 0; n < w.joins.size(); n++) {
        w.joins[n].expected &= ~mask;
        check_join(w, (int)n);
    }
}

/* Lets lanes continue that wait for others at the end of a divergent branch. The hardware
   does not guarantee that lanes reconverge there. */
static bool release_joins(warp &w) {
    bool any = false;
    for (size_t n = 0; n < w.joins.size(); n++) {
        reconvergence j = w.joins[n];
        if (!j.arrived) continue;
        w.joins[n].expected &= ~j.arrived;
        w.joins[n].arrived = 0;
        add_split(w, {j.arrived, j.pc, j.outer, READY, 0});
        any = true;
    }
    return any;
}

/* The join of the splits of a divergent branch that meet at pc. */
static int join_at(warp &w, int pc, const split &s) {
    bool same = s.join >= 0 && w.joins[(size_t)s.join].pc == pc;
    return pc < 0 || same ? s.join : add_join(w, pc, s.mask, s.join);
}

/* The lanes of `apart` go to one place and the others to another. */
static void diverge(machine &m, const split &s, uint32_t apart, int to, int others_to, int meet) {
    warp &w = *m.warp;
    int join = join_at(w, meet, s);
    add_split(w, {apart, to, join, READY, 0});
    add_split(w, {s.mask & ~apart, others_to, join, READY, 0});
}


// >>collectives

/* The membermask of a lane at a collective. Lanes that have exited do not count, except
   that an .aligned instruction needs all lanes. */
static uint32_t member_mask(machine &m, const instruction &i, int lane) {
    if (i.control == ALIGNED) return ALL_LANES;
    return row32(m, i.o[i.form->mask_operand])[lane] & m.warp->alive;
}

static void missing_lanes(machine &m, const instruction &i, int lane, uint32_t mask,
                          uint32_t missing, const char *why) {
    fatal(m, PTX_DIVERGED, {&i, thread_of(m, lane)},
          "lanes 0x%08x of the mask 0x%08x are missing at a collective: %s", missing, mask, why);
}

static bool check_members(machine &m, const instruction &i, uint32_t active) {
    for (int l : lanes{active}) {
        uint32_t mask = member_mask(m, i, l), gone = mask & ~m.warp->alive;
        if (!(mask >> l & 1)) {
            fatal(m, PTX_DIVERGED, {&i, thread_of(m, l)},
                  "lane %d executes a collective but is not in its mask 0x%08x", l, mask);
            return false;
        }
        if (gone) {
            missing_lanes(m, i, l, mask, gone, "they have exited or do not exist");
            return false;
        }
    }
    return true;
}

/* The value of one lane of an operand, which may be a predicate. */
static uint64_t operand_value(machine &m, char kind, operand o, int lane) {
    bool is_predicate = kind == 'P' || kind == 'p';
    return is_predicate ? predicate(m, o) >> lane & 1 : lane_value(m, o, lane);
}

static void set_operand(machine &m, char kind, operand o, int lane, uint64_t value) {
    if (kind == 'P' || kind == 'p') set_predicate(m, o, 1u << lane, value ? ALL_LANES : 0);
    else set_lane_value(m, o, lane, value);
}

/* Executes a collective whose lanes are at several instructions with the same form. It
   works on rows in a separate bank: each lane copies its sources to them, and its
   results from them. */
static void run_merged(machine &m, const instruction *const *at, uint32_t group) {
    enum { MAX_OPERANDS = 8, ROW = 2 * LANES };
    uint64_t rows[MAX_OPERANDS * LANES];
    operand operands[MAX_OPERANDS];
    uint32_t *constants = m.bank[1], *own = (uint32_t *)(void *)rows;
    instruction merged = *at[lowest(group)];
    merged.o = operands;

    for_operands(*merged.form, [&](uint32_t n, char kind) {
        operands[n] = IS_CONSTANT | n * ROW | (kind == 'l' || kind == 'L' ? IS_WIDE : 0);
        if (is_destination(kind)) return;
        for (int l : lanes{group}) {
            uint64_t value = operand_value(m, kind, at[l]->o[n], l);
            m.bank[1] = own;
            set_operand(m, kind, operands[n], l, value);
            m.bank[1] = constants;
        }
    });
    m.bank[1] = own;
    merged.run(m, merged, group);
    m.bank[1] = constants;
    for_operands(*merged.form, [&](uint32_t n, char kind) {
        if (!is_destination(kind)) return;
        for (int l : lanes{group}) {
            if (at[l]->o[n] == NO_OPERAND) continue;
            m.bank[1] = own;
            uint64_t value = operand_value(m, kind, operands[n], l);
            m.bank[1] = constants;
            set_operand(m, kind, at[l]->o[n], l, value);
        }
    });
}

/* Executes a collective for the lanes of a membermask; at: each lane's instruction. */
static void run_collective(machine &m, const instruction *const *at, uint32_t group) {
    const instruction *first = at[lowest(group)];
    for (int l : lanes{group}) {
        if (at[l] == first) continue;
        run_merged(m, at, group);
        return;
    }
    first->run(m, *first, group);
}

/* Whether a split waits at a collective, or at another instruction that may meet it: one
   with the same opcode and qualifiers. An .aligned instruction meets only itself. */
static bool waits_with(const machine &m, const split &s, const instruction &i) {
    const instruction &other = m.kernel->code[(size_t)s.pc];
    bool meets = i.control == ALIGNED ? &other == &i : other.form == i.form;
    return s.state == AT_COLLECTIVE && meets;
}

/* Executes a collective for the splits that wait there, if all lanes that they name are
   there, too, and name the same lanes. */
static void try_collective(machine &m, const instruction &i) {
    warp &w = *m.warp;
    const instruction *at[LANES] = {};
    uint32_t mask[LANES] = {}, present = 0;
    for (const split &s : w.splits) {
        if (!waits_with(m, s, i)) continue;
        for (int l : lanes{s.mask}) {
            at[l] = &m.kernel->code[(size_t)s.pc];
            mask[l] = member_mask(m, *at[l], l);
        }
        present |= s.mask;
    }
    auto complete = [&](int lane) {
        if (mask[lane] & ~present) return false;
        for (int l : lanes{mask[lane]})
            if (mask[l] != mask[lane]) return false;
        return true;
    };
    for (uint32_t before = 0; before != present;) {
        before = present;
        for (const split &s : w.splits) {
            if (!waits_with(m, s, i) || !(s.mask & present)) continue;
            for (int l : lanes{s.mask})
                if (!complete(l)) present &= ~s.mask;
        }
    }

    for (uint32_t left = present; left && !m.stop;) {
        uint32_t group = mask[lowest(left)];
        run_collective(m, at, group);
        left &= ~group;
    }
    std::vector<split> released;
    for (size_t n = w.splits.size(); n--;) {
        if (!waits_with(m, w.splits[n], i) || !(w.splits[n].mask & present)) continue;
        released.push_back(w.splits[n]);
        w.splits.erase(w.splits.begin() + (ptrdiff_t)n);
    }
    for (const split &s : released) add_split(w, {s.mask, s.pc + 1, s.join, READY, 0});
}

/* Lanes have exited: others may have waited only for them. */
static void retry_collectives(machine &m) {
    std::vector<const instruction *> waiting;
    for (const split &s : m.warp->splits)
        if (s.state == AT_COLLECTIVE) waiting.push_back(&m.kernel->code[(size_t)s.pc]);
    for (const instruction *i : waiting)
        if (!m.stop) try_collective(m, *i);
}

/* Whether all lanes of the warp are here and name all lanes. */
static bool is_full(machine &m, const instruction &i, uint32_t active) {
    if (i.control == ALIGNED) return active == ALL_LANES;
    if (active != m.warp->alive) return false;
    operand o = i.o[i.form->mask_operand];
    if (o & IS_CONSTANT) return (*row32(m, o) & active) == active;
    uint32_t named = active;
    for (int l : lanes{active}) named &= row32(m, o)[l];
    return named == active;
}

/* A split has arrived at a collective. Returns true if it has been executed. */
static bool arrive_collective(machine &m, split &s, const instruction &i) {
    if (is_full(m, i, s.mask)) {
        i.run(m, i, s.mask);
        s.pc++;
        return true;
    }
    if (!check_members(m, i, s.mask)) return false;
    s.state = AT_COLLECTIVE;
    m.warp->splits.push_back(s);
    try_collective(m, i);
    return false;
}


// >>barriers

/* Sets the result of bar.red in the lanes of a split. */
static void set_result(machine &m, const instruction &i, uint32_t mask, const barrier &b) {
    switch (i.form->variant) {
    case BARRIER_AND: set_predicate(m, i.o[0], mask, b.count == m.threads ? ALL_LANES : 0); break;
    case BARRIER_OR: set_predicate(m, i.o[0], mask, b.count ? ALL_LANES : 0); break;
    case BARRIER_POPC:
        for (int l : lanes{mask}) row32(m, i.o[0])[l] = b.count;
        break;
    default: break;
    }
}

/* Whether the lanes of a warp wait at one instruction, as an aligned barrier requires. */
static bool check_aligned_barrier(machine &m, const warp &w, unsigned number) {
    const split *first = nullptr;
    for (const split &s : w.splits) {
        if (s.state != AT_BARRIER || s.barrier != number) continue;
        const instruction &i = m.kernel->code[(size_t)s.pc];
        if (!first) first = &s;
        if (s.pc == first->pc || !i.form->aligned) continue;
        fatal(m, PTX_DIVERGED, {&i, w.number * LANES + (unsigned)lowest(s.mask)},
              "other lanes of the warp wait for barrier %u at another instruction, at %s", number,
              line_text(*m.kernel, (size_t)first->pc).c_str());
        return false;
    }
    return true;
}

/* All threads have arrived: those that wait continue. */
static void complete_barrier(machine &m, unsigned number) {
    barrier b = m.barriers[number];
    m.barriers[number] = {};
    warp *current = m.warp;
    for (warp &w : m.warps) {
        if (!check_aligned_barrier(m, w, number)) return;
        m.bank[0] = w.rows;
        std::vector<split> waiting;
        for (size_t n = w.splits.size(); n--;) {
            if (w.splits[n].state != AT_BARRIER || w.splits[n].barrier != number) continue;
            waiting.push_back(w.splits[n]);
            w.splits.erase(w.splits.begin() + (ptrdiff_t)n);
        }
        for (const split &s : waiting) {
            set_result(m, m.kernel->code[(size_t)s.pc], s.mask, b);
            add_split(w, {s.mask, s.pc + 1, s.join, READY, 0});
        }
    }
    m.bank[0] = current->rows;
    synchronise_block(m);
}

/* A split has arrived at a barrier. The operands are the number of the barrier, and of
   bar.red also a destination before and a predicate after it. */
static void arrive_barrier(machine &m, split &s, const instruction &i) {
    bool reduces = i.form->variant != BARRIER_SYNC;
    unsigned number = i.o[reduces ? 1 : 0];
    barrier &b = m.barriers[number];
    b.arrived += count_bits(s.mask);
    if (reduces) b.count += count_bits(predicate(m, i.o[2]) & s.mask);
    s.state = AT_BARRIER;
    s.barrier = (uint8_t)number;
    m.warp->splits.push_back(s);
    if (b.arrived == m.threads) complete_barrier(m, number);
}


// >>splits

static void branch_indexed(machine &m, const split &s, const instruction &i) {
    const std::vector<int> &table = m.kernel->tables[(size_t)i.target];
    const uint32_t *index = row32(m, i.o[0]);
    int join = join_at(*m.warp, m.kernel->reconvergence[(size_t)s.pc], s);
    for (uint32_t left = s.mask; left;) {
        uint32_t k = index[lowest(left)], same = 0;
        for (int l : lanes{left})
            if (index[l] == k) same |= 1u << l;
        if (k >= table.size()) {
            fatal(m, PTX_OUT_OF_BOUNDS, {&i, thread_of(m, lowest(left))},
                  "index %u of a table of %zu branch targets", k, table.size());
            return;
        }
        add_split(*m.warp, {same, table[k], join, READY, 0});
        left &= ~same;
    }
}

/* Executes control flow. Returns true if the split continues; otherwise its lanes have
   been given to other splits. */
static bool run_control(machine &m, split &s, const instruction &i, uint32_t active) {
    uint32_t others = s.mask & ~active;
    int next = s.pc + 1;
    switch (i.control) {
    case BRANCH:
        if (active && others) {
            m.count.divergent_branches++;
            diverge(m, s, active, i.target, next, m.kernel->reconvergence[(size_t)s.pc]);
            return false;
        }
        s.pc = active ? i.target : next;
        return true;
    case RETURN:
        if (others) add_split(*m.warp, {others, next, s.join, READY, 0});
        exit_lanes(*m.warp, active);
        retry_collectives(m);
        return false;
    case TRAP:
        if (active) fatal(m, PTX_LAUNCH, {&i, thread_of(m, lowest(active))}, "the kernel trapped");
        s.pc = next;
        return true;
    default:
        break;
    }

    if (!active) {
        s.pc = next;
        return true;
    }
    if (others) {               /* a guard: the others wait behind the instruction */
        diverge(m, s, others, next, s.pc, next);
        return false;
    }
    if (i.control == BARRIER) {
        arrive_barrier(m, s, i);
        return false;
    }
    if (i.control == BRANCH_INDEXED) {
        branch_indexed(m, s, i);
        return false;
    }
    return arrive_collective(m, s, i);
}

/* Runs a split until it waits, ends, diverges or has used up the budget. */
static void run_split(machine &m, split s, uint64_t *budget) {
    warp &w = *m.warp;
    const instruction *code = m.kernel->code.data();
    const int join = s.join, stop_at = join >= 0 ? w.joins[(size_t)join].pc : -1;
    for (; *budget; --*budget) {
        if (s.pc == stop_at) {
            add_split(w, s);
            return;
        }
        const instruction &i = code[s.pc];
        uint32_t active = s.mask;
        if (i.flags) {
            if (i.flags & GUARDED) active &= predicate(m, i.guard);
            if (i.flags & TRACKED) {
                check_tracked(m, i, s.mask, active);
                if (m.stop) return;
            }
        }
        m.executed[i.counter]++;
        m.thread_instructions += count_bits(i.control == BRANCH ? s.mask : active);
        if (i.control == NEXT) {
            if (active) i.run(m, i, active);
            if (m.stop) return;
            s.pc++;
        } else if (!run_control(m, s, i, active) || m.stop) {
            return;
        }
    }
    add_split(w, s);
}

/* Takes a split that can run out of the list: the one that is furthest behind, or in
   descending order the one that is furthest ahead. */
static bool take_split(machine &m, split *taken) {
    std::vector<split> &splits = m.warp->splits;
    size_t best = splits.size(), ready = 0;
    for (size_t n = 0; n < splits.size(); n++) {
        if (splits[n].state != READY) continue;
        ready++;
        bool better = best == splits.size();
        if (!better) {
            switch (m.launch->order) {
            case PTX_ASCENDING: better = splits[n].pc < splits[best].pc; break;
            case PTX_DESCENDING: better = splits[n].pc > splits[best].pc; break;
            case PTX_RANDOM: better = draw(m, ready) == 0; break;
            }
        }
        if (better) best = n;
    }
    if (best == splits.size()) return false;
    *taken = splits[best];
    splits.erase(splits.begin() + (ptrdiff_t)best);
    return true;
}

/* Runs a warp. Returns whether it has executed anything. */
static bool run_warp(machine &m, warp &w, uint64_t budget) {
    m.warp = &w;
    m.bank[0] = w.rows;
    bool any = false;
    split s;
    while (budget && !m.stop && take_split(m, &s)) {
        run_split(m, s, &budget);
        any = true;
    }
    return any;
}


// >>blocks

/* Describes what a thread that is missing at a barrier does instead. */
static std::string whereabouts(const machine &m, unsigned barrier_number) {
    for (const warp &w : m.warps) {
        uint32_t waiting = 0;
        for (const split &s : w.splits)
            if (s.state == AT_BARRIER && s.barrier == barrier_number) waiting |= s.mask;
        uint32_t missing = w.exists & ~waiting;
        if (!missing) continue;
        unsigned first = w.number * LANES + (unsigned)lowest(missing);
        std::string thread = "thread " + std::to_string(first);
        if (!(w.alive >> lowest(missing) & 1)) return thread + " has exited";
        for (const split &s : w.splits)
            if (s.mask >> lowest(missing) & 1)
                return thread + " waits at " + line_text(*m.kernel, (size_t)s.pc);
    }
    return "";
}

static void report_stuck_split(machine &m, const warp &w, const split &s, bool only_diverged) {
    const instruction &i = m.kernel->code[(size_t)s.pc];
    unsigned thread = w.number * LANES + (unsigned)lowest(s.mask);
    if (s.state == AT_COLLECTIVE) {
        m.warp = const_cast<warp *>(&w);
        m.bank[0] = w.rows;
        uint32_t mask = member_mask(m, i, lowest(s.mask));
        missing_lanes(m, i, lowest(s.mask), mask, mask & ~s.mask,
                      "they have exited, wait elsewhere, or name another mask");
        return;
    }
    uint32_t there = 0;
    for (const split &other : w.splits)
        if (other.state == AT_BARRIER && other.barrier == s.barrier) there |= other.mask;
    bool diverged = there != w.exists;
    if (only_diverged && !diverged) return;
    fatal(m, diverged ? PTX_DIVERGED : PTX_DEADLOCK, {&i, thread},
          "barrier %u waits forever: %u of %u threads have arrived; %s", s.barrier,
          m.barriers[s.barrier].arrived, m.threads, whereabouts(m, s.barrier).c_str());
}

/* No warp can proceed. Lanes missing in their warp are the more precise report. */
static void report_stuck(machine &m) {
    for (int pass = 0; pass < 2; pass++)
        for (const warp &w : m.warps)
            for (const split &s : w.splits)
                if (!m.stop) report_stuck_split(m, w, s, pass == 0);
}

static bool all_exited(const machine &m) {
    for (const warp &w : m.warps)
        if (w.alive) return false;
    return true;
}

/* Runs every warp once, in the order of the launch. Returns whether one has proceeded. */
static bool run_round(machine &m) {
    const uint64_t SLICE = 1 << 20;
    unsigned n = m.warp_count;
    bool any = false;
    if (m.launch->order == PTX_RANDOM) {
        for (unsigned k = 0; k < 4 * n && !m.stop; k++)
            any |= run_warp(m, m.warps[draw(m, n)], 1 + draw(m, 200));
        if (any) return true;
    }
    for (unsigned k = 0; k < n && !m.stop; k++) {
        unsigned w = m.launch->order == PTX_DESCENDING ? n - 1 - k : k;
        any |= run_warp(m, m.warps[w], SLICE);
    }
    return any;
}

static uint64_t instructions(const machine &m) {
    uint64_t sum = 0;
    for (uint64_t n : m.executed) sum += n;
    return sum;
}

void run_block(machine &m) {
    const uint64_t LIMIT = 1ull << 32;  /* ends an endless loop */
    uint64_t start = instructions(m);
    while (!m.stop && !all_exited(m)) {
        if (instructions(m) - start > LIMIT) {
            fatal(m, PTX_DEADLOCK, {nullptr, 0}, "the block does not end");
            return;
        }
        if (run_round(m) || m.stop) continue;
        bool released = false;
        for (warp &w : m.warps) released |= release_joins(w);
        if (!released) report_stuck(m);
    }
}

} // namespace ptx
