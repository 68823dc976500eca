/* test_races.cpp - data races in shared and global memory: programs that must report one,
   in all orders of blocks and warps, and twins that must not. */
#include "test_ptx.h"

static launch_shape threads(unsigned block, unsigned grid = 1) {
    launch_shape s;
    s.block = block;
    s.grid = grid;
    return s;
}

/* All of sh is written, and a barrier passed. */
static std::string initialized(void) {
    std::string text =
        "    mov.u32 %r90, sh;\n"
        "    shl.b32 %r91, %r2, 2;\n"
        "    add.s32 %r90, %r90, %r91;\n"
        "    mov.u32 %r92, %ntid.x;\n"
        "    shl.b32 %r92, %r92, 2;\n"
        "    mov.u32 %r93, sh;\n"
        "    add.s32 %r93, %r93, 4096;\n"
        "    mov.u32 %r94, 0;\n"
        "$L_init:\n"
        "    st.shared.u32 [%r90], %r94;\n"
        "    add.s32 %r90, %r90, %r92;\n"
        "    setp.lt.u32 %p30, %r90, %r93;\n"
        "    @%p30 bra $L_init;\n"
        "    bar.sync 0;\n";
    return text + PLACES;
}

static void shared_race(const char *what, const std::string &body, launch_shape s,
                        const std::vector<unsigned> &who = {}) {
    reports({what, {PTX_SHARED_RACE}, initialized() + body, s, who, {}, SHARED_4096});
}

/* A copy by another thread may be reported as a race or as a pending copy. */
static void copy_race(const char *what, const std::string &body, launch_shape s) {
    reports({what, {PTX_SHARED_RACE, PTX_COPY_NOT_AWAITED}, initialized() + body, s, {}, {},
             SHARED_4096});
}

static void global_race(const char *what, const std::string &body, launch_shape s,
                        const std::vector<unsigned> &who = {}) {
    reports({what, {PTX_GLOBAL_RACE}, std::string(PLACES) + body, s, who, {}, SHARED_4096});
}


// >>two threads

/* Thread a makes the first access and thread b the second; `between` is between them. */
static std::string pair(unsigned a, const std::string &first, unsigned b,
                        const std::string &second, const std::string &between) {
    return "setp.eq.s32 %p1, %r2, " + std::to_string(a) + ";\n"
        + "setp.eq.s32 %p2, %r2, " + std::to_string(b) + ";\n"
        + "@%p1 " + first + "; //!\n" + between + "\n"
        + "@%p2 " + second + "; //!\n";
}

static void test_pairs(void) {
    struct kind {
        const char *name, *first, *second;
    };
    static const kind shared[] = {
        {"write, read", "st.shared.u32 [sh+8], %r2", "ld.shared.u32 %r50, [sh+8]"},
        {"read, write", "ld.shared.u32 %r50, [sh+8]", "st.shared.u32 [sh+8], %r2"},
        {"write, write", "st.shared.u32 [sh+8], %r2", "st.shared.u32 [sh+8], %r2"},
        {"write of a byte, read of its word", "st.shared.u8 [sh+11], %r2",
         "ld.shared.u32 %r50, [sh+8]"},
        {"vector, scalar", "st.shared.v4.u32 [sh+16], {%r2, %r2, %r2, %r2}",
         "st.shared.u32 [sh+28], %r2"},
        {"read of a vector, write of a byte", "ld.shared.v2.u32 {%r50, %r51}, [sh+8]",
         "st.shared.u8 [sh+12], %r2"},
    };
    static const kind global[] = {
        {"write, read", "st.global.u32 [%rd3+8], %r2", "ld.global.u32 %r50, [%rd3+8]"},
        {"read, write", "ld.global.u32 %r50, [%rd3+8]", "st.global.u32 [%rd3+8], %r2"},
        {"write, write", "st.global.u32 [%rd3+8], %r2", "st.global.u32 [%rd3+8], %r2"},
        {"generic write, read", "st.u32 [%rd3+8], %r2", "ld.global.u32 %r50, [%rd3+8]"},
        {"vector, half word", "st.global.v4.u32 [%rd3+16], {%r2, %r2, %r2, %r2}",
         "ld.global.u16 %rs50, [%rd3+30]"},
    };
    for (int space = 0; space < 2; space++)
        for (int i = 0; i < (space ? 5 : 6); i++) {
            const kind &k = space ? global[i] : shared[i];
            auto test = space ? global_race : shared_race;
            std::string name = std::string(k.name) + (space ? " of global" : " of shared")
                + " memory";
            test((name + ", two warps").c_str(),
                 pair(3, k.first, 40, k.second, "<<||bar.sync 0;>>"), threads(64), {3, 40});
            test((name + ", two warps and bar.warp.sync").c_str(),
                 pair(33, k.first, 2, k.second, "<<bar.warp.sync -1;||bar.sync 0;>>"),
                 threads(64), {33, 2});
            test((name + ", two warps and bar.red").c_str(),
                 pair(33, k.first, 2, k.second, "<<||bar.red.and.pred %p3, 0, %p1;>>"),
                 threads(64), {33, 2});
            test((name + ", one warp").c_str(),
                 pair(40, k.first, 55, k.second, "<<||bar.warp.sync -1;>>"), threads(64),
                 {40, 55});
            test((name + ", one warp and bar.sync").c_str(),
                 pair(55, k.first, 40, k.second, "<<||bar.sync 0;>>"), threads(64), {40, 55});
            /* The collective is no barrier: it does not order memory. */
            test((name + ", one warp and a shuffle").c_str(),
                 pair(40, k.first, 55, k.second,
                      "<<shfl.sync.bfly.b32 %r60|%p4, %r2, 1, 31, -1;||bar.warp.sync -1;>>"),
                 threads(64), {40, 55});
            /* The twin: the same thread makes both accesses. */
            test((name + ", one thread").c_str(),
                 pair(40, k.first, 40, k.second, "")
                     + "<<setp.eq.s32 %p5, %r2, 41;\n@%p5 " + k.first + "; //!\n||>>",
                 threads(64), {40, 41});
        }
}

/* Accesses that are allowed next to each other. */
static void test_bytes(void) {
    shared_race("bytes of one word by different threads",
                "mov.u32 %r30, sh;\n"
                "shr.u32 %r31, %r2, <<1||0>>;\n"
                "add.s32 %r30, %r30, %r31;\n"
                "st.shared.u8 [%r30], %r2; //!\n", threads(64));
    shared_race("a word and the half word after it",
                "setp.eq.s32 %p1, %r2, 0;\n"
                "setp.eq.s32 %p2, %r2, 32;\n"
                "@%p1 st.shared.u32 [sh+16], %r2; //!\n"
                "@%p2 st.shared.u8 [sh+<<19||20>>], %r2; //!\n", threads(64), {0, 32});
    global_race("half words of one word by different blocks",
                "mul.wide.u32 %rd30, %r4, <<0||2>>;\n"
                "add.s64 %rd30, %rd3, %rd30;\n"
                "cvt.u16.u32 %rs1, %r4;\n"
                "st.global.u16 [%rd30], %rs1; //!\n", threads(1, 2), {0});
    test_memory memory;
    runs_clean("reads of the same memory by all threads",
               ptx_program(initialized() +
                           "ld.shared.u32 %r50, [sh+4];\n"
                           "ld.shared.v4.u32 {%r51, %r52, %r53, %r54}, [sh];\n"
                           "ld.global.u32 %r55, [%rd3];\n"
                           "ld.global.v4.u32 {%r51, %r52, %r53, %r54}, [%rd3];\n",
                           SHARED_4096),
               threads(96, 3), memory, [] {});
}

/* Two lanes write one address by one instruction, with different values. */
static void test_one_instruction(void) {
    shared_race("two lanes store to one address of shared memory",
                "and.b32 %r30, %r2, <<15||31>>;\n"
                "shl.b32 %r30, %r30, 2;\n"
                "mov.u32 %r31, sh;\n"
                "add.s32 %r31, %r31, %r30;\n"
                "st.shared.u32 [%r31], %r2; //!\n", threads(32));
    global_race("two lanes store to one address of global memory",
                "and.b32 %r30, %r2, <<15||31>>;\n"
                "mul.wide.u32 %rd30, %r30, 4;\n"
                "add.s64 %rd30, %rd3, %rd30;\n"
                "st.global.u32 [%rd30], %r2; //!\n", threads(32));
    shared_race("only the first lanes of two runs store the same value",
                "and.b32 %r30, %r2, 15;\n"
                "setp.eq.s32 %p1, %r2, 16;\n"
                "selp.b32 %r33, 0, <<%r2||%r30>>, %p1;\n"
                "shl.b32 %r30, %r30, 2;\n"
                "mov.u32 %r31, sh;\n"
                "add.s32 %r31, %r31, %r30;\n"
                "st.shared.u32 [%r31], %r33; //!\n", threads(32));
    shared_race("two lanes store to one address, with another lane between them",
                "setp.eq.s32 %p1, %r2, 1;\n"
                "selp.b32 %r30, 4, 8, %p1;\n"
                "mov.u32 %r31, sh;\n"
                "add.s32 %r31, %r31, %r30;\n"
                "st.shared.u32 [%r31], <<%r2||5>>; //!\n", threads(3));
    shared_race("two lanes whose vectors overlap",
                "and.b32 %r30, %r2, <<15||31>>;\n"
                "shl.b32 %r30, %r30, 4;\n"
                "mov.u32 %r31, sh;\n"
                "add.s32 %r31, %r31, %r30;\n"
                "st.shared.v4.u32 [%r31], {%r2, %r2, %r2, %r2}; //!\n", threads(32));
}


// >>patterns of kernels

static void test_patterns(void) {
    shared_race("an exchange between neighbours of a warp",
                "st.shared.u32 [%r20], %r2; //!\n"
                "<<||bar.warp.sync -1;>>\n"
                "xor.b32 %r30, %r21, 4;\n"
                "mov.u32 %r31, sh;\n"
                "add.s32 %r30, %r30, %r31;\n"
                "ld.shared.u32 %r50, [%r30]; //!\n", threads(64));
    shared_race("an exchange between halves of a block",
                "st.shared.u32 [%r20], %r2; //!\n"
                "<<bar.warp.sync -1;||bar.sync 0;>>\n"
                "xor.b32 %r30, %r21, 128;\n"
                "mov.u32 %r31, sh;\n"
                "add.s32 %r30, %r30, %r31;\n"
                "ld.shared.u32 %r50, [%r30]; //!\n", threads(64));
    shared_race("shared memory that is reused in a loop",
                "mov.u32 %r32, 0;\n"
                "$L_loop:\n"
                "st.shared.u32 [%r20], %r32; //!\n"
                "bar.sync 0;\n"
                "xor.b32 %r30, %r21, 128;\n"
                "mov.u32 %r31, sh;\n"
                "add.s32 %r30, %r30, %r31;\n"
                "ld.shared.u32 %r50, [%r30]; //!\n"
                "<<||bar.sync 0;>>\n"
                "add.s32 %r32, %r32, 1;\n"
                "setp.lt.u32 %p1, %r32, 3;\n"
                "@%p1 bra $L_loop;\n", threads(64));
    /* Two buffers in turn need one barrier per round. */
    shared_race("a double buffer",
                "mov.u32 %r32, 0;\n"
                "$L_loop:\n"
                "and.b32 %r33, %r32, <<0||1>>;\n"
                "shl.b32 %r33, %r33, 10;\n"
                "add.s32 %r34, %r20, %r33;\n"
                "st.shared.u32 [%r34], %r32; //!\n"
                "bar.sync 0;\n"
                "xor.b32 %r30, %r21, 128;\n"
                "mov.u32 %r31, sh;\n"
                "add.s32 %r30, %r30, %r31;\n"
                "add.s32 %r30, %r30, %r33;\n"
                "ld.shared.u32 %r50, [%r30]; //!\n"
                "add.s32 %r32, %r32, 1;\n"
                "setp.lt.u32 %p1, %r32, 5;\n"
                "@%p1 bra $L_loop;\n", threads(64));
    shared_race("a tree sum without its last barrier",
                "st.shared.u32 [%r20], %r2;\n"
                "bar.sync 0;\n"
                "setp.gt.u32 %p1, %r2, 31;\n"
                "@%p1 bra $L_first;\n"
                "ld.shared.u32 %r30, [%r20+128];\n"
                "ld.shared.u32 %r31, [%r20];\n"
                "add.s32 %r31, %r31, %r30;\n"
                "st.shared.u32 [%r20], %r31; //!\n"
                "$L_first:\n"
                "<<||bar.sync 0;>>\n"
                "ld.shared.u32 %r50, [sh]; //!\n", threads(64));
    shared_race("bar.warp.sync with a mask that leaves out the reader",
                "setp.gt.u32 %p1, %r3, 15;\n"
                "st.shared.u32 [%r20], %r2; //!\n"
                "@%p1 bra $L_high;\n"
                "bar.warp.sync 0xffff;\n"
                "bra.uni $L_join;\n"
                "$L_high:\n"
                "bar.warp.sync 0xffff0000;\n"
                "$L_join:\n"
                "<<||bar.warp.sync -1;>>\n"
                "xor.b32 %r30, %r21, 64;\n"
                "mov.u32 %r31, sh;\n"
                "add.s32 %r30, %r30, %r31;\n"
                "ld.shared.u32 %r50, [%r30]; //!\n", threads(32));
    shared_race("ldmatrix of rows of other lanes",
                "shl.b32 %r30, %r2, 4;\n"
                "mov.u32 %r31, sh;\n"
                "add.s32 %r31, %r31, %r30;\n"
                "st.shared.v4.u32 [%r31], {%r2, %r2, %r2, %r2}; //!\n"
                "<<||bar.warp.sync -1;>>\n"
                "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r50, %r51, %r52, %r53}, [%r31]; //!\n",
                threads(32));
    shared_race("a store to rows that ldmatrix of another warp reads",
                "shl.b32 %r30, %r3, 4;\n"
                "mov.u32 %r31, sh;\n"
                "add.s32 %r31, %r31, %r30;\n"
                "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r50, %r51, %r52, %r53}, [%r31]; //!\n"
                "<<||bar.sync 0;>>\n"
                "setp.eq.s32 %p1, %r2, 35;\n"
                "@%p1 st.shared.u32 [sh+256], %r2; //!\n", threads(64));
}


// >>cp.async

static void test_copies(void) {
    std::string copy =
        "shl.b32 %r30, %r2, 4;\n"
        "mov.u32 %r31, sh;\n"
        "add.s32 %r32, %r31, %r30;\n"
        "mul.wide.u32 %rd30, %r2, 16;\n"
        "add.s64 %rd30, %rd2, %rd30;\n";
    std::string async = "cp.async.cg.shared.global [%r32], [%rd30], 16, 16; //!\n"
                        "cp.async.commit_group;\n";
    std::string other = "xor.b32 %r33, %r30, 512;\nadd.s32 %r33, %r33, %r31;\n";
    copy_race("a copy that another warp reads after its own wait",
              copy + other + async + "cp.async.wait_group 0;\n"
                                     "<<||bar.sync 0;>>\n"
                                     "ld.shared.u32 %r50, [%r33]; //!\n", threads(64));
    shared_race("a copy that another lane reads after its own wait",
                copy + async + "cp.async.wait_group 0;\n"
                               "<<||bar.warp.sync -1;>>\n"
                               "xor.b32 %r33, %r30, 16;\n"
                               "add.s32 %r33, %r33, %r31;\n"
                               "ld.shared.u32 %r50, [%r33]; //!\n", threads(32));
    copy_race("a copy into memory that another warp reads",
              copy + other + "ld.shared.u32 %r50, [%r33]; //!\n"
                             "<<||bar.sync 0;>>\n" + async + "cp.async.wait_group 0;\n",
              threads(64));
    copy_race("a copy into memory that another warp writes",
              copy + other + "st.shared.u32 [%r33], %r2; //!\n"
                             "<<||bar.sync 0;>>\n" + async + "cp.async.wait_group 0;\n",
              threads(64));
    /* The bytes that a short copy fills with zeros are written, too. */
    copy_race("the filled part of a short copy",
              copy + other + replaced(async, "16, 16;", "16, 4;") +
              "cp.async.wait_group 0;\n"
              "<<||bar.sync 0;>>\n"
              "ld.shared.u32 %r50, [%r33+12]; //!\n", threads(64));
    copy_race("the same thread reads its copy after the wait; another thread writes it",
              copy + async + "cp.async.wait_group 0;\n"
                             "ld.shared.u32 %r50, [%r32]; //!\n"
                             "xor.b32 %r33, %r30, <<512||0>>;\n"
                             "add.s32 %r33, %r33, %r31;\n"
                             "st.shared.u32 [%r33], %r2; //!\n", threads(64));
    global_race("a copy from global memory that another warp writes",
                "xor.b32 %r30, %r2, 32;\n"
                "mul.wide.u32 %rd30, %r30, 16;\n"
                "add.s64 %rd31, %rd3, %rd30;\n"
                "mul.wide.u32 %rd30, %r2, 16;\n"
                "add.s64 %rd32, %rd3, %rd30;\n"
                "shl.b32 %r31, %r2, 4;\n"
                "mov.u32 %r32, sh;\n"
                "add.s32 %r31, %r31, %r32;\n"
                "st.global.u32 [%rd32+8], %r2; //!\n"
                "<<||bar.sync 0;>>\n"
                "cp.async.cg.shared.global [%r31], [%rd31], 16, 16; //!\n"
                "cp.async.commit_group;\n"
                "cp.async.wait_group 0;\n", threads(64));
}


// >>blocks

static void test_blocks(void) {
    std::string own =
        "mov.u32 %r30, %ntid.x;\n"
        "mad.lo.s32 %r31, %r4, %r30, %r2;\n"
        "mul.wide.u32 %rd30, %r31, 4;\n"
        "add.s64 %rd30, %rd3, %rd30;\n";
    global_race("blocks that write the same memory",
                own + "st.global.u32 [<<%rd22||%rd30>>], %r4; //!\n", threads(64, 4));
    global_race("a block that reads what another block writes",
                own + "st.global.u32 [%rd30], %r2; //!\n"
                      "ld.global.u32 %r50, [<<%rd22||%rd30>>]; //!\n", threads(64, 4));
    global_race("a block that reads before another block writes",
                own + "ld.global.u32 %r50, [<<%rd22||%rd30>>]; //!\n"
                      "st.global.u32 [%rd30], %r2; //!\n", threads(64, 4));
    global_race("a barrier does not order blocks",
                own + "st.global.u32 [%rd30], %r2; //!\n"
                      "bar.sync 0;\n"
                      "ld.global.u32 %r50, [<<%rd22||%rd30>>]; //!\n", threads(64, 4));
    global_race("only the last block reads, far behind",
                own + "setp.eq.s32 %p1, %r4, <<7||77>>;\n"
                      "setp.eq.s32 %p2, %r4, 0;\n"
                      "@%p2 st.global.u32 [%rd22], %r2; //!\n"
                      "@%p1 ld.global.u32 %r50, [%rd22]; //!\n", threads(64, 8));
    global_race("two blocks that write the same value",
                own + "mov.u32 %r50, 7;\n"
                      "st.global.u32 [<<%rd22||%rd30>>], %r50; //!\n", threads(32, 2));
    /* Shared memory of different blocks is different memory. Launches are ordered. */
    test_memory memory;
    std::string text = ptx_program(initialized() + own +
                                   "st.shared.u32 [%r20], %r4;\n"
                                   "ld.global.u32 %r50, [%rd30];\n"
                                   "ld.shared.u32 %r51, [%r20];\n"
                                   "add.s32 %r50, %r50, %r51;\n"
                                   "st.global.u32 [%rd30], %r50;\n", SHARED_4096);
    uint32_t rounds = 0, before = memory.extra.as<uint32_t>()[100];
    runs_clean("launches that continue each other", text, threads(64, 4), memory, [&] {
        rounds++;
        CHECK(memory.extra.as<uint32_t>()[100] == before + rounds, "after %u launches", rounds);
    });
    CHECK(rounds == 4, "%u launches", rounds);
}

/* The result depends on the order of blocks. A race is reported in all orders, and the
   orders differ: the last writer is not always the same. */
static void test_order(void) {
    test_module m(ptx_program(std::string(PLACES) + "st.global.u32 [%rd20], %r4;\n", SHARED_4096));
    if (!m.kernel) return;
    std::set<uint32_t> results, repeated;
    for (int i = 0; i < 10; i++) {
        test_memory memory;
        launch_shape s = threads(32, 16);
        s.order = i < 2 ? (ptx_order)i : PTX_RANDOM;
        s.seed = (uint64_t)i * 77;
        ptx_faults_clear();
        CHECK(memory.run(m, s) == 1, "order %d: %zu faults", i, ptx_fault_count());
        CHECK(ptx_fault_count() && ptx_fault_at(0)->kind == PTX_GLOBAL_RACE, "order %d", i);
        results.insert(memory.out.as<uint32_t>()[0]);
        if (i == 0)
            CHECK(memory.out.as<uint32_t>()[0] == 15, "ascending: block 15 is last");
        if (i == 1)
            CHECK(memory.out.as<uint32_t>()[0] == 0, "descending: block 0 is last");
        s.order = PTX_RANDOM;
        s.seed = 5;
        memory.run(m, s);
        repeated.insert(memory.out.as<uint32_t>()[0]);
    }
    ptx_faults_clear();
    CHECK(results.size() >= 3, "%zu results of 10 orders", results.size());
    CHECK(repeated.size() == 1, "one seed gives %zu results", repeated.size());
}


// >>atomics: not emitted by nvcc today, so that the interpreter may refuse them

static void atomic(const char *what, const std::string &body, ptx_fault_kind kind,
                   launch_shape s) {
    faulty f = {what, {kind}, initialized() + body, s, {}, {}, SHARED_4096};
    f.optional = true;
    reports(f);
}

static void test_atomics(void) {
    atomic("atomic and plain stores of blocks",
           "<<st.global.u32 [%rd3], %r4||red.global.add.u32 [%rd3], 1>>; //!\n",
           PTX_GLOBAL_RACE, threads(1, 4));
    atomic("an atomic operation and a plain load of another block",
           "setp.eq.s32 %p1, %r4, 0;\n"
           "@%p1 red.global.add.u32 [%rd3], 1; //!\n"
           "@!%p1 ld.global.u32 %r50, [%rd3+<<0||4>>]; //!\n",
           PTX_GLOBAL_RACE, threads(1, 2));
    atomic("an atomic operation and a plain load of shared memory",
           "atom.shared.add.u32 %r50, [sh], 1; //!\n"
           "<<||bar.sync 0;>>\n"
           "ld.shared.u32 %r51, [sh]; //!\n",
           PTX_SHARED_RACE, threads(64));
    std::string text = ptx_program(
        "atom.global.add.u32 %r50, [%rd3], %r2;\n"
        "atom.global.max.u32 %r50, [%rd3+4], %r2;\n"
        "red.global.or.b32 [%rd3+8], 5;\n");
    char error[512] = "";
    ptx_module *p = ptx_load(text.c_str(), text.size(), error, sizeof error);
    CHECK(p || strstr(error, "atom."), "%s", error);
    if (!p) return;
    ptx_unload(p);
    test_memory memory;
    uint32_t *word = memory.extra.as<uint32_t>(), rounds = 0;
    word[0] = word[1] = word[2] = 0;
    runs_clean("atomic operations", text, threads(64, 4), memory, [&] {
        rounds++;
        CHECK(word[0] == rounds * 4 * 63 * 32 && word[1] == 63 && word[2] == 5, "%u, %u, %u",
              word[0], word[1], word[2]);
    });
}

void test_races(int argc, char **argv) {
    static const test_part parts[] = {
        {"pairs", test_pairs},       {"bytes", test_bytes},
        {"one_instruction", test_one_instruction},
        {"patterns", test_patterns}, {"copies", test_copies},
        {"blocks", test_blocks},     {"order", test_order},
        {"atomics", test_atomics},
    };
    test_run(parts, sizeof parts / sizeof *parts, argc, argv);
}
