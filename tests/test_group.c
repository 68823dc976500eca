/* test_group.c - data parallel training (>>api: group in seqtx.h). All ranks run it
   alike, as in
     mpirun --oversubscribe -np 3 build/test_group [-v]
   and it is a group of one without mpirun. In double, where rounding hides nothing:
   what N ranks do, each with its share of a batch, is compared with what a context
   that has not joined does with the whole batch, in the same process. A check that
   fails at any rank counts; rank 0 has the last line. -v: the largest deviations.
   Control flow never depends on a check, for the other ranks would wait. */
#if !defined(_WIN32) && !defined(_POSIX_C_SOURCE)
  #define _POSIX_C_SOURCE 200809L
#endif
#include "../seqtx_attn_span.h"
#include "../seqtx_sru.h"
#include "../seqtx_compressive.h"
#include "../seqtx_par.h"
#include <unistd.h>
#include "test.h"

/* joined first, left last: what ranks tell each other beside what is tested */
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

/* An error, of this code, whose text has both */
static void refused(stx_ctx *x, int code, const char *a, const char *b) {
    CHECK(stx_error_code(x) == code && strstr(stx_error(x), a) && strstr(stx_error(x), b),
          "want \"%s .. %s\", got \"%s\"", a, b, stx_error(x));
    stx_clear_error(x);
}

/* Are n bytes those of rank 0, at all ranks? */
static int alike(const void *bytes, size_t n) {
    void *his = malloc(n ? n : 1);
    int same;
    memcpy(his, bytes, n);
    stx_group_broadcast(group, his, n, 0);
    same = !memcmp(his, bytes, n);
    free(his);
    return same;
}

static double mean_of_ranks(double v) {
    stx_group_sum(group, &v, 1);
    return v / ranks;
}

static void report(const char *what, const char *more, double v) {
    stx_group_max(group, &v, 1);
    if (verbose && !rank) printf("%-26s %-60s %.1e\n", what, more, v);
}

/* The same numbers at all ranks, for (a, b): in [0, 1) */
static double hashed(uint64_t a, uint64_t b) {
    uint32_t r[4];
    stx_philox(0x67726f7570, a, b, r);
    return (double)r[0] / 4294967296.0;
}


// >>numbers and bytes on the host

static void sums(void) {
    static const size_t sizes[] = {0, 1, 1000, 100000};
    size_t k, i;
    stx_ctx *alone = context(1, 0, 0, 0);
    for (k = 0; k < sizeof sizes / sizeof *sizes; k++) {
        size_t n = sizes[k], bad = 0;
        double *v = (double *)calloc(n + 1, sizeof *v), *w = (double *)calloc(n + 1, sizeof *w),
               worst = 0;
        int from, to;
        for (i = 0; i <= n; i++) v[i] = hashed(i, (uint64_t)rank) - 0.5;
        memcpy(w, v, (n + 1) * sizeof *v);
        CHECK(stx_group_sum(group, v, n), "%s", stx_error(group));
        for (i = 0; i < n; i++) {
            double want = 0, off;
            int r;
            for (r = 0; r < ranks; r++) want += hashed(i, (uint64_t)r) - 0.5;
            off = fabs(v[i] - want);
            if (!(off <= worst)) worst = off;
        }
        CHECK(worst < 1e-15 * ranks, "sum of %zu: off by %g", n, worst);
        CHECK(alike(v, n * sizeof *v), "sum of %zu: other bits", n);
        CHECK(v[n] >= w[n] && v[n] <= w[n], "sum of %zu: writes past its end", n);

        /* a NaN at any rank wins, infinities are numbers */
        for (i = 0; i <= n; i++) {
            v[i] = hashed(i, (uint64_t)rank) - 0.5;
            if (i % 7 == 1 && (int)(i % (size_t)ranks) == rank) v[i] = (double)NAN;
            if (i % 7 == 2 && (int)(i % (size_t)ranks) == rank) v[i] = HUGE_VAL;
            if (i % 7 == 3 && (int)(i % (size_t)ranks) == rank) v[i] = -HUGE_VAL;
            if (i % 7 == 4) v[i] = -HUGE_VAL;
            if (i % 35 == 5) v[i] = (int)(i % (size_t)ranks) == rank ? HUGE_VAL : (double)NAN;
        }
        CHECK(stx_group_max(group, v, n), "%s", stx_error(group));
        for (bad = 0, i = 0; i < n; i++) {
            double want = -HUGE_VAL;
            int r, one = (int)(i % (size_t)ranks);
            for (r = 0; r < ranks; r++) {
                double h = hashed(i, (uint64_t)r) - 0.5;
                if (i % 7 == 2 && r == one) h = HUGE_VAL;
                if ((i % 7 == 3 && r == one) || i % 7 == 4) h = -HUGE_VAL;
                if (h > want) want = h;
            }
            if (i % 35 == 5)
                bad += ranks > 1 ? v[i] == v[i] : !(v[i] >= HUGE_VAL);
            else if (i % 7 == 1)
                bad += v[i] == v[i];
            else
                bad += !(v[i] >= want && v[i] <= want);
        }
        CHECK(!bad, "maximum of %zu: %zu wrong", n, bad);
        CHECK(alike(v, n * sizeof *v), "maximum of %zu: other bits", n);

        for (from = 0; from < ranks; from++) {
            for (i = 0; i <= n; i++) v[i] = hashed(i, (uint64_t)rank);
            CHECK(stx_group_broadcast(group, v, n * sizeof *v, from), "%s", stx_error(group));
            for (bad = 0, i = 0; i < n; i++)
                bad += !(v[i] >= hashed(i, (uint64_t)from) && v[i] <= hashed(i, (uint64_t)from));
            CHECK(!bad && v[n] >= hashed(n, (uint64_t)rank) && v[n] <= hashed(n, (uint64_t)rank),
                  "broadcast of %zu from %d: %zu wrong", n, from, bad);
            for (to = 0; to < ranks; to++) {
                for (i = 0; i <= n; i++) v[i] = hashed(i, (uint64_t)rank);
                CHECK(stx_group_send_bytes(group, v, n * sizeof *v, from, to), "%s",
                      stx_error(group));
                for (bad = 0, i = 0; i <= n; i++) {
                    double want = hashed(i, (uint64_t)(rank == to && i < n ? from : rank));
                    bad += !(v[i] >= want && v[i] <= want);
                }
                CHECK(!bad, "%zu from %d to %d: %zu wrong", n, from, to, bad);
            }
        }

        /* no other rank: everything stays as it is, and is correct */
        for (i = 0; i <= n; i++) v[i] = i % 5 ? hashed(i, (uint64_t)rank) : (double)NAN;
        memcpy(w, v, (n + 1) * sizeof *v);
        CHECK(stx_group_sum(alone, v, n) && stx_group_max(alone, v, n)
                  && stx_group_broadcast(alone, v, n * sizeof *v, 0)
                  && stx_group_send_bytes(alone, v, n * sizeof *v, 0, 0)
                  && !memcmp(v, w, (n + 1) * sizeof *v),
              "without a group: %zu", n);
        free(v);
        free(w);
    }
    CHECK(stx_rank(alone) == 0 && stx_ranks(alone) == 1 && stx_rank(NULL) == 0
              && stx_ranks(NULL) == 1,
          "a group of one");
    stx_group_abort(alone, 3); /* nothing happens */
    stx_group_leave(alone);
    stx_group_leave(NULL);
    stx_group_overlap(NULL);
    CHECK(!stx_group_broadcast_params(NULL), "no list");
    done(alone);
}

static void errors(void) {
    stx_ctx *x = context(1, 1, 0, 0), *y;
    stx_group_desc d;
    double v = 1;
    int i;
    memset(&d, 0, sizeof d);
    if (ranks > 1) {
        CHECK(!stx_group_sum(x, NULL, 1), "no memory");
        refused(x, STX_ERR_ARG, "stx_group_sum:", "expected memory");
        CHECK(!stx_group_max(x, NULL, 1), "no memory");
        refused(x, STX_ERR_ARG, "stx_group_max:", "expected memory");
        CHECK(!stx_group_broadcast(x, NULL, 1, 0), "no memory");
        refused(x, STX_ERR_ARG, "stx_group_broadcast:", "expected memory");
        CHECK(!stx_group_broadcast(x, &v, 1, -1), "rank -1");
        refused(x, STX_ERR_ARG, "stx_group_broadcast:", "expected a rank below");
        CHECK(!stx_group_broadcast(x, &v, 1, ranks), "rank N");
        refused(x, STX_ERR_ARG, "stx_group_broadcast:", "expected a rank below");
        CHECK(!stx_group_send_bytes(x, &v, 1, 0, ranks), "to rank N");
        refused(x, STX_ERR_ARG, "stx_group_send_bytes:", "expected a rank below");
        CHECK(!stx_group_send_bytes(x, &v, 1, -1, 0), "from rank -1");
        refused(x, STX_ERR_ARG, "stx_group_send_bytes:", "expected a rank below");
        if (rank < 2) {
            CHECK(!stx_group_send_bytes(x, NULL, 1, 0, 1), "no memory");
            refused(x, STX_ERR_ARG, "stx_group_send_bytes:", "expected memory");
        } else
            CHECK(stx_group_send_bytes(x, NULL, 1, 0, 1), "who only passes by needs none: %s",
                  stx_error(x));
        CHECK(stx_group_sum(x, NULL, 0), "nothing to add: %s", stx_error(x));
        /* a context in error does nothing, at all ranks alike */
        stx_fail(x, STX_ERR_ARG, "torn");
        CHECK(!stx_group_sum(x, &v, 1) && !stx_group_max(x, &v, 1)
                  && !stx_group_broadcast(x, &v, sizeof v, 0)
                  && !stx_group_send_bytes(x, &v, sizeof v, 0, 1) && !stx_group_join(x, NULL)
                  && v >= 1 && v <= 1,
              "in error: %g", v);
        refused(x, STX_ERR_ARG, "torn", "");
        CHECK(!stx_group_join(x, NULL), "joins twice");
        refused(x, STX_ERR_ARG, "stx_group_join: it is already in a group", "once");
        v = rank;
        CHECK(stx_group_sum(x, &v, 1) && CLOSE(v, ranks * (ranks - 1) / 2.0, 0), "after errors: %g",
              v);
    }
    y = context(1, 0, 0, 0);
    d.bucket = ((size_t)1 << 28) + 1;
    CHECK(!stx_group_join(y, &d), "too large a bucket");
    refused(y, STX_ERR_ARG, "stx_group_join: bucket: expected at most 268435456", "268435457");
    CHECK(stx_ranks(y) == 1, "not joined");
    stx_params_create(y);
    CHECK(!stx_group_join(y, NULL), "joins late");
    refused(y, STX_ERR_ARG, "the context has parameters", "before its first parameter list");
    CHECK(stx_ranks(y) == 1, "not joined");
    done(y);
    /* several contexts are in the group, and one that leaves takes no other with it */
    for (i = 0; i < 3; i++) done(context(1, 1, 0, 0));
    v = rank + 1;
    CHECK(stx_group_sum(x, &v, 1) && CLOSE(v, ranks * (ranks + 1) / 2.0, 0),
          "others have left: %g %s", v, stx_error(x));
    done(x);
}


// >>how the process was started

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

/* set: "NAME=value NAME=value .." */
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
          "%s: %d of %d, %d of %d here, by %s", set, s.rank, s.ranks, s.local, s.locals,
          s.by ? s.by : "none");
}

static void environment(void) {
    char *was[VARIABLES];
    size_t i;
    stx_ctx *x;
    for (i = 0; i < VARIABLES; i++) {
        const char *v = getenv(variables[i]);
        was[i] = v ? (char *)malloc(strlen(v) + 1) : NULL;
        if (v) strcpy(was[i], v);
    }
    started("", 0, 1, 0, 1, NULL);
    started(
        "OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=8 OMPI_COMM_WORLD_LOCAL_RANK=1 "
        "OMPI_COMM_WORLD_LOCAL_SIZE=4",
        2, 8, 1, 4, "OMPI_COMM_WORLD_SIZE");
    started("OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1", 0, 1, 0, 1, NULL);
    started("OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2", 0, 2, 0, 1, "OMPI_COMM_WORLD_SIZE");
    started(
        "MV2_COMM_WORLD_RANK=3 MV2_COMM_WORLD_SIZE=4 MV2_COMM_WORLD_LOCAL_RANK=1 "
        "MV2_COMM_WORLD_LOCAL_SIZE=2",
        3, 4, 1, 2, "MV2_COMM_WORLD_SIZE");
    started("PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2", 1, 2, 1, 2, "PMI_SIZE");
    started("SLURM_PROCID=5 SLURM_STEP_NUM_TASKS=6 SLURM_LOCALID=2 SLURM_STEP_TASKS_PER_NODE=3", 5,
            6, 2, 3, "SLURM_STEP_NUM_TASKS");
    /* a script of sbatch starts programs alone */
    started("SLURM_PROCID=0 SLURM_NTASKS=6 SLURM_LOCALID=0", 0, 1, 0, 1, NULL);
    started("RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2", 3, 4, 1, 2, "WORLD_SIZE");
    started("RANK=0 WORLD_SIZE=1", 0, 1, 0, 1, NULL);
    /* the first that says more than one counts */
    started("OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1 RANK=1 WORLD_SIZE=2", 1, 2, 0, 1,
            "WORLD_SIZE");
    started("OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=3 RANK=1 WORLD_SIZE=2", 1, 3, 0, 1,
            "OMPI_COMM_WORLD_SIZE");
    started("SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=1 PMI_RANK=1 PMI_SIZE=2", 1, 2, 0, 1, "PMI_SIZE");
    /* what makes no sense is as if it were not there */
    /* torchrun inside of srun: each machine's step has one task, torchrun makes
       several of it */
    started(
        "SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2 SLURM_LOCALID=0 TORCHELASTIC_RUN_ID=x RANK=13 "
        "WORLD_SIZE=16 "
        "LOCAL_RANK=5 LOCAL_WORLD_SIZE=8",
        13, 16, 5, 8, "WORLD_SIZE");
    started(
        "SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2 SLURM_LOCALID=0 RANK=13 WORLD_SIZE=16 LOCAL_RANK=5",
        1, 2, 0, 1, "SLURM_STEP_NUM_TASKS");
    started(
        "SLURM_PROCID=9 SLURM_STEP_NUM_TASKS=16 SLURM_LOCALID=1 SLURM_STEP_TASKS_PER_NODE=8(x2)", 9,
        16, 1, 8, "SLURM_STEP_NUM_TASKS");
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
    /* started as one of several, says the environment; but MPI knows nothing of the
       others */
    if (ranks == 1) {
        started("RANK=0 WORLD_SIZE=2", 0, 2, 0, 1, "WORLD_SIZE");
        x = context(1, 0, 0, 0);
        CHECK(!stx_group_join(x, NULL), "joined alone");
        refused(x, STX_ERR_DEVICE, "stx_group_join: WORLD_SIZE says that this process is one of 2",
                "the only one");
        done(x);
    }
    unset_all();
    for (i = 0; i < VARIABLES; i++) {
        if (was[i]) setenv(variables[i], was[i], 1);
        free(was[i]);
    }
}


// >>dropout

enum { B = 12, T = 8, C = 8 };

static size_t first_of(int r) {
    return (size_t)B * (size_t)r / (size_t)ranks;
}

/* What an op and its backward give: y from a, and da, with dy = some numbers. In a
   group from this rank's share of a. */
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

static void masks(void) {
    static const struct {
        const char *name;
        op_fn fn;
    } ops[] = {{"dropout", op_dropout},
               {"dropout_time", op_time},
               {"residual_norm", op_norm},
               {"attention", op_attention},
               {"recomputed dropout", op_again_dropout},
               {"recomputed attention", op_again_attention}};

    size_t k, i, lo = first_of(rank), n = first_of(rank + 1) - lo, one = T * C;
    stx_ctx *x = context(5, 1, 0, 0), *w = context(5, 0, 0, 0);
    stx_real *a = (stx_real *)malloc(2 * B * one * sizeof *a), *dy = a + B * one,
             *y = (stx_real *)malloc(4 * B * one * sizeof *y);
    for (i = 0; i < B * one; i++) {
        a[i] = (stx_real)(hashed(i, 7) - 0.5);
        dy[i] = (stx_real)(hashed(i, 8) - 0.5);
    }
    for (k = 0; k < sizeof ops / sizeof *ops; k++) {
        stx_real *all = y, *dall = y + B * one, *mine = y + 2 * B * one, *dmine = y + 3 * B * one;
        stx_tensor *in, *out;
        size_t step;
        memset(y, 0, 4 * B * one * sizeof *y);
        for (step = 0; step < 2; step++) {
            stx_begin(w, STX_EVAL);
            stx_get(w, ops[k].fn(w, stx_input(w, a, B, T, C, 0)), mine);
            stx_begin(w, STX_TRAIN);
            in = stx_variable(w, a, B, T, C, 0);
            out = ops[k].fn(w, in);
            stx_backward_from(w, out, dy);
            stx_get(w, out, all);
            stx_get_grad(w, in, dall);
            CHECK(memcmp(all, mine, B * one * sizeof *all), "%s: as in evaluation", ops[k].name);
            stx_begin(x, STX_TRAIN);
            in = stx_variable(x, a + lo * one, n, T, C, 0);
            out = ops[k].fn(x, in);
            stx_backward_from(x, out, dy + lo * one);
            stx_get(x, out, mine);
            stx_get_grad(x, in, dmine);
            CHECK(!memcmp(mine, all + lo * one, n * one * sizeof *mine)
                      && !memcmp(dmine, dall + lo * one, n * one * sizeof *mine),
                  "%s, rank %d: the share is not that of the whole: %g %g %s%s", ops[k].name, rank,
                  test_error(mine, all + lo * one, n * one, 0),
                  test_error(dmine, dall + lo * one, n * one, 0), stx_error(x), stx_error(w));
        }
    }
    { /* what all ranks have alike is dropped alike; also where there is no multiple of 8: by the mask of a context
               that is alone */
        stx_real *mine = y, *his = y + one;
        stx_begin(x, STX_TRAIN);
        stx_begin(w, STX_TRAIN);
        stx_get(x, stx_dropout_replicated(x, stx_input(x, a, 5, 7, 0, 0), 0.5), mine);
        stx_get(w, stx_dropout(w, stx_input(w, a, 5, 7, 0, 0), 0.5), his);
        CHECK(!memcmp(mine, his, 35 * sizeof *mine), "stx_dropout_replicated: another mask %s",
              stx_error(x));
        CHECK(alike(mine, 35 * sizeof *mine), "stx_dropout_replicated: not alike");
        stx_get(x, stx_dropout(x, stx_input(x, a, 5, 8, 0, 0), 0.5), mine);
        CHECK(ranks == 1 || !rank || !alike(mine, 40 * sizeof *mine), "stx_dropout is alike");
        if (ranks == 1 || !rank) alike(mine, 40 * sizeof *mine);
        /* a share that begins inside a draw */
        if (ranks > 1) {
            CHECK(!stx_dropout(x, stx_input(x, a, 5, 7, 0, 0), 0.5) || !stx_ok(x), "35 numbers");
            refused(x, STX_ERR_SHAPE, "stx_dropout: expected a multiple of 8",
                    "got 35");
            stx_begin(x, STX_TRAIN);
            stx_dropout_variational(x, stx_input(x, a, 3, 8, 4, 0), 0.5);
            refused(x, STX_ERR_SHAPE, "expected a multiple of 8", "got 12");
            stx_begin(x, STX_TRAIN);
            stx_residual_norm(x, stx_input(x, a, 1, 4, 0, 0), stx_input(x, a, 1, 4, 0, 0), 0.5,
                              stx_input(x, a, 4, 0, 0, 0), stx_input(x, a, 4, 0, 0, 0), 0);
            refused(x, STX_ERR_SHAPE, "stx_residual_norm: expected a multiple of 8", "got 4");
        }
        stx_begin(x, STX_EVAL);
        CHECK(stx_dropout(x, stx_input(x, a, 5, 7, 0, 0), 0.5) != NULL, "evaluation: %s",
              stx_error(x));
        CHECK(stx_dropout(w, stx_input(w, a, 5, 7, 0, 0), 0.5) != NULL, "without a group: %s",
              stx_error(w));
    }
    free(a);
    free(y);
    done(x);
    done(w);
}


// >>losses

/* A linear layer and a loss over B streams of one token each; weights and which rows
   are ignored by b */
enum { V = 24, D = 8 };

typedef struct loss_case {
    const char *name;
    int weights, ignore, plain, adaptive;
} loss_case;

static int left_out(const loss_case *c, size_t b) {
    size_t one = ranks > 1 ? (size_t)B / (size_t)ranks : 1;
    return c->ignore == 1   ? b < one
           : c->ignore == 2 ? b >= one && b % 2
           : c->ignore == 3 ? b != B - 1
                            : c->ignore == 4;
}

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

/* The largest deviation of parameters, over the largest number of each */
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

static void losses(void) {
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
    size_t k, i, j, lo = first_of(rank), n = first_of(rank + 1) - lo;
    for (k = 0; k < sizeof cases / sizeof *cases; k++) {
        const loss_case *c = &cases[k];
        stx_ctx *x = context(9, 1, 0, 0), *w = context(9, 0, 0, 0);
        stx_params *p = lossy_params(x), *q = lossy_params(w);
        double mine = lossy(x, p, c, lo, n), whole = lossy(w, q, c, 0, B), worst = 0, top = 1e-3;
        mine = mean_of_ranks(mine);
        CHECK(CLOSE(mine, whole, 1e-14) && (c->ignore == 4 ? !(fabs(whole) > 0) : whole > 0.1),
              "%s: %.17g, whole %.17g: %s%s", c->name, mine, whole, stx_error(x), stx_error(w));
        for (i = 0; i < p->count; i++) {
            double g[V * D];
            stx_tensor *t = p->tensor[i];
            stx_get_grad(x, t, g);
            stx_group_sum(group, g, t->size);
            for (j = 0; j < t->size; j++) {
                double want = q->tensor[i]->grad[j], off = fabs(g[j] / ranks - want);
                if (fabs(want) > top) top = fabs(want);
                if (!(off <= worst)) worst = off;
            }
        }
        CHECK(worst <= 1e-14 * top, "%s: gradients off by %g of %g", c->name, worst, top);
        report("losses", c->name, worst / top);
        done(x);
        done(w);
    }
    { /* evaluation exchanges nothing: one rank may do it alone */
        stx_ctx *x = context(9, 1, 0, 0);
        stx_params *p = lossy_params(x);
        stx_real in[2 * D] = {0};
        int32_t target[2] = {3, -1};
        stx_token_loss how;
        memset(&how, 0, sizeof how);
        how.ignore = how.mean = 1;
        how.ignored_id = -1;
        if (rank == ranks - 1) {
            stx_begin(x, STX_EVAL);
            CHECK(CLOSE(stx_item(x, stx_cross_entropy_tokens(
                                        x,
                                        stx_linear(x, stx_input(x, in, 2, D, 0, 0), p->tensor[6],
                                                   NULL, STX_ACT_NONE),
                                        stx_tokens(x, target, 2, 1), &how)),
                        log((double)V), 1e-14),
                  "alone: %s", stx_error(x));
        }
        done(x);
    }
}

/* A mean over n elements of this rank, with another n at each rank */
static void parts(void) {
    stx_ctx *x = context(9, 1, 0, 0), *alone = context(9, 0, 0, 0);
    double each = 0, sum = 0, v;
    int i, r;
    for (i = 0; i < 3; i++) {
        double n = i == 0 ? 3 + rank : i == 1 ? 7 * (rank == ranks - 1) : 0, all = 0;
        for (r = 0; r < ranks; r++) all += i == 0 ? 3 + r : i == 1 ? 7 * (r == ranks - 1) : 0;
        stx_begin(x, STX_TRAIN);
        v = stx_item(x, stx_group_loss_scale(x, n));
        each = ranks == 1 ? 1 : all > 0 ? n * ranks / all : 0;
        CHECK(CLOSE(v, each, 1e-15), "%g of %g: %g, expected %g", n, all, v, each);
        sum = mean_of_ranks(v);
        CHECK(CLOSE(sum, i < 2 || ranks == 1 ? 1 : 0, 1e-14), "all parts: %g", sum);
    }
    stx_begin(alone, STX_TRAIN);
    CHECK(CLOSE(stx_item(alone, stx_group_loss_scale(alone, 5)), 1, 0)
              && CLOSE(stx_item(alone, stx_group_loss_scale(alone, 0)), 1, 0),
          "without a group");
    done(x);
    done(alone);
}


// >>optimisers

/* y = tanh(W1 a + b1) W2^T against a target: B streams; the last one of step `bad` is
   infinite */
typedef struct small_case {
    const char *name;
    stx_optim_desc d;
    double lr;
    int bad;
} small_case;

static stx_params *small_params(stx_ctx *x) {
    stx_params *p = stx_params_create(x);
    stx_param(p, STX_NORMAL, 0.4, "w1", 72, D, 0, 0);
    stx_param(p, STX_NORMAL, 0.1, "b1", 72, 0, 0, 0);
    stx_param(p, STX_NORMAL, 0.1, "w2", 72, 72, 0, 0); /* two pieces, for shards */
    stx_param(p, STX_NORMAL, 0.1, "unused", 5, 0, 0, 0);
    return p;
}

static int small_step(stx_ctx *x, stx_optim *o, const small_case *c, int step, size_t lo, size_t n,
                      int overlap) {
    stx_params *p = o->params;
    stx_real in[B * D], want[B * 72];
    stx_tensor *y;
    size_t i;
    for (i = 0; i < n * D; i++) in[i] = (stx_real)(4 * hashed(lo * D + i, (uint64_t)step) - 2);
    for (i = 0; i < n * 72; i++)
        want[i] = (stx_real)(10 * hashed(lo * 72 + i, 1000 + (uint64_t)step) - 5);
    if (step == c->bad && lo + n == B) want[n * 72 - 1] = (stx_real)HUGE_VAL;
    stx_begin(x, STX_TRAIN);
    y = stx_linear(x, stx_input(x, in, n, D, 0, 0), p->tensor[0], p->tensor[1], STX_ACT_TANH);
    y = stx_mse(x, stx_linear(x, y, p->tensor[2], NULL, STX_ACT_NONE),
                stx_input(x, want, n, 72, 0, 0));
    if (overlap) stx_group_overlap(o);
    stx_backward(x, stx_scale(x, y, 10));
    return stx_optim_step(o, c->lr);
}

/* States of o against those of all (u's are whole): of the shares that a rank has */
static double states_apart(const stx_optim *o, const stx_optim *u) {
    double worst = 0, e;
    size_t i, k;
    for (k = 0; k < 2; k++)
        for (i = 0; i < o->count && o->state[k]; i++) {
            e = test_error(o->state[k][i]->data, u->state[k][i]->data, u->state[k][i]->size, 1e-6);
            if (!(e <= worst)) worst = e;
        }
    return worst;
}

static void optimisers(void) {
    static const small_case cases[] = {
        {"SGD, momentum, clip", {STX_SGD, 0.9, 0, 0, 0, 0.01, 1, 0, 0, 0, 0, 0}, 0.02, 7},
        {"SGD, clip_value", {STX_SGD, 0.5, 0, 0, 0, 0, 0, 0, 0, 0.05, 0, 0}, 0.05, 7},
        {"Adagrad, clip per tensor", {STX_ADAGRAD, 0, 0, 0, 0, 0, 0.5, 0, 0, 0, 0, 0}, 0.05, 7},
        {"Adam, clip", {STX_ADAM, 0, 0, 0, 0, 0.01, 0.25, 0, 0, 0, 0, 0}, 0.01, 7},
        {"Adam, clip_value and clip", {STX_ADAM, 0, 0, 0, 0, 0, 0.25, 0, 0, 0.02, 0, 0}, 0.01, 7},
        {"AdamW, eps_hat", {STX_ADAMW, 0, 0, 0, 0, 0.1, 0.25, 0, 1, 0, 0, 0}, 0.01, 0},
        {"RAdam", {STX_RADAM, 0, 0, 0, 0, 0.1, 1, 0, 0, 0, 0, 0}, 0.01, 2},
        {"RAdam, radam_skip", {STX_RADAM, 0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0}, 0.01, 7},
        {"LAMB", {STX_LAMB, 0, 0, 0, 0, 0.01, 1, 0, 0, 0, 10, 0}, 0.02, 7},
        {"LAMB, no_correction", {STX_LAMB, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1}, 0.02, 7}};
    size_t k, lo = first_of(rank), n = first_of(rank + 1) - lo, i;
    int step, kind;
    for (k = 0; k < sizeof cases / sizeof *cases; k++) {
        const small_case *c = &cases[k];

        /* plainly; overlapped, in small buckets; with shards; with shards, overlapped,
           in small buckets */
        enum { KINDS = 4 };

        stx_ctx *x[KINDS], *w = context(3, 0, 0, 0);
        stx_optim *o[KINDS], *u = stx_optim_create(small_params(w), &c->d);
        char what[96];
        for (kind = 0; kind < KINDS; kind++) {
            x[kind] = context(3, 1, kind % 2 ? 256 : 0, kind / 2);
            o[kind] = stx_optim_create(small_params(x[kind]), &c->d);
        }
        for (step = 0; step < 20; step++) {
            stx_real before[4][72 * 72];
            int made = small_step(w, u, c, step, 0, B, 0);
            CHECK(made == (step != c->bad), "%s: step %d of the whole: %d", c->name, step, made);
            for (kind = 0; kind < KINDS; kind++) {
                stx_params *p = o[kind]->params;
                int got, same = 1, zero = 1;
                for (i = 0; i < 4; i++) stx_get(x[kind], p->tensor[i], before[i]);
                got = small_step(x[kind], o[kind], c, step, lo, n, kind % 2);
                for (i = 0; i < 4; i++) {
                    size_t j;
                    same &= !memcmp(before[i], p->tensor[i]->data,
                                    p->tensor[i]->size * sizeof **before);
                    for (j = 0; j < p->tensor[i]->size; j++)
                        zero &= !(fabs(p->tensor[i]->grad[j]) > 0);
                }
                if (step == c->bad)
                    CHECK(!got && same, "%s, %d: a gradient is infinite, and rank %d steps",
                          c->name, kind, rank);
                else
                    CHECK(got && same == (c->d.radam_skip && u->step <= 5),
                          "%s, %d: step %d was not made at rank %d", c->name, kind, step, rank);
                CHECK(zero, "%s, %d: gradients stay", c->name, kind);
                CHECK(o[kind]->step == u->step && o[kind]->skipped == u->skipped,
                      "%s, %d: %d made and %d skipped", c->name, kind, (int)o[kind]->step,
                      (int)o[kind]->skipped);
                if (step != c->bad)
                    CHECK(CLOSE(o[kind]->grad_norm, u->grad_norm, 1e-12),
                          "%s, %d: norm %.17g, whole %.17g", c->name, kind, o[kind]->grad_norm,
                          u->grad_norm);
            }
        }
        CHECK(u->skipped == 1 && u->step == 19, "%s: the whole skips", c->name);
        for (kind = 0; kind < KINDS; kind++) {
            double off = apart(o[kind]->params, u->params),
                   state = kind < 2 ? states_apart(o[kind], u) : 0;
            snprintf(what, sizeof what, "%s, %d", c->name, kind);
            CHECK(off <= 1e-12 && state <= 1e-12, "%s: parameters off by %g, states by %g: %s",
                  what, off, state, stx_error(x[kind]));
            report("optimiser", what, STX_MAX(off, state));
            for (i = 0; i < 4; i++)
                CHECK(alike(o[kind]->params->tensor[i]->data,
                            o[kind]->params->tensor[i]->size * sizeof(stx_real)),
                      "%s: %s has other bits at rank %d", what, o[kind]->params->name[i], rank);
        }
        { /* shards: rank 0's file has the state of all; loaded again they go on as the others */
            stx_writer *out = rank ? NULL : stx_writer_create(x[2]);
            double size = 0;
            size_t bytes = 0;
            void *file;
            stx_file *f;
            int ok = stx_optim_save(out, o[2]);
            CHECK(ok, "%s: %s", c->name, stx_error(x[2]));
            file = rank ? NULL : stx_writer_bytes(out, &bytes);
            size = (double)bytes;
            stx_group_sum(group, &size, 1);
            if (rank) file = stx_block(x[2], (size_t)size);
            stx_group_broadcast(group, file, (size_t)size, 0);
            for (kind = 0; kind < 3; kind += 2) {
                f = stx_file_in_memory(x[kind], "states", file, (size_t)size);
                CHECK(f && stx_optim_load(o[kind], f), "%s: %s", c->name, stx_error(x[kind]));
                stx_file_close(f);
            }
            CHECK(states_apart(o[0], u) <= 1e-12 && o[0]->step == 19 && o[0]->skipped == 1,
                  "%s: the states of shards: %g", c->name, states_apart(o[0], u));
            small_step(w, u, c, 20, 0, B, 0);
            for (kind = 0; kind < 3; kind += 2) {
                small_step(x[kind], o[kind], c, 20, lo, n, 0);
                CHECK(apart(o[kind]->params, u->params) <= 1e-12,
                      "%s, %d: after states were loaded off by %g", c->name, kind,
                      apart(o[kind]->params, u->params));
            }
            stx_block_free(x[2], file);
        }
        for (kind = 0; kind < KINDS; kind++) done(x[kind]);
        done(w);
    }
}

/* What may come after stx_group_overlap, and what may not */
static void overlapped(void) {
    static const small_case c = {"", {STX_ADAM, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}, 0.01, -1};
    stx_ctx *x = context(3, 1, 256, 0), *w = context(3, 0, 0, 0);
    stx_params *p = small_params(x);
    stx_optim *o = stx_optim_create(p, &c.d), *u = stx_optim_create(small_params(w), &c.d);
    size_t lo = first_of(rank), n = first_of(rank + 1) - lo;
    stx_real in[D] = {1};
    stx_tensor *y;
    int k;
    if (ranks > 1)
        for (k = 0; k < 2; k++) {
            stx_begin(x, STX_TRAIN);
            y = stx_sum(x, stx_linear(x, stx_input(x, in, 1, D, 0, 0), p->tensor[0], p->tensor[1],
                                      STX_ACT_NONE));
            stx_group_overlap(o);
            stx_backward(x, y);
            CHECK(stx_ok(x), "%s", stx_error(x));
            if (k == 0) {
                stx_begin(x, STX_TRAIN);
                y = stx_sum(x, stx_linear(x, stx_input(x, in, 1, D, 0, 0), p->tensor[0],
                                          p->tensor[1], STX_ACT_NONE));
                stx_backward(x, y);
                refused(x, STX_ERR_ARG, "stx_backward: gradients are being sent",
                        "stx_group_overlap before the last stx_backward");
            } else {
                stx_params_zero_grad(p);
                refused(x, STX_ERR_ARG, "stx_params_zero_grad: gradients are being sent",
                        "then stx_optim_step");
            }
            CHECK(stx_optim_step(o, 0), "after the error: %s", stx_error(x));
        }
    stx_params_zero_grad(p);
    CHECK(stx_ok(x), "%s", stx_error(x));
    /* the step after is whole */
    o->update->step = 0;
    for (k = 0; k < 2 && o->state[k]; k++) {
        size_t i;
        for (i = 0; i < p->count; i++)
            memset(o->state[k][i]->data, 0, o->state[k][i]->size * sizeof(stx_real));
    }
    for (k = 0; k < 3; k++) {
        small_step(x, o, &c, k, lo, n, 1);
        small_step(w, u, &c, k, 0, B, 0);
    }
    CHECK(apart(p, u->params) <= 1e-12, "off by %g: %s", apart(p, u->params), stx_error(x));
    /* leaving with gradients under way, and with others that were to go: what comes
       after goes nowhere */
    for (k = 0; k < 2; k++) {
        stx_begin(x, STX_TRAIN);
        y = stx_sum(x, stx_linear(x, stx_input(x, in, 1, D, 0, 0), p->tensor[0], p->tensor[1],
                                  STX_ACT_NONE));
        if (k == 0) stx_group_overlap(o);
        stx_backward(x, y);
        if (k == 0) stx_group_leave(x);
        CHECK(stx_ok(x) && stx_ranks(x) == 1, "leaving with gradients under way: %s", stx_error(x));
    }
    done(x);
    x = context(3, 1, 256, 0);
    p = small_params(x);
    o = stx_optim_create(p, &c.d);
    stx_group_overlap(o);
    stx_group_leave(x);
    stx_begin(x, STX_TRAIN);
    stx_backward(x, stx_sum(x, stx_linear(x, stx_input(x, in, 1, D, 0, 0), p->tensor[0],
                                          p->tensor[1], STX_ACT_NONE)));
    CHECK(stx_ok(x) && stx_optim_step(o, 0), "overlap, then leave: %s", stx_error(x));
    done(x);
    done(w);
}


// >>parameters

static void parameters(void) {
    stx_ctx *x = context(100 + (uint64_t)rank, 1, 0, 0); /* a separate seed */
    stx_params *p = small_params(x);
    stx_real mine[72 * 72], *want = (stx_real *)malloc(72 * 72 * sizeof *want);
    size_t i;
    CHECK(ranks == 1 || !rank || !alike(p->tensor[2]->data, p->tensor[2]->size * sizeof *mine),
          "drawn alike from other seeds");
    if (ranks == 1 || !rank) alike(p->tensor[2]->data, p->tensor[2]->size * sizeof *mine);
    stx_get(x, p->tensor[2], mine);
    memcpy(want, mine, sizeof mine);
    stx_group_broadcast(group, want, sizeof mine, 0);
    CHECK(stx_group_broadcast_params(p), "%s", stx_error(x));
    for (i = 0; i < p->count; i++)
        CHECK(alike(p->tensor[i]->data, p->tensor[i]->size * sizeof *mine),
              "%s is not rank 0's at rank %d", p->name[i], rank);
    CHECK(!memcmp(want, p->tensor[2]->data, sizeof mine), "not what rank 0 had");
    if (!rank) CHECK(!memcmp(mine, p->tensor[2]->data, sizeof mine), "rank 0's changed");
    free(want);
    done(x);
    x = context(100 + (uint64_t)rank, 0, 0, 0);
    p = small_params(x);
    CHECK(stx_group_broadcast_params(p) && !memcmp(mine, p->tensor[2]->data, sizeof mine),
          "without a group they stay");
    done(x);
}


// >>files in memory

static void files(void) {
    stx_ctx *x = context(1, 0, 0, 0);
    stx_params *p = small_params(x), *q;
    stx_writer *w;
    stx_file *f;
    stx_map map;
    char path[1024];
    size_t n = 0, cut;
    unsigned char *bytes = NULL;
    int k;
    test_path(path, sizeof path, "test_group");
    for (k = 0; k < 2; k++) {
        w = stx_writer_create(x);
        CHECK(stx_params_save(w, p, "a.") && stx_writer_meta(w, "who", "rank")
                  && stx_writer_checksum(w),
              "%s", stx_error(x));
        if (k)
            bytes = (unsigned char *)stx_writer_bytes(w, &n);
        else
            CHECK(stx_writer_finish(w, path), "%s", stx_error(x));
    }
    CHECK(bytes && stx_map_open(x, &map, path) && map.size == n && !memcmp(map.data, bytes, n),
          "%zu bytes, not those of the file: %s", n, stx_error(x));
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
    for (cut = 0; cut < n; cut += cut < 600 || n - cut < 20 ? 1 : 997) {
        f = stx_file_in_memory(x, "a letter", bytes, cut);
        CHECK(!f && stx_error_code(x) == STX_ERR_FORMAT && strstr(stx_error(x), "a letter"),
              "%zu of %zu bytes: %s", cut, n, stx_error(x));
        stx_file_close(f);
        stx_clear_error(x);
    }
    bytes[n - 1] ^= 1;
    f = stx_file_in_memory(x, "a letter", bytes, n);
    CHECK(f && !stx_file_verify(f), "a bit changed");
    refused(x, STX_ERR_FORMAT, "a letter", "");
    stx_file_close(f);
    stx_block_free(x, bytes);
    CHECK(!stx_file_in_memory(x, "a letter", NULL, 8), "no bytes");
    refused(x, STX_ERR_ARG, "stx_file_in_memory", "NULL for the bytes");
    CHECK(!stx_file_in_memory(x, NULL, &n, 8), "no name");
    refused(x, STX_ERR_ARG, "stx_file_in_memory", "NULL for the name");
    CHECK(!stx_writer_bytes(NULL, &n) && n == 0, "no writer");
    w = stx_writer_create(x);
    stx_writer_add(w, "", STX_F64, 0, NULL, &n);
    stx_clear_error(x);
    CHECK(!stx_writer_bytes(w, NULL), "an add that failed");
    stx_clear_error(x);
    done(x);
}


// >>models

/* Families, through stx_lm. Each is trained in contexts of the group, in several ways,
   and as a whole */
typedef struct family {
    const char *name;
    stx_lm (*make)(stx_ctx *x, stx_params **arch);
    double clip;
    int passes; /* of backward in an update */
    int ignore; /* targets of -1: sometimes all of some streams, sometimes none */
    /* streams restart at their own times, sometimes all of a rank's and none of
       another's */
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
    d.recompute = 1;
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
    d.sru.recompute = 1;
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
    d.compress = STX_COMP_CONV;
    d.gate = STX_COMP_GRU;
    d.glu = 1;
    return stx_comp_as_lm(stx_comp_create(x, &d));
}

static stx_lm make_comp_auto(stx_ctx *x, stx_params **arch) {
    stx_comp_desc d = comp_desc();
    *arch = NULL;
    d.compress = STX_COMP_CONV;
    d.aux = STX_COMP_AUX_AUTOENCODE;
    d.aux_dropout = 0;
    d.positions = STX_COMP_XL;
    d.gate = STX_COMP_GTRXL;
    d.tied = 1;
    d.recompute = 1;
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
    *arch = m ? m->arch : NULL;
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
    d.recompute = 1;
    return par_lm(x, &d, arch);
}

static stx_lm make_par_tokens(stx_ctx *x, stx_params **arch) {
    stx_par_desc d = par_desc();
    d.blocks = 2;
    d.noise = STX_PAR_NOISE_TOKENS;
    d.noise_tokens = 3;
    d.arch = STX_PAR_PI;
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
    d.recompute = 1;
    return par_lm(x, &d, arch);
}

static const family families[] = {{"span", make_span, 0.5, 1, 0, 1},
                                  {"all-attention", make_pers, 0, 2, 0, 0},
                                  {"SRU", make_sru, 0.5, 2, 0, 1},
                                  {"SRU++", make_srupp, 0.25, 1, 0, 0},
                                  {"compressive", make_comp, 0.5, 1, 1, 1},
                                  {"compressive, autoencoder", make_comp_auto, 0, 2, 0, 1},
                                  {"PAR, noise a step", make_par_step, 0.5, 2, 0, 0},
                                  {"PAR, noise a stream", make_par_sequence, 0, 1, 0, 0},
                                  {"PAR, noise a run", make_par_tokens, 0.5, 1, 0, 1},
                                  {"PAR, a pattern", make_par, 0.25, 1, 1, 1}};

enum { FAMILIES = sizeof families / sizeof *families, STEPS = 200, SHORT = 12 };

/* of a group of one the first bits tell all */
static int steps(void) {
    return ranks > 1 ? STEPS : 2 * SHORT;
}

typedef struct run {
    const family *kind;
    stx_ctx *x;
    stx_lm lm;
    stx_optim *o, *oa; /* weights; gates */
    void *state;
    size_t lo, n; /* its streams */
    int overlap, step;
    double loss[2 * STEPS]; /* nll, what is minimised: sums over the passes */
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

/* Token at `at` of stream b: rare words are rare */
static int32_t word(size_t b, size_t at) {
    double u = hashed(b, 5000 + at);
    return (int32_t)(u * u * V);
}

static int skipped_target(size_t pass, size_t b, size_t i) {
    if (pass % 3 == 0) return 0; /* in this step none */
    /* all of the first streams, and none of the others */
    if (pass % 3 == 1) return b < 1 + pass % 7;
    return hashed(pass, 900 + 31 * b + i) < 0.2;
}

static void run_to(run *r, int end) {
    const family *f = r->kind;
    int32_t ids[B * T], targets[B * T];
    size_t b, i;
    int pass;
    for (; r->step < end; r->step++) {
        for (pass = 0; pass < f->passes; pass++) {
            size_t k = (size_t)r->step * (size_t)f->passes + (size_t)pass;
            stx_tensor *nll, *total;
            for (b = 0; b < r->n; b++) {
                if (f->resets
                    && ((k + 5 * (r->lo + b)) % 37 == 36 || (k % 41 == 8 && r->lo + b < B / 2)))
                    r->lm.state_reset_stream(r->state, b);
                for (i = 0; i < T; i++) {
                    ids[b * T + i] = word(r->lo + b, k * T + i);
                    targets[b * T + i] = f->ignore && skipped_target(k, r->lo + b, i)
                                             ? -1
                                             : word(r->lo + b, k * T + i + 1);
                }
            }
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

/* Largest deviation of a file's numbers from those of another, whose entries are the
   same */
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
        e = stx_entry_get_f64(p, v, p->count) && stx_entry_get_f64(q, w, p->count)
                ? test_error(v, w, p->count, 1e-3)
                : HUGE_VAL;
        if (!(e <= worst)) worst = e;
        free(v);
    }
    return worst;
}

typedef struct letter {
    void *bytes;
    size_t n;
    stx_file *f;
    stx_ctx *x;
} letter;

static letter letter_of(stx_ctx *x, const stx_lm *lm, const void *state) {
    stx_writer *w = stx_writer_create(x);
    letter l;
    CHECK(lm->state_save(w, state, "s."), "%s", stx_error(x));
    l.bytes = stx_writer_bytes(w, &l.n);
    l.f = stx_file_in_memory(x, "state", l.bytes, l.n);
    l.x = x;
    return l;
}

static void letter_free(letter *l) {
    stx_file_close(l->f);
    stx_block_free(l->x, l->bytes);
}

/* The memories of the streams: each rank's share against what is cut out of the whole;
   and all shares, joined at rank 0, against the whole */
static double memories_apart(const run *r, const run *w) {
    letter mine = letter_of(r->x, &r->lm, r->state), his;
    void *part = w->lm.state_create(w->lm.model, r->n, 0), *all;
    double off, e = 0;
    int from;
    CHECK(w->lm.state_copy(part, 0, w->state, r->lo, r->n), "%s", stx_error(w->x));
    his = letter_of(w->x, &w->lm, part);
    off = files_apart(mine.f, his.f);
    w->lm.state_free(part);
    letter_free(&his);
    all = rank ? NULL : r->lm.state_create(r->lm.model, B, 0);
    for (from = 0; from < ranks; from++) {
        double n = from == rank ? (double)mine.n : 0;
        size_t lo = first_of(from), streams = first_of(from + 1) - lo;
        unsigned char *bytes = (unsigned char *)mine.bytes;
        stx_group_sum(group, &n, 1);
        if (from && !rank) bytes = (unsigned char *)malloc((size_t)n);
        CHECK(stx_group_send_bytes(group, bytes, (size_t)n, from, 0), "%s", stx_error(group));
        if (!rank) {
            stx_file *f = stx_file_in_memory(r->x, "the state of a rank", bytes, (size_t)n);
            part = r->lm.state_create(r->lm.model, streams, 0);
            CHECK(f && r->lm.state_load(part, f, "s.")
                      && r->lm.state_copy(all, lo, part, 0, streams),
                  "%s", stx_error(r->x));
            r->lm.state_free(part);
            stx_file_close(f);
        }
        if (bytes != mine.bytes) free(bytes);
    }
    if (!rank) {
        letter joined = letter_of(r->x, &r->lm, all);
        his = letter_of(w->x, &w->lm, w->state);
        e = files_apart(joined.f, his.f);
        letter_free(&joined);
        letter_free(&his);
        r->lm.state_free(all);
        CHECK(!r->lm.state_copy(r->state, r->n, r->state, 0, 1), "a stream too many");
        stx_clear_error(r->x);
        if (stx_ranks(w->x) != stx_ranks(r->x))
            CHECK(!r->lm.state_copy(r->state, 0, NULL, 0, 1), "copied nothing");
        stx_clear_error(r->x);
    }
    letter_free(&mine);
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

/* All of a run against the whole, as far as both have come. The states of a sharded
   optimiser are compared elsewhere */
static void same(const char *how, const run *r, const run *w, double tol, int states) {
    double p = (apart_at = "", apart(r->lm.params, w->lm.params)),
           s = states ? states_apart(r->o, w->o) : 0, l = losses_apart(r, w);
    if (r->oa) p = STX_MAX(p, apart(r->oa->params, w->oa->params));
    if (r->oa && states) s = STX_MAX(s, states_apart(r->oa, w->oa));
    CHECK(r->step == w->step && l <= tol, "%s, %s: losses off by %g", r->kind->name, how, l);
    CHECK(p <= tol, "%s, %s: parameters off by %g (%s): %s%s", r->kind->name, how, p, apart_at,
          stx_error(r->x), stx_error(w->x));
    CHECK(s <= tol, "%s, %s: optimiser's states off by %g", r->kind->name, how, s);
    CHECK(r->o->skipped == w->o->skipped && r->o->step == w->o->step, "%s, %s: updates",
          r->kind->name, how);
    if (verbose) {
        char what[96];
        snprintf(what, sizeof what, "%s, %d steps: %s", how, r->step, apart_at);
        report(r->kind->name, what, STX_MAX(l, STX_MAX(p, s)));
    }
}

static void equal_at_all(const run *r) {
    size_t i;
    int ok = 1;
    for (i = 0; i < r->lm.params->count; i++)
        ok &= alike(r->lm.params->tensor[i]->data,
                    r->lm.params->tensor[i]->size * sizeof(stx_real));
    for (i = 0; r->oa && i < r->oa->count; i++)
        ok &= alike(r->oa->params->tensor[i]->data,
                    r->oa->params->tensor[i]->size * sizeof(stx_real));
    CHECK(ok, "%s: parameters of rank %d are not those of rank 0, to the bit", r->kind->name, rank);
}

static void bit_equal(const char *how, const run *a, const run *b) {
    size_t i;
    int ok = !memcmp(a->loss, b->loss, 2 * (size_t)STX_MIN(a->step, b->step) * sizeof *a->loss);
    for (i = 0; i < a->lm.params->count; i++)
        ok &= !memcmp(a->lm.params->tensor[i]->data, b->lm.params->tensor[i]->data,
                      a->lm.params->tensor[i]->size * sizeof(stx_real));
    for (i = 0; a->oa && i < a->oa->count; i++)
        ok &= !memcmp(a->oa->params->tensor[i]->data, b->oa->params->tensor[i]->data,
                      a->oa->params->tensor[i]->size * sizeof(stx_real));
    CHECK(ok && a->step == b->step, "%s: %s: not the same bits: %g", a->kind->name, how,
          apart(a->lm.params, b->lm.params));
}

/* A whole that rank `from` has trained becomes that of all ranks: each would come to
   the same bits, and spend the time */
static void share(run *w, int from) {
    stx_optim *o[2];
    double at[3];
    size_t i, k, j, n;
    letter l = letter_of(w->x, &w->lm, w->state);
    void *bytes = l.bytes;
    o[0] = w->o;
    o[1] = w->oa;
    for (j = 0; j < 2 && o[j]; j++) {
        const stx_params *p = o[j]->params;
        for (i = 0; i < p->count; i++) {
            n = p->tensor[i]->size * sizeof(stx_real);
            stx_group_broadcast(group, p->tensor[i]->data, n, from);
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
    at[0] = rank == from ? (double)l.n : 0;
    stx_group_sum(group, at, 1);
    if (rank != from) bytes = malloc((size_t)at[0]);
    stx_group_broadcast(group, bytes, (size_t)at[0], from);
    if (rank != from) {
        stx_file *f = stx_file_in_memory(w->x, "the state of a whole", bytes, (size_t)at[0]);
        CHECK(f && w->lm.state_load(w->state, f, "s."), "%s: %s", w->kind->name, stx_error(w->x));
        stx_file_close(f);
        free(bytes);
    }
    letter_free(&l);
}

static void models(void) {
    run *whole = (run *)malloc((2 * FAMILIES + 5) * sizeof *whole), *all = whole + FAMILIES,
        *r = all + FAMILIES, *over = r, *small = r + 1, *small_over = r + 2, *middle = r + 3,
        *shards = r + 4;
    int f, k;
    for (f = 0; f < FAMILIES; f++) {
        run_begin(whole + f, &families[f], 0, 0, 0, 0);
        if (f % ranks == rank) run_to(whole + f, SHORT);
    }
    /* a few steps: nothing but rounding, whose growth has hardly begun */
    for (f = 0; f < FAMILIES; f++) {
        run *w = whole + f, *plain = all + f;
        share(w, f % ranks);
        run_begin(plain, &families[f], 1, 0, 0, 0);
        run_begin(over, &families[f], 1, 0, 0, 1);
        run_begin(small, &families[f], 1, 256, 0, 0);
        run_begin(small_over, &families[f], 1, 256, 0, 1);
        run_begin(middle, &families[f], 1, 700, 0, 1);
        run_begin(shards, &families[f], 1, 256, 1, 1);
        run_to(plain, SHORT);
        for (k = 0; k < 5; k++) run_to(r + k, SHORT);
        same("at first", plain, w, 1e-11, 1);
        same("small buckets", small, w, 1e-11, 1);
        same("buckets between", middle, w, 1e-11, 1);
        same("shards", shards, w, 1e-11, 0);
        bit_equal("overlapped", over, plain);
        bit_equal("overlapped, small buckets", small_over, small);
        equal_at_all(small_over);
        for (k = 0; k < 5; k++) run_end(r + k);
    }
    for (f = 0; f < FAMILIES; f++)
        if (f % ranks == rank) run_to(whole + f, steps());
    for (f = 0; f < FAMILIES; f++) {
        run *w = whole + f, *plain = all + f;
        double off;
        share(w, f % ranks);
        run_to(plain, steps());
        same("at the end", plain, w, 1e-9, 1);
        equal_at_all(plain);
        off = memories_apart(plain, w);
        CHECK(off <= 1e-9, "%s: memories off by %g", families[f].name, off);
        report(families[f].name, "memories", off);
        run_end(plain);
        run_end(w);
    }
    free(whole);
}

/* A latency of which no mean over ranks is that of all streams */
static void refusals(void) {
    int k;
    for (k = 0; k < 4; k++) {
        stx_ctx *x = context(1, 1, 0, 0);
        stx_par_desc d = par_desc();
        int32_t ids[T] = {0};
        stx_params *arch;
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
        CHECK(lm.loss(lm.model, stx_tokens(x, ids, 1, T), stx_tokens(x, ids, 1, T), NULL, NULL)
                  != NULL,
              "evaluation: %s", stx_error(x));
        stx_begin(x, STX_TRAIN);
        CHECK((lm.loss(lm.model, stx_tokens(x, ids, 1, T), stx_tokens(x, ids, 1, T), NULL, NULL)
               != NULL)
                  == (ranks == 1 || k > 1),
              "%d: %s", k, stx_error(x));
        if (ranks > 1 && k < 2)
            refused(x, STX_ERR_ARG, "stx_par_segment: the latency of w", "STX_PAR_NOISE_STEP");
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
    /* of what comes after the last context has left, rank 0 counts its own; each rank
       that fails ends the run */
    stx_group_leave(group);
    if (ranks > 1) {
        long before = test_failed;
        CHECK(!stx_group_join(group, NULL), "joined again");
        refused(group, STX_ERR_DEVICE, "stx_group_join: MPI was finalised when the last context "
                                       "left",
                "only once");
        CHECK(stx_ranks(group) == 1, "a group");
        count[0] += 3 - (double)(test_failed - before);
        count[1] += (double)(test_failed - before);
    }
    stx_destroy(group);
    code = count[1] > 0 || !(count[0] > 0);
    if (!rank) printf("%.0f passed, %.0f failed\n", count[0], count[1]);
    return code;
}
