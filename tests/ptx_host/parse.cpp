/* parse.cpp - reads PTX text into a module. An instruction is decoded as soon as its
   opcode is known; its operands are then parsed by the description in its form. */
#include "lexer.h"
#include "memory.h"
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

namespace ptx {

// >>symbols

struct variable {
    std::string name;
    ptx::space space;
    uint64_t address;
    constant_kind kind;
    uint32_t bytes, align;      /* of module-level shared variables */
};

/* A label that is not known yet, and where its number belongs. */
struct fixup {
    word label;
    unsigned line;
    int instruction, table, entry;  /* table -1: the instruction's target */
};

struct parser : lexer {
    ptx_module *module;
    std::vector<variable> globals;
    std::unordered_map<std::string, std::unique_ptr<body>> functions;
    std::unordered_map<word, const form *> forms;

    /* The body that is being parsed. */
    body *b;
    bool is_function;
    std::vector<variable> locals;
    std::vector<uint32_t> scopes;               /* counts of names at each '{' */
    std::vector<std::pair<uint32_t, uint32_t>> visible;     /* index of name, its count */
    std::unordered_map<word, int> labels;
    std::vector<fixup> fixups;
    std::unordered_map<uint64_t, uint32_t> constants[3];    /* by width */
    std::unordered_map<std::string, uint32_t> specials;
    std::unordered_map<std::string, uint64_t> placed;       /* module-level shared */
    std::unordered_map<word, int> tables;
    uint32_t sinks[3];
    uint32_t used_bytes;

    void parse_module();
    void parse_file();
    void parse_target();
    void parse_module_variable(word directive);
    void parse_function(word directive);
    void parse_parameters();
    void parse_limits();
    void begin_body();
    void parse_body();
    void parse_directive();
    void parse_registers();
    void parse_local_variable(ptx::space s);
    void parse_location();
    void parse_pragma();
    void parse_instruction();
    void parse_call(instruction &i);
    void parse_operands(instruction &i, const form &f);
    bool source_is_wider(const form &f, operand o);
    void parse_operand(char kind, type t);
    void parse_address();
    void parse_target_label(instruction &i, char kind);
    void parse_label_or_instruction();
    void resolve_labels();
    const form *form_of(word opcode);
    std::string operand_suffix(word opcode);
    operand parse_register(char kind);
    bool find_register(word name, uint32_t *r);
    operand special(word name);
    operand constant_operand(uint64_t value, register_width width, constant_kind kind);
    operand sink(char kind);
    const variable *find_variable(word name);
    uint64_t place_shared(const variable &v);
    bool address_is_local();
    void check_width(operand o, char kind, word name);
};

static uint32_t align_up(uint32_t n, uint32_t align) { return (n + align - 1) / align * align; }

static type type_of(word name) {
    for (int t = PRED; t < TYPES; t++)
        if (name == type_name((type)t)) return (type)t;
    return NO_TYPE;
}

static register_width width_of(type t) {
    if (t == PRED) return WIDTH_PRED;
    return type_size(t) == 8 ? WIDTH_64 : WIDTH_32;
}

const variable *parser::find_variable(word name) {
    for (size_t i = locals.size(); i--;)
        if (locals[i].name == name) return &locals[i];
    for (const variable &v : globals)
        if (v.name == name) return &v;
    return nullptr;
}

/* Reserves a module-level shared variable in the block of the kernel that refers to it. */
uint64_t parser::place_shared(const variable &v) {
    auto found = placed.find(v.name);
    if (found != placed.end()) return found->second;
    if (v.kind == DYNAMIC_SHARED) {
        if (v.align > b->dynamic_align) b->dynamic_align = v.align;
        return placed[v.name] = 0;
    }
    b->shared_bytes = align_up(b->shared_bytes, v.align);
    uint64_t at_byte = b->shared_bytes;
    b->shared_bytes += v.bytes;
    return placed[v.name] = at_byte;
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
    int width = kind == 'P' ? WIDTH_PRED : kind == 'L' ? WIDTH_64 : WIDTH_32;
    if (sinks[width] == NO_OPERAND) {
        sinks[width] = (uint32_t)b->registers.size();
        b->names.push_back({"_", false, sinks[width]});
        b->registers.push_back({(register_width)width, SPECIALS, (uint32_t)b->names.size() - 1});
    }
    return sinks[width];
}

operand parser::constant_operand(uint64_t value, register_width width, constant_kind kind) {
    if (width == WIDTH_32) value &= 0xffffffffu;
    if (width == WIDTH_PRED) value = value ? 1 : 0;
    if (kind == PLAIN) {
        auto found = constants[width].find(value);
        if (found != constants[width].end()) return found->second | IS_CONSTANT;
        constants[width][value] = (uint32_t)b->constants.size();
    }
    b->constants.push_back({value, width, kind});
    return (uint32_t)(b->constants.size() - 1) | IS_CONSTANT;
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
    if (text == "_") return sink(kind);
    uint32_t r;
    if (!find_register(text, &r)) r = special(text);
    check_width(r, kind, text);
    return r;
}

/* A register, a number, or the address of a variable. */
void parser::parse_operand(char kind, type t) {
    bool negated = kind == 'p' && accept('!');
    char c = peek();
    if (kind == 'i') {
        b->operands.push_back((operand)integer());
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
    if (text == "WARP_SZ") {
        b->operands.push_back(constant_operand(32, WIDTH_32, PLAIN));
    } else if (text != "_" && c != '%' && !find_register(text, &r)) {
        const variable *v = find_variable(text);
        if (!v) fail("unknown name %.*s", (int)text.size(), text.data());
        uint64_t address = v->address;
        if (v->space == SHARED && v->bytes) address = place_shared(*v);
        if (v->kind == DYNAMIC_SHARED) address = place_shared(*v);
        if (accept('+')) address += (uint64_t)integer();
        register_width width = kind == 'l' ? WIDTH_64 : WIDTH_32;
        b->operands.push_back(constant_operand(address, width, v->kind));
    } else {
        at = start;
        b->operands.push_back(parse_register(kind) | (negated ? IS_NEGATED : 0));
    }
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
            const variable *v = find_variable(text);
            if (!v) fail("unknown name %.*s", (int)text.size(), text.data());
            uint64_t address = v->address;
            if (v->space == SHARED && (v->bytes || v->kind == DYNAMIC_SHARED))
                address = place_shared(*v);
            base = constant_operand(address, WIDTH_64, v->kind);
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
        if (*p == 'm') parse_address();
        else if (*p == 't' || *p == 'T') parse_target_label(i, *p);
        else if (is_destination(*p)) b->operands.push_back(parse_register(*p));
        else parse_operand(*p, f.from != NO_TYPE ? f.from : f.to);
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
   ".unpack4" for a mov with a vector, ".threads" for a bar.red with a thread count. */
std::string parser::operand_suffix(word opcode) {
    bool is_mov = opcode.substr(0, 4) == "mov.";
    bool is_reduction = opcode.find(".red.") != word::npos && opcode.substr(0, 3) == "bar";
    if (!is_mov && !is_reduction) return "";
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
    if (is_reduction) return commas == 3 ? ".threads" : "";
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
    if (!f) fail("instruction not implemented: %.*s", (int)opcode.size(), opcode.data());
    if (f->space == PARAM && address_is_local()) {
        std::string local(opcode);
        size_t dot = local.find(".param");
        size_t dot_end = local.find('.', dot + 1);
        local.replace(dot, dot_end - dot, ".local");
        f = find_form(local);
        if (!f) fail("instruction not implemented: %.*s", (int)opcode.size(), opcode.data());
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
            if (!v) fail("unknown parameter %.*s", (int)text.size(), text.data());
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


// >>directives of a body

/* .reg .b32 %r<100>; or .reg .pred p, q; */
void parser::parse_registers() {
    word text = dotted();
    type t = type_of(text.substr(1));
    if (t == NO_TYPE) fail("unknown type %.*s", (int)text.size(), text.data());
    do {
        register_name n;
        n.name = std::string(name());
        n.first = (uint32_t)b->registers.size();
        n.range = accept('<');
        uint32_t count = 1;
        if (n.range) {
            count = (uint32_t)integer();
            expect('>');
        }
        uint32_t index = (uint32_t)b->names.size();
        b->names.push_back(n);
        visible.push_back({index, count});
        b->registers.insert(b->registers.end(), count, {width_of(t), SPECIALS, index});
    } while (accept(','));
    expect(';');
}

/* .shared .align 16 .b8 name[64]; .local and .param likewise. */
void parser::parse_local_variable(ptx::space s) {
    uint32_t align = 0;
    word text = dotted();
    if (text == ".align") {
        align = (uint32_t)integer();
        text = dotted();
    }
    type t = type_of(text.substr(1));
    if (t == NO_TYPE) fail("unknown type %.*s", (int)text.size(), text.data());
    if (!align) align = (uint32_t)type_size(t);
    do {
        variable v = {};
        v.name = std::string(name());
        uint32_t bytes = (uint32_t)type_size(t);
        while (accept('[')) {
            bytes *= (uint32_t)integer();
            expect(']');
        }
        uint32_t &used = s == SHARED ? b->shared_bytes : b->local_bytes;
        used = align_up(used, align);
        v.space = s == SHARED ? SHARED : LOCAL;
        v.kind = s == SHARED ? PLAIN : LOCAL_OFFSET;
        v.address = used;
        used += bytes;
        locals.push_back(v);
    } while (accept(','));
    expect(';');
}

/* .loc file line column {, function_name label {+ number}, inlined_at file line column} */
void parser::parse_location() {
    location l = {};
    l.file = (int)integer();
    l.line = (int)integer();
    integer();
    while (accept(',')) {
        word text = name();
        if (text == "function_name") {
            dotted();
            if (accept('+')) integer();
        } else if (text == "inlined_at") {
            l.caller_file = (int)integer();
            l.caller_line = (int)integer();
            integer();
        } else {
            fail("unknown part of .loc: %.*s", (int)text.size(), text.data());
        }
    }
    b->locations.push_back(l);
}

/* used_bytes_mask names the bytes of the following load that the program uses. */
void parser::parse_pragma() {
    word text = string();
    unsigned mask;
    if (sscanf(std::string(text).c_str(), "used_bytes_mask %u", &mask) == 1) used_bytes = mask;
    expect(';');
}

void parser::parse_directive() {
    word text = dotted();
    if (text == ".reg") parse_registers();
    else if (text == ".shared") parse_local_variable(SHARED);
    else if (text == ".local" || text == ".param") parse_local_variable(LOCAL);
    else if (text == ".loc") parse_location();
    else if (text == ".pragma") parse_pragma();
    else fail("unknown directive %.*s", (int)text.size(), text.data());
}

void parser::parse_body() {
    size_t depth = 0;
    expect('{');
    do {
        char c = peek();
        if (c == '\0') fail("unexpected end of the text in %s", b->name.c_str());
        if (c == '{') {
            at++;
            depth++;
            scopes.push_back((uint32_t)visible.size());
            scopes.push_back((uint32_t)locals.size());
        } else if (c == '}') {
            at++;
            if (!depth--) break;
            locals.resize(scopes.back());
            scopes.pop_back();
            visible.resize(scopes.back());
            scopes.pop_back();
        } else if (c == ';') {
            at++;
        } else if (c == '.') {
            parse_directive();
        } else if (c == '@') {
            parse_instruction();
        } else {
            parse_label_or_instruction();
        }
    } while (true);
    resolve_labels();
}


// >>the module

void parser::begin_body() {
    b->locations.push_back({});
    locals.clear();
    scopes.clear();
    visible.clear();
    labels.clear();
    fixups.clear();
    specials.clear();
    placed.clear();
    tables.clear();
    for (auto &c : constants) c.clear();
    for (uint32_t &s : sinks) s = NO_OPERAND;
    used_bytes = 0xffffffffu;
}

/* A list of .param declarations in parentheses. Those of a kernel are in parameter
   memory; those of a function are named by their number. */
void parser::parse_parameters() {
    expect('(');
    while (!accept(')')) {
        word text = dotted();
        if (text != ".param") fail("expected .param, got %.*s", (int)text.size(), text.data());
        uint32_t align = 0, bytes = 0;
        for (text = dotted(); text[0] == '.'; text = peek() == '.' ? dotted() : name()) {
            type t = type_of(text.substr(1));
            if (text == ".align") align = (uint32_t)integer();
            else if (t != NO_TYPE) bytes = (uint32_t)type_size(t);
            else if (text != ".ptr" && text != ".global" && text != ".shared" && text != ".const")
                fail("unknown attribute %.*s", (int)text.size(), text.data());
            if (text == ".align" && bytes) align = bytes;   /* alignment of a pointer's target */
        }
        parameter p = {std::string(text), 0, bytes};
        if (!align) align = bytes;
        if (accept('[')) {
            p.size = bytes * (uint32_t)integer();
            expect(']');
        }
        p.offset = b->param_bytes = align_up(b->param_bytes, align);
        b->param_bytes += p.size;
        variable v = {};
        v.name = p.name;
        v.space = is_function ? LOCAL : PARAM;
        v.kind = is_function ? FORMAL : PLAIN;
        v.address = is_function ? b->params.size() : p.offset;
        locals.push_back(v);
        b->params.push_back(p);
        accept(',');
    }
}

/* .maxntid and similar directives between the parameters and the body. */
void parser::parse_limits() {
    while (peek() == '.') {
        word text = dotted();
        if (text == ".pragma") {
            string();
            expect(';');
            continue;
        }
        if (text == ".noreturn") continue;
        unsigned product = 1;
        do product *= (unsigned)integer();
        while (accept(','));
        if (text == ".maxntid" || text == ".reqntid") {
            b->max_threads = product;
            b->exact_threads = text == ".reqntid";
        } else if (text != ".minnctapersm" && text != ".maxnreg") {
            fail("unknown directive %.*s", (int)text.size(), text.data());
        }
    }
}

void parser::parse_function(word directive) {
    is_function = directive == ".func";
    std::unique_ptr<ptx_kernel> kernel(new ptx_kernel);
    b = kernel.get();
    begin_body();
    if (peek() == '(') parse_parameters();
    b->name = std::string(name());
    if (peek() == '(') parse_parameters();
    parse_limits();
    if (accept(';')) return;        /* a prototype */

    parse_body();
    if (is_function) {
        std::string function = b->name;
        functions[function] = std::unique_ptr<body>(new body(std::move(*b)));
        return;
    }
    kernel->module = module;
    module->by_name[b->name] = kernel.get();
    module->kernels.push_back(std::move(kernel));
}

/* .global .align 4 .b8 name[8] = {1, 2, 3}; */
void parser::parse_module_variable(word directive) {
    variable v = {};
    uint32_t align = 0;
    bool external = false;
    type t = NO_TYPE;
    while (peek() == '.') {
        word text = dotted();
        if (text == ".align") align = (uint32_t)integer();
        else if (type_of(text.substr(1)) != NO_TYPE) t = type_of(text.substr(1));
        else fail("unknown attribute %.*s", (int)text.size(), text.data());
    }
    if (t == NO_TYPE) fail("a variable without a type");
    v.name = std::string(name());
    v.space = directive == ".shared" ? SHARED : directive == ".const" ? CONST : GLOBAL;
    v.align = align ? align : (uint32_t)type_size(t);
    uint32_t elements = 1;
    while (accept('[')) {
        if (accept(']')) {
            external = true;
            break;
        }
        elements *= (uint32_t)integer();
        expect(']');
    }
    v.bytes = external ? 0 : elements * (uint32_t)type_size(t);
    v.kind = external && v.space == SHARED ? DYNAMIC_SHARED : PLAIN;

    std::vector<uint64_t> values;
    if (accept('=')) {
        int depth = 0;
        do {
            while (accept('{')) depth++;
            values.push_back(number(t));
            while (accept('}')) depth--;
        } while (accept(',') || depth > 0);
    }
    expect(';');
    if (v.space == SHARED) {
        globals.push_back(v);
        return;
    }

    if (!v.bytes) v.bytes = (uint32_t)(values.size() * type_size(t));
    std::unique_ptr<unsigned char[]> storage(new unsigned char[v.bytes + 256]());
    unsigned char *base = storage.get() + (256 - (uintptr_t)storage.get() % 256) % 256;
    for (size_t i = 0; i < values.size() && (i + 1) * type_size(t) <= v.bytes; i++)
        memcpy(base + i * type_size(t), &values[i], type_size(t));
    v.address = (uint64_t)(uintptr_t)base;
    ptx_memory_add(base, v.bytes);
    ptx_memory_written(base, v.bytes);
    module->variables.push_back(std::move(storage));
    globals.push_back(v);
}

void parser::parse_file() {
    int number = (int)integer();
    word path = string();
    size_t slash = path.rfind('/');
    module->files[number] = std::string(slash == word::npos ? path : path.substr(slash + 1));
    while (accept(',')) integer();
}

void parser::parse_target() {
    module->target = std::string(dotted());
    module->architecture = (unsigned)atoi(module->target.c_str() + 3);
    while (accept(',')) dotted();
}

void parser::parse_module() {
    while (peek()) {
        word text = dotted();
        if (text == ".version") { dotted(); }
        else if (text == ".target") parse_target();
        else if (text == ".address_size") integer();
        else if (text == ".file") parse_file();
        else if (text == ".visible" || text == ".extern" || text == ".weak") continue;
        else if (text == ".entry" || text == ".func") parse_function(text);
        else if (text == ".global" || text == ".const" || text == ".shared")
            parse_module_variable(text);
        else if (text == ".section") skip_past('}');
        else fail("unexpected %.*s", (int)text.size(), text.data());
    }
    for (auto &k : module->kernels) {
        std::string error = inline_calls(*k, functions, 0);
        if (!error.empty()) throw parse_error(error);
    }
}

} // namespace ptx


// >>the API

ptx_module *ptx_load(const char *text, size_t length, char *error, size_t error_size) {
    std::unique_ptr<ptx_module> m(new ptx_module);
    ptx::parser p = {};
    p.at = text;
    p.end = text + length;
    p.line = 1;
    p.module = m.get();
    try {
        p.parse_module();
    } catch (const ptx::parse_error &e) {
        if (error_size) snprintf(error, error_size, "%s", e.what());
        ptx_unload(m.release());
        return nullptr;
    }
    if (error_size) error[0] = '\0';
    return m.release();
}

void ptx_unload(ptx_module *m) {
    if (!m) return;
    for (auto &v : m->variables)
        ptx_memory_remove(v.get() + (256 - (uintptr_t)v.get() % 256) % 256);
    delete m;
}

const ptx_kernel *ptx_find(const ptx_module *m, const char *name) {
    auto found = m->by_name.find(name);
    return found == m->by_name.end() ? nullptr : found->second;
}

size_t ptx_kernel_count(const ptx_module *m) { return m->kernels.size(); }
const ptx_kernel *ptx_kernel_at(const ptx_module *m, size_t i) { return m->kernels[i].get(); }
const char *ptx_kernel_name(const ptx_kernel *k) { return k->name.c_str(); }
size_t ptx_param_count(const ptx_kernel *k) { return k->params.size(); }
size_t ptx_param_size(const ptx_kernel *k, size_t i) { return k->params[i].size; }
size_t ptx_static_shared(const ptx_kernel *k) { return k->shared_bytes; }
uint64_t ptx_launches(const ptx_kernel *k) { return k->launches; }
