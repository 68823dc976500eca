/* golden.h - reads the golden vectors of tests/golden. Include it after a header of the
   library and test.h. */
#ifndef STX_TEST_GOLDEN_H
#define STX_TEST_GOLDEN_H

static const char *dir = "tests/golden";

#ifndef GOLDEN_DEVICE /* STX_CUDA: the same vectors on the GPU */
  #define GOLDEN_DEVICE STX_CPU
#endif

/* On a GPU the number of threads has no effect and recomputation runs the same kernels,
   so some cases run on the CPU only. */
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

/* A host copy of n elements of a context; the caller frees it */
static inline stx_real *host_of(stx_ctx *x, const stx_real *p, size_t n) {
    stx_real *h = (stx_real *)malloc((n + 1) * sizeof *h);
    stx_download(x, h, p, n);
    return h;
}

/* Writes n doubles to elements of a context. */
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

/* The values of an entry, which the caller frees; NULL if the file has no such entry */
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

/* A number of the metadata, or `otherwise` if the file has no such key */
static double meta(const stx_file *f, const char *key, double otherwise) {
    const char *s = stx_file_meta(f, key);
    return s ? atof(s) : otherwise;
}

/* The integers of an entry, which the caller frees; NULL if the file has no such entry */
static int32_t *integers(const stx_file *f, const char *name, size_t *n) {
    const stx_entry *e = stx_file_find(f, name);
    int64_t *v;
    int32_t *w;
    size_t i;
    *n = e ? e->count : 0;
    if (!e) return NULL;
    v = (int64_t *)malloc((e->count + 1) * sizeof *v);
    w = (int32_t *)malloc((e->count + 1) * sizeof *w);
    stx_entry_get_i64(e, v, e->count);
    for (i = 0; i < e->count; i++) w[i] = (int32_t)v[i];
    free(v);
    return w;
}

/* A number that the metadata must contain */
static inline double need(const stx_file *f, const char *key) {
    CHECK(stx_file_meta(f, key) != NULL, "no metadata %s", key);
    return meta(f, key, 0);
}

/* `have` equals the entry, within tol times the entry's largest value, or times floor_ if
   all are smaller. */
static void same_as(stx_ctx *x, const stx_file *f, const char *what, const char *name,
                    const stx_real *have, size_t n, double tol, double floor_) {
    size_t m, i;
    double *want = entry(f, name, &m), *got, e;
    stx_real *host;
    CHECK(want && m == n && have, "%s %s: %zu values, %zu in the file", what, name, n, m);
    if (!want || m != n || !have) {
        free(want);
        return;
    }
    got = (double *)malloc((n + 1) * sizeof *got);
    host = host_of(x, have, n);
    for (i = 0; i < n; i++) got[i] = (double)host[i];
    free(host);
    e = test_error(got, want, n, floor_);
    CHECK(e <= tol, "%s %s: error %g", what, name, e);
    free(got);
    free(want);
}
#endif
