/* test_flags.c - tests the library with compiler options that relax floating-point
   arithmetic. flags.sh compiles this file with -ffast-math, with single options
   that -ffast-math implies, and for x87. Functions are compared with libm. The losses
   of a small model of each family are compared with the double build's. Masks must
   work, and NaN and infinity must be refused where that is required. The tests never
   detect NaN or infinity by <, == or isnan, because the compiler may remove such
   comparisons. */
#define SEQTX_IMPLEMENTATION
#include "../../seqtx_attn_span.h"
#include "../../seqtx_compressive.h"
#include "../../seqtx_par.h"
#include "../../seqtx_sru.h"
#include "../ops/kernels.h"
#include "../test.h"

static double of_bits(uint64_t bits) {
    double v;
    memcpy(&v, &bits, 8);
    return v;
}

static stx_real not_a_number(void) {
    return (stx_real)of_bits((uint64_t)0x7ff8 << 48);
}

static stx_real infinity_(int minus) {
    return (stx_real)of_bits((uint64_t)(minus ? 0xfff : 0x7ff) << 52);
}

/* Returns whether |a - b| <= tol max(|b|, floor) and both are finite, judging by their
   bits. */
static int same(double a, double b, double tol, double floor_) {
    uint64_t i, k;
    memcpy(&i, &a, 8);
    memcpy(&k, &b, 8);
    return (i >> 52 & 2047) != 2047 && (k >> 52 & 2047) != 2047
           && fabs(a - b) <= tol * (fabs(b) > floor_ ? fabs(b) : floor_);
}


// >>functions

/* N covers all vector widths and a remainder. The arguments v include those for which e^v
   is tiny, and both sides of the points at which v / ln 2 rounds to another integer. */
enum { N = 4099 };

static double sigmoid(double v) {
    return 1 / (1 + exp(-v));
}

static double gelu(double v) {
    return 0.5 * v * erfc(-v * 0.70710678118654752);
}

typedef struct function {
    const char *name;
    stx_tensor *(*op)(stx_ctx *x, stx_tensor *t);
    double (*plain)(double v); /* the reference; NULL: softmax */
    double bound;              /* bound for the relative error */
} function;

static void check_function(stx_ctx *x, const function *f, const stx_real *a, double top,
                           double sum) {
    static stx_real y[N];
    double worst = 0;
    stx_tensor *t;
    int i;
    stx_begin(x, STX_EVAL);
    t = f->op(x, stx_input(x, a, 1, N, 0, 0));
    CHECK(t != NULL, "%s", stx_error(x));
    if (!t) return;
    stx_get(x, t, y);
    for (i = 0; i < N; i++) {
        double v = (double)a[i], expected = f->plain ? f->plain(v) : exp(v - top) / sum, e;
        if (fabs(expected) < 1e-30) {
            CHECK(same((double)y[i], expected, 1e-30, 1), "%s(%g): expected %g, got %g", f->name, v,
                  expected, (double)y[i]);
            continue;
        }
        e = fabs((double)y[i] - expected) / fabs(expected);
        if (!same((double)y[i], expected, 1, 0)) e = 1;
        if (e > worst) worst = e;
    }
    printf("%-8s largest relative error %.2e\n", f->name, worst);
    CHECK(worst < f->bound, "%s: relative error %g", f->name, worst);
}

static void functions(stx_ctx *x) {
    /* GELU has a larger error bound because of its tail: at v = -12, e^(-v^2/2) depends
       on the rounding of v^2. */
    static const function all[] = {{"tanh", stx_tanh, tanh, 3e-7},
                                   {"sigmoid", stx_sigmoid, sigmoid, 3e-7},
                                   {"gelu", stx_gelu, gelu, 1e-5},
                                   {"softmax", stx_softmax, NULL, 5e-7}};
    static stx_real a[N];
    double top = 0, sum = 0;
    size_t k;
    int i;
    /* Multiples of 1/4096, so that differences are exact. */
    for (i = 0; i < N; i++)
        a[i] = (stx_real)(floor((i - N / 2) * (40.0 / N) * (i % 3 ? 1 : 0.01) * 4096) / 4096);
    for (i = 0; i < N; i++)
        if ((double)a[i] > top) top = (double)a[i];
    for (i = 0; i < N; i++) sum += exp((double)a[i] - top);
    for (k = 0; k < sizeof all / sizeof *all; k++) check_function(x, &all[k], a, top, sum);
}


// >>families

enum { B = 2, T = 12, STEPS = 20, V = 19 };

static void make_text(int32_t *text, int step) {
    int i;
    for (i = 0; i < B * (T + 1); i++)
        text[i] = ((i % (T + 1) + step * T) * (i / (T + 1) + 3) + (i / (T + 1)) * 5) % V;
}

static stx_lm make_span(stx_ctx *x) {
    stx_span_desc d;
    memset(&d, 0, sizeof d);
    d.vocab = V;
    d.layers = 2;
    d.dim = 32;
    d.heads = 2;
    d.inner = 64;
    d.span = 40;
    d.adapt_span = 1;
    d.ramp = 8;
    d.span_init = 0.31;
    d.dropout = 0.1;
    return stx_span_as_lm(stx_span_create(x, &d));
}

static stx_lm make_sru(stx_ctx *x) {
    stx_sru_lm_desc d;
    memset(&d, 0, sizeof d);
    d.vocab = V;
    d.dim = 32;
    d.sru.layers = 2;
    d.sru.transform = STX_SRU_ATTENTION;
    d.sru.proj = 16;
    d.sru.tanh = 1;
    d.sru.highway_bias = -2;
    d.dropout = 0.1;
    return stx_sru_as_lm(stx_sru_lm_create(x, &d));
}

static stx_lm make_comp(stx_ctx *x) {
    stx_comp_desc d;
    memset(&d, 0, sizeof d);
    d.vocab = V;
    d.layers = 2;
    d.dim = 32;
    d.heads = 2;
    d.segment = T;
    d.mem = T;
    d.ratio = 4;
    d.gate = STX_COMP_GATE_GRU;
    return stx_comp_as_lm(stx_comp_create(x, &d));
}

static stx_lm make_par(stx_ctx *x) {
    stx_par_desc d;
    memset(&d, 0, sizeof d);
    d.vocab = V;
    d.blocks = 3;
    d.dim = 32;
    d.heads = 2;
    d.segment = T;
    return stx_par_as_lm(stx_par_create(x, &d));
}

/* losses: from every sixth step of the double build */
static const struct family {
    const char *name;
    stx_lm (*make)(stx_ctx *x);
    double losses[4];
} families[] = {
    {"span", make_span, {3.16789632, 1.43182691, 0.64603275, 0.17036771}},
    {"sru", make_sru, {2.92712439, 2.63402011, 2.23250985, 1.79571570}},
    {"compressive", make_comp, {2.97626957, 2.06529315, 1.33547539, 0.97990357}},
    {"par", make_par, {2.93664205, 1.90410389, 1.22237855, 0.94778010}}};

enum { FAMILIES = sizeof families / sizeof *families };

static void train(stx_ctx *x, const struct family *f) {
    stx_lm lm = f->make(x);
    void *memory = lm.model ? lm.state_create(lm.model, B, 0) : NULL;
    stx_optim *optim, *gates;
    stx_optim_desc od;
    int step, k = 0;
    memset(&od, 0, sizeof od);
    od.clip = 0.5;
    optim = memory ? stx_optim_create(lm.params, &od) : NULL;
    gates = memory && f->make == make_par ? stx_optim_create(((stx_par *)lm.model)->gates, &od)
                                          : NULL;
    CHECK(optim && stx_ok(x), "%s", stx_error(x));
    for (step = 0; step < STEPS && stx_ok(x); step++) {
        int32_t text[B * (T + 1)], in[B * T], next[B * T];
        stx_tensor *nll;
        stx_ids *a, *b;
        int i;
        make_text(text, step);
        for (i = 0; i < B * T; i++) {
            in[i] = text[i / T * (T + 1) + i % T];
            next[i] = text[i / T * (T + 1) + i % T + 1];
        }
        stx_begin(x, STX_TRAIN);
        a = stx_tokens(x, in, B, T);
        b = stx_tokens(x, next, B, T);
        nll = lm.loss(lm.model, a, b, memory, memory);
        stx_backward(x, lm.total(lm.model, nll));
        CHECK(stx_optim_step(optim, 0.01), "step %d: %s", step, stx_error(x));
        if (gates) CHECK(stx_optim_step(gates, 0.01), "step %d, gates: %s", step, stx_error(x));
        lm.updated(lm.model);
        if (step % 6 == 0) {
            double loss = stx_item(x, nll), expected = f->losses[k++];
            printf("%s step %d loss %.8f\n", f->name, step, loss);
            CHECK(same(loss, expected, 1e-5, 1), "%s step %d: loss %.8f, in double %.8f", f->name,
                  step, loss, expected);
        }
    }
    CHECK(stx_ok(x), "%s", stx_error(x));
}


// >>masks, and NaN and infinity

/* Padded keys must have no effect. A row without keys must be 0. */
static void masks(stx_ctx *x) {
    enum { S = 40, D = 16, Q = 8 };

    static stx_real q[2 * Q * D], kv[2 * S * 2 * D], y[2 * Q * D], alone[Q * D],
        few[(S - 7) * 2 * D];
    static int32_t padded[2 * S];
    stx_attention_in in;
    stx_attention_desc d;
    stx_tensor *r;
    int i, j, k = 0, zero = 1, good = 1;
    for (i = 0; i < 2 * Q * D; i++) q[i] = (stx_real)test_rand();
    for (i = 0; i < 2 * S * 2 * D; i++) kv[i] = (stx_real)test_rand();
    for (j = 0; j < S; j++) {
        padded[j] = j % 6 == 2;
        padded[S + j] = 1;
    }
    memset(&in, 0, sizeof in);
    memset(&d, 0, sizeof d);
    d.heads = 1;
    d.not_causal = 1;
    stx_begin(x, STX_EVAL);
    in.q = stx_input(x, q, 2, Q, D, 0);
    in.kv = stx_input(x, kv, 2, S, 2 * D, 0);
    in.pad = stx_tokens(x, padded, 2, S);
    r = stx_attention(x, &in, &d);
    CHECK(r != NULL, "%s", stx_error(x));
    if (!r) return;
    stx_get(x, r, y);
    for (j = 0; j < S; j++)
        if (!padded[j]) memcpy(few + k++ * 2 * D, kv + j * 2 * D, 2 * D * sizeof *kv);
    stx_begin(x, STX_EVAL);
    in.q = stx_input(x, q, 1, Q, D, 0);
    in.kv = stx_input(x, few, 1, (size_t)k, 2 * D, 0);
    in.pad = NULL;
    r = stx_attention(x, &in, &d);
    CHECK(r != NULL && k == S - 7, "%s", stx_error(x));
    if (!r) return;
    stx_get(x, r, alone);
    for (i = 0; i < Q * D; i++) good &= same((double)y[i], (double)alone[i], 1e-6, 1);
    for (i = Q * D; i < 2 * Q * D; i++) zero &= y[i] == 0;
    CHECK(good, "padded keys have an effect");
    CHECK(zero, "a row without keys is not 0");
}

/* Returns whether any of the n values is not NaN, judging by their bits. */
static int lost(const stx_real *y, size_t n) {
    size_t i;
    for (i = 0; i < n; i++) {
        uint64_t bits;
        double v = (double)y[i];
        memcpy(&bits, &v, 8);
        if ((bits & 0x7fffffffffffffffu) <= 0x7ff0000000000000u) return 1;
    }
    return 0;
}

/* Results that depend on a NaN must be NaN. */
static void nan_in_rows(stx_ctx *x) {
    enum { N = 37 };

    static const int acts[] = {STX_ACT_RELU, STX_ACT_GELU, STX_ACT_TANH, STX_ACT_SIGMOID};
    stx_real a[N], y[N], top[N], inv[N];
    int32_t target = 3;
    int i, k;
    for (k = 0; k < N; k += 6) {
        for (i = 0; i < N; i++) a[i] = 1;
        a[k] = not_a_number();
        stx_softmax_fwd(x, y, a, 1, N);
        CHECK(!lost(y, N), "softmax hides NaN at %d", k);
        k_cross_entropy_fwd(x, y, top, inv, a, &target, 1, N, N, 1);
        CHECK(!lost(y, 1), "cross entropy hides NaN at %d", k);
        for (i = 0; i < 4; i++) {
            stx_act_fwd(x, y, a, N, acts[i]);
            CHECK(!lost(y + k, 1), "activation %d hides NaN at %d", acts[i], k);
        }
    }
}

static void nan_in_attention(stx_ctx *x) {
    enum { T = 70, D = 16 };

    static const char *const input[] = {"q", "k", "v", "span_fraction"};
    static stx_real a[3 * T * D], y[T * D], grad[T * D], z[1];
    int i, k;
    for (i = 0; i < T * D; i++) grad[i] = 1;
    for (k = 0; k < 4; k++) {
        stx_attention_in in;
        stx_attention_desc d;
        stx_tensor *t[3], *r;
        int p;
        for (i = 0; i < 3 * T * D; i++) a[i] = (stx_real)test_rand();
        if (k < 3) a[k * T * D] = not_a_number();
        z[0] = k < 3 ? (stx_real)0.5 : not_a_number();
        memset(&in, 0, sizeof in);
        memset(&d, 0, sizeof d);
        d.heads = 1;
        d.max_span = 64;
        d.ramp = 8;
        stx_begin(x, STX_TRAIN);
        for (p = 0; p < 3; p++) t[p] = stx_variable(x, a + p * T * D, 1, T, D, 0);
        in.q = t[0];
        in.k = t[1];
        in.v = t[2];
        in.span_fraction = stx_variable(x, z, 1, 0, 0, 0);
        r = stx_attention(x, &in, &d);
        stx_backward_from(x, r, grad);
        CHECK(stx_ok(x), "%s", stx_error(x));
        if (!stx_ok(x)) return;
        stx_get(x, r, y);
        CHECK(!lost(y, 1), "attention hides NaN in %s", input[k]);
        CHECK(k == 2 || !lost(t[0]->grad, D), "dq of attention hides NaN in %s", input[k]);
        CHECK(k == 2 || !lost(t[1]->grad, 1), "dk of attention hides NaN in %s", input[k]);
    }
}

/* A step whose gradient is not finite must not change any parameter. It must clear the
   gradient and count as skipped. */
static void gradients(stx_ctx *x) {
    stx_real before[40], after[40], bad[3];
    int i, kind;
    bad[0] = not_a_number();
    bad[1] = infinity_(0);
    bad[2] = infinity_(1);
    for (kind = STX_SGD; kind <= STX_MUON; kind++)
        for (i = 0; i < 3; i++) {
            char name[32];
            stx_params *p = stx_params_create(x);
            stx_optim_desc od;
            stx_optim *o;
            stx_tensor *t;
            snprintf(name, sizeof name, "w%d_%d", kind, i);
            memset(&od, 0, sizeof od);
            od.kind = kind;
            t = stx_param(p, STX_NORMAL, 1, name, 40, 0, 0, 0);
            o = stx_optim_create(p, &od);
            CHECK(o != NULL, "%s", stx_error(x));
            if (!o) return;
            stx_get(x, t, before);
            t->grad[17] = bad[i];
            CHECK(stx_optim_step(o, 0.1) == 0,
                  "optimiser %d accepted a gradient that is not finite (%d)", kind, i);
            stx_get(x, t, after);
            CHECK(!memcmp(before, after, sizeof before),
                  "optimiser %d: a gradient that is not finite (%d) changed parameters", kind,
                  i);
            stx_optim_sync(o);
            CHECK(o->skipped == 1 && t->grad[17] == 0,
                  "%d steps skipped, or the gradient was not cleared", (int)o->skipped);
            t->grad[17] = 1;
            CHECK(stx_optim_step(o, 0.1) == 1, "optimiser %d refused a finite gradient", kind);
            CHECK(stx_optim_step(o, (double)bad[i]) == 0 && stx_error_code(x) == STX_ERR_ARG,
                  "a learning rate that is not finite (%d) was accepted", i);
            stx_clear_error(x);
        }
}

static void samples(void) {
    stx_real logits[5], work[5];
    stx_sampling s;
    int i, k;
    for (k = 0; k < 2; k++)
        for (i = 0; i < 5; i++) {
            memset(&s, 0, sizeof s);
            s.temperature = k;
            logits[0] = 1;
            logits[1] = 2;
            logits[2] = -3;
            logits[3] = (stx_real)2.5;
            logits[4] = 0;
            CHECK(k || stx_sample(&s, 1, logits, 5, work) == 3, "not the largest logit");
            logits[i] = not_a_number();
            CHECK(stx_sample(&s, 1, logits, 5, work) == -1, "NaN at %d was accepted", i);
            logits[i] = infinity_(0);
            CHECK(stx_sample(&s, 1, logits, 5, work) == -1, "infinity at %d was accepted", i);
            logits[i] = infinity_(1);
            CHECK(stx_sample(&s, 1, logits, 5, work) >= 0
                      && stx_sample(&s, 1, logits, 5, work) != i,
                  "-infinity at %d was drawn, or refused", i);
        }
    for (i = 0; i < 5; i++) logits[i] = infinity_(1);
    CHECK(stx_sample(&s, 1, logits, 5, work) == -1, "-infinity everywhere was accepted");
}

int main(void) {
    stx_desc d;
    stx_ctx *x;
    int k;
    memset(&d, 0, sizeof d);
    d.threads = 1;
    d.seed = 7;
    x = stx_create(&d);
    functions(x);
    nan_in_rows(x);
    nan_in_attention(x);
    masks(x);
    gradients(x);
    samples();
    stx_destroy(x);
    for (k = 0; k < FAMILIES; k++) {
        x = stx_create(&d);
        train(x, &families[k]);
        stx_destroy(x);
    }
    return test_end();
}
