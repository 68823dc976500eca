/* test_fenv.c - tests that the library computes in its own floating-point environment.
   The caller sets rounding modes, flushing of denormals, and traps. In each of these
   environments, models of all families are trained and sampled, and many functions are
   called, with one thread and with two. The results must be bit-identical to those in
   the default environment. No exception may be trapped, and the caller's control word
   and status flags must not change. */
#include "../../seqtx_attn_span.h"
#include "../../seqtx_compressive.h"
#include "../../seqtx_par.h"
#include "../../seqtx_sru.h"
#include <float.h>
#include "../test.h"


// >>the caller's environment

typedef struct mode_of {
    const char *name;
    uint64_t word;
} mode_of;

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
  #include <immintrin.h>
/* Values of MXCSR, whose low six bits are the status flags. */
static const mode_of modes[] = {
    {"to nearest", 0x1f80}, {"upward", 0x5f80}, {"downward", 0x3f80}, {"toward zero", 0x7f80},
    {"traps", 0x1900}, {"upward, traps", 0x5900}, {"denormals flushed", 0x9fc0},
    {"flags set", 0x1fbf}};

static uint64_t mode_get(void) { return _mm_getcsr(); }
static void mode_put(uint64_t word) { _mm_setcsr((unsigned)word); }
#elif defined(__aarch64__) && (defined(__GNUC__) || defined(__clang__))
/* Values of FPCR << 32 | FPSR. */
static const mode_of modes[] = {
    {"to nearest", 0}, {"upward", (uint64_t)1 << 54}, {"downward", (uint64_t)2 << 54},
    {"toward zero", (uint64_t)3 << 54}, {"traps", (uint64_t)7 << 40},
    {"upward, traps", (uint64_t)1 << 54 | (uint64_t)7 << 40},
    {"denormals flushed", (uint64_t)1 << 56}, {"flags set", 0x1f}};

static uint64_t mode_get(void) {
    uint64_t control, status;
    __asm__ volatile("mrs %0, fpcr" : "=r"(control));
    __asm__ volatile("mrs %0, fpsr" : "=r"(status));
    return control << 32 | (status & 0x9f);
}

static void mode_put(uint64_t word) {
    __asm__ volatile("msr fpcr, %0" : : "r"(word >> 32));
    __asm__ volatile("msr fpsr, %0" : : "r"(word & 0xffffffffu));
}
#else
  #include <fenv.h>
static const mode_of modes[] = {
    {"to nearest", FE_TONEAREST},
  #ifdef FE_UPWARD
    {"upward", FE_UPWARD},
  #endif
  #ifdef FE_DOWNWARD
    {"downward", FE_DOWNWARD},
  #endif
  #ifdef FE_TOWARDZERO
    {"toward zero", FE_TOWARDZERO}
  #endif
};

static uint64_t mode_get(void) { return (uint64_t)fegetround(); }
static void mode_put(uint64_t word) { (void)fesetround((int)word); }
#endif

enum { MODES = sizeof modes / sizeof *modes };

/* The current mode, as read back from the processor, because some processors do not
   implement traps. */
static uint64_t mode_now;

static void mode_set(int mode) {
    mode_put(modes[mode].word);
    mode_now = mode_get();
}

/* Writes the message of a failed run: whether the environment changed, then the
   context's error. */
static void describe(char *message, int unchanged, stx_ctx *x) {
    snprintf(message, 200, "%s%.150s", unchanged ? "" : "the environment of the caller changed; ",
             stx_error(x));
}


// >>hash: covers the bits of all results

static const uint64_t hash_begin = 14695981039346656037u;
static uint64_t hash;

static void bits(const void *p, size_t n) {
    const unsigned char *s = (const unsigned char *)p;
    for (; n; n--) hash = (hash ^ *s++) * 1099511628211u;
}

static void number(double v) { bits(&v, sizeof v); }

static void tensor(stx_ctx *x, const stx_tensor *t) {
    stx_real *v = (stx_real *)calloc(t ? t->size : 1, sizeof *v);
    stx_get(x, t, v);
    if (t) bits(v, t->size * sizeof *v);
    free(v);
}

static void params(stx_params *p) {
    size_t i;
    for (i = 0; p && i < p->count; i++) tensor(p->ctx, p->tensor[i]);
}


// >>families

enum { B = 2, T = 24, V = 60, STEPS = 3 };

static stx_span_desc span_desc(void) {
    stx_span_desc d;
    memset(&d, 0, sizeof d);
    d.vocab = V;
    d.layers = 2;
    d.dim = 32;
    d.heads = 2;
    d.span = 32;
    d.dropout = 0.1;
    d.adapt_span = 1;
    d.span_loss = 0.01;
    return d;
}

static stx_lm make_span(stx_ctx *x, stx_par **par) {
    stx_span_desc d = span_desc();
    (void)par;
    return stx_span_as_lm(stx_span_create(x, &d));
}

static stx_lm make_span_adaptive(stx_ctx *x, stx_par **par) {
    stx_span_desc d = span_desc();
    (void)par;
    d.adapt_io = 1;
    d.cutoffs = 2;
    d.cutoff[0] = 9;
    d.cutoff[1] = 31;
    d.divval = 1.7;
    d.pers = 8;
    d.fairseq_init = 1;
    d.recompute_layers = SIZE_MAX;
    return stx_span_as_lm(stx_span_create(x, &d));
}

static stx_comp_desc comp_desc(void) {
    stx_comp_desc d;
    memset(&d, 0, sizeof d);
    d.vocab = V;
    d.layers = 2;
    d.dim = 32;
    d.heads = 2;
    d.segment = T;
    d.mem = T;
    d.ratio = 3;
    d.attn_dropout = d.out_dropout = 0.1;
    return d;
}

static stx_lm make_comp(stx_ctx *x, stx_par **par) {
    stx_comp_desc d = comp_desc();
    (void)par;
    return stx_comp_as_lm(stx_comp_create(x, &d));
}

static stx_lm make_comp_gated(stx_ctx *x, stx_par **par) {
    stx_comp_desc d = comp_desc();
    (void)par;
    d.compress = STX_COMP_COMPRESS_USED;
    d.positions = STX_COMP_POSITIONS_LEARNED;
    d.gate = STX_COMP_GATE_GTRXL;
    d.glu = 1;
    d.recompute_layers = SIZE_MAX;
    return stx_comp_as_lm(stx_comp_create(x, &d));
}

static stx_par_desc par_desc(void) {
    stx_par_desc d;
    memset(&d, 0, sizeof d);
    d.vocab = V;
    d.dim = 32;
    d.heads = 2;
    d.blocks = 3;
    d.segment = T;
    d.dropout = d.attn_dropout = 0.1;
    return d;
}

static stx_lm make_par_search(stx_ctx *x, stx_par **par) {
    stx_par_desc d = par_desc();
    d.latency = STX_PAR_LATENCY_FBNET;
    d.latency_weight = 0.1;
    d.cost[0] = 1.7;
    d.cost[1] = 0.9;
    d.noise = STX_PAR_NOISE_SEQUENCE;
    *par = stx_par_create(x, &d);
    return stx_par_as_lm(*par);
}

static stx_lm make_par(stx_ctx *x, stx_par **par) {
    stx_par_desc d = par_desc();
    d.pattern = "sfs";
    d.words_out = STX_PAR_OUT_REF;
    d.init = STX_PAR_INIT_REF;
    d.cutoffs = 2;
    d.cutoff[0] = 9;
    d.cutoff[1] = 31;
    *par = stx_par_create(x, &d);
    return stx_par_as_lm(*par);
}

static stx_sru_lm_desc sru_desc(void) {
    stx_sru_lm_desc d;
    memset(&d, 0, sizeof d);
    d.vocab = V;
    d.dim = 32;
    d.sru.layers = 2;
    d.dropout = 0.1;
    d.sru.highway_bias = -2;
    d.sru.norm = STX_SRU_NORM_BEFORE;
    return d;
}

static stx_lm make_sru(stx_ctx *x, stx_par **par) {
    stx_sru_lm_desc d = sru_desc();
    (void)par;
    return stx_sru_as_lm(stx_sru_lm_create(x, &d));
}

static stx_lm make_srupp(stx_ctx *x, stx_par **par) {
    stx_sru_lm_desc d = sru_desc();
    (void)par;
    d.sru.transform = STX_SRU_ATTENTION;
    d.sru.proj = 16;
    d.sru.rescale = 1;
    d.sru.alpha_init = 0.3;
    d.sru.recompute_layers = SIZE_MAX;
    return stx_sru_as_lm(stx_sru_lm_create(x, &d));
}

/* `make` creates the model. If the model has architecture parameters, *par receives the
   model. */
static const struct family {
    const char *name;
    stx_lm (*make)(stx_ctx *x, stx_par **par);
    int optimiser;
} families[] = {{"span", make_span, STX_ADAM},
                {"span, adaptive words", make_span_adaptive, STX_LAMB},
                {"compressive", make_comp, STX_RADAM},
                {"compressive, gated", make_comp_gated, STX_ADAGRAD},
                {"PAR, a search", make_par_search, STX_ADAMW},
                {"PAR, a pattern", make_par, STX_SGD},
                {"SRU", make_sru, STX_LAMB},
                {"SRU++", make_srupp, STX_ADAM}};

enum { FAMILIES = sizeof families / sizeof *families };


// >>training and sampling

/* Trains one step, and hashes the losses and the learning rate. */
static void train_step(const stx_lm *lm, stx_par *par, stx_optim *optim, stx_optim *gates,
                       void *memory, int step) {
    static const double tau[STEPS] = {0.9, 0.7, 0.1};
    stx_ctx *x = lm->ctx;
    stx_schedule schedule;
    stx_ids *in, *next;
    stx_tensor *nll, *total;
    int32_t ids[B * (T + 1)];
    double lr;
    size_t i;
    memset(&schedule, 0, sizeof schedule);
    schedule.kind = STX_LR_COSINE;
    schedule.lr = 0.01;
    schedule.warmup = 2;
    schedule.total = 7;
    schedule.decay = 0.7;
    schedule.decay_from = 1;
    for (i = 0; i < B * (T + 1); i++) {
        ids[i] = (int32_t)((i * i + i / 3 + (size_t)step * 5) % V);
    }
    stx_begin(x, STX_TRAIN);
    in = stx_tokens(x, ids, B, T);
    next = stx_tokens(x, ids + 1, B, T);
    nll = lm->loss(lm->model, in, next, memory, memory);
    total = lm->total ? lm->total(lm->model, nll) : nll;
    stx_backward(x, total);
    tensor(x, nll);
    tensor(x, total);
    lr = stx_schedule_lr(&schedule, (uint64_t)step + 1);
    number(lr);
    if (stx_optim_step(optim, lr) && lm->updated) lm->updated(lm->model);
    if (gates) stx_optim_step(gates, 0.01);
    if (gates) stx_par_set_tau(par, tau[step]);
}

/* Samples four tokens for each stream, and hashes the logits and the tokens. */
static void sample(const stx_lm *lm) {
    stx_sampling how;
    stx_real work[V];
    int32_t token[B];
    void *gen = lm->gen_create(lm->model, B, 0);
    size_t i, b;
    memset(&how, 0, sizeof how);
    how.temperature = 0.8;
    how.top_p = 0.9;
    how.top_k = 20;
    how.seed = 5;
    for (b = 0; b < B; b++) token[b] = (int32_t)b;
    for (i = 0; i < 4; i++) {
        const stx_real *logits = lm->gen_feed(gen, token, 1);
        for (b = 0; logits && b < B; b++) {
            bits(logits + b * V, V * sizeof *logits);
            token[b] = stx_sample(&how, i * B + b, logits + b * V, V, work);
        }
        bits(token, sizeof token);
    }
    lm->gen_free(gen);
}

/* Trains a model, samples from it, and returns the hash. If mixed is set, the
   environment changes in each step. */
static uint64_t run(const struct family *f, int threads, int mode, int mixed, char *message) {
    stx_desc cd;
    stx_optim_desc od;
    stx_ctx *x;
    stx_lm lm;
    stx_par *par = NULL;
    stx_optim *optim, *gates = NULL;
    void *memory;
    int step, unchanged;
    memset(&cd, 0, sizeof cd);
    memset(&od, 0, sizeof od);
    hash = hash_begin;
    mode_set(mode);
    cd.threads = threads;
    cd.seed = 3;
    x = stx_create(&cd);
    lm = f->make(x, &par);
    od.kind = f->optimiser;
    od.clip = 0.3;
    od.weight_decay = od.kind == STX_ADAGRAD ? 0 : 0.01;
    optim = stx_optim_create(lm.params, &od);
    if (par && par->gates) gates = stx_optim_create(par->gates, &od);
    memory = lm.state_create(lm.model, B, 0);
    for (step = 0; step < STEPS; step++) {
        if (mixed) mode_set((mode + step) % MODES);
        train_step(&lm, par, optim, gates, memory, step);
    }
    params(lm.params);
    if (par) params(par->gates);
    sample(&lm);
    unchanged = mode_get() == mode_now;
    mode_set(0);
    describe(message, unchanged, x);
    stx_destroy(x);
    return hash;
}


// >>functions

static double changed(void *user, size_t i, double was) {
    (void)user;
    return was * 1.1 + 1 / (3 + (double)i);
}

/* Calls functions for parameters and masked rows, and the operators of a training step.
   a, b: (4,40). */
static void call_operators(stx_ctx *x, stx_real *a, const stx_real *b) {
    static const stx_real inf = (stx_real)HUGE_VAL;
    static const int32_t target[4] = {0, 3, 2, 1};
    stx_params *p = stx_params_create(x);
    stx_tensor *t, *u, *q, *scalar, *w;
    size_t i;
    w = stx_param(p, STX_TRUNCATED, 0.1, "w", 10, 40, 0, 0);
    stx_param_scale(x, w, 1, 3, 1.0 / 3);
    stx_param_fill(x, w, 4, 5, 0.1);
    stx_param_apply(x, w, changed, NULL);
    tensor(x, w);
    scalar = stx_scalar_create(x, 0.1);
    stx_scalar_set(x, scalar, 1.0 / 7);

    stx_begin(x, STX_TRAIN);
    t = stx_variable(x, a, 4, 40, 0, 0);
    u = stx_input(x, b, 4, 40, 0, 0);
    t = stx_scale(x, t, 0.1);
    t = stx_scale_by(x, t, scalar);
    t = stx_dropout(x, t, 0.3);
    t = stx_layernorm(x, t, NULL, NULL, 1e-5);
    tensor(x, t);
    tensor(x, stx_mean(x, t));
    tensor(x, stx_sum(x, t));
    q = stx_linear(x, t, w, NULL, STX_ACT_GELU);
    tensor(x, q);
    q = stx_cross_entropy(x, q, stx_tokens(x, target, 4, 1), 3);
    tensor(x, q);
    q = stx_add(x, q, stx_scale(x, stx_mse(x, t, u), 1.0 / 3));
    stx_backward(x, q);
    tensor(x, q);
    if (w) bits(w->grad, w->size * sizeof *w->grad);

    a[0] = -inf;
    tensor(x, stx_softmax(x, stx_input(x, a, 4, 40, 0, 0)));
    for (i = 0; i < 40; i++) a[i] = -inf;
    tensor(x, stx_log_softmax(x, stx_input(x, a, 4, 40, 0, 0)));
    tensor(x, stx_tanh(x, stx_input(x, a, 4, 40, 0, 0)));
}

/* Calls scalar functions. part: (40), computed in the default environment. */
static void call_scalars(const double *part) {
    stx_par_anneal cooling = {STX_PAR_TAU_TARGET, 2, 0.3, 120};
    size_t i;
    for (i = 0; i < 40; i++) {
        size_t reach = stx_attention_reach(part[i], 100.3, 31.7, 5000);
        bits(&reach, sizeof reach);
    }
    for (i = 0; i < 40; i++) number(stx_par_tau(&cooling, i));
}

/* Reads from a file a value that overflows when it is converted to float. */
static void call_files(stx_ctx *x) {
    float f[2];
    double d[2] = {1.0 / 3, 1e300};
    size_t n = 2, dim[1] = {2};
    stx_writer *w = stx_writer_create(x);
    stx_file *file;
    void *bytes;
    stx_writer_add(w, "d", STX_F64, 1, dim, d);
    bytes = stx_writer_bytes(w, &n);
    file = stx_file_in_memory(x, "bytes", bytes, n);
    stx_entry_get_f32(stx_file_find(file, "d"), f, 2);
    stx_file_close(file);
    bits(f, sizeof f);
}

static uint64_t calls(int mode, char *message) {
    stx_real a[4 * 40], b[4 * 40];
    stx_ctx *x = stx_create(NULL);
    double part[40];
    size_t i;
    int unchanged;
    hash = hash_begin;
    for (i = 0; i < 160; i++) a[i] = (stx_real)((double)((i * 37) % 101) / 50 - 1);
    for (i = 0; i < 160; i++) b[i] = (stx_real)((double)((i * 53) % 103) / 51 - 1);
    for (i = 0; i < 40; i++) part[i] = 0.037 * (double)i;
    mode_set(mode);
    call_operators(x, a, b);
    call_scalars(part);
    call_files(x);
    unchanged = mode_get() == mode_now;
    mode_set(0);
    describe(message, unchanged, x);
    stx_destroy(x);
    return hash;
}

/* With the argument "short", which is intended for emulated processors, only every
   third model runs. */
int main(int argc, char **argv) {
    char message[200];
    uint64_t expected, got;
    int k, mode, threads, stride = argc > 1 && strcmp(argv[1], "short") == 0 ? 3 : 1;
    expected = calls(0, message);
    CHECK(!*message, "functions: %s", message);
    for (mode = 1; mode < MODES; mode++) {
        got = calls(mode, message);
        CHECK(got == expected && !*message, "functions, %s: results differ; %s", modes[mode].name,
              message);
    }
    for (k = 0; k < FAMILIES; k += stride) {
        const struct family *f = &families[k];
        expected = run(f, 1, 0, 0, message);
        CHECK(!*message, "%s: %s", f->name, message);
        for (threads = 1; threads <= 2; threads++) {
            /* On x87, a sum depends on where its terms are rounded, and so on the
               number of threads. */
            if (FLT_EVAL_METHOD != 0) expected = run(f, threads, 0, 0, message);
            for (mode = 0; mode < MODES; mode++) {
                got = run(f, threads, mode, 0, message);
                CHECK(got == expected && !*message, "%s, %d threads, %s: results differ; %s",
                      f->name, threads, modes[mode].name, message);
            }
            got = run(f, threads, 1, 1, message);
            CHECK(got == expected && !*message, "%s, %d threads, mixed modes: results differ; %s",
                  f->name, threads, message);
        }
    }
    return test_end();
}
