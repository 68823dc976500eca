/* test_cuda_group.c - groups of ranks with GPUs: exchanges; whole models, whose results
   with several ranks must equal those of one rank with the whole batch; captured steps;
   ranks that end early or never start. Each rank is a forked process, and only these
   processes use CUDA. They return their results in shared memory. Under
   tests/cuda_host, each rank has a separate GPU. On real devices, tests that need more
   GPUs than are available are skipped. "short" skips training. */
#if !defined(_WIN32) && !defined(_DEFAULT_SOURCE)
  #define _DEFAULT_SOURCE /* MAP_ANONYMOUS */
#endif
#include "../../seqtx_attn_span.h"
#include "../../seqtx_sru.h"
#include "cuda_test.h"
#include "../inner/inner.h"
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { MAX_RANKS = 4, B = 4, T = 8, V = 24, STEPS = 30, MAX_VALUES = 16384 };


// >>processes

typedef struct found { /* the results of one rank */
    long passed, failed;
    uint64_t hash;
    double loss[STEPS], seconds;
    int calls, last_call; /* calls: number of calls of the step's function; last_call: the
                             step of the last call */
    long graphs;
    size_t values;
    float value[MAX_VALUES]; /* values of the parameters */
    char text[512];
} found;

static found *results; /* (MAX_RANKS), shared by all processes */
static int groups, first_port, gpus = MAX_RANKS;

/* Values of job.uncaptured: how NCCL fails while train_job captures a step */
enum { REFUSES = 1, REFUSES_RANK_1, ENDS };

/* A job that every rank runs. die: the rank that ends early. family: 0 span or 1 SRU in
   training jobs, the variant in other jobs. */
typedef struct job {
    int family, precision, overlap, shard, ranks, rank, die, uncaptured;
    found *out;
} job;

typedef void (*job_fn)(job *j);

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void set_variable(const char *name, int v) {
    char s[16];
    snprintf(s, sizeof s, "%d", v);
    setenv(name, s, 1);
}

/* Sets the environment of a rank. A single rank has no group. */
static void environment(int rank, int ranks) {
    static const char *const names[] = {
        "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "PMI_RANK",     "SLURM_PROCID",
        "SLURM_STEP_NODELIST",  "SLURM_JOB_NODELIST",  "NCCL_COMM_ID", "RANK",
        "WORLD_SIZE",           "MASTER_ADDR",         "MASTER_PORT"};
    size_t i;
    for (i = 0; i < sizeof names / sizeof *names; i++) unsetenv(names[i]);
    if (ranks < 2) return;
    set_variable("RANK", rank);
    set_variable("LOCAL_RANK", rank);
    set_variable("WORLD_SIZE", ranks);
    set_variable("LOCAL_WORLD_SIZE", ranks);
    setenv("MASTER_ADDR", "127.0.0.1", 1);
    setenv("SEQTX_GROUP_TIMEOUT", "1800", 1); /* because on a busy machine all ranks are slow */
    set_variable("MASTER_PORT", first_port + 2 * groups);
}

/* At the end of a rank, checks that the shim has nothing to report and that everything
   was freed. */
static void rank_end(const char *name) {
#ifdef SEQTX_CUDA_HOST
    cuda_host_check();
    CHECK(cuda_host_reports() == 0, "%s: the shim reports %ld violations, the last: %s", name,
          cuda_host_reports(), cuda_host_last_report());
    CHECK(cuda_host_bytes_in_use() == 0 && cuda_host_pinned_in_use() == 0,
          "%s: %zu bytes are not freed", name,
          cuda_host_bytes_in_use() + cuda_host_pinned_in_use());
  #ifdef SEQTX_NCCL
    CHECK(cuda_host_comms() == 0, "%s: %ld communicators are not destroyed", name,
          cuda_host_comms());
  #endif
#endif
    (void)name;
}

/* Runs the job in one process per rank. Rank `absent` is not started; rank `killed` is
   expected to be killed. */
static void together(const char *name, job_fn fn, job j, int absent, int killed) {
    pid_t pid[MAX_RANKS];
    int r, status;
    memset(results, 0, MAX_RANKS * sizeof *results);
    fflush(stdout);
    groups++;
    for (r = 0; r < j.ranks; r++) {
        environment(r, j.ranks);
        if (r == absent) continue;
        pid[r] = fork();
        if (pid[r]) continue;
        alarm(1800); /* ends a hang; see tests/limit.sh */
        test_passed = test_failed = 0;
        j.rank = r;
        j.out = results + r;
        fn(&j);
        rank_end(name);
        j.out->passed = test_passed;
        j.out->failed = test_failed;
        fflush(stdout);
        _exit(test_failed != 0);
    }
    environment(0, 1);
    for (r = 0; r < j.ranks; r++) {
        if (r == absent) continue;
        CHECK(pid[r] > 0 && waitpid(pid[r], &status, 0) == pid[r], "%s: no process", name);
        if (r == killed)
            CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL, "%s: rank %d: %d", name, r,
                  status);
        else
            CHECK(WIFEXITED(status) && results[r].passed + results[r].failed > 0,
                  "%s: rank %d ended: %d", name, r, status);
        test_passed += results[r].passed;
        test_failed += results[r].failed;
    }
}

static stx_ctx *context(const job *j) {
    stx_desc d;
    memset(&d, 0, sizeof d);
    d.device = STX_CUDA;
    d.precision = j->precision;
    d.threads = 1;
    d.seed = 5;
#ifndef SEQTX_CUDA_HOST
    d.gpu = j->ranks > 1 ? j->rank : 0;
#endif
    return stx_create(&d);
}

static stx_ctx *joined(const job *j) {
    stx_ctx *x = context(j);
    stx_group_desc d;
    memset(&d, 0, sizeof d);
    d.bucket = 1000; /* so small that there are several buckets, some of which end
                        inside a tensor */
    d.shard = j->shard;
    CHECK(stx_group_join(x, &d) && stx_rank(x) == j->rank && stx_ranks(x) == j->ranks,
          "rank %d of %d: %s", j->rank, j->ranks, stx_error(x));
    return x;
}


// >>exchange

static double value(int rank, size_t i) {
    uint32_t u = (uint32_t)(i * 4 + (size_t)rank + 1) * 2654435761u;
    return ((double)((u ^ u >> 13) * 2246822519u) / 2147483648.0 - 1)
           * ((i + (size_t)rank) % 5 == 0 ? 1e6 : 1);
}

#ifdef SEQTX_NCCL
static void exchange_mean(stx_ctx *x, const job *j, size_t n) {
    float *a = (float *)malloc(n * sizeof *a), *b = (float *)malloc(n * sizeof *b);
    stx_real *p, *q;
    size_t i, bad = 0;
    int r;
    for (i = 0; i < n; i++) {
        a[i] = (float)value(j->rank, i);
        b[i] = (float)value(j->rank, i + 3);
    }
    p = cuda_array(x, a, n, STX_MEM_BYTES);
    q = cuda_array(x, b, n, STX_MEM_BYTES);
    stx_cuda_group_mean(x, p, n, -1);
    stx_cuda_group_mean(x, q, n, -1);
    stx_cuda_group_wait(x);
    stx_download(x, a, p, n);
    stx_download(x, b, q, n);
    for (i = 0; i < n; i++) {
        double ma = 0, mb = 0, top = 1;
        for (r = 0; r < j->ranks; r++) {
            ma += value(r, i) / j->ranks;
            mb += value(r, i + 3) / j->ranks;
            top = STX_MAX(top, STX_MAX(fabs(value(r, i)), fabs(value(r, i + 3))));
        }
        bad += !(fabs((double)a[i] - ma) <= 1e-6 * top && fabs((double)b[i] - mb) <= 1e-6 * top);
    }
    CHECK(!bad && stx_ok(x), "mean of %zu at rank %d of %d: %zu are wrong: %s", n, j->rank,
          j->ranks, bad, stx_error(x));
    stx_cuda_free(x, p);
    stx_cuda_free(x, q);
    free(a);
    free(b);
}

static void exchange_sum(stx_ctx *x, const job *j, double *v, size_t n) {
    size_t i, bad = 0;
    int r;
    for (i = 0; i < n; i++) v[i] = value(j->rank, i);
    v[n] = 77;
    CHECK(stx_group_sum(x, v, n), "%s", stx_error(x));
    for (i = 0; i < n; i++) {
        double s = 0;
        for (r = 0; r < j->ranks; r++) s += value(r, i);
        bad += !(fabs(v[i] - s) <= 1e-9);
        j->out->hash = (j->out->hash ^ (uint64_t)(int64_t)(v[i] * 1048576)) * 1099511628211u;
        /* the hash includes a low-order bit of each value */
        j->out->hash += (uint64_t)(v[i] * 1e10 - floor(v[i] * 1e10) > 0.5);
    }
    CHECK(!bad && v[n] == 77, "sum of %zu at rank %d of %d: %zu are wrong", n, j->rank, j->ranks,
          bad);
}

/* Nonzero if v[i] is the maximum of the ranks' values. The expected result is NaN at n
   / 2, infinity at 0 and -infinity at n - 1. */
static int is_max(const job *j, const double *v, size_t n, size_t i) {
    double m = value(0, i);
    int r;
    for (r = 1; r < j->ranks; r++) m = STX_MAX(m, value(r, i));
    if (i == n / 2) return v[i] != v[i];
    if (i == 0) return v[i] == HUGE_VAL;
    return i == n - 1 ? v[i] == -HUGE_VAL : v[i] == m;
}

static void exchange_max(stx_ctx *x, const job *j, double *v, size_t n) {
    size_t i, bad = 0;
    for (i = 0; i < n; i++) v[i] = value(j->rank, i);
    if (j->rank == 1) v[n / 2] = (double)NAN;
    if (j->rank == 0 && n > 1) v[0] = HUGE_VAL;
    if (n > 2) v[n - 1] = -HUGE_VAL;
    CHECK(stx_group_max(x, v, n), "%s", stx_error(x));
    for (i = 0; i < n; i++) bad += !is_max(j, v, n, i);
    CHECK(!bad, "maximum of %zu at rank %d of %d: %zu are wrong", n, j->rank, j->ranks, bad);
}

/* Returns byte i of a rank's data. */
static unsigned char byte_of(int rank, size_t i) {
    return (unsigned char)(i * 7 + i / 251 + 31 * (size_t)rank);
}

static void set_bytes(unsigned char *bytes, size_t n, int rank) {
    size_t i;
    for (i = 0; i < n; i++) bytes[i] = byte_of(rank, i);
}

static size_t wrong_bytes(const unsigned char *bytes, size_t n, int rank) {
    size_t i, bad = 0;
    for (i = 0; i < n; i++) bad += bytes[i] != byte_of(rank, i);
    return bad;
}

/* Broadcasts from the first and the last rank; sends from each rank to rank 0, and from
   rank 1 to the last one. */
static void exchange_bytes(stx_ctx *x, const job *j, unsigned char *bytes, size_t n) {
    size_t bad;
    int from;
    for (from = 0; from < j->ranks; from += j->ranks - 1) {
        set_bytes(bytes, n, j->rank);
        CHECK(stx_group_broadcast(x, bytes, n, from), "%s", stx_error(x));
        bad = wrong_bytes(bytes, n, from);
        CHECK(!bad, "%zu bytes from %d at rank %d: %zu are wrong", n, from, j->rank, bad);
    }
    for (from = 1; from < j->ranks; from++) {
        int to = from > 1 || j->ranks == 2 ? 0 : j->ranks - 1;
        set_bytes(bytes, n, j->rank);
        CHECK(stx_group_send_bytes(x, bytes, n, from, to), "%s", stx_error(x));
        bad = wrong_bytes(bytes, n, j->rank == to ? from : j->rank);
        CHECK(!bad, "%zu bytes from %d to %d, at rank %d: %zu are wrong", n, from, to, j->rank,
              bad);
    }
}

static void exchange_parameters(stx_ctx *x, job *j) {
    stx_params *p = stx_params_create(x);
    stx_tensor *t = stx_param(p, STX_NORMAL, 1, "w", 30, 30, 0, 0);
    float all[900];
    size_t i, bad = 0;
    stx_param_scale(x, t, 0, 30, 1 + j->rank);
    CHECK(stx_group_broadcast_params(p), "%s", stx_error(x));
    stx_param_scale(x, t, 0, 30, 2);
    stx_get(x, t, all);
    stx_param_fill(x, t, 0, 30, 7);
    stx_get(x, t, all);
    for (i = 0; i < 900; i++) bad += all[i] != 7;
    CHECK(!bad && stx_ok(x), "parameters after their exchange: %s", stx_error(x));
    j->out->hash = cuda_hash(x, t->data, t->size, j->out->hash);
}


static void exchange_job(job *j) {
    static const size_t sizes[] = {1, 7, 1000, 300000};
    stx_ctx *x = joined(j);
    stx_params *p;
    double one = 1;
    size_t i;
    j->out->hash = 1;
    for (i = 0; i < sizeof sizes / sizeof *sizes && stx_ok(x); i++) {
        double *v = (double *)malloc((sizes[i] + 1) * sizeof *v);
        unsigned char *bytes = (unsigned char *)malloc(sizes[i]);
        exchange_mean(x, j, sizes[i]);
        exchange_sum(x, j, v, sizes[i]);
        exchange_max(x, j, v, sizes[i]);
        exchange_bytes(x, j, bytes, sizes[i]);
        free(v);
        free(bytes);
    }
    CHECK(stx_group_sum(x, NULL, 0) && stx_group_broadcast(x, NULL, 0, 1), "0 elements: %s",
          stx_error(x));
    exchange_parameters(x, j);

    /* a context can join only once, and only before its first parameter */
    CHECK(!stx_group_join(x, NULL) && strstr(stx_error(x), "once"), "a second time: %s",
          stx_error(x));
    stx_clear_error(x);
    CHECK(stx_group_sum(x, &one, 1) && one == j->ranks, "the group after the error: %s",
          stx_error(x));
    stx_group_leave(x);
    CHECK(stx_ok(x) && stx_ranks(x) == 1 && stx_group_sum(x, &one, 1) && one == j->ranks,
          "after leaving: %s", stx_error(x));
    stx_destroy(x);
    x = context(j);
    p = stx_params_create(x);
    stx_param(p, STX_NORMAL, 1, "w", 3, 0, 0, 0);
    CHECK(!stx_group_join(x, NULL) && strstr(stx_error(x), "before its first parameter"),
          "after a parameter: %s", stx_error(x));
    stx_destroy(x);
}

static void test_exchange(void) {
    int n, r;
    for (n = 2; n <= MAX_RANKS && n <= gpus; n++) {
        job j;
        memset(&j, 0, sizeof j);
        j.ranks = n;
        together("exchange", exchange_job, j, -1, -1);
        for (r = 1; r < n; r++)
            CHECK(results[r].hash == results[0].hash,
                  "%d ranks: rank %d has other bits than rank 0", n, r);
    }
}

/* Rank 0 creates the group's id, and the program distributes it, as a program started
   by MPI would. */
static int pipes[2];

static void named_job(job *j) {
    unsigned char id[STX_NCCL_ID];
    stx_ctx *x = context(j);
    double v = j->rank + 1;
    if (j->rank)
        CHECK(read(pipes[0], id, sizeof id) == (ssize_t)sizeof id, "no id");
    else
        CHECK(stx_cuda_group_id(x, id, 0) && !getenv("NCCL_COMM_ID")
                  && write(pipes[1], id, sizeof id) == (ssize_t)sizeof id,
              "%s", stx_error(x));
    CHECK(stx_cuda_group_join(x, id, j->rank, 2) && stx_cuda_group_reduce(x, &v, 1, 0) && v == 3,
          "%g, %s", v, stx_error(x));
    CHECK(stx_cuda_group_reduce(x, &v, 0, 0) && v == 3, "0 elements: %s", stx_error(x));
    stx_destroy(x); /* without leaving the group first */
}

/* Tests the group's address, which is derived from MASTER_ADDR, MASTER_PORT and SLURM's
   host list. If `expected` begins with !, the rest is part of the expected error
   message. */
static void address(stx_ctx *x, const char *addr, const char *port, const char *list,
                    const char *expected) {
    unsigned char id[STX_NCCL_ID];
    const char *got;
    environment(0, 1);
    if (addr) setenv("MASTER_ADDR", addr, 1);
    if (port) setenv("MASTER_PORT", port, 1);
    if (list) setenv("SLURM_JOB_NODELIST", list, 1);
    if (expected[0] == '!') {
        CHECK(!stx_cuda_group_id(x, id, 1) && strstr(stx_error(x), expected + 1),
              "expected %s, got %s", expected, stx_error(x));
        stx_clear_error(x);
        return;
    }
    /* NCCL may report that the host does not exist, but by then the address is set. */
    stx_cuda_group_id(x, id, 1);
    stx_clear_error(x);
    got = getenv("NCCL_COMM_ID");
    CHECK(got && !strcmp(got, expected), "expected %s, got %s", expected, got ? got : "nothing");
}

static void address_job(job *j) {
    stx_ctx *x = context(j);
    unsigned char a[STX_NCCL_ID], b[STX_NCCL_ID];
    address(x, "127.0.0.1", "4000", NULL, "127.0.0.1:4001");
    address(x, "127.0.0.1", NULL, "gpu[03-05,9]", "127.0.0.1:29501");
    address(x, "::1", "4000", NULL, "[::1]:4001");
    address(x, NULL, NULL, "gpu[03-05,9]", "gpu03:29501");
    address(x, NULL, "5", "a1,b2", "a1:6");
    address(x, NULL, "5", "r[2-3]n[7,9]-ib,b2", "r2n7-ib:6");
    address(x, NULL, NULL, NULL, "!MASTER_ADDR");
    address(x, "127.0.0.1", "65535", NULL, "!MASTER_PORT");
    address(x, "127.0.0.1", "port", NULL, "!MASTER_PORT");
    environment(0, 1);
    setenv("NCCL_COMM_ID", "127.0.0.1:4444", 1);
    CHECK(stx_cuda_group_id(x, a, 1) && stx_cuda_group_id(x, b, 1) && !memcmp(a, b, sizeof a)
              && !strcmp(getenv("NCCL_COMM_ID"), "127.0.0.1:4444"),
          "the same id from one address: %s", stx_error(x));
    unsetenv("NCCL_COMM_ID");
    CHECK(stx_cuda_group_id(x, a, 0) && stx_cuda_group_id(x, b, 0) && memcmp(a, b, sizeof a),
          "another id each time: %s", stx_error(x));
    stx_destroy(x);
}

static void test_names(void) {
    job j;
    memset(&j, 0, sizeof j);
    j.ranks = 1;
    together("addresses", address_job, j, -1, -1);
    j.ranks = 2;
    if (gpus < 2) return;
    CHECK(!pipe(pipes), "no pipe");
    together("named", named_job, j, -1, -1);
    close(pipes[0]);
    close(pipes[1]);
}
#endif


// >>training

typedef struct model {
    stx_ctx *x;
    stx_span *span;
    stx_span_state *span_state;
    stx_sru_lm *sru;
    stx_sru_state *sru_state;
    stx_params *params;
    stx_optim *o;
    stx_ids *in, *out;
    size_t streams;
    const job *j;
    int n, calls, last_call;
    uint64_t key; /* added to the step key */
} model;

static void model_make_span(model *m) {
    stx_span_desc d;
    memset(&d, 0, sizeof d);
    d.vocab = V;
    d.layers = 1;
    d.dim = 16;
    d.heads = 1;
    d.inner = 24;
    d.span = 16;
    d.adapt_span = 1;
    d.ramp = 8;
    d.span_init = 0.4;
    d.span_loss = 1e-4;
    d.dropout = 0.2;
    d.emb_dropout = 0.1;
    m->span = stx_span_create(m->x, &d);
    m->params = stx_span_params(m->span);
    m->span_state = stx_span_state_create(m->span, m->streams);
}

static void model_make_sru(model *m) {
    stx_sru_lm_desc d;
    memset(&d, 0, sizeof d);
    d.vocab = V;
    d.dim = 16;
    d.dropout = 0.2;
    d.sru.layers = 2;
    d.sru.transform = STX_SRU_ATTENTION;
    d.sru.proj = 8;
    d.sru.attn_dropout = 0.1;
    d.sru.attention_last = 1;
    d.sru.alpha_init = 0.5;
    m->sru = stx_sru_lm_create(m->x, &d);
    m->params = stx_sru_lm_params(m->sru);
    m->sru_state = stx_sru_state_create(m->sru->sru, m->streams);
}

static void model_make(model *m, stx_ctx *x, const job *j) {
    stx_optim_desc od;
    memset(m, 0, sizeof *m);
    memset(&od, 0, sizeof od);
    m->x = x;
    m->j = j;
    m->streams = (size_t)(B / j->ranks);
    if (j->family == 0)
        model_make_span(m);
    else
        model_make_sru(m);
    od.kind = j->family ? STX_ADAM : STX_SGD;
    od.momentum = 0.9;
    od.eps = 1e-3; /* large, because otherwise the sign of a rounding error would
                      determine an update */
    od.clip = j->family ? 0.5 : 1;
    m->o = stx_optim_create(m->params, &od);
    m->in = stx_tokens_create(x, m->streams, T);
    m->out = stx_tokens_create(x, m->streams, T);
    CHECK(stx_ok(x), "%s", stx_error(x));
}

static void model_free(model *m) {
    if (m->span)
        stx_span_state_free(m->span_state);
    else
        stx_sru_state_free(m->sru_state);
    stx_destroy(m->x);
}

static double rate_of(const model *m) {
    return m->j->family ? 0.03 : 0.05;
}

static void model_step(void *user) {
    model *m = (model *)user;
    stx_tensor *loss, *total;
    m->calls++;
    m->last_call = m->n;
    stx_begin(m->x, STX_TRAIN);
    loss = total = m->span ? stx_span_loss(m->span, m->in, m->out, m->span_state, m->span_state)
                           : stx_sru_lm_loss(m->sru, m->in, m->out, m->sru_state, m->sru_state);
    if (m->span) total = stx_span_total(m->span, loss);
    stx_metric_set(m->x, 0, loss, 1, 0);
    if (m->j->overlap) stx_group_overlap(m->o);
    stx_backward(m->x, total);
    stx_optim_step(m->o, rate_of(m));
    if (m->span) stx_span_clamp(m->span);
}

/* Runs step n on this rank's share of the streams. Changing m->key changes the key of
   the step. */
static double model_run(model *m, int n) {
    int32_t in[B * T], out[B * T];
    size_t i, b, from = (size_t)m->j->rank * m->streams;
    uint64_t key;
    for (b = 0; b < m->streams; b++)
        for (i = 0; i < T; i++) {
            size_t at = (size_t)n * T + i, s = from + b + 2;
            in[b * T + i] = (int32_t)((at * s + at / 3 * 5 + s) % V);
            at++;
            out[b * T + i] = (int32_t)((at * s + at / 3 * 5 + s) % V);
        }
    m->n = n;
    stx_tokens_set(m->x, m->in, in);
    stx_tokens_set(m->x, m->out, out);
    stx_optim_set_lr(m->o, rate_of(m));
    key = m->span ? stx_span_key(m->span, m->in, m->out, m->span_state, 0)
                  : stx_sru_lm_key(m->sru, m->in, m->out, m->sru_state, 0);
    stx_step_run(m->x, key + m->key, model_step, m);
    return stx_metric_get(m->x, 0);
}

/* A step that was captured in the group must not be replayed after this rank has left
   the group. */
static void step_after_group(model *m) {
    double loss;
    stx_group_leave(m->x);
    loss = model_run(m, STEPS);
    if (m->j->shard)
        CHECK(strstr(stx_error(m->x), "the optimiser's state is sharded"), "a step: %s",
              stx_error(m->x));
    else
        CHECK(loss > 0 && stx_ok(m->x), "a step after the group: %s", stx_error(m->x));
}

static void train_job(job *j) {
    found *out = j->out;
    model m;
    size_t i, at = 0;
    int n;
    model_make(&m, j->ranks > 1 ? joined(j) : context(j), j);
#ifdef SEQTX_CUDA_HOST
    if (j->uncaptured && (j->uncaptured != REFUSES_RANK_1 || j->rank == 1))
        cuda_host_nccl_fail_captured(5, j->uncaptured == ENDS);
#endif
    for (n = 0; n < STEPS && stx_ok(m.x); n++) out->loss[n] = model_run(&m, n);
    snprintf(out->text, sizeof out->text, "%s", stx_step_replay_status(m.x));
    CHECK(stx_ok(m.x), "family %d, %d ranks: %s", j->family, j->ranks, stx_error(m.x));
    if (!j->uncaptured)
        CHECK(!out->text[0], "family %d, %d ranks: %s", j->family, j->ranks, out->text);
    out->calls = m.calls;
    out->last_call = m.last_call;
    out->graphs = cuda_replays();
    for (i = 0; i < m.params->count; i++) {
        const stx_tensor *t = m.params->tensor[i];
        if (at + t->size <= MAX_VALUES) stx_get(m.x, t, out->value + at);
        at += t->size;
    }
    out->hash = cuda_hash_params(m.x, m.params, 1);
    out->values = at;
    CHECK(at <= MAX_VALUES, "%d parameter elements, at most %d are supported", (int)at,
          (int)MAX_VALUES);
    if (j->ranks > 1) step_after_group(&m);
    model_free(&m);
}

#ifdef SEQTX_NCCL
/* whole: the results of a single rank; before: the results of the previous group */
static found whole, before;

/* Returns the largest relative difference between the losses of the group and of one
   rank. */
static double loss_error(int ranks) {
    double worst = 0;
    int n, r;
    for (n = 0; n < STEPS; n++) {
        double mean = 0;
        for (r = 0; r < ranks; r++) mean += results[r].loss[n] / ranks;
        raise_worst(&worst, fabs(mean - whole.loss[n]) / whole.loss[n]);
    }
    return worst;
}

/* Returns the largest parameter difference, relative to the largest parameter. */
static double values_error(void) {
    return max_difference(results[0].value, whole.value, whole.values)
           / cuda_largest(whole.value, whole.values, 0);
}

static const char *const families[] = {"span", "sru"};

/* Trains with several ranks and compares with one rank. In f32, only the order of sums
   differs. In bf16, a parameter may be rounded in the other direction, which changes
   activations that depend on it by one bf16 unit (2^-8). Differences of 1e-7 to 1e-3
   were observed. */
static void train_together(const job *j, int overlap) {
    const char *name = families[j->family];
    const int half = j->precision == STX_PREC_BF16;
    const double most = half ? 5e-3 : 1e-5;
    double loss, params;
    int r;
    together("ranks", train_job, *j, -1, -1);
    for (r = 0; r < j->ranks; r++) {
        CHECK(results[r].hash == results[0].hash,
              "%s: rank %d of %d has other parameters than rank 0", name, r, j->ranks);
        CHECK(results[r].last_call < STEPS / 2 && results[r].calls <= STEPS / 3,
              "%s: %d calls in %d steps, the last in step %d", name, results[r].calls, STEPS,
              results[r].last_call);
        if (CUDA_ON_HOST)
            CHECK(results[r].graphs >= STEPS - 12, "%s: %ld replays", name, results[r].graphs);
    }
    loss = loss_error(j->ranks);
    params = values_error();
    printf("%s, precision %d, %d ranks, overlap %d: losses within %.1e, parameters %.1e; %d calls "
           "of %d steps; nll %.3f to %.3f\n",
           name, half, j->ranks, overlap, loss, params, results[0].calls, STEPS, whole.loss[0],
           whole.loss[STEPS - 1]);
    CHECK(loss <= most && params <= most,
          "%s, bf16 %d, %d ranks, overlap %d: error %g in losses, %g in parameters", name, half,
          j->ranks, overlap, loss, params);
    if (overlap == 1 && !half)
        CHECK(before.hash == results[0].hash,
              "%s, %d ranks: overlapped exchange of gradients gives other bits", name, j->ranks);
    before = results[0];
}

static void train_family(int family, int half) {
    job j;
    int ranks, overlap;
    memset(&j, 0, sizeof j);
    j.family = family;
    j.precision = cuda_precision(half);
    j.ranks = 1;
    together("one rank", train_job, j, -1, -1);
    whole = results[0];
    CHECK(whole.loss[STEPS - 1] < 0.9 * whole.loss[0], "%s: from %g to %g", families[family],
          whole.loss[0], whole.loss[STEPS - 1]);
    for (ranks = 2; ranks <= 4 && ranks <= gpus; ranks += 2)
        for (overlap = 0; overlap < 3; overlap++) {
            if (half && overlap != (ranks == 4 ? 2 : 0)) continue; /* in bf16, one mode
                                                                      per group size
                                                                      suffices */
            j.ranks = ranks;
            j.overlap = overlap > 0;
            j.shard = overlap == 2;
            train_together(&j, overlap);
        }
    if (gpus < 4 || half) return;
    together("again", train_job, j, -1, -1);
    CHECK(before.hash == results[0].hash
              && !memcmp(before.loss, results[0].loss, sizeof before.loss),
          "%s: a second run has other bits", families[family]);
}

static void test_train(void) {
    int family, half;
    for (family = 0; family < 2; family++)
        for (half = 0; half < 2; half++) train_family(family, half);
}

  #ifdef SEQTX_CUDA_HOST
/* If NCCL cannot capture, on all ranks or on one of them, each step must be launched,
   the status must say why, and the bits must equal those of replayed steps. The
   communicator may fail together with the capture; it is then replaced. */
static void test_uncaptured(void) {
    static found replayed[2];
    int family, how, r;
    for (family = 0; family < 2; family++)
        for (how = 0; how <= ENDS; how++) {
            job j;
            memset(&j, 0, sizeof j);
            j.family = family;
            j.ranks = 2;
            j.overlap = how == REFUSES;
            j.uncaptured = how;
            together("uncaptured", train_job, j, -1, -1);
            if (!how) memcpy(replayed, results, sizeof replayed);
            for (r = 0; r < 2; r++) {
                const int captured = !how || (how == REFUSES_RANK_1 && r == 0);
                CHECK(results[r].hash == replayed[r].hash
                          && !memcmp(results[r].loss, replayed[r].loss, sizeof replayed[r].loss),
                      "family %d, way %d: rank %d has other bits", family, how, r);
                CHECK(captured ? !results[r].text[0]
                               : !strncmp(results[r].text, "not captured: ", 14)
                                     && strstr(results[r].text, "NCCL cannot capture") != NULL,
                      "family %d, way %d: status of rank %d: %s", family, how, r,
                      results[r].text);
                CHECK(captured ? results[r].graphs > 0
                               : results[r].graphs == 0 && results[r].last_call == STEPS - 1,
                      "family %d, way %d: rank %d has %ld replays, its last call is in step %d",
                      family, how, r, results[r].graphs, results[r].last_call);
            }
        }
}

/* The communicator fails during a later capture. Existing graphs can then no longer be
   replayed, so the step must report an error. */
static void late_failure_job(job *j) {
    model m;
    int n;
    model_make(&m, joined(j), j);
    for (n = 0; n < STEPS && !cuda_host_graph_launches(); n++) model_run(&m, n);
    CHECK(stx_ok(m.x) && cuda_host_graph_launches() > 0, "%s", stx_error(m.x));
    cuda_host_nccl_fail_captured(3, 1);
    m.key = 1;
    for (; n < STEPS && stx_ok(m.x); n++) model_run(&m, n);
    CHECK(!stx_ok(m.x) && strstr(stx_error(m.x), "NCCL cannot capture")
              && strstr(stx_error(m.x), "desc.no_graph"),
          "%s", stx_error(m.x));
    model_free(&m);
}
  #endif


// >>ends

/* Checks that at least `least` seconds have passed and that the error names this rank.
   There is no upper limit, because it would depend on the machine; tests/run.sh ends a
   hang. */
static void failed_after(job *j, stx_ctx *x, double begin, double least, const char *what) {
    char who[32];
    double took = now() - begin;
    snprintf(who, sizeof who, "rank %d of %d", j->rank, j->ranks);
    CHECK(!stx_ok(x) && strstr(stx_error(x), what) && strstr(stx_error(x), who),
          "the error of rank %d: %s", j->rank, stx_error(x));
    CHECK(took >= least, "rank %d: after %g s, expected at least %g s: %s", j->rank, took, least,
          stx_error(x));
}

static void killed_job(job *j) {
    model m;
    double begin = now();
    int n;
    model_make(&m, joined(j), j);
    for (n = 0; n < STEPS && stx_ok(m.x); n++) {
        if (n == 9 && j->rank == j->die) kill(getpid(), SIGKILL);
        if (n == 9) {
            begin = now();
            inner_group_timeout(m.x, 0.3);
        }
        model_run(&m, n);
    }
    failed_after(j, m.x, begin, 0.29, "did not answer within 0.3 s");
    stx_group_leave(m.x);
    model_free(&m);
}

static void absent_job(job *j) {
    stx_ctx *x = context(j);
    double begin = now();
    setenv("SEQTX_GROUP_TIMEOUT", "0.3", 1);
    CHECK(!stx_group_join(x, NULL), "a rank is missing");
    failed_after(j, x, begin, 0.29, "did not answer within 0.3 s");
    stx_destroy(x);
}

/* Ways in which a rank waits for a rank that has ended. */
enum { WAIT_IN_SUM, WAIT_IN_LEAVE, WAIT_IN_DOWNLOAD, WAIT_IN_SYNC, WAITS };

/* Tests what happens when one of two ranks ends. j->family: how the remaining rank
   waits for it. */
static void gone_job(job *j) {
    stx_ctx *x = joined(j);
    float a[64] = {0};
    double v = 1, begin;
    stx_real *p;
    stx_group_leave(x);
    stx_destroy(x);
    unsetenv("NCCL_COMM_ID"); /* a second group, which uses the next port */
    set_variable("MASTER_PORT", first_port + 2 * groups + 1);
    x = joined(j);
    p = cuda_array(x, a, 64, STX_MEM_BYTES);
    stx_cuda_group_mean(x, p, 64, -1);
    stx_cuda_group_wait(x);
    stx_download(x, a, p, 64);
    CHECK(stx_ok(x), "%s", stx_error(x));
    if (j->rank == j->die) {
        stx_destroy(x);
        return;
    }
    begin = now();
    inner_group_timeout(x, 0.3);
    if (j->family == WAIT_IN_SUM)
        stx_group_sum(x, &v, 1);
    else if (j->family == WAIT_IN_LEAVE)
        stx_group_leave(x);
    else {
        stx_cuda_group_mean(x, p, 64, -1);
        stx_cuda_group_wait(x);
        if (j->family == WAIT_IN_DOWNLOAD)
            stx_download(x, a, p, 64);
        else
            stx_cuda_sync(x);
    }
    failed_after(j, x, begin, 0.29, "did not answer within 0.3 s");
    CHECK(!stx_group_sum(x, &v, 1) && v == 1, "errors are sticky");
    stx_clear_error(x);
    if (j->family != WAIT_IN_LEAVE)
        CHECK(!stx_cuda_group_reduce(x, &v, 1, 0) && strstr(stx_error(x), "has ended"),
              "no group: %s", stx_error(x));
    stx_destroy(x);
}

/* Tests what happens when NCCL reports an error (j->family = 0) or when the program
   aborts the group (j->family = 1). */
static void error_job(job *j) {
    model m;
    int n;
    model_make(&m, joined(j), j);
    for (n = 0; n < 8; n++) model_run(&m, n);
    CHECK(stx_ok(m.x), "%s", stx_error(m.x));
    if (j->family) {
        stx_group_abort(m.x, 1);
        CHECK(stx_ok(m.x), "%s", stx_error(m.x));
        model_run(&m, 9);
        CHECK(!stx_ok(m.x) && strstr(stx_error(m.x), "has ended"), "%s", stx_error(m.x));
    } else {
  #ifdef SEQTX_CUDA_HOST
        double v = 1;
        if (j->rank) {
            cuda_host_nccl_fail(6);
            stx_group_sum(m.x, &v, 1);
        } else {
            cuda_host_nccl_fail(6);
            stx_cuda_group_mean(m.x, m.params->grads, 8, -1);
            stx_cuda_group_wait(m.x);
            stx_cuda_sync(m.x);
        }
        CHECK(!stx_ok(m.x) && strstr(stx_error(m.x), "remote process")
                  && strstr(stx_error(m.x), "of 2"),
              "%s", stx_error(m.x));
  #endif
    }
    model_free(&m);
}

static void test_ends(void) {
    job j;
    int k;
    memset(&j, 0, sizeof j);
    j.ranks = 3;
    j.die = 2;
    j.family = 1;
    if (gpus >= 4) {
        j.ranks = 4;
        j.die = 1;
        j.overlap = 1;
        together("killed", killed_job, j, -1, 1);
    }
    j.ranks = 2;
    j.die = 1;
    j.overlap = 0;
    if (gpus < 2) return;
    together("absent", absent_job, j, 1, -1);
    for (k = 0; k < WAITS; k++) {
        j.family = k;
        together("gone", gone_job, j, -1, -1);
    }
    for (k = 0; k < 2; k++) {
        j.family = k;
        together("errors", error_job, j, -1, -1);
    }
  #ifdef SEQTX_CUDA_HOST
    j.family = 1;
    together("a later capture fails", late_failure_job, j, -1, -1);
  #endif
}
#else
/* In a build without NCCL, a process started as one of several ranks must report an
   error that names the missing build option. */
static void none_job(job *j) {
    stx_ctx *x = context(j);
    CHECK(!stx_group_join(x, NULL) && strstr(stx_error(x), "SEQTX_NCCL"), "%s", stx_error(x));
    stx_destroy(x);
}
#endif


// >>alone
/* Tests a context without a group, and a group of one rank. */
static void alone_job(job *j) {
    model m;
    double v = 5;
    unsigned char byte = 9;
    stx_ctx *x = context(j);
    CHECK(stx_rank(x) == 0 && stx_ranks(x) == 1, "alone");
    if (j->family)
        CHECK(stx_group_join(x, NULL) && stx_rank(x) == 0 && stx_ranks(x) == 1,
              "a group of one: %s", stx_error(x));
    CHECK(stx_group_sum(x, &v, 1) && stx_group_max(x, &v, 1) && stx_group_broadcast(x, &byte, 1, 0)
              && stx_group_send_bytes(x, &byte, 1, 0, 0) && v == 5 && byte == 9,
          "%s", stx_error(x));
    stx_group_leave(x);
    stx_group_abort(x, 1);
#ifdef SEQTX_NCCL
    stx_cuda_group_leave(x);
    stx_cuda_group_wait(x);
    CHECK(stx_ok(x), "%s", stx_error(x));
    CHECK(!stx_cuda_group_reduce(x, &v, 1, 0) && strstr(stx_error(x), "not in a group"), "%s",
          stx_error(x));
    stx_clear_error(x);
#endif
    {
        job plain = *j;
        plain.family = 0;
        model_make(&m, x, &plain);
        m.j = &plain;
        model_run(&m, 0);
        v = model_run(&m, 1);
        j->out->hash = cuda_hash(x, m.params->tensor[0]->data, m.params->tensor[0]->size, 1);
        CHECK(stx_ok(x) && v > 0, "%s", stx_error(x));
        model_free(&m);
    }
}

static void test_alone(void) {
    job j;
    uint64_t h;
    memset(&j, 0, sizeof j);
    j.ranks = 1;
    together("alone", alone_job, j, -1, -1);
    h = results[0].hash;
    j.family = 1;
    together("a group of one", alone_job, j, -1, -1);
    CHECK(h == results[0].hash, "a group of one trains differently than a context without a group");
}

#ifndef SEQTX_CUDA_HOST
static void count_job(job *j) {
    stx_desc d;
    memset(&d, 0, sizeof d);
    d.device = STX_CUDA;
    for (j->out->calls = 0; j->out->calls < MAX_RANKS; j->out->calls++) {
        stx_ctx *x;
        int ok;
        d.gpu = j->out->calls;
        x = stx_create(&d);
        ok = stx_ok(x);
        stx_destroy(x);
        if (!ok) break;
    }
    CHECK(1, "counted");
}
#endif

int main(int argc, char **argv) {
    int brief = argc > 1 && !strcmp(argv[1], "short");
    first_port = 20000 + (int)((long)getpid() % 300) * 100;
    results = (found *)mmap(NULL, MAX_RANKS * sizeof *results, PROT_READ | PROT_WRITE,
                         MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (results == MAP_FAILED) {
        printf("no shared memory\n");
        return 1;
    }
#ifndef SEQTX_CUDA_HOST
    {
        job j;
        memset(&j, 0, sizeof j);
        j.ranks = 1;
        together("count", count_job, j, -1, -1);
        gpus = results[0].calls;
        printf("%d GPUs%s\n", gpus, gpus < MAX_RANKS ? ": larger groups are omitted" : "");
    }
#endif
    test_alone();
#ifdef SEQTX_NCCL
    test_names();
    test_exchange();
    if (!brief) test_train();
  #ifdef SEQTX_CUDA_HOST
    if (!brief) test_uncaptured();
  #endif
    test_ends();
#else
    {
        job j;
        memset(&j, 0, sizeof j);
        j.ranks = 2;
        together("no engine", none_job, j, -1, -1);
    }
    (void)brief;
    (void)gpus;
    (void)train_job;
    (void)now;
    (void)joined;
    (void)value;
#endif
    return test_end();
}
