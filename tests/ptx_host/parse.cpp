/* parse.cpp - reads PTX text into a module: kernels, functions, variables, directives. */
#include "parse.h"
#include "memory.h"
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

namespace ptx {

// >>types and sizes of variables

/* The type of a variable, which has bytes in memory. */
type parser::parse_type(word text) {
    type t = type_of(text.substr(1));
    if (!type_size(t)) fail("not a type of variables: %.*s", (int)text.size(), text.data());
    return t;
}

uint32_t parser::parse_alignment() {
    uint64_t n = number(U64);
    if (!n || n > MAX_ALIGN || n & (n - 1)) fail("not an alignment: %llu", (unsigned long long)n);
    return (uint32_t)n;
}

/* The rest of [elements]: the size of an array. */
uint32_t parser::parse_size(uint32_t bytes) {
    uint64_t n = number(U64);
    if (n > MAX_BYTES || n * bytes > MAX_BYTES) fail("an array of more than 256 MiB");
    expect(']');
    return (uint32_t)n * bytes;
}

/* Reserves bytes behind those that are used. They are then the last of the used ones. */
void parser::reserve_bytes(uint32_t *used, uint32_t align, uint32_t bytes, uint32_t limit) {
    uint32_t start = align_up(*used, align);
    if (start > limit || bytes > limit - start) fail("more than %u bytes", limit);
    *used = start + bytes;
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
            uint64_t all = number(U64);
            if (all > MAX_REGISTERS - b->registers.size()) fail("too many registers");
            count = (uint32_t)all;
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
        align = parse_alignment();
        text = dotted();
    }
    const uint32_t size = (uint32_t)type_size(parse_type(text));
    do {
        variable v = {};
        v.name = std::string(name());
        v.bytes = size;
        while (accept('[')) v.bytes = parse_size(v.bytes);
        uint32_t &used = s == SHARED ? b->shared_bytes : b->local_bytes;
        reserve_bytes(&used, align ? align : size, v.bytes,
                      s == SHARED ? (uint32_t)MAX_BYTES : (uint32_t)MAX_LOCAL_BYTES);
        v.space = s == SHARED ? SHARED : LOCAL;
        v.kind = s == SHARED ? PLAIN : LOCAL_OFFSET;
        v.address = used - v.bytes;
        if (s == SHARED) v.number = add_shared(v);
        locals.push_back(v);
    } while (accept(','));
    expect(';');
}

/* .loc file line column
   {, function_name label {+ number}, inlined_at file line column} */
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
            if (text == ".align") align = parse_alignment();
            else if (t != NO_TYPE) bytes = (uint32_t)type_size(t);
            else if (text != ".ptr" && text != ".global" && text != ".shared" && text != ".const")
                fail("unknown attribute %.*s", (int)text.size(), text.data());
            if (text == ".align" && bytes) align = bytes;   /* alignment of a pointer's target */
        }
        parameter p = {std::string(text), 0, bytes};
        if (!bytes) fail("parameter %s has no type", p.name.c_str());
        if (!align) align = bytes;
        if (accept('[')) p.size = parse_size(bytes);
        reserve_bytes(&b->param_bytes, align, p.size, MAX_PARAM_BYTES);
        p.offset = b->param_bytes - p.size;
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
        if (text == ".align") align = parse_alignment();
        else t = parse_type(text);
    }
    if (t == NO_TYPE) fail("a variable without a type");
    v.name = std::string(name());
    v.space = GLOBAL;
    if (directive == ".shared") v.space = SHARED;
    if (directive == ".const") v.space = CONST;
    v.align = align ? align : (uint32_t)type_size(t);
    v.bytes = (uint32_t)type_size(t);
    while (accept('[') && !external) {
        external = accept(']');
        v.bytes = external ? 0 : parse_size(v.bytes);
    }
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
    if (module->target.compare(0, 3, "sm_")) fail("unknown target %s", module->target.c_str());
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
        std::string error = inline_calls(*k, functions);
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
    } catch (const std::exception &e) {     /* parse_error, or no memory */
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
const char *ptx_target(const ptx_module *m) { return m->target.c_str(); }
const char *ptx_kernel_name(const ptx_kernel *k) { return k->name.c_str(); }
size_t ptx_param_count(const ptx_kernel *k) { return k->params.size(); }
size_t ptx_param_size(const ptx_kernel *k, size_t i) { return k->params[i].size; }
size_t ptx_static_shared(const ptx_kernel *k) { return k->shared_bytes; }
uint64_t ptx_launches(const ptx_kernel *k) { return k->launches; }
