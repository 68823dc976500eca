/* golden.h - reads the golden vectors of tests/golden. Include after a header of the
   library. */
#ifndef STX_TEST_GOLDEN_H
#define STX_TEST_GOLDEN_H
#include "../values.h"

static const char *dir = "tests/golden";
#ifndef GOLDEN_DEVICE /* STX_CUDA compares the GPU with the same vectors */
  #define GOLDEN_DEVICE STX_CPU
#endif

/* Returns whether the tests run on a CPU. On a GPU, the number of threads has no
   effect, and recomputation runs the same kernels, so fewer cases are repeated. */
static inline int golden_cpu(void) {
    return GOLDEN_DEVICE == STX_CPU;
}

static inline stx_ctx *golden_ctx(int threads) {
    stx_desc d;
    memset(&d, 0, sizeof d);
    d.device = GOLDEN_DEVICE;
    d.threads = threads;
    return stx_create(&d);
}

/* Returns a copy of n elements of context x in host memory. The caller frees it. */
static inline stx_real *host_of(stx_ctx *x, const stx_real *p, size_t n) {
    stx_real *h = (stx_real *)malloc((n + 1) * sizeof *h);
    stx_download(x, h, p, n);
    return h;
}

/* Returns a copy of the elements in double. The caller frees it. */
static inline double *doubles_of(stx_ctx *x, const stx_real *p, size_t n) {
    stx_real *h = host_of(x, p, n);
    double *d = (double *)malloc((n + 1) * sizeof *d);
    size_t i;
    for (i = 0; i < n; i++) d[i] = (double)h[i];
    free(h);
    return d;
}

static inline void put_f64(stx_ctx *x, stx_real *p, const double *a, size_t n) {
    stx_real *h = (stx_real *)malloc((n + 1) * sizeof *h);
    size_t i;
    for (i = 0; i < n; i++) h[i] = (stx_real)a[i];
    stx_upload(x, p, h, n);
    free(h);
}

static stx_file *open_golden(stx_ctx *x, const char *name) {
    char path[1024];
    stx_file *f;
    snprintf(path, sizeof path, "%s/%s.safetensors", dir, name);
    f = stx_file_open(x, path);
    CHECK(f != NULL, "%s", stx_error(x));
    return f;
}

/* Returns the elements of an entry, or NULL if the file has no such entry. The caller
   frees them. */
static double *entry(const stx_file *f, const char *name, size_t *n) {
    const stx_entry *e = stx_file_find(f, name);
    double *out;
    if (n) *n = e ? e->count : 0;
    if (!e) return NULL;
    out = (double *)malloc((e->count + 1) * sizeof *out);
    if (!stx_entry_get_f64(e, out, e->count)) {
        free(out);
        return NULL;
    }
    return out;
}

/* Returns the elements of an entry as stx_real, or NULL if the file has no such entry.
   The caller frees them. */
static inline stx_real *reals(const stx_file *f, const char *name, size_t *n) {
    size_t i, count;
    double *v = entry(f, name, &count);
    stx_real *r = v ? (stx_real *)malloc((count + 1) * sizeof *r) : NULL;
    for (i = 0; v && i < count; i++) r[i] = (stx_real)v[i];
    if (n) *n = count;
    free(v);
    return r;
}

static double meta(const stx_file *f, const char *key, double otherwise) {
    const char *s = stx_file_meta(f, key);
    return s ? atof(s) : otherwise;
}

/* Returns the integers of an entry, or NULL if the file has no such entry. The caller
   frees them. */
static int32_t *integers(const stx_file *f, const char *name, size_t *n) {
    const stx_entry *e = stx_file_find(f, name);
    int64_t *v;
    int32_t *w;
    size_t i;
    if (n) *n = e ? e->count : 0;
    if (!e) return NULL;
    v = (int64_t *)malloc((e->count + 1) * sizeof *v);
    w = (int32_t *)malloc((e->count + 1) * sizeof *w);
    stx_entry_get_i64(e, v, e->count);
    for (i = 0; i < e->count; i++) w[i] = (int32_t)v[i];
    free(v);
    return w;
}

static inline double need(const stx_file *f, const char *key) {
    CHECK(stx_file_meta(f, key) != NULL, "no metadata %s", key);
    return meta(f, key, 0);
}

/* Parses at most `most` numbers of a text such as "5,5,3", and returns how many it
   found. s may be NULL. */
static inline size_t list_of(const char *s, size_t *v, size_t most) {
    size_t n = 0;
    for (; s && *s && n < most; s += strcspn(s, ","), s += *s == ',') v[n++] = (size_t)atol(s);
    return n;
}

/* Returns the index of text s in `names`, a list that ends with NULL. s is the value of
   metadata `key`; if it is NULL or not in the list, a check fails. */
static inline int index_of(const char *s, const char *key, const char *const *names) {
    int i;
    for (i = 0; s && names[i]; i++)
        if (!strcmp(s, names[i])) return i;
    CHECK(0, "%s is %s", key, s ? s : "missing");
    return 0;
}

/* Returns the index of metadata `key`'s value in `names`. */
static inline int choice(const stx_file *f, const char *key, const char *const *names) {
    return index_of(stx_file_meta(f, key), key, names);
}

/* Returns the tokens of entry "WHAT.S" with B rows, or NULL if the file has no such
   entry. negate: exchanges 0 and 1, because the file's masks mark tokens that exist,
   whereas the library's pads mark those that do not. */
static inline stx_ids *step_ids(stx_ctx *x, const stx_file *f, const char *what, size_t s, size_t B,
                                int negate) {
    char key[64];
    size_t n, i;
    int32_t *v;
    stx_ids *t;
    snprintf(key, sizeof key, "%s.%zu", what, s);
    v = integers(f, key, &n);
    for (i = 0; v && negate && i < n; i++) v[i] = !v[i];
    t = v ? stx_tokens(x, v, B, n / B) : NULL;
    free(v);
    return t;
}

/* Compares n elements of a context with an entry. The largest difference must be at
   most tol times the largest magnitude in the entry, or tol times floor_ if that is
   larger. */
static void same_as(stx_ctx *x, const stx_file *f, const char *what, const char *name,
                    const stx_real *have, size_t n, double tol, double floor_) {
    size_t m;
    double *expected = entry(f, name, &m), *got, e;
    CHECK(expected && m == n && have, "%s %s: %zu values, %zu in the file", what, name, n, m);
    if (!expected || m != n || !have) {
        free(expected);
        return;
    }
    got = doubles_of(x, have, n);
    e = test_error(got, expected, n, floor_);
    CHECK(e <= tol, "%s %s: error %g", what, name, e);
    free(got);
    free(expected);
}

/* Compares the gradients of all parameters with the entries "PREFIXname". */
static inline void same_grads(stx_ctx *x, const stx_file *f, const char *what, const char *prefix,
                              const stx_params *p, double tol, double floor_) {
    char key[160];
    size_t i;
    for (i = 0; i < p->count; i++) {
        snprintf(key, sizeof key, "%s%s", prefix, p->name[i]);
        same_as(x, f, what, key, p->tensor[i]->grad, p->tensor[i]->size, tol, floor_);
    }
}

/* Compares all parameters with the entries "final.name". */
static inline void same_finals(stx_ctx *x, const stx_file *f, const char *what,
                               const stx_params *p, double tol, double floor_) {
    char key[160];
    size_t i;
    for (i = 0; i < p->count; i++) {
        snprintf(key, sizeof key, "final.%s", p->name[i]);
        same_as(x, f, what, key, p->tensor[i]->data, p->tensor[i]->size, tol, floor_);
    }
}
#endif
