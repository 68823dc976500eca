/* memory.cpp - registered global memory, and the pages of shadow state. */
#include "memory.h"
#include <algorithm>
#include <string.h>

namespace ptx {

// >>allocations

/* Sorted by address. */
static std::vector<std::unique_ptr<allocation>> &allocations() {
    static std::vector<std::unique_ptr<allocation>> list;
    return list;
}

/* Returns the index of the first allocation that begins after an address. */
static size_t index_after(uint64_t address) {
    auto &list = allocations();
    auto after = [](uint64_t a, const std::unique_ptr<allocation> &b) {
        return a < (uint64_t)(uintptr_t)b->base;
    };
    return (size_t)(std::upper_bound(list.begin(), list.end(), address, after) - list.begin());
}

allocation *find_allocation(uint64_t address) {
    size_t i = index_after(address);
    if (!i) return nullptr;
    allocation *a = allocations()[i - 1].get();
    return address - (uint64_t)(uintptr_t)a->base < a->bytes ? a : nullptr;
}

bool allocation::all_written(size_t at, size_t size) const {
    for (size_t end = at + size; at < end;) {
        size_t bit = at % 64, n = std::min<size_t>(64 - bit, end - at);
        uint64_t mask = (n == 64 ? ~0ull : (1ull << n) - 1) << bit;
        if ((written[at / 64] & mask) != mask) return false;
        at += n;
    }
    return true;
}

void allocation::set_written(size_t at, size_t size, bool value) {
    for (size_t end = at + size; at < end;) {
        size_t bit = at % 64, n = std::min<size_t>(64 - bit, end - at);
        uint64_t mask = (n == 64 ? ~0ull : (1ull << n) - 1) << bit;
        if (value) written[at / 64] |= mask;
        else written[at / 64] &= ~mask;
        at += n;
    }
}

/* Marks the parts of a range that are in registered memory. */
static void mark(const void *base, size_t bytes, bool value) {
    uint64_t from = (uint64_t)(uintptr_t)base, to = from + bytes;
    size_t first = index_after(from);
    for (size_t i = first ? first - 1 : 0; i < allocations().size(); i++) {
        allocation &a = *allocations()[i];
        uint64_t start = (uint64_t)(uintptr_t)a.base;
        if (start >= to) break;
        uint64_t lo = std::max(from, start), hi = std::min<uint64_t>(to, start + a.bytes);
        if (lo < hi) a.set_written((size_t)(lo - a.origin), (size_t)(hi - lo), value);
    }
}

void clear_global_shadow() {
    for (auto &a : allocations())
        for (shadow_page &p : a->shadow.pages) p.words.reset();
}


// >>shadow pages

/* Gives a page cells of 1 << finer bytes. Existing cells are divided. */
void shadow_page::refine(unsigned finer) {
    size_t n = (size_t)SHADOW_PAGE >> finer, before = (size_t)SHADOW_PAGE >> shift;
    std::unique_ptr<uint32_t[]> all(new uint32_t[4 * n]());
    if (words)
        for (size_t array = 0; array < 4; array++)
            for (size_t c = 0; c < n; c++)
                all[array * n + c] = words[array * before + ((c << finer) >> shift)];
    words = std::move(all);
    shift = finer;
}

} // namespace ptx


// >>the API

void ptx_memory_add(void *base, size_t bytes) {
    ptx_memory_remove(base);
    std::unique_ptr<ptx::allocation> a(new ptx::allocation);
    a->base = (unsigned char *)base;
    a->bytes = bytes;
    a->origin = (uint64_t)(uintptr_t)base / 64 * 64;
    a->written.resize(bytes / 64 + 2);
    for (auto &touched : a->touched) touched.resize(bytes / (64 * 32) + 2);
    a->shadow.resize(bytes + 64);
    auto &list = ptx::allocations();
    size_t at = ptx::index_after((uint64_t)(uintptr_t)base);
    list.insert(list.begin() + (ptrdiff_t)at, std::move(a));
}

void ptx_memory_remove(void *base) {
    auto &list = ptx::allocations();
    size_t i = ptx::index_after((uint64_t)(uintptr_t)base);
    if (i && list[i - 1]->base == base) list.erase(list.begin() + (ptrdiff_t)(i - 1));
}

void ptx_memory_written(const void *base, size_t bytes) { ptx::mark(base, bytes, true); }
void ptx_memory_unwritten(const void *base, size_t bytes) { ptx::mark(base, bytes, false); }
