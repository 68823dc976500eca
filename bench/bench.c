/* bench.c - times seqtx, float and bfloat16: matrix products, the attention kernel, training and generation, beside CBLAS
   and PyTorch.

       sh bench/run.sh            builds this file and runs it (bench/README.md)

   Contenders take turns within one run, so that a busy machine is busy for all of them; numbers are medians of rounds,
   with minimum and maximum beside them. Training contenders are processes of their own that answer a line on stdin with
   one round of steps (the protocol of bench/peers): this program once more with --worker, and PyTorch. All read the same
   data and start from the same parameter file, and a row whose losses are not the peer's is void. */
#define _POSIX_C_SOURCE 200809L
#include <fcntl.h>
#include <signal.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#if defined(BENCH_CBLAS) || defined(SEQTX_CBLAS)
  #include <cblas.h>
  #undef I      /* OpenBLAS's header brings in complex.h */
#endif
#ifdef BENCH_CBLAS
  /* OpenBLAS only; NULL when another CBLAS is linked */
  extern void openblas_set_num_threads(int n) __attribute__((weak));
  extern char *openblas_get_corename(void) __attribute__((weak));
  extern char *openblas_get_config(void) __attribute__((weak));
#endif
#define SEQTX_IMPLEMENTATION
#include "../seqtx_attn_span.h"
#include "../examples/text.h"
#include "cpu.h"

enum { SPANS_FULL, SPANS_LEARNED, SPANS_SHORT, SPANS_KINDS };
static const char *const spans_name[SPANS_KINDS] = {"full", "learned", "short"};

static struct {
    int quick, threads, rounds, warmup, steps, batch, worker, spans, literal, precision;
    const char *self, *data, *params, *python, *python_plain, *peer, *cblas, *work, *only;
} opt = {0, 0, 0, -1, 3, 8, 0, SPANS_FULL, 1, F32, NULL, NULL, NULL, NULL, NULL, NULL, NULL, ".",
    "gemm,attention,context,training,generation"};

static int rounds(int usual) { return opt.rounds ? opt.rounds : opt.quick ? 3 : usual; }

// >>found: what the summary at the end needs; NaN where nothing was measured

enum { OWN, OWN_BF16, OWN_CBLAS, OWN_EPS, OWN_EPS_BF16, PEER, PEER_BF16, PEER_COMPILED, PEER_COMPILED_BF16, PEER_PLAIN, CONTENDERS };

static struct {
    double squares, tiles, bf16_least, bf16_most;      /* ratio to CBLAS on one thread; the least of the shapes, and the most */
    double one_long[PRECISIONS];                       /* cost of one long head among short ones, to all long */
    double context[PRECISIONS];                        /* step at the largest maximum span, to that at 1024 */
    double rate[SPANS_KINDS][CONTENDERS], memory[SPANS_KINDS][CONTENDERS];
    double generation[SPANS_KINDS][PRECISIONS];
} found;

static void found_nothing(void) {
    double *v = (double *)(void *)&found;
    size_t i;
    for (i = 0; i < sizeof found / sizeof *v; i++) v[i] = NAN;
}
static void least(double *at, double v) { if (!(*at <= v)) *at = v; }
static void most(double *at, double v) { if (!(*at >= v)) *at = v; }

// >>gemm

typedef struct { const char *name; int ta, tb; size_t M, N, K; int one_thread; } product;

#ifdef BENCH_CBLAS
static void cblas_product(const product *p, const stx_real *A, const stx_real *B, stx_real *C) {
    cblas_sgemm(CblasRowMajor, p->ta ? CblasTrans : CblasNoTrans, p->tb ? CblasTrans : CblasNoTrans, (int)p->M, (int)p->N, (int)p->K, 1,
                A, (int)(p->ta ? p->M : p->K), B, (int)(p->tb ? p->K : p->N), 0, C, (int)p->N);
}
#endif
static void own_product(stx_ctx *x, const product *p, const stx_real *A, const stx_real *B, stx_real *C) {
    stx_gemm_args g = stx_gemm_of(p->ta, p->tb, p->M, p->N, p->K, A, B, C);
    stx_gemm(x, &g);
}
/* GFLOP/s of as many calls as take about 8 ms */
static double gemm_rate(stx_ctx *x, const product *p, const stx_real *A, const stx_real *B, stx_real *C, size_t calls) {
    double t = seconds();
    size_t i;
    for (i = 0; i < calls; i++) {
        if (x) own_product(x, p, A, B, C);
#ifdef BENCH_CBLAS
        else cblas_product(p, A, B, C);
#endif
    }
    return 2.0 * (double)p->M * (double)p->N * (double)p->K * (double)calls / (seconds() - t) * 1e-9;
}

#ifdef BENCH_CBLAS
/* Is the linked CBLAS a contender? The reference BLAS is not: it is a hundred times slower, and its rows would take hours. */
static double cblas_rate(void) {
    static const product p = {"", 0, 0, 256, 256, 256, 0};
    stx_real *a = (stx_real *)malloc(3 * 65536 * sizeof *a);
    double best = 0;
    int i;
    if (!a) die("no memory");
    fill_random(a, 3 * 65536, 1);
    for (i = 0; i < 3; i++) {
        double r = gemm_rate(NULL, &p, a, a + 65536, a + 2 * 65536, 2);
        if (r > best) best = r;
    }
    free(a);
    return best;
}
static int cblas_check(void) {
    double rate = cblas_rate();
    if (openblas_get_config && openblas_get_corename) printf("%s, kernels for %s, ", openblas_get_config(), openblas_get_corename());
    else printf("a CBLAS that is not OpenBLAS, ");
    printf("%.0f GFLOP/s at 256\n", rate);
    return rate >= 12 ? 0 : 1;
}
#endif

static void bench_gemm(void) {
    static const product list[] = {
        {"square 64", 0, 0, 64, 64, 64, 0}, {"square 128", 0, 0, 128, 128, 128, 0}, {"square 256", 0, 0, 256, 256, 256, 0},
        {"square 512", 0, 0, 512, 512, 512, 0}, {"square 1024", 0, 0, 1024, 1024, 1024, 0}, {"square 2048", 0, 0, 2048, 2048, 2048, 0},
        {"x W^T  4096x256x256", 0, 1, 4096, 256, 256, 0}, {"x W^T  4096x1024x256", 0, 1, 4096, 1024, 256, 0}, {"x W^T  4096x256x1024", 0,
            1, 4096, 256, 1024, 0},
        {"dy W   4096x256x1024", 0, 0, 4096, 256, 1024, 0},
        {"dy^T x 256x256x4096", 1, 0, 256, 256, 4096, 0}, {"dy^T x 1024x256x4096", 1, 0, 1024, 256, 4096, 0}, {"dy^T x 256x1024x4096", 1,
            0, 256, 1024, 4096, 0},
        {"x W^T  1024x9216x768", 0, 1, 1024, 9216, 768, 0}, {"dy W   1024x768x9216", 0, 0, 1024, 768, 9216, 0}, {"dy^T x 9216x768x1024", 1,
            0, 9216, 768, 1024, 0},
        {"tile q k^T  64x256x64", 0, 1, 64, 256, 64, 1}, {"tile p v    64x64x256", 0, 0, 64, 64, 256, 1}, {"tile ds^T q 256x64x64", 1, 0,
            256, 64, 64, 1},
        {"tile q k^T  64x1024x64", 0, 1, 64, 1024, 64, 1}, {"tile p v    64x64x1024", 0, 0, 64, 64, 1024, 1}, {"tile ds^T q 1024x64x64", 1,
            0, 1024, 64, 64, 1}};
    enum { N = sizeof list / sizeof *list, BLAS = PRECISIONS, WHO };     /* who: own f32, own bf16, CBLAS */
    static samples rate[N][2][WHO];
    static double calls[N][2][WHO], worst[N][WHO];
    stx_ctx *x[WHO][2];
    stx_real *A, *B, *C[WHO];
    size_t room = (size_t)9216 * 1024, i, k;
    int r, t, w, R = rounds(7), last = opt.threads > 1, on[WHO] = {1, 0, 0};
    memset(x, 0, sizeof x);
    for (w = 0; w < PRECISIONS; w++) for (t = 0; t <= last; t++) x[w][t] = context(w, t ? opt.threads : 1);
    on[BF16] = x[BF16][0] != NULL;
    A = (stx_real *)stx_persist(x[F32][0], room * sizeof *A);
    B = (stx_real *)stx_persist(x[F32][0], room * sizeof *A);
    for (w = 0; w < WHO; w++) C[w] = (stx_real *)stx_persist(x[F32][0], room * sizeof *A);
    check(x[F32][0]);
    fill_random(A, room, 2);
    fill_random(B, room, 3);
#ifdef BENCH_CBLAS
    on[BLAS] = cblas_rate() >= 12;
#endif
    probe_begin(opt.threads);
    for (r = -1; r < R; r++) {     /* round -1 warms up, finds the number of calls, and compares the results */
        progress("matrix products ..");
        for (i = 0; i < N; i++) {
            const product *p = &list[i];
            if (opt.quick && p->M == 2048) continue;
            for (t = 0; t <= last; t++) {
                int turn;
                if (t && p->one_thread) continue;
#ifdef BENCH_CBLAS
                if (openblas_set_num_threads) openblas_set_num_threads(t ? opt.threads : 1);
#endif
                for (turn = 0; turn < WHO; turn++) {
                    double v = 0;
                    w = (turn + r + 1) % WHO;
                    if (!on[w]) continue;
                    if (r >= 0) {
                        sample(&rate[i][t][w], gemm_rate(w == BLAS ? NULL : x[w][t], p, A, B, C[w], (size_t)calls[i][t][w])); continue;
                    }
                    for (k = 0; k < 2; k++) v = gemm_rate(w == BLAS ? NULL : x[w][t], p, A, B, C[w], 1);
                    calls[i][t][w] = 1 + floor(0.008 * v * 1e9 / (2.0 * (double)p->M * (double)p->N * (double)p->K));
                }
                /* inputs are in [-1,1): the scale of a sum is sqrt(K) / 3 */
                if (r < 0) for (w = 1; w < WHO; w++) for (k = 0; on[w] && k < p->M * p->N; k++)
                    most(&worst[i][w], fabs((double)C[F32][k] - (double)C[w][k]) * 3 / sqrt((double)p->K));
            }
        }
        if (r >= 0) probe_now();
    }
    say("## Matrix products, GFLOP/s\n\nMedian of %d rounds (least - most); ratios of the medians, to CBLAS's float product. op(A) op(B) "
        "as M x N x K.%s\n\n", R,
        on[BF16] ? "\nbf16: the same call in a context of that precision; packing and rounding the float inputs is part of the time." :
            "\nbf16: not in this build of the library.");
    header(on[BF16] ? "product|threads|f32|range|bf16|range|CBLAS f32|range|f32 / CBLAS|bf16 / CBLAS" : "product|threads|f32|range|CBLAS "
           "f32|range|f32 / CBLAS");
    for (i = 0; i < N; i++)
        for (t = 0; t <= last; t++) {
            int c = 0, ratios;
            if (!rate[i][t][F32].n) continue;
            row_begin();
            cell(c++, "%s", list[i].name);
            cell(c++, "%d", t ? opt.threads : 1);
            for (w = 0; w < WHO; w++) {
                if (w == BF16 && !on[BF16]) continue;
                if (on[w]) {
                    cell(c, "%.1f", median(&rate[i][t][w]));
                    cell(c + 1, "%.0f - %.0f", quantile(&rate[i][t][w], 0), quantile(&rate[i][t][w], 1));
                }
                c += 2;
            }
            /* rounding both factors to 8 bits moves a sum by a few 2^-9 of its scale, the largest of 10^6 sums by 1e-2 */
            for (w = 0, ratios = on[BLAS]; ratios && w < PRECISIONS; w++) {
                double v = median(&rate[i][t][w]) / median(&rate[i][t][BLAS]), off = w == F32 ? worst[i][BLAS] : worst[i][BF16];
                int fits = off < (w == F32 ? 1e-4 : 2e-2);
                if (!on[w]) continue;
                if (fits) cell(c++, "%.2f", v); else cell(c++, "void: differs by %.0e", off);
                if (t) continue;
                if (!fits) v = NAN;
                if (w == F32 && list[i].one_thread) least(&found.tiles, v);
                else if (list[i].one_thread || list[i].M < 256) continue;
                else if (w == F32) least(&found.squares, v);
                else { least(&found.bf16_least, v); most(&found.bf16_most, v); }
            }
        }
    print_table();
    probe_say();
    for (w = 0; w < PRECISIONS; w++) for (t = 0; t <= last; t++) stx_destroy(x[w][t]);
}

// >>attention

typedef struct {
    char name[CELL];
    size_t heads, span[8], longest;
    int ramp;                        /* spans by the learned ramp (z), else by the window */
    double pairs;                    /* keys with weight, over all queries */
    stx_real *q, *k, *v, *pe, *dy, z[8];
    samples fwd[PRECISIONS], both[PRECISIONS];
} attention_case;

static double attention_once(stx_ctx *x, attention_case *c, size_t B, size_t T, size_t D, int backward) {
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
        in.z = stx_variable(x, c->z, H, 0, 0, 0);
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
        for (h = 0; h < c->heads; h++) c->span[h] = i < 5 ? spans[i] : i == 5 ? 64 : i == 6 ? (h == 2 ? 8192 : 64) : 8192;
        c->longest = i < 5 ? spans[i] : 8192;
        for (h = 0; h < c->heads; h++) {
            size_t keys = c->ramp && c->span[h] + 32 < c->longest ? c->span[h] + 32 : c->span[h];
            c->z[h] = (stx_real)((double)c->span[h] / (double)c->longest);
            c->pairs += (double)keys * (double)(Bc * T);
        }
        if (i < 5) snprintf(c->name, CELL, "span %zu, 4 heads", spans[i]);
        else snprintf(c->name, CELL, "%s", i == 5 ? "8 heads of 64" : i == 6 ? "one head of 8192, seven of 64" : "8 heads of 8192");
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
                int k, reps = cases[i].pairs < 4e6 ? 4 : 1;      /* short ones: several, the median of them */
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
    say("## Attention against span\n\nstx_attention with a relative table, block 256, head size 64, every key present, %d threads; batch "
        "4 with 4 heads (spans set by the "
        "window),\nbatch 1 with 8 heads (by the learned ramp of 32). Median of %d rounds (least - most). GFLOP/s count 6 D a key and "
            "query forward and\ntwice that "
        "backward, nothing for recomputation or for keys without weight.%s\n\n", opt.threads, R,
            x[BF16] ? "" : " bf16: not in this build of the library.");
    header("case|precision|fwd ms|range|GFLOP/s|fwd+bwd ms|range|GFLOP/s|cost ratio");
    for (i = 0; i < n; i++)
        for (p = 0; p < PRECISIONS; p++) {
            attention_case *c = &cases[i];
            double gf = 6.0 * (double)D * c->pairs * 1e-9, ratio = median(&c->both[p]) / median(&cases[i < 5 ? 0 : n - 1].both[p]);
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
    say("Cost ratio (fwd+bwd, within a precision): to span 32 in the first part, to 8 heads of 8192 in the second.\n\n");
    probe_say();
    for (p = 0; p < PRECISIONS; p++) stx_destroy(x[p]);
    stx_destroy(inputs);
}

// >>training

/* Spans of the benchmark's models, as a fraction of 1024, written into the parameters. "learned" follows what trained
   models look like: short heads below, a few long ones above. */
static double span_of(int kind, size_t l, size_t h) {
    if (kind == SPANS_FULL) return 1;
    if (kind == SPANS_SHORT) return 0.05;
    if (l < 4) return h == 0 ? 0.05 : 0.02;
    if (l < 6) return h == 0 ? 0.3 : 0.04;
    return h == 0 ? 0.9 : h == 1 ? 0.3 : 0.04;
}
static void set_spans(stx_span *m, int kind) {     /* in tokens, whatever the largest span is */
    size_t l, h;
    for (l = 0; l < m->desc.layers; l++)
        for (h = 0; h < m->desc.heads; h++) m->layer[l].z->data[h] = (stx_real)(span_of(kind, l, h) * 1024 / (double)m->desc.span);
}
static stx_span *model_create(stx_ctx *x, int kind, int literal, size_t span) {   /* enwik8_small over bytes */
    stx_span_desc d;
    stx_span *m;
    memset(&d, 0, sizeof d);
    d.vocab = 256; d.layers = 8; d.dim = 256; d.heads = 4; d.inner = 1024; d.span = span;
    d.adapt_span = 1; d.span_loss = 2e-6; d.ramp = 32;
    d.literal_memory = literal & 1;        /* empty memory as zero keys, as the peer has it */
    d.literal_eps = literal >> 1;          /* and 1e-8 of every key in the layer's window in the normaliser */
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
    od.kind = STX_ADAGRAD; od.clip = 0.03;
    t->lr.lr = 0.07; t->lr.warmup = 8000;
    t->optim = stx_optim_create(t->m->params, &od);
    t->text = corpus_open(x);
    t->b = stx_batches_create(x, t->text, &bd);
    t->memory = stx_span_state_create(t->m, B);
    t->in = (int32_t *)malloc(B * t->T * sizeof *t->in);
    t->out = (int32_t *)malloc(B * t->T * sizeof *t->out);
    if (!t->in || !t->out) die("no memory");
    check(x);
}
static double trainee_step(trainee *t) {    /* gives the mean nll, in nats */
    stx_tensor *loss;
    double nll;
    if (stx_batches_next(t->b, t->in, t->out) == STX_BATCH_FRESH) stx_span_state_reset(t->memory);
    stx_begin(t->x, STX_TRAIN);
    loss = stx_span_loss(t->m, stx_tokens(t->x, t->in, t->B, t->T), stx_tokens(t->x, t->out, t->B, t->T), t->memory, t->memory);
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

/* One contender: a round of opt.steps training steps for each line on stdin, answered as bench/peers does. */
static int worker(void) {
    trainee t;
    double first = NAN;
    char line[64];
    int warm = opt.warmup < 0 ? 0 : opt.warmup;
    stx_ctx *x = context(opt.precision, opt.threads);
    if (!x) { fprintf(stderr, "cannot: %s is not in this build of the library\n", precision_name[opt.precision]); return 3; }
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
        if (warm > 0) { warm = 0; continue; }
        printf("{\"tokens_per_s\": %.6g, \"loss_first\": %.9g, \"loss_last\": %.9g, \"loss_step1\": %.9g, \"steps_done\": %llu, "
               "\"seconds\": %.6g, \"peak_bytes\": %zu}\n",
               (double)(t.B * t.T * (size_t)n) / at, round_first, nll, first, (unsigned long long)t.done, at, stx_peak_bytes(x));
        fflush(stdout);
    }
    trainee_destroy(&t);
    return 0;
}

// >>context: the step against the largest span that a model may learn, with spans that are learned the same

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
        for (p = 0; p <= bf16; p++) trainee_create(&model[i][p], context(p, opt.threads), B, span[i]);
    }
    probe_begin(opt.threads);
    for (r = -warm; r < R; r++) {
        char what[64];
        snprintf(what, sizeof what, "context: %s %d ..", r < 0 ? "warm-up" : "round", r < 0 ? r + warm + 1 : r + 1);
        progress(what);
        for (p = 0; p <= bf16; p++)
            for (i = 0; i < n; i++) {
                int at = (i + r + warm) % n;         /* in turns, each time from another one on */
                trainee *t = &model[at][p];
                double from = seconds();
                trainee_step(t);
                if (r >= 0) sample(&ms[at][p], (seconds() - from) * 1e3);
                check(t->x);
                set_spans(t->m, SPANS_LEARNED);     /* an update of z is worth more tokens where the largest span is longer */
                memory[at][p] = (double)stx_peak_bytes(t->x);
            }
        if (r >= 0) probe_now();
    }
    say("## Training step against the largest span\n\nThe model of the training table with another largest span S, and spans of the same "
        "number of tokens (the learned-like ones below, put "
        "back\nafter every step), batch %zu, %d threads, default mode. Median of %d rounds (least - most), in turns.%s\n\n", B,
            opt.threads, R, bf16 ? "" : " bf16: not in this build of the library.");
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
            found.context[p] = ratio;               /* of the last, which is the largest */
            trainee_destroy(&model[i][p]);
        }
    }
    print_table();
    probe_say();
    opt.spans = spans;
    opt.literal = literal;
}

// >>contenders

enum { SAME, SAME_BF16 };     /* losses must agree with the peer's, those of rounded products to a wider tolerance */
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
    /* the memory of 1024 is full after 4 blocks of 256: these, and one more round which is discarded as well */
    warmup = opt.warmup >= 0 ? opt.warmup : opt.quick || kind == SPANS_SHORT ? 1 : 3;
    for (l = 0; l < 8; l++) for (h = 0; h < 4; h++) {
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
        if (i == OWN_CBLAS && !opt.cblas) { snprintf(c[i].cannot, sizeof c[i].cannot, "no CBLAS was found"); continue; }
        if (i >= PEER && (!opt.python || !opt.peer || (i == PEER_PLAIN && !opt.python_plain))) {
            snprintf(c[i].cannot, sizeof c[i].cannot, "no python3 with torch was found"); continue;
        }
        snprintf(what, sizeof what, "training, %s spans: warm-up of %s ..", spans_name[kind], k->name);
        progress(what);
#define ARG(s) argv[n++] = (char *)(uintptr_t)(s)
        if (i >= PEER) {
            ARG(i == PEER_PLAIN ? opt.python_plain : opt.python); ARG(opt.peer);
            ARG("--nlayers"); ARG("8"); ARG("--hid-sz"); ARG("256"); ARG("--inner-hid-sz"); ARG("1024"); ARG("--nheads"); ARG("4");
            ARG("--attn-span"); ARG("1024"); ARG("--block-sz"); ARG("256"); ARG("--adapt-span"); ARG("--adapt-span-loss"); ARG("2e-6");
            ARG("--lr-warmup"); ARG("8000"); ARG("--batch-sz"); ARG(n_batch);
            ARG("--dtype"); ARG(precision_name[k->precision]);
            if (k->compile) ARG("--compile");
        } else {
            snprintf(mode, sizeof mode, "%d", k->literal);
            ARG(i == OWN_CBLAS ? opt.cblas : opt.self); ARG("--worker");
            ARG("--batch"); ARG(n_batch); ARG("--spans"); ARG(spans_name[kind]); ARG("--literal"); ARG(mode);
            ARG("--precision"); ARG(precision_name[k->precision]);
        }
        ARG("--data"); ARG(opt.data); ARG("--params"); ARG(params); ARG("--steps"); ARG(n_steps); ARG("--warmup"); ARG(n_warm);
        ARG("--threads"); ARG(n_threads);
        argv[n] = NULL;
#undef ARG
        contender_start(&c[i], argv, opt.work, i);
    }
    probe_begin(opt.threads);
    snprintf(label, sizeof label, "training, %s spans", spans_name[kind]);
    r = contest(c, CONTENDERS, rounds(7), opt.rounds ? 1e9 : 45, label);      /* a slow machine gets fewer rounds */
    if (first) {
        say("## Training, enwik8_small\n\n8 layers, width 256, inner 1024, 4 heads, span 1024, block 256, batch %d (the preset has 64; "
            "--batch 64), Adagrad, %d threads.\n"
            "The same data, first parameters and steps for all. Rounds of %d step%s, in turns. \"seqtx\" has the peer's zero keys in an "
                "empty memory;\n"
            "it leaves out keys beyond a head's own span, whose share is below 1e-7 (\"literal eps\" computes it, as the peer does). "
                "Losses must agree "
            "with the first PyTorch\nrow to %g (f32) and %g (bf16), or the row is void.\n\n", opt.batch, opt.threads, opt.steps,
                opt.steps == 1 ? "" : "s", loss_tolerance[SAME], loss_tolerance[SAME_BF16]);
    }
    say("%s spans (%s; mean keys a head %.0f); median of %d rounds after %d discarded steps:\n\n", kind == SPANS_FULL ?
        "Full" : kind == SPANS_LEARNED ? "Learned-like" : "Short",
        kind == SPANS_FULL ? "all 1024" : kind == SPANS_LEARNED ? "20 to 51 in layers 1-4, one head of 307 in 5-6, of 307 and 922 in 7-8" :
            "all 51 and the ramp", keys, r, warmup + opt.steps);
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
    for (kind = opt.quick ? SPANS_SHORT : SPANS_FULL; kind < SPANS_KINDS; kind++) training_setting(kind,
        kind == (opt.quick ? SPANS_SHORT : SPANS_FULL));
}

// >>generation

static void bench_generation(void) {
    typedef struct { stx_ctx *x; stx_span_gen *g; samples rate, prompt; double memory; } stream;
    static stream streams[SPANS_KINDS][PRECISIONS][2];
    int32_t ids[1100];
    int kind, p, t, r, R = rounds(5), last = opt.threads > 1, n = opt.quick ? 16 : 64, bf16 = have_bf16();
#define EACH_STREAM for (kind = 0; kind < SPANS_KINDS; kind++) for (p = 0; p <= bf16; p++) for (t = 0; t <= last; t++)
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
            how.temperature = 0.8; how.top_p = 0.95; how.seed = 1;
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
    say("## Generation\n\nenwik8_small, one stream, cached keys and values, after a prompt of 1100 tokens (every window is full); median "
        "of %d rounds of %d tokens.%s\n\n", R, n,
        bf16 ? "" : "\nbf16: not in this build of the library.");
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

/* wanted and, if it is not 0, then: where the target goes next. less: the smaller the better. */
static void goal(const char *what, double value, int less, double wanted, double then) {
    if (!(value == value)) return;
    row_begin();
    cell(0, "%s", what);
    if (then > 0) cell(1, "%s %.3g, then %.3g", less ? "at most" : "at least", wanted, then);
    else cell(1, "%s %.3g", less ? "at most" : "at least", wanted);
    cell(2, "%.*f", value < 1.2 ? 3 : 2, value);
    if (then > 0 && (less ? value <= then : value >= then)) cell(3, "yes, both");
    else if (less ? value <= wanted : value >= wanted) cell(3, then > 0 ? "yes, the first" : "yes");
    else cell(3, "no: %.0f %% %s", less ? 100 * (value / wanted - 1) : 100 * (1 - value / wanted), less ? "above" : "short");
}
static void bench_summary(void) {
    static const char *const of[SPANS_KINDS] = {"full", "learned-like", "short"};
    char what[CELL];
    int kind, p, any = 0;
    say("## Summary\n\nRatios within this run, of medians. Training is the step of enwik8_small against PyTorch eager f32 of the same "
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
            snprintf(what, sizeof what, "training %s, %s spans, to PyTorch as installed", precision_name[p], of[kind]);
            goal(what, found.rate[kind][p ? OWN_BF16 : OWN] / found.rate[kind][PEER_PLAIN], 0, p ? 8 : 3, p ? 0 : 5);
        }
    goal("product f32 / OpenBLAS, worst of dims >= 256", found.squares, 0, 0.85, 0);
    goal("product f32 / OpenBLAS, worst 64-row tile", found.tiles, 0, 0.65, 0);
    for (p = 0; p < PRECISIONS; p++) {
        snprintf(what, sizeof what, "attention %s, one head of 8192 with seven of 64 / all 8192", precision_name[p]);
        goal(what, found.one_long[p], 1, 0.20, 0.15);
        snprintf(what, sizeof what, "step %s, largest span 32768 / 1024", precision_name[p]);
        goal(what, found.context[p], 1, 1.05, 0);
    }
    if (table.rows > 1) print_table();
    header("also measured|seqtx f32|seqtx bf16|PyTorch eager f32|eager bf16|compiled f32|compiled bf16|eager f32 as installed");
    for (kind = 0; kind < SPANS_KINDS; kind++) {
        static const int order[7] = {OWN, OWN_BF16, PEER, PEER_BF16, PEER_COMPILED, PEER_COMPILED_BF16, PEER_PLAIN};
        int i, memory;
        for (memory = 0; memory < 2; memory++) {
            const double *v = memory ? found.memory[kind] : found.rate[kind];
            if (!(v[OWN] == v[OWN])) continue;
            any = 1;
            row_begin();
            cell(0, "training, %s spans, %s", of[kind], memory ? "peak memory MB" : "tokens/s");
            for (i = 0; i < 7; i++) if (v[order[i]] == v[order[i]]) cell(1 + i, "%.0f", v[order[i]] * (memory ? 1e-6 : 1));
        }
    }
    for (kind = 0; kind < SPANS_KINDS; kind++) {
        if (!(found.generation[kind][F32] > 0)) continue;
        any = 1;
        row_begin();
        cell(0, "generation, %s spans, tokens/s", of[kind]);
        for (p = 0; p < PRECISIONS; p++) if (found.generation[kind][p] > 0) cell(1 + p, "%.0f", found.generation[kind][p]);
    }
    if (any) print_table();
    if (found.bf16_least > 0) say("bf16 product / CBLAS's float product, one thread, dims >= 256: %.2f to %.2f.\n\n", found.bf16_least,
                                  found.bf16_most);
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
    "  --work DIR         for temporary files\n"
    "  --append FILE      write the tables there too\n"
    "  --cblas-check      name the linked CBLAS; exit code 0 if it is worth a comparison\n";

int main(int argc, char **argv) {
    int i;
    opt.self = argv[0];
    for (i = 1; i < argc; i++) {
        const char *a = argv[i], *v = i + 1 < argc ? argv[i + 1] : NULL;
        if (!strcmp(a, "--quick")) { opt.quick = 1; continue; }
        if (!strcmp(a, "--worker")) { opt.worker = 1; continue; }
        if (!strcmp(a, "--help")) { fputs(usage, stdout); return 0; }
        if (!strcmp(a, "--cblas-check")) {
#ifdef BENCH_CBLAS
            return cblas_check();
#else
            return 1;
#endif
        }
        i++;
        if (!strcmp(a, "--threads")) opt.threads = whole(v, 1, a);
        else if (!strcmp(a, "--rounds")) { opt.rounds = whole(v, 1, a); if (opt.rounds > MAX_ROUNDS) opt.rounds = MAX_ROUNDS; }
        else if (!strcmp(a, "--batch")) opt.batch = whole(v, 1, a);
        else if (!strcmp(a, "--steps")) opt.steps = whole(v, 1, a);
        else if (!strcmp(a, "--warmup")) opt.warmup = whole(v, 0, a);
        else if (!strcmp(a, "--literal")) opt.literal = whole(v, 0, a);
        else if (!v) { fprintf(stderr, "bench: unknown option, or no value: %s\n%s", a, usage); return 2; }
        else if (!strcmp(a, "--only")) opt.only = v;
        else if (!strcmp(a, "--data")) opt.data = v;
        else if (!strcmp(a, "--params")) opt.params = v;
        else if (!strcmp(a, "--python")) opt.python = v;
        else if (!strcmp(a, "--python-plain")) opt.python_plain = v;
        else if (!strcmp(a, "--peer")) opt.peer = v;
        else if (!strcmp(a, "--cblas")) opt.cblas = v;
        else if (!strcmp(a, "--work")) opt.work = v;
        else if (!strcmp(a, "--append")) report_path = v;
        else if (!strcmp(a, "--spans")) {
            for (opt.spans = 0; opt.spans < SPANS_KINDS && strcmp(v, spans_name[opt.spans]); opt.spans++) continue;
            if (opt.spans == SPANS_KINDS) { fprintf(stderr, "bench: --spans full, learned or short\n"); return 2; }
        } else if (!strcmp(a, "--precision")) {
            for (opt.precision = 0; opt.precision < PRECISIONS && strcmp(v, precision_name[opt.precision]); opt.precision++) continue;
            if (opt.precision == PRECISIONS) { fprintf(stderr, "bench: --precision f32 or bf16\n"); return 2; }
        } else { fprintf(stderr, "bench: unknown option %s\n%s", a, usage); return 2; }
    }
    if (!opt.threads) {
        stx_ctx *x = stx_create(NULL);
        opt.threads = stx_threads(x);
        stx_destroy(x);
    }
    signal(SIGPIPE, SIG_IGN);       /* a contender that died is reported, and is not the end */
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
