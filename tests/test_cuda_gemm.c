/* test_cuda_gemm.c - the CUDA twins of stx_gemm, stx_linear_fwd and stx_linear_bwd
   against those of the CPU, in float and in bfloat16, by cublasLt and by the kernel
   that is used where cublasLt has no algorithm. "short" leaves out most products and
   layers, and the large ones. */
#include "../seqtx.h"
#include "inner.h"
#include "kernels.h"
#include "cuda_test.h"
#include "../bench/cuda_model.h"

static stx_ctx *cpu;
static int brief; /* sanitizers are slow, and see no values */

/* |a - b| <= rel |b| + abs_ max |b| for all; NaN never. tol of a bfloat16 result: one
   rounding is 2^-9 |b|, and what lies between two bfloat16s may go either way */
static int near(const float *a, const float *b, size_t n, double rel, double abs_) {
    double top = 0;
    size_t i;
    for (i = 0; i < n; i++)
        if (fabs((double)b[i]) > top) top = fabs((double)b[i]);
    for (i = 0; i < n; i++)
        if (!(fabs((double)a[i] - (double)b[i])
              <= rel * fabs((double)b[i]) + abs_ * (top > 1e-3 ? top : 1e-3)))
            return 0;
    return 1;
}

#define HALF (1.0 / 256)

static float *fetch(stx_ctx *x, const stx_real *p, size_t n) {
    float *a = (float *)malloc((n + 1) * sizeof *a);
    stx_cuda_download_activations(x, a, p, n);
    return a;
}

typedef struct product {
    size_t batch, M, N, K;
    int ta, tb;
    double alpha, beta;
    /* between rows and matrices; numbers before the first, which break the alignment */
    size_t gap, off;
    int shared;     /* one B for all */
    int sum;        /* one C for all */
    int ka, kb, kc; /* kinds of memory */
    int whole;      /* small integers: exact in any order */
} product;

/* One product, with gaps that must stay as they were. */
static int product_case(stx_ctx *x, const product *p) {
    int bf16 = stx_ctx_desc(x)->precision == STX_PREC_BF16,
        half = bf16 && p->kc == STX_MEM_ACTIVATIONS;
    int low = bf16 && (p->ka != STX_MEM_BYTES || p->kb != STX_MEM_BYTES || half);
    size_t ar = p->ta ? p->K : p->M, ac = p->ta ? p->M : p->K, br = p->tb ? p->N : p->K,
           bc = p->tb ? p->K : p->N;
    size_t lda = ac + p->gap, ldb = bc + p->gap, ldc = p->N + p->gap, sa = ar * lda + p->gap,
           sb = p->shared ? 0 : br * ldb + p->gap, sc = p->M * ldc + p->gap;
    size_t na = p->batch * sa + p->off, nb = br * ldb + p->batch * sb + p->off,
           nc = p->batch * sc + p->off, n = 0, e, i, j, at;
    double s = p->whole ? 3 : 1;
    float *A = cuda_random(na, s, p->whole), *B = cuda_random(nb, s, p->whole),
          *C = cuda_random(nc, s, p->whole), *got, *want, *a, *b;
    stx_real *dA, *dB, *dC;
    stx_gemm_args g;
    int good;
    if (low) {
        cuda_round(A, na);
        cuda_round(B, nb);
    }
    if (half) cuda_round(C, nc);
    if (p->beta == 0)
        for (e = 0; e < (p->sum ? 1 : p->batch); e++)
            for (i = 0; i < p->M; i++)
                for (j = 0; j < p->N; j++) C[p->off + e * sc + i * ldc + j] = (float)NAN;
    dA = cuda_values(x, A, na, p->ka);
    dB = cuda_values(x, B, nb, p->kb);
    dC = cuda_values(x, C, nc, p->kc);
    want = (float *)malloc((nc + 1) * sizeof *want);
    memcpy(want, C, nc * sizeof *want);
    g = stx_gemm_init(p->ta, p->tb, p->M, p->N, p->K, A + p->off, B + p->off, want + p->off);
    g.batch = p->batch;
    g.alpha = (float)p->alpha;
    g.beta = (float)p->beta;
    g.lda = lda;
    g.sa = sa;
    g.ldb = ldb;
    g.sb = sb;
    g.ldc = ldc;
    g.sc = p->sum ? 0 : sc;
    stx_gemm(cpu, &g);
    g.A = stx_offset_ptr(x, dA, p->off);
    g.B = stx_offset_ptr(x, dB, p->off);
    g.C = stx_offset_ptr(x, dC, p->off);
    stx_gemm_cuda(x, &g);
    CHECK(stx_ok(x), "%s", stx_error(x));
    got = fetch(x, dC, nc);
    a = (float *)malloc((nc + 1) * sizeof *a);
    b = (float *)malloc((nc + 1) * sizeof *b);
    for (e = 0; e < (p->sum ? 1 : p->batch); e++)
        for (i = 0; i < p->M; i++)
            for (j = 0; j < p->N; j++) {
                at = p->off + e * sc + i * ldc + j;
                a[n] = got[at];
                b[n++] = want[at];
                got[at] = want[at]; /* so that only the gaps are left to compare */
            }
    good = near(a, b, n, half ? HALF : 0,
                p->whole && !half ? 0
                : half || low     ? 1e-5
                                  : 1e-6)
           && !memcmp(got, want, nc * sizeof *got);
    CHECK(
        good,
        "%s: batch %zu ta %d tb %d M %zu N %zu K %zu alpha %g beta %g gap %zu off %zu shared %d "
        "sum %d kinds %d %d %d whole %d",
        bf16 ? "bf16" : "f32", p->batch, p->ta, p->tb, p->M, p->N, p->K, p->alpha, p->beta, p->gap,
        p->off, p->shared, p->sum, p->ka, p->kb, p->kc, p->whole);
    stx_cuda_free(x, dA);
    stx_cuda_free(x, dB);
    stx_cuda_free(x, dC);
    free(A);
    free(B);
    free(C);
    free(got);
    free(want);
    free(a);
    free(b);
    return good;
}

static void products(stx_ctx *x) {
    static const size_t size[] = {1, 2, 3, 5, 8, 15, 16, 17, 31, 33, 64, 65, 127, 129};
    static const double ab[][2] = {{1, 0}, {1, 1}, {0.5, -2}, {-1, 0}, {0, 1}, {0, 0}, {2, 0.25}};
    static const int kinds[] = {STX_MEM_ACTIVATIONS, STX_MEM_PARAMS, STX_MEM_BYTES};
    product p;
    size_t i, n = sizeof size / sizeof *size;
    memset(&p, 0, sizeof p);
    /* strides that share no factor: all pairs of the short lists, many of the rest */
    for (i = 0; i < 126; i++) {
        /* each fifth, the steps between them uneven */
        if (brief && (i + i / 5) % 5) continue;
        p.batch = 1 + i % 3;
        p.ta = (int)(i & 1);
        p.tb = (int)(i >> 1 & 1);
        p.M = size[i * 3 % n];
        p.N = size[(i * 5 + i / n) % n];
        p.K = size[(i * 9 + i / 3) % n];
        p.alpha = ab[i % 7][0];
        p.beta = ab[i % 7][1];
        p.gap = i % 5 % 3;
        p.off = i % 11 == 4 ? i % 3 + 1 : 0;
        p.shared = i % 4 == 1;
        p.ka = kinds[i % 3];
        p.kb = kinds[i / 3 % 3];
        p.kc = kinds[i / 9 % 3];
        p.whole = i % 2;
        product_case(x, &p);
    }
    /* one C: rows that follow each other, with gaps between matrices, of all kinds and
       turns */
    for (i = 0; i < 36; i++) {
        memset(&p, 0, sizeof p);
        p.sum = p.whole = 1;
        p.batch = 2 + i % 3;
        p.ta = i % 9 != 7;
        p.tb = i % 9 == 8;
        p.M = size[i * 3 % n];
        p.N = size[(i * 5 + 1) % n];
        p.K = size[(i * 9 + 2) % n];
        p.alpha = 1;
        p.beta = i % 2;
        p.gap = i % 4 == 1;
        p.shared = i % 9 == 5;
        p.ka = kinds[i % 3];
        p.kb = kinds[i / 3 % 3];
        p.kc = i % 2 ? STX_MEM_BYTES : kinds[i % 3];
        product_case(x, &p);
    }
    memset(&p, 0, sizeof p);
    p.batch = 1;
    p.M = 256;
    p.N = 384;
    p.K = 192;
    p.alpha = 1;
    for (i = 0; i < 4 && !brief; i++) {
        p.ta = (int)(i & 1);
        p.tb = (int)(i >> 1);
        p.ka = p.kb = STX_MEM_ACTIVATIONS;
        p.kc = i == 2 ? STX_MEM_BYTES : STX_MEM_ACTIVATIONS;
        p.beta = i == 2;
        product_case(x, &p);
    }
    /* K = 0: C = beta C, in every kind of memory; nothing at all to do */
    for (i = 0; i < 8; i++) {
        p.batch = 1 + i % 2;
        p.M = 5;
        p.N = 6;
        p.K = 0;
        p.gap = 1;
        p.kc = kinds[i % 3];
        p.whole = 1;
        p.beta = i & 4 ? 0 : 0.5;
        if (i == 3) p.M = 0;
        if (i == 5) p.N = 0;
        if (i == 7) p.batch = 0;
        product_case(x, &p);
    }
    for (i = 0; i < 4; i++) { /* one C of several products: beta once */
        memset(&p, 0, sizeof p);
        p.batch = 3;
        p.M = 5;
        p.N = 6;
        p.K = i & 1 ? 4 : 0;
        p.ta = 1;
        p.sum = p.whole = 1;
        p.alpha = i & 1 ? 0 : 1;
        p.beta = 0.5;
        p.ka = p.kb = p.kc = kinds[i % 3];
        product_case(x, &p);
    }
}

/* A product into a parameter leaves its bfloat16 twin current: a product by one reads
   it. */
static void twin(stx_ctx *x) {
    float one = 1, *A = cuda_random(12, 1, 0), *want, *got;
    int half = stx_ctx_desc(x)->precision == STX_PREC_BF16;
    stx_real *dA, *d1, *P, *y;
    stx_gemm_args g, through;
    cuda_round(A, 12);
    dA = cuda_values(x, A, 12, STX_MEM_ACTIVATIONS);
    d1 = cuda_values(x, &one, 1, STX_MEM_ACTIVATIONS);
    P = cuda_values(x, NULL, 16, STX_MEM_PARAMS);
    y = cuda_values(x, NULL, 16, STX_MEM_BYTES);
    g = stx_gemm_init(0, 1, 4, 4, 3, dA, dA, P);
    through = stx_gemm_init(0, 0, 16, 1, 1, P, d1, y);
    stx_gemm_cuda(x, &g);
    stx_gemm_cuda(x, &through);
    want = fetch(x, P, 16);
    got = fetch(x, y, 16);
    if (half) cuda_round(want, 16);
    CHECK(!memcmp(got, want, 16 * sizeof *got),
          "the twin of a parameter is not what a product left in the parameter");
    g = stx_gemm_init(0, 0, 4, 4, 0, dA, dA, P);
    g.beta = 0.5f;
    stx_gemm_cuda(x, &g);
    stx_gemm_cuda(x, &through);
    free(want);
    free(got);
    want = fetch(x, P, 16);
    got = fetch(x, y, 16);
    if (half) cuda_round(want, 16);
    CHECK(!memcmp(got, want, 16 * sizeof *got),
          "the twin of a parameter is not what scaling left in the parameter");
    CHECK(stx_ok(x), "%s", stx_error(x));
    stx_cuda_free(x, dA);
    stx_cuda_free(x, d1);
    stx_cuda_free(x, P);
    stx_cuda_free(x, y);
    free(A);
    free(want);
    free(got);
}

/* off: of the bias, breaks its alignment; pad: of the O outputs, see
   stx_linear_bwd_args */
typedef struct layer {
    size_t N, I, O;
    int act, bias, pre, dx, accumulate;
    size_t off, pad;
} layer;

static void layer_case(stx_ctx *x, const layer *l) {
    int bf16 = stx_ctx_desc(x)->precision == STX_PREC_BF16;
    size_t N = l->N, I = l->I, O = l->O, R = O - l->pad, n = N * O, i;
    double half = bf16 ? HALF : 0, small = bf16 ? 1e-5 : 2e-6;
    float *in = cuda_random(N * I, 1, 0), *W = cuda_random(O * I, 0.4, 0),
          *b = cuda_random(O + l->off, 0.5, 0), *y = (float *)malloc((n + 1) * 4),
          *pre = (float *)malloc((n + 1) * 4);
    float *dy = cuda_random(n, 1, 0), *dx = cuda_random(N * I, 1, 0),
          *dW = cuda_random(O * I, 1, 0), *db = cuda_random(O, 1, 0), *got;
    stx_real *gin, *gW, *gb, *gy, *gpre, *gdy, *gdx, *gdW, *gdb;
    float behind[64];
    stx_linear_bwd_args bwd;
    if (bf16) {
        cuda_round(in, N * I);
        cuda_round(W, O * I);
        cuda_round(b, O + l->off);
        cuda_round(dy, n);
        cuda_round(dx, N * I);
    }
    for (i = R * I; i < O * I; i++) W[i] = 0;
    /* 0 from a loss; here so that it shows where it gets to */
    for (i = 0; i < n; i++)
        if (i % O >= R) dy[i] = 5;
    for (i = R; i < O; i++) b[i + l->off] = 0;
    gin = cuda_values(x, in, N * I, STX_MEM_ACTIVATIONS);
    gW = cuda_values(x, W, O * I, STX_MEM_PARAMS);
    gb = cuda_values(x, b, O + l->off, STX_MEM_PARAMS);
    gy = cuda_values(x, NULL, n, STX_MEM_ACTIVATIONS);
    gpre = cuda_values(x, NULL, n, STX_MEM_ACTIVATIONS);
    gdy = cuda_values(x, dy, n, STX_MEM_ACTIVATIONS);
    gdx = cuda_values(x, dx, N * I, STX_MEM_ACTIVATIONS);
    /* of which the padding is a neighbour's */
    gdW = cuda_values(x, dW, O * I, STX_MEM_BYTES);
    gdb = cuda_values(x, db, O, STX_MEM_BYTES);
    memcpy(behind, db + R, l->pad * sizeof *behind);

    k_linear_fwd(cpu, y, pre, in, W, l->bias ? b + l->off : NULL, N, I, O, l->act);
    k_linear_fwd_cuda(x, gy, l->pre ? gpre : NULL, gin, gW,
                        l->bias ? stx_offset_ptr(x, gb, l->off) : NULL, N, I, O, l->act);
    if (l->pre) {
        got = fetch(x, gpre, n);
        CHECK(near(got, pre, n, half, small), "pre of linear N %zu I %zu O %zu act %d bias %d", N,
              I, O, l->act, l->bias);
        free(got);
    }
    /* an activation in a separate pass sees a rounded argument; all slopes are below 1.13
       */
    got = fetch(x, gy, n);
    CHECK(near(got, y, n, half, bf16 ? (l->act ? 2 * HALF : small) : small),
          "y of linear N %zu I %zu O %zu act %d bias %d pre %d", N, I, O, l->act, l->bias, l->pre);
    free(got);

    /* backward, of the CPU's y and pre as they can be stored */
    if (bf16) {
        cuda_round(y, n);
        cuda_round(pre, n);
    }
    stx_cuda_upload_activations(x, gy, y, n);
    stx_cuda_upload_activations(x, gpre, pre, n);
    memset(&bwd, 0, sizeof bwd);
    bwd.N = N;
    bwd.Ci = I;
    bwd.O = O;
    bwd.padding = l->pad;
    bwd.act = l->act;
    bwd.accumulate = l->accumulate;
    bwd.deferred = 0;
    bwd.da = gdy;
    bwd.y = l->act ? gy : NULL;
    bwd.pre = l->act == STX_ACT_GELU ? gpre : NULL;
    bwd.in = gin;
    bwd.W = gW;
    bwd.dx = l->dx ? gdx : NULL;
    bwd.dW = gdW;
    bwd.db = l->bias ? gdb : NULL;
    stx_linear_bwd_cuda(x, &bwd);
    if (l->act) k_act_bwd(cpu, dy, dy, y, pre, n, l->act, 0);
    if (l->bias) { /* sums of what was not yet rounded */
        stx_sum_rows(cpu, db, dy, N, O);
        got = fetch(x, gdb, O);
        CHECK(!memcmp(got + R, behind, l->pad * sizeof *got), "what stands behind db was written");
        CHECK(near(got, db, R, 0, small), "db of linear N %zu I %zu O %zu act %d", N, I, O, l->act);
        free(got);
    }
    got = fetch(x, gdy, n);
    CHECK(near(got, dy, n, half, small), "da of linear N %zu I %zu O %zu act %d", N, I, O, l->act);
    memcpy(dy, got, n * sizeof *dy); /* what the products see */
    free(got);
    bwd.act = STX_ACT_NONE;
    bwd.da = dy;
    bwd.y = bwd.pre = NULL;
    bwd.in = in;
    bwd.W = W;
    bwd.dx = l->dx ? dx : NULL;
    bwd.dW = dW;
    bwd.db = NULL;
    stx_linear_bwd(cpu, &bwd);
    got = fetch(x, gdx, N * I);
    CHECK(near(got, dx, N * I, l->dx ? half : 0, l->dx ? small : 0),
          "dx of linear N %zu I %zu O %zu act %d accumulate %d dx %d", N, I, O, l->act,
          l->accumulate, l->dx);
    free(got);
    got = fetch(x, gdW, O * I);
    CHECK(!memcmp(got + R * I, dW + R * I, l->pad * I * sizeof *got),
          "what stands behind dW was written");
    CHECK(near(got, dW, R * I, 0, small), "dW of linear N %zu I %zu O %zu act %d", N, I, O, l->act);
    free(got);
    CHECK(stx_ok(x), "%s", stx_error(x));
    stx_cuda_free(x, gin);
    stx_cuda_free(x, gW);
    stx_cuda_free(x, gb);
    stx_cuda_free(x, gy);
    stx_cuda_free(x, gpre);
    stx_cuda_free(x, gdy);
    stx_cuda_free(x, gdx);
    stx_cuda_free(x, gdW);
    stx_cuda_free(x, gdb);
    free(in);
    free(W);
    free(b);
    free(y);
    free(pre);
    free(dy);
    free(dx);
    free(dW);
    free(db);
}

static void layers(stx_ctx *x) {
    static const size_t size[][3] = {{1, 8, 16},     {3, 5, 7},    {8, 64, 128}, {65, 24, 33},
                                     {200, 16, 132}, {129, 31, 4}, {1, 1, 1},    {700, 3, 9}};
    layer l;
    size_t i, k;
    memset(&l, 0, sizeof l);
    for (i = 0; i < sizeof size / sizeof *size; i++)
        for (k = 0; k < 10; k++) {
            if (brief && (i + k) % 3) continue;
            l.N = size[i][0];
            l.I = size[i][1];
            l.O = size[i][2];
            l.act = (int)(k % 5);
            l.bias = k < 5 ? (int)(i & 1) : !(i & 1);
            l.pre = l.act == STX_ACT_GELU || (i + k) % 4 == 0;
            l.dx = (i + k) % 5 != 0;
            l.accumulate = (int)((i + k / 2) & 1);
            l.off = k % 3 == 2;
            layer_case(x, &l);
        }
    /* with padding; the last one is too large for one piece of scratch under the shim */
    for (i = 0; i < 4; i++) {
        static const size_t padded[][4] = {{70, 24, 64, 41},
                                           {9, 8, 128, 51},
                                           {3, 16, 64, 63},
                                           {33, 264, 576, 55}};
        l.N = padded[i][0];
        l.I = padded[i][1];
        l.O = padded[i][2];
        l.pad = padded[i][3];
        l.act = STX_ACT_NONE;
        l.bias = i != 2;
        l.pre = 0;
        l.dx = i != 1;
        l.accumulate = i == 2;
        l.off = 0;
        layer_case(x, &l);
    }
    l.pad = 0;
    /* y = act(b) */
    l.N = 5;
    l.I = 0;
    l.O = 8;
    l.act = STX_ACT_SIGMOID;
    l.bias = 1;
    l.pre = 0;
    l.dx = 1;
    l.accumulate = 0;
    l.off = 0;
    layer_case(x, &l);
    l.N = 0;
    l.I = 4;
    layer_case(x, &l);
    l.N = 4;
    l.O = 0; /* dx = 0 */
    layer_case(x, &l);
}

/* A kind of product is planned once, whatever alpha and the addresses are. */
static void plans(stx_ctx *x) {
    product p;
    size_t before, after;
    memset(&p, 0, sizeof p);
    p.batch = 2;
    p.M = 24;
    p.N = 40;
    p.K = 56;
    p.alpha = 1;
    p.beta = 1;
    before = inner_plans(x);
    product_case(x, &p);
    after = inner_plans(x);
    CHECK(after == before + 1, "%zu plans for one product", after - before);
    p.alpha = 0.5;
    product_case(x, &p);
    CHECK(inner_plans(x) == after, "a second plan for the same kind of product");
    p.M++;
    product_case(x, &p);
    CHECK(inner_plans(x) == after + 1, "no separate plan for another shape");
}

/* Rows that move in their buffer, or in the arena, are the same kind of product:
   cublasLt might choose another algorithm for another kind, and the bits would change. */
static void plans_of_moved_rows(stx_ctx *x) {
    static const size_t widths[] = {40, 10, 7};

    enum { M = 12, N = 16, MOST = 40 };

    float *numbers = cuda_random((M + 4) * MOST, 1, 0);
    stx_real *A = cuda_values(x, numbers, (M + 4) * MOST, STX_MEM_ACTIVATIONS),
             *B = cuda_values(x, numbers, N * MOST, STX_MEM_ACTIVATIONS);
    stx_real *C = cuda_values(x, numbers, (M + 4) * MOST, STX_MEM_ACTIVATIONS);
    size_t i, row;
    for (i = 0; i < sizeof widths / sizeof *widths; i++) {
        const size_t K = widths[i];
        size_t plans_made = 0;
        for (row = 0; row < 4; row++) {
            stx_gemm_args g = stx_gemm_init(0, 1, M, N, K, stx_offset_ptr(x, A, row * K), B,
                                            stx_offset_ptr(x, C, row * N));
            stx_gemm_cuda(x, &g);
            if (row == 0) plans_made = inner_plans(x);
            CHECK(stx_ok(x) && inner_plans(x) == plans_made,
                  "rows of %zu numbers, moved by %zu: another plan", K, row);
        }
    }
    stx_cuda_free(x, A);
    stx_cuda_free(x, B);
    stx_cuda_free(x, C);
    free(numbers);
}

/* Split K: the number of slices for the trainers' shapes (O,Ci,N), with deferred sums:
   12x512 and its output layers, small, 24x768, PAR, the few rows of generation, and
   shapes that cannot be split evenly, are not worth it or need too much memory */
static void pieces_by_size(void) {
    static const size_t want[][4] = {{512, 512, 32768, 8},   {2048, 512, 32768, 2},
                                     {512, 2048, 32768, 2},  {256, 512, 32768, 16},
                                     {256, 256, 16384, 32},  {1024, 256, 16384, 8},
                                     {768, 768, 32768, 8},   {4096, 768, 32768, 2},
                                     {128, 128, 1024, 4},    {1536, 512, 32768, 8},
                                     {512, 512, 32749, 1},   {512, 512, 8, 1},
                                     {64, 64, 511, 1},       {64, 64, 512, 2},
                                     {8192, 8192, 65536, 1}, {3056, 2048, 16384, 1}};
    size_t i;
    for (i = 0; i < sizeof want / sizeof *want; i++)
        CHECK(inner_pieces_of(want[i][0], want[i][1], want[i][2], 1) == want[i][3],
              "(%zu,%zu) of %zu rows: %zu pieces, expected %zu", want[i][0], want[i][1], want[i][2],
              inner_pieces_of(want[i][0], want[i][1], want[i][2], 1), want[i][3]);
    /* the benchmarks' formulas count the same */
    for (i = 0; i < sizeof want / sizeof *want; i++)
        CHECK(work_pieces((double)want[i][0], (double)want[i][1], (double)want[i][2])
                  == (double)want[i][3],
              "cuda_model.h has %g pieces",
              work_pieces((double)want[i][0], (double)want[i][1], (double)want[i][2]));
    CHECK(inner_pieces_of(64, 64, 512, 0) == 1, "a separate launch costs more than that");
}

/* dW of a weight of `rows` of O rows, cut or whole, once or twice, waiting or not,
   against the CPU; in float the pieces are added to dW in their order, bit for bit.
   cut: how many batches cublasLt is to get for each product */
#ifdef SEQTX_CUDA_HOST
static int pieces_no_memory; /* for the first one */
static int pieces_timed;     /* plans are made by timing: more calls, at first */
#endif
typedef struct pieced {
    size_t N, I, O, pad;
    int pieces, late, times, cut;
} pieced;

static void pieces_case(stx_ctx *x, const pieced *p, uint64_t *hash) {
    int bf16 = stx_ctx_desc(x)->precision == STX_PREC_BF16, e;
    size_t N = p->N, I = p->I, O = p->O, R = O - p->pad, n = R * I, i, k,
           P = p->pieces ? (size_t)p->pieces : 1;
    const size_t more = 8 * (size_t)(p->times - 1); /* each time other rows */
    float *in = cuda_random(N * I + more, 1, 0), *dy = cuda_random(N * O, 1, 0),
          *dW = cuda_random(n, 1, 0), *one = cuda_random(n, 1, 0), *sum = cuda_random(n, 1, 0),
          *got, *exact;
    stx_real *gin, *gdy, *gdW;
    stx_linear_bwd_args bwd;
#ifdef SEQTX_CUDA_HOST
    long batches = cuda_host_batches();
#endif
    if (bf16) {
        cuda_round(in, N * I + more);
        cuda_round(dy, N * O);
    }
    for (i = 0; i < N * O; i++)
        if (i % O >= R) dy[i] = 5;
    gin = cuda_values(x, in, N * I + more, STX_MEM_ACTIVATIONS);
    gdy = cuda_values(x, dy, N * O, STX_MEM_ACTIVATIONS);
    gdW = cuda_values(x, dW, n, STX_MEM_BYTES);
    exact = (float *)malloc((n + 1) * sizeof *exact);
    memcpy(exact, dW, n * sizeof *exact);
    memset(&bwd, 0, sizeof bwd);
    bwd.N = N;
    bwd.Ci = I;
    bwd.O = O;
    bwd.padding = p->pad;
    bwd.deferred = p->late ? STX_DEFER_DW : 0;
    inner_pieces(x, p->pieces);
    if (p->late) stx_cuda_defer_sums(x, 1);
#ifdef SEQTX_CUDA_HOST
    if (pieces_no_memory) cuda_host_fail_alloc(1);
#endif
    for (e = 0; e < p->times; e++) {
        const size_t from = 8 * (size_t)e;
        bwd.da = gdy;
        bwd.in = stx_offset_ptr(x, gin, from);
        bwd.dW = gdW;
        stx_linear_bwd_cuda(x, &bwd);
        bwd.da = dy;
        bwd.in = in + from;
        bwd.dW = dW;
        stx_linear_bwd(cpu, &bwd);
        for (k = 0; k < P; k++) {
            stx_gemm_args g = stx_gemm_init(1, 0, R, I, N / P, dy + k * (N / P) * O,
                                            in + from + k * (N / P) * I, one);
            g.lda = O;
            stx_gemm(cpu, &g);
            for (i = 0; i < n; i++) sum[i] = k ? sum[i] + one[i] : one[i];
        }
        for (i = 0; i < n; i++) exact[i] += sum[i];
    }
    if (p->late && p->cut) {
        got = fetch(x, gdW, n);
        CHECK(p->times > 1 || !memcmp(got, exact, n * sizeof *got) == 0, "dW does not wait");
        free(got);
    }
    if (p->late) stx_cuda_defer_sums(x, -1);
    inner_pieces(x, 0);
    got = fetch(x, gdW, n);
    CHECK(stx_ok(x), "%s", stx_error(x));
    CHECK(near(got, dW, n, 0, bf16 ? 1e-5 : 2e-6),
          "dW of N %zu I %zu O %zu pad %zu in %d pieces, late %d, %d times", N, I, O, p->pad,
          p->pieces, p->late, p->times);
#ifdef SEQTX_CUDA_HOST
    batches = cuda_host_batches() - batches;
    CHECK(batches == p->cut * p->times || (pieces_timed && batches > p->cut * p->times),
          "dW of N %zu I %zu O %zu in %d pieces: %ld batches of products, expected %d", N, I, O,
          p->pieces, batches, p->cut * p->times);
    if (!bf16 && p->cut && !p->pad) /* the shim's products have the CPU's bits */
        CHECK(!memcmp(got, exact, n * sizeof *got),
              "the pieces of dW are not added in their order: N %zu, %d pieces, late %d", N,
              p->pieces, p->late);
#endif
    if (hash) *hash = cuda_hash(x, gdW, n, *hash);
    stx_cuda_free(x, gin);
    stx_cuda_free(x, gdy);
    stx_cuda_free(x, gdW);
    free(in);
    free(dy);
    free(dW);
    free(one);
    free(sum);
    free(exact);
    free(got);
}

static void pieces(stx_ctx *x, int own) {
    static const pieced cases[] = {{512, 24, 40, 0, 4, 0, 1, 1},
                                   {512, 24, 40, 0, 4, 1, 1, 1},
                                   {512, 24, 40, 0, 4, 1, 3, 1},
                                   {60, 7, 9, 0, 5, 0, 2, 1},
                                   {60, 7, 9, 0, 5, 1, 2, 1}, /* nothing is aligned */
                                   {96, 16, 64, 23, 3, 1, 1, 1},
                                   {96, 16, 64, 23, 3, 0, 2, 1},
                                   {50, 8, 64, 5, 1, 0, 1,
                                    0}, /* with padding: one piece is no batch */
                                   /* not even: whole */
                                   {61, 8, 8, 0, 4, 0, 1, 0},
                                   {768, 40, 56, 0, 0, 0, 1, 1},
                                   {768, 40, 56, 0, 0, 1, 2, 1}, /* by sizes: three pieces */
                                   /* too large for the shim's scratch: whole */
                                   {640, 128, 128, 0, 10, 1, 1, 0}};
    size_t i;
    for (i = 0; i < sizeof cases / sizeof *cases; i++) {
        pieced p = cases[i];
        if (own) p.cut = 0;
        if (!p.pieces) {
            CHECK(inner_pieces_of(p.O, p.I, p.N, p.late) == 3, "three pieces by sizes");
            if (p.cut) p.pieces = 3;
            inner_pieces(x, 0);
        }
        pieces_case(x, &p, NULL);
    }
}

/* The same of streams whose rows stand apart, as a memory's do: one sum over all of
   them, packed, and whole or in pieces that need not be the streams */
static void pieces_of_streams(stx_ctx *x) {
    enum { B = 6, N = 40, I = 24, O = 40, GAP = 48 };

    static const int want[] = {1, 3, 4, 6, 16, 0};
    int bf16 = stx_ctx_desc(x)->precision == STX_PREC_BF16;
    size_t k, late, n = O * I, per_in = N * I + GAP, per_dy = N * O + (bf16 ? 0 : 8);
    float *in = cuda_random(B * per_in, 1, 0), *dy = cuda_random(B * per_dy, 1, 0);
    stx_real *gin, *gdy;
    if (bf16) {
        cuda_round(in, B * per_in);
        cuda_round(dy, B * per_dy);
    }
    gin = cuda_values(x, in, B * per_in, STX_MEM_ACTIVATIONS);
    gdy = cuda_values(x, dy, B * per_dy, STX_MEM_ACTIVATIONS);
    for (late = 0; late < 2; late++)
        for (k = 0; k < sizeof want / sizeof *want; k++) {
            float *dW = cuda_random(n, 1, 0), *got;
            stx_real *gdW = cuda_values(x, dW, n, STX_MEM_BYTES);
            stx_linear_bwd_args bwd;
            memset(&bwd, 0, sizeof bwd);
            bwd.N = N;
            bwd.Ci = I;
            bwd.O = O;
            bwd.batch = B;
            bwd.sin = per_in;
            bwd.sda = per_dy;
            bwd.deferred = late ? STX_DEFER_DW : 0;
            inner_pieces(x, want[k]);
            if (late) stx_cuda_defer_sums(x, 1);
            bwd.da = gdy;
            bwd.in = gin;
            bwd.dW = gdW;
            stx_linear_bwd_cuda(x, &bwd);
            bwd.da = dy;
            bwd.in = in;
            bwd.dW = dW;
            stx_linear_bwd(cpu, &bwd);
            if (late) stx_cuda_defer_sums(x, -1);
            inner_pieces(x, 0);
            got = fetch(x, gdW, n);
            CHECK(stx_ok(x) && near(got, dW, n, 0, bf16 ? 1e-5 : 2e-6),
                  "dW of streams in %d pieces, late %zu: %s", want[k], late, stx_error(x));
            stx_cuda_free(x, gdW);
            free(dW);
            free(got);
        }
    stx_cuda_free(x, gin);
    stx_cuda_free(x, gdy);
    free(in);
    free(dy);
}

/* More sums than a launch has room for, of many weights; the same bits in every order
   of threads */
static stx_ctx *pieces_ctx;

static void pieces_again(void *user, uint64_t *hash) {
    static const pieced p[] = {{512, 24, 40, 0, 8, 1, 4, 1},
                               {96, 16, 64, 23, 3, 0, 2, 1},
                               {90, 15, 7, 0, 5, 1, 1, 1}};
    stx_ctx *x = pieces_ctx;
    size_t n = 64 * 16, k, i;
    const size_t all = 30 * 6 * 16;
    float *in = (float *)malloc(n * 6 * sizeof *in), *dW = (float *)malloc(all * sizeof *dW), *got;
    stx_real *gin, *gdW;
    uint64_t keep = test_state;
    for (i = 0; i < sizeof p / sizeof *p; i++) {
        test_state = 3 + i;
        pieces_case(x, &p[i], hash);
    }
    test_state = keep;
    memcpy(in, user, n * 6 * sizeof *in);
    memcpy(dW, user, all * sizeof *dW);
    if (stx_ctx_desc(x)->precision == STX_PREC_BF16) cuda_round(in, n * 6);
    gin = cuda_values(x, in, n * 6, STX_MEM_ACTIVATIONS);
    gdW = cuda_values(x, dW, all, STX_MEM_BYTES);
    inner_pieces(x, 4);
    stx_cuda_defer_sums(x, 1);
    for (k = 0; k < 30; k++) {
        stx_linear_bwd_args bwd;
        memset(&bwd, 0, sizeof bwd);
        bwd.N = 64;
        bwd.Ci = 16;
        bwd.O = 6;
        bwd.deferred = STX_DEFER_DW;
        bwd.in = gin;
        bwd.da = stx_offset_ptr(x, gin, k);
        bwd.dW = stx_offset_ptr(x, gdW, k * 6 * 16);
        stx_linear_bwd_cuda(x, &bwd);
        bwd.in = in;
        bwd.da = in + k;
        bwd.dW = dW + k * 6 * 16;
        stx_linear_bwd(cpu, &bwd);
    }
    stx_cuda_defer_sums(x, -1);
    inner_pieces(x, 0);
    got = fetch(x, gdW, all);
    CHECK(near(got, dW, all, 0, 1e-5), "30 gradients that wait");
    *hash = cuda_hash(x, gdW, all, *hash);
    stx_cuda_free(x, gin);
    stx_cuda_free(x, gdW);
    free(in);
    free(dW);
    free(got);
}
#ifdef SEQTX_CUDA_HOST
/* cublasLt has no plan for the pieces, or refuses the call, or there is no memory for
   them: one product, and no error */
static void pieces_refused(int precision) {
    static const pieced p = {512, 24, 40, 0, 4, 0, 2, 0}, padded = {96, 16, 64, 23, 3, 1, 1, 0},
                        cut = {512, 24, 40, 0, 4, 0, 2, 1};
    int how;
    for (how = CUDA_HOST_REFUSE_PLANS; how <= CUDA_HOST_REFUSE_CALLS; how++) {
        stx_ctx *x = cuda_ctx(STX_CUDA, precision);
        cuda_host_refuse(how);
        pieces_case(x, &p, NULL);
        pieces_case(x, &padded, NULL);
        cuda_host_refuse(CUDA_HOST_REFUSE_NOTHING);
        stx_destroy(x);
    }
    {
        stx_ctx *x = cuda_ctx(STX_CUDA, precision);
        pieced none = p;
        none.times = 1;
        pieces_no_memory = 1;
        pieces_case(x, &none, NULL);
        pieces_no_memory = 0;
        pieces_case(x, &cut, NULL); /* there is some later */
        stx_destroy(x);
    }
}
#endif

#ifdef SEQTX_CUDA_HOST
/* y = relu(in W^T + b), whose bits come back */
static float *relu_layer(stx_ctx *x, const float *numbers, size_t N, size_t I, size_t O) {
    stx_real *in = cuda_values(x, numbers, N * I, STX_MEM_ACTIVATIONS),
             *W = cuda_values(x, numbers + 100, O * I, STX_MEM_PARAMS);
    stx_real *b = cuda_values(x, numbers + 7, O, STX_MEM_PARAMS),
             *y = cuda_values(x, NULL, N * O, STX_MEM_ACTIVATIONS);
    float *got;
    k_linear_fwd_cuda(x, y, NULL, in, W, b, N, I, O, STX_ACT_RELU);
    got = fetch(x, y, N * O);
    stx_cuda_free(x, in);
    stx_cuda_free(x, W);
    stx_cuda_free(x, b);
    stx_cuda_free(x, y);
    return got;
}

/* cublasLt has algorithms and refuses the call, with a status that it gives before
   anything ran: our own kernel takes over, for good. After other statuses the context
   has an error. */
static void calls_refused(int precision, const float *numbers) {
    enum { EXECUTION_FAILED = 13, ALLOC_FAILED = 3, N = 50, I = 40, O = 24 };

    /* NOT_SUPPORTED, INVALID_VALUE, ARCH_MISMATCH */
    static const int status[] = {15, 7, 8};
    static const int fatal[] = {EXECUTION_FAILED, ALLOC_FAILED};
    int how, k;
    for (how = CUDA_HOST_REFUSE_ALL_PLANS; how <= CUDA_HOST_REFUSE_EPILOGUES; how++)
        for (k = 0; k < 3; k++) {
            stx_ctx *x = cuda_ctx(STX_CUDA, precision), *own = cuda_ctx(STX_CUDA, precision);
            long calls = cuda_host_matmuls();
            float *first, *second, *want;
            if (how == CUDA_HOST_REFUSE_EPILOGUES)
                inner_tune(own, -2);
            else
                inner_tune(own, -1);
            want = relu_layer(own, numbers, N, I, O);
            calls = cuda_host_matmuls() - calls;
            cuda_host_refuse(how);
            cuda_host_refuse_with(status[k]);
            first = relu_layer(x, numbers, N, I, O);
            CHECK(stx_ok(x), "way %d, status %d: %s", how, status[k], stx_error(x));
            if (k == 0 && !(how == CUDA_HOST_REFUSE_EPILOGUES && precision == STX_PREC_BF16))
                layers(x);
            cuda_host_refuse(CUDA_HOST_REFUSE_NOTHING);
            CHECK(calls == (how == CUDA_HOST_REFUSE_EPILOGUES), "%ld products by cublasLt", calls);
            calls += cuda_host_matmuls();
            second = relu_layer(x, numbers, N, I, O);
            CHECK(cuda_host_matmuls() == calls,
                  "way %d, status %d: a plan that was refused is tried again", how, status[k]);
            CHECK(!memcmp(first, want, N * O * sizeof *want)
                      && !memcmp(second, want, N * O * sizeof *want),
                  "way %d, status %d: other bits than those of our own kernel", how, status[k]);
            free(first);
            free(second);
            free(want);
            stx_destroy(x);
            stx_destroy(own);
        }
    for (k = 0; k < 2; k++) {
        stx_ctx *x = cuda_ctx(STX_CUDA, precision);
        cuda_host_refuse(CUDA_HOST_REFUSE_ALL_CALLS);
        cuda_host_refuse_with(fatal[k]);
        free(relu_layer(x, numbers, N, I, O));
        CHECK(!stx_ok(x)
                  && strstr(stx_error(x),
                            k ? "CUBLAS_STATUS_ALLOC_FAILED" : "CUBLAS_STATUS_EXECUTION_FAILED"),
              "%s", stx_error(x));
        cuda_host_refuse(CUDA_HOST_REFUSE_NOTHING);
        stx_destroy(x);
    }
    cuda_host_refuse_with(0);
    cuda_host_reset_errors();
}
#endif

/* A product may be captured, even one that comes for the first time; each replay adds
   once. */
static void captured(stx_ctx *x) {
    size_t M = 19, N = 24, K = 37, i, before = inner_plans(x);
    float *A = cuda_random(M * K, 3, 1), *B = cuda_random(K * N, 3, 1),
          *C = cuda_random(M * N, 3, 1), *got;
    stx_real *dA = cuda_values(x, A, M * K, STX_MEM_ACTIVATIONS),
             *dB = cuda_values(x, B, K * N, STX_MEM_ACTIVATIONS),
             *dC = cuda_values(x, C, M * N, STX_MEM_BYTES);
    stx_graph *graph;
    stx_gemm_args g = stx_gemm_init(0, 0, M, N, K, dA, dB, dC);
    CHECK(stx_cuda_capture_begin(x), "no capture");
    g.beta = 1;
    stx_gemm_cuda(x, &g);
    graph = stx_cuda_capture_end(x);
    CHECK(graph && stx_ok(x), "%s", stx_error(x));
    CHECK(inner_plans(x) == before + 1, "no plan made while capturing");
    got = fetch(x, dC, M * N);
    CHECK(near(got, C, M * N, 0, 0), "a product runs while it is captured");
    free(got);
    for (i = 0; i < 2; i++) {
        stx_cuda_graph_launch(x, graph);
        g.A = A;
        g.B = B;
        g.C = C;
        stx_gemm(cpu, &g);
    }
    got = fetch(x, dC, M * N);
    CHECK(near(got, C, M * N, 0, 0), "a replayed product is wrong");
    stx_cuda_graph_free(x, graph);
    stx_cuda_free(x, dA);
    stx_cuda_free(x, dB);
    stx_cuda_free(x, dC);
    free(A);
    free(B);
    free(C);
    free(got);
}

/* Sizes that cublasLt does not take are refused, by name and number, before anything
   is touched. */
static void refused(int precision) {
    stx_ctx *x = cuda_ctx(STX_CUDA, precision);
    stx_real *a = cuda_values(x, NULL, 64, STX_MEM_ACTIVATIONS);
    stx_gemm_args g = stx_gemm_init(0, 0, (size_t)1 << 32, 3, 5, a, a, a);
    stx_gemm_cuda(x, &g);
    CHECK(!stx_ok(x) && strstr(stx_error(x), "stx_gemm")
              && strstr(stx_error(x), "(4294967296,5) and (5,3)"),
          "%s", stx_error(x));
    g = stx_gemm_init(0, 0, 3, 3, 3, a, a, a);
    stx_gemm_cuda(x, &g); /* nothing in error */
    stx_destroy(x);
}

#ifdef SEQTX_CUDA_HOST
/* A device that has failed: the product says so, with its name, shape and status. */
static void failing(int precision) {
    stx_ctx *x = cuda_ctx(STX_CUDA, precision), *y = cuda_ctx(STX_CUDA, precision);
    stx_real *a = cuda_values(x, NULL, 64, STX_MEM_ACTIVATIONS),
             *b = cuda_values(y, NULL, 64, STX_MEM_ACTIVATIONS);
    stx_gemm_args g = stx_gemm_init(0, 0, 5, 3, 0, a, a, a);
    cuda_host_fail_launch(1);
    stx_gemm_cuda(x, &g);
    stx_cuda_sync(x);
    CHECK(!stx_ok(x), "a failed launch goes unnoticed");
    g = stx_gemm_init(0, 0, 4, 3, 2, b, stx_offset_ptr(y, b, 16), stx_offset_ptr(y, b, 32));
    stx_gemm_cuda(y, &g);
    CHECK(!stx_ok(y) && strstr(stx_error(y), "stx_gemm") && strstr(stx_error(y), "(4,2) and (2,3)")
              && strstr(stx_error(y), "CUBLAS_STATUS_EXECUTION_FAILED"),
          "%s", stx_error(y));
    cuda_host_reset_errors();
    stx_destroy(x);
    stx_destroy(y);
}
#endif

/* The same bits each time, in every order of threads */
static stx_ctx *again_ctx;

static void again(void *user, uint64_t *hash) {
    stx_ctx *x = again_ctx;
    size_t N = 150, I = 40, O = 72;
    float *in = (float *)user;
    stx_real *gin = cuda_values(x, in, N * I, STX_MEM_ACTIVATIONS),
             *gW = cuda_values(x, in + 100, O * I, STX_MEM_PARAMS),
             *gb = cuda_values(x, in + 7, O, STX_MEM_PARAMS);
    stx_real *gy = cuda_values(x, NULL, N * O, STX_MEM_ACTIVATIONS),
             *gp = cuda_values(x, NULL, N * O, STX_MEM_ACTIVATIONS),
             *gdx = cuda_values(x, NULL, N * I, STX_MEM_ACTIVATIONS);
    stx_real *gdW = cuda_values(x, in, O * I, STX_MEM_BYTES),
             *gdb = cuda_values(x, in, O, STX_MEM_BYTES);
    stx_linear_bwd_args bwd;
    memset(&bwd, 0, sizeof bwd);
    bwd.N = N;
    bwd.Ci = I;
    bwd.O = O;
    bwd.act = STX_ACT_GELU;
    bwd.da = gy;
    bwd.pre = gp;
    bwd.in = gin;
    bwd.W = gW;
    bwd.dx = gdx;
    bwd.dW = gdW;
    bwd.db = gdb;
    k_linear_fwd_cuda(x, gy, gp, gin, gW, gb, N, I, O, STX_ACT_GELU);
    *hash = cuda_hash(x, gy, N * O, *hash);
    stx_linear_bwd_cuda(x, &bwd);
    *hash = cuda_hash(x, gdx, N * I, *hash);
    *hash = cuda_hash(x, gdW, O * I, *hash);
    *hash = cuda_hash(x, gdb, O, *hash);
    stx_cuda_free(x, gin);
    stx_cuda_free(x, gW);
    stx_cuda_free(x, gb);
    stx_cuda_free(x, gy);
    stx_cuda_free(x, gp);
    stx_cuda_free(x, gdx);
    stx_cuda_free(x, gdW);
    stx_cuda_free(x, gdb);
}

int main(int argc, char **argv) {
    static const int precision[] = {STX_PREC_F32, STX_PREC_BF16};
    float *numbers = cuda_random(12000, 1, 0);
    int i, k;
    brief = argc > 1 && !strcmp(argv[1], "short");
    cpu = cuda_ctx(STX_CPU, STX_PREC_F32);
    for (i = 0; i < 2; i++)
        for (k = -1; k < 2; k++) {
            stx_ctx *x = cuda_ctx(STX_CUDA, precision[i]);
            if (!stx_ok(x)) {
                CHECK(0, "%s", stx_error(x));
                stx_destroy(x);
                continue;
            }
            inner_tune(x, k);
            products(x);
            twin(x);
            layers(x);
            plans(x);
            plans_of_moved_rows(x);
#ifdef SEQTX_CUDA_HOST
            pieces_timed = k > 0;
#endif
            pieces(x, k < 0);
            pieces_of_streams(x);
            captured(x);
            again_ctx = x;
            cuda_orders(k < 0 ? "linear by the own kernel" : "linear by cublasLt", again, numbers);
            CHECK(stx_ok(x), "%s", stx_error(x));
            pieces_ctx = x;
            if (k >= 0) cuda_orders("pieces of K", pieces_again, numbers);
#ifdef SEQTX_CUDA_HOST
            pieces_timed = 0;
#endif
            stx_destroy(x);
        }
    {
        /* not in bfloat16: a separate pass rounds twice */
        stx_ctx *x = cuda_ctx(STX_CUDA, STX_PREC_F32);
        inner_tune(x, -2);
        layers(x);
        stx_destroy(x);
    }
    pieces_by_size();
    refused(STX_PREC_F32);
    refused(STX_PREC_BF16);
#ifdef SEQTX_CUDA_HOST
    failing(STX_PREC_F32);
    failing(STX_PREC_BF16);
    pieces_refused(STX_PREC_F32);
    pieces_refused(STX_PREC_BF16);
    calls_refused(STX_PREC_F32, numbers);
    calls_refused(STX_PREC_BF16, numbers);
#endif
    stx_destroy(cpu);
    free(numbers);
    return cuda_test_end();
}
