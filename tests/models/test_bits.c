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
    {{0xe290a5ca267d48d9, 0xde079dadeb08bb1f, 0xb01de13333933e97},
     {0xea7408e668c8d3d0, 0xbf52ac8509036fdc, 0xf0b1ca83dd8cf17f}},
    {{0xf7c318ec7b0b4801, 0x4481586775ff139c, 0xd17036db8dcbcf60},
     {0xd7139e5c7c0de087, 0xf1b6e80155f2ee2a, 0x4df48a7d0455421b}},
    {{0x26c3dd1ad75d511d, 0xad0c774d01994eea, 0x192ce94e841cee3e},
     {0x743ab89aa4237441, 0x49a800b69bc867e0, 0x269603d0e9c4cf88}},
    {{0x5a13683150b72747, 0x7d21862184c14b7a, 0x321e01f457c46ec0},
     {0x50090cb4b3be7a0d, 0x38605bb667d03937, 0x7c4aca967595ff0e}},
    {{0x08af2dab9bdb032d, 0x5ff4bb2c358c55c8, 0x42ffd76af83ae145},
     {0x6782f650e863bf6b, 0x8385f2d48a01a808, 0x8e7d75b37c541b10}},
};

/* FNV-1a */
static void add(uint64_t *hash, const void *bytes, size_t n) {
    const unsigned char *p = (const unsigned char *)bytes;
    while (n--) *hash = (*hash ^ *p++) * 0x100000001b3u;
}

typedef struct run {
    stx_ctx *x;
    const sizes *size;
    uint32_t random;
    stx_span *span;
    stx_comp *comp;
    stx_par *par;
    stx_sru_lm *sru;
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
        r->span = stx_span_create(r->x, &span);
        r->lm = stx_span_as_lm(r->span);
        break;
    case COMP:
        comp.segment = r->size->T;
        comp.mem = 2 * r->size->T;
        comp.positions = STX_COMP_POSITIONS_XL;
        comp.gate = STX_COMP_GATE_GTRXL;
        r->comp = stx_comp_create(r->x, &comp);
        r->lm = stx_comp_as_lm(r->comp);
        break;
    case PAR:       /* a supernet: every block is a mixture, and the gates have noise */
        par.blocks = 3;
        par.segment = r->size->T;
        r->par = stx_par_create(r->x, &par);
        r->lm = stx_par_as_lm(r->par);
        break;
    default:
        sru.sru.layers = 2;
        sru.sru.proj = 20;
        if (model == SRUPP) sru.sru.transform = STX_SRU_ATTENTION;
        if (model == SRUPP) sru.sru.heads = 2;
        r->sru = stx_sru_lm_create(r->x, &sru);
        r->lm = stx_sru_as_lm(r->sru);
    }
}

/* A step: its loss, and the total with penalties. */
static stx_tensor *loss(run *r, int step, int mode, stx_tensor **total) {
    enum { MOST = 300 };
    const size_t n = r->size->B * r->size->T;
    int32_t from[MOST], to[MOST];
    stx_ids *in, *out;
    stx_tensor *nll;
    size_t i;
    for (i = 0; i < n; i++) {
        r->random = r->random * 1664525u + 1013904223u;
        from[i] = (int32_t)((r->random >> 16) % 8 * (uint32_t)(step % 5 + 1));
        to[i] = (from[i] * 3 + 1) % V;
    }
    stx_begin(r->x, mode);
    in = stx_tokens(r->x, from, r->size->B, r->size->T);
    out = stx_tokens(r->x, to, r->size->B, r->size->T);
    if (r->span) {
        stx_span_state *s = (stx_span_state *)r->state;
        nll = stx_span_loss(r->span, in, out, s, s);
        *total = stx_span_total(r->span, nll);
    } else if (r->comp) {
        stx_comp_state *s = (stx_comp_state *)r->state;
        nll = stx_comp_loss(r->comp, in, out, NULL, s, s);
        *total = stx_comp_total(r->comp, nll);
    } else if (r->par) {
        stx_par_state *s = (stx_par_state *)r->state;
        *total = nll = stx_par_loss(r->par, in, out, s, s);
    } else {
        stx_sru_state *s = (stx_sru_state *)r->state;
        *total = nll = stx_sru_lm_loss(r->sru, in, out, s, s);
    }
    return nll;
}

/* Trains with all optimisers, which take turns, and evaluates. */
static void train(run *r, int steps, digest *d) {
    stx_optim *optim[KINDS + 1];
    stx_optim_desc od;
    stx_schedule schedule;
    stx_tensor *nll, *total;
    double value[2];
    int kind, step;
    size_t i;
    memset(&od, 0, sizeof od);
    od.clip = 1;
    od.momentum = 0.9;
    for (kind = STX_SGD; kind <= KINDS; kind++) {
        od.kind = kind;
        od.weight_decay = kind == STX_ADAGRAD ? 0 : 0.01;
        optim[kind] = stx_optim_create(r->lm.params, &od);
    }
    memset(&schedule, 0, sizeof schedule);
    schedule.kind = STX_LR_COSINE;
    schedule.lr = 0.004;
    schedule.warmup = 5;
    schedule.total = STEPS + 1;
    for (step = 1; step <= steps && stx_ok(r->x); step++) {
        kind = STX_SGD + step % KINDS;
        nll = loss(r, step, STX_TRAIN, &total);
        value[0] = stx_item(r->x, nll);
        stx_backward(r->x, total);
        stx_optim_step(optim[kind], stx_schedule_lr(&schedule, (uint64_t)step));
        value[1] = optim[kind]->grad_norm;
        add(&d->losses, value, sizeof value);
        if (r->span) stx_span_clamp(r->span);
    }
    for (step = 0; step < 2 && stx_ok(r->x); step++) {
        value[0] = stx_item(r->x, loss(r, step, STX_EVAL, &total));
        add(&d->losses, value, sizeof *value);
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

static digest compute(int model, int size, int isa, int threads, int part) {
    digest d = {14695981039346656037u, 14695981039346656037u, 14695981039346656037u};
    stx_desc desc;
    run r;
    memset(&desc, 0, sizeof desc);
    desc.threads = threads;
    memset(&r, 0, sizeof r);
    r.size = &size_of[size];
    r.random = 7;
    r.x = stx_create(&desc);
    inner_use_isa(r.x, isa);
    create(&r, model);
    r.state = r.lm.state_create(r.lm.model, r.size->B, 0);
    train(&r, STX_MAX(1, r.size->steps / part), &d);
    generate(&r, STX_MAX(1, r.size->tokens / part), &d);
    SAME(stx_error(r.x), "");
    stx_destroy(r.x);
    return d;
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
    for (model = 0; model < MODELS; model++)
        for (size = 0; size < SIZES; size++) same_bits(model, size, best, one, part);
    return test_end();
}
