/* faults.cpp - the list of faults, and their texts. */
#include "machine.h"
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

namespace ptx {

static std::vector<ptx_fault> &list() {
    static std::vector<ptx_fault> faults;
    return faults;
}

/* Returns a copy of a string that lives as long as the program. */
static const char *keep(const std::string &s) {
    static std::set<std::string> strings;
    return strings.insert(s).first->c_str();
}

static std::string file_name(const ptx_kernel &k, int file) {
    auto found = k.module->files.find(file);
    return found == k.module->files.end() ? "" : found->second;
}

std::string line_text(const ptx_kernel &k, size_t pc) {
    const instruction &i = k.code[pc];
    const location &l = k.locations[i.location];
    char text[200];
    int n = snprintf(text, sizeof text, "PTX line %u", i.line);
    if (l.line)
        snprintf(text + n, sizeof text - (size_t)n, " (%s:%d)", file_name(k, l.file).c_str(),
                 l.line);
    return text;
}

/* Shortens a long name in its middle: those of instances differ at their ends. */
static std::string short_name(const std::string &name) {
    const size_t END = 60;
    if (name.size() <= 2 * END) return name;
    return name.substr(0, END) + "..." + name.substr(name.size() - END);
}

/* "at line 12 (file.cu:34): ld.global.u32, thread 3 of block 0,0,0 of kernel" */
static std::string place_text(const machine &m, place p) {
    const ptx_kernel &k = *m.kernel;
    const location &l = k.locations[p.i->location];
    std::string where = "at " + line_text(k, p.i->pc);
    if (l.caller_line)
        where += ", inlined at " + file_name(k, l.caller_file) + ":" +
                 std::to_string(l.caller_line);
    where += ": " + p.i->form->text + ", thread " + std::to_string(p.thread) + " of block " +
             std::to_string(m.block[0]) + "," + std::to_string(m.block[1]) + "," +
             std::to_string(m.block[2]) + " of " + short_name(k.name);
    return where;
}

/* Records a fault unless the launch has had one of this kind at this instruction. */
static void record(machine &m, ptx_fault_kind kind, place p, const char *format, va_list args) {
    const ptx_kernel &k = *m.kernel;
    size_t pc = p.i ? p.i->pc : k.code.size();
    if (!m.reported.insert((uint64_t)pc << 8 | kind).second) return;

    ptx_fault f = {};
    f.kind = kind;
    f.kernel = keep(k.name);
    f.source = "";
    memcpy(f.block, m.block, sizeof f.block);
    f.thread = p.thread;
    std::string where;
    if (p.i) {
        const location &l = k.locations[p.i->location];
        f.ptx_line = (int)p.i->line;
        f.source_line = l.line;
        f.source = keep(file_name(k, l.file));
        where = "; " + place_text(m, p);
    }

    /* The place is complete, and the text before it is cut if both are too long. */
    char what[sizeof f.text];
    vsnprintf(what, sizeof what, format, args);
    size_t space = where.size() < sizeof f.text ? sizeof f.text - where.size() : 1;
    snprintf(f.text, sizeof f.text, "%.*s%s", (int)space - 1, what, where.c_str());
    list().push_back(f);
    m.faults++;
}

void fault(machine &m, ptx_fault_kind kind, place p, const char *format, ...) {
    va_list args;
    va_start(args, format);
    record(m, kind, p, format, args);
    va_end(args);
}

void fatal(machine &m, ptx_fault_kind kind, place p, const char *format, ...) {
    va_list args;
    va_start(args, format);
    record(m, kind, p, format, args);
    va_end(args);
    m.stop = true;
}

} // namespace ptx


// >>the API

size_t ptx_fault_count(void) { return ptx::list().size(); }
const ptx_fault *ptx_fault_at(size_t i) { return &ptx::list()[i]; }
void ptx_faults_clear(void) { ptx::list().clear(); }

const char *ptx_fault_name(ptx_fault_kind kind) {
    static const char *names[PTX_FAULT_KINDS] = {
        "shared race", "global race", "unwritten shared memory", "unwritten global memory",
        "unwritten register", "out of bounds", "misaligned", "diverged", "deadlock",
        "copy not awaited", "launch"};
    return kind < PTX_FAULT_KINDS ? names[kind] : "?";
}
