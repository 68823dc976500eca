/* test_onednn.c - the matrix product with SEQTX_ONEDNN: gemm_check with every shape
   sent to oneDNN, larger products, bf16 against rounded factors, and what must fall
   back to the built-in product. Built and run by onednn.sh. */
#define SEQTX_ONEDNN
#include "inner/seqtx.c"
#include "test.h"
#include "gemm_check.h"

static stx_ctx *context(int precision, int threads, size_t max_bytes) {
    stx_desc d;
    memset(&d, 0, sizeof d);
    d.precision = precision;
    d.threads = threads;
    d.max_bytes = max_bytes;
    return stx_create(&d);
}

static int plans(const stx_ctx *x) { /* how many products oneDNN has prepared */
    int i, n = 0;
    for (i = 0; x->dnnl && i < STX__PLANS; i++) n += x->dnnl->plan[i].run != NULL;
    return n;
}

static void round_all(stx_real *a, size_t n) {
    size_t i;
    for (i = 0; i < n; i++) {
        uint32_t b = stx__bf16(a[i]) << 16;
        memcpy(&a[i], &b, 4);
    }
}

/* C = beta C + op(A) op(B), dense, in two contexts, against double sums of the same
   factors, rounded first for bf16; sb 0: one B for the whole batch. The bound is that
   of gemm_check. Of the numbers of C one in `each` is compared: the plain sums are
   what takes the time. */
static int each = 1;

static void product(stx_ctx *one, stx_ctx *many, size_t batch, int ta, int tb, size_t M, size_t N,
                    size_t K, int beta, size_t sb) {
    size_t nc = batch * M * N, e, i, j;
    int bf16 = stx_ctx_desc(one)->precision == STX_PREC_BF16;
    stx_real *A = gemm_random(batch * M * K), *B = gemm_random(batch * K * N),
             *C0 = gemm_random(nc);
    stx_real *C1 = (stx_real *)malloc(nc * sizeof *C1), *C3 = (stx_real *)malloc(nc * sizeof *C3);
    double worst = 0, bound = 2 * 6e-8 * ((double)K + 4) * 2;
    stx_gemm_args g = stx_gemm_init(ta, tb, M, N, K, A, B, C1);
    g.batch = batch;
    g.sb = sb;
    g.beta = (stx_real)beta;
    if (!beta)
        for (i = 0; i < nc; i++) C0[i] = (stx_real)NAN;
    memcpy(C1, C0, nc * sizeof *C1);
    memcpy(C3, C0, nc * sizeof *C3);
    stx_gemm(one, &g);
    g.C = C3;
    stx_gemm(many, &g);
    if (bf16) {
        round_all(A, batch * M * K);
        round_all(B, batch * K * N);
    }
    for (e = 0; e < batch; e++)
        for (i = 0; i < M; i++)
            for (j = 0; j < N; j++) {
                size_t at = e * M * N + i * N + j;
                double s;
                if ((i + j) % (size_t)each && i + 1 < M && j + 1 < N) continue;
                s = (beta ? (double)C0[at] : 0) + stx_gemm_plain(&g, e, i, j);
                if (!(fabs((double)C1[at] - s) <= worst)) worst = fabs((double)C1[at] - s);
                if (!(fabs((double)C3[at] - s) <= worst)) worst = fabs((double)C3[at] - s);
            }
    CHECK(worst <= bound, "%s: batch %zu ta %d tb %d M %zu N %zu K %zu beta %d: %g, want %g",
          stx_backend(one), batch, ta, tb, M, N, K, beta, worst, bound);
    free(A);
    free(B);
    free(C0);
    free(C1);
    free(C3);
}

static void products(stx_ctx *one, stx_ctx *many) {
    static const size_t shape[][3] = {{128, 128, 128}, {170, 257, 385}, {337, 65, 400},
                                      {4, 1030, 640},  {400, 17, 385},  {200, 200, 1300}};
    size_t i;
    int t;
    for (i = 0; i < sizeof shape / sizeof *shape; i++)
        for (t = 0; t < 8; t++)
            product(one, many, 1, t & 1, t >> 1 & 1, shape[i][0], shape[i][1], shape[i][2], t >> 2,
                    0);
    product(one, many, 3, 0, 1, 130, 140, 150, 1, 140 * 150);
    product(one, many, 3, 0, 0, 130, 140, 150, 0, 0);
}

int main(void) {
    int precision, before, t;
    for (precision = STX_PREC_F32; precision <= STX_PREC_BF16; precision++) {
        stx_ctx *one = context(precision, 1, 0), *many = context(precision, 3, 0);
        printf("%s\n", stx_backend(many));
        if (!one->dnnl)
            printf("oneDNN has no such product for this processor: the built-in ones are tested\n");
        else
            CHECK(!strncmp(stx_backend(one), "onednn ", 7)
                      && strstr(stx_backend(one), precision ? " bf16" : " f32"),
                  "%s", stx_backend(one));
        before = plans(many);
        each = 1;
        products(one, many);
        each = 7; /* the same products again: plans that are found */
        CHECK(!many->dnnl || plans(many) > before, "oneDNN was not used");
        before = plans(many);
        products(one, many);
        CHECK(plans(many) == before, "the same shapes again, and %d prepared products become %d",
              before, plans(many));
        each = 1; /* all sizes by oneDNN */
        if (one->dnnl) one->dnnl->from = many->dnnl->from = 1;
        products(one, many);
        /* thousands of shapes: plans are given up, too */
        if (precision == STX_PREC_F32) gemm_check(one, many);
        CHECK(stx_ok(one) && stx_ok(many), "%s %s", stx_error(one), stx_error(many));
        stx_destroy(one);
        stx_destroy(many);
    }
    each = 1;
    { /* a plan that oneDNN could not make, and no memory for rounded factors: built in, and no error */
        stx_ctx *x = context(STX_PREC_F32, 1, 0),
                *full = context(STX_PREC_BF16, 1, (size_t)4 << 20);
        if (x->dnnl) {
            stx__dnnl_plan *p = stx__dnnl_find(x->dnnl, 0, 0, 130, 140, 150, 150, 140, 140);
            size_t key[7];
            memcpy(key, p->key, sizeof key);
            stx__dnnl_drop(p);
            memcpy(p->key, key, sizeof key);
            before = plans(x);
            product(x, x, 2, 0, 0, 130, 140, 150, 0, 140 * 150);
            CHECK(plans(x) == before && stx_ok(x), "%s", stx_error(x));
        }
        if (full->dnnl) full->dnnl->from = 1;
        if (full->dnnl)
            CHECK(stx_ok(full) && stx_block(full, ((size_t)4 << 20) - stx_bytes(full) - 4096), "%s",
                  stx_error(full));
        for (t = 0; t < 2; t++) product(full, full, 1, 0, t, 200, 100, 300, t, 0);
        CHECK(stx_ok(full), "%s", stx_error(full));
        stx_destroy(x);
        stx_destroy(full);
    }
#ifdef _OPENMP
    { /* the caller's own OpenMP setting stays */
        stx_ctx *x = context(STX_PREC_F32, 3, 0);
        omp_set_num_threads(2);
        product(x, x, 1, 0, 0, 130, 140, 150, 0, 0);
        CHECK(omp_get_max_threads() == 2, "%d", omp_get_max_threads());
        stx_destroy(x);
    }
#endif
    return test_end();
}
