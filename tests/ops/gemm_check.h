/* gemm_check.h - compares stx_gemm with stx_gemm_plain, in the real type of the build,
   for all kernels that this processor can run. `one` and `many` are contexts with one
   thread and with several threads, whose results must be bit-identical. In f32, those of
   all kernels must be, too. */
#ifndef STX_GEMM_CHECK_H
#define STX_GEMM_CHECK_H
#include "../inner/inner.h"
#include "../values.h"

/* With sanitizers (TEST_AMX_EMULATED), only half of the cases run, in a pattern that
   keeps each size and each layout. One element in seven is compared, because sanitizers
   make stx_gemm_plain slow. The other builds compare all elements of all cases. */
#ifdef TEST_AMX_EMULATED
enum { GEMM_HALF = 1, GEMM_EACH = 7 };
#else
enum { GEMM_HALF = 0, GEMM_EACH = 1 };
#endif


/* Returns whether this library computes x's GEMMs. Another library need not
   be bit-exact. */
static int gemm_own(const stx_ctx *x) {
    return !x || !strcmp(stx_backend(x), inner_name(x));
}

static struct {
    inner_kernel list[INNER_F32S];
    size_t count; /* 0: a case runs once, with the kernels of its contexts */
    int poison;   /* whether the scratch memory is filled with NaN before each GEMM */
} gemm_kernels;

/* One GEMM or a batch: C before it, the results of stx_gemm_plain, and C as the first
   kernel computed it with one thread. */
typedef struct gemm_data {
    stx_gemm_args g;
    stx_real *C0, *first, *C1, *C3;
    double *want;
    size_t nc;
} gemm_data;

/* Returns whether element (i,j) of each matrix is compared with stx_gemm_plain. */
static int gemm_compared(const stx_gemm_args *g, size_t i, size_t j) {
    return (i + j) % GEMM_EACH == 0 || i + 1 == g->M || j + 1 == g->N;
}

/* Computes what is expected. It is the same for all kernels. */
static void gemm_expect(gemm_data *d) {
    const stx_gemm_args *g = &d->g;
    double *to = d->want;
    size_t e, i, j;
    for (e = 0; e < g->batch; e++)
        for (i = 0; i < g->M; i++)
            for (j = 0; j < g->N; j++, to++) {
                if (!gemm_compared(g, i, j)) continue;
                *to = (double)g->alpha * stx_gemm_plain(g, e, i, j);
                if (g->beta == 0) continue;
                *to += (double)g->beta * (double)d->C0[e * g->sc + i * g->ldc + j];
            }
}

/* Computes the case with the k-th kernel. The gaps between rows and between matrices must
   stay unchanged. An element of C is a sum of K products that are less than 1 in
   magnitude. Rounding changes it by at most K u times the sum of these magnitudes (u is
   the unit roundoff), and by about sqrt(K) u in practice. A tolerance of 2 (K + 4) u is
   safe, and far below the effect of a missing or repeated term. */
static int gemm_by_kernel(stx_ctx *one, stx_ctx *many, const gemm_data *d, size_t k) {
    const inner_kernel *kernel = gemm_kernels.count ? gemm_kernels.list + k : NULL;
    const double unit = sizeof(stx_real) == 8 ? 1.2e-16 : 6e-8, *want = d->want;
    stx_gemm_args g = d->g;
    const double bound = 2 * unit * ((double)g.K + 4)
                         * (fabs((double)g.alpha) + fabs((double)g.beta) + 1);
    char what[200];
    size_t e, i, j, wrong = 0, gaps = 0;
    int same_threads, same_kernels;
    snprintf(what, sizeof what,
             "kernel \"%s\", batch %zu ta %d tb %d M %zu N %zu K %zu alpha %g beta %g gap %zu",
             kernel ? kernel->name : "of the context", g.batch, g.ta, g.tb, g.M, g.N, g.K,
             (double)g.alpha, (double)g.beta, g.ldc - g.N);
    if (kernel) {
        inner_use(one, kernel);
        inner_use(many, kernel);
    }
    if (gemm_kernels.poison) {
        inner_poison(one);
        inner_poison(many);
    }
    memcpy(d->C1, d->C0, d->nc * sizeof *d->C1);
    memcpy(d->C3, d->C0, d->nc * sizeof *d->C3);
    g.C = d->C1;
    stx_gemm(one, &g);
    g.C = d->C3;
    stx_gemm(many, &g);
    same_threads = !gemm_own(many) || !memcmp(d->C1, d->C3, d->nc * sizeof *d->C1);
    if (!k) memcpy(d->first, d->C1, d->nc * sizeof *d->C1);
    same_kernels = sizeof(stx_real) == 8 || !gemm_own(many)
                   || !memcmp(d->C1, d->first, d->nc * sizeof *d->C1);
    for (e = 0; e < g.batch; e++)
        for (i = 0; i < g.M; i++)
            for (j = 0; j < g.N; j++, want++) {
                size_t at = e * g.sc + i * g.ldc + j;
                if (gemm_compared(&g, i, j)) wrong += !(fabs((double)d->C1[at] - *want) <= bound);
                d->C1[at] = d->C0[at]; /* only the gaps remain to be compared */
            }
    gaps = memcmp(d->C0, d->C1, d->nc * sizeof *d->C1) != 0;
    CHECK(!wrong && !gaps, "gemm, %s: %zu elements are wrong%s", what, wrong,
          gaps ? ", and a gap is written" : "");
    CHECK(same_threads, "gemm, %s: the number of threads changes bits", what);
    CHECK(same_kernels, "gemm, %s: other bits than those of the first kernel", what);
    return !wrong && !gaps;
}

/* Checks one GEMM or a batch with all kernels. */
static int gemm_case(stx_ctx *one, stx_ctx *many, size_t batch, int ta, int tb, size_t M, size_t N,
                     size_t K, double alpha, double beta, size_t gap) {
    size_t ar = ta ? K : M, ac = ta ? M : K, br = tb ? N : K, bc = tb ? K : N, e, i, j;
    size_t lda = ac + gap, ldb = bc + gap, ldc = N + gap;
    size_t sa = ar * lda + gap, sb = gap % 2 ? 0 : br * ldb + gap, sc = M * ldc + gap;
    size_t nc = batch * sc, bytes = (nc + 1) * sizeof(stx_real);
    stx_real *A = random_values(batch * sa), *B = random_values(br * ldb + batch * sb);
    gemm_data d;
    int good = 1;
    d.nc = nc;
    d.C0 = random_values(nc);
    d.first = (stx_real *)malloc(bytes);
    d.C1 = (stx_real *)malloc(bytes);
    d.C3 = (stx_real *)malloc(bytes);
    d.want = (double *)malloc((batch * M * N + 1) * sizeof *d.want);
    d.g = stx_gemm_init(ta, tb, M, N, K, A, B, d.C1);
    d.g.batch = batch;
    d.g.alpha = (stx_real)alpha;
    d.g.beta = (stx_real)beta;
    d.g.lda = lda;
    d.g.sa = sa;
    d.g.ldb = ldb;
    d.g.sb = sb;
    d.g.ldc = ldc;
    d.g.sc = sc;
    gemm_expect(&d);
    if (beta == 0) /* C must be overwritten, even if it is NaN */
        for (e = 0; e < batch; e++)
            for (i = 0; i < M; i++)
                for (j = 0; j < N; j++) d.C0[e * sc + i * ldc + j] = (stx_real)NAN;
    for (e = 0; e == 0 || e < gemm_kernels.count; e++)
        good = gemm_by_kernel(one, many, &d, e) && good;
    free(A);
    free(B);
    free(d.C0);
    free(d.first);
    free(d.C1);
    free(d.C3);
    free(d.want);
    return good;
}

/* Kernels may copy rows whose stride is a multiple of 4096 bytes. The result must be
   bit-identical to that for a dense A. */
static void gemm_stride(stx_ctx *x, size_t M, size_t N, size_t K, int tb) {
    size_t lda = (K + 1023) / 1024 * 1024, i, bad = 0;
    stx_real *A = random_values(M * lda), *dense = random_values(M * K);
    stx_real *B = random_values(N * K), *C = random_values(M * N), *expected = random_values(M * N);
    stx_gemm_args g = stx_gemm_init(0, tb, M, N, K, A, B, C);
    for (i = 0; i < M; i++) memcpy(dense + i * K, A + i * lda, K * sizeof *dense);
    g.lda = lda;
    stx_gemm(x, &g);
    g = stx_gemm_init(0, tb, M, N, K, dense, B, expected);
    stx_gemm(x, &g);
    for (i = 0; i < M * N; i++) bad += memcmp(C + i, expected + i, sizeof *C) != 0;
    if (gemm_own(x))
        CHECK(!bad, "gemm M %zu N %zu K %zu tb %d: %zu elements depend on the row stride of A", M,
              N, K, tb, bad);
    free(A);
    free(dense);
    free(B);
    free(C);
    free(expected);
}

typedef struct gemm_shape {
    size_t M, N, K;
} gemm_shape;

static const double gemm_scales[][2] = {{1, 0}, {1, 1}, {0.5, -2}, {-1, 0},
                                        {0, 1}, {0, 0}, {2, 0.25}};

/* Checks all transposes of a list of shapes. *turn selects alpha, beta, batch and gap. */
static void gemm_shapes(stx_ctx *one, stx_ctx *many, const gemm_shape *s, size_t n, int half,
                        size_t *turn) {
    size_t i;
    int t;
    for (i = 0; i < n; i++)
        for (t = 0; t < 4; t++, (*turn)++) {
            const double *scale = gemm_scales[*turn % 7];
            if (half && (i + (size_t)t) % 2) continue;
            gemm_case(one, many, 1 + *turn % 2, t & 1, t >> 1, s[i].M, s[i].N, s[i].K, scale[0],
                      scale[1], *turn % 3);
        }
}

static void gemm_small(stx_ctx *one, stx_ctx *many, size_t *turn) {
    static const size_t size[] = {1, 2, 3, 4, 5, 6, 7, 9, 15, 17, 31, 40};
    size_t i, j, k, n = sizeof size / sizeof *size;
    int t;
    for (i = 0; i < n; i++)
        for (j = 0; j < n; j++)
            for (k = 0; k < n; k++)
                for (t = 0; t < 4; t++, (*turn)++) {
                    const double *scale = gemm_scales[*turn % 7];
                    if (GEMM_HALF && (i + j + k + (size_t)t) % 2) continue;
                    gemm_case(one, many, 1 + *turn % 3, t & 1, t >> 1, size[i], size[j], size[k],
                              scale[0], scale[1], *turn % 5 % 3);
                }
}

/* Checks shapes for which the library has special cases. */
static void gemm_large(stx_ctx *one, stx_ctx *many, size_t *turn) {
    /* Shapes that exceed the blocks of K (448), of N (877 at the largest K, half of
       that with several threads) and of M (112). Shapes with few rows, for which
       nothing is packed and a long K is split. Shapes that leave a thin remainder for
       the last thread. */
    static const gemm_shape blocks[] = {
        {170, 257, 385}, {337, 33, 400}, {17, 17, 401}, {29, 29, 390}, {43, 31, 771},
        {1, 300, 500}, {3, 513, 390}, {400, 2, 385}, {169, 259, 97}, {65, 600, 31},
        {4, 1030, 64}, {85, 85, 65}, {113, 870, 449}, {20, 1000, 448}, {3, 70, 255},
        {1, 64, 256}};
    int t;
    gemm_shapes(one, many, blocks, sizeof blocks / sizeof *blocks, GEMM_HALF, turn);
    for (t = 0; t < 4; t++, (*turn)++) { /* row strides that are multiples of 4096 bytes */
        gemm_case(one, many, 1 + *turn % 2, t & 1, t >> 1, 183, 97, 1024, 1, t & 1, 0);
        gemm_case(one, many, 1, t & 1, t >> 1, 1024, 371, 50, -1, 0, 0);
        gemm_case(one, many, 2, t & 1, t >> 1, 31, 70, 2048, 0.5, 1, 0);
    }
    /* Cases in which the threads pack B together, B has more than one block, and a
       batch shares one B. */
    for (t = 0; t < 4; t++, (*turn)++) {
        gemm_case(one, many, 1, t & 1, t >> 1, 521, 301, 500, t & 1 ? 1 : 0.5, t & 1, *turn % 3);
        gemm_case(one, many, 2, t & 1, t >> 1, 30, 1003, 448, 1, t & 1 ? -2 : 0, 1);
    }
}

/* Checks skinny matrices: x W^T with few rows or few columns, and the gradients of
   narrow weights. */
static void gemm_skinny(stx_ctx *one, stx_ctx *many, size_t *turn) {
    static const gemm_shape rows[] = {
        {4, 37, 300}, {5, 1, 257}, {6, 70, 2048}, {7, 34, 1200}, {8, 35, 1030}, {9, 33, 915},
        {10, 3, 100}, {11, 66, 256}, {12, 31, 700}, {13, 5, 640}, {14, 131, 1171}, {14, 2, 5000},
        {15, 33, 600}, {16, 64, 512}, {19, 7, 300}, {28, 41, 1300}, {4, 5, 32}, {8, 130, 33},
        {15, 390, 1100}, {22, 259, 600}, {36, 45, 150}, {57, 70, 256}, {64, 261, 513},
        {99, 517, 512}, {112, 134, 449}, {112, 33, 450}, {112, 32, 448}, {20, 32, 200}};
    /* Few columns, which are computed in blocks as rows of a transpose. */
    static const gemm_shape columns[] = {
        {128, 16, 70}, {131, 15, 300}, {127, 8, 40}, {500, 1, 257}, {700, 3, 130},
        {260, 2, 900}, {2600, 16, 449}, {3300, 8, 33}, {5300, 7, 20}, {10300, 16, 9}};
    /* dy^T x for narrow weights, which is also computed in blocks as rows of a
       transpose. */
    static const gemm_shape gradients[] = {
        {128, 17, 40}, {131, 32, 300}, {260, 33, 900}, {700, 64, 65}, {1700, 45, 460},
        {256, 128, 128}, {257, 128, 129}, {1300, 127, 500}, {257, 64, 256}, {262, 128, 512}};
    static const double gradient_beta[4] = {0, 1, 0.5, -2};
    /* x W^T; with the last shape, one thread computes only one to three columns. */
    static const gemm_shape low[] = {
        {32, 128, 512}, {27, 137, 600}, {64, 530, 513}, {95, 997, 640}, {52, 1025, 1024},
        {33, 200, 520}, {32, 129, 512}, {82, 194, 804}, {89, 195, 1001}};
    static const double low_beta[3] = {0, 1, 0.5};
    const gemm_shape *s;
    size_t i;
    int t;
    gemm_kernels.poison = 1;
    for (i = 0; i < sizeof rows / sizeof *rows; i++, (*turn)++) {
        s = &rows[i];
        gemm_case(one, many, 1 + *turn % 2, 0, 1, s->M, s->N, s->K, 1, (double)(*turn % 2),
                  *turn % 3);
    }
    gemm_shapes(one, many, columns, sizeof columns / sizeof *columns, 0, turn);
    gemm_kernels.poison = 0;
    for (i = 0; i < sizeof gradients / sizeof *gradients; i++)
        for (t = 0; t < 4; t++, (*turn)++) {
            s = &gradients[i];
            gemm_case(one, many, 1 + *turn % 2, 1, 0, s->M, s->N, s->K, 1, gradient_beta[t],
                      *turn % 3);
        }
    for (i = 0; i < sizeof low / sizeof *low; i++)
        for (t = 0; t < 3; t++, (*turn)++) {
            s = &low[i];
            gemm_case(one, many, 1 + *turn % 2, 0, 1, s->M, s->N, s->K, 1, low_beta[t], *turn % 3);
        }
}

/* Checks all shapes. another: whether another library computes the GEMMs, with its one
   kernel. */
static void gemm_check(stx_ctx *one, stx_ctx *many, int another) {
    size_t turn = 0, k;
    int t;
    gemm_kernels.count = another ? 0 : inner_kernels(0, gemm_kernels.list);
    gemm_small(one, many, &turn);
    gemm_large(one, many, &turn);
    gemm_skinny(one, many, &turn);
    for (t = 0; t < 4; t++) /* K = 0: C = beta C */
        gemm_case(one, many, 1, t & 1, t >> 1, 5, 6, 0, 1, t & 1 ? 0 : 0.5, 0);
    for (k = 0; k == 0 || k < gemm_kernels.count; k++) {
        if (gemm_kernels.count) {
            inner_use(one, gemm_kernels.list + k);
            inner_use(many, gemm_kernels.list + k);
        }
        for (t = 0; t < 2; t++) {
            gemm_stride(one, 199, 365, 1000, t);
            gemm_stride(many, 57, 33, 770, t);
            gemm_stride(many, 14, 5, 2040, t);
        }
    }
    gemm_kernels.count = 0;
}
#endif
