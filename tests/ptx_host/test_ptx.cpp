/* test_ptx.cpp - tests of the PTX interpreter: the main program, the helpers that all
   parts use, and the tests of ptx_load.

     test_ptx                    runs all parts
     test_ptx PART ..            runs these parts
     test_ptx coverage FILE ..   runs all parts, then checks that each form of instruction
                                 in the PTX files was tested. Without files, the
                                 environment variable PTX_FILES names them. */
#include "test_ptx.h"
#include <algorithm>
#include <ctype.h>

long test_passed, test_failed;


// >>modules

std::string ptx_head(const std::string &globals) {
    return ".version 8.6\n.target sm_90\n.address_size 64\n\n" + globals + "\n";
}

std::string ptx_program(const std::string &body, const std::string &globals,
                        const std::string &directives) {
    return ptx_head(globals) +
        ".visible .entry k(\n"
        "    .param .u64 k_param_0,\n"
        "    .param .u64 k_param_1,\n"
        "    .param .u64 k_param_2,\n"
        "    .param .u32 k_param_3\n"
        ")\n" + directives + "\n"
        "{\n"
        "    .reg .pred %p<32>;\n"
        "    .reg .b16 %rs<64>;\n"
        "    .reg .b32 %r<128>;\n"
        "    .reg .b64 %rd<64>;\n"
        "    .reg .f32 %f<128>;\n"
        "    .reg .f64 %fd<64>;\n"
        "    ld.param.u64 %rd1, [k_param_0];\n"
        "    ld.param.u64 %rd2, [k_param_1];\n"
        "    ld.param.u64 %rd3, [k_param_2];\n"
        "    ld.param.u32 %r1, [k_param_3];\n"
        "    cvta.to.global.u64 %rd1, %rd1;\n"
        "    cvta.to.global.u64 %rd2, %rd2;\n"
        "    cvta.to.global.u64 %rd3, %rd3;\n"
        "    mov.u32 %r2, %tid.x;\n"
        "    and.b32 %r3, %r2, 31;\n"
        "    mov.u32 %r4, %ctaid.x;\n" + body + "\n"
        "    ret;\n"
        "}\n";
}

test_module::test_module(const std::string &text_) : text(text_) {
    char error[512] = "";
    module = ptx_load(text.c_str(), text.size(), error, sizeof error);
    CHECK(module, "a valid program does not load: %s\n%s", error, text.c_str());
    if (!module) return;
    kernel = ptx_find(module, "k");
    CHECK(kernel, "kernel k is not found in\n%s", text.c_str());
}

test_module::~test_module() {
    if (module) ptx_unload(module);
}

std::vector<int> marked_lines(const std::string &text) {
    std::vector<int> lines;
    int line = 1;
    for (size_t i = 0; i < text.size(); i++) {
        if (text.compare(i, 3, "//!") == 0) lines.push_back(line);
        if (text[i] == '\n') line++;
    }
    return lines;
}

std::string alternative(const std::string &text, bool first) {
    std::string out;
    size_t at = 0;
    for (;;) {
        size_t open = text.find("<<", at);
        if (open == std::string::npos) return out + text.substr(at);
        size_t middle = text.find("||", open), close = text.find(">>", open);
        out += text.substr(at, open - at);
        out += first ? text.substr(open + 2, middle - open - 2)
                     : text.substr(middle + 2, close - middle - 2);
        at = close + 2;
    }
}

std::string replaced(std::string text, const std::string &from, const std::string &to) {
    size_t at = 0;
    while ((at = text.find(from, at)) != std::string::npos) {
        text.replace(at, from.size(), to);
        at += to.size();
    }
    return text;
}


// >>memory and launches

static const size_t GUARD = 4096;

device_memory::device_memory(size_t bytes_, bool written) : bytes(bytes_) {
    size_t whole = (bytes + 2 * GUARD + 4095) / 4096 * 4096;
    base = (unsigned char *)aligned_alloc(4096, whole);
    if (!base) abort();
    memset(base, 0xcd, whole);
    data = base + GUARD;
    ptx_memory_add(data, bytes);
    if (written) ptx_memory_written(data, bytes);
}

device_memory::~device_memory() {
    ptx_memory_remove(data);
    free(base);
}

void device_memory::fill(unsigned char byte) {
    memset(data, byte, bytes);
    ptx_memory_written(data, bytes);
}

test_memory::test_memory(size_t extra_bytes) : extra(extra_bytes) {
    for (size_t i = 0; i < BYTES / 4; i++)
        in.as<uint32_t>()[i] = (uint32_t)(i * 2654435761u + 12345);
    for (size_t i = 0; i < extra_bytes / 4; i++)
        extra.as<uint32_t>()[i] = (uint32_t)(i * 2246822519u + 54321);
}

size_t test_memory::run(const test_module &m, const launch_shape &s) {
    const void *a = out.data, *b = in.data, *c = extra.data;
    const void *params[] = {&a, &b, &c, &n};
    if (!m.kernel) return 0;
    ptx_launch l = {m.kernel, {s.grid, 1, 1}, {s.block, 1, 1}, s.shared, params, s.order, s.seed};
    return ptx_run(&l);
}

void print_faults(const char *what) {
    for (size_t i = 0; i < ptx_fault_count() && i < 5; i++) {
        const ptx_fault *f = ptx_fault_at(i);
        printf("  %s: %s, PTX line %d, block %u, thread %u: %s\n", what, ptx_fault_name(f->kind),
               f->ptx_line, f->block[0], f->thread, f->text);
    }
    ptx_faults_clear();
}

void runs_clean(const char *what, const std::string &text, launch_shape s, test_memory &memory,
                const std::function<void()> &check) {
    static const ptx_order orders[] = {PTX_ASCENDING, PTX_DESCENDING, PTX_RANDOM, PTX_RANDOM};
    test_module m(text);
    if (!m.kernel) return;
    for (size_t i = 0; i < 4; i++) {
        s.order = orders[i];
        s.seed = 11 * i + 1;
        memset(memory.out.data, 0xee, memory.out.bytes);
        ptx_memory_unwritten(memory.out.data, memory.out.bytes);
        ptx_faults_clear();
        size_t faults = memory.run(m, s);
        CHECK(faults == 0 && ptx_fault_count() == 0, "%s, order %zu: %zu faults", what, i, faults);
        print_faults(what);
        check();
    }
}

template <class T> static bool contains(const std::vector<T> &list, T x) {
    return std::find(list.begin(), list.end(), x) != list.end();
}

/* Checks the faults that one launch reported. */
static void check_faults(const faulty &f, size_t order, size_t returned,
                         const std::vector<int> &lines) {
    CHECK(ptx_fault_count() > 0, "%s, order %zu: no fault", f.what, order);
    CHECK(returned == ptx_fault_count(), "%s: returned %zu, recorded %zu", f.what, returned,
          ptx_fault_count());
    for (size_t i = 0; i < ptx_fault_count() && i < 8; i++) {
        const ptx_fault *x = ptx_fault_at(i);
        CHECK(contains(f.kinds, x->kind), "%s, order %zu: expected %s, got %s: %s", f.what, order,
              ptx_fault_name(f.kinds[0]), ptx_fault_name(x->kind), x->text);
        CHECK(lines.empty() || contains(lines, x->ptx_line),
              "%s, order %zu: expected line %d, got %d: %s", f.what, order, lines[0], x->ptx_line,
              x->text);
        CHECK(f.threads.empty() || contains(f.threads, x->thread),
              "%s, order %zu: expected thread %u, got %u: %s", f.what, order, f.threads[0],
              x->thread, x->text);
        CHECK(f.blocks.empty() || contains(f.blocks, x->block[0]),
              "%s, order %zu: expected block %u, got %u: %s", f.what, order, f.blocks[0],
              x->block[0], x->text);
        CHECK(x->kernel && !strcmp(x->kernel, "k"), "%s: kernel", f.what);
        CHECK(x->source && x->text[0] && memchr(x->text, 0, sizeof x->text),
              "%s: text of the fault", f.what);
    }
}

void reports(const faulty &f) {
    static const ptx_order orders[] = {PTX_ASCENDING, PTX_DESCENDING, PTX_RANDOM, PTX_RANDOM};
    for (bool bad : {true, false}) {
        std::string text = ptx_program(alternative(f.body, bad), f.globals, f.directives);
        if (f.optional) {
            char error[512] = "";
            ptx_module *p = ptx_load(text.c_str(), text.size(), error, sizeof error);
            CHECK(p || error[0], "%s: %s", f.what, error);
            if (!p) continue;
            ptx_unload(p);
        }
        test_module m(text);
        if (!m.kernel) return;
        for (size_t i = 0; i < 4; i++) {
            test_memory memory(f.extra_bytes);
            launch_shape s = f.shape;
            s.order = orders[i];
            s.seed = 7 * i + 3;
            if (f.prepare) f.prepare(memory);
            ptx_faults_clear();
            size_t returned = memory.run(m, s);
            if (bad) {
                check_faults(f, i, returned, marked_lines(text));
                ptx_faults_clear();
            } else {
                CHECK(returned == 0 && ptx_fault_count() == 0, "%s, twin, order %zu: %zu faults",
                      f.what, i, returned);
                print_faults(f.what);
            }
        }
    }
}

const char SHARED_4096[] = ".shared .align 16 .b8 sh[4096];";

const char PLACES[] =
    "    mul.wide.u32 %rd20, %r2, 4;\n"
    "    add.s64 %rd21, %rd2, %rd20;\n"
    "    add.s64 %rd22, %rd3, %rd20;\n"
    "    add.s64 %rd20, %rd1, %rd20;\n"
    "    mov.u32 %r20, sh;\n"
    "    shl.b32 %r21, %r2, 2;\n"
    "    add.s32 %r20, %r20, %r21;\n";


// >>broken text: ptx_load reports an error or returns a module that can be prepared

/* Loads a text and prepares its kernels, by launches without threads. */
static void survives(const std::string &text) {
    char error[512] = "";
    ptx_module *m = ptx_load(text.c_str(), text.size(), error, sizeof error);
    CHECK(!m == (error[0] != 0), "a module or a message, not both:\n%s", text.c_str());
    if (!m) return;
    for (size_t i = 0; i < ptx_kernel_count(m); i++) {
        const uint64_t zeros[4096] = {};
        std::vector<const void *> params(ptx_param_count(ptx_kernel_at(m, i)), zeros);
        ptx_launch l = {ptx_kernel_at(m, i), {1, 1, 1}, {0, 1, 1}, 0, params.data(),
                        PTX_ASCENDING, 0};
        CHECK(ptx_run(&l) == 1, "a launch without threads");
    }
    ptx_faults_clear();
    ptx_unload(m);
}

/* Changes at random places: bytes, and pieces of the text that replace others. */
static void survives_changes(const std::string &whole, int count) {
    static const char bytes[] = "\0\n .,;:@%_-+0129azXf<>()[]{}|!\"/*\xff";
    uint64_t state = 1;
    auto draw = [&](size_t n) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        return (size_t)(state >> 33) % n;
    };
    for (int i = 0; i < count; i++) {
        std::string text = whole;
        for (size_t k = 1 + draw(3); k--;) {
            size_t at = draw(text.size()), length = 1 + draw(12), from = draw(whole.size());
            if (i % 2) text.replace(at, draw(length), whole.substr(from, length));
            else text[at] = bytes[draw(sizeof bytes - 1)];
        }
        survives(text);
        if (i % 8 == 0) survives(text.substr(0, draw(text.size())));
    }
}


// >>forms

static std::set<std::string> tested_forms;

/* Splits the text into statements, without comments, directives and labels. */
static std::vector<std::string> statements(const std::string &text) {
    std::vector<std::string> out;
    std::string s;
    int braces = 0;
    for (size_t i = 0; i < text.size(); i++) {
        char c = text[i];
        if (c == '/' && text.compare(i, 2, "//") == 0) {
            while (i < text.size() && text[i] != '\n') i++;
            if (s.compare(0, 1, ".") == 0 && braces == 0) s.clear(); /* .loc, .file */
            continue;
        }
        if (c == '\n' && (s.compare(0, 4, ".loc") == 0 || s.compare(0, 5, ".file") == 0
                          || s.compare(0, 2, ".b") == 0)) {
            s.clear();
            continue;
        }
        if (c == '{' && s.find_first_not_of(" \t\n") == std::string::npos) continue;
        if (c == '{' && s.compare(0, 1, ".") == 0) { /* the body of a kernel begins */
            s.clear();
            continue;
        }
        if (c == '{') braces++;
        if (c == '}') {
            if (braces == 0) {
                s.clear();
                continue;
            }
            braces--;
        }
        if (c == ':' && s.compare(0, 1, "$") == 0) {
            s.clear();
            continue;
        }
        if (c == ';') {
            if (s.size() && s[0] != '.' && s[0] != '(') out.push_back(s);
            s.clear();
            continue;
        }
        if (isspace((unsigned char)c)) {
            if (s.size() && s.back() != ' ') s += ' ';
            continue;
        }
        s += c;
    }
    return out;
}

/* The kind of one operand: the class of a register (%r, %rd, ..), a special register as
   it is, "M" for memory, "I" for a number, "V" for the name of a variable. */
static std::string operand_kind(const std::string &o) {
    if (o.empty()) return "";
    if (o == "tmp") return "%r"; /* nvcc's name for the unused half of a double */
    if (o[0] == '[') return "M";
    if (o[0] == '%') {
        size_t n = o.size();
        while (n > 1 && isdigit((unsigned char)o[n - 1])) n--;
        std::string name = o.substr(0, n);
        if (name == "%SP" || name == "%SPL") return "%rd";
        if (name == "%temp") return "%r";
        return name;
    }
    if (isdigit((unsigned char)o[0]) || o[0] == '-') return "I";
    return "V";
}

static std::string form_of(const std::string &statement) {
    std::string s = statement, form, operand;
    if (s[0] == '@') s = s.substr(s.find(' ') + 1);
    size_t space = s.find(' ');
    if (space == std::string::npos) return s;
    form = s.substr(0, space) + ' ';
    if (form.compare(0, 3, "bra") == 0 || form.compare(0, 4, "call") == 0)
        return s.substr(0, space);
    for (char c : s.substr(space + 1) + ",") {
        if (c == ' ') continue;
        if (c != ',' && c != '{' && c != '}' && c != '|') {
            operand += c;
            continue;
        }
        form += operand_kind(operand);
        operand.clear();
        form += c;
    }
    form.pop_back();
    return form;
}

std::set<std::string> forms_of(const std::string &text) {
    std::set<std::string> forms;
    for (const std::string &s : statements(text)) forms.insert(form_of(s));
    return forms;
}

void record_forms(const std::string &text) {
    for (const std::string &form : forms_of(text)) tested_forms.insert(form);
}

/* A number in an instruction stands for any register, because forms with numbers are
   tested once per class of operands, not for each instruction. */
static bool form_matches(const std::string &form, const std::string &tested) {
    size_t i = 0, k = 0;
    while (i < form.size() && k < tested.size()) {
        bool number = i > 0 && strchr(" ,{|", form[i - 1]) && form[i] == 'I'
                      && (i + 1 == form.size() || strchr(",}|", form[i + 1]));
        if (number) {
            i++;
            while (k < tested.size() && !strchr(",}|", tested[k])) k++;
        } else if (form[i++] != tested[k++])
            return false;
    }
    return i == form.size() && k == tested.size();
}

bool form_is_covered(const std::string &form) {
    for (const std::string &tested : tested_forms)
        if (form_matches(form, tested)) return true;
    return false;
}

static std::string file_text(const char *path) {
    std::string text;
    char part[65536];
    size_t n;
    FILE *f = fopen(path, "rb");
    CHECK(f, "cannot open %s", path);
    if (!f) return text;
    while ((n = fread(part, 1, sizeof part, f)) > 0) text.append(part, n);
    fclose(f);
    return text;
}

/* Checks that each form in the file was tested. */
static void covers(const char *path) {
    size_t kernels = 0, at = 0;
    std::string text = file_text(path);
    while ((at = text.find(".entry", at)) != std::string::npos) {
        kernels++;
        at++;
    }
    CHECK(kernels > 0, "%s contains no kernel", path);
    /* The first kernels of the file, broken. */
    size_t end = text.rfind("\n}\n", 150000);
    if (end != std::string::npos) survives_changes(text.substr(0, end + 3), 200);
    /* Debug information follows the kernels and contains no instructions. */
    size_t debug = text.find("\n\t.section");
    if (debug != std::string::npos) text.resize(debug);
    std::set<std::string> forms = forms_of(text);
    CHECK(forms.size() > 10, "%s: only %zu forms", path, forms.size());
    std::string missing;
    for (const std::string &form : forms)
        if (!form_is_covered(form)) missing += "\n  " + form;
    if (missing.size()) printf("%s: no test covers:%s\n", path, missing.c_str());
    CHECK(missing.empty(), "%s contains forms without a test", path);
}

static void test_forms(void) {
    std::set<std::string> f = forms_of(
        "{\n .reg .b32 %r<3>; // x\n .loc 1 2 3\n$L_1:\n @%p1 add.s32 %r1, %r2, -5;\n"
        "{ cvt.f32.bf16 %f1, %rs2;}\n mov.u32 %r1, %tid.x;\n mov.b64 {%temp, %r2}, %fd3;\n"
        " shfl.sync.bfly.b32 %r1|%p2, %r3, 1, 31, %r9;\n bra.uni $L_1;\n ret;\n"
        " st.global.v2.u32 [%rd1+4], {%r1, %r2};\n}\n");
    static const char *const expected[] = {
        "add.s32 %r,%r,I", "cvt.f32.bf16 %f,%rs", "mov.u32 %r,%tid.x", "mov.b64 {%r,%r},%fd",
        "shfl.sync.bfly.b32 %r|%p,%r,I,I,%r", "bra.uni", "ret", "st.global.v2.u32 M,{%r,%r}"};
    for (const char *e : expected) CHECK(f.count(e) == 1, "form %s", e);
    CHECK(f.size() == 8, "%zu forms", f.size());
    CHECK(form_matches("add.s32 %r,%r,I", "add.s32 %r,%r,%r"), "a number matches a register");
    CHECK(!form_matches("add.s32 %r,%r,%rd", "add.s32 %r,%r,%r"), "another class");
    CHECK(!form_matches("add.s32 %r,%r,%r", "add.s32 %r,%r,%rd"), "another class");
    CHECK(!form_matches("add.s32 %r,%r", "add.s32 %r,%r,%r"), "one operand less");
    CHECK(!form_matches("add.s32 %r,%r,%r", "add.u32 %r,%r,%r"), "another type");
    CHECK(!form_is_covered("frob.s32 %r,%r"), "an unknown instruction is not covered");
}


// >>loading

/* A text that must not load. The message must contain all the words and the number of the
   line that is marked with "//!". */
static void rejected(const char *what, const std::string &text,
                     std::initializer_list<const char *> words) {
    char error[512] = "", line[32] = "";
    std::vector<int> lines = marked_lines(text);
    ptx_module *m = ptx_load(text.c_str(), text.size(), error, sizeof error);
    CHECK(!m, "%s: loads", what);
    if (m) {
        ptx_unload(m);
        return;
    }
    CHECK(error[0], "%s: no message", what);
    CHECK(memchr(error, 0, sizeof error) != nullptr, "%s: message is not terminated", what);
    if (lines.size() == 1) {
        snprintf(line, sizeof line, "%d", lines[0]);
        CHECK(strstr(error, line), "%s: expected line %s in: %s", what, line, error);
    }
    for (const char *w : words) CHECK(strstr(error, w), "%s: expected %s in: %s", what, w, error);
}

static void test_load_errors(void) {
    struct row {
        const char *what, *body;
        std::initializer_list<const char *> words;
    };
    static const row rows[] = {
        {"an unknown opcode", "frobnicate.s32 %r10, %r2; //!", {"frobnicate.s32"}},
        {"an unknown modifier", "add.wobbly.s32 %r10, %r2, 1; //!", {"add.wobbly.s32"}},
        {"an instruction that is not implemented",
         "tex.1d.v4.f32.s32 {%f1, %f2, %f3, %f4}, [tex_a, {%r2}]; //!", {"tex.1d.v4.f32.s32"}},
        {"a type that add does not have", "add.b32 %r10, %r2, 1; //!", {"add.b32"}},
        {"another mma shape",
         "mma.sync.aligned.m5n5k5.row.col.f32.bf16.bf16.f32 {%f1, %f2, %f3, %f4}, "
         "{%r1, %r2, %r3, %r4}, {%r1, %r2}, {%f1, %f2, %f3, %f4}; //!", {"m5n5k5"}},
        {"an undefined register", "add.s32 %r10, %r999, 1; //!", {"%r999"}},
        {"an undefined destination", "mov.u32 %nosuch, 1; //!", {"%nosuch"}},
        {"an undefined guard", "@%p99 bra $L_end; //!\n$L_end:", {"%p99"}},
        {"an undefined label", "bra $L_nowhere; //!", {"$L_nowhere"}},
        {"an undefined variable", "ld.shared.u32 %r10, [nosuch]; //!", {"nosuch"}},
        {"an undefined parameter", "ld.param.u32 %r10, [k_param_9]; //!", {"k_param_9"}},
        {"too few operands", "add.s32 %r10, %r2; //!", {}},
        {"too many operands", "add.s32 %r10, %r2, %r3, %r4; //!", {}},
        {"an unclosed bracket", "ld.global.u32 %r10, [%rd2; //!", {}},
        {"an unclosed brace", "st.global.v2.u32 [%rd1], {%r1, %r2; //!", {}},
        {"a wrong element count", "st.global.v4.u32 [%rd1], {%r1, %r2}; //!", {}},
        {"no comma", "add.s32 %r10 %r2, 1; //!", {}},
        {"arrival at a barrier without waiting", "bar.arrive 0, 64; //!", {"bar.arrive"}},
        {"arrival at a barrier without waiting", "barrier.cta.arrive 0, 64; //!", {"arrive"}},
        {"a barrier of some threads", "bar.sync 0, 64; //!", {"bar.sync"}},
        {"a reduction of some threads", "bar.red.and.pred %p1, 0, 64, %p2; //!", {"bar.red.and"}},
        {"a barrier that does not exist", "bar.sync 16; //!", {"16"}},
        {"a barrier in a register", "bar.sync %r2; //!", {}},
        {"a label defined twice", "$L_a:\nmov.u32 %r10, 1;\n$L_a: mov.u32 %r11, 1; //!", {"$L_a"}},
    };
    for (const row &r : rows) rejected(r.what, ptx_program(r.body), r.words);
    rejected("a recursive function",
             ".version 8.0\n.target sm_90\n.address_size 64\n"
             ".func f()\n{\ncall.uni f; //!\nret;\n}\n"
             ".visible .entry k()\n{\ncall.uni f;\nret;\n}\n",
             {"recursive"});
    {
        test_module twin(ptx_program("add.s32 %r10, %r2, 1;\nbra $L_end;\n$L_end:"));
        CHECK(twin.module, "the twin without an error loads");
    }
    std::string whole = ptx_program("add.s32 %r10, %r2, 1;");
    rejected("a text that ends within a kernel", whole.substr(0, whole.size() - 10), {});
    rejected("no semicolon", ptx_program("add.s32 %r10, %r2, 1\nmov.u32 %r11, 1;"), {});
    rejected("no PTX", "int main(void) { return 0; }\n", {});
    {
        char error[8] = "1234567";
        std::string text = ptx_program("frobnicate.s32 %r10, %r2;");
        ptx_module *m = ptx_load(text.c_str(), text.size(), error, sizeof error);
        CHECK(!m && error[7] == 0 && strlen(error) < 8, "a short buffer holds a cut message");
    }
    {
        /* The text is not terminated by a zero byte, only by its length. */
        std::string text = ptx_program("add.s32 %r10, %r2, 1;") + "@!$ garbage";
        char error[512] = "";
        ptx_module *m = ptx_load(text.c_str(), text.size() - 11, error, sizeof error);
        CHECK(m, "the text ends at its length: %s", error);
        if (m) ptx_unload(m);
    }
}

/* What the ISA does not have, or what would mean something that is not implemented. */
static void test_invalid(void) {
    static const char *const instructions[] = {
        "cp.async.ca.shared.global [%r10], [%rd2], 12;",
        "cp.async.ca.shared.global [%r10], [%rd2], 0;",
        "cp.async.ca.shared.global [%r10], [%rd2], 32;",
        "cp.async.ca.shared.global [%r10], [%rd2], -4;",
        "cp.async.cg.shared.global [%r10], [%rd2], 8;",
        "cp.async.shared.global [%r10], [%rd2], 16;",
        "cvt.s8.f32 %r10, %f1;",
        "cvt.b32.u32 %r10, %r2;",
        "cvt.f32.f16x2 %f1, %r2;",
        "cvt.f32.tf32 %f1, %r2;",
        "cvt.ftz.s32.s16 %r10, %rs1;",
        "cvt.rn.sat.f32.s32 %f1, %r2;",
        "cvt.rn.sat.f16x2.f32 %r10, %f1, %f2;",
        "cvt.rn.ftz.bf16x2.f32 %r10, %f1, %f2;",
        "cvt.bf16.f16 %rs1, %rs2;",
        "add.ftz.f16 %rs1, %rs2, %rs3;",
        "add.ftz.f64 %fd1, %fd2, %fd3;",
        "min.rn.f32 %f1, %f2, %f3;",
        "min.sat.f32 %f1, %f2, %f3;",
        "min.NaN.f64 %fd1, %fd2, %fd3;",
        "abs.rn.f32 %f1, %f2;",
        "neg.sat.f32 %f1, %f2;",
        "fma.f32 %f1, %f2, %f3, %f4;",
        "mad.rn.f16 %rs1, %rs2, %rs3, %rs4;",
        "div.f32 %f1, %f2, %f3;",
        "div.rn.approx.f32 %f1, %f2, %f3;",
        "copysign.ftz.f32 %f1, %f2, %f3;",
        "testp.ftz.finite.f32 %p1, %f2;",
        "rcp.rn.ftz.f64 %fd1, %fd2;",
        "abs.u32 %r10, %r2;",
        "neg.u32 %r10, %r2;",
        "shl.u32 %r10, %r2, 1;",
        "popc.u32 %r10, %r2;",
        "bfe.b32 %r10, %r2, 1, 2;",
        "prmt.b64 %r10, %r2, %r3, 0;",
        "setp.lt.b32 %p1, %r2, %r3;",
        "selp.f16 %rs1, %rs2, %rs3, %p1;",
        "mov.f16 %rs1, %rs2;",
        "mov.u32 %r10, {%rs1, %rs2};",
        "ld.global.f16 %rs1, [%rd2];",
        "ld.global.pred %p1, [%rd2];",
        "ld.global.u64 %r10, [%rd2];",
        "ldu.shared.u32 %r10, [%r10];",
        "st.global.u64 [%rd1], %r2;",
        "st.global.bf16x2 [%rd1], %r2;",
        "st.param.u32 [k_param_3], %r2;",
        "red.global.and.f32 [%rd1], %f1;",
        "red.global.min.f32 [%rd1], %f1;",
        "red.global.add.b32 [%rd1], %r2;",
        "red.global.or.u32 [%rd1], %r2;",
        "red.global.exch.b32 [%rd1], %r2;",
        "atom.global.inc.s32 %r10, [%rd1], %r2;",
        "atom.global.cas.f32 %f1, [%rd1], %f2, %f3;",
        "isspacep.const %p1, %rd1;",
        "prefetch.shared.L1 [%r10];",
        "fence;",
        "mov.u32 %tid.x, 1;",
        "mov.u32 %r10, _;",
        "@_ mov.u32 %r10, 1;",
        "mov.pred %p1, sh;",
        "mov.pred %p1, WARP_SZ;",
    };
    for (const char *i : instructions)
        rejected(i, ptx_program(std::string(i) + " //!", SHARED_4096), {});
    static const char *const declarations[] = {
        ".shared .pred flags[4];",
        ".shared .align 0 .b8 a[4];",
        ".shared .align 12 .b8 a[4];",
        ".shared .align 1073741824 .b8 a[4];",
        ".shared .b8 a[-1];",
        ".shared .b8 a[1000000000000];",
        ".shared .b32 a[65536][65536];",
        ".local .pred flags;",
        ".local .b8 a[1000000];",
        ".reg .b32 %many<4294967295>;",
        ".reg .b32 %many<1000000000000>;",
    };
    for (const char *d : declarations) rejected(d, ptx_program(std::string(d) + " //!"), {});
    static const char *const globals[] = {
        ".shared .pred flags[4];",
        ".global .align 4 .pred flags[4];",
        ".global .align 0 .b8 a[4];",
        ".global .b64 a[1000000000];",
        ".global .b64 a[9223372036854775807];",
        ".global .b8 a[4] = {1, 2;",
        ".global a;",
        ".target sm",
    };
    for (const char *g : globals)
        rejected(g, ptx_program("", std::string(g) + " //!"), {});
    rejected("shared variables that are too large together",
             ptx_program(".shared .b8 a[268435456];\n.shared .b8 b[268435456]; //!"), {});
    for (const char *p : {".param k", ".param .align 4 k", ".param .pred k", ".param .b8 k[40000]",
                          ".param .align 0 .b8 k[8]", ".param .b8 k[-8]"})
        rejected(p, ptx_head() + ".entry k(" + p + ")\n{\nret;\n}\n", {});
    rejected("an offset of the address of a function's parameter",
             ptx_head() + ".func f(.param .b64 a)\n{\n.reg .b64 %rd<2>;\n"
                          "mov.u64 %rd1, a+99; //!\nret;\n}\n"
                          ".entry k()\n{\n.param .b64 p;\ncall f, (p);\nret;\n}\n", {});
    rejected("a shared variable as an argument",
             ptx_head(SHARED_4096) + ".func f(.param .b64 a)\n{\nret;\n}\n"
                                     ".entry k()\n{\ncall f, (sh); //!\nret;\n}\n", {});
}

static void test_kernels(void) {
    std::string text = ptx_head(".extern .shared .align 128 .b8 dynamic[];") +
        ".entry first(\n"
        "    .param .align 8 .b8 first_param_0[72],\n"
        "    .param .u64 first_param_1,\n"
        "    .param .f32 first_param_2,\n"
        "    .param .u16 first_param_3,\n"
        "    .param .u8 first_param_4,\n"
        "    .param .f64 first_param_5\n"
        ")\n"
        ".maxntid 128, 1, 1\n"
        ".minnctapersm 2\n"
        "{\n"
        "    .reg .b32 %r<4>;\n"
        "    .shared .align 16 .b8 first_shared[1000];\n"
        "    .shared .align 16 .b8 second_shared[24];\n"
        "    ret;\n"
        "}\n"
        "// the second kernel has no parameters\n"
        ".visible .entry second()\n"
        "{\n"
        "    ret;\n"
        "}\n";
    char error[512] = "";
    ptx_module *m = ptx_load(text.c_str(), text.size(), error, sizeof error);
    CHECK(m, "%s", error);
    if (!m) return;
    CHECK(ptx_kernel_count(m) == 2, "%zu kernels", ptx_kernel_count(m));
    CHECK(!ptx_find(m, "third") && !ptx_find(m, "firs") && !ptx_find(m, ""), "no such kernel");
    const ptx_kernel *a = ptx_find(m, "first"), *b = ptx_find(m, "second");
    CHECK(a && b && a != b, "both kernels are found");
    if (a && b) {
        static const size_t sizes[] = {72, 8, 4, 2, 1, 8};
        CHECK(!strcmp(ptx_kernel_name(a), "first"), "%s", ptx_kernel_name(a));
        CHECK(!strcmp(ptx_kernel_name(b), "second"), "%s", ptx_kernel_name(b));
        CHECK(ptx_param_count(a) == 6 && ptx_param_count(b) == 0, "numbers of parameters");
        for (size_t i = 0; i < 6 && i < ptx_param_count(a); i++)
            CHECK(ptx_param_size(a, i) == sizes[i], "parameter %zu: %zu", i, ptx_param_size(a, i));
        CHECK(ptx_static_shared(a) == 1032 || ptx_static_shared(a) == 1040,
              "%zu bytes of shared memory", ptx_static_shared(a));
        CHECK(ptx_static_shared(b) == 0, "%zu bytes of shared memory", ptx_static_shared(b));
        CHECK(ptx_launches(a) == 0 && ptx_launches(b) == 0, "not launched");
        ptx_launch l = {b, {3, 1, 1}, {32, 1, 1}, 0, nullptr, PTX_ASCENDING, 0};
        CHECK(ptx_run(&l) == 0 && ptx_run(&l) == 0, "an empty kernel runs");
        CHECK(ptx_launches(a) == 0 && ptx_launches(b) == 2, "launches of each kernel");
    }
    std::set<std::string> names;
    for (size_t i = 0; i < ptx_kernel_count(m); i++)
        names.insert(ptx_kernel_name(ptx_kernel_at(m, i)));
    CHECK(names.count("first") && names.count("second"), "names by index");
    ptx_unload(m);
}


// >>broken text

/* A program with all kinds of syntax. */
static std::string sample(void) {
    return ptx_head(".extern .shared .align 16 .b8 memory[];\n"
                    ".shared .align 8 .b8 outer[64];\n"
                    ".global .align 4 .u32 table[4] = {1, 0x2, 3U, -4};\n"
                    ".file 1 \"a/b.cu\"\n"
                    ".func (.param .b32 r) f(.param .b32 a)\n{\n"
                    "    .reg .b32 %r<3>;\n    .reg .pred %p;\n"
                    "    ld.param.u32 %r1, [a];\n    setp.eq.s32 %p, %r1, 0;\n"
                    "    @%p exit;\n    st.param.b32 [r+0], %r1;\n    ret;\n}\n")
        + ptx_program(
              "    .shared .align 16 .b8 sh[128];\n"
              "    .local .align 8 .b8 depot[16];\n"
              "    .loc 1 2 3, function_name $L_f, inlined_at 1 4 5\n"
              "    mov.u32 %r10, sh; /* a comment */\n"
              "    mad.lo.s32 %r10, %r2, 4, %r10;\n"
              "    st.shared.v2.u32 [%r10+8], {%r2, 7};\n"
              "    mov.b64 %rd10, {%r2, %r3};\n"
              "    mov.b64 {%r11, _}, %rd10;\n"
              "    cp.async.cg.shared.global [%r10], [%rd2], 16, 8;\n"
              "    cp.async.commit_group;\n    cp.async.wait_group 0;\n"
              "    ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%r12, %r13}, [%r10];\n"
              "    mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%f1, %f2, %f3, %f4},\n"
              "        {%r12, %r13}, {%r13}, {%f1, %f2, %f3, %f4};\n"
              "    mov.u64 %rd11, depot;\n    st.local.f64 [%rd11-0], 0d3FF0000000000000;\n"
              "    .pragma \"used_bytes_mask 15\";\n"
              "    ld.global.nc.v4.f32 {%f1, %f2, %f3, %f4}, [table+4];\n"
              "    shfl.sync.bfly.b32 %r14|%p1, %r2, 1, 31, -1;\n"
              "    setp.lt.and.f32 %p2|%p3, %f1, 0f3F800000, !%p1;\n"
              "    @!%p2 bra $L_a;\n    bar.red.and.pred %p4, 0, %p2;\n"
              "    bra.uni $L_end;\n"
              "$L_a:\n    bar.sync 1;\n"
              "    { .param .b32 p; .param .b32 q;\n    st.param.b32 [p], %r2;\n"
              "    call.uni (q), f, (p);\n    ld.param.b32 %r15, [q]; }\n"
              "$L_t: .branchtargets $L_a, $L_end;\n    brx.idx %r2, $L_t;\n"
              "    ld.shared.u8 %rs1, [outer+63];\n    ld.shared.u8 %rs1, [memory];\n"
              "    cvt.rn.f32.u16 %f5, %rs1;\n    trap;\n"
              "$L_end:\n", "", ".maxntid 128, 1, 1\n.minnctapersm 1\n").substr(ptx_head().size());
}

static void test_broken(void) {
    const std::string whole = sample();
    char error[512] = "";
    ptx_module *m = ptx_load(whole.c_str(), whole.size(), error, sizeof error);
    CHECK(m, "the sample does not load: %s", error);
    if (m) ptx_unload(m);
    for (size_t n = 0; n <= whole.size(); n++) survives(whole.substr(0, n));

    survives_changes(whole, 6000);
}

/* A branch to the end of the code ends the thread. */
static void test_end_of_code(void) {
    std::string text = ptx_program("setp.lt.u32 %p1, %r3, 16;\n@%p1 bra $L_end;\n"
                                   "mul.wide.u32 %rd20, %r2, 4;\nadd.s64 %rd20, %rd1, %rd20;\n"
                                   "st.global.u32 [%rd20], %r2;\n");
    text = replaced(text, "    ret;\n}", "    ret;\n$L_end:\n}");
    test_memory memory;
    runs_clean("a label at the end", text, {}, memory, [&] {
        for (uint32_t l = 0; l < 32; l++)
            CHECK(memory.out.as<uint32_t>()[l] == (l < 16 ? 0xeeeeeeee : l), "lane %u", l);
    });
}


// >>main

static const test_part parts[] = {
    {"forms", test_forms}, {"load_errors", test_load_errors}, {"invalid", test_invalid},
    {"kernels", test_kernels}, {"broken", test_broken}, {"end_of_code", test_end_of_code}};

int main(int argc, char **argv) {
    typedef void (*group)(int, char **);
    static const group groups[] = {test_arithmetic, test_float, test_spaces, test_warps, test_mma,
                                   test_faults, test_races, test_counters};
    bool coverage = argc > 1 && !strcmp(argv[1], "coverage");
    int count = coverage ? 1 : argc, files = 0;
    test_run(parts, sizeof parts / sizeof *parts, count, argv);
    for (group g : groups) g(count, argv);
    for (int i = 2; coverage && i < argc; i++, files++) covers(argv[i]);
    if (coverage && files == 0 && getenv("PTX_FILES")) {
        std::string paths = std::string(getenv("PTX_FILES")) + " ", path;
        for (char c : paths) {
            if (c != ' ') {
                path += c;
                continue;
            }
            if (path.size()) {
                covers(path.c_str());
                files++;
            }
            path.clear();
        }
    }
    CHECK(!coverage || files > 0, "coverage without any PTX file");
    return test_end();
}
