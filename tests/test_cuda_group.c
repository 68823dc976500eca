/* Groups of ranks with GPUs: what they exchange, whole models trained together as one
   rank trains them with the whole batch, captured steps, and ranks that end, or never
   begin. Each rank is a process that this one forks and that uses CUDA alone; what
   they found comes back in shared memory. Under tests/cuda_host each has a GPU of its
   own; else there must be as many, and what wants more is left out. */
#if !defined(_WIN32) && !defined(_DEFAULT_SOURCE)
  #define _DEFAULT_SOURCE /* MAP_ANONYMOUS */
#endif
#include "../seqtx_attn_span.h"
#include "../seqtx_sru.h"
#include "cuda_test.h"
#include "inner.h"
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { MAX_RANKS = 4, B = 4, T = 8, V = 24, STEPS = 30, MAX_NUMBERS = 16384 };

/* >>processes */

typedef struct found { /* what a rank tells */
    long passed, failed;
    uint64_t hash;
    double loss[STEPS], seconds;
    int calls, last_call; /* of the step's function, and in which step the last one was */
    long graphs;
    size_t numbers;
    float number[MAX_NUMBERS];
    char text[512];
} found;

static found *told; /* (MAX_RANKS) */
static int groups, first_port, gpus = MAX_RANKS;

/* uncaptured: of train_job, how NCCL fails in captures; else 0 */
enum { REFUSES = 1, REFUSES_RANK_1, ENDS };

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

static void set_number(const char *name, int v) {
    char s[16];
    snprintf(s, sizeof s, "%d", v);
    setenv(name, s, 1);
}

static void environment(int rank, int ranks) {
    static const char *const names[] = {
        "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "PMI_RANK",     "SLURM_PROCID",
        "SLURM_STEP_NODELIST",  "SLURM_JOB_NODELIST",  "NCCL_COMM_ID", "RANK",
        "WORLD_SIZE",           "MASTER_ADDR",         "MASTER_PORT"};
    size_t i;
    for (i = 0; i < sizeof names / sizeof *names; i++) unsetenv(names[i]);
    if (ranks < 2) return;
    set_number("RANK", rank);
    set_number("LOCAL_RANK", rank);
    set_number("WORLD_SIZE", ranks);
    set_number("LOCAL_WORLD_SIZE", ranks);
    setenv("MASTER_ADDR", "127.0.0.1", 1);
    setenv("SEQTX_GROUP_TIMEOUT", "1800", 1); /* on a busy machine all ranks answer late */
    set_number("MASTER_PORT", first_port + 2 * groups);
}

/* The ranks do it, each in a process. Rank `absent` is not started, rank `killed` is
   expected to be killed. */
static void together(const char *name, job_fn fn, job j, int absent, int killed) {
    pid_t pid[MAX_RANKS];
    int r, status;
    memset(told, 0, MAX_RANKS * sizeof *told);
    fflush(stdout);
    groups++;
    for (r = 0; r < j.ranks; r++) {
        environment(r, j.ranks);
        if (r == absent) continue;
        pid[r] = fork();
        if (pid[r]) continue;
        alarm(1800); /* ends a hang, see tests/limit.sh */
        test_passed = test_failed = 0;
        j.rank = r;
        j.out = told + r;
        fn(&j);
#ifdef SEQTX_CUDA_HOST
        cuda_host_check();
        CHECK(cuda_host_reports() == 0, "%s: the shim reports %ld violations", name,
              cuda_host_reports());
        CHECK(cuda_host_bytes_in_use() == 0 && cuda_host_pinned_in_use() == 0,
              "%s: %zu bytes are not freed", name,
              cuda_host_bytes_in_use() + cuda_host_pinned_in_use());
  #ifdef SEQTX_NCCL
        CHECK(cuda_host_comms() == 0, "%s: %ld communicators are left", name, cuda_host_comms());
  #endif
#endif
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
            CHECK(WIFEXITED(status) && told[r].passed + told[r].failed > 0, "%s: rank %d ended: %d",
                  name, r, status);
        test_passed += told[r].passed;
        test_failed += told[r].failed;
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
    d.bucket = 1000; /* several, of which some end inside a tensor */
    d.shard = j->shard;
    CHECK(stx_group_join(x, &d) && stx_rank(x) == j->rank && stx_ranks(x) == j->ranks,
          "rank %d of %d: %s", j->rank, j->ranks, stx_error(x));
    return x;
}

/* >>exchange */

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
    p = cuda_values(x, a, n, STX_MEM_BYTES);
    q = cuda_values(x, b, n, STX_MEM_BYTES);
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
            if (fabs(value(r, i)) > top) top = fabs(value(r, i));
            if (fabs(value(r, i + 3)) > top) top = fabs(value(r, i + 3));
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

static void exchange_numbers(stx_ctx *x, const job *j, size_t n) {
    double *v = (double *)malloc((n + 1) * sizeof *v);
    unsigned char *bytes = (unsigned char *)malloc(n);
    size_t i, bad = 0;
    int r, from;
    for (i = 0; i < n; i++) v[i] = value(j->rank, i);
    v[n] = 77;
    CHECK(stx_group_sum(x, v, n), "%s", stx_error(x));
    for (i = 0; i < n; i++) {
        double s = 0;
        for (r = 0; r < j->ranks; r++) s += value(r, i);
        bad += !(fabs(v[i] - s) <= 1e-9);
        j->out->hash = (j->out->hash ^ (uint64_t)(int64_t)(v[i] * 1048576)) * 1099511628211u;
        /* and of the last bits some */
        j->out->hash += (uint64_t)(v[i] * 1e10 - floor(v[i] * 1e10) > 0.5);
    }
    CHECK(!bad && v[n] == 77, "sum of %zu at rank %d of %d: %zu are wrong", n, j->rank, j->ranks,
          bad);
    for (i = 0; i < n; i++) v[i] = value(j->rank, i);
    if (j->rank == 1) v[n / 2] = (double)NAN;
    if (j->rank == 0 && n > 1) v[0] = HUGE_VAL;
    if (n > 2) v[n - 1] = -HUGE_VAL;
    CHECK(stx_group_max(x, v, n), "%s", stx_error(x));
    for (bad = 0, i = 0; i < n; i++) {
        double m = value(0, i);
        for (r = 1; r < j->ranks; r++)
            if (value(r, i) > m) m = value(r, i);
        if (i == n / 2)
            bad += !(v[i] != v[i]);
        else if (i == 0)
            bad += v[i] != HUGE_VAL;
        else if (i == n - 1)
            bad += v[i] != -HUGE_VAL;
        else
            bad += v[i] != m;
    }
    CHECK(!bad, "largest of %zu at rank %d of %d: %zu are wrong", n, j->rank, j->ranks, bad);
    for (from = 0; from < j->ranks; from += j->ranks - 1) {
        for (i = 0; i < n; i++) bytes[i] = (unsigned char)(i * 7 + i / 251 + 31 * (size_t)j->rank);
        CHECK(stx_group_broadcast(x, bytes, n, from), "%s", stx_error(x));
        for (bad = 0, i = 0; i < n; i++)
            bad += bytes[i] != (unsigned char)(i * 7 + i / 251 + 31 * (size_t)from);
        CHECK(!bad, "%zu bytes from %d at rank %d: %zu are wrong", n, from, j->rank, bad);
    }
    /* each to rank 0, and rank 1 to the last one */
    for (from = 1; from < j->ranks; from++) {
        int to = from > 1 || j->ranks == 2 ? 0 : j->ranks - 1, has;
        for (i = 0; i < n; i++) bytes[i] = (unsigned char)(i * 7 + i / 251 + 31 * (size_t)j->rank);
        CHECK(stx_group_send_bytes(x, bytes, n, from, to), "%s", stx_error(x));
        has = j->rank == to ? from : j->rank;
        for (bad = 0, i = 0; i < n; i++)
            bad += bytes[i] != (unsigned char)(i * 7 + i / 251 + 31 * (size_t)has);
        CHECK(!bad, "%zu bytes from %d to %d, at rank %d: %zu are wrong", n, from, to, j->rank,
              bad);
    }
    free(v);
    free(bytes);
}

static void exchange_job(job *j) {
    static const size_t sizes[] = {1, 7, 1000, 300000};
    stx_ctx *x = joined(j);
    stx_params *p;
    stx_tensor *t;
    float all[900];
    double one = 1;
    size_t i, bad = 0;
    j->out->hash = 1;
    for (i = 0; i < sizeof sizes / sizeof *sizes && stx_ok(x); i++) {
        exchange_mean(x, j, sizes[i]);
        exchange_numbers(x, j, sizes[i]);
    }
    CHECK(stx_group_sum(x, NULL, 0) && stx_group_broadcast(x, NULL, 0, 1), "nothing: %s",
          stx_error(x));
    p = stx_params_create(x);
    t = stx_param(p, STX_NORMAL, 1, "w", 30, 30, 0, 0);
    stx_param_scale(x, t, 0, 30, 1 + j->rank);
    CHECK(stx_group_broadcast_params(p), "%s", stx_error(x));
    stx_param_scale(x, t, 0, 30, 2);
    stx_get(x, t, all);
    stx_param_fill(x, t, 0, 30, 7);
    stx_get(x, t, all);
    for (i = 0; i < 900; i++) bad += all[i] != 7;
    CHECK(!bad && stx_ok(x), "parameters after their exchange: %s", stx_error(x));
    j->out->hash = cuda_hash(x, t->data, t->size, j->out->hash);
    /* once only, and not behind a parameter */
    CHECK(!stx_group_join(x, NULL) && strstr(stx_error(x), "once"), "a second time: %s",
          stx_error(x));
    stx_clear_error(x);
    CHECK(stx_group_sum(x, &one, 1) && one == j->ranks, "and the group is as it was: %s",
          stx_error(x));
    stx_group_leave(x);
    CHECK(stx_ok(x) && stx_ranks(x) == 1 && stx_group_sum(x, &one, 1) && one == j->ranks,
          "left: %s", stx_error(x));
    stx_destroy(x);
    x = context(j);
    p = stx_params_create(x);
    stx_param(p, STX_NORMAL, 1, "w", 3, 0, 0, 0);
    CHECK(!stx_group_join(x, NULL) && strstr(stx_error(x), "before its first parameter"),
          "behind a parameter: %s", stx_error(x));
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
            CHECK(told[r].hash == told[0].hash, "%d ranks: rank %d has other bits than rank 0", n,
                  r);
    }
}

/* A name for the group that rank 0 made and the program sends itself (MPI's part,
   where MPI started the ranks) */
static int pipes[2];

static void named_job(job *j) {
    unsigned char id[STX_NCCL_ID];
    stx_ctx *x = context(j);
    double v = j->rank + 1;
    if (j->rank)
        CHECK(read(pipes[0], id, sizeof id) == (ssize_t)sizeof id, "no name");
    else
        CHECK(stx_cuda_group_id(x, id, 0) && !getenv("NCCL_COMM_ID")
                  && write(pipes[1], id, sizeof id) == (ssize_t)sizeof id,
              "%s", stx_error(x));
    CHECK(stx_cuda_group_join(x, id, j->rank, 2) && stx_cuda_group_reduce(x, &v, 1, 0) && v == 3,
          "%g, %s", v, stx_error(x));
    CHECK(stx_cuda_group_reduce(x, &v, 0, 0) && v == 3, "nothing");
    stx_destroy(x); /* without leaving */
}

static void address(stx_ctx *x, const char *addr, const char *port, const char *list,
                    const char *want) {
    unsigned char id[STX_NCCL_ID];
    const char *got;
    environment(0, 1);
    if (addr) setenv("MASTER_ADDR", addr, 1);
    if (port) setenv("MASTER_PORT", port, 1);
    if (list) setenv("SLURM_JOB_NODELIST", list, 1);
    if (want[0] == '!') {
        CHECK(!stx_cuda_group_id(x, id, 1) && strstr(stx_error(x), want + 1), "want %s: %s", want,
              stx_error(x));
        stx_clear_error(x);
        return;
    }
    /* a host that there is not is for NCCL to say, which is asked after the name was
       made */
    stx_cuda_group_id(x, id, 1);
    stx_clear_error(x);
    got = getenv("NCCL_COMM_ID");
    CHECK(got && !strcmp(got, want), "%s, expected %s", got ? got : "nothing", want);
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
          "the same name from one address: %s", stx_error(x));
    unsetenv("NCCL_COMM_ID");
    CHECK(stx_cuda_group_id(x, a, 0) && stx_cuda_group_id(x, b, 0) && memcmp(a, b, sizeof a),
          "another name each time: %s", stx_error(x));
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

/* >>training */

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
    uint64_t key; /* added to the steps' */
} model;

static void model_make(model *m, stx_ctx *x, const job *j) {
    stx_optim_desc od;
    memset(m, 0, sizeof *m);
    memset(&od, 0, sizeof od);
    m->x = x;
    m->j = j;
    m->streams = (size_t)(B / j->ranks);
    if (j->family == 0) {
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
        m->span = stx_span_create(x, &d);
        m->params = stx_span_params(m->span);
        m->span_state = stx_span_state_create(m->span, m->streams);
    } else {
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
        m->sru = stx_sru_lm_create(x, &d);
        m->params = stx_sru_lm_params(m->sru);
        m->sru_state = stx_sru_state_create(m->sru->sru, m->streams);
    }
    od.kind = j->family ? STX_ADAM : STX_SGD;
    od.momentum = 0.9;
    od.eps = 1e-3; /* else the sign of a sum's last bits would be a step */
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

/* Step n of all streams, of which this rank has its own. The key without a state's
   sizes: the memory of the span model grows at first, and every step of this test
   shall have the key of the one before as soon as may be. */
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

static void train_job(job *j) {
    model m;
    size_t i, at = 0;
    int n;
    model_make(&m, j->ranks > 1 ? joined(j) : context(j), j);
#ifdef SEQTX_CUDA_HOST
    if (j->uncaptured && (j->uncaptured != REFUSES_RANK_1 || j->rank == 1))
        cuda_host_nccl_fail_captured(5, j->uncaptured == ENDS);
#endif
    for (n = 0; n < STEPS && stx_ok(m.x); n++) j->out->loss[n] = model_run(&m, n);
    snprintf(j->out->text, sizeof j->out->text, "%s", stx_step_replay_status(m.x));
    CHECK(stx_ok(m.x), "family %d, %d ranks: %s", j->family, j->ranks, stx_error(m.x));
    if (!j->uncaptured)
        CHECK(!j->out->text[0], "family %d, %d ranks: %s", j->family, j->ranks, j->out->text);
    j->out->calls = m.calls;
    j->out->last_call = m.last_call;
#ifdef SEQTX_CUDA_HOST
    j->out->graphs = cuda_host_graph_launches();
#endif
    j->out->hash = 1;
    for (i = 0; i < m.params->count; i++) {
        const stx_tensor *t = m.params->tensor[i];
        if (at + t->size <= MAX_NUMBERS) stx_get(m.x, t, j->out->number + at);
        at += t->size;
        j->out->hash = cuda_hash(m.x, t->data, t->size, j->out->hash);
    }
    j->out->numbers = at;
    CHECK(at <= MAX_NUMBERS, "%d numbers are too many", (int)at);
    if (j->ranks > 1) { /* what was captured in the group is not replayed without it */
        stx_group_leave(m.x);
        if (j->shard)
            CHECK((model_run(&m, STEPS), strstr(stx_error(m.x), "the optimiser's state is "
                                                                "sharded")),
                  "a step: %s", stx_error(m.x));
        else
            CHECK(model_run(&m, STEPS) > 0 && stx_ok(m.x), "a step after the group: %s",
                  stx_error(m.x));
    }
    model_free(&m);
}
#ifdef SEQTX_NCCL
static found whole, before;

/* The largest difference of losses, and of parameters to the largest of them */
static void compare(int ranks, double *loss, double *number) {
    size_t i;
    double top = 0, off = 0;
    int n, r;
    *loss = 0;
    for (n = 0; n < STEPS; n++) {
        double mean = 0, e;
        for (r = 0; r < ranks; r++) mean += told[r].loss[n] / ranks;
        e = fabs(mean - whole.loss[n]) / whole.loss[n];
        if (!(e <= *loss)) *loss = e;
    }
    for (i = 0; i < whole.numbers; i++) {
        double e = fabs((double)told[0].number[i] - (double)whole.number[i]),
               a = fabs((double)whole.number[i]);
        if (!(e <= off)) off = e;
        if (a > top) top = a;
    }
    *number = off / top;
}

static void test_train(void) {
    static const char *const families[] = {"span", "sru"};
    int family, precision, ranks, overlap, r;
    for (family = 0; family < 2; family++)
        for (precision = 0; precision < 2; precision++) {
            /* f32: the same but for the order of sums. bf16: where a parameter comes out
               on the other side of a rounding, the activations
           that it makes are a bfloat16 (2^-8) away: 1e-7 to 1e-3 was seen */
            double most = precision ? 5e-3 : 1e-5;
            job j;
            memset(&j, 0, sizeof j);
            j.family = family;
            j.precision = precision ? STX_PREC_BF16 : STX_PREC_F32;
            j.ranks = 1;
            together("one rank", train_job, j, -1, -1);
            whole = told[0];
            CHECK(whole.loss[STEPS - 1] < 0.9 * whole.loss[0], "%s: from %g to %g",
                  families[family], whole.loss[0], whole.loss[STEPS - 1]);
            for (ranks = 2; ranks <= 4 && ranks <= gpus; ranks += 2)
                for (overlap = 0; overlap < 3; overlap++) {
                    double loss, number;
                    if (precision && overlap != (ranks == 4 ? 2 : 0)) continue; /* enough of it */
                    j.ranks = ranks;
                    j.overlap = overlap > 0;
                    j.shard = overlap == 2;
                    together("ranks", train_job, j, -1, -1);
                    for (r = 0; r < ranks; r++) {
                        CHECK(told[r].hash == told[0].hash,
                              "%s: rank %d of %d has other parameters than rank 0",
                              families[family], r, ranks);
                        CHECK(told[r].last_call < STEPS / 2 && told[r].calls <= STEPS / 3,
                              "%s: %d calls in %d steps, the last one in step %d", families[family],
                              told[r].calls, STEPS, told[r].last_call);
  #ifdef SEQTX_CUDA_HOST
                        CHECK(told[r].graphs >= STEPS - 12, "%s: %ld replays", families[family],
                              told[r].graphs);
  #endif
                    }
                    compare(ranks, &loss, &number);
                    printf(
                        "%s, precision %d, %d ranks, overlap %d: losses within %.1e, parameters "
                        "%.1e; %d calls of %d steps; nll %.3f to %.3f\n",
                        families[family], precision, ranks, overlap, loss, number, told[0].calls,
                        STEPS, whole.loss[0], whole.loss[STEPS - 1]);
                    CHECK(
                        loss <= most && number <= most,
                        "%s, precision %d, %d ranks, overlap %d: losses off by %g, parameters by "
                        "%g",
                        families[family], precision, ranks, overlap, loss, number);
                    if (overlap == 1 && !precision)
                        CHECK(before.hash == told[0].hash,
                              "%s, %d ranks: other bits when gradients go out early",
                              families[family], ranks);
                    before = told[0];
                }
            if (gpus >= 4 && !precision) {
                together("again", train_job, j, -1, -1);
                CHECK(before.hash == told[0].hash
                          && !memcmp(before.loss, told[0].loss, sizeof before.loss),
                      "%s: a second run has other bits", families[family]);
            }
        }
}

  #ifdef SEQTX_CUDA_HOST
/* NCCL cannot be captured, at all ranks or at one of them: each step is launched, told
   why, and has the bits of replayed ones. With the capture the communicator may fail,
   too: then there is another one. */
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
            if (!how) memcpy(replayed, told, sizeof replayed);
            for (r = 0; r < 2; r++) {
                const int captured = !how || (how == REFUSES_RANK_1 && r == 0);
                CHECK(told[r].hash == replayed[r].hash
                          && !memcmp(told[r].loss, replayed[r].loss, sizeof replayed[r].loss),
                      "family %d, way %d: rank %d has other bits", family, how, r);
                CHECK(captured ? !told[r].text[0]
                               : !strncmp(told[r].text, "not captured: ", 14)
                                     && strstr(told[r].text, "NCCL cannot capture") != NULL,
                      "family %d, way %d: rank %d notes %s", family, how, r, told[r].text);
                CHECK(captured ? told[r].graphs > 0
                               : told[r].graphs == 0 && told[r].last_call == STEPS - 1,
                      "family %d, way %d: rank %d has %ld replays, the last call in step %d",
                      family, how, r, told[r].graphs, told[r].last_call);
            }
        }
}

/* The communicator fails with a later capture: the graphs that there are cannot be
   replayed */
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

/* >>ends */

/* `least` seconds have passed, and this rank says which one did not answer. (How much
   later that is, is the machine's affair; that it ends is what tests/run.sh waits
   for.) */
static void failed_after(job *j, stx_ctx *x, double begin, double least, const char *what) {
    char who[32];
    double took = now() - begin;
    snprintf(who, sizeof who, "rank %d of %d", j->rank, j->ranks);
    CHECK(!stx_ok(x) && strstr(stx_error(x), what) && strstr(stx_error(x), who), "rank %d says: %s",
          j->rank, stx_error(x));
    CHECK(took >= least, "rank %d: after %g s, before %g: %s", j->rank, took, least, stx_error(x));
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
    CHECK(!stx_group_join(x, NULL), "a rank is not there");
    failed_after(j, x, begin, 0.29, "did not answer within 0.3 s");
    stx_destroy(x);
}

/* One that waits in stx_group_sum, in stx_get and in stx_group_leave for a rank that
   has gone */
static void gone_job(job *j) {
    stx_ctx *x = joined(j);
    float a[64] = {0};
    double v = 1, begin;
    stx_real *p;
    stx_group_leave(x);
    stx_destroy(x);
    unsetenv("NCCL_COMM_ID"); /* the port after that one */
    set_number("MASTER_PORT", first_port + 2 * groups + 1);
    x = joined(j);
    p = cuda_values(x, a, 64, STX_MEM_BYTES);
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
    if (j->family == 0)
        stx_group_sum(x, &v, 1);
    else if (j->family == 1)
        stx_group_leave(x);
    else {
        stx_cuda_group_mean(x, p, 64, -1);
        stx_cuda_group_wait(x);
        if (j->family == 2)
            stx_download(x, a, p, 64);
        else
            stx_cuda_sync(x);
    }
    failed_after(j, x, begin, 0.29, "did not answer within 0.3 s");
    CHECK(!stx_group_sum(x, &v, 1) && v == 1, "errors are sticky");
    stx_clear_error(x);
    if (j->family != 1)
        CHECK(!stx_cuda_group_reduce(x, &v, 1, 0) && strstr(stx_error(x), "has ended"),
              "no group: %s", stx_error(x));
    stx_destroy(x);
}

/* NCCL itself says that something is wrong; and the program gives up */
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
    for (k = 0; k < 4; k++) {
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
/* Without an engine a process that was started as one of several is told which it
   wants */
static void none_job(job *j) {
    stx_ctx *x = context(j);
    CHECK(!stx_group_join(x, NULL) && strstr(stx_error(x), "SEQTX_NCCL"), "%s", stx_error(x));
    stx_destroy(x);
}
#endif

/* >>alone: a context without a group, and a group of one */

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
    CHECK(!stx_cuda_group_reduce(x, &v, 1, 0) && strstr(stx_error(x), "in no group"), "%s",
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
    h = told[0].hash;
    j.family = 1;
    together("a group of one", alone_job, j, -1, -1);
    CHECK(h == told[0].hash, "a group of one trains as no group does");
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
    /* "short": what has threads, memory and processes, without training */
    int brief = argc > 1 && !strcmp(argv[1], "short");
    first_port = 20000 + (int)((long)getpid() % 300) * 100;
    told = (found *)mmap(NULL, MAX_RANKS * sizeof *told, PROT_READ | PROT_WRITE,
                         MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (told == MAP_FAILED) {
        printf("no shared memory\n");
        return 1;
    }
#ifndef SEQTX_CUDA_HOST
    {
        job j;
        memset(&j, 0, sizeof j);
        j.ranks = 1;
        together("count", count_job, j, -1, -1);
        gpus = told[0].calls;
        printf("%d GPUs%s\n", gpus, gpus < MAX_RANKS ? ": groups of more are left out" : "");
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
