/* bench.c - times seqtx, float and bfloat16: matrix products, the attention kernel,
   training and generation, beside CBLAS and PyTorch.

       sh bench/run.sh            builds this file and runs it (bench/README.md)

   Contenders take turns within one run, so that a busy machine is busy for all of
   them; numbers are medians of rounds, with minimum and maximum beside them. Products
   are compared in this process (gemm_peers.h). Training contenders are processes of
   their own that answer a line on stdin with one round of steps (the protocol of
   bench/peers): this program again, with --worker, and PyTorch. All read the same
   data and start from the same parameter file, and a row whose losses are not the
   peer's is void. */
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
  #undef I /* OpenBLAS's header brings in complex.h */
#endif
#ifdef BENCH_CBLAS
/* OpenBLAS only; NULL when another CBLAS is linked */
extern void openblas_set_num_threads(int n) __attribute__((weak));
extern char *openblas_get_corename(void) __attribute__((weak));
extern char *openblas_get_config(void) __attribute__((weak));
#endif
#define SEQTX_IMPLEMENTATION
#include "../seqtx_attn_span.h"
#include "../seqtx_text.h"
#include "cpu.h"
#include "gemm_peers.h"

enum { SPANS_FULL, SPANS_LEARNED, SPANS_SHORT, SPANS_KINDS };

static const char *const spans_name[SPANS_KINDS] = {"full", "learned", "short"};

static struct {
    int quick, threads, rounds, warmup, steps, batch, worker, spans, literal, precision;
    const char *self, *data, *params, *python, *python_plain, *peer, *cblas, *mkl, *mkl_amd, *work,
        *only;
} opt = {0,          0,    0,    -1,   3,    8,    0,
         SPANS_FULL, 1,    F32,  NULL, NULL, NULL, NULL,
         NULL,       NULL, NULL, NULL, NULL, ".",  "gemm,attention,context,training,generation"};

static int rounds(int usual) {
    return opt.rounds ? opt.rounds : opt.quick ? 3 : usual;
}


// >>found: what the summary at the end needs; NaN where nothing was measured

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
    /* products: the least ratio to the fastest peer, and to oneDNN's bf16 */
    double f32_least, bf16_least;
    /* cost of one long head among short ones, to all long */
    double one_long[PRECISIONS];
    /* step at the largest maximum span, to that at 1024 */
    double context[PRECISIONS];
    double rate[SPANS_KINDS][CONTENDERS], memory[SPANS_KINDS][CONTENDERS];
    double generation[SPANS_KINDS][PRECISIONS];
} found;

static void found_nothing(void) {
    double *v = (double *)(void *)&found;
    size_t i;
    for (i = 0; i < sizeof found / sizeof *v; i++) v[i] = NAN;
}

static void least(double *at, double v) {
    if (!(*at <= v)) *at = v;
}

static void most(double *at, double v) {
    if (!(*at >= v)) *at = v;
}


// >>gemm

/* The linear layers of the trainers' presets: rows of x, and W (out,in). Each is three
   products: x W^T, dy W, dy^T x. */
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
    /* the adaptive softmax: 250 words and two clusters, of 2,250 in 32 channels and
       9,500 in 8, for the tokens that are in them */
    {"PAR 128, words", 1024, 128, 252},
    {"PAR 128, words", 512, 32, 2250},
    {"PAR 128, words", 256, 8, 9500}};

enum { PRODUCTS = 3 * sizeof linears / sizeof *linears + 7 + 8 + 6, GEMM_ROOM = 9216 * 1024 };

static product products[PRODUCTS];

static product *product_add(int *n, const char *of, const char *what, int ta, int tb, size_t M,
                            size_t N, size_t K) {
    product *p = &products[(*n)++];
    snprintf(p->name, sizeof p->name, "%s %zux%zux%zu", what, M, N, K);
    p->of = of;
    p->ta = ta;
    p->tb = tb;
    p->M = M;
    p->N = N;
    p->K = K;
    p->asked = 1;
    return p;
}

/* Fills the list; how many. --quick: squares, the first model, the fewest rows, tiles. */
static int product_list(void) {
    static const size_t few[2] = {1024, 4096};
    size_t i, s;
    int n = 0;
    for (s = 64; s <= (opt.quick ? 1024 : 2048); s *= 2)
        product_add(&n, "square", "A B", 0, 0, s, s, s)->asked = s >= 128;
    for (i = 0; i < (opt.quick ? 3 : sizeof linears / sizeof *linears); i++) {
        const linear *l = &linears[i];
        product_add(&n, l->of, "x W^T", 0, 1, l->rows, l->out, l->in);
        product_add(&n, l->of, "dy W", 0, 0, l->rows, l->in, l->out);
        product_add(&n, l->of, "dy^T x", 1, 0, l->out, l->in, l->rows);
    }
    for (i = 0; i < 2; i++)
        for (s = 4; s <= (opt.quick ? 4 : 32); s *= 2)
            product_add(&n, "few rows", "x W^T", 0, 1, s, few[i], 1024);
    for (s = 256; s <= 1024; s *= 4) { /* the attention's, of 64 queries and s keys */
        product_add(&n, "tile", "q k^T", 0, 1, 64, s, 64)->one_thread = 1;
        product_add(&n, "tile", "p v", 0, 0, 64, 64, s)->one_thread = 1;
        product_add(&n, "tile", "ds^T q", 1, 0, s, 64, 64)->one_thread = 1;
    }
    return n;
}

/* BY_DNNL_BARE: oneDNN's bf16 product of factors that were rounded before */
enum { BY_F32, BY_BF16, BY_CBLAS, BY_MKL, BY_DNNL, BY_DNNL_BF16, BY_DNNL_BARE, BYS };

static void own_product(stx_ctx *x, const product *p, const stx_real *A, const stx_real *B,
                        stx_real *C) {
    stx_gemm_args g = stx_gemm_init(p->ta, p->tb, p->M, p->N, p->K, A, B, C);
    stx_gemm(x, &g);
}

typedef struct {
    stx_ctx *x[PRECISIONS][2];
    /* C[0]: of our float product, with which all others' is compared */
    stx_real *A, *B, *C[2];
#ifdef BENCH_DNNL
    dnnl_pair dnnl[PRODUCTS][2][PRECISIONS];
#endif
    samples rate[PRODUCTS][2][BYS];
    double calls[PRODUCTS][2][BYS], off[PRODUCTS][BYS];
} gemm_bench;

/* GFLOP/s of so many calls, by one thread (t 0) or all */
static double gemm_rate(gemm_bench *b, int by, int i, int t, size_t calls) {
    const product *p = &products[i];
    double start;
    size_t n;
#ifdef BENCH_DNNL
    const dnnl_pair *d = by >= BY_DNNL ? &b->dnnl[i][t][by != BY_DNNL] : NULL;
    if (by == BY_DNNL_BARE) dnnl_pack(&d->of[0]);
#endif
    start = seconds();
    for (n = 0; n < calls; n++) {
        switch (by) {
        case BY_F32: own_product(b->x[F32][t], p, b->A, b->B, b->C[0]); break;
        case BY_BF16: own_product(b->x[BF16][t], p, b->A, b->B, b->C[1]); break;
#ifdef BENCH_CBLAS
        case BY_CBLAS: cblas_product(p, b->A, b->B, b->C[1]); break;
#endif
        case BY_MKL: mkl_product(p, b->A, b->B, b->C[1]); break;
#ifdef BENCH_DNNL
        case BY_DNNL:
        case BY_DNNL_BF16:
            dnnl_pack(&d->of[d->best]);
            dnnl_product(&d->of[d->best]);
            break;
        case BY_DNNL_BARE: dnnl_product(&d->of[0]); break;
#endif
        default: break;
        }
    }
    return 2.0 * (double)p->M * (double)p->N * (double)p->K * (double)calls / (seconds() - start)
           * 1e-9;
}

/* The same, taken again up to three times while others got the processor in between;
   the fastest of them */
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

/* Whether it takes part in product i; in the first round this makes what it needs. on:
   it is there at all. */
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
            dnnl_pair_make(d, &products[i], b->A, b->B, b->C[1], by == BY_DNNL_BF16);
        return d->of[by == BY_DNNL_BARE ? 0 : d->best].run != NULL;
    }
#endif
    return 1;
}

/* Threads wait actively for the next call, OpenBLAS's for 2^26 cycles: not in the way
   of who is next */
static void gemm_calm(int by, int t) {
    struct timespec wait = {0, 0};
    wait.tv_nsec = by == BY_CBLAS ? 40000000 : 2000000;
    if (t) nanosleep(&wait, NULL);
}

/* How many of the ratios are at least `wanted`, and the worst five that are not */
typedef struct {
    const char *of, *product;
    int threads;
    double ratio;
} gemm_ratio;

typedef struct {
    gemm_ratio v[2 * PRODUCTS];
    int n;
} gemm_ratios;

static void ratio_add(gemm_ratios *r, const product *p, int threads, double ratio) {
    gemm_ratio *g = &r->v[r->n++];
    int k;
    g->of = p->of;
    g->product = p->name;
    g->threads = threads;
    g->ratio = ratio == ratio ? ratio : 0; /* void: it does not count as met */
    for (k = r->n - 1; k > 0 && r->v[k].ratio < r->v[k - 1].ratio; k--) {
        gemm_ratio was = r->v[k];
        r->v[k] = r->v[k - 1];
        r->v[k - 1] = was;
    }
}

static void ratios_say(const gemm_ratios *r, const char *what, double wanted) {
    int k, met = 0;
    if (!r->n) return;
    for (k = 0; k < r->n; k++) met += r->v[k].ratio >= wanted;
    say("%s: at least %.2f in %d of %d rows.", what, wanted, met, r->n);
    for (k = 0; k < 5 && k < r->n && r->v[k].ratio < wanted; k++)
        say("%s %.3f %s %s (%s)", k ? ";" : " Worst:", r->v[k].ratio, r->v[k].of, r->v[k].product,
            r->v[k].threads > 1 ? "all" : "one");
    say("\n\n");
}

static void bench_gemm(void) {
    static const char *by_name[BYS] = {
        "f32", "bf16", "CBLAS", "MKL", "oneDNN", "oneDNN bf16", "oneDNN bf16, rounded before"};
    static gemm_bench bench;
    static gemm_ratios to_fastest, to_onednn;
    gemm_bench *b = &bench;
    int N = product_list(), best_of[BYS] = {0}, on[BYS] = {1, 0, 0, 0, 0, 0, 0};
    size_t room = GEMM_ROOM, k;
    char names[600];
    int i, r, t, w, R = rounds(7), last = opt.threads > 1, peers;
    for (w = 0; w < PRECISIONS; w++)
        for (t = 0; t <= last; t++) b->x[w][t] = context(w, t ? opt.threads : 1);
    b->A = (stx_real *)stx_persist(b->x[F32][0], room * sizeof *b->A);
    b->B = (stx_real *)stx_persist(b->x[F32][0], room * sizeof *b->A);
    for (w = 0; w < 2; w++) b->C[w] = (stx_real *)stx_persist(b->x[F32][0], room * sizeof *b->A);
    check(b->x[F32][0]);
    fill_random(b->A, room, 2);
    fill_random(b->B, room, 3);
    on[BY_BF16] = b->x[BF16][0] != NULL;
    snprintf(names, sizeof names, "no CBLAS");
#ifdef BENCH_CBLAS
    on[BY_CBLAS] = cblas_rate() >= 12;
    if (openblas_get_config) by_name[BY_CBLAS] = "OpenBLAS";
    if (on[BY_CBLAS])
        snprintf(names, sizeof names, "%.200s",
                 openblas_get_config ? openblas_get_config() : "a CBLAS that is not OpenBLAS");
#endif
    on[BY_MKL] = opt.mkl && mkl_open(opt.mkl, opt.mkl_amd);
    if (opt.mkl)
        snprintf(names + strlen(names), sizeof names - strlen(names), "; %s%s",
                 on[BY_MKL] ? "" : "not MKL: ", mkl.name);
#ifdef BENCH_DNNL
    on[BY_DNNL] = onednn_open(room * sizeof *b->A);
    if (on[BY_DNNL])
        snprintf(names + strlen(names), sizeof names - strlen(names), "; %s", onednn.name);
    on[BY_DNNL_BF16] = on[BY_DNNL_BARE] = on[BY_DNNL] && on[BY_BF16];
#endif
    peers = on[BY_CBLAS] || on[BY_MKL] || on[BY_DNNL];
    probe_begin(opt.threads);
    /* round -1 warms up, finds the number of calls, and compares the results */
    for (r = -1; r < R; r++) {
        for (i = 0; i < N; i++) {
            const product *p = &products[i];
            char now[100];
            snprintf(now, sizeof now, "matrix products: round %d of %d, %.39s ..", r + 1, R,
                     p->name);
            progress(now);
            for (t = 0; t <= last; t++) {
                int turn;
                if (t && p->one_thread) continue;
                for (turn = 0; turn < BYS; turn++) {
                    double v = 0;
                    w = (turn + r + 1) % BYS;
                    if (!on[w] || (r >= 0 && !b->calls[i][t][w])
                        || !gemm_takes_part(b, w, i, t, r < 0))
                        continue;
                    if (r >= 0) {
                        sample(&b->rate[i][t][w],
                               gemm_sample(b, w, i, t, (size_t)b->calls[i][t][w]));
                        gemm_calm(w, t);
                        continue;
                    }
                    if (w) memset(b->C[1], 0, p->M * p->N * sizeof *b->C[1]);
                    for (k = 0; k < 2; k++) v = gemm_rate(b, w, i, t, 1);
                    gemm_calm(w, t);
                    /* as many calls as take about 8 ms */
                    b->calls[i][t][w] = 1
                                        + floor(
                                            0.008 * v * 1e9
                                            / (2.0 * (double)p->M * (double)p->N * (double)p->K));
                    /* inputs are in [-1,1): the scale of a sum is sqrt(K) / 3 */
                    for (k = 0; w && k < p->M * p->N; k++)
                        most(&b->off[i][w], fabs((double)b->C[0][k] - (double)b->C[1][k]) * 3
                                                / sqrt((double)p->K));
                }
            }
        }
        if (r >= 0) probe_now();
    }
    say("## Matrix products, GFLOP/s\n\n"
        "Median of %d rounds (least - most), contenders interleaved in one process. op(A) op(B) "
        "as M x N x K.\n"
        "Beside: %s.\nRatios of the medians: f32 to the fastest peer of the row, bf16 to oneDNN's "
        "bf16. Factors of bf16 are floats "
        "that are rounded\nwithin the time, here as there: oneDNN gets two reorders before its "
        "product, to the caller's layout or to "
        "its own, whichever made it\n"
        "faster; the last column leaves them out. Its float product may choose so, too.%s\n\n",
        R, names, on[BY_BF16] ? "" : " bf16: not in this build of the library.");
    {
        char head[300] = "of|product|threads|f32|range";
        size_t n;
        for (w = BY_CBLAS; w <= BY_DNNL; w++)
            if (on[w]) {
                n = strlen(head);
                snprintf(head + n, sizeof head - n, "|%s", by_name[w]);
            }
        n = strlen(head);
        snprintf(head + n, sizeof head - n, "%s%s%s", peers ? "|f32 / fastest|fastest" : "",
                 on[BY_BF16] ? "|bf16|range" : "",
                 on[BY_DNNL_BF16] ? "|oneDNN bf16|bf16 / oneDNN|rounded before" : "");
        header(head);
    }
    for (i = 0; i < N; i++)
        for (t = 0; t <= last; t++) {
            const product *p = &products[i];
            const samples *s = b->rate[i][t];
            int c = 0, best = 0, differ = 0;
            double v;
            if (!s[BY_F32].n) continue;
            row_begin();
            cell(c++, "%s", p->of);
            cell(c++, "%s", p->name);
            cell(c++, "%d", t ? opt.threads : 1);
            cell(c++, "%.1f", median(&s[BY_F32]));
            cell(c++, "%.0f - %.0f", quantile(&s[BY_F32], 0), quantile(&s[BY_F32], 1));
            for (w = BY_CBLAS; w <= BY_DNNL; w++) {
                if (!on[w]) continue;
                if (s[w].n && b->off[i][w] < 1e-4) {
                    cell(c, "%.1f", median(&s[w]));
                    if (!best || median(&s[w]) > median(&s[best])) best = w;
                } else if (s[w].n) {
                    cell(c, "void: differs by %.0e", b->off[i][w]);
                    differ = 1;
                }
                c++;
            }
            v = best ? median(&s[BY_F32]) / median(&s[best]) : NAN;
            if (best) {
                cell(c, "%.3f", v);
                cell(c + 1, "%s", by_name[best]);
                best_of[best]++;
            }
            if (peers) c += 2;
            if (p->asked && (best || differ)) {
                ratio_add(&to_fastest, p, t ? opt.threads : 1, v);
                least(&found.f32_least, best ? v : 0);
            }
            if (!on[BY_BF16]) continue;
            /* rounding both factors to 8 bits moves a sum by a few 2^-9 of its scale,
               the largest of 10^6 sums by 1e-2 */
            cell(c++, "%.1f", median(&s[BY_BF16]));
            cell(c++, "%.0f - %.0f", quantile(&s[BY_BF16], 0), quantile(&s[BY_BF16], 1));
            if (!s[BY_DNNL_BF16].n) continue;
            v = median(&s[BY_BF16]) / median(&s[BY_DNNL_BF16]);
            cell(c++, "%.1f", median(&s[BY_DNNL_BF16]));
            for (w = 0, differ = 0; w < BYS; w++)
                if ((w == BY_BF16 || w >= BY_DNNL_BF16) && !(b->off[i][w] < 2e-2) && s[w].n)
                    differ = w;
            if (differ) {
                v = 0;
                cell(c++, "void: %s differs by %.0e", by_name[differ], b->off[i][differ]);
            } else
                cell(c++, "%.3f", v);
            if (s[BY_DNNL_BARE].n) cell(c, "%.1f", median(&s[BY_DNNL_BARE]));
            if (p->asked) {
                ratio_add(&to_onednn, p, t ? opt.threads : 1, v);
                least(&found.bf16_least, v);
            }
        }
    print_table();
    probe_say();
    if (peers) {
        say("The fastest peer in f32:");
        for (w = BY_CBLAS, k = 0; w <= BY_DNNL; w++)
            if (on[w]) say("%s %s in %d", k++ ? "," : "", by_name[w], best_of[w]);
        say(" rows. Not counted below: squares under 128.\n\n");
    }
    ratios_say(&to_fastest, "f32 / the fastest peer", 1.0);
    ratios_say(&to_onednn, "bf16 / oneDNN's bf16, both rounding", 0.95);
#ifdef BENCH_DNNL
    for (i = 0; i < N; i++)
        for (t = 0; t < 2; t++)
            for (w = 0; w < 4; w++) dnnl_drop(&b->dnnl[i][t][w / 2].of[w % 2]);
    onednn_close();
#endif
    for (w = 0; w < PRECISIONS; w++)
        for (t = 0; t <= last; t++) stx_destroy(b->x[w][t]);
}


// >>attention

typedef struct {
    char name[CELL];
    size_t heads, span[8], longest;
    int ramp;     /* spans by the learned ramp (z), else by the window */
    double pairs; /* keys with weight, over all queries */
    stx_real *q, *k, *v, *pe, *dy, z[8];
    samples fwd[PRECISIONS], both[PRECISIONS];
} attention_case;

static double attention_once(stx_ctx *x, attention_case *c, size_t B, size_t T, size_t D,
                             int backward) {
    stx_attention_in in;
    stx_attention_desc d;
    stx_tensor *y;
    double t;
    size_t H = c->heads, S = c->longest + T, C = H * D;
    memset(&in, 0, sizeof in);
    memset(&d, 0, sizeof d);
    stx_begin(x, backward ? STX_TRAIN : STX_EVAL);
    in.q = stx_variable(x, c->q, B, T, C, 0);
    in.k = stx_variable(x, c->k, B, S, C, 0);
    in.v = stx_variable(x, c->v, B, S, C, 0);
    in.pe = stx_variable(x, c->pe, c->longest, D, 0, 0);
    if (c->ramp) {
        in.span_fraction = stx_variable(x, c->z, H, 0, 0, 0);
        d.max_span = (double)c->longest;
        d.ramp = 32;
    }
    d.heads = H;
    d.span = c->longest;
    d.delta_min = 1;
    t = seconds();
    y = stx_attention(x, &in, &d);
    if (backward) stx_backward_from(x, y, c->dy);
    t = seconds() - t;
    check(x);
    if (!isfinite(stx_item(x, y))) die("the attention's result is not finite");
    return t;
}

static void bench_attention(void) {
    static attention_case cases[8];
    static const size_t spans[5] = {32, 128, 512, 2048, 8192};
    size_t i, h, n = 8, D = 64, T = 256, B = 4;
    stx_ctx *x[PRECISIONS], *inputs = context(F32, opt.threads);
    int r, p, R = rounds(7);
    for (p = 0; p < PRECISIONS; p++) x[p] = context(p, opt.threads);
    for (i = 0; i < n; i++) {
        attention_case *c = &cases[i];
        size_t S, Bc = i < 5 ? B : 1;
        c->heads = i < 5 ? 4 : 8;
        c->ramp = i >= 5;
        for (h = 0; h < c->heads; h++)
            c->span[h] = i < 5 ? spans[i] : i == 5 ? 64 : i == 6 ? (h == 2 ? 8192 : 64) : 8192;
        c->longest = i < 5 ? spans[i] : 8192;
        for (h = 0; h < c->heads; h++) {
            size_t keys = c->ramp && c->span[h] + 32 < c->longest ? c->span[h] + 32 : c->span[h];
            c->z[h] = (stx_real)((double)c->span[h] / (double)c->longest);
            c->pairs += (double)keys * (double)(Bc * T);
        }
        if (i < 5)
            snprintf(c->name, CELL, "span %zu, 4 heads", spans[i]);
        else
            snprintf(c->name, CELL, "%s",
                     i == 5   ? "8 heads of 64"
                     : i == 6 ? "one head of 8192, seven of 64"
                              : "8 heads of 8192");
        S = c->longest + T;
        c->q = (stx_real *)stx_persist(inputs, Bc * T * c->heads * D * sizeof(stx_real));
        c->dy = (stx_real *)stx_persist(inputs, Bc * T * c->heads * D * sizeof(stx_real));
        c->k = (stx_real *)stx_persist(inputs, Bc * S * c->heads * D * sizeof(stx_real));
        c->v = (stx_real *)stx_persist(inputs, Bc * S * c->heads * D * sizeof(stx_real));
        c->pe = (stx_real *)stx_persist(inputs, c->longest * D * sizeof(stx_real));
        check(inputs);
        fill_random(c->q, Bc * T * c->heads * D, 10);
        fill_random(c->dy, Bc * T * c->heads * D, 11);
        fill_random(c->k, Bc * S * c->heads * D, 12);
        fill_random(c->v, Bc * S * c->heads * D, 13);
        fill_random(c->pe, c->longest * D, 14);
    }
    probe_begin(opt.threads);
    for (r = -1; r < R; r++) {
        progress("attention ..");
        for (i = 0; i < n; i++)
            for (p = 0; p < PRECISIONS; p++) {
                /* short ones: several, the median of them */
                int k, reps = cases[i].pairs < 4e6 ? 4 : 1;
                samples f, b;
                f.n = b.n = 0;
                if (!x[p]) continue;
                for (k = 0; k < reps; k++) {
                    sample(&f, attention_once(x[p], &cases[i], i < 5 ? B : 1, T, D, 0));
                    sample(&b, attention_once(x[p], &cases[i], i < 5 ? B : 1, T, D, 1));
                }
                if (r < 0) continue;
                sample(&cases[i].fwd[p], median(&f));
                sample(&cases[i].both[p], median(&b));
            }
        if (r >= 0) probe_now();
    }
    say("## Attention against span\n\n"
        "stx_attention with a relative table, block 256, head size 64, every key present, %d "
        "threads; batch "
        "4 with 4 heads (spans set by the "
        "window),\nbatch 1 with 8 heads (by the learned ramp of 32). Median of %d rounds (least - "
        "most). GFLOP/s count 6 D a key and "
        "query forward and\ntwice that "
        "backward, nothing for recomputation or for keys without weight.%s\n\n",
        opt.threads, R, x[BF16] ? "" : " bf16: not in this build of the library.");
    header("case|precision|fwd ms|range|GFLOP/s|fwd+bwd ms|range|GFLOP/s|cost ratio");
    for (i = 0; i < n; i++)
        for (p = 0; p < PRECISIONS; p++) {
            attention_case *c = &cases[i];
            double gf = 6.0 * (double)D * c->pairs * 1e-9,
                   ratio = median(&c->both[p]) / median(&cases[i < 5 ? 0 : n - 1].both[p]);
            if (!x[p]) continue;
            if (i == 6) found.one_long[p] = ratio;
            row_begin();
            cell(0, "%s", c->name);
            cell(1, "%s", precision_name[p]);
            cell(2, "%.2f", median(&c->fwd[p]) * 1e3);
            cell(3, "%.2f - %.2f", quantile(&c->fwd[p], 0) * 1e3, quantile(&c->fwd[p], 1) * 1e3);
            cell(4, "%.0f", gf / median(&c->fwd[p]));
            cell(5, "%.2f", median(&c->both[p]) * 1e3);
            cell(6, "%.2f - %.2f", quantile(&c->both[p], 0) * 1e3, quantile(&c->both[p], 1) * 1e3);
            cell(7, "%.0f", 3 * gf / median(&c->both[p]));
            cell(8, "%.3f", ratio);
        }
    print_table();
    say("Cost ratio (fwd+bwd, within a precision): to span 32 in the first part, to 8 heads of "
        "8192 in the second.\n\n");
    probe_say();
    for (p = 0; p < PRECISIONS; p++) stx_destroy(x[p]);
    stx_destroy(inputs);
}


// >>training

/* Spans of the benchmark's models, as a fraction of 1024, written into the parameters.
   "learned" follows what trained models look like: short heads below, a few long ones
   above. */
static double span_of(int kind, size_t l, size_t h) {
    if (kind == SPANS_FULL) return 1;
    if (kind == SPANS_SHORT) return 0.05;
    if (l < 4) return h == 0 ? 0.05 : 0.02;
    if (l < 6) return h == 0 ? 0.3 : 0.04;
    return h == 0 ? 0.9 : h == 1 ? 0.3 : 0.04;
}

static void set_spans(stx_span *m, int kind) { /* in tokens, whatever the largest span is */
    size_t l, h;
    for (l = 0; l < m->desc.layers; l++)
        for (h = 0; h < m->desc.heads; h++)
            m->layer[l].z->data[h] = (stx_real)(span_of(kind, l, h) * 1024 / (double)m->desc.span);
}

/* enwik8_small over bytes */
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
    if (!opt.data) die("no --data");
    check(x);
    stx_vocab_free(v);
    return c;
}

/* A model in training: everything that a step needs. */
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
    t->m = model_create(x, opt.spans, opt.literal, span);
    if (opt.params) {
        stx_file *f = stx_file_open(x, opt.params);
        stx_params_load(t->m->params, f, "");
        stx_file_close(f);
    }
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
    if (!t->in || !t->out) die("no memory");
    check(x);
}

static double trainee_step(trainee *t) { /* gives the mean nll, in nats */
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

/* One contender: a round of opt.steps training steps for each line on stdin, answered
   as bench/peers does. */
static int worker(void) {
    trainee t;
    double first = NAN;
    char line[64];
    int warm = opt.warmup < 0 ? 0 : opt.warmup;
    stx_ctx *x = context(opt.precision, opt.threads);
    if (!x) {
        fprintf(stderr, "cannot: %s is not in this build of the library\n",
                precision_name[opt.precision]);
        return 3;
    }
    trainee_create(&t, x, (size_t)opt.batch, 1024);
    while (warm > 0 || fgets(line, sizeof line, stdin)) {
        int k, n = warm > 0 ? warm : opt.steps;
        double round_first = NAN, nll = NAN, at = seconds();
        for (k = 0; k < n; k++) {
            nll = trainee_step(&t);
            if (t.done == 1) first = nll;
            if (k == 0) round_first = nll;
        }
        at = seconds() - at;
        check(x);
        if (warm > 0) {
            warm = 0;
            continue;
        }
        printf(
            "{\"tokens_per_s\": %.6g, \"loss_first\": %.9g, \"loss_last\": %.9g, \"loss_step1\": "
            "%.9g, \"steps_done\": %llu, "
            "\"seconds\": %.6g, \"peak_bytes\": %zu}\n",
            (double)(t.B * t.T * (size_t)n) / at, round_first, nll, first,
            (unsigned long long)t.done, at, stx_peak_bytes(x));
        fflush(stdout);
    }
    trainee_destroy(&t);
    return 0;
}


// >>context: the step against the largest span that a model may learn, with spans that
// are learned the same

static void bench_context(void) {
    enum { N = 6 };

    static trainee model[N][PRECISIONS];
    static samples ms[N][PRECISIONS];
    static double memory[N][PRECISIONS];
    int r, p, i, n = opt.quick ? 2 : N, R = rounds(9), warm = opt.quick ? 2 : 5;
    size_t span[N], B = opt.quick ? 2 : 4;
    int spans = opt.spans, literal = opt.literal, bf16 = have_bf16();
    opt.spans = SPANS_LEARNED;
    opt.literal = 0;
    for (i = 0; i < n; i++) {
        span[i] = n == 2 ? (i ? 32768 : 1024) : (size_t)1024 << i;
        for (p = 0; p <= bf16; p++)
            trainee_create(&model[i][p], context(p, opt.threads), B, span[i]);
    }
    probe_begin(opt.threads);
    for (r = -warm; r < R; r++) {
        char what[64];
        snprintf(what, sizeof what, "context: %s %d ..", r < 0 ? "warm-up" : "round",
                 r < 0 ? r + warm + 1 : r + 1);
        progress(what);
        for (p = 0; p <= bf16; p++)
            for (i = 0; i < n; i++) {
                int at = (i + r + warm) % n; /* interleaved; each round starts with another one */
                trainee *t = &model[at][p];
                double from = seconds();
                trainee_step(t);
                if (r >= 0) sample(&ms[at][p], (seconds() - from) * 1e3);
                check(t->x);
                /* an update of z is worth more tokens where the largest span is longer */
                set_spans(t->m, SPANS_LEARNED);
                memory[at][p] = (double)stx_peak_bytes(t->x);
            }
        if (r >= 0) probe_now();
    }
    say("## Training step against the largest span\n\n"
        "The model of the training table with another largest span S, and spans of the same "
        "number of tokens (the learned-like ones below, put "
        "back\nafter every step), batch %zu, %d threads, default mode. Median of %d rounds (least "
        "- most), interleaved.%s\n\n",
        B, opt.threads, R, bf16 ? "" : " bf16: not in this build of the library.");
    header(bf16 ? "S|f32 ms|range|ratio|MB|bf16 ms|range|ratio|MB" : "S|f32 ms|range|ratio|MB");
    for (i = 0; i < n; i++) {
        row_begin();
        cell(0, "%zu", span[i]);
        for (p = 0; p <= bf16; p++) {
            double ratio = median(&ms[i][p]) / median(&ms[0][p]);
            cell(1 + 4 * p, "%.1f", median(&ms[i][p]));
            cell(2 + 4 * p, "%.1f - %.1f", quantile(&ms[i][p], 0), quantile(&ms[i][p], 1));
            cell(3 + 4 * p, "%.3f", ratio);
            cell(4 + 4 * p, "%.0f", memory[i][p] * 1e-6);
            found.context[p] = ratio; /* of the last, which is the largest */
            trainee_destroy(&model[i][p]);
        }
    }
    print_table();
    probe_say();
    opt.spans = spans;
    opt.literal = literal;
}


// >>contenders

enum {
    SAME,
    SAME_BF16
}; /* losses must agree with the peer's, those of rounded products to a wider tolerance */

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
    stx_span *m = model_create(x, kind, 1, 1024);
    stx_writer *w = stx_writer_create(x);
    stx_params_save(w, m->params, "");
    stx_writer_finish(w, path);
    check(x);
    stx_destroy(x);
}

static void training_setting(int kind, int first) {
    static contender c[CONTENDERS];
    char params[512], n_threads[16], n_batch[16], n_steps[16], n_warm[16], mode[16], label[80];
    double keys = 0;
    int i, r, warmup;
    size_t l, h;
    memset(c, 0, sizeof c);
    /* the memory of 1024 is full after 4 blocks of 256: these, and one more round
       which is discarded as well */
    warmup = opt.warmup >= 0 ? opt.warmup : opt.quick || kind == SPANS_SHORT ? 1 : 3;
    for (l = 0; l < 8; l++)
        for (h = 0; h < 4; h++) {
            double e = span_of(kind, l, h) * 1024 + 32;
            keys += (e < 1024 ? e : 1024) / 32;
        }
    snprintf(params, sizeof params, "%s/params.%s.safetensors", opt.work, spans_name[kind]);
    snprintf(n_threads, sizeof n_threads, "%d", opt.threads);
    snprintf(n_batch, sizeof n_batch, "%d", opt.batch);
    snprintf(n_steps, sizeof n_steps, "%d", opt.steps);
    snprintf(n_warm, sizeof n_warm, "%d", warmup);
    write_params(kind, params);
    for (i = 0; i < CONTENDERS; i++) {
        const contender_kind *k = &contenders[i];
        char *argv[MAX_ARGS], what[80];
        int n = 0;
        c[i].name = k->name;
        c[i].tolerance = loss_tolerance[k->same];
        if (i == OWN_CBLAS && !opt.cblas) {
            snprintf(c[i].cannot, sizeof c[i].cannot, "no CBLAS was found");
            continue;
        }
        if (i >= PEER && (!opt.python || !opt.peer || (i == PEER_PLAIN && !opt.python_plain))) {
            snprintf(c[i].cannot, sizeof c[i].cannot, "no python3 with torch was found");
            continue;
        }
        snprintf(what, sizeof what, "training, %s spans: warm-up of %s ..", spans_name[kind],
                 k->name);
        progress(what);
#define ARG(s) argv[n++] = (char *)(uintptr_t)(s)
        if (i >= PEER) {
            ARG(i == PEER_PLAIN ? opt.python_plain : opt.python);
            ARG(opt.peer);
            ARG("--nlayers");
            ARG("8");
            ARG("--hid-sz");
            ARG("256");
            ARG("--inner-hid-sz");
            ARG("1024");
            ARG("--nheads");
            ARG("4");
            ARG("--attn-span");
            ARG("1024");
            ARG("--block-sz");
            ARG("256");
            ARG("--adapt-span");
            ARG("--adapt-span-loss");
            ARG("2e-6");
            ARG("--lr-warmup");
            ARG("8000");
            ARG("--batch-sz");
            ARG(n_batch);
            ARG("--dtype");
            ARG(precision_name[k->precision]);
            if (k->compile) ARG("--compile");
        } else {
            snprintf(mode, sizeof mode, "%d", k->literal);
            ARG(i == OWN_CBLAS ? opt.cblas : opt.self);
            ARG("--worker");
            ARG("--batch");
            ARG(n_batch);
            ARG("--spans");
            ARG(spans_name[kind]);
            ARG("--literal");
            ARG(mode);
            ARG("--precision");
            ARG(precision_name[k->precision]);
        }
        ARG("--data");
        ARG(opt.data);
        ARG("--params");
        ARG(params);
        ARG("--steps");
        ARG(n_steps);
        ARG("--warmup");
        ARG(n_warm);
        ARG("--threads");
        ARG(n_threads);
        argv[n] = NULL;
#undef ARG
        contender_start(&c[i], argv, opt.work, i);
    }
    probe_begin(opt.threads);
    snprintf(label, sizeof label, "training, %s spans", spans_name[kind]);
    /* a slow machine gets fewer rounds */
    r = contest(c, CONTENDERS, rounds(7), opt.rounds ? 1e9 : 45, label);
    if (first) {
        say("## Training, enwik8_small\n\n"
            "8 layers, width 256, inner 1024, 4 heads, span 1024, block 256, batch %d (the preset "
            "has 64; "
            "--batch 64), Adagrad, %d threads.\n"
            "The same data, first parameters and steps for all. Rounds of %d step%s, interleaved. "
            "\"seqtx\" has the peer's zero keys in an "
            "empty memory;\n"
            "it leaves out keys beyond a head's own span, whose share is below 1e-7 (\"literal "
            "eps\" computes it, as the peer does). "
            "Losses must agree "
            "with the first PyTorch\nrow to %g (f32) and %g (bf16), or the row is void.\n\n",
            opt.batch, opt.threads, opt.steps, opt.steps == 1 ? "" : "s", loss_tolerance[SAME],
            loss_tolerance[SAME_BF16]);
    }
    say("%s spans (%s; mean keys a head %.0f); median of %d rounds after %d discarded steps:\n\n",
        kind == SPANS_FULL      ? "Full"
        : kind == SPANS_LEARNED ? "Learned-like"
                                : "Short",
        kind == SPANS_FULL ? "all 1024"
        : kind == SPANS_LEARNED
            ? "20 to 51 in layers 1-4, one head of 307 in 5-6, of 307 and 922 in 7-8"
            : "all 51 and the ramp",
        keys, r, warmup + opt.steps);
    contest_say(c, CONTENDERS, PEER);
    for (i = 0; i < CONTENDERS; i++) {
        if (!c[i].fits) continue;
        found.rate[kind][i] = median(&c[i].rate);
        found.memory[kind][i] = c[i].memory;
    }
    unlink(params);
}

static void bench_training(void) {
    int kind;
    for (kind = opt.quick ? SPANS_SHORT : SPANS_FULL; kind < SPANS_KINDS; kind++)
        training_setting(kind, kind == (opt.quick ? SPANS_SHORT : SPANS_FULL));
}


// >>generation

static void bench_generation(void) {
    typedef struct {
        stx_ctx *x;
        stx_span_gen *g;
        samples rate, prompt;
        double memory;
    } stream;

    static stream streams[SPANS_KINDS][PRECISIONS][2];
    int32_t ids[1100];
    int kind, p, t, r, R = rounds(5), last = opt.threads > 1, n = opt.quick ? 16 : 64,
                       bf16 = have_bf16();
#define EACH_STREAM \
  for (kind = 0; kind < SPANS_KINDS; kind++) \
    for (p = 0; p <= bf16; p++) \
      for (t = 0; t <= last; t++)
    EACH_STREAM {
        stream *s = &streams[kind][p][t];
        stx_corpus *text;
        s->x = context(p, t ? opt.threads : 1);
        s->g = stx_span_gen_create(model_create(s->x, kind, 0, 1024), 1);
        text = corpus_open(s->x);
        stx_corpus_read(text, 0, 1100, ids);
        check(s->x);
        stx_corpus_close(text);
    }
    probe_begin(opt.threads);
    for (r = -1; r < R; r++) {
        progress("generation ..");
        EACH_STREAM {
            stream *s = &streams[kind][p][t];
            stx_sampling how;
            stx_real work[256];
            const stx_real *logits;
            double at = seconds();
            int i;
            memset(&how, 0, sizeof how);
            how.temperature = 0.8;
            how.top_p = 0.95;
            how.seed = 1;
            stx_span_gen_reset(s->g);
            logits = stx_span_gen_feed(s->g, ids, 1100);
            check(s->x);
            if (r >= 0) sample(&s->prompt, 1100 / (seconds() - at));
            at = seconds();
            for (i = 0; i < n && logits; i++) {
                int32_t token = stx_sample(&how, (uint64_t)i, logits, 256, work);
                if (token < 0) die("the logits are not finite");
                logits = stx_span_gen_feed(s->g, &token, 1);
            }
            check(s->x);
            if (r >= 0) sample(&s->rate, n / (seconds() - at));
            s->memory = (double)stx_bytes(s->x);
        }
        if (r >= 0) probe_now();
    }
    say("## Generation\n\nenwik8_small, one stream, cached keys and values, after a prompt of "
        "1100 tokens (every window is full); median "
        "of %d rounds of %d tokens.%s\n\n",
        R, n, bf16 ? "" : "\nbf16: not in this build of the library.");
    header("spans|precision|threads|tokens/s|range|prompt tokens/s|memory MB");
    EACH_STREAM {
        stream *s = &streams[kind][p][t];
        row_begin();
        cell(0, "%s", spans_name[kind]);
        cell(1, "%s", precision_name[p]);
        cell(2, "%d", t ? opt.threads : 1);
        cell(3, "%.0f", median(&s->rate));
        cell(4, "%.0f - %.0f", quantile(&s->rate, 0), quantile(&s->rate, 1));
        cell(5, "%.0f", median(&s->prompt));
        cell(6, "%.0f", s->memory * 1e-6);
        most(&found.generation[kind][p], median(&s->rate));
    }
    print_table();
    probe_say();
    EACH_STREAM stx_destroy(streams[kind][p][t].x);
#undef EACH_STREAM
}


// >>summary: what was aimed at, and what this run measured

/* wanted and, if it is not 0, then: where the target goes next. less: the smaller the
   better. */
static void goal(const char *what, double value, int less, double wanted, double then) {
    if (!(value == value)) return;
    row_begin();
    cell(0, "%s", what);
    if (then > 0)
        cell(1, "%s %.3g, then %.3g", less ? "at most" : "at least", wanted, then);
    else
        cell(1, "%s %.3g", less ? "at most" : "at least", wanted);
    cell(2, "%.*f", value < 1.2 ? 3 : 2, value);
    if (then > 0 && (less ? value <= then : value >= then))
        cell(3, "yes, both");
    else if (less ? value <= wanted : value >= wanted)
        cell(3, then > 0 ? "yes, the first" : "yes");
    else
        cell(3, "no: %.0f %% %s", less ? 100 * (value / wanted - 1) : 100 * (1 - value / wanted),
             less ? "above" : "short");
}

static void bench_summary(void) {
    static const char *const of[SPANS_KINDS] = {"full", "learned-like", "short"};
    char what[CELL];
    int kind, p, any = 0;
    say("## Summary\n\nRatios within this run, of medians. Training is the step of enwik8_small "
        "against PyTorch eager f32 of the same "
        "model.\n\n");
    header("measured|target|here|met");
    for (p = 0; p < PRECISIONS; p++)
        for (kind = 0; kind < SPANS_KINDS; kind++) {
            double with = found.rate[kind][PEER];
            snprintf(what, sizeof what, "training %s, %s spans", precision_name[p], of[kind]);
            goal(what, found.rate[kind][p ? OWN_BF16 : OWN] / with, 0, p ? 8 : 3, p ? 0 : 5);
        }
    for (p = 0; p < PRECISIONS; p++)
        for (kind = 0; kind < SPANS_KINDS; kind++) {
            snprintf(what, sizeof what, "training %s, %s spans, to PyTorch as installed",
                     precision_name[p], of[kind]);
            goal(what, found.rate[kind][p ? OWN_BF16 : OWN] / found.rate[kind][PEER_PLAIN], 0,
                 p ? 8 : 3, p ? 0 : 5);
        }
    goal("product f32 / the fastest peer, worst", found.f32_least, 0, 1, 0);
    goal("product bf16 / oneDNN's bf16, worst", found.bf16_least, 0, 0.95, 0);
    for (p = 0; p < PRECISIONS; p++) {
        snprintf(what, sizeof what, "attention %s, one head of 8192 with seven of 64 / all 8192",
                 precision_name[p]);
        goal(what, found.one_long[p], 1, 0.20, 0.15);
        snprintf(what, sizeof what, "step %s, largest span 32768 / 1024", precision_name[p]);
        goal(what, found.context[p], 1, 1.05, 0);
    }
    if (table.rows > 1) print_table();
    header(
        "also measured|seqtx f32|seqtx bf16|PyTorch eager f32|eager bf16|compiled f32|compiled "
        "bf16|eager f32 as installed");
    for (kind = 0; kind < SPANS_KINDS; kind++) {
        static const int order[7] = {OWN,           OWN_BF16,           PEER,      PEER_BF16,
                                     PEER_COMPILED, PEER_COMPILED_BF16, PEER_PLAIN};
        int i, memory;
        for (memory = 0; memory < 2; memory++) {
            const double *v = memory ? found.memory[kind] : found.rate[kind];
            if (!(v[OWN] == v[OWN])) continue;
            any = 1;
            row_begin();
            cell(0, "training, %s spans, %s", of[kind], memory ? "peak memory MB" : "tokens/s");
            for (i = 0; i < 7; i++)
                if (v[order[i]] == v[order[i]])
                    cell(1 + i, "%.0f", v[order[i]] * (memory ? 1e-6 : 1));
        }
    }
    for (kind = 0; kind < SPANS_KINDS; kind++) {
        if (!(found.generation[kind][F32] > 0)) continue;
        any = 1;
        row_begin();
        cell(0, "generation, %s spans, tokens/s", of[kind]);
        for (p = 0; p < PRECISIONS; p++)
            if (found.generation[kind][p] > 0) cell(1 + p, "%.0f", found.generation[kind][p]);
    }
    if (any) print_table();
}


// >>main

static const char usage[] =
    "bench [options]: times seqtx (sh bench/run.sh builds and runs it)\n"
    "  --quick            fewer rounds and cases, less than 3 minutes\n"
    "  --only LIST        of gemm,attention,context,training,generation (default: all)\n"
    "  --threads N        default: all\n"
    "  --rounds N         samples of each number (default 7; 9 of context, 5 of generation)\n"
    "  --batch N          training: streams (default 8; the preset has 64)\n"
    "  --steps N          training: steps in a round (default 3)\n"
    "  --warmup N         training: steps before the first round\n"
    "  --data FILE        text\n"
    "  --python CMD --peer FILE    PyTorch contender\n"
    "  --python-plain CMD the same python without help from its surroundings\n"
    "  --cblas FILE       this program built with SEQTX_CBLAS\n"
    "  --mkl FILE         a shared library with MKL in it: PyTorch's libtorch_cpu.so, or "
    "libmkl_rt\n"
    "  --mkl-amd FILE     one with mkl_serv_intel_cpu_true, loaded before\n"
    "  --work DIR         for temporary files\n"
    "  --append FILE      write the tables there too\n"
    "  --cblas-check      name the linked CBLAS; exit code 0 if it is worth a comparison\n"
    "  --mkl-check        the speed and the name of --mkl's, given before; exit code 0 if it is "
    "there\n"
    "  --onednn-check     name the linked oneDNN; exit code 0 if it works\n";

int main(int argc, char **argv) {
    int i;
    opt.self = argv[0];
    for (i = 1; i < argc; i++) {
        const char *a = argv[i], *v = i + 1 < argc ? argv[i + 1] : NULL;
        if (!strcmp(a, "--quick")) {
            opt.quick = 1;
            continue;
        }
        if (!strcmp(a, "--worker")) {
            opt.worker = 1;
            continue;
        }
        if (!strcmp(a, "--help")) {
            fputs(usage, stdout);
            return 0;
        }
        if (!strcmp(a, "--cblas-check")) {
#ifdef BENCH_CBLAS
            return cblas_check();
#else
            return 1;
#endif
        }
        if (!strcmp(a, "--mkl-check")) {
            if (opt.mkl && mkl_open(opt.mkl, opt.mkl_amd)) return mkl_check();
            puts(mkl.name);
            return 1;
        }
        if (!strcmp(a, "--onednn-check")) {
#ifdef BENCH_DNNL
            if (onednn_open(0)) {
                puts(onednn.name);
                return 0;
            }
#endif
            return 1;
        }
        i++;
        if (!strcmp(a, "--threads"))
            opt.threads = whole(v, 1, a);
        else if (!strcmp(a, "--rounds")) {
            opt.rounds = whole(v, 1, a);
            if (opt.rounds > MAX_ROUNDS) opt.rounds = MAX_ROUNDS;
        } else if (!strcmp(a, "--batch"))
            opt.batch = whole(v, 1, a);
        else if (!strcmp(a, "--steps"))
            opt.steps = whole(v, 1, a);
        else if (!strcmp(a, "--warmup"))
            opt.warmup = whole(v, 0, a);
        else if (!strcmp(a, "--literal"))
            opt.literal = whole(v, 0, a);
        else if (!v) {
            fprintf(stderr, "bench: unknown option, or no value: %s\n%s", a, usage);
            return 2;
        } else if (!strcmp(a, "--only"))
            opt.only = v;
        else if (!strcmp(a, "--data"))
            opt.data = v;
        else if (!strcmp(a, "--params"))
            opt.params = v;
        else if (!strcmp(a, "--python"))
            opt.python = v;
        else if (!strcmp(a, "--python-plain"))
            opt.python_plain = v;
        else if (!strcmp(a, "--peer"))
            opt.peer = v;
        else if (!strcmp(a, "--cblas"))
            opt.cblas = v;
        else if (!strcmp(a, "--mkl"))
            opt.mkl = v;
        else if (!strcmp(a, "--mkl-amd"))
            opt.mkl_amd = v;
        else if (!strcmp(a, "--work"))
            opt.work = v;
        else if (!strcmp(a, "--append"))
            report_path = v;
        else if (!strcmp(a, "--spans")) {
            for (opt.spans = 0; opt.spans < SPANS_KINDS && strcmp(v, spans_name[opt.spans]);
                 opt.spans++)
                continue;
            if (opt.spans == SPANS_KINDS) {
                fprintf(stderr, "bench: --spans full, learned or short\n");
                return 2;
            }
        } else if (!strcmp(a, "--precision")) {
            for (opt.precision = 0;
                 opt.precision < PRECISIONS && strcmp(v, precision_name[opt.precision]);
                 opt.precision++)
                continue;
            if (opt.precision == PRECISIONS) {
                fprintf(stderr, "bench: --precision f32 or bf16\n");
                return 2;
            }
        } else {
            fprintf(stderr, "bench: unknown option %s\n%s", a, usage);
            return 2;
        }
    }
    if (!opt.threads) {
        stx_ctx *x = stx_create(NULL);
        opt.threads = stx_threads(x);
        stx_destroy(x);
    }
    signal(SIGPIPE, SIG_IGN); /* a contender that died is reported, and is not the end */
    if (opt.worker) return worker();
    found_nothing();
    if (strstr(opt.only, "gemm")) bench_gemm();
    if (strstr(opt.only, "attention")) bench_attention();
    if (strstr(opt.only, "context")) bench_context();
    if (strstr(opt.only, "training")) bench_training();
    if (strstr(opt.only, "generation")) bench_generation();
    bench_summary();
    if (probe.x) stx_destroy(probe.x);
    return 0;
}
