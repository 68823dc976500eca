/* bench.c - times seqtx in float and bfloat16: matmuls, the attention kernel, training
   and generation, compared with CBLAS and PyTorch.

       sh bench/run.sh            builds this file and runs it (bench/README.md)

   Contenders alternate within one run, so that a busy machine affects all of them; values
   are medians of rounds, with minimum and maximum. Matmuls are compared in this process
   (gemm_peers.h). Training contenders (this program with --worker, and PyTorch) are
   separate processes that run one round of steps for each line on stdin (the protocol
   of bench/peers). All read the same data and start from the same parameter file. A row
   is void if its losses differ from the peer's. */
#define _POSIX_C_SOURCE 200809L
#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#if defined(BENCH_CBLAS) || defined(SEQTX_CBLAS)
  #include <cblas.h>
  #undef I /* OpenBLAS's header includes complex.h */
#endif
#ifdef BENCH_CBLAS
/* defined only by OpenBLAS; NULL if another CBLAS is linked */
extern void openblas_set_num_threads(int n) __attribute__((weak));
extern char *openblas_get_corename(void) __attribute__((weak));
extern char *openblas_get_config(void) __attribute__((weak));
#endif
#define SEQTX_IMPLEMENTATION
#include "../../seqtx_attn_span.h"
#include "../../seqtx_text.h"
#include "../cpu.h"
#include "gemm_peers.h"

enum { SPANS_FULL, SPANS_LEARNED, SPANS_SHORT, SPANS_KINDS };

static const char *const spans_name[SPANS_KINDS] = {"full", "learned", "short"};

static struct {
    int worker, spans, literal, precision, cblas_check, mkl_check, onednn_check;
    const char *params, *cblas, *mkl, *mkl_amd;
} own = {0, SPANS_FULL, 1, F32, 0, 0, 0, NULL, NULL, NULL, NULL};

static const option own_options[] = {OPTION_FLAG("--worker", &own.worker),
                                     OPTION_CHOICE("--spans", &own.spans, "full,learned,short"),
                                     OPTION_WHOLE("--literal", &own.literal, 0),
                                     OPTION_CHOICE("--precision", &own.precision, "f32,bf16"),
                                     OPTION_TEXT("--params", &own.params),
                                     OPTION_TEXT("--cblas", &own.cblas),
                                     OPTION_TEXT("--mkl", &own.mkl),
                                     OPTION_TEXT("--mkl-amd", &own.mkl_amd),
                                     OPTION_FLAG("--cblas-check", &own.cblas_check),
                                     OPTION_FLAG("--mkl-check", &own.mkl_check),
                                     OPTION_FLAG("--onednn-check", &own.onednn_check),
                                     OPTION_END};


// >>found: results for the summary at the end; NaN: not measured

enum {
    OWN,
    OWN_BF16,
    OWN_CBLAS,
    OWN_EPS,
    OWN_EPS_BF16,
    PEER,
    PEER_BF16,
    PEER_COMPILED,
    PEER_COMPILED_BF16,
    PEER_PLAIN,
    CONTENDERS
};

static struct {
    /* the lowest speed ratio over all matmuls: f32_least relative to the fastest peer,
       bf16_least relative to oneDNN's bf16 */
    double f32_least, bf16_least;
    double one_long[PRECISIONS]; /* cost of a layer with one long head and seven short ones,
                                    relative to a layer with eight long heads */
    double context[PRECISIONS];  /* step time of a model with the largest maximum span, relative
                                    to a maximum span of 1024 */
    double rate[SPANS_KINDS][CONTENDERS], memory[SPANS_KINDS][CONTENDERS];
    double generation[SPANS_KINDS][PRECISIONS];
} found;

static void least(double *at, double v) {
    if (!(*at <= v)) *at = v;
}

static void most(double *at, double v) {
    if (!(*at >= v)) *at = v;
}


// >>gemm

/* A linear layer of a trainer's preset: the number of rows of x, and the shape of W
   (out,in). It has three matmuls: x W^T, dy W, dy^T x. */
typedef struct {
    const char *of;
    size_t rows, in, out;
} linear;

static const linear linears[] = {
    {"Sequential 256", 4096, 256, 256},
    {"Sequential 256", 4096, 256, 1024},
    {"Sequential 256", 4096, 1024, 256},
    {"Sequential 512", 4096, 512, 512},
    {"Sequential 512", 4096, 512, 2048},
    {"Sequential 512", 4096, 2048, 512},
    {"SRU++ 3072", 1024, 3072, 768},
    {"SRU++ 3072", 1024, 768, 768},
    {"SRU++ 3072", 1024, 768, 1536},
    {"SRU++ 3072", 1024, 768, 9216},
    {"SRU++ 512", 2048, 512, 128},
    {"SRU++ 512", 2048, 128, 128},
    {"SRU++ 512", 2048, 128, 256},
    {"SRU++ 512", 2048, 128, 1536},
    {"SRU 1024", 2048, 1024, 3072},
    {"Compressive 512", 2048, 512, 512},
    {"Compressive 512", 2048, 512, 1024},
    {"Compressive 512", 2048, 512, 2048},
    {"Compressive 512", 2048, 2048, 512},
    {"XL 512", 512, 512, 512},
    {"XL 512", 1024, 512, 1024},
    {"XL 512", 512, 512, 2048},
    {"XL 512", 512, 2048, 512},
    {"XL 410", 600, 410, 410},
    {"XL 410", 1200, 410, 820},
    {"XL 410", 600, 410, 2100},
    {"XL 410", 600, 2100, 410},
    {"PAR 128", 1024, 128, 128},
    {"PAR 128", 1536, 128, 256},
    {"PAR 128", 1024, 128, 512},
    {"PAR 128", 1024, 512, 128},
    /* the adaptive softmax: a head of 250 words and 2 cluster logits, a cluster of
       2,250 words with 32 channels, and a cluster of 9,500 words with 8 channels. Each
       has one row per token that uses it */
    {"PAR 128, words", 1024, 128, 252},
    {"PAR 128, words", 512, 32, 2250},
    {"PAR 128, words", 256, 8, 9500}};

enum { MATMULS = 3 * sizeof linears / sizeof *linears + 7 + 8 + 6, GEMM_MAX = 9216 * 1024 };

static matmul matmuls[MATMULS];

static matmul *matmul_add(int *n, const char *of, const char *what, int ta, int tb, size_t M,
                            size_t N, size_t K) {
    matmul *p = &matmuls[(*n)++];
    snprintf(p->name, sizeof p->name, "%s %zux%zux%zu", what, M, N, K);
    p->of = of;
    p->ta = ta;
    p->tb = tb;
    p->M = M;
    p->N = N;
    p->K = K;
    p->counted = 1;
    return p;
}

/* Fills `matmuls` and returns the number of entries. With --quick, the entries are only
   the smaller squares, the layers of the first model, the matmuls with the fewest rows,
   and the tiles. */
static int matmul_list(void) {
    static const size_t few[2] = {1024, 4096};
    size_t i, s;
    int n = 0;
    for (s = 64; s <= (opt.quick ? 1024 : 2048); s *= 2)
        matmul_add(&n, "square", "A B", 0, 0, s, s, s)->counted = s >= 128;
    for (i = 0; i < (opt.quick ? 3 : sizeof linears / sizeof *linears); i++) {
        const linear *l = &linears[i];
        matmul_add(&n, l->of, "x W^T", 0, 1, l->rows, l->out, l->in);
        matmul_add(&n, l->of, "dy W", 0, 0, l->rows, l->in, l->out);
        matmul_add(&n, l->of, "dy^T x", 1, 0, l->out, l->in, l->rows);
    }
    for (i = 0; i < 2; i++)
        for (s = 4; s <= (opt.quick ? 4 : 32); s *= 2)
            matmul_add(&n, "few rows", "x W^T", 0, 1, s, few[i], 1024);
    for (s = 256; s <= 1024; s *= 4) { /* attention: 64 queries and s keys */
        matmul_add(&n, "tile", "q k^T", 0, 1, 64, s, 64)->one_thread = 1;
        matmul_add(&n, "tile", "p v", 0, 0, 64, 64, s)->one_thread = 1;
        matmul_add(&n, "tile", "ds^T q", 1, 0, s, 64, 64)->one_thread = 1;
    }
    return n;
}

/* Contenders for the matmuls. BY_DNNL_BARE is oneDNN's bf16 matmul of operands that are
   already rounded. */
enum { BY_F32, BY_BF16, BY_CBLAS, BY_MKL, BY_DNNL, BY_DNNL_BF16, BY_DNNL_BARE, BYS };

static void own_matmul(stx_ctx *x, const matmul *p, const stx_real *A, const stx_real *B,
                        stx_real *C) {
    stx_gemm_args g = stx_gemm_init(p->ta, p->tb, p->M, p->N, p->K, A, B, C);
    stx_gemm(x, &g);
}

typedef struct {
    stx_ctx *x[PRECISIONS][2];
    stx_real *A, *B, *C[2]; /* C[0]: the result of our float matmul, with which all
                               others are compared */
#ifdef BENCH_DNNL
    dnnl_pair dnnl[MATMULS][2][PRECISIONS];
#endif
    samples rate[MATMULS][2][BYS];
    double calls[MATMULS][2][BYS], off[MATMULS][BYS];
    int on[BYS];
    const char *name[BYS];
    char peers[600]; /* names and versions of the peers */
} gemm_bench;

static double gemm_flop(const matmul *p) {
    return 2.0 * (double)p->M * (double)p->N * (double)p->K;
}

/* Returns the GFLOP/s of `calls` calls with one thread (t = 0) or with all threads (t =
   1). */
static double gemm_rate(gemm_bench *b, int by, int i, int t, size_t calls) {
    const matmul *p = &matmuls[i];
    double start;
    size_t n;
#ifdef BENCH_DNNL
    const dnnl_pair *d = by >= BY_DNNL ? &b->dnnl[i][t][by != BY_DNNL] : NULL;
    if (by == BY_DNNL_BARE) dnnl_pack(&d->of[0]);
#endif
    start = seconds();
    for (n = 0; n < calls; n++) {
        switch (by) {
        case BY_F32: own_matmul(b->x[F32][t], p, b->A, b->B, b->C[0]); break;
        case BY_BF16: own_matmul(b->x[BF16][t], p, b->A, b->B, b->C[1]); break;
#ifdef BENCH_CBLAS
        case BY_CBLAS: cblas_matmul(p, b->A, b->B, b->C[1]); break;
#endif
        case BY_MKL: mkl_matmul(p, b->A, b->B, b->C[1]); break;
#ifdef BENCH_DNNL
        case BY_DNNL:
        case BY_DNNL_BF16:
            dnnl_pack(&d->of[d->best]);
            dnnl_matmul_run(&d->of[d->best]);
            break;
        case BY_DNNL_BARE: dnnl_matmul_run(&d->of[0]); break;
#endif
        default: break;
        }
    }
    return gemm_flop(p) * (double)calls / (seconds() - start) * 1e-9;
}

/* Calls gemm_rate, and repeats the call up to three times if other processes
   interrupted it. Returns the highest rate. */
static double gemm_sample(gemm_bench *b, int by, int i, int t, size_t calls) {
    struct rusage was, now;
    double best = 0;
    int n = 0;
    do {
        double v;
        getrusage(RUSAGE_SELF, &was);
        v = gemm_rate(b, by, i, t, calls);
        getrusage(RUSAGE_SELF, &now);
        if (v > best) best = v;
    } while (now.ru_nivcsw > was.ru_nivcsw && ++n < 4);
    return best;
}

/* Sets the number of threads of a contender, and returns nonzero if it takes part in
   matmul i. In the first round, also creates its oneDNN primitives. */
static int gemm_takes_part(gemm_bench *b, int by, int i, int t, int first) {
    const int threads = t ? opt.threads : 1;
    (void)b;
    (void)i;
    (void)first;
#ifdef BENCH_CBLAS
    if (by == BY_CBLAS) {
        if (openblas_set_num_threads) openblas_set_num_threads(threads);
        return openblas_set_num_threads || threads == opt.threads;
    }
#endif
    if (by == BY_MKL) mkl.threads(threads);
#ifdef BENCH_DNNL
    if (by >= BY_DNNL) {
        dnnl_pair *d = &b->dnnl[i][t][by != BY_DNNL];
        if (onednn.threads)
            onednn.threads(threads);
        else if (threads < opt.threads)
            return 0;
        if (first && by != BY_DNNL_BARE)
            dnnl_pair_make(d, &matmuls[i], b->A, b->B, b->C[1], by == BY_DNNL_BF16);
        return d->of[by == BY_DNNL_BARE ? 0 : d->best].run != NULL;
    }
#endif
    return 1;
}

/* Waits until a contender's threads no longer disturb the next contender. Threads spin
   after a call; the threads of OpenBLAS spin for 2^26 cycles. */
static void gemm_calm(int by, int t) {
    struct timespec wait = {0, 0};
    wait.tv_nsec = by == BY_CBLAS ? 40000000 : 2000000;
    if (t) nanosleep(&wait, NULL);
}

/* The ratio of one table row. gemm_ratios contains all ratios in increasing order. */
typedef struct {
    const char *of, *matmul;
    int threads;
    double ratio;
} gemm_ratio;

typedef struct {
    gemm_ratio v[2 * MATMULS];
    int n;
} gemm_ratios;

static void ratio_add(gemm_ratios *r, const matmul *p, int threads, double ratio) {
    gemm_ratio *g = &r->v[r->n++];
    int k;
    g->of = p->of;
    g->matmul = p->name;
    g->threads = threads;
    g->ratio = measured(ratio) ? ratio : 0; /* an invalid row misses the target */
    for (k = r->n - 1; k > 0 && r->v[k].ratio < r->v[k - 1].ratio; k--) {
        gemm_ratio was = r->v[k];
        r->v[k] = r->v[k - 1];
        r->v[k - 1] = was;
    }
}

/* Prints how many ratios reach the target, and the lowest five that do not. */
static void ratios_say(const gemm_ratios *r, const char *what, double wanted) {
    int k, met = 0;
    if (!r->n) return;
    for (k = 0; k < r->n; k++) met += r->v[k].ratio >= wanted;
    say("%s: at least %.2f in %d of %d rows.", what, wanted, met, r->n);
    for (k = 0; k < 5 && k < r->n && r->v[k].ratio < wanted; k++)
        say("%s %.3f %s %s (%s)", k ? ";" : " Worst:", r->v[k].ratio, r->v[k].of, r->v[k].matmul,
            r->v[k].threads > 1 ? "all" : "one");
    say("\n\n");
}

static void gemm_peer_name(gemm_bench *b, const char *prefix, const char *name) {
    size_t n = strlen(b->peers);
    snprintf(b->peers + n, sizeof b->peers - n, "%s%s%.200s", n ? "; " : "", prefix, name);
}

/* Creates the contexts and inputs, and opens the peers that are available. */
static void gemm_begin(gemm_bench *b) {
    static const char *const name[BYS] = {
        "f32", "bf16", "CBLAS", "MKL", "oneDNN", "oneDNN bf16", "oneDNN bf16, pre-rounded"};
    int w, t;
    memcpy(b->name, name, sizeof name);
    for (w = 0; w < PRECISIONS; w++)
        for (t = 0; t <= (opt.threads > 1); t++) b->x[w][t] = context(w, t ? opt.threads : 1);
    b->A = persist(b->x[F32][0], GEMM_MAX);
    b->B = persist(b->x[F32][0], GEMM_MAX);
    for (w = 0; w < 2; w++) b->C[w] = persist(b->x[F32][0], GEMM_MAX);
    fill_random(b->A, GEMM_MAX, 2);
    fill_random(b->B, GEMM_MAX, 3);
    b->on[BY_F32] = 1;
    b->on[BY_BF16] = b->x[BF16][0] != NULL;
#ifdef BENCH_CBLAS
    b->on[BY_CBLAS] = cblas_rate() >= CBLAS_LEAST;
    if (openblas_get_config) b->name[BY_CBLAS] = "OpenBLAS";
    if (b->on[BY_CBLAS])
        gemm_peer_name(b, "", openblas_get_config ? openblas_get_config()
                                                  : "a CBLAS that is not OpenBLAS");
#endif
    if (!b->on[BY_CBLAS]) gemm_peer_name(b, "", "no CBLAS");
    b->on[BY_MKL] = own.mkl && mkl_open(own.mkl, own.mkl_amd);
    if (own.mkl) gemm_peer_name(b, b->on[BY_MKL] ? "" : "not MKL: ", mkl.name);
#ifdef BENCH_DNNL
    b->on[BY_DNNL] = onednn_open(GEMM_MAX * sizeof *b->A);
    if (b->on[BY_DNNL]) gemm_peer_name(b, "", onednn.name);
    b->on[BY_DNNL_BF16] = b->on[BY_DNNL_BARE] = b->on[BY_DNNL] && b->on[BY_BF16];
#endif
}

static void gemm_end(gemm_bench *b) {
    int w, t;
#ifdef BENCH_DNNL
    int i;
    for (i = 0; i < MATMULS; i++)
        for (t = 0; t < 2; t++)
            for (w = 0; w < 4; w++) dnnl_drop(&b->dnnl[i][t][w / 2].of[w % 2]);
    onednn_close();
#endif
    for (w = 0; w < PRECISIONS; w++)
        for (t = 0; t < 2; t++) stx_destroy(b->x[w][t]);
}

/* Warms up a contender, finds the number of calls that take about 8 ms, and compares
   its result with our float result. */
static void gemm_first(gemm_bench *b, int by, int i, int t) {
    const matmul *p = &matmuls[i];
    double rate = 0;
    size_t k, n = p->M * p->N;
    if (by != BY_F32) memset(b->C[1], 0, n * sizeof *b->C[1]);
    for (k = 0; k < 2; k++) rate = gemm_rate(b, by, i, t, 1);
    gemm_calm(by, t);
    b->calls[i][t][by] = 1 + floor(0.008 * rate * 1e9 / gemm_flop(p));
    /* inputs are in [-1,1), so sums of K products are about sqrt(K) / 3 */
    for (k = 0; by != BY_F32 && k < n; k++)
        most(&b->off[i][by],
             fabs((double)b->C[0][k] - (double)b->C[1][k]) * 3 / sqrt((double)p->K));
}

/* Runs one matmul with all contenders, in a different order in each round. Round -1
   only prepares the contenders. */
static void gemm_round(gemm_bench *b, int i, int t, int r) {
    int turn;
    for (turn = 0; turn < BYS; turn++) {
        int by = (turn + r + 1) % BYS;
        if (!b->on[by] || (r >= 0 && !b->calls[i][t][by])
            || !gemm_takes_part(b, by, i, t, r < 0))
            continue;
        if (r < 0) {
            gemm_first(b, by, i, t);
            continue;
        }
        sample(&b->rate[i][t][by], gemm_sample(b, by, i, t, (size_t)b->calls[i][t][by]));
        gemm_calm(by, t);
    }
}

static int gemm_has_peers(const gemm_bench *b) {
    return b->on[BY_CBLAS] || b->on[BY_MKL] || b->on[BY_DNNL];
}

static void gemm_header(const gemm_bench *b) {
    char head[300] = "of|matmul|threads|f32|range";
    size_t n;
    int by;
    for (by = BY_CBLAS; by <= BY_DNNL; by++)
        if (b->on[by]) {
            n = strlen(head);
            snprintf(head + n, sizeof head - n, "|%s", b->name[by]);
        }
    n = strlen(head);
    snprintf(head + n, sizeof head - n, "%s%s%s",
             gemm_has_peers(b) ? "|f32 / fastest|fastest" : "",
             b->on[BY_BF16] ? "|bf16|range" : "",
             b->on[BY_DNNL_BF16] ? "|oneDNN bf16|bf16 / oneDNN|pre-rounded" : "");
    header(head);
}

/* Totals over all rows. */
static struct {
    gemm_ratios to_fastest, to_onednn;
    int fastest[BYS]; /* number of rows in which each contender was the fastest */
} gemm_found;

/* Fills in the f32 columns and returns the next column. */
static int gemm_row_f32(const gemm_bench *b, int i, int t) {
    const samples *s = b->rate[i][t];
    int by, c, best = 0, differ = 0;
    double ratio = NAN;
    c = 3;
    cell_median(c++, &s[BY_F32], 1, 1);
    cell_range(c++, &s[BY_F32], 0, 1);
    for (by = BY_CBLAS; by <= BY_DNNL; by++) {
        if (!b->on[by]) continue;
        if (s[by].n && b->off[i][by] < 1e-4) {
            cell_median(c, &s[by], 1, 1);
            if (!best || median(&s[by]) > median(&s[best])) best = by;
        } else if (s[by].n) {
            cell(c, "void: differs by %.0e", b->off[i][by]);
            differ = 1;
        }
        c++;
    }
    if (best) {
        ratio = median(&s[BY_F32]) / median(&s[best]);
        cell(c, "%.3f", ratio);
        cell(c + 1, "%s", b->name[best]);
        gemm_found.fastest[best]++;
    }
    if (matmuls[i].counted && (best || differ)) {
        ratio_add(&gemm_found.to_fastest, &matmuls[i], t ? opt.threads : 1, ratio);
        least(&found.f32_least, best ? ratio : 0);
    }
    return gemm_has_peers(b) ? c + 2 : c;
}

/* Returns a contender whose bf16 result differs too much from the float result, or 0.
   Rounding both operands to 8 significant bits changes a sum by a few times 2^-9 of its
   scale; the largest change among 10^6 sums is 1e-2. */
static int gemm_differs_bf16(const gemm_bench *b, int i, int t) {
    int by, differs = 0;
    for (by = 0; by < BYS; by++)
        if ((by == BY_BF16 || by >= BY_DNNL_BF16) && !(b->off[i][by] < 2e-2)
            && b->rate[i][t][by].n)
            differs = by;
    return differs;
}

static void gemm_row_bf16(const gemm_bench *b, int i, int t, int c) {
    const samples *s = b->rate[i][t];
    int differs = gemm_differs_bf16(b, i, t);
    double ratio;
    cell_median(c++, &s[BY_BF16], 1, 1);
    cell_range(c++, &s[BY_BF16], 0, 1);
    if (!s[BY_DNNL_BF16].n) return;
    ratio = differs ? 0 : median(&s[BY_BF16]) / median(&s[BY_DNNL_BF16]);
    cell_median(c++, &s[BY_DNNL_BF16], 1, 1);
    if (differs)
        cell(c++, "void: %s differs by %.0e", b->name[differs], b->off[i][differs]);
    else
        cell(c++, "%.3f", ratio);
    if (s[BY_DNNL_BARE].n) cell_median(c, &s[BY_DNNL_BARE], 1, 1);
    if (matmuls[i].counted) {
        ratio_add(&gemm_found.to_onednn, &matmuls[i], t ? opt.threads : 1, ratio);
        least(&found.bf16_least, ratio);
    }
}

static void gemm_table(const gemm_bench *b, int n) {
    int i, t, by, any = 0;
    gemm_header(b);
    for (i = 0; i < n; i++)
        for (t = 0; t < 2; t++) {
            int c;
            if (!b->rate[i][t][BY_F32].n) continue;
            row_begin();
            cell(0, "%s", matmuls[i].of);
            cell(1, "%s", matmuls[i].name);
            cell(2, "%d", t ? opt.threads : 1);
            c = gemm_row_f32(b, i, t);
            if (b->on[BY_BF16]) gemm_row_bf16(b, i, t, c);
        }
    print_table();
    probe_say();
    if (gemm_has_peers(b)) {
        say("The fastest peer in f32:");
        for (by = BY_CBLAS; by <= BY_DNNL; by++)
            if (b->on[by])
                say("%s %s in %d", any++ ? "," : "", b->name[by], gemm_found.fastest[by]);
        say(" rows. Not counted below: squares under 128.\n\n");
    }
    ratios_say(&gemm_found.to_fastest, "f32 / the fastest peer", 1.0);
    ratios_say(&gemm_found.to_onednn, "bf16 / oneDNN's bf16, both rounding", 0.95);
}

static void bench_gemm(void) {
    static gemm_bench bench;
    int i, r, t, n = matmul_list(), R = rounds(7), last = opt.threads > 1;
    gemm_begin(&bench);
    probe_begin();
    for (r = -1; r < R; r++) {
        for (i = 0; i < n; i++) {
            char now[100];
            snprintf(now, sizeof now, "matmuls: round %d of %d, %.39s ..", r + 1, R,
                     matmuls[i].name);
            progress(now);
            for (t = 0; t <= (matmuls[i].one_thread ? 0 : last); t++) gemm_round(&bench, i, t, r);
        }
        if (r >= 0) probe_now();
    }
    say("## Matmuls, GFLOP/s\n\n"
        "Median of %d rounds (minimum - maximum), contenders interleaved in one process. op(A) "
        "op(B) as M x N x K.\nPeers: %s.\nRatios of the medians: f32 to the fastest peer of the "
        "row, bf16 to oneDNN's bf16. The factors of bf16 are floats\nthat all contenders round "
        "within the time: oneDNN gets two reorders before its matmul, to the caller's layout\n"
        "or to its preferred one, whichever is faster (so may its float matmul); the last column "
        "omits them.%s\n\n",
        R, bench.peers, bench.on[BY_BF16] ? "" : no_bf16);
    gemm_table(&bench, n);
    gemm_end(&bench);
}


// >>attention

/* cost: index of the case whose cost is the reference. ramp: 1 if spans are limited by
   a learned z, 0 if by the window. */
typedef struct {
    const char *name;
    size_t heads, longest, shortest, B;
    int long_heads, ramp, cost;
} attention_shape;

enum { SPAN_32, ALL_LONG = 7, ONE_LONG = 6, ATTENTION_CASES = 8 };

static const attention_shape attention_shapes[ATTENTION_CASES] = {
    {"span 32, 4 heads", 4, 32, 32, 4, 4, 0, SPAN_32},
    {"span 128, 4 heads", 4, 128, 128, 4, 4, 0, SPAN_32},
    {"span 512, 4 heads", 4, 512, 512, 4, 4, 0, SPAN_32},
    {"span 2048, 4 heads", 4, 2048, 2048, 4, 4, 0, SPAN_32},
    {"span 8192, 4 heads", 4, 8192, 8192, 4, 4, 0, SPAN_32},
    {"8 heads of 64", 8, 8192, 64, 1, 0, 1, ALL_LONG},
    {"one head of 8192, seven of 64", 8, 8192, 64, 1, 1, 1, ALL_LONG},
    {"8 heads of 8192", 8, 8192, 8192, 1, 8, 1, ALL_LONG}};

enum { ATTENTION_T = 256, ATTENTION_D = 64, ATTENTION_RAMP = 32 };

typedef struct {
    const attention_shape *s;
    double pairs; /* number of query-key pairs with a nonzero weight */
    stx_real *q, *k, *v, *pe, *dy, z[8];
    samples fwd[PRECISIONS], both[PRECISIONS];
} attention_case;

static stx_real *attention_input(stx_ctx *x, size_t n, uint64_t stream) {
    stx_real *p = persist(x, n);
    fill_random(p, n, stream);
    return p;
}

static void attention_create(attention_case *c, const attention_shape *s, stx_ctx *x) {
    const size_t C = s->heads * ATTENTION_D, queries = s->B * ATTENTION_T;
    size_t h, keys = s->B * (s->longest + ATTENTION_T);
    c->s = s;
    for (h = 0; h < s->heads; h++) {
        /* the third head is the long one */
        int is_long = s->long_heads == (int)s->heads || (s->long_heads == 1 && h == 2);
        size_t span = is_long ? s->longest : s->shortest, reach = span;
        if (s->ramp && span + ATTENTION_RAMP < s->longest) reach += ATTENTION_RAMP;
        c->z[h] = (stx_real)((double)span / (double)s->longest);
        c->pairs += (double)(reach * queries);
    }
    c->q = attention_input(x, queries * C, 10);
    c->dy = attention_input(x, queries * C, 11);
    c->k = attention_input(x, keys * C, 12);
    c->v = attention_input(x, keys * C, 13);
    c->pe = attention_input(x, s->longest * ATTENTION_D, 14);
}

/* Returns the time in seconds of one forward pass and, if `backward` is 1, its backward
   pass. */
static double attention_once(stx_ctx *x, const attention_case *c, int backward) {
    stx_attention_in in;
    stx_attention_desc d;
    stx_tensor *y;
    double t;
    size_t H = c->s->heads, B = c->s->B, S = c->s->longest + ATTENTION_T, C = H * ATTENTION_D;
    memset(&in, 0, sizeof in);
    memset(&d, 0, sizeof d);
    stx_begin(x, backward ? STX_TRAIN : STX_EVAL);
    in.q = stx_variable(x, c->q, B, ATTENTION_T, C, 0);
    in.k = stx_variable(x, c->k, B, S, C, 0);
    in.v = stx_variable(x, c->v, B, S, C, 0);
    in.pe = stx_variable(x, c->pe, c->s->longest, ATTENTION_D, 0, 0);
    if (c->s->ramp) {
        in.span_fraction = stx_variable(x, c->z, H, 0, 0, 0);
        d.max_span = (double)c->s->longest;
        d.ramp = ATTENTION_RAMP;
    }
    d.heads = H;
    d.span = c->s->longest;
    d.delta_min = 1;
    t = seconds();
    y = stx_attention(x, &in, &d);
    if (backward) stx_backward_from(x, y, c->dy);
    t = seconds() - t;
    check(x);
    if (!isfinite(stx_item(x, y))) die("the result of attention is not finite");
    return t;
}

/* Runs one round of a case. For a short case, the result is the median of several
   runs. */
static void attention_round(stx_ctx *x, attention_case *c, int precision, int counts) {
    samples fwd, both;
    int k, reps = c->pairs < 4e6 ? 4 : 1;
    fwd.n = both.n = 0;
    for (k = 0; k < reps; k++) {
        sample(&fwd, attention_once(x, c, 0));
        sample(&both, attention_once(x, c, 1));
    }
    if (!counts) return;
    sample(&c->fwd[precision], median(&fwd));
    sample(&c->both[precision], median(&both));
}

static void attention_row(const attention_case *c, int p, double cost) {
    const double gflop = 6.0 * ATTENTION_D * c->pairs * 1e-9;
    row_begin();
    cell(0, "%s", c->s->name);
    cell(1, "%s", precision_name[p]);
    cell_spread(2, &c->fwd[p], 2, 1e3);
    cell(4, "%.0f", gflop / median(&c->fwd[p]));
    cell_spread(5, &c->both[p], 2, 1e3);
    cell(7, "%.0f", 3 * gflop / median(&c->both[p]));
    cell(8, "%.3f", cost);
}

static void bench_attention(void) {
    static attention_case cases[ATTENTION_CASES];
    stx_ctx *x[PRECISIONS], *inputs = context(F32, opt.threads);
    int i, r, p, R = rounds(7);
    for (p = 0; p < PRECISIONS; p++) x[p] = context(p, opt.threads);
    for (i = 0; i < ATTENTION_CASES; i++) attention_create(&cases[i], &attention_shapes[i], inputs);
    probe_begin();
    for (r = -1; r < R; r++) {
        progress("attention ..");
        for (i = 0; i < ATTENTION_CASES; i++)
            for (p = 0; p < PRECISIONS; p++)
                if (x[p]) attention_round(x[p], &cases[i], p, r >= 0);
        if (r >= 0) probe_now();
    }
    say("## Attention by span\n\n"
        "stx_attention with a relative table, block 256, head size 64, every key present, %d "
        "threads; batch 4 with 4 heads\n(spans set by the window), batch 1 with 8 heads (by the "
        "learned ramp of 32). Median of %d rounds (minimum -\nmaximum). GFLOP/s count 6 D per key "
        "and query forward and twice that backward, nothing for recomputation or for\nkeys "
        "without weight.%s\n\n",
        opt.threads, R, x[BF16] ? "" : no_bf16);
    header("case|precision|fwd ms|range|GFLOP/s|fwd+bwd ms|range|GFLOP/s|cost ratio");
    for (i = 0; i < ATTENTION_CASES; i++)
        for (p = 0; p < PRECISIONS; p++) {
            const samples *one = &cases[attention_shapes[i].cost].both[p];
            double cost = median(&cases[i].both[p]) / median(one);
            if (!x[p]) continue;
            if (i == ONE_LONG) found.one_long[p] = cost;
            attention_row(&cases[i], p, cost);
        }
    print_table();
    say("Cost ratio (fwd+bwd, within a precision): to span 32 in the first part, to 8 heads of "
        "8192 in the second.\n\n");
    probe_say();
    for (p = 0; p < PRECISIONS; p++) stx_destroy(x[p]);
    stx_destroy(inputs);
}


// >>training

/* Returns the span of a head, as a fraction of 1024. set_spans writes it into the
   parameters of the benchmark's models. "learned" resembles trained models: short heads
   in the lower layers, and a few long ones in the upper layers. */
static double span_of(int kind, size_t l, size_t h) {
    if (kind == SPANS_FULL) return 1;
    if (kind == SPANS_SHORT) return 0.05;
    if (l < 4) return h == 0 ? 0.05 : 0.02;
    if (l < 6) return h == 0 ? 0.3 : 0.04;
    if (h == 0) return 0.9;
    return h == 1 ? 0.3 : 0.04;
}

static void set_spans(stx_span *m, int kind) { /* in tokens, independent of the maximum */
    size_t l, h;
    for (l = 0; l < m->desc.layers; l++)
        for (h = 0; h < m->desc.heads; h++)
            m->layer[l].z->data[h] = (stx_real)(span_of(kind, l, h) * 1024 / (double)m->desc.span);
}

/* Creates the enwik8_small model over bytes, with `span` as its largest span. Bits 0
   and 1 of `literal` select STX_SPAN_LITERAL_MEMORY and _EPS. */
static stx_span *model_create(stx_ctx *x, int kind, int literal, size_t span) {
    stx_span_desc d;
    stx_span *m;
    memset(&d, 0, sizeof d);
    d.vocab = 256;
    d.layers = 8;
    d.dim = 256;
    d.heads = 4;
    d.inner = 1024;
    d.span = span;
    d.adapt_span = 1;
    d.span_loss = 2e-6;
    d.ramp = 32;
    if (literal & 1) d.literal |= STX_SPAN_LITERAL_MEMORY;
    if (literal & 2) d.literal |= STX_SPAN_LITERAL_EPS;
    m = stx_span_create(x, &d);
    check(x);
    set_spans(m, kind);
    return m;
}

static stx_corpus *corpus_open(stx_ctx *x) {
    stx_vocab *v = stx_vocab_build(x, NULL, NULL, 0, 0);
    stx_corpus *c = opt.data ? stx_corpus_open(x, v, opt.data, 0, 0) : NULL;
    if (!opt.data) die("expected --data FILE, got none");
    check(x);
    stx_vocab_free(v);
    return c;
}

/* A model in training. */
typedef struct {
    stx_ctx *x;
    stx_span *m;
    stx_optim *optim;
    stx_corpus *text;
    stx_batches *b;
    stx_span_state *memory;
    stx_schedule lr;
    int32_t *in, *out;
    size_t B, T;
    uint64_t done;
} trainee;

static void trainee_create(trainee *t, stx_ctx *x, size_t B, size_t span) {
    stx_optim_desc od;
    stx_batches_desc bd;
    memset(t, 0, sizeof *t);
    memset(&od, 0, sizeof od);
    memset(&bd, 0, sizeof bd);
    t->x = x;
    t->B = bd.B = B;
    t->T = bd.T = 256;
    t->m = model_create(x, own.spans, own.literal, span);
    if (own.params) params_load(x, t->m->params, own.params);
    od.kind = STX_ADAGRAD;
    od.clip = 0.03;
    t->lr.lr = 0.07;
    t->lr.warmup = 8000;
    t->optim = stx_optim_create(t->m->params, &od);
    t->text = corpus_open(x);
    t->b = stx_batches_create(x, t->text, &bd);
    t->memory = stx_span_state_create(t->m, B);
    t->in = (int32_t *)malloc(B * t->T * sizeof *t->in);
    t->out = (int32_t *)malloc(B * t->T * sizeof *t->out);
    if (!t->in || !t->out) die("out of memory");
    check(x);
}

static double trainee_step(trainee *t) { /* runs a step; returns the mean nll in nats */
    stx_tensor *loss;
    double nll;
    if (stx_batches_next(t->b, t->in, t->out) == STX_BATCH_FRESH) stx_span_state_reset(t->memory);
    stx_begin(t->x, STX_TRAIN);
    loss = stx_span_loss(t->m, stx_tokens(t->x, t->in, t->B, t->T),
                         stx_tokens(t->x, t->out, t->B, t->T), t->memory, t->memory);
    stx_backward(t->x, stx_span_total(t->m, loss));
    nll = stx_item(t->x, loss);
    if (stx_optim_step(t->optim, stx_schedule_lr(&t->lr, ++t->done))) stx_span_clamp(t->m);
    return nll;
}

static void trainee_destroy(trainee *t) {
    free(t->in);
    free(t->out);
    stx_batches_free(t->b);
    stx_corpus_close(t->text);
    stx_destroy(t->x);
}

/* A contender: runs a round of opt.steps training steps for each line on stdin. Its
   replies follow the protocol of bench/peers. */
static int worker(void) {
    trainee t;
    reply r;
    char line[64];
    int k;
    stx_ctx *x = worker_context(own.precision, opt.threads);
    if (!x) return 3;
    memset(&r, 0, sizeof r);
    r.step1 = r.norm = NAN;
    trainee_create(&t, x, (size_t)opt.batch, 1024);
    for (k = 0; k < opt.warmup; k++) {
        r.last = trainee_step(&t);
        if (!k) r.step1 = r.last;
    }
    check(x);
    while (fgets(line, sizeof line, stdin)) {
        double at = seconds();
        for (k = 0; k < opt.steps; k++) {
            r.last = trainee_step(&t);
            if (t.done == 1) r.step1 = r.last;
            if (k == 0) r.first = r.last;
        }
        r.seconds = seconds() - at;
        check(x);
        r.tokens = (double)(t.B * t.T * (size_t)opt.steps);
        r.done = t.done;
        reply_print(x, &r);
    }
    trainee_destroy(&t);
    return 0;
}


// >>context: step time by the largest span that a model may learn, with equal spans

enum { CONTEXTS = 6 };

typedef struct {
    trainee t;
    samples ms;
    double memory;
} context_case;

static void context_step(context_case *c, int counts) {
    double from = seconds();
    trainee_step(&c->t);
    if (counts) sample(&c->ms, (seconds() - from) * 1e3);
    check(c->t.x);
    /* restore the spans, because an update of z changes them by more tokens if the
       largest span is larger */
    set_spans(c->t.m, SPANS_LEARNED);
    c->memory = (double)stx_peak_bytes(c->t.x);
}

static void context_table(context_case cases[CONTEXTS][PRECISIONS], const size_t *span, int n,
                          int bf16) {
    int i, p;
    header(bf16 ? "S|f32 ms|range|ratio|MB|bf16 ms|range|ratio|MB" : "S|f32 ms|range|ratio|MB");
    for (i = 0; i < n; i++) {
        row_begin();
        cell(0, "%zu", span[i]);
        for (p = 0; p <= bf16; p++) {
            context_case *c = &cases[i][p];
            double ratio = median(&c->ms) / median(&cases[0][p].ms);
            cell_spread(1 + 4 * p, &c->ms, 1, 1);
            cell(3 + 4 * p, "%.3f", ratio);
            cell(4 + 4 * p, "%.0f", c->memory * 1e-6);
            found.context[p] = ratio; /* the last case, with the largest span, is kept */
            trainee_destroy(&c->t);
        }
    }
    print_table();
}

static void bench_context(void) {
    static context_case cases[CONTEXTS][PRECISIONS];
    int r, p, i, n = opt.quick ? 2 : CONTEXTS, R = rounds(9), warm = opt.quick ? 2 : 5;
    size_t span[CONTEXTS], B = opt.quick ? 2 : 4;
    int spans = own.spans, literal = own.literal, bf16 = have_bf16();
    own.spans = SPANS_LEARNED;
    own.literal = 0;
    for (i = 0; i < n; i++) {
        span[i] = (size_t)1024 << (opt.quick ? 5 * i : i);
        for (p = 0; p <= bf16; p++)
            trainee_create(&cases[i][p].t, context(p, opt.threads), B, span[i]);
    }
    probe_begin();
    for (r = -warm; r < R; r++) {
        char what[64];
        snprintf(what, sizeof what, "context: %s %d ..", r < 0 ? "warm-up" : "round",
                 r < 0 ? r + warm + 1 : r + 1);
        progress(what);
        for (p = 0; p <= bf16; p++)
            for (i = 0; i < n; i++) /* interleaved; each round begins with a different case */
                context_step(&cases[(i + r + warm) % n][p], r >= 0);
        if (r >= 0) probe_now();
    }
    say("## Training step by largest span\n\n"
        "The model of the training table with another largest span S, and spans of the same "
        "number of tokens (the\nlearned-like ones below, restored after every step), batch %zu, "
        "%d threads, default mode. Median of %d rounds\n(minimum - maximum), interleaved.%s\n\n",
        B, opt.threads, R, bf16 ? "" : no_bf16);
    context_table(cases, span, n, bf16);
    probe_say();
    own.spans = spans;
    own.literal = literal;
}


// >>contenders

/* A contender's losses must agree with the reference. The tolerance is wider if
   operands are rounded. */
enum { SAME, SAME_BF16 };

static const double loss_tolerance[] = {1e-3, 2e-2};

typedef struct {
    const char *name;
    int same, literal, precision, compile;
} contender_kind;

static const contender_kind contenders[CONTENDERS] = {
    {"seqtx f32", SAME, 1, F32, 0},
    {"seqtx bf16", SAME_BF16, 1, BF16, 0},
    {"seqtx f32, CBLAS", SAME, 1, F32, 0},
    {"seqtx f32, literal eps", SAME, 3, F32, 0},
    {"seqtx bf16, literal eps", SAME_BF16, 3, BF16, 0},
    {"PyTorch eager f32", SAME, 0, F32, 0},
    {"PyTorch eager bf16 autocast", SAME_BF16, 0, BF16, 0},
    {"PyTorch compiled f32", SAME, 0, F32, 1},
    {"PyTorch compiled bf16 autocast", SAME_BF16, 0, BF16, 1},
    {"PyTorch eager f32, as installed", SAME, 0, F32, 0}};

static void write_params(int kind, const char *path) {
    stx_ctx *x = stx_create(NULL);
    params_save(x, model_create(x, kind, 1, 1024)->params, path);
    stx_destroy(x);
}

static void contender_command(arguments *a, int i, int spans, const char *params, int warmup) {
    static const char *const peer_model[] = {
        "--nlayers", "8", "--hid-sz", "256", "--inner-hid-sz", "1024", "--nheads", "4",
        "--attn-span", "1024", "--block-sz", "256", "--adapt-span", "--adapt-span-loss", "2e-6",
        "--lr-warmup", "8000"};
    const contender_kind *k = &contenders[i];
    size_t n;
    a->n = 0;
    if (i >= PEER) {
        arg_text(a, i == PEER_PLAIN ? opt.python_plain : opt.python, opt.peer);
        for (n = 0; n < sizeof peer_model / sizeof *peer_model; n++) arg(a, peer_model[n]);
        arg_text(a, "--dtype", precision_name[k->precision]);
        if (k->compile) arg(a, "--compile");
        arg_number(a, "--batch-sz", (size_t)opt.batch);
    } else {
        arg_text(a, i == OWN_CBLAS ? own.cblas : opt.self, "--worker");
        arg_number(a, "--batch", (size_t)opt.batch);
        arg_text(a, "--spans", spans_name[spans]);
        arg_number(a, "--literal", (size_t)k->literal);
        arg_text(a, "--precision", precision_name[k->precision]);
    }
    arg_text(a, "--data", opt.data);
    arg_text(a, "--params", params);
    arg_number(a, "--steps", (size_t)opt.steps);
    arg_number(a, "--warmup", (size_t)warmup);
    arg_number(a, "--threads", (size_t)opt.threads);
}

static void start_all(contender *c, int spans, const char *params, int warmup) {
    int i;
    for (i = 0; i < CONTENDERS; i++) {
        arguments a;
        char what[80];
        c[i].name = contenders[i].name;
        c[i].tolerance = loss_tolerance[contenders[i].same];
        if (i == OWN_CBLAS && !own.cblas) {
            snprintf(c[i].cannot, sizeof c[i].cannot, "no CBLAS was found");
            continue;
        }
        if (i >= PEER && (!opt.python || !opt.peer || (i == PEER_PLAIN && !opt.python_plain))) {
            snprintf(c[i].cannot, sizeof c[i].cannot, "no python3 with torch was found");
            continue;
        }
        snprintf(what, sizeof what, "training, %s spans: warm-up of %s ..", spans_name[spans],
                 c[i].name);
        progress(what);
        contender_command(&a, i, spans, params, warmup);
        contender_start(&c[i], a.v, opt.work, i);
    }
}

static double mean_keys(int spans) {
    double keys = 0;
    size_t l, h;
    for (l = 0; l < 8; l++)
        for (h = 0; h < 4; h++) {
            double e = span_of(spans, l, h) * 1024 + 32;
            keys += (e < 1024 ? e : 1024) / 32;
        }
    return keys;
}

static void training_setting(int spans) {
    static const char *const title[SPANS_KINDS] = {"Full", "Learned-like", "Short"};
    static const char *const meaning[SPANS_KINDS] = {
        "all 1024", "20 to 51 in layers 1-4, one head of 307 in 5-6, of 307 and 922 in 7-8",
        "all 51 and the ramp"};
    static contender c[CONTENDERS];
    char params[512], label[80];
    int i, r, warmup = opt.warmup;
    memset(c, 0, sizeof c);
    /* The memory of 1024 tokens is full after 4 blocks of 256. The steps up to then,
       and one more round, are discarded. */
    if (warmup < 0) warmup = opt.quick || spans == SPANS_SHORT ? 1 : 3;
    snprintf(params, sizeof params, "%s/params.%s.safetensors", opt.work, spans_name[spans]);
    write_params(spans, params);
    start_all(c, spans, params, warmup);
    probe_begin();
    snprintf(label, sizeof label, "training, %s spans", spans_name[spans]);
    /* a slow machine runs fewer rounds */
    r = contest(c, CONTENDERS, rounds(7), opt.rounds ? 1e9 : 45, label);
    say("%s spans (%s; mean keys per head %.0f); median of %d rounds after %d discarded "
        "steps:\n\n",
        title[spans], meaning[spans], mean_keys(spans), r, warmup + opt.steps);
    contest_say(c, CONTENDERS, PEER);
    for (i = 0; i < CONTENDERS; i++) {
        if (!c[i].fits) continue;
        found.rate[spans][i] = median(&c[i].rate);
        found.memory[spans][i] = c[i].memory;
    }
    unlink(params);
}

static void bench_training(void) {
    int spans;
    say("## Training, enwik8_small\n\n"
        "8 layers, width 256, inner 1024, 4 heads, span 1024, block 256, batch %d (the preset has "
        "64; --batch 64), Adagrad,\n%d threads. The data, initial parameters and steps are the "
        "same for all. Rounds of %d step%s, interleaved. \"seqtx\" has\nthe zero keys of the "
        "peer in an empty memory; it omits keys beyond a head's own span, whose share is below "
        "1e-7\n(\"literal eps\" computes it, as the peer does). Losses must agree with the first "
        "PyTorch row to %g (f32) and %g\n(bf16), or the row is void.\n\n",
        opt.batch, opt.threads, opt.steps, opt.steps == 1 ? "" : "s", loss_tolerance[SAME],
        loss_tolerance[SAME_BF16]);
    for (spans = opt.quick ? SPANS_SHORT : SPANS_FULL; spans < SPANS_KINDS; spans++)
        training_setting(spans);
}


// >>generation

enum { PROMPT = 1100, STREAMS = SPANS_KINDS * PRECISIONS * 2 };

typedef struct {
    stx_lm lm;
    void *gen;
    int spans, precision, threads;
    samples rate, prompt;
    double memory;
} stream;

static void stream_open(stream *s, int spans, int precision, int threads) {
    stx_ctx *x = context(precision, threads);
    s->spans = spans;
    s->precision = precision;
    s->threads = threads;
    s->lm = stx_span_as_lm(model_create(x, spans, 0, 1024));
    s->gen = s->lm.gen_create(s->lm.model, 1, 0);
    check(x);
}

static void stream_row(const stream *s) {
    row_begin();
    cell(0, "%s", spans_name[s->spans]);
    cell(1, "%s", precision_name[s->precision]);
    cell(2, "%d", s->threads);
    cell_spread(3, &s->rate, 0, 1);
    cell_median(5, &s->prompt, 0, 1);
    cell(6, "%.0f", s->memory * 1e-6);
    most(&found.generation[s->spans][s->precision], median(&s->rate));
}

static void prompt_read(int32_t *ids) {
    stx_ctx *x = context(F32, 1);
    stx_corpus *text = corpus_open(x);
    stx_corpus_read(text, 0, PROMPT, ids);
    check(x);
    stx_corpus_close(text);
    stx_destroy(x);
}

static void bench_generation(void) {
    static stream streams[STREAMS];
    int32_t ids[PROMPT];
    int i, p, t, r, count = 0, R = rounds(5), n = opt.quick ? 16 : 64, bf16 = have_bf16();
    prompt_read(ids);
    for (i = 0; i < SPANS_KINDS; i++)
        for (p = 0; p <= bf16; p++)
            for (t = 0; t <= (opt.threads > 1); t++)
                stream_open(&streams[count++], i, p, t ? opt.threads : 1);
    probe_begin();
    for (r = -1; r < R; r++) {
        progress("generation ..");
        for (i = 0; i < count; i++) {
            stream *s = &streams[i];
            double prompt_rate, took = generate(&s->lm, s->gen, ids, PROMPT, n, &prompt_rate);
            s->memory = (double)stx_bytes(s->lm.ctx);
            if (r < 0) continue;
            sample(&s->prompt, prompt_rate);
            sample(&s->rate, n / took);
        }
        if (r >= 0) probe_now();
    }
    say("## Generation\n\n"
        "enwik8_small, one stream, cached keys and values, after a prompt of %d tokens (every "
        "window is full); median of\n%d rounds of %d tokens.%s\n\n",
        PROMPT, R, n, bf16 ? "" : no_bf16);
    header("spans|precision|threads|tokens/s|range|prompt tokens/s|memory MB");
    for (i = 0; i < count; i++) stream_row(&streams[i]);
    print_table();
    probe_say();
    for (i = 0; i < count; i++) stx_destroy(streams[i].lm.ctx);
}


// >>summary: the targets and what this run measured

static const char *const spans_title[SPANS_KINDS] = {"full", "learned-like", "short"};

/* Prints a result with its target. `then` is the second, stricter target, or 0 if there
   is none. `less` is nonzero if lower values are better. */
static void goal(const char *what, double value, int less, double target, double then) {
    const char *bound = less ? "at most" : "at least";
    int first = less ? value <= target : value >= target,
        second = then > 0 && (less ? value <= then : value >= then);
    if (!measured(value)) return;
    row_begin();
    cell(0, "%s", what);
    if (then > 0)
        cell(1, "%s %.3g, then %.3g", bound, target, then);
    else
        cell(1, "%s %.3g", bound, target);
    cell(2, "%.*f", value < 1.2 ? 3 : 2, value);
    if (second)
        cell(3, "yes, both");
    else if (first)
        cell(3, then > 0 ? "yes, the first" : "yes");
    else if (less)
        cell(3, "no: %.0f %% above", 100 * (value / target - 1));
    else
        cell(3, "no: %.0f %% short", 100 * (1 - value / target));
}

static void training_goals(int peer, const char *to) {
    char what[CELL];
    int spans, p;
    for (p = 0; p < PRECISIONS; p++)
        for (spans = 0; spans < SPANS_KINDS; spans++) {
            const double *rate = found.rate[spans];
            snprintf(what, sizeof what, "training %s, %s spans%s", precision_name[p],
                     spans_title[spans], to);
            goal(what, rate[p ? OWN_BF16 : OWN] / rate[peer], 0, p ? 8 : 3, p ? 0 : 5);
        }
}

static void summary_training(int spans, int memory) {
    static const int order[7] = {OWN,           OWN_BF16,           PEER,      PEER_BF16,
                                 PEER_COMPILED, PEER_COMPILED_BF16, PEER_PLAIN};
    const double *v = memory ? found.memory[spans] : found.rate[spans];
    int i;
    if (!measured(v[OWN])) return;
    row_begin();
    cell(0, "training, %s spans, %s", spans_title[spans], memory ? "peak memory MB" : "tokens/s");
    for (i = 0; i < 7; i++)
        if (measured(v[order[i]])) cell(1 + i, "%.0f", v[order[i]] * (memory ? 1e-6 : 1));
}

static void summary_generation(int spans) {
    const double *v = found.generation[spans];
    int p;
    if (!measured(v[F32])) return;
    row_begin();
    cell(0, "generation, %s spans, tokens/s", spans_title[spans]);
    for (p = 0; p < PRECISIONS; p++)
        if (measured(v[p])) cell(1 + p, "%.0f", v[p]);
}

static void bench_summary(void) {
    char what[CELL];
    int spans, p;
    say("## Summary\n\nRatios within this run, of medians. Training is the step of enwik8_small, "
        "compared with PyTorch eager f32 of the\nsame model.\n\n");
    header("measured|target|here|met");
    training_goals(PEER, "");
    training_goals(PEER_PLAIN, ", to PyTorch as installed");
    goal("matmul f32 / the fastest peer, worst", found.f32_least, 0, 1, 0);
    goal("matmul bf16 / oneDNN's bf16, worst", found.bf16_least, 0, 0.95, 0);
    for (p = 0; p < PRECISIONS; p++) {
        snprintf(what, sizeof what, "attention %s, one head of 8192 with seven of 64 / all 8192",
                 precision_name[p]);
        goal(what, found.one_long[p], 1, 0.20, 0.15);
        snprintf(what, sizeof what, "step %s, largest span 32768 / 1024", precision_name[p]);
        goal(what, found.context[p], 1, 1.05, 0);
    }
    if (table.rows > 1) print_table();
    header("also measured|seqtx f32|seqtx bf16|PyTorch eager f32|eager bf16|compiled f32|"
           "compiled bf16|eager f32 as installed");
    for (spans = 0; spans < SPANS_KINDS; spans++) {
        summary_training(spans, 0);
        summary_training(spans, 1);
    }
    for (spans = 0; spans < SPANS_KINDS; spans++) summary_generation(spans);
    if (table.rows > 1) print_table();
}


// >>main

static const char usage[] =
    "bench [options]: times seqtx (sh bench/run.sh builds and runs it)\n"
    "  --quick            fewer rounds and cases, less than 3 minutes\n"
    "  --only LIST        some of gemm,attention,context,training,generation (default: all)\n"
    "  --rounds N         samples of each value (default 7; 9 of context, 5 of generation)\n"
    "  --batch N          training: streams (default 8; the preset has 64)\n"
    "  --steps N          training: steps per round (default 3)\n"
    "  --warmup N         training: steps before the first round\n"
    "  --cblas FILE       this program built with SEQTX_CBLAS\n"
    "  --mkl FILE         a shared library with MKL: PyTorch's libtorch_cpu.so, or libmkl_rt\n"
    "  --mkl-amd FILE     one with mkl_serv_intel_cpu_true, loaded before it\n"
    "  --cblas-check      names the linked CBLAS; exit code 0 if it is worth a comparison\n"
    "  --mkl-check        speed and name of the MKL of --mkl; exit code 0 if it was found\n"
    "  --onednn-check     names the linked oneDNN; exit code 0 if it works\n";

/* Runs --mkl-check, --cblas-check or --onednn-check. Returns the exit code, which is 0
   if the benchmark can compare with that library. */
static int peer_check(void) {
    if (own.mkl_check) {
        if (own.mkl && mkl_open(own.mkl, own.mkl_amd)) return mkl_check();
        puts(mkl.name);
        return 1;
    }
#ifdef BENCH_CBLAS
    if (own.cblas_check) return cblas_check();
#endif
#ifdef BENCH_DNNL
    if (own.onednn_check && onednn_open(0)) {
        puts(onednn.name);
        return 0;
    }
#endif
    return 1;
}

int main(int argc, char **argv) {
    int ended;
    opt.batch = 8;
    opt.steps = 3;
    opt.only = "gemm,attention,context,training,generation";
    ended = parse(argc, argv, usage, own_options);
    if (ended) return ended - 1;
    if (own.cblas_check || own.mkl_check || own.onednn_check) return peer_check();
    if (own.worker) return worker();
    not_measured((double *)(void *)&found, sizeof found / sizeof(double));
    if (listed(opt.only, "gemm")) bench_gemm();
    if (listed(opt.only, "attention")) bench_attention();
    if (listed(opt.only, "context")) bench_context();
    if (listed(opt.only, "training")) bench_training();
    if (listed(opt.only, "generation")) bench_generation();
    bench_summary();
    probe_end();
    return 0;
}
