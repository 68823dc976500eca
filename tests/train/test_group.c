/* test_group.c - data parallel training (>>api: group in seqtx.h). Every rank runs the
   whole test. For example, run

       mpirun --oversubscribe -np 3 build/test_group [-v]

   Without mpirun, the group has one rank. N ranks, each with its share of a batch, are
   compared with a context in the same process that has not joined the group and
   processes the whole batch. All values are double, so that rounding hides no error.
   The test fails if a check fails on any rank; rank 0 prints the last line. -v prints
   the largest deviations. Control flow never depends on a check, because the other
   ranks would wait. */
#if !defined(_WIN32) && !defined(_POSIX_C_SOURCE)
  #define _POSIX_C_SOURCE 200809L
#endif
#include "../../seqtx_attn_span.h"
#include "../../seqtx_sru.h"
#include "../../seqtx_compressive.h"
#include "../../seqtx_par.h"
#include <unistd.h>
#include "../test.h"

/* The context that joins the group first and leaves it last. The test uses it for
   exchanges that are not under test. */
static stx_ctx *group;
static int rank, ranks, verbose;

static stx_ctx *context(uint64_t seed, int joined, size_t bucket, int shard) {
    stx_desc d;
    stx_ctx *x;
    memset(&d, 0, sizeof d);
    d.seed = seed;
    d.threads = 1;
    x = stx_create(&d);
    if (joined) {
        stx_group_desc g;
        memset(&g, 0, sizeof g);
        g.bucket = bucket;
        g.shard = shard;
        CHECK(stx_group_join(x, &g), "rank %d: %s", rank, stx_error(x));
        CHECK(stx_rank(x) == rank && stx_ranks(x) == ranks, "%d of %d, expected %d of %d",
              stx_rank(x), stx_ranks(x), rank, ranks);
    }
    return x;
}

static void done(stx_ctx *x) {
    CHECK(stx_ok(x), "rank %d: %s", rank, stx_error(x));
    stx_group_leave(x);
    stx_destroy(x);
}

/* Checks that the context's error has this code and that its text contains both `a` and
   `b`. Clears the error. */
static void refused(stx_ctx *x, int code, const char *a, const char *b) {
    CHECK(stx_error_code(x) == code && strstr(stx_error(x), a) && strstr(stx_error(x), b),
          "expected \"%s .. %s\", got \"%s\"", a, b, stx_error(x));
    stx_clear_error(x);
}

/* Returns nonzero if the n bytes are identical to those on rank 0. Every rank must call
   this function. */
static int same_as_rank0(const void *bytes, size_t n) {
    void *rank0 = malloc(n ? n : 1);
    int same;
    memcpy(rank0, bytes, n);
    stx_group_broadcast(group, rank0, n, 0);
    same = !memcmp(rank0, bytes, n);
    free(rank0);
    return same;
}

/* Like same_as_rank0, for the values of a tensor. */
static int tensor_as_rank0(const stx_tensor *t) {
    return same_as_rank0(t->data, t->size * sizeof(stx_real));
}

static double mean_of_ranks(double v) {
    stx_group_sum(group, &v, 1);
    return v / ranks;
}

/* With -v, prints the maximum of v over the ranks. */
static void report(const char *what, const char *more, double v) {
    stx_group_max(group, &v, 1);
    if (verbose && !rank) printf("%-26s %-60s %.1e\n", what, more, v);
}

/* Returns a value in [0, 1) that depends only on (a, b), so that all ranks compute the
   same value. */
static double hashed(uint64_t a, uint64_t b) {
    uint32_t r[4];
    stx_philox(0x67726f7570, a, b, r);
    return (double)r[0] / 4294967296.0;
}


// >>exchange of values and bytes on the host

/* Returns rank r's value at index i in the exchange tests. */
static double value_of(size_t i, int r) {
    return hashed(i, (uint64_t)r) - 0.5;
}

static int same_value(double a, double b) {
    return a >= b && a <= b;
}

/* Tests the sum of n values over the ranks. v[n], the element after the last one, must
   not change. */
static void sum(double *v, size_t n) {
    double worst = 0;
    size_t i;
    int r;
    for (i = 0; i <= n; i++) v[i] = value_of(i, rank);
    CHECK(stx_group_sum(group, v, n), "%s", stx_error(group));
    for (i = 0; i < n; i++) {
        double expected = 0, off;
        for (r = 0; r < ranks; r++) expected += value_of(i, r);
        off = fabs(v[i] - expected);
        if (!(off <= worst)) worst = off;
    }
    CHECK(worst < 1e-15 * ranks, "sum of %zu: off by %g", n, worst);
    CHECK(same_as_rank0(v, n * sizeof *v), "sum of %zu: ranks differ", n);
    CHECK(same_value(v[n], value_of(n, rank)), "sum of %zu: writes past its end", n);
}

/* Returns rank r's value at index i, which may be NaN or infinite. At some indices,
   only rank `one`'s value is special. */
static double special_of(size_t i, int r) {
    const int one = (int)(i % (size_t)ranks);
    if (i % 35 == 5) return r == one ? HUGE_VAL : (double)NAN;
    switch (i % 7) {
    case 1: return r == one ? (double)NAN : value_of(i, r);
    case 2: return r == one ? HUGE_VAL : value_of(i, r);
    case 3: return r == one ? -HUGE_VAL : value_of(i, r);
    case 4: return -HUGE_VAL;
    default: return value_of(i, r);
    }
}

/* Tests the maximum of n values. A NaN on any rank makes the result NaN; infinities are
   ordinary values. */
static void maximum(double *v, size_t n) {
    size_t i, bad = 0;
    int r;
    for (i = 0; i <= n; i++) v[i] = special_of(i, rank);
    CHECK(stx_group_max(group, v, n), "%s", stx_error(group));
    for (i = 0; i < n; i++) {
        double expected = -HUGE_VAL;
        for (r = 0; r < ranks; r++) {
            const double other = special_of(i, r);
            if (isnan(other) || other > expected) expected = other;
            if (isnan(expected)) break;
        }
        if (isnan(expected))
            bad += !isnan(v[i]);
        else
            bad += !same_value(v[i], expected);
    }
    CHECK(!bad, "maximum of %zu: %zu wrong", n, bad);
    CHECK(same_as_rank0(v, n * sizeof *v), "maximum of %zu: ranks differ", n);
}

/* Tests sending n values from rank `from` to rank `to`. */
static void sent(double *v, size_t n, int from, int to) {
    size_t i, bad = 0;
    for (i = 0; i <= n; i++) v[i] = hashed(i, (uint64_t)rank);
    CHECK(stx_group_send_bytes(group, v, n * sizeof *v, from, to), "%s", stx_error(group));
    for (i = 0; i <= n; i++)
        bad += !same_value(v[i], hashed(i, (uint64_t)(rank == to && i < n ? from : rank)));
    CHECK(!bad, "%zu from %d to %d: %zu wrong", n, from, to, bad);
}

/* Tests broadcasts of n values from each rank, and sends between all pairs of ranks. */
static void broadcasts(double *v, size_t n) {
    size_t i, bad;
    int from, to;
    for (from = 0; from < ranks; from++) {
        for (i = 0; i <= n; i++) v[i] = hashed(i, (uint64_t)rank);
        CHECK(stx_group_broadcast(group, v, n * sizeof *v, from), "%s", stx_error(group));
        for (bad = 0, i = 0; i < n; i++) bad += !same_value(v[i], hashed(i, (uint64_t)from));
        CHECK(!bad && same_value(v[n], hashed(n, (uint64_t)rank)),
              "broadcast of %zu from %d: %zu wrong", n, from, bad);
        for (to = 0; to < ranks; to++) sent(v, n, from, to);
    }
}

/* In a context without a group, every exchange must succeed and change nothing. */
static void without_group(stx_ctx *alone, double *v, size_t n) {
    double *before = (double *)malloc((n + 1) * sizeof *before);
    size_t i;
    for (i = 0; i <= n; i++) v[i] = i % 5 ? hashed(i, (uint64_t)rank) : (double)NAN;
    memcpy(before, v, (n + 1) * sizeof *v);
    CHECK(stx_group_sum(alone, v, n) && stx_group_max(alone, v, n)
              && stx_group_broadcast(alone, v, n * sizeof *v, 0)
              && stx_group_send_bytes(alone, v, n * sizeof *v, 0, 0)
              && !memcmp(v, before, (n + 1) * sizeof *v),
          "without a group: %zu", n);
    free(before);
}

static void sums(void) {
    static const size_t sizes[] = {0, 1, 1000, 100000};
    stx_ctx *alone = context(1, 0, 0, 0);
    size_t k;
    for (k = 0; k < sizeof sizes / sizeof *sizes; k++) {
        const size_t n = sizes[k];
        double *v = (double *)calloc(n + 1, sizeof *v);
        sum(v, n);
        maximum(v, n);
        broadcasts(v, n);
        without_group(alone, v, n);
        free(v);
    }
    CHECK(stx_rank(alone) == 0 && stx_ranks(alone) == 1 && stx_rank(NULL) == 0
              && stx_ranks(NULL) == 1,
          "a group of one");
    stx_group_abort(alone, 3); /* no effect */
    stx_group_leave(alone);
    stx_group_leave(NULL);
    stx_group_overlap(NULL);
    CHECK(!stx_group_broadcast_params(NULL), "broadcast of no list");
    done(alone);
}

/* Arguments that are invalid in a group with more than one rank must be refused. */
static void bad_arguments(stx_ctx *x) {
    double v = 1;
    CHECK(!stx_group_sum(x, NULL, 1), "sum without memory");
    refused(x, STX_ERR_ARG, "stx_group_sum:", "expected a buffer");
    CHECK(!stx_group_max(x, NULL, 1), "maximum without memory");
    refused(x, STX_ERR_ARG, "stx_group_max:", "expected a buffer");
    CHECK(!stx_group_broadcast(x, NULL, 1, 0), "broadcast without memory");
    refused(x, STX_ERR_ARG, "stx_group_broadcast:", "expected a buffer");
    CHECK(!stx_group_broadcast(x, &v, 1, -1), "broadcast from rank -1");
    refused(x, STX_ERR_ARG, "stx_group_broadcast:", "expected a rank below");
    CHECK(!stx_group_broadcast(x, &v, 1, ranks), "broadcast from rank N");
    refused(x, STX_ERR_ARG, "stx_group_broadcast:", "expected a rank below");
    CHECK(!stx_group_send_bytes(x, &v, 1, 0, ranks), "sending to rank N");
    refused(x, STX_ERR_ARG, "stx_group_send_bytes:", "expected a rank below");
    CHECK(!stx_group_send_bytes(x, &v, 1, -1, 0), "sending from rank -1");
    refused(x, STX_ERR_ARG, "stx_group_send_bytes:", "expected a rank below");
    if (rank < 2) {
        CHECK(!stx_group_send_bytes(x, NULL, 1, 0, 1), "sending without memory");
        refused(x, STX_ERR_ARG, "stx_group_send_bytes:", "expected a buffer");
    } else
        CHECK(stx_group_send_bytes(x, NULL, 1, 0, 1), "a rank that takes no part needs memory: %s",
              stx_error(x));
    CHECK(stx_group_sum(x, NULL, 0), "sum of no values: %s", stx_error(x));
}

/* If a context has an error, its exchanges must fail and change nothing, on every
   rank. */
static void exchange_after_error(stx_ctx *x) {
    double v = 1;
    stx_fail(x, STX_ERR_ARG, "torn");
    CHECK(!stx_group_sum(x, &v, 1) && !stx_group_max(x, &v, 1)
              && !stx_group_broadcast(x, &v, sizeof v, 0)
              && !stx_group_send_bytes(x, &v, sizeof v, 0, 1) && !stx_group_join(x, NULL)
              && same_value(v, 1),
          "after an error: %g", v);
    refused(x, STX_ERR_ARG, "torn", "");
    CHECK(!stx_group_join(x, NULL), "joins twice");
    refused(x, STX_ERR_ARG, "stx_group_join: the context is already in a group", "once");
    v = rank;
    CHECK(stx_group_sum(x, &v, 1) && CLOSE(v, ranks * (ranks - 1) / 2.0, 0),
          "after errors were cleared: %g", v);
}

static void errors(void) {
    stx_ctx *x = context(1, 1, 0, 0), *y;
    stx_group_desc d;
    double v = rank + 1;
    int i;
    if (ranks > 1) {
        bad_arguments(x);
        exchange_after_error(x);
    }
    y = context(1, 0, 0, 0);
    memset(&d, 0, sizeof d);
    d.bucket = ((size_t)1 << 28) + 1;
    CHECK(!stx_group_join(y, &d), "too large a bucket");
    refused(y, STX_ERR_ARG, "stx_group_join: bucket: expected at most 268435456", "268435457");
    CHECK(stx_ranks(y) == 1, "joined in spite of the error");
    stx_params_create(y);
    CHECK(!stx_group_join(y, NULL), "joins after parameters were created");
    refused(y, STX_ERR_ARG, "the context already has parameters",
            "before its first parameter list");
    CHECK(stx_ranks(y) == 1, "joined in spite of the error");
    done(y);
    /* If one of several contexts leaves the group, the others must not be affected. */
    for (i = 0; i < 3; i++) done(context(1, 1, 0, 0));
    CHECK(stx_group_sum(x, &v, 1) && CLOSE(v, ranks * (ranks + 1) / 2.0, 0),
          "after others have left: %g %s", v, stx_error(x));
    done(x);
}


// >>launchers

static const char *const variables[] = {"OMPI_COMM_WORLD_RANK",
                                        "OMPI_COMM_WORLD_SIZE",
                                        "OMPI_COMM_WORLD_LOCAL_RANK",
                                        "OMPI_COMM_WORLD_LOCAL_SIZE",
                                        "MV2_COMM_WORLD_RANK",
                                        "MV2_COMM_WORLD_SIZE",
                                        "MV2_COMM_WORLD_LOCAL_RANK",
                                        "MV2_COMM_WORLD_LOCAL_SIZE",
                                        "PMI_RANK",
                                        "PMI_SIZE",
                                        "MPI_LOCALRANKID",
                                        "MPI_LOCALNRANKS",
                                        "SLURM_PROCID",
                                        "SLURM_STEP_NUM_TASKS",
                                        "SLURM_LOCALID",
                                        "SLURM_STEP_TASKS_PER_NODE",
                                        "SLURM_NTASKS",
                                        "SLURM_NODEID",
                                        "RANK",
                                        "WORLD_SIZE",
                                        "LOCAL_RANK",
                                        "LOCAL_WORLD_SIZE",
                                        "TORCHELASTIC_RUN_ID"};

enum { VARIABLES = sizeof variables / sizeof *variables };

static void unset_all(void) {
    size_t i;
    for (i = 0; i < VARIABLES; i++) unsetenv(variables[i]);
}

/* Sets the environment variables listed in `set`, "NAME=value NAME=value ..".
   stx_launch must then report rank r of n and local rank `local` of `locals`, and `by`
   must be the variable that states the number of ranks. */
static void started(const char *set, int r, int n, int local, int locals, const char *by) {
    char copy[256], *word, *value;
    stx_launch_info s;
    unset_all();
    snprintf(copy, sizeof copy, "%s", set);
    for (word = strtok(copy, " "); word; word = strtok(NULL, " "))
        if ((value = strchr(word, '=')) != NULL) {
            *value = 0;
            setenv(word, value + 1, 1);
        }
    s = stx_get_launch_info();
    CHECK(s.rank == r && s.ranks == n && s.local == local && s.locals == locals
              && (by ? s.by && !strcmp(s.by, by) : !s.by),
          "%s: rank %d of %d, local %d of %d, by %s", set, s.rank, s.ranks, s.local, s.locals,
          s.by ? s.by : "none");
}

static void launchers(void) {
    started("", 0, 1, 0, 1, NULL);
    started("OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=8 OMPI_COMM_WORLD_LOCAL_RANK=1 "
            "OMPI_COMM_WORLD_LOCAL_SIZE=4",
            2, 8, 1, 4, "OMPI_COMM_WORLD_SIZE");
    started("OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1", 0, 1, 0, 1, NULL);
    started("OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2", 0, 2, 0, 1, "OMPI_COMM_WORLD_SIZE");
    started("MV2_COMM_WORLD_RANK=3 MV2_COMM_WORLD_SIZE=4 MV2_COMM_WORLD_LOCAL_RANK=1 "
            "MV2_COMM_WORLD_LOCAL_SIZE=2",
            3, 4, 1, 2, "MV2_COMM_WORLD_SIZE");
    started("PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2", 1, 2, 1, 2, "PMI_SIZE");
    started("SLURM_PROCID=5 SLURM_STEP_NUM_TASKS=6 SLURM_LOCALID=2 SLURM_STEP_TASKS_PER_NODE=3", 5,
            6, 2, 3, "SLURM_STEP_NUM_TASKS");
    started("SLURM_PROCID=9 SLURM_STEP_NUM_TASKS=16 SLURM_LOCALID=1 "
            "SLURM_STEP_TASKS_PER_NODE=8(x2)",
            9, 16, 1, 8, "SLURM_STEP_NUM_TASKS");
    /* in a batch script, SLURM sets these variables although it has started no ranks */
    started("SLURM_PROCID=0 SLURM_NTASKS=6 SLURM_LOCALID=0", 0, 1, 0, 1, NULL);
    started("RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2", 3, 4, 1, 2, "WORLD_SIZE");
    started("RANK=0 WORLD_SIZE=1", 0, 1, 0, 1, NULL);
}

/* If several launchers set variables, the first one with more than one rank must take
   precedence. The exception is torchrun inside srun, with one task per machine that
   starts several ranks. torchrun then takes precedence over srun. */
static void nested_launchers(void) {
    started("OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1 RANK=1 WORLD_SIZE=2", 1, 2, 0, 1,
            "WORLD_SIZE");
    started("OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=3 RANK=1 WORLD_SIZE=2", 1, 3, 0, 1,
            "OMPI_COMM_WORLD_SIZE");
    started("SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=1 PMI_RANK=1 PMI_SIZE=2", 1, 2, 0, 1, "PMI_SIZE");
    started("SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2 SLURM_LOCALID=0 TORCHELASTIC_RUN_ID=x RANK=13 "
            "WORLD_SIZE=16 LOCAL_RANK=5 LOCAL_WORLD_SIZE=8",
            13, 16, 5, 8, "WORLD_SIZE");
    started("SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2 SLURM_LOCALID=0 RANK=13 WORLD_SIZE=16 "
            "LOCAL_RANK=5",
            1, 2, 0, 1, "SLURM_STEP_NUM_TASKS");
}

/* Invalid variables must be ignored. */
static void invalid_variables(void) {
    started("RANK=4 WORLD_SIZE=4", 0, 1, 0, 1, NULL);
    started("RANK=5 WORLD_SIZE=4", 0, 1, 0, 1, NULL);
    started("RANK=-1 WORLD_SIZE=4", 0, 1, 0, 1, NULL);
    started("RANK=1x WORLD_SIZE=4", 0, 1, 0, 1, NULL);
    started("RANK=1 WORLD_SIZE=four", 0, 1, 0, 1, NULL);
    started("RANK= WORLD_SIZE=4", 0, 1, 0, 1, NULL);
    started("RANK=1 WORLD_SIZE=", 0, 1, 0, 1, NULL);
    started("RANK=1", 0, 1, 0, 1, NULL);
    started("WORLD_SIZE=4", 0, 1, 0, 1, NULL);
    started("RANK=1 WORLD_SIZE=99999999999999999999", 0, 1, 0, 1, NULL);
    started("RANK=1 WORLD_SIZE=2 LOCAL_RANK=no LOCAL_WORLD_SIZE=no", 1, 2, 0, 1, "WORLD_SIZE");
    started("RANK=1 WORLD_SIZE=2 LOCAL_WORLD_SIZE=0", 1, 2, 0, 1, "WORLD_SIZE");
}

static void environment(void) {
    char *saved[VARIABLES];
    size_t i;
    for (i = 0; i < VARIABLES; i++) {
        const char *v = getenv(variables[i]);
        saved[i] = v ? (char *)malloc(strlen(v) + 1) : NULL;
        if (v) strcpy(saved[i], v);
    }
    launchers();
    nested_launchers();
    invalid_variables();
    /* The environment states several ranks, but MPI was started with only this rank. */
    if (ranks == 1) {
        stx_ctx *x = context(1, 0, 0, 0);
        started("RANK=0 WORLD_SIZE=2", 0, 2, 0, 1, "WORLD_SIZE");
        CHECK(!stx_group_join(x, NULL), "joined alone");
        refused(x, STX_ERR_DEVICE, "stx_group_join: WORLD_SIZE is 2, but ",
                "or start the process alone");
        done(x);
    }
    unset_all();
    for (i = 0; i < VARIABLES; i++) {
        if (saved[i]) setenv(variables[i], saved[i], 1);
        free(saved[i]);
    }
}


// >>dropout

enum { B = 12, T = 8, C = 8 };

static size_t first_of(int r) {
    return (size_t)B * (size_t)r / (size_t)ranks;
}

/* An op on a whole (B,T,C) tensor or on a rank's share of its streams. */
typedef stx_tensor *(*op_fn)(stx_ctx *x, stx_tensor *a);

static stx_tensor *op_dropout(stx_ctx *x, stx_tensor *a) {
    return stx_dropout(x, stx_dropout(x, a, 0.2), 0.3);
}

static stx_tensor *op_time(stx_ctx *x, stx_tensor *a) {
    return stx_dropout_variational(x, stx_dropout_variational(x, a, 0.4), 0.3);
}

static stx_tensor *op_norm(stx_ctx *x, stx_tensor *a) {
    stx_real one[C], zero[C];
    size_t i;
    for (i = 0; i < C; i++) {
        one[i] = (stx_real)(1 + 0.1 * (double)i);
        zero[i] = (stx_real)0.25;
    }
    return stx_residual_norm(x, stx_scale(x, a, 0.5), a, 0.4, stx_input(x, one, C, 0, 0, 0),
                             stx_input(x, zero, C, 0, 0, 0), 0);
}

static stx_tensor *op_attention(stx_ctx *x, stx_tensor *a) {
    stx_attention_in in;
    stx_attention_desc d;
    memset(&in, 0, sizeof in);
    memset(&d, 0, sizeof d);
    in.q = in.k = in.v = a;
    d.heads = 2;
    d.dropout = 0.3;
    return stx_attention(x, &in, &d);
}

static stx_tensor *op_run(stx_ctx *x, void *user, stx_tensor **in, stx_tensor **out) {
    (void)out;
    return ((const op_fn *)user)[0](x, in[0]);
}

static op_fn again;

static stx_tensor *op_again(stx_ctx *x, stx_tensor *a) {
    return stx_recompute(x, op_run, &again, &a, 1, NULL, 0);
}

static stx_tensor *op_again_dropout(stx_ctx *x, stx_tensor *a) {
    again = op_dropout;
    return op_again(x, a);
}

static stx_tensor *op_again_attention(stx_ctx *x, stx_tensor *a) {
    again = op_attention;
    return op_again(x, a);
}

static const struct {
    const char *name;
    op_fn fn;
} ops[] = {{"dropout", op_dropout},
           {"dropout_time", op_time},
           {"residual_norm", op_norm},
           {"attention", op_attention},
           {"recomputed dropout", op_again_dropout},
           {"recomputed attention", op_again_attention}};

enum { OPS = sizeof ops / sizeof *ops, STREAM = T * C, WHOLE = B * T * C };

/* Runs op k on a share of the streams in a group (x) and on all streams in a context
   without a group (w). Results and gradients must be bit-identical. a, dy: (B,T,C). */
static void share_of_op(stx_ctx *x, stx_ctx *w, size_t k, const stx_real *a, const stx_real *dy) {
    const size_t lo = first_of(rank), n = first_of(rank + 1) - lo, at = lo * STREAM,
                 bytes = n * STREAM * sizeof(stx_real);
    stx_real y[4][WHOLE], *all = y[0], *dall = y[1], *mine = y[2], *dmine = y[3];
    stx_tensor *in, *out;
    memset(y, 0, sizeof y);
    stx_begin(w, STX_EVAL);
    stx_get(w, ops[k].fn(w, stx_input(w, a, B, T, C, 0)), mine);
    stx_begin(w, STX_TRAIN);
    in = stx_variable(w, a, B, T, C, 0);
    out = ops[k].fn(w, in);
    stx_backward_from(w, out, dy);
    stx_get(w, out, all);
    stx_get_grad(w, in, dall);
    CHECK(memcmp(all, mine, sizeof y[0]), "%s: training equals evaluation", ops[k].name);
    stx_begin(x, STX_TRAIN);
    in = stx_variable(x, a + at, n, T, C, 0);
    out = ops[k].fn(x, in);
    stx_backward_from(x, out, dy + at);
    stx_get(x, out, mine);
    stx_get_grad(x, in, dmine);
    CHECK(!memcmp(mine, all + at, bytes) && !memcmp(dmine, dall + at, bytes),
          "%s, rank %d: the share differs from the whole: %g %g %s%s", ops[k].name, rank,
          test_error(mine, all + at, n * STREAM, 0), test_error(dmine, dall + at, n * STREAM, 0),
          stx_error(x), stx_error(w));
}

/* A share that would split a draw of 8 random values between ranks must be refused. */
static void uneven_shares(stx_ctx *x, const stx_real *a) {
    CHECK(!stx_dropout(x, stx_input(x, a, 5, 7, 0, 0), 0.5) || !stx_ok(x), "35 elements");
    refused(x, STX_ERR_SHAPE, "stx_dropout: expected a multiple of 8", "got 35");
    stx_begin(x, STX_TRAIN);
    stx_dropout_variational(x, stx_input(x, a, 3, 8, 4, 0), 0.5);
    refused(x, STX_ERR_SHAPE, "expected a multiple of 8", "got 12");
    stx_begin(x, STX_TRAIN);
    stx_residual_norm(x, stx_input(x, a, 1, 4, 0, 0), stx_input(x, a, 1, 4, 0, 0), 0.5,
                      stx_input(x, a, 4, 0, 0, 0), stx_input(x, a, 4, 0, 0, 0), 0);
    refused(x, STX_ERR_SHAPE, "stx_residual_norm: expected a multiple of 8", "got 4");
}

/* stx_dropout_replicated must draw the same mask on all ranks and in a context without a
   group, for any number of elements. stx_dropout draws a different mask on each rank. */
static void replicated_mask(stx_ctx *x, stx_ctx *w, const stx_real *a) {
    stx_real mine[40], alone[40];
    int same;
    stx_begin(x, STX_TRAIN);
    stx_begin(w, STX_TRAIN);
    stx_get(x, stx_dropout_replicated(x, stx_input(x, a, 5, 7, 0, 0), 0.5), mine);
    stx_get(w, stx_dropout(w, stx_input(w, a, 5, 7, 0, 0), 0.5), alone);
    CHECK(!memcmp(mine, alone, 35 * sizeof *mine), "stx_dropout_replicated: another mask %s",
          stx_error(x));
    CHECK(same_as_rank0(mine, 35 * sizeof *mine), "stx_dropout_replicated: ranks differ");
    stx_get(x, stx_dropout(x, stx_input(x, a, 5, 8, 0, 0), 0.5), mine);
    same = same_as_rank0(mine, 40 * sizeof *mine);
    CHECK(ranks == 1 || !rank || !same, "stx_dropout draws the same mask at all ranks");
    if (ranks > 1) uneven_shares(x, a);
    stx_begin(x, STX_EVAL);
    CHECK(stx_dropout(x, stx_input(x, a, 5, 7, 0, 0), 0.5) != NULL, "evaluation: %s", stx_error(x));
    CHECK(stx_dropout(w, stx_input(w, a, 5, 7, 0, 0), 0.5) != NULL, "without a group: %s",
          stx_error(w));
}

static void masks(void) {
    stx_ctx *x = context(5, 1, 0, 0), *w = context(5, 0, 0, 0);
    stx_real a[WHOLE], dy[WHOLE];
    size_t i, k;
    int step;
    for (i = 0; i < WHOLE; i++) {
        a[i] = (stx_real)(hashed(i, 7) - 0.5);
        dy[i] = (stx_real)(hashed(i, 8) - 0.5);
    }
    for (k = 0; k < OPS; k++)
        for (step = 0; step < 2; step++) share_of_op(x, w, k, a, dy);
    replicated_mask(x, w, a);
    done(x);
    done(w);
}


// >>losses

/* A linear layer and a loss over B streams of one token each. The index of a stream
   determines its weight and whether it is ignored. */
enum { V = 24, D = 8 };

typedef struct loss_case {
    const char *name;
    int weights, ignore, plain, adaptive;
} loss_case;

/* Nonzero if stream b is ignored. c->ignore selects the ignored streams: 0 none, 1 the
   streams of the first rank, 2 the odd streams of the other ranks, 3 all but the last,
   4 all. */
static int left_out(const loss_case *c, size_t b) {
    const size_t one = ranks > 1 ? (size_t)B / (size_t)ranks : 1;
    switch (c->ignore) {
    case 0: return 0;
    case 1: return b < one;
    case 2: return b >= one && b % 2;
    case 3: return b != B - 1;
    default: return 1;
    }
}

/* Computes the loss of case c, and its gradients, over streams [lo, lo + n). */
static double lossy(stx_ctx *x, stx_params *p, const loss_case *c, size_t lo, size_t n) {
    stx_token_loss how;
    stx_tensor *y, *h;
    stx_real in[B * D], weight[B];
    int32_t target[B];
    stx_ids *ids;
    size_t i;
    double v;
    memset(&how, 0, sizeof how);
    for (i = 0; i < n * D; i++) in[i] = (stx_real)(hashed(lo * D + i, 20) - 0.5);
    for (i = 0; i < n; i++) {
        weight[i] = (stx_real)(0.25 + hashed(lo + i, 21));
        target[i] = left_out(c, lo + i) ? -1 : (int32_t)(hashed(lo + i, 22) * V);
    }
    stx_begin(x, STX_TRAIN);
    ids = stx_tokens(x, target, n, 1);
    how.ignore = c->ignore > 0;
    how.ignored_id = -1;
    how.mean = !c->plain;
    if (c->plain) how.divisor = (double)n;
    if (c->weights) how.weights = stx_input(x, weight, n, 0, 0, 0);
    h = stx_linear(x, stx_input(x, in, n, D, 0, 0), p->tensor[0], p->tensor[1], STX_ACT_TANH);
    if (c->adaptive) {
        stx_adaptive a;
        memset(&a, 0, sizeof a);
        a.clusters = 2;
        a.end[0] = 8;
        a.end[1] = V;
        a.table[0] = p->tensor[2];
        a.table[1] = p->tensor[3];
        a.proj[1] = p->tensor[4];
        a.cluster_w = p->tensor[5];
        a.dropout = 0.25;
        y = stx_adaptive_softmax_tokens(x, &a, h, ids, &how);
    } else
        y = stx_cross_entropy_tokens(x, stx_linear(x, h, p->tensor[6], NULL, STX_ACT_NONE), ids,
                                     &how);
    v = stx_item(x, y);
    stx_backward(x, y);
    return v;
}

static stx_params *lossy_params(stx_ctx *x) {
    stx_params *p = stx_params_create(x);
    stx_param(p, STX_NORMAL, 0.5, "w", D, D, 0, 0);
    stx_param(p, STX_NORMAL, 0.5, "b", D, 0, 0, 0);
    stx_param(p, STX_NORMAL, 0.5, "table.0", 8, D, 0, 0);
    stx_param(p, STX_NORMAL, 0.5, "table.1", V - 8, D, 0, 0);
    stx_param(p, STX_NORMAL, 0.5, "proj.1", D, D, 0, 0);
    stx_param(p, STX_NORMAL, 0.5, "cluster", 1, D, 0, 0);
    stx_param(p, STX_NORMAL, 0.5, "out", V, D, 0, 0);
    return p;
}

/* The parameter for which `apart` found the largest deviation. Deviations are relative
   to the largest magnitude in the parameter. */
static const char *apart_at = "";

static double apart(const stx_params *a, const stx_params *b) {
    double worst = 0, e;
    size_t i;
    for (i = 0; i < a->count; i++) {
        e = test_error(a->tensor[i]->data, b->tensor[i]->data, a->tensor[i]->size, 1e-3);
        if (!(e <= worst)) {
            worst = e;
            apart_at = a->name[i];
        }
    }
    return a->count == b->count ? worst : HUGE_VAL;
}

/* For case c, the mean of the ranks' losses and gradients must equal the loss and the
   gradients of the whole batch. */
static void loss_of_case(const loss_case *c) {
    const size_t lo = first_of(rank), n = first_of(rank + 1) - lo;
    stx_ctx *x = context(9, 1, 0, 0), *w = context(9, 0, 0, 0);
    stx_params *p = lossy_params(x), *q = lossy_params(w);
    double mine = lossy(x, p, c, lo, n), whole = lossy(w, q, c, 0, B), worst = 0, top = 1e-3;
    size_t i, j;
    mine = mean_of_ranks(mine);
    CHECK(CLOSE(mine, whole, 1e-14) && (c->ignore == 4 ? !(fabs(whole) > 0) : whole > 0.1),
          "%s: %.17g, whole %.17g: %s%s", c->name, mine, whole, stx_error(x), stx_error(w));
    for (i = 0; i < p->count; i++) {
        double g[V * D];
        const stx_tensor *t = p->tensor[i];
        stx_get_grad(x, t, g);
        stx_group_sum(group, g, t->size);
        for (j = 0; j < t->size; j++) {
            const double expected = q->tensor[i]->grad[j], off = fabs(g[j] / ranks - expected);
            top = fmax(top, fabs(expected));
            if (!(off <= worst)) worst = off;
        }
    }
    CHECK(worst <= 1e-14 * top, "%s: gradients off by %g of %g", c->name, worst, top);
    report("losses", c->name, worst / top);
    done(x);
    done(w);
}

/* In evaluation, a loss must exchange nothing, so that one rank may compute it alone. */
static void loss_in_evaluation(void) {
    stx_ctx *x = context(9, 1, 0, 0);
    stx_params *p = lossy_params(x);
    stx_real in[2 * D] = {0};
    int32_t target[2] = {3, -1};
    stx_token_loss how;
    memset(&how, 0, sizeof how);
    how.ignore = how.mean = 1;
    how.ignored_id = -1;
    if (rank == ranks - 1) {
        stx_tensor *logits, *y;
        stx_begin(x, STX_EVAL);
        logits = stx_linear(x, stx_input(x, in, 2, D, 0, 0), p->tensor[6], NULL, STX_ACT_NONE);
        y = stx_cross_entropy_tokens(x, logits, stx_tokens(x, target, 2, 1), &how);
        CHECK(CLOSE(stx_item(x, y), log((double)V), 1e-14), "one rank alone: %s", stx_error(x));
    }
    done(x);
}

static void losses(void) {
    /* name, weights, ignore, plain, adaptive */
    static const loss_case cases[] = {{"mean", 0, 0, 0, 0},
                                      {"weights", 1, 0, 0, 0},
                                      {"rank 0 has none", 0, 1, 0, 0},
                                      {"rank 0 has none, weights", 1, 1, 0, 0},
                                      {"rank 0 has all", 0, 2, 0, 0},
                                      {"one row", 1, 3, 0, 0},
                                      {"no row", 0, 4, 0, 0},
                                      {"divisor", 1, 2, 1, 0},
                                      {"adaptive", 1, 2, 0, 1},
                                      {"adaptive, rank 0 has none", 0, 1, 0, 1},
                                      {"adaptive, one row", 0, 3, 0, 1}};
    size_t k;
    for (k = 0; k < sizeof cases / sizeof *cases; k++) loss_of_case(&cases[k]);
    loss_in_evaluation();
}

/* Returns rank r's number of elements in case i. Case 0: a different number on each
   rank; case 1: nonzero only on the last rank; case 2: zero on all ranks. */
static double part_of(int i, int r) {
    if (i == 0) return 3 + r;
    return i == 1 && r == ranks - 1 ? 7 : 0;
}

/* Tests stx_group_loss_scale with different numbers of elements on the ranks. */
static void parts(void) {
    stx_ctx *x = context(9, 1, 0, 0), *alone = context(9, 0, 0, 0);
    int i, r;
    for (i = 0; i < 3; i++) {
        const double n = part_of(i, rank);
        double all = 0, v, mean, expected = 1;
        for (r = 0; r < ranks; r++) all += part_of(i, r);
        stx_begin(x, STX_TRAIN);
        v = stx_item(x, stx_group_loss_scale(x, n));
        if (ranks > 1) expected = all > 0 ? n * ranks / all : 0;
        CHECK(CLOSE(v, expected, 1e-15), "%g of %g: %g, expected %g", n, all, v, expected);
        mean = mean_of_ranks(v);
        CHECK(CLOSE(mean, i < 2 || ranks == 1 ? 1 : 0, 1e-14), "mean of the scales: %g", mean);
    }
    stx_begin(alone, STX_TRAIN);
    CHECK(CLOSE(stx_item(alone, stx_group_loss_scale(alone, 5)), 1, 0)
              && CLOSE(stx_item(alone, stx_group_loss_scale(alone, 0)), 1, 0),
          "without a group");
    done(x);
    done(alone);
}


// >>optimisers

/* y = tanh(W1 a + b1) W2^T, trained on a target, for B streams. In step `bad`, the last
   target is infinite. */
typedef struct small_case {
    const char *name;
    stx_optim_desc d;
    double lr;
    int bad;
    const char *frozen; /* patterns of stx_params_set_rule; all other parameters then have a
                           factor of the learning rate. NULL: no rules */
} small_case;

static stx_params *small_params(stx_ctx *x, const small_case *c) {
    const stx_param_rule freeze = {1, 0, 0}, slow = {0, 0.25, 0};
    stx_params *p = stx_params_create(x);
    stx_param(p, STX_NORMAL, 0.4, "w1", 72, D, 0, 0);
    stx_param(p, STX_NORMAL, 0.1, "b1", 72, 0, 0, 0);
    stx_param(p, STX_NORMAL, 0.1, "w2", 72, 72, 0, 0); /* two chunks, so that it can be
                                                          divided into shards */
    stx_param(p, STX_NORMAL, 0.1, "unused", 5, 0, 0, 0);
    if (c->frozen) {
        stx_params_set_rule(p, c->frozen, &freeze);
        stx_params_set_rule(p, "*", &slow);
    }
    return p;
}

/* Runs one update with streams [lo, lo + n). Returns the result of stx_optim_step. */
static int small_step(stx_ctx *x, stx_optim *o, const small_case *c, int step, size_t lo, size_t n,
                      int overlap) {
    stx_params *p = o->params;
    stx_real in[B * D], target[B * 72];
    stx_tensor *y;
    size_t i;
    for (i = 0; i < n * D; i++) in[i] = (stx_real)(4 * hashed(lo * D + i, (uint64_t)step) - 2);
    for (i = 0; i < n * 72; i++)
        target[i] = (stx_real)(10 * hashed(lo * 72 + i, 1000 + (uint64_t)step) - 5);
    if (step == c->bad && lo + n == B) target[n * 72 - 1] = (stx_real)HUGE_VAL;
    stx_begin(x, STX_TRAIN);
    y = stx_linear(x, stx_input(x, in, n, D, 0, 0), p->tensor[0], p->tensor[1], STX_ACT_TANH);
    y = stx_mse(x, stx_linear(x, y, p->tensor[2], NULL, STX_ACT_NONE),
                stx_input(x, target, n, 72, 0, 0));
    if (overlap) stx_group_overlap(o);
    stx_backward(x, stx_scale(x, y, 10));
    return stx_optim_step(o, c->lr);
}

/* Returns the largest deviation between the optimiser states of o and of u. Only the
   states that this rank holds in o are compared; u has all of them. */
static double states_apart(const stx_optim *o, const stx_optim *u) {
    double worst = 0, e;
    size_t i, k;
    for (k = 0; k < 2; k++)
        for (i = 0; i < o->count && o->state[k]; i++) {
            if (!u->state[k][i]) continue; /* a matrix of Muon has one state */
            e = test_error(o->state[k][i]->data, u->state[k][i]->data, u->state[k][i]->size, 1e-6);
            if (!(e <= worst)) worst = e;
        }
    return worst;
}

/* Kinds of groups: plain; overlapped, with small buckets; with shards; with shards,
   overlapped, with small buckets. */
enum { PLAIN, OVERLAPPED, SHARDS, SHARDS_OVERLAPPED, KINDS };

/* One optimiser in each context of the group, and the optimiser u, which receives the
   whole batch in a context without a group. */
typedef struct optim_test {
    const small_case *c;
    size_t lo, n;
    stx_ctx *x[KINDS], *w;
    stx_optim *o[KINDS], *u;
} optim_test;

static void optim_begin(optim_test *t, const small_case *c) {
    int kind;
    t->c = c;
    t->lo = first_of(rank);
    t->n = first_of(rank + 1) - t->lo;
    t->w = context(3, 0, 0, 0);
    t->u = stx_optim_create(small_params(t->w, c), &c->d);
    for (kind = 0; kind < KINDS; kind++) {
        t->x[kind] = context(3, 1, kind % 2 ? 256 : 0, kind / 2);
        t->o[kind] = stx_optim_create(small_params(t->x[kind], c), &c->d);
    }
}

/* Runs one step in a group of this kind, after the same step has run with the whole
   batch. If a gradient is infinite on one rank, all ranks must skip the step. */
static void kind_step(const optim_test *t, int kind, int step) {
    const small_case *c = t->c;
    stx_optim *o = t->o[kind];
    const stx_params *p = o->params;
    stx_real before[4][72 * 72];
    int made, same = 1, zero = 1, frozen = 1;
    size_t i, j;
    for (i = 0; i < 4; i++) stx_get(t->x[kind], p->tensor[i], before[i]);
    made = small_step(t->x[kind], o, c, step, t->lo, t->n, kind % 2);
    for (i = 0; i < 4; i++) {
        same &= !memcmp(before[i], p->tensor[i]->data, p->tensor[i]->size * sizeof **before);
        for (j = 0; p->tensor[i]->grad && j < p->tensor[i]->size; j++)
            zero &= !(fabs(p->tensor[i]->grad[j]) > 0);
        if (!p->tensor[i]->needs_grad) frozen &= !p->tensor[i]->grad && !o->state[0][i];
    }
    CHECK(frozen, "%s, %d: a frozen parameter has a gradient or state", c->name, kind);
    if (step == c->bad)
        CHECK(!made && same, "%s, %d: rank %d updates with an infinite gradient", c->name, kind,
              rank);
    else
        CHECK(made && same == (c->d.radam_skip && t->u->step <= 5),
              "%s, %d: step %d was not made at rank %d", c->name, kind, step, rank);
    CHECK(zero, "%s, %d: gradients are not cleared", c->name, kind);
    CHECK(o->step == t->u->step && o->skipped == t->u->skipped, "%s, %d: %d made and %d skipped",
          c->name, kind, (int)o->step, (int)o->skipped);
    if (step != c->bad)
        CHECK(CLOSE(o->grad_norm, t->u->grad_norm, 1e-12), "%s, %d: norm %.17g, whole %.17g",
              c->name, kind, o->grad_norm, t->u->grad_norm);
}

/* Compares parameters and states after all steps. */
static void kind_end(const optim_test *t, int kind) {
    const stx_optim *o = t->o[kind];
    double off = apart(o->params, t->u->params), state = kind < SHARDS ? states_apart(o, t->u) : 0;
    char what[96];
    size_t i;
    snprintf(what, sizeof what, "%s, %d", t->c->name, kind);
    CHECK(off <= 1e-12 && state <= 1e-12, "%s: parameters off by %g, states by %g: %s", what, off,
          state, stx_error(t->x[kind]));
    report("optimiser", what, STX_MAX(off, state));
    for (i = 0; i < 4; i++)
        CHECK(tensor_as_rank0(o->params->tensor[i]), "%s: %s differs at rank %d", what,
              o->params->name[i], rank);
}

/* A matrix of Muon is updated by one rank if the state is sharded, otherwise by all. The
   results must be bit-identical. */
static void shards_same(const optim_test *t) {
    size_t i;
    for (i = 0; i < 4; i++) {
        const stx_tensor *a = t->o[PLAIN]->params->tensor[i], *b = t->o[SHARDS]->params->tensor[i];
        CHECK(!memcmp(a->data, b->data, a->size * sizeof *a->data), "%s: shards change %s",
              t->c->name, t->u->params->name[i]);
    }
}

/* Rank 0 writes a file with the states of all shards. All ranks load it, with and
   without shards, and run one more step. */
static void shards_file(const optim_test *t) {
    stx_ctx *x = t->x[SHARDS];
    stx_writer *out = rank ? NULL : stx_writer_create(x);
    double size = 0;
    size_t bytes = 0;
    void *file;
    int kind, ok = stx_optim_save(out, t->o[SHARDS]);
    CHECK(ok, "%s: %s", t->c->name, stx_error(x));
    file = rank ? NULL : stx_writer_bytes(out, &bytes);
    size = (double)bytes;
    stx_group_sum(group, &size, 1);
    if (rank) file = stx_block(x, (size_t)size);
    stx_group_broadcast(group, file, (size_t)size, 0);
    for (kind = PLAIN; kind <= SHARDS; kind += 2) {
        stx_file *f = stx_file_in_memory(t->x[kind], "states", file, (size_t)size);
        CHECK(f && stx_optim_load(t->o[kind], f), "%s: %s", t->c->name, stx_error(t->x[kind]));
        stx_file_close(f);
    }
    CHECK(states_apart(t->o[PLAIN], t->u) <= 1e-12 && t->o[PLAIN]->step == 19
              && t->o[PLAIN]->skipped == 1,
          "%s: the states of shards: %g", t->c->name, states_apart(t->o[PLAIN], t->u));
    small_step(t->w, t->u, t->c, 20, 0, B, 0);
    for (kind = PLAIN; kind <= SHARDS; kind += 2) {
        double off;
        small_step(t->x[kind], t->o[kind], t->c, 20, t->lo, t->n, 0);
        off = apart(t->o[kind]->params, t->u->params);
        CHECK(off <= 1e-12, "%s, %d: after loading states off by %g", t->c->name, kind, off);
    }
    stx_block_free(x, file);
}

/* If the name of a sharded state is too long for a file, every rank must report an
   error, so that no rank waits for another. */
static void long_name(void) {
    stx_ctx *x = context(1, 1, 0, 1);
    stx_params *p = stx_params_create(x);
    stx_writer *out = rank ? NULL : stx_writer_create(x);
    stx_optim_desc d;
    stx_optim *o;
    char name[510];
    memset(name, 'n', sizeof name - 1);
    name[sizeof name - 1] = 0;
    stx_param(p, STX_NORMAL, 0.1, name, 9, 9, 0, 0);
    memset(&d, 0, sizeof d);
    d.kind = STX_ADAM;
    o = stx_optim_create(p, &d);
    CHECK(o != NULL, "%s", stx_error(x));
    CHECK(!stx_optim_save(out, o), "a name of 517 bytes was saved");
    refused(x, STX_ERR_ARG, "exceeds 511 bytes", "use a shorter name");
    done(x);
}

static void optimisers(void) {
    /* name, desc, learning rate, step with an infinite gradient */
    static const small_case cases[] = {
        {"SGD, momentum, clip", {STX_SGD, 0.9, 0, 0, 0, 0.01, 1, 0, 0, 0, 0, 0, 0}, 0.02, 7, NULL},
        {"SGD, clip_value", {STX_SGD, 0.5, 0, 0, 0, 0, 0, 0, 0, 0.05, 0, 0, 0}, 0.05, 7, NULL},
        {"Adagrad, clip per tensor", {STX_ADAGRAD, 0, 0, 0, 0, 0, 0.5, 0, 0, 0, 0, 0, 0}, 0.05, 7,
         NULL},
        {"Adam, clip", {STX_ADAM, 0, 0, 0, 0, 0.01, 0.25, 0, 0, 0, 0, 0, 0}, 0.01, 7, NULL},
        {"Adam, clip_value and clip", {STX_ADAM, 0, 0, 0, 0, 0, 0.25, 0, 0, 0.02, 0, 0, 0}, 0.01, 7,
         NULL},
        {"AdamW, eps_hat", {STX_ADAMW, 0, 0, 0, 0, 0.1, 0.25, 0, 1, 0, 0, 0, 0}, 0.01, 0, NULL},
        {"RAdam", {STX_RADAM, 0, 0, 0, 0, 0.1, 1, 0, 0, 0, 0, 0, 0}, 0.01, 2, NULL},
        {"RAdam, radam_skip", {STX_RADAM, 0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0}, 0.01, 7, NULL},
        {"LAMB", {STX_LAMB, 0, 0, 0, 0, 0.01, 1, 0, 0, 0, 10, 0, 0}, 0.02, 7, NULL},
        {"LAMB, no_correction", {STX_LAMB, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0}, 0.02, 7, NULL},
        {"Muon, clip", {STX_MUON, 0, 0, 0, 0, 0.1, 0.25, 0, 0, 0, 0, 0, 0}, 0.02, 7, NULL},
        {"AdamW, w1 frozen", {STX_ADAMW, 0, 0, 0, 0, 0.1, 0.25, 0, 0, 0, 0, 0, 1}, 0.02, 7, "w1"},
        {"LAMB, w2 frozen", {STX_LAMB, 0, 0, 0, 0, 0.1, 0.25, 0, 0, 0, 0, 0, 0}, 0.02, 7, "w2"},
        {"Muon, two frozen", {STX_MUON, 0, 0, 0, 0, 0.1, 0, 0, 0, 0, 0, 0, 0}, 0.02, 7, "*1"}};
    size_t k;
    int step, kind;
    for (k = 0; k < sizeof cases / sizeof *cases; k++) {
        const small_case *c = &cases[k];
        optim_test t;
        optim_begin(&t, c);
        for (step = 0; step < 20; step++) {
            int made = small_step(t.w, t.u, c, step, 0, B, 0);
            CHECK(made == (step != c->bad), "%s: step %d of the whole: %d", c->name, step, made);
            for (kind = 0; kind < KINDS; kind++) kind_step(&t, kind, step);
        }
        CHECK(t.u->skipped == 1 && t.u->step == 19, "%s: the whole skips %d of %d steps", c->name,
              (int)t.u->skipped, (int)t.u->step);
        for (kind = 0; kind < KINDS; kind++) kind_end(&t, kind);
        if (c->d.kind == STX_MUON) shards_same(&t);
        shards_file(&t);
        for (kind = 0; kind < KINDS; kind++) done(t.x[kind]);
        done(t.w);
    }
}

static const small_case adam = {"", {STX_ADAM, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}, 0.01, -1, NULL};

/* Returns a loss that depends on all parameters. */
static stx_tensor *any_loss(stx_ctx *x, const stx_params *p) {
    stx_real in[D] = {1};
    return stx_sum(x, stx_linear(x, stx_input(x, in, 1, D, 0, 0), p->tensor[0], p->tensor[1],
                                 STX_ACT_NONE));
}

/* Running backward again or zeroing gradients while gradients are being sent must be an
   error. */
static void after_overlap(stx_ctx *x, stx_optim *o) {
    stx_params *p = o->params;
    int zeroing;
    for (zeroing = 0; zeroing < 2; zeroing++) {
        stx_tensor *y;
        stx_begin(x, STX_TRAIN);
        y = any_loss(x, p);
        stx_group_overlap(o);
        stx_backward(x, y);
        CHECK(stx_ok(x), "%s", stx_error(x));
        if (zeroing) {
            stx_params_zero_grad(p);
            refused(x, STX_ERR_ARG, "stx_params_zero_grad: gradients are being sent",
                    "stx_optim_step right after");
        } else {
            stx_begin(x, STX_TRAIN);
            stx_backward(x, any_loss(x, p));
            refused(x, STX_ERR_ARG, "stx_backward: gradients are being sent",
                    "stx_group_overlap only before the last stx_backward");
        }
        CHECK(stx_optim_step(o, 0), "after the error: %s", stx_error(x));
    }
}

/* Leaves the group while gradients are being sent. Later gradients must not be sent. */
static void leave_while_sending(stx_ctx *x, stx_optim *o) {
    int k;
    for (k = 0; k < 2; k++) {
        stx_tensor *y;
        stx_begin(x, STX_TRAIN);
        y = any_loss(x, o->params);
        if (k == 0) stx_group_overlap(o);
        stx_backward(x, y);
        if (k == 0) stx_group_leave(x);
        CHECK(stx_ok(x) && stx_ranks(x) == 1, "leaving while gradients are being sent: %s",
              stx_error(x));
    }
}

/* Tests which calls are allowed after stx_group_overlap. */
static void overlapped(void) {
    const size_t lo = first_of(rank), n = first_of(rank + 1) - lo;
    stx_ctx *x = context(3, 1, 256, 0), *w = context(3, 0, 0, 0);
    stx_optim *o = stx_optim_create(small_params(x, &adam), &adam.d),
              *u = stx_optim_create(small_params(w, &adam), &adam.d);
    double off;
    size_t i;
    int k;
    if (ranks > 1) after_overlap(x, o);
    stx_params_zero_grad(o->params);
    CHECK(stx_ok(x), "%s", stx_error(x));
    /* Complete steps must be possible after the errors. The optimiser is reset first. */
    o->update->step = 0;
    for (k = 0; k < 2 && o->state[k]; k++)
        for (i = 0; i < o->params->count; i++)
            memset(o->state[k][i]->data, 0, o->state[k][i]->size * sizeof(stx_real));
    for (k = 0; k < 3; k++) {
        small_step(x, o, &adam, k, lo, n, 1);
        small_step(w, u, &adam, k, 0, B, 0);
    }
    off = apart(o->params, u->params);
    CHECK(off <= 1e-12, "off by %g: %s", off, stx_error(x));
    leave_while_sending(x, o);
    done(x);
    x = context(3, 1, 256, 0);
    o = stx_optim_create(small_params(x, &adam), &adam.d);
    stx_group_overlap(o);
    stx_group_leave(x);
    stx_begin(x, STX_TRAIN);
    stx_backward(x, any_loss(x, o->params));
    CHECK(stx_ok(x) && stx_optim_step(o, 0), "overlap, then leave: %s", stx_error(x));
    done(x);
    done(w);
}


// >>parameters

static void parameters(void) {
    stx_ctx *x = context(100 + (uint64_t)rank, 1, 0, 0); /* a different seed on each rank */
    stx_params *p = small_params(x, &adam);
    stx_real mine[72 * 72], expected[72 * 72];
    size_t i;
    int same = tensor_as_rank0(p->tensor[2]);
    CHECK(ranks == 1 || !rank || !same, "the same values with different seeds");
    stx_get(x, p->tensor[2], mine);
    memcpy(expected, mine, sizeof mine);
    stx_group_broadcast(group, expected, sizeof mine, 0);
    CHECK(stx_group_broadcast_params(p), "%s", stx_error(x));
    for (i = 0; i < p->count; i++)
        CHECK(tensor_as_rank0(p->tensor[i]), "%s is not that of rank 0 at rank %d", p->name[i],
              rank);
    CHECK(!memcmp(expected, p->tensor[2]->data, sizeof mine), "the values are not those of rank 0");
    if (!rank)
        CHECK(!memcmp(mine, p->tensor[2]->data, sizeof mine), "the values of rank 0 changed");
    done(x);
    x = context(100 + (uint64_t)rank, 0, 0, 0);
    p = small_params(x, &adam);
    CHECK(stx_group_broadcast_params(p) && !memcmp(mine, p->tensor[2]->data, sizeof mine),
          "without a group they change");
    done(x);
}


// >>files in memory

/* Writes the parameters to a file, or to memory if path is NULL. */
static unsigned char *write_params(stx_ctx *x, const stx_params *p, const char *path, size_t *n) {
    stx_writer *w = stx_writer_create(x);
    CHECK(stx_params_save(w, p, "a.") && stx_writer_meta(w, "who", "rank")
              && stx_writer_checksum(w),
          "%s", stx_error(x));
    if (!path) return (unsigned char *)stx_writer_bytes(w, n);
    CHECK(stx_writer_finish(w, path), "%s", stx_error(x));
    return NULL;
}

/* Truncated and damaged files in memory must be refused. */
static void damaged_bytes(stx_ctx *x, unsigned char *bytes, size_t n) {
    stx_file *f;
    size_t cut;
    for (cut = 0; cut < n; cut += cut < 600 || n - cut < 20 ? 1 : 997) {
        f = stx_file_in_memory(x, "a letter", bytes, cut);
        CHECK(!f && stx_error_code(x) == STX_ERR_FORMAT && strstr(stx_error(x), "a letter"),
              "%zu of %zu bytes: %s", cut, n, stx_error(x));
        stx_file_close(f);
        stx_clear_error(x);
    }
    bytes[n - 1] ^= 1;
    f = stx_file_in_memory(x, "a letter", bytes, n);
    CHECK(f && !stx_file_verify(f), "a changed bit is not detected");
    refused(x, STX_ERR_FORMAT, "a letter", "");
    stx_file_close(f);
}

static void files(void) {
    stx_ctx *x = context(1, 0, 0, 0);
    stx_params *p = small_params(x, &adam), *q;
    stx_writer *w;
    stx_file *f;
    stx_map map;
    char path[1024];
    size_t n = 0;
    unsigned char *bytes;
    test_path(path, sizeof path, "test_group");
    write_params(x, p, path, NULL);
    bytes = write_params(x, p, NULL, &n);
    CHECK(bytes && stx_map_open(x, &map, path) && map.size == n && !memcmp(map.data, bytes, n),
          "%zu bytes in memory differ from the file: %s", n, stx_error(x));
    stx_map_close(&map);
    remove(path);
    f = stx_file_in_memory(x, "a letter", bytes, n);
    q = stx_params_create(x);
    stx_param(q, STX_ZEROS, 0, "w1", 72, D, 0, 0);
    CHECK(f && stx_file_verify(f) && stx_file_count(f) == 4
              && !strcmp(stx_file_meta(f, "who"), "rank") && stx_params_load(q, f, "a.")
              && !memcmp(q->tensor[0]->data, p->tensor[0]->data, 72 * D * sizeof(stx_real)),
          "%s", stx_error(x));
    stx_file_close(f);
    damaged_bytes(x, bytes, n);
    stx_block_free(x, bytes);
    CHECK(!stx_file_in_memory(x, "a letter", NULL, 8), "no bytes");
    refused(x, STX_ERR_ARG, "stx_file_in_memory", "NULL for the bytes");
    CHECK(!stx_file_in_memory(x, NULL, &n, 8), "no name");
    refused(x, STX_ERR_ARG, "stx_file_in_memory", "NULL for the name");
    CHECK(!stx_writer_bytes(NULL, &n) && n == 0, "no writer");
    w = stx_writer_create(x);
    stx_writer_add(w, "", STX_F64, 0, NULL, &n);
    stx_clear_error(x);
    CHECK(!stx_writer_bytes(w, NULL), "bytes of a writer that failed");
    stx_clear_error(x);
    done(x);
}


// >>models

/* A family, used through stx_lm. Its model is trained in several ways in contexts of
   the group, and with the whole batch in a context without a group. */
typedef struct family {
    const char *name;
    stx_lm (*make)(stx_ctx *x, stx_params **arch);
    double clip;
    int passes; /* backward passes per update */
    int ignore; /* 1: some targets are -1: all targets of some streams in some passes,
                   random targets in others */
    /* 1: streams restart at different times, sometimes all streams of one rank and none
       of another */
    int resets;
} family;

static stx_lm make_span(stx_ctx *x, stx_params **arch) {
    stx_span_desc d;
    memset(&d, 0, sizeof d);
    *arch = NULL;
    d.vocab = V;
    d.layers = 2;
    d.dim = C;
    d.heads = 2;
    d.inner = 16;
    d.span = 16;
    d.adapt_span = 1;
    d.ramp = 4;
    d.span_init = 0.5;
    d.span_loss = 0.01;
    d.dropout = 0.1;
    d.emb_dropout = 0.1;
    return stx_span_as_lm(stx_span_create(x, &d));
}

static stx_lm make_pers(stx_ctx *x, stx_params **arch) {
    stx_span_desc d;
    memset(&d, 0, sizeof d);
    *arch = NULL;
    d.vocab = V;
    d.layers = 2;
    d.dim = C;
    d.heads = 2;
    d.span = 12;
    d.pers = 6;
    d.adapt_io = 1;
    d.cutoffs = 2;
    d.cutoff[0] = 6;
    d.cutoff[1] = 14;
    d.divval = 2;
    d.dropout = 0.1;
    d.recompute_layers = SIZE_MAX;
    return stx_span_as_lm(stx_span_create(x, &d));
}

static stx_lm make_sru(stx_ctx *x, stx_params **arch) {
    stx_sru_lm_desc d;
    memset(&d, 0, sizeof d);
    *arch = NULL;
    d.vocab = V;
    d.dim = C;
    d.sru.layers = 3;
    d.sru.norm = STX_SRU_NORM_BEFORE;
    d.sru.highway_bias = -2;
    d.sru.rnn_dropout = 0.1;
    d.dropout = 0.1;
    d.adapt_io = 1;
    d.cutoffs = 2;
    d.cutoff[0] = 6;
    d.cutoff[1] = 14;
    d.divval = 2;
    d.emb_dropout = 0.2;
    return stx_sru_as_lm(stx_sru_lm_create(x, &d));
}

static stx_lm make_srupp(stx_ctx *x, stx_params **arch) {
    stx_sru_lm_desc d;
    memset(&d, 0, sizeof d);
    *arch = NULL;
    d.vocab = V;
    d.dim = C;
    d.tied = 1;
    d.sru.layers = 2;
    d.sru.transform = STX_SRU_ATTENTION;
    d.sru.proj = 4;
    d.sru.heads = 2;
    d.sru.rnn_dropout = 0.1;
    d.sru.attn_dropout = 0.2;
    d.sru.alpha_init = 0.5;
    d.sru.norm = STX_SRU_NORM_AFTER;
    d.sru.recompute_layers = SIZE_MAX;
    d.dropout = 0.1;
    return stx_sru_as_lm(stx_sru_lm_create(x, &d));
}

static stx_comp_desc comp_desc(void) {
    stx_comp_desc d;
    memset(&d, 0, sizeof d);
    d.vocab = V;
    d.dim = C;
    d.layers = 2;
    d.heads = 2;
    d.inner = 16;
    d.segment = T;
    d.mem = 8;
    d.cmem = 4;
    d.ratio = 4;
    d.attn_dropout = d.out_dropout = d.ff_dropout = 0.1;
    d.aux_dropout = 0.2;
    return d;
}

static stx_lm make_comp(stx_ctx *x, stx_params **arch) {
    stx_comp_desc d = comp_desc();
    *arch = NULL;
    d.compress = STX_COMP_COMPRESS_CONV;
    d.gate = STX_COMP_GATE_GRU;
    d.glu = 1;
    return stx_comp_as_lm(stx_comp_create(x, &d));
}

static stx_lm make_comp_auto(stx_ctx *x, stx_params **arch) {
    stx_comp_desc d = comp_desc();
    *arch = NULL;
    d.compress = STX_COMP_COMPRESS_CONV;
    d.aux = STX_COMP_AUX_AUTOENCODE;
    d.aux_dropout = 0;
    d.positions = STX_COMP_POSITIONS_XL;
    d.gate = STX_COMP_GATE_GTRXL;
    d.tied = 1;
    d.recompute_layers = SIZE_MAX;
    return stx_comp_as_lm(stx_comp_create(x, &d));
}

static stx_par_desc par_desc(void) {
    stx_par_desc d;
    memset(&d, 0, sizeof d);
    d.vocab = V;
    d.dim = C;
    d.heads = 2;
    d.inner = 16;
    d.segment = T;
    d.mem = 8;
    d.dropout = d.attn_dropout = d.inner_dropout = 0.1;
    d.pos_dropout = 0.1;
    d.final_dropout = 0.1;
    d.words_out = STX_PAR_OUT_PLAIN;
    return d;
}

static stx_lm par_lm(stx_ctx *x, const stx_par_desc *d, stx_params **arch) {
    stx_par *m = stx_par_create(x, d);
    *arch = m ? m->gates : NULL;
    return stx_par_as_lm(m);
}

static stx_lm make_par_step(stx_ctx *x, stx_params **arch) {
    stx_par_desc d = par_desc();
    d.blocks = 3;
    d.gate = STX_PAR_ST;
    d.latency = STX_PAR_LATENCY_FBNET;
    d.latency_w = STX_PAR_LATENCY_OF_W;
    d.cost[0] = 3;
    d.cost[1] = 2;
    d.latency_weight = 0.5;
    return par_lm(x, &d, arch);
}

static stx_lm make_par_sequence(stx_ctx *x, stx_params **arch) {
    stx_par_desc d = par_desc();
    d.blocks = 3;
    d.noise = STX_PAR_NOISE_SEQUENCE;
    d.latency = STX_PAR_LATENCY_ADD;
    d.latency_w = STX_PAR_LATENCY_OF_W;
    d.cost[0] = 3;
    d.cost[1] = 2;
    d.latency_weight = 0.1;
    d.recompute_layers = SIZE_MAX;
    return par_lm(x, &d, arch);
}

static stx_lm make_par_tokens(stx_ctx *x, stx_params **arch) {
    stx_par_desc d = par_desc();
    d.blocks = 2;
    d.noise = STX_PAR_NOISE_TOKENS;
    d.noise_tokens = 3;
    d.gate_form = STX_PAR_FORM_PI;
    d.latency = STX_PAR_LATENCY_HINGE;
    d.latency_w = STX_PAR_LATENCY_OF_P;
    d.cost[0] = 3;
    d.cost[1] = 2;
    d.latency_weight = 0.1;
    d.latency_target = 1;
    return par_lm(x, &d, arch);
}

static stx_lm make_par(stx_ctx *x, stx_params **arch) {
    stx_par_desc d = par_desc();
    d.pattern = "sfsf";
    d.words_out = STX_PAR_OUT_ADAPTIVE;
    d.adaptive_in = 1;
    d.cutoffs = 2;
    d.cutoff[0] = 6;
    d.cutoff[1] = 14;
    d.div_val = 2;
    d.tie_words = 1;
    d.tie_projs = 1;
    d.recompute_layers = SIZE_MAX;
    return par_lm(x, &d, arch);
}

static const family families[] = {{"span", make_span, 0.5, 1, 0, 1},
                                  {"all-attention", make_pers, 0, 2, 0, 0},
                                  {"SRU", make_sru, 0.5, 2, 0, 1},
                                  {"SRU++", make_srupp, 0.25, 1, 0, 0},
                                  {"compressive", make_comp, 0.5, 1, 1, 1},
                                  {"compressive, autoencoder", make_comp_auto, 0, 2, 0, 1},
                                  {"PAR, noise per step", make_par_step, 0.5, 2, 0, 0},
                                  {"PAR, noise per stream", make_par_sequence, 0, 1, 0, 0},
                                  {"PAR, noise per run", make_par_tokens, 0.5, 1, 0, 1},
                                  {"PAR, a pattern", make_par, 0.25, 1, 1, 1}};

enum { FAMILIES = sizeof families / sizeof *families, STEPS = 200, SHORT = 12 };

/* Returns the number of updates of a model. In a group of one rank, results are
   bit-exact, so the first steps suffice. */
static int steps(void) {
    return ranks > 1 ? STEPS : 2 * SHORT;
}

typedef struct run {
    const family *kind;
    stx_ctx *x;
    stx_lm lm;
    stx_optim *o, *oa; /* o: for the weights; oa: for the gates */
    void *state;
    size_t lo, n; /* streams [lo, lo + n) */
    int overlap, step;
    double loss[2 * STEPS]; /* (STEPS,2): the nll and the minimised loss, summed over
                               the passes */
} run;

static void run_begin(run *r, const family *f, int joined, size_t bucket, int shard, int overlap) {
    stx_optim_desc d;
    stx_params *arch;
    memset(r, 0, sizeof *r);
    memset(&d, 0, sizeof d);
    d.kind = STX_ADAM;
    d.clip = f->clip;
    r->kind = f;
    r->x = context(11, joined, bucket, shard);
    r->lo = joined ? first_of(rank) : 0;
    r->n = joined ? first_of(rank + 1) - r->lo : B;
    r->overlap = overlap;
    r->lm = f->make(r->x, &arch);
    CHECK(stx_ok(r->x) && r->lm.model, "%s: %s", f->name, stx_error(r->x));
    r->o = stx_optim_create(r->lm.params, &d);
    if (arch) r->oa = stx_optim_create(arch, NULL);
    r->state = r->lm.state_create(r->lm.model, r->n, 0);
}

/* Returns token `at` of stream b. Low ids are frequent. */
static int32_t word(size_t b, size_t at) {
    double u = hashed(b, 5000 + at);
    return (int32_t)(u * u * V);
}

/* Nonzero if target i of stream b is -1. Passes alternate between no target, all
   targets of the first streams, and random targets. */
static int skipped_target(size_t pass, size_t b, size_t i) {
    if (pass % 3 == 0) return 0;
    if (pass % 3 == 1) return b < 1 + pass % 7;
    return hashed(pass, 900 + 31 * b + i) < 0.2;
}

/* Sets the tokens and targets of pass k. Streams that restart in this pass are reset
   first. */
static void run_block(run *r, size_t k, int32_t *ids, int32_t *targets) {
    const family *f = r->kind;
    size_t b, i;
    for (b = 0; b < r->n; b++) {
        const size_t stream = r->lo + b;
        const int some = (k + 5 * stream) % 37 == 36, half = k % 41 == 8 && stream < B / 2;
        if (f->resets && (some || half)) r->lm.state_reset_stream(r->state, b);
        for (i = 0; i < T; i++) {
            ids[b * T + i] = word(stream, k * T + i);
            targets[b * T + i] = word(stream, k * T + i + 1);
            if (f->ignore && skipped_target(k, stream, i)) targets[b * T + i] = -1;
        }
    }
}

/* Continues a run up to step `end`. */
static void run_to(run *r, int end) {
    const family *f = r->kind;
    int32_t ids[B * T], targets[B * T];
    int pass;
    for (; r->step < end; r->step++) {
        for (pass = 0; pass < f->passes; pass++) {
            stx_tensor *nll, *total;
            run_block(r, (size_t)r->step * (size_t)f->passes + (size_t)pass, ids, targets);
            stx_begin(r->x, STX_TRAIN);
            nll = r->lm.loss(r->lm.model, stx_tokens(r->x, ids, r->n, T),
                             stx_tokens(r->x, targets, r->n, T), r->state, r->state);
            total = r->lm.total(r->lm.model, nll);
            if (r->overlap && pass + 1 == f->passes) stx_group_overlap(r->o);
            stx_backward(r->x, total);
            r->loss[2 * r->step] += stx_item(r->x, nll);
            r->loss[2 * r->step + 1] += stx_item(r->x, total);
        }
        stx_optim_step(r->o, 0.003);
        if (r->oa) stx_optim_step(r->oa, 0.01);
        r->lm.updated(r->lm.model);
    }
}

static void run_end(run *r) {
    r->lm.state_free(r->state);
    done(r->x);
}

/* Returns the largest deviation between the values in two files, or infinity if their
   entries do not match. */
static double files_apart(const stx_file *a, const stx_file *b) {
    double worst = 0, e;
    size_t i;
    if (!a || !b || stx_file_count(a) != stx_file_count(b)) return HUGE_VAL;
    for (i = 0; i < stx_file_count(a); i++) {
        const stx_entry *p = stx_file_entry(a, i), *q = stx_file_find(b, p->name);
        double *v, *w;
        if (!q || q->count != p->count || q->dtype != p->dtype || q->ndim != p->ndim
            || memcmp(q->dim, p->dim, sizeof p->dim))
            return HUGE_VAL;
        if (p->dtype != STX_F64) {
            if (memcmp(p->data, q->data, p->bytes)) return HUGE_VAL;
            continue;
        }
        v = (double *)malloc((2 * p->count + 1) * sizeof *v);
        w = v + p->count;
        e = HUGE_VAL;
        if (stx_entry_get_f64(p, v, p->count) && stx_entry_get_f64(q, w, p->count))
            e = test_error(v, w, p->count, 1e-3);
        if (!(e <= worst)) worst = e;
        free(v);
    }
    return worst;
}

/* A state, saved as a file in memory. */
typedef struct packed {
    void *bytes;
    size_t n;
    stx_file *f;
    stx_ctx *x;
} packed;

static packed pack(stx_ctx *x, const stx_lm *lm, const void *state) {
    stx_writer *w = stx_writer_create(x);
    packed p;
    CHECK(lm->state_save(w, state, "s."), "%s", stx_error(x));
    p.bytes = stx_writer_bytes(w, &p.n);
    p.f = stx_file_in_memory(x, "state", p.bytes, p.n);
    p.x = x;
    return p;
}

static void packed_free(packed *p) {
    stx_file_close(p->f);
    stx_block_free(p->x, p->bytes);
}

/* Returns the largest deviation between this rank's share and the same streams of w,
   the run with the whole batch. */
static double share_apart(const run *r, const run *w, const packed *mine) {
    void *part = w->lm.state_create(w->lm.model, r->n, 0);
    packed expected;
    double off;
    CHECK(w->lm.state_copy(part, 0, w->state, r->lo, r->n), "%s", stx_error(w->x));
    expected = pack(w->x, &w->lm, part);
    off = files_apart(mine->f, expected.f);
    w->lm.state_free(part);
    packed_free(&expected);
    return off;
}

/* Copies the share of rank `from` into `all` on rank 0. mine: this rank's share. */
static void gather_share(const run *r, const packed *mine, int from, void *all) {
    double n = from == rank ? (double)mine->n : 0;
    const size_t lo = first_of(from), streams = first_of(from + 1) - lo;
    unsigned char *bytes = (unsigned char *)mine->bytes;
    stx_group_sum(group, &n, 1);
    if (from && !rank) bytes = (unsigned char *)malloc((size_t)n);
    CHECK(stx_group_send_bytes(group, bytes, (size_t)n, from, 0), "%s", stx_error(group));
    if (!rank) {
        stx_file *f = stx_file_in_memory(r->x, "the state of a rank", bytes, (size_t)n);
        void *part = r->lm.state_create(r->lm.model, streams, 0);
        CHECK(f && r->lm.state_load(part, f, "s.") && r->lm.state_copy(all, lo, part, 0, streams),
              "%s", stx_error(r->x));
        r->lm.state_free(part);
        stx_file_close(f);
    }
    if (bytes != mine->bytes) free(bytes);
}

/* Compares the streams' memories with the memories of w, the run with the whole batch:
   each rank's share, and on rank 0 all shares joined. */
static double memories_apart(const run *r, const run *w) {
    packed mine = pack(r->x, &r->lm, r->state);
    double off = share_apart(r, w, &mine), e = 0;
    void *all = rank ? NULL : r->lm.state_create(r->lm.model, B, 0);
    int from;
    for (from = 0; from < ranks; from++) gather_share(r, &mine, from, all);
    if (!rank) {
        packed joined = pack(r->x, &r->lm, all), expected = pack(w->x, &w->lm, w->state);
        e = files_apart(joined.f, expected.f);
        packed_free(&joined);
        packed_free(&expected);
        r->lm.state_free(all);
        CHECK(!r->lm.state_copy(r->state, r->n, r->state, 0, 1), "copies one stream too many");
        stx_clear_error(r->x);
        if (stx_ranks(w->x) != stx_ranks(r->x))
            CHECK(!r->lm.state_copy(r->state, 0, NULL, 0, 1), "copies from no state");
        stx_clear_error(r->x);
    }
    packed_free(&mine);
    return STX_MAX(off, e);
}

static double losses_apart(const run *r, const run *w) {
    double *v = (double *)malloc(2 * STEPS * sizeof *v), worst;
    int i, n = 2 * r->step;
    for (i = 0; i < n; i++) v[i] = r->loss[i] / ranks;
    stx_group_sum(group, v, (size_t)n);
    worst = test_error(v, w->loss, (size_t)n, 0);
    free(v);
    return worst;
}

/* Compares a run with w, the run with the whole batch, after the same number of steps.
   The states of a sharded optimiser are not compared here. */
static void same(const char *how, const run *r, const run *w, double tol, int states) {
    double p, s = states ? states_apart(r->o, w->o) : 0, l = losses_apart(r, w);
    apart_at = "";
    p = apart(r->lm.params, w->lm.params);
    if (r->oa) p = STX_MAX(p, apart(r->oa->params, w->oa->params));
    if (r->oa && states) s = STX_MAX(s, states_apart(r->oa, w->oa));
    CHECK(r->step == w->step && l <= tol, "%s, %s: losses off by %g", r->kind->name, how, l);
    CHECK(p <= tol, "%s, %s: parameters off by %g (%s): %s%s", r->kind->name, how, p, apart_at,
          stx_error(r->x), stx_error(w->x));
    CHECK(s <= tol, "%s, %s: states of the optimiser off by %g", r->kind->name, how, s);
    CHECK(r->o->skipped == w->o->skipped && r->o->step == w->o->step, "%s, %s: updates",
          r->kind->name, how);
    if (verbose) {
        char what[96];
        snprintf(what, sizeof what, "%s, %d steps: %s", how, r->step, apart_at);
        report(r->kind->name, what, STX_MAX(l, STX_MAX(p, s)));
    }
}

/* Checks that the parameters of all ranks are bit-identical. */
static void equal_at_all(const run *r) {
    size_t i;
    int ok = 1;
    for (i = 0; i < r->lm.params->count; i++) ok &= tensor_as_rank0(r->lm.params->tensor[i]);
    for (i = 0; r->oa && i < r->oa->count; i++) ok &= tensor_as_rank0(r->oa->params->tensor[i]);
    CHECK(ok, "%s: the parameters of rank %d are not exactly those of rank 0", r->kind->name, rank);
}

static int same_bits(const stx_params *a, const stx_params *b) {
    size_t i;
    for (i = 0; i < a->count; i++)
        if (memcmp(a->tensor[i]->data, b->tensor[i]->data, a->tensor[i]->size * sizeof(stx_real)))
            return 0;
    return 1;
}

/* Checks that two runs have bit-identical losses and parameters. */
static void bit_equal(const char *how, const run *a, const run *b) {
    const size_t n = 2 * (size_t)STX_MIN(a->step, b->step);
    int ok = !memcmp(a->loss, b->loss, n * sizeof *a->loss);
    ok &= same_bits(a->lm.params, b->lm.params);
    if (a->oa) ok &= same_bits(a->oa->params, b->oa->params);
    CHECK(ok && a->step == b->step, "%s: %s: not the same bits: %g", a->kind->name, how,
          apart(a->lm.params, b->lm.params));
}

/* Sends the whole-batch run that rank `from` has trained to all ranks. Receiving it is
   faster than recomputing the same bits. */
static void share(run *w, int from) {
    stx_optim *o[2];
    double at[3];
    size_t i, k, j, n;
    packed p = pack(w->x, &w->lm, w->state);
    void *bytes = p.bytes;
    o[0] = w->o;
    o[1] = w->oa;
    for (j = 0; j < 2 && o[j]; j++) {
        const stx_params *q = o[j]->params;
        for (i = 0; i < q->count; i++) {
            n = q->tensor[i]->size * sizeof(stx_real);
            stx_group_broadcast(group, q->tensor[i]->data, n, from);
            for (k = 0; k < 2 && o[j]->state[k]; k++)
                stx_group_broadcast(group, o[j]->state[k][i]->data, n, from);
        }
    }
    at[0] = w->step;
    at[1] = (double)w->o->step;
    at[2] = (double)w->o->skipped;
    stx_group_broadcast(group, at, sizeof at, from);
    w->step = (int)at[0];
    w->o->step = (uint64_t)at[1];
    w->o->skipped = (uint64_t)at[2];
    stx_group_broadcast(group, w->loss, sizeof w->loss, from);
    at[0] = rank == from ? (double)p.n : 0;
    stx_group_sum(group, at, 1);
    if (rank != from) bytes = malloc((size_t)at[0]);
    stx_group_broadcast(group, bytes, (size_t)at[0], from);
    if (rank != from) {
        stx_file *f = stx_file_in_memory(w->x, "the state of a whole", bytes, (size_t)at[0]);
        CHECK(f && w->lm.state_load(w->state, f, "s."), "%s: %s", w->kind->name, stx_error(w->x));
        stx_file_close(f);
        free(bytes);
    }
    packed_free(&p);
}

/* Runs a few steps with different bucket sizes, with and without overlap and shards.
   Rounding errors have hardly accumulated by then, so the tolerance is small. The run
   `plain` is continued later. */
static void first_steps(const family *f, run *plain, const run *w) {
    enum { OVER, SMALL, SMALL_OVER, MIDDLE, SHARDED, WAYS };

    run *r = (run *)malloc(WAYS * sizeof *r);
    int k;
    run_begin(plain, f, 1, 0, 0, 0);
    run_begin(&r[OVER], f, 1, 0, 0, 1);
    run_begin(&r[SMALL], f, 1, 256, 0, 0);
    run_begin(&r[SMALL_OVER], f, 1, 256, 0, 1);
    run_begin(&r[MIDDLE], f, 1, 700, 0, 1);
    run_begin(&r[SHARDED], f, 1, 256, 1, 1);
    run_to(plain, SHORT);
    for (k = 0; k < WAYS; k++) run_to(&r[k], SHORT);
    same("first steps", plain, w, 1e-11, 1);
    same("small buckets", &r[SMALL], w, 1e-11, 1);
    same("medium buckets", &r[MIDDLE], w, 1e-11, 1);
    same("shards", &r[SHARDED], w, 1e-11, 0);
    bit_equal("overlapped", &r[OVER], plain);
    bit_equal("overlapped, small buckets", &r[SMALL_OVER], &r[SMALL]);
    equal_at_all(&r[SMALL_OVER]);
    for (k = 0; k < WAYS; k++) run_end(&r[k]);
    free(r);
}

/* Trains each family in the group and with the whole batch. The whole-batch runs are
   divided among the ranks, which then exchange the results. */
static void models(void) {
    run *whole = (run *)malloc(FAMILIES * sizeof *whole),
        *plain = (run *)malloc(FAMILIES * sizeof *plain);
    int f;
    for (f = 0; f < FAMILIES; f++) {
        run_begin(&whole[f], &families[f], 0, 0, 0, 0);
        if (f % ranks == rank) run_to(&whole[f], SHORT);
    }
    for (f = 0; f < FAMILIES; f++) {
        share(&whole[f], f % ranks);
        first_steps(&families[f], &plain[f], &whole[f]);
    }
    for (f = 0; f < FAMILIES; f++)
        if (f % ranks == rank) run_to(&whole[f], steps());
    for (f = 0; f < FAMILIES; f++) {
        double off;
        share(&whole[f], f % ranks);
        run_to(&plain[f], steps());
        same("last steps", &plain[f], &whole[f], 1e-9, 1);
        equal_at_all(&plain[f]);
        off = memories_apart(&plain[f], &whole[f]);
        CHECK(off <= 1e-9, "%s: memories off by %g", families[f].name, off);
        report(families[f].name, "memories", off);
        run_end(&plain[f]);
        run_end(&whole[f]);
    }
    free(whole);
    free(plain);
}

/* In training, a latency penalty must be refused if the mean of the ranks' penalties is
   not the penalty of all streams. */
static void refusals(void) {
    int k;
    for (k = 0; k < 4; k++) {
        const int can = ranks == 1 || k > 1;
        stx_ctx *x = context(1, 1, 0, 0);
        stx_par_desc d = par_desc();
        int32_t ids[T] = {0};
        stx_params *arch;
        stx_tensor *y;
        stx_lm lm;
        d.blocks = 1;
        d.latency = k == 1 ? STX_PAR_LATENCY_FBNET : STX_PAR_LATENCY_HINGE;
        d.latency_target = k == 1 ? 0 : 1;
        d.latency_w = k == 2 ? STX_PAR_LATENCY_OF_P : STX_PAR_LATENCY_OF_W;
        d.cost[0] = 3;
        d.cost[1] = 2;
        d.latency_weight = 1;
        d.noise = k == 3 ? STX_PAR_NOISE_STEP : STX_PAR_NOISE_SEQUENCE;
        lm = par_lm(x, &d, &arch);
        stx_begin(x, STX_EVAL);
        y = lm.loss(lm.model, stx_tokens(x, ids, 1, T), stx_tokens(x, ids, 1, T), NULL, NULL);
        CHECK(y != NULL, "evaluation: %s", stx_error(x));
        stx_begin(x, STX_TRAIN);
        y = lm.loss(lm.model, stx_tokens(x, ids, 1, T), stx_tokens(x, ids, 1, T), NULL, NULL);
        CHECK((y != NULL) == can, "case %d: %s", k, stx_error(x));
        if (!can)
            refused(x, STX_ERR_ARG, "stx_par_segment: the latency of the gate weights w",
                    "STX_PAR_NOISE_STEP");
        done(x);
    }
}

int main(int argc, char **argv) {
    double count[2];
    int code;
    verbose = argc > 1 && !strcmp(argv[1], "-v");
    group = context(1, 0, 0, 0);
    if (!stx_group_join(group, NULL)) {
        printf("%s\n0 passed, 1 failed\n", stx_error(group));
        return 1;
    }
    rank = stx_rank(group);
    ranks = stx_ranks(group);
    sums();
    errors();
    environment();
    masks();
    losses();
    parts();
    optimisers();
    long_name();
    overlapped();
    parameters();
    files();
    refusals();
    models();
    count[0] = (double)test_passed;
    count[1] = (double)test_failed;
    if (!stx_group_sum(group, count, 2)) {
        printf("%s\n0 passed, 1 failed\n", stx_error(group));
        return 1;
    }
    /* Once the last context has left the group, rank 0 can add only its own checks to the
       total. A later failure on another rank shows only in that rank's exit code. */
    stx_group_leave(group);
    if (ranks > 1) {
        long before = test_failed;
        CHECK(!stx_group_join(group, NULL), "joined again");
        refused(group, STX_ERR_DEVICE,
                "stx_group_join: MPI has been finalised", "only once");
        CHECK(stx_ranks(group) == 1, "in a group after leaving it");
        count[0] += 3 - (double)(test_failed - before);
        count[1] += (double)(test_failed - before);
    }
    stx_destroy(group);
    code = count[1] > 0 || !(count[0] > 0);
    if (!rank) printf("%.0f passed, %.0f failed\n", count[0], count[1]);
    return code;
}
