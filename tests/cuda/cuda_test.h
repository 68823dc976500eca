/* cuda_test.h - shared by the tests of seqtx_cuda.cu: a context on the CPU and one on
   the GPU, arrays on both, comparisons. With SEQTX_CUDA_HOST, the GPU is the shim in
   tests/cuda_host. The tests run every kernel in several thread orders and with several
   patterns in unwritten memory. All runs must give the same bits. */
#ifndef STX_CUDA_TEST_H
#define STX_CUDA_TEST_H
#include "../test.h"
#include "../values.h"
#ifdef SEQTX_CUDA_HOST
  #include "../cuda_host/cuda_host.h"
#endif

#ifdef SEQTX_CUDA_HOST
enum { CUDA_ON_HOST = 1 };
#else
enum { CUDA_ON_HOST = 0 };
#endif

/* Number of elements of an array */
#define COUNT(a) (sizeof(a) / sizeof(a)[0])

/* Nonzero if the part called `name` was selected. The variable `part` is the name of
   the selected part, or "" if all parts are selected. */
#define PART(name) (!*part || !strcmp(part, name))


// >>contexts and values

/* Returns a context on a device. `precision` applies to the GPU; a CPU context is
   always f32. */
static inline stx_ctx *cuda_ctx(int device, int precision) {
    stx_desc d;
    memset(&d, 0, sizeof d);
    d.device = device;
    d.precision = precision;
    d.threads = 1;
    d.seed = 77;
    return stx_create(&d);
}

static inline int cuda_precision(int half) {
    return half ? STX_PREC_BF16 : STX_PREC_F32;
}

/* Returns the number of graph replays so far, or 0 on a real GPU, which does not count
   them. */
static inline long cuda_replays(void) {
#ifdef SEQTX_CUDA_HOST
    return cuda_host_graph_launches();
#else
    return 0;
#endif
}

/* Restarts the random values, so that they do not depend on previous tests. */
static inline void cuda_random_restart(void) {
    test_state = 88172645463325252u;
}

/* Returns n random values in (-s, s), in host memory. If `whole` is set, the values are
   small integers, so that matmuls and sums are exact in any order. */
static inline float *cuda_random(size_t n, double s, int whole) {
    float *a = (float *)malloc((n + 1) * sizeof *a);
    size_t i;
    for (i = 0; i < n; i++) a[i] = (float)(whole ? floor(test_rand() * s + 0.5) : test_rand() * s);
    return a;
}

/* Rounds values to bf16, the type in which a bf16 context stores activations. The CPU
   then computes with the same inputs as the GPU. */
static inline void cuda_round(float *a, size_t n) {
    size_t i;
    for (i = 0; i < n; i++) {
        uint32_t u;
        memcpy(&u, a + i, 4);
        u += 0x7fffu + ((u >> 16) & 1);
        u &= 0xffff0000u;
        memcpy(a + i, &u, 4);
    }
}

/* Allocates n elements on x's device, in memory of the given kind (STX_MEM_*), and
   copies a to them unless a is NULL. The allocation has no spare elements, so the shim
   reports every overrun. */
static inline stx_real *cuda_array(stx_ctx *x, const float *a, size_t n, int kind) {
    int half = kind == STX_MEM_ACTIVATIONS && stx_ctx_desc(x)->precision == STX_PREC_BF16;
    stx_real *p = (stx_real *)stx_cuda_alloc(x, (n ? n : 1) * (half ? 2 : 4), kind);
    if (p && a) stx_cuda_upload_activations(x, p, a, n);
    return p;
}

static inline void *cuda_bytes(stx_ctx *x, const void *a, size_t bytes) {
    void *p = stx_cuda_alloc(x, bytes ? bytes : 1, STX_MEM_BYTES);
    if (p && a) stx_cuda_upload(x, p, a, bytes);
    return p;
}

/* Returns a copy of n device elements in host memory. The caller frees it. */
static inline float *cuda_fetch(stx_ctx *x, const stx_real *p, size_t n) {
    float *a = (float *)malloc((n + 1) * sizeof *a);
    stx_cuda_download_activations(x, a, p, n);
    return a;
}


// >>comparisons

/* Returns the largest |a|, or floor_ if that is larger. */
static inline double cuda_largest(const float *a, size_t n, double floor_) {
    size_t i;
    for (i = 0; i < n; i++)
        if (fabs((double)a[i]) > floor_) floor_ = fabs((double)a[i]);
    return floor_;
}

/* Returns the largest |device - expected|, relative to the largest |expected| or to
   floor_, whichever is larger. Returns infinity if a value is not finite. */
static inline double cuda_error(stx_ctx *x, const stx_real *p, const float *expected, size_t n,
                                double floor_) {
    float *a = (float *)malloc((n + 1) * sizeof *a);
    double worst = 0, top = cuda_largest(expected, n, floor_);
    size_t i;
    stx_download(x, a, p, n);
    for (i = 0; i < n; i++) raise_worst(&worst, fabs((double)a[i] - (double)expected[i]));
    free(a);
    if (worst == 0) return 0;
    return worst <= 1e300 ? worst / top : HUGE_VAL;
}

/* The initial value of an FNV-1a hash, and a function that updates hash h with 32 more
   bits. */
static const uint64_t cuda_hash_start = 14695981039346656037u;

static inline uint64_t cuda_hash_bits(uint64_t h, const void *bits) {
    uint32_t u;
    memcpy(&u, bits, 4);
    return (h ^ u) * 1099511628211u;
}

/* Returns the hash h, updated with the bits of n elements. */
static inline uint64_t cuda_hash(stx_ctx *x, const stx_real *p, size_t n, uint64_t h) {
    float *a = (float *)malloc((n + 1) * sizeof *a);
    size_t i;
    stx_download(x, a, p, n);
    for (i = 0; i < n; i++) h = cuda_hash_bits(h, a + i);
    free(a);
    return h;
}

static inline uint64_t cuda_hash_params(stx_ctx *x, const stx_params *p, uint64_t h) {
    size_t i;
    for (i = 0; i < p->count; i++) h = cuda_hash(x, p->tensor[i]->data, p->tensor[i]->size, h);
    return h;
}

/* Checks that layer l of a memory on the CPU (a) and layer l of a memory on a GPU (b,
   in context x) have the same size and, unless tol is 0, the same rows. */
static inline void cuda_check_memory(const char *name, stx_ctx *x, stx_memory *b, stx_memory *a,
                                     size_t l, double tol) {
    const stx_memory_layer *y = &a->layer[l], *z = &b->layer[l];
    double e;
    CHECK(y->count == z->count && y->width == z->width,
          "%s: layer %zu has %zu rows of %zu elements, expected %zu of %zu", name, l, z->count,
          z->width, y->count, y->width);
    if (tol == 0 || !y->count || !y->width) return;
    e = cuda_error(x, stx_memory_read(b, l, SIZE_MAX)->data, stx_memory_read(a, l, SIZE_MAX)->data,
                   a->B * y->count * y->width, 1e-3);
    CHECK(e <= tol, "%s: error %g in the memory of layer %zu", name, e, l);
}


// >>orders

/* Nonzero if some tests run with half of their cases: on the host, which is slow, except
   in `make test-all` (FULL). */
static inline int cuda_fewer(void) {
    const char *full = getenv("FULL");
    return CUDA_ON_HOST && !(full && *full);
}

/* Calls run(user, &hash) several times. Under the shim, the calls use several orders of
   threads and blocks, and different patterns in unwritten memory. All hashes must be
   equal, and the shim must have nothing to report. CUDA_ORDERS=N in the environment sets
   the number of calls, for kernels that are interpreted (tests/ptx_host). */
typedef void (*cuda_case)(void *user, uint64_t *hash);

static inline void cuda_orders(const char *name, cuda_case run, void *user) {
    const char *given = getenv("CUDA_ORDERS");
    const int most = CUDA_ON_HOST ? 4 : 2, times = given ? atoi(given) : most;
    uint64_t first = 0, h;
    int k;
    for (k = 0; k < times && k < most; k++) {
#ifdef SEQTX_CUDA_HOST
        static const int order[4][2] = {{0, 0}, {1, 1}, {2, 2}, {3, 2}};
        long reports = cuda_host_reports();
        cuda_host_order(order[k][0], order[k][1], (unsigned)(k + 1));
        cuda_host_fill(k % 2 ? 0x5a : 0xff);
#endif
        h = cuda_hash_start;
        run(user, &h);
        if (!k)
            first = h;
        else
            CHECK(h == first, "%s: run %d has other bits than the first", name, k);
#ifdef SEQTX_CUDA_HOST
        cuda_host_check();
        CHECK(cuda_host_reports() == reports, "%s: the shim reports %ld violations", name,
              (long)(cuda_host_reports() - reports));
#endif
    }
#ifdef SEQTX_CUDA_HOST
    cuda_host_order(0, 0, 1);
    cuda_host_fill(0xff);
#endif
}

/* Ends a test program. The program fails if the shim has reported anything. */
static inline int cuda_test_end(void) {
#ifdef SEQTX_CUDA_HOST
    cuda_host_check();
    CHECK(cuda_host_reports() == 0, "the shim reports %ld violations, the last: %s",
          (long)cuda_host_reports(), cuda_host_last_report());
#endif
    return test_end();
}

#ifdef SEQTX_CUDA_HOST


// >>nodes

/* The nodes that one layer adds to a step's graph, found by comparing two graphs. Graph
   0 has `layers` layers, and graph 1 has one layer more. have[k] is the number of nodes
   in graph k, and count[] is the difference per kind of node. */
enum { CUDA_NODE_NAMES = 200 };

typedef struct cuda_nodes {
    const char *name[CUDA_NODE_NAMES];
    int count[CUDA_NODE_NAMES], n;
    long have[2];
} cuda_nodes;

/* Counts the nodes of the newest graph. */
static inline void cuda_nodes_add(cuda_nodes *all, int k) {
    long i;
    int j;
    all->have[k] = cuda_host_graph_nodes();
    for (i = 0; i < all->have[k]; i++) {
        const char *name = cuda_host_graph_node(i);
        for (j = 0; j < all->n && strcmp(all->name[j], name); j++) continue;
        if (j == CUDA_NODE_NAMES) continue;
        if (j == all->n) {
            all->name[j] = name;
            all->count[j] = 0;
            all->n++;
        }
        all->count[j] += k ? 1 : -1;
    }
}

static inline void cuda_nodes_check(const cuda_nodes *all, const char *what, int layers,
                                    long expected, int print) {
    long each = all->have[1] - all->have[0];
    int j;
    if (print) {
        printf("%s: %ld nodes per layer, %ld others\n", what, each, all->have[0] - layers * each);
        for (j = 0; j < all->n; j++)
            if (all->count[j])
                printf("%6d  %.*s\n", all->count[j], (int)strcspn(all->name[j], ","), all->name[j]);
    }
    CHECK(each == expected,
          "%s: a layer adds %ld nodes, expected %ld. If that is intended, change the number here "
          "and in docs/cuda.md",
          what, each, expected);
}
#endif
#endif
