/* gemm_peers.h - whom bench.c compares stx_gemm with, in one process: a CBLAS, MKL,
   oneDNN. Each is optional. Included after the library and cpu.h.

   CBLAS   linked (-DBENCH_CBLAS); OpenBLAS is told its threads.
   MKL     loaded by dlopen from a file that has sgemm_ and MKL_Set_Num_Threads_Local: PyTorch's libtorch_cpu.so, which holds one, or
           libmkl_rt. On AMD processors a file with mkl_serv_intel_cpu_true is loaded
           before it.
   oneDNN  linked (-DBENCH_DNNL), 2.x or 3.x: its matmul primitive, made once for each product. Its threads are those of OpenMP. */
#ifndef BENCH_GEMM_PEERS_H
#define BENCH_GEMM_PEERS_H
#include <dlfcn.h>
#ifdef BENCH_DNNL
  #include <dnnl.h>
#endif

/* op(A) (M,K) op(B) (K,N): A is (K,M) if ta, B is (N,K) if tb */
typedef struct {
    char name[40];
    const char *of; /* the model it comes from */
    int ta, tb;
    size_t M, N, K;
    int one_thread, asked; /* asked: counts in the last lines */
} product;


// >>CBLAS

#ifdef BENCH_CBLAS
static void cblas_product(const product *p, const stx_real *A, const stx_real *B, stx_real *C) {
    cblas_sgemm(CblasRowMajor, p->ta ? CblasTrans : CblasNoTrans, p->tb ? CblasTrans : CblasNoTrans,
                (int)p->M, (int)p->N, (int)p->K, 1, A, (int)(p->ta ? p->M : p->K), B,
                (int)(p->tb ? p->K : p->N), 0, C, (int)p->N);
}

/* Is the linked CBLAS a contender? The reference BLAS is not: it is a hundred times
   slower, and its rows would take hours. */
static double cblas_rate(void) {
    static const product p = {"", "", 0, 0, 256, 256, 256, 0, 0};
    stx_real *a = (stx_real *)malloc(3 * 65536 * sizeof *a);
    double best = 0;
    int i;
    if (!a) die("no memory");
    fill_random(a, 3 * 65536, 1);
    for (i = 0; i < 3; i++) {
        double t = seconds(), r;
        cblas_product(&p, a, a + 65536, a + 2 * 65536);
        cblas_product(&p, a, a + 65536, a + 2 * 65536);
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
    return rate >= 12 ? 0 : 1;
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

/* to: where the function's address goes */
static void *symbol(void *from, const char *name, void *to) {
    void *at = from ? dlsym(from, name) : NULL;
    memcpy(to, &at, sizeof at);
    return at;
}

/* 1 if it is there; else mkl.name says why not. `amd` (or NULL) defines
   mkl_serv_intel_cpu_true, and is found before MKL's own. */
static int mkl_open(const char *path, const char *amd) {
    void (*version)(char *to, int room);
    void *lib;
    const char *base;
    size_t n;
    if (amd && !dlopen(amd, RTLD_NOW | RTLD_GLOBAL)) fprintf(stderr, "bench: %s\n", dlerror());
    /* libmkl_rt: one OpenMP in the process, that of oneDNN */
    setenv("MKL_THREADING_LAYER", "GNU", 0);
    lib = dlopen(path, RTLD_LAZY | RTLD_LOCAL);
    if (!lib) {
        snprintf(mkl.name, sizeof mkl.name, "%.190s", dlerror());
        return 0;
    }
    if (!symbol(lib, "sgemm_", &mkl.sgemm)
        || !symbol(lib, "MKL_Set_Num_Threads_Local", &mkl.threads)) {
        mkl.sgemm = NULL;
        snprintf(mkl.name, sizeof mkl.name, "%.150s holds no MKL", path);
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

/* Rows by rows is columns by columns of the transposed: C^T = op(B)^T op(A)^T */
static void mkl_product(const product *p, const stx_real *A, const stx_real *B, stx_real *C) {
    int m = (int)p->N, n = (int)p->M, k = (int)p->K, lda = (int)(p->tb ? p->K : p->N),
        ldb = (int)(p->ta ? p->M : p->K);
    float one = 1, zero = 0;
    mkl.sgemm(p->tb ? "T" : "N", p->ta ? "T" : "N", &m, &n, &k, &one, B, &lda, A, &ldb, &zero, C,
              &m);
}

static int mkl_check(void) {
    static const product p = {"", "", 0, 1, 1024, 1024, 256, 0, 0};
    size_t i, n = 1024 * 1024;
    stx_real *a = (stx_real *)malloc(3 * n * sizeof *a);
    double best = 0;
    if (!a) die("no memory");
    fill_random(a, 2 * n, 1);
    mkl.threads(1);
    for (i = 0; i < 6; i++) {
        double t = seconds(), r;
        mkl_product(&p, a, a + n, a + 2 * n);
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
    /* NULL: not an OpenMP's; then it is measured beside all threads only */
    void (*threads)(int n);
    char name[200];
    dnnl_engine_t engine;
    dnnl_stream_t stream;
    void *packed[2]; /* factors as a primitive wants them, of the product that runs */
    size_t room;
} onednn;

  #if DNNL_VERSION_MAJOR >= 3
typedef const_dnnl_memory_desc_t dnnl_layout;
    #define BENCH_LAYOUT(md) (md)
  #else
typedef const dnnl_memory_desc_t *dnnl_layout;
    #define BENCH_LAYOUT(md) (&(md))
  #endif
typedef struct {
    /* pack: NULL where the primitive takes the caller's floats as they are */
    dnnl_primitive_t run, pack[2];
    dnnl_memory_t in[2], packed[2], out;
} dnnl_plan;

/* A product by oneDNN, f32 or bf16: of[0] takes factors laid out as the caller's,
   of[1] as the primitive likes them best. What rounds or packs them is a reorder
   primitive, in its time. best: which is faster. */
typedef struct {
    dnnl_plan of[2];
    int best;
} dnnl_pair;

static int dnnl_good(dnnl_status_t s) {
    return s == dnnl_success;
}

/* Layout of A (0), B (1) or C (2) */
static int dnnl_describe(dnnl_memory_desc_t *md, const product *p, int i, dnnl_data_type_t type,
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

/* 0, and nothing made, when oneDNN cannot */
static int dnnl_make(dnnl_plan *d, const product *p, const stx_real *A, const stx_real *B,
                     stx_real *C, int bf16, int any) {
    dnnl_memory_desc_t from[3], want[3];
    dnnl_primitive_desc_t pd = NULL, rd;
    int i, good = 1;
    memset(d, 0, sizeof *d);
    memset(from, 0, sizeof from);
    memset(want, 0, sizeof want);
    for (i = 0; i < 3; i++) {
        good = good && dnnl_describe(&from[i], p, i, dnnl_f32, 0)
               && dnnl_describe(&want[i], p, i, bf16 && i < 2 ? dnnl_bf16 : dnnl_f32, any && i < 2);
    }
  #if DNNL_VERSION_MAJOR >= 3
    good = good
           && dnnl_good(dnnl_matmul_primitive_desc_create(&pd, onednn.engine, want[0], want[1],
                                                          NULL, want[2], NULL));
  #else
    {
        dnnl_matmul_desc_t op;
        good = good && dnnl_good(dnnl_matmul_desc_init(&op, &want[0], &want[1], NULL, &want[2]))
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
        good = dnnl_memory_desc_get_size(l) <= onednn.room
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
        if (want[i]) dnnl_memory_desc_destroy(want[i]);
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
            die("oneDNN's reorder fails");
    }
    if (!dnnl_good(dnnl_stream_wait(onednn.stream))) die("oneDNN's stream fails");
}

static void dnnl_product(const dnnl_plan *d) {
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
        die("oneDNN's product fails");
}

/* 0: oneDNN cannot. Its threads are set already. */
static int dnnl_pair_make(dnnl_pair *d, const product *p, const stx_real *A, const stx_real *B,
                          stx_real *C, int bf16) {
    double least[2] = {HUGE_VAL, HUGE_VAL};
    int any, i;
    for (any = 0; any < 2; any++) {
        dnnl_plan *k = &d->of[any];
        if (!dnnl_make(k, p, A, B, C, bf16, any)) continue;
        /* the same as the first */
        if (any && !bf16 && !k->pack[0] && !k->pack[1]) {
            dnnl_drop(k);
            continue;
        }
        for (i = 0; i < 4; i++) {
            double t = seconds();
            dnnl_pack(k);
            dnnl_product(k);
            t = seconds() - t;
            if (i && t < least[any]) least[any] = t;
        }
    }
    d->best = least[1] < least[0];
    return d->of[d->best].run != NULL;
}

static int onednn_open(size_t room) { /* room: bytes of the largest factor in float */
    const dnnl_version_t *v = dnnl_version();
    int i;
    onednn.on = dnnl_good(dnnl_engine_create(&onednn.engine, dnnl_cpu, 0))
                && dnnl_good(
                    dnnl_stream_create(&onednn.stream, onednn.engine, dnnl_stream_default_flags));
    onednn.room = room + room / 4; /* packed ones are padded */
    for (i = 0; i < 2 && onednn.on && room; i++)
        if (posix_memalign(&onednn.packed[i], 4096, onednn.room)) die("no memory");
    symbol(dlopen(NULL, RTLD_LAZY), "omp_set_num_threads", &onednn.threads);
    snprintf(onednn.name, sizeof onednn.name, "oneDNN %d.%d.%d%s", v->major, v->minor, v->patch,
             onednn.threads ? "" : ", not on OpenMP: beside all threads only");
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
