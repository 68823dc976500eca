/* gemm_check.h - the matrix product against stx_gemm_plain, in the real type of the
   build: shared by test_grad.c (double) and test_api.c (float). one and many are
   contexts of 1 and of several threads: they must agree bit for bit. */
#ifndef STX_GEMM_CHECK_H
#define STX_GEMM_CHECK_H
#include "inner.h"

/* Under sanitizers every second case, alternating (each size and each way of storing is
   there), and of its numbers one in seven: the plain product is what takes the time
   there, and all numbers are compared without them */
#ifdef TEST_AMX_EMULATED
enum { GEMM_HALF = 1, GEMM_EACH = 7 };
#else
enum { GEMM_HALF = 0, GEMM_EACH = 1 };
#endif

static stx_real *gemm_random(size_t n) {
    stx_real *a = (stx_real *)malloc((n + 1) * sizeof *a);
    size_t i;
    for (i = 0; i < n; i++) a[i] = (stx_real)test_rand();
    return a;
}

/* Is a product of x the library's own? Another library's promises no bits. */
static int gemm_own(const stx_ctx *x) {
    return !x || !strcmp(stx_backend(x), inner_name(x));
}

/* One product, batch of them, with gaps between rows and between matrices that must
   stay as they were. A number of C is a sum of K products below 1 in size: rounding
   moves it by at most K u (u the unit roundoff) times the sum, and by about sqrt(K) u
   in fact; 2 (K + 4) u is safe and far below the effect of a lost or doubled term. */
static int gemm_case(stx_ctx *one, stx_ctx *many, size_t batch, int ta, int tb, size_t M, size_t N,
                     size_t K, double alpha, double beta, size_t gap) {
    size_t ar = ta ? K : M, ac = ta ? M : K, br = tb ? N : K, bc = tb ? K : N;
    size_t lda = ac + gap, ldb = bc + gap, ldc = N + gap, e, i, j;
    size_t sa = ar * lda + gap, sb = gap % 2 ? 0 : br * ldb + gap, sc = M * ldc + gap,
           nc = batch * sc;
    stx_real *A = gemm_random(batch * sa), *B = gemm_random(br * ldb + batch * sb),
             *C0 = gemm_random(nc);
    stx_real *C1 = (stx_real *)malloc((nc + 1) * sizeof *C1),
             *C3 = (stx_real *)malloc((nc + 1) * sizeof *C3);
    double unit = sizeof(stx_real) == 8 ? 1.2e-16 : 6e-8,
           bound = 2 * unit * ((double)K + 4) * (fabs(alpha) + fabs(beta) + 1);
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
    if (beta == 0) /* beta 0 overwrites, whatever was there */
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
                C0[at] = C1[at]; /* so that only the gaps are left to compare */
            }
    if (good && memcmp(C0, C1, nc * sizeof *C1)) good = 0; /* a gap was written */
    CHECK(good, "gemm batch %zu ta %d tb %d M %zu N %zu K %zu alpha %g beta %g gap %zu", batch, ta,
          tb, M, N, K, alpha, beta, gap);
    CHECK(!gemm_own(many) || !memcmp(C1, C3, nc * sizeof *C1),
          "threads change bits: batch %zu ta %d tb %d M %zu N %zu K %zu alpha %g beta %g", batch,
          ta, tb, M, N, K, alpha, beta);
    free(A);
    free(B);
    free(C0);
    free(C1);
    free(C3);
    return good;
}

/* Rows a multiple of 4096 bytes apart may go through a copy (which kernels make one,
   and when, is not asked): the same bits as with any other rows. */
static void gemm_same_set(stx_ctx *x, size_t M, size_t N, size_t K, int tb) {
    size_t lda = (K + 1023) / 1024 * 1024, i, bad = 0;
    stx_real *A = gemm_random(M * lda), *near = gemm_random(M * K), *B = gemm_random(N * K),
             *C = gemm_random(M * N), *want = gemm_random(M * N);
    stx_gemm_args g = stx_gemm_init(0, tb, M, N, K, A, B, C);
    for (i = 0; i < M; i++) memcpy(near + i * K, A + i * lda, K * sizeof *near);
    g.lda = lda;
    stx_gemm(x, &g);
    g = stx_gemm_init(0, tb, M, N, K, near, B, want);
    stx_gemm(x, &g);
    for (i = 0; i < M * N; i++) bad += memcmp(C + i, want + i, sizeof *C) != 0;
    if (gemm_own(x))
        CHECK(!bad,
              "gemm M %zu N %zu K %zu tb %d: %zu numbers depend on how far rows of A are apart", M,
              N, K, tb, bad);
    free(A);
    free(near);
    free(B);
    free(C);
    free(want);
}

static void gemm_check(stx_ctx *one, stx_ctx *many) {
    static const size_t small[] = {1, 2, 3, 4, 5, 6, 7, 9, 15, 17, 31, 40};
    static const double ab[][2] = {{1, 0}, {1, 1}, {0.5, -2}, {-1, 0}, {0, 1}, {0, 0}, {2, 0.25}};
    /* over the blocks of K (448), N (877 of the longest k, which more than one thread
       halves), M (112); few rows (no packing, long K in parts); what is left for the
       last thread is thin */
    static const size_t big[][3] = {{170, 257, 385}, {337, 33, 400},  {17, 17, 401}, {29, 29, 390},
                                    {43, 31, 771},   {1, 300, 500},   {3, 513, 390}, {400, 2, 385},
                                    {169, 259, 97},  {65, 600, 31},   {4, 1030, 64}, {85, 85, 65},
                                    {113, 870, 449}, {20, 1000, 448}, {3, 70, 255},  {1, 64, 256}};
    static const size_t few[][3] = {
        {4, 37, 300},    {5, 1, 257},    {6, 70, 2048},  {7, 34, 1200},   {8, 35, 1030},
        {9, 33, 915},    {10, 3, 100},   {11, 66, 256},  {12, 31, 700},   {13, 5, 640},
        {14, 131, 1171}, {14, 2, 5000},  {15, 33, 600},  {16, 64, 512},   {19, 7, 300},
        {28, 41, 1300},  {4, 5, 32},     {8, 130, 33},   {15, 390, 1100}, {22, 259, 600},
        {36, 45, 150},   {57, 70, 256},  {64, 261, 513}, {99, 517, 512},  {112, 134, 449},
        {112, 33, 450},  {112, 32, 448}, {20, 32, 200}};
    /* few columns, which are made as the rows of a transpose, by blocks */
    static const size_t narrow[][3] = {{128, 16, 70},   {131, 15, 300}, {127, 8, 40},
                                       {500, 1, 257},   {700, 3, 130},  {260, 2, 900},
                                       {2600, 16, 449}, {3300, 8, 33},  {5300, 7, 20},
                                       {10300, 16, 9}};
    /* gradients of narrow weights, dy^T x, likewise */
    static const size_t gradient[][3] = {{128, 17, 40},   {131, 32, 300},   {260, 33, 900},
                                         {700, 64, 65},   {1700, 45, 460},  {256, 128, 128},
                                         {257, 128, 129}, {1300, 127, 500}, {257, 64, 256},
                                         {262, 128, 512}};
    static const size_t
        low[][3] = {{32, 128, 512},   {27, 137, 600}, {64, 530, 513}, {95, 997, 640},
                    {52, 1025, 1024}, {33, 200, 520}, {32, 129, 512}, {82, 194, 804},
                    {89, 195, 1001}}; /* x W^T; the last: a thread is left with one to three columns */
    size_t i, j, k, n = sizeof small / sizeof *small, turn = 0;
    int t;
    for (i = 0; i < n; i++)
        for (j = 0; j < n; j++)
            for (k = 0; k < n; k++)
                for (t = 0; t < 4; t++, turn++) {
                    if (GEMM_HALF && (i + j + k + (size_t)t) % 2) continue;
                    gemm_case(one, many, 1 + turn % 3, t & 1, t >> 1, small[i], small[j], small[k],
                              ab[turn % 7][0], ab[turn % 7][1], turn % 5 % 3);
                }
    for (i = 0; i < sizeof big / sizeof *big; i++)
        for (t = 0; t < 4; t++, turn++) {
            if (GEMM_HALF && (i + (size_t)t) % 2) continue;
            gemm_case(one, many, 1 + turn % 2, t & 1, t >> 1, big[i][0], big[i][1], big[i][2],
                      ab[turn % 7][0], ab[turn % 7][1], turn % 3);
        }
    for (t = 0; t < 4; t++, turn++) { /* rows 4096 bytes apart, and multiples of it */
        gemm_case(one, many, 1 + turn % 2, t & 1, t >> 1, 183, 97, 1024, 1, t & 1, 0);
        gemm_case(one, many, 1, t & 1, t >> 1, 1024, 371, 50, -1, 0, 0);
        gemm_case(one, many, 2, t & 1, t >> 1, 31, 70, 2048, 0.5, 1, 0);
    }
    /* large enough that threads pack B together, and over its blocks; one B for a
       batch */
    for (t = 0; t < 4; t++, turn++) {
        gemm_case(one, many, 1, t & 1, t >> 1, 521, 301, 500, t & 1 ? 1 : 0.5, t & 1, turn % 3);
        gemm_case(one, many, 2, t & 1, t >> 1, 30, 1003, 448, 1, t & 1 ? -2 : 0, 1);
    }
    for (i = 0; i < sizeof few / sizeof *few; i++, turn++) { /* x W^T of few rows */
        inner_poison(one);
        inner_poison(many);
        gemm_case(one, many, 1 + turn % 2, 0, 1, few[i][0], few[i][1], few[i][2], 1,
                  (double)(turn % 2), turn % 3);
    }
    for (i = 0; i < sizeof narrow / sizeof *narrow; i++)
        for (t = 0; t < 4; t++, turn++) {
            if (!t) {
                inner_poison(one);
                inner_poison(many);
            }
            gemm_case(one, many, 1 + turn % 2, t & 1, t >> 1, narrow[i][0], narrow[i][1],
                      narrow[i][2], ab[turn % 7][0], ab[turn % 7][1], turn % 3);
        }
    for (i = 0; i < sizeof gradient / sizeof *gradient; i++)
        for (t = 0; t < 4; t++, turn++)
            gemm_case(one, many, 1 + turn % 2, 1, 0, gradient[i][0], gradient[i][1], gradient[i][2],
                      1,
                      t < 2    ? t
                      : t == 2 ? 0.5
                               : -2,
                      turn % 3);
    for (i = 0; i < sizeof low / sizeof *low; i++)
        for (t = 0; t < 3; t++, turn++)
            gemm_case(one, many, 1 + turn % 2, 0, 1, low[i][0], low[i][1], low[i][2], 1,
                      t == 2 ? 0.5 : t, turn % 3);
    for (t = 0; t < 2; t++) {
        gemm_same_set(one, 199, 365, 1000, t);
        gemm_same_set(many, 57, 33, 770, t);
        gemm_same_set(many, 14, 5, 2040, t);
    }
    for (t = 0; t < 4; t++) /* K = 0: C = beta C */
        gemm_case(one, many, 1, t & 1, t >> 1, 5, 6, 0, 1, t & 1 ? 0 : 0.5, 0);
}
#endif
