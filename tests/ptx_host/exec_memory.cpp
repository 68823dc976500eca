/* exec_memory.cpp - loads and stores. */
#include "access.h"
#include <algorithm>

namespace ptx {

// >>elements of lanes

/* Copies element k of the active lanes from memory to a row. T: the type in memory. */
template <class T, class W>
static void load_row(W *d, uint32_t active, const unsigned char *const *p, unsigned k) {
    for (int l : lanes{active}) {
        T value;
        memcpy(&value, p[l] + k * sizeof value, sizeof value);
        d[l] = (W)value;
    }
}

template <class T>
static void load_elements(machine &m, const instruction &i, uint32_t active,
                          const unsigned char *const *p) {
    for (unsigned k = 0; k < i.form->count; k++) {
        operand d = i.o[k];
        if (d & IS_WIDE) load_row<T>(row64(m, d), active, p, k);
        else load_row<T>(row32(m, d), active, p, k);
    }
}

/* Sets the destinations of a load. p: where each lane's data is. */
static void set_destinations(machine &m, const instruction &i, uint32_t active,
                             const unsigned char *const *p) {
    type t = i.form->to;
    bool sign = is_signed(t) && !is_float(t);
    switch (type_size(t)) {
    case 1:
        if (sign) load_elements<int8_t>(m, i, active, p);
        else load_elements<uint8_t>(m, i, active, p);
        break;
    case 2:
        if (sign) load_elements<int16_t>(m, i, active, p);
        else load_elements<uint16_t>(m, i, active, p);
        break;
    case 4:
        if (sign) load_elements<int32_t>(m, i, active, p);
        else load_elements<uint32_t>(m, i, active, p);
        break;
    default: load_elements<uint64_t>(m, i, active, p); break;
    }
}


// >>loads

/* Calls f for the parts of a range whose bytes the program uses: the elements that are
   in the mask of .pragma "used_bytes_mask". */
template <class F> static void for_used(const instruction &i, const range &r, F f) {
    if (i.used_bytes == 0xffffffffu) {
        f(r);
        return;
    }
    size_t size = type_size(i.form->to);
    uint32_t element = (uint32_t)((1ull << size) - 1);
    for (int l = 0; l < r.count; l++) {
        for (unsigned k = 0; k < i.form->count; k++) {
            if (!(i.used_bytes >> (k * size) & element)) continue;
            size_t offset = (size_t)l * r.size + k * size;
            f(range{r.space, r.shadow, r.at + offset, size, r.address + offset, r.bytes + offset,
                    r.lane + l, 1, false});
        }
    }
}

/* Whether a lane reads what both of its neighbours read: then it adds nothing to what is
   recorded of them. */
static bool is_repeated(const uint64_t *address, uint32_t active, int lane) {
    if (lane == 0 || lane == LANES - 1) return false;
    bool both = (active >> (lane - 1) & 5) == 5;
    return both && address[lane] == address[lane - 1] && address[lane] == address[lane + 1];
}

/* A load from global or shared memory. */
static void load_checked(machine &m, const instruction &i, ptx::space s, uint32_t active,
                         const uint64_t *address, size_t size) {
    run runs[LANES];
    const unsigned char *p[LANES];
    const bool repeats = m.warp->known.empty();     /* otherwise lanes know different things */
    const int n = find_runs(address, active, size, runs);
    for (int k = 0; k < n; k++) {
        int lane = runs[k].lane;
        if (repeats && runs[k].count == 1 && is_repeated(address, active, lane)) {
            p[lane] = p[lane - 1];
            continue;
        }
        range whole;
        allocation *a = nullptr;
        uint64_t from = address[lane];
        bool found = s == SHARED ? locate_shared(m, i, runs[k], from, size, &whole)
                                 : locate_global(m, i, runs[k], from, size, size, &whole, &a);
        if (!found) return;
        if (a) count_unique(m, *a, whole, false);
        for_used(i, whole, [&](const range &r) {
            if (a) check_written(m, i, r, *a);
            note_read(m, i, r);
        });
        for (int l = 0; l < whole.count; l++) p[lane + l] = whole.bytes + size * (size_t)l;
    }
    bool row = n == 1 && size == 4 && i.form->count == 1 && !(i.o[0] & IS_WIDE);
    if (row) memcpy(row32(m, i.o[0]) + runs[0].lane, p[runs[0].lane], size * (size_t)runs[0].count);
    else set_destinations(m, i, active, p);
}

static void load_global(machine &m, const instruction &i, uint32_t active, const uint64_t *address,
                        size_t size) {
    m.count.global_loads++;
    m.count.global_bytes_read += size * count_bits(active);
    count_sectors(m, i, address, active, size, false);
    load_checked(m, i, GLOBAL, active, address, size);
}

static void load_shared(machine &m, const instruction &i, uint32_t active, const uint64_t *address,
                        size_t size) {
    m.count.shared_loads++;
    count_shared(m, i, address, active, size);
    load_checked(m, i, SHARED, active, address, size);
}

static void load_local(machine &m, const instruction &i, uint32_t active, const uint64_t *address,
                       size_t size) {
    const unsigned char *p[LANES];
    m.count.local++;
    for (int l : lanes{active}) {
        p[l] = locate_local(m, i, l, address[l], size);
        if (!p[l]) return;
        const unsigned char *written = m.warp->local_written.data() + (p[l] - m.warp->local.data());
        if (memchr(written, 0, size))
            fault(m, PTX_UNWRITTEN_REGISTER, {&i, thread_of(m, l)},
                  "read of %zu bytes at local address 0x%llx, of which some were never written",
                  size, (unsigned long long)address[l]);
    }
    set_destinations(m, i, active, p);
}

static void load_param(machine &m, const instruction &i, uint32_t active, const uint64_t *address,
                       size_t size) {
    const unsigned char *p[LANES];
    const int first = lowest(active);
    for (int l : lanes{active}) {
        bool same = l != first && address[l] == address[first];
        p[l] = same ? p[first] : locate_param(m, i, l, address[l], size);
        if (!p[l]) return;
    }
    set_destinations(m, i, active, p);
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

static void load(machine &m, const instruction &i, uint32_t active) {
    uint64_t address[LANES];
    gather_addresses(m, i.o + i.form->count, address);
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

/* The addresses and the values that the lanes of a store write. */
struct stored {
    uint64_t address[LANES];
    unsigned char value[LANES][MAX_VECTOR];
    size_t size;
};

/* Copies element k of all lanes from a row to the values. T: the type in memory. */
template <class T, class W> static void store_row(stored &s, const W *row, unsigned k) {
    for (int l = 0; l < LANES; l++) {
        T value = (T)row[l];
        memcpy(s.value[l] + k * sizeof value, &value, sizeof value);
    }
}

template <class T> static void gather_values(machine &m, const instruction &i, stored &s) {
    for (unsigned k = 0; k < i.form->count; k++) {
        operand o = i.o[2 + k];
        if (o & IS_WIDE) store_row<T>(s, row64(m, o), k);
        else store_row<T>(s, row32(m, o), k);
    }
}

static void write_values(const stored &s, const range &r) {
    for (int l = 0; l < r.count; l++)
        memcpy(r.bytes + r.size * (size_t)l, s.value[r.lane + l], r.size);
}

static void store_global(machine &m, const instruction &i, uint32_t active, const stored &s) {
    m.count.global_stores++;
    m.count.global_bytes_written += s.size * count_bits(active);
    count_sectors(m, i, s.address, active, s.size, true);
    lane_values values = {s.address, s.value[0], MAX_VECTOR, active};
    run runs[LANES];
    int n = find_runs(s.address, active, s.size, runs);
    for (int k = 0; k < n; k++) {
        range r;
        allocation *a = nullptr;
        uint64_t address = s.address[runs[k].lane];
        if (!locate_global(m, i, runs[k], address, s.size, s.size, &r, &a)) return;
        count_unique(m, *a, r, true);
        note_write(m, i, r, &values);
        a->set_written(r.at, s.size * (size_t)r.count, true);
        write_values(s, r);
    }
}

static void store_shared(machine &m, const instruction &i, uint32_t active, const stored &s) {
    m.count.shared_stores++;
    count_shared(m, i, s.address, active, s.size);
    lane_values values = {s.address, s.value[0], MAX_VECTOR, active};
    run runs[LANES];
    int n = find_runs(s.address, active, s.size, runs);
    for (int k = 0; k < n; k++) {
        range r;
        if (!locate_shared(m, i, runs[k], s.address[runs[k].lane], s.size, &r)) return;
        note_write(m, i, r, &values);
        write_values(s, r);
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
    stored s;
    s.size = type_size(f.to) * f.count;
    gather_addresses(m, i.o, s.address);
    switch (type_size(f.to)) {
    case 1: gather_values<uint8_t>(m, i, s); break;
    case 2: gather_values<uint16_t>(m, i, s); break;
    case 4: gather_values<uint32_t>(m, i, s); break;
    default: gather_values<uint64_t>(m, i, s); break;
    }
    if (f.space != GENERIC) {
        store_to(m, i, f.space, active, s);
        return;
    }
    for_spaces(active, s.address, [&](ptx::space to, uint32_t group) {
        if (!m.stop) store_to(m, i, to, group, s);
    });
}


// >>decoding of loads and stores

static bool decode_access(opcode &o, form &f) {
    take_hints(o);
    f.space = o.take_space();
    if (o.take("v2")) f.count = 2;
    if (o.take("v4")) f.count = 4;
    if (o.take("v8")) f.count = 8;
    f.to = o.take_type();
    f.counter = IN_MEMORY;
    return is_basic(f.to) && type_size(f.to) * f.count <= MAX_VECTOR;
}

bool decode_load(opcode &o, form &f) {
    if (!decode_access(o, f)) return false;
    if (o.name == "ldu" && f.space != GENERIC && f.space != GLOBAL) return false;
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

} // namespace ptx
