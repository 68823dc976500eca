/* cuda_test.h - what the tests of seqtx_cuda.cu share: a context on the CPU and one on
   the GPU, numbers on both, comparisons. Compiled with SEQTX_CUDA_HOST the GPU is
   tests/cuda_host, which runs every kernel in several orders of its threads and with
   several patterns in memory that was not written: every run must give the same bits. */
#ifndef STX_CUDA_TEST_H
#define STX_CUDA_TEST_H
#include "test.h"
#ifdef SEQTX_CUDA_HOST
  #include "cuda_host/cuda_host.h"
#endif

/* precision of the GPU's context; the CPU's is always float */
static inline stx_ctx *cuda_ctx(int device, int precision) {
    stx_desc d;
    memset(&d, 0, sizeof d);
    d.device = device;
    d.precision = precision;
    d.threads = 1;
    d.seed = 77;
    return stx_create(&d);
}

/* n random numbers in (-s, s) on the host; whole: small integers, for products and
   sums that are exact in any order */
static inline float *cuda_random(size_t n, double s, int whole) {
    float *a = (float *)malloc((n + 1) * sizeof *a);
    size_t i;
    for (i = 0; i < n; i++) a[i] = (float)(whole ? floor(test_rand() * s + 0.5) : test_rand() * s);
    return a;
}

/* The nearest bfloat16, as the GPU stores activations in bf16 contexts: the CPU twin
   then gets the same inputs */
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

/* n elements on the device of x, in memory of a kind (STX_MEM_*), between nothing else:
   an overrun leaves the allocation */
static inline stx_real *cuda_numbers(stx_ctx *x, const float *a, size_t n, int kind) {
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

/* largest |device - want| over the largest |want| (or floor_); infinity if anything is
   not finite */
static inline double cuda_error(stx_ctx *x, const stx_real *p, const float *want, size_t n,
                                double floor_) {
    float *a = (float *)malloc((n + 1) * sizeof *a);
    double worst = 0, top = floor_;
    size_t i;
    stx_download(x, a, p, n);
    for (i = 0; i < n; i++)
        if (fabs((double)want[i]) > top) top = fabs((double)want[i]);
    for (i = 0; i < n; i++) {
        double e = fabs((double)a[i] - (double)want[i]);
        if (!(e <= 1e300)) {
            worst = HUGE_VAL;
            break;
        }
        if (e > worst) worst = e;
    }
    free(a);
    return worst == 0 ? 0 : worst / top;
}

/* A hash of the bits of n elements: runs that must be equal have equal ones. */
static inline uint64_t cuda_hash(stx_ctx *x, const stx_real *p, size_t n, uint64_t h) {
    float *a = (float *)malloc((n + 1) * sizeof *a);
    size_t i;
    stx_download(x, a, p, n);
    for (i = 0; i < n; i++) {
        uint32_t u;
        memcpy(&u, a + i, 4);
        h = (h ^ u) * 1099511628211u;
    }
    free(a);
    return h;
}

/* run(user, &hash) several times: under the shim in each order of threads and blocks
   and with other garbage in unwritten memory. All hashes must be equal, and nothing
   may be reported. */
typedef void (*cuda_case)(void *user, uint64_t *hash);

static inline void cuda_orders(const char *name, cuda_case run, void *user) {
    uint64_t first = 0, h;
    int k, times =
#ifdef SEQTX_CUDA_HOST
               4;
#else
               2;
#endif
    for (k = 0; k < times; k++) {
#ifdef SEQTX_CUDA_HOST
        static const int order[4][2] = {{0, 0}, {1, 1}, {2, 2}, {3, 2}};
        long reports = cuda_host_reports();
        cuda_host_order(order[k][0], order[k][1], (unsigned)(k + 1));
        cuda_host_fill(k % 2 ? 0x5a : 0xff);
#endif
        h = 14695981039346656037u;
        run(user, &h);
        if (!k)
            first = h;
        else
            CHECK(h == first, "%s: run %d gives other bits than the first", name, k);
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

/* The end of a test: what the shim has seen since it began fails it */
static inline int cuda_test_end(void) {
#ifdef SEQTX_CUDA_HOST
    cuda_host_check();
    CHECK(cuda_host_reports() == 0, "the shim reports %ld violations", (long)cuda_host_reports());
#endif
    return test_end();
}
#ifdef SEQTX_CUDA_HOST
/* How many nodes a layer adds to a step's graph: what one with another layer (k 1) has
   more than one with `layers` (k 0). */
enum { CUDA_NODE_NAMES = 200 };

typedef struct cuda_nodes {
    const char *name[CUDA_NODE_NAMES];
    int count[CUDA_NODE_NAMES], n;
    long have[2];
} cuda_nodes;

/* of the graph that was made last */
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

static inline void cuda_nodes_check(const cuda_nodes *all, const char *what, int layers, long most,
                                    int tell) {
    long each = all->have[1] - all->have[0];
    int j;
    if (tell) {
        printf("%s: %ld nodes a layer, %ld besides\n", what, each, all->have[0] - layers * each);
        for (j = 0; j < all->n; j++)
            if (all->count[j])
                printf("%6d  %.*s\n", all->count[j], (int)strcspn(all->name[j], ","), all->name[j]);
    }
    CHECK(
        each == most,
        "%s: a layer has %ld nodes, %ld are wanted: if it should be so, write it there and in "
        "docs/cuda.md",
        what, each, most);
}
#endif
#endif
