/* test_api.c - tests the API as a caller uses it: descs, errors, NULL, exhausted
   memory, arenas, repeatability, NaN, optimisers, schedules, random numbers, kernels,
   packed weights, sampling. Built in float and in double. Writes files in the build
   directory. */
#if !defined(_WIN32) && !defined(_POSIX_C_SOURCE)
  #define _POSIX_C_SOURCE 200809L
#endif
#include <stdint.h>
#include "../../seqtx.h"
#define STX_LOOPS /* declares the functions that inner loops use: exp, tanh and so on */
#include "../../seqtx.h"
#include "../test.h"
#include "../ops/gemm_check.h"
#include "../ops/kernels.h"
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>


/* >>shared by the parts */

/* An allocator that counts its calls. Call number fail_at fails, and so do all calls
   from number fail_from on. If either is 0, it has no effect. Memory is not zeroed. */
typedef struct counter {
    long calls, live, fail_at, fail_from;
    size_t bytes, most;
} counter;

static void *count_alloc(void *user, size_t n) {
    counter *c = (counter *)user;
    size_t *p;
    c->calls++;
    if (c->calls == c->fail_at || (c->fail_from && c->calls >= c->fail_from) || n > (size_t)1 << 33)
        return NULL;
    p = (size_t *)malloc(n + 16);
    if (!p) return NULL;
    memset(p, 0xA5, n + 16);
    p[0] = n;
    c->live++;
    c->bytes += n;
    if (c->bytes > c->most) c->most = c->bytes;
    return (char *)p + 16;
}

static void count_release(void *user, void *p) {
    counter *c = (counter *)user;
    if (!p) return;
    c->live--;
    c->bytes -= *(size_t *)(void *)((char *)p - 16);
    free((char *)p - 16);
}

static stx_ctx *counted(counter *c, size_t chunk, size_t max, uint64_t seed, int threads) {
    stx_desc d;
    memset(&d, 0, sizeof d);
    d.alloc = count_alloc;
    d.release = count_release;
    d.user = c;
    d.chunk_bytes = chunk;
    d.max_bytes = max;
    d.seed = seed;
    d.threads = threads;
    return stx_create(&d);
}

static stx_ctx *plain(uint64_t seed, int threads) {
    stx_desc d;
    memset(&d, 0, sizeof d);
    d.seed = seed;
    d.threads = threads;
    return stx_create(&d);
}

/* Nonzero if fn returns 1. fn runs in a separate process, so that a crash is a failed
   check and does not end the tests. */
static int survives(int (*fn)(void)) {
    int status = 0;
    pid_t pid;
    fflush(NULL);
    pid = fork();
    if (pid < 0) return 0;
    if (pid == 0) {
        int r = fn();
        fflush(NULL);
        _exit(r ? 0 : 3);
    }
    if (waitpid(pid, &status, 0) != pid) return 0;
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

/* A small model with every kind of op: embedding, attention with a learned span,
   positions and persistent vectors, a recomputed feed-forward layer, and an adaptive
   softmax. */
typedef struct model {
    stx_params *p;
    stx_optim *o;
    size_t V, C, H, T, B;
    stx_adaptive out;
} model;

static int model_make(stx_ctx *x, model *m, size_t B, size_t T, size_t C, size_t H, int kind) {
    stx_optim_desc od;
    stx_params *p;
    memset(m, 0, sizeof *m);
    memset(&od, 0, sizeof od);
    m->V = 31;
    m->C = C;
    m->H = H;
    m->T = T;
    m->B = B;
    p = m->p = stx_params_create(x);
    stx_param(p, STX_NORMAL, 0.3, "emb", m->V, C, 0, 0);
    stx_param(p, STX_NORMAL, 0.3, "pe", T, C / H, 0, 0);
    stx_param(p, STX_CONSTANT, 0.35, "z", H, 0, 0, 0);
    stx_param(p, STX_NORMAL, 0.3, "pk", H, 3, C / H, 0);
    stx_param(p, STX_NORMAL, 0.3, "pv", H, 3, C / H, 0);
    stx_param(p, STX_UNIFORM, 0.3, "wq", C, C, 0, 0);
    stx_param(p, STX_UNIFORM, 0.3, "wk", C, C, 0, 0);
    stx_param(p, STX_UNIFORM, 0.3, "wv", C, C, 0, 0);
    stx_param(p, STX_CONSTANT, 1, "ln.gain", C, 0, 0, 0);
    stx_param(p, STX_ZEROS, 0, "ln.shift", C, 0, 0, 0);
    stx_param(p, STX_UNIFORM, 0.3, "w1", 2 * C, C, 0, 0);
    stx_param(p, STX_UNIFORM, 0.3, "b1", 2 * C, 0, 0, 0);
    stx_param(p, STX_UNIFORM, 0.3, "w2", C, 2 * C, 0, 0);
    m->out.clusters = 2;
    m->out.end[0] = 11;
    m->out.end[1] = 31;
    m->out.table[0] = stx_param(p, STX_NORMAL, 0.3, "out.0", 11, C, 0, 0);
    m->out.table[1] = stx_param(p, STX_NORMAL, 0.3, "out.1", 20, C / 2, 0, 0);
    m->out.proj[1] = stx_param(p, STX_NORMAL, 0.3, "out.p1", C, C / 2, 0, 0);
    m->out.bias[0] = stx_param(p, STX_ZEROS, 0, "out.b0", 11, 0, 0, 0);
    m->out.bias[1] = stx_param(p, STX_ZEROS, 0, "out.b1", 20, 0, 0, 0);
    m->out.cluster_w = stx_param(p, STX_NORMAL, 0.3, "out.cw", 1, C, 0, 0);
    m->out.cluster_b = stx_param(p, STX_ZEROS, 0, "out.cb", 1, 0, 0, 0);
    od.kind = kind;
    od.clip = 1;
    m->o = stx_optim_create(p, &od);
    return stx_ok(x);
}

static stx_tensor *feed_forward(stx_ctx *x, void *user, stx_tensor **in, stx_tensor **out) {
    model *m = (model *)user;
    stx_tensor *h;
    (void)out;
    h = stx_linear(x, in[0], stx_params_find(m->p, "w1"), stx_params_find(m->p, "b1"),
                   STX_ACT_GELU);
    return stx_linear(x, stx_dropout(x, h, 0.1), stx_params_find(m->p, "w2"), NULL, STX_ACT_NONE);
}

enum { SEEN = 8 };

/* Runs one step and returns the loss, or NaN after an error. `seen`, which may be NULL,
   receives the addresses of tensors and of their data. */
static double model_step(stx_ctx *x, model *m, int step, const void **seen, int update) {
    int32_t *id = (int32_t *)malloc(2 * m->B * m->T * sizeof *id);
    size_t i, n = m->B * m->T;
    stx_attention_in ai;
    stx_attention_desc ad;
    stx_tensor *h, *a, *loss, *y;
    double value;
    for (i = 0; i < 2 * n; i++)
        id[i] = (int32_t)((i * i + 7 * i + 3 * (size_t)step + (i >= n)) % m->V);
    memset(&ai, 0, sizeof ai);
    memset(&ad, 0, sizeof ad);
    stx_begin(x, STX_TRAIN);
    h = stx_dropout(x,
                    stx_embedding(x, stx_params_find(m->p, "emb"), stx_tokens(x, id, m->B, m->T)),
                    0.1);
    ai.q = stx_linear(x, h, stx_params_find(m->p, "wq"), NULL, STX_ACT_NONE);
    ai.k = stx_linear(x, h, stx_params_find(m->p, "wk"), NULL, STX_ACT_NONE);
    ai.v = stx_linear(x, h, stx_params_find(m->p, "wv"), NULL, STX_ACT_NONE);
    ai.pe = stx_params_find(m->p, "pe");
    ai.span_fraction = stx_params_find(m->p, "z");
    ai.persistent_k = stx_params_find(m->p, "pk");
    ai.persistent_v = stx_params_find(m->p, "pv");
    ad.heads = m->H;
    ad.delta_min = 1;
    ad.max_span = (double)m->T;
    ad.ramp = 5;
    ad.dropout = 0.1;
    ad.first_key = -3;
    a = stx_attention(x, &ai, &ad);
    h = stx_layernorm(x, stx_add(x, h, a), stx_params_find(m->p, "ln.gain"),
                      stx_params_find(m->p, "ln.shift"), 0);
    y = stx_add(x, h, stx_recompute(x, feed_forward, m, &h, 1, NULL, 0));
    loss = stx_adaptive_softmax(x, &m->out, y, stx_tokens(x, id + n, m->B, m->T));
    value = stx_item(x, loss);
    if (seen) {
        seen[0] = h;
        seen[1] = ai.q;
        seen[2] = a;
        seen[3] = y;
        seen[4] = loss;
        seen[5] = h ? h->data : NULL;
        seen[6] = a ? a->data : NULL;
        seen[7] = loss ? loss->data : NULL;
    }
    stx_backward(x, loss);
    if (update) stx_optim_step(m->o, 0.01);
    free(id);
    return stx_ok(x) ? value : (double)NAN;
}

static int same_params(const stx_params *a, const stx_params *b) {
    size_t i;
    for (i = 0; i < a->count; i++)
        if (memcmp(a->tensor[i]->data, b->tensor[i]->data, a->tensor[i]->size * sizeof(stx_real)))
            return 0;
    return a->count == b->count;
}


/* >>descs */

static void versions(void) {
    char text[64];
    snprintf(text, sizeof text, "%d.%d.%d", STX_VERSION_MAJOR, STX_VERSION_MINOR,
             STX_VERSION_PATCH);
    CHECK(!strcmp(text, STX_VERSION) && !strcmp(stx_version(), STX_VERSION), "%s, %s, %s", text,
          STX_VERSION, stx_version());
#if !STX_VERSION_AT_LEAST(STX_VERSION_MAJOR, STX_VERSION_MINOR, STX_VERSION_PATCH) \
    || STX_VERSION_AT_LEAST(STX_VERSION_MAJOR + 1, 0, 0) \
    || STX_VERSION_AT_LEAST(STX_VERSION_MAJOR, STX_VERSION_MINOR, STX_VERSION_PATCH + 1) \
    || !STX_VERSION_AT_LEAST(0, 0, 1000 - 1)
    CHECK(0, "STX_VERSION_AT_LEAST");
#endif
}

static void training_state(stx_ctx *x) {
    CHECK(!stx_training(x) && stx_step_index(x) == 0, "before the first stx_begin");
    stx_begin(x, STX_TRAIN);
    CHECK(stx_training(x) && stx_step_index(x) == 1, "in training");
    stx_begin(x, STX_EVAL);
    CHECK(!stx_training(x) && stx_step_index(x) == 1, "evaluation advances the step index");
    stx_set_step_index(x, 41);
    stx_begin(x, STX_TRAIN);
    CHECK(stx_step_index(x) == 42, "stx_set_step_index");
}

/* An invalid desc must result in a context that has an error and allocates no memory. */
static void invalid_desc(const stx_desc *d, const char *text, int code) {
    stx_ctx *x = stx_create(d);
    CHECK(x && !stx_ok(x) && strstr(stx_error(x), "stx_create") && strstr(stx_error(x), text),
          "expected \"%s\" in: %s", text, stx_error(x));
    CHECK(stx_error_code(x) == code, "expected code %d, got %d", code, stx_error_code(x));
    CHECK(!stx_params_create(x) && !stx_persist(x, 10), "a context in error gives memory");
    stx_destroy(x);
}

static void descs(void) {
    stx_ctx *x = stx_create(NULL);
    const stx_desc *r;
    stx_desc d;
    CHECK(stx_ok(x) && stx_error_code(x) == STX_OK && !strcmp(stx_error(x), ""), "a NULL desc: %s",
          stx_error(x));
    stx_destroy(x);
    memset(&d, 0, sizeof d);
    x = stx_create(&d);
    CHECK(stx_ok(x), "a zero desc: %s", stx_error(x));
    r = stx_ctx_desc(x);
    CHECK(r && r->alloc && r->release && r->chunk_bytes == (size_t)1 << 20 && r->threads >= 1
              && r->threads == stx_threads(x) && r->device == STX_CPU && !r->max_bytes,
          "the resolved desc");
    training_state(x);
    stx_destroy(x);
    d.threads = 3;
    d.seed = 12345;
    d.chunk_bytes = 4096;
    d.max_bytes = (size_t)1 << 30;
    x = stx_create(&d);
    r = stx_ctx_desc(x);
#ifndef SEQTX_NO_THREADS
    CHECK(r->threads == 3, "threads");
#else
    CHECK(r->threads == 1, "threads in a build without them");
#endif
    CHECK(r->seed == 12345 && r->chunk_bytes == 4096 && r->max_bytes == (size_t)1 << 30,
          "the resolved desc changes values");
    stx_destroy(x);
    invalid_desc(&(stx_desc){.threads = -1}, "got -1", STX_ERR_ARG);
#ifndef SEQTX_NO_THREADS
    invalid_desc(&(stx_desc){.threads = 5000}, "5000", STX_ERR_ARG);
#endif
#ifndef SEQTX_CUDA
    invalid_desc(&(stx_desc){.device = STX_CUDA}, "device 1", STX_ERR_DEVICE);
#endif
    invalid_desc(&(stx_desc){.device = 77}, "77", STX_ERR_DEVICE);
    invalid_desc(&(stx_desc){.precision = 7}, "precision 7", STX_ERR_DEVICE);
}


/* >>errors: each error, and the names that its text must contain */

/* The allocation counter, the context, the parameter list and the parameter that all
   error tests share. */
static counter ecount;
static stx_ctx *ex;
static stx_params *ep;
static stx_tensor *ew; /* "weights" (5,4) */

static stx_real zeros[4096];
static const int32_t good_ids[6] = {0, 1, 2, 3, 4, 5}, high_ids[3] = {0, 7, 1},
                     negative_ids[3] = {0, 1, -1}, pad_flags[10] = {0, 1, 0, -1, 2, 7, 0, 0, 1, 1};

/* Checks that a call failed: the result is NULL or 0, the error text contains `op`,
   `got` and `expected`, and a second error does not replace the first. */
static void check_refusal(const void *result, const char *what, int code, const char *op,
                         const char *got, const char *expected) {
    const char *t = stx_error(ex);
    char first[600];
    CHECK(!result && !stx_ok(ex), "%s: no error", what);
    CHECK(stx_error_code(ex) == code, "%s: expected code %d, got %d (%s)", what, code,
          stx_error_code(ex), t);
    CHECK(strstr(t, op) && strstr(t, got) && strstr(t, expected),
          "%s: expected \"%s\", \"%s\", \"%s\" in: %s", what, op, got, expected, t);
    snprintf(first, sizeof first, "%s", t);
    stx_fail(ex, STX_ERR_IO, "another");
    CHECK(!strcmp(stx_error(ex), first), "%s: a second error replaces the first", what);
    stx_clear_error(ex);
    CHECK(stx_ok(ex) && !strcmp(stx_error(ex), ""), "%s: stx_clear_error keeps it", what);
}

#define REFUSE(expr, code, op, got, expected) check_refusal(expr, #expr, code, op, got, expected)
/* Like REFUSE, for calls whose result does not show whether they failed. */
#define REFUSE_OF(call, code, op, got, expected) \
  ((void)(call), check_refusal(NULL, #call, code, op, got, expected))

static stx_tensor *gives_null(stx_ctx *x, void *user, stx_tensor **in, stx_tensor **out) {
    (void)x;
    (void)user;
    (void)in;
    (void)out;
    return NULL;
}

static void ignores_gradient(stx_ctx *x, stx_tensor *y, stx_tensor *const *in, void *save) {
    (void)x;
    (void)y;
    (void)in;
    (void)save;
}

/* Returns a variable filled with zeros. */
static stx_tensor *T_(size_t a, size_t b, size_t c, size_t d) {
    return stx_variable(ex, zeros, a, b, c, d);
}

static stx_ids *row_of_ids(const int32_t *ids, size_t n) {
    return stx_tokens(ex, ids, 1, n);
}

static void errors_of_leaves(void) {
    REFUSE(stx_input(ex, NULL, 3, 0, 0, 0), STX_ERR_ARG, "stx_input", "NULL", "elements");
    REFUSE(stx_input(ex, zeros, 0, 3, 0, 0), STX_ERR_ARG, "stx_input", "got 0", "d0");
    REFUSE(stx_variable(ex, NULL, 3, 0, 0, 0), STX_ERR_ARG, "stx_", "NULL", "elements");
    REFUSE(stx_tokens(ex, NULL, 3, 1), STX_ERR_ARG, "stx_tokens", "NULL", "B x T");
    REFUSE(stx_tokens(ex, good_ids, SIZE_MAX / 2, 3), STX_ERR_ARG, "stx_tokens", "x 3", "at most");
    REFUSE(stx_tokens_create(ex, 3, SIZE_MAX / 2), STX_ERR_ARG, "stx_tokens_create", "got 3 x",
           "at most");
    REFUSE(stx_step_host_bytes(ex, SIZE_MAX), STX_ERR_MEMORY, "step arena: an allocation",
           "exceeds the address space", "dimensions");
    REFUSE(stx_tokens(ex, good_ids, 0, 4), STX_ERR_ARG, "stx_tokens", "0 x 4", "1 x 1");
    REFUSE(stx_tokens(ex, good_ids, 4, 0), STX_ERR_ARG, "stx_tokens", "4 x 0", "1 x 1");
    REFUSE(stx_param(ep, STX_NORMAL, 1, "weights", 5, 4, 0, 0), STX_ERR_ARG, "stx_param", "weights",
           "already");
    REFUSE(stx_param(ep, STX_NORMAL, 1, "", 5, 4, 0, 0), STX_ERR_ARG, "stx_param", "", "name");
    REFUSE(stx_param(ep, STX_NORMAL, 1, NULL, 5, 4, 0, 0), STX_ERR_ARG, "stx_param", "", "name");
    REFUSE(stx_param(ep, STX_NORMAL, 1, "other", 0, 4, 0, 0), STX_ERR_ARG, "stx_param", "other",
           "d0: expected at least 1");
    REFUSE(stx_param(ep, 99, 1, "other", 3, 0, 0, 0), STX_ERR_ARG, "stx_param", "99", "STX_");
    CHECK(ep->count == 1, "a parameter that failed is in the list");
}

static void errors_of_lookups(void) {
    REFUSE(stx_embedding(ex, T_(2, 3, 4, 0), row_of_ids(good_ids, 2)), STX_ERR_SHAPE,
           "stx_embedding", "(2,3,4)", "(V,C)");
    REFUSE(stx_embedding(ex, ew, row_of_ids(high_ids, 3)), STX_ERR_ARG, "stx_embedding",
           "id 7 at position 1", "5 rows");
    REFUSE(stx_embedding(ex, ew, row_of_ids(negative_ids, 3)), STX_ERR_ARG, "stx_embedding",
           "id -1 at position 2", "5 rows");
    REFUSE(stx_gather(ex, ew, high_ids, 3), STX_ERR_ARG, "stx_gather", "7", "5 rows");
    REFUSE(stx_gather(ex, ew, negative_ids, 3), STX_ERR_ARG, "stx_gather", "-1", "5 rows");
    REFUSE(stx_gather(ex, ew, good_ids, 0), STX_ERR_ARG, "stx_gather", "got 0",
           "1 to SIZE_MAX / 4 row indices");
    REFUSE(stx_gather(ex, ew, NULL, 3), STX_ERR_ARG, "stx_gather", "", "");
}

static void errors_of_linear(void) {
    REFUSE(stx_linear(ex, T_(2, 3, 0, 0), ew, NULL, 0), STX_ERR_SHAPE, "stx_linear", "(2,3)",
           "(5,4)");
    REFUSE(stx_linear(ex, T_(2, 4, 0, 0), T_(2, 5, 4, 0), NULL, 0), STX_ERR_SHAPE, "stx_linear",
           "(2,5,4)", "(O,Ci)");
    REFUSE(stx_linear(ex, T_(2, 4, 0, 0), ew, T_(4, 0, 0, 0), 0), STX_ERR_SHAPE, "stx_linear",
           "(5,4)", "bias");
    REFUSE(stx_linear(ex, T_(2, 4, 0, 0), ew, NULL, 9), STX_ERR_ARG, "stx_linear", "9", "STX_ACT_");
    REFUSE(stx_linear(ex, T_(2, 4, 0, 0), ew, NULL, -1), STX_ERR_ARG, "stx_linear", "-1",
           "STX_ACT_");
    REFUSE(stx_matmul(ex, T_(2, 3, 4, 0), T_(3, 4, 5, 0), 0, 0), STX_ERR_SHAPE, "stx_matmul",
           "(2,3,4)", "(3,4,5)");
    REFUSE(stx_matmul(ex, T_(4, 0, 0, 0), T_(4, 5, 0, 0), 0, 0), STX_ERR_SHAPE, "stx_matmul", "(4)",
           "two dimensions");
    REFUSE(stx_matmul(ex, T_(3, 4, 0, 0), T_(5, 4, 0, 0), 0, 0), STX_ERR_SHAPE, "stx_matmul",
           "(3,4)", "inner");
    REFUSE(stx_matmul(ex, T_(3, 4, 0, 0), T_(3, 5, 0, 0), 0, 1), STX_ERR_SHAPE, "stx_matmul",
           "(3,5)^T", "inner");
    REFUSE(stx_matmul(ex, T_(2, 4, 0, 0), T_(2, 2, 4, 0), 0, 1), STX_ERR_SHAPE, "stx_matmul",
           "(2,4)", "(2,2,4)");
    REFUSE(stx_linear_memory(ex, T_(1, 3, 4, 0), T_(1, 2, 4, 0), T_(5, 4, 0, 0), T_(4, 0, 0, 0)),
           STX_ERR_SHAPE, "stx_linear_memory", "got 4", "(5,4)");
}

static void errors_elementwise(void) {
    stx_tensor *wide = T_(4, 0, 0, 0);
    REFUSE(stx_layernorm(ex, T_(2, 4, 0, 0), T_(3, 0, 0, 0), T_(4, 0, 0, 0), 0), STX_ERR_SHAPE,
           "stx_layernorm", "(2,4)", "3 gains");
    REFUSE(stx_layernorm(ex, T_(2, 4, 0, 0), T_(4, 0, 0, 0), T_(5, 0, 0, 0), 0), STX_ERR_SHAPE,
           "stx_layernorm", "(2,4)", "5 shifts");
    REFUSE(stx_residual_norm_bias(ex, T_(2, 4, 0, 0), T_(2, 4, 0, 0), T_(3, 0, 0, 0), 0,
                                  T_(4, 0, 0, 0), T_(4, 0, 0, 0), 0),
           STX_ERR_SHAPE, "stx_residual_norm_bias", "(2,4)", "got 3");
    REFUSE(stx_add_means(ex, T_(2, 0, 0, 0), &wide, 1, 1), STX_ERR_SHAPE, "stx_add_means", "(2)",
           "one element");
    REFUSE(stx_add(ex, T_(2, 4, 0, 0), T_(2, 0, 0, 0)), STX_ERR_SHAPE, "stx_add", "(2,4)", "(2)");
    REFUSE(stx_add(ex, T_(4, 0, 0, 0), T_(2, 4, 0, 0)), STX_ERR_SHAPE, "stx_add", "(4)", "(2,4)");
    REFUSE(stx_mul(ex, T_(2, 4, 0, 0), T_(4, 2, 0, 0)), STX_ERR_SHAPE, "stx_mul", "(2,4)", "(4,2)");
    REFUSE(stx_dropout(ex, T_(3, 0, 0, 0), -0.1), STX_ERR_ARG, "stx_dropout", "-0.1", "below 1");
    REFUSE(stx_dropout(ex, T_(3, 0, 0, 0), 1), STX_ERR_ARG, "stx_dropout", "1", "below 1");
    REFUSE(stx_dropout(ex, T_(3, 0, 0, 0), NAN), STX_ERR_ARG, "stx_dropout", "nan", "below 1");
}

static void errors_of_losses(void) {
    REFUSE(stx_cross_entropy(ex, T_(3, 4, 0, 0), row_of_ids(good_ids, 2), 0), STX_ERR_SHAPE,
           "stx_cross_entropy", "(3,4)", "1 x 2");
    REFUSE(stx_cross_entropy(ex, T_(3, 4, 0, 0), row_of_ids(high_ids, 3), 0), STX_ERR_ARG,
           "stx_cross_entropy", "got 7", "0 to 3");
    REFUSE(stx_cross_entropy(ex, T_(3, 4, 0, 0), stx_tokens(ex, negative_ids, 3, 1), 0),
           STX_ERR_ARG, "stx_cross_entropy", "got -1", "0 to 3");
    REFUSE(stx_mse(ex, T_(3, 4, 0, 0), T_(4, 3, 0, 0)), STX_ERR_SHAPE, "stx_mse", "(3,4)", "(4,3)");
}

static void errors_of_shapes(void) {
    REFUSE(stx_concat(ex, T_(3, 4, 0, 0), T_(3, 4, 0, 0)), STX_ERR_SHAPE, "stx_concat", "(3,4)",
           "(B,Ta,C)");
    REFUSE(stx_concat(ex, T_(3, 4, 2, 0), T_(2, 4, 2, 0)), STX_ERR_SHAPE, "stx_concat", "(3,4,2)",
           "(2,4,2)");
    REFUSE(stx_concat(ex, T_(3, 4, 2, 0), T_(3, 4, 3, 0)), STX_ERR_SHAPE, "stx_concat", "(3,4,2)",
           "(3,4,3)");
    REFUSE(stx_slice(ex, T_(3, 4, 2, 0), 1, 5), STX_ERR_SHAPE, "stx_slice", "[1,5)", "(3,4,2)");
    REFUSE(stx_slice(ex, T_(3, 4, 2, 0), 2, 2), STX_ERR_SHAPE, "stx_slice", "[2,2)", "t0 < t1");
    REFUSE(stx_slice(ex, T_(3, 4, 0, 0), 0, 2), STX_ERR_SHAPE, "stx_slice", "(3,4)", "(B,T,C)");
    REFUSE(stx_concat_channels(ex, T_(3, 4, 0, 0), T_(2, 4, 0, 0)), STX_ERR_SHAPE,
           "stx_concat_channels", "(3,4)", "(2,4)");
    REFUSE(stx_concat_channels(ex, T_(2, 3, 4, 0), T_(3, 2, 4, 0)), STX_ERR_SHAPE,
           "stx_concat_channels", "(2,3,4)", "(3,2,4)");
    REFUSE(stx_concat_channels(ex, T_(6, 4, 0, 0), T_(2, 3, 4, 0)), STX_ERR_SHAPE,
           "stx_concat_channels", "(6,4)", "(2,3,4)");
    REFUSE(stx_reshape(ex, T_(3, 4, 0, 0), 5, 0, 0, 0), STX_ERR_SHAPE, "stx_reshape", "(3,4)",
           "(5,");
    REFUSE(stx_reshape(ex, T_(3, 4, 0, 0), 0, 12, 0, 0), STX_ERR_SHAPE, "stx_reshape", "(3,4)",
           "(0,");
    REFUSE(stx_reshape(ex, T_(3, 4, 0, 0), SIZE_MAX / 2 + 1, 2, 12, 0), STX_ERR_SHAPE,
           "stx_reshape", "(3,4)", "");
    REFUSE(stx_scale_by(ex, ew, ew), STX_ERR_SHAPE, "stx_scale_by", "(5,4)", "one element");
    REFUSE(stx_slice_channels(ex, ew, 2, 5), STX_ERR_SHAPE, "stx_slice_channels",
           "[2,5) for shape (5,4)", "c1 <= C");
    REFUSE(stx_slice_channels(ex, ew, 2, 2), STX_ERR_SHAPE, "stx_slice_channels", "[2,2)",
           "c0 < c1");
    REFUSE(stx_view_rows(ex, ew, 2, 6), STX_ERR_SHAPE, "stx_view_rows", "[2,6) for shape (5,4)",
           "r1 <= N");
    REFUSE(stx_view_rows(ex, T_(2, 3, 4, 0), 0, 1), STX_ERR_SHAPE, "stx_view_rows", "(2,3,4)",
           "(N,C)");
}

static void errors_of_record(void) {
    stx_tensor *t = T_(3, 0, 0, 0), *results[5];
    results[0] = results[1] = results[2] = results[3] = results[4] = t;
    REFUSE_OF(stx_record(ex, t, &t, 10, ignores_gradient, NULL), STX_ERR_ARG, "stx_record: count",
              "got 10", "0 to 9");
    REFUSE_OF(stx_record(ex, t, NULL, 1, ignores_gradient, NULL), STX_ERR_ARG, "stx_record: in",
              "NULL", "length 1");
    REFUSE_OF(stx_record(ex, t, &t, 1, NULL, NULL), STX_ERR_ARG, "stx_record: back", "NULL",
              "a function");
    REFUSE_OF(stx_record_results(ex, results, 5, results, 1, NULL, NULL), STX_ERR_ARG,
              "stx_record_results: results", "got 5", "1 to 4");
    REFUSE_OF(stx_record_results(ex, results, 2, &t, -1, ignores_gradient, NULL), STX_ERR_ARG,
              "stx_record_results: count", "got -1", "0 to 9");
    REFUSE_OF(stx_record_results(ex, results, 2, NULL, 1, ignores_gradient, NULL), STX_ERR_ARG,
              "stx_record_results: in", "NULL", "length 1");
    REFUSE_OF(stx_record_results(ex, results, 2, &t, 1, NULL, NULL), STX_ERR_ARG,
              "stx_record_results: back", "NULL", "a function");
}

static void errors_of_recompute(void) {
    stx_tensor *t = T_(3, 0, 0, 0), *o[4];
    REFUSE(stx_recompute(ex, gives_null, NULL, &t, 9, NULL, 0), STX_ERR_ARG, "stx_recompute", "9",
           "0 to 8");
    REFUSE(stx_recompute(ex, gives_null, NULL, &t, -1, NULL, 0), STX_ERR_ARG, "stx_recompute", "-1",
           "0 to 8");
    REFUSE(stx_recompute(ex, gives_null, NULL, &t, 1, NULL, 0), STX_ERR_ARG, "stx_recompute",
           "NULL", "");
    REFUSE(stx_recompute(ex, gives_null, NULL, &t, 1, o, 4), STX_ERR_ARG, "stx_recompute", "got 4",
           "more: expected 0 to 3");
    REFUSE(stx_recompute(ex, gives_null, NULL, &t, 1, NULL, 1), STX_ERR_ARG, "stx_recompute",
           "NULL", "out: expected");
}

/* Tests errors of constants, of scalars, and of functions that write parameters. */
static void errors_of_values(void) {
    REFUSE(stx_constant_create(ex, NULL, 3, 0, 0, 0), STX_ERR_ARG, "stx_constant_create", "NULL",
           "elements");
    REFUSE(stx_constant_create(ex, zeros, 0, 3, 0, 0), STX_ERR_ARG, "stx_constant_create", "got 0",
           "d0");
    REFUSE_OF(stx_scalar_set(ex, ew, 1), STX_ERR_ARG, "stx_scalar_set", "another tensor",
              "stx_scalar_create of this context");
    REFUSE_OF(stx_scalar_create(ex, NAN), STX_ERR_ARG, "stx_scalar_set", "nan", "finite");
    REFUSE_OF(stx_param_scale(ex, ew, 2, 6, 1), STX_ERR_ARG, "stx_param_scale", "[2,6)",
              "within [0,5) for a parameter of shape (5,4)");
    REFUSE_OF(stx_param_fill(ex, T_(3, 0, 0, 0), 0, 1, 1), STX_ERR_ARG, "stx_param_fill",
              "shape (3) that is not one", "parameter");
    REFUSE_OF(stx_param_apply(ex, ew, NULL, NULL), STX_ERR_ARG, "stx_param_apply", "NULL",
              "a function");
}

static void errors_of_token_losses(void) {
    stx_token_loss how;
    memset(&how, 0, sizeof how);
    REFUSE(stx_cross_entropy_tokens(ex, T_(3, 5, 0, 0), row_of_ids(high_ids, 3), &how), STX_ERR_ARG,
           "stx_cross_entropy_tokens", "got 7",
           "target at position 1: expected a class from 0 to 4");
    how.ignore = 1;
    how.ignored_id = 7;
    CHECK(stx_cross_entropy_tokens(ex, T_(3, 5, 0, 0), row_of_ids(high_ids, 3), &how) && how.nll
              && how.nll->data[1] == 0,
          "an ignored target outside the classes: %s", stx_error(ex));
    REFUSE(stx_cross_entropy_tokens(ex, T_(3, 5, 0, 0), row_of_ids(negative_ids, 3), &how),
           STX_ERR_ARG, "stx_cross_entropy_tokens", "got -1", "or the ignored id");
    REFUSE(stx_cross_entropy_tokens(ex, T_(4, 5, 0, 0), row_of_ids(good_ids, 3), &how),
           STX_ERR_SHAPE, "stx_cross_entropy_tokens", "(4,5)", "one target per row");
    how.divisor = -1;
    REFUSE(stx_cross_entropy_tokens(ex, T_(3, 5, 0, 0), row_of_ids(good_ids, 3), &how), STX_ERR_ARG,
           "stx_cross_entropy_tokens", "divisor: expected 0 or", "got -1");
    how.divisor = 2;
    how.mean = 1;
    REFUSE(stx_cross_entropy_tokens(ex, T_(3, 5, 0, 0), row_of_ids(good_ids, 3), &how), STX_ERR_ARG,
           "stx_cross_entropy_tokens", "got 2", "0 if mean is set");
    how.divisor = 0;
    how.weights = T_(3, 0, 0, 0);
    REFUSE(stx_cross_entropy_tokens(ex, T_(3, 5, 0, 0), row_of_ids(good_ids, 3), &how),
           STX_ERR_SHAPE, "stx_cross_entropy_tokens", "requires no gradient", "stx_detach");
}

/* Returns a valid adaptive set with 2 clusters (5 + 7 words, 4 channels). */
static stx_adaptive adaptive(void) {
    stx_adaptive a;
    memset(&a, 0, sizeof a);
    a.clusters = 2;
    a.end[0] = 5;
    a.end[1] = 12;
    a.table[0] = T_(5, 4, 0, 0);
    a.table[1] = T_(7, 2, 0, 0);
    a.proj[1] = T_(4, 2, 0, 0);
    a.bias[0] = T_(5, 0, 0, 0);
    a.bias[1] = T_(7, 0, 0, 0);
    a.cluster_w = T_(1, 4, 0, 0);
    a.cluster_b = T_(1, 0, 0, 0);
    return a;
}

static void errors_of_adaptive_losses(void) {
    stx_token_loss how;
    stx_adaptive a = adaptive();
    memset(&how, 0, sizeof how);
    how.mean = 1;
    how.ignore = 1;
    how.ignored_id = 7;
    how.weights = stx_input(ex, zeros, 4, 0, 0, 0);
    REFUSE(stx_adaptive_softmax_tokens(ex, &a, T_(3, 4, 0, 0), row_of_ids(good_ids, 3), &how),
           STX_ERR_SHAPE, "stx_adaptive_softmax_tokens", "4 for 3", "one element per target");
    a.proj_bias[1] = T_(3, 0, 0, 0);
    REFUSE(stx_adaptive_softmax(ex, &a, T_(3, 4, 0, 0), row_of_ids(good_ids, 3)), STX_ERR_SHAPE,
           "stx_adaptive_softmax", "proj_bias[1]: expected shape (2)", "got shape (3)");
    a.proj_bias[1] = NULL;
    a.proj_bias[0] = T_(4, 0, 0, 0);
    REFUSE(stx_adaptive_softmax(ex, &a, T_(3, 4, 0, 0), row_of_ids(good_ids, 3)), STX_ERR_SHAPE,
           "stx_adaptive_softmax", "proj_bias[0]: expected", "and no projection");
}

/* Persistent ids may contain an ignored id as long as every op that uses them ignores
   it. */
static void errors_of_persistent_ids(void) {
    static const int32_t with_ignored[3] = {1, -100, 4};
    stx_ids *t = stx_tokens_create(ex, 1, 3);
    stx_token_loss how;
    memset(&how, 0, sizeof how);
    how.ignore = 1;
    how.ignored_id = -100;
    CHECK(stx_cross_entropy_tokens(ex, T_(3, 5, 0, 0), t, &how) != NULL, "%s", stx_error(ex));
    stx_tokens_set(ex, t, with_ignored);
    CHECK(stx_ok(ex) && stx_cross_entropy_tokens(ex, T_(3, 5, 0, 0), t, &how), "%s", stx_error(ex));
    stx_tokens_set(ex, t, good_ids);
    CHECK(stx_embedding(ex, T_(5, 4, 0, 0), t) != NULL, "%s", stx_error(ex));
    REFUSE_OF(stx_tokens_set(ex, t, with_ignored), STX_ERR_ARG, "stx_tokens_set", "got -100",
              "position 1: expected 0 to 4");
}

/* Returns three cached rows of 4 channels for each of two streams. */
static stx_cached_rows cached_rows(void) {
    stx_cached_rows past;
    past.data = zeros;
    past.rows = 3;
    past.stride = 12;
    return past;
}

/* Tests errors of linear layers with several weights and with cached rows. */
static void errors_of_linear_concat(void) {
    stx_tensor *wt[2], *b[2], *got[STX_HEAD_GROUPS];
    stx_cached_rows past = cached_rows();
    stx_head_groups g;
    memset(&g, 0, sizeof g);
    wt[0] = T_(5, 4, 0, 0);
    wt[1] = T_(3, 4, 0, 0);
    b[0] = T_(5, 0, 0, 0);
    b[1] = T_(3, 0, 0, 0);
    CHECK(stx_linear_concat(ex, T_(2, 3, 4, 0), wt, b, 2)
              && stx_linear_cached(ex, &past, 1, 2, wt, b, 2),
          "%s", stx_error(ex));
    CHECK(!stx_linear_cached(ex, &past, 0, 2, wt, b, 2) && !stx_linear_concat(ex, NULL, wt, b, 2)
              && !stx_linear_heads(ex, NULL, 2, wt[0], wt[1], 1, &g, got) && stx_ok(ex),
          "no rows, no input: %s", stx_error(ex));
    REFUSE(stx_linear_concat(ex, T_(2, 3, 4, 0), wt, b, 0), STX_ERR_ARG, "stx_linear_concat",
           "got 0", "at least one");
    REFUSE(stx_linear_concat(ex, T_(2, 3, 6, 0), wt, b, 2), STX_ERR_SHAPE, "stx_linear_concat",
           "(5,4)", "(O,6)");
    b[1] = NULL;
    REFUSE(stx_linear_concat(ex, T_(2, 3, 4, 0), wt, b, 2), STX_ERR_SHAPE, "stx_linear_concat",
           "bias 1", "for none");
    b[1] = T_(4, 0, 0, 0);
    REFUSE(stx_linear_cached(ex, &past, 1, 2, wt, b, 2), STX_ERR_SHAPE, "stx_linear_cached",
           "(3,4)", "one element per output");
    REFUSE(stx_linear_cached(ex, &past, 5, 2, wt, NULL, 2), STX_ERR_ARG, "stx_linear_cached",
           "parts = 5", "0 to 4");
    wt[0] = T_(4, 0, 0, 0);
    REFUSE(stx_linear_cached(ex, &past, 1, 2, wt, NULL, 2), STX_ERR_SHAPE, "stx_linear_cached",
           "got (4)", "weight 0: expected shape (O,Ci)");
    wt[0] = T_(5, 4, 0, 0);
    REFUSE(stx_linear_cached(ex, &past, 1, 0, wt, NULL, 2), STX_ERR_ARG, "stx_linear_cached",
           "B = 0", "at least one");
    past.stride = 11;
    REFUSE(stx_linear_cached(ex, &past, 1, 2, wt, NULL, 2), STX_ERR_ARG, "stx_linear_cached",
           "got 11", "at least 12 elements");
    past.stride = 12;
}

static void errors_of_linear_heads(void) {
    stx_tensor *wt[2], *got[STX_HEAD_GROUPS];
    stx_cached_rows past = cached_rows();
    stx_head_groups g;
    memset(&g, 0, sizeof g);
    wt[0] = T_(6, 4, 0, 0);
    wt[1] = T_(6, 4, 0, 0);
    g.count = 2;
    g.rows[0] = 3;
    g.rows[1] = 1;
    g.of[1] = 1;
    CHECK(stx_linear_heads(ex, &past, 2, wt[0], wt[1], 3, &g, got) && got[0]->dim[2] == 8
              && got[1]->dim[1] == 1,
          "%s", stx_error(ex));
    REFUSE_OF(stx_linear_heads(ex, &past, 2, wt[0], wt[1], 4, &g, got), STX_ERR_SHAPE,
              "stx_linear_heads", "heads = 4", "divide");
    g.count = 4;
    REFUSE_OF(stx_linear_heads(ex, &past, 2, wt[0], wt[1], 3, &g, got), STX_ERR_SHAPE,
              "stx_linear_heads", "got 4", "1 to 3 groups");
    g.count = 2;
    g.rows[1] = 4;
    REFUSE_OF(stx_linear_heads(ex, &past, 2, wt[0], wt[1], 3, &g, got), STX_ERR_SHAPE,
              "stx_linear_heads", "4 rows", "1 to 3 rows");
    g.rows[1] = 1;
    g.of[1] = 0;
    REFUSE_OF(stx_linear_heads(ex, &past, 2, wt[0], wt[1], 3, &g, got), STX_ERR_SHAPE,
              "stx_linear_heads", "0 heads", "at least one head");
    g.of[1] = 1;
    g.of[2] = 2;
    REFUSE_OF(stx_linear_heads(ex, &past, 2, wt[0], wt[1], 3, &g, got), STX_ERR_ARG,
              "stx_linear_heads", "too large", "a group index below 2");
    g.of[1] = 1;
    REFUSE_OF(stx_linear_heads(ex, &past, 2, wt[0], wt[0], 3, &g, got), STX_ERR_ARG,
              "stx_linear_heads", "overlaps", "separate wk and wv");
    past.stride = 1;
    REFUSE_OF(stx_linear_heads(ex, &past, 2, wt[0], wt[1], 3, &g, got), STX_ERR_ARG,
              "stx_linear_heads", "got 1", "a stride of at least 12");
    past.data = NULL;
    REFUSE_OF(stx_linear_heads(ex, &past, 2, wt[0], wt[1], 3, &g, got), STX_ERR_ARG,
              "stx_linear_heads", "NULL", "expected data for 3 rows");
}

static void errors_of_backward(void) {
    stx_tensor *t[2] = {NULL, NULL};
    REFUSE_OF(stx_backward_many(ex, t, NULL, 2), STX_ERR_ARG, "stx_backward_many",
              "no tensor in y", "STX_TRAIN");
    REFUSE_OF(stx_backward(ex, T_(3, 0, 0, 0)), STX_ERR_SHAPE, "stx_backward", "(3)",
              "one element");
    REFUSE_OF(stx_backward(ex, stx_mean(ex, stx_input(ex, zeros, 3, 0, 0, 0))), STX_ERR_ARG,
              "stx_backward", "not depend on a parameter", "STX_TRAIN");
    stx_begin(ex, STX_EVAL);
    REFUSE_OF(stx_backward(ex, stx_mean(ex, stx_scale(ex, T_(3, 0, 0, 0), 2))), STX_ERR_ARG,
              "stx_backward", "nothing was recorded", "STX_TRAIN");
    stx_begin(ex, STX_TRAIN);
}

/* Calls attention with q (2,3,8) and k (2,5,8), unless `in` contains other tensors. v
   defaults to k. */
static stx_tensor *attend(const stx_attention_in *in, const stx_attention_desc *d) {
    stx_attention_in a = *in;
    if (!a.q) a.q = T_(2, 3, 8, 0);
    if (!a.v) a.v = a.k ? a.k : T_(2, 5, 8, 0);
    if (!a.k) a.k = T_(2, 5, 8, 0);
    return stx_attention(ex, &a, d);
}

#define ATTEND(desc, ...) attend(&(stx_attention_in){__VA_ARGS__}, desc)

static void errors_of_attention_inputs(void) {
    stx_attention_desc d, e;
    memset(&d, 0, sizeof d);
    d.heads = 2;
    CHECK(ATTEND(&d, .q = NULL) != NULL, "%s", stx_error(ex));
    REFUSE(ATTEND(&d, .q = T_(3, 8, 0, 0)), STX_ERR_SHAPE, "stx_attention", "(3,8)", "(B,T,C)");
    REFUSE(ATTEND(&d, .k = T_(1, 5, 8, 0)), STX_ERR_SHAPE, "stx_attention", "(1,5,8)", "(B,S,C)");
    REFUSE(ATTEND(&d, .v = T_(2, 4, 8, 0)), STX_ERR_SHAPE, "stx_attention",
           "v: expected the shape of k, (2,5,8)", "got (2,4,8)");
    REFUSE(ATTEND(&d, .k = T_(2, 5, 4, 0)), STX_ERR_SHAPE, "stx_attention", "(2,5,4)", "(B,S,C)");
    e = d;
    e.heads = 512;
    REFUSE(ATTEND(&e, .q = T_(1, 1, 512, 0), .k = T_(1, 1, 512, 0)), STX_ERR_SHAPE, "stx_attention",
           "1 to 256", "got 512");
    REFUSE(ATTEND(&d, .k = T_(2, 2, 8, 0)), STX_ERR_SHAPE, "stx_attention", "2 keys", "3 queries");
    REFUSE(ATTEND(&d, .span_fraction = T_(2, 0, 0, 0)), STX_ERR_ARG, "stx_attention", "ramp",
           "max_span > 0");
    e = d;
    e.max_span = 5;
    e.ramp = 2;
    REFUSE(ATTEND(&e, .span_fraction = T_(3, 0, 0, 0)), STX_ERR_ARG, "stx_attention",
           "span_fraction: expected (2)", "got (3)");
    e = d;
    e.not_causal = 1;
    REFUSE(ATTEND(&e, .pe = T_(5, 4, 0, 0)), STX_ERR_ARG, "stx_attention", "not_causal", "pe");
    REFUSE(ATTEND(&d, .pe = T_(5, 3, 0, 0)), STX_ERR_SHAPE, "stx_attention", "(5,3)", "(P,4)");
    REFUSE(ATTEND(&d, .pe = T_(5, 0, 0, 0)), STX_ERR_SHAPE, "stx_attention", "(5)", "(P,8)");
    REFUSE(ATTEND(&d, .content_bias = T_(7, 0, 0, 0)), STX_ERR_SHAPE, "stx_attention",
           "content_bias: expected (8)", "got (7)");
    REFUSE(ATTEND(&d, .position_bias = T_(8, 0, 0, 0)), STX_ERR_SHAPE, "stx_attention",
           "position_bias requires pe", "pe = NULL");
    REFUSE(ATTEND(&d, .persistent_k = T_(2, 3, 4, 0)), STX_ERR_SHAPE, "stx_attention", "persistent",
           "both or neither");
    REFUSE(ATTEND(&d, .persistent_k = T_(2, 3, 4, 0), .persistent_v = T_(2, 2, 4, 0)),
           STX_ERR_SHAPE, "stx_attention", "persistent", "(H,N,D)");
    REFUSE(ATTEND(&d, .persistent_k = T_(1, 3, 4, 0), .persistent_v = T_(1, 3, 4, 0)),
           STX_ERR_SHAPE, "stx_attention", "persistent", "(2,N,4)");
}

static void errors_of_attention_desc(void) {
    static const struct {
        stx_attention_desc d;
        int code;
        const char *got, *expected;
    } cases[] = {
        {{.heads = 3}, STX_ERR_SHAPE, "heads: expected 1 to 256", "8 channels, got 3"},
        {{.heads = 0}, STX_ERR_SHAPE, "divide", "got 0"},
        {{.heads = 2, .not_causal = 1, .span = 4}, STX_ERR_ARG, "not_causal", "span"},
        {{.heads = 2, .not_causal = 1, .first_key = -1}, STX_ERR_ARG, "not_causal",
         "negative first_key"},
        {{.heads = 2, .dropout = 1}, STX_ERR_ARG, "dropout: expected", "got 1"},
        {{.heads = 2, .delta_min = 2}, STX_ERR_ARG, "delta_min: expected 0 or 1", "got 2"},
        {{.heads = 2, .eps = -1}, STX_ERR_ARG, "eps: expected 0 or more", "got -1"},
        {{.heads = 2, .eps = 1e-8, .no_renorm = 1}, STX_ERR_ARG, "eps with no_renorm: expected 0",
         "got 1e-08"},
        {{.heads = 2, .eps = NAN}, STX_ERR_ARG, "eps: expected 0 or more", "nan"}};

    size_t i;
    for (i = 0; i < sizeof cases / sizeof *cases; i++)
        check_refusal(ATTEND(&cases[i].d, .q = NULL), cases[i].got, cases[i].code, "stx_attention",
                     cases[i].got, cases[i].expected);
}

static void errors_of_attention_padding(void) {
    static const struct {
        size_t B, S;
        const char *shape;
    } cases[] = {{5, 2, "(5,2)"}, {1, 5, "(1,5)"}, {2, 3, "(2,3)"}};

    stx_attention_desc d;
    size_t i;
    memset(&d, 0, sizeof d);
    d.heads = 2;
    for (i = 0; i < 3; i++) {
        stx_ids *pad = stx_tokens(ex, pad_flags, cases[i].B, cases[i].S);
        REFUSE(ATTEND(&d, .pad = pad), STX_ERR_SHAPE, "stx_attention: pad", cases[i].shape,
               "(B,S) = (2,5)");
        pad = stx_tokens(ex, pad_flags, 2, 5);
        CHECK(ATTEND(&d, .pad = pad) != NULL, "%s", stx_error(ex));
    }
}

/* Tests errors of attention with qkv and cached rows. */
static void errors_of_attention_cache(void) {
    enum { PAD, WITH_Q, WITH_KV, QKV_SHAPE, CACHE_SHAPE, NOT_CAUSAL, NO_QKV, NO_SPAN, HEAD, CASES };

    static const struct {
        int code;
        const char *got, *expected;
    } cases[CASES] = {{STX_ERR_SHAPE, "got (1,8)", "(B,S) = (2,8)"},
                      {STX_ERR_ARG, "q, k or v with qkv", "qkv alone"},
                      {STX_ERR_ARG, "kv with qkv", "qkv alone"},
                      {STX_ERR_SHAPE, "(2,3,23)", "(B,T,3C)"},
                      {STX_ERR_SHAPE, "cached[0]: expected (2,rows,16)", "got (2,5,8)"},
                      {STX_ERR_ARG, "cached: expected causal", "not_causal = 1"},
                      {STX_ERR_ARG, "cached: expected qkv", ""},
                      {STX_ERR_ARG, "2 groups", "learned span"},
                      {STX_ERR_ARG, "head 1", "below 2, got 2"}};

    int i;
    for (i = 0; i < CASES; i++) {
        stx_attention_in in;
        stx_attention_desc d;
        stx_head_groups g;
        memset(&in, 0, sizeof in);
        memset(&d, 0, sizeof d);
        memset(&g, 0, sizeof g);
        d.heads = 2;
        in.qkv = T_(2, 3, 24, 0);
        in.cached[0] = T_(2, 5, 16, 0);
        g.count = 2;
        g.of[1] = 1;
        if (i == PAD) in.pad = stx_tokens(ex, pad_flags, 1, 8);
        if (i == WITH_Q) in.q = T_(2, 3, 8, 0);
        if (i == WITH_KV) in.kv = T_(2, 3, 16, 0);
        if (i == QKV_SHAPE) in.qkv = T_(2, 3, 23, 0);
        if (i == CACHE_SHAPE) in.cached[0] = T_(2, 5, 8, 0);
        if (i == NOT_CAUSAL) d.not_causal = 1;
        if (i == NO_QKV) {
            in.qkv = NULL;
            in.q = T_(2, 3, 8, 0);
            in.kv = T_(2, 5, 16, 0);
        }
        if (i == NO_SPAN || i == HEAD) {
            in.groups = &g;
            in.cached[0] = in.cached[1] = T_(2, 5, 8, 0);
        }
        if (i == HEAD) {
            g.of[1] = 2;
            in.span_fraction = T_(2, 0, 0, 0);
            d.max_span = 5;
            d.ramp = 2;
        }
        check_refusal(stx_attention(ex, &in, &d), cases[i].got, cases[i].code, "stx_attention",
                     cases[i].got, cases[i].expected);
    }
}

/* Tests errors of attention with queries from qkv, and with keys and values from kv or
   from a range of its rows. Neither tensor may require a gradient, and the range must
   lie within kv. */
static void errors_of_attention_ranges(void) {
    enum { QKV_GRADIENT, FIRST_ROW, ROWS, KV_GRADIENT, NO_ROWS, NO_KV, CASES };

    static const char *const says[CASES][2] = {
        {"kv with qkv", "requires no gradient"},
        {"a range within the 5 rows", "4 rows starting at row 2"},
        {"a range within the 5 rows", "6 rows starting at row 1"},
        {"kv_rows: expected a kv that requires no gradient", "stx_detach"},
        {"kv_first, kv_rows: expected both 0", "got 1 and 0"},
        {"kv_first, kv_rows: expected both 0", "got 1 and 4 without kv"}};
    int i;
    for (i = 0; i < CASES; i++) {
        stx_attention_in in;
        stx_attention_desc d;
        memset(&in, 0, sizeof in);
        memset(&d, 0, sizeof d);
        d.heads = 2;
        d.not_causal = 1;
        in.qkv = stx_detach(ex, T_(2, 3, 24, 0));
        in.kv = stx_detach(ex, T_(2, 5, 16, 0));
        CHECK(stx_attention(ex, &in, &d) != NULL, "%s", stx_error(ex));
        in.kv_first = 1;
        in.kv_rows = 4;
        CHECK(stx_attention(ex, &in, &d) != NULL, "%s", stx_error(ex));
        if (i == QKV_GRADIENT || i == NO_KV) in.qkv = T_(2, 3, 24, 0);
        if (i == FIRST_ROW) in.kv_first = 2;
        if (i == ROWS) in.kv_rows = 6;
        if (i == KV_GRADIENT) in.kv = T_(2, 5, 16, 0);
        if (i == NO_ROWS) in.kv_rows = 0;
        if (i == NO_KV) in.kv = NULL;
        REFUSE(stx_attention(ex, &in, &d), STX_ERR_ARG, "stx_attention", says[i][0], says[i][1]);
    }
}

/* Ways to break an adaptive set. Those that concern the cluster logits apply only to an
   output set; a bad scale applies only to an input set. */
enum {
    NO_CLUSTERS,
    MANY_CLUSTERS,
    TABLE_TOO_SHORT,
    FALLING_ENDS,
    WORD_IN_NO_CLUSTER,
    NO_CLUSTER_LOGITS,
    NO_TABLE,
    CLUSTER_LOGITS_SHAPE,
    PROJECTION_SHAPE,
    DROPOUT_1,
    DROPOUT_NAN,
    INFINITE_SCALE,
    BROKEN
};

static stx_adaptive broken_set(int how) {
    stx_adaptive a = adaptive();
    switch (how) {
    case NO_CLUSTERS: a.clusters = 0; break;
    case MANY_CLUSTERS: a.clusters = STX_MAX_CLUSTERS + 1; break;
    case TABLE_TOO_SHORT: a.end[1] = 13; break;
    case FALLING_ENDS:
        a.end[0] = 12;
        a.end[1] = 5;
        break;
    case WORD_IN_NO_CLUSTER: a.end[0] = 4; break;
    case NO_CLUSTER_LOGITS: a.cluster_w = a.cluster_b = NULL; break;
    case NO_TABLE: a.table[1] = NULL; break;
    case CLUSTER_LOGITS_SHAPE:
        a.cluster_w = T_(2, 4, 0, 0);
        a.cluster_b = T_(2, 0, 0, 0);
        break;
    case PROJECTION_SHAPE: a.proj[1] = T_(3, 2, 0, 0); break;
    case DROPOUT_1: a.dropout = 1; break;
    case DROPOUT_NAN: a.dropout = NAN; break;
    case INFINITE_SCALE: a.scale = HUGE_VAL; break;
    }
    return a;
}

static int broken;

/* Each op that uses a broken set must report an error and must not read outside a
   table. */
static int broken_adaptive(void) {
    static const int32_t id[3] = {0, 4, 11};
    int op, logits = broken == NO_CLUSTER_LOGITS || broken == CLUSTER_LOGITS_SHAPE;
    ex = plain(1, 1);
    stx_begin(ex, STX_TRAIN);
    for (op = 0; op < 3; op++) {
        stx_adaptive a = broken_set(broken);
        const void *y = NULL;
        if (op == 0 ? logits : broken == INFINITE_SCALE) continue;
        if (op == 0) y = stx_adaptive_input(ex, &a, row_of_ids(id, 3));
        if (op == 1) y = stx_adaptive_softmax(ex, &a, T_(1, 3, 4, 0), row_of_ids(id, 3));
        if (op == 2) y = stx_adaptive_log_probs(ex, &a, T_(1, 3, 4, 0));
        if (y || stx_ok(ex) || !*stx_error(ex)) return 0;
        stx_clear_error(ex);
    }
    stx_destroy(ex);
    return 1;
}

static void errors_of_adaptive(void) {
    static const int32_t high = 12, negative = -1;
    stx_adaptive a = adaptive();
    REFUSE(stx_adaptive_softmax(ex, &a, T_(2, 4, 0, 0), row_of_ids(good_ids, 3)), STX_ERR_SHAPE,
           "stx_adaptive_softmax", "2 rows", "3 targets");
    REFUSE(stx_adaptive_softmax(ex, &a, T_(1, 4, 0, 0), row_of_ids(&high, 1)), STX_ERR_ARG,
           "stx_adaptive_softmax", "vocabulary size 12", "got 12");
    REFUSE(stx_adaptive_input(ex, &a, row_of_ids(&negative, 1)), STX_ERR_ARG, "stx_adaptive_input",
           "vocabulary size 12", "got -1");
    for (broken = 0; broken < BROKEN; broken++)
        CHECK(survives(broken_adaptive), "broken set %d of stx_adaptive: no error, or a crash",
              broken);
}

/* A parameter created after the optimiser must either cause an error or be updated. */
static int late_parameter(void) {
    int kind;
    for (kind = STX_SGD; kind <= STX_LAMB; kind++) {
        stx_ctx *x = plain(1, 1);
        stx_params *p = stx_params_create(x);
        stx_optim_desc d;
        stx_optim *o;
        stx_tensor *w;
        memset(&d, 0, sizeof d);
        d.kind = kind;
        d.momentum = 0.9;
        stx_param(p, STX_CONSTANT, 1, "a", 3, 0, 0, 0);
        o = stx_optim_create(p, &d);
        stx_param(p, STX_CONSTANT, 1, "b", 3, 0, 0, 0);
        w = stx_param(p, STX_CONSTANT, 1, "c", 3, 0, 0, 0);
        w->grad[0] = 1;
        if (!stx_optim_step(o, 0.1) && stx_ok(x)) return 0;
        if (stx_ok(x) && w->data[0] == 1) return 0;
        stx_destroy(x);
    }
    return 1;
}

static void errors_of_optimisers(void) {
    static const struct {
        stx_optim_desc d;
        const char *got, *expected;
    } cases[] = {{{.kind = STX_SGD, .eps_hat = 1}, "eps_hat", "STX_ADAMW"},
                 {{.kind = STX_SGD, .trust_max = 1}, "trust_max", "STX_LAMB"},
                 {{.kind = STX_SGD, .clip_value = -1}, "clip_value", "0 or more"},
                 {{.kind = 9}, "9", "STX_ADAM"},
                 {{.kind = -1}, "-1", "STX_ADAM"},
                 {{.kind = STX_SGD, .momentum = -1}, "momentum", "0 or more"},
                 {{.kind = STX_ADAM, .beta1 = 1}, "beta", "[0,1)"},
                 {{.kind = STX_ADAM, .beta2 = -0.5}, "beta", "[0,1)"},
                 {{.kind = STX_ADAM, .eps = -1}, "eps", "0 or more"},
                 {{.kind = STX_ADAM, .clip = -1}, "clip", "0 or more"},
                 {{.kind = STX_ADAM, .clip = NAN}, "clip", "0 or more"},
                 {{.kind = STX_ADAM, .weight_decay = -1}, "weight_decay", "0 or more"},
                 {{.kind = STX_ADAGRAD, .weight_decay = 0.1}, "weight decay", "STX_ADAMW"}};

    size_t i;
    for (i = 0; i < sizeof cases / sizeof *cases; i++)
        check_refusal(stx_optim_create(ep, &cases[i].d), cases[i].got, STX_ERR_ARG,
                     "stx_optim_create", cases[i].got, cases[i].expected);
    CHECK(survives(late_parameter),
          "a parameter made after stx_optim_create: neither updated nor an error");
}

/* After an error, every op must return NULL. Shapes: (2,4) for t, (2,3,8) for t3, (1)
   for `one`. */
static void ops_in_error(stx_tensor *t, stx_tensor *t3, stx_tensor *one, stx_ids *ids,
                         stx_adaptive *a) {
    stx_attention_desc d;
    stx_real out[8];
    memset(&d, 0, sizeof d);
    d.heads = 2;
    CHECK(!stx_input(ex, zeros, 3, 0, 0, 0) && !stx_variable(ex, zeros, 3, 0, 0, 0)
              && !stx_tokens(ex, good_ids, 1, 2),
          "leaves in error");
    CHECK(!stx_embedding(ex, ew, ids) && !stx_linear(ex, t, ew, NULL, 0)
              && !stx_matmul(ex, t, t, 0, 1) && !stx_layernorm(ex, t, t, t, 0),
          "embedding, linear, matmul, layernorm in error");
    CHECK(!stx_add(ex, t, t) && !stx_mul(ex, t, t) && !stx_scale(ex, t, 2) && !stx_relu(ex, t)
              && !stx_gelu(ex, t) && !stx_tanh(ex, t) && !stx_sigmoid(ex, t),
          "elementwise ops in error");
    CHECK(!stx_constant_create(ex, zeros, 3, 0, 0, 0) && !stx_scalar_create(ex, 1)
              && !stx_scale_by(ex, t, one) && !stx_log_softmax(ex, t) && !stx_sum(ex, t)
              && !stx_slice_channels(ex, t, 0, 1) && !stx_view_rows(ex, ew, 0, 1)
              && !stx_get_grad(ex, ew, out),
          "constants, views and gradients in error");
    CHECK(!stx_cross_entropy_tokens(ex, t, ids, NULL)
              && !stx_adaptive_softmax_tokens(ex, a, t, ids, NULL),
          "token losses in error");
    stx_backward_many(ex, &one, NULL, 1);
    CHECK(!stx_softmax(ex, t) && !stx_dropout(ex, t, 0.5) && !stx_dropout(ex, t, 0)
              && !stx_mean(ex, t) && !stx_cross_entropy(ex, t, ids, 0) && !stx_mse(ex, t, t),
          "softmax, dropout and losses in error");
    CHECK(!stx_concat(ex, t3, t3) && !stx_slice(ex, t3, 0, 1) && !stx_gather(ex, t, good_ids, 1)
              && !stx_concat_channels(ex, t, t) && !stx_reshape(ex, t, 8, 0, 0, 0)
              && !stx_detach(ex, t),
          "shape ops in error");
    CHECK(!stx_recompute(ex, gives_null, NULL, &t, 1, NULL, 0) && !ATTEND(&d, .q = t3, .k = t3),
          "recompute and attention in error");
    CHECK(!stx_adaptive_input(ex, a, ids) && !stx_adaptive_softmax(ex, a, t, ids)
              && !stx_adaptive_log_probs(ex, a, t),
          "adaptive ops in error");
}

/* Until an error is cleared, all functions must fail and have no effect. */
static void nothing_in_error(void) {
    stx_tensor *t = T_(2, 4, 0, 0), *t3 = T_(2, 3, 8, 0), *one = T_(1, 0, 0, 0);
    stx_ids *ids = row_of_ids(good_ids, 2);
    stx_adaptive a = adaptive();
    stx_optim *o = stx_optim_create(ep, NULL);
    size_t used = stx_bytes(ex), peak = stx_peak_bytes(ex), count = ep->count;
    stx_real before[20], out[8];
    uint64_t steps = o->step;
    long calls = ecount.calls;
    int i;
    memcpy(before, ew->data, sizeof before);
    out[0] = 42;
    ew->grad[0] = 3;
    stx_fail(ex, STX_ERR_FORMAT, "test: %d", 42);
    CHECK(stx_error_code(ex) == STX_ERR_FORMAT && !strcmp(stx_error(ex), "test: 42"), "stx_fail");
    ops_in_error(t, t3, one, ids, &a);
    CHECK(!stx_params_create(ex) && !stx_param(ep, STX_ZEROS, 0, "late", 3, 0, 0, 0)
              && ep->count == count,
          "parameters in error");
    CHECK(!stx_persist(ex, 10) && !stx_step_host_bytes(ex, 10) && !stx_block(ex, 10),
          "memory in error");
    CHECK(!stx_optim_create(ep, NULL) && !stx_optim_step(o, 0.1) && o->step == steps
              && !memcmp(before, ew->data, sizeof before) && ew->grad[0] == 3,
          "optimiser in error");
    stx_backward(ex, one);
    stx_backward_from(ex, one, zeros);
    stx_params_zero_grad(ep);
    stx_get(ex, t, out);
    CHECK(!one->grad && ew->grad[0] == 3 && out[0] == 42 && isnan(stx_item(ex, t)),
          "backward, zero_grad, get, item in error");
    stx_begin(ex, STX_TRAIN);
    CHECK(!strcmp(stx_error(ex), "test: 42") && stx_bytes(ex) == used && stx_peak_bytes(ex) == peak
              && ecount.calls == calls,
          "a call in error has an effect");
    stx_clear_error(ex);
    CHECK(stx_ok(ex) && stx_error_code(ex) == STX_OK && T_(3, 0, 0, 0), "after stx_clear_error");
    for (i = 0; i < 20; i++)
        CHECK(ew->grad[i] == (i ? 0 : 3), "a call in error changes the gradient");
}

/* A long error text must be truncated. */
static void long_error(void) {
    char longer[2000];
    memset(longer, 'n', sizeof longer);
    longer[1999] = 0;
    REFUSE(stx_param(ep, STX_NORMAL, 1, longer, 0, 0, 0, 0), STX_ERR_ARG, "stx_param", "nnn", "");
}

static void errors(void) {
    memset(&ecount, 0, sizeof ecount);
    ex = counted(&ecount, 0, 0, 1, 1);
    ep = stx_params_create(ex);
    stx_begin(ex, STX_TRAIN);
    ew = stx_param(ep, STX_NORMAL, 1, "weights", 5, 4, 0, 0);
    CHECK(ew && ew->is_param && ew->needs_grad && ew->grad && ew->size == 20 && ew->ndim == 2,
          "a parameter");
    CHECK(ep->count == 1 && !strcmp(ep->name[0], "weights") && stx_params_find(ep, "weights") == ew
              && !stx_params_find(ep, "w") && stx_params_size(ep) == 20,
          "the list of parameters");
    errors_of_leaves();
    errors_of_lookups();
    errors_of_linear();
    errors_elementwise();
    errors_of_losses();
    errors_of_shapes();
    errors_of_record();
    errors_of_recompute();
    errors_of_values();
    errors_of_token_losses();
    errors_of_adaptive_losses();
    errors_of_persistent_ids();
    errors_of_linear_concat();
    errors_of_linear_heads();
    errors_of_backward();
    errors_of_attention_inputs();
    errors_of_attention_desc();
    errors_of_attention_padding();
    errors_of_attention_cache();
    errors_of_attention_ranges();
    errors_of_adaptive();
    errors_of_optimisers();
    nothing_in_error();
    long_error();
    stx_destroy(ex);
    CHECK(ecount.live == 0, "%ld blocks leak", ecount.live);
}

static int find_null(void) {
    stx_ctx *x = plain(1, 1);
    stx_params *p = stx_params_create(x);
    const char *volatile none = NULL;
    stx_param(p, STX_ZEROS, 0, "a", 1, 0, 0, 0);
    return stx_params_find(p, none) == NULL;
}

static int recompute_null(void) {
    stx_ctx *x = plain(1, 1);
    stx_begin(x, STX_TRAIN);
    return !stx_recompute(x, NULL, NULL, NULL, 1, NULL, 0)
           && !stx_recompute(x, NULL, NULL, NULL, 0, NULL, 1);
}

/* Calls ops that must return NULL because the tensor o or the context c is NULL. */
static void null_ops(stx_ctx *c, stx_tensor *o, stx_tensor *t, stx_ids *ids, stx_real *r) {
    static const int32_t id[2] = {0, 1};
    stx_attention_in in;
    stx_attention_desc d;
    stx_adaptive a;
    memset(&in, 0, sizeof in);
    memset(&d, 0, sizeof d);
    memset(&a, 0, sizeof a);
    d.heads = 1;
    CHECK(!stx_embedding(c, o, ids) && !stx_embedding(c, t, NULL) && !stx_linear(c, o, t, NULL, 0)
              && !stx_linear(c, t, NULL, NULL, 0),
          "embedding, linear of NULL");
    CHECK(!stx_matmul(c, o, t, 0, 0) && !stx_matmul(c, t, NULL, 0, 0)
              && !stx_layernorm(c, o, t, t, 0) && !stx_layernorm(c, t, NULL, t, 0)
              && !stx_layernorm(c, t, t, NULL, 0),
          "matmul, layernorm of NULL");
    CHECK(!stx_add_means(c, o, &o, 1, 1) && !stx_residual_norm_bias(c, o, t, t, 0, t, t, 0),
          "add_means, residual_norm_bias of NULL");
    CHECK(!stx_add(c, o, t) && !stx_add(c, t, NULL) && !stx_mul(c, o, t) && !stx_mul(c, t, NULL)
              && !stx_scale(c, o, 2),
          "add, mul, scale of NULL");
    CHECK(!stx_relu(c, o) && !stx_gelu(c, o) && !stx_tanh(c, o) && !stx_sigmoid(c, o)
              && !stx_softmax(c, o) && !stx_dropout(c, o, 0.5) && !stx_mean(c, o),
          "ops of one NULL");
    CHECK(!stx_cross_entropy(c, o, ids, 0) && !stx_cross_entropy(c, t, NULL, 0) && !stx_mse(c, o, t)
              && !stx_mse(c, t, NULL),
          "losses of NULL");
    CHECK(!stx_concat(c, o, t) && !stx_concat(c, t, NULL) && !stx_slice(c, o, 0, 1)
              && !stx_gather(c, o, id, 1) && !stx_concat_channels(c, o, t)
              && !stx_concat_channels(c, t, NULL),
          "concat, slice, gather of NULL");
    CHECK(!stx_reshape(c, o, 4, 0, 0, 0) && !stx_detach(c, o) && !stx_attention(c, &in, &d)
              && !stx_attention(c, NULL, &d) && !stx_attention(c, &in, NULL),
          "reshape, detach, attention of NULL");
    CHECK(!stx_recompute(c, gives_null, NULL, &o, c ? 1 : 0, NULL, 0), "recompute of NULL");
    CHECK(!stx_adaptive_input(c, NULL, ids) && !stx_adaptive_input(c, &a, NULL)
              && !stx_adaptive_softmax(c, &a, o, ids) && !stx_adaptive_softmax(c, &a, t, NULL)
              && !stx_adaptive_softmax(c, NULL, t, ids) && !stx_adaptive_log_probs(c, &a, NULL)
              && !stx_adaptive_log_probs(c, NULL, t),
          "adaptive ops of NULL");
    stx_backward(c, o);
    stx_backward_from(c, o, r);
    stx_get(c, o, r);
    stx_set(c, o, r);
    CHECK(isnan(stx_item(c, o)), "item of NULL");
    stx_block_free(c, NULL);
}

/* Calls other functions with a NULL context, parameter list or optimiser. They must not
   crash. */
static void null_contexts(stx_real *r) {
    static const int32_t id[2] = {0, 1};
    CHECK(!stx_ok(NULL) && stx_error_code(NULL) == STX_ERR_MEMORY && strlen(stx_error(NULL)) > 5
              && !stx_ctx_desc(NULL),
          "the error of no context");
    stx_fail(NULL, STX_ERR_ARG, "%s", "x");
    stx_clear_error(NULL);
    stx_begin(NULL, STX_TRAIN);
    stx_destroy(NULL);
    stx_set_step_index(NULL, 3);
    CHECK(!stx_training(NULL) && !stx_step_index(NULL) && !stx_bytes(NULL) && !stx_peak_bytes(NULL)
              && stx_threads(NULL) == 1,
          "the state of no context");
    CHECK(!stx_persist(NULL, 8) && !stx_step_host_bytes(NULL, 8) && !stx_block(NULL, 8)
              && !stx_input(NULL, r, 2, 0, 0, 0) && !stx_tokens(NULL, id, 1, 2),
          "memory of no context");
    CHECK(!stx_params_create(NULL) && !stx_param(NULL, 0, 0, "a", 1, 0, 0, 0)
              && !stx_params_find(NULL, "a") && !stx_params_size(NULL)
              && !stx_param_elementwise(NULL),
          "no list");
    stx_params_zero_grad(NULL);
    CHECK(!stx_optim_create(NULL, NULL) && !stx_optim_step(NULL, 1), "no optimiser");
}

/* NULL tensors must result in NULL without an error, so that calls can be chained. */
static void nulls(void) {
    static const int32_t id[2] = {0, 1};
    stx_ctx *x = plain(1, 1);
    stx_real r[4] = {1, 2, 3, 4};
    stx_tensor *t;
    stx_ids *ids;
    stx_begin(x, STX_TRAIN);
    t = stx_variable(x, r, 2, 2, 0, 0);
    ids = stx_tokens(x, id, 1, 2);
    null_ops(x, NULL, t, ids, r);
    null_ops(NULL, t, t, ids, r);
    CHECK(stx_ok(x), "NULL is an error: %s", stx_error(x));
    null_contexts(r);
    CHECK(survives(find_null), "stx_params_find(p, NULL) crashes");
    CHECK(survives(recompute_null), "stx_recompute without a function or inputs crashes");
    stx_destroy(x);
}


/* >>memory */

static long fail_at_, fail_chunk;

/* After a failed allocation and stx_clear_error, the context must either work or report
   an error. */
static int continue_after_failure(void) {
    counter c;
    model m;
    stx_ctx *x;
    int step;
    memset(&c, 0, sizeof c);
    c.fail_at = fail_at_;
    x = counted(&c, (size_t)fail_chunk, 0, 1, 1);
    if (!x) return 1;
    stx_clear_error(x);
    if (model_make(x, &m, 2, 7, 8, 2, STX_ADAM)) {
        for (step = 0; step < 2; step++) {
            model_step(x, &m, step, NULL, 1);
            stx_clear_error(x);
        }
        if (isnan(model_step(x, &m, 2, NULL, 1)) && stx_ok(x)) return 0;
    }
    stx_destroy(x);
    return c.live == 0;
}

/* Builds and trains a model. Allocation n fails or, if `from` is set, all allocations
   from n on fail. Returns 1 if the run makes fewer than n allocations. */
static int failing_run(size_t chunk, long n, int from) {
    counter c;
    model m;
    stx_ctx *x;
    double loss = NAN;
    int done;
    memset(&c, 0, sizeof c);
    if (from)
        c.fail_from = n;
    else
        c.fail_at = n;
    x = counted(&c, chunk, 0, 1, 1);
    if (!x) {
        CHECK(n == 1, "no context after failure of allocation %ld", n);
        CHECK(c.live == 0, "leak");
        return 0;
    }
    if (model_make(x, &m, 2, 7, 8, 2, STX_ADAM)) loss = model_step(x, &m, 0, NULL, 1);
    done = c.calls < n;
    if (done)
        CHECK(stx_ok(x) && loss > 0, "a run without failures: %s", stx_error(x));
    else
        CHECK(!stx_ok(x) && stx_error_code(x) == STX_ERR_MEMORY && strlen(stx_error(x)) > 20
                  && isnan(loss),
              "allocation %ld fails: %d %s", n, stx_error_code(x), stx_error(x));
    stx_destroy(x);
    CHECK(c.live == 0, "allocation %ld fails: %ld blocks leak", n, c.live);
    if (!done && !from) {
        fail_at_ = n;
        fail_chunk = (long)chunk;
        CHECK(survives(continue_after_failure),
              "allocation %ld fails, then stx_clear_error: a crash or a leak", n);
    }
    return done;
}

/* Every failing allocation must result in an error, without a leak. */
static void allocation_failures(void) {
    static const size_t chunk[] = {0, 1, 3000};
    int k, from;
    for (k = 0; k < 3; k++)
        for (from = 0; from < 2; from++) {
            long n;
            int done = 0;
            for (n = 1; n < 2000 && !done; n++) done = failing_run(chunk[k], n, from);
            CHECK(done, "there is no end of allocations");
            CHECK(k == 0 || n > 8, "only %ld allocations to fail", n);
        }
}

/* If an allocation fails, stx_attention returns NULL and does not set args_out. */
static void attention_failures(void) {
    static const stx_real data[4 * 8] = {1, 2, 3};
    long n, failed = 0;
    int done = 0;
    for (n = 1; n < 100 && !done; n++) {
        stx_attention_in in = {0};
        stx_attention_desc d = {.heads = 2};
        stx_attention_args *args = NULL;
        counter c = {.fail_at = n};
        stx_ctx *x = counted(&c, 1, 0, 1, 1);
        stx_tensor *y;
        if (!x) continue;
        stx_begin(x, STX_TRAIN);
        in.q = in.k = in.v = stx_variable(x, data, 1, 4, 8, 0);
        in.args_out = &args;
        failed += stx_ok(x);
        y = stx_attention(x, &in, &d);
        done = c.calls < n;
        CHECK(done == stx_ok(x) && done == (y != NULL) && done == (args != NULL),
              "allocation %ld: %s, y %d, args_out %d", n, stx_error(x), y != NULL, args != NULL);
        stx_destroy(x);
        CHECK(c.live == 0, "allocation %ld: a leak", n);
    }
    CHECK(done && failed >= 5, "%ld failures in stx_attention", failed - 1);
}

/* Zero keys farther away than the table of positions reaches must be dropped, and this
   must not change a bit of the result. */
static void attention_zero_keys(void) {
    static const stx_real data[4 * 8] = {1, 2, 3, -1, 0.5, 0.25, 2, -2, 1};
    const ptrdiff_t first[3] = {-4, -5, -100};
    stx_real y[3][4 * 8];
    int k;
    for (k = 0; k < 3; k++) {
        stx_attention_in in = {0};
        stx_attention_desc d = {.heads = 2, .first_key = first[k]};
        stx_attention_args *args = NULL;
        stx_desc c = {.threads = 1};
        stx_ctx *x = stx_create(&c);
        stx_tensor *t;
        stx_begin(x, STX_EVAL);
        in.q = in.k = in.v = stx_input(x, data, 1, 4, 8, 0);
        in.pe = stx_input(x, data, 5, 4, 0, 0);     /* distances 4 to 0 */
        in.args_out = &args;
        t = stx_attention(x, &in, &d);
        CHECK(t && args && args->first_key == -4, "first_key %ld became %ld, expected -4: %s",
              (long)first[k], args ? (long)args->first_key : 0, stx_error(x));
        if (t) stx_get(x, t, y[k]);
        stx_destroy(x);
    }
    CHECK(!memcmp(y[0], y[1], sizeof y[0]) && !memcmp(y[0], y[2], sizeof y[0]),
          "zero keys out of reach change the result");
}

/* No run may exceed max_bytes. If a run fails, the error must name max_bytes.
   Increments *works or *fails. */
static void limited_run(size_t limit, int *works, int *fails) {
    counter c;
    model m;
    stx_ctx *x;
    double loss = NAN;
    char text[40];
    memset(&c, 0, sizeof c);
    x = counted(&c, 1, limit, 1, 1);
    if (model_make(x, &m, 2, 31, 16, 2, STX_ADAM)) loss = model_step(x, &m, 0, NULL, 1);
    CHECK(stx_bytes(x) <= limit, "%zu bytes exceed the limit of %zu", stx_bytes(x), limit);
    CHECK(c.most <= limit + 4096 + 256 * (size_t)c.calls,
          "the allocator returned %zu bytes, the limit is %zu", c.most, limit);
    if (stx_ok(x)) {
        ++*works;
        CHECK(loss > 0, "loss %g", loss);
    } else {
        ++*fails;
        snprintf(text, sizeof text, "%zu", limit);
        CHECK(stx_error_code(x) == STX_ERR_MEMORY && strstr(stx_error(x), "max_bytes")
                  && strstr(stx_error(x), text) && strstr(stx_error(x), "arena"),
              "limit %zu: %s", limit, stx_error(x));
    }
    stx_destroy(x);
    CHECK(c.live == 0, "leak");
}

static int all_zero(const unsigned char *p, size_t n) {
    size_t i;
    for (i = 0; i < n; i++)
        if (p[i]) return 0;
    return 1;
}

static int is_aligned(const void *p) {
    return p && (uintptr_t)p % 64 == 0;
}

/* Blocks and persistent memory must be zeroed, aligned and counted, and stx_destroy
   must free them. */
static void blocks(void) {
    counter c;
    stx_ctx *x;
    unsigned char *b1, *b2, *b3, *q;
    size_t before;
    memset(&c, 0, sizeof c);
    x = counted(&c, 0, 0, 1, 1);
    before = stx_bytes(x);
    b1 = (unsigned char *)stx_block(x, 1000);
    b2 = (unsigned char *)stx_block(x, 0);
    b3 = (unsigned char *)stx_block(x, 70);
    CHECK(is_aligned(b1) && is_aligned(b2) && is_aligned(b3), "blocks are not aligned to 64 bytes");
    CHECK(all_zero(b1, 1000), "a block is not zeroed");
    CHECK(stx_bytes(x) >= before + 1070, "blocks are not counted");
    stx_block_free(x, b2);
    stx_block_free(x, b1);
    CHECK(stx_bytes(x) == before + 70, "expected %zu bytes, got %zu", before + 70, stx_bytes(x));
    q = (unsigned char *)stx_persist(x, 333);
    CHECK(is_aligned(q) && all_zero(q, 333), "persistent memory is not zeroed or not aligned");
    CHECK(is_aligned(stx_step_host_bytes(x, 1)) && is_aligned(stx_step_host_bytes(x, 1)),
          "step memory is not aligned");
    stx_destroy(x);
    CHECK(c.live == 0, "leak");
}

static void limits(void) {
    counter c;
    stx_ctx *x;
    model m;
    size_t bytes, limit;
    int works = 0, fails = 0;
    memset(&c, 0, sizeof c);
    x = counted(&c, 1, 0, 1, 1);
    model_make(x, &m, 2, 31, 16, 2, STX_ADAM);
    model_step(x, &m, 0, NULL, 1);
    bytes = stx_bytes(x);
    CHECK(stx_ok(x) && bytes <= c.bytes && c.bytes - bytes < 4096 + 256 * (size_t)c.live,
          "stx_bytes is %zu, the allocator returned %zu", bytes, c.bytes);
    CHECK(stx_peak_bytes(x) <= bytes && stx_peak_bytes(x) > bytes / 4, "a peak of %zu in %zu bytes",
          stx_peak_bytes(x), bytes);
    stx_destroy(x);
    for (limit = bytes / 20; limit < bytes + bytes / 2; limit += bytes / 20)
        limited_run(limit, &works, &fails);
    CHECK(works >= 2 && fails >= 2, "%d limits are sufficient, %d are not", works, fails);
    blocks();
}

/* Sizes that overflow must be reported as out of memory. */
static void overflows(void) {
    static stx_real r[4];
    static const int32_t id[4] = {0, 0, 0, 0};
    static const size_t big[] = {SIZE_MAX,         SIZE_MAX - 1,    SIZE_MAX - 63,
                                 SIZE_MAX - 64,    SIZE_MAX - 127,  SIZE_MAX - 4095,
                                 SIZE_MAX - 4096,  SIZE_MAX - 4097, SIZE_MAX / 2,
                                 SIZE_MAX / 2 + 1, SIZE_MAX / 4,    SIZE_MAX / 4 + 1,
                                 SIZE_MAX / 8 + 1};
    size_t i;
    counter c;
    memset(&c, 0, sizeof c);
    ex = counted(&c, 0, 0, 1, 1);
    for (i = 0; i < sizeof big / sizeof *big; i++) {
        stx_params *p = stx_params_create(ex);
        size_t b = big[i];
        stx_begin(ex, STX_TRAIN);
        REFUSE(stx_input(ex, r, b, 0, 0, 0), STX_ERR_MEMORY, "", "", "");
        REFUSE(stx_input(ex, r, b, 2, 0, 0), STX_ERR_MEMORY, "", "", "");
        REFUSE(stx_input(ex, r, 2, b, 0, 0), STX_ERR_MEMORY, "", "", "");
        REFUSE(stx_input(ex, r, b, b, b, b), STX_ERR_MEMORY, "", "", "");
        REFUSE(stx_input(ex, r, 3, 5, 7, b), STX_ERR_MEMORY, "", "", "");
        REFUSE(stx_param(p, STX_NORMAL, 1, "w", b, 3, 0, 0), STX_ERR_MEMORY, "", "", "");
        CHECK(p->count == 0, "a parameter without memory is in the list");
        REFUSE(stx_persist(ex, b), STX_ERR_MEMORY, "", "", "");
        REFUSE(stx_step_host_bytes(ex, b), STX_ERR_MEMORY, "", "", "");
        REFUSE(stx_block(ex, b), STX_ERR_MEMORY, "", "", "");
        CHECK(!stx_tokens(ex, id, b, 3) && !stx_ok(ex), "stx_tokens of %zu x 3", b);
        stx_clear_error(ex);
        CHECK(!stx_tokens(ex, id, 1, b) && !stx_ok(ex), "stx_tokens of 1 x %zu", b);
        stx_clear_error(ex);
        CHECK(!stx_gather(ex, stx_input(ex, r, 2, 2, 0, 0), id, b) && !stx_ok(ex),
              "stx_gather of %zu rows", b);
        stx_clear_error(ex);
        CHECK(!stx_reshape(ex, stx_input(ex, r, 4, 0, 0, 0), b, b, 0, 0) && !stx_ok(ex),
              "stx_reshape to (%zu,%zu)", b, b);
        stx_clear_error(ex);
    }
    /* with 2^31 rows, the size needs more than 32 bits */
    stx_begin(ex, STX_TRAIN);
    REFUSE(stx_input(ex, r, (size_t)1 << 31, 9, 0, 0), STX_ERR_MEMORY, "", "", "");
    stx_destroy(ex);
    CHECK(c.live == 0, "leak");
}

/* From the second step on, a step must not allocate anything and must use the same
   addresses. All steps have the same tokens, because the shapes of adaptive softmax
   depend on them. */
static void step_arena(void) {
    static const size_t chunk[] = {0, 1, 20000};
    int k, step, i;
    for (k = 0; k < 3; k++) {
        counter c;
        stx_ctx *x;
        model m;
        const void *first[SEEN] = {NULL}, *seen[SEEN];
        long calls = 0;
        size_t bytes = 0, peak = 0;
        memset(&c, 0, sizeof c);
        x = counted(&c, chunk[k], 0, 1, 1);
        model_make(x, &m, 2, 31, 16, 2, STX_ADAM);
        for (step = 0; step < 6; step++) {
            CHECK(model_step(x, &m, 0, seen, 1) > 0, "%s", stx_error(x));
            if (step == 1) {
                memcpy(first, seen, sizeof first);
                calls = c.calls;
                bytes = stx_bytes(x);
                peak = stx_peak_bytes(x);
            }
            if (step < 2) continue;
            for (i = 0; i < SEEN; i++)
                CHECK(first[i] == seen[i], "chunks of %zu, step %d: tensor %d moved", chunk[k],
                      step, i);
        }
        CHECK(c.calls == calls, "chunks of %zu: %ld allocations after the second step", chunk[k],
              c.calls - calls);
        CHECK(stx_bytes(x) == bytes && stx_peak_bytes(x) == peak,
              "chunks of %zu: bytes or peak grow", chunk[k]);
        stx_destroy(x);
        CHECK(c.live == 0, "leak");
    }
}


/* >>repeatability */

static void train(stx_ctx *x, model *m, int kind, double *loss) {
    int step;
    model_make(x, m, 2, 13, 8, 2, kind);
    for (step = 0; step < 5; step++) loss[step] = model_step(x, m, step, NULL, 1);
}

/* Two contexts with alternating steps must give the same results as two contexts that
   run one after the other. */
static void contexts(void) {
    static const int kinds[] = {STX_SGD, STX_ADAGRAD, STX_ADAM, STX_ADAMW, STX_RADAM};
    int k, step;
    for (k = 0; k < (int)(sizeof kinds / sizeof *kinds); k++) {
        stx_ctx *a = plain(3, 1), *b = plain(4, 1), *a2 = plain(3, 1), *b2 = plain(4, 1);
        model ma, mb, ma2, mb2;
        double la[5], lb[5];
        train(a, &ma, kinds[k], la);
        train(b, &mb, kinds[k], lb);
        model_make(a2, &ma2, 2, 13, 8, 2, kinds[k]);
        model_make(b2, &mb2, 2, 13, 8, 2, kinds[k]);
        for (step = 0; step < 5; step++) {
            CHECK(model_step(a2, &ma2, step, NULL, 1) == la[step],
                  "alternating contexts: a, step %d", step);
            CHECK(model_step(b2, &mb2, step, NULL, 1) == lb[step],
                  "alternating contexts: b, step %d", step);
        }
        CHECK(same_params(ma.p, ma2.p) && same_params(mb.p, mb2.p),
              "two contexts affect each other, or a seed does not repeat");
        CHECK(!same_params(ma.p, mb.p), "different seeds give the same parameters");
        CHECK(la[0] != lb[0] && la[4] < la[0] + 0.5, "losses %g %g %g", la[0], lb[0], la[4]);
        CHECK(ma.o->step == 5 && ma.o->skipped == 0 && ma.o->grad_norm > 0,
              "the counts of the optimiser");
        stx_destroy(a2); /* the other contexts must continue unaffected */
        CHECK(model_step(b2, &mb2, 5, NULL, 1) > 0, "%s", stx_error(b2));
        stx_destroy(a);
        stx_destroy(b);
        stx_destroy(b2);
    }
}

/* Returns copies of all gradients of a step that is computed by `threads` threads. The
   caller frees them. */
static stx_real *threaded(int threads, size_t *n, double *loss) {
    stx_ctx *x = plain(7, threads);
    model m;
    stx_real *g;
    size_t i, k;
    model_make(x, &m, 4, 65, 64, 4, STX_ADAM);
    *loss = model_step(x, &m, 0, NULL, 0);
    CHECK(stx_ok(x), "%d threads: %s", threads, stx_error(x));
    g = (stx_real *)malloc(stx_params_size(m.p) * sizeof *g);
    for (k = 0, *n = 0; k < m.p->count; k++)
        for (i = 0; i < m.p->tensor[k]->size; i++) g[(*n)++] = m.p->tensor[k]->grad[i];
    stx_destroy(x);
    return g;
}

/* Tests every GEMM kernel that this processor can run. */
static void gemms(void) {
    stx_ctx *x1 = plain(1, 1), *x3 = plain(1, 3);
    gemm_check(x1, x3, 0);
    stx_destroy(x1);
    stx_destroy(x3);
    /* without a context, the GEMM uses the generic kernel */
    x1 = plain(1, 1);
    gemm_case(NULL, x1, 1, 0, 1, 3, 50, 40, 1, 0, 0);
    stx_destroy(x1);
}

/* Gradients must be equal up to rounding for every number of threads, and bit-identical
   from run to run. */
static void thread_counts(void) {
    int t;
    size_t n = 0, i;
    double l1 = 0, loss, again;
    stx_real *one = threaded(1, &n, &l1);
    for (t = 1; t <= 3; t++) {
        stx_real *a = threaded(t, &n, &loss), *b = threaded(t, &n, &again);
        double top = 0, worst = 0;
        for (i = 0; i < n; i++) {
            raise_worst(&worst, fabs((double)a[i] - (double)one[i]));
            top = fmax(top, fabs((double)one[i]));
        }
        CHECK(!memcmp(a, b, n * sizeof *a) && loss == again, "%d threads: two runs differ", t);
        CHECK(worst <= 1e-6 * top && CLOSE(loss, l1, 1e-6),
              "%d threads: gradients differ from those of one thread by %g", t, worst / top);
        free(a);
        free(b);
    }
    free(one);
}

/* Returns a context that uses the processor's fastest kernel. Emulated AMX is tested
   only in test_bf16. */
static stx_ctx *with_precision(int precision, int threads) {
    stx_desc d;
    stx_ctx *x;
    memset(&d, 0, sizeof d);
    d.threads = threads;
    d.precision = precision;
    x = stx_create(&d);
    if (precision) {
        inner_kernel list[INNER_BF16S];
        size_t last = inner_kernels(1, list);
        while (last > 1 && list[last - 1].emulated) last--;
        inner_use(x, list + last - 1);
    }
    return x;
}

/* Tests a layer with N rows, I inputs and O outputs. A large GEMM is tested with every
   activation, always with a bias and a stored pre-activation; other combinations are
   tested once. */
static void linear_fused_case(stx_ctx *x, size_t N, size_t I, size_t O) {
    size_t n = N * O, i;
    int act;
    stx_real *in = random_values(N * I), *W = random_values(O * I), *b = random_values(O),
             *product = random_values(n), *y = random_values(n), *want = random_values(n),
             *pre = random_values(n), *pre_want = random_values(n);
    stx_gemm_args g = stx_gemm_init(0, 1, N, O, I, in, W, product);
    stx_gemm(x, &g);
    for (act = STX_ACT_NONE; act <= STX_ACT_SIGMOID; act++)
        for (i = 0; i < 4; i++) {
            const stx_real *bias = i & 1 ? b : NULL;
            if (N * I * O > 10000000 && i < 3 && (int)i != act % 4) continue;
            memcpy(want, product, n * sizeof *want);
            k_linear_fwd(x, y, i & 2 ? pre : NULL, in, W, bias, N, I, O, act);
            stx_bias_act_fwd(x, want, i & 2 ? pre_want : NULL, bias, N, O, act);
            CHECK(stx_ok(x) && !memcmp(y, want, n * sizeof *y)
                      && (!(i & 2) || !memcmp(pre, pre_want, n * sizeof *y)),
                  "fused linear: (%zu,%zu) to %zu, act %d, bias %d, precision %d, %d threads", N, I,
                  O, act, (int)(i & 1), stx_ctx_desc(x)->precision, stx_threads(x));
        }
    free(in);
    free(W);
    free(b);
    free(product);
    free(y);
    free(want);
    free(pre);
    free(pre_want);
}

/* A GEMM with bias and activation in one pass must be bit-identical to a GEMM followed
   by separate passes, for sizes beyond one block of K, N and M. */
static void linear_fused(void) {
    static const size_t size[][3] = {{1, 5, 7},       {3, 300, 700},   {2, 40, 3},
                                     {70, 600, 300},  {700, 385, 520}, {5, 33, 1100},
                                     {260, 1600, 90}, {513, 64, 33},   {13, 77, 300},
                                     {131, 2048, 96}, {905, 448, 885}, {901, 1024, 801},
                                     {517, 130, 9},   {4100, 33, 11},  {300, 70, 2},
                                     {31, 640, 700}};
    size_t k;
    int precision, threads;
    for (precision = 0; precision <= (sizeof(stx_real) == 4); precision++)
        for (threads = 1; threads <= 3; threads += 2)
            for (k = 0; k < sizeof size / sizeof *size; k++) {
                stx_ctx *x = with_precision(precision, threads);
                linear_fused_case(x, size[k][0], size[k][1], size[k][2]);
                stx_destroy(x);
            }
}

/* Nonzero if this thread computes with denormals. */
static int denormals_live(void) {
    volatile float tiny = 1e-40f, one = 1;
    return tiny * one != 0;
}

/* The library's loops flush denormals to zero. Afterwards, the caller's arithmetic must
   be unchanged. */
static void float_environment(void) {
    int threads, good, before = denormals_live();
    CHECK(before, "this program was built without denormals, which hides any change");
    for (threads = 1; threads <= 3; threads += 2) {
        stx_ctx *x = plain(1, threads);
        stx_params *p = stx_params_create(x);
        stx_tensor *W = stx_param(p, STX_NORMAL, 0.1, "w", 96, 96, 0, 0), *y;
        stx_optim *optim = stx_optim_create(p, NULL);
        stx_attention_in in;
        stx_attention_desc d;
        stx_real *a = random_values(2 * 200 * 96), flushed;
        size_t i;
        memset(&in, 0, sizeof in);
        memset(&d, 0, sizeof d);
        d.heads = 3;
        stx_begin(x, STX_TRAIN);
        y = stx_linear(x, stx_input(x, a, 2, 200, 96, 0), W, NULL, STX_ACT_GELU);
        in.q = in.k = in.v = y;
        stx_backward(x, stx_mean(x, stx_softmax(x, stx_attention(x, &in, &d))));
        stx_optim_step(optim, 0.1);
        CHECK(stx_ok(x), "%s", stx_error(x));
        good = denormals_live();
        CHECK(good, "%d threads: denormals are flushed after a call of the library", threads);
        for (i = 0; i < 64; i++) a[i] = (stx_real)(sizeof(stx_real) == 4 ? 1e-40 : 1e-310);
        stx_axpy(x, a + 64, a, 64, 1, 0);
        flushed = a[64];
        CHECK(!memcmp(&flushed, &a[127], sizeof flushed), "elements of a loop differ");
#ifdef STX__X86
        CHECK(flushed == 0, "denormals are not flushed in a loop");
#endif
        free(a);
        stx_destroy(x);
    }
}


/* >>NaN: no op hides it */

typedef stx_tensor *(*nan_op)(stx_ctx *x, stx_tensor **in);

static stx_tensor *n_linear(stx_ctx *x, stx_tensor **in) {
    return stx_linear(x, in[0], in[1], in[2], STX_ACT_NONE);
}

static stx_tensor *n_linear_relu(stx_ctx *x, stx_tensor **in) {
    return stx_linear(x, in[0], in[1], in[2], STX_ACT_RELU);
}

static stx_tensor *n_linear_gelu(stx_ctx *x, stx_tensor **in) {
    return stx_linear(x, in[0], in[1], in[2], STX_ACT_GELU);
}

static stx_tensor *n_linear_tanh(stx_ctx *x, stx_tensor **in) {
    return stx_linear(x, in[0], in[1], in[2], STX_ACT_TANH);
}

static stx_tensor *n_linear_sigmoid(stx_ctx *x, stx_tensor **in) {
    return stx_linear(x, in[0], in[1], in[2], STX_ACT_SIGMOID);
}

static stx_tensor *n_matmul(stx_ctx *x, stx_tensor **in) {
    return stx_matmul(x, in[0], in[1], 0, 1);
}

static stx_tensor *n_layernorm(stx_ctx *x, stx_tensor **in) {
    return stx_layernorm(x, in[0], in[2], in[2], 0);
}

static stx_tensor *n_add(stx_ctx *x, stx_tensor **in) {
    return stx_add(x, in[0], in[2]);
}

static stx_tensor *n_mul(stx_ctx *x, stx_tensor **in) {
    return stx_mul(x, in[0], in[2]);
}

static stx_tensor *n_scale(stx_ctx *x, stx_tensor **in) {
    return stx_scale(x, in[0], 0.0);
}

static stx_tensor *n_relu(stx_ctx *x, stx_tensor **in) {
    return stx_relu(x, in[0]);
}

static stx_tensor *n_gelu(stx_ctx *x, stx_tensor **in) {
    return stx_gelu(x, in[0]);
}

static stx_tensor *n_tanh(stx_ctx *x, stx_tensor **in) {
    return stx_tanh(x, in[0]);
}

static stx_tensor *n_sigmoid(stx_ctx *x, stx_tensor **in) {
    return stx_sigmoid(x, in[0]);
}

static stx_tensor *n_softmax(stx_ctx *x, stx_tensor **in) {
    return stx_softmax(x, in[0]);
}

static stx_tensor *n_dropout(stx_ctx *x, stx_tensor **in) {
    return stx_dropout(x, in[0], 0.9);
}

static stx_tensor *n_mean(stx_ctx *x, stx_tensor **in) {
    return stx_mean(x, in[0]);
}

static stx_tensor *n_mse(stx_ctx *x, stx_tensor **in) {
    return stx_mse(x, in[0], in[1]);
}

static stx_tensor *n_cross_entropy(stx_ctx *x, stx_tensor **in) {
    static const int32_t id[17] = {3};
    return stx_cross_entropy(x, in[0], stx_tokens(x, id, 1, 17), 0);
}

static stx_tensor *n_concat_channels(stx_ctx *x, stx_tensor **in) {
    return stx_concat_channels(x, in[0], in[1]);
}

static stx_tensor *n_embedding(stx_ctx *x, stx_tensor **in) {
    static const int32_t id[17] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16};
    return stx_embedding(x, in[0], stx_tokens(x, id, 1, 17));
}

/* The ops to test. The bits of `inputs` state which of the tensors (17,17), (17,17) and
   (17) the op reads. */
static const struct {
    const char *name;
    nan_op op;
    int inputs;
} nan_ops[] = {{"linear", n_linear, 7},
               {"linear relu", n_linear_relu, 7},
               {"linear gelu", n_linear_gelu, 7},
               {"linear tanh", n_linear_tanh, 7},
               {"linear sigmoid", n_linear_sigmoid, 7},
               {"matmul", n_matmul, 3},
               {"layernorm", n_layernorm, 5},
               {"add", n_add, 5},
               {"mul", n_mul, 5},
               {"scale by 0", n_scale, 1},
               {"relu", n_relu, 1},
               {"gelu", n_gelu, 1},
               {"tanh", n_tanh, 1},
               {"sigmoid", n_sigmoid, 1},
               {"softmax", n_softmax, 1},
               {"dropout", n_dropout, 1},
               {"mean", n_mean, 1},
               {"mse", n_mse, 3},
               {"cross entropy", n_cross_entropy, 1},
               {"concat", n_concat_channels, 3},
               {"embedding", n_embedding, 1}};

/* Puts a NaN at element `at` of input `part` of op k. negative: the sign of the NaN. */
static void nan_in_op(stx_ctx *x, size_t k, int part, size_t at, int negative) {
    stx_real *d[3];
    stx_tensor *in[3], *y;
    int j;
    for (j = 0; j < 3; j++) d[j] = random_values(j == 2 ? 17 : 289);
    d[part][at] = (stx_real)(negative ? -NAN : NAN);
    stx_begin(x, STX_TRAIN);
    for (j = 0; j < 3; j++) in[j] = stx_variable(x, d[j], 17, j == 2 ? 0 : 17, 0, 0);
    y = stx_mean(x, nan_ops[k].op(x, in));
    CHECK(stx_ok(x) && isnan(stx_item(x, y)), "%s hides a NaN in input %d at %zu: %g %s",
          nan_ops[k].name, part, at, stx_item(x, y), stx_error(x));
    stx_clear_error(x);
    for (j = 0; j < 3; j++) free(d[j]);
}

static void nans_in_ops(stx_ctx *x) {
    size_t k, i;
    int part, negative;
    for (k = 0; k < sizeof nan_ops / sizeof *nan_ops; k++)
        for (part = 0; part < 3; part++)
            for (i = 0; i < 4; i++)
                for (negative = 0; negative < 2; negative++)
                    if (nan_ops[k].inputs >> part & 1)
                        nan_in_op(x, k, part, i * (part == 2 ? 16 : 288) / 3, negative);
}

enum { NAN_PARTS = 9, NAN_SPAN = 6 };

/* Puts a NaN at the i-th of three places in input `part` of attention. eps: the eps of
   the desc. */
static void nan_in_attention(stx_ctx *x, int part, size_t i, double eps) {
    static const char *names[] = {"q",
                                  "k",
                                  "v",
                                  "pe",
                                  "content_bias",
                                  "position_bias",
                                  "span_fraction",
                                  "persistent_k",
                                  "persistent_v"};
    static const size_t dim[NAN_PARTS][4] = {{2, 9, 6}, {2, 9, 6}, {2, 9, 6}, {9, 3},   {6},
                                             {6},       {2},       {2, 4, 3}, {2, 4, 3}};
    stx_real *d[NAN_PARTS];
    stx_tensor *t[NAN_PARTS], *y;
    stx_attention_in in;
    stx_attention_desc ad;
    size_t size[NAN_PARTS], at;
    int j, k;
    memset(&in, 0, sizeof in);
    memset(&ad, 0, sizeof ad);
    ad.heads = 2;
    ad.max_span = 20;
    ad.ramp = 4;
    ad.eps = eps;
    for (j = 0; j < NAN_PARTS; j++) {
        size[j] = 1;
        for (k = 0; k < 4 && dim[j][k]; k++) size[j] *= dim[j][k];
        d[j] = random_values(size[j]);
    }
    d[NAN_SPAN][0] = d[NAN_SPAN][1] = (stx_real)0.9;
    at = i * (size[part] - 1) / 2;
    d[part][at] = (stx_real)NAN;
    stx_begin(x, STX_TRAIN);
    for (j = 0; j < NAN_PARTS; j++)
        t[j] = stx_variable(x, d[j], dim[j][0], dim[j][1], dim[j][2], dim[j][3]);
    in.q = t[0];
    in.k = t[1];
    in.v = t[2];
    in.pe = t[3];
    in.content_bias = t[4];
    in.position_bias = t[5];
    in.span_fraction = t[NAN_SPAN];
    in.persistent_k = t[7];
    in.persistent_v = t[8];
    y = stx_mean(x, stx_attention(x, &in, &ad));
    CHECK(stx_ok(x) && isnan(stx_item(x, y)), "attention hides a NaN in %s at %zu, eps %g: %g %s",
          names[part], at, ad.eps, stx_item(x, y), stx_error(x));
    stx_backward(x, y);
    stx_clear_error(x);
    /* without persistent vectors, a NaN span fraction leaves no attention weight */
    if (part == NAN_SPAN) {
        stx_begin(x, STX_TRAIN);
        memset(&in, 0, sizeof in);
        in.q = in.k = in.v = stx_variable(x, d[0], 2, 9, 6, 0);
        in.span_fraction = stx_variable(x, d[NAN_SPAN], 2, 0, 0, 0);
        y = stx_mean(x, stx_attention(x, &in, &ad));
        CHECK(stx_ok(x) && isnan(stx_item(x, y)),
              "attention hides a NaN in span_fraction, no persistent vectors, eps %g: %g", ad.eps,
              stx_item(x, y));
    }
    for (j = 0; j < NAN_PARTS; j++) free(d[j]);
}

/* An infinite logit must not result in a finite loss. A word whose logit is minus
   infinity must have probability 0. */
static void infinite_logits(stx_ctx *x) {
    static const int32_t id[2] = {0, 1};
    stx_real l[6] = {1, (stx_real)HUGE_VAL, 2, 3, 4, 5};
    double loss;
    stx_begin(x, STX_EVAL);
    loss = stx_item(x,
                    stx_cross_entropy(x, stx_input(x, l, 2, 3, 0, 0), stx_tokens(x, id, 1, 2), 0));
    CHECK(!(fabs(loss) <= 1e30), "an infinite logit gives a finite loss");
    l[1] = -(stx_real)HUGE_VAL;
    loss = stx_item(x,
                    stx_cross_entropy(x, stx_input(x, l, 2, 3, 0, 0), stx_tokens(x, id, 1, 2), 0));
    CHECK(fabs(loss) <= 10, "a logit of minus infinity: a loss of %g", loss);
    CHECK(stx_softmax(x, stx_input(x, l, 2, 3, 0, 0))->data[1] == 0, "softmax of minus infinity");
}

static void nans(void) {
    stx_ctx *x = plain(1, 1);
    int part, i, mode;
    nans_in_ops(x);
    for (part = 0; part < NAN_PARTS; part++)
        for (i = 0; i < 3; i++)
            for (mode = 0; mode < 2; mode++) nan_in_attention(x, part, (size_t)i, mode ? 0.01 : 0);
    infinite_logits(x);
    stx_destroy(x);
}


/* >>optimisers and schedules */

/* Copies the 7 + 6 elements of two tensors to out. A matrix has no second state with
   Muon. */
static void copy_two(stx_real *out, stx_tensor *const *t) {
    memcpy(out, t[0]->data, 7 * sizeof *out);
    if (t[1]) memcpy(out + 7, t[1]->data, 6 * sizeof *out);
}

static int equal_two(const stx_real *was, stx_tensor *const *t) {
    return !memcmp(was, t[0]->data, 7 * sizeof *was)
           && (!t[1] || !memcmp(was + 7, t[1]->data, 6 * sizeof *was));
}

/* Runs a normal step and one with a gradient that is not finite. The second step must
   be skipped and must change neither parameters nor state. */
static void skipped_step(int kind, double bad) {
    stx_ctx *x = plain(1, 1);
    stx_params *p = stx_params_create(x);
    stx_optim_desc d;
    stx_optim *o;
    stx_tensor *t[2];
    stx_real was[13], state[2][13];
    int i, k;
    memset(&d, 0, sizeof d);
    d.kind = kind;
    d.momentum = 0.9;
    d.clip = 0.5;
    t[0] = stx_param(p, STX_NORMAL, 1, "a", 7, 0, 0, 0);
    t[1] = stx_param(p, STX_NORMAL, 1, "b", 3, 2, 0, 0);
    o = stx_optim_create(p, &d);
    CHECK(o && o->desc.kind == kind && (o->state[0] != NULL)
              && (kind >= STX_ADAM) == (o->state[1] != NULL),
          "optimiser %d: the number of states", kind);
    for (i = 0; i < 7; i++) t[0]->grad[i] = (stx_real)(i - 3);
    CHECK(stx_optim_step(o, 0.1) == 1 && o->step == 1 && CLOSE(o->grad_norm, sqrt(28.0), 1e-6),
          "optimiser %d: a step with norm %g", kind, o->grad_norm);
    for (i = 0; i < 7; i++)
        CHECK(t[0]->grad[i] == 0, "optimiser %d: the gradient is not zeroed", kind);
    copy_two(was, t);
    for (k = 0; k < 2; k++)
        if (o->state[k]) copy_two(state[k], o->state[k]);

    for (i = 0; i < 7; i++) t[0]->grad[i] = 1;
    t[1]->grad[5] = (stx_real)bad;
    CHECK(stx_optim_step(o, 0.1) == 0 && o->skipped == 1 && o->step == 1 && stx_ok(x),
          "optimiser %d, a gradient of %g: skipped %d, step %d", kind, bad, (int)o->skipped,
          (int)o->step);
    CHECK(equal_two(was, t), "optimiser %d: a gradient of %g changes parameters", kind, bad);
    for (k = 0; k < 2; k++)
        if (o->state[k])
            CHECK(equal_two(state[k], o->state[k]),
                  "optimiser %d: a gradient of %g changes the state", kind, bad);
    for (i = 0; i < 7; i++)
        CHECK(t[0]->grad[i] == 0, "optimiser %d: a skipped step does not zero gradients", kind);
    CHECK(t[1]->grad[5] == 0, "optimiser %d: a gradient of %g is kept", kind, bad);
    t[0]->grad[0] = 1;
    CHECK(stx_optim_step(o, 0.1) == 1 && o->step == 2 && o->skipped == 1 && t[0]->data[0] != was[0],
          "optimiser %d: the step after a skipped one", kind);
    stx_destroy(x);
}

/* Compares Adagrad with precomputed results. Gradients are clipped as in the
   references. */
static void adagrad_reference(void) {
    static const double gp[5][3] = {{.3, -.4, 0},
                                    {.003, .001, -.002},
                                    {0, 0, .1},
                                    {.02, -.01, .005},
                                    {-.2, .1, .3}},
                        gq[5] = {.01, -.05, 0, .02, .3};
    static const double want[5][4] = {
        {0.998950000001, -1.998950000000, 0.500000000000, 0.082500000175},
        {0.998600017499, -1.999037499727, 0.534999998250, 0.103092194283},
        {0.998600017499, -1.999037499727, 0.519253147337, 0.103092194283},
        {0.993943918533, -1.997288051810, 0.515758211329, 0.077531808313},
        {0.997052279810, -1.998648875444, 0.510434511408, 0.070645637042}};
    stx_ctx *x = plain(1, 1);
    stx_params *p = stx_params_create(x);
    stx_optim_desc d;
    stx_schedule s;
    stx_optim *o;
    stx_tensor *a = stx_param(p, STX_ZEROS, 0, "p", 3, 0, 0, 0),
               *b = stx_param(p, STX_CONSTANT, 0.1, "q", 1, 0, 0, 0);
    double tol = sizeof(stx_real) == 8 ? 2e-12 : 1e-6, value;
    int n, i;
    memset(&d, 0, sizeof d);
    memset(&s, 0, sizeof s);
    d.kind = STX_ADAGRAD;
    d.clip = 0.03;
    s.lr = 0.07;
    s.warmup = 4;
    o = stx_optim_create(p, &d);
    a->data[0] = 1;
    a->data[1] = -2;
    a->data[2] = (stx_real)0.5;
    for (n = 1; n <= 5; n++) {
        for (i = 0; i < 3; i++) a->grad[i] = (stx_real)gp[n - 1][i];
        b->grad[0] = (stx_real)gq[n - 1];
        CHECK(stx_optim_step(o, stx_schedule_lr(&s, (uint64_t)n)), "%s", stx_error(x));
        for (i = 0; i < 4; i++) {
            value = (double)(i < 3 ? a->data[i] : b->data[0]);
            CHECK(CLOSE(value, want[n - 1][i], tol),
                  "Adagrad, update %d, element %d: expected %.12g, got %.12g", n, i, want[n - 1][i],
                  value);
        }
    }
    stx_destroy(x);
}

/* Computes one SGD update of the parameters th in double. m: the momentum buffer. */
static void sgd_formula(const stx_optim_desc *d, int n, const double *g, double *th, double *m) {
    int i;
    for (i = 0; i < 2; i++) {
        double e = g[i] + d->weight_decay * th[i];
        m[i] = n == 1 ? e : d->momentum * m[i] + e;
        th[i] -= 0.05 * (d->momentum > 0 ? m[i] : e);
    }
}

/* Computes one Adam, AdamW or LAMB update in double. Weight decay is part of the
   gradient in Adam, separate in AdamW, and part of the direction in LAMB. */
static void adam_formula(const stx_optim_desc *d, int n, const double *g, double *th, double *m,
                         double *v) {
    double c1 = d->no_correction ? 1 : 1 - pow(0.9, n),
           c2 = d->no_correction ? 1 : 1 - pow(0.999, n), p2 = 0, u2 = 0, u[2], norm;
    int i;
    for (i = 0; i < 2; i++) {
        double e = g[i] + (d->kind == STX_ADAM ? d->weight_decay * th[i] : 0);
        if (d->kind == STX_ADAMW) th[i] -= 0.05 * d->weight_decay * th[i];
        m[i] = 0.9 * m[i] + 0.1 * e;
        v[i] = 0.999 * v[i] + 0.001 * e * e;
        u[i] = m[i] / c1 / (sqrt(v[i] / c2) + 1e-6) + d->weight_decay * th[i];
        p2 += th[i] * th[i];
        u2 += u[i] * u[i];
        if (d->kind == STX_LAMB) continue;
        if (d->eps_hat)
            th[i] -= 0.05 * sqrt(c2) / c1 * m[i] / (sqrt(v[i]) + d->eps);
        else
            th[i] -= 0.05 * (m[i] / c1) / (sqrt(v[i] / c2) + 1e-8);
    }
    norm = d->trust_max > 0 ? fmin(sqrt(p2), d->trust_max) : sqrt(p2);
    for (i = 0; i < 2 && d->kind == STX_LAMB; i++) th[i] -= 0.05 * norm / sqrt(u2) * u[i];
}

/* Compares six updates of two parameters with the formulas, evaluated in double. */
static void optimiser_formula(const stx_optim_desc *d, size_t number) {
    stx_ctx *x = plain(1, 1);
    stx_params *p = stx_params_create(x);
    stx_optim *o;
    stx_tensor *w = stx_param(p, STX_CONSTANT, 0.5, "w", 2, 0, 0, 0);
    double th[2] = {0.5, 0.5}, m[2] = {0, 0}, v[2] = {0, 0};
    int n, i;
    o = stx_optim_create(p, d);
    for (n = 1; n <= 6; n++) {
        double g[2], norm;
        g[0] = sin(n);
        g[1] = cos(3 * n);
        for (i = 0; i < 2; i++) {
            w->grad[i] = (stx_real)g[i];
            if (d->clip_value > 0) g[i] = fmax(-d->clip_value, fmin(d->clip_value, g[i]));
        }
        norm = sqrt(g[0] * g[0] + g[1] * g[1]);
        for (i = 0; i < 2; i++)
            if (d->clip > 0 && d->clip / (norm + 1e-6) < 1) g[i] *= d->clip / (norm + 1e-6);
        if (d->kind == STX_SGD)
            sgd_formula(d, n, g, th, m);
        else
            adam_formula(d, n, g, th, m, v);
        stx_optim_step(o, 0.05);
        for (i = 0; i < 2; i++)
            CHECK(CLOSE(w->data[i], th[i], sizeof(stx_real) == 8 ? 1e-12 : 2e-6),
                  "formula %zu, update %d: expected %.9g, got %.9g", number, n, th[i],
                  (double)w->data[i]);
    }
    stx_destroy(x);
}

static void optimisers(void) {
    static const double bad[] = {NAN, HUGE_VAL, -HUGE_VAL};
    static const stx_optim_desc formulas[] = {
        {.kind = STX_SGD, .clip = 0.8, .weight_decay = 0.02},
        {.kind = STX_SGD, .clip = 0.8, .weight_decay = 0.02, .momentum = 0.9},
        {.kind = STX_ADAM},
        {.kind = STX_ADAM, .clip = 0.8, .weight_decay = 0.02},
        {.kind = STX_ADAMW, .clip = 0.8, .weight_decay = 0.02},
        {.kind = STX_ADAM, .clip = 0.8, .weight_decay = 0.02, .eps_hat = 1, .eps = 0.01},
        {.kind = STX_ADAMW, .clip = 0.8, .weight_decay = 0.02, .eps_hat = 1, .eps = 0.01},
        {.kind = STX_ADAM, .clip = 0.8, .weight_decay = 0.02, .clip_value = 0.6},
        {.kind = STX_LAMB, .clip = 0.8, .weight_decay = 0.02},
        {.kind = STX_LAMB,
         .clip = 0.8,
         .weight_decay = 0.02,
         .no_correction = 1,
         .trust_max = 0.6}};
    size_t i;
    int kind;
    for (kind = STX_SGD; kind <= STX_MUON; kind++)
        for (i = 0; i < 3; i++) skipped_step(kind, bad[i]);
    adagrad_reference();
    for (i = 0; i < sizeof formulas / sizeof *formulas; i++) optimiser_formula(&formulas[i], i);
}

/* An optimiser for one parameter with three elements. */
typedef struct rule_run {
    stx_ctx *x;
    stx_params *p;
    stx_optim *o;
    stx_tensor *w;
} rule_run;

static void rule_make(rule_run *r, const stx_optim_desc *d) {
    r->x = plain(1, 1);
    r->p = stx_params_create(r->x);
    r->w = stx_param(r->p, STX_CONSTANT, 0.5, "w", 3, 0, 0, 0);
    r->o = stx_optim_create(r->p, d);
}

/* The parameters and moments of RAdam, in double. radam_r2 below returns the square of
   the rectification factor. */
typedef struct radam_state {
    double th[3], m[3], v[3];
} radam_state;

/* Returns rho of update t. The update is rectified if rho is at least 5. */
static double radam_rho(double b2, int t) {
    return 2 / (1 - b2) - 1 - 2 * t * pow(b2, t) / (1 - pow(b2, t));
}

static double radam_r2(double b2, int t) {
    double inf = 2 / (1 - b2) - 1, rho = radam_rho(b2, t);
    return (rho - 4) * (rho - 2) * inf / ((inf - 4) * (inf - 2) * rho);
}

/* Computes update t with the formula documented at stx_optim_desc. */
static void radam_formula(radam_state *s, const stx_optim_desc *d, int t, const double *g,
                          double lr) {
    const double b2 = d->beta2 > 0 ? d->beta2 : 0.999, eps = d->eps > 0 ? d->eps : 1e-8,
                 rho = radam_rho(b2, t), c1 = 1 - pow(0.9, t), c2 = 1 - pow(b2, t);
    double norm = sqrt(g[0] * g[0] + g[1] * g[1] + g[2] * g[2]), f = 1;
    int i;
    if (d->clip > 0) f = fmin(1, d->clip / (norm + 1e-6));
    for (i = 0; i < 3; i++) {
        s->m[i] = 0.9 * s->m[i] + 0.1 * f * g[i];
        s->v[i] = b2 * s->v[i] + (1 - b2) * f * g[i] * f * g[i];
        if (rho < 5 && d->radam_skip) continue;
        s->th[i] -= lr * d->weight_decay * s->th[i];
        if (rho < 5)
            s->th[i] -= lr * s->m[i] / c1;
        else
            s->th[i] -= lr * sqrt(c2 * radam_r2(b2, t)) / c1 * s->m[i] / (sqrt(s->v[i]) + eps);
    }
}

/* If the gradient in update 4 is not finite, neither the parameter nor the moments may
   change. */
static void radam_not_finite(rule_run *r) {
    stx_real keep[9];
    int i;
    for (i = 0; i < 3; i++) {
        keep[i] = r->w->data[i];
        keep[3 + i] = r->o->state[0][0]->data[i];
        keep[6 + i] = r->o->state[1][0]->data[i];
        r->w->grad[i] = (stx_real)(i == 1 ? NAN : 1);
    }
    CHECK(stx_optim_step(r->o, 0.1) == 0 && r->o->step == 3 && r->o->skipped == 1,
          "RAdam: a gradient that is not finite: step %d, skipped %d", (int)r->o->step,
          (int)r->o->skipped);
    CHECK(!memcmp(keep, r->w->data, 3 * sizeof *keep)
              && !memcmp(keep + 3, r->o->state[0][0]->data, 3 * sizeof *keep)
              && !memcmp(keep + 6, r->o->state[1][0]->data, 3 * sizeof *keep) && r->w->grad[0] == 0,
          "RAdam: a gradient that is not finite has an effect");
}

/* An optimiser of another kind must refuse the state of RAdam. */
static void radam_other_kind(const char *path) {
    stx_ctx *x = plain(1, 1);
    stx_params *p = stx_params_create(x);
    stx_file *f;
    stx_param(p, STX_ZEROS, 0, "w", 3, 0, 0, 0);
    f = stx_file_open(x, path);
    CHECK(f && !stx_optim_load(stx_optim_create(p, NULL), f) && strstr(stx_error(x), "optimiser 5")
              && strstr(stx_error(x), "5 radam"),
          "%s", stx_error(x));
    stx_file_close(f);
    stx_destroy(x);
}

/* Saves a run after update t and loads the file into another run. Both runs must
   continue bit-identically. */
static void radam_resume(rule_run *r, const stx_optim_desc *d, int t) {
    char path[1024];
    stx_writer *w = stx_writer_create(r->x);
    rule_run q;
    stx_file *f;
    int i, k;
    test_path(path, sizeof path, "test_api");
    CHECK(stx_params_save(w, r->p, "") && stx_optim_save(w, r->o) && stx_writer_finish(w, path),
          "%s", stx_error(r->x));
    rule_make(&q, d);
    f = stx_file_open(q.x, path);
    CHECK(f && stx_params_load(q.p, f, "") && stx_optim_load(q.o, f), "%s", stx_error(q.x));
    stx_file_close(f);
    if (t == 3) radam_other_kind(path);
    remove(path);
    for (i = t + 1; i <= 15; i++) {
        for (k = 0; k < 3; k++) r->w->grad[k] = q.w->grad[k] = (stx_real)cos(i + k);
        CHECK(stx_optim_step(r->o, 0.02) == 1 && stx_optim_step(q.o, 0.02) == 1
                  && !memcmp(r->w->data, q.w->data, 3 * sizeof(stx_real)) && r->o->step == q.o->step
                  && q.o->skipped == r->o->skipped,
              "RAdam, saved after update %d: update %d differs", t, i);
    }
    stx_destroy(q.x);
}

/* Checks 12 updates against the formula while the learning rate decreases. stop: the
   update after which the run is saved and resumed; 0: none. */
static void radam(stx_optim_desc d, int stop) {
    radam_state s = {{0.5, 0.5, 0.5}, {0, 0, 0}, {0, 0, 0}};
    rule_run r;
    int t, i;
    d.kind = STX_RADAM;
    rule_make(&r, &d);
    for (t = 1; t <= 12; t++) {
        double g[3], lr = 0.1 / t, rho = radam_rho(d.beta2 > 0 ? d.beta2 : 0.999, t);
        if (t == 4) radam_not_finite(&r);
        for (i = 0; i < 3; i++) {
            g[i] = (i == 2 ? 1e-3 : 1) * sin(t + 2.0 * i);
            r.w->grad[i] = (stx_real)g[i];
        }
        radam_formula(&s, &d, t, g, lr);
        CHECK(stx_optim_step(r.o, lr) == 1 && r.o->step == (uint64_t)t, "%s", stx_error(r.x));
        CHECK(r.o->update->plain == (rho < 5) && (d.beta2 > 0 || (rho < 5) == (t <= 5)),
              "RAdam: update %d has rho %g", t, rho);
        for (i = 0; i < 3; i++)
            CHECK(CLOSE(r.w->data[i], s.th[i], sizeof(stx_real) == 8 ? 1e-13 : 1e-6),
                  "RAdam, beta2 %g, skip %d, update %d, element %d: expected %.12g, got %.12g",
                  d.beta2, d.radam_skip, t, i, s.th[i], (double)r.w->data[i]);
        if (d.radam_skip && rho < 5)
            CHECK(r.w->data[0] == (stx_real)0.5 && r.o->state[0][0]->data[0] != 0
                      && r.o->state[1][0]->data[0] > 0,
                  "RAdam: radam_skip must change the state only");
        if (t == stop) {
            radam_resume(&r, &d, t);
            break;
        }
    }
    stx_destroy(r.x);
}

static void radams(void) {
    static const struct {
        stx_optim_desc d;
        int stop;
    } cases[] = {{{.clip = 0}, 0},
                 {{.clip = 0.5, .weight_decay = 0.1}, 0},
                 /* eps is large enough to have an effect: it is added to the root of v,
                    which is not bias-corrected */
                 {{.eps = 0.02, .weight_decay = 0.1}, 0},
                 {{.beta2 = 0.9, .weight_decay = 0.1}, 0},
                 {{.beta2 = 0.5, .weight_decay = 0.1}, 0}, /* rho_inf = 3, so updates
                                                              are never rectified */
                 {{.clip = 0.5, .weight_decay = 0.1}, 3},
                 {{.clip = 0.5, .weight_decay = 0.1}, 5},
                 {{.clip = 0.5, .weight_decay = 0.1}, 8}};

    size_t i;
    int skip;
    for (skip = 0; skip < 2; skip++)
        for (i = 0; i < sizeof cases / sizeof *cases; i++) {
            stx_optim_desc d = cases[i].d;
            d.radam_skip = skip;
            radam(d, cases[i].stop);
        }
}

/* LAMB must compute norms over a whole tensor, even if the tensor is divided into
   chunks; a tensor of zeros must have a trust ratio of 1; and a saved run must continue
   bit-identically. */
static void lambs(void) {
    stx_optim_desc d;
    stx_ctx *x[2];
    stx_params *p[2];
    stx_optim *o[2];
    stx_tensor *big[2], *zero[2];
    size_t n = 10000, i;
    double p2 = 0, phi;
    char path[1024];
    stx_writer *w;
    stx_file *f;
    int k, step;
    stx_real *keep = (stx_real *)malloc(n * sizeof *keep);
    memset(&d, 0, sizeof d);
    d.kind = STX_LAMB;
    for (k = 0; k < 2; k++) {
        x[k] = plain(1, 1);
        p[k] = stx_params_create(x[k]);
        big[k] = stx_param(p[k], STX_NORMAL, 1, "big", n, 0, 0, 0);
        zero[k] = stx_param(p[k], STX_ZEROS, 0, "zero", 3, 0, 0, 0);
        o[k] = stx_optim_create(p[k], &d);
    }
    CHECK(o[0] && o[0]->desc.eps == 1e-6, "%s", stx_error(x[0]));
    for (i = 0; i < n; i++) {
        keep[i] = big[0]->data[i];
        p2 += (double)keep[i] * (double)keep[i];
        big[0]->grad[i] = (stx_real)(i % 2 ? 0.5 : -2);
    }
    zero[0]->grad[0] = 1;
    phi = sqrt(p2) / sqrt((double)n); /* up to eps, all elements of the first direction
                                         are 1 or -1 */
    CHECK(stx_optim_step(o[0], 0.01) == 1, "%s", stx_error(x[0]));
    for (i = 0; i < n; i += 999)
        CHECK(CLOSE(big[0]->data[i], keep[i] - 0.01 * phi * (i % 2 ? 1 : -1), 1e-6),
              "LAMB, element %zu: %g becomes %g", i, (double)keep[i], (double)big[0]->data[i]);
    CHECK(CLOSE(zero[0]->data[0], -0.01, 1e-6) && zero[0]->data[1] == 0 && big[0]->grad[9] == 0,
          "LAMB, zeros: %g", (double)zero[0]->data[0]);

    test_path(path, sizeof path, "test_api.lamb");
    w = stx_writer_create(x[0]);
    CHECK(stx_params_save(w, p[0], "") && stx_optim_save(w, o[0]) && stx_writer_finish(w, path),
          "%s", stx_error(x[0]));
    f = stx_file_open(x[1], path);
    CHECK(f && stx_params_load(p[1], f, "") && stx_optim_load(o[1], f) && o[1]->step == 1, "%s",
          stx_error(x[1]));
    stx_file_close(f);
    remove(path);
    for (step = 0; step < 4; step++) {
        for (k = 0; k < 2; k++) {
            for (i = 0; i < n; i++) big[k]->grad[i] = (stx_real)sin((double)i + step);
            CHECK(stx_optim_step(o[k], 0.02) == 1, "%s", stx_error(x[k]));
        }
        CHECK(!memcmp(big[0]->data, big[1]->data, n * sizeof(stx_real))
                  && !memcmp(zero[0]->data, zero[1]->data, 3 * sizeof(stx_real)),
              "LAMB, saved and loaded: update %d differs", step);
    }
    free(keep);
    stx_destroy(x[0]);
    stx_destroy(x[1]);
}

/* Computes one update of an element with betas b1 and b2, either of which may be 0. */
static void beta_formula(int kind, double b1, double b2, int t, double g, double *th, double *m,
                         double *v) {
    double c1 = 1 - pow(b1, t), c2 = 1 - pow(b2, t);
    *m = b1 * *m + (1 - b1) * g;
    *v = b2 * *v + (1 - b2) * g * g;
    if (kind != STX_RADAM)
        *th -= 0.1 * *m / c1 / (sqrt(*v / c2) + 1e-8);
    else if (radam_rho(b2, t) < 5)
        *th -= 0.1 * *m / c1;
    else
        *th -= 0.1 * sqrt(c2 * radam_r2(b2, t)) / c1 * *m / (sqrt(*v) + 1e-8);
}

/* Tests betas of 0, which a desc selects by -1. Adam, AdamW and RAdam then have no
   memory of gradients, of their squares, or of both. zero selects the betas that are 0:
   1 for beta1, 2 for beta2, 3 for both. */
static void zero_betas_case(int kind, int zero) {
    double b1 = zero & 1 ? 0 : 0.9, b2 = zero & 2 ? 0 : 0.999;
    radam_state s = {{0.5, 0.5, 0.5}, {0, 0, 0}, {0, 0, 0}};
    stx_optim_desc d;
    rule_run r;
    int t, i;
    memset(&d, 0, sizeof d);
    d.kind = kind;
    d.beta1 = zero & 1 ? -1 : 0;
    d.beta2 = zero & 2 ? -1 : 0;
    rule_make(&r, &d);
    CHECK(r.o != NULL, "betas %g and %g: %s", d.beta1, d.beta2, stx_error(r.x));
    for (t = 1; t <= 12 && r.o; t++) {
        for (i = 0; i < 3; i++) {
            double g = sin(t + 2.0 * i);
            r.w->grad[i] = (stx_real)g;
            beta_formula(kind, b1, b2, t, g, &s.th[i], &s.m[i], &s.v[i]);
        }
        CHECK(stx_optim_step(r.o, 0.1) == 1, "%s", stx_error(r.x));
        for (i = 0; i < 3; i++)
            CHECK(CLOSE(r.w->data[i], s.th[i], sizeof(stx_real) == 8 ? 1e-13 : 2e-6),
                  "kind %d, betas %g and %g, update %d, element %d: expected %.9g, got %.9g", kind,
                  b1, b2, t, i, s.th[i], (double)r.w->data[i]);
    }
    if (r.o)
        CHECK(r.o->desc.beta1 == (zero & 1 ? -1 : 0.9)
                  && r.o->desc.beta2 == (zero & 2 ? -1 : 0.999),
              "the resolved desc has betas %g and %g", r.o->desc.beta1, r.o->desc.beta2);
    stx_destroy(r.x);
}

static void zero_betas(void) {
    static const int kinds[] = {STX_ADAM, STX_ADAMW, STX_RADAM};
    int k, zero;
    for (k = 0; k < 3; k++)
        for (zero = 1; zero < 4; zero++) zero_betas_case(kinds[k], zero);
}

/* Clipping by value must not hide a gradient that is not finite: the update must be
   skipped. */
static void clipped_infinity(void) {
    static const double bad[] = {HUGE_VAL, -HUGE_VAL, NAN};
    int k;
    for (k = 0; k < 3; k++) {
        stx_ctx *x = plain(1, 1);
        stx_params *p = stx_params_create(x);
        stx_tensor *w = stx_param(p, STX_CONSTANT, 0.5, "w", 3, 0, 0, 0);
        stx_optim_desc d;
        stx_optim *o;
        memset(&d, 0, sizeof d);
        d.clip_value = 0.25;
        o = stx_optim_create(p, &d);
        w->grad[0] = 1;
        w->grad[1] = (stx_real)bad[k];
        w->grad[2] = -1;
        CHECK(!stx_optim_step(o, 0.1) && stx_ok(x) && o->skipped == 1 && o->step == 0,
              "a gradient of %g: skipped %d, step %d: %s", bad[k], (int)o->skipped, (int)o->step,
              stx_error(x));
        CHECK(w->data[0] == (stx_real)0.5 && w->data[1] == (stx_real)0.5
                  && w->data[2] == (stx_real)0.5,
              "a gradient of %g changes parameters", bad[k]);
        w->grad[0] = w->grad[1] = w->grad[2] = 1;
        CHECK(stx_optim_step(o, 0.1) && o->step == 1, "the update after a gradient of %g", bad[k]);
        stx_destroy(x);
    }
}

/* Checks that the learning rate of update n equals `want` within the relative or
   absolute tolerance tol. */
static void check_lr(const char *what, const stx_schedule *s, uint64_t n, double want, double tol) {
    double lr = stx_schedule_lr(s, n);
    CHECK(CLOSE(lr, want, tol), "%s, warm-up %d, update %d: expected %.12g, got %.12g", what,
          (int)s->warmup, (int)n, want, lr);
}

static const double pi = 3.14159265358979323846;

/* Tests the literal schedules of the references. Their formulas use n - 1 for update n,
   except that the constant and cosine schedules start at the full learning rate. */
static void literal_schedules(uint64_t W, uint64_t n) {
    const stx_schedule constant = {.kind = STX_LR_CONSTANT, .literal = 1, .lr = 2, .warmup = W},
                       cosine = {.kind = STX_LR_COSINE,
                                 .literal = 1,
                                 .lr = 2,
                                 .lr_min = 0.1,
                                 .warmup = W,
                                 .total = 5000},
                       root = {.kind = STX_LR_INV_SQRT, .literal = 1, .lr = 2, .warmup = W};
    double s = (double)(n - 1), w = (double)W, want;
    if (n == 1)
        want = 2;
    else if (s < w)
        want = 2 * s / w;
    else
        want = W > 1 ? 2 * (w - 1) / w : 2;
    check_lr("literal constant", &constant, n, want, 1e-14);
    if (n > 1 && s >= w) want = 0.1 + 1.9 * (1 + cos(pi * s / 5000)) / 2;
    check_lr("literal cosine", &cosine, n, want, 1e-14);
    if (n == 1)
        want = W ? 0 : 2;
    else
        want = s <= w ? 2 * s / (w * sqrt(w)) : 2 / sqrt(s);
    check_lr("literal inverse root", &root, n, want, 1e-14);
}

/* Schedules that are not literal must peak at n = W and be continuous. */
static void our_schedules(uint64_t W, uint64_t n) {
    const stx_schedule constant = {.kind = STX_LR_CONSTANT, .lr = 0.07, .warmup = W},
                       start = {.kind = STX_LR_CONSTANT, .lr = 0.07, .lr_start = 0.01, .warmup = W},
                       cosine = {.kind = STX_LR_COSINE,
                                 .lr = 2,
                                 .lr_min = 0.1,
                                 .warmup = W,
                                 .total = 1200},
                       root = {.kind = STX_LR_INV_SQRT, .lr = 2, .warmup = W};
    double w = (double)W, k = (double)n, share = n < W ? k / w : 1, descent = 1;
    check_lr("constant", &constant, n, 0.07 * share, 1e-14);
    check_lr("constant from lr_start", &start, n, n < W ? 0.01 + 0.06 * share : 0.07, 1e-14);
    if (n < 1200) descent = (k - w) / (1200 - w);
    check_lr("cosine", &cosine, n, n < W ? 2 * share : 0.1 + 1.9 * (1 + cos(pi * descent)) / 2,
             1e-13);
    if (W) check_lr("inverse root", &root, n, n < W ? 2 * share : 2 * sqrt(w / k), 1e-13);
}

static void cosine_schedules(void) {
    /* warm-up 4, total 10, lr 1, as in Transformer-XL */
    static const double example[] = {1,   0.25,     0.5,      0.75,     0.654508,
                                     0.5, 0.345492, 0.206107, 0.095492, 0.024472};
    const stx_schedule
        literal = {.kind = STX_LR_COSINE, .literal = 1, .lr = 1, .warmup = 4, .total = 10},
        ends = {.kind = STX_LR_COSINE, .lr = 2, .lr_min = 0.1, .warmup = 10, .total = 100},
        endless = {.kind = STX_LR_COSINE, .lr = 2, .lr_min = 0.1};
    uint64_t n;
    for (n = 1; n <= 10; n++)
        CHECK(fabs(stx_schedule_lr(&literal, n) - example[n - 1]) <= 6e-7,
              "literal cosine, update %d", (int)n);
    CHECK(stx_schedule_lr(&ends, 10) == 2 && CLOSE(stx_schedule_lr(&ends, 100), 0.1, 1e-14)
              && CLOSE(stx_schedule_lr(&ends, 1000000), 0.1, 1e-14),
          "the ends of the cosine");
    CHECK(stx_schedule_lr(&endless, 5) >= 0.1, "a cosine without total is not finite");
}

/* Computes each learning rate of the recursive cosine from the previous one, as the SRU
   trainer does, for both kinds of warm-up. */
static void recursive_rates(uint64_t W) {
    const stx_schedule
        ours = {.kind = STX_LR_RECURSIVE, .lr = 2, .warmup = W, .total = 1000},
        literal = {.kind = STX_LR_RECURSIVE, .literal = 1, .lr = 2, .warmup = W, .total = 1000},
        between = {.kind = STX_LR_RECURSIVE,
                   .lr = 2,
                   .lr_start = 0.5,
                   .lr_min = 0.1,
                   .warmup = W,
                   .total = 1000},
        to_min = {.kind = STX_LR_RECURSIVE, .lr = 2, .lr_min = 0.1, .warmup = W, .total = 1000};
    double w = (double)W, lr = 0, lr_literal = 0, low = 0;
    uint64_t n;
    for (n = 1; n <= 1000; n++) {
        double k = (double)(n - 1), f = (1 + cos(pi * k / 1000)) / (1 + cos(pi * (k - 1) / 1000));
        if (k < w) {
            lr = 2 * (k + 1) / w;
            lr_literal = 2 * k / w;
            low = 0.5 + 1.5 * (k + 1) / w;
        } else if (n == 1) {
            lr = lr_literal = low = 2;
        } else {
            lr *= f;
            lr_literal *= f;
            low = 0.1 + (low - 0.1) * f;
        }
        check_lr("recursive cosine", &ours, n, lr, 1e-11);
        check_lr("literal recursive cosine", &literal, n, lr_literal, 1e-11);
        check_lr("recursive cosine between two rates", &between, n, low, 1e-11);
    }
    CHECK(fabs(stx_schedule_lr(&to_min, 1001) - 0.1) <= 1e-14
              && stx_schedule_lr(&to_min, 1500) == stx_schedule_lr(&to_min, 1001),
          "the end of the recursive cosine");
}

static void recursive_schedules(void) {
    /* update n here is update n - 1 in the reference */
    static const struct {
        uint64_t n;
        double want;
    } sru[] = {{16001, 2.99999852e-4}, {200001, 1.50593664e-4}, {300001, 4.41078630e-5}};

    static const uint64_t warmup[] = {0, 1, 2, 7, 300};
    const stx_schedule reference = {.kind = STX_LR_RECURSIVE,
                                    .lr = 3e-4,
                                    .warmup = 16000,
                                    .total = 400000},
                       literal = {.kind = STX_LR_RECURSIVE,
                                  .literal = 1,
                                  .lr = 3e-4,
                                  .warmup = 16000,
                                  .total = 400000},
                       endless = {.kind = STX_LR_RECURSIVE, .lr = 2, .warmup = 10},
                       short_ = {.kind = STX_LR_RECURSIVE, .lr = 2, .warmup = 10, .total = 9};
    int i;
    for (i = 0; i < 3; i++) {
        double lr = stx_schedule_lr(&reference, sru[i].n);
        CHECK(fabs(lr - sru[i].want) <= 6e-9 * sru[i].want,
              "recursive cosine, update %d: expected %.9g, got %.9g", (int)sru[i].n, sru[i].want,
              lr);
    }
    for (i = 0; i < 5; i++) recursive_rates(warmup[i]);
    CHECK(stx_schedule_lr(&literal, 1) == 0 && stx_schedule_lr(&reference, 16000) == 3e-4,
          "the ends of both warm-ups");
    CHECK(stx_schedule_lr(&endless, 50) == 2 && stx_schedule_lr(&short_, 50) == 2,
          "a recursive cosine without a descent");
}

/* Tests the Noam schedule, with the reference's settings for PTB. */
static void noam_schedules(void) {
    const stx_schedule ptb = {.kind = STX_LR_NOAM, .lr = 3, .dim = 1024, .warmup = 32000},
                       plain_root = {.kind = STX_LR_NOAM, .lr = 3};
    uint64_t n;
    for (n = 0; n < 100000; n += n < 5 ? 1 : 997) {
        double k = n ? (double)n : 1;
        CHECK(CLOSE(stx_schedule_lr(&ptb, n) * 1e4,
                    3e4 / 32 * (k < 32000 ? k * pow(32000, -1.5) : pow(k, -0.5)), 1e-12),
              "noam, update %d: %g", (int)n, stx_schedule_lr(&ptb, n));
        CHECK(CLOSE(stx_schedule_lr(&plain_root, n), 3 / sqrt(k), 1e-14),
              "noam without warm-up, update %d", (int)n);
    }
}

/* Tests a decay by 0.98 per epoch of 40 updates, starting after update 160; a single
   decay; and no decay. */
static void decayed_schedule(int kind, uint64_t n) {
    stx_schedule s = {
        .kind = kind, .lr = 2, .warmup = 10, .total = 500, .decay_from = 160, .decay_every = 40};
    double lr = stx_schedule_lr(&s, n), factor = 1;
    uint64_t k;
    s.decay = 0.98;
    for (k = 160; k < n; k += 40) factor *= 0.98;
    CHECK(n > 160 ? CLOSE(stx_schedule_lr(&s, n), lr * factor, 1e-14)
                  : stx_schedule_lr(&s, n) == lr,
          "decay of schedule %d, update %d", kind, (int)n);
    s.decay_every = 0;
    CHECK(CLOSE(stx_schedule_lr(&s, n), lr * (n > 160 ? 0.98 : 1), 1e-15),
          "one decay of schedule %d, update %d", kind, (int)n);
    s.decay = 0;
    CHECK(stx_schedule_lr(&s, n) == lr, "no decay of schedule %d, update %d", kind, (int)n);
}

static void schedules(void) {
    static const uint64_t warmup[] = {0, 1, 4, 1000};
    uint64_t n;
    int i;
    for (i = 0; i < 4; i++)
        for (n = 1; n < 1300; n += n < 20 ? 1 : 37) {
            our_schedules(warmup[i], n);
            literal_schedules(warmup[i], n);
        }
    cosine_schedules();
    recursive_schedules();
    noam_schedules();
    for (i = STX_LR_CONSTANT; i <= STX_LR_NOAM; i++)
        for (n = 1; n < 400; n++) decayed_schedule(i, n);
}


/* >>random numbers, lifetimes */

static void philox(void) {
    /* test vectors for philox4x32-10 from the file kat_vectors of Random123 */
    static const struct {
        uint64_t seed, hi, lo;
        uint32_t want[4];
    } kat[] = {{0, 0, 0, {0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u}},
               {~(uint64_t)0,
                ~(uint64_t)0,
                ~(uint64_t)0,
                {0x408f276du, 0x41c83b0eu, 0xa20bc7c6u, 0x6d5451fdu}},
               {((uint64_t)0x299f31d0u << 32) | 0xa4093822u,
                ((uint64_t)0x03707344u << 32) | 0x13198a2eu,
                ((uint64_t)0x85a308d3u << 32) | 0x243f6a88u,
                {0xd16cfe09u, 0x94fdccebu, 0x5001e420u, 0x24126ea1u}}};

    int i;
    for (i = 0; i < 3; i++) {
        uint32_t r[4];
        stx_philox(kat[i].seed, kat[i].hi, kat[i].lo, r);
        CHECK(!memcmp(r, kat[i].want, sizeof r), "vector %d: %08x %08x %08x %08x", i,
              (unsigned)r[0], (unsigned)r[1], (unsigned)r[2], (unsigned)r[3]);
    }
}

/* Constants and scalars must persist across steps, and a backward pass must be able to
   start from several tensors. */
static void persistent_tensors(void) {
    static const stx_real table[6] = {1, -2, 3, 0.5, 4, -1}, v[6] = {2, 1, -1, 3, 0.25, 1},
                          dy[6] = {1, 0, 2, -1, 3, 0.5};
    stx_ctx *x = plain(1, 1);
    stx_tensor *c = stx_constant_create(x, table, 2, 3, 0, 0), *s = stx_scalar_create(x, 3), *y[3],
               *var;
    const stx_real *seeds[3] = {dy, NULL, NULL};
    stx_real g[6];
    stx_params *p = stx_params_create(x);
    stx_tensor *w = stx_param(p, STX_CONSTANT, 2, "w", 3, 0, 0, 0);
    int step, i;
    CHECK(c && s && c->ndim == 2 && c->dim[0] == 2 && c->dim[1] == 3 && c->size == 6
              && !c->needs_grad && !c->is_param && !s->needs_grad && s->size == 1 && s->is_f32,
          "constants");
    for (step = 0; step < 4; step++) {
        stx_scalar_set(x, s, 3 + step);
        stx_begin(x, STX_TRAIN);
        var = stx_variable(x, v, 2, 3, 0, 0);
        y[0] = stx_scale_by(x, stx_mul(x, var, c), s);
        stx_get(x, y[0], g);
        for (i = 0; i < 6; i++)
            CHECK(g[i] == v[i] * table[i] * (stx_real)(3 + step), "step %d: %g", step,
                  (double)g[i]);
        y[1] = stx_sum(x, stx_mul(x, w, w));
        y[2] = NULL;
        stx_params_zero_grad(p);
        stx_backward_many(x, y, step % 2 ? seeds : NULL, 3);
        CHECK(stx_get_grad(x, var, g), "%s", stx_error(x));
        for (i = 0; i < 6; i++)
            CHECK(g[i] == (step % 2 ? dy[i] : 1) * table[i] * (stx_real)(3 + step),
                  "step %d: gradient %d is %g", step, i, (double)g[i]);
        CHECK(stx_get_grad(x, w, g) && g[0] == 4 && g[2] == 4,
              "the gradient of the second tensor: %g", (double)g[0]);
        CHECK(!stx_get_grad(x, c, g) && g[0] == 0 && g[5] == 0 && !stx_get_grad(x, NULL, g)
                  && stx_ok(x),
              "a constant has a gradient");
    }
    stx_destroy(x);
}

/* If the same tensor is passed to stx_backward_many twice, the gradients must add up. A
   second backward pass in a step is an error. */
static void backward_many(void) {
    static const stx_real v[6] = {2, 1, -1, 3, 0.25, 1};
    stx_ctx *x = plain(1, 1);
    stx_tensor *y[3], *var;
    stx_real g[6];
    stx_begin(x, STX_TRAIN);
    y[0] = y[1] = stx_scale(x, stx_variable(x, v, 2, 3, 0, 0), 2);
    y[2] = var = stx_variable(x, v, 6, 0, 0, 0);
    stx_backward_many(x, y, NULL, 3);
    CHECK(stx_ok(x) && stx_get_grad(x, var, g) && g[3] == 1, "backward from a variable: %s",
          stx_error(x));
    stx_begin(x, STX_TRAIN);
    var = stx_variable(x, v, 2, 3, 0, 0);
    y[0] = y[1] = stx_scale(x, var, 2);
    stx_backward_many(x, y, NULL, 2);
    CHECK(stx_get_grad(x, var, g) && g[0] == 4 && g[5] == 4, "backward from one tensor twice: %g",
          (double)g[0]);
    stx_backward_many(x, y, NULL, 1);
    CHECK(stx_error_code(x) == STX_ERR_ARG
              && strstr(stx_error(x), "backward pass of this step removed"),
          "%s", stx_error(x));
    stx_destroy(x);
}

/* After a backward pass, a loss that depends on an earlier result must be refused if a
   gradient would be lost. If that result is detached, the loss must be accepted. */
static void backward_past_removed_ops(void) {
    static const stx_real v[6] = {2, 1, -1, 3, 0.25, 1};
    stx_real g[6];
    int detach;
    for (detach = 0; detach < 2; detach++) {
        stx_ctx *x = plain(1, 1);
        stx_tensor *a, *b, *y;
        stx_begin(x, STX_TRAIN);
        a = stx_variable(x, v, 6, 0, 0, 0);
        b = stx_variable(x, v, 6, 0, 0, 0);
        y = stx_scale(x, a, 2);
        stx_backward_many(x, &y, NULL, 1);
        y = stx_add(x, detach ? stx_detach(x, y) : y, stx_scale(x, b, 3));
        CHECK(stx_ok(x), "an op with the result of an op that was removed: %s", stx_error(x));
        stx_backward_many(x, &y, NULL, 1);
        if (detach) {
            CHECK(stx_get_grad(x, b, g) && g[0] == 3, "the other branch: %s", stx_error(x));
            CHECK(stx_get_grad(x, a, g) && g[0] == 2, "the first backward pass");
        } else {
            CHECK(stx_error_code(x) == STX_ERR_ARG && strstr(stx_error(x), "would be lost"), "%s",
                  stx_error(x));
        }
        stx_destroy(x);
    }
}

static void lifetimes(void) {
    persistent_tensors();
    backward_many();
    backward_past_removed_ops();
}

static const size_t grads_size[3] = {7, 64, 130};

/* Checks that the block g of all gradients has the same norm as the gradients of the
   tensors t together. */
static void check_block_norm(const stx_real *g, size_t n, stx_tensor *const *t) {
    double sum = 0, want = 0;
    size_t e;
    int k;
    for (e = 0; e < n; e++) sum += (double)g[e] * (double)g[e];
    for (k = 0; k < 3; k++)
        for (e = 0; e < grads_size[k]; e++) want += (double)t[k]->grad[e] * (double)t[k]->grad[e];
    CHECK(sum > 0 && CLOSE(sum, want, 1e-12), "the norm of the block: expected %g, got %g", want,
          sum);
}

/* Runs three steps, with all gradients in one block if `one` is set, otherwise in
   separate blocks. w receives the parameters. */
static void grads_run(int one, stx_real **w) {
    static const char *const name[3] = {"a", "b", "c"};
    stx_ctx *x = plain(3, 1);
    stx_params *p = stx_params_create(x), *other = stx_params_create(x);
    stx_tensor *t[3], *loss;
    stx_optim *o;
    stx_real *g = NULL;
    size_t n = 0, again = 1;
    int i, k;
    CHECK(!stx_params_grads(p, &n) && n == 0 && strstr(stx_error(x), "at least one parameter"),
          "%s", stx_error(x));
    stx_clear_error(x);
    for (k = 0; k < 3; k++) t[k] = stx_param(p, STX_NORMAL, 1, name[k], grads_size[k], 0, 0, 0);
    stx_param(other, STX_NORMAL, 1, "a", 1000, 0, 0, 0);
    t[1]->grad[5] = 42;
    if (one) {
        g = stx_params_grads(p, &n);
        CHECK(g && n == 64 + 64 + 192 && t[0]->grad == g && t[1]->grad == g + 64
                  && t[2]->grad == g + 128,
              "one block of %zu: %s", n, stx_error(x));
        CHECK(t[1]->grad[5] == 42 && t[1]->grad[6] == 0, "the move to a block changes gradients");
        CHECK(stx_params_grads(p, &again) == g && again == n, "a second call gives another block");
    }
    stx_params_zero_grad(p);
    o = stx_optim_create(p, NULL);
    for (i = 0; i < 3; i++) {
        stx_begin(x, STX_TRAIN);
        loss = stx_add(x, stx_mean(x, stx_mul(x, t[1], t[1])), stx_sum(x, stx_sigmoid(x, t[2])));
        loss = stx_add(x, stx_mean(x, stx_mul(x, t[0], t[0])), loss);
        stx_backward(x, loss);
        if (one) check_block_norm(g, n, t);
        stx_optim_step(o, 0.1);
    }
    if (one)
        CHECK(stx_params_grads(p, &n) == g && stx_ok(x), "the block after stx_optim_create: %s",
              stx_error(x));
    else
        CHECK(!stx_params_grads(p, &n) && strstr(stx_error(x), "before stx_optim_create"), "%s",
              stx_error(x));
    for (k = 0; k < 3; k++) {
        w[k] = (stx_real *)malloc(grads_size[k] * sizeof(stx_real));
        memcpy(w[k], t[k]->data, grads_size[k] * sizeof(stx_real));
    }
    if (one) {
        stx_param(p, STX_ZEROS, 0, "late", 3, 0, 0, 0);
        CHECK(!stx_params_grads(p, &n) && strstr(stx_error(x), "after the last stx_param"), "%s",
              stx_error(x));
    }
    stx_destroy(x);
}

/* stx_params_grads must free a reservation's gradient memory. The gradient of a later
   parameter, which would have fitted into the reservation, must then be allocated
   separately. */
static void grads_end_a_reservation(void) {
    stx_ctx *x = plain(4, 1);
    stx_params *p = stx_params_create(x);
    stx_tensor *a, *b;
    const stx_real *next;
    stx_real *g;
    size_t n;
    CHECK(stx_params_make_contiguous(p, 128), "%s", stx_error(x));
    a = stx_param(p, STX_NORMAL, 1, "a", 64, 0, 0, 0);
    next = a->grad + 64;
    CHECK(stx_params_grads(p, &n) == a->grad && n == 64, "%s", stx_error(x));
    b = stx_param(p, STX_NORMAL, 1, "b", 64, 0, 0, 0);
    CHECK(b && b->grad != next, "the gradient of b is in freed memory");
    if (b && b->grad != next) {
        stx_begin(x, STX_TRAIN);
        stx_backward(x, stx_sum(x, stx_mul(x, a, b)));
        CHECK(b->grad[63] == a->data[63] && a->grad[63] == b->data[63], "wrong gradients");
        g = stx_params_grads(p, &n);
        CHECK(g && n == 128 && b->grad == g + 64 && g[127] == a->data[63], "%s", stx_error(x));
    }
    stx_destroy(x);
}

/* stx_backward and the optimiser must give the same results if all gradients are in one
   block. */
static void grads_in_one(void) {
    stx_real *w[2][3];
    int k;
    grads_run(0, w[0]);
    grads_run(1, w[1]);
    for (k = 0; k < 3; k++) {
        CHECK(!memcmp(w[0][k], w[1][k], grads_size[k] * sizeof(stx_real)), "parameter %d differs",
              k);
        free(w[0][k]);
        free(w[1][k]);
    }
}

/* Moments of a tensor's elements. */
typedef struct moments {
    double mean, square, fourth, low, high; /* square, fourth: means of the second and
                                               fourth powers */
    double lag;                             /* sum of the products of neighbouring
                                               elements, divided by the sum of squares */
} moments;

static moments moments_of(const stx_tensor *t) {
    double n = (double)t->size, s = 0, s2 = 0, s4 = 0, lag = 0;
    moments m = {0, 0, 0, 0, 0, 0};
    size_t i;
    for (i = 0; i < t->size; i++) {
        double v = (double)t->data[i];
        s += v;
        s2 += v * v;
        s4 += v * v * v * v;
        if (i) lag += v * (double)t->data[i - 1];
        m.low = fmin(m.low, v);
        m.high = fmax(m.high, v);
    }
    m.mean = s / n;
    m.square = s2 / n;
    m.fourth = s4 / n;
    m.lag = lag / s2;
    return m;
}

/* Tests the distributions of the initialisers. Tolerances are about four standard
   errors. */
static void distributions(stx_params *p, const stx_tensor *a, const stx_tensor *u) {
    const double n = (double)a->size, root = sqrt(n);
    moments m = moments_of(a);
    stx_tensor *t;
    CHECK(fabs(m.mean) <= 4 * 0.5 / root, "normal: mean %g", m.mean);
    CHECK(fabs(sqrt(m.square) - 0.5) <= 4 * 0.5 / sqrt(2 * n), "normal: deviation %g",
          sqrt(m.square));
    CHECK(fabs(m.fourth / (m.square * m.square) - 3) <= 0.06, "normal: kurtosis %g",
          m.fourth / (m.square * m.square));
    CHECK(fabs(m.lag) <= 4 / root, "normal: neighbours correlate, %g", m.lag);
    m = moments_of(u);
    CHECK(m.high <= 0.25 && m.low >= -0.25 && m.high > 0.2499 && m.low < -0.2499,
          "uniform: range %g %g", m.low, m.high);
    CHECK(fabs(m.mean) <= 4 * 0.25 / sqrt(3 * n) && fabs(m.square - 0.0625 / 3) <= 2e-4,
          "uniform: mean %g variance %g", m.mean, m.square);
    /* truncated at two standard deviations, which reduces the standard deviation to
       0.8796 of the nominal one */
    t = stx_param(p, STX_TRUNCATED, 0.5, "t", a->size, 0, 0, 0);
    m = moments_of(t);
    CHECK(m.high <= 1 && m.low >= -1 && m.high > 0.999 && m.low < -0.999, "truncated: range %g %g",
          m.low, m.high);
    CHECK(fabs(m.mean) <= 4 * 0.44 / root
              && fabs(sqrt(m.square) - 0.5 * 0.87962566103423978) <= 4 * 0.44 / sqrt(2 * n),
          "truncated: mean %g, deviation %g", m.mean, sqrt(m.square));
}

static double place_times(void *user, size_t i, double was) {
    (void)was;
    return *(double *)user * (double)i;
}

/* Tests functions that write rows of a parameter after its creation. */
static void written_rows(stx_params *p) {
    stx_ctx *x = p->ctx;
    stx_tensor *t = stx_param(p, STX_UNIFORM, 1, "rows", 5, 7, 0, 0);
    stx_real want[35];
    double three = 3;
    size_t i;
    memcpy(want, t->data, sizeof want);
    for (i = 7; i < 21; i++) want[i] = (stx_real)((double)want[i] * 0.1);
    for (i = 28; i < 35; i++) want[i] = (stx_real)-2.5;
    stx_param_scale(x, t, 1, 3, 0.1);
    stx_param_fill(x, t, 4, 5, -2.5);
    for (i = 0; i < 35; i++)
        CHECK(t->data[i] == want[i], "scaled and filled rows: element %zu is %g", i,
              (double)t->data[i]);
    stx_param_apply(x, t, place_times, &three);
    for (i = 0; i < 35; i++)
        CHECK(t->data[i] == (stx_real)(3 * i), "stx_param_apply: element %zu is %g", i,
              (double)t->data[i]);
    stx_param_scale(x, NULL, 0, 1, 2);
    CHECK(stx_ok(x), "%s", stx_error(x));
}

/* The values of a parameter must depend only on the seed and its position in the list,
   not on threads, shape, earlier calls, chunk size or the contents of memory. */
static void repeated_draws(const stx_tensor *a, const stx_tensor *b) {
    const size_t n = a->size;
    stx_ctx *y = plain(11, 3), *z = plain(12, 1);
    stx_params *q = stx_params_create(y), *r = stx_params_create(z);
    stx_tensor *a2, *b2;
    counter c;
    model m;
    model_make(z, &m, 1, 3, 4, 1, STX_SGD);
    stx_begin(y, STX_TRAIN);
    stx_begin(y, STX_TRAIN);
    a2 = stx_param(q, STX_NORMAL, 0.5, "other name", n, 0, 0, 0);
    b2 = stx_param(q, STX_NORMAL, 0.5, "b", 11, 91, 0, 0);
    CHECK(!memcmp(a->data, a2->data, n * sizeof(stx_real))
              && !memcmp(b->data, b2->data, b->size * sizeof(stx_real)),
          "the same seed and place give other values");
    a2 = stx_param(r, STX_NORMAL, 0.5, "a", n, 0, 0, 0);
    CHECK(memcmp(a->data, a2->data, 64 * sizeof(stx_real)) != 0,
          "another seed gives the same values");
    stx_destroy(y);
    stx_destroy(z);
    memset(&c, 0, sizeof c);
    y = counted(&c, 1, 0, 11, 1);
    q = stx_params_create(y);
    a2 = stx_param(q, STX_NORMAL, 0.5, "a", n, 0, 0, 0);
    CHECK(!memcmp(a->data, a2->data, n * sizeof(stx_real)),
          "chunk size or the contents of memory change the values");
    stx_destroy(y);
}

static void initialisers(void) {
    size_t n = 200003, i;
    stx_ctx *x = plain(11, 1);
    stx_params *p = stx_params_create(x);
    stx_tensor *a = stx_param(p, STX_NORMAL, 0.5, "a", n, 0, 0, 0),
               *b = stx_param(p, STX_NORMAL, 0.5, "b", 7, 11, 13, 0),
               *u = stx_param(p, STX_UNIFORM, 0.25, "u", n, 0, 0, 0),
               *c = stx_param(p, STX_CONSTANT, -1.5, "c", 9, 0, 0, 0),
               *o = stx_param(p, STX_ZEROS, 3, "o", 9, 0, 0, 0);
    for (i = 0; i < 9; i++) CHECK(c->data[i] == (stx_real)-1.5 && o->data[i] == 0, "constants");
    distributions(p, a, u);
    written_rows(p);
    CHECK(memcmp(a->data, b->data, b->size * sizeof(stx_real)) != 0,
          "two parameters have the same values");
    repeated_draws(a, b);
    stx_destroy(x);
}


/* >>maths */

/* Half a unit in the last place for the value 1. */
static const double unit = sizeof(stx_real) == 8 ? 1.2e-16 : 6e-8;

/* In the softmax of (0, v), the ratio of the results must be e^v, up to three
   roundings. */
static void softmax_exponentials(stx_ctx *x) {
    double worst = 0, e;
    int i;
    for (i = 0; i <= 870000; i += 7) {
        stx_real in[2], v = (stx_real)(-1e-4 * i);
        stx_tensor *y;
        if (!(i % 2000)) stx_begin(x, STX_EVAL);
        in[0] = 0;
        in[1] = v;
        y = stx_softmax(x, stx_input(x, in, 2, 0, 0, 0));
        e = fabs((double)y->data[1] / (double)y->data[0] / exp((double)v) - 1);
        if (v > -80) raise_worst(&worst, e);
        if (!CLOSE((double)y->data[0] + (double)y->data[1], 1, 3 * unit)) worst = HUGE_VAL;
    }
    CHECK(worst <= 6 * unit, "softmax: e^v is off by %g", worst);
}

static void exponentials(void) {
    static const stx_real in[5] = {(stx_real)1e30, (stx_real)-1e30, 0, (stx_real)1e30,
                                   -(stx_real)HUGE_VAL},
                          same[3] = {(stx_real)-3e38, (stx_real)-3e38, (stx_real)-3e38};
    const stx_real inf = (stx_real)HUGE_VAL;
    stx_ctx *x = plain(1, 1);
    stx_tensor *y;
    double worst = 0, e;
    int i, k;
    softmax_exponentials(x);
    for (i = -873; i <= 886; i++)
        for (k = 0; k < 50; k++) {
            stx_real v = (stx_real)(i / 10.0 + k * 0.002);
            e = fabs((double)stx_fast_exp(0, v) / exp((double)v) - 1);
            raise_worst(&worst, e);
        }
    CHECK(worst <= 3 * unit, "exp: off by %g, %g roundings", worst, worst / unit);
    CHECK(stx_fast_exp(0, 0) == 1 && stx_fast_exp(0, -inf) == 0 && stx_fast_exp(0, -2000) == 0
              && stx_fast_exp(0, inf) == inf && stx_fast_exp(0, 2000) == inf
              && isnan(stx_fast_exp(0, (stx_real)NAN)),
          "exp: extremes");
    stx_begin(x, STX_EVAL);
    y = stx_softmax(x, stx_input(x, in, 5, 0, 0, 0));
    CHECK(y->data[0] == (stx_real)0.5 && y->data[1] == 0 && y->data[2] == 0
              && y->data[3] == (stx_real)0.5 && y->data[4] == 0,
          "softmax of huge values");
    y = stx_softmax(x, stx_input(x, same, 3, 0, 0, 0));
    CHECK(CLOSE(y->data[2], 1.0 / 3, 1e-6), "softmax of equal huge values");
    y = stx_softmax(x, stx_input(x, same, 3, 1, 0, 0));
    CHECK(y->data[0] == 1 && y->data[2] == 1, "softmax of single values");
    stx_destroy(x);
}

/* Returns the difference between `a` and the exact value b in units in the last place.
   For a denormal, the unit is that of the smallest normal number. */
static double ulps(double a, double b) {
    int digits = sizeof(stx_real) == 8 ? 53 : 24, least = sizeof(stx_real) == 8 ? -1022 : -126;
    int e = b == 0 ? least : ilogb(b);
    if (a == b) return 0;
    return fabs(a - b) / ldexp(1, (e < least ? least : e) - digits + 1);
}

/* The standard normal distribution function; normal_density is its derivative. */
static double normal_cdf(double v) {
    return 0.5 * erfc(-v * 0.70710678118654752440);
}

static double normal_density(double v) {
    return 0.39894228040143267794 * exp(-0.5 * v * v);
}

/* The largest errors of the math functions of the inner loops. Errors are in ulps,
   except that the errors of phi and its density are absolute, and the error of phi's
   tail is relative. bad: the number of wrong NaNs, zeros or infinities. */
typedef struct math_errors {
    double exp, tanh, sigmoid, sqrt, phi, tail, density;
    int bad;
} math_errors;

static void math_errors_at(math_errors *w, int fma, stx_real v) {
    const int single = sizeof(stx_real) == 4;
    const double d = (double)v;
    stx_real density;
    double phi = (double)stx_fast_phi(fma, v, &density), sigmoid = (double)stx_fast_sigmoid(fma, v);
    if (isnan(d)) {
        w->bad += !isnan(stx_fast_exp(fma, v)) || !isnan(stx_fast_tanh(fma, v)) || !isnan(sigmoid)
                  || !isnan(stx_fast_sqrt(fma, v)) || !isnan(phi) || !isnan(density);
        return;
    }
    if (single && d < (double)-87.33f)
        w->bad += stx_fast_exp(fma, v) != 0;
    else if (single && d > (double)88.72f)
        w->bad += !isinf(stx_fast_exp(fma, v));
    else
        raise_worst(&w->exp, ulps((double)stx_fast_exp(fma, v), exp(d)));
    raise_worst(&w->tanh, ulps((double)stx_fast_tanh(fma, v), tanh(d)));
    if (d > -87)
        raise_worst(&w->sigmoid, ulps(sigmoid, 1 / (1 + exp(-d))));
    else
        w->bad += !(sigmoid <= 2e-38);
    raise_worst(&w->phi, fabs(phi - normal_cdf(d)));
    if (d < 0 && d > -13) raise_worst(&w->tail, fabs(phi / normal_cdf(d) - 1));
    raise_worst(&w->density, fabs((double)density - normal_density(d)));
    if (d >= 0 && (!single || d >= FLT_MIN))
        raise_worst(&w->sqrt, ulps((double)stx_fast_sqrt(fma, v), sqrt(d)));
}

/* Returns argument i of `rounds`. Even i give bit patterns that together cover all
   exponents, both signs and NaN. Odd i give first the special values, then values in
   [-15,15]. */
static stx_real math_argument(int i, int rounds) {
    static const double special[] = {0.0,      -0.0,  1e-45,  -1e-45, 1e-39, -1e-39, FLT_MIN,
                                     -FLT_MIN, 0.625, -0.625, 15,     -15,   87.33,  -87.33,
                                     88.376,   88.72, -88.72, 3e38,   -3e38};
    uint32_t bits = (uint32_t)i * 21467u;
    float f;
    memcpy(&f, &bits, 4);
    if (!(i & 1)) return f;
    if (i < (int)(2 * sizeof special / sizeof *special)) return (stx_real)special[i / 2];
    return (stx_real)((i - rounds / 2) * (30.0 / rounds));
}

/* Compares the functions of the inner loops with libm, with and without fma. */
static void maths(void) {
    const stx_real inf = (stx_real)HUGE_VAL;
    int fma, single = sizeof(stx_real) == 4, rounds = 400000, i;
    for (fma = 0; fma < 2; fma++) {
        math_errors w = {0, 0, 0, 0, 0, 0, 0, 0};
        for (i = 0; i < rounds; i++) math_errors_at(&w, fma, math_argument(i, rounds));
        CHECK(!w.bad, "fma %d: %d values for NaN or at the ends are wrong", fma, w.bad);
        CHECK(w.exp <= 1.3, "fma %d: exp is off by %g ulp", fma, w.exp);
        CHECK(w.tanh <= 2, "fma %d: tanh is off by %g ulp", fma, w.tanh);
        CHECK(w.sigmoid <= 2.5, "fma %d: sigmoid is off by %g ulp", fma, w.sigmoid);
        CHECK(w.phi <= (single ? 1e-7 : 4e-16) && w.tail <= (single ? 1e-5 : 1e-13),
              "fma %d: the normal distribution is off by %g, its tail by a factor of 1 + %g", fma,
              w.phi, w.tail);
        CHECK(w.density <= (single ? 1e-7 : 4e-16), "fma %d: the normal density is off by %g", fma,
              w.density);
        CHECK(w.sqrt <= 1, "fma %d: sqrt is off by %g ulp", fma, w.sqrt);
        CHECK(stx_fast_tanh(fma, inf) == 1 && stx_fast_tanh(fma, -inf) == -1
                  && stx_fast_sigmoid(fma, inf) == 1 && stx_fast_sigmoid(fma, -inf) == 0,
              "fma %d: infinity", fma);
        CHECK(stx_fast_sqrt(fma, 0) == 0 && isinf(stx_fast_sqrt(fma, inf))
                  && stx_fast_exp(fma, 0) == 1 && isinf(stx__act_any(fma, inf, STX_ACT_GELU)),
              "fma %d: extremes", fma);
    }
}


/* >>kernels: every kernel, with every instruction set of this machine, is compared with
   a plain loop in double. Results with one thread and with three must be bit-identical.
   Outputs start with the values of c, which shows whether a kernel adds to them or
   overwrites them. */

static double act_of(double v, int act) {
    switch (act) {
    case STX_ACT_RELU: return v > 0 ? v : 0;
    case STX_ACT_GELU: return v * normal_cdf(v);
    case STX_ACT_TANH: return tanh(v);
    case STX_ACT_SIGMOID: return 1 / (1 + exp(-v));
    default: return v;
    }
}

static double slope_of(double v, int act) {
    double y = act_of(v, act);
    switch (act) {
    case STX_ACT_RELU: return v > 0;
    case STX_ACT_GELU: return normal_cdf(v) + v * normal_density(v);
    case STX_ACT_TANH: return 1 - y * y;
    case STX_ACT_SIGMOID: return y * (1 - y);
    default: return 1;
    }
}

/* Stores the arguments in a struct and calls the private kernel. */
static void cluster_log_probs(stx_ctx *x, stx_real *out, stx_real *gate, const stx_real *logits,
                              size_t N, size_t V, size_t start, size_t size, size_t w, size_t K,
                              size_t c, int forward) {
    stx__cluster_log_probs_args k;
    k.N = N;
    k.V = V;
    k.w = w;
    k.K = K;
    k.c = c;
    k.start = start;
    k.size = size;
    k.forward = forward;
    k.logits = logits;
    k.out = out;
    k.gate = gate;
    inner_cluster_log_probs(x, &k);
}

/* Computes the dropout mask of one group of 8 elements from its definition: each
   element uses 16 bits of the group's Philox call. */
static void mask8(stx_real *m, uint64_t seed, uint64_t stream, uint64_t group, uint32_t keep16,
                  stx_real inv) {
    uint32_t r[4];
    int e;
    stx_philox(seed, stream, group, r);
    for (e = 0; e < 8; e++) m[e] = ((r[e >> 1] >> (16 * (e & 1))) & 0xffffu) < keep16 ? inv : 0;
}

enum { WORDS = 7 };

static const stx_real drop_rate = (stx_real)0.3, norm_eps = (stx_real)0.01;

/* Test data for one shape. Of the functions below, only kernels_update changes a, b, c
   or dy; it runs last. */
typedef struct kernel_data {
    stx_ctx *one, *many;                             /* contexts with one thread and with three */
    size_t N, C, n, size;                            /* n = N C elements; size: capacity
                                                        of a buffer */
    stx_real *a, *b, *c, *dy;                        /* inputs */
    stx_real *y1, *y3;                               /* outputs of the two contexts */
    stx_real *act_y, *mean, *rstd, *sm, *m, *v, *v0; /* saved values and state */
    stx_real *mask;                                  /* dropout mask for seed 11, stream 5 */
    double *s, *q, *w, *want;                        /* exact values */
    int32_t *ids;                                    /* (N): ids below the minimum of C and WORDS */
} kernel_data;

static kernel_data kernel_data_make(stx_ctx *one, stx_ctx *many, size_t N, size_t C) {
    kernel_data f;
    size_t e, n = N * C, size = n + 2 * C + 2 * N + 80;
    uint32_t keep = inner_keep(drop_rate);
    f.one = one;
    f.many = many;
    f.N = N;
    f.C = C;
    f.n = n;
    f.size = size;
    f.a = random_values(size);
    f.b = random_values(size);
    f.c = random_values(size);
    f.dy = random_values(size);
    f.y1 = random_values(size);
    f.y3 = random_values(size);
    f.act_y = random_values(size);
    f.mean = random_values(N);
    f.rstd = random_values(N);
    f.sm = random_values(size);
    f.m = random_values(n);
    f.v = random_values(n);
    f.v0 = random_values(n);
    f.mask = (stx_real *)malloc((n + 8) * sizeof *f.mask);
    f.s = (double *)calloc(size, sizeof *f.s);
    f.q = (double *)malloc((C + N) * sizeof *f.q);
    f.w = (double *)malloc(size * sizeof *f.w);
    f.want = (double *)malloc(size * sizeof *f.want);
    f.ids = (int32_t *)malloc(N * sizeof *f.ids);
    for (e = 0; e < n; e++) f.a[e] *= 3;
    for (e = 0; e < N; e++) f.ids[e] = (int32_t)((e * 5 + 3) % (C < WORDS ? C : WORDS));
    for (e = 0; e < n; e += 8) mask8(f.mask + e, 11, 5, e / 8, keep, (stx_real)(65536.0 / keep));
    return f;
}

static void kernel_data_free(kernel_data *f) {
    free(f->a);
    free(f->b);
    free(f->c);
    free(f->dy);
    free(f->y1);
    free(f->y3);
    free(f->act_y);
    free(f->mean);
    free(f->rstd);
    free(f->sm);
    free(f->m);
    free(f->v);
    free(f->v0);
    free(f->mask);
    free(f->s);
    free(f->q);
    free(f->w);
    free(f->want);
    free(f->ids);
}

static void check_kernel(const kernel_data *f, const char *what, size_t count, double units) {
    double worst = 0;
    size_t e;
    for (e = 0; e < count; e++)
        raise_worst(&worst, fabs((double)f->y1[e] - f->want[e]) / fmax(1, fabs(f->want[e])));
    CHECK(worst <= units * unit, "%s, (%zu,%zu), instruction set %d: off by %g roundings", what,
          f->N, f->C, inner_isa(f->one), worst / unit);
    CHECK(!memcmp(f->y1, f->y3, f->size * sizeof *f->y1),
          "%s, (%zu,%zu), instruction set %d: threads change bits", what, f->N, f->C,
          inner_isa(f->one));
}

/* Runs `call` with context x and output y, and compares y[i] with `expected` for each i
   below `count`, allowing `units` roundings. */
#define KERNEL(f, what, count, units, call, expected) \
  do { \
    size_t t, i; \
    for (t = 0; t < 2; t++) { \
      stx_ctx *x = t ? (f)->many : (f)->one; \
      stx_real *y = t ? (f)->y3 : (f)->y1; \
      memcpy(y, (f)->c, (f)->size * sizeof *y); \
      call; \
    } \
    for (i = 0; i < (size_t)(count); i++) (f)->want[i] = (expected); \
    check_kernel(f, what, count, units); \
  } while (0)

/* Returns the number of roundings allowed for a sum of n terms: 0 in a float build,
   which sums in double. */
static double sum_units(size_t n) {
    return (double)(sizeof(stx_real) / 8 * n);
}

/* Computes q[j] as the sum over rows of a[j] b[j], or of a[j] if b is NULL. */
static void column_sums(const kernel_data *f, double *q, const stx_real *a, const stx_real *b) {
    size_t j, r;
    for (j = 0; j < f->C; j++)
        for (q[j] = 0, r = 0; r < f->N; r++)
            q[j] += (double)a[r * f->C + j] * (b ? (double)b[r * f->C + j] : 1);
}

static void kernels_elementwise(kernel_data *f) {
    const stx_real *a = f->a, *b = f->b, *c = f->c, *dy = f->dy, s = (stx_real)0.3;
    const size_t n = f->n, C = f->C;
    const double rows = 16 + 2 * (double)f->N;
    stx_optim_chunk p;
    KERNEL(f, "fill", n, 0, stx_fill(x, y, n, 3), 3);
    KERNEL(f, "axpy =", n, 1, stx_axpy(x, y, a, n, s, 0), (double)s * (double)a[i]);
    KERNEL(f, "axpy +=", n, 2, stx_axpy(x, y, a, n, s, 1), (double)c[i] + (double)s * (double)a[i]);
    KERNEL(f, "add", n, 1, stx_add_fwd(x, y, a, b, n, n), (double)a[i] + (double)b[i]);
    KERNEL(f, "add rows", n, 1, stx_add_fwd(x, y, a, b, n, C), (double)a[i] + (double)b[i % C]);
    KERNEL(f, "mul", n, 1, stx_mul_fwd(x, y, a, b, n, n), (double)a[i] * (double)b[i]);
    KERNEL(f, "mul rows", n, 1, stx_mul_fwd(x, y, a, b, n, C), (double)a[i] * (double)b[i % C]);
    KERNEL(f, "mul da =", n, 1, k_mul_bwd(x, y, NULL, dy, a, b, n, C, 0),
           (double)dy[i] * (double)b[i % C]);
    KERNEL(f, "mul da +=", n, 2, k_mul_bwd(x, y, NULL, dy, a, b, n, C, 1),
           (double)c[i] + (double)dy[i] * (double)b[i % C]);
    KERNEL(f, "mul db", n, 4, k_mul_bwd(x, NULL, y, dy, a, b, n, n, 0),
           (double)c[i] + (double)dy[i] * (double)a[i]);
    column_sums(f, f->q, dy, a);
    KERNEL(f, "mul db rows", C, rows, k_mul_bwd(x, NULL, y, dy, a, b, n, C, 0),
           (double)c[i] + f->q[i]);
    column_sums(f, f->q, dy, NULL);
    KERNEL(f, "sum_rows", C, rows, stx_sum_rows(x, y, dy, f->N, C), (double)c[i] + f->q[i]);
    KERNEL(f, "clamp", n, 0,
           (stx_axpy(x, y, a, n, 1, 0), p.p = y, p.n = n, stx_clamp(x, &p, 1, -1, 1)),
           fmax(-1, fmin(1, (double)a[i])));
}

/* Copies between rows of different strides. The stride of the output rows is C + 2. */
static void kernels_copy(kernel_data *f) {
    const stx_real *a = f->a, *b = f->b, *c = f->c;
    const size_t N = f->N, C = f->C, ld = C + 2;
    size_t j;
    KERNEL(f, "copy2d +=", N * ld, 2, stx_copy2d(x, y, ld, a, C, N, C, 1),
           (double)c[i] + (i % ld < C ? (double)a[i / ld * C + i % ld] : 0));
    KERNEL(f, "copy2d =", N * ld, 0, stx_copy2d(x, y, ld, a, C, N, C, 0),
           (double)(i % ld < C ? a[i / ld * C + i % ld] : c[i]));
    KERNEL(f, "concat2d", N * ld, 0, stx_concat2d(x, y, a, C, C, b, C + 1, 2, N),
           (double)(i % ld < C ? a[i / ld * C + i % ld] : b[i / ld * (C + 1) + i % ld - C]));
    for (j = 1; j <= C; j += C > 4 ? C / 4 : 1)
        KERNEL(f, "shift2d", f->n, 0, inner_shift2d(x, y, C, C, a, C, j, N),
               (double)(i % C < C - j ? c[i + j] : a[i / C * C + i % C - (C - j)]));
    /* rows with gaps; no values are shifted in */
    for (j = 1; j <= C; j += C > 4 ? C / 4 : 1)
        KERNEL(f, "shift2d with gaps", N * ld, 0, inner_shift2d(x, y, ld, C, NULL, 0, j, N),
               (double)(i % ld < C - j ? c[i + j] : c[i]));
}

static void kernels_embedding(kernel_data *f) {
    const stx_real *a = f->a, *c = f->c, *dy = f->dy;
    const int32_t *ids = f->ids;
    const size_t N = f->N, C = f->C, n = f->n;
    size_t e;
    if (N < WORDS) return;
    KERNEL(f, "embedding", n, 1, stx_embedding_fwd(x, y, a, ids, N, C),
           (double)a[(size_t)ids[i / C] * C + i % C]);
    for (e = 0; e < WORDS * C; e++) f->s[e] = 0;
    for (e = 0; e < n; e++) f->s[(size_t)ids[e / C] * C + e % C] += (double)dy[e];
    KERNEL(f, "embedding dtable", WORDS * C, 16 + 2 * (double)N,
           stx_embedding_bwd(x, y, dy, ids, N, C), (double)c[i] + f->s[i]);
}

static void kernels_act(kernel_data *f) {
    const stx_real *a = f->a, *b = f->b, *c = f->c, *dy = f->dy;
    const size_t N = f->N, C = f->C, n = f->n;
    int act;
    for (act = STX_ACT_NONE; act <= STX_ACT_SIGMOID; act++) {
        stx_act_fwd(f->one, f->act_y, a, n, act);
        KERNEL(f, "act", n, 4, stx_act_fwd(x, y, a, n, act), act_of((double)a[i], act));
        KERNEL(f, "act da =", n, 8, k_act_bwd(x, y, dy, f->act_y, a, n, act, 0),
               (double)dy[i] * slope_of((double)a[i], act));
        KERNEL(f, "act da +=", n, 8, k_act_bwd(x, y, dy, f->act_y, a, n, act, 1),
               (double)c[i] + (double)dy[i] * slope_of((double)a[i], act));
        KERNEL(f, "act da in place", n, 8, k_act_bwd(x, y, y, f->act_y, a, n, act, 0),
               (double)c[i] * slope_of((double)a[i], act));
        KERNEL(f, "bias_act", n, 6, stx_bias_act_fwd(x, y, NULL, b, N, C, act),
               act_of((double)c[i] + (double)b[i % C], act));
        KERNEL(f, "bias_act pre", n, 1,
               (memcpy(f->sm, a, n * sizeof *a), stx_bias_act_fwd(x, f->sm, y, b, N, C, act)),
               (double)a[i] + (double)b[i % C]);
        KERNEL(f, "bias_act without a bias", n, 4, stx_bias_act_fwd(x, y, NULL, NULL, N, C, act),
               act_of((double)c[i], act));
    }
}

/* Sets s to the normalised rows of a, and q to the reciprocal standard deviation of
   each row. */
static void normalise(kernel_data *f) {
    const size_t C = f->C;
    size_t r, j;
    for (r = 0; r < f->N; r++) {
        const stx_real *row = f->a + r * C;
        double mean = 0, variance = 0;
        for (j = 0; j < C; j++) mean += (double)row[j] / (double)C;
        for (j = 0; j < C; j++)
            variance += ((double)row[j] - mean) * ((double)row[j] - mean) / (double)C;
        f->q[r] = 1 / sqrt(variance + (double)norm_eps);
        for (j = 0; j < C; j++) f->s[r * C + j] = ((double)row[j] - mean) * f->q[r];
    }
}

static void kernels_layernorm(kernel_data *f) {
    const stx_real *b = f->b, *c = f->c, *dy = f->dy;
    stx_real *a = f->a, *mean = f->mean, *rstd = f->rstd;
    const size_t N = f->N, C = f->C, n = f->n;
    double *s = f->s, *w = f->w;
    size_t r, j;
    normalise(f);
    KERNEL(f, "layernorm", n, 60, k_layernorm_fwd(x, y, mean, rstd, a, b, dy, N, C, norm_eps),
           s[i] * (double)b[i % C] + (double)dy[i % C]);
    for (r = 0; r < N; r++)
        CHECK(CLOSE(rstd[r], f->q[r], 60 * unit), "layernorm: 1 / standard deviation");
    for (j = 0; j < C; j++)
        for (w[j] = (double)c[j], r = 0; r < N; r++) w[j] += (double)dy[r * C + j] * s[r * C + j];
    KERNEL(f, "layernorm dgain", C, 100 + 2 * (double)N,
           k_layernorm_bwd(x, NULL, y, NULL, dy, a, b, mean, rstd, N, C, 1), w[i]);
    column_sums(f, w, dy, NULL);
    KERNEL(f, "layernorm dshift", C, 16 + 2 * (double)N,
           k_layernorm_bwd(x, NULL, NULL, y, dy, a, b, mean, rstd, N, C, 1), (double)c[i] + w[i]);
    for (r = 0; r < N; r++) {
        double sum = 0, dot = 0;
        for (j = 0; j < C; j++) {
            double g = (double)dy[r * C + j] * (double)b[j];
            sum += g / (double)C;
            dot += g * s[r * C + j] / (double)C;
        }
        for (j = 0; j < C; j++)
            w[r * C + j] = f->q[r]
                           * ((double)dy[r * C + j] * (double)b[j] - sum - s[r * C + j] * dot);
    }
    KERNEL(f, "layernorm din =", n, 400,
           k_layernorm_bwd(x, y, NULL, NULL, dy, a, b, mean, rstd, N, C, 0), w[i]);
    KERNEL(f, "layernorm din +=", n, 400,
           k_layernorm_bwd(x, y, NULL, NULL, dy, a, b, mean, rstd, N, C, 1), (double)c[i] + w[i]);
}

/* Sets s to the softmax of the rows of a. Returns the sum of -log s of the targets,
   divided by 3. */
static double softmax_rows(kernel_data *f) {
    const size_t C = f->C;
    double loss = 0, sum;
    size_t r, j;
    for (r = 0; r < f->N; r++) {
        for (sum = 0, j = 0; j < C; j++) {
            f->s[r * C + j] = exp((double)f->a[r * C + j]);
            sum += f->s[r * C + j];
        }
        for (j = 0; j < C; j++) f->s[r * C + j] /= sum;
        loss -= log(f->s[r * C + (size_t)f->ids[r]]) / 3;
    }
    return loss;
}

static void kernels_softmax(kernel_data *f) {
    const stx_real *a = f->a, *b = f->b, *c = f->c, *dy = f->dy;
    stx_real *top = f->mean, *inv = f->rstd;
    const int32_t *ids = f->ids;
    const size_t N = f->N, C = f->C, n = f->n;
    double *s = f->s, *w = f->w, loss = softmax_rows(f), sum;
    size_t r, j;
    KERNEL(f, "softmax", n, 16, stx_softmax_fwd(x, y, a, N, C), s[i]);
    stx_softmax_fwd(f->one, f->sm, a, N, C);
    for (r = 0; r < N; r++) {
        for (sum = 0, j = 0; j < C; j++) sum += s[r * C + j] * (double)dy[r * C + j];
        for (j = 0; j < C; j++) w[r * C + j] = s[r * C + j] * ((double)dy[r * C + j] - sum);
    }
    KERNEL(f, "softmax da =", n, 32, stx_softmax_bwd(x, y, dy, f->sm, N, C, 0), w[i]);
    KERNEL(f, "softmax da +=", n, 32, stx_softmax_bwd(x, y, dy, f->sm, N, C, 1),
           (double)c[i] + w[i]);
    KERNEL(f, "cross_entropy", 1, 16, k_cross_entropy_fwd(x, y, top, inv, a, ids, N, C, C, 3),
           loss);
    KERNEL(f, "cross_entropy dlogits =", n, 16,
           k_cross_entropy_bwd(x, y, b, top, inv, a, ids, N, C, C, 3, 0),
           (double)b[0] / 3 * (s[i] - (i % C == (size_t)ids[i / C])));
    KERNEL(f, "cross_entropy dlogits +=", n, 16,
           k_cross_entropy_bwd(x, y, b, top, inv, a, ids, N, C, C, 3, 1),
           (double)c[i] + (double)b[0] / 3 * (s[i] - (i % C == (size_t)ids[i / C])));
    KERNEL(f, "cross_entropy dlogits in place", n, 16,
           (memcpy(y, a, n * sizeof *y),
            k_cross_entropy_bwd(x, y, b, top, inv, y, ids, N, C, C, 3, 0)),
           (double)b[0] / 3 * (s[i] - (i % C == (size_t)ids[i / C])));
}

/* Tests the head of an adaptive softmax and one of its two clusters. The head's last
   two columns are the logits of the clusters. The tested cluster has two words, whose
   logits are in dy. */
static void kernels_clusters(kernel_data *f) {
    const stx_real *a = f->a, *dy = f->dy;
    const size_t N = f->N, C = f->C;
    double *w = f->w, head, tail;
    size_t r, j;
    if (C <= 3) return;
    for (r = 0; r < N; r++) {
        for (head = 0, j = 0; j < C; j++) head += exp((double)a[r * C + j]);
        for (tail = 0, j = 0; j < 2; j++) tail += exp((double)dy[r * 2 + j]);
        for (j = 0; j < C; j++) w[r * C + j] = (double)a[r * C + j] - log(head);
        for (j = 0; j < 2; j++)
            w[r * C + C - 2 + j] = (double)dy[r * 2 + j] - log(tail) + (double)a[r * C + C - 1]
                                   - log(head);
    }
    KERNEL(f, "cluster_log_probs", f->n, 64,
           (cluster_log_probs(x, y, f->sm, a, N, C, 0, C - 2, C, 3, 0, 0),
            cluster_log_probs(x, y, f->sm, dy, N, C, C - 2, 2, 2, 3, 1, 0)),
           w[i]);
    for (r = 0; r < N; r++)
        for (j = C - 2; j < C; j++)
            w[r * C + j] += (double)a[r * C + C - 2] - (double)a[r * C + C - 1];
    KERNEL(f, "cluster_log_probs forward", f->n, 64,
           (cluster_log_probs(x, y, f->sm, a, N, C, 0, C - 2, C, 3, 0, 1),
            cluster_log_probs(x, y, f->sm, dy, N, C, C - 2, 2, 2, 3, 1, 1)),
           w[i]);
}

static void kernels_dropout(kernel_data *f) {
    const stx_real *a = f->a, *c = f->c, *mask = f->mask;
    const size_t n = f->n;
    KERNEL(f, "dropout", n, 0, k_dropout_fwd(x, y, a, n, drop_rate, 11, 5, 0, 0),
           (double)(stx_real)(a[i] * mask[i]));
    KERNEL(f, "dropout +=", n, 4, k_dropout_fwd(x, y, a, n, drop_rate, 11, 5, 0, 1),
           (double)c[i] + (double)a[i] * (double)mask[i]);
    KERNEL(f, "dropout in place", n, 0, k_dropout_fwd(x, y, y, n, drop_rate, 11, 5, 0, 0),
           (double)(stx_real)(c[i] * mask[i]));
}

/* Returns arguments for stx_residual_norm. The kernel's input h is sm, which is set to
   the values of c; its input f is `a`; its output s is v0. */
static stx_residual_norm_args residual_args(const kernel_data *f, stx_real drop) {
    stx_residual_norm_args k;
    memset(&k, 0, sizeof k);
    k.N = f->N;
    k.C = f->C;
    k.eps = norm_eps;
    k.drop = drop;
    k.seed = 11;
    k.stream = 5;
    k.h = f->sm;
    k.f = f->a;
    k.gain = f->b;
    k.shift = f->dy;
    k.dy = f->dy;
    k.s = f->v0;
    k.mean = f->mean;
    k.rstd = f->rstd;
    memcpy(f->sm, f->c, f->n * sizeof *f->sm);
    return k;
}

/* Copies m to w, in double, with the dropout mask applied if `masked` is set. */
static void widen(const kernel_data *f, int masked) {
    size_t e;
    for (e = 0; e < f->n; e++) f->w[e] = (double)f->m[e] * (masked ? (double)f->mask[e] : 1);
}

/* Compares residual_norm, a single pass, with separate calls of dropout, axpy and
   layernorm. */
static void kernels_residual_norm(kernel_data *f, stx_real drop) {
    stx_residual_norm_args k = residual_args(f, drop);
    const stx_real *a = f->a, *b = f->b, *c = f->c, *dy = f->dy;
    stx_real *m = f->m, *v = f->v, *mean = f->mean, *rstd = f->rstd;
    const size_t N = f->N, C = f->C, n = f->n;
    double *w = f->w, off = 0;
    size_t e;
    if (drop > 0)
        k_dropout_fwd(f->one, v, a, n, drop, 11, 5, 0, 0);
    else
        memcpy(v, a, n * sizeof *v);
    stx_axpy(f->one, v, f->sm, n, 1, 1);
    k_layernorm_fwd(f->one, m, mean, rstd, v, b, dy, N, C, norm_eps);
    widen(f, 0);
    KERNEL(f, "residual_norm", n, 4, (k.y = y, stx_residual_norm_fwd(x, &k)), w[i]);
    for (e = 0; e < n; e++) off = fmax(off, fabs((double)f->v0[e] - (double)v[e]));
    CHECK(off <= 8 * unit * 4, "residual_norm: the sum is off by %g", off);
    k_layernorm_bwd(f->one, m, NULL, NULL, dy, f->v0, b, mean, rstd, N, C, 0);
    widen(f, 0);
    KERNEL(f, "residual_norm ds", n, 0, (k.ds = y, k.df = v, stx_residual_norm_bwd(x, &k)), w[i]);
    widen(f, drop > 0);
    k.ds = m;
    KERNEL(f, "residual_norm df =", n, 4, (k.df = y, stx_residual_norm_bwd(x, &k)), w[i]);
    k.accumulate_df = 1;
    KERNEL(f, "residual_norm df +=", n, 4, (k.df = y, stx_residual_norm_bwd(x, &k)),
           (double)c[i] + w[i]);
    k.df = NULL;
    k.accumulate_df = 0;
    column_sums(f, w, dy, NULL);
    KERNEL(f, "residual_norm dshift", C, 16 + 2 * (double)N,
           (k.dshift = y, stx_residual_norm_bwd(x, &k)), (double)c[i] + w[i]);
}

/* Like kernels_residual_norm, with a bias. Also tests the gradient df, both when the
   kernel adds to ds and when ds is not requested. */
static void kernels_residual_norm_bias(kernel_data *f, stx_real drop) {
    stx_residual_norm_args k = residual_args(f, drop);
    const stx_real *a = f->a, *b = f->b, *c = f->c, *dy = f->dy;
    stx_real *m = f->m, *v = f->v, *mean = f->mean, *rstd = f->rstd;
    const size_t N = f->N, C = f->C, n = f->n;
    double *w = f->w;
    k.bias = c;
    stx_add_fwd(f->one, v, a, c, n, C);
    if (drop > 0) {
        k_dropout_fwd(f->one, m, v, n, drop, 11, 5, 0, 0);
        memcpy(v, m, n * sizeof *v);
    }
    stx_axpy(f->one, v, f->sm, n, 1, 1);
    k_layernorm_fwd(f->one, m, mean, rstd, v, b, dy, N, C, norm_eps);
    widen(f, 0);
    KERNEL(f, "residual_norm with a bias", n, 4, (k.y = y, stx_residual_norm_fwd(x, &k)), w[i]);
    k_layernorm_bwd(f->one, m, NULL, NULL, dy, f->v0, b, mean, rstd, N, C, 0);
    widen(f, 0);
    k.accumulate_ds = 1;
    KERNEL(f, "residual_norm ds +=", n, 4, (k.ds = y, k.df = v, stx_residual_norm_bwd(x, &k)),
           (double)c[i] + w[i]);
    widen(f, drop > 0);
    KERNEL(f, "residual_norm df = with ds +=", n, 4,
           (k.ds = m, k.df = y, stx_residual_norm_bwd(x, &k)), w[i]);
    k.accumulate_ds = 0;
    k.ds = NULL;
    KERNEL(f, "residual_norm df alone", n, 4, (k.df = y, stx_residual_norm_bwd(x, &k)), w[i]);
    column_sums(f, w, v, NULL);
    KERNEL(f, "residual_norm dbias", C, 16 + 2 * (double)N,
           (k.df = v, k.dbias = y, stx_residual_norm_bwd(x, &k)), (double)c[i] + w[i]);
}

static void kernels_means(kernel_data *f) {
    const stx_real *a = f->a, *b = f->b, *c = f->c, *dy = f->dy;
    const size_t n = f->n, C = f->C;
    double sum = 0, rows = 0, squares = 0;
    stx_means_args k;
    size_t e;
    for (e = 0; e < n; e++) {
        sum += (double)a[e] / (double)n;
        if (e < C) rows += (double)b[e] / (double)C;
        squares += ((double)a[e] - (double)b[e]) * ((double)a[e] - (double)b[e]) / (double)n;
    }
    memset(&k, 0, sizeof k);
    k.count = 2;
    k.n[0] = n;
    k.n[1] = C;
    k.a[0] = a;
    k.a[1] = b;
    k.y0 = c;
    k.dy = dy;
    k.s = 3;
    KERNEL(f, "add_means", 1, 4 + sum_units(n), (k.y = y, stx_add_means_fwd(x, &k)),
           (double)c[0] + 3 * (sum + rows));
    KERNEL(f, "add_means da", n, 4, (k.da[1] = y, stx_add_means_bwd(x, &k)),
           (double)c[i] + (i < C ? 3 * (double)dy[0] / (double)C : 0));
    KERNEL(f, "mean", 1, 2 + sum_units(n), stx_mean_fwd(x, y, a, n), sum);
    KERNEL(f, "mean da", n, 2, stx_mean_bwd(x, y, b, n), (double)c[i] + (double)b[0] / (double)n);
    KERNEL(f, "mse", 1, 2 + sum_units(n), stx_mse_fwd(x, y, a, b, n), squares);
    KERNEL(f, "mse da", n, 8, stx_mse_bwd(x, y, NULL, b, a, b, n),
           (double)c[i] + 2 * (double)b[0] / (double)n * ((double)a[i] - (double)b[i]));
    KERNEL(f, "mse db", n, 8, stx_mse_bwd(x, NULL, y, b, a, b, n),
           (double)c[i] - 2 * (double)b[0] / (double)n * ((double)a[i] - (double)b[i]));
}

/* Computes one step of Adam with the constants of kernels_update, for parameter p,
   gradient g, first moment m and second moment v. plain_: whether the second moment and
   the coupled decay are omitted. */
static double adam_step(double p, double g, double m, double v, int plain_) {
    double e = 0.5 * g + (plain_ ? 0 : 0.02 * p), kept = plain_ ? p * (1 - 0.1 * 0.03) : p,
           step = 0.1 / 0.4 * (0.9 * m + 0.1 * e);
    return plain_ ? kept - step : kept - step / (sqrt((0.99 * v + 0.01 * e * e) / 0.25) + 1e-3);
}

/* Selects y as the parameter, and restores its gradient sm from dy and the optimiser
   states m and v from b and v0. */
static void reset_update(kernel_data *f, stx_optim_chunk *p, stx_real *y) {
    p->p = y;
    memcpy(f->sm, f->dy, f->n * sizeof *f->sm);
    memcpy(f->m, f->b, f->n * sizeof *f->m);
    memcpy(f->v, f->v0, f->n * sizeof *f->v);
}

static double sum_of_squares(const stx_real *a, size_t n) {
    double sum = 0;
    size_t e;
    for (e = 0; e < n; e++) sum += (double)a[e] * (double)a[e];
    return sum;
}

/* Tests one step of each optimiser, and a skipped step, which must zero the gradient
   and change nothing else. */
static void kernels_update(kernel_data *f) {
    const stx_real *c = f->c, *dy = f->dy, momentum = (stx_real)0.9, small = (stx_real)0.01;
    stx_real *b = f->b, *v0 = f->v0;
    const size_t n = f->n;
    double sum;
    stx_optim_chunk p;
    stx_update u;
    stx_adam_args adam;
    size_t e;
    memset(&u, 0, sizeof u);
    u.ok = 1;
    u.factor = (stx_real)0.5;
    u.correction1 = (stx_real)0.4;
    u.correction2 = (stx_real)0.25;
    memset(&p, 0, sizeof p);
    p.n = n;
    p.lr = (stx_real)0.1;
    p.g = f->sm;
    p.s[0] = f->m;
    p.s[1] = f->v;
    adam.beta1 = (stx_real)0.9;
    adam.rest1 = (stx_real)0.1;
    adam.beta2 = (stx_real)0.99;
    adam.rest2 = (stx_real)0.01;
    adam.eps = (stx_real)1e-3;
    adam.decoupled = 0;
    p.decay = small;
    for (e = 0; e < n; e++) v0[e] = (stx_real)((double)f->a[e] * (double)f->a[e]);
    KERNEL(f, "sgd", n, 8, (reset_update(f, &p, y), stx_sgd_update(x, &u, &p, 1, momentum)),
           (double)c[i] - 0.1 * (0.9 * (double)b[i] + 0.5 * (double)dy[i] + 0.01 * (double)c[i]));
    p.decay = (stx_real)0.02;
    KERNEL(f, "adam", n, 16, (reset_update(f, &p, y), stx_adam_update(x, &u, &p, 1, &adam)),
           adam_step((double)c[i], (double)dy[i], (double)b[i], (double)v0[i], 0));
    u.plain = 1;
    adam.decoupled = 1;
    p.decay = (stx_real)0.03;
    KERNEL(f, "adam plain", n, 16, (reset_update(f, &p, y), stx_adam_update(x, &u, &p, 1, &adam)),
           adam_step((double)c[i], (double)dy[i], (double)b[i], (double)v0[i], 1));
    memcpy(b, v0, n * sizeof *b);
    KERNEL(f, "adagrad", n, 16, (reset_update(f, &p, y), stx_adagrad_update(x, &u, &p, 1, small)),
           (double)c[i]
               - 0.1 * (double)dy[i]
                     / (sqrt((double)v0[i] + (double)dy[i] * (double)dy[i]) + 0.01));
    CHECK(sum_of_squares(f->sm, n) == 0, "the gradient is not zeroed");
    u.ok = 0;
    KERNEL(f, "sgd skipped", n, 0,
           (reset_update(f, &p, y), stx_sgd_update(x, &u, &p, 1, momentum)), (double)c[i]);
    KERNEL(f, "adam skipped", n, 0, (reset_update(f, &p, y), stx_adam_update(x, &u, &p, 1, &adam)),
           (double)c[i]);
    KERNEL(f, "adagrad skipped", n, 0,
           (reset_update(f, &p, y), stx_adagrad_update(x, &u, &p, 1, small)), (double)c[i]);
    CHECK(sum_of_squares(f->sm, n) == 0 && !memcmp(f->m, b, n * sizeof *b)
              && !memcmp(f->v, v0, n * sizeof *v0),
          "a skipped update leaves a gradient or changes the state");
    p.g = f->a;
    stx_sum_squares(f->one, &sum, &p, 1);
    CHECK(CLOSE(sum, sum_of_squares(f->a, n), 1e-12), "sum_squares");
}

static void kernels_of_shape(stx_ctx *one, stx_ctx *many, size_t N, size_t C) {
    kernel_data f = kernel_data_make(one, many, N, C);
    kernels_elementwise(&f);
    kernels_copy(&f);
    kernels_embedding(&f);
    kernels_act(&f);
    kernels_layernorm(&f);
    kernels_softmax(&f);
    kernels_clusters(&f);
    kernels_dropout(&f);
    kernels_residual_norm(&f, 0);
    kernels_residual_norm_bias(&f, 0);
    kernels_residual_norm(&f, drop_rate);
    kernels_residual_norm_bias(&f, drop_rate);
    kernels_means(&f);
    kernels_update(&f);
    kernel_data_free(&f);
}

static const size_t chunk_size[] = {1, 4096, 4097, 3, 12289, 64, 30000, 1, 511};

enum { CHUNK_PARAMS = sizeof chunk_size / sizeof *chunk_size };

/* Runs three optimiser steps on parameters of many sizes. */
static stx_optim *chunk_run(int kind, int threads) {
    stx_params *p = stx_params_create(plain(5, threads));
    stx_optim *o;
    stx_optim_desc d;
    char name[16];
    size_t i, k, e;
    for (k = 0; k < CHUNK_PARAMS; k++) {
        snprintf(name, sizeof name, "p%d", (int)k);
        stx_param(p, STX_NORMAL, 1, name, chunk_size[k], 0, 0, 0);
    }
    memset(&d, 0, sizeof d);
    d.kind = kind;
    d.clip = 0.5;
    d.momentum = 0.9;
    o = stx_optim_create(p, &d);
    for (i = 0; i < 3; i++) {
        for (k = 0; k < p->count; k++)
            for (e = 0; e < chunk_size[k]; e++)
                p->tensor[k]->grad[e] = (stx_real)sin((double)(e + 7 * k + i));
        CHECK(stx_optim_step(o, 0.1) == 1, "optimiser %d: a step of chunks", kind);
    }
    return o;
}

/* Updates are divided into chunks. The results with three threads must be bit-identical
   to the results with one, and every element must be updated. */
static void update_chunks(void) {
    int kind;
    for (kind = STX_SGD; kind <= STX_MUON; kind++) {
        stx_optim *one = chunk_run(kind, 1), *three = chunk_run(kind, 3);
        size_t i, k, still = 0, left = 0;
        for (k = 0; k < CHUNK_PARAMS; k++) {
            const stx_tensor *t = one->params->tensor[k];
            for (i = 0; i < chunk_size[k]; i++) {
                still += one->state[0][k]->data[i] == 0;
                left += t->grad[i] != 0;
            }
            CHECK(
                !memcmp(t->data, three->params->tensor[k]->data, chunk_size[k] * sizeof(stx_real)),
                "optimiser %d: threads change bits of parameter %zu", kind, k);
        }
        CHECK(!still && !left && one->grad_norm == three->grad_norm,
              "optimiser %d: %zu elements without an update, %zu gradients not zeroed", kind, still,
              left);
        stx_destroy(one->params->ctx);
        stx_destroy(three->params->ctx);
    }
}

static void kernels(void) {
    static const size_t shape[][2] = {{1, 1},   {3, 2},     {2, 15},   {5, 16},
                                      {8, 17},  {7, 31},    {9, 33},   {65, 64},
                                      {66, 65}, {130, 100}, {1, 4097}, {67, 1031}};
    stx_ctx *one = plain(1, 1), *many = plain(1, 3);
    int best = inner_isa(one), isa;
    size_t k;
    for (isa = 0; isa <= best; isa++) {
        inner_set_isa(one, isa);
        inner_set_isa(many, isa);
        for (k = 0; k < sizeof shape / sizeof *shape; k++)
            kernels_of_shape(one, many, shape[k][0], shape[k][1]);
    }
    stx_destroy(one);
    stx_destroy(many);
    update_chunks();
}

/* A view of a parameter, and a view of that view, must add to the parameter's gradient,
   even if the gradient moves after the view was created. */
static void views(void) {
    int moved;
    for (moved = 0; moved < 2; moved++) {
        stx_ctx *x = plain(1, 1);
        stx_params *p = stx_params_create(x);
        stx_tensor *w = stx_param(p, STX_UNIFORM, 1, "w", 4, 8, 0, 0), *v, *u;
        size_t n, i, bad = 0;
        stx_begin(x, STX_TRAIN);
        v = stx_view_rows(x, w, 1, 4);
        u = stx_reshape(x, stx_view_rows(x, v, 1, 2), 8, 0, 0, 0);
        CHECK(v && u && v->view_of == w && u->view_of == w && u->view_offset == 16 && !u->is_param,
              "views of a parameter: %s", stx_error(x));
        u = stx_add(x, stx_mean(x, stx_mul(x, v, v)), stx_mean(x, u));
        if (moved) stx_params_grads(p, &n);
        stx_backward(x, u);
        for (i = 0; i < w->size; i++) {
            double want = i < 8 ? 0 : 2 * (double)w->data[i] / 24;
            if (i >= 16 && i < 24) want += 1.0 / 8;
            bad += !CLOSE((double)w->grad[i], want, 1e-6);
        }
        CHECK(stx_ok(x) && !bad, "%zu elements of a gradient that %s are wrong: %s", bad,
              moved ? "moved" : "did not move", stx_error(x));
        stx_destroy(x);
    }
}


/* >>packed weights */

/* A part of a weight matrix: rows [r0, r0 + rows) and columns [c0, c0 + cols). */
typedef struct part {
    size_t r0, rows, c0, cols;
} part;

/* Tests a GEMM of M rows with a part of W or, if tb is set, of its transpose. The
   packed values must give the same result as an unpacked copy of them. With M = 2, a
   batch of two matmuls shares one part; with M = 3, each matmul has a separate part if
   W has enough rows. copy: scratch. */
static void packed_gemm(stx_ctx *x, stx_tensor *W, size_t M, int tb, part p, double alpha,
                        double beta, stx_real *copy, const char *what) {
    size_t N = tb ? p.rows : p.cols, K = tb ? p.cols : p.rows, i, wrong = 0,
           apart = M == 3 && p.r0 + p.rows + 4 <= W->dim[0], batch = M == 2 || apart ? 2 : 1,
           offset = p.r0 * W->dim[1] + p.c0;
    int exact = !strcmp(inner_name(x), stx_backend(x)) || M * N * K == 0;
    stx_real *a = random_values(batch * M * K), *y = random_values(batch * M * N),
             *z = (stx_real *)malloc(batch * M * N * sizeof *z);
    stx_gemm_args g = stx_gemm_init(0, tb, M, N, K, a, W->data + offset, y);
    g.ldb = W->dim[1];
    g.alpha = (stx_real)alpha;
    g.beta = (stx_real)beta;
    g.batch = batch;
    g.sb = apart ? 4 * W->dim[1] : 0;
    memcpy(z, y, batch * M * N * sizeof *z);
    stx_gemm(x, &g);
    memcpy(copy, W->data, W->size * sizeof *copy);
    g.B = copy + offset;
    g.C = z;
    stx_gemm(x, &g);
    for (i = 0; i < batch * M * N; i++)
        wrong += exact ? !(y[i] == z[i]) : !CLOSE(y[i], z[i], 1e-5 * sqrt((double)K));
    CHECK(!wrong,
          "%s: %zu rows, x W%s, rows %zu + %zu, columns %zu + %zu of %zu x %zu: "
          "%zu values are not those of the rounded weights",
          what, M, tb ? "^T" : "", p.r0, p.rows, p.c0, p.cols, W->dim[0], W->dim[1], wrong);
    free(a);
    free(y);
    free(z);
}

static const char *kind_name(int kind) {
    return kind == STX_WEIGHTS_BF16 ? "bf16" : "int8";
}

/* Returns the size, in bytes, of the packed copy of a weight with R rows and C
   columns. */
static size_t packed_bytes(int kind, size_t R, size_t C) {
    return R * (kind == STX_WEIGHTS_BF16 ? 2 * C : C + (C + 31) / 32 * 4);
}

/* Tests GEMMs with all of W and with parts of W. */
static void packed_gemms(stx_ctx *x, stx_tensor *W, stx_real *copy, const char *what) {
    const size_t R = W->dim[0], C = W->dim[1], first = C > 32 ? 32 : 0;
    const part all = {0, R, 0, C}, rows = {3, R - 8, 0, C}, right = {3, R - 8, first, C - first},
               /* `inside` contains no whole group, so the unpacked values are read */
        inside = {1, 9, 5, C - 7};
    size_t M;
    for (M = 1; M <= 4; M++) {
        packed_gemm(x, W, M, 1, all, 1, 0, copy, what);
        packed_gemm(x, W, M, 0, all, 1, 1, copy, what);
        packed_gemm(x, W, M, 1, rows, 0.5, 0.25, copy, what);
        packed_gemm(x, W, M, 0, right, 2, 1, copy, what);
        packed_gemm(x, W, M, 1, inside, 1, 0, copy, what);
    }
}

static void packed_shapes(int kind, int threads, int isa) {
    static const size_t shape[][2] = {{32, 32},   {33, 47},   {70, 100}, {129, 64},
                                      {64, 1100}, {37, 2100}, {700, 45}, {1031, 96}};

    enum { SHAPES = sizeof shape / sizeof *shape };

    stx_ctx *x = plain(3, threads);
    stx_params *p = stx_params_create(x), *q = stx_params_create(x);
    const char *what = kind_name(kind);
    stx_tensor *W[SHAPES], *bias;
    stx_real *copy = (stx_real *)malloc(64 * 2100 * sizeof *copy);
    size_t bytes = 0, own, k;
    const part all = {0, 70, 0, 100};
    char name[8];
    inner_set_isa(x, isa);
    for (k = 0; k < SHAPES; k++) {
        snprintf(name, sizeof name, "w%d", (int)k);
        W[k] = stx_param(k % 2 ? q : p, STX_NORMAL, 0.4, name, shape[k][0], shape[k][1], 0, 0);
        bytes += packed_bytes(kind, shape[k][0], shape[k][1]);
    }
    bias = stx_param(p, STX_NORMAL, 1, "b", 2000, 0, 0, 0);
    memcpy(copy, bias->data, 2000 * sizeof *copy);
    own = stx_params_pack(p, kind);
    CHECK(own > 0 && own < bytes && stx_params_pack(q, kind) == bytes, "%s: bytes of the copies",
          what);
    CHECK(!memcmp(copy, bias->data, 2000 * sizeof *copy), "%s: packing changes a bias", what);
    for (k = 0; k < SHAPES; k++) packed_gemms(x, W[k], copy, what);
    CHECK(stx_params_pack(q, STX_WEIGHTS_F32) == own && !stx_params_pack(p, STX_WEIGHTS_F32)
              && stx_ok(x),
          "%s: STX_WEIGHTS_F32 does not free the copies", what);
    packed_gemm(x, W[2], 1, 1, all, 1, 0, copy, what);
    stx_destroy(x);
    free(copy);
}

/* Returns W's first value as a GEMM reads it. */
static double packed_first(stx_ctx *x, stx_tensor *W) {
    stx_real *in = (stx_real *)calloc(W->dim[1], sizeof *in), y;
    stx_gemm_args g = stx_gemm_init(0, 1, 1, 1, W->dim[1], in, W->data, &y);
    in[0] = 1;
    stx_gemm(x, &g);
    free(in);
    return (double)y;
}

/* Nonzero if a GEMM reads the packed copy, so that changing a value of W has no
   effect. */
static int packed_is_read(stx_ctx *x, stx_tensor *W) {
    const stx_real was = W->data[0];
    double y;
    W->data[0] = 77;
    y = packed_first(x, W);
    W->data[0] = was;
    return y != 77;
}

enum { PACKED_R = 40, PACKED_C = 50, PACKED_N = PACKED_R * PACKED_C };

/* Nonzero if `now` is the value nearest to `was` in the packed format. most: the
   largest |was| of the group. bf16 has 8 binary digits, int8 has steps of most /
   127. */
static int is_nearest(int kind, double was, double now, double most) {
    double step = kind == STX_WEIGHTS_BF16 ? fabs(was) / 128 : most / 127, multiple;
    if (!(fabs(was - now) <= 0.5001 * step)) return 0;
    if (kind == STX_WEIGHTS_BF16) {
        float f = (float)now;
        uint32_t b;
        memcpy(&b, &f, 4);
        return !(b & 0xffff) && (double)f == now;
    }
    multiple = floor(now / (most > 0 ? step : 1) + 0.5);
    return CLOSE(now, multiple * most / 127, 1e-6);
}

/* Packing must round to nearest, and repeating it must change nothing. A small weight
   must not be packed. */
static void packed_rounding(stx_params *p, stx_tensor *W, stx_tensor *small, int kind) {
    static stx_real was[PACKED_N], now[PACKED_N];
    size_t i, k, bad = 0;
    for (i = 0; i < 32; i++) W->data[PACKED_C + i] = 0; /* one group contains only zeros */
    memcpy(was, W->data, sizeof was);
    CHECK(stx_params_pack(p, kind) > 0 && packed_is_read(p->ctx, W)
              && !packed_is_read(p->ctx, small),
          "%s: which copies are read", kind_name(kind));
    for (i = 0; i < PACKED_N; i++) {
        size_t row = i / PACKED_C * PACKED_C, from = (i - row) / 32 * 32;
        double most = 0;
        for (k = from; k < PACKED_C && k < from + 32; k++)
            most = fmax(most, fabs((double)was[row + k]));
        bad += !is_nearest(kind, (double)was[i], (double)W->data[i], most);
    }
    CHECK(!bad, "%s: %zu values are not the nearest ones", kind_name(kind), bad);
    memcpy(now, W->data, sizeof now);
    CHECK(stx_params_pack(p, kind) > 0, "%s: packed again", kind_name(kind));
    for (i = bad = 0; i < PACKED_N; i++) bad += !CLOSE(W->data[i], now[i], 1e-6);
    CHECK(!bad, "%s: packing again changes %zu values", kind_name(kind), bad);
}

/* Saves and reloads the parameter list. */
static void reload(stx_params *p) {
    stx_ctx *x = p->ctx;
    stx_writer *w = stx_writer_create(x);
    stx_file *file;
    char name[1024];
    test_path(name, sizeof name, "test_api.packed");
    CHECK(w && stx_params_save(w, p, "") && stx_writer_finish(w, name), "saved: %s", stx_error(x));
    file = stx_file_open(x, name);
    CHECK(file && stx_params_load(p, file, ""), "loaded: %s", stx_error(x));
    stx_file_close(file);
    remove(name);
}

/* Every function that writes parameters must free the packed copy. */
static void packed_writes(stx_params *p, stx_tensor *W, int kind) {
    enum { SET, SCALE, STEP, UPLOAD, LOAD, CLAMP, WRITES };

    static stx_real value[PACKED_N];
    stx_ctx *x = p->ctx;
    int how;
    memcpy(value, W->data, sizeof value);
    for (how = 0; how < WRITES; how++) {
        CHECK(stx_params_pack(p, kind) > 0 && packed_is_read(x, W), "%s: packed", kind_name(kind));
        if (how == SET) stx_set(x, W, value);
        if (how == SCALE) stx_param_scale(x, W, 0, 1, 2);
        if (how == STEP) {
            stx_optim *o = stx_optim_create(p, &(stx_optim_desc){.kind = STX_SGD});
            W->grad[0] = 1;
            stx_optim_step(o, 0.5);
        }
        if (how == UPLOAD) stx_upload(x, W->data + 7, value, 1);
        if (how == LOAD) reload(p);
        if (how == CLAMP) stx_clamp_params(x, stx_params_subset(x, &W, 1), -0.5, 0.5);
        CHECK(stx_ok(x) && !packed_is_read(x, W) && packed_first(x, W) == (double)W->data[0],
              "%s: a write of kind %d keeps the packed copy", kind_name(kind), how);
    }
}

/* An invalid kind, and values that cannot be packed, must not change anything. */
static void packed_errors(stx_params *p, stx_tensor *W, int kind) {
    static const double bad[] = {NAN, -(double)INFINITY, 3.4e38};
    static stx_real was[PACKED_N];
    stx_ctx *x = p->ctx;
    int i;
    memcpy(was, W->data, sizeof was);
    CHECK(!stx_params_pack(p, 3)
              && strstr(stx_error(x), "kind: expected one of STX_WEIGHTS_*, got 3"),
          "%s", stx_error(x));
    stx_clear_error(x);
    for (i = 0; i < 3; i++) {
        W->data[PACKED_N - 1] = (stx_real)bad[i];
        CHECK(!stx_params_pack(p, kind) && strstr(stx_error(x), "element 1999 of \"w\""), "%s",
              stx_error(x));
        CHECK(!memcmp(was, W->data, (PACKED_N - 1) * sizeof *was) && !packed_is_read(x, W),
              "%s: an invalid value changes others", kind_name(kind));
        stx_clear_error(x);
        W->data[PACKED_N - 1] = was[PACKED_N - 1];
    }
}

/* Tests packing that runs out of memory while it allocates the list, the first copy or
   the second copy. */
static void packed_memory(int failing) {
    counter c;
    stx_ctx *x;
    stx_params *p;
    stx_tensor *a;
    stx_real was[32 * 32];
    memset(&c, 0, sizeof c);
    x = counted(&c, 0, 0, 1, 1);
    p = stx_params_create(x);
    a = stx_param(p, STX_NORMAL, 1, "a", 32, 32, 0, 0);
    stx_param(p, STX_NORMAL, 1, "b", 32, 64, 0, 0);
    memcpy(was, a->data, sizeof was);
    c.fail_at = c.calls + failing;
    CHECK(!stx_params_pack(p, STX_WEIGHTS_INT8) && stx_error_code(x) == STX_ERR_MEMORY
              && !memcmp(was, a->data, sizeof was),
          "allocation %d of packing fails: %s", failing, stx_error(x));
    stx_clear_error(x);
    CHECK(!packed_is_read(x, a) && stx_params_pack(p, STX_WEIGHTS_INT8) && packed_is_read(x, a),
          "packing after a failed allocation");
    stx_destroy(x);
    CHECK(!c.live && !c.bytes, "%d blocks, %zu bytes leak", (int)c.live, c.bytes);
}

static void packed_weights(void) {
    stx_ctx *x = plain(4, 1);
    int best = inner_isa(x), isa, kind, threads, i;
    stx_destroy(x);
    for (isa = 0; isa <= best; isa++)
        for (threads = 1; threads <= 3; threads += 2)
            for (kind = STX_WEIGHTS_BF16; kind <= STX_WEIGHTS_INT8; kind++)
                packed_shapes(kind, threads, isa);
    for (kind = STX_WEIGHTS_BF16; kind <= STX_WEIGHTS_INT8; kind++) {
        stx_params *p;
        stx_tensor *W, *small;
        x = plain(5, 1);
        p = stx_params_create(x);
        W = stx_param(p, STX_NORMAL, 1, "w", PACKED_R, PACKED_C, 0, 0);
        small = stx_param(p, STX_NORMAL, 1, "s", 31, 64, 0, 0);
        packed_rounding(p, W, small, kind);
        packed_writes(p, W, kind);
        packed_errors(p, W, kind);
        stx_destroy(x);
    }
    CHECK(!stx_params_pack(NULL, STX_WEIGHTS_BF16), "no list");
    for (i = 1; i < 4; i++) packed_memory(i);
}


/* >>sampling */

enum { DRAWS = 20000 };

static void draw(const stx_sampling *s, const stx_real *l, size_t V, int *hist) {
    stx_real *work = (stx_real *)malloc(V * sizeof *work);
    uint64_t i;
    memset(hist, 0, V * sizeof *hist);
    for (i = 0; i < DRAWS; i++) {
        int32_t t = stx_sample(s, i, l, V, work);
        if (t >= 0 && (size_t)t < V)
            hist[t]++;
        else
            test_failed++;
    }
    free(work);
}

/* Compares a histogram with the probabilities p by a chi-square test. A word with p = 0
   must not occur. A correct sampler stays below the bound with probability 0.9999.
   Every run has the same draws, so the test either always passes or always fails. */
static void fits(const char *what, const int *hist, const double *p, size_t V) {
    double chi = 0, total = 0, bound;
    size_t i, k = 0;
    for (i = 0; i < V; i++) total += p[i];
    for (i = 0; i < V; i++) {
        double e = DRAWS * p[i] / total;
        if (p[i] == 0) {
            CHECK(hist[i] == 0, "%s: word %zu is drawn %d times", what, i, hist[i]);
            continue;
        }
        chi += (hist[i] - e) * (hist[i] - e) / e;
        k++;
    }
    bound = (double)k + 4 * sqrt(2.0 * (double)k) + 8;
    CHECK(chi <= bound, "%s: chi-square %g, expected below %g", what, chi, bound);
}

enum { V7 = 7 };

/* Seven logits, and the words in order of decreasing logits. */
static const stx_real logits7[V7] = {(stx_real)0.3, (stx_real)2.1,  (stx_real)-1.0, (stx_real)1.2,
                                     (stx_real)0.9, (stx_real)-0.2, (stx_real)1.7};

static const size_t order7[V7] = {1, 6, 3, 4, 0, 5, 2};

/* Draws words from the logits and compares their frequencies with the probabilities p. */
static void check_draws(const char *what, const stx_sampling *s, const stx_real *l,
                        const double *p) {
    int hist[V7];
    draw(s, l, V7, hist);
    fits(what, hist, p, V7);
}

static void always_likeliest(const char *what, const stx_sampling *s) {
    int hist[V7];
    draw(s, logits7, V7, hist);
    CHECK(hist[1] == DRAWS, "%s does not always give the likeliest word", what);
}

static void sampling_temperature(void) {
    static const double temperature[] = {1, 0.7, 3};
    stx_sampling s = {.seed = 5};
    stx_real shifted[V7];
    double p[V7];
    size_t i, k;
    for (i = 0; i < V7; i++) shifted[i] = logits7[i] + 100;
    for (k = 0; k < 3; k++) {
        s.temperature = temperature[k];
        for (i = 0; i < V7; i++) p[i] = exp((double)logits7[i] / s.temperature);
        check_draws("temperature", &s, logits7, p);
        check_draws("shifted logits", &s, shifted, p);
    }
    s.temperature = 1e-30;
    always_likeliest("a tiny temperature", &s);
    s.temperature = 0;
    always_likeliest("temperature 0", &s);
    s.temperature = 1e30;
    for (i = 0; i < V7; i++) p[i] = 1;
    check_draws("a huge temperature", &s, logits7, p);
}

/* Restricts p to the first k words, then to the shortest prefix of these that holds at
   least the fraction top_p of their total. */
static void truncated(double *p, size_t k, double top_p) {
    double total = 0, mass = 0;
    size_t i;
    for (i = 0; i < k; i++) total += exp((double)logits7[order7[i]]);
    for (i = 0; i < V7; i++) {
        double e = exp((double)logits7[order7[i]]);
        p[order7[i]] = i < k && mass < top_p * total ? e : 0;
        mass += e;
    }
}

static void sampling_truncated(void) {
    stx_sampling s = {.seed = 5, .temperature = 1};
    double p[V7];
    size_t k;
    for (k = 1; k <= 8; k++) {
        s.top_k = k;
        truncated(p, k < V7 ? k : V7, 1);
        check_draws("top_k", &s, logits7, p);
    }
    s.top_k = 0;
    for (k = 1; k < 20; k++) {
        s.top_p = 0.05 * (double)k + 0.003;
        truncated(p, V7, s.top_p);
        check_draws("top_p", &s, logits7, p);
    }
    s.top_k = 3;
    s.top_p = 0.7; /* a fraction of the probability that remains after top_k */
    truncated(p, 3, 0.7);
    check_draws("top_k, then top_p", &s, logits7, p);
    s.top_k = 0;
    s.top_p = 1;
    truncated(p, V7, 1);
    check_draws("top_p 1", &s, logits7, p);
    s.top_p = 1e-9;
    always_likeliest("a tiny top_p", &s);
}

static void sampling_ties(void) {
    stx_sampling s = {.seed = 5, .temperature = 1};
    stx_real m[V7], work[V7];
    double p[V7];
    size_t i;
    for (i = 0; i < V7; i++) {
        m[i] = 2;
        p[i] = 1;
    }
    check_draws("all equal", &s, m, p);
    s.top_p = 0.5; /* words with equal logits are all kept or all removed */
    check_draws("all equal, top_p", &s, m, p);
    m[2] = m[4] = 3;
    s.top_p = 0;
    s.top_k = 2;
    for (i = 0; i < V7; i++) p[i] = i == 2 || i == 4;
    check_draws("two equal, top_k 2", &s, m, p);
    s.top_k = 0;
    s.temperature = 0;
    i = (size_t)stx_sample(&s, 0, m, V7, work);
    CHECK((i == 2 || i == 4) && (size_t)stx_sample(&s, 9, m, V7, work) == i,
          "temperature 0 with a tie");
}

/* Tests words whose probability is 0, and invalid logits. */
static void sampling_infinite(void) {
    static const size_t top_k[] = {0, 6, 0, 5};
    static const double top_p[] = {0, 0, 0.9999, 0.9999};
    stx_sampling s = {.seed = 5, .temperature = 1};
    stx_real m[V7], work[V7];
    double p[V7];
    size_t i, k;
    memcpy(m, logits7, sizeof m);
    m[0] = m[1] = m[6] = -(stx_real)HUGE_VAL;
    for (i = 0; i < V7; i++) p[i] = exp((double)m[i]);
    for (k = 0; k < 4; k++) {
        s.top_k = top_k[k];
        s.top_p = top_p[k];
        check_draws("minus infinity", &s, m, p);
    }
    s.top_k = 0;
    s.top_p = 0;
    for (i = 0; i < V7; i++) m[i] = -(stx_real)HUGE_VAL;
    CHECK(stx_sample(&s, 0, m, V7, work) == -1, "no word is possible");
    for (k = 0; k < V7; k += 3) {
        memcpy(m, logits7, sizeof m);
        m[k] = (stx_real)NAN;
        CHECK(stx_sample(&s, 0, m, V7, work) == -1, "a logit of NaN");
        m[k] = (stx_real)HUGE_VAL;
        CHECK(stx_sample(&s, 0, m, V7, work) == -1, "an infinite logit");
        s.temperature = 0;
        m[k] = (stx_real)NAN;
        CHECK(stx_sample(&s, 0, m, V7, work) == -1, "a logit of NaN at temperature 0");
        s.temperature = 1;
    }
}

static void sampling_arguments(void) {
    stx_sampling s = {.seed = 5, .temperature = 1};
    stx_real work[V7];
    uint64_t k;
    CHECK(stx_sample(&s, 0, logits7, 0, work) == -1, "no words");
    CHECK(stx_sample(&s, 0, NULL, V7, work) == -1, "no logits");
    CHECK(stx_sample(&s, 0, logits7, V7, NULL) == -1, "no scratch");
    CHECK(stx_sample(NULL, 0, logits7, V7, NULL) >= 0, "no desc: the likeliest word");
    CHECK(stx_schedule_lr(NULL, 3) == 0, "no schedule");
    for (k = 0; k < 4; k++) {
        s.temperature = (double)(k & 1);
        s.top_k = (size_t)k >> 1;
        CHECK(stx_sample(&s, k, logits7, 1, work) == 0, "a single word");
    }
}

/* Tests the repetition penalty: 2 for the tokens 0 and 3 turns the logits 4, 2, 0, -2, -4
   into 2, 2, 0, -4, -4. */
static void sampling_penalty(void) {
    static const double shift[] = {0, -100}; /* logits, and log-probabilities */
    static const double penalised[V7] = {2, 2, 0, -4, -4, -HUGE_VAL, 0};
    static const int32_t recent[] = {0, 3, 0, 5, 0};
    stx_sampling s = {.seed = 5, .temperature = 1};
    stx_real l[V7], work[V7];
    double p[V7];
    size_t i, k;
    for (i = 0; i < V7; i++) p[i] = exp(penalised[i]);
    s.recent = recent;
    for (k = 0; k < 2; k++) {
        static const double before[V7] = {4, 2, 0, -2, -4, -HUGE_VAL, 0};
        for (i = 0; i < V7; i++) l[i] = (stx_real)(before[i] + shift[k]);
        s.repetition_penalty = 2;
        s.recent_count = 5;
        check_draws("a penalty", &s, l, p);
        s.temperature = 0;
        s.repetition_penalty = 3;
        CHECK(stx_sample(&s, 0, l, V7, work) == 1, "a penalty at temperature 0");
        s.repetition_penalty = 1;
        CHECK(stx_sample(&s, 0, l, V7, NULL) == 0, "a penalty of 1");
        s.repetition_penalty = 3;
        s.recent_count = 0;
        CHECK(stx_sample(&s, 0, l, V7, NULL) == 0, "no recent tokens");
        s.temperature = 1;
    }
    s.recent_count = 5;
    CHECK(stx_sample(&s, 0, l, V7, NULL) == -1, "a penalty without scratch");
    CHECK(stx_sample(&s, 0, l, 5, work) == -1, "a recent id out of range");
    s.recent = negative_ids;
    s.recent_count = 3;
    CHECK(stx_sample(&s, 0, l, V7, work) == -1, "a negative recent id");
    s.recent = NULL;
    CHECK(stx_sample(&s, 0, l, V7, work) == -1, "recent ids are NULL");
}

/* A draw must depend only on the seed and the counter. */
static void sampling_repeats(uint64_t seed) {
    const stx_sampling s = {.temperature = 1, .seed = seed}, t = {.temperature = 1, .seed = 77};
    int equal_seed = 0, equal_counter = 0, repeat = 1;
    stx_real work[V7];
    uint64_t i;
    for (i = 0; i < 1000; i++) {
        int32_t a = stx_sample(&s, i, logits7, V7, work);
        repeat &= a == stx_sample(&s, i, logits7, V7, work);
        equal_seed += a == stx_sample(&t, i, logits7, V7, work);
        equal_counter += a == stx_sample(&s, i + 1, logits7, V7, work);
    }
    CHECK(repeat && equal_seed < 500 && equal_counter < 500,
          "not a function of seed and counter alone: %d %d", equal_seed, equal_counter);
}

static void sampling(void) {
    sampling_temperature();
    sampling_truncated();
    sampling_ties();
    sampling_infinite();
    sampling_arguments();
    sampling_penalty();
    sampling_repeats(0);
    sampling_repeats(5);
}


/* >>parts */

static const test_part parts[] = {{"versions", versions},
                                  {"descs", descs},
                                  {"errors", errors},
                                  {"nulls", nulls},
                                  {"allocation failures", allocation_failures},
                                  {"attention failures", attention_failures},
                                  {"attention zero keys", attention_zero_keys},
                                  {"limits", limits},
                                  {"overflows", overflows},
                                  {"step arena", step_arena},
                                  {"contexts", contexts},
                                  {"thread counts", thread_counts},
                                  {"gemms", gemms},
                                  {"linear fused", linear_fused},
                                  {"float environment", float_environment},
                                  {"nans", nans},
                                  {"optimisers", optimisers},
                                  {"radams", radams},
                                  {"lambs", lambs},
                                  {"zero betas", zero_betas},
                                  {"clipped infinity", clipped_infinity},
                                  {"schedules", schedules},
                                  {"philox", philox},
                                  {"initialisers", initialisers},
                                  {"lifetimes", lifetimes},
                                  {"grads in one", grads_in_one},
                                  {"grads end a reservation", grads_end_a_reservation},
                                  {"exponentials", exponentials},
                                  {"maths", maths},
                                  {"kernels", kernels},
                                  {"packed weights", packed_weights},
                                  {"views", views},
                                  {"sampling", sampling}};

/* Usage: test_api [PART ..] */
int main(int argc, char **argv) {
    test_run(parts, sizeof parts / sizeof *parts, argc, argv);
    return test_end();
}
