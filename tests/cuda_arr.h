/* cuda_arr.h - arrays that the CPU and the GPU have alike, between guards, for tests
   that compare twins. After seqtx.h, in one file. */
#ifndef STX_CUDA_ARR_H
#define STX_CUDA_ARR_H
#include "cuda_test.h"

static stx_ctx *cx, *gx; /* CPU and GPU */
static int half;         /* gx is bf16 */
static size_t off;       /* 1: arrays start one number after an aligned address */
/* what arr_check's tolerance is relative to, if the largest number is smaller: sums
   that cancel */
static double least;
#define COUNT(a) (sizeof(a) / sizeof(a)[0])

/* n elements on both sides: c for the CPU twin, d for the GPU's, equal at first; 8 or 9
   guards before and 8 after */
enum { GUARD = 9 };

static const float guard = 77;

typedef struct arr {
    size_t n, lead;
    int kind;
    float *c;
    stx_real *base, *d;
} arr;

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
    a.base = cuda_numbers(gx, all, a.lead + n + 8, kind);
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

static inline float *arr_get(const arr *a) {
    float *v = (float *)malloc((a->n + 1) * sizeof *v);
    stx_cuda_download_activations(gx, v, a->d, a->n);
    return v;
}

/* The bfloat16 twin of a parameter is what products read: t = p 1 has its values. */
static inline void twin_check(const char *name, const arr *a) {
    float one = 1, *p, *t;
    stx_real *b, *y;
    stx_gemm_args g;
    size_t i, bad = 0;
    if (!half || a->kind != STX_MEM_PARAMS || !a->n) return;
    b = cuda_numbers(gx, &one, 1, STX_MEM_ACTIVATIONS);
    y = cuda_numbers(gx, NULL, a->n, STX_MEM_ACTIVATIONS);
    g = stx_gemm_init(0, 0, a->n, 1, 1, a->d, b, y);
    stx_gemm_cuda(gx, &g);
    p = arr_get(a);
    cuda_round(p, a->n);
    t = (float *)malloc(a->n * sizeof *t);
    stx_cuda_download_activations(gx, t, y, a->n);
    for (i = 0; i < a->n; i++) bad += t[i] != p[i] && !(t[i] != t[i] && p[i] != p[i]);
    CHECK(!bad, "%s: %zu of %zu numbers have an old twin", name, bad, a->n);
    free(p);
    free(t);
    stx_cuda_free(gx, b);
    stx_cuda_free(gx, y);
}

/* a.d is a.c to tol of the largest (0: bit for bit, but for the sign of 0 and NaN's
   bits); in bf16 one rounding more. NaN and infinities must be where the CPU has them.
   Guards are whole, the twin is current. Then both sides are equal again. */
static inline void arr_check(const char *name, const arr *a, double tol) {
    size_t all = a->lead + a->n + 8, i, bad = 0, guards = 0, at = 0;
    float *v = (float *)malloc(all * sizeof *v), *w = v + a->lead;
    double top = least, worst = 0;
    CHECK(stx_ok(gx), "%s: %s", name, stx_error(gx));
    stx_cuda_download_activations(gx, v, a->base, all);
    for (i = 0; i < all; i++)
        if ((i < a->lead || i >= a->lead + a->n) && !(v[i] == guard)) guards++;
    for (i = 0; i < a->n; i++)
        if (fabs((double)a->c[i]) > top && fabs((double)a->c[i]) < 1e300)
            top = fabs((double)a->c[i]);
    for (i = 0; i < a->n; i++) {
        double c = (double)a->c[i], d = (double)w[i], e = fabs(d - c),
               limit = tol * top + (is_half(a->kind) ? fabs(c) / 256 + 1e-38 : 0);
        int same = c == d || (c != c && d != d);
        if (!same && !(e <= limit && c - c == 0)) {
            if (!bad++) at = i;
        }
        if (!same && e > worst) worst = e;
    }
    CHECK(!bad, "%s (%s, n %zu, off %zu): %zu differ, [%zu] is %.9g, expected %.9g; worst %g of %g",
          name, half ? "bf16" : "f32", a->n, off, bad, at, (double)w[at], (double)a->c[at], worst,
          top);
    CHECK(!guards, "%s (n %zu, off %zu): %zu neighbours were written", name, a->n, off, guards);
    memcpy(a->c, w, a->n * sizeof *w);
    twin_check(name, a);
    free(v);
}

#define N_ STX_MEM_ACTIVATIONS
#define P_ STX_MEM_PARAMS
#define B_ STX_MEM_BYTES
/* Both twins with the same arguments, in which A(a) stands for the numbers of arr a */
#define BOTH(stem, cpu, gpu) \
  do { \
    stem cpu; \
    stem##_cuda gpu; \
  } while (0)
#endif
