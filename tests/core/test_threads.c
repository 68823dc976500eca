/* test_threads.c - tests the threads of a context. Every iteration must run exactly
   once, even if a thread is delayed. Results must be bit-exact even on a busy machine.
   It must be possible to create and destroy contexts at any time and to use several at
   once. A child process must work after fork. Signals must be delivered only to threads
   of the caller. The test is also compiled with the thread sanitizer. The argument
   "short" reduces the number of repetitions, for builds with slower code but the same
   threads. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <sys/resource.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include "../../seqtx_attn_span.h"
#include "../inner/inner.h"
#include "../ops/kernels.h"
#include "../values.h"

static int brief;

static stx_ctx *context(int threads) {
    stx_desc d;
    memset(&d, 0, sizeof d);
    d.threads = threads;
    d.seed = 3;
    return stx_create(&d);
}

static void nap(long milliseconds) {
    struct timespec t;
    t.tv_sec = milliseconds / 1000;
    t.tv_nsec = milliseconds % 1000 * 1000000;
    nanosleep(&t, NULL);
}


// >>once: every iteration runs exactly once

typedef struct counted {
    unsigned char *times;
    size_t threads;
    int wrong;
} counted;

static void count(const stx_share *s, const void *job) {
    counted *c = (counted *)(uintptr_t)job;
    size_t i;
    if (s->thread >= c->threads || s->begin >= s->end) c->wrong = 1;
    for (i = s->begin; i < s->end; i++) c->times[i]++;
}

static const size_t works[] = {0, 40000, 100000, SIZE_MAX};

enum { WORKS = sizeof works / sizeof *works };

/* Runs n iterations and checks them. kind: an index into works[], or WORKS for
   stx_parallel_units. */
static void run_once(stx_ctx *x, int threads, size_t n, size_t kind) {
    counted c;
    size_t i, bad = 0;
    c.times = (unsigned char *)calloc(n + 1, 1);
    c.threads = (size_t)threads;
    c.wrong = 0;
    if (kind < WORKS)
        stx_parallel(x, n, works[kind], count, &c);
    else
        stx_parallel_units(x, n, count, &c);
    for (i = 0; i < n; i++) bad += c.times[i] != 1;
    CHECK(!bad && !c.times[n] && !c.wrong,
          "%d threads, %zu iterations, kind %zu: %zu did not run exactly once", threads, n, kind,
          bad);
    free(c.times);
}

static void once(void) {
    static const size_t sizes[] = {0, 1, 2, 3, 7, 64, 1000, 65535, 65536, 200001};
    static const int threads[] = {1, 2, 3, 8, 33};
    size_t i, j, k;
    for (k = 0; k < sizeof threads / sizeof *threads; k++) {
        stx_ctx *x = context(threads[k]);
        for (i = 0; i < sizeof sizes / sizeof *sizes; i++) {
            if (brief && sizes[i] > 65536) continue;
            for (j = 0; j <= WORKS; j++) run_once(x, threads[k], sizes[i], j);
        }
        stx_destroy(x);
    }
    { /* kernels also accept NULL as a context */
        counted c;
        unsigned char times[5] = {0};
        c.times = times;
        c.threads = 1;
        c.wrong = 0;
        stx_parallel(NULL, 4, SIZE_MAX, count, &c);
        CHECK(times[0] == 1 && times[3] == 1 && !times[4] && !c.wrong, "no context");
    }
}


// >>delay: other threads must run the iterations that a delayed thread has not started

typedef struct progress {
    size_t n, done, by_caller;
    pthread_mutex_t lock;
} progress;

static void be_delayed(const stx_share *s, const void *job) {
    progress *l = (progress *)(uintptr_t)job;
    int wait = s->thread != 0;
    while (wait) { /* in its first chunk, a worker waits for all other iterations */
        pthread_mutex_lock(&l->lock);
        wait = l->done + (s->end - s->begin) < l->n;
        pthread_mutex_unlock(&l->lock);
        if (wait) nap(1);
    }
    pthread_mutex_lock(&l->lock);
    l->done += s->end - s->begin;
    if (!s->thread) l->by_caller += s->end - s->begin;
    pthread_mutex_unlock(&l->lock);
}

static void delayed_thread(void) {
    stx_ctx *x = context(2);
    int k;
    for (k = 0; k < 6; k++) {
        progress l;
        memset(&l, 0, sizeof l);
        l.n = 8;
        pthread_mutex_init(&l.lock, NULL);
        if (k % 2)
            stx_parallel(x, l.n, SIZE_MAX, be_delayed, &l);
        else
            stx_parallel_units(x, l.n, be_delayed, &l);
        CHECK(l.done == l.n, "%zu of %zu done: the rest waited for a delayed thread", l.done, l.n);
        CHECK(l.by_caller >= l.n - 1, "the caller ran only %zu of %zu during the delay",
              l.by_caller, l.n);
        pthread_mutex_destroy(&l.lock);
    }
    stx_destroy(x);
}


// >>wake: sleeping threads must wake up if there is work

/* Waits until both chunks have started. */
static void meet(const stx_share *s, const void *job) {
    progress *l = (progress *)(uintptr_t)job;
    int wait = 1;
    pthread_mutex_lock(&l->lock);
    l->done += s->end - s->begin;
    pthread_mutex_unlock(&l->lock);
    while (wait) {
        pthread_mutex_lock(&l->lock);
        wait = l->done < 2;
        pthread_mutex_unlock(&l->lock);
        if (wait) nap(1);
    }
}

static void woken(void) {
    stx_ctx *x = context(2);
    int k;
    for (k = 0; k < 4; k++) {
        progress l;
        memset(&l, 0, sizeof l);
        pthread_mutex_init(&l.lock, NULL);
        stx_parallel(x, 2, SIZE_MAX, meet, &l);
        CHECK(l.done == 2, "no other thread took part, loop %d", k);
        pthread_mutex_destroy(&l.lock);
        nap(20); /* let the threads fall asleep */
    }
    stx_destroy(x);
}


// >>busy: other work on the machine must be detected

static int stop;

static void *burn(void *unused) {
    while (!__atomic_load_n(&stop, __ATOMIC_RELAXED)) {
    }
    return unused;
}

#if defined(__linux__) && !defined(TEST_TSAN)
/* A thread that sleeps in its chunk must not count as a sign of a busy machine,
   although a virtual machine whose host is busy looks the same. Another thread that
   runs on the same processor must count. */
typedef struct uneven {
    int inside, nap_ms;
} uneven;

static void one_is_delayed(const stx_share *s, const void *job) {
    uneven *u = (uneven *)(uintptr_t)job;
    struct timespec from, now;
    clock_gettime(CLOCK_MONOTONIC, &from);
    if (s->thread) __atomic_store_n(&u->inside, 1, __ATOMIC_SEQ_CST);
    if (s->thread && u->nap_ms) {
        nap(u->nap_ms);
        return;
    }
    do clock_gettime(CLOCK_MONOTONIC, &now);
    while ((s->thread || !__atomic_load_n(&u->inside, __ATOMIC_SEQ_CST))
           && (now.tv_sec - from.tv_sec) * 1000 + (now.tv_nsec - from.tv_nsec) / 1000000
                  < (s->thread ? 60 : 200));
}

static uint32_t signs(int nap_ms, int loops) {
    stx_ctx *x = context(2);
    uint32_t most = 0;
    uneven u;
    for (u.nap_ms = nap_ms; loops; loops--) {
        u.inside = 0;
        stx_parallel_units(x, 2, one_is_delayed, &u);
        most = STX_MAX(most, inner_busy(x));
    }
    stx_destroy(x);
    return most;
}

/* Returns whether this system counts involuntary context switches; sandboxes report 0.
   Shares the processor with a busy loop to find out. */
static int counts_switches(void) {
    struct rusage before, after;
    struct timespec from, now;
    memset(&before, 0, sizeof before);
    memset(&after, 0, sizeof after);
    getrusage(RUSAGE_THREAD, &before);
    clock_gettime(CLOCK_MONOTONIC, &from);
    do {
        clock_gettime(CLOCK_MONOTONIC, &now);
        getrusage(RUSAGE_THREAD, &after);
    } while (after.ru_nivcsw == before.ru_nivcsw && now.tv_sec - from.tv_sec < 3);
    return after.ru_nivcsw != before.ru_nivcsw;
}

static void other_work(void) {
    cpu_set_t all, one;
    pthread_t foreign;
    uint32_t most = 1;
    int i, switches;
    /* repeated, because this machine may have other work */
    for (i = 0; i < 30 && most; i++) most = signs(40, 3);
    /* If signs remain without a nap, the machine does have other work. */
    for (i = 0; i < 30 && most && !signs(0, 3); i++) {
    }
    CHECK(!most || i < 30, "a thread that slept in its chunk counts as other work");
    if (sched_getaffinity(0, sizeof all, &all)) return;
    for (i = 0; !CPU_ISSET(i, &all);) i++;
    CPU_ZERO(&one);
    CPU_SET(i, &one);
    CHECK(!sched_setaffinity(0, sizeof one, &one), "cannot bind to a processor");
    __atomic_store_n(&stop, 0, __ATOMIC_RELAXED);
    CHECK(!pthread_create(&foreign, NULL, burn, NULL), "no thread");
    switches = counts_switches();
    for (i = 0; i < 30 && !most && switches; i++) most = signs(0, 3);
    __atomic_store_n(&stop, 1, __ATOMIC_RELAXED);
    pthread_join(foreign, NULL);
    CHECK(most || !switches, "a busy loop on the same processor was not detected");
    sched_setaffinity(0, sizeof all, &all);
}
#else
static void other_work(void) {}
#endif


// >>bits: results must not depend on other work. The results of kernels without
// per-thread sums must not depend on the number of threads either

/* Trains a model for a few steps and copies its parameters to out (n). */
static void train(int threads, stx_real *out, size_t *n) {
    stx_ctx *x = context(threads);
    stx_span_desc d;
    stx_span *m;
    stx_optim *o;
    size_t i, k, j;
    int32_t t[4 * 97];
    memset(&d, 0, sizeof d);
    d.vocab = 31;
    d.layers = 2;
    d.dim = 64;
    d.heads = 4;
    d.span = 96;
    d.adapt_span = 1;
    d.span_init = 0.4;
    d.dropout = 0.1;
    m = stx_span_create(x, &d);
    o = stx_optim_create(stx_span_params(m), NULL);
    for (i = 0; i < 4 * 97; i++) t[i] = (int32_t)(i * i % 31);
    for (i = 0; i < (brief ? 2 : 6); i++) {
        stx_begin(x, STX_TRAIN);
        stx_backward(x, stx_span_loss(m, stx_tokens(x, t, 4, 96), stx_tokens(x, t + 1, 4, 96), NULL,
                                      NULL));
        stx_optim_step(o, 0.01);
    }
    CHECK(stx_ok(x), "%s", stx_error(x));
    for (*n = 0, i = 0; i < m->params->count; i++)
        for (k = 0, j = m->params->tensor[i]->size; k < j; k++)
            out[(*n)++] = m->params->tensor[i]->data[k];
    stx_destroy(x);
}

static void repeats(void) {
    enum { MOST = 1 << 18 };

    stx_real *a = (stx_real *)malloc(MOST * sizeof *a), *b = (stx_real *)malloc(MOST * sizeof *b);
    int threads, k;
    size_t n, m;
    for (threads = 1; threads <= 5; threads += 2) {
        pthread_t foreign[3];
        train(threads, a, &n);
        __atomic_store_n(&stop, 0, __ATOMIC_RELAXED);
        for (k = 0; k < 3; k++) CHECK(!pthread_create(foreign + k, NULL, burn, NULL), "no thread");
        train(threads, b, &m);
        __atomic_store_n(&stop, 1, __ATOMIC_RELAXED);
        for (k = 0; k < 3; k++) pthread_join(foreign[k], NULL);
        CHECK(n == m && n > 1000 && !memcmp(a, b, n * sizeof *a),
              "%d threads: a busy machine changes bits", threads);
    }
    free(a);
    free(b);
}

static void any_number(void) {
    enum { N = 700, C = 136 };

    int k;
    stx_real *in = random_values(N * C), *w = random_values(C * C), *first = NULL;
    for (k = 1; k <= 7; k += 3) {
        stx_ctx *x = context(k);
        stx_real *all = (stx_real *)calloc(4 * N * C, sizeof *all), *p = all;
        stx_gemm_args g = stx_gemm_init(0, 1, N, C, C, in, w, p);
        stx_gemm(x, &g);
        p += N * C;
        g = stx_gemm_init(1, 0, C, C, N, in, in, p);
        stx_gemm(x, &g);
        p += C * C;
        stx_sum_rows(x, p, in, N, C);
        p += C;
        stx_softmax_fwd(x, p, in, N, C);
        p += N * C;
        k_dropout_fwd(x, p, in, N * C, (stx_real)0.3, 5, 7, 0, 0);
        p += N * C;
        stx_mean_fwd(x, p, in, N * C);
        if (!first)
            first = all;
        else {
            CHECK(!memcmp(first, all, 4 * N * C * sizeof *all),
                  "%d threads: results differ from those of one", k);
            free(all);
        }
        stx_destroy(x);
    }
    free(first);
    free(in);
    free(w);
}

/* When q, k and v are the same tensor, no thread's contribution to its gradient may get
   lost. */
static void with_itself(void) {
    enum { T = 640, C = 8 };

    static stx_real a[T * C], dy[T * C], first[T * C];
    stx_ctx *x = context(3);
    int i, k;
    long bad = 0;
    for (i = 0; i < T * C; i++) {
        a[i] = (stx_real)test_rand();
        dy[i] = (stx_real)test_rand();
    }
    for (k = 0; k < (brief ? 25 : 400); k++) {
        stx_attention_in in;
        stx_attention_desc d;
        stx_tensor *t;
        memset(&in, 0, sizeof in);
        memset(&d, 0, sizeof d);
        d.heads = 1;
        stx_begin(x, STX_TRAIN);
        t = stx_variable(x, a, 1, T, C, 0);
        in.q = in.k = in.v = t;
        stx_backward_from(x, stx_attention(x, &in, &d), dy);
        if (!stx_ok(x)) break;
        if (!k)
            memcpy(first, t->grad, sizeof first);
        else
            bad += memcmp(first, t->grad, sizeof first) != 0;
    }
    CHECK(stx_ok(x) && !bad, "%ld of %d gradients of self-attention differ from the first",
          bad, k);
    stx_destroy(x);
}


// >>contexts can be created and destroyed at any time

static void come_and_go(void) {
    int i;
    stx_ctx *kept = context(3);
    unsigned char times[512];
    for (i = 0; i < 200; i++) {
        stx_ctx *x = context(i % 5 + 1);
        counted c;
        size_t n, bad = 0;
        memset(times, 0, sizeof times);
        c.times = times;
        c.threads = 5;
        c.wrong = 0;
        if (i % 3) stx_parallel(i % 2 ? x : kept, 512, SIZE_MAX, count, &c);
        if (i % 50 == 49) nap(5); /* let the threads fall asleep */
        stx_destroy(x);
        for (n = 0; n < 512 && i % 3; n++) bad += times[n] != 1;
        CHECK(!bad && !c.wrong, "context %d: iterations did not run exactly once", i);
    }
    stx_destroy(kept);
    stx_destroy(NULL);
}

static void processors(void) {
#ifdef __linux__
    cpu_set_t all, one;
    stx_ctx *x = context(0);
    int k;
    CHECK(!sched_getaffinity(0, sizeof all, &all), "sched_getaffinity");
    CHECK(stx_threads(x) == CPU_COUNT(&all), "%d threads, %d processors", stx_threads(x),
          CPU_COUNT(&all));
    stx_destroy(x);
    for (k = 0; !CPU_ISSET(k, &all); k++) {
    }
    CPU_ZERO(&one);
    CPU_SET(k, &one);
    sched_setaffinity(0, sizeof one, &one);
    x = context(0);
    CHECK(stx_threads(x) == 1, "%d threads on one processor", stx_threads(x));
    stx_destroy(x);
    sched_setaffinity(0, sizeof all, &all);
#endif
}


// >>fork: the child has no worker threads and must run all iterations itself

static void forked(void) {
#ifndef TEST_TSAN /* the thread sanitizer does not support fork with threads */
    stx_ctx *x = context(4);
    unsigned char times[4096];
    counted c;
    size_t n, k;
    pid_t child;
    int status = -1;
    c.times = times;
    c.threads = 4;
    c.wrong = 0;
    memset(times, 0, sizeof times);
    stx_parallel(x, 4096, SIZE_MAX, count, &c);
    nap(5);
    child = fork();
    if (!child) {
        alarm(1800); /* ends a hang; see tests/limit.sh */
        for (k = 0; k < 5; k++) {
            memset(times, 0, sizeof times);
            stx_parallel(x, 4096, SIZE_MAX, count, &c);
            for (n = 0; n < 4096; n++)
                if (times[n] != 1) _exit(1);
        }
        stx_destroy(x);
        _exit(0);
    }
    CHECK(child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status)
              && WEXITSTATUS(status) == 0,
          "the child ended with status %d", status);
    memset(times, 0, sizeof times);
    stx_parallel(x, 4096, SIZE_MAX, count, &c);
    for (n = k = 0; n < 4096; n++) k += times[n] != 1;
    CHECK(!k, "the parent after fork: %zu iterations did not run exactly once", k);
    stx_destroy(x);
#endif
}


// >>signals must be delivered only to threads of the caller

static pthread_t main_thread;
static volatile sig_atomic_t here, elsewhere;

static void on_signal(int number) {
    (void)number;
    if (pthread_equal(pthread_self(), main_thread))
        here++;
    else
        elsewhere++;
}

static void signals(void) {
    stx_ctx *x = context(6);
    unsigned char times[64] = {0};
    counted c;
    sigset_t set, old;
    int i;
    main_thread = pthread_self();
    signal(SIGUSR1, on_signal);
    c.times = times;
    c.threads = 6;
    c.wrong = 0;
    stx_parallel(x, 64, SIZE_MAX, count, &c);
    sigemptyset(&set);
    sigaddset(&set, SIGUSR1);
    /* The main thread blocks the signal, so no other thread may receive it. */
    pthread_sigmask(SIG_BLOCK, &set, &old);
    for (i = 0; i < 20; i++) {
        kill(getpid(), SIGUSR1);
        nap(1);
    }
    CHECK(!elsewhere && !here, "%d signals were delivered to a thread of the library",
          (int)elsewhere);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    CHECK(here == 1 && !elsewhere, "%d signals on the main thread, %d on others", (int)here,
          (int)elsewhere);
    stx_destroy(x);
}

int main(int argc, char **argv) {
    brief = argc > 1 && !strcmp(argv[1], "short");
    once();
    delayed_thread();
    woken();
    other_work();
    repeats();
    any_number();
    with_itself();
    come_and_go();
    processors();
    forked();
    signals();
    return test_end();
}
