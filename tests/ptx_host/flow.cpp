/* flow.cpp - what is computed from a kernel's control flow: functions are inlined;
   branches get the point where their lanes meet again; registers get rows, which they
   share with registers that are not live at the same time; and registers that are
   undefined on some path are found, so that only these are checked at run time. */
#include "module.h"
#include <algorithm>
#include <queue>

namespace ptx {

std::string register_text(const body &b, uint32_t r) {
    const register_name &n = b.names[b.registers[r].name];
    return n.range ? n.name + std::to_string(r - n.first) : n.name;
}


// >>inlining

/* Where the parts of a function go in its caller. */
struct shifts {
    uint32_t registers, names, constants, operands, locations, local, shared;
    int code, tables;
};

static operand shifted(operand o, const shifts &s) {
    if (o == NO_OPERAND) return o;
    if (o & IS_CONSTANT) return o + s.constants;
    return ((o & ROW_MASK) + s.registers) | (o & IS_NEGATED);
}

static void append_registers(body &b, const body &callee, const shifts &s) {
    for (register_name n : callee.names) {
        n.first += s.registers;
        b.names.push_back(n);
    }
    for (register_info r : callee.registers) {
        r.name += s.names;
        b.registers.push_back(r);
    }
}

static void append_constants(body &b, const body &callee, const call &c, const shifts &s) {
    for (constant k : callee.constants) {
        if (k.kind == LOCAL_OFFSET) k.value += s.local;
        if (k.kind == FORMAL) k = {c.actuals[k.value], k.width, LOCAL_OFFSET, 0};
        if (k.variable) k.variable += s.shared;
        b.constants.push_back(k);
    }
}

static void append_code(body &b, const body &callee, const shifts &s) {
    static const form *branch = find_form("bra");
    int end = s.code + (int)callee.code.size();
    for (instruction i : callee.code) {
        i.first += s.operands;
        i.location += s.locations;
        i.guard = shifted(i.guard, s);
        for_operands(*i.form, [&](uint32_t position, char) {
            operand &o = b.operands[i.first + position];
            o = shifted(o, s);
        });
        if (i.control == BRANCH) i.target += s.code;
        if (i.control == BRANCH_INDEXED) i.target += s.tables;
        if (i.control == RETURN && i.form->text != "exit") {
            i.form = branch;
            i.control = BRANCH;
            i.target = end;
        }
        b.code.push_back(i);
    }
}

static void append_function(body &b, const body &callee, const call &c) {
    b.local_bytes = (b.local_bytes + 15) / 16 * 16;
    shifts s = {(uint32_t)b.registers.size(), (uint32_t)b.names.size(),
                (uint32_t)b.constants.size(), (uint32_t)b.operands.size(),
                (uint32_t)b.locations.size(), b.local_bytes, (uint32_t)b.shared.size(),
                (int)b.code.size(), (int)b.tables.size()};
    b.local_bytes += callee.local_bytes;
    b.dynamic_align = std::max(b.dynamic_align, callee.dynamic_align);
    b.shared.insert(b.shared.end(), callee.shared.begin(), callee.shared.end());
    append_registers(b, callee, s);
    append_constants(b, callee, c, s);
    b.operands.insert(b.operands.end(), callee.operands.begin(), callee.operands.end());
    b.locations.insert(b.locations.end(), callee.locations.begin(), callee.locations.end());
    for (std::vector<int> table : callee.tables) {
        for (int &t : table) t += s.code;
        b.tables.push_back(table);
    }
    append_code(b, callee, s);
}

std::string inline_calls(body &b,
                         const std::unordered_map<std::string, std::unique_ptr<body>> &all) {
    if (b.calls.empty()) return "";
    b.inlining = true;
    std::vector<instruction> old;
    std::vector<int> moved(b.code.size() + 1);
    std::vector<size_t> own;
    size_t own_tables = b.tables.size();
    old.swap(b.code);

    for (size_t n = 0; n < old.size(); n++) {
        moved[n] = (int)b.code.size();
        if (old[n].control != CALL) {
            own.push_back(b.code.size());
            b.code.push_back(old[n]);
            continue;
        }
        const call &c = b.calls[(size_t)old[n].target];
        std::string where = "line " + std::to_string(c.line) + ": call of " + c.callee;
        auto found = all.find(c.callee);
        if (found == all.end()) return where + ", which has no body";
        body &callee = *found->second;
        if (callee.inlining) return where + ", which is recursive";
        if (old[n].flags & GUARDED) return where + ": a call with a guard is not implemented";
        if (callee.shared_bytes) return where + ": shared memory in functions is not implemented";
        if (c.actuals.size() != callee.params.size()) return where + ": wrong number of arguments";
        std::string error = inline_calls(callee, all);
        if (!error.empty()) return error;
        append_function(b, callee, c);
    }
    moved[old.size()] = (int)b.code.size();

    for (size_t n : own)
        if (b.code[n].control == BRANCH) b.code[n].target = moved[(size_t)b.code[n].target];
    for (size_t t = 0; t < own_tables; t++)
        for (int &target : b.tables[t]) target = moved[(size_t)target];
    b.calls.clear();
    b.inlining = false;
    return "";
}


// >>basic blocks

struct block {
    int first, last;            /* instructions, last included */
    std::vector<int> next, previous;
};

struct graph {
    std::vector<block> blocks;
    std::vector<int> block_of;  /* by instruction */
};

static bool ends_block(const instruction &i) {
    return i.control == BRANCH || i.control == BRANCH_INDEXED || i.control == RETURN ||
           i.control == TRAP;
}

/* The successors of the last instruction of a block. */
static std::vector<int> successors(const body &b, int pc) {
    const instruction &i = b.code[(size_t)pc];
    std::vector<int> next;
    if (i.control == BRANCH) next.push_back(i.target);
    if (i.control == BRANCH_INDEXED) next = b.tables[(size_t)i.target];
    bool continues = !ends_block(i) || (i.flags & GUARDED);
    if (continues && pc + 1 < (int)b.code.size()) next.push_back(pc + 1);
    std::sort(next.begin(), next.end());
    next.erase(std::unique(next.begin(), next.end()), next.end());
    return next;
}

static graph make_graph(const body &b) {
    size_t n = b.code.size();
    std::vector<bool> leads(n + 1);
    leads[0] = true;
    for (size_t pc = 0; pc < n; pc++) {
        const instruction &i = b.code[pc];
        if (!ends_block(i)) continue;
        leads[pc + 1] = true;
        for (int t : successors(b, (int)pc)) leads[(size_t)t] = true;
    }

    graph g;
    g.block_of.resize(n);
    for (size_t pc = 0; pc < n; pc++) {
        if (leads[pc]) g.blocks.push_back({(int)pc, (int)pc, {}, {}});
        g.blocks.back().last = (int)pc;
        g.block_of[pc] = (int)g.blocks.size() - 1;
    }
    for (size_t k = 0; k < g.blocks.size(); k++) {
        for (int t : successors(b, g.blocks[k].last)) {
            g.blocks[k].next.push_back(g.block_of[(size_t)t]);
            g.blocks[(size_t)g.block_of[(size_t)t]].previous.push_back((int)k);
        }
    }
    return g;
}


// >>post-dominators, by the algorithm of Cooper, Harvey and Kennedy on the reversed graph

/* The edges of the reversed graph. The virtual exit is number blocks.size(). */
static std::vector<int> edges_back(const graph &g, int k) {
    if (k < (int)g.blocks.size()) return g.blocks[(size_t)k].previous;
    std::vector<int> ends;
    for (int e = 0; e < k; e++)
        if (g.blocks[(size_t)e].next.empty()) ends.push_back(e);
    return ends;
}

/* The blocks from which the exit can be reached, in reverse postorder of the reversed
   graph: the exit first. */
static std::vector<int> order_from_exit(const graph &g) {
    struct visit {
        int block;
        std::vector<int> left;
    };
    int exit = (int)g.blocks.size();
    std::vector<int> order;
    std::vector<bool> seen((size_t)exit + 1);
    std::vector<visit> stack;
    seen[(size_t)exit] = true;
    stack.push_back({exit, edges_back(g, exit)});
    while (!stack.empty()) {
        visit &top = stack.back();
        if (top.left.empty()) {
            order.push_back(top.block);
            stack.pop_back();
            continue;
        }
        int k = top.left.back();
        top.left.pop_back();
        if (seen[(size_t)k]) continue;
        seen[(size_t)k] = true;
        stack.push_back({k, edges_back(g, k)});
    }
    std::reverse(order.begin(), order.end());
    return order;
}

/* The immediate post-dominator of each block; -1 if it is the exit, or if the exit cannot
   be reached. A guarded exit only leads to the next instruction: the lanes that exit do
   not take part in a reconvergence. */
static std::vector<int> post_dominators(const graph &g) {
    int exit = (int)g.blocks.size();
    std::vector<int> order = order_from_exit(g);
    std::vector<int> rank((size_t)exit + 1, -1), dominator((size_t)exit + 1, -1);
    for (size_t k = 0; k < order.size(); k++) rank[(size_t)order[k]] = (int)k;
    dominator[(size_t)exit] = exit;

    auto meet = [&](int x, int y) {
        while (x != y) {
            while (rank[(size_t)x] > rank[(size_t)y]) x = dominator[(size_t)x];
            while (rank[(size_t)y] > rank[(size_t)x]) y = dominator[(size_t)y];
        }
        return x;
    };
    for (bool changed = true; changed;) {
        changed = false;
        for (size_t n = 1; n < order.size(); n++) {
            int k = order[n], found = -1;
            std::vector<int> next = g.blocks[(size_t)k].next;
            if (next.empty()) next.push_back(exit);
            for (int t : next) {
                if (dominator[(size_t)t] < 0) continue;
                found = found < 0 ? t : meet(found, t);
            }
            if (found >= 0 && dominator[(size_t)k] != found) {
                dominator[(size_t)k] = found;
                changed = true;
            }
        }
    }
    for (int &d : dominator)
        if (d == exit) d = -1;
    return dominator;
}

static void find_reconvergence(ptx_kernel &k, const graph &g) {
    std::vector<int> dominators = post_dominators(g);
    k.reconvergence.assign(k.code.size(), -1);
    for (size_t n = 0; n < g.blocks.size(); n++) {
        const block &b = g.blocks[n];
        if (b.next.size() < 2) continue;
        int d = dominators[n];
        if (d >= 0) k.reconvergence[(size_t)b.last] = g.blocks[(size_t)d].first;
    }
}


// >>registers: liveness and definite assignment

struct bits {
    std::vector<uint64_t> words;

    explicit bits(size_t n = 0, bool value = false) : words((n + 63) / 64, value ? ~0ull : 0) {}
    bool get(size_t i) const { return words[i / 64] >> (i % 64) & 1; }
    void set(size_t i) { words[i / 64] |= 1ull << (i % 64); }
    void clear(size_t i) { words[i / 64] &= ~(1ull << (i % 64)); }

    template <class F> void for_each(F f) const {
        for (size_t w = 0; w < words.size(); w++)
            for (uint64_t left = words[w]; left; left &= left - 1)
                f(w * 64 + (size_t)__builtin_ctzll(left));
    }
};

/* Calls f(register, position) for the registers that an instruction reads or writes. */
template <class F> static void for_uses(const body &b, const instruction &i, F f) {
    if (i.flags & GUARDED && !(i.guard & IS_CONSTANT)) f(i.guard & ROW_MASK, GUARD_POSITION);
    for_operands(*i.form, [&](uint32_t position, char kind) {
        operand o = b.operands[i.first + position];
        bool is_register = o != NO_OPERAND && !(o & IS_CONSTANT);
        if (is_register && !is_destination(kind)) f(o & ROW_MASK, position);
    });
}

template <class F> static void for_definitions(const body &b, const instruction &i, F f) {
    for_operands(*i.form, [&](uint32_t position, char kind) {
        operand o = b.operands[i.first + position];
        if (o != NO_OPERAND && is_destination(kind)) f(o & ROW_MASK, position);
    });
}

/* The first and last instruction at which a register has to keep its row. */
struct interval {
    int start = -1, end = -1;

    void include(int pc) {
        if (start < 0 || pc < start) start = pc;
        if (pc > end) end = pc;
    }
};

struct liveness {
    std::vector<bits> in, out;  /* by block */
    std::vector<interval> intervals;
};

static liveness find_liveness(const body &b, const graph &g) {
    size_t n = b.registers.size(), blocks = g.blocks.size();
    liveness l;
    l.in.assign(blocks, bits(n));
    l.out.assign(blocks, bits(n));
    l.intervals.resize(n);
    std::vector<bits> defined(blocks, bits(n));
    for (size_t k = 0; k < blocks; k++) {
        for (int pc = g.blocks[k].first; pc <= g.blocks[k].last; pc++) {
            const instruction &i = b.code[(size_t)pc];
            for_uses(b, i, [&](uint32_t r, uint32_t) {
                if (!defined[k].get(r)) l.in[k].set(r);
                l.intervals[r].include(pc);
            });
            for_definitions(b, i, [&](uint32_t r, uint32_t) {
                if (!(i.flags & GUARDED)) defined[k].set(r);
                l.intervals[r].include(pc);
            });
        }
    }

    for (bool changed = true; changed;) {
        changed = false;
        for (size_t k = blocks; k--;) {
            for (size_t w = 0; w < l.in[k].words.size(); w++) {
                uint64_t out = 0;
                for (int t : g.blocks[k].next) out |= l.in[(size_t)t].words[w];
                uint64_t in = l.in[k].words[w] | (out & ~defined[k].words[w]);
                changed |= in != l.in[k].words[w];
                l.out[k].words[w] = out;
                l.in[k].words[w] = in;
            }
        }
    }
    for (size_t k = 0; k < blocks; k++) {
        l.in[k].for_each([&](size_t r) { l.intervals[r].include(g.blocks[k].first); });
        l.out[k].for_each([&](size_t r) { l.intervals[r].include(g.blocks[k].last); });
    }
    return l;
}

/* Adds to `defined` what an instruction surely defines. A mov of an undefined value
   defines nothing. */
static void define(const body &b, const instruction &i, bits &defined) {
    if (i.flags & GUARDED) return;
    bool valid = true;
    if (i.form->copies) for_uses(b, i, [&](uint32_t r, uint32_t) { valid &= defined.get(r); });
    for_definitions(b, i, [&](uint32_t r, uint32_t) {
        if (valid) defined.set(r);
        else defined.clear(r);
    });
}

/* The registers that some path reads before they have a value. */
static bits find_undefined(const body &b, const graph &g) {
    size_t n = b.registers.size(), blocks = g.blocks.size();
    bits entry(n), undefined(n);
    for (size_t r = 0; r < n; r++)
        if (b.registers[r].special != SPECIALS) entry.set(r);
    std::vector<bits> out(blocks, bits(n, true));
    auto before = [&](size_t k) {
        bits in = k ? bits(n, true) : entry;
        for (int p : g.blocks[k].previous)
            for (size_t w = 0; w < in.words.size(); w++) in.words[w] &= out[(size_t)p].words[w];
        return in;
    };

    for (bool changed = true; changed;) {
        changed = false;
        for (size_t k = 0; k < blocks; k++) {
            bits defined = before(k);
            for (int pc = g.blocks[k].first; pc <= g.blocks[k].last; pc++)
                define(b, b.code[(size_t)pc], defined);
            changed |= defined.words != out[k].words;
            out[k] = std::move(defined);
        }
    }
    for (size_t k = 0; k < blocks; k++) {
        bits defined = before(k);
        for (int pc = g.blocks[k].first; pc <= g.blocks[k].last; pc++) {
            for_uses(b, b.code[(size_t)pc], [&](uint32_t r, uint32_t) {
                if (!defined.get(r)) undefined.set(r);
            });
            define(b, b.code[(size_t)pc], defined);
        }
    }
    return undefined;
}


// >>rows

/* Assigns the lowest free row of its class to each interval. The intervals include both
   ends, so a destination never shares the row of a source. */
static std::vector<uint32_t> assign_rows(const body &b, const std::vector<interval> &intervals,
                                         uint32_t counts[3]) {
    typedef std::pair<int, uint32_t> ending;    /* end of an interval, its row */
    std::priority_queue<ending, std::vector<ending>, std::greater<ending>> busy[3];
    std::priority_queue<uint32_t, std::vector<uint32_t>, std::greater<uint32_t>> idle[3];
    std::vector<uint32_t> order, rows(intervals.size(), 0);
    for (uint32_t r = 0; r < intervals.size(); r++)
        if (intervals[r].start >= 0) order.push_back(r);
    std::sort(order.begin(), order.end(), [&](uint32_t x, uint32_t y) {
        return intervals[x].start != intervals[y].start ? intervals[x].start < intervals[y].start
                                                        : x < y;
    });

    for (uint32_t r : order) {
        int w = b.registers[r].width;
        while (!busy[w].empty() && busy[w].top().first < intervals[r].start) {
            idle[w].push(busy[w].top().second);
            busy[w].pop();
        }
        if (idle[w].empty()) idle[w].push(counts[w]++);
        rows[r] = idle[w].top();
        idle[w].pop();
        busy[w].push({intervals[r].end, rows[r]});
    }
    return rows;
}

static uint32_t words_of(register_width w) {
    static const uint32_t words[] = {1, 32, 64};
    return words[w];
}

/* Fills the bank of constants and returns the offset of each. */
static std::vector<uint32_t> place_constants(ptx_kernel &k) {
    std::vector<uint32_t> offsets;
    uint32_t dynamic = (k.shared_bytes + k.dynamic_align - 1) / k.dynamic_align * k.dynamic_align;
    for (const constant &c : k.constants) {
        uint64_t value = c.value + (c.kind == DYNAMIC_SHARED ? dynamic : 0);
        uint32_t size = words_of(c.width);
        size_t at = (k.constant_rows.size() + size - 1) / size * size;
        offsets.push_back((uint32_t)at);
        k.constant_rows.resize(at + size);
        for (uint32_t w = 0; w < size; w++) {
            uint32_t word = (uint32_t)value;
            if (c.width == WIDTH_PRED) word = value ? 0xffffffffu : 0;
            if (c.width == WIDTH_64 && w % 2) word = (uint32_t)(value >> 32);
            k.constant_rows[at + w] = word;
        }
    }
    return offsets;
}

/* Replaces numbers of registers and constants by rows. */
struct rewriter {
    const ptx_kernel &k;
    std::vector<uint32_t> registers, constants;     /* offsets */

    operand operator()(operand o) const {
        if (o == NO_OPERAND) return o;
        uint32_t n = o & ROW_MASK;
        bool is_constant = o & IS_CONSTANT;
        register_width w = is_constant ? k.constants[n].width : k.registers[n].width;
        return (is_constant ? constants[n] | IS_CONSTANT : registers[n]) |
               (w == WIDTH_64 ? IS_WIDE : 0) | (o & IS_NEGATED);
    }
};

/* Lists the operands that are checked at run time, while they are register numbers. */
static void track(ptx_kernel &k, const bits &undefined, const std::vector<operand> &masks) {
    for (size_t pc = 0; pc < k.code.size(); pc++) {
        tracked_use t;
        instruction &i = k.code[pc];
        for_uses(k, i, [&](uint32_t r, uint32_t position) {
            if (undefined.get(r)) t.uses.push_back({position, r, masks[r]});
        });
        for_definitions(k, i, [&](uint32_t r, uint32_t position) {
            if (undefined.get(r)) t.defs.push_back({position, r, masks[r]});
        });
        if (t.uses.empty() && t.defs.empty()) continue;
        i.flags |= TRACKED;
        k.tracked[(int)pc] = std::move(t);
    }
}

/* Branches may lead to the end of the code. */
static void end_with_exit(ptx_kernel &k) {
    instruction i = {};
    i.form = find_form("ret");
    i.control = RETURN;
    i.counter = i.form->counter;
    i.guard = NO_OPERAND;
    i.first = (uint32_t)k.operands.size();
    i.line = k.code.empty() ? 0 : k.code.back().line;
    k.code.push_back(i);
}

/* nvcc widens a value by mov.b64 d, {value, undefined} and uses only the lower half of d
   afterwards. There, the value replaces the undefined half, so that it isn't reported. */
static void drop_unused_halves(ptx_kernel &k) {
    static const form *narrow = find_form("cvt.u32.u64"), *pack = find_form("mov.b64.pack2");
    bits whole(k.registers.size());     /* registers of which both halves are used */
    for (const instruction &i : k.code)
        for_uses(k, i, [&](uint32_t r, uint32_t) {
            if (i.form != narrow) whole.set(r);
        });
    for (const instruction &i : k.code) {
        operand *o = k.operands.data() + i.first;
        if (i.form == pack && !whole.get(o[0])) o[2] = o[1];
    }
}

/* Assigns the rows of registers and of the masks of tracked ones. */
static void place_registers(ptx_kernel &k, const graph &g, rewriter &rewrite) {
    liveness live = find_liveness(k, g);
    for (uint32_t r = 0; r < k.registers.size(); r++) {
        if (k.registers[r].special == SPECIALS) continue;
        live.intervals[r].include(0);
        live.intervals[r].include((int)k.code.size());
    }
    uint32_t counts[3] = {};
    std::vector<uint32_t> rows = assign_rows(k, live.intervals, counts);

    bits undefined = find_undefined(k, g);
    std::vector<operand> masks(k.registers.size(), NO_OPERAND);
    undefined.for_each([&](size_t r) {
        masks[r] = counts[WIDTH_PRED]++;
        k.tracked_rows.push_back(masks[r]);
    });
    track(k, undefined, masks);

    uint32_t narrow = (counts[WIDTH_PRED] + 63) / 64 * 64;
    uint32_t wide = (narrow + counts[WIDTH_32] * 32 + 63) / 64 * 64;
    const uint32_t starts[] = {0, narrow, wide};
    k.row_words = wide + counts[WIDTH_64] * 64;
    rewrite.registers.resize(rows.size());
    for (uint32_t r = 0; r < rows.size(); r++) {
        register_width w = k.registers[r].width;
        rewrite.registers[r] = starts[w] + rows[r] * words_of(w);
    }
    for (uint32_t r = 0; r < rows.size(); r++) {
        uint8_t special = k.registers[r].special;
        if (special != SPECIALS) k.specials.push_back({special, rewrite(r)});
    }
    live.in[0].for_each([&](size_t r) {
        const register_info &info = k.registers[r];
        if (info.special != SPECIALS) return;
        k.entry_rows.push_back({rewrite.registers[r], words_of(info.width)});
    });
}

void prepare(ptx_kernel &k) {
    if (k.prepared) return;
    end_with_exit(k);
    drop_unused_halves(k);
    find_variables(k);
    graph g = make_graph(k);
    find_reconvergence(k, g);
    rewriter rewrite = {k, {}, {}};
    rewrite.constants = place_constants(k);
    place_registers(k, g, rewrite);

    for (instruction &i : k.code) {
        for_operands(*i.form, [&](uint32_t position, char) {
            operand &o = k.operands[i.first + position];
            o = rewrite(o);
        });
        i.guard = rewrite(i.guard);
        i.o = k.operands.data() + i.first;
        i.pc = (uint32_t)(&i - k.code.data());
    }
    k.prepared = true;
}

} // namespace ptx
