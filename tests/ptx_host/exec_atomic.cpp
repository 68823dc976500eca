/* exec_atomic.cpp - atomics, and the conversion of addresses. */
#include "access.h"

namespace ptx {

// >>atomics

enum atomic_operation : uint8_t {
    ATOM_ADD, ATOM_MIN, ATOM_MAX, ATOM_AND, ATOM_OR, ATOM_XOR, ATOM_EXCH, ATOM_CAS, ATOM_INC,
    ATOM_DEC
};

/* The values have 4 or 8 bytes. */
static uint64_t read_bytes(const unsigned char *p, size_t size) {
    uint64_t v = 0;
    memcpy(&v, p, size);
    return v;
}

static uint64_t add_values(uint64_t a, uint64_t b, type t) {
    if (t == F32)
        return float_bits(bits_to_float((uint32_t)a) + bits_to_float((uint32_t)b));
    if (t == F64) return to_word(from_word<double>(a) + from_word<double>(b));
    return a + b;
}

static bool less(uint64_t a, uint64_t b, type t) {
    switch (t) {
    case S32: return (int32_t)a < (int32_t)b;
    case S64: return (int64_t)a < (int64_t)b;
    default: return a < b;
    }
}

/* The value that replaces `old`. */
static uint64_t updated(const form &f, uint64_t old, uint64_t b, uint64_t c) {
    switch (f.variant) {
    case ATOM_ADD: return add_values(old, b, f.to);
    case ATOM_MIN: return less(b, old, f.to) ? b : old;
    case ATOM_MAX: return less(old, b, f.to) ? b : old;
    case ATOM_AND: return old & b;
    case ATOM_OR: return old | b;
    case ATOM_XOR: return old ^ b;
    case ATOM_EXCH: return b;
    case ATOM_CAS: return old == b ? c : old;
    case ATOM_INC: return old >= b ? 0 : old + 1;
    case ATOM_DEC: return old == 0 || old > b ? b : old - 1;
    default: return old;
    }
}

/* Returns the memory of a lane's operand after the checks, or NULL after a fault. */
static unsigned char *locate_atomic(machine &m, const instruction &i, ptx::space s, int lane,
                                    uint64_t address, size_t size) {
    range r;
    if (s == SHARED) {
        if (!locate_shared(m, i, {lane, 1}, address, size, &r)) return nullptr;
        if (!written_in_block(m, r))
            fault(m, PTX_UNWRITTEN_SHARED, {&i, thread_of(m, lane)},
                  "atomic access of %zu bytes at shared address 0x%llx, which was never written",
                  size, (unsigned long long)address);
    } else {
        allocation *a = nullptr;
        if (!locate_global(m, i, {lane, 1}, address, size, size, &r, &a)) return nullptr;
        check_written(m, i, r, *a);
        a->set_written(r.at, size, true);
        count_unique(m, *a, r, false);
        count_unique(m, *a, r, true);
    }
    note_atomic(m, i, r);
    return r.bytes;
}

/* atom d, [a], b{, c}; red has no destination. */
static void atomic_in(machine &m, const instruction &i, ptx::space s, uint32_t active,
                      const uint64_t *address) {
    const form &f = *i.form;
    size_t size = type_size(f.to);
    bool returns = f.operands[0] != 'm';
    const operand *sources = i.o + (returns ? 3 : 2);
    m.count.atomics++;
    if (s == SHARED) count_shared(m, i, address, active, size);
    for (int l : lanes{active}) {
        unsigned char *p = locate_atomic(m, i, s, l, address[l], size);
        if (!p) return;
        uint64_t old = read_bytes(p, size);
        uint64_t b = lane_value(m, sources[0], l);
        uint64_t c = f.variant == ATOM_CAS ? lane_value(m, sources[1], l) : 0;
        if (returns) set_lane_value(m, i.o[0], l, old);
        uint64_t value = updated(f, old, b, c);
        memcpy(p, &value, size);
    }
}

static void atomic(machine &m, const instruction &i, uint32_t active) {
    uint64_t address[LANES];
    gather_addresses(m, i.o + (i.form->operands[0] == 'm' ? 0 : 1), address);
    if (i.form->space != GENERIC) {
        atomic_in(m, i, i.form->space, active, address);
        return;
    }
    for_spaces(active, address, [&](ptx::space s, uint32_t group) {
        if (!m.stop) atomic_in(m, i, s, group, address);
    });
}

static bool valid_atomic(const form &f) {
    switch (f.variant) {
    case ATOM_ADD: return f.to == U32 || f.to == S32 || f.to == U64 || f.to == F32 || f.to == F64;
    case ATOM_MIN: case ATOM_MAX: return is_integer(f.to) && type_size(f.to) >= 4;
    case ATOM_INC: case ATOM_DEC: return f.to == U32;
    default: return f.to == B32 || f.to == B64;
    }
}

bool decode_atomic(opcode &o, form &f) {
    static const char *names[] = {"add", "min", "max", "and", "or", "xor", "exch", "cas", "inc",
                                  "dec"};
    take_hints(o);
    f.counter = IN_MEMORY;
    f.space = o.take_space();
    f.to = o.take_type();
    f.run = atomic;
    bool wide = type_size(f.to) == 8, returns = o.name == "atom";
    for (uint8_t v = 0; v < 10; v++) {
        if (!o.take(names[v])) continue;
        f.variant = v;
        if (v == ATOM_CAS) f.operands = wide ? "Lmll" : "Wmww";
        else if (returns) f.operands = wide ? "Lml" : "Wmw";
        else f.operands = wide ? "ml" : "mw";
        bool place = f.space == GENERIC || f.space == GLOBAL || f.space == SHARED;
        return place && valid_atomic(f) && (returns || v < ATOM_EXCH || v > ATOM_CAS);
    }
    return false;
}


// >>address conversion

static uint64_t window_of(ptx::space s) {
    switch (s) {
    case SHARED: return SHARED_WINDOW;
    case LOCAL: return LOCAL_WINDOW;
    case PARAM: return PARAM_WINDOW;
    default: return 0;
    }
}

/* cvta.space: to a generic address; cvta.to.space: from it. */
static void convert_address(machine &m, const instruction &i, uint32_t active) {
    uint64_t window = window_of(i.form->space);
    uint64_t *d = row64(m, i.o[0]);
    const uint64_t *a = row64(m, i.o[1]);
    bool from_generic = i.form->variant;
    for (int l : lanes{active}) {
        if (!window) d[l] = a[l];
        else d[l] = from_generic ? a[l] & ~WINDOW_MASK : a[l] | window;
    }
}

static void is_space(machine &m, const instruction &i, uint32_t active) {
    const uint64_t *a = row64(m, i.o[1]);
    uint32_t result = 0;
    for (int l : lanes{active})
        result |= (uint32_t)((a[l] & WINDOW_MASK) == window_of(i.form->space)) << l;
    set_predicate(m, i.o[0], active, result);
}

bool decode_address(opcode &o, form &f) {
    f.variant = o.take("to");
    f.space = o.take_space();
    if (f.space == GENERIC) return false;
    if (o.name == "isspacep") {
        if (f.space == CONST || f.variant) return false;
        f.run = is_space;
        f.operands = "Pl";
        return true;
    }
    f.to = o.take_type();
    f.run = convert_address;
    f.operands = "Ll";
    return f.to == U64;
}

} // namespace ptx
