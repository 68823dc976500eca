/* test_ptx.h - shared by the tests of the PTX interpreter. The tests know only ptx.h and
   the PTX ISA: each program is written by hand, and each expectation is a plain C++
   definition of what the ISA prescribes.

   A program is the body of a kernel `k` with this interface:

     parameter   register    meaning
     k_param_0   %rd1        out: 64 KiB of global memory, unwritten
     k_param_1   %rd2        in: 64 KiB of global memory, written
     k_param_2   %rd3        extra: 64 KiB of global memory, written
     k_param_3   %r1         any 32-bit value
                 %r2, %r3    %tid.x and the lane, %tid.x & 31
                 %r4         %ctaid.x

   The body may use the registers %p0 .. %p31, %rs0 .. %rs63, %r10 .. %r127, %rd10 ..
   %rd63, %f0 .. %f127 and %fd0 .. %fd63. */
#ifndef TEST_PTX_H
#define TEST_PTX_H
#include "ptx.h"
#define TEST_SHARED_COUNTS
#include "../test.h"
#include <functional>
#include <initializer_list>
#include <memory>
#include <set>
#include <string>
#include <type_traits>
#include <vector>


// >>modules

/* A loaded module. A module that does not load is a failed check. */
struct test_module {
    std::string text;
    ptx_module *module = nullptr;
    const ptx_kernel *kernel = nullptr; /* the kernel `k` */

    explicit test_module(const std::string &text);
    test_module(const test_module &) = delete;
    test_module &operator=(const test_module &) = delete;
    ~test_module();
};

/* Returns a module's text without kernels: version, target and the global variables. */
std::string ptx_head(const std::string &globals = "");

/* Returns the text of a module with the kernel `k`. `globals` goes before the kernel,
   `directives` between its parameters and its body. */
std::string ptx_program(const std::string &body, const std::string &globals = "",
                        const std::string &directives = "");

/* Returns the lines of the text that end in the mark "//!", in ascending order. */
std::vector<int> marked_lines(const std::string &text);

/* Replaces every "<<A||B>>" by A if `first` is true, otherwise by B. */
std::string alternative(const std::string &text, bool first);
std::string replaced(std::string text, const std::string &from, const std::string &to);


// >>memory and launches

/* A registered range of global memory. Memory before and after it is not registered. */
struct device_memory {
    unsigned char *data;
    size_t bytes;

    explicit device_memory(size_t bytes, bool written = true);
    device_memory(const device_memory &) = delete;
    device_memory &operator=(const device_memory &) = delete;
    ~device_memory();

    template <class T> T *as() const { return reinterpret_cast<T *>(data); }
    void fill(unsigned char byte);
    template <class T> void store(const std::vector<T> &values) {
        memcpy(data, values.data(), values.size() * sizeof(T));
        ptx_memory_written(data, values.size() * sizeof(T));
    }

  private:
    unsigned char *base;
};

struct launch_shape {
    unsigned grid = 1, block = 32;
    size_t shared = 0;
    ptx_order order = PTX_ASCENDING;
    uint64_t seed = 1;
};

/* The memory of a program's interface. */
struct test_memory {
    static constexpr size_t BYTES = 65536;
    device_memory out{BYTES, false}, in{BYTES}, extra;
    uint32_t n = 0;

    explicit test_memory(size_t extra_bytes = BYTES);
    size_t run(const test_module &m, const launch_shape &s);
};

/* Runs a program that must not report any fault, in ascending, descending and two random
   orders. `check` runs after each launch. */
void runs_clean(const char *what, const std::string &text, launch_shape s, test_memory &memory,
                const std::function<void()> &check);

/* A program that must report a fault, and its twin that must not. The body contains
   "<<A||B>>" at the difference: A has the fault, B does not. Lines that end in "//!" are
   those that may be reported. Both run in all orders. */
struct faulty {
    const char *what;
    std::vector<ptx_fault_kind> kinds;  /* one of these, and no others */
    std::string body;
    launch_shape shape = {};
    std::vector<unsigned> threads = {}; /* those that may be reported; none: all */
    std::vector<unsigned> blocks = {};
    std::string globals = "", directives = "";
    std::function<void(test_memory &)> prepare = nullptr;
    size_t extra_bytes = test_memory::BYTES;
    bool optional = false;              /* the interpreter may refuse to load it */
};

void reports(const faulty &f);

/* The program in `globals` and `body`, whose shared memory `sh` holds 4096 bytes. These
   registers are set: %rd20, %rd21, %rd22 are out, in and extra plus 4 %tid.x; %r20 is the
   address of sh plus 4 %tid.x. */
extern const char PLACES[], SHARED_4096[];

/* Prints all faults that have been recorded and clears them. */
void print_faults(const char *what);


// >>the forms that the tests cover, for the mode `test_ptx coverage FILE ..`

/* Adds the instructions of the text to the set of tested forms. A form is an opcode with
   its modifiers, followed by the kinds of its operands. */
void record_forms(const std::string &text);
std::set<std::string> forms_of(const std::string &text);
bool form_is_covered(const std::string &form);


// >>bits

template <class D, class S> D bit_cast_to(S s) {
    static_assert(sizeof(D) == sizeof(S), "the types have the same size");
    D d;
    memcpy(&d, &s, sizeof d);
    return d;
}

inline uint32_t bits(float x) { return bit_cast_to<uint32_t>(x); }
inline uint64_t bits(double x) { return bit_cast_to<uint64_t>(x); }
inline float float_of(uint32_t x) { return bit_cast_to<float>(x); }
inline double double_of(uint64_t x) { return bit_cast_to<double>(x); }

/* Rounds to bf16, to nearest even. */
inline uint16_t bf16_of(float x) {
    uint32_t b = bits(x);
    if (x != x) return 0x7fff;
    return (uint16_t)((b + 0x7fff + (b >> 16 & 1)) >> 16);
}

inline float float_of_bf16(uint16_t x) { return float_of((uint32_t)x << 16); }


// >>parts

void test_arithmetic(int argc, char **argv);
void test_float(int argc, char **argv);
void test_spaces(int argc, char **argv);
void test_warps(int argc, char **argv);
void test_mma(int argc, char **argv);
void test_faults(int argc, char **argv);
void test_races(int argc, char **argv);
void test_counters(int argc, char **argv);
#endif
