/* test_counters.cpp - tests of the counters: programs whose counts are known. */
#include "../../bench/cuda/machines.h"
#include "test_ptx.h"
#include <math.h>

static launch_shape threads(unsigned block, unsigned grid = 1) {
    launch_shape s;
    s.block = block;
    s.grid = grid;
    return s;
}

/* Runs a body once and returns its counters. */
static ptx_counters counted(const std::string &body, launch_shape s = {}) {
    ptx_counters c;
    memset(&c, 0, sizeof c);
    test_module m(ptx_program(body, SHARED_4096));
    if (!m.kernel) return c;
    test_memory memory;
    ptx_counters_clear();
    size_t faults = memory.run(m, s);
    CHECK(faults == 0, "%zu faults in\n%s", faults, body.c_str());
    print_faults("counters");
    return ptx_counters_of(m.kernel);
}

/* Returns what `body` adds to the counters of `before`. */
static ptx_counters added(const std::string &before, const std::string &body,
                          launch_shape s = {}) {
    ptx_counters a = counted(before, s), b = counted(before + body, s);
    uint64_t *x = (uint64_t *)&a, *y = (uint64_t *)&b;
    for (size_t i = 0; i < sizeof a / sizeof *x; i++) y[i] -= x[i];
    return b;
}


// >>instructions

static void test_instructions(void) {
    /* The kernel's frame has 10 instructions before the body and ret after it. */
    ptx_counters c = counted("add.s32 %r10, %r2, 1;\n"
                             "add.s32 %r11, %r10, 1;\n"
                             "mul.lo.s32 %r12, %r11, %r10;\n", threads(48, 3));
    CHECK(c.launches == 1 && c.blocks == 3 && c.warps == 6, "%llu launches, %llu warps",
          (unsigned long long)c.launches, (unsigned long long)c.warps);
    CHECK(c.instructions == 6 * 14, "%llu instructions", (unsigned long long)c.instructions);
    CHECK(c.thread_instructions == 3 * 48 * 14, "%llu of threads",
          (unsigned long long)c.thread_instructions);
    c = added("", "mov.u32 %r10, 0;\n"
                  "$L_loop:\n"
                  "add.s32 %r10, %r10, 1;\n"
                  "setp.lt.u32 %p1, %r10, 7;\n"
                  "@%p1 bra $L_loop;\n", threads(64));
    CHECK(c.instructions == 2 * (1 + 7 * 3), "%llu in a loop", (unsigned long long)c.instructions);
    CHECK(c.divergent_branches == 0, "a uniform loop");
    c = added("setp.lt.u32 %p1, %r3, 5;\n",
              "@%p1 bra $L_low;\n"          /* 32 lanes */
              "add.s32 %r10, %r3, 1;\n"     /* 27 */
              "add.s32 %r10, %r10, 1;\n"    /* 27 */
              "bra.uni $L_join;\n"          /* 27 */
              "$L_low:\n"
              "add.s32 %r10, %r3, 3;\n"     /* 5 */
              "$L_join:\n"
              "add.s32 %r10, %r10, 4;\n");  /* 32 */
    CHECK(c.instructions == 6, "%llu in a branch", (unsigned long long)c.instructions);
    CHECK(c.thread_instructions == 32 + 3 * 27 + 5 + 32, "%llu of threads",
          (unsigned long long)c.thread_instructions);
    CHECK(c.divergent_branches == 1, "%llu divergent branches",
          (unsigned long long)c.divergent_branches);
    CHECK(c.control == 2, "%llu control", (unsigned long long)c.control);
}

static void test_divergent(void) {
    std::string loop =
        "mov.u32 %r10, 0;\n"
        "$L_loop:\n"
        "add.s32 %r10, %r10, 1;\n"
        "setp.lt.u32 %p1, %r10, %r11;\n"
        "@%p1 bra $L_loop;\n";
    /* Lane l leaves after l % 4 + 1 rounds: three branches go both ways. */
    ptx_counters c = counted("and.b32 %r11, %r3, 3;\nadd.s32 %r11, %r11, 1;\n" + loop,
                             threads(64));
    CHECK(c.divergent_branches == 2 * 3, "%llu divergent branches",
          (unsigned long long)c.divergent_branches);
    c = counted("mov.u32 %r11, 4;\n" + loop, threads(64));
    CHECK(c.divergent_branches == 0, "%llu divergent branches",
          (unsigned long long)c.divergent_branches);
    /* Both warps are uniform, with different directions. */
    c = counted("setp.lt.u32 %p1, %r2, 32;\n@%p1 bra $L_low;\nadd.s32 %r10, %r2, 1;\n$L_low:\n",
                threads(64));
    CHECK(c.divergent_branches == 0, "%llu divergent branches",
          (unsigned long long)c.divergent_branches);
}

static void test_classes(void) {
    std::string head =
        "mov.f32 %f1, 0f3F800000;\nmov.f64 %fd1, 0d3FF0000000000000;\n"
        "setp.eq.s32 %p1, %r3, 0;\nmov.u32 %r20, sh;\nshl.b32 %r21, %r2, 4;\n"
        "add.s32 %r20, %r20, %r21;\n"
        "st.shared.v4.u32 [%r20], {%r3, %r3, %r3, %r3};\nbar.sync 0;\n";
    struct row {
        const char *op;
        uint64_t ptx_counters::*counter;
    };
    static const row rows[] = {
        {"add.f32 %f2, %f1, %f1;\n", &ptx_counters::arithmetic},
        {"fma.rn.f64 %fd2, %fd1, %fd1, %fd1;\n", &ptx_counters::doubles},
        {"setp.lt.f64 %p2, %fd1, %fd1;\n", &ptx_counters::doubles},
        {"mov.f64 %fd2, %fd1;\n", &ptx_counters::moves},
        {"mov.b64 %rd30, {%r3, %r3};\n", &ptx_counters::moves},
        {"cvta.to.global.u64 %rd30, %rd2;\n", &ptx_counters::moves},
        {"ld.param.u32 %r30, [k_param_3];\n", &ptx_counters::moves},
        {"selp.f64 %fd2, %fd1, %fd1, %p1;\n", &ptx_counters::arithmetic},
        {"cvt.f64.f32 %fd2, %f1;\n", &ptx_counters::conversion},
        {"mad.lo.s32 %r30, %r3, 3, %r3;\n", &ptx_counters::arithmetic},
        {"ex2.approx.ftz.f32 %f2, %f1;\n", &ptx_counters::special},
        {"rcp.approx.ftz.f32 %f2, %f1;\n", &ptx_counters::special},
        {"cvt.rn.f32.s32 %f2, %r3;\n", &ptx_counters::conversion},
        {"cvt.rn.bf16x2.f32 %r30, %f1, %f1;\n", &ptx_counters::conversion},
        {"shfl.sync.bfly.b32 %r30|%p2, %r3, 1, 31, -1;\n", &ptx_counters::shuffles},
        {"vote.sync.ballot.b32 %r30, %p1, -1;\n", &ptx_counters::collective},
        {"bar.sync 0;\n", &ptx_counters::barrier},
        {"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f2,%f3,%f4,%f5}, "
         "{%r3,%r3,%r3,%r3}, {%r3,%r3}, {%f1,%f1,%f1,%f1};\n", &ptx_counters::mma},
        {"ld.shared.u32 %r30, [%r20];\n", &ptx_counters::shared_loads},
        {"st.shared.u32 [%r20], %r3;\n", &ptx_counters::shared_stores},
        {"ld.global.u32 %r30, [%rd2];\n", &ptx_counters::global_loads},
        {"ld.u32 %r30, [%rd2];\n", &ptx_counters::global_loads},
    };
    for (const row &r : rows) {
        ptx_counters c = added(head, std::string(r.op) + r.op + r.op, threads(64, 2));
        const uint64_t *x = (const uint64_t *)&c;
        size_t classes = offsetof(ptx_counters, arithmetic) / sizeof *x;
        uint64_t sum = 0;
        for (size_t i = classes; i < offsetof(ptx_counters, global_bytes_read) / sizeof *x; i++)
            sum += x[i];
        CHECK(c.*r.counter == 12, "%s: %llu", r.op, (unsigned long long)(c.*r.counter));
        CHECK(c.instructions == 12 && sum == 12, "%s: %llu in all classes", r.op,
              (unsigned long long)sum);
    }
    ptx_counters c = added("", ".local .align 8 .b8 depot[8];\nmov.u64 %rd30, depot;\n"
                               "st.local.u64 [%rd30], %rd1;\nld.local.u64 %rd31, [%rd30];\n");
    CHECK(c.local == 2 && c.global_loads == 0, "%llu local", (unsigned long long)c.local);
}


// >>global memory

/* A load or store of 32 lanes whose addresses differ by `stride` bytes. */
static void sectors(const char *op, int stride, int offset, uint64_t bytes, uint64_t expected) {
    bool load = op[0] == 'l';
    std::string at = "[%rd30+" + std::to_string(offset) + "]";
    std::string head = "mul.wide.u32 %rd30, %r3, " + std::to_string(stride) + ";\n"
        + "add.s64 %rd30, " + (load ? "%rd2" : "%rd1") + ", %rd30;\n"
        + "mov.f32 %f40, 0f3F800000;\nmov.f32 %f41, %f40;\nmov.f32 %f42, %f40;\n"
          "mov.f32 %f43, %f40;\ncvt.u16.u32 %rs40, %r3;\nmov.f64 %fd40, 0d3FF0000000000000;\n";
    std::string type = strchr(op + 3, '.') + 1, regs = "%f40";
    if (type == "v4.f32") regs = "{%f40, %f41, %f42, %f43}";
    if (type == "v2.f32") regs = "{%f40, %f41}";
    if (type == "u16") regs = "%rs40";
    if (type == "f64") regs = "%fd40";
    std::string operands = load ? regs + ", " + at : at + ", " + regs;
    ptx_counters c = added(head, std::string(op) + " " + operands + ";\n");
    uint64_t n = load ? c.sectors_read : c.sectors_written;
    uint64_t b = load ? c.global_bytes_read : c.global_bytes_written;
    CHECK(n == expected, "%s, stride %d, offset %d: %llu sectors, expected %llu", op, stride,
          offset, (unsigned long long)n, (unsigned long long)expected);
    CHECK(b == bytes, "%s, stride %d: %llu bytes, expected %llu", op, stride,
          (unsigned long long)b, (unsigned long long)bytes);
    CHECK((load ? c.sectors_written : c.sectors_read) == 0, "%s: the other direction", op);
    CHECK((load ? c.global_loads : c.global_stores) == 1, "%s: one request", op);
}

static void test_sectors(void) {
    sectors("ld.global.f32", 4, 0, 128, 4);
    sectors("ld.global.f32", 4, 4, 128, 5);
    sectors("ld.global.f32", 4, 32, 128, 4);
    sectors("ld.global.f32", 8, 0, 128, 8);
    sectors("ld.global.f32", 16, 0, 128, 16);
    sectors("ld.global.f32", 32, 0, 128, 32);
    sectors("ld.global.f32", 1024, 0, 128, 32);
    sectors("ld.global.f32", 0, 0, 128, 1);
    sectors("ld.global.u16", 2, 0, 64, 2);
    sectors("ld.global.u16", 64, 0, 64, 32);
    sectors("ld.global.f64", 8, 0, 256, 8);
    sectors("ld.global.v2.f32", 8, 0, 256, 8);
    sectors("ld.global.v4.f32", 16, 0, 512, 16);
    sectors("ld.global.v4.f32", 16, 16, 512, 17);
    sectors("ld.global.v4.f32", 32, 0, 512, 32);
    sectors("st.global.f32", 4, 0, 128, 4);
    sectors("st.global.f32", 4, 28, 128, 5);
    sectors("st.global.f32", 64, 0, 128, 32);
    sectors("st.global.u16", 2, 0, 64, 2);
    sectors("st.global.v4.f32", 16, 0, 512, 16);
    sectors("st.global.f64", 32, 0, 256, 32);
    /* Only the active lanes count. */
    ptx_counters c = added("mul.wide.u32 %rd30, %r3, 32;\nadd.s64 %rd30, %rd2, %rd30;\n"
                           "setp.lt.u32 %p1, %r3, 5;\n", "@%p1 ld.global.u32 %r30, [%rd30];\n");
    CHECK(c.sectors_read == 5 && c.global_bytes_read == 20, "%llu sectors of 5 lanes",
          (unsigned long long)c.sectors_read);
    c = added("mov.u32 %r20, sh;\nshl.b32 %r21, %r3, 4;\nadd.s32 %r20, %r20, %r21;\n"
              "mul.wide.u32 %rd30, %r3, 16;\nadd.s64 %rd30, %rd2, %rd30;\n",
              "cp.async.cg.shared.global [%r20], [%rd30], 16, 16;\n"
              "cp.async.commit_group;\ncp.async.wait_group 0;\n");
    CHECK(c.sectors_read == 16 && c.global_bytes_read == 512, "cp.async: %llu sectors",
          (unsigned long long)c.sectors_read);
}

/* The sectors that the requested bytes need at least, and those of a launch. */
static void test_ideal(void) {
    const struct {
        const char *what;
        std::string offset;             /* sets %r20 */
        const char *body;               /* accesses [%rd30] */
        uint64_t sectors, ideal, unique;
    } rows[] = {
        {"adjacent", "shl.b32 %r20, %r3, 2;\n", "ld.global.u32 %r30, [%rd30];\n", 4, 4, 4},
        {"not aligned", "shl.b32 %r20, %r3, 2;\n", "ld.global.u32 %r30, [%rd30+4];\n", 5, 4, 5},
        {"one sector each", "shl.b32 %r20, %r3, 5;\n", "ld.global.u32 %r30, [%rd30];\n", 32, 4, 32},
        {"descending", "mul.lo.s32 %r20, %r3, -4;\nadd.s32 %r20, %r20, 124;\n",
         "ld.global.u32 %r30, [%rd30];\n", 4, 4, 4},
        {"all the same", "mov.u32 %r20, 0;\n", "ld.global.u32 %r30, [%rd30];\n", 1, 1, 1},
        {"pairs of lanes", "and.b32 %r20, %r3, 30;\nshl.b32 %r20, %r20, 2;\n",
         "ld.global.u32 %r30, [%rd30];\n", 4, 2, 4},
        {"16 bytes", "shl.b32 %r20, %r3, 6;\n",
         "ld.global.v4.u32 {%r30, %r31, %r32, %r33}, [%rd30];\n", 32, 16, 32},
        {"twice", "shl.b32 %r20, %r3, 2;\n",
         "ld.global.u32 %r30, [%rd30];\nld.global.u32 %r31, [%rd30+32];\n", 8, 8, 5},
    };
    for (const auto &r : rows) {
        ptx_counters c = added(r.offset + "cvt.u64.u32 %rd31, %r20;\nadd.s64 %rd30, %rd2, %rd31;\n",
                               r.body, threads(32, 3));
        CHECK(c.sectors_read == 3 * r.sectors, "%s: %llu sectors", r.what,
              (unsigned long long)c.sectors_read);
        CHECK(c.ideal_read == 3 * r.ideal, "%s: %llu ideal", r.what,
              (unsigned long long)c.ideal_read);
        CHECK(c.unique_read == r.unique, "%s: %llu unique", r.what,
              (unsigned long long)c.unique_read);
        CHECK(c.ideal_written == 0 && c.unique_written == 0, "%s: writes", r.what);
    }
    /* A launch counts its sectors again; reads and writes are separate. */
    test_module m(ptx_program("ld.global.u32 %r30, [%rd3];\nbar.warp.sync -1;\n"
                              "mul.wide.u32 %rd30, %r3, 8;\nadd.s64 %rd30, %rd1, %rd30;\n"
                              "st.global.u32 [%rd30], %r30;\n"));
    if (!m.kernel) return;
    test_memory memory;
    ptx_counters_clear();
    for (int i = 0; i < 2; i++) CHECK(memory.run(m, threads(32)) == 0, "faults");
    ptx_counters c = ptx_counters_of(m.kernel);
    CHECK(c.unique_read == 2 && c.unique_written == 2 * 8, "%llu read, %llu written in 2 launches",
          (unsigned long long)c.unique_read, (unsigned long long)c.unique_written);
    CHECK(c.sectors_written == 2 * 8 && c.ideal_written == 2 * 4, "%llu sectors written",
          (unsigned long long)c.sectors_written);
    /* Atomics read and write; cp.async reads. */
    c = added("", "atom.global.add.u32 %r30, [%rd2+64], 1;\n", threads(32, 2));
    CHECK(c.unique_read == 1 && c.unique_written == 1, "atomics: %llu and %llu",
          (unsigned long long)c.unique_read, (unsigned long long)c.unique_written);
    c = added("mov.u32 %r20, sh;\nshl.b32 %r21, %r3, 4;\nadd.s32 %r20, %r20, %r21;\n"
              "mul.wide.u32 %rd30, %r3, 32;\nadd.s64 %rd30, %rd2, %rd30;\n",
              "cp.async.cg.shared.global [%r20], [%rd30], 16, 16;\n"
              "cp.async.commit_group;\ncp.async.wait_group 0;\n", threads(32, 2));
    CHECK(c.unique_read == 32 && c.ideal_read == 2 * 16, "cp.async: %llu unique, %llu ideal",
          (unsigned long long)c.unique_read, (unsigned long long)c.ideal_read);
}


// >>shared memory

/* Passes over the banks of an access of 32 lanes with a stride in bytes. */
static void wavefronts(const char *op, int stride, uint64_t expected, uint64_t ideal) {
    bool load = op[0] == 'l';
    std::string head =
        "mov.u32 %r20, sh;\nshl.b32 %r21, %r3, 2;\nadd.s32 %r20, %r20, %r21;\n"
        "mov.u32 %r22, 0;\n"
        "$L_fill:\nst.shared.u32 [%r20], %r3;\nadd.s32 %r20, %r20, 128;\n"
        "add.s32 %r22, %r22, 1;\nsetp.lt.u32 %p1, %r22, 64;\n@%p1 bra $L_fill;\nbar.sync 0;\n"
        "mov.u32 %r20, sh;\nmad.lo.s32 %r20, %r3, " + std::to_string(stride) + ", %r20;\n"
        "mov.u32 %r40, 1;\nmov.u32 %r41, 2;\nmov.u32 %r42, 3;\nmov.u32 %r43, 4;\n"
        "mov.u64 %rd40, 5;\ncvt.u16.u32 %rs40, %r3;\n";
    std::string type = strrchr(op, 'v') ? strrchr(op, 'v') : strrchr(op, '.') + 1, regs = "%r40";
    if (type == "v4.u32") regs = "{%r40, %r41, %r42, %r43}";
    if (type == "v2.u32") regs = "{%r40, %r41}";
    if (type == "u64") regs = "%rd40";
    if (type == "u16") regs = "%rs40";
    std::string access = std::string(op) + " "
        + (load ? regs + ", [%r20]" : "[%r20], " + regs) + ";\n";
    test_memory memory;
    std::string globals = ".shared .align 16 .b8 sh[8192];";
    ptx_counters c[2];
    for (int i = 0; i < 2; i++) {
        test_module m(ptx_program(head + (i ? access : ""), globals));
        if (!m.kernel) return;
        ptx_counters_clear();
        CHECK(memory.run(m, {}) == 0, "%s", op);
        print_faults(op);
        c[i] = ptx_counters_of(m.kernel);
    }
    uint64_t n = c[1].shared_wavefronts - c[0].shared_wavefronts;
    uint64_t m = c[1].shared_ideal - c[0].shared_ideal;
    CHECK(n == expected, "%s, stride %d: %llu wavefronts, expected %llu", op, stride,
          (unsigned long long)n, (unsigned long long)expected);
    CHECK(m == ideal, "%s, stride %d: %llu ideal, expected %llu", op, stride,
          (unsigned long long)m, (unsigned long long)ideal);
}

static void test_wavefronts(void) {
    wavefronts("ld.shared.u32", 4, 1, 1);
    wavefronts("ld.shared.u32", 0, 1, 1);
    wavefronts("ld.shared.u32", 8, 2, 1);
    wavefronts("ld.shared.u32", 12, 1, 1);
    wavefronts("ld.shared.u32", 16, 4, 1);
    wavefronts("ld.shared.u32", 32, 8, 1);
    wavefronts("ld.shared.u32", 64, 16, 1);
    wavefronts("ld.shared.u32", 128, 32, 1);
    wavefronts("ld.shared.u32", 132, 1, 1);
    wavefronts("ld.shared.u32", 136, 2, 1);
    wavefronts("ld.shared.u16", 2, 1, 1);
    wavefronts("ld.shared.u16", 4, 1, 1);
    wavefronts("ld.shared.u64", 8, 2, 2);
    wavefronts("ld.shared.v2.u32", 8, 2, 2);
    wavefronts("ld.shared.v4.u32", 16, 4, 4);
    wavefronts("st.shared.u32", 4, 1, 1);
    wavefronts("st.shared.u32", 8, 2, 1);
    wavefronts("st.shared.u32", 128, 32, 1);
    wavefronts("st.shared.v4.u32", 16, 4, 4);
    /* ldmatrix reads eight rows of 16 bytes per pass if their banks differ. */
    std::string head = "mov.u32 %r20, sh;\nshl.b32 %r21, %r3, 2;\nadd.s32 %r20, %r20, %r21;\n"
                       "mov.u32 %r22, 0;\n$L_fill:\nst.shared.u32 [%r20], %r3;\n"
                       "add.s32 %r20, %r20, 128;\nadd.s32 %r22, %r22, 1;\n"
                       "setp.lt.u32 %p1, %r22, 32;\n@%p1 bra $L_fill;\nbar.sync 0;\n"
                       "mov.u32 %r20, sh;\nmad.lo.s32 %r20, %r3, STRIDE, %r20;\n";
    std::string op =
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r40, %r41, %r42, %r43}, [%r20];\n";
    ptx_counters c = added(replaced(head, "STRIDE", "80"), op);
    CHECK(c.shared_wavefronts == 4 && c.shared_ideal == 4, "ldmatrix: %llu wavefronts",
          (unsigned long long)c.shared_wavefronts);
    c = added(replaced(head, "STRIDE", "64"), op);
    CHECK(c.shared_wavefronts == 16 && c.shared_ideal == 4, "ldmatrix: %llu wavefronts",
          (unsigned long long)c.shared_wavefronts);
}

/* The accesses of single instructions. */
static void test_accesses(void) {
    test_module m(ptx_program("mov.u32 %r20, sh;\nshl.b32 %r21, %r3, 3;\n"
                              "add.s32 %r20, %r20, %r21;\n"
                              "st.shared.u32 [%r20], %r3;\n"
                              "mul.wide.u32 %rd30, %r3, 16;\nadd.s64 %rd30, %rd2, %rd30;\n"
                              "ld.global.u32 %r30, [%rd30];\nst.global.u32 [%rd1], 7;\n",
                              SHARED_4096));
    if (!m.kernel) return;
    struct row {
        const char *instruction;
        uint64_t units, ideal;
    };
    static const row rows[] = {{"st.shared.u32", 2, 1}, {"ld.global.u32", 16, 4},
                               {"st.global.u32", 1, 1}};
    test_memory memory;
    for (uint64_t runs = 1; runs <= 2; runs++) {
        if (runs == 1) ptx_counters_clear();
        CHECK(memory.run(m, threads(32)) == 0, "faults");
        print_faults("accesses");
        ptx_access a;
        size_t found = 0;
        for (size_t i = 0; ptx_access_at(m.kernel, i, &a); i++) {
            if (!a.requests) continue;
            const row &r = rows[found++ % 3];
            CHECK(r.instruction == std::string(a.instruction), "%s", a.instruction);
            CHECK(a.requests == runs && a.units == runs * r.units && a.ideal == runs * r.ideal,
                  "%s: %llu requests, %llu units, %llu ideal", a.instruction,
                  (unsigned long long)a.requests, (unsigned long long)a.units,
                  (unsigned long long)a.ideal);
            CHECK(!strncmp(a.place, "PTX line ", 9), "place %s", a.place);
        }
        CHECK(found == 3, "%zu instructions with accesses", found);
    }
    ptx_counters_clear();
    ptx_access a;
    CHECK(!ptx_access_at(m.kernel, 0, &a), "accesses are cleared");
    CHECK(memory.run(m, threads(32)) == 0, "faults");
    uint64_t requests = 0;
    for (size_t i = 0; ptx_access_at(m.kernel, i, &a); i++) requests += a.requests;
    CHECK(requests == 3, "%llu requests after the clear", (unsigned long long)requests);
}


// >>bench/cuda/machines.h

/* Blocks per multiprocessor as NVIDIA's cuda_occupancy.h of CUDA 13.0 gives them. */
static void test_occupancy(void) {
    struct row {
        int machine, threads, registers;
        size_t shared;
        int blocks, warps;
        const char *limit;
    };
    static const row rows[] = {
        {A100, 256, 32, 0, 8, 64, "warps"},
        {A100, 256, 33, 0, 6, 48, "regs"},     /* a warp has 1280 */
        {A100, 256, 40, 0, 6, 48, "regs"},
        {A100, 128, 255, 0, 2, 8, "regs"},     /* 2 warps in each partition */
        {A100, 96, 255, 0, 2, 6, "regs"},      /* 8 warps in all */
        {A100, 160, 255, 0, 1, 5, "regs"},
        {A100, 32, 88, 0, 20, 20, "regs"},     /* 5 warps in each partition */
        {A100, 288, 255, 0, 0, 0, "regs"},
        {A100, 1024, 64, 0, 1, 32, "regs"},
        {A100, 1024, 65, 0, 0, 0, "regs"},
        {A100, 32, 16, 0, 32, 32, "blocks"},
        {A100, 1, 16, 0, 32, 32, "blocks"},
        {A100, 96, 16, 0, 21, 63, "warps"},
        {A100, 64, 16, 163 << 10, 1, 2, "smem"},
        {A100, 64, 16, (163 << 10) + 1, 0, 0, "smem"},
        {A100, 64, 16, 81 << 10, 2, 4, "smem"},   /* with 1 KiB each that is reserved */
        {A100, 64, 16, (81 << 10) + 1, 1, 2, "smem"},
        {A100, 64, 16, 10150, 14, 28, "smem"},    /* 11174 bytes are 88 units of 128 */
        {A100, 64, 16, 9473, 15, 30, "smem"},
        {A100, 64, 16, 9472, 16, 32, "smem"},
        {H100, 64, 16, 227 << 10, 1, 2, "smem"},
        {H100, 64, 16, 113 << 10, 2, 4, "smem"},
        {H100, 64, 16, (113 << 10) + 1, 1, 2, "smem"},
        {H100, 128, 168, 74 << 10, 3, 12, "regs"},
        {H200, 128, 168, 100 << 10, 2, 8, "smem"},
    };
    for (const row &r : rows) {
        occupancy o = occupancy_of(&machines[r.machine], r.threads, r.registers, r.shared);
        CHECK(o.blocks == r.blocks && o.warps == r.warps && r.limit == std::string(o.limit),
              "%s, %d threads, %d registers, %zu bytes: %d blocks, %d warps by %s",
              machines[r.machine].name, r.threads, r.registers, r.shared, o.blocks, o.warps,
              o.limit);
    }
}

/* One unit of work more than the others bound, for each resource. */
static void test_bounds(void) {
    /* amounts that take 1000 clocks */
    static const double amount[2][RESOURCES] = {
        {0, 4000, 1000, 1000, 1000, 500, 500},      /* A100 */
        {0, 4000, 1000, 1000, 2000, 500, 1000}};    /* H100 */
    for (int m = A100; m <= H100; m++) {
        for (int most = 0; most < RESOURCES; most++) {
            double of[RESOURCES], clocks[RESOURCES];
            for (int i = 0; i < RESOURCES; i++) of[i] = amount[m][i];
            of[R_MEMORY] = 1000 * machine_bytes(&machines[m]);
            of[most] *= 1.25;
            int found = machine_clocks(&machines[m], of, clocks);
            CHECK(found == most && fabs(clocks[most] - 1250) < 1e-9, "%s: %s, %g clocks",
                  machines[m].name, resource_name[found], clocks[found]);
        }
    }
    CHECK(fabs(machine_bytes(&machines[A100]) - 13.390) < 1e-3, "A100: %g bytes per clock",
          machine_bytes(&machines[A100]));
    CHECK(fabs(machine_bytes(&machines[H100]) - 13.868) < 1e-3, "H100: %g bytes per clock",
          machine_bytes(&machines[H100]));
    CHECK(fabs(machine_bytes(&machines[H200]) - 19.871) < 1e-3, "H200: %g bytes per clock",
          machine_bytes(&machines[H200]));
}

/* Counters belong to one kernel, accumulate over launches and can be cleared. */
static void test_clear(void) {
    test_module a(ptx_program("")), b(ptx_program("add.s32 %r10, %r2, 1;\n"));
    if (!a.kernel || !b.kernel) return;
    test_memory memory;
    ptx_counters_clear();
    for (int i = 0; i < 3; i++) memory.run(a, threads(32));
    memory.run(b, threads(32, 5));
    CHECK(ptx_counters_of(a.kernel).launches == 3, "launches of the first");
    CHECK(ptx_counters_of(b.kernel).launches == 1, "launches of the second");
    CHECK(ptx_counters_of(a.kernel).instructions == 3 * 11, "instructions of the first");
    CHECK(ptx_counters_of(b.kernel).instructions == 5 * 12, "instructions of the second");
    ptx_counters_clear();
    CHECK(ptx_counters_of(a.kernel).launches == 0 && ptx_counters_of(b.kernel).blocks == 0,
          "cleared");
    CHECK(ptx_launches(a.kernel) == 3, "launches of the kernel are not cleared");
}

void test_counters(int argc, char **argv) {
    static const test_part parts[] = {
        {"instructions", test_instructions}, {"divergent", test_divergent},
        {"classes", test_classes},           {"sectors", test_sectors},
        {"ideal", test_ideal},
        {"wavefronts", test_wavefronts},     {"clear", test_clear},
        {"accesses", test_accesses},         {"occupancy", test_occupancy},
        {"bounds", test_bounds},
    };
    test_run(parts, sizeof parts / sizeof *parts, argc, argv);
}
