/* test_bits.c - training and generation give the same bits for every instruction set,
   compiler and number of threads: losses, parameters, log-probabilities and tokens of all
   families. The digests below hold on every processor. A change of the arithmetic changes
   them; then copy those that this program prints. Also the functions by which results are
   the same: stx__fma, stx_math_exp and others.
       test_bits           all instruction sets of this processor, 1, 2, 3 and 7 threads
       test_bits short     the fastest one and the portable one, fewer steps */
#define STX_LOOPS       /* stx__fma and stx_math_exp, .. */
#include "../../seqtx_attn_span.h"
#include "../../seqtx_compressive.h"
#include "../../seqtx_par.h"
#include "../../seqtx_sru.h"
#include "../inner/inner.h"
#include "../test.h"

enum { B = 3, T = 13, V = 64, D = 40, STEPS = 60, TOKENS = 200 };
enum { SPAN, COMP, PAR, SRU, SRUPP, MODELS };

/* What a run computes, as digests. */
typedef struct digest {
    uint64_t losses, params, generated;
} digest;

static const char *const name[MODELS] = {"attn_span", "compressive", "par", "sru", "sru++"};

static const digest expected[MODELS] = {
    {0x804ebbacf8339110, 0x2d8502aac0e45c36, 0x343565adef489f10},
    {0x1bd60eed16bac825, 0x54ddf8ab8d5697a1, 0x4010de067b40d104},
    {0x39a083741abfa2a8, 0x0ea2b31896168e53, 0x77400157291b2835},
    {0x17f1ff602624578f, 0xe5d0e1d43498157c, 0xdf294f4e6ca39ea4},
    {0x73ae6df76490a118, 0xcfaedab003a76a1c, 0x7c596970878b7782},
};

/* FNV-1a */
static void add(uint64_t *hash, const void *bytes, size_t n) {
    const unsigned char *p = (const unsigned char *)bytes;
    while (n--) *hash = (*hash ^ *p++) * 0x100000001b3u;
}

typedef struct run {
    stx_ctx *x;
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
    span.dim = comp.dim = par.dim = sru.dim = D;
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
        comp.segment = T;
        comp.mem = 26;
        comp.positions = STX_COMP_POSITIONS_XL;
        r->comp = stx_comp_create(r->x, &comp);
        r->lm = stx_comp_as_lm(r->comp);
        break;
    case PAR:       /* a supernet: every block is a mixture, and the gates have noise */
        par.blocks = 3;
        par.segment = T;
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

/* The loss of a step, and its total with penalties. */
static stx_tensor *loss(run *r, const stx_ids *in, const stx_ids *out, stx_tensor **total) {
    stx_tensor *nll = NULL;
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

static digest train(run *r, int steps, int kind) {
    digest d = {14695981039346656037u, 14695981039346656037u, 14695981039346656037u};
    stx_optim_desc od;
    stx_schedule schedule;
    stx_optim *optim;
    uint32_t random = 7;
    int step;
    size_t i;
    memset(&od, 0, sizeof od);
    od.kind = kind;
    od.clip = 1;
    od.weight_decay = 0.01;
    optim = stx_optim_create(r->lm.params, &od);
    memset(&schedule, 0, sizeof schedule);
    schedule.kind = STX_LR_COSINE;
    schedule.lr = 0.004;
    schedule.warmup = 5;
    schedule.total = STEPS + 1;
    for (step = 1; step <= steps && stx_ok(r->x); step++) {
        int32_t in[B * T], out[B * T];
        stx_tensor *nll, *total;
        double value;
        for (i = 0; i < B * T; i++) {
            random = random * 1664525u + 1013904223u;
            in[i] = (int32_t)((random >> 16) % 8 * (uint32_t)(step % 5 + 1));
            out[i] = (in[i] * 3 + 1) % V;
        }
        stx_begin(r->x, STX_TRAIN);
        nll = loss(r, stx_tokens(r->x, in, B, T), stx_tokens(r->x, out, B, T), &total);
        value = stx_item(r->x, nll);
        add(&d.losses, &value, sizeof value);
        stx_backward(r->x, total);
        stx_optim_step(optim, stx_schedule_lr(&schedule, (uint64_t)step));
        if (r->span) stx_span_clamp(r->span);
    }
    for (i = 0; i < r->lm.params->count; i++)
        add(&d.params, r->lm.params->tensor[i]->data,
            r->lm.params->tensor[i]->size * sizeof(stx_real));
    return d;
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

static digest compute(int model, int isa, int threads, int short_run) {
    stx_desc desc;
    digest d;
    run r;
    memset(&desc, 0, sizeof desc);
    desc.threads = threads;
    memset(&r, 0, sizeof r);
    r.x = stx_create(&desc);
    inner_use_isa(r.x, isa);
    create(&r, model);
    r.state = r.lm.state_create(r.lm.model, B, 0);
    d = train(&r, short_run ? STEPS / 10 : STEPS, model % 2 ? STX_ADAM : STX_MUON);
    generate(&r, short_run ? TOKENS / 10 : TOKENS, &d);
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

int main(int argc, char **argv) {
    static const int threads[] = {2, 3, 7};
    const int short_run = argc > 1 && !strcmp(argv[1], "short");
    stx_ctx *x = stx_create(NULL);
    const int best = inner_isa(x);
    int model, isa, i;
    stx_destroy(x);
    fused();
    functions();
    for (model = 0; model < MODELS; model++) {
        const digest one = compute(model, best, 1, short_run);
        digest d;
        if (!short_run) {
            CHECK(same(&one, &expected[model]),
                  "%s: {0x%016llx, 0x%016llx, 0x%016llx} is not the digest in this file",
                  name[model], (unsigned long long)one.losses, (unsigned long long)one.params,
                  (unsigned long long)one.generated);
        }
        for (i = 0; i < 3; i++) {
            d = compute(model, best, threads[i], short_run);
            CHECK(same(&d, &one), "%s: %d threads differ from one", name[model], threads[i]);
        }
        for (isa = 0; isa < best; isa++) {
            d = compute(model, isa, 1, short_run);
            CHECK(same(&d, &one), "%s: instruction set %d differs from %d: losses %d, parameters "
                  "%d, generated %d", name[model], isa, best, d.losses == one.losses,
                  d.params == one.params, d.generated == one.generated);
        }
    }
    return test_end();
}
