/* exec_collective.cpp - instructions in which lanes of a warp exchange values, and the
   decoders of control flow and barriers, which warp.cpp executes. A collective is
   executed once all lanes of its membermask have arrived; `active` is the membermask,
   without lanes that have exited. */
#include "exec.h"
#include "race.h"
#include <algorithm>

namespace ptx {

// >>shuffle

enum shuffle_mode : uint8_t { SHUFFLE_UP, SHUFFLE_DOWN, SHUFFLE_BUTTERFLY, SHUFFLE_INDEX };

/* The lane whose value a lane gets, by the formulas of the ISA. */
static int source_lane(shuffle_mode mode, int lane, uint32_t b, uint32_t c, bool *valid) {
    int distance = (int)(b & 31), clamp = (int)(c & 31), segment = (int)(c >> 8 & 31);
    int least = lane & segment, greatest = least | (clamp & ~segment);
    int source = lane;
    switch (mode) {
    case SHUFFLE_UP: source = lane - distance; break;
    case SHUFFLE_DOWN: source = lane + distance; break;
    case SHUFFLE_BUTTERFLY: source = lane ^ distance; break;
    case SHUFFLE_INDEX: source = least | (distance & ~segment); break;
    }
    *valid = mode == SHUFFLE_UP ? source >= greatest : source <= greatest;
    return *valid ? source : lane;
}

/* shfl d|p, a, b, c, membermask */
static void shuffle(machine &m, const instruction &i, uint32_t active) {
    uint32_t *d = row32(m, i.o[0]), a[LANES], valid_mask = 0;
    const uint32_t *b = row32(m, i.o[3]), *c = row32(m, i.o[4]);
    memcpy(a, row32(m, i.o[2]), sizeof a);
    for (int l : lanes{active}) {
        bool valid;
        int source = source_lane((shuffle_mode)i.form->variant, l, b[l], c[l], &valid);
        if (!(active >> source & 1))
            fault(m, PTX_UNWRITTEN_REGISTER, {&i, thread_of(m, l)},
                  "shuffle from lane %d, which does not take part", source);
        d[l] = a[source];
        valid_mask |= (uint32_t)valid << l;
    }
    if (i.o[1] != NO_OPERAND) set_predicate(m, i.o[1], active, valid_mask);
}

bool decode_shuffle(opcode &o, form &f) {
    static const char *modes[] = {"up", "down", "bfly", "idx"};
    f.to = o.take_type();
    f.counter = IN_SHUFFLE;
    f.control = WARP_SYNC;
    f.mask_operand = 5;
    f.operands = "W|Pwwww";
    f.run = shuffle;
    if (!o.take("sync") || f.to != B32) return false;
    for (uint8_t v = 0; v < 4; v++) {
        f.variant = v;
        if (o.take(modes[v])) return true;
    }
    return false;
}


// >>vote

enum vote_mode : uint8_t { VOTE_ALL, VOTE_ANY, VOTE_UNI };

/* vote p, a, membermask */
static void vote(machine &m, const instruction &i, uint32_t active) {
    uint32_t ayes = predicate(m, i.o[1]) & active;
    bool result = false;
    switch (i.form->variant) {
    case VOTE_ALL: result = ayes == active; break;
    case VOTE_ANY: result = ayes != 0; break;
    case VOTE_UNI: result = ayes == active || !ayes; break;
    }
    set_predicate(m, i.o[0], active, result ? ALL_LANES : 0);
}

static void ballot(machine &m, const instruction &i, uint32_t active) {
    uint32_t *d = row32(m, i.o[0]), ayes = predicate(m, i.o[1]) & active;
    for (int l : lanes{active}) d[l] = ayes;
}

static void active_mask(machine &m, const instruction &i, uint32_t active) {
    uint32_t *d = row32(m, i.o[0]);
    for (int l : lanes{active}) d[l] = active;
}

bool decode_vote(opcode &o, form &f) {
    static const char *modes[] = {"all", "any", "uni"};
    f.to = o.take_type();
    f.counter = IN_COLLECTIVE;
    if (o.name == "activemask") {
        f.run = active_mask;
        f.operands = "W";
        return f.to == B32;
    }
    if (!o.take("sync")) return false;
    f.control = WARP_SYNC;
    f.mask_operand = 2;
    if (o.take("ballot")) {
        f.run = ballot;
        f.operands = "Wpw";
        return f.to == B32;
    }
    for (uint8_t v = 0; v < 3; v++) {
        if (!o.take(modes[v])) continue;
        f.variant = v;
        f.run = vote;
        f.operands = "Ppw";
    }
    return f.run && f.to == PRED;
}


// >>match and redux

/* match.any d, a, membermask; match.all d|p, a, membermask */
static void match(machine &m, const instruction &i, uint32_t active) {
    bool all = i.form->variant;
    operand a = i.o[all ? 2 : 1];
    uint32_t result[LANES];
    for (int l : lanes{active}) {
        result[l] = 0;
        for (int k : lanes{active})
            if (lane_value(m, a, k) == lane_value(m, a, l)) result[l] |= 1u << k;
        if (all && result[l] != active) result[l] = 0;
    }
    uint32_t *d = row32(m, i.o[0]);
    for (int l : lanes{active}) d[l] = result[l];
    if (all && i.o[1] != NO_OPERAND)
        set_predicate(m, i.o[1], active, result[lowest(active)] ? ALL_LANES : 0);
}

bool decode_match(opcode &o, form &f) {
    f.to = o.take_type();
    f.counter = IN_COLLECTIVE;
    f.control = WARP_SYNC;
    f.run = match;
    f.variant = o.take("all");
    if (!f.variant && !o.take("any")) return false;
    f.mask_operand = f.variant ? 3 : 2;
    bool wide = f.to == B64;
    if (f.variant) f.operands = wide ? "W|Plw" : "W|Pww";
    else f.operands = wide ? "Wlw" : "Www";
    return o.take("sync") && (f.to == B32 || wide);
}

enum reduce_operation : uint8_t {
    REDUCE_ADD, REDUCE_MIN, REDUCE_MAX, REDUCE_AND, REDUCE_OR, REDUCE_XOR
};

static uint32_t reduced(uint32_t a, uint32_t b, const form &f) {
    bool is_less = f.to == S32 ? (int32_t)a < (int32_t)b : a < b;
    switch (f.variant) {
    case REDUCE_ADD: return a + b;
    case REDUCE_MIN: return is_less ? a : b;
    case REDUCE_MAX: return is_less ? b : a;
    case REDUCE_AND: return a & b;
    case REDUCE_OR: return a | b;
    default: return a ^ b;
    }
}

/* redux d, a, membermask */
static void reduce(machine &m, const instruction &i, uint32_t active) {
    const uint32_t *a = row32(m, i.o[1]);
    uint32_t *d = row32(m, i.o[0]), result = a[lowest(active)];
    for (int l : lanes{active & (active - 1)}) result = reduced(result, a[l], *i.form);
    for (int l : lanes{active}) d[l] = result;
}

bool decode_reduce(opcode &o, form &f) {
    static const char *names[] = {"add", "min", "max", "and", "or", "xor"};
    f.to = o.take_type();
    f.counter = IN_COLLECTIVE;
    f.control = WARP_SYNC;
    f.mask_operand = 2;
    f.operands = "Www";
    if (!o.take("sync")) return false;
    for (uint8_t v = 0; v < 6; v++) {
        if (!o.take(names[v])) continue;
        f.variant = v;
        f.run = reduce;
        return v >= REDUCE_AND ? f.to == B32 : f.to == U32 || f.to == S32;
    }
    return false;
}


// >>barriers. They wait for all threads of the block: bar.arrive and barriers with a
// count of threads are not implemented.

static void warp_sync(machine &m, const instruction &, uint32_t active) {
    synchronise_lanes(m, active);
}

static bool decode_barrier_reduction(opcode &o, form &f) {
    f.to = o.take_type();
    f.variant = BARRIER_POPC;
    if (o.take("and")) f.variant = BARRIER_AND;
    if (o.take("or")) f.variant = BARRIER_OR;
    f.operands = f.to == PRED ? "Pip" : "Wip";
    if (f.variant == BARRIER_POPC) return o.take("popc") && f.to == U32;
    return f.to == PRED;
}

bool decode_barrier(opcode &o, form &f) {
    if (o.take("warp")) {
        f.counter = IN_COLLECTIVE;
        f.control = WARP_SYNC;
        f.mask_operand = 0;
        f.operands = "w";
        f.run = warp_sync;
        return o.take("sync");
    }
    o.take("cta");
    f.counter = IN_BARRIER;
    f.control = BARRIER;
    f.aligned = o.take("aligned") || o.name == "bar";
    f.integers = (1u << BARRIERS) - 1;
    if (o.take("red")) return decode_barrier_reduction(o, f);
    f.operands = "i";
    return o.take("sync");
}


// >>control flow

static void do_nothing(machine &, const instruction &, uint32_t) {}

bool decode_control(opcode &o, form &f) {
    f.counter = IN_CONTROL;
    if (o.name != "exit" && o.name != "trap") o.take("uni");
    if (o.name == "bra") {
        f.control = BRANCH;
        f.operands = "t";
    } else if (o.name == "brx") {
        f.control = BRANCH_INDEXED;
        f.operands = "wT";
        return o.take("idx");
    } else if (o.name == "call") {
        f.control = CALL;
    } else if (o.name == "trap") {
        f.control = TRAP;
    } else if (o.name == "nanosleep") {
        f.run = do_nothing;
        f.operands = "w";
        return o.take("u32");
    } else {
        f.control = RETURN;
    }
    return true;
}

} // namespace ptx
