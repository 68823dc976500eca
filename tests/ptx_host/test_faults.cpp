/* test_faults.cpp - each kind of fault but races: programs that must report it, and twins
   that must not. */
#include "test_ptx.h"

static launch_shape threads(unsigned block, unsigned grid = 1, size_t shared = 0) {
    launch_shape s;
    s.block = block;
    s.grid = grid;
    s.shared = shared;
    return s;
}

static std::vector<unsigned> from_to(unsigned from, unsigned to) {
    std::vector<unsigned> list;
    for (unsigned i = from; i < to; i++) list.push_back(i);
    return list;
}


// >>unwritten registers

static void test_unwritten_register(void) {
    const std::vector<ptx_fault_kind> kind = {PTX_UNWRITTEN_REGISTER};
    std::string head = PLACES;
    reports({"a register that is never set", kind,
             head + "<<||mov.u32 %r60, 5;>>\n"
                    "st.global.u32 [%rd20], %r60; //!\n",
             threads(32), from_to(0, 32), {0}, SHARED_4096});
    reports({"a register that some lanes have set", kind,
             head + "setp.lt.u32 %p1, %r3, <<16||32>>;\n"
                    "@%p1 mov.u32 %r60, 5;\n"
                    "st.global.u32 [%rd20], %r60; //!\n",
             threads(32), from_to(16, 32), {0}, SHARED_4096});
    reports({"a register that one side of a branch sets", kind,
             head + "setp.ne.s32 %p1, %r2, 41;\n"
                    "@%p1 bra $L_set;\n"
                    "<<mov.u32 %r61, 5;||mov.u32 %r60, 5;>>\n"
                    "bra.uni $L_join;\n"
                    "$L_set:\n"
                    "mov.u32 %r60, 5;\n"
                    "$L_join:\n"
                    "st.global.u32 [%rd20], %r60; //!\n",
             threads(64), {41}, {0}, SHARED_4096});
    reports({"a predicate that is never set", kind,
             head + "setp.eq.s32 %p1, %r3, 0;\n"
                    "@<<%p20||%p1>> bra $L_end; //!\n"
                    "st.global.u32 [%rd20], %r3;\n"
                    "$L_end:\n",
             threads(32), {}, {0}, SHARED_4096});
    reports({"the address of a store", kind,
             head + "<<||mov.u64 %rd60, %rd20;>>\n"
                    "st.global.u32 [%rd60], %r3; //!\n",
             threads(32), {}, {0}, SHARED_4096});
    reports({"one register of a vector", kind,
             head + "mul.wide.u32 %rd30, %r2, 16;\n"
                    "add.s64 %rd30, %rd1, %rd30;\n"
                    "st.global.v4.u32 [%rd30], {%r1, %r2, <<%r60||%r3>>, %r4}; //!\n",
             threads(32), {}, {0}, SHARED_4096});
    reports({"a part of a 64-bit register", kind,
             head + "mul.wide.u32 %rd30, %r2, 8;\n"
                    "add.s64 %rd30, %rd1, %rd30;\n"
                    "<<||mov.b64 %rd60, {%r2, %r3};>>\n"
                    "st.global.u64 [%rd30], %rd60; //!\n",
             threads(32), {}, {0}, SHARED_4096});
    reports({"the half of a 64-bit register that is used", kind,
             head + "mov.b64 %rd60, {<<%r60, %r3||%r3, %r60>>}; //!\n"
                    "cvt.u32.u64 %r61, %rd60;\n"
                    "st.global.u32 [%rd20], %r61;\n",
             threads(32), from_to(0, 32), {0}, SHARED_4096});
}


// >>unwritten memory

static void test_unwritten_shared(void) {
    const std::vector<ptx_fault_kind> kind = {PTX_UNWRITTEN_SHARED};
    std::string head = PLACES;
    reports({"shared memory that is never written", kind,
             head + "<<||st.shared.u32 [%r20], %r3;>>\n"
                    "ld.shared.u32 %r50, [%r20]; //!\n",
             threads(32), from_to(0, 32), {0}, SHARED_4096});
    reports({"the last byte of a word", kind,
             head + "cvt.u16.u32 %rs1, %r3;\n"
                    "st.shared.u8 [%r20], %r3;\n"
                    "st.shared.u8 [%r20+1], %r3;\n"
                    "st.shared.u8 [%r20+2], %rs1;\n"
                    "st.shared.u8 [%r20+<<0||3>>], %rs1;\n"
                    "ld.shared.u32 %r50, [%r20]; //!\n",
             threads(64), from_to(0, 64), {0}, SHARED_4096});
    reports({"the last element of a vector", kind,
             "mov.u32 %r20, sh;\n"
             "st.shared.v2.u32 [%r20], {%r1, %r2};\n"
             "st.shared.u32 [%r20+8], %r1;\n"
             "st.shared.u32 [%r20+<<16||12>>], %r1;\n"
             "ld.shared.v4.u32 {%r50, %r51, %r52, %r53}, [%r20]; //!\n",
             threads(1), {0}, {0}, SHARED_4096});
    reports({"dynamic shared memory", kind,
             "mov.u32 %r20, memory;\n"
             "<<||st.shared.u32 [%r20+32], %r3;>>\n"
             "ld.shared.u32 %r50, [memory+32]; //!\n",
             threads(1, 1, 64), {0}, {0}, ".extern .shared .align 16 .b8 memory[];"});
    /* Each block begins with unwritten shared memory. */
    reports({"shared memory that only another block writes", kind,
             head + "setp.eq.s32 %p1, %r4, 0;\n"
                    "setp.lt.u32 %p2, %r4, <<1||9>>;\n"
                    "@%p2 st.shared.u32 [%r20], %r3;\n"
                    "ld.shared.u32 %r50, [%r20]; //!\n",
             threads(32, 3), from_to(0, 32), {1, 2}, SHARED_4096});
    reports({"one row of ldmatrix", kind,
             "mov.u32 %r20, sh;\n"
             "shl.b32 %r21, %r3, 4;\n"
             "add.s32 %r20, %r20, %r21;\n"
             "setp.ne.s32 %p1, %r3, <<21||99>>;\n"
             "@%p1 st.shared.v4.u32 [%r20], {%r3, %r3, %r3, %r3};\n"
             "bar.warp.sync -1;\n"
             "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r50,%r51,%r52,%r53}, [%r20]; //!\n",
             threads(32), {}, {0}, SHARED_4096});
}

static void test_unwritten_global(void) {
    const std::vector<ptx_fault_kind> kind = {PTX_UNWRITTEN_GLOBAL};
    std::string head = PLACES;
    reports({"global memory that is never written", kind,
             head + "ld.global.u32 %r50, [<<%rd20||%rd21>>]; //!\n",
             threads(64), from_to(0, 64), {0}, SHARED_4096});
    reports({"a generic load", kind,
             head + "ld.u32 %r50, [<<%rd20||%rd21>>]; //!\n",
             threads(64), from_to(0, 64), {0}, SHARED_4096});
    reports({"a word that was marked unwritten", kind,
             head + "<<||st.global.u32 [%rd21], %r3;>>\n"
                    "ld.global.u32 %r50, [%rd21]; //!\n",
             threads(64), {37}, {0}, SHARED_4096, "",
             [](test_memory &m) { ptx_memory_unwritten(m.in.data + 4 * 37, 4); }});
    reports({"one byte of a word", kind,
             head + "ld.global.u16 %rs1, [%rd21+<<2||0>>]; //!\n",
             threads(64), {5}, {0}, SHARED_4096, "",
             [](test_memory &m) { ptx_memory_unwritten(m.in.data + 4 * 5 + 3, 1); }});
    reports({"the last element of a vector", kind,
             "ld.global.v4.u32 {%r50, %r51, %r52, %r53}, [%rd2+<<16||32>>]; //!\n",
             threads(1), {0}, {0}, "", "",
             [](test_memory &m) { ptx_memory_unwritten(m.in.data + 28, 4); }});
    reports({"the source of cp.async", kind,
             "mov.u32 %r20, sh;\n"
             "cp.async.cg.shared.global [%r20], [%rd2], 16, <<16||8>>; //!\n"
             "cp.async.commit_group;\n"
             "cp.async.wait_group 0;\n",
             threads(1), {0}, {0}, SHARED_4096, "",
             [](test_memory &m) { ptx_memory_unwritten(m.in.data + 12, 4); }});
    reports({"memory that a branch does not write", kind,
             head + "setp.gt.u32 %p1, %r2, <<10||99>>;\n"
                    "@%p1 bra $L_skip;\n"
                    "st.global.u32 [%rd20], %r2;\n"
                    "$L_skip:\n"
                    "ld.global.u32 %r50, [%rd20]; //!\n",
             threads(32), from_to(11, 32), {0}, SHARED_4096});
}

/* Which bytes count as written after calls from the host and after launches. */
static void test_written(void) {
    test_module reader(ptx_program(std::string(PLACES) +
                                   "ld.global.u32 %r50, [%rd22];\n", SHARED_4096));
    test_module writer(ptx_program(std::string(PLACES) +
                                   "st.global.u32 [%rd22], %r3;\n", SHARED_4096));
    if (!reader.kernel || !writer.kernel) return;
    test_memory m;
    auto faults = [&](const test_module &program) {
        size_t n = m.run(program, {});
        ptx_faults_clear();
        return n;
    };
    CHECK(faults(reader) == 0, "written by the host");
    ptx_memory_unwritten(m.extra.data, m.extra.bytes);
    CHECK(faults(reader) == 1, "one fault per kind and instruction of a launch");
    CHECK(faults(writer) == 0, "stores need no written memory");
    CHECK(faults(reader) == 0, "written by an earlier launch");
    ptx_memory_unwritten(m.extra.data + 124, 1);
    CHECK(faults(reader) == 1, "one byte");
    ptx_memory_written(m.extra.data + 125, 100);
    CHECK(faults(reader) == 1, "its neighbours");
    ptx_memory_written(m.extra.data + 124, 1);
    CHECK(faults(reader) == 0, "that byte");
    ptx_memory_unwritten(m.extra.data, m.extra.bytes);
    ptx_memory_written(m.extra.data - 64, 128);
    CHECK(faults(reader) == 1, "a range that begins before the memory: half of it");
    ptx_memory_written(m.extra.data + 64, m.extra.bytes + 1000);
    CHECK(faults(reader) == 0, "a range that ends after the memory");
    ptx_memory_remove(m.extra.data);
    CHECK(faults(reader) > 0, "removed memory");
    ptx_memory_add(m.extra.data, m.extra.bytes);
    CHECK(faults(reader) == 1, "memory that was added is unwritten");
}


// >>bounds and alignment

static void test_bounds_global(void) {
    const std::vector<ptx_fault_kind> kind = {PTX_OUT_OF_BOUNDS};
    std::string head = PLACES;
    reports({"a load behind an allocation", kind,
             "ld.global.u32 %r50, [%rd2+<<65536||65532>>]; //!\n", threads(1), {0}, {0}});
    reports({"a load of two bytes behind an allocation", kind,
             "ld.global.u16 %rs50, [%rd2+<<65536||65534>>]; //!\n", threads(1), {0}, {0}});
    reports({"a vector load behind an allocation", kind,
             "ld.global.v4.f32 {%f1, %f2, %f3, %f4}, [%rd2+<<65536||65520>>]; //!\n", threads(1),
             {0}, {0}});
    reports({"a load before an allocation", kind,
             "ld.global.u32 %r50, [%rd2+<<-4||0>>]; //!\n", threads(1), {0}, {0}});
    reports({"a generic load behind an allocation", kind,
             "ld.f32 %f50, [%rd2+<<65536||65532>>]; //!\n", threads(1), {0}, {0}});
    reports({"a store behind an allocation", kind,
             "mov.f64 %fd50, 0d3FF0000000000000;\n"
             "st.global.f64 [%rd1+<<65536||65528>>], %fd50; //!\n", threads(1), {0}, {0}});
    reports({"a null pointer", kind,
             "mov.u64 %rd30, 0;\n"
             "ld.global.u32 %r50, [<<%rd30||%rd2>>]; //!\n", threads(1), {0}, {0}});
    reports({"an address that wraps around", kind,
             "mov.u64 %rd30, -8;\n"
             "ld.global.v4.u32 {%r50, %r51, %r52, %r53}, [<<%rd30+8||%rd2>>]; //!\n", threads(1),
             {0}, {0}});
    reports({"an allocation that ends within the access", kind,
             "ld.global.<<u32 %r50||u16 %rs50>>, [%rd3+28]; //!\n", threads(1), {0}, {0}, "", "",
             nullptr, 30});
    reports({"one thread of many", kind,
             head + "mad.lo.s32 %r30, %r4, 96, %r2;\n"
                    "setp.eq.s32 %p1, %r30, 170;\n"
                    "selp.b32 %r31, <<65536||65532>>, 0, %p1;\n"
                    "cvt.u64.u32 %rd30, %r31;\n"
                    "add.s64 %rd30, %rd2, %rd30;\n"
                    "ld.global.u32 %r50, [%rd30]; //!\n",
             threads(96, 3), {74}, {1}, SHARED_4096});
    reports({"the source of cp.async", kind,
             "mov.u32 %r20, sh;\n"
             "cp.async.cg.shared.global [%r20], [%rd3+16], 16, <<16||8>>; //!\n"
             "cp.async.commit_group;\n"
             "cp.async.wait_group 0;\n",
             threads(1), {0}, {0}, SHARED_4096, "", nullptr, 24});
}

static void test_bounds_other(void) {
    const std::vector<ptx_fault_kind> kind = {PTX_OUT_OF_BOUNDS};
    reports({"a store behind shared memory", kind,
             "st.shared.u32 [sh+<<4096||4092>>], %r3; //!\n", threads(1), {0}, {0}, SHARED_4096});
    reports({"a store behind dynamic shared memory", kind,
             "st.shared.u32 [memory+<<64||60>>], %r3; //!\n", threads(1, 1, 64), {0}, {0},
             ".extern .shared .align 16 .b8 memory[];"});
    reports({"a load before shared memory", kind,
             "st.shared.u32 [sh], %r3;\n"
             "mov.u32 %r20, sh;\n"
             "add.s32 %r20, %r20, <<-4||0>>;\n"
             "ld.shared.u32 %r50, [%r20]; //!\n", threads(1), {0}, {0}, SHARED_4096});
    reports({"shared memory of a kernel without any", kind,
             "mov.u32 %r20, 0;\n"
             "<<st.shared.u32 [%r20], %r3;||st.global.u32 [%rd1], %r3;>> //!\n", threads(1), {0},
             {0}});
    reports({"the destination of cp.async", kind,
             "mov.u32 %r20, sh;\n"
             "cp.async.cg.shared.global [%r20+<<4096||4080>>], [%rd2], 16, 16; //!\n"
             "cp.async.commit_group;\n"
             "cp.async.wait_group 0;\n",
             threads(1), {0}, {0}, SHARED_4096});
    reports({"one row of ldmatrix", kind,
             "mov.u32 %r20, sh;\n"
             "shl.b32 %r21, %r3, 4;\n"
             "add.s32 %r20, %r20, %r21;\n"
             "st.shared.v4.u32 [%r20], {%r3, %r3, %r3, %r3};\n"
             "bar.warp.sync -1;\n"
             "setp.eq.s32 %p1, %r3, 9;\n"
             "@%p1 add.s32 %r20, %r20, <<400||32>>;\n"
             "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r50,%r51,%r52,%r53}, [%r20]; //!\n",
             threads(32), {}, {0}, ".shared .align 16 .b8 sh[512];"});
    reports({"a store behind local memory", kind,
             ".local .align 8 .b8 depot[72];\n"
             "mov.u64 %rd30, depot;\n"
             "add.s64 %rd30, %rd30, <<72||64>>;\n"
             "st.local.u64 [%rd30], %rd1; //!\n", threads(64), from_to(0, 64), {0}});
    reports({"a load before local memory", kind,
             ".local .align 8 .b8 depot[72];\n"
             "mov.u64 %rd30, depot;\n"
             "st.local.u64 [%rd30], %rd1;\n"
             "ld.local.u64 %rd31, [%rd30+<<-8||0>>]; //!\n", threads(1), {0}, {0}});
    reports({"a load behind the parameters", kind,
             "mov.b64 %rd30, k_param_3;\n"
             "ld.param.u32 %r50, [%rd30+<<4096||0>>]; //!\n", threads(1), {0}, {0}});
}

/* An address that is computed from a shared variable must be in it, although the memory
   behind it belongs to another variable. */
static void test_bounds_variable(void) {
    const std::vector<ptx_fault_kind> kind = {PTX_OUT_OF_BOUNDS};
    std::string two = ".shared .align 16 .b8 one[136];\n.shared .align 16 .b8 two[256];\n"
                      ".extern .shared .align 16 .b8 memory[];";
    auto test = [&](const char *what, const std::string &body, std::vector<unsigned> who = {0},
                    unsigned block = 1) {
        reports({what, kind, body + "mov.u32 %r98, two;\nmov.u32 %r99, memory;\n",
                 threads(block, 1, 64), who, {0}, two});
    };
    test("a store into the padding", "st.shared.u32 [one+<<136||132>>], %r2; //!\n");
    test("a store into the next variable",
         "mov.u32 %r20, one;\n"
         "st.shared.u32 [%r20+<<144||132>>], %r2; //!\n");
    test("a store that begins in the variable",
         "mov.u32 %r20, one;\n"
         "st.shared.v4.u32 [%r20+<<128||112>>], {%r2, %r2, %r2, %r2}; //!\n");
    test("a store before the variable",
         "mov.u32 %r20, one;\n"
         "mov.u32 %r21, two;\n"
         "st.shared.u32 [%r20], %r2;\n"
         "sub.s32 %r22, %r21, <<8||-8>>;\n"
         "st.shared.u32 [%r22], %r2; //!\n");
    test("an index",
         "mov.u32 %r20, one;\n"
         "shl.b32 %r21, %r2, 2;\n"
         "add.s32 %r22, %r21, %r20;\n"
         "st.shared.u32 [%r22+<<16||8>>], %r2; //!\n", {30, 31}, 32);
    test("a product and a sum",
         "mov.u32 %r20, one;\n"
         "mad.lo.s32 %r22, %r2, 4, %r20;\n"
         "st.shared.u32 [%r22+<<16||8>>], %r2; //!\n", {30, 31}, 32);
    test("a pointer that a loop advances",
         "mov.u32 %r20, one;\n"
         "mov.u32 %r21, 0;\n"
         "$L_loop:\n"
         "st.shared.u32 [%r20], %r2; //!\n"
         "add.s32 %r20, %r20, 4;\n"
         "add.s32 %r21, %r21, 1;\n"
         "setp.lt.u32 %p1, %r21, <<35||34>>;\n"
         "@%p1 bra $L_loop;\n");
    test("a generic address",
         "mov.u64 %rd20, one;\n"
         "cvta.shared.u64 %rd21, %rd20;\n"
         "mul.wide.u32 %rd22, %r2, 4;\n"
         "add.s64 %rd21, %rd21, %rd22;\n"
         "st.u32 [%rd21+<<132||128>>], %r2; //!\n", {1}, 2);
    test("an address of 64 bits",
         "mov.u32 %r20, one;\n"
         "cvt.u64.u32 %rd20, %r20;\n"
         "cvt.u32.u64 %r21, %rd20;\n"
         "st.shared.u32 [%r21+<<136||132>>], %r2; //!\n");
    test("dynamic memory, from which a static variable is reached",
         "mov.u32 %r20, memory;\n"
         "st.shared.u32 [%r20+<<-4||60>>], %r2; //!\n");
    test("cp.async",
         "cp.async.ca.shared.global [one+<<136||128>>], [%rd2], 8; //!\n"
         "cp.async.wait_all;\n");
    test("an atomic operation",
         "mov.u32 %r20, two;\n"
         "st.shared.u32 [%r20], 0;\n"
         "st.shared.u32 [one+132], 0;\n"
         "red.shared.add.u32 [<<one+144||%r20>>], 1; //!\n");
    /* The variable is not known: an address of either variable is allowed. */
    test_memory memory;
    runs_clean("a pointer to one of two variables",
               ptx_program("mov.u32 %r20, one;\n"
                           "mov.u32 %r21, two;\n"
                           "setp.eq.s32 %p1, %r2, 5;\n"
                           "selp.b32 %r22, %r20, %r21, %p1;\n"
                           "shl.b32 %r23, %r2, 2;\n"
                           "add.s32 %r22, %r22, %r23;\n"
                           "st.shared.u32 [%r22], %r2;\n"
                           "sub.s32 %r24, %r21, %r20;\n"
                           "add.s32 %r25, %r20, %r24;\n"
                           "add.s32 %r25, %r25, %r23;\n"
                           "st.shared.u32 [%r25+128], %r2;\n", two),
               threads(32), memory, [] {});
}

/* A store out of bounds changes nothing, and memory is checked after it was removed. */
static void test_bounds_effects(void) {
    test_module m(ptx_program("st.global.u32 [%rd1+65536], %r3;\n"));
    test_module removed(ptx_program("ld.global.u32 %r50, [%rd3+4];\n"));
    if (!m.kernel || !removed.kernel) return;
    test_memory memory;
    CHECK(memory.run(m, threads(1)) == 1, "a store out of bounds");
    ptx_faults_clear();
    for (size_t i = 0; i < 16; i++)
        CHECK(memory.out.data[65536 + i] == 0xcd, "byte %zu behind the memory is %x", i,
              memory.out.data[65536 + i]);
    CHECK(memory.run(removed, threads(1)) == 0, "registered memory");
    ptx_memory_remove(memory.extra.data);
    CHECK(memory.run(removed, threads(1)) == 1, "removed memory");
    CHECK(ptx_fault_count() == 1 && ptx_fault_at(0)->kind == PTX_OUT_OF_BOUNDS, "its kind");
    ptx_faults_clear();
    CHECK(ptx_fault_count() == 0, "faults are cleared");
    ptx_memory_add(memory.extra.data, memory.extra.bytes);
}

static void test_misaligned(void) {
    const std::vector<ptx_fault_kind> kind = {PTX_MISALIGNED};
    struct row {
        const char *what, *op;
    };
    static const row rows[] = {
        {"ld.global.u16", "ld.global.u16 %rs50, [%rd2+<<1||2>>]; //!"},
        {"ld.global.u32", "ld.global.u32 %r50, [%rd2+<<2||4>>]; //!"},
        {"ld.global.f32", "ld.global.f32 %f50, [%rd2+<<1||4>>]; //!"},
        {"ld.global.u64", "ld.global.u64 %rd50, [%rd2+<<4||8>>]; //!"},
        {"ld.global.f64", "ld.global.f64 %fd50, [%rd2+<<4||8>>]; //!"},
        {"ld.global.v2.f32", "ld.global.v2.f32 {%f50, %f51}, [%rd2+<<4||8>>]; //!"},
        {"ld.global.v4.f32", "ld.global.v4.f32 {%f1, %f2, %f3, %f4}, [%rd2+<<8||16>>]; //!"},
        {"ld.global.v4.u32", "ld.global.v4.u32 {%r50, %r51, %r52, %r53}, [%rd2+<<4||16>>]; //!"},
        {"ld.v4.f32", "ld.v4.f32 {%f1, %f2, %f3, %f4}, [%rd2+<<8||16>>]; //!"},
        {"st.global.u16", "cvt.u16.u32 %rs50, %r2;\nst.global.u16 [%rd1+<<1||2>>], %rs50; //!"},
        {"st.global.u32", "st.global.u32 [%rd1+<<2||4>>], %r2; //!"},
        {"st.global.v2.u32", "st.global.v2.u32 [%rd1+<<4||8>>], {%r2, %r2}; //!"},
        {"st.global.v4.u32", "st.global.v4.u32 [%rd1+<<8||16>>], {%r2, %r2, %r2, %r2}; //!"},
        {"st.u32", "st.u32 [%rd1+<<3||4>>], %r2; //!"},
        {"st.shared.u32", "st.shared.u32 [sh+<<2||4>>], %r2; //!"},
        {"st.shared.u64", "st.shared.u64 [sh+<<4||8>>], %rd2; //!"},
        {"st.shared.v2.u64", "st.shared.v2.u64 [sh+<<8||16>>], {%rd1, %rd2}; //!"},
        {"st.shared.v4.u32", "st.shared.v4.u32 [sh+<<4||16>>], {%r2, %r2, %r2, %r2}; //!"},
        {"ld.shared.v4.u32",
         "st.shared.v4.u32 [sh], {%r2, %r2, %r2, %r2};\n"
         "st.shared.v4.u32 [sh+16], {%r2, %r2, %r2, %r2};\n"
         "ld.shared.v4.u32 {%r50, %r51, %r52, %r53}, [sh+<<8||16>>]; //!"},
        {"the destination of cp.async",
         "mov.u32 %r20, sh;\n"
         "cp.async.cg.shared.global [%r20+<<8||16>>], [%rd2], 16, 16; //!\n"
         "cp.async.commit_group;\ncp.async.wait_group 0;"},
        {"the source of cp.async",
         "mov.u32 %r20, sh;\n"
         "cp.async.cg.shared.global [%r20], [%rd2+<<8||16>>], 16, 16; //!\n"
         "cp.async.commit_group;\ncp.async.wait_group 0;"},
        {"st.local.u64",
         ".local .align 8 .b8 depot[72];\nmov.u64 %rd30, depot;\n"
         "st.local.u64 [%rd30+<<4||8>>], %rd1; //!"},
    };
    for (const row &r : rows)
        reports({r.what, kind, r.op, threads(1), {0}, {0}, SHARED_4096});
    reports({"one lane of a load", kind,
             std::string(PLACES) +
             "setp.eq.s32 %p1, %r2, 45;\n"
             "selp.b64 %rd30, <<2||4>>, 0, %p1;\n"
             "add.s64 %rd30, %rd21, %rd30;\n"
             "ld.global.u32 %r50, [%rd30]; //!\n",
             threads(64), {45}, {0}, SHARED_4096});
    reports({"one row of ldmatrix", kind,
             "mov.u32 %r20, sh;\n"
             "mad.lo.s32 %r20, %r3, 16, %r20;\n"
             "st.shared.v4.u32 [%r20], {%r3, %r3, %r3, %r3};\n"
             "bar.warp.sync -1;\n"
             "setp.eq.s32 %p1, %r3, 9;\n"
             "@%p1 add.s32 %r20, %r20, <<8||16>>;\n"
             "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r50,%r51,%r52,%r53}, [%r20]; //!\n",
             threads(32), {}, {0}, SHARED_4096});
}


// >>divergence and deadlock

/* A collective in a branch. The lanes that are missing wait at a barrier of the block, so
   that they can never arrive. */
static void missing_lanes(const char *what, const std::string &collective) {
    reports({what, {PTX_DIVERGED},
             "setp.gt.u32 %p1, %r3, 15;\n"
             "setp.lt.u32 %p2, %r3, 3;\n"
             "@%p1 bra $L_join;\n"
             + collective + "; //!\n"
             "$L_join:\n"
             "bar.sync 0;\n", threads(32), {}, {0}});
}

static void test_diverged(void) {
    const std::vector<ptx_fault_kind> kind = {PTX_DIVERGED};
    missing_lanes("shfl.sync of missing lanes",
                  "shfl.sync.bfly.b32 %r50|%p3, %r3, 1, 31, <<-1||0xffff>>");
    missing_lanes("vote.sync of missing lanes",
                  "vote.sync.ballot.b32 %r50, %p2, <<-1||65535>>");
    missing_lanes("bar.warp.sync of missing lanes", "bar.warp.sync <<-1||65535>>");
    missing_lanes("a mask in a register",
                  "mov.u32 %r51, <<0x1ffff||0xffff>>;\nvote.sync.ballot.b32 %r50, %p2, %r51");
    reports({"a lane that is not in its mask", kind,
             "shfl.sync.bfly.b32 %r50|%p3, %r3, 1, 31, <<0xfffffff7||-1>>; //!\n",
             threads(32), {}, {0}});
    reports({"lanes that pass different masks", kind,
             "setp.lt.u32 %p1, %r3, 16;\n"
             "selp.b32 %r51, <<-1||0xffff>>, 0xffff0000, %p1;\n"
             "vote.sync.ballot.b32 %r50, %p1, %r51; //!\n"
             "bar.sync 0;\n", threads(32), {}, {0}});
    reports({"mma.sync in a divergent branch", kind,
             "setp.gt.u32 %p1, %r3, <<15||31>>;\n"
             "mov.f32 %f1, 0f00000000;\n"
             "@%p1 bra $L_join;\n"
             "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1,%f1,%f1,%f1}, "
             "{%r1,%r1,%r1,%r1}, {%r1,%r1}, {%f1,%f1,%f1,%f1}; //!\n"
             "$L_join:\n"
             "bar.sync 0;\n", threads(32), {}, {0}});
    reports({"ldmatrix in a divergent branch", kind,
             "mov.u32 %r20, sh;\n"
             "shl.b32 %r21, %r3, 4;\n"
             "add.s32 %r20, %r20, %r21;\n"
             "st.shared.v4.u32 [%r20], {%r3, %r3, %r3, %r3};\n"
             "bar.warp.sync -1;\n"
             "setp.eq.s32 %p1, %r3, <<7||77>>;\n"
             "@%p1 bra $L_join;\n"
             "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r50,%r51,%r52,%r53}, [%r20]; //!\n"
             "$L_join:\n"
             "bar.sync 0;\n", threads(32), {}, {0}, SHARED_4096});
    reports({"a vote in a loop that lanes have left", kind,
             "mov.u32 %r20, <<%r3||0>>;\n"
             "$L_loop:\n"
             "setp.gt.u32 %p1, %r20, 7;\n"
             "vote.sync.ballot.b32 %r50, %p1, -1; //!\n"
             "add.s32 %r20, %r20, 1;\n"
             "setp.lt.u32 %p2, %r20, 31;\n"
             "@%p2 bra $L_loop;\n"
             "bar.sync 0;\n", threads(32), {}, {0}});
    reports({"bar.sync in one side of a branch", {PTX_DIVERGED, PTX_DEADLOCK},
             "setp.gt.u32 %p1, %r3, <<15||31>>;\n"
             "@%p1 bra $L_join;\n"
             "bar.sync 0; //!\n"
             "$L_join:\n"
             "mov.u32 %r50, 0;\n", threads(64), {}, {0}});
    reports({"two bar.sync in the two sides of a branch", {PTX_DIVERGED, PTX_DEADLOCK},
             "setp.gt.u32 %p1, %r3, <<15||31>>;\n"
             "@%p1 bra $L_high;\n"
             "bar.sync 0; //!\n"
             "bra.uni $L_join;\n"
             "$L_high:\n"
             "bar.sync 0; //!\n"
             "$L_join:\n"
             "mov.u32 %r50, 0;\n", threads(64), {}, {0}});
    reports({"bar.red in one side of a branch", {PTX_DIVERGED, PTX_DEADLOCK},
             "setp.gt.u32 %p1, %r3, <<15||31>>;\n"
             "@%p1 bra $L_join;\n"
             "bar.red.and.pred %p2, 0, %p1; //!\n"
             "$L_join:\n"
             "mov.u32 %r50, 0;\n", threads(64), {}, {0}});
}

static void test_deadlock(void) {
    const std::vector<ptx_fault_kind> kind = {PTX_DEADLOCK};
    reports({"a warp that exits before the barrier", kind,
             "setp.gt.u32 %p1, %r2, <<31||63>>;\n"
             "@%p1 bra $L_end;\n"
             "bar.sync 0; //!\n"
             "$L_end:\n", threads(64), {}, {0}});
    reports({"warps at different barriers", kind,
             "setp.gt.u32 %p1, %r2, <<31||63>>;\n"
             "@%p1 bra $L_other;\n"
             "bar.sync 0; //!\n"
             "bra.uni $L_end;\n"
             "$L_other:\n"
             "bar.sync 1; //!\n"
             "$L_end:\n", threads(64), {}, {0}});
    reports({"one barrier too few in a loop", kind,
             "mov.u32 %r20, 0;\n"
             "setp.lt.u32 %p2, %r2, 32;\n"
             "selp.b32 %r21, 5, <<6||5>>, %p2;\n"
             "$L_loop:\n"
             "bar.sync 0; //!\n"
             "add.s32 %r20, %r20, 1;\n"
             "setp.lt.u32 %p1, %r20, %r21;\n"
             "@%p1 bra $L_loop;\n", threads(96, 2), {}, {0, 1}});
    reports({"a warp that skips bar.red", kind,
             "setp.eq.s32 %p2, %r1, %r1;\n"
             "setp.gt.u32 %p1, %r2, <<63||95>>;\n"
             "@%p1 bra $L_end;\n"
             "bar.red.and.pred %p3, 0, %p2; //!\n"
             "$L_end:\n", threads(96), {}, {0}});
}


// >>cp.async

static void test_copy_not_awaited(void) {
    const std::vector<ptx_fault_kind> kind = {PTX_COPY_NOT_AWAITED};
    std::string head =
        "mov.u32 %r20, sh;\n"
        "shl.b32 %r21, %r2, 6;\n"
        "add.s32 %r20, %r20, %r21;\n"
        "mul.wide.u32 %rd30, %r2, 64;\n"
        "add.s64 %rd30, %rd2, %rd30;\n"
        "cp.async.cg.shared.global [%r20], [%rd30], 16, 16;\n";
    std::string second = "cp.async.cg.shared.global [%r20+16], [%rd30+16], 16, 16;\n";
    std::string third = "cp.async.cg.shared.global [%r20+32], [%rd30+32], 16, 16;\n";
    std::string commit = "cp.async.commit_group;\n";
    reports({"a read without a wait", kind,
             head + commit + "<<||cp.async.wait_group 0;>>\n"
                             "ld.shared.u32 %r50, [%r20+12]; //!\n",
             threads(32), from_to(0, 32), {0}, SHARED_4096});
    reports({"a write without a wait", kind,
             head + commit + "<<||cp.async.wait_group 0;>>\n"
                             "st.shared.u32 [%r20+4], %r2; //!\n",
             threads(32), from_to(0, 32), {0}, SHARED_4096});
    reports({"a wait that allows one group too many", kind,
             head + commit + "cp.async.wait_group <<1||0>>;\n"
                             "ld.shared.v4.u32 {%r50, %r51, %r52, %r53}, [%r20]; //!\n",
             threads(32), from_to(0, 32), {0}, SHARED_4096});
    reports({"three groups: a wait for the first only", kind,
             head + commit + second + commit + third + commit +
             "cp.async.wait_group <<2||1>>;\n"
             "ld.shared.u32 %r50, [%r20];\n"
             "ld.shared.u32 %r51, [%r20+16]; //!\n",
             threads(32), from_to(0, 32), {0}, SHARED_4096});
    reports({"an empty group counts", kind,
             head + commit + "<<||cp.async.commit_group;>>\n"
                             "cp.async.wait_group 1;\n"
                             "ld.shared.u32 %r50, [%r20]; //!\n",
             threads(32), from_to(0, 32), {0}, SHARED_4096});
    reports({"a copy that was not committed", kind,
             head + "<<||cp.async.commit_group;>>\n"
                    "cp.async.wait_group 0;\n"
                    "ld.shared.u32 %r50, [%r20]; //!\n",
             threads(32), from_to(0, 32), {0}, SHARED_4096});
    reports({"a copy after the commit", kind,
             head + commit + "<<||cp.async.wait_group 0;>>\n" + second +
             "<<||cp.async.commit_group;>>\n"
             "cp.async.wait_group 0;\n"
             "ld.shared.u32 %r50, [%r20+28]; //!\n",
             threads(32), from_to(0, 32), {0}, SHARED_4096});
    reports({"the filled part of a short copy", kind,
             replaced(head, "16, 16;", "16, 4;") + commit +
             "<<||cp.async.wait_group 0;>>\n"
             "ld.shared.u32 %r50, [%r20+12]; //!\n",
             threads(32), from_to(0, 32), {0}, SHARED_4096});
    reports({"a barrier in place of a wait", {PTX_COPY_NOT_AWAITED, PTX_SHARED_RACE},
             head + commit + "<<||cp.async.wait_group 0;>>\n"
                             "bar.sync 0;\n"
                             "xor.b32 %r22, %r21, 64;\n"
                             "mov.u32 %r23, sh;\n"
                             "add.s32 %r22, %r22, %r23;\n"
                             "ld.shared.u32 %r50, [%r22]; //!\n",
             threads(64), {}, {0}, SHARED_4096});
    /* Bytes next to the destination are not affected. */
    reports({"a read of the copy and of its neighbour", kind,
             head + "st.shared.u32 [%r20+16], %r2;\n" + commit +
             "ld.shared.u32 %r50, [%r20+<<12||16>>]; //!\n",
             threads(32), from_to(0, 32), {0}, SHARED_4096});
}


// >>launches

/* The registers of a block are those of its warps, rounded up to a multiple of 4 warps. A
   warp gets a multiple of 256. */
static void test_registers(void) {
    struct row {
        unsigned threads, registers;
        bool fits;
    };
    static const row rows[] = {
        {1024, 64, true},  {1024, 65, false}, {512, 128, true}, {512, 129, false},
        {256, 255, true},  {257, 255, false}, {384, 168, true}, {385, 168, false},
        {768, 80, true},   {800, 80, false},  {32, 255, true},  {1024, 0, true}};
    test_module m(ptx_program(""));
    if (!m.kernel) return;
    test_memory memory;
    const void *a = memory.out.data, *params[] = {&a, &a, &a, &memory.n};
    for (const row &r : rows) {
        ptx_launch l = {m.kernel, {1, 1, 1}, {r.threads, 1, 1}, 0, params, PTX_ASCENDING, 0};
        l.registers = r.registers;
        ptx_faults_clear();
        size_t n = ptx_run(&l);
        CHECK(n == !r.fits, "%u threads with %u registers: %zu faults", r.threads, r.registers, n);
        if (n) CHECK(ptx_fault_at(0)->kind == PTX_LAUNCH, "%s", ptx_fault_at(0)->text);
    }
    ptx_faults_clear();
}

static void launch_limit(const char *what, const std::string &text, launch_shape bad,
                         launch_shape good) {
    test_module m(text);
    if (!m.kernel) return;
    test_memory memory;
    ptx_faults_clear();
    memset(memory.out.data, 0xee, 64);
    size_t n = memory.run(m, bad);
    CHECK(n == 1 && ptx_fault_count() == 1, "%s: %zu faults", what, n);
    if (ptx_fault_count())
        CHECK(ptx_fault_at(0)->kind == PTX_LAUNCH && !strcmp(ptx_fault_at(0)->kernel, "k")
                  && ptx_fault_at(0)->text[0],
              "%s: %s", what, ptx_fault_name(ptx_fault_at(0)->kind));
    CHECK(memory.out.data[0] == 0xee, "%s: the kernel ran", what);
    ptx_faults_clear();
    n = memory.run(m, good);
    CHECK(n == 0, "%s, twin: %zu faults", what, n);
    CHECK(memory.out.data[0] == 0, "%s: the twin did not run", what);
    print_faults(what);
}

static void test_launch(void) {
    std::string body =
        "setp.ne.s32 %p1, %r2, 0;\n"
        "@%p1 bra $L_end;\n"
        "st.global.u32 [%rd1], %r4;\n"
        "$L_end:\n";
    std::string dynamic = ".extern .shared .align 16 .b8 memory[];";
    std::string plain = ptx_program(body, dynamic);
    launch_limit("1025 threads", plain, threads(1025), threads(1024));
    launch_limit("more threads than .maxntid", ptx_program(body, "", ".maxntid 128, 1, 1"),
                 threads(129), threads(128));
    launch_limit("227 KiB of shared memory on sm_90", plain, threads(32, 1, 232449),
                 threads(32, 1, 232448));
    launch_limit("163 KiB of shared memory on sm_80",
                 replaced(replaced(plain, "sm_90", "sm_80"), ".version 8.6", ".version 8.0"),
                 threads(32, 1, 166913), threads(32, 1, 166912));
    launch_limit("static and dynamic shared memory",
                 ptx_program("mov.u32 %r20, sh;\n" + body, dynamic + "\n" + SHARED_4096),
                 threads(32, 1, 232448), threads(32, 1, 232448 - 4096));
}


// >>what a fault contains

static void test_fault_text(void) {
    std::string body = std::string(PLACES) +
        "    .loc 1 17 5\n"
        "    mov.u32 %r30, 1;\n"
        "    .loc 2 29 1\n"
        "    ld.shared.u32 %r50, [%r20]; //!\n";
    std::string globals = std::string(SHARED_4096)
        + "\n.file 1 \"/some/where/first.cu\"\n.file 2 \"/some/where/second.h\"\n";
    test_module m(ptx_program(body, globals));
    if (!m.kernel) return;
    test_memory memory;
    ptx_faults_clear();
    CHECK(memory.run(m, threads(64, 2)) == 1, "%zu faults", ptx_fault_count());
    CHECK(memory.run(m, threads(64, 2)) == 1, "the second launch reports it too");
    CHECK(ptx_fault_count() == 2, "%zu faults", ptx_fault_count());
    for (size_t i = 0; i < ptx_fault_count(); i++) {
        const ptx_fault *f = ptx_fault_at(i);
        CHECK(strstr(f->source, "second.h") && f->source_line == 29, "%s:%d", f->source,
              f->source_line);
    }
    ptx_faults_clear();
    CHECK(ptx_fault_count() == 0, "cleared");
    std::set<std::string> names;
    for (int k = 0; k < PTX_FAULT_KINDS; k++) names.insert(ptx_fault_name((ptx_fault_kind)k));
    CHECK(names.size() == PTX_FAULT_KINDS && !names.count(""), "each kind has its name");
}

/* The place of a fault is complete even if the kernel's name is longer than the text. */
static void test_long_name(void) {
    std::string name = "_Z" + std::string(1000, 'a') + "_end";
    std::string text = replaced(ptx_program("ld.global.u32 %r50, [%rd1];\n"), ".entry k(",
                                ".entry " + name + "(");
    char error[512] = "";
    ptx_module *m = ptx_load(text.c_str(), text.size(), error, sizeof error);
    CHECK(m, "%s", error);
    if (!m) return;
    test_memory memory;
    const void *params[] = {&memory.out.data, &memory.in.data, &memory.extra.data, &memory.n};
    ptx_launch l = {ptx_kernel_at(m, 0), {1, 1, 1}, {32, 1, 1}, 0, params, PTX_ASCENDING, 0};
    ptx_faults_clear();
    CHECK(ptx_run(&l) == 1 && ptx_fault_count() == 1, "%zu faults", ptx_fault_count());
    const ptx_fault *f = ptx_fault_at(0);
    CHECK(name == f->kernel, "the name is complete in the fault");
    const char *const parts[] = {"PTX line", "ld.global.u32", "thread 0 of block 0,0,0", "_Zaaa",
                                 "_end"};
    for (const char *part : parts)
        CHECK(strstr(f->text, part), "expected %s in: %s", part, f->text);
    ptx_faults_clear();
    ptx_unload(m);
}

void test_faults(int argc, char **argv) {
    static const test_part parts[] = {
        {"unwritten_register", test_unwritten_register},
        {"unwritten_shared", test_unwritten_shared},
        {"unwritten_global", test_unwritten_global},
        {"written", test_written},
        {"bounds_global", test_bounds_global},
        {"bounds_other", test_bounds_other},
        {"bounds_variable", test_bounds_variable},
        {"bounds_effects", test_bounds_effects},
        {"misaligned", test_misaligned},
        {"diverged", test_diverged},
        {"deadlock", test_deadlock},
        {"copy_not_awaited", test_copy_not_awaited},
        {"launch", test_launch},
        {"registers", test_registers},
        {"fault_text", test_fault_text},
        {"long_name", test_long_name},
    };
    test_run(parts, sizeof parts / sizeof *parts, argc, argv);
}
