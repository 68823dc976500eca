/* test_bits.c - training, evaluation and generation give the same bits for every
   instruction set, compiler and number of threads: losses, norms of gradients,
   parameters, log-probabilities and tokens of all families, with all optimisers. The
   digests below hold on every processor. A change of the arithmetic changes them; then
   copy those that this program prints. Also the functions by which results are the same:
   stx__fma, stx_math_exp and others. tests/bits.sh runs this program with other
   compilers and on other processors.
       test_bits           all instruction sets of this processor, 1, 2, 3 and 7 threads
       test_bits one       the fastest one, one thread
       test_bits short     like the first, with fewer steps */
#define STX_LOOPS       /* stx__fma and stx_math_exp, .. */
#include "../../seqtx_attn_span.h"
#include "../../seqtx_compressive.h"
#include "../../seqtx_par.h"
#include "../../seqtx_sru.h"
#include "../inner/inner.h"
#include "../test.h"

enum { V = 64, STEPS = 60, TOKENS = 200, KINDS = STX_MUON };
enum { SPAN, COMP, PAR, SRU, SRUPP, MODELS };
enum { LONG, WIDE, SIZES };

/* Many steps of few rows, and few steps of so many that sums have several blocks. */
typedef struct sizes {
    size_t B, T, D;
    int steps, tokens;
} sizes;

static const sizes size_of[SIZES] = {{3, 13, 40, STEPS, TOKENS}, {2, 150, 72, 2, 5}};

/* What a run computes, as digests. losses: also those of evaluation, and the norms of
   gradients. */
typedef struct digest {
    uint64_t losses, params, generated;
} digest;

static const char *const name[MODELS] = {"attn_span", "compressive", "par", "sru", "sru++"};

static const digest expected[MODELS][SIZES] = {
    {{0xeea81edca7ffe4e0, 0x41a712e32a0b5ab5, 0x23e942e0f127ed4c},
     {0x613c583794f197b5, 0xd84fbb22af51613e, 0xf82d4ca167b2c1f1}},
    {{0x27c9418ed04ce48e, 0x7d6a31cdf08ee96d, 0xd41aff09d17439a3},
     {0x0f62cb53d35d7bcd, 0xf57f14d9ff5f5337, 0x2b8e4bd4fc3e5c30}},
    {{0xf6667a37703d340f, 0x5c6c7c86ea595f83, 0x1ae384ce2cc26e21},
     {0x4c531c3e68dd0061, 0x74a22f1d16120a13, 0x21146ff500a5c5a3}},
    {{0x76a66843aa218602, 0xe724bc456b1defb1, 0x5ca493e22bdc4ff5},
     {0x26f45c5b1079ec5e, 0xe3f91e50be5a8749, 0x3c6b3835a7d326ec}},
    {{0xa07ef921d6af8d2b, 0x330f734819217b9d, 0xd5778cbc8cd6f730},
     {0x85605d97fe4598fd, 0x5a824f697e58cc0d, 0xd2249aaf47f85b58}},
};

/* FNV-1a */
static void add(uint64_t *hash, const void *bytes, size_t n) {
    const unsigned char *p = (const unsigned char *)bytes;
    while (n--) *hash = (*hash ^ *p++) * 0x100000001b3u;
}

typedef struct run {
    stx_ctx *x;
    const sizes *size;
    stx_lm lm;
    void *state;
} run;

static void create(run *r, int model) {
    stx_span_desc span;
    stx_comp_desc comp;
    stx_par_desc par;
    stx_sru_lm_desc sru;
    memset(&span, 0, sizeof span);
    memset(&comp, 0, sizeof comp);
    memset(&par, 0, sizeof par);
    memset(&sru, 0, sizeof sru);
    span.vocab = comp.vocab = par.vocab = sru.vocab = V;
    span.dim = comp.dim = par.dim = sru.dim = r->size->D;
    span.layers = comp.layers = 2;
    span.heads = comp.heads = par.heads = 4;
    span.dropout = comp.ff_dropout = par.dropout = sru.dropout = 0.1;
    switch (model) {
    case SPAN:
        span.span = 40;
        span.adapt_span = 1;
        span.span_init = 0.5;
        r->lm = stx_span_as_lm(stx_span_create(r->x, &span));
        break;
    case COMP:
        comp.segment = r->size->T;
        comp.mem = 2 * r->size->T;
        comp.positions = STX_COMP_POSITIONS_XL;
        comp.gate = STX_COMP_GATE_GTRXL;
        r->lm = stx_comp_as_lm(stx_comp_create(r->x, &comp));
        break;
    case PAR:       /* a supernet: every block is a mixture, and the gates have noise */
        par.blocks = 3;
        par.segment = r->size->T;
        r->lm = stx_par_as_lm(stx_par_create(r->x, &par));
        break;
    default:
        sru.sru.layers = 2;
        sru.sru.proj = 20;
        if (model == SRUPP) sru.sru.transform = STX_SRU_ATTENTION;
        if (model == SRUPP) sru.sru.heads = 2;
        r->lm = stx_sru_as_lm(stx_sru_lm_create(r->x, &sru));
    }
    r->state = r->lm.state_create(r->lm.model, r->size->B, 0);
}

/* The loss of a step in nats per token. */
static stx_tensor *loss(run *r, int step, int mode) {
    enum { MOST = 300 };
    const size_t n = r->size->B * r->size->T;
    int32_t from[MOST], to[MOST];
    uint32_t random = 7919u * (uint32_t)step;
    stx_ids *in, *out;
    size_t i;
    for (i = 0; i < n; i++) {
        random = random * 1664525u + 1013904223u;
        from[i] = (int32_t)((random >> 16) % 8 * (uint32_t)(step % 5 + 1));
        to[i] = (from[i] * 3 + 1) % V;
    }
    stx_begin(r->x, mode);
    in = stx_tokens(r->x, from, r->size->B, r->size->T);
    out = stx_tokens(r->x, to, r->size->B, r->size->T);
    return r->lm.loss(r->lm.model, in, out, r->state, r->state);
}

/* Creates an optimiser. Not all kinds have momentum or weight decay. */
static stx_optim *optimiser(run *r, int kind) {
    stx_optim_desc d;
    memset(&d, 0, sizeof d);
    d.kind = kind;
    d.clip = 1;
    d.momentum = 0.9;
    d.weight_decay = kind == STX_ADAGRAD ? 0 : 0.01;
    return stx_optim_create(r->lm.params, &d);
}

/* One step of training, whose loss and norm of the gradient are added to the digest. */
static void train_step(run *r, int step, stx_optim *optim, uint64_t *losses) {
    stx_schedule schedule;
    stx_tensor *nll;
    double value[2];
    memset(&schedule, 0, sizeof schedule);
    schedule.kind = STX_LR_COSINE;
    schedule.lr = 0.004;
    schedule.warmup = 5;
    schedule.total = STEPS + 1;
    nll = loss(r, step, STX_TRAIN);
    value[0] = stx_item(r->x, nll);
    stx_backward(r->x, r->lm.total(r->lm.model, nll));
    if (stx_optim_step(optim, stx_schedule_lr(&schedule, (uint64_t)step)))
        r->lm.updated(r->lm.model);
    value[1] = optim ? optim->grad_norm : 0;
    add(losses, value, sizeof value);
}

/* Trains with all optimisers, which take turns, and evaluates. */
static void train(run *r, int steps, digest *d) {
    stx_optim *optim[KINDS];
    double value;
    int step;
    size_t i;
    for (step = 0; step < KINDS; step++) optim[step] = optimiser(r, STX_SGD + step);
    for (step = 1; step <= steps && stx_ok(r->x); step++)
        train_step(r, step, optim[step % KINDS], &d->losses);
    for (step = 0; step < 2 && stx_ok(r->x); step++) {
        value = stx_item(r->x, loss(r, step, STX_EVAL));
        add(&d->losses, &value, sizeof value);
    }
    for (i = 0; i < r->lm.params->count; i++)
        add(&d->params, r->lm.params->tensor[i]->data,
            r->lm.params->tensor[i]->size * sizeof(stx_real));
}

/* Generates n tokens. */
static void generate(run *r, int n, digest *d) {
    void *gen = r->lm.gen_create(r->lm.model, 1, 0);
    stx_sampling how;
    stx_real work[V];
    int32_t token = 1;
    uint64_t i;
    memset(&how, 0, sizeof how);
    how.temperature = 0.8;
    for (i = 0; i < (uint64_t)n; i++) {
        const stx_real *log_p = r->lm.gen_feed(gen, &token, 1);
        if (!EXPECT(log_p != NULL)) return;
        token = stx_sample(&how, i, log_p, V, work);
        add(&d->generated, log_p, V * sizeof *log_p);
        add(&d->generated, &token, sizeof token);
    }
}

static void begin(run *r, int size, int isa, int threads) {
    stx_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.threads = threads;
    memset(r, 0, sizeof *r);
    r->size = &size_of[size];
    r->x = stx_create(&desc);
    inner_use_isa(r->x, isa);
}

static digest compute(int model, int size, int isa, int threads, int part) {
    digest d = {14695981039346656037u, 14695981039346656037u, 14695981039346656037u};
    run r;
    begin(&r, size, isa, threads);
    create(&r, model);
    train(&r, STX_MAX(1, r.size->steps / part), &d);
    generate(&r, STX_MAX(1, r.size->tokens / part), &d);
    SAME(stx_error(r.x), "");
    stx_destroy(r.x);
    return d;
}

/* Trains up to a step, from the checkpoint `path` unless `first` is 0, and saves it. */
static void leg(int model, int isa, int threads, const char *path, int first, int last) {
    stx_writer *w;
    stx_optim *optim;
    uint64_t unused = 0;
    run r;
    int step;
    begin(&r, LONG, isa, threads);
    create(&r, model);
    optim = optimiser(&r, STX_ADAGRAD + model);
    if (first) {
        stx_file *f = stx_file_open(r.x, path);
        EXPECT(stx_params_load(r.lm.params, f, "") && stx_optim_load(optim, f)
               && r.lm.state_load(r.state, f, "memory."));
        stx_file_close(f);
        stx_set_step_index(r.x, (uint64_t)first);
    }
    for (step = first + 1; step <= last; step++) train_step(&r, step, optim, &unused);
    w = stx_writer_create(r.x);
    EXPECT(stx_params_save(w, r.lm.params, "") && stx_optim_save(w, optim)
           && r.lm.state_save(w, r.state, "memory.") && stx_writer_finish(w, path));
    SAME(stx_error(r.x), "");
    stx_destroy(r.x);
}

/* True if two files of more than 1000 bytes have the same content. */
static int same_files(const char *a, const char *b) {
    FILE *f = fopen(a, "rb"), *g = fopen(b, "rb");
    long n = 0;
    int c = 0, d = 0;
    while (f && g && c == d && c != EOF) {
        c = getc(f);
        d = getc(g);
        n++;
    }
    if (f) fclose(f);
    if (g) fclose(g);
    return c == EOF && d == EOF && n > 1000;
}

/* A run that moves twice to other instructions and threads writes the same checkpoint as
   one that does not move. */
static void journey(int model, int best, int part) {
    const int a = STEPS / 3 / part, b = 2 * a, last = 3 * a;
    char path[2][256];
    test_path(path[0], sizeof *path, "bits_whole");
    test_path(path[1], sizeof *path, "bits_parts");
    leg(model, best, 1, path[0], 0, last);
    leg(model, best, 2, path[1], 0, a);
    leg(model, 0, 3, path[1], a, b);
    leg(model, best > 1 ? 1 : best, 1, path[1], b, last);
    CHECK(same_files(path[0], path[1]),
          "%s: a run that moves to other processors ends differently", name[model]);
    remove(path[0]);
    remove(path[1]);
}

/* y = dropout(w[ids]), for rows of tokens that occur several times, and a backward pass
   from the mean of y^2. */
static stx_tensor *dropped(stx_ctx *x, stx_tensor *w, size_t first, size_t rows) {
    int32_t ids[40];
    stx_tensor *y;
    size_t i;
    for (i = 0; i < 10 * rows; i++) ids[i] = (int32_t)((first * 10 + i) % 7);
    y = stx_dropout(x, stx_embedding(x, w, stx_tokens(x, ids, rows, 10)), 0.4);
    stx_backward(x, stx_mean(x, stx_mul(x, y, y)));
    return y;
}

/* The parts of a batch (stx_begin_part) draw the random numbers of the whole batch, and
   their gradients are added as those of ranks are: each is complete before. */
static void parts(void) {
    enum { ROWS = 4, WIDTH = 24, N = 7 * WIDTH, HALF = ROWS / 2 * 10 * WIDTH };
    stx_ctx *x = stx_create(NULL);
    stx_params *p = stx_params_create(x);
    stx_tensor *w = stx_param(p, STX_NORMAL, 0.5, "w", 7, WIDTH, 0, 0), *y;
    stx_real whole[2 * HALF], sum[2][N];
    size_t k, i, added = 0, both = 0;
    stx_begin(x, STX_TRAIN);
    y = dropped(x, w, 0, ROWS);
    EXPECT(y->size == 2 * HALF && stx_batch_share(x) == 0);
    memcpy(whole, y->data, sizeof whole);

    for (k = 0; k < 2; k++) {       /* each alone: stx_begin_part does not change the index */
        stx_params_zero_grad(p);
        stx_set_step_index(x, k);
        stx_begin_part(x, k);
        EXPECT(stx_step_index(x) == 1 && stx_batch_share(x) == k);
        y = dropped(x, w, ROWS / 2 * k, ROWS / 2);
        EXPECT(!memcmp(y->data, whole + k * HALF, sizeof *whole * HALF));
        memcpy(sum[k], w->grad, sizeof sum[k]);
    }
    stx_params_zero_grad(p);
    stx_set_step_index(x, 0);
    for (k = 0; k < 2; k++) {
        stx_begin_part(x, k);
        dropped(x, w, ROWS / 2 * k, ROWS / 2);
    }
    for (i = 0; i < N; i++) added += w->grad[i] == sum[0][i] + sum[1][i];
    CHECK(added == N, "%zu of %d gradients are the sum of those of the parts", added, (int)N);
    for (i = 0; i < N; i++) both += fabs(sum[0][i]) > 0 && fabs(sum[1][i]) > 0;
    EXPECT(both > N / 2);
    SAME(stx_error(x), "");
    stx_destroy(x);
}

static uint64_t draw(uint64_t *state) {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state >> 11;
}

/* MinGW's fmaf rounds twice, and its sinl and cosl are wrong for large arguments: nothing
   to compare with. */
#ifdef _WIN32
enum { C_LIBRARY_IS_EXACT = 0 };
#else
enum { C_LIBRARY_IS_EXACT = 1 };
#endif

/* stx__fma rounds once: compared with fmaf of the C library, for any bits, and for sums
   so close to the middle between two floats that they round to it in double. There, the
   product is half of the last place of c, and a little more or less. */
static void fused(void) {
    static const float factor[2][2] = {{1 + 0x1p-12f, 1 - 0x1p-12f + 0x1p-24f},
                                       {1 + 0x1p-23f, 1 - 0x1p-23f}};
    uint64_t state = 88172645463325252u;
    long i, wrong = 0;
    for (i = 0; i < 3000000; i++) {
        float v[3], got, want;
        uint32_t bits[3];
        int k;
        for (k = 0; k < 3; k++) bits[k] = (uint32_t)draw(&state);
        memcpy(v, bits, sizeof v);
        if (i % 2) {
            v[0] = bits[0] & 1 ? factor[i / 2 % 2][0] : -factor[i / 2 % 2][0];
            v[1] = 0x1p-24f * factor[i / 2 % 2][1];
            v[2] = 1 + (float)(bits[2] % (1u << 23)) * 0x1p-23f;
        }
        got = stx__fma(v[0], v[1], v[2]);
        want = fmaf(v[0], v[1], v[2]);
        if (fabsf(want) < 1e-37f) continue; /* denormals: flushed in loops */
        wrong += !(got == want || (got != got && want != want));
    }
    CHECK(!wrong, "stx__fma: %ld of %ld sums differ from fmaf", wrong, i);
}

/* The distance of a result from the expected one, in units of the last place. */
static double ulps(double got, long double want) {
    int e;
    frexp((double)want, &e);
    return got == (double)want ? 0 : (double)(fabsl(got - want) / ldexpl(1, e - 53));
}

/* The functions of scalar code, against those of the C library in long double. */
static void functions(void) {
    double worst[5] = {0};
    uint64_t state = 1;
    long i;
    for (i = 0; i < 200000; i++) {
        const double u = (double)draw(&state) / 9007199254740992.0;     /* in [0,1) */
        const double v = (u - 0.5) * 1400, w = ldexp(u + 0.5, (int)(i % 2000) - 1000);
        const double x = (u - 0.5) * (i % 2 ? 200 : 3e6);
        worst[0] = fmax(worst[0], ulps(stx_math_exp(v), expl(v)));
        worst[1] = fmax(worst[1], ulps(stx_math_log(w), logl(w)));
        worst[2] = fmax(worst[2], ulps(stx_math_sin(x), sinl(x)));
        worst[3] = fmax(worst[3], ulps(stx_math_cos(x), cosl(x)));
        worst[4] = fmax(worst[4], ulps(stx_math_pow(10000, -u), powl(10000, -(long double)u)));
    }
    if (!C_LIBRARY_IS_EXACT) worst[2] = worst[3] = 0;
    CHECK(worst[0] <= 1 && worst[1] <= 1 && worst[2] <= 2.5 && worst[3] <= 2.5 && worst[4] <= 20,
          "units in the last place: exp %g, log %g, sin %g, cos %g, pow %g", worst[0], worst[1],
          worst[2], worst[3], worst[4]);
    EXPECT(stx_math_pow(4, 2) == 16 && stx_math_pow(2, -3) == 0.125 && stx_math_pow(-2, 3) == -8);
    EXPECT(stx_math_pow(0, 0) == 1 && stx_math_pow(0, 0.5) == 0);
    EXPECT(stx_math_exp(-HUGE_VAL) == 0 && stx_math_exp(800) == HUGE_VAL);
    EXPECT(stx_math_log(0) == -HUGE_VAL && stx_math_log(HUGE_VAL) == HUGE_VAL);
    EXPECT(stx_math_exp(NAN) != stx_math_exp(NAN) && stx_math_log(-1) != stx_math_log(-1));
    EXPECT(fabs(stx_math_log(5e-324) / -744.4400719213812 - 1) < 1e-15);
    EXPECT(stx_math_exp(-745) > 0);     /* denormal */
}

static int same(const digest *a, const digest *b) {
    return a->losses == b->losses && a->params == b->params && a->generated == b->generated;
}

/* A model of one size, with all instruction sets and numbers of threads unless `one` is
   set. part > 1 shortens the runs. */
static void same_bits(int model, int size, int best, int one, int part) {
    static const int threads[] = {2, 3, 7};
    const digest first = compute(model, size, best, 1, part);
    const digest *e = &expected[model][size];
    digest d;
    int isa, i;
    if (part == 1)
        CHECK(same(&first, e), "%s, %d: {0x%016llx, 0x%016llx, 0x%016llx} is not the digest in "
              "this file", name[model], size, (unsigned long long)first.losses,
              (unsigned long long)first.params, (unsigned long long)first.generated);
    for (i = 0; i < 3 && !one; i++) {
        d = compute(model, size, best, threads[i], part);
        CHECK(same(&d, &first), "%s, %d: %d threads differ from one", name[model], size,
              threads[i]);
    }
    for (isa = 0; isa < best && !one; isa++) {
        d = compute(model, size, isa, 1, part);
        CHECK(same(&d, &first), "%s, %d: instruction set %d differs from %d: losses %d, "
              "parameters %d, generated %d", name[model], size, isa, best,
              d.losses == first.losses, d.params == first.params, d.generated == first.generated);
    }
}

int main(int argc, char **argv) {
    const int one = argc > 1 && !strcmp(argv[1], "one");
    const int part = argc > 1 && !strcmp(argv[1], "short") ? 10 : 1;
    stx_ctx *x = stx_create(NULL);
    const int best = inner_isa(x);
    int model, size;
    stx_destroy(x);
    if (C_LIBRARY_IS_EXACT) fused();
    functions();
    parts();
    for (model = 0; model < MODELS; model++)
        for (size = 0; size < SIZES; size++) same_bits(model, size, best, one, part);
    for (model = 0; model < MODELS && !one; model++) journey(model, best, part);
    return test_end();
}
