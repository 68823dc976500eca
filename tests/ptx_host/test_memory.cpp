/* test_memory.cpp - tests of loads and stores in all state spaces, of parameters, special
   registers, cp.async and ldmatrix. */
#include "test_ptx.h"


// >>loads and stores

/* A type of memory access: its registers, and the scalar type that the test uses to bring
   data to the registers and away from them. */
struct access_type {
    const char *suffix, *reg, *scalar;
    int count;
    size_t width; /* of one element */
};

static const access_type U16 = {"u16", "%rs", "u16", 1, 2};

static const access_type U32 = {"u32", "%r", "u32", 1, 4};

static const access_type F32 = {"f32", "%f", "f32", 1, 4};

static const access_type U64 = {"u64", "%rd", "u64", 1, 8};

static const access_type F64 = {"f64", "%fd", "f64", 1, 8};

static const access_type V2_F32 = {"v2.f32", "%f", "f32", 2, 4};

static const access_type V2_U32 = {"v2.u32", "%r", "u32", 2, 4};

static const access_type V2_U64 = {"v2.u64", "%rd", "u64", 2, 8};

static const access_type V2_F64 = {"v2.f64", "%fd", "f64", 2, 8};

static const access_type V4_F32 = {"v4.f32", "%f", "f32", 4, 4};

static const access_type V4_U32 = {"v4.u32", "%r", "u32", 4, 4};

static const access_type V4_B32 = {"v4.b32", "%r", "u32", 4, 4};

static std::string reg_list(const access_type &t) {
    std::string list;
    for (int i = 0; i < t.count; i++)
        list += (i ? ", " : "") + std::string(t.reg) + std::to_string(40 + i);
    return t.count == 1 ? list : "{" + list + "}";
}

/* One scalar access per element: `op` is "ld" or "st". */
static std::string scalars(const std::string &op, const std::string &space, const access_type &t,
                           const std::string &address, int offset) {
    std::string text;
    for (int i = 0; i < t.count; i++) {
        std::string reg = std::string(t.reg) + std::to_string(40 + i);
        std::string at =
            "[" + address + "+" + std::to_string(offset + i * (int)t.width) + "]";
        text += "    " + op + space + "." + t.scalar + " "
            + (op == "ld" ? reg + ", " + at : at + ", " + reg) + ";\n";
    }
    return text;
}

/* Addresses: %rd10 in `in` and %rd11 in `out` for this lane; %rd12, %r20 and %rd13 in the
   space under test for this lane, and %rd14, %r21 and %rd15 for lane 31 - %r3. */
static const char ADDRESSES[] =
    "    mul.wide.u32 %rd20, %r3, 64;\n"
    "    sub.s32 %r22, 31, %r3;\n"
    "    mul.wide.u32 %rd21, %r22, 64;\n"
    "    add.s64 %rd10, %rd2, %rd20;\n"
    "    add.s64 %rd11, %rd1, %rd20;\n"
    "    add.s64 %rd12, %rd3, %rd20;\n"
    "    add.s64 %rd14, %rd3, %rd21;\n"
    "    mov.u32 %r23, sh;\n"
    "    shl.b32 %r20, %r3, 6;\n"
    "    add.s32 %r20, %r23, %r20;\n"
    "    shl.b32 %r21, %r22, 6;\n"
    "    add.s32 %r21, %r23, %r21;\n";

static const char SHARED[] = ".shared .align 16 .b8 sh[4096];";

/* Tests ld or st of one type in ".global", ".shared" or the generic space "": lane l
   moves its element through the place of lane 31 - l in the space. The offsets from the
   address are positive and negative. */
static void moves(const char *op, const char *space, const access_type &t) {
    bool is_shared = !strcmp(space, ".shared"), load = !strcmp(op, "ld");
    std::string mine = is_shared ? "%r20" : "%rd12", other = is_shared ? "%r21" : "%rd14";
    for (int offset : {0, 16, -32}) {
        std::string at = offset ? "+" + std::to_string(offset) : "";
        std::string place = "+32" + at, form = std::string(op) + space + "." + t.suffix, tested;
        std::string body = ADDRESSES;
        body += is_shared ? "    add.s32 %r20, %r20, 32;\n    add.s32 %r21, %r21, 32;\n"
                          : "    add.s64 %rd12, %rd12, 32;\n    add.s64 %rd14, %rd14, 32;\n";
        body += scalars("ld", ".global", t, "%rd10", 0);
        if (load) {
            body += scalars("st", is_shared ? ".shared" : ".global", t, mine, offset);
            tested = "    " + form + " " + reg_list(t) + ", [" + other + at + "];\n";
            body += "    bar.sync 0;\n" + tested;
        } else {
            tested = "    " + form + " [" + mine + at + "], " + reg_list(t) + ";\n";
            body += tested + "    bar.sync 0;\n"
                + scalars("ld", is_shared ? ".shared" : ".global", t, other, offset);
        }
        body += scalars("st", ".global", t, "%rd11", 0);
        record_forms(tested);
        test_memory memory;
        runs_clean(form.c_str(), ptx_program(body, SHARED), {}, memory, [&] {
            size_t wrong = 0, n = t.width * (size_t)t.count;
            for (size_t l = 0; l < 32; l++) {
                const unsigned char *got = memory.out.data + 64 * l;
                wrong += memcmp(got, memory.in.data + 64 * (31 - l), n) != 0;
                for (size_t i = n; i < 64; i++) wrong += got[i] != 0xee;
            }
            CHECK(wrong == 0, "%s at offset %d: %zu differences", form.c_str(), offset, wrong);
        });
    }
}

static void test_moves(void) {
    static const access_type *const common[] = {&U16, &U32, &F32, &U64, &F64, &V2_F32, &V2_U32,
                                                &V4_F32, &V4_U32};
    for (const access_type *t : common) {
        moves("ld", ".global", *t);
        moves("st", ".global", *t);
        moves("ld", ".shared", *t);
        if (t != &U16) moves("st", ".shared", *t);
    }
    for (const access_type *t : {&V2_U64, &V4_B32}) {
        moves("ld", ".shared", *t);
        moves("st", ".shared", *t);
    }
    moves("st", ".shared", V2_F64);
    for (const access_type *t : {&U16, &U32, &F32, &U64, &V2_U32, &V4_F32}) {
        moves("ld", "", *t);
        moves("st", "", *t);
    }
}

/* Loads into registers that are wider than the type: they extend. Stores from wider
   registers: they take the low bits. */
static void test_widths(void) {
    struct row {
        const char *text;
        uint64_t (*expected)(const unsigned char *in);
    };
    static const row rows[] = {
        {"ld.global.s32 %rd40, [%rd10];",
         [](const unsigned char *in) { return (uint64_t)*(const int32_t *)in; }},
        {"ld.global.u32 %rd40, [%rd10];",
         [](const unsigned char *in) { return (uint64_t)*(const uint32_t *)in; }},
        {"ld.shared.s32 %rd40, [%r20];",
         [](const unsigned char *in) { return (uint64_t)*(const int32_t *)in; }},
        {"ld.shared.u32 %rd40, [%r20];",
         [](const unsigned char *in) { return (uint64_t)*(const uint32_t *)in; }},
        {"ld.global.u16 %r41, [%rd10+2]; cvt.u64.u32 %rd40, %r41;",
         [](const unsigned char *in) { return (uint64_t)((const uint16_t *)in)[1]; }},
        {"mov.b64 %rd40, 0; st.shared.u64 [%r20], %rd40; ld.global.u64 %rd41, [%rd10]; "
         "cvt.u32.u64 %r41, %rd41; st.shared.u8 [%r20+3], %r41; cvt.u16.u64 %rs41, %rd41; "
         "st.shared.u8 [%r20+6], %rs41; ld.shared.u64 %rd40, [%r20];",
         [](const unsigned char *in) { return (uint64_t)in[0] << 24 | (uint64_t)in[0] << 48; }},
        {"mov.b64 %rd40, -1; st.global.u64 [%rd11], %rd40; ld.global.u64 %rd41, [%rd10]; "
         "st.global.u32 [%rd11+4], %rd41; ld.global.u64 %rd40, [%rd11];",
         [](const unsigned char *in) {
             return (uint64_t)*(const uint32_t *)in << 32 | 0xffffffff;
         }},
        {"mov.b64 %rd40, -1; st.global.u64 [%rd11], %rd40; ld.global.u16 %rs41, [%rd10+4]; "
         "st.global.u16 [%rd11+2], %rs41; ld.global.u64 %rd40, [%rd11];",
         [](const unsigned char *in) {
             return (uint64_t)((const uint16_t *)in)[2] << 16 | 0xffffffff0000ffff;
         }},
    };
    for (const row &r : rows) {
        std::string body = std::string(ADDRESSES)
            + "    ld.global.u64 %rd50, [%rd10];\n    st.shared.u64 [%r20], %rd50;\n"
            + r.text + "\n    st.global.u64 [%rd11], %rd40;\n";
        record_forms(r.text);
        test_memory memory;
        runs_clean(r.text, ptx_program(body, SHARED), {}, memory, [&] {
            size_t wrong = 0;
            for (size_t l = 0; l < 32; l++)
                wrong += memory.out.as<uint64_t>()[8 * l] != r.expected(memory.in.data + 64 * l);
            CHECK(wrong == 0, "%s: %zu lanes are wrong", r.text, wrong);
        });
    }
}

/* A vector load whose destination contains its own address register. */
static void test_own_address(void) {
    test_memory memory;
    std::string body =
        "    mul.wide.u32 %rd20, %r3, 16;\n"
        "    add.s64 %rd21, %rd2, %rd20;\n"
        "    add.s64 %rd22, %rd1, %rd20;\n"
        "    mov.u32 %r20, sh;\n"
        "    shl.b32 %r21, %r3, 4;\n"
        "    add.s32 %r20, %r20, %r21;\n"
        "    ld.global.v4.u32 {%r40, %r41, %r42, %r43}, [%rd21];\n"
        "    st.shared.v4.u32 [%r20], {%r40, %r41, %r42, %r43};\n"
        "    ld.shared.v4.u32 {%r20, %r41, %r42, %r43}, [%r20];\n"
        "    st.global.v2.u32 [%rd22], {%r41, %r43};\n"
        "    ld.global.u64 %rd21, [%rd21];\n"
        "    st.global.u64 [%rd22+8], %rd21;\n";
    runs_clean("an address register as destination", ptx_program(body, SHARED), {}, memory, [&] {
        size_t wrong = 0;
        for (size_t l = 0; l < 32; l++) {
            const uint32_t *got = memory.out.as<uint32_t>() + 4 * l;
            const uint32_t *in = memory.in.as<uint32_t>() + 4 * l;
            wrong += got[0] != in[1] || got[1] != in[3] || got[2] != in[0] || got[3] != in[1];
        }
        CHECK(wrong == 0, "%zu lanes are wrong", wrong);
    });
}


// >>shared and local variables

/* Two static arrays and the dynamic array do not overlap; all names of dynamic arrays
   denote the same memory. */
static void test_shared_variables(void) {
    test_memory memory;
    launch_shape s;
    s.shared = 128;
    std::string body =
        "    .shared .align 16 .b8 inner[128];\n"
        "    .shared .align 8 .u64 one;\n"
        "    mov.u32 %r20, sh;\n"
        "    mov.u32 %r21, inner;\n"
        "    mov.u32 %r22, memory;\n"
        "    mov.u32 %r23, raw;\n"
        "    shl.b32 %r24, %r3, 2;\n"
        "    add.s32 %r25, %r20, %r24;\n"
        "    add.s32 %r26, %r21, %r24;\n"
        "    add.s32 %r27, %r22, %r24;\n"
        "    add.s32 %r28, %r3, 1000;\n"
        "    st.shared.u32 [%r25], %r3;\n"
        "    st.shared.u32 [%r26], %r28;\n"
        "    add.s32 %r28, %r3, 2000;\n"
        "    st.shared.u32 [%r27], %r28;\n"
        "    setp.ne.s32 %p1, %r3, 0;\n"
        "    mov.b64 %rd20, 1311768467463790320;\n"
        "    @%p1 bra $L_wait;\n"
        "    st.shared.u64 [one], %rd20;\n"
        "$L_wait:\n"
        "    bar.sync 0;\n"
        "    add.s32 %r23, %r23, %r24;\n"
        "    ld.shared.u32 %r30, [%r25];\n"
        "    ld.shared.u32 %r31, [%r26];\n"
        "    ld.shared.u32 %r32, [%r23];\n"
        "    ld.shared.u32 %r33, [inner+124];\n"
        "    ld.shared.u32 %r34, [memory+4];\n"
        "    ld.shared.u64 %rd21, [one];\n"
        "    mul.wide.u32 %rd22, %r3, 32;\n"
        "    add.s64 %rd22, %rd1, %rd22;\n"
        "    st.global.v4.u32 [%rd22], {%r30, %r31, %r32, %r33};\n"
        "    st.global.u32 [%rd22+16], %r34;\n"
        "    and.b32 %r35, %r22, 127;\n"
        "    st.global.u32 [%rd22+20], %r35;\n"
        "    st.global.u64 [%rd22+24], %rd21;\n";
    std::string globals =
        ".shared .align 4 .b8 sh[128];\n"
        ".extern .shared .align 128 .b8 memory[];\n"
        ".extern .shared .align 128 .b8 raw[];";
    record_forms("mov.u32 %r20, sh;\nmov.u32 %r22, memory;");
    runs_clean("shared variables", ptx_program(body, globals), s, memory, [&] {
        size_t wrong = 0;
        for (uint32_t l = 0; l < 32; l++) {
            const uint32_t *got = memory.out.as<uint32_t>() + 8 * l;
            wrong += got[0] != l || got[1] != 1000 + l || got[2] != 2000 + l;
            wrong += got[3] != 1031 || got[4] != 2001 || got[5] != 0;
            wrong += got[6] != 0x9abcdef0 || got[7] != 0x12345678;
        }
        CHECK(wrong == 0, "%zu values are wrong", wrong);
    });
}

/* Each thread has its own local memory, also when the index depends on the thread. */
static void test_local(void) {
    test_memory memory;
    launch_shape s;
    s.block = 96;
    s.grid = 2;
    std::string body =
        "    .local .align 8 .b8 depot[72];\n"
        "    .reg .b64 %SP;\n"
        "    .reg .b64 %SPL;\n"
        "    mov.u64 %SPL, depot;\n"
        "    add.u64 %rd20, %SPL, 0;\n"
        "    mad.lo.s32 %r20, %r4, 96, %r2;\n"
        "    cvt.u64.u32 %rd21, %r20;\n"
        "    mov.u32 %r21, 0;\n"
        "    mov.u64 %rd22, %rd20;\n"
        "$L_store:\n"
        "    st.local.u64 [%rd22], %rd21;\n"
        "    add.s64 %rd21, %rd21, 1000;\n"
        "    add.s64 %rd22, %rd22, 8;\n"
        "    add.s32 %r21, %r21, 1;\n"
        "    setp.lt.u32 %p1, %r21, 9;\n"
        "    @%p1 bra $L_store;\n"
        "    rem.u32 %r22, %r20, 9;\n"
        "    mul.wide.u32 %rd23, %r22, 8;\n"
        "    add.s64 %rd24, %rd20, %rd23;\n"
        "    ld.local.u64 %rd25, [%rd24];\n"
        "    ld.local.u64 %rd26, [%rd20+64];\n"
        "    mul.wide.u32 %rd27, %r20, 16;\n"
        "    add.s64 %rd27, %rd1, %rd27;\n"
        "    st.global.u64 [%rd27], %rd25;\n"
        "    st.global.u64 [%rd27+8], %rd26;\n";
    record_forms("st.local.u64 [%rd22], %rd21;\nld.local.u64 %rd25, [%rd24];\n"
                 "mov.u64 %rd1, depot;");
    runs_clean("local memory", ptx_program(body), s, memory, [&] {
        size_t wrong = 0;
        for (uint64_t t = 0; t < 192; t++) {
            const uint64_t *got = memory.out.as<uint64_t>() + 2 * t;
            wrong += got[0] != t + 1000 * (t % 9) || got[1] != t + 8000;
        }
        CHECK(wrong == 0, "%zu threads are wrong", wrong);
    });
}


// >>parameters

struct param_struct {
    int32_t a;
    uint16_t b;
    uint8_t c, d;
    float e[2];
    uint32_t f[2];
    double g;
    uint64_t h;
};

static void test_params(void) {
    static const char text[] =
        ".visible .entry k(\n"
        "    .param .align 8 .b8 k_param_0[40],\n"
        "    .param .u64 k_param_1,\n"
        "    .param .f32 k_param_2,\n"
        "    .param .u8 k_param_3,\n"
        "    .param .u16 k_param_4\n"
        ")\n"
        "{\n"
        "    .reg .b32 %r<20>;\n"
        "    .reg .b64 %rd<20>;\n"
        "    .reg .f32 %f<10>;\n"
        "    .reg .f64 %fd<10>;\n"
        "    mov.b64 %rd1, k_param_0;\n"
        "    ld.param.u64 %rd2, [k_param_1];\n"
        "    cvta.to.global.u64 %rd3, %rd2;\n"
        "    ld.param.s32 %rd4, [%rd1];\n"
        "    st.global.u64 [%rd3], %rd4;\n"
        "    ld.param.u16 %r1, [%rd1+4];\n"
        "    st.global.u32 [%rd3+8], %r1;\n"
        "    ld.param.u8 %r2, [%rd1+6];\n"
        "    st.global.u32 [%rd3+12], %r2;\n"
        "    ld.param.u8 %rd5, [k_param_0+7];\n"
        "    st.global.u64 [%rd3+16], %rd5;\n"
        "    ld.param.v2.f32 {%f1, %f2}, [k_param_0+8];\n"
        "    st.global.v2.f32 [%rd3+24], {%f2, %f1};\n"
        "    add.s64 %rd6, %rd1, 16;\n"
        "    ld.param.v2.u32 {%r3, %r4}, [%rd6];\n"
        "    st.global.v2.u32 [%rd3+32], {%r4, %r3};\n"
        "    ld.param.f64 %fd1, [%rd6+8];\n"
        "    st.global.f64 [%rd3+40], %fd1;\n"
        "    ld.param.u64 %rd7, [%rd6+16];\n"
        "    st.global.u64 [%rd3+48], %rd7;\n"
        "    ld.param.f32 %f3, [k_param_2];\n"
        "    st.global.f32 [%rd3+56], %f3;\n"
        "    ld.param.u8 %r5, [k_param_3];\n"
        "    st.global.u32 [%rd3+60], %r5;\n"
        "    ld.param.u16 %r6, [k_param_4];\n"
        "    st.global.u32 [%rd3+64], %r6;\n"
        "    ld.param.u32 %rd8, [%rd1+20];\n"
        "    st.global.u64 [%rd3+72], %rd8;\n"
        "    ld.param.u32 %r7, [%rd1+0];\n"
        "    st.global.u32 [%rd3+68], %r7;\n"
        "    ret;\n"
        "}\n";
    param_struct p = {-5, 0xfedc, 0x87, 0xf8, {1.5f, -2.5f}, {0x80000001, 0x90000002}, -0.125,
                      0x8123456789abcdef};
    std::string whole = ptx_head() + text;
    test_module m(whole);
    record_forms(whole);
    if (!m.kernel) return;
    device_memory out(128);
    out.fill(0);
    void *address = out.data;
    float f = 3.25f;
    uint8_t byte = 0xfe;
    uint16_t half = 0x8765;
    const void *params[] = {&p, &address, &f, &byte, &half};
    ptx_launch l = {m.kernel, {1, 1, 1}, {1, 1, 1}, 0, params, PTX_ASCENDING, 0};
    CHECK(ptx_run(&l) == 0, "%zu faults", ptx_fault_count());
    print_faults("parameters");
    const uint64_t *u64 = out.as<uint64_t>();
    const uint32_t *u32 = out.as<uint32_t>();
    const float *f32 = out.as<float>();
    CHECK(u64[0] == (uint64_t)-5, "s32 extends its sign: %llx", (unsigned long long)u64[0]);
    CHECK(u32[2] == 0xfedc && u32[3] == 0x87 && u64[2] == 0xf8, "small types extend with zeros");
    CHECK(f32[6] == -2.5f && f32[7] == 1.5f, "%g, %g", f32[6], f32[7]);
    CHECK(u32[8] == 0x90000002 && u32[9] == 0x80000001, "%x, %x", u32[8], u32[9]);
    CHECK(out.as<double>()[5] == -0.125 && u64[6] == p.h, "double and u64");
    CHECK(f32[14] == 3.25f && u32[15] == 0xfe && u32[16] == 0x8765, "scalars");
    CHECK(u32[17] == (uint32_t)-5 && u64[9] == 0x90000002, "by register and offset");
}


// >>special registers

static void test_special_registers(void) {
    static const char *const names[] = {"%tid.x", "%tid.y", "%tid.z", "%ntid.x", "%ntid.y",
                                        "%ntid.z", "%ctaid.x", "%ctaid.y", "%ctaid.z",
                                        "%nctaid.x", "%nctaid.y", "%nctaid.z"};
    const unsigned grid[] = {3, 2, 2}, block[] = {5, 4, 3};
    std::string body =
        "    mov.u32 %r20, %ctaid.z;\n"
        "    mov.u32 %r21, %nctaid.y;\n"
        "    mov.u32 %r22, %ctaid.y;\n"
        "    mad.lo.s32 %r20, %r20, %r21, %r22;\n"
        "    mov.u32 %r21, %nctaid.x;\n"
        "    mad.lo.s32 %r20, %r20, %r21, %r4;\n"
        "    mov.u32 %r21, %tid.z;\n"
        "    mad.lo.s32 %r20, %r20, 3, %r21;\n"
        "    mov.u32 %r21, %tid.y;\n"
        "    mad.lo.s32 %r20, %r20, 4, %r21;\n"
        "    mad.lo.s32 %r20, %r20, 5, %r2;\n"
        "    mul.wide.u32 %rd20, %r20, 48;\n"
        "    add.s64 %rd20, %rd1, %rd20;\n";
    for (int i = 0; i < 12; i++)
        body += std::string("    mov.u32 %r30, ") + names[i] + ";\n    st.global.u32 [%rd20+"
            + std::to_string(4 * i) + "], %r30;\n";
    record_forms(body);
    test_module m(ptx_program(body));
    if (!m.kernel) return;
    test_memory memory;
    const void *a = memory.out.data, *b = memory.in.data;
    const void *params[] = {&a, &b, &b, &memory.n};
    for (ptx_order order : {PTX_ASCENDING, PTX_DESCENDING, PTX_RANDOM}) {
        memory.out.fill(0xee);
        ptx_launch l = {m.kernel, {3, 2, 2}, {5, 4, 3}, 0, params, order, 5};
        CHECK(ptx_run(&l) == 0, "%zu faults", ptx_fault_count());
        print_faults("special registers");
        size_t wrong = 0;
        for (unsigned i = 0; i < 3 * 2 * 2 * 60; i++) {
            const uint32_t *got = memory.out.as<uint32_t>() + 12 * i;
            unsigned t = i % 60, c = i / 60;
            const unsigned expected[] = {t % 5, t / 5 % 4, t / 20, block[0], block[1], block[2],
                                         c % 3, c / 3 % 2, c / 6, grid[0], grid[1], grid[2]};
            for (int k = 0; k < 12; k++) wrong += got[k] != expected[k];
        }
        CHECK(wrong == 0, "%zu values are wrong", wrong);
    }
}


// >>cp.async

/* Lane l copies 16 bytes: l % 17 come from global memory, and the rest is zero. */
static void test_copy_sizes(void) {
    test_memory memory;
    std::string body = std::string(ADDRESSES) +
        "    rem.u32 %r30, %r3, 17;\n"
        "    mov.b64 %rd30, -1;\n"
        "    st.shared.u64 [%r20], %rd30;\n"
        "    st.shared.u64 [%r20+8], %rd30;\n"
        "    st.shared.u64 [%r20+16], %rd30;\n"
        "    st.shared.u64 [%r20+24], %rd30;\n"
        "    cp.async.cg.shared.global [%r20], [%rd10], 16, %r30;\n"
        "    cp.async.cg.shared.global [%r20+16], [%rd10+32], 16;\n"
        "    cp.async.commit_group;\n"
        "    cp.async.wait_group 0;\n"
        "    bar.sync 0;\n"
        "    ld.shared.v4.u32 {%r40, %r41, %r42, %r43}, [%r21];\n"
        "    st.global.v4.u32 [%rd11], {%r40, %r41, %r42, %r43};\n"
        "    ld.shared.v4.u32 {%r40, %r41, %r42, %r43}, [%r21+16];\n"
        "    st.global.v4.u32 [%rd11+16], {%r40, %r41, %r42, %r43};\n";
    record_forms(body);
    runs_clean("cp.async with a size", ptx_program(body, SHARED), {}, memory, [&] {
        size_t wrong = 0;
        for (size_t l = 0; l < 32; l++) {
            const unsigned char *got = memory.out.data + 64 * l;
            const unsigned char *in = memory.in.data + 64 * (31 - l);
            for (size_t i = 0; i < 16; i++) wrong += got[i] != (i < (31 - l) % 17 ? in[i] : 0);
            wrong += memcmp(got + 16, in + 32, 16) != 0;
        }
        CHECK(wrong == 0, "%zu bytes are wrong", wrong);
    });
}

/* A ring of three stages: stage i is read when at most two later groups are pending. */
static void test_copy_ring(void) {
    test_memory memory;
    std::string body = ADDRESSES;
    auto copy = [](int stage, int from) {
        return "    cp.async.cg.shared.global [%r20+" + std::to_string(16 * stage) + "], [%rd10+"
            + std::to_string(16 * from) + "], 16, 16;\n    cp.async.commit_group;\n";
    };
    auto use = [](int stage, int to, const char *wait) {
        return std::string("    cp.async.wait_group ") + wait
            + ";\n    ld.shared.v4.u32 {%r40, %r41, %r42, %r43}, [%r20+"
            + std::to_string(16 * stage)
            + "];\n    st.global.v4.u32 [%rd11+" + std::to_string(16 * to)
            + "], {%r40, %r41, %r42, %r43};\n";
    };
    body += copy(0, 3) + copy(1, 2) + copy(2, 1) + use(0, 0, "2");
    body += copy(0, 0) + use(1, 1, "2") + use(2, 2, "1") + use(0, 3, "0");
    record_forms(body);
    runs_clean("a ring of cp.async groups", ptx_program(body, SHARED), {}, memory, [&] {
        size_t wrong = 0;
        for (size_t l = 0; l < 32; l++)
            for (size_t i = 0; i < 4; i++)
                wrong += memcmp(memory.out.data + 64 * l + 16 * i,
                                memory.in.data + 64 * l + 16 * (3 - i), 16) != 0;
        CHECK(wrong == 0, "%zu parts are wrong", wrong);
    });
}


// >>ldmatrix

/* Matrix m has its row r at 80 (8 m + r) bytes; lane 8 m + r passes this address. Thread
   t receives of each matrix the elements 2 (t % 4) and 2 (t % 4) + 1 of row t / 4, or of
   column t / 4 if .trans is given. */
static void ldmatrix(int count, bool transposed) {
    std::string x = std::to_string(count), regs = "{%r40", form;
    for (int i = 1; i < count; i++) regs += ", %r" + std::to_string(40 + i);
    form = "ldmatrix.sync.aligned.m8n8.x" + x + (transposed ? ".trans" : "") + ".shared.b16";
    std::string body =
        "    mov.u32 %r20, sh;\n"
        "    mad.lo.s32 %r20, %r3, 80, %r20;\n"
        "    mul.wide.u32 %rd20, %r3, 16;\n"
        "    add.s64 %rd21, %rd2, %rd20;\n"
        "    add.s64 %rd22, %rd1, %rd20;\n"
        "    ld.global.v4.u32 {%r30, %r31, %r32, %r33}, [%rd21];\n"
        "    st.shared.v4.u32 [%r20], {%r30, %r31, %r32, %r33};\n"
        "    bar.sync 0;\n"
        "    " + form + " " + regs + "}, [%r20];\n";
    record_forms("    " + form + " " + regs + "}, [%r20];\n");
    for (int i = 0; i < count; i++)
        body += "    st.global.u32 [%rd22+" + std::to_string(4 * i) + "], %r"
            + std::to_string(40 + i) + ";\n";
    std::string text = ptx_program(body, SHARED);
    if (count < 4) { /* nvcc emits only .x4 today */
        char error[512] = "";
        ptx_module *m = ptx_load(text.c_str(), text.size(), error, sizeof error);
        CHECK(m || strstr(error, form.c_str()), "%s: %s", form.c_str(), error);
        if (!m) return;
        ptx_unload(m);
    }
    test_memory memory;
    runs_clean(form.c_str(), text, {}, memory, [&] {
        size_t wrong = 0;
        const uint16_t *in = memory.in.as<uint16_t>();
        for (int t = 0; t < 32; t++)
            for (int m = 0; m < count; m++)
                for (int h = 0; h < 2; h++) {
                    int row = t / 4, column = 2 * (t % 4) + h;
                    uint16_t got = memory.out.as<uint16_t>()[8 * t + 2 * m + h];
                    wrong += got != (transposed ? in[64 * m + 8 * column + row]
                                                : in[64 * m + 8 * row + column]);
                }
        CHECK(wrong == 0, "%s: %zu elements are wrong", form.c_str(), wrong);
    });
}

static void test_ldmatrix(void) {
    for (int count : {1, 2, 4}) {
        ldmatrix(count, false);
        ldmatrix(count, true);
    }
}

void test_spaces(int argc, char **argv) {
    static const test_part parts[] = {
        {"moves", test_moves},
        {"widths", test_widths},
        {"own_address", test_own_address},
        {"shared_variables", test_shared_variables},
        {"local", test_local},
        {"params", test_params},
        {"special_registers", test_special_registers},
        {"copy_sizes", test_copy_sizes},
        {"copy_ring", test_copy_ring},
        {"ldmatrix", test_ldmatrix},
    };
    test_run(parts, sizeof parts / sizeof *parts, argc, argv);
}
