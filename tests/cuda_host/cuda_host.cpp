/* cuda_host.cpp - a host implementation of the CUDA runtime ("the shim"): fibers,
   barriers and warp collectives; shared memory; device memory and the runtime API;
   graphs; cuBLASLt on top of stx_gemm; NCCL between processes. One translation unit,
   linked into the tests. See README.md.

   Sections, marked with >> in the code: state, reports, memory, fibers, collectives,
   launch, graphs, runtime, cublaslt, nccl */
#ifndef _GNU_SOURCE
  #define _GNU_SOURCE
#endif
#include "../../seqtx.h"
#include "cuda_runtime.h"
#include "cuda_bf16.h"
#include "cublasLt.h"
#include "nccl.h"
#include <algorithm>
#include <atomic>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <vector>
#include <errno.h>
#include <fcntl.h>
#include <fenv.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#if defined(__SANITIZE_ADDRESS__) || defined(CUDA_HOST_ASAN)
  #define HOST_ASAN 1
#elif defined(__has_feature)
  #if __has_feature(address_sanitizer)
    #define HOST_ASAN 1
  #endif
#endif
#ifdef HOST_ASAN
  #include <sanitizer/asan_interface.h>
  #include <sanitizer/common_interface_defs.h>
  #define POISON(p, n)   __asan_poison_memory_region(p, n)
  #define UNPOISON(p, n) __asan_unpoison_memory_region(p, n)
#else
  #define POISON(p, n)   ((void)(p), (void)(n))
  #define UNPOISON(p, n) ((void)(p), (void)(n))
#endif

// --------------------------------------------------------------------------------------


// >>state

typedef uintptr_t word;

enum {
    WARP = 32,
    MAX_THREADS = 1024,
    PAGE = 4096,
    GUARD = 17 * PAGE,
    HUGE = 2 << 20,
    ZONE = 256,
    SHARED_STATIC = 48 << 10,
    SHARED_MAX = 227 << 10,
    REPORTS_PRINTED = 40,
    AT_ONCE = 64
};

static const word DEVICE_RANGE = (word)64 << 30;
/* A bit pattern that is NaN when read as a float, as two bf16 values or, if repeated,
   as a double. */
static const uint32_t CANARY = 0xFFF5FFF5u;

/* The operands of one lane in a warp collective. They are on the waiting lane's stack
   and are read by the last lane to arrive. */
struct lane_args {
    uint64_t in, out;
    int param, width;
    const cuda_host_product *product;
    uint32_t *r;
    const void *row;
};

struct async_copy {
    unsigned char *dst;
    const unsigned char *src;
    int size, src_bytes;
    long group;
};

struct warp;

enum { READY, IN_WARP, IN_BLOCK, EXITED };

struct fiber {
    cuda_host_thread id;   /* first member: cuda_host_self points to it */
    void *sp;              /* NULL until the fiber starts */
    unsigned number;       /* index in the block */
    warp *w;
    int state, line, kind; /* state: READY..; line, kind: source line and kind of the call
                              in which the fiber waits */
    unsigned mask;
    lane_args *args;
    async_copy *copy;      /* pending cp.async */
    int copies, copies_size;
    long group;            /* number of committed cp.async groups */
    unsigned char *stack;  /* lowest byte above the guard; set when the fiber starts */
};

struct meeting {
    unsigned mask, arrived;
    int kind, line, mixed;
};

struct warp {
    fiber *first;
    unsigned exists, exited;
    int meetings;
    meeting meet[WARP];
};

struct shared_object {
    const void *site;
    unsigned char *p;
    size_t bytes;
    const char *name;
};

struct allocation {
    size_t bytes;
    long serial;
    int device;
};

/* A copy to page-locked memory that has not been delivered yet. */
struct late_copy {
    unsigned char *dst;
    size_t pitch, width, height;
    std::vector<unsigned char> data;
};

enum { DEVICES = 16 };

/* The attributes of a kernel. The limit is set per device. */
struct function_info {
    int dynamic_limit[DEVICES];
    size_t static_bytes;
};

static struct {
    /* settings (cuda_host.h) */
    int thread_order, block_order, fill, devices, major, minor, sms, registers, allow_pinned, trap,
        quiet;
    uint64_t rng, fill_count;
    size_t memory, stack_bytes;
    long fail_alloc, fail_launch, fail_graph[CUDA_HOST_GRAPH_CALLS];
    /* counters */
    long reports, printed, launches, mmas, allocs, serial, syncs, graph_launches;
    size_t in_use, pinned_in_use, shared_requested;
    char last_report[512];
    /* device memory */
    word lo, next; /* lo: start of the device range; next: where the next search for space begins */
    int open;
    word open_lo, open_hi;
    size_t unchecked; /* increases by AT_ONCE per synchronisation since the last check;
                         when it reaches the number of live allocations, the next check
                         runs */
    int written;      /* whether a kernel has run since the last check of the canaries */
    int handler, in_callback;
    struct sigaction old_segv, old_bus;
    cudaError_t sticky;
    /* the running launch */
    const cuda_host_kernel *kernel;
    cuda_host_place place;
    int running; /* whether a fiber is running */
    int entered; /* whether AddressSanitizer was notified that a fiber of the block has started */
    cudaError_t launch_error;
    /* the running block */
    fiber *self;
    unsigned threads, exited, at_barrier;
    int stopped, barrier_kind, barrier_line, barrier_mixed, barrier_sum, barrier_result;
    unsigned ready_head, ready_count;
    fiber *ready[MAX_THREADS];
    fiber fibers[MAX_THREADS], scheduler; /* only sp of the scheduler is used */
    warp warps[MAX_THREADS / WARP];
    unsigned char *stacks;
    size_t stack_pitch;
    unsigned stacks_made, free_count;
    /* the unused stacks, a last-in, first-out list; an entry points to the lowest byte
       above a stack's guard */
    unsigned char *free_stack[MAX_THREADS];
    unsigned char *arena; /* shared memory of a block, with its red zones */
    size_t arena_used, static_bytes, smem;
    int objects;
    shared_object object[256];
} G = {};

enum { ARENA = 1 << 20 };

const cuda_host_thread *cuda_host_self;
const cuda_host_place *cuda_host_where;

static std::recursive_mutex &lock_of(void) {
    static std::recursive_mutex m;
    return m;
}

static std::map<word, allocation> &live(void) {
    static auto *m = new std::map<word, allocation>;
    return *m;
}

static std::map<word, size_t> &pinned(void) {
    static auto *m = new std::map<word, size_t>;
    return *m;
}

static std::map<const void *, function_info> &functions(void) {
    static auto *m = new std::map<const void *, function_info>;
    return *m;
}

static std::vector<late_copy> &late(void) {
    static auto *v = new std::vector<late_copy>;
    return *v;
}

static const cuda_host_executor *executor; /* NULL: the host's code runs the kernels */
static thread_local cudaError_t last_error;
static thread_local int current_device;
#define LOCK std::lock_guard<std::recursive_mutex> guard_(lock_of())

static void defaults(void) {
    static int done;
    if (done) return;
    done = 1;
    G.fill = CUDA_HOST_FILL_NAN;
    G.devices = 1;
    G.major = 9;
    G.sms = 4;
    G.registers = 255;
    G.allow_pinned = 1;
    G.trap = 1;
    G.rng = 88172645463325252u;
    G.memory = (size_t)8 << 30;
    G.stack_bytes = 65536;
}

static struct initialiser {
    initialiser() {
        defaults();
    }
} at_start;

/* Returns a random number in [0, n). */
static inline uint32_t draw(uint32_t n) {
    G.rng ^= G.rng << 13;
    G.rng ^= G.rng >> 7;
    G.rng ^= G.rng << 17;
    return (uint32_t)((G.rng >> 32) * n >> 32);
}

// --------------------------------------------------------------------------------------


// >>reports

/* Copies the text up to the first comma outside brackets and returns its length. */
static int kernel_name(char *out, size_t size, const char *text) {
    size_t n = 0;
    int depth = 0;
    for (; text[n]; n++) {
        if (strchr("(<[{", text[n]))
            depth++;
        else if (strchr(")>]}", text[n]))
            depth--;
        else if (text[n] == ',' && depth <= 0)
            break;
    }
    return snprintf(out, size, "%.*s", (int)n, text);
}

static int where_text(char *out, size_t size) {
    char name[160];
    if (!G.kernel) return snprintf(out, size, "cuda_host: ");
    kernel_name(name, sizeof name, G.kernel->text);
    const uint3 &b = G.place.block;
    if (!G.running)
        return snprintf(out, size, "cuda_host: kernel %s, block (%u,%u,%u): ", name, b.x, b.y, b.z);
    const uint3 &t = G.self->id.index;
    return snprintf(out, size, "cuda_host: kernel %s, block (%u,%u,%u), thread (%u,%u,%u): ", name,
                    b.x, b.y, b.z, t.x, t.y, t.z);
}

__attribute__((format(printf, 1, 2))) static void report(const char *format, ...) {
    va_list list;
    int n = where_text(G.last_report, sizeof G.last_report);
    if (n < 0 || n > (int)sizeof G.last_report - 1) n = (int)sizeof G.last_report - 1;
    va_start(list, format);
    vsnprintf(G.last_report + n, sizeof G.last_report - (size_t)n, format, list);
    va_end(list);
    G.reports++;
    if (G.quiet || G.printed >= REPORTS_PRINTED) return;
    fprintf(stderr, "%s\n", G.last_report);
    if (++G.printed == REPORTS_PRINTED)
        fprintf(stderr, "cuda_host: further reports are counted, not printed\n");
}

static void fill_bytes(void *p, size_t n) {
    unsigned char *b = (unsigned char *)p;
    if (G.fill != CUDA_HOST_FILL_RANDOM) {
        memset(b, G.fill, n);
        return;
    }
    uint64_t s = (++G.fill_count) * 0x9E3779B97F4A7C15u;
    for (size_t i = 0; i < n; i += 8) {
        uint64_t z = (s += 0x9E3779B97F4A7C15u);
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
        z ^= z >> 31;
        memcpy(b + i, &z, n - i < 8 ? n - i : 8);
    }
}

/* Returns the canary value of the byte at p. It depends on the address, so that a zone
   can begin at any byte. */
static inline unsigned char canary_at(const unsigned char *p) {
    return (unsigned char)(CANARY >> 8 * ((word)p & 3));
}

static void lay_canary(unsigned char *p, size_t n) {
    size_t i = 0;
    for (; i < n && ((word)(p + i) & 3); i++) p[i] = canary_at(p + i);
    for (; i + 4 <= n; i += 4) memcpy(p + i, &CANARY, 4);
    for (; i < n; i++) p[i] = canary_at(p + i);
}

/* Returns the index of the first wrong byte, or -1 if there is none. */
static ptrdiff_t broken_canary(const unsigned char *p, size_t n) {
    size_t i = 0;
    uint32_t wrong = 0, u;
    for (; i < n && ((word)(p + i) & 3); i++) wrong |= (uint32_t)(p[i] ^ canary_at(p + i));
    for (; i + 4 <= n; i += 4) {
        memcpy(&u, p + i, 4);
        wrong |= u ^ CANARY;
    }
    for (; i < n; i++) wrong |= (uint32_t)(p[i] ^ canary_at(p + i));
    if (!wrong) return -1;
    for (i = 0; p[i] == canary_at(p + i); i++) continue;
    return (ptrdiff_t)i;
}

// --------------------------------------------------------------------------------------


// >>memory
/* Device memory is one range of addresses. It is PROT_NONE while host code runs, so that
   host accesses fault. device_open makes the used part accessible for a kernel, a copy
   or a matmul. Allocations advance cyclically through a window of at least 64 MB, or
   four times the memory in use if that is more, so that freed memory is not reused
   immediately. */

static inline bool in_device(const void *p) {
    return G.lo && (word)p >= G.lo && (word)p < G.lo + DEVICE_RANGE - HUGE;
}

static void fault_text(char *out, size_t size, word p) {
    int n = where_text(out, size);
    auto i = live().upper_bound(p);
    if (i == live().begin()) {
        snprintf(out + n, size - (size_t)n, "below all device memory, at %#zx\n", (size_t)p);
        return;
    }
    --i;
    const char *who = G.running ? "a kernel left the device's memory"
                                : "host code touched device memory";
    if (p < i->first + i->second.bytes)
        snprintf(out + n, size - (size_t)n,
                 "%s at %#zx: byte %zu of allocation #%ld of %zu bytes\n", who, (size_t)p,
                 (size_t)(p - i->first), i->second.serial, i->second.bytes);
    else
        snprintf(out + n, size - (size_t)n,
                 "%s at %#zx: %zu bytes past allocation #%ld of %zu bytes\n", who, (size_t)p,
                 (size_t)(p - i->first - i->second.bytes), i->second.serial, i->second.bytes);
}

/* Returns whether p is in a fiber's stack or in a guard page. */
static bool in_stacks(word p) {
    return G.stacks && p >= (word)G.stacks && p < (word)G.stacks + G.stack_pitch * MAX_THREADS;
}

/* Writes to stderr from a signal handler. A failure cannot be handled and is ignored. */
static void write_error(const char *text) {
    ssize_t written = write(2, text, strlen(text));
    (void)written;
}

/* Passes a fault that the shim cannot explain to the previous signal handler. */
static void forward_fault(int signal_number, siginfo_t *info, void *context) {
    const struct sigaction *old = signal_number == SIGBUS ? &G.old_bus : &G.old_segv;
    if (G.running) {
        char text[640];
        int n = where_text(text, sizeof text);
        snprintf(text + n, sizeof text - (size_t)n, "fault at %p\n", info->si_addr);
        write_error(text);
    }
    if (old->sa_flags & SA_SIGINFO)
        old->sa_sigaction(signal_number, info, context);
    else
        sigaction(signal_number, old, NULL); /* takes effect when the access is repeated */
}

static void on_fault(int signal_number, siginfo_t *info, void *context) {
    word p = (word)info->si_addr;
    char text[640];
    if (G.trap && in_device((void *)p)) {
        fault_text(text, sizeof text, p);
    } else if (G.trap && in_stacks(p)) {
        int n = where_text(text, sizeof text);
        snprintf(text + n, sizeof text - (size_t)n,
                 "the thread's stack of %zu bytes overflowed (cuda_host_stack)\n", G.stack_bytes);
    } else {
        forward_fault(signal_number, info, context);
        return;
    }
    write_error(text);
    _exit(99);
}

static void install_handler(void) {
    static thread_local int has_stack;
    if (!has_stack) { /* after a stack overflow, the handler needs another stack */
        stack_t s;
        has_stack = 1;
        if (sigaltstack(NULL, &s) == 0 && (s.ss_flags & SS_DISABLE)) {
            memset(&s, 0, sizeof s);
            s.ss_size = 65536;
            s.ss_sp = mmap(NULL, s.ss_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1,
                           0);
            if (s.ss_sp != MAP_FAILED) sigaltstack(&s, NULL);
        }
    }
    if (G.handler) return;
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGSEGV, &action, &G.old_segv);
    sigaction(SIGBUS, &action, &G.old_bus);
    G.handler = 1;
}

static bool reserve(void) {
    if (G.lo) return true;
    void *p = mmap(NULL, DEVICE_RANGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1,
                   0);
    if (p == MAP_FAILED) return false;
    /* The time that mprotect takes is proportional to the number of pages. With 4 KB
       pages, it would add 0.1 ms per MB to each launch. */
    madvise(p, DEVICE_RANGE, MADV_HUGEPAGE);
    G.lo = ((word)p + HUGE - 1) & ~(word)(HUGE - 1);
    G.next = G.lo;
    return true;
}

static void device_open(void) {
    install_handler();
    if (G.open++ || live().empty()) return;
    auto last = live().rbegin();
    G.open_lo = (live().begin()->first - ZONE) & ~(word)(HUGE - 1);
    G.open_hi = (last->first + last->second.bytes + 2 * ZONE + HUGE - 1) & ~(word)(HUGE - 1);
    mprotect((void *)G.open_lo, G.open_hi - G.open_lo, PROT_READ | PROT_WRITE);
}

static void device_close(void) {
    if (--G.open || G.open_lo == G.open_hi) return;
    mprotect((void *)G.open_lo, G.open_hi - G.open_lo, PROT_NONE);
    G.open_lo = G.open_hi = 0;
}

/* Returns the size of the canary after an allocation. An allocation consists of ZONE
   canary bytes, the memory (256-byte aligned), and canary bytes up to the next multiple
   of ZONE plus ZONE more. */
static size_t tail_zone(size_t bytes) {
    return (ZONE - bytes % ZONE) % ZONE + ZONE;
}

static void check_zones(word p, const allocation &a) {
    unsigned char *b = (unsigned char *)p;
    size_t tail = tail_zone(a.bytes);
    ptrdiff_t bad;
    UNPOISON(b - ZONE, ZONE);
    UNPOISON(b + a.bytes, tail);
    if ((bad = broken_canary(b - ZONE, ZONE)) >= 0) {
        report("allocation #%ld of %zu bytes: written %zu bytes below its start", a.serial, a.bytes,
               (size_t)(ZONE - bad));
        lay_canary(b - ZONE, ZONE);
    }
    if ((bad = broken_canary(b + a.bytes, tail)) >= 0) {
        report("allocation #%ld of %zu bytes: written %zu bytes past its end", a.serial, a.bytes,
               (size_t)bad);
        lay_canary(b + a.bytes, tail);
    }
    POISON(b - ZONE, ZONE);
    POISON(b + a.bytes, tail);
}

extern "C" void cuda_host_check(void) {
    LOCK;
    G.written = 0;
    G.unchecked = 0;
    if (live().empty()) return;
    device_open();
    for (auto &i : live()) check_zones(i.first, i.second);
    device_close();
}

/* Called at each synchronisation. Only kernels can damage canaries, because the bounds
   of copies and matmuls are checked before they run. With more than AT_ONCE
   allocations, a synchronisation may skip the check. A later synchronisation or
   cudaFree then detects the damage. */
static void check_after_kernels(void) {
    if (!G.written) return;
    G.unchecked += AT_ONCE;
    if (G.unchecked >= live().size()) cuda_host_check();
}

/* Returns the live allocation that contains [p, p + bytes), or NULL. */
static const allocation *find_device(const void *p, size_t bytes) {
    auto i = live().upper_bound((word)p);
    if (i == live().begin()) return NULL;
    --i;
    return (word)p + bytes <= i->first + i->second.bytes ? &i->second : NULL;
}

static bool in_pinned(const void *p, size_t bytes) {
    auto i = pinned().upper_bound((word)p);
    if (i == pinned().begin()) return false;
    --i;
    return (word)p + bytes <= i->first + i->second;
}

/* Informs the executor that the host has written rows of device memory. */
static void wrote(const void *p, size_t pitch, size_t width, size_t height) {
    if (!executor || !in_device(p)) return;
    for (size_t i = 0; i < height; i++) executor->written((const char *)p + i * pitch, width);
}

/* Performs the deferred copies to page-locked memory. They are delivered at the next
   call that may synchronise the host with them or that uses the memory. Until then the
   destination holds the fill pattern, so that a missing synchronisation has a visible
   effect. */
static void deliver(void) {
    for (auto &c : late())
        for (size_t i = 0; i < c.height; i++)
            memcpy(c.dst + i * c.pitch, c.data.data() + i * c.width, c.width);
    late().clear();
}

static void copy_late(void *dst, size_t dpitch, const void *src, size_t spitch, size_t width,
                      size_t height) {
    late_copy c = {(unsigned char *)dst, dpitch, width, height,
                   std::vector<unsigned char>(width * height)};
    for (size_t i = 0; i < height; i++) {
        memcpy(c.data.data() + i * width, (const char *)src + i * spitch, width);
        fill_bytes(c.dst + i * dpitch, width);
    }
    late().push_back(std::move(c));
}

/* Stores the bounds of the calling thread's stack. Returns false if they are unknown. */
static bool thread_stack(void **base, size_t *size) {
    pthread_attr_t attr;
    if (pthread_getattr_np(pthread_self(), &attr) != 0) return false;
    bool known = pthread_attr_getstack(&attr, base, size) == 0;
    pthread_attr_destroy(&attr);
    return known;
}

/* Searches /proc/self/maps for p. Returns "the host's stack" or "the host's heap" if p
   is in one of them, otherwise NULL. */
static const char *mapping_of(word p) {
    FILE *f = fopen("/proc/self/maps", "r");
    char line[512];
    const char *found = NULL;
    word image_end = 0; /* the end of the last image; an unnamed mapping that begins there
                           is the image's .bss */
    while (f && fgets(line, sizeof line, f)) {
        unsigned long lo, hi, inode;
        char access[8], name[256] = "";
        if (sscanf(line, "%lx-%lx %7s %*s %*s %lu %255s", &lo, &hi, access, &inode, name) < 4)
            continue;
        bool image = inode != 0 || (!name[0] && lo == image_end);
        if (image) image_end = hi;
        if (p < lo || p >= hi) continue;
        if (image || access[0] != 'r' || access[1] != 'w') break;
        if (!strcmp(name, "[stack]"))
            found = "the host's stack";
        else if (!strcmp(name, "[heap]") || !name[0])
            found = "the host's heap";
        break;
    }
    if (f) fclose(f);
    return found;
}

/* Returns the kind of host memory that p certainly points to, or NULL. The images of
   the program and its libraries, with their static variables, are ignored because in
   this build they also contain the device constants. */
static const char *host_memory(word p) {
    static thread_local word stack_lo, stack_hi;
    if (p < PAGE || p >> 47 || in_device((void *)p)) return NULL;
#if defined(HOST_ASAN) && defined(__x86_64__)
    /* Two small integers in a struct can look like an address in AddressSanitizer's
       shadow memory. */
    if (p >= 0x7fff8000 && p < 0x10007fff8000) return NULL;
#endif
    if (in_stacks(p)) return NULL;
    if (G.arena && p >= (word)G.arena && p < (word)G.arena + ARENA) return NULL;
    if (in_pinned((void *)p, 0)) return G.allow_pinned ? NULL : "page-locked host memory";
    if (!stack_hi) {
        void *base;
        size_t size;
        stack_hi = 1;
        if (thread_stack(&base, &size)) {
            stack_lo = (word)base;
            stack_hi = (word)base + size;
        }
    }
    if (p >= stack_lo && p < stack_hi) return "the host's stack";
    /* The mincore call rules out most words that are not pointers, without parsing the
       mappings. */
    unsigned char resident;
    if (mincore((void *)(p & ~(word)(PAGE - 1)), 1, &resident) && errno == ENOMEM) return NULL;
    return mapping_of(p);
}

void cuda_host_check_argument(const char *text, int number, const void *data, size_t bytes,
                              int exact) {
    char name[160];
    LOCK;
    for (size_t i = 0; i + 8 <= bytes; i += 8) {
        word p;
        const char *what;
        memcpy(&p, (const char *)data + i, 8);
        /* A pair of small integers can look like an address, and so can an integer
           followed by padding, because padding holds leftover data. */
        if (!exact && (p >> 32 == 0 || (uint32_t)p < 65536)) continue;
        const allocation *a = in_device((void *)p) ? find_device((void *)p, 0) : NULL;
        if (a && a->device != current_device) {
            kernel_name(name, sizeof name, text);
            report("launch of %s on GPU %d: argument %d holds %p, which is memory of GPU %d", name,
                   current_device, number, (void *)p, a->device);
        }
        if ((what = host_memory(p)) == NULL) continue;
        kernel_name(name, sizeof name, text);
        if (exact)
            report("launch of %s: argument %d, %p, points to %s", name, number, (void *)p, what);
        else
            report("launch of %s: argument %d holds %p at byte %zu, which points to %s", name,
                   number, (void *)p, i, what);
    }
}

// --------------------------------------------------------------------------------------


// >>fibers
/* cuda_host_switch saves the callee-saved registers on the current stack, stores the
   stack pointer in *from and continues on the stack `to`. The floating-point control
   words are set once per block, because kernels do not change them. Saving and
   restoring them would dominate the cost of a switch. */

#if defined(__x86_64__)
extern "C" void cuda_host_switch(void **from, void *to);
__asm__(
    ".text\n.align 16\n.globl cuda_host_switch\n.type cuda_host_switch,@function\n"
    "cuda_host_switch:\n"
    "  pushq %rbp\n  pushq %rbx\n  pushq %r12\n  pushq %r13\n  pushq %r14\n  pushq %r15\n"
    "  movq %rsp, (%rdi)\n  movq %rsi, %rsp\n"
    "  popq %r15\n  popq %r14\n  popq %r13\n  popq %r12\n  popq %rbx\n  popq %rbp\n  ret\n"
    ".size cuda_host_switch,.-cuda_host_switch\n");

static void *new_stack(unsigned char *top, void (*entry)(void)) {
    void **s = (void **)((word)top & ~(word)15);
    *--s = NULL; /* return address of entry, which never returns */
    /* The ret instruction that pops `entry` leaves the stack pointer at 8 mod 16, as a
       call does. */
    *--s = (void *)entry;
    for (int i = 0; i < 6; i++) *--s = NULL;
    return s;
}
#elif defined(__aarch64__)
extern "C" void cuda_host_switch(void **from, void *to);
__asm__(
    ".text\n.align 4\n.globl cuda_host_switch\n.type cuda_host_switch,%function\n"
    "cuda_host_switch:\n"
    "  sub sp, sp, #176\n"
    "  stp x19, x20, [sp, #0]\n  stp x21, x22, [sp, #16]\n  stp x23, x24, [sp, #32]\n"
    "  stp x25, x26, [sp, #48]\n"
    "  stp x27, x28, [sp, #64]\n  stp x29, x30, [sp, #80]\n  stp d8, d9, [sp, #96]\n"
    "  stp d10, d11, [sp, #112]\n"
    "  stp d12, d13, [sp, #128]\n  stp d14, d15, [sp, #144]\n  mrs x9, fpcr\n  str x9, [sp, #160]\n"
    "  mov x9, sp\n  str x9, [x0]\n  mov sp, x1\n"
    "  ldp x19, x20, [sp, #0]\n  ldp x21, x22, [sp, #16]\n  ldp x23, x24, [sp, #32]\n"
    "  ldp x25, x26, [sp, #48]\n"
    "  ldp x27, x28, [sp, #64]\n  ldp x29, x30, [sp, #80]\n  ldp d8, d9, [sp, #96]\n"
    "  ldp d10, d11, [sp, #112]\n"
    "  ldp d12, d13, [sp, #128]\n  ldp d14, d15, [sp, #144]\n  ldr x9, [sp, #160]\n  msr fpcr, x9\n"
    "  add sp, sp, #176\n  ret\n"
    ".size cuda_host_switch,.-cuda_host_switch\n");

static void *new_stack(unsigned char *top, void (*entry)(void)) {
    unsigned char *s = (unsigned char *)((word)top & ~(word)15) - 176;
    memset(s, 0, 176);
    memcpy(s + 88, &entry, 8); /* x30 */
    return s;
}
#else
  #include <ucontext.h>

static void cuda_host_switch(void **from, void *to) {
    ucontext_t here;
    *from = &here;
    swapcontext(&here, (ucontext_t *)to);
}

static void *new_stack(unsigned char *top, void (*entry)(void)) {
    ucontext_t *c = (ucontext_t *)(((word)top - sizeof(ucontext_t)) & ~(word)63);
    getcontext(c);
    c->uc_stack.ss_sp = (unsigned char *)c - G.stack_bytes / 2;
    c->uc_stack.ss_size = G.stack_bytes / 2;
    c->uc_link = NULL;
    makecontext(c, entry, 0);
    return c;
}
#endif

/* Makes kernels round to nearest and keep denormals, as on the device, and restores the
   caller's floating-point mode at the end. */
struct float_mode {
#if defined(__x86_64__)
    uint32_t mxcsr;
    uint16_t x87;

    float_mode() {
        uint32_t device = 0x1f80;
        uint16_t device87 = 0x037f;
        __asm__ volatile("stmxcsr %0\n\tfnstcw %1" : "=m"(mxcsr), "=m"(x87));
        __asm__ volatile("ldmxcsr %0\n\tfldcw %1" : : "m"(device), "m"(device87));
    }

    ~float_mode() {
        __asm__ volatile("ldmxcsr %0\n\tfldcw %1" : : "m"(mxcsr), "m"(x87));
    }
#else
    fenv_t env;

    float_mode() {
        fegetenv(&env);
        fesetenv(FE_DFL_ENV);
    }

    ~float_mode() {
        fesetenv(&env);
    }
#endif
};

#ifdef HOST_ASAN
static thread_local const void *host_stack;
static thread_local size_t host_stack_size;
#endif

/* Switches from the running fiber to one that has started or, if `to` is NULL, to the
   scheduler. AddressSanitizer treats all fibers of a block as one fiber whose stack
   spans the stacks of all fibers. Therefore it is notified only once per block, not at
   each of the millions of switches. */
static inline void switch_to(fiber *from, fiber *to) {
    void *sp = to ? to->sp : G.scheduler.sp;
    if (to) {
        G.self = to;
        cuda_host_self = &to->id;
    }
    if (G.ready_count) { /* prefetches the next fiber's stack, which is no longer in the
                            L1 cache */
        const char *next = (const char *)G.ready[G.ready_head]->sp;
        __builtin_prefetch(next);
        __builtin_prefetch(next + 64);
    }
#ifdef HOST_ASAN
    if (!to) __sanitizer_start_switch_fiber(NULL, host_stack, host_stack_size);
#endif
    cuda_host_switch(&from->sp, sp);
}

static inline fiber *take_ready(void) {
    if (!G.ready_count) return NULL;
    if (G.thread_order == CUDA_HOST_RANDOM) {
        unsigned i = (G.ready_head + draw(G.ready_count)) % MAX_THREADS;
        std::swap(G.ready[i], G.ready[G.ready_head]);
    }
    fiber *f = G.ready[G.ready_head];
    G.ready_head = (G.ready_head + 1) % MAX_THREADS;
    G.ready_count--;
    f->state = READY;
    return f;
}

static inline void push_back(fiber *f) {
    G.ready[(G.ready_head + G.ready_count++) % MAX_THREADS] = f;
}

static inline void push_front(fiber *f) {
    G.ready_head = (G.ready_head + MAX_THREADS - 1) % MAX_THREADS;
    G.ready[G.ready_head] = f;
    G.ready_count++;
}

/* Abandons the block. Its fibers are never resumed, so this function never returns,
   although it is not declared noreturn. */
static void stop_block(void) {
    G.stopped = 1;
    switch_to(G.self, NULL);
}

/* Performs the pending copies of f whose group number is less than `before`. */
static void finish_copies(fiber *f, long before) {
    int kept = 0;
    for (int i = 0; i < f->copies; i++) {
        async_copy &c = f->copy[i];
        if (c.group >= before) {
            f->copy[kept++] = c;
            continue;
        }
        memcpy(c.dst, c.src, (size_t)c.src_bytes);
        memset(c.dst + c.src_bytes, 0, (size_t)(c.size - c.src_bytes));
    }
    f->copies = kept;
}

static void fiber_main(void) {
#ifdef HOST_ASAN
    if (!G.entered) __sanitizer_finish_switch_fiber(NULL, NULL, NULL);
    G.entered = 1;
#endif
    for (;;) {
        fiber *f = G.self;
        G.kernel->call();
        finish_copies(f, f->group + 1);
        f->state = EXITED;
        f->w->exited |= 1u << f->id.lane;
        G.exited++;
        fiber *to = take_ready();
        if (!to || to->sp) {
            /* No other fiber can take the stack before this fiber has left it. */
            G.free_stack[G.free_count++] = f->stack;
            switch_to(f, to);
        }
        /* Run a new fiber on this stack, so that threads that never wait share one warm
           stack. */
        to->stack = f->stack;
        to->sp = to->stack;
        G.self = to;
        cuda_host_self = &to->id;
    }
}

static inline void start_fiber(fiber *f) {
    f->stack = G.free_stack[--G.free_count];
    /* The stacks begin at different offsets. Otherwise the used parts of all stacks
       would map to the same cache sets. */
    size_t color = (size_t)(f->stack - G.stacks) / G.stack_pitch * 832 & 8191;
    f->sp = new_stack(f->stack + G.stack_bytes - color, fiber_main);
}

/* Like switch_to, but first starts the fiber `to` if it has not started. */
static inline void leave(fiber *from, fiber *to) {
    if (to && !to->sp) start_fiber(to);
    switch_to(from, to);
}

static inline void wait_for_others(fiber *from) {
    fiber *to = take_ready();
    if (to != from) leave(from, to);
}

/* Makes all threads ready in the configured order. Called at the start of a block, and
   after a barrier when no other fiber is ready. */
static void push_all(void) {
    unsigned n = G.threads;
    G.ready_head = 0;
    if (G.thread_order == CUDA_HOST_DESCENDING)
        for (unsigned i = n; i-- > 0;) push_back(&G.fibers[i]);
    else if (G.thread_order == CUDA_HOST_INTERLEAVED) {
        for (unsigned lane = 0; lane < WARP; lane++)
            for (unsigned i = lane; i < n; i += WARP) push_back(&G.fibers[i]);
    } else
        for (unsigned i = 0; i < n; i++) push_back(&G.fibers[i]);
}

static void push_lanes(warp *w, unsigned mask) {
    if (G.thread_order == CUDA_HOST_ASCENDING) {
        for (int i = WARP - 1; i >= 0; i--)
            if (mask >> i & 1) push_front(w->first + i);
    } else if (G.thread_order == CUDA_HOST_DESCENDING) {
        for (int i = 0; i < WARP; i++)
            if (mask >> i & 1) push_front(w->first + i);
    } else
        for (int i = 0; i < WARP; i++)
            if (mask >> i & 1) push_back(w->first + i);
}

// --------------------------------------------------------------------------------------


// >>collectives

static const char *const barrier_names[] = {"__syncthreads", "__syncthreads_or",
                                            "__syncthreads_and", "__syncthreads_count"};

/* Kinds of warp collectives that have no CUDA_HOST_SHFL.. constant. The kind of an mma
   encodes its number of products, and the kind of an ldmatrix encodes its variant. */
enum {
    MEET_SYNCWARP = 100,
    MEET_MMA_BF16 = 200,
    MEET_MMA_TF32 = 300,
    MEET_LDMATRIX = 400,
    PRODUCTS = 8
};

static const char *meeting_name(int kind) {
    static const char *const name[] = {
        "__shfl_sync",       "__shfl_up_sync",    "__shfl_down_sync",  "__shfl_xor_sync",
        "__ballot_sync",     "__any_sync",        "__all_sync",        "__reduce_add_sync",
        "__reduce_min_sync", "__reduce_max_sync", "__reduce_min_sync", "__reduce_max_sync",
        "__reduce_or_sync",  "__reduce_and_sync", "__reduce_xor_sync"};
    if (kind < MEET_SYNCWARP) return name[kind];
    if (kind < MEET_MMA_BF16) return "__syncwarp";
    if (kind < MEET_MMA_TF32) return "mma (bf16)";
    if (kind < MEET_LDMATRIX) return "mma (tf32)";
    return "ldmatrix";
}

int cuda_host_barrier(int kind, int predicate, int line) {
    fiber *f = G.self;
    int p = predicate != 0;
    if (G.at_barrier == 0) {
        G.barrier_kind = kind;
        G.barrier_line = line;
        G.barrier_mixed = 0;
        G.barrier_sum = kind == CUDA_HOST_SYNC_AND;
    } else if ((G.barrier_line != line || G.barrier_kind != kind) && !G.barrier_mixed) {
        G.barrier_mixed = 1;
        report("barrier divergence: this thread is at %s of line %d, others at %s of line %d",
               barrier_names[kind], line, barrier_names[G.barrier_kind], G.barrier_line);
        stop_block();
    }
    if (kind == CUDA_HOST_SYNC_OR)
        G.barrier_sum |= p;
    else if (kind == CUDA_HOST_SYNC_AND)
        G.barrier_sum &= p;
    else
        G.barrier_sum += p;
    f->state = IN_BLOCK;
    f->line = line;
    f->kind = kind;
    if (++G.at_barrier == G.threads) {
        G.at_barrier = 0;
        G.barrier_result = G.barrier_sum;
        push_all();
    }
    wait_for_others(f);
    return G.barrier_result;
}

/* Waits for the lanes of mask. The last lane to arrive performs op for all of them. */
static inline void meet(int kind, unsigned mask, int line, lane_args *args,
                        void (*op)(warp *, unsigned, int)) {
    fiber *f = G.self;
    warp *w = f->w;
    unsigned bit = 1u << f->id.lane;
    int i;
    if (!(mask & bit)) {
        report("%s of line %d: the mask %#x does not contain the calling lane %u",
               meeting_name(kind), line, mask, f->id.lane);
        stop_block();
    }
    for (i = 0; i < w->meetings; i++)
        if (w->meet[i].mask == mask && w->meet[i].kind == kind) break;
    meeting *m = &w->meet[i];
    if (i == w->meetings) {
        w->meetings++;
        m->mask = mask;
        m->kind = kind;
        m->line = line;
        m->arrived = 0;
        m->mixed = 0;
    } else if (m->line != line && !m->mixed) {
        m->mixed = 1;
        report("%s: lanes of the same mask %#x call it at different places, lines %d and %d",
               meeting_name(kind), mask, m->line, line);
    }
    f->args = args;
    f->state = IN_WARP;
    f->line = line;
    f->kind = kind;
    f->mask = mask;
    m->arrived |= bit;
    if (m->arrived == (mask & w->exists)) {
        unsigned arrived = m->arrived;
        *m = w->meet[--w->meetings];
        if (op) op(w, arrived, kind);
        push_lanes(w, arrived);
    }
    wait_for_others(f);
}

static void whole_warp(int kind, int line) {
    if (G.self->w->exists == 0xffffffffu) return;
    report("%s of line %d: the warp has only the lanes %#x", meeting_name(kind), line,
           G.self->w->exists);
    stop_block();
}

void cuda_host_syncwarp(unsigned mask, int line) {
    meet(MEET_SYNCWARP, mask, line, NULL, NULL);
}

static void do_shuffle(warp *w, unsigned lanes, int kind) {
    for (int i = 0; i < WARP; i++) {
        if (!(lanes >> i & 1)) continue;
        lane_args *a = w->first[i].args;
        /* the device uses only the low 5 bits of the operand */
        int low = i & ~(a->width - 1), p = a->param & 31, from;
        if (kind == CUDA_HOST_SHFL)
            from = low | (p & (a->width - 1));
        else if (kind == CUDA_HOST_SHFL_UP)
            from = i - p < low ? i : i - p;
        else if (kind == CUDA_HOST_SHFL_DOWN)
            from = i + p >= low + a->width ? i : i + p;
        else
            from = (i ^ p) >= low + a->width ? i : i ^ p;
        if (lanes >> from & 1)
            a->out = w->first[from].args->in;
        else
            fill_bytes(&a->out, 8); /* if the source lane does not participate, the result
                                       is undefined in CUDA */
    }
}

uint64_t cuda_host_shfl(int kind, unsigned mask, uint64_t bits, int param, int width, int line) {
    lane_args a;
    if (width < 1 || width > WARP || (width & (width - 1))) {
        report("%s of line %d: the width must be a power of two up to 32, got %d",
               meeting_name(kind), line, width);
        stop_block();
    }
    a.in = bits;
    a.param = param;
    a.width = width;
    meet(kind, mask, line, &a, do_shuffle);
    return a.out;
}

static void do_vote(warp *w, unsigned lanes, int kind) {
    unsigned result = 0, first = 1;
    for (int i = 0; i < WARP; i++) {
        if (!(lanes >> i & 1)) continue;
        int v = w->first[i].args->param;
        unsigned u = (unsigned)v, p = v != 0;
        if (first && kind != CUDA_HOST_BALLOT)
            result = kind == CUDA_HOST_ANY || kind == CUDA_HOST_ALL ? p : u;
        switch (kind) {
        case CUDA_HOST_BALLOT: result |= p << i; break;
        case CUDA_HOST_ANY: result |= p; break;
        case CUDA_HOST_ALL: result &= p; break;
        case CUDA_HOST_RADD:
            if (!first) result += u;
            break;
        case CUDA_HOST_RMIN:
            if (v < (int)result) result = u;
            break;
        case CUDA_HOST_RMAX:
            if (v > (int)result) result = u;
            break;
        case CUDA_HOST_RMIN_U:
            if (u < result) result = u;
            break;
        case CUDA_HOST_RMAX_U:
            if (u > result) result = u;
            break;
        case CUDA_HOST_ROR: result |= u; break;
        case CUDA_HOST_RAND: result &= u; break;
        default:
            if (!first) result ^= u;
        }
        first = 0;
    }
    for (int i = 0; i < WARP; i++)
        if (lanes >> i & 1) w->first[i].args->out = result;
}

unsigned cuda_host_vote(int kind, unsigned mask, int value, int line) {
    lane_args a;
    a.param = value;
    meet(kind, mask, line, &a, do_vote);
    return (unsigned)a.out;
}

unsigned cuda_host_activemask(void) {
    return G.self->w->exists & ~G.self->w->exited;
}

void cuda_host_trap_thread(const char *what, int line) {
    report("%s of line %d", what, line);
    stop_block();
}

/* The fragments, as defined in the PTX ISA, "Matrix Fragments for mma.m16n8k16 with
   floating point type" and "mma.m16n8k8", with g = lane / 4 and t = lane % 4.

             bf16, two elements per register     tf32, one element per register
       a[0]  (g, 2t..)                           (g, t)
       a[1]  (g+8, 2t..)                         (g+8, t)
       a[2]  (g, 2t+8..)                         (g, t+4)
       a[3]  (g+8, 2t+8..)                       (g+8, t+4)
       b[0]  (2t.., g)                           (t, g)
       b[1]  (2t+8.., g)                         (t+4, g)
       c[0], c[1], c[2], c[3]: (g, 2t), (g, 2t+1), (g+8, 2t), (g+8, 2t+1)

   For bf16, the low half of a register holds the lower column of A or row of B.
   Products of bf16 or tf32 values are exact in f32. They are added to c in the order of
   k, and each sum is rounded to nearest. */
typedef float eight __attribute__((vector_size(32)));
typedef uint32_t eight_words __attribute__((vector_size(32)));

/* Computes c += A B for product n. Assembles the rows of c from scalars, because
   loading a vector stalls if parts of it have just been stored. */
template <int K>
static inline void multiply(warp *w, int n, const float (&A)[16][K], const eight (&B)[K]) {
    for (int g = 0; g < 8; g++) {
        float *c[4];
        for (int t = 0; t < 4; t++) c[t] = w->first[4 * g + t].args->product[n].c;
        for (int half = 0; half < 4; half += 2) {
            eight s = {c[0][half], c[0][half + 1], c[1][half], c[1][half + 1],
                       c[2][half], c[2][half + 1], c[3][half], c[3][half + 1]};
            for (int k = 0; k < K; k++) s += A[g + 4 * half][k] * B[k];
            for (int t = 0; t < 4; t++) {
                c[t][half] = s[2 * t];
                c[t][half + 1] = s[2 * t + 1];
            }
        }
    }
}

/* Returns register b[r] of the eight lanes with lane % 4 = t: one row of B in tf32, two
   rows in bf16. */
static inline eight_words row_of_b(warp *w, int n, int t, int r) {
    const uint32_t *b[8];
    for (int g = 0; g < 8; g++) b[g] = w->first[4 * g + t].args->product[n].b;
    return eight_words{b[0][r], b[1][r], b[2][r], b[3][r], b[4][r], b[5][r], b[6][r], b[7][r]};
}

static inline float low_half(uint32_t u) {
    return __uint_as_float(u << 16);
}

static inline float high_half(uint32_t u) {
    return __uint_as_float(u & 0xffff0000u);
}

static void do_mma_bf16(warp *w, unsigned, int kind) {
    G.mmas += kind - MEET_MMA_BF16;
    for (int n = 0; n < kind - MEET_MMA_BF16; n++) {
        float A[16][16];
        eight B[16];
        for (int i = 0; i < WARP; i++) {
            const cuda_host_product &p = w->first[i].args->product[n];
            int g = i >> 2, t = i & 3;
            for (int r = 0; r < 4; r++) {
                float *a = &A[g + (r & 1) * 8][2 * t + (r >> 1) * 8];
                a[0] = low_half(p.a[r]);
                a[1] = high_half(p.a[r]);
            }
        }
        for (int t = 0; t < 4; t++)
            for (int r = 0; r < 2; r++) {
                const eight_words u = row_of_b(w, n, t, r);
                B[2 * t + r * 8] = (eight)(u << 16);
                B[2 * t + r * 8 + 1] = (eight)(u & 0xffff0000u);
            }
        multiply<16>(w, n, A, B);
    }
}

static void do_mma_tf32(warp *w, unsigned, int kind) {
    G.mmas += kind - MEET_MMA_TF32;
    for (int n = 0; n < kind - MEET_MMA_TF32; n++) {
        float A[16][8];
        eight B[8];
        for (int i = 0; i < WARP; i++) {
            const cuda_host_product &p = w->first[i].args->product[n];
            int g = i >> 2, t = i & 3;
            for (int r = 0; r < 4; r++)
                A[g + (r & 1) * 8][t + (r >> 1) * 4] = __uint_as_float(p.a[r] & 0xffffe000u);
        }
        for (int t = 0; t < 4; t++)
            for (int r = 0; r < 2; r++) B[t + r * 4] = (eight)(row_of_b(w, n, t, r) & 0xffffe000u);
        multiply<8>(w, n, A, B);
    }
}

static void mma(int kind, const cuda_host_product *p, int n, int line,
                void (*op)(warp *, unsigned, int)) {
    lane_args l;
    whole_warp(kind, line);
    if (n < 1 || n > PRODUCTS) {
        report("%s of line %d: expected 1 to %d products, got %d", meeting_name(kind), line,
               (int)PRODUCTS, n);
        stop_block();
    }
    l.product = p;
    meet(kind + n, 0xffffffffu, line, &l, op);
}

void cuda_host_mma_bf16(const cuda_host_product *p, int n, int line) {
    mma(MEET_MMA_BF16, p, n, line, do_mma_bf16);
}

void cuda_host_mma_tf32(const cuda_host_product *p, int n, int line) {
    mma(MEET_MMA_TF32, p, n, line, do_mma_tf32);
}

void cuda_host_mma_bf16(float c[4], const uint32_t a[4], const uint32_t b[2], int line) {
    const cuda_host_product p = {c, a, b};
    mma(MEET_MMA_BF16, &p, 1, line, do_mma_bf16);
}

void cuda_host_mma_tf32(float c[4], const uint32_t a[4], const uint32_t b[2], int line) {
    const cuda_host_product p = {c, a, b};
    mma(MEET_MMA_TF32, &p, 1, line, do_mma_tf32);
}

static bool in_shared(const void *p, size_t bytes) {
    for (int i = 0; i < G.objects; i++)
        if ((word)p >= (word)G.object[i].p
            && (word)p + bytes <= (word)G.object[i].p + G.object[i].bytes)
            return true;
    return false;
}

/* Row r of matrix m is the 16 bytes that lane 8 m + r points to. Lane l receives the
   elements (l / 4, 2 (l % 4)) and (l / 4, 2 (l % 4) + 1) of matrix m, transposed if
   trans is set, in the low and high halves of r[m]. */
static void do_ldmatrix(warp *w, unsigned, int kind) {
    int count = (kind - MEET_LDMATRIX) >> 1, trans = (kind - MEET_LDMATRIX) & 1;
    for (int m = 0; m < count; m++) {
        uint16_t e[8][8];
        for (int r = 0; r < 8; r++) memcpy(e[r], w->first[8 * m + r].args->row, 16);
        for (int i = 0; i < WARP; i++) {
            int g = i >> 2, t = i & 3;
            uint32_t lo = trans ? e[2 * t][g] : e[g][2 * t],
                     hi = trans ? e[2 * t + 1][g] : e[g][2 * t + 1];
            w->first[i].args->r[m] = lo | hi << 16;
        }
    }
}

void cuda_host_ldmatrix(uint32_t *r, int count, int trans, const void *row, int line) {
    lane_args l;
    int kind = MEET_LDMATRIX + 2 * count + (trans != 0);
    whole_warp(kind, line);
    if (count != 1 && count != 2 && count != 4) {
        report("ldmatrix of line %d: x%d", line, count);
        stop_block();
    }
    if (G.self->id.lane < 8u * (unsigned)count) {
        if ((word)row & 15) {
            report("ldmatrix of line %d: the row %p is not 16-byte aligned", line, row);
            stop_block();
        }
        if (!in_shared(row, 16)) {
            report("ldmatrix of line %d: the row %p is not in the block's shared memory", line,
                   row);
            stop_block();
        }
    }
    l.r = r;
    l.row = row;
    meet(kind, 0xffffffffu, line, &l, do_ldmatrix);
}

void cuda_host_cp_async(void *smem, const void *gmem, int size, int src_bytes, int line) {
    fiber *f = G.self;
    if (size != 4 && size != 8 && size != 16) {
        report("cp.async of line %d: size %d", line, size);
        stop_block();
    }
    if (src_bytes < 0 || src_bytes > size) {
        report("cp.async of line %d: %d bytes of %d", line, src_bytes, size);
        stop_block();
    }
    if ((word)smem & (word)(size - 1)) {
        report("cp.async of line %d: destination %p, size %d: not aligned", line, smem, size);
        stop_block();
    }
    if (!in_shared(smem, (size_t)size)) {
        report("cp.async of line %d: destination %p is not in the block's shared memory", line,
               smem);
        stop_block();
    }
    /* Even if 0 bytes are copied, the source must be valid: although the hardware reads
       nothing, compute-sanitizer's memcheck reports an invalid address. */
    if ((word)gmem & (word)(size - 1)) {
        report("cp.async of line %d: source %p, size %d: not aligned", line, gmem, size);
        stop_block();
    }
    const size_t checked = (size_t)(src_bytes ? src_bytes : size);
    if (!find_device(gmem, checked) && !in_pinned(gmem, checked)) {
        report("cp.async of line %d: source %p, %d bytes of %d, is not in device memory", line,
               gmem, src_bytes, size);
        stop_block();
    }
    if (f->copies == f->copies_size) {
        f->copies_size = f->copies_size ? 2 * f->copies_size : 16;
        f->copy = (async_copy *)realloc(f->copy, sizeof(async_copy) * (size_t)f->copies_size);
        if (!f->copy) abort();
    }
    async_copy &c = f->copy[f->copies++];
    c.dst = (unsigned char *)smem;
    c.src = (const unsigned char *)gmem;
    c.size = size;
    c.src_bytes = src_bytes;
    c.group = f->group;
    fill_bytes(smem, (size_t)size);
}

void cuda_host_cp_commit(void) {
    G.self->group++;
}

void cuda_host_cp_wait(int n) {
    finish_copies(G.self, n < 0 ? G.self->group + 1 : G.self->group - n);
}

// --------------------------------------------------------------------------------------


// >>launch

/* Creates a shared object in the arena, 128-byte aligned. A canary zone follows each
   object, and another precedes the first. */
static unsigned char *new_object(const void *site, size_t bytes, const char *name) {
    unsigned char *p = G.arena + G.arena_used;
    size_t end = (G.arena_used + bytes + ZONE + 127) & ~(size_t)127;
    shared_object &o = G.object[G.objects++];
    UNPOISON(p, end - G.arena_used);
    fill_bytes(p, bytes);
    lay_canary(p + bytes, end - G.arena_used - bytes);
    POISON(p + bytes, end - G.arena_used - bytes);
    o.site = site;
    o.p = p;
    o.bytes = bytes;
    o.name = name;
    G.arena_used = end;
    return p;
}

/* Returns whether the dynamic shared memory limit was raised on any device. The launch
   has already checked the limit of the current device. */
static bool raised(const function_info &info) {
    for (int limit : info.dynamic_limit)
        if (limit) return true;
    return false;
}

void *cuda_host_shared(const void *site, size_t bytes, size_t align, const char *name) {
    for (int i = 0; i < G.objects; i++)
        if (G.object[i].site == site) return G.object[i].p;
    function_info &info = functions()[G.kernel->function];
    G.static_bytes = ((G.static_bytes + 15) & ~(size_t)15) + bytes;
    info.static_bytes = std::max(info.static_bytes, G.static_bytes);
    if (G.static_bytes > SHARED_STATIC) {
        report("%zu bytes of static shared memory including %s: nvcc compiles at most %d",
               G.static_bytes, name, (int)SHARED_STATIC);
        G.launch_error = cudaErrorInvalidValue;
    } else if (G.static_bytes + G.smem > (size_t)(raised(info) ? SHARED_MAX : SHARED_STATIC)) {
        report("%zu bytes of static and %zu of dynamic shared memory: too much for this launch",
               G.static_bytes, G.smem);
        G.launch_error = cudaErrorInvalidValue;
    }
    if (G.objects == 256) {
        report("more than 256 shared arrays");
        G.launch_error = cudaErrorInvalidValue;
    }
    if (G.launch_error) stop_block();
    if (align > 128) {
        report("%s: alignment %zu", name, align);
        stop_block();
    }
    return new_object(site, bytes, name);
}

void *cuda_host_dynamic(size_t) {
    return G.object[0].p;
}

static void shared_begin(void) {
    if (!G.arena) {
        G.arena = (unsigned char *)mmap(NULL, ARENA, PROT_READ | PROT_WRITE,
                                        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        lay_canary(G.arena, ZONE);
        POISON(G.arena, ARENA);
    }
    G.arena_used = ZONE;
    G.objects = 0;
    G.static_bytes = 0;
    /* The dynamic array is created even if smem is 0, so that its zone detects stray
       accesses. */
    new_object(NULL, G.smem, "the dynamic array");
}

static void shared_end(void) {
    UNPOISON(G.arena, G.arena_used);
    if (broken_canary(G.arena, ZONE) >= 0) {
        report("shared memory: written below the dynamic array");
        lay_canary(G.arena, ZONE);
    }
    for (int i = 0; i < G.objects; i++) {
        const shared_object &o = G.object[i];
        unsigned char *end = i + 1 < G.objects ? G.object[i + 1].p : G.arena + G.arena_used;
        ptrdiff_t bad = broken_canary(o.p + o.bytes, (size_t)(end - o.p) - o.bytes);
        if (bad >= 0)
            report("shared memory: %s of %zu bytes was written %zu bytes past its end", o.name,
                   o.bytes, (size_t)bad);
    }
    POISON(G.arena, G.arena_used);
}

/* Reports the first waiting fiber. Called when no fiber is ready but some have not
   exited. */
static void report_stuck(void) {
    fiber *w = NULL, *b = NULL;
    for (unsigned i = 0; i < G.threads; i++) {
        fiber *f = &G.fibers[i];
        if (f->state == IN_WARP && !w) w = f;
        if (f->state == IN_BLOCK && !b) b = f;
    }
    if (w) {
        unsigned arrived = 0, exited = w->w->exited, mask = w->mask;
        for (int i = 0; i < w->w->meetings; i++)
            if (w->w->meet[i].mask == mask && w->w->meet[i].kind == w->kind)
                arrived = w->w->meet[i].arrived;
        unsigned absent = mask & w->w->exists & ~arrived;
        report("warp %u: lanes %#x wait in %s of line %d with mask %#x, "
               "lanes %#x never arrive (%#x of them have exited)",
               w->number / WARP, arrived, meeting_name(w->kind), w->line, mask, absent,
               absent & exited);
    } else if (b) {
        report("barrier divergence: %u of %u threads wait at %s of line %d "
               "(the first is thread %u), %u have exited",
               G.at_barrier, G.threads, barrier_names[b->kind], b->line, b->number, G.exited);
    }
}

static void make_stacks(void) {
    if (!G.stacks) {
        G.stack_bytes = (G.stack_bytes + PAGE - 1) & ~(size_t)(PAGE - 1);
        /* The pitch is an odd number of pages. With a power of two, all stacks would
           share a few sets of the TLB. */
        G.stack_pitch = G.stack_bytes + GUARD;
        void *p = mmap(NULL, G.stack_pitch * MAX_THREADS, PROT_NONE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (p == MAP_FAILED) {
            fprintf(stderr, "cuda_host: no memory for stacks\n");
            abort();
        }
        G.stacks = (unsigned char *)p;
    }
    for (; G.stacks_made < G.threads; G.stacks_made++) {
        unsigned char *p = G.stacks + G.stacks_made * G.stack_pitch + GUARD;
        if (mprotect(p, G.stack_bytes, PROT_READ | PROT_WRITE)) {
            fprintf(stderr, "cuda_host: no memory for stacks\n");
            abort();
        }
    }
}

/* Sets the fiber fields that are the same in all blocks of a launch. */
static void number_threads(const dim3 &dim) {
    for (unsigned i = 0; i < G.threads; i++) {
        fiber &f = G.fibers[i];
        f.id.index.x = i % dim.x;
        f.id.index.y = i / dim.x % dim.y;
        f.id.index.z = i / dim.x / dim.y;
        f.id.lane = i % WARP;
        f.number = i;
        f.w = &G.warps[i / WARP];
    }
}

static void reset_fibers(void) {
    for (unsigned i = 0; i < G.threads; i++) {
        fiber &f = G.fibers[i];
        f.state = READY;
        f.copies = 0;
        f.group = 0;
        f.sp = NULL;
    }
    G.free_count = 0;
    for (unsigned i = G.threads; i-- > 0;)
        G.free_stack[G.free_count++] = G.stacks + i * G.stack_pitch + GUARD;
    for (unsigned i = 0; i * WARP < G.threads; i++) {
        warp &w = G.warps[i];
        unsigned lanes = std::min(G.threads - i * WARP, (unsigned)WARP);
        w.first = &G.fibers[i * WARP];
        w.exists = lanes == WARP ? 0xffffffffu : (1u << lanes) - 1;
        w.exited = 0;
        w.meetings = 0;
    }
}

/* Runs the fibers of a block until all have exited or none is ready. */
static void run_fibers(void) {
    float_mode device;
    push_all();
    fiber *first = take_ready();
    G.running = 1;
#ifdef HOST_ASAN
    void *fake;
    G.entered = 0;
    __sanitizer_start_switch_fiber(&fake, G.stacks, G.stack_pitch * G.stacks_made);
#endif
    leave(&G.scheduler, first);
#ifdef HOST_ASAN
    __sanitizer_finish_switch_fiber(fake, NULL, NULL);
#endif
    G.running = 0;
}

static void run_block(uint3 block) {
    G.place.block = block;
    G.exited = G.at_barrier = 0;
    G.stopped = 0;
    G.ready_count = 0;
    shared_begin();
    reset_fibers();
    run_fibers();
    if (!G.stopped && G.exited < G.threads) {
        report_stuck();
        G.stopped = 1;
    }
    /* The frames of abandoned fibers never end, so their stacks are still poisoned and
       must be unpoisoned here. */
    if (G.stopped)
        for (unsigned i = 0; i < G.threads; i++)
            UNPOISON(G.stacks + i * G.stack_pitch + GUARD, G.stack_bytes);
    shared_end();
}

/* Returns a random order of the blocks of a launch, or an empty vector for the fixed
   orders and for launches of 2^24 blocks or more. */
static std::vector<uint32_t> random_blocks(uint64_t blocks) {
    std::vector<uint32_t> order;
    if (G.block_order != CUDA_HOST_RANDOM || blocks >= 1u << 24) return order;
    order.resize((size_t)blocks);
    for (size_t i = 0; i < order.size(); i++) order[i] = (uint32_t)i;
    for (size_t i = order.size(); i > 1; i--) std::swap(order[i - 1], order[draw((uint32_t)i)]);
    return order;
}

static int run_by_executor(const cuda_host_kernel &k) {
    int done;
    device_open();
    done = executor->run(k, G.block_order, G.block_order == CUDA_HOST_RANDOM ? draw(1u << 31) : 0);
    device_close();
    return done;
}

static void run_kernel(const cuda_host_kernel &k) {
    if (G.sticky) return;
    deliver();
    G.launches++;
    G.shared_requested += k.smem;
    G.written = 1;
    if (G.fail_launch && --G.fail_launch == 0) {
        G.sticky = last_error = cudaErrorLaunchFailure;
        return;
    }
#ifdef HOST_ASAN
    if (!host_stack) {
        void *base = NULL;
        size_t size = 0;
        if (thread_stack(&base, &size)) {
            host_stack = base;
            host_stack_size = size;
        }
    }
#endif
    if (executor && run_by_executor(k)) return;
    uint64_t blocks = (uint64_t)k.grid.x * k.grid.y * k.grid.z;
    std::vector<uint32_t> order = random_blocks(blocks);
    G.kernel = &k;
    G.place.grid_dim = k.grid;
    G.place.block_dim = k.block;
    G.threads = k.block.x * k.block.y * k.block.z;
    G.smem = k.smem;
    make_stacks();
    number_threads(k.block);
    G.launch_error = cudaSuccess;
    cuda_host_where = &G.place;
    device_open();
    for (uint64_t n = 0; n < blocks && !G.launch_error; n++) {
        uint64_t i = n;
        if (!order.empty())
            i = order[(size_t)n];
        else if (G.block_order == CUDA_HOST_DESCENDING)
            i = blocks - 1 - n;
        uint3 b = {(unsigned)(i % k.grid.x), (unsigned)(i / k.grid.x % k.grid.y),
                   (unsigned)(i / k.grid.x / k.grid.y)};
        run_block(b);
    }
    device_close();
    G.kernel = NULL;
    if (G.launch_error) last_error = G.launch_error;
}

// --------------------------------------------------------------------------------------


// >>graphs: streams, events and captures. Work runs immediately or, while its stream
// captures, is stored as a closure. Work after an exchange with other processes (>>nccl)
// waits in the queue of its stream until the exchange has finished. Exchanges are
// deferred until the host waits for them or work that depends on them is submitted.

typedef std::function<bool()> queued; /* returns true if the work is done, false if it
                                         must be tried again */

/* A node holds a kernel, a function or an exchange. The other two members are empty. */
struct graph_node {
    std::unique_ptr<cuda_host_kernel> kernel;
    std::function<void()> work;
    bool host; /* whether the work runs on the host, not on the device */
    std::function<queued(CUstream_st *)> exchange; /* creates a new exchange for each run */
    const char *what; /* description that cuda_host_graph_node returns; NULL for an exchange */
};

typedef std::vector<std::shared_ptr<graph_node>> node_list;

struct capture {
    CUstream_st *origin;
    cudaStreamCaptureMode mode;
    pthread_t thread;
    bool valid;
    node_list nodes;
    std::vector<CUstream_st *> streams;
};

struct CUstream_st {
    int device;
    bool blocking, busy; /* busy: whether the queue is being processed */
    std::shared_ptr<capture> cap;
    long work, joined;   /* work: number of captured nodes; joined: number of captured
                            nodes for which another stream waits */
    std::deque<queued> queue;
    uint64_t put, done;  /* put: number of queue entries so far; done: number of completed
                            entries */
};

struct CUevent_st {
    int device;
    unsigned flags;
    bool recorded;
    double ms;
    std::shared_ptr<capture> cap;
    CUstream_st *stream;
    long work;
    uint64_t put;
};

struct CUgraph_st {
    node_list nodes;
};

struct CUgraphExec_st {
    node_list nodes;
};

struct CUgraphNode_st {
    int unused;
};

static std::set<CUstream_st *> &streams(void) {
    static auto *s = new std::set<CUstream_st *>;
    return *s;
}

static std::set<CUevent_st *> &events(void) {
    static auto *s = new std::set<CUevent_st *>;
    return *s;
}

static std::set<CUgraph_st *> &graphs(void) {
    static auto *s = new std::set<CUgraph_st *>;
    return *s;
}

static std::set<CUgraphExec_st *> &execs(void) {
    static auto *s = new std::set<CUgraphExec_st *>;
    return *s;
}

/* Returns the descriptions of the nodes (graph_node::what) of the graph that was
   instantiated last. */
static std::vector<const char *> &last_graph(void) {
    static auto *n = new std::vector<const char *>;
    return *n;
}

static std::vector<std::shared_ptr<capture>> &captures(void) {
    static auto *s = new std::vector<std::shared_ptr<capture>>;
    return *s;
}

static cudaError_t fail(cudaError_t e) {
    if (e != cudaSuccess) last_error = e;
    return e;
}

#define ENTER \
  LOCK; \
  if (G.in_callback) return no_callback(); \
  if (!G.devices) return fail(cudaErrorNoDevice); \
  if (G.sticky) return fail(G.sticky)

static cudaError_t no_callback(void) {
    report("a call of the CUDA API from a function of cudaLaunchHostFunc");
    return fail(cudaErrorNotPermitted);
}

static bool is_default(cudaStream_t s) {
    return s == NULL || s == cudaStreamLegacy || s == cudaStreamPerThread;
}

static int device_of(cudaStream_t s) {
    return is_default(s) ? current_device : s->device;
}

static bool bad_stream(cudaStream_t s) {
    return !is_default(s) && !streams().count(s);
}

static capture *capturing(cudaStream_t s) {
    return is_default(s) ? NULL : s->cap.get();
}

/* Called by functions that CUDA forbids during a capture. Invalidates all captures
   except relaxed captures and thread-local captures of other threads. */
static cudaError_t unsafe_call(void) {
    cudaError_t e = cudaSuccess;
    for (auto &c : captures()) {
        if (c->mode == cudaStreamCaptureModeRelaxed) continue;
        if (c->mode == cudaStreamCaptureModeThreadLocal
            && !pthread_equal(c->thread, pthread_self()))
            continue;
        c->valid = false;
        e = cudaErrorStreamCaptureUnsupported;
    }
    return e;
}

/* Called when the legacy stream is used. That stream waits for all blocking streams,
   which is an error while they capture. */
static cudaError_t legacy_use(void) {
    cudaError_t e = cudaSuccess;
    for (auto &c : captures())
        for (auto *s : c->streams)
            if (s->blocking) {
                c->valid = false;
                e = cudaErrorStreamCaptureImplicit;
            }
    return e;
}

static cudaError_t stream_error(cudaStream_t s) {
    if (bad_stream(s)) return cudaErrorInvalidResourceHandle;
    if (is_default(s) && s != cudaStreamPerThread) return legacy_use();
    capture *c = capturing(s);
    return c && !c->valid ? cudaErrorStreamCaptureInvalidated : cudaSuccess;
}

static void capture_node(cudaStream_t s, std::shared_ptr<graph_node> n) {
    s->cap->nodes.push_back(n);
    s->work++;
}

/* Processes the queue of s up to entry `until`, as far as possible. Returns whether that
   entry is done. */
static bool advance(CUstream_st *s, uint64_t until) {
    if (s->busy) return s->done >= until;
    s->busy = true;
    while (s->done < until && !s->queue.empty() && s->queue.front()()) {
        s->queue.pop_front();
        s->done++;
    }
    s->busy = false;
    return s->done >= until;
}

static bool advance(cudaStream_t s) {
    return is_default(s) || advance(s, s->put);
}

static bool event_done(CUevent_st *e) {
    return is_default(e->stream) || !streams().count(e->stream) || advance(e->stream, e->put);
}

/* Waits for all streams, as cudaFree and cudaDeviceSynchronize do. */
static void wait_for_all(void) {
    for (;;) {
        bool all = true;
        for (auto *s : streams())
            if (!advance(s)) all = false;
        if (all) return;
        sched_yield();
    }
}

static void put_in_queue(CUstream_st *s, queued q) {
    s->queue.push_back(q);
    s->put++;
}

static void run_node(const graph_node &n) {
    if (G.sticky) return;
    if (n.kernel)
        run_kernel(*n.kernel);
    else if (n.host)
        n.work();
    else {
        device_open();
        n.work();
        device_close();
    }
}

static void submit_node(cudaStream_t s, std::shared_ptr<graph_node> n, bool at_once) {
    if (capturing(s))
        capture_node(s, n);
    else if (n->exchange) {
        put_in_queue(s, n->exchange(s));
        if (at_once) advance(s);
    } else if (advance(s))
        run_node(*n);
    else
        put_in_queue(s, [n] {
            run_node(*n);
            return true;
        });
}

template <class F>
static cudaError_t submit_work(cudaStream_t s, const char *what, F f, bool host = false) {
    if (capturing(s) || !advance(s)) {
        auto n = std::make_shared<graph_node>();
        n->work = f;
        n->host = host;
        n->what = what;
        submit_node(s, n, false);
    } else if (host)
        f();
    else {
        device_open();
        f();
        device_close();
    }
    return cudaSuccess;
}

static cudaError_t launch_error(const cuda_host_kernel &k, cudaStream_t stream) {
    if (!G.devices) return cudaErrorNoDevice;
    if (G.sticky) return G.sticky;
    uint64_t threads = (uint64_t)k.block.x * k.block.y * k.block.z;
    if (!threads || threads > MAX_THREADS || k.block.x > 1024 || k.block.y > 1024 || k.block.z > 64
        || !k.grid.x || !k.grid.y || !k.grid.z || k.grid.x > 2147483647u || k.grid.y > 65535
        || k.grid.z > 65535)
        return cudaErrorInvalidConfiguration;
    if (threads > k.bound) {
        report("%s: %u threads per block, the launch bound of the kernel is %u", k.text,
               (unsigned)threads, k.bound);
        return cudaErrorInvalidValue;
    }
    size_t limit = SHARED_STATIC;
    auto i = functions().find(k.function);
    if (i != functions().end() && i->second.dynamic_limit[current_device])
        limit = (size_t)i->second.dynamic_limit[current_device];
    if (k.smem > limit) return cudaErrorInvalidValue;
    if (cudaError_t e = stream_error(stream)) return e;
    return device_of(stream) == current_device ? cudaSuccess : cudaErrorInvalidResourceHandle;
}

void cuda_host_submit(const cuda_host_kernel &k, cudaStream_t stream) {
    LOCK;
    if (cudaError_t e = launch_error(k, stream)) {
        fail(e);
        return;
    }
    if (capturing(stream) || !advance(stream)) {
        auto n = std::make_shared<graph_node>();
        n->kernel.reset(k.clone());
        n->host = false;
        n->what = k.text;
        submit_node(stream, n, false);
    } else
        run_kernel(k);
}

extern "C" {
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned int flags) {
    ENTER;
    if (!s || flags > 1) return fail(cudaErrorInvalidValue);
    *s = new CUstream_st();
    (*s)->device = current_device;
    (*s)->blocking = !(flags & cudaStreamNonBlocking);
    (*s)->work = (*s)->joined = 0;
    (*s)->put = (*s)->done = 0;
    (*s)->busy = false;
    streams().insert(*s);
    return cudaSuccess;
}

cudaError_t cudaStreamCreate(cudaStream_t *s) {
    return cudaStreamCreateWithFlags(s, cudaStreamDefault);
}

static void drop_capture(std::shared_ptr<capture> c) {
    for (auto *s : c->streams) s->cap.reset();
    for (size_t i = 0; i < captures().size(); i++)
        if (captures()[i] == c) {
            captures().erase(captures().begin() + (ptrdiff_t)i);
            break;
        }
}

cudaError_t cudaStreamDestroy(cudaStream_t s) {
    LOCK; /* not ENTER: allowed after a sticky error */
    if (is_default(s) || bad_stream(s)) return fail(cudaErrorInvalidResourceHandle);
    if (s->cap) drop_capture(s->cap);
    if (!advance(s)) report("cudaStreamDestroy of a stream whose work waits for other ranks");
    for (auto *e : events())
        if (e->stream == s) e->stream = NULL;
    streams().erase(s);
    delete s;
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t s) {
    ENTER;
    if (bad_stream(s)) return fail(cudaErrorInvalidResourceHandle);
    if (capturing(s)) {
        s->cap->valid = false;
        return fail(cudaErrorStreamCaptureUnsupported);
    }
    if (cudaError_t e = unsafe_call()) return fail(e);
    while (!advance(s)) sched_yield();
    G.syncs++;
    deliver();
    check_after_kernels();
    return fail(G.sticky);
}

cudaError_t cudaStreamQuery(cudaStream_t s) {
    ENTER;
    if (bad_stream(s)) return fail(cudaErrorInvalidResourceHandle);
    if (capturing(s)) {
        s->cap->valid = false;
        return fail(cudaErrorStreamCaptureUnsupported);
    }
    if (cudaError_t e = unsafe_call()) return fail(e);
    if (!advance(s)) return fail(cudaErrorNotReady);
    deliver();
    return fail(G.sticky);
}

cudaError_t cudaDeviceSynchronize(void) {
    ENTER;
    if (!captures().empty()) {
        for (auto &c : captures()) c->valid = false;
        return fail(cudaErrorStreamCaptureUnsupported);
    }
    wait_for_all();
    G.syncs++;
    deliver();
    check_after_kernels();
    return fail(G.sticky);
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned int flags) {
    ENTER;
    if (!e || flags > 7) return fail(cudaErrorInvalidValue);
    *e = new CUevent_st();
    (*e)->device = current_device;
    (*e)->flags = flags;
    events().insert(*e);
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *e) {
    return cudaEventCreateWithFlags(e, cudaEventDefault);
}

cudaError_t cudaEventDestroy(cudaEvent_t e) {
    LOCK;
    if (!events().count(e)) return fail(cudaErrorInvalidResourceHandle);
    events().erase(e);
    delete e;
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) {
    ENTER;
    if (!events().count(e)) return fail(cudaErrorInvalidResourceHandle);
    if (cudaError_t error = stream_error(s)) return fail(error);
    if (e->device != device_of(s)) return fail(cudaErrorInvalidResourceHandle);
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    e->recorded = true;
    e->ms = 1e3 * (double)t.tv_sec + 1e-6 * (double)t.tv_nsec;
    e->stream = s;
    e->cap = is_default(s) ? NULL : s->cap;
    e->work = is_default(s) ? 0 : s->work;
    e->put = is_default(s) ? 0 : s->put;
    return cudaSuccess;
}

/* Invalidates the capture in which e was recorded, because the host cannot wait for
   such an event. */
static cudaError_t captured_event(cudaEvent_t e) {
    if (!e->cap) return cudaSuccess;
    for (auto &c : captures())
        if (c == e->cap) c->valid = false;
    return cudaErrorCapturedEvent;
}

cudaError_t cudaEventSynchronize(cudaEvent_t e) {
    ENTER;
    if (!events().count(e)) return fail(cudaErrorInvalidResourceHandle);
    if (cudaError_t error = captured_event(e)) return fail(error);
    if (cudaError_t error = unsafe_call()) return fail(error);
    while (!event_done(e)) sched_yield();
    G.syncs++;
    deliver();
    check_after_kernels();
    return fail(G.sticky);
}

cudaError_t cudaEventQuery(cudaEvent_t e) {
    ENTER;
    if (!events().count(e)) return fail(cudaErrorInvalidResourceHandle);
    if (cudaError_t error = captured_event(e)) return fail(error);
    if (cudaError_t error = unsafe_call()) return fail(error);
    if (!event_done(e)) return fail(cudaErrorNotReady);
    deliver();
    return fail(G.sticky);
}

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t a, cudaEvent_t b) {
    ENTER;
    if (!ms) return fail(cudaErrorInvalidValue);
    if (!events().count(a) || !events().count(b) || !a->recorded || !b->recorded
        || ((a->flags | b->flags) & cudaEventDisableTiming))
        return fail(cudaErrorInvalidResourceHandle);
    if (a->cap || b->cap) return fail(cudaErrorCapturedEvent);
    *ms = (float)(b->ms - a->ms);
    return cudaSuccess;
}

/* Makes s wait until stream `other` has completed its queue up to entry `until`. */
static void wait_in_queue(cudaStream_t s, cudaStream_t other, uint64_t until) {
    if (is_default(s) || is_default(other) || other == s || other->done >= until) return;
    put_in_queue(s, [other, until] { return !streams().count(other) || advance(other, until); });
}

cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned int flags) {
    ENTER;
    if (!events().count(e)) return fail(cudaErrorInvalidResourceHandle);
    if (flags > 1) return fail(cudaErrorInvalidValue);
    if (cudaError_t error = stream_error(s)) return fail(error);
    if (!e->recorded) return cudaSuccess;
    capture *mine = capturing(s);
    if (!e->cap && mine) {
        mine->valid = false;
        return fail(cudaErrorStreamCaptureIsolation);
    }
    if (!e->cap) {
        wait_in_queue(s, e->stream, e->put);
        return cudaSuccess;
    }
    if (std::find(captures().begin(), captures().end(), e->cap) == captures().end())
        return fail(cudaErrorCapturedEvent);
    if (!e->cap->valid) return fail(cudaErrorStreamCaptureInvalidated);
    if (is_default(s)) {
        e->cap->valid = false;
        return fail(cudaErrorStreamCaptureUnsupported);
    }
    if (mine && mine != e->cap.get()) {
        mine->valid = e->cap->valid = false;
        return fail(cudaErrorStreamCaptureMerge);
    }
    if (!mine) { /* a fork: s joins the capture */
        s->cap = e->cap;
        s->work = s->joined = 0;
        e->cap->streams.push_back(s);
    }
    if (e->stream && e->stream != s) e->stream->joined = std::max(e->stream->joined, e->work);
    return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t fn, void *data) {
    ENTER;
    if (!fn) return fail(cudaErrorInvalidValue);
    if (cudaError_t e = stream_error(s)) return fail(e);
    return submit_work(
        s, "a host function",
        [fn, data] {
            deliver();
            G.in_callback++;
            fn(data);
            G.in_callback--;
        },
        true);
}

/* Returns whether cuda_host_fail_graph has chosen this call to fail. */
static bool should_fail(int call) {
    return G.fail_graph[call] && --G.fail_graph[call] == 0;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t s, enum cudaStreamCaptureMode mode) {
    ENTER;
    if (bad_stream(s)) return fail(cudaErrorInvalidResourceHandle);
    if (is_default(s)) return fail(cudaErrorStreamCaptureUnsupported);
    if (s->cap) return fail(cudaErrorIllegalState);
    if (should_fail(CUDA_HOST_BEGIN_CAPTURE)) return fail(cudaErrorStreamCaptureUnsupported);
    auto c = std::make_shared<capture>();
    c->origin = s;
    c->mode = mode;
    c->thread = pthread_self();
    c->valid = true;
    c->streams.push_back(s);
    s->cap = c;
    s->work = s->joined = 0;
    captures().push_back(c);
    return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *graph) {
    ENTER;
    if (!graph) return fail(cudaErrorInvalidValue);
    *graph = NULL;
    if (bad_stream(s)) return fail(cudaErrorInvalidResourceHandle);
    std::shared_ptr<capture> c = is_default(s) ? NULL : s->cap;
    if (!c) return fail(cudaErrorIllegalState);
    if (c->origin != s) {
        c->valid = false;
        return fail(cudaErrorStreamCaptureUnmatched);
    }
    if (c->mode != cudaStreamCaptureModeRelaxed && !pthread_equal(c->thread, pthread_self()))
        return fail(cudaErrorStreamCaptureWrongThread);
    bool joined = true;
    for (auto *other : c->streams)
        if (other != s && other->work > other->joined) joined = false;
    drop_capture(c);
    node_list nodes;
    nodes.swap(c->nodes); /* take the nodes, because an event may keep c alive */
    if (should_fail(CUDA_HOST_END_CAPTURE)) return fail(cudaErrorStreamCaptureInvalidated);
    if (!c->valid) return fail(cudaErrorStreamCaptureInvalidated);
    if (!joined) return fail(cudaErrorStreamCaptureUnjoined);
    *graph = new CUgraph_st();
    (*graph)->nodes = nodes;
    graphs().insert(*graph);
    return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *status) {
    ENTER;
    if (!status) return fail(cudaErrorInvalidValue);
    if (bad_stream(s)) return fail(cudaErrorInvalidResourceHandle);
    if (is_default(s))
        if (cudaError_t e = legacy_use()) return fail(e);
    capture *c = capturing(s);
    if (!c)
        *status = cudaStreamCaptureStatusNone;
    else if (c->valid)
        *status = cudaStreamCaptureStatusActive;
    else
        *status = cudaStreamCaptureStatusInvalidated;
    return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
    static thread_local cudaStreamCaptureMode mine;
    if (!mode) return fail(cudaErrorInvalidValue);
    std::swap(mine, *mode);
    return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long) {
    ENTER;
    if (!exec || !graphs().count(graph)) return fail(cudaErrorInvalidValue);
    if (should_fail(CUDA_HOST_INSTANTIATE)) return fail(cudaErrorMemoryAllocation);
    *exec = new CUgraphExec_st();
    (*exec)->nodes = graph->nodes;
    execs().insert(*exec);
    last_graph().clear();
    for (auto &n : graph->nodes) last_graph().push_back(n->what);
    return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t s) {
    ENTER;
    if (!execs().count(exec)) return fail(cudaErrorInvalidValue);
    if (cudaError_t e = stream_error(s)) return fail(e);
    if (capturing(s)) {
        for (auto &n : exec->nodes) capture_node(s, n);
        return cudaSuccess;
    }
    G.graph_launches++;
    for (auto &n : exec->nodes) submit_node(s, n, true);
    return fail(G.sticky);
}

cudaError_t cudaGraphUpload(cudaGraphExec_t exec, cudaStream_t s) {
    ENTER;
    return fail(execs().count(exec) ? stream_error(s) : cudaErrorInvalidValue);
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    LOCK;
    if (!graphs().erase(graph)) return fail(cudaErrorInvalidValue);
    delete graph;
    return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
    LOCK;
    if (!execs().erase(exec)) return fail(cudaErrorInvalidValue);
    delete exec;
    return cudaSuccess;
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) {
    ENTER;
    if (!count || !graphs().count(graph)) return fail(cudaErrorInvalidValue);
    size_t have = graph->nodes.size();
    if (nodes)
        for (size_t i = 0; i < *count; i++)
            nodes[i] = i < have ? (cudaGraphNode_t)(void *)graph->nodes[i].get() : NULL;
    if (!nodes || *count > have) *count = have;
    return cudaSuccess;
}

// --------------------------------------------------------------------------------------


// >>runtime

cudaError_t cudaGetLastError(void) {
    LOCK;
    cudaError_t e = G.sticky ? G.sticky : last_error;
    last_error = cudaSuccess;
    return e;
}

cudaError_t cudaPeekAtLastError(void) {
    LOCK;
    return G.sticky ? G.sticky : last_error;
}

const char *cudaGetErrorString(cudaError_t error) {
    switch (error) {
#define TEXT(name, value, text) \
  case name: return text;
        CUDA_HOST__ERRORS(TEXT)
    default: return "unrecognized error code";
    }
}

const char *cudaGetErrorName(cudaError_t error) {
    switch (error) {
#define NAME(name, value, text) \
  case name: return #name;
        CUDA_HOST__ERRORS(NAME)
    default: return "unrecognized error code";
    }
}

cudaError_t cudaGetDeviceCount(int *count) {
    LOCK;
    if (!count) return fail(cudaErrorInvalidValue);
    *count = G.devices;
    return G.devices ? cudaSuccess : fail(cudaErrorNoDevice);
}

cudaError_t cudaSetDevice(int device) {
    ENTER;
    if (device < 0 || device >= G.devices) return fail(cudaErrorInvalidDevice);
    current_device = device;
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int *device) {
    ENTER;
    if (!device) return fail(cudaErrorInvalidValue);
    *device = current_device;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
    ENTER;
    if (!p) return fail(cudaErrorInvalidValue);
    if (device < 0 || device >= G.devices) return fail(cudaErrorInvalidDevice);
    memset(p, 0, sizeof *p);
    snprintf(p->name, sizeof p->name, "CUDA on CPU");
    p->totalGlobalMem = G.memory;
    p->sharedMemPerBlock = SHARED_STATIC;
    p->sharedMemPerBlockOptin = SHARED_MAX;
    p->sharedMemPerMultiprocessor = 228 << 10;
    p->reservedSharedMemPerBlock = 1024;
    p->totalConstMem = 65536;
    p->regsPerBlock = p->regsPerMultiprocessor = 65536;
    p->warpSize = WARP;
    p->maxThreadsPerBlock = MAX_THREADS;
    p->maxThreadsPerMultiProcessor = 2048;
    p->maxBlocksPerMultiProcessor = 32;
    p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
    p->maxThreadsDim[2] = 64;
    p->maxGridSize[0] = 2147483647;
    p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->major = G.major;
    p->minor = G.minor;
    p->multiProcessorCount = G.sms;
    p->l2CacheSize = 4 << 20;
    p->memoryBusWidth = 64;
    p->concurrentKernels = 1;
    p->asyncEngineCount = 1;
    p->unifiedAddressing = 1;
    p->canMapHostMemory = 1;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attr, int device) {
    ENTER;
    cudaDeviceProp p;
    if (!value) return fail(cudaErrorInvalidValue);
    if (cudaError_t e = cudaGetDeviceProperties(&p, device)) return e;
    switch (attr) {
    case cudaDevAttrMaxThreadsPerBlock: *value = p.maxThreadsPerBlock; break;
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY: *value = 1024; break;
    case cudaDevAttrMaxBlockDimZ: *value = 64; break;
    case cudaDevAttrMaxGridDimX: *value = 2147483647; break;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: *value = 65535; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = SHARED_STATIC; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = SHARED_MAX; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = 228 << 10; break;
    case cudaDevAttrReservedSharedMemoryPerBlock: *value = 1024; break;
    case cudaDevAttrTotalConstantMemory: *value = 65536; break;
    case cudaDevAttrWarpSize: *value = WARP; break;
    case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor: *value = 65536; break;
    case cudaDevAttrClockRate:
    case cudaDevAttrMemoryClockRate: *value = 1000000; break;
    case cudaDevAttrMultiProcessorCount: *value = p.multiProcessorCount; break;
    case cudaDevAttrGlobalMemoryBusWidth: *value = p.memoryBusWidth; break;
    case cudaDevAttrL2CacheSize: *value = p.l2CacheSize; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = p.maxThreadsPerMultiProcessor; break;
    case cudaDevAttrMaxBlocksPerMultiprocessor: *value = p.maxBlocksPerMultiProcessor; break;
    case cudaDevAttrConcurrentKernels:
    case cudaDevAttrAsyncEngineCount:
    case cudaDevAttrUnifiedAddressing: *value = 1; break;
    case cudaDevAttrComputeCapabilityMajor: *value = G.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = G.minor; break;
    default: *value = 0;
    }
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *v) {
    if (!v) return fail(cudaErrorInvalidValue);
    *v = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int *v) {
    if (!v) return fail(cudaErrorInvalidValue);
    *v = G.devices ? CUDART_VERSION : 0;
    return cudaSuccess;
}

/* Searches for `need` free bytes after the last allocation or, if the window ends
   first, from the start of the range. Returns their address, or 0 if none are found. */
static word find_hole(size_t need) {
    word end = G.lo + DEVICE_RANGE - 2 * HUGE, at = G.next;
    word window = std::max((word)64 << 20, 4 * (word)(G.in_use + need));
    auto i = live().upper_bound(at);
    if (at + need > std::min(end, G.lo + window)) {
        at = G.lo;
        i = live().begin();
    }
    for (; i != live().end() && at + need > i->first - ZONE; ++i)
        at = i->first + i->second.bytes + tail_zone(i->second.bytes);
    return at + need <= end ? at : 0;
}

cudaError_t cudaMalloc(void **out, size_t bytes) {
    ENTER;
    if (!out) return fail(cudaErrorInvalidValue);
    *out = NULL;
    if (cudaError_t e = unsafe_call()) return fail(e);
    if (!bytes) return cudaSuccess;
    if (G.fail_alloc && --G.fail_alloc == 0) return fail(cudaErrorMemoryAllocation);
    if (bytes > G.memory - std::min(G.memory, G.in_use) || !reserve())
        return fail(cudaErrorMemoryAllocation);
    size_t need = ZONE + bytes + tail_zone(bytes);
    word at = find_hole(need);
    if (!at) return fail(cudaErrorMemoryAllocation);
    G.next = at + need;
    unsigned char *p = (unsigned char *)at + ZONE;
    allocation a = {bytes, ++G.serial, current_device};
    live()[(word)p] = a;
    G.allocs++;
    G.in_use += bytes;
    device_open();
    UNPOISON(p - ZONE, need);
    fill_bytes(p, bytes);
    lay_canary(p - ZONE, ZONE);
    lay_canary(p + bytes, tail_zone(bytes));
    POISON(p - ZONE, ZONE);
    POISON(p + bytes, tail_zone(bytes));
    device_close();
    if (executor) executor->allocated(p, bytes);
    *out = p;
    return cudaSuccess;
}

cudaError_t cudaFree(void *p) {
    LOCK; /* not ENTER: allowed after a sticky error */
    if (!p) return cudaSuccess;
    if (cudaError_t e = unsafe_call()) return fail(e);
    wait_for_all();
    auto i = live().find((word)p);
    if (i == live().end()) {
        report("cudaFree of %p, which is not an allocation", p);
        return fail(cudaErrorInvalidValue);
    }
    size_t need = ZONE + i->second.bytes + tail_zone(i->second.bytes);
    device_open();
    check_zones(i->first, i->second);
    device_close();
    POISON((unsigned char *)p - ZONE, need);
    word lo = ((word)p - ZONE + HUGE - 1) & ~(word)(HUGE - 1),
         hi = ((word)p - ZONE + need) & ~(word)(HUGE - 1);
    /* return the pages of large allocations to the system */
    if (hi > lo + 16 * (word)HUGE) madvise((void *)lo, hi - lo, MADV_DONTNEED);
    G.in_use -= i->second.bytes;
    live().erase(i);
    if (executor) executor->freed(p);
    return fail(G.sticky);
}

cudaError_t cudaHostAlloc(void **out, size_t bytes, unsigned int) {
    ENTER;
    if (!out) return fail(cudaErrorInvalidValue);
    *out = NULL;
    if (cudaError_t e = unsafe_call()) return fail(e);
    if (!bytes) return cudaSuccess;
    void *p = NULL;
    if (posix_memalign(&p, PAGE, bytes)) return fail(cudaErrorMemoryAllocation);
    fill_bytes(p, bytes);
    pinned()[(word)p] = bytes;
    G.pinned_in_use += bytes;
    if (executor) {
        executor->allocated(p, bytes);
        executor->written(p, bytes); /* the host may write it at any time */
    }
    *out = p;
    return cudaSuccess;
}

cudaError_t cudaMallocHost(void **out, size_t bytes) {
    return cudaHostAlloc(out, bytes, 0);
}

cudaError_t cudaFreeHost(void *p) {
    LOCK;
    if (!p) return cudaSuccess;
    if (cudaError_t e = unsafe_call()) return fail(e);
    wait_for_all();
    auto i = pinned().find((word)p);
    deliver();
    if (i == pinned().end()) {
        report("cudaFreeHost of %p, which is not an allocation", p);
        return fail(cudaErrorInvalidValue);
    }
    G.pinned_in_use -= i->second;
    pinned().erase(i);
    if (executor) executor->freed(p);
    free(p);
    return fail(G.sticky);
}

cudaError_t cudaMemGetInfo(size_t *unused, size_t *total) {
    ENTER;
    if (!unused || !total) return fail(cudaErrorInvalidValue);
    *total = G.memory;
    *unused = G.memory - std::min(G.memory, G.in_use);
    return cudaSuccess;
}

static const char *memory_name(bool device, bool pinned) {
    if (device) return "device";
    return pinned ? "page-locked" : "host";
}

/* Checks that each end of a copy is in the memory that `kind` names and within one
   allocation. */
static cudaError_t check_copy(const char *call, const void *dst, size_t dst_bytes, const void *src,
                              size_t src_bytes, int kind) {
    static const char *const names[] = {"HostToHost", "HostToDevice", "DeviceToHost",
                                        "DeviceToDevice", "Default"};
    if (kind < 0 || kind > 4) return cudaErrorInvalidMemcpyDirection;
    bool dst_device = in_device(dst), src_device = in_device(src);
    bool dst_pinned = in_pinned(dst, 0), src_pinned = in_pinned(src, 0);
    if (kind != cudaMemcpyDefault) {
        bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
        bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
        if (to_device != dst_device || from_device != src_device) {
            report("%s %s: the destination %p is %s memory, the source %p is %s memory", call,
                   names[kind], dst, memory_name(dst_device, dst_pinned), src,
                   memory_name(src_device, src_pinned));
            return cudaErrorInvalidValue;
        }
    }
    if (dst_device && !find_device(dst, dst_bytes)) {
        report("%s: the destination %p, %zu bytes, is not within an allocation", call, dst,
               dst_bytes);
        return cudaErrorInvalidValue;
    }
    if (src_device && !find_device(src, src_bytes)) {
        report("%s: the source %p, %zu bytes, is not within an allocation", call, src, src_bytes);
        return cudaErrorInvalidValue;
    }
    if (dst_pinned && !in_pinned(dst, dst_bytes)) {
        report("%s: the destination %p, %zu bytes, exceeds its allocation", call, dst, dst_bytes);
        return cudaErrorInvalidValue;
    }
    if (src_pinned && !in_pinned(src, src_bytes)) {
        report("%s: the source %p, %zu bytes, exceeds its allocation", call, src, src_bytes);
        return cudaErrorInvalidValue;
    }
    return cudaSuccess;
}

static cudaError_t copy_rows(const char *call, void *dst, size_t dpitch, const void *src,
                             size_t spitch, size_t width, size_t height, int kind, cudaStream_t s,
                             bool blocking) {
    if (!width || !height) return cudaSuccess;
    if (!dst || !src) return fail(cudaErrorInvalidValue);
    if (height > 1 && (width > dpitch || width > spitch)) return fail(cudaErrorInvalidPitchValue);
    if (blocking) {
        if (cudaError_t e = unsafe_call()) return fail(e);
    }
    if (cudaError_t e = stream_error(s)) return fail(e);
    if (cudaError_t e = check_copy(call, dst, dpitch * (height - 1) + width, src,
                                   spitch * (height - 1) + width, kind))
        return fail(e);
    /* overlapping copies are undefined in CUDA, but rows of a 2D copy may be
       interleaved */
    if (height == 1 && (char *)dst < (const char *)src + width
        && (const char *)src < (char *)dst + width) {
        report("%s: the destination %p and the source %p, %zu bytes, overlap", call, dst, src,
               width);
        return fail(cudaErrorInvalidValue);
    }
    if (blocking || (!capturing(s) && in_device(src) && !in_device(dst) && !in_pinned(dst, 0))) {
        while (!advance(s)) sched_yield();
        G.syncs++;
    }
    bool is_late = !blocking && in_device(src) && in_pinned(dst, 0);
    submit_work(s, "a copy", [=] {
        if (is_late) {
            copy_late(dst, dpitch, src, spitch, width, height);
            return;
        }
        deliver();
        for (size_t i = 0; i < height; i++)
            memmove((char *)dst + i * dpitch, (const char *)src + i * spitch, width);
        wrote(dst, dpitch, width, height);
    });
    if (blocking) check_after_kernels();
    return cudaSuccess;
}

cudaError_t cudaMemcpy(void *dst, const void *src, size_t n, enum cudaMemcpyKind kind) {
    ENTER;
    return copy_rows("cudaMemcpy", dst, n, src, n, n, 1, kind, NULL, true);
}

cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t n, enum cudaMemcpyKind kind,
                            cudaStream_t s) {
    ENTER;
    return copy_rows("cudaMemcpyAsync", dst, n, src, n, n, 1, kind, s, false);
}

cudaError_t cudaMemcpy2D(void *dst, size_t dp, const void *src, size_t sp, size_t w, size_t h,
                         enum cudaMemcpyKind kind) {
    ENTER;
    return copy_rows("cudaMemcpy2D", dst, dp, src, sp, w, h, kind, NULL, true);
}

cudaError_t cudaMemcpy2DAsync(void *dst, size_t dp, const void *src, size_t sp, size_t w, size_t h,
                              enum cudaMemcpyKind kind, cudaStream_t s) {
    ENTER;
    return copy_rows("cudaMemcpy2DAsync", dst, dp, src, sp, w, h, kind, s, false);
}

static cudaError_t set_rows(const char *call, void *p, size_t pitch, int value, size_t width,
                            size_t height, cudaStream_t s, bool blocking) {
    if (!width || !height) return cudaSuccess;
    if (height > 1 && width > pitch) return fail(cudaErrorInvalidPitchValue);
    if (blocking) {
        if (cudaError_t e = unsafe_call()) return fail(e);
    }
    if (cudaError_t e = stream_error(s)) return fail(e);
    size_t bytes = pitch * (height - 1) + width;
    if (!find_device(p, bytes) && !in_pinned(p, bytes)) {
        report("%s: %p, %zu bytes, is not within device memory", call, p, bytes);
        return fail(cudaErrorInvalidValue);
    }
    if (blocking) G.syncs++;
    return submit_work(s, "a memset", [=] {
        deliver();
        for (size_t i = 0; i < height; i++) memset((char *)p + i * pitch, value, width);
        wrote(p, pitch, width, height);
    });
}

cudaError_t cudaMemset(void *p, int value, size_t n) {
    ENTER;
    return set_rows("cudaMemset", p, n, value, n, 1, NULL, true);
}

cudaError_t cudaMemsetAsync(void *p, int value, size_t n, cudaStream_t s) {
    ENTER;
    return set_rows("cudaMemsetAsync", p, n, value, n, 1, s, false);
}

cudaError_t cudaMemset2DAsync(void *p, size_t pitch, int value, size_t w, size_t h,
                              cudaStream_t s) {
    ENTER;
    return set_rows("cudaMemset2DAsync", p, pitch, value, w, h, s, false);
}
} // extern "C"

cudaError_t cuda_host_func_set(const void *func, enum cudaFuncAttribute attr, int value) {
    ENTER;
    if (!func) return fail(cudaErrorInvalidDeviceFunction);
    if (attr == cudaFuncAttributePreferredSharedMemoryCarveout)
        return value < -1 || value > 100 ? fail(cudaErrorInvalidValue) : cudaSuccess;
    if (attr != cudaFuncAttributeMaxDynamicSharedMemorySize) return fail(cudaErrorInvalidValue);
    function_info &info = functions()[func];
    if (value < 0 || (size_t)value + info.static_bytes > (size_t)SHARED_MAX)
        return fail(cudaErrorInvalidValue);
    info.dynamic_limit[current_device] = value;
    return cudaSuccess;
}

cudaError_t cuda_host_func_get(struct cudaFuncAttributes *attr, const void *func) {
    ENTER;
    if (!attr) return fail(cudaErrorInvalidValue);
    function_info &info = functions()[func];
    memset(attr, 0, sizeof *attr);
    /* the largest size in any run so far, because the host compiler does not know the
       size */
    attr->sharedSizeBytes = info.static_bytes;
    attr->maxThreadsPerBlock = MAX_THREADS;
    attr->numRegs = G.registers;
    attr->ptxVersion = attr->binaryVersion = G.major * 10 + G.minor;
    attr->maxDynamicSharedSizeBytes = info.dynamic_limit[current_device]
                                          ? info.dynamic_limit[current_device]
                                          : (int)(SHARED_STATIC - info.static_bytes);
    return cudaSuccess;
}

cudaError_t cuda_host_occupancy(int *blocks, int threads, size_t smem) {
    ENTER;
    if (!blocks || threads < 1) return fail(cudaErrorInvalidValue);
    int rounded = (threads + 31) / 32 * 32;
    int by_threads = std::min(32, 2048 / rounded);
    int by_shared = (int)((228 << 10) / (smem + 1024));
    int by_registers = 65536 / ((G.registers + 7) / 8 * 8 * rounded);
    *blocks = std::min(std::min(by_threads, by_registers), by_shared);
    if (threads > MAX_THREADS || smem > (size_t)SHARED_MAX) *blocks = 0;
    return cudaSuccess;
}

void cuda_host_execute_by(const cuda_host_executor *e) {
    executor = e;
}

void cuda_host_report(const char *text) {
    report("%s", text);
}

void cuda_host_add_mmas(long n) {
    G.mmas += n;
}

extern "C" {
void cuda_host_order(int thread_order, int block_order, uint64_t seed) {
    LOCK;
    G.thread_order = thread_order;
    G.block_order = block_order;
    G.rng = (seed + 1) * 0x9E3779B97F4A7C15u | 1;
}

void cuda_host_fill(int pattern) {
    LOCK;
    G.fill = pattern == CUDA_HOST_FILL_RANDOM ? pattern : pattern & 255;
}

void cuda_host_fail_alloc(long n) {
    LOCK;
    G.fail_alloc = n;
}

void cuda_host_fail_launch(long n) {
    LOCK;
    G.fail_launch = n;
}

void cuda_host_fail_graph(int call, long n) {
    LOCK;
    if (call >= 0 && call < CUDA_HOST_GRAPH_CALLS) G.fail_graph[call] = n;
}

void cuda_host_reset_errors(void) {
    LOCK;
    G.sticky = last_error = cudaSuccess;
    G.fail_alloc = G.fail_launch = 0;
    memset(G.fail_graph, 0, sizeof G.fail_graph);
}

void cuda_host_devices(int n) {
    LOCK;
    G.devices = std::min(n, (int)DEVICES);
}

void cuda_host_arch(int major, int minor) {
    LOCK;
    G.major = major;
    G.minor = minor;
}

void cuda_host_sms(int n) {
    LOCK;
    G.sms = n;
}

void cuda_host_registers(int n) {
    LOCK;
    G.registers = n;
}

void cuda_host_memory(size_t bytes) {
    LOCK;
    G.memory = std::min(bytes, (size_t)DEVICE_RANGE);
}

void cuda_host_allow_pinned(int yes) {
    LOCK;
    G.allow_pinned = yes;
}

void cuda_host_trap(int yes) {
    LOCK;
    G.trap = yes;
}

void cuda_host_stack(size_t bytes) {
    LOCK;
    if (!G.stacks) G.stack_bytes = std::max(bytes, (size_t)16384);
}

long cuda_host_reports(void) {
    LOCK;
    return G.reports;
}

void cuda_host_clear_reports(void) {
    LOCK;
    G.reports = G.printed = 0;
    G.last_report[0] = 0;
}

const char *cuda_host_last_report(void) {
    return G.last_report;
}

void cuda_host_quiet(int yes) {
    LOCK;
    G.quiet = yes;
}

long cuda_host_launches(void) {
    LOCK;
    return G.launches;
}

long cuda_host_mmas(void) {
    LOCK;
    return G.mmas;
}

size_t cuda_host_shared_requested(void) {
    LOCK;
    return G.shared_requested;
}

long cuda_host_allocs(void) {
    LOCK;
    return G.allocs;
}

long cuda_host_syncs(void) {
    LOCK;
    return G.syncs;
}

long cuda_host_graph_launches(void) {
    LOCK;
    return G.graph_launches;
}

long cuda_host_graph_nodes(void) {
    LOCK;
    return (long)last_graph().size();
}

const char *cuda_host_graph_node(long i) {
    LOCK;
    const char *what = i >= 0 && i < (long)last_graph().size() ? last_graph()[(size_t)i] : NULL;
    return what ? what : "";
}

size_t cuda_host_bytes_in_use(void) {
    LOCK;
    return G.in_use;
}

size_t cuda_host_pinned_in_use(void) {
    LOCK;
    return G.pinned_in_use;
}

int cuda_host_is_device(const void *p) {
    return in_device(p);
}
}

// --------------------------------------------------------------------------------------


// >>cublaslt
/* A column-major matmul equals the row-major matmul of the swapped operands. stx_gemm
   therefore receives the call that the CPU device would make, and f32 results are
   bit-identical to those of the CPU. */

struct lt_layout {
    uint32_t magic;
    int32_t type, order, batch;
    uint64_t rows, cols;
    int64_t ld, stride;
};

struct lt_desc {
    uint32_t magic;
    int32_t compute, scale, mode, ta, tb, bias_type, aux_type;
    uint32_t epilogue;
    void *bias, *aux;
    int64_t bias_stride, aux_ld, aux_stride;
};

struct lt_preference {
    uint32_t magic, align[4], schemes;
    uint64_t workspace;
};

struct lt_algo {
    uint32_t magic, index, scheme, align[4];
    uint64_t workspace;
};

static long lt_calls, lt_batches, lt_unaligned;
static int lt_refuse;
static cublasStatus_t lt_refuse_with = CUBLAS_STATUS_NOT_SUPPORTED;

/* Returns whether cuda_host_refuse applies to this matmul, in the heuristic (if `plans`
   is set) or in the call. */
static bool lt_refuses(bool plans, int batch, uint32_t epilogue) {
    switch (lt_refuse) {
    case CUDA_HOST_REFUSE_PLANS: return plans && batch > 1;
    case CUDA_HOST_REFUSE_CALLS: return !plans && batch > 1;
    case CUDA_HOST_REFUSE_ALL_PLANS: return plans;
    case CUDA_HOST_REFUSE_ALL_CALLS: return !plans;
    case CUDA_HOST_REFUSE_EPILOGUES: return !plans && epilogue != CUBLASLT_EPILOGUE_DEFAULT;
    default: return false;
    }
}

enum {
    MAGIC_LAYOUT = 0x4c41594f,
    MAGIC_DESC = 0x44455343,
    MAGIC_PREFERENCE = 0x50524546,
    MAGIC_ALGO = 0x414c474f
};

static_assert(sizeof(lt_layout) <= sizeof(cublasLtMatrixLayoutOpaque_t)
                  && sizeof(lt_desc) <= sizeof(cublasLtMatmulDescOpaque_t)
                  && sizeof(lt_preference) <= sizeof(cublasLtMatmulPreferenceOpaque_t)
                  && sizeof(lt_algo) <= sizeof(cublasLtMatmulAlgo_t),
              "opaque");

struct cublasLtContext {
    uint32_t magic;
    int device;
};

template <class T> static bool take(T *to, const void *buf, size_t bytes) {
    if (!buf || bytes != sizeof *to) return false;
    memcpy(to, buf, sizeof *to);
    return true;
}

#define LT_SET(ok) return (ok) ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_INVALID_VALUE

/* Returns the size of an element, or 0 if the type is not supported. */
static size_t lt_size(int type) {
    if (type == CUDA_R_32F) return 4;
    return type == CUDA_R_16BF ? 2 : 0;
}

static int lt_bias_type(const lt_desc &d, const lt_layout &D) {
    return d.bias_type < 0 ? D.type : d.bias_type;
}

/* The bits that make up epilogues. The BGRAD.. bits replace the bias by a gradient. */
enum {
    EPI_RELU = 2,
    EPI_BIAS = 4,
    EPI_DRELU = 8,
    EPI_BGRAD = 16,
    EPI_GELU = 32,
    EPI_DGELU = 64,
    EPI_AUX = 128,
    EPI_BGRADA = 256,
    EPI_BGRADB = 512
};

static bool lt_has_aux(uint32_t e) {
    return e & EPI_AUX;
}

static bool lt_has_bias(uint32_t e) {
    return e & (EPI_BIAS | EPI_BGRAD | EPI_BGRADA | EPI_BGRADB);
}

static bool lt_known_epilogue(uint32_t e) {
    static const int known[] = {CUBLASLT_EPILOGUE_DEFAULT,   CUBLASLT_EPILOGUE_RELU,
                                CUBLASLT_EPILOGUE_RELU_AUX,  CUBLASLT_EPILOGUE_BIAS,
                                CUBLASLT_EPILOGUE_RELU_BIAS, CUBLASLT_EPILOGUE_RELU_AUX_BIAS,
                                CUBLASLT_EPILOGUE_DRELU,     CUBLASLT_EPILOGUE_DRELU_BGRAD,
                                CUBLASLT_EPILOGUE_GELU,      CUBLASLT_EPILOGUE_GELU_AUX,
                                CUBLASLT_EPILOGUE_GELU_BIAS, CUBLASLT_EPILOGUE_GELU_AUX_BIAS,
                                CUBLASLT_EPILOGUE_DGELU,     CUBLASLT_EPILOGUE_DGELU_BGRAD,
                                CUBLASLT_EPILOGUE_BGRADA,    CUBLASLT_EPILOGUE_BGRADB};
    for (int k : known)
        if ((uint32_t)k == e) return true;
    return false;
}

/* The number of contiguous lines of a matrix and, in the next function, the length of a
   line in elements. */
static size_t lt_lines(const lt_layout &l) {
    return (size_t)(l.order == CUBLASLT_ORDER_COL ? l.cols : l.rows);
}

static size_t lt_length(const lt_layout &l) {
    return (size_t)(l.order == CUBLASLT_ORDER_COL ? l.rows : l.cols);
}

/* Returns the number of elements from a matrix's first element through its last. */
static uint64_t lt_matrix_extent(const lt_layout &l) {
    return ((uint64_t)lt_lines(l) - 1) * (uint64_t)l.ld + lt_length(l);
}

/* Returns the number of bytes from a batch's first element through its last. */
static size_t lt_extent(const lt_layout &l) {
    if (!l.rows || !l.cols || !l.batch) return 0;
    return (size_t)((uint64_t)(l.batch - 1) * (uint64_t)l.stride + lt_matrix_extent(l))
           * lt_size(l.type);
}

/* The auxiliary matrix: elements for GELU, bits for ReLU. */
static size_t lt_aux_bytes(const lt_desc &d, const lt_layout &D) {
    size_t count = (size_t)((D.batch - 1) * d.aux_stride + (D.cols - 1) * d.aux_ld + D.rows);
    return d.epilogue & (EPI_GELU | EPI_DGELU) ? count * lt_size(D.type) : (count + 7) / 8;
}

static cublasStatus_t lt_check_layout(const lt_layout &l, int batch) {
    if (l.magic != MAGIC_LAYOUT || l.batch < 1) return CUBLAS_STATUS_INVALID_VALUE;
    if (!lt_size(l.type)) return CUBLAS_STATUS_NOT_SUPPORTED;
    if (!l.rows || !l.cols) return CUBLAS_STATUS_INVALID_VALUE;
    if (l.ld < (int64_t)lt_length(l) || l.batch != batch) return CUBLAS_STATUS_INVALID_VALUE;
    return CUBLAS_STATUS_SUCCESS;
}

static cublasStatus_t lt_check_epilogue(const lt_desc &d, const lt_layout &D) {
    if (!lt_known_epilogue(d.epilogue)) return CUBLAS_STATUS_INVALID_VALUE;
    if (d.epilogue != CUBLASLT_EPILOGUE_DEFAULT && D.order != CUBLASLT_ORDER_COL)
        return CUBLAS_STATUS_NOT_SUPPORTED;
    if (lt_has_bias(d.epilogue)) {
        int type = lt_bias_type(d, D);
        if (type != D.type && !(type == CUDA_R_32F && D.type == CUDA_R_16BF))
            return CUBLAS_STATUS_NOT_SUPPORTED;
        if ((word)d.bias % lt_size(type)) return CUBLAS_STATUS_INVALID_VALUE;
        if (D.batch > 1 && (d.epilogue & (EPI_BGRADA | EPI_BGRADB)))
            return CUBLAS_STATUS_NOT_SUPPORTED;
    }
    if (lt_has_aux(d.epilogue)) {
        int multiple = d.epilogue & (EPI_GELU | EPI_DGELU) ? 8 : 128;
        if (d.aux_ld < (int64_t)D.rows || d.aux_ld % multiple || d.aux_stride % multiple)
            return CUBLAS_STATUS_INVALID_VALUE;
        if ((word)d.aux & 15) return CUBLAS_STATUS_INVALID_VALUE;
        if (d.aux_type >= 0 && d.aux_type != D.type) return CUBLAS_STATUS_NOT_SUPPORTED;
    }
    return CUBLAS_STATUS_SUCCESS;
}

/* Checks descriptors, both for cublasLtMatmul and for the heuristic. */
static cublasStatus_t lt_check(const lt_desc &d, const lt_layout &A, const lt_layout &B,
                               const lt_layout &C, const lt_layout &D) {
    const lt_layout *all[] = {&A, &B, &C, &D};
    if (d.magic != MAGIC_DESC) return CUBLAS_STATUS_INVALID_VALUE;
    for (auto *l : all)
        if (cublasStatus_t status = lt_check_layout(*l, D.batch)) return status;
    uint64_t m = d.ta ? A.cols : A.rows, k = d.ta ? A.rows : A.cols, kb = d.tb ? B.cols : B.rows,
             n = d.tb ? B.rows : B.cols;
    if (k != kb || D.rows != m || D.cols != n || C.rows != m || C.cols != n)
        return CUBLAS_STATUS_INVALID_VALUE;
    if (C.order != D.order) return CUBLAS_STATUS_NOT_SUPPORTED;
    if (d.compute != CUBLAS_COMPUTE_32F && d.compute != CUBLAS_COMPUTE_32F_PEDANTIC
        && d.compute != CUBLAS_COMPUTE_32F_FAST_TF32 && d.compute != CUBLAS_COMPUTE_32F_FAST_16BF)
        return CUBLAS_STATUS_NOT_SUPPORTED;
    if (d.scale != CUDA_R_32F) return CUBLAS_STATUS_NOT_SUPPORTED;
    /* A and B must have the same type, and so must C and D. f32 inputs require f32
       outputs. */
    if (A.type != B.type || C.type != D.type || (A.type == CUDA_R_32F && D.type != CUDA_R_32F))
        return CUBLAS_STATUS_NOT_SUPPORTED;
    if (A.type != CUDA_R_32F && d.compute != CUBLAS_COMPUTE_32F
        && d.compute != CUBLAS_COMPUTE_32F_PEDANTIC)
        return CUBLAS_STATUS_NOT_SUPPORTED;
    if (d.mode != CUBLASLT_POINTER_MODE_HOST) return CUBLAS_STATUS_NOT_SUPPORTED;
    return lt_check_epilogue(d, D);
}

static bool lt_in_device(const char *what, const void *p, size_t bytes) {
    if (find_device(p, bytes)) return true;
    report("cublasLtMatmul: %s, %p and %zu bytes, is not within device memory", what, p, bytes);
    return false;
}

static float lt_load(const void *p, size_t i, int type) {
    return type == CUDA_R_32F ? ((const float *)p)[i]
                              : cuda_host_from_bf16(((const unsigned short *)p)[i]);
}

static void lt_store(void *p, size_t i, int type, float v) {
    if (type == CUDA_R_32F)
        ((float *)p)[i] = v;
    else
        ((unsigned short *)p)[i] = cuda_host_to_bf16(v);
}

static float gelu(float x) {
    return 0.5f * x * (1.0f + tanhf(0.7978845608028654f * (x + 0.044715f * x * x * x)));
}

static float gelu_slope(float x) {
    float t = tanhf(0.7978845608028654f * (x + 0.044715f * x * x * x));
    return 0.5f * (1.0f + t)
           + 0.5f * x * (1.0f - t * t) * 0.7978845608028654f * (1.0f + 3.0f * 0.044715f * x * x);
}

/* Returns whether a row begins or ends at an address that is not a multiple of 16
   bytes. An operand with such a row rules out the fast algorithms. */
static bool lt_rows_unaligned(const lt_layout &l, const void *p) {
    uint64_t size = lt_size(l.type), at = (word)p | lt_length(l) * size;
    if (lt_lines(l) > 1) at |= (uint64_t)l.ld * size;
    if (l.batch > 1) at |= (uint64_t)l.stride * size;
    return at % 16 != 0;
}

/* An operand in f32, as a row-major matrix. bf16 operands are converted into a
   contiguous copy. */
struct lt_operand {
    const float *p;
    size_t ld, stride;
    int trans; /* whether op transposes the row-major matrix */
    std::vector<float> copy;

    lt_operand(const void *from, const lt_layout &l, bool t)
        : p((const float *)from), ld((size_t)l.ld), stride((size_t)l.stride),
          trans(t ^ (l.order == CUBLASLT_ORDER_COL)) {
        if (l.type == CUDA_R_32F) return;
        size_t lines = lt_lines(l), length = lt_length(l);
        copy.resize(lines * length * (size_t)l.batch);
        for (size_t b = 0; b < (size_t)l.batch; b++)
            for (size_t j = 0; j < lines; j++)
                for (size_t i = 0; i < length; i++)
                    copy[(b * lines + j) * length + i] =
                        lt_load(from, b * stride + j * ld + i, l.type);
        p = copy.data();
        ld = length;
        stride = lines * length;
    }

    /* element (i,j) of the first matrix, after op */
    float at(size_t i, size_t j) const {
        return trans ? p[j * ld + i] : p[i * ld + j];
    }
};

/* The result in f32, in the order of its layout. */
struct lt_result {
    float *p;
    size_t ld, stride;
};

struct lt_call {
    lt_desc d;
    lt_layout A, B, C, D;
    const void *a, *b, *c;
    void *out;
    float alpha, beta;
    void load_c(const lt_result &r) const;
    void store_d(const lt_result &r) const;
    void multiply(const lt_operand &x, const lt_operand &y, const lt_result &r) const;
    void apply_epilogue(const lt_result &r, size_t q) const;
    void bias_gradient(const lt_operand &x, const lt_operand &y, const lt_result &r,
                       size_t q) const;
    void run(void) const;
    void note_writes(void) const;
};

void lt_call::load_c(const lt_result &r) const {
    for (size_t q = 0; q < (size_t)D.batch; q++)
        for (size_t j = 0; j < lt_lines(D); j++)
            for (size_t i = 0; i < lt_length(D); i++)
                r.p[q * r.stride + j * r.ld + i] =
                    lt_load(c, q * (size_t)C.stride + j * (size_t)C.ld + i, C.type);
}

void lt_call::store_d(const lt_result &r) const {
    for (size_t q = 0; q < (size_t)D.batch; q++)
        for (size_t j = 0; j < lt_lines(D); j++)
            for (size_t i = 0; i < lt_length(D); i++)
                lt_store(out, q * (size_t)D.stride + j * (size_t)D.ld + i, D.type,
                         r.p[q * r.stride + j * r.ld + i]);
}

void lt_call::multiply(const lt_operand &x, const lt_operand &y, const lt_result &r) const {
    bool columns = D.order == CUBLASLT_ORDER_COL;
    const lt_operand &left = columns ? y : x, &right = columns ? x : y;
    stx_gemm_args g = {};
    g.ta = left.trans ^ columns;
    g.tb = right.trans ^ columns;
    g.M = lt_lines(D);
    g.N = lt_length(D);
    g.K = (size_t)(d.ta ? A.rows : A.cols);
    g.batch = (size_t)D.batch;
    g.alpha = alpha;
    g.beta = beta;
    g.A = left.p;
    g.lda = left.ld;
    g.sa = left.stride;
    g.B = right.p;
    g.ldb = right.ld;
    g.sb = right.stride;
    g.C = r.p;
    g.ldc = r.ld;
    g.sc = r.stride;
    stx_gemm(NULL, &g);
}

/* Applies the epilogue to each element of matrix q, which is column-major. */
void lt_call::apply_epilogue(const lt_result &r, size_t q) const {
    uint32_t e = d.epilogue;
    int bias_type = lt_bias_type(d, D);
    float *x = r.p + q * r.stride;
    size_t bias_at = q * (size_t)d.bias_stride, aux_at = q * (size_t)d.aux_stride;
    for (size_t j = 0; j < (size_t)D.cols; j++)
        for (size_t i = 0; i < (size_t)D.rows; i++) {
            float v = x[j * r.ld + i];
            size_t at = aux_at + j * (size_t)d.aux_ld + i;
            unsigned char *bits = (unsigned char *)d.aux + (at >> 3);
            unsigned char bit = (unsigned char)(1u << (at & 7));
            if (e & EPI_BIAS) v += lt_load(d.bias, bias_at + i, bias_type);
            if (e & EPI_RELU) {
                if (e & EPI_AUX) *bits = (unsigned char)(v > 0 ? *bits | bit : *bits & ~bit);
                v = v > 0 ? v : 0;
            }
            if (e & EPI_DRELU) v = *bits & bit ? v : 0;
            if (e & EPI_GELU) {
                if (e & EPI_AUX) lt_store(d.aux, at, D.type, v);
                v = gelu(v);
            }
            if (e & EPI_DGELU) v *= gelu_slope(lt_load(d.aux, at, D.type));
            x[j * r.ld + i] = v;
        }
}

/* Stores the bias gradient for matrix q: the sums over the result's columns, over
   op(A)'s columns or over op(B)'s rows. */
void lt_call::bias_gradient(const lt_operand &x, const lt_operand &y, const lt_result &r,
                            size_t q) const {
    size_t m = (size_t)D.rows, n = (size_t)D.cols, k = (size_t)(d.ta ? A.rows : A.cols);
    size_t bias_at = q * (size_t)d.bias_stride;
    int bias_type = lt_bias_type(d, D);
    for (size_t i = 0; (d.epilogue & EPI_BGRAD) && i < m; i++) {
        float s = 0;
        for (size_t j = 0; j < n; j++) s += r.p[q * r.stride + j * r.ld + i];
        lt_store(d.bias, bias_at + i, bias_type, s);
    }
    for (size_t i = 0; (d.epilogue & EPI_BGRADA) && i < m; i++) {
        float s = 0;
        for (size_t p = 0; p < k; p++) s += x.at(i, p);
        lt_store(d.bias, i, bias_type, s);
    }
    for (size_t j = 0; (d.epilogue & EPI_BGRADB) && j < n; j++) {
        float s = 0;
        for (size_t p = 0; p < k; p++) s += y.at(p, j);
        lt_store(d.bias, j, bias_type, s);
    }
}

void lt_call::run(void) const {
    bool f32 = D.type == CUDA_R_32F;
    lt_operand x(a, A, d.ta != 0), y(b, B, d.tb != 0);
    std::vector<float> copy;
    lt_result r = {(float *)out, (size_t)D.ld, (size_t)D.stride};
    if (!f32) {
        r.ld = lt_length(D);
        r.stride = lt_lines(D) * r.ld;
        copy.resize(r.stride * (size_t)D.batch);
        r.p = copy.data();
    }
    if (beta != 0 && !(f32 && c == out && C.ld == D.ld && C.stride == D.stride)) load_c(r);
    multiply(x, y, r);
    for (size_t q = 0; q < (size_t)D.batch && d.epilogue != CUBLASLT_EPILOGUE_DEFAULT; q++) {
        apply_epilogue(r, q);
        bias_gradient(x, y, r, q);
    }
    if (!f32) store_d(r);
    note_writes();
}

/* Informs the executor of everything that the call has written. */
void lt_call::note_writes(void) const {
    size_t each = lt_size(D.type), bias = lt_size(lt_bias_type(d, D));
    for (size_t q = 0; q < (size_t)D.batch; q++) {
        wrote((const char *)out + q * (size_t)D.stride * each, (size_t)D.ld * each,
              lt_length(D) * each, lt_lines(D));
        if (d.epilogue & EPI_BGRAD)
            wrote((const char *)d.bias + q * (size_t)d.bias_stride * bias, 0,
                  (size_t)D.rows * bias, 1);
    }
    if (d.epilogue & EPI_BGRADA) wrote(d.bias, 0, (size_t)D.rows * bias, 1);
    if (d.epilogue & EPI_BGRADB) wrote(d.bias, 0, (size_t)D.cols * bias, 1);
    if (d.epilogue & EPI_AUX) wrote(d.aux, 0, lt_aux_bytes(d, D), 1);
}

extern "C" {
cublasStatus_t cublasLtCreate(cublasLtHandle_t *h) {
    if (!h) return CUBLAS_STATUS_INVALID_VALUE;
    if (!G.devices || G.sticky) return CUBLAS_STATUS_NOT_INITIALIZED;
    *h = new cublasLtContext();
    (*h)->magic = MAGIC_DESC;
    (*h)->device = current_device;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtDestroy(cublasLtHandle_t h) {
    if (!h) return CUBLAS_STATUS_NOT_INITIALIZED;
    delete h;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *out, cublasComputeType_t compute,
                                        cudaDataType_t scale) {
    if (!out) return CUBLAS_STATUS_INVALID_VALUE;
    lt_desc d;
    memset(&d, 0, sizeof d);
    d.magic = MAGIC_DESC;
    d.compute = compute;
    d.scale = scale;
    d.epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    d.bias_type = d.aux_type = -1;
    *out = new cublasLtMatmulDescOpaque_t();
    memcpy(*out, &d, sizeof d);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t d) {
    delete d;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc,
                                              cublasLtMatmulDescAttributes_t attr, const void *buf,
                                              size_t n) {
    if (!desc) return CUBLAS_STATUS_INVALID_VALUE;
    lt_desc *d = (lt_desc *)(void *)desc;
    int32_t op, unused;
    switch (attr) {
    case CUBLASLT_MATMUL_DESC_COMPUTE_TYPE: LT_SET(take(&d->compute, buf, n));
    case CUBLASLT_MATMUL_DESC_SCALE_TYPE: LT_SET(take(&d->scale, buf, n));
    case CUBLASLT_MATMUL_DESC_POINTER_MODE: LT_SET(take(&d->mode, buf, n));
    case CUBLASLT_MATMUL_DESC_TRANSA:
        if (!take(&op, buf, n) || op < 0 || op > 2) LT_SET(false);
        d->ta = op != 0;
        LT_SET(true);
    case CUBLASLT_MATMUL_DESC_TRANSB:
        if (!take(&op, buf, n) || op < 0 || op > 2) LT_SET(false);
        d->tb = op != 0;
        LT_SET(true);
    case CUBLASLT_MATMUL_DESC_TRANSC: LT_SET(take(&op, buf, n) && op == CUBLAS_OP_N);
    case CUBLASLT_MATMUL_DESC_EPILOGUE: LT_SET(take(&d->epilogue, buf, n));
    case CUBLASLT_MATMUL_DESC_BIAS_POINTER: LT_SET(take(&d->bias, buf, n));
    case CUBLASLT_MATMUL_DESC_BIAS_BATCH_STRIDE: LT_SET(take(&d->bias_stride, buf, n));
    case CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE: LT_SET(take(&d->bias_type, buf, n));
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER: LT_SET(take(&d->aux, buf, n));
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD: LT_SET(take(&d->aux_ld, buf, n));
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_BATCH_STRIDE: LT_SET(take(&d->aux_stride, buf, n));
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE: LT_SET(take(&d->aux_type, buf, n));
    case CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET: LT_SET(take(&unused, buf, n));
    default: return CUBLAS_STATUS_INVALID_VALUE;
    }
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *out, cudaDataType type,
                                          uint64_t rows, uint64_t cols, int64_t ld) {
    if (!out) return CUBLAS_STATUS_INVALID_VALUE;
    lt_layout l;
    memset(&l, 0, sizeof l);
    l.magic = MAGIC_LAYOUT;
    l.type = type;
    l.order = CUBLASLT_ORDER_COL;
    l.batch = 1;
    l.rows = rows;
    l.cols = cols;
    l.ld = ld;
    *out = new cublasLtMatrixLayoutOpaque_t();
    memcpy(*out, &l, sizeof l);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t l) {
    delete l;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout,
                                                cublasLtMatrixLayoutAttribute_t attr,
                                                const void *buf, size_t n) {
    if (!layout) return CUBLAS_STATUS_INVALID_VALUE;
    lt_layout *l = (lt_layout *)(void *)layout;
    switch (attr) {
    case CUBLASLT_MATRIX_LAYOUT_TYPE: LT_SET(take(&l->type, buf, n));
    case CUBLASLT_MATRIX_LAYOUT_ORDER:
        LT_SET(take(&l->order, buf, n)
               && (l->order == CUBLASLT_ORDER_COL || l->order == CUBLASLT_ORDER_ROW));
    case CUBLASLT_MATRIX_LAYOUT_ROWS: LT_SET(take(&l->rows, buf, n));
    case CUBLASLT_MATRIX_LAYOUT_COLS: LT_SET(take(&l->cols, buf, n));
    case CUBLASLT_MATRIX_LAYOUT_LD: LT_SET(take(&l->ld, buf, n));
    case CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT: LT_SET(take(&l->batch, buf, n));
    case CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET: LT_SET(take(&l->stride, buf, n));
    default: return CUBLAS_STATUS_INVALID_VALUE;
    }
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *out) {
    if (!out) return CUBLAS_STATUS_INVALID_VALUE;
    lt_preference p;
    memset(&p, 0, sizeof p);
    p.magic = MAGIC_PREFERENCE;
    for (int i = 0; i < 4; i++) p.align[i] = 256;
    p.schemes = CUBLASLT_REDUCTION_SCHEME_MASK;
    *out = new cublasLtMatmulPreferenceOpaque_t();
    memcpy(*out, &p, sizeof p);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t p) {
    delete p;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attr,
                                                    const void *buf, size_t n) {
    if (!preference) return CUBLAS_STATUS_INVALID_VALUE;
    lt_preference *p = (lt_preference *)(void *)preference;
    uint32_t unused;
    switch (attr) {
    case CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK:
        LT_SET(take(&p->schemes, buf, n)
               && !(p->schemes & ~(uint32_t)CUBLASLT_REDUCTION_SCHEME_MASK));
    case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES: LT_SET(take(&p->workspace, buf, n));
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES: LT_SET(take(&p->align[0], buf, n));
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES: LT_SET(take(&p->align[1], buf, n));
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES: LT_SET(take(&p->align[2], buf, n));
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES: LT_SET(take(&p->align[3], buf, n));
    case CUBLASLT_MATMUL_PREF_SEARCH_MODE:
    case CUBLASLT_MATMUL_PREF_MAX_WAVES_COUNT: LT_SET(take(&unused, buf, n));
    default: return CUBLAS_STATUS_INVALID_VALUE;
    }
}

/* Returns the reduction scheme of algorithm i. `allowed` is the mask of permitted
   schemes. */
static uint32_t lt_scheme(uint32_t i, uint32_t allowed) {
    if (i & 1) return CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    if (i) return CUBLASLT_REDUCTION_SCHEME_NONE;
    return allowed & (CUBLASLT_REDUCTION_SCHEME_INPLACE | CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE);
}

/* Returns up to five algorithms. Every second one splits K, requires a workspace and
   adds the partial sums in a separate step in the compute type. It is omitted if the
   workspace is too small or the scheme is not allowed. If partial sums may be added in
   place or in the type of the result, the first algorithm does so. A run of this
   algorithm is reported, because the order and rounding of such a sum are not
   guaranteed. */
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t h, cublasLtMatmulDesc_t desc,
                                              cublasLtMatrixLayout_t A, cublasLtMatrixLayout_t B,
                                              cublasLtMatrixLayout_t C, cublasLtMatrixLayout_t D,
                                              cublasLtMatmulPreference_t preference, int requested,
                                              cublasLtMatmulHeuristicResult_t results[],
                                              int *count) {
    if (!h) return CUBLAS_STATUS_NOT_INITIALIZED;
    if (!desc || !A || !B || !C || !D || !preference || !results || !count || requested < 1)
        return CUBLAS_STATUS_INVALID_VALUE;
    *count = 0;
    const lt_preference *p = (const lt_preference *)(const void *)preference;
    cublasStatus_t status = lt_check(*(lt_desc *)(void *)desc, *(lt_layout *)(void *)A,
                                     *(lt_layout *)(void *)B, *(lt_layout *)(void *)C,
                                     *(lt_layout *)(void *)D);
    if (p->magic != MAGIC_PREFERENCE) return CUBLAS_STATUS_INVALID_VALUE;
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    if (lt_refuses(true, (int)((lt_layout *)(void *)D)->batch, 0)) return lt_refuse_with;
    for (uint32_t i = 0; i < 5 && *count < requested; i++) {
        lt_algo algo;
        memset(&algo, 0, sizeof algo);
        algo.magic = MAGIC_ALGO;
        algo.index = i;
        algo.workspace = i & 1 ? (uint64_t)(i + 1) << 16 : 0;
        memcpy(algo.align, p->align, sizeof algo.align);
        algo.scheme = lt_scheme(i, p->schemes);
        if (algo.workspace > p->workspace
            || (i & 1 && !(p->schemes & CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE)))
            continue;
        cublasLtMatmulHeuristicResult_t *r = &results[(*count)++];
        memset(r, 0, sizeof *r);
        memcpy(&r->algo, &algo, sizeof algo);
        r->workspaceSize = (size_t)algo.workspace;
        r->state = CUBLAS_STATUS_SUCCESS;
        r->wavesCount = 1.0f;
    }
    return *count ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
}

/* Returns whether the algorithm is valid for the call and its workspace. */
static bool lt_algo_fits(const cublasLtMatmulAlgo_t *algo, const lt_call &call,
                         const void *workspace, size_t workspace_bytes) {
    const void *address[] = {call.a, call.b, call.beta != 0 ? call.c : call.out, call.out};
    lt_algo chosen;
    memcpy(&chosen, algo, sizeof chosen);
    if (chosen.magic != MAGIC_ALGO) return false;
    if (chosen.workspace > workspace_bytes || (chosen.workspace && !workspace)) return false;
    if (chosen.scheme & (CUBLASLT_REDUCTION_SCHEME_INPLACE | CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE))
        report("cublasLtMatmul: the algorithm adds partial sums in an undefined order "
               "or rounds them: forbid its reduction scheme");
    for (int i = 0; i < 4; i++)
        if ((word)address[i] % chosen.align[i]) return false;
    return true;
}

/* Returns whether the arguments of the call are consistent. Its descriptors have
   already been checked. */
static bool lt_arguments_ok(const lt_call &call, const cublasLtMatmulAlgo_t *algo,
                            const void *workspace, size_t workspace_bytes) {
    uint32_t e = call.d.epilogue;
    if (call.beta != 0 && !call.c) return false;
    if ((lt_has_bias(e) && !call.d.bias) || (lt_has_aux(e) && !call.d.aux)) return false;
    if (call.c == call.out && (call.C.ld != call.D.ld || call.C.stride != call.D.stride))
        return false;
    if (algo && !lt_algo_fits(algo, call, workspace, workspace_bytes)) return false;
    if (call.D.batch > 1 && (uint64_t)call.D.stride < lt_matrix_extent(call.D)) {
        report("cublasLtMatmul: the results of a batch overlap, their stride is %lld elements",
               (long long)call.D.stride);
        return false;
    }
    return true;
}

/* Returns whether all memory that the call accesses is device memory. */
static bool lt_memory_ok(const lt_call &call, const void *workspace, size_t workspace_bytes) {
    const lt_desc &d = call.d;
    uint32_t e = d.epilogue;
    size_t rows = (size_t)call.D.rows, cols = (size_t)call.D.cols, batch = (size_t)call.D.batch;
    size_t bias_count = (batch - 1) * (size_t)d.bias_stride + (e & EPI_BGRADB ? cols : rows);
    bool ok = lt_in_device("A", call.a, lt_extent(call.A));
    ok = lt_in_device("B", call.b, lt_extent(call.B)) && ok;
    ok = lt_in_device("D", call.out, lt_extent(call.D)) && ok;
    if (call.beta != 0) ok = lt_in_device("C", call.c, lt_extent(call.C)) && ok;
    if (lt_has_bias(e))
        ok = lt_in_device("the bias", d.bias, bias_count * lt_size(lt_bias_type(d, call.D))) && ok;
    if (lt_has_aux(e))
        ok = lt_in_device("the auxiliary matrix", d.aux, lt_aux_bytes(d, call.D)) && ok;
    if (workspace && workspace_bytes)
        ok = lt_in_device("the workspace", workspace, workspace_bytes) && ok;
    return ok;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t h, cublasLtMatmulDesc_t desc, const void *alpha,
                              const void *A, cublasLtMatrixLayout_t Adesc, const void *B,
                              cublasLtMatrixLayout_t Bdesc, const void *beta, const void *C,
                              cublasLtMatrixLayout_t Cdesc, void *D, cublasLtMatrixLayout_t Ddesc,
                              const cublasLtMatmulAlgo_t *algo, void *workspace,
                              size_t workspace_bytes, cudaStream_t stream) {
    LOCK;
    if (!h) return CUBLAS_STATUS_NOT_INITIALIZED;
    if (!desc || !alpha || !beta || !A || !Adesc || !B || !Bdesc || !Cdesc || !D || !Ddesc)
        return CUBLAS_STATUS_INVALID_VALUE;
    if (in_device(alpha) || in_device(beta)) {
        report("cublasLtMatmul: alpha or beta in device memory, in host pointer mode");
        return CUBLAS_STATUS_INVALID_VALUE;
    }
    lt_call call;
    memcpy(&call.d, desc, sizeof call.d);
    memcpy(&call.A, Adesc, sizeof call.A);
    memcpy(&call.B, Bdesc, sizeof call.B);
    memcpy(&call.C, Cdesc, sizeof call.C);
    memcpy(&call.D, Ddesc, sizeof call.D);
    memcpy(&call.alpha, alpha, 4);
    memcpy(&call.beta, beta, 4);
    call.a = A;
    call.b = B;
    call.c = C;
    call.out = D;
    cublasStatus_t status = lt_check(call.d, call.A, call.B, call.C, call.D);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    if (!lt_arguments_ok(call, algo, workspace, workspace_bytes))
        return CUBLAS_STATUS_INVALID_VALUE;
    if (lt_refuses(false, (int)call.D.batch, call.d.epilogue)) {
        last_error = cudaErrorInvalidValue; /* as after a failed launch */
        return lt_refuse_with;
    }
    if (workspace && ((word)workspace & 15)) return CUBLAS_STATUS_INVALID_VALUE;
    if (!lt_memory_ok(call, workspace, workspace_bytes)) return CUBLAS_STATUS_EXECUTION_FAILED;
    if (!G.devices || G.sticky || stream_error(stream)) return CUBLAS_STATUS_EXECUTION_FAILED;
    if (device_of(stream) != h->device || h->device != current_device) {
        report("cublasLtMatmul: a handle of GPU %d, a stream of GPU %d, and GPU %d is current",
               h->device, device_of(stream), current_device);
        return CUBLAS_STATUS_EXECUTION_FAILED;
    }
    lt_calls++;
    lt_batches += call.D.batch > 1;
    lt_unaligned += lt_rows_unaligned(call.A, A) || lt_rows_unaligned(call.B, B)
                    || lt_rows_unaligned(call.D, D);
    submit_work(stream, "a matmul", [call, workspace, workspace_bytes] {
        /* an algorithm may overwrite the workspace */
        if (workspace) fill_bytes(workspace, std::min(workspace_bytes, (size_t)1 << 18));
        deliver();
        call.run();
    });
    return CUBLAS_STATUS_SUCCESS;
}

long cuda_host_matmuls(void) {
    return lt_calls;
}

long cuda_host_batches(void) {
    return lt_batches;
}

long cuda_host_unaligned(void) {
    return lt_unaligned;
}

void cuda_host_refuse(int what) {
    lt_refuse = what;
}

void cuda_host_refuse_with(int status) {
    lt_refuse_with = status ? (cublasStatus_t)status : CUBLAS_STATUS_NOT_SUPPORTED;
}

const char *cublasGetStatusName(cublasStatus_t status) {
    switch (status) {
#define STATUS(name, value) \
  case name: return #name;
        CUDA_HOST__STATUS(STATUS)
    default: return "unknown status";
    }
}

const char *cublasGetStatusString(cublasStatus_t status) {
    return cublasGetStatusName(status);
}

const char *cublasLtGetStatusName(cublasStatus_t status) {
    return cublasGetStatusName(status);
}

const char *cublasLtGetStatusString(cublasStatus_t status) {
    return cublasGetStatusName(status);
}

size_t cublasLtGetVersion(void) {
    return 130000;
}
}

// --------------------------------------------------------------------------------------


// >>nccl: exchanges between processes of one machine, through a memory-mapped file whose
// name is derived from the unique id. Data is exchanged in parts.

enum {
    RANKS = 8,
    PART = 1 << 18,   /* bytes of a part of a collective, per rank */
    MESSAGE = 1 << 16 /* bytes of a part of a send */
};

struct exchange_kind {
    int kind, type, op, root;
    size_t count;
};

/* The numbers of parts that a rank has published (put) and read from all ranks
   (taken). */
struct rank_progress {
    alignas(64) std::atomic<uint64_t> put, taken;
    exchange_kind what;
};

/* The messages from one rank to another. `bytes` is the number of bytes left to
   transfer, including the current message. */
struct mailbox {
    alignas(64) std::atomic<uint64_t> put, taken;
    size_t bytes;
};

struct shared_group {
    std::atomic<uint32_t> magic;
    std::atomic<int> ranks, joined, left;
    rank_progress rank[RANKS];
    mailbox pair[RANKS][RANKS];
    unsigned char part[RANKS][PART], message[RANKS][RANKS][MESSAGE];
};

static const uint32_t GROUP_MAGIC = 0x6e63636cu;

struct ncclComm {
    std::string path;
    shared_group *m;
    int fd, rank, ranks, polls;
    bool counted, complete, finalizing, gone, aborted; /* complete: whether all ranks
                                                          have joined */
    ncclResult_t state;
    std::function<void()> deferred; /* the last call; runs at the second query of the state */
    /* parts: number of parts so far; created, finished: numbers of exchanges, which run
       in the order of creation */
    uint64_t parts, created, finished;
    std::map<uint64_t, CUstream_st *> waiting; /* streams of the unfinished exchanges */
    std::shared_ptr<int> captured;             /* shared with captured exchanges, to count them */
};

static std::set<ncclComm *> &comms(void) {
    static auto *s = new std::set<ncclComm *>;
    return *s;
}

static std::vector<ncclComm *> &ended(void) {
    static auto *v = new std::vector<ncclComm *>;
    return *v;
}

static std::string &nccl_message(void) {
    static auto *s = new std::string;
    return *s;
}

static long exchanges_done;
static int forced_state, forced_captured, forced_later; /* cuda_host_nccl_fail.. */

__attribute__((format(printf, 2, 3))) static ncclResult_t nccl_fail(ncclResult_t r,
                                                                    const char *format, ...) {
    char text[256];
    va_list list;
    va_start(list, format);
    vsnprintf(text, sizeof text, format, list);
    va_end(list);
    nccl_message() = text;
    return r;
}

enum { ALL_REDUCE, REDUCE, BROADCAST, SEND, RECV };

static const char *const exchange_names[] = {"ncclAllReduce", "ncclReduce", "ncclBroadcast",
                                             "ncclSend", "ncclRecv"};

static size_t nccl_size(int type) {
    if (type == ncclFloat) return 4;
    return type == ncclDouble ? 8 : 1;
}

template <class T>
static void reduce_ranks(T *to, const unsigned char *first, size_t n, int ranks, int op) {
    for (size_t i = 0; i < n; i++) {
        T sum = 0;
        for (int r = 0; r < ranks; r++) { /* always in rank order */
            T v;
            memcpy(&v, first + (size_t)r * PART + i * sizeof v, sizeof v);
            if (op == ncclAvg) v *= (T)1 / (T)ranks; /* before the sum, as in NCCL */
            if (r == 0)
                sum = v;
            else if (op == ncclMax)
                sum = std::max(sum, v);
            else
                sum += v;
        }
        to[i] = sum;
    }
}

struct exchange {
    ncclComm *c;
    exchange_kind k;
    const unsigned char *from;
    unsigned char *to;
    uint64_t number;
    size_t at;
    bool published; /* whether this rank has published the current part */

    /* Publishes the current part. Returns false while a rank is still reading the
       previous part. */
    bool publish(size_t n, size_t each, uint64_t part) {
        rank_progress &mine = c->m->rank[c->rank];
        for (int r = 0; r < c->ranks; r++)
            if (c->m->rank[r].taken.load(std::memory_order_acquire) < part - 1) return false;
        if (k.kind != BROADCAST || c->rank == k.root)
            memcpy(c->m->part[c->rank], from + at * each, n * each);
        mine.what = k;
        mine.put.store(part, std::memory_order_release);
        return true;
    }

    /* Returns whether the ranks that this one reads from have published the part. */
    bool others_published(uint64_t part) {
        for (int r = 0; r < c->ranks; r++) {
            if (k.kind == BROADCAST && r != k.root) continue;
            if (c->m->rank[r].put.load(std::memory_order_acquire) < part) return false;
            const exchange_kind &w = c->m->rank[r].what;
            if (w.kind != k.kind || w.type != k.type || w.op != k.op || w.root != k.root
                || w.count != k.count)
                report("%s of %zu at rank %d meets %s of %zu at rank %d", exchange_names[k.kind],
                       k.count, c->rank, exchange_names[w.kind], w.count, r);
        }
        return true;
    }

    /* Performs one part of a collective. Returns false if another rank is not ready for
       it. */
    bool collective_part(void) {
        shared_group *m = c->m;
        size_t each = nccl_size(k.type), n = std::min(k.count - at, (size_t)PART / each);
        uint64_t part = c->parts + 1;
        if (!published && !publish(n, each, part)) return false;
        published = true;
        bool receives = k.kind == ALL_REDUCE || (k.kind == REDUCE) == (c->rank == k.root)
                        || (k.kind == BROADCAST && to != from);
        if (receives && !others_published(part)) return false;
        if (receives && k.kind == BROADCAST)
            memcpy(to + at * each, m->part[k.root], n * each);
        else if (receives && k.type == ncclDouble)
            reduce_ranks((double *)(void *)to + at, m->part[0], n, c->ranks, k.op);
        else if (receives)
            reduce_ranks((float *)(void *)to + at, m->part[0], n, c->ranks, k.op);
        if (receives) wrote(to + at * each, 0, n * each, 1);
        m->rank[c->rank].taken.store(part, std::memory_order_release);
        c->parts = part;
        published = false;
        at += n;
        return true;
    }

    /* Performs one part of a send or receive. Returns false if the other rank is not
       ready. */
    bool message_part(void) {
        int a = k.kind == SEND ? c->rank : k.root, b = k.kind == SEND ? k.root : c->rank;
        mailbox &box = c->m->pair[a][b];
        size_t n = std::min(k.count - at, (size_t)MESSAGE);
        uint64_t put = box.put.load(std::memory_order_acquire);
        uint64_t taken = box.taken.load(std::memory_order_acquire);
        if (k.kind == SEND) {
            if (put != taken) return false;
            memcpy(c->m->message[a][b], from + at, n);
            box.bytes = k.count - at;
            box.put.store(put + 1, std::memory_order_release);
        } else {
            if (put == taken) return false;
            if (box.bytes != k.count - at)
                report("ncclRecv of %zu bytes meets ncclSend of %zu", k.count - at, box.bytes);
            memcpy(to + at, c->m->message[a][b], n);
            wrote(to + at, 0, n, 1);
            box.taken.store(taken + 1, std::memory_order_release);
        }
        at += n;
        return true;
    }

    /* Runs as many parts as possible. Returns whether the exchange is finished. */
    bool run(void) {
        /* Exchanges run in the order of the calls, regardless of their streams. */
        while (!c->aborted && c->finished + 1 != number) {
            uint64_t first = c->finished;
            CUstream_st *s = c->waiting.begin()->second;
            if (!s->busy) advance(s, s->put);
            if (c->finished == first) return false;
        }
        if (!c->aborted && !G.sticky) {
            device_open();
            while (at < k.count && (k.kind < SEND ? collective_part() : message_part())) continue;
            device_close();
            if (at < k.count) return false;
            exchanges_done++;
        }
        c->finished = std::max(c->finished, number);
        c->waiting.erase(number);
        return true;
    }
};

static bool nccl_ready(ncclComm_t c, const char *what) {
    if (!comms().count(c) || c->gone) {
        report("%s on a communicator that does not exist", what);
        return false;
    }
    if (c->state == ncclInProgress || c->finalizing) {
        report("%s while the previous call is in progress", what);
        return false;
    }
    return true;
}

static ncclResult_t nccl_check(ncclComm_t c, const void *from, void *to, const exchange_kind &k,
                               cudaStream_t s) {
    const char *what = exchange_names[k.kind];
    size_t bytes = k.count * nccl_size(k.type);
    if (!nccl_ready(c, what)) return nccl_fail(ncclInvalidUsage, "%s: not ready", what);
    if (k.root < 0 || k.root >= c->ranks || !k.count)
        return nccl_fail(ncclInvalidArgument, "%s: invalid rank %d, or no elements", what, k.root);
    if ((from && !find_device(from, bytes)) || (to && !find_device(to, bytes))) {
        report("%s: %zu bytes at %p and %p are not within device memory", what, bytes, from, to);
        return nccl_fail(ncclInvalidArgument, "%s: invalid address", what);
    }
    if (bad_stream(s) || is_default(s))
        return nccl_fail(ncclInvalidArgument, "%s: invalid stream", what);
    if (c->state != ncclSuccess)
        return nccl_fail(ncclInvalidArgument, "%s: the communicator has failed", what);
    return ncclSuccess;
}

static bool finished_exchange(void) {
    return true;
}

/* Creates an exchange, for one run on a stream. */
static queued new_exchange(ncclComm_t c, const void *from, void *to, const exchange_kind &k,
                           CUstream_st *where) {
    if (!comms().count(c)) {
        report("a graph contains %s of a communicator that does not exist",
               exchange_names[k.kind]);
        return finished_exchange;
    }
    auto e = std::make_shared<exchange>();
    e->c = c;
    e->k = k;
    e->from = (const unsigned char *)from;
    e->to = (unsigned char *)to;
    e->number = ++c->created;
    e->at = 0;
    e->published = false;
    c->waiting[e->number] = where;
    return std::bind(&exchange::run, e);
}

#define NCCL_FORCED "%s: failure in a capture, set by the test"

static ncclResult_t nccl_submit(ncclComm_t c, const void *from, void *to, exchange_kind k,
                                cudaStream_t s) {
    LOCK;
    const char *what = exchange_names[k.kind];
    if (ncclResult_t wrong = nccl_check(c, from, to, k, s)) return wrong;
    if (capturing(s) && forced_captured && !forced_later)
        return nccl_fail((ncclResult_t)forced_captured, NCCL_FORCED, what);
    c->state = ncclInProgress;
    c->polls = 0;
    if (capturing(s) && forced_captured) {
        ncclResult_t failed = (ncclResult_t)forced_captured;
        c->deferred = [=] {
            if (capturing(s)) s->cap->valid = false;
            c->state = nccl_fail(failed, NCCL_FORCED, what);
        };
        return ncclInProgress;
    }
    /* The exchange enters the stream after the call has returned, as if an NCCL thread
       submitted it. */
    c->deferred = [=] {
        if (stream_error(s)) {
            c->state = ncclUnhandledCudaError;
            return;
        }
        auto n = std::make_shared<graph_node>();
        std::shared_ptr<int> held = capturing(s) ? c->captured : NULL;
        n->host = false;
        n->exchange = [=](CUstream_st *where) -> queued {
            (void)held;
            return new_exchange(c, from, to, k, where);
        };
        submit_node(s, n, false);
    };
    return ncclInProgress;
}

static std::string group_path(const char *id) {
    const char *dir = access("/dev/shm", W_OK) == 0 ? "/dev/shm" : getenv("TMPDIR");
    std::string path = std::string(dir ? dir : "/tmp") + "/cuda_host_nccl."
                       + std::to_string((long)getuid()) + ".";
    for (; *id; id++) path += strchr("/[]", *id) ? '_' : *id;
    return path;
}

static void group_close(ncclComm *c) {
    if (c->m) munmap(c->m, sizeof *c->m);
    if (c->fd >= 0) close(c->fd);
    c->m = NULL;
    c->fd = -1;
}

/* Opens the group's file and maps it. Rank 0 creates it. */
static bool group_open(ncclComm *c) {
    struct stat file;
    if (!c->rank) unlink(c->path.c_str());
    c->fd = open(c->path.c_str(), c->rank ? O_RDWR : O_RDWR | O_CREAT | O_EXCL, 0600);
    if (c->fd < 0) return false;
    void *p = MAP_FAILED;
    if ((c->rank || !ftruncate(c->fd, sizeof *c->m)) && !fstat(c->fd, &file)
        && file.st_size == (off_t)sizeof *c->m)
        p = mmap(NULL, sizeof *c->m, PROT_READ | PROT_WRITE, MAP_SHARED, c->fd, 0);
    if (p == MAP_FAILED) {
        group_close(c);
        return false;
    }
    c->m = (shared_group *)p;
    if (!c->rank) {
        c->m->ranks = c->ranks;
        c->m->magic = GROUP_MAGIC;
    }
    return true;
}

/* Joins the group if possible. Returns whether all ranks have joined. */
static bool group_complete(ncclComm *c) {
    struct stat a, b;
    if (c->m && c->m->joined == c->ranks) return true;
    /* The mapped file may belong to an earlier run. */
    if (c->m && c->rank
        && (stat(c->path.c_str(), &a) || fstat(c->fd, &b) || a.st_ino != b.st_ino)) {
        if (c->m->joined == c->ranks) return true;
        group_close(c);
        c->counted = false;
    }
    if (!c->m && !group_open(c)) return false;
    if (c->m->magic != GROUP_MAGIC) return false;
    if (c->m->ranks != c->ranks) {
        c->state = nccl_fail(ncclInvalidUsage, "expected the %d ranks of rank 0, got %d",
                             (int)c->m->ranks, c->ranks);
        return false;
    }
    if (!c->counted) {
        c->m->joined++;
        c->counted = true;
    }
    return c->m->joined == c->ranks;
}

static void nccl_end(ncclComm *c, const char *what) {
    if (c->captured.use_count() > 1)
        report("%s while graphs contain %ld exchanges: NCCL waits until they are destroyed", what,
               (long)c->captured.use_count() - 1);
    c->aborted = c->gone = true; /* pending exchanges end without effect */
    for (auto *s : streams()) advance(s);
    if (!c->rank && c->m && !c->complete) unlink(c->path.c_str());
    group_close(c);
    comms().erase(c);
    ended().push_back(c); /* not freed: a queue may still refer to it */
}

extern "C" {
ncclResult_t ncclGetVersion(int *version) {
    *version = NCCL_VERSION_CODE;
    return ncclSuccess;
}

const char *ncclGetErrorString(ncclResult_t result) {
    switch (result) {
#define NCCL_TEXT(name, value, text) \
  case name: return text;
        CUDA_HOST__NCCL(NCCL_TEXT)
    default: return "unknown result code";
    }
}

const char *ncclGetLastError(ncclComm_t) {
    return nccl_message().c_str();
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    const char *address = getenv("NCCL_COMM_ID");
    static int made;
    timespec t;
    memset(id, 0, sizeof *id);
    clock_gettime(CLOCK_REALTIME, &t);
    if (address && !strchr(address, ':'))
        return nccl_fail(ncclInvalidArgument, "NCCL_COMM_ID must be host:port");
    if (address)
        snprintf(id->internal, sizeof id->internal, "%.120s", address);
    else
        snprintf(id->internal, sizeof id->internal, "%ld.%ld.%ld.%d", (long)getpid(),
                 (long)t.tv_sec, t.tv_nsec, ++made);
    return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int ranks, ncclUniqueId id, int rank,
                                    ncclConfig_t *config) {
    LOCK;
    if (!comm || !config || config->size != sizeof *config || config->magic != 0xcafebeefu
        || config->blocking || ranks < 1 || ranks > RANKS || rank < 0 || rank >= ranks
        || id.internal[sizeof id.internal - 1])
        return nccl_fail(ncclInvalidArgument,
                         "rank %d of %d; only non-blocking communicators are implemented", rank,
                         ranks);
    ncclComm *c = new ncclComm();
    c->path = group_path(id.internal);
    c->fd = -1;
    c->rank = rank;
    c->ranks = ranks;
    c->state = ncclInProgress;
    c->captured = std::make_shared<int>(0);
    comms().insert(c);
    *comm = c;
    return ncclInProgress;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t c, ncclResult_t *state) {
    LOCK;
    if (!comms().count(c)) {
        report("ncclCommGetAsyncError of a communicator that does not exist");
        return ncclInvalidArgument;
    }
    if (forced_state) {
        c->state = nccl_fail((ncclResult_t)forced_state, "failure set by the test");
        forced_state = 0;
    }
    if (c->state == ncclInProgress && ++c->polls > 1) {
        if (c->finalizing) {
            if (c->m->left == c->ranks) c->state = ncclSuccess;
        } else if (!c->complete) {
            if (group_complete(c)) {
                c->complete = true;
                c->state = ncclSuccess;
                if (!c->rank) unlink(c->path.c_str()); /* the file's name is no longer needed */
            }
        } else {
            c->state = ncclSuccess;
            if (c->deferred) c->deferred();
        }
        if (c->state != ncclInProgress) c->deferred = nullptr;
    }
    *state = c->state;
    return ncclSuccess;
}

ncclResult_t ncclCommFinalize(ncclComm_t c) {
    LOCK;
    if (!nccl_ready(c, "ncclCommFinalize")) return ncclInvalidUsage;
    if (!c->waiting.empty())
        report("ncclCommFinalize before %zu exchanges are finished", c->waiting.size());
    c->finalizing = true;
    c->m->left++;
    c->polls = 0;
    c->state = ncclInProgress;
    return ncclInProgress;
}

ncclResult_t ncclCommDestroy(ncclComm_t c) {
    LOCK;
    if (!comms().count(c) || !c->finalizing || c->state != ncclSuccess) {
        report("ncclCommDestroy before ncclCommFinalize has finished");
        return ncclInvalidUsage;
    }
    nccl_end(c, "ncclCommDestroy");
    return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t c) {
    LOCK;
    if (!comms().count(c)) {
        report("ncclCommAbort of a communicator that does not exist");
        return ncclInvalidArgument;
    }
    nccl_end(c, "ncclCommAbort");
    return ncclSuccess;
}

ncclResult_t ncclAllReduce(const void *send, void *recv, size_t count, ncclDataType_t type,
                           ncclRedOp_t op, ncclComm_t comm, cudaStream_t s) {
    return nccl_submit(comm, send, recv, {ALL_REDUCE, type, op, 0, count}, s);
}

ncclResult_t ncclReduce(const void *send, void *recv, size_t count, ncclDataType_t type,
                        ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t s) {
    return nccl_submit(comm, send, recv, {REDUCE, type, op, root, count}, s);
}

ncclResult_t ncclBroadcast(const void *send, void *recv, size_t count, ncclDataType_t type,
                           int root, ncclComm_t comm, cudaStream_t s) {
    return nccl_submit(comm, send, recv, {BROADCAST, type, 0, root, count}, s);
}

ncclResult_t ncclSend(const void *send, size_t count, ncclDataType_t type, int peer,
                      ncclComm_t comm, cudaStream_t s) {
    return nccl_submit(comm, send, NULL, {SEND, ncclUint8, 0, peer, count * nccl_size(type)}, s);
}

ncclResult_t ncclRecv(void *recv, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t s) {
    return nccl_submit(comm, NULL, recv, {RECV, ncclUint8, 0, peer, count * nccl_size(type)}, s);
}

void cuda_host_nccl_fail(int state) {
    LOCK;
    forced_state = state;
}

void cuda_host_nccl_fail_captured(int state, int later) {
    LOCK;
    forced_captured = state;
    forced_later = later;
}

long cuda_host_exchanges(void) {
    return exchanges_done;
}

long cuda_host_comms(void) {
    LOCK;
    return (long)comms().size();
}
}
