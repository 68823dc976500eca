/* test_warps.cpp - tests of shuffles, votes, barriers, calls, and of divergence and
   reconvergence. */
#include "test_ptx.h"

/* Adds to the body a store of %r50 to out[block size * ctaid + tid]. */
static std::string storing(const std::string &body) {
    return body +
        "\n    mov.u32 %r120, %ntid.x;\n"
        "    mad.lo.s32 %r121, %r4, %r120, %r2;\n"
        "    mul.wide.u32 %rd60, %r121, 4;\n"
        "    add.s64 %rd61, %rd1, %rd60;\n"
        "    st.global.u32 [%rd61], %r50;\n";
}

/* A kernel that leaves expected(tid) in %r50 of each thread. 0xeeeeeeee stands for a
   thread that stores nothing. */
static void computes(const char *what, const std::string &body, launch_shape s,
                     const std::function<uint32_t(uint32_t)> &expected,
                     const std::string &globals = "", uint32_t n = 0) {
    test_memory memory;
    memory.n = n;
    runs_clean(what, ptx_program(storing(body), globals), s, memory, [&] {
        std::string wrong;
        for (uint32_t t = 0; t < s.block * s.grid; t++) {
            uint32_t got = memory.out.as<uint32_t>()[t], e = expected(t % s.block);
            if (got == e || wrong.size() > 200) continue;
            char line[80];
            snprintf(line, sizeof line, "\n  thread %u: %x, expected %x", t, got, e);
            wrong += line;
        }
        CHECK(wrong.empty(), "%s:%s", what, wrong.c_str());
    });
}

static launch_shape block_of(unsigned threads, unsigned blocks = 1) {
    launch_shape s;
    s.block = threads;
    s.grid = blocks;
    return s;
}


// >>shuffles

/* The source lane and the predicate of shfl.sync, as the ISA defines them. */
struct shuffle {
    int source;
    bool valid;
};

static shuffle shuffled(const std::string &mode, int lane, uint32_t b, uint32_t c) {
    int bval = b & 31, cval = c & 31, segment = c >> 8 & 31, j = 0;
    int max_lane = (lane & segment) | (cval & ~segment), min_lane = lane & segment;
    bool valid;
    if (mode == "up") {
        j = lane - bval;
        valid = j >= max_lane;
    } else if (mode == "down") {
        j = lane + bval;
        valid = j <= max_lane;
    } else if (mode == "bfly") {
        j = lane ^ bval;
        valid = j <= max_lane;
    } else {
        j = min_lane | (bval & ~segment);
        valid = j <= max_lane;
    }
    return {valid ? j : lane, valid};
}

/* One launch per pair (b, c); if `vary` is set, each lane has its own b. */
static void shuffles(const char *mode, bool vary, bool required) {
    static const uint32_t clamps[] = {31, 0, 0x1f, 7199, 0x101f, 0x181f, 0x1f1f, 0x1c00, 0x1000,
                                      0x1807, 15, 0x10ff};
    std::string form = std::string("shfl.sync.") + mode + ".b32";
    std::string body =
        "    mul.wide.u32 %rd20, %r3, 16;\n"
        "    add.s64 %rd21, %rd2, %rd20;\n"
        "    add.s64 %rd22, %rd1, %rd20;\n"
        "    ld.global.v4.u32 {%r20, %r21, %r22, %r23}, [%rd21];\n"
        "    " + form + " %r30|%p1, %r20, %r21, %r22, %r23;\n"
        "    selp.u32 %r31, 1, 0, %p1;\n"
        "    st.global.v2.u32 [%rd22], {%r30, %r31};\n"
        "    " + form + " %r32, %r20, %r21, %r22, -1;\n"
        "    st.global.u32 [%rd22+8], %r32;\n";
    std::string text = ptx_program(body);
    if (!required) {
        char error[512] = "";
        ptx_module *m = ptx_load(text.c_str(), text.size(), error, sizeof error);
        CHECK(m || strstr(error, form.c_str()), "%s: %s", form.c_str(), error);
        if (!m) return;
        ptx_unload(m);
    }
    record_forms(form + " %r30|%p1, %r20, %r21, %r22, %r23;");
    test_module m(text);
    if (!m.kernel) return;
    test_memory memory;
    size_t wrong = 0, faults = 0;
    for (uint32_t b = 0; b < 40; b++)
        for (uint32_t c : clamps) {
            uint32_t *in = memory.in.as<uint32_t>(), source[32];
            for (uint32_t l = 0; l < 32; l++) {
                in[4 * l] = 0x1000000 * b + 1000 * l + 7;
                in[4 * l + 1] = source[l] = vary ? b * 7 + l * 13 : b;
                in[4 * l + 2] = c;
                in[4 * l + 3] = 0xffffffff;
            }
            faults += memory.run(m, {});
            for (uint32_t l = 0; l < 32; l++) {
                shuffle e = shuffled(mode, (int)l, source[l], c);
                const uint32_t *got = memory.out.as<uint32_t>() + 4 * l;
                uint32_t value = in[4 * e.source];
                wrong += got[0] != value || got[1] != e.valid || got[2] != value;
            }
        }
    CHECK(wrong == 0, "%s: %zu lanes are wrong", form.c_str(), wrong);
    CHECK(faults == 0, "%s: %zu faults", form.c_str(), faults);
    print_faults(form.c_str());
}

static void test_shfl(void) {
    for (bool vary : {false, true}) {
        shuffles("idx", vary, true);
        shuffles("bfly", vary, true);
        shuffles("up", vary, false);
        shuffles("down", vary, false);
    }
    record_forms("shfl.sync.bfly.b32 %r51|%p1, %r50, 16, 31, -1;\n"
                 "shfl.sync.idx.b32 %r52|%p2, %r50, %r52, 7199, -1;");
    computes("a sum by butterflies",
             "    mul.lo.s32 %r50, %r2, %r2;\n"
             "    shfl.sync.bfly.b32 %r51|%p1, %r50, 16, 31, -1;\n"
             "    add.s32 %r50, %r50, %r51;\n"
             "    shfl.sync.bfly.b32 %r51|%p1, %r50, 8, 31, -1;\n"
             "    add.s32 %r50, %r50, %r51;\n"
             "    shfl.sync.bfly.b32 %r51|%p1, %r50, 4, 31, -1;\n"
             "    add.s32 %r50, %r50, %r51;\n"
             "    shfl.sync.bfly.b32 %r51|%p1, %r50, 2, 31, -1;\n"
             "    add.s32 %r50, %r50, %r51;\n"
             "    shfl.sync.bfly.b32 %r51|%p1, %r50, 1, 31, -1;\n"
             "    add.s32 %r50, %r50, %r51;\n",
             block_of(64, 3), [](uint32_t t) {
                 uint32_t sum = 0;
                 for (uint32_t i = t / 32 * 32; i < t / 32 * 32 + 32; i++) sum += i * i;
                 return sum;
             });
    computes("a shuffle within groups of four",
             "    add.s32 %r51, %r2, 100;\n"
             "    add.s32 %r52, %r3, 3;\n"
             "    shfl.sync.idx.b32 %r50|%p2, %r51, %r52, 7199, -1;\n",
             block_of(64), [](uint32_t t) { return 100 + (t & ~3u) + ((t + 3) & 3); });
    computes("the destination is the source",
             "    mov.u32 %r50, %r2;\n"
             "    shfl.sync.bfly.b32 %r50|%p2, %r50, 31, 31, -1;\n",
             block_of(32), [](uint32_t t) { return 31 - t; });
}


// >>votes

static void test_vote(void) {
    record_forms("vote.sync.ballot.b32 %r50, %p1, %r20;\nvote.sync.ballot.b32 %r50, %p1, -1;");
    computes("ballot",
             "    mov.u32 %r20, -1;\n"
             "    mul.lo.s32 %r21, %r2, %r2;\n"
             "    rem.u32 %r21, %r21, 7;\n"
             "    setp.gt.u32 %p1, %r21, 2;\n"
             "    vote.sync.ballot.b32 %r50, %p1, %r20;\n",
             block_of(96), [](uint32_t t) {
                 uint32_t mask = 0;
                 for (uint32_t l = 0; l < 32; l++)
                     mask |= (uint32_t)((t / 32 * 32 + l) * (t / 32 * 32 + l) % 7 > 2) << l;
                 return mask;
             });
    computes("ballot of the negated predicate",
             "    setp.lt.u32 %p1, %r3, 5;\n"
             "    vote.sync.ballot.b32 %r50, !%p1, -1;\n",
             block_of(32), [](uint32_t) { return 0xffffffe0u; });
    computes("ballot of a part of the warp",
             "    mov.u32 %r50, 0;\n"
             "    and.b32 %r20, %r3, 1;\n"
             "    setp.eq.s32 %p1, %r20, 0;\n"
             "    setp.gt.u32 %p2, %r3, 10;\n"
             "    @%p1 bra $L_skip;\n"
             "    vote.sync.ballot.b32 %r50, %p2, 0xaaaaaaaa;\n"
             "$L_skip:\n",
             block_of(32), [](uint32_t t) { return t & 1 ? 0xaaaaa800u : 0; });
    /* The second warp has only 8 threads. */
    computes("ballot of an incomplete warp",
             "    setp.ge.u32 %p1, %r2, 0;\n"
             "    vote.sync.ballot.b32 %r50, %p1, -1;\n",
             block_of(40), [](uint32_t t) { return t < 32 ? 0xffffffffu : 0xffu; });
    /* Threads that have exited count as arrived. */
    computes("ballot after other lanes have exited",
             "    setp.ge.u32 %p1, %r3, 20;\n"
             "    @%p1 ret;\n"
             "    setp.ne.s32 %p2, %r3, 3;\n"
             "    vote.sync.ballot.b32 %r50, %p2, -1;\n",
             block_of(32), [](uint32_t t) { return t < 20 ? 0xffff7u : 0xeeeeeeeeu; });
}


// >>redux

static uint32_t sum_of_squares(uint32_t first, uint32_t step) {
    uint32_t sum = 0;
    for (uint32_t l = first; l < 32; l += step) sum += l * l;
    return sum;
}

static void test_redux(void) {
    record_forms("redux.sync.add.u32 %r50, %r21, %r20;");
    computes("redux.add of all lanes",
             "    mov.u32 %r20, -1;\n"
             "    mul.lo.s32 %r21, %r3, %r3;\n"
             "    redux.sync.add.u32 %r50, %r21, %r20;\n",
             block_of(64), [](uint32_t) { return sum_of_squares(0, 1); });
    computes("redux.add of the odd lanes",
             "    mov.u32 %r50, 0;\n"
             "    mul.lo.s32 %r21, %r3, %r3;\n"
             "    and.b32 %r20, %r3, 1;\n"
             "    setp.eq.s32 %p1, %r20, 0;\n"
             "    @%p1 bra $L_skip;\n"
             "    redux.sync.add.u32 %r50, %r21, 0xaaaaaaaa;\n"
             "$L_skip:\n",
             block_of(32), [](uint32_t t) { return t & 1 ? sum_of_squares(1, 2) : 0; });
    computes("redux.min of signed values",
             "    sub.s32 %r21, 5, %r3;\n"
             "    redux.sync.min.s32 %r50, %r21, -1;\n",
             block_of(32), [](uint32_t) { return (uint32_t)-26; });
    computes("redux.max of unsigned values",
             "    sub.s32 %r21, 5, %r3;\n"
             "    redux.sync.max.u32 %r50, %r21, -1;\n",
             block_of(32), [](uint32_t) { return 0xffffffffu; });
    computes("redux.xor",
             "    mul.lo.s32 %r21, %r3, 5;\n"
             "    redux.sync.xor.b32 %r50, %r21, -1;\n",
             block_of(32), [](uint32_t) {
                 uint32_t x = 0;
                 for (uint32_t l = 0; l < 32; l++) x ^= 5 * l;
                 return x;
             });
}


// >>barriers

static void test_barriers(void) {
    static const char shared[] = ".shared .align 4 .b8 sh[1024];";
    record_forms("bar.sync 0;\nbar.warp.sync -1;\nbar.red.and.pred %p2, 0, %p1;");
    computes("bar.sync orders shared memory",
             "    mov.u32 %r20, sh;\n"
             "    shl.b32 %r21, %r2, 2;\n"
             "    add.s32 %r22, %r20, %r21;\n"
             "    mul.lo.s32 %r23, %r2, 17;\n"
             "    st.shared.u32 [%r22], %r23;\n"
             "    bar.sync 0;\n"
             "    sub.s32 %r24, 508, %r21;\n"
             "    add.s32 %r24, %r20, %r24;\n"
             "    ld.shared.u32 %r50, [%r24];\n"
             "    bar.sync 0;\n"
             "    st.shared.u32 [%r22], %r50;\n"
             "    bar.sync 0;\n"
             "    ld.shared.u32 %r50, [%r24];\n",
             block_of(128, 3), [](uint32_t t) { return 17 * t; }, shared);
    computes("bar.warp.sync orders shared memory of a warp",
             "    mov.u32 %r20, sh;\n"
             "    shl.b32 %r21, %r2, 2;\n"
             "    add.s32 %r22, %r20, %r21;\n"
             "    mul.lo.s32 %r23, %r2, 17;\n"
             "    st.shared.u32 [%r22], %r23;\n"
             "    bar.warp.sync -1;\n"
             "    xor.b32 %r24, %r21, 124;\n"
             "    add.s32 %r24, %r20, %r24;\n"
             "    ld.shared.u32 %r50, [%r24];\n",
             block_of(96), [](uint32_t t) { return 17 * (t ^ 31); }, shared);
    computes("bar.warp.sync orders global memory of a warp",
             "    mul.wide.u32 %rd20, %r2, 4;\n"
             "    add.s64 %rd21, %rd3, %rd20;\n"
             "    st.global.u32 [%rd21], %r2;\n"
             "    bar.warp.sync -1;\n"
             "    xor.b32 %r20, %r2, 1;\n"
             "    mul.wide.u32 %rd20, %r20, 4;\n"
             "    add.s64 %rd21, %rd3, %rd20;\n"
             "    ld.global.u32 %r50, [%rd21];\n",
             block_of(64), [](uint32_t t) { return t ^ 1; });
    computes("barriers in a loop",
             "    mov.u32 %r20, sh;\n"
             "    shl.b32 %r21, %r2, 2;\n"
             "    add.s32 %r22, %r20, %r21;\n"
             "    add.s32 %r24, %r2, 1;\n"
             "    rem.u32 %r24, %r24, 96;\n"
             "    shl.b32 %r24, %r24, 2;\n"
             "    add.s32 %r24, %r20, %r24;\n"
             "    mov.u32 %r50, %r2;\n"
             "    mov.u32 %r25, 0;\n"
             "$L_loop:\n"
             "    st.shared.u32 [%r22], %r50;\n"
             "    bar.sync 0;\n"
             "    ld.shared.u32 %r50, [%r24];\n"
             "    bar.sync 0;\n"
             "    add.s32 %r25, %r25, 1;\n"
             "    setp.lt.u32 %p1, %r25, 40;\n"
             "    @%p1 bra $L_loop;\n",
             block_of(96), [](uint32_t t) { return (t + 40) % 96; }, shared);
    computes("barrier.sync in both sides of a branch",
             "    mov.u32 %r20, sh;\n"
             "    shl.b32 %r21, %r2, 2;\n"
             "    add.s32 %r22, %r20, %r21;\n"
             "    setp.lt.u32 %p1, %r3, 7;\n"
             "    st.shared.u32 [%r22], %r2;\n"
             "    @%p1 bra $L_low;\n"
             "    barrier.sync 3;\n"
             "    bra.uni $L_join;\n"
             "$L_low:\n"
             "    barrier.sync 3;\n"
             "$L_join:\n"
             "    xor.b32 %r23, %r21, 128;\n"
             "    add.s32 %r23, %r20, %r23;\n"
             "    ld.shared.u32 %r50, [%r23];\n",
             block_of(64), [](uint32_t t) { return t ^ 32; }, shared);
    /* The vote of all threads of the block; only thread n votes no. */
    for (uint32_t n : {0u, 37u, 95u, 96u})
        computes("bar.red.and.pred",
                 "    setp.ne.s32 %p1, %r2, %r1;\n"
                 "    bar.red.and.pred %p2, 0, %p1;\n"
                 "    selp.u32 %r50, 1, 0, %p2;\n",
                 block_of(96, 2), [n](uint32_t) { return n < 96 ? 0u : 1u; }, "", n);
    computes("bar.red.and.pred also orders memory, and repeats",
             "    mov.u32 %r20, sh;\n"
             "    shl.b32 %r21, %r2, 2;\n"
             "    add.s32 %r22, %r20, %r21;\n"
             "    st.shared.u32 [%r22], %r2;\n"
             "    setp.lt.u32 %p1, %r2, 1000;\n"
             "    bar.red.and.pred %p2, 0, %p1;\n"
             "    setp.lt.u32 %p1, %r2, 63;\n"
             "    bar.red.and.pred %p3, 0, %p1;\n"
             "    xor.b32 %r24, %r21, 252;\n"
             "    add.s32 %r24, %r20, %r24;\n"
             "    ld.shared.u32 %r50, [%r24];\n"
             "    selp.u32 %r51, 1000, 0, %p2;\n"
             "    selp.u32 %r52, 100000, 0, %p3;\n"
             "    add.s32 %r50, %r50, %r51;\n"
             "    add.s32 %r50, %r50, %r52;\n",
             block_of(64), [](uint32_t t) { return 1000 + (t ^ 63); }, shared);
}


// >>divergence

static void test_branches(void) {
    record_forms("@%p1 bra $L_a;\nbra.uni $L_b;\nret;");
    computes("nested branches",
             "    and.b32 %r20, %r2, 1;\n"
             "    and.b32 %r21, %r2, 2;\n"
             "    and.b32 %r22, %r2, 4;\n"
             "    setp.eq.s32 %p1, %r20, 0;\n"
             "    setp.eq.s32 %p2, %r21, 0;\n"
             "    setp.eq.s32 %p3, %r22, 0;\n"
             "    mov.u32 %r50, 0;\n"
             "    @%p1 bra $L_even;\n"
             "    add.s32 %r50, %r50, 1;\n"
             "    @!%p2 bra $L_odd_high;\n"
             "    add.s32 %r50, %r50, 10;\n"
             "    @%p3 bra $L_end_odd;\n"
             "    add.s32 %r50, %r50, 100;\n"
             "    bra.uni $L_end_odd;\n"
             "$L_odd_high:\n"
             "    add.s32 %r50, %r50, 1000;\n"
             "$L_end_odd:\n"
             "    add.s32 %r50, %r50, 10000;\n"
             "    bra.uni $L_all;\n"
             "$L_even:\n"
             "    @%p3 bra $L_all;\n"
             "    add.s32 %r50, %r50, 7;\n"
             "$L_all:\n"
             "    shl.b32 %r50, %r50, 1;\n",
             block_of(64), [](uint32_t t) {
                 uint32_t r = 0;
                 if (t & 1 && t & 2)
                     r = 11001;
                 else if (t & 1)
                     r = 10001 + (t & 4 ? 110 : 10);
                 else if (t & 4)
                     r = 7;
                 return 2 * r;
             });
    computes("a loop whose trip count depends on the lane",
             "    mov.u32 %r50, 0;\n"
             "    mov.u32 %r20, 0;\n"
             "$L_loop:\n"
             "    setp.ge.u32 %p1, %r20, %r2;\n"
             "    @%p1 bra $L_done;\n"
             "    add.s32 %r20, %r20, 1;\n"
             "    mad.lo.s32 %r50, %r20, %r20, %r50;\n"
             "    bra.uni $L_loop;\n"
             "$L_done:\n",
             block_of(64), [](uint32_t t) { return t * (t + 1) * (2 * t + 1) / 6; });
    computes("nested loops with break and continue",
             "    mov.u32 %r50, 0;\n"
             "    mov.u32 %r20, 0;\n"
             "$L_outer:\n"
             "    mov.u32 %r21, 0;\n"
             "$L_inner:\n"
             "    add.s32 %r22, %r20, %r21;\n"
             "    and.b32 %r23, %r22, 3;\n"
             "    setp.eq.s32 %p1, %r23, 3;\n"
             "    @%p1 bra $L_continue;\n"
             "    add.s32 %r50, %r50, %r22;\n"
             "    setp.gt.u32 %p2, %r50, 500;\n"
             "    @%p2 bra $L_break;\n"
             "$L_continue:\n"
             "    add.s32 %r21, %r21, 1;\n"
             "    setp.le.u32 %p3, %r21, %r3;\n"
             "    @%p3 bra $L_inner;\n"
             "    add.s32 %r20, %r20, 1;\n"
             "    setp.lt.u32 %p4, %r20, 10;\n"
             "    @%p4 bra $L_outer;\n"
             "    add.s32 %r50, %r50, 1000000;\n"
             "$L_break:\n"
             "    add.s32 %r50, %r50, 1;\n",
             block_of(64), [](uint32_t t) {
                 uint32_t r = 0, l = t & 31;
                 for (uint32_t i = 0; i < 10; i++)
                     for (uint32_t k = 0; k <= l; k++) {
                         if (((i + k) & 3) == 3) continue;
                         r += i + k;
                         if (r > 500) return r + 1;
                     }
                 return r + 1000001;
             });
    computes("a loop that is entered in its middle",
             "    mov.u32 %r50, 0;\n"
             "    mov.u32 %r20, 5;\n"
             "    setp.lt.u32 %p1, %r3, 9;\n"
             "    @%p1 bra $L_middle;\n"
             "$L_top:\n"
             "    add.s32 %r50, %r50, 100;\n"
             "$L_middle:\n"
             "    add.s32 %r50, %r50, 1;\n"
             "    sub.s32 %r20, %r20, 1;\n"
             "    setp.ne.s32 %p2, %r20, 0;\n"
             "    @%p2 bra $L_top;\n",
             block_of(32), [](uint32_t t) { return t < 9 ? 405u : 505u; });
    computes("an early exit",
             "    mov.u32 %r50, 5;\n"
             "    setp.gt.u32 %p1, %r3, 11;\n"
             "    @%p1 ret;\n"
             "    and.b32 %r20, %r3, 1;\n"
             "    setp.eq.s32 %p2, %r20, 0;\n"
             "    @!%p2 bra $L_odd;\n"
             "    add.s32 %r50, %r50, 1;\n"
             "    bra.uni $L_end;\n"
             "$L_odd:\n"
             "    setp.eq.s32 %p3, %r3, 7;\n"
             "    @%p3 ret;\n"
             "    add.s32 %r50, %r50, 2;\n"
             "$L_end:\n"
             "    vote.sync.ballot.b32 %r51, %p2, 0xf7f;\n"
             "    mad.lo.s32 %r50, %r51, 1000, %r50;\n",
             block_of(32), [](uint32_t t) {
                 if (t > 11 || t == 7) return 0xeeeeeeeeu;
                 return 0x555u * 1000 + (t & 1 ? 7u : 6u);
             });
    computes("a branch to the next instruction",
             "    setp.lt.u32 %p1, %r3, 9;\n"
             "    @%p1 bra $L_next;\n"
             "$L_next:\n"
             "    vote.sync.ballot.b32 %r50, %p1, -1;\n",
             block_of(32), [](uint32_t) { return 0x1ffu; });
}

/* Collectives of a warp that was divergent. */
static void test_reconvergence(void) {
    computes("a shuffle after a branch",
             "    setp.lt.u32 %p1, %r3, 16;\n"
             "    @%p1 bra $L_low;\n"
             "    add.s32 %r51, %r3, 1000;\n"
             "    bra.uni $L_join;\n"
             "$L_low:\n"
             "    add.s32 %r51, %r3, 2000;\n"
             "$L_join:\n"
             "    shfl.sync.bfly.b32 %r50|%p2, %r51, 16, 31, -1;\n",
             block_of(64), [](uint32_t t) {
                 uint32_t l = (t & 31) ^ 16;
                 return l + (l < 16 ? 2000u : 1000u);
             });
    computes("a vote after a loop that lanes leave one by one",
             "    mov.u32 %r20, %r3;\n"
             "    mov.u32 %r21, 0;\n"
             "$L_loop:\n"
             "    add.s32 %r21, %r21, 3;\n"
             "    add.s32 %r20, %r20, -1;\n"
             "    setp.gt.s32 %p1, %r20, -1;\n"
             "    @%p1 bra $L_loop;\n"
             "    and.b32 %r22, %r21, 1;\n"
             "    setp.eq.s32 %p2, %r22, 1;\n"
             "    vote.sync.ballot.b32 %r50, %p2, -1;\n",
             block_of(64), [](uint32_t) { return 0x55555555u; });
    computes("a barrier of the block after a branch",
             "    mov.u32 %r20, sh;\n"
             "    shl.b32 %r21, %r2, 2;\n"
             "    add.s32 %r22, %r20, %r21;\n"
             "    setp.lt.u32 %p1, %r3, 7;\n"
             "    @%p1 bra $L_low;\n"
             "    st.shared.u32 [%r22], %r2;\n"
             "    bra.uni $L_join;\n"
             "$L_low:\n"
             "    st.shared.u32 [%r22], %r3;\n"
             "$L_join:\n"
             "    bar.sync 0;\n"
             "    xor.b32 %r23, %r21, 128;\n"
             "    add.s32 %r23, %r20, %r23;\n"
             "    ld.shared.u32 %r50, [%r23];\n",
             block_of(64), [](uint32_t t) {
                 uint32_t o = t ^ 32;
                 return (o & 31) < 7 ? o & 31 : o;
             }, ".shared .align 4 .b8 sh[256];");
    computes("a loop until no lane has work, by votes",
             "    mov.u32 %r20, %r3;\n"
             "    mov.u32 %r50, 0;\n"
             "$L_loop:\n"
             "    setp.ne.s32 %p1, %r20, 0;\n"
             "    vote.sync.ballot.b32 %r21, %p1, -1;\n"
             "    setp.eq.s32 %p2, %r21, 0;\n"
             "    @%p2 bra $L_done;\n"
             "    popc.b32 %r22, %r21;\n"
             "    add.s32 %r50, %r50, %r22;\n"
             "    @!%p1 bra $L_loop;\n"
             "    add.s32 %r20, %r20, -1;\n"
             "    bra.uni $L_loop;\n"
             "$L_done:\n",
             block_of(32), [](uint32_t) { return 31u * 32 / 2; });
    computes("collectives in both sides of a branch, with their masks",
             "    setp.lt.u32 %p1, %r3, 12;\n"
             "    mul.lo.s32 %r51, %r3, 3;\n"
             "    @%p1 bra $L_low;\n"
             "    shfl.sync.idx.b32 %r50|%p2, %r51, 20, 31, 0xfffff000;\n"
             "    bra.uni $L_join;\n"
             "$L_low:\n"
             "    shfl.sync.idx.b32 %r50|%p2, %r51, 5, 31, 0xfff;\n"
             "    bar.warp.sync 0xfff;\n"
             "$L_join:\n"
             "    bar.warp.sync -1;\n",
             block_of(64), [](uint32_t t) { return (t & 31) < 12 ? 15u : 60u; });
    computes("a shared collective that both sides enter by different paths",
             "    setp.lt.u32 %p1, %r3, 10;\n"
             "    setp.lt.u32 %p2, %r3, 20;\n"
             "    mov.u32 %r51, %r3;\n"
             "    mov.u32 %r52, 0;\n"
             "    @%p1 bra $L_path;\n"
             "    add.s32 %r51, %r51, 100;\n"
             "    @%p2 bra $L_meet;\n"
             "    add.s32 %r51, %r51, 100;\n"
             "    bra.uni $L_meet;\n"
             "$L_path:\n"
             "    mov.u32 %r52, 7;\n"
             "    add.s32 %r51, %r51, 500;\n"
             "$L_meet:\n"
             "    shfl.sync.bfly.b32 %r50|%p3, %r51, 31, 31, -1;\n"
             "    @!%p1 bra $L_end;\n"
             "    add.s32 %r50, %r50, %r52;\n"
             "$L_end:\n",
             block_of(32), [](uint32_t t) {
                 uint32_t o = 31 - t, upper = o < 20 ? 100 : 200, v = o + (o < 10 ? 500 : upper);
                 return v + (t < 10 ? 7u : 0u);
             });
    /* The ISA requires the same qualifiers and mask, not the same instruction. */
    computes("halves of a warp meet at two different shuffles",
             "    setp.lt.u32 %p1, %r3, 16;\n"
             "    @%p1 bra $L_low;\n"
             "    add.s32 %r51, %r3, 100;\n"
             "    shfl.sync.bfly.b32 %r50|%p2, %r51, 16, 31, -1;\n"
             "    bra.uni $L_join;\n"
             "$L_low:\n"
             "    add.s32 %r51, %r3, 200;\n"
             "    shfl.sync.bfly.b32 %r50|%p2, %r51, 16, 31, -1;\n"
             "    add.s32 %r50, %r50, 1000;\n"
             "$L_join:\n",
             block_of(32), [](uint32_t t) {
                 return t < 16 ? 1000 + 100 + (t ^ 16) : 200 + (t ^ 16);
             });
}


// >>calls

static const char POWER[] =
    ".func (.param .b64 func_retval0) power\n"
    "(\n"
    "    .param .b64 power_param_0,\n"
    "    .param .b64 power_param_1\n"
    ")\n"
    ";\n";

/* Returns the first argument to the power of the second, a small integer. */
static const char POWER_BODY[] =
    ".func  (.param .b64 func_retval0) power(\n"
    "    .param .b64 power_param_0,\n"
    "    .param .b64 power_param_1\n"
    ")\n"
    "{\n"
    "    .reg .pred %p<8>;\n"
    "    .reg .f64 %fd<9>;\n"
    "    ld.param.f64 %fd1, [power_param_0];\n"
    "    ld.param.f64 %fd2, [power_param_1];\n"
    "    mov.f64 %fd3, 0d3FF0000000000000;\n"
    "$L_power:\n"
    "    setp.leu.f64 %p1, %fd2, 0d0000000000000000;\n"
    "    @%p1 bra $L_power_end;\n"
    "    mul.f64 %fd3, %fd3, %fd1;\n"
    "    add.f64 %fd2, %fd2, 0dBFF0000000000000;\n"
    "    bra.uni $L_power;\n"
    "$L_power_end:\n"
    "    st.param.f64 [func_retval0+0], %fd3;\n"
    "    ret;\n"
    "}\n";

static void test_call(void) {
    /* Half of the lanes call twice; the registers of the caller keep their values. */
    std::string body =
        "    cvt.rn.f64.u32 %fd1, %r3;\n"
        "    add.f64 %fd3, %fd1, 0d3FF0000000000000;\n"
        "    mov.f64 %fd2, 0d4008000000000000;\n"
        "    mov.f64 %fd8, 0d0000000000000000;\n"
        "    setp.lt.u32 %p1, %r3, 16;\n"
        "    @%p1 bra $L_skip;\n"
        "    { // callseq 0, 0\n"
        "    .reg .b32 temp_param_reg;\n"
        "    .param .b64 param0;\n"
        "    st.param.f64 [param0+0], %fd1;\n"
        "    .param .b64 param1;\n"
        "    st.param.f64 [param1+0], %fd2;\n"
        "    .param .b64 retval0;\n"
        "    call.uni (retval0), \n"
        "    power, \n"
        "    (\n"
        "    param0, \n"
        "    param1\n"
        "    );\n"
        "    ld.param.f64 %fd4, [retval0+0];\n"
        "    } // callseq 0\n"
        "    { // callseq 1, 0\n"
        "    .param .b64 param0;\n"
        "    st.param.f64 [param0], %fd2;\n"
        "    .param .b64 param1;\n"
        "    and.b32 %r20, %r3, 7;\n"
        "    cvt.rn.f64.u32 %fd5, %r20;\n"
        "    st.param.f64 [param1], %fd5;\n"
        "    .param .b64 retval0;\n"
        "    call.uni (retval0), power, (param0, param1);\n"
        "    ld.param.f64 %fd6, [retval0];\n"
        "    } // callseq 1\n"
        "    add.f64 %fd8, %fd4, %fd6;\n"
        "$L_skip:\n"
        "    vote.sync.ballot.b32 %r21, %p1, -1;\n"
        "    add.f64 %fd8, %fd8, %fd3;\n"
        "    mul.wide.u32 %rd20, %r3, 16;\n"
        "    add.s64 %rd20, %rd1, %rd20;\n"
        "    st.global.f64 [%rd20], %fd8;\n"
        "    st.global.u32 [%rd20+8], %r21;\n";
    record_forms(body);
    record_forms(POWER_BODY);
    for (bool before : {false, true}) {
        std::string text = before ? ptx_program(body, POWER_BODY)
                                  : ptx_program(body, POWER) + POWER_BODY;
        test_memory memory;
        runs_clean("calls", text, {}, memory, [&] {
            size_t wrong = 0;
            for (int l = 0; l < 32; l++) {
                double e = l + 1, got = memory.out.as<double>()[2 * l];
                if (l >= 16) e += (double)l * l * l + pow(3, l & 7);
                wrong += got != e || memory.out.as<uint32_t>()[4 * l + 2] != 0xffff;
            }
            CHECK(wrong == 0, "%zu lanes are wrong", wrong);
        });
    }
}

/* exit in a function ends the thread, ret only the function. */
static void test_exit_in_call(void) {
    std::string function =
        ".func leave(\n    .param .b32 leave_param_0\n)\n"
        "{\n"
        "    .reg .pred %p<2>;\n"
        "    .reg .b32 %r<2>;\n"
        "    ld.param.u32 %r1, [leave_param_0];\n"
        "    setp.lt.u32 %p1, %r1, 9;\n"
        "    @%p1 exit;\n"
        "    ret;\n"
        "}\n";
    std::string body =
        "    { .param .b32 param0;\n"
        "    st.param.b32 [param0], %r3;\n"
        "    call.uni leave, (param0);\n"
        "    }\n"
        "    mul.wide.u32 %rd20, %r2, 4;\n"
        "    add.s64 %rd20, %rd1, %rd20;\n"
        "    st.global.u32 [%rd20], %r3;\n";
    test_memory memory;
    runs_clean("exit in a function", ptx_program(body, function), {}, memory, [&] {
        for (uint32_t l = 0; l < 32; l++)
            CHECK(memory.out.as<uint32_t>()[l] == (l < 9 ? 0xeeeeeeee : l), "lane %u", l);
    });
}


// >>orders

/* A correct kernel has the same result in all orders of blocks and warps. */
static void test_orders(void) {
    computes("a sum over a block",
             "    mov.u32 %r20, sh;\n"
             "    shl.b32 %r21, %r2, 2;\n"
             "    add.s32 %r22, %r20, %r21;\n"
             "    mad.lo.s32 %r23, %r2, %r2, 1;\n"
             "    st.shared.u32 [%r22], %r23;\n"
             "    mov.u32 %r24, 64;\n"
             "$L_loop:\n"
             "    bar.sync 0;\n"
             "    setp.ge.u32 %p1, %r2, %r24;\n"
             "    @%p1 bra $L_skip;\n"
             "    shl.b32 %r25, %r24, 2;\n"
             "    add.s32 %r25, %r22, %r25;\n"
             "    ld.shared.u32 %r26, [%r25];\n"
             "    ld.shared.u32 %r27, [%r22];\n"
             "    add.s32 %r27, %r27, %r26;\n"
             "    st.shared.u32 [%r22], %r27;\n"
             "$L_skip:\n"
             "    shr.u32 %r24, %r24, 1;\n"
             "    setp.ne.s32 %p2, %r24, 0;\n"
             "    @%p2 bra $L_loop;\n"
             "    bar.sync 0;\n"
             "    ld.shared.u32 %r50, [sh];\n",
             block_of(128, 16), [](uint32_t) { return 127u * 128 * 255 / 6 + 128; },
             ".shared .align 4 .b8 sh[512];");
}

void test_warps(int argc, char **argv) {
    static const test_part parts[] = {
        {"shfl", test_shfl},         {"vote", test_vote},
        {"redux", test_redux},       {"barriers", test_barriers},
        {"branches", test_branches}, {"reconvergence", test_reconvergence},
        {"call", test_call},         {"exit_in_call", test_exit_in_call},
        {"orders", test_orders},
    };
    test_run(parts, sizeof parts / sizeof *parts, argc, argv);
}
