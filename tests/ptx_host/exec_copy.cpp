/* exec_copy.cpp - asynchronous copies to shared memory, prefetches and fences. */
#include "access.h"
#include <algorithm>

namespace ptx {

// >>asynchronous copies. The data is read at once, and lands at the wait.

/* cp.async [shared], [global], size{, source size}; the rest is filled with zeros. */
static void copy_async(machine &m, const instruction &i, uint32_t active) {
    uint64_t to[LANES], from[LANES];
    uint32_t reading = 0;
    size_t size = i.o[4];
    gather_addresses(m, i.o, to);
    gather_addresses(m, i.o + 2, from);
    m.count.shared_stores++;
    count_shared(m, i, to, active, size);

    for (int l : lanes{active}) {
        size_t bytes = i.o[5] == NO_OPERAND ? size : std::min<size_t>(row32(m, i.o[5])[l], size);
        range target, source;
        allocation *a = nullptr;
        if (!locate_shared(m, i, {l, 1}, to[l], size, &target)) return;
        copy c = {(uint32_t)to[l], m.warp->group[l], pc_of(i), (uint16_t)thread_of(m, l),
                  (uint8_t)size, {}};
        if (bytes) {
            reading |= 1u << l;
            if (!locate_global(m, i, {l, 1}, from[l], bytes, size, &source, &a)) return;
            check_written(m, i, source, *a);
            count_unique(m, *a, source, false);
            note_read(m, i, source);
            memcpy(c.data, source.bytes, bytes);
            m.count.global_bytes_read += bytes;
        }
        note_copy_begin(m, i, target);
        memset(target.bytes, 0xff, size);
        m.warp->copies.push_back(c);
    }
    m.count.global_loads++;
    count_sectors(m, i, from, reading, size, false);
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
        if (f.space == SHARED || f.space == PARAM || f.space == CONST) return false;
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
    if (o.take("cg")) f.integers = 1u << 16;
    else if (o.take("ca")) f.integers = 1u << 4 | 1u << 8 | 1u << 16;
    else return false;
    take_hints(o);
    f.run = copy_async;
    f.operands = "mmi?w";
    return true;
}

/* Fences order nothing here: see README.md. */
bool decode_fence(opcode &o, form &f) {
    static const char *levels[] = {"cta", "gl", "gpu", "sys", "cluster", "sc", "acq_rel", "acquire",
                                   "release"};
    bool any = false;
    for (const char *l : levels) any |= o.take(l);
    f.counter = IN_BARRIER;
    f.run = no_operation;
    return any;
}

} // namespace ptx
