/* test_minutes.c - runs with --minutes (examples/train/lm_minutes.h) on a clock that the
   test sets: the learning rate follows the share of the time, whatever a step takes.

   Prints failures and, in the last line, "N passed, N failed". */

#define _XOPEN_SOURCE 700
#include <time.h>

static double clock_now;      /* seconds */

static int set_clock(clockid_t id, struct timespec *t) {
    (void)id;
    t->tv_sec = (time_t)clock_now;
    t->tv_nsec = (long)((clock_now - (double)t->tv_sec) * 1e9);
    return 0;
}

#define TR_LM
#define clock_gettime set_clock
#include "../../examples/train.h"
#include "../test.h"

static tr_lm_opt opt;

static tr_opt table[] = {
    TR_GROUP("Training"),
    TR_REAL("minutes", TR_FREE, &opt.minutes, 0, 1e6, "the time of the run"),
    TR_TEXT("plan", TR_FREE, &opt.plan, "the lengths that a run chose"),
    TR_SIZE("lr-warmup", TR_FREE, &opt.lr_warmup, 0, TR_INF, "updates of the warm-up"),
    TR_SIZE("eval-blocks", TR_FREE, &opt.eval_blocks, 0, TR_INF, "blocks of an evaluation"),
    TR_END};

static tr_options options = {"prog", "Tests --minutes.", table, NULL, "lr-warmup=60", NULL, "",
                             NULL, NULL};

enum { MOST = 100000, WINDOW = 20 };

static tr_lm t;
static double lr_of[MOST + 1];  /* the learning rate of each update of the last run */
static double furthest;         /* the largest difference of progress and the share of the time */

static void options_of(const char *line) {
    char text[64], *argv[8];
    int n = 1;
    snprintf(text, sizeof text, "prog %s", line);
    argv[0] = strtok(text, " ");
    while (n < 8 && (argv[n] = strtok(NULL, " ")) != NULL) n++;
    EXPECT(tr_parse(&options, n, argv, t.err, TR_ERR) == 1);
}

/* Begins a run of `minutes` with a warm-up of 60 updates, or the number in `line`. */
static void begin(const char *line, int schedule) {
    memset(&t, 0, sizeof t);
    memset(&opt, 0, sizeof opt);
    options_of(line);
    t.options = &options;
    t.opt = &opt;
    t.best = t.best_seen = (double)NAN;
    t.schedule.kind = schedule;
    t.schedule.lr = 0.01;
    t.schedule.lr_min = 0.0001;
    t.steps = 1000;
    tr_term_open(&t.term, NULL);
    EXPECT(tr_lm_begin_plan(&t));
    t.began = clock_now;
    tr_rate_start(&t.rate, clock_now);
    furthest = 0;
}

/* How many seconds a step takes that begins at `at` seconds of the run. */
typedef double (*pace)(uint64_t step, double at);

/* Trains until the run ends, or until `until` seconds. Evaluates at each tenth of the
   run, which takes `evaluation` seconds. */
static void train(pace seconds, double evaluation, double until) {
    const double start = t.began - t.used;
    while (t.step < t.steps && t.step < MOST && clock_now - start < until) {
        uint64_t fits;
        double share;
        lr_of[t.step + 1] = tr_lm_rate(&t);
        clock_now += seconds(t.step + 1, clock_now - start);
        fits = tr_lm_fitting_steps(&t, t.step + 1);
        t.step++;
        if (fits) tr_lm_replan(&t, fits);
        tr_lm_follow_plan(&t);
        tr_rate_add(&t.rate, tr_seconds(), 1, 1);
        share = (t.used + clock_now - t.began) / (60 * opt.minutes);
        if (opt.plan) continue;
        if (t.step > t.first + WINDOW && t.step < t.steps)
            furthest = fmax(furthest, fabs(tr_lm_progress(&t, t.step) - share));
        if (!tr_lm_due(&t, 0, 10) || t.step >= t.steps) continue;
        clock_now += evaluation;
        tr_lm_skip_time(&t);
    }
}

/* Nonzero if the learning rate rises once, to its peak, and never falls by a jump of more
   than `jump` of the peak. */
static int falls_smoothly(double jump) {
    uint64_t n = 1;
    while (n < t.step && lr_of[n + 1] > lr_of[n]) n++;
    if (!(lr_of[n] > 0.0098)) return 0;
    for (; n < t.step; n++) {
        if (lr_of[n + 1] > lr_of[n] || lr_of[n] - lr_of[n + 1] > jump * 0.01) {
            printf("update %d of %d: %.6f after %.6f\n", (int)n + 1, (int)t.step, lr_of[n + 1],
                   lr_of[n]);
            return 0;
        }
    }
    return 1;
}

/* The steps of a run are repeated by its plan alone, with the same learning rates. */
static void check_plan(const char *line, int schedule) {
    static double before[MOST + 1];
    const uint64_t steps = t.step;
    static char text[1 << 15];
    tr_buf b;
    memset(&b, 0, sizeof b);
    memcpy(before, lr_of, sizeof before);
    tr_lm_plan_text(&t, &b);
    snprintf(text, sizeof text, "%s", b.s);
    tr_buf_free(&b);
    begin(line, schedule);
    opt.plan = text;
    EXPECT(tr_lm_begin_plan(&t));
    train(NULL, 0, 0);
    while (t.step < t.steps) {
        lr_of[t.step + 1] = tr_lm_rate(&t);
        t.step++;
        tr_lm_follow_plan(&t);
    }
    EXPECT(t.step == steps && !memcmp(lr_of, before, (size_t)(steps + 1) * sizeof *lr_of));
}

static double steady(uint64_t step, double at) {
    (void)at;
    return (step == 1 ? 0.1 : 0.02) + 0.004 * (double)(step * 7 % 5);
}

/* Another program takes the processors from second 20 to 30. */
static double busy(uint64_t step, double at) {
    return steady(step, at) * (at > 20 && at < 30 ? 25 : 1);
}

static double slower(uint64_t step, double at) {
    return steady(step, at) * (at > 40 ? 20 : 1);
}

static double faster(uint64_t step, double at) {
    return steady(step, at) * (at < 40 ? 20 : 1);
}

static double hiccups(uint64_t step, double at) {
    return steady(step, at) + (step % 97 == 50 ? 1.5 : 0);
}

static double long_steps(uint64_t step, double at) {
    return 20 * steady(step, at);
}

static double paused(uint64_t step, double at) {
    return step == 700 ? 100 : steady(step, at);
}

static void run_of(const char *name, pace seconds, double evaluation, double near, double jump) {
    static const int kinds[] = {STX_LR_COSINE, STX_LR_RECURSIVE};
    static const char *const lines[] = {"--minutes 1", "--minutes 1 --lr-warmup 30"};
    int k;
    for (k = 0; k < 4; k++) {
        const double from = clock_now;
        begin(lines[k % 2], kinds[k / 2]);
        train(seconds, evaluation, HUGE_VAL);
        CHECK(falls_smoothly(jump), "%s", name);
        CHECK(lr_of[t.step] < 0.000101, "%s: the last rate is %g", name, lr_of[t.step]);
        CHECK(furthest < near, "%s: progress is %.3f from the time", name, furthest);
        CHECK(fabs(clock_now - from - 60) < 60 * near, "%s: %g s", name, clock_now - from);
        CHECK(t.plan_count <= 250, "%s: %d entries", name, (int)t.plan_count);
        check_plan(lines[k % 2], kinds[k / 2]);
    }
}

/* A pause is no training time: the run continues where it was. */
static void test_pause(void) {
    const double from = clock_now;
    FILE *said = tmpfile();
    char text[4096];
    size_t n;
    begin("--minutes 1", STX_LR_COSINE);
    tr_term_open(&t.term, said);
    train(paused, 0.2, HUGE_VAL);
    EXPECT(falls_smoothly(0.03) && lr_of[t.step] < 0.000101);
    EXPECT(fabs(clock_now - from - 160) < 1.5);
    if (!EXPECT(said != NULL)) return;
    rewind(said);
    n = fread(text, 1, sizeof text - 1, said);
    text[n] = 0;
    EXPECT(strstr(text, "step 700 took 100 seconds") != NULL);
    fclose(said);
}

/* Saves the plan to a file, and continues it in a run with the options of `line`. */
static void resume(const char *line) {
    const char *tmp = getenv("TMPDIR");
    char path[512];
    const uint64_t step = t.step;
    stx_ctx *x = stx_create(NULL);
    stx_writer *w = stx_writer_create(x);
    stx_file *f;
    stx_schedule schedule = t.schedule;
    snprintf(path, sizeof path, "%.400s/seqtx_minutes.%ld", tmp && *tmp ? tmp : "/tmp",
             (long)getpid());
    EXPECT(tr_lm_save_plan(&t, w) && stx_writer_finish(w, path));
    clock_now += 12345;
    begin(line, schedule.kind);
    t.x = x;
    t.step = t.first = step;
    f = stx_file_open(x, path);
    EXPECT(f && tr_lm_load_plan(&t, f));
    stx_file_close(f);
    stx_destroy(x);
    t.x = NULL;
    remove(path);
}

/* A resumed run has the rest of the time, and its learning rate continues, also on a
   machine of another speed and with expensive evaluations. */
static void test_resumed(void) {
    static const pace second[] = {steady, long_steps};
    int k;
    for (k = 0; k < 4; k++) {
        const double evaluation = k % 2 ? 2 : 0.1;
        double from = clock_now;
        begin("--minutes 1", STX_LR_COSINE);
        train(steady, evaluation, 31);
        resume("--minutes 1");
        from += 12345;
        train(second[k / 2], evaluation, HUGE_VAL);
        EXPECT(falls_smoothly(0.12) && lr_of[t.step] < 0.000101);
        CHECK(fabs(clock_now - from - 60) < 1 + evaluation, "%g s", clock_now - from);
        CHECK(furthest < 0.08, "progress is %.3f from the time", furthest);
    }
}

/* With more minutes, the schedule continues at the share of the new time that is over. */
static void test_more_minutes(void) {
    uint64_t end;
    double from = clock_now;
    begin("--minutes 1", STX_LR_COSINE);
    train(steady, 0.1, HUGE_VAL);
    end = t.step;
    resume("--minutes 2");
    from += 12345;
    EXPECT(fabs(tr_lm_progress(&t, t.step) - 0.5) < 0.01 && tr_lm_rate(&t) > 0.004);
    train(steady, 0.1, HUGE_VAL);
    EXPECT(t.step > 2 * end - end / 20 && fabs(clock_now - from - 120) < 1.5);
    EXPECT(lr_of[t.step] < 0.000101);
    for (; end + 1 < t.step; t.step--) EXPECT(lr_of[t.step] <= lr_of[t.step - 1]);
}

int main(void) {
    run_of("equal steps", steady, 0.1, 0.03, 0.02);
    run_of("expensive evaluations", steady, 2, 0.07, 0.02);
    run_of("a busy machine", busy, 0.1, 0.04, 0.03);
    run_of("slower", slower, 0.1, 0.04, 0.03);
    run_of("faster", faster, 0.1, 0.07, 0.05);
    run_of("single slow steps", hiccups, 0.1, 0.06, 0.05);
    run_of("few steps", long_steps, 0.1, 0.07, 0.06);
    test_pause();
    test_resumed();
    test_more_minutes();
    return test_end();
}
