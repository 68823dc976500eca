/* test_bf16.c - bf16 precision, and all f32 and bf16 micro-kernels that this processor
   can run: rounding, GEMM, attention (values, gradients, tile borders, red zones), and
   a whole model. GEMMs use the kernels of this library, even if a BLAS is linked.
   TEST_AMX_EMULATED adds the AMX kernel, emulated in C. It is slow, so fewer cases run,
   as with TEST_FEW. With SEQTX_DOUBLE the only test is that bf16 is refused. */
#include <stdint.h>
#include "../../seqtx_attn_span.h"
#include "../inner/inner.h"
#include "../values.h"
#include <unistd.h>

#ifdef SEQTX_DOUBLE
int main(void) {
    inner_kernel kernels[INNER_F32S];
    size_t n = inner_kernels(0, kernels);
    stx_desc d;
    stx_ctx *x;
    CHECK(inner_kernels(1, kernels) == 0, "a double build has bf16 kernels");
    memset(&d, 0, sizeof d);
    d.precision = STX_PREC_BF16;
    x = stx_create(&d);
    CHECK(x && !stx_ok(x) && stx_error_code(x) == STX_ERR_DEVICE,
          "bf16 was accepted in a double build");
    CHECK(strstr(stx_error(x), "stx_create") && strstr(stx_error(x), "precision 1")
              && strstr(stx_error(x), "STX_PREC_F32") && strstr(stx_error(x), "SEQTX_DOUBLE"),
          "%s", stx_error(x));
    CHECK(stx_ctx_desc(x)->precision == STX_PREC_F32
              && !strcmp(stx_backend(x), kernels[n - 1].name),
          "the context is not f32: %s", stx_backend(x));
    stx_destroy(x);
    return test_end();
}
#else

  #if defined(TEST_AMX_EMULATED) || defined(TEST_FEW)
enum { SLOW = 1 }; /* fewer and smaller cases */
  #else
enum { SLOW = 0 };
  #endif


// >>kernels: all that this processor can run, slowest first

typedef inner_kernel kernel;
static kernel f32s[INNER_F32S], bf16s[INNER_BF16S];
static size_t nf, nb;

enum { MOST_THREADS = 5 };

static void find_kernels(void) {
    size_t i;
    nf = inner_kernels(0, f32s);
    nb = inner_kernels(1, bf16s);
    for (i = 0; i < nf; i++) printf("%s%s", i ? "; " : "", f32s[i].name);
    for (i = 0; i < nb; i++) printf("; %s", bf16s[i].name);
    printf("\n");
}

/* Returns kernel i of the list of all kernels: f32 first, then bf16. */
static const kernel *kernel_at(size_t i) {
    return i < nf ? f32s + i : bf16s + i - nf;
}

static stx_ctx *new_context(const kernel *k, int threads) {
    stx_desc d;
    stx_ctx *x;
    memset(&d, 0, sizeof d);
    d.threads = threads;
    d.seed = 11;
    d.precision = k->bf16 ? STX_PREC_BF16 : STX_PREC_F32;
    x = stx_create(&d);
    inner_use(x, k);
    return x;
}

/* Contexts for each kernel with 1, 2, .. threads, created when first used. */
static stx_ctx *contexts[INNER_F32S + INNER_BF16S][MOST_THREADS + 1];

static stx_ctx *context_of(const kernel *k, int threads) {
    stx_ctx **x = &contexts[k->bf16 ? INNER_F32S + (k - bf16s) : k - f32s][threads];
    if (!*x) *x = new_context(k, threads);
    return *x;
}

static void close_contexts(void) {
    size_t i, t;
    for (i = 0; i < INNER_F32S + INNER_BF16S; i++)
        for (t = 0; t <= MOST_THREADS; t++) stx_destroy(contexts[i][t]);
}

/* Returns a random index below n. It comes from a separate generator, so that the
   contents of the cases do not depend on which kernels are chosen. */
static size_t choose(size_t n) {
    static unsigned state = 1;
    state = state * 1664525u + 1013904223u;
    return (state >> 16) % n;
}

/* Nonzero if the current case runs with kernel k. The fast build runs each case with
   all kernels. In a slow build, each case runs with one f32 kernel and one bf16 kernel,
   both chosen at random, and with the emulated kernel if there is one. The reference is
   always the fastest f32 kernel. */
static int takes_part(const kernel *k, size_t chosen_f32, size_t chosen_bf16) {
    return !SLOW || k->emulated || k == f32s + chosen_f32 || k == bf16s + chosen_bf16;
}

/* Returns the number of bf16 kernels that are not emulated. */
static size_t fast_bf16s(void) {
    return nb && bf16s[nb - 1].emulated ? nb - 1 : nb;
}

/* Returns a random number below n. */
static size_t pick(size_t n) {
    return (size_t)((test_rand() + 1) * 0.5 * (double)n) % n;
}

/* Returns the largest |a - b| divided by the largest |b| or by `unit`, whichever is
   larger. If a difference is not finite, returns infinity. */
static double error_of(const float *a, const float *b, size_t n, double unit) {
    double worst = 0, top = unit;
    size_t i;
    for (i = 0; i < n; i++) {
        double e = fabs((double)a[i] - (double)b[i]);
        if (!(e <= 1e300)) return HUGE_VAL;
        if (e > worst) worst = e;
        if (fabs((double)b[i]) > top) top = fabs((double)b[i]);
    }
    return worst == 0 ? 0 : worst / top;
}


// >>rounding

static float as_float(uint32_t b) {
    float f;
    memcpy(&f, &b, 4);
    return f;
}

static uint32_t as_bits(float f) {
    uint32_t b;
    memcpy(&b, &f, 4);
    return b;
}

/* Rounds by arithmetic, according to the definition: to the nearest multiple of the
   unit in the last place or, if two multiples are equally near, to the even one.
   Results have 8 binary digits; below 2^-126 the unit in the last place is 2^-133. From
   2^128 on, the result is infinity. A NaN keeps its sign and upper digits and becomes
   quiet. */
static uint32_t nearest(float f) {
    uint32_t sign = as_bits(f) >> 16 & 0x8000u;
    double v = fabs((double)f), unit, n, rest;
    int e;
    if (f != f) return as_bits(f) >> 16 | 0x40u;
    if (!(v <= 1e300)) return sign | 0x7f80u;
    frexp(v, &e);
    unit = ldexp(1, e - 8 > -133 ? e - 8 : -133);
    n = floor(v / unit);
    rest = v / unit - n;
    if (rest > 0.5 || (rest == 0.5 && fmod(n, 2) == 1)) n++;
    v = n * unit;
    return sign | (v >= ldexp(1, 128) ? 0x7f80u : as_bits((float)v) >> 16);
}

static uint32_t nearest_by(const kernel *k, float f) {
    uint32_t b = as_bits(f);
    return k->no_denormals && !(b & 0x7f800000u) ? b >> 16 & 0x8000u : nearest(f);
}

static void check_definition(void) {
    CHECK(nearest(1.0f) == 0x3f80 && nearest(-0.0f) == 0x8000 && nearest(1.00390625f) == 0x3f80
              && nearest(1.01171875f) == 0x3f82 && nearest(3.4028235e38f) == 0x7f80
              && nearest(as_float(0x7f7f7fffu)) == 0x7f7f && nearest(as_float(0x00008000u)) == 0
              && nearest(as_float(0x00008001u)) == 1 && nearest(as_float(0x007fffffu)) == 0x80
              && nearest(as_float(0xff800001u)) == 0xffc0,
          "the definition is wrong");
}

/* Rounds all n values with the functions of a kernel. */
static void round_values(const kernel *k, const float *all, size_t n) {
    uint16_t *got = (uint16_t *)malloc((n + 1) * sizeof *got);
    uint32_t *pairs = (uint32_t *)malloc(n * sizeof *pairs);
    long bad = 0, bad_pairs = 0, bad_single = 0;
    size_t i;
    k->round(got, all, n);
    for (i = 0; i < n; i++)
        if (got[i] != nearest_by(k, all[i]) && bad++ < 5)
            printf("%s: %08x -> %04x\n", k->name, as_bits(all[i]), got[i]);
    CHECK(!bad, "%s: round: %ld of %zu wrong", k->name, bad, n);
    k->pair(pairs, all, all + 1, n - 1);
    for (i = 0; i + 1 < n; i++)
        if (pairs[i] != (nearest_by(k, all[i]) | nearest_by(k, all[i + 1]) << 16)) bad_pairs++;
    CHECK(!bad_pairs, "%s: pair: %ld wrong", k->name, bad_pairs);
    k->pair(pairs, all, NULL, n);
    for (i = 0; i < n; i++)
        if (pairs[i] != nearest_by(k, all[i])) bad_single++;
    CHECK(!bad_single, "%s: pair of one row: %ld wrong", k->name, bad_single);
    free(got);
    free(pairs);
}

/* Rounds arrays of n values. Memory beyond the values must be neither read nor written,
   so every array ends where its memory block ends. */
static void round_length(const kernel *k, const float *all, size_t total, size_t n) {
    float *a = (float *)malloc(n * sizeof *a + 1), *b = (float *)malloc(n * sizeof *b + 1);
    uint16_t *r = (uint16_t *)malloc((n + 40) * sizeof *r);
    uint32_t *p = (uint32_t *)malloc((n + 40) * sizeof *p);
    uint32_t *q = (uint32_t *)malloc((n + 40) * sizeof *q);
    size_t i;
    int good = 1;
    for (i = 0; i < n; i++) {
        a[i] = all[pick(total)];
        b[i] = all[pick(total)];
    }
    for (i = 0; i < n + 40; i++) {
        r[i] = 0xabcd;
        p[i] = q[i] = 0xabcd1234u;
    }
    k->round(r + 3, a, n);
    k->pair(p + 3, a, b, n);
    k->pair(q + 3, a, NULL, n);
    for (i = 0; i < n + 40; i++) {
        uint32_t low, high;
        if (i < 3 || i >= n + 3) {
            if (r[i] != 0xabcd || p[i] != 0xabcd1234u || q[i] != 0xabcd1234u) good = 0;
            continue;
        }
        low = nearest_by(k, a[i - 3]);
        high = nearest_by(k, b[i - 3]);
        if (r[i] != low || p[i] != (low | high << 16) || q[i] != low) good = 0;
    }
    CHECK(good, "%s: round or pair of %zu values", k->name, n);
    free(a);
    free(b);
    free(r);
    free(p);
    free(q);
}

static void rounding(void) {
    /* lower halves of the bits: exact, just above exact, just below the tie, the tie,
       just above the tie, the largest, and others */
    static const uint16_t low[] = {0, 1, 0x7fff, 0x8000, 0x8001, 0xffff, 0x4000, 0xc123, 0x0040};

    enum { LOWS = sizeof low / sizeof *low };

    size_t total = (size_t)65536 * LOWS, i, k, n;
    float *all = (float *)malloc(total * sizeof *all);
    long bad = 0;
    check_definition();
    for (i = 0; i < total; i++) all[i] = as_float((uint32_t)(i / LOWS) << 16 | low[i % LOWS]);
    for (i = 0; i < total; i++)
        if (as_bits(all[i]) != ((uint32_t)(i / LOWS) << 16 | low[i % LOWS])) bad++;
    CHECK(!bad, "%ld bit patterns change in memory", bad);
    for (i = 0; i < total; i++)
        if (inner_bf16(all[i]) != nearest(all[i]) && bad++ < 5)
            printf("bfloat16 of %08x: expected %04x, got %04x\n", as_bits(all[i]), nearest(all[i]),
                   inner_bf16(all[i]));
    CHECK(!bad, "bfloat16 by plain loops: %ld of %zu wrong", bad, total);
    for (k = 0; k < nb; k++) {
        round_values(bf16s + k, all, total);
        for (n = 0; n <= 70; n++) round_length(bf16s + k, all, total, n);
    }
    free(all);
}


// >>GEMM

/* The product of two bfloat16 numbers has 16 binary digits and is exact in float. As
   with f32, only the sums have errors, so the bound of gemm_check.h applies: an element
   of C is a sum of K terms below 1. Rounding changes it by at most K u times the sum,
   and in practice by about sqrt(K) u (u = 6e-8). 2 (K + 4) u (|alpha| + |beta| + 1) is
   safe. A kernel may scale C before and after the sum instead of scaling the operands,
   which adds 3 u |beta|; the bound includes this. A kernel that does not round its
   operands far exceeds the bound. */
typedef struct gemm_case {
    size_t batch, M, N, K, gap;
    int ta, tb;
    int special; /* the operands contain NaN, infinities, and numbers that round to infinity */
    double alpha, beta;
} gemm_case;

/* The operands of a case, before and after rounding to bfloat16, and the expected C. */
typedef struct gemm_data {
    float *A, *B, *C, *RA, *RB;
    double *expected, bound;
    size_t nc; /* number of elements of C, including gaps */
    stx_gemm_args g;
} gemm_data;

static void gemm_special(gemm_data *d, size_t na, size_t nb_, size_t M) {
    d->A[pick(na)] = NAN;
    d->A[pick(na)] = HUGE_VALF;
    if (M > 3) d->A[pick(na)] = 3.4e38f; /* rounds to infinity */
    d->B[pick(nb_)] = -HUGE_VALF;
    d->B[pick(nb_)] = -3.39e38f; /* close to the largest bfloat16, stays finite */
    d->B[pick(nb_)] = NAN;
}

static void gemm_open(gemm_data *d, const gemm_case *c) {
    size_t M = c->M, N = c->N, K = c->K, gap = c->gap, na, nb_, e, i, j;
    size_t ar = c->ta ? K : M, ac = c->ta ? M : K, br = c->tb ? N : K, bc = c->tb ? K : N;
    stx_gemm_args *g = &d->g;
    *g = stx_gemm_init(c->ta, c->tb, M, N, K, NULL, NULL, NULL);
    g->batch = c->batch;
    g->alpha = (float)c->alpha;
    g->beta = (float)c->beta;
    g->lda = ac + gap;
    g->ldb = bc + gap;
    g->ldc = N + gap;
    g->sa = ar * g->lda + gap;
    g->sb = gap % 2 ? 0 : br * g->ldb + gap;
    g->sc = M * g->ldc + gap;
    na = c->batch * g->sa;
    nb_ = br * g->ldb + c->batch * g->sb;
    d->nc = c->batch * g->sc;
    d->A = random_values(na);
    d->B = random_values(nb_);
    d->C = random_values(d->nc);
    if (c->special && na && nb_) gemm_special(d, na, nb_, M);
    d->RA = (float *)malloc((na + 1) * sizeof(float));
    d->RB = (float *)malloc((nb_ + 1) * sizeof(float));
    for (i = 0; i < na; i++) d->RA[i] = M > 3 ? as_float(nearest(d->A[i]) << 16) : d->A[i];
    for (i = 0; i < nb_; i++) d->RB[i] = M > 3 ? as_float(nearest(d->B[i]) << 16) : d->B[i];
    if (c->beta == 0) /* C must be overwritten, even if it is NaN */
        for (i = 0; i < d->nc; i++) d->C[i] = i % g->ldc < N ? (float)NAN : d->C[i];
    d->bound = 2 * 6e-8 * ((double)K + 4) * (fabs(c->alpha) + fabs(c->beta) + 1);
    d->expected = (double *)malloc((d->nc + 1) * sizeof(double));
    g->A = d->RA;
    g->B = d->RB;
    for (e = 0; e < c->batch; e++)
        for (i = 0; i < M; i++)
            for (j = 0; j < N; j++) {
                size_t at = e * g->sc + i * g->ldc + j;
                double sum = stx_gemm_plain(g, e, i, j);
                d->expected[at] = (c->alpha == 0 ? 0 : c->alpha * sum)
                                  + (c->beta == 0 ? 0 : c->beta * (double)d->C[at]);
            }
    g->A = d->A;
    g->B = d->B;
}

static void gemm_close(gemm_data *d) {
    free(d->A);
    free(d->B);
    free(d->C);
    free(d->RA);
    free(d->RB);
    free(d->expected);
}

static int gemm_close_enough(double got, double expected, double bound) {
    if (expected != expected) return got != got;
    if (fabs(expected) > 1e30)
        return got == expected || fabs(got - expected) <= 1e-5 * fabs(expected);
    return fabs(got - expected) <= bound;
}

/* Nonzero if the result is as expected and C's gaps are unchanged. */
static int gemm_good(const gemm_data *d, const float *got) {
    const stx_gemm_args *g = &d->g;
    float *seen = (float *)malloc((d->nc + 1) * sizeof *seen);
    size_t e, i, j;
    int good = 1;
    memcpy(seen, d->C, d->nc * sizeof *seen);
    for (e = 0; e < g->batch && good; e++)
        for (i = 0; i < g->M && good; i++)
            for (j = 0; j < g->N; j++) {
                size_t at = e * g->sc + i * g->ldc + j;
                if (!gemm_close_enough((double)got[at], d->expected[at], d->bound)) {
                    good = 0;
                    printf("at %zu %zu %zu: expected %g, got %g\n", e, i, j, d->expected[at],
                           (double)got[at]);
                    break;
                }
                seen[at] = got[at];
            }
    if (good && memcmp(seen, got, d->nc * sizeof *seen)) {
        good = 0;
        printf("a gap was written\n");
    }
    free(seen);
    return good;
}

/* Runs one case with all bf16 kernels, with one to three threads. */
static void gemm_run(const gemm_case *c) {
    gemm_data d;
    float *got, *first;
    size_t k, chosen, size = c->M * c->N * c->K * c->batch;
    gemm_open(&d, c);
    got = (float *)malloc((d.nc + 1) * sizeof *got);
    first = (float *)malloc((d.nc + 1) * sizeof *first);
    d.g.C = got;
    chosen = choose(fast_bf16s());
    for (k = 0; k < nb; k++) {
        int threads;
        if (!takes_part(bf16s + k, 0, chosen)) continue;
        if (bf16s[k].emulated && size > 300000 && (size > 3000000 || c->tb || !c->ta)) continue;
        for (threads = 1; threads <= 3; threads++) {
            stx_ctx *x = context_of(bf16s + k, threads);
            memcpy(got, d.C, d.nc * sizeof *got);
            stx_gemm(x, &d.g);
            if (threads == 1)
                memcpy(first, got, d.nc * sizeof *got);
            else
                CHECK(!memcmp(first, got, d.nc * sizeof *got),
                      "%s: %d threads change bits: batch %zu ta %d tb %d M %zu N %zu K %zu",
                      inner_name(x), threads, c->batch, c->ta, c->tb, c->M, c->N, c->K);
        }
        CHECK(gemm_good(&d, first),
              "%s: batch %zu ta %d tb %d M %zu N %zu K %zu alpha %g beta %g gap %zu special %d",
              bf16s[k].name, c->batch, c->ta, c->tb, c->M, c->N, c->K, c->alpha, c->beta, c->gap,
              c->special);
    }
    free(got);
    free(first);
    gemm_close(&d);
}

/* Runs a case. t: bit 0 transposes A, bit 1 transposes B. */
static void gemm_run_with(size_t batch, size_t t, const size_t MNK[3], double alpha, double beta,
                          size_t gap, int special) {
    gemm_case c;
    c.batch = batch;
    c.ta = t & 1;
    c.tb = (int)t >> 1 & 1;
    c.M = MNK[0];
    c.N = MNK[1];
    c.K = MNK[2];
    c.alpha = alpha;
    c.beta = beta;
    c.gap = gap;
    c.special = special;
    gemm_run(&c);
}

static const double gemm_scales[][2] = {{1, 0}, {1, 1}, {0.5, -2}, {-1, 0}, {0, 1},
                                        {0, 0}, {2, 0.25}, {-0.75, 1}, {0, -0.5}};

/* Tests small matrices. *turn counts the cases and selects their other parameters. */
static void gemm_small(size_t *turn) {
    static const size_t sizes[] = {1, 3, 4, 5, 14, 15, 17, 31, 33};
    static const size_t depths[] = {1, 2, 3, 16, 31, 32, 33, 65};
    size_t i, j, k, t, MNK[3];
    for (i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (j = 0; j < sizeof sizes / sizeof *sizes; j++)
            for (k = 0; k < sizeof depths / sizeof *depths; k++)
                for (t = 0; t < 4; t++, (*turn)++) {
                    const double *scale = gemm_scales[*turn % 9];
                    if (SLOW && (*turn * 7 + *turn / 4) % 5) continue;
                    MNK[0] = sizes[i];
                    MNK[1] = sizes[j];
                    MNK[2] = depths[k];
                    gemm_run_with(1 + *turn % 3 % 2, t, MNK, scale[0], scale[1], *turn % 5 % 3, 0);
                }
}

/* Tests matrices larger than one block along K (1024), N (768 at the largest K) and M,
   matrices with thin remainders, and shapes that are divided among threads. */
static void gemm_large(size_t *turn) {
    static const size_t shapes[][3] = {
        {170, 257, 385}, {337, 33, 800}, {17, 17, 1541}, {43, 31, 769}, {4, 513, 390},
        {400, 5, 770}, {169, 259, 97}, {65, 600, 31}, {33, 1030, 65}, {85, 85, 129},
        {2, 300, 500}, {3, 513, 390}, {1, 64, 1000}, {600, 700, 3}, {15, 33, 1025},
        {2, 129, 2050}, {20, 1000, 1024}, {2700, 16, 67}, {129, 3, 1100}};
    static const size_t packed[3] = {263, 181, 1101}, shared[3] = {17, 1003, 1024};
    size_t i, t;
    for (i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (t = 0; t < 4; t++, (*turn)++) {
            const double *scale = gemm_scales[*turn % 9];
            const size_t *MNK = shapes[i];
            if (SLOW && (*turn % 2 || MNK[0] * MNK[1] * MNK[2] > 2000000)) continue;
            gemm_run_with(1 + *turn % 2, t, MNK, scale[0], scale[1], *turn % 3, 0);
        }
    /* matrices so large that the threads pack B together; more than one block of B; one
       B for a whole batch */
    for (t = 0; t < 4 && !SLOW; t++, (*turn)++) {
        gemm_run_with(1, t, packed, t & 1 ? 1 : -0.5, (double)(t & 1), *turn % 3, 0);
        gemm_run_with(2, t, shared, 1, t & 1 ? -2 : 0, 1, 0);
    }
}

/* Tests x W^T with few rows. */
static void gemm_few_rows(size_t *turn) {
    static const size_t shapes[][3] = {
        {4, 37, 300}, {5, 1, 257}, {6, 70, 3048}, {7, 34, 2500}, {8, 35, 2061}, {9, 33, 1915},
        {10, 3, 100}, {11, 66, 256}, {12, 31, 1500}, {13, 5, 640}, {14, 131, 1171}, {15, 33, 600},
        {16, 64, 512}, {19, 7, 300}, {23, 50, 333}, {28, 41, 1300}, {14, 45, 1500},
        {15, 200, 900}, {29, 333, 1300}, {32, 137, 513}, {33, 140, 700}, {61, 530, 1100},
        {96, 1003, 560}};
    size_t i;
    for (i = 0; i < sizeof shapes / sizeof *shapes; i++, (*turn)++)
        gemm_run_with(1 + *turn % 2, 2, shapes[i], 1, (double)(*turn % 2), *turn % 3, 0);
}

static void gemms(void) {
    static const size_t cut[3] = {90, 33, 100};
    size_t turn = 0, t, MNK[3];
    gemm_small(&turn);
    gemm_large(&turn);
    gemm_few_rows(&turn);
    /* These cases add to C. With two threads, C's rows are divided inside a tile. */
    for (t = 0; t < 4; t++) gemm_run_with(1, t, cut, 1, 1, t % 3, 0);
    for (t = 0; t < (SLOW ? 80 : 400); t++) {
        size_t gap;
        MNK[0] = 1 + pick(40);
        MNK[1] = 1 + pick(40);
        MNK[2] = 1 + pick(50);
        gap = pick(3);
        gemm_run_with(1, t, MNK, t % 3 ? 1 : -0.5, t % 4 ? 0 : 1, gap, 1);
    }
    for (t = 0; t < 4; t++) { /* K = 0: C = beta C */
        MNK[0] = 5 + 30 * (t & 1);
        MNK[1] = 6;
        MNK[2] = 0;
        gemm_run_with(1, t, MNK, t & 1 ? 1 : 0.5, t & 2 ? 0 : 0.5, t, 0);
    }
}


// >>attention: cases

/* The inputs (their gradients are outputs), and the output y. */
enum { A_Q, A_K, A_V, A_PE, A_U, A_VB, A_Z, A_PK, A_PV, IN, A_Y = IN, OUT };

static const char *const out_name[OUT] = {"dq", "dk", "dv", "dpe", "du",
                                          "dvb", "dz", "dpk", "dpv", "y"};

enum { PAD_NONE, PAD_SCATTERED, PAD_BEFORE, PAD_FIRST_ROW, PAD_ALMOST_ALL };

enum { Z_NONE, Z_MIXED, Z_SHORT, Z_ONE_LONG, Z_ENDS };

typedef struct attn {
    size_t B, T, S, H, D;
    size_t P; /* rows of pe; 0 without pe */
    size_t N; /* number of persistent keys */
    int pad, z;
    int pe_heads, u, vb;
    stx_attention_desc d;
    float *data[IN], *dy; /* data[i] is NULL if the input does not exist */
    size_t size[OUT], dim[IN][4];
} attn;

/* Returns the span fraction of head h. Only with Z_ENDS is the fraction at a kink of
   the ramp. */
static float span_fraction(const attn *a, size_t h) {
    double max_span = a->d.max_span, f = 0.05 + 0.9 * (double)((h * 7 + 3) % 11) / 11;
    if (a->z == Z_ENDS) return (float)(h % 2);
    if (a->z == Z_SHORT) f = 0.03 * (double)(h % 3);
    if (a->z == Z_ONE_LONG) f = h == a->H / 2 ? 0.97 : 0.01;
    return (float)((floor(f * max_span) + 0.37) / max_span);
}

static void attn_open(attn *a) {
    size_t C = a->H * a->D, i, h, dim[IN][4] = {{0}};
    dim[A_Q][0] = dim[A_K][0] = dim[A_V][0] = a->B;
    dim[A_Q][1] = a->T;
    dim[A_K][1] = dim[A_V][1] = a->S;
    dim[A_Q][2] = dim[A_K][2] = dim[A_V][2] = C;
    if (a->P) {
        dim[A_PE][0] = a->P;
        dim[A_PE][1] = a->pe_heads ? C : a->D;
    }
    if (a->u) dim[A_U][0] = C;
    if (a->vb && a->P) dim[A_VB][0] = C;
    if (a->z) dim[A_Z][0] = a->H;
    if (a->N)
        for (i = A_PK; i <= A_PV; i++) {
            dim[i][0] = a->H;
            dim[i][1] = a->N;
            dim[i][2] = a->D;
        }
    memcpy(a->dim, dim, sizeof dim);
    a->d.heads = a->H;
    for (i = 0; i < IN; i++) {
        size_t n = dim[i][0], k;
        for (k = 1; k < 4 && dim[i][k]; k++) n *= dim[i][k];
        a->size[i] = n;
        a->data[i] = n ? random_values(n) : NULL;
    }
    for (h = 0; a->z && h < a->H; h++) a->data[A_Z][h] = span_fraction(a, h);
    a->size[A_Y] = a->size[A_Q];
    a->dy = random_values(a->size[A_Y]);
}

/* Nonzero if key j of batch row b is padded. */
static int is_padded(const attn *a, size_t b, size_t j) {
    switch (a->pad) {
    case PAD_SCATTERED: return (j * j + 3 * b) % 5 < 2;
    case PAD_BEFORE: return j < a->S * (b + 1) / 3;
    case PAD_FIRST_ROW: return b == 0 || j % 2;
    case PAD_ALMOST_ALL: return j % 83 != b + 1;
    default: return 0;
    }
}

static void attn_close(attn *a) {
    size_t i;
    for (i = 0; i < IN; i++) free(a->data[i]);
    free(a->dy);
}

static const char *attn_label(const attn *a) {
    static char t[400];
    const char *pe = a->pe_heads ? " per head" : " shared";
    snprintf(t, sizeof t,
             "B %zu T %zu S %zu H %zu D %zu P %zu%s%s%s z %d N %zu dmin %d span %zu eps %g "
             "first %ld%s scale %g L %g R %g drop %g pad %d",
             a->B, a->T, a->S, a->H, a->D, a->P, a->P ? pe : "", a->u ? " u" : "",
             a->vb ? " vb" : "", a->z, a->N, a->d.delta_min, a->d.span, a->d.eps,
             (long)a->d.first_key, a->d.not_causal ? " not causal" : "", a->d.scale, a->d.max_span,
             a->d.ramp, a->d.dropout, a->pad);
    return t;
}

static float **outputs(const attn *a) {
    float **o = (float **)calloc(OUT, sizeof *o);
    size_t i;
    for (i = 0; i < OUT; i++) o[i] = (float *)calloc(a->size[i] + 1, sizeof **o);
    return o;
}

static void outputs_free(float **o) {
    size_t i;
    for (i = 0; i < OUT; i++) free(o[i]);
    free(o);
}

/* Computes y and all gradients with the op. Every call draws the same dropout masks. */
static int attn_run(stx_ctx *x, const attn *a, float **out) {
    stx_attention_in in;
    stx_tensor *t[OUT] = {NULL};
    size_t i;
    memset(&in, 0, sizeof in);
    stx_set_step_index(x, 4);
    stx_begin(x, STX_TRAIN);
    for (i = 0; i < IN; i++) {
        const size_t *dim = a->dim[i];
        if (a->data[i]) t[i] = stx_variable(x, a->data[i], dim[0], dim[1], dim[2], dim[3]);
    }
    in.q = t[A_Q];
    in.k = t[A_K];
    in.v = t[A_V];
    in.pe = t[A_PE];
    in.content_bias = t[A_U];
    in.position_bias = t[A_VB];
    in.span_fraction = t[A_Z];
    in.persistent_k = t[A_PK];
    in.persistent_v = t[A_PV];
    if (a->pad) {
        int32_t *pad = (int32_t *)calloc(a->B * a->S, sizeof *pad);
        for (i = 0; i < a->B * a->S; i++) pad[i] = is_padded(a, i / a->S, i % a->S);
        in.pad = stx_tokens(x, pad, a->B, a->S);
        free(pad);
    }
    t[A_Y] = stx_attention(x, &in, &a->d);
    stx_backward_from(x, t[A_Y], a->dy);
    CHECK(stx_ok(x), "%s: %s", attn_label(a), stx_error(x));
    if (!stx_ok(x)) {
        stx_clear_error(x);
        return 0;
    }
    for (i = 0; i < IN; i++)
        if (t[i] && t[i]->grad) memcpy(out[i], t[i]->grad, a->size[i] * sizeof(float));
    memcpy(out[A_Y], t[A_Y]->data, a->size[A_Y] * sizeof(float));
    return 1;
}

static int same_bits(const attn *a, float **p, float **q) {
    size_t i;
    for (i = 0; i < OUT; i++)
        if (memcmp(p[i], q[i], a->size[i] * sizeof **p)) return 0;
    return 1;
}

/* Error bounds, relative to the largest element of an output or, where the terms of an
   output cancel, to units[i] (unless NULL). In practice, f32 errors are below 2e-6.
   DENSE    f32 against the dense reference: sums of up to 1100 terms below e^s, each
            rounded by 6e-8
   F32      f32 kernels against each other: different orders of sums, fused or not
   THREADS  different numbers of threads: different orders of sums
   ROUNDED  bf16 against f32: each factor has an error of up to 2^-9 = 2e-3, and so does
            each weight, because of its logit
   KERNELS  bf16 kernels against each other: q, k, v, pe and dy are rounded equally, but
            weights and ds close to a tie may be rounded either way
   These bounds are tripled for dz: its terms contain the logits and dy.y of a row,
   whose errors change all terms of the row in the same direction. */
static const double DENSE = 5e-6, F32 = 5e-6, THREADS = 1e-6, ROUNDED = 2e-2, KERNELS = 2e-3;

/* Indices of the largest errors seen, which are printed at the end. */
enum {
    WORST_DENSE,
    WORST_F32,
    WORST_ROUNDED,
    WORST_KERNELS,
    WORST_THREADS,
    WORST_BF16_THREADS,
    WORST_LOSS,
    WORSTS
};

static double worst_seen[WORSTS];

static void attn_compare(const attn *a, float **got, float **expected, const double *units,
                         double tol, int meter, const char *name, const char *reference) {
    size_t i;
    for (i = 0; i < OUT; i++) {
        double e = error_of(got[i], expected[i], a->size[i], units ? units[i] : 0);
        if (e > worst_seen[meter]) worst_seen[meter] = e;
        CHECK(e <= (i == A_Z ? 3 * tol : tol), "%s of %s against %s: error %.2e: %s", out_name[i],
              name, reference, e, attn_label(a));
    }
}

/* Returns the arguments that stx_attention would pass to its kernels. pad: (B,S). */
static stx_attention_args attn_args(const attn *a, const int32_t *pad) {
    stx_attention_args g;
    memset(&g, 0, sizeof g);
    g.B = a->B;
    g.T = a->T;
    g.S = a->S;
    g.H = a->H;
    g.D = a->D;
    g.P = a->P;
    g.N = a->N;
    g.pe_heads = a->pe_heads ? (int)a->H : 1;
    g.q_row_stride = g.kv_row_stride = a->H * a->D;
    g.q_batch_stride = a->T * g.q_row_stride;
    g.kv_batch_stride = a->S * g.kv_row_stride;
    g.span = a->S + (a->d.first_key < 0 ? (size_t)-a->d.first_key : 0);
    if (a->d.span && a->d.span < g.span) g.span = a->d.span;
    /* keys without a row of pe are ignored */
    if (a->P && g.span > a->P + (size_t)a->d.delta_min - 1)
        g.span = a->P + (size_t)a->d.delta_min - 1;
    g.delta_min = a->d.delta_min;
    g.not_causal = a->d.not_causal;
    g.first_key = a->d.first_key;
    g.scale = (float)(a->d.scale != 0 ? a->d.scale : 1 / sqrt((double)a->D));
    g.max_span = (float)a->d.max_span;
    g.ramp = (float)a->d.ramp;
    g.eps = (float)a->d.eps;
    g.q = a->data[A_Q];
    g.k = a->data[A_K];
    g.v = a->data[A_V];
    g.pe = a->data[A_PE];
    g.content_bias = a->data[A_U];
    g.position_bias = a->data[A_VB];
    g.span_fraction = a->data[A_Z];
    g.persistent_k = a->data[A_PK];
    g.persistent_v = a->data[A_PV];
    if (pad) {
        g.pad = pad;
        g.pad_batch_stride = a->S;
    }
    return g;
}


// >>attention: dense reference

/* Results and gradients of the plain definition, in double, without dropout. m is the
   span's mask, w = stx_attention_weights, a = m w and y = sum a v:

       g_n  = dy . v_n
       G    = sum a g
       ds_n = a_n g_n - G (m_n + eps) w_n
       dm_n = w_n (g_n - G)
       dz   = L / R sum of dm_n over all n with 0 <= m'_n <= 1   (m' = m before clamping)

   If the terms of an output i cancel (with a single key, ds = 0), its errors are
   relative to units[i]: the largest value, over all elements of the output, of the root
   of the sum of squared terms, where g and G are counted as separate terms. */
typedef struct sums {
    double *sum, *squares;
} sums;

typedef struct dense_work {
    const attn *a;
    stx_attention_args args;
    size_t C, zero, W;  /* C: channels; zero: number of zero keys before the sequence; W:
                           keys per query */
    double *w, *um, *g; /* (W): weights, m', g_n */
    int32_t *pad;       /* (B,S) */
    sums out[OUT];
} dense_work;

/* The position of one query or key. */
typedef struct dense_at {
    size_t b, h, i;
    ptrdiff_t j; /* key index: persistent if S or more, a zero key before the sequence if
                    negative */
} dense_at;

static double ramp(double um) {
    if (um < 0) return 0;
    return um > 1 ? 1 : um;
}

/* Adds a term to an element. size: the magnitude that the term would have if its parts
   did not cancel. */
static void term(sums s, size_t at, double value, double size) {
    s.sum[at] += value;
    s.squares[at] += size * size;
}

static dense_work dense_open(const attn *a) {
    dense_work d;
    size_t i;
    d.a = a;
    d.C = a->H * a->D;
    d.zero = a->d.first_key < 0 ? (size_t)-a->d.first_key : 0;
    d.W = d.zero + a->S + a->N;
    d.w = (double *)calloc(3 * d.W, sizeof(double));
    d.um = d.w + d.W;
    d.g = d.w + 2 * d.W;
    d.pad = (int32_t *)calloc(a->B * a->S, sizeof *d.pad);
    for (i = 0; i < a->B * a->S; i++) d.pad[i] = is_padded(a, i / a->S, i % a->S);
    d.args = attn_args(a, d.pad);
    for (i = 0; i < OUT; i++) {
        d.out[i].sum = (double *)calloc(a->size[i] + 1, sizeof(double));
        d.out[i].squares = (double *)calloc(a->size[i] + 1, sizeof(double));
    }
    return d;
}

/* The three functions below return the offset of the first element of a query, of a key
   or value, and of a persistent key or value. */
static size_t dense_query(const dense_work *d, dense_at p) {
    return (p.b * d->a->T + p.i) * d->C + p.h * d->a->D;
}

static size_t dense_key(const dense_work *d, dense_at p) {
    return (p.b * d->a->S + (size_t)p.j) * d->C + p.h * d->a->D;
}

static size_t dense_persistent(const dense_work *d, dense_at p) {
    return (p.h * d->a->N + (size_t)p.j - d->a->S) * d->a->D;
}

/* Adds the contribution of key n to y, dv, dpv and g. */
static void dense_value(dense_work *d, dense_at p, size_t n) {
    const attn *a = d->a;
    int persistent = p.j >= (ptrdiff_t)a->S;
    size_t q = dense_query(d, p), at, c;
    const float *v, *dy = a->dy + q;
    sums dv = d->out[persistent ? A_PV : A_V];
    double f = persistent ? sqrt((double)a->N) : 1, weight = ramp(d->um[n]) * d->w[n];
    d->g[n] = 0;
    if (!(d->w[n] > 0) || p.j < 0) return;
    at = persistent ? dense_persistent(d, p) : dense_key(d, p);
    v = a->data[persistent ? A_PV : A_V] + at;
    for (c = 0; c < a->D; c++) {
        double y = weight * f * (double)v[c], t = weight * f * (double)dy[c];
        term(d->out[A_Y], q + c, y, y);
        term(dv, at + c, t, t);
        d->g[n] += f * (double)dy[c] * (double)v[c];
    }
}

/* Adds the contribution of a persistent key to dq and dpk. */
static void dense_logit_persistent(dense_work *d, dense_at p, double ds, double size) {
    const attn *a = d->a;
    size_t row = dense_query(d, p), at = dense_persistent(d, p), c;
    double f = sqrt((double)a->D);
    for (c = 0; c < a->D; c++) {
        double pk = f * (double)a->data[A_PK][at + c], q = f * (double)a->data[A_Q][row + c];
        term(d->out[A_Q], row + c, ds * pk, size * pk);
        term(d->out[A_PK], at + c, ds * q, size * q);
    }
}

/* Adds the contribution of a key to dq, dk, du, dpe and dvb. */
static void dense_logit(dense_work *d, dense_at p, double ds, double size) {
    const attn *a = d->a;
    size_t row = dense_query(d, p), head = p.h * a->D, at, c;
    const float *q = a->data[A_Q] + row, *u = a->data[A_U], *vb = a->data[A_VB];
    for (c = 0; p.j >= 0 && c < a->D; c++) {
        double k, qu = (double)q[c] + (u ? (double)u[head + c] : 0);
        at = dense_key(d, p) + c;
        k = (double)a->data[A_K][at];
        term(d->out[A_Q], row + c, ds * k, size * k);
        if (u) term(d->out[A_U], head + c, ds * k, size * k);
        term(d->out[A_K], at, ds * qu, size * qu);
    }
    for (c = 0; a->P && c < a->D; c++) {
        ptrdiff_t distance = (ptrdiff_t)(a->S - a->T + p.i) - p.j;
        size_t pos = (size_t)((ptrdiff_t)a->P - 1 + a->d.delta_min - distance);
        double pe, qv = (double)q[c] + (vb ? (double)vb[head + c] : 0);
        at = a->pe_heads ? pos * d->C + head + c : pos * a->D + c;
        pe = (double)a->data[A_PE][at];
        term(d->out[A_Q], row + c, ds * pe, size * pe);
        if (vb) term(d->out[A_VB], head + c, ds * pe, size * pe);
        term(d->out[A_PE], at, ds * qv, size * qv);
    }
}

/* Computes the gradients of the logit of key n and of the span. G: the sum of `a g`
   over all keys. */
static void dense_gradient(dense_work *d, dense_at p, size_t n, double G) {
    const attn *a = d->a;
    double w = d->w[n], g = d->g[n], m = ramp(d->um[n]), scale = (double)d->args.scale;
    double ds = scale * w * (m * g - G * (m + a->d.eps));
    double size = fabs(scale) * w * (m * fabs(g) + fabs(G) * (m + a->d.eps));
    if (!(w > 0)) return;
    if (p.j >= (ptrdiff_t)a->S) {
        dense_logit_persistent(d, p, ds, size);
        return;
    }
    dense_logit(d, p, ds, size);
    if (a->z && d->um[n] >= 0 && d->um[n] <= 1) {
        double f = a->d.max_span / a->d.ramp * w;
        term(d->out[A_Z], p.h, f * (g - G), f * (fabs(g) + fabs(G)));
    }
}

/* Adds the contributions of all keys of one query to y and to the gradients. */
static void dense_row(dense_work *d, dense_at p) {
    double G = 0;
    size_t n;
    stx_attention_weights(&d->args, p.b, p.h, p.i, d->w, d->um);
    for (n = 0; n < d->W; n++) {
        p.j = (ptrdiff_t)n - (ptrdiff_t)d->zero;
        dense_value(d, p, n);
        if (d->w[n] > 0) G += ramp(d->um[n]) * d->w[n] * d->g[n];
    }
    for (n = 0; n < d->W; n++) {
        p.j = (ptrdiff_t)n - (ptrdiff_t)d->zero;
        dense_gradient(d, p, n, G);
    }
}

static void dense(const attn *a, float **out, double *units) {
    dense_work d = dense_open(a);
    dense_at p;
    size_t o, i;
    p.j = 0;
    for (p.b = 0; p.b < a->B; p.b++)
        for (p.h = 0; p.h < a->H; p.h++)
            for (p.i = 0; p.i < a->T; p.i++) dense_row(&d, p);
    for (o = 0; o < OUT; o++) {
        units[o] = 0;
        for (i = 0; i < a->size[o]; i++) {
            double root = sqrt(d.out[o].squares[i]);
            out[o][i] = (float)d.out[o].sum[i];
            if (root > units[o]) units[o] = root;
        }
        free(d.out[o].sum);
        free(d.out[o].squares);
    }
    free(d.w);
    free(d.pad);
}


// >>attention: tests

/* Runs one case with all kernels. */
static void attn_case(attn *a) {
    float **expected, **ref, **got, **again, **first = NULL;
    double units[OUT];
    const char *best = f32s[nf - 1].name, *first_name = NULL;
    const size_t chosen = choose(nf), chosen_bf16 = choose(fast_bf16s());
    size_t k;
    attn_open(a);
    expected = outputs(a);
    ref = outputs(a);
    got = outputs(a);
    again = outputs(a);
    if (!attn_run(context_of(f32s + nf - 1, 1), a, ref)) return;
    dense(a, expected, units);
    if (a->d.dropout == 0)
        attn_compare(a, ref, expected, units, DENSE, WORST_DENSE, best, "the dense reference");
    for (k = 0; k + 1 < nf; k++)
        if (takes_part(f32s + k, chosen, chosen_bf16) && attn_run(context_of(f32s + k, 2), a, got))
            attn_compare(a, got, ref, units, F32, WORST_F32, f32s[k].name, best);
    for (k = 0; k < nb; k++) {
        const kernel *m = bf16s + k;
        if (!takes_part(m, chosen, chosen_bf16)) continue;
        if (m->emulated && a->B * a->H * a->T * a->S * ((a->D + 31) / 32) > 300000) continue;
        if (!attn_run(context_of(m, 2), a, got)) continue;
        attn_compare(a, got, ref, units, ROUNDED, WORST_ROUNDED, m->name, best);
        CHECK(a->T <= 3 || error_of(got[A_Y], ref[A_Y], a->size[A_Y], units[A_Y]) > 1e-6
                  || units[A_Y] == 0,
              "%s: y is that of f32, nothing was rounded: %s", m->name, attn_label(a));
        if (first)
            attn_compare(a, got, first, units, KERNELS, WORST_KERNELS, m->name, first_name);
        attn_run(context_of(m, 2), a, again);
        CHECK(same_bits(a, got, again), "%s: two runs differ: %s", m->name, attn_label(a));
        if (!first) {
            first = got;
            first_name = m->name;
            got = outputs(a);
        }
    }
    outputs_free(expected);
    outputs_free(ref);
    outputs_free(got);
    outputs_free(again);
    if (first) outputs_free(first);
    attn_close(a);
}

/* The number of threads may change only the order of sums. Runs with the same number of
   threads must be bit-identical. */
static void attn_threads(attn *a, const kernel *k, double tol, int meter) {
    static const int counts[] = {1, 2, 3, 5};
    float **ref, **got, **again;
    double units[OUT]; /* needed because du and dvb cancel: the ds of a query add up to 0 */
    size_t i;
    attn_open(a);
    ref = outputs(a);
    got = outputs(a);
    again = outputs(a);
    dense(a, ref, units);
    for (i = 0; i < 4; i++) {
        stx_ctx *x = context_of(k, counts[i]);
        if (!attn_run(x, a, i ? got : ref) || !attn_run(x, a, again)) continue;
        CHECK(same_bits(a, i ? got : ref, again), "%s, %d threads: two runs differ: %s", k->name,
              counts[i], attn_label(a));
        if (i) attn_compare(a, got, ref, units, tol, meter, k->name, "one thread");
    }
    outputs_free(ref);
    outputs_free(got);
    outputs_free(again);
    attn_close(a);
}

static attn plain(size_t B, size_t T, size_t S, size_t H, size_t D) {
    attn a;
    memset(&a, 0, sizeof a);
    a.B = B;
    a.T = T;
    a.S = S;
    a.H = H;
    a.D = D;
    a.d.max_span = 150;
    a.d.ramp = 32;
    return a;
}

static attn random_attn(size_t turn) {
    static const size_t Ts[] = {1,  2,  3,   5,   17,  31,  32,  33, 63,
                                64, 65, 100, 128, 129, 200, 256, 300},
                        more[] = {0, 0, 1, 31, 33, 100, 256, 300},
                        Ds[] = {1, 2, 3, 5, 8, 13, 16, 24, 31, 33, 47, 64, 65},
                        Ns[] = {0, 0, 0, 1, 7, 33, 260};
    static const double ramps[] = {1, 8, 32, 70}, epss[] = {0, 0, 1e-3, 1e-8},
                        spans[] = {20, 77, 150, 400};
    static const ptrdiff_t firsts[] = {0, 0, 0, -1, -40, -300, 3, 37};
    attn a;
    for (;;) {
        size_t T = Ts[SLOW ? pick(13) : turn % 17], D = Ds[pick(13)], B = 1 + pick(2),
               H = 1 + pick(4), S = T + more[pick(8)];
        /* The sizes are not drawn in the arguments of this call, because compilers
           evaluate arguments in different orders. */
        a = plain(B, T, S, H, D);
        if (a.B * a.H * a.T * a.S * (a.D + 20) <= (SLOW ? 1500000u : 12000000u)) break;
    }
    a.N = Ns[pick(7)];
    a.u = pick(3) == 0;
    a.d.scale = pick(4) ? 0 : 0.21;
    a.d.dropout = pick(3) ? 0 : 0.3;
    if (pick(8) == 0) {
        a.d.not_causal = 1;
        if (pick(2)) a.d.first_key = (ptrdiff_t)pick(a.S);
        return a;
    }
    a.z = (int)pick(5);
    a.d.max_span = spans[pick(4)];
    a.d.ramp = ramps[pick(4)];
    /* A steeper ramp could leave a query only one key, whose ds is just a rounding
       error. */
    if (a.z > Z_MIXED && a.d.ramp < 8) a.d.ramp = 8;
    a.d.delta_min = (int)pick(2);
    a.d.eps = epss[pick(4)];
    a.d.span = pick(3) ? 0 : 1 + pick(150);
    a.d.first_key = firsts[pick(8)];
    if (pick(3)) {
        a.P = pick(2) ? 1 + pick(220) : a.S + 50;
        a.pe_heads = (int)pick(2);
        a.vb = pick(3) == 0;
    }
    return a;
}

static void attention(void) {
    size_t i;
    test_state = 4242424242u;
    for (i = 0; i < (SLOW ? 60 : 200); i++) {
        attn a = random_attn(i);
        attn_case(&a);
    }
}

/* Tests one long head among short ones, with windows that are much longer than the
   spans. The long head's keys are divided into several work units. */
static void attention_cut(void) {
    size_t i;
    for (i = 0; i < (SLOW ? 2 : 6); i++) {
        attn a = plain(1 + i % 2, i % 3 ? 70 : 129, 1500, 4, i % 2 ? 9 : 16);
        stx_attention_args args;
        size_t units;
        float z[4] = {0.01f, 0.01f, 0.97f, 0.01f};
        size_t k;
        a.z = Z_ONE_LONG;
        a.d.max_span = 1400;
        a.P = i % 3 == 1 ? 0 : 1450;
        a.pe_heads = i % 2;
        a.N = i % 2 ? 40 : 0;
        a.u = i > 2;
        a.vb = i > 2;
        a.d.dropout = i == 4 ? 0.2 : 0;
        a.d.delta_min = i % 2;
        memset(&args, 0, sizeof args);
        args.B = a.B;
        args.T = a.T;
        args.S = args.span = a.S;
        args.H = a.H;
        args.D = a.D;
        args.P = 1450;
        args.pe_heads = 1;
        args.max_span = 1400;
        args.ramp = 32;
        args.span_fraction = z;
        args.N = a.N;
        units = inner_attention_units(context_of(f32s, 2), &args, 2, 1);
        CHECK(units > a.B * a.H, "no head is divided: %zu work units", units);
        attn_case(&a);
        for (k = 0; k < nf; k++)
            if (!SLOW || k == i % nf) attn_threads(&a, f32s + k, THREADS, WORST_THREADS);
        if (!SLOW)
            for (k = 0; k < nb; k++) attn_threads(&a, bf16s + k, KERNELS, WORST_BF16_THREADS);
    }
}

/* Checks how keys are divided into work units, for any number of threads: one head of
   3072 keys must give eight units, and one head shorter than a tile must give one. */
static void attention_units(void) {
    static const size_t threads[] = {1, 2, 7};
    stx_ctx *x = context_of(f32s, 2);
    stx_attention_args g;
    size_t units, i;
    memset(&g, 0, sizeof g);
    g.B = g.H = 1;
    g.T = 64;
    g.D = 8;
    for (i = 0; i < 3; i++) {
        g.S = g.span = 3072;
        units = inner_attention_units(x, &g, threads[i], 1);
        CHECK(units == 8, "3072 keys, %zu threads: expected 8 units, got %zu", threads[i], units);
        g.S = g.span = 300;
        units = inner_attention_units(x, &g, threads[i], 1);
        CHECK(units == 1, "300 keys, %zu threads: expected 1 unit, got %zu", threads[i], units);
    }
}

/* Calls the kernels with dropout, without queries (T = 0) or without streams (B = 0).
   Without queries, dk must be set to 0; without streams, dk must not be written. */
static void attention_empty(void) {
    enum { S = 40, D = 8 };
    static const size_t BT[][2] = {{1, 0}, {0, S}};
    size_t i, k, e;
    for (k = 0; k < nf + nb; k++)
        for (i = 0; i < 2; i++) {
            stx_ctx *x = context_of(kernel_at(k), 2);
            float in[S * D] = {0}, dk[S * D], row[S];
            stx_attention_args g;
            int back, good = 1;
            memset(&g, 0, sizeof g);
            g.B = BT[i][0];
            g.T = BT[i][1];
            g.S = g.span = S;
            g.H = 1;
            g.D = D;
            g.scale = 1;
            g.drop = 0.5f;
            g.q_row_stride = g.kv_row_stride = D;
            g.q_batch_stride = g.kv_batch_stride = S * D;
            g.q = g.k = g.v = g.dy = in;
            g.y = in;
            g.row_max = g.inv_sum = row;
            g.dk = dk;
            g.overwrite = STX_OVERWRITE_DK;
            for (e = 0; e < S * D; e++) dk[e] = 1;
            for (back = 0; back < 2; back++) {
                g.work = malloc(stx_attention_work(x, &g, back) + 1);
                if (back)
                    stx_attention_bwd(x, &g);
                else
                    stx_attention_fwd(x, &g);
                free(g.work);
            }
            for (e = 0; e < S * D; e++) good &= dk[e] == (g.B ? 0 : 1);
            CHECK(stx_ok(x) && good, "%s: B %zu T %zu: wrong dk", inner_name(x), g.B, g.T);
        }
}

/* Nonzero if a key must be ignored, because it is padded or before first_key. */
static int is_ignored(const attn *a, size_t b, size_t j) {
    return (a->d.first_key > 0 && j < (size_t)a->d.first_key) || is_padded(a, b, j);
}

/* Sets all ignored keys and values to `value`. */
static void set_ignored(const attn *a, float value) {
    size_t C = a->H * a->D, j, c;
    for (j = 0; j < a->B * a->S; j++)
        for (c = 0; c < C && is_ignored(a, j / a->S, j % a->S); c++)
            a->data[A_K][j * C + c] = a->data[A_V][j * C + c] = value;
}

/* Ignored keys must not change any bit of the results, even if they are NaN. The
   gradients of ignored keys must be 0. */
static void attn_ignored(const attn *a, const char *what) {
    size_t C = a->H * a->D, k, j, c;
    for (k = 0; k < nf + nb; k++) {
        stx_ctx *x = context_of(kernel_at(k), 2);
        float **zeros = outputs(a), **nans = outputs(a);
        int good = 1;
        set_ignored(a, 0);
        attn_run(x, a, zeros);
        set_ignored(a, (float)NAN);
        attn_run(x, a, nans);
        CHECK(same_bits(a, zeros, nans), "%s: %s keys have an effect: %s", inner_name(x), what,
              attn_label(a));
        for (j = 0; j < a->B * a->S; j++)
            for (c = 0; c < C && is_ignored(a, j / a->S, j % a->S); c++)
                if (nans[A_K][j * C + c] != 0 || nans[A_V][j * C + c] != 0) good = 0;
        CHECK(good, "%s: gradients of %s keys are not 0: %s", inner_name(x), what, attn_label(a));
        outputs_free(zeros);
        outputs_free(nans);
    }
}

/* Keys before first_key must be treated as if they did not exist. */
static void attention_missing_keys(void) {
    static const ptrdiff_t firsts[] = {1, 2, 13, 31, 32, 33, 127, 128, 256, 383, 384, 385};
    size_t i;
    for (i = 0; i < 24; i++) {
        ptrdiff_t first = firsts[i / 2];
        attn a = plain(1 + i % 2, 70, 70 + (size_t)first + 5 * (i % 3), 2, i % 3 ? 7 : 33);
        a.d.first_key = first;
        a.z = i % 2 ? Z_MIXED : Z_NONE;
        a.P = i % 4 == 1 ? 0 : a.S;
        a.N = i % 3;
        a.d.max_span = 400;
        a.d.eps = i % 5 ? 0 : 1e-3;
        attn_open(&a);
        if (!SLOW || i % 4 == 0) attn_ignored(&a, "missing");
        attn_close(&a);
    }
}

/* Tests short segments, and tiles that are wider than the number of persistent keys.
   Several work units in succession use the same work space. */
static void attention_margins(void) {
    size_t i;
    test_state = 4711;
    for (i = 0; i < 6; i++) {
        attn a = plain(1 + i % 2, 8 + 9 * (i / 2), 8 + 9 * i, 3, 16);
        a.N = 40 + 33 * (i % 3);
        a.P = a.S + 5;
        a.pe_heads = (int)(i % 2);
        a.u = a.vb = i > 2;
        attn_case(&a);
    }
}

/* Repeats the random cases with padded keys, which are NaN. */
static void attention_pads(void) {
    size_t i;
    test_state = 777;
    for (i = 0; i < (SLOW ? 16 : 60); i++) {
        attn a = random_attn(i);
        a.pad = PAD_SCATTERED + (int)(i % 4);
        attn_case(&a);
    }
    for (i = 0; i < 16; i++) {
        attn a = plain(2, i % 3 ? 70 : 2, 301, 2, i % 3 ? 7 : 33);
        a.pad = PAD_SCATTERED + (int)(i / 4);
        a.z = i % 2 ? Z_MIXED : Z_NONE;
        a.P = i % 4 == 1 ? 0 : a.S;
        a.N = i % 3;
        a.d.max_span = 400;
        a.d.eps = i % 5 ? 0 : 1e-3;
        a.d.first_key = i % 4 == 3 ? -40 : 0;
        attn_open(&a);
        if (!SLOW || i % 4 == 0) attn_ignored(&a, "padded");
        attn_close(&a);
    }
}

/* Tests numbers of queries and keys near tile borders: 32, 64 and 128 queries, 384
   keys, and groups of 512 keys. */
static void attention_borders(void) {
    static const size_t Ts[] = {63, 64, 65, 127, 129, 511, 512, 513},
                        more[] = {0, 1, 31, 33, 255, 257, 383, 384, 600};
    size_t i, j, turn = 0;
    for (i = 0; i < 8; i++)
        for (j = 0; j < 9; j++, turn++) {
            attn a = plain(1, Ts[i], Ts[i] + more[j], 1 + turn % 2, turn % 3 ? 5 : 8);
            if (SLOW && (Ts[i] > 129 ? turn % 7 : turn % 3)) continue;
            a.P = turn % 5 == 4 ? 100 : a.S + 1;
            if (turn % 4 == 3) a.P = 0;
            a.pe_heads = turn % 3 == 1;
            a.z = turn % 2 ? Z_MIXED : Z_NONE;
            a.d.max_span = turn % 4 == 1 ? 1000 : 200;
            a.d.delta_min = (int)(turn / 2 % 2);
            a.u = a.vb = turn % 7 == 2;
            a.d.eps = turn % 11 == 7 ? 1e-3 : 0;
            a.d.first_key = turn % 13 == 5 ? -33 : 0;
            attn_case(&a);
            if (turn % (SLOW ? 11 : 4) == 0)
                attn_threads(&a, f32s + turn % nf, THREADS, WORST_THREADS);
        }
}


// >>red zones

/* The tests of this section call the kernels directly, with gaps between rows and
   between batches. Each operand is either in a block that ends where its values end, so
   that the address sanitizer detects accesses beyond it, or between zones that must be
   neither read nor written. Results must not depend on the zones or on the initial
   content of the work space. */
enum { ZONE = 300 };

enum { EXACT, ZONES_NAN, ZONES_ZERO, MODES }; /* what the zones and the work space contain */

typedef struct zoned {
    float *base, *at;
    size_t n, zone;
} zoned;

static float zone_value; /* NaN or 0 */

static zoned zone(size_t n, int exact) {
    zoned z;
    size_t i;
    z.n = n;
    z.zone = exact ? 0 : ZONE;
    z.base = (float *)malloc((n + 2 * z.zone) * sizeof *z.base + (n + z.zone == 0));
    z.at = z.base + z.zone;
    for (i = 0; i < n + 2 * z.zone; i++) z.base[i] = zone_value;
    return z;
}

static int zone_whole(const zoned *z) {
    size_t i;
    for (i = 0; i < z->zone; i++)
        if (memcmp(z->base + i, &zone_value, 4) || memcmp(z->at + z->n + i, &zone_value, 4))
            return 0;
    return 1;
}

/* The outputs of a direct call: y, row_max, inv_sum, then the gradients, without gaps. */
enum { RAW_Y, RAW_MAX, RAW_INV, RAW_GRAD, RAW = RAW_GRAD + IN };

static size_t raw_size(const attn *a, size_t i) {
    if (i >= RAW_GRAD) return a->size[i - RAW_GRAD];
    return i == RAW_Y ? a->size[A_Y] : a->B * a->H * a->T;
}

static float **raw_outputs(const attn *a) {
    float **o = (float **)calloc(RAW, sizeof *o);
    size_t i;
    for (i = 0; i < RAW; i++) o[i] = (float *)calloc(raw_size(a, i) + 1, sizeof **o);
    return o;
}

static void raw_free(float **o) {
    size_t i;
    for (i = 0; i < RAW; i++) free(o[i]);
    free(o);
}

/* The strides of an input. q, k and v have gaps. */
typedef struct layout {
    size_t rows, row_stride, batch_stride;
} layout;

typedef struct direct_call {
    const attn *a;
    stx_ctx *x;
    int exact;
    layout q, kv;
    zoned in[IN], grad[IN], y, row_max, inv_sum, dy;
    stx_attention_args args;
} direct_call;

static const layout *layout_of(const direct_call *c, size_t i) {
    return i == A_Q ? &c->q : &c->kv;
}

/* Sets up input i and its gradient. Kernels add to gradients, so the initial values are
   1. */
static void direct_input(direct_call *c, size_t i) {
    const attn *a = c->a;
    const layout *l = layout_of(c, i);
    size_t C = a->H * a->D, n = a->size[i], b, r, k;
    if (i <= A_V) n = (a->B - 1) * l->batch_stride + (l->rows - 1) * l->row_stride + C;
    if (!a->data[i]) n = 0;
    c->in[i] = zone(n, c->exact);
    c->grad[i] = zone(n, c->exact);
    if (!a->data[i]) return;
    if (i > A_V) {
        memcpy(c->in[i].at, a->data[i], n * sizeof(float));
        for (k = 0; k < n; k++) c->grad[i].at[k] = 1;
        return;
    }
    for (b = 0; b < a->B; b++)
        for (r = 0; r < l->rows; r++)
            for (k = 0; k < C; k++) {
                size_t at = b * l->batch_stride + r * l->row_stride + k;
                c->in[i].at[at] = a->data[i][(b * l->rows + r) * C + k];
                c->grad[i].at[at] = 1;
            }
}

static void direct_open(direct_call *c, stx_ctx *x, const attn *a, size_t gap, int mode) {
    size_t C = a->H * a->D, i;
    stx_attention_args *g = &c->args;
    zone_value = mode == ZONES_NAN ? (float)NAN : 0;
    c->a = a;
    c->x = x;
    c->exact = mode == EXACT;
    c->q.rows = a->T;
    c->q.row_stride = C + gap;
    c->q.batch_stride = a->T * c->q.row_stride + gap;
    c->kv.rows = a->S;
    c->kv.row_stride = C + 2 * gap;
    c->kv.batch_stride = a->S * c->kv.row_stride + 3 * gap;
    for (i = 0; i < IN; i++) direct_input(c, i);
    c->y = zone(a->B * a->T * C, c->exact);
    c->row_max = zone(a->B * a->H * a->T, c->exact);
    c->inv_sum = zone(a->B * a->H * a->T, c->exact);
    c->dy = zone(a->B * a->T * C, c->exact);
    memcpy(c->dy.at, a->dy, a->B * a->T * C * sizeof(float));
    *g = attn_args(a, NULL);
    g->q_row_stride = c->q.row_stride;
    g->q_batch_stride = c->q.batch_stride;
    g->kv_row_stride = c->kv.row_stride;
    g->kv_batch_stride = c->kv.batch_stride;
    g->drop = (float)a->d.dropout;
    g->seed = 11;
    g->stream = 77;
    g->q = c->in[A_Q].at;
    g->k = c->in[A_K].at;
    g->v = c->in[A_V].at;
    if (a->data[A_PE]) g->pe = c->in[A_PE].at;
    if (a->data[A_U]) g->content_bias = c->in[A_U].at;
    if (a->data[A_VB]) g->position_bias = c->in[A_VB].at;
    if (a->data[A_Z]) g->span_fraction = c->in[A_Z].at;
    if (a->data[A_PK]) g->persistent_k = c->in[A_PK].at;
    if (a->data[A_PV]) g->persistent_v = c->in[A_PV].at;
    g->y = c->y.at;
    g->row_max = c->row_max.at;
    g->inv_sum = c->inv_sum.at;
    g->dy = c->dy.at;
}

/* Calls the forward or the backward kernel. Returns 0 if it exceeded the work space. */
static int direct_kernel(direct_call *c, int back) {
    size_t bytes = stx_attention_work(c->x, &c->args, back);
    zoned work;
    int good;
    CHECK(bytes % 4 == 0, "work space of %zu bytes", bytes);
    work = zone(bytes / 4, c->exact);
    c->args.work = work.at;
    if (back)
        stx_attention_bwd(c->x, &c->args);
    else
        stx_attention_fwd(c->x, &c->args);
    good = zone_whole(&work);
    free(work.base);
    return good;
}

/* Requests only gradient `only`, or all gradients if `only` is negative. */
static void direct_gradients(direct_call *c, int only) {
    stx_attention_args *g = &c->args;
    float **to[IN];
    int i;
    to[A_Q] = &g->dq;
    to[A_K] = &g->dk;
    to[A_V] = &g->dv;
    to[A_PE] = &g->dpe;
    to[A_U] = &g->dcontent_bias;
    to[A_VB] = &g->dposition_bias;
    to[A_Z] = &g->dspan_fraction;
    to[A_PK] = &g->dpersistent_k;
    to[A_PV] = &g->dpersistent_v;
    for (i = 0; i < IN; i++)
        *to[i] = c->a->data[i] && (only < 0 || only == i) ? c->grad[i].at : NULL;
}

/* Copies gradient i without its gaps. Returns 0 if a gap was written. */
static int direct_output(const direct_call *c, size_t i, float *out) {
    const attn *a = c->a;
    const layout *l = layout_of(c, i);
    size_t C = a->H * a->D, b, r, k;
    int good = 1;
    if (!a->data[i]) return 1;
    if (i > A_V) {
        memcpy(out, c->grad[i].at, a->size[i] * sizeof(float));
        return 1;
    }
    for (b = 0; b < a->B; b++)
        for (r = 0; r < l->rows; r++) {
            const float *row = c->grad[i].at + b * l->batch_stride + r * l->row_stride;
            memcpy(out + (b * l->rows + r) * C, row, C * sizeof(float));
            if (r + 1 == l->rows) continue;
            for (k = C; k < l->row_stride; k++)
                if (memcmp(row + k, &zone_value, 4)) good = 0;
        }
    return good;
}

static void direct(stx_ctx *x, const attn *a, size_t gap, int mode, int only, float **out) {
    direct_call c;
    size_t i;
    int good;
    direct_open(&c, x, a, gap, mode);
    good = direct_kernel(&c, 0);
    direct_gradients(&c, only);
    good &= direct_kernel(&c, 1);
    CHECK(good, "%s: written beyond the work space: %s", inner_name(x), attn_label(a));
    good = zone_whole(&c.y) && zone_whole(&c.row_max) && zone_whole(&c.inv_sum);
    for (i = 0; i < IN; i++) {
        if (!zone_whole(&c.grad[i])) good = 0;
        if (!direct_output(&c, i, out[RAW_GRAD + i])) good = 0;
    }
    memcpy(out[RAW_Y], c.y.at, c.y.n * sizeof(float));
    memcpy(out[RAW_MAX], c.row_max.at, c.row_max.n * sizeof(float));
    memcpy(out[RAW_INV], c.inv_sum.at, c.inv_sum.n * sizeof(float));
    CHECK(good, "%s: written beyond y, row_max, inv_sum or a gradient: %s", inner_name(x),
          attn_label(a));
    for (i = 0; i < IN; i++) {
        free(c.in[i].base);
        free(c.grad[i].base);
    }
    free(c.y.base);
    free(c.row_max.base);
    free(c.inv_sum.base);
    free(c.dy.base);
}

/* A gradient that is requested alone must equal the gradient that is computed when all
   are requested. Gradients that are not requested must not be written. */
static void zone_alone(const kernel *k, const attn *a, size_t gap, size_t j, float **all) {
    float **alone = raw_outputs(a);
    size_t i, n;
    int good = 1;
    direct(context_of(k, 2), a, gap, ZONES_NAN, (int)j, alone);
    CHECK(!memcmp(alone[RAW_GRAD + j], all[RAW_GRAD + j], a->size[j] * sizeof(float)),
          "%s: %s differs if it is requested alone: %s", k->name, out_name[j], attn_label(a));
    for (i = 0; i < IN; i++)
        for (n = 0; i != j && a->data[i] && n < a->size[i]; n++)
            if (alone[RAW_GRAD + i][n] != 1) good = 0;
    CHECK(good, "%s: a gradient that was not requested was written: %s", k->name, attn_label(a));
    raw_free(alone);
}

/* The op must give the same y as the direct call. The direct call's gradients, which
   start at 1, must equal the op's gradients plus 1. */
static void zone_op(const kernel *k, const attn *a, float **raw) {
    float **op = outputs(a);
    size_t j, i;
    if (a->d.dropout == 0 && attn_run(context_of(k, 2), a, op)) {
        CHECK(!memcmp(op[A_Y], raw[RAW_Y], a->size[A_Y] * sizeof(float)),
              "%s: op and kernel differ: %s", k->name, attn_label(a));
        for (j = 0; j < IN; j++) {
            double top = 0;
            int good = 1;
            for (i = 0; i < a->size[j]; i++)
                if (fabs((double)op[j][i]) > top) top = fabs((double)op[j][i]);
            for (i = 0; i < a->size[j]; i++)
                if (!(fabs((double)raw[RAW_GRAD + j][i] - 1 - (double)op[j][i])
                      <= 2e-6 * (1 + top)))
                    good = 0;
            CHECK(good, "%s: %s is not added to the previous values: %s", k->name, out_name[j],
                  attn_label(a));
        }
    }
    outputs_free(op);
}

static void zone_case(const kernel *k, const attn *a, size_t gap, size_t j) {
    float **out[MODES];
    /* Slow kernels run only with exact blocks, for the address sanitizer. What the
       other modes detect does not depend on the build. */
    int modes = SLOW && !k->emulated ? 1 : MODES, mode, good = 1;
    size_t i;
    for (mode = 0; mode < modes; mode++) {
        out[mode] = raw_outputs(a);
        direct(context_of(k, 2), a, gap, mode, -1, out[mode]);
    }
    for (mode = 0; mode + 1 < modes; mode++)
        for (i = 0; i < RAW; i++)
            if (memcmp(out[mode][i], out[ZONES_ZERO][i], raw_size(a, i) * sizeof(float))) {
                good = 0;
                printf("mode %d output %zu differs\n", mode, i);
            }
    CHECK(good, "%s: values around the operands or in the work space change results: %s", k->name,
          attn_label(a));
    if (modes == MODES && a->data[j]) zone_alone(k, a, gap, j, out[ZONES_ZERO]);
    zone_op(k, a, out[EXACT]);
    for (mode = 0; mode < modes; mode++) raw_free(out[mode]);
}

static void red_zones(void) {
    size_t i, k;
    test_state = 99991u;
    for (i = 0; i < (SLOW ? 24 : 60); i++) {
        attn a;
        do a = random_attn(i);
        while (a.B * a.H * a.T * a.S * (a.D + 20) > (SLOW ? 400000u : 3000000u));
        attn_open(&a);
        for (k = 0; k < nf + nb; k++) zone_case(kernel_at(k), &a, i % 4, i % IN);
        attn_close(&a);
    }
}


// >>model

enum { V = 29, STEPS = 30 };

static stx_span_desc small_model(void) {
    stx_span_desc d;
    memset(&d, 0, sizeof d);
    d.vocab = V;
    d.layers = 2;
    d.dim = 24;
    d.heads = 3;
    d.inner = 40;
    d.span = 100;
    d.ramp = 8;
    d.adapt_span = 1;
    d.span_init = 0.2;
    d.dropout = 0.1;
    return d;
}

/* Trains a model for STEPS steps and returns it. loss: (STEPS); text: (B,n). */
static stx_span *train(stx_ctx *x, const int32_t *text, size_t n, size_t B, size_t T,
                       double *loss) {
    stx_span_desc d = small_model();
    stx_span *m = stx_span_create(x, &d);
    stx_optim *o = stx_optim_create(stx_span_params(m), NULL);
    stx_span_state *s = stx_span_state_create(m, B);
    int32_t *in = (int32_t *)malloc(B * T * sizeof *in),
            *next = (int32_t *)malloc(B * T * sizeof *next);
    size_t i, b;
    for (i = 0; i < STEPS; i++) {
        stx_tensor *nll;
        for (b = 0; b < B; b++) {
            memcpy(in + b * T, text + b * n + i * T, T * sizeof *in);
            memcpy(next + b * T, text + b * n + i * T + 1, T * sizeof *in);
        }
        stx_begin(x, STX_TRAIN);
        nll = stx_span_loss(m, stx_tokens(x, in, B, T), stx_tokens(x, next, B, T), s, s);
        loss[i] = stx_item(x, nll);
        stx_backward(x, stx_span_total(m, nll));
        if (stx_optim_step(o, 0.003)) stx_span_clamp(m);
    }
    CHECK(stx_ok(x), "%s", stx_error(x));
    stx_span_state_free(s);
    free(in);
    free(next);
    return m;
}

static double largest(const float *a, size_t n) {
    double top = 0;
    size_t i;
    for (i = 0; i < n; i++)
        if (fabs((double)a[i]) > top) top = fabs((double)a[i]);
    return top;
}

/* Trains twice with a bf16 kernel and returns the first model. Training must be
   bit-exactly repeatable, and close to f32 while the nll falls from about 3.4 to 2.8.
   Rounding factors by 2^-9 changes logits of size 1 by 1e-3, and the differences
   accumulate, in practice to 6e-4. */
static stx_span *model_twice(const kernel *k, stx_ctx *x[2], const int32_t *text, size_t n,
                             size_t B, size_t T, const double *f32_loss) {
    double loss[2][STEPS], worst = 0;
    stx_span *m[2];
    int good = 1;
    size_t i;
    for (i = 0; i < 2; i++) {
        x[i] = new_context(k, 2);
        m[i] = train(x[i], text, n, B, T, loss[i]);
    }
    for (i = 0; i < STEPS; i++) raise_worst(&worst, fabs(loss[0][i] - f32_loss[i]));
    raise_worst(&worst_seen[WORST_LOSS], worst);
    CHECK(worst <= 3e-3, "%s: the loss differs from that of f32 by %g", k->name, worst);
    CHECK(memcmp(loss[0], f32_loss, sizeof loss[0]),
          "%s: exactly the losses of f32, nothing was rounded", k->name);
    CHECK(!memcmp(loss[0], loss[1], sizeof loss[0]), "%s: training is not repeatable", k->name);
    for (i = 0; i < m[0]->params->count; i++) {
        const stx_tensor *p = m[0]->params->tensor[i], *q = m[1]->params->tensor[i];
        if (memcmp(p->data, q->data, p->size * sizeof(float))) good = 0;
    }
    CHECK(good, "%s: two trainings give different parameters", k->name);
    return m[0];
}

/* Saves parameters in a bf16 context and loads them in an f32 context. The saved
   parameters must have more digits than bf16 has. */
static void model_saved(const kernel *k, const stx_span *m, stx_span *to) {
    stx_ctx *x = m->ctx;
    const stx_params *p = m->params, *q = to->params;
    stx_writer *w = stx_writer_create(x);
    stx_file *f;
    char path[1024];
    size_t i, e, long_ones = 0;
    int good = 1;
    test_path(path, sizeof path, "test_bf16");
    CHECK(stx_params_save(w, p, "") && stx_writer_finish(w, path), "%s", stx_error(x));
    f = stx_file_open(to->ctx, path);
    CHECK(f && stx_params_load(to->params, f, ""), "%s", stx_error(to->ctx));
    stx_file_close(f);
    remove(path);
    for (i = 0; i < p->count; i++) {
        const stx_tensor *t = p->tensor[i];
        if (memcmp(t->data, q->tensor[i]->data, t->size * sizeof(float))) good = 0;
        for (e = 0; e < t->size; e++) long_ones += (as_bits(t->data[e]) & 0xffffu) != 0;
    }
    CHECK(good, "%s: a parameter changed between save and load", k->name);
    CHECK(long_ones > 1000, "parameters are rounded: %zu have more than 8 digits", long_ones);
}

/* Generates from a prompt, then from single tokens (with few rows, GEMMs use f32 and
   attention uses bf16). The error of the logits is relative to the largest logit. mf:
   the same model in f32. */
static void model_generates(const kernel *k, stx_span *m, stx_span *mf, const int32_t *text) {
    stx_span_gen *g = stx_span_gen_create(m, 1), *gf = stx_span_gen_create(mf, 1);
    float expected[V];
    double worst = 0;
    size_t i, j;
    for (i = 0; i < 40; i++) {
        const int32_t *in = text + (i ? 100 + i : 0);
        size_t n = i ? 1 : 100;
        const float *y = stx_span_gen_feed(gf, in, n);
        double top;
        if (y) memcpy(expected, y, sizeof expected);
        y = stx_span_gen_feed(g, in, n);
        if (!y) {
            worst = HUGE_VAL;
            break;
        }
        top = largest(expected, V);
        for (j = 0; j < V; j++)
            raise_worst(&worst, fabs((double)y[j] - (double)expected[j]) / top);
    }
    CHECK(worst <= 2e-2 && worst > 0, "%s: generation differs from that of f32 by %g: %s", k->name,
          worst, stx_error(m->ctx));
    stx_span_gen_free(g);
    stx_span_gen_free(gf);
}

static void model(void) {
    size_t B = 2, T = SLOW ? 40 : 70, n = STEPS * T + 1, i, k, saved = SLOW ? fast_bf16s() - 1 : 0;
    int32_t *text = (int32_t *)malloc(B * n * sizeof *text);
    double f32_loss[STEPS];
    stx_ctx *xf = new_context(f32s + nf - 1, 2);
    stx_span *mf;
    test_state = 31337u;
    for (i = 0; i < B * n; i++)
        text[i] = i && test_rand() < 0.4 ? (text[i - 1] * 7 + 3) % V : (int32_t)pick(V);
    mf = train(xf, text, n, B, T, f32_loss);
    CHECK(f32_loss[STEPS - 1] < f32_loss[0] - 0.1, "the loss of f32 does not fall: %g, then %g",
          f32_loss[0], f32_loss[STEPS - 1]);
    for (k = 0; k < nb; k++) {
        stx_ctx *x[2];
        stx_span *m;
        if (SLOW && !bf16s[k].emulated && k + 1 != fast_bf16s()) continue;
        m = model_twice(bf16s + k, x, text, n, B, T, f32_loss);
        if (k + 1 == nb || k == saved) {
            model_saved(bf16s + k, m, mf);
            model_generates(bf16s + k, m, mf, text);
        }
        stx_destroy(x[0]);
        stx_destroy(x[1]);
    }
    free(text);
    stx_destroy(xf);
}


// >>creation

static void creation(void) {
    stx_desc d;
    stx_ctx *x;
    int i;
    CHECK(!strcmp(stx_backend(NULL), "portable"), "%s", stx_backend(NULL));
    for (i = 0; i < 2; i++) {
        memset(&d, 0, sizeof d);
        d.precision = i ? STX_PREC_BF16 : STX_PREC_F32;
        x = stx_create(&d);
        CHECK(stx_ok(x) && stx_ctx_desc(x)->precision == d.precision, "%s", stx_error(x));
        CHECK(!strcmp(stx_backend(x), i ? bf16s[nb - 1].name : f32s[nf - 1].name),
              "the fastest kernel is not selected: %s", stx_backend(x));
        stx_destroy(x);
    }
    for (i = -1; i < 8; i++) {
        if (i == 0 || i == 1) continue;
        d.precision = i;
        x = stx_create(&d);
        CHECK(x && !stx_ok(x) && stx_error_code(x) == STX_ERR_DEVICE
                  && strstr(stx_error(x), "precision") && strstr(stx_error(x), "STX_PREC_BF16")
                  && (i != 7 || strstr(stx_error(x), "7")),
              "%s", stx_error(x));
        CHECK(stx_ctx_desc(x)->precision == STX_PREC_F32
                  && !strcmp(stx_backend(x), f32s[nf - 1].name),
              "the context is not f32: %s", stx_backend(x));
        stx_destroy(x);
    }
}

/* Arguments: the names of the parts to run or, after "but", of the parts to skip. */
int main(int argc, char **argv) {
    static const struct {
        const char *name;
        void (*run)(void);
    } parts[] = {{"creation", creation},
                 {"rounding", rounding},
                 {"products", gemms},
                 {"attention", attention},
                 {"attention_cut", attention_cut},
                 {"attention_units", attention_units},
                 {"attention_empty", attention_empty},
                 {"attention_missing_keys", attention_missing_keys},
                 {"attention_margins", attention_margins},
                 {"attention_pads", attention_pads},
                 {"attention_borders", attention_borders},
                 {"red_zones", red_zones},
                 {"model", model}};

    size_t i;
    int k, named;
    find_kernels();
    for (i = 0; i < sizeof parts / sizeof *parts; i++) {
        for (named = argc < 2, k = 1; k < argc; k++) named |= !strcmp(argv[k], parts[i].name);
        if (named != (argc > 1 && !strcmp(argv[1], "but"))) parts[i].run();
    }
    printf("largest errors: f32 to dense %.1e, f32 kernels %.1e, threads %.1e; bf16 to f32 %.1e, "
           "bf16 kernels %.1e, threads %.1e; loss %.1e\n",
           worst_seen[WORST_DENSE], worst_seen[WORST_F32], worst_seen[WORST_THREADS],
           worst_seen[WORST_ROUNDED], worst_seen[WORST_KERNELS], worst_seen[WORST_BF16_THREADS],
           worst_seen[WORST_LOSS]);
    close_contexts();
    return test_end();
}
#endif
