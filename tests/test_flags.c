/* test_flags.c - the same numbers whatever the compiler was told: tests/flags.sh
   builds this with -ffast-math and its parts, for x87 and others. Functions against
   libm, losses of a small model of each family against those of the double build,
   masks, and what must be refused when it is not a number. Nothing here compares with
   NaN or infinity by <, == or isnan: these options may remove that. */
#define SEQTX_IMPLEMENTATION
#include "../seqtx_attn_span.h"
#include "../seqtx_compressive.h"
#include "../seqtx_par.h"
#include "../seqtx_sru.h"
#include "kernels.h"
#include "test.h"

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

/* |a - b| <= tol max(|b|, floor), and both finite by their bits */
static int same(double a, double b, double tol, double floor_) {
    uint64_t i, k;
    memcpy(&i, &a, 8);
    memcpy(&k, &b, 8);
    return (i >> 52 & 2047) != 2047 && (k >> 52 & 2047) != 2047
           && fabs(a - b) <= tol * (fabs(b) > floor_ ? fabs(b) : floor_);
}

/* Every width of vector loop and what is left over; the numbers also where e^v is
   tiny, and on both sides of the halves that v / ln 2 is rounded at */
enum { N = 4099 };

static void functions(stx_ctx *x) {
    static stx_real a[N], y[N];
    static const char *const name[4] = {"tanh", "sigmoid", "gelu", "softmax"};
    double worst[4] = {0}, top = 0, sum = 0;
    int i, f;
    /* differences are exact */
    for (i = 0; i < N; i++)
        a[i] = (stx_real)(floor((i - N / 2) * (40.0 / N) * (i % 3 ? 1 : 0.01) * 4096) / 4096);
    for (i = 0; i < N; i++)
        if ((double)a[i] > top) top = (double)a[i];
    for (i = 0; i < N; i++) sum += exp((double)a[i] - top);
    for (f = 0; f < 4; f++) {
        stx_tensor *t, *r;
        stx_begin(x, STX_EVAL);
        t = stx_input(x, a, 1, N, 0, 0);
        r = f == 0   ? stx_tanh(x, t)
            : f == 1 ? stx_sigmoid(x, t)
            : f == 2 ? stx_gelu(x, t)
                     : stx_softmax(x, t);
        CHECK(r != NULL, "%s", stx_error(x));
        if (!r) return;
        stx_get(x, r, y);
        for (i = 0; i < N; i++) {
            double v = (double)a[i],
                   want = f == 0   ? tanh(v)
                          : f == 1 ? 1 / (1 + exp(-v))
                          : f == 2 ? 0.5 * v * erfc(-v * 0.70710678118654752)
                                   : exp(v - top) / sum,
                   e;
            if (fabs(want) < 1e-30) {
                CHECK(same((double)y[i], want, 1e-30, 1), "%s(%g) is %g, not %g", name[f], v,
                      (double)y[i], want);
                continue;
            }
            e = fabs((double)y[i] - want) / fabs(want);
            if (!same((double)y[i], want, 1, 0)) e = 1;
            if (e > worst[f]) worst[f] = e;
        }
        printf("%-8s largest relative error %.2e\n", name[f], worst[f]);
    }
    CHECK(worst[0] < 3e-7, "tanh: %g", worst[0]);
    CHECK(worst[1] < 3e-7, "sigmoid: %g", worst[1]);
    /* of its tail: e^(-v^2/2) at v = -12 has v^2 rounded */
    CHECK(worst[2] < 1e-5, "gelu: %g", worst[2]);
    CHECK(worst[3] < 5e-7, "softmax: %g", worst[3]);
}

enum { B = 2, T = 12, STEPS = 20, V = 19, FAMILIES = 4 };

static void words(int32_t *text, int step) {
    int i;
    for (i = 0; i < B * (T + 1); i++)
        text[i] = ((i % (T + 1) + step * T) * (i / (T + 1) + 3) + (i / (T + 1)) * 5) % V;
}

static stx_lm model(stx_ctx *x, int which) {
    if (which == 0) {
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
    if (which == 1) {
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
    if (which == 2) {
        stx_comp_desc d;
        memset(&d, 0, sizeof d);
        d.vocab = V;
        d.layers = 2;
        d.dim = 32;
        d.heads = 2;
        d.segment = T;
        d.mem = T;
        d.ratio = 4;
        d.gate = STX_COMP_GRU;
        return stx_comp_as_lm(stx_comp_create(x, &d));
    }
    {
        stx_par_desc d;
        memset(&d, 0, sizeof d);
        d.vocab = V;
        d.blocks = 3;
        d.dim = 32;
        d.heads = 2;
        d.segment = T;
        return stx_par_as_lm(stx_par_create(x, &d));
    }
}

static const char *const family[FAMILIES] = {"span", "sru", "compressive", "par"};
/* losses of the double build */
static const double want[FAMILIES][4] = {{3.16789632, 1.43182691, 0.64603275, 0.17036771},
                                         {2.92712439, 2.63402011, 2.23250985, 1.79571570},
                                         {2.97626957, 2.06529315, 1.33547539, 0.97990357},
                                         {2.93664205, 1.90410389, 1.22237855, 0.94778010}};

static void models(stx_ctx *x, int which) {
    stx_lm lm = model(x, which);
    void *memory = lm.model ? lm.state_create(lm.model, B, 0) : NULL;
    stx_optim *optim, *gates;
    stx_optim_desc od;
    int step, k = 0;
    memset(&od, 0, sizeof od);
    od.clip = 0.5;
    optim = memory ? stx_optim_create(lm.params, &od) : NULL;
    gates = memory && which == 3 ? stx_optim_create(((stx_par *)lm.model)->arch, &od) : NULL;
    CHECK(optim && stx_ok(x), "%s", stx_error(x));
    for (step = 0; step < STEPS && stx_ok(x); step++) {
        int32_t text[B * (T + 1)], in[B * T], next[B * T];
        stx_tensor *nll;
        stx_ids *a, *b;
        int i;
        words(text, step);
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
            double have = stx_item(x, nll);
            printf("%s step %d loss %.8f\n", family[which], step, have);
            CHECK(same(have, want[which][k], 1e-5, 1),
                  "%s step %d: loss %.8f, the double build has %.8f", family[which], step, have,
                  want[which][k]);
            k++;
        }
    }
    CHECK(stx_ok(x), "%s", stx_error(x));
}

/* Padded keys: as if they were not there. A row without any key: 0 */
static void masks(stx_ctx *x) {
    enum { S = 40, D = 16, Q = 8 };

    static stx_real q[2 * Q * D], kv[2 * S * 2 * D], y[2 * Q * D], alone[Q * D],
        few[(S - 7) * 2 * D];
    static int32_t gone[2 * S];
    stx_attention_in in;
    stx_attention_desc d;
    stx_tensor *r;
    int i, j, k = 0, zero = 1, good = 1;
    for (i = 0; i < 2 * Q * D; i++) q[i] = (stx_real)test_rand();
    for (i = 0; i < 2 * S * 2 * D; i++) kv[i] = (stx_real)test_rand();
    for (j = 0; j < S; j++) {
        gone[j] = j % 6 == 2;
        gone[S + j] = 1;
    }
    memset(&in, 0, sizeof in);
    memset(&d, 0, sizeof d);
    d.heads = 1;
    d.not_causal = 1;
    stx_begin(x, STX_EVAL);
    in.q = stx_input(x, q, 2, Q, D, 0);
    in.kv = stx_input(x, kv, 2, S, 2 * D, 0);
    in.pad = stx_tokens(x, gone, 2, S);
    r = stx_attention(x, &in, &d);
    CHECK(r != NULL, "%s", stx_error(x));
    if (!r) return;
    stx_get(x, r, y);
    for (j = 0; j < S; j++)
        if (!gone[j]) memcpy(few + k++ * 2 * D, kv + j * 2 * D, 2 * D * sizeof *kv);
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
    CHECK(good, "padded keys count");
    CHECK(zero, "a row without keys is not 0");
}

/* NaN is never hidden: what depends on it is NaN, told by its bits */
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

static void hidden(stx_ctx *x) {
    enum { N = 37, T = 70, D = 16 };

    static stx_real a[3 * T * D], y[3 * T * D], top[N], inv[N], z[1];
    static const int acts[] = {STX_ACT_RELU, STX_ACT_GELU, STX_ACT_TANH, STX_ACT_SIGMOID};
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
    for (k = 0; k < 4; k++) { /* in q, k, v, z */
        stx_attention_in in;
        stx_attention_desc d;
        stx_tensor *t[3], *r;
        stx_real grad[3 * T * D];
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
        for (i = 0; i < T * D; i++) grad[i] = 1;
        stx_backward_from(x, r, grad);
        CHECK(stx_ok(x), "%s", stx_error(x));
        if (!stx_ok(x)) return;
        stx_get(x, r, y);
        CHECK(!lost(y, 1), "attention hides NaN in input %d", k);
        CHECK(k == 2 || !lost(t[0]->grad, D), "attention's dq hides NaN in input %d", k);
        CHECK(!lost(t[1]->grad, 1) || k == 2, "attention's dk hides NaN in input %d", k);
    }
}

/* A gradient that is not finite: no update, the gradient zeroed, counted */
static void gradients(stx_ctx *x) {
    stx_real before[40], after[40], bad[3];
    int i, kind;
    bad[0] = not_a_number();
    bad[1] = infinity_(0);
    bad[2] = infinity_(1);
    for (kind = STX_SGD; kind <= STX_LAMB; kind++)
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
                  "optimiser %d took a gradient that is not finite (%d)", kind, i);
            stx_get(x, t, after);
            CHECK(!memcmp(before, after, sizeof before),
                  "optimiser %d: parameters changed by a gradient that is not finite (%d)", kind,
                  i);
            stx_optim_sync(o);
            CHECK(o->skipped == 1 && t->grad[17] == 0, "skipped %d", (int)o->skipped);
            t->grad[17] = 1;
            CHECK(stx_optim_step(o, 0.1) == 1, "optimiser %d refuses a good one", kind);
            CHECK(stx_optim_step(o, (double)bad[i]) == 0 && stx_error_code(x) == STX_ERR_ARG,
                  "a learning rate that is not finite (%d) "
                  "is taken",
                  i);
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
            CHECK(k || stx_sample(&s, 1, logits, 5, work) == 3, "the best");
            logits[i] = not_a_number();
            CHECK(stx_sample(&s, 1, logits, 5, work) == -1, "a NaN at %d is taken", i);
            logits[i] = infinity_(0);
            CHECK(stx_sample(&s, 1, logits, 5, work) == -1, "an infinity at %d is taken", i);
            logits[i] = infinity_(1);
            CHECK(stx_sample(&s, 1, logits, 5, work) >= 0
                      && stx_sample(&s, 1, logits, 5, work) != i,
                  "a word that cannot come (%d) "
                  "comes, or is an error",
                  i);
        }
    for (i = 0; i < 5; i++) logits[i] = infinity_(1);
    CHECK(stx_sample(&s, 1, logits, 5, work) == -1, "no word can come");
}

int main(void) {
    stx_desc d;
    stx_ctx *x;
    int which;
    memset(&d, 0, sizeof d);
    d.threads = 1;
    d.seed = 7;
    x = stx_create(&d);
    functions(x);
    hidden(x);
    masks(x);
    gradients(x);
    samples();
    stx_destroy(x);
    for (which = 0; which < FAMILIES; which++) {
        x = stx_create(&d);
        models(x, which);
        stx_destroy(x);
    }
    return test_end();
}
