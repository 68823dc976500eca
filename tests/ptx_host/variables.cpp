/* variables.cpp - finds the shared variable from which an address is computed, by data
   flow: moves, sums with numbers, conversions. access.cpp checks that such an address is
   within the variable. If definitions of a register derive from several variables, or
   from operations that are not followed, its accesses are only checked against shared
   memory as a whole. */
#include "module.h"

namespace ptx {

/* What a register may hold: the number of a variable from whose address it is computed,
   or one of these. */
const uint32_t UNDEFINED = 0;           /* no definition has been seen yet */
const uint32_t NUMBER = 0xfffffffeu;    /* computed from no address */
const uint32_t MIXED = 0xffffffffu;     /* anything else */

static bool is_address(uint32_t a) { return a != UNDEFINED && a != NUMBER && a != MIXED; }

static uint32_t joined(uint32_t a, uint32_t b) {
    if (a == UNDEFINED || b == UNDEFINED) return a | b;
    return a == b ? a : MIXED;
}

/* Of any operation: an address becomes something that is not followed. */
static uint32_t computed(uint32_t a, uint32_t b) {
    if (a == UNDEFINED || b == UNDEFINED) return UNDEFINED;
    return a == NUMBER && b == NUMBER ? NUMBER : MIXED;
}

static uint32_t sum(uint32_t a, uint32_t b) {
    if (is_address(a) && b == NUMBER) return a;
    return is_address(b) && a == NUMBER ? b : computed(a, b);
}

enum rule : uint8_t { ANY, COPY, SUM, DIFFERENCE, PRODUCT_SUM, CHOICE };

static rule rule_of(const form &f) {
    const std::string &t = f.text;
    const std::string name = t.substr(0, t.find('.'));
    bool whole = type_size(f.to) >= 4 && !is_float(f.to);
    if (name == "cvta" || (name == "mov" && f.copies)) return COPY;
    if (name == "cvt" && whole && type_size(f.from) >= 4 && !is_float(f.from)) return COPY;
    if (name == "add" && whole) return SUM;
    if (name == "sub" && whole) return DIFFERENCE;
    if (name == "selp") return CHOICE;
    return name == "mad" && t.find(".hi") == std::string::npos ? PRODUCT_SUM : ANY;
}

/* What an instruction writes to its destinations. get(n): what operand n holds. */
template <class F> static uint32_t result_of(const instruction &i, rule r, F get) {
    switch (r) {
    case COPY: return get(1);
    case SUM: return sum(get(1), get(2));
    case DIFFERENCE: return get(2) == NUMBER ? get(1) : computed(get(1), get(2));
    case PRODUCT_SUM: return sum(computed(get(1), get(2)), get(3));
    case CHOICE: return joined(get(1), get(2));
    case ANY: break;
    }
    uint32_t result = NUMBER;
    for_operands(*i.form, [&](uint32_t position, char kind) {
        bool value = kind == 'x' || kind == 'h' || kind == 'w' || kind == 'l';
        if (value) result = computed(result, get(position));
    });
    return result;
}

void find_variables(body &b) {
    if (b.shared.empty()) return;
    std::vector<uint32_t> holds(b.registers.size(), UNDEFINED);
    for (size_t r = 0; r < holds.size(); r++)
        if (b.registers[r].special != SPECIALS) holds[r] = NUMBER;
    auto held = [&](operand o) {
        if (o == NO_OPERAND) return NUMBER;
        if (!(o & IS_CONSTANT)) return holds[o & ROW_MASK];
        uint32_t number = b.constants[o & ROW_MASK].variable;
        return number ? number : NUMBER;
    };

    std::vector<rule> rules;
    for (const instruction &i : b.code) rules.push_back(rule_of(*i.form));
    for (bool changed = true; changed;) {
        changed = false;
        for (size_t pc = 0; pc < b.code.size(); pc++) {
            const instruction &i = b.code[pc];
            const operand *o = b.operands.data() + i.first;
            uint32_t result = result_of(i, rules[pc], [&](uint32_t n) { return held(o[n]); });
            for_operands(*i.form, [&](uint32_t n, char kind) {
                if (!is_destination(kind) || o[n] == NO_OPERAND) return;
                uint32_t &now = holds[o[n] & ROW_MASK], next = joined(now, result);
                changed |= next != now;
                now = next;
            });
        }
    }
    for (instruction &i : b.code) {
        bool first = true;              /* the second address of cp.async is global */
        for_operands(*i.form, [&](uint32_t n, char kind) {
            if (kind != 'm' || !first) return;
            uint32_t base = held(b.operands[i.first + n]);
            i.variable = is_address(base) ? base : 0;
            first = false;
        });
    }
}

} // namespace ptx
