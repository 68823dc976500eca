/* parse_code.cpp - reads instructions. An instruction is decoded as soon as its opcode is
   known; its operands are then parsed by the description in its form. */
#include "parse.h"
#include <string.h>

namespace ptx {

// >>variables

const variable *parser::find_variable(word name) {
    for (size_t i = locals.size(); i--;)
        if (locals[i].name == name) return &locals[i];
    for (const variable &v : globals)
        if (v.name == name) return &v;
    return nullptr;
}

uint32_t parser::add_shared(const variable &v) {
    b->shared.push_back({v.name, (uint32_t)v.address, v.bytes, v.kind == DYNAMIC_SHARED});
    return (uint32_t)b->shared.size();
}

/* Reserves a module-level shared variable for the kernel that refers to it. Returns its
   number. */
uint32_t parser::place_shared(const variable &v) {
    if (v.number) return v.number;
    auto found = placed.find(v.name);
    if (found != placed.end()) return found->second;
    variable own = v;
    if (v.kind == DYNAMIC_SHARED) {
        if (v.align > b->dynamic_align) b->dynamic_align = v.align;
    } else {
        reserve_bytes(&b->shared_bytes, v.align, v.bytes, MAX_BYTES);
        own.address = b->shared_bytes - v.bytes;
    }
    return placed[v.name] = add_shared(own);
}


// >>registers and constants

/* %r12 belongs to the declaration .reg .b32 %r<100>. */
bool parser::find_register(word name, uint32_t *r) {
    size_t digits = name.size();
    while (digits > 1 && isdigit((unsigned char)name[digits - 1])) digits--;
    uint32_t number = 0;
    for (size_t i = digits; i < name.size(); i++) number = number * 10 + (uint32_t)(name[i] - '0');

    for (size_t i = visible.size(); i--;) {
        const register_name &n = b->names[visible[i].first];
        if (n.range) {
            bool match = digits < name.size() && n.name == name.substr(0, digits);
            if (!match || number >= visible[i].second) continue;
            *r = n.first + number;
            return true;
        }
        if (n.name != name) continue;
        *r = n.first;
        return true;
    }
    return false;
}

operand parser::special(word name) {
    static const char *names[SPECIALS] = {
        "%tid.x", "%tid.y", "%tid.z", "%ntid.x", "%ntid.y", "%ntid.z",
        "%ctaid.x", "%ctaid.y", "%ctaid.z", "%nctaid.x", "%nctaid.y", "%nctaid.z",
        "%laneid", "%warpid", "%nwarpid", "%lanemask_eq", "%lanemask_lt", "%lanemask_le",
        "%lanemask_gt", "%lanemask_ge", "%dynamic_smem_size", "%total_smem_size"};

    auto found = specials.find(std::string(name));
    if (found != specials.end()) return found->second;
    for (uint8_t s = 0; s < SPECIALS; s++) {
        if (name != names[s]) continue;
        uint32_t r = (uint32_t)b->registers.size();
        b->names.push_back({names[s], false, r});
        b->registers.push_back({WIDTH_32, s, (uint32_t)b->names.size() - 1});
        specials[names[s]] = r;
        return r;
    }
    fail("unknown register %.*s", (int)name.size(), name.data());
}

/* A destination that is not used: '_'. */
operand parser::sink(char kind) {
    int width = WIDTH_32;
    if (kind == 'P') width = WIDTH_PRED;
    if (kind == 'L') width = WIDTH_64;
    if (sinks[width] == NO_OPERAND) {
        sinks[width] = (uint32_t)b->registers.size();
        b->names.push_back({"_", false, sinks[width]});
        b->registers.push_back({(register_width)width, SPECIALS, (uint32_t)b->names.size() - 1});
    }
    return sinks[width];
}

operand parser::constant_operand(uint64_t value, register_width width, constant_kind kind,
                                 uint32_t variable) {
    if (width == WIDTH_32) value &= 0xffffffffu;
    if (width == WIDTH_PRED) value = value ? 1 : 0;
    if (kind == PLAIN && !variable) {
        auto found = constants[width].find(value);
        if (found != constants[width].end()) return found->second | IS_CONSTANT;
        constants[width][value] = (uint32_t)b->constants.size();
    }
    b->constants.push_back({value, width, kind, variable});
    return (uint32_t)(b->constants.size() - 1) | IS_CONSTANT;
}

/* The address of a variable, plus an offset. */
operand parser::address_of(word name, int64_t offset, register_width width) {
    const variable *v = find_variable(name);
    if (!v) fail("unknown name %.*s", (int)name.size(), name.data());
    if (v->kind == FORMAL && offset) fail("an offset from the address of a function's parameter");
    uint32_t number = v->space == SHARED ? place_shared(*v) : 0;
    uint64_t address = number ? b->shared[number - 1].start : v->address;
    return constant_operand(address + (uint64_t)offset, width, v->kind, number);
}


// >>operands

void parser::check_width(operand o, char kind, word name) {
    register_width have = b->registers[o].width;
    register_width want = WIDTH_32;
    if (kind == 'P' || kind == 'p') want = WIDTH_PRED;
    if (kind == 'L' || kind == 'l') want = WIDTH_64;
    bool any = kind == 'X' || kind == 'x';
    if (any ? have == WIDTH_PRED : have != want)
        fail("register %.*s has the wrong type for this operand", (int)name.size(), name.data());
}

operand parser::parse_register(char kind) {
    word text = dotted();
    bool writes = is_destination(kind);
    if (text == "_" && writes) return sink(kind);
    uint32_t r;
    if (!find_register(text, &r)) r = special(text);
    if (writes && b->registers[r].special != SPECIALS)
        fail("%.*s cannot be written", (int)text.size(), text.data());
    check_width(r, kind, text);
    return r;
}

/* A register, a number, or the address of a variable. */
void parser::parse_operand(char kind, type t, uint32_t integers) {
    bool negated = kind == 'p' && accept('!');
    char c = peek();
    if (kind == 'i') {
        uint64_t n = number(S64);
        if (integers && (n > 31 || !(integers >> n & 1)))
            fail("%lld is not valid for this operand", (long long)n);
        b->operands.push_back((operand)n);
        return;
    }
    bool is_register = c == '%' || c == '_' || isalpha((unsigned char)c) || c == '$';
    if (!is_register) {
        register_width width = WIDTH_32;
        if (kind == 'p') width = WIDTH_PRED;
        if (kind == 'l' || (kind == 'x' && type_size(t) == 8)) width = WIDTH_64;
        uint64_t value = number(t);
        if (kind == 'h') value &= 0xffff;
        if (kind == 'p' && negated) value = !value;
        b->operands.push_back(constant_operand(value, width, PLAIN));
        return;
    }

    const char *start = at;
    word text = dotted();
    uint32_t r;
    register_width width = kind == 'l' ? WIDTH_64 : WIDTH_32;
    bool is_name = c != '%' && !find_register(text, &r);
    if (!is_name) {
        at = start;
        b->operands.push_back(parse_register(kind) | (negated ? IS_NEGATED : 0));
        return;
    }
    if (kind == 'p' || kind == 'h')
        fail("%.*s has the wrong type for this operand", (int)text.size(), text.data());
    if (text == "WARP_SZ") b->operands.push_back(constant_operand(32, width, PLAIN));
    else b->operands.push_back(address_of(text, accept('+') ? integer() : 0, width));
}

/* [register], [register+number], [variable+number] or [number]. */
void parser::parse_address() {
    expect('[');
    char c = peek();
    operand base;
    if (isdigit((unsigned char)c) || c == '-') {
        base = constant_operand(number(U64), WIDTH_64, PLAIN);
    } else {
        word text = dotted();
        uint32_t r;
        if (find_register(text, &r)) {
            if (b->registers[r].width == WIDTH_PRED) fail("a predicate is not an address");
            base = r;
        } else {
            base = address_of(text, 0, WIDTH_64);
        }
    }
    int64_t offset = 0;
    if (accept('+')) offset = integer();
    else if (peek() == '-') offset = integer();
    expect(']');
    b->operands.push_back(base);
    b->operands.push_back((operand)(int32_t)offset);
}

void parser::parse_target_label(instruction &i, char kind) {
    word label = dotted();
    if (kind == 't') {
        fixups.push_back({label, line, (int)b->code.size(), -1, 0});
        return;
    }
    auto found = tables.find(label);
    if (found == tables.end()) fail("unknown table %.*s", (int)label.size(), label.data());
    i.target = found->second;
}

void parser::parse_operands(instruction &i, const form &f) {
    bool optional = false, first = true;
    for (const char *p = f.operands; *p; p++) {
        if (*p == '?') {
            optional = true;
            continue;
        }
        if (*p == '{' || *p == '}') {
            if (*p == '{' && !first) expect(',');
            expect(*p);
            first = *p == '{';
            continue;
        }
        if (*p == '|') {            /* an optional predicate */
            p++;
            b->operands.push_back(accept('|') ? parse_register(*p) : NO_OPERAND);
            continue;
        }
        if (optional && peek() == ';') {
            b->operands.push_back(NO_OPERAND);
            continue;
        }
        if (!first) expect(',');
        first = false;
        char kind = *p;             /* a value of 64 bits needs a register of 64 bits */
        if (kind == 'X' && type_size(f.to) == 8) kind = 'L';
        if (kind == 'x' && type_size(f.to) == 8 && f.counter == IN_MEMORY) kind = 'l';
        if (kind == 'm') parse_address();
        else if (kind == 't' || kind == 'T') parse_target_label(i, kind);
        else if (is_destination(kind)) b->operands.push_back(parse_register(kind));
        else parse_operand(kind, f.from != NO_TYPE ? f.from : f.to, f.integers);
    }
}


// >>instructions

const form *parser::form_of(word opcode) {
    auto found = forms.find(opcode);
    if (found != forms.end()) return found->second;
    const form *f = find_form(std::string(opcode));
    if (!f)
        fail("instruction not implemented: %.*s", (int)opcode.size(), opcode.data());
    forms[opcode] = f;
    return f;
}

/* Whether the address operand that follows names a parameter of a function or of a call,
   which is in local memory. */
bool parser::address_is_local() {
    const char *p = at;
    while (p < end && *p != '[' && *p != ';') p++;
    if (p == end || *p == ';') return false;
    p++;
    while (p < end && (*p == ' ' || *p == '\t')) p++;
    const char *start = p;
    while (p < end && is_name_character(*p)) p++;
    const variable *v = find_variable(word(start, (size_t)(p - start)));
    return v && v->space == LOCAL;
}

bool parser::source_is_wider(const form &f, operand o) {
    if (type_size(f.from) == 8 || o & IS_CONSTANT) return false;
    return b->registers[o].width == WIDTH_64;
}

/* The modifiers that this parser adds where operands decide about the form: ".pack2" or
   ".unpack4" for a mov with a vector, ".threads" for a barrier with a thread count, which
   is not implemented. */
std::string parser::operand_suffix(word opcode) {
    bool is_mov = opcode.substr(0, 4) == "mov.";
    bool is_barrier = opcode.substr(0, 3) == "bar";
    if (!is_mov && !is_barrier) return "";
    size_t commas = 0, inside = 0;
    bool vector = false, vector_first = false;
    int depth = 0;
    for (const char *p = at; p < end && *p != ';'; p++) {
        if (*p == '{') {
            vector = true;
            vector_first = commas == 0;
            depth++;
        } else if (*p == '}') {
            depth--;
        } else if (*p == ',') {
            if (depth) inside++;
            else commas++;
        }
    }
    bool counted = commas == (opcode.find(".red.") != word::npos ? 3 : 1);
    if (is_barrier) return counted ? ".threads" : "";
    if (!vector) return "";
    return (vector_first ? ".unpack" : ".pack") + std::to_string(inside + 1);
}

void parser::parse_instruction() {
    instruction i = {};
    i.first = (uint32_t)b->operands.size();
    i.guard = NO_OPERAND;
    i.target = -1;
    i.line = line;
    i.location = (uint32_t)b->locations.size() - 1;
    i.used_bytes = used_bytes;
    used_bytes = 0xffffffffu;

    if (accept('@')) {
        bool negated = accept('!');
        i.guard = parse_register('p') | (negated ? IS_NEGATED : 0);
        i.flags |= GUARDED;
    }
    i.line = (peek(), line);
    word opcode = dotted();
    std::string suffix = operand_suffix(opcode);
    const form *f = suffix.empty() ? form_of(opcode) : find_form(std::string(opcode) + suffix);
    if (!f)
        fail("instruction not implemented: %.*s%s", (int)opcode.size(), opcode.data(),
             suffix.c_str());
    if (f->space == PARAM && address_is_local()) {
        std::string local(opcode);
        size_t dot = local.find(".param");
        size_t dot_end = local.find('.', dot + 1);
        local.replace(dot, dot_end - dot, ".local");
        f = find_form(local);
        if (!f) fail("instruction not implemented: %.*s", (int)opcode.size(), opcode.data());
    } else if (f->space == PARAM && f->run && *f->operands == 'm') {
        fail("a store to the parameters of the kernel");
    }
    i.form = f;
    i.run = f->run;
    i.control = f->control;
    i.counter = f->counter;
    if (i.control == CALL) parse_call(i);
    else parse_operands(i, *f);
    if (f->counter == IN_CONVERSION && f->inner && source_is_wider(*f, b->operands.back()))
        i.run = f->inner;
    expect(';');
    b->code.push_back(i);
}

/* call (results), function, (arguments); */
void parser::parse_call(instruction &i) {
    call c;
    c.line = line;
    auto list = [&] {
        expect('(');
        while (!accept(')')) {
            word text = name();
            const variable *v = find_variable(text);
            if (!v || v->kind != LOCAL_OFFSET)
                fail("unknown parameter %.*s", (int)text.size(), text.data());
            c.actuals.push_back((uint32_t)v->address);
            accept(',');
        }
    };
    if (peek() == '(') {
        list();
        expect(',');
    }
    c.callee = std::string(name());
    if (accept(',')) list();
    i.target = (int)b->calls.size();
    b->calls.push_back(c);
}

/* "label:" or an instruction. */
void parser::parse_label_or_instruction() {
    const char *p = at;
    while (p < end && is_name_character(*p)) p++;
    const char *after = p;
    while (p < end && (*p == ' ' || *p == '\t')) p++;
    bool is_label = after > at && p < end && *p == ':' && !(p + 1 < end && p[1] == ':');
    if (!is_label) {
        parse_instruction();
        return;
    }
    word label(at, (size_t)(after - at));
    at = p + 1;
    if (peek() == '.') {
        const char *start = at;
        if (dotted() == ".branchtargets") {
            std::vector<int> table;
            do {
                word entry = dotted();
                fixups.push_back({entry, line, 0, (int)b->tables.size(), (int)table.size()});
                table.push_back(-1);
            } while (accept(','));
            expect(';');
            tables[label] = (int)b->tables.size();
            b->tables.push_back(table);
            return;
        }
        at = start;
    }
    if (!labels.emplace(label, (int)b->code.size()).second)
        fail("label %.*s is defined twice", (int)label.size(), label.data());
}

void parser::resolve_labels() {
    for (const fixup &f : fixups) {
        auto found = labels.find(f.label);
        if (found == labels.end()) {
            line = f.line;
            fail("unknown label %.*s", (int)f.label.size(), f.label.data());
        }
        if (f.table < 0) b->code[(size_t)f.instruction].target = found->second;
        else b->tables[(size_t)f.table][(size_t)f.entry] = found->second;
    }
}

} // namespace ptx
