/* family.h - helpers that the test programs of the model families share. Include after
   the header of a family. */
#ifndef STX_TEST_FAMILY_H
#define STX_TEST_FAMILY_H
#include "../values.h"

static inline stx_ctx *context(int threads, uint64_t seed) {
    stx_desc d;
    memset(&d, 0, sizeof d);
    d.threads = threads;
    d.seed = seed;
    return stx_create(&d);
}

/* Returns independent tokens (B,n), which depend only on the seed. The caller frees
   them. */
static inline int32_t *random_tokens(size_t B, size_t n, int vocab, uint64_t seed) {
    int32_t *t = (int32_t *)malloc((B * n + 1) * sizeof *t);
    size_t i;
    test_state = 88172645463325252u + seed;
    for (i = 0; i < B * n; i++) t[i] = (int32_t)((test_rand() + 1) * 0.4999 * vocab);
    return t;
}

/* Returns tokens (B,n), two thirds of which are determined by their predecessor. The
   caller frees them. */
static inline int32_t *ordered_tokens(size_t B, size_t n, int vocab, uint64_t seed) {
    int32_t *t = (int32_t *)malloc((B * n + 1) * sizeof *t);
    size_t i;
    test_state = 88172645463325252u + seed;
    for (i = 0; i < B * n; i++) {
        if (i && test_rand() < 0.4)
            t[i] = (t[i - 1] * 7 + 3) % vocab;
        else
            t[i] = (int32_t)((test_rand() + 1) * 0.4999 * vocab);
    }
    return t;
}

/* Returns the largest |a|, at least 1, as the scale of differences. */
static inline double largest(const stx_real *a, size_t n) {
    double top = 1;
    size_t i;
    for (i = 0; i < n; i++)
        if (fabs((double)a[i]) > top) top = fabs((double)a[i]);
    return top;
}

/* Adds a random value in (-0.3,0.3) to every parameter, so that tables and biases
   differ from their initial values. p may be NULL. */
static inline void perturb(stx_ctx *x, const stx_params *p) {
    size_t i, k;
    test_state = 88172645463325252u;
    for (i = 0; p && i < p->count; i++) {
        stx_tensor *t = p->tensor[i];
        stx_real *v = (stx_real *)malloc(t->size * sizeof *v);
        stx_get(x, t, v);
        for (k = 0; k < t->size; k++) v[k] += (stx_real)(0.3 * test_rand());
        stx_set(x, t, v);
        free(v);
    }
}

static inline void *limited_alloc(void *user, size_t bytes) {
    int *left = (int *)user;
    return (*left)-- > 0 ? malloc(bytes) : NULL;
}

static inline void limited_release(void *user, void *p) {
    (void)user;
    free(p);
}

/* Returns a single-threaded context whose allocations fail after the first *left, or
   NULL if stx_create itself fails. */
static inline stx_ctx *limited_context(int *left) {
    stx_desc d;
    memset(&d, 0, sizeof d);
    d.alloc = limited_alloc;
    d.release = limited_release;
    d.user = left;
    d.chunk_bytes = 4096;
    d.threads = 1;
    return stx_create(&d);
}
#endif
