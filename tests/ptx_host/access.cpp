/* access.cpp - addresses of lanes, their checks and counters. See access.h. */
#include "access.h"
#include <algorithm>

namespace ptx {

// >>addresses

void gather_addresses(machine &m, const operand *o, uint64_t *address) {
    int64_t offset = (int32_t)o[1];
    if (o[0] & IS_WIDE) {
        const uint64_t *base = row64(m, o[0]);
        for (int l = 0; l < LANES; l++) address[l] = base[l] + (uint64_t)offset;
    } else {
        const uint32_t *base = row32(m, o[0]);
        for (int l = 0; l < LANES; l++) address[l] = base[l] + (uint32_t)offset;
    }
}

int find_runs(const uint64_t *address, uint32_t active, size_t size, run runs[LANES]) {
    if (active == ALL_LANES) {
        uint64_t gaps = 0;
        for (int l = 0; l < LANES; l++) gaps |= address[l] ^ (address[0] + (uint64_t)l * size);
        if (!gaps) {
            runs[0] = {0, LANES};
            return 1;
        }
    }
    int n = 0;
    for (int l : lanes{active}) {
        bool next = n && runs[n - 1].lane + runs[n - 1].count == l;
        if (next && address[l] == address[l - 1] + size) runs[n - 1].count++;
        else runs[n++] = {l, 1};
    }
    return n;
}


// >>checks

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

/* Whether a run of lanes from an address is within an allocation, as a whole. */
static bool locate_at_once(machine &m, const instruction &i, uint64_t address, size_t bytes,
                           allocation **a) {
    allocation *&hint = m.hint[i.pc % 256];
    if (!hint || !hint->contains(address, bytes)) hint = find_allocation(address);
    *a = hint;
    return hint && hint->contains(address, bytes);
}

bool locate_global(machine &m, const instruction &i, run lanes, uint64_t address, size_t size,
                   size_t align, range *r, allocation **a) {
    if (!locate_at_once(m, i, address, size * (size_t)lanes.count, a)) {
        for (int l = 0; l < lanes.count; l++, address += size)
            if (!*a || !(*a)->contains(address, size))
                return out_of_bounds(m, i, lanes.lane + l, GLOBAL, address, size, 0);
    }
    if (!check_aligned(m, i, lanes.lane, GLOBAL, address, align)) return false;
    *r = {GLOBAL, &(*a)->shadow, (size_t)(address - (*a)->origin), size, address,
          (unsigned char *)(uintptr_t)address, lanes.lane, lanes.count, false};
    return true;
}

/* Whether a run of lanes is within the variable from which its address is computed. */
static bool within_variable(machine &m, const instruction &i, run lanes, uint64_t address,
                            size_t size) {
    const shared_variable &v = m.kernel->shared[i.variable - 1];
    uint64_t bytes = v.is_dynamic ? m.launch->shared_bytes : v.bytes;
    uint64_t start = v.is_dynamic ? m.shared_bytes - bytes : v.start;
    for (int l = 0; l < lanes.count; l++) {
        uint64_t at = address + (uint64_t)l * size - start;
        if (at <= bytes && size <= bytes - at) continue;
        fatal(m, PTX_OUT_OF_BOUNDS, {&i, thread_of(m, lanes.lane + l)},
              "access of %zu bytes at shared address 0x%llx, which is computed from the address of "
              "variable %s and not in its %llu bytes from 0x%llx",
              size, (unsigned long long)(at + start), v.name.c_str(), (unsigned long long)bytes,
              (unsigned long long)start);
        return false;
    }
    return true;
}

bool locate_shared(machine &m, const instruction &i, run lanes, uint64_t address, size_t size,
                   range *r) {
    if (i.variable && !within_variable(m, i, lanes, address, size)) return false;
    for (int l = 0; l < lanes.count; l++) {
        uint64_t at = address + (uint64_t)l * size;
        if (at <= m.shared_bytes && size <= m.shared_bytes - at) continue;
        return out_of_bounds(m, i, lanes.lane + l, SHARED, at, size, m.shared_bytes);
    }
    if (!check_aligned(m, i, lanes.lane, SHARED, address, size)) return false;
    *r = {SHARED, &m.shared_shadow, address, size, address, m.shared.data() + address,
          lanes.lane, lanes.count, false};
    return true;
}

/* Local memory of a lane begins at lane * local_bytes. */
unsigned char *locate_local(machine &m, const instruction &i, int lane, uint64_t address,
                            size_t size) {
    size_t bytes = m.kernel->local_bytes;
    if (address > bytes || size > bytes - address) {
        out_of_bounds(m, i, lane, LOCAL, address, size, bytes);
        return nullptr;
    }
    if (!check_aligned(m, i, lane, LOCAL, address, size)) return nullptr;
    return m.warp->local.data() + (size_t)lane * bytes + address;
}

const unsigned char *locate_param(machine &m, const instruction &i, int lane, uint64_t address,
                                  size_t size) {
    size_t limit = m.kernel->param_bytes;
    if (address > limit || size > limit - address) {
        out_of_bounds(m, i, lane, PARAM, address, size, limit);
        return nullptr;
    }
    return check_aligned(m, i, lane, PARAM, address, size) ? m.params.data() + address : nullptr;
}

void check_written(machine &m, const instruction &i, const range &r, const allocation &a) {
    if (a.all_written(r.at, r.size * (size_t)r.count)) return;
    for (int l = 0; l < r.count; l++) {
        size_t offset = r.size * (size_t)l;
        if (a.all_written(r.at + offset, r.size)) continue;
        fault(m, PTX_UNWRITTEN_GLOBAL, {&i, thread_of(m, r.lane + l)},
              "read of %zu bytes at global address 0x%llx, of which some were never written",
              r.size, (unsigned long long)(r.address + offset));
    }
}


// >>counters

/* Counts a request of an instruction. */
static void count_request(machine &m, const instruction &i, bool shared, uint64_t units,
                          uint64_t ideal) {
    ptx_kernel::accesses &a = m.kernel->accessed[2 * i.pc + shared];
    a.requests++;
    a.units += units;
    a.ideal += ideal;
}

void count_sectors(machine &m, const instruction &i, const uint64_t *address, uint32_t active,
                   size_t size, bool writes) {
    uint64_t at[LANES], next = 0;   /* next: the first sector that is not counted */
    uint64_t sectors = 0, ideal;
    size_t n = 0;
    for (int l : lanes{active}) at[n++] = address[l];
    if (!std::is_sorted(at, at + n)) std::sort(at, at + n);
    n = (size_t)(std::unique(at, at + n) - at);
    for (size_t k = 0; k < n; k++) {
        uint64_t first = std::max(at[k] / 32, next), end = (at[k] + size - 1) / 32 + 1;
        if (first >= end) continue;
        sectors += end - first;
        next = end;
    }
    ideal = (n * size + 31) / 32;
    (writes ? m.count.sectors_written : m.count.sectors_read) += sectors;
    (writes ? m.count.ideal_written : m.count.ideal_read) += ideal;
    count_request(m, i, false, sectors, ideal);
}

void count_unique(machine &m, allocation &a, const range &r, bool writes) {
    size_t end = (r.at + r.size * (size_t)r.count - 1) / 32 + 1;
    uint64_t &count = writes ? m.count.unique_written : m.count.unique_read;
    for (size_t s = r.at / 32; s < end; s++) {
        uint64_t &word = a.touched[writes][s / 64], bit = 1ull << s % 64;
        if (word & bit) continue;
        if (!word) m.touched.push_back(&word);
        word |= bit;
        count++;
    }
}

/* The passes over the 32 banks that one group of lanes needs: the greatest number of
   different words in one bank. */
static unsigned count_passes(const uint64_t *address, uint32_t group, size_t size) {
    /* A misaligned access, which is reported later, touches two words. */
    uint32_t words[2 * LANES], n = 0;
    uint8_t next[2 * LANES], first[LANES], depth[LANES] = {};
    uint64_t least = ~0ull, greatest = 0;
    for (int l : lanes{group}) {
        least = std::min(least, address[l]);
        greatest = std::max(greatest, address[l] + size - 1);
    }
    if (greatest - least / 4 * 4 < 128) return 1;

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
void count_shared(machine &m, const instruction &i, const uint64_t *address, uint32_t active,
                  size_t size) {
    unsigned group = size <= 4 ? 32 : 128 / (unsigned)size;
    uint32_t all = group == 32 ? ALL_LANES : (1u << group) - 1;
    uint64_t passes = 0, ideal = 0;
    for (unsigned l = 0; l < LANES; l += group) {
        uint32_t part = active & all << l;
        if (!part) continue;
        passes += count_passes(address, part, size);
        ideal++;
    }
    m.count.shared_wavefronts += passes;
    m.count.shared_ideal += ideal;
    count_request(m, i, true, passes, ideal);
}


// >>decoding

void take_hints(opcode &o) {
    static const char *hints[] = {
        "ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc", "weak", "volatile", "relaxed", "acquire",
        "release", "acq_rel", "cta", "gpu", "sys", "cluster", "L1::evict_normal",
        "L1::evict_unchanged", "L1::evict_first", "L1::evict_last", "L1::no_allocate",
        "L2::evict_last", "L2::evict_normal", "L2::evict_first", "L2::64B", "L2::128B", "L2::256B"};
    for (const char *h : hints) o.take(h);
}

} // namespace ptx
