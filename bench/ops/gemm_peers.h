/* gemm_peers.h - the peers of stx_gemm in bench.c, within one process: a CBLAS, MKL and
   oneDNN. Each is optional. Include this file after the library and cpu.h.

   CBLAS   linked (-DBENCH_CBLAS). The number of threads is set for OpenBLAS only.
   MKL     loaded by dlopen from a file with sgemm_ and MKL_Set_Num_Threads_Local:
           PyTorch's libtorch_cpu.so, which contains MKL, or libmkl_rt. On AMD processors,
           a file with mkl_serv_intel_cpu_true is loaded first.
   oneDNN  linked (-DBENCH_DNNL), 2.x or 3.x. Its matmul primitive is created once per
           shape and uses the threads of OpenMP. */
#ifndef BENCH_GEMM_PEERS_H
#define BENCH_GEMM_PEERS_H
#include <dlfcn.h>
#ifdef BENCH_DNNL
  #include <dnnl.h>
#endif

/* A matmul op(A) (M,K) op(B) (K,N). If ta, A is (K,M); if tb, B is (N,K). */
typedef struct {
    char name[40];
    const char *of; /* the model that it belongs to */
    int ta, tb;
    size_t M, N, K;
    int one_thread, counted; /* one_thread: 1 if timed with one thread only; counted: 1
                                if included in the ratios below the table */
} matmul;


// >>CBLAS

#ifdef BENCH_CBLAS
static void cblas_matmul(const matmul *p, const stx_real *A, const stx_real *B, stx_real *C) {
    cblas_sgemm(CblasRowMajor, p->ta ? CblasTrans : CblasNoTrans, p->tb ? CblasTrans : CblasNoTrans,
                (int)p->M, (int)p->N, (int)p->K, 1, A, (int)(p->ta ? p->M : p->K), B,
                (int)(p->tb ? p->K : p->N), 0, C, (int)p->N);
}

/* The linked CBLAS is a contender only if it reaches this many GFLOP/s. This excludes the
   reference BLAS, which is a hundred times slower, so that its rows would take hours. */
enum { CBLAS_LEAST = 12 };

static double cblas_rate(void) {
    static const matmul p = {"", "", 0, 0, 256, 256, 256, 0, 0};
    stx_real *a = (stx_real *)malloc(3 * 65536 * sizeof *a);
    double best = 0;
    int i;
    if (!a) die("out of memory");
    fill_random(a, 3 * 65536, 1);
    for (i = 0; i < 3; i++) {
        double t = seconds(), r;
        cblas_matmul(&p, a, a + 65536, a + 2 * 65536);
        cblas_matmul(&p, a, a + 65536, a + 2 * 65536);
        r = 4.0 * 256 * 256 * 256 / (seconds() - t) * 1e-9;
        if (r > best) best = r;
    }
    free(a);
    return best;
}

static int cblas_check(void) {
    double rate = cblas_rate();
    if (openblas_get_config && openblas_get_corename)
        printf("%s, kernels for %s, ", openblas_get_config(), openblas_get_corename());
    else
        printf("a CBLAS that is not OpenBLAS, ");
    printf("%.0f GFLOP/s at 256\n", rate);
    return rate >= CBLAS_LEAST ? 0 : 1;
}
#endif


// >>MKL

typedef void (*sgemm_fn)(const char *ta, const char *tb, const int *m, const int *n, const int *k,
                         const float *alpha, const float *a, const int *lda, const float *b,
                         const int *ldb, const float *beta, float *c, const int *ldc);

static struct {
    sgemm_fn sgemm;
    int (*threads)(int n);
    char name[200];
} mkl;

/* Returns the address of a function, or NULL. `to` points to a function pointer, which
   receives the same address. */
static void *symbol(void *from, const char *name, void *to) {
    void *at = from ? dlsym(from, name) : NULL;
    memcpy(to, &at, sizeof at);
    return at;
}

/* Returns 1 if MKL was found. Otherwise, mkl.name says why not. `amd` is NULL or a file
   whose mkl_serv_intel_cpu_true replaces MKL's function of that name. */
static int mkl_open(const char *path, const char *amd) {
    void (*version)(char *to, int size);
    void *lib;
    const char *base;
    size_t n;
    if (amd && !dlopen(amd, RTLD_NOW | RTLD_GLOBAL)) fprintf(stderr, "bench: %s\n", dlerror());
    /* makes libmkl_rt use the OpenMP runtime of oneDNN, so that the process has only
       one */
    setenv("MKL_THREADING_LAYER", "GNU", 0);
    lib = dlopen(path, RTLD_LAZY | RTLD_LOCAL);
    if (!lib) {
        snprintf(mkl.name, sizeof mkl.name, "%.190s", dlerror());
        return 0;
    }
    if (!symbol(lib, "sgemm_", &mkl.sgemm)
        || !symbol(lib, "MKL_Set_Num_Threads_Local", &mkl.threads)) {
        mkl.sgemm = NULL;
        snprintf(mkl.name, sizeof mkl.name, "%.150s does not contain MKL", path);
        return 0;
    }
    base = strrchr(path, '/');
    if (symbol(lib, "MKL_Get_Version_String", &version)
        || symbol(lib, "mkl_get_version_string", &version))
        version(mkl.name, 120);
    else
        snprintf(mkl.name, sizeof mkl.name, "MKL");
    mkl.name[119] = 0;
    for (n = strlen(mkl.name); n && mkl.name[n - 1] == ' '; n--) mkl.name[n - 1] = 0;
    snprintf(mkl.name + n, sizeof mkl.name - n, ", in %.60s", base ? base + 1 : path);
    return 1;
}

/* A row-major matrix is the transpose of a column-major one, so MKL computes
   C^T = op(B)^T op(A)^T. */
static void mkl_matmul(const matmul *p, const stx_real *A, const stx_real *B, stx_real *C) {
    int m = (int)p->N, n = (int)p->M, k = (int)p->K, lda = (int)(p->tb ? p->K : p->N),
        ldb = (int)(p->ta ? p->M : p->K);
    float one = 1, zero = 0;
    mkl.sgemm(p->tb ? "T" : "N", p->ta ? "T" : "N", &m, &n, &k, &one, B, &lda, A, &ldb, &zero, C,
              &m);
}

static int mkl_check(void) {
    static const matmul p = {"", "", 0, 1, 1024, 1024, 256, 0, 0};
    size_t i, n = 1024 * 1024;
    stx_real *a = (stx_real *)malloc(3 * n * sizeof *a);
    double best = 0;
    if (!a) die("out of memory");
    fill_random(a, 2 * n, 1);
    mkl.threads(1);
    for (i = 0; i < 6; i++) {
        double t = seconds(), r;
        mkl_matmul(&p, a, a + n, a + 2 * n);
        r = 2.0 * 1024 * 1024 * 256 / (seconds() - t) * 1e-9;
        if (r > best) best = r;
    }
    free(a);
    printf("%.0f %s\n", best, mkl.name);
    return 0;
}


// >>oneDNN

#ifdef BENCH_DNNL
static struct {
    int on;
    /* sets the number of threads; NULL if oneDNN does not use OpenMP and therefore
       takes part only in comparisons with all threads */
    void (*threads)(int n);
    char name[200];
    dnnl_engine_t engine;
    dnnl_stream_t stream;
    void *packed[2]; /* operands in the layout of the primitive that runs */
    size_t size;
} onednn;

  #if DNNL_VERSION_MAJOR >= 3
typedef const_dnnl_memory_desc_t dnnl_layout;
    #define BENCH_LAYOUT(md) (md)
  #else
typedef const dnnl_memory_desc_t *dnnl_layout;
    #define BENCH_LAYOUT(md) (&(md))
  #endif
typedef struct {
    /* pack[i]: NULL if `run` reads operand i from the caller's floats directly */
    dnnl_primitive_t run, pack[2];
    dnnl_memory_t in[2], packed[2], out;
} dnnl_plan;

/* A matmul by oneDNN in f32 or bf16. of[0] reads operands in the caller's layout, of[1]
   in the layout that the primitive prefers. Reorder primitives round or pack the
   operands, which is part of the measured time. `best` is the index of the faster
   plan. */
typedef struct {
    dnnl_plan of[2];
    int best;
} dnnl_pair;

static int dnnl_good(dnnl_status_t s) {
    return s == dnnl_success;
}

/* *md receives the layout of A (i = 0), B (i = 1) or C (i = 2). `any` is 1 if oneDNN
   may choose the layout. */
static int dnnl_describe(dnnl_memory_desc_t *md, const matmul *p, int i, dnnl_data_type_t type,
                         int any) {
    dnnl_dims_t dim, step;
    int turned = i == 0 ? p->ta : i == 1 && p->tb;
    dim[0] = (dnnl_dim_t)(i == 1 ? p->K : p->M);
    dim[1] = (dnnl_dim_t)(i == 0 ? p->K : p->N);
    step[0] = turned ? 1 : dim[1];
    step[1] = turned ? dim[0] : 1;
  #if DNNL_VERSION_MAJOR >= 3
    return dnnl_good(any ? dnnl_memory_desc_create_with_tag(md, 2, dim, type, dnnl_format_tag_any)
                         : dnnl_memory_desc_create_with_strides(md, 2, dim, type, step));
  #else
    return dnnl_good(any ? dnnl_memory_desc_init_by_tag(md, 2, dim, type, dnnl_format_tag_any)
                         : dnnl_memory_desc_init_by_strides(md, 2, dim, type, step));
  #endif
}

static void dnnl_drop(dnnl_plan *d) {
    int i;
    if (d->run) dnnl_primitive_destroy(d->run);
    if (d->out) dnnl_memory_destroy(d->out);
    for (i = 0; i < 2; i++) {
        if (d->pack[i]) dnnl_primitive_destroy(d->pack[i]);
        if (d->in[i]) dnnl_memory_destroy(d->in[i]);
        if (d->packed[i]) dnnl_memory_destroy(d->packed[i]);
    }
    memset(d, 0, sizeof *d);
}

/* Returns 0 and creates nothing if oneDNN does not support the matmul. */
static int dnnl_make(dnnl_plan *d, const matmul *p, const stx_real *A, const stx_real *B,
                     stx_real *C, int bf16, int any) {
    dnnl_memory_desc_t from[3], to[3];
    dnnl_primitive_desc_t pd = NULL, rd;
    int i, good = 1;
    memset(d, 0, sizeof *d);
    memset(from, 0, sizeof from);
    memset(to, 0, sizeof to);
    for (i = 0; i < 3; i++) {
        good = good && dnnl_describe(&from[i], p, i, dnnl_f32, 0)
               && dnnl_describe(&to[i], p, i, bf16 && i < 2 ? dnnl_bf16 : dnnl_f32, any && i < 2);
    }
  #if DNNL_VERSION_MAJOR >= 3
    good = good
           && dnnl_good(dnnl_matmul_primitive_desc_create(&pd, onednn.engine, to[0], to[1],
                                                          NULL, to[2], NULL));
  #else
    {
        dnnl_matmul_desc_t op;
        good = good && dnnl_good(dnnl_matmul_desc_init(&op, &to[0], &to[1], NULL, &to[2]))
               && dnnl_good(dnnl_primitive_desc_create(&pd, &op, NULL, onednn.engine, NULL));
    }
  #endif
    good = good && dnnl_good(dnnl_primitive_create(&d->run, pd))
           && dnnl_good(dnnl_memory_create(&d->out, BENCH_LAYOUT(from[2]), onednn.engine, C));
    for (i = 0; i < 2 && good; i++) {
        dnnl_layout l =
            dnnl_primitive_desc_query_md(pd, i ? dnnl_query_weights_md : dnnl_query_src_md, 0);
        void *at = (void *)(uintptr_t)(i ? B : A);
        good =
            l && dnnl_good(dnnl_memory_create(&d->in[i], BENCH_LAYOUT(from[i]), onednn.engine, at));
        if (!good || dnnl_memory_desc_equal(l, BENCH_LAYOUT(from[i]))) continue;
        rd = NULL;
        good = dnnl_memory_desc_get_size(l) <= onednn.size
               && dnnl_good(dnnl_memory_create(&d->packed[i], l, onednn.engine, onednn.packed[i]))
               && dnnl_good(dnnl_reorder_primitive_desc_create(&rd, BENCH_LAYOUT(from[i]),
                                                               onednn.engine, l, onednn.engine,
                                                               NULL))
               && dnnl_good(dnnl_primitive_create(&d->pack[i], rd));
        if (rd) dnnl_primitive_desc_destroy(rd);
    }
    if (pd) dnnl_primitive_desc_destroy(pd);
  #if DNNL_VERSION_MAJOR >= 3
    for (i = 0; i < 3; i++) {
        if (from[i]) dnnl_memory_desc_destroy(from[i]);
        if (to[i]) dnnl_memory_desc_destroy(to[i]);
    }
  #endif
    if (!good) dnnl_drop(d);
    return good;
}

static void dnnl_pack(const dnnl_plan *d) {
    dnnl_exec_arg_t arg[2];
    int i;
    for (i = 0; i < 2; i++) {
        if (!d->pack[i]) continue;
        arg[0].arg = DNNL_ARG_FROM;
        arg[0].memory = d->in[i];
        arg[1].arg = DNNL_ARG_TO;
        arg[1].memory = d->packed[i];
        if (!dnnl_good(dnnl_primitive_execute(d->pack[i], onednn.stream, 2, arg)))
            die("oneDNN's reorder failed");
    }
    if (!dnnl_good(dnnl_stream_wait(onednn.stream))) die("oneDNN's stream failed");
}

static void dnnl_matmul_run(const dnnl_plan *d) {
    dnnl_exec_arg_t arg[3];
    int i;
    for (i = 0; i < 2; i++) {
        arg[i].arg = i ? DNNL_ARG_WEIGHTS : DNNL_ARG_SRC;
        arg[i].memory = d->pack[i] ? d->packed[i] : d->in[i];
    }
    arg[2].arg = DNNL_ARG_DST;
    arg[2].memory = d->out;
    if (!dnnl_good(dnnl_primitive_execute(d->run, onednn.stream, 3, arg))
        || !dnnl_good(dnnl_stream_wait(onednn.stream)))
        die("oneDNN's matmul failed");
}

/* Returns 0 if oneDNN does not support the matmul. Set the number of threads first. */
static int dnnl_pair_make(dnnl_pair *d, const matmul *p, const stx_real *A, const stx_real *B,
                          stx_real *C, int bf16) {
    double least[2] = {HUGE_VAL, HUGE_VAL};
    int any, i;
    for (any = 0; any < 2; any++) {
        dnnl_plan *k = &d->of[any];
        if (!dnnl_make(k, p, A, B, C, bf16, any)) continue;
        /* this plan is identical to the first */
        if (any && !bf16 && !k->pack[0] && !k->pack[1]) {
            dnnl_drop(k);
            continue;
        }
        for (i = 0; i < 4; i++) {
            double t = seconds();
            dnnl_pack(k);
            dnnl_matmul_run(k);
            t = seconds() - t;
            if (i && t < least[any]) least[any] = t;
        }
    }
    d->best = least[1] < least[0];
    return d->of[d->best].run != NULL;
}

static int onednn_open(size_t size) { /* size: bytes of the largest operand in float */
    const dnnl_version_t *v = dnnl_version();
    int i;
    onednn.on = dnnl_good(dnnl_engine_create(&onednn.engine, dnnl_cpu, 0))
                && dnnl_good(
                    dnnl_stream_create(&onednn.stream, onednn.engine, dnnl_stream_default_flags));
    onednn.size = size + size / 4; /* packed operands are padded */
    for (i = 0; i < 2 && onednn.on && size; i++)
        if (posix_memalign(&onednn.packed[i], 4096, onednn.size)) die("out of memory");
    symbol(dlopen(NULL, RTLD_LAZY), "omp_set_num_threads", &onednn.threads);
    snprintf(onednn.name, sizeof onednn.name, "oneDNN %d.%d.%d%s", v->major, v->minor, v->patch,
             onednn.threads ? "" : ", not on OpenMP: with all threads only");
    return onednn.on;
}

static void onednn_close(void) {
    int i;
    if (onednn.stream) dnnl_stream_destroy(onednn.stream);
    if (onednn.engine) dnnl_engine_destroy(onednn.engine);
    for (i = 0; i < 2; i++) free(onednn.packed[i]);
    memset(&onednn, 0, sizeof onednn);
}
#endif
#endif
