/* cuda_arr.h - arrays that exist on both the CPU and the GPU, between guard elements,
   for tests that compare the two. Include it after seqtx.h, in one file only. */
#ifndef STX_CUDA_ARR_H
#define STX_CUDA_ARR_H
#include "cuda_test.h"

static stx_ctx *cx, *gx; /* contexts on the CPU (cx) and on the GPU (gx) */
static int half;         /* whether gx uses bf16 */
static size_t off;       /* 1: arrays start one element after an aligned address */
/* arr_check's tolerance is relative to the largest element or to this value, whichever
   is larger. Set by tests of sums that cancel. */
static double least;

static const float guard = 77;

/* An array of n elements on the CPU (c) and on the GPU (d), initially equal. There are
   8 or 9 guard elements before the elements and 8 after them. */
typedef struct arr {
    size_t n, lead;
    int kind;
    float *c;
    stx_real *base, *d;
} arr;

/* Abbreviations for the memory kinds. */
#define N_ STX_MEM_ACTIVATIONS
#define P_ STX_MEM_PARAMS
#define B_ STX_MEM_BYTES

/* Runs the CPU kernel and the GPU kernel with the same arguments. */
#define BOTH(stem, cpu, gpu) \
  do { \
    stem cpu; \
    stem##_cuda gpu; \
  } while (0)

static inline int is_half(int kind) {
    return half && kind == STX_MEM_ACTIVATIONS;
}

static inline arr arr_from(const float *v, size_t n, int kind) {
    arr a;
    size_t i;
    float *all;
    a.n = n;
    a.lead = 8 + off;
    a.kind = kind;
    all = (float *)malloc((a.lead + n + 8) * sizeof *all);
    a.c = (float *)malloc((n + 1) * sizeof *a.c);
    memcpy(a.c, v, n * sizeof *v);
    if (is_half(kind)) cuda_round(a.c, n);
    for (i = 0; i < a.lead + n + 8; i++) all[i] = guard;
    memcpy(all + a.lead, a.c, n * sizeof *all);
    a.base = cuda_array(gx, all, a.lead + n + 8, kind);
    a.d = stx_offset_ptr(gx, a.base, a.lead);
    free(all);
    return a;
}

static inline arr arr_of(size_t n, double s, int whole, int kind) {
    float *v = cuda_random(n, s, whole);
    arr a = arr_from(v, n, kind);
    free(v);
    return a;
}

static inline void arr_free(arr *a) {
    free(a->c);
    stx_cuda_free(gx, a->base);
}

/* Copies the CPU's elements to the GPU. */
static inline void arr_upload(const arr *a) {
    stx_cuda_upload_activations(gx, a->d, a->c, a->n);
}

/* Returns a copy of the array's GPU elements in host memory. The caller frees it. */
static inline float *arr_get(const arr *a) {
    return cuda_fetch(gx, a->d, a->n);
}

/* Checks the bf16 copy of a parameter p. Matmuls read this copy, so a matmul of p and 1
   returns its values. */
static inline void bf16_copy_check(const char *name, const arr *a) {
    float one = 1, *p, *t;
    stx_real *b, *y;
    stx_gemm_args g;
    size_t i, bad = 0;
    if (!half || a->kind != STX_MEM_PARAMS || !a->n) return;
    b = cuda_array(gx, &one, 1, STX_MEM_ACTIVATIONS);
    y = cuda_array(gx, NULL, a->n, STX_MEM_ACTIVATIONS);
    g = stx_gemm_init(0, 0, a->n, 1, 1, a->d, b, y);
    stx_gemm_cuda(gx, &g);
    p = arr_get(a);
    cuda_round(p, a->n);
    t = cuda_fetch(gx, y, a->n);
    for (i = 0; i < a->n; i++) bad += t[i] != p[i] && !(t[i] != t[i] && p[i] != p[i]);
    CHECK(!bad, "%s: the bf16 copies of %zu of %zu elements are stale", name, bad, a->n);
    free(p);
    free(t);
    stx_cuda_free(gx, b);
    stx_cuda_free(gx, y);
}

/* Returns the largest finite magnitude of the CPU's elements, or `least` if that is
   larger. */
static inline double arr_largest(const arr *a) {
    double top = least;
    size_t i;
    for (i = 0; i < a->n; i++)
        if (fabs((double)a->c[i]) > top && fabs((double)a->c[i]) < 1e300)
            top = fabs((double)a->c[i]);
    return top;
}

/* Checks that a.d equals a.c within tol times the largest element (0: bit-exactly,
   except for the sign of 0 and the bits of NaN), plus one rounding in bf16. NaN and
   infinities must be in the same places, guard elements must be unchanged, and bf16
   copies must be up to date. Then copies a.d to a.c. */
static inline void arr_check(const char *name, const arr *a, double tol) {
    size_t all = a->lead + a->n + 8, i, bad = 0, guards = 0, at = 0;
    float *v = (float *)malloc(all * sizeof *v), *w = v + a->lead;
    double top = arr_largest(a), worst = 0;
    CHECK(stx_ok(gx), "%s: %s", name, stx_error(gx));
    stx_cuda_download_activations(gx, v, a->base, all);
    for (i = 0; i < all; i++)
        if ((i < a->lead || i >= a->lead + a->n) && !(v[i] == guard)) guards++;
    for (i = 0; i < a->n; i++) {
        double c = (double)a->c[i], d = (double)w[i], e = fabs(d - c), limit = tol * top;
        int same = c == d || (c != c && d != d);
        if (is_half(a->kind)) limit += fabs(c) / 256 + 1e-38;
        if (!same && !(e <= limit && c - c == 0)) {
            if (!bad++) at = i;
        }
        if (!same && e > worst) worst = e;
    }
    CHECK(!bad, "%s (%s, n %zu, off %zu): %zu differ, [%zu] is %.9g, expected %.9g; worst %g of %g",
          name, half ? "bf16" : "f32", a->n, off, bad, at, (double)w[at], (double)a->c[at], worst,
          top);
    CHECK(!guards, "%s (n %zu, off %zu): %zu guard elements were written", name, a->n, off, guards);
    memcpy(a->c, w, a->n * sizeof *w);
    bf16_copy_check(name, a);
    free(v);
}
#endif
