/* launch.cpp - launches: checks, parameters, blocks and their warps, and counters. */
#include "limits.h"
#include "machine.h"
#include <algorithm>
#include <string.h>

namespace ptx {

// >>random numbers

/* splitmix64 */
uint64_t draw(machine &m, uint64_t n) {
    uint64_t z = m.random += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return (z ^ z >> 31) % n;
}


// >>checks

static size_t dynamic_start(const ptx_kernel &k) {
    return (k.shared_bytes + k.dynamic_align - 1) / k.dynamic_align * k.dynamic_align;
}

static uint64_t product(const unsigned n[3]) { return (uint64_t)n[0] * n[1] * n[2]; }

static bool check_launch(machine &m) {
    const ptx_kernel &k = *m.kernel;
    const ptx_launch &l = *m.launch;
    place nowhere = {nullptr, 0};
    uint64_t threads = product(l.block);
    size_t shared = dynamic_start(k) + l.shared_bytes;
    size_t limit = max_block_shared(k.module->architecture);
    if (!threads || threads > MAX_BLOCK_THREADS || l.block[2] > 64)
        fatal(m, PTX_LAUNCH, nowhere, "block of %u x %u x %u threads; the limit is %d",
              l.block[0], l.block[1], l.block[2], MAX_BLOCK_THREADS);
    if (k.max_threads && threads > k.max_threads)
        fatal(m, PTX_LAUNCH, nowhere, "block of %llu threads, but .maxntid is %u",
              (unsigned long long)threads, k.max_threads);
    if (k.exact_threads && threads != k.max_threads)
        fatal(m, PTX_LAUNCH, nowhere, "block of %llu threads, but .reqntid is %u",
              (unsigned long long)threads, k.max_threads);
    if (!product(l.grid) || l.grid[0] > 0x7fffffffu || l.grid[1] > 65535 || l.grid[2] > 65535)
        fatal(m, PTX_LAUNCH, nowhere, "grid of %u x %u x %u blocks", l.grid[0], l.grid[1],
              l.grid[2]);
    if (shared > limit)
        fatal(m, PTX_LAUNCH, nowhere, "%zu bytes of shared memory; %s has %zu for a block", shared,
              k.module->target.c_str(), limit);
    if (!m.stop && block_registers((unsigned)threads, l.registers) > MAX_BLOCK_REGISTERS)
        fatal(m, PTX_LAUNCH, nowhere,
              "%llu threads with %u registers need %zu of the %d registers of a multiprocessor",
              (unsigned long long)threads, l.registers,
              block_registers((unsigned)threads, l.registers), MAX_BLOCK_REGISTERS);
    return !m.stop;
}


// >>warps

static uint32_t special_value(const machine &m, const warp &w, uint8_t s, unsigned lane) {
    const unsigned *size = m.launch->block, *grid = m.launch->grid;
    unsigned thread = w.number * LANES + lane;
    uint32_t bit = 1u << lane;
    switch (s) {
    case TID_X: return thread % size[0];
    case TID_Y: return thread / size[0] % size[1];
    case TID_Z: return thread / size[0] / size[1];
    case NTID_X: case NTID_Y: case NTID_Z: return size[s - NTID_X];
    case CTAID_X: case CTAID_Y: case CTAID_Z: return m.block[s - CTAID_X];
    case NCTAID_X: case NCTAID_Y: case NCTAID_Z: return grid[s - NCTAID_X];
    case LANEID: return lane;
    case WARPID: return w.number;
    case NWARPID: return m.warp_count;
    case LANEMASK_EQ: return bit;
    case LANEMASK_LT: return bit - 1;
    case LANEMASK_LE: return bit | (bit - 1);
    case LANEMASK_GT: return ~(bit | (bit - 1));
    case LANEMASK_GE: return ~(bit - 1);
    case DYNAMIC_SMEM_SIZE: return (uint32_t)m.launch->shared_bytes;
    case TOTAL_SMEM_SIZE: return (uint32_t)m.shared_bytes;
    default: return 0;
    }
}

/* Registers that are read before they are written start with all bits set. */
static void start_rows(machine &m, warp &w) {
    const ptx_kernel &k = *m.kernel;
    m.bank[0] = w.rows;
    for (operand o : k.tracked_rows) *row32(m, o) = 0;
    for (auto &r : k.entry_rows) memset(w.rows + r.first, 0xff, r.second * sizeof *w.rows);
    for (auto &s : k.specials) {
        uint32_t *row = row32(m, s.second);
        for (unsigned l = 0; l < LANES; l++) row[l] = special_value(m, w, s.first, l);
    }
}

static void start_warp(machine &m, warp &w, unsigned number) {
    unsigned count = std::min(m.threads - number * LANES, (unsigned)LANES);
    w.number = number;
    w.exists = w.alive = count == LANES ? ALL_LANES : (1u << count) - 1;
    w.rows = m.storage.data() + (size_t)number * m.kernel->row_words;
    w.splits.assign(1, {w.exists, 0, -1, READY, 0});
    w.joins.clear();
    w.copies.clear();
    w.known.clear();
    w.floor = m.now;
    memset(w.group, 0, sizeof w.group);
    w.local_written.assign((size_t)LANES * m.kernel->local_bytes, 0);
    w.local.resize(w.local_written.size());
    start_rows(m, w);
}


// >>blocks

static void start_block(machine &m, uint64_t number) {
    const unsigned *grid = m.launch->grid;
    m.block[0] = (unsigned)(number % grid[0]);
    m.block[1] = (unsigned)(number / grid[0] % grid[1]);
    m.block[2] = (unsigned)(number / grid[0] / grid[1]);
    m.block_start = m.block_floor = ++m.now;
    m.history.push_back({m.now, {m.block[0], m.block[1], m.block[2]}});
    memset(m.barriers, 0, sizeof m.barriers);
    for (unsigned w = 0; w < m.warp_count; w++) start_warp(m, m.warps[w], w);
}

/* The block that runs as number n: a permutation for PTX_RANDOM. */
static std::vector<uint64_t> block_order(machine &m, uint64_t blocks) {
    std::vector<uint64_t> order(blocks);
    for (uint64_t n = 0; n < blocks; n++)
        order[n] = m.launch->order == PTX_DESCENDING ? blocks - 1 - n : n;
    if (m.launch->order == PTX_RANDOM)
        for (uint64_t n = blocks; n > 1; n--) std::swap(order[n - 1], order[draw(m, n)]);
    return order;
}


// >>counters

/* The number of calls of ptx_counters_clear. */
static uint64_t counters_epoch;

static void add_counters(const machine &m, uint64_t blocks) {
    ptx_counters &c = m.kernel->counters;
    if (m.kernel->counters_epoch != counters_epoch) c = {};
    m.kernel->counters_epoch = counters_epoch;
    const ptx_counters &d = m.count;
    c.launches++;
    c.blocks += blocks;
    c.warps += blocks * m.warp_count;
    for (uint64_t n : m.executed) c.instructions += n;
    c.thread_instructions += m.thread_instructions;
    c.arithmetic += m.executed[IN_ARITHMETIC];
    c.moves += m.executed[IN_MOVE];
    c.doubles += m.executed[IN_DOUBLE];
    c.special += m.executed[IN_SPECIAL];
    c.conversion += m.executed[IN_CONVERSION];
    c.control += m.executed[IN_CONTROL];
    c.collective += m.executed[IN_COLLECTIVE];
    c.shuffles += m.executed[IN_SHUFFLE];
    c.barrier += m.executed[IN_BARRIER];
    c.mma += m.executed[IN_MMA];
    c.global_loads += d.global_loads;
    c.global_stores += d.global_stores;
    c.atomics += d.atomics;
    c.shared_loads += d.shared_loads;
    c.shared_stores += d.shared_stores;
    c.local += d.local;
    c.global_bytes_read += d.global_bytes_read;
    c.global_bytes_written += d.global_bytes_written;
    c.sectors_read += d.sectors_read;
    c.sectors_written += d.sectors_written;
    c.ideal_read += d.ideal_read;
    c.ideal_written += d.ideal_written;
    c.unique_read += d.unique_read;
    c.unique_written += d.unique_written;
    c.shared_wavefronts += d.shared_wavefronts;
    c.shared_ideal += d.shared_ideal;
    c.divergent_branches += d.divergent_branches;
}


// >>launches

/* The machine is kept from launch to launch: its clock runs on, and its memory is used
   again. */
static machine &the_machine() {
    static machine *m = new machine();
    return *m;
}

static void reset_machine(machine &m, const ptx_launch *l) {
    m.kernel = l->kernel;
    m.launch = l;
    m.stop = false;
    m.faults = 0;
    m.reported.clear();
    m.history.clear();
    m.random = l->seed;
    m.count = {};
    m.thread_instructions = 0;
    memset(m.block, 0, sizeof m.block);
    memset(m.executed, 0, sizeof m.executed);
    memset(m.hint, 0, sizeof m.hint);

    const uint32_t CLOCK_END = 0xc0000000u;
    if (m.now > CLOCK_END) {
        clear_global_shadow();
        m.shared_shadow.pages.clear();
        m.now = 0;
    }
    m.launch_start = ++m.now;
}

static void copy_params(machine &m) {
    const ptx_kernel &k = *m.kernel;
    m.params.assign(k.param_bytes, 0);
    for (size_t n = 0; n < k.params.size(); n++)
        memcpy(m.params.data() + k.params[n].offset, m.launch->params[n], k.params[n].size);
}

static void reserve(machine &m) {
    const ptx_kernel &k = *m.kernel;
    m.threads = (unsigned)product(m.launch->block);
    m.warp_count = (m.threads + LANES - 1) / LANES;
    m.warps.resize(m.warp_count);
    if (m.storage.size() < (size_t)m.warp_count * k.row_words)
        m.storage.resize((size_t)m.warp_count * k.row_words);
    m.bank[1] = const_cast<uint32_t *>(k.constant_rows.data());
    if (k.accessed.empty() || k.counters_epoch != counters_epoch)
        k.accessed.assign(2 * k.code.size(), {});
    m.shared_bytes = dynamic_start(k) + m.launch->shared_bytes;
    if (m.shared.size() < m.shared_bytes) m.shared.resize(m.shared_bytes);
    if (m.shared_shadow.pages.size() * SHADOW_PAGE < m.shared_bytes)
        m.shared_shadow.resize(m.shared_bytes);
}

} // namespace ptx


// >>the API

size_t ptx_run(const ptx_launch *l) {
    ptx::machine &m = ptx::the_machine();
    ptx::prepare(*const_cast<ptx_kernel *>(l->kernel));
    ptx::reset_machine(m, l);
    if (!ptx::check_launch(m)) return m.faults;
    ptx::copy_params(m);
    ptx::reserve(m);

    uint64_t done = 0;
    for (uint64_t n : ptx::block_order(m, ptx::product(l->grid))) {
        ptx::start_block(m, n);
        ptx::run_block(m);
        done++;
        if (m.stop) break;
    }
    m.kernel->launches++;
    ptx::add_counters(m, done);
    for (uint64_t *word : m.touched) *word = 0;
    m.touched.clear();
    return m.faults;
}

ptx_counters ptx_counters_of(const ptx_kernel *k) {
    return k->counters_epoch == ptx::counters_epoch ? k->counters : ptx_counters{};
}

bool ptx_access_at(const ptx_kernel *k, size_t i, ptx_access *a) {
    if (k->counters_epoch != ptx::counters_epoch || i >= k->accessed.size()) return false;
    const ptx_kernel::accesses &from = k->accessed[i];
    std::string place = ptx::line_text(*k, i / 2);
    size_t source = place.find('(');
    if (source != std::string::npos) place = place.substr(source + 1, place.size() - source - 2);
    int caller = k->locations[k->code[i / 2].location].caller_line;
    if (caller) place += " from " + std::to_string(caller);
    *a = {from.requests, from.units, from.ideal, k->code[i / 2].form->text.c_str(), ""};
    snprintf(a->place, sizeof a->place, "%s", place.c_str());
    return true;
}

void ptx_counters_clear(void) { ptx::counters_epoch++; }
