/* exec_memory.cpp - loads, stores, atomics, address conversion and asynchronous copies,
   with their checks and counters. */
#include "exec.h"
#include "race.h"
#include <algorithm>

namespace ptx {

// >>addresses

/* The addresses of the active lanes from a pair of operands: base and offset. */
static void gather_addresses(machine &m, const operand *o, uint32_t active, uint64_t *address) {
    int64_t offset = (int32_t)o[1];
    if (o[0] & IS_WIDE) {
        const uint64_t *base = row64(m, o[0]);
        for (int l : lanes{active}) address[l] = base[l] + (uint64_t)offset;
    } else {
        const uint32_t *base = row32(m, o[0]);
        for (int l : lanes{active}) address[l] = base[l] + (uint32_t)offset;
    }
}

static const char *name_of(ptx::space s) {
    static const char *names[] = {"generic", "global", "shared", "local", "parameter", "constant"};
    return names[s];
}

static bool check_aligned(machine &m, const instruction &i, int lane, ptx::space s,
                          uint64_t address, size_t size) {
    if (address % size == 0) return true;
    fatal(m, PTX_MISALIGNED, {&i, thread_of(m, lane)},
          "access of %zu bytes at %s address 0x%llx, which is not a multiple of %zu", size,
          name_of(s), (unsigned long long)address, size);
    return false;
}

static bool out_of_bounds(machine &m, const instruction &i, int lane, ptx::space s,
                          uint64_t address, size_t size, size_t limit) {
    if (s == GLOBAL) {
        const allocation *a = find_allocation(address);
        if (!a && address) a = find_allocation(address - 1);
        fatal(m, PTX_OUT_OF_BOUNDS, {&i, thread_of(m, lane)},
              "access of %zu bytes at global address 0x%llx, which is not in an allocation; the "
              "nearest one before it has %zu bytes from 0x%llx",
              size, (unsigned long long)address, a ? a->bytes : 0,
              a ? (unsigned long long)(uintptr_t)a->base : 0);
    } else {
        fatal(m, PTX_OUT_OF_BOUNDS, {&i, thread_of(m, lane)},
              "access of %zu bytes at %s address 0x%llx, beyond the %zu bytes that there are", size,
              name_of(s), (unsigned long long)address, limit);
    }
    return false;
}

/* Finds the memory of a lane's access. Returns false after a fault. */
static bool locate_global(machine &m, const instruction &i, int lane, uint64_t address,
                          size_t size, size_t align, range *r, allocation **a) {
    allocation *&hint = m.hint[pc_of(i) % 256];
    uint64_t at = hint ? address - (uint64_t)(uintptr_t)hint->base : 0;
    if (!hint || at >= hint->bytes) {
        hint = find_allocation(address);
        if (!hint) return out_of_bounds(m, i, lane, GLOBAL, address, size, 0);
        at = address - (uint64_t)(uintptr_t)hint->base;
    }
    if (size > hint->bytes - at) return out_of_bounds(m, i, lane, GLOBAL, address, size, 0);
    if (!check_aligned(m, i, lane, GLOBAL, address, align)) return false;
    *r = {GLOBAL, &hint->shadow, at, size, address, hint->base + at};
    *a = hint;
    return true;
}

static bool locate_shared(machine &m, const instruction &i, int lane, uint64_t address,
                          size_t size, range *r) {
    if (address > m.shared_bytes || size > m.shared_bytes - address)
        return out_of_bounds(m, i, lane, SHARED, address, size, m.shared_bytes);
    if (!check_aligned(m, i, lane, SHARED, address, size)) return false;
    *r = {SHARED, &m.shared_shadow, address, size, address, m.shared.data() + address};
    return true;
}

/* Local memory of a lane begins at lane * local_bytes. */
static unsigned char *locate_local(machine &m, const instruction &i, int lane, uint64_t address,
                                   size_t size) {
    size_t bytes = m.kernel->local_bytes;
    if (address > bytes || size > bytes - address) {
        out_of_bounds(m, i, lane, LOCAL, address, size, bytes);
        return nullptr;
    }
    if (!check_aligned(m, i, lane, LOCAL, address, size)) return nullptr;
    return m.warp->local.data() + (size_t)lane * bytes + address;
}


// >>counters

/* The number of 32-byte sectors that the active lanes touch. */
static unsigned count_sectors(const uint64_t *address, uint32_t active, size_t size) {
    uint64_t sectors[2 * LANES];
    size_t n = 0;
    bool sorted = true;
    for (int l : lanes{active}) {
        uint64_t last = (address[l] + size - 1) / 32;
        for (uint64_t s = address[l] / 32; s <= last; s++) {
            if (n && sectors[n - 1] == s) continue;
            sorted &= !n || sectors[n - 1] < s;
            sectors[n++] = s;
        }
    }
    if (sorted) return (unsigned)n;
    std::sort(sectors, sectors + n);
    return (unsigned)(std::unique(sectors, sectors + n) - sectors);
}

/* The passes over the 32 banks that one group of lanes needs: the greatest number of
   different words in one bank. */
static unsigned count_passes(const uint64_t *address, uint32_t group, size_t size) {
    uint32_t words[LANES], n = 0;
    uint8_t next[LANES], first[LANES], depth[LANES] = {};
    uint64_t least = ~0ull, greatest = 0;
    for (int l : lanes{group}) {
        least = std::min(least, address[l]);
        greatest = std::max(greatest, address[l] + size - 1);
    }
    if (least / 128 == greatest / 128) return 1;

    unsigned passes = 1;
    for (int l : lanes{group}) {
        for (uint64_t a = address[l] / 4; a <= (address[l] + size - 1) / 4; a++) {
            uint32_t bank = a % 32, word = (uint32_t)a;
            uint32_t k = first[bank], left = depth[bank];
            while (left && words[k] != word) {
                k = next[k];
                left--;
            }
            if (left) continue;                 /* another lane reads the same word */
            words[n] = word;
            next[n] = first[bank];
            first[bank] = (uint8_t)n++;
            passes = std::max<unsigned>(passes, ++depth[bank]);
        }
    }
    return passes;
}

/* A warp accesses 128 bytes at a time: all lanes, half or a quarter of them. */
static void count_shared(machine &m, const uint64_t *address, uint32_t active, size_t size) {
    unsigned group = size <= 4 ? 32 : size == 8 ? 16 : size == 16 ? 8 : 4;
    uint32_t all = group == 32 ? ALL_LANES : (1u << group) - 1;
    for (unsigned l = 0; l < LANES; l += group) {
        uint32_t part = active & all << l;
        if (!part) continue;
        m.count.shared_wavefronts += count_passes(address, part, size);
        m.count.shared_ideal++;
    }
}

/* For ldmatrix: rows of 16 bytes, which several lanes get. */
void count_shared_rows(machine &m, const uint64_t *address, uint32_t active) {
    count_shared(m, address, active, 16);
}

bool read_shared_row(machine &m, const instruction &i, int lane, uint64_t address, uint16_t *row) {
    range r;
    if (!locate_shared(m, i, lane, address, 16, &r)) return false;
    r.collective = true;
    note_read(m, i, lane, r);
    memcpy(row, r.bytes, 16);
    return true;
}


// >>loads

static uint64_t read_bytes(const unsigned char *p, size_t size) {
    uint64_t v = 0;
    switch (size) {
    case 1: return *p;
    case 2: memcpy(&v, p, 2); return v;
    case 4: memcpy(&v, p, 4); return v;
    default: memcpy(&v, p, 8); return v;
    }
}

static void write_bytes(unsigned char *p, uint64_t v, size_t size) {
    switch (size) {
    case 1: *p = (unsigned char)v; break;
    case 2: memcpy(p, &v, 2); break;
    case 4: memcpy(p, &v, 4); break;
    default: memcpy(p, &v, 8); break;
    }
}

/* Copies the elements of a vector from memory to the destinations of one lane. */
static void load_elements(machine &m, const instruction &i, int lane, const unsigned char *p) {
    const form &f = *i.form;
    size_t size = type_size(f.to);
    for (unsigned k = 0; k < f.count; k++) {
        uint64_t v = read_bytes(p + k * size, size);
        if (is_signed(f.to) && !is_float(f.to)) {
            unsigned unused = 64 - 8 * (unsigned)size;
            v = (uint64_t)((int64_t)(v << unused) >> unused);
        }
        set_lane_value(m, i.o[k], lane, v);
    }
}

static void report_unwritten_global(machine &m, const instruction &i, int lane, const range &r) {
    fault(m, PTX_UNWRITTEN_GLOBAL, {&i, thread_of(m, lane)},
          "read of %zu bytes at global address 0x%llx, of which some were never written", r.size,
          (unsigned long long)r.address);
}

/* Calls f for the parts of a range whose bytes the program uses: the elements that are
   in the mask of .pragma "used_bytes_mask". */
template <class F> static void for_used(const instruction &i, const range &r, F f) {
    if (i.used_bytes == 0xffffffffu) {
        f(r);
        return;
    }
    size_t size = type_size(i.form->to);
    uint32_t element = (uint32_t)((1ull << size) - 1);
    for (unsigned k = 0; k < i.form->count; k++) {
        if (!(i.used_bytes >> (k * size) & element)) continue;
        range part = r;
        part.at += k * size;
        part.address += k * size;
        part.bytes += k * size;
        part.size = size;
        f(part);
    }
}

static void load_global(machine &m, const instruction &i, uint32_t active, const uint64_t *address,
                        size_t size) {
    m.count.global_loads++;
    m.count.global_bytes_read += size * count_bits(active);
    m.count.sectors_read += count_sectors(address, active, size);
    for (int l : lanes{active}) {
        range whole;
        allocation *a = nullptr;
        if (!locate_global(m, i, l, address[l], size, size, &whole, &a)) return;
        for_used(i, whole, [&](const range &r) {
            if (!a->all_written(r.at, r.size)) report_unwritten_global(m, i, l, r);
            note_read(m, i, l, r);
        });
        load_elements(m, i, l, whole.bytes);
    }
}

static void load_shared(machine &m, const instruction &i, uint32_t active, const uint64_t *address,
                        size_t size) {
    m.count.shared_loads++;
    count_shared(m, address, active, size);
    for (int l : lanes{active}) {
        range whole;
        if (!locate_shared(m, i, l, address[l], size, &whole)) return;
        for_used(i, whole, [&](const range &r) { note_read(m, i, l, r); });
        load_elements(m, i, l, whole.bytes);
    }
}

static void load_local(machine &m, const instruction &i, uint32_t active, const uint64_t *address,
                       size_t size) {
    m.count.local++;
    for (int l : lanes{active}) {
        const unsigned char *p = locate_local(m, i, l, address[l], size);
        if (!p) return;
        const unsigned char *written = m.warp->local_written.data() + (p - m.warp->local.data());
        if (memchr(written, 0, size))
            fault(m, PTX_UNWRITTEN_REGISTER, {&i, thread_of(m, l)},
                  "read of %zu bytes at local address 0x%llx, of which some were never written",
                  size, (unsigned long long)address[l]);
        load_elements(m, i, l, p);
    }
}

static void load_param(machine &m, const instruction &i, uint32_t active, const uint64_t *address,
                       size_t size) {
    size_t limit = m.kernel->param_bytes;
    for (int l : lanes{active}) {
        if (address[l] > limit || size > limit - address[l]) {
            out_of_bounds(m, i, l, PARAM, address[l], size, limit);
            return;
        }
        if (!check_aligned(m, i, l, PARAM, address[l], size)) return;
        load_elements(m, i, l, m.params.data() + address[l]);
    }
}

static void load_from(machine &m, const instruction &i, ptx::space s, uint32_t active,
                      const uint64_t *address) {
    size_t size = type_size(i.form->to) * i.form->count;
    switch (s) {
    case SHARED: load_shared(m, i, active, address, size); break;
    case LOCAL: load_local(m, i, active, address, size); break;
    case PARAM: load_param(m, i, active, address, size); break;
    default: load_global(m, i, active, address, size); break;
    }
}

/* Calls access(space, lanes, addresses) for each space that generic addresses are in. */
template <class F> static void for_spaces(uint32_t active, uint64_t *address, F access) {
    while (active) {
        uint64_t window = address[lowest(active)] & WINDOW_MASK;
        uint32_t group = 0;
        for (int l : lanes{active})
            if ((address[l] & WINDOW_MASK) == window) group |= 1u << l;
        ptx::space s = window == SHARED_WINDOW ? SHARED
                       : window == LOCAL_WINDOW ? LOCAL : GLOBAL;
        if (window == PARAM_WINDOW) s = PARAM;
        if (s != GLOBAL)
            for (int l : lanes{group}) address[l] &= ~WINDOW_MASK;
        access(s, group);
        active &= ~group;
    }
}

static void load(machine &m, const instruction &i, uint32_t active) {
    uint64_t address[LANES];
    gather_addresses(m, i.o + i.form->count, active, address);
    if (i.form->space != GENERIC) {
        load_from(m, i, i.form->space, active, address);
        return;
    }
    for_spaces(active, address, [&](ptx::space s, uint32_t group) {
        if (!m.stop) load_from(m, i, s, group, address);
    });
}


// >>stores

enum { MAX_VECTOR = 32 };

/* The values that the lanes of a store write. */
struct stored {
    uint64_t address[LANES];
    unsigned char value[LANES][MAX_VECTOR];
    size_t size;
};

static void store_global(machine &m, const instruction &i, uint32_t active, const stored &s) {
    m.count.global_stores++;
    m.count.global_bytes_written += s.size * count_bits(active);
    m.count.sectors_written += count_sectors(s.address, active, s.size);
    lane_values values = {s.address, s.value[0], MAX_VECTOR, active};
    for (int l : lanes{active}) {
        range r;
        allocation *a = nullptr;
        if (!locate_global(m, i, l, s.address[l], s.size, s.size, &r, &a)) return;
        note_write(m, i, l, r, false, &values);
        a->set_written(r.at, s.size, true);
        memcpy(a->base + r.at, s.value[l], s.size);
    }
}

static void store_shared(machine &m, const instruction &i, uint32_t active, const stored &s) {
    m.count.shared_stores++;
    count_shared(m, s.address, active, s.size);
    lane_values values = {s.address, s.value[0], MAX_VECTOR, active};
    for (int l : lanes{active}) {
        range r;
        if (!locate_shared(m, i, l, s.address[l], s.size, &r)) return;
        note_write(m, i, l, r, false, &values);
        memcpy(m.shared.data() + r.at, s.value[l], s.size);
    }
}

static void store_local(machine &m, const instruction &i, uint32_t active, const stored &s) {
    m.count.local++;
    for (int l : lanes{active}) {
        unsigned char *p = locate_local(m, i, l, s.address[l], s.size);
        if (!p) return;
        memcpy(p, s.value[l], s.size);
        memset(m.warp->local_written.data() + (p - m.warp->local.data()), 1, s.size);
    }
}

static void store_to(machine &m, const instruction &i, ptx::space to, uint32_t active,
                     const stored &s) {
    if (to == SHARED) store_shared(m, i, active, s);
    else if (to == LOCAL) store_local(m, i, active, s);
    else store_global(m, i, active, s);
}

static void store(machine &m, const instruction &i, uint32_t active) {
    const form &f = *i.form;
    size_t size = type_size(f.to);
    stored s;
    s.size = size * f.count;
    gather_addresses(m, i.o, active, s.address);
    for (int l : lanes{active})
        for (unsigned k = 0; k < f.count; k++)
            write_bytes(s.value[l] + k * size, lane_value(m, i.o[2 + k], l), size);
    if (f.space != GENERIC) {
        store_to(m, i, f.space, active, s);
        return;
    }
    for_spaces(active, s.address, [&](ptx::space to, uint32_t group) {
        if (!m.stop) store_to(m, i, to, group, s);
    });
}


// >>decoding of loads and stores

/* Modifiers that change neither the value nor what is checked here: caching, ordering. */
static void take_hints(opcode &o) {
    static const char *hints[] = {
        "ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc", "weak", "volatile", "relaxed", "acquire",
        "release", "acq_rel", "cta", "gpu", "sys", "cluster", "L1::evict_normal",
        "L1::evict_unchanged", "L1::evict_first", "L1::evict_last", "L1::no_allocate",
        "L2::evict_last", "L2::evict_normal", "L2::evict_first", "L2::64B", "L2::128B", "L2::256B"};
    for (const char *h : hints) o.take(h);
}

static bool decode_access(opcode &o, form &f) {
    take_hints(o);
    f.space = o.take_space();
    f.count = o.take("v8") ? 8 : o.take("v4") ? 4 : o.take("v2") ? 2 : 1;
    f.to = o.take_type();
    f.counter = IN_MEMORY;
    size_t size = type_size(f.to);
    return size && size * f.count <= MAX_VECTOR;
}

bool decode_load(opcode &o, form &f) {
    if (!decode_access(o, f)) return false;
    f.run = load;
    switch (f.count) {
    case 8: f.operands = "{XXXXXXXX}m"; break;
    case 4: f.operands = "{XXXX}m"; break;
    case 2: f.operands = "{XX}m"; break;
    default: f.operands = "Xm"; break;
    }
    return true;
}

bool decode_store(opcode &o, form &f) {
    if (!decode_access(o, f) || f.space == CONST) return false;
    f.run = store;
    switch (f.count) {
    case 8: f.operands = "m{xxxxxxxx}"; break;
    case 4: f.operands = "m{xxxx}"; break;
    case 2: f.operands = "m{xx}"; break;
    default: f.operands = "mx"; break;
    }
    return true;
}


// >>atomics

enum atomic_operation : uint8_t {
    ATOM_ADD, ATOM_MIN, ATOM_MAX, ATOM_AND, ATOM_OR, ATOM_XOR, ATOM_EXCH, ATOM_CAS, ATOM_INC,
    ATOM_DEC
};

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

static unsigned char *locate_atomic(machine &m, const instruction &i, ptx::space s, int lane,
                                    uint64_t address, size_t size) {
    range r;
    if (s == SHARED) {
        if (!locate_shared(m, i, lane, address, size, &r)) return nullptr;
        shadow_page &p = r.shadow->page(r.at, r.size);
        if (p.cells[r.at % SHADOW_PAGE >> p.shift].write.stamp < m.block_start)
            fault(m, PTX_UNWRITTEN_SHARED, {&i, thread_of(m, lane)},
                  "atomic access of %zu bytes at shared address 0x%llx, which was never written",
                  size, (unsigned long long)address);
    } else {
        allocation *a = nullptr;
        if (!locate_global(m, i, lane, address, size, size, &r, &a)) return nullptr;
        if (!a->all_written(r.at, size)) report_unwritten_global(m, i, lane, r);
        a->set_written(r.at, size, true);
    }
    note_write(m, i, lane, r, true, nullptr);
    return const_cast<unsigned char *>(r.bytes);
}

/* atom d, [a], b{, c}; red has no destination. */
static void atomic_in(machine &m, const instruction &i, ptx::space s, uint32_t active,
                      const uint64_t *address) {
    const form &f = *i.form;
    size_t size = type_size(f.to);
    bool returns = f.operands[0] != 'm';
    const operand *sources = i.o + (returns ? 3 : 2);
    m.count.atomics++;
    if (s == SHARED) count_shared(m, address, active, size);
    for (int l : lanes{active}) {
        unsigned char *p = locate_atomic(m, i, s, l, address[l], size);
        if (!p) return;
        uint64_t old = read_bytes(p, size);
        uint64_t b = lane_value(m, sources[0], l);
        uint64_t c = f.variant == ATOM_CAS ? lane_value(m, sources[1], l) : 0;
        if (returns) set_lane_value(m, i.o[0], l, old);
        write_bytes(p, updated(f, old, b, c), size);
    }
}

static void atomic(machine &m, const instruction &i, uint32_t active) {
    uint64_t address[LANES];
    gather_addresses(m, i.o + (i.form->operands[0] == 'm' ? 0 : 1), active, address);
    if (i.form->space != GENERIC) {
        atomic_in(m, i, i.form->space, active, address);
        return;
    }
    for_spaces(active, address, [&](ptx::space s, uint32_t group) {
        if (!m.stop) atomic_in(m, i, s, group, address);
    });
}

static bool valid_atomic(const form &f) {
    size_t size = type_size(f.to);
    if (size != 4 && size != 8) return false;
    bool floating = is_float(f.to);
    if (floating) return f.variant == ATOM_ADD && (f.to == F32 || f.to == F64);
    bool counts = f.variant == ATOM_INC || f.variant == ATOM_DEC;
    return !counts || f.to == U32;
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
        f.run = is_space;
        f.operands = "Pl";
        return true;
    }
    f.to = o.take_type();
    f.run = convert_address;
    f.operands = "Ll";
    return f.to == U64;
}


// >>asynchronous copies. The data is read at once, and lands at the wait.

/* cp.async [shared], [global], size{, source size}; the rest is filled with zeros. */
static void copy_async(machine &m, const instruction &i, uint32_t active) {
    uint64_t to[LANES], from[LANES];
    uint32_t reading = 0;
    size_t size = i.o[4];
    gather_addresses(m, i.o, active, to);
    gather_addresses(m, i.o + 2, active, from);
    m.count.shared_stores++;
    count_shared(m, to, active, size);

    for (int l : lanes{active}) {
        size_t bytes = i.o[5] == NO_OPERAND ? size : std::min<size_t>(row32(m, i.o[5])[l], size);
        range target, source;
        allocation *a = nullptr;
        if (!locate_shared(m, i, l, to[l], size, &target)) return;
        copy c = {(uint32_t)to[l], m.warp->group[l], (uint16_t)thread_of(m, l), pc_of(i),
                  (uint8_t)size, {}};
        if (bytes) {
            reading |= 1u << l;
            if (!locate_global(m, i, l, from[l], bytes, size, &source, &a)) return;
            if (!a->all_written(source.at, bytes)) report_unwritten_global(m, i, l, source);
            note_read(m, i, l, source);
            memcpy(c.data, source.bytes, bytes);
            m.count.global_bytes_read += bytes;
        }
        note_copy_begin(m, i, l, target);
        memset(m.shared.data() + target.at, 0xff, size);
        m.warp->copies.push_back(c);
    }
    m.count.global_loads++;
    if (reading) m.count.sectors_read += count_sectors(from, reading, size);
}

static void commit_group(machine &m, const instruction &, uint32_t active) {
    for (int l : lanes{active}) m.warp->group[l]++;
}

/* Lands the copies of all but the last n groups of each lane; of everything for
   wait_all, which has no operand. */
static void wait_group(machine &m, const instruction &i, uint32_t active) {
    bool all = !*i.form->operands;
    std::vector<copy> &copies = m.warp->copies;
    size_t kept = 0;
    for (copy &c : copies) {
        unsigned lane = c.thread % LANES;
        bool waits = active >> lane & 1;
        bool lands = all || (uint64_t)c.group + i.o[0] < m.warp->group[lane];
        if (!waits || !lands) {
            copies[kept++] = c;
            continue;
        }
        memcpy(m.shared.data() + c.to, c.data, c.size);
        note_copy_end(m, c);
    }
    copies.resize(kept);
}

static void no_operation(machine &, const instruction &, uint32_t) {}

bool decode_copy(opcode &o, form &f) {
    f.counter = IN_MEMORY;
    if (o.name == "prefetch") {
        take_hints(o);
        f.space = o.take_space();
        f.run = no_operation;
        f.operands = "m";
        return o.take("L1") || o.take("L2");
    }
    if (!o.take("async")) return false;
    if (o.take("commit_group")) {
        f.run = commit_group;
        return true;
    }
    if (o.take("wait_group") || o.take("wait_all")) {
        f.operands = f.text.find("wait_all") == std::string::npos ? "i" : "";
        f.run = wait_group;
        return true;
    }
    bool to_shared = o.take("shared") || o.take("shared::cta");
    if (!to_shared || !o.take("global")) return false;
    take_hints(o);
    f.run = copy_async;
    f.operands = "mmi?w";
    return true;
}

/* Fences order nothing here: see README.md. */
bool decode_fence(opcode &o, form &f) {
    static const char *levels[] = {"cta", "gl", "gpu", "sys", "cluster", "sc", "acq_rel", "acquire",
                                   "release"};
    for (const char *l : levels) o.take(l);
    f.counter = IN_BARRIER;
    f.run = no_operation;
    return true;
}

} // namespace ptx
