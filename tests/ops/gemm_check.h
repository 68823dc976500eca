/* gemm_check.h - compares stx_gemm with stx_gemm_plain, in the real type of the build.
   Shared by test_grad.c (double) and test_api.c (float). `one` and `many` are contexts
   with one thread and with several threads, whose results must be bit-identical. */
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

/* Checks one GEMM or a batch. The gaps between rows and between matrices must stay
   unchanged. An element of C is a sum of K products that are less than 1 in magnitude.
   Rounding changes it by at most K u times the sum of these magnitudes (u is the unit
   roundoff), and by about sqrt(K) u in practice. A tolerance of 2 (K + 4) u is safe,
   and far below the effect of a missing or repeated term. */
static int gemm_case(stx_ctx *one, stx_ctx *many, size_t batch, int ta, int tb, size_t M, size_t N,
                     size_t K, double alpha, double beta, size_t gap) {
    size_t ar = ta ? K : M, ac = ta ? M : K, br = tb ? N : K, bc = tb ? K : N;
    size_t lda = ac + gap, ldb = bc + gap, ldc = N + gap, e, i, j;
    size_t sa = ar * lda + gap, sb = gap % 2 ? 0 : br * ldb + gap, sc = M * ldc + gap;
    size_t nc = batch * sc;
    stx_real *A = random_values(batch * sa), *B = random_values(br * ldb + batch * sb);
    stx_real *C0 = random_values(nc);
    stx_real *C1 = (stx_real *)malloc((nc + 1) * sizeof *C1);
    stx_real *C3 = (stx_real *)malloc((nc + 1) * sizeof *C3);
    double unit = sizeof(stx_real) == 8 ? 1.2e-16 : 6e-8;
    double bound = 2 * unit * ((double)K + 4) * (fabs(alpha) + fabs(beta) + 1);
    stx_gemm_args g = stx_gemm_init(ta, tb, M, N, K, A, B, C1);
    int good = 1;
    g.batch = batch;
    g.alpha = (stx_real)alpha;
    g.beta = (stx_real)beta;
    g.lda = lda;
    g.sa = sa;
    g.ldb = ldb;
    g.sb = sb;
    g.ldc = ldc;
    g.sc = sc;
    if (beta == 0) /* C must be overwritten, even if it is NaN */
        for (e = 0; e < batch; e++)
            for (i = 0; i < M; i++)
                for (j = 0; j < N; j++) C0[e * sc + i * ldc + j] = (stx_real)NAN;
    memcpy(C1, C0, nc * sizeof *C1);
    memcpy(C3, C0, nc * sizeof *C3);
    stx_gemm(one, &g);
    g.C = C3;
    stx_gemm(many, &g);
    for (e = 0; e < batch && good; e++)
        for (i = 0; i < M && good; i++)
            for (j = 0; j < N; j++) {
                size_t at = e * sc + i * ldc + j;
                if ((i + j) % GEMM_EACH == 0 || i + 1 == M || j + 1 == N) {
                    double s = stx_gemm_plain(&g, e, i, j);
                    s = alpha * s + (beta == 0 ? 0 : beta * (double)C0[at]);
                    if (!(fabs((double)C1[at] - s) <= bound)) {
                        good = 0;
                        break;
                    }
                }
                C0[at] = C1[at]; /* only the gaps remain to be compared */
            }
    if (good && memcmp(C0, C1, nc * sizeof *C1)) good = 0; /* a gap was written */
    CHECK(good, "gemm batch %zu ta %d tb %d M %zu N %zu K %zu alpha %g beta %g gap %zu", batch, ta,
          tb, M, N, K, alpha, beta, gap);
    CHECK(!gemm_own(many) || !memcmp(C1, C3, nc * sizeof *C1),
          "the number of threads changes bits: "
          "batch %zu ta %d tb %d M %zu N %zu K %zu alpha %g beta %g",
          batch, ta, tb, M, N, K, alpha, beta);
    free(A);
    free(B);
    free(C0);
    free(C1);
    free(C3);
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
    for (i = 0; i < sizeof rows / sizeof *rows; i++, (*turn)++) {
        s = &rows[i];
        inner_poison(one);
        inner_poison(many);
        gemm_case(one, many, 1 + *turn % 2, 0, 1, s->M, s->N, s->K, 1, (double)(*turn % 2),
                  *turn % 3);
    }
    for (i = 0; i < sizeof columns / sizeof *columns; i++) {
        inner_poison(one);
        inner_poison(many);
        gemm_shapes(one, many, &columns[i], 1, 0, turn);
    }
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

static void gemm_check(stx_ctx *one, stx_ctx *many) {
    size_t turn = 0;
    int t;
    gemm_small(one, many, &turn);
    gemm_large(one, many, &turn);
    gemm_skinny(one, many, &turn);
    for (t = 0; t < 2; t++) {
        gemm_stride(one, 199, 365, 1000, t);
        gemm_stride(many, 57, 33, 770, t);
        gemm_stride(many, 14, 5, 2040, t);
    }
    for (t = 0; t < 4; t++) /* K = 0: C = beta C */
        gemm_case(one, many, 1, t & 1, t >> 1, 5, 6, 0, 1, t & 1 ? 0 : 0.5, 0);
}
#endif
